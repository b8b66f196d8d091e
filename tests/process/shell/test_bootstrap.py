"""scripts/lib/bootstrap.sh, run in copies of the repository: real venvs, a real pip, a wheel made
here, no network."""

from __future__ import annotations

import atexit
import hashlib
import os
import re
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

from tests import cards

pytestmark = pytest.mark.process

REPO = Path(__file__).resolve().parents[3]
HOSTILE = 'a b\'c "d"'
# A first start makes a venv: 4 s on 2 quiet cores.
PATIENCE_S = 120
SOURCE = 'set -euo pipefail; ROOT="$1"; source "$1/scripts/lib/bootstrap.sh"; '
BASE_PATH = f"{sys.base_prefix}/bin:/usr/bin:/bin"
REQUIREMENTS = "--no-index\n--find-links wheels\n"


def write_wheel(
    folder: Path, version: str, name: str = "tiny", module: str = "", needs: str = ""
) -> None:
    info = f"{name.replace('-', '_')}-{version}.dist-info"
    required = f"Requires-Dist: {needs}\n" if needs else ""
    files = {
        f"{module or name}.py": f"version = {version!r}\nname = {name!r}\n",
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{required}",
        f"{info}/WHEEL": (
            "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        ),
    }
    files[f"{info}/RECORD"] = "".join(f"{path},,\n" for path in [*files, f"{info}/RECORD"])
    folder.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(
        folder / f"{name.replace('-', '_')}-{version}-py3-none-any.whl", "w"
    ) as wheel:
        for path, text in files.items():
            wheel.writestr(path, text)


def write_skeleton(root: Path) -> Path:
    (root / "scripts/lib").mkdir(parents=True)
    shutil.copy(REPO / "scripts/lib/bootstrap.sh", root / "scripts/lib")
    write_wheel(root / "wheels", "1.0")
    write_wheel(root / "wheels", "2.0")
    (root / "requirements.txt").write_text(f"{REQUIREMENTS}tiny==1.0\n")
    (root / "requirements-dev.txt").write_text("-r requirements.txt\n# nothing else\n")
    return root


def argv(root: Path, then: str = 'printf "%s\\n" "$PYTHON"') -> list[str]:
    return ["bash", "-c", SOURCE + then, "bash", str(root)]


def environment(**extra: str) -> dict[str, str]:
    path = f"{quick_python()}:/usr/bin:/bin"
    return {"PATH": path, "LOWMEM_SYSTEM_ROOT": "/nowhere"} | extra


def start(
    root: Path, then: str = 'printf "%s\\n" "$PYTHON"', cwd: Path | None = None, **env: str
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        argv(root, then),
        env=environment(**env),
        cwd=cwd,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )


def spawn(root: Path, log: Path, **env: str) -> subprocess.Popen[bytes]:
    with log.open("wb") as stderr:
        return subprocess.Popen(
            argv(root),
            env=environment(**env),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=stderr,
            start_new_session=True,
        )


def wait_for(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, f"gave up waiting for {what}"
        time.sleep(0.02)


def printed(root: Path, code: str) -> str:
    python = root / ".venv/bin/python"
    return subprocess.run(
        [python, "-c", code], capture_output=True, text=True, check=True
    ).stdout.strip()


def pip_log(root: Path) -> str:
    """The output of pip in the newest installation."""
    return (root / ".venv/install.log").read_text()


def tiny_version(root: Path) -> str:
    return printed(root, "import tiny; print(tiny.version)")


def program(path: Path, body: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/bash\n{body}\n")
    path.chmod(0o755)
    return path


def tools(folder: Path, *without: str) -> Path:
    """A folder with the programs that the script may call, but no Python."""
    folder.mkdir()
    names = {"bash", "dirname", "find", "flock", "mkdir", "mv", "rm", "sha256sum"}
    for name in names - set(without):
        if found := shutil.which(name, path="/usr/bin:/bin"):
            (folder / name).symlink_to(found)
    return folder


@cache
def quick_python() -> Path:
    """A folder with a python3 that links the files of a fresh venv instead of making one, which
    takes seconds.

    In all else it is the Python under these tests. Pip writes no file in place."""
    folder = Path(tempfile.mkdtemp(prefix="lowmem-python-"))
    atexit.register(shutil.rmtree, folder)
    real = Path(sys.executable).resolve()
    subprocess.run([real, "-I", "-m", "venv", folder / "fresh"], check=True)
    files = f'"{folder}/fresh/." "$4"'
    copy = f"/bin/cp -al {files} 2>/dev/null || /bin/cp -a {files}; exit"
    body = f'[[ "$1 $2 $3" != "-I -m venv" ]] || {{ {copy}; }}\nexec "{real}" "$@"'
    return program(folder / "bin/python3", body).parent


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return write_skeleton(tmp_path / HOSTILE)


@pytest.fixture(scope="module")
def first(
    tmp_path_factory: pytest.TempPathFactory,
) -> tuple[Path, subprocess.CompletedProcess[str]]:
    """A repository after its first start, and that start; tests do not change it."""
    root = write_skeleton(tmp_path_factory.mktemp("first") / HOSTILE)
    then = 'printf "%s\\n" "$PYTHON"; flock -n "$1/.venv.lock" echo lock is free'
    return root, start(root, then, PATH=BASE_PATH)


def copied(first: Path, tmp_path: Path) -> Path:
    """A copy of a repository to change; a `witness` in .venv shows whether that was made anew.

    Packages are 1,600 files, which pip and Python replace and never write to: links are enough."""
    copy, packages = tmp_path / HOSTILE, first / ".venv/lib"

    def aside(folder: str, names: list[str]) -> set[str]:
        return {packages.name} if Path(folder) == packages.parent else set()

    shutil.copytree(first, copy, symlinks=True, ignore=aside)
    shutil.copytree(packages, copy / ".venv/lib", symlinks=True, copy_function=os.link)
    (copy / ".venv/witness").touch()
    return copy


@pytest.fixture
def installed(first, tmp_path: Path) -> Path:
    return copied(first[0], tmp_path)


@pytest.fixture
def slow(root: Path) -> Path:
    """A repository whose pip stands still when it reads hold.txt, a named pipe, until `stop_pip`'s
    file is closed."""
    os.mkfifo(root / "hold.txt")
    (root / "requirements.txt").write_text(f"{REQUIREMENTS}tiny==1.0\n-r hold.txt\n")
    return root


def stop_pip(root: Path) -> int:
    """The writing end of hold.txt, which can be opened only once pip reads it."""
    deadline = time.monotonic() + PATIENCE_S
    while True:
        try:
            return os.open(root / "hold.txt", os.O_WRONLY | os.O_NONBLOCK)
        except OSError:
            assert time.monotonic() < deadline, "gave up waiting for pip"
            time.sleep(0.02)


def test_the_first_start_makes_a_venv_says_so_once_and_frees_the_lock(first):
    root, done = first
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [str(root / ".venv/bin/python"), "lock is free"]
    said = done.stderr.splitlines()
    assert re.search(
        r"making .*\.venv with .* \(3\.\d+\.\d+\) and installing requirements\.txt .* happens once",
        said[0],
    )
    assert re.fullmatch(
        r"lowmem: installing requirements\.txt \(1 packages\); its output is in"
        rf" {re.escape(str(root))}/\.venv/install\.log \.\.\. done in \d+ s",
        said[1],
    )
    assert len(said) == 2
    assert "Successfully installed tiny-1.0" in pip_log(root)
    assert tiny_version(root) == "1.0"
    assert not (root / ".venv/.lowmem-installing").exists()


def test_the_second_start_installs_nothing_and_is_silent(first):
    root, _ = first
    stamp = (root / ".venv/.lowmem-requirements").stat().st_mtime_ns
    again = start(root)
    assert (again.returncode, again.stdout, again.stderr) == (0, f"{root}/.venv/bin/python\n", "")
    assert (root / ".venv/.lowmem-requirements").stat().st_mtime_ns == stamp


def test_a_start_with_everything_in_place_runs_one_program_and_no_python(first, tmp_path: Path):
    root, _ = first
    log = tmp_path / "programs"
    for tool in tools(tmp_path / "tools").iterdir():
        if tool.name != "bash":
            body = f'echo {tool.name} >>"{log}"; exec {tool.resolve()} "$@"'
            program(tmp_path / "recorded" / tool.name, body)
    program(tmp_path / "recorded/python3", f'echo python3 >>"{log}"; exit 1')
    (tmp_path / "recorded/bash").symlink_to("/bin/bash")
    done = start(root, PATH=str(tmp_path / "recorded"))
    assert (done.returncode, done.stderr) == (0, "")
    assert log.read_text() == "sha256sum\n"
    lines = start(root, "set -x; _lowmem_ready; set +x").stderr.splitlines()
    assert len(lines) < 32
    assert not [line for line in lines if " -c " in line]


def test_a_changed_requirements_file_is_installed_into_the_same_venv(installed: Path):
    (installed / "requirements.txt").write_text(f"{REQUIREMENTS}tiny==2.0\n")
    done = start(installed)
    assert done.returncode == 0, done.stderr
    assert "new or has changed" in done.stderr
    assert tiny_version(installed) == "2.0"
    assert (installed / ".venv/witness").exists()
    assert start(installed).stderr == ""


def test_an_update_that_fails_keeps_the_packages_of_before_and_is_tried_again(installed: Path):
    good = (installed / "requirements.txt").read_text()
    (installed / "requirements.txt").write_text(f"{REQUIREMENTS}tiny==9.0\n")
    for _ in range(2):
        failed = start(installed)
        assert failed.returncode == 3
        lines = failed.stderr.splitlines()
        assert "pip could not install requirements.txt" in lines[-1]
        assert f"all that pip wrote in {installed}/.venv/install.log" in lines[-1]
        assert re.search(r"install\.log \.\.\. failed in \d+ s$", lines[1])
        assert "  ERROR: No matching distribution found for tiny==9.0" in lines[2:-1]
        assert "No matching distribution found for tiny==9.0" in pip_log(installed)
        assert tiny_version(installed) == "1.0"
    (installed / "requirements.txt").write_text(good)
    assert start(installed).returncode == 0
    assert (installed / ".venv/witness").exists()


def test_lowmem_dev_installs_the_other_file_once_and_serves_plain_starts_too(installed: Path):
    (installed / "requirements-dev.txt").write_text("-r requirements.txt\n# a tool\n")
    done = start(installed, LOWMEM_DEV="1")
    assert done.returncode == 0, done.stderr
    assert "installing requirements-dev.txt" in done.stderr
    assert start(installed, LOWMEM_DEV="1").stderr == ""
    assert start(installed).stderr == ""
    (installed / "requirements-dev.txt").write_text("-r requirements.txt\n# another tool\n")
    assert start(installed).stderr == "", "a plain start does not depend on the tools"
    assert "installing requirements-dev.txt" in start(installed, LOWMEM_DEV="1").stderr


@pytest.mark.parametrize("without", [[], ["flock"]], ids=["flock", "no flock"])
def test_of_two_at_once_one_installs_and_the_other_waits(
    slow: Path, tmp_path: Path, without: list[str]
):
    path = f"{tools(tmp_path / 'tools', *without)}:{quick_python()}"
    logs = [tmp_path / "one.log", tmp_path / "two.log"]
    one = spawn(slow, logs[0], PATH=path)
    pip = stop_pip(slow)
    two = spawn(slow, logs[1], PATH=path)
    wait_for(
        lambda: "waiting for it" in logs[1].read_text(), "the second start to say that it waits"
    )
    os.close(pip)
    assert [one.wait(PATIENCE_S), two.wait(PATIENCE_S)] == [0, 0], [log.read_text() for log in logs]
    assert [log.read_text().count(" ... done in ") for log in logs] == [1, 0]


@pytest.mark.parametrize(
    ("kill", "without"),
    [(signal.SIGKILL, []), (signal.SIGKILL, ["flock"]), (signal.SIGINT, [])],
    ids=["SIGKILL", "SIGKILL, no flock", "SIGINT"],
)
def test_an_interrupted_installation_is_made_anew(
    slow: Path, tmp_path: Path, kill: signal.Signals, without: list[str]
):
    path = f"{tools(tmp_path / 'tools', *without)}:{quick_python()}"
    child = spawn(slow, tmp_path / "log", PATH=path)
    pip = stop_pip(slow)
    (slow / ".venv/half-written").touch()
    os.killpg(child.pid, kill)
    os.close(pip)
    assert child.wait(PATIENCE_S) != 0
    assert not (slow / ".venv/.lowmem-requirements").exists()

    (slow / "hold.txt").unlink()
    (slow / "hold.txt").touch()
    done = start(slow, PATH=path)
    assert done.returncode == 0, done.stderr
    assert "making " in done.stderr
    assert tiny_version(slow) == "1.0"
    assert not (slow / ".venv/half-written").exists()
    assert start(slow).stderr == ""


def test_a_venv_whose_python_is_gone_is_made_anew(installed: Path):
    (installed / ".venv/bin/python").unlink()
    (installed / ".venv/bin/python").symlink_to("/nowhere/python3.11")
    done = start(installed)
    assert done.returncode == 0, done.stderr
    assert tiny_version(installed) == "1.0"
    assert not (installed / ".venv/witness").exists()


def test_a_venv_that_leads_to_another_python_than_when_it_was_made_is_made_anew(installed: Path):
    stamp = installed / ".venv/.lowmem-requirements"
    run_hash, dev_hash, version, _ = stamp.read_text().splitlines()
    stamp.write_text(f"{run_hash}\n{dev_hash}\n{version}\n/usr/bin/env\n")
    done = start(installed)
    assert done.returncode == 0, done.stderr
    assert "making " in done.stderr
    assert not (installed / ".venv/witness").exists()


def test_a_venv_that_the_user_made_is_kept_and_completed(installed: Path):
    (installed / ".venv/.lowmem-requirements").unlink()
    done = start(installed)
    assert done.returncode == 0, done.stderr
    assert (installed / ".venv/witness").exists()
    assert start(installed).stderr == ""


def test_a_venv_that_is_a_link_to_another_disk_stays_one(root: Path, tmp_path: Path):
    (tmp_path / "large disk").mkdir()
    (root / ".venv").symlink_to(tmp_path / "large disk")
    assert start(root).returncode == 0
    assert (root / ".venv").is_symlink()
    assert (tmp_path / "large disk/.lowmem-requirements").exists()


@pytest.mark.parametrize("version", ["3.8.18", "2.7.18"])
def test_an_old_python_is_refused_with_what_was_found_and_what_to_do(
    root: Path, tmp_path: Path, version: str
):
    old = program(tmp_path / "old/python3", f"echo {version} pip /old/python3")
    done = start(root, PATH=f"{old.parent}:{tools(tmp_path / 'tools')}")
    assert (done.returncode, done.stdout) == (3, "")
    assert (
        done.stderr
        == f"lowmem: needs Python 3.11, 3.12 or 3.13; found on PATH: {old} is {version}; "
        "install one of them, or set PYTHON=/path/to/python\n"
    )
    assert not (root / ".venv").exists()


def test_a_real_old_python_is_refused(root: Path, tmp_path: Path):
    real = sorted((Path.home() / ".pyenv/versions").glob("3.8.*/bin/python3"))
    if not real:
        pytest.skip("no Python 3.8 under ~/.pyenv")
    done = start(root, PATH=f"{real[0].parent}:{tools(tmp_path / 'tools')}")
    assert done.returncode == 3
    assert f"{real[0]} is 3.8." in done.stderr


def test_no_python_at_all_is_one_clear_line(root: Path, tmp_path: Path):
    done = start(root, PATH=str(tools(tmp_path / "tools")))
    assert done.returncode == 3
    assert "found on PATH: no Python; install one" in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_a_python_without_venv_gets_debians_package_name(root: Path, tmp_path: Path):
    bare = program(tmp_path / "bare/python3", "echo 3.11.2 no-pip /bare/python3")
    done = start(root, PATH=f"{bare.parent}:{tools(tmp_path / 'tools')}")
    assert done.returncode == 3
    assert f"{bare} (3.11.2) cannot make a virtual environment" in done.stderr
    assert "apt install python3-venv" in done.stderr


def test_an_old_python_first_on_path_is_passed_over_for_a_good_one(root: Path, tmp_path: Path):
    old = program(tmp_path / "old/python3", "echo 3.8.18 pip /old/python3")
    broken = program(tmp_path / "broken/python3", "echo python3: command not found >&2; exit 127")
    path = f"{old.parent}:{broken.parent}:{quick_python()}:{tools(tmp_path / 'tools')}"
    done = start(root, PATH=path)
    assert done.returncode == 0, done.stderr
    assert tiny_version(root) == "1.0"


def test_the_users_python_is_used_as_it_is_and_no_venv_is_made(root: Path, tmp_path: Path):
    good = program(tmp_path / "my python", "printf '3.12.1\\n\\n'")
    done = start(root, PYTHON=str(good))
    assert (done.returncode, done.stdout, done.stderr) == (0, f"{good}\n", "")
    relative = start(root, cwd=tmp_path, PYTHON="./my python")
    assert relative.stdout == f"{tmp_path}/./my python\n"
    assert not (root / ".venv").exists()


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ("printf '3.10.13\\n'", "is Python 3.10.13, 3.11 or newer is needed"),
        ("printf '3.11.7\\ntorch yaml\\n'", "lacks torch yaml; install them"),
        ("echo no such option >&2; exit 2", "does not run Python code"),
    ],
)
def test_the_users_python_is_refused_with_the_reason(
    root: Path, tmp_path: Path, answer: str, message: str
):
    done = start(root, PYTHON=str(program(tmp_path / "python3", answer)))
    assert (done.returncode, done.stdout) == (3, "")
    assert message in done.stderr
    assert not (root / ".venv").exists()


def test_a_python_that_is_not_there_is_refused(root: Path):
    done = start(root, PYTHON="/nowhere/python3")
    assert (done.returncode, done.stderr) == (
        3,
        "lowmem: PYTHON=/nowhere/python3: no such program\n",
    )


def test_the_python_of_these_tests_passes_the_check_and_the_one_under_it_lacks_packages(
    root: Path, tmp_path: Path
):
    assert start(root, PYTHON=sys.executable).returncode == 0
    bare = subprocess.run(
        [sys.executable, "-I", "-m", "venv", "--without-pip", tmp_path / "bare"],
        capture_output=True,
        text=True,
    )
    assert bare.returncode == 0, bare.stderr
    refused = start(root, PYTHON=str(tmp_path / "bare/bin/python"))
    assert refused.returncode == 3
    assert (
        "lacks torch transformers accelerate pydantic yaml psutil rich pyarrow;" in refused.stderr
    )


def test_an_empty_environment_a_folder_of_python_traps_and_any_umask_do(root: Path, tmp_path: Path):
    traps = tmp_path / "traps"
    traps.mkdir()
    for name in ("venv", "pip", "ensurepip", "random", "tempfile", "os"):
        (traps / f"{name}.py").write_text("raise SystemExit('a file of the user was imported')")
    script = 'umask 0777; cd "$2"; ' + SOURCE + 'printf "%s\n%s\n" "$PWD" "$(umask)"; declare -px'
    command = [
        "env",
        "-i",
        f"PATH={BASE_PATH}",
        "LOWMEM_SYSTEM_ROOT=/nowhere",
        "bash",
        "-c",
        script,
        "bash",
        str(root),
        str(traps),
    ]
    done = subprocess.run(
        command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=PATIENCE_S
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[:2] == [str(traps), "0777"]
    exported = set(re.findall(r"^declare -x (\w+)", done.stdout, re.MULTILINE))
    assert exported - {"OLDPWD", "PWD", "SHLVL", "PATH", "_", "LOWMEM_SYSTEM_ROOT"} == {
        "PYTHON",
        "PYTHONUTF8",
    }
    assert f'declare -x PATH="{BASE_PATH}"' in done.stdout
    assert stat.S_IMODE((root / ".venv").stat().st_mode) & stat.S_IRWXU == stat.S_IRWXU
    assert tiny_version(root) == "1.0"


def test_a_repository_without_its_requirements_says_so(root: Path):
    (root / "requirements.txt").unlink()
    done = start(root)
    assert done.returncode == 3
    assert "requirements.txt is missing: is this a whole copy of the repository?" in done.stderr


def test_every_requirement_is_pinned():
    for name in ("requirements.txt", "requirements-cuda.txt", "requirements-dev.txt"):
        lines = [line.split("#")[0].strip() for line in (REPO / name).read_text().splitlines()]
        for line in filter(None, lines):
            pin = r"[\w.-]+==[\w.]+( ; sys_platform == 'linux')?|-r requirements\.txt"
            assert re.fullmatch(pin, line), f"{name}: {line}"


def test_with_hashes_required_a_file_that_was_exchanged_is_not_installed(tmp_path: Path):
    root = write_skeleton(tmp_path / "root")
    wheel = root / "wheels/tiny-1.0-py3-none-any.whl"
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    (root / "requirements.lock").write_text(f"{REQUIREMENTS}tiny==1.0 --hash=sha256:{digest}\n")
    with zipfile.ZipFile(wheel, "a") as archive:
        archive.writestr("evil.py", "")
    done = start(root, cwd=root, LOWMEM_REQUIRE_HASHES="1")
    assert done.returncode == 3
    assert "DO NOT MATCH THE HASHES" in done.stderr
    write_wheel(root / "wheels", "1.0")
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    (root / "requirements.lock").write_text(f"{REQUIREMENTS}tiny==1.0 --hash=sha256:{digest}\n")
    done = start(root, cwd=root, LOWMEM_REQUIRE_HASHES="1")
    assert done.returncode == 0, done.stderr
    assert tiny_version(root) == "1.0"


# ---- builds of torch
# ---------------------------------------------------------------------------


def write_index(folder: Path) -> dict[str, str]:
    """A package index and one of PyTorch's kind, with a folder for each build but cu130; variables
    that name them."""
    default, builds = folder / "default", folder / "whl"
    for version in ("1.0", "2.0"):
        write_wheel(default / "tiny", version)
    write_wheel(default / "torch", "1.5", "torch", needs="triton==3.0")
    write_wheel(default / "triton", "3.0", "triton")
    write_wheel(builds / "cu126" / "torch", "1.5+cu126", "torch", needs="triton==3.0")
    write_wheel(builds / "cpu" / "torch", "1.5+cpu", "torch")
    write_wheel(builds / "rocm7.2" / "torch", "1.5+rocm7.2", "torch", needs="triton-rocm==3.0")
    write_wheel(builds / "rocm7.2" / "triton-rocm", "3.0", "triton-rocm", module="triton")
    for wheels in {wheel.parent for wheel in folder.rglob("*.whl")}:
        links = [f'<a href="{wheel.as_uri()}">{wheel.name}</a>' for wheel in wheels.glob("*.whl")]
        (wheels / "index.html").write_text(
            "<!DOCTYPE html><html><body>" + "<br>".join(links) + "</body></html>"
        )
    own = {
        "PIP_CONFIG_FILE": os.devnull,
        "PIP_INDEX_URL": default.as_uri(),
        "LOWMEM_TORCH_INDEX": builds.as_uri(),
    }
    return {**own, "PIP_NO_CACHE_DIR": "1"}


@pytest.fixture(scope="module")
def first_torch(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, str]]:
    """A repository after its first start, which needs torch, and the variables that name its
    indexes."""
    root = write_skeleton(tmp_path_factory.mktemp("torch") / HOSTILE)
    (root / "requirements.txt").write_text("tiny==1.0\ntorch==1.5   # tensors\n")
    variables = write_index(tmp_path_factory.mktemp("index"))
    done = start(root, **variables, LOWMEM_TORCH="default")
    assert done.returncode == 0, done.stderr
    (root / ".venv.torch").unlink()
    return root, variables


@pytest.fixture
def torch(first_torch, tmp_path: Path) -> Path:
    return copied(first_torch[0], tmp_path)


@pytest.fixture
def indexes(first_torch) -> dict[str, str]:
    return first_torch[1]


def torch_version(root: Path) -> str:
    return printed(root, "import torch; print(torch.version)")


def test_another_build_of_torch_is_installed_alone_and_later_starts_remember_it(
    torch: Path, indexes
):
    (tiny,) = torch.glob(".venv/lib/*/site-packages/tiny.py")
    before = tiny.stat().st_mtime_ns
    done = start(torch, LOWMEM_TORCH="cu126", **indexes)
    assert done.returncode == 0, done.stderr
    assert "installing torch for cu126 (before: default)" in done.stderr
    assert torch_version(torch) == "1.5+cu126"
    assert tiny.stat().st_mtime_ns == before
    assert start(torch).stderr == ""
    assert start(torch, LOWMEM_TORCH="cu126").stderr == ""

    (torch / "requirements.txt").write_text("tiny==2.0\ntorch==1.5\n")
    assert start(torch, **indexes).returncode == 0
    assert (tiny_version(torch), torch_version(torch)) == ("2.0", "1.5+cu126")
    assert (torch / ".venv/witness").exists()

    shutil.rmtree(torch / ".venv")
    assert start(torch, **indexes).returncode == 0
    assert torch_version(torch) == "1.5+cu126"


def test_the_package_indexs_own_build_comes_back(torch: Path, indexes):
    assert start(torch, LOWMEM_TORCH="cpu", **indexes).returncode == 0
    assert torch_version(torch) == "1.5+cpu"
    done = start(torch, LOWMEM_TORCH="default", **indexes)
    assert done.returncode == 0, done.stderr
    assert torch_version(torch) == "1.5"
    assert start(torch).stderr == ""
    assert (torch / ".venv/witness").exists()


def test_each_build_has_its_own_triton_though_both_write_the_same_files(torch: Path, indexes):
    assert start(torch, LOWMEM_TORCH="rocm", **indexes).returncode == 0
    assert torch_version(torch) == "1.5+rocm7.2"
    triton = (
        "import triton; from importlib.metadata import distributions as all; print(triton.name,"
        " end=' ')"
    )
    triton += "; print(*sorted(one.name for one in all() if 'triton' in one.name))"
    assert printed(torch, triton) == "triton-rocm triton-rocm"
    assert start(torch, LOWMEM_TORCH="default", **indexes).returncode == 0
    assert printed(torch, triton) == "triton triton"


def test_packages_beside_cuda_come_with_its_builds_alone(torch: Path, indexes):
    (torch / "requirements-cuda.txt").write_text("-r requirements.txt\ntriton==3.0\n")
    for build, file in (("cu126", "requirements-cuda"), ("cpu", "requirements")):
        done = start(torch, LOWMEM_TORCH=build, **indexes)
        assert done.returncode == 0, done.stderr
        assert f"installing {file}.txt (" in done.stderr
    (torch / "requirements-cuda.txt").write_text("-r requirements.txt\n")
    assert "which is new or has changed" in start(torch, **indexes).stderr


def test_a_build_that_the_index_does_not_have_leaves_the_one_that_is_there(torch: Path, indexes):
    failed = start(torch, LOWMEM_TORCH="cu130", **indexes)
    assert failed.returncode == 3
    last = failed.stderr.splitlines()[-1]
    assert "pip could not install requirements.txt with torch for cu130" in last
    assert f"see that {indexes['LOWMEM_TORCH_INDEX']}/cu130 can be reached" in last
    assert torch_version(torch) == "1.5"
    assert start(torch, **indexes).returncode == 0
    assert start(torch).stderr == ""
    assert torch_version(torch) == "1.5"


def test_a_build_that_is_no_word_of_ours_is_refused_wherever_it_stands(torch: Path):
    done = start(torch, LOWMEM_TORCH="cu999")
    assert (done.returncode, done.stdout) == (3, "")
    assert (
        done.stderr
        == "lowmem: LOWMEM_TORCH says cu999; expected one of default cpu cu126 cu130 rocm\n"
    )
    (torch / ".venv.torch").write_text("rubbish\n")
    assert f"{torch}/.venv.torch says rubbish; expected one of" in start(torch).stderr


def lock_default(root: Path, indexes: dict[str, str]) -> None:
    """Write requirements.lock for the package index's torch."""
    default = Path(unquote(urlsplit(indexes["PIP_INDEX_URL"]).path))
    lines = []
    for name, version in {"tiny": "1.0", "torch": "1.5", "triton": "3.0"}.items():
        wheel = default / name / f"{name}-{version}-py3-none-any.whl"
        digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
        lines.append(f"{name}=={version} --hash=sha256:{digest}\n")
    (root / "requirements.lock").write_text("".join(lines))


def test_required_hashes_refuse_the_builds_that_have_none_and_take_the_one_that_has(
    torch: Path, indexes
):
    refused = start(torch, LOWMEM_TORCH="cu126", LOWMEM_REQUIRE_HASHES="1", **indexes)
    assert refused.returncode == 3
    assert "requirements.lock holds no hashes of the cu126 build of torch" in refused.stderr
    assert start(torch, LOWMEM_TORCH="cpu", **indexes).returncode == 0
    lock_default(torch, indexes)
    done = start(torch, LOWMEM_TORCH="default", LOWMEM_REQUIRE_HASHES="1", **indexes)
    assert done.returncode == 0, done.stderr
    assert torch_version(torch) == "1.5"


def test_the_users_python_is_not_given_another_torch_and_that_is_said(root: Path, tmp_path: Path):
    good = program(tmp_path / "python", "printf '3.12.1\\n\\n'")
    done = start(root, PYTHON=str(good), LOWMEM_TORCH="rocm")
    assert (done.returncode, done.stdout) == (0, f"{good}\n")
    assert "is used as it is: LOWMEM_TORCH changes .venv only" in done.stderr


def test_the_installing_script_says_which_torch_there_is(torch: Path, indexes):
    shutil.copy(REPO / "scripts/install.sh", torch / "scripts")
    env = environment(LOWMEM_TORCH="cpu", **indexes)
    done = subprocess.run(
        [torch / "scripts/install.sh"],
        env=env,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        cwd="/",
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"torch 1.5+cpu in {torch}/.venv\n"


# ---- the build for the CPU, where there is no card
# ---------------------------------------------------------------------------


@pytest.fixture
def fresh(torch: Path) -> Path:
    """A repository that needs torch, before its first start."""
    shutil.rmtree(torch / ".venv")
    return torch


def test_a_first_start_without_a_card_installs_torch_for_the_cpu_and_says_how_to_change_it(
    fresh: Path, indexes
):
    done = start(fresh, **indexes)
    assert done.returncode == 0, done.stderr
    assert torch_version(fresh) == "1.5+cpu"
    line = done.stderr.splitlines()[1]
    assert "no card and no driver of one is here" in line
    assert "LOWMEM_TORCH=default ./scripts/install.sh" in line
    assert not (fresh / ".venv.torch").exists(), "nobody has chosen"
    assert start(fresh).stderr == ""

    (fresh / "requirements.txt").write_text("tiny==2.0\ntorch==1.5\n")
    assert start(fresh, **indexes).returncode == 0
    assert (tiny_version(fresh), torch_version(fresh)) == ("2.0", "1.5+cpu")
    changed = start(fresh, LOWMEM_TORCH="default", **indexes)
    assert changed.returncode == 0, changed.stderr
    assert torch_version(fresh) == "1.5"
    assert start(fresh).stderr == ""


def test_a_venv_with_the_package_indexs_torch_stays_where_there_is_no_card(torch: Path, indexes):
    (torch / "requirements.txt").write_text("tiny==2.0\ntorch==1.5\n")
    assert start(torch, **indexes).returncode == 0
    assert (tiny_version(torch), torch_version(torch)) == ("2.0", "1.5")
    assert (torch / ".venv/witness").exists()


CARDS = {
    "NVIDIA": lambda system: cards.device(system, cards.NVIDIA, "0x030200"),
    "an accelerator": lambda system: cards.device(system, cards.AMD, "0x120000"),
    "AMD, no driver": lambda system: cards.device(system, cards.AMD, "0x030000"),
    **{
        path: lambda system, path=path: cards.file(system, path)
        for path in (
            "proc/driver/nvidia/version",
            "dev/nvidiactl",
            "dev/nvidia0",
            "dev/nvhost-gpu",
            "dev/kfd",
            "dev/dxg",
            "usr/lib/wsl/lib/libcuda.so.1.1",
        )
    },
}


def test_a_card_means_the_package_indexs_torch(fresh: Path, tmp_path: Path, indexes):
    system = CARDS["NVIDIA"](tmp_path / "system")
    done = start(fresh, LOWMEM_SYSTEM_ROOT=str(system), **indexes)
    assert done.returncode == 0, done.stderr
    assert torch_version(fresh) == "1.5"
    assert "no card" not in done.stderr


def sees_card(root: Path, system: Path) -> bool:
    """True if a start would find a card there; nothing is installed."""
    then = "_lowmem_sees_card && echo a card || echo none"
    done = start(root, then, LOWMEM_SYSTEM_ROOT=str(system), PYTHON=sys.executable)
    assert done.stdout in ("a card\n", "none\n"), done.stderr
    return done.stdout == "a card\n"


@pytest.mark.parametrize("sign", CARDS)
def test_a_card_or_a_sign_of_a_driver_is_seen(root: Path, tmp_path: Path, sign):
    assert sees_card(root, CARDS[sign](tmp_path / "system"))


def test_devices_that_are_no_cards_are_none(root: Path, tmp_path: Path):
    for vendor, kind in ((cards.INTEL, "0x030000"), (cards.NVIDIA, "0x040300")):
        cards.device(tmp_path / "system", vendor, kind)
    assert not sees_card(root, tmp_path / "system")


def test_a_card_that_comes_later_changes_nothing_before_the_venv_is_made_anew(
    fresh: Path, tmp_path: Path, indexes
):
    assert start(fresh, **indexes).returncode == 0
    system = cards.device(tmp_path / "system", cards.NVIDIA, "0x030000")
    assert start(fresh, LOWMEM_SYSTEM_ROOT=str(system)).stderr == ""
    shutil.rmtree(fresh / ".venv/bin")
    assert start(fresh, LOWMEM_SYSTEM_ROOT=str(system), **indexes).returncode == 0
    assert torch_version(fresh) == "1.5"


@pytest.mark.parametrize("index", ["http://127.0.0.1:9", "file:///nowhere"])
def test_an_index_that_cannot_be_reached_leaves_the_package_indexs_torch(
    fresh: Path, indexes, index
):
    done = start(fresh, **{**indexes, "LOWMEM_TORCH_INDEX": index})
    assert done.returncode == 0, done.stderr
    assert torch_version(fresh) == "1.5"
    (line,) = (line for line in done.stderr.splitlines() if index in line)
    assert "so the package index's torch is installed" in line
    assert "LOWMEM_TORCH_INDEX=URL names a mirror" in line
    assert start(fresh).stderr == ""


def test_two_first_starts_at_once_install_torch_for_the_cpu_once(fresh: Path, tmp_path, indexes):
    logs = [tmp_path / "one.log", tmp_path / "two.log"]
    children = [spawn(fresh, log, **indexes) for log in logs]
    assert [child.wait(PATIENCE_S) for child in children] == [0, 0]
    assert sum(log.read_text().count(" ... done in ") for log in logs) == 2
    assert torch_version(fresh) == "1.5+cpu"


def test_required_hashes_give_the_package_indexs_torch_without_a_card(fresh: Path, indexes):
    lock_default(fresh, indexes)
    done = start(fresh, LOWMEM_REQUIRE_HASHES="1", **indexes)
    assert done.returncode == 0, done.stderr
    assert torch_version(fresh) == "1.5"


# ---- cards that the package index's torch cannot use
# ---------------------------------------------------------------------------

OPEN_DRIVER = (
    "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  {}  Release Build  (dvs-builder) "
    " Tue\n"
)
DRIVER = (
    "NVRM version: NVIDIA UNIX x86_64 Kernel Module  {}  Thu Feb 22 01:44:30 UTC 2024\nGCC version:"
    " 12\n"
)
WENT_ON = "needs Python 3.11, 3.12 or 3.13; found on PATH: no Python"


def seen(root: Path, tmp_path: Path, system: Path, **env: str) -> str:
    """What a first start says on a machine without Python: the cards are looked at before anything
    is made."""
    done = start(root, PATH=str(tools(tmp_path / "tools")), LOWMEM_SYSTEM_ROOT=str(system), **env)
    assert done.returncode == 3
    assert not (root / ".venv").exists()
    return done.stderr


@pytest.mark.parametrize(
    ("words", "version", "said"),
    [
        (DRIVER, "550.54.15", "Start again with LOWMEM_TORCH=cu126 (remembered)"),
        (
            OPEN_DRIVER,
            "575.64.03",
            "the NVIDIA driver here is 575, and the torch that the package index gives needs 580",
        ),
        (DRIVER, "470.256.02", "the NVIDIA driver here is 470; torch needs 580 or newer"),
        (DRIVER, "580.65.06", WENT_ON),
        (OPEN_DRIVER, "590.44.01", WENT_ON),
        ("something new {}\n", "1", WENT_ON),
    ],
)
def test_a_driver_that_is_too_old_is_said_before_gigabytes_are_downloaded(
    root: Path, tmp_path, words, version, said
):
    system = cards.file(tmp_path / "system", "proc/driver/nvidia/version", words.format(version))
    assert said in seen(root, tmp_path, system)


@pytest.mark.parametrize(
    ("devices", "said"),
    [
        ([(cards.AMD, "0x030000", 19.98)], "an AMD card is here (PCI 0000:00:00.0, 19 GiB)"),
        ([(cards.AMD, "0x120000", 192)], "Start again with LOWMEM_TORCH=rocm (remembered)"),
        ([(cards.AMD, "0x030000", 0.5)], WENT_ON),  # built into the processor
        ([(cards.AMD, "0x030000", None)], WENT_ON),
        ([(cards.AMD, "0x040300", 19.98)], WENT_ON),
        ([(cards.AMD, "0x030000", 19.98), (cards.NVIDIA, "0x030000", None)], WENT_ON),
        ([(cards.INTEL, "0x030000", None)], WENT_ON),
    ],
)
def test_an_amd_card_is_said_before_gigabytes_for_nvidia_cards_are_downloaded(
    root: Path, tmp_path, devices, said
):
    for vendor, kind, vram_gib in devices:
        cards.device(tmp_path / "system", vendor, kind, vram_gib=vram_gib)
    assert said in seen(root, tmp_path, tmp_path / "system")


@pytest.mark.parametrize("word", ["default", "cpu", "rocm"])
def test_a_build_that_was_chosen_is_not_questioned(root: Path, tmp_path: Path, word: str):
    (root / "requirements.txt").write_text("torch==1.5\n")
    system = cards.file(
        tmp_path / "system", "proc/driver/nvidia/version", DRIVER.format("470.256.02")
    )
    assert WENT_ON in seen(root, tmp_path, system, LOWMEM_TORCH=word)
    (root / ".venv.torch").write_text(f"{word}\n")
    shutil.rmtree(tmp_path / "tools")
    assert WENT_ON in seen(root, tmp_path, system)


def test_the_lock_holds_every_pin_with_hashes_and_names_no_host():
    lock = (REPO / "requirements.lock").read_text()
    body = "".join(
        line for line in lock.splitlines(keepends=True) if not line.lstrip().startswith("#")
    )
    entries = re.split(r"\n(?=\S)", body.strip())
    assert [entry for entry in entries if not re.search(r"--hash=sha256:[0-9a-f]{64}", entry)] == []
    locked = {tuple(re.match(r"([\w.-]+)==([\w.+-]+)", entry).groups()) for entry in entries}  # type: ignore[union-attr]
    files = ("requirements.txt", "requirements-cuda.txt")
    pins = "".join((REPO / name).read_text() for name in files)
    for name, version in re.findall(r"^([\w.-]+)==(\S+)", pins, re.MULTILINE):
        assert (re.sub(r"[_.]", "-", name).lower(), version) in locked
    assert not re.search(r"https?://|index-url|find-links|file:", body)


def test_the_tests_have_the_kernels_that_a_cuda_build_gets():
    names = ("liger-kernel", "triton")
    dev, lock = (
        dict(re.findall(r"^([\w.-]+)==([\w.]+)", (REPO / file).read_text(), re.MULTILINE))
        for file in ("requirements-dev.txt", "requirements.lock")
    )
    assert [dev[name] for name in names] == [lock[name] for name in names]
