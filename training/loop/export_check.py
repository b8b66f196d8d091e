"""Check of an exported folder: loaded as a user loads it, it must be the model that was trained."""

import gc
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain, islice
from pathlib import Path
from typing import Any, cast

import torch
from accelerate import Accelerator
from transformers import (
    AutoTokenizer,
    GenerationConfig,
    PreTrainedTokenizerFast,
)

from launch.base.errors import ExportError
from launch.base.text import cause
from launch.data import sources
from launch.data.conversation import Conversation, Sample
from launch.data.rows import UNLIMITED, BadRows
from launch.run_folder.layout import RankStart
from launch.schema.machine import GIB
from launch.schema.model_sections import TokenizerLoading
from launch.schema.recipe import Recipe
from launch.schema.result import CHECK_BYTES
from training.compat import peft_private
from training.compat.transformers_private import Network
from training.data import tokenise, tokenizer
from training.data.encode import Encoder, EncoderSettings, Row
from training.levers.compile import eagerly
from training.loop import evaluate
from training.loop.trainer import LowMemTrainer, empty_cache
from training.model import build, merging, varlen_attention

NUM_ROWS = 100
ROW_TOKENS = 128  # tokens of the row whose logits are compared
# largest difference, as a share of the largest logit, in the training's arithmetic
MOST_OFF_IN_16_BITS = 0.01
Inputs = Mapping[str, list[int]]  # inputs of the model: one row


@dataclass(frozen=True)
class Rows:
    """Samples of a run, and the encoder that has tokenised them."""

    encoder: Encoder
    dataset: Sequence[Sample]
    questions: Sequence[Conversation]  # held-out ones, without their answers

    @cached_property
    def encoded(self) -> list[list[Row]]:
        return self.encoded_by(self.encoder)

    def encoded_by(self, encoder: Encoder) -> list[list[Row]]:
        """The rows of each sample; none of a bad one."""
        bad = BadRows(UNLIMITED)
        return [
            [row for rows in encoder.encode([sample], bad) for row in rows]
            for sample in self.dataset
        ]

    @property
    def inputs(self) -> Inputs:
        """The model's inputs of the first row that is trained."""
        rows = chain.from_iterable(self.encoded)
        end = [self.encoder.tokenizer.eos_token_id]
        row = next(rows, {"input_ids": end, "labels": end})
        inputs = {"input_ids": row["input_ids"][:ROW_TOKENS]}
        if self.encoder.settings.encoder_decoder:
            inputs["decoder_input_ids"] = row["labels"][:ROW_TOKENS]
        return inputs


@dataclass(frozen=True)
class Trained:
    """Rows and logits of a finished training, which its export must have."""

    rows: Rows
    logits: torch.Tensor  # (seq, vocabulary) of rows.inputs, on the host
    dtype: torch.dtype  # dtype of the weights that computed the logits


def trained(
    start: RankStart, trainer: LowMemTrainer, tokens: Path, questions: Sequence[Conversation]
) -> Trained:
    """Read what the export will be compared with. `tokens`: the folder of the tokenised rows.
    Collective."""
    rows = _rows(start, tokens, questions)
    network: Network = trainer.accelerator.unwrap_model(trainer.model)
    with eagerly(trainer.args), varlen_attention.answering_with_masks(network):
        computed = logits(trainer.model_wrapped, rows.inputs, trainer.accelerator)
    base = network.get_base_model() if hasattr(network, "peft_config") else network
    return Trained(rows, computed, base.dtype)


def _rows(start: RankStart, tokens: Path, questions: Sequence[Conversation]) -> Rows:
    encoder = Encoder(tokenizer.load(tokens / tokenise.TOKENIZER), EncoderSettings.of(start.tokens))
    dataset = sources.samples_in(start.tokens.of_part("train"), UNLIMITED)
    return Rows(encoder, list(islice(dataset, NUM_ROWS)), questions[:NUM_ROWS])


def logits(model: torch.nn.Module, inputs: Inputs, accelerator: Accelerator) -> torch.Tensor:
    """The logits of a row, (seq, vocabulary) in float32 on the host."""
    tensors = {name: torch.tensor([ids]).to(accelerator.device) for name, ids in inputs.items()}
    model.eval()
    with torch.no_grad(), accelerator.autocast():
        return model(**tensors, use_cache=False).logits[0].float().cpu()


def close_engine(trainer: LowMemTrainer, planned_host_bytes: int, host_bytes: int) -> int:
    """Free the gradients and optimizer states of this rank. The bytes that a copy of the model may
    take on its device: of host RAM what the plan counts with and the job does not take."""
    trainer.model.zero_grad(set_to_none=True)
    trainer.optimizer = None
    trainer.accelerator.free_memory()
    gc.collect()
    empty_cache()
    if trainer.args.device.type == "cuda":
        return torch.cuda.mem_get_info(trainer.args.device)[0]
    return max(planned_host_bytes - host_bytes, CHECK_BYTES)


def check(
    folder: Path,
    recipe: Recipe,
    accelerator: Accelerator,
    network: Network,
    expected: Trained,
    free_bytes: int,
) -> str:
    """Load an exported folder and compare it with what was trained. A sentence on what was
    compared.

    `network`: the model that was exported, with all its weights. Raises ExportError for what
    differs."""
    rows = expected.rows
    loading = tokenizer.loading_of_recipe(recipe)
    _refuse(folder, chain(_of_tokenizer(folder, rows, loading), _of_generation(folder, rows)))
    checked = f"ids of {len(rows.dataset):,} rows"
    is_adapter = (folder / "adapter_config.json").is_file()
    is_merged = hasattr(network, "peft_config") and not is_adapter
    if is_merged:  # peft has merged it in place
        network = network.get_base_model()
    needed_bytes = sum(
        parameter.nbytes
        if is_adapter  # perhaps of 4 bits
        else parameter.numel() * expected.dtype.itemsize
        for parameter in network.parameters()
    )
    fits = needed_bytes + 2 * expected.logits.nbytes <= free_bytes
    device = accelerator.device if fits else torch.device("meta")
    loaded: Network = None
    try:
        if not is_adapter:
            loaded = _load_model(folder, network, expected.dtype, device)
        elif fits:
            loaded = _load_adapter(folder, recipe, network, expected.dtype, accelerator)
    except (OSError, ValueError, RuntimeError) as error:
        raise ExportError(f"{folder}: cannot be loaded ({cause(error)})") from error
    if not is_adapter:
        _refuse(folder, _of_parameters(network, loaded))
        checked += f", names and shapes of {len(list(loaded.parameters())):,} weights"
    if not fits:
        return (
            f"{checked}; the logits were not compared: a second copy of {needed_bytes / GIB:.1f}"
            f" GiB does not fit in {max(free_bytes, 0) / GIB:.1f} GiB"
        )
    largest = expected.logits.abs().max().item() or 1.0  # all are 0 where kernels do nothing
    of_export = logits(loaded, rows.inputs, accelerator)
    error = (of_export - expected.logits).abs().max().item() / largest
    dtypes = {expected.dtype, network.dtype} if is_merged else {expected.dtype}
    is_exact = accelerator.mixed_precision == "no" and dtypes == {torch.float32}
    in_16_bits = merging.MOST_OFF_IN_16_BITS if is_merged else MOST_OFF_IN_16_BITS
    allowed = merging.MOST_OFF if is_exact else in_16_bits
    if not error <= allowed:  # NaN too
        raise ExportError(
            f"{folder}: its logits of a row differ from those of the trained model by"
            f" {error:.1e} of the largest, expected at most {allowed:.0e}"
        )
    return f"{checked}, logits of a row (off by {error:.1e} of the largest)"


def _refuse(folder: Path, problems: Iterator[str]) -> None:
    for problem in problems:
        raise ExportError(f"{folder}: {problem}")


def _of_tokenizer(folder: Path, rows: Rows, loading: TokenizerLoading) -> Iterator[str]:
    """The differences of an exported tokenizer."""
    trained = rows.encoder.tokenizer
    reader = PreTrainedTokenizerFast if loading == "file" else AutoTokenizer
    try:
        exported = reader.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError, KeyError) as error:
        yield f"its tokenizer cannot be loaded ({cause(error)})"
        return
    for name in ("eos_token_id", "bos_token_id", "pad_token_id", "chat_template"):
        value, expected = getattr(exported, name), getattr(trained, name)
        if value != expected:
            yield f"its tokenizer has {name} {value!r}, trained was {expected!r}"
    encoder = replace(rows.encoder, tokenizer=exported)
    pairs = zip(rows.encoded_by(encoder), rows.encoded, strict=True)
    for number, (read, expected) in enumerate(pairs, 1):
        if read != expected:
            yield f"row {number} has other ids than trained: {_first_difference(read, expected)}"
    if rows.questions:
        trained_prompts, answered = (
            evaluate.prompts(each, rows.questions, encoder.settings.encoder_decoder)
            for each in (trained, exported)
        )
        if trained_prompts != answered:
            yield "held-out prompts have other ids than trained"


def _first_difference(read: list[Row], expected: list[Row]) -> str:
    pairs = chain.from_iterable(
        zip(a["input_ids"], b["input_ids"], strict=False)
        for a, b in zip(read, expected, strict=False)
    )
    first = next((f"{a} instead of {b}" for a, b in pairs if a != b), "")
    return first or f"{len(read)} rows, or other lengths"


def _of_generation(folder: Path, rows: Rows) -> Iterator[str]:
    """The ids that end a trained row, and at which the exported model would not stop."""
    encoder = rows.encoder
    is_chat = any(isinstance(sample, Conversation) for sample in rows.dataset)
    ends = {encoder.tokenizer.eos_token_id}
    if is_chat and not encoder.settings.encoder_decoder and encoder.settings.task != "pretrain":
        ends |= {*encoder.renderer.end_ids}
    listed = None
    if (folder / "generation_config.json").is_file():
        listed = GenerationConfig.from_pretrained(folder, local_files_only=True).eos_token_id
    missing = ends - {*(listed if isinstance(listed, list) else [listed])}
    if missing:
        names = encoder.tokenizer.convert_ids_to_tokens(sorted(missing))
        yield f"generation_config.json does not name {names}, with which trained rows end"


def _load_model(
    folder: Path, trained: Network, dtype: torch.dtype, device: torch.device
) -> Network:
    network, checked = build.pretrained(
        folder,
        trained.config.is_encoder_decoder,
        dtype=dtype,
        device_map={"": device},
        output_loading_info=True,
    )
    if faults := {key: sorted(map(str, names)) for key, names in checked.items() if names}:
        raise ExportError(f"{folder}: transformers says of its weights: {faults}")
    return network


def _load_adapter(
    folder: Path,
    recipe: Recipe,
    trained: Network,
    dtype: torch.dtype,
    accelerator: Accelerator,
) -> Network:
    base, precision = trained.get_base_model(), cast(Any, accelerator.mixed_precision)
    path = str(recipe.model.path)
    network, _ = build.loaded(
        *(path, build.folder_config(path), recipe.quantized(precision), dtype, accelerator.device)
    )
    build.grow_vocabulary(network, base.config.get_text_config().vocab_size)
    return peft_private.with_adapter(network, folder)


def _of_parameters(trained: Network, loaded: Network) -> Iterator[str]:
    """The differences of names, shapes and ties."""
    expected, described = _parameters(trained), _parameters(loaded)
    for name in sorted(expected.keys() | described.keys()):
        if described.get(name) != expected.get(name):
            yield f"{name} is {described.get(name)}, trained was {expected.get(name)}"


def _parameters(network: Network) -> dict[str, str]:
    """The shape of each parameter, and the first name of those that are one with it."""
    names: dict[int, str] = {}
    return {
        name: f"{tuple(part.shape)} of {names.setdefault(id(part), name)}"
        for name, part in network.named_parameters(remove_duplicate=False)
    }
