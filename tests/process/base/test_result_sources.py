"""benchmarks.sources: results of the CUDA build that other code has made fail `make check`."""

from __future__ import annotations

import json
import os
import shutil
import statistics
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import cuda_build_memory, sources
from tests.builders import CODE

NAME = "cuda_build_modes"
PYTHON_FILE, C_FILE = "training/engines/setup.py", "tests/fake_cuda/runtime.c"


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """A copy of the code that a result speaks of, and of the module that checks it."""
    named = {
        path
        for keys in sources.GUARDED.values()
        for each in keys.values()
        for path in sources.files(each)
    }
    for path in [*named, CODE / "benchmarks" / "sources.py"]:
        target = tmp_path / path.relative_to(CODE)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, target)
    (tmp_path / "benchmarks" / "results").mkdir()
    return tmp_path


def digest(root: Path = CODE) -> str:
    return sources.digests("cuda_build_memory", root)[sources.PREDICTED]


def write_rows(root: Path, *hashes: str | None) -> None:
    rows = [{"mode": "fsdp2"} | ({sources.MEASURED: each} if each else {}) for each in hashes]
    file = root / "benchmarks" / "results" / f"{NAME}.json"
    file.write_text(json.dumps({"rows": rows}))


def checked(root: Path) -> tuple[int, str]:
    """The exit code of the check, and what it says."""
    argv = [sys.executable, "-m", "benchmarks.sources"]
    env = {**os.environ, "PYTHONPATH": str(root)}
    done = subprocess.run(argv, cwd=root, env=env, capture_output=True, text=True, timeout=120)
    return done.returncode, done.stdout + done.stderr


def test_rows_of_other_code_fail_with_their_number_and_the_command(copy):
    assert checked(copy) == (0, "")  # no results
    today = sources.digests(NAME, copy)[sources.MEASURED]
    write_rows(copy, today, today)
    assert checked(copy) == (0, "")
    write_rows(copy, "0123456789abcdef", today, None)
    exit_code, text = checked(copy)
    assert (exit_code, text.count("\n")) == (1, 1)
    assert text.startswith(f"error: results/{NAME}.json: 2 of 3 rows were made with other code")
    assert text.endswith("make cuda-build-modes makes them again\n")


def test_results_without_any_hash_are_not_guarded_yet(copy):
    write_rows(copy, None, None)
    line = f"results/{NAME}.json: NOT CHECKED: no row names the code that made it\n"
    assert checked(copy) == (0, line)


@pytest.mark.parametrize(
    ("file", "old", "new"),
    [
        (PYTHON_FILE, "import os\n", "import os\nimport sys\n"),
        (C_FILE, "#include", "#define ADDED 1\n#include"),
        ("launch/predict/memory/allocator.py", "<<", "<< 1 +"),
    ],
)
def test_a_change_of_the_code_is_another_hash(copy, file, old, new):
    text = (copy / file).read_text()
    assert old in text
    (copy / file).write_text(text.replace(old, new, 1))
    assert digest(copy) != digest()


def test_a_prediction_is_no_source_of_what_was_measured(copy):
    before = sources.digests("cuda_build_memory", copy)
    (copy / "training/trace/added.py").write_text("ADDED = 1\n")
    after = sources.digests("cuda_build_memory", copy)
    assert after[sources.MEASURED] == before[sources.MEASURED]
    assert after[sources.PREDICTED] != before[sources.PREDICTED]
    assert sources.digests(NAME, copy)[sources.MEASURED] == before[sources.MEASURED]


def test_a_new_file_is_another_hash_and_an_unknown_name_is_an_error(copy):
    (copy / "training/trace/added.py").write_text("ADDED = 1\n")
    assert digest(copy) != digest()
    shutil.rmtree(copy / "training/trace")
    with pytest.raises(FileNotFoundError, match="training/trace: no code there; correct GUARDED"):
        digest(copy)


def test_comments_docstrings_layout_and_texts_of_errors_are_not_in_the_hash(copy):
    path = copy / PYTHON_FILE
    text = path.read_text()
    docstring = text[: text.index('"""', 3) + 3]
    text = text.replace(docstring, '"""Another sentence."""')
    path.write_text(f"# a comment\n{text}\n\n# its end\n")
    path = copy / C_FILE
    path.write_text(f"/* a comment\n * of two lines */\n// and one\n{path.read_text()}\n\n")
    assert digest(copy) == digest()


def test_text_in_quotes_is_no_comment():
    assert sources.of_c('f("// a", \'"\'); // b\n/* c */ g("/* d */");\n') == (
        'f("// a", \'"\');\ng("/* d */");'
    )
    code = 'def f():\n    """Docstring."""\n    return "text"\n'
    assert sources.of_python(code) == sources.of_python('def f():  # x\n  return ("text")\n')
    assert sources.of_python(code) != sources.of_python('def f():\n    return "other"\n')
    assert sources.of_python("from __future__ import annotations\n" + code) == sources.of_python(
        code
    )
    assert sources.of_python('raise A("x")') == sources.of_python('raise A(f"y {z}") from None')
    assert sources.of_python('raise A("x")') != sources.of_python('raise B("x")')


@pytest.mark.parametrize("minor", [11, 12, 13])
def test_each_python_has_the_same_hash(minor):
    """Campaigns run on another Python than `make check`."""
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"), "versions")
    here = [sys.executable] if sys.version_info[1] == minor else []
    pythons = [*here, *sorted(pyenv.glob(f"3.{minor}.*/bin/python"))]
    if not pythons:
        pytest.skip(f"Python 3.{minor} is not here")
    argv = [
        pythons[0],
        "-c",
        "from benchmarks import sources as s;"
        "print(s.digests('cuda_build_memory')['prediction_sources'])",
    ]
    done = subprocess.run(argv, cwd=CODE, capture_output=True, text=True, check=True, timeout=120)
    assert done.stdout.strip() == digest()


def test_the_goals_of_predicted_memory_hold_in_the_results():
    file = sources.RESULTS / "cuda_build_memory.json"
    rows = json.loads(file.read_text(encoding="utf-8"))["rows"]
    for phase in cuda_build_memory.SHOWN:
        errors = {
            figure: sorted(
                abs(cuda_build_memory.off(row, phase, figure))
                for row in rows
                if cuda_build_memory.has(row, phase)
            )
            for figure in cuda_build_memory.FIGURES
        }
        allocated, reserved = errors["allocated"], errors["reserved"]
        assert statistics.median(allocated) <= 0.002, phase
        assert allocated[-1] <= 0.01, phase
        assert statistics.median(reserved) <= 0.01, phase
        assert reserved[int(0.95 * (len(reserved) - 1))] <= 0.03, phase


def test_results_of_a_campaign_are_old_when_many_commits_have_changed_their_code(
    tmp_path, monkeypatch
):
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@b", "-C", str(tmp_path)]
    results, code = tmp_path / "results" / "kills.json", tmp_path / "training" / "run.py"
    for constant, value in (("ROOT", tmp_path), ("RESULTS", results.parent), ("MOST_COMMITS", 1)):
        monkeypatch.setattr(sources, constant, value)
    assert sources.old_results("kills") == ""  # none are there
    subprocess.run([*git, "init", "-q"], check=True)
    for number in range(3):
        for path in (results, code) if number == 0 else (code,):
            path.parent.mkdir(exist_ok=True)
            path.write_text(json.dumps({"date": "2026-11-21", "number": number}))
        subprocess.run([*git, "add", "."], check=True)
        subprocess.run([*git, "commit", "-qm", str(number)], check=True)
        if number == 1:
            assert sources.old_results("kills") == ""
    line = sources.old_results("kills")
    assert line.startswith("results/kills.json: of 2026-11-21, and 2 commits have changed its code")
    assert line.endswith("make kills makes it again")
    newest = subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, text=True, check=True)
    results.write_text(json.dumps({"commit": newest.stdout.strip() + "+"}))
    assert sources.old_results("kills") == ""
