"""Embeddings, our first kernel

Tokens become rows of a table, by three kernels; and which row it is when an offset has 32 bits.
"""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np

from tiny_vllm import _core, ops
from tiny_vllm.bundled import bundled_model_folder
from tiny_vllm.course.chapter_03 import SECTOR, WARP, sectors_of
from tiny_vllm.course.lab import GREY, Data, kernels, measured, say, section, table
from tiny_vllm.errors import InvalidRequestError

VERSIONS = ("row a thread", "element a thread", "eight a thread")
WORDS = (
    " Paris",
    " London",
    " Berlin",
    " Rome",
    " seven",
    " eight",
    " nine",
    " ten",
    " red",
    " blue",
    " green",
    " white",
)
TEXT = (
    "An embedding is a row of a table. The number of a token says which row, and nothing is computed: "
    "the row is copied, from the table into the step."
)


def run(device: str) -> Data:
    from tiny_vllm.tokenizer import Tokenizer

    folder = bundled_model_folder()
    tokenizer = Tokenizer.from_folder(folder)
    checkpoint = _core.Checkpoint(str(folder))
    name = "model.embed_tokens.weight"
    bits = checkpoint.numpy(name, "bfloat16")  # (V, D), as numbers of 16 bits
    wide = checkpoint.numpy(name)  # the same in float32
    vocab, dim = bits.shape

    section("A text becomes rows")
    ids = tokenizer.encode("The capital of France is")
    rows = ops.embedding(bits.view(ops.bfloat16), ids, device=device)
    table(
        ("token", "id", "element 0", "element 1", "element 575"),
        [
            (repr(tokenizer.decode([i])), i, *(f"{float(row[c]):.4f}" for c in (0, 1, dim - 1)))
            for i, row in zip(ids, rows, strict=True)
        ],
    )
    same = np.array_equal(rows.view(np.uint16), bits[ids])
    say(
        f"{len(ids)} ids became {rows.shape[0]} rows of {rows.shape[1]} numbers. They are the table's rows, "
        f"bit for bit: {'yes' if same else 'no'}. The table is ({vocab}, {dim}), {bits.nbytes:,} bytes."
    )

    section("Rows that point the same way")
    unit = wide / np.linalg.norm(wide, axis=1, keepdims=True)
    near = []
    for word in (" Paris", " seven", " red", " cat"):
        [i] = tokenizer.encode(word)
        likeness = unit @ unit[i]
        nearest = [int(j) for j in np.argsort(-likeness)[1:5]]
        near.append((repr(word), ", ".join(f"{tokenizer.decode([j])!r} {likeness[j]:.2f}" for j in nearest)))
    table(("token", "nearest rows, with the cosine of the angle"), near)

    section("Three kernels")
    on_gpu = device == "cuda"
    text_ids = tokenizer.encode(TEXT)[:WARP]
    numbers = np.tile(np.array(text_ids, np.int32), 2048 if on_gpu else 1)
    library = kernels("embedding.cu", device)
    lines = []
    for version, kernel in enumerate(VERSIONS, 1):
        out, ms = np.zeros((numbers.size, dim), np.uint16), ctypes.c_float()
        library("embedding", version, bits, vocab, numbers, out, numbers.size, dim, ctypes.byref(ms))
        right = np.array_equal(out, bits[numbers])
        sectors, wanted, loads = _first_load(version, text_ids, dim)
        line: tuple[Any, ...] = (
            version,
            kernel,
            loads,
            (dim, 1, 2)[version - 1],
            sectors,
            f"{wanted / (sectors * SECTOR):.0%}",
            "yes" if right else "no",
        )
        if on_gpu:
            line += (measured(ms.value * 1e3, "µs"), measured(2 * out.nbytes / ms.value / 1e6, "GB/s"))
        lines.append(line)
    header: tuple[str, ...] = ("", "kernel", "loads", "of a warp", "sectors of the first", "used", "right")
    table(header + (("time", "memory") if on_gpu else ()), lines)
    say(
        f"{len(text_ids)} tokens, {len(set(text_ids))} of them different. Loads: instructions of all warps "
        "together that read the table."
        + (f" The times are those of {numbers.size:,} tokens." if on_gpu else "")
    )

    section("Where a row begins")
    tables = ((49_152, 576, 49_151), (128_256, 2048, 128_255), (262_144, 8960, 239_674))
    begins = []
    for v, d, row in (*tables, (262_144, 8960, 239_675), (262_144, 8960, 262_143)):
        places = np.zeros(3, np.int64)
        library("where", np.array([row], np.int32), 1, d, places)
        begins.append((f"({v:,}, {d:,})", row, *(f"{p:,}" for p in places)))
    table(("table", "row", "64 bits", "int", "unsigned, in bytes"), begins)
    places = np.zeros(3, np.int64)
    library("where", np.array([262_143], np.int32), 1, 8960, places)
    say(
        f"Element {places[2]:,} of the last table is in row {places[2] // 8960:,}, {places[2] % 8960:,} "
        "elements from its beginning."
    )

    section("An id that is none")
    try:
        ops.embedding(bits.view(ops.bfloat16), [vocab], device=device)
    except InvalidRequestError as error:
        say(f"{type(error).__name__}: {error}")

    chosen = [tokenizer.encode(word)[0] for word in WORDS]
    return {
        "words": [word.strip() for word in WORDS],
        "cosines": [[round(float(v), 2) for v in row] for row in unit[chosen] @ unit[chosen].T],
        "used": {
            kernel: round(_share(*_first_load(version, text_ids, dim)[:2]), 4)
            for version, kernel in enumerate(VERSIONS, 1)
        },
    }


def _first_load(version: int, ids: list[int], dim: int) -> tuple[int, int, int]:
    """Of warp 0's first load from the table: its sectors and the bytes it wants. And all warps' loads."""
    row_bytes = 2 * dim
    if version == 1:  # the first element of 32 rows; dim times
        addresses = [i * row_bytes for i in ids]
        return sectors_of(addresses, 2), 2 * len(set(addresses)), dim
    size = 2 if version == 2 else 16
    addresses = [ids[0] * row_bytes + size * t for t in range(WARP)]
    warps_of_a_row = -(-row_bytes // (size * WARP))
    return sectors_of(addresses, size), size * WARP, len(ids) * warps_of_a_row


def _share(sectors: int, wanted: int) -> float:
    return wanted / (sectors * SECTOR)


def draw(data: Data, figure: Any) -> None:
    left, right = figure.subplots(1, 2, width_ratios=(5, 3))
    words, n = data["words"], len(data["words"])
    image = left.pcolormesh(np.array(data["cosines"]), cmap="Blues", vmin=0, vmax=1)
    left.set(
        title="Cosine of the angle between two rows", xticks=np.arange(n) + 0.5, yticks=np.arange(n) + 0.5
    )
    left.set_xticklabels(words, rotation=60, ha="right")
    left.set_yticklabels(words)
    left.invert_yaxis()
    figure.colorbar(image, ax=left)
    names = list(data["used"])[::-1]
    right.barh(names, [100 * data["used"][name] for name in names], color=GREY)
    right.set(title="Used of a load", xlabel="%", xlim=(0, 118))
    for i, name in enumerate(names):
        right.text(100 * data["used"][name] + 2, i, f"{data['used'][name]:.0%}", va="center")
