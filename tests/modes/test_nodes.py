"""Two machines (network namespaces joined by a cable) train as one; when they cannot, each says why
in time."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests import builders, hosts

# Without namespaces a developer's run shows a skip; where CI is set the tests run, and fail, so
# that nothing is hidden.
pytestmark = pytest.mark.skipif(
    bool(hosts.missing()) and "CI" not in os.environ, reason=hosts.missing()
)
JOIN_S = 8


# a machine of one rank has more threads for it, which add up a product in another order
ONE_THREAD = {"OMP_NUM_THREADS": "1"}


def start(
    host: hosts.Host, workspace: Path, recipe: Path, rank: int, first: str, *words: str
) -> subprocess.Popen[str]:
    """`python -m launch run` on one of two machines."""
    argv = [
        sys.executable,
        "-m",
        "launch",
        "run",
        str(recipe),
        "--launch.nodes=2",
        f"--launch.machine_rank={rank}",
    ]
    argv += [f"--launch.main_process_ip={first}", f"--launch.join_timeout_s={JOIN_S}", *words]
    env = builders.environment(workspace, **ONE_THREAD)
    env.pop("GLOO_SOCKET_IFNAME", None)
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    return host.popen(argv, {**env, "GLOO_SOCKET_IFNAME": ""}, **options)


def ended(child: subprocess.Popen[str], timeout: float) -> tuple[int, str]:
    said, _ = child.communicate(timeout=timeout)
    return child.returncode, said


@pytest.fixture
def recipe(tmp_path) -> Path:
    return builders.recipe(
        tmp_path, training={"per_device_train_batch_size": 4, "ddp_timeout": JOIN_S}
    )


def losses(workspace: Path) -> list[float]:
    return [event["loss"] for event in builders.events(builders.only_run(workspace))]


@pytest.mark.parametrize(
    ("mode", "is_ipv6"),
    [
        pytest.param("multi_cpu", False, marks=pytest.mark.campaign),
        ("deepspeed_zero2", False),
        ("multi_cpu", True),
        pytest.param("deepspeed_zero2", True, marks=pytest.mark.campaign),
    ],
)
def test_two_machines_give_the_losses_of_two_ranks_on_one(tmp_path, recipe, mode, is_ipv6):
    word = f"--launch.mode={mode}"
    words = ("run", str(recipe), "--launch.num_processes=2", word)
    alone = builders.launch(tmp_path / "one", *words, **ONE_THREAD)
    assert alone.returncode == 0, alone.stderr
    with hosts.pair(is_ipv6) as (a, b):
        first = start(a, tmp_path / "two", recipe, 0, a.address, word)
        second = start(b, tmp_path / "two", recipe, 1, a.address, word)
        (code, said), (other_code, other_said) = ended(first, 90), ended(second, 30)
    assert (code, other_code) == (0, 0), said + other_said
    assert "(machine_rank 1 of 2 machines)" in other_said
    assert losses(tmp_path / "two") == losses(tmp_path / "one")


def test_machines_that_were_told_different_things_stop_with_the_difference(tmp_path, recipe):
    with hosts.pair() as (a, b):
        first = start(a, tmp_path / "h", recipe, 0, a.address, "--launch.mode=multi_cpu")
        words = ["--launch.mode=deepspeed_zero2", "--training.learning_rate=0.5"]
        second = start(b, tmp_path / "h", recipe, 1, a.address, *words)
        (code, said), (other_code, other_said) = ended(first, 60), ended(second, 30)
    assert (code, other_code) == (2, 2), said + other_said
    for words in (said, other_said):
        assert "rank 0 and rank 1 were started to train different things" in words
        assert "training.learning_rate 0.001 and 0.5" in words


@pytest.mark.campaign
@pytest.mark.shows("F31", "one of two machines is started; the missing one is named")
def test_a_machine_that_never_joins_is_named_within_the_timeout(tmp_path, recipe):
    with hosts.pair() as (a, b):
        # torch by itself waits 300 s and more
        code, said = ended(start(a, tmp_path / "h", recipe, 0, a.address), JOIN_S + 120)
        absent = ended(start(b, tmp_path / "h", recipe, 1, a.address), JOIN_S + 120)
    assert code == absent[0] == 11, said + absent[1]
    assert "machines did not all join" in said
    assert "machines did not all join" in absent[1]


@pytest.mark.shows("F31", "an interface or address that the machine does not have")
def test_a_wrong_interface_or_address_is_named_before_anything_starts(tmp_path, recipe):
    with hosts.pair() as (a, b):
        wrong = ended(
            start(a, tmp_path / "h", recipe, 0, a.address, "--launch.network_interface=lo"), 30
        )
        unknown = ended(
            start(b, tmp_path / "h", recipe, 1, a.address, "--launch.network_interface=eth7"), 30
        )
        foreign = ended(start(a, tmp_path / "h", recipe, 0, b.address), 30)
        nowhere = ended(start(b, tmp_path / "h", recipe, 1, "203.0.113.9"), 30)
    assert wrong[0] == 2 and f"is reached over {a.interface}" in wrong[1]
    assert unknown[0] == 2 and f"this machine has {b.interface}, lo" in unknown[1]
    assert foreign[0] == 2 and "is no address of this machine" in foreign[1]
    assert nowhere[0] == 11 and "Network is unreachable" in nowhere[1]


@pytest.mark.campaign
@pytest.mark.shows("F30", "the link between two network namespaces set down while it trains")
def test_a_cut_link_ends_both_machines_in_a_named_error_within_the_timeout(tmp_path, recipe):
    words = ["--training.num_train_epochs=100000"]
    with hosts.pair() as (a, b):
        first = start(a, tmp_path / "h", recipe, 0, a.address, *words)
        second = start(b, tmp_path / "h", recipe, 1, a.address, *words)
        deadline = time.monotonic() + 60
        while (
            not list((tmp_path / "h/runs/tiny").glob("*/attempts/01/events.jsonl"))
            and time.monotonic() < deadline
        ):
            time.sleep(0.2)
        b.cut()
        began = time.monotonic()
        (code, said), (other_code, other_said) = ended(first, 90), ended(second, 90)
        waited = time.monotonic() - began
    assert code == other_code == 11, said + other_said
    assert waited < JOIN_S + 30
    assert "could not reach each other" in said
    assert "could not reach each other" in other_said
