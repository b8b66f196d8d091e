"""The short way to torch's cache of shapes, and to the FLOPs of documents, gives what torch's own
way gives."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention.varlen import varlen_attn
from torch.utils.flop_counter import FlopCounterMode

from launch.schema.recorded_step import BATCH, Log
from tests.modes.trace.test_trace import recipe_of, whole_step
from training.compat import fake_private
from training.compat.levers_private import replaced
from training.trace.cuda_semantics import Target
from training.trace.recorder import Recorder

LENGTH = 32
DOCUMENTS, HEADS, WIDTH = 5, 4, 16
TRAININGS = {
    "all weights": ("llama-tiny", {}),
    "LoRA, checkpointing": ("llama-tiny", {"lora": {"r": 4}, "checkpointing": True}),
    "an encoder-decoder": ("t5-tiny", {}),
}


def traced(shape: str, checkpointing: bool = False, **sections: Any) -> Log:
    training = {"bf16": True, "activation_checkpointing": checkpointing}
    recipe, plan = recipe_of(shape, training=training, **sections)
    return whole_step(recipe, plan, (LENGTH, LENGTH), True, BATCH, Target("8.6"))


def content(log: Log) -> list[Any]:
    """All of a log but the order of blocks that end together."""
    events: list[Any] = []
    ended: list[int] = []
    for event in log.events:
        if event.birth:
            events += [*sorted(ended), (event.block, event.phase, event.layer)]
            ended.clear()
        else:
            ended.append(event.block)
    return [log.blocks, [*events, *sorted(ended)], log.operators, log.calls]


@pytest.mark.parametrize("training", TRAININGS)
def test_a_step_is_the_same_with_torchs_own_keys(training, monkeypatch):
    shape, sections = TRAININGS[training]
    short = traced(shape, **sections)
    # the reference: torch's own way, which is taken without ours
    monkeypatch.setattr(fake_private, "short_cache", lambda: [])
    assert content(traced(shape, **sections)) == content(short)


def test_every_result_of_the_cache_passes_torchs_own_check():
    """torch computes each of them again, and raises where the two differ."""
    with torch._dynamo.config.patch(fake_tensor_cache_crosscheck_enabled=True):
        traced("llama-tiny", lora={"r": 4}, checkpointing=True)


def _times(number: float) -> torch.Tensor:
    return torch.ones(2, dtype=torch.int32) * number


def _summed(dimension: int) -> torch.Tensor:
    return torch.ones(2, 4).sum(dimension)


# what differs between two calls of an operator, the operator, and the arguments of both
CALLS: dict[str, tuple[Callable[..., torch.Tensor], Callable[[], tuple[Any, Any]]]] = {
    "type": (torch.neg, lambda: (torch.zeros(2, 4), torch.zeros(2, 4, dtype=torch.int32))),
    "shape": (torch.neg, lambda: ((base := torch.zeros(2, 4)), base[:1])),
    "strides": (torch.clone, lambda: (torch.zeros(4, 4), torch.zeros(4, 4).t())),
    "offset": (torch.t, lambda: ((base := torch.zeros(2, 4, 4))[0], base[1])),
    "type of a number": (_times, lambda: (1, 1.0)),
    "number": (_summed, lambda: (0, 1)),
}


@pytest.mark.parametrize("difference", CALLS)
def test_calls_that_differ_have_results_of_their_own(difference):
    operator, arguments = CALLS[difference]

    def results(*changes: tuple[Any, str, Any]) -> list[Any]:
        FakeTensorMode.cache_clear()
        with FakeTensorMode(), replaced(changes):
            found = [operator(each) for each in arguments()]
            found = [operator(each) for each in arguments()]  # of the cache
        return [(x.dtype, x.shape, x.stride(), x.storage_offset()) for x in found]

    own, short = results(), results(*fake_private.short_cache())
    assert short == own
    assert own[0] != own[1]


def test_a_kernel_may_ask_for_the_address_of_a_result_of_the_cache():
    """That of bitsandbytes for 8-bit states does."""
    with FakeTensorMode(), replaced(fake_private.short_cache()):
        results = [torch.neg(torch.zeros(2, 4)) for _ in range(3)]
    assert [result.data_ptr() for result in results] == [0, 0, 0]


@pytest.mark.parametrize("heads", [HEADS, HEADS // 2])
def test_flops_of_documents_are_those_of_torchs_formula(heads):
    tokens = DOCUMENTS * LENGTH

    def tensor(heads: int) -> torch.Tensor:
        return torch.zeros(tokens, heads, WIDTH, dtype=torch.bfloat16, requires_grad=True)

    def attend(mark: Any) -> None:
        starts = torch.zeros(DOCUMENTS + 1, dtype=torch.int32)
        operands = tensor(HEADS), tensor(heads), tensor(heads)
        mark("forward:0")
        out = varlen_attn(*operands, starts, starts, LENGTH, LENGTH, enable_gqa=heads != HEADS)
        mark("backward:0")
        out.backward(out)

    recorder = Recorder(DOCUMENTS)
    with FakeTensorMode():
        with FlopCounterMode(display=False) as counter:
            attend(lambda phase: None)
        with recorder:
            attend(recorder.mark)
    log = recorder.log
    of_calls = [log.operators[call.operator].flops for call in log.calls]
    recorded = sum(fixed + DOCUMENTS * sample for fixed, sample, _, _ in of_calls)
    assert recorded == counter.get_total_flops() > 0
