"""data.train_file as a list: each source is read in its own format, as often as its weight says."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path

import pytest
import yaml

from launch.base.errors import ConfigError, DataError
from launch.data import columns, sources, token_cache
from launch.data.conversation import Conversation
from launch.data.files.shards import FileFacts
from launch.data.rows import BadRows
from launch.recipe import load
from launch.recipe.paths import absolute_override, with_absolute_paths
from launch.schema.data_section import DataSection
from tests import builders

pytestmark = pytest.mark.unit


@pytest.fixture
def files(tmp_path) -> tuple[str, str, str]:
    """An alpaca file, messages and a CSV with columns of other names, 20 rows each."""
    alpaca = [{"instruction": f"a{i}", "input": "", "output": f"answer {i}"} for i in range(20)]
    (tmp_path / "a.json").write_text(json.dumps(alpaca))
    talks = [
        {"role": "user", "content": "b{}"},
        {"role": "assistant", "content": "answer"},
    ]
    rows = [{"messages": json.loads(json.dumps(talks).replace("{}", str(i)))} for i in range(20)]
    builders.write_parquet(tmp_path / "b.parquet", rows)
    (tmp_path / "c.csv").write_text("q,reply\n" + "".join(f"c{i},answer\n" for i in range(20)))
    return tuple(str(tmp_path / name) for name in ("a.json", "b.parquet", "c.csv"))


def section(files: tuple[str, str, str], *weights: float, **keys) -> DataSection:
    named = [{"path": file, "weight": weight} for file, weight in zip(files, weights, strict=True)]
    named[2]["columns"] = {"prompt": "q", "response": "reply"}
    return DataSection.model_validate({"train_file": named, **keys})


def questions(data: DataSection, part: str = "train") -> list[str]:
    """The first messages of a part, in order."""
    data_format = columns.detect(data, Path("/"))
    counts = sources.count_rows(data, data_format, FileFacts())
    found = []
    for source in sources.of_part(data, data_format, counts, part):
        for sample in source.read(BadRows()):
            assert isinstance(sample, Conversation)
            found.append(sample.messages[0]["content"])
    assert part != "train" or len(found) == sum(
        trained.rows for trained in sources.trained_rows(data, counts)
    )
    return found


def test_each_source_is_read_in_its_own_format(files):
    data = section(files, 1, 1, 1)
    assert questions(data) == [f"{name}{i}" for name in "abc" for i in range(20)]
    data_format = columns.detect(data, Path("/"))
    assert [of.kind for of in data_format.of_sources] == [
        *("prompt_response", "messages", "prompt_response")
    ]
    assert [of.file_type for of in data_format.of_sources] == ["json", "parquet", "csv"]


def test_a_weight_is_the_number_of_times_that_each_row_is_trained(files):
    times = Counter(questions(section(files, 2.3, 0.25, 1)))
    assert sorted(Counter(times[f"a{i}"] for i in range(20)).items()) == [(2, 14), (3, 6)]
    assert sorted(Counter(times[f"b{i}"] for i in range(20)).items()) == [(0, 15), (1, 5)]
    assert {times[f"c{i}"] for i in range(20)} == {1}
    assert questions(section(files, 2.3, 0.25, 1)) == questions(section(files, 2.3, 0.25, 1))


def test_held_out_rows_of_all_sources_are_trained_by_no_weight(files):
    data = section(files, 3, 0.5, 1, validation_size=12)
    held_out = questions(data, "validation")
    assert Counter(question[0] for question in held_out) == {"a": 4, "b": 4, "c": 4}
    trained = questions(data)
    assert not set(held_out) & set(trained)
    # 16 rows of each are left
    assert Counter(question[0] for question in trained) == {"a": 48, "b": 8, "c": 16}
    assert questions(section(files, 1, 1, 1, validation_size=12), "validation") == held_out


def test_files_weights_and_columns_decide_the_token_cache(files, tmp_path):
    def folder(*weights: float, swapped: bool = False) -> Path:
        data = section(files, *weights)
        if swapped:
            data = data.model_copy(update={"train_file": data.sources[::-1]})
        recipe = builders.recipe_of(data=data.model_dump())
        shape, data_format = builders.plan(recipe).shape, columns.detect(data, Path("/"))
        return token_cache.token_cache(tmp_path, recipe, shape, data_format).folder

    assert folder(1, 1, 1) == folder(1, 1, 1)
    assert (
        len({folder(1, 1, 1), folder(2, 1, 1), folder(1, 2, 1), folder(1, 1, 1, swapped=True)}) == 4
    )
    before = folder(1, 1, 1)
    Path(files[2]).write_text(Path(files[2]).read_text() + "c20,answer\n")
    assert folder(1, 1, 1) != before


def test_mistakes_in_a_source_name_its_file(files, tmp_path):
    with pytest.raises(DataError, match=r"b\.parquet: weight 0\.01 of 20 rows is no row; raise"):
        questions(section(files, 1, 0.01, 1))
    (tmp_path / "b.parquet").write_text("")
    with pytest.raises(DataError, match=r"b\.parquet: 0 rows"):
        questions(section(files, 1, 1, 1))
    data = DataSection.model_validate({"train_file": [files[0], str(tmp_path / "a*")]})
    with pytest.raises(DataError, match=r"a\.json: is in two sources of data\.train_file"):
        questions(data)


def refusal(*of_sources, **keys) -> str:
    data = DataSection.model_validate({"train_file": list(of_sources), **keys})
    with pytest.raises((ConfigError, DataError)) as refused:
        columns.detect(data, Path("/"))
    return str(refused.value)


def test_columns_of_a_source_are_named_beside_its_path(files):
    c = {"path": files[2]}
    message = refusal(files[0], c)
    assert (
        "columns q, reply; write columns: {prompt: q, response: reply} beside its path" in message
    )
    advice = yaml.safe_load(re.findall(r"columns: ({.*?})", message)[0])
    found = columns.detect(
        DataSection.model_validate({"train_file": [files[0], c | {"columns": advice}]}), Path("/")
    )
    assert found.of_sources[1].columns == {"prompt": "q", "response": "reply"}
    message = refusal(files[0], c | {"columns": {"prompt": "que", "response": "reply"}})
    assert "no column 'que' (columns.prompt of this source); found columns q, reply" in message
    message = refusal(c, prompt_column="instruction", response_column="output")
    assert "'instruction' (data.prompt_column)" in message
    assert message.endswith(
        "write columns: {prompt: q, response: reply} beside its path in data.train_file"
    )
    message = refusal(c | {"columns": {"text": "q"}}, ignore_columns=["q"])
    assert message.startswith("columns.text of this source and data.ignore_columns both name 'q'")


def test_pairs_in_a_source_are_answered_with_its_columns(files, tmp_path):
    (tmp_path / "p.jsonl").write_text('{"prompt": "a", "chosen": "b", "rejected": "c"}\n')
    assert refusal(files[0], str(tmp_path / "p.jsonl")).endswith(
        "as the answers, write columns: {prompt: prompt, response: chosen} beside its path in"
        " data.train_file, and add --data.ignore_columns=[rejected]"
    )


def test_a_held_out_file_beside_a_list_has_a_format_of_its_own_that_is_known(files):
    assert "give it the columns of data.train_file: instruction, input, output" in refusal(
        *files[:2], validation_file=files[2]
    )


def test_bad_rows_are_counted_over_all_files_of_a_part(tmp_path):
    good, bad = '{"prompt": "a", "response": "b"}\n', '{"prompt": "a", "response": 1}\n'
    for name in ("a", "b", "held_out"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "1.jsonl").write_text(good * 3 + bad)
    folders = [str(tmp_path / name) for name in ("a", "b")]

    def detect(train_file: object, limit: int):
        keys = {"train_file": train_file, "max_bad_rows": limit}
        held_out = str(tmp_path / "held_out")
        data = DataSection.model_validate({**keys, "validation_file": held_out})
        return columns.detect(data, Path("/"))

    for train_file in (folders, f"{tmp_path}/[ab]/1.jsonl"):
        with pytest.raises(DataError, match=r"b/1\.jsonl:4: .* bad row 2, .*max_bad_rows allows 1"):
            detect(train_file, 1)
        detect(train_file, 2)


@pytest.mark.parametrize(
    ("typed", "message"),
    [
        (
            "[{path: a, wieght: 2}]",
            "data.train_file.0.wieght: found an unknown key, expected one of"
            " path, weight, columns; did you mean weight?",
        ),
        ("[a, {path: b, weight: 0}]", "data.train_file.1.weight: found 0, expected more than 0"),
        ("[{path: a, weight: true}]", "data.train_file.0.weight: found true, expected a number"),
        ("[{path: a, columns: {prompt: x}}]", "data.train_file.0.columns: found prompt, expected"),
        ("[]", "train_file is an empty list"),
        (
            "[{weight: 2}]",
            '--data.train_file=[{weight: 2}]: data.train_file.0: found {"weight": 2}, expected a'
            " path in it; write {path: VALUE, ...}",
        ),
        ("[{path: ''}]", "data.train_file.0.path: found '', expected text that is not empty"),
        ("[a, '']", "data.train_file.1.path: found '', expected text that is not empty"),
        ("[{path: [a]}]", 'data.train_file.0.path: found ["a"], expected text\n'),
        ("[[a]]", 'data.train_file.0: found ["a"], expected a path, or {path: FILE}\n'),
        ("{path: a}", "found a mapping, expected a single value or a [list]; write [{path: a}]\n"),
        ("[a, a]", "/a twice; write it once, with a weight"),
    ],
)
def test_a_wrong_list_is_refused(typed, message):
    with pytest.raises(ConfigError) as refused:
        load.load("sft_fast", [absolute_override(f"--data.train_file={typed}")])
    assert message in f"{refused.value}\n"


@pytest.mark.parametrize(
    ("paths", "names"),
    [
        (["/x/a.jsonl", "/x/b.jsonl"], ["a.jsonl", "b.jsonl"]),
        (["/x/1/a.jsonl", "/y/1/a.jsonl", "/b"], ["x/1/a.jsonl", "y/1/a.jsonl", "b"]),
        (["/x/a", "/y/x/a"], ["/x/a", "y/x/a"]),
        (["a"], ["a"]),
    ],
)
def test_sources_of_one_file_name_are_told_apart(paths, names):
    data = DataSection.model_validate({"train_file": paths})
    assert list(data.source_names) == names


def test_notes_of_sources_of_one_file_name_are_told_apart(tmp_path):
    for name in ("x", "y"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "a.jsonl").write_text(json.dumps({"text": "a", name: "other"}) + "\n")
    data = {"train_file": [str(tmp_path / name / "a.jsonl") for name in ("x", "y")]}
    found = columns.detect(DataSection.model_validate(data), Path("/"))
    assert found.notes == tuple(f"{n}/a.jsonl: columns that are not read: {n}" for n in "xy")
    assert [source.reason[:18] for source in found.of_sources] == [
        "text: x/a.jsonl ha",
        "text: y/a.jsonl ha",
    ]


def test_a_wrong_list_in_a_recipe_is_named_by_its_line(tmp_path):
    recipe = tmp_path / "a.yaml"
    files = "  validation_file: [a, b]\n  train_file: {path: a}\n"
    recipe.write_text(
        f"name: a\ntask: sft\nmodel: {{shape: llama-tiny}}\ndata:\n{files}output_dir: out\n"
    )
    with pytest.raises(ConfigError) as refused:
        load.load(str(recipe))
    assert sorted(str(refused.value).splitlines()) == [
        f'{recipe}:5: data.validation_file: found ["a", "b"], expected text',
        f'{recipe}:6: data.train_file: found {{"path": "a"}}, expected a path, or a list:'
        " [{path: FILE}, ...]",
    ]
    with pytest.raises(ConfigError, match=re.escape('found ["a", "b"], expected text')):
        load.load("sft_fast", [absolute_override("--data.validation_file=[a, b]")])


@pytest.mark.parametrize(
    ("overrides", "reason"),
    [
        (["--data.max_train_samples=5"], "it takes the first rows, which are of the first source"),
        (
            [
                *("--task=pretrain", "--data.streaming=true", "--data.packing=true"),
                "--training.max_steps=9",
            ],
            "a stream takes the shards of one source",
        ),
    ],
)
def test_what_would_read_one_source_only_is_refused(overrides, reason):
    with pytest.raises(ConfigError, match=reason):
        load.load("sft_fast", ["--data.train_file=[a, b]", *overrides])


def test_paths_of_a_list_are_made_absolute_and_written_back(tmp_path):
    typed = "--data.train_file=[{path: a.jsonl, weight: 2}, b.parquet]"
    recipe, _ = load.load("sft_fast", [typed])
    recipe = with_absolute_paths(recipe, tmp_path)
    assert [(source.path, source.weight) for source in recipe.data.sources] == [
        (str(tmp_path / "a.jsonl"), 2.0),
        (str(tmp_path / "b.parquet"), 1.0),
    ]
    (tmp_path / "again.yaml").write_text(load.dump(recipe))
    assert load.load(str(tmp_path / "again.yaml"))[0] == recipe


def test_files_that_are_trained_and_held_out_are_named(tmp_path):
    for name in ("a", "b"):
        (tmp_path / f"{name}.jsonl").write_text('{"text": "x"}\n')
    first, second = str(tmp_path / "a.jsonl"), str(tmp_path / "b.jsonl")
    both = DataSection(train_file=[{"path": first}, {"path": second}], validation_file=second)
    (line,) = sources.trained_and_held_out(both)
    assert line.startswith(f"{second} is in data.train_file and in data.validation_file: ")
    apart = DataSection(train_file=first, validation_file=second)
    assert not list(sources.trained_and_held_out(apart))
