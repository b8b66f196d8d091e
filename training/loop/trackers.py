"""Trackers beside TensorBoard (training.report_to): transformers' own callbacks, on rank 0 alone.

One that fails is named in a line and left out until the next start: the figures are in events.jsonl
in any case. One that cannot log in or finds no network keeps its figures offline. A later start of
a run goes on in the tracker's run.
"""

import contextvars
import os
import sys
import threading
from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.integrations.integration_utils import INTEGRATION_TO_CALLBACK

from launch.base.text import shown
from launch.run_folder.layout import RunDir
from launch.schema.training_section import TENSORBOARD, Tracker
from training.log import logger

_MLFLOW_FILE = "mlflow_run_id"  # with the id that MLflow gave a run, in its folder
_FINISH_S = 60.0  # time for what has not been sent when training ends
# Variables with which a tracker works without its service, and the line that sends its figures
# later
_OFFLINE: Mapping[Tracker, tuple[dict[str, str], str]] = {
    "wandb": ({"WANDB_MODE": "offline"}, "{programs}/wandb sync {run}/wandb/offline-run-*"),
    "swanlab": ({"SWANLAB_MODE": "offline"}, "{programs}/swanlab sync {run}/swanlog/run-*"),
}


def settings(run: RunDir, workspace: Path) -> dict[str, str]:
    """Variables of all trackers that the user has not set: where their files are, which run goes
    on, how long they may keep rank 0 waiting, and nothing sent but the run's figures."""
    mlflow_id = run.root / _MLFLOW_FILE
    return {
        "WANDB_DIR": str(run.root),
        "WANDB_RUN_ID": run.run_id,
        "WANDB_RESUME": "allow",
        "WANDB_CONSOLE": "off",  # it would take over the log
        "WANDB_INIT_TIMEOUT": "30",
        "WANDB_ERROR_REPORTING": "false",
        "MLFLOW_TRACKING_URI": f"sqlite:///{workspace / 'mlflow.db'}",
        **({"MLFLOW_RUN_ID": mlflow_id.read_text("utf-8")} if mlflow_id.exists() else {}),
        "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",
        "MLFLOW_HTTP_REQUEST_TIMEOUT": "10",
        "MLFLOW_DISABLE_TELEMETRY": "true",
        "SWANLAB_LOG_DIR": str(run.root / "swanlog"),
    }


class _TrackerCallback(TrainerCallback):
    """A tracker, from the begin of training to its end."""

    def __init__(self, name: Tracker, run: RunDir) -> None:
        self._name: Tracker = name
        self._run = run
        self._callback: Any = None  # None: not begun, failed, or ended

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        def begin() -> None:
            if self._name == "swanlab" and "SWANLAB_MODE" not in os.environ:
                # swanlab could not start again after a start without key or network
                import_module("swanlab").login()
            callback = INTEGRATION_TO_CALLBACK[self._name]()
            callback.on_train_begin(args, state, control, **kwargs)
            self._callback = callback
            if self._name == "mlflow":
                active = import_module("mlflow").active_run()
                (self._run.root / _MLFLOW_FILE).write_text(active.info.run_id, encoding="utf-8")

        variables, later = _OFFLINE.get(self._name, ({}, ""))
        is_offline = variables.items() <= os.environ.items()
        error = _failure(begin)
        if error and variables and not is_offline:
            os.environ.update(variables)
            if self._name == "wandb":  # its process still has the run
                import_module("wandb").teardown()
            if not (again := _failure(begin)):
                programs, run = Path(sys.executable).parent, self._run.root
                logger.warning(
                    "training.report_to: %s works offline (%s); later: %s",
                    *(self._name, error, later.format(programs=programs, run=run)),
                )
            error = again
        self._leave_out_after(error)

    def on_log(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if self._callback:
            log = self._callback.on_log
            self._leave_out_after(_failure(lambda: log(args, state, control, **kwargs)))

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if not self._callback:
            return
        end, errors = self._callback.on_train_end, []

        def finish() -> None:
            end(args, state, control, **kwargs)
            if self._name in _OFFLINE:  # the others' callbacks have done so
                import_module(self._name).finish()

        context = contextvars.copy_context()  # trackio keeps its run in one
        thread = threading.Thread(
            target=lambda: errors.append(context.run(_failure, finish)), daemon=True
        )
        thread.start()
        thread.join(_FINISH_S)
        self._leave_out_after(errors[0] if errors else f"still sending after {_FINISH_S:.0f} s")
        self._callback = None

    def _leave_out_after(self, error: str | None) -> None:
        if error:
            self._callback = None
            logger.warning(
                "training.report_to: %s fails and is left out of the rest of this start: %s",
                *(self._name, error),
            )


def _failure(call: Callable[[], None]) -> str | None:
    """The error with which a call of a tracker ends, in a line; None if it ends well."""
    try:
        call()
    except (Exception, SystemExit) as error:  # noqa: BLE001  whatever it is, the run goes on
        return shown(" ".join(f"{type(error).__name__}: {error}".split()))[:300]
    return None


def callbacks(
    report_to: tuple[Tracker, ...], run: RunDir, workspace: Path, args: TrainingArguments
) -> list[_TrackerCallback]:
    """The trackers of this rank. TensorBoard is not among them: Trainer makes it."""
    names: list[Tracker] = [name for name in report_to if name != TENSORBOARD]
    if not names or args.process_index != 0:
        return []
    for variable, value in settings(run, workspace).items():
        os.environ.setdefault(variable, value)
    args.run_name = args.run_name or run.run_id
    return [_TrackerCallback(name, run) for name in names]
