"""The private name of transformers (5.23) for the values with which generation settings were
loaded: changed settings are saved only if transformers finds no fault with them."""

from __future__ import annotations

from typing import Any


def take_as_loaded(model: Any) -> None:
    """Let the settings be saved as they are: a base may come with settings that have a fault."""
    model.generation_config._original_object_hash = hash(model.generation_config)
