"""Choice of a plan: of all candidates the fastest that fits, and why the others do not.

Pure, except for the traces that it requests. A user's batch is used if it fits. Otherwise it is
split with the same effective batch, and the plan says so."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import chain, islice
from typing import Any

from launch.base.errors import DoesNotFit
from launch.base.text import size
from launch.data import sources
from launch.plan import candidates, explain, relax, savings
from launch.plan import context as plan_context
from launch.plan.candidates import NO_CONSTRAINTS, LaunchConstraints
from launch.plan.search import search, table_order
from launch.plan.ways_to_fit import (
    MAX_WAYS,
    does_not_fit_message,
    smaller_reserve,
    ways_to_fit,
)
from launch.predict import estimate
from launch.predict.estimate import Judged
from launch.predict.facts import PlanContext
from launch.predict.oom_history import CLEARLY_BELOW
from launch.schema.machine import GIB, Machine
from launch.schema.plan import Change, Plan, Rendezvous
from launch.schema.recipe import Recipe
from launch.schema.run_sections import LaunchSection


@dataclass(frozen=True)
class Choice:
    """A plan, and the context of the choice, whose recipe `allow:` may have relaxed."""

    context: PlanContext
    plan: Plan

    @property
    def recipe(self) -> Recipe:
        return self.context.recipe

    @property
    def machine(self) -> Machine:
        return self.context.machine


def choose(context: PlanContext, constraints: LaunchConstraints = NO_CONSTRAINTS) -> Choice:
    """Choose the fastest candidate that fits. If none fits, the recipe is relaxed as little as
    possible, by the settings under its `allow:`.

    Raises DoesNotFit with the nearest misses, ConfigError for a recipe that cannot run."""
    spent = constraints.oom_history.spent
    with context.asking():
        try:
            if context.recipe in spent:
                raise DoesNotFit(
                    f"{context.recipe.name}: all plans of this start took more memory than there"
                    " is, each less than the one before; the same line again tries a smaller one,"
                    " from the last checkpoint if there is one"
                )
            return _choose_for(context, constraints)
        except DoesNotFit as refusal:
            if not context.recipe.allow:
                raise
            tried: list[str] = []
            for relaxed, changes in relaxed_contexts(context, constraints):
                tried = [f"{change.key} {change.effective}" for change in changes]
                with suppress(DoesNotFit):  # the next context relaxes more
                    if relaxed.recipe not in spent:
                        return _choose_for(relaxed, constraints)
            raise DoesNotFit(
                f"{refusal}\nNor does it fit with all that allow:"
                f" [{', '.join(context.recipe.allow)}] gives up"
                f" ({', '.join(tried) or 'nothing here'})"
            ) from refusal


def refuse_hopeless(context: PlanContext, constraints: LaunchConstraints) -> None:
    """Raise DoesNotFit for a recipe that cannot fit, before its rows are tokenised.

    Model states are compared with the budgets first, which needs no trace; then the least memory of
    a step of max_length, which needs a trace of that length."""
    if context.recipe.launch.assume_fits:
        return
    contexts = [context, *(relaxed for relaxed, _ in relaxed_contexts(context, constraints))]
    if all(is_hopeless(variant, constraints, with_step=False) for variant in contexts):
        choose(replace(context, traces=None), constraints)
    if context.counts is None and all(
        is_hopeless(variant, constraints, with_step=True) for variant in contexts
    ):
        choose(context, constraints)


def relaxed_contexts(
    context: PlanContext, constraints: LaunchConstraints
) -> Iterator[tuple[PlanContext, tuple[Change, ...]]]:
    """Yield the context with each recipe that `allow:` permits, and the changes of that recipe."""
    asked = context.recipe.launch
    on_gpu = bool(context.machine.gpus) and asked.device != "cpu" and not constraints.force_cpu
    for recipe, changes in relax.relaxations(
        context.recipe,
        context.parameters,
        context.model.family,
        on_gpu,
        constraints.mode or asked.mode,
    ):
        relaxed = plan_context.with_recipe(context, recipe)
        bytes_before, bytes_after = (
            size(each.full_copy.optimizer_bytes) for each in (context, relaxed)
        )
        states = f"; its states: {bytes_after} instead of {bytes_before}"
        changes = tuple(
            replace(change, reason=change.reason + states)
            if change.key == "training.optim"
            else change
            for change in changes
        )
        yield replace(relaxed, changes=(*context.changes, *changes)), changes


def is_hopeless(
    context: PlanContext, constraints: LaunchConstraints, with_step: bool = True
) -> bool:
    """Return True if the states of every candidate exceed a budget; `with_step`: the states and the
    least memory of its smallest allowed micro-batch."""
    possible, _ = candidates.possible(context, constraints)
    return all(
        estimate.hopeless(context, frugal, with_step)
        for candidate in possible
        for frugal in candidates.most_frugal(context, candidate, constraints)
    )


def _choose_for(context: PlanContext, constraints: LaunchConstraints) -> Choice:
    """Choose for the context's own recipe."""
    recipe, history = context.recipe, constraints.oom_history
    context = replace(context, link=constraints.link, oom_history=history)
    if constraints.wants_tuned:
        constraints = replace(constraints, tuned=context.recall(context.model, recipe))
    # a plan that ran out of memory is followed by one within the budgets, if there is one
    if recipe.launch.assume_fits and history.ran_out:
        with suppress(DoesNotFit):
            return Choice(context, _chosen(context, constraints))
    context = replace(context, assume_fits=recipe.launch.assume_fits)
    return Choice(context, _chosen(context, constraints))


def _chosen(context: PlanContext, constraints: LaunchConstraints) -> Plan:
    recipe, rows = context.recipe, context.rows
    possible, refusals = candidates.possible(context, constraints)
    judged: list[tuple[Judged, str]] = []
    chosen = search(context, possible, constraints, judged)
    softer = ({"below": CLEARLY_BELOW}, {"is_last": False}, {"fewer_is_less": True})
    for change in softer if context.oom_history.ran_out else ():
        oom_history = replace(context.oom_history, **change)
        if chosen is None and oom_history != context.oom_history:
            context = replace(context, oom_history=oom_history)
            judged.clear()
            chosen = search(context, possible, constraints, judged)
    if chosen is None:
        ways = chain(smaller_reserve(context, judged), ways_to_fit(context, constraints))
        offered = None if recipe.allow else list(islice(ways, MAX_WAYS))
        message = does_not_fit_message(context, judged, refusals, offered)
        raise DoesNotFit("\n".join([message, *constraints.budget_notes]))
    lost = (
        f"{loser.candidate.mode} with {loser.candidate.num_processes} process(es): {loser.misses}"
        for loser, _ in judged
        if loser.misses and loser.memory.peak is None
    )
    candidate, counts = chosen.candidate, context.counts
    return Plan(
        recipe_name=recipe.name,
        strategy=candidate,
        shape=context.model,
        data_format=context.data_format,
        estimate=chosen.memory,
        budget_bytes=chosen.budget_bytes,
        rows=rows if rows is None else min(rows, recipe.data.max_train_samples or rows),
        **_counted_rows(context),
        rows_left_out=counts["dropped"] + counts["bad"] if counts else None,
        target_share=_target_share(context),
        lora_targets=context.lora_targets,
        why=explain.why(context, chosen, constraints, judged),
        switches=explain.switches(context, candidate, constraints),
        changes=(*context.changes, *explain.changes(context, candidate, judged, constraints)),
        rejected=(*refusals, *dict.fromkeys(lost)),
        table=tuple(explain.table(table_order(judged))) if chosen.memory.peak else (),
        compared=tuple(map(explain.compared, table_order(judged))) if chosen.memory.peak else (),
        savings=(
            *savings.savings(context, chosen, [each for each, _ in judged]),
            *savings.of_targets(context, chosen),
        ),
        phases=chosen.phases.device,
        host=chosen.phases.host,
        seconds_per_step=chosen.time.step_s if chosen.time else None,
        lengths=context.question(candidate).lengths,
        rows_of=context.lengths[0] if context.rows_of is not None else None,
        rendezvous=rendezvous(recipe.launch),
        link=(
            constraints.link
            if candidate.device == "cuda" and candidate.processes_per_machine > 1
            else None
        ),
        packing=recipe.data.packing,
        by_tokens=recipe.data.batch_by_tokens,
        padding=context.padding(candidate),
        base_fingerprint=context.base_fingerprint,
        allocator_fraction=_allocator_fraction(recipe.launch),
        allocator_limit_bytes=_allocator_limit_bytes(recipe.launch, chosen),
        allocator_settings=context.allocator_settings(candidate),
    )


def _target_share(context: PlanContext) -> float | None:
    """The share of the tokens that have a loss; None until the rows are tokenised. Those of a T5's
    answers are counted apart from its inputs."""
    counts = context.counts
    if not counts:
        return None
    targets = counts["target_tokens"]
    return targets / (counts["tokens"] + (targets if context.model.is_encoder_decoder else 0))


def _counted_rows(context: PlanContext) -> dict[str, Any]:
    """The fields of a plan on rows that are held out, and on several sources."""
    data, tokens = context.recipe.data, context.tokens
    if tokens is None or tokens.row_counts is None:
        return {}
    named = sources.trained_rows(data, tokens.row_counts) if data.is_mixed else ()
    return {"sources": named, "rows_held_out": sources.num_held_out(data, tokens.row_counts)}


def _allocator_fraction(launch: LaunchSection) -> float:
    """Return the share of free memory that a rank's allocator may take.

    A share that the recipe names limits the ranks too. The default limits planning only: the rest
    is for a prediction that is too low. A run's recipe.json has every default in it, so only
    planning can tell the two apart."""
    return launch.vram_fraction if "vram_fraction" in launch.model_fields_set else 1.0


def _allocator_limit_bytes(launch: LaunchSection, chosen: Judged) -> int | None:
    """The limit of launch.vram_limit_gib less what a rank takes outside its allocator."""
    if launch.vram_limit_gib is None or chosen.candidate.device == "cpu":
        return None
    return max(int(launch.vram_limit_gib * GIB) - chosen.memory.outside_bytes, 0)


def rendezvous(launch: LaunchSection) -> Rendezvous | None:
    if launch.nodes == 1:
        return None
    assert launch.main_process_ip is not None  # the schema has checked it
    return Rendezvous(
        launch.machine_rank,
        launch.main_process_ip,
        launch.main_process_port,
        launch.network_interface,
        launch.join_timeout_s,
    )
