"""A corpus is tokenised in units: the same files whatever the number of processes, and none twice
after a kill."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path

import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pydantic import TypeAdapter

from launch.base import files
from launch.base.errors import DataError, ResourceError
from launch.data import sources, token_cache
from launch.data.files.shards import FileFacts
from launch.data.sources import Source
from launch.recipe import load
from launch.run_folder.layout import AttemptDir
from launch.schema.data_section import DataSection
from launch.schema.model_sections import TokenizerSection
from launch.schema.plan import DataFormat
from tests import builders
from training.data import tokenise, tokenizer, units
from training.data.batches import TokenRows
from training.data.encode import EncoderSettings
from training.data.tokenise import TokeniseJob

pytestmark = pytest.mark.process

TEXTS = [
    " ".join(f"{number * step}" for step in range(1, 3 + number % 40)) for number in range(1200)
]
UNIT_BYTES = 6_000


@pytest.fixture(scope="module")
def bpe():
    return tokenizer.train(iter(TEXTS[:50]), TokenizerSection(), 400)


TEXT_ROWS = DataFormat("text", {"text": "text"}, "jsonl", "")


def job(
    folder: Path, source: Path, bpe, data_format: DataFormat = TEXT_ROWS, **fields
) -> TokeniseJob:
    folder.mkdir(parents=True)
    bpe.save_pretrained(folder / "tokenizer")
    of_data = {"packing": True, "max_bad_rows": 0, **fields}
    task = of_data.pop("task", "pretrain")
    whole_texts = of_data["packing"] and task == "pretrain"
    return TokeniseJob(
        folder,
        "train",
        (Source(source, data_format),),
        EncoderSettings(False, task, 64, whole_texts, own_call=False),
        unit_bytes=UNIT_BYTES,
        **of_data,
    )


def corpus(folder: Path, bad: tuple[int, ...] = ()) -> Path:
    """Two shards with TEXTS; the rows `bad` cannot be read."""
    folder.mkdir()
    for name, numbers in (("a", range(900)), ("b", range(900, 1200))):
        rows = ["{" if number in bad else json.dumps({"text": TEXTS[number]}) for number in numbers]
        (folder / f"{name}.jsonl").write_text("\n".join(rows) + "\n")
    return folder


def made(job: TokeniseJob, processes: int, limit: int | None = None) -> dict[str, bytes]:
    """The files of rows that so many processes make."""
    said: list[str] = []
    tokenise.tokenise_part(job, limit, processes, lambda rows: None, said.append)
    assert bool(said) == (processes > 1), "whether there were children is not what was asked for"
    return {path.name: path.read_bytes() for path in job.folder.glob("train*.arrow")}


def test_the_files_are_the_same_whatever_the_number_of_processes(tmp_path, bpe):
    source = corpus(tmp_path / "corpus")
    alone = made(job(tmp_path / "1", source, bpe), 1)
    assert len(alone) > 20
    assert made(job(tmp_path / "3", source, bpe), 3) == alone
    rows = TokenRows(*token_cache.token_files(tmp_path / "3", "train"))
    text = bpe.decode([token for row in rows for token in row.input_ids.tolist()])
    assert text == "".join(f"{text}<|end|>" for text in TEXTS)
    assert sum(len(row.input_ids) >= 63 for row in rows) >= len(rows) - len(alone)


def test_row_groups_of_parquet_are_shared_out_too(tmp_path, bpe):
    pq.write_table(
        pa.table({"text": TEXTS}), tmp_path / "a.parquet", row_group_size=50, compression="none"
    )
    fields = {"data_format": DataFormat("text", {"text": "text"}, "parquet", ""), "packing": False}
    alone = made(job(tmp_path / "1", tmp_path / "a.parquet", bpe, **fields), 1)
    assert len(alone) > 10
    assert made(job(tmp_path / "2", tmp_path / "a.parquet", bpe, **fields), 2) == alone


def test_held_out_rows_are_the_same_whatever_the_number_of_processes_and_the_units(tmp_path, bpe):
    source = corpus(tmp_path / "corpus")
    data = DataSection(train_file=str(source), validation_size=0.1)
    counts = sources.count_rows(data, TEXT_ROWS, FileFacts())
    assert counts == ((900, 300),)
    made_texts = {}
    for name, unit_bytes, processes in (("1", 6_000, 1), ("2", 6_000, 2), ("whole", 1 << 20, 1)):
        texts: dict[str, list[str]] = {}
        for part in ("train", "validation"):
            taken = sources.of_part(data, TEXT_ROWS, counts, part)
            one = job(tmp_path / name / part, source, bpe, packing=False)
            settings = replace(one.settings, max_length=1024)
            one = replace(one, sources=taken, unit_bytes=unit_bytes, settings=settings)
            one = replace(one, row_offsets=units.row_offsets(one.units, lambda: None))
            assert (len(one.units) > 20) == (name != "whole")
            tokenise.tokenise_part(one, None, processes, lambda rows: None, print)
            rows = TokenRows(*token_cache.token_files(one.folder, "train"))
            text = bpe.decode([token for row in rows for token in row.input_ids.tolist()])
            texts[part] = text.split("<|end|>")[:-1]
        made_texts[name] = texts
        assert len(texts["validation"]) == 120
        assert Counter(texts["train"] + texts["validation"]) == Counter(TEXTS)
    assert made_texts["1"] == made_texts["2"] == made_texts["whole"]


def test_a_limit_holds_over_all_units(tmp_path, bpe):
    source = corpus(tmp_path / "corpus")
    one = job(tmp_path / "1", source, bpe, packing=False, task="sft")
    counts, _ = tokenise.tokenise_part(one, 777, 4, lambda rows: None, print)
    assert counts.samples == 777
    assert len(TokenRows(*token_cache.token_files(one.folder, "train"))) == counts.rows


@pytest.mark.parametrize("processes", [1, 2])
def test_of_several_bad_rows_the_first_that_is_too_many_is_named(tmp_path, bpe, processes):
    source = corpus(tmp_path / "corpus", bad=(300, 800, 1000))
    some = job(tmp_path / "some", source, bpe, max_bad_rows=3)
    counts, bad = tokenise.tokenise_part(some, None, processes, lambda rows: None, print)
    assert (counts.bad, counts.samples) == (3, 1197)
    assert "a.jsonl:301: " in bad.errors[0]
    none = job(tmp_path / "none", source, bpe)
    with pytest.raises(DataError, match=r"a\.jsonl:301: is not JSON"):
        tokenise.tokenise_part(none, None, processes, lambda rows: None, print)
    few = replace(some, max_bad_rows=2)  # its units are there: none is tokenised again
    with pytest.raises(
        DataError, match=r"b\.jsonl:101: .*; it is bad row 3, data\.max_bad_rows allows 2"
    ):
        tokenise.tokenise_part(few, None, processes, lambda rows: None, print)


PARENT = """
import sys, time
from pathlib import Path
from pydantic import TypeAdapter
from training.data import tokenise
job = TypeAdapter(tokenise.TokeniseJob).validate_json(Path(sys.argv[1]).read_bytes())
tokenise.tokenise_part(job, None, 2, lambda rows: time.sleep(0.1), print)
"""


def start(job: TokeniseJob) -> subprocess.Popen:
    """A process that tokenises with two children, slowly; back when some units are there."""
    files.write_json(job.folder.with_suffix(".job"), job)
    argv = [sys.executable, "-c", PARENT, str(job.folder.with_suffix(".job"))]
    parent = subprocess.Popen(argv, env={**os.environ, "PYTHONPATH": str(builders.CODE)})
    until = time.monotonic() + 120
    while sum(job.done(unit) is not None for unit in range(len(job.units))) < 4:
        assert parent.poll() is None
        assert time.monotonic() < until
        time.sleep(0.02)
    return parent


def test_a_killed_child_ends_its_start_as_it_was_ended_and_the_next_goes_on_from_finished_units(
    tmp_path, bpe
):
    source = corpus(tmp_path / "corpus")
    killed = job(tmp_path / "killed", source, bpe)
    parent = start(killed)
    children = psutil.Process(parent.pid).children()
    assert len(children) == 2
    for child in children:
        maps = Path(f"/proc/{child.pid}/maps").read_text()
        assert "pyarrow" in maps
        assert "libtorch" not in maps, "125 MiB more of RAM for each process"
    children[0].send_signal(signal.SIGKILL)
    assert parent.wait(timeout=60) == -signal.SIGKILL
    psutil.wait_procs(children, timeout=60)
    assert not any(child.is_running() for child in children), "children outlived their parent"
    there = {path: path.stat().st_mtime_ns for path in killed.folder.glob("train-*.arrow")}
    assert 4 <= len(there) < len(killed.units)
    again = TypeAdapter(TokeniseJob).validate_python(vars(killed))
    found = made(again, 2)
    assert found == made(job(tmp_path / "whole", source, bpe), 1)
    assert {path: path.stat().st_mtime_ns for path in there} == there, (
        "a finished unit was tokenised again"
    )


def test_rows_are_tokenised_before_the_ranks_start_without_torch_and_pandas(tmp_path):
    libraries = tmp_path / "libraries"
    libraries.mkdir()
    for name in ("torch", "pandas"):
        (libraries / f"{name}.py").write_text(f"raise SystemExit('{name} is imported')")
    recipe, _ = load.load(str(builders.recipe(tmp_path)), [])
    model = builders.model_size(recipe.model, None, root=builders.CODE)
    tokens = token_cache.token_cache(tmp_path, recipe, model, builders.DATA_FORMAT)
    attempt = AttemptDir(tmp_path / "attempt")
    attempt.root.mkdir()
    files.write_json(attempt.tokenising_file, tokens)
    done = subprocess.run(
        [sys.executable, "-P", "-m", "training.children.tokenise", "rows", str(attempt.root), "1"],
        env=builders.environment(tmp_path / "w", PYTHONPATH=f"{libraries}:{builders.CODE}"),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(TokenRows(*token_cache.token_files(tokens.folder, "train"))) == 45


def test_a_disk_without_room_for_the_rest_is_said_at_once(tmp_path, bpe):
    one = job(tmp_path / "job", corpus(tmp_path / "corpus"), bpe)
    with (one.folder / "train-00001.arrow").open("wb") as file:
        file.truncate(8 << 40)  # sparse
    with pytest.raises(
        ResourceError, match=r"the tokens of .*corpus take about [\d,.]+ GiB more, .* GiB are free"
    ):
        tokenise.tokenise_part(one, None, 1, lambda rows: None, print)
