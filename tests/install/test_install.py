"""First installations from the package index, with every Python here: the CUDA build of torch,
every pinned version, and a plan that is traced with them. `make test-install`; it fetches 3 GB."""

from __future__ import annotations

import json
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from launch.probe import torch_build
from tests import builders

COPIED = ("launch", "training", "scripts", "config", "configs")
DIRECT = ("accelerate", "bitsandbytes", "datasets", "deepspeed", "peft", "pyarrow", "transformers")
BUILD, CUDA = "cu130", "13.0"  # of the package index on Linux, as docs/cards.md says
TIMEOUT_S = 3600
FACTS = """
import json, sys
from importlib.metadata import distributions
for name in sys.argv[1:]:
    __import__(name)
import torch
print(json.dumps({
    "versions": {each.metadata["Name"]: each.version for each in distributions()},
    "torch": [torch.__version__, torch.version.cuda, torch._C._cuda_getArchFlags()],
    "folder": torch.__path__[0],
}))
"""


def base_python(minor: int) -> Path | None:
    """A Python 3.`minor` that is on PATH or of pyenv; None if there is none."""
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"), "versions")
    on_path = shutil.which(f"python3.{minor}")
    candidates = [Path(on_path)] if on_path else []
    for python in (*candidates, *sorted(pyenv.glob(f"3.{minor}.*/bin/python"))):
        done = subprocess.run([python, "-c", "import ensurepip"], capture_output=True, check=False)
        if done.returncode == 0:  # a stand-in of pyenv may lead nowhere
            return python.resolve()
    return None


@pytest.fixture(scope="module")
def pip_settings(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """pip's settings of a machine that has its index alone: the first installation fetches, the
    others have most files from a cache, which is deleted at the end."""
    cache = tmp_path_factory.mktemp("pip cache")
    argv = [sys.executable, "-m", "pip", "config", "get", "global.index-url"]
    index = subprocess.run(argv, capture_output=True, text=True, check=False).stdout.strip()
    settings = {"PIP_CONFIG_FILE": os.devnull, "PIP_FIND_LINKS": "", "PIP_EXTRA_INDEX_URL": ""}
    yield settings | {"PIP_CACHE_DIR": str(cache)} | ({"PIP_INDEX_URL": index} if index else {})
    shutil.rmtree(cache)


@pytest.fixture
def root(tmp_path: Path) -> Iterator[Path]:
    """A copy of the project without .venv, deleted after the test."""
    copy = tmp_path / "project"
    for name in COPIED:
        unwanted = shutil.ignore_patterns("__pycache__")
        shutil.copytree(builders.CODE / name, copy / name, ignore=unwanted)
    files = ("requirements.txt", "requirements-cuda.txt", "requirements.lock", "pyproject.toml")
    for name in (*files, "train_low_mem.py", "lowmem_command.py"):
        shutil.copy(builders.CODE / name, copy)
    yield copy
    shutil.rmtree(tmp_path)


def environment(folder: Path, settings: dict[str, str], **extra: str) -> dict[str, str]:
    """The environment of a user whose only Python is in `folder`."""
    dropped = ("PIP_", "LOWMEM_", "PYTHON", "VIRTUAL_ENV", "CUDA_")
    inherited = {key: value for key, value in os.environ.items() if not key.startswith(dropped)}
    kept = {key: os.environ[key] for key in ("PIP_CERT", "PIP_INDEX_URL") if key in os.environ}
    return {**inherited, **kept, **settings, "PATH": f"{folder}:/usr/bin:/bin", **extra}


def pinned() -> dict[str, str]:
    """The versions in requirements.txt and requirements-cuda.txt."""
    files = ("requirements.txt", "requirements-cuda.txt")
    text = "".join((builders.CODE / name).read_text() for name in files)
    return {plain(name): version for name, version in re.findall(r"(?m)^([\w.-]+)==(\S+)", text)}


def plain(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


@pytest.mark.skipif(sys.platform != "linux", reason="the CUDA build is for Linux")
@pytest.mark.parametrize("hashes", ["", "1"], ids=["requirements.txt", "requirements.lock"])
@pytest.mark.parametrize("minor", [11, 12, 13])
def test_a_first_start_installs_the_cuda_build_and_every_pin(minor, hashes, root, pip_settings):
    python = base_python(minor)
    if python is None:
        pytest.skip(f"Python 3.{minor} is not here")
    programs = root.parent / "programs"
    programs.mkdir()
    (programs / "python3").symlink_to(python)
    variables = environment(
        programs, pip_settings, LOWMEM_TORCH="default", LOWMEM_REQUIRE_HASHES=hashes
    )

    def run(*argv: str | Path) -> str:
        done = subprocess.run(
            argv, env=variables, capture_output=True, text=True, timeout=TIMEOUT_S, cwd=root
        )
        assert done.returncode == 0, f"{argv}: {done.stdout[-2000:]}{done.stderr[-4000:]}"
        return done.stdout

    assert run(root / "scripts/install.sh").startswith(f"torch {pinned()['torch']}")
    venv_python = root / ".venv/bin/python"
    run(venv_python, "-m", "pip", "check")
    facts: dict[str, Any] = json.loads(
        run(venv_python, "-P", "-c", FACTS, *DIRECT).splitlines()[-1]
    )
    versions = {plain(name): version for name, version in facts["versions"].items()}
    assert {name: versions.get(name) for name in pinned()} == pinned()
    version, cuda, architectures = facts["torch"]
    assert (version, cuda) == (f"{pinned()['torch']}+{BUILD}", CUDA)
    # the project's own table of builds, and its reader, which imports no torch
    build_folder = Path(facts["folder"])
    build = torch_build.read(build_folder)
    assert build is not None
    assert (build.cuda, torch_build.installed_name(build)) == (CUDA, BUILD)
    assert " ".join(build.architectures) == architectures
    assert architectures == torch_build.CUDA_BUILDS[BUILD][platform.machine()]
    of_bitsandbytes = {path.stem for path in build_folder.parent.glob("bitsandbytes/*.so")}
    names = {f"libbitsandbytes_cuda{name.removeprefix('cu')}" for name in torch_build.CUDA_BUILDS}
    assert names <= of_bitsandbytes
    machine = root / "configs/machines/a6000-48g.yaml"
    variables["LOWMEM_ROOT"] = str(root.parent / "workspace")
    words = ("plan", "sft_fast", "--json", "--machine", str(machine))
    plan = json.loads(run(venv_python, "-m", "launch", *words))
    assert plan["strategy"]["mode"] == "single_gpu"
    assert plan["phases"]["step"]["allocated_bytes"] > 0, "the step was not traced"
