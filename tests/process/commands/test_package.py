"""`pip install .` gives a command that works from any folder."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from tests import builders

pytestmark = pytest.mark.process

INSTALLED = ("launch", "training", "configs", "config", "scripts")
FILES = ("train_low_mem.py", "lowmem_command.py", "pyproject.toml", "requirements.txt")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that pip has installed a copy of this checkout into."""
    folder = tmp_path_factory.mktemp("package")
    source, site = folder / "source", folder / "site packages"
    for name in INSTALLED:
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(builders.CODE / name, source / name, ignore=ignored)
    for name in FILES:
        shutil.copy(builders.CODE / name, source)
    argv = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    argv += ["--no-deps", "--no-build-isolation", "--target", str(site), str(source)]
    done = subprocess.run(argv, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return site


def lowmem(
    site: Path, folder: Path, *words: str, before: str = ""
) -> subprocess.CompletedProcess[str]:
    """The installed command, started in an empty folder without LOWMEM_ROOT. `before`: what stands
    before its folder in PYTHONPATH."""
    folder.mkdir(exist_ok=True)
    env = builders.environment(folder, PYTHONPATH=f"{before}{site}")
    del env["LOWMEM_ROOT"]
    argv = [str(site / "bin" / "lowmem"), *words]
    return subprocess.run(argv, cwd=folder, env=env, capture_output=True, text=True, timeout=300)


def test_the_installed_command_plans_from_another_folder_with_its_own_files(site, tmp_path):
    folder = tmp_path / "a folder"
    helped = lowmem(site, folder, "--help")
    assert helped.returncode == 0, helped.stderr
    assert helped.stdout.startswith("usage: lowmem ")
    planned = lowmem(site, folder, "plan", "sft_fast")
    assert planned.returncode == 0, planned.stderr
    assert planned.stdout.startswith("plan for sft_fast on ")
    assert (folder / "data" / "sft_train_small_train.parquet").is_file()


def test_another_package_of_that_name_stands_in_nobodys_way(site, tmp_path):
    """ROS 2 has a package `launch`, and puts its folder into PYTHONPATH."""
    for name in ("launch", "training"):
        (tmp_path / "ros" / name).mkdir(parents=True)
        (tmp_path / "ros" / name / "__init__.py").write_text("raise ImportError('of ROS')")
    ros = f"{tmp_path / 'ros'}:"
    planned = lowmem(
        site, tmp_path / "here", "plan", "sft_fast", "--data.max_length=32", before=ros
    )
    assert planned.returncode == 0, planned.stderr
    assert planned.stdout.startswith("plan for sft_fast on ")


def test_the_installed_command_ends_with_the_same_exit_codes(site, tmp_path):
    refused = lowmem(site, tmp_path / "elsewhere", "plan", "sft_fst")
    assert refused.returncode == 2
    assert "did you mean sft_fast?" in refused.stderr
    assert refused.stderr.count("\n") == 1


def test_every_package_of_the_checkout_is_named_and_every_file_is_installed(site):
    text = (builders.CODE / "pyproject.toml").read_text(encoding="utf-8")
    named = set(tomllib.loads(text)["tool"]["setuptools"]["packages"])
    folders = {
        ".".join(file.parent.relative_to(builders.CODE).parts)
        for name in ("launch", "training")
        for file in (builders.CODE / name).rglob("__init__.py")
    }
    assert {name for name in named if "._files" not in name} == folders
    for name in ("configs", "config", "scripts"):
        tracked = [file for file in (builders.CODE / name).rglob("*") if file.is_file()]
        for file in tracked:
            if "__pycache__" not in file.parts:
                assert (site / "launch" / "_files" / file.relative_to(builders.CODE)).is_file()
    assert os.access(site / "bin" / "lowmem", os.X_OK)
