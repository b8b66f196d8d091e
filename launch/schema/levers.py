"""Levers: choices of a plan that change what a step holds or how fast it computes, and not what it
trains. A lever is a field of Levers, a row of LEVERS and a module of training/levers/, beside the
key of the recipe that asks for it. Pure."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple

from pydantic import Field, field_validator, model_validator

from launch.schema.model_sections import AttnImplementation
from launch.schema.modes import Device, LaunchMode
from launch.schema.section import Section, affects

if TYPE_CHECKING:
    from launch.schema.plan import ForwardFacts, ModelFamily
    from launch.schema.recipe import Recipe

PLANNED = affects("memory", "step_time", "planned")
KWARGS = "training.activation_checkpointing_kwargs"

# part of an optimizer's name, its way to update
UPDATES = (
    (
        "8bit",
        "bitsandbytes: states of 8 bits where a tensor has 4,096 elements, of embeddings and"
        " smaller ones 32",
    ),
    ("paged", "bitsandbytes: states of 32 bits, moved to host RAM where VRAM is short"),
    ("fused", "weights and states of many tensors updated in one kernel"),
    ("adamw_torch", "many tensors at once, a kernel for each operation"),
)


# Slots on the device for streamed layers: one computes while the next one comes
SLOTS = 2
# Bytes to which a weight is aligned in a slot: those of a block of the device's allocator, so that
# the same kernels run
_ALIGNMENT_BYTES = 512


# ---- keys of a recipe's section `training`


class CheckpointingKwargs(Section):
    """The keywords of activation checkpointing: of activation_checkpointing_enable(), then of
    torch.utils.checkpoint."""

    every_n_layers: int | None = Field(default=None, ge=1)  # None: every layer, or planned
    offload: bool | None = None  # None: no, or planned
    use_reentrant: bool = False
    preserve_rng_state: bool = True
    determinism_check: Literal["default", "none"] = "default"

    @property
    def arguments(self) -> dict[str, Any]:
        """Those of torch.utils.checkpoint that are not the default. It asks for use_reentrant
        beside any other."""
        options = self.model_dump(exclude_defaults=True, exclude={"every_n_layers", "offload"})
        return {"use_reentrant": self.use_reentrant, **options} if options else {}


class LeverKeys(Section):
    """The levers' own keys."""

    activation_checkpointing: Annotated[bool, PLANNED] = Field(
        default=False,
        description="Recompute activations in the backward pass instead of storing them.",
    )
    activation_checkpointing_kwargs: Annotated[CheckpointingKwargs, PLANNED] = Field(
        default=CheckpointingKwargs(),
        description="`every_n_layers`: checkpoint the first of every n layers; null: all, or"
        " planned if `activation_checkpointing` is. `offload`: keep what is checkpointed in pinned"
        " host memory; null: no, or planned where nothing else fits. Either of them turns"
        " `activation_checkpointing` on. `use_reentrant`, `preserve_rng_state` and"
        " `determinism_check` go to `torch.utils.checkpoint`.",
    )
    num_output_chunks: Annotated[int | None, PLANNED] = Field(
        default=None,
        ge=1,
        le=1024,
        description="Parts in which the loss computes the logits, to save memory. null: planned.",
    )
    logits_at_targets: Annotated[bool | None, PLANNED] = Field(
        default=None,
        description="Compute the logits only of positions that predict a token with a loss, not of"
        " prompts and padding. The loss is the same. null: planned.",
    )
    tiled_mlp_num_shards: Annotated[int | None, PLANNED] = Field(
        default=None,
        ge=1,
        le=1024,
        description="Parts of the tokens that go through each layer's MLP one after another, and"
        " again in backward, to save memory with long rows. The result is the same. 1: all tokens"
        " at once. null: planned.",
    )

    streamed_layers: Annotated[int | None, PLANNED] = Field(
        default=None,
        ge=0,
        description="Decoder layers whose frozen weights stay in pinned host RAM, beside `lora`:"
        " each is copied to the device before it computes, while another does. The result is the"
        " same. Two of them are on the device at any time, so that 3 is the least number; 0: none."
        " null: planned where nothing else fits.",
    )
    fused_norms: Annotated[bool | None, PLANNED] = Field(
        default=None,
        description="Compute RMS norms on GPUs by PyTorch's kernel, in float32, and round once."
        " null: planned.",
    )
    use_liger_kernel: Annotated[bool | None, PLANNED] = Field(
        default=None,
        description="Compute norms, rotary embedding and gated MLPs on GPUs by Liger's kernels."
        " null: planned.",
    )
    torch_compile: Annotated[bool | None, PLANNED] = Field(
        default=None,
        description="Compile each layer of the decoder in training steps. `torch_compile_backend`"
        " and `torch_compile_mode` turn it on too. null: planned.",
    )
    kernels: Annotated[Literal["eager"] | None, PLANNED] = Field(
        default=None,
        description="`eager`: the layers compute as transformers' and PEFT's modules do, with sdpa;"
        " a kernel that another key names runs all the same. null: planned.",
    )

    @model_validator(mode="before")
    @classmethod
    def checkpoints_what_keywords_name(cls, values: Any) -> Any:
        """Keywords that name layers or a place to keep them, and layers that are streamed, ask for
        checkpointing too."""
        if not isinstance(values, dict) or "activation_checkpointing" in values:
            return values
        kwargs = values.get("activation_checkpointing_kwargs")
        if isinstance(kwargs, CheckpointingKwargs):
            kwargs = kwargs.model_dump()
        named = isinstance(kwargs, dict) and (kwargs.get("every_n_layers") or kwargs.get("offload"))
        if named or values.get("streamed_layers"):
            return {**values, "activation_checkpointing": True}
        return values

    @field_validator("streamed_layers")
    @classmethod
    def more_than_the_slots(cls, value: int | None) -> int | None:
        if value and value <= SLOTS:
            raise ValueError(
                f"{SLOTS} streamed layers are on the device at any time, so that {value} would save"
                f" nothing; stream {SLOTS + 1} or more, or 0"
            )
        return value

    @field_validator("activation_checkpointing_kwargs", mode="before")
    @classmethod
    def no_keywords(cls, value: Any) -> Any:
        return {} if value is None else value  # null: TrainingArguments' default


# ---- values of a plan


@dataclass(frozen=True)
class Levers:
    """The value of each lever; the defaults are those of a plain step."""

    attn_implementation: AttnImplementation = "sdpa"
    use_liger_kernel: bool = False
    torch_compile: bool = False
    # decoder layers whose frozen weights are in host memory, and come to the device one by one
    streamed_layers: int = 0
    every_n_layers: int = 0  # one layer in this many is checkpointed; 0: none
    activation_offloading: bool = False  # checkpointed activations are kept in host memory
    # the tokens of a micro-batch go through each MLP in this many parts, one after another
    tiled_mlp_num_shards: int = 1
    fused_norms: bool = False  # RMS norms by one kernel of PyTorch
    fused_adapters: bool = False  # products of adapters are added to those of their layers
    # the positions are divided into this many parts, whose logits are computed one after another
    num_output_chunks: int = 1
    logits_at_targets: bool = False  # the other positions get no logits
    # the rows of a step are sorted by length, and a micro-batch limited by its tokens
    batch_by_tokens: bool = False
    optim: str = "adamw_torch_fused"  # TrainingArguments' name

    @property
    def checkpointed_share(self) -> float:
        """Of the layers, those whose activations are computed again."""
        return 1 / self.every_n_layers if self.every_n_layers else 0.0

    @property
    def flattens(self) -> bool:
        """True if the rows of a micro-batch follow one another in a single row: the kernels of
        attention get the documents' starts, and need no mask."""
        return self.attn_implementation in ("flash_attention_2", "varlen_attn")

    @property
    def recorded(self) -> dict[str, Any]:
        """The values that decide what a recorded step does."""
        return {row.name: row.read(self) for row in LEVERS if row.is_recorded}

    def streamed_of(self, num_layers: int) -> list[int]:
        """The layers that are streamed, of so many: as far from one another as can be, so that the
        layers between them compute while one is copied."""
        count = self.streamed_layers
        return [
            index
            for index in range(num_layers)
            if (index + 1) * count // num_layers > index * count // num_layers
        ]

    def without(self, name: str) -> "Levers":
        """The same with a lever off; without checkpointing nothing is kept on the host, or
        streamed."""
        both = {"every_n_layers": 0, "activation_offloading": False, "streamed_layers": 0}
        return replace(self, **(both if name == "every_n_layers" else {name: ROWS[name].plain}))

    def saves_as_much_as(self, other: "Levers") -> bool:
        """True if no lever saves less memory here than there."""
        return all(row.saved(row.read(self)) >= row.saved(row.read(other)) for row in TRIED)


def read_levers(values: Mapping[str, Any]) -> dict[str, Any]:
    """A strategy's values, whose levers an older version wrote beside the others."""
    if "levers" in values:
        return dict(values)
    names = [name for name in ROWS if name in values]
    levers = {"every_n_layers": 1, **{name: values[name] for name in names}}
    if not values.get("activation_checkpointing"):
        levers["every_n_layers"] = 0
    return {**{key: value for key, value in values.items() if key not in names}, "levers": levers}


# ---- rows

Refused = Callable[[Levers, "ModelFamily"], str | None]
_NOT_COMPILED = "torch.compile compiles layers, of which this has not been tested; leave one out"
# least tokens per part of an MLP: a card computes smaller products at a lower rate
_LEAST_TOKENS = 1024


class Around(NamedTuple):
    """The circumstances in which a plan tries a value."""

    device: Device
    num_samples: int  # samples in a micro-batch
    tokens: int  # tokens in a micro-batch
    is_exact: bool  # no smaller micro-batch may be tried
    no_every_n_layers: str | None  # why layers cannot be checkpointed one by one
    num_streamable: int = 0  # layers whose frozen weights may be streamed


def _yaml(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


@dataclass(frozen=True)
class Lever:
    """A row: what a plan, its text, the record of a step and the trainer take from it.

    `text` is of a value that is not the plain one; `requested` is what a recipe asks for, None
    where it leaves the lever open; `tried` are the values that a plan then tries, the fastest
    first, and `tries` says of one whether it does beside these other levers;
    `refusal` says why a training cannot have the lever, by its other levers and the model's family;
    `mode_refusal` why a mode cannot, by the value."""

    name: str  # the field of Levers
    # module of training/levers/ that applies it; None: transformers applies it (loop/arguments.py),
    # or it decides which rows a trainer gets at once
    module: str | None
    switch: str  # its name in the list of a plan's kernels
    key: str  # dotted key of the recipe
    # bit-equal: torch.equal; same function: it differs by rounding
    exactness: Literal["bit-equal", "same function", "other function"]
    text: Callable[[Any], str]
    off: str  # the words of a step without it
    requested: Callable[["Recipe"], Any]
    tried: tuple[Any, ...] = ()
    # values that are tried in place of these, where they depend on the model
    tried_around: Callable[[Around], Sequence[Any]] | None = None
    # why a value that a plan chose is right, and its result the same
    same: Callable[[Any], str] = lambda value: ""
    refusal: Refused = lambda levers, family: None
    mode_refusal: Callable[[LaunchMode, Any], str | None] = lambda mode, value: None
    tries: Callable[[Any, Levers, Around], bool] = lambda value, levers, around: True
    saved: Callable[[Any], float] = float  # memory, by a measure of its own
    # the keys that ask for a value, and what they say
    as_keys: Callable[[Any], Mapping[str, Any]] | None = None
    is_recorded: bool = True

    @property
    def plain(self) -> Any:
        """The value of a step without it."""
        return self.read(PLAIN)

    def read(self, levers: Levers) -> Any:
        return getattr(levers, self.name)

    def says(self, levers: Levers) -> str:
        """The value in words."""
        value = self.read(levers)
        return self.off if value == self.plain else self.text(value)

    def typed(self, levers: Levers) -> Mapping[str, Any]:
        """The keys that ask for its value, and what they say."""
        value = self.read(levers)
        return self.as_keys(value) if self.as_keys else {self.key: value}


def _checkpointing_keys(every_n_layers: int) -> dict[str, Any]:
    return {
        "training.activation_checkpointing": every_n_layers > 0,
        KWARGS: {"every_n_layers": every_n_layers} if every_n_layers > 1 else {},
    }


def _why_checkpointing(every_n_layers: int) -> str:
    if every_n_layers == 1:
        return "recomputing activations changes no result"
    return (
        f"the other layers' activations fit: {1 / every_n_layers:.0%} of the layers compute twice,"
        " with the same result"
    )


def _asked_layers(recipe: "Recipe") -> int | None:
    training = recipe.training
    if "activation_checkpointing" not in training.model_fields_set:
        return None
    n = training.activation_checkpointing_kwargs.every_n_layers or 1
    return n if training.activation_checkpointing else 0


def _first_met(*obstacles: tuple[bool, str]) -> str | None:
    """The reason of the first obstacle that is met."""
    return next((reason for is_met, reason in obstacles if is_met), None)


def _unless(
    can: Callable[["ForwardFacts"], bool], lack: str, is_in_layers: bool = False
) -> Refused:
    """The refusal of a model that lacks what a lever needs, as `lack` says, and, if it changes the
    layers, of torch.compile, which compiles them."""

    return lambda levers, family: _first_met(
        (not can(family.forward), f"the model is a {family.model_type}, {lack}"),
        (is_in_layers and levers.torch_compile, _NOT_COMPILED),
    )


def _no_tiles_in(mode: LaunchMode, num_shards: int) -> str | None:
    option = f"training.tiled_mlp_num_shards {num_shards}"
    return _first_met(
        (mode.engine == "fsdp2", f"has not been tested with {option}; leave one out"),
        (
            mode.shards_parameters,
            f"would gather the weights of an MLP for each part of {option}; leave one out",
        ),
    )


def _most_parts(tokens: int) -> int:
    """The most parts of an MLP's tokens that are large enough: each number is recorded for
    itself."""
    return next((parts for parts in (8, 4, 2) if tokens // parts >= _LEAST_TOKENS), 1)


def _streams(levers: Levers, family: "ModelFamily") -> str | None:
    return _first_met(
        (
            family.is_encoder_decoder,
            f"the model is a {family.model_type}, and only the layers of a decoder alone are"
            " streamed",
        ),
        (
            levers.every_n_layers != 1,
            "backward finds the weights of a layer that is computed again; checkpoint every layer"
            " (training.activation_checkpointing true, without every_n_layers), or stream none",
        ),
        (levers.torch_compile, _NOT_COMPILED),
    )


def aligned_bytes(size_bytes: int) -> int:
    """The bytes of a slot, or of its copy on the host, that a weight of this size takes."""
    return -(-size_bytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES


def _whole_models(key: str) -> Callable[[LaunchMode, Any], str | None]:
    """The refusal of modes whose ranks hold parts of a model."""
    reason = f"has not been tested with {key} true; leave it out"
    return lambda mode, _: None if mode.is_whole else reason


# Rows in the order in which the trainer applies them
LEVERS = (
    Lever(
        name="attn_implementation",
        module="attention",
        switch="attention",
        key="model.attn_implementation",
        exactness="same function",
        text=lambda name: f"attention by {name}",
        off="attention by sdpa",
        requested=lambda recipe: recipe.model.attn_implementation,
    ),
    Lever(
        name="use_liger_kernel",
        module="liger",
        switch="liger",
        key="training.use_liger_kernel",
        exactness="same function",
        text=lambda _: "Liger's kernels",
        off="transformers' modules",
        requested=lambda recipe: recipe.training.use_liger_kernel,
        tried=(False, True),  # candidates._levers, for speed
        tries=lambda _, levers, around: False,
        saved=lambda _: 0.0,
        same=lambda _: "norms, rotary embedding and MLPs compute the same, rounded elsewhere",
        refusal=lambda _, family: (
            None if family.liger else f"liger-kernel has no kernels for a {family.model_type}"
        ),
    ),
    Lever(
        name="torch_compile",
        module="compile",
        switch="compile",
        key="training.torch_compile",
        exactness="same function",
        mode_refusal=lambda mode, _: (
            "gathers the weights of each module by hooks, between which little can be compiled;"
            " leave training.torch_compile out"
            if mode.zero_stage == 3
            else None
        ),
        text=lambda _: "layers compiled",
        off="not compiled",
        requested=lambda recipe: recipe.training.compiles,
        tried=(False, True),  # candidates.compiled, for speed
        tries=lambda _, levers, around: False,
        saved=lambda _: 0.0,
        same=lambda _: "compiled kernels compute the same, rounded elsewhere",
        is_recorded=False,  # it is recorded as a step that is not compiled
    ),
    Lever(
        name="streamed_layers",
        module="streaming",
        switch="weights",
        key="training.streamed_layers",
        exactness="bit-equal",
        text=lambda count: f"frozen weights of {count} layers streamed from host RAM",
        off="weights on the device",
        requested=lambda recipe: recipe.training.streamed_layers,
        tried=(0,),
        tried_around=lambda around: range(SLOTS + 1, around.num_streamable + 1),
        tries=lambda _, levers, around: around.device == "cuda",
        same=lambda _: "a layer computes with a copy of the same bits",
        refusal=_streams,
        mode_refusal=lambda mode, num_layers: (
            "keeps the weights by an engine of its own, which training.streamed_layers"
            f" {num_layers} does not know; use single_gpu or dual_gpu_nccl, or leave it out"
            if mode.engine not in ("plain", "ddp")
            else None
        ),
        is_recorded=False,  # a step is composed of that with all weights on the device
    ),
    Lever(
        name="every_n_layers",
        module=None,
        switch="recompute",
        key="training.activation_checkpointing",
        exactness="bit-equal",
        text=lambda n: f"checkpointing 1 layer in {n}" if n > 1 else "checkpointing",
        off="no checkpointing",
        requested=_asked_layers,
        tried=(0, 4, 2, 1),  # beyond 4, the seconds hardly change
        tries=lambda n, levers, around: n <= 1 or around.no_every_n_layers is None,
        same=_why_checkpointing,
        saved=lambda n: 1 / n if n else 0.0,
        as_keys=_checkpointing_keys,
    ),
    Lever(
        name="activation_offloading",
        module="offloading",
        switch="offload",
        key=KWARGS,
        exactness="bit-equal",
        text=lambda _: "activations on the host",
        off="activations on the device",
        requested=lambda recipe: recipe.training.activation_checkpointing_kwargs.offload,
        tried=(False, True),
        tries=lambda _, levers, around: (
            levers.every_n_layers > 0
            and around.device == "cuda"
            and around.no_every_n_layers is None
        ),
        same=lambda _: "copies of activations in host RAM change no result",
        as_keys=lambda is_on: {KWARGS: {"offload": True} if is_on else {}},
    ),
    Lever(
        name="tiled_mlp_num_shards",
        module="tiled_mlp",
        switch="mlp",
        key="training.tiled_mlp_num_shards",
        exactness="same function",
        text=lambda parts: f"MLPs in {parts} parts",
        off="MLPs at once",
        requested=lambda recipe: recipe.training.tiled_mlp_num_shards,
        # more parts save little: then attention takes as much as an MLP
        tried=(1, 2, 4, 8),
        tries=lambda parts, levers, around: (
            levers.every_n_layers == 1
            and (around.num_samples == 1 or around.is_exact)
            and parts == _most_parts(around.tokens)
        ),
        same=lambda _: "each MLP makes the same of a part of the tokens at a time",
        refusal=_unless(
            lambda model: model.tiles_mlp,
            "of which no part of the tokens can go through an MLP by itself (a mixture of experts,"
            " or an MLP that is no module)",
            is_in_layers=True,
        ),
        mode_refusal=_no_tiles_in,
    ),
    Lever(
        name="fused_norms",
        module="norms",
        switch="norms",
        key="training.fused_norms",
        exactness="same function",
        text=lambda _: "RMS norms by PyTorch's kernel",
        off="transformers' modules",
        requested=lambda recipe: recipe.training.fused_norms,
        mode_refusal=_whole_models("training.fused_norms"),
    ),
    Lever(
        name="fused_adapters",
        module="adapters",
        switch="adapters",
        key="lora.fused_adapters",
        exactness="same function",
        text=lambda _: "fused with their layers",
        off="beside their layers",
        requested=lambda recipe: recipe.lora.fused_adapters if recipe.lora else None,
        mode_refusal=_whole_models("lora.fused_adapters"),
    ),
    Lever(
        name="num_output_chunks",
        module="logits",
        switch="loss",
        key="training.num_output_chunks",
        exactness="same function",
        text=lambda parts: f"logits in {parts} parts",
        off="logits at once",
        requested=lambda recipe: recipe.training.num_output_chunks,
        tried=(1, 8, 32),  # 8: as many as torchtune's default
        same=lambda _: "the loss is the same sum, its logits made in parts",
        refusal=_unless(
            lambda model: model.head == "unchanged",
            "whose forward pass computes with the logits, scales them or caps them, and so cannot"
            " return the loss of their parts",
        ),
        mode_refusal=lambda mode, num_chunks: (
            f"holds the output weights in parts, which training.num_output_chunks {num_chunks}"
            " cannot use; leave one out"
            if "output chunks" in mode.refuses
            else None
        ),
    ),
    Lever(
        name="logits_at_targets",
        module="logits",
        switch="logits",
        key="training.logits_at_targets",
        exactness="same function",
        text=lambda _: "logits at targets",
        off="logits at all positions",
        requested=lambda recipe: recipe.training.logits_at_targets,
        refusal=_unless(
            lambda model: model.head != "other",
            "whose forward pass does not make each position's logits of that position alone",
        ),
    ),
    Lever(
        name="batch_by_tokens",
        module=None,
        switch="rows",
        key="data.batch_by_tokens",
        exactness="same function",
        text=lambda _: "rows sorted by length",
        off="rows as they come",
        requested=lambda recipe: recipe.data.batch_by_tokens,
        tried=(False, True),  # candidates.sorted_splits, for speed
        saved=lambda _: 0.0,
        same=lambda _: (
            "a step has the same rows and the same loss, with less padding; only dropout draws"
            " other numbers"
        ),
        is_recorded=False,
    ),
    Lever(
        name="optim",
        module=None,
        switch="optimizer",
        key="training.optim",
        exactness="other function",
        text=lambda name: next((text for part, text in UPDATES if part in name), "asked for"),
        off="fused AdamW",
        requested=lambda recipe: recipe.training.optim,
    ),
)
PLAIN = Levers()
ROWS: Mapping[str, Lever] = {row.name: row for row in LEVERS}
# levers that a plan tries where nothing else fits
TRIED = tuple(row for row in LEVERS if row.tried)


def requested(recipe: "Recipe") -> Levers:
    """The levers that a recipe asks for, and plain values for what it leaves open."""
    values = ((row.name, row.requested(recipe)) for row in LEVERS)
    return Levers(**{name: value for name, value in values if value is not None})


def typed(levers: Levers) -> dict[str, Any]:
    """The keys that ask for these values of levers that a plan tries, and what they say."""
    asking: dict[str, Any] = {}
    for row in TRIED:
        for key, value in row.typed(levers).items():
            asking[key] = {**asking.get(key, {}), **value} if isinstance(value, dict) else value
    return asking


def refused(recipe: "Recipe", family: "ModelFamily") -> Iterator[str]:
    """Yield a line for each lever that a recipe asks for and its training cannot have."""
    levers = requested(recipe)
    for row in LEVERS:
        if row.read(levers) != row.plain and (reason := row.refusal(levers, family)):
            yield f"{row.key}: {_yaml(row.read(levers))}, but {reason}"
