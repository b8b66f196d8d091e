"""One plain step, made by hand, as a rank of each engine sees it."""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import replace

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from launch.predict.step.sharded import Turn, shard_step, special_turns
from launch.predict.step.zero3_gather import MAX_REUSE, PERSISTENT
from launch.schema.plan import Strategy
from launch.schema.recorded_step import FROZEN, PACKED, SCALES, UNUSED, Block, Event, Layer, Log
from tests.builders import recipe_of
from training.trace.stand_ins import as_computed

MIB = 1 << 20
LAYER, EMBEDDING, NORM = 8 * MIB, 4 * MIB, 1 << 10  # bytes of float32 parameters
LAYERS = 4
BUCKET = 3 * LAYER // 2 // 4  # elements
BUCKET_BYTES = 4 * BUCKET
ENGINES = (
    "multi_cpu",
    "deepspeed_zero1",
    "deepspeed_zero2",
    "deepspeed_zero2_offload",
    "deepspeed_zero3",
    "deepspeed_zero3_offload",
    "fsdp2",
)
GATHERING = ("deepspeed_zero3", "deepspeed_zero3_offload", "fsdp2")  # weights that ranks share


class Step:
    """A plain step of a stack of layers between an embedding and an output layer, which may be
    one."""

    def __init__(
        self,
        accumulation: int = 1,
        tied: bool = False,
        frozen: bool = False,
        layer_bytes: int = LAYER,
        copied: bool = False,
    ) -> None:
        self.log, self.tied = Log(), tied
        outer = {"embedding": EMBEDDING, "norm": NORM} | ({} if tied else {"output": EMBEDDING})
        self.sizes: dict[str | Layer, int] = {"embedding": outer.pop("embedding")}
        self.sizes |= {(0, index): layer_bytes for index in range(LAYERS)} | outer
        trained = [name for name in self.sizes if not (frozen and name == "embedding")]
        if copied:
            self.born("start:weights", EMBEDDING, "original", UNUSED, "weights")
        for name, size in self.sizes.items():
            self.born(
                "start:weights", size, name, "parameter" if name in trained else FROZEN, "weights"
            )
        for name in trained:
            self.born("start:optimizer", 2 * self.sizes[name], name, "state", "optimizer")
        grown: dict[str | Layer, int] = {}
        for micro_step in range(accumulation):
            self.micro_step(micro_step, trained, grown)
        self.dies(self.born("optimizer", 4, "norm"), "optimizer")
        self.dies(self.born("optimizer", layer_bytes, (0, 0), "aten::sqrt"), "optimizer", (0, 0))
        for name, block in grown.items():
            self.dies(block, "zero", name)
        for name in self.sizes:
            self.dies(self.born("evaluation", 0, name, sample=100), "evaluation", name)

    def micro_step(
        self, number: int, trained: list[str | Layer], grown: dict[str | Layer, int]
    ) -> None:
        forward, backward = f"forward:{number}", f"backward:{number}"
        saved = {
            name: self.born(forward, 0, name, sample=100) for name in self.sizes if name != "output"
        }
        logits = self.born(forward, 0, "output", "aten::mm", "logits", 1000)
        wide = self.born(backward, 0, "output", "aten::_log_softmax_backward_data", "logits", 1000)
        self.dies(logits, backward)
        for name in ["output", *reversed(saved)]:
            owner = "embedding" if name == "output" and self.tied else name
            if owner in trained:
                gradient = self.born(backward, self.sizes[owner], name, "aten::mm")
                if owner in grown:
                    self.dies(gradient, backward, name)
                grown.setdefault(owner, gradient)
            self.dies(self.born(backward, 0, name, "aten::mm", sample=10), backward, name)
            self.dies(wide if name == "output" else saved[name], backward, name)

    def born(
        self,
        phase: str,
        size: int,
        name: str | Layer,
        op: str = "aten::mul",
        kind: str = "",
        sample: int = 0,
    ) -> int:
        layer = name if isinstance(name, tuple) else None
        self.log.blocks.append(Block(size, sample, kind, op, phase, layer))
        self.log.events.append(Event(len(self.log.blocks) - 1, True, phase, layer))
        return len(self.log.blocks) - 1

    def dies(self, block: int, phase: str, name: str | Layer | None = None) -> None:
        self.log.events.append(
            Event(block, False, phase, name if isinstance(name, tuple) else None)
        )

    @property
    def whole(self) -> int:
        return sum(self.sizes.values())


def strategy(mode: str, ranks: int = 2, **given: object) -> Strategy:
    fields = {
        "device": "cpu",
        "backend": "gloo",
        "mixed_precision": "no",
        "gradient_accumulation_steps": 1,
        **given,
    }
    return Strategy(
        mode=mode,
        num_processes=ranks,
        per_device_train_batch_size=1,
        per_device_eval_batch_size=1,
        dataloader_num_workers=0,
        **fields,
    )


def on_gpus(mode: str, ranks: int = 2) -> Strategy:
    return strategy(mode, ranks, device="cuda", backend="nccl")


def shared(step: Step, of: Strategy, turn: Turn = "steady") -> Log:
    return shard_step(step.log, recipe_of(), of, step.tied, BUCKET, turn)


def live(log: Log, batch: int = 1, *kinds: str) -> list[int]:
    """Bytes behind each event; of these kinds, or of all."""
    found, now = [], 0
    for event in log.events:
        block = log.blocks[event.block]
        if not kinds or block.kind in kinds:
            now += (block.fixed_bytes + batch * block.sample_bytes) * (1 if event.birth else -1)
        found.append(now)
    return found


def most(log: Log, phase: str, *kinds: str) -> int:
    return max(
        now
        for now, event in zip(live(log, 1, *kinds), log.events, strict=True)
        if event.phase == phase
    )


def before(log: Log, phase: str, *kinds: str) -> int:
    """Bytes that are live when a phase begins."""
    at = next(at for at, event in enumerate(log.events) if event.phase == phase)
    return live(log, 1, *kinds)[at - 1]


def kept_behind_an_evaluation(log: Log) -> list[int]:
    """Sizes of the blocks of collectives that are there when an evaluation has ended."""
    ended = {event.block for event in log.events if not event.birth}
    return [
        block.fixed_bytes
        for number, block in enumerate(log.blocks)
        if block.born.startswith("evaluation")
        and block.kind == "communication"
        and number not in ended
    ]


def sizes(log: Log, op: str) -> list[int]:
    return [block.fixed_bytes for block in log.blocks if block.op == op]


@pytest.mark.parametrize(
    ("mode", "ranks", "accumulation", "tied", "frozen", "device"),
    list(itertools.product(ENGINES, (2, 3), (1, 2), (False, True), (False, True), ("cpu", "cuda"))),
)
def test_what_is_born_in_a_step_dies_once_and_the_step_leaves_what_it_found(
    mode, ranks, accumulation, tied, frozen, device
):
    step = Step(accumulation, tied, frozen)
    of = on_gpus(mode, ranks) if device == "cuda" else strategy(mode, ranks)
    for turn in ("steady", *special_turns(of)):
        log = shared(step, of, turn)

        births = Counter(event.block for event in log.events if event.birth)
        deaths = Counter(event.block for event in log.events if not event.birth)
        alive: set[int] = set()
        for event in log.events:
            assert event.birth != (event.block in alive), log.blocks[event.block]
            alive ^= {event.block}
        assert {*births.values(), *deaths.values()} == {1}
        gathered = kept_behind_an_evaluation(log)
        assert bool(gathered) == (device == "cuda" and mode in GATHERING)
        assert live(log)[-1] == sum(gathered) + max(
            now
            for now, event in zip(live(log), log.events, strict=True)
            if event.phase.startswith("start")
        )


def test_an_engine_changes_the_log_it_is_given_in_nothing():
    step = Step()
    given = ([replace(block) for block in step.log.blocks], list(step.log.events))

    shared(step, strategy("fsdp2"))
    shared(step, strategy("deepspeed_zero3"))

    assert (step.log.blocks, step.log.events) == given


def test_one_process_has_the_plain_step():
    step = Step()

    assert live(shared(step, strategy("cpu", 1))) == live(step.log)


def test_ddp_holds_buckets_all_the_time_and_no_gradient_beside_them_once_it_is_complete():
    step = Step()

    log = shared(step, strategy("multi_cpu"))

    assert before(log, "forward:0") == before(step.log, "forward:0") + step.whole
    assert before(log, "optimizer", "gradients") == 0
    assert most(log, "backward:0", "gradients") == LAYER


def test_the_gradient_of_a_tied_embedding_is_complete_where_backward_ends():
    log = shared(Step(tied=True), strategy("multi_cpu"))

    assert most(log, "backward:0", "gradients") == LAYER + EMBEDDING


def test_under_accumulation_ddp_holds_the_gradients_a_second_time_until_the_backward_that_reduces():
    step = Step(accumulation=2)

    log = shared(step, strategy("multi_cpu"))

    assert before(log, "backward:1", "gradients") == step.whole
    assert before(log, "optimizer", "gradients") == 0


@pytest.mark.parametrize("ranks", [2, 4])
def test_fsdp2_shares_out_weights_states_and_reduced_gradients(ranks):
    step = Step()

    log = shared(step, on_gpus("fsdp2", ranks))

    assert before(log, "forward:0") == 3 * step.whole // ranks
    assert before(log, "zero", "gradients") == step.whole // ranks


def test_fsdp2_forward_has_a_whole_layer_and_the_last_gathered_one_at_most():
    log = shared(Step(), on_gpus("fsdp2"))

    assert most(log, "forward:0", "communication") == 2 * LAYER


def test_fsdp2_backward_holds_a_layer_the_gathered_next_one_and_gradients_of_the_last():
    log = shared(Step(), on_gpus("fsdp2"))

    assert most(log, "backward:0", "communication") == 3 * LAYER


def test_fsdp2_has_gathered_the_layer_before_while_one_goes_through_backward():
    log = shared(Step(), on_gpus("fsdp2"))

    at = next(
        at
        for at, event in enumerate(log.events)
        if event.birth
        and event.phase == "backward:0"
        and event.layer == (0, 2)
        and log.blocks[event.block].sample_bytes
    )

    assert (
        live(log, 1, "communication")[at] == 3 * LAYER
    )  # the layer, the one before it, the gradients of the one behind


def test_gloo_gathers_into_a_tensor_of_its_own():
    def gathered(of: Strategy) -> int:
        return most(shared(Step(), of), "forward:0", "communication")

    assert gathered(strategy("fsdp2")) == gathered(on_gpus("fsdp2")) + LAYER


def test_fsdp2_keeps_whole_gradients_until_the_backward_that_reduces():
    step = Step(accumulation=2)

    log = shared(step, on_gpus("fsdp2"))

    assert before(log, "forward:1", "gradients") == step.whole
    assert before(log, "zero", "gradients") == step.whole // 2


def test_a_tied_embedding_is_whole_until_backward_ends_an_untied_output_until_layers_begin():
    def whole_outside_layers(tied: bool) -> int:
        log = shared(Step(tied=tied), on_gpus("fsdp2"))
        last = max(
            at
            for at, event in enumerate(log.events)
            if event.phase == "backward:0" and event.layer == (0, 2)
        )
        alive = {event.block for event in log.events[:last] if event.birth}
        alive -= {event.block for event in log.events[:last] if not event.birth}
        return (
            sum(
                log.blocks[one].fixed_bytes
                for one in alive
                if log.blocks[one].op == "whole weights"
            )
            % LAYER
        )

    assert whole_outside_layers(tied=True) == EMBEDDING + NORM
    assert whole_outside_layers(tied=False) == 0


@pytest.mark.parametrize("stage", [1, 2])
def test_zero_keeps_all_weights_and_trains_a_slice_of_a_float32_copy(stage):
    step = Step()

    log = shared(step, strategy(f"deepspeed_zero{stage}"))

    assert before(log, "forward:0", "weights") == step.whole
    assert before(log, "forward:0") == step.whole + 3 * step.whole // 2


def test_zero2_has_its_bucket_and_a_copy_of_what_is_in_it_only_during_backward():
    log = shared(Step(), strategy("deepspeed_zero2"))

    assert before(log, "backward:0", "communication") == 0
    assert BUCKET_BYTES < most(log, "backward:0", "communication") <= 2 * BUCKET_BYTES
    assert before(log, "evaluation", "communication") == 0


def test_a_bucket_is_made_when_the_node_of_the_first_gradient_is_through():
    log = shared(Step(), strategy("deepspeed_zero2"))

    at = next(
        at for at, event in enumerate(log.events) if log.blocks[event.block].op == "reduce bucket"
    )

    assert live(log, 1, "logits")[at] == 0


def test_zero3_copies_the_gradients_it_reduces_unless_it_is_one_that_divides():
    log = shared(Step(), on_gpus("deepspeed_zero3"))

    assert sizes(log, "gradients to reduce") == [
        EMBEDDING + NORM,
        *[0] * (LAYERS - 1),
        LAYER + EMBEDDING,
    ]


def test_the_norm_of_a_gradient_is_taken_of_a_float64_copy_of_the_part_that_a_rank_has():
    assert sizes(shared(Step(), on_gpus("deepspeed_zero2")), "gradient norm") == [2 * LAYER]
    assert sizes(shared(Step(), on_gpus("deepspeed_zero3")), "gradient norm") == [LAYER]


def test_an_update_that_copies_one_weight_at_a_time_copies_the_whole_slice_under_zero():
    step = Step()

    assert sizes(shared(step, strategy("deepspeed_zero2")), "update") == [step.whole // 2]


def test_on_gpus_zero2_fills_a_second_bucket_while_the_first_is_reduced():
    extra = most(shared(Step(), on_gpus("deepspeed_zero2")), "backward:0") - most(
        shared(Step(), strategy("deepspeed_zero2")), "backward:0"
    )

    assert extra == BUCKET_BYTES


def test_zero1_accumulates_whole_gradients_and_zero2_those_of_its_slice():
    def between(stage: int) -> int:
        return before(shared(Step(2), strategy(f"deepspeed_zero{stage}")), "forward:1", "gradients")

    assert between(1) == Step().whole
    assert Step().whole // 2 <= between(2) < Step().whole // 2 + LAYER


def test_zero1_keeps_its_bucket_from_the_first_backward_of_a_step_to_the_end_of_the_last():
    log = shared(Step(2), strategy("deepspeed_zero1"))

    assert before(log, "forward:1", "communication") == BUCKET_BYTES


def test_a_gradient_that_is_larger_than_the_bucket_stays_until_it_is_reduced():
    step = Step()

    log = shard_step(step.log, recipe_of(), strategy("deepspeed_zero2"), step.tied, LAYER // 4 - 1)

    assert most(log, "backward:0", "gradients") >= LAYER + step.whole // 2


def test_zero3_keeps_parts_of_all_states_beside_its_bucket():
    step = Step()

    log = shared(step, on_gpus("deepspeed_zero3"))

    small = NORM  # stays whole as well
    assert before(log, "forward:0") == 5 * step.whole // 2 + small + BUCKET_BYTES


def test_zero3_keeps_weights_that_are_used_again_soon_whole_through_forward_and_backward():
    log = shared(Step(), on_gpus("deepspeed_zero3"))

    assert (
        before(log, "backward:0", "communication") == BUCKET_BYTES + LAYERS * LAYER + 2 * EMBEDDING
    )
    assert before(log, "evaluation", "communication") == BUCKET_BYTES


def test_zero3_gathers_nothing_ahead_in_its_first_forward_and_keeps_nothing_of_it():
    log = shared(Step(2), on_gpus("deepspeed_zero3"), "first")

    assert most(log, "forward:0", "communication") == BUCKET_BYTES + LAYER
    loss = next(
        index
        for index, event in enumerate(log.events)
        if event.birth and event.phase == "backward:0" and log.blocks[event.block].kind == "logits"
    )
    assert live(log, 1, "communication")[loss] == BUCKET_BYTES
    steady = shared(Step(2), on_gpus("deepspeed_zero3"))
    for phase in ("forward:1", "backward:1"):
        of_phase = most(log, phase, "communication")
        assert of_phase == most(steady, phase, "communication") > BUCKET_BYTES + LAYER


@pytest.mark.parametrize("tied", [False, True])
def test_behind_an_evaluation_fsdp2_begins_with_the_whole_output(tied):
    """It gathers an untied output again in the first backward, where nobody uses it."""
    outer = EMBEDDING + NORM
    steady = shared(Step(2, tied), on_gpus("fsdp2"), "steady")
    log = shared(Step(2, tied), on_gpus("fsdp2"), "after evaluation")
    before, after = (
        Counter(
            event.phase
            for event in each.events
            if event.birth
            and each.blocks[event.block].op == "all-gather"
            and each.blocks[event.block].fixed_bytes == outer
        )
        for each in (steady, log)
    )
    first = next(event for event in log.events if event.phase == "forward:0")

    assert kept_behind_an_evaluation(log) == [outer]
    assert log.blocks[first.block].op == "whole weights"
    assert log.blocks[first.block].fixed_bytes == outer
    assert before - after == Counter(["forward:0"])
    assert after - before == Counter([] if tied else ["backward:0"])


def test_fsdp2_frees_the_gradient_of_a_groups_last_parameter_behind_its_reduction():
    log = shared(Step(), on_gpus("fsdp2"))
    of_last = next(
        index
        for index, event in enumerate(log.events)
        if event.birth and log.blocks[event.block].op == "reduce-scatter"
    )  # of the output layer and the norm

    reduced = EMBEDDING + NORM
    assert live(log, 1, "gradients")[of_last] == reduced // 2 + EMBEDDING


def test_zero_keeps_the_gradients_of_its_slice_until_the_update_has_ended():
    log = shared(Step(), on_gpus("deepspeed_zero2"))

    ended = {
        log.blocks[event.block].op: at for at, event in enumerate(log.events) if not event.birth
    }
    assert ended["gradients of the slice"] > ended["update"]


@pytest.mark.parametrize("mode", ["deepspeed_zero3", "deepspeed_zero3_offload", "fsdp2"])
def test_what_outlives_a_step_has_the_same_number_in_each_of_its_turns(mode):
    step, of = Step(2), on_gpus(mode)
    (special,) = special_turns(of)

    def lasting(turn: Turn) -> list[tuple[int, int]]:
        log = shared(step, of, turn)
        return [
            (number, block.fixed_bytes)
            for number, block in enumerate(log.blocks)
            if block.born.startswith("start")
        ]

    assert lasting(special) == lasting("steady")
    assert special_turns(strategy(mode)) == ()


def test_an_evaluation_gathers_as_a_forward_does_and_leaves_nothing():
    fsdp2, zero3 = shared(Step(), on_gpus("fsdp2")), shared(Step(), on_gpus("deepspeed_zero3"))

    assert most(fsdp2, "evaluation", "communication") == 2 * LAYER
    assert most(zero3, "evaluation", "communication") == most(zero3, "forward:0", "communication")


def test_zero3_drops_weights_behind_their_use_when_the_next_is_far():
    large = 4 * (MAX_REUSE // 2 + 1)  # two passes over one such layer are too far

    log = shared(Step(layer_bytes=large), on_gpus("deepspeed_zero3"))

    # the last layer, the output
    assert before(log, "backward:0", "communication") == BUCKET_BYTES + large + EMBEDDING


def test_offloaded_states_leave_the_device():
    log = shared(Step(), on_gpus("deepspeed_zero3_offload"))

    assert before(log, "forward:0") == BUCKET_BYTES + NORM


def test_under_bf16_deepspeed_trains_float32_slices_of_weights_of_two_bytes():
    step = Step()

    # the step's bytes are then of bf16
    log = shared(step, strategy("deepspeed_zero2", mixed_precision="bf16"))

    assert before(log, "forward:0") == step.whole + 3 * (2 * step.whole) // 2


def test_under_bf16_fsdp2_keeps_float32_and_gathers_bf16():
    step = Step()

    log = shared(step, strategy("fsdp2", mixed_precision="bf16", backend="nccl"))

    assert before(log, "forward:0") == 3 * (2 * step.whole) // 2
    assert before(log, "zero", "gradients") == 2 * step.whole // 2


def test_under_bf16_fsdp2_reduces_in_float32():
    bf16, float32 = (
        shared(Step(), strategy("fsdp2", mixed_precision=name, backend="nccl"))
        for name in ("bf16", "no")
    )

    assert sizes(bf16, "reduce-scatter input") == [
        2 * size for size in sizes(float32, "reduce-scatter input")
    ]


def test_under_bf16_fsdp2_adds_micro_steps_up_in_float32():
    step = Step(accumulation=2)

    log = shared(step, strategy("fsdp2", mixed_precision="bf16", backend="nccl"))

    assert before(log, "forward:1", "gradients") == 2 * step.whole
    # a layer's own gradients until it is left
    assert most(log, "backward:1") - before(log, "backward:1") >= LAYER


def test_a_model_is_cast_to_what_its_engine_computes_with():
    def cast(mode: str) -> tuple[torch.dtype, str]:
        network = torch.nn.Linear(2, 2, device="meta")
        traced = as_computed(network, strategy(mode, mixed_precision="bf16"))
        return network.weight.dtype, traced

    assert cast("multi_cpu") == (torch.float32, "bf16")
    assert cast("fsdp2") == (torch.bfloat16, "bf16")
    assert cast("deepspeed_zero2") == (torch.bfloat16, "no")


def test_the_residual_stream_is_float32_under_fsdp2_as_under_ddp():
    config = LlamaConfig(
        vocab_size=8, hidden_size=4, intermediate_size=4, num_hidden_layers=2, num_attention_heads=1
    )
    network = LlamaForCausalLM(config)
    as_computed(network, strategy("fsdp2", mixed_precision="bf16"))
    entered: list[torch.dtype] = []
    for layer in network.model.layers:
        layer.register_forward_pre_hook(lambda module, args: entered.append(args[0].dtype))

    with torch.autocast("cpu", torch.bfloat16):
        network(input_ids=torch.zeros(1, 3, dtype=torch.long))

    assert entered == [torch.float32] * 2


def test_the_original_of_a_copied_embedding_is_shared_out_and_gathered_by_fsdp2_only():
    for mode in ("deepspeed_zero3", "fsdp2"):
        plain, copied = (shared(Step(copied=beside), on_gpus(mode)) for beside in (False, True))
        gathered = "whole weights" if mode == "fsdp2" else "gathered weights"
        added = Counter(sizes(copied, gathered)) - Counter(sizes(plain, gathered))
        with_original = {2 * EMBEDDING} if mode == "fsdp2" else set()
        assert set(added) == with_original
        more = before(copied, "forward:0", "weights") - before(plain, "forward:0", "weights")
        assert more == EMBEDDING // 2


@pytest.mark.parametrize("tied", [False, True])
def test_ddp_keeps_the_gradient_of_a_copied_embedding_as_long_as_that_of_the_embedding(tied):
    plain, copied = (
        live(shared(Step(tied=tied, copied=beside), on_gpus("dual_gpu_nccl")))
        for beside in (False, True)
    )
    assert copied[1:] == [size + EMBEDDING for size in plain]


def test_only_weights_above_the_threshold_are_gathered_by_zero3():
    assert NORM // 4 <= PERSISTENT < EMBEDDING // 4


@pytest.mark.parametrize("mode", ENGINES)
def test_repeated_layers_whose_blocks_have_the_last_numbers_are_shared_out_in_their_order(mode):
    def events(log: Log) -> list[tuple[int, bool, str]]:
        shared = shard_step(log, recipe_of(), strategy(mode), False, BUCKET)
        blocks = shared.blocks
        return [
            (blocks[event.block].fixed_bytes, event.birth, event.phase) for event in shared.events
        ]

    log = Step().log
    order = sorted(range(len(log.blocks)), key=lambda number: log.blocks[number].layer == (0, 1))
    new = {old: number for number, old in enumerate(order)}
    renumbered = [replace(event, block=new[event.block]) for event in log.events]
    blocks = [log.blocks[old] for old in order]
    assert events(replace(log, blocks=blocks, events=renumbered)) == events(Step().log)


def test_fsdp2_divides_4_bit_weights_as_they_are_and_leaves_their_scales():
    step = Step()
    (layer,) = (block for block in step.log.blocks[:6] if block.layer == (0, 1))
    layer.op = PACKED
    scales = step.born("start:weights", MIB, (0, 1), SCALES, "weights")
    step.log.events.insert(0, step.log.events.pop())
    alone = strategy("fsdp2", mixed_precision="bf16")
    log = shared(step, alone)
    assert log.blocks[scales].fixed_bytes == MIB
    packed = log.blocks[step.log.blocks.index(layer)]
    assert packed.fixed_bytes == LAYER // 2  # others are float32, of which half is computed with
    assert packed.fixed_bytes * 2 == log.blocks[step.log.blocks.index(layer) + 1].fixed_bytes
    gathered = [block for block in log.blocks if block.op == "all-gather" and block.layer == (0, 1)]
    assert {block.fixed_bytes for block in gathered} == {LAYER}
    casts = {block.layer for block in log.blocks if block.op == "all-gather input"}
    assert (0, 0) in casts and (0, 1) not in casts
