"""A plan with another transformers than that of configs/model_families.json asks a child for the
forward pass of a counted family."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.builders import CODE

SCRIPT = """
import sys
from pathlib import Path
from launch.predict.models import model_config
from launch.schema.model_sections import ModelSection

root, cache = map(Path, sys.argv[1:])
_, _, family = model_config.read(ModelSection(shape="gpt2-tiny"), root=root, cache=cache)
print(family.forward.head, family.forward.tiles_mlp, "torch" in sys.modules)
"""


def test_another_version_is_asked(tmp_path: Path) -> None:
    package = tmp_path / "packages" / "transformers-9.9.9.dist-info"
    package.mkdir(parents=True)
    (package / "METADATA").write_text("Metadata-Version: 2.1\nName: transformers\nVersion: 9.9.9\n")
    cache = tmp_path / "cache"
    folders = {"here": os.environ.get("PYTHONPATH", ""), "other": str(package.parent)}
    stored = {}
    for name, folder in folders.items():
        done = subprocess.run(
            [sys.executable, "-c", SCRIPT, str(CODE), str(cache)],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [folder, str(CODE)]))},
            cwd=tmp_path,
            capture_output=True,
            text=True,
        )
        assert done.stdout.split() == ["unchanged", "True", "False"], done.stderr
        stored[name] = sorted(cache.rglob("*.json"))
    assert not stored["here"]
    assert len(stored["other"]) == 1
