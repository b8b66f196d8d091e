"""The prediction for one candidate: bytes on the device and on the host, seconds per step. Values
in, values out.

The step's peak comes from its trace, what the allocator keeps on top of it from a replay, the rest
from constants with a source. A candidate whose step was not traced is judged by its model states
alone, and the plan says so.
"""

import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from launch.base.text import size
from launch.predict import budgets, sharding
from launch.predict.facts import Facts, Installed
from launch.predict.memory import allocator as memory_allocator
from launch.predict.memory import context as memory_context
from launch.predict.memory import host_job, loading, traced_steps
from launch.predict.memory import phases as memory_phases
from launch.predict.time import rates, timing
from launch.predict.time.padding import StepSplit
from launch.predict.time.timing import StepWork, TimeEstimate
from launch.predict.traces import Trace
from launch.schema.levers import TRIED
from launch.schema.machine import NOT_MEASURED, CardFigures, Machine
from launch.schema.phases import DeviceMemory, DevicePhases, MemoryPhases, Phase
from launch.schema.plan import PAGED, MemoryEstimate, Peak, Strategy

# A communicator of two ranks, and of more: github.com/NVIDIA/nccl issue 964, A100.
_NCCL_BYTES, _NCCL_MORE_BYTES = 544 << 20, 688 << 20

_WIDTH_NAMES = ("hidden_size", "n_embd", "d_model")  # keys of a config for the features of a token
_LAYER_NAMES = ("num_hidden_layers", "n_layer", "num_decoder_layers", "num_layers")
# For backward, without checkpointing: inputs of the norms, of attention's and of the MLP's products
_KEPT_TENSORS_A_LAYER = 8
_INSIDE_MLP = 2  # tensors among them that an MLP in parts does not store

# Share of a price that a step takes at least: where layers differ, a price does not follow memory
# that one layer frees for another (benchmarks/results/composed.md)
_SEAMS = 0.985

_NO_PHASES = MemoryPhases()
# Basis of a verdict: the candidate's model states; least memory and work of its step, by the
# records of similar steps; its own step; a replay of the allocator in a run of such steps
_Basis = Literal["states", "price", "step", "replay"]


@dataclass(frozen=True)
class Judged:
    """A candidate and its prediction; `misses` names the budget that it exceeds, with numbers."""

    candidate: Strategy
    memory: MemoryEstimate
    time: TimeEstimate | None
    budget_bytes: int
    misses: str | None
    excess: float = 0.0  # times the budget that it exceeds most
    phases: MemoryPhases = _NO_PHASES  # exact prediction of a traced step
    by: _Basis = "states"

    @property
    def seconds(self) -> float:
        return self.time.step_s if self.time else 0.0


def by_states(facts: Facts, candidate: Strategy) -> Judged:
    """The candidate judged by what no step changes: model states on the device; on the host what
    processes import, build and save. What ran out of memory before rules out steps alone."""
    oom = replace(facts.history.oom, ran_out=())
    facts = replace(facts, history=replace(facts.history, oom=oom))
    memory = _states(facts, candidate)
    if facts.traces is not None:
        is_open = facts.recipe.training.dataloader_num_workers is None
        fewest = replace(candidate, dataloader_num_workers=0) if is_open else candidate
        memory, _ = host_job.with_host(facts, fewest, memory, None)
    return _judged(facts, candidate, memory, None)


def at_least(facts: Facts, candidate: Strategy) -> Judged:
    """The candidate judged by what its step holds at least of its longest rows, without composing
    it: by its price where there is one, else by the least that any model holds."""
    states, price = _states(facts, candidate), facts.price(candidate)
    rows = candidate.per_device_train_batch_size
    peak = Peak("forward", "", {"activations": _least_activation_bytes(facts, candidate)})
    state_bytes = states.model_state_bytes
    if candidate.gradient_accumulation_steps == 1:  # no gradients of a micro-batch before
        state_bytes -= states.gradients_bytes
    if price is not None and price.moments:
        highest = price.peak(rows, None)
        if candidate.levers.every_n_layers > 1:
            parts = {name: int(_SEAMS * part) for name, part in highest.parts.items()}
            highest = replace(highest, parts=parts)
        if candidate.launch_mode.is_whole:  # of a price all weights are on the device
            on_device = state_bytes + facts.streamed(candidate).saved_bytes
            more_bytes = max(highest.allocated_bytes - on_device, 0)
            highest = replace(highest, parts={"activations": more_bytes})
        peak = max(peak, highest, key=lambda each: each.allocated_bytes)
    peak = replace(peak, parts={"states": state_bytes, **peak.parts})
    memory = replace(states, peak=peak, outside_bytes=_outside(facts, candidate)[0])
    if candidate.device == "cpu":
        memory, _ = host_job.with_host(facts, candidate, memory, price, (rows, None))
    time = price and _time(facts, candidate, price, facts.mean_split(candidate))
    judged = _judged(facts, candidate, memory, time)
    is_over = memory.device_bytes > judged.budget_bytes or candidate.device == "cpu"
    misses = f"at least {judged.misses}" if judged.misses and is_over else judged.misses
    return replace(judged, misses=misses, by="price" if price else "states")


def _least_activation_bytes(facts: Facts, candidate: Strategy) -> int:
    """Bytes that the longest rows take at least: the input of each layer, which checkpointing keeps
    too, and the logits of one chunk."""
    config, (_, target) = facts.model.size.config, facts.question(candidate).lengths
    width, layers = (
        next((config[name] for name in names if config.get(name)), 0)
        for names in (_WIDTH_NAMES, _LAYER_NAMES)
    )
    levers, share = candidate.levers, candidate.levers.checkpointed_share
    on_device = 0 if levers.activation_offloading else share
    stored = _KEPT_TENSORS_A_LAYER - (levers.tiled_mlp_num_shards > 1) * _INSIDE_MLP
    tensors = on_device + (1 - share) * stored
    element_bytes = sharding.computed_element_bytes(facts.recipe.model, candidate)
    of_layers = int(tensors * layers * width * element_bytes)
    rows = candidate.per_device_train_batch_size
    most = facts.most_targets(candidate)
    tokens = max(batch.rows for batch in most.batches(rows)) * target
    positions = (
        most.of_part(rows) if levers.logits_at_targets else int(tokens) // levers.num_output_chunks
    )
    return int(tokens * of_layers) + positions * config["vocab_size"] * 4


def judge(facts: Facts, candidate: Strategy, exact: bool = True) -> Judged:
    """Predict one candidate and compare it with both budgets; `exact` replays the allocator, and
    traces what else than the longest rows the highest peak may be of, which takes longer."""
    states = _states(facts, candidate)
    trace = facts.trace(candidate)
    rows = candidate.per_device_train_batch_size
    traces = [(trace, rows)]
    if exact:
        steps = traced_steps.list_steps(facts, candidate)
        facts.fetch_steps(
            question for step in steps for question in (step.question, step.first) if question
        )
        traces = [(traced_steps.trace(facts, step, candidate), step.rows) for step in steps]
    predictions = [
        _with_peak(facts, candidate, states, step_trace, rows, exact)
        for step_trace, rows in traces
        if step_trace is not None
    ]
    if trace is None or len(predictions) < len(traces):
        return _judged(facts, candidate, states, None)
    memory, of_highest = max(
        predictions, key=lambda each: (each[0].device_bytes, each[0].host_bytes)
    )
    fullest, _ = max(predictions, key=lambda each: each[0].host_bytes)
    pinned = max(memory.pinned_bytes for memory, _ in predictions)
    memory = replace(memory, host=fullest.host, host_phase=fullest.host_phase, pinned_bytes=pinned)
    judged = _judged(
        facts, candidate, memory, _time(facts, candidate, trace, facts.mean_split(candidate))
    )
    on_device = memory_phases.highest([phases.device for _, phases in predictions])
    phases = replace(of_highest, device=on_device)
    return replace(judged, phases=phases, by="replay" if exact else "step")


def share_of_longest(facts: Facts, candidate: Strategy) -> float:
    """Predicted seconds of a step over those of rows that are all the longest; 1: not known."""
    trace, split = facts.trace(candidate), facts.mean_split(candidate)
    if trace is None or split is None:
        return 1.0
    return (
        _time(facts, candidate, trace, split).step_s / _time(facts, candidate, trace, None).step_s
    )


def _time(facts: Facts, candidate: Strategy, trace: Trace, split: StepSplit | None) -> TimeEstimate:
    copied = tuple(layer.bytes for layer in facts.streamed(candidate).layers)
    time = timing.estimate(
        StepWork(trace.passes, trace.least_share, copied),
        candidate,
        facts.model.size,
        facts.model.full_copy,
        rates.look_up(facts.machine, candidate),
        facts.installed.link,
        split,
        card_figures(facts.machine, facts.installed, candidate),
        _mean_targets(facts, candidate, trace, split),
    )
    return time.corrected(facts.history.correction(candidate, time.waits_share))


def evaluation_s(facts: Facts, candidate: Strategy) -> float | None:
    """Predicted seconds of a pass over the held-out rows; None where there are none, or they are
    not counted, or no step is traced."""
    trace, rows = facts.trace(candidate), facts.rows
    if trace is None or rows.eval_counts is None or not rows.held_out:
        return None
    # a step of one micro-batch, whose only pass is the evaluation's: it is never compiled
    alike = replace(
        candidate.with_levers(torch_compile=False, batch_by_tokens=False),
        per_device_train_batch_size=rows.evaluated_samples(candidate),
        gradient_accumulation_steps=1,
    )
    facts = replace(facts, rows=replace(rows, counts=rows.eval_counts))
    passes = replace(trace.passes, micro_steps=[trace.passes.evaluation], update=())
    trace = replace(trace, passes=passes, targets=trace.eval_targets)
    time = _time(facts, alike, trace, facts.mean_split(alike))
    moves = candidate.launch_mode.shards_parameters or candidate.levers.streamed_layers > 0
    # weights are gathered, or come from the host, in one of the two passes
    moved_s = moves * (time.communication_s + time.offload_s) / 2
    batch_s = time.compute_s + time.memory_s + time.launch_s + moved_s
    return batch_s * math.ceil(rows.held_out / alike.effective_batch_size)


def _mean_targets(
    facts: Facts, candidate: Strategy, trace: Trace, split: StepSplit | None
) -> float:
    """Targets of a part of the logits, of a mean micro-batch; without a split, and unless rows are
    packed, of the longest rows."""
    rows, steps = split or StepSplit(
        candidate.per_device_train_batch_size, candidate.gradient_accumulation_steps
    )
    mean = facts.mean_targets(candidate, steps)
    if mean is None:
        mean = rows * trace.targets.length
    elif split is None and not facts.recipe.data.packing:
        mean = trace.targets.count(candidate.per_device_train_batch_size)
    return mean / candidate.levers.num_output_chunks


def card_figures(machine: Machine, installed: Installed, candidate: Strategy) -> CardFigures:
    """The measurements of the cards that a candidate uses, if all of them are of the measured
    kind; else none."""
    measured = installed.import_memory.card
    cards = machine.gpus[: candidate.processes_per_machine]
    is_same = candidate.device == "cuda" and {gpu.name for gpu in cards} == {measured.name}
    return measured if is_same else NOT_MEASURED


def _judged(
    facts: Facts, candidate: Strategy, memory: MemoryEstimate, time: TimeEstimate | None
) -> Judged:
    budget = budgets.budget_bytes(facts, candidate)
    of_host = budgets.host_bytes(candidate, memory) / max(
        budgets.host_budget_bytes(facts.recipe, facts.machine), 1
    )
    of_device = memory.device_bytes / max(budget, 1) if candidate.device == "cuda" else 0.0
    return Judged(
        candidate,
        memory,
        time,
        budget,
        budgets.misses(facts, candidate, memory, budget),
        max(of_device, of_host),
    )


def _states(facts: Facts, candidate: Strategy) -> MemoryEstimate:
    model, streamed = facts.model, facts.streamed(candidate)
    states = sharding.per_rank(
        model.full_copy,
        model.parameters,
        facts.recipe,
        candidate,
        model.size.family,
    )
    if not streamed.layers:
        return states
    return replace(
        states,
        weights_bytes=states.weights_bytes - streamed.saved_bytes,
        offloaded_bytes=streamed.host_bytes // candidate.processes_per_machine,  # they share it
    )


def _with_peak(
    facts: Facts,
    candidate: Strategy,
    states: MemoryEstimate,
    trace: Trace,
    num_samples: int,
    exact: bool,
) -> tuple[MemoryEstimate, MemoryPhases]:
    """The memory of the run, and, if it is `exact`, of each part."""
    evaluated = facts.rows.evaluated_samples(candidate) if facts.recipe.data.holds_out else None
    counts = num_samples, evaluated
    memory = replace(
        states,
        peak=trace.peak(*counts),
        step_allocated_bytes=trace.peak(num_samples, None).allocated_bytes,
    )
    run = None
    if exact:
        order = loading.choose_order(
            facts.recipe,
            candidate,
            facts.model.parameters,
            facts.model.size.family,
            states.weights_bytes,
            budgets.budget_bytes(facts, candidate),
            facts.model.stored,
            facts.streamed(candidate),
        )
        run = memory_phases.RunEvents(trace, *counts, order)
    memory, by_phase = host_job.with_host(facts, candidate, memory, trace, counts, run)
    on_host = memory_phases.on_host(by_phase if exact else {})
    if candidate.device == "cpu":
        on_device = (
            _on_cpu(candidate, run.allocated_bytes, by_phase["load"]) if run else DevicePhases()
        )
        return memory, MemoryPhases(on_device, on_host)
    outside, outside_source = _outside(facts, candidate)
    reserved, of_step = memory.allocated_bytes, memory.step_allocated_bytes
    on_device = DevicePhases()
    if run is not None:
        available_bytes = budgets.budget_bytes(facts, candidate) - outside
        assert memory.peak is not None
        paged = memory.peak.parts.get(PAGED, 0)
        expands = facts.installed.allocator.expandable_segments or bool(
            facts.allocator_settings(candidate)
        )
        config = replace(facts.installed.allocator, expandable_segments=expands)
        by_part = run.replays(config, available_bytes - paged)
        replays = [replay for _, replay in by_part]
        until_step = replays[: [phase for phase, _ in by_part].index("step") + 1]
        memory = _in_blocks(memory, replays, until_step, paged)
        reserved = max(replay.peak_reserved_bytes for replay in replays) + paged
        of_step = max(replay.peak_reserved_bytes for replay in until_step)
        on_device = memory_phases.on_device(by_part, outside + paged)
    memory = replace(
        memory,
        fragmentation_bytes=max(reserved - memory.allocated_bytes, 0),
        outside_bytes=outside,
        outside_source=outside_source,
        step_reserved_bytes=max(of_step, memory.step_allocated_bytes),
    )
    free = min(gpu.free_bytes for gpu in facts.machine.gpus[: candidate.processes_per_machine])
    # the error bar is part of what planning leaves free
    margin_left_free = int(free * (1 - facts.recipe.launch.vram_fraction))
    margin = max(
        int(facts.history.error_margin.fraction * memory.reserved_bytes) - margin_left_free,
        int(facts.history.oom.device * memory.reserved_bytes),
        0,
    )
    return replace(memory, margin_bytes=margin), MemoryPhases(on_device, on_host)


def _outside(facts: Facts, candidate: Strategy) -> tuple[int, str]:
    """Bytes of a card that are not its allocator's, and where their number is from."""
    if candidate.device == "cpu":
        return 0, ""
    outside, of_context = memory_context.context_bytes(
        facts.machine.gpus[0], facts.installed.import_memory.card
    )
    source = f"context {size(outside)}, {of_context}"
    if candidate.backend == "nccl":
        outside += _NCCL_BYTES if candidate.num_processes == 2 else _NCCL_MORE_BYTES
    return outside, source


def _in_blocks(
    memory: MemoryEstimate,
    replays: Sequence[memory_allocator.Replay],
    until_step: Sequence[memory_allocator.Replay],
    paged: int,
) -> MemoryEstimate:
    """Count whole blocks of the allocator, as torch.cuda.max_memory_allocated does, where the peak
    has the bytes that were asked for. `paged`: bytes of states outside the allocator."""
    assert memory.peak is not None
    allocated = max(replay.peak_allocated_bytes for replay in replays) + paged
    rounding = {"rest of blocks": max(allocated - memory.peak.allocated_bytes, 0)}
    return replace(
        memory,
        peak=replace(memory.peak, parts={**memory.peak.parts, **rounding}),
        step_allocated_bytes=max(replay.peak_allocated_bytes for replay in until_step),
        gives_cache_back=any(replay.retries for replay in replays),
    )


def _on_cpu(
    candidate: Strategy, live: Mapping[Phase, int], load: Mapping[str, int]
) -> DevicePhases:
    """The bytes of tensors of a rank on a CPU; while it loads, of what it builds too."""
    built = sum(load.get(cause, 0) for cause in ("weights", "while building"))
    built //= candidate.processes_per_machine
    return replace(memory_phases.on_cpu(live), load=DeviceMemory(built, built, built))


def missing_bytes(facts: Facts, judged: Judged) -> int:
    """The bytes by which a prediction exceeds the memory that its rows are in; what else it
    exceeds counts as infinitely many."""
    candidate, memory = judged.candidate, judged.memory
    if candidate.device == "cpu":
        budget = budgets.host_budget_bytes(facts.recipe, facts.machine)
        return (budgets.host_bytes(candidate, memory) - budget) // candidate.processes_per_machine
    if budgets.misses_host(facts, candidate, memory):
        return sys.maxsize
    return memory.device_bytes - judged.budget_bytes


def describe(candidate: Strategy) -> str:
    """A candidate in a few words: mode, ranks, batch, levers that save memory."""
    batch = f"{candidate.per_device_train_batch_size} x {candidate.gradient_accumulation_steps}"
    parts = [f"{candidate.mode} x{candidate.num_processes}, batch {batch}"]
    on = (row for row in TRIED if row.read(candidate.levers) != row.plain)
    return ", ".join([*parts, *(row.says(candidate.levers) for row in on)])
