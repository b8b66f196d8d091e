"""Jobs on this machine: those that go on without the terminal that started them, each behind those
before it; and those that cron starts at their times: added, listed, removed."""

import getpass
import shlex
import shutil
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from pathlib import Path

from launch.base import locks
from launch.base.errors import ConfigError, Interrupted, ResourceError
from launch.base.text import shown
from launch.base.workspace import Workspace
from launch.commands.recipe_arguments import say
from launch.commands.submit import asked, crontab, job
from launch.commands.submit.job import JobDir
from launch.queue import leases
from launch.queue.leases import Lease
from launch.recipe.paths import pinned
from launch.recipe.strict_yaml import show
from launch.supervise.screen import Tail

_COMMAND_S = 30.0
_FOLLOW_S = 120.0  # for its lease, or its end
_POLL_S = 0.2
_STOP_S = 300  # for a checkpoint, before systemd kills it
_NO_JOB = "cron starts no job of"


def start_jobs(workspace: Workspace, submission: asked.Asked, environ: Mapping[str, str]) -> int:
    """Start jobs that wait for memory, each behind those before it."""
    leases.folder()  # raises where there can be no waiting
    code, jobs = 0, []
    facts = asked.facts_here(submission.typed)
    for overrides in [*submission.combinations(facts.recipe)] or [[]]:
        typed = submission.with_keys(overrides)
        facts = asked.facts_here(typed) if overrides else facts
        launch = facts.recipe.launch
        if launch.nodes > 1:
            raise ConfigError(
                "submit local: launch.nodes is for several machines; submit slurm starts those"
            )
        if not launch.wait and "wait" not in launch.model_fields_set:
            typed = replace(typed, overrides=[*typed.overrides, "--launch.wait=true"])
        jobs.append((typed, facts))
    for typed, facts in jobs:  # none starts before all are right
        job_dir = job.freeze(workspace, typed, submission.resume, facts, environ)
        code = _start(workspace, job_dir, submission.arguments.reboot) or code
    return code


def _start(workspace: Workspace, job_dir: JobDir, at_reboot: bool) -> int:
    """Start a job, and show what it says until it runs or waits; its exit code if it has failed
    by then."""
    say(f"job {job_dir.root.name}: its output goes to {job_dir.output}")
    if at_reboot:
        crontab.add(
            workspace.root, job_dir.root.name, crontab.REBOOT, job_dir.script, job_dir.output
        )
        say("cron starts it again after each reboot, until it is complete or cancelled")
    _detach(job_dir)
    try:
        lease = _follow(job_dir)
    except Interrupted as stopped:
        say(f"job {job_dir.root.name} goes on; python -m launch queue lists it, and cancels it")
        return stopped.exit_code
    status = job_dir.read_status()
    if status is not None and status.exit_code is not None:
        if status.exit_code:  # it has failed before it ran, and said why
            crontab.remove(workspace.root, job_dir.root.name)
            job.remove(job_dir)
        return status.exit_code
    if lease is None:
        say(f"it still plans; {job_dir.output} says when it starts")
        return 0
    say(
        f"it {'runs' if lease.record.state == 'granted' else 'waits'} as run {lease.number},"
        f" process {lease.pid}: python -m launch watch shows it, python -m launch queue cancel"
        f" {lease.number} stops it"
    )
    return 0


def _detach(job_dir: JobDir) -> None:
    """Start the job's script by systemd where it may outlive its user's logins, else in a session
    of its own, and say what keeps it. Raises ResourceError."""
    if shutil.which("systemd-run") and _says("systemctl", "--user", "is-active", "default.target"):
        lingers = _says("loginctl", "show-user", getpass.getuser(), "--property=Linger", "--value")
        if lingers == "yes":
            _by_systemd(job_dir)
            say(f"systemd keeps it: systemctl --user status {_unit(job_dir)}")
            return
        say("systemd would end it with your last login, so it has a session of its own instead")
        if _says("loginctl", "show-session", "--property=KillUserProcesses", "--value") == "yes":
            say("this machine ends all processes at logout: loginctl enable-linger keeps them")
    with job_dir.output.open("ab") as output:
        subprocess.Popen(
            [str(job_dir.script)],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


def _follow(job_dir: JobDir) -> Lease | None:
    """Show what the job prints until it has or waits for a lease; None: it has ended, or plans
    longer than _FOLLOW_S."""
    until_s, lines = time.monotonic() + _FOLLOW_S, Tail(job_dir.output)
    while True:
        status = job_dir.read_status()
        lease = _lease(status.pid) if status else None
        for line in lines.new_lines():
            say(shown(line))
        has_ended = status is not None and not job_dir.runs
        if lease or has_ended or time.monotonic() > until_s:
            return lease
        time.sleep(_POLL_S)


def _lease(pid: int) -> Lease | None:
    live = leases.live(leases.folder())
    return next((lease for lease in live if lease.pid == pid), None)


def _by_systemd(job_dir: JobDir) -> None:
    argv = ["systemd-run", "--user", "--collect", "--quiet", f"--unit={_unit(job_dir)}"]
    # A kill for memory is planned around here; by default systemd would stop the unit. Before 243
    # systemd does not look at such kills.
    if _says("systemctl", "--user", "show", "--property=DefaultOOMPolicy", "--value"):
        argv.append("--property=OOMPolicy=continue")
    properties = (
        f"StandardOutput=append:{job_dir.output}",
        f"StandardError=append:{job_dir.output}",
        "KillMode=mixed",  # SIGTERM to the launcher, which passes it on
        f"TimeoutStopSec={_STOP_S}",
    )
    argv += [f"--property={text.replace('%', '%%')}" for text in properties]
    done = subprocess.run(
        [*argv, str(job_dir.script)], capture_output=True, text=True, timeout=_COMMAND_S
    )
    if done.returncode:
        raise ResourceError(f"systemd-run: {done.stderr.strip()}")


def _unit(job_dir: JobDir) -> str:
    return f"lowmem-{job_dir.root.name}"


def _says(*argv: str) -> str:
    """The text that a program prints; "" if it fails or is not there."""
    if shutil.which(argv[0]) is None:
        return ""
    done = subprocess.run(argv, capture_output=True, text=True, timeout=_COMMAND_S)
    return "" if done.returncode else done.stdout.strip()


# ---- cron
# -------------------------------------------------------------------------------------


def cron(workspace: Workspace, unparsed: Sequence[str], environ: Mapping[str, str]) -> None:
    """Add a job of cron, list all, or remove one."""
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
    say(
        f"cron {state} job {name} at {times}: python -m launch run {shlex.join(argv)}\n"
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
        say(
            f"{scheduled.name}: {times}\n"
            f"  python -m launch run {shlex.join(scheduled.argv)}\n"
            f"  {_how_it_ended(job_dir)}"
        )
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
