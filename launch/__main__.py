"""python -m launch plan | run | doctor: the command line, and the only place where errors become exit codes."""

from __future__ import annotations

import argparse
import errno
import json
import os
import shlex
import sys
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from datetime import datetime
from pathlib import Path

from launch import direct, nodes, recipes, render, report, resume, rundir, started
from launch.errors import ConfigError, LaunchError, StorageError
from launch.planner import Given
from launch.resolve import Resolved, resolve
from launch.schema import Command, StepEvent

FLAGS = {"--help", "--machine", "--dry-run", "--resume"}  # the others set keys of the recipe
BATCH_KEY = "per_device_train_batch_size"
STORAGE_ERRORS = {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EFBIG, errno.EACCES}
EPILOG = """any key of the recipe can be set: --training.learning_rate=3e-5 --model.shape=t5-tiny --lora.r=8
exit codes: 0 complete; 2 configuration; 3 resources; 4 data; 5 no usable checkpoint; 6 out of host RAM; 9 run in use;
            10 storage; 11 network; 12 out of GPU memory; 75 stopped, run again to continue; 130 interrupted"""


def main(argv: list[str]) -> int:
    try:
        return _dispatch(argv)
    except LaunchError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # `| head`: nobody reads on
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except OSError as error:
        if error.errno not in STORAGE_ERRORS:
            raise
        print(f"error: {error.filename or 'a write'}: {error.strerror}; make room there", file=sys.stderr)
        return StorageError.exit_code


def _dispatch(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m launch", description=__doc__, epilog=EPILOG, formatter_class=argparse.RawTextHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    doctor = commands.add_parser(
        "doctor", help="say what this machine offers, test the link between its GPUs, name what is wrong"
    )
    doctor.add_argument(
        "--machine", type=Path, help="a described machine (configs/machines/*.yaml) instead of this one"
    )
    for name, words in (("plan", "say what would run, and why"), ("run", "train")):
        command = commands.add_parser(
            name, help=words, epilog=EPILOG, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
        )
        command.add_argument("recipe", help="a name in configs/recipes/, or a file")
        command.add_argument("batch", nargs="?", help="per_device_train_batch_size")
        if name == "plan":
            command.add_argument("--machine", type=Path, help="plan for a described machine (configs/machines/*.yaml)")
        else:
            command.add_argument("--dry-run", action="store_true", help="everything but the last call")
            command.add_argument(
                "--resume", default="auto", help="auto (default), never, or a run or checkpoint folder"
            )
    overrides = [word for word in argv if word.startswith("--") and word.partition("=")[0] not in FLAGS]
    for word in overrides:
        if "=" not in word:
            raise ConfigError(f"{word}: no flag of its own; a key of the recipe is set as {word}=VALUE, see --help")
    arguments = parser.parse_args([word for word in argv if word not in overrides])
    if arguments.command == "doctor":
        if overrides:
            raise ConfigError(f"doctor: unknown flag {overrides[0]}")
        from launch import doctor  # the link test: not needed to plan

        house = rundir.House.here()
        return doctor.main(arguments.machine, house.cache, house.root)
    if arguments.batch is not None:
        if any(word.partition("=")[0].replace("-", "_").endswith(BATCH_KEY) for word in overrides):
            raise ConfigError(f"batch {arguments.batch} and --training.{BATCH_KEY} are both given; keep one")
        overrides.append(f"--training.{BATCH_KEY}={recipes.check_batch(arguments.batch)}")
    given = Given(force_gloo=started.asks_for_gloo(os.environ))
    if arguments.command == "plan":
        resolved = resolve(arguments.recipe, overrides, arguments.machine, given)
        print("\n".join(report.plan_lines(resolved.recipe, resolved.machine, resolved.plan)))
        return 0

    def decide(test_link: bool) -> Resolved:
        resolved = resolve(arguments.recipe, overrides, given=given, say=print, test_link=test_link)
        return replace(resolved, plan=nodes.located(resolved.plan))

    return _run(decide, arguments.resume, arguments.dry_run)


def _run(decide: Callable[[bool], Resolved], wish: str, dry_run: bool) -> int:
    resolved = decide(True)
    recipe, plan, house = resolved.recipe, resolved.plan, resolved.house
    from launch import supervise  # rich and psutil: not needed to refuse a wrong flag
    from launch.screen import Screen

    meeting = plan.rendezvous
    is_first = meeting is None or meeting.machine_rank == 0
    with ExitStack() as held:
        if meeting is not None and not is_first:
            start = resume.Start(
                nodes.own_run(house.runs, recipe.name, meeting, datetime.now()),
                f"machine {meeting.machine_rank}: joining machine 0, whose run this is",
            )
        else:
            held.enter_context(direct.output_lock(house, recipe))
            tokens = rundir.token_cache(house.cache, recipe, plan.shape, plan.data_format)
            start = resume.decide(house.runs, recipe, plan, tokens, wish, datetime.now())
        screen = Screen(rundir.log_file(house.root, start.run))
        for line in report.plan_lines(recipe, resolved.machine, plan):
            screen.say(line)
        screen.say(start.line)
        for line in rundir.kept_aside(Path(recipe.output_dir), start.run.run_id) if is_first else ():
            screen.say(line)
        if start.complete:
            screen.say(f"chat with it: {_chat(recipe.output_dir)}")
            return 0
        attempt = direct.write_run(start.run, recipe, resolved.machine, plan, house)
        command = render.command(plan, resolved.machine, start.run, attempt, house, os.environ)
        if dry_run:
            screen.say("dry run: this line trains")
            screen.say(str(command))
            return 0
        screen.say(f"log: {rundir.log_file(house.root, start.run)}")

        def ready() -> Command:
            """Once the rows are tokenised their lengths are known: what was planned for max_length is planned again."""
            nonlocal plan
            source, target = plan.lengths
            again = decide(False).plan if attempt.number == 1 else plan  # a run that goes on keeps its own
            if sum(again.lengths) >= source + target:
                return command
            plan = again
            direct.write_plan(start.run, recipe, resolved.machine, plan, house, attempt)
            screen.say("planned again for the rows that there are:")
            for line in report.planned_lines(plan):
                screen.say(line)
            return render.command(plan, resolved.machine, start.run, attempt, house, os.environ)

        result = supervise.run(resolved, start.run, attempt, ready, screen)
        supervise.write_outcome(result, attempt)
        for line in report.result_lines(recipe, resolved.machine, plan, result, _chat(recipe.output_dir)):
            screen.say(line)
        events = []
        for folder in start.run.attempts():
            if folder.events_file.exists():
                lines = folder.events_file.read_text(encoding="utf-8").splitlines()
                events += [StepEvent(**json.loads(line)) for line in lines]
        rundir.write_atomic(start.run.report_file, report.html(recipe, resolved.machine, plan, result, events))
    return result.exit_code


def _chat(model: str) -> str:
    return f"{shlex.quote(sys.executable)} {shlex.quote(str(rundir.CODE / 'scripts' / 'chat.py'))} {shlex.quote(model)}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
