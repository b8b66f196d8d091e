"""The settings of PyTorch's caching allocator that change how much it reserves, and the text that
names them.

Source: AcceleratorAllocatorConfig and CUDAAllocatorConfig, parseArgs, of torch 2.11 to 2.13.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass

from launch.base.errors import ConfigError
from launch.base.text import suggestion

MIB = 1 << 20
_LEAST_LARGE_SEGMENT_BYTES = 11 * MIB  # torch asks for more than kMinLargeAlloc, 10 MiB
INTERVALS = 16  # kRoundUpPowerOfTwoIntervals: sizes below 2 MiB, from 2, from 4, ... MiB
SETTINGS = {
    *(
        "expandable_segments",
        "large_segment_size_mb",
        "max_split_size_mb",
        "max_non_split_rounding_mb",
    ),
    *("roundup_power2_divisions", "garbage_collection_threshold", "per_process_memory_fraction"),
    *("backend", "throw_on_cudamalloc_oom"),
}
_NO_BYTES_CHANGE = re.compile(
    r"pinned_\w+|release_lock_on_(cuda|hip)malloc|graph_capture_record_stream_reuse"
)
_SETTING = re.compile(r"([^,:\[\]]+):(\[[^\[\]]*\]|[^,:\[\]]+)(?:,|$)")


@dataclass(frozen=True)
class AllocatorConfig:
    """The settings that change the reserved bytes; the defaults are torch's."""

    expandable_segments: bool = False
    # segments for requests of 1 to 10 MiB, and pages of expandable segments
    large_segment_bytes: int = 20 * MIB
    max_split_size_bytes: int | None = None  # blocks from here are not split
    # excess over a request, below which such a block is taken
    max_non_split_rounding_bytes: int = 20 * MIB
    roundup_power2_divisions: tuple[int, ...] = (0,) * INTERVALS
    # share of what per_process_memory_fraction allows; nothing without that
    garbage_collection_threshold: float = 0.0
    per_process_memory_fraction: float = 1.0  # value of torch.cuda.set_per_process_memory_fraction

    @classmethod
    def parse(cls, text: str) -> "AllocatorConfig":
        """The settings in the text of PYTORCH_CUDA_ALLOC_CONF, PYTORCH_HIP_ALLOC_CONF or
        PYTORCH_ALLOC_CONF.

        torch reads the first of the three that is set. Raises ConfigError for what torch refuses,
        for another backend, and for what torch reads but nobody means: max_split_size_mb:20GB, a
        key given twice.
        """
        values = _split(text)
        if values.get("backend", "native") != "native":
            raise ConfigError(
                f"allocator setting backend:{values['backend']} leaves memory to a pool of the"
                " driver, which cannot be replayed; use backend:native"
            )
        if _flag(values, "throw_on_cudamalloc_oom"):
            raise ConfigError(
                "allocator setting throw_on_cudamalloc_oom:True cannot be replayed; leave it out"
            )
        large = (
            _bytes(values, "large_segment_size_mb", _LEAST_LARGE_SEGMENT_BYTES)
            or cls.large_segment_bytes
        )
        divisions = values.get("roundup_power2_divisions")
        return cls(
            expandable_segments=_flag(values, "expandable_segments"),
            large_segment_bytes=large,
            max_split_size_bytes=_bytes(values, "max_split_size_mb", large),
            max_non_split_rounding_bytes=_bytes(values, "max_non_split_rounding_mb", large)
            or large,
            roundup_power2_divisions=(
                cls.roundup_power2_divisions if divisions is None else _divisions(divisions)
            ),
            garbage_collection_threshold=_share(values, "garbage_collection_threshold", 0.0),
            per_process_memory_fraction=_share(values, "per_process_memory_fraction", 1.0),
        )


TORCH_DEFAULTS = AllocatorConfig()
# torch reads the first of them that is set
VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")
EXPANDABLE = "expandable_segments:True"


def users_settings(environ: Mapping[str, str]) -> str | None:
    """The settings that the user's environment has for the ranks' allocator; None: it names
    none."""
    return next((environ[name] for name in VARIABLES if name in environ), None)


def _split(text: str) -> dict[str, str]:
    """Values as text; white space does not count."""
    text = "".join(text.split())
    values: dict[str, str] = {}
    position = 0
    while position < len(text):
        matched = _SETTING.match(text, position)
        if matched is None:
            raise ConfigError(
                f"allocator settings: expected key:value,key:value, found {text[position:]!r}"
            )
        key, value = matched.groups()
        if key not in SETTINGS and not _NO_BYTES_CHANGE.fullmatch(key):
            raise ConfigError(
                f"allocator settings: {key!r} is unknown; {suggestion(key, sorted(SETTINGS))}"
            )
        if key in values:
            raise ConfigError(f"allocator settings: {key} is there twice; keep one")
        values[key] = value
        position = matched.end()
    return values


def _flag(values: dict[str, str], key: str) -> bool:
    value = values.get(key, "False")
    if value not in ("True", "False"):
        raise ConfigError(f"allocator setting {key}: expected True or False, found {value!r}")
    return value == "True"


def _bytes(values: dict[str, str], key: str, least_bytes: int) -> int | None:
    if key not in values:
        return None
    value = values[key]
    if not value.isdecimal() or int(value) * MIB < least_bytes:
        raise ConfigError(
            f"allocator setting {key}: expected MiB from {least_bytes // MIB} up, found {value!r}"
        )
    return int(value) * MIB


def _share(values: dict[str, str], key: str, default: float) -> float:
    if key not in values:
        return default
    try:
        share = float(values[key])
    except ValueError:
        share = 0.0
    if not (0.0 < share < 1.0 or (share == 1.0 and key == "per_process_memory_fraction")):
        raise ConfigError(
            f"allocator setting {key}: expected a number between 0 and 1, found {values[key]!r}"
        )
    return share


def _divisions(value: str) -> tuple[int, ...]:
    """The divisions of every interval, from 4 or [256:1,512:2,>:4] (keys in MiB). Source:
    parseRoundUpPower2Divisions."""
    if not value.startswith("["):
        return (_power_of_two(value),) * INTERVALS
    divisions = [0] * INTERVALS
    last: int | None = None
    for pair in value[1:-1].split(","):
        start, _, count = pair.partition(":")
        number = 0 if count == "0" else _power_of_two(count)
        if start == ">":
            after = (last or 0) + 1
            divisions[after:] = [number] * (INTERVALS - after)
            continue
        index = min(_power_of_two(start).bit_length(), INTERVALS) - 1
        if last is None:
            divisions[:index] = [number] * index
        divisions[index] = number
        last = index
    return tuple(divisions)


def _power_of_two(text: str) -> int:
    number = int(text) if text.isdecimal() else 0
    if number.bit_count() != 1:
        raise ConfigError(
            f"allocator setting roundup_power2_divisions: expected powers of two, found {text!r}"
        )
    return number
