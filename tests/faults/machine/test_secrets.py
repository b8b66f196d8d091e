"""Secrets that a user's environment and caches hold: a whole run of two ranks writes, prints and
passes on none."""

from __future__ import annotations

import os
import secrets
import stat
import string
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from launch.base import text as base_text
from launch.run_folder.layout import RunDir
from tests import builders

LETTERS = string.ascii_letters + string.digits


def drawn(prefix: str, length: int = 36) -> str:
    return prefix + "".join(secrets.choice(LETTERS) for _ in range(length))


@pytest.fixture
def canaries() -> dict[str, str]:
    """Variables with a secret of their own in each; the proxy's has a password in its address."""
    names = (
        "HF_TOKEN",
        "WANDB_API_KEY",
        "AWS_SECRET_ACCESS_KEY",
        "GITHUB_TOKEN",
        "DATABASE_PASSWORD",
        "MY_ODD_NAME",
    )
    found = {name: drawn("hf_" if name == "HF_TOKEN" else "canary") for name in names}
    return {**found, "https_proxy": f"http://user:{drawn('canary')}@proxy:3128"}


def texts_of_processes(tag: str) -> Iterator[tuple[str, bytes, bytes]]:
    """(pid, command line, environment) of every process that carries the run's tag."""
    for process in psutil.process_iter():
        try:
            folder = Path("/proc") / str(process.pid)
            environment = (folder / "environ").read_bytes()
            if b"LOWMEM_RUN=" + tag.encode() in environment:
                yield str(process.pid), (folder / "cmdline").read_bytes(), environment
        except (OSError, psutil.NoSuchProcess):
            continue


def holders(folder: Path, needles: list[bytes]) -> list[Path]:
    return [
        path
        for path in folder.rglob("*")
        if path.is_file() and any(one in path.read_bytes() for one in needles)
    ]


@pytest.mark.shows(
    "F49",
    "secrets in the environment and the token file; every process of the run was read, and that"
    " some were",
)
def test_no_secret_is_written_printed_or_passed_on(tmp_path, canaries):
    stored = drawn("hf_")
    cache = tmp_path / "hf"
    cache.mkdir()
    (cache / "token").write_text(stored)
    out = tmp_path / "out"
    recipe = builders.recipe(
        out, training={"max_steps": 30, "save_steps": 10}, launch={"num_processes": 2}
    )
    environment = builders.environment(out / "workspace", **canaries, HF_HOME=str(cache))
    seen: dict[str, tuple[bytes, bytes]] = {}
    with subprocess.Popen(
        [sys.executable, "-m", "launch", "run", str(recipe)],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    ) as child:
        watcher = threading.Thread(target=_watch, args=(child, out, seen))
        watcher.start()
        assert child.stdout is not None
        said = child.stdout.read()
    watcher.join()
    assert child.returncode == 0, said.decode()
    needles = [value.rpartition("@")[0].rpartition(":")[2] or value for value in canaries.values()]
    needles = [needle.encode() for needle in [*needles, stored]]
    assert len([1 for argv, _ in seen.values() if b"--run-dir" in argv]) >= 3, (
        "launcher and ranks were looked at"
    )
    assert not [
        argv
        for argv, variables in seen.values()
        for needle in needles
        if needle in argv + variables
    ]
    assert not [needle for needle in needles if needle in said]
    assert list(out.rglob("optimizer.pt"))
    assert holders(out, needles) == []


def _watch(child: subprocess.Popen[bytes], out: Path, seen: dict[str, tuple[bytes, bytes]]) -> None:
    while child.poll() is None:
        for run in (out / "workspace/runs/tiny").glob("*"):
            for pid, argv, environment in texts_of_processes(RunDir(run).tag):
                seen[pid + str(len(argv))] = argv, environment
        time.sleep(0.05)


@pytest.mark.shows("F49", "a secret in an argument; without the redactor it shows")
def test_a_secret_in_a_message_is_not_shown_and_without_the_redactor_it_would_be(
    tmp_path, canaries
):
    """The same start twice; the second time with the redactor taken out, which must show: the test
    can fail."""
    token = canaries["HF_TOKEN"]
    for folder in (tmp_path / "plain", tmp_path / "mutated"):
        recipe = builders.recipe(folder)
        words = [
            "run",
            str(recipe),
            "--resume",
            f"/nowhere/{token}/{canaries['DATABASE_PASSWORD']}",
        ]
        start = "import sys; from launch.__main__ import main; sys.exit(main(sys.argv[1:]))"
        if folder.name == "mutated":
            start = f"import launch.base.text; launch.base.text.shown = lambda text: text; {start}"
        argv = [sys.executable, "-c", start, *words]
        environment = builders.environment(folder / "workspace", **canaries)
        done = subprocess.run(
            argv, env=environment, cwd=builders.CODE, capture_output=True, text=True
        )
        assert done.returncode == 5
        is_hidden = token not in done.stderr and canaries["DATABASE_PASSWORD"] not in done.stderr
        assert is_hidden == (folder.name == "plain"), done.stderr
    assert "[secret]" in base_text.shown(
        f"a {drawn('ghp_')} b {drawn('hf_')} c AKIAIOSFODNN7EXAMPLE d"
    )


@pytest.mark.parametrize(
    ("words", "place"),
    [
        (["--training.hub_token=SECRET"], "training.hub_token"),
        (["--training.my_api_key=SECRET"], "training.my_api_key"),
        (["--output_dir=/tmp/SECRET"], "output_dir"),
        (["--model.path=SECRET"], "model.path"),
        (["--model.freeze=[a, SECRET]"], "model.freeze"),
    ],
)
def test_a_recipe_that_holds_a_secret_is_refused_without_showing_it(tmp_path, words, place):
    token = drawn("hf_")
    recipe = builders.recipe(tmp_path)
    done = builders.launch(
        tmp_path / "workspace",
        "run",
        str(recipe),
        *(word.replace("SECRET", token) for word in words),
    )
    assert done.returncode == 2
    assert place in done.stderr
    assert token not in done.stderr + done.stdout
    assert holders(tmp_path, [token.encode()]) == []


def test_a_variable_that_the_user_names_reaches_the_ranks(tmp_path):
    recipe = builders.recipe(
        tmp_path, training={"max_steps": 1}, launch={"pass_env": ["MY_ODD_NAME"]}
    )
    text = recipe.read_text()
    assert "MY_ODD_NAME" in text
    (tmp_path / "site").mkdir()
    (tmp_path / "site/sitecustomize.py").write_text(
        "import os\nopen(os.environ['PYTHON_SEEN'],"
        " 'a').write(str(os.environ.get('MY_ODD_NAME')) + '\\n')\n"
    )
    seen = tmp_path / "seen"
    environment = builders.environment(
        tmp_path / "workspace", MY_ODD_NAME="mine", PYTHON_SEEN=str(seen)
    )
    environment["PYTHONPATH"] = f"{builders.CODE}{os.pathsep}{tmp_path / 'site'}"
    done = subprocess.run(
        [sys.executable, "-m", "launch", "run", str(recipe)], env=environment, capture_output=True
    )
    assert done.returncode == 0, done.stderr
    assert seen.read_text().splitlines().count("mine") >= 3  # the launcher, accelerate, the rank


def test_what_a_run_writes_is_its_users_alone_and_leaves_no_core(tmp_path):
    recipe = builders.recipe(tmp_path, training={"max_steps": 4})
    workspace = tmp_path / "workspace"
    done = subprocess.run(
        [
            "bash",
            "-c",
            'umask 000; ulimit -c unlimited; exec "$@"',
            "-",
            sys.executable,
            "-m",
            "launch",
            "run",
            str(recipe),
        ],
        env=builders.environment(workspace),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    written = [
        path for folder in (workspace, tmp_path / "model") for path in (folder, *folder.rglob("*"))
    ]
    assert len(written) > 40
    loose = [
        path
        for path in written
        if path != workspace and path.lstat().st_mode & (stat.S_IRWXG | stat.S_IRWXO)
    ]
    assert loose == []


@pytest.mark.shows(
    "F48", "a symbolic link of another user in a shared folder; the link's owner is in the message"
)
def test_a_name_that_somebody_else_put_into_a_shared_folder_is_refused(tmp_path):
    if os.geteuid() != 0:
        pytest.skip("needs root, to be somebody else")
    shared, victim = tmp_path / "shared", tmp_path / "victim"
    shared.mkdir()
    shared.chmod(0o1777)
    victim.mkdir()
    recipe = builders.recipe(tmp_path)
    for name in ("model", ".model.tmp"):
        link = shared / name
        link.symlink_to(victim)
        os.lchown(link, 4242, 4242)
        done = builders.launch(
            tmp_path / "workspace", "run", str(recipe), f"--output_dir={shared / 'model'}"
        )
        assert done.returncode == 3, done.stdout
        assert f"{link}: belongs to user 4242" in done.stderr
        link.unlink()
    (shared / "workspace").mkdir()
    (shared / "workspace").chmod(0o1777)
    (shared / "workspace/runs").symlink_to(victim)
    os.lchown(shared / "workspace/runs", 4242, 4242)
    done = builders.launch(shared / "workspace", "run", str(recipe))
    assert done.returncode == 3, done.stdout
    assert list(victim.iterdir()) == []
