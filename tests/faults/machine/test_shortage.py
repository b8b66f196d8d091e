"""Shared memory, inodes, the size of a file, a folder that turns read-only, an allocation that
fails: each ends the run with its code, and what was saved is there and continues."""

from __future__ import annotations

import os
import re
import resource
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from launch.run_folder import manifest
from tests import builders, stopping
from tests.stopping import Child

DAY_S = 86_400


def mounted(folder: Path, *words: str | Path) -> Path:
    """Something mounted there; skips where that may not be done."""
    folder.mkdir(exist_ok=True)
    done = subprocess.run(["mount", *words, folder], capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"nothing can be mounted here: {done.stderr.strip()}")
    return folder


@pytest.fixture
def disk(tmp_path) -> Iterator[Path]:
    """An ext4 of 64 MiB with 400 inodes, of which a run of one rank takes about 100."""
    image = tmp_path / "image"
    with image.open("wb") as file:
        file.truncate(64 << 20)
    subprocess.run(["mkfs.ext4", "-q", "-N", "400", image], check=True)
    folder = mounted(tmp_path / "disk", "-o", "loop", image)
    yield folder
    subprocess.run(["umount", "--lazy", folder], check=True)


def started(folder: Path, disk: Path) -> Child:
    """A run of one rank whose house is on that disk."""
    training = {**stopping.ENDLESS, "num_train_epochs": 400}
    recipe = builders.recipe(folder, training=training, launch={"num_processes": 1})
    return Child(folder, (*stopping.RUN, str(recipe)), disk / "h", folder / "out")


def check_saved(child: Child) -> None:
    """Every checkpoint that is there verifies, and there is one."""
    found = manifest.committed(child.run.checkpoints)
    assert found
    assert [manifest.fault(path) for path in found] == [None] * len(found)


def goes_on(folder: Path, workspace: Path, checkpoint: str = "checkpoint-", **extra: str) -> None:
    """The same line resumes from it, and is stopped there."""
    argv = (*stopping.RUN, str(folder / "tiny.yaml"))
    with stopping.ended(Child(folder, argv, workspace, folder / "again", **extra)) as child:
        child.until("it resumes", lambda: f"resuming from {checkpoint}" in child.said())
        child.until("a step", lambda: child.section() == "step")
        child.process.terminate()
        assert child.wait() == 75, child.said()


@pytest.mark.shows("F15", "all inodes but ten taken while it trains; the free inodes are counted")
def test_a_disk_without_inodes_ends_the_run_with_10_and_continues_when_there_are_some(
    tmp_path, disk, injected
):
    with stopping.ended(started(tmp_path, disk)) as child:
        child.until("two checkpoints", lambda: len(child.committed()) >= 2)
        taken = disk / "taken"
        taken.mkdir()
        for number in range(os.statvfs(disk).f_ffree - 10):
            (taken / str(number)).touch()
        injected()
        assert os.statvfs(disk).f_ffree <= 10
        assert child.wait() == 10, child.said()
        assert "No space left on device" in child.said()
        check_saved(child)
    for path in taken.iterdir():
        path.unlink()
    goes_on(tmp_path, disk / "h")


@pytest.mark.shows("F15", "RLIMIT_FSIZE of 4 KiB for the rank that trains; the limit is read back")
def test_a_limit_on_the_size_of_a_file_ends_the_run_with_10(tmp_path, injected):
    with stopping.launched(tmp_path, 1) as child:
        child.until("two checkpoints", lambda: len(child.committed()) >= 2)
        (rank,) = child.ranks(1)
        resource.prlimit(rank.pid, resource.RLIMIT_FSIZE, (4096, 4096))
        injected()
        assert resource.prlimit(rank.pid, resource.RLIMIT_FSIZE) == (4096, 4096)
        assert child.wait() == 10, child.said()
        assert "File too large" in child.said()
        assert "`ulimit -f`" in child.said()
        check_saved(child)
        assert child.left() == []


@pytest.mark.shows("F16", "a file system mounted read-only for the model, or for the runs", code=3)
@pytest.mark.parametrize("what", ["model", "workspace"])
def test_a_read_only_folder_is_refused_before_anything_is_loaded(tmp_path, what):
    recipe = builders.recipe(tmp_path)
    folder = mounted(tmp_path / "disk", "-t", "tmpfs", "-o", "ro", "none")
    try:
        if what == "model":
            done = builders.launch(
                tmp_path / "h", "run", str(recipe), f"--output_dir={folder / 'model'}"
            )
        else:
            environment = {**builders.environment(tmp_path / "h"), "LOWMEM_ROOT": str(folder)}
            argv = (*stopping.RUN, str(recipe))
            done = subprocess.run(argv, env=environment, capture_output=True, text=True, timeout=60)
    finally:
        subprocess.run(["umount", "--lazy", folder], check=True)
    assert done.returncode == (3 if what == "model" else 10), done.stderr
    assert str(folder) in done.stderr
    assert done.stderr.startswith("error: ")
    assert done.stderr.count("\n") == 1


@pytest.mark.shows(
    "F16", "the journal of the ext4 below the run is aborted: the kernel makes it read-only"
)
def test_a_disk_that_turns_read_only_ends_the_run_with_10_and_it_goes_on_once_it_is_mended(
    tmp_path, disk, injected
):
    with stopping.ended(started(tmp_path, disk)) as child:
        child.until("two checkpoints", lambda: len(child.committed()) >= 2)
        before = child.committed()
        subprocess.run(["mount", "-o", "remount,abort", disk], capture_output=True)
        injected()
        with pytest.raises(OSError, match="Read-only"):
            (disk / "x").touch()
        assert child.wait() == 10, child.said()
        assert child.left() == []
    subprocess.run(["umount", disk], check=True)
    mounted(disk, "-o", "loop", tmp_path / "image")
    check_saved(child)
    assert child.committed()[-1] >= before[-1]
    goes_on(tmp_path, disk / "h")


@pytest.mark.shows(
    "F12", "a tensor of 64 TiB asked of torch in one rank; a mark, and the allocator's own words"
)
def test_an_allocation_that_fails_ends_the_run_with_6(tmp_path):
    fault = stopping.at_step("7", "import torch; torch.empty(1 << 46)")
    with stopping.launched(tmp_path, faults={"huge": fault}) as child:
        assert child.wait() == 6, child.said()
        assert stopping.fired(tmp_path, "huge")
        assert "the host ran out of memory" in child.said()
        assert child.committed() == [5]
        assert child.left() == []


@pytest.mark.shows(
    "F13", "/dev/shm of 64 KiB and of 1 MiB in a mount namespace of its own, two data workers"
)
@pytest.mark.parametrize(("size", "batch"), [("64k", 8), ("1m", 512)])
def test_a_full_dev_shm_is_named_with_what_to_do(tmp_path, size, batch):
    training = {"dataloader_num_workers": 2, "max_steps": 20, "per_device_train_batch_size": batch}
    recipe = builders.recipe(tmp_path, count=3 * batch, training=training)
    line = (
        f'mount -t tmpfs -o size={size} none /dev/shm && exec "{sys.executable}" -m launch run'
        f' "{recipe}"'
    )
    argv = ["unshare", "--mount", "bash", "-c", line]
    environment = builders.environment(tmp_path / "workspace")
    done = subprocess.run(argv, env=environment, capture_output=True, text=True, timeout=200)
    if "unshare failed" in done.stderr:
        pytest.skip(done.stderr)
    assert done.returncode == 3, done.stdout[-3000:] + done.stderr
    assert "/dev/shm is too small, full or cannot be written" in done.stdout
    assert "--training.dataloader_num_workers=0" in done.stdout


@pytest.mark.shows(
    "F40", "the rows rewritten and cut while the run trains; their content is another"
)
def test_rows_that_change_while_a_run_trains_do_not_reach_it_and_are_refused_afterwards(
    tmp_path, injected
):
    with stopping.launched(tmp_path, 1) as child:
        child.until("a checkpoint", child.committed)
        file = tmp_path / "train.parquet"
        whole = file.read_bytes()
        builders.write_parquet(file, builders.rows(30, seed=9))
        with file.open("ab") as appended:
            appended.write(b"garbage")
        injected()
        assert file.read_bytes() != whole
        before = child.committed()[-1]
        child.until("more checkpoints", lambda: child.committed()[-1] > before + 20)
        child.process.terminate()
        assert child.wait() == 75, child.said()
    recipe = str(tmp_path / "tiny.yaml")
    builders.write_parquet(file, builders.rows(45, seed=9))
    refused = builders.launch(tmp_path / "workspace", "run", recipe)
    assert refused.returncode == 5, refused.stdout + refused.stderr
    assert f"the content of {file} has changed" in refused.stderr
    file.write_bytes(whole)
    again = builders.launch(tmp_path / "workspace", "run", recipe, "--dry-run")
    assert again.returncode == 0, again.stderr
    assert "continuing tiny-" in again.stdout


@pytest.mark.shows(
    "F54", "kill -9 of the launcher before it writes each file of a run's folder; marks counted"
)
def test_a_launcher_killed_between_any_two_of_its_files_leaves_nothing_that_stops_the_next(
    tmp_path,
):
    recipe = str(
        builders.recipe(tmp_path, training={"max_steps": 2, "save_steps": 2, "warmup_steps": 0})
    )
    workspace, kill = tmp_path / "workspace", "os.kill(os.getpid(), 9)"
    fault = {"module": "launch.base.files", "attribute": "write_atomic", "do": kill}
    for number in range(100):
        faults = stopping.injecting(
            tmp_path, **{f"killed{number}": {**fault, "when": f"call == {number}"}}
        )
        done = builders.launch(workspace, "run", recipe, "--dry-run", **faults)
        if done.returncode == 0:
            break
        assert done.returncode == -9, done.stderr
        assert stopping.fired(tmp_path, f"killed{number}") == 1
    assert number >= 4
    done = builders.launch(workspace, "run", recipe)
    assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "model/config.json").exists()


@pytest.mark.shows(
    "F23",
    "clock_gettime a day back or forward while it trains or between the files of a save, by"
    " LD_PRELOAD; the events' times go by that much",
)
@pytest.mark.parametrize("where", ["a step", "a save"])
@pytest.mark.parametrize("by_s", [-DAY_S, DAY_S], ids=["back", "forward"])
def test_a_clock_that_jumps_costs_no_checkpoint_and_is_no_hang(
    tmp_path, injected, jumping_clock, by_s, where
):
    moved, extra = jumping_clock(by_s)
    jumps = {
        "module": "training.checkpoints.commit",
        "attribute": "describe",
        "when": "args[0].name == 'checkpoint-15'",
        "rank": 0,
        "do": f"open({str(moved)!r}, 'w')",
    }
    faults = {"jumps": jumps} if where == "a save" else None
    with stopping.launched(
        tmp_path, faults=faults, extra=extra, launch={"hang_floor_s": 20}
    ) as child:
        child.until("two checkpoints", lambda: len(child.committed()) >= 2)
        before = child.committed()[-1]
        if where == "a save":
            child.until("the jump", moved.exists)
            assert stopping.fired(tmp_path, "jumps") == 1
        else:
            moved.touch()
        injected()
        child.until("more checkpoints", lambda: child.committed()[-1] > before + 20)
        child.process.terminate()
        assert child.wait() == 75, child.said()
        assert len(set(re.findall(r"(?m)^(\d{4}-\d\d-\d\d) ", child.said()))) == 2, child.said()
        assert "hangs" not in child.said()
        step = child.outcome()["step"]
        assert before < child.committed()[0] < child.committed()[-1] == step
        assert child.left() == []
    moved.unlink()
    goes_on(tmp_path, tmp_path / "workspace", f"checkpoint-{step:06d}", **extra)
