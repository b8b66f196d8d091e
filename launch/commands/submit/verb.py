"""`python -m launch submit`: a training that starts later or elsewhere: behind others on this
machine, at the times of cron, under Slurm, in a cloud."""

import os
import shlex
from argparse import Namespace
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path

from launch.base import compile_caches
from launch.base.errors import ConfigError, ResourceError
from launch.base.text import columns, did_you_mean
from launch.base.workspace import Workspace
from launch.commands import recipe_arguments, run
from launch.commands.recipe_arguments import say
from launch.commands.submit import crontab, elsewhere, here, job
from launch.commands.submit.asked import Asked, run_arguments
from launch.commands.submit.job import JobDir
from launch.plan.planner import Choice
from launch.recipe.strict_yaml import show
from launch.report import first_screen

PLACES = ("local", "cron", "slurm", "skypilot", "dstack")
EPILOG = """submit local RECIPE ...           behind the runs of this machine, without this terminal
submit cron "0 2 * * *" RECIPE ... at the times of cron; submit cron list; submit cron remove JOB
submit slurm RECIPE ...           with the memory, cards and time of its plan
submit skypilot|dstack --print RECIPE ...   their file

RECIPE ... is what stands behind `python -m launch run`."""


FLAGS = {
    "place": {"metavar": "PLACE", "help": ", ".join(PLACES)},
    "--reboot": {
        "action": "store_true",
        "help": "local: start it again after a reboot",
    },
    "--sweep": {
        "action": "append",
        "default": [],
        "metavar": "KEY=A,B",
        "help": "local, slurm: a job for each value, and for each combination of several --sweep",
    },
    "--print": {
        "action": "store_true",
        "help": "slurm, skypilot, dstack: print the script or the file, and no more",
    },
    "--sbatch": {
        "action": "append",
        "default": [],
        "metavar": "OPTIONS",
        "help": 'slurm: options of sbatch, such as --sbatch="--partition=gpu --account=me"',
    },
    "--part": {"default": "", "help": "of a job that its script starts"},
    **recipe_arguments.MACHINE_FLAGS,
}


_PRINTS_NOTHING = {  # place -> what to type instead of --print
    "local": "leave it out to start the job; python -m launch run RECIPE --dry-run shows its plan",
    "cron": "leave it out to add a line to your crontab, which submit cron remove JOB takes away"
    " again; python -m launch run RECIPE --dry-run shows the plan",
}


def main(arguments: Namespace, unparsed: Sequence[str]) -> int | None:
    place = arguments.place
    if place == "start":  # of a job, by its script
        return _start(arguments, unparsed)
    if place not in PLACES:
        raise ConfigError(
            f"submit {show(place)}: expected one of"
            f" {', '.join(PLACES)}{did_you_mean(place, PLACES)}"
        )
    _refuse_flags(arguments)
    environ = dict(os.environ)  # of the jobs: caches have their places where they run
    compile_caches.settle()
    workspace = Workspace.here()
    job.forget_old(workspace)
    if place == "cron":
        return here.cron(workspace, unparsed, environ)
    submission = Asked(arguments, unparsed)
    if place == "local":
        return here.start_jobs(workspace, submission, environ)
    if place == "slurm":
        return _slurm(workspace, submission, environ)
    choice, _ = submission.choice(submission.typed)
    _say_notes(choice, submission)
    text = (elsewhere.skypilot if place == "skypilot" else elsewhere.dstack)(
        choice, submission.argv
    )
    print(text, end="")


def _refuse_flags(arguments: Namespace) -> None:
    """Raises ConfigError for flags of another place."""
    of_place = {
        "--reboot": ("local",),
        "--sweep": ("local", "slurm"),
        "--print": ("slurm", "skypilot", "dstack"),
        "--sbatch": ("slurm",),
        "--part": (),
        **dict.fromkeys(("--machine", "--gpu", "--gpus", "--ram"), ("slurm", "skypilot", "dstack")),
    }
    for flag, places in of_place.items():
        if getattr(arguments, flag[2:]) and arguments.place not in places:
            *first, last = places or ("scripts",)
            names = f"{', '.join(first)} and {last}" if first else last
            instead = (flag == "--print" and _PRINTS_NOTHING.get(arguments.place)) or "leave it out"
            raise ConfigError(f"submit {arguments.place}: {flag} is for {names}; {instead}")
    if arguments.place in ("skypilot", "dstack") and not arguments.print:
        raise ConfigError(
            f"submit {arguments.place}: lowmem only writes its file; add --print, and give the file"
            f" to {'sky jobs launch' if arguments.place == 'skypilot' else 'dstack apply -f'}"
        )


def _slurm(workspace: Workspace, submission: Asked, environ: Mapping[str, str]) -> None:
    more = [option for text in submission.arguments.sbatch for option in shlex.split(text)]
    choice, facts = submission.choice(submission.typed)
    name, tasks = choice.recipe.name, [*submission.combinations(choice.recipe)]
    choices = [submission.choice(submission.with_keys(task))[0] for task in tasks] or [choice]
    choice, request = choices[-1], elsewhere.Request.from_choices(choices)
    recipe_arguments.refuse(
        (
            tasks and request.nodes > 1,
            "submit slurm: --sweep is for jobs of one node; set launch.nodes to 1",
        ),
        (
            request.host_bytes is None and not any(text.startswith("--mem") for text in more),
            "submit slurm: the host RAM of this plan is not predicted; say it with"
            " --sbatch=--mem=64G",
        ),
    )
    if submission.arguments.print:
        line = job.plain_line(workspace, submission.argv)
        print(
            elsewhere.slurm_script(name, line, Path.cwd(), request, more, tasks, has_parts=False),
            end="",
        )
        return
    job_dir = job.freeze(workspace, submission.typed, submission.resume, facts, environ)
    folder, file = job_dir.root, job_dir.root / "job.sbatch"
    text = elsewhere.slurm_script(folder.name, [str(job_dir.script)], folder, request, more, tasks)
    file.write_text(text, encoding="utf-8")
    say(
        "\n".join(
            first_screen.lines(
                choice.recipe, choice.machine, choice.plan, datetime.now(), columns=columns()
            )
        )
    )
    _say_notes(choice, submission)
    try:
        number = elsewhere.submit_to_slurm(str(file))
    except ResourceError:
        job.remove(job_dir)
        raise
    say(
        f"Slurm job {number}: {shlex.join(request.options())}\n"
        f"its script is {file}, its output {folder}/slurm-{number}{'_*' if tasks else ''}.out"
    )


def _say_notes(choice: Choice, submission: Asked) -> None:
    """Say what was assumed."""
    if choice.plan.padding is None:
        submission.say(
            "note: the rows are not tokenised here, so every row is planned as long as"
            " data.max_length"
        )


def _start(arguments: Namespace, unparsed: Sequence[str]) -> int:
    """Start a job: `submit start FOLDER [KEY ...]`, as its script does."""
    if not unparsed or unparsed[0].startswith("--"):
        raise ConfigError("submit start: expected the folder of a job; its job.sh starts it")
    job_dir = JobDir(Path(unparsed[0]), arguments.part)
    submitted = job_dir.read()
    with job_dir.hold() as end:
        arguments, argv = run_arguments([*submitted.argv, *unparsed[1:]])
        code = run.main(arguments, argv, lambda facts: job.check(submitted, facts))
        end(code)
    if code == 0 and not submitted.schedule:
        crontab.remove(Workspace.here().root, submitted.name)
    return code
