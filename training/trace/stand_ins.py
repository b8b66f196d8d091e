"""Stand-ins of a trace for a card and an engine: products of experts, Liger's kernels, copies to
pinned host memory, and the precision in which an engine computes."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch

from launch.schema.levers import Levers
from launch.schema.plan import Strategy
from launch.schema.training_section import Precision
from training.compat import (
    accelerate_private,
    liger_private,
    torch_private,
    transformers_private,
)
from training.compat.levers_private import replaced
from training.compat.torch_private import FakeTensorMode, op_implementations_dict
from training.levers.compile import undivided_layers
from training.levers.offloading import LayerInput, Offloading
from training.levers.streaming import Streaming
from training.model import four_bit
from training.trace.cuda_semantics import Target
from training.trace.cuda_workspace import MULTIPROCESSORS
from training.trace.recorder import Recorder

aten = torch.ops.aten
_GROUPED_MM = aten._grouped_mm.default
_ALIGNMENT_BYTES = 16  # alignment of the rows that a kernel of CUDA writes
# places of the arguments that a kernel reads and writes; of all others it does one of the two
_WRITTEN_IN_PLACE = {
    "_triton_rope": (0, 2),  # query and key, or their gradients
    "_swiglu_backward_kernel": (1, 2),  # gate and up, which become their gradients
    "_swiglu_backward_kernel_tiled": (1, 2),
    "_geglu_tanh_backward_kernel": (1, 2),
}
_MOST_MULTIPROCESSORS = 304  # an MI300X's, for cards that MULTIPROCESSORS lacks


# ---- experts of a mixture


@contextmanager
def grouped_products(on_nvidia: bool) -> Iterator[None]:
    """Inside, experts of any type of weights can be traced, whose products are torch's grouped_mm.

    Torch's own shapes of them take bfloat16 only. Its kernels take float32 and float16 too, group
    by group, into one output. Source: create_grouped_gemm_output_tensor in
    ATen/native/GroupedMMUtils.h."""

    def grouped_mm(
        fake_mode: FakeTensorMode,
        operator: Any,
        mat_a: torch.Tensor,
        mat_b: torch.Tensor,
        offs: torch.Tensor | None = None,
        bias: torch.Tensor | None = None,
        out_dtype: torch.dtype | None = None,
    ) -> torch.Tensor:
        dtype = out_dtype or mat_a.dtype
        *rows, width = _output_sides(mat_a, mat_b, offs)
        aligned = _ALIGNMENT_BYTES // dtype.itemsize if on_nvidia else 1
        padded = -(-width // aligned) * aligned
        strides = (rows[-1] * padded, padded, 1) if len(rows) == 2 else (padded, 1)
        with fake_mode:
            return torch.empty_strided((*rows, width), strides, dtype=dtype, device=mat_a.device)

    op_implementations_dict[_GROUPED_MM] = grouped_mm
    try:
        yield
    finally:
        del op_implementations_dict[_GROUPED_MM]


def _output_sides(
    mat_a: torch.Tensor, mat_b: torch.Tensor, offs: torch.Tensor | None
) -> tuple[int, ...]:
    """(rows, columns), or, with a matrix for each group, (groups, rows, columns)."""
    if mat_a.dim() == mat_b.dim() == 2:
        assert offs is not None
        return offs.shape[0], mat_a.shape[0], mat_b.shape[1]
    if mat_a.dim() == mat_b.dim():
        return mat_a.shape[0], mat_a.shape[1], mat_b.shape[2]
    return mat_a.shape[-2], mat_b.shape[-1]


# ---- Triton's kernels of Liger


def liger_kernels(recorder: Recorder, target: Target | None) -> AbstractContextManager[None]:
    """Inside, Liger's functions launch into a recorder, for this card. They run as they are, on
    fake tensors, so that their results, what they save and what they allocate are recorded like any
    other; a kernel is counted where it would be launched."""
    programs = (
        MULTIPROCESSORS.get(target.capability or (0, 0), _MOST_MULTIPROCESSORS) if target else 1
    )
    return replaced(
        (module, name, _Kernel(recorder, name, programs))
        for module, name in liger_private.kernels()
    )


class _Kernel:
    """Stands in for a kernel of Triton's, of which `programs` run where each takes many rows."""

    def __init__(self, recorder: Recorder, name: str, programs: int) -> None:
        self._recorder, self._name, self._programs = recorder, name, programs

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        """The launch of a grid. A grid of one program is that of a CPU, which counts as one
        multiprocessor: on a card a program on each has a row of float32 sums."""

        def launch(*args: Any, **options: Any) -> None:
            tensors = [each for each in args if isinstance(each, torch.Tensor)]
            again = [args[place] for place in _WRITTEN_IN_PLACE.get(self._name, ())]
            workspace = [
                (self._programs - 1) * each.nbytes
                for each in tensors
                if grid == (1,) and each.shape[:-1] == (1,)
            ]
            self._recorder.kernel(f"triton::{self._name}", [*tensors, *again], workspace)

        return launch


# ---- host memory


class RecordedOffloading(Offloading):
    """The copies of a traced card: host memory is no block of the device, and a copy is no kernel
    among those that compute."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__(torch.device("cpu"))
        self._recorder = recorder

    def sent(self, tensor: torch.Tensor) -> LayerInput:
        self._recorder.offload(tensor)
        with self._recorder.suspended():
            return super().sent(tensor)

    def fetch(self, layer_input: LayerInput) -> None:
        if layer_input.on_device is None:
            layer_input.on_device = self.empty_on_device(layer_input)


class RecordedStreaming(Streaming):
    """The streamed layers of a traced card, whose weights are the slots'; they are copied by no
    kernel among those that compute."""

    def __init__(self, recorder: Recorder, network: torch.nn.Module, levers: Levers) -> None:
        super().__init__(network, levers, torch.device("cpu"))
        self._recorder = recorder

    def copy(self, place: int) -> None:
        with self._recorder.suspended():
            super().copy(place)


# ---- precision of an engine


def as_computed(network: torch.nn.Module, strategy: Strategy) -> Precision:
    """Cast a model without weights to the precision in which the engine computes, and return the
    mixed precision of its trace.

    Under mixed precision DeepSpeed casts the whole model and leaves autocast out. FSDP2 gathers
    every parameter in that precision, inside autocast, and casts the outputs of its groups to
    float32 (setup.autocast_fsdp2). The other engines keep the parameters, and autocast casts.
    Source: deepspeed 0.19 engine.py _configure_distributed_model; accelerate 1.15
    fsdp2_prepare_model."""
    if strategy.mixed_precision == "no" or strategy.launch_mode.is_whole:
        return strategy.mixed_precision
    dtype = torch.bfloat16 if strategy.mixed_precision == "bf16" else torch.float16
    if strategy.launch_mode.engine == "deepspeed":
        network.to(dtype)
        return "no"
    for _, parameter in four_bit.named_numbers(network):
        parameter.data = parameter.data.to(dtype)
    for module in _fsdp2_modules(network):
        module.register_forward_hook(_float32_output)
    return strategy.mixed_precision


def _fsdp2_modules(network: transformers_private.Network) -> list[torch.nn.Module]:
    """The modules that Accelerate shards on their own: the layers, the embeddings, the final
    norm."""
    outer = [
        accelerate_private.final_norm(network),
        *(getattr(network, f"get_{end}_embeddings", lambda: None)() for end in ("input", "output")),
    ]
    return [*undivided_layers(network), *(module for module in outer if module is not None)]


def _float32_output(module: torch.nn.Module, args: Any, output: Any) -> Any:
    """Cast each floating tensor of a module's output, as MixedPrecisionPolicy.output_dtype does."""
    return torch_private.tree_map_only(
        torch.Tensor,
        lambda tensor: tensor.float() if tensor.is_floating_point() else tensor,
        output,
    )
