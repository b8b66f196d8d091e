"""Rows of encoder-decoders are what plain transformers trains: `tokenizer(x, text_target=y)`."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import numpy as np
import pytest
import sentencepiece
import torch
from tokenizers import processors
from transformers import (
    AutoConfig,
    AutoModelForSeq2SeqLM,
    AutoTokenizer,
    BartTokenizer,
    GenerationConfig,
    M2M100Tokenizer,
    MarianTokenizer,
    MBart50Tokenizer,
    MBartTokenizer,
    NllbTokenizer,
    PegasusTokenizer,
    PLBartTokenizer,
    T5Tokenizer,
)

from launch.base.errors import ConfigError
from launch.data.conversation import Conversation
from launch.schema.model_sections import TokenizerSection
from training.data import batches, tokenizer
from training.data.encode import Encoder, EncoderSettings
from training.loop import evaluate
from training.model import build

TALKS = [("one two", "red"), ("the paper lamp", "a green river, a stone"), ("seven", "cloud")]
SPECIAL = ["<s>", "<pad>", "</s>", "<unk>"]
LAYERS = {
    "d_model": 16,
    **dict.fromkeys(("encoder_layers", "decoder_layers"), 1),
    **dict.fromkeys(("encoder_ffn_dim", "decoder_ffn_dim"), 16),
    **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 2),
    **{"max_position_embeddings": 64, "dropout": 0.0, "pad_token_id": 1, "eos_token_id": 2},
}
BEGINS_WITH_END = {**LAYERS, "bos_token_id": 0, "decoder_start_token_id": 2}
BEGINS_WITH_PAD = {**LAYERS, "decoder_start_token_id": 1}
T5 = {
    **{"d_model": 16, "d_kv": 8, "d_ff": 16, "num_layers": 1, "num_heads": 2, "dropout_rate": 0.0},
    **{"pad_token_id": 0, "eos_token_id": 1, "decoder_start_token_id": 0},
}
M2M100 = ("m2m_100", BEGINS_WITH_END)
# name of the tokenizer -> type and config of its model, languages of source and target
KINDS: dict[str, tuple[str, dict, tuple[str, ...]]] = {
    "t5": ("t5", T5, ()),
    "bart": ("bart", BEGINS_WITH_END, ()),
    "marian": ("marian", BEGINS_WITH_PAD, ()),
    "pegasus": ("pegasus", BEGINS_WITH_PAD, ()),
    "mbart": ("mbart", LAYERS, ("de_DE", "ro_RO")),
    "mbart50": ("mbart", LAYERS, ("de_DE", "ro_RO")),
    "plbart": ("plbart", LAYERS, ("java", "python")),
    "m2m100": (*M2M100, ("de", "ro")),
    "nllb": (*M2M100, ("deu_Latn", "fra_Latn")),
    "nllb_legacy": (*M2M100, ("deu_Latn", "fra_Latn")),
}


def sentencepieces(folder: Path, name: str, size: int) -> sentencepiece.SentencePieceProcessor:
    text = "\n".join([*(text for talk in TALKS for text in talk), "abcdefghijklmnopqrstuvwxyz"] * 9)
    (folder / "text").write_text(text)
    sentencepiece.SentencePieceTrainer.train(
        **{"input": str(folder / "text"), "model_prefix": str(folder / name), "vocab_size": size},
        **{"hard_vocab_limit": False, "minloglevel": 2},
    )
    return sentencepiece.SentencePieceProcessor(model_file=str(folder / f"{name}.model"))


def made(name: str, folder: Path):
    """A small tokenizer of this kind."""
    source, target = (sentencepieces(folder, *of) for of in (("source", 60), ("target", 50)))
    files = [str(folder / f"{side}.model") for side in ("source", "target")]
    pieces = [source.id_to_piece(i) for i in range(3, len(source))]
    pieces += [target.id_to_piece(i) for i in range(3, len(target))]
    words = [*SPECIAL, *dict.fromkeys(pieces)]
    scored = [(word, -float(number)) for number, word in enumerate(words)]
    (folder / "words.json").write_text(json.dumps({word: i for i, word in enumerate(words)}))
    letters = {word: number for number, word in enumerate([*SPECIAL, "<mask>", *"Ġ<>/,"])}
    letters |= {letter: len(letters) + i for i, letter in enumerate(map(chr, range(97, 123)))}
    codes = [f"__{code}__" for code in ("de", "ro")]
    return {
        "t5": lambda: T5Tokenizer(
            vocab=[("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), *scored[4:]]
        ),
        "bart": lambda: BartTokenizer(vocab=letters, merges=[]),
        "marian": lambda: MarianTokenizer(files[0], files[1], str(folder / "words.json")),
        "pegasus": lambda: PegasusTokenizer(
            vocab=[("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), *scored[4:]], offset=0
        ),
        "mbart": lambda: MBartTokenizer(vocab=scored),
        "mbart50": lambda: MBart50Tokenizer(vocab=scored),
        "plbart": lambda: PLBartTokenizer(files[0]),
        "m2m100": lambda: M2M100Tokenizer(
            str(folder / "words.json"), files[0], additional_special_tokens=codes
        ),
        "nllb": lambda: NllbTokenizer(vocab=letters, merges=[]),
        "nllb_legacy": lambda: NllbTokenizer(vocab=letters, merges=[], legacy_behaviour=True),
    }[name]()


@pytest.fixture(scope="module")
def loaded(tmp_path_factory):
    """A function that loads a kind's tokenizer as training does, with its languages."""
    folders: dict[str, Path] = {}

    def load(name: str):
        if name not in folders:
            folders[name] = tmp_path_factory.mktemp(name)
            made(name, folders[name]).save_pretrained(folders[name] / "saved")
        of_kind = tokenizer.load(folders[name] / "saved")
        languages = dict(zip(("src_lang", "tgt_lang"), KINDS[name][2], strict=False))
        tokenizer.set_languages(of_kind, TokenizerSection(**languages), is_pair=True)
        # as tokenising leaves it to training
        of_kind.save_pretrained(folders[name] / "tokenizer")
        return tokenizer.load(folders[name] / "tokenizer")

    return load


def talk(source: str, target: str) -> Conversation:
    return Conversation(
        [{"role": "user", "content": source}, {"role": "assistant", "content": target}]
    )


def encoder(of_kind, **fields) -> Encoder:
    settings = {"encoder_decoder": True, "task": "sft", "max_length": 64, **fields}
    return Encoder(of_kind, EncoderSettings(**settings))


@pytest.mark.parametrize("name", KINDS)
def test_rows_and_loss_are_those_of_a_plain_loop(name, loaded, tmp_path):
    of_kind, (model_type, fields, languages) = loaded(name), KINDS[name]
    plain_inputs = of_kind(
        [source for source, _ in TALKS],
        text_target=[target for _, target in TALKS],
        **{"padding": True, "return_tensors": "pt"},
    )
    labels = plain_inputs["labels"]
    plain_inputs["labels"] = labels.masked_fill(labels == of_kind.pad_token_id, -100)
    torch.manual_seed(0)
    plain = AutoModelForSeq2SeqLM.from_config(
        AutoConfig.for_model(model_type, vocab_size=len(of_kind) + 128, **fields)
    )
    ours = copy.deepcopy(plain.eval())
    build.set_special_tokens(ours, of_kind)
    rows = [row for (row,) in encoder(of_kind).encode([talk(*texts) for texts in TALKS])]
    start = ours.config.decoder_start_token_id
    batch = batches.Collator(of_kind.pad_token_id, start)(
        [batches.Row(np.array(row["input_ids"]), np.array(row["labels"])) for row in rows]
    )
    batch.pop("is_padded")
    for key in ("input_ids", "attention_mask", "labels"):
        assert batch[key].tolist() == plain_inputs[key].tolist()
    assert ours(**batch).loss.item() == plain(**plain_inputs).loss.item()
    assert [row["input_ids"] for row in rows] == evaluate.prompts(
        of_kind, [Conversation(talk(*texts).messages[:-1]) for texts in TALKS], is_pair=True
    )
    if languages:  # answers begin as trained, and the exported folder says so
        ours.save_pretrained(tmp_path)
        ours.generation_config = GenerationConfig.from_pretrained(tmp_path)
        answer = ours.generate(plain_inputs["input_ids"][:1], max_new_tokens=2, num_beams=1)[0]
        assert answer[0] == batch["decoder_input_ids"][0, 0]
        code, _ = tokenizer.around_target(of_kind)
        assert answer[1 : 1 + len(code)].tolist() == code


def test_the_decoder_of_a_t5gemma_begins_as_its_own_shift_of_the_labels(loaded):
    """Its tokenizer adds BOS alone: an answer gets an end token, an input none."""
    gemma = loaded("bart")
    gemma._tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 0)]
    )
    part = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    part |= {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 8, "bos_token_id": 0}
    config = AutoConfig.for_model("t5gemma", encoder=part, decoder=part, vocab_size=64)
    model = AutoModelForSeq2SeqLM.from_config(config)
    build.set_special_tokens(model, gemma)
    ((row,),) = encoder(gemma).encode([talk("one", "two")])
    assert row["input_ids"] == gemma("one")["input_ids"]
    assert row["labels"] == [*gemma("two")["input_ids"], gemma.eos_token_id]
    shifted = model.prepare_decoder_input_ids_from_labels(torch.tensor([row["labels"]]))
    batch = batches.Collator(gemma.pad_token_id, model.config.decoder_start_token_id)(
        [batches.Row(np.array(row["input_ids"]), np.array(row["labels"]))]
    )
    assert batch["decoder_input_ids"].tolist() == shifted.tolist()


def test_bart_has_the_tokens_of_its_own_call_whatever_a_row_writes(loaded):
    bart = loaded("bart")
    (row,), (text,) = (
        rows
        for sample in (talk("</s> one", "two <s>"), "</s>one two")
        for rows in encoder(bart).encode([sample])
    )
    for ids in row.values():
        assert [i for i in ids if i < 4] == [0, 2]
        assert (ids[0], ids[-1]) == (0, 2)
    assert text["labels"][0] == 0
    assert sum(i == 2 for ids in text.values() for i in ids) == 3


@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize(
    ("name", "num_around"), [("bart", (1, 1)), ("nllb", (1, 1)), ("mbart", (0, 2)), ("t5", (0, 1))]
)
def test_a_truncated_row_keeps_the_tokens_around_it(name, num_around, side, loaded):
    of_kind = loaded(name)
    texts = "the paper lamp one two seven", "a green river, a stone, a cloud"
    ((whole,),) = encoder(of_kind).encode([talk(*texts)])
    ((cut,),) = encoder(of_kind, max_length=12, truncation_side=side).encode([talk(*texts)])
    before, behind = num_around
    ids, full = cut["input_ids"], whole["input_ids"]
    assert len(ids) == len(cut["labels"]) == 12
    assert (ids[:before], ids[-behind:]) == (full[:before], full[-behind:])
    content, full_content = ids[before:-behind], full[before:-behind]
    assert content == (
        full_content[-len(content) :] if side == "left" else full_content[: len(content)]
    )
    # an answer that is cut does not learn to stop there
    assert cut["labels"] == whole["labels"][:12]
    assert of_kind.eos_token_id not in cut["labels"]
    assert encoder(of_kind).encode([talk("one", "")]) == [[]]


def test_a_language_that_the_tokenizer_needs_is_asked_for_by_name(loaded):
    nllb, bart = (loaded(name) for name in ("nllb", "bart"))
    plain = AutoTokenizer.from_pretrained(Path(nllb.name_or_path).parent / "saved")
    ask = tokenizer.set_languages
    with pytest.raises(ConfigError, match=r"tokenizer\.src_lang: found none.*ace_Arab, .*zul_Latn"):
        ask(plain, TokenizerSection(), is_pair=True)
    with pytest.raises(ConfigError, match=r"tgt_lang: found none, expected the language of the an"):
        ask(plain, TokenizerSection(src_lang="deu_Latn"), is_pair=True)
    wrong = TokenizerSection(src_lang="de_Latn", tgt_lang="fra_Latn")
    with pytest.raises(ConfigError, match=r"src_lang: found de_Latn.*nearest: .*deu_Latn"):
        ask(plain, wrong, is_pair=True)
    ask(nllb, TokenizerSection(), is_pair=True)  # its folder names both
    assert (nllb.src_lang, nllb.tgt_lang) == KINDS["nllb"][2]
    with pytest.raises(
        ConfigError, match=r"tgt_lang: found fr.*RobertaTokenizer\) has no language"
    ):
        ask(bart, TokenizerSection(tgt_lang="fr"), is_pair=True)
    ask(plain, TokenizerSection(), is_pair=False)  # a decoder's rows have none


@pytest.mark.parametrize("adds_end", [False, True])
def test_a_text_of_a_decoder_whose_tokenizer_adds_an_end_has_one(adds_end, loaded):
    bart = loaded("bart" if adds_end else "nllb")
    ((row,),) = Encoder(bart, EncoderSettings(False, "pretrain", 64)).encode(["one two"])
    assert row["input_ids"].count(bart.eos_token_id) == 1
    assert row["input_ids"] == bart("one two")["input_ids"]
