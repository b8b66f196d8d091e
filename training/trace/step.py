"""Trace a training step without weights or a device.

The step is the one that train_low_mem.py runs: the same model code, LowMemTrainer and
TrainingArguments, on fake tensors shaped as the collator shapes rows of the longest length; then an
evaluation. What comes out is every allocation as a function of the micro-batch. A deep model is
traced with four layers a stack and extended (depth.py).
"""

from __future__ import annotations

import gc
import os
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from transformers import TrainerCallback
from transformers.trainer_callback import PrinterCallback

from launch.schema.plan import Plan, Strategy
from launch.schema.recipe import Recipe
from training.compat import torch_private, transformers_private
from training.compat.torch_private import FakeTensorMode, unset_fake_temporarily
from training.data.batches import SampleOrder
from training.loop import arguments
from training.loop.callbacks import StepMeter
from training.loop.trainer import LowMemTrainer
from training.model import build, four_bit
from training.trace import repeat_layers, rewrite_log, sharded
from training.trace.cuda_semantics import Target, cuda_semantics
from training.trace.cuda_workspace import cublas_workspace_bytes, workspace
from training.trace.recorder import BATCH, Block, Event, Layer, Log, Recorder

DEPTH_KEYS = {  # of a config, one per stack
    "t5": ("num_layers", "num_decoder_layers"),
    "gpt2": ("n_layer",),
    **dict.fromkeys(("llama", "mistral", "qwen2", "qwen3"), ("num_hidden_layers",)),
}


class _Done(Exception):
    """The traced step is over."""


class _Tracer(LowMemTrainer):
    """The trainer, telling a Recorder where in the step it is."""

    widths: dict[str, int]  # of a batch's tensors
    flattens = False  # a batch's rows are one

    def __init__(self, recorder: Recorder, **kwargs: Any) -> None:
        self.recorder = recorder
        self._micro = 0
        super().__init__(**kwargs)

    def get_train_dataloader(self) -> Any:
        return _Batches(self, self.args.gradient_accumulation_steps)

    def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        self.recorder.mark(f"forward:{self._micro}")
        return super().training_step(*args, **kwargs)

    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        loss = super().compute_loss(*args, **kwargs)
        self.recorder.mark(f"backward:{self._micro}")
        self._micro += 1
        return loss

    def clip_gradients(self, library: Callable[[], Any]) -> Any:
        self.recorder.mark("optimizer")
        return library()

    def gradient_norm(self, library: Callable[[], Any]) -> Any:
        self.recorder.mark("optimizer")
        return super().gradient_norm(library)


class _Batches:
    """A loader of fake batches, shaped as the collator shapes rows of the longest length."""

    dataset = (0,)

    def __init__(self, tracer: _Tracer, count: int) -> None:
        self._tracer, self._count = tracer, count

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[dict[str, Any]]:
        recorder = self._tracer.recorder
        for _ in range(self._count):
            if not recorder.phase.startswith("evaluation"):
                recorder.mark("input")
            batch = recorder.log.batch
            yield (
                self._flattened(batch)
                if self._tracer.flattens
                else {
                    name: torch.zeros(batch, width, dtype=torch.int64)
                    for name, width in self._tracer.widths.items()
                }
            )

    def _flattened(self, batch: int) -> dict[str, Any]:
        widths = self._tracer.widths
        starts, longest = torch.zeros(batch + 1, dtype=torch.int32), widths["input_ids"]
        return {
            **{
                name: torch.zeros(1, batch * width, dtype=torch.int64)
                for name, width in widths.items()
            },
            **{
                "cu_seq_lens_q": starts,
                "cu_seq_lens_k": starts,
                "max_length_q": longest,
                "max_length_k": longest,
            },
        }


class _Steady(TrainerCallback):
    """Gives the optimizer its states before the step that counts; evaluates and ends training after
    it."""

    tracer: _Tracer

    def __init__(self, recorder: Recorder, layer_of: dict[int, Layer]) -> None:
        self._recorder, self._layer_of = recorder, layer_of  # by id of a parameter

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        network, optimizer = kwargs["model"], kwargs["optimizer"]
        with self._recorder.suspended():
            for parameter in network.parameters():
                if parameter.requires_grad:
                    parameter.grad = torch.empty_like(parameter)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        inner = getattr(optimizer, "optimizer", optimizer)
        self._recorder.mark("start:optimizer")
        self._recorder.hold(
            (
                ("optimizer", value, self._layer_of.get(id(parameter)))
                for parameter, states in inner.state.items()
                for value in states.values()
                if isinstance(value, torch.Tensor)
            ),
            "state",
        )

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._recorder.mark("zero")

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._recorder.mark("evaluation")
        self._recorder.log.batch = BATCH  # any batch, also where one sample was traced for itself
        self.tracer.evaluation_loop(_Batches(self.tracer, 1), "")
        raise _Done


def stacks(network: torch.nn.Module) -> list[torch.nn.ModuleList]:
    """The lists of layers of a model, encoder first."""
    lists = [
        module
        for module in network.modules()
        if isinstance(module, torch.nn.ModuleList) and len(module) > 1
    ]
    return [one for one in lists if len({type(layer) for layer in one}) == 1]


def materialised(network: torch.nn.Module) -> None:
    """Replace what stands on the meta device by fake tensors on the CPU; ties are kept."""
    known: dict[int, torch.Tensor] = {}
    for module in network.modules():
        for held in torch_private.tensors_by_name(module):
            for name, tensor in held.items():
                if tensor is None:
                    continue
                if id(tensor) not in known:
                    empty = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)
                    if isinstance(tensor, torch.nn.Parameter):
                        empty = torch.nn.Parameter(empty, requires_grad=tensor.requires_grad)
                    four_bit.copy_state(tensor, empty)
                    known[id(tensor)] = empty
                    known[id(empty)] = empty
                held[name] = known[id(tensor)]


def step(
    recipe: Recipe,
    plan: Plan,
    lengths: Sequence[int],
    padded: bool = True,
    batch: int = BATCH,
    target: Target | None = None,
) -> Log:
    """The log of one optimizer step in the steady state, at micro-batch `batch` and these lengths
    (source, target).

    `padded`: some row is shorter than the longest, so that masks are needed. `target`: the card
    that runs it; None: the CPU."""
    planned = plan.strategy
    strategy = replace(
        planned,
        mode="cpu",
        device="cpu",
        backend=None,
        num_processes=1,
        num_machines=1,
        per_device_train_batch_size=batch,
        gradient_accumulation_steps=min(planned.gradient_accumulation_steps, 2),
        # as large
        mixed_precision="bf16" if planned.mixed_precision == "fp16" else planned.mixed_precision,
        dataloader_num_workers=0,
        tf32=False,
        use_liger_kernel=False,  # needs a card: traced as transformers' own modules
    )
    recorder = Recorder(batch)
    recorder.padded, recorder.widest = padded, plan.shape.config["vocab_size"]
    fp16 = planned.mixed_precision == "fp16"
    with cuda_semantics(target, fp16) if target else transformers_private.fake_masks_as_real():
        if recipe.quantization is not None:
            recorder.decompositions = four_bit.decompositions(on_cuda=target is not None)
        if target:
            recorder.kernel_workspace = partial(workspace, target)
        with FakeTensorMode():
            tracer = _tracer(recorder, recipe, plan, strategy, lengths)
            gc.collect()
            gc.disable()
            try:
                with recorder:
                    tracer.train()
            except _Done:
                pass
            finally:
                gc.enable()
    log = recorder.settle()
    if target:  # made with the first product, for good
        log.blocks.append(
            Block(
                cublas_workspace_bytes(target.architecture), 0, "workspace", "cublas", "start", None
            )
        )
        log.events.insert(0, Event(len(log.blocks) - 1, True, "start", None))
    return log


def _tracer(
    recorder: Recorder, recipe: Recipe, plan: Plan, strategy: Strategy, lengths: Sequence[int]
) -> _Tracer:
    """A trainer of a model without weights, which the recorder knows by its parameters and
    layers."""
    config = plan.shape.config
    with unset_fake_temporarily():
        quantization = recipe.quantized(plan.strategy.mixed_precision)
        of_model = recipe.model, plan.shape, recipe.lora, plan.lora_targets, quantization
        network = build.without_weights(*of_model, strategy.attn_implementation)
        computed = sharded.as_computed(network, plan.strategy).mixed_precision
    if computed == "no":
        strategy = replace(strategy, mixed_precision="no")
    batch, steps = strategy.per_device_train_batch_size, strategy.gradient_accumulation_steps
    args = arguments.of(
        recipe, replace(plan, strategy=strategy), batch * steps, False, {"ddp_backend": None}
    )
    args.report_to, args.save_strategy, args.output_dir = [], "no", os.curdir  # nothing is written
    materialised(network)
    # it is where it belongs; a Module cannot move fake tensors
    network.to = lambda *args, **kwargs: network
    watched = stacks(network)
    recorder.watch(watched)
    layer_of = {
        id(parameter): (stack, index)
        for stack, layers in enumerate(watched)
        for index, layer in enumerate(layers)
        for parameter in layer.parameters()
    }
    recorder.mark("start:weights")
    for one in network.parameters():
        op = "parameter" if one.requires_grad else rewrite_log.FROZEN
        held = (one, *four_bit.scales(one))
        recorder.hold([("weights", tensor, layer_of.get(id(one))) for tensor in held], op)
    recorder.hold((("buffers", one, None) for one in network.buffers()), "buffer")
    steady = _Steady(recorder, layer_of)
    tracer = _Tracer(
        recorder,
        order=SampleOrder(batch, batch, 1, 1, 0, 0),
        meter=StepMeter(),
        keep_checkpoints=2,
        output_chunks=strategy.num_output_chunks,
        facts={},
        model=network,
        args=args,
        data_collator=None,
        train_dataset=[0],
        callbacks=[steady],
    )
    tracer.remove_callback(PrinterCallback)
    steady.tracer = tracer
    source, target = lengths
    tracer.flattens = strategy.attn_implementation == "flash_attention_2"
    # parts of all rows together are told by the batch where each row has as many of them
    if tracer.flattens:
        source = target = -(-source // strategy.num_output_chunks) * strategy.num_output_chunks
    mask = "position_ids" if recipe.data.packing or tracer.flattens else "attention_mask"
    tracer.widths = {"input_ids": source, mask: source, "labels": target}
    if config["model_type"] == "t5":
        tracer.widths["decoder_input_ids"] = target
    return tracer


def whole_step(
    recipe: Recipe,
    plan: Plan,
    lengths: Sequence[int],
    padded: bool,
    batch: int,
    target: Target | None = None,
) -> Log:
    """As step(), in the time of a model of few layers where its layers are alike."""
    shape = plan.shape
    keys = DEPTH_KEYS.get(shape.config["model_type"], ())
    config = dict(shape.config)
    if "num_decoder_layers" in keys and config.get("num_decoder_layers") is None:
        config["num_decoder_layers"] = config.get("num_layers", 6)
    named = [*recipe.model.freeze, *plan.lora_targets]
    if (
        not keys
        or not all(config.get(key, 0) > repeat_layers.TRACED for key in keys)
        or re.search(r"[.]\d", " ".join(named))
    ):
        return step(recipe, plan, lengths, padded, batch, target)
    shallow = {**config, **dict.fromkeys(keys, repeat_layers.TRACED)}
    if isinstance(config.get("layer_types"), list):
        shallow["layer_types"] = config["layer_types"][: repeat_layers.TRACED]
    log = step(
        recipe, replace(plan, shape=replace(shape, config=shallow)), lengths, padded, batch, target
    )
    try:
        for stack, key in enumerate(keys):
            log = repeat_layers.deepen(log, stack, config[key])
    except repeat_layers.NotUniform:
        return step(recipe, plan, lengths, padded, batch, target)
    return log
