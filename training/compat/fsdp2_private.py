"""The private names of Accelerate (1.15) with which FSDP2 shares out weights of 4 bits."""

from collections.abc import Callable
from functools import partial

from accelerate import accelerator

from training.compat.transformers_private import Network


def around_division(
    divided_by: accelerator.Accelerator,
    divide: Callable[[Callable[[Network], Network], Network], Network],
) -> None:
    """Have `divide(library, network)` share out this accelerator's model, where `library` is
    Accelerate's own way to do it."""
    library = accelerator.fsdp2_prepare_model

    def prepare(asked_by: accelerator.Accelerator, network: Network) -> Network:
        if asked_by is not divided_by:
            return library(asked_by, network)
        return divide(partial(library, asked_by), network)

    accelerator.fsdp2_prepare_model = prepare
