"""Published seconds of a step (tests/data/time_evidence): rows that are recipes, and their sums."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import seconds_of_cards as seconds
from launch.probe import described

ABOUT = seconds.read_evidence()
RECIPES = [row for row in ABOUT["rows"] if "recipe" in row]


@pytest.mark.parametrize("row", RECIPES, ids=lambda row: row["id"])
def test_a_row_is_a_recipe_with_its_split_on_a_card_that_is_known(tmp_path: Path, row):
    recipe = seconds.recipe_of(row, ABOUT["models"][row["model"]], tmp_path)
    assert recipe.launch.exact_batch and recipe.launch.mode != "auto"
    assert recipe.training.per_device_train_batch_size >= 1
    machine = described.from_words(row["card"], row["cards"], row["ram_gib"])
    assert recipe.launch.num_processes == len(machine.gpus)


def test_every_row_is_a_recipe_or_has_a_reason():
    assert all(("recipe" in row) != ("reason" in row) for row in ABOUT["rows"])
    of_others = [row for row in ABOUT["rows"] if "is_added" not in row]
    assert len(of_others) == 47
    assert sum("recipe" in row for row in of_others) >= 26
    names = [row["id"] for row in ABOUT["rows"]]
    assert len(names) == len(set(names))


def test_seconds_of_a_step_are_its_tokens_over_the_published_rate():
    """Of rows whose rate counts the tokens that are computed."""
    for row in RECIPES:
        rate = row["published"].get("tokens_per_s")
        if rate and not row.get("tokens_per_s_is_of_unpadded"):
            assert row["s_per_step"] * rate == pytest.approx(seconds.tokens_of(row), rel=0.01)


def test_pairs_name_rows_that_are_recipes():
    names = {row["id"] for row in RECIPES}
    assert all(names >= set(pair["ids"]) for pair in ABOUT["pairs"])


def result(
    case: str, measured_s: float, predicted_s: float, kind: str = "A100 and A800", tokens: float = 8
):
    return {
        **{"case": case, "class": kind, "measured_s": measured_s, "tokens": tokens},
        **{"predicted": {"step_s": predicted_s}, "ratio": predicted_s / measured_s},
    }


def test_a_pair_counts_if_its_measured_seconds_differ_clearly():
    rows = {"a": result("a", 1.0, 1.0), "b": result("b", 1.5, 1.2), "c": result("c", 1.05, 2.0)}
    content = {"pairs": [{"differs": "x", "ids": ["a", name]} for name in ("b", "c", "d")]}
    (pair,) = seconds.pairs(content, rows)
    assert pair["ids"] == ["a", "b"] and pair["is_right"]
    rows["b"]["predicted"]["step_s"] = 1.0  # alike is not ordered
    assert not next(seconds.pairs(content, rows))["is_right"]


def test_doubtful_rows_do_not_count_among_all():
    rows = [result("a", 1, 1), result("b", 1, 2), result("c", 1, 9, seconds.DOUBTFUL)]
    assert seconds.summary(rows)[0] == ["A100 and A800", "2", "50%", "50%", "1.50"]
    assert seconds.summary(rows)[-1] == ["all but doubtful", "2", "50%", "50%", "1.50"]


def test_the_tables_of_one_row_have_no_halves():
    """Of two rows, one of them doubtful, no half could be judged by the other."""
    rows = [result("a", 1, 1), result("b", 1, 2, seconds.DOUBTFUL)]
    for row in rows:
        row["predicted"]["launch_s"] = 0.0
    assert "Halves" not in seconds.text({"rows": [], "pairs": []}, rows)


def test_each_half_is_judged_by_the_other():
    """Odd rows are too slow by a fifth, even ones right: each half is off by what the other is."""
    rows = [result(str(n), 1, 1.2 if n % 2 else 1.0) for n in range(8)]
    odd, even = seconds.crossed([*rows, result("z", 1, 9, seconds.DOUBTFUL)])
    assert odd == ["odd", "4", "20%", "100%", "1.20 to 1.20"]
    assert even == ["even", "4", "17%", "100%", "0.83 to 0.83"]


def test_a_row_knows_its_copies_and_the_tensors_of_its_model(tmp_path: Path):
    """LoRA of six matrices in each of 32 layers, which have nine tensors."""
    (row,) = [row for row in RECIPES if row["id"] == "fsdpqlora-4090x2-lora7b-ddp"]
    facts = seconds.facts_of(row, ABOUT, tmp_path)
    assert facts.installed.import_memory.card.host_device_bytes_per_s == 24e9
    size = facts.model.size
    assert (size.tensors, size.trained_tensors) == (32 * 9 + 3, 32 * 6 * 2)
