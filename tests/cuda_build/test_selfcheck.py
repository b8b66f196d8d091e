"""`selfcheck` on a described card: refused where others compute, cut off, continued."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil

from tests import builders
from tests.cuda_build.conftest import Workplace
from tests.fake_cuda.machine import Card


def findings(place: Workplace) -> dict[str, dict]:
    file = place.folder / "workspace/selfcheck/selfcheck.json"
    if not file.exists():
        return {}
    return {each["name"]: each for each in json.loads(file.read_text())["findings"]}


def weights(place: Workplace) -> list[Path]:
    """Those that checks have left on the disk."""
    return [*(place.folder / "workspace/selfcheck").rglob("*.safetensors")]


def test_a_card_that_another_program_uses_is_refused(tmp_path: Path):
    done = Workplace(tmp_path, Card(other_gib=3)).launch("selfcheck")
    assert done.returncode == 3, done.stdout + done.stderr
    assert "3.00 GiB" in done.stderr or "3.0 GiB" in done.stderr, done.stderr
    assert "CUDA_VISIBLE_DEVICES" in done.stderr


def test_a_check_that_is_cut_off_leaves_nothing_running_and_the_same_line_goes_on(tmp_path: Path):
    place = Workplace(tmp_path, Card(context_mib=250))
    argv = [sys.executable, "-m", "launch", "selfcheck", "--part=1", "--minutes=9"]
    with subprocess.Popen(argv, env=place.environment(), stdout=subprocess.DEVNULL) as process:
        until = time.monotonic() + 240
        while "full, bf16" not in findings(place) and time.monotonic() < until:
            time.sleep(0.2)
        time.sleep(3)  # the next run has begun
        os.kill(process.pid, signal.SIGKILL)
    first = findings(place)
    assert list(first) == ["card", "full, bf16"]
    assert first["card"]["figures"]["outside_bytes"] >= 250 << 20
    for pairs in first["full, bf16"]["figures"]["memory"].values():
        predicted, measured = pairs["allocated_bytes"]
        assert abs(measured / predicted - 1) < 0.01
    recipe = str(builders.recipe(tmp_path, training={"bf16": True}))
    plan = json.loads(place.launch("plan", recipe, "--json").stdout)
    assert plan["estimate"]["outside_bytes"] == 250 << 20
    (measured,) = [line for line in plan["why"] if line.startswith("measured here: ")]
    assert "context 0.24 GiB" in measured and "products" in measured and "copies" in measured
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline and running(place):
        time.sleep(0.5)
    assert not running(place)
    assert not weights(place), "full, bf16 is over, and the next run has saved nothing"

    again = place.launch("selfcheck", "--part=1", "--minutes=1.2")
    assert again.returncode == 0, again.stdout + again.stderr
    assert again.stdout.startswith("9 of 11 checks to do")
    assert "the same line goes on" in again.stdout
    assert findings(place)["full, bf16"] == first["full, bf16"]
    page = (place.folder / "workspace/selfcheck/selfcheck.html").read_text()
    assert "full, bf16" in page and "first step" in page
    assert {path.parts[-2] for path in weights(place)} <= {"base"}, "no check goes on from others"


COSTS = """
import json, time
from launch.base.workspace import Workspace
from launch.commands.selfcheck import checks
from launch.commands.selfcheck.bench import Bench
workspace = Workspace.here()
bench = Bench(workspace.root / "selfcheck", workspace.cache, time.monotonic() + 240)
bench.prepare()
measured = [check(bench)["rates"] for check in (checks.measure_step_costs, checks.measure_link)]
print(json.dumps(measured))
"""


def test_the_costs_of_a_step_and_the_rates_of_both_transports_are_measured(two_cards: Workplace):
    done = two_cards.python("-c", COSTS)
    assert done.returncode == 0, done.stderr[-3000:]
    costs, rates = json.loads(done.stdout.splitlines()[-1])
    assert costs["waits of a step"] == 1
    # the rest is the check of all numbers, and a step without cached blocks
    assert costs["saving in it, s"] > 0
    assert "a checkpoint between steps, s" in costs
    assert all(rate > 0 for rate in rates.values())
    recipe = str(builders.recipe(two_cards.folder, training={"bf16": True}))
    for backend, mode in (("NCCL", "dual_gpu_nccl"), ("Gloo", "dual_gpu_gloo")):
        plan = json.loads(
            two_cards.launch("plan", recipe, f"--launch.mode={mode}", "--json").stdout
        )
        rate = rates[f"link, {backend} as it is works, GB/s"]
        assert f"link: {backend} as it is works" in plan["why"]
        (line,) = [line for line in plan["why"] if line.startswith("measured here: ")]
        assert f"link {rate:.2f} GB/s (link test)" in line


def running(place: Workplace) -> list[int]:
    """Processes that have a file of the workspace in their command line."""
    root = str(place.folder)
    return [
        process.pid
        for process in psutil.process_iter(["cmdline"])
        if any(root in word for word in process.info["cmdline"] or ())
    ]
