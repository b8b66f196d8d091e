"""Chat templates that a recipe names: bundled ones, files, and the tags that a vocabulary lacks."""

from __future__ import annotations

import json
import re
import time

import pytest

from benchmarks import template_matrix
from launch.base.errors import ConfigError, DataError, ResourceError
from launch.data import chat_templates, columns, token_cache
from launch.data.conversation import Conversation
from launch.recipe.paths import with_absolute_paths
from launch.schema.data_section import DataSection
from launch.schema.model_sections import TokenizerSection
from launch.schema.recipe import Recipe
from tests import builders
from training.data import tokenizer
from training.data.chat.loss_spans import ConversationRenderer
from training.data.encode import Encoder, EncoderSettings

BROKEN = "{% for message in messages %}\n{{ message.content }\n{% endfor %}"


@pytest.mark.parametrize("kind", ["one turn", "two turns"])
@pytest.mark.parametrize("name", chat_templates.names())
def test_a_bundled_template_trains_what_it_renders_with_the_loss_on_the_answers(name, kind):
    result = template_matrix.cell(chat_templates.read(name), kind)
    assert result["method"] in ("prefixes", "characters", "marks")
    assert "wrong" not in result


def test_every_bundled_template_is_named_with_its_source_and_in_the_reference_of_the_keys():
    names = chat_templates.names()
    assert len(names) >= 12
    description = TokenizerSection.model_fields["chat_template"].description or ""
    listed = description.split("bundled template: ")[1].split(". null")[0]
    assert listed.split(", ") == names
    sources = (chat_templates.FOLDER / "SOURCES.md").read_text(encoding="utf-8")
    assert {
        name for name in names if not re.search(rf"[|`] ?{re.escape(name)} ?[|`]", sources)
    } == set()


def recipe_of(**section: str | tuple[str, ...]) -> Recipe:
    return builders.recipe_of(tokenizer=section)


def test_a_wrong_name_is_refused_with_the_nearest_names():
    with pytest.raises(
        ConfigError, match=r"no bundled template 'qwen-3'; nearest: qwen3, .*all: c"
    ):
        chat_templates.describe(recipe_of(chat_template="qwen-3"), False, False)


def test_a_file_that_is_not_there_is_refused(tmp_path):
    for path in (tmp_path / "no.jinja", tmp_path):
        with pytest.raises(ConfigError, match=f"chat_template: {path} is "):
            chat_templates.describe(recipe_of(chat_template=str(path)), False, False)


def test_a_mistake_in_the_syntax_names_file_and_line(tmp_path, folder):
    for file in (tmp_path / "mine.jinja", folder / "chat_template.jinja"):
        file.write_text(BROKEN)
    message = r"mine\.jinja: line 2: unexpected '}'; this chat template cannot be read"
    with pytest.raises(DataError, match=message):
        chat_templates.describe(recipe_of(chat_template=f"{tmp_path}/mine.jinja"), False, False)
    with pytest.raises(DataError, match=rf"^{folder}/chat_template\.jinja: line 2: unexpected"):
        tokenizer.load(folder)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{% if 1 %}" * 3000 + "{% endif %}" * 3000, "Error: "),
        ("{% for a in b %}" * 50 + "{% endfor %}" * 50, "SyntaxError: too many statically nested"),
        ("{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}", "RecursionError: "),
        ("{{ " + "+".join(["1"] * 30_000) + " }}", "RecursionError: "),
        ("a" * 300_000, "has more than 256 KiB"),
    ],
)
def test_a_template_that_nests_too_deeply_is_named(text, said):
    with pytest.raises(DataError, match=rf"^mine\.jinja: .*{said}"):
        chat_templates.check(text, "mine.jinja")


def test_a_check_computes_nothing():
    before = time.process_time()
    chat_templates.check("{{ 10**10**10 > 1 }}", "mine.jinja")
    assert time.process_time() - before < 60


@pytest.mark.parametrize("mark", ["{% generation %}{{ 'a' }}{% endgeneration %}", "{% break %}"])
def test_words_that_transformers_adds_to_jinja_are_no_mistake(mark):
    chat_templates.check("{% for message in messages %}" + mark + "{% endfor %}", "here")


def test_a_t5_takes_no_template():
    with pytest.raises(ConfigError, match="an encoder-decoder has no chat template"):
        chat_templates.describe(recipe_of(chat_template="chatml"), True, False)


@pytest.fixture
def folder(tmp_path):
    made = tokenizer.train(iter(["one two three"] * 9), TokenizerSection(), 300)
    made.save_pretrained(tmp_path / "tokenizer")
    return tmp_path / "tokenizer"


@pytest.mark.parametrize(
    ("name", "content", "cause"),
    [
        ("tokenizer.json", '{"a": 1}', "KeyError: 'added_tokens'"),
        ("tokenizer.json", '{"added_tokens": 3}', "TypeError: 'int' object is not iterable"),
        ("tokenizer.json", '{"added_tokens": [], "model": {"type": "BPE"}}', "Missing vocab"),
        ("tokenizer_config.json", '{"eos_token": 3}', "TypeError: Special token eos_token"),
    ],
)
def test_a_damaged_file_of_a_tokenizer_is_named(folder, name, content, cause):
    (folder / name).write_text(content)
    message = (
        rf"^{folder}: no tokenizer can be loaded from this folder \(.*{cause}.*;"
        r" is tokenizer\.json or tokenizer_config\.json damaged\?\);"
        r" --tokenizer\.loading=file reads tokenizer\.json alone, or name one with --tok"
    )
    with pytest.raises(ResourceError, match=message):
        tokenizer.load(folder)


def test_the_named_template_is_trained_and_kept_instead_of_the_folders_own(tmp_path, folder):
    (tmp_path / "mine.jinja").write_text(
        "{% for m in messages %}[{{ m.role }}] {{ m.content }}{{ eos_token }}{% endfor %}"
    )
    loaded = tokenizer.load(folder, f"{tmp_path}/mine.jinja")
    loaded.save_pretrained(tmp_path / "saved")
    again = tokenizer.load(tmp_path / "saved")
    talk = [{"role": "user", "content": "one"}, {"role": "assistant", "content": "two"}]
    ((row,),) = Encoder(again, EncoderSettings(False, "sft", 64)).encode([Conversation(talk)])
    assert again.decode(row["input_ids"]) == "[user] one<|end|>[assistant] two<|end|>"


def test_the_plan_says_where_the_template_is_from(tmp_path, folder):
    def described(**section):
        return chat_templates.describe(recipe_of(**section), False, False)

    assert described(chat_template="chatml") == "chatml, bundled with this program"
    assert described() == "of the tokenizer that is trained on the data: a token for each role"
    assert described(path=str(folder)) == f"of {folder}"
    (folder / "chat_template.jinja").unlink()
    assert described(path=str(folder)).startswith(f"{folder} has none: a line for each turn")


def test_tags_that_are_no_tokens_are_named_with_the_flag_that_adds_them(folder):
    missing = chat_templates.missing_tags(recipe_of(path=str(folder), chat_template="phi3"))
    assert missing == []  # the tokenizer has <|user|>, <|assistant|>, <|system|> and <|end|>
    missing = chat_templates.missing_tags(recipe_of(path=str(folder), chat_template="chatml"))
    assert missing == ["<|im_start|>", "<|im_end|>"]
    assert chat_templates.tags_note(missing).endswith(
        """--tokenizer.add_tokens='["<|im_start|>","<|im_end|>"]' makes tokens of them"""
    )
    assert chat_templates.missing_tags(recipe_of(chat_template="phi3")) == []  # trained on the data


def test_tags_of_a_tokenizer_that_tells_of_them_in_another_way_are_tokens(folder):
    """deepseek's tags are not ASCII; transformers writes them into tokenizer.json as they are."""
    made = tokenizer.load(folder)
    tags = chat_templates.TAG.findall(chat_templates.read("deepseek-v3"))
    made.add_tokens(sorted(set(tags)), special_tokens=True)
    made.save_pretrained(folder)
    section = {"path": str(folder), "chat_template": "deepseek-v3"}
    assert chat_templates.missing_tags(recipe_of(**section)) == []


@pytest.mark.parametrize(
    ("template", "unread"),
    [
        ("{{ message.name }}", ()),
        ("{% if 'name' in m %}{{ m['name'] }}{% endif %}", ()),
        ("{{ m.get('name', '') }}", ()),
        ("{{ tool['function']['name'] }}{{ call.function.name }}{{ names }}", ("name",)),
        ("{# message.name #}{{ message.content }}", ("name",)),
    ],
)
def test_a_speakers_name_that_a_template_drops_is_named(tmp_path, folder, template, unread):
    (tmp_path / "mine.jinja").write_text(template)
    section = {"path": str(folder), "chat_template": f"{tmp_path}/mine.jinja"}
    assert chat_templates.unread_keys(recipe_of(**section)) == unread
    assert chat_templates.unread_keys(recipe_of()) == ("name",)  # trained on the data
    turn = {"role": "assistant", "content": "a", "name": "Ann"}
    (tmp_path / "a.jsonl").write_text(json.dumps({"messages": [turn]}) + "\n")
    data = DataSection(train_file=str(tmp_path / "a.jsonl"))
    notes = columns.detect(data, tmp_path, None, unread).notes
    assert notes == (("columns that are not read: messages.name",) if unread else ())


def test_a_bundled_template_drops_names_exactly_if_the_plan_says_so():
    for name in chat_templates.names():
        tokenizer = template_matrix.tokenizer_of(chat_templates.read(name))
        is_named = bool(chat_templates.unread_keys(recipe_of(chat_template=name)))
        assert ConversationRenderer(tokenizer).drops_names == is_named, name


def test_another_template_or_another_content_of_its_file_tokenises_again(tmp_path):
    file = tmp_path / "mine.jinja"
    data = {"train_file": str(builders.write_parquet(tmp_path / "a.parquet", builders.rows(3)))}

    def name(**section):
        recipe = builders.recipe_of(tokenizer=section, data=data)
        model = builders.plan(recipe).shape
        tokens = token_cache.token_cache(tmp_path, recipe, model, builders.DATA_FORMAT)
        return tokens.folder.name

    file.write_text("{{ messages }}")
    first = name(chat_template=str(file))
    file.write_text("{{ messages[0] }}")
    assert len({name(), name(chat_template="chatml"), first, name(chat_template=str(file))}) == 4


def test_a_name_stays_a_name_and_a_file_becomes_absolute(tmp_path):
    def resolved(value: str) -> str | None:
        return with_absolute_paths(recipe_of(chat_template=value), tmp_path).tokenizer.chat_template

    assert resolved("qwen2.5") == "qwen2.5"
    assert resolved("mine.jinja") == f"{tmp_path}/mine.jinja"
    assert resolved("folder/mine") == f"{tmp_path}/folder/mine"


@pytest.mark.parametrize(
    "text", ["a" * 100_000, "{# " * 30_000, "tool.name " * 10_000, "[A" * 50_000]
)
def test_a_template_of_one_long_word_is_read_in_no_time(tmp_path, text):
    """100,000 letters took minutes."""
    (tmp_path / "a.jinja").write_text(text)
    recipe = builders.recipe_of(tokenizer={"chat_template": str(tmp_path / "a.jinja")})
    before = time.process_time()
    chat_templates.unread_keys(recipe)
    chat_templates.missing_tags(recipe)
    assert time.process_time() - before < 60


def test_what_stands_behind_an_open_comment_is_none_of_the_template(tmp_path):
    (tmp_path / "a.jinja").write_text("{# a #}{{ message.name }}{# {{ other.name }}")
    recipe = builders.recipe_of(tokenizer={"chat_template": str(tmp_path / "a.jinja")})
    assert chat_templates.unread_keys(recipe) == ()
    (tmp_path / "a.jinja").write_text("{# {{ message.name }}")
    assert chat_templates.unread_keys(recipe) == ("name",)
