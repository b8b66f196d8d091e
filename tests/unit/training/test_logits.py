"""A loss whose logits are made in parts is the loss, with its gradients; generation still finds
logits."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM

from launch.data.rows import IGNORED
from training.data.batches import TARGET_TENSORS, targets
from training.levers.logits import LossHead, target_loss_sum

KINDS = ("gpt2", "llama", "mistral", "qwen2", "qwen3", "t5")
SMALL = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
}
CONFIGS = {
    "gpt2": {"vocab_size": 97, "n_embd": 32, "n_head": 4, "n_layer": 2, "n_positions": 64},
    "t5": {"vocab_size": 97, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4},
}


def network(kind: str) -> torch.nn.Module:
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, **CONFIGS.get(kind, {**SMALL, "num_key_value_heads": 2}))
    family = AutoModelForSeq2SeqLM if config.is_encoder_decoder else AutoModelForCausalLM
    return family.from_config(config).eval()  # no dropout


def batch(kind: str) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    random = torch.Generator().manual_seed(1)
    ids, labels = torch.randint(5, 97, (2, 3, 23), generator=random).unbind()
    labels[:, :4] = IGNORED
    return (
        {"input_ids": ids, "decoder_input_ids": labels.clamp(min=0)}
        if kind == "t5"
        else {"input_ids": ids}
    ), labels


def named(labels: torch.Tensor, shift: bool) -> dict[str, torch.Tensor]:
    return dict(zip(TARGET_TENSORS, targets(labels.numpy(), shift), strict=True))


@pytest.mark.parametrize("at_targets", [False, True])
@pytest.mark.parametrize("chunks", [1, 2, 8, 64])
@pytest.mark.parametrize("kind", KINDS)
def test_the_sum_and_every_gradient_are_those_of_the_whole(
    kind: str, chunks: int, at_targets: bool
) -> None:
    inputs, labels = batch(kind)
    whole = network(kind)
    expected = target_loss_sum(whole(**inputs).logits, labels, shift=kind != "t5")
    expected.backward()
    parted = network(kind)
    head = LossHead(parted, chunks, shift=kind != "t5")
    given = named(labels, kind != "t5") if at_targets else {}
    with head.for_loss(labels, given):
        found = head.loss_sum(parted(**inputs).logits)
    found.backward()
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)
    for (name, one), other in zip(whole.named_parameters(), parted.parameters(), strict=True):
        torch.testing.assert_close(other.grad, one.grad, rtol=1e-4, atol=1e-5, msg=name)
    with torch.no_grad(), head.for_loss(labels, given):
        logits = parted(**inputs).logits
        torch.testing.assert_close(head.loss_sum(logits), expected, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(parted(**inputs).logits, whole(**inputs).logits)


def smoothed_by_hand(logits: torch.Tensor, labels: torch.Tensor, share: float) -> torch.Tensor:
    """Of each target: its own share of the loss, and the mean over the vocabulary."""
    kept = labels != IGNORED
    losses = -logits[kept].log_softmax(-1)
    own = losses.gather(1, labels[kept][:, None])
    return (1 - share) * own.sum() + share * losses.mean(-1).sum()


@pytest.mark.parametrize("at_targets", [False, True])
@pytest.mark.parametrize("chunks", [1, 5])
@pytest.mark.parametrize("kind", ["llama", "t5"])
def test_smoothed_labels_are_those_of_the_formula(kind: str, chunks: int, at_targets: bool) -> None:
    inputs, labels = batch(kind)
    plain, parted = network(kind), network(kind)
    logits, shift = plain(**inputs).logits, kind != "t5"
    expected = (
        smoothed_by_hand(logits[:, :-1], labels[:, 1:], 0.3)
        if shift
        else smoothed_by_hand(logits, labels, 0.3)
    )
    expected.backward()
    whole = target_loss_sum(logits, labels, shift, smoothing=0.3)
    head = LossHead(parted, chunks, shift)
    with head.for_loss(labels, named(labels, shift) if at_targets else {}, 0.3):
        found = head.loss_sum(parted(**inputs).logits)
    found.backward()
    torch.testing.assert_close((whole, found), (expected, expected))
    for (name, one), other in zip(plain.named_parameters(), parted.parameters(), strict=True):
        torch.testing.assert_close(other.grad, one.grad, rtol=1e-4, atol=1e-5, msg=name)


@pytest.mark.parametrize("smoothing", [0.0, 0.3])
@pytest.mark.parametrize("chunks", [1, 8])
@pytest.mark.parametrize("kind", ["llama", "t5"])
def test_a_batch_without_targets_has_no_loss_and_a_gradient_of_zeros(
    kind: str, chunks: int, smoothing: float
) -> None:
    inputs, labels = batch(kind)
    labels = torch.full_like(labels, IGNORED)
    parted = network(kind)
    head = LossHead(parted, chunks, shift=kind != "t5")
    with head.for_loss(labels, named(labels, kind != "t5"), smoothing):
        loss = head.loss_sum(parted(**inputs).logits)
    loss.backward()
    assert loss == 0
    for name, parameter in parted.named_parameters():
        assert parameter.grad is not None, name  # of every parameter: ranks reduce them
        assert not parameter.grad.any(), name


def test_logits_are_those_of_the_targets_alone() -> None:
    parted, (inputs, labels) = network("llama"), batch("llama")
    labels[1] = IGNORED
    head = LossHead(parted, 1, shift=True)
    with head.for_loss(labels, named(labels, shift=True)):
        at_targets = parted(**inputs).logits
    everywhere = parted(**inputs).logits[:, :-1][labels[:, 1:] != IGNORED]
    assert len(everywhere) == 2 * (23 - 4)
    torch.testing.assert_close(at_targets[0], everywhere)


def test_no_more_than_one_chunk_of_logits_is_there() -> None:
    parted, (inputs, labels) = network("llama"), batch("llama")
    head = LossHead(parted, 8, shift=True)
    widest: list[int] = []
    parted.lm_head.register_forward_hook(lambda module, args, output: widest.append(output.numel()))
    with (
        head.for_loss(labels),
        torch.autograd.graph.saved_tensors_hooks(
            lambda kept: widest.append(kept.numel()) or kept, lambda kept: kept
        ),
    ):
        parted(**inputs).logits.backward()
    assert max(widest) < labels.numel() * 97  # the logits of all positions
