"""Load a finished model: a folder of weights, or an adapter on its base."""

from typing import Any

import torch
from transformers.utils import logging as transformers_logging

from launch.base.errors import ResourceError
from launch.base.text import cause
from launch.schema.model_sections import ModelSection, QuantizationSection
from launch.schema.result import FinishedModel
from training.compat import peft_private
from training.compat.transformers_private import Network
from training.model import build


def load(finished: FinishedModel, tokenizer: Any, device: torch.device) -> Network:
    """The model with the types of its training, 4 bits too, ready to answer with its tokenizer.

    Raises ResourceError."""
    transformers_logging.disable_progress_bar()
    quantization = (
        QuantizationSection.model_validate(finished.quantization) if finished.quantization else None
    )
    try:
        model: Network = build.from_folder(
            ModelSection(path=str(finished.base), dtype=finished.dtype),
            *(quantization, device),
            attention=None,
        )
        if finished.is_adapter:
            build.prepare_base(model, tokenizer, finished.folder)
            model = peft_private.with_adapter(model, finished.folder)
        else:
            build.set_special_tokens(model, tokenizer, keeps_ids=True)
    except (OSError, ValueError, RuntimeError) as error:
        raise ResourceError(f"{finished.folder}: cannot be loaded ({cause(error)})") from error
    return model.to(device).eval()
