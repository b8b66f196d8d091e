"""Trace a training step without weights or a device.

The step is that of train_low_mem.py: the same model code, LowMemTrainer and TrainingArguments, on
fake tensors shaped as the collator shapes rows of the longest length. An evaluation follows. The
result is every allocation as a function of the micro-batch. A deep model of like layers is traced
with four layers a stack and extended (repeat_layers.py).
"""

import gc
import math
import os
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.nn.modules.module import register_module_forward_pre_hook
from transformers import TrainerCallback
from transformers.trainer_callback import PrinterCallback

from launch.schema.plan import PAGED, Plan, Strategy
from launch.schema.recipe import Recipe
from launch.schema.recorded_step import (
    ALL_TARGETS,
    BATCH,
    FROZEN,
    PACKED,
    SCALES,
    SLOT,
    TARGETS,
    TRAINED,
    UNUSED,
    UPDATE,
    Block,
    Event,
    Layer,
    Log,
    RecordedStep,
)
from training.compat import (
    fake_private,
    liger_private,
    torch_private,
    transformers_private,
)
from training.compat.bitsandbytes_private import is_paged
from training.compat.levers_private import replaced
from training.compat.torch_private import FakeTensorMode, unset_fake_temporarily
from training.data.batches import TARGET_TENSORS
from training.data.sample_order import SampleOrder
from training.levers.offloading import SAVE_ON_CPU
from training.loop import arguments
from training.loop.callbacks import StepMeter
from training.loop.trainer import LowMemTrainer
from training.model import build, four_bit
from training.trace import layer_stacks, stand_ins
from training.trace.cuda_semantics import Target, cuda_semantics
from training.trace.cuda_workspace import cublas_workspace_bytes
from training.trace.recorder import Recorder

# aten::linear: of weights that were dequantised inside an operator
_PRODUCTS = {"aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm", "aten::linear"}


@dataclass
class Shapes:
    """Torch's cache of the shapes that operators of fake tensors give."""

    target: Target | None = None  # card whose kernels they are of; None: the CPU
    # the cache stays from a step to the next one, in a process that does nothing else
    is_kept: bool = False

    @contextmanager
    def of(self, target: Target | None) -> Iterator[None]:
        """Let the cache hold none but the shapes of this card inside."""
        if not self.is_kept or target != self.target:
            FakeTensorMode.cache_clear()
        self.target = target
        yield
        if not self.is_kept:
            FakeTensorMode.cache_clear()


SHAPES = Shapes()


class _Done(Exception):
    """The traced step is over."""


class _Tracer(LowMemTrainer):
    """The trainer, which names the phase of the step to a Recorder."""

    widths: dict[str, int]  # input -> tokens of a row
    flattens = False  # the rows of a batch are joined to a single row
    num_targets = 0  # targets in a batch that names them

    def __init__(self, recorder: Recorder, **kwargs: Any) -> None:
        self.recorder = recorder
        self._micro = 0
        super().__init__(**kwargs)

    def host_copies(self) -> stand_ins.RecordedOffloading:
        return stand_ins.RecordedOffloading(self.recorder)

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
            batch, widths = recorder.log.batch, self._tracer.widths
            flattens = self._tracer.flattens
            tensors: dict[str, Any] = {
                name: torch.zeros(
                    *((1, batch * width) if flattens else (batch, width)), dtype=torch.int64
                )
                for name, width in widths.items()
            }
            if flattens:
                starts, max_length = torch.zeros(batch + 1, dtype=torch.int32), widths["input_ids"]
                tensors |= {"cu_seq_lens_q": starts, "cu_seq_lens_k": starts}
                tensors |= {"max_length_q": max_length, "max_length_k": max_length}
            if count := self._tracer.num_targets:
                tensors |= {name: torch.zeros(count, dtype=torch.int64) for name in TARGET_TENSORS}
            yield tensors


class _Steady(TrainerCallback):
    """Makes the optimizer's states before the traced step; evaluates and ends training after it."""

    tracer: _Tracer

    def __init__(self, recorder: Recorder, layer_of: dict[int, Layer], on_cuda: bool) -> None:
        self._recorder, self._layer_of = recorder, layer_of  # id of a parameter -> layer
        self._on_cuda = on_cuda

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
                (
                    PAGED if self._on_cuda and is_paged(inner, parameter, key) else "optimizer",
                    value,
                    self._layer_of.get(id(parameter)),
                )
                for parameter, states in inner.state.items()
                for key, value in states.items()
                if isinstance(value, torch.Tensor)
            ),
            "state",
        )

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._recorder.point(UPDATE)  # the guard has read the norm

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._recorder.mark("zero")

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._recorder.mark("evaluation")
        self._recorder.log.batch = BATCH  # also where the step had a single sample
        self.tracer.evaluation_loop(_Batches(self.tracer, 1), "")
        raise _Done


def _materialised(network: torch.nn.Module) -> None:
    """Replace tensors on the meta device by fake tensors on the CPU; ties are kept."""
    replacements: dict[int, torch.Tensor] = {}  # id of a tensor -> its replacement
    for module in network.modules():
        for tensors in torch_private.tensors_by_name(module):
            for name, tensor in tensors.items():
                if tensor is None:
                    continue
                if id(tensor) not in replacements:
                    empty = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)
                    if isinstance(tensor, torch.nn.Parameter):
                        empty = torch.nn.Parameter(empty, requires_grad=tensor.requires_grad)
                    four_bit.copy_state(tensor, empty)
                    replacements |= {id(tensor): empty, id(empty): empty}
                tensors[name] = replacements[id(tensor)]


def step(
    recipe: Recipe,
    plan: Plan,
    lengths: Sequence[int],
    padded: bool = True,
    batch: int = BATCH,
    target: Target | None = None,
    parts_apart: bool = False,
) -> Log:
    """The log of an optimizer step in the steady state, at micro-batch `batch` and these lengths
    (source, target).

    `padded`: a row is shorter than the longest, so that masks are needed. `target`: the card that
    the step is traced for; None: the CPU. `parts_apart`: for launch.predict.step.compose, the parts
    of the logits are told apart, and the last has fewer targets."""
    planned = plan.strategy
    has_liger = planned.levers.use_liger_kernel and liger_private.is_installed()
    strategy = replace(
        planned,
        mode="cpu",
        device="cpu",
        backend=None,
        num_processes=1,
        num_machines=1,
        per_device_train_batch_size=batch,
        gradient_accumulation_steps=min(planned.gradient_accumulation_steps, 2),
        # fp16 has tensors of the same size; the CPU's autocast refuses it
        mixed_precision="bf16" if planned.mixed_precision == "fp16" else planned.mixed_precision,
        dataloader_num_workers=0,
        tf32=False,
        levers=replace(planned.levers, use_liger_kernel=has_liger, torch_compile=False),
    )
    recorder = Recorder(batch, padded, plan.shape.config["vocab_size"], target)
    fp16 = planned.mixed_precision == "fp16"
    collects = gc.isenabled()
    with (
        SHAPES.of(target),
        cuda_semantics(target, fp16, True)
        if target
        else replaced([transformers_private.REAL_MASKS]),
        replaced(fake_private.short_cache()),
        replaced([(*SAVE_ON_CPU, getattr(*SAVE_ON_CPU))]),  # a lever may change it within
        stand_ins.grouped_products(on_nvidia=target is not None and target.capability is not None),
        stand_ins.liger_kernels(recorder, target) if has_liger else nullcontext(),
    ):
        if recipe.quantization is not None:
            recorder.decompositions = four_bit.decompositions(on_cuda=target is not None)
        with FakeTensorMode():
            tracer = _tracer(recorder, recipe, plan, strategy, lengths)
            if parts_apart and strategy.levers.num_output_chunks > 1:
                recorder.watch_parts(tracer.head)
                tracer.num_targets = tracer.num_targets and ALL_TARGETS
            gc.collect()
            if SHAPES.is_kept:
                gc.freeze()  # later collections do not visit the logs and shapes of earlier steps
            gc.disable()
            try:
                modules = register_module_forward_pre_hook(recorder.module)
                with modules, suppress(_Done), recorder:
                    tracer.train()
            finally:
                if collects:
                    gc.enable()
    log = recorder.settle()
    if target:
        _add_cublas(log, cublas_workspace_bytes(target.architecture))
    return log


def _add_cublas(log: Log, size_bytes: int) -> None:
    """Add the workspaces of cuBLAS: from the first product of forward and that of backward on."""
    for section in ("forward", "backward"):
        first = next(
            index
            for index, event in enumerate(log.events)
            if event.birth
            and event.phase.startswith(section)
            and log.blocks[event.block].op in _PRODUCTS
        )
        phase = log.events[first].phase
        log.events.insert(first + 1, Event(len(log.blocks), True, phase, None))
        log.blocks.append(Block(size_bytes, 0, "workspace", "cublas", "start:workspace", None))


def _tracer(
    recorder: Recorder, recipe: Recipe, plan: Plan, strategy: Strategy, lengths: Sequence[int]
) -> _Tracer:
    """A trainer of a model without weights, whose parameters and layers the recorder watches."""
    with unset_fake_temporarily():
        network = build.without_weights(
            *(recipe.model, plan.shape, recipe.lora, plan.lora_targets),
            recipe.quantized(plan.strategy.mixed_precision),
            strategy.levers.attn_implementation,
        )
        if stand_ins.as_computed(network, plan.strategy) == "no":
            strategy = replace(strategy, mixed_precision="no")
    batch, steps = strategy.per_device_train_batch_size, strategy.gradient_accumulation_steps
    args = arguments.make_arguments(
        recipe, replace(plan, strategy=strategy), batch * steps, False, {"ddp_backend": None}
    )
    args.report_to, args.save_strategy, args.output_dir = [], "no", os.curdir  # nothing is written
    _materialised(network)
    network.to = lambda *args, **kwargs: network  # a Module cannot move fake tensors
    watched = layer_stacks.stacks(network)
    recorder.watch(watched)
    layer_of = {
        id(parameter): (stack, index)
        for stack, layers in enumerate(watched)
        for index, layer in enumerate(layers)
        for parameter in layer.parameters()
    }
    recorder.mark("start:weights")
    levers = strategy.levers
    streaming = (
        stand_ins.RecordedStreaming(recorder, network, levers) if levers.streamed_layers else None
    )
    if streaming is not None:  # a step without it is recorded, but for tests
        recorder.hold((("weights", slot, None) for slot in streaming.slots), SLOT)
    for name, parameter in network.named_parameters():
        op = TRAINED if parameter.requires_grad else FROZEN
        if ".original_module." in name:  # PEFT computes with a copy
            op = UNUSED
        layer, scales = layer_of.get(id(parameter)), four_bit.scales(parameter)
        recorder.hold([("weights", parameter, layer)], PACKED if scales else op)
        recorder.hold((("weights", tensor, layer) for tensor in scales), SCALES)
    recorder.hold((("buffers", buffer, None) for buffer in network.buffers()), "buffer")
    steady = _Steady(recorder, layer_of, plan.strategy.device == "cuda")
    tracer = _Tracer(
        recorder,
        order=SampleOrder(batch, batch, 1, 1, 0, 0),
        meter=StepMeter(),
        keep_checkpoints=2,
        levers=levers,
        streaming=streaming,
        facts={},
        model=network,
        args=args,
        data_collator=None,
        train_dataset=[0],
        callbacks=[steady],
    )
    tracer.remove_callback(PrinterCallback)
    steady.tracer = tracer
    if levers.logits_at_targets:
        tracer.num_targets = TARGETS * levers.num_output_chunks
    tracer.flattens = levers.flattens
    # a size that grows with the batch is recognised if each row has as many positions of each part
    parts = math.lcm(
        levers.num_output_chunks if tracer.flattens else 1, levers.tiled_mlp_num_shards
    )
    source, target = (-(-length // parts) * parts for length in lengths)
    if tracer.flattens:
        target = source
    mask = "position_ids" if recipe.data.packing or tracer.flattens else "attention_mask"
    tracer.widths = {"input_ids": source, mask: source, "labels": target}
    if plan.shape.is_encoder_decoder:
        tracer.widths["decoder_input_ids"] = target
    return tracer


def record(
    recipe: Recipe,
    plan: Plan,
    lengths: Sequence[int],
    padded: bool,
    batch: int = BATCH,
    target: Target | None = None,
    parts_apart: bool = False,
    all_layers: bool = False,
) -> RecordedStep:
    """The log of step(), of a model of few layers if the layers are alike, unless `all_layers` are
    wanted."""
    copies = recipe.lora.modules_to_save if recipe.lora else ()
    modules = " ".join([*recipe.model.freeze, *plan.lora_targets, *copies])
    family = plan.shape.family
    units = family.layer_period and math.lcm(
        family.layer_period, plan.strategy.levers.every_n_layers or 1
    )
    few = layer_stacks.shallow(plan.shape.config, family.depth_keys, units) if units else None
    # no module of a single layer is named
    if all_layers or few is None or re.search(r"(^|[. ])\d", modules):
        return RecordedStep(step(recipe, plan, lengths, padded, batch, target, parts_apart))
    few_layers = replace(plan, shape=replace(plan.shape, config=few.config))
    return RecordedStep(
        step(recipe, few_layers, lengths, padded, batch, target, parts_apart),
        *(few.layers, few.period),
    )
