"""What a plan reserves of a card, from a recorded trace: gpt2-small, 512 tokens, bf16, AdamW, an
RTX 3080."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from launch.plan import planner
from launch.predict import estimate, sharding
from launch.predict.estimate import Judged
from launch.predict.history import calibration
from launch.predict.memory import loading
from launch.predict.memory.allocator import EMPTY_CACHE, STREAM, replay_parts
from launch.predict.memory.partial_sums import partial_sums_bytes
from launch.predict.memory.phases import Parts
from launch.predict.step import reduced
from launch.predict.time import rates, timing
from launch.predict.traces import Trace, Traces
from launch.schema.levers import Levers
from launch.schema.machine import GIB
from launch.schema.plan import PAGED, MemoryEstimate, Plan, Strategy
from launch.schema.recipe import Recipe
from launch.schema.recorded_step import Operator, Passes, Question
from launch.schema.result import SecondStep
from launch.schema.run_sections import LaunchSection
from tests.builders import changed, facts_of, gpu, machine, plan, recipe_of

RECORDED = Path(__file__).parents[2] / "data" / "traces" / "gpt2-small-512.json"
# Reserved by torch 2.13.0+cu130, whose kernels did nothing: in the second step of 8 rows, in an
# evaluation of 24 with an emptied cache (without that 14_145_290_240), in a step after one.
STEP_BYTES, EVALUATION_BYTES, STEP_AGAIN_BYTES = 7_969_177_600, 9_030_336_512, 8_185_184_256
NO_PASSES = Passes([], [], [])
FREE_BYTES, TIGHT_BYTES = int(19.5 * GIB), int(8.4 * GIB)
CARD = machine(cards=(gpu(free_bytes=FREE_BYTES),))


def recorded_trace(file: Path, content: Mapping[str, Any]) -> Trace:
    """The trace of files as tests/data has them: peaks and passes, and the log beside them."""

    def log() -> dict[str, Any]:
        return json.loads(file.with_suffix(".log").read_text(encoding="utf-8"))

    return Trace(tuple(content["peaks"]), reduced.read_passes(content["passes"]), file, log=log)


class Recorded(Traces):
    """One trace, whatever is asked for."""

    failure = None

    def __init__(self, file: Path = RECORDED) -> None:
        content = json.loads(file.read_text(encoding="utf-8"))
        self._trace = recorded_trace(file, content)

    def fetch(self, questions: Sequence[Question]) -> None:
        pass

    def get(self, question: Question) -> Trace:
        return self._trace


def asked(**data: str) -> Recipe:
    model, batch = (
        {"shape": "gpt2-small"},
        {
            "per_device_train_batch_size": 8,
            "gradient_accumulation_steps": 1,
        },
    )
    return recipe_of(
        model=model, data={"max_length": 512, **data}, training={**batch, "bf16": True}
    )


def judged(
    recipe: Recipe, eval_samples: int = 24, free_bytes: int = FREE_BYTES
) -> tuple[Strategy, MemoryEstimate]:
    candidate, result = exactly_judged(recipe, eval_samples, free_bytes=free_bytes)
    return candidate, result.memory


def exactly_judged(
    recipe: Recipe,
    eval_samples: int = 24,
    file: Path = RECORDED,
    held_out: int | None = None,
    free_bytes: int = FREE_BYTES,
) -> tuple[Strategy, Judged]:
    facts = facts_of(recipe, CARD)
    candidate = replace(plan(recipe, CARD).strategy, per_device_eval_batch_size=eval_samples)
    facts = changed(facts, held_out=held_out)
    facts = changed(facts, machine=machine(cards=(gpu(free_bytes=free_bytes),)))
    traced = changed(facts, traces=Recorded(file))
    return candidate, estimate.judge(traced, candidate)


def planned(recipe: Recipe, memory: MemoryEstimate, budget_bytes: int) -> Plan:
    return replace(plan(recipe, CARD), estimate=memory, budget_bytes=budget_bytes)


def test_what_16_bit_weights_compute_is_counted_in_16_bits_before_a_trace():
    """They need no autocast for it; a bound that counted 32 bits would refuse what fits."""

    def least(dtype: str, precision: str) -> int:
        recipe = recipe_of(model={"shape": "gpt2-small", "dtype": dtype}, data={"max_length": 512})
        small = machine(cards=(gpu(free_bytes=GIB // 4),))
        facts = facts_of(recipe, small)
        plain = plan(asked(), CARD).strategy
        candidate = replace(plain, mixed_precision=precision, levers=Levers())
        refused = estimate.at_least(facts, candidate)
        assert refused.misses is not None and refused.memory.peak is not None
        return refused.memory.peak.parts["activations"]

    assert least("bfloat16", "no") == least("float32", "bf16") < least("float32", "no")


def _reserved_at_the_end(parts: Parts) -> int:
    return replay_parts([*(events for _, events in parts), []])[-1].peak_reserved_bytes


def test_without_held_out_rows_no_evaluation_is_counted():
    _, memory = judged(asked())
    assert memory.step_reserved_bytes == pytest.approx(STEP_BYTES, rel=0.002)
    assert memory.reserved_bytes == pytest.approx(STEP_AGAIN_BYTES, rel=0.002)  # after a save
    assert memory.host_phase != "evaluation"


class Evaluated(Recorded):
    """A trace whose evaluation is one product of a second for a row of 512 tokens."""

    def __init__(self, flops_per_s: float) -> None:
        super().__init__()
        product = Operator("aten::mm", "product", "bfloat16", (0, flops_per_s, 0, 0), launches=1)
        of_step = Passes([product], [[0]], [[(0, 3)]], (), [(0, 1)])
        self._trace = replace(self._trace, passes=of_step)


def test_an_evaluation_takes_its_own_pass_for_each_of_its_batches():
    pace = timing.speed_of(plan(asked(), CARD).strategy, rates.card(CARD.gpus[0]), None).pace
    facts = changed(facts_of(asked(), CARD), traces=Evaluated(pace.flops_per_s["bfloat16"]))
    alike = {"rows": 100, "target_tokens": 25_600, "lengths": [[256, 256]] * 100}
    alike["most_targets"] = [256] * 100
    candidate = replace(plan(asked(), CARD).strategy, per_device_eval_batch_size=24)

    def seconds(strategy: Strategy = candidate, **rows: Any) -> float | None:
        return estimate.evaluation_s(changed(facts, **rows), strategy)

    assert seconds(held_out=100) is None  # not counted yet
    assert seconds(held_out=None, eval_counts=alike) is None
    # half of the longest: 5 batches of 24 rows
    assert seconds(held_out=100, eval_counts=alike) == pytest.approx(5 * 24 / 2, rel=1e-3)
    two = replace(candidate, num_processes=2, mode="dual_gpu_nccl", backend="nccl")
    assert seconds(two, held_out=100, eval_counts=alike) == pytest.approx(3 * 24 / 2, rel=1e-3)
    compiled = candidate.with_levers(torch_compile=True)
    assert seconds(compiled, held_out=100, eval_counts=alike) == pytest.approx(60, rel=1e-3)


def test_an_evaluation_begins_with_an_empty_cache():
    _, memory = judged(asked(validation_file="/data/valid.parquet"))
    assert memory.step_reserved_bytes == judged(asked())[1].step_reserved_bytes
    assert memory.reserved_bytes == pytest.approx(EVALUATION_BYTES, rel=0.01)


def test_an_evaluation_has_no_more_samples_than_rows_are_held_out():
    recipe = asked(validation_file="/data/valid.parquet")
    few = exactly_judged(recipe, 24, held_out=6)[1].phases.device.evaluation
    assert few == exactly_judged(recipe, 6)[1].phases.device.evaluation
    many = exactly_judged(recipe, 24, held_out=48)[1].phases.device.evaluation
    assert many == exactly_judged(recipe, 24)[1].phases.device.evaluation
    assert few is not None
    assert many is not None
    assert few.allocated_bytes < many.allocated_bytes


def test_states_of_the_first_update_keep_segments_of_the_first_step():
    content = json.loads(RECORDED.read_text(encoding="utf-8"))
    trace = recorded_trace(RECORDED, content)
    parts = trace.run(8, 24)
    names = [phase for phase, _ in parts]
    assert names == ["load", "first_step", "step", "evaluation", "save", "step"]
    emptied = [phase for phase, events in parts if events[-1:] == [EMPTY_CACHE]]
    assert emptied == ["load", "step", "evaluation"]
    assert _reserved_at_the_end(parts[:3]) == 2_898_264_064  # 2_854_223_872 were measured


def test_paged_states_are_on_the_card_but_not_of_its_allocator(tmp_path):
    content = json.loads(RECORDED.read_text(encoding="utf-8"))
    for moment in content["peaks"]:
        moment["parts"][PAGED] = moment["parts"].pop("optimizer")
    log = json.loads(RECORDED.with_suffix(".log").read_text(encoding="utf-8"))
    log["blocks"] = [
        [fixed, sample, "paged" if born == "state" else born]
        for fixed, sample, born in log["blocks"]
    ]
    file = tmp_path / "paged.json"
    file.write_text(json.dumps(content))
    file.with_suffix(".log").write_text(json.dumps(log))
    plain = exactly_judged(asked())[1].phases.device.step
    paged = exactly_judged(asked(), file=file)[1].phases.device.step
    assert plain is not None
    assert paged is not None
    states = content["peaks"][0]["parts"][PAGED][0]
    assert plain.allocated_bytes - paged.allocated_bytes == pytest.approx(states, rel=0.01)
    assert plain.reserved_bytes - paged.reserved_bytes == pytest.approx(states, rel=0.1)
    outside = plain.device_bytes - plain.reserved_bytes
    assert paged.device_bytes - paged.reserved_bytes == pytest.approx(outside + states, rel=0.01)


def test_a_block_that_takes_the_place_of_another_ends_in_the_next_step(tmp_path):
    mib = 1 << 20
    blocks = [
        [8 * mib, 0, "start"],  # ends in the step; the last block takes its place
        [4 * mib, 0, "step"],  # of the engine's stream
        [8 * mib, 0, "step"],
    ]
    log = {"blocks": blocks, "events": [0, 1, ~0, 2, ~1], "update": 5, "streams": {"1": 1}}
    parts = Trace((), NO_PASSES, tmp_path, log=lambda: log).run(1, None)
    live: dict[int, int] = {}
    for phase, events in parts:
        for block, size_bytes in events:
            if size_bytes > 0:
                live[block] = size_bytes
            elif block >= 0:
                del live[block]  # each block ends that lives, and once
        assert list(live.values()) == [8 * mib], phase
    streams = {block // STREAM: size for _, events in parts for block, size in events if size > 0}
    assert streams == {0: 8 * mib, 1: 4 * mib}


def test_a_run_has_the_special_turns_of_its_step_where_they_are(tmp_path):
    mib = 1 << 20
    weights, small = (
        [8 * mib, 0, "start"],
        [2 * mib, 0, "start"],
    )  # the update renews the small ones
    ends = {"update": 9, "streams": {}}

    def turn(size: int) -> dict[str, Any]:
        blocks = [weights, small, [2 * mib, 0, "step"], *[[size * mib, 0, "step"]] * size]
        used = [number for block in range(3, 3 + size) for number in (block, ~block)]
        return {"blocks": blocks, "events": [0, 1, *used, ~1, 2], **ends}

    log = turn(3)
    log["blocks"].append([5 * mib, 0, "evaluation"])
    log["events"] += [6, ~6]
    log["turns"] = {"first": turn(7), "after evaluation": turn(4)}

    def peaks(eval_samples: int | None) -> list[tuple[str, int]]:
        parts = Trace((), NO_PASSES, tmp_path, log=lambda: log).run(1, eval_samples)
        replays = replay_parts([events for _, events in parts])
        return [
            (phase, replay.peak_allocated_bytes // mib)
            for (phase, _), replay in zip(parts, replays, strict=True)
        ]

    steps = [("load", 10), ("first_step", 17), ("step", 13)]
    assert peaks(1) == [*steps, ("evaluation", 15), ("save", 10), ("step", 14)]
    assert peaks(None) == [*steps, ("save", 10), ("step", 13)]


def test_weights_that_are_copied_into_a_flat_tensor_leave_free_addresses_below_it(tmp_path):
    mib = 1 << 20
    log = {"blocks": [[40 * mib, 0, "trained"]], "events": [0], "update": 1, "streams": {}}
    load = partial(loading.zero, flattened=(26 * mib, 14 * mib), element_bytes=2)
    parts = Trace((), NO_PASSES, tmp_path, log=lambda: log).run(1, None, load)
    sizes = [size_bytes // mib for _, size_bytes in parts[0][1] if size_bytes > 0]
    assert sizes == [26, 14, 40]  # in the order of their addresses
    peaks = [replay.peak_allocated_bytes // mib for replay in replay_parts(e for _, e in parts)]
    assert peaks == [80, 40, 40, 40, 40]


def test_the_buffer_of_a_sum_is_a_function_of_its_rows(tmp_path):
    rows_a_sample, kernel = 512, [768, 108, 1536]
    blocks = [[8, 0, "start"], [0, rows_a_sample, "step", kernel, 0]]
    log = {"blocks": blocks, "events": [0, 1, ~1], "update": 3, "streams": {}}
    trace = Trace((), NO_PASSES, tmp_path, log=lambda: log)
    sizes = {
        samples: max(size for _, part in trace.run(samples, None) for _, size in part)
        for samples in (1, 8)
    }
    assert sizes == {1: 8, 8: partial_sums_bytes(8 * rows_a_sample, *kernel)}


def test_partial_sums_are_those_that_pytorch_had():
    # torch 2.13 with a card of 108 multiprocessors, of 1,536 threads each, on the CUDA build
    shapes = {
        (200, 768): 0,
        (4096, 768): 25_165_824,
        (2000, 3072): 50_331_648,
        (30000, 770): 9_856_000,
    }
    assert {shape: partial_sums_bytes(*shape, 108, 1536) for shape in shapes} == shapes
    # torch 2.11 on an H200: Adafactor's mean over the rows of an embedding
    assert partial_sums_bytes(32768, 896, 132, 2048) == 138_543_104


@pytest.mark.parametrize(("multiprocessors", "size"), [(2, 8 << 20), (1, 0)])
def test_partial_sums_are_made_until_all_columns_fill_the_card(multiprocessors, size):
    """4,096 columns are 32 blocks of threads, of which a multiprocessor takes 16."""
    assert partial_sums_bytes(4096, 4096, multiprocessors, 2048) == size


class Fetched(Recorded):
    """The same, which nobody can have before it is fetched."""

    recorded = ()
    is_fetched = False
    num_asked = 0

    def is_recorded(self, question: Question) -> bool:
        self.num_asked += 1
        assert self.num_asked < 1000, "the search asks for ever, and fetches nothing"
        return True

    def price(self, question: Question) -> Trace | None:
        return None

    def fetch(self, questions: Sequence[Question]) -> None:
        self.is_fetched |= bool(questions)

    def get(self, question: Question) -> Trace | None:
        return self._trace if self.is_fetched else None


def test_the_limit_of_vram_is_without_what_a_rank_takes_outside_its_allocator():
    recipe = asked().model_copy(update={"launch": LaunchSection(vram_limit_gib=16)})
    chosen = planner.choose(changed(facts_of(recipe, CARD), traces=Fetched())).plan
    assert chosen.estimate.outside_bytes > 0
    assert chosen.allocator_limit_bytes == 16 * GIB - chosen.estimate.outside_bytes


def test_a_larger_evaluation_is_counted_and_changes_nothing_of_the_step():
    _, small = judged(asked(validation_file="/data/valid.parquet"), 8)
    _, large = judged(asked(validation_file="/data/valid.parquet"), 40)
    assert small.reserved_bytes < large.reserved_bytes
    assert large.peak is not None
    assert large.peak.section == "evaluation"
    assert (large.step_reserved_bytes, large.step_allocated_bytes) == (
        small.step_reserved_bytes,
        small.step_allocated_bytes,
    )


def test_a_second_step_is_compared_with_the_step_that_was_planned_not_with_the_evaluation():
    recipe = asked(validation_file="/data/valid.parquet")
    _, memory = judged(recipe, 40)
    reserved = int(1.1 * memory.step_reserved_bytes)
    assert reserved < memory.reserved_bytes  # which hid it
    measured = SecondStep(memory.step_allocated_bytes, reserved, host_pss_bytes=0)
    found = calibration.compare(planned(recipe, memory, memory.device_bytes), measured, GIB)
    assert found.exceeded == pytest.approx(0.1, abs=0.001)
    assert "step 2: reserved" in found.lines[0]
    assert found.over == ""  # the evaluation needs more than that, and fits
    tight = planned(recipe, memory, memory.outside_bytes + reserved - 1)
    assert "going on would exceed" in calibration.compare(tight, measured, GIB).over


def test_where_cached_blocks_are_given_back_what_is_reserved_says_nothing():
    _, roomy = judged(asked())
    _, tight = judged(asked(), free_bytes=TIGHT_BYTES)
    assert (roomy.gives_cache_back, tight.gives_cache_back) == (False, True)
    assert tight.reserved_bytes < roomy.reserved_bytes
    more_reserved = int(1.1 * tight.step_reserved_bytes)
    measured = SecondStep(tight.step_allocated_bytes, more_reserved, host_pss_bytes=0)
    plan = planned(asked(), tight, tight.device_bytes)
    assert calibration.compare(plan, measured, GIB) == calibration.Comparison(())
    more = replace(measured, allocated_bytes=int(1.1 * tight.step_allocated_bytes))
    assert "step 2: allocated" in calibration.compare(plan, more, GIB).over


def test_each_part_of_a_run_has_its_own_peaks():
    _, evaluates = exactly_judged(asked(validation_file="/data/valid.parquet"))
    memory, phases = evaluates.memory, evaluates.phases.device
    load, first, step, evaluation, save = (
        phases.load,
        phases.first_step,
        phases.step,
        phases.evaluation,
        phases.save,
    )
    assert load
    assert first
    assert step
    assert evaluation
    assert save
    for part in (load, first, step, evaluation, save):
        assert part.allocated_bytes <= part.reserved_bytes
        assert part.device_bytes == part.reserved_bytes + memory.outside_bytes
    # larger blocks of the cache, a rest of which is left in them, after the save
    assert step.allocated_bytes == pytest.approx(memory.step_allocated_bytes, rel=0.001)
    assert step.reserved_bytes == pytest.approx(STEP_AGAIN_BYTES, rel=0.002)
    assert evaluation.reserved_bytes == pytest.approx(EVALUATION_BYTES, rel=0.01)
    assert memory.reserved_bytes == max(step.reserved_bytes, evaluation.reserved_bytes)
    # the optimizer's states, two of each weight, are made at the end of the first step
    assert step.allocated_bytes - first.allocated_bytes == pytest.approx(
        memory.optimizer_bytes, rel=0.01
    )
    # weights and states, and gradients, which are dropped before
    assert save.allocated_bytes == pytest.approx(
        memory.weights_bytes + memory.optimizer_bytes, rel=0.03
    )
    assert load.allocated_bytes == pytest.approx(memory.weights_bytes, rel=0.03)


def test_a_run_without_held_out_rows_has_no_evaluation():
    _, result = exactly_judged(asked())
    assert result.phases.device.evaluation is None
    assert result.phases.host.evaluation is None
    assert result.phases.host.step is not None


def test_gloos_copy_of_a_bucket_counts_in_the_backward_pass_that_makes_it(tmp_path):
    bucket = sharding.BUCKET_ELEMENTS * 4
    content = json.loads(RECORDED.read_text(encoding="utf-8"))
    content["peaks"] = [
        {"section": section, "op": "", "parts": {"weights": [size, 0]}}
        for section, size in (("forward", 2_000_000_000), ("backward", 1_900_000_000))
    ]
    file = tmp_path / "trace.json"
    file.write_text(json.dumps(content))
    recipe = recipe_of(model={"shape": "gpt2-small"})
    facts = facts_of(recipe, CARD)
    traced = changed(facts, traces=Recorded(file))
    ranks = {"device": "cpu", "num_processes": 2, "backend": "gloo", "mixed_precision": "no"}
    several = replace(plan(recipe, CARD).strategy, mode="deepspeed_zero3", **ranks)
    predicted = estimate.judge(traced, several, exact=False).memory.host["model"]
    assert predicted == 2 * (1_900_000_000 + bucket)
    one = replace(several, mode="deepspeed_zero2")
    assert estimate.judge(traced, one, exact=False).memory.host["model"] == 2 * 2_000_000_000
