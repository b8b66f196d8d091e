"""`submit cron`: jobs that cron starts at their times: added, listed, removed."""

import shlex
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path

from launch.base import locks
from launch.base.errors import ConfigError
from launch.base.workspace import Workspace
from launch.commands.recipe_arguments import say
from launch.commands.submit import asked, crontab, job
from launch.commands.submit.job import JobDir
from launch.recipe.paths import pinned
from launch.recipe.strict_yaml import show

_NO_JOB = "cron starts no job of"


def main(workspace: Workspace, unparsed: Sequence[str], environ: Mapping[str, str]) -> None:
    if not unparsed:
        raise ConfigError(
            'submit cron: expected its times and a recipe, such as submit cron "0 2 * * *" sft, or'
            " list, or remove JOB"
        )
    first, *argv = unparsed
    if first == "list":
        _list(workspace, argv)
    elif first == "remove":
        _remove(workspace, argv)
    else:
        _add(workspace, crontab.check(first), argv, environ)


def _add(workspace: Workspace, times: str, argv: list[str], environ: Mapping[str, str]) -> None:
    typed, _ = asked.read(argv)
    facts = asked.facts_here(typed)
    recipe, argv = facts.recipe, [*argv, *pinned(facts.recipe, facts.changes)]
    same = (
        job_dir
        for job_dir, each in job.all_jobs(workspace).items()
        if each.schedule and (each.argv, each.cwd) == (tuple(argv), Path.cwd())
    )
    job_dir, is_new = job.schedule(workspace, next(same, None), argv, recipe, environ, times)
    name = job_dir.root.name
    state = "starts" if is_new else "already starts"
    say(f"cron {state} job {name} at {times}: python -m launch run {shlex.join(argv)}")
    say(
        f"its output goes to {job_dir.output}; python -m launch submit cron list shows how its"
        f" newest start ended, submit cron remove {name} takes the job out of cron"
    )


def _list(workspace: Workspace, unparsed: Sequence[str]) -> None:
    if unparsed:
        raise ConfigError(f"submit cron list: {show(unparsed[0])[1:-1]} was not expected")
    jobs = {
        job_dir: each
        for job_dir, each in job.all_jobs(workspace).items()
        if each.schedule or crontab.is_there(workspace.root, each.name)
    }
    for job_dir, scheduled in jobs.items():
        is_there = crontab.is_there(workspace.root, scheduled.name)
        times = (scheduled.schedule or crontab.REBOOT) if is_there else "no longer in crontab"
        say(f"{scheduled.name}: {times}")
        say(f"  python -m launch run {shlex.join(scheduled.argv)}")
        say(f"  {_how_it_ended(job_dir)}")
    if not jobs:
        say(f"{_NO_JOB} {workspace.root}")


def _how_it_ended(job_dir: JobDir) -> str:
    status = job_dir.read_status()
    if status is None:
        return "not started yet"
    began = f"started {datetime.fromtimestamp(status.started_s):%Y-%m-%d %H:%M}"
    if (pid := locks.holder_pid(job_dir.lock_file)) is not None:
        return f"{began}, runs {f'as process {pid}' if pid else 'in another container'}"
    if status.exit_code is None or status.ended_s is None:
        return f"{began}, was killed"
    ended = f"ended {datetime.fromtimestamp(status.ended_s):%Y-%m-%d %H:%M}"
    why = f": {status.error}" if status.error else ""
    return f"{began}, {ended} with exit code {status.exit_code}{why}"


def _remove(workspace: Workspace, unparsed: Sequence[str]) -> None:
    jobs = {
        each.name: job_dir for job_dir, each in job.all_jobs(workspace).items() if each.schedule
    }
    if len(unparsed) != 1 or unparsed[0] not in jobs:
        there = f"expected one of {', '.join(jobs)}" if jobs else f"{_NO_JOB} {workspace.root}"
        raise ConfigError(
            f"submit cron remove: found {shlex.join(unparsed) or 'no name of a job'}; {there}"
        )
    crontab.remove(workspace.root, unparsed[0])
    job_dir = jobs[unparsed[0]]
    if job_dir.runs:
        say(f"cron no longer starts {unparsed[0]}; the start of it that runs goes on")
        return
    job.remove(job_dir)
    say(f"cron no longer starts {unparsed[0]}")
