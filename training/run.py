"""One attempt of a run on one rank, top to bottom: world, data, model, trainer, resume, train,
export, outcome."""

import hashlib
import os
import platform
import socket
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_callback import PrinterCallback

from launch.base import files
from launch.base.errors import CheckpointError, ConfigError, LaunchError, ResourceError
from launch.base.text import shown, size
from launch.data import sources, token_cache
from launch.data.conversation import Conversation
from launch.run_folder import layout, manifest
from launch.run_folder.layout import AttemptDir, RankStart, RunDir
from launch.schema.plan import MULTIPLE, Plan, Strategy
from launch.schema.recipe_keys import affected_by, all_keys, leaves
from launch.schema.result import Answers, Outcome, Scores
from training.checkpoints import best, commit, convert
from training.compat import levers_private
from training.control.heartbeat import Heartbeat
from training.control.stop_callback import StopCallback, StopConditions
from training.control.stop_word import Control, Halted
from training.data import dataset, prepare
from training.data import tokenizer as data_tokenizer
from training.data.batches import Collator
from training.engines import setup
from training.levers.compile import eagerly
from training.levers.streaming import Streaming
from training.log import logger, start_logging
from training.loop import (
    arguments,
    evaluate,
    export,
    nan_guard,
    sample_answers,
    trackers,
)
from training.loop.callbacks import Reporter, StepMeter
from training.loop.last_step import EarlyStopping, LastStep, NothingLeft
from training.loop.rank_memory import MemoryPeaks
from training.loop.trainer import LowMemTrainer, empty_cache
from training.model import build, four_bit

_SHARED_FOLDER_S = 30.0  # a network file system may show a new folder late


Pairs = list[tuple[Conversation, str]]  # (conversation before the last answer, that answer)


def train(
    start: RankStart,
    open_run: Callable[[RankStart, ExitStack], tuple[str, str] | None],
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
    """The folder of the tokenised rows, verified, or made here where no launcher has done so."""
    used = start.run.read_tokens() if start.run else None
    folder = used.folder if used else None
    if folder and folder.exists() and (start.supervised or not token_cache.fault(folder)):
        return folder
    prepare.ensure(start.tokens, print, num_processes=start.tokenising_processes)
    return start.tokens.folder


@dataclass(frozen=True)
class Parts:
    """The objects that an attempt trains with on this rank."""

    trainer: LowMemTrainer
    reporter: Reporter
    heartbeat: Heartbeat
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
    share = min(share, torch.cuda.get_per_process_memory_fraction(device))
    torch.cuda.set_per_process_memory_fraction(share, device)


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
    reporter = Reporter(
        *(attempt, rank, meter, order, peaks),
        draw=not start.supervised and sys.stdout.isatty(),
        check_loss=watch.check_loss,
    )
    stop_callback = StopCallback(control, heartbeat, StopConditions(run) if rank == 0 else None)
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
        levers_private.leave_out_frozen(network)
    _check_counts(network, plan)
    streaming = (
        Streaming(
            *(network, plan.strategy.levers, args.device, plan.strategy.pin_memory),
            *(args.local_process_index, plan.strategy.processes_per_machine),
        )
        if streams
        else None
    )
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
    return Parts(trainer, reporter, heartbeat, control, early_stopping)


def _attempt(
    start: RankStart, run: RunDir, attempt: AttemptDir, parts: Parts, tokens: Path
) -> None:
    """Score, resume, train, score, export; the collective parts on every rank at the same point."""
    began = time.monotonic()
    trainer, args = parts.trainer, parts.trainer.args
    num_scored = start.recipe.evaluation.exact_match_rows
    pairs = _questions(start, trainer, num_scored)
    if start.recipe.data.holds_out and len(pairs) < num_scored:
        logger.info(
            "evaluation.exact_match_rows %d: %d are scored, all held-out rows with an answer",
            *(num_scored, len(pairs)),
        )
    number = sample_answers.count(start.recipe, start.plan)
    if number and start.recipe.data.holds_out:
        _answer_samples(start, run, attempt, parts, number)
    scoring = _Scoring(trainer, start.recipe.evaluation.max_new_tokens, pairs, run.evaluation_file)
    trainer.add_callback(scoring)
    checkpoint, folder = _agreed(args, lambda: _resume_point(start, run, parts))
    if checkpoint is not None:
        trainer.verified.add(Path(checkpoint).name)
        trainer.is_converted = folder != checkpoint
    with parts.control.deferred(), parts.heartbeat:
        metrics = _trained(start, parts, scoring, folder)
        is_last = trainer.state.global_step >= trainer.state.max_steps
        stopped_early = bool(parts.early_stopping and parts.early_stopping.has_stopped)
        is_complete = (is_last or stopped_early) and not parts.control.agreed
        ending = "complete" if is_last else "stopped early"
        # none that was found damaged, whatever its step
        usable = [
            folder.name
            for folder in manifest.committed(run.checkpoints)
            if folder.name in trainer.verified
        ]
        outcome = Outcome(
            **_measured(start.plan.strategy, parts),
            **scoring.scores,
            complete=is_complete,
            ended=ending if is_complete else "preempted",
            checkpoint=usable[-1] if usable else None,
            resumed_from=checkpoint,
            train_seconds=metrics.get("train_runtime"),
            save_seconds=trainer.save_s,
            model_dir=start.recipe.output_dir,
        )
        collected = None
        if is_complete:
            parts.heartbeat.beat("export")
            collected = export.collect(start, trainer, tokens, [question for question, _ in pairs])
    if collected is not None:
        checked = export.write(
            *(start, run.run_id, trainer, *collected),
            parts.reporter.host,
            parts.control.deferred,
        )
        outcome = replace(outcome, export_check=checked)
    for folder in _outcome_folders(start, attempt, args):
        files.write_json(
            folder.outcome_file,
            replace(
                outcome,
                seconds=time.monotonic() - began,
                host_pss_bytes=parts.reporter.host.highest(),
            ),
        )


class _Scoring(TrainerCallback):
    """Scores of answers to held-out questions, which are also asked before the first step: by then
    the model is on its device, sharded or not."""

    def __init__(
        self, trainer: LowMemTrainer, max_new_tokens: int, pairs: Pairs, file: Path
    ) -> None:
        """`file` keeps the scores before the first step for later attempts."""
        self._trainer, self._max_new_tokens = trainer, max_new_tokens
        self._pairs, self._file = pairs, file
        self.scores = vars(files.read(file, Scores) or Scores()).copy()

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        # a run that goes on has no initial weights
        if state.global_step or self.scores["exact_match_before"] is not None:
            return
        self.score("before")
        if self._pairs and args.process_index == 0:
            files.write_json(self._file, self.scores)

    def score(self, when: str) -> None:
        """Answer the questions, if there are any, and add the scores. The batch is that of an
        evaluation, whose logits take more memory than the keys and values of answers."""
        if not self._pairs:
            return
        trainer = self._trainer
        empty_cache()
        # Accelerate puts autocast around the forward of the model that it prepares; PEFT's
        # generate() calls that of the base model
        with trainer.accelerator.autocast(), trainer.peaks.within("generation"):
            new = evaluate.scores(
                *(trainer.model, trainer.processing_class, self._pairs, self._max_new_tokens),
                trainer.args.device,
                trainer.stop_callback.between_batches,
                trainer.args.per_device_eval_batch_size,
            )
            empty_cache()
        self.scores |= {f"{name}_{when}": score for name, score in new.items()}
        logger.info(
            "exact match %s training: %.1f %% of %d held-out rows, BLEU %.1f",
            *(when, 100 * new["exact_match"], len(self._pairs), 100 * new["bleu"]),
        )


def _trained(
    start: RankStart, parts: Parts, scoring: _Scoring, resume: str | None
) -> dict[str, float]:
    """Train, then score what is exported, unless the ranks agree to stop. Returns Trainer's
    metrics."""
    trainer, recipe = parts.trainer, start.recipe
    metrics: dict[str, float] = {}
    try:
        try:
            metrics = trainer.train(resume_from_checkpoint=resume).metrics
        except NothingLeft as why:
            metrics = {"train_runtime": 0.0}
            logger.info("%s", why)
        if parts.control.agreed:
            return metrics
        if recipe.training.load_best_model_at_end:
            parts.heartbeat.beat("export")
            best.take(trainer, Path(str(trainer.args.output_dir)))
            scoring.scores["exported_step"] = trainer.state.best_global_step
            scoring.scores["exported_eval_loss"] = trainer.state.best_metric
        export.round_weights(trainer.model, recipe, start.plan.shape.config)
        scoring.score("after")
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
        _questions(start, trainer, sample_answers.MOST_READ),
        trainer.processing_class,
        number,
        recipe.evaluation.max_new_tokens,
        row_tokens=plan.lengths[0],
        all_tokens=sample_answers.most_tokens(plan, trainer.model),
        is_pair=plan.shape.is_encoder_decoder,
    )
    if asked.shortfall:
        logger.info("%s", asked.shortfall)
    if not len(asked):
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
            asked.write(run, attempt, Answers(step, trainer.order.samples_seen(step), texts))

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


def _questions(start: RankStart, trainer: LowMemTrainer, limit: int) -> Pairs:
    data = start.recipe.data
    if not limit or not data.holds_out:
        return []
    counts = start.tokens.row_counts if data.validation_size is not None else None
    held_out = sources.of_part(data, start.plan.data_format, counts, "validation")
    return evaluate.questions(
        *(sources.samples_in(held_out, data.max_bad_rows), limit, trainer.processing_class),
        start.plan.shape.is_encoder_decoder,
    )


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


def _resume_point(start: RankStart, run: RunDir, parts: Parts) -> tuple[str | None, str | None]:
    """(the newest checkpoint that verifies, the folder in which Trainer reads it); (None, None) to
    begin anew. Raises CheckpointError if there are checkpoints and none verifies."""
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
        checkpoint = commit.rebase(source, run.checkpoints, parts.trainer.order)
    if checkpoint is None:
        return None, None
    facts, strategy = manifest.read(checkpoint), start.plan.strategy
    logger.info("resuming from %s: %s samples seen", checkpoint.name, f"{facts['samples_seen']:,}")
    if facts["world_size"] != strategy.num_processes:
        logger.info(
            "the number of ranks was %d: random states, as of dropout, start anew",
            facts["world_size"],
        )
    if not convert.is_needed(facts, strategy):
        return str(checkpoint), str(checkpoint)
    logger.info(
        "converting it from %s with %d rank(s) for %s with %d",
        facts["mode"],
        facts["world_size"],
        strategy.mode,
        strategy.num_processes,
    )
    write = partial(convert.write, checkpoint, facts, parts.trainer)
    return str(checkpoint), str(commit.converted(checkpoint, write))
