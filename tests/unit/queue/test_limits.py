"""Limits of a recipe to the memory of its plans, beside what is free."""

from __future__ import annotations

from dataclasses import replace

import pytest

from launch.base.errors import DoesNotFit
from launch.plan.resolve import resolve
from launch.predict import budgets
from launch.schema.machine import GIB
from tests import builders
from tests.builders import gpu, machine, plan, recipe_of

pytestmark = pytest.mark.unit


@pytest.mark.parametrize(
    ("launch", "budget_gib", "counts"),
    [
        # 12 GiB are available of 16, and an unnamed reserve is at most an eighth of those
        ({}, 10.0, ""),
        ({"host_limit_gib": 4}, 4.0, "at most 4.00 GiB (launch.host_limit_gib 4), which is less"),
        ({"host_limit_gib": 10.5}, 10.0, "(launch.host_reserve_gib), which is less than launch."),
        ({"host_limit_gib": 4, "host_reserve_gib": 9}, 3.0, "9.00 GiB of reserve"),
        ({"host_limit_gib": 4, "host_reserve_gib": 20}, 0.0, "12.00 GiB of reserve"),
    ],
)
def test_the_smallest_of_limit_and_free_memory_less_its_reserve_is_the_budget_and_named(
    launch, budget_gib, counts
):
    recipe = recipe_of(launch=launch)
    on, lines = budgets.limited(machine(), recipe)
    assert budgets.host_budget_bytes(recipe, on) == budget_gib * GIB
    assert len(lines) == ("host_limit_gib" in launch)
    assert counts in "".join(lines)
    assert on.host_limit_bytes == machine().host_limit_bytes  # which identifies the machine


@pytest.mark.parametrize(
    ("launch", "free_gib", "budget_gib", "counts"),
    [
        ({"vram_limit_gib": 6}, (19, 19), 6.0, "at most 6.00 GiB per card"),
        ({"vram_limit_gib": 6, "vram_fraction": 0.5}, (19, 10), 5.0, "5.00 GiB of the fullest"),
        ({"vram_limit_gib": 19}, (19, 19), 18.05, "which is less than launch.vram_limit_gib 19"),
    ],
)
def test_each_card_has_a_limit_beside_the_share_of_its_free_memory(
    launch, free_gib, budget_gib, counts
):
    cards = tuple(gpu(index, free_bytes=free * GIB) for index, free in enumerate(free_gib))
    recipe = recipe_of(launch={"mode": "dual_gpu_nccl", **launch})
    on, (line,) = budgets.limited(machine(cards=cards), recipe)
    chosen = plan(recipe, on)
    assert chosen.budget_bytes == pytest.approx(budget_gib * GIB, abs=1)
    assert counts in line


def test_a_plan_within_a_limit_names_it_and_holds_the_ranks_to_it():
    recipe = recipe_of(launch={"vram_limit_gib": 6})
    on, lines = budgets.limited(machine(1), recipe)
    chosen = plan(recipe, on, notes=lines)
    assert lines[0] in chosen.why
    assert chosen.allocator_limit_bytes == 6 * GIB - chosen.estimate.outside_bytes
    assert plan(recipe_of(), machine(1)).allocator_limit_bytes is None
    assert plan(recipe, machine()).allocator_limit_bytes is None  # a CPU has no allocator of VRAM


def test_a_recipe_that_only_a_limit_refuses_names_the_limit():
    recipe = recipe_of(model={"shape": "qwen2-0.5b"}, launch={"host_limit_gib": 0.5})
    on, lines = budgets.limited(machine(), recipe)
    assert plan(recipe, machine()).strategy.device == "cpu"
    with pytest.raises(DoesNotFit, match=r"at most 0\.50 GiB \(launch\.host_limit_gib 0\.5\)"):
        plan(recipe, on, notes=lines)


def test_a_smaller_reserve_is_offered_where_it_helps():
    """States of 7.36 GiB, of 9 available less 2 of reserve, and of 7 that are allowed."""
    offloaded = {"mode": "deepspeed_zero2_offload"}
    recipe, limited = (
        recipe_of(model={"shape": "qwen2-0.5b"}, launch={**offloaded, **limit})
        for limit in ({}, {"host_limit_gib": 7})
    )
    with pytest.raises(DoesNotFit, match=r"--launch\.host_reserve_gib=1\.6 \(deepspeed"):
        plan(recipe, replace(machine(1), host_available_bytes=9 * GIB))
    on, _ = budgets.limited(machine(1), limited)
    with pytest.raises(DoesNotFit) as refusal:
        plan(limited, on)
    assert "--launch.host_reserve_gib" not in str(refusal.value)


def test_what_misses_the_hosts_budget_is_refused_by_the_limit_that_counts():
    launch = {"mode": "deepspeed_zero3_offload", "host_limit_gib": 0.5}
    recipe = recipe_of(model={"shape": "qwen2-0.5b"}, launch=launch)
    on, _ = budgets.limited(machine(1), recipe)
    with pytest.raises(DoesNotFit) as refusal:
        plan(recipe, on)
    said = "budget 0.50 GiB (launch.host_limit_gib 0.5, and the reserve beside it)"
    assert said in str(refusal.value)
    assert "host_reserve_gib" not in str(refusal.value)
    with pytest.raises(DoesNotFit, match=r"1\.00 GiB available less launch\.host_reserve_gib"):
        plan(recipe, replace(machine(1), host_available_bytes=GIB))


def test_a_start_plans_within_the_limits_of_its_command_line(tmp_path, monkeypatch):
    monkeypatch.setenv("LOWMEM_ROOT", str(tmp_path))
    recipe, typed = builders.recipe(tmp_path), ["--launch.host_limit_gib=3"]
    choice = resolve(str(recipe), typed, machine(), trace=False)
    assert choice.plan.budget_bytes == 3 * GIB
    assert any("(launch.host_limit_gib 3)" in line for line in choice.plan.why)
