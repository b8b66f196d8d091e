"""A save that is killed, or refused by the disk, at any of its system calls loses no checkpoint."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from launch.run_folder import manifest
from tests import builders

pytestmark = pytest.mark.skipif(
    shutil.which("strace") is None, reason="needs strace: apt-get install strace"
)

WRITING = (
    "openat",
    "write",
    "writev",
    "pwrite64",
    "fsync",
    "rename",
    "mkdir",
    "chmod",
    "unlink",
    "unlinkat",
    "rmdir",
)
# Not the flag --seccomp-bpf: with it some injections do not happen.
STRACE = ["strace", "-f", "-y", "-qq", "-e", "signal=none", "-e", f"trace={','.join(WRITING)}"]
CALL = re.compile(r"^(?P<pid>\d+) +(?P<call>\w+)\((?P<rest>.*)$")


@dataclass
class Server:
    """The rank that saves on demand, and how it said that a save ended."""

    process: subprocess.Popen[str]

    def save(self, folder: Path, step: int, log: Path, *inject: str) -> int:
        """One traced save; its wait status."""
        assert self.process.stdin and self.process.stdout
        self.process.stdin.write(f"{folder} {step}\n")
        self.process.stdin.flush()
        child = int(self.process.stdout.readline())
        state = Path(f"/proc/{child}/stat")
        while state.read_text().rpartition(")")[2].split()[0] != "T":
            time.sleep(0.002)
        words = [*STRACE, *inject, "-o", str(log), "-p", str(child)]
        tracer = subprocess.Popen(words, stderr=subprocess.PIPE, text=True)
        while not re.search(r"TracerPid:\t[1-9]", Path(f"/proc/{child}/status").read_text()):
            assert tracer.poll() is None, tracer.communicate()[1]
            time.sleep(0.002)
        os.kill(child, signal.SIGCONT)
        status = int(self.process.stdout.readline())
        tracer.communicate(timeout=60)
        return status


@pytest.fixture(scope="module")
def server(tmp_path_factory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("saves")
    recipe = str(
        builders.recipe(folder, training={"max_steps": 3, "warmup_steps": 0, "save_steps": 100})
    )
    planned = builders.launch(folder / "h", "run", recipe, "--dry-run")
    assert planned.returncode == 0, planned.stderr
    run = builders.only_run(folder / "h")
    with (folder / "server.log").open("w") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.faults.save_server", str(run), "1"],
            cwd=builders.CODE,
            env=builders.environment(
                folder / "h",
                OMP_NUM_THREADS="1",
                LOWMEM_SUPERVISED="1",
                LOWMEM_ROOT_PID=str(os.getpid()),
            ),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
        )
        assert process.stdout
        yield Server(process)
        process.kill()
        process.communicate()


@pytest.fixture(scope="module")
def calls(server, tmp_path_factory) -> tuple[Path, list[tuple[str, int, str]]]:
    """A folder with two checkpoints, and (system call, its number in its thread, the line) of the
    save of a third, where the call touches the checkpoints."""
    folder = tmp_path_factory.mktemp("two") / "checkpoints"
    folder.mkdir()
    for step in (10, 20):
        assert server.save(folder, step, folder.parent / "log") == 0
    third = folder.parent / "third"
    shutil.copytree(folder, third)
    log = folder.parent / "log"
    assert server.save(third, 30, log) == 0
    counts: Counter[tuple[str, str]] = Counter()
    found = []
    for line in log.read_text().splitlines():
        match = CALL.match(line)
        if match is None or "resumed>" in line.split("(")[0]:
            continue
        counts[match["pid"], match["call"]] += 1
        is_read = match["call"] == "openat" and "O_CREAT" not in match["rest"]
        if str(third) in match["rest"] and not is_read:
            found.append((match["call"], counts[match["pid"], match["call"]], line))
    return folder, sorted({(call, number, "") for call, number, _ in found})


@pytest.mark.fast_faults
def test_a_save_makes_the_calls_that_make_it_last(calls):
    names = Counter(call for call, _, _ in calls[1])
    assert names["rename"] >= 2, names
    assert names["fsync"] >= 8, names
    assert names["write"] + names["pwrite64"] + names["writev"] > 5, names


def copy(folder: Path, to: Path) -> Path:
    shutil.copytree(folder, to)
    return to


@pytest.mark.shows(
    "F2", "SIGKILL by strace at each system call of a save; the wait status is the signal"
)
def test_killed_at_any_call_every_checkpoint_before_it_is_whole_and_the_next_save_works(
    server, calls, tmp_path
):
    folder, every = calls
    for i, (call, number, _) in enumerate(every):
        there, log = copy(folder, tmp_path / str(i)), tmp_path / f"{i}.log"
        status = server.save(there, 30, log, "-e", f"inject={call}:signal=KILL:when={number}")
        where = f"{call} {number}: {log.read_text()[-300:]}"
        assert os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL, where
        good = {path.name for path in manifest.committed(there) if manifest.fault(path) is None}
        assert len(good) >= 2, where
        assert all(manifest.fault(path) is None for path in manifest.committed(there)), where
        assert {"checkpoint-000020"} < good, where
        assert server.save(there, 40, log) == 0, where
        assert manifest.newest_valid(there)[0] == there / "checkpoint-000040", where
        assert not list(there.glob("tmp-*")), where
        shutil.rmtree(there)


@pytest.mark.shows(
    "F3", "EIO, ENOSPC, EDQUOT by strace at each system call of a save; strace logged (INJECTED)"
)
@pytest.mark.parametrize(("error", "from_then_on"), [("EIO", ""), ("ENOSPC", "+"), ("EDQUOT", "")])
def test_refused_at_any_call_it_ends_with_10_and_older_checkpoints_stay(
    server, calls, tmp_path, error, from_then_on
):
    folder, every = calls
    written = [one for one in every if one[0] not in ("unlink", "unlinkat", "rmdir", "chmod")]
    for i, (call, number, _) in enumerate(written):
        there, log = copy(folder, tmp_path / str(i)), tmp_path / f"{i}.log"
        when = f"{number}{from_then_on if call != 'openat' else ''}"  # a full disk can be read
        status = server.save(there, 30, log, "-e", f"inject={call}:error={error}:when={when}")
        where = f"{call} {number}: {log.read_text()[-300:]}"
        assert "(INJECTED)" in log.read_text(), where
        assert os.WIFEXITED(status), where
        # it was there
        assert os.WEXITSTATUS(status) == 10 or (call == "mkdir" and os.WEXITSTATUS(status) == 0), (
            where
        )
        assert manifest.fault(there / "checkpoint-000020") is None, where
        assert all(manifest.fault(path) is None for path in manifest.committed(there)), where
        assert not list(there.glob("tmp-checkpoint-*")), where
        shutil.rmtree(there)
