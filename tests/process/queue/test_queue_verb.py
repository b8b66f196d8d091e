"""`python -m launch queue`: the list, and changes of one's own runs."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from launch.__main__ import main
from launch.queue import leases
from launch.schema.machine import GIB
from tests.process.queue.holders import said


@pytest.fixture(autouse=True)
def place(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("LOWMEM_LEASES", str(tmp_path))
    return tmp_path


def queue(capsys, *argv: str) -> tuple[int, str]:
    code = main(["queue", *argv])
    done = capsys.readouterr()
    return code, done.out + done.err


def lines_until(child: subprocess.Popen[str], text: str) -> list[str]:
    lines = [said(child)]
    while text not in lines[-1]:
        assert lines[-1], f"ended before {text}: {lines}"
        lines.append(said(child))
    return lines


def test_without_runs_the_list_says_so(capsys, tmp_path):
    assert queue(capsys) == (
        0,
        f"no run has or waits for a lease of this machine's memory ({tmp_path})\n",
    )
    assert queue(capsys, "--json") == (0, "[]\n")


def test_runs_are_listed_and_those_that_wait_are_moved_held_released_and_cancelled(capsys, hold):
    holder = hold("8")
    assert said(holder) == "holds 1"
    second, third = hold("9", "0"), None
    lines_until(second, "waiting as run 2")
    third = hold("7", "0")
    lines_until(third, "waiting as run 3")

    _, listed = queue(capsys)
    rows = [line.split() for line in listed.splitlines() if not line.startswith("      ")]
    user = leases.user_name(os.geteuid())[:10]
    assert rows[1][:7] == ["1", user, str(holder.pid), "runs", "0", "8.00", "GiB"]
    assert [row[3] for row in rows[2:]] == ["waits", "waits"]
    assert "\x1b" not in listed

    assert "\n      waits for 9.00 GiB of host RAM, of which" in listed
    assert f"; leased: run 1 of {user}" in listed
    _, listed = queue(capsys, "--json")
    facts = json.loads(listed)
    assert [(each["number"], each["state"]) for each in facts] == [
        *((1, "granted"), (2, "waiting"), (3, "waiting"))
    ]
    assert facts[2]["needs"]["host_bytes"] == 7 * GIB

    assert queue(capsys, "move", "3", "3") == (2, "error: queue move 3 3: expected two runs\n")
    assert queue(capsys, "move", "3", "2") == (0, "run 3 comes before run 2\n")
    lines_until(second, "behind run 3 of ")
    assert queue(capsys, "hold", "3")[0] == 0
    lines_until(third, "queue release 3")
    holder.kill()
    lines_until(second, "holds 2")  # it passes the run that is held
    assert queue(capsys, "hold", "2")[0] == 2  # it runs
    assert queue(capsys, "cancel", "2") == (
        0,
        "run 2 stops, and saves a checkpoint if it trains; sent again, it ends at once\n",
    )
    assert second.wait() == -15
    assert queue(capsys, "release", "3") == (0, "run 3 is released\n")
    lines_until(third, "holds 3")


@pytest.mark.parametrize(
    ("argv", "error"),
    [
        (["cancel", "7"], "queue cancel 7: no such run has or waits for a lease; there are: 1"),
        (["cancel"], "queue cancel: found 0 runs, expected 1, such as queue cancel 7"),
        (["move", "1"], "queue move: found 1 runs, expected 2, such as queue move 7 8"),
        (["hold", "1"], "queue hold 1: it runs already; queue yield 1 lets it wait again"),
        (["hold", "1", "--json"], "queue hold: --json is for the list alone"),
        (["stop", "1"], "invalid choice: 'stop'"),
    ],
)
def test_a_change_that_cannot_be_is_refused_with_what_to_write(capsys, hold, argv, error):
    assert said(hold("4")) == "holds 1"
    code, text = queue(capsys, *argv)
    assert (code, error in text) == (2, True), text


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can start a process of another user")
def test_what_another_user_asks_of_a_run_does_not_count(tmp_path, hold):
    child = hold("4")
    assert said(child) == "holds 1"
    (lease,) = leases.live(tmp_path)
    leases.write_asked(tmp_path, lease, leases.Asked(is_held=True))
    path = leases.lease_path(tmp_path, 1)
    assert leases.read_asked(path).is_held
    (request,) = tmp_path.glob("1.*asked")
    os.chown(request, 65534, -1)
    assert not leases.read_asked(path).is_held
    request.unlink()
    os.mkfifo(path.with_suffix(".asked"))
    assert not leases.read_asked(path).is_held
