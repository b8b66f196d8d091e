"""A traced step against a real one: the same trainer, the same model, every byte of torch's
allocator counted."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch.utils import flop_counter

from benchmarks import composed
from launch.data.worker import WORKER
from launch.plan import facts as plan_facts
from launch.plan import planner
from launch.predict.models import model_config
from launch.predict.step import reduced
from launch.predict.step.compose import Composer
from launch.predict.step.recorded import MIDDLE, NotComposed, Recorded
from launch.predict.traces import Traces
from launch.schema.plan import DataFormat, ModelSize, Plan
from launch.schema.recipe import Recipe
from launch.schema.recorded_step import BATCH, TRAINED, Log, Operator, Question, RecordedStep
from tests import builders, real_steps
from tests.builders import CODE, machine
from training.data.batches import TARGET_IDS
from training.trace import layer_stacks, recorder
from training.trace import step as trace_step
from training.trace.cuda_semantics import Target

LENGTH = 48
DATA = DataFormat(
    "prompt_response", {"prompt": "prompt", "response": "response"}, "parquet", "given"
)


def recipe_of(shape: str, **sections: Any) -> tuple[Recipe, Plan]:
    content = {
        "name": "traced",
        "task": "sft",
        "model": {"shape": shape, **sections.pop("model", {})},
        "data": {
            "train_file": "/data/train.parquet",
            "max_length": LENGTH,
            **sections.pop("data", {}),
        },
        "training": {"per_device_train_batch_size": 3, **sections.pop("training", {})},
        "launch": {"mode": "cpu"},
        "output_dir": "/out",
        **sections,
    }
    recipe = Recipe.model_validate(content)
    config, parameters, family = model_config.read(
        recipe.model, 512, root=CODE, cache=builders.CACHE
    )
    return recipe, planner.choose(
        plan_facts.build(recipe, machine(gpus=0), config, parameters, family, DATA)
    ).plan


def peak_bytes(log: Log, samples: int, section: str = "", targets: int = 0) -> int:
    """`targets`: of a part of the logits."""
    live = highest = 0
    for event in log.events:
        block = log.blocks[event.block]
        size = block.fixed_bytes + samples * block.sample_bytes + targets * block.target_bytes
        live += size if event.birth else -size
        if event.phase.startswith(section):
            highest = max(highest, live)
    return highest


def real_peak_bytes(recipe: Recipe, plan: Plan, padded: bool, length: int = LENGTH) -> int:
    """Of a model with random weights on a random batch, from the second step on."""
    trainer = real_steps.trainer(recipe, plan, length, padded, steps=2)
    return real_steps.peak_bytes(trainer, since_step=1)


def every_n_layers(n: int, **training: Any) -> dict[str, Any]:
    kwargs = {"every_n_layers": n}
    more = {"activation_checkpointing": True, "activation_checkpointing_kwargs": kwargs}
    return {"training": {**more, **training}}


def in_parts(num_shards: int, **training: Any) -> dict[str, Any]:
    return {"training": {"tiled_mlp_num_shards": num_shards, **training}}


PACKED = {"packing": True}
EVERYWHERE = {"training": {"logits_at_targets": False}}
FOUR_BIT = {"lora": {"r": 4}, "quantization": {"load_in_4bit": True}}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": ("gpt2-tiny", {}),
    "llama bf16 weights, checkpointing, two micro-steps": (
        "llama-tiny",
        {
            "model": {"dtype": "bfloat16"},
            "training": {"activation_checkpointing": True, "gradient_accumulation_steps": 2},
        },
    ),
    "llama LoRA under autocast, 1 layer in 2 checkpointed": (
        "llama-tiny",
        {"lora": {"r": 4}, **every_n_layers(2, bf16=True)},
    ),
    "t5, 1 layer in 3 checkpointed, two micro-steps": (
        "t5-tiny",
        every_n_layers(3, gradient_accumulation_steps=2),
    ),
    "llama, adafactor, eager": (
        "llama-tiny",
        {"model": {"attn_implementation": "eager"}, "training": {"optim": "adafactor"}},
    ),
    "llama LoRA under autocast": ("llama-tiny", {"lora": {"r": 4}, "training": {"bf16": True}}),
    "llama, one sample, loop AdamW": (
        "llama-tiny",
        {"training": {"per_device_train_batch_size": 1, "optim": "adamw_torch"}},
    ),
    "t5, encoder frozen, three micro-steps": (
        "t5-tiny",
        {
            "model": {"freeze": ["shared", "encoder"]},
            "training": {"gradient_accumulation_steps": 3},
        },
    ),
    "t5 LoRA": ("t5-tiny", {"lora": {"r": 4}}),
    "llama LoRA, adapters in bf16": (
        "llama-tiny",
        {"model": {"dtype": "bfloat16"}, "lora": {"r": 4, "autocast_adapter_dtype": False}},
    ),
    "t5 LoRA, adapters in bf16, under autocast": (
        "t5-tiny",
        {
            "model": {"dtype": "bfloat16"},
            "lora": {"r": 4, "autocast_adapter_dtype": False},
            "training": {"bf16": True},
        },
    ),
    "llama LoRA of bf16 weights, copies of norms and head": (
        "llama-tiny",
        {
            "model": {"dtype": "bfloat16"},
            "lora": {"r": 4, "modules_to_save": ["norm", "lm_head"]},
            "training": {"bf16": True},
        },
    ),
    "gpt2 DoRA, copies of tied embeddings, loss in 5 chunks, checkpointing": (
        "gpt2-tiny",
        {
            "lora": {"r": 4, "use_dora": True, "modules_to_save": ["wte"]},
            "training": {"num_output_chunks": 5, "activation_checkpointing": True},
        },
    ),
    "t5 LoRA, copies of the head and of layers": (
        "t5-tiny",
        {"lora": {"r": 4, "modules_to_save": ["lm_head", "DenseReluDense"]}},
    ),
    "llama in 4 bits, a copy of the head": (
        "llama-tiny",
        {**FOUR_BIT, "lora": {"r": 4, "modules_to_save": ["lm_head"]}},
    ),
    "llama, nothing padded": ("llama-tiny", {}),
    "llama, nothing padded, logits everywhere": ("llama-tiny", EVERYWHERE),
    "gpt2, logits everywhere": ("gpt2-tiny", EVERYWHERE),
    "t5 under autocast, logits everywhere": (
        "t5-tiny",
        {"training": {**EVERYWHERE["training"], "bf16": True}},
    ),
    "gpt2, logits everywhere, loss in 5 chunks": (
        "gpt2-tiny",
        {"training": {**EVERYWHERE["training"], "num_output_chunks": 5}},
    ),
    "llama, smoothed labels": ("llama-tiny", {"training": {"label_smoothing_factor": 0.1}}),
    "gpt2 under autocast, smoothed labels, logits everywhere": (
        "gpt2-tiny",
        {"training": {**EVERYWHERE["training"], "label_smoothing_factor": 0.1, "bf16": True}},
    ),
    "t5, smoothed labels, loss in 7 chunks": (
        "t5-tiny",
        {"training": {"label_smoothing_factor": 0.1, "num_output_chunks": 7}},
    ),
    "llama, loss in 8 chunks": ("llama-tiny", {"training": {"num_output_chunks": 8}}),
    "gpt2 LoRA under autocast, checkpointing, two micro-steps, loss in 5 chunks": (
        "gpt2-tiny",
        {
            "lora": {"r": 4},
            "training": {
                "bf16": True,
                "activation_checkpointing": True,
                "gradient_accumulation_steps": 2,
                "num_output_chunks": 5,
            },
        },
    ),
    "t5, loss in 7 chunks": ("t5-tiny", {"training": {"num_output_chunks": 7}}),
    "llama, MLPs in 4 parts": ("llama-tiny", in_parts(4)),
    "llama, MLPs in 4 parts, checkpointing, two micro-steps": (
        "llama-tiny",
        in_parts(4, activation_checkpointing=True, gradient_accumulation_steps=2),
    ),
    "llama LoRA under autocast, MLPs in 4 parts, checkpointing, one sample": (
        "llama-tiny",
        {
            "lora": {"r": 4},
            **in_parts(4, bf16=True, activation_checkpointing=True, per_device_train_batch_size=1),
        },
    ),
    "gpt2 under autocast, MLPs in 3 parts, 1 layer in 2 checkpointed": (
        "gpt2-tiny",
        every_n_layers(2, bf16=True, tiled_mlp_num_shards=3),
    ),
    "t5, MLPs in 2 parts, checkpointing": (
        "t5-tiny",
        in_parts(2, activation_checkpointing=True),
    ),
    "t5 LoRA, MLPs in 2 parts, copies of the head and of layers": (
        "t5-tiny",
        {"lora": {"r": 4, "modules_to_save": ["lm_head", "DenseReluDense"]}, **in_parts(2)},
    ),
    "llama in 4 bits, MLPs in 4 parts": ("llama-tiny", {**FOUR_BIT, **in_parts(4)}),
    "llama, packed, two micro-steps": (
        "llama-tiny",
        {"data": PACKED, "training": {"gradient_accumulation_steps": 2}},
    ),
    "llama, packed, one sample, checkpointing": (
        "llama-tiny",
        {
            "data": PACKED,
            "training": {"per_device_train_batch_size": 1, "activation_checkpointing": True},
        },
    ),
    "gpt2, packed, eager": (
        "gpt2-tiny",
        {"data": PACKED, "model": {"attn_implementation": "eager"}},
    ),
    "llama in 4 bits": ("llama-tiny", FOUR_BIT),
    "llama in 4 bits under autocast, checkpointing, two micro-steps": (
        "llama-tiny",
        {
            **FOUR_BIT,
            "model": {"dtype": "bfloat16"},
            "training": {
                "bf16": True,
                "activation_checkpointing": True,
                "gradient_accumulation_steps": 2,
            },
        },
    ),
    "llama in 4 bits of float32 weights under autocast": (
        "llama-tiny",
        {**FOUR_BIT, "training": {"bf16": True}},
    ),
    "llama in 4 bits, computed in float32 under autocast, scales of 32 bits": (
        "llama-tiny",
        {
            "lora": {"r": 4},
            "quantization": {
                "load_in_4bit": True,
                "bnb_4bit_use_double_quant": False,
                "bnb_4bit_compute_dtype": "float32",
                "bnb_4bit_quant_type": "fp4",
            },
            "training": {"bf16": True},
        },
    ),
    "gpt2 in 4 bits": ("gpt2-tiny", FOUR_BIT),
    "t5 in 4 bits": ("t5-tiny", FOUR_BIT),
}


@pytest.mark.parametrize("name", CASES)
def test_a_traced_step_holds_what_the_real_one_holds(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shape, sections = CASES[name]
    recipe, plan = recipe_of(shape, **sections)
    padded = recipe.data.packing or ("one sample" not in name and "nothing padded" not in name)
    samples = plan.strategy.per_device_train_batch_size
    log = whole_step(recipe, plan, (LENGTH, LENGTH), padded, 1 if samples == 1 else BATCH)
    named = real_steps.batch(recipe, plan, LENGTH, padded).get(TARGET_IDS, ())
    targets = math.ceil(len(named) / plan.strategy.levers.num_output_chunks)
    traced = max(
        peak_bytes(log, samples, section, targets)
        for section in ("forward", "backward", "optimizer")
    )
    # a checkpoint keeps the state of the CPU's random numbers, 5,056 bytes: much of a tiny model,
    # none of a card; the real batch is there before it is counted. An MLP in parts keeps it too
    checkpoints = recipe.training.activation_checkpointing
    rel = 0.01 if checkpoints and recipe.quantization else 0.003
    if checkpoints and plan.strategy.levers.tiled_mlp_num_shards > 1:
        rel = 0.02
    assert traced == pytest.approx(real_peak_bytes(recipe, plan, padded), rel=rel)


@pytest.mark.parametrize(
    ("shape", "key", "sections"),
    [
        (
            "gpt2-small",
            "n_layer",
            {"training": {"optim": "adamw_torch", "gradient_accumulation_steps": 2}},
        ),
        (
            "qwen2-0.5b",
            "num_hidden_layers",
            {"training": {"activation_checkpointing": True, "bf16": True}},
        ),
        ("llama-7b", "num_hidden_layers", {"lora": {"r": 8}, "model": {"dtype": "bfloat16"}}),
        (
            "llama-7b",
            "num_hidden_layers",
            {"lora": {"r": 8, "modules_to_save": ["norm", "lm_head"]}},
        ),
        ("t5-chatlm-0.2b", "num_layers", {}),
        ("qwen2-0.5b", "num_hidden_layers", {"training": {"num_output_chunks": 8}}),
        (
            "llama-7b",
            "num_hidden_layers",
            {**FOUR_BIT, "training": {"bf16": True, "activation_checkpointing": True}},
        ),
        ("qwen2-0.5b", "num_hidden_layers", in_parts(4, bf16=True, activation_checkpointing=True)),
        ("llama-7b", "num_hidden_layers", {"lora": {"r": 8}, **in_parts(4, bf16=True)}),
        ("t5-chatlm-0.2b", "num_layers", in_parts(4, activation_checkpointing=True)),
    ],
)
def test_a_deep_model_is_the_shallow_one_with_more_of_the_middle(
    shape, key, sections, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    extends_to_the_whole_model(*wish_of_depth(shape, key, 7, **sections))


@pytest.mark.parametrize(
    ("shape", "key", "layers", "sections"),
    [
        ("gpt2-small", "n_layer", 11, every_n_layers(2, gradient_accumulation_steps=2)),
        ("qwen2-0.5b", "num_hidden_layers", 12, every_n_layers(2, bf16=True)),
        ("llama-7b", "num_hidden_layers", 14, {"lora": {"r": 8}, **every_n_layers(3, bf16=True)}),
        ("t5-chatlm-0.2b", "num_layers", 11, every_n_layers(2)),
        ("llama-7b", "num_hidden_layers", 11, {**FOUR_BIT, **every_n_layers(2, bf16=True)}),
        ("qwen2-0.5b", "num_hidden_layers", 12, every_n_layers(2, tiled_mlp_num_shards=4)),
    ],
)
def test_a_deep_model_that_checkpoints_some_layers_has_more_units_of_them(
    shape, key, layers, sections, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    recipe, plan = wish_of_depth(shape, key, layers, **sections)
    assert layer_stacks.shallow_layers(layers, plan.strategy.levers.every_n_layers) < layers
    extends_to_the_whole_model(recipe, plan)


def whole_step(
    recipe: Recipe,
    plan: Plan,
    lengths: tuple[int, int],
    padded: bool = True,
    batch: int = BATCH,
    target: Target | None = None,
) -> Log:
    """The step with all layers, of a record of few of them."""
    recorded = trace_step.record(recipe, plan, lengths, padded, batch, target)
    return Composer(Recorded(recorded)).log() if recorded.period else recorded.log


def work_of(log: Log) -> dict[str, list[float]]:
    return composed.work_of(reduced.passes_of_log(log))


def extends_to_the_whole_model(recipe: Recipe, plan: Plan) -> None:
    whole = trace_step.step(recipe, plan, (LENGTH, LENGTH))
    recorded = trace_step.record(recipe, plan, (LENGTH, LENGTH), True, BATCH)
    assert recorded.period
    extended = Composer(Recorded(recorded)).log()
    assert not composed.difference(extended, whole)
    assert work_of(extended) == work_of(whole)


def wish_of_depth(shape: str, key: str, layers: int, **sections: Any) -> tuple[Recipe, Plan]:
    recipe, plan = recipe_of("llama-tiny", **sections)
    section = recipe.model.model_copy(update={"shape": shape})
    config, _, family = model_config.read(section, root=CODE, cache=builders.CACHE)
    config = {**config, **dict.fromkeys(family.depth_keys, layers)}
    targets = plan_facts.select_lora_targets(
        recipe, family, {f"x.{t}.weight": (1, 1) for t in "qkvo"}
    )
    if config["model_type"] == "llama":
        targets = plan.lora_targets
    return recipe, replace(
        plan, shape=ModelSize(shape, config, 0, 0, family=family), lora_targets=targets
    )


@pytest.mark.parametrize(
    ("optim", "moved_bytes"),
    # Of an element in float32: the norm reads 4 bytes, clipping moves 8. Fused AdamW reads weight,
    # gradient and states, and writes all but the gradient (28). AdamW on lists moves them in seven
    # kernels (76): with 1235 GB/s by 28 bytes on an H200, these move as many as others on lists,
    # 3350 GB/s (benchmarks/results/card_rates_h200.md).
    [("adamw_torch_fused", 12 + 28), ("adamw_torch", 12 + 76)],
)
def test_the_update_of_few_layers_extends_to_that_of_all(tmp_path, monkeypatch, optim, moved_bytes):
    monkeypatch.chdir(tmp_path)
    recipe, plan = wish_of_depth("gpt2-small", "n_layer", 9, training={"optim": optim})
    asked = recipe, plan, (LENGTH, LENGTH), True, BATCH, Target("8.6")
    log, recorded = trace_step.step(*asked), trace_step.record(*asked)
    assert recorded.period

    def update(log: Log) -> list[Operator]:
        numbers = (call.operator for call in log.calls if call.phase == "optimizer")
        operators = [log.operators[number] for number in numbers]
        of_norms = "aten::stack", "aten::linalg_vector_norm"  # a number of each tensor
        return [each for each in operators if each.name not in of_norms]

    operators = update(log)
    assert update(Composer(Recorded(recorded)).log()) == operators
    elements = sum(block.fixed_bytes / 4 for block in log.blocks if block.op == TRAINED)
    moved = sum(operator.bytes[0] for operator in operators)
    assert moved / elements == pytest.approx(moved_bytes, rel=0.001)
    launches = [each for each in operators if each.launches and each.form != "list"]
    assert len(launches) < 30  # one for many tensors
    assert [each.kind for each in operators].count("wait") == 1  # the norm is read


def test_layers_that_differ_are_not_repeated(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    recipe, plan = wish_of_depth("gpt2-small", "n_layer", 4)
    log = trace_step.step(recipe, plan, (LENGTH, LENGTH))
    odd = next(
        event.block
        for event in log.events
        if event.birth and event.phase == "forward:0" and event.layer == (0, MIDDLE)
    )
    log.blocks[odd].sample_bytes += 1
    with pytest.raises(NotComposed):
        Composer(Recorded(RecordedStep(log, (9,), 1))).log()


def test_peaks_are_those_of_the_log_at_any_batch(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    recipe, plan = recipe_of("t5-tiny")
    log = trace_step.step(recipe, plan, (LENGTH, 32))
    found = reduced.peaks(log)
    for samples, targets in itertools.product((1, 2, 3, 8, 64, 1000), (1, 7, 32, 100, 3000)):
        counts = 1, samples, targets
        for section in reduced.SECTIONS:
            highest = max(
                sum(np.dot(counts, sizes) for sizes in moment["parts"].values())
                for moment in found
                if moment["section"] == section
            )
            assert highest == peak_bytes(log, samples, section, targets), (section, counts)


def test_a_question_is_answered_once_and_read_again(tmp_path: Path, monkeypatch):
    recipe, plan = recipe_of("llama-tiny")
    said: list[str] = []
    traces = Traces(recipe, plan.shape, plan.lora_targets, tmp_path / "traces", said.append)
    question = Question(plan.strategy, (LENGTH, LENGTH))
    with WORKER:
        traces.fetch([question])
    assert traces.failure is None
    assert len(said) == 1
    answer = traces.get(question)
    assert answer is not None
    log = answer.log()
    events = [event for _, part in answer.run(3, 9) for event in part]
    assert len(events) > 2 * len(log["events"])  # two steps of training, an evaluation and a third
    again = Traces(recipe, plan.shape, plan.lora_targets, tmp_path / "traces", said.append)
    again.fetch([question])
    assert len(said) == 1
    other = replace(plan.strategy, per_device_train_batch_size=7)
    assert again.get(Question(other, (LENGTH, LENGTH))) is not None  # a trace holds for every batch
    assert (
        again.get(Question(replace(other, gradient_accumulation_steps=2), (LENGTH, LENGTH))) is None
    )
    assert again.get(Question(other, (LENGTH, LENGTH + 8))) is None


@pytest.mark.parametrize("is_missing", [True, False])
def test_a_trace_whose_files_are_missing_or_cut_short_is_made_again(tmp_path, is_missing):
    recipe, plan = recipe_of("llama-tiny")
    question = Question(plan.strategy, (LENGTH, LENGTH))

    def traced() -> tuple[Any, list[str]]:
        said: list[str] = []
        traces = Traces(recipe, plan.shape, plan.lora_targets, tmp_path, said.append)
        with WORKER:
            traces.fetch([question])
            answer = traces.get(question)
            assert answer is not None
            return (answer.moments, answer.log()), said

    def damage(pattern: str) -> None:
        (file,) = tmp_path.glob(pattern)
        content = file.read_bytes()
        file.unlink() if is_missing else file.write_bytes(content[:-1])

    whole, said = traced()
    assert "tracing 1 step(s)" in said[0]
    damage("*.json")
    assert traced() == (whole, [])  # composed again, of the same record
    damage("*.step")
    again, said = traced()
    assert again == whole
    assert "tracing 1 step(s)" in said[0]  # for the log of a trace that is stored


@pytest.mark.parametrize(("words", "divisor"), [(514, 2), (513, 1)])
def test_products_in_16_bits_are_counted_by_what_divides_their_rows(words, divisor):
    recipe, plan = recipe_of("llama-tiny", training={"bf16": True})
    shape = replace(plan.shape, config={**plan.shape.config, "vocab_size": words})
    log = trace_step.step(recipe, replace(plan, shape=shape), (LENGTH, LENGTH))
    found = work_of(log)
    of_target = 6.0 * shape.config["hidden_size"] * words  # of the output head alone
    assert found.pop(f"product bfloat16 by {divisor}") == [0, 0, of_target]
    assert [name for name in found if name.startswith("product ")] == ["product bfloat16"]


def test_a_product_with_a_4_bit_weight_is_counted_as_one_with_a_weight_of_16_bits():
    def flops(**sections: Any) -> float:
        training = {"bf16": True, "activation_checkpointing": True}
        recipe, plan = recipe_of("llama-tiny", training=training, **sections)
        log = trace_step.step(recipe, plan, (LENGTH, LENGTH), target=Target("8.6"))
        return sum(sum(of) for name, of in work_of(log).items() if name.startswith("product "))

    in_16_bits = flops(lora={"r": 4}, model={"dtype": "bfloat16"})
    assert flops(**FOUR_BIT) == pytest.approx(in_16_bits, rel=0.001)


def test_a_step_that_cannot_be_traced_is_said_and_judged_by_states(tmp_path):
    recipe, plan = recipe_of("llama-tiny")
    broken = replace(plan.shape, config={**plan.shape.config, "hidden_act": "no such function"})
    traces = Traces(recipe, broken, (), tmp_path / "traces")
    with WORKER:
        traces.fetch([Question(plan.strategy, (LENGTH, LENGTH))])
    assert traces.failure is not None
    assert "no such function" in traces.failure


@pytest.mark.parametrize("packing", [False, True])
def test_flash_attention_is_traced_as_pytorchs_own_flash_kernel_without_masks(packing):
    """The package's kernel keeps what PyTorch's keeps, of the same rows in one; each token has
    positions of its own."""

    def step(documents: int, padded: bool, **packages: str | None) -> tuple[int, dict]:
        training = {"bf16": True, "per_device_train_batch_size": 4}
        recipe = builders.recipe_of(training=training, data={"packing": packing and documents > 0})
        chosen = builders.plan(recipe, machine(1), **packages)
        log = trace_step.step(
            recipe, chosen, (128, 128), padded, target=Target("8.6", documents=documents)
        )
        moments = [
            {name: np.dot((1, 8, 8 * 128), sizes) for name, sizes in one["parts"].items()}
            for one in reduced.peaks(log)
        ]
        return max(sum(parts.values()) for parts in moments), work_of(log)

    flash, flash_work = step(4, True, no_flash_attn=None)
    plain, plain_work = step(0, False)
    # cosine and sine of each token, else of one row's, in float32
    positions = (8 - 1) * 2 * 128 * 16 * 4
    assert flash - plain == pytest.approx(positions, abs=16 << 10)
    attention, products = "attention bfloat16", "product bfloat16"
    assert flash_work[attention] == plain_work[attention]
    assert flash_work[products] == plain_work[products]
    # the state of a random generator that the operator keeps for each of the two layers
    varlen, varlen_work = step(4, True, no_varlen_attn=None)
    assert varlen == pytest.approx(flash, abs=1 << 10)
    assert varlen_work[attention] == flash_work[attention]


def test_grouped_heads_are_counted_where_torchs_formulas_refuse_them(monkeypatch):
    """Those of torch 2.11 do."""
    recipe = builders.recipe_of(training={"bf16": True})
    chosen = builders.plan(recipe, machine(1))
    config = chosen.shape.config
    assert config["num_key_value_heads"] < config["num_attention_heads"]

    def attention_flops() -> list[float]:
        log = trace_step.step(recipe, chosen, (128, 128), False, target=Target("8.6"))
        return work_of(log)["attention bfloat16"]

    def strict(formula: Callable[..., int]) -> Callable[..., int]:
        def counted(*sizes: Sequence[int]) -> int:
            assert len({heads for _, heads, _, _ in sizes}) == 1
            return formula(*sizes)

        return counted

    counted = attention_flops()
    # the formulas of an older torch stand in here, which cannot be installed beside this one:
    # where the recorder calls them, and where torch's own registry does
    for name in ("sdpa_flop_count", "sdpa_backward_flop_count"):
        formula = strict(getattr(flop_counter, name))
        for module in (flop_counter, recorder):
            monkeypatch.setattr(module, name, formula)
    assert attention_flops() == counted
    assert counted[1] > 0


@pytest.mark.parametrize("sections", [{}, {"quantization": {"load_in_4bit": True}}])
def test_cublas_takes_its_workspace_behind_the_result_of_the_first_product(sections):
    """There the weight of a 4-bit layer, dequantised just before, still lives."""
    recipe, plan = recipe_of(
        "llama-tiny",
        lora={"r": 4},
        model={"dtype": "bfloat16"},
        training={"bf16": True},
        **sections,
    )
    log = trace_step.step(recipe, plan, (LENGTH, LENGTH), target=Target("8.0"))
    births = [index for index, event in enumerate(log.events) if event.birth]
    blocks = [log.blocks[log.events[index].block] for index in births]
    number = next(index for index, block in enumerate(blocks) if block.op == "cublas")
    width = plan.shape.config["hidden_size"]
    assert (blocks[number - 1].sample_bytes, blocks[number - 1].born) == (
        LENGTH * width * 2,
        "forward:0",
    )
    if sections:
        weight = log.events[births[number - 2]].block
        assert log.blocks[weight].fixed_bytes == width * width * 2
        end = next(
            index
            for index, event in enumerate(log.events)
            if event.block == weight and not event.birth
        )
        assert end > births[number]
