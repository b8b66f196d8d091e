"""What a rank writes down of its steps and evaluations: counts of all micro-batches, seconds of the
step alone."""

from __future__ import annotations

import logging
import re
import time
from pathlib import Path

import pytest
import torch
from transformers import TrainerControl, TrainerState, TrainingArguments

from launch.run_folder import steps
from launch.run_folder.layout import AttemptDir
from training.data.sample_order import SampleOrder
from training.loop import callbacks
from training.loop.callbacks import Reporter, StepMeter
from training.loop.rank_memory import MemoryPeaks

SLOW_S = 0.05
LONG_S = 0.5  # longer than a step here that a busy machine holds up


class Loop:
    """A reporter that is called in the order in which Trainer calls it."""

    def __init__(self, folder: Path) -> None:
        self.attempt, self.meter = AttemptDir(folder), StepMeter()
        peaks, order = MemoryPeaks(torch.device("cpu")), SampleOrder(64, 4, 2, 1, 0, seed=1)
        self.reporter = Reporter(
            self.attempt, 0, self.meter, order, peaks, False, lambda step, loss: None
        )
        self.model = torch.nn.Linear(2, 2)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.said = (
            TrainingArguments(report_to=[], use_cpu=True, logging_steps=1),
            TrainerState(max_steps=9),
            TrainerControl(),
        )
        self.reporter.on_train_begin(*self.said)

    def step(self, wait_s: float = 0.0) -> None:
        """Two micro-batches of 4 samples, 30 tokens, 40 with padding, after a wait for them."""
        time.sleep(wait_s)
        self.meter.waited_s += wait_s
        self.reporter.on_step_begin(*self.said)
        for _ in range(2):
            self.meter.add(torch.tensor(0.5), 30, 40, 4)
        self.reporter.on_pre_optimizer_step(*self.said, optimizer=self.optimizer, model=self.model)
        self.said[1].global_step += 1
        self.said[1].epoch = 0.0
        self.reporter.on_step_end(*self.said)

    def log(self) -> None:
        self.reporter.on_log(*self.said, logs={"loss": 1.0})

    def written(self) -> list[tuple[int, float, float]]:
        """(step, seconds, of them waiting) so far."""
        self.reporter.on_train_end(*self.said)
        return [
            (one.step, one.seconds, one.data_seconds or 0.0) for one in steps.events(self.attempt)
        ]


@pytest.mark.parametrize("logs", [True, False])
def test_a_steps_seconds_have_its_wait_for_data_whether_or_not_a_log_came_before(tmp_path, logs):
    loop = Loop(tmp_path)
    loop.step(SLOW_S)  # the start of the loader
    for _ in range(2):
        if logs:
            loop.log()
        loop.step(SLOW_S)
    (_, _, first_wait), *later = loop.written()
    assert first_wait == 0.0
    assert [step for step, *_ in later] == [2, 3]
    assert all(wait == pytest.approx(SLOW_S) and seconds >= SLOW_S for _, seconds, wait in later)


def test_the_time_of_an_evaluation_or_a_save_is_no_steps(tmp_path):
    loop = Loop(tmp_path)
    loop.step()
    time.sleep(LONG_S)
    loop.reporter.on_log(
        *loop.said, logs={"eval_loss": 2.0, "eval_perplexity": 7.4, "eval_runtime": LONG_S}
    )
    loop.reporter.on_evaluate(*loop.said)
    time.sleep(LONG_S)
    loop.reporter.on_save(*loop.said)
    loop.step()
    assert all(seconds < LONG_S for _, seconds, _ in loop.written())
    (held_out,) = steps.evaluations(loop.attempt)
    assert (held_out.step, held_out.samples_seen, held_out.loss, held_out.seconds) == (
        1,
        8,
        2.0,
        LONG_S,
    )


def test_a_steps_counts_are_those_of_all_its_micro_batches(tmp_path):
    loop = Loop(tmp_path)
    for _ in range(3):
        loop.step()
    loop.written()
    found = [
        (one.tokens, one.computed_tokens, one.samples, one.loss)
        for one in steps.events(loop.attempt)
    ]
    assert found == [(60, 80, 8, 1.0)] * 3


def test_log_lines_say_the_time_left_from_the_third_step_until_the_last(tmp_path, caplog):
    loop = Loop(tmp_path)
    with caplog.at_level(logging.INFO, logger="lowmem"):
        for step in range(1, 10):
            loop.step()
            if step > 1:
                time.sleep(0.2)  # 7 steps are left after the second, 0.2 s each
            loop.log()
    lines = [record.getMessage() for record in caplog.records if "step " in record.getMessage()]
    assert [" ETA " in line for line in lines] == [False, False, *[True] * 6, False]
    assert re.search(r"  ETA \d+:\d\d:\d\d  loss ", lines[2])
    assert " ETA 0:00:00 " not in lines[2]  # 6 steps of at least 0.2 s


def test_the_time_left_has_the_evaluations_that_are_left_and_no_others(tmp_path, caplog):
    """One of two seconds after the fourth step: of 9 steps with one after every fourth, one is
    left; of 7 none is."""
    left_s = []
    for max_steps in (9, 7):
        (tmp_path / str(max_steps)).mkdir()
        loop = Loop(tmp_path / str(max_steps))
        loop.said[1].max_steps, loop.said[1].eval_steps = max_steps, 4
        for _ in range(4):
            loop.step()
        time.sleep(2.0)
        loop.reporter.on_evaluate(*loop.said)
        caplog.clear()
        with caplog.at_level(logging.INFO, logger="lowmem"):
            loop.step()
            loop.log()
        (seconds,) = re.findall(r" ETA 0:00:(\d\d) ", caplog.text)
        left_s.append(int(seconds))
    assert left_s[0] - left_s[1] >= 1
    assert left_s[1] <= 1


@pytest.mark.parametrize(("logging_steps", "num_lines"), [(500, 1), (3, 0)])
def test_the_time_left_is_logged_early_where_the_next_log_line_is_far(
    tmp_path, caplog, monkeypatch, logging_steps, num_lines
):
    # the steps of this loop are short: their next log line is seconds away, not a minute
    monkeypatch.setattr(callbacks, "LONG_WAIT_S", 10.0)
    loop = Loop(tmp_path)
    arguments, state, _ = loop.said
    arguments.logging_steps, state.max_steps = logging_steps, 30_000
    with caplog.at_level(logging.INFO, logger="lowmem"):
        for _ in range(4):
            loop.step(wait_s=SLOW_S)
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == num_lines
    assert all(re.match(r"step 3/30000  ETA \d+:\d\d:\d\d at 0\.\d+ s a step", x) for x in lines)
