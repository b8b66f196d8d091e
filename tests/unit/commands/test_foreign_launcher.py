"""What a launcher that is not ours has fixed, read from its environment, its command line and its
files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from launch.base.errors import ConfigError, ResourceError
from launch.commands import attach
from launch.predict.facts import Wishes
from launch.render import deepspeed as render_deepspeed
from tests.builders import machine, plan, recipe_of

CPU = {"device": "cpu"}


def cmdline(folder: Path, *words: str) -> Path:
    path = folder / "cmdline"
    path.write_bytes("\0".join(["python", "accelerate", "launch", *words, ""]).encode())
    return path


def wishes(folder: Path, *words: str, **environ: str) -> Wishes:
    return attach.wishes(environ, cmdline(folder, *words), force_cpu=False)


def deepspeed(folder: Path, **sections: object) -> dict[str, str]:
    path = folder / "ds.json"
    path.write_text(json.dumps(sections))
    return {
        "ACCELERATE_USE_DEEPSPEED": "true",
        "ACCELERATE_DEEPSPEED_CONFIG_FILE": str(path),
        "WORLD_SIZE": "2",
    }


def test_ranks_and_machines_are_those_of_the_environment(tmp_path):
    assert wishes(tmp_path) == Wishes(num_processes=1)
    assert wishes(tmp_path, WORLD_SIZE="4", LOCAL_WORLD_SIZE="2") == Wishes(
        num_processes=4, num_machines=2
    )


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (
            ["--config_file", "configs/accelerate/dual_gpu_gloo.yaml"],
            Wishes(1, force_gloo=True),
        ),
        (["--config-file=/somewhere/multi_cpu.yaml"], Wishes(1, force_cpu=True)),
        (["--config_file", "mine.yaml"], Wishes(1)),
        (["--config_file"], Wishes(1)),
    ],
)
def test_a_file_of_ours_is_known_by_its_name(tmp_path, words, expected):
    assert wishes(tmp_path, *words) == expected


def test_the_variable_of_the_guides_means_gloo(tmp_path):
    assert wishes(tmp_path, ACCELERATE_USE_GLOO="1").force_gloo
    assert not wishes(tmp_path, ACCELERATE_USE_GLOO="0").force_gloo


@pytest.mark.parametrize(
    ("zero", "mode"),
    [
        ({"stage": 1}, "deepspeed_zero1"),
        ({"stage": 2, "offload_optimizer": CPU}, "deepspeed_zero2_offload"),
        ({"stage": 2, "offload_optimizer": {"device": "none"}}, "deepspeed_zero2"),
        (
            {
                "stage": 3,
                "offload_optimizer": {"device": "cpu"},
                "offload_param": {"device": "cpu"},
            },
            "deepspeed_zero3_offload",
        ),
    ],
)
def test_a_deepspeed_file_names_the_mode(tmp_path, zero, mode):
    assert wishes(tmp_path, **deepspeed(tmp_path, zero_optimization=zero)).mode == mode


def test_deepspeed_by_flags_names_the_mode(tmp_path):
    flags = {"ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_DEEPSPEED_ZERO_STAGE": "3"}
    assert wishes(tmp_path, **flags).mode == "deepspeed_zero3"


@pytest.mark.parametrize(
    "zero",
    [
        {"stage": 0},
        {"stage": 2, "offload_optimizer": {"device": "nvme"}},
        {"stage": 3, "offload_optimizer": CPU},
    ],
)
def test_deepspeed_that_no_mode_covers_is_refused_with_what_there_is(tmp_path, zero):
    with pytest.raises(ConfigError, match="there are deepspeed_zero1, deepspeed_zero2"):
        wishes(tmp_path, **deepspeed(tmp_path, zero_optimization=zero))


def test_files_that_cannot_be_read_are_named(tmp_path):
    (tmp_path / "bad.json").write_text("{")
    environ = {"ACCELERATE_USE_DEEPSPEED": "true"}
    with pytest.raises(ConfigError, match=r"bad\.json: not JSON"):
        wishes(tmp_path, **environ, ACCELERATE_DEEPSPEED_CONFIG_FILE=str(tmp_path / "bad.json"))
    with pytest.raises(ResourceError, match=r"none\.json: No such file"):
        wishes(tmp_path, **environ, ACCELERATE_DEEPSPEED_CONFIG_FILE=str(tmp_path / "none.json"))


def test_fsdp_has_to_be_the_second(tmp_path):
    assert wishes(tmp_path, ACCELERATE_USE_FSDP="true", FSDP_VERSION="2").mode == "fsdp2"
    with pytest.raises(ConfigError, match="fsdp_version: 2"):
        wishes(tmp_path, ACCELERATE_USE_FSDP="true", FSDP_VERSION="1")


def test_the_users_deepspeed_file_keeps_what_is_not_the_recipes_and_the_rest_is_said(tmp_path):
    said: list[str] = []
    chosen = plan(recipe_of(launch={"mode": "deepspeed_zero2"}), machine(2))
    environ = deepspeed(
        tmp_path,
        train_micro_batch_size_per_gpu=99,
        gradient_accumulation_steps="auto",
        bf16={"enabled": "auto"},
        zero_optimization={"stage": 2, "reduce_bucket_size": 12345},
        wall_clock_breakdown=True,
    )
    made = render_deepspeed.deepspeed_file(chosen, 1.0, tmp_path / "cache", environ, said.append)
    assert made is not None
    config = json.loads(made.read_text())
    assert config["train_micro_batch_size_per_gpu"] == 16
    assert config["zero_optimization"] == {"stage": 2, "reduce_bucket_size": 12345}
    assert config["wall_clock_breakdown"] is True
    assert config["zero_force_ds_cpu_optimizer"] is False
    assert said == [
        f"{tmp_path}/ds.json: train_micro_batch_size_per_gpu says 99, the recipe says 16, which"
        " runs"
    ]


def test_an_optimizer_in_the_users_deepspeed_file_is_refused(tmp_path):
    chosen = plan(recipe_of(launch={"mode": "deepspeed_zero2"}), machine(2))
    environ = deepspeed(tmp_path, optimizer={"type": "AdamW"})
    with pytest.raises(ConfigError, match="optimizer is the recipe's"):
        render_deepspeed.deepspeed_file(chosen, 1.0, tmp_path, environ, print)


def test_a_deepspeed_file_that_asks_for_deepspeeds_own_optimizer_is_refused_with_the_fix(tmp_path):
    chosen = plan(recipe_of(launch={"mode": "deepspeed_zero2_offload"}), machine(2))
    environ = deepspeed(tmp_path, zero_force_ds_cpu_optimizer=True)
    refused = r"ds\.json: zero_force_ds_cpu_optimizer true .* set it to false, or remove it"
    with pytest.raises(ConfigError, match=refused):
        render_deepspeed.deepspeed_file(chosen, 1.0, tmp_path, environ, print)


def test_a_recipe_and_a_launcher_that_disagree_are_refused():
    with pytest.raises(
        ConfigError, match="deepspeed_zero3, but the ranks were started as deepspeed_zero2"
    ):
        plan(
            recipe_of(launch={"mode": "deepspeed_zero3"}),
            machine(2),
            num_processes=2,
            mode="deepspeed_zero2",
        )


def test_values_given_to_accelerate_that_the_recipe_decides_are_said():
    chosen = plan(recipe_of(launch={"mode": "deepspeed_zero2"}), machine(2))
    given_flags = {
        "ACCELERATE_MIXED_PRECISION": "bf16",
        "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "4",
        "ACCELERATE_GRADIENT_CLIPPING": "0.5",
    }
    lines = attach.unused_values(given_flags, chosen, 1.0)
    assert (
        lines[0] == "accelerate was given mixed_precision bf16; the recipe says no, which runs"
        " (training.bf16, training.fp16)"
    )
    assert [line.split(";")[0].split()[-1] for line in lines] == ["bf16", "4", "0.5"]
    assert attach.unused_values({"ACCELERATE_MIXED_PRECISION": "no"}, chosen, 1.0) == []


def test_our_deepspeed_files_are_found_from_any_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    environ = {
        "ACCELERATE_USE_DEEPSPEED": "true",
        "ACCELERATE_DEEPSPEED_CONFIG_FILE": "configs/deepspeed/zero3.json",
    }
    assert wishes(tmp_path, **environ).mode == "deepspeed_zero3"
