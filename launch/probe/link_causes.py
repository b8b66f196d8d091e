"""Causes of a failed link test, recognised by the lines that NCCL, RCCL, Gloo, torch and the driver
print, and the tries that can help."""

import re
from collections.abc import Mapping
from dataclasses import dataclass

Env = Mapping[str, str]

_AS_IS: Env = {}
_NO_CUMEM_HOST: Env = {"NCCL_CUMEM_HOST_ENABLE": "0"}
_NO_P2P: Env = {"NCCL_P2P_DISABLE": "1"}
_NO_SHM: Env = {"NCCL_SHM_DISABLE": "1"}
_SOCKETS_ONLY: Env = {**_NO_P2P, **_NO_SHM}
NO_P2P_NO_IB: Env = {**_NO_P2P, "NCCL_IB_DISABLE": "1"}
# tries with NCCL, the fastest first; Gloo and a single GPU come after them
LADDER = (_AS_IS, _NO_CUMEM_HOST, _NO_P2P, _NO_SHM, _SOCKETS_ONLY)

CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\ufffd]")
SAID_CHARACTERS = 240


@dataclass(frozen=True)
class Cause:
    """A known reason for a failure."""

    name: str
    regex: re.Pattern[str] | None  # pattern of a line of output; None: the end of the try shows it
    what: str
    fix: str  # the one action that the user can take
    worth: tuple[Env, ...]  # the NCCL tries that can help, in this order
    cards_work: bool = True  # False: neither Gloo nor a single GPU can help
    lasting: bool = True  # False: the cause may disappear soon, so no result is stored


CAUSES = (
    Cause(
        "driver",
        re.compile(
            r"driver on your system is too old|CUDA driver version is insufficient|Found no NVIDIA"
            r" driver"
            r"|Torch not compiled with CUDA enabled|no (CUDA|ROCm)-capable device is detected|No"
            r" HIP GPUs are available"
            r"|No CUDA GPUs are available|no kernel image is available"
        ),
        "torch cannot use the GPUs with this driver",
        "see what nvidia-smi or rocm-smi says and mend or update the driver, or install the build"
        " of torch that fits it: docs/cards.md",
        worth=(),
        cards_work=False,
        lasting=False,  # the driver may have been repaired at the next start
    ),
    Cause(
        "card_busy",
        re.compile(
            r"device\(s\) is/are busy or unavailable|(CUDA|HIP) out of memory|(CUDA|HIP) error: out"
            r" of memory"
        ),
        "another program holds a GPU",
        "end it (nvidia-smi or rocm-smi lists them), or leave that GPU out with"
        " CUDA_VISIBLE_DEVICES",
        worth=(),
        cards_work=False,
        lasting=False,
    ),
    Cause(
        "no_nccl",
        re.compile(r"doesn't have NCCL built in|ProcessGroupNCCL is only supported with GPUs"),
        "this torch has no NCCL",
        "install a torch build for your GPUs: docs/cards.md",
        worth=(),
    ),
    Cause(
        "same_card",
        re.compile(r"Duplicate GPU detected"),
        "two ranks were given one physical GPU (parts of a MIG card are one to NCCL)",
        "name different cards in CUDA_VISIBLE_DEVICES",
        worth=(),
    ),
    Cause(
        "rtx_40xx",
        re.compile(r"RTX 4000 series doesn't support faster communication"),
        "RTX 40xx cards on an old driver have neither P2P nor InfiniBand between them",
        "update the GPU driver to 550.40.07 or newer; until then both are switched off for your"
        " runs",
        worth=(NO_P2P_NO_IB, {**NO_P2P_NO_IB, **_NO_SHM}),
    ),
    Cause(
        "shm_too_small",
        re.compile(
            r"posix_fallocate failed|failed to extend /dev/shm|Error while creating shared memory"
            r" segment"
            r"|insufficient shared memory|(unable to|Unable to).{0,60}shared memory|\(SIGBUS\)"
        ),
        "/dev/shm is too small or full",
        "enlarge /dev/shm: docker run --shm-size=1g (or --ipc=host); elsewhere mount -o"
        " remount,size=1g /dev/shm",
        worth=(_NO_SHM, _SOCKETS_ONLY),
    ),
    Cause(
        "cumem_host",
        # usually "/dev/shm/nccl-<rubbish> (size 0)"
        re.compile(r"Error while attaching to shared memory segment"),
        "the ranks disagree on cuMem host memory (NVIDIA/nccl#2190: NUMA in containers and odd"
        " memory layouts)",
        "none needed while NCCL_CUMEM_HOST_ENABLE=0 works; in docker --cap-add SYS_NICE can mend"
        " the cause",
        worth=(_NO_CUMEM_HOST, _NO_SHM, _SOCKETS_ONLY),
    ),
    Cause(
        "p2p_refused",
        re.compile(
            r"failed to open CUDA IPC handle|peer access is not"
            r" supported|cuMemImportFromShareableHandle"
            r"|transport/p2p\.cc:\d+ NCCL WARN"
        ),
        "the cards cannot read each other's memory",
        "none needed while NCCL_P2P_DISABLE=1 works; in docker --ipc=host can mend the cause",
        worth=(_NO_P2P, _SOCKETS_ONLY),
    ),
    Cause(
        "wrong_sum",
        re.compile(r"link test: all-reduce .*gave .* expected"),
        "the link loses data: sums over the cards are wrong",
        "switch off the IOMMU or PCIe ACS in the BIOS or with iommu=pt on the kernel's command"
        " line",
        worth=(_NO_P2P, _SOCKETS_ONLY),
    ),
    Cause(
        "socket_interface",
        re.compile(
            r"no socket interface found|neither AF_INET\(2\) nor AF_INET6|NCCL_SOCKET_IFNAME"
            r" interface found"
        ),
        "NCCL finds no network interface for its first contact",
        "unset NCCL_SOCKET_IFNAME, or set it to an interface that `ip addr` lists",
        worth=(),
    ),
    Cause(
        "gloo_address",
        re.compile(
            r"connectFullMesh failed|Unable to find address for|makeDeviceForHostname|bind: Cannot"
            r" assign"
        ),
        "Gloo finds no address of this machine that its ranks can reach",
        "export GLOO_SOCKET_IFNAME=lo",
        worth=(),
    ),
    Cause(
        "hang",
        None,
        "the ranks started and then waited for each other for ever, most often P2P through an IOMMU"
        " or PCIe ACS",
        "switch off the IOMMU or PCIe ACS in the BIOS or with iommu=pt on the kernel's command"
        " line",
        worth=(_NO_P2P, _SOCKETS_ONLY),
    ),
    Cause(
        "not_started",
        None,
        "the ranks did not get as far as their GPU: a slow disk, a busy machine, or a driver that"
        " hangs",
        "run `python -m launch doctor` when the machine is idle",
        worth=LADDER,
        lasting=False,
    ),
    Cause(
        "stuck",
        None,
        "a rank cannot be killed: it is stuck in the GPU driver",
        "reboot; if it repeats, update the GPU driver",
        worth=(),
        cards_work=False,
        lasting=False,
    ),
)
UNKNOWN = Cause(
    "", None, "not a failure known here", "search the web for the line above", worth=LADDER
)
BY_NAME = {cause.name: cause for cause in (*CAUSES, UNKNOWN)}


def find(output: str, how: str) -> tuple[Cause, str]:
    """The cause and the line that shows it: by the output of all ranks, or else by the way they
    ended (Ended.how)."""
    if how == "stuck":
        return BY_NAME[how], BY_NAME[how].what
    lines = [CONTROL.sub("", line).strip() for line in output.splitlines()]
    # a traceback repeats the message after this line
    lines = [line for line in lines if not line.startswith("raise ")]
    for cause in CAUSES:
        for line in lines:
            if cause.regex and cause.regex.search(line):
                return cause, line[:SAID_CHARACTERS]
    if how in BY_NAME:
        return BY_NAME[how], BY_NAME[how].what
    errors = [
        line
        for line in lines
        if re.search(r"error|warn|fail|refused|expected", line, re.IGNORECASE)
    ]
    with_letters = [line for line in lines if re.search(r"[a-zA-Z]", line)]
    return UNKNOWN, (errors or with_letters or ["it said nothing"])[-1][:SAID_CHARACTERS]
