#!/usr/bin/env python3
"""Write the sample SFT data: short Chinese and English tasks, each with one right answer.

Every row is written by this file, so the data needs no download and has no other licence than this
repository's. A kind of task is a function that lists all of its rows; a part of the data is a draw
from those lists.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
from collections.abc import Callable, Iterator
from datetime import date, timedelta
from itertools import permutations
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

Row = tuple[str, str]  # prompt, response

_TRAIN_FILE = "sft_train_small_train.parquet"
VALID_FILE = "sft_train_small_valid.parquet"
# in the schema's metadata: tells a reader that this is the sample, not the user's data
_SAMPLE_KEY = b"lowmem_sample"
_QUESTIONS_KEY = b"lowmem_questions"  # there too: QUESTIONS, a line each
# The end of the quick start and the READMEs name these. They are in no row of the default draw; the
# least probable letter of their right answers had 0.991 or more with each of four seeds.
QUESTIONS = ("2024年3月5日的标准写法", "498 km in m", "Sort A to Z: c i e")

_CHINESE_DIGITS = "零一二三四五六七八九"
_ENGLISH_ONES = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]
_TEENS = "ten eleven twelve thirteen fourteen fifteen sixteen seventeen eighteen nineteen"
_ENGLISH_TEENS = _TEENS.split()
_ENGLISH_TENS = ["twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety"]
_MONTHS = "January February March April May June July August September October November December"
MONTHS = _MONTHS.split()
_DAYS = [date(1950, 1, 1) + timedelta(days=offset) for offset in range(36525)]  # 1950..2049
_ENGLISH_UNITS = (
    ("km", "m", 1000),
    ("kg", "g", 1000),
    ("L", "mL", 1000),
    ("m", "cm", 100),
    ("cm", "mm", 10),
)
_CHINESE_UNITS = (
    ("千米", "米", 1000),
    ("千克", "克", 1000),
    ("吨", "千克", 1000),
    ("米", "厘米", 100),
    ("元", "角", 10),
)


def _chinese_numeral(number: int) -> str:
    """Spell 0..9999: 10 is 十, 305 is 三百零五, 2010 is 二千零一十."""
    text = ""
    for place, name in ((1000, "千"), (100, "百"), (10, "十"), (1, "")):
        digit = number // place % 10
        if digit:
            text += _CHINESE_DIGITS[digit] + name
        elif text and not text.endswith("零"):
            text += "零"
    text = text.rstrip("零") or "零"
    return text.removeprefix("一") if 10 <= number < 20 else text


def _english_numeral(number: int) -> str:
    """Spell 0..999: 45 is forty-five, 305 is three hundred five."""
    if number < 20:
        return (_ENGLISH_ONES + _ENGLISH_TEENS)[number]
    if number < 100:
        tens, ones = divmod(number, 10)
        return _ENGLISH_TENS[tens - 2] + (f"-{_ENGLISH_ONES[ones]}" if ones else "")
    hundreds, below_100 = divmod(number, 100)
    return f"{_ENGLISH_ONES[hundreds]} hundred" + (
        f" {_english_numeral(below_100)}" if below_100 else ""
    )


def _digits_to_chinese() -> Iterator[Row]:
    return ((f"把 {number} 写成汉字", _chinese_numeral(number)) for number in range(10000))


def _chinese_to_digits() -> Iterator[Row]:
    return ((f"把{_chinese_numeral(number)}写成数字", str(number)) for number in range(10000))


def _digits_to_english() -> Iterator[Row]:
    return ((f"{number} in words", _english_numeral(number)) for number in range(1000))


def _english_to_digits() -> Iterator[Row]:
    return ((f"{_english_numeral(number)} in digits", str(number)) for number in range(1000))


def _chinese_date(day: date) -> str:
    return f"{day.year}年{day.month}月{day.day}日"


def _english_date(day: date) -> str:
    return f"{MONTHS[day.month - 1]} {day.day}, {day.year}"


def _chinese_date_to_iso() -> Iterator[Row]:
    return ((f"{_chinese_date(day)}的标准写法", day.isoformat()) for day in _DAYS)


def _iso_to_chinese_date() -> Iterator[Row]:
    return ((f"{day.isoformat()} 是哪一天", _chinese_date(day)) for day in _DAYS)


def _english_date_to_iso() -> Iterator[Row]:
    return ((f"{_english_date(day)} in ISO", day.isoformat()) for day in _DAYS)


def _iso_to_english_date() -> Iterator[Row]:
    return ((f"Which day is {day.isoformat()}?", _english_date(day)) for day in _DAYS)


def _english_units() -> Iterator[Row]:
    for big, small, factor in _ENGLISH_UNITS:
        for number in range(1, 1000):
            yield f"{number} {big} in {small}", f"{number * factor} {small}"


def _chinese_units() -> Iterator[Row]:
    for big, small, factor in _CHINESE_UNITS:
        for number in range(1, 1000):
            yield f"{number} {big}是多少{small}", f"{number * factor} {small}"


def _order_numbers() -> Iterator[Row]:
    for numbers in permutations(range(10), 3):
        text = " ".join(map(str, numbers))
        yield f"从小到大排列 {text}", " ".join(map(str, sorted(numbers)))
        yield f"从大到小排列 {text}", " ".join(map(str, sorted(numbers, reverse=True)))


def _order_letters() -> Iterator[Row]:
    for letters in permutations("abcdefghij", 3):
        text = " ".join(letters)
        yield f"Sort A to Z: {text}", " ".join(sorted(letters))
        yield f"Sort Z to A: {text}", " ".join(sorted(letters, reverse=True))


_NUMERALS = (_digits_to_chinese, _chinese_to_digits, _digits_to_english, _english_to_digits)
_DATES = (_chinese_date_to_iso, _iso_to_chinese_date, _english_date_to_iso, _iso_to_english_date)
_UNITS_AND_ORDER = (_english_units, _chinese_units, _order_numbers, _order_letters)
KINDS: tuple[Callable[[], Iterator[Row]], ...] = (*_NUMERALS, *_DATES, *_UNITS_AND_ORDER)


def draw(train_rows: int, valid_rows: int, seed: int) -> tuple[list[Row], list[Row]]:
    """Draw both parts, with equal shares of every kind as far as its rows go. Raises: ValueError on
    bad row counts."""
    kinds = [list(kind()) for kind in KINDS]
    num_distinct = sum(map(len, kinds))
    missing = train_rows + valid_rows
    if train_rows < 1 or valid_rows < 1:
        raise ValueError(
            f"--train-rows {train_rows} and --valid-rows {valid_rows} must both be at least 1"
        )
    if missing > num_distinct:
        raise ValueError(
            f"{missing} rows are too many: only {num_distinct} distinct ones exist; lower"
            " --train-rows"
        )
    rng = random.Random(seed)
    rows: list[Row] = []
    for position, kind in enumerate(
        sorted(kinds, key=len)
    ):  # small kinds first; larger kinds give the rows that they lack
        share = min(len(kind), missing // (len(kinds) - position))
        rows += rng.sample(kind, share)
        missing -= share
    rng.shuffle(rows)
    valid, train = rows[:valid_rows], rows[valid_rows:]
    assert len(train) == train_rows and len({prompt for prompt, _ in rows}) == len(rows)
    return train, valid


def write_part(path: Path, rows: list[Row], is_sample: bool = True) -> Path:
    """Write one parquet file under another name, then rename it: a reader sees the old file or the
    new file, never a part of it."""
    prompts, responses = zip(*rows, strict=True)
    unseen = "\n".join(question for question in QUESTIONS if question not in prompts)
    metadata = {_SAMPLE_KEY: b"1", _QUESTIONS_KEY: unseen.encode()} if is_sample else None
    schema = pa.schema([("prompt", pa.string()), ("response", pa.string())], metadata=metadata)
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        pq.write_table(pa.table([pa.array(prompts), pa.array(responses)], schema=schema), aside)
        aside.replace(path)
    finally:
        aside.unlink(missing_ok=True)
    return path


def is_sample(path: Path) -> bool:
    """Tell whether a file is the sample data that a first start writes."""
    try:
        return _SAMPLE_KEY in (pq.read_schema(path).metadata or {})
    except (pa.ArrowException, OSError):
        return False


def write(out_dir: Path, train_rows: int, valid_rows: int, seed: int) -> tuple[Path, Path]:
    """Write both parts into `out_dir` and return their paths. Raises: ValueError on row counts that
    cannot be met."""
    train, valid = draw(train_rows, valid_rows, seed)
    out_dir.mkdir(parents=True, exist_ok=True)
    paths = (out_dir / _TRAIN_FILE, out_dir / VALID_FILE)
    for path in paths:
        if path.is_symlink() or (path.exists() and not is_sample(path)):
            raise ValueError(f"{path} is not the sample data; move it away, or train on it by name")
    return write_part(paths[0], train), write_part(paths[1], valid)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    root = Path(__file__).resolve().parent.parent
    parser.add_argument(
        "--out-dir", type=Path, default=root / "data", help="folder to write (default: %(default)s)"
    )
    parser.add_argument(
        "--train-rows", type=int, default=5000, help=f"rows of {_TRAIN_FILE} (default: %(default)s)"
    )
    parser.add_argument(
        "--valid-rows", type=int, default=500, help=f"rows of {VALID_FILE} (default: %(default)s)"
    )
    parser.add_argument(
        "--seed", type=int, default=23333, help="same seed, same rows (default: %(default)s)"
    )
    args = parser.parse_args(argv)
    try:
        paths = write(args.out_dir, args.train_rows, args.valid_rows, args.seed)
    except (ValueError, OSError) as error:
        print(f"make_sample_data.py: {error}", file=sys.stderr)
        return 2
    print(f"{args.train_rows} rows -> {paths[0]}\n{args.valid_rows} rows -> {paths[1]}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
