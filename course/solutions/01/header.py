"""Exercise 1.1: the header of a safetensors file, read from a file that may lie.

The file is: 8 bytes, the length N of the header, little-endian; N bytes of JSON; then the bytes of the
tensors, to the end of the file. The JSON is an object. For each tensor it has

    "name": {"dtype": "BF16", "shape": [192, 576], "data_offsets": [begin, end]}

where begin and end count from the end of the header. There may be a "__metadata__", which is no tensor.

Return a dict from name to Tensor, with begin and end counted from the start of the file. Raise ValueError,
and nothing else, when

  - the file is shorter than it says, or N is above 100,000,000, which the format forbids;
  - the header is not a JSON object, or names a tensor twice;
  - a tensor lacks a field, has a dtype that is not in SIZES, or a shape or offsets that are not lists of
    whole numbers from 0 on (data_offsets: two of them);
  - shape and dtype need another number of bytes than end - begin;
  - the tensors leave a hole, overlap, or do not end where the file ends.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from typing import Any

SIZES = {"BF16": 2, "F16": 2, "F32": 4}  # bytes of a number


@dataclass(frozen=True)
class Tensor:
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


def read_header(data: bytes) -> dict[str, Tensor]:
    if len(data) < 8:
        raise ValueError(f"{len(data)} bytes are no safetensors file")
    size = int.from_bytes(data[:8], "little")
    if size > 100_000_000 or size > len(data) - 8:  # a slice that is too long would be cut without a word
        raise ValueError(f"a header of {size} bytes in a file of {len(data)}")
    try:
        header = json.loads(data[8 : 8 + size].decode("utf-8"), object_pairs_hook=_without_twins)
    except RecursionError:  # 100,000 brackets
        raise ValueError("the header is nested too deeply") from None
    if not isinstance(header, dict):
        raise ValueError("the header is not an object")
    header.pop("__metadata__", None)

    start = 8 + size
    tensors = {name: _tensor(name, entry, start) for name, entry in header.items()}
    at = start
    for name, tensor in sorted(tensors.items(), key=lambda item: (item[1].begin, item[1].end)):
        if tensor.begin != at:
            raise ValueError(f"{name}: begins at {tensor.begin}, but what is before it ends at {at}")
        at = tensor.end
    if at != len(data):
        raise ValueError(f"the tensors end at {at}, the file at {len(data)}")
    return tensors


def _without_twins(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """json alone would keep the last of two that have the same name."""
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a name appears twice")
    return found


def _tensor(name: str, entry: Any, start: int) -> Tensor:
    if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "data_offsets"}:
        raise ValueError(f"{name}: dtype, shape and data_offsets are expected")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in SIZES:
        raise ValueError(f"{name}: unknown dtype {dtype!r:.40}")
    if not _are_sizes(shape) or not _are_sizes(offsets) or len(offsets) != 2:
        raise ValueError(f"{name}: shape and data_offsets must be lists of numbers from 0 on")
    begin, end = offsets
    if end - begin != math.prod(shape) * SIZES[dtype]:
        raise ValueError(f"{name}: {shape} of {dtype} are not {end - begin} bytes")
    return Tensor(dtype, tuple(shape), start + begin, start + end)


def _are_sizes(value: Any) -> bool:
    # True is an int in Python, and 3.0 is none.
    return isinstance(value, list) and all(type(n) is int and n >= 0 for n in value)
