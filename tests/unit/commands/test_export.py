"""Exports for other programs: what is refused before anything is written, how answers are judged,
and the texts beside a file."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from launch.base.errors import ConfigError, ResourceError
from launch.base.text import WHOLE
from launch.commands import recipe_arguments
from launch.commands.model import converted, export, finished
from launch.schema.result import ConvertedAnswers, ExpectedAnswers, ExportedModel, Prompt

LLAMA = {
    "model_type": "llama",
    "hidden_size": 8,
    "vocab_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "intermediate_size": 8,
}
REPLY = (4, 5, 6, 1)
EXPECTED = ExpectedAnswers(
    prompts=(
        Prompt(({"role": "user", "content": "a"},), None, "a", (2, 3), REPLY, (3, 2, 0.05, 4)),
    )
    * 20,
    texts=(("a", (2,)),),
    chat_template="{{ messages }}",
    bos_id=None,
    eos_id=1,
    ends=(1,),
    end_texts=("<|end|>",),
    origin="held-out rows",
)
SAME = ConvertedAnswers(rule="gpt-2", prompts=((2, 3),) * 20, answers=(REPLY,) * 20)


def folder_of(path: Path, **config: Any) -> Path:
    path.mkdir()
    (path / "config.json").write_text(json.dumps({**LLAMA, **config}))
    save_file({"lm_head.weight": torch.zeros(8, 8)}, path / "model.safetensors")
    return path


def conversion(model: Path, **values: Any) -> export.Conversion:
    start = export.Conversion(
        model=model,
        run=None,
        out=model.with_name("out"),
        file_type="f16",
        prompts=None,
        quantizer=None,
        to="gguf",
    )
    return replace(start, **values)


def exported(*argv: str) -> int:
    parser = recipe_arguments.Parser()
    recipe_arguments.add_flags(parser, export.FLAGS)
    return export.main(parser.parse_args(argv))


@pytest.fixture
def tools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that says that the tools are installed."""
    folder = tmp_path / "tools"
    folder.mkdir()
    (folder / ".requirements").touch()
    monkeypatch.setattr(export, "TOOLS", folder)
    return folder


def test_without_the_converter_the_line_that_installs_it_is_named(tmp_path, tools):
    (tools / ".requirements").unlink()
    with pytest.raises(ResourceError, match="make export-tools"):
        export.check(conversion(folder_of(tmp_path / "m")))


def test_an_encoder_decoder_is_refused_by_name(tmp_path, tools):
    model = folder_of(tmp_path / "m", model_type="t5", is_encoder_decoder=True)
    with pytest.raises(ConfigError, match=r"encoder-decoder \(t5\)"):
        export.check(conversion(model))


def test_a_folder_that_holds_something_is_refused(tmp_path, tools):
    model = folder_of(tmp_path / "m")
    export.check(conversion(model))
    with pytest.raises(ConfigError, match="new or empty folder"):
        export.check(conversion(model, out=model))


@pytest.mark.parametrize(("ram", "disk", "name"), [(1 << 60, 0, "RAM"), (0, 1 << 60, "room in")])
def test_weights_for_which_there_is_no_space_are_refused(tmp_path, ram, disk, name):
    with pytest.raises(ResourceError, match=f"but there is .* {name}"):
        finished.check_sizes(tmp_path, tmp_path / "out", ram, disk)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--to", "gguf", "--type", "q3"), "invalid choice: 'q3'"),
        (("--to", "gguff"), r"; did you mean gguf\?"),
        (("--to", "folder", "--out", "a", "--push", "me/a"), "--out a: --to folder uploads "),
        (("--to", "merged", "--type", "f16"), "leave it out beside --to merged"),
        (("--to", "packed", "--prompts", "a.txt"), "--prompts a.txt: is of a GGUF file"),
        (("--to", "packed", "--push", "me/a"), "push the adapter: --to folder"),
        (
            ("--to", "gguf", "--type", "q4_k_m", "--llama-quantize", "/none"),
            "--llama-quantize PROG",
        ),
        (
            (
                "--to",
                "merged",
            ),
            "found no adapter_config.json",
        ),
    ],
)
def test_flags_that_do_not_fit_are_refused(tmp_path, flags, message):
    with pytest.raises((ConfigError, ResourceError), match=message):
        exported(str(folder_of(tmp_path / "m")), *flags)


def changed(answers: ConvertedAnswers, number: int, token: int) -> ConvertedAnswers:
    """The answers with one token that differs."""
    replies = [list(reply) for reply in answers.answers]
    replies[number][token] += 1
    return replace(answers, answers=tuple(map(tuple, replies)))


def test_equal_answers_are_the_model():
    assert list(converted.problems(EXPECTED, SAME, "f16")) == []
    assert converted.summary(EXPECTED, SAME) == (
        "20 prompts (held-out rows): 20 answers equal, 80 of 80 tokens; splitting rule gpt-2"
    )


def test_a_token_may_differ_where_the_two_best_logits_are_near():
    near = changed(SAME, 0, 2)
    assert list(converted.problems(EXPECTED, near, "f16")) == []
    assert "19 answers equal, 79 of 80 tokens (their best logits at most 0.05 apart)" in (
        converted.summary(EXPECTED, near)
    )


def test_a_token_that_differs_where_they_are_far_apart_is_another_model():
    (line,) = converted.problems(EXPECTED, changed(SAME, 7, 1), "q8_0")
    assert line.startswith("answer 8 differs at token 2, where the two best logits are 2.00 apart")


def test_more_than_one_token_of_twenty_that_differs_is_another_model():
    answers = SAME
    for number in range(4):
        answers = changed(answers, number, 2)
    assert list(converted.problems(EXPECTED, answers, "f16")) == []
    (line,) = converted.problems(EXPECTED, changed(answers, 4, 2), "f16")
    assert line == "5 of 80 tokens differ, expected at most 5%"


def test_prompts_with_other_ids_are_another_model():
    other = replace(SAME, prompts=(*SAME.prompts[1:], (2, 2, 3)))
    (line,) = converted.problems(EXPECTED, other, "f16")
    assert line == "prompt 20 has the ids [2, 2, 3], expected [2, 3]"


@pytest.mark.parametrize(("width", "num_lines"), [(WHOLE, 1), (100, 12)])
def test_a_text_that_is_split_otherwise_is_shown_whole(width, num_lines):
    ids = [*range(100, 200)]
    answers = replace(SAME, other_ids=f"'a text' becomes {ids} instead of {ids[1:]}")
    lines = converted.split_otherwise(answers, width).splitlines()
    assert max(map(len, lines)) <= width and len(lines) == num_lines
    words = "llama.cpp splits some texts otherwise: " + answers.other_ids
    assert " ".join(line.strip() for line in lines) == words


def test_the_modelfile_stops_at_the_trained_end_tokens():
    expected = replace(EXPECTED, end_texts=("<|end|>", 'a "b"'))
    stops = 'PARAMETER stop "<|end|>"\nPARAMETER stop "a \\"b\\""\n'
    assert converted.modelfile("m.gguf", expected, {"max_position_embeddings": 512}) == (
        f"FROM ./m.gguf\nPARAMETER num_ctx 512\n{stops}"
    )
    assert "num_ctx 4096" in converted.modelfile("m", expected, {"max_position_embeddings": 99999})


def test_the_readme_names_base_licence_data_figures_and_how_to_ask(tmp_path):
    base, model = tmp_path / "base", tmp_path / "model"
    base.mkdir()
    model.mkdir()
    (base / "README.md").write_text(
        "---\ntags: [a]\nlicense: apache-2.0\n---\n- a line of theirs\n"
    )
    (model / "README.md").write_text("---\n---\n# model\n- data: rows.parquet\n")
    facts = json.dumps({"run": "a-20260101-000000"})
    (model / "lowmem.json").write_text(facts)
    text = converted.readme(
        "model-f16", model, str(base), "20 answers equal", "llama-cli -m m.gguf"
    )
    assert text == (
        "---\nlicense: apache-2.0\n---\n# model-f16\n\n"
        f"- base: {base}\n- licence: apache-2.0\n- data: rows.parquet\n"
        "- compared: 20 answers equal\n\nAsk it:\n\n```\nllama-cli -m m.gguf\n```\n"
    )
    unnamed = converted.readme("base", tmp_path, "", "", "")
    assert "base: none, trained from random weights\n- licence: not named\n" in unnamed


def test_the_readme_of_a_merged_model_gives_its_facts_on_and_not_those_of_its_folder(tmp_path):
    adapter, merged = tmp_path / "adapter", tmp_path / "merged"
    for folder in (adapter, merged):
        folder.mkdir()
        (folder / "lowmem.json").write_text(json.dumps({"run": "a-20260101-000000"}))
    facts = "- recipe: lora (sft)\n- model: /m, 8 parameters; this folder holds a LoRA adapter\n"
    facts += "- trained on linear weights of 4 bits (nf4); to merge it into /m: python -m\n"
    (adapter / "README.md").write_text(facts)
    finished.write_readme(adapter, tmp_path, merged, merged)
    text = converted.readme("x", merged, "/models/b", "20 answers equal", "ask")
    assert text == (
        "# x\n\n- base: /models/b\n- licence: not named by the base\n- recipe: lora (sft)\n"
        "- model: /m, 8 parameters\n- trained on linear weights of 4 bits (nf4)\n"
        "- compared: 20 answers equal\n\nAsk it:\n\n```\nask\n```\n"
    )


@pytest.mark.parametrize("text", [None, "\n \n"])
def test_a_file_without_questions_is_refused_before_anything_is_loaded(tmp_path, tools, text):
    model, file = folder_of(tmp_path / "m"), tmp_path / "typed.txt"
    if text is not None:
        file.write_text(text)
    with pytest.raises(ResourceError, match=r"typed.txt: (cannot be read|is empty)"):
        export.check(conversion(model, prompts=file))


def test_the_folder_of_another_type_has_it_in_its_name(tmp_path, tools, capsys):
    model = folder_of(tmp_path / "m")
    (tmp_path / "m-gguf-q8_0").mkdir()
    (tmp_path / "m-gguf-q8_0" / "x").touch()
    with pytest.raises(ConfigError, match="m-gguf-q8_0: found something there"):
        exported(str(model), "--to", "gguf", "--type", "q8_0")


def test_the_line_of_a_childs_error_is_shown_without_warnings_and_bars(capfd):
    said = "print('a warning', file=sys.stderr); print('error: why', file=sys.stderr); sys.exit(3)"
    with pytest.raises(SystemExit, match="3"):
        finished.run_child(sys.executable, "-c", f"import sys; {said}")
    assert capfd.readouterr().err == "error: why\n"
    with pytest.raises(SystemExit, match="1"):
        finished.run_child(sys.executable, "-c", "raise ValueError('a fault of ours')")
    assert "Traceback" in capfd.readouterr().err


def test_the_base_of_a_model_is_that_which_its_training_began_with(tmp_path):
    model = folder_of(tmp_path / "m")
    assert conversion(model).base() == str(model)
    facts = ExportedModel("merge of x", base="/models/b")
    (model / "lowmem.json").write_text(json.dumps({"run": facts.run, "base": facts.base}))
    assert conversion(model).base() == "/models/b"


def test_the_base_of_an_adapter_is_the_folder_that_it_was_trained_on(tmp_path):
    base, adapter = folder_of(tmp_path / "b"), tmp_path / "a"
    (base / "lowmem.json").write_text(json.dumps({"run": "b-20260101-000000"}))
    adapter.mkdir()
    named = json.dumps({"base_model_name_or_path": str(base)})
    (adapter / finished.ADAPTER).write_text(named)
    assert conversion(adapter, run=tmp_path / "run").base() == str(base)


def test_a_model_without_a_base_has_no_licence_of_the_folder_around(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("README.md").write_text("---\nlicense: gpl-3.0\n---\n")
    assert "licence: not named\n" in converted.readme("m", tmp_path / "m", "", "", "")


def test_4_bits_take_a_program_of_llama_cpp_or_llama_cpp_python(tmp_path, tools, monkeypatch):
    flags = ("--to", "gguf", "--type", "q4_k_m")
    model = str(folder_of(tmp_path / "m", is_encoder_decoder=True, model_type="t5"))
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError, match=r"found no llama-quantize.*pip install llama-cpp-python"):
        exported(model, *flags)
    (tools / "lib/python3.11/site-packages/llama_cpp").mkdir(parents=True)
    with pytest.raises(ConfigError, match="is an encoder-decoder"):  # it is looked at next
        exported(model, *flags)


@pytest.mark.parametrize(
    ("source", "advice"),
    [
        ("Qwen/Tiny", "python -m launch download Qwen/Tiny, and give the folder that it prints"),
        ("model-f16.gguf", "give the folder of the model that it was made from"),
    ],
)
def test_a_name_on_a_hub_and_a_gguf_file_are_no_folders_and_say_what_to_type(source, advice):
    with pytest.raises(ResourceError, match=advice):
        exported(source, "--to", "gguf")
    with pytest.raises(ResourceError, match=advice):
        finished.find(Path(source))


def test_a_folder_that_is_not_there_is_named_without_keys_of_a_recipe(tmp_path, tools):
    with pytest.raises(ResourceError, match=r"nope: there is no such folder; give the folder of"):
        export.check(conversion(tmp_path / "nope"))
