"""Exercise 1.1: reading a header, against the engine's reader and against files that lie."""

from __future__ import annotations

import json
import mmap
from typing import Any

import pytest
from conftest import Exercise


def entry(shape: Any, begin: Any, end: Any, dtype: Any = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def file_of(header: Any, size: int = 0, pad: int = 0) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode() + b" " * pad
    return len(text).to_bytes(8, "little") + text + bytes(size)


A, B = entry([2, 2], 0, 16), entry([3], 16, 22, "BF16")
GOOD = file_of({"a": A, "b": B}, 22)

LIES = {
    "empty": b"",
    "seven bytes": GOOD[:7],
    "cut in the header": GOOD[:40],
    "cut by one byte": GOOD[:-1],
    "one byte too many": GOOD + b"\0",
    "length 2^64 - 5": (2**64 - 5).to_bytes(8, "little") + GOOD[8:],
    "length above what is there": (10**6).to_bytes(8, "little") + file_of({})[8:],
    "not JSON": file_of(b"{" * 30, 22),
    "a list": file_of([A], 16),
    "a number": file_of(5),
    "not UTF-8": file_of(b'{"\xff\xfe": 1}', 22),
    "100,000 brackets": file_of(b"[" * 100_000),
    "a name twice": file_of(b'{"a":%b,"a":%b}' % ((json.dumps(A).encode(),) * 2), 16),
    "no dtype": file_of({"a": {"shape": [4], "data_offsets": [0, 16]}}, 16),
    "no shape": file_of({"a": {"dtype": "F32", "data_offsets": [0, 16]}}, 16),
    "no offsets": file_of({"a": {"shape": [4], "dtype": "F32"}}, 16),
    "a number for a tensor": file_of({"a": 5}),
    "unknown dtype": file_of({"a": entry([4], 0, 16, "F33")}, 16),
    "a list for a dtype": file_of({"a": entry([4], 0, 16, ["F32"])}, 16),
    "shape is a number": file_of({"a": entry(4, 0, 16)}, 16),
    "shape below zero": file_of({"a": entry([-2, -2], 0, 16)}, 16),
    "shape of fractions": file_of({"a": entry([4.0], 0, 16)}, 16),
    "shape of truths": file_of({"a": entry([4, True], 0, 16)}, 16),
    "no list for a shape": file_of({"a": {**A, "shape": None}}, 16),
    "offsets of fractions": file_of({"a": entry([4], 0.0, 16.0)}, 16),
    "offsets of truths": file_of({"a": entry([0], False, False)}),
    "a number for offsets": file_of({"a": {**A, "data_offsets": 16}}, 16),
    "one offset": file_of({"a": {**A, "data_offsets": [0]}}, 16),
    "three offsets": file_of({"a": {**A, "data_offsets": [0, 16, 16]}}, 16),
    "offsets below zero": file_of({"a": entry([4], -16, 0)}),
    "offsets turned round": file_of({"a": entry([4], 16, 0)}, 16),
    "too few bytes for the shape": file_of({"a": entry([5], 0, 16)}, 16),
    "a product of 2^64": file_of({"a": entry([2**32, 2**32], 0, 0)}),
    "a hole": file_of({"a": entry([2], 0, 8), "b": entry([2], 12, 20)}, 20),
    "a hole at the start": file_of({"a": entry([2], 8, 16)}, 16),
    "an overlap": file_of({"a": A, "b": entry([3], 8, 20)}, 20),
    "past the end of the file": file_of({"a": entry([8], 0, 32)}, 16),
}


def test_a_good_file_is_read(exercise: Exercise) -> None:
    module = exercise.python("header.py")
    start = len(GOOD) - 22
    assert module.read_header(GOOD) == {
        "a": module.Tensor("F32", (2, 2), start, start + 16),
        "b": module.Tensor("BF16", (3,), start + 16, start + 22),
    }


def test_order_spaces_metadata_and_empty_tensors_are_allowed(exercise: Exercise) -> None:
    read_header = exercise.python("header.py").read_header
    header = {
        "later": entry([1], 8, 12),
        "__metadata__": {"format": "pt"},
        "empty": entry([0, 7], 8, 8),
        "one number": entry([], 12, 16),
        "first": entry([2], 0, 8),
    }
    found = read_header(file_of(header, 16, pad=5))
    assert sorted(found) == ["empty", "first", "later", "one number"]
    assert read_header(file_of({})) == {}


@pytest.mark.parametrize("lie", LIES)
def test_a_file_that_lies_is_refused(exercise: Exercise, lie: str) -> None:
    read_header = exercise.python("header.py").read_header
    with pytest.raises(ValueError):  # noqa: PT011  any text will do
        read_header(LIES[lie])


def test_a_header_above_the_limit_is_refused(exercise: Exercise) -> None:
    read_header = exercise.python("header.py").read_header
    with pytest.raises(ValueError):  # noqa: PT011  any text will do
        read_header(file_of(b"{}" + b" " * 99_999_999))


def test_it_reads_what_the_engine_reads(exercise: Exercise) -> None:
    from tiny_vllm import _core
    from tiny_vllm.bundled import bundled_model_folder

    path = bundled_model_folder() / "model.safetensors"
    engine = _core.SafetensorsFile(str(path))
    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        found = exercise.python("header.py").read_header(data)
        assert sorted(found) == sorted(engine.names)
        for name in ("model.embed_tokens.weight", "model.layers.29.self_attn.v_proj.weight"):
            tensor = found[name]
            assert tensor.shape == engine.tensor(name).shape
            assert data[tensor.begin : tensor.end] == engine.bytes(name)
