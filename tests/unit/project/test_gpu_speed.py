"""Cases, gates and profiles of the comparison on a card (benchmarks/gpu_speed.py)."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from benchmarks import gpu_speed, gpu_speed_hook
from benchmarks.gpu_speed_cases import CASES, GROUPS
from benchmarks.gpu_speed_hook import Files, Segments
from launch.recipe import load

TRAININGS = [training for group in GROUPS for training in group.trainings]


@pytest.mark.parametrize(
    "training", [one for one in TRAININGS if one.is_ours], ids=lambda x: x.name
)
def test_every_training_of_ours_is_a_recipe(tmp_path: Path, training):
    file = tmp_path / "recipe.yaml"
    content = training.recipe(tmp_path, tmp_path / "model", tmp_path)
    file.write_text(yaml.safe_dump(content), encoding="utf-8")
    recipe, _ = load.load(str(file))
    assert recipe.training.max_steps == training.case.segments.max_steps


def test_names_are_given_once_and_begin_with_their_case():
    names = [one.name for one in TRAININGS]
    assert len(names) == len(set(names))
    assert all(one.name.startswith(f"{one.case.name}-") for one in TRAININGS)


def test_a_group_is_cut_into_parts_that_a_card_holds():
    for group in GROUPS:
        for card_gb in (78, 138):
            parts = list(group.parts(card_gb))
            assert [one for part in parts for one in part.trainings] == list(group.trainings)
            for part in parts:
                held = sum(one.reserved_gb for one in part.trainings)
                assert held <= card_gb or len(part.trainings) == 1


def test_the_segments_follow_each_other_behind_a_step_that_is_not_timed():
    plan = Segments.from_text("6,5,3,2")
    assert [plan.begin(number) for number in range(4)] == [6, 12, 18, 24]
    assert plan.last == 27
    assert plan.max_steps == 28
    assert Segments.from_text(plan.text) == plan


def test_a_permit_opens_the_gates_up_to_its_number(tmp_path: Path):
    files = Files(tmp_path, "one")
    files.allow(2)
    files.wait(1)
    files.wait(2)
    files.say("warm", losses=[1.0])
    with files.said.open("a") as file:
        file.write('{"at": "cut sho')
    (line,) = files.lines()
    assert (line["at"], line["losses"]) == ("warm", [1.0])


@pytest.mark.parametrize(
    ("kernel", "kind"),
    [
        ("void pytorch_flash::flash_fwd_kernel<...>", "attention"),
        ("nvjet_sm90_tst_256x128_64x4_1x2_h_bz_coopA_TNT", "gemm"),
        ("void kDequantizeBlockwise<__nv_bfloat16, 512, 64, 8, 2>", "nf4"),
        ("Memcpy DtoD (Device -> Device)", "copy/cast"),
        ("_swiglu_backward_kernel", "triton"),
    ],
)
def test_kernels_have_kinds(kernel, kind):
    assert gpu_speed_hook.kind_of(kernel) == kind


def test_a_profile_counts_overlapping_kernels_once_and_time_of_inner_calls_apart():
    device = [(0, 4_000_000, "gemm"), (2_000_000, 6_000_000, "Memcpy DtoH")]
    found = gpu_speed_hook.device_summary(device, 0.012, 2)
    assert found["gpu_busy_ms_a_step"] == 3
    assert found["gpu_idle_share_profiled"] == 0.5
    assert found["gpu_kernels_a_step"] == 0.5
    host = [[(0, 10_000_000, "aten::mm"), (2_000_000, 5_000_000, "cudaLaunchKernel")]]
    found = gpu_speed_hook.host_summary(host, 1)
    assert found["top_cpu_self"] == [["aten::mm", 7.0, 1.0], ["cudaLaunchKernel", 3.0, 1.0]]
    assert found["launches_a_step"] == 1


def test_medians_and_spreads_are_of_the_segments():
    segments = [
        {
            "ms_a_step": ms,
            "tokens_per_s": 1e6 / ms,
            "tokens_a_step": 100,
            "computed_tokens_a_step": 120,
            "peak_allocated": 5,
            "peak_reserved": int(ms),
            "cuda_mallocs": int(ms),
        }
        for ms in (10.0, 12.0, 20.0)
    ]
    found = gpu_speed.medians(segments)
    assert found["ms_a_step"] == 12
    assert found["ms_a_step_spread"] == [10, 20]
    assert found["peak_reserved"] == 20
    assert found["cuda_mallocs_in_segments"] == 10


def test_the_lines_of_a_run_become_results_but_not_those_of_a_rehearsal(tmp_path: Path):
    about = {"stage": "about", "date": "2026-11-27", "machine": "a card", "is_rehearsal": False}
    row: dict[str, Any] = {"stage": "training", "name": "c3-ours", "ms_a_step": 200.0}
    row |= {"tokens_per_s": 4e4, "tokens_per_s_spread": [3e4, 5e4], "ms_a_step_spread": [1, 300]}
    row |= {"tokens_a_step": 8192, "computed_tokens_a_step": 8192, "peak_allocated": 3e9}
    row |= {"peak_reserved": 4e9, "profile": {"gpu_busy_ms_a_step": 150.0}}
    failed = {"stage": "training", "name": "c3-plain", "failed": "no segment within 40 s"}
    lines = [about | {"versions": {"ours": {"torch": "2.11.0"}}}, row, failed]
    file = tmp_path / "results.jsonl"
    file.write_text("".join(f"{json.dumps(line)}\n" for line in lines), encoding="utf-8")
    gpu_speed.record(file, tmp_path)
    page = (tmp_path / "gpu_speed.md").read_text(encoding="utf-8")
    assert "| c3-ours | 40,000 | 30,000 to 50,000 | 200.0 |" in page
    assert "| 25% |" in page
    assert "torch 2.11.0" in page
    rows = json.loads((tmp_path / "gpu_speed.json").read_text(encoding="utf-8"))["rows"]
    assert [row["name"] for row in rows] == ["c3-ours", "c3-plain"]
    file.write_text(json.dumps(about | {"is_rehearsal": True}), encoding="utf-8")
    with pytest.raises(SystemExit, match="a rehearsal without a card"):
        gpu_speed.record(file, tmp_path)


def test_a_failed_training_keeps_a_line():
    row = {"name": "c3-plain", "failed": "not warm after 75 s"}
    assert "not warm after 75 s" in gpu_speed.line_of(row)
    assert "not warm after 75 s" in gpu_speed.table([row])


def test_a_small_case_keeps_its_way_of_training():
    for case in CASES.values():
        small = case.small()
        assert replace(
            small, config={}, batch=0, packed_batch=0, segments=case.segments
        ) == replace(case, config={}, batch=0, packed_batch=0)
    assert SimpleNamespace(**CASES["c3"].small().model()).hidden_size == 256
