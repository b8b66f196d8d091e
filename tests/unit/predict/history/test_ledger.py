"""Results are stored and recalled, and never stop a run: real files and processes, full disks."""

from __future__ import annotations

import fcntl
import json
import os
import random
import shutil
import signal
import subprocess
import time
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from launch.predict.history.calibration import Figures
from launch.predict.history.ledger import Ledger
from tests.unit.predict.history.entries import KEYS, add, lines_of, measurement, old_file, tuned
from tests.unit.predict.history.launchers import IMPORTS, Launcher, started

# ---- what is kept and found again
# ---------------------------------------------------------------------------


def test_reading_where_nothing_is_yet_makes_no_file(book, said):
    assert book.recall(**KEYS) is None
    assert book.measurements() == said == []
    assert not book.path.parent.exists()


def test_every_field_of_a_measurement_is_in_its_line(book, said):
    figures = Figures(allocated_bytes=1, reserved_bytes=2, host_pss_bytes=1 << 40, step_s=0.5)
    kept = measurement(predicted=figures, measured=Figures(reserved_bytes=7))
    book.record(kept)
    (line,) = lines_of(book.path)
    assert line == asdict(kept)
    assert line["measured"]["allocated_bytes"] is None
    assert book.measurements() == [kept]
    assert said == []


def test_lines_with_fewer_or_more_figures_than_this_version_has_are_read(book, said):
    line = asdict(measurement(asked=100, took=110))
    del line["predicted"]["step_s"]
    line["measured"]["joules"] = 7
    add(book.path, json.dumps(line) + "\n")
    assert book.measurements() == [measurement(asked=100, took=110)]
    assert said == []


def test_tuning_again_replaces_what_was_remembered(book, strategy, said):
    better = replace(strategy, per_device_train_batch_size=32)
    book.record(tuned(strategy))
    book.record(tuned(better, time=2.0, step_s=0.25))
    book.record(tuned(strategy, model_key="another"))
    assert book.recall(**KEYS) == tuned(better, time=2.0, step_s=0.25)
    assert said == []


def test_what_is_forgotten_is_gone_and_nothing_else_is(book, strategy):
    book.record(tuned(strategy))
    book.record(tuned(strategy, model_key="another"))
    assert book.forget(**KEYS)
    assert book.recall(**KEYS) is None
    assert book.recall(**{**KEYS, "model_key": "another"}) is not None
    assert not book.forget(**KEYS)
    book.record(tuned(strategy))
    assert book.recall(**KEYS) == tuned(strategy)


def test_lines_that_this_version_does_not_know_are_passed_over_and_said_once(book, strategy, said):
    book.record(tuned(strategy))
    line = asdict(tuned(strategy))
    add(book.path, json.dumps({**line, "kind": "dreamt\x1b[2J\n"}) + "\n")
    add(book.path, json.dumps({**line, "strategy": {}}) + "\n")
    book.record(measurement())
    assert book.recall(**KEYS) == tuned(strategy)
    assert book.measurements() == [measurement()]
    (text,) = said
    assert "2 line(s) not of this version are passed over, the first is line 2: " in text
    assert "'dreamt\\x1b[2J\\n'" in text


# ---- several launchers
# ---------------------------------------------------------------------------

WRITERS = f"""{IMPORTS}
def say(line):
    os.write(1, f"{{line}}\\n".encode())  # in one piece

book = Ledger(Path(sys.stdin.readline().strip()), say, busy_s=60)
gate, opens = os.pipe()
pids = []
for number in range(50):
    pids.append(os.fork())
    if not pids[-1]:
        os.close(opens)
        os.read(gate, 1)  # until all are there
        for turn in range(10):
            book.record(replace(first, run_id=f"{{number}}-{{turn}}"))
            say(f"{{number}}-{{turn}}")
        os._exit(0)
say(" ".join(map(str, pids)))
os.close(opens)
for pid in pids:
    os.waitpid(pid, 0)
"""


@pytest.mark.parametrize("num_kills", [0, 10])
def test_fifty_writers_at_once_lose_no_line_even_if_some_of_them_are_killed(path, num_kills):
    writers = started(WRITERS)
    writers.stdin.write(f"{path}\n")
    writers.stdin.flush()
    pids = [int(pid) for pid in writers.stdout.readline().split()]
    written = []
    for pid in random.Random(1).sample(pids, num_kills):
        written.append(writers.stdout.readline().strip())
        os.kill(pid, signal.SIGKILL)
    written += writers.stdout.read().splitlines()  # communicate() passes over what is buffered
    writers.wait(timeout=60)
    assert len(pids) == 50 and len(written) >= 400
    run_ids = [run.run_id for run in Ledger(path, print).measurements()]
    assert set(written) <= set(run_ids)  # a line that was said, or an error, would not be there
    assert len(run_ids) == len(set(run_ids)) <= len(written) + num_kills


HALF = f"""{IMPORTS}
path = Path(sys.stdin.readline().strip())
Ledger(path, print).record(replace(first, run_id="x" * 100_000_000))
"""


def killed_within_a_write(path: Path) -> None:
    """Leaves a part of a line at the end of the file, which ends with a whole one."""
    size = path.stat().st_size
    for _ in range(20):
        child = started(HALF)
        child.stdin.write(f"{path}\n")
        child.stdin.flush()
        while path.stat().st_size == size and child.poll() is None:
            pass
        child.kill()
        child.communicate(timeout=60)
        with path.open("r+b") as file:
            file.seek(-1, os.SEEK_END)
            if file.read() != b"\n":
                return
            file.truncate(size)  # the kill came too late
    pytest.fail("no kill came within a write")


def test_a_kill_within_a_write_costs_that_line_only_and_is_said_once(book, said, launchers):
    book.record(measurement("before"))
    killed_within_a_write(book.path)
    assert [run.run_id for run in book.measurements()] == ["before"]
    launchers[0].begin(book.path, ["after", "later"])
    (line,), counts = launchers[0].end()
    assert counts == [2, 3]
    assert (
        "1 line(s) not of this version are passed over, the first is line 2: 'Invalid JSON" in line
    )
    assert len(book.measurements()) == 3
    assert said == [line]


def test_a_line_that_is_being_written_is_no_damage(book, said):
    book.record(measurement())
    add(book.path, '{"kind": "measu')
    assert book.measurements() == [measurement()]
    assert said == []


def test_a_reader_goes_on_while_another_writes_and_a_writer_that_waits_in_vain_says_so(book, said):
    book.record(measurement("first"))
    with book.path.open("a") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        assert book.measurements() == [measurement("first")]
        assert said == []
        began = time.monotonic()
        book.record(measurement("second"))
        assert time.monotonic() - began >= book.busy_s
    (line,) = said
    assert "another process has locked it for 0.2 s; nothing new is kept, the run goes on" in line
    assert book.measurements() == [measurement("first")]


# ---- files that cannot be used
# ---------------------------------------------------------------------------


def test_what_is_in_the_place_of_the_file_stays_and_new_lines_follow_it(book, said):
    book.path.parent.mkdir(parents=True)
    book.path.write_bytes(b"\x80\x04\n" + b"[" * 100_000)
    book.record(measurement())
    assert book.measurements() == [measurement()]
    (line,) = said
    assert "2 line(s) not of this version are passed over, the first is line 1: " in line


@pytest.mark.parametrize("place", ["pipe", "folder", "/dev/zero", "link"])
def test_a_place_where_no_file_can_be_stops_nothing(book, said, tmp_path, place):
    letter = tmp_path / "letter.txt"
    letter.write_text("Dear all\n", encoding="utf-8")
    book.path.parent.mkdir(parents=True)
    if place == "pipe":
        os.mkfifo(book.path)
    elif place == "folder":
        book.path.mkdir()
    else:
        book.path.symlink_to(letter if place == "link" else place)
    book.record(measurement())
    assert book.measurements() == []
    writes, reads = said
    assert "nothing new is kept, the run goes on" in writes
    assert "nothing is recalled, the run goes on" in reads or place == "link"
    assert letter.read_text(encoding="utf-8") == "Dear all\n"


def test_a_file_in_the_place_of_the_folder_stops_nothing(tmp_path, said):
    (tmp_path / "file").touch()
    book = Ledger(tmp_path / "file" / "ledger.jsonl", said.append)
    book.record(measurement())
    assert book.measurements() == []
    (line,) = said
    assert "nothing new is kept, the run goes on" in line


def test_a_share_without_locks_is_one_line(path, tmp_path):
    source, library = tmp_path / "nolocks.c", tmp_path / "nolocks.so"
    source.write_text(
        "#include <errno.h>\nint flock(int file, int how) { errno = ENOLCK; return -1; }\n"
    )
    subprocess.run(["cc", "-shared", "-fPIC", "-o", library, source], check=True)
    launcher = Launcher(LD_PRELOAD=str(library))
    launcher.begin(path, ["first", "second"])
    (line,), counts = launcher.end()
    launcher.close()
    assert "its file system keeps no locks" in line
    assert line.endswith("nothing new is kept, the run goes on")
    assert counts == [0, 0]


def mounting(*command: str) -> list[str]:
    """argv that runs with file systems of its own."""
    return ["unshare", "--map-root-user", "--mount", *command]


NO_MOUNTS = "" if shutil.which("unshare") else "no unshare"
NO_MOUNTS = (
    NO_MOUNTS or subprocess.run(mounting("true"), capture_output=True, text=True).stderr.strip()
)
needs_mounts = pytest.mark.skipif(bool(NO_MOUNTS), reason=f"cannot mount here: {NO_MOUNTS}")


FULL = {
    "tmpfs": mounting("sh", "-c", 'mount -t tmpfs -o size=64k none "$0" && exec "$@"'),
    "limit": ["sh", "-c", 'ulimit -f 64 && exec "$@"'],
}


@pytest.mark.parametrize("limit", [pytest.param("tmpfs", marks=needs_mounts), "limit"])
def test_a_full_disk_loses_only_what_no_longer_fits(tmp_path, limit):
    launcher = Launcher(*FULL[limit], str(tmp_path))
    path = tmp_path / "ledger.jsonl"
    launcher.begin(path, [f"run-{number}" for number in range(400)])
    said, counts = launcher.end()
    count = counts[-1]
    assert 20 < count < 400
    assert counts == [*range(1, count + 1), *[count] * (400 - count)]
    assert len(said) == 1, said
    assert said[0].endswith("nothing new is kept, the run goes on")
    launcher.close()


@needs_mounts
@pytest.mark.parametrize("is_old", [False, True], ids=["new", "old"])
def test_a_read_only_file_system_can_be_read_and_says_that_nothing_is_kept(book, tmp_path, is_old):
    book.record(measurement("before"))
    if is_old:
        old_file(book.path)
    folder = tmp_path / "mounted"
    folder.mkdir()
    script = (
        f'mount -t tmpfs none "{folder}" && cp "{book.path.parent}"/* "{folder}/" && mount -o'
        f' remount,ro "{folder}"'
    )
    launcher = Launcher(*mounting("sh", "-c", f'{script} && exec "$@"', "sh"))
    launcher.begin(folder / book.path.name, ["after"])
    (line,), counts = launcher.end()
    launcher.close()
    assert counts == [1]
    assert "Read-only file system" in line
    assert line.endswith("nothing new is kept, the run goes on")
