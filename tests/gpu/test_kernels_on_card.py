"""On a card: TF32 rounds where it is on and only there; flash_attn, Liger, fused norms and fused
adapters give the losses of PyTorch's kernels."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from launch.probe import architectures, machine
from tests import builders
from training.loop import arguments

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU that torch can use")
# Skips name what is missing: another card, or a package that the project does not depend on.
TF32_BITS = 10  # of mantissa


@pytest.mark.parametrize("asked", [True, False])
def test_tf32_rounds_products_where_the_plan_says_on_and_only_there(asked):
    cards = machine.machine().gpus[:1]
    if not architectures.look_up(cards[0]).tf32:
        pytest.skip(f"{cards[0].name} has no TF32")
    recipe = builders.recipe_of(training={"tf32": asked})
    chosen = builders.plan(recipe, builders.machine(cards=cards))
    assert chosen.strategy.tf32 == asked
    arguments.make_arguments(recipe, chosen, 9, False, {})
    number = 1 + 2.0 ** -(TF32_BITS + 2)  # float32 keeps it, TF32 does not
    product = torch.full((512, 512), number, device="cuda") @ torch.eye(512, device="cuda")
    assert (product == number).all().item() != asked


def losses(folder: Path, **sections: Any) -> tuple[list[float], str]:
    """Of a run on one card, and what its plan said."""
    training = {"max_steps": 8, "bf16": True, **sections.pop("training", {})}
    recipe = builders.recipe(folder, training=training, launch={"num_processes": 1}, **sections)
    done = builders.launch(folder / "workspace", "run", str(recipe))
    assert done.returncode == 0, done.stderr + done.stdout
    return [
        event["loss"] for event in builders.events(builders.only_run(folder / "workspace"))
    ], done.stdout


@pytest.mark.skipif(find_spec("flash_attn") is None, reason="needs the package flash_attn")
@pytest.mark.parametrize("packing", [False, True])
def test_flash_attn_gives_the_losses_of_sdpa(tmp_path, packing):
    data = {"packing": packing}
    flash, said = losses(tmp_path / "flash", data=data)
    assert "attention  flash_attention_2: flash_attn is there" in said
    sdpa, _ = losses(tmp_path / "sdpa", data=data, model={"attn_implementation": "sdpa"})
    assert flash == pytest.approx(sdpa, rel=1e-2)


@pytest.mark.skipif(find_spec("liger_kernel") is None, reason="needs the package liger_kernel")
def test_liger_gives_the_losses_of_transformers_modules(tmp_path):
    liger, said = losses(tmp_path / "liger", training={"use_liger_kernel": True})
    assert "liger      on: asked for" in said
    without, _ = losses(tmp_path / "without")
    assert liger == pytest.approx(without, rel=1e-2)


@pytest.mark.parametrize("lora", [None, {"r": 8}])
def test_fused_norms_and_adapters_give_the_losses_of_their_modules(tmp_path, lora):
    model = {"shape": "llama-tiny", "dtype": "bfloat16" if lora else "float32"}
    fused, said = losses(tmp_path / "fused", model=model, lora=lora)
    assert "norms      RMS norms by PyTorch's kernel" in said
    assert ("adapters   fused" in said) is bool(lora)
    plain = {"fused_norms": False}
    adapters = {**lora, "fused_adapters": False} if lora else None
    without, _ = losses(tmp_path / "without", model=model, lora=adapters, training=plain)
    assert fused == pytest.approx(without, rel=1e-2)
