"""`python -m launch show` tells of each row what is trained, and which tokens have a loss."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from collections.abc import Callable

import pytest

from launch.__main__ import main
from launch.schema.model_sections import TokenizerSection
from tests import builders
from training.data import tokenizer as data_tokenizer

ROWS = [
    {"prompt": "one\n[2]", "response": "answer"},
    {"prompt": " ".join(map(str, range(90))), "response": "behind a long prompt"},
    {"prompt": "three", "response": ""},
]


@pytest.fixture(scope="module")
def recipe(tmp_path_factory):
    folder = tmp_path_factory.mktemp("show")
    files = {"train_file": folder / "rows.jsonl", "validation_file": folder / "valid.jsonl"}
    for file in files.values():
        file.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return builders.recipe(folder, data={key: str(file) for key, file in files.items()})


@pytest.fixture
def launch(recipe, monkeypatch, capsys) -> Callable[..., subprocess.CompletedProcess[str]]:
    """`python -m launch WORDS` in this process, so that one child encodes the rows of all tests."""
    for name, value in builders.environment(recipe.parent).items():
        monkeypatch.setenv(name, value)

    def launched(*words: str) -> subprocess.CompletedProcess[str]:
        code, said = main([*words]), capsys.readouterr()
        return subprocess.CompletedProcess(words, code, said.out, said.err)

    return launched


def test_rows_are_shown_with_their_loss_and_the_reason_for_which_they_are_left_out(launch, recipe):
    done = launch("show", str(recipe))
    assert done.returncode == 0, done.stderr
    rows = recipe.parent / "rows.jsonl"
    shown = done.stdout
    assert "of the tokenizer that is trained on the data: a token for each role" in shown
    assert "answers, found by the prompts before them" in shown
    assert f"{rows}:1: " in shown
    assert "<|user|>one\n[2]<|assistant|>⟦answer<|end|>⟧" in shown
    assert f"{rows}:2: left out, its prompt fills data.max_length 64" in shown
    assert f"{rows}:3: left out, no answer in it has a loss" in shown
    assert (
        "the first 3 were read, 1 left out (its prompt fills data.max_length 64, the longest"
        in shown
    )


def test_tokens_of_a_t5_are_those_of_source_and_target(launch, recipe):
    done = launch("show", str(recipe), "--model.shape=t5-tiny")
    assert done.returncode == 0, done.stderr
    assert (
        "template   none: the encoder reads the turns before the last answer, a line each"
        in done.stdout
    )
    tokens, targets = map(int, re.findall(r":1: (\d+) tokens, (\d+) with a loss", done.stdout)[0])
    assert 0 < targets < tokens
    assert "⟦answer<|end|>⟧" in done.stdout


@pytest.mark.modes
def test_rows_that_are_held_out_are_marked(launch, recipe):
    words = ("--data.validation_file=null", "--data.validation_size=1")
    done = launch("show", str(recipe), *words, "--rows=9")
    assert done.returncode == 0, done.stderr
    assert "the first 3 were read, 1 of them are held out (data.validation_size)" in done.stdout
    (line,) = re.findall(r"rows\.jsonl:(\d) \(held out\)", done.stdout)
    alone = launch("show", str(recipe), *words, f"--line={line}")
    assert f"rows.jsonl:{line} (held out)" in alone.stdout


@pytest.mark.modes
def test_the_first_rows_of_each_source_are_shown(launch, recipe):
    files = [recipe.parent / "rows.jsonl", recipe.parent / "talk.jsonl"]
    talk = [{"role": role, "name": "Ann", "content": "hello"} for role in ("user", "assistant")]
    files[1].write_text(json.dumps({"messages": talk}) + "\n")
    flag = f"--data.train_file=[{files[0]}, {{path: {files[1]}, weight: 2}}]"
    done = launch("show", str(recipe), flag, "--rows=1")
    assert done.returncode == 0, done.stderr
    for file, kind in zip(files, ("prompt/response", "messages"), strict=True):
        assert f"data       {file}: {kind}: " in done.stdout
    assert re.findall(r"/(\w+\.jsonl:\d+)[ :]", done.stdout) == ["rows.jsonl:1", "talk.jsonl:1"]
    assert "4 of 2 files were read" in done.stdout
    assert "talk.jsonl: columns that are not read: messages.name" in done.stdout
    assert "2 name (not in the chat template: not trained)" in done.stdout
    alone = launch("show", str(recipe), flag, f"--file={files[1]}")
    assert "talk.jsonl:1 (2 times an epoch): " in alone.stdout
    assert str(files[0]) not in alone.stdout


def test_a_row_of_a_file_is_found_by_its_line(launch, recipe):
    valid = recipe.parent / "valid.jsonl"
    done = launch("show", str(recipe), f"--file={valid}", "--line=1")
    assert done.returncode == 0, done.stderr
    assert f"{valid}:1: " in done.stdout
    assert f"{valid}:2: " not in done.stdout
    done = launch("show", str(recipe), "--line", "9")
    assert (done.returncode, done.stdout) == (4, "")
    assert "rows.jsonl: found no row of line 9; the nearest has line 3" in done.stderr


@pytest.mark.parametrize(
    ("name", "content", "line", "shown", "absent"),
    [
        ("bad.jsonl", json.dumps(ROWS[0]) + "\n{\n" + json.dumps(ROWS[0]), 3, ":3: ", ":1:"),
        ("quoted.csv", 'prompt,response\n"a\nb",c\n"d\ne",f\n', 4, "d\ne<|ass", "a\nb"),
        ("text.jsonl", '\n{"text": "one"}\n\n{"text": "two"}\n', 4, ":4: ", "one"),
        ("array.json", '[{"text": "one"},\n\n{"text": "two"}]', 2, ":2: ", "one"),
    ],
)
def test_a_row_is_found_by_its_line_whatever_stands_before_it(
    launch, recipe, tmp_path, name, content, line, shown, absent
):
    path = tmp_path / name
    path.write_text(content)
    words = ["show", str(recipe), f"--data.train_file={path}", "--data.validation_file=null"]
    words += ["--task=pretrain"] * ("text" in content)
    done = launch(*words, f"--line={line}")
    assert done.returncode == 0, done.stderr
    assert shown in done.stdout
    assert absent not in done.stdout.partition("rows ")[2]
    refused = launch(*words, f"--line={line + 3}")
    assert refused.returncode == 4
    kind = "number" if name.endswith(".json") else "line"
    assert f"no row of {kind} {line + 3}; the nearest has {kind} {line}" in refused.stderr


def test_the_error_of_a_bad_row_is_shown_for_its_line(launch, recipe, tmp_path):
    path = tmp_path / "bad.jsonl"
    path.write_text('{"prompt": "a", "response": "b"}\n{"prompt": "c", "response": 1}\n{\n')
    words = ["show", str(recipe), f"--data.train_file={path}", "--data.validation_file=null"]
    for line, message in ((2, "bad.jsonl:2: column 'response': found int"), (3, "bad.jsonl:3: is")):
        done = launch(*words, f"--line={line}")
        assert done.returncode == 4
        assert message in done.stderr
    assert launch(*words, "--line=1").returncode == 0


def test_text_that_looks_like_a_special_token_is_marked(launch, recipe, tmp_path):
    path = tmp_path / "forged.jsonl"
    forged = "no<|end|><|user|>yes"
    path.write_text(json.dumps({"prompt": "a", "response": forged}) + "\n")
    words = ["show", str(recipe), f"--data.train_file={path}", "--data.validation_file=null"]
    done = launch(*words)
    assert done.returncode == 0, done.stderr
    assert r"<|user|>a<|assistant|>⟦no\<|end|>\<|user|>yes<|end|>⟧" in done.stdout
    assert "A backslash before <|...|>" in done.stdout


@pytest.mark.parametrize(
    ("encoding", "drawn"), [("utf-8", ("█", "▏", "⟦", "⟧")), ("ascii", ("#", "|", "[", "]"))]
)
def test_a_terminal_without_the_signs_gets_those_of_ascii(recipe, tmp_path, encoding, drawn):
    path = tmp_path / "rows.jsonl"
    responses = ["█ it is", *["a"] * 99, "b " * 20]
    rows = [{"prompt": "a", "response": response} for response in responses]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = ("show", str(recipe), f"--data.train_file={path}", "--rows=200")
    done = builders.launch(tmp_path / "workspace", *words, PYTHONIOENCODING=encoding)
    assert done.returncode == 0, done.stderr
    full, short, begin, end = drawn
    assert f" {full * 40} 100\n" in done.stdout and f" {short} 1\n" in done.stdout
    assert f"<|user|>a<|assistant|>{begin}a<|end|>{end}\n" in done.stdout
    of_the_row = "█" if encoding == "utf-8" else r"\u2588"
    assert f"{begin}{of_the_row} it is<|end|>{end}\n" in done.stdout


@pytest.mark.parametrize(
    ("flag", "message"),
    [
        ("--file=other.jsonl", "--file other.jsonl: expected a file of data.train_file or"),
        ("--rows=0", "--rows: found 0, expected a number from 1"),
        ("--rows=2 --line=1", "--rows and --line are both given; --line shows one row alone"),
    ],
)
def test_a_mistake_is_one_line(launch, recipe, flag, message):
    done = launch("show", str(recipe), *flag.split())
    assert done.returncode == 2
    assert message in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_rows_are_shown_as_the_named_template_renders_them(launch, recipe):
    done = launch(
        "show",
        str(recipe),
        "--tokenizer.chat_template=chatml",
        "--data.max_length=99",
    )
    assert done.returncode == 0, done.stderr
    assert "template   chatml, bundled with this program" in done.stdout
    assert "the chat template writes 2 tags that the vocabulary lacks" in done.stdout
    assert "<|im_start|>assistant\n⟦answer<|end|>⟧" in done.stdout


@pytest.mark.parametrize(("template", "exit_code"), [("chatmi", 2), ("./broken.jinja", 4)])
def test_a_mistake_in_the_template_is_met_by_the_plan(
    launch, recipe, tmp_path, template, exit_code
):
    (tmp_path / "broken.jinja").write_text("{% for message in messages %}")
    flag = f"--tokenizer.chat_template={template.replace('.', str(tmp_path), 1)}"
    done = launch("run", str(recipe), "--dry-run", flag)
    assert done.returncode == exit_code
    message = {2: "nearest: chatml", 4: f"{tmp_path}/broken.jinja: line 1: Unexpected end"}
    assert message[exit_code] in done.stderr
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.modes
def test_a_dry_run_renders_the_first_rows_once(launch, recipe, tmp_path, monkeypatch):
    """A template that raises is met before the plan is called good."""
    monkeypatch.setenv("LOWMEM_ROOT", str(tmp_path))
    folder = tmp_path / "tokenizer"
    tokenizer = data_tokenizer.train(iter(["one two three"] * 9), TokenizerSection(), 300)
    tokenizer.chat_template = (
        "{% if 'one' in messages[0].content %}{{ raise_exception('no one') }}{% endif %}"
        + tokenizer.chat_template
    )
    tokenizer.save_pretrained(folder)
    words = ["run", str(recipe), "--dry-run", f"--tokenizer.path={folder}"]
    words.append("--data.max_length=512")
    refused = launch(*words)
    assert refused.returncode == 4
    assert f"rows.jsonl:1: the chat template of {folder} does not take" in refused.stderr
    assert refused.stderr.endswith("no one\n")
    # a row of each file is bad, and they are counted apart
    assert launch(*words, "--data.max_bad_rows=1").returncode == 0
    (checked,) = (tmp_path / ".cache/tokens").glob("*.checked")
    before = checked.stat().st_mtime_ns
    assert launch(*words, "--data.max_bad_rows=1").returncode == 0
    assert checked.stat().st_mtime_ns == before


@pytest.mark.parametrize(
    ("command", "row", "count", "reason"),
    [
        (
            ["run", "--dry-run"],
            {"prompt": "one", "response": ""},
            300,
            "no answer in it has a loss",
        ),
        (
            ["show"],
            {"prompt": "1 " * 90, "response": "a"},
            5,
            "its prompt fills data.max_length 64, the longest has 182 tokens",
        ),
    ],
)
def test_a_dry_run_and_show_end_with_4_where_no_row_is_trained(
    launch, recipe, tmp_path, command, row, count, reason
):
    file = tmp_path / "rows.jsonl"
    file.write_text((json.dumps(row) + "\n") * count)
    words = [str(recipe), f"--data.train_file={file}", "--data.validation_file=null"]
    refused = launch(*command, *words, "--tokenizer.split=character")
    assert refused.returncode == 4
    said = f"error: {file}: no row has a target to train on ({count} read; {count}: {reason}); "
    assert refused.stderr.splitlines()[-1].startswith(said)


def changed(folder, normalizer):
    """A tokenizer folder whose tokenizer.json has another normalizer."""
    section = TokenizerSection(split="character")
    data_tokenizer.train(iter(["one two three"] * 9), section, 400).save_pretrained(folder)
    file = folder / "tokenizer.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "normalizer": normalizer}))
    return folder


REPLACE = {"type": "Replace", "pattern": {"String": "e"}, "content": "e" * 64}


@pytest.mark.parametrize(
    ("normalizer", "said"),
    [
        pytest.param(
            {**REPLACE, "pattern": {"Regex": "([a-z]+)+ "}},
            "panicked: Onig: .*retry-limit",
            marks=pytest.mark.modes,
        ),
        ({"type": "Sequence", "normalizers": [REPLACE] * 12}, "was ended by SIGABRT"),
    ],
)
def test_a_tokenizer_that_gives_up_or_takes_all_memory_is_named(recipe, tmp_path, normalizer, said):
    folder = changed(tmp_path / "hostile", normalizer)
    rows = tmp_path / "rows.jsonl"
    rows.write_text(json.dumps({"prompt": "e" * 60, "response": "e"}) + "\n")
    words = ("show", str(recipe), f"--tokenizer.path={folder}", f"--data.train_file={rows}")
    command = shlex.join([sys.executable, "-m", "launch", *words])
    done = subprocess.run(
        ["bash", "-c", f"ulimit -d {1 << 20}; exec {command}"],
        env=builders.environment(recipe.parent),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode in {3, 4}, done.stderr
    assert re.search(rf"{re.escape(str(folder))}.*{said}", done.stderr), done.stderr
