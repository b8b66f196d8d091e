"""One estimator's answer for one case: python -m benchmarks.peer_estimates NAME FOLDER; a child of
memory_peers.py.

FOLDER holds recipe.yaml and model/config.json as cpu_memory.py writes them. Prints {"bytes": the
peak of a step}; an estimator that raises ends this process with its own error. Imports stand in the
functions: a child pays for its own.
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml


def ours(folder: Path) -> int:
    """The step traced, as for a plan; LOWMEM_TRACES says where traces are kept."""
    from launch.base.workspace import Workspace
    from launch.plan.resolve import resolve
    from launch.predict.traces import Traces

    resolved = resolve(str(folder / "recipe.yaml"), [], trace=False)
    facts, strategy = resolved.facts, resolved.plan.strategy
    length, folder = resolved.recipe.data.max_length, Workspace.here().traces
    traces = Traces(resolved.recipe, facts.model.size, facts.model.lora_targets, folder)
    rows = replace(facts.rows, lengths=(length, length))
    facts = replace(facts, rows=rows, traces=traces)
    with facts.asking():
        facts.fetch([strategy])
    trace = facts.trace(strategy)
    if trace is None:
        raise RuntimeError(traces.failure)
    batch = strategy.per_device_train_batch_size
    peaks = trace.peaks(batch, batch)
    return max(peak.allocated_bytes for section, peak in peaks.items() if section != "evaluation")


def accelerate(folder: Path) -> int:
    """`accelerate estimate-memory`, its column "Training using Adam": its own steps, but for asking
    the hub.

    It knows neither LoRA nor batches. bf16: its row of half precision."""
    from accelerate import init_empty_weights
    from accelerate.commands.estimate import estimate_training_usage
    from accelerate.utils import calculate_maximum_sizes
    from transformers import AutoConfig, AutoModel

    recipe = _recipe(folder)
    config = AutoConfig.from_pretrained(folder / "model", local_files_only=True)
    with init_empty_weights():
        network = AutoModel.from_config(config, dtype="float32")
    total, _ = calculate_maximum_sizes(network)
    return int(
        max(
            estimate_training_usage(
                total, "bfloat16" if _element_bytes(recipe) == 2 else "float32"
            ).values()
        )
    )


def zero2(folder: Path) -> int:
    """DeepSpeed's estimate of ZeRO-2's model states on one GPU, nothing offloaded."""
    from deepspeed.runtime.zero.stage_1_and_2 import estimate_zero2_model_states_mem_needs

    parameters = [one.numel() for one in _on_meta(folder).parameters()]
    _, device_bytes = estimate_zero2_model_states_mem_needs(
        sum(parameters), 1, 1, cpu_offload=False
    )
    return device_bytes


def zero3(folder: Path) -> int:
    """DeepSpeed's estimate of ZeRO-3's model states on one GPU, nothing offloaded."""
    from deepspeed.runtime.zero.stage3 import estimate_zero3_model_states_mem_needs

    network = _on_meta(folder)
    largest = max(
        sum(one.numel() for one in module.parameters(recurse=False)) for module in network.modules()
    )
    total = sum(one.numel() for one in network.parameters())
    _, device_bytes, _ = estimate_zero3_model_states_mem_needs(
        total, largest, 1, 1, cpu_offload=False, cpu_offload_params=False
    )
    return device_bytes


def formula(folder: Path) -> int:
    """States, counted exactly, and the activations of a transformer of h wide layers with a heads.

    Source: Korthikanti et al. 2022 (arXiv:2205.05198): sbh (34 + 5 a s / h) bytes a layer in half
    precision, 4 s b v of logits, 2 s b h a layer where all is recomputed, and then one layer at a
    time. Twice the layers' bytes in float32. T5's decoder layers count as the others."""
    from launch.plan.resolve import resolve

    resolved = resolve(str(folder / "recipe.yaml"), [], trace=False)
    shape, strategy = resolved.plan.shape, resolved.plan.strategy
    config, b, s = (
        shape.config,
        strategy.per_device_train_batch_size,
        resolved.recipe.data.max_length,
    )

    def size(*names: str) -> int:
        return next(config[name] for name in names if name in config)

    h, a = (
        size("hidden_size", "n_embd", "d_model"),
        size("num_attention_heads", "n_head", "num_heads"),
    )
    num_layers = size("num_hidden_layers", "n_layer", "num_layers") + config.get(
        "num_decoder_layers", 0
    )
    layer_bytes = s * b * h * 34 + 5 * a * s * s * b
    layers_bytes = num_layers * layer_bytes
    if strategy.levers.every_n_layers:
        layers_bytes = num_layers * 2 * s * b * h + layer_bytes
    scale = _element_bytes(_recipe(folder)) // 2
    return (
        resolved.plan.estimate.model_state_bytes
        + layers_bytes * scale
        + 4 * s * b * config["vocab_size"]
    )


def mem_tracker(folder: Path) -> int:
    """torch's MemTracker over the second of two bare steps on fake tensors: the same model, batch
    and optimizer."""
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.distributed._tools.mem_tracker import MemTracker

    recipe = _recipe(folder)
    training, length = recipe["training"], recipe["data"]["max_length"]
    network = _on_meta(folder, recipe)
    network.config.use_cache = False
    network.train()
    if training.get("activation_checkpointing"):
        network.gradient_checkpointing_enable({"use_reentrant": False})
    with FakeTensorMode():
        _fill_with_fakes(network)
        trained = [one for one in network.parameters() if one.requires_grad]
        optimizer = torch.optim.AdamW(trained, fused=True)
        size = (training["per_device_train_batch_size"], length)
        batch = {
            name: torch.zeros(size, dtype=torch.int64)
            for name in ("input_ids", "attention_mask", "labels")
        }
        tracker = MemTracker()
        tracker.track_external(network, optimizer, *batch.values())
        with tracker:
            for _ in range(2):
                tracker.reset_mod_stats()  # it refuses a second step without
                with torch.autocast("cpu", torch.bfloat16, enabled=training.get("bf16", False)):
                    loss = network(**batch).loss
                loss.backward()
                torch.nn.utils.clip_grad_norm_(trained, 1.0)
                optimizer.step()
                optimizer.zero_grad()
    return tracker.get_tracker_snapshot("peak")[torch.device("cpu")]["Total"]


ESTIMATORS = {one.__name__: one for one in (ours, accelerate, zero2, zero3, formula, mem_tracker)}


def _recipe(folder: Path) -> dict[str, Any]:
    return yaml.safe_load((folder / "recipe.yaml").read_text(encoding="utf-8"))


def _element_bytes(recipe: dict[str, Any]) -> int:
    """Of an activation."""
    is_half = recipe["training"].get("bf16") or recipe["model"].get("dtype") == "bfloat16"
    return 2 if is_half else 4


def _on_meta(folder: Path, recipe: dict[str, Any] | None = None) -> Any:
    """The model without weights; as the recipe has it (its type, LoRA), where one is given."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM

    config = AutoConfig.from_pretrained(folder / "model", local_files_only=True)
    family = AutoModelForSeq2SeqLM if config.is_encoder_decoder else AutoModelForCausalLM
    recipe = recipe or {"model": {}}
    with torch.device("meta"):
        network = family.from_config(config, dtype=recipe["model"].get("dtype", "float32"))
        if "lora" not in recipe:
            return network
        from peft import LoraConfig, get_peft_model

        return get_peft_model(
            network,
            LoraConfig(**recipe["lora"], target_modules="all-linear", task_type="CAUSAL_LM"),
        )


def _fill_with_fakes(network: Any) -> None:
    """Tensors on the CPU in place of those on the meta device, under a FakeTensorMode; ties are
    kept."""
    import torch

    known: dict[int, torch.Tensor] = {}
    for module in network.modules():
        for held in (module._parameters, module._buffers):
            for name, one in held.items():
                if one is None:
                    continue
                if id(one) not in known:
                    fake = torch.empty(one.shape, dtype=one.dtype)
                    is_buffer = held is module._buffers
                    known[id(one)] = (
                        fake if is_buffer else torch.nn.Parameter(fake, one.requires_grad)
                    )
                held[name] = known[id(one)]


if __name__ == "__main__":
    print(json.dumps({"bytes": ESTIMATORS[sys.argv[1]](Path(sys.argv[2]))}))
