"""Facts that a plan is chosen with, and the checks of lengths, packing and chunks that need
them."""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from launch.base.errors import ConfigError
from launch.data import token_cache
from launch.plan import candidates
from launch.predict import optimizers, trained_parameters
from launch.predict import parameters as predict_parameters
from launch.predict.budgets import host_budget_bytes
from launch.predict.facts import Facts, Installed, Model, Rows
from launch.predict.memory import host_memory, stored_weights
from launch.predict.memory.largest_batches import LargestBatches
from launch.schema import levers
from launch.schema.data_section import DataSection
from launch.schema.machine import Machine
from launch.schema.plan import DataFormat, ModelFamily, ModelSize
from launch.schema.recipe import Recipe

# types whose positions are distances: rows may be longer than what their configs name
_RELATIVE_POSITIONS = ("t5", "mt5", "umt5", "longt5")


def model_size(
    recipe: Recipe,
    config: dict[str, Any],
    parameters: predict_parameters.Shapes,
    family: ModelFamily,
) -> ModelSize:
    """Count the parameters of a recipe's model."""
    counted = parameters, recipe.model.freeze, recipe.lora, family
    trainable = trained_parameters.trainable_shapes(*counted)
    size = ModelSize(
        recipe.model.shape or str(recipe.model.path),
        config,
        *trained_parameters.count(*counted),
        tensors=len(parameters),
        trained_tensors=len(trainable),
        family=family,
    )
    if recipe.lora is None:
        return size
    shared = predict_parameters.ties(parameters, family).values()
    tied = {
        part: of
        for part, of in trainable.items()
        if part.replace(trained_parameters.COPY, ".") in shared
    }
    quantization = recipe.quantized(candidates.asked_precision(recipe))
    lora_bytes, tied_bytes = (
        optimizers.trained_bytes(parts, recipe.lora, recipe.model.dtype, quantization, family)
        for parts in (trainable, tied)
    )
    return replace(size, lora_bytes=lora_bytes, tied_copy_bytes=tied_bytes)


def build(
    recipe: Recipe,
    machine: Machine,
    config: dict[str, Any],
    parameters: predict_parameters.Shapes,
    family: ModelFamily,
    data_format: DataFormat,
) -> Facts:
    """Build the facts that all candidates share. Raises ConfigError for a recipe that no candidate
    can run."""
    return Facts(recipe, machine, _model(recipe, config, parameters, family), Rows(data_format))


def _model(
    recipe: Recipe,
    config: dict[str, Any],
    parameters: predict_parameters.Shapes,
    family: ModelFamily,
) -> Model:
    for line in (*_refused(recipe, config, family), *levers.refused(recipe, family)):
        raise ConfigError(line)
    states = optimizers.model_state(
        parameters,
        recipe.model.freeze,
        recipe.lora,
        family,
        recipe.training.optim,
        recipe.model.dtype,
        recipe.quantized(candidates.asked_precision(recipe)),
    )
    return Model(
        model_size(recipe, config, parameters, family),
        parameters,
        states,
        select_lora_targets(recipe, family, parameters),
    )


def as_folder(facts: Facts) -> Facts:
    """The facts of a named shape, with weights as in the folder that is trained later."""
    note = (
        f"host RAM is that of a folder of {facts.model.size.name} in"
        f" {stored_weights.USUAL_DTYPE}, as model.path names it; a start of this shape builds"
        " random weights there first"
    )
    data_format = replace(facts.rows.format, notes=(*facts.rows.format.notes, note))
    return replace(
        facts,
        model=replace(facts.model, stored=stored_weights.of_shape(facts.model.parameters)),
        rows=replace(facts.rows, format=data_format),
    )


def with_recipe(facts: Facts, recipe: Recipe) -> Facts:
    """The facts for another recipe on the same model and data files, with other adapters,
    precision, launch section or max_length."""
    before, size = facts.model, facts.model.size
    model = replace(
        _model(recipe, dict(size.config), before.parameters, size.family),
        stored=before.stored,
        base_fingerprint=before.base_fingerprint,
    )
    changed = replace(
        facts,
        recipe=recipe,
        model=model,
        traces=facts.traces and facts.traces.for_recipe(recipe, model.size, model.lora_targets),
    )
    rows = facts.rows
    if recipe.data == facts.recipe.data or rows.tokens is None:
        return changed
    source, target = (min(length, recipe.data.max_length) for length in rows.lengths)
    tokens = token_cache.token_cache(
        rows.tokens.folder.parent.parent, recipe, model.size, rows.format
    )
    rows = replace(
        rows,
        tokens=replace(tokens, rows=rows.count),
        lengths=(source, target),
        counts=None,
        eval_counts=None,
        largest_batches=None,
    )
    return replace(changed, rows=with_counts(rows))


def with_counts(rows: Rows) -> Rows:
    """The rows with the lengths that tokenising has counted; unchanged while they are not there,
    and for a recipe that streams its rows."""
    assert rows.tokens is not None
    if rows.rows_of is not None:
        return rows
    folder = rows.tokens.folder
    counts = token_cache.counts(folder)
    if counts is None:
        return rows
    if note := counts.get("tokenizer_note"):
        notes = tuple(dict.fromkeys([note, *rows.format.notes]))
        rows = replace(rows, format=replace(rows.format, notes=notes))
    if "train" not in counts:
        return rows
    parts = [part for part in counts.values() if isinstance(part, dict)]
    longest_input = max(part["longest_input"] for part in parts)
    return replace(
        rows,
        lengths=(longest_input, max(part["longest_target"] for part in parts)),
        is_ragged=any(part["shortest_input"] < longest_input for part in parts),
        counts=counts["train"],
        eval_counts=counts.get("validation"),
        held_out=counts["validation"]["rows"] if "validation" in counts else None,
        largest_batches=LargestBatches(
            folder, folder.parent.parent / "micro_batches", counts["train"]["rows"]
        ),
    )


def of_length(rows: Rows, data: DataSection, tokens: int) -> Rows:
    """Rows that all have this number of tokens, whatever the files hold. Raises ConfigError for a
    number that the recipe's rows cannot have."""
    if tokens > data.max_length:
        raise ConfigError(
            f"--rows-of {tokens:,}: data.max_length is {data.max_length:,}, and longer rows are"
            f" truncated to it; expected at most {data.max_length:,}, or raise data.max_length"
        )
    if data.packing:
        raise ConfigError(
            f"--rows-of {tokens:,} beside data.packing: true, which joins rows to sequences of up"
            f" to data.max_length {data.max_length:,} tokens; leave one of the two out"
        )
    return replace(
        rows,
        rows_of=tokens,
        lengths=(tokens, tokens),
        is_ragged=False,
        counts=None,
        eval_counts=None,
        largest_batches=None,
    )


def tokenising_processes(recipe: Recipe, machine: Machine, installed: Installed) -> int:
    """The number of processes that may tokenise the rows side by side."""
    return host_memory.tokenising_processes(
        recipe.data,
        installed.import_memory,
        machine.cpu_count,
        host_budget_bytes(recipe, machine),
    )


def _refused(recipe: Recipe, config: dict[str, Any], family: ModelFamily) -> Iterator[str]:
    """The reasons why no candidate can have rows as long as asked for, or packed."""
    positions = config.get("n_positions") or config.get("max_position_embeddings")
    if (
        config["model_type"] not in _RELATIVE_POSITIONS
        and positions is not None
        and recipe.data.max_length > positions
    ):
        yield (
            f"data.max_length {recipe.data.max_length}, but the model has {positions} positions;"
            " lower it, or choose another model"
        )
    if recipe.data.packing and family.is_encoder_decoder:
        yield (
            f"data.packing: true, but the model is a {family.model_type}: its encoder attends both"
            " ways and its decoder to all of the encoder's output, and transformers keeps documents"
            " apart in neither; use data.group_by_length or data.batch_by_tokens"
        )


def copied_modules(
    recipe: Recipe, parameters: predict_parameters.Shapes, family: ModelFamily
) -> Iterator[str]:
    """Yield lines of the plan on the modules that lora.modules_to_save trains."""
    if recipe.lora is None or not recipe.lora.modules_to_save:
        return
    copies = trained_parameters.saved_modules(parameters, recipe.lora, family)
    names = ", ".join(
        name if count == 1 else f"{name} ({count} modules)"
        for name, count in Counter(module.rpartition(".")[2] for module in copies).items()
    )
    heads = predict_parameters.ties(parameters, family)
    yield (
        f"lora.modules_to_save: all weights of {names} are trained, as copies in"
        f" {recipe.model.dtype}"
    )
    if family.is_encoder_decoder and "lm_head" in copies and "lm_head.weight" in heads:
        yield "lora.modules_to_save: lm_head is no longer tied to the embeddings"
    elif any(f"{module}.weight" in heads.values() for module in copies):
        yield (
            "lora.modules_to_save: the output head is tied to the embeddings, so one copy is"
            " trained as both"
        )


def own_head(family: ModelFamily, parameters: predict_parameters.Shapes) -> tuple[str, ...]:
    """A line of the plan on a head whose weights are not the embeddings, which the config ties."""
    heads = [name for name in family.tied if name in parameters and not family.is_encoder_decoder]
    return tuple(
        f"{head} of the weights differs from the embeddings, to which config.json ties it: it is"
        " trained apart, and exported with tie_word_embeddings: false"
        for head in heads
    )


def exported_dtype(recipe: Recipe, config: Mapping[str, Any]) -> tuple[str, ...]:
    """A line of the plan where the model is exported in another type than it is trained in."""
    dtype, trained = recipe.output_dtype(config), recipe.model.dtype
    if dtype == trained or (recipe.lora and recipe.model.path):
        return ()
    origin = "model.output_dtype" if recipe.model.output_dtype else "as config.json says"
    return (
        f"the weights are rounded to {dtype} for the export, {origin}; trained in {trained}, which"
        f" --model.output_dtype={trained} keeps",
    )


def select_lora_targets(
    recipe: Recipe, family: ModelFamily, parameters: predict_parameters.Shapes
) -> tuple[str, ...]:
    """Last names of the modules that get adapters. Raises ConfigError for the embeddings of an
    encoder-decoder: its parts have modules of their own with that weight."""
    if recipe.lora is None:
        return ()
    targets = trained_parameters.lora_targets(parameters, recipe.lora, family)
    for source in family.tied.values() if family.is_encoder_decoder else ():
        if (module := source.removesuffix(".weight").rpartition(".")[2]) in targets:
            raise ConfigError(
                f"lora.target_modules: {module!r} is the embeddings that the encoder, the decoder"
                f" and the output head of {family.model_type} share, and an adapter on it would"
                " reach none of them; leave it out: tokenizer.add_tokens and"
                " lora.trainable_token_indices train rows of it"
            )
    return tuple(
        target
        for target in targets
        if any(name.endswith(f".{target}.weight") for name in parameters)
    )
