"""Batches, weights and labels for the loops of transformers.Trainer."""

from __future__ import annotations

import numpy as np
import pytest
from transformers import TrainingArguments

from tests.unit.training.test_engines import parts
from training.data.batches import Collator
from training.loop.callbacks import StepMeter
from training.loop.trainer import LowMemTrainer


class Held:
    """Held-out rows of falling lengths."""

    def __len__(self) -> int:
        return 3

    def lengths(self) -> np.ndarray:
        return np.array([[9, 0], [5, 0], [2, 0]])


@pytest.mark.parametrize(
    ("lengths", "batches"), [(None, [[0, 1], [2]]), (np.array([[4], [4]]), [[2, 1], [0]])]
)
def test_held_out_rows_are_sorted_by_length_where_trained_rows_are(tmp_path, lengths, batches):
    args = TrainingArguments(
        str(tmp_path), use_cpu=True, report_to=[], per_device_eval_batch_size=2
    )
    of_trainer = parts(args, StepMeter())
    of_trainer["order"].lengths = lengths
    trainer = LowMemTrainer(**of_trainer, data_collator=Collator(0), eval_dataset=Held())
    assert trainer.get_eval_dataloader().batch_sampler == batches


def test_converted_weights_are_not_loaded_as_the_engines_own(tmp_path):
    args = TrainingArguments(str(tmp_path), use_cpu=True, report_to=[])
    trainer, loaded = LowMemTrainer(**parts(args, StepMeter())), list[str]()
    trainer.load_weights(lambda: loaded.append("own"))
    assert loaded == ["own"]
    trainer.is_converted = True
    trainer.load_weights(lambda: loaded.append("converted"))
    assert loaded == ["own"]


def test_the_logits_of_a_decoder_are_of_the_next_token(tmp_path):
    args = TrainingArguments(str(tmp_path), use_cpu=True, report_to=[])
    assert LowMemTrainer(**parts(args, StepMeter())).shifts
