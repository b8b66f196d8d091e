"""Two runs read from their folders, and the differences that forbid a comparison."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any

from launch.base.errors import CheckpointError, ConfigError, ResourceError
from launch.base.files import expanded
from launch.base.text import size, suggestion
from launch.base.workspace import Workspace
from launch.predict.history import cache_keys
from launch.recipe import load
from launch.run_folder import manifest
from launch.run_folder import steps as run_folder_steps
from launch.run_folder.layout import RunDir
from launch.schema.machine import Machine
from launch.schema.plan import Plan
from launch.schema.recipe import Recipe
from launch.schema.recipe_keys import affected_by, leaves
from launch.schema.result import Continues, StepEvent

# share by which the tokens of a step may differ where one batch counts packed sequences and the
# other rows
_NEARLY = 0.05
_MADE_OF = {  # names for the parts of token_cache.token_identity()
    "version": "the version that tokenised",
    "train": "the content of data.train_file",
    "columns": "the columns that are read",
    "limits": "max_length, truncation, special tokens in texts or how many rows are read",
    "task": "the task",
    "encoder_decoder": "the kind of model",
    "tokenizer": "the tokenizer",
    "chat_template": "the chat template",
    "add_tokens": "the added tokens",
    "languages": "the languages",
    "pairs": "the tokens that the tokenizer adds to a text",
}


# ---- reading
# ---------------------------------------------------------------------------


@dataclass(frozen=True)
class Side:
    """A or B of a comparison; its plan is that of the last attempt that trained."""

    run: RunDir
    recipe: Recipe
    plan: Plan
    machine: Machine | None  # None: its file is not there
    made_of: Mapping[str, Any] | None  # token_cache.token_identity(); None likewise
    libraries: Mapping[str, str]
    ending: str
    continues: Continues | None
    parts: tuple[run_folder_steps.Stretch, ...]
    # parts that ran with this plan's strategy: speed and memory are theirs
    last_parts: tuple[run_folder_steps.Stretch, ...]
    host_peak_bytes: int

    @cached_property
    def steps(self) -> list[StepEvent]:
        """The steps that count."""
        return [step for part in self.parts for step in part.counted]

    @property
    def is_packed(self) -> bool:
        return self.recipe.data.packing

    def missing(self) -> float:
        """Samples of trained steps that a kill left unrecorded, or whose run is gone."""
        gaps = (
            after.samples_seen - after.samples - before.samples_seen
            for before, after in pairwise(self.steps)
        )
        return self.steps[0].samples_seen - self.steps[0].samples + sum(gaps)


def find(workspace: Workspace, word: str) -> RunDir:
    """The run in a folder, one by its name (recipe-time, recipe/time), or a recipe's newest that
    has trained a step.

    Raises ResourceError."""
    for path in (expanded(word), workspace.runs / word):
        run = RunDir(path.resolve())
        if run.plan_file.is_file() and not run.is_dry_run:
            return _trained([run], word)
    runs = RunDir.all(workspace.runs)
    place = expanded(word).resolve()
    if named := [
        run
        for run in runs
        if word in (run.run_id, run.root.parent.name) or place == run.root.parent
    ]:
        return _trained(named, word)
    recipe_names = {path.stem for path in load.RECIPES.glob("*.yaml")}
    if word in recipe_names:
        raise ResourceError(
            f"{word}: this recipe has no run in {workspace.runs}; python -m launch run {word}"
            " makes one"
        )
    names = recipe_names | {run.root.parent.name for run in runs} | {run.run_id for run in runs}
    raise ResourceError(
        f"{word}: found no run, expected the name of a recipe that has run, a run's name"
        f" (recipe-time) or its folder; {suggestion(word, sorted(names))}"
    )


def _trained(runs: Sequence[RunDir], word: str) -> RunDir:
    for run in runs:
        if any(run_folder_steps.has_any(attempt) for attempt in run.attempts()):
            return run
    raise ResourceError(
        f"{word}: {runs[0].run_id} has no step in its events yet; wait for its first log, or run it"
        " again"
    )


def read(run: RunDir, say: run_folder_steps.Say = lambda line: None) -> Side:
    """A run that has trained; `say` gets a line for damaged records. Raises ConfigError where
    another version wrote it."""
    parts = tuple(part for part in run_folder_steps.stretches(run, say=say) if part.counted)
    last = parts[-1].attempt
    saved = [
        folder
        for folder in manifest.committed(run.checkpoints)
        if (folder / manifest.FILE).exists()
    ]
    ending = f"at step {parts[-1].counted[-1].step:,} of {parts[-1].counted[-1].max_steps:,}"
    try:
        outcome, end, tokens = last.read_outcome(), last.read_end(), run.read_tokens()
        if (done := run.outcome()) is not None:
            ending = "finished" if done.ended == "complete" else f"stopped early {ending}"
        elif end and end.failure:
            ending += f" ({end.failure.cause})"
        plan = last.read_plan()
        return Side(
            run=run,
            recipe=run.read_recipe(),
            plan=plan,
            machine=last.read_machine(),
            made_of=tokens.made_of if tokens and _is_whole(tokens.made_of) else None,
            libraries=manifest.written_with(saved[-1]) if saved else {},
            ending=ending,
            continues=run.read_continues(),
            parts=parts,
            last_parts=tuple(
                part for part in parts if part.attempt.read_plan().strategy == plan.strategy
            ),
            host_peak_bytes=max(
                end.host_peak_bytes if end else 0,
                outcome.host_pss_bytes if outcome else 0,
                *(step.host_pss_bytes for step in parts[-1].counted),
            ),
        )
    except CheckpointError as error:
        raise ConfigError(
            f"{str(error).partition(';')[0]}: it was written by another version of lowmem, or is"
            " damaged; run it again"
        ) from error


# ---- what differs
# ---------------------------------------------------------------------------


@dataclass(frozen=True)
class Difference:
    """A difference between A and B; with `blocks` their figures cannot be compared."""

    text: str
    blocks: bool = False


def differences(a: Side, b: Side) -> list[Difference]:
    """All differences, first those that block."""
    return sorted(
        [*_of_model(a, b), *_of_data(a, b), *_of_batch(a, b), *_of_start(a, b)],
        key=lambda difference: not difference.blocks,
    )


def _of_model(a: Side, b: Side) -> Iterator[Difference]:
    models = a.plan.shape, b.plan.shape
    if cache_keys.model_key(models[0]) != cache_keys.model_key(models[1]):
        names = [f"{model.name} of {model.parameters:,} parameters" for model in models]
        yield _differs("model", names, blocks=True)
        configs = [
            leaves({key: model.config[key] for key in model.config if key not in cache_keys.ORIGIN})
            for model in models
        ]
        yield from _by_key(configs, "config.")
    trained = [
        f"{model.trainable_parameters:,} ({model.lora_parameters:,} of LoRA)" for model in models
    ]
    if trained[0] != trained[1]:
        yield _differs("trained parameters", trained, blocks=True)


def _is_whole(made_of: Mapping[str, Any] | None) -> bool:
    """False for a description of rows that is damaged or not there."""
    return (
        made_of is not None and isinstance(made_of.get("limits"), list) and "validation" in made_of
    )


def _of_data(a: Side, b: Side) -> Iterator[Difference]:
    if a.made_of is None or b.made_of is None:
        yield Difference(
            "data: tokens.json, which names the content of the rows, is not there", blocks=True
        )
        return
    identities = [
        {**made_of, "limits": [limit for limit in made_of["limits"] if limit != "packed"]}
        for made_of in (a.made_of, b.made_of)
    ]
    if parts := [
        name for key, name in _MADE_OF.items() if identities[0].get(key) != identities[1].get(key)
    ]:
        yield Difference(f"data: A and B differ in {', '.join(parts)}", blocks=True)
    hashes = [made_of["validation"] for made_of in identities]
    if hashes[0] != hashes[1]:
        names = [_rows_name(sha256) if sha256 else "none" for sha256 in hashes]
        yield _differs("held-out rows", names, blocks=None not in hashes)


def _rows_name(validation: str) -> str:
    """The held-out rows of a token cache's identity: a file's hash, or "0.05 of" that."""
    share, of, sha256 = validation.rpartition(" of ")
    return f"{share}{of}sha256 {sha256[:12]}"


def _of_batch(a: Side, b: Side) -> Iterator[Difference]:
    sizes = [side.plan.strategy.effective_batch_size for side in (a, b)]
    if a.is_packed == b.is_packed:
        if sizes[0] != sizes[1]:
            count = sizes[1] // b.recipe.training.samples_per_process
            split = b.recipe.keeping(sizes[0], count, count)
            yield _differs("effective batch", (sizes[0], f"{sizes[1]}{split}"), blocks=True)
        return
    tokens = [sum(step.tokens for step in side.steps) / len(side.steps) for side in (a, b)]
    batches = [
        f"{count} {'packed sequences' if side.is_packed else 'rows'} of {mean:,.0f} tokens in all"
        for side, count, mean in zip((a, b), sizes, tokens, strict=True)
    ]
    yield _differs("effective batch", batches, blocks=abs(tokens[1] / tokens[0] - 1) > _NEARLY)


def _of_start(a: Side, b: Side) -> Iterator[Difference]:
    for name, side in (("A", a), ("B", b)):
        if len(side.last_parts) < len(side.parts):
            yield Difference(
                f"{name} was planned again: speed and memory are of its last plan, losses of all"
                " its steps"
            )
        if missing := side.missing():
            yield Difference(
                f"{name}: the steps of {missing:,.0f} samples are not written down, nor are their"
                " tokens"
            )
        if side.continues:
            yield Difference(
                f"{name} took over {side.continues.checkpoint} at sample"
                f" {side.continues.samples_seen:,}"
            )
    machines = a.machine, b.machine
    if (
        machines[0] is None
        or machines[1] is None
        or cache_keys.machine_key(machines[0]) != cache_keys.machine_key(machines[1])
    ):
        yield _differs("machine", [_machine(machine) for machine in machines])
    both = a.libraries.keys() & b.libraries.keys()
    yield from _by_key([{name: side.libraries[name] for name in both} for side in (a, b)])
    yield from _by_key([leaves(asdict(side.plan.strategy)) for side in (a, b)])
    recipes = [leaves(side.recipe.model_dump()) for side in (a, b)]
    yield from _by_key(
        [{key: recipe[key] for key in recipe if is_compared(key)} for recipe in recipes]
    )
    num_trained = [f"{side.steps[-1].samples_seen:,}" for side in (a, b)]
    if num_trained[0] != num_trained[1] and a.is_packed == b.is_packed:
        yield _differs("samples trained", num_trained)


def is_compared(key: str) -> bool:
    """True if runs are compared by this key of their recipes: not by names, nor by keys whose
    strategy or file content is compared itself."""
    return not affected_by(key) & {"planned", "source", "name"}


def _by_key(values: Sequence[Mapping[str, Any]], prefix: str = "") -> Iterator[Difference]:
    for key in sorted(values[0].keys() | values[1].keys()):
        pair = [side.get(key) for side in values]
        if pair[0] != pair[1]:
            yield _differs(prefix + key, ["none" if value is None else value for value in pair])


def _differs(label: str, pair: Sequence[object], blocks: bool = False) -> Difference:
    return Difference(f"{label}: A {pair[0]}, B {pair[1]}", blocks)


def _machine(machine: Machine | None) -> str:
    if machine is None:
        return "not written down"
    cards = ", ".join(gpu.name for gpu in machine.gpus) or "no GPU"
    return f"{machine.name} ({cards}; {machine.cpu_count} CPUs, {size(machine.host_limit_bytes)})"
