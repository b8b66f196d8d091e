"""The private names of Accelerate (1.15) that training uses or replaces."""

from typing import Any

import torch
from accelerate import accelerator
from accelerate.utils import fsdp_utils


def final_norm(network: torch.nn.Module) -> torch.nn.Module | None:
    """The norm behind the last layer, which Accelerate shards on its own."""
    return getattr(fsdp_utils, "_find_final_norm", lambda network: None)(network)


def fp16_on_cpu() -> tuple[Any, str, Any]:
    """(owner, name, value) with which mixed precision of a CPU is autocast to fp16, which
    Accelerate refuses there."""

    def autocast(native_amp: bool = False, autocast_kwargs: Any = None) -> Any:
        return torch.autocast("cpu", dtype=torch.float16, enabled=native_amp)

    return accelerator, "get_mixed_precision_context_manager", autocast
