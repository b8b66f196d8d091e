"""Rows become token ids: the loss on the response alone, the end token learned, cut by tokens."""

from __future__ import annotations

import copy
import json
import re
from dataclasses import asdict
from pathlib import Path

import jinja2
import pytest
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from launch.base.errors import ConfigError, DataError, ResourceError
from launch.data import chat_templates, sources
from launch.data import rows as data_rows
from launch.data.conversation import Conversation
from launch.data.rows import read_samples
from launch.data.token_cache import TokenCache
from launch.schema.model_sections import TokenizerSection
from launch.schema.plan import DataFormat, ModelSize
from tests import builders
from training.data import batches, encode, prepare, row_summary, tokenizer

TEXTS = ["two 二 three 三", "the end of a sentence", "日期 2024-03-05"]


@pytest.fixture(scope="module")
def cut():
    return tokenizer.train(iter(TEXTS * 5), TokenizerSection(split="character"), 600)


def encoder(cut, **fields) -> encode.Encoder:
    settings = {"encoder_decoder": False, "task": "sft", "max_length": 64, **fields}
    return encode.Encoder(cut, encode.EncoderSettings(**settings))


def turns(*contents: str) -> Conversation:
    return Conversation(
        [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(contents)]
    )


@pytest.mark.parametrize("split", ["word", "character"])
def test_a_trained_tokenizer_keeps_every_character(split):
    made = tokenizer.train(iter(TEXTS), TokenizerSection(split=split), 400)
    text = "a\tb\r\n 𝄞 ﷽ e\u0301 \u200d 训练 ~ " + "".join(map(chr, range(0x4E00, 0x4E20)))
    assert made.decode(made(text, add_special_tokens=False)["input_ids"]) == text


def test_a_tokenizer_with_more_ids_than_the_model_has_rows_is_refused_before_a_row_is_read(
    cut, tmp_path
):
    cut.save_pretrained(tmp_path)
    recipe = builders.recipe_of(model={"shape": None, "path": str(tmp_path)})
    size = ModelSize("small", {"vocab_size": len(cut) - 1}, 0, 0)
    tokens = TokenCache(recipe, size, builders.DATA_FORMAT, {}, tmp_path / "tokens")
    numbers = rf"ids up to {len(cut) - 1} \(.*, the embeddings of the model {len(cut) - 1} rows"
    with pytest.raises(ConfigError, match=rf"{numbers}; .*resize_token_embeddings\({len(cut)}\)"):
        prepare.tokenizer_of(tokens, print)


def test_few_tokens_with_a_large_id_do_not_fit_either():
    vocabulary = models.WordLevel({"<unk>": 0, "far": 500}, unk_token="<unk>")
    few = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(vocabulary))
    tokenizer.check_ids(few, 501, "folder")
    with pytest.raises(ConfigError, match=r"^folder: .* ids up to 500 \('far'\)"):
        tokenizer.check_ids(few, 500, "folder")


def test_character_tokens_never_join_two_characters(cut):
    assert len(cut("end二三", add_special_tokens=False)["input_ids"]) == 5


def test_only_the_answer_and_the_end_token_are_targets(cut):
    ((row,),) = encoder(cut).encode([turns("two", "二")])
    assert cut.decode(row["input_ids"]) == "<|user|>two<|assistant|>二<|end|>"
    assert (
        cut.decode([label for label in row["labels"] if label != data_rows.IGNORED]) == "二<|end|>"
    )


def test_each_answer_of_a_conversation_is_a_target_and_no_question_is(cut):
    ((row,),) = encoder(cut).encode([turns("two", "二", "three", "三")])
    assert (
        cut.decode([label for label in row["labels"] if label != data_rows.IGNORED])
        == "二<|end|>三<|end|>"
    )
    assert len(row["labels"]) == len(row["input_ids"])


def test_an_answer_that_is_cut_does_not_learn_to_stop_there(cut):
    ((row,),) = encoder(cut, max_length=8).encode([turns("two", "the end of a sentence")])
    assert len(row["input_ids"]) == 8
    assert cut.eos_token_id not in row["labels"]


def test_a_prompt_that_fills_the_length_and_an_empty_answer_leave_no_row(cut):
    assert encoder(cut, max_length=8).encode([turns("two three two", "二")]) == [[]]
    assert encoder(cut).encode([turns("two", "")]) == [[]]


def test_t5_reads_the_prompt_and_answers_with_the_end_token(cut):
    ((row,),) = encoder(cut, encoder_decoder=True).encode([turns("two", "二")])
    assert cut.decode(row["input_ids"]) == "two<|end|>"
    assert cut.decode(row["labels"]) == "二<|end|>"


def test_t5_reads_the_system_prompt_and_the_history_as_turns(tmp_path, cut):
    row = {"q": "three", "a": "三", "system": "end", "history": [["two", "二"]]}
    (sample,) = read_samples(write(tmp_path, [json.dumps(row)]), FORMAT)
    ((tokens,),) = encoder(cut, encoder_decoder=True).encode([sample])
    assert cut.decode(tokens["input_ids"]) == "end\ntwo\n二\nthree<|end|>"
    assert cut.decode(tokens["labels"]) == "三<|end|>"


def test_t5_refuses_an_answer_to_nothing_and_counts_messages_behind_the_last_answer(tmp_path, cut):
    paired = encoder(cut, encoder_decoder=True)
    answer = {"role": "assistant", "content": "二"}
    with pytest.raises(DataError, match="the first message is the only answer, but a T5 reads"):
        paired.encode([Conversation([answer])])
    talks = [turns("two", "二"), turns("two", "二", "behind")]
    counts = encode.write_cache(
        iter(talks), paired, tmp_path / "a.arrow", None, lambda _: None, None
    )
    assert (counts.rows, counts.unread) == (2, 1)
    line = prepare.summary("train", asdict(counts), 64)
    assert "1 conversations without their messages behind the last answer" in line
    mean, answer = counts.tokens / 2, counts.target_tokens / 2
    assert f"{mean:.0f} tokens on average and {answer:.0f} of an answer, longest" in line


@pytest.mark.parametrize(
    ("max_length", "lengths"), [(10, [10, 10, 2]), (22, [22]), (21, [21]), (7, [7, 7, 7])]
)
def test_pretraining_learns_every_token_of_a_text_in_pieces(cut, max_length, lengths):
    """A piece of a single token has no target."""
    made = encoder(cut, task="pretrain", max_length=max_length)
    (rows,) = made.encode(["the end of a sentence"])
    assert [len(row["input_ids"]) for row in rows] == lengths
    has_end = sum(lengths) == 22
    assert (rows[-1]["input_ids"][-1] == cut.eos_token_id) == has_end
    assert all(
        row["labels"][0] == data_rows.IGNORED and row["labels"][1:] == row["input_ids"][1:]
        for row in rows
    )


def test_a_text_that_ends_with_the_end_token_gets_no_second_one(cut):
    for text in ("two", "two<|end|>"):
        ((row,),) = encoder(cut, task="pretrain").encode([text])
        assert cut.decode(row["input_ids"]) == "two<|end|>"


def test_a_row_whose_only_target_is_its_end_token_is_left_out(cut):
    talk = turns("two", "二")
    for max_length, count in ((2, 0), (3, 1)):
        options = {"max_length": max_length, "truncation_side": "left"}
        (rows,) = encoder(cut, **options).encode([talk])
        assert len(rows) == count


def test_few_long_texts_are_tokenised_at_once(cut, tmp_path, monkeypatch):
    monkeypatch.setattr(encode, "BATCH_CHARACTERS", 100)
    batches: list[int] = []
    texts = ["two " * 15] * 5 + ["three"] * 3 + ["two " * 50]
    made = encoder(cut, task="pretrain")
    encode.write_cache(iter(texts), made, tmp_path / "a.arrow", None, batches.append, None)
    assert batches == [2, 2, 5]


def test_a_folder_without_an_end_token_is_refused(tmp_path, cut):
    cut.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    config["eos_token"] = None
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    with pytest.raises(ResourceError, match="no eos_token"):
        tokenizer.load(tmp_path)


@pytest.fixture
def without_template(tmp_path, cut):
    """The tokenizer that training loads of a base model's folder, which brings no chat_template."""
    cut.save_pretrained(tmp_path)
    (tmp_path / "chat_template.jinja").unlink()
    return tokenizer.load(tmp_path)


def test_a_folder_without_a_chat_template_is_trained_with_one_line_a_turn(without_template):
    talk = turns("two", "二", "three", "三").messages
    conversation = Conversation([{"role": "system", "content": "end"}, *talk])
    ((row,),) = encoder(without_template).encode([conversation])
    assert without_template.decode(row["input_ids"]) == "end\ntwo\n二<|end|>\nthree\n三<|end|>"
    targets = [label for label in row["labels"] if label != data_rows.IGNORED]
    assert without_template.decode(targets) == "二<|end|>三<|end|>"


def test_the_prompt_of_an_answer_is_the_beginning_of_what_was_trained(without_template):
    conversation = turns("two", "二", "three", "三")
    talk = conversation.messages
    ((row,),) = encoder(without_template).encode([conversation])
    for i in (1, 3):
        prompt = without_template.apply_chat_template(
            talk[:i], tokenize=False, add_generation_prompt=True
        )
        assert prompt.endswith("\n")
        assert without_template.decode(row["input_ids"]).startswith(
            prompt + talk[i]["content"] + "<|end|>"
        )


@pytest.mark.parametrize("trim_blocks", [False, True])
@pytest.mark.parametrize("lstrip_blocks", [False, True])
def test_the_plain_template_renders_alike_whatever_a_program_trims(trim_blocks, lstrip_blocks):
    template = jinja2.Environment(trim_blocks=trim_blocks, lstrip_blocks=lstrip_blocks).from_string(
        tokenizer.PLAIN_TEMPLATE
    )
    said = template.render(
        messages=turns("a", "b", "c").messages, eos_token="</s>", add_generation_prompt=True
    )
    assert said == "a\nb</s>\nc\n"


def test_a_folder_without_a_tokenizer_is_refused(tmp_path):
    with pytest.raises(ResourceError, match="no tokenizer can be loaded"):
        tokenizer.load(tmp_path)


def write(folder: Path, rows: list[str]) -> Path:
    path = folder / "rows.jsonl"
    path.write_text("\n".join(rows) + "\n", encoding="utf-8")
    return path


FORMAT = DataFormat("prompt_response", {"prompt": "q", "response": "a"}, "jsonl", "")


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        ('{"q": "x", "a": ', "rows.jsonl:2: is not JSON"),
        ('{"q": "x"}', "rows.jsonl:2: column 'a': found no such key"),
        ('{"q": "x", "a": null}', "rows.jsonl:2: column 'a': found null"),
        ('{"q": "x", "a": 7}', "rows.jsonl:2: column 'a': found int"),
        ("[1]", "rows.jsonl:2: holds a list"),
    ],
)
def test_a_bad_row_is_named_by_file_and_line(tmp_path, bad, words):
    path = write(tmp_path, ['{"q": "x", "a": "y"}', bad])
    with pytest.raises(DataError, match=words):
        list(read_samples(path, FORMAT))


def test_bytes_that_are_no_utf8_are_named_by_file_and_line(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"q": "x", "a": "y"}\n{"q": "caf\xe9", "a": "y"}\n')
    with pytest.raises(DataError, match=r"rows.jsonl:2:10: this byte is not UTF-8"):
        list(read_samples(path, FORMAT))


def test_sharegpt_names_and_oasst_pairs_become_messages(tmp_path):
    talk = '{"conversations": [{"from": "human", "value": "two"}, {"from": "gpt", "value": "二"}]}'
    path = write(tmp_path, [talk])
    shape = DataFormat("messages", {"messages": "conversations"}, "jsonl", "")
    assert list(read_samples(path, shape)) == [turns("two", "二")]
    rows = [("prompter", "two"), ("assistant", "二"), ("assistant", "again"), ("prompter", "three")]
    path = write(tmp_path, [json.dumps({"role": role, "text": text}) for role, text in rows])
    shape = DataFormat("oasst", {"text": "text", "role": "role"}, "jsonl", "")
    assert list(read_samples(path, shape)) == [turns("two", "二")]


def test_the_cache_is_mapped_row_by_row_as_it_was_written(tmp_path, cut):
    path = tmp_path / "train.arrow"
    source = (turns(f"{i} two", "二" * (i % 5 + 1)) for i in range(2500))
    counts = encode.write_cache(source, encoder(cut), path, 2300, lambda rows: None, None)
    assert (counts.samples, counts.rows, counts.dropped) == (2300, 2300, 0)
    rows = batches.TokenRows(path)
    assert len(rows) == 2300
    for index in (0, 999, 1000, 2299):
        ids, labels, *_ = rows[index]
        assert (
            cut.decode(ids.tolist())
            == f"<|user|>{index} two<|assistant|>{'二' * (index % 5 + 1)}<|end|>"
        )
        assert len(ids) == len(labels)
    assert rows.__getitems__([]) == []


FORGED = "two<|end|><|assistant|>二"


@pytest.mark.parametrize(
    ("task", "is_pair", "sample"),
    [
        *(("sft", False, turns(FORGED, "二")), ("sft", False, turns("two", FORGED))),
        *(("pretrain", False, turns(FORGED, "二")), ("sft", True, turns(FORGED, FORGED))),
        *(("pretrain", False, FORGED), ("pretrain", True, FORGED + FORGED)),
    ],
)
def test_text_of_special_tokens_becomes_tokens_in_texts_or_where_asked(cut, task, is_pair, sample):
    """A row that is one text may be rendered already."""
    special = set(cut.convert_tokens_to_ids(["<|end|>", "<|assistant|>"]))

    def num_special(splits_special_tokens: bool | None) -> int:
        ((row,),) = encoder(
            cut,
            task=task,
            encoder_decoder=is_pair,
            split_special_tokens=splits_special_tokens,
        ).encode([sample])
        parts = row.values() if is_pair else [row["input_ids"]]
        return sum(token in special for ids in parts for token in ids)

    as_text, as_tokens = num_special(True), num_special(False)
    assert as_text < as_tokens
    assert num_special(None) == (as_tokens if isinstance(sample, str) else as_text)


def test_a_row_that_is_truncated_from_the_left_keeps_the_end_of_its_answer(cut):
    talk = turns("two three", "the end of a sentence")
    ((row,),) = encoder(cut).encode([talk])
    ((left,),) = encoder(cut, max_length=8, truncation_side="left").encode([talk])
    assert left["input_ids"] == row["input_ids"][-8:]
    assert left["labels"] == [data_rows.IGNORED, *row["labels"][-7:]]
    begins = len(row["labels"]) - sum(label != data_rows.IGNORED for label in row["labels"])
    assert encoder(cut, max_length=begins).encode([talk]) == [[]]  # no answer remains on the right


def test_a_row_that_is_truncated_from_the_left_keeps_bos(cut):
    with_bos = copy.deepcopy(cut)
    with_bos.bos_token = "<|user|>"  # what the template writes first
    talk = turns("two three", "the end of a sentence")
    ((row,),) = encoder(with_bos).encode([talk])
    ((left,),) = encoder(with_bos, max_length=8, truncation_side="left").encode([talk])
    assert left["input_ids"] == [row["input_ids"][0], *row["input_ids"][-7:]]
    assert left["labels"] == [data_rows.IGNORED] * 2 + row["labels"][-6:]


def test_the_input_of_a_t5_is_truncated_from_the_left_and_its_target_from_the_right(cut):
    talk = turns("two three end", "the end of a sentence")
    pair = {"encoder_decoder": True}
    ((row,),) = encoder(cut, **pair).encode([talk])
    ((left,),) = encoder(cut, max_length=8, truncation_side="left", **pair).encode([talk])
    assert left["input_ids"] == row["input_ids"][-8:]
    assert left["labels"] == row["labels"][:8]


@pytest.mark.parametrize("is_pair", [False, True])
@pytest.mark.parametrize("side", ["right", "left"])
def test_a_row_of_exactly_max_length_is_not_truncated(cut, is_pair, side):
    talk = turns("two three end", "the end of a sentence")
    ((row,),) = encoder(cut, encoder_decoder=is_pair).encode([talk])
    longest = max(map(len, row.values()))
    for max_length, is_cut in ((longest, False), (longest - 1, True)):
        options = {"encoder_decoder": is_pair, "max_length": max_length, "truncation_side": side}
        made = encoder(cut, **options)
        rows = made.encode([talk])
        counts = encode.CacheCounts()
        counts.add(rows[0])
        assert (counts.rows, counts.truncated) == (1, is_cut)


@pytest.mark.parametrize("is_pair", [False, True])
@pytest.mark.parametrize("side", ["right", "left"])
def test_a_row_has_its_end_token_where_it_fits(cut, is_pair, side):
    """An answer that is cut from the right does not learn to stop there."""
    talk = turns("two three end", "the end of a sentence")
    ((whole,),) = encoder(cut, encoder_decoder=is_pair).encode([talk])
    length = len(whole["labels"])
    for max_length in (length - 1, length, length + 1):
        options = {"encoder_decoder": is_pair, "max_length": max_length, "truncation_side": side}
        ((row,),) = encoder(cut, **options).encode([talk])
        is_cut_left = side == "left" and not is_pair
        part = slice(-max_length, None) if is_cut_left else slice(max_length)
        assert row["labels"][1:] == whole["labels"][part][1:]
        has_end = row["labels"][-1] == cut.eos_token_id
        assert has_end == (is_cut_left or max_length >= length)


def test_a_pretraining_text_in_several_pieces_loses_nothing_and_is_not_truncated(cut):
    counts = encode.CacheCounts()
    counts.add(*encoder(cut, task="pretrain", max_length=8).encode(["the end of a sentence " * 9]))
    assert counts.rows > 2
    assert counts.truncated == 0


def test_the_template_of_a_trained_tokenizer_writes_tools_calls_and_reasoning(cut):
    """Without them, a row is rendered as before."""
    call = {"type": "function", "function": {"name": "find", "arguments": {"word": "二"}}}
    talk = [
        {"role": "user", "content": "two"},
        {"role": "assistant", "content": None, "tool_calls": [call], "reasoning_content": "hm"},
        {"role": "tool", "content": "2"},
        {"role": "assistant", "content": "二"},
    ]
    ((row,),) = encoder(cut, max_length=1000).encode([Conversation(talk, [{"name": "find"}])])
    assert cut.decode(row["input_ids"]) == (
        '<|system|>[{"name": "find"}]<|user|>two<|assistant|><think>hm</think>'
        '<tool_call>{"name": "find", "arguments": {"word": "二"}}</tool_call><|end|>'
        "<|tool|>2<|assistant|>二<|end|>"
    )
    targets = cut.decode([label for label in row["labels"] if label != data_rows.IGNORED])
    assert targets.startswith("<think>hm</think><tool_call>") and targets.endswith("二<|end|>")


@pytest.mark.parametrize("template", ["{{ messages }}", None])
def test_the_plan_names_the_template_that_training_uses(tmp_path, cut, template):
    made = copy.deepcopy(cut)
    made.chat_template = template
    made.save_pretrained(tmp_path)
    recipe = builders.recipe_of(tokenizer={"path": str(tmp_path)})
    said = chat_templates.describe(recipe, False, False)
    is_plain = tokenizer.load(tmp_path).chat_template.endswith(tokenizer.PLAIN_TEMPLATE)
    assert said.startswith(f"{tmp_path} has none: a line" if is_plain else f"of {tmp_path}")
    assert is_plain == (template is None)


def test_the_rows_of_a_report_are_few_and_short(tmp_path, cut):
    cut.save_pretrained(tmp_path / "tokenizer")
    long = {"prompt": "two " * 10_000, "response": "three"}
    rows = [long | {"prompt": str(i)} if i % 2 else long for i in range(50)]
    path = write(tmp_path, [*map(json.dumps, rows), '{"prompt": 1}'])
    data = {"train_file": str(path), "max_length": 100_000, "max_bad_rows": 2}
    recipe = builders.recipe_of(task="pretrain", data=data)
    model = ModelSize("m", {"model_type": "gpt2", "vocab_size": 600}, 1, 1)
    columns = {"prompt": "prompt", "response": "response"}
    found = DataFormat("prompt_response", columns, "jsonl", "")
    cache = TokenCache(recipe, model, found, {}, tmp_path / "tokens")
    summary = row_summary.for_report(cache, cut)
    assert [row.place for row in summary.rows] == [f"{path.name}:{i}" for i in range(1, 6)]
    text = "".join(part.text for part in summary.rows[0].parts)
    assert len(text) < 2100 and "more characters)" in text
    assert summary.rows[0].num_tokens > 10_000
    assert (summary.num_read, summary.num_bad) == (50, 1)
    assert len(json.dumps(asdict(summary))) < 20_000


def test_a_report_shows_rows_of_each_source_whatever_their_bad_rows(tmp_path, cut):
    """max_bad_rows is for each part alone; a report counts the bad rows of both."""
    bad = '{"prompt": 1}'
    files = []
    for name in "abc":
        rows = [{"prompt": f"{name} {i}", "response": "two"} for i in range(30)]
        (tmp_path / name).mkdir()
        files.append(str(write(tmp_path / name, [bad, bad, *map(json.dumps, rows)])))
    data = {"train_file": [{"path": file} for file in files], "max_bad_rows": 3}
    model = ModelSize("m", {"model_type": "gpt2", "vocab_size": 600}, 1, 1)
    found = DataFormat("prompt_response", {"prompt": "prompt", "response": "response"}, "jsonl", "")
    counts = ((32,), (32,), (32,))
    recipe = builders.recipe_of(data=data)
    cache = TokenCache(recipe, model, found, {}, tmp_path / "x", row_counts=counts)
    summary = row_summary.for_report(cache, cut)
    texts = ["".join(part.text for part in row.parts) for row in summary.rows]
    expected = [f"{name} {i}" for name in "abc" for i in range(5)]
    assert [re.findall(r"[abc] \d", text)[0] for text in texts] == expected
    assert (summary.num_read, summary.num_files, summary.num_bad) == (90, 3, 6)


@pytest.mark.parametrize("limit", [2, 1])
def test_bad_rows_are_counted_in_the_part_that_takes_them(tmp_path, cut, limit):
    """Two of each part of validation_size, with a limit of 2 for each part alone."""
    held_out = sources.choose_held_out(0.5, 32, "rows.jsonl")
    bad = [*filter(held_out.holds, range(32))][:2]
    bad += [number for number in range(32) if not held_out.holds(number)][:2]
    rows = [json.dumps({"prompt": f"{i}", "response": "two"}) for i in range(32)]
    path = write(tmp_path, ['{"prompt": 1}' if i in bad else row for i, row in enumerate(rows)])
    data = {"train_file": str(path), "validation_size": 0.5, "max_bad_rows": limit}
    model = ModelSize("m", {"model_type": "gpt2", "vocab_size": 600}, 1, 1)
    found = DataFormat("prompt_response", {"prompt": "prompt", "response": "response"}, "jsonl", "")
    recipe = builders.recipe_of(data=data)
    cache = TokenCache(recipe, model, found, {}, tmp_path / "x", row_counts=((32,),))
    summary = row_summary.RowSummary(cache, cut)
    if limit == 1:
        with pytest.raises(DataError, match=r"bad row 2, data\.max_bad_rows allows 1"):
            summary.add_first(path, 100, 5)
    else:
        summary.add_first(path, 100, 5)
        assert summary.summary().num_bad == 4


@pytest.mark.parametrize("blank", ["", " \n"])
def test_a_blank_answer_of_a_t5_is_left_out(cut, blank):
    assert encoder(cut, encoder_decoder=True).encode([turns("two", blank)]) == [[]]
