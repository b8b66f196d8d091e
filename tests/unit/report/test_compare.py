"""Two runs are compared where they are one comparison, by figures that are what their steps add up
to."""

from __future__ import annotations

import itertools
import re
from dataclasses import asdict, replace
from datetime import datetime
from pathlib import Path

import pytest

from launch.__main__ import main
from launch.base import files
from launch.base.errors import ConfigError, ResourceError
from launch.base.workspace import Workspace
from launch.data import token_cache
from launch.render import run_files
from launch.report import comparable, compare
from launch.run_folder import manifest, steps
from launch.run_folder.layout import AttemptDir, RunDir
from launch.schema.machine import GIB
from launch.schema.plan import Peak
from launch.schema.result import Continues, HeldOut, Outcome, StepEvent
from tests import builders

START = 1_000_000.0  # unix time at which the first step of a run ends
STEP_S, WAIT_S = 2.0, 0.5


@pytest.fixture
def workspace(tmp_path, monkeypatch) -> Workspace:
    """A house with rows; runs are written into it as a launcher and its rank 0 write them."""
    monkeypatch.setenv("LOWMEM_ROOT", str(tmp_path / "workspace"))
    builders.write_parquet(tmp_path / "train.parquet", builders.rows(20))
    builders.write_parquet(tmp_path / "valid.parquet", builders.rows(5, seed=1))
    return Workspace.here()


def begun(
    workspace: Workspace, name: str, rows: Path | None = None, **sections
) -> tuple[RunDir, AttemptDir]:
    """A run of a recipe that trains on these rows, with its first attempt; effective batch 8 unless
    told otherwise."""
    rows = rows or workspace.root.parent / "train.parquet"
    data = {
        "train_file": str(rows),
        "validation_file": str(rows.with_name("valid.parquet")),
        **sections.pop("data", {}),
    }
    training = {
        "per_device_train_batch_size": 8,
        "gradient_accumulation_steps": 1,
        **sections.pop("training", {}),
    }
    recipe = builders.recipe_of(name=name, data=data, training=training, **sections)
    machine = builders.machine()
    plan = builders.plan(recipe, machine)
    run = RunDir.create(workspace.runs, name, datetime(2026, 1, 1))
    attempt = run_files.write_run(run, recipe, machine, plan, workspace)
    tokens = token_cache.token_cache(workspace.cache, recipe, plan.shape, plan.data_format)
    run.write_tokens(tokens)
    return run, attempt


def step(number: int, time: float, **fields) -> StepEvent:
    """Step number n of 8 samples, 80 tokens, 100 with padding; its loss is 1/n."""
    facts = {
        "step": number,
        "max_steps": 10,
        "epoch": 0.0,
        "samples_seen": 8 * number,
        "tokens": 80,
        "computed_tokens": 100,
        "samples": 8,
        "loss": 1 / number,
        "learning_rate": 1e-3,
        "grad_norm": None,
        "seconds": STEP_S,
        "data_seconds": WAIT_S,
        "vram_allocated_bytes": 0,
        "vram_reserved_bytes": 0,
        "vram_total_bytes": 0,
        "host_pss_bytes": GIB,
    }
    return StepEvent(**{**facts, "time": time, **fields})


def write(file: Path, records: list[StepEvent] | list[HeldOut]) -> None:
    with file.open("a", encoding="utf-8") as lines:
        lines.writelines(files.to_json(asdict(one)) + "\n" for one in records)


def trained(
    workspace: Workspace,
    name: str,
    count: int = 10,
    rows: Path | None = None,
    sections=None,
    **fields,
) -> RunDir:
    """A run of so many steps, each STEP_S after the one before, an evaluation of 3 s after steps 5
    and 10."""
    run, attempt = begun(workspace, name, rows, **(sections or {}))
    later = [3.0 * (number > 5) for number in range(1, count + 1)]
    write(
        attempt.events_file,
        [step(n, START + STEP_S * n + later[n - 1], **fields) for n in range(1, count + 1)],
    )
    ends = [
        (number, START + STEP_S * number + 3.0 * number / 5)
        for number in (5, 10)
        if number <= count
    ]
    write(attempt.held_out_file, [HeldOut(n, 8 * n, 2 / n, 3.0, end) for n, end in ends])
    ended = "complete" if count == 10 else "preempted"
    outcome = Outcome(complete=count == 10, ended=ended, host_pss_bytes=2 * GIB)
    files.write_json(attempt.outcome_file, outcome)
    return run


def cells(a: RunDir, b: RunDir) -> dict[str, tuple[str, str, str]]:
    return {
        one.name: one.cells() for one in compare.figures(comparable.read(a), comparable.read(b))
    }


def test_the_figures_are_what_the_steps_add_up_to(workspace):
    a = trained(workspace, "before")
    b = trained(workspace, "after", seconds=1.0, data_seconds=0.0, computed_tokens=80)
    found = cells(a, b)
    assert found["non-padding tokens/s"] == ("40", "80", "2.000")
    assert found["padding, of the tokens computed"] == ("20.0%", "0.0%", "")
    assert found["seconds per step, median"] == ("2", "1", "0.500")
    # 8 steady steps and two evaluations between the end of step 2 and that of the last evaluation:
    # 8 x 2 + 2 x 3 s
    assert found["wall time: busy with steps"] == (f"{8 * 1.5 / 22:.1%}", f"{8 / 22:.1%}", "")
    assert found["  waiting for data"] == (f"{8 * 0.5 / 22:.1%}", "0.0%", "")
    assert found["  evaluations"] == (f"{6 / 22:.1%}", f"{6 / 22:.1%}", "")
    assert found["  saves, logs, steps that were lost"] == ("0.0%", f"{8 / 22:.1%}", "")
    assert found["VRAM allocated, peak"] == ("no GPU", "no GPU", "")
    assert found["host RAM of the job, peak"] == ("2.00 GiB", "2.00 GiB", "1.000")
    assert found["training loss, 72-80 samples"] == ("0.1000", "0.1000", "1.000")
    assert found["held-out loss at 80 samples"] == ("0.2000", "0.2000", "1.000")
    assert found["non-padding tokens of 80 samples"] == ("800", "800", "1.000")


def test_vram_is_shown_as_measured_and_as_predicted(workspace):
    on_gpu = {
        "vram_allocated_bytes": 3 * GIB,
        "vram_reserved_bytes": 4 * GIB,
        "vram_total_bytes": 20 * GIB,
    }
    run = trained(workspace, "after", **on_gpu)
    plan = run.read_plan()
    estimate = replace(
        plan.estimate,
        peak=Peak("backward", "mm", {"weights": 2 * GIB}),
        fragmentation_bytes=GIB // 2,
    )
    gpu_plan = replace(plan, strategy=replace(plan.strategy, device="cuda"), estimate=estimate)
    files.write_json(run.attempt(1).plan_file, asdict(gpu_plan))
    found = compare.figures(comparable.read(trained(workspace, "before")), comparable.read(run))
    rows = [(one.name, *one.cells()) for one in found]
    at = [name for name, *_ in rows].index("VRAM allocated, peak")
    assert rows[at : at + 4] == [
        ("VRAM allocated, peak", "no GPU", "3.00 GiB", ""),
        ("  predicted", "-", "2.00 GiB", ""),
        ("VRAM reserved, peak", "no GPU", "4.00 GiB", ""),
        ("  predicted", "-", "2.50 GiB", ""),
    ]


def test_losses_are_compared_at_equal_samples_where_one_has_trained_further(workspace):
    found = cells(trained(workspace, "before"), trained(workspace, "after", count=6))
    assert found["training loss, 43-48 samples"] == (f"{1 / 6:.4f}", f"{1 / 6:.4f}", "1.000")
    assert found["held-out loss at 40 samples"] == ("0.4000", "0.4000", "1.000")
    assert found["non-padding tokens of 48 samples"] == ("480", "480", "1.000")


def test_no_held_out_loss_is_given_where_none_was_measured_at_equal_samples(workspace):
    other, attempt = begun(workspace, "after")
    write(attempt.events_file, [step(n, START + n) for n in range(1, 11)])
    write(attempt.held_out_file, [HeldOut(n, 8 * n, 2 / n, 0.1, START + n) for n in (4, 9)])
    found = cells(trained(workspace, "before"), other)
    assert found["held-out loss at equal samples"] == ("none", "none", "")


def test_steps_that_were_trained_again_count_once_and_their_time_is_lost(workspace):
    run = trained(workspace, "before", count=6)
    again = run.new_attempt()
    files.write_json(again.plan_file, asdict(run.read_plan()))
    write(
        again.events_file,
        [step(n, START + 100 + STEP_S * n, seconds=STEP_S / 2) for n in range(5, 11)],
    )
    # before its steps are steady
    write(again.held_out_file, [HeldOut(5, 40, 0.4, 50.0, START + 100 + STEP_S * 5)])
    parts = steps.stretches(run)
    assert [[one.step for one in part.counted] for part in parts] == [
        [1, 2, 3, 4],
        [5, 6, 7, 8, 9, 10],
    ]
    assert [[one.step for one in part.steady] for part in parts] == [[3, 4], [7, 8, 9, 10]]
    # the first one's was of a step that was lost
    assert [len(part.evaluations) for part in parts] == [0, 1]
    speed = steps.speed(parts)
    assert speed is not None
    assert speed.tokens_per_s == pytest.approx(6 * 80 / (2 * STEP_S + 4 * STEP_S / 2))
    # up to step 6, with the evaluation before it; from step 6 to step 10
    wall_s = (4 * STEP_S + 3) + 4 * STEP_S
    assert speed.busy == pytest.approx((8 - 6 * WAIT_S) / wall_s)
    assert (speed.evaluating, speed.rest) == (0, pytest.approx(1 - 8 / wall_s))


def test_no_share_of_the_wall_time_is_given_where_the_clock_was_set_back(workspace):
    run, attempt = begun(workspace, "before")
    write(attempt.events_file, [step(n, START + STEP_S * n - 60 * (n > 5)) for n in range(1, 11)])
    speed = steps.speed(steps.stretches(run))
    assert speed is not None
    assert (speed.busy, speed.waiting, speed.evaluating, speed.rest) == (None,) * 4
    assert speed.tokens_per_s == 80 / STEP_S


def test_a_run_that_took_over_another_begins_with_its_steps(workspace):
    earlier = trained(workspace, "before", vram_allocated_bytes=GIB)
    saved = earlier.checkpoints / manifest.name(4)
    run, attempt = begun(workspace, "after", training={"per_device_train_batch_size": 16})
    files.write_json(run.continues_file, Continues(saved, 32))
    write(
        attempt.events_file,
        [step(n, START + n, samples=16, samples_seen=16 * n) for n in (3, 4, 5)],
    )
    side = comparable.read(run)
    assert [one.samples_seen for one in side.steps] == [8, 16, 24, 32, 48, 64, 80]
    assert side.missing() == 0
    # those ran with another batch
    assert cells(earlier, run)["VRAM allocated, peak"] == ("1.00 GiB", "no GPU", "")
    texts = [one.text for one in comparable.differences(comparable.read(earlier), side)]
    assert f"B took over {saved} at sample 32" in texts
    assert (
        "B was planned again: speed and memory are of its last plan, losses of all its steps"
        in texts
    )


def test_each_lever_that_differs_is_named(workspace):
    side = comparable.read(trained(workspace, "before"))
    strategy = side.plan.strategy.with_levers(every_n_layers=2, num_output_chunks=8)
    other = replace(side, plan=replace(side.plan, strategy=strategy))
    texts = [each.text for each in comparable.differences(side, other)]
    assert [text for text in texts if text.startswith("levers")] == [
        "levers.every_n_layers: A 0, B 2",
        "levers.num_output_chunks: A 1, B 8",
    ]


def test_samples_whose_steps_were_never_written_are_counted(workspace):
    run, attempt = begun(workspace, "before")
    write(attempt.events_file, [step(n, START + n) for n in (1, 2, 3, 6, 7)])
    assert comparable.read(run).missing() == 16


def test_a_last_line_that_is_half_written_is_left_out(workspace):
    run, attempt = begun(workspace, "before")
    write(attempt.events_file, [step(1, START), step(2, START + 1, loss=float("nan"))])
    with attempt.events_file.open("a") as file:
        file.write('{"step": 3, "max_st')
    found = steps.events(attempt)
    assert [one.step for one in found] == [1, 2]
    assert found[1].loss != found[1].loss
    assert comparable.read(run).ending == "at step 2 of 10"


LENGTHS = {"group_by_length": True}
OTHERS = {
    "the same": ({}, None),
    "cut otherwise": (
        {"training": {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4}},
        None,
    ),
    "other order": ({"data": LENGTHS}, None),
    "other batch": ({"training": {"gradient_accumulation_steps": 2}}, "effective batch: A 8, B 16"),
    "other model": ({"model": {"shape": "mini-chat"}}, "model: A llama-tiny of"),
    "part of it": ({"model": {"freeze": ["model.embed_tokens"]}}, "trained parameters: A"),
    "LoRA": ({"lora": {"r": 4}}, r"trained parameters: A [\d,]+ \(0 of LoRA\), B"),
    "shorter rows": ({"data": {"max_length": 64}}, "how many rows are read"),
    "other tokenizer": (
        {"tokenizer": {"split": "character"}},
        "data: A and B differ in the tokenizer",
    ),
}


@pytest.mark.parametrize("name", OTHERS)
def test_only_runs_of_one_model_data_and_effective_batch_are_compared(workspace, capsys, name):
    sections, expected = OTHERS[name]
    trained(workspace, "before")
    trained(workspace, "after", sections={key: dict(value) for key, value in sections.items()})
    code = main(["compare", "before", "after"])
    said = capsys.readouterr()
    page = workspace.runs / "compare-before-20260101-000000-after-20260101-000000.html"
    if expected is None:
        assert code == 0
        assert "\nsame: model llama-tiny" in said.out
        assert said.out.endswith(f"page: {page}\n")
        return
    assert code == 2
    assert re.search(expected, said.err)
    assert re.search(f"differs: .*{expected}", said.out)
    assert "tokens/s" not in said.out
    assert not page.exists()
    assert main(["compare", "before", "after", "--anyway"]) == 0
    assert "tokens/s" in capsys.readouterr().out
    assert re.search(f"<li class=bad>.*{expected}", page.read_text())


def test_the_content_of_the_rows_decides_not_their_place(workspace, tmp_path):
    (tmp_path / "moved").mkdir()
    for name in ("train.parquet", "valid.parquet"):
        (tmp_path / "moved" / name).write_bytes((tmp_path / name).read_bytes())
    a, moved = (
        trained(workspace, "before"),
        trained(workspace, "moved", rows=tmp_path / "moved/train.parquet"),
    )
    builders.write_parquet(tmp_path / "other/train.parquet", builders.rows(21))
    builders.write_parquet(tmp_path / "other/valid.parquet", builders.rows(6, seed=1))
    other = trained(workspace, "other", rows=tmp_path / "other/train.parquet")
    first = comparable.read(a)
    assert comparable.differences(first, comparable.read(moved)) == []
    found = [
        one.text for one in comparable.differences(first, comparable.read(other)) if one.blocks
    ]
    assert found[0] == "data: A and B differ in the content of data.train_file"
    assert found[1].startswith("held-out rows: A sha256 ")


def test_packed_sequences_and_rows_are_compared_by_their_tokens(workspace, capsys):
    rows = trained(workspace, "before")
    full = {"data": {"packing": True}, "training": {"per_device_train_batch_size": 2}}
    trained(workspace, "after", sections=full, samples=2, tokens=82)
    packed = workspace.runs / "after"
    assert main(["compare", str(rows.root), str(packed)]) == 0
    said = capsys.readouterr().out
    assert (
        "effective batch: A 8 rows of 80 tokens in all, B 2 packed sequences of 82 tokens in all"
        in said
    )
    found = cells(rows, RunDir(next(packed.iterdir())))
    assert found["training loss, 720-800 tokens"] == (
        "0.1000",
        f"{1 / 9:.4f}",
        "1.111",
    )  # 9 steps of 82 come before 800
    assert found["held-out loss at 800 and 820 tokens"] == ("0.2000", "0.2000", "1.000")
    trained(workspace, "fuller", sections=full, samples=2, tokens=90)
    assert main(["compare", "before", "fuller"]) == 2
    assert "B 2 packed sequences of 90 tokens in all" in capsys.readouterr().err


def test_all_that_differs_is_said_and_the_page_shows_it_as_text(workspace, capsys):
    trained(workspace, "before")
    hostile = {
        "training": {"seed": 1, "learning_rate": 1e-4},
        "data": {"text_column": "<script>\x1b[2J"},
    }
    trained(workspace, "after", sections=hostile)
    assert main(["compare", "before", "after", "--anyway"]) == 0
    said = capsys.readouterr().out
    assert "differs: training.seed: A 23333, B 1\n" in said
    assert "differs: training.learning_rate: A 5e-05, B 0.0001\n" in said
    assert "\x1b" not in said
    (page,) = workspace.runs.glob("*.html")
    text = page.read_text()
    assert "&lt;script&gt;" in text
    assert text.count("<script") == 1  # the page's own
    # A and B: training loss and held-out loss with two axes each, tokens/s, which is constant
    assert text.count("<polyline") == 2 * (2 + 2 + 1)
    assert "src=" not in text
    assert "href=" not in text


def test_a_run_is_found_by_its_recipe_its_name_or_its_folder(workspace, monkeypatch):
    first = trained(workspace, "before")
    newest = trained(workspace, "before")
    begun(workspace, "before")  # which has trained nothing yet
    assert comparable.find(workspace, "before").root == newest.root
    assert comparable.find(workspace, str(workspace.runs / "before")).root == newest.root
    words = (first.run_id, "before/20260101-000000", str(first.root), str(first.root) + "/")
    assert {comparable.find(workspace, word).root for word in words} == {first.root}
    monkeypatch.chdir(first.root)
    assert comparable.find(workspace, ".").root == first.root


def test_what_is_no_run_is_told_what_to_do(workspace):
    with pytest.raises(
        ResourceError, match=r"recipe has no run in .*; python -m launch run single_gpu makes one"
    ):
        comparable.find(workspace, "single_gpu")
    trained(workspace, "before")
    with pytest.raises(ResourceError, match=r"befor: found no run, .*nearest: before"):
        comparable.find(workspace, "befor")
    run, _ = begun(workspace, "idle")
    with pytest.raises(ResourceError, match=f"{run.run_id} has no step in its events yet"):
        comparable.find(workspace, "idle")
    with pytest.raises(ConfigError, match="are the same run"):
        compare.run(workspace, "before", "before-20260101-000000", anyway=False)


def test_a_run_of_another_version_is_refused_in_one_line(workspace, capsys):
    trained(workspace, "before")
    run = trained(workspace, "after")
    plan = files.read(run.attempt(1).plan_file, dict) or {}
    files.write_json(run.attempt(1).plan_file, {**plan, "strategy": {}})
    assert main(["compare", "before", "after"]) == 2
    assert re.fullmatch(
        r"error: .*written by another version of lowmem, or is damaged; run it again\n",
        capsys.readouterr().err,
    )


@pytest.mark.parametrize(
    ("name", "content"),
    [
        *itertools.product(("attempts/01/plan.json", "tokens.json"), ("{", "[]", "\xff", "{}")),
        ("tokens.json", '{"folder": "/a", "made_of": {"limits": 1}}'),
        ("tokens.json", '{"folder": "/a", "made_of": {}}'),
        ("attempts/01/outcome.json", "{"),
    ],
)
def test_a_damaged_file_of_a_run_is_named_in_one_line(workspace, capsys, name, content):
    trained(workspace, "before")
    run = trained(workspace, "after")
    file = run.root / name
    file.write_text(content)
    assert main(["compare", "before", "after"]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"error: {file}: missing or damaged (")
    assert len(error.splitlines()) == 1


def test_the_page_of_a_run_is_found_by_its_recipe(workspace, capsys):
    run = trained(workspace, "sft")
    assert main(["report", "sft"]) == 3
    assert f"{run.report_file}: not there" in capsys.readouterr().err
    run.report_file.write_text("<html>")
    for name in ("sft", run.run_id, str(run.root)):
        assert main(["report", name]) == 0
        assert capsys.readouterr().out == f"page: {run.report_file}\n"
    assert main(["report"]) == 2
