"""Seconds of kernels on a CPU, by what its cores do in PyTorch (training/core_rates.py). Pure."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from launch.predict.time.operators import NAMED, HostPace
from launch.schema.machine import CoreFigures
from launch.schema.recorded_step import Operator

# A loop over fewer elements runs on one thread: at::internal::GRAIN_SIZE. A kernel reads or writes
# three tensors as a rule, in float32.
_ONE_THREAD_BYTES = 3 * 4 * 32768
_LARGE_BYTES = 96 << 20  # kernels that move more find nothing in a cache
# parts of a name, of which the first decides, before those of any device
_NAMED_HERE = {
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
}
_KINDS = {**_NAMED_HERE, **NAMED}
_SERIAL = ("random",)  # one thread does it, whatever there are

# Fitted to the steps of benchmarks/seconds.py. The same kernel over and over has its tensors in the
# caches and its threads awake; in a step products get a share of those rates, and others less. A
# module of transformers runs as much Python as so many calls of an empty one, and so does the
# Trainer in a micro-step, and in a step.
_PRODUCT_SHARE, _OTHER_SHARE = 0.9, 0.7
_MODULE_CALLS, _MICRO_STEP_CALLS, _STEP_CALLS = 36, 1000, 2500

# one thread of it, torch 2.13
ASSUMED_CPU = "an AMD EPYC of 2024 with AVX-512"
_ASSUMED = CoreFigures(
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
class Cores:
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
            rate = _PRODUCT_SHARE * self.rank.flops_per_s[key]
            return self.rank.call_s.get(key, 0.0) + flops / rate
        rates = (self.single if moved_bytes < _ONE_THREAD_BYTES else self.rank).bytes_per_s
        named = (kind for part, kind in _KINDS.items() if part in operator.name)
        # a list's tensors were last read a step ago
        rate = rates["large" if operator.form == "list" else next(named, operator.form)]
        if moved_bytes > _LARGE_BYTES:
            rate = min(rate, rates["large"])
        return moved_bytes / (_OTHER_SHARE * rate)


def of_rank(measured: tuple[CoreFigures, ...], num_cores: int, num_ranks: int) -> Cores:
    """The cores of a rank of so many on a machine. `measured`: with one thread and with all cores;
    (): neither was measured."""
    single, rank = measured or _assumed(num_cores)

    def share(alone: Mapping[str, float], together: Mapping[str, float]) -> dict[str, float]:
        return {key: max(alone[key], rate / num_ranks) for key, rate in together.items()}

    if num_ranks > 1:
        flops_per_s = share(single.flops_per_s, rank.flops_per_s)
        bytes_per_s = share(single.bytes_per_s, rank.bytes_per_s)
        rank = replace(rank, flops_per_s=flops_per_s, bytes_per_s=bytes_per_s)
    return Cores(single, rank)


def _assumed(num_cores: int) -> tuple[CoreFigures, CoreFigures]:
    return _ASSUMED, replace(
        _ASSUMED,
        threads=num_cores,
        flops_per_s={key: num_cores * rate for key, rate in _ASSUMED.flops_per_s.items()},
        bytes_per_s={
            kind: rate if kind in _SERIAL else num_cores * rate
            for kind, rate in _ASSUMED.bytes_per_s.items()
        },
    )
