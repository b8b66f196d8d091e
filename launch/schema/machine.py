"""The machine: GPUs, host memory and the link between GPUs, as frozen dataclasses."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

MIB = 1 << 20

GIB = 1 << 30

Device = Literal["cpu", "cuda"]

# packages that decide how a plan computes, and that requirements.txt does not install
OptionalPackage = Literal["flash_attn", "liger_kernel", "triton"]

# compute capabilities on which PyTorch tries cuDNN's attention first (check_prefer_cudnn_attention)
PREFER_CUDNN = ("9.0", "10.0", "10.3")
CUDNN_LAST = "TORCH_CUDNN_SDPA_DEPRIORITIZED"  # "1": it comes after PyTorch's own kernels


@dataclass(frozen=True)
class Gpu:
    """One accelerator as its vendor's library describes it."""

    index: int
    name: str
    vendor: Literal["nvidia", "amd"]
    total_bytes: int
    free_bytes: int
    # NVIDIA compute capability ("8.6") or AMD gfx name ("gfx1201"); "" when unknown
    architecture: str
    driver: str
    reason: str  # the source of these values
    # names the card in CUDA_VISIBLE_DEVICES or ROCR_VISIBLE_DEVICES; "" of a described card
    uuid: str = ""
    slowdown: str = ""  # why its clocks are lowered now; "": they are not, or unknown

    @property
    def key(self) -> str:
        """Its name in leases."""
        return self.uuid or str(self.index)


@dataclass(frozen=True)
class CardFigures:
    """Measurements of a card on this machine; 0: not measured."""

    name: str = ""
    context_bytes: int = 0  # memory that a process takes on the card, outside torch's allocator
    context_source: Literal["doctor", "selfcheck"] = "doctor"
    flops_per_s: float = 0.0  # rate of a large product in half precision
    # bandwidth of copies between pinned memory and the card, in the slower direction
    host_device_bytes_per_s: float = 0.0


NOT_MEASURED = CardFigures()


@dataclass(frozen=True)
class CoreFigures:
    """Rates of a CPU in PyTorch with so many threads, as training.core_rates measures them."""

    threads: int
    # FLOP/s by dtype, behind "attention " those of fused attention
    flops_per_s: Mapping[str, float]
    call_s: Mapping[str, float]  # by the same keys: seconds of a call, beside its FLOPs
    bytes_per_s: Mapping[str, float]  # by kind of kernel (launch.predict.time.rates)
    operator_s: float  # a call of any other operator, forward or backward
    view_s: float
    module_s: float  # a call of an empty module
    core_share: float = 1.0  # share of its cores that the measurement had


MEASURED_ALONE = 0.9  # CoreFigures.core_share at least, of figures that are kept


@dataclass(frozen=True)
class Machine:
    """The resources that a run may use on this machine. Each fact has its reason beside it."""

    name: str
    gpus: tuple[Gpu, ...]
    gpus_reason: str
    host_limit_bytes: int  # the smallest of MemTotal, the cgroup chain, Slurm and the rlimits
    host_limit_reason: str
    host_available_bytes: int  # free under that limit now; page cache counts as free
    host_available_reason: str
    cpu_count: int
    cpu_reason: str
    shm_bytes: int
    shm_reason: str
    disk_free_bytes: int
    disk_reason: str
    # why installed cards cannot be used, and the fix; "": they can be used, or there are none
    gpus_obstacle: str = ""
    cuda_driver: str = ""  # the newest CUDA that the NVIDIA driver serves ("12.4"); "" when unknown
    # installed on a described machine; None: not known there, and asked of this Python here
    packages: tuple[OptionalPackage, ...] | None = None
    # why the pages of mapped files count against the host's limit; "": they can be dropped
    mappings_count: str = ""
    # values assumed for keys that the description of a machine leaves out, as text
    assumed: str = ""
    # measured with one thread and with all cores; (): not measured
    cores: tuple[CoreFigures, ...] = ()
    cores_taken: float = 0.0  # cores that other programs keep busy now, if it trains on them


@dataclass(frozen=True)
class Leased:
    """Memory of this machine that other starts have leased, and a line of a plan on it."""

    host_bytes: int = 0  # all, taken or not
    host_untaken_bytes: int = 0  # part of host_bytes that the leases' processes have not taken yet
    # the same of cards, by their keys
    card_bytes: Mapping[str, int] = field(default_factory=dict)
    card_untaken_bytes: Mapping[str, int] = field(default_factory=dict)
    numbers: tuple[int, ...] = ()  # numbers of the leases, by which `queue` lists them
    notes: tuple[str, ...] = ()


NOT_LEASED = Leased()


@dataclass(frozen=True)
class LinkTry:
    """One real all-reduce between the ranks, in one environment."""

    backend: Literal["nccl", "gloo"]
    env: Mapping[str, str]  # the variables added to the user's environment
    ok: bool
    seconds: float
    said: str  # the line of its output that explains a failure
    cause: str = ""  # its name in link_causes.py; "" if the line is not known


@dataclass(frozen=True)
class Link:
    """The connection between the ranks of a run on this machine, as tested."""

    # None: no transport works, or there is one process: one GPU
    backend: Literal["nccl", "gloo"] | None
    env: Mapping[str, str]  # variables that every rank needs besides the user's environment
    # bus bandwidth as nccl-tests defines it: bytes x 2(N-1)/N / seconds of an all-reduce
    bytes_per_s: float | None
    # matmul rate of the slowest card in half precision; None without a GPU
    flops_per_s: float | None
    tries: tuple[LinkTry, ...]
    reason: str
    skipped: tuple[str, ...] = ()  # tries that were left out, and why


def cudnn_is_last(few_shapes: bool, environ: Mapping[str, str]) -> bool:
    """True if PyTorch's own attention kernels come before cuDNN's, also where it prefers those: in
    all runs but those of few shapes, unless the user's environment says otherwise.

    For each shape of a batch cuDNN compiles a plan, and keeps it (pytorch/pytorch pull 190388).
    That is the likely cause, not profiled, of what an H200 with torch 2.11 showed: steps of a T5
    with rows of many lengths took 0.2 to 0.5 s until their shapes were known and 0.12 s from then
    on, and 280 steps left 1.5 GB more in host RAM."""
    return environ.get(CUDNN_LAST, "" if few_shapes else "1") == "1"
