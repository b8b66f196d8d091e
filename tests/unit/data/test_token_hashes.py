"""A token cache is verified when it is opened; one that is damaged is tokenised again, and said to
be."""

from __future__ import annotations

import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from launch.data import token_cache
from launch.data.token_cache import TokenCache
from launch.plan import facts as plan_facts
from launch.plan.resolve import resolve
from launch.schema.plan import Plan
from launch.schema.recipe import Recipe
from tests import builders
from training.data import prepare

pytestmark = pytest.mark.unit


def tokens_of(cache: Path, recipe: Recipe, plan: Plan) -> TokenCache:
    return token_cache.token_cache(cache, recipe, plan.shape, plan.data_format)


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> tuple[Path, Recipe, Plan]:
    """(cache folder, recipe, plan) of rows that have been tokenised."""
    folder = tmp_path_factory.mktemp("made")
    data = {"max_length": 64}
    for key, count in (("train_file", 60), ("validation_file", 10)):
        data[key] = str(builders.write_parquet(folder / f"{key}.parquet", builders.rows(count)))
    recipe = builders.recipe_of(data=data)
    plan = builders.plan(recipe)
    prepare.ensure(tokens_of(folder / "cache", recipe, plan), print)
    return folder / "cache", recipe, plan


@pytest.fixture
def copied(made, tmp_path) -> tuple[Path, Recipe, Plan, Path]:
    """(cache folder, recipe, plan, the folder of the rows) that a test may damage."""
    cache, recipe, plan = made
    shutil.copytree(cache, tmp_path / "cache")
    return (
        tmp_path / "cache",
        recipe,
        plan,
        tokens_of(tmp_path / "cache", recipe, plan).folder,
    )


def flip(path: Path, at: float) -> None:
    """One bit."""
    content = bytearray(path.read_bytes())
    content[int(len(content) * at)] ^= 4
    path.write_bytes(content)


def halve(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


DAMAGES = {
    "half of train.arrow": (
        lambda folder: halve(folder / "train.arrow"),
        r"train\.arrow has \d+ bytes, expected \d+",
    ),
    "a bit of train.arrow": (
        lambda folder: flip(folder / "train.arrow", 0.6),
        r"train\.arrow was changed",
    ),
    "a bit of validation.arrow": (
        lambda folder: flip(folder / "validation.arrow", 0.6),
        r"validation\.arrow was ch",
    ),
    "a bit of counts.json": (
        lambda folder: flip(folder / "counts.json", 0.5),
        r"counts\.json was changed",
    ),
    "a bit of made_of.json": (
        lambda folder: flip(folder / "made_of.json", 0.5),
        r"made_of\.json was changed",
    ),
    "a bit of a tokenizer": (
        lambda folder: flip(folder / "tokenizer/tokenizer.json", 0.5),
        r"tokenizer\.json was ch",
    ),
    "half of the hashes": (
        lambda folder: halve(folder / "hashes.json"),
        r"hashes\.json is missing or cannot be read",
    ),
    "no hashes": (
        lambda folder: (folder / "hashes.json").unlink(),
        r"hashes\.json is missing or cannot be read",
    ),
    "no counts": (lambda folder: (folder / "counts.json").unlink(), r"counts\.json: No such file"),
    "no rows": (lambda folder: (folder / "train.arrow").unlink(), r"train\.arrow: No such file"),
    "a file in its place": (
        lambda folder: (shutil.rmtree(folder), folder.touch()),
        r"hashes\.json is missing or cannot be read",
    ),
    "rows of another": (
        lambda folder: shutil.copy(folder / "train.arrow", folder / "train-00001.arrow"),
        r"train-00001\.arrow was added",
    ),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_a_damaged_cache_is_tokenised_again_aloud(copied, made, name):
    cache, recipe, plan, folder = copied
    damage, words = DAMAGES[name]
    damage(folder)
    said: list[str] = []
    prepare.ensure(tokens_of(cache, recipe, plan), said.append)
    (line,) = [line for line in said if "damaged" in line]
    assert re.search(rf"damaged \(.*{words}.*\): tokenising again", line)
    assert token_cache.fault(folder) is None
    undamaged = tokens_of(made[0], recipe, plan).folder
    for part in ("train.arrow", "validation.arrow", "counts.json"):
        assert (folder / part).read_bytes() == (undamaged / part).read_bytes()
    assert not (folder / "train-00001.arrow").exists()


def test_a_whole_cache_is_opened_as_it_is_and_in_silence(copied):
    cache, recipe, plan, folder = copied
    before = {path: path.stat().st_ino for path in folder.rglob("*")}
    said: list[str] = []
    prepare.ensure(tokens_of(cache, recipe, plan), said.append)
    assert said == []
    assert {path: path.stat().st_ino for path in folder.rglob("*")} == before


def test_any_bit_of_any_file_is_noticed(copied):
    *_, folder = copied
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        content = path.read_bytes()
        for at in range(0, len(content), max(len(content) // 10, 1)):
            if content[at : at + 1].isspace():
                continue  # of hashes.json it means nothing
            path.write_bytes(content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :])
            assert token_cache.fault(folder), f"bit 0 of byte {at} of {path.name}"
        path.write_bytes(content)
    assert token_cache.fault(folder) is None


def test_damaged_counts_are_not_planned_with(copied):
    *_, folder = copied
    counts = token_cache.counts(folder)
    assert counts is not None
    assert counts["train"]["rows"] == 60
    flip(folder / "counts.json", 0.5)
    assert token_cache.counts(folder) is None


def test_the_counts_of_tokenised_rows_are_planned_with_unless_a_length_is_asked_for(copied):
    cache, recipe, plan, _ = copied
    facts = builders.facts_of(recipe, builders.machine())
    rows = replace(facts.rows, tokens=tokens_of(cache, recipe, plan))
    counted = plan_facts.with_counts(rows)
    assert counted.counts and counted.eval_counts
    assert (counted.counts["rows"], counted.eval_counts["rows"], counted.held_out) == (60, 10, 10)
    asked = plan_facts.of_length(rows, recipe.data, 32)
    assert plan_facts.with_counts(asked) == asked


def test_a_stop_ends_the_reading(copied):
    *_, folder = copied

    def stop() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        token_cache.fault(folder, stop)


def test_a_plan_says_that_the_rows_it_would_count_are_damaged(tmp_path, monkeypatch):
    monkeypatch.setenv("LOWMEM_ROOT", str(tmp_path))
    recipe, lines = str(builders.recipe(tmp_path)), []
    tokens = resolve(recipe, [], say=lines.append, trace=False).facts.rows.tokens
    assert tokens is not None and not lines
    tokens.folder.mkdir(parents=True)
    (tokens.folder / token_cache.HASHES).symlink_to("/dev/zero")
    assert resolve(recipe, [], say=lines.append, trace=False).facts.rows.counts is None
    assert lines == [f"the tokenised rows in {tokens.folder} are damaged: a start tokenises again"]
