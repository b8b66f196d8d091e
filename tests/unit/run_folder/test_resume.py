"""Which run a start goes on with: the newest unfinished one of its output folder that trains the
same."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from launch.base import files
from launch.base.errors import CheckpointError, LockHeld, ResourceError
from launch.base.workspace import Workspace
from launch.data import token_cache
from launch.data.token_cache import TokenCache
from launch.render import run_files
from launch.run_folder import layout, manifest, resume
from launch.run_folder.layout import RunDir
from launch.schema.data_section import DataSection
from launch.schema.model_sections import LoraSection, QuantizationSection
from launch.schema.recipe import Recipe
from launch.schema.result import Continues, ExportedModel, Outcome, UsedTokens
from launch.schema.run_sections import ResumeSection
from tests.builders import machine, plan, recipe_of

NOW = datetime(2026, 11, 22)
NONE: Mapping[str, Any] = {}


def recipe(out: Path, **training: float) -> Recipe:
    return recipe_of(output_dir=str(out), training={"learning_rate": 1e-3, **training})


def trained(
    workspace: Path, asked: Recipe, day: int, is_complete: bool = False, step: int = 0
) -> RunDir:
    """A run with a checkpoint that nobody could load, which names it in what decide() says."""
    run = RunDir.create(workspace / "runs", asked.name, datetime(2026, 11, day))
    attempt = run_files.write_run(run, asked, machine(), plan(asked), Workspace(workspace))
    (run.checkpoints / "checkpoint-000004").mkdir()
    (run.checkpoints / "checkpoint-000004" / "manifest.json").write_text("{}")
    ended = "complete" if is_complete else "preempted"
    files.write_json(attempt.outcome_file, Outcome(complete=is_complete, ended=ended, step=step))
    if is_complete:
        Path(asked.output_dir).mkdir(parents=True, exist_ok=True)
        files.write_json(Path(asked.output_dir) / "lowmem.json", ExportedModel(run.run_id))
    return run


def decided(
    workspace: Path, asked: Recipe, from_run: str = "auto", identity: Mapping[str, Any] = NONE
) -> resume.ResumeChoice:
    runs, planned = workspace / "runs", plan(asked)
    folder = workspace / "tokens" / "x"
    tokens = TokenCache(asked, planned.shape, planned.data_format, identity, folder)
    return resume.decide(
        runs, asked, planned, tokens, from_run, lambda: RunDir.create(runs, asked.name, NOW)
    )


def test_the_levers_of_the_run_that_goes_on_are_those_of_its_plan(tmp_path):
    asked, runs = recipe(tmp_path / "a"), tmp_path / "runs"
    assert resume.begun_levers(runs, asked, "auto") is None
    run = trained(tmp_path, asked, day=1)
    levers = run.read_plan().strategy.levers
    checkpoint = str(run.checkpoints / "checkpoint-000004")
    for named in ("auto", str(run.root), checkpoint):
        assert resume.begun_levers(runs, asked, named) == levers
    assert resume.begun_levers(runs, asked, "never") is None
    trained(tmp_path, recipe(tmp_path / "b"), day=2, is_complete=True)
    longer = {"resume": ResumeSection(allow=("schedule",)), "output_dir": str(tmp_path / "b")}
    assert resume.begun_levers(runs, recipe(tmp_path / "b"), "auto") is None
    assert resume.begun_levers(runs, asked.model_copy(update=longer), "auto") == levers


def sealed(run: RunDir) -> Path:
    """Write a verified checkpoint of the run: files, hashes and seal."""
    folder = run.checkpoints / "checkpoint-000004"
    names = ("model.safetensors", "optimizer.pt", "rng_state.pth", "scheduler.pt")
    for name in (*names, "trainer_state.json"):
        (folder / name).write_text(name)
    described = {
        **{"samples_seen": 128, "world_size": 1, "engine": "plain", "zero_stage": 0},
        "mode": "cpu",
        "versions": manifest.versions(),
        "files": {
            path.name: {
                "bytes": path.stat().st_size,
                "sha256": hashlib.sha256(path.read_bytes()).hexdigest(),
            }
            for path in folder.iterdir()
            if path.name != manifest.FILE
        },
    }
    files.write_json(folder / manifest.FILE, {**described, "seal": manifest.seal(described)})
    return folder


def goes_on_with(run: RunDir):
    return pytest.raises(CheckpointError, match=f"{run.checkpoints}: no checkpoint can be used")


def test_an_unfinished_run_is_not_lost_behind_one_that_finished_in_another_folder(tmp_path):
    first = trained(tmp_path, recipe(tmp_path / "a"), day=1)
    trained(tmp_path, recipe(tmp_path / "b", learning_rate=2e-3), day=2, is_complete=True)
    with goes_on_with(first):
        decided(tmp_path, recipe(tmp_path / "a"))


def test_an_unfinished_run_is_not_lost_behind_another_training_in_the_same_folder(tmp_path):
    first = trained(tmp_path, recipe(tmp_path / "a"), day=1)
    trained(tmp_path, recipe(tmp_path / "a", learning_rate=2e-3), day=2, is_complete=True)
    with goes_on_with(first):
        decided(tmp_path, recipe(tmp_path / "a"))


def test_another_folder_starts_a_new_run_and_names_the_one_that_is_left(tmp_path):
    first = trained(tmp_path, recipe(tmp_path / "a"), day=1)
    start = decided(tmp_path, recipe(tmp_path / "b", learning_rate=2e-3))
    assert start.run.root != first.root
    assert start.line.splitlines() == [
        "starting a new run",
        (
            f"{first.run_id} has not finished (step 4, output_dir {tmp_path}/a); --resume"
            f" {first.root} continues it"
        ),
    ]


def test_a_run_that_finished_in_another_folder_is_not_this_one(tmp_path):
    """The same training: its model is not in the folder that was asked for."""
    trained(tmp_path, recipe(tmp_path / "a"), day=1, is_complete=True)
    assert decided(tmp_path, recipe(tmp_path / "a")).complete
    start = decided(tmp_path, recipe(tmp_path / "b"))
    assert not start.complete
    assert start.line == "starting a new run"


@pytest.mark.parametrize("holder", ["nothing", "another run"])
def test_a_complete_run_whose_model_is_not_there_is_not_reported_as_done(tmp_path, holder):
    run = trained(tmp_path, recipe(tmp_path / "a"), day=1, is_complete=True)
    model = tmp_path / "a" / "lowmem.json"
    model.unlink()
    if holder == "another run":
        files.write_json(model, ExportedModel("other-20261101-000000"))
    with goes_on_with(run):  # it would go on from its checkpoint
        decided(tmp_path, recipe(tmp_path / "a"))


def test_a_complete_run_named_by_resume_does_not_stand_for_a_model_in_another_folder(tmp_path):
    run = trained(tmp_path, recipe(tmp_path / "a"), day=1, is_complete=True)
    assert decided(tmp_path, recipe(tmp_path / "a"), str(run.root)).complete
    with goes_on_with(run):
        decided(tmp_path, recipe(tmp_path / "b"), str(run.root))


def test_a_run_begun_with_a_key_that_is_no_longer_taken_goes_on_without_it(tmp_path):
    run = trained(tmp_path, recipe(tmp_path / "a", data_seed=3), day=1)
    with goes_on_with(run):
        decided(tmp_path, recipe(tmp_path / "a"))


def test_another_data_file_is_named_and_not_called_a_changed_content(tmp_path):
    first, second = (
        recipe(tmp_path / "a").model_copy(update={"data": DataSection(train_file=name)})
        for name in ("first.jsonl", "second.jsonl")
    )
    run = trained(tmp_path, first, day=1, is_complete=True)
    made_of = {"train": "1", "validation": None, "limits": [], "version": 1}
    files.write_json(run.tokens_file, UsedTokens(tmp_path / "tokens" / "w", made_of))
    now = {**made_of, "train": "2"}
    line = decided(tmp_path, second, identity=now).line
    assert f"changed since {run.run_id}: " in line
    assert "data.train_file first.jsonl -> second.jsonl" in line
    assert "content" not in line
    line = decided(tmp_path, first, identity=now).line
    assert "the content of first.jsonl has changed" in line


def test_an_adapter_on_a_model_that_was_trained_whole_before_is_one_change(tmp_path):
    trained(tmp_path, recipe(tmp_path / "a"), day=1, is_complete=True)
    adapted = recipe(tmp_path / "a").model_copy(update={"lora": LoraSection(r=4)})
    assert decided(tmp_path, adapted).line.endswith(": lora added")


def test_a_finished_run_is_not_called_unfinished(tmp_path):
    run = trained(tmp_path, recipe(tmp_path / "a"), day=1, is_complete=True)
    with pytest.raises(CheckpointError, match="this finished run cannot be continued"):
        decided(tmp_path, recipe(tmp_path / "a", learning_rate=2e-3), str(run.root))


def test_what_trains_otherwise_in_the_same_folder_is_refused_while_it_is_unfinished(tmp_path):
    trained(tmp_path, recipe(tmp_path / "a"), day=1)
    with pytest.raises(
        CheckpointError,
        match=r"cannot be continued: its model, data or settings have changed .*learning_rate",
    ):
        decided(tmp_path, recipe(tmp_path / "a", learning_rate=2e-3))


def test_each_advice_of_a_refusal_leads_on(tmp_path):
    first = trained(tmp_path, recipe(tmp_path / "a"), day=1)
    changed = recipe(tmp_path / "a", seed=5)
    with pytest.raises(CheckpointError, match=r"settings have changed .*seed") as refused:
        decided(tmp_path, changed)
    advice = str(refused.value).partition("Undo the change to continue it,")[2]
    assert "--resume.allow=[seed]," in advice
    with goes_on_with(first):
        decided(tmp_path, recipe(tmp_path / "a"))
    with goes_on_with(first):
        decided(tmp_path, changed.model_copy(update={"resume": ResumeSection(allow=("seed",))}))
    assert "start over with --resume never," in advice
    assert decided(tmp_path, changed, "never").line == "starting a new run (--resume never)"
    assert advice.endswith("give it a name and a folder of its own: --name=NAME --output_dir=DIR")
    named = changed.model_copy(update={"name": "other", "output_dir": str(tmp_path / "b")})
    assert decided(tmp_path, named).line == "starting a new run"


@pytest.mark.parametrize(
    ("before", "now", "flags"),
    [
        ((4, 2), (4, 3), "--training.gradient_accumulation_steps=2 keeps"),
        (
            (6, 2),
            (16, 1),
            "--training.per_device_train_batch_size=12 keeps the effective batch of 12: 12 per"
            " device x 1 accumulation x 1 process, continue",
        ),
        ((7, 1), (4, 1), "per_device_train_batch_size=1 --training.gradient_accumulation_steps=7"),
    ],
)
def test_another_effective_batch_is_refused_with_the_flags_that_keep_it(
    tmp_path, before, now, flags
):
    keys = ("per_device_train_batch_size", "gradient_accumulation_steps")
    first = trained(tmp_path, recipe(tmp_path / "a", **dict(zip(keys, before, strict=True))), day=1)
    changed = recipe(tmp_path / "a", **dict(zip(keys, now, strict=True)))
    with pytest.raises(CheckpointError, match=r"effective batch \d+ -> \d+\)") as refused:
        decided(tmp_path, changed)
    assert flags in str(refused.value)
    typed = dict(re.findall(r"--training\.(\w+)=(\d+)", str(refused.value)))
    kept = dict(zip(keys, now, strict=True)) | {key: int(text) for key, text in typed.items()}
    with goes_on_with(first):
        decided(tmp_path, recipe(tmp_path / "a", **kept))


def test_a_longer_run_starts_anew_and_says_how_to_go_on_from_the_finished_one(tmp_path):
    shorter = recipe(tmp_path / "a", max_steps=4)
    trained(tmp_path, shorter, day=1, is_complete=True)
    start = decided(tmp_path, recipe(tmp_path / "a", max_steps=8))
    assert start.line.startswith("starting a new run: ")
    assert "add --resume.allow=[schedule] to go on from its step 0 instead" in start.line
    again = decided(tmp_path, recipe(tmp_path / "a", max_steps=8, learning_rate=2e-3))
    assert "resume.allow" not in again.line


def test_a_project_that_was_moved_goes_on(tmp_path):
    first = trained(tmp_path, recipe(tmp_path / "gone" / "model"), day=1)
    with goes_on_with(first):
        decided(tmp_path, recipe(tmp_path / "here" / "model"))


def test_a_damaged_recipe_is_refused_in_the_newest_run_and_passed_over_in_older_ones(tmp_path):
    older = trained(tmp_path, recipe(tmp_path / "b"), day=1)
    newest = trained(tmp_path, recipe(tmp_path / "a"), day=2)
    older.recipe_file.write_text("{")
    with goes_on_with(newest):
        decided(tmp_path, recipe(tmp_path / "a"))
    content = json.loads(newest.recipe_file.read_text())
    newest.recipe_file.write_text(json.dumps(content)[:100])
    with pytest.raises(CheckpointError, match=r"recipe\.json: missing or damaged"):
        decided(tmp_path, recipe(tmp_path / "a"))


def test_two_jobs_whose_output_folders_have_one_name_do_not_wait_for_each_other(tmp_path):
    workspace = Workspace(tmp_path)
    with layout.output_lock(workspace, recipe(tmp_path / "first" / "model")):
        with layout.output_lock(workspace, recipe(tmp_path / "second" / "model")):
            pass
        same = recipe(tmp_path / "second" / ".." / "first" / "model")
        other = same.model_copy(update={"name": "another"})
        for each in (same, other):  # two recipes would write over each other's model
            with pytest.raises(LockHeld, match="is in use"), layout.output_lock(workspace, each):
                pass
        elsewhere = Workspace(tmp_path / "second workspace")
        with pytest.raises(LockHeld, match="is in use"), layout.output_lock(elsewhere, same):
            pass
        with layout.dry_run_lock(workspace, same):  # it writes to a folder of its own
            pass


@pytest.mark.parametrize(
    ("content", "named"),
    [("{}", "manifest.json cannot be read; give another one"), (None, "without manifest.json")],
)
def test_a_checkpoint_that_is_named_and_cannot_be_continued_leads_to_resume_never(
    tmp_path, content, named
):
    run = trained(tmp_path, recipe(tmp_path / "a"), day=1)
    folder = run.checkpoints / "checkpoint-000004"
    (folder / "manifest.json").unlink()
    if content is not None:
        (folder / "manifest.json").write_text(content)
    with pytest.raises(CheckpointError, match=f"--resume {folder}: .*{named}.*never"):
        decided(tmp_path, recipe(tmp_path / "a"), str(folder))


@pytest.mark.parametrize("is_complete", [False, True])
def test_a_run_whose_rows_an_earlier_version_tokenised_keeps_them(tmp_path, is_complete):
    asked = recipe(tmp_path / "a")
    run, planned = trained(tmp_path, asked, day=1, is_complete=is_complete), plan(asked)
    before = {"version": 8, "train": "x", "limits": [], "validation": None}
    identity = {**before, token_cache.BESIDE_CONFIG: "bart"}
    folder = tmp_path / "tokens" / files.digest(identity)
    tokens = TokenCache(asked, planned.shape, planned.data_format, identity, folder)
    runs = tmp_path / "runs"

    def rows_of(from_run: str) -> str:
        return layout.as_begun(tokens, runs, asked, from_run).folder.name

    assert rows_of("auto") == folder.name  # the run does not say what it was begun with
    files.write_json(run.tokens_file, UsedTokens(folder.with_name(files.digest(before)), before))
    checkpoint = run.checkpoints / "checkpoint-000004"
    for word in ("auto", str(run.root), str(checkpoint)):
        assert rows_of(word) == files.digest(before)
        assert layout.as_begun(tokens, runs, asked, word).identity == before
    assert rows_of("never") == folder.name
    other = layout.as_begun(tokens, runs, recipe(tmp_path / "b"), "auto")
    assert other.folder == folder
    files.write_json(run.tokens_file, UsedTokens(folder, identity))
    assert rows_of("auto") == folder.name


def test_a_checkpoint_that_another_run_takes_over_is_the_one_that_was_written(tmp_path):
    checkpoint = sealed(trained(tmp_path, recipe(tmp_path / "a"), day=1))
    start = decided(tmp_path, recipe(tmp_path / "b"), str(checkpoint))
    continues = start.run.read_continues()
    assert continues and (continues.checkpoint, continues.samples_seen) == (checkpoint, 128)
    (checkpoint / "optimizer.pt").write_text("optimizer.pT")  # a flipped bit
    with pytest.raises(CheckpointError, match=r"optimizer\.pt was changed after it was written"):
        decided(tmp_path, recipe(tmp_path / "b"), str(checkpoint))


@pytest.mark.parametrize(
    ("before", "now", "text"),
    [
        (None, {"load_in_4bit": True}, "quantization added"),
        (
            {"load_in_4bit": True},
            {"load_in_4bit": True, "bnb_4bit_quant_type": "fp4"},
            "quantization.bnb_4bit_quant_type nf4 -> fp4",
        ),
    ],
)
def test_other_bits_of_the_weights_are_refused_unless_another_model_is_allowed(
    tmp_path, before, now, text
):
    def asked(section: dict[str, Any] | None, **keys: Any) -> Recipe:
        quantization = section and QuantizationSection(**section)
        keys |= {"lora": LoraSection(r=4), "quantization": quantization}
        return recipe(tmp_path / "a").model_copy(update=keys)

    run = trained(tmp_path, asked(before), day=1)
    with pytest.raises(CheckpointError, match=rf"\({text}\).*--resume.allow=\[model\]"):
        decided(tmp_path, asked(now))
    with goes_on_with(run):
        decided(tmp_path, asked(now, resume=ResumeSection(allow=("model",))))


def test_a_run_that_has_trained_goes_on_and_not_a_newer_one_that_has_not(tmp_path):
    first = trained(tmp_path, recipe(tmp_path / "a"), day=1)
    newer = trained(tmp_path, recipe(tmp_path / "a"), day=2)
    checkpoint = newer.checkpoints / "checkpoint-000004"
    (checkpoint / "manifest.json").unlink()
    checkpoint.rmdir()
    files.write_json(newer.continues_file, Continues(first.checkpoints / checkpoint.name, 128, 32))
    with goes_on_with(first):
        decided(tmp_path, recipe(tmp_path / "a"))


def test_a_finished_run_does_not_stand_for_an_unfinished_one_that_trains_otherwise(tmp_path):
    trained(tmp_path, recipe(tmp_path / "a"), day=1, is_complete=True)
    unfinished = trained(tmp_path, recipe(tmp_path / "a", learning_rate=2e-3), day=2)
    message = f"{unfinished.root}: this unfinished run cannot be continued"
    with pytest.raises(CheckpointError, match=message):
        decided(tmp_path, recipe(tmp_path / "a"))


@pytest.mark.parametrize("max_steps", [4, 8])
def test_a_finished_run_is_not_made_longer_by_fewer_steps_or_as_many(tmp_path, max_steps):
    trained(tmp_path, recipe(tmp_path / "a", max_steps=9), day=1, is_complete=True, step=8)
    asked = recipe(tmp_path / "a", max_steps=max_steps)
    assert "resume.allow" not in decided(tmp_path, asked).line
    allowed = asked.model_copy(update={"resume": ResumeSection(allow=("schedule",))})
    assert decided(tmp_path, allowed).line.startswith("starting a new run: changed since")


@pytest.mark.parametrize("from_run", ["auto", "never"])
def test_a_key_that_cannot_seal_checkpoints_ends_a_start_before_it_has_a_run(
    tmp_path, monkeypatch, from_run
):
    key = tmp_path / "key"
    key.write_bytes(b"short")
    monkeypatch.setenv("LOWMEM_KEY", str(key))
    with pytest.raises(ResourceError, match=f"{key}: found 5 bytes, expected 32"):
        decided(tmp_path, recipe(tmp_path / "a"), from_run)
    assert not (tmp_path / "runs").exists()
