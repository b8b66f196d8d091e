"""The link test: a program stands in for the collective, then the real one runs on the CPU.

Files in tests/data/link are lines that NCCL, Gloo, torch and accelerate really printed; the first
line says where.
"""

from __future__ import annotations

import ast
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from launch.base.errors import ResourceError
from launch.probe import link_causes, link_ranks, link_test
from launch.probe.link_ranks import Limits
from launch.schema.machine import Link
from tests.builders import CODE, gpu, machine

FAKE = (sys.executable, "-IS", str(CODE / "tests/process/probe/fake_collective.py"))
LIMITS = Limits(total_s=20.0, start_s=8.0, try_s=0.4)
P2P, SHM, CUMEM = "NCCL_P2P_DISABLE=1", "NCCL_SHM_DISABLE=1", "NCCL_CUMEM_HOST_ENABLE=0"
LADDER = ["nccl", f"nccl {CUMEM}", f"nccl {P2P}", f"nccl {SHM}", f"nccl {P2P} {SHM}", "gloo"]
TWO_CARDS = machine(2)


class World:
    """A folder in which fakes behave as told and leave word of every call."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.cache, self.shm = folder, folder / "cache", folder / "shm"
        self.shm.mkdir()
        self.said: list[str] = []

    def environ(self, behaviours: dict[str, str], **more: str) -> dict[str, str]:
        lines = "".join(f"{key}: {behaviour}\n" for key, behaviour in behaviours.items())
        (self.folder / "behaviours").write_text(lines)
        clean = {key: value for key, value in os.environ.items() if not key.startswith("NCCL_")}
        files = {"FAKE_LINK": "behaviours", "FAKE_LINK_CALLS": "calls", "FAKE_SHM": "shm"}
        return {**clean, **{name: str(self.folder / file) for name, file in files.items()}, **more}

    def link(
        self, behaviours: dict[str, str], user: dict[str, str] | None = None, **given: Any
    ) -> Link:
        (self.folder / "calls").write_text("")
        on, count = given.pop("on", TWO_CARDS), given.pop("count", 2)
        options: dict[str, Any] = {
            "limits": LIMITS,
            "shm": self.shm,
            "say": self.said.append,
            **given,
        }
        return link_test.link(
            on, count, self.cache, self.environ(behaviours, **(user or {})), FAKE, **options
        )

    def calls(self) -> list[dict[str, Any]]:
        path = self.folder / "calls"
        return [*map(ast.literal_eval, path.read_text().splitlines())] if path.exists() else []

    def tried(self) -> list[str]:
        """What was tried, in order."""
        return list(dict.fromkeys(call["key"] for call in self.calls()))

    def alive(self) -> list[int]:
        """The ranks that run; one that is dead and that nobody has waited for does not."""
        found = []
        for call in self.calls():
            stat = Path(f"/proc/{call['pid']}/stat")
            if stat.exists() and ") Z " not in stat.read_text():
                found.append(call["pid"])
        return found


@pytest.fixture
def world(tmp_path: Path) -> World:
    folder = tmp_path / "a 'b\" %41"
    folder.mkdir()
    return World(folder)


# ---- the order of the search
# ---------------------------------------------------------------------------


@pytest.mark.parametrize("works", LADDER)
def test_what_fails_without_a_known_reason_walks_down_the_whole_ladder(world, works):
    found = world.link({works: "work", "*": "print something odd failed"})
    assert world.tried() == LADDER[: LADDER.index(works) + 1]
    assert len(world.calls()) == 2 * len(world.tried())
    assert [attempt.ok for attempt in found.tries] == [False] * LADDER.index(works) + [True]
    assert found.backend == works.split()[0]
    assert [f"{key}={value}" for key, value in found.env.items()] == works.split()[1:]
    assert (found.bytes_per_s, found.flops_per_s) == (5e9, 1e13)
    assert all(attempt.said == "something odd failed" for attempt in found.tries[:-1])


def test_when_nothing_works_there_is_one_gpu(world):
    found = world.link({"*": "print something odd failed"})
    assert world.tried() == LADDER
    assert (found.backend, found.env, found.bytes_per_s) == (None, {}, None)
    assert "one GPU" in found.reason


@pytest.mark.parametrize(
    ("file", "cause", "tried"),
    [
        ("cumem-host.txt", "cumem_host", ["nccl", LADDER[1], LADDER[3], LADDER[4], "gloo"]),
        (
            "cumem-host-rubbish-name.txt",
            "cumem_host",
            ["nccl", LADDER[1], LADDER[3], LADDER[4], "gloo"],
        ),
        ("cumem-host-large.txt", "cumem_host", ["nccl", LADDER[1], LADDER[3], LADDER[4], "gloo"]),
        ("shm-too-small.txt", "shm_too_small", ["nccl", LADDER[3], LADDER[4], "gloo"]),
        ("shm-too-small-old.txt", "shm_too_small", ["nccl", LADDER[3], LADDER[4], "gloo"]),
        ("shm-invalid-argument.txt", "shm_too_small", ["nccl", LADDER[3], LADDER[4], "gloo"]),
        ("p2p-refused.txt", "p2p_refused", ["nccl", LADDER[2], LADDER[4], "gloo"]),
        ("p2p-ordinal.txt", "p2p_refused", ["nccl", LADDER[2], LADDER[4], "gloo"]),
        (
            "rtx-40xx.txt",
            "rtx_40xx",
            [
                "nccl",
                f"nccl NCCL_IB_DISABLE=1 {P2P}",
                f"nccl NCCL_IB_DISABLE=1 {P2P} {SHM}",
                "gloo",
            ],
        ),
        ("same-card.txt", "same_card", ["nccl", "gloo"]),
        ("socket-interface.txt", "socket_interface", ["nccl", "gloo"]),
        ("no-nccl.txt", "no_nccl", ["nccl", "gloo"]),
        ("gloo-address.txt", "gloo_address", ["nccl", "gloo"]),
        ("driver-too-old.txt", "driver", ["nccl"]),
        ("driver-insufficient.txt", "driver", ["nccl"]),
        ("card-busy.txt", "card_busy", ["nccl"]),
    ],
)
def test_a_known_message_names_its_cause_and_shortens_the_search(world, file, cause, tried):
    found = world.link({"*": f"say {file}"})
    assert world.tried() == tried
    assert {attempt.cause for attempt in found.tries} == {cause}
    assert found.tries[0].said in (CODE / "tests/data/link" / file).read_text()
    (problem,) = [line for line in link_test.lines(found) if "fix:" in line]
    assert problem.endswith(link_causes.BY_NAME[cause].fix)


def test_every_cause_with_a_pattern_is_shown_by_a_real_line():
    files = (CODE / "tests/data/link").glob("*.txt")
    shown = {
        link_causes.find(path.read_text().partition("\n")[2], "failed")[0].name for path in files
    }
    ours = {"wrong_sum"}  # training/children/link.py's own words
    assert shown | ours == {cause.name for cause in link_causes.CAUSES if cause.regex}


def test_the_line_that_is_shown_is_the_message_and_can_be_printed():
    traceback = (CODE / "tests/data/link/no-nccl.txt").read_text()
    _, said = link_causes.find(traceback, "failed")
    assert said == "RuntimeError: Distributed package doesn't have NCCL built in"
    rubbish = (
        "Error while attaching to shared memory segment /dev/shm/nccl-\x1b[2J\x07\ufffd (size 0)"
    )
    assert link_causes.find(rubbish, "failed")[1].endswith("/dev/shm/nccl-[2J (size 0)")
    assert len(link_causes.find("error " * 1000, "failed")[1]) == link_causes.SAID_CHARACTERS
    assert link_causes.find("", "failed")[1] == "it said nothing"


def test_each_failure_says_what_is_worth_trying_next(world):
    found = world.link(
        {"nccl": "say cumem-host.txt", f"nccl {CUMEM}": "hang", f"nccl {P2P}": "work"}
    )
    assert [attempt.cause for attempt in found.tries] == ["cumem_host", "hang", ""]
    assert found.env == {"NCCL_P2P_DISABLE": "1"}


def test_a_rank_killed_by_a_bus_error_means_a_small_dev_shm(world):
    found = world.link({"nccl": "killed 7", f"nccl {SHM}": "work"})
    assert found.tries[0].cause == "shm_too_small"
    assert "killed by signal 7 (SIGBUS)" in found.tries[0].said
    assert found.env == {"NCCL_SHM_DISABLE": "1"}


# ---- hangs and ends
# ---------------------------------------------------------------------------


@pytest.mark.parametrize("hang", ["hang", "hang 0", "hang 1"])
def test_a_hang_of_any_rank_is_ended_and_p2p_is_tried_without(world, hang):
    found = world.link({"nccl": hang, f"nccl {P2P}": "work"})
    assert world.tried() == ["nccl", f"nccl {P2P}"]
    assert found.tries[0].cause == "hang"
    assert LIMITS.try_s <= found.tries[0].seconds < LIMITS.try_s + 3
    assert world.alive() == []


def test_ranks_that_never_start_are_no_verdict_on_the_link(world):
    found = world.link({"nccl": "never-start", "*": "work"}, limits=Limits(20.0, 0.4, 0.4))
    assert [attempt.cause for attempt in found.tries] == ["not_started", "not_started", ""]
    assert world.alive() == []
    assert not (world.cache / "link.json").exists()


def test_a_first_start_from_a_cold_disk_costs_no_transport_its_try(world):
    """By the limits of a real start: the ranks' time to start, twice, is more than what the first
    one leaves."""
    limits = Limits(total_s=10.0, start_s=3.0, try_s=1.0)
    found = world.link({"nccl": "cold", f"nccl {P2P}": "work"}, limits=limits)
    assert [(attempt.backend, dict(attempt.env), attempt.cause) for attempt in found.tries] == [
        ("nccl", {}, "not_started"),
        ("nccl", {}, "hang"),
        ("nccl", {"NCCL_P2P_DISABLE": "1"}, ""),
    ]
    assert (found.backend, found.skipped) == ("nccl", ())
    assert world.alive() == []


def test_a_driver_that_hangs_at_every_start_gets_one_more_start_and_ends_at_gloo(world):
    found = world.link(
        {"gloo": "work", "*": "never-start"}, limits=Limits(total_s=10.0, start_s=3.0, try_s=1.0)
    )
    assert [attempt.backend for attempt in found.tries] == ["nccl", "nccl", "gloo"]
    assert found.backend == "gloo"


@pytest.mark.parametrize(
    "behaviours", [{"*": "say card-busy.txt"}, {"nccl": "cold", "*": "work"}], ids=["busy", "cold"]
)
def test_a_plan_that_is_made_again_has_the_link_of_the_first_one(world, behaviours):
    limits = Limits(total_s=10.0, start_s=3.0, try_s=1.0)
    found = world.link(behaviours, limits=limits)
    # it may be another in a minute: the next start tests again
    assert not (world.cache / "link.json").exists()
    calls = len(world.calls())
    assert link_test.last_result(TWO_CARDS, 2, world.cache, world.environ({}), FAKE) == found
    assert len(world.calls()) == calls
    assert (
        link_test.last_result(
            TWO_CARDS, 2, world.cache, world.environ({}, NCCL_P2P_DISABLE="1"), FAKE
        )
        is None
    )


def test_a_slow_start_is_not_a_hang(world):
    slow = (
        sys.executable,
        "-c",
        f"import time, runpy; time.sleep(0.8); runpy.run_path({FAKE[-1]!r}, run_name='__main__')",
    )
    environ = world.environ({"*": "work"})
    found = link_test.link(TWO_CARDS, 2, world.cache, environ, slow, limits=LIMITS, shm=world.shm)
    assert [attempt.ok for attempt in found.tries] == [True]
    assert found.tries[0].seconds > LIMITS.try_s


@pytest.mark.parametrize("lie", ["silent", "work gloo"])
def test_no_result_or_one_of_another_backend_is_a_failure(world, lie):
    found = world.link({"nccl": lie, f"nccl {CUMEM}": "work"})
    assert [attempt.ok for attempt in found.tries] == [False, True]


def test_a_failed_rank_ends_the_try_before_its_time(world):
    limits = Limits(900.0, 300.0, 200.0)
    found = world.link({"nccl": "one-fails odd failed", "*": "work"}, limits=limits)
    assert (found.tries[0].said, found.tries[0].cause) == ("odd failed", "")
    assert found.env == {"NCCL_CUMEM_HOST_ENABLE": "0"}
    assert found.tries[0].seconds < limits.try_s


def test_the_whole_search_has_a_deadline_that_leaves_room_for_gloo(world):
    found = world.link({"gloo": "work", "*": "hang"}, limits=Limits(2.2, 1.0, 0.7))
    assert found.backend == "gloo"
    assert world.tried()[-1] == "gloo"
    assert len(world.tried()) < 4
    assert any("no time for more than Gloo within 2.2 s" in why for why in found.skipped)
    assert found.skipped[0] in "\n".join(link_test.lines(found))


def test_what_killed_ranks_leave_in_shared_memory_is_removed_and_no_more(world):
    (world.shm / "nccl-another").write_bytes(bytes(8))
    world.link({"nccl": "leave", "*": "work"})
    assert world.tried() == ["nccl", f"nccl {P2P}"]
    assert [path.name for path in world.shm.iterdir()] == ["nccl-another"]


def test_a_segment_that_another_process_has_mapped_stays(world):
    code = """
import mmap, sys, time
with open(sys.argv[1], "w+b") as file:
    file.truncate(4096)
    held = mmap.mmap(file.fileno(), 4096)
time.sleep(60)
"""
    segment = world.shm / "nccl-running"
    holder = subprocess.Popen([sys.executable, "-c", code, str(segment)])
    try:
        while not (segment.exists() and segment.stat().st_size):
            time.sleep(0.01)
        stale = world.shm / "nccl-stale"
        stale.touch()
        link_ranks.remove_unmapped({segment, stale})
        assert segment.exists()
        assert not stale.exists()
    finally:
        holder.kill()
        holder.wait()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_a_launcher_that_is_stopped_leaves_no_rank_and_caches_nothing(world, number):
    code = """
import os, sys
from pathlib import Path
from launch.probe import link_test
from tests.builders import machine
link_test.link(machine(2), 2, Path(sys.argv[1]), os.environ, sys.argv[2:])
"""
    argv = [sys.executable, "-c", code, str(world.cache), *FAKE]
    launcher = subprocess.Popen(
        argv, env=world.environ({"*": "hang"}), cwd=CODE, stderr=subprocess.PIPE
    )
    deadline = time.monotonic() + 60
    while len(world.calls()) < 2 and time.monotonic() < deadline:
        time.sleep(0.02)
    assert len(world.alive()) == 2
    launcher.send_signal(number)
    launcher.communicate(timeout=60)
    while world.alive() and time.monotonic() < deadline:
        time.sleep(0.02)
    assert world.alive() == []
    assert not (world.cache / "link.json").exists()


# ---- the environment
# ---------------------------------------------------------------------------


def test_variables_the_user_has_set_are_in_every_try_and_not_tried_again(world):
    found = world.link({"*": "print odd failed"}, {"NCCL_P2P_DISABLE": "1", "NCCL_DEBUG": "INFO"})
    assert world.tried() == [
        f"nccl {P2P}",
        f"nccl {CUMEM} {P2P}",
        f"nccl {P2P} {SHM}",
        f"gloo {P2P}",
    ]
    assert [dict(attempt.env) for attempt in found.tries] == [
        {},
        {"NCCL_CUMEM_HOST_ENABLE": "0"},
        {"NCCL_SHM_DISABLE": "1"},
        {},
    ]
    assert "NCCL_P2P_DISABLE=1 set it is the same as NCCL as it is" in found.skipped[0]
    assert len(found.skipped) == 2
    assert {call["env"]["NCCL_DEBUG"] for call in world.calls()} == {"INFO"}


def test_a_user_who_wants_p2p_keeps_it(world):
    found = world.link({"*": "hang"}, {"NCCL_P2P_DISABLE": "0"})
    assert "nccl NCCL_P2P_DISABLE=1" not in world.tried()
    assert all("NCCL_P2P_DISABLE" not in attempt.env for attempt in found.tries)


@pytest.mark.parametrize(
    ("driver", "wanted"), [("535.54.03", True), ("550.40.07", False), ("550.54", False)]
)
def test_rtx_40xx_on_an_old_driver_gets_what_accelerate_insists_on(world, driver, wanted):
    cards = tuple(
        replace(gpu(index), name="NVIDIA GeForce RTX 4090", driver=driver) for index in range(2)
    )
    found = world.link({"*": "work"}, on=machine(cards=cards))
    assert found.env == ({"NCCL_P2P_DISABLE": "1", "NCCL_IB_DISABLE": "1"} if wanted else {})
    assert world.tried() == [f"nccl NCCL_IB_DISABLE=1 {P2P}" if wanted else "nccl"]
    gloo = f"gloo NCCL_IB_DISABLE=1 {P2P}" if wanted else "gloo"
    found = world.link({gloo: "work", "*": "print odd failed"}, on=machine(cards=cards), fresh=True)
    assert (world.tried()[-1], found.backend) == (gloo, "gloo")
    assert ("RTX 40xx" in found.reason) is wanted


def test_ranks_see_the_cards_that_training_will_use(world):
    hidden = {"CUDA_VISIBLE_DEVICES": "3,1,0", "CUDA_DEVICE_ORDER": "FASTEST_FIRST"}
    world.link({"*": "work"}, hidden, on=machine(cards=(gpu(3), gpu(1), gpu(0))))
    assert {call["env"]["CUDA_VISIBLE_DEVICES"] for call in world.calls()} == {"3,1"}
    assert {call["env"]["CUDA_DEVICE_ORDER"] for call in world.calls()} == {"PCI_BUS_ID"}
    amd = tuple(replace(gpu(index), vendor="amd") for index in (1, 2, 4))
    world.link({"*": "work"}, on=machine(cards=amd), count=3)
    assert {call["env"]["HIP_VISIBLE_DEVICES"] for call in world.calls()} == {"1,2,4"}
    assert {call["rank"] for call in world.calls()} == {0, 1, 2}


# ---- the cache
# ---------------------------------------------------------------------------


def test_a_second_link_comes_from_the_cache_and_fresh_tests_again(world):
    first = world.link({"nccl": "hang", "*": "work"})
    assert world.calls()
    assert world.link({"*": "work"}) == first
    assert world.calls() == []
    again = world.link({"*": "work"}, fresh=True)
    assert world.tried() == ["nccl"]
    assert world.link({"*": "hang"}) == again


def test_a_plan_that_takes_the_cards_in_another_order_has_the_link_of_doctor(world):
    tested = world.link({"*": "work"})
    assert world.link({"*": "hang"}, on=machine(cards=(gpu(1), gpu(0)))) == tested


def test_gloo_alone_is_tested_and_cached_beside_the_fastest_transport(world):
    fastest = world.link({"*": "work"})
    gloo = world.link({"*": "work"}, backends=("gloo",))
    assert world.tried() == ["gloo"]
    assert (fastest.backend, gloo.backend) == ("nccl", "gloo")

    def last(*backends: link_test.Backend) -> Link | None:
        environ = world.environ({})
        return link_test.last_result(TWO_CARDS, 2, world.cache, environ, FAKE, backends)

    assert (last("nccl", "gloo"), last("gloo")) == (fastest, gloo)


@pytest.mark.parametrize(
    "change",
    [
        {"on": machine(cards=tuple(replace(gpu(index), driver="570") for index in range(2)))},
        {"on": machine(cards=tuple(replace(gpu(index), name="RTX 3090") for index in range(2)))},
        {"on": machine(2, shm_bytes=64 << 20)},
        {"on": machine(3), "count": 3},
        {"user": {"NCCL_SOCKET_IFNAME": "lo"}},
    ],
    ids=["driver", "card", "shm", "count", "variables"],
)
def test_another_driver_card_count_or_variable_is_tested_anew(world, change):
    world.link({"*": "work"})
    world.link({"*": "work"}, **change)
    assert world.calls()
    world.link({"*": "work"}, **change)
    assert world.calls() == []
    world.link({"*": "work"})
    assert world.calls() == []


@pytest.mark.parametrize("content", ["", "{", "[1]", '{"key": {"time": 1}}', "\x00\xff"])
def test_a_damaged_cache_is_said_and_measured_again(world, content):
    world.cache.mkdir()
    (world.cache / "link.json").write_text(content, encoding="latin-1")
    assert world.link({"*": "work"}).backend == "nccl"
    assert any("cannot be read" in line for line in world.said)
    world.link({"*": "work"})
    assert world.calls() == []


@pytest.mark.parametrize(("age_s", "again"), [(3600, False), (25 * 3600, True), (-3600, True)])
def test_a_failed_search_is_believed_for_a_day(world, age_s, again):
    world.link({"*": "print odd failed"})
    path = world.cache / "link.json"
    entries = json.loads(path.read_text())
    for entry in entries.values():
        entry["time"] -= age_s
    path.write_text(json.dumps(entries))
    assert (world.link({"*": "work"}).backend == "nccl") is again


def test_what_may_be_gone_in_a_minute_is_not_remembered(world):
    assert world.link({"*": "say card-busy.txt"}).backend is None
    assert world.link({"*": "work"}).backend == "nccl"


def test_a_cache_that_cannot_be_written_is_said_and_harms_nothing(world):
    world.cache.write_text("a file where a folder should be")
    assert world.link({"*": "work"}, fresh=True).backend == "nccl"
    assert any("is not kept" in line for line in world.said)


# ---- one process, too few cards
# ---------------------------------------------------------------------------


def test_one_process_needs_no_link(world):
    found = world.link({"*": "work"}, count=1)
    assert (found.backend, found.tries) == (None, ())
    assert world.calls() == []


def test_more_processes_than_cards_are_refused(world):
    with pytest.raises(ResourceError, match=r"3 processes on 2 GPU\(s\).*lower num_processes"):
        world.link({"*": "work"}, count=3)


# ---- the real collective
# ---------------------------------------------------------------------------


def test_the_real_search_on_a_cpu_finds_no_nccl_and_measures_gloo(tmp_path):
    environ = {
        key: value for key, value in os.environ.items() if not key.startswith(("NCCL_", "GLOO_"))
    }
    found = link_test.link(machine(), 2, tmp_path, environ, device="cpu")
    assert found.tries[0].backend == "nccl"
    assert found.tries[0].cause == "no_nccl", found.tries
    assert found.backend == "gloo"
    assert 1e7 < (found.bytes_per_s or 0) < 1e12
    assert found.flops_per_s is None
