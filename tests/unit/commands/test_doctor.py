"""What doctor finds wrong, and what it says of a link and of its cost."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from dataclasses import replace

import pytest

from launch.base.errors import ResourceError
from launch.commands import doctor
from launch.plan import explain
from launch.probe import link_test
from launch.schema.machine import GIB, Link, LinkTry
from tests.builders import gpu, machine


def found(on) -> list[str]:
    return [str(problem) for problem in doctor.problems(on)]


def test_a_machine_with_nothing_wrong_has_no_problem():
    assert found(machine(2)) == []
    assert found(machine()) == []


def test_a_card_at_lower_clocks_is_a_note():
    card = replace(gpu(), slowdown="too hot (HW thermal slowdown); 600 of 1980 MHz; 91 °C")
    (line,) = found(machine(cards=(card,)))
    assert line.startswith(f"note: GPU 0 ({card.name}) is slower now: {card.slowdown}; fix: see")


@pytest.mark.parametrize(
    ("shm_bytes", "gpus", "says"), [(64 << 20, 2, True), (GIB, 2, False), (64 << 20, 1, False)]
)
def test_a_small_dev_shm_matters_to_several_ranks(shm_bytes, gpus, says):
    said = found(machine(gpus, shm_bytes=shm_bytes))
    assert [("docker run --shm-size=1g" in line) for line in said] == [True] * says


def test_on_an_amd_card_doctor_says_that_rocm_is_unverified():
    (problem,) = doctor.problems(machine(cards=(gpu(vendor="amd", architecture="gfx1201"),)))
    assert str(problem).startswith("note: ROCm is unverified: lowmem has not run on an AMD card")
    assert not problem.stops


def test_many_ranks_want_more_of_dev_shm():
    assert "32 ranks need 2.00 GiB" in found(machine(32, shm_bytes=GIB))[0]


@pytest.mark.parametrize(
    ("facts", "said", "stops"),
    [
        ({"disk_free_bytes": GIB // 2}, "0.50 GiB of disk", True),
        ({"disk_free_bytes": 5 * GIB}, "5.00 GiB of disk", False),
        ({"host_available_bytes": GIB // 2}, "0.50 GiB of host memory", True),
    ],
)
def test_a_full_disk_and_full_memory_stop_training_and_a_low_disk_is_a_note(facts, said, stops):
    (problem,) = doctor.problems(machine(**facts))
    assert said in problem.what
    assert problem.stops is stops
    assert str(problem).startswith("problem: " if stops else "note: ")
    assert str(problem).count("fix: ") == 1


def test_a_card_that_cannot_be_used_stops_training_and_the_cpu_is_named_as_the_other_way():
    obstacle = "NVML cannot be asked: Unknown Error (NVML error 999); fix: restart the machine"
    (line,) = found(machine(gpus_obstacle=obstacle))
    assert line.startswith(
        "problem: NVML cannot be asked: Unknown Error (NVML error 999); fix: restart the machine; "
    )
    assert line.endswith("add --launch.mode=cpu")


@pytest.mark.parametrize(
    ("said", "fix"),
    [
        (
            "RuntimeError: The NVIDIA driver on your system is too old (found version 12040).",
            "docs/cards.md",
        ),
        (
            (
                "torch.AcceleratorError: CUDA error: no kernel image is available for execution on"
                " the device"
            ),
            "docs/cards.md",
        ),
        ("torch.AcceleratorError: CUDA error: out of memory", "nvidia-smi"),
        ("ModuleNotFoundError: No module named 'tokenizers'", "make clean"),
    ],
)
def test_what_imports_fail_with_decides_the_fix(said, fix):
    problem = doctor.import_problem(ResourceError(f"what a rank imports fails: {said}"))
    assert fix in problem.fix
    assert ("make clean" in problem.fix) is (fix == "make clean")


@pytest.fixture
def few_files() -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_limit_on_open_files_is_a_note(few_files):
    (line,) = found(machine())
    assert "may open 256 files" in line


# ---- the link in words
# ---------------------------------------------------------------------------

SLOW = Link("gloo", {}, 1e9, 50e12, (), "Gloo as it is works")


def test_an_all_reduce_is_priced_by_what_a_card_sends():
    # 2 cards: each sends and receives 2(N-1)/N = 1 time the gradients; 4 cards: 1.5 times
    assert explain.all_reduce_s(SLOW, 10**9, 2) == pytest.approx(1.0)
    assert explain.all_reduce_s(SLOW, 10**9, 4) == pytest.approx(1.5)
    said = explain.cost_line(SLOW, GIB, 1e15, 2) or ""
    assert said.startswith("all-reduce of 1.00 GiB at 1.00 GB/s costs 1.07 s per optimizer step")


@pytest.mark.parametrize(
    ("step_flops", "one_is_faster"), [(100e12 * 0.99, True), (100e12 * 1.01, False)]
)
def test_one_card_is_said_to_be_faster_when_the_all_reduce_outweighs_its_help(
    step_flops, one_is_faster
):
    # 1 s of all-reduce; T s alone, T/2 + 1 s on two: two are faster from T = 2 s on, 100 TFLOP at
    # 50 TFLOP/s
    said = explain.cost_line(SLOW, 10**9, step_flops, 2) or ""
    assert ("one is faster" in said) is one_is_faster
    assert ("2 cards then need 1.99 s per step and one card 1.98 s" in said) is one_is_faster


@pytest.mark.parametrize(
    ("link", "processes"), [(Link(None, {}, None, None, (), ""), 2), (SLOW, 1)]
)
def test_without_a_link_there_is_no_cost(link, processes):
    assert explain.cost_line(link, GIB, 1e15, processes) is None


def test_a_link_without_a_measured_card_is_priced_without_a_verdict():
    said = explain.cost_line(Link("gloo", {}, 1e9, None, (), ""), 10**9, 1.0, 2)
    assert said == "all-reduce of 0.93 GiB at 1.00 GB/s costs 1 s per optimizer step"


def test_a_link_is_told_with_each_try_and_one_fix_per_problem():
    tries = (
        LinkTry("nccl", {}, False, 10.1, "waited for ever", "hang"),
        LinkTry("nccl", {"NCCL_P2P_DISABLE": "1"}, False, 10.2, "waited again", "hang"),
        LinkTry("gloo", {}, True, 2.0, ""),
    )
    said = link_test.lines(
        Link("gloo", {}, 1e9, 50e12, tries, "Gloo as it is works", ("something: no time",))
    )
    assert said[0] == "link: Gloo as it is works, 1.00 GB/s bus bandwidth"
    assert "  NCCL with NCCL_P2P_DISABLE=1 (10.2 s) failed: waited again" in said
    assert "  Gloo as it is (2.0 s) works" in said
    assert "  skipped something: no time" in said
    assert sum("fix: " in line for line in said) == 1


@pytest.mark.parametrize(("cause", "blocked"), [("driver", True), ("hang", False), ("", False)])
def test_only_what_no_transport_mends_stops_training(cause, blocked):
    tries = (LinkTry("nccl", {}, False, 1.0, "said", cause),)
    assert doctor.is_blocked(Link(None, {}, None, None, tries, "one GPU")) is blocked
