"""Tokenise a recipe's rows once: `python -m training.data.prepare ATTEMPT_FOLDER PROCESSES`, before
any rank starts."""

from __future__ import annotations

import fcntl
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from launch.base import files, locks, modules
from launch.base import processes as base_processes
from launch.base.errors import DataError, LaunchError, ResourceError, Stopped
from launch.base.progress import RowProgress
from launch.data import token_cache, token_hashes
from launch.data.token_cache import TokenCache
from launch.run_folder.layout import AttemptDir
from training.compat import without_torch
from training.control.heartbeat import Heartbeat
from training.control.stop_word import Control, Halted

if TYPE_CHECKING:
    from training.data.tokenise import TokeniseJob

STAGING = ".parts"  # ends the name of an unfinished folder
_TOKENIZER_CHARACTERS = 64 << 20  # beginning of a streamed corpus on which a tokenizer is trained
COMPARED_ROWS = 100  # rows in two readings of a tokenizer
_ABANDONED_S = 7 * 86400.0
_FIRST_LINE_S, _LONGEST_PAUSE_S = 1.0, 30.0  # time between lines on tokenised rows


def ensure(
    tokens: TokenCache,
    say: Callable[[str], None],
    goes_on: Callable[[], None] = lambda: None,
    processes: int = 1,
) -> None:
    """Fill the folder of the tokenised rows (with tokenizer/ and counts.json) once, under a lock,
    and again if its hashes show damage.

    `goes_on` is called every thousand rows. Rows that a killed start has tokenised are not
    tokenised again."""
    folder = tokens.folder
    if folder.exists() and not token_hashes.fault(folder, goes_on):
        return
    folder.parent.mkdir(parents=True, exist_ok=True)
    with folder.with_suffix(".lock").open("w") as lock:
        locks.flock(lock.fileno(), fcntl.LOCK_EX, folder)
        # verified again: another start may have made it meanwhile
        fault = token_hashes.fault(folder, goes_on) if folder.exists() else None
        if fault:
            say(f"the tokenised rows in {folder} are damaged ({fault}): tokenising again")
        if fault or not folder.exists():
            _clear_abandoned(folder.parent)
            staging = folder.with_name(f".{folder.name}{STAGING}")
            staging.mkdir(exist_ok=True)
            try:
                _write(tokens, staging, say, goes_on, processes)
            except LaunchError:
                shutil.rmtree(staging)
                raise
            if folder.is_file():  # no cache of ours; a folder cannot replace it
                folder.unlink()
            shutil.rmtree(folder, ignore_errors=True)
            staging.rename(folder)


def _clear_abandoned(folder: Path) -> None:
    """Remove folders that were left unfinished long ago, for example because the data has
    changed."""
    for staging in folder.glob(f".*{STAGING}"):
        if time.time() - staging.stat().st_mtime < _ABANDONED_S:
            continue
        name = staging.name.removeprefix(".").removesuffix(STAGING)
        # another process may work on it
        with (folder / f"{name}.lock").open("w") as lock, suppress(BlockingIOError):
            locks.flock(lock.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB, folder)
            shutil.rmtree(staging)


def _write(
    tokens: TokenCache,
    folder: Path,
    say: Callable[[str], None],
    goes_on: Callable[[], None],
    processes: int,
) -> None:
    # imported late: they take a second, and most starts find their rows tokenised
    with modules.uncollected():
        from training.data import row_summary, tokenise, tokenizer

    source = tokens.recipe.data
    if not (folder / tokenise.TOKENIZER).exists():
        aside = folder / f"{tokenise.TOKENIZER}.tmp"
        trained = tokenizer_of(tokens, say)
        tokenizer.save(trained, aside, tokens.model.config if _is_beside(tokens) else None)
        aside.rename(folder / tokenise.TOKENIZER)
    loaded = tokenizer.load(folder / tokenise.TOKENIZER)
    counts: dict[str, Any] = {"tokenizer_note": (note := _reading(tokens, loaded))}
    if note:
        say(note)
    if not source.streaming:
        job = tokenise.job_of_part(tokens, folder, "train", goes_on)
        assert job is not None
        limit = source.max_train_samples
        counts["train"] = _part(job, tokens.rows, limit, say, goes_on, processes)
    if job := tokenise.job_of_part(tokens, folder, "validation", goes_on):
        limit = source.max_validation_samples
        counts["validation"] = _part(job, None, limit, say, goes_on, processes)
    for unneeded in [*folder.glob("*.tmp"), *folder.glob("*.json")]:
        unneeded.unlink()
    files.write_json(folder / token_cache.TOKENS_MADE_OF, tokens.identity)
    files.write_json(folder / token_cache.SHOWN_ROWS, row_summary.for_report(tokens, loaded))
    files.sync_all(folder)
    files.write_json(folder / token_cache.TOKENS_READY, {**counts, "vocabulary": len(loaded)})
    token_hashes.write(folder, goes_on)


def tokenizer_of(tokens: TokenCache, say: Callable[[str], None]) -> Any:
    """Load the tokenizer of the recipe's folder, or train a tokenizer."""
    from launch.data import sources
    from training.data import tokenizer

    recipe = tokens.recipe
    data, section = recipe.data, recipe.tokenizer
    local, is_pair = section.path or recipe.model.path, tokens.model.is_encoder_decoder
    if local:
        loaded = tokenizer.load(Path(local), section.chat_template, section.loading)
        tokenizer.add_tokens(loaded, section.add_tokens)
        if _is_beside(tokens):
            loaded = tokenizer.read_beside(loaded, tokens.model.config)
        if rows := tokens.model.config.get("vocab_size"):
            tokenizer.check_ids(loaded, rows, local)
        tokenizer.set_languages(loaded, section, is_pair)
        if is_pair:
            tokenizer.end_inputs(loaded)
        return loaded
    size = section.vocab_size or tokens.model.config["vocab_size"]
    named = sources.of_part(data, tokens.data_format, tokens.row_counts, "train")
    say(f"training a tokenizer of at most {size:,} tokens on {sources.name(named)}")
    texts = _said(_texts(tokens), say)
    texts = _first(texts) if data.streaming else texts
    config = tokens.model.config if _is_beside(tokens) else None
    trained = tokenizer.train(texts, section, size, config)
    if section.chat_template:
        tokenizer.set_template(trained, section.chat_template)
    tokenizer.set_languages(trained, section, is_pair)
    if is_pair:
        tokenizer.end_inputs(trained)
    return trained


def _is_beside(tokens: TokenCache) -> bool:
    """True for rows with the ids of AutoTokenizer beside the model's config.json."""
    from training.data import tokenizer

    is_auto = tokenizer.loading_of_recipe(tokens.recipe) == "auto"
    return is_auto and token_cache.BESIDE_CONFIG in tokens.identity


def _texts(tokens: TokenCache) -> Iterator[str]:
    """Yield the text of each row that is trained, repeated rows once."""
    from launch.data import sources
    from launch.data.conversation import text_of
    from launch.data.rows import BadRows

    data = tokens.recipe.data
    for source in sources.of_part(data, tokens.data_format, tokens.row_counts, "train"):
        if not source.is_repeat:
            yield from map(text_of, source.read(BadRows(data.max_bad_rows)))


def _said(texts: Iterator[str], say: Callable[[str], None]) -> Iterator[str]:
    """Yield the texts, and say at intervals how many a tokenizer has been trained on."""
    due = time.monotonic() + _LONGEST_PAUSE_S
    for number, text in enumerate(texts):
        if time.monotonic() > due:
            say(f"training the tokenizer: {number:,} rows read so far")
            due += _LONGEST_PAUSE_S
        yield text


def _reading(tokens: TokenCache, loaded: Any) -> str:
    """The line of the plan on a folder whose tokenizer.json says otherwise than AutoTokenizer; ""
    if it does not. Raises ResourceError where AutoTokenizer loses characters of the rows."""
    from training.data import tokenizer

    section = tokens.recipe.tokenizer
    local = Path(section.path or tokens.recipe.model.path or "")
    if not (local.parts and (local / "tokenizer.json").is_file()):
        return ""
    by_file = tokenizer.load(local, section.chat_template, "file")
    tokenizer.add_tokens(by_file, section.add_tokens)
    try:
        first = tokenizer.difference(by_file, loaded, islice(_texts(tokens), COMPARED_ROWS))
    except ResourceError as error:
        raise ResourceError(
            f"{local}: {error}, beside a config.json of type {tokens.model.config['model_type']};"
            " --tokenizer.loading=file trains the ids of tokenizer.json"
        ) from error
    if first is None:
        return ""
    return (
        f"{local}: {first}; trained are AutoTokenizer's, which the exported folder gives"
        " (tokenizer.loading: file trains those of tokenizer.json)"
    )


def _first(texts: Iterator[str]) -> Iterator[str]:
    """Yield the first texts of a streamed corpus, enough to train a tokenizer."""
    characters = 0
    for text in texts:
        yield text
        characters += len(text)
        if characters >= _TOKENIZER_CHARACTERS:
            return


def _part(
    job: TokeniseJob,
    rows: int | None,
    limit: int | None,
    say: Callable[[str], None],
    goes_on: Callable[[], None],
    processes: int,
) -> dict[str, Any]:
    """Tokenise the missing units of a part and return its counts (encode.CacheCounts).

    `rows` is the number of rows of the part, or None if they are not counted."""
    from training.data import tokenise_pool

    name = job.name
    counter = _RowCounter(name, rows, say, goes_on)
    total, bad = tokenise_pool.part(job, limit, processes, counter, say)
    if not total.rows:
        paths = dict.fromkeys(str(source.path) for source in job.sources)
        raise DataError(
            f"{', '.join(paths)}: no row has a target to train on ({total.samples:,} read,"
            f" {total.dropped:,} without a target within max_length {job.max_length}); check the"
            " columns and data.max_length"
        )
    counts = asdict(total)
    say(summary(name, counts, job.max_length))
    if bad.count:
        say(
            f"{name}: {bad.count:,} bad rows left out (data.max_bad_rows {bad.limit}); first"
            f" {bad.errors[0]}"
        )
    return counts


def summary(name: str, counts: dict[str, Any], max_length: int) -> str:
    """Describe a tokenised file in one line."""
    mean = counts["tokens"] / counts["rows"]
    line = f"{name}: {counts['rows']:,} rows, {mean:.0f} tokens on average"
    if any(length != labels for length, labels in counts["lengths"]):  # a T5's
        line += f" and {counts['target_tokens'] / counts['rows']:.0f} of an answer"
    line += f", longest {counts['longest']}"
    if counts["documents"]:
        each = counts["documents"] / counts["rows"]
        line = (
            f"{name}: {counts['documents']:,} rows in {counts['rows']:,} sequences, {each:.1f} in"
            " each on average, "
        )
        line += f"{mean / max_length:.1%} full"
    if counts["truncated"]:
        line += f", {counts['truncated']:,} truncated at max_length {max_length}"
    if counts["split"]:
        line += (
            f", {counts['split']:,} conversations as a row for each answer (the chat template"
            " renders a turn differently once others follow, or ends it with no token)"
        )
    if counts["unread"]:
        line += (
            f", {counts['unread']:,} conversations without their messages behind the last answer"
            " (a T5 reads those before it)"
        )
    if counts["dropped"]:
        line += f", {counts['dropped']:,} left out (no target to train on)"
        if counts["dropped"] > counts["samples"] / 2:
            line += "; more than half: check data.max_length and the columns"
    return line


class _RowCounter:
    """Counts the rows of a part, and says at growing intervals how many are tokenised."""

    def __init__(
        self,
        name: str,
        total: int | None,
        say: Callable[[str], None],
        goes_on: Callable[[], None],
    ) -> None:
        self._name, self._total, self._say, self._goes_on = name, total, say, goes_on
        self._rows, self._began = 0, time.monotonic()
        self._due = self._began + _FIRST_LINE_S

    def __call__(self, rows: int) -> None:
        self._rows += rows
        self._goes_on()
        now_s = time.monotonic()
        if now_s >= self._due:
            seconds = now_s - self._began
            self._say(RowProgress(self._name, self._rows, self._total).line(seconds))
            self._due = now_s + min(max(_FIRST_LINE_S, seconds / 10), _LONGEST_PAUSE_S)


def main() -> int:
    attempt, processes = AttemptDir(Path(sys.argv[1])), int(sys.argv[2])
    base_processes.settle_process()
    without_torch.hide()
    heartbeat = Heartbeat(attempt.heartbeat_file(0))
    heartbeat.beat("tokenise")
    try:
        base_processes.check_threads()
        Control().listen()
        ensure(attempt.read_tokenising(), partial(print, flush=True), heartbeat.beat, processes)
    except Halted as halted:
        attempt.leave_word(0, Stopped(str(halted), halted.word.exit_code))
        return halted.word.exit_code
    except LaunchError as error:
        attempt.leave_word(0, error)
        return error.exit_code
    except BaseException as error:
        attempt.leave_word(0, error)
        raise
    return 0


if __name__ == "__main__":
    sys.exit(main())
