"""The paths of a run and the readers and writers of its files. A file is written aside, then
renamed, so that a reader never sees half a file."""

import glob
import hashlib
import os
import re
import shutil
import time
import traceback
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import datetime
from functools import cached_property
from pathlib import Path

from launch.base import locks
from launch.base.errors import CheckpointError, ResourceError
from launch.base.files import (
    Noun,
    damaged_file,
    digest,
    expanded,
    is_model,
    new_folder,
    read,
    read_or_none,
    write_atomic,
    write_json,
)
from launch.base.text import shown
from launch.base.workspace import Workspace
from launch.data import token_cache
from launch.data.token_cache import TokenCache
from launch.schema.machine import Machine
from launch.schema.plan import Plan
from launch.schema.recipe import Recipe
from launch.schema.result import (
    DOWNLOADED,
    AttemptEnd,
    Continues,
    Downloaded,
    ExportedModel,
    Outcome,
    RankError,
    SecondStep,
    UsedTokens,
)
from launch.schema.rows import ShownRows

STAMP = re.compile(r"\d{8}-\d{6}(-\d+)?")  # the name of a run's folder
DRY_RUN = "dry-run"  # the folder of a recipe's last dry run, beside its runs
SAMPLES = "samples.i32"  # file of a rank: step, number of rows, the rows, as little-endian int32


class AttemptDir:
    """One start of the ranks: runs/<recipe>/<time>/attempts/<number>."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.plan_file = root / "plan.json"
        self.log_file = root / "log.txt"  # all that the launcher and the ranks print
        self.launcher_logs = root / "torchelastic"  # a folder of torchrun's
        self.train_log = root / "train.log"  # rank 0's own lines
        self.machine_file = root / "machine.json"  # machine on which it was planned
        self.tokenising_file = root / "tokenising.json"  # a TokenCache: rows to be tokenised
        self.tokenising_log = root / "tokenise.log"
        self.tokenised_file = root / "tokenised.json"  # a TokenisingEnd
        self.events_file = root / "events.jsonl"
        self.held_out_file = root / "held_out.jsonl"
        # answers to the run's questions, at each evaluation
        self.answers_file = root / "answers.jsonl"
        self.outcome_file = root / "outcome.json"
        self.supervisor_file = root / "supervisor.json"  # its end, as the launcher saw it
        # measurements of the first step in the steady state
        self.second_step_file = root / "second_step.json"

    @property
    def number(self) -> int:
        return int(self.root.name)

    def read_plan(self) -> Plan:
        return _there(self.plan_file, Plan)

    def read_machine(self) -> Machine | None:
        return read(self.machine_file, Machine)

    def read_outcome(self) -> Outcome | None:
        return read(self.outcome_file, Outcome)

    def read_end(self) -> AttemptEnd | None:
        return read(self.supervisor_file, AttemptEnd)

    def read_second_step(self) -> SecondStep | None:
        return read(self.second_step_file, SecondStep)

    def read_tokenising(self) -> TokenCache:
        return _there(self.tokenising_file, TokenCache)

    def rank(self, rank: int) -> Path:
        """The folder of one rank's own files; made on first use."""
        folder = self.root / "ranks" / str(rank)
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    def error_file(self, rank: int) -> Path:
        return self.rank(rank) / "error.json"

    def heartbeat_file(self, rank: int) -> Path:
        return self.rank(rank) / "heartbeat.json"

    def stacks_file(self, rank: int) -> Path:
        return self.rank(rank) / "stacks.txt"

    def samples_file(self, rank: int) -> Path:
        return self.rank(rank) / SAMPLES

    def leave_word(self, rank: int, error: BaseException) -> None:
        """Write the cause where the supervisor looks: launchers turn every exit code into 1."""
        cause = RankError(
            rank=rank,
            type=type(error).__name__,
            message=shown(str(error)),
            time=time.time(),
            exit_code=getattr(error, "exit_code", None),
            fix=getattr(error, "fix", ""),
            traceback=shown("".join(traceback.format_exception(error))),
        )
        write_json(self.error_file(rank), cause)

    def rank_errors(self) -> list[RankError]:
        """The errors of failing ranks, earliest first: the first is the root cause, the others
        follow from it. A damaged file is left out: the log has the same traceback."""
        files = self.root.glob("ranks/*/error.json")
        errors = (error for path in files if (error := read_or_none(path, RankError)))
        return sorted(errors, key=lambda error: error.time)


class RunDir:
    """One run: runs/<recipe>/<yyyymmdd-hhmmss>, the interface between the launcher, its ranks and
    the report."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.recipe_file = root / "recipe.json"
        self.recipe_yaml = root / "recipe.yaml"
        self.plan_file = root / "plan.json"
        self.accelerate_file = root / "accelerate.yaml"
        self.deepspeed_file = root / "deepspeed.json"
        self.command_file = root / "command.sh"
        self.report_file = root / "report.html"
        self.lock_file = root / ".lock"
        self.save_now_file = root / "save-now"  # touched by a person: commit a checkpoint and go on
        self.evaluation_file = root / "evaluation.json"
        self.checkpoints = root / "checkpoints"
        self.tensorboard = root / "tensorboard"
        self.tokens_file = root / "tokens.json"
        self.questions_file = root / "questions.json"
        self.rows_file = root / "rows.json"  # a few decoded rows, for the report
        # a list of OomEvent: what ran out of memory so far
        self.evidence_file = root / "evidence.json"
        self.continues_file = root / "continues.json"

    @classmethod
    def create(cls, runs: Path, recipe_name: str, now: datetime) -> "RunDir":
        """A new folder named by the time; two starts in one second get a suffix."""
        run = cls(new_folder(runs / recipe_name, now.strftime("%Y%m%d-%H%M%S")))
        run.checkpoints.mkdir()
        return run

    @classmethod
    def dry_run(cls, runs: Path, recipe_name: str) -> "RunDir":
        """The folder of the recipe's dry runs, emptied. It is no run: nothing trains in it."""
        run = cls(runs / recipe_name / DRY_RUN)
        if os.path.lexists(run.root):
            if not run.is_removable():
                raise ResourceError(
                    f"{run.root}: holds something that no dry run of ours wrote; move it away"
                )
            shutil.rmtree(run.root)
        run.checkpoints.mkdir(parents=True)
        return run

    @classmethod
    def all(cls, runs: Path, recipe_name: str = "*") -> "list[RunDir]":
        """The runs of a recipe, or of all recipes; the newest of each first."""
        plans = sorted(runs.glob(f"{recipe_name}/*/plan.json"), reverse=True)
        return [run for path in plans if not (run := cls(path.parent)).is_dry_run]

    @classmethod
    def listed(cls, runs: Path) -> "list[RunDir]":
        """The runs of all recipes, and starts that have no plan yet, or ended before they had."""
        if runs.is_dir():
            next(runs.iterdir(), None)  # glob() passes over a folder that may not be read
        planned = cls.all(runs)
        roots = {path.parents[2] for path in runs.glob("*/*/attempts/*/tokenising.json")}
        unplanned = map(cls, sorted(roots - {run.root for run in planned}))
        return [*planned, *(run for run in unplanned if not run.is_dry_run)]

    def remove_if_unused(self) -> None:
        """Remove a folder in which nothing was planned and no failure was written down."""
        failed = any(attempt.supervisor_file.exists() for attempt in self.attempts())
        if not failed and not self.plan_file.exists():
            shutil.rmtree(self.root, ignore_errors=True)

    def is_removable(self) -> bool:
        """True if all of the folder is ours: it has a plan, or has begun to tokenise, or no file
        but those of a start that dropped its attempts, and no other names than a run writes. What
        lies behind a link never is."""
        if self.root.is_symlink() or self.root.parent.is_symlink() or not self.root.is_dir():
            return False
        written = {path.name for path in vars(self).values()} | {"attempts"}
        if not written.issuperset(path.name for path in self.root.iterdir()):
            return False
        begun = (attempt.tokenising_file.is_file() for attempt in self.attempts())
        if self.plan_file.is_file() or any(begun):
            return True
        # a start that is killed while it drops them leaves its lock and these
        of_start = {self.recipe_yaml, *(self.root / "attempts").rglob("*")}
        ours = {self.lock_file, *(of_start if self.lock_file.is_file() else ())}
        return all(path.is_dir() or path in ours for path in self.root.rglob("*"))

    @property
    def is_dry_run(self) -> bool:
        return self.root.name == DRY_RUN

    def has_trained(self) -> bool:
        """True if the run has a checkpoint of its own, or its model."""
        return any(self.checkpoints.glob("checkpoint-[0-9]*")) or self.outcome() is not None

    def writes_to(self, output_dir: str) -> bool:
        """True if its model belongs into that folder, or did before a folder above both was moved
        or renamed.

        Raises CheckpointError where the run's recipe is damaged."""
        own, asked = Path(_there(self.recipe_file, _OutputDir).output_dir), Path(output_dir)
        return own.resolve() == asked.resolve() or (
            own.name == asked.name and not own.parent.exists()
        )

    def last_step(self) -> int:
        """The newest step that a committed checkpoint holds; 0: none."""
        names = (path.parent.name for path in self.checkpoints.glob("checkpoint-*/manifest.json"))
        return max((int(name.rpartition("-")[2]) for name in names), default=0)

    @property
    def tag(self) -> str:
        """LOWMEM_RUN in the environment of all its processes. It is a path, because two workspaces
        may have runs of one name and second."""
        return str(self.root)

    @property
    def run_id(self) -> str:
        return f"{self.root.parent.name}-{self.root.name}"

    def attempt(self, number: int) -> AttemptDir:
        return AttemptDir(self.root / "attempts" / f"{number:02d}")

    def attempts(self) -> list[AttemptDir]:
        return [AttemptDir(path) for path in sorted((self.root / "attempts").glob("[0-9]*"))]

    def unplanned_attempt(self) -> AttemptDir:
        """The attempt that has just tokenised the rows and has no plan yet, else a new one."""
        for attempt in self.attempts()[-1:]:
            if not attempt.plan_file.exists() and not attempt.supervisor_file.exists():
                return attempt
        return self.new_attempt()

    def new_attempt(self) -> AttemptDir:
        """The next attempt's folder, made now."""
        existing = self.attempts()
        attempt = self.attempt(existing[-1].number + 1 if existing else 1)
        attempt.root.mkdir(parents=True)
        return attempt

    def outcome(self) -> Outcome | None:
        """Rank 0's outcome if an attempt reached the last step, else None.

        Only the last attempt can be complete: none follows a complete one. Raises CheckpointError
        where its file is damaged."""
        attempts = self.attempts()
        try:
            outcome = attempts[-1].read_outcome() if attempts else None
        except CheckpointError as error:
            newest = max(self.checkpoints.glob("checkpoint-[0-9]*"), default=None)
            go_on = f" --resume={newest} goes on from there;" if newest else ""
            raise CheckpointError(
                f"{str(error).partition(';')[0]};{go_on} --resume never starts over"
            ) from error
        return outcome if outcome and outcome.complete else None

    def write_plan(self, recipe: Recipe, plan: Plan) -> None:
        write_atomic(self.recipe_file, recipe.model_dump_json(indent=1) + "\n")
        write_json(self.plan_file, plan)

    def write_tokens(self, tokens: TokenCache) -> None:
        """Write the folder of the run's tokenised rows, and all that decided them: the folder may
        be gone one day; and a few of its rows."""
        write_json(self.tokens_file, UsedTokens(tokens.folder, tokens.identity))
        if rows := read_or_none(tokens.folder / token_cache.SHOWN_ROWS, ShownRows):
            write_json(self.rows_file, rows)

    def read_tokens(self) -> UsedTokens | None:
        return read(self.tokens_file, UsedTokens)

    def read_rows(self) -> ShownRows | None:
        """Rows of the run's data; None if they are missing or damaged."""
        return read_or_none(self.rows_file, ShownRows)

    def read_continues(self) -> Continues | None:
        return read(self.continues_file, Continues)

    def read_recipe(self) -> Recipe:
        return _there(self.recipe_file, Recipe)

    def read_plan(self) -> Plan:
        return _there(self.plan_file, Plan)


@dataclass(frozen=True)
class _OutputDir:
    """The folder of the model, also in a recipe that another version wrote."""

    output_dir: str


def _there(path: Path, noun: type[Noun]) -> Noun:
    """The noun of a file that every run has. Raises CheckpointError."""
    content = read(path, noun)
    if content is None:
        raise damaged_file(path, "there is no such file")
    return content


@dataclass(frozen=True)
class RankStart:
    """The work of a rank. `run` and `attempt` are None until rank 0 has opened them for all."""

    workspace: Workspace
    recipe: Recipe
    plan: Plan
    supervised: bool
    machine: Machine | None = None
    resume: str = "auto"  # value of --resume
    tokenising_processes: int = 1
    run: RunDir | None = None
    attempt: AttemptDir | None = None
    deepspeed_file: Path | None = None

    @cached_property
    def tokens(self) -> TokenCache:
        recipe, plan, workspace = self.recipe, self.plan, self.workspace
        made = token_cache.token_cache(workspace.cache, recipe, plan.shape, plan.data_format)
        return as_begun(made, workspace.runs, recipe, self.resume)


def run_at(resume: str) -> RunDir:
    """The run that --resume names, or the one whose checkpoint it names."""
    path = expanded(resume)
    return RunDir(path.parent.parent if path.name.startswith("checkpoint-") else path)


def as_begun(tokens: TokenCache, runs: Path, recipe: Recipe, resume: str) -> TokenCache:
    """The rows of the run that a start continues, if an earlier version tokenised them otherwise;
    else `tokens`. `resume`: auto, never, or a path to a run or a checkpoint of it."""
    if resume == "never":
        return tokens
    identity = {
        key: value for key, value in tokens.identity.items() if key != token_cache.BESIDE_CONFIG
    }
    before = tokens.folder.with_name(digest(identity))
    earlier = [run_at(resume)]
    if resume == "auto":
        earlier = (
            run
            for run in RunDir.all(runs, recipe.name)
            if run.writes_to(recipe.output_dir)
            and (run.has_trained() or run.continues_file.exists())
        )
    used = None
    with suppress(CheckpointError):  # decide() says what is damaged
        used = next((run.read_tokens() for run in earlier), None)
    is_begun_so = used is not None and used.folder.name == before.name
    return replace(tokens, identity=identity, folder=before) if is_begun_so else tokens


def left_in(path: Path) -> Path:
    """The model's folder of the run in `path`, else `path` itself. Raises ResourceError for a run
    that has not finished, and for one whose model is gone."""
    run = RunDir(path)
    if not run.plan_file.exists():
        return path
    if (outcome := run.outcome()) is None:
        raise ResourceError(
            f"{path}: this run has not finished; give one of its checkpoints, or let it finish"
        )
    folder = Path(outcome.model_dir)
    if (newest := _run_of_model(folder)) in (None, run.run_id):
        return folder
    for previous in folder.parent.glob(f"{glob.escape(folder.name)}.previous*"):
        if _run_of_model(previous) == run.run_id:
            return previous
    raise ResourceError(
        f"{path}: the model of this run is gone: {folder} holds that of a later one, {newest}; give"
        f" {folder} for that model"
    )


def _run_of_model(folder: Path) -> str | None:
    """The run whose model is in a folder; None where nothing says it."""
    model = read_or_none(folder / "lowmem.json", ExportedModel)
    return model.run if model else None


NOT_CHECKED = "not checked"  # begins ExportedModel.check of a folder that is not known to be right


def holds_model(folder: Path, run_id: str) -> bool:
    """True if the folder has the finished model of that run."""
    model = read_or_none(folder / "lowmem.json", ExportedModel)
    return model is not None and model.run == run_id and not model.check.startswith(NOT_CHECKED)


def kept_aside(folder: Path, run_id: str) -> list[str]:
    """A line for a model of another run that stands where this one's will; export.py keeps it as
    <name>.previous."""
    other = read(folder / "lowmem.json", ExportedModel)
    if other is None or other.run == run_id:
        return []
    before = folder.with_name(f"{folder.name}.previous")
    return [
        f"{folder.name} holds the model of {other.run}; it will be kept as {before.name}"
        + (", in the place of the older model there" if is_model(before) else "")
    ]


def downloads(recipe: Recipe) -> list[Downloaded]:
    """The origins of a recipe's model and data, as far as they were downloaded by name."""
    folders = [*filter(None, [recipe.model.path]), *recipe.data.paths]
    return [
        record
        for folder in folders
        if (record := read_or_none(Path(folder) / DOWNLOADED, Downloaded))
    ]


def log_file(root: Path, run: RunDir) -> Path:
    """The log file that the guides name: logs/chat_trainer_<recipe>-<time>.log."""
    return root / "logs" / f"chat_trainer_{run.run_id}.log"


def log_files(root: Path, run: RunDir, recipe: Recipe) -> list[Path]:
    """Every log of a run: its own, and the recipe's that all runs append to."""
    return [
        log_file(root, run),
        *([Path(recipe.log_dir) / "training.log"] if recipe.log_dir else []),
    ]


def show_events(run: RunDir, recipe: Recipe) -> None:
    """A name in the recipe's log_dir that leads to the run's TensorBoard events."""
    if recipe.log_dir:
        folder = Path(recipe.log_dir)
        folder.mkdir(parents=True, exist_ok=True)
        with suppress(FileExistsError):
            (folder / run.run_id).symlink_to(run.tensorboard, target_is_directory=True)


@contextmanager
def output_lock(workspace: Workspace, recipe: Recipe) -> Iterator[None]:
    """Allow one run at a time per output folder, whatever recipe, workspace or container writes to
    it: by a file beside it, or with the runs where that disk keeps no locks."""
    folder = Path(recipe.output_dir).resolve()
    # two output folders may have one name
    digest = hashlib.sha256(os.fsencode(folder)).hexdigest()[:16]
    label = f"output_dir {recipe.output_dir} of {recipe.name}"
    with ExitStack() as stack:
        try:
            stack.enter_context(locks.lock(folder.with_name(f".{folder.name}.lock"), label))
        except locks.NoLocks:
            stack.enter_context(locks.lock(workspace.runs / f".lock-{digest}", label))
        yield


def dry_run_lock(workspace: Workspace, recipe: Recipe) -> AbstractContextManager[None]:
    """Allow one dry run of a recipe at a time, also beside a run."""
    return locks.lock(workspace.runs / recipe.name / ".lock-dry-run", f"{recipe.name} (dry run)")


def run_lock(run: RunDir) -> AbstractContextManager[None]:
    """Allow one start at a time in a run's folder, whatever recipe or output folder led to it."""
    return locks.lock(run.lock_file, str(run.root))
