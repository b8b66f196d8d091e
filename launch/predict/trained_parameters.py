"""The parameters that a recipe trains: those that model.freeze leaves, or with LoRA its adapters,
rows of embeddings, and copies of modules."""

from collections import deque
from collections.abc import Sequence

from launch.base.errors import ConfigError
from launch.base.text import suggestion
from launch.predict.parameters import (
    ALL_LINEAR,
    EMBEDDING,
    HEAD,
    Shapes,
    embedding,
    matrix_modules,
    modules_of,
    ties,
    total_elements,
)
from launch.schema.model_sections import LoraSection
from launch.schema.plan import ModelFamily

# Part of the name of a parameter of lora.modules_to_save: a copy in model.dtype, beside the frozen
# original
COPY = ".modules_to_save."
# parameters of a model, what trains them, and those that are trained: the last that were asked
# for, as a plan asks for the same hundreds of times
_recent: deque[tuple[Shapes, tuple[object, ...], Shapes]] = deque(maxlen=4)


def trainable_shapes(
    tensor_shapes: Shapes, freeze: Sequence[str], lora: LoraSection | None, family: ModelFamily
) -> Shapes:
    """The parameters that get gradients: those `freeze` leaves, or with LoRA its own
    (x.lora_A.weight) and no others.

    Raises ConfigError for an entry of `freeze`, `lora.target_modules` or `lora.modules_to_save`
    that matches nothing, and for modules that cannot be trained so.
    """
    facts = tuple(freeze), lora, family
    for parameters, its_facts, trainable in _recent:
        if parameters is tensor_shapes and its_facts == facts:
            return trainable
    trainable = _trainable_shapes(tensor_shapes, freeze, lora, family)
    _recent.append((tensor_shapes, facts, trainable))
    return trainable


def _trainable_shapes(
    tensor_shapes: Shapes, freeze: Sequence[str], lora: LoraSection | None, family: ModelFamily
) -> Shapes:
    frozen: set[str] = set()
    for entry in freeze:
        matched = {name for name in tensor_shapes if name == entry or name.startswith(f"{entry}.")}
        if not matched:
            modules = modules_of(tensor_shapes)
            raise ConfigError(
                f"model.freeze: {entry!r} matches no parameter; {suggestion(entry, modules)}"
            )
        frozen |= matched
    if lora is not None:
        trainable = _lora_shapes(tensor_shapes, lora, family)
        frozen_copies = [name for name in trainable if name.replace(COPY, ".") in frozen]
        if frozen_copies:
            module = frozen_copies[0].partition(COPY)[0]
            raise ConfigError(
                f"model.freeze freezes {module}, which lora.modules_to_save trains; leave it out of"
                " one of the two"
            )
        return trainable
    trainable = {name: shape for name, shape in tensor_shapes.items() if name not in frozen}
    if not trainable:
        raise ConfigError(f"model.freeze: {', '.join(freeze)} leave nothing to train; remove one")
    return trainable


def count(
    tensor_shapes: Shapes, freeze: Sequence[str], lora: LoraSection | None, family: ModelFamily
) -> tuple[int, int, int]:
    """(parameters without LoRA's, trainable parameters, LoRA's parameters); the third is part of
    the second."""
    trainable = total_elements(trainable_shapes(tensor_shapes, freeze, lora, family))
    return total_elements(tensor_shapes), trainable, 0 if lora is None else trainable


# ---- adapters
# ---------------------------------------------------------------------------


def _lora_shapes(tensor_shapes: Shapes, lora: LoraSection, family: ModelFamily) -> Shapes:
    targets = lora_targets(tensor_shapes, lora, family)
    copies = saved_modules(tensor_shapes, lora, family)
    adapters: Shapes = {}
    unmatched, replaced = set(targets), set[str]()
    for name, shape in tensor_shapes.items():
        module = name.removesuffix(".weight")
        hits = {target for target in targets if module == target or module.endswith(f".{target}")}
        if module == name or not hits or len(shape) != 2:
            continue
        # peft puts no adapter into a module of this name
        if any(f".{entry}." in f".{module}." for entry in lora.modules_to_save):
            replaced |= hits
            continue
        _refuse_copied_adapter(module, copies)
        unmatched -= hits
        # Conv1D and embeddings are (in, out), linears (out, in): the sum of A and B does not depend
        # on which is which
        adapters[f"{module}.lora_A.weight"] = (lora.r, shape[1])
        adapters[f"{module}.lora_B.weight"] = (shape[0], lora.r)
        if lora.use_dora:
            is_transposed = family.has_conv1d or EMBEDDING.search(name)
            adapters[f"{module}.lora_magnitude_vector.weight"] = (shape[1 if is_transposed else 0],)
    if lora.target_modules not in (None, ALL_LINEAR) and unmatched:
        entry = sorted(unmatched)[0]
        if entry in replaced:
            raise ConfigError(
                f"lora.target_modules: {entry!r} would get no adapter, because"
                " lora.modules_to_save trains all of its weights; leave it out of one of the two"
            )
        raise ConfigError(
            f"lora.target_modules: {entry!r} matches no linear layer;"
            f" {suggestion(entry, matrix_modules(tensor_shapes))}"
        )
    if replaced and not adapters:
        raise ConfigError(
            f"lora.modules_to_save: {', '.join(lora.modules_to_save)} leaves no layer for an"
            " adapter; name fewer modules, or leave the section lora out, which trains all weights"
        )
    adapters |= _trained_rows(tensor_shapes, lora, family)
    return adapters | _copied_shapes(tensor_shapes, copies, family)


def lora_targets(tensor_shapes: Shapes, lora: LoraSection, family: ModelFamily) -> tuple[str, ...]:
    """Names of the modules that get an adapter."""
    targets = lora.target_modules
    if targets not in (None, ALL_LINEAR):
        return tuple(targets)
    names = matrix_modules(tensor_shapes)
    return tuple(name for name in family.linear if name in names)


def _trained_rows(tensor_shapes: Shapes, lora: LoraSection, family: ModelFamily) -> Shapes:
    """The rows of the embedding, and of an output head that is not tied to it, that are trained
    beside the adapters."""
    if not lora.trainable_token_indices:
        return {}
    name = embedding(tensor_shapes)
    rows, width = tensor_shapes[name]
    if max(lora.trainable_token_indices) >= rows:
        raise ConfigError(
            f"lora.trainable_token_indices: {max(lora.trainable_token_indices)} is no id of a"
            f" token: the model's vocabulary has {rows:,} tokens, from 0"
        )
    modules = modules_of_rows(tensor_shapes, lora, family)
    if not modules:
        raise ConfigError(
            "lora.trainable_token_indices: lora.modules_to_save trains every row of"
            f" {name.removesuffix('.weight')}; leave one of the two out"
        )
    return {
        f"{module}.token_adapter.trainable_tokens_delta": (len(lora.trainable_token_indices), width)
        for module in modules
    }


def modules_of_rows(
    tensor_shapes: Shapes, lora: LoraSection, family: ModelFamily
) -> tuple[str, ...]:
    """The modules of which lora.trainable_token_indices trains rows: the embedding, and an output
    head that is not tied to it, without those of lora.modules_to_save."""
    # transformers 5 ties lm_head of a T5 to shared whatever the config says
    is_pair = family.is_encoder_decoder
    heads = [] if is_pair else [head for head in tensor_shapes if HEAD.search(head)]
    modules = [name.removesuffix(".weight") for name in (embedding(tensor_shapes), *heads)]
    copies = saved_modules(tensor_shapes, lora, family)
    if is_pair and "lm_head" in copies:
        raise ConfigError(
            "lora.modules_to_save: lm_head of an encoder-decoder cannot be trained beside added"
            " tokens (tokenizer.add_tokens, lora.trainable_token_indices): their rows are rows of"
            " both; leave one of the two out"
        )
    return tuple(module for module in modules if module not in copies)


# ---- copies of modules
# ---------------------------------------------------------------------------


def saved_modules(tensor_shapes: Shapes, lora: LoraSection, family: ModelFamily) -> dict[str, str]:
    """The modules that lora.modules_to_save copies and trains, and the entry that names each of
    them. As in peft, an entry names every module whose name ends with it.

    An output head that is tied to the embedding stands for it, except in an encoder-decoder.
    Source: peft 0.21 utils/other.py _set_trainable, tuners/lora/model.py
    _add_modules_to_save_to_tie. Raises ConfigError."""
    tied = ties(tensor_shapes, family)
    modules = modules_of({**tensor_shapes, **dict.fromkeys(tied, ())})
    copies: dict[str, str] = {}
    for entry in lora.modules_to_save:
        named = [module for module in modules if module.endswith(entry)]
        if not named:
            last_names = list(dict.fromkeys(module.rpartition(".")[2] for module in modules))
            raise ConfigError(
                f"lora.modules_to_save: {entry!r} matches no module with weights;"
                f" {suggestion(entry, last_names)}"
            )
        for module in named:
            _refuse_module(module, entry, tensor_shapes, family)
            source = tied.get(f"{module}.weight", "") if not family.is_encoder_decoder else ""
            copies.setdefault(source.removesuffix(".weight") or module, entry)
    for module, entry in copies.items():
        outer = next((other for other in copies if module.startswith(f"{other}.")), None)
        if outer is not None:
            raise ConfigError(
                f"lora.modules_to_save: {module} ({entry}) is part of {outer} ({copies[outer]}),"
                " which is copied with all that it contains; leave one of the two out"
            )
    return copies


def _refuse_module(module: str, entry: str, tensor_shapes: Shapes, family: ModelFamily) -> None:
    """Raise ConfigError for a module that peft cannot copy, or whose copy would not be used."""
    inner = [name for name in tensor_shapes if name.startswith(f"{module}.")]
    shared = {*family.tied, *family.tied.values()}
    parts = [name for name in shared if not HEAD.search(name)] if family.is_encoder_decoder else []
    is_tied = f"{module}.weight" in ties(tensor_shapes, family)
    obstacles = (
        (
            inner and all(name[len(module) + 1 :].split(".")[0].isdigit() for name in inner),
            f"{module}, a list of layers, which peft cannot copy; name its layers, e.g."
            f" {module.rpartition('.')[2]}.0",
        ),
        (
            any(part.startswith(f"{module}.") for part in parts),
            f"{module}, but the encoder and decoder of {family.model_type} share their embeddings,"
            " of which peft trains copies apart, or none; to train rows use tokenizer.add_tokens or"
            " lora.trainable_token_indices",
        ),
        (
            is_tied and f"{module}.bias" in tensor_shapes,
            f"{module}, whose weight is tied to the embeddings and which has a bias that peft would"
            " drop; leave it out",
        ),
    )
    for is_met, obstacle in obstacles:
        if is_met:
            raise ConfigError(f"lora.modules_to_save: {entry!r} matches {obstacle}")


def _refuse_copied_adapter(module: str, copies: dict[str, str]) -> None:
    """Raise ConfigError if a module with an adapter is copied, or part of a copy: peft compares
    whole names there, but ends of names for copies."""
    for other, entry in copies.items():
        if module == other or module.startswith(f"{other}."):
            raise ConfigError(
                f"lora.modules_to_save: {entry!r} also matches {other}, because peft compares the"
                f" ends of names, and {module} gets an adapter; write the full name"
            )


def _copied_shapes(tensor_shapes: Shapes, copies: dict[str, str], family: ModelFamily) -> Shapes:
    copied = {
        f"{module}{COPY}{name[len(module) + 1 :]}": shape
        for module in copies
        for name, shape in tensor_shapes.items()
        if name.startswith(f"{module}.")
    }
    for name, source in ties(tensor_shapes, family).items():  # the head of an encoder-decoder
        if (module := name.removesuffix(".weight")) in copies:
            copied[f"{module}{COPY}weight"] = tensor_shapes[source]
    return copied
