"""What is known of each GPU architecture, and what the plan, the command and a start of others make
of it."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from launch.base.errors import ConfigError
from launch.base.workspace import Workspace
from launch.probe import architectures
from launch.render import run_files
from launch.report import plan_lines
from launch.run_folder.layout import RunDir
from launch.schema.machine import CUDNN_LAST, Gpu, cudnn_is_last
from launch.schema.plan import Command
from tests.builders import gpu, machine, plan, recipe_of

CONFIGS = Path(__file__).resolve().parents[3] / "configs"


def radeon(gfx: str, index: int = 0) -> Gpu:
    return replace(gpu(index, vendor="amd", architecture=gfx), name="Radeon")


@pytest.mark.parametrize(
    ("capability", "bf16", "fp16", "tf32"),
    [
        ("6.1", False, False, False),  # GTX 1080
        ("7.0", False, True, False),  # V100
        ("7.5", False, True, False),  # RTX 2080
        ("8.0", True, True, True),
        ("8.6", True, True, True),
        ("9.0", True, True, True),
        ("10.0", True, True, True),  # not below 8.0, as text would have it
        ("12.0", True, True, True),
    ],
)
def test_nvidia_gets_fp16_with_volta_and_bf16_and_tf32_with_ampere(capability, bf16, fp16, tf32):
    facts = architectures.look_up(gpu(architecture=capability))
    assert (facts.bf16, facts.fp16, facts.tf32, facts.attention) == (bf16, fp16, tf32, "fused")


@pytest.mark.parametrize(
    ("gfx", "bf16", "attention"),
    [
        ("gfx900", False, "math"),
        ("gfx906:sramecc+:xnack-", False, "math"),
        ("gfx908", True, "math"),
        ("gfx90a:sramecc+:xnack-", True, "fused"),
        ("gfx942", True, "fused"),
        ("gfx1010", False, "math"),
        ("gfx1030", False, "math"),
        ("gfx1032", False, "math"),
        ("gfx1100", True, "fused"),
        ("gfx1101", True, "experimental"),
        ("gfx1199", True, "math"),  # not made yet: AOTriton knows names, not families
        ("gfx1200", True, "experimental"),
        ("gfx1201", True, "fused"),
        ("", True, "unknown"),
        ("Navi 48", True, "unknown"),
    ],
)
def test_amd_has_bf16_from_mi100_and_rdna_3_and_fused_attention_by_name(gfx, bf16, attention):
    facts = architectures.look_up(radeon(gfx))
    assert (facts.bf16, facts.attention) == (bf16, attention)


def test_the_architecture_of_every_described_machine_is_known():
    found = [
        Gpu(
            index=card["index"],
            name=card["name"],
            vendor=card["vendor"],
            total_bytes=0,
            free_bytes=0,
            architecture=card["architecture"],
            driver="",
            reason="",
        )
        for path in (CONFIGS / "machines").glob("*.yaml")
        for card in yaml.safe_load(path.read_text())["gpus"]
    ]
    assert found
    assert [
        card.name for card in found if architectures.look_up(card) == architectures.UNKNOWN
    ] == []


@pytest.mark.parametrize(
    ("card", "said"),
    [
        (gpu(architecture="7.5"), "no bf16 in the hardware of RTX 3080 (7.5)"),
        (
            gpu(architecture="6.1"),
            "no bf16 in the hardware of RTX 3080 (6.1); its fp16 saves memory but no time",
        ),
        (radeon("gfx1030"), "no bf16 in the hardware of Radeon (gfx1030)"),
    ],
)
def test_bf16_that_the_hardware_lacks_becomes_fp16_and_the_reason_is_printed(card, said):
    recipe = recipe_of(training={"bf16": True})
    chosen = plan(recipe, machine(cards=(card,)))
    assert chosen.strategy.mixed_precision == "fp16"
    assert f"  changed    {said}" in plan_lines.full_text(recipe, machine(), chosen)


def test_bf16_stays_on_an_r9700_and_nothing_is_said_to_change():
    chosen = plan(recipe_of(training={"bf16": True}), machine(cards=(radeon("gfx1201"),)))
    assert (chosen.strategy.mixed_precision, chosen.changes) == ("bf16", ())


def test_a_card_that_is_not_used_does_not_decide_the_precision():
    cards = (gpu(0), gpu(1, architecture="7.5"))
    recipe = recipe_of(training={"bf16": True}, launch={"num_processes": 1})
    assert plan(recipe, machine(cards=cards)).strategy.mixed_precision == "bf16"
    assert (
        plan(recipe_of(training={"bf16": True}), machine(cards=cards)).strategy.mixed_precision
        == "fp16"
    )


@pytest.mark.parametrize("card", [gpu(architecture="7.5"), radeon("gfx1201")])
def test_tf32_on_a_card_without_it_is_refused(card):
    with pytest.raises(ConfigError, match=r"training.tf32: true, but .* has no TF32"):
        plan(recipe_of(training={"tf32": True}), machine(cards=(card,)))


def test_tf32_on_ampere_is_taken():
    assert plan(recipe_of(training={"tf32": True}), machine(1)).strategy.device == "cuda"


def command(card: Gpu, environ: dict[str, str]) -> Command:
    on = machine(cards=(card,))
    run = RunDir(Path("/workspace/runs/wish/1"))
    return run_files.command(
        plan(on=on), on, run, run.attempt(1), Workspace(Path("/workspace")), environ
    )


def notes(*gfx: str) -> list[str]:
    cards = tuple(radeon(name, index) for index, name in enumerate(gfx))
    return [line for line in plan(on=machine(cards=cards)).why if line.startswith("attention")]


def test_experimental_attention_is_allowed_by_the_command_and_the_plan_says_so():
    assert command(radeon("gfx1200"), {}).env[architectures.ALLOW_EXPERIMENTAL] == "1"
    (line,) = notes("gfx1200")
    assert f"{architectures.ALLOW_EXPERIMENTAL}=1 allows" in line


def test_the_variable_of_the_user_is_obeyed():
    given = {architectures.ALLOW_EXPERIMENTAL: "0"}
    assert command(radeon("gfx1200"), given).env[architectures.ALLOW_EXPERIMENTAL] == "0"


@pytest.mark.parametrize(
    "card", [radeon("gfx1201"), radeon("gfx1100"), radeon("gfx1030"), radeon(""), gpu()]
)
def test_a_card_whose_kernels_are_not_experimental_gets_no_variable(card):
    assert architectures.ALLOW_EXPERIMENTAL not in command(card, {}).env


def test_attention_without_a_fused_kernel_is_said_once_per_kind_of_card():
    (line,) = notes("gfx1030", "gfx1030")
    assert "no fused kernel for gfx1030" in line
    assert notes("gfx1201") == notes("") == []
    assert len(notes("gfx1030", "gfx1200")) == 2


HOPPER = gpu(architecture="9.0")


def test_cudnn_comes_last_where_batches_have_many_shapes_and_the_plan_says_so():
    assert command(HOPPER, {}).env[CUDNN_LAST] == "1"
    assert command(HOPPER, {CUDNN_LAST: "0"}).env[CUDNN_LAST] == "0"
    (line,) = [line for line in plan(on=machine(cards=(HOPPER,))).why if "cuDNN" in line]
    assert f"{CUDNN_LAST}=0 puts them first" in line
    assert CUDNN_LAST not in architectures.environment([HOPPER], few_shapes=True)
    assert CUDNN_LAST not in command(gpu(), {}).env


@pytest.mark.parametrize(
    ("few_shapes", "variable", "is_last"),
    [
        (False, None, True),
        (True, None, False),
        (False, "0", False),
        (True, "1", True),
        (False, "", False),  # as PyTorch reads it
    ],
)
def test_the_users_variable_decides_whether_cudnn_comes_last(few_shapes, variable, is_last):
    environ = {} if variable is None else {CUDNN_LAST: variable}
    assert cudnn_is_last(few_shapes, environ) == is_last


def test_cudnn_comes_first_for_rows_of_about_one_length_which_sdpa_takes():
    """Beside PyTorch's flash kernels, an H200 takes half the time for them with cuDNN's."""

    def planned(**given: Any) -> tuple[str, bool, list[str]]:
        known = {"no_varlen_attn": None, "no_flash_attn": "not there", **given}
        chosen = plan(recipe_of(training={"bf16": True}), machine(cards=(HOPPER,)), **known)
        says = [row.why for row in chosen.switches if row.name == "attention"]
        return chosen.strategy.levers.attn_implementation, chosen.few_shapes, says

    counts = {"rows": 8, "shortest_input": 40, "lengths": [[60, 60]], "tokens": 480}
    counts |= {"target_tokens": 480, "longest_input": 60, "dropped": 0, "bad": 0}
    counts |= {"most_targets": [60]}
    assert planned()[:2] == ("varlen_attn", False)
    assert planned(counts=counts, lengths=(60, 60))[:2] == ("varlen_attn", True)
    spread = {**counts, "shortest_input": 4, "longest_input": 90}
    assert planned(counts=spread, lengths=(90, 90))[:2] == ("varlen_attn", False)
    name, is_first, (why,) = planned(is_ragged=False)
    assert (name, is_first) == ("sdpa", True)
    assert why == "cuDNN's kernels: the rows have one length, and need neither mask nor padding"


def test_nothing_of_it_is_done_or_said_on_the_cpu():
    on = machine(cards=(radeon("gfx1200"),))
    chosen = plan(recipe_of(launch={"mode": "cpu"}), on)
    run = RunDir(Path("/workspace/runs/wish/1"))
    made = run_files.command(
        chosen, on, run, run.attempt(1), Workspace(Path("/workspace")), os.environ
    )
    assert not any("attention" in line for line in chosen.why)
    assert architectures.ALLOW_EXPERIMENTAL not in made.env
