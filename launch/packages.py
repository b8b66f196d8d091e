"""Which installed packages a rank of a run has no use for."""

from __future__ import annotations

from launch.schema import Recipe, Strategy


def unused(recipe: Recipe, strategy: Strategy | None) -> list[str]:
    """Packages that transformers and accelerate import wherever they are installed, and this run does not use.

    `strategy` None: whatever runs without DeepSpeed. What they cost a rank at its start: benchmarks/start_up.py.
    """
    uses_bitsandbytes = any(word in recipe.training.optim for word in ("8bit", "bnb", "paged"))
    uses_bitsandbytes |= recipe.quantization is not None
    used = {
        "peft": recipe.lora is not None,
        "bitsandbytes": uses_bitsandbytes,
        "deepspeed": strategy is not None and strategy.engine == "deepspeed",
    }
    return [package for package, is_used in used.items() if not is_used]
