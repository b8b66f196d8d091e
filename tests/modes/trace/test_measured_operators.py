"""Operators of a model beside their peaks on an A100, as Liger-Kernel's benchmarks measured them
(tests/data/gpu/measured.json): forward and backward in PyTorch's and transformers' own code."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import LlamaConfig
from transformers.models.llama import modeling_llama as llama

from launch.predict.memory.allocator import FREED, replay_parts
from tests import builders
from training.trace.cuda_semantics import Target, cuda_semantics
from training.trace.cuda_workspace import cublas_workspace_bytes
from training.trace.recorder import Recorder

FILE = builders.CODE / "tests" / "data" / "gpu" / "measured.json"
CASES = json.loads(FILE.read_text(encoding="utf-8"))["operators"]["cases"]
A100 = Target("8.0")
MIB = 1 << 20
ROUNDS = 3  # the first makes the gradients that the others add to
# cuBLAS handles: of rotary embeddings only the forward has a product
HANDLES_OF = {"fused_linear_cross_entropy": 2, "geglu": 2, "swiglu": 2, "rope": 1}
Step = Callable[[], Any]


def cross_entropy(B: int, T: int, V: int) -> Step:
    scores = torch.randn(B * T, V, requires_grad=True)
    target = torch.randint(V, (B * T,))
    return lambda: torch.nn.CrossEntropyLoss()(scores, target).backward()


def fused_linear_cross_entropy(BT: int, H: int, V: int, dtype: torch.dtype, mode: str) -> Step:
    # the benchmark makes the layers of both implementations, and measures one
    head, _other = (torch.nn.Linear(H, V, bias=False, dtype=dtype) for _ in range(2))
    rows, target = torch.randn(BT, H, requires_grad=True, dtype=dtype), torch.randint(V, (BT,))

    def step(_kept: Any = _other) -> None:
        torch.nn.CrossEntropyLoss()(head(rows), target).backward()

    return step


def gated(batch: int, T: int, config: dict[str, Any], dtype: torch.dtype) -> Step:
    default = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    layer = llama.LlamaMLP(LlamaConfig(**config))
    torch.set_default_dtype(default)
    rows = torch.randn(batch, T, config["hidden_size"], dtype=dtype, requires_grad=True)

    def step() -> None:
        out = layer(rows)
        out.backward(torch.randn_like(out), retain_graph=True)

    return step


def geglu(bsz: int, T: int, dtype: torch.dtype, **config: Any) -> Step:
    return gated(bsz, T, config, dtype)


def swiglu(B: int, T: int, dtype: torch.dtype, **config: Any) -> Step:
    return gated(B, T, config, dtype)


def norm(make: Callable[[], torch.nn.Module], rows: int, width: int, dtype: torch.dtype) -> Step:
    layers = [make() for _ in range(2)]  # of both implementations
    inputs = torch.randn(rows, width, dtype=dtype)
    gradient = torch.randn_like(inputs)
    inputs.requires_grad_(True)
    return lambda: layers[0](inputs).backward(gradient, retain_graph=True)


def layer_norm(M: int, N: int, dtype: torch.dtype, eps: float) -> Step:
    return norm(lambda: torch.nn.LayerNorm(N, eps=eps), M, N, dtype)


def rms_norm(M: int, H: int, dtype: torch.dtype, eps: float) -> Step:
    return norm(lambda: llama.LlamaRMSNorm(H, eps=eps), M, H, dtype)


def rope(
    num_q_heads: int, num_kv_heads: int, dtype: torch.dtype, hidden_size: int, seq_len: int
) -> Step:
    width = hidden_size // num_q_heads
    config = LlamaConfig(hidden_size=hidden_size, num_attention_heads=num_q_heads)
    rotary = llama.LlamaRotaryEmbedding(config)
    rotary.original_inv_freq = rotary.inv_freq  # transformers 4 made no copy of it
    query, key = (
        torch.randn(1, seq_len, heads, width, requires_grad=True, dtype=dtype).transpose(1, 2)
        for heads in (num_q_heads, num_kv_heads)
    )
    gradients = torch.randn_like(query), torch.randn_like(key)
    positions = torch.arange(seq_len).unsqueeze(0)
    cos, sin = rotary(key, positions)

    def step(_kept: Any = (rotary, positions)) -> None:
        rotated = llama.apply_rotary_pos_emb(query, key, cos, sin)
        torch.autograd.grad(rotated, (query, key), gradients, allow_unused=True)

    return step


def made(case: dict[str, Any]) -> Step:
    values = {**case["config"], case["x"]: case["value"]}
    if "dtype" in values:
        values["dtype"] = getattr(torch, values["dtype"].removeprefix("torch."))
    if case["op"] == "rope":
        names = {"H": "hidden_size", "T": "seq_len"}
        values = {names.get(name, name): value for name, value in values.items()}
    return globals()[case["op"]](**values)


def peak_bytes(case: dict[str, Any]) -> int:
    """torch.cuda.max_memory_allocated() of the last round."""
    recorder = Recorder(batch=(1 << 31) - 1)  # divides no size
    recorder.target = A100
    with cuda_semantics(A100), FakeTensorMode(), recorder:
        recorder.mark("forward")
        step = made(case)
        rounds = []
        for _ in range(ROUNDS):
            rounds.append(len(recorder.log.events))
            recorder.mark("backward")
            step()
        last = len(recorder.log.events)
    log = recorder.log
    events = [
        (event.block, log.blocks[event.block].fixed_bytes if event.birth else FREED)
        for event in log.events
    ]
    handle_bytes = cublas_workspace_bytes("8.0")
    before = [(len(log.blocks), HANDLES_OF.get(case["op"], 0) * handle_bytes)]
    parts = [[*before, *events[: rounds[-1]]], events[rounds[-1] : last]]
    return replay_parts(parts)[-1].peak_allocated_bytes


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case['op']}-{case['x']}{case['value']}")
def test_an_operator_takes_what_it_took_on_the_card(case):
    assert peak_bytes(case) / MIB == pytest.approx(case["measured_mib"], rel=1e-5)
