"""Trainings that fit a machine: known models, each with all weights, LoRA and QLoRA, at several
lengths. Every answer is the planner's own search.

A recipe whose states, or least step, exceed a budget is not traced. Lengths share their traces.
"""

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from launch.base.errors import ConfigError, ResourceError
from launch.base.text import size
from launch.base.workspace import FILES
from launch.data.worker import WORKER
from launch.plan import candidates, planner, ways_to_fit
from launch.plan import facts as plan_facts
from launch.plan.search import search
from launch.predict import seconds_margins
from launch.predict.estimate import Judged
from launch.predict.facts import Facts, Installed
from launch.predict.models import model_config
from launch.predict.scaled_traces import ScaledTraces
from launch.probe import architectures
from launch.probe.import_memory import Imports
from launch.schema.levers import TRIED
from launch.schema.machine import Machine
from launch.schema.model_sections import ModelSection
from launch.schema.plan import DataFormat
from launch.schema.recipe import Recipe

Method = Literal["full", "lora", "qlora"]
METHODS: tuple[Method, ...] = ("full", "lora", "qlora")
LENGTHS = (512, 2048, 8192)
# shapes of configs/models/, from small to large
MODELS = (
    *("qwen2.5-0.5b", "llama3.2-1b", "qwen2.5-1.5b", "qwen2.5-3b", "llama3.2-3b", "qwen2.5-7b"),
    *("llama3.1-8b", "qwen2.5-14b", "qwen2.5-32b", "llama3.1-70b"),
)
# The batch that is asked for, by tokens: rows of a micro-batch, whatever their length, and
# micro-batches of a step on one card.
MICRO_BATCH_TOKENS, _ACCUMULATION = 8192, 4
ANY_FORMAT = DataFormat("prompt_response", {}, "jsonl", "any rows")
Say = Callable[[str], None]


@dataclass(frozen=True)
class Fit:
    """A training, and the plan's choice for it; None: it does not fit."""

    model: str
    method: Method
    length: int
    recipe: Recipe  # recipe of the choice, or the last one that was tried
    chosen: Judged | None
    # reasons where there is no choice: this machine cannot run it at all; the memory that it lacks
    refused: str = ""
    shortage: str = ""
    fits_with: str = ""  # a key with which it fits, where one is known
    margin: seconds_margins.SecondsMargin | None = (
        None  # measured over predicted seconds on these cards
    )

    @property
    def tokens_per_s(self) -> float | None:
        if self.chosen is None or self.chosen.time is None:
            return None
        return self.chosen.candidate.effective_batch_size * self.length / self.chosen.time.step_s

    @property
    def tokens_per_s_range(self) -> tuple[float, float] | None:
        """The tokens a second within the margin of the seconds."""
        if self.tokens_per_s is None or self.margin is None:
            return None
        return self.tokens_per_s / self.margin.most, self.tokens_per_s / self.margin.least

    @property
    def changes(self) -> tuple[str, ...]:
        """Short names of what differs from the training that was asked for."""
        if self.chosen is None:
            return ()
        runs, training = self.chosen.candidate, self.recipe.training
        mode, rows = runs.launch_mode, runs.per_device_train_batch_size
        names = (
            ("bf16 weights", self.method == "full" and self.recipe.model.dtype == "bfloat16"),
            (runs.mode.removeprefix("deepspeed_"), mode.engine in ("deepspeed", "fsdp2")),
            (f"x{runs.num_processes}", runs.num_processes > 1),
            (f"batch {rows}", rows != training.per_device_train_batch_size),
            *((row.says(runs.levers), row.read(runs.levers) != row.plain) for row in TRIED),
        )
        return tuple(name for name, differs in names if differs)


def accumulation(gpus: int) -> int:
    """Micro-batches of a card in a step, which has as many tokens on several cards if that can
    be."""
    return max(_ACCUMULATION // gpus, 1)


def recipe_of(model: str, method: Method, length: int, half: bool, gpus: int = 1) -> Recipe:
    """The training that is asked for. `half`: all weights are trained in bfloat16."""
    return Recipe.model_validate(
        {
            "name": "fit",
            "task": "sft",
            "output_dir": "fit",
            "model": {
                "shape": model,
                "dtype": "bfloat16" if half or method != "full" else "float32",
            },
            "lora": None if method == "full" else {"r": 16},
            "quantization": {"load_in_4bit": True} if method == "qlora" else None,
            "data": {"train_file": "rows.jsonl", "max_length": length},
            "training": {
                "bf16": True,
                "per_device_train_batch_size": max(MICRO_BATCH_TOKENS // length, 1),
                "gradient_accumulation_steps": accumulation(gpus),
            },
        }
    )


def fits(
    machine: Machine,
    of_imports: Imports,
    traces: Path,
    models: Sequence[str] = MODELS,
    methods: Sequence[Method] = METHODS,
    lengths: Sequence[int] = LENGTHS,
    say: Say = lambda line: None,
) -> Iterator[Fit]:
    """Yield each training with the planner's choice; `of_imports`: what a job's
    processes hold; `traces`: the folder of stored traces."""
    installed = Installed(
        may_expand=architectures.expands_segments(machine.gpus, ""), import_memory=of_imports
    )
    margin = seconds_margins.of_cards(machine.gpus)
    with WORKER:
        for model in models:
            counted = model_config.read(ModelSection(shape=model), root=FILES, cache=traces.parent)
            for method, length in itertools.product(methods, lengths):
                halves = (False, True) if method == "full" else (False,)
                recipes = [
                    recipe_of(model, method, length, half, len(machine.gpus)) for half in halves
                ]
                fit = Fit(model, method, length, recipes[0], None, margin=margin)
                try:
                    built = [
                        plan_facts.build(recipe, machine, *counted, ANY_FORMAT)
                        for recipe in recipes
                    ]
                except ConfigError as error:  # the model has fewer positions
                    yield replace(fit, refused=str(error))
                    continue
                yield _fit(
                    fit, [_with_rows(facts, length, installed, traces, say) for facts in built]
                )


def _with_rows(facts: Facts, length: int, installed: Installed, traces: Path, say: Say) -> Facts:
    """The facts with rows of this length, and the traces of its steps."""
    facts, model = plan_facts.as_folder(facts), facts.model
    return replace(
        facts,
        rows=plan_facts.of_length(facts.rows, facts.recipe.data, length),
        installed=installed,
        traces=ScaledTraces(facts.recipe, model.size, model.lora_targets, traces, say),
    )


def _fit(fit: Fit, facts: Sequence[Facts]) -> Fit:
    """The choice of the planner's search for the first recipe for which there is one; else what
    the last lacks. What cannot fit is not traced."""
    judged: list[Judged] = []
    last = facts[0]
    for each in facts:
        try:
            judged = planner.at_least(each)
        except (ConfigError, ResourceError) as error:
            if judged:  # the card has no bf16: what float32 weights lack is told
                break
            return replace(fit, recipe=each.recipe, refused=str(error))
        last, fit = each, replace(fit, recipe=each.recipe)
        if all(loser.misses for loser in judged):
            continue
        chosen, verdicts = search(each, candidates.possible(each)[0])
        assert each.traces is not None
        if each.traces.failure:
            raise ResourceError(f"fit: no step of {fit.model} was traced: {each.traces.failure}")
        if chosen is not None:
            return replace(fit, chosen=chosen)
        judged = [loser for loser, _ in verdicts]
    return _with_shortage(fit, last, judged)


def _with_shortage(fit: Fit, facts: Facts, losers: Sequence[Judged]) -> Fit:
    """Add what the nearest candidates lack of a card's memory and of host RAM, and a key."""
    recipe, machine, lacking = facts.recipe, facts.machine, {}
    for loser in sorted(losers, key=lambda loser: loser.excess):
        missing_bytes, memory = ways_to_fit.shortage(recipe, machine, loser)
        mode = loser.candidate.mode.removeprefix("deepspeed_")
        lacking.setdefault(memory, f"{size(missing_bytes)} {memory} ({mode})")
    least = "at least " if any(loser.by in ("states", "price") for loser in losers) else ""
    ways = itertools.chain(
        ways_to_fit.smaller_reserve(facts, losers),
        ways_to_fit.ways_to_fit(facts, with_other_adapters=False),
    )
    return replace(
        fit,
        shortage=f"short by {least}{' or '.join(lacking.values())}",
        fits_with=next(ways, ""),
    )
