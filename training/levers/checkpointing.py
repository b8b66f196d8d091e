"""Activations that backward computes again, of every n-th layer, by transformers."""

from typing import Any

from launch.schema.levers import Levers
from launch.schema.training_section import TrainingSection


def arguments(training: TrainingSection, levers: Levers, values: dict[str, Any]) -> None:
    kwargs = training.activation_checkpointing_kwargs.arguments
    if levers.every_n_layers > 1:
        kwargs["every_n_layers"] = levers.every_n_layers
    if levers.activation_offloading:
        kwargs["offload"] = True
    values["activation_checkpointing"] = levers.every_n_layers > 0
    values["activation_checkpointing_kwargs"] = kwargs or None
