"""Code that lies where our commands look is not run: each canary writes a file when it runs, and
`proof` says whether it did. docs/security.md names the test of each place."""

from __future__ import annotations

import io
import json
import os
import pickle
import shutil
import signal
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jinja2
import pyarrow as pa
import pyarrow.feather
import pyarrow.parquet as pq
import pytest
import yaml

from launch.base import files
from launch.run_folder import manifest
from tests import builders, stopping

BIN = Path(sys.executable).parent
SCRIPT = str(builders.CODE / "train_low_mem.py")
LAUNCH = (sys.executable, "-P", "-m", "launch")
# what a Python imports at its start, or a library looks for without being asked
ASKED_FOR = {"sitecustomize", "usercustomize", "launch", "training", "matplotlib", "IPython"}
SHORT = {"max_steps": 3, "save_steps": 2, "warmup_steps": 0, "dataloader_num_workers": 1}


class Canary:
    """Code in each form in which it could be planted; `sang` says whether any of it ran."""

    def __init__(self, file: Path) -> None:
        self.file = file

    @property
    def python(self) -> str:
        """Runs also before there is `open`: in place of Python's own `encodings`."""
        opened = f"posix.open({str(self.file)!r}, posix.O_CREAT | posix.O_WRONLY)"
        return f"import posix\nposix.close({opened})\n"

    @property
    def shell(self) -> str:
        return f"touch '{self.file}'"

    @property
    def script(self) -> str:
        return f"#!/bin/sh\n{self.shell}\n"

    @property
    def yaml(self) -> str:
        return f'!!python/object/apply:os.system ["{self.shell}"]'

    @property
    def template(self) -> str:
        return f'{{{{ cycler.__init__.__globals__.os.popen("{self.shell}").read() }}}}'

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (self.shell,)

    def sang(self) -> bool:
        there = self.file.exists()
        self.file.unlink(missing_ok=True)
        return there


@pytest.fixture
def canary(tmp_path) -> Iterator[Canary]:
    """Silent at the end of each test, whatever it did."""
    made = Canary(tmp_path / "proof")
    yield made
    assert not made.sang(), "planted code was run"


def start(
    folder: Path, *argv: str, cwd: Path | None = None, **extra: str
) -> subprocess.CompletedProcess[str]:
    env = builders.environment(folder / "workspace", **extra)
    return subprocess.run(
        argv, env=env, cwd=cwd or folder, capture_output=True, text=True, timeout=300
    )


def write(path: Path, content: str | bytes, mode: int = 0o600) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    path.chmod(mode)
    return path


# ---- the folder of the start, the home, programs
# ---------------------------------------------------------------------------


def plant_modules(folder: Path, canary: Canary) -> None:
    """A canary in place of each module of Python and of its packages, and a .pth file."""
    packages = Path(pa.__file__).parents[1]
    names = (sys.stdlib_module_names - set(sys.builtin_module_names)) | ASKED_FOR
    names |= {path.stem for path in packages.iterdir() if path.suffix in ("", ".py")}
    for name in names:
        if name.isidentifier():
            write(folder / f"{name}.py", canary.python)
    write(folder / "canary.pth", canary.python.replace("\n", ";"))


def plant_git(folder: Path, canary: Canary) -> Path:
    """A checkout whose configuration and hooks run programs, and a program `git` in bin/."""
    subprocess.run(["git", "init", "--quiet", folder], check=True)
    hook = write(folder / ".git/hooks/post-index-change", canary.script, 0o700)
    for key in ("core.fsmonitor", "core.pager", "diff.external"):
        subprocess.run(["git", "-C", folder, "config", key, str(hook)], check=True)
    return write(folder / "bin/git", canary.script, 0o700).parent


def plant_home(home: Path, canary: Canary) -> None:
    """Start-up files of programs and libraries, which nothing of ours is to read."""
    for name in (".pythonrc.py", ".pdbrc", ".ipython/profile_default/startup/00.py"):
        write(home / name, canary.python)
    for name in (".profile", ".bashrc", ".bash_profile"):
        write(home / name, canary.shell)
    write(home / ".config/matplotlib/matplotlibrc", f"backend: {canary.yaml}")
    write(home / "hf/accelerate/default_config.yaml", f"num_processes: {canary.yaml}")
    write(home / ".deepspeed_env", f"PYTHONSTARTUP={home / '.pythonrc.py'}")
    modules = home / "hf/modules/transformers_modules/__init__.py"
    write(modules, canary.python)


def planted(folder: Path, canary: Canary) -> dict[str, str]:
    """A folder of the start that is full of canaries; the variables with which it is met."""
    plant_modules(folder, canary)
    programs = plant_git(folder, canary)
    plant_home(folder / "home", canary)
    shutil.copy(folder / "home/.deepspeed_env", folder)
    return {
        "PATH": f"{programs}:{os.environ['PATH']}",
        "HOME": str(folder / "home"),
        "HF_HOME": str(folder / "home/hf"),
        "PYTHONSTARTUP": str(folder / "home/.pythonrc.py"),
    }


def test_each_canary_sings_where_it_is_run(tmp_path, canary):
    """Without this, silence would show nothing."""
    extra = planted(tmp_path / "here", canary)
    for argv in (
        [sys.executable, "-c", "import random"],
        ["git", "-c", "safe.directory=*", "status"],
        ["sh", str(tmp_path / "here/home/.bashrc")],
        [sys.executable, "-c", f"import site; site.addsitedir({str(tmp_path / 'here')!r})"],
    ):
        env = {**os.environ, "PATH": extra["PATH"] if argv[0] == "git" else os.environ["PATH"]}
        subprocess.run(argv, cwd=tmp_path / "here", env=env, capture_output=True)
        assert canary.sang(), argv
    subprocess.run(["git", "-C", tmp_path / "here", "status"], capture_output=True)
    assert canary.sang()
    yaml.unsafe_load(canary.yaml)
    assert canary.sang()
    pickle.loads(pickle.dumps(canary))
    assert canary.sang()
    jinja2.Environment().from_string(canary.template).render()
    assert canary.sang()


FLAGS = (
    *("train", "--is_finetune=True", "--use_fast_config=True", "--batch_size_per_gpu=3"),
    *("--model.shape=llama-tiny", "--training.max_steps=2", "--training.bf16=false"),
    "--data.validation_file=null",
)
RECIPE = ("{folder}/tiny.yaml", "--name=planted", "--output_dir={folder}/model")
LINES = {
    "two ranks": (*LAUNCH, "run", *RECIPE, "--launch.num_processes=2"),
    "deepspeed": (*LAUNCH, "run", *RECIPE, "--launch.mode=deepspeed_zero2"),
    "wrapper": (
        *("bash", str(builders.CODE / "train_sft_custom.sh"), "4", "--model.shape=llama-tiny"),
        *("--training.max_steps=2", "--data.train_file={folder}/train.parquet"),
        *("--data.validation_file=null", "--output_dir={folder}/model"),
    ),
    "python": (sys.executable, SCRIPT, *FLAGS, "--train_file={folder}/train.parquet"),
    "accelerate": (
        *(sys.executable, str(BIN / "accelerate"), "launch", "--cpu", "--num_processes", "2"),
        *(SCRIPT, *FLAGS, "--train_file={folder}/train.parquet"),
    ),
    "torchrun": (
        *(sys.executable, str(BIN / "torchrun"), "--standalone", "--nproc_per_node=2"),
        *(SCRIPT, *FLAGS, "--train_file={folder}/train.parquet"),
    ),
    "tune": (*LAUNCH, "tune", "{folder}/tiny.yaml"),
    "show": (*LAUNCH, "show", "{folder}/tiny.yaml"),
    "doctor": (*LAUNCH, "doctor"),
}


@pytest.mark.parametrize("line", LINES)
def test_nothing_in_the_folder_of_the_start_or_in_the_home_is_run(tmp_path, canary, line):
    """Modules, sitecustomize, .pth files, start-up files, git's hooks, libraries' own settings."""
    folder, here = tmp_path / "data", tmp_path / "here"
    builders.recipe(folder, training=SHORT)
    extra = planted(here, canary)
    argv = [word.format(folder=folder) for word in LINES[line]]
    done = start(tmp_path, *argv, cwd=here, PYTHON=sys.executable, **extra)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Traceback" not in done.stderr


# ---- checkpoints, run folders, caches
# ---------------------------------------------------------------------------


@pytest.fixture(scope="module")
def stopped(tmp_path_factory) -> Path:
    """A run that was stopped after two checkpoints; tests work on copies of its folder."""
    folder = tmp_path_factory.mktemp("stopped")
    traces = {"LOWMEM_TRACES": str(folder / "workspace/.cache/traces")}
    with stopping.launched(folder, 1, extra=traces) as child:
        child.until("two checkpoints", lambda: len(child.committed()) >= 2)
        child.process.send_signal(signal.SIGTERM)
        assert child.wait() == 75, child.said()
    return folder


@pytest.fixture
def copied(stopped, tmp_path) -> Path:
    """The folder of a run, in which every path of the first one is this one's."""
    folder = tmp_path / "copied"
    shutil.copytree(stopped, folder)
    (run,) = (folder / "workspace/runs/tiny").glob("[0-9]*")
    for file in (folder / "tiny.yaml", *run.glob("*.*")):
        if file.suffix in (".yaml", ".json", ".sh"):
            file.write_text(file.read_text().replace(str(stopped), str(folder)))
    return folder


def again(folder: Path, *words: str, **extra: str) -> subprocess.CompletedProcess[str]:
    """The same line again, for a few steps more."""
    traces = {"LOWMEM_TRACES": str(folder / "workspace/.cache/traces")}
    argv = (*LAUNCH, "run", str(folder / "tiny.yaml"), *words)
    return start(folder, *argv, **traces, **extra)


def checkpoints(folder: Path) -> list[Path]:
    return sorted((folder / "workspace/runs/tiny").glob("*/checkpoints/checkpoint-*"))


PICKLES = ("optimizer.pt", "scheduler.pt", "rng_state.pth")


def plant_pickle(checkpoint: Path, name: str, canary: Canary) -> None:
    import torch

    torch.save({"state": canary}, checkpoint / name)
    (checkpoint / name).chmod(0o600)


@pytest.mark.shows("F21", "a pickle that calls os.system in each file that a rank unpickles")
@pytest.mark.parametrize("name", [*PICKLES, "training_args.bin", "custom_checkpoint_0.pkl"])
def test_a_pickle_in_the_newest_checkpoint_is_not_opened_and_the_one_before_it_is_used(
    copied, canary, name
):
    *_, older, newest = checkpoints(copied)
    plant_pickle(newest, name, canary)
    done = again(copied, "--dry-run")
    assert done.returncode == 0, done.stderr
    assert f"{newest.name}/{name}" in done.stdout
    pasted = done.stdout.strip().splitlines()[-1]
    with stopping.ended(
        stopping.Child(copied, ("bash", "-c", pasted), copied / "workspace", copied / "out")
    ) as child:
        child.until("it goes on", lambda: f"resuming from {older.name}" in child.said())
        child.until("a checkpoint", lambda: child.committed()[-1] > int(newest.name[11:]))


@pytest.mark.shows("F21", "the same, in checkpoints with the valid seal of another key", code=5)
@pytest.mark.parametrize("name", PICKLES)
def test_a_pickle_under_the_seal_of_another_key_is_refused_and_never_run_where_it_is_allowed(
    copied, canary, tmp_path, monkeypatch, name
):
    own = os.environ["LOWMEM_KEY"]
    monkeypatch.setenv("LOWMEM_KEY", str(tmp_path / "theirs"))
    for checkpoint in checkpoints(copied):
        plant_pickle(checkpoint, name, canary)
        described = manifest.read(checkpoint)
        size, digest = (checkpoint / name).stat().st_size, files.sha256(checkpoint / name)
        described["files"][name] = {"bytes": size, "sha256": digest}
        described["seal"] = manifest.seal(described)
        files.write_json(checkpoint / manifest.FILE, described)
        assert manifest.fault(checkpoint) is None, "it is no valid seal of their key"
    monkeypatch.setenv("LOWMEM_KEY", own)
    refused = again(copied)
    assert refused.returncode == 5, refused.stdout + refused.stderr
    assert refused.stderr.startswith("error: ")
    assert "does not have the seal of your key" in refused.stderr
    allowed = again(copied, "--resume.allow=[seal]", TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD="1")
    assert allowed.returncode == 5, allowed.stdout + allowed.stderr
    assert "holds more than tensors and plain values; nothing of it was run" in allowed.stdout
    assert "posix.system" in allowed.stdout


@pytest.mark.parametrize(
    ("name", "code"),
    [
        *(("accelerate.yaml", 0), ("command.sh", 0), ("recipe.yaml", 0), ("evidence.json", 0)),
        *(("recipe.json", 5), ("plan.json", 5), ("tokens.json", 5)),
    ],
)
def test_code_in_the_files_of_a_run_folder_is_not_run(copied, canary, name, code):
    """Files of a run are read as data; its command line is made anew."""
    (run,) = (copied / "workspace/runs/tiny").glob("[0-9]*")
    content = {".yaml": f"x: {canary.yaml}\n", ".sh": canary.script}
    write(run / name, content.get(Path(name).suffix, pickle.dumps(canary)))
    done = again(copied, "--dry-run")
    assert done.returncode == code, done.stdout + done.stderr
    assert code == 0 or name in done.stderr
    assert "Traceback" not in done.stderr


LEDGERS = ("ledger.jsonl", "ledger.sqlite")
CACHES = ("tokens", "traces", *LEDGERS)


@pytest.mark.parametrize("name", CACHES)
def test_pickles_in_the_place_of_cached_files_are_not_opened(copied, canary, name):
    place = copied / "workspace/.cache" / name
    cached = [path for path in place.rglob("*") if path.is_file()]
    assert cached or name in LEDGERS, f"nothing is cached in {place}"
    for file in cached or [place]:
        write(file, pickle.dumps(canary))
    done = again(copied, "--dry-run")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Traceback" not in done.stderr


# ---- recipes, templates, data, model folders
# ---------------------------------------------------------------------------


@pytest.mark.parametrize("verb", ["plan", "run"])
def test_a_tag_in_a_recipe_is_refused_by_its_line(tmp_path, canary, verb):
    recipe = builders.recipe(tmp_path)
    recipe.write_text(f"{recipe.read_text()}\ndescription: {canary.yaml}\n")
    done = start(tmp_path, *LAUNCH, verb, str(recipe))
    assert done.returncode == 2, done.stdout + done.stderr
    assert done.stderr.startswith(f"error: {recipe}")
    assert done.stderr.count("\n") == 1


TALK = [{"role": "user", "content": "1?"}, {"role": "assistant", "content": "2"}]
ESCAPES = (
    "{canary}",
    "{{% set x = ''.__class__.__mro__[1].__subclasses__() %}}{{{{ x }}}}{canary}",
    "{{{{ messages.__class__.__init__.__globals__ }}}}{canary}",
    "{{{{ self._TemplateReference__context.cycler.__init__.__globals__.os }}}}{canary}",
    "{{% import 'os' as os %}}{canary}",
)


@pytest.mark.parametrize("escape", range(len(ESCAPES)))
def test_a_chat_template_stays_in_its_sandbox(tmp_path, canary, escape):
    template = write(tmp_path / "t.jinja", ESCAPES[escape].format(canary=canary.template))
    rows = [{"messages": TALK}] * 8
    recipe = builders.recipe(tmp_path, training=SHORT)
    file = builders.write_parquet(tmp_path / "talks.parquet", rows)
    words = (f"--data.train_file={file}", "--data.validation_file=null")
    done = start(
        tmp_path, *LAUNCH, "run", str(recipe), *words, f"--tokenizer.chat_template={template}"
    )
    assert done.returncode == 4, done.stdout + done.stderr
    assert str(template) in done.stdout + done.stderr
    assert "Traceback" not in done.stdout + done.stderr


def extended(canary: Canary) -> pa.Table:
    """A column of the type that pyarrow before 14.0.1 unpickled when it was read."""
    facts = {
        b"ARROW:extension:name": b"arrow.py_extension_type",
        b"ARROW:extension:metadata": pickle.dumps(canary),
    }
    table = pa.Table.from_pylist(builders.rows(8))
    fields = [field.with_metadata(facts) for field in table.schema]
    pandas = {b"pandas": pickle.dumps(canary), b"huggingface": pickle.dumps(canary)}
    return table.cast(pa.schema(fields, metadata=pandas))


def packed(file: Path, canary: Canary) -> Path:
    """A WebDataset whose members are pickles, which its own library would open."""
    with tarfile.open(file, "w") as made:
        for number, row in enumerate(builders.rows(8)):
            for suffix, content in (
                ("json", json.dumps(row).encode()),
                *((suffix, pickle.dumps(canary)) for suffix in ("pkl", "pyd", "pth", "npy")),
            ):
                member = tarfile.TarInfo(f"{number}.{suffix}")
                member.size = len(content)
                made.addfile(member, io.BytesIO(content))
    return file


@pytest.mark.parametrize("kind", ["parquet", "arrow", "webdataset", "folder"])
def test_code_that_comes_with_data_is_not_run(tmp_path, canary, kind):
    recipe, data = builders.recipe(tmp_path, training=SHORT), tmp_path / "rows"
    data.mkdir()
    words = ["--data.validation_file=null"]
    if kind == "parquet":
        pq.write_table(extended(canary), data / "a.parquet")
    elif kind == "arrow":
        pyarrow.feather.write_feather(
            extended(canary), data / "a.arrow", compression="uncompressed"
        )
    elif kind == "webdataset":
        packed(data / "a.tar", canary)
        words.append("--data.ignore_columns=[pkl,pyd,pth,npy]")
    else:
        builders.write_parquet(data / "a.parquet", builders.rows(8))
    for name in ("rows.py", "__init__.py", "sitecustomize.py"):  # datasets ran rows/rows.py
        write(data / name, canary.python)
    write(data / "README.md", f"---\nconfigs: {canary.yaml}\n---\n")
    place = next(data.glob("a.*")) if kind != "folder" else data
    done = start(tmp_path, *LAUNCH, "run", str(recipe), f"--data.train_file={place}", *words)
    assert "Traceback" not in done.stdout + done.stderr
    assert done.returncode == 0, done.stdout + done.stderr
    events = builders.events(builders.only_run(tmp_path / "workspace"))
    assert [event["step"] for event in events] == [1, 2, 3]


def test_code_beside_a_model_that_may_be_used_is_not_run(tmp_path, canary):
    """Trained from it, and asked."""
    recipe = builders.recipe(tmp_path, training=SHORT)
    done = start(tmp_path, *LAUNCH, "run", str(recipe))
    assert done.returncode == 0, done.stdout + done.stderr
    model = tmp_path / "model"
    for name in ("modeling_llama.py", "tokenization.py", "custom_generate/generate.py"):
        write(model / name, canary.python)
    write(model / "training_args.bin", pickle.dumps(canary))
    asked = start(tmp_path, sys.executable, str(builders.CODE / "scripts/chat.py"), str(model), "1")
    assert asked.returncode == 0, asked.stderr
    words = (f"--model.path={model}", "--model.shape=null", f"--output_dir={tmp_path / 'next'}")
    done = start(tmp_path, *LAUNCH, "run", str(recipe), "--name=next", *words)
    assert done.returncode == 0, done.stdout + done.stderr
