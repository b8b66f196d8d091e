"""The link test: it finds the transport that carries an all-reduce between several GPUs, and its
speed, before they train.

The search goes from the fastest to the safest transport. Each try is a real all-reduce by child
processes (training/children/link.py).
"""

import json
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from launch.base import files
from launch.base.errors import CheckpointError, ResourceError
from launch.base.text import visible
from launch.base.workspace import CODE
from launch.probe import gpus, link_causes, link_ranks, packages
from launch.probe.link_causes import Env
from launch.probe.torch_build import numbers
from launch.schema.machine import Link, LinkTry, Machine

COLLECTIVE = (sys.executable, "-P", "-m", "training.children.link")
_CACHE_VERSION = 1  # raise it if the meaning of a try changes
_FAILURE_KEPT_S = 24 * 3600.0
_KEPT_RESULTS = 16
PACKAGES = ("torch", "nvidia-nccl-cu13", "nvidia-nccl-cu12", "nvidia-nccl-cu11")
Backend = Literal["nccl", "gloo"]
BACKENDS: tuple[Backend, ...] = ("nccl", "gloo")
_OBEYED = ("NCCL_", "RCCL_", "GLOO_")  # prefixes of variables by which a user chooses a transport
# accelerate refuses these cards unless both are set, and its launcher sets them. Source:
# check_cuda_p2p_ib_support
_RTX_40XX_DRIVER = (550, 40, 7)


@dataclass(frozen=True)
class _CachedLink:
    """A result in the cache, with the facts for which it is valid."""

    time: float  # unix time
    facts: Mapping[str, Any]
    link: Link


def link(
    machine: Machine,
    num_processes: int,
    cache: Path,
    environ: Mapping[str, str],
    collective: Sequence[str] = COLLECTIVE,
    device: Literal["cuda", "cpu"] = "cuda",
    say: Callable[[str], None] = lambda line: None,
    fresh: bool = False,
    limits: link_ranks.Limits = link_ranks.Limits(),  # noqa: B008  a frozen value
    shm: Path = Path("/dev/shm"),
    backends: Sequence[Backend] = BACKENDS,
) -> Link:
    """The fastest transport of `backends` that works between the first `num_processes` GPUs, from
    the cache unless `fresh`.

    NCCL's variables in `environ` are part of every try, and Link.env holds only the variables that
    are added to them. Raises ResourceError if there are fewer GPUs than processes.
    """
    if num_processes < 2:
        return Link(None, {}, None, None, (), "one process: nothing to link")
    if device == "cuda" and len(machine.gpus) < num_processes:
        raise ResourceError(
            f"{num_processes} processes on {len(machine.gpus)} GPU(s) ({machine.gpus_reason});"
            " lower num_processes"
        )
    path = cache / "link.json"
    facts = _facts(machine, num_processes, environ, collective, device, backends)
    key = files.digest(facts)
    if not fresh and (cached := _read_cache(path, say).get(key)):
        return cached.link
    tested = _Search(machine, num_processes, environ, collective, device, say, limits, shm).run(
        backends
    )
    if all(link_causes.BY_NAME[attempt.cause].lasting for attempt in tested.tries):
        _store(path, facts, tested, say)
    _of_this_process[path, key] = tested
    return tested


# Results of this process's own tests, also those that are not stored for later starts: a later plan
# of the same run, perhaps after hours, must use the link of the first plan.
_of_this_process: dict[tuple[Path, str], Link] = {}


def last_result(
    machine: Machine,
    num_processes: int,
    cache: Path,
    environ: Mapping[str, str],
    collective: Sequence[str] = COLLECTIVE,
    backends: Sequence[Backend] = BACKENDS,
) -> Link | None:
    """The result of this process's last test of these GPUs, else that of an earlier start, else
    None. Nothing is tested."""
    path = cache / "link.json"
    key = files.digest(_facts(machine, num_processes, environ, collective, "cuda", backends))
    if tested := _of_this_process.get((path, key)):
        return tested
    cached = _read_cache(path, lambda line: None).get(key)
    return cached.link if cached else None


# ---- the search
# ---------------------------------------------------------------------------


class _Search:
    """A search from NCCL without changes down to a single GPU."""

    def __init__(
        self,
        machine: Machine,
        num_processes: int,
        environ: Mapping[str, str],
        collective: Sequence[str],
        device: Literal["cuda", "cpu"],
        say: Callable[[str], None],
        limits: link_ranks.Limits,
        shm: Path,
    ) -> None:
        self.machine, self.num_processes, self.environ = machine, num_processes, environ
        self.collective, self.device, self.say = collective, device, say
        self.limits, self.shm = limits, shm
        self.deadline = time.monotonic() + self.limits.total_s
        self.start_s = 0.0  # the slowest so far
        self.required = {
            key: value for key, value in _required(self.machine).items() if key not in self.environ
        }
        self.tries: list[LinkTry] = []
        self.skipped: list[str] = []

    def run(self, backends: Sequence[Backend]) -> Link:
        worth: list[Env] = list(link_causes.LADDER) if "nccl" in backends else []
        considered: list[Env] = []  # entries of the ladder
        tried: list[Env] = []  # the variables that were added to the user's environment
        is_cold = True  # the first start may have to read torch from a slow disk
        while worth:
            candidate, *remaining = worth
            considered.append(candidate)
            added = {
                key: value
                for key, value in {**self.required, **candidate}.items()
                if key not in self.environ
            }
            if added in tried:
                self._say_repeated(candidate, added)
            elif tried and self.deadline - time.monotonic() < 2 * (
                self.start_s + self.limits.try_s
            ):
                names = ", ".join(_name("nccl", env) for env in worth)
                self._skip(f"{names}: no time for more than Gloo within {self.limits.total_s:g} s")
                break
            else:
                tried.append(added)
                result = self._try("nccl", added, self.deadline - self.limits.try_s)
                cause = link_causes.BY_NAME[self.tries[-1].cause]
                if result:
                    return self._works(result)
                if not cause.cards_work:
                    return self._one_gpu(f"{cause.what}, which no other transport mends")
                # this failure tells nothing about the transport or the next start
                if is_cold and cause.name == "not_started":
                    is_cold, self.start_s = False, 0.0
                    self.deadline += self.tries[-1].seconds
                    considered.pop()
                    tried.pop()
                    continue
                remaining = [env for env in cause.worth if env not in considered]
            worth = remaining
        result = self._try("gloo", self.required, self.deadline)
        return (
            self._works(result) if result else self._one_gpu("no transport works between the GPUs")
        )

    def _try(self, backend: Backend, added: Env, deadline: float) -> dict[str, Any] | None:
        """Try a transport and add the try to self.tries. Returns rank 0's result if it worked."""
        self.say(f"link test: {_name(backend, added)}, {self.num_processes} processes")
        began = time.monotonic()
        argv = [*self.collective, "--backend", backend, "--device", self.device]
        visible = (
            gpus.visible_devices(self.machine, self.num_processes) if self.device == "cuda" else {}
        )
        environment = {
            "NCCL_DEBUG": "WARN",  # NCCL does not say why without it
            **self.environ,
            **visible,
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": str(CODE),
            "PYTHONUNBUFFERED": "1",
            **added,
        }
        ended = link_ranks.run(
            argv, environment, self.num_processes, self.limits, deadline, self.shm
        )
        self.start_s = max(self.start_s, ended.start_s)
        result = _result(ended.output, backend) if ended.how == "done" else None
        seconds, name, evidence_line = time.monotonic() - began, "", ""
        if result is None:
            cause, evidence_line = link_causes.find(ended.output, ended.how)
            name = cause.name
        self.tries.append(LinkTry(backend, added, result is not None, seconds, evidence_line, name))
        return result

    def _skip(self, why: str) -> None:
        self.skipped.append(why)
        self.say(f"link test: skipped {why}")

    def _say_repeated(self, candidate: Env, added: Env) -> None:
        present = {**self.required, **self.environ}
        already = " ".join(f"{key}={present[key]}" for key in candidate if key in present)
        names = _name("nccl", candidate), _name("nccl", added)
        self._skip(f"{names[0]}: with {already} set it is the same as {names[1]}")

    def _works(self, result: Mapping[str, Any]) -> Link:
        last = self.tries[-1]
        reason = f"{_name(last.backend, last.env)} works"
        if self.required:
            reason += (
                " (accelerate wants P2P and InfiniBand off on RTX 40xx with a driver older than"
                " 550.40.07)"
            )
        rates = result["bus_bytes_per_s"], result["flops_per_s"]
        return Link(last.backend, last.env, *rates, tuple(self.tries), reason, tuple(self.skipped))

    def _one_gpu(self, reason: str) -> Link:
        return Link(
            None, {}, None, None, tuple(self.tries), f"{reason}: one GPU", tuple(self.skipped)
        )


def _required(machine: Machine) -> Env:
    """The variables that accelerate requires for these cards with any backend."""
    drivers = (
        numbers(gpu.driver)
        for gpu in machine.gpus
        if gpu.vendor == "nvidia" and "RTX 40" in gpu.name
    )
    is_old = any(driver and driver < _RTX_40XX_DRIVER for driver in drivers)
    return link_causes.NO_P2P_NO_IB if is_old else {}


def _result(output: str, backend: str) -> dict[str, Any] | None:
    """The content of rank 0's first JSON line, if it is of this backend."""
    lines = [line for line in output.splitlines() if line.startswith('{"backend"')]
    result = json.loads(lines[0]) if lines else {}
    return result if result.get("backend") == backend else None


def _name(backend: str, env: Env) -> str:
    settings = " ".join(f"{key}={value}" for key, value in sorted(env.items()))
    return (
        f"{backend.upper() if backend == 'nccl' else backend.title()}"
        f" {f'with {settings}' if settings else 'as it is'}"
    )


# ---- the cache
# ---------------------------------------------------------------------------


def _facts(
    machine: Machine,
    num_processes: int,
    environ: Mapping[str, str],
    collective: Sequence[str],
    device: str,
    backends: Sequence[Backend],
) -> dict[str, Any]:
    """Everything that a result depends on. Fixes change the size of /dev/shm and the kernel's
    command line."""
    # a plan has the cards in the order of their free memory
    cards = sorted(machine.gpus[:num_processes], key=lambda gpu: gpu.index)
    return {
        "version": _CACHE_VERSION,
        "collective": list(collective),
        "device": device,
        "gpus": [[gpu.index, gpu.name, gpu.driver, gpu.architecture] for gpu in cards],
        "backends": list(backends),
        "num_processes": num_processes,
        "packages": {name: version for name in PACKAGES if (version := packages.version(name))},
        "kernel": os.uname().release,
        "kernel_command_line": visible(files.system_text(Path("/proc/cmdline"))),
        "shm_bytes": machine.shm_bytes,
        "environment": {
            key: value
            for key, value in sorted(environ.items())
            if key.startswith(_OBEYED) and not key.startswith("NCCL_DEBUG")
        },
    }


def _read_cache(path: Path, say: Callable[[str], None]) -> dict[str, _CachedLink]:
    """The results of earlier tests that still hold, oldest first: working links, and failed
    searches that are at most a day old. If the file cannot be used, a line says so and there are
    none."""
    try:
        entries = files.read(path, dict[str, _CachedLink]) or {}
    except CheckpointError as error:
        say(
            f"link test: earlier results cannot be read: {str(error).partition(';')[0]}; testing"
            " again"
        )
        return {}
    return {
        key: cached
        for key, cached in entries.items()
        if cached.link.backend or 0 <= time.time() - cached.time < _FAILURE_KEPT_S
    }


def _store(path: Path, facts: Mapping[str, Any], link: Link, say: Callable[[str], None]) -> None:
    entries = _read_cache(path, lambda line: None)
    entries.pop(files.digest(facts), None)
    entries[files.digest(facts)] = _CachedLink(time.time(), facts, link)
    newest = list(entries.items())[-_KEPT_RESULTS:]
    try:
        files.store_json(path, {name: asdict(cached) for name, cached in newest})
    except OSError as error:  # a full disk does not make the link worse
        say(f"link test: the result is not kept: {path}: {error.strerror}")


def lines(link: Link) -> list[str]:
    """Lines for people: the tries and their results, the working link and its speed, and a fix for
    each problem."""
    report = [
        f"link: {link.reason}"
        + (f", {link.bytes_per_s / 1e9:.2f} GB/s bus bandwidth" if link.bytes_per_s else "")
    ]
    if link.flops_per_s:
        report.append(f"  one card: {link.flops_per_s / 1e12:.1f} TFLOP/s in half precision")
    for attempt in link.tries:
        ending = "works" if attempt.ok else f"failed: {attempt.said}"
        report.append(f"  {_name(attempt.backend, attempt.env)} ({attempt.seconds:.1f} s) {ending}")
    report += [f"  skipped {why}" for why in link.skipped]
    for name in dict.fromkeys(attempt.cause for attempt in link.tries if not attempt.ok):
        cause = link_causes.BY_NAME[name]
        report.append(f"  problem: {cause.what}; fix: {cause.fix}")
    return report
