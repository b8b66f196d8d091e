"""Choice of a plan: of all candidates the fastest that fits, and why the others do not.

Pure, except for the traces that it requests. A user's batch is used if it fits. Otherwise it is
split with the same effective batch, and the plan says so."""

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import chain, islice
from typing import Any

from launch.base.errors import DoesNotFit
from launch.base.text import size
from launch.data import sources
from launch.plan import candidates, explain, savings, ways_to_fit
from launch.plan import facts as plan_facts
from launch.plan.search import judge_most_frugal, search, streaming, table_order
from launch.predict import estimate
from launch.predict.estimate import Judged
from launch.predict.facts import Facts
from launch.predict.oom_history import CLEARLY_BELOW
from launch.schema.machine import GIB, Machine
from launch.schema.plan import Change, Plan, Rendezvous, Strategy
from launch.schema.recipe import Recipe
from launch.schema.run_sections import LaunchSection


@dataclass(frozen=True)
class Choice:
    """A plan, and the context of the choice, whose recipe `allow:` may have relaxed."""

    facts: Facts
    plan: Plan

    @property
    def recipe(self) -> Recipe:
        return self.facts.recipe

    @property
    def machine(self) -> Machine:
        return self.facts.machine


def choose(facts: Facts) -> Choice:
    """Choose the fastest candidate that fits. If none fits, the recipe is relaxed as little as
    possible, by the settings under its `allow:`.

    Raises DoesNotFit with the nearest misses, ConfigError for a recipe that cannot run."""
    spent = facts.history.oom.spent
    with facts.asking():
        try:
            if facts.recipe in spent:
                raise DoesNotFit(
                    f"{facts.recipe.name}: all plans of this start took more memory than there"
                    " is, each less than the one before; the same line again tries a smaller one,"
                    " from the last checkpoint if there is one"
                )
            return _choose_for(facts)
        except DoesNotFit as refusal:
            if not facts.recipe.allow:
                raise
            tried: list[str] = []
            for relaxed, changes in relaxed_contexts(facts):
                tried = [f"{change.key} {change.effective}" for change in changes]
                with suppress(DoesNotFit):  # the next context relaxes more
                    if relaxed.recipe not in spent:
                        return _choose_for(relaxed)
            raise DoesNotFit(
                f"{refusal}\nNor does it fit with all that allow:"
                f" [{', '.join(facts.recipe.allow)}] gives up"
                f" ({', '.join(tried) or 'nothing here'})"
            ) from refusal


def refuse_hopeless(facts: Facts) -> None:
    """Raise DoesNotFit for a recipe that cannot fit, before its rows are tokenised.

    Model states are compared with the budgets first, which needs no trace; then the least memory of
    a step of max_length, which needs a trace of that length."""
    if facts.recipe.launch.assume_fits:
        return
    contexts = [facts, *(relaxed for relaxed, _ in relaxed_contexts(facts))]
    if all(each.misses for variant in contexts for each in at_least(variant, with_step=False)):
        choose(replace(facts, traces=None))
    if facts.rows.counts is None and all(
        each.misses for variant in contexts for each in at_least(variant)
    ):
        choose(facts)


def relaxed_contexts(facts: Facts) -> Iterator[tuple[Facts, tuple[Change, ...]]]:
    """Yield the context with each recipe that `allow:` permits, and the changes of that recipe."""
    launch = facts.recipe.launch
    on_gpu = bool(facts.machine.gpus) and launch.device != "cpu" and not facts.wishes.force_cpu
    for recipe, changes in ways_to_fit.relaxations(
        facts.recipe,
        facts.model.parameters,
        facts.model.size.family,
        on_gpu,
        facts.wishes.mode or launch.mode,
    ):
        relaxed = plan_facts.with_recipe(facts, recipe)
        bytes_before, bytes_after = (
            size(each.model.full_copy.optimizer_bytes) for each in (facts, relaxed)
        )
        states = f"; its states: {bytes_after} instead of {bytes_before}"
        changes = tuple(
            replace(change, reason=change.reason + states)
            if change.key == "training.optim"
            else change
            for change in changes
        )
        yield replace(relaxed, changes=(*facts.changes, *changes)), changes


def at_least(facts: Facts, with_step: bool = True) -> list[Judged]:
    """Judge each candidate by its states; `with_step`: those that fit so by the states and the
    least memory of the smallest allowed micro-batch."""
    possible, _ = candidates.possible(facts)
    judged = [_by_states(facts, each) for each in possible]
    if not with_step:
        return judged
    return [
        each
        if each.misses
        else judge_most_frugal(facts, candidates.smallest_split(facts, each.candidate))
        for each in judged
    ]


def _by_states(facts: Facts, candidate: Strategy) -> Judged:
    """A candidate judged by its states; if they do not fit, with layers that are streamed, if
    less is missing then."""
    judged = estimate.by_states(facts, candidate)
    streamed = streaming(facts, judged) if judged.misses else None
    if streamed is None:
        return judged
    return min(streamed, judged, key=lambda each: (each.misses is not None, each.excess))


def _choose_for(facts: Facts) -> Choice:
    """Choose for the context's own recipe."""
    recipe, history = facts.recipe, facts.history
    if facts.wishes.wants_tuned:
        history = replace(history, tuned=history.recall(facts.model.size, recipe))
        facts = replace(facts, history=history)
    # a plan that ran out of memory is followed by one within the budgets, if there is one
    if recipe.launch.assume_fits and history.oom.ran_out:
        with suppress(DoesNotFit):
            return Choice(facts, _chosen(facts))
    facts = replace(facts, wishes=replace(facts.wishes, assume_fits=recipe.launch.assume_fits))
    return Choice(facts, _chosen(facts))


def _chosen(facts: Facts) -> Plan:
    recipe, rows = facts.recipe, facts.rows.count
    possible, refusals = candidates.possible(facts)
    chosen, judged = search(facts, possible)
    softer = ({"below": CLEARLY_BELOW}, {"is_last": False}, {"fewer_is_less": True})
    for change in softer if facts.history.oom.ran_out else ():
        oom_history = replace(facts.history.oom, **change)
        if chosen is None and oom_history != facts.history.oom:
            facts = replace(facts, history=replace(facts.history, oom=oom_history))
            chosen, judged = search(facts, possible)
    if chosen is None:
        ways = chain(
            ways_to_fit.smaller_reserve(facts, [loser for loser, _ in judged]),
            ways_to_fit.ways_to_fit(facts),
        )
        offered = None if recipe.allow else list(islice(ways, ways_to_fit.MAX_WAYS))
        message = ways_to_fit.does_not_fit_message(facts, judged, refusals, offered)
        raise DoesNotFit("\n".join([message, *facts.limits.notes]))
    lost = (
        f"{loser.candidate.mode} with {loser.candidate.num_processes} process(es): {loser.misses}"
        for loser, _ in judged
        if loser.misses and loser.memory.peak is None
    )
    candidate, counts = chosen.candidate, facts.rows.counts
    return Plan(
        recipe_name=recipe.name,
        strategy=candidate,
        shape=facts.model.size,
        data_format=facts.rows.format,
        estimate=chosen.memory,
        budget_bytes=chosen.budget_bytes,
        rows=rows if rows is None else min(rows, recipe.data.max_train_samples or rows),
        **_counted_rows(facts),
        rows_left_out=counts["dropped"] + counts["bad"] if counts else None,
        target_share=_target_share(facts),
        lora_targets=facts.model.lora_targets,
        why=explain.why(facts, chosen, judged),
        switches=explain.switches(facts, candidate),
        changes=(*facts.changes, *explain.changes(facts, candidate, judged)),
        rejected=(*refusals, *dict.fromkeys(lost)),
        table=tuple(explain.table(table_order(judged))) if chosen.memory.peak else (),
        compared=tuple(map(explain.compared, table_order(judged))) if chosen.memory.peak else (),
        savings=(
            *savings.savings(facts, chosen, [each for each, _ in judged]),
            *savings.of_targets(facts, chosen),
        ),
        phases=chosen.phases.device,
        host=chosen.phases.host,
        **_seconds(chosen),
        seconds_per_evaluation=estimate.evaluation_s(facts, candidate),
        lengths=facts.question(candidate).lengths,
        rows_of=facts.rows.lengths[0] if facts.rows.rows_of is not None else None,
        rendezvous=rendezvous(recipe.launch),
        link=(
            facts.installed.link
            if candidate.device == "cuda" and candidate.processes_per_machine > 1
            else None
        ),
        packing=recipe.data.packing,
        few_shapes=facts.few_shapes,
        padding=facts.padding(candidate),
        base_fingerprint=facts.model.base_fingerprint,
        allocator_fraction=_allocator_fraction(recipe.launch),
        allocator_limit_bytes=_allocator_limit_bytes(recipe.launch, chosen),
        allocator_settings=facts.allocator_settings(candidate),
    )


def _seconds(chosen: Judged) -> dict[str, Any]:
    """The fields of a plan on its seconds; none where its step was not traced."""
    if chosen.time is None:
        return {}
    return {
        "seconds_per_step": chosen.time.step_s,
        "seconds_correction": chosen.time.correction,
        "waits_share": chosen.time.waits_share,
    }


def _target_share(facts: Facts) -> float | None:
    """The share of the tokens that have a loss; None until the rows are tokenised. Those of a T5's
    answers are counted apart from its inputs."""
    counts = facts.rows.counts
    if not counts:
        return None
    targets = counts["target_tokens"]
    return targets / (counts["tokens"] + (targets if facts.model.size.is_encoder_decoder else 0))


def _counted_rows(facts: Facts) -> dict[str, Any]:
    """The fields of a plan on rows that are held out, and on several sources."""
    data, tokens = facts.recipe.data, facts.rows.tokens
    if tokens is None or tokens.row_counts is None:
        return {}
    return {
        "sources": sources.trained_rows(data, tokens.row_counts) if data.is_mixed else (),
        "rows_held_out": sources.held_out_rows(data, tokens.row_counts).chosen,
    }


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
