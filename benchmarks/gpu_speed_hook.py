"""Inside a training of gpu_speed: gates that let it use the card in its turn, timed segments of
steps, and a summary of profiled ones.

A training waits before it touches the card, after its warm-up, and before each segment, until the
permit that gpu_speed writes has grown. NVIDIA_SPEED_NAME and NVIDIA_SPEED_FOLDER (variables with
this prefix reach a rank of ours) name the training and the folder of its files: NAME.ready,
NAME.permit, and NAME.said, a JSON line for each thing measured. A rank of ours loads this module by
a .pth file of its venv; a peer imports it.
"""

from __future__ import annotations

import importlib.abc
import importlib.util
import json
import os
import re
import time
import traceback
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

NAME, FOLDER, STEPS = "NVIDIA_SPEED_NAME", "NVIDIA_SPEED_FOLDER", "NVIDIA_SPEED_STEPS"
POLL_S = 0.01
WAITS_S = 1800.0  # then nobody is there who opens a gate
TOP_KERNELS, TOP_OPS, NAME_LENGTH = 60, 25, 150
# kinds of kernels, the first that matches; those of data/gpu_speed/h200.json, so that rows compare
KINDS = (
    ("attention", r"flash|fmha|attention|sdpa|efficient_attention|cudnn.*(sdpa|fprop|bprop)"),
    ("gemm", r"gemm|cutlass|nvjet|sm90_xmma|cublas|splitKreduce|ampere_.*_s\d+"),
    ("optimizer", r"multi_tensor|FusedAdam|adam"),
    ("nf4", r"dequant|kDequantize|kQuantize|bitsandbytes|kgemm_4bit"),
    ("norm", r"layer_norm|rms_norm|rmsnorm|_norm_"),
    ("softmax/loss", r"softmax|cross_entropy|nll"),
    ("reduce", r"reduce"),
    ("copy/cast", r"copy|cast|Memcpy|CatArray"),
    ("fill", r"Memset|fill"),
    ("index", r"index|gather|scatter|embedding"),
    ("elementwise", r"elementwise"),
    ("triton", r"triton|_kernel"),
)
# events of the profiler that are ranges of others
RANGES = ("ProfilerStep", "## ", "Optimizer.", "enumerate(", "Torch-Compiled", "CompiledFunction")
RANGES += ("PyTorch", "dataloader")
Event = tuple[int, int, str]  # start and end in ns, name


@dataclass(frozen=True)
class Segments:
    """Numbers of steps: of the warm-up, of each timed segment behind one that is not timed, of
    such segments, and of the profiled part."""

    warm: int
    timed: int
    rounds: int
    profiled: int

    @classmethod
    def from_text(cls, text: str) -> Segments:
        return cls(*map(int, text.split(",")))

    @property
    def text(self) -> str:
        return f"{self.warm},{self.timed},{self.rounds},{self.profiled}"

    def begin(self, segment: int) -> int:
        """The step behind which a segment begins; segment `rounds` is the profiled part."""
        return self.warm + segment * (self.timed + 1)

    @property
    def last(self) -> int:
        return self.begin(self.rounds) + 1 + self.profiled

    @property
    def max_steps(self) -> int:
        """One more than all, so that no training goes on to its export."""
        return self.last + 1


class Files:
    """The files through which a training and gpu_speed speak."""

    def __init__(self, folder: Path, name: str) -> None:
        self.ready, self.permit = folder / f"{name}.ready", folder / f"{name}.permit"
        self.said = folder / f"{name}.said"

    @classmethod
    def here(cls) -> Files:
        """Those of this training."""
        return cls(Path(os.environ[FOLDER]), os.environ[NAME])

    def say(self, at: str, **facts: Any) -> None:
        """Append a line; the reader takes whole lines only."""
        with self.said.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"at": at, "time": time.time(), **facts}) + "\n")

    def lines(self) -> list[dict[str, Any]]:
        """Every line so far."""
        if not self.said.exists():
            return []
        text = self.said.read_text(encoding="utf-8")
        return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]

    def wait(self, number: int) -> None:
        """Wait until so many permits are given. Raises SystemExit after half an hour."""
        until = time.monotonic() + WAITS_S
        while time.monotonic() < until:
            text = self.permit.read_text() if self.permit.exists() else ""
            if text and int(text) >= number:
                return
            time.sleep(POLL_S)
        raise SystemExit("no permit came")

    def allow(self, number: int) -> None:
        """Give so many permits."""
        aside = self.permit.with_suffix(".part")
        aside.write_text(str(number))
        aside.replace(self.permit)


def stop_before_the_card() -> None:
    """Say that this training is ready, and wait for the first permit."""
    files = Files.here()
    files.ready.write_text(str(os.getpid()))
    files.wait(1)
    files.say("began")


def rehearse() -> None:
    """On a driver without a card: compile Triton's kernels and launch none."""
    if not os.environ.get("NVIDIA_FAKE_CUDA"):
        return
    from triton.compiler.compiler import CompiledKernel

    def load_nothing(kernel: Any) -> None:
        kernel.module = kernel.function = kernel.n_regs = kernel.n_spills = 0
        kernel.n_max_threads, kernel._run = 1024, lambda *words, **named: None

    CompiledKernel._init_handles = load_nothing


# ---- a profile
# ---------------------------------------------------------------------------


def kind_of(kernel: str) -> str:
    return next((kind for kind, words in KINDS if re.search(words, kernel, re.I)), "other")


def busy_ns(events: Sequence[Event]) -> int:
    """The time in which at least one of them runs; they are in order."""
    busy, end = 0, 0
    for start, stop, _ in events:
        busy += max(0, stop - max(start, end))
        end = max(end, stop)
    return busy


def self_times(threads: Sequence[list[Event]]) -> tuple[Counter[str], Counter[str], Counter[str]]:
    """Of each name on the host: ns in itself, ns in all, calls."""
    own_ns: Counter[str] = Counter()
    total_ns: Counter[str] = Counter()
    calls: Counter[str] = Counter()
    for events in threads:
        events.sort(key=lambda event: (event[0], -event[1]))
        stack: list[Event] = []
        for event in events:
            start, stop, name = event
            while stack and stack[-1][1] <= start:
                stack.pop()
            own_ns[name] += stop - start
            total_ns[name] += stop - start
            if stack:
                own_ns[stack[-1][2]] -= stop - start
            calls[name] += 1
            stack.append(event)
    return own_ns, total_ns, calls


def device_summary(events: Sequence[Event], wall_s: float, steps: int) -> dict[str, Any]:
    """Kernels and copies of the profiled steps, by kind and by name; ms and counts of a step."""
    by_name: Counter[str] = Counter()
    by_kind: Counter[str] = Counter()
    counts: Counter[str] = Counter()
    for start, stop, name in events:
        by_name[name] += stop - start
        by_kind[kind_of(name)] += stop - start
        counts[name] += 1

    def ms(ns: int) -> float:
        return round(ns / 1e6 / steps, 3)

    copies = [name for name in counts if name.startswith("Mem")]
    return {
        "gpu_busy_ms_a_step": ms(busy_ns(events)),
        "gpu_idle_share_profiled": round(1 - busy_ns(events) / 1e9 / wall_s, 3) if wall_s else None,
        "gpu_kernels_a_step": round(
            sum(counts[name] for name in counts if name not in copies) / steps, 1
        ),
        "gpu_copies_a_step": {
            name: [round(counts[name] / steps, 1), ms(by_name[name])] for name in copies
        },
        "kernel_kinds_ms_a_step": {kind: ms(ns) for kind, ns in by_kind.most_common()},
        "top_kernels": [
            [name[:NAME_LENGTH], ms(ns), round(counts[name] / steps, 1)]
            for name, ns in by_name.most_common(TOP_KERNELS)
        ],
    }


def host_summary(threads: Sequence[list[Event]], steps: int) -> dict[str, Any]:
    """Launches, operators and time of the host in the profiled steps, of a step."""
    own_ns, total_ns, calls = self_times(threads)
    runtime = {name: count for name, count in calls.items() if re.match(r"cu(da)?[A-Z]", name)}

    def sums(names: Mapping[str, int], part: str) -> float:
        return round(sum(count for name, count in names.items() if part in name) / steps, 1)

    in_order = sorted(runtime.items(), key=lambda item: -item[1])[:TOP_OPS]
    return {
        "runtime_calls_a_step": {
            name: [round(count / steps, 1), round(total_ns[name] / 1e6 / steps, 3)]
            for name, count in in_order
        },
        "launches_a_step": sums(runtime, "Launch"),
        "aten_ops_a_step": sums(calls, "aten::"),
        "top_cpu_self": [
            [name[:80], round(ns / 1e6 / steps, 3), round(calls[name] / steps, 1)]
            for name, ns in own_ns.most_common(TOP_OPS)
        ],
    }


def summary(profiler: Any, wall_s: float, steps: int) -> dict[str, Any]:
    """Kernels and calls of the profiled steps, from kineto's raw events."""
    device: list[Event] = []
    threads: dict[int, list[Event]] = defaultdict(list)
    for event in profiler.profiler.kineto_results.events():
        begin = event.start_ns()
        item = (begin, begin + event.duration_ns(), event.name())
        if "CUDA" not in str(event.device_type()):
            threads[event.start_thread_id()].append(item)
        elif not item[2].startswith(RANGES):
            device.append(item)
    device.sort()
    return {
        "steps": steps,
        "wall_ms_a_step": round(1e3 * wall_s / steps, 3),
        **device_summary(device, wall_s, steps),
        **host_summary(list(threads.values()), steps),
    }


# ---- in a Trainer
# ---------------------------------------------------------------------------


@dataclass
class Counts:
    """The counts of a training: of each step its real tokens, computed tokens and loss, numbers
    or tensors that are read when the card is idle."""

    tokens: list[Any] = field(default_factory=list)
    computed: list[Any] = field(default_factory=list)
    losses: list[Any] = field(default_factory=list)

    def of_steps(self, first: int, last: int) -> dict[str, Any]:
        """Means of the steps behind `first` up to `last`."""
        count = max(last - first, 1)
        return {
            "tokens_a_step": round(sum(map(float, self.tokens[first:last])) / count, 1),
            "computed_tokens_a_step": round(sum(map(float, self.computed[first:last])) / count, 1),
        }


def memory() -> dict[str, Any]:
    """Bytes that torch's allocator has and had, and what all processes hold of the card."""
    import torch

    free, total = torch.cuda.mem_get_info()
    stats = torch.cuda.memory_stats()
    return {
        "peak_allocated": torch.cuda.max_memory_allocated(),
        "peak_reserved": torch.cuda.max_memory_reserved(),
        "reserved": torch.cuda.memory_reserved(),
        "card_used_by_all": total - free,
        "cuda_mallocs": stats.get("num_device_alloc", 0),
        "allocation_retries": stats.get("num_alloc_retries", 0),
    }


def callback(counts: Counts, facts: Callable[[], dict[str, Any]] = dict) -> Any:
    """A TrainerCallback that stops at the gates, times and profiles.

    `facts`: more that is said behind the profile. The callback stands behind the trainer's own."""
    import torch
    from transformers import TrainerCallback

    files, plan = Files.here(), Segments.from_text(os.environ[STEPS])

    def now() -> float:
        torch.cuda.synchronize()
        return time.perf_counter()

    class Gates(TrainerCallback):
        """The gates of one training."""

        def __init__(self) -> None:
            self.ends: list[float] = []
            self.timed_from = 0.0
            self.profiler: Any = None

        def on_train_begin(self, *_: Any, **__: Any) -> None:
            self.ends = [time.perf_counter()]
            files.say("loaded", **memory())

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            step = state.global_step
            self.ends.append(time.perf_counter())
            try:
                self.at(step)
            except Exception:
                files.say("failed", step=step, error=traceback.format_exc()[-1500:])
                raise

        def at(self, step: int) -> None:
            if step == plan.warm:
                self.say_warm()
            for segment in range(plan.rounds):
                if step == plan.begin(segment):
                    files.wait(2 + segment)
                elif step == plan.begin(segment) + 1:
                    self.timed_from = now()
                if step == plan.begin(segment + 1):
                    self.say_segment(segment, step)
            if step == plan.begin(plan.rounds):
                files.wait(2 + plan.rounds)
                self.profiler = started_profiler() if plan.profiled else None
                if not plan.profiled:
                    files.say("profiled")
                    files.say("profile", profile=None, **memory(), **facts())
            elif self.profiler is not None and step == plan.begin(plan.rounds) + 1:
                self.profiler.step()
                self.timed_from = now()
            elif self.profiler is not None and step == plan.last:
                self.say_profile(now() - self.timed_from)
            if step == plan.last:
                files.wait(3 + plan.rounds)

        def say_warm(self) -> None:
            now()
            steps_s = [round(b - a, 3) for a, b in zip(self.ends, self.ends[1:], strict=False)]
            losses = [round(float(loss), 5) for loss in counts.losses[: plan.warm]]
            files.say("warm", steps_s=steps_s, losses=losses, **memory())

        def say_segment(self, segment: int, step: int) -> None:
            seconds = now() - self.timed_from
            of_steps = counts.of_steps(step - plan.timed, step)
            files.say(
                "segment",
                segment=segment,
                ms_a_step=round(1e3 * seconds / plan.timed, 3),
                tokens_per_s=round(of_steps["tokens_a_step"] * plan.timed / seconds, 1),
                **of_steps,
                **memory(),
            )

        def say_profile(self, wall_s: float) -> None:
            files.say("profiled")  # the next may begin: what follows is on the host
            began = time.perf_counter()
            self.profiler.step()  # ends the trace
            try:
                profile = summary(self.profiler, wall_s, plan.profiled)
            except Exception:  # noqa: BLE001  # the times are kept whatever a profile has in it
                profile = {"error": traceback.format_exc()[-1500:]}
            profile["summary_took_s"] = round(time.perf_counter() - began, 2)
            files.say("profile", profile=profile, **memory(), **facts())

    return Gates()


def started_profiler() -> Any:
    """A profiler whose next step is its warm-up, and the one behind it all that is profiled. A
    driver without a card has no traces of it."""
    from torch.profiler import ProfilerActivity, profile, schedule

    activities = [ProfilerActivity.CPU]
    if not os.environ.get("NVIDIA_FAKE_CUDA"):
        activities.append(ProfilerActivity.CUDA)
    cycle = schedule(wait=0, warmup=1, active=1, repeat=1)
    profiler = profile(activities=activities, schedule=cycle)
    profiler.start()
    return profiler


# ---- a rank of ours
# ---------------------------------------------------------------------------


def watch(trainer: Any) -> None:
    """Add the gates to our trainer; for training.run.train(watch=)."""
    from transformers import TrainerCallback

    counts = Counts()

    class Meter(TrainerCallback):
        """Takes the step's counts from the meter before a log empties it."""

        def on_step_end(self, *_: Any, **__: Any) -> None:
            step = trainer.meter.steps[-1]
            counts.tokens.append(step["counts"][0])
            counts.computed.append(step["counts"][1])
            counts.losses.append(step["loss"])

    def facts() -> dict[str, Any]:
        peaks = trainer.peaks.of_all_ranks()
        return {
            "phases": {
                part: {"allocated": peak.allocated_bytes, "reserved": peak.reserved_bytes}
                for part, peak in peaks.items()
            }
        }

    trainer.add_callback(Meter())
    trainer.add_callback(callback(counts, facts))


class _AtImport(importlib.abc.MetaPathFinder):
    """Adds the gates to training.run when a rank imports it."""

    def find_spec(self, name: str, path: Any, target: Any = None) -> ModuleSpec | None:
        if name != "training.run":
            return None
        import sys

        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        assert spec is not None and spec.loader is not None
        run = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            run(module)
            _add_gates(module)

        # a rank has no way to be given a module: its loader adds the gates
        spec.loader.exec_module = exec_module
        return spec


def _add_gates(module: Any) -> None:
    train = module.train
    if train.__name__ == "gated":  # a venv over another loads this module twice
        return

    def gated(*words: Any, **named: Any) -> None:
        rehearse()
        stop_before_the_card()
        train(*words, watch=watch, **named)

    module.train = gated


def install() -> None:
    """Let the rank of ours in this process, if it becomes one, stop at the gates."""
    import sys

    sys.meta_path.insert(0, _AtImport())
