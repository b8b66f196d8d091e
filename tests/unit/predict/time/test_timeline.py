"""Replays of the host's and the device's queues."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launch.predict.time import operators, rates, timeline
from launch.predict.time.rates import UNKNOWN, HostPace, Rates
from launch.predict.time.timeline import Cost
from launch.probe import described
from launch.schema.recorded_step import Form, Operator, Passes
from tests import cost

COSTS = st.lists(
    st.builds(Cost, st.floats(0, 1e-3), st.floats(0, 1e-3), st.booleans(), st.booleans()),
    min_size=1,
    max_size=6,
)
RUNS = st.lists(st.lists(st.integers(0, 5), min_size=1, max_size=12), min_size=1, max_size=4)
REPEATS = st.lists(st.tuples(st.integers(0, 3), st.integers(1, 40)), min_size=1, max_size=6)
PLAIN = HostPace(operator_s=10e-6, product_s=10e-6, view_s=1e-6, module_s=2e-6)
PACE = replace(
    UNKNOWN,
    flops_per_s={"bfloat16": 1e14, "float32": 1e13},
    bytes_per_s=1e12,
    multiprocessor_hz=1e11,
    product_share=1.0,
    host=PLAIN,
)


def passes_of(costs: list[Cost], runs: list[list[int]], *steps: list[tuple[int, int]]) -> Passes:
    kinds = [Operator(str(number), "other") for number in range(len(costs))]
    numbers = [[number % len(costs) for number in run] for run in runs]
    return Passes(kinds, numbers, [[(run % len(runs), n) for run, n in step] for step in steps])


def long_replay(passes: Passes, costs: list[Cost], num_micro_steps: int) -> float:
    """The mean seconds of the later half of many steps, each operator by itself."""
    host = device = 0.0
    ends = []
    last = passes.micro_steps[-1]
    for _ in range(40):
        for section in [passes.micro_steps[0], *(num_micro_steps - 1) * [last], passes.update]:
            for operator in [
                each for run, times in section for each in times * [*passes.runs[run]]
            ]:
                cost = costs[operator]
                host += cost.host_s
                if cost.device_s:
                    device = max(host, device) + cost.device_s
                if cost.waits:
                    host = max(host, device)
        ends.append(max(host, device))
    return (ends[-1] - ends[19]) / 20


@given(COSTS, RUNS, st.lists(REPEATS, min_size=2, max_size=3), st.integers(1, 9))
def test_a_replay_of_runs_takes_as_long_as_one_of_each_operator(costs, runs, steps, count):
    passes = passes_of(costs, runs, *steps)
    *micro_steps, update = passes.micro_steps
    passes = replace(passes, micro_steps=micro_steps, update=update)
    cost_of = {str(number): cost for number, cost in enumerate(costs)}
    seconds = timeline.replayed(passes, lambda operator: cost_of[operator.name], count)
    expected = long_replay(passes, costs, count)
    assert sum(seconds) == pytest.approx(expected, rel=1e-3, abs=1e-9)


def seconds_of(*costs: Cost) -> timeline.Seconds:
    each = list(costs)
    passes = passes_of(each, [[*range(len(each))]], [(0, 100)])
    return timeline.replayed(passes, lambda operator: each[int(operator.name)])


def test_the_slower_of_host_and_device_decides_and_the_device_waits_for_the_host():
    by_host = seconds_of(Cost(3e-5, 1e-5), Cost(3e-5, 2e-5, is_product=True))
    assert by_host == pytest.approx((2e-3, 1e-3, 3e-3, 0))
    by_device = seconds_of(Cost(1e-5, 3e-5), Cost(1e-5, 3e-5, is_product=True))
    assert by_device == pytest.approx((3e-3, 3e-3, 0, 0))


def test_neither_hides_what_the_other_does_at_another_time():
    """Half of the operators wait for the host, half for the device, and then the host for a value:
    no sum says so."""
    small, large, value = Cost(3e-5, 1e-5), Cost(1e-5, 5e-5), Cost(0.0, 0.0, waits=True)
    passes = passes_of([small, large, value], [[0], [1], [2]], [(0, 100), (1, 100), (2, 1)])
    each = {"0": small, "1": large, "2": value}
    seconds = timeline.replayed(passes, lambda operator: each[operator.name])
    assert sum(seconds) > 1.05 * max(seconds.others_s, 100 * (3e-5 + 1e-5))


def test_a_host_that_waits_for_the_device_begins_behind_it():
    value = Cost(1e-5, 0.0, waits=True)
    assert sum(seconds_of(Cost(1e-5, 3e-5), value)) == pytest.approx(100 * 4e-5)
    assert sum(seconds_of(Cost(1e-5, 3e-5))) == pytest.approx(100 * 3e-5)


def test_a_cpu_computes_where_it_launches():
    of_cores = replace(PACE, cores=rates.cpu(2).cores)
    cost_of = operators.cost_of(of_cores, 1, 0, 1.0)
    kernel = Operator("aten::add", "other", bytes=(1e8, 0, 0, 0), launches=1)
    passes = Passes([kernel], [[0]], [[(0, 10)]])
    device_s = cost_of(kernel).device_s
    assert sum(timeline.replayed(passes, cost_of)) == pytest.approx(10 * (10e-6 + device_s))


def test_hooks_are_hidden_by_a_device_that_lags():
    slow = Cost(1e-5, 3e-5)
    passes = passes_of([slow], [[0]], [(0, 100)])
    whole_s = [
        sum(timeline.replayed(passes, lambda operator: slow, 1, hooks_s))
        for hooks_s in (0, 1e-3, 4e-3)
    ]
    assert whole_s == pytest.approx([3e-3, 3e-3, 1e-3 + 4e-3], rel=0.01)


def update_s(passes: Passes, update_hooks_s: float = 0.0) -> float:
    """The seconds of an update behind passes of 100 slow kernels, which the host has left behind:
    each operator's name has its seconds on the host and on the device."""

    def cost_of(operator: Operator) -> Cost:
        host_s, device_s = map(float, operator.name.split())
        return Cost(host_s, device_s, waits=operator.kind == "wait")

    return timeline.replayed(passes, cost_of, 8, 0.0, None, update_hooks_s).update_s


def test_an_update_is_launched_beside_the_passes_until_the_norm_is_read():
    kinds = [Operator("1e-5 3e-5", "other"), Operator("1e-3 1e-4", "other")]
    kinds += [Operator("1e-5 0", "wait")]
    passes = Passes(kinds, [[0], [1], [2]], [[(0, 100)]])
    norm, value, weights = (1, 1), (2, 1), (1, 2)
    assert update_s(replace(passes, update=[norm])) == pytest.approx(1e-4)
    assert update_s(replace(passes, update=[norm, value, weights])) == pytest.approx(1e-4 + 2.1e-3)
    hooks_s = update_s(replace(passes, update=[norm]), 5e-3)
    assert hooks_s == pytest.approx(5e-3 + 1e-3 + 1e-4)  # they read the norm before


def test_a_kernel_on_lists_takes_its_tensors_from_memory_and_is_launched_once():
    size, tensors = 1e9, 300
    launch = Operator("aten::_fused_adamw_", "other", launches=1)
    part = Operator(
        "aten::_fused_adamw_", "other", "", (0, 0, 0, 0), (size, 0, 0, 0), tensors, "list"
    )
    cost_of = operators.cost_of(PACE, 1, 0, 1.0)
    assert cost_of(launch).device_s == operators.KERNEL_S
    assert cost_of(part).device_s == pytest.approx(size / 1e12)
    assert cost_of(part).host_s == pytest.approx(operators.LIST_VIEWS * tensors * PLAIN.view_s)
    a_quarter = operators.cost_of(PACE, 1, 0, 1.0, 0.25)
    assert a_quarter(part).device_s == pytest.approx(size / 4e12)
    cores = replace(PACE, cores=rates.cpu(2).cores)
    both = [
        operators.cost_of(cores, 1, 0, 1.0)(replace(part, bytes=(size, 0, 0, 0), form=form))
        for size, form in ((1e6, "list"), (1e9, ""))
    ]
    assert both[0].device_s == pytest.approx(both[1].device_s / 1000)


def test_kernels_between_products_of_a_compiled_layer_are_one():
    product = Operator("aten::mm", "product", "bfloat16", launches=1)
    add = Operator("aten::add", "other", "bfloat16", bytes=(8, 100, 0, 0), launches=1)
    mul = Operator("aten::mul", "other", "float32", bytes=(0, 200, 0, 0), launches=1, form="cast")
    weight = Operator("aten::_to_copy", "other", bytes=(500, 0, 0, 0), launches=1)
    foreign = Operator("bitsandbytes::dequantize", "other", bytes=(0, 300, 0, 0), launches=1)
    loss = Operator("aten::nll_loss_forward", "other", bytes=(0, 4, 0, 0), launches=1)
    view, module = Operator("aten::t", "view"), Operator("module", "module")
    each = [product, add, mul, weight, foreign, loss, view, module]
    passes = Passes(each, [[7, 1, 6, 3, 2, 0, 1, 4, 1], [5, 1, 1]], [[(0, 3), (1, 1)]])
    compiled = operators.compiled(passes, 2, 0)
    layer = [compiled.operators[number] for number in compiled.runs[0]]
    names = ["compiled", "aten::_to_copy", "aten::mm", "compiled", foreign.name, "compiled"]
    assert [operator.name for operator in layer] == names
    assert layer[0].bytes == (0, 200, 0, 0) and layer[0].form == ""
    assert layer[3].bytes == (8, 100, 0, 0)
    assert compiled.runs[1] == passes.runs[1]  # the loss is not compiled
    assert compiled.micro_steps == passes.micro_steps


def test_rows_of_a_table_are_read_and_logits_of_targets():
    cost_of = operators.cost_of(PACE, 1, 0, 1.0)
    sizes = (1e12, 1e6, 0, 0)
    table, plain = (
        cost_of(Operator(f"aten::{name}", "other", bytes=sizes, launches=1)).device_s
        for name in ("embedding", "add")
    )
    assert table < 1e-4 < plain
    loss = cost_of(Operator("aten::nll_loss_forward", "other", bytes=(8, 1e12, 0, 0), launches=1))
    assert loss.device_s < 1e-5


def test_the_host_takes_longer_for_a_product():
    pace = replace(PACE, host=HostPace(1e-5, 3e-5, 1e-6, 1e-6))
    product, other = (
        operators.cost_of(pace, 1, 0, 1.0)(Operator("any", kind, "bfloat16")).host_s
        for kind in ("product", "other")
    )
    assert (product, other) == (3e-5, 1e-5)


def moved_s(name: str, form: Form, pace: Rates = PACE) -> float:
    kernel = Operator(name, "other", "bfloat16", bytes=(0, 1e9, 0, 0), launches=1, form=form)
    return operators.cost_of(pace, 2, 0, 1.0)(kernel).device_s - operators.KERNEL_S


def test_kernels_of_uneven_tensors_are_as_slow_as_their_multiprocessors():
    assert moved_s("aten::add", "") == pytest.approx(2e-3)
    slower = [moved_s("aten::add", form) for form in ("cast", "broadcast", "strided")]
    assert [2e-3 * 10 / rate for rate in (11.0, 8.1, 4.4)] == pytest.approx(
        [min(slower[0], 2e-3 * 10 / 11.0), *slower[1:]]
    )
    assert moved_s("aten::sum", "broadcast") < moved_s("aten::add", "broadcast")
    slow_memory = replace(PACE, bytes_per_s=1e11)
    assert moved_s("aten::add", "strided", slow_memory) == pytest.approx(2e-2)


def test_tensors_that_fill_half_of_the_cache_are_moved_at_its_rate():
    cached = replace(PACE, cache_bytes=5 << 30)
    assert moved_s("aten::add", "", cached) == pytest.approx(2e-3 / 1.56)
    assert moved_s("aten::add", "strided", cached) == moved_s("aten::add", "strided")
    assert moved_s("aten::add", "", replace(cached, cache_bytes=3 << 30)) == pytest.approx(2e-3)


def test_an_operator_without_a_kernel_takes_the_host_alone():
    cost_of = operators.cost_of(PACE, 1, 0, 1.0)
    of_kinds = [cost_of(Operator("any", kind)) for kind in ("view", "module", "wait")]
    assert [each.host_s for each in of_kinds] == [1e-6, 2e-6, 10e-6]
    assert not any(each.device_s for each in of_kinds)
    empty = cost_of(Operator("aten::empty", "other", bytes=(1e9, 0, 0, 0)))
    assert (empty.host_s, empty.device_s) == (10e-6, 0.0)


def test_efficient_attention_is_slower_than_flash_and_no_faster_than_its_card():
    h200 = rates.card(described.from_words("H200", 1, 64).gpus[0])
    pace = replace(h200, bytes_per_s=4e12, product_share=1.0, host=PLAIN)

    def attention_s(name: str) -> float:
        call = Operator(name, "attention", "bfloat16", flops=(1e13, 0, 0, 0), launches=1)
        return operators.cost_of(pace, 1, 0, 1.0)(call).device_s

    flash, efficient, other = (
        attention_s(f"aten::_scaled_dot_product_{kernel}_attention")
        for kernel in ("flash", "efficient", "any")
    )
    assert 1.5 < efficient / flash < 2.5
    assert other < flash


def test_a_deep_step_is_replayed_by_its_runs():
    """Eighty layers take the calls of one, and a repetition of two sums."""
    kinds = [Operator(str(number), "other", launches=1) for number in range(400)]

    def calls(layers: int) -> int:
        runs = [[*range(400)], [*range(200, 400)]]
        passes = Passes(kinds, runs, [[(0, layers), (1, layers)]])
        cost_of = operators.cost_of(PACE, 1, 0, 1.0)
        return cost.count_calls(lambda: timeline.replayed(passes, cost_of))

    assert calls(80) < 1.3 * calls(1)
