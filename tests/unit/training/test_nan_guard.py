"""What is not finite is seen, whatever it hides in; what is extraordinary is told from what is
usual."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from launch.base import files
from launch.base.errors import NonFinite
from training.data.sample_order import SampleOrder
from training.loop import nan_guard


def test_a_loss_that_is_not_finite_gives_gradients_that_are_not_and_any_other_loss_is_untouched():
    weight = torch.tensor([1.0, 2.0], requires_grad=True)
    masked = torch.where(torch.tensor([True, False]), weight, -math.inf)
    # infinite, with a gradient of 1 by itself
    nan_guard.poisoned(-masked[1] + weight[0]).backward()
    assert weight.grad is not None
    assert weight.grad.isnan().any()
    other = torch.tensor(0.1, requires_grad=True)
    assert nan_guard.poisoned(other) == other
    nan_guard.poisoned(other).backward()
    assert other.grad == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("at", [0, 1, 4096, -1])
def test_one_bad_number_among_many_is_found_wherever_it_stands(dtype, bad, at):
    tensors = [
        torch.rand(3, 5),
        torch.empty(0),
        torch.arange(4),
        torch.rand(10_001, dtype=torch.float32).to(dtype),
    ]
    assert nan_guard.all_finite(tensors)
    tensors[-1][at] = bad
    assert not nan_guard.all_finite(tensors)


@pytest.mark.parametrize(
    ("asks_bf16", "has_bf16", "flags"),
    [
        (True, False, {"bf16=false"}),  # fp16 replaced it: bf16=true would be the same run again
        (False, False, {"fp16=false"}),
        (False, True, {"fp16=false", "bf16=true"}),
    ],
)
def test_the_flags_that_leave_fp16_do_not_lead_back_to_it(asks_bf16, has_bf16, flags):
    text = nan_guard.fp16_fix(asks_bf16, has_bf16)
    assert set(re.findall(r"--training\.(\S+?)[ )]", text)) == flags


def test_the_rows_of_a_step_are_those_that_its_micro_batches_take():
    for start in (0, 37, 61):
        for rank in range(2):
            order = SampleOrder(53, 3, 2, 2, rank, seed=7, start=start)
            epoch = start // 53
            order.set_epoch(epoch)
            taken = list(order)
            for step in range(order.first_step(epoch)[0], order.steps_per_epoch):
                rows = [micro for micro in taken[step * 2 : step * 2 + 2] if micro is not None]
                number = epoch * order.steps_per_epoch + step + 1
                assert order.rows_of(number, range(len(rows))) == [
                    row for micro in rows for row in micro
                ]
                assert order.rows_of(number, [0]) == rows[0]


def test_a_spike_is_told_from_the_median_once_enough_steps_are_known():
    spikes = nan_guard.Spikes()
    for value in (1.0, 2.0, 3.0) * 3:
        spikes.remember(value)
    assert spikes.ratio(1e9) == 0
    spikes.remember(2.0)
    for value in (math.nan, math.inf) * 10:
        spikes.remember(value)
    assert spikes.ratio(2000.0) == 1000


class Zero:
    """The parts of DeepSpeed's optimizer that the guard watches (test_private_names.py)."""

    def __init__(self) -> None:
        self.loss_scale, self.norms, self.steps = 1.0, [1.0], 0

    def _get_norm_groups(self):
        return self.norms

    def _update_scale(self, has_overflow: bool = False) -> None: ...

    def _optimizer_step(self, group: int) -> None:
        self.steps += 1

    def step(self, *norms: float, scale: float = 1.0) -> bool:
        """A step as stage 3 takes it; True if the optimizer has stepped."""
        self.norms, self.loss_scale, before = list(norms), scale, self.steps
        is_finite = all(norm >= 0 and math.isfinite(norm) for norm in self._get_norm_groups())
        self._update_scale(not is_finite)
        if is_finite:
            self._optimizer_step(0)
        return self.steps > before


@pytest.fixture
def watched(tmp_path: Path) -> Callable[[bool], Zero]:
    """Makes an optimizer whose steps a guard has seen for a while, each with a norm of 1."""

    def make(fp16: bool) -> Zero:
        order = SampleOrder(53, 3, 2, 1, 0, seed=7)
        guard = nan_guard.NanGuard(order, tmp_path, 50.0, fp16, 1e-4, "leave fp16")
        guard.trainer = SimpleNamespace(
            state=SimpleNamespace(global_step=10),
            args=SimpleNamespace(process_index=1),  # rank 0 writes the rows
            model=torch.nn.Linear(2, 2),
        )  # pyright: ignore[reportAttributeAccessIssue]
        zero = Zero()
        guard._inside(zero)
        assert [zero.step(1.0) for _ in range(nan_guard.LEAST_REMEMBERED)] == [True] * 10
        return zero

    return make


def test_the_norm_of_a_step_is_that_of_all_groups(watched):
    zero = watched(False)
    assert zero.step(24.0, 32.0)  # together 40 times the median
    assert not zero.step(36.0, 48.0)  # 60 times: each group alone would be taken


def test_the_loss_scale_is_no_part_of_the_norm(watched):
    zero = watched(True)
    assert zero.step(65536.0, scale=65536.0)
    assert not zero.step(65536.0, scale=1024.0)


def test_a_step_of_deepspeed_that_is_not_finite_ends_the_run_without_fp16(watched):
    zero = watched(False)
    with pytest.raises(NonFinite, match="step 11: the gradient norm is nan"):
        zero.step(1.0, -1.0)  # DeepSpeed's word for it
    assert zero.steps == nan_guard.LEAST_REMEMBERED


def test_an_overflow_of_fp16_is_counted_once_a_step(watched):
    zero = watched(True)
    for _ in range(nan_guard.MAX_OVERFLOWS - 1):
        assert not zero.step(math.inf, scale=65536.0)
    with pytest.raises(NonFinite, match="15 steps in a row, in fp16"):
        zero.step(math.inf, scale=65536.0)


def test_a_finite_step_ends_a_series_of_overflows(watched):
    zero = watched(True)
    for _ in range(3):
        for _ in range(nan_guard.MAX_OVERFLOWS - 1):
            assert not zero.step(math.inf, scale=65536.0)
        assert zero.step(1.0)


def test_a_usual_step_ends_a_series_of_spikes_and_five_in_a_row_end_the_run(watched):
    zero = watched(False)
    for _ in range(3):
        assert [zero.step(60.0) for _ in range(nan_guard.MAX_SPIKES - 1)] == [False] * 4
        assert zero.step(1.0)
    assert [zero.step(60.0) for _ in range(nan_guard.MAX_SPIKES - 1)] == [False] * 4
    with pytest.raises(NonFinite, match="60 times the median of the last steps, 5 steps in a row"):
        zero.step(60.0)


@pytest.mark.parametrize("name", ["bias", "optimizer's exp_avg"])
def test_no_checkpoint_holds_weights_or_states_that_are_not_finite(tmp_path, name):
    network = torch.nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(network.parameters())
    network(torch.ones(2)).sum().backward()
    optimizer.step()
    guard = nan_guard.NanGuard(SampleOrder(53, 3, 2, 1, 0, seed=7), tmp_path, None, False, 1e-4)
    guard.trainer = SimpleNamespace(
        state=SimpleNamespace(global_step=7),
        args=SimpleNamespace(process_index=0, device="cpu"),
        model=network,
        optimizer=optimizer,
        is_deepspeed_enabled=False,
    )  # pyright: ignore[reportAttributeAccessIssue]
    guard.check_checkpoint()
    tensor = network.bias.data if name == "bias" else optimizer.state[network.bias]["exp_avg"]
    tensor[1] = math.nan
    with pytest.raises(NonFinite, match=f"step 7: not finite, so no checkpoint is written: {name}"):
        guard.check_checkpoint()


def test_what_is_not_finite_is_text_in_a_json_file(tmp_path):
    files.write_json(
        tmp_path / "a.json", {"loss": math.nan, "norms": (math.inf, 1.5), "inner": {"x": -math.inf}}
    )
    text = (tmp_path / "a.json").read_text()

    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is no JSON")

    assert json.loads(text, parse_constant=refuse) == {
        "loss": "nan",
        "norms": ["inf", 1.5],
        "inner": {"x": "-inf"},
    }


def test_a_model_with_one_infinite_weight_is_not_exported():
    network = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.LayerNorm(3))
    nan_guard.check_export(network, 7, "float32")
    with torch.no_grad():
        network[1].bias[2] = math.inf
    with pytest.raises(
        NonFinite, match=r"step 7: not finite in float32, so no model is written: 1\.bias"
    ):
        nan_guard.check_export(network, 7, "float32")
