"""Facts on model types of transformers, which the launcher knows without importing it."""

from __future__ import annotations

from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

from launch.predict.models.model_families import ENCODERS, text_types

CAUSAL = modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
SEQUENCE_TO_SEQUENCE = modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES


def test_encoders_are_those_that_fill_masks_and_nothing_else():
    masked = set(modeling_auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES)
    assert masked - set(SEQUENCE_TO_SEQUENCE) == ENCODERS & {*CONFIG_MAPPING_NAMES}


def test_the_types_of_language_models_are_read_from_the_source_of_transformers():
    assert text_types() == {*CAUSAL, *SEQUENCE_TO_SEQUENCE}
