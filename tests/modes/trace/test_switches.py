"""What a recipe switches on is on: the operators of real steps are counted, and their types looked
at."""

from __future__ import annotations

import shutil
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from launch.probe import packages
from launch.schema.plan import Plan
from launch.schema.recipe import Recipe
from tests import flash_on_cpu, real_steps, varlen_on_cpu
from tests.builders import machine, plan, recipe_of
from training.loop import arguments

LAYERS = 2  # of llama-tiny
GROUPS = 2  # of its parameters: with weight decay and without
STEPS, MICRO_STEPS, SAMPLES, LENGTH = 2, 2, 3, 32
ATTENTION, PRODUCT, FUSED = (
    "aten::_scaled_dot_product_flash_attention_for_cpu",
    "aten::mm",
    "aten::_fused_adamw_",
)
CROSS_ENTROPY = "aten::_log_softmax"


class Seen(TorchDispatchMode):
    """Counts operators and, of each, the types and the most elements that it returned."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()
        self.dtypes: dict[str, set[torch.dtype]] = {}
        self.most: Counter[str] = Counter()
        self.weights: set[torch.dtype] = set()
        self.states: set[torch.dtype] = set()  # of the optimizer, for matrices
        self.loss = 0.0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        name = func._schema.name
        self.calls[name] += 1
        for tensor in tree_iter(out):
            if isinstance(tensor, torch.Tensor):
                self.dtypes.setdefault(name, set()).add(tensor.dtype)
                self.most[name] = max(self.most[name], tensor.numel())
        return out


def asked(shape: str = "llama-tiny", **sections: Any) -> Recipe:
    cut = {"per_device_train_batch_size": SAMPLES, "gradient_accumulation_steps": MICRO_STEPS}
    sections["training"] = {**cut, **sections.get("training", {})}
    return recipe_of(model={"shape": shape, **sections.pop("model", {})}, **sections)


def seen(shape: str = "llama-tiny", **sections: Any) -> Seen:
    recipe = asked(shape, **sections)
    return stepped(recipe, plan(recipe))


def stepped(recipe: Recipe, chosen: Plan) -> Seen:
    trainer = real_steps.trainer(recipe, chosen, LENGTH, True, STEPS)
    with Seen() as found:
        found.loss = trainer.train().training_loss
    found.weights = {one.dtype for one in trainer.model.parameters()}
    of_matrices = (
        trainer.optimizer.state[one] for one in trainer.model.parameters() if one.dim() > 1
    )
    found.states = {
        value.dtype for state in of_matrices for value in state.values() if torch.is_tensor(value)
    }
    return found


@pytest.fixture(scope="module")
def plain() -> Seen:
    return seen()


def test_by_default_weights_are_float32_attention_is_sdpa_and_the_optimizer_is_fused(plain):
    assert plain.dtypes[PRODUCT] == {torch.float32}
    assert plain.calls[ATTENTION] == LAYERS * MICRO_STEPS * STEPS
    assert plain.calls[FUSED] == GROUPS * STEPS


def test_bf16_multiplies_in_bfloat16_and_updates_float32_weights(plain):
    found = seen(training={"bf16": True})
    assert found.dtypes[PRODUCT] == {torch.bfloat16}
    assert found.weights == plain.weights == {torch.float32}


def test_bfloat16_weights_are_multiplied_and_updated_as_such():
    found = seen(model={"dtype": "bfloat16"})
    assert found.weights == {torch.bfloat16}
    assert found.dtypes[PRODUCT] == {torch.bfloat16}


def test_activation_checkpointing_computes_each_layer_twice(plain):
    found = seen(training={"activation_checkpointing": True})
    assert found.calls[ATTENTION] == 2 * plain.calls[ATTENTION]
    assert found.calls[CROSS_ENTROPY] == plain.calls[CROSS_ENTROPY], (
        "more than the layers was computed again"
    )


def test_eager_attention_makes_the_weights_that_sdpa_does_not(plain):
    found = seen(model={"attn_implementation": "eager"})
    assert found.calls[ATTENTION] == 0
    assert found.calls["aten::_softmax"] == LAYERS * MICRO_STEPS * STEPS
    assert plain.calls["aten::_softmax"] == 0


@pytest.mark.parametrize(
    ("optim", "operator"), [("adamw_torch", "aten::addcdiv_"), ("sgd", "aten::add_")]
)
def test_the_optimizer_that_was_asked_for_updates_the_weights(plain, optim, operator):
    found = seen(training={"optim": optim})
    assert found.calls[FUSED] == 0
    assert found.calls[operator] > plain.calls[operator]


def test_logits_in_parts_are_never_whole(plain):
    found = seen(training={"num_output_chunks": 4})
    assert found.most[CROSS_ENTROPY] == pytest.approx(plain.most[CROSS_ENTROPY] / 4, rel=0.05)


def test_an_adapter_alone_is_updated(plain):
    found = seen(lora={"r": 2})
    assert found.calls[FUSED] == STEPS  # no adapter is left out of weight decay
    assert found.calls[PRODUCT] > plain.calls[PRODUCT]


SWITCHED: dict[str, dict[str, Any]] = {
    "as it is": {},
    "bf16, recomputed, loss in parts": {
        "training": {"bf16": True, "activation_checkpointing": True, "num_output_chunks": 4}
    },
    "every second layer recomputed": {
        "training": {
            "activation_checkpointing": True,
            "activation_checkpointing_kwargs": {"every_n_layers": 2},
        }
    },
    "bfloat16 weights, eager": {"model": {"dtype": "bfloat16", "attn_implementation": "eager"}},
    "8-bit states": {"training": {"optim": "adamw_bnb_8bit"}},
    "no fused update, recomputed": {
        "training": {"optim": "adamw_torch", "activation_checkpointing": True}
    },
}


@pytest.mark.parametrize("name", SWITCHED)
def test_each_row_that_the_plan_prints_is_what_the_steps_do(plain, name):
    recipe = asked(**SWITCHED[name])
    chosen = plan(recipe)
    said = {one.name: one.runs for one in chosen.switches}
    found = stepped(recipe, chosen)
    assert {str(kind).removeprefix("torch.") for kind in found.dtypes[PRODUCT]} == {
        {"float32": "float32", "bfloat16": "bfloat16", "bf16 autocast": "bfloat16"}[
            said["precision"]
        ]
    }
    times = {"checkpointing": 2, "checkpointing 1 layer in 2": 1.5, "no checkpointing": 1}[
        said["recompute"]
    ]
    calls = {"sdpa": found.calls[ATTENTION], "eager": found.calls["aten::_softmax"]}
    assert calls == {
        **dict.fromkeys(calls, 0),
        said["attention"]: times * LAYERS * MICRO_STEPS * STEPS,
    }
    assert (found.calls[FUSED] > 0) == (said["optimizer"] == "adamw_torch_fused")
    assert (torch.uint8 in found.states) == ("8bit" in said["optimizer"])
    parts = {"logits at once": 1, "logits in 4 parts": 4}[said["loss"]]
    assert found.most[CROSS_ENTROPY] == pytest.approx(plain.most[CROSS_ENTROPY] / parts, rel=0.05)
    assert said["compile"] == "off"
    assert not any("prims" in call or "inductor" in call for call in found.calls)


KERNELS = {
    "flash_attention_2": (flash_on_cpu.there, {"no_flash_attn": None}),
    "varlen_attn": (varlen_on_cpu.counted, {"no_varlen_attn": None}),
}


@pytest.mark.parametrize(
    ("packing", "training"),
    [(False, {"activation_checkpointing": True, "num_output_chunks": 4}), (True, {})],
)
@pytest.mark.parametrize("kernel", KERNELS)
def test_flash_attention_gets_each_document_alone_and_gives_the_losses_of_sdpa(
    packing, training, kernel
):
    """The kernels in plain PyTorch (flash_on_cpu.py, varlen_on_cpu.py); all that leads to them is
    what runs on a card. There are products in 16 bits; losses of float32 are compared below."""
    recipe = asked(training={**training, "bf16": True}, data={"packing": packing})
    runs: dict[str, Seen] = {}
    on_cpu, packages_there = KERNELS[kernel]
    for constraints in ({"no_flash_attn": "gone"}, packages_there):
        on_card = plan(recipe, machine(1), **constraints)
        (said,) = (one.runs for one in on_card.switches if one.name == "attention")
        here = replace(
            on_card, strategy=replace(on_card.strategy, device="cpu", mode="cpu", backend=None)
        )
        with on_cpu() as calls:
            runs[said] = stepped(recipe, here)
            times = (
                LAYERS * MICRO_STEPS * STEPS * (2 if "activation_checkpointing" in training else 1)
            )
            of_each = [10] * 3 + [2] if packing else [LENGTH]
            first = of_each if packing else [LENGTH // 2]
            assert calls == [first + of_each * (SAMPLES - 1)] * (times if said == kernel else 0)
    flash, sdpa = runs[kernel], runs["sdpa"]
    assert flash.calls[ATTENTION] == 0 < sdpa.calls[ATTENTION]
    assert flash.loss == pytest.approx(sdpa.loss, rel=1e-4)


@pytest.mark.parametrize("packing", [False, True])
@pytest.mark.parametrize("lora", [None, {"r": 2}])
def test_varlen_attn_trains_to_the_weights_of_sdpa_in_float32(packing, lora):
    """Two steps of two micro-steps each, from the same weights."""
    recipe = asked(data={"packing": packing}, lora=lora)
    chosen = plan(recipe)
    trained = {}
    for name in ("sdpa", "varlen_attn"):
        here = replace(chosen, strategy=chosen.strategy.with_levers(attn_implementation=name))
        trainer = real_steps.trainer(recipe, here, LENGTH, True, STEPS)
        with varlen_on_cpu.counted() as calls:
            loss = trainer.train().training_loss
        assert len(calls) == (LAYERS * MICRO_STEPS * STEPS if name == "varlen_attn" else 0)
        weights = {key: value.detach() for key, value in trainer.model.named_parameters()}
        trained[name] = loss, weights
    (loss, weights), (other_loss, other_weights) = trained.values()
    assert other_loss == pytest.approx(loss, rel=1e-5)
    for key, value in weights.items():
        torch.testing.assert_close(other_weights[key], value, rtol=1e-4, atol=1e-5)


def losses(is_fused: bool = True, is_narrow: bool = True) -> list[float]:
    """Of 50 steps with adapters on float32 weights."""
    recipe = asked(
        lora={"r": 4, "fused_adapters": is_fused and is_narrow, "init_lora_weights": False},
        training={"bf16": is_narrow, "logging_steps": 1, "gradient_accumulation_steps": 1},
    )
    chosen = plan(recipe)
    assert chosen.strategy.levers.fused_adapters == (is_fused and is_narrow)
    trainer = real_steps.trainer(recipe, chosen, LENGTH, True, 50)
    trainer.train()
    return [row["loss"] for row in trainer.state.log_history if "loss" in row]


def test_fused_adapters_stay_as_near_to_float32_as_adapters_beside_their_layers():
    exact = losses(is_narrow=False)
    fused, beside = (
        sum(abs(loss - other) for loss, other in zip(losses(value), exact, strict=True))
        for value in (True, False)
    )
    assert len(exact) == 50
    assert exact[-1] < exact[0]
    assert 0 < fused <= 1.2 * beside


def test_fused_adapters_add_nothing_to_the_output_of_their_layer():
    beside, fused = (
        seen(
            model={"dtype": "bfloat16"},
            lora={"r": 4, "fused_adapters": value},
            training={"bf16": True},
        )
        for value in (False, True)
    )
    layers = 7 * LAYERS  # with an adapter
    fewer = beside.calls["aten::add"] - fused.calls["aten::add"]
    assert fewer >= layers * MICRO_STEPS * STEPS
    assert beside.calls["aten::_to_copy"] >= fused.calls["aten::_to_copy"]
    assert fused.states == beside.states == {torch.float32}


# Where there is none the plan says so, and steps run as they are: tests/unit has that.
@pytest.mark.skipif(shutil.which("g++") is None, reason="needs a compiler: apt-get install g++")
def test_torch_compile_runs_training_steps_in_graphs_and_evaluations_without():
    recipe = recipe_of(
        model={"shape": "llama-tiny"},
        training={"per_device_train_batch_size": 2, "torch_compile": True},
    )
    chosen = plan(recipe)
    assert [one.runs for one in chosen.switches if one.name == "compile"] == ["on"]
    # one layer, whose kernels take half as long to compile as those of two
    config = {**chosen.shape.config, "num_hidden_layers": 1}
    chosen = replace(chosen, shape=replace(chosen.shape, config=config))
    trainer = real_steps.trainer(recipe, chosen, LENGTH, False, STEPS)
    torch._dynamo.reset()
    graphs = torch._dynamo.utils.counters["stats"]
    graphs.clear()
    trainer.train()
    compiled = graphs["unique_graphs"]
    assert compiled > 0
    assert trainer.model_wrapped is trainer.model, "its layers are compiled, not all of it"
    batches = real_steps.Loader([real_steps.batch(recipe, chosen, LENGTH + 8, False)])
    assert trainer.evaluation_loop(batches, "evaluation").metrics["eval_loss"] > 0
    assert graphs["unique_graphs"] == compiled


def test_without_a_compiler_the_plan_says_that_steps_run_as_they_are():
    recipe = recipe_of(
        model={"shape": "llama-tiny"}, training={"torch_compile_backend": "inductor"}
    )
    assert arguments.make_arguments(recipe, plan(recipe), 9, False, {}).torch_compile
    reason = packages.no_compiler(False, {"PATH": "/nowhere"})
    assert reason is not None
    without = plan(recipe, no_compiler=reason)
    (change,) = [change for change in without.changes if change.key == "training.torch_compile"]
    assert "there is no compiler (g++)" in change.reason
    assert not arguments.make_arguments(recipe, without, 9, False, {}).torch_compile
