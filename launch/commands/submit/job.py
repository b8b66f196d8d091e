"""A submitted job: a start of `run` as it was typed, in a folder of its own, which a queue, cron or
Slurm starts once or again.

    submitted/<recipe>-<time>/
        job.sh       starts it; any scheduler can call it
        job.json     Job
        recipe.yaml  the recipe's file, as it was when it was submitted
        output.txt   what its starts have printed
        status.json  Status of its newest start
    submitted/code/<hash>/  the code of one or more jobs"""

import hashlib
import os
import re
import shlex
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any

from launch.base import environment, files, locks
from launch.base.errors import (
    ConfigError,
    DataError,
    Interrupted,
    LaunchError,
    ResourceError,
)
from launch.base.workspace import CHECKOUT, CODE, Workspace
from launch.commands.recipe_arguments import AUTO, RecipeArguments
from launch.commands.submit import crontab
from launch.predict.facts import Facts
from launch.predict.models import weight_files
from launch.recipe import load
from launch.recipe.paths import absolute_override, pinned
from launch.schema.recipe import Recipe

# an installed package has configs/ and scripts/ in launch/
_CODE_FOLDERS = ("launch", "training", *(("configs", "config", "scripts") if CHECKOUT else ()))
_CODE_FILES = ("train_low_mem.py", *(("pyproject.toml",) if CHECKOUT else ()))
_KEPT_COMPLETE = 20  # jobs whose training is complete
_COPY_OF_CODE = re.compile(r"[0-9a-f]{16}(\.\d+\.tmp)?")  # the name of its folder
_NEW_CODE_S = 600.0  # whose job may be about to be written
# variables of one shell, terminal, run or job of another scheduler
NOT_KEPT = re.compile(
    r"SLURM_|(LOWMEM_(RUN|SUPERVISED|END_S|ROOT_PID)|PWD|TERM|COLUMNS|LINES|HOSTNAME|TMPDIR|TEMP|TMP"
    r"|XDG_RUNTIME_DIR|PYTHONPATH)$"
)
# parts of TokenCache.identity that the user's files decide: their keys in a recipe
_DECIDED_BY = {
    "train": "data.train_file",
    "validation": "data.validation_file",
    "tokenizer": "the tokenizer's files",
    "chat_template": "tokenizer.chat_template",
}
_VARIABLE = re.compile(r"[A-Za-z_]\w*", re.ASCII)  # others would be code of the script
_NO_LINE = re.compile(r"[\r\n]+")
WEIGHTS = "weights"  # of model.path, besides these


@dataclass(frozen=True)
class SubmittedJob:
    """A start that was submitted."""

    name: str
    argv: tuple[str, ...]  # after `python -m launch run`, as they were typed
    cwd: Path  # to which its paths are relative
    submitted_s: float  # unix time
    hashes: Mapping[str, Any] | None = None  # of its data and model; None: whatever is there
    code: str = ""  # the hash of its copy of the code; "": the code that is there
    schedule: str = ""  # times as cron reads them


@dataclass(frozen=True)
class _Status:
    """The newest start of a job: status.json."""

    pid: int
    started_s: float  # unix time
    starts: int = 1
    ended_s: float | None = None
    exit_code: int | None = None  # None: it runs, or was killed
    error: str = ""


class JobDir:
    """The folder of a job. `part`: of several starts side by side, a task of Slurm's array or a
    machine, "" of one alone."""

    def __init__(self, root: Path, part: str = "") -> None:
        self.root = root
        self.script = root / "job.sh"
        self.output = root / "output.txt"
        self.recipe_file = root / "recipe.yaml"
        self.status_file = root / f"status{part}.json"
        self.lock_file = root / f".lock{part}"

    @property
    def runs(self) -> bool:
        """True while a start of it goes on, here, in another container or on another machine."""
        return locks.holder_pid(self.lock_file) is not None

    def read(self) -> SubmittedJob:
        """Raises ConfigError if there is no job, CheckpointError if its file is damaged."""
        job = files.read(self.root / "job.json", SubmittedJob)
        if job is None:
            raise ConfigError(f"{self.root}: holds no job; expected submitted/<recipe>-<time>")
        return job

    def read_status(self) -> _Status | None:
        """None: it has not started, or the file is damaged."""
        return files.read_or_none(self.status_file, _Status)

    @contextmanager
    def hold(self) -> Iterator[Callable[[int], None]]:
        """Hold the job for this start, and keep its status. Yields a function for its exit code.

        Raises LockHeld if another start of it runs."""
        with locks.lock(self.lock_file, f"job {self.root.name}"):
            before = self.read_status()
            status = _Status(os.getpid(), time.time(), before.starts + 1 if before else 1)
            files.write_json(self.status_file, status)

            def end(exit_code: int, error: str = "") -> None:
                files.write_json(
                    self.status_file,
                    replace(status, ended_s=time.time(), exit_code=exit_code, error=error),
                )

            try:
                yield end
            except BaseException as error:
                is_ours = isinstance(error, LaunchError | Interrupted)
                end(error.exit_code if is_ours else 1, str(error))
                raise


def _folder(workspace: Workspace) -> Path:
    return workspace.root / "submitted"


def all_jobs(workspace: Workspace) -> dict[JobDir, SubmittedJob]:
    """Every job of a workspace by its folder, the oldest first; damaged ones are left out."""
    return {
        JobDir(path.parent): job
        for path in sorted(_folder(workspace).glob("*/job.json"))
        if (job := files.read_or_none(path, SubmittedJob)) is not None
    }


def freeze(
    workspace: Workspace,
    typed: RecipeArguments,
    resume: str,
    facts: Facts,
    environ: Mapping[str, str],
) -> JobDir:
    """Write a job whose recipe, keys, code and hashes of data stay what they are now."""
    _check_names(workspace, facts.recipe, environ)
    job_dir = _new(workspace, f"{facts.recipe.name}-{datetime.now():%Y%m%d-%H%M%S}")
    shutil.copyfile(load.find(typed.recipe), job_dir.recipe_file)
    argv = (
        str(job_dir.recipe_file),
        *([AUTO] if typed.is_auto else []),
        *map(absolute_override, typed.overrides),
        *pinned(facts.recipe, facts.changes),
        f"--resume={resume}",
    )
    # the paths of a recipe of configs/ are relative to the workspace
    cwd = Path.cwd() if load.is_file(typed.recipe) else workspace.root
    code = _copy_code(workspace)
    job = SubmittedJob(job_dir.root.name, argv, cwd, time.time(), hashes(facts), code.name)
    _write(job_dir, job, workspace, facts.recipe, environ, code)
    return job_dir


def schedule(
    workspace: Workspace,
    old: JobDir | None,
    argv: Sequence[str],
    recipe: Recipe,
    environ: Mapping[str, str],
    times: str,
) -> tuple[JobDir, bool]:
    """Let cron start a job that reads recipe, data and code anew at each of its times, in place of
    an old one. False: its line was there already. Times that crontab refuses change nothing."""
    _check_names(workspace, recipe, environ)
    job_dir = old or _new(workspace, f"{recipe.name}-cron")
    name = job_dir.root.name
    job = SubmittedJob(name, tuple(argv), Path.cwd(), time.time(), schedule=times)
    try:
        is_new = crontab.add(workspace.root, name, times, job_dir.script, job_dir.output)
        _write(job_dir, job, workspace, recipe, environ, CODE)
    except BaseException:
        if not old:
            remove(job_dir)
            crontab.remove(workspace.root, name)
        raise
    return job_dir, is_new


def plain_line(workspace: Workspace, argv: Sequence[str]) -> tuple[str, ...]:
    """The line that trains what was typed, with nothing kept as it is now, wherever it runs."""
    return (
        *("env", f"--chdir={Path.cwd()}", f"LOWMEM_ROOT={workspace.root}", f"PYTHONPATH={CODE}"),
        *(sys.executable, "-P", "-m", "launch", "run", *argv),
    )


def remove(job_dir: JobDir) -> None:
    """Remove a job; what lies behind a link stays."""
    if not (job_dir.root.is_symlink() or job_dir.root.parent.is_symlink()):
        shutil.rmtree(job_dir.root)


def of_process(run: Path, pid: int) -> JobDir | None:
    """The job whose start is this process, of the workspace of its run."""
    if len(run.parents) < 3:
        return None
    dirs = all_jobs(Workspace(run.parents[2]))
    return next((each for each in dirs if locks.holder_pid(each.lock_file) == pid), None)


def killed(workspace: Workspace) -> list[Path]:
    """The scripts of jobs whose newest start was killed, or ended with the machine."""
    return [
        job_dir.script
        for job_dir in all_jobs(workspace)
        if not job_dir.runs and (status := job_dir.read_status()) and status.exit_code is None
    ]


def hashes(facts: Facts) -> dict[str, Any]:
    """Hashes of the files that decide what is trained."""
    assert facts.rows.tokens is not None
    identity, path = facts.rows.tokens.identity, facts.recipe.model.path
    of_files = {part: identity[part] for part in _DECIDED_BY if identity.get(part) is not None}
    return {**of_files, WEIGHTS: weight_files.weights_fingerprint(Path(path))} if path else of_files


def check(job: SubmittedJob, facts: Facts) -> None:
    """Raises DataError if a file has changed since the job was submitted."""
    if job.hashes is None:
        return
    now = hashes(facts)
    changed = [part for part in (*_DECIDED_BY, WEIGHTS) if job.hashes.get(part) != now.get(part)]
    if changed:
        names = ", ".join(_DECIDED_BY.get(part, "the weights of model.path") for part in changed)
        raise DataError(
            f"job {job.name}: {names} changed since it was submitted on"
            f" {datetime.fromtimestamp(job.submitted_s):%Y-%m-%d %H:%M}; put the files back, or"
            " submit it again"
        )


def forget_old(workspace: Workspace) -> None:
    """Remove all but the newest complete jobs, and code that no job names. A job whose file is
    damaged may name any of it."""
    complete = [
        job_dir
        for job_dir, job in all_jobs(workspace).items()
        if not job.schedule and (status := job_dir.read_status()) and status.exit_code == 0
    ]
    for job_dir in complete[:-_KEPT_COMPLETE]:
        remove(job_dir)
    jobs, above = all_jobs(workspace), _folder(workspace) / "code"
    if len(jobs) < len([*_folder(workspace).glob("*/job.json")]) or above.is_symlink():
        return
    used = {job.code for job in jobs.values()}
    for code in above.glob("*"):
        is_ours = _COPY_OF_CODE.fullmatch(code.name) and code.is_dir() and not code.is_symlink()
        is_new = time.time() - code.lstat().st_mtime < _NEW_CODE_S
        if is_ours and code.name not in used and not is_new:
            shutil.rmtree(code)


def _check_names(workspace: Workspace, recipe: Recipe, environ: Mapping[str, str]) -> None:
    """Raise ConfigError for a folder or a variable of the job that is no UTF-8."""
    folders = {"the folder of the start": str(Path.cwd()), "LOWMEM_ROOT": str(workspace.root)}
    for name, value in (folders | _variables(recipe, environ)).items():
        try:
            value.encode()
        except UnicodeEncodeError as error:
            raise ConfigError(
                f"submit: {name} is {value!r}, which is not UTF-8 at character {error.start}; the"
                " files of a job are: rename the folder, or set the variable anew"
            ) from error


def _variables(recipe: Recipe, environ: Mapping[str, str]) -> dict[str, str]:
    """The variables that a job keeps."""
    return {
        name: value
        for name, value in environment.passed(environ, recipe.launch.pass_env).items()
        if _VARIABLE.fullmatch(name) and not NOT_KEPT.match(name)
    }


def _new(workspace: Workspace, name: str) -> JobDir:
    """The folder of a new job; a second one of this second gets a number. Raises ResourceError."""
    above = _folder(workspace)
    files.refuse_strangers(above)
    try:
        return JobDir(files.new_folder(above, name))
    except OSError as error:
        raise ResourceError(
            f"{above}: no folder for a job can be made there ({error.strerror}); move it away"
        ) from error


def _write(
    job_dir: JobDir,
    job: SubmittedJob,
    workspace: Workspace,
    recipe: Recipe,
    environ: Mapping[str, str],
    code: Path,
) -> None:
    """Write the job, and the script that starts it with these variables."""
    users = (
        path for path in environ.get("PYTHONPATH", "").split(":") if path and path != str(CODE)
    )
    variables = {
        **_variables(recipe, environ),
        "LOWMEM_ROOT": str(workspace.root),
        "PYTHONPATH": ":".join([str(code), *users]),
    }
    exports = "".join(
        f"export {name}={shlex.quote(value)}\n" for name, value in sorted(variables.items())
    )
    start = [sys.executable, "-P", "-m", "launch", "submit", "start", str(job_dir.root)]
    job_dir.script.write_text(
        f"#!/usr/bin/env bash\n# {_NO_LINE.sub(' ', shlex.join(job.argv))}\n{exports}"
        f'cd -- {shlex.quote(str(job.cwd))} || exit 3\nexec {shlex.join(start)} "$@"\n',
        encoding="utf-8",
    )
    job_dir.script.chmod(0o700)
    files.write_json(job_dir.root / "job.json", job)


def _copy_code(workspace: Workspace) -> Path:
    """Copy the code that runs now, unless that is done; the folder, whose name is its hash."""
    paths = [
        *(CODE / name for name in _CODE_FILES),
        *(path for name in _CODE_FOLDERS for path in (CODE / name).rglob("*")),
    ]
    paths = [path for path in paths if path.is_file() and "__pycache__" not in path.parts]
    digest, contents = hashlib.sha256(), {}
    for path in sorted(paths):
        contents[path.relative_to(CODE)] = content = path.read_bytes()
        digest.update(f"{path.relative_to(CODE)}\0{len(content)}\0".encode() + content)
    place = _folder(workspace) / "code" / digest.hexdigest()[:16]
    if not place.is_dir():
        aside = place.with_name(f"{place.name}.{os.getpid()}.tmp")
        for name, content in contents.items():
            (aside / name).parent.mkdir(parents=True, exist_ok=True)
            (aside / name).write_bytes(content)
            shutil.copymode(CODE / name, aside / name)
        with suppress(OSError):  # another submit has just made it
            aside.rename(place)
        shutil.rmtree(aside, ignore_errors=True)
    return place
