"""Whatever is wrong with an input: one line that names it, the documented exit code, no traceback,
no torch.

The corpora of YAML, recipes and numbers are those of tests/unit; here they go through the real
command."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from launch.base.files import write_json
from launch.data.token_cache import token_cache
from launch.run_folder.layout import RunDir
from tests import builders
from tests.unit.recipe.test_recipes import BAD_BATCHES, BAD_NUMBERS, BAD_RECIPES
from tests.unit.recipe.test_strict_yaml import BAD_YAML

CONFIG_S = 2.0
GOOD_ROW = {"prompt": "one", "response": "eins"}
GOOD = json.dumps(GOOD_ROW).encode()


@dataclass(frozen=True)
class Case:
    """One command line and what it must be answered with."""

    name: str
    argv: list[str]
    code: int
    expected: str  # a regular expression


@dataclass(frozen=True)
class Workspace:
    """Where the inputs of the cases stand."""

    root: Path
    recipe: Path  # a good one

    def file(self, name: str, content: bytes) -> Path:
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
        return path


# ---- the corpora
# ---------------------------------------------------------------------------


def yaml_cases(workspace: Workspace) -> list[Case]:
    found = []
    for number, (name, (document, expected)) in enumerate(
        [*BAD_YAML.items(), *BAD_RECIPES.items()]
    ):
        content = document if isinstance(document, bytes) else document.encode()
        path = workspace.file(f"yaml/{number}/r.yaml", content)
        found.append(Case(f"yaml: {name}", ["run", str(path), "--dry-run"], 2, expected))
    return found


def number_cases(workspace: Workspace) -> list[Case]:
    run = ["run", str(workspace.recipe), "--dry-run"]
    found = [
        Case(f"number: {key}={text}"[:80], [*run, f"--{key}={text}"], 2, re.escape(key))
        for key, text in BAD_NUMBERS
    ]
    found += [
        Case(f"batch: {text!r}"[:60], ["run", str(workspace.recipe), text, "--dry-run"], 2, "batch")
        for text in BAD_BATCHES
    ]
    wanted = {
        "data.max_length=8193 of a model with 512 positions": (
            ["--data.max_length=8193"],
            2,
            "max_length",
        ),
        "save_strategy epoch": (["--training.save_strategy=epoch"], 2, "save_strategy"),
        "nan in numerics": (["--numerics.skip_spikes_above=nan"], 2, "skip_spikes_above"),
        "a spike of 1": (["--numerics.skip_spikes_above=1"], 2, "skip_spikes_above"),
        "a reserve beyond all memory": (["--launch.host_reserve_gib=1e308"], 2, "host_reserve_gib"),
        "bad rows below 0": (["--data.max_bad_rows=-1"], 2, "max_bad_rows"),
        "an effective batch beyond all data": (
            ["--training.gradient_accumulation_steps=65537"],
            2,
            "accumulation",
        ),
    }
    return found + [
        Case(f"number: {name}", [*run, *words], code, said)
        for name, (words, code, said) in wanted.items()
    ]


# words after `run RECIPE --dry-run`; {root} is a folder
PATHS: dict[str, tuple[list[str], int, str]] = {
    "a name with a slash": (["--name=a/b"], 2, "name=.*: found 'a/b'"),
    "a name above": (["--name=.."], 2, r"name=.*: found '\.\.'"),
    "an absolute name": (["--name=/etc/cron.d/x"], 2, "name=.*: found '/etc/cron.d/x'"),
    "an empty name": (["--name="], 2, "name=.*: found null"),
    "a name that is a flag": (["--name=-rf"], 2, "name=.*: found '-rf'"),
    "a hidden name": (["--name=.x"], 2, r"name=.*: found '\.x'"),
    "a name of 65 letters": (["--name=" + "x" * 65], 2, "name=.*: found 'xxx"),
    "a name with a space": (["--name=a b"], 2, "name=.*: found 'a b'"),
    "a name with a newline": (["--name=a\nb"], 2, "name=.*: found the control character"),
    "a name with a percent": (["--name=a%b"], 2, "name=.*: found 'a%b'"),
    "a name with a quote": (["--name=it's"], 2, "name=.*: found"),
    "a name that is a command": (["--name=$(id)"], 2, r"name=.*: found '\$\(id\)'"),
    "a name in another script": (["--name=日本"], 2, "name=.*: found '日本'"),
    "an output folder that is a file": (
        ["--output_dir={root}/tiny.yaml"],
        3,
        "output_dir .*: is a file",
    ),
    "an output folder below a file": (
        ["--output_dir={root}/tiny.yaml/x"],
        3,
        r"output_dir .*x: .*tiny\.yaml is a file",
    ),
    "an output folder of others": (
        ["--output_dir={root}/theirs"],
        3,
        "output_dir .*: holds files that no run",
    ),
    "an output folder in /proc": (["--output_dir=/proc/lowmem"], 3, "output_dir /proc/lowmem"),
    "the root as output folder": (["--output_dir=/"], 3, "output_dir /: holds files that no run"),
    "an output folder of 256 bytes": (["--output_dir=" + "x" * 256], 2, "output_dir=.*255 bytes"),
    "an output folder of 5,000 bytes": (["--output_dir=/" + "x/" * 2500], 3, "File name too long"),
    "an output folder with a NUL": (
        ["--output_dir=a\0b"],
        2,
        "output_dir=.*: found the control character",
    ),
    "an output folder with a newline": (
        ["--output_dir=a\nb"],
        2,
        "output_dir=.*: found the control character",
    ),
    "a link to another's folder": (
        ["--output_dir={root}/link"],
        3,
        "output_dir .*link: is a symbolic link",
    ),
    "no such run": (["--resume", "{root}/nowhere"], 5, "found no run of ours there"),
    "a run that is a file": (["--resume", "{root}/tiny.yaml"], 5, "found no run of ours there"),
    "a run with escape codes": (
        ["--resume", "{root}/\x1b[31m"],
        5,
        r"\\x1b\[31m: found no run of ours",
    ),
    "a run of 5,000 bytes": (["--resume", "/" + "x" * 5000], 3, "File name too long"),
    "a tokenizer that is not there": (
        ["--tokenizer.path={root}/nowhere"],
        3,
        "tokenizer.path: there is no folder",
    ),
    "a tokenizer that is a file": (
        ["--tokenizer.path={root}/tiny.yaml"],
        3,
        "tokenizer.path: there is no folder",
    ),
    "a tokenizer of 5,000 bytes": (["--tokenizer.path=/" + "x" * 5000], 3, "File name too long"),
    "a shape with a slash": (
        ["--model.shape=../recipes/sft"],
        2,
        "model.shape: there is no '../recipes/sft'",
    ),
    "an absolute shape": (
        ["--model.shape=/etc/passwd"],
        2,
        "model.shape: there is no '/etc/passwd'",
    ),
    "a flag twice over": (["--resume"], 2, "--resume"),
    "a word too many": (["4", "5"], 2, "run: 5 was not expected"),
    "an unknown flag": (["--verbose"], 2, "--verbose: no such flag or key"),
    "data that is a folder": (
        ["--data.train_file={root}/workspace"],
        4,
        "no data file lies in this folder",
    ),
    "data that is a device": (["--data.train_file=/dev/zero"], 4, "not an ordinary file"),
    "data that is a pipe": (["--data.train_file={root}/pipe.jsonl"], 4, "not an ordinary file"),
    "data that may loop": (["--data.train_file={root}/loop.jsonl"], 4, r"loop\.jsonl"),
    "data of an unknown kind": (
        ["--data.train_file={root}/tiny.yaml"],
        4,
        "is not a known file type",
    ),
    "data of 5,000 bytes of name": (
        ["--data.train_file=/" + "x" * 5000 + ".jsonl"],
        4,
        "cannot be opened",
    ),
    "a missing held-out file": (
        ["--data.validation_file={root}/nowhere.jsonl"],
        4,
        "there is no such file",
    ),
}


def path_cases(workspace: Workspace) -> list[Case]:
    workspace.file("theirs/thesis.tex", b"years of work")
    (workspace.root / "link").symlink_to(workspace.root / "theirs")
    (workspace.root / "loop.jsonl").symlink_to(workspace.root / "loop.jsonl")
    os.mkfifo(workspace.root / "pipe.jsonl")
    return [
        Case(
            f"path: {name}",
            [
                "run",
                str(workspace.recipe),
                "--dry-run",
                *(word.replace("{root}", str(workspace.root)) for word in words),
            ],
            code,
            expected,
        )
        for name, (words, code, expected) in PATHS.items()
    ]


CONFIG = json.dumps({"model_type": "llama", "vocab_size": 300}).encode()


def _config(**more: object) -> bytes:
    return json.dumps({"model_type": "llama", "vocab_size": 300, **more}).encode()


# files of a model folder -> what is said of it
FOLDERS: dict[str, tuple[dict[str, bytes], str]] = {
    "empty": ({}, "has no config.json"),
    "an adapter": ({"adapter_config.json": b"{}"}, "is a LoRA adapter"),
    "a pickle": ({"config.json": CONFIG, "pytorch_model.bin": b"x"}, "only safetensors are read"),
    "a .pt": ({"config.json": CONFIG, "model.pt": b"x"}, "only safetensors are read"),
    "a .pkl": ({"config.json": CONFIG, "weights.pkl": b"x"}, "only safetensors are read"),
    "a cut shard": (
        {"config.json": CONFIG, "model.safetensors": b"\x40\0\0\0\0\0\0\0{"},
        "is cut or no safetensors",
    ),
    "an empty shard": (
        {"config.json": CONFIG, "model.safetensors": b""},
        "is cut or no safetensors",
    ),
    "a pointer": (
        {"config.json": CONFIG, "model.safetensors": b"version https://"},
        "is a Git LFS pointer",
    ),
    "an index without shards": (
        {
            "config.json": CONFIG,
            "model.safetensors.index.json": b'{"weight_map": {"a": "m-1.safetensors"}}',
        },
        "names m-1.safetensors, which is not in the folder",
    ),
    "an index that leads out": (
        {
            "config.json": CONFIG,
            "model.safetensors.index.json": b'{"weight_map": {"a": "../x.safetensors"}}',
        },
        "which is no file name in this folder",
    ),
    "an index that is none": (
        {"config.json": CONFIG, "model.safetensors.index.json": b"[]"},
        "has no weight_map",
    ),
    "remote code": (
        {"config.json": _config(auto_map={"AutoModel": "m.M"})},
        "auto_map .*never run",
    ),
    "a private key": (
        {"config.json": _config(_attn_implementation_internal="x", _auto_class="M")},
        "private key '_auto_class'",
    ),
    "a kernel to download": (
        {"config.json": _config(attn_implementation="k/flash")},
        "would download code",
    ),
    "quantised weights": (
        {"config.json": _config(quantization_config={})},
        "only linear ones of 4 bits that bitsandbytes has packed can be trained",
    ),
    "a config that is no JSON": ({"config.json": b"{"}, "is not JSON"),
    "a config that is a list": ({"config.json": b"[]"}, "holds list"),
    "a config without a type": ({"config.json": b"{}"}, "has no model_type"),
    "a config of 11 MB": ({"config.json": b" " * (11 << 20)}, "more than a config can have"),
    "a config deep as a well": ({"config.json": b"[" * 100_000}, "is not JSON"),
    "an unknown type": ({"config.json": b'{"model_type": "rwkv9"}'}, "rwkv9"),
}


def folder_cases(workspace: Workspace) -> list[Case]:
    found = []
    for number, (name, (files, expected)) in enumerate(FOLDERS.items()):
        folder = workspace.root / "models" / str(number)
        folder.mkdir(parents=True)
        for file, content in files.items():
            (folder / file).write_bytes(content)
        argv = ["run", str(workspace.recipe), "--dry-run", f"--model.path={folder}"]
        found.append(Case(f"model: {name}", argv, 3 if name != "an unknown type" else 2, expected))
    return found


def _parquet(workspace: Workspace, name: str, data: dict[str, list], **options) -> Path:
    path = workspace.root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table(data), path, **options)
    return path


def _garbled(path: Path, at: float) -> Path:
    raw = bytearray(path.read_bytes())
    start = int(len(raw) * at)
    raw[start : start + 200] = bytes(reversed(raw[start : start + 200])) if at else b"\xff" * 200
    path.write_bytes(raw)
    return path


LINES: dict[str, tuple[bytes, str]] = {  # a bad line -> what is said of it, wherever it stands
    "cut": (b'{"prompt": "one", "resp', "JSON"),
    "no JSON": (b"prompt,response", "JSON"),
    "latin-1": (b'{"prompt": "caf\xe9", "response": "x"}', "UTF-8"),
    "half a UTF-8 character": (b'{"prompt": "\xe4\xb8", "response": "x"}', "UTF-8"),
    "a NUL": (b'{"prompt": "a\0b", "response": "x"}', "JSON"),
    "half a character": (b'{"prompt": "\\ud800", "response": "x"}', "half a character"),
    "a missing column": (b'{"prompt": "one"}', "response"),
    "a null text": (b'{"prompt": "one", "response": null}', "response"),
    "a number": (b'{"prompt": "one", "response": 1}', "response"),
    "a list": (b'{"prompt": "one", "response": ["a"]}', "response"),
    "an array": (b"[1, 2]", "list"),
    "a bare word": (b'"one"', "object"),
    "a key twice": (b'{"prompt": "one", "response": "a", "response": "b"}', "twice"),
    "5,000 digits": (
        b'{"prompt": ' + b"9" * 5000 + b', "response": "a"}',
        "cannot be read as JSON",
    ),
    "100,000 brackets": (b"[" * 100_000, "JSON"),
}

# a line that can be read, but not all of it would be trained
DROPPED: dict[str, tuple[bytes, str]] = {
    "a label": (
        b'{"prompt": "one", "response": "a", "label": false}',
        "column 'label' .* another kind of training",
    ),
    "a score": (
        b'{"prompt": "one", "response": "a", "score": 0.5}',
        "column 'score' .* another kind of training",
    ),
}


def data_cases(workspace: Workspace) -> list[Case]:
    """Found while planning: whole files, and lines among the first ones."""
    files: dict[str, tuple[bytes, str]] = {
        "an empty file": (b"", "0 rows"),
        "blank lines": (b"\n \n\r\n", "0 rows"),
        "UTF-16": (GOOD.decode().encode("utf-16"), "UTF-16"),
        "gzip": (b"\x1f\x8b\x08\x00" + bytes(50), "gzip"),
        "no row that is known": (b'{"a": 1}\n', "columns"),
        "a line of 65 MiB": (b'{"prompt": "' + b"x" * (65 << 20), "longer than 64 MiB"),
    }
    early = {
        name: (b"\n".join([GOOD, GOOD, line, GOOD]), said)
        for name, (line, said) in (LINES | DROPPED).items()
        if name != "half a character"
    }
    found = []
    for number, (name, (content, said)) in enumerate([*files.items(), *early.items()]):
        path = workspace.file(f"data/{number}.jsonl", content)
        place = rf"{number}\.jsonl" + (r".*(:3|line 3)" if name in early else "")
        found.append(_data_case(workspace, f"data: {name}", path, rf"(?s)(?=.*{place}).*{said}"))
    texts = {"prompt": ["one"] * 2000, "response": [f"{i} eins" for i in range(2000)]}
    parquet = {
        "a parquet file of text": workspace.file("data/text.parquet", b"PAR1 no, not really"),
        "a cut footer": workspace.file(
            "data/cut.parquet", _parquet(workspace, "data/whole.parquet", texts).read_bytes()[:-20]
        ),
        "an empty parquet file": workspace.file("data/empty.parquet", b""),
        "a parquet file without rows": _parquet(
            workspace, "data/none.parquet", {"prompt": pa.array([], "string")}
        ),
        "a parquet file of numbers": _parquet(
            workspace, "data/numbers.parquet", {"prompt": [1], "response": [2]}
        ),
    }
    found += [
        _data_case(workspace, f"data: {name}", path, re.escape(path.name))
        for name, path in parquet.items()
    ]
    bomb = {"prompt": ["a" * (70 << 20)], "response": ["b"]}
    bomb = _parquet(workspace, "data/bomb.parquet", bomb, compression="zstd")
    repeated = pa.DictionaryArray.from_arrays(pa.array([0] * 1000, "int32"), ["a" * 4_800_000])
    repeated = {"prompt": repeated, "response": ["b"] * 1000}
    repeated = _parquet(workspace, "data/repeated.parquet", repeated, compression="zstd")
    array = workspace.file("data/array.json", b"[" + GOOD + b",\n{]")
    return [
        *found,
        _data_case(workspace, "data: 70 MiB in a small file", bomb, "row 1 has 73,400,"),
        _data_case(
            workspace,
            "data: 4.8 GB in 900 bytes",
            repeated,
            "batch 1 of its rows takes more memory",
        ),
        _data_case(workspace, "data: an array that breaks", array, r"array\.json:2.*JSON"),
    ]


def _data_case(workspace: Workspace, name: str, path: Path, expected: str) -> Case:
    argv = [
        "run",
        str(workspace.recipe),
        "--dry-run",
        f"--data.train_file={path}",
        f"--name=d{abs(hash(name)) % 10**9}",
    ]
    return Case(name, argv, 4, expected)


def late_files(workspace: Workspace) -> dict[str, tuple[Path, str]]:
    """Bad in a place that planning does not read, so that the tokenising child meets it: line 150,
    or a page."""
    found = {}
    for number, (name, (line, said)) in enumerate((LINES | DROPPED).items()):
        path = workspace.file(
            f"late/{number}.jsonl", b"\n".join([*[GOOD] * 149, line, GOOD]) + b"\n"
        )
        found[name] = path, rf"{number}\.jsonl:150.*{said}"
    texts = {"prompt": ["one"] * 2000, "response": [f"{i} eins" for i in range(2000)]}
    nulls = {**texts, "response": [*texts["response"][:-1], None]}
    found["a null in the last row of a parquet file"] = (
        _parquet(workspace, "late/null.parquet", nulls),
        r"null\.parquet:2000",
    )
    flipped = _garbled(_parquet(workspace, "late/flipped.parquet", texts, compression="zstd"), 0.5)
    found["a page of noise"] = flipped, r"flipped\.parquet: cannot be read after row"
    huge = workspace.file(
        "late/huge.jsonl", b"\n".join([*[GOOD] * 149, b'{"prompt": "' + b"x" * (65 << 20)])
    )
    found["a line of 65 MiB"] = huge, r"huge\.jsonl:150: longer than 64 MiB"
    array = b",\n".join([*[GOOD] * 149, b'{"prompt": 1, "response": "x"}'])
    found["a row of an array"] = (
        workspace.file("late/array.json", b"[" + array + b"]"),
        r"array\.json:150: column 'prompt'",
    )
    return found


def machine_cases(workspace: Workspace) -> list[Case]:
    """Files of described machines."""
    files = {
        "nested too deeply": str(workspace.file("deep.yaml", b"[" * 2000)),
        "no regular file": "/dev/zero",
        "more than 65,536 bytes": str(workspace.file("long.yaml", b"[" * 100_000)),
    }
    return [
        Case(f"machine: {said}", ["plan", str(workspace.recipe), "--machine", path], 2, said)
        for said, path in files.items()
    ]


CORPORA: tuple[Callable[[Workspace], list[Case]], ...] = (
    yaml_cases,
    number_cases,
    path_cases,
    folder_cases,
    data_cases,
    machine_cases,
)


# ---- the tests
# ---------------------------------------------------------------------------


def started(folder: Path, lines: list[list[str]]) -> list[dict]:
    """What came of each command line, all in one process (many_starts.py)."""
    (folder / "lines.json").write_text(json.dumps(lines), encoding="utf-8")
    script = builders.CODE / "tests/process/commands/many_starts.py"
    argv = [sys.executable, str(script), str(folder / "lines.json"), str(folder / "found.json")]
    done = subprocess.run(
        argv,
        env=builders.environment(folder / "workspace"),
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert done.returncode == 0, done.stderr
    return json.loads((folder / "found.json").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def workspace(tmp_path_factory) -> Workspace:
    root = tmp_path_factory.mktemp("bad inputs")
    path = builders.recipe(root)
    text = path.read_text(encoding="utf-8").replace(
        f"  validation_file: {root}/valid.parquet\n", ""
    )
    path.write_text(text, encoding="utf-8")
    return Workspace(root, path)


@pytest.fixture(scope="module")
def answers(workspace) -> list[tuple[Case, dict]]:
    cases = [case for corpus in CORPORA for case in corpus(workspace)]
    return list(zip(cases, started(workspace.root, [case.argv for case in cases]), strict=True))


@pytest.mark.shows(
    "F34",
    "F35",
    "F36",
    "F37",
    "F39",
    "F41",
    "F42",
    "F43",
    "over 150 bad recipes, data files, models, paths, numbers; each answer names key, file or line",
)
def test_every_bad_input_is_refused_in_one_line_with_its_code_and_without_torch(answers):
    faults = [f"{case.name}: {fault}" for case, found in answers if (fault := wrong(case, found))]
    assert not faults, f"{len(faults)} of {len(answers)}:\n" + "\n".join(faults)
    assert len(answers) >= 150


def wrong(case: Case, found: dict) -> str:
    first = found["err"].splitlines()[0] if found["err"] else "nothing was said"
    if found["code"] != case.code:
        return f"exit {found['code']}, expected {case.code}; {found['err'][-300:]}"
    if not first.startswith("error: ") or "Traceback" in found["err"]:
        return f"the first line is {first!r}"
    if not re.search(case.expected, found["err"]):
        return f"{found['err'][:300]!r} does not say {case.expected!r}"
    if found["heavy"]:
        return f"imported {found['heavy']}"
    if any(not line.isprintable() for line in found["err"].splitlines()):
        return f"characters that hide: {found['err']!r}"
    if case.code == 2 and found["seconds"] > CONFIG_S:
        return f"took {found['seconds']:.1f} s"
    return ""


@pytest.fixture(scope="module")
def late(workspace) -> list[tuple[str, str, dict]]:
    """(name, expected, what came of the tokenising child) of each file that is bad late."""
    files = late_files(workspace)
    plans = [
        ["run", str(workspace.recipe), "--dry-run", f"--data.train_file={path}", f"--name=l{i}"]
        for i, (path, _) in enumerate(files.values())
    ]
    planned = started(workspace.root, plans)
    assert [found["code"] for found in planned] == [0] * len(plans), planned
    runs = [builders.only_run(workspace.root / "workspace", f"l{i}") for i in range(len(plans))]
    prepared = started(workspace.root, [prepare(workspace, run) for run in runs])
    for found, run in zip(prepared, runs, strict=True):
        error = json.loads((run / "attempts/01/ranks/0/error.json").read_text(encoding="utf-8"))
        found["said"] = error["message"]
    return [
        (name, expected, found)
        for (name, (_, expected)), found in zip(files.items(), prepared, strict=True)
    ]


@pytest.mark.shows(
    "F34",
    "F35",
    "F36",
    "F38",
    "rows that are bad late in a file; each answer names the line",
    code=4,
)
def test_what_planning_does_not_read_is_refused_by_the_tokenising_child(late):
    faults = [
        f"{name}: {found['code']} {found['said'][:300]} {found['err'][-300:]}"
        for name, expected, found in late
        if found["code"] != 4 or not re.search(expected, found["said"])
    ]
    assert not faults, f"{len(faults)} of {len(late)}:\n" + "\n".join(faults)


SAMPLE = (
    "yaml: a duplicate key",
    "path: a run with escape codes",
    "model: a pickle",
    "data: latin-1",
    "batch: 'abc'",
)


@pytest.mark.parametrize("name", SAMPLE)
def test_a_real_process_answers_the_same(answers, workspace, name):
    ((case, found),) = [(case, found) for case, found in answers if case.name == name]
    done = builders.launch(workspace.root / "workspace", *case.argv)
    assert (done.returncode, done.stderr) == (found["code"], found["err"])


@pytest.mark.parametrize(
    ("name", "value", "code", "expected"),
    [
        ("SLURM_JOB_END_TIME", "abc", 2, "expected seconds since 1970"),
        ("LOWMEM_TRACES", "/proc", 3, "/proc: cannot keep traces there"),
    ],
)
def test_a_bad_variable_is_named_in_one_line(workspace, name, value, code, expected):
    words = ("run", str(workspace.recipe), "--dry-run")
    done = builders.launch(workspace.root / "workspace", *words, **{name: value})
    assert (done.returncode, expected in done.stderr) == (code, True), done.stderr
    assert len(done.stderr.splitlines()) == 1, done.stderr


def test_so_many_bad_rows_as_are_allowed_are_left_out_and_counted(workspace):
    lines = [line for line, _ in LINES.values()]
    path = workspace.file(
        "some/bad.jsonl", b"\n".join([*[GOOD] * 200, *lines, *[GOOD] * 5]) + b"\n"
    )
    asked = {"enough": len(lines), "few": len(lines) - 1}
    keys = {
        name: [f"--name={name}", f"--data.max_bad_rows={count}"] for name, count in asked.items()
    }
    start = ["run", str(workspace.recipe), "--dry-run", f"--data.train_file={path}"]
    planned = started(workspace.root, [[*start, *words] for words in keys.values()])
    assert [found["code"] for found in planned] == [0, 0], planned
    runs = [builders.only_run(workspace.root / "workspace", name) for name in asked]
    enough, few = started(workspace.root, [prepare(workspace, run) for run in runs])
    assert enough["code"] == 0, enough
    assert "bad.jsonl: 205 rows" in enough["out"]
    assert (
        f"bad.jsonl: {len(lines)} bad rows left out (data.max_bad_rows {len(lines)}); first "
        in enough["out"]
    )
    assert "bad.jsonl:201: is not JSON" in enough["out"]
    assert few["code"] == 4
    said = json.loads((runs[1] / "attempts/01/ranks/0/error.json").read_text(encoding="utf-8"))[
        "message"
    ]
    assert re.search(
        rf"bad\.jsonl:215: .*bad row {len(lines)}, data.max_bad_rows allows {len(lines) - 1}", said
    )


def prepare(workspace: Workspace, run: Path) -> list[str]:
    """The tokenising child's command line, for many_starts.py, with the file that it reads."""
    recipe, plan = RunDir(run).read_recipe(), RunDir(run).read_plan()
    cache = workspace.root / "workspace/.cache"
    attempt = RunDir(run).attempt(1)
    tokens = token_cache(cache, recipe, plan.shape, plan.data_format)
    write_json(attempt.tokenising_file, tokens)
    return ["prepare", str(attempt.root), "1"]


def test_a_field_of_a_newer_transformers_is_refused_by_name(tmp_path):
    package = tmp_path / "transformers"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "training_args.py").write_text(
        "class TrainingArguments:\n    adam_beta1: float = 0.9\n    newer_field: int = 3\n"
    )
    path = f"{tmp_path}{os.pathsep}{builders.CODE}"
    refused = builders.launch(tmp_path, "plan", "sft", "--training.newer_field=1", PYTHONPATH=path)
    assert refused.returncode == 2, refused.stderr
    assert "--training.newer_field=1: found a field that has no effect here" in refused.stderr
    assert "the installed transformers has it, but nothing here reads it" in refused.stderr
    listed = builders.launch(tmp_path, "keys", "training", PYTHONPATH=path).stdout
    assert "training.adam_beta1" in listed
    assert "newer_field" not in listed
