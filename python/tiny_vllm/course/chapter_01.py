"""Safetensors and your model

A file of weights, read by hand and by the engine, and files that lie.
"""

from __future__ import annotations

import json
import math
import mmap
import tempfile
import time
from pathlib import Path
from typing import Any

from tiny_vllm import Engine, _core
from tiny_vllm.bundled import bundled_model_folder
from tiny_vllm.course.lab import BLUE, GREEN, GREY, ORANGE, Data, measured, say, section, table
from tiny_vllm.errors import ModelLoadError

PARTS = ("embedding", "attention", "MLP", "norms")
LAYER = "model.layers.0."


def run(device: str) -> Data:
    folder = bundled_model_folder()
    path = folder / "model.safetensors"
    with open(path, "rb") as file:
        data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)

    section("The first bytes")
    size = int.from_bytes(data[:8], "little")
    text = data[8 : 8 + size].decode("utf-8")
    header: dict[str, Any] = json.loads(text)
    header.pop("__metadata__", None)
    say(f"Bytes 0 to 7: {data[:8].hex(' ')}. As a little-endian number: {size:,}.")
    say(f"The header begins: {text[: text.index('BF16') + 5]},…")
    weights = max(entry["data_offsets"][1] for entry in header.values())
    say(f"It names {len(header)} tensors and ends with {len(text) - len(text.rstrip())} spaces.")
    say(f"8 + {size:,} + {weights:,} = {8 + size + weights:,} bytes. The file has {len(data):,}.")

    section("Some tensors")
    names = [
        "model.embed_tokens.weight",
        LAYER + "input_layernorm.weight",
        LAYER + "mlp.up_proj.weight",
        LAYER + "self_attn.k_proj.weight",
        "model.norm.weight",
    ]
    rows = []
    for name in names:
        begin, end = header[name]["data_offsets"]
        rows.append((name, header[name]["dtype"], str(tuple(header[name]["shape"])), begin, end))
    table(("name", "dtype", "shape", "begin", "end"), rows)

    section("One number by hand")
    row, dim = 504, header[names[0]]["shape"][1]  # the token 'The'
    at = 8 + size + header[names[0]]["data_offsets"][0] + row * dim * 2
    two = data[at : at + 2]
    say(f"Row {row} of the embedding begins at 8 + {size:,} + 0 + {row} x {dim} x 2 = byte {at:,}.")
    by_engine = _core.Checkpoint(str(folder)).numpy(names[0])[row, 0]
    bits = int.from_bytes(two, "little")
    say(f"The two bytes there are {two.hex(' ')}, the bits {bits:016b}: {_bfloat16(bits)}.")
    say(f"The engine reads {by_engine}.")
    data.close()

    section("Opening and reading")
    lines = []
    before, start = _mapped_mb(), time.perf_counter()
    opened = _core.SafetensorsFile(str(path))
    lines.append(_line("opened, header checked", start, before))
    start = time.perf_counter()
    opened.bytes(names[0])
    lines.append(_line("one tensor of 56.6 MB read", start, before))
    start = time.perf_counter()
    for name in opened.names:
        opened.bytes(name)
    lines.append(_line("all of them read", start, before))
    del opened
    table(("", "time", "of the file in memory"), lines)

    section("Where the numbers are")
    counts = dict.fromkeys(PARTS, 0)
    for name, entry in header.items():
        counts[_part(name)] += math.prod(entry["shape"])
    total = sum(counts.values())
    table(
        ("part", "tensors", "numbers", "share"),
        [
            (part, sum(_part(n) == part for n in header), f"{count:,}", f"{count / total:.1%}")
            for part, count in counts.items()
        ],
    )
    known = json.loads((folder / "config.json").read_text())
    say(
        f"In all {total:,}. config.json says tie_word_embeddings: {json.dumps(known['tie_word_embeddings'])}."
    )
    say(f"The file {'has' if 'lm_head.weight' in header else 'has no'} lm_head.weight.")

    section("Tied and not tied")
    with tempfile.TemporaryDirectory() as temporary:
        untied = Path(temporary)
        (untied / path.name).symlink_to(path)
        (untied / "config.json").write_text(json.dumps({**known, "tie_word_embeddings": False}))
        try:
            Engine(untied, device="cpu", kv_cache_memory_bytes=8_000_000)
        except ModelLoadError as error:
            say(f"The same file, and tie_word_embeddings: false: {str(error).replace(f'{untied}: ', '')}")

    section("Files that lie")
    with tempfile.TemporaryDirectory() as temporary:
        for what, content in _lies().items():
            say(f"{what}: {_refusal(Path(temporary) / 'model.safetensors', content)}")

    section("The sum that wraps")
    announced = 2**64 - 5
    size = len(_lies()["Nothing wrong"])
    say(f"The file announces a header of {announced:,} bytes.")
    say(f"In 64 bits, 8 + that is {(8 + announced) % 2**64}. The file has {size} bytes.")

    section("Models we do not know")
    for change in ({"model_type": "gpt2"}, {"num_experts": 8}, {"num_key_value_heads": 4}):
        try:
            _core.parse_config(json.dumps({**known, **change}))
        except ModelLoadError as error:
            say(f"{json.dumps(change)}: {error}")
    return {
        "strip": _strip(header),
        "layer": [
            [name.removeprefix(LAYER), *entry["data_offsets"], _part(name)]
            for name, entry in header.items()
            if name.startswith(LAYER)
        ],
    }


def _bfloat16(bits: int) -> float:
    """1 sign, 8 exponent and 7 mantissa bits: chapter 2."""
    sign, exponent, mantissa = bits >> 15, bits >> 7 & 255, bits & 127
    return float((-1) ** sign * 2.0 ** (exponent - 127) * (1 + mantissa / 128))


def _part(name: str) -> str:
    if "norm" in name:
        return "norms"
    return "attention" if "self_attn" in name else "MLP" if "mlp" in name else "embedding"


def _mapped_mb() -> float:
    """Pages of files that this process has in memory; Linux alone says it."""
    try:
        status = Path("/proc/self/status").read_text()
    except OSError:
        return math.nan
    return int(status.split("RssFile:")[1].split()[0]) * 1024 / 1e6


def _line(what: str, start: float, before: float) -> tuple[str, str, str]:
    seconds = time.perf_counter() - start
    return what, measured(seconds * 1e3, "ms"), measured(max(0.0, _mapped_mb() - before), "MB")


def file_of(header: dict[str, Any], data: bytes) -> bytes:
    """A safetensors file."""
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


def _lies() -> dict[str, bytes]:
    def entry(shape: list[int], begin: int, end: int) -> dict[str, Any]:
        return {"dtype": "F32", "shape": shape, "data_offsets": [begin, end]}

    good = file_of({"a": entry([2, 2], 0, 16), "b": entry([3], 16, 28)}, bytes(28))
    return {
        "Nothing wrong": good,
        "One byte cut off": good[:-1],
        "Cut in the header": good[:50],
        "Length of the header 2^64 - 5": (2**64 - 5).to_bytes(8, "little") + good[8:],
        "Two tensors share bytes": file_of({"a": entry([2, 2], 0, 16), "b": entry([3], 8, 20)}, bytes(20)),
        "Bytes that nobody owns": file_of({"a": entry([2], 0, 8), "b": entry([3], 16, 28)}, bytes(28)),
        "2^32 rows of 2^32 numbers, in no bytes": file_of({"a": entry([2**32, 2**32], 0, 0)}, b""),
        "A pointer of Git LFS": b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 269\n",
    }


def _refusal(path: Path, content: bytes) -> str:
    path.write_bytes(content)
    try:
        return f"opened, it has {' and '.join(_core.SafetensorsFile(str(path)).names)}"
    except ModelLoadError as error:
        return str(error).replace(f"{path}: ", "")


def _strip(header: dict[str, Any]) -> list[list[Any]]:
    """Runs of tensors of one part, in order: [part, begin, end]. Norms are too thin to see."""
    runs: list[list[Any]] = []
    for name, entry in header.items():
        part, (begin, end) = _part(name), entry["data_offsets"]
        if part == "norms":
            continue
        if runs and runs[-1][0] == part:
            runs[-1][2] = end
        else:
            runs.append([part, begin, end])
    return runs


def draw(data: Data, figure: Any) -> None:
    whole, layer = figure.subplots(2, 1)
    colors = dict(zip(PARTS, (BLUE, ORANGE, GREEN, GREY), strict=True))
    for part in ("embedding", "MLP", "attention"):
        spans = [(begin / 1e6, (end - begin) / 1e6) for name, begin, end in data["strip"] if name == part]
        whole.broken_barh(spans, (0, 1), facecolors=colors[part], label=part)
    whole.set(title="The file of the small model", xlabel="MB from the end of the header", yticks=[])
    whole.legend(loc="upper center", bbox_to_anchor=(0.5, -0.45), ncols=3)
    start = data["layer"][0][1]
    for name, begin, end, part in data["layer"]:
        begin, end = (begin - start) / 1e6, (end - start) / 1e6
        layer.broken_barh([(begin, end - begin)], (0, 1), facecolors=colors[part], edgecolor="white")
        if part != "norms":
            label = name.split(".")[1].removesuffix("_proj")
            layer.text((begin + end) / 2, 0.5, label, ha="center", va="center", color="white")
    layer.set(title="Layer 0 alone, its two norms too thin to see", xlabel="MB from its beginning", yticks=[])
    for axes in (whole, layer):
        axes.spines["left"].set_visible(False)
        axes.margins(0)
