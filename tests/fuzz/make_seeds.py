"""Writes the seed corpus of fuzz_safetensors: small files, good and bad, that a fuzzer can start to change.

python tests/fuzz/make_seeds.py CORPUS_DIR
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any


def file(header: dict[str, Any] | bytes, data: bytes = b"") -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header, separators=(",", ":")).encode()
    return len(text).to_bytes(8, "little") + text + data


def tensor(dtype: str, shape: list[int], begin: int, end: int) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


SEEDS: dict[str, bytes] = {
    "empty_header": file({}),
    "metadata": file({"__metadata__": {"format": "pt"}, "a": tensor("F32", [1], 0, 4)}, bytes(4)),
    "three_dtypes": file(
        {"a": tensor("F32", [2], 0, 8), "b": tensor("BF16", [2, 1], 8, 12), "c": tensor("F16", [], 12, 14)},
        bytes(range(14)),
    ),
    "other_dtypes": file(
        {"i": tensor("I64", [1], 0, 8), "q": tensor("F4", [4], 8, 10), "e": tensor("F8_E4M3", [2], 10, 12)},
        bytes(12),
    ),
    "empty_tensors": file({"z": tensor("F32", [0, 5], 0, 0), "a": tensor("U8", [3], 0, 3)}, bytes(3)),
    "padded_header": file(json.dumps({"a": tensor("U8", [1], 0, 1)}).encode() + b"   ", b"x"),
    "escaped_name": file(b'{"\\u0061\\n":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}', b"x"),
    "overflow": file({"a": tensor("F32", [2**32, 2**32], 0, 0)}),
    "hole": file({"a": tensor("U8", [1], 1, 2)}, b"xy"),
    "overlap": file({"a": tensor("U8", [2], 0, 2), "b": tensor("U8", [2], 1, 3)}, b"xyz"),
    "truncated": file({"a": tensor("U8", [4], 0, 4)}, b"xyz"),
    "trailing": file({"a": tensor("U8", [4], 0, 4)}, b"xyzwv"),
    "nested": file(b'{"a":' + b"[" * 50),
    "huge_header": (2**64 - 5).to_bytes(8, "little") + b"{}",
    "git_lfs": b"version https://git-lfs.github.com/spec/v1\n",
}


def main() -> None:
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in SEEDS.items():
        (folder / name).write_bytes(content)


if __name__ == "__main__":
    main()
