"""The tokens that tokenizer.add_tokens adds to a folder's tokenizer: their ids, from a child that
loads it, and the vocabulary that the model then needs."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launch.base import files
from launch.base.errors import ConfigError
from launch.base.workspace import FILES
from launch.data import chat_templates, token_cache
from launch.data.worker import WORKER, AddTokens
from launch.predict.models import model_config
from launch.predict.parameters import HEAD, Shapes, embedding
from launch.predict.trained_parameters import modules_of_rows
from launch.schema.model_sections import LoraSection, TokenizerSection
from launch.schema.plan import Change, ModelFamily
from launch.schema.recipe import Recipe
from launch.schema.result import NewTokens

_MOST_NAMED = 8  # tokens in a line of the plan
_NUM_BYTES = 256  # alphabet of a tokenizer that is trained on the data


@dataclass(frozen=True)
class ModelFacts:
    """A recipe's model with its added tokens, and lines of the plan on them."""

    recipe: Recipe
    config: dict[str, Any]
    parameters: Shapes
    family: ModelFamily
    changes: tuple[Change, ...] = ()
    notes: tuple[str, ...] = ()


def with_tokens(
    recipe: Recipe,
    config: dict[str, Any],
    parameters: Shapes,
    family: ModelFamily,
    cache: Path,
) -> ModelFacts:
    """A recipe's model with rows for the tokens that tokenizer.add_tokens adds to a folder's
    tokenizer. A tokenizer that is trained on the data has them in its own vocabulary.

    Raises ConfigError, also for a tokenizer that the model is too small for, and ResourceError for
    one that cannot be loaded."""
    section = recipe.tokenizer
    folder = Path(section.path or recipe.model.path or "")
    is_foreign = section.path not in (None, recipe.model.path)  # the model's own fits it
    is_own = not is_foreign or not (folder / "tokenizer.json").is_file()
    if not folder.parts:
        _check_trained_size(recipe, parameters[embedding(parameters)][0])
    if not folder.parts or (is_own and not section.add_tokens):
        return ModelFacts(recipe, config, parameters, family)
    rows = parameters[embedding(parameters)][0]
    new = _of_folder(folder, section, cache)
    if new.size_before > rows:
        raise ConfigError(
            f"the tokenizer of {folder} has {new.size_before:,} tokens, the model's vocabulary"
            f" {rows:,}; name a tokenizer of at most that many tokens with --tokenizer.path=FOLDER,"
            " or choose a larger model shape"
        )
    if new.size > rows:
        _refuse_untied_head(family, parameters)
        config, parameters, family = model_config.read(
            recipe.model, new.size, root=FILES, cache=cache
        )
    recipe, changes = _with_trained_tokens(recipe, new, parameters, family)
    return ModelFacts(recipe, config, parameters, family, tuple(changes), tuple(_notes(new, rows)))


def _check_trained_size(recipe: Recipe, rows: int) -> None:
    """Raise ConfigError if no tokenizer of the asked size can be trained on the data."""
    requested = recipe.tokenizer.vocab_size
    size, key = (
        requested or rows,
        f"tokenizer.vocab_size {requested:,}" if requested else "its vocabulary",
    )
    names = {*map(json.loads, chat_templates.TRAINED_TAGS.split()), *recipe.tokenizer.add_tokens}
    least = _NUM_BYTES + len(names)
    if size > rows:
        raise ConfigError(
            f"{key} is more than the {rows:,} tokens that model.shape {recipe.model.shape} has"
            f" embeddings for; give at most {rows:,}, or choose a larger shape"
        )
    if size < least:
        raise ConfigError(
            f"model.shape {recipe.model.shape}: {key} is too small for a trained tokenizer, which"
            f" has {_NUM_BYTES} bytes and {len(names)} special tokens; give at least {least}"
        )


def _refuse_untied_head(family: ModelFamily, parameters: Shapes) -> None:
    """Raise ConfigError for weights whose output head differs from the embeddings that their
    config ties it to: transformers would tie them when the embeddings grow."""
    if family.ties_head and any(map(HEAD.search, parameters)):
        raise ConfigError(
            "tokenizer.add_tokens: the embeddings would have to grow, but the output head in the"
            " weights is not the embeddings to which config.json ties it, and would be lost; leave"
            " tokens out, or set tie_word_embeddings to false in config.json"
        )


def _notes(tokens: NewTokens, rows: int) -> Iterator[str]:
    if tokens.ids:
        grown = (
            f"the embeddings grow from {rows:,} to {tokens.size:,} rows; the new ones begin near"
            " the mean of the others"
            if tokens.size > rows
            else f"the {rows:,} rows of the embeddings have space for them"
        )
        yield f"added to the vocabulary: {_named(tokens.ids)}; {grown}"
    if tokens.there:
        yield f"tokenizer.add_tokens: in the vocabulary already: {_named(tokens.there)}"


def _named(tokens: Mapping[str, int]) -> str:
    texts = [f"{token} ({number:,})" for token, number in tokens.items()]
    num_further = len(texts) - _MOST_NAMED
    return ", ".join(texts[:_MOST_NAMED]) + (f" and {num_further} more" if num_further > 0 else "")


def _with_trained_tokens(
    recipe: Recipe, tokens: NewTokens, parameters: Shapes, family: ModelFamily
) -> tuple[Recipe, list[Change]]:
    """The recipe whose adapter trains the embeddings of added tokens too, unless
    lora.modules_to_save trains all of their rows."""
    lora = recipe.lora
    if lora is None or not tokens.ids or not modules_of_rows(parameters, lora, family):
        return recipe, []
    requested = lora.trainable_token_indices
    indices = tuple(sorted({*(requested or ()), *tokens.ids.values()}))
    if indices == requested:
        return recipe, []
    trained = LoraSection(**{**lora.model_dump(), "trainable_token_indices": indices})
    return recipe.model_copy(update={"lora": trained}), [
        Change(
            "lora.trainable_token_indices",
            "null" if requested is None else str(list(requested)),
            str(list(indices)),
            "the embeddings of added tokens are trained beside the adapters",
        )
    ]


def _of_folder(folder: Path, section: TokenizerSection, cache: Path) -> NewTokens:
    """The tokens' ids, from the cache or from a child. Raises DataError and ResourceError as
    loading the tokenizer does."""
    tokens = section.add_tokens
    name = files.digest([token_cache.folder_fingerprint(folder), tokens])
    return WORKER.kept_reply(
        cache / "new_tokens" / f"{name}.json",
        NewTokens,
        AddTokens(folder, section.chat_template, tuple(tokens)),
        f"loads the tokenizer of {folder}",
    )
