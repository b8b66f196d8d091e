"""docs/containers.md in Linux namespaces: each flag of its docker line, each key of its pod.

A flag, a key or a value that is not known here fails. That root is told whose folder it is:
tests/unit/training/checkpoints/test_checkpoint.py."""

from __future__ import annotations

import json
import re
import shlex
import stat
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests import builders, namespaces
from tests.namespaces import Container

PAGE = (builders.CODE / "docs" / "containers.md").read_text(encoding="utf-8")
USER = 12345  # of whom the image knows nothing
WORDS = ("--training.save_steps=5", "--training.num_train_epochs=10000")
QUICK = ("--evaluation.exact_match_rows=0", "--launch.mode=cpu", "--launch.num_processes=1")


def lines() -> list[list[str]]:
    """The words of each line of the page's first block."""
    block = re.search(r"^```\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    assert block is not None
    return [shlex.split(line) for line in block[1].replace("\\\n", "").splitlines()]


def docker_run(words: list[str], folder: Path) -> Container:
    """The container of a `docker run` in that folder."""
    assert words[:2] == ["docker", "run"]
    end = words.index("IMAGE")
    container = Container(tuple(words[end + 1 :]))
    for word in words[2:end]:
        flag, _, value = word.partition("=")
        value = value.replace("$PWD", str(folder / "checkout"))
        match flag:
            case "--rm" | "--name":
                pass
            case "--gpus":  # this machine has none to give
                assert value == "all"
            case "--user":
                assert value == "$(id -u):$(id -g)"
                container.user = container.group = USER
            case "--shm-size":
                container.shm_size = value
            case "--tmpfs":
                place, _, options = value.partition(":")
                container.tmpfs[place] = options
            case "--memory":
                container.memory = value
            case "--volume":
                source, place = value.split(":")
                shared = folder / "leases" if source == "/run/lock/lowmem" else Path(source)
                container.volumes[place] = shared
            case "--workdir":
                container.workdir = value
            case "--env":
                name, _, content = value.partition("=")
                container.variables[name] = content
            case _:
                pytest.fail(f"{word} of docs/containers.md: what it does is not known here")
    return container


def pod(folder: Path) -> Container:
    """The container of the page's pod. What is popped has a meaning here; nothing else may stand
    there."""
    block = re.search(r"^```yaml\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    assert block is not None
    pod = yaml.safe_load(block[1])
    spec = pod.pop("spec")
    assert pod == {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "train"}}
    ((box,), user) = spec.pop("containers"), spec.pop("securityContext")
    limits = box["resources"]["limits"]
    container = Container(
        tuple(box.pop("command")),
        user=user.pop("runAsUser"),
        group=user.pop("runAsGroup"),
        workdir=box.pop("workingDir"),
        variables={each["name"]: each["value"] for each in box.pop("env")},
        memory=limits.pop("memory").removesuffix("i"),
        stop_s=spec.pop("terminationGracePeriodSeconds"),
    )
    assert user == {"fsGroup": container.group, "fsGroupChangePolicy": "OnRootMismatch"}
    sources = {each.pop("name"): each for each in spec.pop("volumes")}
    for mount in box.pop("volumeMounts"):
        place, source = mount["mountPath"], sources.pop(mount["name"])
        match next(iter(source)):
            case "persistentVolumeClaim":
                container.volumes[place] = folder / "checkout"
            case "emptyDir":
                assert (place, source["emptyDir"]["medium"]) == ("/dev/shm", "Memory")
                container.shm_size = source["emptyDir"]["sizeLimit"].removesuffix("i")
            case "secret":
                container.volumes[place] = secret(folder, source["secret"]["defaultMode"])
            case "hostPath":
                assert source["hostPath"] == {"path": place, "type": "Directory"}
                container.volumes[place] = folder / "leases"
            case kind:
                pytest.fail(f"{kind} of docs/containers.md: what it does is not known here")
    assert box == {
        "name": "train",
        "image": "IMAGE",
        "resources": {"limits": {"nvidia.com/gpu": 1}},  # this machine has none to give
    }
    assert (sources, spec) == ({}, {"restartPolicy": "OnFailure"})
    return container


def secret(folder: Path, mode: int) -> Path:
    """A mounted secret, which is reached by a link as kubelet makes it."""
    (folder / "secret/..data").mkdir(parents=True)
    key = folder / "secret/..data/checkpoint.key"
    key.write_bytes(b"a key of 32 bytes or of some more")
    key.chmod(mode)
    (folder / "secret/checkpoint.key").symlink_to("..data/checkpoint.key")
    return folder / "secret"


@pytest.fixture
def folder(tmp_path) -> Path:
    """A checkout as it is mounted, with data beside it, and a folder of the machine's leases."""
    namespaces.copy_of_checkout(tmp_path / "checkout", {".venv": sys.prefix})
    rows = (json.dumps(row, ensure_ascii=False) + "\n" for row in builders.rows(60))
    (tmp_path / "checkout/my.jsonl").write_text("".join(rows), encoding="utf-8")
    (tmp_path / "checkout/tmp").mkdir()
    (tmp_path / "leases").mkdir()
    (tmp_path / "leases").chmod(0o1777)
    return tmp_path


def page_line(folder: Path, *flags: str, words: tuple[str, ...] = ()) -> Container:
    """The container of the page's docker line, with these flags in the place of its own."""
    (line,) = (words for words in lines() if words[:2] == ["docker", "run"])
    names = {flag.partition("=")[0] for flag in flags}
    kept = [word for word in line if word.partition("=")[0] not in names]
    container = docker_run([*kept[:2], *(flag for flag in flags if "=" in flag), *kept[2:]], folder)
    container.argv += words
    container.variables["PYTHON"] = sys.executable
    return container


def launch(container: Container, *words: str) -> Container:
    """The same container for another line."""
    container.argv = (".venv/bin/python", "-P", "-m", "launch", *words)
    container.variables["PYTHONPATH"] = container.variables["LOWMEM_ROOT"] = "/lowmem"
    return container


def test_the_first_line_makes_the_folder_that_all_users_share(tmp_path):
    words = lines()[0]
    assert words == ["sudo", "mkdir", "-p", "-m", "1777", "/run/lock/lowmem"]
    made = tmp_path / "lowmem"
    namespaces.bash(f"umask 077; {' '.join(words[1:-1])} {made}", workspace=tmp_path)
    assert stat.S_IMODE(made.stat().st_mode) == 0o1777


@pytest.mark.parametrize("kind", ["docker", "pod"])
def test_a_container_is_stopped_and_another_one_goes_on(folder, cgroup, kind):
    def container() -> Container:
        made = page_line(folder, words=(*WORDS, *QUICK))
        if kind == "pod":
            (stop_line,) = (words for words in lines() if words[:2] == ["docker", "stop"])
            assert stop_line == ["docker", "stop", "--time=300", "train"]
            made = pod(folder)
            made.argv += (*WORDS, *QUICK)
            made.variables["PYTHON"] = sys.executable
        return made

    first = container()
    stop_s = first.stop_s if kind == "pod" else 300
    child = first.popen(folder / "first", "first", cgroup)
    try:
        _until(child, lambda: [*folder.glob("checkout/runs/*/2*/checkpoints/*/manifest.json")])
        shared = page_line(folder)
        code, said = launch(shared, "queue").run(folder / "beside", name="beside")
        assert code == 0 and re.search(r"^ +1 .* +- +runs ", said, re.MULTILINE), said
        code, said = launch(shared, "queue", "cancel", "1").run(folder / "beside", name="beside")
        assert code == 3 and "in another container): end it where it was started" in said
        del shared.volumes["/run/lock/lowmem"]
        code, said = launch(shared, "queue").run(folder / "beside", name="beside")
        assert code == 0 and "no run has or waits for a lease" in said
        code, said = page_line(folder, words=QUICK).run(folder / "beside", name="beside")
        assert code == 9 and "is in use by first (another machine or container" in said, said
        code, said = namespaces.stop(child, stop_s)
    finally:
        child.kill()
    assert code == 75 and "SIGTERM: saving a checkpoint, then stopping" in said, said[-3000:]
    assert "is kept" in said and "belongs to user" not in said
    (run,) = folder.glob("checkout/runs/*/2*")
    at_home = (folder / "checkout/.lowmem/checkpoint.key").exists()
    assert at_home is (kind == "docker")  # a pod has its secret
    again = container() if kind == "docker" else first
    child = again.popen(folder / "again", "again")
    try:
        _until(child, lambda: (run / "attempts/02/events.jsonl").exists())
        code, said = namespaces.stop(child, stop_s)
    finally:
        child.kill()
    assert code == 75 and "continuing " in said, said[-3000:]
    if kind == "pod":  # as kubelet leaves a volume without fsGroupChangePolicy
        namespaces.bash(f"chmod -R g+rwX {folder}/checkout/runs", workspace=folder)
        code, said = again.run(folder / "group", name="group")
        assert code == 5 and "can be written to by others" in said, said[-3000:]


def test_without_exec_on_tmp_nothing_is_compiled_as_the_plan_says_and_tmpdir_helps(folder):
    compiles = (*QUICK, "--training.torch_compile=true", "--dry-run")
    for flags, is_noexec in (
        (("--tmpfs=/tmp",), True),
        (("--tmpfs=/tmp:exec",), False),
        (("--tmpfs=/tmp", "--env=TMPDIR=/lowmem/tmp"), False),
    ):
        ended, said = page_line(folder, *flags, words=compiles).run(folder / "box")
        assert ended == 0, said
        assert ("torch_compile true -> false" in said) is is_noexec, said
        assert ("is mounted noexec" in said) is is_noexec, said


def test_a_small_shm_is_named_as_the_page_says(folder):
    words = (*QUICK, "--training.dataloader_num_workers=2", "--training.max_steps=20")
    code, said = page_line(folder, "--shm-size=64k", words=words).run(folder / "box")
    (quoted,) = re.findall(r'64 MB: "([^"]+)" \(exit code 3\)', PAGE)
    assert code == 3 and quoted in said, said
    assert Container(()).shm_size == "64m"


def test_a_limit_of_memory_is_planned_with_and_no_card_is_said(folder, cgroup):
    limited = launch(page_line(folder, "--memory=2g", "--gpus"), "doctor")
    _, said = limited.run(folder / "box", cgroup=cgroup)
    assert "host memory limit: 2.00 GiB (" in said
    assert re.search(r"^GPUs: 0 \(", said, re.MULTILINE), said


def _until(child: Any, found: Callable[[], Any], within_s: float = 150) -> None:
    """Wait for something that the container does."""
    deadline = time.monotonic() + within_s
    while not found():
        if child.poll() is not None or time.monotonic() > deadline:
            child.kill()
            pytest.fail(child.communicate()[0][-4000:])
        with suppress(OSError):
            time.sleep(0.1)
