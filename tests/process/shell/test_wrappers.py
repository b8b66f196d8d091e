"""The scripts in the root of the repository: what a user types reaches `python -m launch` as it was
typed."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.process

REPO = Path(__file__).resolve().parents[3]
WRAPPERS = sorted(REPO.glob("*.sh"))
HOSTILE_FOLDER = 'a b\'c "d"'
HOSTILE_ARGUMENTS = [
    "20",
    "",
    "two words",
    'it\'s "quoted"',
    "$(touch pwned)",
    "`touch pwned`",
    "$HOME ${PATH} \\n \\",
    "line\nbreak\n",
    "-n",
    "--dry-run",
    "--",
    "*",
    "~",
    "; touch pwned",
    "训练 ü 🚀",
]
STUB = """
import json, os, sys
print(json.dumps({
    "argv": sys.argv[1:], "cwd": os.getcwd(), "root": os.environ["LOWMEM_ROOT"], "file": __file__,
    "stdin": sys.stdin.read(), "batch": os.environ.get("BATCH_SIZE"),
}))
sys.exit(7)
"""


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """The wrappers of this repository around a `launch` that prints what it was given."""
    root = tmp_path / HOSTILE_FOLDER
    (root / "scripts/lib").mkdir(parents=True)
    shutil.copy(REPO / "scripts/lib/bootstrap.sh", root / "scripts/lib")
    for wrapper in WRAPPERS:
        shutil.copy(wrapper, root)
    (root / "launch").mkdir()
    (root / "launch/__init__.py").touch()
    (root / "launch/__main__.py").write_text(STUB)
    return root


def run(program: Path | str, *args: str, cwd: Path, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [program, *args],
        cwd=cwd,
        env={"PATH": os.environ["PATH"], "PYTHON": sys.executable, **env},
        input="typed",
        capture_output=True,
        text=True,
        encoding="utf-8",
        timeout=60,
    )


STARTS = {
    "quick_start_sft_fast.sh": ["run", "sft_fast"],
    "train_sft_custom.sh": ["run", "sft_fast"],
    "run_single_gpu.sh": ["run", "single_gpu", "--from-environment"],
    "run_single_gpu_optimized.sh": ["run", "single_gpu_optimized", "--from-environment"],
}


def test_every_wrapper_is_known_here():
    assert set(STARTS) == {wrapper.name for wrapper in WRAPPERS}


@pytest.mark.parametrize("name", STARTS)
def test_arguments_stdin_and_exit_code_pass_unchanged_and_the_user_stays_in_their_folder(
    root: Path, tmp_path: Path, name: str
):
    elsewhere = tmp_path / "else where"
    (elsewhere / "launch").mkdir(parents=True)  # the user's own folder of that name is not ours
    (elsewhere / "launch/__main__.py").write_text("print('the wrong launch')")
    done = run(root / name, *HOSTILE_ARGUMENTS, cwd=elsewhere)
    assert done.returncode == 7, done.stderr
    assert json.loads(done.stdout) == {
        "argv": [*STARTS[name], *HOSTILE_ARGUMENTS],
        "cwd": str(elsewhere),
        "root": str(root),
        "file": str(root / "launch/__main__.py"),
        "stdin": "typed",
        "batch": None,
    }
    assert not (elsewhere / "pwned").exists()


def test_a_wrapper_without_arguments_passes_none(root: Path):
    done = run(root / "train_sft_custom.sh", cwd=root)
    assert json.loads(done.stdout)["argv"] == ["run", "sft_fast"]


def test_a_wrapper_works_through_links_and_with_cdpath(root: Path, tmp_path: Path):
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/train").symlink_to(root / "train_sft_custom.sh")
    (tmp_path / "link").symlink_to(root)
    for program in (
        tmp_path / "bin/train",
        tmp_path / "link/train_sft_custom.sh",
        "./train_sft_custom.sh",
    ):
        done = run(program, "24", cwd=root, CDPATH="/usr:/tmp")
        seen = json.loads(done.stdout)
        assert (seen["argv"], seen["root"]) == (["run", "sft_fast", "24"], str(root))


@pytest.mark.parametrize("value", ["48", "$(touch pwned)", "", "a b"])
def test_the_guides_variables_arrive_from_the_environment_and_from_a_line_in_the_file(
    root: Path, value: str
):
    wrapper = root / "run_single_gpu.sh"
    given = json.loads(run(wrapper, cwd=root, BATCH_SIZE=value).stdout)["batch"]
    text = wrapper.read_text()
    exported = next(
        line for line in text.splitlines() if line.startswith("export MODEL_SIZE BATCH_SIZE")
    )
    wrapper.write_text(text.replace(exported, f"{exported}\nBATCH_SIZE='{value}'"))
    edited = json.loads(run(wrapper, cwd=root).stdout)["batch"]
    assert given == edited == value
    assert not (root / "pwned").exists()


def test_the_users_pythonpath_comes_after_the_repository(root: Path, tmp_path: Path):
    (tmp_path / "mine/launch").mkdir(parents=True)
    (tmp_path / "mine/launch/__main__.py").write_text("print('the wrong launch')")
    done = run(root / "quick_start_sft_fast.sh", cwd=root, PYTHONPATH=str(tmp_path / "mine"))
    assert json.loads(done.stdout)["file"] == str(root / "launch/__main__.py")


@pytest.mark.parametrize("wrapper", WRAPPERS, ids=lambda wrapper: wrapper.name)
def test_a_wrapper_is_executable_short_and_ends_in_one_exec(wrapper: Path):
    lines = wrapper.read_text().splitlines()
    assert os.access(wrapper, os.X_OK)
    assert len(lines) <= 20
    assert lines[0] == "#!/usr/bin/env bash"
    assert "set -euo pipefail" in lines
    assert [line for line in lines if line.startswith("exec ")] == lines[-1:]


def test_shellcheck_is_silent():
    shellcheck = Path(sys.executable).with_name("shellcheck")
    if not shellcheck.exists():
        pytest.skip("shellcheck is not installed beside this Python (requirements-dev.txt)")
    scripts = [
        *WRAPPERS,
        REPO / ".ci/run",
        *REPO.glob("configs/slurm/*"),
        *(REPO / "scripts").rglob("*.sh"),
    ]
    done = subprocess.run([shellcheck, "-x", *scripts], cwd=REPO, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "")
