"""Tokenise a recipe's rows once, before any rank starts (training/children/tokenise.py)."""

import fcntl
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict
from itertools import islice
from pathlib import Path
from typing import Any

from launch.base import files, locks
from launch.base.errors import DataError, LaunchError, ResourceError
from launch.base.progress import RowProgress
from launch.data import sources, token_cache
from launch.data.conversation import text_of
from training.data import row_summary, tokenise, tokenizer

STAGING = ".parts"  # ends the name of an unfinished folder
_TOKENIZER_CHARACTERS = 64 << 20  # beginning of a streamed corpus on which a tokenizer is trained
COMPARED_ROWS = 100  # rows in two readings of a tokenizer
_ABANDONED_S = 7 * 86400.0
_FIRST_LINE_S, _LONGEST_PAUSE_S = 1.0, 30.0  # time between lines on tokenised rows


def ensure(
    tokens: token_cache.TokenCache,
    say: Callable[[str], None],
    goes_on: Callable[[], None] = lambda: None,
    num_processes: int = 1,
) -> None:
    """Fill the folder of the tokenised rows (with tokenizer/ and counts.json) once, under a lock,
    and again if its hashes show damage.

    `goes_on` is called every thousand rows. Rows that a killed start has tokenised are not
    tokenised again."""
    folder = tokens.folder
    if folder.exists() and not token_cache.fault(folder, goes_on):
        return
    folder.parent.mkdir(parents=True, exist_ok=True)
    with folder.with_suffix(".lock").open("w") as lock:
        locks.flock(lock.fileno(), fcntl.LOCK_EX, folder)
        # verified again: another start may have made it meanwhile
        fault = token_cache.fault(folder, goes_on) if folder.exists() else None
        if fault:
            say(f"the tokenised rows in {folder} are damaged ({fault}): tokenising again")
        if fault or not folder.exists():
            _clear_abandoned(folder.parent)
            staging = folder.with_name(f".{folder.name}{STAGING}")
            staging.mkdir(exist_ok=True)
            try:
                _write(tokens, staging, say, goes_on, num_processes)
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
        name = staging.name.removeprefix(".").removesuffix(STAGING)
        if time.time() - staging.stat().st_mtime >= _ABANDONED_S:
            # another process may work on it
            with (folder / f"{name}.lock").open("w") as lock, suppress(BlockingIOError):
                locks.flock(lock.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB, folder)
                shutil.rmtree(staging)


def _write(
    tokens: token_cache.TokenCache,
    folder: Path,
    say: Callable[[str], None],
    goes_on: Callable[[], None],
    num_processes: int,
) -> None:
    data, how = tokens.recipe.data, (say, goes_on, num_processes)
    if not (folder / tokenise.TOKENIZER).exists():
        aside = folder / f"{tokenise.TOKENIZER}.tmp"
        trained = tokenizer_of(tokens, say)
        tokenizer.save(trained, aside, tokens.model.config if _is_beside(tokens) else None)
        aside.rename(folder / tokenise.TOKENIZER)
    loaded = tokenizer.load(folder / tokenise.TOKENIZER)
    counts: dict[str, Any] = {"tokenizer_note": (note := _reading(tokens, loaded))}
    if note:
        say(note)
    if not data.streaming and (job := tokenise.job_of_part(tokens, folder, "train", goes_on)):
        counts["train"] = _part(job, tokens.rows, data.max_train_samples, *how)
    if job := tokenise.job_of_part(tokens, folder, "validation", goes_on):
        counts["validation"] = _part(job, None, data.max_validation_samples, *how)
    for unneeded in [*folder.glob("*.tmp"), *folder.glob("*.json")]:
        unneeded.unlink()
    files.write_json(folder / token_cache.TOKENS_MADE_OF, tokens.identity)
    files.write_json(folder / token_cache.SHOWN_ROWS, row_summary.for_report(tokens, loaded))
    files.sync_all(folder)
    files.write_json(folder / token_cache.TOKENS_READY, {**counts, "vocabulary": len(loaded)})
    token_cache.write_hashes(folder, goes_on)


def tokenizer_of(tokens: token_cache.TokenCache, say: Callable[[str], None]) -> Any:
    """Load the tokenizer of the recipe's folder, or train a tokenizer."""
    section, config = tokens.recipe.tokenizer, tokens.model.config
    local, is_pair = section.path or tokens.recipe.model.path, tokens.model.is_encoder_decoder
    if local:
        made = tokenizer.load(Path(local), section.chat_template, section.loading)
        tokenizer.add_tokens(made, section.add_tokens)
        if _is_beside(tokens):
            made = tokenizer.read_beside(made, config)
        if rows := config.get("vocab_size"):
            tokenizer.check_ids(made, rows, local)
    else:
        size, name = (
            section.vocab_size or config["vocab_size"],
            sources.name(tokens.of_part("train")),
        )
        say(f"training a tokenizer of at most {size:,} tokens on {name}")
        made = tokenizer.train(
            _texts_for_tokenizer(tokens, say),
            *(section, size, config if _is_beside(tokens) else None),
        )
        if section.chat_template:
            tokenizer.set_template(made, section.chat_template)
    tokenizer.set_languages(made, section, is_pair)
    if is_pair:
        tokenizer.end_inputs(made)
    return made


def _is_beside(tokens: token_cache.TokenCache) -> bool:
    """True for rows with the ids of AutoTokenizer beside the model's config.json."""
    is_auto = tokenizer.loading_of_recipe(tokens.recipe) == "auto"
    return is_auto and token_cache.BESIDE_CONFIG in tokens.identity


def _texts(tokens: token_cache.TokenCache) -> Iterator[str]:
    """Yield the text of each row that is trained, repeated rows once."""
    once = [source for source in tokens.of_part("train") if not source.is_repeat]
    return map(text_of, sources.samples_in(once, tokens.recipe.data.max_bad_rows))


def _texts_for_tokenizer(
    tokens: token_cache.TokenCache, say: Callable[[str], None]
) -> Iterator[str]:
    """Yield the texts that a tokenizer is trained on, of a streamed corpus the first ones, and say
    at intervals how many were read."""
    due, characters = time.monotonic() + _LONGEST_PAUSE_S, 0
    for number, text in enumerate(_texts(tokens)):
        if time.monotonic() > due:
            say(f"training the tokenizer: {number:,} rows read so far")
            due += _LONGEST_PAUSE_S
        yield text
        characters += len(text)
        if tokens.recipe.data.streaming and characters >= _TOKENIZER_CHARACTERS:
            return


def _reading(tokens: token_cache.TokenCache, loaded: Any) -> str:
    """The line of the plan on a folder whose tokenizer.json says otherwise than AutoTokenizer; ""
    if it does not. Raises ResourceError where AutoTokenizer loses characters of the rows."""
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


def _part(
    job: tokenise.TokeniseJob,
    rows: int | None,
    limit: int | None,
    say: Callable[[str], None],
    goes_on: Callable[[], None],
    num_processes: int,
) -> dict[str, Any]:
    """Tokenise the missing units of a part and return its counts (encode.CacheCounts).

    `rows` is the number of rows of the part, or None if they are not counted."""
    counter = _RowCounter(job.name, rows, say, goes_on)
    total, bad = tokenise.tokenise_part(job, limit, num_processes, counter, say)
    if not total.rows:
        paths = dict.fromkeys(str(source.path) for source in job.sources)
        raise DataError(
            f"{', '.join(paths)}: no row has a target to train on ({total.samples:,} read,"
            f" {total.dropped:,} without a target within max_length {job.settings.max_length});"
            " check the columns and data.max_length"
        )
    counts = asdict(total)
    say(summary(job.name, counts, job.settings.max_length))
    if bad.count:
        say(
            f"{job.name}: {bad.count:,} bad rows left out (data.max_bad_rows {bad.limit}); first"
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
            f" each on average, {mean / max_length:.1%} full"
        )
    meanings = {
        "truncated": f"truncated at max_length {max_length}",
        "split": (
            "conversations as a row for each answer (the chat template renders a turn differently"
            " once others follow, or ends it with no token)"
        ),
        "unread": (
            "conversations without their messages behind the last answer (a T5 reads those before"
            " it)"
        ),
        "dropped": "left out (no target to train on)",
    }
    counted = [f"{counts[key]:,} {meaning}" for key, meaning in meanings.items() if counts[key]]
    if counts["dropped"] > counts["samples"] / 2:
        counted[-1] += "; more than half: check data.max_length and the columns"
    return ", ".join([line, *counted])


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
