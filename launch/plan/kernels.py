"""Choice of the kernels of a step, from the recipe, the model, the cards and the packages; and a
line on each. Pure.

A kernel that the recipe names and that cannot work is refused. A kernel that the recipe leaves open
is used only if it computes the same function: the package flash_attn, then PyTorch's varlen_attn. A
run that goes on keeps the kernels that it began with, where they can work. TF32 rounds float32
products to 10 bits of mantissa, so it is on only if the recipe asks for it: TrainingArguments would
turn it on beside torch.compile, and containers do by TORCH_ALLOW_TF32_CUBLAS_OVERRIDE."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

from launch.base.errors import ConfigError, ResourceError
from launch.predict.facts import Installed
from launch.predict.time import rates
from launch.probe import architectures
from launch.schema.levers import ROWS, TRIED, Levers, requested
from launch.schema.machine import PREFER_CUDNN, Gpu
from launch.schema.model_sections import AttnImplementation
from launch.schema.modes import LaunchMode
from launch.schema.plan import ModelFamily, ModelSize, Strategy, Switch
from launch.schema.recipe import Recipe
from launch.schema.training_section import LIGER_LOSSES, Precision

FLASH, VARLEN = "flash_attention_2", "varlen_attn"
_FLASH_WIDEST = 256  # largest head_dim: flash_attn's README
_VARLEN_MULTIPLE = 8  # divisor of head_dim: mha_varlen_fwd in flash_attn/flash_api.cpp
# head_dim whose backward needs more shared memory than cards of these capabilities have:
# check_requires_grad_and_head_dim_gt192_constraints_on_sm86_89_or_120 in sdp_utils.cpp
_WIDE_HEADS = range(193, 225)
_LITTLE_SHARED_MEMORY = ("8.6", "8.7", "8.8", "8.9", "12.")
_ATTENTION_DROPOUT = ("attention_dropout", "attn_pdrop")  # keys of a config
EAGER, _ONLY_GPUS = "training.kernels: eager", "its kernels are for GPUs"
_SLOW_4_BITS = "4-bit layers of an H200 were not compiled after 130 s"
# The first step with compiled layers, two graphs of gpt2-small, took the slow host of an H200 40 s
# (benchmarks/results/gpu_speed.json, c4-ours-compiled).
COMPILE_S = 60
_WORTH_ROUNDING = 1.5  # peak of TF32 over float32's: 8 on an A100, 1 on a GeForce RTX 30


# ---- decided


def attention(
    recipe: Recipe,
    model: ModelSize,
    gpus: Sequence[Gpu],
    precision: Precision,
    no_package: str | None,
    no_torch: str | None = "",
    began: AttnImplementation | None = None,
    has_one_length: bool = False,
) -> AttnImplementation:
    """The implementation that the recipe names, or the first that can run: the one with which the
    run `began`, flash_attn's, PyTorch's varlen_attn, sdpa. For rows of one length, which need no
    mask, sdpa comes before where PyTorch prefers cuDNN's kernels.

    `gpus`: none on a CPU. `no_package`, `no_torch`: the reason why flash_attn and torch's
    varlen_attn cannot be used; "": the packages of the machine are not known. Raises ConfigError
    and ResourceError for a named implementation that cannot run."""
    requested, has_sdpa = recipe.model.attn_implementation, model.family.forward.has_sdpa
    if requested == "sdpa" and not has_sdpa:
        raise ConfigError(
            "model.attn_implementation: sdpa, but transformers has no sdpa for"
            f" {model.family.model_type}; leave it out, or write eager"
        )
    if requested not in (None, FLASH, VARLEN):
        return requested
    obstacles = {
        FLASH: no_flash(recipe, model, gpus, precision, no_package),
        VARLEN: no_varlen(recipe, model, gpus, precision, no_torch),
    }
    if requested and (reason := obstacles[requested]):
        kind = ConfigError if reason not in (no_package, no_torch) else ResourceError
        raise kind(
            f"model.attn_implementation: {requested}, but {reason}; leave it out: what can run is"
            " chosen then"
        )
    prefers_cudnn = bool(gpus) and all(gpu.architecture in PREFER_CUDNN for gpu in gpus)
    by_cudnn = has_one_length and has_sdpa and prefers_cudnn
    names = began, "sdpa" if by_cudnn else None, FLASH, VARLEN
    for name in (requested,) if requested else names:
        if name and obstacles.get(name) is None:
            return name
    return "sdpa" if has_sdpa else "eager"


def no_flash(
    recipe: Recipe,
    model: ModelSize,
    gpus: Sequence[Gpu],
    precision: Precision,
    no_package: str | None,
) -> str | None:
    """The reason why attention is not flash_attn's; None if it is, or would be."""
    is_asked = recipe.model.attn_implementation == FLASH
    return (
        _no_kernels("flash_attn", recipe, model, gpus, precision, is_asked)
        or first_met(
            (
                not is_asked and no_package == "",
                "whether flash_attn is installed there is not known",
            )
        )
        or no_package
        or None
    )


def no_varlen(
    recipe: Recipe,
    model: ModelSize,
    gpus: Sequence[Gpu],
    precision: Precision,
    no_torch: str | None,
) -> str | None:
    """The reason why attention cannot be torch's varlen_attn; None if it can.

    Source: torch/nn/attention/varlen.py and flash_attn/flash_api.cpp of PyTorch 2.13."""
    is_asked = recipe.model.attn_implementation == VARLEN
    if reason := _no_kernels(VARLEN, recipe, model, gpus, precision, is_asked):
        return reason
    width = _head_width(model.config)
    key = next((key for key in _ATTENTION_DROPOUT if key in model.config), "attention dropout")
    dropout = model.config.get(key, model.family.forward.attention_dropout)
    small = next((gpu for gpu in gpus if gpu.architecture.startswith(_LITTLE_SHARED_MEMORY)), None)
    obstacle = first_met(
        (dropout, f"{VARLEN} has no dropout, and the model's {key} is {dropout}"),
        (
            width % _VARLEN_MULTIPLE,
            f"{VARLEN} takes heads of a multiple of {_VARLEN_MULTIPLE}, these have {width}",
        ),
        (
            small and width in _WIDE_HEADS,
            f"{VARLEN} has no backward for heads of {width} on {small and small.name}",
        ),
        (not is_asked and no_torch == "", f"whether torch has {VARLEN} there is not known"),
    )
    return obstacle or no_torch or None


def first_met(*obstacles: tuple[Any, str]) -> str | None:
    """The reason of the first obstacle that is met; None: none is."""
    return next((reason for is_met, reason in obstacles if is_met), None)


def _no_kernels(
    name: Literal["flash_attn", "varlen_attn"],
    recipe: Recipe,
    model: ModelSize,
    gpus: Sequence[Gpu],
    precision: Precision,
    is_asked: bool,
) -> str | None:
    """The reason why flash kernels cannot run, those of the package or those of PyTorch."""
    model_type, width = model.config["model_type"], _head_width(model.config)
    lacking = _lacking(gpus, name)
    return first_met(
        (not gpus, f"{name} has kernels for GPUs only"),
        (
            not model.family.forward.flattens,
            f"rows of {model_type} are not flattened for {name}",
        ),
        (lacking, f"{name} has no kernels for {lacking}"),
        (
            precision == "no" and recipe.model.dtype == "float32",
            f"{name} computes in 16 bits only (training.bf16)",
        ),
        (
            width > _FLASH_WIDEST,
            f"{name} takes heads of at most {_FLASH_WIDEST}, these have {width}",
        ),
        (
            not is_asked and recipe.training.compiles,
            "torch.compile would compile anew for each length of flattened rows",
        ),
        (not is_asked and recipe.training.kernels, EAGER),
    )


def _lacking(gpus: Sequence[Gpu], feature: Literal["flash_attn", "varlen_attn", "tf32"]) -> str:
    """Name the first card whose architecture lacks a feature; "" if there is none."""
    lacking = (gpu for gpu in gpus if not getattr(architectures.look_up(gpu), feature))
    return next((f"{gpu.name} ({gpu.architecture})" for gpu in lacking), "")


def _head_width(config: Mapping[str, Any]) -> int:
    heads = (
        config.get("num_attention_heads") or config.get("n_head") or config.get("num_heads") or 1
    )
    return (
        config.get("head_dim") or (config.get("hidden_size") or config.get("n_embd") or 0) // heads
    )


def tf32(recipe: Recipe, gpus: Sequence[Gpu]) -> bool:
    """True if the recipe asks for rounded float32 products. Raises ConfigError if a card cannot."""
    is_asked = bool(recipe.training.extras.get("tf32"))
    lacking = _lacking(gpus, "tf32") if gpus else "a CPU"
    if is_asked and lacking:
        raise ConfigError(f"training.tf32: true, but {lacking} has no TF32; drop it")
    return is_asked


def liger(
    recipe: Recipe,
    family: ModelFamily,
    mode: LaunchMode,
    gpus: Sequence[Gpu],
    no_package: str | None,
    began: bool | None = None,
) -> tuple[bool, ...]:
    """The values that the plan tries: True lets Liger's kernels replace modules of transformers.
    Raises ConfigError and ResourceError if they are asked for and cannot."""
    requested = recipe.training.use_liger_kernel
    config = recipe.training.extras.get("liger_kernel_config") or {}
    lacking = config.keys() - {*family.liger, *LIGER_LOSSES}
    if family.liger and lacking:
        raise ConfigError(
            f"training.liger_kernel_config: {', '.join(sorted(lacking))}, but liger-kernel's"
            f" kernels for a {family.model_type} are {', '.join(family.liger)}; leave it out"
        )
    if loss := next((name for name in LIGER_LOSSES if config.get(name)), None):
        raise ConfigError(
            f"training.liger_kernel_config: {loss}: true, but the loss is not the model's"
            " here; leave it out: training.num_output_chunks makes the logits in parts, with the"
            " same sum"
        )
    if requested is None:
        if no_liger(recipe, family, mode, gpus, no_package) is not None:
            return (False,)
        return (False, True) if began is None else (began,)
    if requested and not gpus:
        raise ConfigError(f"training.use_liger_kernel: true, but {_ONLY_GPUS}; leave it out")
    if requested and no_package:
        raise ResourceError(f"training.use_liger_kernel: true, but {no_package}; or leave it out")
    return (requested,)


def no_liger(
    recipe: Recipe,
    family: ModelFamily,
    mode: LaunchMode,
    gpus: Sequence[Gpu],
    no_package: str | None,
) -> str | None:
    """The reason why a plan does not choose Liger's kernels by itself; None: it may."""
    lacking = _lacking(gpus, "varlen_attn")
    obstacle = first_met(
        (not gpus, _ONLY_GPUS),
        (not family.liger, f"liger-kernel has no kernels for a {family.model_type}"),
        (recipe.training.kernels, EAGER),
        (recipe.training.compiles, "torch.compile fuses kernels itself"),
        (recipe.training.fused_norms, "training.fused_norms: true"),
        (not mode.is_whole, f"they have not been tested with {mode.engine}"),
        (lacking, f"they are for NVIDIA cards from 8.0 on, not {lacking}"),
        (no_package == "", "whether liger-kernel is installed there is not known"),
    )
    return obstacle or no_package


def compiles(recipe: Recipe, no_compiler: str | None, began: Levers | None) -> bool:
    """True if layers are compiled because the recipe says so, or the run began so."""
    asked = recipe.training.compiles
    return not no_compiler and bool(asked if asked is not None else began and began.torch_compile)


def no_compile(
    recipe: Recipe,
    family: ModelFamily,
    mode: LaunchMode,
    gpus: Sequence[Gpu],
    no_compiler: str | None,
) -> str | None:
    """The reason why a plan does not choose torch.compile by itself; None: it may."""
    training, asked = recipe.training, requested(recipe)
    has_others = asked.use_liger_kernel or asked.fused_norms or asked.fused_adapters
    lacking = _lacking(gpus, "varlen_attn")
    obstacle = first_met(
        (training.compiles is not None, no_compiler or "not asked for"),
        (not gpus, "chosen on GPUs only"),
        (training.kernels, EAGER),
        (has_others or asked.flattens, "other kernels are asked for"),
        (training.extras.get("full_determinism"), "training.full_determinism: true"),
        # benchmarks/results/gpu_speed.md, c3-ours-compiled
        (recipe.quantization, _SLOW_4_BITS),
        (family.is_encoder_decoder, "its two kinds of layers want more graphs than torch makes"),
        (not family.forward.has_sdpa, "not tested without sdpa"),
        (not mode.is_whole, f"not tested with {mode.engine}"),
        (lacking, f"chosen on NVIDIA cards from 8.0 on, not on {lacking}"),
        (no_compiler == "", "whether code can be compiled there is not known"),
    )
    return obstacle or no_compiler


def _unless_refused(
    name: str, recipe: Recipe, mode: LaunchMode, reason: str | None, began: Levers | None
) -> bool:
    """True for a lever that is on unless there is a reason against it, the recipe says no, or the
    run began without it. Raises ConfigError if the recipe says yes, and the reason stands against
    it."""
    row = ROWS[name]
    requested = row.requested(recipe)
    if requested and reason and mode.is_whole:  # else the lever's row refuses the mode
        raise ConfigError(f"{row.key}: true, but {reason}; leave it out")
    if requested is None:
        return reason is None and (began is None or row.read(began))
    return requested


def fused_adapters(
    recipe: Recipe, mode: LaunchMode, precision: Precision, began: Levers | None = None
) -> bool:
    """True if adapters compute with their layers."""
    return _unless_refused(
        "fused_adapters", recipe, mode, no_fused_adapters(recipe, mode, precision), began
    )


def no_fused_adapters(recipe: Recipe, mode: LaunchMode, precision: Precision) -> str | None:
    """The reason why adapters compute beside their layers, as PEFT does it; None: they do not."""
    lora = recipe.lora
    return first_met(
        (lora is None, "there is no lora"),
        (lora and lora.use_dora, "DoRA scales the sum of weights"),
        (lora and lora.lora_dropout, "dropout draws another input for the adapters"),
        (precision == "no", "they are fused under autocast (training.bf16)"),
        (not mode.is_whole, f"{mode.engine} casts the weights of adapters itself"),
        (recipe.training.compiles, "torch.compile fuses kernels itself"),
        (lora and lora.fused_adapters is None and recipe.training.kernels, EAGER),
    )


def fused_norms(
    recipe: Recipe,
    model: ModelSize,
    mode: LaunchMode,
    gpus: Sequence[Gpu],
    has_liger: bool = False,
    began: Levers | None = None,
) -> bool:
    """True if RMS norms are computed by PyTorch's kernel."""
    return _unless_refused(
        "fused_norms", recipe, mode, no_fused_norms(recipe, model, mode, gpus, has_liger), began
    )


def no_fused_norms(
    recipe: Recipe, model: ModelSize, mode: LaunchMode, gpus: Sequence[Gpu], has_liger: bool = False
) -> str | None:
    """The reason why norms are those of transformers; None: they are not."""
    return first_met(
        (not gpus, "CPUs have no kernel for it"),
        (not model.family.forward.has_rms_norms, f"{model.config['model_type']} has other norms"),
        (has_liger, "Liger has its own"),
        (recipe.training.compiles, "torch.compile fuses kernels itself"),
        (recipe.training.fused_norms is None and recipe.training.kernels, EAGER),
        (not mode.is_whole, f"it has not been tested with {mode.engine}"),
    )


# ---- explained


def switches(
    recipe: Recipe,
    model: ModelSize,
    chosen: Strategy,
    gpus: Sequence[Gpu],
    installed: Installed,
    began: Levers | None,
) -> Iterator[Switch]:
    """A row for each switch of the chosen strategy; its effect is measured in
    tests/modes/trace/test_switches.py. `began`: the levers of the run that goes on."""
    mode, as_begun = chosen.launch_mode, "as the run began" if began else ""
    yield Switch("precision", precision(recipe, chosen), _why_precision(recipe, chosen))
    if gpus and (
        chosen.tf32 or (chosen.mixed_precision == "no" and recipe.model.dtype == "float32")
    ):
        yield Switch("tf32", _on(chosen.tf32), _why_tf32(recipe, chosen, gpus))
    yield Switch(
        "attention",
        chosen.levers.attn_implementation,
        (as_begun if recipe.model.attn_implementation is None else "")
        or _why_attention(
            recipe, model, chosen, gpus, installed.no_flash_attn, installed.no_varlen_attn
        ),
    )
    if gpus:
        reason = no_liger(recipe, model.family, mode, gpus, installed.no_liger)
        yield _liger_switch(recipe, chosen, reason or as_begun)
    yield from _fused_switches(recipe, model, chosen, gpus, as_begun)
    optimizer = ROWS["optim"]
    yield Switch(optimizer.switch, chosen.levers.optim, optimizer.text(chosen.levers.optim))
    yield from _tried_switches(recipe, chosen, gpus, installed)
    reason = no_compile(recipe, model.family, mode, gpus, installed.no_compiler)
    yield _compile_switch(recipe, chosen, reason, as_begun)


def _liger_switch(recipe: Recipe, chosen: Strategy, reason: str) -> Switch:
    is_on = chosen.levers.use_liger_kernel
    why = reason or ("faster" if is_on else "not faster")
    if recipe.training.use_liger_kernel is not None:
        why = "asked for"
    return Switch("liger", _on(is_on), f"{why}; the loss stays ours" if is_on else why)


def _fused_switches(
    recipe: Recipe, model: ModelSize, chosen: Strategy, gpus: Sequence[Gpu], as_begun: str
) -> Iterator[Switch]:
    mode, has_liger = chosen.launch_mode, chosen.levers.use_liger_kernel
    for is_shown, name, reason, why in (
        (
            recipe.lora,
            "fused_adapters",
            no_fused_adapters(recipe, mode, chosen.mixed_precision),
            "fewer kernels and bytes; their sum is rounded once",
        ),
        (
            gpus,
            "fused_norms",
            no_fused_norms(recipe, model, mode, gpus, has_liger),
            "computed in float32, rounded once",
        ),
    ):
        row = ROWS[name]
        off = reason or (as_begun if row.requested(recipe) is None else "asked for")
        if is_shown:
            yield Switch(
                row.switch, row.says(chosen.levers), why if row.read(chosen.levers) else off
            )


def _tried_switches(
    recipe: Recipe, chosen: Strategy, gpus: Sequence[Gpu], installed: Installed
) -> Iterator[Switch]:
    """The levers that save memory, but for those that are said beside the batch, and elsewhere."""
    for row in TRIED:
        requested, value = row.requested(recipe), row.read(chosen.levers)
        if (
            row.name in ("batch_by_tokens", "use_liger_kernel", "torch_compile")
            # a CPU has no other place for activations
            or (row.name == "activation_offloading" and not gpus)
            # all weights are on the device
            or (row.name == "streamed_layers" and requested is None and not value)
        ):
            continue
        by = _by(requested == value, value != row.plain)
        if (
            row.name == "every_n_layers"
            and value
            and installed.no_every_n_layers
            and requested is None
        ):
            by += f"; {installed.no_every_n_layers}"
        yield Switch(row.switch, row.says(chosen.levers), by)


def _compile_switch(recipe: Recipe, chosen: Strategy, reason: str | None, as_begun: str) -> Switch:
    is_on, why = chosen.levers.torch_compile, reason or as_begun or "not faster"
    if is_on:
        planned = f"faster; compiling takes about {COMPILE_S:g} s at the start"
        why = (
            f"{'asked for' if recipe.training.compiles else as_begun or planned}: training steps,"
            " not evaluations; memory is predicted of steps that are not compiled"
        )
    if is_on and recipe.quantization:
        why += f"; {_SLOW_4_BITS}"
    return Switch("compile", _on(is_on), why)


def precision(recipe: Recipe, chosen: Strategy) -> str:
    """The number type of products, and the way to it."""
    if chosen.mixed_precision == "no":
        return recipe.model.dtype
    return (
        f"{chosen.mixed_precision}"
        f" {'weights, float32 copies' if chosen.launch_mode.engine == 'deepspeed' else 'autocast'}"
    )


def _on(value: bool) -> str:
    return "on" if value else "off"


def _by(is_asked: bool, is_on: bool) -> str:
    return "asked for" if is_asked else "planned, see below" if is_on else "not needed"


def _why_precision(recipe: Recipe, chosen: Strategy) -> str:
    if chosen.mixed_precision == "no":
        return "model.dtype; neither training.bf16 nor fp16 is on"
    requested = "bf16" if recipe.training.bf16 else "fp16"
    lacks = "" if requested == chosen.mixed_precision else ", which the card lacks"
    rounds = (
        f"; ranks exchange weights in {chosen.mixed_precision}: unlike DDP, norms and embeddings"
        " are rounded to it"
        if chosen.launch_mode.engine == "fsdp2"
        else ""
    )
    return f"training.{requested}{lacks}{rounds}"


def _why_tf32(recipe: Recipe, chosen: Strategy, gpus: Sequence[Gpu]) -> str:
    if chosen.tf32:
        is_wide = chosen.mixed_precision == "no" and recipe.model.dtype == "float32"
        return "asked for: float32 products have 10 bits of mantissa" + (
            "" if is_wide else f"; under {chosen.mixed_precision} few are left"
        )
    if recipe.training.extras.get("tf32") is not None:
        return "asked for"
    if lacking := _lacking(gpus, "tf32"):
        return f"{lacking} has no TF32"
    peak = rates.card(gpus[0]).flops_per_s
    times = peak.get("tfloat32", peak["float32"]) / peak["float32"]
    if times < _WORTH_ROUNDING:
        return "not asked for; this card's tensor cores compute it no faster than float32"
    return (
        f"not asked for; --training.tf32=true: products with 10 bits of mantissa, up to {times:.0f}"
        " x as fast"
    )


def _why_attention(
    recipe: Recipe,
    model: ModelSize,
    chosen: Strategy,
    gpus: Sequence[Gpu],
    no_package: str | None,
    no_torch: str | None,
) -> str:
    facts = recipe, model, gpus, chosen.mixed_precision
    without_flash = no_flash(*facts, no_package)
    if chosen.levers.flattens:
        source = "flash_attn is there"
        if recipe.model.attn_implementation:
            source = "asked for"
        elif chosen.levers.attn_implementation == VARLEN:
            source = f"PyTorch's own flash kernels ({without_flash})"
        return f"{source}; rows follow one another: no mask, no padding between them"
    if chosen.levers.attn_implementation == "eager":
        why = "asked for" if recipe.model.attn_implementation else "transformers has no sdpa for it"
        return f"{why}; a layer holds its scores, batch x heads x length^2"
    if recipe.model.attn_implementation:
        return "asked for"
    if chosen.levers.torch_compile and recipe.training.compiles is None:
        return "PyTorch's own kernels: flattened rows would be compiled anew for each length"
    obstacles = [without_flash]
    if no_flash(*facts, None) is None:  # the package alone is lacking
        obstacles.append(no_varlen(*facts, no_torch))
    if None in obstacles:
        return "cuDNN's kernels: the rows have one length, and need neither mask nor padding"
    return "; ".join(["PyTorch's own kernels", *filter(None, obstacles)])
