"""However a run is told to stop, all ranks end after the same step, with one checkpoint, and
nothing is left."""

from __future__ import annotations

import json
import random
import re
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from launch.base import processes
from launch.recipe.load import load
from launch.status.runs import RunFiles
from tests import builders, stopping
from tests.stopping import Child

SEED = 20261121
SLEEP = "import time; time.sleep(4)"


def trained(child: Child) -> int:
    """The newest checkpoint, once there are two."""
    child.until("two checkpoints", lambda: len(child.committed()) >= 2)
    return child.committed()[-1]


def check_stopped(child: Child, before: int, exit_code: int = 75) -> None:
    """It ended with its code, kept a checkpoint of its last step, and left nothing."""
    assert child.wait() == exit_code, child.said()
    outcome = child.outcome()
    assert (outcome["complete"], outcome["ended"]) == (False, "preempted")
    assert outcome["checkpoint"] == f"checkpoint-{outcome['step']:06d}"
    assert child.committed()[-1] == outcome["step"] >= before
    assert child.left() == []


@pytest.mark.shows(
    "F6",
    "F9",
    "SIGINT, SIGTERM, SIGHUP, SIGUSR1 to the launcher; the signal is named in what it says",
)
@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1"])
@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.fast_faults)])
def test_a_stop_signal_to_the_launcher_saves_and_the_same_line_continues(
    tmp_path, injected, name, ranks
):
    with stopping.launched(tmp_path, ranks) as child:
        before = trained(child)
        child.process.send_signal(getattr(signal, name))
        injected()
        check_stopped(child, before, 130 if name == "SIGINT" else 75)
        assert f"error: stopped by {name} at step {child.outcome()['step']}" in child.said()
        again = builders.launch(
            tmp_path / "workspace", "run", str(tmp_path / "tiny.yaml"), "--dry-run"
        )
        assert "continuing tiny-" in again.stdout


@pytest.mark.shows(
    "F7",
    "SIGTERM at a random moment to launcher, accelerate or ranks apart; the outcome says preempted",
)
@pytest.mark.parametrize("draw", range(8))
def test_sigterm_at_a_random_moment_to_launcher_agent_or_ranks_apart(tmp_path, injected, draw):
    """The campaign of which benchmarks.stops runs a hundred; each draw can be repeated by its
    number."""
    rng = random.Random(SEED + draw)
    with stopping.launched(tmp_path) as child:
        stopping.stop_at_random(child, rng)
        injected()
        before = child.committed()[-1:] or [0]
        code = child.wait()
        assert code == 75, child.said()
        assert child.outcome()["ended"] == "preempted"
        assert (child.committed()[-1:] or [0]) >= before
        assert child.left() == []


@pytest.mark.shows("F6", "SIGTERM, SIGUSR1 to accelerate; the outcome says preempted")
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_signal_to_accelerate_saves_too(tmp_path, injected, ranks):
    for name in ("SIGTERM", "SIGUSR1"):
        with stopping.launched(tmp_path, ranks, workspace=name) as child:
            before = trained(child)
            child.launcher().send_signal(getattr(signal, name))
            injected()
            check_stopped(child, before)


@pytest.mark.fast_faults
@pytest.mark.shows("F9", "SIGINT twice, the second during a save of 60 s; the save left a mark")
def test_the_same_signal_again_ends_it_at_once_and_keeps_the_old_checkpoints(tmp_path, injected):
    fault = {
        "module": "training.checkpoints.commit",
        "attribute": "commit",
        "do": "import time; time.sleep(60)",
        "when": "done > 1",
    }
    fault["when"] = "args[2] > 10"  # the step: a save that takes for ever
    with stopping.launched(tmp_path, faults={"slow": fault}) as child:
        assert trained(child) == 10
        child.process.send_signal(signal.SIGINT)
        injected()
        child.until("the slow save", lambda: stopping.fired(tmp_path, "slow"))
        time.sleep(1.5)
        began = time.monotonic()
        child.process.send_signal(signal.SIGINT)
        assert child.wait() == 130, child.said()
        assert time.monotonic() - began < 10
        assert child.committed() == [5, 10]
        assert child.left() == []


def check_says_what_stays(child: Child, saved: str) -> None:
    end = child.said().rpartition("error: stopped ")[2]
    assert saved in end and "  fix    run the same line again to continue" in end, child.said()


SECTIONS = {  # section -> what is slow there
    "load": {"module": "training.model.build", "attribute": "build"},
    "evaluation": {
        "module": "training.control.stop_callback",
        "attribute": "StopCallback.between_batches",
    },
    "save": {"module": "training.checkpoints.commit", "attribute": "commit"},
    "export": {"module": "training.loop.export", "attribute": "save_weights"},
}


@pytest.mark.shows(
    "F8", "SIGTERM while loading, evaluating, saving, exporting; the section left a mark"
)
@pytest.mark.parametrize(
    "section", ["load", "evaluation", pytest.param("save", marks=pytest.mark.fast_faults), "export"]
)
def test_a_stop_is_obeyed_in_every_section(tmp_path, injected, section):
    training = {"num_train_epochs": 2} if section == "export" else {}
    fault = {**SECTIONS[section], "do": SLEEP}
    with stopping.launched(tmp_path, faults={"slow": fault}, training=training) as child:
        child.until("the section", lambda: stopping.fired(tmp_path, "slow"))
        began = time.monotonic()
        child.process.send_signal(signal.SIGTERM)
        injected()
        assert child.wait() == 75, child.said()
        assert time.monotonic() - began < 20
        assert child.left() == []
        # an epoch has 6 steps
        expected = {"load": [], "evaluation": [5, 6], "save": [5], "export": [5, 10, 12]}
        assert child.committed() == expected[section]
        assert not (tmp_path / "model").exists()
        step = [0, *expected[section]][-1]
        check_says_what_stays(child, f"step {step}" if step else "no step is saved")
    if section == "export":
        again = builders.launch(tmp_path / "workspace", "run", str(tmp_path / "tiny.yaml"))
        assert again.returncode == 0, again.stdout
        assert "resuming from checkpoint-000012" in again.stdout
        assert "step 1/12" not in again.stdout
        assert (tmp_path / "model/config.json").exists()


@pytest.mark.shows(
    "F8", "SIGTERM while 100,000 rows are tokenised; the section is read from the heartbeat"
)
def test_a_stop_while_rows_are_tokenised_leaves_nothing_half_made(tmp_path, injected):
    with stopping.launched(tmp_path, count=100_000) as child:
        child.until("tokenising", lambda: child.section() == "tokenise")
        began = time.monotonic()
        child.process.send_signal(signal.SIGTERM)
        injected()
        assert child.wait() == 75, child.said()
        assert time.monotonic() - began < 15
        assert child.left() == []
        tokens = tmp_path / "workspace/.cache/tokens"
        # .parts holds finished units, which the next start keeps
        unfinished = {".lock", ".parts"}
        check_says_what_stays(child, "no step is saved, tokenised rows stay")
        assert load(str(child.run.recipe_yaml))[0].name == "tiny"  # for the line that goes on
        assert {path.suffix for path in tokens.glob("*")} <= unfinished, "taken for whole rows"


@pytest.mark.shows(
    "F10", "SIGTERM, then SIGKILL after 3 s, with a save of 60 s; the save left a mark"
)
def test_a_grace_shorter_than_the_save_leaves_the_old_checkpoint(tmp_path):
    fault = {
        "module": "training.checkpoints.commit",
        "attribute": "commit",
        "do": "import time; time.sleep(60)",
    }
    fault["when"] = "args[2] > 10"
    with stopping.launched(tmp_path, faults={"slow": fault}) as child:
        trained(child)
        child.process.send_signal(signal.SIGTERM)
        time.sleep(3)
        child.process.kill()
        child.wait()
        assert child.left() == []
        assert stopping.fired(tmp_path, "slow") == 1
        assert child.committed() == [5, 10]
    again = builders.launch(
        tmp_path / "workspace", "run", str(tmp_path / "tiny.yaml"), "--training.max_steps=12"
    )
    # another number of steps is another run: refused, and nothing is lost
    assert again.returncode == 5


def test_a_wish_for_a_checkpoint_is_granted_and_training_goes_on(tmp_path):
    """One that comes during a save has that checkpoint: nothing was trained since."""

    def goes_on(number: int) -> bool:
        steps = [event["step"] for event in builders.events(child.run.root)]
        return len(child.committed()) == number and steps[-1] > child.committed()[-1]

    with stopping.launched(tmp_path, training={"save_steps": 100_000}) as child:
        child.until("steps", lambda: child.run.attempts()[-1].second_step_file.exists())
        child.run.save_now_file.mkdir()  # no file: nothing is asked for
        child.until("ten steps more", lambda: builders.events(child.run.root)[-1]["step"] > 10)
        child.run.save_now_file.rmdir()
        child.run.save_now_file.touch()
        child.until("a checkpoint", lambda: goes_on(1))
        assert not child.run.save_now_file.exists()
        child.process.send_signal(signal.SIGUSR2)
        child.until("another", lambda: goes_on(2))
        child.ranks()[1].send_signal(signal.SIGUSR2)
        child.until("a third", lambda: len(child.committed()) == 3)
        child.process.send_signal(signal.SIGTERM)
        check_stopped(child, child.committed()[-1])


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.fast_faults)])
def test_a_wish_for_a_checkpoint_that_reaches_any_process_ends_none(tmp_path, ranks):
    """`scancel --signal=USR2 --full` and `pkill -USR2` reach every process of a run."""

    def saved(number: int) -> bool:
        return len(child.committed()) == number

    workers = {"dataloader_num_workers": 1}
    training = {"save_steps": 100_000, **workers}
    with stopping.launched(tmp_path, ranks, training=training) as child:
        child.launcher().send_signal(signal.SIGUSR2)  # it imports: there is nothing to save yet
        trains = child.run.attempts()[-1].second_step_file.exists
        child.until("steps", trains)
        already = len(child.committed())
        child.launcher().send_signal(signal.SIGUSR2)
        child.until("a checkpoint", lambda: saved(already + 1))
        time.sleep(0.5)  # else the next request may be part of that save
        processes_of_run = processes.tagged(child.run.tag)
        assert len(processes_of_run) > 2 * ranks  # accelerate, ranks, their workers
        for process in processes_of_run:
            processes.send(process.pid, signal.SIGUSR2)
        child.until("another", lambda: len(child.committed()) > already + 1)
        time.sleep(1)
        child.process.send_signal(signal.SIGTERM)
        check_stopped(child, child.committed()[-1])
        assert len(child.run.attempts()) == 1  # nothing was started again


@pytest.mark.parametrize("where", ["recipe", "Slurm"])
def test_before_its_time_is_up_a_run_saves_and_stops(tmp_path, where):
    limit_s = 50.0
    launch = {"time_limit_s": limit_s} if where == "recipe" else {}
    extra = {} if where == "recipe" else {"SLURM_JOB_END_TIME": str(int(time.time() + limit_s))}
    began = time.monotonic()
    with stopping.launched(tmp_path, launch=launch, extra=extra) as child:
        check_stopped(child, 0)
        assert time.monotonic() - began < limit_s
        assert "  the time is nearly up: " in child.said()
        assert "error: stopped because the time is nearly up at step" in child.said()


@pytest.mark.parametrize("where", ["recipe", "Slurm"])
def test_a_time_that_is_shorter_than_a_start_is_named_with_what_it_takes(tmp_path, where):
    limit_s = 4
    launch = {"time_limit_s": limit_s} if where == "recipe" else {}
    extra = {} if where == "recipe" else {"SLURM_JOB_END_TIME": str(int(time.time() + limit_s))}
    with stopping.launched(tmp_path, launch=launch, extra=extra) as child:
        assert child.wait() == 75, child.said()
        said = child.said()
        missing = re.search(
            r"no step was made: (\d+) s are missing for one, as the last 25 s are", said
        )
        assert missing and int(missing[1]) >= 25 - limit_s, said
        assert "run the same line again" not in said
        raised = {
            "recipe": f"raise launch.time_limit_s above {limit_s + int(missing[1])} (it is 4)",
            "Slurm": f"raise the time of the Slurm job by more than {missing[1]} s",
        }
        assert f"  fix    {raised[where]}: the same line would end here again" in said, said
        assert RunFiles(child.run).state().fix.startswith(raised[where])


def test_a_time_that_tokenising_took_is_long_enough_for_the_same_line(tmp_path):
    """The next start has the rows."""
    with stopping.launched(tmp_path, 1, launch={"time_limit_s": 65}, count=20_000) as child:
        child.until("tokenising", lambda: child.section() == "tokenise")
        beat = child.run.attempts()[-1].heartbeat_file(0).read_text()
        tokenising = psutil.Process(json.loads(beat)["pid"])
        tokenising.suspend()
        time.sleep(45)  # of its 65 s, of which the last 25 are kept: none are left for a step
        tokenising.resume()
        assert child.wait(120) == 75, child.said()
        assert child.committed() == []
        assert "error: stopped because the time is nearly up\n" in child.said()
        check_says_what_stays(child, "no step is saved, tokenised rows stay")


STARTS = {  # how ranks are started without our launcher -> (argv, ranks)
    "accelerate": (("-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", "2"), 2),
    "accelerate, one process": (("-m", "accelerate.commands.launch"), 1),
    "torchrun": (("-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"), 2),
    "python": ((), 1),
}


@pytest.mark.shows(
    "F6",
    "F7",
    "SIGTERM, SIGUSR1 to accelerate, torchrun, python or one rank; the outcome says preempted",
)
@pytest.mark.parametrize("start", STARTS)
@pytest.mark.parametrize(
    ("to", "name"), [("launcher", "SIGTERM"), ("launcher", "SIGUSR1"), ("rank", "SIGTERM")]
)
def test_without_our_launcher_a_signal_saves_too(tmp_path, injected, start, to, name):
    before, ranks = STARTS[start]
    with stopping.ended(direct(tmp_path, before)) as child:
        newest = trained(child)
        chosen = child.ranks(ranks)[-1] if to == "rank" else child.process
        chosen.send_signal(getattr(signal, name))
        injected()
        code = child.wait()
        assert code != 0
        if start == "python":
            assert code == 75
        assert child.left(within_s=20) == []
        outcome = child.outcome()
        assert outcome["ended"] == "preempted"
        assert child.committed()[-1] == outcome["step"] >= newest


@pytest.mark.parametrize("start", [name for name in STARTS if name != "python"])
def test_without_our_launcher_a_wish_for_a_checkpoint_to_it_saves_and_says_why_it_stops(
    tmp_path, start
):
    """accelerate and torchrun end from SIGUSR2, which they do not know; no step is lost."""
    before, ranks = STARTS[start]
    with stopping.ended(direct(tmp_path, before)) as child:
        newest = trained(child)
        child.ranks(ranks)
        child.process.send_signal(signal.SIGUSR2)
        assert child.wait() != 0
        assert child.left(within_s=20) == []
        outcome = child.outcome()
        assert outcome["ended"] == "preempted"
        assert child.committed()[-1] == outcome["step"] >= newest
        assert "the process that started the ranks has ended: run the same line" in child.said()


def direct(folder: Path, launcher: tuple[str, ...]) -> Child:
    """The guides' line on a tiny model, with a tag by which what is left is found."""
    train = builders.write_parquet(folder / "train.parquet", builders.rows(45))
    flags = ["train", "--is_finetune=True", "--use_fast_config=True", "--batch_size_per_gpu=3"]
    flags += [
        "--model.shape=llama-tiny",
        "--training.num_train_epochs=20000",
        "--training.save_steps=5",
    ]
    flags += ["--training.bf16=false", "--data.validation_file=null", f"--train_file={train}"]
    argv = (sys.executable, *launcher, str(builders.CODE / "train_low_mem.py"), *flags)
    tag = f"direct-{folder.name}"
    return Child(folder, argv, folder / "workspace", folder / "out", LOWMEM_RUN=tag)


@pytest.mark.shows("F5", "kill -9 of the launcher; it is waited for")
@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.fast_faults)])
def test_kill_minus_nine_of_the_launcher_takes_the_ranks_with_it(tmp_path, injected, ranks):
    with stopping.launched(tmp_path, ranks) as child:
        trained(child)
        child.process.kill()
        injected()
        child.wait()
        assert child.left() == []


@pytest.mark.shows("F25", "the same line and a second run into the same folder while one trains")
def test_a_second_start_is_refused_while_the_first_runs(tmp_path):
    with stopping.launched(tmp_path, 1) as child:
        trained(child)
        began = time.monotonic()
        second = builders.launch(tmp_path / "workspace", "run", str(tmp_path / "tiny.yaml"))
        took = time.monotonic() - began
        other = f"--resume={child.run.root}"
        third = builders.launch(
            tmp_path / "workspace",
            "run",
            str(tmp_path / "tiny.yaml"),
            other,
            f"--output_dir={tmp_path}/b",
        )
        elsewhere = builders.launch(tmp_path / "elsewhere", "run", str(tmp_path / "tiny.yaml"))
        child.process.send_signal(signal.SIGINT)
        assert child.wait() == 130
    for refused in (second, third, elsewhere):
        assert refused.returncode == 9, refused.stdout + refused.stderr
        assert f"process {child.process.pid} on " in refused.stderr
    assert took < 4  # 2 s where no other test runs beside it


def test_the_line_on_a_stop_names_no_checkpoint_that_was_found_damaged(tmp_path):
    recipe = str(tmp_path / "tiny.yaml")
    with stopping.launched(tmp_path, 1) as child:
        trained(child)
        child.process.terminate()
        assert child.wait() == 75, child.said()
        newest = child.outcome()["checkpoint"]
        (child.run.checkpoints / newest / "trainer_state.json").write_text("{}")
        # before a step it trains, and so before another checkpoint
        limit = "--launch.time_limit_s=1"
        again = builders.launch(tmp_path / "workspace", "run", recipe, limit)
        assert again.returncode == 75, again.stdout + again.stderr
        assert f"{newest}/trainer_state.json has 2 bytes" in again.stdout
        kept = child.outcome()["checkpoint"]
        assert kept in {f"checkpoint-{step:06d}" for step in child.committed()} - {newest}
        assert f"{kept} is kept" in again.stdout + again.stderr


@pytest.mark.shows("F25", "the same line twenty times at once")
def test_of_twenty_starts_at_once_one_trains_and_the_others_name_it(tmp_path):
    recipe = str(builders.recipe(tmp_path))
    argv, env = (*stopping.RUN, recipe), builders.environment(tmp_path / "workspace")
    starts = [
        subprocess.Popen(argv, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for _ in range(20)
    ]
    said = [start.communicate(timeout=300) for start in starts]
    assert sorted(start.returncode for start in starts) == [0] + [9] * 19, said
    (trained,) = (start.pid for start in starts if start.returncode == 0)
    refused = [err for (_, err), start in zip(said, starts, strict=True) if start.returncode]
    assert all(f"is in use by process {trained} on " in err for err in refused), refused
    assert (tmp_path / "model/config.json").exists()
    builders.only_run(tmp_path / "workspace")


@pytest.mark.shows("F11", "a limit below what the job takes; the verdict names it")
def test_before_the_host_runs_out_of_ram_the_ranks_save_and_stop(tmp_path):
    """The limit is set below what the job takes once it trains."""
    with stopping.launched(tmp_path, launch={"host_stop_fraction": 0.0001}) as child:
        assert child.wait() == 6, child.said()
        assert (
            "saving and stopping: the job takes" in child.said()
            or "of host RAM is left" in child.said()
        )
        assert "the ranks were stopped before the host ran out of RAM" in child.said()
        assert child.left() == []


@pytest.mark.fast_faults
@pytest.mark.shows(
    "F11", "a cgroup of 1.5 GiB, 4 GiB taken at step 3; the kernel's oom_kill counter grew"
)
def test_a_real_kernel_oom_kill_is_named_with_the_limit(tmp_path):
    """A cgroup of its own, in which a rank suddenly takes more than there is: the kernel kills
    it."""
    group = Path("/sys/fs/cgroup/memory") / f"lowmem-test-{time.monotonic_ns()}"
    try:
        group.mkdir()
        (group / "memory.limit_in_bytes").write_text(str(3 << 29))
    except OSError as error:
        pytest.skip(f"no cgroup can be made here: {error}")
    try:
        recipe = builders.recipe(tmp_path, launch={"host_reserve_gib": 0.0, "num_processes": 1})
        fault = stopping.at_step("3", "bytearray(4 << 30)", rank=0)
        line = f'echo $$ > "{group}/cgroup.procs"; exec "{sys.executable}" -m launch run "{recipe}"'
        done = subprocess.run(
            ["bash", "-c", line],
            env=builders.environment(
                tmp_path / "workspace", **stopping.injecting(tmp_path, eater=fault)
            ),
            capture_output=True,
            text=True,
            timeout=120,
        )
    finally:
        for _ in range(50):
            try:
                group.rmdir()
                break
            except OSError:
                time.sleep(0.1)
    assert done.returncode == 6, done.stdout + done.stderr
    assert stopping.fired(tmp_path, "eater") == 1
    assert "the kernel killed a process of the run: host RAM limit 1.50 GiB" in done.stdout
    assert "oom_kill counter grew by" in done.stdout


def ends_soon(child: Child, number: int, within_s: float = 30) -> None:
    """2 s where no other test runs beside it; that nothing was planned or started after it shows
    the same."""
    began = time.monotonic()
    child.process.send_signal(number)
    assert child.wait() == (130 if number == signal.SIGINT else 75), child.said()
    assert time.monotonic() - began < within_s
    assert f"stopped by {signal.Signals(number).name}" in child.said()


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGINT])
def test_a_stop_while_the_plan_after_a_shortage_is_made_ends_at_once(tmp_path, number):
    """Its steps have not been traced before, which takes a child of its own many seconds."""
    do = (
        "import torch\nraise torch.OutOfMemoryError('CUDA out of memory. Tried to allocate 1.50"
        " GiB.')"
    )
    fault = {
        "module": "training.loop.trainer",
        "attribute": "LowMemTrainer.training_step",
        "rank": 0,
        "do": do,
        "when": "args[0].state.global_step >= 2",
    }
    traces = {"LOWMEM_TRACES": str(tmp_path / "traces")}
    with stopping.launched(
        tmp_path, 1, faults={"oom": fault}, extra=traces, training={"save_steps": 2}
    ) as child:
        child.until(
            "a shortage",
            lambda: (
                "step(s) of llama-tiny, at" in child.said().partition("out of memory at step")[2]
            ),
            400,
        )
        ends_soon(child, number)
        assert "planned again, from" not in child.said()
        assert "while a plan was made again" in child.said()
        assert len(child.run.attempts()) == 1
        assert child.committed() == [2]
        assert child.left() == []
        again = builders.launch(
            tmp_path / "workspace", "run", str(tmp_path / "tiny.yaml"), "--dry-run"
        )
        assert "continuing tiny-" in again.stdout


@pytest.mark.parametrize("name", ["SIGTERM", "SIGUSR1"])
def test_a_stop_signal_to_the_tokenising_process_alone_is_a_stop(tmp_path, name):
    with stopping.launched(tmp_path, count=100_000) as child:
        child.until("tokenising", lambda: child.section() == "tokenise")
        beat = child.run.attempts()[-1].heartbeat_file(0).read_text()
        psutil.Process(json.loads(beat)["pid"]).send_signal(getattr(signal, name))
        assert child.wait() == 75, child.said()
        assert "error: stopped by" in child.said()
        assert child.left() == []


def test_a_stop_while_the_plan_after_tokenising_is_made_starts_no_rank(tmp_path):
    traces = {"LOWMEM_TRACES": str(tmp_path / "traces")}
    with stopping.launched(tmp_path, 1, extra=traces) as child:
        child.tag = child.until("a folder for the rows", lambda: child.run.tag)
        child.until("a plan for the rows", lambda: "step(s) of llama-tiny, at" in child.said())
        assert "tokenising train.parquet" in child.said()
        assert RunFiles(child.run).state().state == "starting"
        ends_soon(child, signal.SIGTERM)
        assert "plan for tiny" not in child.said()
        assert stopping.runs_of(child.workspace) == [], "a run folder is left of which nothing ran"
        assert child.left() == []


@pytest.mark.parametrize(
    ("command", "number"),
    [
        ("run", signal.SIGTERM),
        ("run", signal.SIGINT),
        ("plan", signal.SIGTERM),
        ("tune", signal.SIGINT),
    ],
)
def test_a_stop_while_the_first_plan_is_made_ends_at_once(tmp_path, command, number):
    recipe = builders.recipe(tmp_path)
    argv = (sys.executable, "-m", "launch", command, str(recipe))
    tag = f"planned-{command}-{number}"
    extra = {"LOWMEM_TRACES": str(tmp_path / "traces"), "LOWMEM_RUN": tag}

    def traces() -> bool:
        with suppress(psutil.Error):  # gone meanwhile
            return any("training.worker" in each.cmdline() for each in processes.tagged(tag))
        return False

    with stopping.ended(
        Child(tmp_path, argv, tmp_path / "workspace", tmp_path / "out", **extra)
    ) as child:
        child.until("a child with torch", traces)
        ends_soon(child, number)
        assert "Traceback" not in child.said()
        assert child.left() == []
