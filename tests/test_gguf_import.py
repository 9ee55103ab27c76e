"""GGUF files in and out: the same weights as others get from them, and no file that can do harm."""

from __future__ import annotations

import hashlib
import json
import struct
import tracemalloc
from pathlib import Path
from typing import Any

import gguf
import ml_dtypes
import numpy as np
import pytest
import tiny_models
from conftest import require_package
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tiny_vllm import gguf_file
from tiny_vllm.bundled import bundled_model_folder
from tiny_vllm.errors import ModelLoadError
from tiny_vllm.gguf_export import write_gguf_bf16
from tiny_vllm.gguf_file import GGUFFile
from tiny_vllm.gguf_import import (
    convert_gguf,
    infer_llama3_scaling,
    llama3_frequency_factors,
    round_to_bf16,
    unpermute_rows,
)
from tiny_vllm.tokenizer import Tokenizer, load_generation_config

BF16 = ml_dtypes.bfloat16


def read_safetensors(path: Path) -> dict[str, np.ndarray]:
    data = path.read_bytes()
    size = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + size])
    assert size % 8 == 0
    assert header.pop("__metadata__") == {"format": "pt"}
    found = {}
    for name, row in header.items():
        kind = {"BF16": BF16, "F16": np.float16, "F32": np.float32}[row["dtype"]]
        begin, end = row["data_offsets"]
        found[name] = np.frombuffer(data[8 + size + begin : 8 + size + end], kind).reshape(row["shape"])
    return found


def read_json(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8"))


# ---- the bundled model, against numbers that another converter made ----------------------------------------


@pytest.fixture(scope="module")
def bundled() -> Path:
    return bundled_model_folder()


@pytest.fixture(scope="module")
def golden() -> dict[str, Any]:
    return read_json(Path(__file__).parent / "data" / "golden_smollm2.json")


def test_weights_of_the_bundled_model(bundled: Path, golden: dict[str, Any]) -> None:
    digest = hashlib.sha256((bundled / "model.safetensors").read_bytes()).hexdigest()
    assert digest == golden["weights_sha256"]


def test_config_of_the_bundled_model(bundled: Path) -> None:
    config = read_json(bundled / "config.json")
    expected = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "num_hidden_layers": 30,
        "hidden_size": 576,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "head_dim": 64,
        "intermediate_size": 1536,
        "vocab_size": 49152,
        "rope_theta": 100000.0,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 8192,
        "tie_word_embeddings": True,
        "attention_bias": False,
        "torch_dtype": "bfloat16",
    }
    assert {key: config[key] for key in expected} == expected
    assert "rope_scaling" not in config


def test_tokenizer_of_the_bundled_model(bundled: Path, golden: dict[str, Any]) -> None:
    tokenizer = Tokenizer.from_folder(bundled)
    for prompt in golden["prompts"]:
        assert tokenizer.encode(prompt["text"]) == prompt["prompt_ids"], prompt["name"]
        if "messages" in prompt:
            assert tokenizer.apply_chat_template(prompt["messages"]) == prompt["text"]
            assert tokenizer.encode_chat(prompt["messages"]) == prompt["prompt_ids"]
    assert (tokenizer.vocab_size, tokenizer.bos_token_id, tokenizer.eos_token_id) == (49152, 1, 2)
    assert tokenizer.special_ids == frozenset(range(17))
    assert load_generation_config(bundled, tokenizer).eos_token_ids == (2,)


@pytest.mark.slow
def test_the_bundled_model_there_and_back(bundled: Path, tmp_path: Path) -> None:
    """Written as GGUF and read again, tokenizer and all, it is the same folder, byte for byte."""
    again = convert_gguf(write_gguf_bf16(bundled, tmp_path / "again.gguf"), tmp_path / "again")
    for name in ("model.safetensors", "config.json", "generation_config.json"):
        assert (again / name).read_bytes() == (bundled / name).read_bytes(), name
    ours, first = read_json(again / "tokenizer_config.json"), read_json(bundled / "tokenizer_config.json")
    first.pop("unk_token")  # without a text of its own in byte-level BPE; not written
    assert ours == first
    assert read_json(again / "tokenizer.json") == read_json(bundled / "tokenizer.json")


# ---- small models ------------------------------------------------------------------------------------------

ROUND_TRIP = [
    "llama_untied",
    "llama_tied_head_in_file",
    "llama_bias",
    "llama3_rope",
    "llama3_rope_new_style",
    "llama_head_dim_24",
    "llama_head_dim_80",
    "llama_mha_implicit",
    "llama_mqa",
    "llama_gqa_9_3",
    "llama_sharded",
    "llama_float16",
    "llama_float32",
    "llama_rope_linear",
    "llama_rope_yarn",
    "llama_one_layer",
    "mistral_no_window",
    "qwen2",
    "qwen2_rope_yarn",
    "qwen3",
    "qwen3_tied",
]


def small_gguf(name: str, folder: Path) -> tuple[Path, Path]:
    """The Hugging Face folder of a tiny model, and its GGUF file without a vocabulary."""
    source = folder / name
    tiny_models.write_model(name, source)
    (source / "tokenizer.json").unlink()
    return source, write_gguf_bf16(source, folder / f"{name}.gguf")


@pytest.mark.parametrize("name", ROUND_TRIP)
def test_there_and_back(name: str, tmp_path: Path) -> None:
    _, file = small_gguf(name, tmp_path)
    again = convert_gguf(file, tmp_path / "again")
    weights = tiny_models.tensors_of(name)
    config, found_config = tiny_models.config_of(name), read_json(again / "config.json")
    if config["tie_word_embeddings"]:
        weights.pop("lm_head.weight", None)
    found = read_safetensors(again / "model.safetensors")
    stored = {"torch_dtype": "bfloat16", **config}["torch_dtype"]
    assert found.keys() == weights.keys()
    for key, values in weights.items():
        exact = values.astype(BF16 if stored == "bfloat16" else stored).astype(np.float32)
        assert np.array_equal(found[key], exact.astype(BF16)), key
    for key in ("hidden_size", "vocab_size", "num_attention_heads", "rms_norm_eps", "tie_word_embeddings"):
        assert found_config[key] == config[key]
    rope = config.get("rope_parameters") or config
    assert found_config["rope_theta"] == rope["rope_theta"]
    scaling = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    scaling.pop("rope_theta", None)
    if "type" in scaling:
        scaling["rope_type"] = scaling.pop("type")
    if scaling.get("rope_type") == "yarn":
        scaling.update(beta_fast=32.0, beta_slow=1.0)  # written out, the defaults
    assert found_config.get("rope_scaling", {}) == scaling
    assert not (again / "tokenizer.json").exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["llama_untied", "llama_tied", "llama_gqa_9_3", "llama_head_dim_32", "qwen2", "qwen3"]
)
def test_the_same_weights_as_transformers(name: str, tmp_path: Path) -> None:
    """transformers reads GGUF files with code of its own: names, and the order of rows (other for Qwen)."""
    for package in ("torch", "transformers", "accelerate"):
        require_package(package)
    from transformers import AutoModelForCausalLM

    _, file = small_gguf(name, tmp_path)
    again = read_safetensors(convert_gguf(file, tmp_path / "again") / "model.safetensors")
    state = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file=file.name).state_dict()
    for key, values in again.items():
        assert np.array_equal(state[key].float().numpy(), values.astype(np.float32)), key


@pytest.mark.parametrize(
    ("name", "word"),
    [
        ("qwen2_mixed_window", "sliding window"),
        ("mistral_window", "sliding window"),
        ("llama_rope_dynamic", "dynamic"),
        ("llama_eps_act", "hidden_act"),
    ],
)
def test_export_refuses_what_a_gguf_file_cannot_say(name: str, word: str, tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=word):
        small_gguf(name, tmp_path)
    assert not list(tmp_path.glob("*.gguf*"))


def test_export_refuses_a_tokenizer_without_merges(tmp_path: Path) -> None:
    tiny_models.write_model("llama_untied", tmp_path / "model")
    with pytest.raises(ModelLoadError, match="no merges"):
        write_gguf_bf16(tmp_path / "model", tmp_path / "out.gguf")


def test_rows_of_query_and_key() -> None:
    # One head of four: the GGUF file has the pairs (0, 2) and (1, 3) side by side.
    assert unpermute_rows(1, 4).tolist() == [0, 2, 1, 3]
    assert unpermute_rows(2, 6).tolist() == [0, 2, 4, 1, 3, 5, 6, 8, 10, 7, 9, 11]


# ---- numbers -----------------------------------------------------------------------------------------------


def test_rounding_to_bf16() -> None:
    rng = np.random.default_rng(0)
    bits = rng.integers(0, 1 << 32, 1 << 16, dtype=np.uint64).astype(np.uint32)
    ties = (rng.integers(0, 1 << 16, 1 << 12, dtype=np.uint64).astype(np.uint32) << 16) | 0x8000
    values = np.concatenate([bits, ties, ties + 1, ties - 1]).view(np.float32)
    values = values[np.isfinite(values)]
    with np.errstate(over="ignore"):
        assert np.array_equal(round_to_bf16(values), values.astype(BF16).view(np.uint16))


BASE = {
    "general.architecture": "llama",
    "llama.block_count": 1,
    "llama.context_length": 64,
    "llama.embedding_length": 256,
    "llama.feed_forward_length": 256,
    "llama.attention.head_count": 4,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
    "tokenizer.ggml.model": "no_vocab",
}
SHAPES = {
    "token_embd.weight": (64, 256),
    "output_norm.weight": (256,),
    "blk.0.attn_norm.weight": (256,),
    "blk.0.attn_q.weight": (256, 256),
    "blk.0.attn_k.weight": (256, 256),
    "blk.0.attn_v.weight": (256, 256),
    "blk.0.attn_output.weight": (256, 256),
    "blk.0.ffn_norm.weight": (256,),
    "blk.0.ffn_gate.weight": (256, 256),
    "blk.0.ffn_up.weight": (256, 256),
    "blk.0.ffn_down.weight": (256, 256),
}
Tensor = tuple[tuple[int, ...], int, bytes]  # shape, type, data


def small_tensors() -> dict[str, Tensor]:
    rng = np.random.default_rng(1)
    return {
        name: (shape, 0, rng.standard_normal(shape, dtype=np.float32).tobytes())
        for name, shape in SHAPES.items()
    }


def packed_string(text: str | bytes) -> bytes:
    raw = text.encode() if isinstance(text, str) else text
    return struct.pack("<Q", len(raw)) + raw


def packed_value(value: Any) -> bytes:
    if isinstance(value, bool):
        return struct.pack("<I?", 7, value)
    if isinstance(value, int):
        return struct.pack("<Ii", 5, value)
    if isinstance(value, float):
        return struct.pack("<If", 6, value)
    if isinstance(value, str):
        return struct.pack("<I", 8) + packed_string(value)
    if isinstance(value, bytes):  # a value given as it is to lie in the file
        return value
    body = (
        packed_value(value[0])[:4]
        + struct.pack("<Q", len(value))
        + b"".join(packed_value(v)[4:] for v in value)
    )
    return struct.pack("<I", 9) + body


def build(metadata: dict[str, Any], tensors: dict[str, Tensor], align: int = 32) -> bytes:
    """A GGUF file written by hand, so that it may say anything."""
    out = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(metadata))
    out += b"".join(packed_string(key) + packed_value(value) for key, value in metadata.items())
    data = b""
    for name, (shape, kind, raw) in tensors.items():
        out += packed_string(name) + struct.pack("<I", len(shape))
        out += b"".join(struct.pack("<Q", n) for n in reversed(shape)) + struct.pack("<IQ", kind, len(data))
        data += raw + b"\0" * (-len(raw) % align)
    return out + b"\0" * (-len(out) % align) + data


def import_bytes(folder: Path, content: bytes) -> Path:
    folder.mkdir(exist_ok=True)
    path = folder / "model.gguf"
    path.write_bytes(content)
    return convert_gguf(path, folder / "out")


def import_changed(
    folder: Path, metadata: dict[str, Any] | None = None, tensors: dict[str, Tensor | None] | None = None
) -> Path:
    """The small file with some metadata and tensors changed (None: left out)."""
    values = {k: v for k, v in {**BASE, **(metadata or {})}.items() if v is not None}
    weights = {k: v for k, v in {**small_tensors(), **(tensors or {})}.items() if v is not None}
    return import_bytes(folder, build(values, weights))


def test_the_hand_made_file_is_good(tmp_path: Path) -> None:
    folder = import_changed(tmp_path)
    config = read_json(folder / "config.json")
    assert (config["head_dim"], config["num_key_value_heads"], config["rope_theta"]) == (64, 4, 10000.0)
    assert config["tie_word_embeddings"] is True
    shape, _, raw = small_tensors()["blk.0.ffn_up.weight"]
    expected = np.frombuffer(raw, np.float32).reshape(shape).astype(BF16)
    found = read_safetensors(folder / "model.safetensors")
    assert np.array_equal(found["model.layers.0.mlp.up_proj.weight"], expected)


QUANTISED = ["F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"]


@pytest.mark.parametrize("kind", QUANTISED)
def test_quantised_weights(kind: str, tmp_path: Path) -> None:
    """A query matrix, whose rows are put in another order, and a plain one: as the gguf package reads
    them.
    """
    dtype = gguf.GGMLQuantizationType[kind]
    block, size = gguf.GGML_QUANT_SIZES[dtype]
    rng = np.random.default_rng(2)
    raw = rng.integers(0, 256, (256, 256 // block * size), dtype=np.uint8)
    if kind in ("F16", "BF16"):
        raw[:, 1::2] &= 0x3F  # small finite numbers
    else:
        # Wherever a block keeps its float16 scales, random bits below infinity.
        scales = {
            "Q4_1": [1, 3],
            "Q5_1": [1, 3],
            "Q2_K": [81, 83],
            "Q3_K": [109],
            "Q4_K": [1, 3],
            "Q5_K": [1, 3],
        }
        for at in scales.get(kind, [209] if kind == "Q6_K" else [1]):
            raw.reshape(256, -1, size)[:, :, at] &= 0x3B
    expected = gguf.dequantize(raw, dtype).astype(BF16)
    tensor = ((256, 256), int(dtype), raw.tobytes())
    names = ("blk.0.attn_q.weight", "blk.0.ffn_down.weight")
    found = read_safetensors(
        import_changed(tmp_path, tensors=dict.fromkeys(names, tensor)) / "model.safetensors"
    )
    assert np.array_equal(found["model.layers.0.mlp.down_proj.weight"], expected)
    assert np.array_equal(found["model.layers.0.self_attn.q_proj.weight"], expected[unpermute_rows(4, 64)])


def test_a_block_by_hand(tmp_path: Path) -> None:
    """Q4_1: 32 weights as scale * q + minimum, low nibbles first. Q8_0: scale * q."""
    nibbles = bytes(i | (15 - i) << 4 for i in range(16))
    q4 = np.array([0.5, -2.0], np.float16).tobytes() + nibbles
    q8 = np.array([0.25], np.float16).tobytes() + np.arange(-16, 16, dtype=np.int8).tobytes()
    tensors: dict[str, Tensor | None] = {
        "blk.0.ffn_up.weight": ((256, 256), 3, q4 * 2048),
        "blk.0.ffn_gate.weight": ((256, 256), 8, q8 * 2048),
    }
    found = read_safetensors(import_changed(tmp_path, tensors=tensors) / "model.safetensors")
    low = [0.5 * i - 2.0 for i in range(16)]
    assert found["model.layers.0.mlp.up_proj.weight"][7, 64:96].astype(float).tolist() == low + low[::-1]
    expected = [0.25 * i for i in range(-16, 16)]
    assert found["model.layers.0.mlp.gate_proj.weight"][255, 224:].astype(float).tolist() == expected


def test_memory_stays_flat(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file of 16 MiB passes through pieces of a quarter of one."""
    monkeypatch.setattr(gguf_file, "_CHUNK_VALUES", 1 << 16)
    path = tmp_path / "model.gguf"
    embedding: Tensor = ((16384, 256), 0, np.ones((16384, 256), np.float32).tobytes())
    path.write_bytes(build(BASE, {**small_tensors(), "token_embd.weight": embedding}))
    del embedding
    tracemalloc.start()
    try:
        convert_gguf(path, tmp_path / "out")
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 4 << 20


# ---- RoPE of Llama 3 ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_llama3_scaling_is_found_from_its_factors(head_dim: int, factor: float) -> None:
    wanted = {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    factors = llama3_frequency_factors(500000.0, head_dim, factor, 1.0, 4.0, 8192)
    assert infer_llama3_scaling(factors, 500000.0, head_dim) == wanted
    # As a converter that works in float32 throughout has them.
    noise = 1.0 + np.random.default_rng(0).uniform(-1e-6, 1e-6, factors.shape).astype(np.float32)
    noisy = np.where(factors == factors.max(), factors, factors * noise)
    assert infer_llama3_scaling(noisy, 500000.0, head_dim) == wanted
    assert infer_llama3_scaling(factors[::-1].copy(), 500000.0, head_dim) is None
    assert (
        infer_llama3_scaling(llama3_frequency_factors(1e4, head_dim, factor, 1.0, 8.0, 8192), 1e4, head_dim)
        is None
    )


def test_llama3_factors_are_those_of_transformers() -> None:
    require_package("torch")
    require_package("transformers")
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    scaling = {
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    config = LlamaConfig(head_dim=64, rope_parameters=scaling, max_position_embeddings=131072)
    frequencies, _ = ROPE_INIT_FUNCTIONS["llama3"](config, "cpu")
    plain = 1.0 / 500000.0 ** (np.arange(0, 64, 2) / 64)
    ours = plain / llama3_frequency_factors(500000.0, 64, 32.0, 1.0, 4.0, 8192)
    np.testing.assert_allclose(ours, frequencies.numpy(), rtol=2e-6)


def test_unknown_frequency_factors_are_refused(tmp_path: Path) -> None:
    factors = np.linspace(1, 7, 32, dtype=np.float32)
    with pytest.raises(ModelLoadError, match=r"rope_freqs\.weight"):
        import_changed(tmp_path, tensors={"rope_freqs.weight": ((32,), 0, factors.tobytes())})


# ---- files that are wrong ----------------------------------------------------------------------------------

F32_ROW: Tensor = ((256,), 0, np.ones(256, np.float32).tobytes())
NAN_ROW: Tensor = ((256,), 0, np.full(256, np.nan, np.float32).tobytes())
HUGE_ROW: Tensor = ((256,), 0, np.full(256, 3.4e38, np.float32).tobytes())


@pytest.mark.parametrize(
    ("metadata", "tensors", "word"),
    [
        ({"general.architecture": "gpt2"}, {}, "architecture 'gpt2'"),
        ({"general.architecture": None}, {}, "architecture None"),
        ({"general.architecture": 3}, {}, "general.architecture"),
        ({"llama.block_count": None}, {}, "llama.block_count"),
        ({"llama.block_count": 2}, {}, r"blk\.1\.attn_norm\.weight' is missing"),
        ({"llama.block_count": 0}, {}, "llama.block_count"),
        ({"llama.block_count": -5}, {}, "llama.block_count"),
        ({"llama.block_count": 2**31 - 1}, {}, r"blk\.1\."),
        ({"llama.attention.head_count": 3}, {}, "attention.key_length"),
        ({"llama.attention.head_count": 2**31 - 1, "llama.attention.key_length": 2**31 - 2}, {}, "shape"),
        ({"llama.attention.head_count_kv": [1, 2]}, {}, "head_count_kv"),
        ({"llama.attention.value_length": 32}, {}, "value_length"),
        ({"llama.rope.dimension_count": 32}, {}, "dimension_count"),
        ({"llama.attention.layer_norm_rms_epsilon": None}, {}, "epsilon' is absent"),
        ({"llama.attention.layer_norm_rms_epsilon": float("nan")}, {}, "epsilon"),
        ({"llama.rope.freq_base": -1.0}, {}, "freq_base"),
        ({"llama.rope.scaling.type": "longrope"}, {}, "longrope"),
        ({"llama.rope.scaling.type": "yarn", "llama.rope.scaling.factor": 2.0}, {}, "yarn"),
        ({"llama.expert_count": 8}, {}, "mixture of experts"),
        ({"llama.attention.causal": False}, {}, "causal"),
        ({"llama.logit_scale": 2.0}, {}, "logit_scale"),
        ({}, {"token_embd.weight": None}, "token_embd"),
        ({}, {"output_norm.weight": None}, "'output_norm.weight' is missing"),
        (
            {},
            {"blk.0.attn_q.weight": F32_ROW},
            r"attn_q\.weight' has the shape \(256,\), expected \(256, 256\)",
        ),
        ({}, {"blk.0.attn_q.bias": F32_ROW}, r"attn_k\.bias' is missing"),
        ({}, {"blk.0.attn_q_norm.weight": F32_ROW}, "has no place"),
        ({}, {"blk.1.attn_norm.weight": F32_ROW}, "has no place"),
        ({}, {"output_norm.weight": NAN_ROW}, "output_norm.weight' holds infinity or NaN"),
        ({}, {"blk.0.ffn_norm.weight": HUGE_ROW}, "holds infinity or NaN"),
        ({}, {"output_norm.weight": ((256,), 26, bytes(1024))}, "I32"),
        ({}, {"output.weight": ((64, 256), 9, bytes(64 * 8 * 40))}, "Q8_1, which cannot be dequantised"),
        ({"tokenizer.ggml.model": "bert", "tokenizer.ggml.tokens": ["a"]}, {}, "bert"),
        (
            {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.tokens": ["a"]},
            {},
            "'tokenizer.ggml.pre' is 'absent'",
        ),
        ({"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.tokens": ["a"] * 65}, {}, "65 tokens"),
        ({"tokenizer.ggml.model": "gpt2"}, {}, "tokenizer.ggml.tokens"),
        ({"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.tokens": ["a", "b", "a"]}, {}, "'a' twice"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(
    metadata: dict[str, Any], tensors: dict[str, Tensor | None], word: str, tmp_path: Path
) -> None:
    with pytest.raises(ModelLoadError, match=word) as caught:
        import_changed(tmp_path, metadata, tensors)
    assert "model.gguf" in str(caught.value)
    # Nothing is left behind, neither the folder nor its draft.
    assert [path.name for path in tmp_path.iterdir()] == ["model.gguf"]


GPT2 = {
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.pre": "gpt-2",
    "tokenizer.ggml.tokens": ["a", "b", "ab", "<|e|>"],
    "tokenizer.ggml.token_type": [1, 1, 1, 3],
    "tokenizer.ggml.merges": ["a b"],
    "tokenizer.ggml.eos_token_id": 3,
}


@pytest.mark.parametrize(
    ("metadata", "word"),
    [
        ({"tokenizer.ggml.pre": "some-new-one"}, "some-new-one"),
        ({"tokenizer.ggml.merges": None}, "merges"),
        ({"tokenizer.ggml.merges": ["ab"]}, "'ab', not two pieces"),
        ({"tokenizer.ggml.merges": ["a c"]}, "cannot be rebuilt"),
        ({"tokenizer.ggml.token_type": [1, 1]}, "2 token types"),
        ({"tokenizer.ggml.token_type": [1.0, 1.0, 1.0, 3.0]}, "token_type' of 'a' is 1.0, not a whole"),
        ({"tokenizer.ggml.token_type": ["1", "1", "1", "3"]}, "token_type' of 'a' is '1', not a whole"),
        ({"tokenizer.ggml.token_type": [1, 1, 7, 3]}, "token_type' of 'ab' is 7, .*from 1 to 6"),
        (
            {"tokenizer.ggml.model": "llama", "tokenizer.ggml.add_bos_token": False}
            | {"tokenizer.ggml.scores": [0.0, float("nan"), 0.0, 0.0]},
            "the score of 'b' is nan, not a number",
        ),
        ({"tokenizer.ggml.eos_token_id": 4}, "eos_token_id' is 4"),
        ({"tokenizer.ggml.eos_token_id": None, "tokenizer.ggml.add_eos_token": True}, "adds eos"),
    ],
)
def test_a_vocabulary_that_does_not_fit_is_refused(
    metadata: dict[str, Any], word: str, tmp_path: Path
) -> None:
    with pytest.raises(ModelLoadError, match=word):
        import_changed(tmp_path, {**GPT2, **metadata})


def test_a_small_vocabulary(tmp_path: Path) -> None:
    extra = {"tokenizer.ggml.eot_token_id": 1, "tokenizer.ggml.add_eos_token": True}
    folder = import_changed(tmp_path, {**GPT2, **extra})
    tokenizer = Tokenizer.from_folder(folder)
    assert tokenizer.encode("abab<|e|>b") == [2, 2, 3, 1, 3]
    assert load_generation_config(folder, tokenizer).eos_token_ids == (3, 1)


def test_a_sentencepiece_vocabulary(tmp_path: Path) -> None:
    pieces = {"\u2581": -3.0, "a": -4.0, "b": -5.0, "\u2581a": -2.0, "ab": -1.0, "\u2581ab": -6.0}
    tokens = ["<unk>", "<s>", "</s>", *[f"<0x{b:02X}>" for b in range(256)], *pieces, "<user>", "[PAD266]"]
    metadata = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": [0.0] * 259 + [*pieces.values(), 0.0, 0.0],
        "tokenizer.ggml.token_type": [2, 3, 3] + [6] * 256 + [1] * 6 + [4, 5],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
    }
    rows: Tensor = ((267, 256), 0, bytes(267 * 1024))
    tokenizer = Tokenizer.from_folder(import_changed(tmp_path, metadata, {"token_embd.weight": rows}))
    space, a, _, space_a, ab, space_ab, user = (259 + i for i in range(7))
    # "ab" scores higher than "\u2581a", so that "\u2581ab" is made of "\u2581" and "ab".
    assert tokenizer.encode("ab") == [1, space_ab]
    assert tokenizer.encode("a a") == [1, space_a, space_a]
    assert tokenizer.encode("aab") == [1, space_a, ab]
    assert tokenizer.encode("\u00e9") == [1, space, 3 + 0xC3, 3 + 0xA9]
    assert tokenizer.encode("a<user>") == [1, space_a, user]
    assert tokenizer.encode("aa") == [1, space_a, a]
    assert tokenizer.decode(tokenizer.encode("ab \u00e9 a")) == "ab \u00e9 a"
    assert tokenizer.token_bytes(266) == b""
    metadata.pop("tokenizer.ggml.scores")
    with pytest.raises(ModelLoadError, match="scores"):
        import_changed(
            tmp_path / "2", {**metadata, "tokenizer.ggml.scores": None}, {"token_embd.weight": rows}
        )


def header(tensors: int = 0, values: int = 0, version: int = 3) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, tensors, values)


KEY = packed_string("k")
ROW = packed_string("t") + struct.pack("<I", 1)


@pytest.mark.parametrize(
    ("content", "word"),
    [
        (b"", "0 bytes long"),
        (b"GGUF", "4 bytes long"),
        (b"<!DOCTYPE html><html><head></head></html>", "not a GGUF file"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0", "not a GGUF file"),
        (header(version=1), "version 1"),
        (header(version=3 << 24), "big-endian"),
        (header(values=2**64 - 1), "metadata value 0"),
        (header(tensors=2**63), "tensor 0"),
        (header(values=1) + struct.pack("<Q", 2**64 - 1), "metadata value 0"),
        (header(values=1) + KEY + struct.pack("<I", 99), "unknown value type 99"),
        (header(values=1) + KEY + struct.pack("<IIQ", 9, 0, 2**60), "'k'"),
        (header(values=1) + KEY + struct.pack("<IIQ", 9, 8, 2**60), "strings, more than the file can hold"),
        (header(values=1) + KEY + struct.pack("<IIQ", 9, 9, 1) * 3, "array of value type 9"),
        (header(values=1) + KEY + struct.pack("<IQ", 8, 2**63), "'k'"),
        (header(values=1) + KEY + struct.pack("<IQ", 8, 1) + b"\xff", "not UTF-8"),
        (header(values=1) + packed_string(b"\xff\xfe"), "not UTF-8"),
        (header(values=2) + (KEY + struct.pack("<II", 4, 1)) * 2, "twice"),
        (header(values=1) + packed_string("general.alignment") + struct.pack("<II", 4, 0), "alignment"),
        (header(values=1) + packed_string("general.alignment") + struct.pack("<II", 4, 48), "alignment"),
        (header(tensors=1) + packed_string("t") + struct.pack("<I", 0), "0 dimensions"),
        (header(tensors=1) + packed_string("t") + struct.pack("<I", 2**31), "dimensions"),
        (header(tensors=1) + ROW + struct.pack("<QIQ", 0, 0, 0), "holds nothing"),
        (header(tensors=1) + ROW + struct.pack("<QIQ", 32, 1000, 0), "unknown type 1000"),
        (header(tensors=1) + ROW + struct.pack("<QIQ", 33, 2, 0), "blocks of 32"),
        (header(tensors=1) + ROW + struct.pack("<QIQ", 2**63, 0, 0), "cut short"),
        (header(tensors=1) + ROW + struct.pack("<QIQ", 1, 0, 2**64 - 32), "cut short"),
        (header(tensors=2) + (ROW + struct.pack("<QIQ", 1, 0, 0)) * 2 + bytes(64), "'t' is there twice"),
    ],
)
def test_hostile_headers(content: bytes, word: str, tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=word) as caught:
        import_bytes(tmp_path, content)
    assert "model.gguf" in str(caught.value)


def test_a_file_cut_anywhere_is_refused(tmp_path: Path) -> None:
    content = build({**BASE, **GPT2}, small_tensors())
    ends = [*range(0, 1600, 7), len(content) // 2, len(content) - 1]
    for end in ends:
        with pytest.raises(ModelLoadError):
            import_bytes(tmp_path, content[:end])


SMALL = build({**BASE, **GPT2}, small_tensors())


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(changes=st.lists(st.tuples(st.integers(0, 1700), st.integers(0, 255)), min_size=1, max_size=4))
def test_a_file_with_changed_bytes_is_read_or_refused(changes: list[tuple[int, int]], tmp_path: Path) -> None:
    content = bytearray(SMALL)
    for at, value in changes:
        content[at] = value
    path = tmp_path / "model.gguf"
    path.write_bytes(content)
    try:
        file = GGUFFile(path)
        for name in file.tensors:
            for _ in file.rows(name):
                break
    except ModelLoadError:
        pass


def test_a_folder_that_exists_is_not_written_to(tmp_path: Path) -> None:
    folder = import_changed(tmp_path)
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    with pytest.raises(ModelLoadError, match="exists already"):
        import_changed(tmp_path, {"llama.context_length": 65})
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


def test_progress_counts_the_bytes_of_the_weights(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(build(BASE, small_tensors()))
    seen: list[tuple[int, int]] = []
    convert_gguf(path, tmp_path / "out", lambda done, total: seen.append((done, total)))
    total = 2 * sum(int(np.prod(shape)) for shape in SHAPES.values())
    assert seen[-1] == (total, total)
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)


def test_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"nowhere\.gguf: cannot be opened"):
        convert_gguf(tmp_path / "nowhere.gguf", tmp_path / "out")
