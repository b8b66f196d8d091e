"""One attempt of a run on one rank, top to bottom: world, data, model, trainer, resume, train,
export, outcome."""

from __future__ import annotations

import hashlib
import logging
import os
import platform
import socket
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack, nullcontext
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from transformers import (
    PreTrainedTokenizerBase,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)
from transformers.trainer_callback import PrinterCallback

from launch.base import files
from launch.base.errors import (
    CheckpointError,
    ConfigError,
    ExportError,
    LaunchError,
    ResourceError,
)
from launch.base.text import shown, size
from launch.data import sources, token_hashes
from launch.data.conversation import Conversation
from launch.data.rows import BadRows
from launch.data.sources import Source
from launch.run_folder import layout, manifest
from launch.run_folder.layout import AttemptDir, RankStart, RunDir
from launch.schema.plan import MULTIPLE, Plan, Strategy
from launch.schema.recipe import Recipe
from launch.schema.recipe_keys import affected_by, all_keys, leaves
from launch.schema.result import Answers, Outcome, Scores
from training.checkpoints import best, commit, convert
from training.compat import ddp_private, deepspeed_private
from training.compat.transformers_private import Network
from training.control.heartbeat import Heartbeat
from training.control.stop_callback import StopCallback, StopConditions
from training.control.stop_word import Control, Halted
from training.data import dataset, prepare
from training.data import tokenizer as data_tokenizer
from training.data.batches import Collator
from training.data.sample_order import SampleOrder
from training.engines import setup
from training.levers.compile import eagerly
from training.levers.streaming import Streaming
from training.loop import (
    arguments,
    evaluate,
    export,
    export_check,
    nan_guard,
    sample_answers,
    trackers,
)
from training.loop.callbacks import Reporter, StepMeter, start_logging
from training.loop.early_stopping import EarlyStopping
from training.loop.export_check import Trained
from training.loop.last_step import LastStep, NothingLeft
from training.loop.memory_peaks import MemoryPeaks
from training.loop.trainer import LowMemTrainer, empty_cache
from training.model import build, four_bit

logger = logging.getLogger("lowmem")
_SHARED_FOLDER_S = 30.0  # a network file system may show a new folder late


Pairs = list[tuple[Conversation, str]]  # (conversation before the last answer, that answer)
_OpenRun = Callable[[RankStart, ExitStack], tuple[str, str] | None]


def train(
    start: RankStart,
    open_run: _OpenRun,
    opened: list[AttemptDir],
    watch: Callable[[LowMemTrainer], None] = lambda trainer: None,
    control: Control | None = None,
) -> None:
    """Run the attempt on this rank. Rank 0 leaves the model in recipe.output_dir and the outcome in
    the attempt.

    `open_run` gives rank 0 the folders of the run and the attempt; `opened` receives the attempt
    once it is known, `watch` the trainer before it trains. Raises Halted at a stop.
    """
    control = control or Control()
    tokens = _tokens(start)
    num_samples, held_out = dataset.number(start, tokens), dataset.held_out(tokens)
    timeout_s = arguments.timeout_s(start.recipe.training)
    engine = setup.prepare(start.plan.strategy, start.deepspeed_file, timeout_s)
    try:
        args = arguments.make_arguments(
            start.recipe, start.plan, num_samples, held_out is not None, engine
        )
    except ValueError as error:
        raise ConfigError(
            f"training: transformers refuses these values: {' '.join(str(error).split())}"
        ) from error
    engine_line = setup.check(start.plan.strategy, args)
    setup.check_agreement(_agreed_keys(start))
    setup.connect(start.plan.strategy)
    control.connect(timeout_s)
    with ExitStack() as locks:
        folders = _agreed(args, lambda: open_run(start, locks))
        if folders is not None:
            run, attempt = RunDir(Path(folders[0])), AttemptDir(Path(folders[1]))
            _check_shared(attempt)
            opened.append(attempt)
            logs = [attempt.train_log]
            if not start.supervised:
                logs += layout.log_files(start.workspace.root, run, start.recipe)
            start_logging(logs, args.process_index)
            _say(args, engine_line)
            for package, version, file in manifest.imported_from_elsewhere():
                logger.warning(
                    "rank %d imports %s %s from %s, not the one that is installed here",
                    *(args.process_index, package, version, file.parent),
                )
            args.output_dir = str(run.checkpoints)
            os.environ["TENSORBOARD_LOGGING_DIR"] = str(run.tensorboard)
            if args.process_index == 0:
                layout.show_events(run, start.recipe)
            parts = build_parts(start, run, attempt, args, tokens, control)
            watch(parts.trainer)
            _attempt(start, run, attempt, parts, tokens)
    if torch.distributed.is_initialized():
        setup.wait_for_ranks(args.device)
        torch.distributed.destroy_process_group()
    if control.agreed:
        raise Halted(control.agreed)


def _agreed_keys(start: RankStart) -> dict[str, Any]:
    """The leaves of recipe and strategy that all ranks have in common: not those that differ by
    machine."""
    own = {key.rpartition(".")[2] for key in all_keys() if "machine" in affected_by(key)}
    values = leaves({**start.recipe.model_dump(), "strategy": asdict(start.plan.strategy)})
    return {key: value for key, value in values.items() if key.rpartition(".")[2] not in own}


def _check_shared(attempt: AttemptDir) -> None:
    """Raises ResourceError on a machine that cannot see rank 0's folder: its part of a checkpoint
    would be lost."""
    until = time.monotonic() + _SHARED_FOLDER_S
    while not attempt.root.is_dir():
        if time.monotonic() > until:
            raise ResourceError(
                f"{socket.gethostname()} does not see {attempt.root}, where machine 0 keeps the"
                " run; put LOWMEM_ROOT on a file system that all machines share"
            )
        time.sleep(0.5)


def _tokens(start: RankStart) -> Path:
    """The folder of the tokenised rows, verified or made here where no launcher has done so
    before."""
    used = start.run.read_tokens() if start.run else None
    folder = used.folder if used else None
    if folder and folder.exists() and (start.supervised or not token_hashes.fault(folder)):
        return folder
    prepare.ensure(start.tokens, print, processes=start.tokenising_processes)
    return start.tokens.folder


@dataclass(frozen=True)
class Parts:
    """The objects that an attempt trains with on this rank."""

    tokenizer: PreTrainedTokenizerBase
    trainer: LowMemTrainer
    order: SampleOrder
    reporter: Reporter
    heartbeat: Heartbeat
    stop_callback: StopCallback
    control: Control
    early_stopping: EarlyStopping | None


def _hold_to_free_memory(plan: Plan, device: torch.device) -> None:
    """Limit this rank's allocator to the memory that is free now, so that other programs on the
    card do not run out, or to launch.vram_limit_gib or the user's per_process_memory_fraction, if
    one of them is less."""
    free_bytes, total_bytes = torch.cuda.mem_get_info(device)
    share = plan.allocator_fraction * free_bytes / total_bytes
    if plan.allocator_limit_bytes is not None:
        share = min(share, plan.allocator_limit_bytes / total_bytes)
    limit = min(share, torch.cuda.get_per_process_memory_fraction(device))
    torch.cuda.set_per_process_memory_fraction(limit, device)


def _check_pinned_memory(
    plan: Plan, device: torch.device, kernel: str, local_rank: int = 0
) -> None:
    """Raises RuntimeError if this rank cannot lock the host memory that the plan pins: the
    supervisor plans again, without. It is tried where `kernel`, the release of the operating
    system's, is that of WSL 2: Windows lets its programs lock about half of the RAM, and those in
    its containers less (microsoft/WSL issue 14078). On Linux, NVIDIA's driver locks what is free,
    whatever `ulimit -l` says; it is tried there too before layers are loaded to be streamed, whose
    weights the ranks of a machine share."""
    wanted, is_wsl = plan.estimate.pinned_bytes, "microsoft" in kernel.lower()
    is_tried = is_wsl or plan.strategy.levers.streamed_layers
    if plan.strategy.levers.streamed_layers and local_rank:
        wanted -= plan.estimate.offloaded_bytes * plan.strategy.processes_per_machine
    if not is_tried or wanted <= 0 or device.type != "cuda":
        return
    try:
        block = torch.empty(wanted, dtype=torch.uint8)
        runtime = torch.cuda.cudart()
        torch.cuda.check_error(int(runtime.cudaHostRegister(block.data_ptr(), wanted, 0)))
        torch.cuda.check_error(int(runtime.cudaHostUnregister(block.data_ptr())))
    except RuntimeError as error:
        raise RuntimeError(
            f"{'WSL 2: ' if is_wsl else ''}the host does not lock {size(wanted)} for a rank"
            f" ({str(error).splitlines()[0]}), which {plan.strategy.mode} pins"
        ) from error


def build_parts(
    start: RankStart,
    run: RunDir,
    attempt: AttemptDir,
    args: TrainingArguments,
    tokens: Path,
    control: Control,
) -> Parts:
    recipe, plan, rank = start.recipe, start.plan, args.process_index
    # each machine's launcher watches its own ranks
    heartbeat = Heartbeat((start.attempt or attempt).heartbeat_file(rank))
    heartbeat.beat("load")
    rows, order, feeders = dataset.make_dataset(start, run, attempt, args, tokens, heartbeat.beat)
    if args.device.type == "cuda":
        _hold_to_free_memory(plan, args.device)
        _check_pinned_memory(plan, args.device, platform.release(), args.local_process_index)
    meter = StepMeter(attempt.samples_file(rank))
    draw = not start.supervised and sys.stdout.isatty()
    watch = nan_guard.NanGuard(
        order,
        attempt.root,
        recipe.numerics.skip_spikes_above,
        args.fp16,
        recipe.training.learning_rate,
        nan_guard.fp16_fix(
            recipe.training.bf16,
            args.device.type == "cpu" or torch.cuda.is_bf16_supported(including_emulation=False),
        ),
    )
    peaks = MemoryPeaks(args.device)
    reporter = Reporter(attempt, rank, meter, order, peaks, draw, watch.check_loss)
    conditions = StopConditions(run) if rank == 0 else None
    stop_callback = StopCallback(control, heartbeat, conditions)
    tokenizer = data_tokenizer.load(tokens / "tokenizer")
    is_divided = plan.strategy.launch_mode.engine == "fsdp2"
    with setup.whole_weights(plan.strategy) if recipe.model.path is None else nullcontext():
        quantization = recipe.quantized(plan.strategy.mixed_precision)
        network = build.build(
            recipe.model,
            plan.shape,
            recipe.lora,
            plan.lora_targets,
            tokenizer,
            args.seed,
            quantization,
            args.device,
            plan.strategy.levers.attn_implementation,
            recipe.keeps_ids,
            (rank, args.world_size) if is_divided and quantization else None,
            plan.strategy.levers,
            args.local_process_index == 0,
        )
    if is_divided:
        setup.tie_by_module(network)
    setup.unify_trained(network, plan.strategy)
    streams = bool(plan.strategy.levers.streamed_layers)
    if streams or (plan.strategy.keeps_frozen_apart and recipe.model.path is not None):
        ddp_private.leave_out_frozen(network)
    _check_counts(network, plan)
    streaming = None
    if streams:
        of_place = plan.strategy.levers, args.device, plan.strategy.pin_memory
        beside = args.local_process_index, plan.strategy.processes_per_machine
        streaming = Streaming(network, *of_place, *beside)
    patience = recipe.training.early_stopping_patience
    early_stopping = EarlyStopping(patience) if patience else None
    sent = trackers.callbacks(recipe.training.report_to, run, start.workspace.root, args)
    trainer = LowMemTrainer(
        order=order,
        meter=meter,
        guard=watch,
        keep_checkpoints=recipe.training.save_total_limit,
        levers=plan.strategy.levers,
        facts={
            "mode": plan.strategy.mode,
            "engine": plan.strategy.launch_mode.engine,
            "zero_stage": plan.strategy.launch_mode.zero_stage,
            "mixed_precision": plan.strategy.mixed_precision,
            "world_size": args.world_size,
            "effective_batch_size": order.effective_batch_size,
            **({"group_size": order.group_size} if recipe.data.group_by_length else {}),
            "rows": len(rows),
            # the fingerprint of the data: of its content and of how it is tokenised
            "tokens": tokens.name,
            "recipe": hashlib.sha256(recipe.model_dump_json().encode()).hexdigest(),
            "checkpoint_bytes": plan.checkpoint_bytes,  # predicted
        },
        stop_callback=stop_callback,
        strategy=plan.strategy,
        peaks=peaks,
        model=network,
        args=args,
        data_collator=Collator(
            int(tokenizer.pad_token_id),  # pyright: ignore[reportArgumentType]
            network.config.decoder_start_token_id if network.config.is_encoder_decoder else None,
            multiple=MULTIPLE[plan.strategy.device],
            is_packed=recipe.data.packing,
            flattens=plan.strategy.levers.flattens,
            names_targets=plan.strategy.levers.logits_at_targets,
        ),
        train_dataset=rows,
        eval_dataset=dataset.held_out(tokens),
        processing_class=tokenizer,
        keeps_best=recipe.training.load_best_model_at_end,
        streaming=streaming,
        callbacks=[
            *(LastStep(), *([early_stopping] if early_stopping else [])),
            *(reporter, watch, stop_callback, *feeders, *sent),
        ],
    )
    setup.check_engine(plan.strategy, trainer)
    if is_divided:
        setup.autocast_fsdp2(trainer)
        if quantization:
            four_bit.divide(trainer.accelerator)
    trainer.remove_callback(PrinterCallback)  # the log has the same figures already
    return Parts(
        *(tokenizer, trainer, order, reporter, heartbeat, stop_callback, control, early_stopping)
    )


def _attempt(
    start: RankStart, run: RunDir, attempt: AttemptDir, parts: Parts, tokens: Path
) -> None:
    """Score, resume, train, score, export; the collective parts on every rank at the same point."""
    began = time.monotonic()
    trainer, args = parts.trainer, parts.trainer.args
    scores = vars(files.read(run.evaluation_file, Scores) or Scores()).copy()
    pairs = _questions(start, parts.tokenizer, start.recipe.evaluation.exact_match_rows)
    number = sample_answers.count(start.recipe, start.plan)
    if number and start.recipe.data.holds_out:
        _answer_samples(start, run, attempt, parts, number)
    if pairs and scores["exact_match_before"] is None:
        trainer.add_callback(_ScoreBefore(parts, start.recipe, pairs, scores, run.evaluation_file))
    resume = _agreed(args, lambda: _resume_point(start, run, parts))
    if resume is not None:
        trainer.verified.add(Path(resume.checkpoint).name)
        trainer.is_converted = resume.is_converted
    with parts.control.deferred(), parts.heartbeat:
        folder, config = resume.folder if resume else None, start.plan.shape.config
        metrics = _trained(parts, start.recipe, config, pairs, scores, folder)
        is_last = trainer.state.global_step >= trainer.state.max_steps
        stopped_early = bool(parts.early_stopping and parts.early_stopping.has_stopped)
        is_complete = (is_last or stopped_early) and not parts.control.agreed
        ending = "complete" if is_last else "stopped early"
        # none that was found damaged, whatever its step
        names = (folder.name for folder in manifest.committed(run.checkpoints))
        usable = [name for name in names if name in trainer.verified]
        outcome = Outcome(
            **_measured(start.plan.strategy, parts),
            **scores,
            complete=is_complete,
            ended=ending if is_complete else "preempted",
            checkpoint=usable[-1] if usable else None,
            resumed_from=resume.checkpoint if resume else None,
            train_seconds=metrics.get("train_runtime"),
            save_seconds=trainer.save_s,
            model_dir=start.recipe.output_dir,
        )
        trained = full_model = None
        if is_complete:
            parts.heartbeat.beat("export")
            questions = [question for question, _ in pairs]
            trained = export_check.trained(start, trainer, tokens, questions)
            if start.plan.strategy.launch_mode.shards_parameters:
                full_model = _full_model(start, parts)
    if trained is not None and args.process_index == 0:
        outcome = replace(outcome, export_check=_export(start, run, parts, trained, full_model))
    for folder in _outcome_folders(start, attempt, args):
        seconds, host_bytes = time.monotonic() - began, parts.reporter.host.highest()
        files.write_json(
            folder.outcome_file, replace(outcome, seconds=seconds, host_pss_bytes=host_bytes)
        )


def _export(
    start: RankStart, run: RunDir, parts: Parts, trained: Trained, full_model: Network | None
) -> str:
    """Write the model and check its folder; a sentence on what was compared.

    `full_model`: a copy with all weights, if ranks hold parts of them. Raises ExportError."""
    trainer, folder = parts.trainer, Path(start.recipe.output_dir)
    network: Network = full_model
    if full_model is None:
        network = trainer.accelerator.unwrap_model(trainer.model)
    if trainer.streaming is not None and start.recipe.model.path is None:
        trainer.streaming.give_back()  # the adapter is merged
        network.to("cpu")
    content = export.write(
        network,
        trainer,
        parts.tokenizer,
        start.recipe,
        start.plan,
        run.run_id,
        parts.control.deferred,
    )
    logger.info("model: %s (%s)", folder, content)
    free_bytes = export_check.close_engine(
        trainer, start.plan.estimate.host_bytes, parts.reporter.host.read()
    )
    try:
        with setup.whole_weights(start.plan.strategy):
            checked = export_check.check(
                *(folder, start.recipe, trainer.accelerator, network, trained, free_bytes)
            )
    except ExportError as error:
        export.write_check(folder, f"{layout.NOT_CHECKED}: {error}")
        error.fix = (
            "do not use this folder; the same line again exports the last step, and checks it again"
        )
        raise
    export.write_check(folder, checked)
    logger.info("checked: %s", checked)
    return checked


def _trained(
    parts: Parts,
    recipe: Recipe,
    config: Mapping[str, Any],
    pairs: Pairs,
    scores: dict[str, Any],
    resume: str | None,
) -> dict[str, float]:
    """Train, then score what is exported, unless the ranks agree to stop. Returns Trainer's
    metrics."""
    metrics: dict[str, float] = {}
    try:
        try:
            metrics = parts.trainer.train(resume_from_checkpoint=resume).metrics
        except NothingLeft as why:
            metrics = {"train_runtime": 0.0}
            logger.info("%s", why)
        if recipe.training.load_best_model_at_end and not parts.control.agreed:
            parts.heartbeat.beat("export")
            best.take(parts.trainer, Path(str(parts.trainer.args.output_dir)))
            scores["exported_step"] = parts.trainer.state.best_global_step
            scores["exported_eval_loss"] = parts.trainer.state.best_metric
        if not parts.control.agreed:
            export.round_weights(parts.trainer.model, recipe, config)
        if pairs and not parts.control.agreed:
            _score(parts, recipe, pairs, "after", scores)
        if not parts.control.agreed:
            parts.control.agree()
    except Halted:
        assert parts.control.agreed
    return metrics


def _outcome_folders(
    start: RankStart, attempt: AttemptDir, args: TrainingArguments
) -> list[AttemptDir]:
    """Folders in which this rank writes how it ended: rank 0 in the run's attempt, another
    machine's first rank in its own."""
    if args.process_index == 0:
        return [attempt]
    is_own = start.attempt is not None and start.attempt.root != attempt.root
    return [start.attempt] if start.attempt and is_own and not args.local_process_index else []


def _full_model(start: RankStart, parts: Parts) -> Network | None:
    """The model on rank 0's host, with the weights of all ranks, gathered one at a time; None on
    another rank. Collective."""
    recipe, plan, trainer = start.recipe, start.plan, parts.trainer
    trained: Network = trainer.accelerator.unwrap_model(trainer.model)
    quantization = recipe.quantized(plan.strategy.mixed_precision)
    if quantization and recipe.model.path is not None:  # the folder has the weights of 4 bits
        four_bit.gather_trained(trained, trainer.args.process_index == 0)
        return trained
    network, copies = None, {}
    if trainer.args.process_index == 0:
        with setup.whole_weights(plan.strategy):
            network = build.build(
                recipe.model,
                plan.shape,
                recipe.lora,
                plan.lora_targets,
                parts.tokenizer,
                recipe.training.seed,
                quantization,
                keeps_ids=recipe.keeps_ids,
            )
        copies = dict(network.named_parameters())
    packed = {f"{name}.weight" for name, _ in four_bit.layers(trained)} if quantization else set()
    for name, parameter in trained.named_parameters():
        if name in packed:  # of the same seed
            copies.pop(name, None)
            continue
        with deepspeed_private.gathered([parameter]), torch.no_grad():
            full = parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter
            if network is not None:
                copies.pop(name).copy_(full)
    assert not copies, f"not gathered: {sorted(copies)}"
    return network


class _ScoreBefore(TrainerCallback):
    """Scores before the first step; by then the model is on its device, sharded or not."""

    def __init__(
        self, parts: Parts, recipe: Recipe, pairs: Pairs, scores: dict[str, Any], file: Path
    ) -> None:
        self._parts, self._recipe, self._pairs = parts, recipe, pairs
        self._scores, self._file = scores, file

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if state.global_step:  # resumed: these are not the initial weights
            return
        _score(self._parts, self._recipe, self._pairs, "before", self._scores)
        if args.process_index == 0:
            files.write_json(self._file, self._scores)


def _measured(strategy: Strategy, parts: Parts) -> dict[str, Any]:
    """Step, losses and bytes at the end of training; before the export, which may merge adapters
    away."""
    trainer, event = parts.trainer, parts.reporter.last_event
    states = setup.held_bytes(strategy, trainer, parts.reporter.gradients_bytes)
    if trainer.streaming is not None:
        states["weights_bytes"] = (states["weights_bytes"] or 0) - trainer.streaming.bytes_not_held
        states["offloaded_bytes"] = trainer.streaming.bytes // strategy.processes_per_machine
    return {
        "step": trainer.state.global_step,
        "max_steps": trainer.state.max_steps,
        "loss": event.loss if event else None,  # None: resumed at the last step
        "eval_loss": export.last(trainer.state.log_history, "eval_loss"),
        **states,
        "vram_allocated_bytes": event.vram_allocated_bytes if event else 0,
        "vram_reserved_bytes": event.vram_reserved_bytes if event else 0,
        "phases": parts.reporter.phases,
        "core_share": parts.reporter.core_share,
    }


def _say(args: TrainingArguments, line: str) -> None:
    """A line of every rank: rank 0's in the log, the others' beside it on standard output."""
    if args.process_index == 0:
        logger.info("%s", line)
    else:
        print(f"{shown(line)}\n", end="", flush=True)  # in one write: ranks share the terminal


def _score(parts: Parts, recipe: Recipe, pairs: Pairs, when: str, scores: dict[str, Any]) -> None:
    """Answer held-out questions and add the scores. The batch is that of an evaluation, whose
    logits take more memory than the keys and values of answers."""
    trainer = parts.trainer
    empty_cache()
    # Accelerate puts autocast around the forward of the model that it prepares; PEFT's generate()
    # calls that of the base model
    with trainer.accelerator.autocast(), trainer.peaks.within("generation"):
        new = evaluate.scores(
            trainer.model,
            parts.tokenizer,
            pairs,
            recipe.evaluation.max_new_tokens,
            trainer.args.device,
            parts.stop_callback.between_batches,
            trainer.args.per_device_eval_batch_size,
        )
        empty_cache()
    scores.update({f"{name}_{when}": score for name, score in new.items()})
    logger.info(
        "exact match %s training: %.1f %% of %d held-out rows, BLEU %.1f",
        when,
        100 * new["exact_match"],
        len(pairs),
        100 * new["bleu"],
    )


def _answer_samples(
    start: RankStart, run: RunDir, attempt: AttemptDir, parts: Parts, number: int
) -> None:
    """Have so many held-out questions answered at each evaluation: by all ranks where they share
    the weights, else by rank 0 alone."""
    recipe, plan, trainer = start.recipe, start.plan, parts.trainer
    rank = trainer.args.process_index
    if rank and not plan.strategy.launch_mode.shards_parameters:
        return
    asked = sample_answers.SampleAnswers(
        _questions(start, parts.tokenizer, sample_answers.MOST_READ),
        parts.tokenizer,
        number,
        recipe.evaluation.max_new_tokens,
        row_tokens=plan.lengths[0],
        all_tokens=sample_answers.most_tokens(plan, trainer.model),
        is_pair=plan.shape.is_encoder_decoder,
    )
    if not len(asked):
        logger.info("no held-out question is short enough for sample answers")
        return

    def reply() -> None:
        parts.heartbeat.beat("evaluation")
        with (
            eagerly(trainer.args),
            trainer.accelerator.autocast(),
            trainer.peaks.within("generation"),
        ):
            empty_cache()
            texts = asked.replies(trainer.model, trainer.args.device)
        step = trainer.state.global_step
        if rank == 0:
            asked.write(run, attempt, Answers(step, parts.order.samples_seen(step), texts))

    trainer.answer_samples = reply


def _check_counts(network: torch.nn.Module, plan: Plan) -> None:
    """Assert that the model has the planned parameters, without which the estimate is
    worthless."""
    total = sum(map(setup.numel, network.parameters()))
    trainable = sum(
        setup.numel(parameter) for parameter in network.parameters() if parameter.requires_grad
    )
    planned = plan.shape.parameters + plan.shape.lora_parameters
    assert (total, trainable) == (planned, plan.shape.trainable_parameters), (
        f"planned {planned:,} parameters, {plan.shape.trainable_parameters:,} trainable; built"
        f" {total:,}, {trainable:,}"
    )
    logger.info("%s: %s parameters, %s trainable", plan.shape.name, f"{total:,}", f"{trainable:,}")


def _questions(start: RankStart, tokenizer: PreTrainedTokenizerBase, limit: int) -> Pairs:
    data = start.recipe.data
    if not limit or not data.holds_out:
        return []
    counts = start.tokens.row_counts if data.validation_size is not None else None
    held_out = sources.of_part(data, start.plan.data_format, counts, "validation")
    bad_of_source = [BadRows(data.max_bad_rows) for _ in held_out]
    dataset_of_part = chain.from_iterable(map(Source.read, held_out, bad_of_source))
    is_pair = start.plan.shape.is_encoder_decoder
    return evaluate.questions(dataset_of_part, limit, tokenizer, is_pair)


def _agreed(args: TrainingArguments, decide: Callable[[], Any]) -> Any:
    """Rank 0's decision on every rank; a LaunchError of rank 0 is raised on every rank."""
    decision: list[Any] = [None]
    if args.process_index == 0:
        try:
            decision = [decide()]
        except LaunchError as error:
            decision = [error]
    if args.world_size > 1:
        torch.distributed.broadcast_object_list(decision, device=args.device)
    if isinstance(decision[0], LaunchError):
        raise decision[0]
    return decision[0]


@dataclass(frozen=True)
class _Resume:
    """The checkpoint to go on from, and the folder in which Trainer reads it."""

    folder: str
    checkpoint: str
    is_converted: bool


def _resume_point(start: RankStart, run: RunDir, parts: Parts) -> _Resume | None:
    """The newest checkpoint that verifies. Raises CheckpointError if there are checkpoints and none
    does."""
    allow = start.recipe.resume.allow
    commit.clear_staging(run.checkpoints)
    checkpoint, faults = manifest.newest_valid(run.checkpoints, allow)
    for fault in faults:
        logger.warning("not resuming from it: %s", fault)
    if checkpoint is None and faults:
        raise CheckpointError(
            f"{run.checkpoints}: no checkpoint can be used ({'; '.join(faults)}); --resume never"
            " starts over"
        )
    continues = run.read_continues()
    if checkpoint is None and continues:
        source = continues.checkpoint
        if problem := manifest.fault(source, allow=allow):
            raise CheckpointError(
                f"{source}: {problem}; give another one with --resume PATH, or"
                " --resume never starts over"
            )
        checkpoint = commit.rebase(source, run.checkpoints, parts.order)
    if checkpoint is None:
        return None
    facts, strategy = manifest.read(checkpoint), start.plan.strategy
    logger.info("resuming from %s: %s samples seen", checkpoint.name, f"{facts['samples_seen']:,}")
    if facts["world_size"] != strategy.num_processes:
        logger.info(
            "the number of ranks was %d: random states, as of dropout, start anew",
            facts["world_size"],
        )
    if not convert.is_needed(facts, strategy):
        return _Resume(str(checkpoint), str(checkpoint), False)
    logger.info(
        "converting it from %s with %d rank(s) for %s with %d",
        facts["mode"],
        facts["world_size"],
        strategy.mode,
        strategy.num_processes,
    )
    write = partial(convert.write, checkpoint, facts, parts.trainer)
    return _Resume(str(commit.converted(checkpoint, write)), str(checkpoint), True)
