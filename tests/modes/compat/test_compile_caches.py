"""Where torch keeps compiled code in a rank, seen by having it compile there."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest

from tests import builders

# In the rank, before it trains: a function is compiled, and torch asked for its two folders.
COMPILE = """
import json, torch
from torch._inductor.runtime.cache_dir_utils import cache_dir, default_cache_dir
torch.compile(lambda x: (x * 2 + torch.sin(x)).sum())(torch.ones(100))
open(os.environ["PYTHON_PROOF"], "w").write(json.dumps([cache_dir(), default_cache_dir()]))
"""


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs a compiler: apt-get install g++")
def test_what_a_rank_compiles_and_looks_up_is_in_a_folder_of_this_user_alone(tmp_path):
    temporary, marks = tmp_path / "tmp", tmp_path / "marks"
    temporary.mkdir()
    marks.mkdir()
    fault = {"module": "training.run", "attribute": "train", "times": 1, "do": COMPILE}
    done = builders.launch(
        tmp_path / "a house",
        "run",
        str(builders.recipe(tmp_path, training={"max_steps": 2, "save_steps": 100})),
        TMPDIR=str(temporary),
        PYTHON_PROOF=str(tmp_path / "proof"),
        PYTHON_FAULTS=json.dumps({"compile": fault}),
        PYTHON_FAULT_MARKS=str(marks),
        PYTHONPATH=os.pathsep.join(
            [str(builders.CODE), str(builders.CODE / "tests/faults/inject")]
        ),
    )
    assert done.returncode == 0, done.stderr + done.stdout
    own = temporary / f"lowmem-{os.geteuid()}"
    cache, default = json.loads((tmp_path / "proof").read_text())
    assert (cache, Path(default).parent) == (f"{own}/inductor", own)
    assert list((own / "inductor").rglob("*.so"))
    assert list(Path(default).rglob("*.h.gch"))  # headers, which no variable leads elsewhere
    assert [path.name for path in temporary.iterdir()] == [own.name]
