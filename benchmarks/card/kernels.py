"""Seconds of kernels that move bytes: elementwise ones, casts, copies, reductions, norms, losses,
embeddings; an operator is a row of a table."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.nn import functional

from benchmarks.card import clock
from benchmarks.card.rows import Row, attempted

Size = tuple[int, ...]
BF16, FP32, FP16 = torch.bfloat16, torch.float32, torch.float16
SHORT = {BF16: "bf16", FP32: "fp32", FP16: "fp16", torch.int64: "int64", torch.bool: "bool"}
# tokens x hidden: in the cache, of a small model, beyond any cache
SMALL, MIDDLE, LARGE = (512, 896), (4096, 896), (16384, 4096)
aten: Any = torch.ops.aten


@dataclass(frozen=True)
class Operator:
    """One operator over inputs that `make` gives for a size."""

    name: str
    kind: str  # the class of kernels that a timeline knows
    make: Callable[[Size], Sequence[Any]]
    call: Callable[..., Any]
    sizes: tuple[Size, ...] = (SMALL, MIDDLE, LARGE)
    reads: bool = True  # False: inputs are only written
    direction: str = "forward"
    graph: bool = True


def random(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    return torch.randn(shape, device=clock.device(), dtype=dtype)


def tensors(*dtypes: torch.dtype) -> Callable[[Size], Sequence[torch.Tensor]]:
    """Inputs of the row's size, one of each dtype."""
    return lambda size: [random(dtype, *size) for dtype in dtypes]


def touched_bytes(values: Any) -> int:
    """Bytes of tensors, those of a broadcast dimension once."""
    if isinstance(values, torch.Tensor):
        sizes = [size for size, step in zip(values.shape, values.stride(), strict=True) if step]
        return values.element_size() * torch.Size(sizes).numel()
    return sum(map(touched_bytes, values)) if isinstance(values, list | tuple) else 0


def named(name: str, *dtypes: torch.dtype) -> str:
    return " ".join([name, *(SHORT[dtype] for dtype in dtypes)])


def of_dtypes(
    name: str, kind: str, call: Callable[..., Any], *rows: Sequence[torch.dtype], **options: Any
) -> list[Operator]:
    """The operator once for each sequence of its inputs' dtypes."""
    return [
        Operator(named(name, *dtypes), kind, tensors(*dtypes), call, **options) for dtypes in rows
    ]


def by_heads(dtype: torch.dtype) -> Callable[[Size], Sequence[torch.Tensor]]:
    """A projection seen as heads of 64 in rows of at most 2048 tokens, and rotary's cosines."""

    def make(size: Size) -> Sequence[torch.Tensor]:
        tokens, hidden = size
        length = min(tokens, 2048)
        heads = random(dtype, tokens // length, length, hidden // 64, 64).transpose(1, 2)
        return heads, random(dtype, tokens // length, 1, length, 64)

    return make


def heads_alone(dtype: torch.dtype) -> Callable[[Size], Sequence[torch.Tensor]]:
    return lambda size: by_heads(dtype)(size)[:1]


def row_and(dtype: torch.dtype, shape: Callable[[Size], Size]) -> Callable[[Size], Sequence[Any]]:
    return lambda size: (random(dtype, *size), random(dtype, *shape(size)))


def ids_of(size: Size, words: int) -> torch.Tensor:
    return torch.randint(words, (size[0],), device=clock.device())


def rotated(x: torch.Tensor) -> torch.Tensor:
    """rotate_half() of transformers: a negation and a cat of strided halves."""
    half = x.shape[-1] // 2
    return torch.cat((-x[..., half:], x[..., :half]), dim=-1)


def repeated(x: torch.Tensor) -> torch.Tensor:
    """repeat_kv() of transformers, four times."""
    rows, heads, length, width = x.shape
    return (
        x[:, :, None].expand(rows, heads, 4, length, width).reshape(rows, 4 * heads, length, width)
    )


def rms_norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """LlamaRMSNorm of transformers."""
    wide = x.to(torch.float32)
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
    return weight * wide.to(x.dtype)


ADD, MUL, CONTIGUOUS = torch.add, torch.mul, torch.Tensor.contiguous
ELEMENTWISE = [
    *of_dtypes("add", "plain", ADD, (BF16, BF16), (FP32, FP32)),
    *of_dtypes("add in place", "plain", lambda a, b: a.add_(b), (FP32, FP32), (BF16, BF16)),
    *of_dtypes("mul", "plain", MUL, (BF16, BF16), (FP32, FP32)),
    *of_dtypes("mul by a number", "plain", lambda a: a * 0.7, (BF16,), (FP32,)),
    *of_dtypes("silu", "plain", functional.silu, (BF16,), (FP32,)),
    *of_dtypes("silu backward", "plain", aten.silu_backward, (BF16, BF16)),
    *of_dtypes("gelu", "plain", functional.gelu, (BF16,)),
    *of_dtypes("pow 2", "plain", lambda a: a.pow(2), (FP32,)),
    *of_dtypes("mul, two dtypes", "mixed", MUL, (BF16, FP32)),
    *of_dtypes("add in place, two dtypes", "mixed", lambda a, b: a.add_(b), (FP32, BF16)),
    *of_dtypes("to fp32", "cast", lambda a: a.to(FP32), (BF16,), (FP16,)),
    *of_dtypes("to bf16", "cast", lambda a: a.to(BF16), (FP32,)),
    *of_dtypes("to fp16", "cast", lambda a: a.to(FP16), (FP32,)),
    *of_dtypes("copy", "copy", torch.clone, (BF16,), (FP32,)),
    *of_dtypes("dropout", "plain", lambda a: aten.native_dropout(a, 0.1, True), (BF16,)),
    Operator("mul by a row bf16", "broadcast", row_and(BF16, lambda size: size[1:]), MUL),
    Operator("mul by a column fp32", "broadcast", row_and(FP32, lambda size: (size[0], 1)), MUL),
    Operator("mul by cosines bf16", "broadcast", by_heads(BF16), MUL),
    Operator("mul by cosines fp32", "broadcast", by_heads(FP32), MUL),
    *(
        Operator(named("heads made contiguous", dtype), "strided", heads_alone(dtype), CONTIGUOUS)
        for dtype in (BF16, FP32)
    ),
    *of_dtypes("transposed copy", "strided", lambda a: a.t().contiguous(), (BF16,), (FP32,)),
    *of_dtypes("cast of a transpose", "strided", lambda a: a.t().to(FP32).contiguous(), (BF16,)),
    *of_dtypes("half of each row", "strided", lambda a: a[:, ::2] * 0.7, (BF16,), (FP32,)),
    Operator("rotate half bf16", "strided", heads_alone(BF16), rotated),
    Operator("repeated heads bf16", "strided", heads_alone(BF16), repeated),
]


def logits(dtype: torch.dtype, words: int) -> Callable[[Size], Sequence[torch.Tensor]]:
    return lambda size: (random(dtype, size[0], words), ids_of(size, words))


def softmax_backward(dtype: torch.dtype) -> Callable[..., Any]:
    return lambda grad, out: aten._log_softmax_backward_data(grad, out, 1, dtype)


REDUCED = (MIDDLE, LARGE)
REDUCTIONS = [
    *of_dtypes("sum of rows", "reduction", lambda a: a.sum(-1), (BF16,), (FP32,), sizes=REDUCED),
    *of_dtypes("sum of columns", "reduction", lambda a: a.sum(0), (BF16,), (FP32,), sizes=REDUCED),
    *of_dtypes(
        "mean of rows", "reduction", lambda a: a.mean(-1, keepdim=True), (FP32,), sizes=REDUCED
    ),
    *of_dtypes("sum", "reduction", torch.sum, (FP32,), sizes=REDUCED),
    *of_dtypes("norm", "reduction", torch.linalg.vector_norm, (BF16,), (FP32,), sizes=REDUCED),
    *of_dtypes("max", "reduction", lambda a: a.max(-1)[0], (FP32,), sizes=REDUCED),
    *of_dtypes("isfinite all", "reduction", lambda a: a.isfinite().all(), (FP32,), sizes=REDUCED),
    *of_dtypes(
        "softmax",
        "softmax",
        lambda a: a.softmax(-1, dtype=FP32),
        *((BF16,), (FP32,)),
        sizes=((8192, 512), (8192, 2048)),
    ),
]


def losses(words: int, tokens: int) -> list[Operator]:
    """The launches of a cross entropy in float32 over so many words, forward and backward."""
    sizes, name = ((tokens, words),), f"{words} words"
    return [
        *of_dtypes(
            f"log_softmax {name}",
            "softmax",
            lambda a: a.log_softmax(-1, dtype=FP32),
            *((FP32,), (BF16,)),
            sizes=sizes,
        ),
        *of_dtypes(
            f"log_softmax backward {name}",
            *("softmax", softmax_backward(FP32)),
            (FP32, FP32),
            sizes=sizes,
        ),
        *of_dtypes(f"softmax {name}", "softmax", lambda a: a.softmax(-1), (FP32,), sizes=sizes),
        *of_dtypes(f"logits to fp32 {name}", "cast", lambda a: a.to(FP32), (BF16,), sizes=sizes),
        Operator(
            f"cross entropy {name}",
            *("softmax", logits(FP32, words), functional.cross_entropy),
            sizes=sizes,
        ),
        Operator(
            f"cross entropy {name}",
            *("softmax", logits(FP32, words), functional.cross_entropy),
            sizes=sizes,
            direction="backward",
        ),
    ]


def with_weight(*dtypes: torch.dtype) -> Callable[[Size], Sequence[torch.Tensor]]:
    """A row's input and weights of its width."""
    first, *more = dtypes
    return lambda size: [random(first, *size), *(random(dtype, size[1]) for dtype in more)]


def fused_rms_norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return functional.rms_norm(x, weight.shape, weight, 1e-6)


def layer_norm(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    return functional.layer_norm(x, weight.shape, weight, bias)


NORMS = [
    Operator(named(name, dtypes[0]), "norm", with_weight(*dtypes), call, REDUCED, True, direction)
    for direction in ("forward", "backward")
    for name, call, dtypes in (
        ("RMSNorm of transformers", rms_norm, (BF16, BF16)),
        ("RMSNorm of transformers", rms_norm, (FP32, FP32)),
        ("rms_norm", fused_rms_norm, (BF16, BF16)),
        ("layer_norm", layer_norm, (BF16, BF16, BF16)),
        ("layer_norm", layer_norm, (FP32, FP32, FP32)),
    )
]


def table_and_ids(dtype: torch.dtype, words: int) -> Callable[[Size], Sequence[torch.Tensor]]:
    return lambda size: (ids_of(size, words), random(dtype, words, size[1]))


def gradient_and_ids(dtype: torch.dtype, words: int) -> Callable[[Size], Sequence[torch.Tensor]]:
    return lambda size: (random(dtype, *size), ids_of(size, words))


def embedded(ids: torch.Tensor, table: torch.Tensor) -> list[torch.Tensor]:
    return [functional.embedding(ids, table)]


def embedding_backward(words: int) -> Callable[..., Any]:
    return lambda gradient, ids: aten.embedding_dense_backward(gradient, ids, words, -1, False)


def many(dtype: torch.dtype, *sizes: int) -> Callable[[Size], Sequence[Any]]:
    """A list of tensors, as gradients are: so many of each size."""
    return lambda count: ([random(dtype, size) for size in sizes for _ in range(count[0] // 2)],)


def added_rows(gradient: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    out = torch.zeros_like(gradient)
    return out.index_add_(0, ids, gradient)


def zeroed(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    torch._foreach_zero_(tensors)
    return tensors


LISTS = ((300,),)
MODEL = (1024, 600_000)  # numbers of a norm's and of a small layer's weights
WORDS = 151936
MOVEMENT = [
    *(
        Operator(named(name, dtype), "embedding", make(dtype, WORDS), call, REDUCED, graph=graph)
        for dtype in (BF16, FP32)
        for name, make, call, graph in (
            ("embedding", table_and_ids, embedded, True),
            ("embedding backward", gradient_and_ids, embedding_backward(WORDS), False),
        )
    ),
    Operator(
        "index_select bf16",
        *("index", gradient_and_ids(BF16, 4096)),
        lambda x, ids: x.index_select(0, ids),
        REDUCED,
    ),
    Operator("index_add fp32", "index", gradient_and_ids(FP32, 4096), added_rows, REDUCED),
    Operator(
        "gather of logits fp32",
        *("index", logits(FP32, 32000)),
        lambda x, ids: x.gather(1, ids[:, None]),
        ((2048, 32000),),
    ),
    Operator(
        "sort of ids int64", "index", lambda size: (ids_of(size, WORDS),), torch.sort, REDUCED
    ),
    *of_dtypes("cat of rows", "copy", lambda a, b: torch.cat((a, b)), (BF16, BF16)),
    *of_dtypes("cat of columns", "strided", lambda a, b: torch.cat((a, b), -1), (BF16, BF16)),
    *of_dtypes("fill", "fill", lambda a: a.fill_(1.5), (BF16,), (FP32,), reads=False),
    *of_dtypes("zero", "fill", lambda a: a.zero_(), (BF16,), (FP32,), reads=False),
    *(
        Operator(name, "foreach", many(dtype, *sizes), call, LISTS)
        for name, dtype, sizes, call in (
            ("_foreach_norm fp32", FP32, MODEL, torch._foreach_norm),
            ("_foreach_norm bf16", BF16, MODEL, torch._foreach_norm),
            ("_foreach_mul_ fp32", FP32, MODEL, lambda x: (torch._foreach_mul_(x, 0.999), x)[1]),
            ("stack of norms fp32", FP32, (1, 1), torch.stack),
        )
    ),
    Operator("_foreach_zero_ fp32", "foreach", many(FP32, *MODEL), zeroed, LISTS, reads=False),
]


def backward_calls(operator: Operator, sets: Sequence[Sequence[Any]]) -> list[Callable[[], Any]]:
    """Calls of the operator's backward, for each set of inputs."""
    calls = []
    for inputs in sets:
        leaves = [each.requires_grad_() for each in inputs if each.is_floating_point()]
        out = operator.call(*inputs)
        gradient = torch.randn_like(out)
        calls.append(partial(torch.autograd.grad, out, leaves, gradient, retain_graph=True))
    return calls


def moved_bytes(operator: Operator, inputs: Sequence[Any], out: Any) -> int:
    """Bytes that cannot but be moved: each input read once, each output written once."""
    read, written = touched_bytes(inputs), touched_bytes(out)
    if operator.call is embedded:  # as many of the table's rows as there are ids
        read = touched_bytes(inputs[0]) + written
    if operator.direction == "backward":  # inputs and gradient are read, gradients written
        return 2 * read + written
    return read + written if operator.reads else written


def operator_row(operator: Operator, size: Size) -> Row:
    def measure() -> Row:
        inputs = operator.make(size)
        moved = moved_bytes(operator, inputs, operator.call(*inputs))
        count = 1 if size == SMALL else clock.num_sets(moved)
        sets = [inputs, *(operator.make(size) for _ in range(count - 1))]
        calls = (
            backward_calls(operator, sets)
            if operator.direction == "backward"
            else [partial(operator.call, *each) for each in sets]
        )
        timing = clock.device_seconds(calls, graph=operator.graph)
        return {**timing, "bytes": moved, "gb_s": moved / timing["s"] / 1e9}

    sizes = "x".join(map(str, size))
    direction = "" if operator.direction == "forward" else " backward"
    fields = {"case": f"{operator.name}{direction} {sizes}", "kind": operator.kind}
    return attempted({**fields, "sizes": list(size)}, measure)


def rows_of(operators: Sequence[Operator]) -> Iterator[Row]:
    """Rows of the largest sizes first, as bandwidth matters most."""
    for place in range(3):
        for operator in operators:
            sizes = operator.sizes[::-1]
            if place < len(sizes):
                yield operator_row(operator, sizes[place])


def elementwise() -> Iterator[Row]:
    yield from rows_of(ELEMENTWISE)


def reductions() -> Iterator[Row]:
    tokens = 2048 if clock.memory_bytes() > 16 << 30 else 256
    yield from rows_of([*losses(151936, tokens), *losses(32000, tokens), *NORMS, *REDUCTIONS])


def movement() -> Iterator[Row]:
    yield from rows_of(MOVEMENT)
