"""YAML that a recipe may not use is refused at once, in one line that names its place; the rest
reads as YAML 1.2."""

from __future__ import annotations

import re

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from launch.base.errors import ConfigError
from launch.recipe import strict_yaml
from tests import cost

MOST_CALLS = 10_000  # most take about 800; the YAML parser in Python takes ten times as many

pytestmark = pytest.mark.unit

GOOD = """\
name: mine
task: sft
output_dir: model_save/mine
model:
  shape: t5-chatlm-0.2b
  freeze: [shared, encoder]
data: {train_file: data/train.parquet}
training:
  learning_rate: 1e-4
  bf16: true
"""


def with_line(line, under="training"):
    """The good recipe with one more line in a section; an empty name is the top level."""
    return GOOD + line + "\n" if not under else GOOD.replace(f"{under}:\n", f"{under}:\n  {line}\n")


@pytest.fixture
def write(tmp_path):
    def write(content, name="r.yaml"):
        path = tmp_path / name
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return path

    return write


BOMB = "a: &a [x, x]\nb: &b [*a, *a, *a]\nc: &c [*b, *b, *b]\nd: &d [*c, *c, *c]\ne: [*d, *d, *d]\n"
BAD_YAML = {  # name -> (document, what the message must name)
    "two documents": (GOOD + "---\nname: b\n", r":11: found a second document"),
    "a directive": ("%YAML 1.1\n---\n" + GOOD, r":1: found a % directive"),
    "a tag directive": ("%TAG ! tag:x,2000:\n---\n" + GOOD, r":1: found a % directive"),
    "latin-1": (GOOD.encode() + b"x: caf\xe9\n", r":11: found bytes that are not UTF-8"),
    "utf-16": (GOOD.encode("utf-16"), r":1: found bytes that are not UTF-8"),
    "binary": (bytes(range(256)), r":2: found bytes that are not UTF-8"),
    "a parquet file": (b"PAR1\x15\x04\x15\x10" + bytes(64), r":1: found the control character"),
    "gzip": (b"\x1f\x8b\x08\x00\x00\x00\x00\x00", r":1: found bytes"),
    "a NUL": (GOOD.replace("mine", "mi\0ne"), r":1: found the control character '\\x00'"),
    "an escape character": (GOOD + "lora: \x1b[31m\n", r":11: found the control character"),
    "a bell in quotes": (
        with_line('path: "a\\ab"', "tokenizer") + 'tokenizer: {path: "a\\ab"}\n',
        r"tokenizer\.path",
    ),
    "a newline in quotes": (
        GOOD.replace("data/train.parquet", '"a\\nb"'),
        r":7: data\.train_file: .*'\\n'",
    ),
    "a NUL in quotes": (
        GOOD.replace("data/train.parquet", '"a\\0b"'),
        r":7: data\.train_file: .*'\\x00'",
    ),
    "a line separator in quotes": (
        GOOD.replace("data/train.parquet", '"a\\Lb"'),
        r":7: data\.train_file",
    ),
    "a block of text": (
        GOOD.replace("model_save/mine", "|\n  a\n  b"),
        r":3: output_dir: .*control character",
    ),
    "a tab as indentation": (
        GOOD.replace("  bf16", "\tbf16"),
        r":10: found a tab, expected spaces",
    ),
    "a tab after a colon": (
        GOOD.replace("bf16: ", "bf16:\t"),
        r":10: found a tab, expected spaces",
    ),
    "over a megabyte": (GOOD + "#" * 1_000_000, r"found more than 1,000,000 bytes"),
    "ten megabytes": ("a: b\n" * 2_000_000, r"found more than 1,000,000 bytes"),
    "an alias bomb": (BOMB, r":1: a: found an anchor or alias"),
    "an anchor": (with_line("seed: &s 3"), r":9: training\.seed: found an anchor"),
    "an anchor on a section": (
        GOOD.replace("training:", "training: &t"),
        r":8: training: found an anchor",
    ),
    "an anchor on a key": (
        GOOD + "&k lora: null\n",
        r":11: .*found a key that is not a plain word",
    ),
    "an alias": (with_line("seed: *s"), r":9: training\.seed: found an anchor or alias"),
    "a python tag": (
        with_line("seed: !!python/object/apply:os.system [id]"),
        r":9: training\.seed: found the tag",
    ),
    "a float tag": (
        with_line('weight_decay: !!float "1"'),
        r":9: training\.weight_decay: found the tag",
    ),
    "a local tag": (with_line("seed: !seed 3"), r":9: training\.seed: found the tag"),
    "a bare tag": (with_line("seed: ! 3"), r":9: training\.seed: found the tag"),
    "a duplicate key": (
        with_line("bf16: true"),
        r":11: training\.bf16: found the key twice.*r\.yaml:9",
    ),
    "a duplicate section": (GOOD + "model: {shape: b}\n", r":11: model: found the key twice"),
    "a duplicate in a flow mapping": (
        GOOD + "lora: {r: 1, r: 2}\n",
        r":11: lora\.r: found the key twice",
    ),
    "a duplicate in quotes": (GOOD + '"name": b\n', r":11: name: found the key twice"),
    "infinity": (
        with_line("weight_decay: .inf"),
        r":9: training\.weight_decay: found \.inf, expected a finite",
    ),
    "minus infinity": (
        with_line("weight_decay: -.INF"),
        r":9: training\.weight_decay: found -\.INF",
    ),
    "not a number": (with_line("weight_decay: .nan"), r":9: training\.weight_decay: found \.nan"),
    "an overflowing float": (
        with_line("weight_decay: 1e999"),
        r":9: training\.weight_decay: found 1e999",
    ),
    "a number of 5000 digits": (
        with_line("seed: " + "9" * 5000),
        r":9: training\.seed: found a number of 5000",
    ),
    "lists 1000 deep": (GOOD + "lora: " + "[" * 1000, r":11: lora.*more than 20 levels"),
    "mappings 1000 deep": (GOOD + "lora: " + "{a: " * 1000, r":11: lora.*more than 20 levels"),
    "an unclosed bracket": (GOOD + "lora: {r: 8\n", r":1\d: found broken YAML"),
    "an unclosed quote": (GOOD + 'lora: "r\n', r":1\d: found broken YAML"),
    "bad indentation": (GOOD + "   fp16: true\n lora: null\n", r":1\d: found broken YAML"),
    "two colons": (with_line("optim: a: b"), r":9: found broken YAML"),
    "an at sign": (with_line("optim: @adam"), r":9: found broken YAML"),
    "no colon": (with_line("bf16 true"), r":(9|10): found broken YAML"),
    "a key that is a number": (with_line("1: 2"), r":9: training: found the key 1"),
    "a key that is null": (GOOD + "null: 2\n", r":11: the top level: found the key null"),
    "a key that is true": (GOOD + "true: 2\n", r":11: the top level: found the key true"),
    "a key that is a list": (GOOD + "? [a]\n: 2\n", r":11: the top level: found a key that is not"),
}


@pytest.mark.parametrize("name", BAD_YAML)
def test_bad_yaml_is_refused_at_once_in_one_line_that_names_key_or_line(name, write):
    document, expected = BAD_YAML[name]
    file = write(document)
    errors: list[ConfigError] = []

    def read() -> None:
        try:
            strict_yaml.read_yaml(file)
        except ConfigError as error:
            errors.append(error)

    calls = cost.count_calls(read)
    message = str(errors[0])
    assert re.search(expected, message)
    assert message.isprintable(), "one line, without characters that hide"
    assert len(message) < 1500
    assert str(file) in message
    assert calls < MOST_CALLS


def test_of_a_large_document_only_so_many_values_are_read(write):
    file = write(GOOD + "".join(f"key{i}: 1\n" for i in range(70_000)))

    def read() -> None:
        with pytest.raises(ConfigError, match=r"key\d+: found more than 1000 values"):
            strict_yaml.read_yaml(file)

    assert cost.count_calls(read) < 100_000


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-4", 1e-4),
        ("1.", 1.0),
        (".5", 0.5),
        ("-3", -3),
        ("+3", 3),
        ("3.0", 3.0),
        ("0o17", 15),
        ("0x1F", 31),
        ("017", 17),
        ("0b11", "0b11"),
        ("1_000", "1_000"),
        ("12:30:00", "12:30:00"),
        ("2024-01-01", "2024-01-01"),
        ("no", "no"),
        ("yes", "yes"),
        ("on", "on"),
        ("Off", "Off"),
        ("y", "y"),
        ("true", True),
        ("FALSE", False),
        ("~", None),
        ("Null", None),
        ("", None),
        ("'12'", "12"),
        ('"true"', "true"),
        ("１６", "１６"),
        ("e5", "e5"),
        (".", "."),
        ("[1, a, [2.5, no]]", [1, "a", [2.5, "no"]]),
        ("{a: 1, b: {c: null}}", {"a": 1, "b": {"c": None}}),
    ],
)
def test_scalars_follow_yaml_1_2(text, value, write):
    read = strict_yaml.read_yaml(write(f"key: {text}\n"))[0]["key"]
    assert read == value
    assert type(read) is type(value)


@pytest.mark.parametrize(
    "document", ["\ufeff" + GOOD, GOOD.replace("\n", "\r\n"), "---\n" + GOOD, GOOD + "...\n"]
)
def test_harmless_variants_of_a_file_are_read(document, write):
    assert (
        strict_yaml.read_yaml(write(document))[0]
        == strict_yaml.read_yaml(write(GOOD, "plain.yaml"))[0]
    )


@pytest.mark.parametrize(
    "name", ["a b.yaml", "it's; rm.yaml", "100%.yaml", "-x.yaml", "日本.yaml", 'q".yaml']
)
def test_a_file_with_an_odd_name_is_read(name, write):
    assert strict_yaml.read_yaml(write(GOOD, name))[0]["name"] == "mine"


def test_each_key_has_its_place(write):
    file = write(GOOD)
    places = strict_yaml.read_yaml(file)[1]
    assert places[("training",)] == f"{file}:8"
    assert places[("training", "bf16")] == f"{file}:10"
    assert places[("model", "freeze", 1)] == f"{file}:6"


@given(
    document=st.binary(max_size=200)
    | st.text(alphabet="ab:-[]{}#&*!|>'\"%@ \n1.e?,~", max_size=60).map(str.encode)
)
@example(document=b"a: *")
@example(document=b"? ")
@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_no_document_raises_anything_but_one_line(document, tmp_path):
    file = tmp_path / "any.yaml"
    file.write_bytes(document)
    try:
        strict_yaml.read_yaml(file)
    except ConfigError as error:
        assert str(error).isprintable()
