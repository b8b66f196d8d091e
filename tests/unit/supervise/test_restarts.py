"""Which failures are followed by another attempt, and how many."""

from __future__ import annotations

import pytest

from launch.schema.result import Failure
from launch.supervise.restarts import NO_PROGRESS, History, decide


def failed(
    kind: str = "killed", history: History | None = None, began=0, reached=9, committed=5, limit=10
):
    failure = Failure(kind, 1, "something ended it", "proof", "fix")
    return decide(
        failure, history if history is not None else History(), began, reached, committed, limit
    )


@pytest.mark.parametrize(
    "kind", ["killed", "hang", "network", "nccl", "collective_timeout", "port"]
)
def test_what_may_pass_is_tried_again_at_any_time(kind):
    assert failed(kind).action == "again"
    assert failed(kind, reached=0, committed=0).action == "again"


@pytest.mark.parametrize(
    "kind",
    [
        "ConfigError",
        "DataError",
        "disk",
        "join",
        "stopped",
        "gpu_unsupported",
        "shm",
        "limit",
        "library",
        "driver",
        "data",
        "configuration",
    ],
)
def test_what_comes_again_is_not(kind):
    assert failed(kind).action == "stop"


@pytest.mark.parametrize("kind", ["device_oom", "host_oom", "host_pressure", "pinned_oom"])
def test_a_shortage_of_memory_is_planned_again_as_often_as_there_is_a_smaller_plan(kind):
    history = History()
    assert [failed(kind, history, reached=7, committed=0, limit=0).action for _ in range(5)] == [
        "plan"
    ] * 5
    failure = Failure(kind, 12, "something ended it", "proof", "fix")
    assert decide(failure, history, 0, 7, 0, 10, replans=False).action == "stop"


@pytest.mark.parametrize("kind", ["device_oom", "host_oom", "host_pressure", "pinned_oom"])
def test_a_shortage_that_says_nothing_about_the_plan_is_tried_again_a_few_times(kind):
    failure, history = Failure(kind, 12, "something ended it", "proof", "fix"), History()
    ends = [
        decide(failure, history, 0, 0, 0, 10, is_plans_fault=False).action
        for _ in range(NO_PROGRESS + 1)
    ]
    assert ends == ["again"] * NO_PROGRESS + ["stop"]
    assert (
        decide(failure, History(), 0, 7, 0, 10, replans=False, is_plans_fault=False).action
        == "stop"
    )


@pytest.mark.parametrize("kind", ["crash", "signal", "gpu_broken"])
def test_a_crash_is_tried_again_only_after_progress(kind):
    assert failed(kind, reached=9, began=5).action == "again"
    assert failed(kind, reached=5, began=5).action == "stop"
    assert failed("unknown", reached=0, began=0).action == "stop"


def test_restarts_that_commit_nothing_are_bounded_and_wait_longer_each_time():
    history = History()
    found = [
        failed(history=history, began=5, reached=6 + i, committed=5) for i in range(NO_PROGRESS + 1)
    ]
    assert [one.wait_s for one in found] == [1, 2, 4, 0]
    assert [one.action for one in found] == ["again", "again", "again", "stop"]
    assert "committed no new step" in found[-1].why


def test_a_new_checkpoint_forgets_the_failures_before_it_but_not_the_limit():
    history = History()
    found = [
        failed(history=history, began=5 * i, reached=5 * i + 7, committed=5 * i + 5)
        for i in range(11)
    ]
    assert [one.wait_s for one in found[:-1]] == [1] * 10
    assert found[-1].action == "stop"
    assert found[-1].why == "launch.max_restarts 10 is used up"


def test_the_same_failure_at_the_same_step_is_the_last():
    history = History()
    assert failed("crash", history, began=0, reached=7, committed=5).action == "again"
    second = failed("crash", history, began=5, reached=7, committed=5)
    assert second.action == "stop"
    assert "step 7" in second.why
    assert failed("killed", history, began=5, reached=8, committed=5).action == "again"
