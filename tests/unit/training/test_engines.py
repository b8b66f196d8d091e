"""What engines.py refuses, on real modules."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, TrainingArguments

from launch.base.errors import ConfigError
from training.data.sample_order import SampleOrder
from training.engines import setup
from training.loop.callbacks import StepMeter
from training.loop.trainer import LowMemTrainer


def parts(args: TrainingArguments, meter: StepMeter) -> dict[str, Any]:
    config = AutoConfig.for_model(
        "gpt2", vocab_size=8, n_embd=8, n_layer=1, n_head=1, n_positions=8
    )
    return {
        "order": SampleOrder(2, 2, 1, 1, 0, 0),
        "meter": meter,
        "keep_checkpoints": 2,
        "facts": {},
        "model": AutoModelForCausalLM.from_config(config),
        "args": args,
    }


def test_a_model_that_one_process_would_run_on_several_gpus_is_refused():
    with pytest.raises(ConfigError, match="expected one GPU a process"):
        setup.refuse_data_parallel(torch.nn.DataParallel(torch.nn.Linear(2, 2)))
    setup.refuse_data_parallel(torch.nn.Linear(2, 2))


class SlowCount(LowMemTrainer):
    """A trainer whose count of targets waits for the device."""

    def _get_num_items_in_batch(self, *args: Any) -> None:
        time.sleep(0.3)


def test_waiting_for_data_is_the_loaders_time_alone(tmp_path):
    def batches() -> Iterator[dict[str, Any]]:
        for number in range(3):
            time.sleep(0.05)
            yield {"labels": number}

    meter = StepMeter()
    trainer = SlowCount(
        **parts(TrainingArguments(str(tmp_path), use_cpu=True, report_to=[]), meter)
    )
    loader = batches()
    assert trainer.get_batch_samples(loader, 2, "cpu")[0] == [{"labels": 0}, {"labels": 1}]
    assert 0.1 <= meter.waited_s < 0.3
    assert trainer.get_batch_samples(loader, 2, "cpu")[0] == [{"labels": 2}]


@pytest.mark.parametrize(("num_gpus", "refused"), [(0, False), (1, False), (2, True)])
def test_the_trainer_does_not_train_what_transformers_would_wrap_for_several_gpus(
    tmp_path, num_gpus, refused
):
    args = TrainingArguments(output_dir=str(tmp_path), use_cpu=True, report_to=[])
    args._n_gpu = num_gpus  # as transformers counts them
    trainer = LowMemTrainer(**parts(args, StepMeter()))
    if refused:
        with pytest.raises(ConfigError, match="expected one GPU a process"):
            trainer._wrap_model(trainer.model)
    else:
        assert trainer._wrap_model(trainer.model) is trainer.model
