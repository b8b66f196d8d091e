"""Room for checkpoints and for the exported model, checked before anything is started."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path

import pytest

from launch.base import files
from launch.base.errors import ResourceError
from launch.run_folder import disk_space
from launch.run_folder.layout import RunDir
from tests import builders

CHECKPOINTS_DISK, MODEL_DISK = 1, 2


@pytest.fixture
def checked(tmp_path, monkeypatch):
    """check() on disks with so many free bytes: that of the runs, that of output_dir (None: the
    same disk)."""
    recipe = builders.recipe_of(output_dir=str(tmp_path / "models" / "a"))
    plan = builders.plan(recipe, builders.machine())
    run = RunDir.create(tmp_path / "runs", "wish", datetime(2026, 1, 1))

    def check(free: int, free_there: int | None) -> None:
        def is_model(path: Path) -> bool:
            return free_there is not None and "models" in path.parts

        # disks of exact sizes, which nobody can fill to the byte here
        monkeypatch.setattr(
            files, "free_bytes", lambda path: free_there if is_model(path) else free
        )
        monkeypatch.setattr(
            files, "disk", lambda path: MODEL_DISK if is_model(path) else CHECKPOINTS_DISK
        )
        disk_space.check(run, recipe, plan)

    while_saved = (disk_space.num_kept(recipe) + 1) * plan.checkpoint_bytes
    at_the_end = disk_space.num_kept(recipe) * plan.checkpoint_bytes
    return check, while_saved, at_the_end, disk_space.exported_bytes(recipe, plan)


def test_the_model_needs_room_on_the_disk_of_its_folder(checked):
    check, while_saved, _, model = checked
    check(while_saved, model)
    with pytest.raises(ResourceError, match=r"output_dir \S+/models/a: the model takes about"):
        check(while_saved, model - 1)
    with pytest.raises(ResourceError, match="checkpoints of about"):
        check(while_saved - 1, model)


def test_the_model_has_its_room_beside_the_checkpoints_of_one_disk(checked):
    check, while_saved, at_the_end, model = checked
    enough = max(while_saved, at_the_end + model)
    check(enough, None)
    with pytest.raises(ResourceError):
        check(enough - 1, None)


def test_an_adapter_takes_less_than_the_model(tmp_path):
    sizes = []
    for lora in (None, {"r": 4}):
        model = {"shape": None, "path": "/base"} if lora else {}
        recipe = builders.recipe_of(model=model, lora=lora)
        plan = builders.plan(builders.recipe_of(lora=lora), builders.machine())
        sizes.append(disk_space.exported_bytes(recipe, plan))
    assert 0 < sizes[1] < sizes[0]
