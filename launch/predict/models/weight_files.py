"""The tensors in the files of a model's folder, by the headers of its safetensors files.

Linear weights that bitsandbytes has packed in 4 bits have the shape of the weight here; their
scales are no tensors of the model. Source: bitsandbytes 0.50, QuantState.as_dict(packed=True)."""

import hashlib
import json
import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from launch.base.errors import ResourceError
from launch.predict.memory.stored_weights import TYPES, StoredWeights
from launch.schema.recorded_step import grouped

INDEX_NAME = "model.safetensors.index.json"
_MAX_CONFIG_BYTES = 10 << 20  # a config.json has kilobytes; the index of a 400B model about 200 KiB
_NUM_PARTS, _PART_BYTES = 64, 1 << 16  # parts of a weight file that its fingerprint hashes
_MAX_HEADER_BYTES = 100_000_000  # safetensors' own limit
_OTHER_WEIGHTS = {".bin", ".pt", ".pth", ".pkl", ".ckpt", ".h5", ".msgpack", ".gguf"}
_TRAINER_FILES = {
    "training_args.bin",
    "optimizer.pt",
    "optimizer.bin",
    "scheduler.pt",
    "scaler.pt",
}  # and rng_state*.pth
_MAX_TENSORS = 500_000  # limit for a file; DeepSeek-V3 has 92,000 in all
_FLOATS = ("F64", "F32", "F16", "BF16")
_DTYPE_BITS = {
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2"), 8),
    **dict.fromkeys(("I16", "U16", "F16", "BF16"), 16),
    **{"I32": 32, "U32": 32, "F32": 32, "I64": 64, "U64": 64, "F64": 64},
}
# part of the name of the tensor that describes a packed weight
STATE = ".quant_state.bitsandbytes__"
_SCALES = ("absmax", "quant_map", "nested_absmax", "nested_quant_map")  # tensors beside it
_QUANT_TYPES, _BLOCK_SIZE = ("nf4", "fp4"), 64  # values that a quantization section can have


@dataclass(frozen=True)
class Packing:
    """The way in which weights are packed, in the words of a quantization section."""

    bnb_4bit_quant_type: str
    bnb_4bit_use_double_quant: bool


@dataclass(frozen=True)
class Tensor:
    """The shape of a tensor, its place in a safetensors file, and its type there."""

    shape: tuple[int, ...]
    file: Path
    start: int  # bytes from the beginning of the file
    end: int
    dtype: str = ""
    packing: Packing | None = None  # None: not packed


def read_json(file: Path) -> Any:
    """The content of a file. Raises ResourceError for one that is too large, damaged or closed."""
    try:
        size = file.stat().st_size
        if size > _MAX_CONFIG_BYTES:
            raise ResourceError(
                f"{file}: has {size:,} bytes, more than a config can have; copy the model again"
            )
        return json.loads(file.read_text(encoding="utf-8-sig"))
    except (ValueError, RecursionError) as error:
        raise ResourceError(f"{file}: is not JSON ({error}); copy the model again") from error
    except OSError as error:
        raise ResourceError(f"{file}: cannot be read: {error.strerror}") from error


def tensors(folder: Path) -> dict[str, Tensor] | None:
    """Every tensor of the model in a folder; None where there are no weights. Raises ResourceError
    for weights that are damaged, or of a type that cannot be trained."""
    stored = _stored(folder)
    return None if stored is None else _unpacked(stored)


def file_tensors(file: Path) -> dict[str, Tensor]:
    """The same of a single file."""
    return _unpacked(_header(file))


def packing(folder: Path) -> Packing | None:
    """The way in which a folder's linear weights are packed; None if they are not."""
    return next((each.packing for each in (tensors(folder) or {}).values() if each.packing), None)


def _unpacked(stored: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of the model, in place of packed weights and their scales."""
    states = {name.partition(STATE)[0]: tensor for name, tensor in stored.items() if STATE in name}
    model: dict[str, Tensor] = {}
    for name, tensor in stored.items():
        weight, _, part = name.rpartition(".")
        if name in states:
            model[name] = _packed_weight(name, tensor, states[name])
        elif STATE in name or (weight in states and part in _SCALES):
            continue
        elif name.endswith("weight") and tensor.dtype not in _FLOATS:
            raise ResourceError(
                f"{tensor.file}: {name} is of type {tensor.dtype}, expected {', '.join(_FLOATS)},"
                " or 4 bits as bitsandbytes packs them: other quantised weights cannot be trained;"
                " take the model in 16 or 32 bits"
            )
        else:
            model[name] = tensor
    if len({each.packing for each in model.values() if each.packing}) > 1:
        raise ResourceError(
            f"{next(iter(states.values())).file.parent}: its linear weights are packed in several"
            " ways; take the model in 16 or 32 bits"
        )
    return model


def _packed_weight(name: str, tensor: Tensor, state: Tensor) -> Tensor:
    """A weight of 4 bits as its state describes it."""
    with state.file.open("rb") as stream:
        stream.seek(state.start)
        raw = stream.read(state.end - state.start)
    try:
        described = json.loads(raw)
        shape, quant_type = tuple(described["shape"]), described["quant_type"]
        block_size = described["blocksize"]
        is_whole = math.ceil(math.prod(shape) / 2) == tensor.end - tensor.start
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise ResourceError(
            f"{state.file}: the state of {name} is damaged ({error}); copy it again"
        ) from error
    if not is_whole or quant_type not in _QUANT_TYPES or block_size != _BLOCK_SIZE:
        raise ResourceError(
            f"{state.file}: {name} has {tensor.end - tensor.start:,} bytes, for a shape of"
            f" {list(shape)} in blocks of {block_size} of {quant_type}; expected two weights a"
            f" byte in blocks of {_BLOCK_SIZE} of {' or '.join(_QUANT_TYPES)}"
        )
    is_double = described.get("nested_blocksize") is not None
    return replace(tensor, shape=shape, packing=Packing(quant_type, is_double))


def _stored(folder: Path) -> dict[str, Tensor] | None:
    """Every tensor in a folder's files. transformers looks in the same order."""
    single, index = folder / "model.safetensors", folder / INDEX_NAME
    if single.is_file():
        return _header(single)
    if index.is_file():
        return _sharded(folder, index)
    file_names = sorted(path.name for path in folder.iterdir() if path.is_file())
    shards = [
        name for name in file_names if name.startswith("model") and name.endswith(".safetensors")
    ]
    if shards:
        raise ResourceError(f"{folder}: has {shards[0]} but no {INDEX_NAME}; copy the model again")
    other_files = [
        name
        for name in file_names
        if Path(name).suffix in _OTHER_WEIGHTS
        and name not in _TRAINER_FILES
        and not name.startswith("rng_state")
    ]
    if other_files:
        raise ResourceError(
            f"{folder}: its weights are {other_files[0]}; only safetensors are read (pickles run"
            " code). Convert them where you trust them:"
            " AutoModelForCausalLM.from_pretrained(folder).save_pretrained(new_folder)"
        )
    return None


def stored_weights(folder: Path) -> StoredWeights | None:
    """The weights in a folder's files, without tables of whole numbers; None without weights."""
    stored = _stored(folder)
    if stored is None:
        return None
    model = _unpacked(stored)
    counts = grouped(  # elements of each tensor, by type
        (TYPES[tensor.dtype], math.prod(tensor.shape))
        for tensor in model.values()
        if tensor.packing is None and tensor.dtype in TYPES
    )
    if not counts:
        return None
    elements, largest = (
        {dtype: combined(each) for dtype, each in counts.items()} for combined in (sum, max)
    )
    packed_bytes = sum(
        tensor.end - tensor.start
        for name, tensor in stored.items()
        if name not in model or model[name].packing
    )
    largest_file_bytes = max(
        file.stat().st_size for file in {tensor.file for tensor in stored.values()}
    )
    return StoredWeights(elements, largest, largest_file_bytes, packed_bytes=packed_bytes)


def weights_fingerprint(folder: Path) -> str:
    """sha256 over each weight file's name, size and _NUM_PARTS parts of its bytes: the weights of
    another training differ in nearly every part, and a model of 14 GB is not read whole."""
    digest = hashlib.sha256()
    for file in sorted(folder.glob("*.safetensors")):
        size = file.stat().st_size
        digest.update(f"{file.name}\0{size}\0".encode())
        with file.open("rb") as stream:
            for number in range(_NUM_PARTS):
                stream.seek(number * max(size - _PART_BYTES, 0) // (_NUM_PARTS - 1))
                digest.update(stream.read(_PART_BYTES))
    return digest.hexdigest()


def _sharded(folder: Path, index: Path) -> dict[str, Tensor]:
    content = read_json(index)
    weight_map = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(weight_map, dict) or not weight_map:
        raise ResourceError(f"{index}: has no weight_map; copy the model again")
    tensors: dict[str, Tensor] = {}
    headers: dict[str, dict[str, Tensor]] = {}
    for name, shard in weight_map.items():
        if not isinstance(shard, str) or not shard or Path(shard).name != shard:
            raise ResourceError(
                f"{index}: {name} is in {shard!r}, which is no file name in this folder"
            )
        if shard not in headers:
            if not (folder / shard).is_file():
                raise ResourceError(
                    f"{index}: names {shard}, which is not in the folder; copy the missing shard"
                )
            headers[shard] = _header(folder / shard)
        if name not in headers[shard]:
            raise ResourceError(
                f"{index}: says that {shard} holds {name}, but it does not; copy the model again"
            )
        tensors[name] = headers[shard][name]
    return tensors


def _header(file: Path) -> dict[str, Tensor]:
    """The tensors of one safetensors file: 8 bytes of length, a JSON header, the data with nothing
    between or after."""
    size = file.stat().st_size
    with file.open("rb") as stream:
        prefix = stream.read(8)
        if prefix == b"version ":
            raise ResourceError(f"{file}: is a Git LFS pointer, not the weights; run git lfs pull")
        length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else 0
        if len(prefix) < 8 or length > size - 8:
            raise ResourceError(
                f"{file}: is cut or no safetensors file: its header should have {length:,} bytes,"
                f" the whole file has {size:,}; copy it again"
            )
        if length > _MAX_HEADER_BYTES:
            raise ResourceError(
                f"{file}: its header has {length:,} bytes; no safetensors file has that; copy it"
                " again"
            )
        raw = stream.read(length)
    try:
        header = json.loads(raw)
        entries = [(name, entry) for name, entry in header.items() if name != "__metadata__"]
        if len(entries) > _MAX_TENSORS:
            raise ResourceError(
                f"{file}: its header names {len(entries):,} tensors, expected at most"
                f" {_MAX_TENSORS:,}; copy it again"
            )
        tensors = {name: _tensor(entry, file, 8 + length) for name, entry in entries}
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise ResourceError(f"{file}: its header is damaged ({error}); copy it again") from error
    if not tensors:
        raise ResourceError(f"{file}: holds no tensors; copy it again")
    spans = sorted((tensor.start, tensor.end) for tensor in tensors.values())
    if spans[-1][1] > size:
        raise ResourceError(
            f"{file}: is cut: its header promises {spans[-1][1]:,} bytes, it has {size:,}; copy it"
            " again"
        )
    ends = [8 + length, *(end for _, end in spans)]
    if [start for start, _ in spans] != ends[:-1] or ends[-1] != size:
        raise ResourceError(
            f"{file}: its header does not describe the {size:,} bytes it has; copy it again"
        )
    return tensors


def _tensor(entry: Mapping[str, Any], file: Path, data_start: int) -> Tensor:
    shape, (start, end) = tuple(entry["shape"]), entry["data_offsets"]
    if not all(type(number) is int and number >= 0 for number in (*shape, start, end)):
        raise ValueError(f"shape {shape}, offsets {start} to {end}")
    bits = _DTYPE_BITS.get(entry["dtype"])  # None: a newer type, whose size is taken from the file
    if bits is not None and (end - start) * 8 != math.prod(shape) * bits:
        raise ValueError(f"{end - start} bytes for shape {shape} of {entry['dtype']}")
    return Tensor(shape, file, data_start + start, data_start + end, entry["dtype"])


def same_bytes(tensor: Tensor, other: Tensor) -> bool:
    num_bytes = tensor.end - tensor.start
    if tensor == other or num_bytes != other.end - other.start:
        return tensor == other
    with tensor.file.open("rb") as file, other.file.open("rb") as other_file:
        file.seek(tensor.start)
        other_file.seek(other.start)
        sizes = (min(1 << 20, num_bytes - offset) for offset in range(0, num_bytes, 1 << 20))
        return all(file.read(size) == other_file.read(size) for size in sizes)


def same_values(tensor: Tensor, other: Tensor) -> bool | None:
    """True if two tensors, which are not packed, have the same values: of float32 beside 16 bits
    those that it is rounded to. None for types that are not compared."""
    if tensor.shape != other.shape or tensor.dtype == other.dtype:
        return tensor.shape == other.shape and same_bytes(tensor, other)
    wide, narrow = sorted((tensor, other), key=lambda each: each.dtype != "F32")
    if wide.dtype != "F32" or narrow.dtype not in ("F16", "BF16"):
        return None
    count = math.prod(wide.shape)
    with wide.file.open("rb") as wide_file, narrow.file.open("rb") as narrow_file:
        wide_file.seek(wide.start)
        narrow_file.seek(narrow.start)
        sizes = (min(1 << 20, count - first) for first in range(0, count, 1 << 20))
        return all(
            _rounded(wide_file.read(4 * size), narrow.dtype) == narrow_file.read(2 * size)
            for size in sizes
        )


def _rounded(content: bytes, dtype: str) -> bytes:
    """Bytes of float32, as they are in F16 or BF16, to even."""
    import pyarrow as pa  # not at the top: a plan needs none of it
    from pyarrow.compute import call_function as call

    bits = pa.Array.from_buffers(pa.uint32(), len(content) // 4, [None, pa.py_buffer(content)])
    if dtype == "F16":
        return bits.view(pa.float32()).cast(pa.float16(), safe=False).buffers()[1].to_pybytes()
    places, mask, half = (pa.scalar(number, pa.uint32()) for number in (16, 1, 0x7FFF))
    last = call("bit_wise_and", [call("shift_right", [bits, places]), mask])
    upper = call("shift_right", [call("add", [call("add", [bits, half]), last]), places])
    return upper.cast(pa.uint16()).buffers()[1].to_pybytes()
