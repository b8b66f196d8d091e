"""Composed steps beside the same steps, recorded with all their layers and levers.

Each mixture of levers is one that no record has: some layers compute their activations again, the
logits are made in parts, or both, with MLPs in parts or not; of every family of
benchmarks.families, method, precision and engine, on a card or on a CPU. It is composed of records
of few layers, as a plan does, and recorded with all its layers and levers. Both logs are shared out
to a rank; all their events must be the same, and so the bytes that an allocator allocates and
reserves; and the price of the step, which looks at units alone, must say the same bytes and work. A
mixture that cannot be composed is named with the reason. Seeds decide the mixtures; `make test`
runs the first 12.
"""

from __future__ import annotations

import argparse
import math
import random
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache
from typing import Any

from benchmarks import recording
from benchmarks.families import FAMILIES
from launch.predict.memory import allocator
from launch.predict.sharding import BUCKET_ELEMENTS
from launch.predict.step import reduced, sharded, sources
from launch.predict.step.price import Price
from launch.predict.step.recorded import PASSES, NotComposed, Recorded
from launch.schema.levers import Levers
from launch.schema.modes import LAUNCH_MODES
from launch.schema.plan import DataFormat, MemoryEstimate, ModelSize, Plan, Strategy
from launch.schema.recipe import Recipe
from launch.schema.recorded_step import BATCH, Log, Passes, Question

NUM_MIXTURES = 300
RESULT = "composed"
METHODS: Mapping[str, dict[str, Any]] = {
    "full": {},
    "lora": {"lora": {"r": 4}},
    "4-bit": {"lora": {"r": 4}, "quantization": {"load_in_4bit": True}},
}
PRECISIONS: Mapping[str, dict[str, Any]] = {
    "float32": {},
    "autocast": {"training": {"bf16": True}},
    "bf16 weights": {"model": {"dtype": "bfloat16"}},
}
MODES = (
    *("single_gpu", "dual_gpu_nccl", "deepspeed_zero1", "deepspeed_zero2", "deepspeed_zero3"),
    *("deepspeed_zero2_offload", "deepspeed_zero3_offload", "fsdp2", "cpu"),
)
PARTS, SHARDS = (1, 1, 2, 3, 5, 16, 32, 64), (1, 1, 1, 2, 4)
LENGTH = 64  # tokens of a row
# of bytes, of these tiny steps: what layers of another way free, lists of gradients' addresses
PRICE_ERROR = 0.015
COUNTS = 3, 7  # samples, and targets of a part of the logits, of which bytes are compared


@dataclass(frozen=True)
class Mixture:
    """A step that is composed and recorded."""

    seed: int
    family: str
    method: str
    precision: str
    mode: str
    every_n_layers: int
    parts: int
    at_targets: bool
    shards: int  # of MLPs
    layers: int
    rows: int
    accumulation: int
    is_padded: bool

    @property
    def words(self) -> str:
        """All of it in a line."""
        return ", ".join(f"{key} {value}" for key, value in asdict(self).items() if key != "seed")


def mixtures(count: int) -> Iterator[Mixture]:
    """The first mixtures, one a seed that makes a possible one."""
    seed = 0
    while count:
        mixture = _mixture(seed)
        seed += 1
        if mixture is not None:
            count -= 1
            yield mixture


def _mixture(seed: int) -> Mixture | None:
    draw = random.Random(seed)
    family = draw.choice(list(FAMILIES))
    period = 2 if "layer_types" in FAMILIES[family] else 1
    forward = _model(family, period)[0].family.forward
    mixture = Mixture(
        seed,
        family,
        draw.choice(list(METHODS)),
        draw.choice(list(PRECISIONS)),
        draw.choice(MODES),
        every_n_layers=draw.choice((0, 1, 2, 3, 4, 5, 6)),
        parts=draw.choice(PARTS) if forward.head == "unchanged" else 1,
        at_targets=forward.head != "other" and draw.random() < 0.7,
        shards=draw.choice(SHARDS) if forward.tiles_mlp else 1,
        layers=period * draw.randint(5, 9),
        rows=draw.choice((1, 4)),
        accumulation=draw.choice((1, 2)),
        is_padded=draw.random() < 0.7,
    )
    mode = LAUNCH_MODES[mixture.mode]
    is_refused = (
        (mixture.method == "4-bit" and not mode.is_whole)
        or (mixture.shards > 1 and mode.shards_parameters)
        or (mixture.parts > 1 and "output chunks" in mode.refuses)
        or (mode.engine == "deepspeed" and mixture.precision == "float32" and mode.offloads)
    )
    is_mixed = mixture.every_n_layers > 1 or mixture.parts > 1
    return mixture if is_mixed and not is_refused else None


def case_of(mixture: Mixture) -> tuple[Recipe, Plan, Question]:
    """The recipe, plan and question of a mixture."""
    sections: dict[str, Any] = {"model": {"shape": "llama-tiny"}, "training": {}}
    for more in (METHODS[mixture.method], PRECISIONS[mixture.precision]):
        for section, values in more.items():
            sections[section] = {**sections.get(section, {}), **values}
    recipe = Recipe.model_validate(
        {
            "name": "composed",
            "task": "sft",
            "data": {"train_file": "/data/train.parquet", "max_length": LENGTH},
            "output_dir": "/out",
            **sections,
        }
    )
    size, targets = _model(mixture.family, mixture.layers)
    is_whole = LAUNCH_MODES[mixture.mode].is_whole
    on_cpu, several = mixture.mode == "cpu", mixture.mode not in ("cpu", "single_gpu")
    strategy = Strategy(
        mode=mixture.mode,
        device="cpu" if on_cpu else "cuda",
        num_processes=2 if several else 1,
        num_machines=1,
        backend="nccl" if several else None,
        per_device_train_batch_size=mixture.rows,
        gradient_accumulation_steps=mixture.accumulation,
        per_device_eval_batch_size=mixture.rows,
        mixed_precision="bf16" if recipe.training.bf16 else "no",
        tf32=False,
        levers=Levers(
            attn_implementation="sdpa" if size.family.forward.has_sdpa else "eager",
            every_n_layers=mixture.every_n_layers,
            num_output_chunks=mixture.parts,
            logits_at_targets=mixture.at_targets,
            tiled_mlp_num_shards=mixture.shards,
            fused_norms=is_whole and not on_cpu,
            fused_adapters=is_whole and bool(recipe.lora) and recipe.training.bf16,
        ),
        pin_memory=False,
        dataloader_num_workers=0,
    )
    plan = Plan(
        recipe_name="composed",
        strategy=strategy,
        shape=size,
        data_format=DataFormat("text", {}, "text", ""),
        estimate=MemoryEstimate(0, 0, 0),
        budget_bytes=0,
        lora_targets=targets if recipe.lora else (),
    )
    architecture = "" if on_cpu else "8.6"
    lengths = LENGTH, LENGTH
    question = Question(strategy, lengths, mixture.is_padded, architecture, not on_cpu)
    return recipe, plan, question


@cache
def _model(family: str, layers: int) -> tuple[ModelSize, tuple[str, ...]]:
    from training.trace.model_parts import model_parts

    config = dict(FAMILIES[family])
    depths = [key for key in config if key.endswith("_layers")]
    config |= dict.fromkeys(depths, layers)
    if "layer_types" in config:
        turn = config["layer_types"][:2]
        config["layer_types"] = turn * (layers // 2)
    parts = model_parts(config)
    return ModelSize("deep", config, 0, 0, family=parts.family), parts.family.linear


def logs_of(mixture: Mixture) -> tuple[Log, Log, Price]:
    """The composed log and the recorded one, of one process, and the price of the step. Raises
    NotComposed."""
    from training.trace import step
    from training.trace.cuda_semantics import Target

    recipe, plan, question = case_of(mixture)
    target = Target(question.architecture) if question.architecture else None
    composed_of = sources.choose_sources(
        question, plan.shape.is_encoder_decoder, lambda base: False
    )
    if composed_of.why_whole:
        raise NotComposed(composed_of.why_whole)

    @cache
    def recorded(base: Question) -> Any:
        of_base = replace(plan, strategy=base.strategy)
        batch = 1 if base.is_single else BATCH
        lengths, kinds = base.lengths, (base.parts_apart, base.all_layers)
        return step.record(recipe, of_base, lengths, base.is_padded, batch, target, *kinds)

    composed = composed_of.composed(recorded)
    batch = 1 if question.is_single else BATCH
    expected = step.step(recipe, plan, question.lengths, question.is_padded, batch, target)
    price = Price(composed_of.composer(lambda base: Recorded(recorded(base))))
    return composed, expected, price


def priced(composed: Log, price: Price) -> dict[str, Any]:
    """The bytes of a price over those of the composed step, the least and the most of its forward
    and backward passes at three sizes of a micro-batch; and whether its work is the same."""
    moments, expected, ratios = price.moments(), reduced.peaks(composed), []
    for rows, targets in ((1, 1), COUNTS, (64, 8)):
        for section in PASSES:
            ours = max(_at(top, rows, targets) for of, top in moments if of == section)
            parts = (each["parts"].values() for each in expected if each["section"] == section)
            theirs = max(sum(_at(sizes, rows, targets) for sizes in each) for each in parts)
            ratios.append(ours / theirs)
    work, own = work_of(reduced.passes_of_log(composed)), work_of(price.passes())
    is_same_work = own.keys() == work.keys() and all(
        math.isclose(ours, theirs, rel_tol=1e-6)
        for name, numbers in work.items()
        for ours, theirs in zip(own[name], numbers, strict=True)
    )
    looked_at = price.num_looked_at / len(composed.events)
    return {"least": min(ratios), "most": max(ratios), "work": is_same_work, "looked_at": looked_at}


def _at(sizes: Sequence[int], rows: int, targets: int) -> int:
    return sizes[0] + rows * sizes[1] + targets * sizes[2]


def work_of(of_step: Passes) -> dict[str, list[float]]:
    """Of all micro-steps: FLOPs of products and of attention, by dtype, and bytes of other kernels,
    as (fixed, per sample, per target); and the number of calls of each kind."""
    work: dict[str, list[float]] = {}
    for micro_step in of_step.micro_steps:
        for run, times in micro_step:
            for number in of_step.runs[run]:
                operator = of_step.operators[number]
                is_other = operator.kind == "other"
                name = "bytes" if is_other else f"{operator.kind} {operator.dtype}".strip()
                sizes = operator.bytes if is_other else operator.flops
                own = work.setdefault(name, [0.0, 0.0, 0.0])
                own[:] = [total + times * size for total, size in zip(own, sizes[:3], strict=True)]
                work.setdefault(f"calls of {operator.kind}", [0.0])[0] += times
    return work


def difference(composed: Log, expected: Log) -> str:
    """The first event in which two logs differ; "" if none does. The order in which blocks are
    freed at a time is left out: it may be that of a table of addresses."""
    ours, theirs = _canonical(composed), _canonical(expected)
    pairs = zip(ours, theirs, strict=False)
    for index, (own, other) in enumerate(pairs):
        if own != other:
            return f"event {index} of {len(ours)} and {len(theirs)}: {own}, recorded {other}"
    return "" if len(ours) == len(theirs) else f"{len(ours)} events, recorded {len(theirs)}"


def _canonical(log: Log) -> list[tuple[Any, ...]]:
    number: dict[int, int] = {}
    events: list[tuple[Any, ...]] = []
    freed: list[tuple[Any, ...]] = []
    for event in log.events:
        block = log.blocks[event.block]
        if freed and (event.birth or freed[0][1] != event.phase):
            events += sorted(freed)
            freed = []
        if event.birth:
            number[event.block] = len(number)
            what = *block.sizes, block.sum, block.kind, block.op, block.born, block.stream
            events.append((event.birth, event.phase, event.layer, *what))
        else:
            freed.append((event.birth, event.phase, number[event.block]))
    return events + sorted(freed)


def bytes_of(log: Log) -> tuple[int, int]:
    """Bytes that an allocator allocates and reserves at most, at COUNTS."""
    samples, targets = COUNTS
    events = []
    for event in log.events:
        fixed, sample, target = log.blocks[event.block].sizes
        size = fixed + samples * sample + targets * target
        number = event.block + log.blocks[event.block].stream * allocator.STREAM
        events.append((number, size if event.birth else allocator.FREED))
    replay = allocator.replay(events)
    return replay.peak_allocated_bytes, replay.peak_reserved_bytes


def row_of(mixture: Mixture) -> dict[str, Any]:
    """A row of the result: what differs, or why there is nothing to compare."""
    row: dict[str, Any] = {"mixture": mixture.words}
    recipe, plan, _ = case_of(mixture)
    try:
        *logs, price = logs_of(mixture)
        row["price"] = priced(logs[0], price)
    except NotComposed as reason:
        return row | {"not_composed": str(reason)}
    tied = plan.shape.family.ties_head
    turns = ("steady", *sharded.special_turns(plan.strategy))
    for turn in turns:
        composed, expected = (
            sharded.shard_step(log, recipe, plan.strategy, tied, BUCKET_ELEMENTS, turn)
            for log in logs
        )
        if differs := difference(composed, expected):
            row["difference"] = f"{turn}: {differs}"
        ours, theirs = bytes_of(composed), bytes_of(expected)
        apart = (abs(own - other) for own, other in zip(ours, theirs, strict=True))
        row["bytes"] = max(row.get("bytes", 0), *apart)
    return row


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--first", type=int, default=NUM_MIXTURES)
    args = parser.parse_args()
    from training import worker

    worker.prepare()
    worker.import_trace()
    rows = []
    for mixture in mixtures(args.first):
        row = row_of(mixture)
        rows.append(row)
        if not is_same(row):
            print(row, flush=True)
    print(text := table(rows))
    if args.first == NUM_MIXTURES:
        others = [row for row in rows if not is_same(row)]
        recording.write(RESULT, {"composed": len(rows) - len(others), "rows": others}, text)
    return 0 if all(is_same(row) for row in rows if "bytes" in row) else 1


def is_same(row: Mapping[str, Any]) -> bool:
    price = row.get("price", {"work": False})
    is_priced = (
        price["work"] and 1 - PRICE_ERROR <= price["least"] <= price["most"] <= 1 + PRICE_ERROR
    )
    return row.get("bytes") == 0 and "difference" not in row and is_priced


def is_exact(price: Mapping[str, Any]) -> bool:
    return price["least"] > 1 - 1e-4 and price["most"] < 1 + 1e-4


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """The numbers of mixtures that were composed, and why others were not."""
    composed = [row for row in rows if "bytes" in row]
    prices = [row["price"] for row in composed]
    reasons = Counter(row["not_composed"] for row in rows if "not_composed" in row)
    lines = [
        ["mixtures", str(len(rows))],
        ["composed", str(len(composed))],
        ["the same events, and so 0 bytes apart", str(sum(row["bytes"] == 0 for row in composed))],
        ["priced with the same work", str(sum(row["price"]["work"] for row in composed))],
        [
            "bytes of the price over those of the step, least",
            f"{min(each['least'] for each in prices):.5f}",
        ],
        ["the same, most", f"{max(each['most'] for each in prices):.5f}"],
        ["within 1 in 10,000", str(sum(is_exact(each) for each in prices))],
        *(
            [f"recorded with all its levers: {why}", str(times)]
            for why, times in reasons.most_common()
        ),
    ]
    return recording.table(["steps", "number"], lines)


if __name__ == "__main__":
    sys.exit(main())
