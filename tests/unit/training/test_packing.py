"""Documents that share a sequence are what each of them is alone, and none is cut, left out or
repeated."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoConfig, AutoModelForCausalLM

from launch.base.errors import ConfigError
from launch.data.conversation import Conversation
from launch.data.rows import IGNORED
from launch.probe import packages
from tests import builders, flash_on_cpu, varlen_on_cpu
from training.children import trial_rows
from training.data import batches, encode, packing, tokenizer
from training.data.packing import Packer
from training.levers.logits import target_loss_sum
from training.model import varlen_attention

pytestmark = pytest.mark.unit

ROOM = 16
DOCUMENTS = st.lists(st.integers(2, ROOM), min_size=1, max_size=60)


def rows(lengths: list[int]) -> list[encode.Row]:
    """Rows whose tokens say where they come from."""
    found = []
    for row, length in enumerate(lengths):
        ids = [1000 * (row + 1) + at for at in range(length)]
        found.append({"input_ids": ids, "labels": [IGNORED, *ids[1:]]})
    return found


def packed(lengths: list[int], cuts: bool, window: int) -> list[dict[str, np.ndarray]]:
    packer = Packer(ROOM, cuts, window)
    found = [pack for row in rows(lengths) for pack in packer.add([row])] + list(packer.finish())
    numbers = sorted(number for pack in found for number in pack["documents"].tolist())
    assert numbers == list(range(packer.documents))
    for pack in found:
        assert pack["lengths"].sum() == len(pack["input_ids"]) == len(pack["labels"]) <= ROOM
        assert len(pack["documents"]) == len(pack["lengths"])
        assert (pack["lengths"] >= 2).all()
        starts = np.cumsum(pack["lengths"]) - pack["lengths"]
        assert (pack["labels"][starts] == IGNORED).all(), (
            "a document's first token is predicted from another one"
        )
    return found


def in_documents(pack: dict[str, np.ndarray]) -> list[list[int]]:
    return [part.tolist() for part in np.split(pack["input_ids"], np.cumsum(pack["lengths"])[:-1])]


@settings(max_examples=150, deadline=None)
@given(lengths=DOCUMENTS, window=st.integers(20, 400))
def test_rows_are_packed_whole_and_each_once(lengths, window):
    found = packed(lengths, False, window)
    documents = [document for pack in found for document in in_documents(pack)]
    assert sorted(documents) == [row["input_ids"] for row in rows(lengths)]
    numbers = np.concatenate([pack["documents"] for pack in found])
    assert [documents[at][0] // 1000 - 1 for at in range(len(documents))] == numbers.tolist()


@settings(max_examples=150, deadline=None)
@given(
    lengths=st.lists(st.integers(2, 3 * ROOM), min_size=1, max_size=40), window=st.integers(20, 400)
)
def test_texts_follow_one_another_and_leave_at_most_two_tokens_of_a_sequence_empty(lengths, window):
    found = packed(lengths, True, window)
    assert [token for pack in found for token in pack["input_ids"].tolist()] == [
        token for row in rows(lengths) for token in row["input_ids"]
    ]
    assert all(len(pack["input_ids"]) >= ROOM - 2 for pack in found[:-1])


def test_the_window_does_not_change_where_texts_are_cut():
    lengths = np.random.default_rng(3).integers(2, 40, 200).tolist()
    small, large = (packed(lengths, True, window) for window in (50, 1 << 22))
    assert [pack["input_ids"].tolist() for pack in small] == [
        pack["input_ids"].tolist() for pack in large
    ]
    assert [pack["documents"].tolist() for pack in small] == [
        pack["documents"].tolist() for pack in large
    ]


def test_best_fit_fills_sequences():
    lengths = np.random.default_rng(5).gamma(2, 70, 20_000).astype(int).clip(2, 512).tolist()
    packs = packing.best_fit(lengths, 512)
    assert sum(lengths) / (512 * len(packs)) > 0.995
    assert packs == packing.best_fit(lengths, 512)


FAMILIES = {
    "gpt2": {
        "n_embd": 32,
        "n_layer": 2,
        "n_head": 4,
        "n_positions": 32,
        "resid_pdrop": 0.0,
        "attn_pdrop": 0.0,
    },
    "llama": {"num_key_value_heads": 2},
    "qwen2": {"num_key_value_heads": 2},
    "qwen3": {"num_key_value_heads": 2, "head_dim": 8},
    "mistral": {"num_key_value_heads": 2, "sliding_window": 6},
    # some of the types whose rows are flattened since their models are asked for it
    "gemma": {"num_key_value_heads": 2, "head_dim": 8},
    "phi3": {"num_key_value_heads": 2, "pad_token_id": 0},
    "gpt_neox": {},
    "olmo2": {"num_key_value_heads": 2, "pad_token_id": 0},
    "starcoder2": {"num_key_value_heads": 2, "residual_dropout": 0.0, "embedding_dropout": 0.0},
}


@pytest.mark.parametrize("attention", ["sdpa", "eager", "flash_attention_2", "varlen_attn"])
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_loss_and_gradient_of_packed_documents_are_those_of_each_alone(family, attention):
    if attention == "varlen_attn" and (reason := packages.no_varlen_attn()):
        pytest.skip(reason)
    sizes = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    }
    own = {**({} if family == "gpt2" else sizes), **FAMILIES[family]}
    torch.manual_seed(1)
    config = AutoConfig.for_model(family, vocab_size=97, use_cache=False, embd_pdrop=0.0, **own)
    model = AutoModelForCausalLM.from_config(config)
    varlen_attention.register(attention)
    model.config._attn_implementation = attention
    flattens = attention in ("flash_attention_2", "varlen_attn")
    if attention == "flash_attention_2":  # of float32 it would make 16 bits
        model.double()
    random = np.random.default_rng(2)
    # the second sequence is one document, the third is padded
    lengths = [[9, 2, 13], [24], [5, 5, 5, 7]]

    def row(parts: list[int]) -> batches.Row:
        ids = random.integers(1, 97, sum(parts))
        labels = ids.copy()
        labels[np.cumsum([0, *parts[:-1]])] = IGNORED
        return batches.Row(ids, labels, np.array(parts))

    together = [row(parts) for parts in lengths]
    alone = [
        batches.Row(ids, labels)
        for one, parts in zip(together, lengths, strict=True)
        for ids, labels in zip(
            *(np.split(side, np.cumsum(parts)[:-1]) for side in one[:2]), strict=True
        )
    ]

    def trained(
        rows: list[batches.Row], is_packed: bool
    ) -> tuple[list[torch.Tensor], torch.Tensor, torch.Tensor]:
        model.zero_grad()
        batch = batches.Collator(
            pad_token_id=0, multiple=8, is_packed=is_packed, flattens=flattens
        )(rows)
        labels, _ = batch.pop("labels"), batch.pop("is_padded", None)
        logits = model(**batch).logits
        loss = target_loss_sum(logits, labels, shift=True)
        loss.backward()
        gradient = torch.cat([parameter.grad.flatten() for parameter in model.parameters()])
        lengths = [len(row.input_ids) for row in rows]
        if flattens:
            return list(logits[0, : sum(lengths)].split(lengths)), loss, gradient
        return [one[:length] for one, length in zip(logits, lengths, strict=True)], loss, gradient

    kernel = varlen_on_cpu.counted if attention == "varlen_attn" else flash_on_cpu.there
    with kernel() as calls:
        packed_logits, packed_loss, packed_gradient = trained(together, True)
        # a layer each; 2 fill it up
        assert calls == [[9, 2, 13, 24, 5, 5, 5, 7, 2]] * (2 if flattens else 0)
    model.config._attn_implementation, flattens = ("sdpa" if flattens else attention), False
    single = [trained([one], False) for one in alone]
    expected = torch.cat([logits for (logits,), _, _ in single])
    torch.testing.assert_close(torch.cat(packed_logits), expected, rtol=0, atol=1e-5)
    torch.testing.assert_close(packed_loss, sum(loss for _, loss, _ in single), rtol=1e-5, atol=0)
    whole = sum(gradient for _, _, gradient in single)
    assert (packed_gradient - whole).norm() / whole.norm() < 1e-5


def test_tokenising_packs_and_counts_before_and_after(tmp_path):
    texts = ["two 二 three 三", "the end of a sentence", "日期 2024-03-05"] * 40
    cut = tokenizer.train(iter(texts), builders.recipe_of().tokenizer, 400)
    paths = {}
    for task in ("sft", "pretrain"):
        encoder = encode.Encoder(
            cut, encode.EncoderSettings(False, task, 16, whole_texts=task == "pretrain")
        )
        source = (
            iter(texts)
            if task == "pretrain"
            else (
                Conversation(
                    [{"role": "user", "content": "x"}, {"role": "assistant", "content": t}]
                )
                for t in texts
            )
        )
        counts = encode.write_cache(
            source, encoder, tmp_path / task, None, lambda rows: None, Packer(16, task != "sft")
        )
        paths[task] = (batches.NumberedRows(tmp_path / task), counts)
    for rows, counts in paths.values():
        assert len(rows) == counts.rows < counts.samples == 120
        assert counts.tokens == sum(
            len(row.input_ids) for row in rows.__getitems__(range(len(rows)))
        )
        assert counts.longest_input <= 16
        assert len(counts.lengths) >= 120
        row = rows[1]
        assert row.lengths is not None
        assert (row.number, row.lengths.sum()) == (1, len(row.input_ids))
    trial_rows.write_rows([tmp_path / "sft"], tmp_path / "longest", 8)  # for trials
    for row in batches.TokenRows(tmp_path / "longest"):
        assert row.lengths is not None
        assert row.lengths.sum() == len(row.input_ids) >= paths["sft"][1].longest_input - 1
    rows, counts = paths["pretrain"]
    assert counts.tokens == sum(
        len(cut(text, add_special_tokens=False)["input_ids"]) + 1 for text in texts
    )


def test_what_cannot_be_packed_is_refused_with_the_reason():
    recipe = builders.recipe_of(
        model={"shape": "t5-tiny"}, data={"train_file": "x", "packing": True}
    )
    words = "data.packing: true, but the model is a t5: .* use data.group_by_length"
    with pytest.raises(ConfigError, match=words):
        builders.plan(recipe)


def test_packing_and_grouping_together_are_refused():
    with pytest.raises(ValueError, match="packing leaves nothing for group_by_length to do"):
        builders.recipe_of(data={"train_file": "x", "packing": True, "group_by_length": True})
