"""A small compressed file that unpacks to gigabytes is refused with its bytes, in little memory."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pytest

from tests import builders

LIMIT_KIB = 2 << 20  # of address space: 2 GiB


def rows() -> Iterator[bytes]:
    """2 GB of an array, whose first rows are like any others."""
    yield b"["
    for i in range(200):
        yield json.dumps({"prompt": f"{i} and 1", "response": f"{i + 1}"}).encode() + b","
    for _ in range(20_000):
        yield json.dumps({"prompt": "1 and 1", "response": "a" * 100_000}).encode() + b","
    yield b'{"prompt": "2 and 1", "response": "3"}]'


@pytest.fixture(scope="module")
def bomb(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("bomb") / "rows.json.zst"
    with pa.CompressedOutputStream(pa.OSFile(str(path), "wb"), "zstd") as file:
        for part in rows():
            file.write(part)
    assert path.stat().st_size < 300_000
    return path


@pytest.mark.parametrize("words", [["plan"], ["run", "--dry-run"], ["run"], ["show"]])
def test_a_bomb_of_a_trained_tokenizer_is_refused_with_its_bytes(tmp_path, bomb, words):
    """The recipe trains its tokenizer on the rows."""
    recipe = builders.recipe(tmp_path, data={"train_file": str(bomb), "validation_file": None})
    verb, *flags = words
    command = shlex.join([sys.executable, "-m", "launch", verb, str(recipe), *flags])
    done = subprocess.run(
        ["bash", "-c", f"ulimit -v {LIMIT_KIB}; exec {command}"],
        env=builders.environment(tmp_path),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 4, done.stderr
    size = f"{bomb.stat().st_size:,}"
    assert f"{bomb}: its {size} bytes unpack to more than 268,435,456; is it" in done.stderr
    assert len(done.stderr.splitlines()) == 1
