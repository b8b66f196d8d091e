"""Detection of losses, gradients and weights that are not finite, on all ranks, before the
optimizer steps or a file is written.

A loss that is not finite gets gradients that are not finite. The gradient norm, which is reduced
over the ranks anyway, then shows the fault to every rank. This needs no collective of its own, and
reads a single number per step.
"""

import json
import math
import statistics
from collections import deque
from collections.abc import Iterable, Sequence
from datetime import timedelta
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from launch.base import files
from launch.base.errors import NonFinite
from training.compat import deepspeed_private, torch_private
from training.compat.transformers_private import OpenTrainer
from training.data.sample_order import SampleOrder
from training.log import logger
from training.model import four_bit

# Overflows in a row: fp16's loss scale starts at 65,536 and halves each time, so a longer series
# has another cause than the scale
MAX_OVERFLOWS = 15
MAX_SPIKES = 5  # spikes in a row; after so many skipped steps the loss is high at these weights
_WARN_SPIKE = 100.0  # times the median
_REMEMBERED = 50  # steps whose median is computed
LEAST_REMEMBERED = 10
_EXCHANGE_S = 20.0
SHOWN = 8  # rows or names in a message


def poisoned(loss: torch.Tensor) -> torch.Tensor:
    """The loss. If it is not finite, all its gradients become NaN, because the gradients of an
    infinite loss can be finite."""
    return loss * torch.where(loss.detach().isfinite(), 1.0, math.nan)


def fp16_fix(asks_bf16: bool, has_bf16: bool) -> str:
    """The flags that leave fp16, which a recipe names, or which replaces its bf16 on a card without
    bf16."""
    if asks_bf16:
        return "this card has no bf16: train in float32 (--training.bf16=false)"
    if not has_bf16:
        return "train in float32 (--training.fp16=false)"
    return (
        "train in bf16 (--training.fp16=false --training.bf16=true) or float32"
        " (--training.fp16=false)"
    )


class Spikes:
    """Comparison of a value with the median of the values before it."""

    def __init__(self) -> None:
        self._values: deque[float] = deque(maxlen=_REMEMBERED)

    def ratio(self, value: float) -> float:
        """The value divided by the median; 0 while there are too few values."""
        if len(self._values) < LEAST_REMEMBERED:
            return 0.0
        return value / max(statistics.median(self._values), 1e-30)

    def remember(self, value: float) -> None:
        if math.isfinite(value):
            self._values.append(value)


class NanGuard(TrainerCallback):
    """Callback that checks a run's numbers. Raises NonFinite, with the same text on all ranks."""

    def __init__(
        self,
        order: SampleOrder,
        attempt: Path,
        skip_spikes_above: float | None,
        fp16: bool,
        learning_rate: float,
        fp16_fix: str = "",
    ) -> None:
        """`learning_rate` is the value in the recipe; `fp16_fix` the flags that leave fp16."""
        self._fp16_fix = fp16_fix
        self._order, self._attempt, self._learning_rate = order, attempt, learning_rate
        self._skip_above, self._fp16 = skip_spikes_above, fp16
        # losses of this step's micro-batches; read only after a fault
        self._losses: list[torch.Tensor] = []
        self._overflows = self._skipped = 0
        self._norms, self._step_losses = Spikes(), Spikes()
        self.trainer: OpenTrainer

    # ---- before the optimizer step
    # ---------------------------------------------------------------------------

    def add(self, loss: torch.Tensor) -> None:
        """Add the loss of a micro-batch."""
        self._losses.append(loss.detach())

    def check_step(self, norm: float) -> bool:
        """True if the optimizer may step with gradients of this norm. Raises NonFinite."""
        step = self.trainer.state.global_step + 1
        losses, self._losses = self._losses, []
        if not math.isfinite(norm):
            self._investigate(step, losses, norm)
            return True  # the scaler of fp16 skips the step by itself
        self._overflows = 0
        ratio = self._norms.ratio(norm)
        shown = f"the gradient norm {norm:.3g} is {ratio:.0f} times the median of the last steps"
        if self._skip_above is None or ratio <= self._skip_above:
            if ratio > _WARN_SPIKE:
                self._warn(
                    f"step {step}: {shown}; numerics.skip_spikes_above would skip such a step"
                )
            self._skipped = 0
            self._norms.remember(norm)
            return True
        self._skipped += 1
        if self._skipped == MAX_SPIKES:
            raise self._ended(f"step {step}: {shown}, {MAX_SPIKES} steps in a row", self._slower())
        self._warn(
            f"step {step} is skipped: {shown} (numerics.skip_spikes_above {self._skip_above:g})"
        )
        return False

    def _investigate(self, step: int, losses: Sequence[torch.Tensor], norm: float) -> None:
        """Find the numbers that are not finite, their ranks and their rows. Returns only if fp16's
        loss scale is the cause, and raises NonFinite otherwise."""
        values = torch.stack([loss.float() for loss in losses]).tolist() if losses else []
        bad = [i for i, value in enumerate(values) if not math.isfinite(value)]
        network = self.trainer.model
        facts = {
            "losses": {i: str(values[i]) for i in bad},
            "rows": self._order.rows_of(step, bad or range(len(values))),
            "weights": _names(network.named_parameters()),
            "gradients": _names(
                (name, p.grad) for name, p in network.named_parameters() if p.grad is not None
            ),
        }
        reports = _exchange(f"step-{step}", facts)
        culprits = {rank: report for rank, report in reports.items() if report["losses"]}
        if not culprits and self._fp16:
            self._overflows += 1
            if self._overflows < MAX_OVERFLOWS:
                return
        fix = self._slower()
        weights, names = (
            next((report[key] for report in reports.values() if report[key]), [])
            for key in ("weights", "gradients")
        )
        if weights:
            fault = f"weights are not finite: {', '.join(weights)}"
            fix = (
                "look at the folder of model.path, or go on from an older checkpoint with --resume"
                " PATH"
            )
        elif culprits:
            ranks = ", ".join(
                f"{next(iter(report['losses'].values()))} on rank {rank}"
                f" (micro-batch {', '.join(str(int(i) + 1) for i in report['losses'])})"
                for rank, report in culprits.items()
            )
            fault = f"the loss is {ranks}"
        else:
            of = f" (gradients of {', '.join(names)})" if names else ""
            fault = f"the gradient norm is {norm}{of}, every loss is finite; {len(reports)} rank(s)"
        if self._fp16:
            fault += (
                f", {self._overflows} steps in a row, in fp16"
                if self._overflows == MAX_OVERFLOWS
                else ", in fp16"
            )
            fix = self._fp16_fix
        rows = {rank: report["rows"] for rank, report in (culprits or reports).items()}
        file = self._write(step, fault, rows)
        listed = _listed([row for numbers in rows.values() for row in numbers])
        raise self._ended(
            f"step {step}: {fault}; rows {listed} of the tokenised data, shown in {file}", fix
        )

    def _ended(self, message: str, fix: str) -> NonFinite:
        """Log the message; return the error to raise."""
        self._warn(message)
        return NonFinite(message, fix)

    def _warn(self, message: str) -> None:
        if self.trainer.args.process_index == 0:  # all ranks have the same message
            logger.warning("%s", message)

    def _slower(self) -> str:
        return (
            "start over with half the learning rate"
            f" (--training.learning_rate={self._learning_rate / 2:.15g} --resume never)"
        )

    def _write(self, step: int, fault: str, rows: dict[int, list[int]]) -> Path:
        """Write the texts of the trained rows, among which people find the bad row."""
        file = self._attempt / "nonfinite.json"
        if self.trainer.args.process_index == 0:
            tokenizer, data = self.trainer.processing_class, self.trainer.train_dataset
            shown = [
                {"rank": rank, "row": row, "tokens": len(ids), "text": tokenizer.decode(ids[:200])}
                for rank, numbers in rows.items()
                for row, (ids, *_) in zip(numbers, data.__getitems__(numbers), strict=True)
            ]
            files.write_json(file, {"step": step, "what": fault, "rows": shown})
        return file

    # ---- inside DeepSpeed's backward()
    # ---------------------------------------------------------------------------

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if self.trainer.is_deepspeed_enabled:
            self._inside(deepspeed_private.optimizer(self.trainer))

    def _inside(self, zero: Any) -> None:
        """Check the norm after DeepSpeed has computed it and before it steps. DeepSpeed would skip
        or take a bad step without a message."""
        may_step = True

        def see_norms(norms: list[Any]) -> None:
            nonlocal may_step
            values = torch.stack([torch.as_tensor(norm) for norm in norms]).tolist()
            norm = math.nan if -1 in values else math.hypot(*values)  # -1: DeepSpeed's NaN
            # fp16's scaler skips the step by itself
            if not self._fp16 or math.isfinite(norm):
                may_step = self.check_step(norm / float(zero.loss_scale))

        deepspeed_private.watch_step(
            zero, see_norms, lambda: self.check_step(math.inf), lambda: may_step
        )

    # ---- after the optimizer step
    # ---------------------------------------------------------------------------

    def check_loss(self, step: int, loss: float) -> None:
        """Warn of a spike in the loss of a step, which was summed over the ranks."""
        ratio = self._step_losses.ratio(loss)
        if ratio > _WARN_SPIKE:
            self._warn(
                f"step {step}: the loss {loss:.4g} is {ratio:.0f} times the median of the last"
                " steps"
            )
        self._step_losses.remember(loss)

    def check_evaluation(
        self, loss: float, sums: Sequence[torch.Tensor], batches: Sequence[Sequence[int]]
    ) -> None:
        """Raises NonFinite if the held-out loss, which all ranks share, is not finite."""
        if math.isfinite(loss):
            return
        step = self.trainer.state.global_step
        values = torch.stack(list(sums)).tolist() if sums else []
        rows = [
            row
            for value, batch in zip(values, batches, strict=True)
            for row in batch
            if not math.isfinite(value)
        ]
        reports = _exchange(f"evaluation-{step}", {"rows": rows})
        listed = _listed(sorted(row for report in reports.values() for row in report["rows"]))
        raise self._ended(
            f"step {step}: the held-out loss is {loss}; rows {listed} of the tokenised held-out"
            " data",
            self._slower(),
        )

    def check_checkpoint(self) -> None:
        """Raises NonFinite on every rank if weights or optimizer states of any rank are not finite.
        Collective."""
        trainer, step = self.trainer, self.trainer.state.global_step
        named = [
            (name, parameter.data) for name, parameter in four_bit.named_numbers(trainer.model)
        ]
        optimizer = trainer.optimizer
        if trainer.is_deepspeed_enabled:
            zero = deepspeed_private.optimizer(trainer)
            named += [("the fp32 copy", flat) for flat in deepspeed_private.master_slices(zero)]
            optimizer = zero.optimizer
        named += [
            (f"optimizer's {key}", value)
            for state in optimizer.state.values()
            for key, value in state.items()
        ]
        # no kernel before the host's tensors were read, as all_finite() says
        is_finite = all_finite(tensor for _, tensor in named)
        is_bad = torch.tensor([float(not is_finite)], device=trainer.args.device)
        if torch.distributed.is_initialized():
            torch.distributed.all_reduce(is_bad)
        if is_bad.item():
            reports = _exchange(f"checkpoint-{step}", {"weights": _names(named)})
            names = sorted({name for report in reports.values() for name in report["weights"]})
            raise self._ended(
                f"step {step}: not finite, so no checkpoint is written: {', '.join(names[:SHOWN])}",
                self._slower(),
            )


def check_export(network: torch.nn.Module, step: int, dtype: str) -> None:
    """Raises NonFinite for a model whose weights are not finite, or are not in the type of the
    export."""
    if not all_finite(parameter.data for _, parameter in four_bit.named_numbers(network)):
        names = ", ".join(_names(four_bit.named_numbers(network)))
        fix = "start over with half the learning rate and --resume never; the checkpoints before"
        if dtype == "float16":
            fix = f"export numbers above 65,504 with --model.output_dtype=bfloat16, or {fix}"
        raise NonFinite(
            f"step {step}: not finite in {dtype}, so no model is written: {names}",
            f"{fix} are kept",
        )


def all_finite(tensors: Iterable[Any]) -> bool:
    """True if all numbers are finite. Reads the memory once and one number per kind; allocates
    nothing of the tensors' size.

    The host's tensors come first, while the card computes nothing: those of a paged optimizer are
    memory of the card too, and under WSL2 reading them beside a kernel ends the process."""
    by_kind: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
    for tensor in [local_part(tensor) for tensor in tensors if torch.is_tensor(tensor)]:
        has_values = tensor.numel() and not tensor.is_meta
        if has_values and tensor.is_floating_point() and tensor.element_size() > 1:
            by_kind.setdefault((tensor.device, tensor.dtype), []).append(tensor)
    kinds = sorted(by_kind, key=lambda kind: kind[0].type != "cpu")
    highest = [torch_private.largest(by_kind[kind]) for kind in kinds]
    return all(math.isfinite(value.item()) for value in highest)


def _names(named: Iterable[tuple[str, Any]]) -> list[str]:
    """The first names whose tensor is not finite."""
    return list(islice((name for name, tensor in named if not all_finite([tensor])), SHOWN))


def _listed(rows: Sequence[int]) -> str:
    """The first rows as text."""
    return ", ".join(map(str, rows[:SHOWN])) + (", ..." if len(rows) > SHOWN else "")


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """The part of a tensor that this rank holds."""
    part = deepspeed_private.local_part(tensor)
    return part.to_local() if hasattr(part, "to_local") else part.detach()


def _exchange(name: str, facts: dict[str, Any]) -> dict[int, dict[str, Any]]:
    """Every rank's facts by its number, without ranks that do not answer in time.

    The store is used instead of a collective, because a rank whose numbers are finite does not call
    this function and would be waited for."""
    if not torch.distributed.is_initialized():
        return {0: facts}
    store = torch_private.default_store()
    rank, world_size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    facts_by_rank: dict[int, dict[str, Any]] = {}
    for stage in ("written", "read"):  # the rank that hosts the store waits until all have read
        store.set(f"lowmem/{name}/{stage}/{rank}", json.dumps(facts))
        for other in range(world_size):
            try:
                store.wait(
                    [f"lowmem/{name}/{stage}/{other}"], timedelta(seconds=_EXCHANGE_S / world_size)
                )
            except torch.distributed.DistStoreError:
                continue
            facts_by_rank[other] = json.loads(store.get(f"lowmem/{name}/{stage}/{other}"))
    return facts_by_rank
