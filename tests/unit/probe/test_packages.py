"""Trackers of training.report_to: which a recipe may name, and what is refused before the start."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest
from pydantic import ValidationError

from launch.base import environment
from launch.base.errors import ResourceError
from launch.probe import packages
from launch.schema.training_section import TrainingSection
from tests import builders


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("none", ()),
        (["none"], ()),
        (None, ()),
        ([], ()),
        ("wandb", ("wandb",)),
        (["tensorboard", "mlflow"], ("tensorboard", "mlflow")),
    ],
)
def test_report_to_is_read_as_trainingarguments_reads_it(typed, meant):
    assert TrainingSection.model_validate({"report_to": typed}).report_to == meant
    assert TrainingSection().report_to == ("tensorboard",)


@pytest.mark.parametrize("unknown", ["all", "comet_ml", ["wandb", "none"]])
def test_other_trackers_are_refused(unknown):
    with pytest.raises(ValidationError, match="'tensorboard', 'wandb', 'mlflow', 'trackio'"):
        TrainingSection.model_validate({"report_to": unknown})


def refusal(monkeypatch, tracker: str, installed: str, *pass_env: str) -> str:
    """The refusal of a recipe with a tracker of which a version is installed; "" if there is
    none."""
    module = ModuleType(tracker)
    module.__spec__ = sys.__spec__
    monkeypatch.setitem(sys.modules, tracker, module)
    # two versions of one package cannot be installed; test_trackers.py runs the real ones
    monkeypatch.setattr(packages, "version", lambda package: installed)
    recipe = builders.recipe_of(
        training={"report_to": tracker}, launch={"pass_env": list(pass_env)}
    )
    try:
        packages.refuse_missing(recipe)
    except ResourceError as error:
        return str(error)
    return ""


def test_a_swanlab_whose_functions_raise_without_a_run_is_named_with_one_that_works(monkeypatch):
    assert refusal(monkeypatch, "swanlab", "0.7.20") == ""
    assert refusal(monkeypatch, "swanlab", "0.10.3") == (
        "training.report_to: swanlab 0.10.3 does not work with the callback of transformers;"
        f" {sys.executable} -m pip install 'swanlab<0.8'"
    )


def test_variables_of_a_runs_trackers_that_are_not_passed_are_named():
    environ = {"WANDB_API_KEY": "x", "WANDB_PROJECT": "y", "MLFLOW_TRACKING_URI": "z", "HOME": "/"}
    named = environment.of_trackers(environ, ("tensorboard", "wandb"), ("WANDB_PROJECT",))
    assert named == ["WANDB_API_KEY"]


@pytest.mark.parametrize("name", packages.UPLOADS)
def test_a_variable_that_asks_for_uploads_of_weights_is_refused(monkeypatch, name):
    assert refusal(monkeypatch, "wandb", "0.31.0", "WANDB_API_KEY") == ""
    assert f"launch.pass_env: {name} asks wandb for" in refusal(
        monkeypatch, "wandb", "0.31.0", "WANDB_API_KEY", name
    )


@pytest.mark.parametrize(
    ("installed", "expected"), [("torch-2.10.0", "2.11"), ("transformers-5.16.1", "5.17")]
)
def test_versions_that_are_not_tested_are_refused(monkeypatch, tmp_path, installed, expected):
    name, _, number = installed.partition("-")
    folder = tmp_path / f"{installed}.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {number}\n")
    packages.refuse_old()
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ResourceError, match=f"expected {expected} or newer.*'{name}>={expected}'"):
        packages.refuse_old()
