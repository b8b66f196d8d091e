"""Every path of a run, and how its files are written: aside, then renamed, so that a reader never sees half a file."""

from __future__ import annotations

import ctypes
import hashlib
import io
import json
import math
import os
import re
import resource
import signal
import stat
import sys
import time
import traceback
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from launch import shards
from launch.errors import HIDDEN, CheckpointError, ConfigError, ResourceError, shown
from launch.schema import DataFormat, Machine, ModelShape, Plan, Recipe

TOKEN_CACHE_VERSION = 2  # raise when training/ tokenises the same input to other rows
PR_SET_PDEATHSIG = 1  # prctl(2)
SAMPLES = "samples.i32"  # of a rank: step, number of rows, the rows, as little-endian int32
TOKENS_MADE_OF = "made_of.json"  # of a token cache: token_identity()
TOKENS_READY = "counts.json"  # of a token cache: what its rows are; its folder is renamed when all is written


def write_atomic(path: Path, text: str) -> None:
    """Write `text` to `path` so that a crash leaves either the old file or the new one."""
    aside = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with aside.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    aside.replace(path)


def sync(path: Path) -> None:
    """Make a file's content, or a folder's names, outlast a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_all(folder: Path) -> None:
    """sync() everything in it: else, after a power cut, the word that it is whole may outlast what it speaks of."""
    for path in [*folder.rglob("*"), folder]:
        sync(path)


def to_json(value: Any, indent: int | None = None) -> str:
    """JSON text that every reader takes: NaN and infinities, which JSON has no numbers for, as "nan", "inf", "-inf"."""
    return json.dumps(_in_json(value), ensure_ascii=False, indent=indent, allow_nan=False)


def _in_json(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _in_json(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_in_json(item) for item in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    write_atomic(path, to_json(value, indent=1) + "\n")


def read_json(path: Path) -> dict[str, Any] | None:
    """The file's object, or None when there is no such file. Raises CheckpointError where it is damaged."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise _damaged(path, error) from error


def _damaged(path: Path, error: Exception) -> CheckpointError:
    return CheckpointError(
        f"{path}: missing or damaged ({str(error).splitlines()[0]}); put a whole copy of it back, or start over with"
        " --resume never"
    )


HIGHEST = re.compile(r"VmHWM:\s+(\d+) kB")
CODE = Path(__file__).resolve().parent.parent  # the checkout: configs/, scripts/, train_low_mem.py


@dataclass(frozen=True)
class House:
    """Where data/, runs/, logs/, model_save/ and the caches are: the checkout, or LOWMEM_ROOT."""

    root: Path

    @classmethod
    def here(cls) -> House:
        named = os.environ.get("LOWMEM_ROOT") or str(CODE)
        if HIDDEN.search(named) or "\n" in named or "\t" in named:
            raise ConfigError(f"LOWMEM_ROOT {named!r}: holds a control character; name another folder")
        return cls(Path(named).resolve())

    @property
    def runs(self) -> Path:
        return self.root / "runs"

    @property
    def cache(self) -> Path:
        return self.root / ".cache"

    @property
    def traces(self) -> Path:
        """Traced steps; they depend on no house, so several may share a folder."""
        return Path(os.environ.get("LOWMEM_TRACES") or self.cache / "traces").resolve()

    @property
    def ledger_file(self) -> Path:
        return self.cache / "ledger.sqlite"


class AttemptDir:
    """One start of the ranks: runs/<recipe>/<time>/attempts/<number>."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.plan_file = root / "plan.json"
        self.log_file = root / "log.txt"  # all that the launcher and the ranks print
        self.train_log = root / "train.log"  # rank 0's own lines
        self.machine_file = root / "machine.json"  # on which it was planned
        self.events_file = root / "events.jsonl"
        self.held_out_file = root / "held_out.jsonl"
        self.outcome_file = root / "outcome.json"
        self.supervisor_file = root / "supervisor.json"  # how the launcher saw it end
        self.second_step_file = root / "second_step.json"  # what the first step in the steady state took

    @property
    def number(self) -> int:
        return int(self.root.name)

    def read_plan(self) -> Plan:
        return TypeAdapter(Plan).validate_json(self.plan_file.read_bytes())

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
        word = {
            "rank": rank,
            "type": type(error).__name__,
            "message": shown(str(error)),
            "exit_code": getattr(error, "exit_code", None),  # of a LaunchError: the user's to mend
            "fix": getattr(error, "fix", ""),
            "traceback": shown("".join(traceback.format_exception(error))),
            "time": time.time(),
        }
        write_json(self.error_file(rank), word)

    def rank_errors(self) -> list[dict[str, Any]]:
        """What failing ranks wrote, earliest first: the first is the root cause, the others follow from it."""
        found = [error for path in self.root.glob("ranks/*/error.json") if (error := read_json(path))]
        return sorted(found, key=lambda error: error["time"])


class RunDir:
    """One run: runs/<recipe>/<yyyymmdd-hhmmss>, the interface between the launcher, its ranks and the report."""

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
        self.tokens_file = root / "tokens.json"  # {"folder": where the tokenised rows are, "made_of": token_identity()}
        self.evidence_file = root / "evidence.json"  # what ran out of memory so far (estimate.RanOut), a list
        self.continues_file = root / "continues.json"  # {"checkpoint", "samples_seen", "group_size"}: an older run's

    @classmethod
    def create(cls, runs: Path, recipe_name: str, now: datetime) -> RunDir:
        """A new folder named by the time; two starts in one second get a suffix."""
        parent = runs / recipe_name
        parent.mkdir(parents=True, exist_ok=True)
        stamp = now.strftime("%Y%m%d-%H%M%S")
        for suffix in ["", *(f"-{n}" for n in range(2, 1000))]:
            try:
                (parent / f"{stamp}{suffix}").mkdir()
            except FileExistsError:
                continue
            run = cls(parent / f"{stamp}{suffix}")
            run.checkpoints.mkdir()
            return run
        raise AssertionError("a thousand runs within a second")

    @classmethod
    def all(cls, runs: Path, recipe_name: str) -> list[RunDir]:
        """The recipe's runs, the newest first."""
        return [cls(path.parent) for path in sorted((runs / recipe_name).glob("*/plan.json"), reverse=True)]

    @classmethod
    def newest(cls, runs: Path, recipe_name: str) -> RunDir | None:
        """The recipe's last run that has a checkpoint or is complete; else the last that takes another's over."""
        found = cls.all(runs, recipe_name)
        trained = (run for run in found if run.has_trained())
        return next(trained, None) or next((run for run in found if run.continues_file.exists()), None)

    def has_trained(self) -> bool:
        """Whether it has a checkpoint of its own, or its model."""
        return any(self.checkpoints.glob("checkpoint-[0-9]*")) or self.outcome() is not None

    def writes_to(self, output_dir: str) -> bool:
        """Whether its model belongs into that folder, or did before a folder above both was moved or renamed.

        Raises CheckpointError where the run's recipe is damaged."""
        recipe = read_json(self.recipe_file)
        if recipe is None or not isinstance(recipe.get("output_dir"), str):
            raise _damaged(self.recipe_file, ValueError("no key output_dir"))
        own, asked = Path(recipe["output_dir"]), Path(output_dir)
        return own.resolve() == asked.resolve() or (own.name == asked.name and not own.parent.exists())

    def last_step(self) -> int:
        """The newest step that a committed checkpoint holds; 0: none."""
        names = (path.parent.name for path in self.checkpoints.glob("checkpoint-*/manifest.json"))
        return max((int(name.rpartition("-")[2]) for name in names), default=0)

    @property
    def tag(self) -> str:
        """LOWMEM_RUN in the environment of all its processes; two houses may have runs of one name and second."""
        return str(self.root)

    @property
    def run_id(self) -> str:
        return f"{self.root.parent.name}-{self.root.name}"

    def attempt(self, number: int) -> AttemptDir:
        return AttemptDir(self.root / "attempts" / f"{number:02d}")

    def attempts(self) -> list[AttemptDir]:
        return [AttemptDir(path) for path in sorted((self.root / "attempts").glob("[0-9]*"))]

    def new_attempt(self) -> AttemptDir:
        """The next attempt's folder, made now."""
        existing = self.attempts()
        attempt = self.attempt(existing[-1].number + 1 if existing else 1)
        attempt.root.mkdir(parents=True)
        return attempt

    def outcome(self) -> dict[str, Any] | None:
        """Rank 0's outcome if an attempt reached the last step, else None.

        Only the last attempt can be complete: none follows a complete one. Raises CheckpointError where its file is
        damaged."""
        attempts = self.attempts()
        outcome = read_json(attempts[-1].outcome_file) if attempts else None
        if outcome is not None and not isinstance(outcome.get("complete"), bool):
            raise _damaged(attempts[-1].outcome_file, ValueError("no key complete"))
        return outcome if outcome and outcome["complete"] else None

    def write_plan(self, recipe: Recipe, plan: Plan) -> None:
        write_atomic(self.recipe_file, recipe.model_dump_json(indent=1) + "\n")
        write_json(self.plan_file, asdict(plan))

    def write_tokens(self, folder: Path) -> None:
        """Which tokenised rows it trains, and what they were made of: their folder may be gone one day."""
        write_json(self.tokens_file, {"folder": str(folder), "made_of": read_json(folder / TOKENS_MADE_OF)})

    def read_recipe(self) -> Recipe:
        try:
            return Recipe.model_validate_json(self.recipe_file.read_bytes())
        except (FileNotFoundError, ValidationError) as error:
            raise _damaged(self.recipe_file, error) from error

    def read_plan(self) -> Plan:
        try:
            return TypeAdapter(Plan).validate_json(self.plan_file.read_bytes())
        except (FileNotFoundError, ValidationError) as error:
            raise _damaged(self.plan_file, error) from error


@dataclass(frozen=True)
class Start:
    """What a rank is about to run. `run` and `attempt` are None until rank 0 has opened them for all."""

    house: House
    recipe: Recipe
    plan: Plan
    supervised: bool
    machine: Machine | None = None
    wish: str = "auto"  # of --resume
    tokenising_processes: int = 1
    run: RunDir | None = None
    attempt: AttemptDir | None = None
    deepspeed_file: Path | None = None


def die_with_launcher(number: int = signal.SIGKILL) -> None:
    """From now on the kernel sends this process a signal when its parent dies: no rank outlives its launcher."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, number)


def settle_process() -> None:
    """From now on what this process and its children write is its user's alone, no crash writes memory to disk, and a
    character that a terminal's encoding lacks is written out."""
    os.umask(0o077)
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # None where it was closed
            stream.reconfigure(errors="backslashreplace")


def boot_id() -> str:
    """This boot of this machine; another boot, or another machine, has another."""
    return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()


def refuse_strangers(path: Path) -> None:
    """Raises ResourceError for a name that somebody else has put into a folder where anybody may write, as /tmp is."""
    for place in (path, *path.parents):
        try:
            found, above = place.lstat(), place.parent.stat()
        except (FileNotFoundError, NotADirectoryError):
            continue
        if above.st_mode & stat.S_IWOTH and found.st_uid not in (os.geteuid(), above.st_uid):
            raise ResourceError(
                f"{place}: belongs to user {found.st_uid}, in a folder where anybody may write; choose another name"
            )


def check_output(folder: Path) -> None:
    """The model's folder is replaced as a whole at the end, so it must be ours or empty, and writable.

    Raises ResourceError.
    """
    refuse_strangers(folder)
    if folder.is_symlink():
        raise ResourceError(f"output_dir {folder}: is a symbolic link, to {folder.resolve()}; give that folder itself")
    if folder.is_dir() and any(folder.iterdir()) and not (folder / "lowmem.json").exists():
        raise ResourceError(f"output_dir {folder}: holds files that no run of ours wrote; choose another folder")
    if folder.exists() and not folder.is_dir():
        raise ResourceError(f"output_dir {folder}: is a file; choose another folder")
    for ending in ("tmp", "old"):  # export.py's
        refuse_strangers(folder.with_name(f".{folder.name}.{ending}"))
    parent = next(path for path in folder.parents if path.exists())
    if not os.access(parent, os.W_OK) or not os.statvfs(parent).f_blocks:  # /proc and its like hold no files
        raise ResourceError(f"output_dir {folder}: {parent} cannot be written to; choose another folder")


def job_pss_bytes(root_pid: int) -> tuple[int, int]:
    """(PSS of a process and its descendants now, the most that it can have been), as if no other job ran here.

    Pages of a process's own count for it, those it shares once for the job: beside other jobs that map the same
    libraries their PSS would be less, by what those count. The second figure adds what each process had more at its
    highest (VmHWM) than it has now, so that no peak between two reads is lost: of several ranks that peak apart it is
    an upper bound. Processes that end meanwhile are left out.
    """
    import psutil  # 20 ms that planning need not pay

    own = shared = above = 0
    try:
        root = psutil.Process(root_pid)
        processes = [root, *root.children(recursive=True)]
    except psutil.NoSuchProcess:
        return 0, 0
    for process in processes:
        try:
            memory = process.memory_full_info()
            highest = HIGHEST.search(Path(f"/proc/{process.pid}/status").read_text(encoding="utf-8"))
        except (psutil.NoSuchProcess, psutil.AccessDenied, FileNotFoundError, ProcessLookupError):
            continue
        own += memory.uss
        shared = max(shared, memory.rss - memory.uss)
        above += max(int(highest[1]) * 1024 - memory.rss, 0) if highest else 0
    return own + shared, own + shared + above


def left_in(path: Path) -> Path:
    """Where the run in `path` left its model, else `path` itself. Raises ResourceError where a run has not finished."""
    run = RunDir(path)
    if not run.plan_file.exists():
        return path
    if (outcome := run.outcome()) is None:
        raise ResourceError(f"{path}: this run has not finished; give one of its checkpoints, or let it finish")
    return Path(outcome["model_dir"])


def kept_aside(folder: Path, run_id: str) -> list[str]:
    """A line for a model of another run that stands where this one's will; export.py keeps it as <name>.previous."""
    other = read_json(folder / "lowmem.json")
    if other is None or other["run"] == run_id:
        return []
    return [f"{folder.name} holds the model of {other['run']}; it will be kept as {folder.name}.previous"]


def log_file(root: Path, run: RunDir) -> Path:
    """Where the guides tell people to look: logs/chat_trainer_<recipe>-<time>.log."""
    return root / "logs" / f"chat_trainer_{run.run_id}.log"


def log_files(root: Path, run: RunDir, recipe: Recipe) -> list[Path]:
    """Every log of a run: its own, and the recipe's that all runs append to."""
    return [log_file(root, run), *([Path(recipe.log_dir) / "training.log"] if recipe.log_dir else [])]


def show_events(run: RunDir, recipe: Recipe) -> None:
    """A name in the recipe's log_dir that leads to the run's TensorBoard events."""
    if recipe.log_dir:
        folder = Path(recipe.log_dir)
        folder.mkdir(parents=True, exist_ok=True)
        with suppress(FileExistsError):
            (folder / run.run_id).symlink_to(run.tensorboard, target_is_directory=True)


def folder_fingerprint(folder: Path) -> str:
    """sha256 over the small files of a tokenizer folder (weights do not change how text is cut)."""
    digest = hashlib.sha256()
    for path in sorted(folder.iterdir()):
        if path.is_file() and path.suffix in {".json", ".model", ".txt", ".jinja"}:
            digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()


def token_identity(cache: Path, recipe: Recipe, shape: ModelShape, data_format: DataFormat) -> dict[str, Any]:
    """Everything that decides the bytes of a run's tokenised rows. Reads files that the cache does not know yet."""
    data, known = recipe.data, known_files(cache)
    files = [Path(file) for file in (data.train_file, data.validation_file) if file]
    # rows of one unit are not packed with those of another
    units = [shards.unit_bytes(file) for file in files if shards.stored_bytes(file) > shards.UNIT_BYTES]
    tokenizer_path = recipe.tokenizer.path or recipe.model.path
    return {
        "version": TOKEN_CACHE_VERSION,
        "train": shards.ends_fingerprint(Path(data.train_file))
        if data.streaming
        else shards.fingerprint(Path(data.train_file), known),
        "validation": shards.fingerprint(Path(data.validation_file), known) if data.validation_file else None,
        "columns": [data_format.kind, data_format.file_type, dict(data_format.columns)]
        + ([sorted(data_format.ignored)] if data_format.ignored else []),  # where later rows may hold more than they
        "limits": [data.max_length, data.max_train_samples, data.max_validation_samples]
        + ([data.max_bad_rows] if data.max_bad_rows else [])
        + (["packed"] if data.packing else [])
        + ([["streaming", data.stream_unit_bytes]] if data.streaming else [])
        + [["units", size] for size in units if data.packing],
        "task": recipe.task,
        "encoder_decoder": shape.is_encoder_decoder,
        "tokenizer": folder_fingerprint(Path(tokenizer_path))
        if tokenizer_path
        else [recipe.tokenizer.split, recipe.tokenizer.vocab_size or shape.config["vocab_size"]],
    }


def token_cache(cache: Path, recipe: Recipe, shape: ModelShape, data_format: DataFormat) -> Path:
    """The folder of this run's tokenised rows."""
    return token_folder(cache, token_identity(cache, recipe, shape, data_format))


def token_files(folder: Path, part: str) -> list[Path]:
    """The tokenised rows of a part, "train" or "validation", in their order: one file, or one of each unit."""
    alone = folder / f"{part}.arrow"
    return [alone] if alone.exists() else sorted(folder.glob(f"{part}-*.arrow"))


def known_files(cache: Path) -> shards.Known:
    """What earlier starts have read of data files."""
    return shards.Known(cache / "files.json")


def token_folder(cache: Path, identity: Mapping[str, Any]) -> Path:
    """The folder of rows that were made of this."""
    name = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:24]
    return cache / "tokens" / name
