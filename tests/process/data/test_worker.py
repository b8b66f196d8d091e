"""One child with torch answers as children that each answer one request."""

from __future__ import annotations

import json
import os
import resource
import signal
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest
from pydantic import TypeAdapter
from transformers import AutoConfig

from launch.base.errors import LaunchError, ResourceError
from launch.data import token_cache
from launch.data.worker import (
    AddTokens,
    EncodeRows,
    FindLargest,
    ReadParts,
    RecordSteps,
    Request,
    Worker,
    WorkerEnded,
)
from launch.schema.model_sections import TokenizerSection
from launch.schema.plan import DataFormat
from launch.schema.recorded_step import STEP, Question
from launch.schema.rows import Division
from tests import builders
from tests.unit.predict.memory.test_largest_batches import write
from training.data import largest_batches, tokenizer
from training.trace.model_parts import model_parts

pytestmark = pytest.mark.modes

COLUMNS = {"prompt": "prompt", "response": "response"}
DIVISION = Division("train", 2, 1, 1, False, 8, False, num_steps=5)


@pytest.fixture
def requests(tmp_path: Path) -> list[Request]:
    """A request of each kind, in the order of a plan of a folder whose type is not counted."""
    tokenizer.train(iter(["one two three"] * 9), TokenizerSection(), 300).save_pretrained(tmp_path)
    sizes = {"hidden_size": 32, "num_hidden_layers": 6, "num_attention_heads": 2}
    config = AutoConfig.for_model("gpt_neox", vocab_size=300, intermediate_size=48, **sizes)
    rows = tmp_path / "rows.jsonl"
    rows.write_text(json.dumps({"prompt": "one", "response": "two"}) + "\n")
    write(tmp_path, "train", 50, 2, is_pair=False)
    recipe = builders.recipe_of(data={"train_file": str(rows)}, training={"optim": "adamw_8bit"})
    plan = builders.plan(recipe, builders.machine(1))
    question = Question(plan.strategy, (64, 64), architecture="8.6")
    data_format = DataFormat("prompt_response", COLUMNS, "jsonl", "given")
    tokens = token_cache.token_cache(tmp_path / "cache", recipe, plan.shape, data_format)
    steps = {"step": question}
    return [
        ReadParts(config.to_dict()),
        AddTokens(tmp_path, None, ("<a>", "<b>")),
        FindLargest(tmp_path, (DIVISION,)),
        RecordSteps(tmp_path, recipe, plan.shape, plan.lora_targets, steps),
        EncodeRows(tokens, 1, None, 10, (rows,)),
    ]


def answered(worker: Worker, request: Request) -> Any:
    """The answer, and the record of a step: blocks that die at once have no order."""
    answer: Any = json.loads(worker.ask(request))
    if isinstance(request, RecordSteps):
        _, text = (request.folder / f"step{STEP}").read_text().split("\n")  # behind its digest
        answer = json.loads(text)
        deaths = groupby(answer["events"], key=lambda event: event[0] < 0)
        answer["events"] = [sorted(run) if died else list(run) for died, run in deaths]
    return answer


def test_one_child_answers_as_children_that_each_answer_one_request(requests):
    with (worker := Worker()):
        together = [answered(worker, request) for request in requests]
        (process,) = {worker._process}
    apart = []
    for request in requests:
        with (alone := Worker()):
            apart.append(answered(alone, request))
    assert process is not None
    assert together == apart
    parts, tokens, largest, _, rows = together
    assert parts == TypeAdapter(Any).dump_python(model_parts(requests[0].config), mode="json")
    sizes = largest_batches.row_sizes([requests[1].folder / "train.arrow"])
    found = largest_batches.largest(sizes, DIVISION)
    assert largest == [TypeAdapter(Any).dump_python(found, mode="json")]
    assert tokens["ids"] == {"<a>": tokens["size_before"], "<b>": tokens["size_before"] + 1}
    assert rows["num_read"] == 1


def test_a_child_that_shows_rows_alone_imports_no_torch(requests):
    *_, steps, rows = requests
    with (worker := Worker()):
        worker.ask(rows)
        assert worker._process is not None
        assert "libtorch" not in Path(f"/proc/{worker._process.pid}/maps").read_text()
        assert answered(worker, steps)["events"]
        assert "libtorch" in Path(f"/proc/{worker._process.pid}/maps").read_text()


def test_a_refusal_is_raised_here_and_what_ended_a_child_is_said(requests, tmp_path):
    nowhere = FindLargest(tmp_path / "none", (DIVISION,))
    with (worker := Worker()):
        with pytest.raises(ResourceError, match="no tokenizer can be loaded from this folder"):
            worker.reply(AddTokens(tmp_path / "none", None, ()), "loads")
        with pytest.raises(LaunchError, match="the process that reads ended with 1, see above"):
            worker.reply(nowhere, "reads")
        with pytest.raises(WorkerEnded, match="IndexError: list index out of range"):
            worker.ask(nowhere)
        assert worker.ask(requests[2])
        assert worker._process is not None
        os.kill(worker._process.pid, signal.SIGKILL)
        with pytest.raises(ResourceError, match="the process that reads was ended by SIGKILL"):
            worker.reply(requests[2], "reads")
        with pytest.raises(WorkerEnded, match=r"took more than 0.01 s"):
            worker.ask(requests[3], timeout_s=0.01)


def test_a_child_that_a_signal_ended_is_named_by_it_and_not_by_its_last_line():
    ended = WorkerEnded("Please install a package\n", -signal.SIGKILL)
    assert str(ended) == "the child with torch was ended by SIGKILL"
    assert ended.stderr == "Please install a package\n"


def test_a_folder_that_takes_no_record_is_named(requests, tmp_path):
    (record,) = (request for request in requests if isinstance(request, RecordSteps))
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, before[1]))  # of files of the child too
    worker = Worker()
    try:
        with worker, pytest.raises(ResourceError, match=f"{tmp_path}: a trace cannot be kept"):
            worker.ask(record)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
