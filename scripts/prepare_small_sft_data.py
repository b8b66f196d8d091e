#!/usr/bin/env python3
"""Draw a small training file and a validation file from a large one, as the guide for a host of 16
GB does.

    prepare_small_sft_data.py --input big.jsonl --num_samples 5000 --valid_ratio 0.1

writes data/sft_train_small_train.parquet and data/sft_train_small_valid.parquet (--output
data/sft_train_small.parquet) with the columns prompt and response, which sft_fast reads. Any file
that training reads will do; its columns are found by name, or named. It is read once, row by row;
rows without an answer, and rows that are there twice, are left out.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Iterator
from pathlib import Path

# instead of scripts/, whose names are nobody's modules
sys.path[0] = str(Path(__file__).resolve().parent.parent)

# E402: what is imported below is ours, and lies in the folder above; `interpreter` needs the
# standard library only, the rest may need packages that this Python lacks, so that another one has
# to go on first.
from launch.base import interpreter  # noqa: E402

interpreter.go_on_with_packages()


from launch.base.errors import ConfigError, DataError, LaunchError, ResourceError  # noqa: E402
from launch.base.text import shown  # noqa: E402
from launch.data import columns  # noqa: E402
from launch.data.conversation import Sample  # noqa: E402
from launch.data.rows import BadRows, read_samples  # noqa: E402
from launch.schema.data_section import DataSection  # noqa: E402
from scripts.make_sample_data import is_sample, write_part  # noqa: E402

Row = tuple[str, str]  # prompt, response


def pair(sample: Sample) -> Row | None:
    """Split a conversation into its last answer and all turns before it; None if it has no
    answer. Raises DataError for content that a prompt and a response cannot hold."""
    if isinstance(sample, str):
        return None
    messages = sample.messages
    others = {key for message in messages for key in message} - {"role", "content"}
    if sample.tools or others:
        names = ", ".join(sorted(others | ({"tools"} if sample.tools else set())))
        raise DataError(
            f"a row has {names}, which the columns prompt and response cannot hold; train on the"
            f" file itself, or leave them out with --ignore_columns={names.replace(' ', '')}"
        )
    last = max(
        (i for i, message in enumerate(messages) if message["role"] == "assistant"), default=None
    )
    if last is None or not messages[last]["content"].strip():
        return None
    return "\n".join(message["content"] for message in messages[:last]), messages[last]["content"]


def draw(rows: Iterator[Row], count: int, rng: random.Random) -> tuple[list[Row], int]:
    """Draw `count` rows, each with the same probability, in a random order. Returns them and the
    number of all rows."""
    drawn: list[Row] = []
    number = 0
    for number, row in enumerate(rows, 1):
        if len(drawn) < count:
            drawn.append(row)
        elif (place := rng.randrange(number)) < count:
            drawn[place] = row
    rng.shuffle(drawn)
    return drawn, number


def split(rows: list[Row], num_samples: int, valid_ratio: float) -> tuple[list[Row], list[Row]]:
    """Split rows into (training, validation): as many as requested, or fewer in that proportion.
    Neither part is empty."""
    num_valid = max(1, round(num_samples * valid_ratio))
    if len(rows) < num_samples + num_valid:
        num_valid = min(max(1, round(len(rows) * valid_ratio / (1 + valid_ratio))), len(rows) - 1)
    return rows[num_valid:], rows[:num_valid]


def distinct(rows: Iterator[Row]) -> Iterator[Row]:
    """Yield each row once: a row in both files would be trained and then used for validation."""
    hashes: set[int] = set()  # smaller than the texts
    for row in rows:
        if hash(row) not in hashes:
            hashes.add(hash(row))
            yield row


def prepare(arguments: argparse.Namespace) -> Iterator[str]:
    """Write both files and yield lines that report it."""
    if arguments.num_samples < 1 or not 0 < arguments.valid_ratio < 1:
        values = f"{arguments.num_samples} and {arguments.valid_ratio}"
        raise ConfigError(
            f"--num_samples and --valid_ratio: found {values}, expected at least 1, and between 0"
            " and 1"
        )
    if arguments.output.suffix != ".parquet":
        raise ConfigError(f"--output {arguments.output}: expected a name that ends in .parquet")
    stem = arguments.output.with_suffix("")
    parts = [stem.with_name(f"{stem.name}_{part}.parquet") for part in ("train", "valid")]
    for path in parts:
        if path.exists() and path.samefile(arguments.input):
            raise ConfigError(
                f"--input {path}: would be replaced by the rows drawn from it; give another"
                " --output"
            )
        if path.exists() and not arguments.overwrite and not is_sample(path):
            raise ConfigError(
                f"{path}: exists and is not the sample data; add --overwrite, or give another"
                " --output"
            )
        if path.exists():
            yield f"{path} is replaced"
    columns_by_key = {
        key: getattr(arguments, key)
        for key in ("prompt_column", "response_column", "messages_column")
    }
    columns_by_key["ignore_columns"] = [
        name for name in arguments.ignore_columns.strip("[]").split(",") if name
    ]
    section = DataSection(
        train_file=str(arguments.input), max_bad_rows=arguments.max_bad_rows, **columns_by_key
    )
    data_format = columns.detect(section, Path.cwd())
    if data_format.kind == "text":
        raise DataError(
            f"{arguments.input}: {data_format.reason}; SFT needs a prompt and a response: name the"
            " columns"
        )
    bad = BadRows(arguments.max_bad_rows)
    read = without = 0

    def pairs() -> Iterator[Row]:
        nonlocal read, without
        for sample in read_samples(Path(arguments.input), data_format, bad):
            read += 1
            try:
                row = pair(sample)
            except DataError as error:
                raise DataError(f"{arguments.input}: {error}") from error
            if row is not None:
                yield row
            else:
                without += 1

    num_rows = arguments.num_samples + max(1, round(arguments.num_samples * arguments.valid_ratio))
    rows, number = draw(distinct(pairs()), num_rows, random.Random(arguments.seed))
    if len(rows) < 2:
        raise DataError(
            f"{arguments.input}: found {len(rows)} different rows with an answer, expected 2 or"
            " more"
        )
    yield f"{arguments.input}: {read:,} rows read ({data_format.reason})"
    for count, reason in (
        (without, "without an answer"),
        (read - without - number, "there twice"),
        (bad.count, "bad"),
    ):
        if count:
            yield f"  {count:,} left out: {reason}"
    if len(rows) < num_rows:
        yield f"  {num_rows:,} rows were requested, there are {len(rows):,}"
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    for path, part in zip(
        parts, split(rows, arguments.num_samples, arguments.valid_ratio), strict=True
    ):
        write_part(path, part, is_sample=False)
        yield f"{len(part):,} rows -> {path}"


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    root = Path(__file__).resolve().parent.parent
    parser.add_argument("--input", type=Path, required=True, help="parquet, JSONL, JSON or CSV")
    parser.add_argument("--output", type=Path, default=root / "data" / "sft_train_small.parquet")
    parser.add_argument(
        "--num_samples", "--num-samples", type=int, default=5000, help="training rows (5000)"
    )
    parser.add_argument(
        "--valid_ratio", "--valid-ratio", type=float, default=0.1, help="of that, beside them (0.1)"
    )
    parser.add_argument("--seed", type=int, default=42, help="the same seed, the same rows")
    for name in ("prompt", "response", "messages"):
        flags = [f"--{name}_column", f"--{name}-column", f"--data.{name}_column"]
        parser.add_argument(*flags, help="left out: found by name")
    flags = ["--ignore_columns", "--ignore-columns", "--data.ignore_columns"]
    parser.add_argument(*flags, default="", help="columns that are left out on purpose: a,b")
    parser.add_argument(
        "--max_bad_rows", "--max-bad-rows", type=int, default=0, help="left out and counted (0)"
    )
    parser.add_argument(
        "--overwrite", action="store_true", help="replace files that are not the sample data"
    )
    try:
        for line in prepare(parser.parse_args(argv)):
            print(shown(line))
    except LaunchError as error:
        print(f"error: {shown(str(error))}", file=sys.stderr)
        return error.exit_code
    except OSError as error:
        print(f"error: {shown(str(error.filename))}: {error.strerror}", file=sys.stderr)
        return ResourceError.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
