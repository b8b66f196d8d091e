"""The job whose host RAM is predicted, from the facts of a plan and a candidate; on CPUs with what
a rank's heap holds of its step."""

import math
from collections.abc import Mapping
from dataclasses import replace

from launch.predict import sharding
from launch.predict.facts import Facts, Model, Rows
from launch.predict.memory import host_memory, malloc, onednn
from launch.predict.memory.phases import RunEvents
from launch.predict.optimizers import has_4_bits
from launch.predict.parameters import Shapes
from launch.predict.traces import Trace
from launch.predict.trained_parameters import trainable_shapes
from launch.schema.model_sections import DTYPE_BYTES
from launch.schema.plan import MemoryEstimate, Strategy
from launch.schema.recipe import Recipe

Counts = tuple[int, int | None]  # samples of a micro-batch, and of an evaluation's
# bytes of a block -> those of it that are written; and bytes of a copy of it
_Reduced = tuple[dict[int, int], int]


def with_host(
    facts: Facts,
    candidate: Strategy,
    memory: MemoryEstimate,
    trace: Trace | None,
    counts: Counts = (0, None),
    run: RunEvents | None = None,
) -> tuple[MemoryEstimate, Mapping[str, Mapping[str, int]]]:
    """Add the job's host RAM, and return that of each part of the run; without a trace, all but the
    memory of a step on CPUs. `run`: the events of an exact prediction."""
    recipe, model = facts.recipe, facts.model
    live, holes, by_gloo = _of_a_cpu(
        _reduced(recipe, model, candidate), candidate, trace, counts, run
    )
    streamed = facts.streamed(candidate)
    trained = trainable_shapes(
        model.parameters, recipe.model.freeze, recipe.lora, model.size.family
    )
    job = host_memory.HostJob(
        recipe=recipe,
        strategy=candidate,
        model=model.size,
        # streamed weights have a cause of their own
        states=replace(memory, offloaded_bytes=0) if streamed.layers else memory,
        embedding_bytes=math.prod(next(iter(model.parameters.values())))
        * DTYPE_BYTES[recipe.model.dtype],
        copied_by_gloo_bytes=by_gloo,
        offloaded_activations=[
            math.ceil(size[0] + counts[0] * size[1])
            for size in (trace.passes.offloaded if trace else ())
        ],
        streamed=[layer.bytes for layer in streamed.layers],
        tensor_bytes=live,
        holes_bytes=holes,
        trained_elements=list(map(math.prod, trained.values())),
        kernels=_kernels(recipe, model, facts.rows, candidate, trained),
        rows=facts.rows.count,
        stored=model.stored,
        unquantised_elements=sum(
            math.prod(sides)
            for name, sides in model.parameters.items()
            if not has_4_bits(name, model.size.family)
        ),
        quantised_elements=max(
            (
                math.prod(sides)
                for name, sides in model.parameters.items()
                if has_4_bits(name, model.size.family)
            ),
            default=0,
        ),
        counts_mappings=bool(facts.machine.mappings_count),
    )
    by_phase = host_memory.estimate(job, facts.installed.import_memory)
    fullest = host_memory.fullest(by_phase)
    pinned = host_memory.pinned_bytes(job)
    memory = replace(memory, host=by_phase[fullest], host_phase=fullest, pinned_bytes=pinned)
    return memory, by_phase


def _reduced(recipe: Recipe, model: Model, candidate: Strategy) -> _Reduced:
    """DeepSpeed's bucket, which is as large as asked for, with the bytes that are written of it: as
    far as there are gradients. And those of the copy that Gloo makes of it."""
    if candidate.launch_mode.engine != "deepspeed":
        return {}, 0
    element_bytes = sharding.computed_element_bytes(recipe.model, candidate)
    filled = min(model.size.trainable_parameters, sharding.BUCKET_ELEMENTS) * element_bytes
    copied = filled if candidate.backend == "gloo" and candidate.launch_mode.zero_stage == 3 else 0
    return {sharding.BUCKET_ELEMENTS * element_bytes: filled}, copied


def _of_a_cpu(
    reduced: _Reduced,
    candidate: Strategy,
    trace: Trace | None,
    counts: Counts,
    run: RunEvents | None,
) -> tuple[dict[str, int], dict[str, int], int]:
    """By phase, the bytes of a rank's tensors, and those that malloc keeps of freed ones; and what
    Gloo's threads keep of a copy."""
    written, copied = reduced
    in_threads = 0
    if copied < malloc.MMAP_THRESHOLD_BYTES:  # small blocks stay in the arenas of two threads
        copied, in_threads = 0, 2 * copied
    if trace is None or not trace.moments or candidate.device != "cpu":  # maybe it has work alone
        return {}, {}, in_threads + copied
    untouched = sum(size - touched for size, touched in written.items())
    of_step = {name: peak.allocated_bytes for name, peak in trace.peaks(*counts).items()}
    live = {"evaluation": of_step.pop("evaluation", 0), "step": max(of_step.values())}
    live["first_step"], resident = live["step"], dict[str, int]()
    if run is not None:
        live |= run.allocated_bytes
        resident = run.resident_bytes(written, candidate.backend == "gloo")
    live = {part: max(size - untouched, 0) for part, size in live.items()}
    holes = {part: max(size - live[part], 0) for part, size in resident.items()}
    beside = max(of_step.get("backward", 0) + copied - max(of_step.values()), 0)
    return live | {part: live[part] + beside for part in ("first_step", "step")}, holes, in_threads


def _kernels(recipe: Recipe, model: Model, rows: Rows, candidate: Strategy, trained: Shapes) -> int:
    """The kernels that oneDNN compiles for a CPU's products; while rows are not counted, those of
    one length."""
    counts, data, training = rows.counts, recipe.data, recipe.training
    lengths = 1.0
    if counts is not None and not data.packing:
        at_once, ranks = candidate.per_device_train_batch_size, candidate.num_processes
        micro_batches = (
            training.max_steps * candidate.gradient_accumulation_steps
            if training.max_steps > 0
            else counts["rows"] * training.num_train_epochs / at_once / ranks
        )
        lengths = onednn.padded_lengths(
            [source for source, _ in counts["lengths"]],
            1 if data.group_by_length or candidate.levers.batch_by_tokens else at_once,
            micro_batches,
        )
    return onednn.kernels(model.parameters, trained, lengths, recipe.data.holds_out)
