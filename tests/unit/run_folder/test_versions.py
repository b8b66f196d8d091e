"""A checkpoint records the packages that a rank has imported, wherever they came from."""

from __future__ import annotations

import subprocess
import sys

from launch.base.workspace import CODE
from launch.run_folder import manifest

READ = """
import sys, importlib
for name in sys.argv[1:]:
    importlib.import_module(name)
from launch.run_folder import manifest
print(manifest.versions()["peft"], [(name, version) for name, version, _ in
    manifest.imported_from_elsewhere()])
"""


def test_a_package_of_pythonpath_is_recorded_with_its_own_version(tmp_path):
    (tmp_path / "peft").mkdir()
    (tmp_path / "peft" / "__init__.py").write_text("__version__ = '0.0.1'\n")
    said = []
    # the installed peft imports torch; datasets stands for what is imported from its own place
    for path, names in ((f"{tmp_path}:{CODE}", ("peft", "datasets")), (str(CODE), ("datasets",))):
        env = {"PYTHONPATH": path, "HF_HUB_OFFLINE": "1"}
        argv = [sys.executable, "-P", "-c", READ, *names]
        done = subprocess.run(argv, env=env, capture_output=True)
        assert done.returncode == 0, done.stderr
        said.append(done.stdout.decode().strip())
    assert said[0] == "0.0.1 [('peft', '0.0.1')]"
    assert said[1].endswith(" []") and not said[1].startswith("0.0.1")


def test_a_package_that_writes_checkpoints_reads_them_otherwise_from_a_minor_version_on():
    now = manifest.versions()
    major, minor, *_ = now["torch"].split(".")
    then = {"torch": f"{major}.{minor}.999", "transformers": f"{major}.999.0", "peft": "0.0.1"}
    assert list(manifest.version_changes(then)) == [
        (f"torch {then['torch']} -> {now['torch']}", False),
        (f"transformers {then['transformers']} -> {now['transformers']}", True),
        (f"peft 0.0.1 -> {now['peft']}", False),
    ]
