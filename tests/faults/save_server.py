"""A rank that has trained a few steps and then saves as often as it is asked to, each time in a
forked copy of itself.

On each line of standard input, "<folder of checkpoints> <step>", a child takes that folder as its
run's, stops itself until somebody has traced it, and saves. Standard output answers "<pid of the
child>", then, when it has ended, "<wait status>". Whoever starts this sets OMP_NUM_THREADS=1:
threads do not survive a fork."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import IO, Any

from transformers import TrainerCallback

from launch.base.errors import LaunchError
from launch.commands import attach
from launch.run_folder import manifest
from launch.run_folder.layout import RunDir
from training import run
from training.checkpoints import commit
from training.loop.trainer import LowMemTrainer


class Server(TrainerCallback):
    """After the step that is asked for, answers lines; the training itself ends there."""

    def __init__(self, trainer: LowMemTrainer, answers: IO[str]) -> None:
        self.trainer = trainer
        self.answers = answers

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        for line in sys.stdin:
            folder, step = line.rsplit(maxsplit=1)
            child = os.fork()
            if child == 0:
                os._exit(self.save(Path(folder), int(step)))
            self.answers.write(f"{child}\n")
            self.answers.write(f"{os.waitpid(child, 0)[1]}\n")
        os._exit(0)

    def save(self, folder: Path, step: int) -> int:
        os.kill(os.getpid(), signal.SIGSTOP)
        self.trainer.args.output_dir, self.trainer.state.global_step = str(folder), step
        self.trainer.verified = set()
        commit.clear_staging(folder)
        found, _ = manifest.newest_valid(folder)
        if found:
            self.trainer.verified.add(found.name)
        try:
            self.trainer._save_checkpoint(self.trainer.model, None)
        except LaunchError as error:
            return error.exit_code
        return 0


if __name__ == "__main__":
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what training says goes into the log
    start = attach.from_run_dir(RunDir(Path(sys.argv[1])), int(sys.argv[2]))
    run.train(
        start, attach.open_run, [], lambda trainer: trainer.add_callback(Server(trainer, answers))
    )
