"""Folders of compiled code, which torch runs: this user's alone, or the start is refused before
torch is there."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from launch.base import compile_caches
from tests import builders
from tests.process import forked_starts

pytestmark = pytest.mark.process

VARIABLES = tuple(compile_caches.FOLDERS)
STRANGER = 12345
SETTLED = (
    "import json, os, tempfile; from launch.base import compile_caches; compile_caches.settle();"
    " print(json.dumps({**os.environ, 'gettempdir': tempfile.gettempdir()}))"
)
ENTRIES = {
    "doctor": ("-m", "launch", "doctor", "--machine", "configs/machines/cpu.yaml"),
    "plan": ("-m", "launch", "plan", "sft_fast", "--machine", "configs/machines/cpu.yaml"),
    "run": ("-m", "launch", "run", "sft_fast"),
    "tune": ("-m", "launch", "tune", "sft_fast"),
    "merge": ("-m", "launch", "merge", "adapter", "--out", "merged"),
    "chat": ("scripts/chat.py", "model"),
    "rank": ("train_low_mem.py", "train", "--is_finetune=True"),
    "guide": ("scripts/train.py", "--mode", "sft", "--config", "medium"),
}
needs_root = pytest.mark.skipif(
    os.geteuid() != 0, reason="only root can give a folder to another user"
)


def start(temporary: Path, *argv: str, **extra: str) -> subprocess.CompletedProcess[str]:
    env = builders.environment(temporary.parent / "workspace", TMPDIR=str(temporary), **extra)
    argv = (sys.executable, *argv)
    return subprocess.run(
        argv, cwd=builders.CODE, env=env, capture_output=True, text=True, timeout=120
    )


def doctor(temporary: Path, **extra: str) -> subprocess.CompletedProcess[str]:
    """The first of ENTRIES, in a fork: what it says of a folder."""
    words = ENTRIES["doctor"][2:]
    env = builders.environment(temporary.parent / "workspace", TMPDIR=str(temporary), **extra)
    return forked_starts.start(words, env)


@pytest.fixture
def temporary(tmp_path) -> Path:
    """A folder for temporary files as /tmp is."""
    folder = tmp_path / "tmp"
    folder.mkdir()
    folder.chmod(0o1777)
    return folder


def settled(temporary: Path, **extra: str) -> dict[str, str]:
    done = start(temporary, "-c", SETTLED, **extra)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def mode(folder: Path | str) -> int:
    return Path(folder).stat().st_mode & 0o7777


def test_each_folder_is_made_for_this_user_alone(temporary):
    env = settled(temporary)
    own = temporary / f"lowmem-{os.geteuid()}"
    assert env["TMPDIR"] == env["gettempdir"] == str(own)
    assert {variable: env[variable] for variable in VARIABLES} == {
        "TORCHINDUCTOR_CACHE_DIR": f"{own}/inductor",
        "TRITON_CACHE_DIR": f"{own}/triton",
        "TORCH_EXTENSIONS_DIR": f"{own}/extensions",
    }
    assert {mode(folder) for folder in (own, *own.iterdir())} == {0o700}


def test_a_child_of_a_child_stays_in_the_same_folders(temporary):
    env = settled(temporary)
    again = settled(Path(env["TMPDIR"]), **{variable: env[variable] for variable in VARIABLES})
    assert {name: again[name] for name in ("TMPDIR", *VARIABLES)} == {
        name: env[name] for name in ("TMPDIR", *VARIABLES)
    }


@pytest.mark.parametrize("variable", VARIABLES)
def test_a_folder_that_the_user_named_stays_and_is_made_private(temporary, variable):
    named = temporary.parent / "my folder" / "cache"
    assert settled(temporary, **{variable: str(named)})[variable] == str(named)
    assert mode(named) == 0o700


@needs_root
@pytest.mark.parametrize("entry", ENTRIES)
def test_no_command_starts_beside_a_folder_that_another_user_owns(temporary, entry):
    squatted = temporary / f"lowmem-{os.geteuid()}"
    squatted.mkdir(mode=0o700)
    os.chown(squatted, STRANGER, STRANGER)
    done = start(temporary, *ENTRIES[entry])
    assert done.returncode == 3, done.stdout + done.stderr
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert f"{squatted}: belongs to user {STRANGER}" in line
    assert "set TMPDIR to a folder of your own" in line or "choose another name" in line


@needs_root
@pytest.mark.parametrize("variable", VARIABLES)
@pytest.mark.parametrize("is_link", [False, True], ids=["folder", "link"])
def test_a_folder_of_another_users_that_a_variable_names_is_refused(temporary, variable, is_link):
    named = theirs = temporary.parent / "theirs"
    theirs.mkdir(mode=0o755)
    os.chown(theirs, STRANGER, STRANGER)
    if is_link:
        named = temporary.parent / "link"
        named.symlink_to(theirs)
    done = doctor(temporary, **{variable: str(named)})
    assert done.returncode == 3, done.stdout + done.stderr
    assert f"error: {named}: belongs to user {STRANGER}, expected {os.geteuid()}" in done.stderr
    assert f"set {variable} to a folder of your own" in done.stderr


@needs_root
def test_a_link_that_another_user_made_is_refused_wherever_it_leads(temporary):
    (temporary.parent / "mine").mkdir(mode=0o700)
    link = temporary.parent / "link"
    link.symlink_to(temporary.parent / "mine")
    os.lchown(link, STRANGER, STRANGER)
    done = doctor(temporary, TRITON_CACHE_DIR=str(link))
    assert (done.returncode, f"{link}: belongs to user {STRANGER}" in done.stderr) == (
        3,
        True,
    ), done.stderr


@pytest.mark.parametrize("variable", ["TMPDIR", *VARIABLES])
@pytest.mark.parametrize("bits", [0o777, 0o770, 0o702, 0o1777])
def test_a_folder_that_others_may_write_to_is_refused_with_its_mode(temporary, variable, bits):
    named = (
        temporary / f"lowmem-{os.geteuid()}"
        if variable == "TMPDIR"
        else temporary.parent / "shared"
    )
    named.mkdir()
    named.chmod(bits)
    done = doctor(temporary, **({} if variable == "TMPDIR" else {variable: str(named)}))
    assert done.returncode == 3, done.stdout + done.stderr
    assert f"{named}: others may write to it (mode {bits:o})" in done.stderr
    assert f"chmod go-w it, or set {variable} to a folder of your own" in done.stderr


def test_a_folder_for_temporary_files_that_does_not_exist_is_refused_by_name(temporary):
    gone = temporary / "gone"
    done = doctor(gone)
    expected = f"error: TMPDIR {gone}: there is no such folder; make it, or unset TMPDIR\n"
    assert (done.returncode, done.stderr) == (3, expected)
    assert not gone.exists()


def test_a_file_in_the_place_of_a_folder_is_named(temporary):
    file = temporary.parent / "file"
    file.touch()
    done = doctor(temporary, TRITON_CACHE_DIR=str(file))
    assert (
        done.returncode,
        f"error: {file}: compiled code cannot be kept there" in done.stderr,
    ) == (3, True), done
    assert "Traceback" not in done.stderr


def test_a_folder_from_which_nothing_may_be_run_is_named(tmp_path):
    code = """
from launch.base import compile_caches
compile_caches.settle()
print(compile_caches.noexec() or "")
"""
    mount = f"mount -t tmpfs -o noexec none {tmp_path} && mkdir {tmp_path}/t &&"
    for before, said in (("", ""), (mount, "TMPDIR ")):
        line = f"{before} TMPDIR={tmp_path} {sys.executable} -c '{code}'"
        argv = ["unshare", "--user", "--map-root-user", "--mount", "bash", "-c", line]
        done = subprocess.run(argv, env=builders.environment(tmp_path / "w"), capture_output=True)
        if b"unshare" in done.stderr:
            # a kernel without user namespaces; CI has them
            pytest.skip("this machine lets nobody make a mount namespace")
        assert done.returncode == 0, done.stderr
        words = "is mounted noexec; set TMPDIR to a folder elsewhere"
        assert (said in done.stdout.decode() and words in done.stdout.decode()) is bool(said)
