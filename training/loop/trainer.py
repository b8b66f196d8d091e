"""transformers.Trainer with our order of samples, a loss normalised by target tokens, and complete
checkpoints."""

import math
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader
from transformers.trainer_utils import EvalLoopOutput

from launch.base import files as base_files
from launch.data.rows import IGNORED
from launch.run_folder import manifest
from launch.schema.levers import PLAIN, Levers
from launch.schema.plan import Strategy
from training import levers as training_levers
from training.checkpoints import best, commit, convert, names
from training.compat import bitsandbytes_private, deepspeed_private
from training.compat.python_private import end_what_cannot_send
from training.compat.transformers_private import Network, OpenTrainer
from training.control.stop_callback import StopCallback
from training.control.stop_word import Halted
from training.data.batches import TARGET_TENSORS, EpochLoader, TokenRows
from training.data.sample_order import SampleOrder
from training.engines import setup
from training.levers.compile import eagerly
from training.levers.logits import LossHead, known_masks, summed_loss, target_loss_sum
from training.levers.offloading import Offloading
from training.levers.streaming import Streaming
from training.log import logger
from training.loop import nan_guard, rank_memory
from training.loop.callbacks import StepMeter

# accelerate calls the CPU of a rank cpu:0, and Trainer loads an optimizer there. torch 2.11 knows
# only "cpu".
torch.serialization.register_package(
    100,
    lambda storage: None,
    lambda storage, location: storage if location.startswith("cpu:") else None,
)


def empty_cache() -> None:
    """Return the allocator's cached memory to the driver. The prediction assumes this between a
    step and an evaluation (launch/predict/estimate.py)."""
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()


class LowMemTrainer(OpenTrainer):
    """Trainer with three differences. An optimizer step covers exactly the next effective batch of
    a fixed order. The gradient is that of the mean over the target tokens of the step on all ranks.
    A checkpoint is complete or does not exist."""

    def __init__(
        self,
        *,
        order: SampleOrder,
        meter: StepMeter,
        keep_checkpoints: int,
        facts: dict[str, Any],
        guard: nan_guard.NanGuard | None = None,  # None: there are no numbers, as in a trace
        stop_callback: StopCallback | None = None,
        levers: Levers = PLAIN,
        strategy: Strategy | None = None,
        peaks: rank_memory.MemoryPeaks | None = None,
        keeps_best: bool = False,  # training.load_best_model_at_end
        streaming: Streaming | None = None,  # layers whose weights have been placed on the host
        **kwargs: Any,
    ) -> None:
        """`facts` are part of each checkpoint's manifest. Without a `strategy` nothing is saved."""
        self.order, self.meter, self.guard, self.stop_callback = order, meter, guard, stop_callback
        self._keep_checkpoints, self._facts = keep_checkpoints, facts
        # names of checkpoints that this process has committed or verified
        self.verified: set[str] = set()
        self.is_converted = False  # convert.py has converted the checkpoint to resume from
        self.save_s = 0.0
        self.peaks = peaks or rank_memory.MemoryPeaks(torch.device("cpu"))
        self._strategy = strategy
        self._keeps_best, self.streaming = keeps_best, streaming
        # called at the end of each evaluation, by every rank
        self.answer_samples: Callable[[], None] = lambda: None
        super().__init__(compute_loss_func=self._loss, **kwargs)
        self.shifts = not self.model.config.is_encoder_decoder
        self.head: LossHead | None = None  # makes the logits of some positions, or in parts
        training_levers.apply(self, levers)
        if guard is not None:
            guard.trainer = self

    def host_copies(self) -> Offloading:
        """The copies to host memory of what layers are given."""
        return Offloading(self.args.device, self._strategy is None or self._strategy.pin_memory)

    def refuse_wrapper(self, network: Network) -> None:
        setup.refuse_data_parallel(network)

    def _loss(
        self,
        outputs: Any,
        labels: torch.Tensor,
        num_items_in_batch: Any = None,
    ) -> torch.Tensor:
        smoothing = self.args.label_smoothing_factor
        loss = self._loss_sum(outputs.logits, labels, smoothing) / num_items_in_batch
        if self.guard is not None:
            self.guard.add(loss)
        return nan_guard.poisoned(loss)

    def compute_loss(
        self, model: torch.nn.Module, inputs: dict[str, Any], *args: Any, **kwargs: Any
    ) -> Any:
        targets = self._targets(inputs, inputs["labels"], self.args.label_smoothing_factor)
        with targets, known_masks(inputs):
            return super().compute_loss(model, inputs, *args, **kwargs)

    def _targets(
        self, inputs: dict[str, Any], labels: torch.Tensor, smoothing: float = 0.0
    ) -> AbstractContextManager[None]:
        """Give the head the targets of a micro-batch, which are no inputs of the model."""
        named = {name: inputs.pop(name) for name in TARGET_TENSORS if name in inputs}
        return self.head.for_loss(labels, named, smoothing) if self.head else nullcontext()

    def _loss_sum(
        self, logits: torch.Tensor, labels: torch.Tensor, smoothing: float = 0.0
    ) -> torch.Tensor:
        if self.head:
            return self.head.loss_sum(logits)
        return target_loss_sum(logits, labels, self.shifts, smoothing)

    def gradient_norm(self, library: Callable[[], Any]) -> Any:
        """The norm over all ranks, which is checked before the optimizer steps. DeepSpeed has
        stepped already (nan_guard.py)."""
        norm = library()
        if self.guard is None or self.is_deepspeed_enabled:
            return norm
        norm = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
        if not self.guard.check_step(float(norm)):
            # without gradients the step changes neither weights nor moments
            self.optimizer.zero_grad(set_to_none=True)
        return norm

    def _loader(self, rows: TokenRows, batches: Any, workers: int) -> EpochLoader:
        return EpochLoader(
            rows,
            batch_sampler=batches,
            collate_fn=self.data_collator,
            num_workers=workers,
            pin_memory=self.args.device.type == "cuda" and self.args.dataloader_pin_memory,
            persistent_workers=workers > 0 and self.args.dataloader_persistent_workers,
            prefetch_factor=self.args.dataloader_prefetch_factor if workers else None,
            worker_init_fn=end_what_cannot_send,
        )

    def get_train_dataloader(self) -> DataLoader:
        """The loader of this rank's batches. Accelerate does not prepare it, because it would pad
        the last batch with repeated samples."""
        return self._loader(self.train_dataset, self.order, self.args.dataloader_num_workers)

    def get_eval_dataloader(self, eval_dataset: Any = None) -> DataLoader:
        """This rank's share of the held-out rows. Every rank has the same number of batches."""
        rows = eval_dataset if eval_dataset is not None else self.eval_dataset
        width = self.args.per_device_eval_batch_size * self.args.world_size
        order = list(range(len(rows)))
        if self.order.lengths is not None or self.order.budget is not None:
            order = rows.lengths().sum(axis=1).argsort(kind="stable").tolist()
        batches = [
            order[start : start + width][self.args.process_index :: self.args.world_size]
            for start in range(0, len(rows), width)
        ]
        return self._loader(rows, batches, 0)

    def get_batch_samples(
        self, epoch_iterator: Iterator[Any], *args: Any, **kwargs: Any
    ) -> tuple[list[Any], torch.Tensor | int | None]:
        """Trainer's own method. The time that the loader takes is added to the meter, not that of
        counting on the device, which waits for its kernels."""
        return super().get_batch_samples(self._timed(epoch_iterator), *args, **kwargs)

    def _timed(self, batches: Iterator[Any]) -> Iterator[Any]:
        while True:
            began = time.monotonic()
            batch = next(batches, None)
            self.meter.waited_s += time.monotonic() - began
            if batch is None:
                return
            yield batch

    def training_step(
        self, model: torch.nn.Module, inputs: dict[str, Any], *args: Any, **kwargs: Any
    ) -> torch.Tensor:
        if self.stop_callback:
            self.stop_callback.heartbeat.beat()
        if not inputs:  # the step needs fewer micro-batches than Trainer counts
            return torch.zeros((), device=self.args.device)
        rows = inputs.pop("sample_ids", None)
        tokens, num_samples = inputs.pop("num_tokens", 0), inputs.pop("num_samples", 0)
        computed = inputs["input_ids"].numel()
        if "decoder_input_ids" in inputs:
            tokens += int((inputs["labels"] != IGNORED).sum())
            computed += inputs["labels"].numel()
        loss = super().training_step(model, inputs, *args, **kwargs)
        self.meter.add(loss, tokens, computed, num_samples, rows)
        return loss

    def evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        """The metrics; {} if the ranks have to stop meanwhile."""
        # an evaluation has other sizes than a step, so neither can use the other's cached blocks
        empty_cache()
        with self.peaks.within("evaluation"):
            try:
                return super().evaluate(*args, **kwargs)
            except Halted:
                self.stop_callback.cut_evaluation(self.state, self.control)
                return {}
            finally:
                empty_cache()

    def is_best_metric(self, library: Callable[[], bool], metrics: dict[str, float]) -> bool:
        """True if the held-out loss is the lowest so far. The checkpoint of such a step is written
        and kept (best.py), unless the loss only says when to stop."""
        is_best = bool(metrics) and library()
        if is_best and self._keeps_best and not self.control.should_save:
            self.control.should_save = True
            if self.stop_callback:
                self.stop_callback.begin_save()
        return is_best

    def evaluation_loop(
        self,
        dataloader: Any,
        description: str,
        *args: Any,
        metric_key_prefix: str = "eval",
        **kwargs: Any,
    ) -> EvalLoopOutput:
        """Mean loss over all target tokens of the held-out rows, without label smoothing, and its
        perplexity."""
        model = self.model_wrapped  # the wrapper gathers weights that the ranks share
        model.eval()
        totals = torch.zeros(2, dtype=torch.float64, device=self.args.device)
        sums = []
        for inputs in dataloader:
            if self.stop_callback:
                self.stop_callback.between_batches()
            batch = self._prepare_inputs(inputs)
            labels = batch.pop("labels")
            loss_sum = partial(self._loss_sum, labels=labels)
            with eagerly(self.args), self.compute_loss_context_manager():
                with self._targets(batch, labels):
                    sums.append(summed_loss(model, batch, loss_sum))
                totals[0] += sums[-1]
            totals[1] += (labels != IGNORED).sum()
        if torch.distributed.is_initialized():
            torch.distributed.all_reduce(totals)
        self.answer_samples()
        loss = (totals[0] / totals[1]).item()
        metrics = {
            f"{metric_key_prefix}_loss": loss,
            f"{metric_key_prefix}_perplexity": math.inf if loss >= 700 else math.exp(loss),
        }
        if self.guard is not None:
            self.guard.check_evaluation(loss, sums, dataloader.batch_sampler)
        return EvalLoopOutput(
            predictions=np.empty(0),
            label_ids=None,
            metrics=metrics,
            num_samples=len(dataloader.dataset),
        )

    def load_weights(self, library: Callable[[], None]) -> None:
        """Load the weights of a checkpoint of this engine. Converted weights are loaded later, with
        their states."""
        if not self.is_converted:
            library()

    def create_optimizer(self, *args: Any, **kwargs: Any) -> torch.optim.Optimizer:
        optimizer = super().create_optimizer(*args, **kwargs)
        bitsandbytes_private.load_paged(optimizer)
        return optimizer

    def prepare_training(
        self, library: Callable[[str | None], Any], resume_from_checkpoint: str | None
    ) -> tuple[torch.nn.Module, DataLoader]:
        """Trainer's own method, which also loads optimizer and schedule."""
        scaler, folder = self.accelerator.scaler, Path(resume_from_checkpoint or "")
        if scaler and resume_from_checkpoint:
            # Torch makes FSDP2's states, before it loads them, by a step without gradients, which
            # needs a scale. Trainer loads the checkpoint's scale after them.
            scaler.scale(torch.zeros((), device=self.args.device))
        if resume_from_checkpoint and not self.is_converted:
            names.check(self.model, folder)
        prepared = library(None if self.is_converted else resume_from_checkpoint)
        converted = self._strategy if self.is_converted else None
        without = convert.load(self, converted, folder) if converted else []
        bitsandbytes_private.page_states(self.optimizer)
        if self.is_converted:
            convert.load_schedule(self, torch.load(folder / "scheduler.pt", weights_only=True))
            scale = folder / "scaler.pt"  # DeepSpeed has a scale of its own
            if scaler and scale.exists():
                scaler.load_state_dict(torch.load(scale, weights_only=True))
        convert.apply_schedule(self)
        if without and self.args.should_save:
            logger.warning(
                "no optimizer state for %s and %d more: it starts anew there",
                *(without[0], len(without) - 1),
            )
        if self.args.dataloader_num_workers:  # they are forked after this
            rank_memory.exclude_from_forks(rank_memory.state_tensors(self))
        return prepared

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Save the model's part of a checkpoint. DeepSpeed's own files contain the weights already,
        in the parts of the ranks."""
        if not self.is_deepspeed_enabled:
            super().save_model(output_dir, _internal_call)

    def save_checkpoint(self, library: Callable[[], None]) -> None:
        """Save Trainer's own files. All ranks write them to a temporary folder and hash them. Rank
        0 commits the checkpoint and deletes old checkpoints."""
        if self.args.device.type == "cuda":  # for a paged optimizer's states, as all_finite() says
            torch.cuda.synchronize(self.args.device)
        if self.guard is not None:
            self.guard.check_checkpoint()
        began = time.monotonic()
        step = self.state.global_step
        checkpoints = Path(str(self.args.output_dir))
        # the run has just resumed from this checkpoint, or saved it a moment ago
        if manifest.name(step) in self.verified:
            return
        empty_cache()  # gathering weights cannot use a step's cached blocks
        with self.peaks.within("save"):
            self._commit(library, checkpoints, step)
        self.save_s += time.monotonic() - began

    def _commit(self, library: Callable[[], None], checkpoints: Path, step: int) -> None:
        """Write, hash and commit a checkpoint; then delete old ones."""
        save = commit.Save(checkpoints, step, self.args.process_index, self.args.world_size)

        def begin() -> None:
            self.meter.keep_rows(synced=True)
            if save.rank:
                return
            commit.check_disk_space(checkpoints, self._facts.get("checkpoint_bytes", 0))
            # Folders are made before, so that no rank can fail alone at it
            for folder in ("", *self._strategy.launch_mode.checkpoint_folders):
                (save.staged / folder).mkdir(parents=True, exist_ok=True)

        def write() -> None:
            self.args.output_dir = str(save.staging)
            try:
                with names.of_model(self.model):
                    library()
            finally:
                self.args.output_dir = str(checkpoints)

        def finish() -> None:
            facts = {**self._facts, "samples_seen": self.order.samples_seen(step)}
            if self._strategy.launch_mode.is_whole:
                facts["optimizer_parameters"] = convert.optimizer_names(self)
            files = {relative: entry for part in described for relative, entry in part.items()}
            commit.commit(save.staged, checkpoints, step, facts, files)
            # converted checkpoints too, which every rank has read by now
            commit.clear_staging(checkpoints)

        save.on_all(begin)
        save.on_all(write)
        listing = save.on_first(partial(commit.listing, save.staged))
        own_files = commit.deal(listing, save.world_size)[save.rank]
        described = save.on_all(partial(commit.describe, save.staged, own_files))
        save.on_first(finish)
        self.verified.add(manifest.name(step))
        best_name = best.checkpoint_name(self.state) if self._keeps_best else None
        save.on_first(
            partial(commit.rotate, checkpoints, self._keep_checkpoints, self.verified, best_name)
        )

    def save_optimizer(self, library: Callable[[], None], output_dir: str) -> None:
        """Save DeepSpeed's part without its `latest`, its Python script, and its barriers, which
        would block errors."""
        if not self.is_deepspeed_enabled:
            return library()
        engine = self.model_wrapped
        writer = commit.DelayedWrites(engine.checkpoint_engine)
        with deepspeed_private.saving_with(engine, writer):
            is_adapter = hasattr(self.model, "peft_config")
            engine.save_checkpoint(
                output_dir, save_latest=False, exclude_frozen_parameters=is_adapter
            )
        writer.check()
        if self.args.should_save:
            self.model.config.save_pretrained(output_dir)
            base_files.write_atomic(
                Path(output_dir) / "latest", f"global_step{engine.global_steps}"
            )
            torch.save(self.lr_scheduler.state_dict(), Path(output_dir) / "scheduler.pt")
