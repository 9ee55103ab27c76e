"""The engine beside Hugging Face transformers on the same folder, in float32 on the CPU. Needs the extra
`hf`.
"""

from __future__ import annotations

import gc
import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import fixtures
import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest
import tiny_models
from helpers import greedy, open_engine, prompt_of, tokens_of
from tiny_vllm.engine import Engine
from tiny_vllm.outputs import RequestOutput
from tiny_vllm.tokenizer import Tokenizer

Floats = npt.NDArray[np.float32]
# transformers is renaming this argument; both names are understood by the versions that the extra allows.
pytestmark = pytest.mark.filterwarnings("ignore:.past_key_values. is deprecated:FutureWarning")

TOLERANCE = 1e-3  # of a log probability; float32 sums in another order differ by some 1e-5 on these models


class Reference:
    """A transformers model: rows of log probabilities, and greedy continuations.

    On one thread: for small models that is faster than two, and the engine's own threads are still watching.
    """

    def __init__(self, module: Any, folder: Path, attention: str = "eager", threads: int = 1) -> None:
        import torch

        torch.set_num_threads(threads)
        self.torch = torch
        self.model = module.AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, attn_implementation=attention
        ).eval()

    def logprobs(self, ids: Sequence[int]) -> Floats:
        """(len(ids), V): row i predicts token i + 1."""
        with self.torch.no_grad():
            logits = self.model(self.torch.tensor([list(ids)]), use_cache=False).logits[0]
            rows: Floats = logits.double().log_softmax(-1).float().numpy()
        return rows

    def greedy(self, ids: Sequence[int], count: int) -> list[int]:
        """Token by token with a cache, end tokens ignored."""
        found: list[int] = []
        past, new = None, list(ids)
        with self.torch.no_grad():
            for _ in range(count):
                result = self.model(self.torch.tensor([new]), past_key_values=past, use_cache=True)
                past, new = result.past_key_values, [int(result.logits[0, -1].argmax())]
                found += new
        return found


@pytest.fixture
def reference(transformers: Any) -> Callable[..., Reference]:
    return lambda folder, **options: Reference(transformers, folder, **options)


def rows_of(output: RequestOutput, vocabulary: int) -> Floats:
    """(prompt tokens, V): log probabilities of the whole vocabulary after each prompt token."""
    rows = [*(output.prompt_logprobs or [])[1:], (output.outputs[0].logprobs or [])[0]]
    result = np.full((len(rows), vocabulary), np.nan, np.float32)
    for i, row in enumerate(rows):
        assert row is not None
        result[i, list(row)] = [entry.logprob for entry in row.values()]
    return result


def all_rows(engine: Engine, ids: Sequence[int]) -> Floats:
    V = engine.info()["vocab_size"]
    return rows_of(engine.generate(ids, greedy(1, logprobs=V, prompt_logprobs=V))[0], V)


def test_b30_rotary_layout(rand_folder: Path, reference: Callable[..., Reference]) -> None:
    """Every position of a prompt of 200 tokens, as one prefill, in small chunks, and token by token as
    decodes are.
    """
    ids = prompt_of(200)
    expected = reference(rand_folder).logprobs(ids)
    for options in ({}, {"max_num_batched_tokens": 24}, {"max_num_batched_tokens": 1, "block_size": 4}):
        rows = all_rows(open_engine(rand_folder, **options), ids)
        np.testing.assert_allclose(rows, expected, rtol=0, atol=TOLERANCE)
    assert np.abs(expected[199] - expected[63]).max() > 1  # positions can be told apart


def test_b20_block_edges(rand_folder: Path, reference: Callable[..., Reference]) -> None:
    """18 greedy tokens of each prompt of the sweep in test_bug_cases_scheduling.py; shorter outputs are their
    beginnings.
    """
    lengths = [1, 15, 16, 17, 31, 32, 33, 48]
    model = reference(rand_folder)
    outputs = open_engine(rand_folder).generate([prompt_of(n, seed=n) for n in lengths], greedy(18))
    for n, output in zip(lengths, outputs, strict=True):
        assert tokens_of(output) == model.greedy(prompt_of(n, seed=n), 18), n


@pytest.mark.parametrize(
    "changes",
    [
        {"tie_word_embeddings": True},
        {"tie_word_embeddings": ...},
        {"head_dim": None},
        {"head_dim": ...},
        {"num_key_value_heads": ...},
        {"rms_norm_eps": 0.1},
        {"rope_theta": 500.0},
        {"hidden_act": "gelu"},
    ],
    ids=lambda changes: "-".join(f"{k}={'absent' if v is ... else v}" for k, v in changes.items()),
)
def test_b36_b39_what_config_json_says_or_leaves_out(
    changes: dict[str, Any], tmp_path: Path, reference: Callable[..., Reference]
) -> None:
    fixtures.write_rand(tmp_path, **changes)
    ids = prompt_of(40)
    rows = all_rows(open_engine(tmp_path), ids)
    np.testing.assert_allclose(rows, reference(tmp_path).logprobs(ids), rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("name", tiny_models.MODELS)
@pytest.mark.filterwarnings("ignore:.*lm_head.weight is in the file")
def test_tiny_models(name: str, tmp_path: Path, reference: Callable[..., Reference]) -> None:
    """Every position of a prompt that no golden number knows, and 24 greedy tokens."""
    tiny_models.write_model(name, tmp_path)
    ids = prompt_of(90, seed=90)
    engine = open_engine(tmp_path, max_model_len=120, max_num_batched_tokens=37)
    expected = reference(tmp_path).logprobs(ids)
    np.testing.assert_allclose(all_rows(engine, ids), expected, rtol=0, atol=TOLERANCE)
    # A fresh model: dynamic rope keeps the longest length it has seen.
    assert tokens_of(engine.generate(ids, greedy(24, ignore_eos=True))[0]) == reference(tmp_path).greedy(
        ids, 24
    )


def test_b04_begin_tokens(tmp_path: Path, transformers: Any) -> None:
    """The ids of a conversation and of a completion, with and without begin tokens in the template and
    tokenizer.
    """
    messages = [{"role": "user", "content": "hi <s> there"}]
    for number, (template, add_bos) in enumerate(
        (template, add_bos)
        for template in ("{{ bos_token }}{{ messages[0].content }}", "{{ messages[0].content }}")
        for add_bos in (False, True)
    ):
        folder = tmp_path / str(number)
        folder.mkdir()
        fixtures.write_json(folder / "config.json", fixtures.llama_config())
        fixtures.write_byte_tokenizer(
            folder, special=["<s>", "</s>"], bos="<s>", eos="</s>", add_bos=add_bos, chat_template=template
        )
        mine, theirs = Tokenizer.from_folder(folder), transformers.AutoTokenizer.from_pretrained(folder)
        chat = theirs.apply_chat_template(
            messages, tokenize=True, add_generation_prompt=True, return_dict=False
        )
        assert mine.encode_chat(messages) == chat
        assert mine.encode("hi <s> there") == theirs("hi <s> there")["input_ids"]


# ---- Llama 3.2 ---------------------------------------------------------------------------------------------

# config.json of meta-llama/Llama-3.2-1B-Instruct.
LLAMA_32_1B: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 128000,
    "eos_token_id": [128001, 128008, 128009],
    "head_dim": 64,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "initializer_range": 0.02,
    "intermediate_size": 8192,
    "max_position_embeddings": 131072,
    "mlp_bias": False,
    "model_type": "llama",
    "num_attention_heads": 32,
    "num_hidden_layers": 16,
    "num_key_value_heads": 8,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "factor": 32.0,
        "high_freq_factor": 4.0,
        "low_freq_factor": 1.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "rope_theta": 500000.0,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "vocab_size": 128256,
}


def write_large(folder: Path, config: dict[str, Any], shards: int) -> None:
    """Random bfloat16 weights, never more than one tensor of them in memory.

    Drawing a billion normal numbers would take longer than the test: all tensors are cut out of one strip of
    ten million, each from another place.
    """
    strip = np.random.default_rng(0).standard_normal(10_000_019, dtype=np.float32)

    def tensor(i: int, name: str, shape: tuple[int, ...]) -> npt.NDArray[Any]:
        gain = 0.05 if "embed" in name else 1.6 / shape[-1] ** 0.5
        values = np.resize(np.roll(strip, 1_000_003 * i), shape) * np.float32(gain)
        return (1 + 0.1 * values if "norm" in name else values).astype(ml_dtypes.bfloat16)

    folder.mkdir(parents=True, exist_ok=True)
    fixtures.write_json(folder / "config.json", config)
    shapes = list(fixtures.tensor_shapes(config).items())
    weight_map = {}
    for shard in range(shards):
        file = f"model-{shard + 1:05d}-of-{shards:05d}.safetensors"
        mine = [(i, name, shape) for i, (name, shape) in enumerate(shapes) if i % shards == shard]
        header, position = {}, 0
        for _, name, shape in mine:
            size = 2 * int(np.prod(shape))
            header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [position, position + size]}
            position += size
            weight_map[name] = file
        text = json.dumps({"__metadata__": {"format": "pt"}, **header}).encode()
        text += b" " * (-len(text) % 8)
        with (folder / file).open("wb") as out:
            out.write(len(text).to_bytes(8, "little") + text)
            for i, name, shape in mine:
                out.write(tensor(i, name, shape).tobytes())
    fixtures.write_json(folder / "model.safetensors.index.json", {"metadata": {}, "weight_map": weight_map})


@pytest.mark.slow
def test_llama_32_1b(tmp_path: Path, reference: Callable[..., Reference]) -> None:
    """The exact configuration of Llama-3.2-1B-Instruct, with random weights: 2.5 GB on disk, 5 GB in memory.

    One after the other, so that only one of the two models is in memory.
    """
    folder = tmp_path / "llama"
    try:
        write_large(folder, LLAMA_32_1B, shards=3)
        ids = prompt_of(24, vocabulary=LLAMA_32_1B["vocab_size"])
        model = reference(folder, threads=2)
        expected, continuation = model.logprobs(ids), model.greedy(ids, 6)
        del model
        gc.collect()
        engine = open_engine(
            folder, num_blocks=8, max_num_batched_tokens=64, max_model_len=128, num_threads=2
        )
        assert engine.info()["num_parameters"] == 1_235_814_400
        output = engine.generate(ids, greedy(6, ignore_eos=True, logprobs=5, prompt_logprobs=5))[0]
        assert tokens_of(output) == continuation
        for i, row in enumerate([*(output.prompt_logprobs or [])[1:], (output.outputs[0].logprobs or [])[0]]):
            assert row is not None
            np.testing.assert_allclose(
                [entry.logprob for entry in row.values()], expected[i, list(row)], rtol=0, atol=TOLERANCE
            )
            best = [token for token, entry in row.items() if entry.rank == 1]
            assert best == [int(expected[i].argmax())]
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@pytest.mark.slow
def test_llama3_rope_past_8192(tmp_path: Path, reference: Callable[..., Reference]) -> None:
    """Llama 3.2's rotary scaling with small layers and an original length of 512: 8,300 positions."""
    scaling = {**LLAMA_32_1B["rope_scaling"], "original_max_position_embeddings": 512}
    fixtures.write_rand(
        tmp_path,
        rope_theta=500000.0,
        rope_scaling=scaling,
        max_position_embeddings=131072,
        num_attention_heads=4,
        num_key_value_heads=2,
        hidden_size=128,
        intermediate_size=128,
    )
    ids = prompt_of(8300)
    model = reference(tmp_path, attention="sdpa", threads=2)
    expected = model.logprobs(ids)
    engine = open_engine(tmp_path, num_blocks=600, max_model_len=8400, num_threads=2)
    output = engine.generate(ids, greedy(12, logprobs=512, prompt_logprobs=3))[0]
    assert tokens_of(output) == model.greedy(ids, 12)
    first = (output.outputs[0].logprobs or [])[0]
    np.testing.assert_allclose([first[i].logprob for i in range(512)], expected[-1], rtol=0, atol=TOLERANCE)
    for position, row in enumerate((output.prompt_logprobs or [])[1:]):
        assert row is not None
        np.testing.assert_allclose(
            [entry.logprob for entry in row.values()], expected[position, list(row)], rtol=0, atol=TOLERANCE
        )
