"""Which way to run a recipe on a machine: of all candidates the fastest that fits, and why the
others do not.

Pure, but for the traces it asks for: values in, a Plan out. A user's batch is obeyed where it fits;
else it is split at the same effective batch, and the plan says so."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import islice

from launch.base.errors import DoesNotFit
from launch.plan import candidates, explain
from launch.plan.candidates import NO_CONSTRAINTS, LaunchConstraints
from launch.plan.search import search_waves, table_order
from launch.plan.ways_to_fit import MAX_WAYS, does_not_fit_message, ways_to_fit
from launch.predict.estimate import Judged, PlanContext
from launch.predict.oom_history import CLEARLY_BELOW
from launch.schema.plan import Change, Plan, Rendezvous
from launch.schema.recipe import LaunchSection


def choose(
    context: PlanContext,
    changes: Sequence[Change] = (),
    constraints: LaunchConstraints = NO_CONSTRAINTS,
    rows: int | None = None,
) -> Plan:
    """The fastest candidate that fits. Raises DoesNotFit with the nearest misses, ConfigError for
    what cannot be."""
    context = replace(
        context,
        link=constraints.link,
        oom_history=constraints.oom_history,
        assume_fits=constraints.assume_fits,
    )
    with context.asking():
        return _chosen(context, changes, constraints, rows)


def _chosen(
    context: PlanContext,
    changes: Sequence[Change],
    constraints: LaunchConstraints,
    rows: int | None,
) -> Plan:
    recipe = context.recipe
    possible, refusals = candidates.possible(context, constraints)
    judged: list[tuple[Judged, str]] = []
    chosen = search_waves(context, possible, constraints, judged)
    softer = ({"below": CLEARLY_BELOW}, {"is_last": False}, {"fewer_is_less": True})
    for change in softer if context.oom_history.ran_out else ():
        oom_history = replace(context.oom_history, **change)
        if chosen is None and oom_history != context.oom_history:
            context = replace(context, oom_history=oom_history)
            judged.clear()
            chosen = search_waves(context, possible, constraints, judged)
    if chosen is None:
        ways = (
            list(islice(ways_to_fit(context, constraints), MAX_WAYS))
            if constraints.offers_ways
            else None
        )
        raise DoesNotFit(does_not_fit_message(context, judged, refusals, ways))
    lost = (
        f"{one.candidate.mode} with {one.candidate.num_processes} process(es): {one.misses}"
        for one, _ in judged
        if one.misses and one.memory.peak is None
    )
    candidate = chosen.candidate
    return Plan(
        recipe_name=recipe.name,
        strategy=candidate,
        shape=context.shape,
        data_format=context.data_format,
        estimate=chosen.memory,
        budget_bytes=chosen.budget_bytes,
        rows=rows if rows is None else min(rows, recipe.data.max_train_samples or rows),
        lora_targets=context.lora_targets,
        why=explain.why(context, chosen, constraints),
        switches=explain.switches(context, candidate, constraints),
        changes=(*changes, *explain.changes(context, candidate, judged, constraints)),
        rejected=(*refusals, *dict.fromkeys(lost)),
        table=tuple(explain.table(table_order(judged))) if chosen.memory.peak else (),
        step_s=chosen.time.step_s if chosen.time else None,
        lengths=context.question(candidate).lengths,
        rendezvous=_rendezvous(recipe.launch),
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
    )


def _allocator_fraction(launch: LaunchSection) -> float:
    """A share that the recipe names binds the ranks too. The default binds planning only: what it
    leaves free is for a prediction that is too low. Only planning can tell them apart: a run's
    recipe.json has every default in it."""
    return launch.vram_fraction if "vram_fraction" in launch.model_fields_set else 1.0


def _rendezvous(launch: LaunchSection) -> Rendezvous | None:
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
