"""Peak rates of devices, in operations and bytes per second: configs/cards.yaml for cards, and for
CPUs what their cores do in PyTorch (training/core_rates.py), by which a kernel takes its seconds.
Pure."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from launch.probe import cards
from launch.schema.machine import CoreFigures, Gpu, Machine
from launch.schema.plan import Strategy
from launch.schema.recorded_step import Operator

# Two channels of DDR4-3200, 25.6 GB/s each (JEDEC). AdamW moved 52 GB/s in
# benchmarks/results/offload_optimizer.md.
HOST_BYTES_PER_S = 51.2e9
# AdamW on hosts of cards with links of their own, which stand in servers of two sockets: 65 to 83
# GB/s by 46 bytes an element (github.com/deepspeedai/DeepSpeed pull 735: 11.6e9 elements in 8.2 s;
# issue 6834: 18e9 in 10 s)
SERVER_BYTES_PER_S = 74e9
# Architecture -> the share of the rate that is left to products in 16 bits whose rows are divided
# by fewer than 8 elements. Sources: benchmarks/results/gpu_products.md; 8.0: a step of GPT-2 takes
# 8.8 ms longer with 50,257 tokens than with 50,304 (github.com/rasbt/LLMs-from-scratch
# ch05/10_llm-training-speed, 9), whose products take 7.6 ms. Others are not measured.
_UNALIGNED_SHARE = {"8.0": {"1": 0.46}, "9.0": {"4": 0.34, "2": 0.34, "1": 0.17}}
# Large float16 products get 0.69 of an A800, and 0.96 of an RTX 4090, whose clock is above the one
# of its peak: github.com/mli/transformers-benchmarks issue 4.
_PRODUCT_SHARE, _GEFORCE_SHARE = 0.8, 0.96
# by architecture, measured: an H200 (benchmarks/results/card_rates_h200.md, bfloat16 layers), an
# MI300X (AMD's ROCm blog, Measuring Max-Achievable FLOPs, part 2, table 1: 708 TFLOP/s in bfloat16)
_PRODUCT_SHARES = {"9.0": 0.72, "gfx942": 0.54}
# float32 units of a multiprocessor, each of 2 FLOP a clock. Source: CUDA C++ Programming Guide,
# arithmetic instructions.
_LANES = {
    **dict.fromkeys(("7.0", "7.5", "8.0"), 64),
    **dict.fromkeys(("8.6", "8.7", "8.9", "9.0", "10.0", "12.0"), 128),
}
# parts of a name, of which the first decides; other kernels go by their form
NAMED = {
    "softmax": "softmax",
    "nll_loss": "softmax",
    "cross_entropy": "softmax",
    "layer_norm": "norm",
    "rms_norm": "norm",
    "group_norm": "norm",
    "aten::sum": "reduction",
    "aten::mean": "reduction",
    "vector_norm": "reduction",
    "aten::cumsum": "reduction",
    "embedding": "gather",
    "aten::index": "gather",
    "aten::gather": "gather",
    "aten::scatter": "gather",
    "update_8bit": "8-bit update",
}
# A loop over fewer elements runs on one thread: at::internal::GRAIN_SIZE. A kernel reads or writes
# three tensors as a rule, in float32.
_ONE_THREAD_BYTES = 3 * 4 * 32768
_LARGE_BYTES = 96 << 20  # kernels that move more find nothing in a cache
# parts of a name on a CPU, of which the first decides, before those of any device
_CPU_NAMED = {
    "softmax_backward": "",
    "tanh_backward": "",
    "softmax": "softmax",
    "nll_loss": "",
    "aten::tanh": "transcendental",
    "aten::exp": "transcendental",
    "aten::sin": "transcendental",
    "aten::cos": "transcendental",
    "aten::erf": "transcendental",
    "silu": "sigmoid",
    "gelu": "sigmoid",
    "sigmoid": "sigmoid",
    "rsqrt": "sigmoid",
    "bernoulli": "random",
    "dropout": "random",
    "optimizer_update": "",
    "aten::where": "selection",
    "masked_fill": "selection",
    **NAMED,
}
_SERIAL = ("random",)  # one thread does it, whatever there are

# Fitted to the steps of benchmarks/seconds.py. The same kernel over and over has its tensors in the
# caches and its threads awake; in a step products get a share of those rates, and others less. A
# module of transformers runs as much Python as so many calls of an empty one, and so does the
# Trainer in a micro-step, and in a step.
_CPU_PRODUCT_SHARE, _CPU_OTHER_SHARE = 0.9, 0.7
_MODULE_CALLS, _MICRO_STEP_CALLS, _STEP_CALLS = 36, 1000, 2500

# one thread of it, torch 2.13
_ASSUMED_CPU = "an AMD EPYC of 2024 with AVX-512"
_ASSUMED_CORES = CoreFigures(
    threads=1,
    flops_per_s={
        "float32": 110e9,
        "bfloat16": 490e9,
        "attention float32": 80e9,
        "attention bfloat16": 63e9,
    },
    call_s={"bfloat16": 20e-6},
    bytes_per_s={
        "": 100e9,
        "cast": 78e9,
        "strided": 10e9,
        "broadcast": 105e9,
        "softmax": 20e9,
        "norm": 16e9,
        "reduction": 55e9,
        "gather": 90e9,
        "transcendental": 3.9e9,
        "sigmoid": 38e9,
        "random": 1.9e9,
        "selection": 3.8e9,
        "large": 20e9,
    },
    operator_s=3e-6,
    view_s=1.5e-6,
    module_s=0.57e-6,
)


@dataclass(frozen=True)
class HostPace:
    """Seconds of the host for an operator in eager PyTorch, with its dispatch, autograd and launch;
    for a product, whose kernel cuBLAS chooses; for a view; for a module's call."""

    operator_s: float
    product_s: float
    view_s: float
    module_s: float


# LoRA of Qwen-1.8B and 7B stays at 1.0 and 1.2 s per 8 micro-steps below 512 tokens (QwenLM/Qwen
# README, fine-tuning, A100)
_ASSUMED_HOST = HostPace(operator_s=14e-6, product_s=21e-6, view_s=2e-6, module_s=8e-6)
# Measured paces, by architecture: beside an H200, medians of trainings that wait for their host, of
# 507 and of 892 products (benchmarks/results/gpu_speed.md, c1 and c2)
_HOSTS = {"9.0": HostPace(operator_s=32e-6, product_s=47e-6, view_s=4e-6, module_s=20e-6)}


@dataclass(frozen=True)
class _Cores:
    """The cores of a rank: figures of one thread, and of all its threads."""

    single: CoreFigures
    rank: CoreFigures

    @property
    def host(self) -> HostPace:
        operator_s, view_s = self.rank.operator_s, self.rank.view_s
        return HostPace(operator_s, operator_s, view_s, _MODULE_CALLS * self.rank.module_s)

    @property
    def trainer_s(self) -> tuple[float, float]:
        """Seconds of the Trainer's own Python in a micro-step, and in a step."""
        return _MICRO_STEP_CALLS * self.rank.module_s, _STEP_CALLS * self.rank.module_s

    def kernel_s(self, operator: Operator, flops: float, moved_bytes: float) -> float:
        """Seconds of a kernel."""
        if operator.kind in ("product", "attention"):
            dtype = operator.dtype.partition(" by ")[0]
            prefix = "attention " if operator.kind == "attention" else ""
            key = prefix + (dtype if prefix + dtype in self.rank.flops_per_s else "float32")
            rate = _CPU_PRODUCT_SHARE * self.rank.flops_per_s[key]
            return self.rank.call_s.get(key, 0.0) + flops / rate
        rates = (self.single if moved_bytes < _ONE_THREAD_BYTES else self.rank).bytes_per_s
        named = (kind for part, kind in _CPU_NAMED.items() if part in operator.name)
        # a list's tensors were last read a step ago
        rate = rates["large" if operator.form == "list" else next(named, operator.form)]
        if moved_bytes > _LARGE_BYTES:
            rate = min(rate, rates["large"])
        return moved_bytes / (_CPU_OTHER_SHARE * rate)


@dataclass(frozen=True)
class Rates:
    """A device's peak. launch/predict/time/timing.py has the share of it that a step gets."""

    name: str
    # rates by dtype; tfloat32 is float32 where training.tf32 allows it. A product whose rows 8
    # elements do not divide has " by 4", " by 2" or " by 1" behind the dtype; without such a key it
    # is as fast as others.
    flops_per_s: Mapping[str, float]
    bytes_per_s: float  # bandwidth of its memory; all ranks of a machine share a CPU's
    link_bytes_per_s: float | None  # one direction of its own links to other cards; None: PCIe
    source: str
    multiprocessor_hz: float = math.inf  # clocks of all multiprocessors together; if known
    cache_bytes: int = 0  # of a cache that is much faster than its memory
    product_share: float = _PRODUCT_SHARE  # share of flops_per_s that large products reach
    host: HostPace = _ASSUMED_HOST
    cores: _Cores | None = None  # those of a rank, where it trains on a CPU
    host_bytes_per_s: float = HOST_BYTES_PER_S  # bandwidth of the memory of the cards' host


UNKNOWN = Rates(
    name="unknown card",
    flops_per_s={"float32": 10e12, "tfloat32": 20e12, "bfloat16": 20e12, "float16": 20e12},
    bytes_per_s=300e9,
    link_bytes_per_s=None,
    source="assumed: no card of its architecture is known; a modest one",
)


def look_up(machine: Machine, strategy: Strategy) -> Rates:
    """The peak of the slowest device a rank of this strategy gets; of a machine's whole CPU where
    it trains there."""
    if strategy.device == "cpu":
        return cpu(machine.cpu_count, strategy.processes_per_machine, machine.cores)
    slowest = min(
        (card(gpu) for gpu in machine.gpus[: strategy.processes_per_machine]),
        key=lambda rates: max(rates.flops_per_s.values()),
    )
    if not machine.cores:
        return slowest
    return replace(slowest, host_bytes_per_s=machine.cores[-1].bytes_per_s["large"])


def card(gpu: Gpu) -> Rates:
    """The row of this card, else the one of its architecture with the nearest memory, else a modest
    guess."""
    row, is_named = cards.look_up(gpu)
    if row is None:
        return replace(UNKNOWN, name=gpu.name)
    rates = Rates(
        name=row.name,
        flops_per_s={**row.flops_per_s, **_unaligned(row)},
        bytes_per_s=row.bytes_per_s,
        link_bytes_per_s=row.link_bytes_per_s,
        source=row.source,
        multiprocessor_hz=_multiprocessor_hz(row),
        cache_bytes=row.cache_bytes,
        product_share=(
            _GEFORCE_SHARE
            if row.is_geforce
            else _PRODUCT_SHARES.get(row.architecture, _PRODUCT_SHARE)
        ),
        host=_HOSTS.get(row.architecture, _ASSUMED_HOST),
        host_bytes_per_s=SERVER_BYTES_PER_S if row.link_bytes_per_s else HOST_BYTES_PER_S,
    )
    if is_named:
        return rates
    return replace(rates, name=gpu.name, source=f"assumed: like {row.name}, {row.source}")


def _multiprocessor_hz(row: cards.Card) -> float:
    lanes = _LANES.get(row.architecture)
    return row.flops_per_s["float32"] / (2 * lanes) if lanes else math.inf


def _unaligned(row: cards.Card) -> dict[str, float]:
    return {
        f"{dtype} by {divisor}": share * row.flops_per_s[dtype]
        for divisor, share in _UNALIGNED_SHARE.get(row.architecture, {}).items()
        for dtype in ("bfloat16", "float16")
    }


def cpu(num_cores: int, num_ranks: int = 1, measured: tuple[CoreFigures, ...] = ()) -> Rates:
    """The rates of a rank of so many that share a CPU. `measured`: with one thread and with all
    cores; (): a CPU like others is assumed."""
    of_rank = cores_of_rank(measured, num_cores, num_ranks)
    return Rates(
        name=f"{num_cores} core(s)",
        flops_per_s=of_rank.rank.flops_per_s,
        bytes_per_s=of_rank.rank.bytes_per_s["large"],
        link_bytes_per_s=None,
        source="measured here" if measured else f"assumed: like {_ASSUMED_CPU}",
        host=of_rank.host,
        cores=of_rank,
    )


def cores_of_rank(measured: tuple[CoreFigures, ...], num_cores: int, num_ranks: int) -> _Cores:
    """The cores of a rank of so many on a machine. `measured`: with one thread and with all cores;
    (): neither was measured."""
    single, rank = measured or _assumed(num_cores)

    def share(alone: Mapping[str, float], together: Mapping[str, float]) -> dict[str, float]:
        return {key: max(alone[key], rate / num_ranks) for key, rate in together.items()}

    if num_ranks > 1:
        flops_per_s = share(single.flops_per_s, rank.flops_per_s)
        bytes_per_s = share(single.bytes_per_s, rank.bytes_per_s)
        rank = replace(rank, flops_per_s=flops_per_s, bytes_per_s=bytes_per_s)
    return _Cores(single, rank)


def _assumed(num_cores: int) -> tuple[CoreFigures, CoreFigures]:
    return _ASSUMED_CORES, replace(
        _ASSUMED_CORES,
        threads=num_cores,
        flops_per_s={key: num_cores * rate for key, rate in _ASSUMED_CORES.flops_per_s.items()},
        bytes_per_s={
            kind: rate if kind in _SERIAL else num_cores * rate
            for kind, rate in _ASSUMED_CORES.bytes_per_s.items()
        },
    )
