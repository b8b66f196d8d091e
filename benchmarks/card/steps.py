"""Host and device seconds of whole pieces of a training: layers of a small transformers model, and
a compiled function."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import torch

from benchmarks.card import clock
from benchmarks.card.rows import Row, attempted

FEW, MANY = 2, 8  # layers; their difference leaves embeddings, head and loss out
WAYS = {  # dtype of the weights, autocast, checkpointed layers
    "bfloat16": (torch.bfloat16, False, False),
    "float32": (torch.float32, False, False),
    "autocast bfloat16": (torch.float32, True, False),
    "autocast bfloat16, checkpointed": (torch.float32, True, True),
}


def network(layers: int, dtype: torch.dtype, is_checkpointed: bool) -> Any:
    from transformers import Qwen2Config, Qwen2ForCausalLM

    config = Qwen2Config(
        **{"vocab_size": 256, "hidden_size": 64, "intermediate_size": 128},
        **{"num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": layers},
        attn_implementation="sdpa",
    )
    made = Qwen2ForCausalLM(config).to(clock.device(), dtype).train()
    if is_checkpointed:
        made.gradient_checkpointing_enable({"use_reentrant": False})
    return made


def step_seconds(layers: int, way: tuple[torch.dtype, bool, bool]) -> dict[str, Row]:
    """Host seconds of forward and of backward of a model of so many layers, the device idle."""
    dtype, has_autocast, is_checkpointed = way
    made = network(layers, dtype, is_checkpointed)
    ids = torch.ones(1, 16, device=clock.device(), dtype=torch.long)

    def loss(_: object = None) -> torch.Tensor:
        context = torch.autocast("cuda", dtype=torch.bfloat16) if has_autocast else nullcontext()
        with context:
            return made(input_ids=ids, labels=ids, use_cache=False).loss

    return {
        "forward": clock.host_seconds(loss, 4, batches=5),
        "backward": clock.host_seconds(lambda value: value.backward(), 1, 1, loss, 9),
    }


def layers() -> Iterator[Row]:
    """A decoder layer's share of both, and what remains of a step."""
    for name, way in WAYS.items():

        def measure(way: tuple[torch.dtype, bool, bool] = way) -> Row:
            few, many = (step_seconds(count, way) for count in (FEW, MANY))
            row: Row = {}
            for part in ("forward", "backward"):
                for key, short in (("s", "s"), ("processor_s", "processor_s")):
                    layer = (many[part][key] - few[part][key]) / (MANY - FEW)
                    row[f"{part}_{short}_per_layer"] = layer
                    row[f"{part}_{short}_beside"] = few[part][key] - FEW * layer
            return row

        yield attempted({"case": f"Qwen2 layer, {name}"}, measure)


def activation(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.silu(x) * y + x


def compiled_rows(run: Callable[..., torch.Tensor]) -> Iterator[Row]:
    x, y = (torch.ones(64, 64, device=clock.device()) for _ in range(2))

    def first() -> Row:
        return {"s": clock.first_seconds(lambda: run(x, y))}

    def first_recorded() -> Row:
        return {"s": clock.first_seconds(lambda: run(leaf, y).sum().backward())}

    def call() -> Row:
        return clock.host_seconds(lambda _: run(x, y))

    def recorded() -> Row:
        return clock.host_seconds(lambda _: run(leaf, y))

    def backward() -> Row:
        def before() -> list[torch.Tensor]:
            return [run(leaf, y) for _ in range(20)]

        return clock.host_seconds(
            lambda outs: torch.autograd.grad(outs, leaf, [y] * len(outs)), 1, 20, before
        )

    leaf = x.clone().requires_grad_()
    for name, measure in (
        ("compiled function, first call", first),
        ("compiled function, call", call),
        ("compiled function, first call with backward", first_recorded),
        ("compiled function, recorded", recorded),
        ("compiled function, backward", backward),
    ):
        yield attempted({"case": name}, measure)


def compiled() -> Iterator[Row]:
    """A compiled function's calls; compiling is done in this process, so that no pool starts."""
    began = time.perf_counter()
    import torch._inductor.config as settings

    settings.compile_threads = 1
    yield {"case": "import of the compiler", "s": time.perf_counter() - began}
    yield from compiled_rows(torch.compile(activation))
