"""The probe and the link test beside real CUDA calls: what doctor says of described cards."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests import builders
from tests.cuda_build.conftest import TWO, Workplace
from tests.fake_cuda.machine import Card


def test_doctor_says_each_card_and_the_link_between_them(tmp_path: Path):
    place = Workplace(tmp_path, Card(other_gib=2), Card(name="RTX A6000", memory_gib=48))
    done = place.launch("doctor")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "NVIDIA GeForce RTX 3080, 18.00 GiB free of 20.00 GiB, 8.6" in done.stdout
    assert "RTX A6000, 48.00 GiB free of 48.00 GiB" in done.stdout
    assert "link: NCCL as it is works" in done.stdout


def test_doctor_measures_the_context_and_plans_count_it(tmp_path: Path):
    place = Workplace(tmp_path, Card(context_mib=300))
    recipe = str(builders.recipe(tmp_path, training={"bf16": True}))
    assert json.loads(place.launch("plan", recipe, "--json").stdout)["estimate"][
        "outside_source"
    ].endswith("assumed; doctor measures it")
    done = place.launch("doctor")
    assert "context: a rank takes 0.29 GiB of its NVIDIA GeForce RTX 3080" in done.stdout, done
    estimate = json.loads(place.launch("plan", recipe, "--json").stdout)["estimate"]
    assert estimate["outside_bytes"] == 300 << 20
    assert estimate["outside_source"] == "context 0.29 GiB, measured here by doctor"


def test_a_card_at_lower_clocks_is_a_note_with_the_reason_and_the_plan_says_it(tmp_path: Path):
    place = Workplace(tmp_path, Card(), Card(name="RTX A6000", slowdown=0x48))
    done = place.launch("doctor")
    assert done.returncode == 0, done.stdout + done.stderr
    text = "GPU 1 (RTX A6000) is slower now: too hot (HW thermal slowdown); 600 of 1980 MHz; 91 °C"
    (note,) = [line for line in done.stdout.splitlines() if "slower now" in line]
    assert note.startswith(f"note: {text}; fix: see its fans")
    _, explained = planned(place, "--launch.num_processes=2")
    assert text in explained


XIDS = """
import json, os, time
from dataclasses import astuple
from pathlib import Path
from launch.probe import machine
from launch.probe.gpu_signs import XidWatch

log = Path(os.environ["LOWMEM_SYSTEM_ROOT"], "dev/kmsg")
line = "NVRM: Xid (PCI:0000:{}:00): {}, GPU has fallen off the bus"
watch = XidWatch(machine.machine().gpus[:1])
now = time.monotonic() * 1e6
records = [(now - 9e6, "01", 48), (now + 1, "02", 95), (now + 2, "01", 79), (now + 3, "01", 79)]
log.write_text("".join(f"4,1,{at:.0f},-;{line.format(*what)}\\n" for at, *what in records))
print(json.dumps([astuple(xid) for xid in watch.read()]))
"""


def test_the_kernels_log_gives_the_xids_of_the_ranks_cards_once(two_cards: Workplace):
    (two_cards.folder / "dev").mkdir()
    done = two_cards.python("-c", XIDS, LOWMEM_SYSTEM_ROOT=str(two_cards.folder))
    assert done.returncode == 0, done.stderr
    (xid,) = json.loads(done.stdout)
    assert xid[:2] == [79, "GPU 0 (NVIDIA GeForce RTX 3080)"]
    assert xid[2] == "NVRM: Xid (PCI:0000:01:00): 79, GPU has fallen off the bus"


KEPT = """
from dataclasses import replace
from launch.base.workspace import Workspace
from launch.probe import import_memory
cache = Workspace.here().cache
card = import_memory.measured_or_assumed(cache, "cuda").card
more = replace(card, context_bytes=420 << 20, context_source="selfcheck", flops_per_s=5e13)
import_memory.keep_card(cache, more)
"""


def test_doctor_keeps_what_selfcheck_has_measured_of_the_card(tmp_path: Path):
    place = Workplace(tmp_path, Card(context_mib=300))
    place.launch("doctor")
    assert place.python("-c", KEPT).returncode == 0
    done = place.launch("doctor")
    assert "0.41 GiB of its NVIDIA GeForce RTX 3080" in done.stdout, done
    assert "measured here by selfcheck" in done.stdout
    recipe = str(builders.recipe(tmp_path, training={"bf16": True}))
    plan = json.loads(place.launch("plan", recipe, "--json").stdout)
    assert plan["estimate"]["outside_source"] == "context 0.41 GiB, measured here by selfcheck"
    assert "products 50 TFLOP/s (selfcheck)" in "\n".join(plan["why"])


def test_doctors_rank_does_what_a_rank_does_on_a_card(one_card: Workplace):
    """Attention, products, clipping and an optimizer on a pinned batch of a data worker."""
    words = ("-m", "training.children.import_memory", "rank", "--device", "cuda")
    done = one_card.python(*words)
    assert done.returncode == 0, done.stderr
    (rank,) = (each for each in one_card.machine.processes() if each.launches)
    assert rank.launches > 100
    assert rank.peak_pinned_bytes >= 4 * 256 * 8  # a batch of int64


def test_a_card_that_fell_off_the_bus_is_named(tmp_path: Path):
    done = Workplace(tmp_path, Card(), Card(lost=1)).launch("doctor")
    assert "NVML lists 1; GPU 1: GPU is lost" in done.stdout, done.stdout
    assert "link: not tested: 1 GPU(s), a link needs two" in done.stdout


SHOWN = """
import json, os
from launch.probe import gpus, machine
here = machine.machine()
os.environ.update(gpus.visible_devices(here, len(here.gpus)))
import torch
cards = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
print(json.dumps([[gpu.uuid for gpu in here.gpus], [f"GPU-{card.uuid}" for card in cards]]))
"""


@pytest.mark.parametrize(
    "variables",
    [{}, {"CUDA_DEVICE_ORDER": "FASTEST_FIRST"}, {"CUDA_VISIBLE_DEVICES": "2,0"}],
)
def test_ranks_get_the_planned_cards_in_the_planned_order(tmp_path: Path, variables):
    slow = Card(name="NVIDIA T4", capability="7.5")
    place = Workplace(tmp_path, slow, Card(lost=1), Card(), Card(name="RTX A6000"))
    done = place.python("-c", SHOWN, **variables)
    assert done.returncode == 0, done.stderr
    planned, seen = json.loads(done.stdout)
    assert planned == seen
    assert len(seen) == (2 if "CUDA_VISIBLE_DEVICES" in variables else 3)


def planned(place: Workplace, *words: str) -> tuple[list[str], str]:
    """The UUIDs that a plan shows to its ranks, and what it says."""
    recipe = str(builders.recipe(place.folder, "gpt2-small"))
    done = place.launch("run", recipe, "--dry-run", "--explain", *words)
    assert done.returncode == 0, done.stderr
    (shown,) = set(re.findall(r"CUDA_VISIBLE_DEVICES=(GPU-\S+)", done.stdout))
    return [uuid[:12] for uuid in shown.split(",")], done.stdout


def test_the_card_with_the_most_free_memory_is_taken_first(tmp_path: Path):
    cards = Card(other_gib=9), Card(other_gib=1), Card(name="RTX A6000", memory_gib=48)
    uuids, text = planned(Workplace(tmp_path, *cards), "--launch.num_processes=2")
    assert uuids == ["GPU-00000003", "GPU-00000002"]
    assert "CUDA_VISIBLE_DEVICES=2 leaves it out" in text


def test_auto_weighs_one_fast_card_against_two_unequal_ones(tmp_path: Path):
    cards = (
        Card(name="Tesla P4", capability="7.5", memory_gib=8),
        Card(name="NVIDIA H200", capability="9.0"),
    )
    uuids, text = planned(Workplace(tmp_path, *cards))
    assert uuids == ["GPU-00000002"], text
    assert "GPU 1: the most free memory of 2 GPUs" in text


def test_a_divided_card_is_left_out_with_its_cause(tmp_path: Path):
    done = Workplace(tmp_path, Card(name="A100", memory_gib=80, mig=1), Card()).launch("doctor")
    assert "GPUs: 1 (" in done.stdout, done.stdout
    assert "GPU 0 (A100) is divided (MIG)" in done.stdout


@pytest.mark.parametrize(
    ("capability", "driver", "cause"),
    [
        ("8.6", "12040", "driver 580.65.06 serves CUDA up to 12.4, this build needs 13.x"),
        ("7.0", "13000", "it has kernels for sm_75"),  # V100
    ],
)
def test_a_driver_or_a_card_that_the_build_does_not_serve_is_named_before_torch_is_loaded(
    tmp_path: Path, capability, driver, cause
):
    place = Workplace(tmp_path, Card(capability=capability))
    done = place.launch("doctor", NVIDIA_FAKE_DRIVER=driver)
    assert done.returncode == 3, done.stdout
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("problem: ")]
    assert cause in line
    assert "cu126" in line.partition("; fix: ")[2]
    assert place.machine.processes() == []
    done = place.launch("run", str(builders.recipe(tmp_path)), NVIDIA_FAKE_DRIVER=driver)
    assert done.returncode == 3
    assert cause in done.stderr and "cu126" in done.stderr
    assert place.machine.processes() == []


@pytest.mark.parametrize(
    ("capability", "driver", "fix"),
    [
        ("12.0", "12040", "update the NVIDIA driver to 580 or newer, then "),  # RTX 50xx
        ("3.7", "13000", "no build of torch 2.13 has kernels for it; train on the CPU"),  # K80
    ],
)
def test_where_no_other_build_helps_each_verb_says_what_does(
    tmp_path: Path, capability, driver, fix
):
    place = Workplace(tmp_path, Card(capability=capability))
    recipe = str(builders.recipe(tmp_path))
    for words in (("doctor",), ("run", recipe), ("plan", recipe), ("selfcheck",)):
        done = place.launch(*words, NVIDIA_FAKE_DRIVER=driver)
        assert done.returncode == 3, done.stdout + done.stderr
        assert f"; fix: {fix}" in done.stdout + done.stderr
        assert place.machine.processes() == []  # nothing has loaded CUDA


@pytest.mark.parametrize(
    ("fault", "link"),
    [
        ("shm_full", "NCCL with NCCL_SHM_DISABLE=1 works"),
        ("p2p_hangs", "NCCL with NCCL_P2P_DISABLE=1 works"),
        ("error", "Gloo as it is works"),
    ],
)
def test_the_link_test_takes_the_first_rung_that_works(tmp_path: Path, fault, link):
    done = Workplace(tmp_path, *TWO).launch("doctor", fault=fault)
    assert f"link: {link}" in done.stdout, done.stdout
