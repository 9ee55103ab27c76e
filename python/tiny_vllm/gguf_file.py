"""Reads a GGUF file: its metadata, its tensor table, and rows of its tensors as float32.

The layout is that of the GGUF specification (ggml, docs/gguf.md), versions 2 and 3, little endian:

    magic "GGUF" | version u32 | tensor count u64 | metadata count u64 | metadata | tensor table | padding |
    tensor data

The header is walked here and not by `gguf.GGUFReader`, because a GGUF file is a download and may be broken or
hostile: every length is checked against the bytes that are left before it is used. (GGUFReader loops once per
element that the file claims to have, which is forever for a claim of 2^60.) The block formats of quantised
tensors come from `gguf`.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, dequantize

from .errors import ModelLoadError

# Value types of the metadata: code -> struct format of a scalar.
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9

# Weights in these types are numbers, not block formats of `gguf.dequantize` that would be read as integers.
_NOT_WEIGHTS = {"I8", "I16", "I32", "I64", "F64"}

# How many float32 values are dequantised at once: 32 MiB, so that memory stays flat whatever the tensor's
# size.
_CHUNK_VALUES = 8 << 20


@dataclass(frozen=True)
class TensorInfo:
    """One row of the tensor table. `shape` is in numpy's order: the last number runs fastest in memory."""

    name: str
    shape: tuple[int, ...]
    dtype: GGMLQuantizationType
    offset: int  # of the first byte, from the start of the file
    row_bytes: int


class GGUFFile:
    """An open GGUF file. The file is mapped: tensors are read when they are asked for."""

    def __init__(self, path: str | Path):
        """Raises ModelLoadError when the file is not a whole, well-formed GGUF file."""
        self.path = Path(path)
        self.metadata: dict[str, Any] = {}
        self.tensors: dict[str, TensorInfo] = {}
        self._position = 0
        try:
            with open(self.path, "rb") as file:
                self._size = self.path.stat().st_size
                if self._size < 24:
                    raise self._error(f"is {self._size} bytes long; a GGUF file has a header of at least 24")
                self._data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except OSError as error:
            raise ModelLoadError(f"{self.path}: cannot be opened: {error.strerror or error}") from None
        self._read_header()

    def get(self, key: str, kind: type | tuple[type, ...], default: Any = None) -> Any:
        """The metadata value of `key`, checked to be of `kind`; `default` when it is absent."""
        if key not in self.metadata:
            return default
        value = self.metadata[key]
        # bool is a kind of int to Python, but not to a GGUF file.
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
            raise self._error(f"metadata '{key}' is {_brief(value)}, not of the type that it must have")
        return value

    def rows(self, name: str, order: np.ndarray | None = None) -> Iterator[np.ndarray]:
        """Yields the float32 rows of a tensor in chunks of shape (n, last dimension).

        A tensor of one dimension is a single column: (n, 1), so that `order` (the rows to read, in which
        order) works for biases too. Quantised blocks lie within a row, so that rows can be picked before they
        are dequantised.
        """
        info = self.tensors[name]
        if info.dtype.name in _NOT_WEIGHTS:
            raise self._error(f"tensor '{name}' has type {info.dtype.name}, which is not a type of weights")
        count = prod(info.shape[:-1])
        packed = np.frombuffer(self._data, np.uint8, count * info.row_bytes, info.offset).reshape(
            count, info.row_bytes
        )
        try:
            if len(info.shape) == 1:
                column = dequantize(packed, info.dtype).reshape(-1, 1)
                yield column if order is None else column[order]
                return
            step = max(1, _CHUNK_VALUES // info.shape[-1])
            for start in range(0, count, step):
                rows = slice(start, start + step)
                yield dequantize(packed[rows if order is None else order[rows]], info.dtype)
        except NotImplementedError:
            raise self._error(
                f"tensor '{name}' has type {info.dtype.name}, which cannot be dequantised here; "
                "use a file with F16, BF16, Q8_0 or K-quant weights"
            ) from None

    # ---- the header ----------------------------------------------------------------------------------------

    def _error(self, message: str) -> ModelLoadError:
        return ModelLoadError(f"{self.path}: {message}")

    def _take(self, size: int, what: str) -> int:
        """The position of the next `size` bytes, which must exist; moves behind them."""
        start = self._position
        if size > self._size - start:
            raise self._error(
                f"ends at byte {self._size}, inside {what}, which needs {size} bytes from byte {start}"
            )
        self._position = start + size
        return start

    def _scalar(self, code: str, what: str) -> Any:
        fmt = "<" + code
        return struct.unpack_from(fmt, self._data, self._take(struct.calcsize(fmt), what))[0]

    def _string(self, what: str) -> str:
        length: int = self._scalar("Q", what)
        start = self._take(length, what)
        try:
            return self._data[start : start + length].decode("utf-8")
        except UnicodeDecodeError:
            raise self._error(f"{what} is not UTF-8 text") from None

    def _value(self, kind: int, what: str) -> Any:
        if kind in _SCALARS:
            return self._scalar(_SCALARS[kind], what)
        if kind == _STRING:
            return self._string(what)
        if kind != _ARRAY:
            raise self._error(f"{what} has the unknown value type {kind}")
        item, count = self._scalar("I", what), self._scalar("Q", what)
        if item == _STRING:
            if count > (self._size - self._position) // 8:  # each string has at least its length
                raise self._error(f"{what} claims {count} strings, more than the file can hold")
            return [self._string(what) for _ in range(count)]
        if item not in _SCALARS:
            raise self._error(f"{what} is an array of value type {item}; only numbers and strings are known")
        dtype = np.dtype("<" + _SCALARS[item]) if item != 7 else np.dtype(np.bool_)
        start = self._take(count * dtype.itemsize, what)
        return np.frombuffer(self._data, dtype, count, start).tolist()

    def _read_header(self) -> None:
        magic = self._data[self._take(4, "the magic") : 4]
        if magic != b"GGUF":
            raise self._error(f"is not a GGUF file: it starts with {magic!r}, not b'GGUF'")
        version = self._scalar("I", "the version")
        if version not in (2, 3):
            hint = " (a big-endian file)" if version in (2 << 24, 3 << 24) else ""
            raise self._error(
                f"has GGUF version {version}{hint}; versions 2 and 3, little endian, can be read"
            )
        num_tensors, num_values = self._scalar("Q", "the counts"), self._scalar("Q", "the counts")
        for i in range(num_values):
            key = self._string(f"the name of metadata value {i} of {num_values}")
            what = f"metadata '{key[:100]}'"
            if key in self.metadata:
                raise self._error(f"{what} is there twice")
            self.metadata[key] = self._value(self._scalar("I", what), what)
        table = [self._table_row(i, num_tensors) for i in range(num_tensors)]
        align = self.get("general.alignment", int, 32)
        if align <= 0 or align & (align - 1):
            raise self._error(f"metadata 'general.alignment' is {align}, not a power of two")
        start = -(-self._position // align) * align
        for info in table:
            if info.name in self.tensors:
                raise self._error(f"tensor '{info.name}' is there twice")
            size = prod(info.shape[:-1]) * info.row_bytes
            if start + info.offset + size > self._size:
                raise self._error(
                    f"tensor '{info.name}' needs bytes {start + info.offset} to "
                    f"{start + info.offset + size}, but the file has {self._size}: it was cut short, or its "
                    "header is wrong"
                )
            self.tensors[info.name] = TensorInfo(
                info.name, info.shape, info.dtype, start + info.offset, info.row_bytes
            )

    def _table_row(self, index: int, count: int) -> TensorInfo:
        name = self._string(f"the name of tensor {index} of {count}")
        what = f"tensor '{name[:100]}'"
        num_dims = self._scalar("I", what)
        if not 1 <= num_dims <= 4:
            raise self._error(f"{what} has {num_dims} dimensions; 1 to 4 are possible")
        shape = tuple(self._scalar("Q", what) for _ in range(num_dims))[::-1]
        if min(shape) == 0:
            raise self._error(f"{what} has the shape {shape}, which holds nothing")
        code = self._scalar("I", what)
        try:
            dtype = GGMLQuantizationType(code)
        except ValueError:
            raise self._error(f"{what} has the unknown type {code}") from None
        block, block_bytes = GGML_QUANT_SIZES[dtype]
        if shape[-1] % block:
            raise self._error(
                f"{what} has rows of {shape[-1]} values; {dtype.name} comes in blocks of {block}"
            )
        return TensorInfo(name, shape, dtype, self._scalar("Q", what), shape[-1] // block * block_bytes)


def _brief(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
