"""The probe and the link test beside real CUDA calls: what doctor says of described cards."""

from __future__ import annotations

import json
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


def test_a_card_that_fell_off_the_bus_is_named(tmp_path: Path):
    done = Workplace(tmp_path, Card(), Card(lost=1)).launch("doctor")
    assert "NVML lists 1; GPU 1: GPU is lost" in done.stdout, done.stdout
    assert "link: not tested: 1 GPU(s), a link needs two" in done.stdout


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
