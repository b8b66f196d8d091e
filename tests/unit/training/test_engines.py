"""What engines.py refuses, on real modules."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, TrainingArguments

from launch.base.errors import ConfigError
from training.data.batches import SampleOrder
from training.engines import setup
from training.loop.callbacks import StepMeter
from training.loop.trainer import LowMemTrainer


def test_a_model_that_one_process_would_run_on_several_gpus_is_refused():
    with pytest.raises(ConfigError, match="expected one GPU a process"):
        setup.refuse_data_parallel(torch.nn.DataParallel(torch.nn.Linear(2, 2)))
    setup.refuse_data_parallel(torch.nn.Linear(2, 2))


@pytest.mark.parametrize(("num_gpus", "refused"), [(0, False), (1, False), (2, True)])
def test_the_trainer_does_not_train_what_transformers_would_wrap_for_several_gpus(
    tmp_path, num_gpus, refused
):
    args = TrainingArguments(output_dir=str(tmp_path), use_cpu=True, report_to=[])
    args._n_gpu = num_gpus  # as transformers counts them
    config = AutoConfig.for_model(
        "gpt2", vocab_size=8, n_embd=8, n_layer=1, n_head=1, n_positions=8
    )
    order = SampleOrder(2, 2, 1, 1, 0, 0)
    trainer = LowMemTrainer(
        order=order,
        meter=StepMeter(),
        keep_checkpoints=2,
        facts={},
        model=AutoModelForCausalLM.from_config(config),
        args=args,
    )
    if refused:
        with pytest.raises(ConfigError, match="expected one GPU a process"):
            trainer._wrap_model(trainer.model)
    else:
        assert trainer._wrap_model(trainer.model) is trainer.model
