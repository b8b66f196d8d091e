"""A plan becomes files that Accelerate accepts and a line that can be pasted."""

from __future__ import annotations

import json
import shlex
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from launch.base.workspace import CODE, Workspace
from launch.predict.memory import pinned_memory
from launch.render import accelerate, deepspeed, run_files
from launch.run_folder.layout import RunDir
from launch.schema.modes import LAUNCH_MODES
from launch.schema.plan import Command
from scripts import render_configs
from tests.builders import gpu, machine, plan, recipe_of


@pytest.mark.parametrize(
    ("on", "num_processes", "expected"),
    [
        (machine(), None, {"distributed_type": "NO", "num_processes": 1, "use_cpu": True}),
        (machine(), 2, {"distributed_type": "MULTI_GPU", "num_processes": 2, "use_cpu": False}),
        (machine(1), None, {"distributed_type": "NO", "num_processes": 1, "gpu_ids": "all"}),
        (
            machine(2),
            None,
            {"distributed_type": "MULTI_GPU", "num_processes": 2, "main_process_port": 0},
        ),
    ],
)
def test_accelerate_loads_what_is_written_and_reads_the_same(tmp_path, on, num_processes, expected):
    from accelerate.commands.config import load_config_from_file

    chosen = plan(
        recipe_of(launch={"num_processes": num_processes}, training={"bf16": bool(on.gpus)}), on
    )
    path = tmp_path / "accelerate.yaml"
    path.write_text(accelerate.accelerate_config(chosen, "unused.json"))
    loaded = load_config_from_file(str(path))
    assert loaded.mixed_precision == ("bf16" if on.gpus else "no")
    raw = yaml.safe_load(path.read_text())
    assert {key: raw[key] for key in expected} == expected


@pytest.mark.parametrize("mode", LAUNCH_MODES)
def test_the_files_in_configs_are_what_render_writes(mode):
    written = render_configs.files(mode)
    assert {path: (CODE / path).read_text(encoding="utf-8") for path in written} == written


def test_configs_holds_nothing_else():
    expected = {path for mode in LAUNCH_MODES for path in render_configs.files(mode)}
    found = {
        str(path.relative_to(CODE))
        for name in ("accelerate", "deepspeed")
        for path in (CODE / "configs" / name).iterdir()
    }
    assert found == expected


@pytest.mark.parametrize(
    "mode", [mode for mode, row in LAUNCH_MODES.items() if row.engine == "deepspeed"]
)
def test_a_deepspeed_file_agrees_with_its_plan_in_every_number(mode):
    chosen = plan(recipe_of(launch={"mode": mode}, training={"bf16": True}), machine(2))
    config = json.loads(deepspeed.deepspeed_config(chosen, 0.5))
    assert "auto" not in json.dumps(config)
    strategy = chosen.strategy
    batch = [
        config[key]
        for key in (
            "train_micro_batch_size_per_gpu",
            "gradient_accumulation_steps",
            "train_batch_size",
        )
    ]
    assert batch == [strategy.per_device_train_batch_size, strategy.gradient_accumulation_steps, 64]
    assert (config["bf16"]["enabled"], config["fp16"]["enabled"]) == (True, False)
    assert config["gradient_clipping"] == 0.5
    zero = config["zero_optimization"]
    assert zero["stage"] == strategy.launch_mode.zero_stage
    assert ("offload_optimizer" in zero, "offload_param" in zero) == (
        strategy.launch_mode.offloads,
        mode == "deepspeed_zero3_offload",
    )


@pytest.mark.parametrize("pins", [True, False])
def test_what_is_offloaded_is_pinned_as_planned(pins):
    chosen = plan(recipe_of(), machine(1), mode="deepspeed_zero3_offload")
    chosen = replace(chosen, strategy=replace(chosen.strategy, pin_memory=pins))
    zero = json.loads(deepspeed.deepspeed_config(chosen, 1.0))["zero_optimization"]
    states = {"device": "cpu", "pin_memory": pins}
    assert (zero["offload_optimizer"], zero["offload_param"]) == (states, states)


def test_several_machines_meet_where_the_recipe_says():
    launch = {
        "nodes": 2,
        "machine_rank": 1,
        "main_process_ip": "10.0.0.1",
        "network_interface": "eth1",
    }
    config = yaml.safe_load(
        accelerate.accelerate_config(plan(recipe_of(launch=launch), machine(2)), "")
    )
    expected = {
        "num_machines": 2,
        "machine_rank": 1,
        "num_processes": 4,
        "main_process_ip": "10.0.0.1",
        "main_process_port": 29500,
        "rdzv_backend": "static",
    }
    assert {key: config[key] for key in expected} == expected
    made = command(machine(2), **launch).env
    assert (made["GLOO_SOCKET_IFNAME"], made["NCCL_SOCKET_IFNAME"]) == ("eth1", "eth1")
    assert made["CUDA_VISIBLE_DEVICES"] == "0,1"
    assert made["OMP_NUM_THREADS"] == "4"


def command(on, **launch) -> Command:
    run = RunDir(Path("/a 'b\" c/runs/wish/1"))
    return run_files.command(
        plan(recipe_of(launch=launch), on),
        on,
        run,
        run.attempt(1),
        Workspace(Path("/a 'b\" c")),
        {},
    )


def test_the_line_survives_a_shell():
    made = command(machine())
    words = shlex.split(str(made))
    assert words[0] == "env"
    assert words[-len(made.argv) :] == list(made.argv)
    assert f"LOWMEM_ROOT={made.env['LOWMEM_ROOT']}" in words


def test_only_the_chosen_cards_are_visible_by_the_numbers_of_the_vendor():
    cards = machine(cards=(gpu(2), gpu(3)))
    assert command(cards).env["CUDA_VISIBLE_DEVICES"] == "2,3"
    assert command(cards, num_processes=1).env["CUDA_VISIBLE_DEVICES"] == "2"
    amd = machine(cards=(replace(gpu(1), vendor="amd", architecture="gfx1201"),))
    assert command(amd).env["HIP_VISIBLE_DEVICES"] == "1"


@pytest.mark.parametrize(
    ("users", "added"),
    [
        ({}, "expandable_segments:True"),
        ({"PYTORCH_ALLOC_CONF": ""}, None),
        ({"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:False"}, None),
    ],
)
def test_the_users_settings_of_the_allocator_are_left_alone(users, added):
    chosen = replace(plan(recipe_of(), machine(1)), allocator_settings="expandable_segments:True")
    run, workspace = RunDir(Path("/runs/1")), Workspace(Path("/"))
    made = run_files.command(chosen, machine(1), run, run.attempt(1), workspace, users)
    assert made.env.get("PYTORCH_ALLOC_CONF") == added


@pytest.mark.parametrize(
    ("users", "added"),
    [
        ({}, {"PYTORCH_ALLOC_CONF": "expandable_segments:True,pinned_max_cached_size_mb:16"}),
        (
            {"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64"},
            {"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64,pinned_max_cached_size_mb:16"},
        ),
        ({"PYTORCH_ALLOC_CONF": "pinned_max_cached_size_mb:4"}, {}),
    ],
)
def test_pinned_blocks_of_offloaded_states_are_exact_beside_the_users_settings(
    monkeypatch, users, added
):
    monkeypatch.setattr(pinned_memory, "WITH_EXACT_SIZES", (0, 0))  # a torch from 2.13 on
    chosen = plan(recipe_of(), machine(1), mode="deepspeed_zero2_offload")
    chosen = replace(chosen, allocator_settings="expandable_segments:True")
    run, workspace = RunDir(Path("/runs/1")), Workspace(Path("/"))
    made = run_files.command(chosen, machine(1), run, run.attempt(1), workspace, users)
    assert {name: text for name, text in made.env.items() if "ALLOC_CONF" in name} == added


def test_processes_share_the_cpus():
    assert command(machine(), num_processes=3).env["OMP_NUM_THREADS"] == "2"
