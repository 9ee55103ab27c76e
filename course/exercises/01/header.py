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

from dataclasses import dataclass

SIZES = {"BF16": 2, "F16": 2, "F32": 4}  # bytes of a number


@dataclass(frozen=True)
class Tensor:
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


def read_header(data: bytes) -> dict[str, Tensor]:
    raise NotImplementedError("Your turn")
