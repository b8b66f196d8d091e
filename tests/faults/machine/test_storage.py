"""A disk that is full, or fails on one rank, ends the run with its exit code; what was saved is
there and continues."""

from __future__ import annotations

import re
import shutil
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from launch.run_folder import manifest
from launch.run_folder.layout import RunDir
from tests import builders, stopping

LONG = {"num_train_epochs": 2000, "save_steps": 20, "per_device_train_batch_size": 4}


def mount(folder: Path, size: str) -> Path:
    folder.mkdir()
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", folder],
        capture_output=True,
        text=True,
    )
    if done.returncode:
        pytest.skip(f"no tmpfs can be mounted here: {done.stderr.strip()}")
    return folder


@pytest.fixture
def small_disk(tmp_path) -> Iterator[Path]:
    """40 MiB: three checkpoints of the tiny model and the one being written take 13."""
    folder = mount(tmp_path / "disk", "40m")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", folder], check=True)


def fill(folder: Path, left_bytes: int) -> Path:
    """A file that leaves so much of the disk."""
    filler = folder / "filler"
    with filler.open("wb") as file:
        file.write(bytes(shutil.disk_usage(folder).free - left_bytes))
    return filler


@contextmanager
def started(workspace: Path, recipe: Path) -> Iterator[stopping.Child]:
    """A run that has written its first checkpoint."""
    argv = (*stopping.RUN, str(recipe))
    child = stopping.Child(
        recipe.parent, argv, workspace, recipe.parent / "out", OMP_NUM_THREADS="1"
    )
    with stopping.ended(child):
        child.until("a checkpoint", child.committed)
        yield child


def check_whole(run: RunDir) -> None:
    """What is there verifies, and nothing else is."""
    checkpoints = manifest.committed(run.checkpoints)
    assert checkpoints
    assert [manifest.fault(path) for path in checkpoints] == [None] * len(checkpoints)
    assert not list(run.checkpoints.glob("tmp-*"))


@pytest.mark.shows("F14", "a tmpfs with 10 MiB left; the free bytes stand in the message")
def test_a_disk_that_cannot_hold_the_checkpoints_is_refused_with_numbers_before_anything_starts(
    small_disk, tmp_path
):
    recipe = builders.recipe(tmp_path)
    (small_disk / "h").mkdir()
    fill(small_disk, 10 << 20)
    done = builders.launch(small_disk / "h", "run", str(recipe))
    assert done.returncode == 3, done.stdout
    assert re.search(
        r"3 checkpoints of about [23]\.\d MiB are kept \(training.save_total_limit 3\) .*takes"
        r" 1[12]\.\d MiB more; 9\.\d MiB are free. Try --training.save_total_limit=2",
        done.stderr,
    ), done.stderr
    fewer = builders.launch(
        small_disk / "h", "run", str(recipe), "--training.save_total_limit=1", "--dry-run"
    )
    assert fewer.returncode == 0, fewer.stderr
    assert (
        "training.save_total_limit 1: the 2 newest checkpoints that verify are kept all the same"
        in fewer.stdout
    )


@pytest.mark.fast_faults
@pytest.mark.shows("F14", "a tmpfs filled up to 1 MiB while it trains; the error is the kernel's")
def test_a_disk_that_fills_up_ends_the_run_with_10_and_the_same_line_continues_when_there_is_room(
    small_disk, tmp_path
):
    training = {**LONG, "num_train_epochs": 80}
    recipe = builders.recipe(tmp_path, launch={"num_processes": 2}, training=training)
    with started(small_disk / "h", recipe) as child:
        filler = fill(small_disk, 1 << 20)
        assert child.wait() == 10, child.said()
        run = child.run
        assert re.search(
            r"the checkpoint of step \d+ could not be written \(rank 0: No space left", child.said()
        )
    check_whole(run)
    last = manifest.committed(run.checkpoints)[-1].name
    filler.unlink()
    again = builders.launch(small_disk / "h", "run", str(recipe))
    assert again.returncode == 0, again.stdout
    assert f"resuming from {last}" in again.stdout


@pytest.mark.shows("F14", "a tmpfs that another fills up to 1.3 checkpoints between two saves")
def test_a_disk_that_others_fill_is_left_with_a_last_checkpoint_while_there_is_room_for_one(
    small_disk, tmp_path
):
    recipe = builders.recipe(
        tmp_path, launch={"num_processes": 2}, training={**LONG, "save_steps": 1_000_000}
    )
    child = stopping.Child(
        tmp_path,
        (*stopping.RUN, str(recipe)),
        small_disk / "h",
        tmp_path / "out",
        OMP_NUM_THREADS="1",
    )
    with stopping.ended(child):
        child.ranks()
        child.run.save_now_file.touch()
        (first,) = child.until("a checkpoint", child.committed)
        checkpoint = child.run.checkpoints / manifest.name(first)
        size = sum(path.stat().st_size for path in checkpoint.rglob("*") if path.is_file())
        fill(small_disk, int(1.3 * size))
        assert child.wait() == 10, child.said()
        assert "the disk has room for one more checkpoint only" in child.said()
        assert child.committed()[-1] > first
        check_whole(child.run)


@pytest.mark.shows(
    "F3", "EIO, ENOSPC, EDQUOT by strace in one rank's save; strace logged (INJECTED)"
)
@pytest.mark.skipif(shutil.which("strace") is None, reason="needs strace: apt-get install strace")
@pytest.mark.parametrize(
    ("mode", "call", "error", "path"),
    [
        pytest.param("multi_cpu", "fsync", "EIO", None, marks=pytest.mark.fast_faults),
        (
            "deepspeed_zero2",
            "openat",
            "ENOSPC",
            "global_step{step}/zero_pp_rank_1_mp_rank_00_optim_states.pt",
        ),
        pytest.param("deepspeed_zero3", "fsync", "EDQUOT", None, marks=pytest.mark.fast_faults),
    ],
)
def test_what_one_rank_cannot_write_ends_all_of_them_at_once_with_10(
    tmp_path, mode, call, error, path
):
    recipe = builders.recipe(tmp_path, launch={"num_processes": 2, "mode": mode}, training=LONG)
    log = tmp_path / "strace.log"
    words = [
        "strace",
        "-f",
        "-qq",
        "-o",
        str(log),
        "-e",
        f"trace={call}",
        "-e",
        f"inject={call}:error={error}:when=1",
    ]
    with started(tmp_path / "h", recipe) as child:
        run = child.run
        for step in range(40, 4000, 20) if path else ():
            staged = run.checkpoints / f"tmp-{manifest.name(step)}" / f"checkpoint-{step}"
            words += ["-P", str(staged / path.format(step=step))]
        tracer = subprocess.Popen(
            [*words, "-p", str(child.ranks()[1].pid)], stderr=subprocess.DEVNULL
        )
        assert child.wait() == 10, child.said()
        tracer.wait(timeout=30)
        assert "(INJECTED)" in log.read_text()
        assert re.search(
            r"the checkpoint of step \d+ could not be written \(rank 1: ", child.said()
        ), child.said()
    check_whole(run)
    words = [error.exit_code for error in run.attempts()[-1].rank_errors()]
    assert words == [10, 10]


def stopped(folder: Path, **training: int) -> stopping.Child:
    """A run that was told to stop and has checkpoints."""
    training = {"num_train_epochs": 100, "save_steps": 50, **training}
    with stopping.launched(folder, ranks=1, training=training) as child:
        child.until("a checkpoint", child.committed)
        child.process.send_signal(signal.SIGTERM)
        assert child.wait() == 75, child.said()
    return child


@pytest.mark.shows("F17", "a file of the run beside its checkpoints is cut to a half, or gone")
def test_a_damaged_file_of_a_run_is_named_and_a_damaged_list_of_commits_costs_nothing(tmp_path):
    child = stopped(tmp_path)
    words = ["run", str(tmp_path / "tiny.yaml")]
    for name in ("plan.json", "recipe.json", "tokens.json", "recipe.json is gone"):
        file = child.run.root / name.partition(" ")[0]
        whole = file.read_bytes()
        if name.endswith("gone"):
            file.unlink()
        else:
            file.write_bytes(whole[: len(whole) // 2])
        done = builders.launch(child.workspace, *words)
        assert done.returncode == 5, done.stderr
        assert f"{file}: missing or damaged (" in done.stderr
        assert "Traceback" not in done.stderr
        file.write_bytes(whole)
    commits = child.run.checkpoints / "commits.json"
    commits.write_bytes(commits.read_bytes()[:20])
    done = builders.launch(child.workspace, *words)
    assert done.returncode == 0, done.stderr
    assert f"{commits}: missing or damaged (" in done.stdout + done.stderr + log(child)
    assert commits.with_suffix(".damaged").exists()


def log(child: stopping.Child) -> str:
    return (child.run.attempts()[-1].root / "log.txt").read_text(encoding="utf-8")


def test_what_only_the_report_reads_does_not_decide_how_a_run_ends(tmp_path):
    child = stopped(tmp_path, num_train_epochs=10, save_steps=5, eval_steps=2)
    attempt = child.run.attempts()[0]
    damaged = {
        attempt.events_file: (b'"loss"', b'"lnss"'),
        attempt.held_out_file: (b'"loss"', b'"lnss"'),
        attempt.supervisor_file: (b'"failure"', b'"fahlure"'),
        attempt.plan_file: (b'"strategy"', b'"stratefy"'),
        attempt.outcome_file: (b'"complete"', b'"complepe"'),
    }
    # of a start that was killed at once; the last one's outcome is read before training
    child.run.new_attempt()
    words = ["run", str(tmp_path / "tiny.yaml")]
    for file, (name, flipped) in damaged.items():
        content = file.read_bytes()
        assert name in content, file
        file.write_bytes(content.replace(name, flipped, 1))
    done = builders.launch(child.workspace, *words)
    assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "model/config.json").exists()
    for file in (attempt.events_file, attempt.held_out_file):
        assert f"{file}: 1 damaged line(s)" in done.stdout
    assert f"{attempt.plan_file}: missing from the report, damaged (" in done.stdout
    assert f"{attempt.root}: its end is missing from the report" in done.stdout
    page = child.run.report_file.read_text()
    assert "not readable" in page and "<h2>Curves</h2>" in page


@pytest.mark.shows("F54", "a dry run with other values between a stop and the next start")
def test_a_dry_run_takes_nothing_over(tmp_path):
    child = stopped(tmp_path)
    run = child.run.run_id
    words = ["run", str(tmp_path / "tiny.yaml")]
    dry = builders.launch(
        child.workspace, *words, "--training.seed=7", "--resume.allow=[seed]", "--dry-run"
    )
    assert dry.returncode == 0, dry.stderr
    assert "in a new run" in dry.stdout
    done = builders.launch(child.workspace, *words)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"continuing {run}" in done.stdout
