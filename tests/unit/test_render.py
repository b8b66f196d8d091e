"""A plan becomes files that Accelerate accepts and a line that can be pasted."""

from __future__ import annotations

import shlex
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from launch import render
from launch.rundir import House, RunDir
from launch.schema import Command
from tests.builders import gpu, machine, plan, wish


@pytest.mark.parametrize(
    ("on", "num_processes", "expected"),
    [
        (machine(), None, {"distributed_type": "NO", "num_processes": 1, "use_cpu": True}),
        (machine(), 2, {"distributed_type": "MULTI_GPU", "num_processes": 2, "use_cpu": False}),
        (machine(1), None, {"distributed_type": "NO", "num_processes": 1, "gpu_ids": "all"}),
        (machine(2), None, {"distributed_type": "MULTI_GPU", "num_processes": 2, "main_process_port": 0}),
    ],
)
def test_accelerate_loads_what_is_written_and_reads_the_same(tmp_path, on, num_processes, expected):
    from accelerate.commands.config import load_config_from_file

    chosen = plan(wish(launch={"num_processes": num_processes}, training={"bf16": bool(on.gpus)}), on)
    path = tmp_path / "accelerate.yaml"
    path.write_text(render.accelerate_config(chosen))
    loaded = load_config_from_file(str(path))
    assert loaded.mixed_precision == ("bf16" if on.gpus else "no")
    raw = yaml.safe_load(path.read_text())
    assert {key: raw[key] for key in expected} == expected


def command(on, **launch) -> Command:
    run = RunDir(Path("/a 'b\" c/runs/wish/1"))
    return render.command(plan(wish(launch=launch), on), on, run, run.attempt(1), House(Path("/a 'b\" c")), {})


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


def test_processes_share_the_cpus():
    assert command(machine(), num_processes=3).env["OMP_NUM_THREADS"] == "2"
