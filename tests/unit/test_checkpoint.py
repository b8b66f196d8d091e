"""A checkpoint is the one its manifest describes, or it is not used."""

from __future__ import annotations

from pathlib import Path

import pytest

from training import checkpoint


def committed(checkpoints: Path, step: int) -> Path:
    staged = checkpoints / f"tmp-{step}"
    (staged / "shard").mkdir(parents=True)
    (staged / "model.safetensors").write_bytes(b"weights" * 100)
    (staged / "shard/optimizer.pt").write_bytes(b"state" * 50)
    (staged / checkpoint.NOT_KEPT).write_bytes(b"pickle")
    return checkpoint.commit(staged, checkpoints, step, {"samples_seen": step * 8})


def test_a_committed_checkpoint_verifies_and_holds_no_pickled_arguments(tmp_path):
    folder = committed(tmp_path, 500)
    assert folder.name == "checkpoint-000500"
    assert checkpoint.fault(folder) is None
    assert checkpoint.manifest(folder)["samples_seen"] == 4000
    assert not (folder / checkpoint.NOT_KEPT).exists()
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint-000500"]


@pytest.mark.parametrize("name", ["model.safetensors", "shard/optimizer.pt"])
@pytest.mark.parametrize("damage", ["flip", "cut", "remove"])
def test_any_damage_is_found_and_the_file_named(tmp_path, name, damage):
    older, newest = committed(tmp_path, 10), committed(tmp_path, 20)
    path = newest / name
    content = bytearray(path.read_bytes())
    if damage == "flip":
        content[3] ^= 1
        path.write_bytes(content)
    elif damage == "cut":
        path.write_bytes(content[: len(content) // 2])
    else:
        path.unlink()
    found, faults = checkpoint.newest_valid(tmp_path)
    assert found == older
    assert len(faults) == 1
    assert name in faults[0]


def test_a_folder_without_a_manifest_or_with_half_of_one_is_no_checkpoint(tmp_path):
    good = committed(tmp_path, 1)
    (tmp_path / "checkpoint-000002").mkdir()
    broken = committed(tmp_path, 3)
    (broken / checkpoint.MANIFEST).write_text('{"files": ')
    found, faults = checkpoint.newest_valid(tmp_path)
    assert found == good
    assert ["was not finished" in faults[1], "cannot be read" in faults[0]] == [True, True]


def test_rotation_goes_by_step_and_touches_nobody_elses_folder(tmp_path):
    for step in (900, 1000, 10_000, 2_000_000):
        committed(tmp_path, step)
    (tmp_path / "checkpoint-best").mkdir()
    checkpoint.rotate(tmp_path, 2)
    kept = sorted(path.name for path in tmp_path.iterdir())
    assert kept == ["checkpoint-010000", "checkpoint-2000000", "checkpoint-best"]


def test_what_a_killed_save_left_is_cleared(tmp_path):
    committed(tmp_path, 1)
    (tmp_path / "tmp-checkpoint-000002/checkpoint-2").mkdir(parents=True)
    checkpoint.clear_staging(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint-000001"]
