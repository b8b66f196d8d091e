"""Plans for rows and packages that this machine does not have: --rows-of, and `packages` of a
machine's file."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from launch.plan.search import AS_FAST
from tests import builders
from tests.process import forked_starts

MACHINES = builders.CODE / "configs" / "machines"
SPLIT = {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 4}


def plan(folder: Path, *words: str, machine: Path = MACHINES / "a6000-48g.yaml", **sections: Any):
    """`plan --machine` of a recipe with a tiny model."""
    recipe = builders.recipe(folder / "recipe", **sections)
    return forked_starts.launch(folder, "plan", str(recipe), "--machine", str(machine), *words)


def planned(folder: Path, *words: str, **sections: Any) -> dict[str, Any]:
    done = plan(folder, "--json", *words, **sections)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.modes
def test_a_plan_for_rows_of_one_length_is_the_plan_of_such_rows(tmp_path):
    # the targets of rows are known only once they are tokenised
    training = {"max_steps": 1, "num_train_epochs": 1, "logits_at_targets": False}
    recipe = builders.recipe(tmp_path / "recipe", training=training)
    row = {"prompt": "red blue green", "response": "stone river"}
    for name in ("train", "valid"):
        builders.write_parquet(recipe.parent / f"{name}.parquet", [row] * 45)
    before = json.loads(forked_starts.launch(tmp_path, "plan", str(recipe), "--json").stdout)
    assert (before["lengths"], before["rows_of"]) == ([64, 64], None)  # max_length
    assert forked_starts.launch(tmp_path, "run", str(recipe)).returncode == 0
    of_rows = json.loads(forked_starts.launch(tmp_path, "plan", str(recipe), "--json").stdout)
    (length,) = set(of_rows["lengths"])
    assert of_rows["padding"]["share"] == 0
    argv = ["plan", str(recipe), "--json", "--rows-of", str(length)]
    unread = json.loads(forked_starts.launch(tmp_path, *argv).stdout)
    assert unread["rows_of"] == length < 64
    for key in ("strategy", "lengths", "rows", "phases"):
        assert unread[key] == of_rows[key]
    alone_s = [  # other tests have more or less of the cores now
        each["seconds_per_step"] / each["seconds_correction"]["slowdown"]
        for each in (unread, of_rows)
    ]
    assert alone_s[0] == pytest.approx(alone_s[1])


@pytest.mark.modes
@pytest.mark.parametrize("by_tokens", [False, True])
def test_longer_rows_of_one_length_take_more_and_nothing_is_tokenised(tmp_path, by_tokens):
    sections = {"data": {"batch_by_tokens": by_tokens}, "training": SPLIT}
    shorter, longer = (planned(tmp_path, "--rows-of", each, **sections) for each in ("32", "64"))
    assert (shorter["rows_of"], shorter["lengths"], shorter["rows"]) == (32, [32, 32], 45)
    peaks = [each["phases"]["step"]["allocated_bytes"] for each in (shorter, longer)]
    assert peaks[0] < peaks[1]
    assert not list(tmp_path.rglob("*.arrow"))


@pytest.mark.modes
def test_the_screen_says_that_all_rows_have_this_length(tmp_path):
    first = plan(tmp_path, "--rows-of", "56")
    assert "45 rows, all 56 tokens long, as --rows-of says" in first.stdout
    explained = plan(tmp_path, "--rows-of", "50", "--explain").stdout
    assert (
        "planned for rows of 50 tokens each, as --rows-of says, not for the rows of the file; each"
        " is padded to 56 (cuda pads to a multiple of 8)"
    ) in explained
    on_cpu = plan(tmp_path, "--rows-of", "50", "--explain", machine=MACHINES / "cpu.yaml").stdout
    assert "not for the rows of the file; none is padded" in on_cpu


@pytest.mark.parametrize(
    ("value", "data", "words"),
    [
        ("0", {}, "--rows-of 0: expected a number of tokens from 1 to data.max_length"),
        ("-5", {}, "--rows-of -5: expected a number of tokens"),
        ("5e2", {}, "--rows-of 5e2: expected a number of tokens"),
        ("712", {}, "--rows-of 712: data.max_length is 64, and longer rows are truncated to it"),
        ("32", {"packing": True}, "--rows-of 32 beside data.packing: true, which joins rows"),
    ],
)
def test_a_length_that_rows_cannot_have_is_refused_in_one_line(tmp_path, value, data, words):
    done = plan(tmp_path, f"--rows-of={value}", data=data)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"error: {words}")
    assert done.stderr.count("\n") == 1


@pytest.mark.modes
@pytest.mark.parametrize(
    ("packages", "runs", "why"),
    [
        ("", "varlen_attn", "whether flash_attn is installed there is not known"),
        ("packages: []", "varlen_attn", "the package flash_attn is not installed there"),
        ("packages: [flash_attn]", "flash_attention_2", "flash_attn is there"),
    ],
)
def test_a_described_machine_lists_its_packages(tmp_path, packages, runs, why):
    machine = tmp_path / "with packages.yaml"
    machine.write_text(f"{(MACHINES / 'a6000-48g.yaml').read_text()}{packages}\n")
    found = planned(tmp_path, machine=machine, training={"bf16": True})
    assert found["strategy"]["levers"]["attn_implementation"] == runs
    assert why in next(row["why"] for row in found["switches"] if row["name"] == "attention")


@pytest.mark.modes
@pytest.mark.skipif(sys.platform != "linux", reason="Triton is for Linux")
@pytest.mark.parametrize(("tokens", "is_faster"), [("1024", True), ("64", False)])
def test_ligers_kernels_are_chosen_where_their_step_is_faster(tmp_path, tokens, is_faster):
    """Short rows wait for the host, which takes longer for them."""
    machine = tmp_path / "with liger.yaml"
    machine.write_text(f"{(MACHINES / 'a6000-48g.yaml').read_text()}packages: [liger_kernel]\n")
    model, data = {"shape": "qwen2.5-0.5b", "dtype": "bfloat16"}, {"max_length": int(tokens)}
    asks = {"model": model, "data": data, "lora": {"r": 16}, "machine": machine}
    half = {"bf16": True, "per_device_train_batch_size": 4}
    free, without = (
        planned(tmp_path, "--rows-of", tokens, **asks, training={**half, **typed})
        for typed in ({}, {"use_liger_kernel": False})
    )
    assert free["strategy"]["levers"]["use_liger_kernel"] is is_faster
    row = next(row for row in free["switches"] if row["name"] == "liger")
    assert row["why"] == ("faster; the loss stays ours" if is_faster else "not faster")
    predicted_s = [each["seconds_per_step"] for each in (free, without)]  # nothing is timed
    assert (predicted_s[0] * AS_FAST < predicted_s[1]) is is_faster


@pytest.mark.modes
def test_liger_that_a_described_machine_lacks_is_refused(tmp_path):
    machine = tmp_path / "without.yaml"
    machine.write_text(f"{(MACHINES / 'a6000-48g.yaml').read_text()}packages: [flash_attn]\n")
    asks = {"training": {"use_liger_kernel": True}}
    assert plan(tmp_path, **asks).returncode == 0  # not known there
    done = plan(tmp_path, machine=machine, **asks)
    assert (done.returncode, done.stderr.count("\n")) == (3, 1)
    assert "use_liger_kernel: true, but the package liger_kernel is not installed" in done.stderr
