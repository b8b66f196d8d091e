#!/usr/bin/env python3
"""Write the sample SFT data: short Chinese and English tasks, each with one right answer.

Every row is written by this file, so the data needs no download and has no other licence than this repository's.
A kind of task is a function that lists all of its rows; a part of the data is a draw from those lists.
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

TRAIN_FILE = "sft_train_small_train.parquet"
VALID_FILE = "sft_train_small_valid.parquet"
SAMPLE_KEY = b"lowmem_sample"  # in the schema's metadata: tells a reader that this is the sample, not the user's data

CHINESE_DIGITS = "零一二三四五六七八九"
ENGLISH_ONES = (
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen "
    "seventeen eighteen nineteen"
).split()
ENGLISH_TENS = "twenty thirty forty fifty sixty seventy eighty ninety".split()  # from 20 on
MONTHS = "January February March April May June July August September October November December".split()
ENGLISH_UNITS = (("km", "m", 1000), ("kg", "g", 1000), ("L", "mL", 1000), ("m", "cm", 100), ("cm", "mm", 10))
CHINESE_UNITS = (("千米", "米", 1000), ("千克", "克", 1000), ("吨", "千克", 1000), ("米", "厘米", 100), ("元", "角", 10))


def chinese_numeral(number: int) -> str:
    """Spell 0..9999: 10 is 十, 305 is 三百零五, 2010 is 二千零一十."""
    if number == 0:
        return "零"
    text, zero_due = "", False
    for place, name in ((1000, "千"), (100, "百"), (10, "十"), (1, "")):
        digit = number // place % 10
        if digit == 0:
            zero_due = bool(text)
            continue
        text += ("零" if zero_due else "") + CHINESE_DIGITS[digit] + name
        zero_due = False
    return text.removeprefix("一") if 10 <= number < 20 else text


def english_numeral(number: int) -> str:
    """Spell 0..999: 45 is forty-five, 305 is three hundred five."""
    if number < 20:
        return ENGLISH_ONES[number]
    if number < 100:
        tens, ones = divmod(number, 10)
        return ENGLISH_TENS[tens - 2] + (f"-{ENGLISH_ONES[ones]}" if ones else "")
    hundreds, rest = divmod(number, 100)
    return f"{ENGLISH_ONES[hundreds]} hundred" + (f" {english_numeral(rest)}" if rest else "")


def digits_to_chinese() -> Iterator[Row]:
    for number in range(10000):
        yield f"把 {number} 写成汉字", chinese_numeral(number)


def chinese_to_digits() -> Iterator[Row]:
    for number in range(10000):
        yield f"把{chinese_numeral(number)}写成数字", str(number)


def digits_to_english() -> Iterator[Row]:
    for number in range(1000):
        yield f"{number} in words", english_numeral(number)


def english_to_digits() -> Iterator[Row]:
    for number in range(1000):
        yield f"{english_numeral(number)} in digits", str(number)


def days() -> Iterator[date]:
    """Every day of 1950..2049."""
    first = date(1950, 1, 1)
    for offset in range((date(2050, 1, 1) - first).days):
        yield first + timedelta(days=offset)


def chinese_date(day: date) -> str:
    return f"{day.year}年{day.month}月{day.day}日"


def english_date(day: date) -> str:
    return f"{MONTHS[day.month - 1]} {day.day}, {day.year}"


def chinese_date_to_iso() -> Iterator[Row]:
    for day in days():
        yield f"{chinese_date(day)}的标准写法", day.isoformat()


def iso_to_chinese_date() -> Iterator[Row]:
    for day in days():
        yield f"{day.isoformat()} 是哪一天", chinese_date(day)


def english_date_to_iso() -> Iterator[Row]:
    for day in days():
        yield f"{english_date(day)} in ISO", day.isoformat()


def iso_to_english_date() -> Iterator[Row]:
    for day in days():
        yield f"Which day is {day.isoformat()}?", english_date(day)


def english_units() -> Iterator[Row]:
    for big, small, factor in ENGLISH_UNITS:
        for number in range(1, 1000):
            yield f"{number} {big} in {small}", f"{number * factor} {small}"


def chinese_units() -> Iterator[Row]:
    for big, small, factor in CHINESE_UNITS:
        for number in range(1, 1000):
            yield f"{number} {big}是多少{small}", f"{number * factor} {small}"


def order_numbers() -> Iterator[Row]:
    for numbers in permutations(range(10), 3):
        text = " ".join(map(str, numbers))
        yield f"从小到大排列 {text}", " ".join(map(str, sorted(numbers)))
        yield f"从大到小排列 {text}", " ".join(map(str, sorted(numbers, reverse=True)))


def order_letters() -> Iterator[Row]:
    for letters in permutations("abcdefghijkl", 3):
        text = " ".join(letters)
        yield f"Sort A to Z: {text}", " ".join(sorted(letters))
        yield f"Sort Z to A: {text}", " ".join(sorted(letters, reverse=True))


KINDS: tuple[Callable[[], Iterator[Row]], ...] = (
    digits_to_chinese,
    chinese_to_digits,
    digits_to_english,
    english_to_digits,
    chinese_date_to_iso,
    iso_to_chinese_date,
    english_date_to_iso,
    iso_to_english_date,
    english_units,
    chinese_units,
    order_numbers,
    order_letters,
)


def draw(train_rows: int, valid_rows: int, seed: int) -> tuple[list[Row], list[Row]]:
    """Draw both parts, with equal shares of every kind as far as its rows go.

    Raises: ValueError if a count is below 1 or more rows are asked than exist.
    """
    kinds = [list(kind()) for kind in KINDS]
    num_distinct = sum(map(len, kinds))
    if train_rows < 1 or valid_rows < 1:
        raise ValueError(f"--train-rows {train_rows} and --valid-rows {valid_rows} must both be at least 1")
    if train_rows + valid_rows > num_distinct:
        raise ValueError(
            f"--train-rows {train_rows} plus --valid-rows {valid_rows} is {train_rows + valid_rows} rows, "
            f"but only {num_distinct} distinct rows exist; ask for fewer"
        )
    rng = random.Random(seed)
    rows: list[Row] = []
    missing = train_rows + valid_rows
    for position, kind in enumerate(sorted(kinds, key=len)):  # small kinds first: what they lack, larger ones give
        share = min(len(kind), missing // (len(kinds) - position))
        rows += rng.sample(kind, share)
        missing -= share
    rng.shuffle(rows)
    valid, train = rows[:valid_rows], rows[valid_rows:]
    assert len(train) == train_rows and len({prompt for prompt, _ in rows}) == len(rows)
    return train, valid


def write_part(path: Path, rows: list[Row]) -> None:
    """Write one parquet file aside, then rename it: a reader sees the old file or the new one, never half of one."""
    schema = pa.schema([("prompt", pa.string()), ("response", pa.string())], metadata={SAMPLE_KEY: b"1"})
    prompts, responses = zip(*rows, strict=True)
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        pq.write_table(pa.table([pa.array(prompts), pa.array(responses)], schema=schema), aside)
        aside.replace(path)
    finally:
        aside.unlink(missing_ok=True)


def write(out_dir: Path, train_rows: int, valid_rows: int, seed: int) -> tuple[Path, Path]:
    """Write both parts into `out_dir` and return their paths. Raises: ValueError on row counts that cannot be met."""
    train, valid = draw(train_rows, valid_rows, seed)
    out_dir.mkdir(parents=True, exist_ok=True)
    write_part(out_dir / TRAIN_FILE, train)
    write_part(out_dir / VALID_FILE, valid)
    return out_dir / TRAIN_FILE, out_dir / VALID_FILE
