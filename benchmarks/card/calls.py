"""Seconds of the host in issuing work: operators, views, backward nodes, modules, hooks, autocast,
checkpoints, states, events, Triton's launches. Tensors are so small that the device is idle."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from benchmarks.card import clock
from benchmarks.card.rows import Row, attempted

NODES = 100
TENSORS = 300
Make = Callable[[], Callable[[Any], object]]


@dataclass(frozen=True)
class HostCase:
    """A call of the host. `make` gives it, `before` the argument of each batch."""

    name: str
    make: Make
    count: int = 200
    per: int = 1
    before: Callable[[], Any] | None = None


# where the tensors of the cases lie
PLACE: ContextVar[str] = ContextVar("PLACE", default="cuda")


def place() -> torch.device:
    return torch.device(PLACE.get())


def tensor(*shape: int, recorded: bool = False, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.ones(shape, device=place(), dtype=dtype, requires_grad=recorded)


OPERATORS: dict[str, Callable[[torch.Tensor], object]] = {
    "add": lambda x: x + x,
    "add a number": lambda x: x + 1.0,
    "mul": lambda x: x * x,
    "silu": functional.silu,
    "to bfloat16": lambda x: x.to(torch.bfloat16),
    "softmax": lambda x: x.softmax(-1),
    "sum": lambda x: x.sum(-1),
    "cat": lambda x: torch.cat((x, x)),
    "mm": lambda x: torch.mm(x, x),
    "clone": torch.clone,
    "pow": lambda x: x.pow(2),
    "layer_norm": lambda x: functional.layer_norm(x, (8,)),
    "rms_norm": lambda x: functional.rms_norm(x, (8,)),
    "view": lambda x: x.view(-1),
    "transpose": lambda x: x.transpose(0, 1),
    "unsqueeze": lambda x: x.unsqueeze(0),
    "slice": lambda x: x[..., :4],
    "expand": lambda x: x[:, None].expand(8, 2, 8),
    "reshape of a transpose": lambda x: x.t().reshape(-1),
    "contiguous, which it is": lambda x: x.contiguous(),
    "to float32, which it is": lambda x: x.to(torch.float32),
    "detach": torch.Tensor.detach,
}


def operator_cases() -> Iterator[HostCase]:
    """Each operator without and with autograd's recording, and its node in backward."""
    for name, call in OPERATORS.items():
        for recorded in (False, True):
            x = partial(tensor, 8, 8, recorded=recorded)

            def make(x: Any = x, call: Any = call) -> Callable[[Any], object]:
                made = x()
                return lambda _: call(made)

            yield HostCase(f"{name}{', recorded' if recorded else ''}", make)
        if name != "detach":
            yield node_case(name, call)


def node_case(name: str, call: Callable[[torch.Tensor], Any]) -> HostCase:
    """Backward of so many separate nodes at once, each between a root and a leaf of its own. What
    these take is the row of "contiguous, which it is", which has no node."""

    def before() -> tuple[list[torch.Tensor], list[torch.Tensor], list[torch.Tensor]]:
        leaves = [tensor(8, 8, recorded=True) for _ in range(NODES)]
        outs = [call(leaf) for leaf in leaves]
        return outs, leaves, [torch.ones_like(out) for out in outs]

    def backward(state: tuple[Any, Any, Any]) -> object:
        outs, leaves, gradients = state
        return torch.autograd.grad(outs, leaves, gradients, allow_unused=True)

    return HostCase(f"{name}, backward node", lambda: backward, 1, NODES, before)


CHAINED: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "add a number": lambda x: x + 1.0,
    "mul by a number": lambda x: x * 1.0,
    "silu": functional.silu,
    "clone": torch.clone,
    "view": lambda x: x.view(8, 8),
    "transpose": lambda x: x.transpose(0, 1),
}


def chain_cases() -> Iterator[HostCase]:
    """Nodes in a chain between one root and one leaf, as most are."""
    for name, call in CHAINED.items():

        def before(call: Callable[[torch.Tensor], torch.Tensor] = call) -> tuple[Any, Any, Any]:
            leaf = out = tensor(8, 8, recorded=True)
            for _ in range(NODES):
                out = call(out)
            return out, leaf, tensor(8, 8)

        yield HostCase(
            f"{name}, node of a chain", lambda: lambda x: torch.autograd.grad(*x), 1, NODES, before
        )


def in_place() -> Callable[[Any], object]:
    x = tensor(8)
    return lambda _: x.add_(1)


def creations() -> Iterator[HostCase]:
    device = place()
    for name, call in (
        ("empty", lambda: torch.empty(8, device=device)),
        ("zeros", lambda: torch.zeros(8, device=device)),
        ("full of a number", lambda: torch.full((8,), 1.0, device=device)),
        ("arange", lambda: torch.arange(8, device=device)),
        ("tensor of a number", lambda: torch.tensor(1.0, device=device)),
    ):
        yield HostCase(name, lambda call=call: lambda _: call(), 100)
    yield HostCase("add in place", in_place)


class Same(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


def module_call(hooks: int, keyword: bool = False) -> Callable[[Any], object]:
    module, x = Same(), tensor(8)
    for _ in range(hooks):
        module.register_forward_pre_hook(lambda *_: None)
        module.register_forward_hook(lambda *_: None)
    return (lambda _: module(x=x)) if keyword else (lambda _: module(x))


def parameter_read() -> Callable[[Any], object]:
    layer = nn.Linear(4, 4)
    return lambda _: layer.weight


class Twice(torch.autograd.Function):
    """A function of one's own, as fused kernels are."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x.mul(2)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        (_,) = ctx.saved_tensors
        return gradients[0].mul(2)


def linear(
    dtype: torch.dtype = torch.float32, bias: bool = False, autocast: bool = False, **more: bool
) -> tuple[nn.Linear, torch.Tensor, Any]:
    layer = nn.Linear(64, 64, bias=bias, device=place(), dtype=dtype)
    context = (
        torch.autocast(place().type, dtype=torch.bfloat16, **more) if autocast else nullcontext()
    )
    return layer, tensor(8, 64, recorded=True, dtype=dtype), context


def linear_cases() -> Iterator[HostCase]:
    """A small linear layer, forward and backward (to leaves: its input, its parameters), by how it
    is cast."""
    for name, options in (
        ("linear", {}),
        ("linear with bias", {"bias": True}),
        ("linear bfloat16", {"dtype": torch.bfloat16}),
        ("linear, autocast", {"autocast": True}),
        ("linear, autocast, casts not cached", {"autocast": True, "cache_enabled": False}),
    ):

        def make(options: dict[str, Any] = options) -> Callable[[Any], object]:
            layer, x, context = linear(**options)

            def run(_: Any) -> None:
                with context:
                    for _ in range(NODES):
                        layer(x)

            return run

        def before(options: dict[str, Any] = options) -> torch.Tensor:
            made = [linear(**options) for _ in range(NODES)]
            with made[0][2]:
                return torch.stack([layer(x) for layer, x, _ in made]).sum()

        yield HostCase(f"{name}, forward", make, 1, NODES)
        yield HostCase(f"{name}, backward", lambda: lambda loss: loss.backward(), 1, NODES, before)


def entered(make: Callable[[], Any]) -> Callable[[Any], object]:
    def run(_: Any) -> None:
        with make():
            pass

    return run


def checkpoint_cases() -> Iterator[HostCase]:
    """A function of one operator, plain and checkpointed: forward, and with backward."""
    ways: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
        "plain": lambda x: x * 2,
        "checkpoint": lambda x: checkpoint(lambda y: y * 2, x, use_reentrant=False),
        "checkpoint without random state": lambda x: checkpoint(
            lambda y: y * 2, x, use_reentrant=False, preserve_rng_state=False
        ),
        "checkpoint, reentrant": lambda x: checkpoint(lambda y: y * 2, x, use_reentrant=True),
        "function of one's own": lambda x: Twice.apply(x),
    }
    for name, call in ways.items():
        for with_backward in (False, True):

            def make(call: Any = call, with_backward: bool = with_backward) -> Any:
                x = tensor(8, recorded=True)
                gradient = torch.ones_like(x)
                if with_backward:
                    return lambda _: call(x).backward(gradient)
                return lambda _: call(x)

            suffix = ", forward and backward" if with_backward else ", forward"
            yield HostCase(name + suffix, make, 50)


def saved_cases() -> Iterator[HostCase]:
    """Saved tensors packed and unpacked by hooks that do nothing: two a product."""
    for name, hooks in (("no hooks", False), ("saved_tensors_hooks", True)):

        def products(hooks: bool = hooks) -> torch.Tensor:
            x = tensor(8, recorded=True)
            context = (
                torch.autograd.graph.saved_tensors_hooks(lambda y: y, lambda y: y)
                if hooks
                else nullcontext()
            )
            with context:
                return torch.stack([x * x for _ in range(NODES)]).sum()

        yield HostCase(
            f"{name}, forward of a product", lambda run=products: lambda _: run(), 1, NODES
        )
        yield HostCase(
            *(f"{name}, backward of a product", lambda: lambda loss: loss.backward(), 1, NODES),
            products,
        )


def parameters() -> list[nn.Parameter]:
    made = [nn.Parameter(tensor(64)) for _ in range(TENSORS)]
    for each in made:
        each.grad = torch.ones_like(each)
    return made


def list_cases() -> Iterator[HostCase]:
    """Work over 300 tensors, a tensor each."""

    def over(call: Callable[[Sequence[torch.Tensor]], object]) -> Make:
        def make() -> Callable[[Any], object]:
            tensors = [tensor(64) for _ in range(TENSORS)]
            return lambda _: call(tensors)

        return make

    foreach_norm: Any = torch._foreach_norm
    yield HostCase("_foreach_mul_", over(lambda x: torch._foreach_mul_(x, 1.0)), 20, TENSORS)
    yield HostCase("_foreach_norm", over(foreach_norm), 20, TENSORS)
    for name, options in (("fused", {"fused": True}), ("foreach", {"foreach": True})):

        def make(options: dict[str, Any] = options) -> Callable[[Any], object]:
            optimizer = torch.optim.AdamW(parameters(), **options)
            return lambda _: optimizer.step()

        yield HostCase(f"{name} AdamW step", make, 5, TENSORS)

    def clip() -> Callable[[Any], object]:
        made = parameters()
        return lambda _: nn.utils.clip_grad_norm_(made, 1.0)

    yield HostCase("clip_grad_norm_", clip, 5, TENSORS)
    yield HostCase(
        *("zero_grad", lambda: lambda optimizer: optimizer.zero_grad(), 1, TENSORS),
        lambda: torch.optim.SGD(parameters(), lr=1.0),
    )


def engine_start() -> Callable[[Any], object]:
    """Backward of one node, whose graph is kept."""
    x = tensor(8, recorded=True)
    out, gradient = x * 2.0, tensor(8)
    return lambda _: torch.autograd.grad(out, x, gradient, retain_graph=True)


def leaf_case() -> HostCase:
    """Gradients that leaves get: a node and an accumulation each."""

    def before() -> torch.Tensor:
        leaves = [tensor(8, recorded=True) for _ in range(NODES)]
        return torch.stack(leaves).sum()

    return HostCase("gradient of a leaf", lambda: lambda loss: loss.backward(), 1, NODES, before)


def attention() -> Callable[[Any], object]:
    q = tensor(1, 2, 16, 64, recorded=True, dtype=torch.bfloat16)
    return lambda _: functional.scaled_dot_product_attention(q, q, q, is_causal=True)


def cross_entropy() -> Callable[[Any], object]:
    logits, ids = tensor(8, 32, recorded=True), torch.zeros(8, dtype=torch.long, device=place())
    return lambda _: functional.cross_entropy(logits, ids)


def embedding() -> Callable[[Any], object]:
    table, ids = tensor(32, 8, recorded=True), torch.zeros(8, dtype=torch.long, device=place())
    return lambda _: functional.embedding(ids, table)


def autocast() -> Callable[[Any], object]:
    return entered(partial(torch.autocast, place().type, dtype=torch.bfloat16))


def everywhere() -> Iterator[HostCase]:
    """Cases of any device."""
    yield from creations()
    yield HostCase("module call", lambda: module_call(0))
    yield HostCase("module call by keyword", lambda: module_call(0, True))
    yield HostCase("module call, two hooks", lambda: module_call(1))
    yield HostCase("parameter of a module read", parameter_read)
    yield HostCase("engine start", engine_start, 50)
    yield leaf_case()
    yield from linear_cases()
    yield HostCase("autocast entered", autocast)
    yield HostCase("no_grad entered", lambda: entered(torch.no_grad))
    yield HostCase("cross_entropy, recorded", cross_entropy)
    yield HostCase("embedding, recorded", embedding)
    yield HostCase("attention, recorded", attention, 50)
    yield from operator_cases()
    yield from chain_cases()
    yield from checkpoint_cases()
    yield from saved_cases()
    yield from list_cases()


def state_set() -> Callable[[Any], object]:
    state, cuda_state = torch.get_rng_state(), torch.cuda.get_rng_state()

    def run(_: Any) -> None:
        torch.set_rng_state(state)
        torch.cuda.set_rng_state(cuda_state)

    return run


def item_read() -> Callable[[Any], object]:
    x = tensor(1)
    return lambda _: x.item()


def event_recorded() -> Callable[[Any], object]:
    return lambda _: torch.cuda.Event(enable_timing=True).record()


def event_pair() -> tuple[torch.cuda.Event, torch.cuda.Event]:
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    first.record()
    last.record()
    torch.cuda.synchronize()
    return first, last


def waited() -> Callable[[Any], object]:
    stream = torch.cuda.Stream()
    return lambda _: torch.cuda.current_stream().wait_stream(stream)


def moved(pinned: bool) -> Callable[[Any], object]:
    batch = torch.ones(4, 512, dtype=torch.long)
    batch, device = batch.pin_memory() if pinned else batch, place()
    return lambda _: batch.to(device, non_blocking=pinned)


def on_a_card() -> Iterator[HostCase]:
    """Cases of a card's streams, events and states."""
    yield HostCase("item()", item_read)
    yield HostCase("synchronize, idle", lambda: lambda _: torch.cuda.synchronize())
    yield HostCase("event made and recorded", event_recorded)
    yield HostCase(
        *("elapsed_time", lambda: lambda pair: pair[0].elapsed_time(pair[1]), 200, 1, event_pair)
    )
    yield HostCase("event asked", lambda: lambda pair: pair[0].query(), 200, 1, event_pair)
    yield HostCase(
        "stream entered", lambda: entered(partial(torch.cuda.stream, torch.cuda.Stream()))
    )
    yield HostCase("stream waits for another", waited)
    yield HostCase("batch to device, pinned", partial(moved, True), 50)
    yield HostCase("batch to device, pageable", partial(moved, False), 50)
    yield HostCase(
        "batch pinned", lambda: lambda _: torch.ones(4, 512, dtype=torch.long).pin_memory(), 50
    )
    yield HostCase("random state read, host", lambda: lambda _: torch.get_rng_state(), 50)
    yield HostCase("random state read, device", lambda: lambda _: torch.cuda.get_rng_state(), 50)
    yield HostCase("random states set", state_set, 50)


def triton_cases() -> Iterator[HostCase]:
    from benchmarks.card import triton_kernel

    yield HostCase("Triton launch", lambda: triton_kernel.small_launch(tensor(8)))
    yield HostCase("Triton launch, 12 arguments", lambda: triton_kernel.wide_launch(tensor(8)))
    yield HostCase("Triton launch, heuristics", lambda: triton_kernel.heuristic_launch(tensor(8)))


def rows_of(cases: Iterator[HostCase]) -> Iterator[Row]:
    for case in cases:

        def measure(case: HostCase = case) -> Row:
            return clock.host_seconds(case.make(), case.count, case.per, case.before)

        yield attempted({"case": case.name}, measure)


def on_card() -> Iterator[Row]:
    yield from rows_of(on_a_card())
    yield from rows_of(everywhere())


def triton() -> Iterator[Row]:
    yield from rows_of(triton_cases())


def on_cpu() -> Iterator[Row]:
    """The same calls with tensors of the host: an index of this processor's speed."""
    token, threads = PLACE.set("cpu"), torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield from rows_of(everywhere())
    finally:
        torch.set_num_threads(threads)
        PLACE.reset(token)
