"""Results of a run: steps, evaluations and failures, as frozen dataclasses."""

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from launch.schema.machine import GIB
from launch.schema.model_sections import Dtype, TokenizerLoading
from launch.schema.plan import ModelFamily


@dataclass(frozen=True, slots=True)  # there are as many as a run has steps
class StepEvent:
    """One optimizer step as rank 0 writes it to events.jsonl. Counts are of all ranks, and `tokens`
    does not count padding."""

    step: int
    max_steps: int
    epoch: float
    samples_seen: int
    tokens: float
    samples: float
    loss: float
    learning_rate: float
    grad_norm: float | None
    seconds: float
    vram_allocated_bytes: int  # peak over ranks since the start
    vram_reserved_bytes: int
    vram_total_bytes: int  # 0: no GPU
    host_pss_bytes: int  # of the whole job, now, as base.processes.JobMemory counts
    time: float  # unix time
    computed_tokens: int | None = None  # padding included; None: not counted
    # the part of `seconds` until rank 0 had its batches and all ranks had theirs
    data_seconds: float | None = None

    def line(self, time_left: str = "") -> str:
        """The line in every log. Loss, tokens, samples and seconds may be means over the steps
        since the last line."""
        parts = (f"step {self.step}/{self.max_steps}", f"epoch {self.epoch:.2f}", time_left)
        return "  ".join([*filter(None, parts), self.metrics()])

    def metrics(self) -> str:
        """The text that every screen and log shows for a step's figures."""
        rate = 1 / self.seconds if self.seconds > 0 else math.inf
        vram = (
            f"  VRAM {self.vram_allocated_bytes / GIB:.2f} GiB (reserved"
            f" {self.vram_reserved_bytes / GIB:.2f} of {self.vram_total_bytes / GIB:.1f})"
            if self.vram_total_bytes
            else ""
        )
        return (
            f"loss {self.loss:.4f}  lr {self.learning_rate:.3e}  {self.seconds:.3f} s/step"
            f"  {self.samples * rate:,.1f} samples/s  {self.tokens * rate:,.0f} tokens/s"
            f"{vram}  RAM {self.host_pss_bytes / GIB:.2f} GiB"
        )


@dataclass(frozen=True)
class HeldOut:
    """One evaluation as rank 0 writes it to held_out.jsonl."""

    step: int
    samples_seen: int
    loss: float
    seconds: float
    time: float  # unix time, at its end


@dataclass(frozen=True)
class Question:
    """A held-out question, and the right answer."""

    prompt: str
    reference: str


@dataclass(frozen=True)
class Questions:
    """The questions that a run answers at each evaluation: questions.json."""

    questions: tuple[Question, ...]


@dataclass(frozen=True)
class Answers:
    """Answers to the questions of a run after a step, as rank 0 writes them to answers.jsonl."""

    step: int
    samples_seen: int
    texts: tuple[str, ...]


@dataclass(frozen=True)
class SecondStep:
    """Memory of the first step in the steady state, on the fullest rank: second_step.json."""

    allocated_bytes: int
    reserved_bytes: int
    host_pss_bytes: int  # of the whole job: the highest of the steps so far
    free_bytes: int = 0  # of rank 0's card


@dataclass(frozen=True)
class RankError:
    """The error of a failing rank: ranks/<r>/error.json."""

    rank: int
    type: str
    message: str
    time: float  # unix time
    exit_code: int | None = None  # of a LaunchError, which the user can mend
    fix: str = ""
    traceback: str = ""


@dataclass(frozen=True)
class Scores:
    """Scores of answers to held-out rows, and the exported checkpoint: evaluation.json, and a part
    of outcome.json."""

    exact_match_before: float | None = None
    exact_match_after: float | None = None
    bleu_before: float | None = None
    bleu_after: float | None = None
    exported_step: int | None = None  # None: the last one
    exported_eval_loss: float | None = None


@dataclass(frozen=True)
class PhasePeaks:
    """The most bytes of one part of a run on the fullest rank's device, as
    torch.cuda.max_memory_allocated and max_memory_reserved count them."""

    allocated_bytes: int = 0
    reserved_bytes: int = 0

    @classmethod
    def highest(cls, peaks: "Collection[PhasePeaks]") -> "PhasePeaks":
        return cls(
            max((peak.allocated_bytes for peak in peaks), default=0),
            max((peak.reserved_bytes for peak in peaks), default=0),
        )


ALONE = 0.9  # Outcome.core_share at least, of a run that others did not slow down


@dataclass(frozen=True)
class Outcome(Scores):
    """The end of an attempt, as rank 0 writes it: outcome.json."""

    # a run that trained nothing leaves figures at None or 0
    complete: bool = field(kw_only=True)
    # "stopped early" is complete: training.early_stopping_patience
    ended: Literal["complete", "stopped early", "preempted"] = field(kw_only=True)
    checkpoint: str | None = None  # its newest
    resumed_from: str | None = None
    model_dir: str = ""
    export_check: str = ""  # what was compared of the exported folder
    step: int = 0
    max_steps: int = 0
    loss: float | None = None  # None: the run continued at its last step
    eval_loss: float | None = None
    # states that rank 0 holds; None: not measured
    weights_bytes: int | None = None
    gradients_bytes: int | None = None
    optimizer_bytes: int | None = None
    offloaded_bytes: int | None = None
    vram_allocated_bytes: int = 0
    vram_reserved_bytes: int = 0
    # of each part: load, first_step, step, evaluation, save, generation; {} without a GPU
    phases: Mapping[str, PhasePeaks] = field(default_factory=dict)
    host_pss_bytes: int = 0
    train_seconds: float | None = None
    save_seconds: float = 0.0
    # of the time from the second step on in which rank 0's threads could run, that they had a core
    core_share: float = 1.0
    seconds: float = 0.0


@dataclass(frozen=True)
class UsedTokens:
    """The tokenised rows that a run trains: tokens.json."""

    folder: Path
    # token_cache.token_identity(), because the folder may be deleted one day; None: of a trial
    made_of: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        made_of = self.made_of
        if made_of is not None and not (
            isinstance(made_of.get("limits"), list)
            and isinstance(made_of.get("validation", 0), str | None)
        ):
            raise ValueError("made_of: expected the keys limits, a list, and validation, a text")


@dataclass(frozen=True)
class Continues:
    """The checkpoint of an older run that a run continues from: continues.json."""

    checkpoint: Path
    samples_seen: int
    group_size: int | None = None  # of rows grouped by length


# of an exported file of weights: a loader maps a whole file, which may not exceed RAM and swap
# (transformers 5 writes 50 GB)
MAX_SHARD_BYTES = 5_000_000_000
# the same where host RAM holds a training's states: what a card writes is copied to it by file
MAX_SMALL_SHARD_BYTES = 1_000_000_000


DOWNLOADED = ".downloaded"  # a file in a downloaded folder


@dataclass(frozen=True)
class ExportedModel:
    """The origin of a finished model: lowmem.json in its folder."""

    run: str
    recipe: str = ""
    step: int = 0
    base: str = ""  # of a merged adapter
    quantization: Mapping[str, Any] | None = None  # of the weights that the adapter was trained on
    dtype: Dtype | None = None  # of the weights in training; None: an older version wrote it
    tokenizer_loading: TokenizerLoading = "auto"
    downloaded: tuple[str, ...] = ()  # model and data that were named on a hub
    check: str = ""  # of the folder, loaded as a user does; "": an older version wrote it


@dataclass(frozen=True)
class Downloaded:
    """The origin of a downloaded folder: the file DOWNLOADED in it."""

    name: str
    commit: str
    licence: str  # as its card names it; "": it names none
    sizes: Mapping[str, int] = field(default_factory=dict)  # bytes of each file

    def __str__(self) -> str:
        return (
            f"{self.name} at commit {self.commit[:12]}, licence:"
            f" {self.licence or 'none in its card'}"
        )


EXPORTED = ".exported"  # a file in the folder of a finished export


@dataclass(frozen=True)
class ExportedFrom:
    """The source of a finished export: the file EXPORTED in its folder."""

    model: str
    weights: str  # weight_files.weights_fingerprint()
    to: str
    file_type: str  # of a GGUF file; "": none
    sizes: Mapping[str, int] = field(default_factory=dict)  # bytes of each file beside this one


@dataclass(frozen=True)
class Xid:
    """An error that the NVIDIA driver reported of a card."""

    number: int
    card: str
    line: str  # of the report


@dataclass
class Ended:
    """The end of an attempt's ranks, as seen from outside."""

    returncode: int = 0  # exit status of the launcher; negative: the signal that ended it
    host_peak_bytes: int = 0
    # least of what the job had and what was free beside it; 0: not measured
    host_left_bytes: int = 0
    is_refuted: bool = False  # the second step took more than was planned
    hang: str = ""  # the rank that was silent, where and how long
    pressure: str = ""  # why the host's RAM was about to run out
    is_yielded: bool = False  # its user gave its memory to the runs that wait
    # pids of ranks that ran on after another rank had ended, and were ended here
    ended_ranks: list[int] = field(default_factory=list)
    unkillable: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class AttemptRecord:
    """The facts of an ended attempt. classify() reads nothing else."""

    ended: Ended
    rank_errors: tuple[RankError, ...]  # earliest first
    log_tail: str
    # growth of the kernel's oom_kill counter during the attempt; None: it cannot be read here
    oom_kills: int | None
    host_limit_bytes: int
    completed: bool  # rank 0 wrote its outcome and reached the last step
    stopped_by: int | None = None  # signal number that the user sent to the supervisor
    oom_kills_of_machine: bool = False  # other programs count too
    preempted: Outcome | None = None  # of ranks that agreed to stop
    silent_ranks: tuple[tuple[int, int], ...] = ()  # (rank, pid) of ranks that wrote no error
    vram_reserved_bytes: int = 0  # of the fullest rank at the last logged step
    vram_total_bytes: int = 0  # 0: no GPU, or no step
    xids: tuple[Xid, ...] = ()  # of the ranks' cards during the attempt
    section: str = ""  # of the rank that failed first, as in Failure


@dataclass(frozen=True)
class Failure:
    """The cause of an attempt that ended without a model, the line that proves it, and one fix."""

    kind: str
    exit_code: int
    cause: str
    proof: str
    fix: str
    # the section in the heartbeat of the rank that failed first: load, step, evaluation, ...
    section: str = ""


@dataclass(frozen=True)
class AttemptEnd:
    """The end of an attempt, as the supervisor saw it: supervisor.json."""

    exit_code: int
    failure: Failure | None
    seconds: float
    host_peak_bytes: int = 0
    ended_at: float = 0.0  # unix time; 0: a record of an older version


@dataclass(frozen=True)
class TokenisingEnd:
    """The end of a successful tokenising in an attempt: tokenised.json."""

    seconds: float


@dataclass(frozen=True)
class RunResult:
    """The end of a run, as the report shows it."""

    run_dir: str
    exit_code: int
    failure: Failure | None
    seconds: float
    host_peak_bytes: int
    summary: Mapping[str, Any] = field(default_factory=dict)  # rank 0's Outcome, of a complete run
    plan_again: bool = False  # stopped because its second step took more memory than predicted
    note: str = ""  # further information for the reader
    last_step: int = 0  # that a rank reached
    # the minimum of the job's bytes and the free bytes together while it ran; 0: not measured
    host_left_bytes: int = 0
    unkillable: tuple[int, ...] = ()  # processes of the run that still exist


@dataclass(frozen=True)
class ModelParts:
    """The parameters of a model as named_parameters() gives them, and its family."""

    parameters: dict[str, tuple[int, ...]]
    family: ModelFamily


@dataclass(frozen=True)
class NewTokens:
    """Tokens that were asked for: `ids` of those that a tokenizer lacks and gets, and of those that
    are `there` already."""

    size_before: int  # rows of an embedding with a row for each token
    size: int  # after the tokens are added
    ids: dict[str, int]
    there: dict[str, int]


# of host RAM that the copy for an export's check may always take; a larger one, what the plan has
CHECK_BYTES = 256 << 20


@dataclass(frozen=True)
class Prompt:
    """A prompt, and the greedy answer to it. `messages` is empty for a text that is continued."""

    messages: tuple[Mapping[str, Any], ...]
    tools: Any
    text: str  # as the chat template renders it
    ids: tuple[int, ...]
    reply: tuple[int, ...]  # with its end token
    margins: tuple[float, ...]  # of the two best logits, at each token of the reply


@dataclass(frozen=True)
class ExpectedAnswers:
    """Answers that a converted model must give, and ids that its tokenizer must give, computed by
    the model that is converted: expected.json."""

    prompts: tuple[Prompt, ...]
    texts: tuple[tuple[str, tuple[int, ...]], ...]  # with their ids
    chat_template: str
    bos_id: int | None
    eos_id: int
    ends: tuple[int, ...]  # ids that end an answer
    end_texts: tuple[str, ...]
    origin: str  # of the prompts


@dataclass(frozen=True)
class ConvertedAnswers:
    """Answers of the converted file: converted.json."""

    refused: str = ""  # the reason for which nothing was converted
    rule: str = ""  # by which texts are split before they become tokens
    is_searched: bool = False  # the converter did not know the rule
    other_ids: str = ""  # a text whose ids differ, of a rule that the converter knows
    prompts: tuple[tuple[int, ...], ...] = ()  # ids as llama.cpp renders each
    answers: tuple[tuple[int, ...], ...] = ()  # tokens in the place of the expected ones


@dataclass(frozen=True)
class FinishedModel:
    """The folders of a finished model, and how it is loaded."""

    folder: Path
    base: Path  # of an adapter; of another model its own folder
    tokenizer: Path
    dtype: Dtype  # of the weights in memory
    quantization: Mapping[str, Any] | None = None  # of the base's linear weights

    @property
    def is_adapter(self) -> bool:
        return self.folder != self.base


@dataclass(frozen=True)
class Evaluation:
    """Figures of a model on the rows of a file: `evaluate --json`. BLEU and ROUGE-L are from 0 to
    100, exact match is a share from 0 to 1."""

    model: str
    file: str
    device: str
    rows: int  # of the file
    rows_left_out: int  # without a target within data.max_length
    rows_truncated: int  # at data.max_length
    target_tokens: int
    loss: float  # the mean over the target tokens
    perplexity: float
    questions: int  # rows with an answer, which the model was asked
    rows_at_once: int
    exact_match: float | None = None  # None: there is no question
    bleu: float | None = None
    rouge_l: float | None = None
    notes: tuple[str, ...] = ()
