"""The weights in the files of a model's folder, as far as they decide host RAM. Pure.

A loaded folder is mapped: its pages are read, and dropped where memory is short, so that they are
no need. What is: tensors that are converted or quantised on the host, and matrices that grow.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from launch.predict.parameters import Shapes, total_elements
from launch.schema.model_sections import DTYPE_BYTES, Dtype

# the types that safetensors names, of weights that can be trained
TYPES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16", "F64": "float64"}
BYTES = {**DTYPE_BYTES, "float64": 8}
USUAL_DTYPE: Dtype = "bfloat16"  # dtype assumed for a folder that is not downloaded yet
_SHARD_BYTES = 5_000_000_000  # the largest file there (transformers 4's max_shard_size)


@dataclass(frozen=True)
class StoredWeights:
    """Tensors by type, and the largest of each type, in elements; the largest file in bytes. Those
    that are packed in 4 bits count in `packed_bytes` alone, with their scales."""

    elements: Mapping[str, int]
    largest: Mapping[str, int]
    largest_file_bytes: int
    grown: tuple[int, ...] = ()  # elements of the matrices to which rows are added
    packed_bytes: int = 0

    @property
    def total_bytes(self) -> int:
        return self.packed_bytes + sum(BYTES[each] * count for each, count in self.elements.items())

    @property
    def largest_bytes(self) -> int:
        """Of a tensor in its file."""
        return max(BYTES[dtype] * count for dtype, count in self.largest.items())

    def converted_bytes(self, dtype: Dtype) -> int:
        """Of all tensors that are loaded in another type than they are stored in."""
        return DTYPE_BYTES[dtype] * sum(
            count for stored, count in self.elements.items() if stored != dtype
        )

    def largest_converted_bytes(self, dtype: Dtype) -> int:
        """Of the largest tensor that is loaded in another type."""
        return DTYPE_BYTES[dtype] * max(
            (count for stored, count in self.largest.items() if stored != dtype), default=0
        )

    def growing_bytes(self, dtype: Dtype) -> tuple[int, int]:
        """(matrices with added rows, copies by which the mean of the others is computed), where
        they grow on the host. Source: transformers 5.23, resize_token_embeddings(): the old rows in
        float32, and those less their mean."""
        copies = DTYPE_BYTES["float32"] * (1 if dtype == "float32" else 2)
        return DTYPE_BYTES[dtype] * sum(self.grown), copies * max(self.grown, default=0)


def of_shape(parameters: Shapes) -> StoredWeights:
    """The folder of a named shape, as such folders are downloaded."""
    count, largest = total_elements(parameters), max(map(math.prod, parameters.values()))
    file_bytes = min(DTYPE_BYTES[USUAL_DTYPE] * count, _SHARD_BYTES)
    return StoredWeights({USUAL_DTYPE: count}, {USUAL_DTYPE: largest}, file_bytes)


def grown(before: Shapes, after: Shapes) -> Sequence[int]:
    """Elements of the matrices that have more rows afterwards."""
    return [math.prod(before[name]) for name in before if after.get(name) != before[name]]
