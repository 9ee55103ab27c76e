"""Weights on disk: files against the safetensors library, folders, and what a failed download leaves."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest
import safetensors
import safetensors.numpy
import tiny_models
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_vllm import _core
from tiny_vllm.errors import InvalidRequestError, ModelLoadError

Array = npt.NDArray[Any]
GOOD_HEADER = (
    '{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},'
    '"b":{"dtype":"F16","shape":[3],"data_offsets":[8,14]}}'
)
GOOD_DATA = bytes(range(1, 15))


def with_length(header: bytes | str, data: bytes = b"") -> bytes:
    header = header.encode() if isinstance(header, str) else header
    return len(header).to_bytes(8, "little") + header + data


GOOD = with_length(GOOD_HEADER, GOOD_DATA)


def open_bytes(tmp_path: Path, content: bytes) -> Any:
    path = tmp_path / "model.safetensors"
    path.write_bytes(content)
    return _core.SafetensorsFile(str(path))


def bits(values: Array) -> Array:
    return values.view({2: np.uint16, 4: np.uint32}[values.itemsize])


def write_shards(
    folder: Path, shards: dict[str, dict[str, Array]], weight_map: dict[str, Any] | None = None
) -> None:
    for file, tensors in shards.items():
        tiny_models.write_safetensors(folder / file, tensors, "float32")
    if weight_map is None:
        weight_map = {name: file for file, tensors in shards.items() for name in tensors}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def ones(*names: str) -> dict[str, Array]:
    return {name: np.full(4, i, dtype=np.float32) for i, name in enumerate(names)}


SHARD_1, SHARD_2 = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"


# ---- one file --------------------------------------------------------------------------------------------


def test_reads_what_the_library_writes(tmp_path: Path) -> None:
    tensors = {
        "matrix": np.arange(6, dtype=np.float32).reshape(2, 3),
        "half": np.array([1.5, -2.25], dtype=np.float16),
        "scalar": np.array(3.5, dtype=np.float32),
        "empty": np.zeros((0, 4), dtype=np.float32),
        "имя é 模型": np.ones(1, dtype=np.float32),
        "ids": np.arange(3, dtype=np.int64),
    }
    path = tmp_path / "модель é 模型.safetensors"
    safetensors.numpy.save_file(tensors, path, metadata={"format": "pt", "note": "é"})
    file = _core.SafetensorsFile(str(path))
    assert sorted(file.names) == sorted(tensors)
    for name, values in tensors.items():
        entry = file.tensor(name)
        assert (entry.name, entry.shape, entry.nbytes) == (name, values.shape, values.nbytes)
        assert entry.file == str(path)
        assert file.bytes(name) == values.tobytes()
        if name != "ids":
            np.testing.assert_array_equal(file.numpy(name), values.astype(np.float32), strict=True)
    assert not file.tensor("ids").supported
    with pytest.raises(ModelLoadError, match="tensor 'ids' has dtype I64; supported are BF16, F16 and F32"):
        file.numpy("ids")
    with pytest.raises(KeyError, match="no tensor 'other'"):
        file.tensor("other")
    with pytest.raises(InvalidRequestError, match="dtype"):
        file.numpy("matrix", "float64")
    assert "matrix" in file
    assert "other" not in file


@pytest.mark.parametrize("name", ["F64", "I64", "I32", "I16", "I8", "U64", "U32", "U16", "U8", "BOOL", "C64",
                                  "F8_E4M3", "F8_E5M2", "F8_E8M0"])  # fmt: skip
def test_other_dtypes_do_not_matter_until_they_are_needed(tmp_path: Path, name: str) -> None:
    size = {"C64": 8, "BOOL": 1}.get(name) or (1 if name.startswith("F8") else int(name[1:]) // 8)
    header = {
        "x": {"dtype": name, "shape": [3], "data_offsets": [0, 3 * size]},
        "a": {"dtype": "F32", "shape": [1], "data_offsets": [3 * size, 3 * size + 4]},
    }
    file = open_bytes(tmp_path, with_length(json.dumps(header), bytes(3 * size) + np.float32(2.5).tobytes()))
    assert file.numpy("a").tolist() == [2.5]
    assert (file.tensor("x").dtype, file.tensor("x").supported) == (name, False)


def test_every_float16_number_is_converted_exactly(tmp_path: Path) -> None:
    halves = np.arange(65536, dtype=np.uint16).view(np.float16)
    path = tmp_path / "half.safetensors"
    safetensors.numpy.save_file({"x": halves}, path)
    file = _core.SafetensorsFile(str(path))
    as_float = halves.astype(np.float32)
    finite = ~np.isnan(as_float)
    np.testing.assert_array_equal(bits(file.numpy("x"))[finite], bits(as_float)[finite])
    assert np.isnan(file.numpy("x")[~finite]).all()
    with np.errstate(invalid="ignore"):
        as_bfloat16 = as_float.astype(ml_dtypes.bfloat16)
    np.testing.assert_array_equal(file.numpy("x", "bfloat16")[finite], bits(as_bfloat16)[finite])
    assert np.isnan(file.numpy("x", "bfloat16").view(ml_dtypes.bfloat16)[~finite].astype(np.float32)).all()


def test_float32_is_rounded_to_the_nearest_bfloat16(tmp_path: Path) -> None:
    random = np.random.default_rng(0).integers(0, 2**32, 100_000, dtype=np.uint32)
    ties = np.arange(0, 2**32, 2**13 + 2**15, dtype=np.uint64).astype(np.uint32) & ~np.uint32(0x7FFF) | 0x8000
    values = np.concatenate([random, ties]).view(np.float32)
    path = tmp_path / "float.safetensors"
    safetensors.numpy.save_file({"x": values}, path)
    got = _core.SafetensorsFile(str(path)).numpy("x", "bfloat16")
    with np.errstate(all="ignore"):
        wanted = bits(values.astype(ml_dtypes.bfloat16))
    finite = ~np.isnan(values)
    assert finite.sum() > 100_000
    np.testing.assert_array_equal(got[finite], wanted[finite])
    assert np.isnan(got.view(ml_dtypes.bfloat16)[~finite].astype(np.float32)).all()


# ---- damaged and hostile files (B37, B38) ----------------------------------------------------------------


@pytest.mark.parametrize(
    "length",
    [
        0,
        1,
        7,
        len(GOOD),
        len(GOOD) - 7,
        100_000_000,
        100_000_001,
        2**31,
        2**63,
        2**64 - 1,
        2**64 - 5,
        2**64 - 8,
    ],
)
def test_header_lengths(tmp_path: Path, length: int) -> None:
    with pytest.raises(ModelLoadError, match=r"model\.safetensors: "):
        open_bytes(tmp_path, length.to_bytes(8, "little") + GOOD[8:])


def changed(old: str, new: str) -> bytes:
    return with_length(GOOD_HEADER.replace(old, new), GOOD_DATA)


BAD_FILES = {
    "0 bytes": (b"", "is empty"),
    "7 bytes": (b"1234567", "has 7 bytes"),
    "not JSON": (with_length("{not JSON}"), "not valid JSON"),
    "a list": (with_length("[]"), "does not begin with '{'"),
    "nested lists": (with_length('{"a":' + "[" * 10_000), "tensor 'a' must be an object"),
    "nested objects": (with_length('{"a":' * 10_000), "unknown field 'a'"),
    "invalid UTF-8": (with_length(b'{"\xff\xfe":{}}'), "not valid JSON"),
    "NUL bytes": (with_length(GOOD_HEADER + "\0", GOOD_DATA), "not valid JSON"),
    "duplicate names": (changed('"b"', '"a"'), "the name 'a' appears twice"),
    "hole": (changed("8,14", "9,15") + b"x", "tensor 'b'.*hole"),
    "overlap": (changed("8,14", "7,13")[:-1], "tensor 'b'.*overlap"),
    "too small": (changed("[3]", "[2]"), "tensor 'b': shape and dtype need 4"),
    "overflow": (changed("[3]", "[4294967296,4294967296]"), "tensor 'b'.*impossible"),
    "cut header": (GOOD[:40], f"header should end at byte {8 + len(GOOD_HEADER)}, but the file has 40 bytes"),
    "1 byte short": (GOOD[:-1], f"expected {len(GOOD)} bytes, found {len(GOOD) - 1}"),
    "10 bytes more": (GOOD + bytes(10), f"expected {len(GOOD)} bytes, found {len(GOOD) + 10}"),
    "Git LFS": (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n", "Git LFS pointer"),
    "HTML": (b"<!DOCTYPE html>\n<html>Please sign in</html>\n", "web page"),
}


@pytest.mark.parametrize("name", BAD_FILES)
def test_bad_files_are_refused_by_name(tmp_path: Path, name: str) -> None:
    content, message = BAD_FILES[name]
    with pytest.raises(ModelLoadError, match=r"model\.safetensors: .*" + message):
        open_bytes(tmp_path, content)


def test_the_good_file_is_good(tmp_path: Path) -> None:
    file = open_bytes(tmp_path, GOOD)
    assert file.bytes("a") + file.bytes("b") == GOOD_DATA


def test_hostile_headers_cost_no_memory(tmp_path: Path) -> None:
    big = 40_000_000
    files = {
        "long": with_length(b'{"a":' + b"[" * big),
        "nested": with_length(b'{"a":{"shape":' + b"[" * big),
        "dims": with_length(b'{"a":{"shape":[' + b"1," * (big // 2)),
        "strings": with_length(b'{"__metadata__":{"a":' + b'[""' + b',""' * (big // 3)),
        "length": (100_000_000).to_bytes(8, "little") + b"{}",
        "2^63": (2**63).to_bytes(8, "little") + b"{}",
    }
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    code = (
        "import resource, sys\n"
        "from tiny_vllm import _core\n"
        "from tiny_vllm.errors import ModelLoadError\n"
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "for path in sys.argv[1:]:\n"
        "    try:\n"
        "        _core.SafetensorsFile(path)\n"
        "        print('accepted', path)\n"
        "    except ModelLoadError as e:\n"
        "        assert len(str(e)) < 1000\n"
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)\n"
    )
    paths = [str(tmp_path / name) for name in files]
    out = subprocess.run(
        [sys.executable, "-c", code, *paths],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    ).stdout
    # ru_maxrss counts KiB. The mapped file itself is resident while it is searched for NUL bytes.
    assert int(out) < (big + 20_000_000) // 1024, out


@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_never_accepts_what_the_library_refuses(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    """Random changes of a good file: refused with our error, or read as the library reads it."""
    content = bytearray(GOOD)
    for _ in range(data.draw(st.integers(1, 3))):
        position = data.draw(st.integers(0, len(content) - 1))
        kind = data.draw(st.sampled_from(["replace", "insert", "delete"]))
        if kind == "delete":
            del content[position]
        elif kind == "insert":
            content.insert(position, data.draw(st.sampled_from(b'0123456789[]{},:"-. ae\x00')))
        else:
            content[position] = data.draw(st.integers(0, 255))
        if data.draw(st.booleans()):  # keep the length right, so that the header itself is looked at
            content[:8] = (len(content) - 8 - len(GOOD_DATA)).to_bytes(8, "little", signed=True)
    path = tmp_path_factory.mktemp("mutated") / "x.safetensors"
    path.write_bytes(content)
    try:
        ours = _core.SafetensorsFile(str(path))
    except ModelLoadError:
        return
    theirs = dict(safetensors.deserialize(bytes(content)))
    assert sorted(ours.names) == sorted(theirs)
    for name, tensor in theirs.items():
        assert list(ours.tensor(name).shape) == tensor["shape"]
        assert ours.tensor(name).dtype == tensor["dtype"]
        assert ours.bytes(name) == bytes(tensor["data"])


# ---- folders ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", tiny_models.MODELS)
def test_tiny_models_are_read_bit_for_bit(tmp_path: Path, name: str) -> None:
    folder = tmp_path / "модель é 模型"
    tiny_models.write_model(name, folder)
    checkpoint = _core.Checkpoint(str(folder))
    tensors = tiny_models.tensors_of(name)
    assert checkpoint.names == sorted(tensors)
    assert checkpoint.notes == []
    assert len(checkpoint.files) == tiny_models.MODELS[name].shards
    config = tiny_models.config_of(name)
    dtype = config.get("torch_dtype", config.get("dtype"))
    for tensor_name, values in tensors.items():
        assert checkpoint.tensor(tensor_name).shape == values.shape
        assert checkpoint.bytes(tensor_name) == tiny_models.encode(values, dtype)
        stored = values.astype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)
        np.testing.assert_array_equal(checkpoint.numpy(tensor_name), stored.astype(np.float32), strict=True)
        np.testing.assert_array_equal(
            checkpoint.numpy(tensor_name, "bfloat16"),
            bits(stored.astype(np.float32).astype(ml_dtypes.bfloat16)),
            strict=True,
        )
    assert checkpoint.nbytes == sum(checkpoint.tensor(n).nbytes for n in tensors)


def test_folder_by_relative_path_and_by_symlinks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The Hub's cache is a folder of symbolic links to files named by their hash."""
    tiny_models.write_model("llama_sharded", tmp_path / "blobs")
    snapshot = tmp_path / "snapshots" / "é"
    snapshot.mkdir(parents=True)
    for i, file in enumerate(sorted((tmp_path / "blobs").iterdir())):
        file.rename(file.with_name(f"{i:064x}"))
        (snapshot / file.name).symlink_to(Path("../../blobs") / f"{i:064x}")
    (tmp_path / "link").symlink_to(snapshot)
    monkeypatch.chdir(tmp_path)
    wanted = sorted(tiny_models.tensors_of("llama_sharded"))
    for folder in ("snapshots/é", "link", "link/", "./snapshots/../link"):
        assert _core.Checkpoint(folder).names == wanted


@pytest.mark.parametrize(
    "cut", ["1 byte", "1 page", "half", "in the header", "10 bytes more", "Git LFS", "HTML", "empty"]
)
def test_a_damaged_last_shard_is_refused(tmp_path: Path, cut: str) -> None:
    tiny_models.write_model("llama_sharded", tmp_path)
    path = tmp_path / "model-00003-of-00003.safetensors"
    content = path.read_bytes()
    damaged = {
        "1 byte": content[:-1],
        "1 page": content[:-4096],
        "half": content[: len(content) // 2],
        "in the header": content[:100],
        "10 bytes more": content + bytes(10),
        **{name: BAD_FILES[name][0] for name in ("Git LFS", "HTML")},
        "empty": b"",
    }[cut]
    path.write_bytes(damaged)
    with pytest.raises(ModelLoadError, match=path.name) as error:
        _core.Checkpoint(str(tmp_path))
    if cut in ("1 byte", "1 page", "half", "10 bytes more"):
        assert f"expected {len(content)} bytes, found {len(damaged)}" in str(error.value)


def test_missing_shards_are_named(tmp_path: Path) -> None:
    tiny_models.write_model("llama_sharded", tmp_path)
    (tmp_path / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(
        ModelLoadError, match=r"1 of 3 files .* is missing: model-00002-of-00003\.safetensors"
    ):
        _core.Checkpoint(str(tmp_path))


@pytest.mark.parametrize("file", ["../x.safetensors", "/etc/x.safetensors", "a/b.safetensors", "..", ".", "",
                                  "a\\b.safetensors", "a\0.safetensors", "weights.bin"])  # fmt: skip
def test_index_cannot_name_files_outside_the_folder(tmp_path: Path, file: str) -> None:
    write_shards(tmp_path, {SHARD_1: ones("a")}, {"a": file})
    with pytest.raises(ModelLoadError, match=r"index\.json: .*tensor 'a' names .* not the plain name"):
        _core.Checkpoint(str(tmp_path))


def test_a_tensor_in_two_shards_is_refused(tmp_path: Path) -> None:
    write_shards(tmp_path, {SHARD_1: ones("a", "b"), SHARD_2: ones("b", "c")})
    with pytest.raises(ModelLoadError, match=rf"tensor 'b' is in two files: .*{SHARD_1} and .*{SHARD_2}"):
        _core.Checkpoint(str(tmp_path))


def test_a_tensor_in_another_shard_than_the_index_says_is_refused(tmp_path: Path) -> None:
    write_shards(
        tmp_path, {SHARD_1: ones("a"), SHARD_2: ones("b", "c")}, {"a": SHARD_1, "b": SHARD_2, "c": SHARD_1}
    )
    with pytest.raises(ModelLoadError, match=rf"tensor 'c' is in {SHARD_1}, but it is in .*{SHARD_2}"):
        _core.Checkpoint(str(tmp_path))
    write_shards(
        tmp_path, {SHARD_1: ones("a"), SHARD_2: ones("b")}, {"a": SHARD_1, "b": SHARD_2, "z": SHARD_1}
    )
    with pytest.raises(ModelLoadError, match=rf"tensor 'z' is in {SHARD_1}, but it is not there"):
        _core.Checkpoint(str(tmp_path))


def test_a_tensor_that_the_index_forgets_can_be_used_and_is_noted(tmp_path: Path) -> None:
    write_shards(tmp_path, {SHARD_1: ones("a", "extra")}, {"a": SHARD_1})
    checkpoint = _core.Checkpoint(str(tmp_path))
    assert checkpoint.numpy("extra").tolist() == [1, 1, 1, 1]
    assert len(checkpoint.notes) == 1
    assert "does not list 1 tensors that are in its files: extra" in checkpoint.notes[0]


@pytest.mark.parametrize(
    ("index", "message"),
    [
        ("", "is empty"),
        ("[]", "must be a JSON object"),
        ("null", "must be a JSON object"),
        ("{", "not valid JSON"),
        ("{}", "has no weight_map"),
        ('{"weight_map": {}}', "weight_map is empty"),
        ('{"weight_map": []}', "weight_map must map tensor names to file names"),
        ('{"weight_map": "x"}', "weight_map must map tensor names to file names"),
        ('{"weight_map": {"a": 1}}', "tensor 'a' must name a file"),
        ('{"weight_map": {"a": null}}', "tensor 'a' must name a file"),
        ('{"weight_map": {"a": {"b": "c"}}}', "tensor 'a' must name a file"),
        ('{"weight_map": {"a": "x.safetensors", "a": "y.safetensors"}}', "lists tensor 'a' twice"),
        ('{"weight_map": {"a": "x.safetensors"}, "weight_map": {}}', "two weight_map"),
        ('{"metadata": ' + "[" * 10_000, "nested more than 16 deep"),
        ('{"metadata": ' + '{"a":' * 10_000, "nested more than 16 deep"),
        ("version https://git-lfs.github.com/spec/v1\n", "not valid JSON"),
    ],
)
def test_bad_indexes_are_refused(tmp_path: Path, index: str, message: str) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(index)
    with pytest.raises(ModelLoadError, match=r"index\.json: .*" + message):
        _core.Checkpoint(str(tmp_path))


def test_index_metadata_may_be_anything(tmp_path: Path) -> None:
    tiny_models.write_safetensors(tmp_path / "x.safetensors", ones("a"), "float32")
    metadata = {"total_size": 16, "x": [1, -1, 2.5, None, True, {"weight_map": {"b": 1}}], "y": "z"}
    index = {"metadata": metadata, "weight_map": {"a": "x.safetensors"}, "other": [[]]}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert _core.Checkpoint(str(tmp_path)).names == ["a"]


def test_a_folder_with_one_file_of_another_name(tmp_path: Path) -> None:
    tiny_models.write_safetensors(tmp_path / "weights.safetensors", ones("a"), "float32")
    assert _core.Checkpoint(str(tmp_path)).names == ["a"]
    tiny_models.write_safetensors(tmp_path / "adapter.safetensors", ones("b"), "float32")
    with pytest.raises(
        ModelLoadError, match=r"there are 2 \(adapter\.safetensors, weights\.safetensors\) but no index"
    ):
        _core.Checkpoint(str(tmp_path))
    tiny_models.write_safetensors(tmp_path / "model.safetensors", ones("c"), "float32")
    assert _core.Checkpoint(str(tmp_path)).names == ["c"]


def test_model_safetensors_wins_over_an_index(tmp_path: Path) -> None:
    write_shards(tmp_path, {SHARD_1: ones("a")})
    tiny_models.write_safetensors(tmp_path / "model.safetensors", ones("b"), "float32")
    checkpoint = _core.Checkpoint(str(tmp_path))
    assert checkpoint.names == ["b"]
    assert "has both" in checkpoint.notes[0]


def test_folders_without_weights(tmp_path: Path) -> None:
    with pytest.raises(
        ModelLoadError, match=r"no weights: looked for model\.safetensors, model\.safetensors\.index\.json"
    ):
        _core.Checkpoint(str(tmp_path))
    (tmp_path / "pytorch_model.bin").write_bytes(b"PK")
    with pytest.raises(
        ModelLoadError, match=r"pytorch_model\.bin is a PyTorch pickle: convert the model to safetensors"
    ):
        _core.Checkpoint(str(tmp_path))
    with pytest.raises(ModelLoadError, match="nowhere: no such folder"):
        _core.Checkpoint(str(tmp_path / "nowhere"))
    with pytest.raises(ModelLoadError, match="is not a folder"):
        _core.Checkpoint(str(tmp_path / "pytorch_model.bin"))
    (tmp_path / "model.safetensors").mkdir()
    with pytest.raises(ModelLoadError, match=r"model\.safetensors: is a directory"):
        _core.Checkpoint(str(tmp_path))


def test_paths_that_are_not_utf8(tmp_path: Path) -> None:
    folder = os.fsencode(tmp_path) + b"/\xff\xfe"
    os.mkdir(folder)
    with pytest.raises(ModelLoadError, match=r"\\xff\\xfe: no weights"):
        _core.Checkpoint(folder)


def test_files_are_closed_again(tmp_path: Path) -> None:
    """Mapping and dropping a file many times uses up neither descriptors nor address space."""
    (tmp_path / "model.safetensors").write_bytes(GOOD)
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    open_files = len(os.listdir("/proc/self/fd"))
    checkpoints = [_core.Checkpoint(str(tmp_path)) for _ in range(50)]
    assert len(os.listdir("/proc/self/fd")) == open_files
    del checkpoints
    for _ in range(min(soft, 2000) + 10):
        _core.Checkpoint(str(tmp_path))
    (tmp_path / "model.safetensors").write_bytes(GOOD[:-1])
    for _ in range(min(soft, 2000) + 10):
        with pytest.raises(ModelLoadError):
            _core.Checkpoint(str(tmp_path))
    assert len(os.listdir("/proc/self/fd")) == open_files
