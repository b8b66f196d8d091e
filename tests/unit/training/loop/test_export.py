"""The model's folder is swapped in one step, and nothing that is not ours is removed beside it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from launch.base import files
from launch.base.errors import ResourceError
from launch.run_folder import layout
from launch.schema.result import ExportedModel
from tests.builders import recipe_of
from training.loop import export


def model(folder: Path, run: str) -> Path:
    folder.mkdir()
    files.write_json(folder / "lowmem.json", ExportedModel(run))
    return folder


def swapped(target: Path, is_another_runs: bool = True) -> None:
    aside, old = (
        export.cleared(target.with_name(f".{target.name}.{ending}")) for ending in ("tmp", "old")
    )
    model(aside, "new")
    export.swap(aside, target, old, is_another_runs)


def run_of(folder: Path) -> str:
    found = files.read(folder / "lowmem.json", ExportedModel)
    assert found is not None
    return found.run


def test_a_model_of_another_run_is_kept_and_the_one_before_it_goes(tmp_path):
    target = model(tmp_path / "a", "before")
    model(tmp_path / "a.previous", "long before")
    for ending in ("tmp", "old"):
        model(tmp_path / f".a.{ending}", "left over")
    swapped(target)
    assert (run_of(target), run_of(tmp_path / "a.previous")) == ("new", "before")
    assert {path.name for path in tmp_path.iterdir()} == {"a", "a.previous"}
    swapped(target, is_another_runs=False)
    assert {path.name for path in tmp_path.iterdir()} == {"a", "a.previous"}


@pytest.mark.parametrize("kind", ["folder", "file", "link to a model"])
def test_what_no_run_of_ours_wrote_beside_the_model_stays(tmp_path, kind):
    target = model(tmp_path / "a", "before")
    elsewhere = model(tmp_path / "elsewhere", "a copy")
    theirs = [tmp_path / name for name in ("a.previous", ".a.tmp", ".a.old")]
    for path in theirs:
        if kind == "folder":
            path.mkdir()
            (path / "thesis.tex").write_text("mine")
        elif kind == "file":
            path.write_text("mine")
        else:
            path.symlink_to(elsewhere)
    with pytest.raises(ResourceError, match=r"would be kept as \S+a.previous, which no run"):
        files.check_output(target)
    before = {path: path.lstat() for path in (*theirs, elsewhere)}
    swapped(target)  # somebody has put them there since
    assert {path: path.lstat() for path in before} == before
    assert (run_of(target), run_of(tmp_path / "a.previous-2")) == ("new", "before")
    (tmp_path / "b.previous").mkdir()
    files.check_output(tmp_path / "b")  # nothing would be kept there


def test_what_somebody_put_there_while_it_trained_is_kept(tmp_path, caplog):
    target = tmp_path / "a"
    (target / "notes").mkdir(parents=True)
    (target / "notes/n.txt").write_text("mine")
    swapped(target, is_another_runs=False)
    assert run_of(target) == "new"
    assert (tmp_path / "a.previous/notes/n.txt").read_text() == "mine"
    assert f"kept as {tmp_path}/a.previous" in caplog.text


@pytest.mark.parametrize("make", [Path.mkdir, lambda path: path.symlink_to("/nowhere")])
def test_an_empty_folder_goes_and_a_link_stays(tmp_path, make):
    make(tmp_path / "a")
    is_link = (tmp_path / "a").is_symlink()
    swapped(tmp_path / "a", is_another_runs=False)
    assert run_of(tmp_path / "a") == "new"
    assert (tmp_path / "a.previous").is_symlink() == is_link
    assert not (tmp_path / ".a.old").exists()


def test_a_model_that_is_kept_aside_is_said_and_the_older_one_that_goes(tmp_path):
    target = model(tmp_path / "a", "before")
    line = "a holds the model of before; it will be kept as a.previous"
    assert layout.kept_aside(target, "new") == [line]
    model(tmp_path / "a.previous", "long before")
    assert layout.kept_aside(target, "new") == [f"{line}, in the place of the older model there"]
    assert layout.kept_aside(target, "before") == []


@pytest.mark.parametrize(
    ("output_dtype", "lora", "is_rounded"),
    [("bfloat16", None, True), ("float32", None, False), ("bfloat16", {"r": 4}, False)],
)
def test_weights_are_rounded_to_the_exported_type_and_adapters_are_not(
    output_dtype, lora, is_rounded
):
    model = torch.nn.Linear(8, 8)
    before = model.weight.detach().clone()
    recipe = recipe_of(model={"output_dtype": output_dtype}, lora=lora)
    export.round_weights(model, recipe, {})  # pyright: ignore
    expected = before.to(torch.bfloat16).float() if is_rounded else before
    assert torch.equal(model.weight, expected)
    assert not torch.equal(before, before.to(torch.bfloat16).float())
