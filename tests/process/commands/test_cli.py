"""A mistake is one line and a documented exit code, before anything slow."""

from __future__ import annotations

import json
import re
import shlex
import signal
import subprocess
import sys
import tomllib
from importlib.util import find_spec
from pathlib import Path

import pytest

from launch.__main__ import VERBS, main
from launch.probe import import_memory
from launch.probe.import_memory import ASSUMED
from tests import builders
from tests.process.forked_starts import launch

TRITON_BYTES = 75 << 20  # of its library


def wrapper(workspace: Path, *words: str, **extra: str) -> subprocess.CompletedProcess[str]:
    """./train_sft_custom.sh as a user runs it, on this interpreter."""
    argv = [str(builders.CODE / "train_sft_custom.sh"), *words]
    return subprocess.run(
        argv,
        env=builders.environment(workspace, PYTHON=sys.executable, **extra),
        capture_output=True,
        text=True,
        timeout=60,
    )


def is_one_line(done: subprocess.CompletedProcess[str], exit_code: int) -> str:
    assert done.returncode == exit_code, done.stdout + done.stderr
    assert done.stderr.startswith("error: ")
    assert done.stderr.count("\n") == 1
    return done.stderr


def without_torch(folder: Path) -> str:
    """PYTHONPATH with which an import of torch, or of a library that imports it, ends the start."""
    folder.mkdir()
    for name in ("torch", "transformers", "accelerate", "deepspeed", "datasets"):
        (folder / f"{name}.py").write_text(f"raise SystemExit('{name} is imported')")
    return f"{folder}:{builders.CODE}"


@pytest.mark.parametrize("batch", ["0", "-1", "abc", "1e9", "1.5", "70000"])
def test_a_batch_that_is_none_is_refused_in_one_line_before_torch_is_imported(tmp_path, batch):
    path = without_torch(tmp_path / "libraries")
    done = launch(tmp_path / "workspace", "run", "sft_fast", batch, PYTHONPATH=path)
    said = is_one_line(done, 2)
    assert f"batch size '{batch}' is not a whole number from 1 to 65536" in said


@pytest.mark.parametrize(
    ("words", "instead"),
    [
        (["--dryrun"], "--dry-run"),
        (["--dry_run"], "--dry-run"),
        (["--resum", "never"], "--resume=never"),
        (["--lr"], "--training.learning_rate=VALUE"),
        (["--lr=3e-5"], "--training.learning_rate=3e-5"),
        (["--learning_rate", "3e-5"], "--training.learning_rate=3e-5"),
        (["--lerning-rate", "3e-5"], "--training.learning_rate=3e-5"),
        (["--batch_size", "4"], "--training.per_device_train_batch_size=4"),
        (["--epochs", "3"], "--training.num_train_epochs=3"),
        (["--model", "t5-tiny"], "--model.shape=t5-tiny"),
        (["--model", "/my models/x"], "'--model.path=/my models/x'"),
        (["--packing"], "--data.packing=true"),
        (["--training.bf16"], "--training.bf16=true"),
    ],
)
def test_a_flag_that_there_is_not_is_answered_with_a_line_that_can_be_pasted(
    capsys, words, instead
):
    assert main(["run", "sft_fast", *words]) == 2
    line = capsys.readouterr().err.strip()
    assert line.startswith(f"error: {words[0].partition('=')[0]}: ")
    assert shlex.split(line.partition("; write ")[2]) == shlex.split(instead)


def test_help_lists_every_verb_with_one_line(tmp_path):
    done = launch(tmp_path, "--help", COLUMNS="200")
    assert done.returncode == 0
    for verb, (module, _) in VERBS.items():
        assert re.search(rf"^ +{verb} +\w+.+$", done.stdout, re.MULTILINE)
        assert (builders.CODE / "launch" / "commands" / f"{module.replace('.', '/')}.py").is_file()


def test_version_is_that_of_the_project(capsys):
    with pytest.raises(SystemExit, match="0"):
        main(["--version"])
    project = tomllib.loads((builders.CODE / "pyproject.toml").read_text("utf-8"))["project"]
    assert capsys.readouterr().out.strip() == project["version"]


def test_keys_lists_a_section_with_types_defaults_and_meanings(capsys):
    assert main(["keys", "lora"]) == 0
    text = capsys.readouterr().out
    assert "lora.r: a whole number, more than 0; default 16\n    Rank of the adapters.\n" in text
    assert "data." not in text
    assert main(["keys", "lor"]) == 2
    assert "did you mean lora?" in capsys.readouterr().err


BEFORE_RANKS = " while no rank ran; what is tokenised and saved stays"


@pytest.mark.parametrize(
    ("number", "exit_code", "line", "end"),
    [
        (signal.SIGINT, 130, ["run", "sft_fast"], BEFORE_RANKS),
        (signal.SIGTERM, 75, ["plan", "sft_fast"], BEFORE_RANKS),
        (signal.SIGHUP, 75, ["plan", "sft_fast"], BEFORE_RANKS),
        (signal.SIGUSR1, 75, ["plan", "sft_fast"], BEFORE_RANKS),
        (signal.SIGTERM, 75, ["evaluate", "model", "--file", "rows.jsonl"], ""),
        (signal.SIGTERM, 75, ["export", "model", "--to", "gguf"], ""),
    ],
)
def test_a_stop_signal_during_the_imports_ends_with_a_documented_exit_code(
    tmp_path, number, exit_code, line, end
):
    (tmp_path / "pydantic").mkdir()
    (tmp_path / "pydantic" / "__init__.py").write_text(
        f"import os, time\nos.kill(os.getpid(), {int(number)})\ntime.sleep(60)\n"
    )
    path = f"{tmp_path}:{builders.CODE}"
    done = builders.launch(tmp_path / "workspace", *line, PYTHONPATH=path)
    again = f"error: stopped by {number.name}{end}; run the same line again\n"
    assert is_one_line(done, exit_code) == again


@pytest.mark.parametrize(
    ("words", "exit_code", "expected"),
    [
        (["--training.lerning_rate=1"], 2, "did you mean learning_rate"),
        (["--lora=true"], 2, "--lora: no such flag; write --lora.r=VALUE"),
        (
            ["--training={seed: 3, optim: sgd}"],
            2,
            "--training: a section is no flag; write --training.seed=3 --training.optim=sgd",
        ),
        (["--trainin={seed: 3}"], 2, "--trainin: a section is no flag; write --training.seed=3"),
        (
            ["--training={max_step: 3}"],
            2,
            "--training: a section is no flag; write each of its keys as --training.KEY=VALUE;"
            " training.max_step: found an unknown key, expected a field of TrainingArguments; did"
            " you mean max_steps?",
        ),
        (["--lora={rang: 8}"], 2, "expected a key of lora; python -m launch keys lora lists"),
        (["--lora={}"], 2, "as --lora.KEY=VALUE; python -m launch keys lora lists them"),
        (["--model={shape: a, 3: 4}"], 2, "error: --model: found the key 3, expected a word"),
        (["--bogus"], 2, "--bogus: no such flag or key; python -m launch keys lists the keys"),
        (["-training.seed=3"], 2, "-training.seed: flags have two dashes; write --training.seed=3"),
        (["-n"], 2, "-n: flags have two dashes; see python -m launch run --help"),
        (
            ["--tokenizer.path=/nowhere"],
            3,
            "/nowhere; give one, or leave it out; of a model on a hub, python -m launch download",
        ),
        (["--training.lr_scheduler_type=foo"], 2, "lr_scheduler_type"),
        (["4", "--training.per_device_train_batch_size=7"], 2, "both given"),
        (["--model.shape=t5-tny"], 2, "t5-tiny"),
        (["--data.train_file=nowhere.parquet"], 4, "nowhere.parquet"),
        (["--model.path=/nowhere"], 3, "no folder /nowhere"),
        (["--resume", "/nowhere"], 5, "no run of ours there"),
        (["--training.fp16=true"], 2, "no effect on a CPU"),
        (["--output_dir=/etc"], 3, "holds files that no run of ours wrote"),
        (["--training.deepspeed=ds.json"], 2, "deepspeed"),
    ],
)
def test_a_wrong_word_is_one_line_that_names_it(tmp_path, words, exit_code, expected):
    assert expected in is_one_line(launch(tmp_path, "run", "sft_fast", *words), exit_code)


def test_a_column_that_is_missing_is_said_with_those_that_were_found(tmp_path):
    recipe = builders.recipe(
        tmp_path, data={"prompt_column": "promt", "response_column": "response"}
    )
    path = without_torch(tmp_path / "libraries")
    said = is_one_line(launch(tmp_path / "workspace", "run", str(recipe), PYTHONPATH=path), 4)
    assert "promt" in said
    assert "prompt, response" in said


def test_a_folder_that_holds_someone_elses_files_is_never_replaced(tmp_path):
    recipe = builders.recipe(tmp_path)
    (tmp_path / "model").mkdir()
    (tmp_path / "model/thesis.tex").write_text("years of work")
    assert "thesis" not in is_one_line(launch(tmp_path / "workspace", "run", str(recipe)), 3)
    assert (tmp_path / "model/thesis.tex").read_text() == "years of work"


@pytest.mark.parametrize(
    "words",
    [
        ["--dry-run", "20"],
        ["--training.learning_rate", "3e-5", "20", "--resume", "never", "--dry-run"],
    ],
)
def test_a_batch_size_stands_before_or_behind_flags_and_keys(tmp_path, words):
    done = launch(tmp_path, "run", "sft_fast", *words)
    assert done.returncode == 0, done.stderr
    assert "20 per device" in done.stdout


@pytest.mark.parametrize(
    ("package", "version"), [("torch", "2.9.1+cu128"), ("transformers", "5.2.0")]
)
def test_a_package_that_is_too_old_to_be_trusted_with_files_is_refused(tmp_path, package, version):
    known = tmp_path / "old" / f"{package}-{version}.dist-info"
    known.mkdir(parents=True)
    (known / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: {version}\n")
    path = f"{tmp_path / 'old'}:{builders.CODE}"
    recipe = builders.recipe(tmp_path)
    said = is_one_line(launch(tmp_path / "workspace", "run", str(recipe), PYTHONPATH=path), 3)
    assert f"{package} {version} is installed, expected" in said


def test_doctor_says_each_fact_with_its_reason(tmp_path):
    done = builders.launch(tmp_path, "doctor")
    assert done.returncode == 0
    for word in (
        "GPUs:",
        "host memory limit:",
        "CPUs:",
        "/dev/shm:",
        "disk free:",
        "imports: a rank takes",
    ):
        assert word in done.stdout
    measured = import_memory.measured_or_assumed(tmp_path / ".cache", "cpu")
    assert measured.reason == "measured here"
    # bitsandbytes loads its library where the package is, as it is for the tests of Liger
    of_triton = TRITON_BYTES if find_spec("triton") else 0
    constants = (
        ASSUMED.rank_bytes,
        ASSUMED.agent_bytes,
        ASSUMED.launcher_bytes,
        ASSUMED.prepare_bytes,
        ASSUMED.mapped_bytes + of_triton,
    )
    assert (
        measured.rank_bytes,
        measured.agent_bytes,
        measured.launcher_bytes,
        measured.prepare_bytes,
        measured.mapped_bytes,
    ) == pytest.approx(constants, rel=0.1)


def test_a_run_is_planned_for_a_machine_one_does_not_have(tmp_path):
    machine = str(builders.CODE / "configs/machines/2x3080-20g-16g.yaml")
    done = launch(tmp_path, "plan", "sft_fast", "20", "--machine", machine)
    assert done.returncode == 0, done.stderr
    assert "20 per device x 2 accumulation x 2 processes = 80 effective" in done.stdout
    assert "187,692,288 parameters, 94,396,032 trained" in done.stdout


def test_a_plan_in_json_is_the_plan_that_a_dry_run_writes(tmp_path):
    machine = launch(tmp_path, "plan", "sft_fast", "--json", "--launch.mode=cpu")
    assert (machine.returncode, machine.stderr) == (0, "")
    done = launch(tmp_path, "run", "sft_fast", "--dry-run", "--launch.mode=cpu")
    assert done.returncode == 0, done.stderr
    (file,) = tmp_path.glob("runs/sft_fast/dry-run/plan.json")
    printed, written = json.loads(machine.stdout), json.loads(file.read_text())
    assert printed.keys() - {"facts"} == written.keys()
    for key in ("strategy", "phases", "rejected", "lengths"):
        assert printed[key] == written[key], key


def test_a_refusal_of_a_plan_in_json_leaves_stdout_empty(tmp_path):
    for words, code in ((("sft_fast", "--explain"), 2), (("llama-8b",), 2)):
        done = launch(tmp_path, "plan", *words, "--json")
        assert (done.returncode, done.stdout) == (code, "")
        assert done.stderr.startswith("error: ")


def test_dry_run_writes_the_run_folder_and_prints_a_line_that_can_be_pasted(tmp_path):
    done = wrapper(tmp_path, "20", "--dry-run")
    assert done.returncode == 0, done.stderr
    run = builders.only_run(tmp_path, "sft_fast")
    line = done.stdout.strip().splitlines()[-1]
    assert str(run) in line
    assert line in (run / "command.sh").read_text()
    for name in ("recipe.yaml", "plan.json", "accelerate.yaml"):
        assert (run / name).exists()
    assert "per_device_train_batch_size 16 ->" not in done.stdout
    assert "20 per device" in done.stdout
