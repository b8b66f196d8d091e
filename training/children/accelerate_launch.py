"""Run `accelerate launch`, and pass a request for a checkpoint (SIGUSR2) on to lowmem's launcher.

The signal would end accelerate and torchrun, and with them the ranks. It is blocked in this process
from its start (processes.settle_child), so that none comes too early, and in the ranks until they
listen to it."""

import os
import signal
import sys
import threading


def python_path(name: str, folder: str) -> str:
    """The value of PYTHONPATH for ranks of DeepSpeed: the user's, without the folder of the start.

    Accelerate (1.15, utils/launch.py, env_var_path_add) adds that folder, so a random.py or a
    sitecustomize.py in it would run in each rank."""
    return os.environ.get(name, "")


def _pass_requests_on(launcher: int) -> None:
    """Send each request that comes to this process to the launcher, which knows the ranks."""
    while True:
        os.kill(launcher, signal.sigwait({signal.SIGUSR2}))


if __name__ == "__main__":
    if "LOWMEM_ROOT_PID" in os.environ:  # else this line was typed, and no launcher is above it
        threading.Thread(
            target=_pass_requests_on, args=(int(os.environ["LOWMEM_ROOT_PID"]),), daemon=True
        ).start()

    from accelerate.commands import launch
    from accelerate.utils import launch as rank_environment

    assert hasattr(rank_environment, "env_var_path_add"), (
        "Accelerate makes the PYTHONPATH of DeepSpeed's ranks in another way in this version"
    )
    rank_environment.env_var_path_add = python_path
    sys.argv[0] = "accelerate-launch"
    launch.main()
