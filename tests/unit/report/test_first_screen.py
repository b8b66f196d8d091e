"""The plan in short: at most 14 lines of 100 columns, and nothing is changed in silence."""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime

import pytest

from launch.base.text import COLUMNS, WHOLE, duration, step_seconds
from launch.predict import seconds_margins
from launch.report import first_screen, plan_lines
from launch.schema.plan import Change, SecondsCorrection, SourceRows, Switch
from tests.builders import gpu, machine, plan, recipe_of

NOW = datetime(2026, 3, 5, 22, 10)
LOG = ("log", "logs/chat_trainer_wish-20260305-221000.log")


def screen(*below: tuple[str, str], finished_steps: int = 0, on=None, **facts) -> list[str]:
    recipe, on = recipe_of(training={"num_train_epochs": 3}), on or machine()
    made = replace(plan(recipe, on), rows=640, **facts)
    lines = first_screen.lines(recipe, on, made, NOW, finished_steps, below)
    assert len(lines) <= first_screen.LINES
    assert max(map(len, lines)) <= COLUMNS
    return lines


def value(lines: list[str], label: str) -> str:
    (line,) = (line for line in lines if line.startswith(f"  {label} "))
    return line.removeprefix(f"  {label}").strip()


@pytest.mark.parametrize(
    ("step_s", "finished_steps", "words"),
    [
        (1.0, 0, "1 s a step predicted x 60 steps = 60 s: ends about 22:11"),
        (60.0, 0, "60 s a step predicted x 60 steps = 60 min: ends about 23:10"),
        (240.0, 0, "4 min a step predicted x 60 steps = 4.0 h: ends about 2026-03-06 02:10"),
        (240.0, 45, "4 min a step predicted x 15 of 60 steps left = 60 min: ends about 23:10"),
        (28.0 * 500, 0, "3.9 h a step predicted x 60 steps = 9.7 days: ends about 2026-03-15"),
        (1e9, 0, "11,574.1 days a step predicted x 60 steps = 694,444.4 days; hopeless on"),
        (None, 0, "60 steps; seconds a step are not known yet: no step of this kind was traced"),
    ],
)
def test_the_time_is_a_step_times_the_steps_that_are_left_and_the_clock_at_its_end(
    step_s, finished_steps, words
):
    lines = screen(seconds_per_step=step_s, finished_steps=finished_steps)
    assert value(lines, "time").startswith(words)


def test_the_time_has_the_evaluations_that_are_left():
    """One of 20 s behind each of three epochs of 20 steps."""
    full_text = screen(seconds_per_step=1.0, seconds_per_evaluation=20.0)
    words = "1 s a step predicted x 60 steps + evaluating = 2 min: ends about 22:12"
    assert value(full_text, "time") == words
    rest = screen(seconds_per_step=1.0, seconds_per_evaluation=20.0, finished_steps=45)
    words = "1 s a step predicted x 15 of 60 steps left + evaluating = 35 s: ends about 22:11"
    assert value(rest, "time") == words


@pytest.mark.parametrize("step_s", [0.123, 1000.0])
def test_seconds_on_a_card_have_the_margin_of_its_class(step_s):
    on = machine(gpus=1)
    margin = seconds_margins.of_cards(on.gpus)
    assert margin
    least, most = margin.least * step_s, margin.most * step_s
    within = (
        f"{least:.3g} to {most:.3g}" if most < 100 else f"{duration(least)} to {duration(most)}"
    )
    lines = screen(on=on, seconds_per_step=step_s)
    words = f"{step_seconds(step_s)} ({within}) predicted x 60 steps = "
    assert value(lines, "time").startswith(words)
    made = replace(plan(recipe_of(), on), seconds_per_step=step_s)
    (time,) = (row for row in plan_lines.facts(recipe_of(), on, made) if row.label == "time")
    assert time.why == (margin.reason,)


def test_seconds_on_a_card_like_which_none_was_measured_say_so():
    on = machine(cards=(replace(gpu(), name="RTX 3080 Laptop"),))
    lines = screen(on=on, seconds_per_step=12.3)
    words = "12.3 s (no evidence for this card) x 60 steps = 12 min: ends about 22:23"
    assert value(lines, "time") == words


def test_a_compiled_training_has_the_margin_of_compiled_ones():
    """Of trainings on such cards, none was measured that is not compiled."""
    on = machine(cards=(replace(gpu(), name="RTX A6000"),))
    assert "no evidence" in value(screen(on=on, seconds_per_step=12.3), "time")
    recipe = recipe_of(training={"torch_compile": True, "max_steps": 60})
    made = replace(plan(recipe, on), seconds_per_step=12.3)
    (time,) = (row for row in plan_lines.facts(recipe, on, made) if row.label == "time")
    assert "(RTX A and A40, compiled)" in time.why[0]
    assert "x 60 steps + compiling = 13 min" in time.value  # 12 without it


def test_cores_that_others_have_are_said_with_what_they_cost():
    on = replace(machine(), cpu_count=2, cores_taken=1.04)
    lines = screen(on=on, seconds_correction=SecondsCorrection(factor=2.0, slowdown=2.0))
    words = "2 CPU cores, 1.0 taken by others: steps take 2.0 times as long"
    assert value(lines, "mode").endswith(words)
    assert value(screen(on=on), "mode").endswith("2 CPU cores")


def test_steps_that_are_not_counted_have_no_end():
    lines = screen(seconds_per_step=2.0, packing=True)
    assert value(lines, "time").startswith("2 s a step predicted; steps and end are not known")


def change(number: int, reason: str = "no GPU here: the small model; name another") -> Change:
    return Change(f"training.key_{number:02}", "x" * 30, "small", reason)


def test_changes_that_fit_are_all_shown_under_their_cause():
    lines = screen(LOG, seconds_per_step=1.0, changes=(change(1), change(2)))
    (text,) = (line for line in lines if line.startswith("  changed"))
    assert "key_01 xxx" in text
    assert "-> small" in text
    whole = " ".join(line.strip() for line in lines)
    assert "key_02 " in whole
    assert "(no GPU here: the small model)" in whole
    assert value(lines, "more") == "--explain shows all settings and their reasons"
    assert lines[-1].endswith(LOG[1])


def test_a_key_by_another_name_is_said_without_its_value():
    renamed = Change("training.new", "true", "true", "training.old is now training.new")
    lines = screen(LOG, seconds_per_step=1.0, changes=(renamed,))
    assert value(lines, "changed") == "training.old is now training.new"


@pytest.mark.parametrize("count", [5, 14, 200])
def test_changes_that_do_not_fit_are_counted_and_a_preset_gives_way_to_single_causes(count):
    memory = Change("training.batch", "16", "4", "16 samples need 30 GiB; the batch stays 32")
    made = (*(change(number) for number in range(count)), memory)
    lines = screen(("run", "starting a new run"), LOG, seconds_per_step=1.0, changes=made)
    assert len(lines) <= first_screen.LINES
    whole = "\n".join(lines)
    assert "batch 16 -> 4 (16 samples need 30 GiB)" in whole
    assert whole.count("\n  changed ") == 2  # each cause is seen
    shown = sum(f"key_{number:02} " in whole for number in range(count))
    assert 0 < shown < count
    assert f"--explain shows {count - shown} more change" in value(lines, "more")


def test_lengths_are_said_to_be_assumed_until_rows_are_tokenised():
    assert "640 rows, lengths are assumed: 128 tokens each" in value(screen(), "data")


def test_a_plan_that_was_not_checked_says_so():
    recipe = recipe_of(launch={"assume_fits": True})
    words = "launch.assume_fits: predicted memory was not checked"
    assert any(note.startswith(words) for note in plan_lines.notes(recipe, plan(recipe)))
    assert not list(plan_lines.notes(recipe_of(), plan()))


def test_a_warning_is_shown_where_lines_are_left():
    small = plan(recipe_of())
    noted = replace(small.data_format, notes=("columns that are not read: url, score",))
    assert value(screen(data_format=noted), "note") == "columns that are not read: url, score"


def test_the_plan_names_the_files_the_share_of_tokens_with_a_loss_and_the_template():
    small = plan(recipe_of())
    facts = replace(small.data_format, num_files=12, template="of /models/a")
    lines = screen(data_format=facts, target_share=0.364)
    assert value(lines, "tokens") == "36% have a loss, template of /models/a"
    assert lines.index(next(line for line in lines if line.startswith("  tokens"))) == 3
    assert value(lines, "data").startswith("train.parquet (12 files): 640 rows,")
    full = plan_lines.full_text(recipe_of(), machine(), replace(small, data_format=facts))
    assert any(line.endswith("template: of /models/a") for line in full)
    assert any("train.parquet (12 files)" in line for line in full)


def test_a_full_screen_says_sources_and_template_too():
    small = plan(recipe_of())
    facts = replace(small.data_format, template="of /models/a")
    sources = [{"path": "/a/1/train.jsonl"}, {"path": "/b/1/train.jsonl", "weight": 2}]
    recipe = recipe_of(data={"train_file": sources})
    rows = tuple(SourceRows(source.path, source.weight, 320) for source in recipe.data.sources)
    made = replace(small, data_format=facts, sources=rows, changes=tuple(map(change, range(99))))
    lines = first_screen.lines(recipe, machine(), made, NOW, 0, (("run", "a new run"), LOG))
    assert len(lines) == first_screen.LINES
    assert value(lines, "sources") == (
        "rows an epoch: a/1/train.jsonl 320, b/1/train.jsonl x 2 320"
    )
    assert value(lines, "tokens") == "template of /models/a"


def test_nothing_is_shortened_or_folded_in_a_file_or_a_pipe():
    path = "/models/" + "a long name/" * 9 + "qwen"
    small, on = plan(recipe_of()), machine(name="a machine " * 20)
    made = replace(
        small,
        shape=replace(small.shape, name=path),
        data_format=replace(small.data_format, notes=("a note " * 40,)),
        changes=(Change("data.columns", "x" * 300, "y" * 300, "a reason " * 30),),
    )
    lines = first_screen.lines(recipe_of(), on, made, NOW, columns=WHOLE)
    whole = "\n".join(lines)
    assert lines[0] == f"plan for {recipe_of().name} on {on.name}"
    assert value(lines, "model").startswith(f"{path}: ")
    assert value(lines, "changed") == f"columns {'x' * 300} -> {'y' * 300} ({'a reason ' * 30})"
    assert value(lines, "note") == ("a note " * 40).strip()
    assert "..." not in whole
    folded = first_screen.lines(recipe_of(), on, made, NOW)
    assert max(map(len, folded)) <= COLUMNS
    assert "..." in "\n".join(folded)


def test_long_names_are_shortened_and_a_path_that_can_be_pasted_is_not():
    path = "/" + "long/" * 40 + "run.log"
    on = machine(name="a machine " * 20)
    recipe = recipe_of(data={"train_file": "/data/" + "x" * 200 + ".parquet"})
    lines = first_screen.lines(recipe, on, plan(recipe, on), NOW, 0, (("log", path),))
    assert lines[-1].endswith(path)
    assert max(map(len, lines[:-1])) <= COLUMNS


def test_a_kernel_with_the_name_of_a_line_stays_out_of_the_screen():
    memory = value(screen(), "memory")
    assert value(
        screen(switches=(Switch("memory", "4 of the longest rows", "why"),)), "memory"
    ) == (memory)
