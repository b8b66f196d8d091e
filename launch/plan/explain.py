"""What a plan says of itself: why it is as it is, and every value that differs from what was asked
for."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from launch.base.text import size
from launch.plan import candidates, kernels
from launch.plan.candidates import LaunchConstraints
from launch.predict.estimate import Judged, PlanContext, describe
from launch.probe import architectures
from launch.schema.machine import GIB, Link, Machine
from launch.schema.plan import Change, Switch
from launch.schema.plan import Strategy as Candidate
from launch.schema.recipe import Recipe


def why(context: PlanContext, chosen: Judged, constraints: LaunchConstraints) -> tuple[str, ...]:
    """Where it runs and what for, what the ranks talk over, what could not be predicted."""
    candidate = chosen.candidate
    return (
        *_where(context.recipe, context.machine, candidate, constraints),
        *_link_why(context, candidate),
        *_trace_why(context, chosen),
    )


def switches(
    context: PlanContext, candidate: Candidate, constraints: LaunchConstraints
) -> tuple[Switch, ...]:
    """Which kernels run, and why."""
    gpus = context.machine.gpus[: candidate.num_processes] if candidate.device == "cuda" else ()
    words = constraints.no_flash_attn, constraints.no_compiler
    return tuple(kernels.switches(context.recipe, context.shape.config, candidate, gpus, *words))


def changes(
    context: PlanContext,
    candidate: Candidate,
    judged: Sequence[tuple[Judged, str]],
    constraints: LaunchConstraints,
) -> list[Change]:
    """Each value that is not the recipe's, with the reason."""
    return [
        *_precision_changes(context.recipe, context.machine, candidate),
        *_batch_changes(context, candidate, judged, constraints),
        *_rate_changes(context.recipe, candidate),
        *_compile_changes(context.recipe, candidate, constraints),
    ]


def _where(
    recipe: Recipe, machine: Machine, candidate: Candidate, constraints: LaunchConstraints
) -> Iterator[str]:
    if candidate.device == "cpu":
        cause = (
            "asked for"
            if constraints.force_cpu or recipe.launch.mode in ("cpu", "multi_cpu")
            else machine.gpus_reason
        )
        yield f"device cpu: {cause}"
        if candidate.processes_per_machine > machine.cpu_count:
            yield (
                f"{candidate.processes_per_machine} processes share {machine.cpu_count} CPU(s):"
                " slower than one each"
            )
    else:
        yield f"{candidate.num_processes} GPU(s): {machine.gpus_reason}"
        yield from architectures.attention_notes(machine.gpus[: candidate.num_processes])
    if candidate.num_machines > 1 and recipe.launch.nodes > 1:
        launch = recipe.launch
        meet = f"{launch.main_process_ip}:{launch.main_process_port}"
        yield (
            f"{launch.nodes} machines, this one is number {launch.machine_rank}; they meet at"
            f" {meet}"
        )
    if candidate.offloads:
        yield (
            "optimizer states in host RAM, updated there by the same optimizer: slower, and no"
            " compiled op is needed"
        )
    if recipe.launch.assume_fits:
        yield "launch.assume_fits: predicted memory was not checked against available memory"
    if constraints.force_gloo and candidate.num_processes == 1:
        yield "ACCELERATE_USE_GLOO=1 has no effect on one process"
    elif constraints.force_gloo:
        yield "backend gloo: ACCELERATE_USE_GLOO=1"
    if quantized := recipe.quantized(candidate.mixed_precision):
        double = ", their scales in 8" if quantized.bnb_4bit_use_double_quant else ""
        yield (
            f"quantization: linear weights in 4 bits ({quantized.bnb_4bit_quant_type}){double},"
            f" computed in {quantized.bnb_4bit_compute_dtype}; the rest keeps model.dtype"
            f" {recipe.model.dtype}"
        )
    num_workers = candidates.workers(
        recipe, machine, candidate.processes_per_machine, candidate.device == "cuda"
    )
    if candidate.dataloader_num_workers < num_workers:
        yield (
            f"data workers {candidate.dataloader_num_workers} instead of {num_workers}: host RAM"
            " has no room for more"
        )
    elif recipe.training.dataloader_num_workers is None:
        yield f"data workers {candidate.dataloader_num_workers}: " + (
            "the rows are mapped and padding them is cheap; workers would take cores from training"
            if candidate.device == "cpu"
            else f"{machine.cpu_count} CPUs over {candidate.num_processes} process(es)"
        )


def _link_why(context: PlanContext, candidate: Candidate) -> Iterator[str]:
    """What the ranks talk over, and what it costs where every sample is as long as it may be."""
    link, shape = context.link, context.shape
    if candidate.device == "cpu" or candidate.num_processes == 1:
        return
    if link is None:
        yield "link: not tested; `python -m launch doctor` or the first run does"
        return
    yield f"link: {link.reason}"

    tokens = candidate.effective_batch_size * context.recipe.data.max_length
    # activations' gradients, weights' gradients
    backward = shape.parameters + shape.trainable_parameters
    again = shape.parameters if candidate.activation_checkpointing else 0
    step_flops = 2.0 * tokens * (shape.parameters + backward + again)
    cost = cost_line(link, context.whole.gradients_bytes, step_flops, candidate.num_processes)
    if cost:
        yield cost


def _trace_why(context: PlanContext, chosen: Judged) -> Iterator[str]:
    if context.traces is not None and context.traces.failure:
        yield f"activations are not predicted: {context.traces.failure}"
    if chosen.time:
        yield f"time: {chosen.time.step_s:.3g} s a step predicted ({chosen.time.reason})"


def _precision_changes(recipe: Recipe, machine: Machine, candidate: Candidate) -> list[Change]:
    if recipe.training.bf16 and candidate.mixed_precision == "fp16":
        reason = architectures.without_bf16(machine.gpus[: candidate.num_processes])
        return [Change("training.bf16", "bf16", "fp16 with a loss scaler", reason)]
    return []


def _rate_changes(recipe: Recipe, candidate: Candidate) -> Iterator[Change]:
    """A rate that was asked to follow the effective batch."""
    training, batch = recipe.training, candidate.effective_batch_size
    rate = training.learning_rate_at(batch)
    if rate != training.learning_rate:
        how = {"linear": "in proportion to", "sqrt": "with the square root of"}[
            training.learning_rate_scaling
        ]
        reason = (
            f"{how} the effective batch, {batch} instead of {training.learning_rate_batch_size}, as"
            " asked for"
        )
        yield Change("training.learning_rate", f"{training.learning_rate:g}", f"{rate:g}", reason)


def _compile_changes(
    recipe: Recipe, candidate: Candidate, constraints: LaunchConstraints
) -> Iterator[Change]:
    if recipe.training.compiles and not candidate.torch_compile:
        reason = f"torch.compile cannot work here: {constraints.no_compiler}"
        yield Change("training.torch_compile", "true", "false", reason)


def _batch_changes(
    context: PlanContext,
    candidate: Candidate,
    judged: Sequence[tuple[Judged, str]],
    constraints: LaunchConstraints,
) -> list[Change]:
    """Said where the batch is cut in another way than it was asked for: the effective batch is
    held."""
    training, held = (
        context.recipe.training,
        f"the effective batch stays {candidate.effective_batch_size}",
    )
    found: list[Change] = []
    asked, runs = training.per_device_train_batch_size, candidate.per_device_train_batch_size
    reasons = [
        one.misses
        for one, _ in judged
        if one.misses and one.candidate.per_device_train_batch_size == asked
    ]
    missed = (
        f"{asked} samples at once need {reasons[0]}" if reasons else "the fastest by prediction"
    )
    tuned = constraints.tuned and replace(
        constraints.tuned, per_device_eval_batch_size=candidate.per_device_eval_batch_size
    )
    if tuned == replace(
        candidate, dataloader_num_workers=tuned.dataloader_num_workers if tuned else 0
    ):
        missed = "tuned: the fastest of real trials on this machine"
    if asked != runs:
        reason = f"{missed}; {held}"
        found.append(Change("training.per_device_train_batch_size", str(asked), str(runs), reason))
    elif training.gradient_accumulation_steps != candidate.gradient_accumulation_steps:
        instead = candidate.gradient_accumulation_steps // training.gradient_accumulation_steps
        reason = (
            f"{candidate.num_processes} process instead of {candidate.num_processes * instead}:"
            f" {held}"
        )
    else:
        reason = ""
    if training.gradient_accumulation_steps != candidate.gradient_accumulation_steps:
        steps = (
            str(training.gradient_accumulation_steps),
            str(candidate.gradient_accumulation_steps),
        )
        found.append(Change("training.gradient_accumulation_steps", *steps, reason))
    if candidate.activation_checkpointing and not training.activation_checkpointing:
        reason = f"{missed}; recomputing activations changes no result"
        found.append(Change("training.activation_checkpointing", "false", "true", reason))
    if candidate.num_output_chunks > (training.num_output_chunks or 1):
        reason = f"{missed}; the loss is the same sum, its logits made in parts"
        found.append(
            Change("training.num_output_chunks", "1", str(candidate.num_output_chunks), reason)
        )
    wanted = training.per_device_eval_batch_size
    if wanted is not None and wanted != candidate.per_device_eval_batch_size:
        runs_eval = str(candidate.per_device_eval_batch_size)
        reason = f"evaluating {wanted} samples at once does not fit; the result is the same"
        found.append(Change("training.per_device_eval_batch_size", str(wanted), runs_eval, reason))
    return found


def table(judged: Sequence[tuple[Judged, str]]) -> list[str]:
    """One line a candidate: what it is, what it would take, why it lost or won."""
    rows = [("candidate", "live peak", "s/step", "")]
    for one, verdict in judged:
        seconds = f"{one.time.step_s:.3g}" if one.time else "?"
        rows.append((describe(one.candidate), size(one.memory.allocated_bytes), seconds, verdict))
    widths = [max(len(row[at]) for row in rows) for at in range(3)]
    return [
        f"{row[0]:<{widths[0]}}  {row[1]:>{widths[1]}}  {row[2]:>{widths[2]}}  {row[3]}".rstrip()
        for row in rows
    ]


def all_reduce_s(link: Link, gradient_bytes: int, num_processes: int) -> float:
    """Seconds of one all-reduce of the gradients over a link that works.

    bytes_per_s is bus bandwidth: bytes x 2(N-1)/N / seconds. It hardly depends on N, so N may
    differ from the test's.
    """
    assert link.bytes_per_s
    return gradient_bytes * 2 * (num_processes - 1) / num_processes / link.bytes_per_s


def cost_line(link: Link, gradient_bytes: int, step_flops: float, num_processes: int) -> str | None:
    """What the all-reduce costs per optimizer step, and whether one card would be faster; None
    without a link.

    `step_flops` are those of the whole effective batch. Compute is taken at the card's matmul
    speed, which a real step does not reach, and nothing of the all-reduce as hidden behind the
    backward pass: the verdict is against several cards where it is close.
    """
    if link.backend is None or not link.bytes_per_s or num_processes < 2:
        return None
    reduce_s = all_reduce_s(link, gradient_bytes, num_processes)
    said = (
        f"all-reduce of {gradient_bytes / GIB:.2f} GiB at {link.bytes_per_s / 1e9:.2f} GB/s"
        f" costs {_seconds(reduce_s)} per optimizer step"
    )
    if not link.flops_per_s:
        return said
    alone_s = step_flops / link.flops_per_s
    together_s = reduce_s + alone_s / num_processes
    if together_s <= alone_s:
        return said
    return (
        f"{said}; at matmul speed {num_processes} cards then need {_seconds(together_s)} per step"
        f" and one card {_seconds(alone_s)}: one is faster (--launch.num_processes=1), or a larger"
        " effective batch"
    )


def _seconds(seconds: float) -> str:
    return f"{seconds:.3g} s"
