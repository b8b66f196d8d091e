"""data.streaming: a run that keeps a few units of its corpus trains the same steps, on any ranks,
killed or not."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
import torch

from tests import builders
from tests.train_cpu.test_resume import kill_after

pytestmark = pytest.mark.modes

STEPS = 150


def recipe(folder: Path) -> Path:
    """More than two epochs of a corpus of three shards, in blocks of about a fifth of it."""
    rng = random.Random(1)
    (folder / "corpus").mkdir(parents=True)
    for shard in range(3):
        texts = [" ".join(rng.choices(builders.WORDS, k=rng.randint(5, 60))) for _ in range(150)]
        lines = [json.dumps({"text": f"{number}: {text}"}) for number, text in enumerate(texts)]
        (folder / f"corpus/{shard}.jsonl").write_text("\n".join(lines) + "\n")
    (folder / "valid.jsonl").write_text("\n".join(lines[:10]) + "\n")
    data = {"train_file": str(folder / "corpus"), "validation_file": str(folder / "valid.jsonl")}
    return builders.recipe(
        folder,
        task="pretrain",
        tokenizer={"vocab_size": 400},
        data={**data, "packing": True, "streaming": True, "shuffle_buffer_mib": 0.02},
        training={
            "per_device_train_batch_size": 4,
            "gradient_accumulation_steps": 2,
            "max_steps": STEPS,
            "save_steps": 25,
        },
    )


def losses(workspace: Path) -> dict[int, float]:
    return {event["step"]: event["loss"] for event in builders.events(builders.only_run(workspace))}


@pytest.mark.campaign
def test_a_stream_gives_the_same_steps_to_any_ranks_and_after_a_kill(tmp_path):
    path = recipe(tmp_path)
    words = ["run", str(path)]
    alone = builders.launch(tmp_path / "alone", *words, f"--output_dir={tmp_path / 'alone_model'}")
    assert alone.returncode == 0, alone.stderr + alone.stdout
    expected = losses(tmp_path / "alone")
    assert sorted(expected) == list(range(1, STEPS + 1))
    (tokens,) = (tmp_path / "alone/.cache/tokens").glob("*/units.u32")
    counts = torch.frombuffer(bytearray(tokens.read_bytes()), dtype=torch.int32) - 1
    assert len(counts) > 12, "too few units for several blocks"
    assert 2 * counts.sum() < 8 * STEPS, "it was to see the corpus more than twice"
    assert not list((tmp_path / "alone").glob("**/train*.arrow")), (
        "tokens of the corpus are left on the disk"
    )
    shown = builders.launch(
        tmp_path / "alone", "samples", str(builders.only_run(tmp_path / "alone"))
    )
    assert shown.stdout.strip() == f"stream: the first {8 * STEPS:,} packed sequences, each once"

    together = [*words, "--launch.num_processes=2", "--training.per_device_train_batch_size=2"]
    two = builders.launch(tmp_path / "two", *together, f"--output_dir={tmp_path / 'two_model'}")
    assert two.returncode == 0, two.stderr + two.stdout
    found = losses(tmp_path / "two")
    assert list(found) == list(expected)
    torch.testing.assert_close(
        torch.tensor(list(found.values())), torch.tensor(list(expected.values())), rtol=1e-4, atol=0
    )
    taken = [
        builders.only_run(tmp_path / workspace) / "attempts/01/ranks"
        for workspace in ("alone", "two")
    ]
    assert all((taken[1] / rank / "samples.i32").stat().st_size for rank in "01")

    kill_after(tmp_path / "killed", words, step=90)
    again = builders.launch(tmp_path / "killed", *words)
    assert again.returncode == 0, again.stderr + again.stdout
    assert "resuming from checkpoint-0000" in again.stdout
    assert losses(tmp_path / "killed") == expected
    whole, resumed = (
        builders.weights(tmp_path / "alone_model"),
        builders.weights(tmp_path / "model"),
    )
    assert all(torch.equal(tensor, resumed[name]) for name, tensor in whole.items())
    assert not list((tmp_path / "killed").glob("**/train*.arrow")), (
        "tokens of the corpus are left on the disk"
    )


def test_a_row_that_cannot_be_read_ends_a_streamed_run_with_its_place(tmp_path):
    path = recipe(tmp_path)
    with (tmp_path / "corpus/1.jsonl").open("a") as file:
        file.write("{\n")
    done = builders.launch(tmp_path / "workspace", "run", str(path))
    assert done.returncode == 4, done.stdout
    assert "corpus/1.jsonl:151: is not JSON" in done.stdout + done.stderr
