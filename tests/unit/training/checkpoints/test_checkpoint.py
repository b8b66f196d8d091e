"""A checkpoint is the one its sealed manifest describes, or it is not used; rotation never leaves
less than two."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.api import CheckpointException

from launch.base import files
from launch.base.errors import ResourceError, StorageError
from launch.run_folder import manifest
from training.checkpoints import commit
from training.data.sample_order import SampleOrder


@pytest.fixture(autouse=True)
def state(tmp_path_factory, monkeypatch) -> Path:
    folder = tmp_path_factory.mktemp("state")
    monkeypatch.setenv("LOWMEM_KEY", str(folder / "lowmem" / "checkpoint.key"))
    return folder


FACTS = {"engine": "plain", "zero_stage": 0, "mode": "cpu", "world_size": 1}
OF_TRAINER = ("trainer_state.json", "scheduler.pt")
OF_ONE_RANK = ("rng_state.pth", "optimizer.pt", *OF_TRAINER)
OF_TWO_RANKS = ("rng_state_0.pth", "rng_state_1.pth", *OF_TRAINER)
STATES_OF_ZERO = [f"global_step7/bf16_zero_pp_rank_{rank}_mp_rank_00" for rank in (0, 1)]
# engine -> the files that its ranks write, and the number of ranks
WRITTEN = {
    "plain": ((*OF_ONE_RANK, "model-00001-of-00002.safetensors"), 1),
    "ddp": ((*OF_TWO_RANKS, "optimizer.pt", "adapter_model.safetensors"), 2),
    "deepspeed": (
        (
            *(*OF_TWO_RANKS, "latest", "global_step7/mp_rank_00_model_states.pt"),
            *(f"{state}_optim_states.pt" for state in STATES_OF_ZERO),
        ),
        2,
    ),
    "fsdp2": ((*OF_TWO_RANKS, "pytorch_model_fsdp_0/.metadata", "optimizer_0/.metadata"), 2),
}


def write(staged: Path, *names: str) -> None:
    for name in names:
        (staged / name).parent.mkdir(parents=True, exist_ok=True)
        (staged / name).write_bytes(b"state" * 50)


def committed(checkpoints: Path, step: int) -> Path:
    staged = checkpoints / f"tmp-{step}"
    write(staged, *OF_ONE_RANK, "shard/optimizer.pt", commit.NOT_KEPT)
    (staged / "model.safetensors").write_bytes(b"weights" * 100)
    return commit_files(staged, checkpoints, step, {**FACTS, "samples_seen": step * 8})


def commit_files(staged: Path, checkpoints: Path, step: int, facts: dict[str, object]) -> Path:
    files = commit.describe(staged, list(commit.listing(staged)))
    return commit.commit(staged, checkpoints, step, facts, files)


def names(checkpoints: Path) -> list[str]:
    return sorted(path.name for path in checkpoints.iterdir() if path.is_dir())


def test_a_committed_checkpoint_verifies_and_holds_no_pickled_arguments(tmp_path):
    folder = committed(tmp_path, 500)
    assert folder.name == "checkpoint-000500"
    assert manifest.fault(folder) is None
    described = manifest.read(folder)
    assert described["samples_seen"] == 4000
    assert {"torch", "transformers"} <= described["versions"].keys()
    assert set(described["files"]) == {*OF_ONE_RANK, "model.safetensors", "shard/optimizer.pt"}
    assert names(tmp_path) == ["checkpoint-000500"]


@pytest.mark.parametrize("name", ["model.safetensors", "shard/optimizer.pt", manifest.FILE])
@pytest.mark.parametrize("damage", ["flip", "cut", "remove"])
def test_any_damage_is_found_and_the_file_named(tmp_path, name, damage):
    older, newest = committed(tmp_path, 10), committed(tmp_path, 20)
    path = newest / name
    content = bytearray(path.read_bytes())
    if damage == "flip":
        content[-30] ^= 1  # in the manifest: a digit of the seal
        path.write_bytes(content)
    elif damage == "cut":
        path.write_bytes(content[: len(content) // 2])
    else:
        path.unlink()
    found, faults = manifest.newest_valid(tmp_path)
    assert found == older
    assert len(faults) == 1
    assert name in faults[0]


@pytest.mark.parametrize("engine", WRITTEN)
def test_a_checkpoint_lacks_each_part_that_its_ranks_need_to_go_on(tmp_path, engine):
    names, world_size = WRITTEN[engine]
    facts = FACTS | {"samples_seen": 8, "engine": engine, "world_size": world_size}
    for step, missing in enumerate([*names, None]):
        staged = tmp_path / f"tmp-{step}"
        write(staged, *(name for name in names if name != missing))
        fault = manifest.fault(commit_files(staged, tmp_path, step, facts))
        expected = missing and f"checkpoint-{step:06} lacks"
        assert fault is None if expected is None else str(fault).startswith(expected), (fault, step)


def test_what_saves_only_the_model_is_passed_over_and_the_part_named(tmp_path):
    older = committed(tmp_path, 10)
    write(tmp_path / "tmp-20", "model.safetensors", "trainer_state.json")
    commit_files(tmp_path / "tmp-20", tmp_path, 20, FACTS | {"samples_seen": 160})
    found, faults = manifest.newest_valid(tmp_path)
    lacks = "lacks the learning-rate schedule (scheduler.pt), without which"
    assert (found, faults) == (older, [f"checkpoint-000020 {lacks} its training cannot go on"])


def test_a_checkpoint_of_fp16_needs_its_scale(tmp_path):
    write(tmp_path / "tmp-1", *WRITTEN["plain"][0])
    facts = FACTS | {"samples_seen": 8, "mixed_precision": "fp16"}
    folder = commit_files(tmp_path / "tmp-1", tmp_path, 1, facts)
    assert "lacks the scale of fp16 (scaler.pt)" in str(manifest.fault(folder))


@pytest.mark.parametrize("fact", manifest.FACTS)
def test_a_manifest_without_a_fact_that_continuing_reads_is_named(tmp_path, fact):
    write(tmp_path / "tmp-1", *WRITTEN["plain"][0])
    facts = {key: value for key, value in {**FACTS, "samples_seen": 8}.items() if key != fact}
    folder = commit_files(tmp_path / "tmp-1", tmp_path, 1, facts)
    assert f"lacks {fact} in its manifest.json" in str(manifest.fault(folder))


@pytest.mark.parametrize("key", ["samples_seen", "world_size", "files"])
def test_a_manifest_that_somebody_has_changed_is_refused_though_all_files_are_whole(tmp_path, key):
    folder = committed(tmp_path, 1)
    described = manifest.read(folder)
    (folder / "shard/optimizer.pt").write_bytes(b"pickle" * 9)
    (folder / "shard/optimizer.pt").chmod(0o600)
    if key == "files":
        described["files"] |= commit.describe(folder, ["shard/optimizer.pt"])
    else:
        described[key] = 0
    (folder / manifest.FILE).write_text(json.dumps(described))
    assert "does not have the seal of your key" in manifest.fault(folder)


def test_a_run_from_elsewhere_is_refused_with_both_ways_out_and_the_copied_key_opens_it(
    tmp_path, state, monkeypatch
):
    folder = committed(tmp_path, 1)
    elsewhere = tmp_path / "elsewhere"
    monkeypatch.setenv("LOWMEM_KEY", str(elsewhere))
    fault = manifest.fault(folder)
    assert f"set LOWMEM_KEY to a copy of the key from there ({elsewhere})" in fault
    assert "--resume.allow=seal" in fault
    assert manifest.fault(folder, allow=["seal"]) is None
    shutil.copy(state / "lowmem/checkpoint.key", elsewhere)
    assert manifest.fault(folder) is None


def test_the_key_is_made_once_and_is_nobody_elses(tmp_path, state):
    first = manifest.key()
    assert manifest.key() == first
    assert len(first) == manifest.KEY_BYTES
    assert [path.name for path in (state / "lowmem").iterdir()] == ["checkpoint.key"]
    assert manifest.key_file().stat().st_mode & 0o777 == 0o600
    assert (state / "lowmem").stat().st_mode & 0o777 == 0o700
    manifest.key_file().chmod(0o640)
    with pytest.raises(ResourceError, match="must be yours alone"):
        manifest.key()


@pytest.fixture
def machines(tmp_path, monkeypatch):
    """A function that goes to a machine with a home of its own and the same disk of runs."""
    monkeypatch.delenv("LOWMEM_KEY")
    monkeypatch.setenv("LOWMEM_ROOT", str(tmp_path / "disk"))
    (tmp_path / "disk").mkdir()

    def go(home: str, **variables: str) -> None:
        monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / home))
        for name, value in variables.items():
            monkeypatch.setenv(name, value)

    return go


def test_another_machine_with_the_disk_of_the_runs_goes_on(tmp_path, machines):
    machines("home")
    folder = committed(tmp_path / "disk" / "runs", 1)
    assert (tmp_path / "disk/.lowmem/checkpoint.key").stat().st_mode & 0o777 == 0o600
    machines("rented")
    assert manifest.fault(folder) is None and manifest.key_note() == ""
    other = committed(tmp_path / "disk" / "others", 1)
    machines("home")
    assert manifest.fault(other) is None
    assert not (tmp_path / "rented").exists()
    # another folder of runs of the first machine has the same key
    machines("home", LOWMEM_ROOT=str(tmp_path / "second"))
    assert manifest.fault(folder) is None


def test_a_disk_that_keeps_no_owner_has_no_key_and_the_start_says_so(tmp_path, machines):
    (tmp_path / "disk" / ".lowmem").write_text("no folder can be made here")
    machines("home")
    folder = committed(tmp_path / "disk" / "runs", 1)
    note = manifest.key_note()
    assert f"{tmp_path}/disk is another user's, or keeps no owner" in note
    assert "LOWMEM_KEY=" in note
    machines("rented")
    assert "does not have the seal of your key" in manifest.fault(folder)
    secret = tmp_path / "secret"
    shutil.copy(tmp_path / "home/lowmem/checkpoint.key", secret)
    machines("rented", LOWMEM_KEY=str(secret))
    assert manifest.fault(folder) is None and manifest.key_note() == ""


def test_without_a_home_that_can_be_written_to_the_key_lies_beside_the_runs(tmp_path, machines):
    """docker --user: the home of a number without a name is "/"."""
    (tmp_path / "home").write_text("no folder can be made here")
    machines("home")
    folder = committed(tmp_path / "disk" / "runs", 1)
    assert manifest.key() == (tmp_path / "disk/.lowmem/checkpoint.key").read_bytes()
    machines("rented")
    assert manifest.fault(folder) is None and manifest.key_note() == ""
    (tmp_path / "second").mkdir()
    (tmp_path / "second/.lowmem").write_text("none there either")
    machines("home", LOWMEM_ROOT=str(tmp_path / "second"))
    with pytest.raises(ResourceError, match=r"second/\.lowmem.*another file.*with LOWMEM_KEY"):
        manifest.key()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file to root's group")
def test_a_secret_of_root_that_the_group_of_a_pod_may_read_is_a_key(tmp_path, machines):
    machines("home")
    folder = Path(tempfile.mkdtemp(dir="/dev/shm"))  # another user may pass there
    try:
        folder.chmod(0o755)
        secret = folder / "key"
        secret.write_bytes(b"k" * 32)
        os.chown(secret, 0, 4242)
        machines("home", LOWMEM_KEY=str(secret))
        secret.chmod(0o440)
        with pytest.raises(ResourceError, match="must be yours alone"):
            manifest.key()  # to root itself it is open to others
        os.setegid(4242)
        os.seteuid(4242)
        try:
            assert manifest.key() == b"k" * 32
        finally:
            os.seteuid(0)
            os.setegid(0)
    finally:
        shutil.rmtree(folder)


def test_a_key_that_is_no_file_is_refused_before_it_is_read(tmp_path, monkeypatch):
    """A pipe was waited for without end, and /dev/zero took all of the memory."""
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", "/dev/zero", tmp_path):
        monkeypatch.setenv("LOWMEM_KEY", str(path))
        with pytest.raises(ResourceError, match="is no file, and the key"):
            manifest.key()
    (tmp_path / "empty").touch()
    monkeypatch.setenv("LOWMEM_KEY", str(tmp_path / "empty"))
    with pytest.raises(ResourceError, match="found 0 bytes, expected 32"):
        manifest.key()


def test_no_key_is_written_into_a_folder_of_another_user(tmp_path, machines):
    machines("home")
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "disk/.lowmem").symlink_to(tmp_path / "elsewhere")
    manifest.key()
    assert not any((tmp_path / "elsewhere").iterdir())
    assert "is another user's, or keeps no owner" in manifest.key_note()


def test_a_key_of_another_user_beside_the_runs_is_none_of_ours(tmp_path, machines):
    machines("home")
    manifest.key()
    theirs = tmp_path / "disk/.lowmem/checkpoint.key"
    theirs.write_bytes(b"x" * 32)
    if os.geteuid() == 0:
        os.chown(theirs, 65534, -1)
        assert manifest.key() == (tmp_path / "home/lowmem/checkpoint.key").read_bytes()
    os.chown(theirs, os.geteuid(), -1)
    theirs.chmod(0o620)
    with pytest.raises(ResourceError, match="must be yours alone"):
        manifest.key()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root works in another user's folder")
def test_root_in_the_folder_of_another_user_is_told_whose_it_is(tmp_path, machines):
    machines("home")
    assert manifest.root_note() == ""
    os.chown(tmp_path / "disk", 4242, -1)
    assert manifest.root_note() == (
        f"{tmp_path}/disk belongs to user 4242, who cannot change what root writes there: start as"
        " that user (docker: --user 4242), or give it back afterwards: chown -R 4242"
        f" {tmp_path}/disk"
    )


@pytest.mark.shows("F22", "owner, group write or symbolic link on each file and folder", code=5)
@pytest.mark.parametrize("where", ["", "shard", "model.safetensors"])
@pytest.mark.parametrize("harm", ["writable", "owner", "link"])
def test_what_others_could_have_changed_is_refused(tmp_path, where, harm):
    older, folder = committed(tmp_path, 1), committed(tmp_path, 2)
    path = folder / where
    if harm == "writable":
        path.chmod(path.stat().st_mode | 0o020)
    elif harm == "owner":
        if os.geteuid() != 0:
            pytest.skip("only root can give a file away")
        os.chown(path, 12345, -1)
    else:
        path.rename(tmp_path / "aside")
        path.symlink_to(tmp_path / "aside")
    found, faults = manifest.newest_valid(tmp_path)
    assert found == older
    assert len(faults) == 1
    expected = {
        "writable": "can be written to by others",
        "owner": "belongs to user 12345",
        "link": "symbolic link",
    }
    assert expected[harm] in faults[0]


def test_a_file_that_would_be_loaded_too_is_refused_and_a_note_is_not(tmp_path):
    folder = committed(tmp_path, 1)
    (folder / "note.txt").write_text("my best one")
    assert manifest.fault(folder) is None
    (folder / "rng_state_1.pth").write_bytes(b"")
    assert "rng_state_1.pth is not one of the files of that checkpoint" in manifest.fault(folder)


def test_an_open_umask_does_not_make_a_checkpoint_that_is_refused(tmp_path):
    before = os.umask(0)
    try:
        folder = committed(tmp_path, 1)
    finally:
        os.umask(before)
    assert manifest.fault(folder) is None
    assert not any(path.stat().st_mode & 0o022 for path in [folder, *folder.rglob("*")])


def test_a_folder_without_a_manifest_or_with_half_of_one_is_no_checkpoint(tmp_path):
    good = committed(tmp_path, 1)
    (tmp_path / "checkpoint-000002").mkdir()
    broken = committed(tmp_path, 3)
    (broken / manifest.FILE).write_text('{"files": ')
    found, faults = manifest.newest_valid(tmp_path)
    assert found == good
    assert ["was not finished" in faults[1], "cannot be read" in faults[0]] == [True, True]


@pytest.fixture
def disk_calls(monkeypatch) -> list[str]:
    """The syncs and renames of the test, in their order. Each is made."""
    calls: list[str] = []

    def record(name: str, shown: Callable[..., str]) -> None:
        made = getattr(os, name)

        def recorded(*args: Any, **kwargs: Any) -> Any:
            calls.append(re.sub(r"\.(.+)\.\d+\.tmp", r"\1 aside", shown(*args)))
            return made(*args, **kwargs)

        monkeypatch.setattr(os, name, recorded)

    record("fsync", lambda number: f"sync {Path(f'/proc/self/fd/{number}').readlink().name}")
    for name in ("rename", "replace"):
        record(name, lambda old, new: f"rename {Path(old).name} to {Path(new).name}")
    return calls


def test_a_checkpoint_is_on_the_disk_before_its_name_and_its_name_before_the_return(
    tmp_path, disk_calls
):
    manifest.key()
    staged = tmp_path / "tmp-1"
    write(staged, "model.safetensors", "optimizer_0/.metadata", *OF_TRAINER)
    disk_calls.clear()
    commit_files(staged, tmp_path, 1, FACTS)
    assert disk_calls == [
        *("sync model.safetensors", "sync .metadata", "sync scheduler.pt"),
        *("sync trainer_state.json", "sync manifest.json aside"),
        *("rename manifest.json aside to manifest.json", "sync optimizer_0", "sync tmp-1"),
        *("sync commits.json aside", "rename commits.json aside to commits.json"),
        *("rename tmp-1 to checkpoint-000001", f"sync {tmp_path.name}"),
    ]


def test_a_checkpoint_that_is_removed_loses_its_name_first(tmp_path, disk_calls):
    folder = committed(tmp_path, 1)
    disk_calls.clear()
    commit.discard(folder)
    assert disk_calls == [
        "rename checkpoint-000001 to tmp-trash-checkpoint-000001",
        "sync commits.json aside",
        "rename commits.json aside to commits.json",
    ]
    assert names(tmp_path) == []


def test_a_file_that_cannot_be_synced_leaves_no_checkpoint(tmp_path):
    save = commit.Save(tmp_path, 1, rank=0, world_size=1)
    write(save.staged, *OF_ONE_RANK)
    (save.staged / "model.safetensors").symlink_to("/dev/null")  # readable, and not to be synced
    with pytest.raises(StorageError, match=os.strerror(errno.EINVAL)):
        save.on_all(lambda: commit.describe(save.staged, [*OF_ONE_RANK, "model.safetensors"]))
    assert names(tmp_path) == []


@pytest.mark.shows("F23", "F24", "folders dated in the year 2096, and a user's own checkpoint-best")
def test_rotation_goes_by_step_and_touches_nobody_elses_folder(tmp_path):
    for step in (900, 1000, 10_000, 2_000_000):
        committed(tmp_path, step)
    for step in (900, 10_000):
        # the clock was ahead when these were written
        os.utime(tmp_path / manifest.name(step), (4e9, 4e9))
    (tmp_path / "checkpoint-best").mkdir()
    (tmp_path / "checkpoint-000007").mkdir()
    commit.rotate(tmp_path, 2, set())
    assert names(tmp_path) == [
        "checkpoint-000007",
        "checkpoint-010000",
        "checkpoint-2000000",
        "checkpoint-best",
    ]
    (tmp_path / "checkpoint-000900").mkdir()  # a copy that the user has put back
    committed(tmp_path, 3_000_000)
    commit.rotate(tmp_path, 2, set())
    assert "checkpoint-000900" in names(tmp_path)


@pytest.mark.parametrize(
    ("keep", "kept"), [(1, [4, 5]), (2, [4, 5]), (3, [3, 4, 5]), (9, [1, 2, 3, 4, 5])]
)
def test_as_many_as_the_limit_says_and_never_fewer_than_two_are_kept(tmp_path, keep, kept):
    for step in range(1, 6):
        committed(tmp_path, step)
    commit.rotate(tmp_path, keep, {manifest.name(5)})
    assert names(tmp_path) == [manifest.name(step) for step in kept]


@pytest.mark.parametrize(("best", "kept"), [(1, [1, 4, 5]), (3, [3, 4, 5]), (5, [4, 5])])
def test_the_best_one_stays_beside_them(tmp_path, best, kept):
    for step in range(1, 6):
        committed(tmp_path, step)
    commit.rotate(tmp_path, 2, set(), manifest.name(best))
    assert names(tmp_path) == [manifest.name(step) for step in kept]


@pytest.mark.parametrize("damaged", [{4}, {5}, {4, 5}, {2, 4, 5}, {1, 2, 3, 4}])
def test_a_damaged_checkpoint_is_none_of_the_two_that_stay(tmp_path, damaged):
    for step in range(1, 6):
        folder = committed(tmp_path, step)
        if step in damaged:
            content = bytearray((folder / "model.safetensors").read_bytes())
            content[5] ^= 4
            (folder / "model.safetensors").write_bytes(content)
    commit.rotate(tmp_path, 2, set())
    good = {path.name for path in manifest.committed(tmp_path) if manifest.fault(path) is None}
    expected = sorted(set(range(1, 6)) - damaged)[-2:]
    assert good == {manifest.name(step) for step in expected}


def test_a_folder_of_that_name_that_is_not_ours_is_never_replaced(tmp_path):
    (tmp_path / "checkpoint-000005").mkdir()
    (tmp_path / "checkpoint-000005/mine").touch()
    with pytest.raises(StorageError, match="lowmem did not write it"):
        committed(tmp_path, 5)
    assert (tmp_path / "checkpoint-000005/mine").exists()


def test_what_a_killed_save_left_is_cleared_and_nothing_else(tmp_path):
    committed(tmp_path, 1)
    for name in ("tmp-checkpoint-000002/checkpoint-2", "tmp-trash-checkpoint-000001", "tmp-mine"):
        (tmp_path / name).mkdir(parents=True)
    commit.clear_staging(tmp_path)
    assert names(tmp_path) == ["checkpoint-000001", "tmp-mine"]


def test_files_are_dealt_evenly_and_each_once():
    files = {"a": 100, "b": 60, "c": 50, "d": 1, "e": 0}
    hands = commit.deal(files, 2)
    assert sorted(name for hand in hands for name in hand) == list("abcde")
    assert abs(sum(files[name] for name in hands[0]) - sum(files[name] for name in hands[1])) <= 60
    assert commit.deal({}, 3) == [[], [], []]


def test_a_save_that_cannot_fit_is_refused_before_it_starts(tmp_path):
    commit.check_disk_space(tmp_path, 0)
    with pytest.raises(StorageError, match="it needs"):
        commit.check_disk_space(tmp_path, files.free_bytes(tmp_path) * 2)


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO, errno.EDQUOT])
def test_what_the_disk_refused_is_told_from_other_errors(number):
    assert os.strerror(number) in commit.storage_problem(
        OSError(number, os.strerror(number), "/x/model.pt")
    )
    torchs = RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 576 vs 534")
    assert "unexpected pos" in commit.storage_problem(torchs)
    assert commit.storage_problem(RuntimeError("CUDA out of memory")) is None


def test_of_the_ranks_of_a_distributed_save_the_one_whose_disk_refused_is_named():
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "/x/__1_0.distcp")
    failed = CheckpointException("save", {0: (RuntimeError("stopped"), []), 1: (full, [])})
    assert commit.storage_problem(failed) == "__1_0.distcp: No space left on device"
    others = CheckpointException("save", {0: (RuntimeError("stopped"), [])})
    assert commit.storage_problem(others) is None


def test_a_save_that_fails_raises_its_own_error_and_leaves_nothing(tmp_path):
    save = commit.Save(tmp_path, 7, rank=0, world_size=1)
    assert save.on_first(lambda: "written") == "written"
    for error, raised in (
        (KeyError("a mistake"), KeyError),
        (OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)), StorageError),
    ):

        def write(error: Exception = error) -> None:
            save.staged.mkdir(parents=True)
            raise error

        with pytest.raises(
            raised, match=r"a mistake|step 7 could not be written \(rank 0: No space"
        ):
            save.on_all(write)
        assert not save.staging.exists()


# ---- for another effective batch
# ---------------------------------------------------------------------------


@pytest.fixture
def other_disk() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        yield Path(folder)


def test_a_checkpoint_counts_steps_of_another_batch_from_the_same_sample(tmp_path, other_disk):
    """Of 100 samples an epoch, 140 are seen: 35 steps of 4, or 1 epoch of 13 steps of 8 and 5 of
    the next, of which 8 are left. The other disk takes no links."""
    assert other_disk.stat().st_dev != tmp_path.stat().st_dev
    staged = tmp_path / "tmp-35"
    write(staged, *OF_ONE_RANK, "model.safetensors")
    (staged / "trainer_state.json").write_text('{"global_step": 35, "best_metric": 0.5}')
    torch.save({"last_epoch": 35, "_step_count": 36, "_last_lr": [0.1]}, staged / "scheduler.pt")
    facts = {**FACTS, "samples_seen": 140, "effective_batch_size": 4}
    source = commit_files(staged, tmp_path, 35, facts)
    order = SampleOrder(100, 8, 1, 1, 0, seed=1, start=140)
    for place in (tmp_path, other_disk):
        rebased = commit.rebase(source, place, order)
        assert rebased == place / "checkpoint-000018"
        assert manifest.fault(rebased) is None
        described = manifest.read(rebased)
        assert (described["step"], described["effective_batch_size"]) == (18, 8)
        assert described["rebased_from"] == str(source)
        state = json.loads((rebased / "trainer_state.json").read_text())
        assert (state["global_step"], state["epoch"], state["best_metric"]) == (18, 1.4, None)
        schedule = torch.load(rebased / "scheduler.pt", weights_only=True)
        assert schedule == {"last_epoch": 18, "_step_count": 19, "_last_lr": [0.1]}
        for name in ("optimizer.pt", "model.safetensors"):
            assert (rebased / name).read_bytes() == (source / name).read_bytes()
