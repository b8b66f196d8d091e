"""The files that `submit skypilot` and `submit dstack` print: their lines train on a machine with
an empty home, and go on after it on another one with the same volume."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests import builders, namespaces
from tests.namespaces import Container

ONE_OWNER = builders.CODE / "tests" / "data" / "one_owner.c"


def rented(folder: Path, kind: str, file: dict[str, Any]) -> Container:
    """A rented machine as the file asks for it. Local files that travel through a bucket lose their
    modes; each key of the file is known here."""
    known = {
        "skypilot": {"name", "workdir", "resources", "file_mounts", "volumes", "setup", "run"},
        "dstack": {"type", "name", "repos", "files", "volumes", "commands", "resources", "retry"},
    }
    assert file.keys() == known[kind]
    if kind == "skypilot":
        mounts, volumes = file["file_mounts"], file["volumes"]
        lines = [file["setup"], file["run"]]
    else:
        mounts = {text.partition(":")[2]: text.partition(":")[0] for text in file["files"]}
        volumes = {text.partition(":")[2]: text.partition(":")[0] for text in file["volumes"]}
        lines = file["commands"]
    assert volumes == {"/lowmem": "lowmem"}
    sent = folder / "sent"
    sent.mkdir(exist_ok=True)
    there = {}
    for number, (place, source) in enumerate(mounts.items()):
        there[place] = sent / str(number)
        there[place].write_bytes(Path(source).read_bytes())
        there[place].chmod(0o644)
    line = " && ".join(f"{{ {each}; }}" for each in lines)
    return Container(
        argv=("bash", "-c", line),
        user=12345,
        group=12345,
        workdir="/checkout",
        volumes={"/lowmem": folder / "volume", "/checkout": folder / "checkout", **there},
    )


def killed_once(folder: Path, machine: Container, name: str, there: str) -> str:
    """The output of the machine of that name, which is preempted when its run has such a file."""
    home = folder / f"home of {name}"
    home.mkdir()
    machine.volumes["/newhome"] = home
    machine.variables |= {"HOME": "/newhome", "PYTHON": sys.executable}
    child = machine.popen(folder / f"root of {name}", name)
    deadline = time.monotonic() + 120
    while not list(folder.glob(f"volume/runs/tiny/2*/{there}")):
        if child.poll() is not None or time.monotonic() > deadline:
            break
        time.sleep(0.1)
    child.kill()
    return child.communicate()[0]


@pytest.mark.modes
@pytest.mark.parametrize(
    ("kind", "keeps_owners"), [("skypilot", True), ("skypilot", False), ("dstack", False)]
)
def test_a_second_machine_with_another_home_goes_on_from_the_volume(tmp_path, kind, keeps_owners):
    recipe = builders.recipe(
        tmp_path,
        training={"num_train_epochs": 20_000, "save_steps": 20},
        launch={"num_processes": 1},
    )
    words = ("submit", kind, "--print", str(recipe), "--gpu=RTX 4090", "--ram=64")
    printed = builders.launch(tmp_path / "mine", *words)
    assert printed.returncode == 0, printed.stderr
    file = yaml.safe_load(printed.stdout)
    namespaces.copy_of_checkout(tmp_path / "checkout", {".venv": sys.prefix})
    (tmp_path / "volume").mkdir()
    machine = rented(tmp_path, kind, file)
    if not keeps_owners:
        library = tmp_path / "one_owner.so"
        share = '-DSHARE="/lowmem/"'
        subprocess.run(["cc", share, "-shared", "-fPIC", "-o", library, ONE_OWNER], check=True)
        machine.volumes["/one_owner.so"] = library
        machine.variables["LD_PRELOAD"] = "/one_owner.so"
    said = killed_once(tmp_path, machine, "first", "checkpoints/checkpoint-*/manifest.json")
    assert "starting a new run" in said, said[:4000]
    assert not (tmp_path / "volume/.lowmem").exists()  # the key came with the file
    said = killed_once(tmp_path, machine, "second", "attempts/02/events.jsonl")
    assert "continuing tiny-" in said, said[:4000]


def test_rented_machines_have_a_key_of_their_own(tmp_path):
    recipe = builders.recipe(tmp_path)
    words = ("submit", "skypilot", "--print", str(recipe), "--gpu=RTX 4090", "--ram=64")
    texts = [builders.launch(tmp_path / "mine", *words).stdout for _ in range(2)]
    assert texts[0] == texts[1] and "LOWMEM_KEY=/lowmem-files/cloud.key" in texts[0]
    (key,) = (tmp_path / "mine/.lowmem").iterdir()
    assert key.name == "cloud.key" and key.stat().st_mode & 0o777 == 0o600
    assert len(key.read_bytes()) == 32
