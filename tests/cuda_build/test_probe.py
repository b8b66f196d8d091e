"""The probe and the link test beside real CUDA calls: what doctor says of described cards."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cuda_build.conftest import TWO, Workplace
from tests.fake_cuda.machine import Card


def test_doctor_says_each_card_and_the_link_between_them(tmp_path: Path):
    place = Workplace(tmp_path, Card(other_gib=2), Card(name="RTX A6000", memory_gib=48))
    done = place.launch("doctor")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "NVIDIA GeForce RTX 3080, 18.00 GiB free of 20.00 GiB, 8.6" in done.stdout
    assert "RTX A6000, 48.00 GiB free of 48.00 GiB" in done.stdout
    assert "link: NCCL as it is works" in done.stdout


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


def test_a_divided_card_is_left_out_with_its_cause(tmp_path: Path):
    done = Workplace(tmp_path, Card(name="A100", memory_gib=80, mig=1), Card()).launch("doctor")
    assert "GPUs: 1 (" in done.stdout, done.stdout
    assert "GPU 0 (A100) is divided (MIG)" in done.stdout


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
