"""Predicted memory of each part of a run, as plan.json has it, as frozen dataclasses."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Literal

from pydantic import Field

# Parts of a run in their order. "step" is one in the steady state, also after an evaluation.
Phase = Literal["load", "first_step", "step", "evaluation", "save"]


@dataclass(frozen=True)
class DeviceMemory:
    """The peaks of one rank on its device, in one part of a run."""

    allocated_bytes: Annotated[
        int, Field(description="bytes of live tensors, in whole blocks of the allocator")
    ]
    reserved_bytes: Annotated[
        int, Field(description="bytes that torch's allocator holds; on CPUs the allocated bytes")
    ]
    device_bytes: Annotated[
        int,
        Field(description="reserved_bytes and estimate.outside_bytes, without the error margin"),
    ]


@dataclass(frozen=True)
class DevicePhases:
    """Memory of one rank on its device: the highest of all ranks. null: not predicted, or a part
    that this run does not have."""

    load: Annotated[
        DeviceMemory | None,
        Field(description="building the model, dividing it and moving it to the device"),
    ] = None
    first_step: Annotated[
        DeviceMemory | None,
        Field(
            description="the first optimizer step, in whose update the optimizer makes its states"
        ),
    ] = None
    step: Annotated[
        DeviceMemory | None,
        Field(description="an optimizer step in the steady state, also after an evaluation"),
    ] = None
    evaluation: Annotated[
        DeviceMemory | None,
        Field(description="an evaluation; null if the recipe has no held-out rows"),
    ] = None
    save: Annotated[
        DeviceMemory | None,
        Field(
            description="writing a checkpoint, behind an evaluation if there is one: what ZeRO-3"
            " and FSDP2 have gathered for it is still there"
        ),
    ] = None


@dataclass(frozen=True)
class HostMemory:
    """Host RAM of all processes of the job on one machine, in one part of a run."""

    bytes: Annotated[int, Field(description="the sum of by_cause; a page of a library counts once")]
    by_cause: Annotated[Mapping[str, int], Field(description="bytes by cause")]


@dataclass(frozen=True)
class HostPhases:
    """Host RAM of each part of a run. null: not predicted, or a part that this run does not
    have."""

    prepare: Annotated[
        HostMemory | None, Field(description="tokenising, before the ranks start")
    ] = None
    load: HostMemory | None = None
    first_step: HostMemory | None = None
    step: HostMemory | None = None
    evaluation: Annotated[
        HostMemory | None,
        Field(description="null if the recipe has no held-out rows"),
    ] = None
    save: HostMemory | None = None


@dataclass(frozen=True)
class MemoryPhases:
    """Memory of each part of a run: per rank on its device, and of the job on its machine."""

    device: DevicePhases = field(default_factory=DevicePhases)
    host: HostPhases = field(default_factory=HostPhases)
