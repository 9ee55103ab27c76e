"""Two layers of each family at the full width of a checkpoint that people run, beside transformers on the
same GPU with the same random weights. Run by full_test.sh --gpu.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers import greedy, tokens_of
from tiny_vllm.engine import Engine

pytestmark = pytest.mark.gpu

# From the config.json of the checkpoints, but for num_hidden_layers.
CONFIGS: dict[str, dict[str, Any]] = {
    "Llama-3.1-8B": {
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 4096,
        "intermediate_size": 14336, "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256,
        "rms_norm_eps": 1e-5, "rope_theta": 500000.0, "max_position_embeddings": 131072,
        "rope_scaling": {
            "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
    },
    "SmolLM2-1.7B": {
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 2048,
        "intermediate_size": 8192, "num_attention_heads": 32, "num_key_value_heads": 32, "vocab_size": 49152,
        "rms_norm_eps": 1e-5, "rope_theta": 130000.0, "max_position_embeddings": 8192,
        "tie_word_embeddings": True,
    },
    "Qwen2.5-7B": {
        "model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], "hidden_size": 3584,
        "intermediate_size": 18944, "num_attention_heads": 28, "num_key_value_heads": 4, "vocab_size": 152064,
        "rms_norm_eps": 1e-6, "rope_theta": 1000000.0, "max_position_embeddings": 32768,
    },
    "Qwen2.5-0.5B": {
        "model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], "hidden_size": 896,
        "intermediate_size": 4864, "num_attention_heads": 14, "num_key_value_heads": 2, "vocab_size": 151936,
        "rms_norm_eps": 1e-6, "rope_theta": 1000000.0, "max_position_embeddings": 32768,
        "tie_word_embeddings": True,
    },
    "Qwen3-8B": {
        "model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "hidden_size": 4096,
        "intermediate_size": 12288, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
        "vocab_size": 151936, "rms_norm_eps": 1e-6, "rope_theta": 1000000.0, "max_position_embeddings": 40960,
    },
    "Mistral-7B-v0.1": {
        "model_type": "mistral", "architectures": ["MistralForCausalLM"], "hidden_size": 4096,
        "intermediate_size": 14336, "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 32000,
        "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "max_position_embeddings": 32768, "sliding_window": 4096,
    },
}  # fmt: skip


@pytest.mark.parametrize("name", CONFIGS)
def test_full_width_beside_transformers(name: str, tmp_path: Path, transformers: Any) -> None:
    """A short prompt, whole distributions: mean divergence below 1e-3 and the same most likely token where
    its lead is clear. Then a long prompt, beyond Mistral's window, and what is decoded after it.
    """
    import torch

    torch.manual_seed(0)
    settings = {"tie_word_embeddings": False, "hidden_act": "silu", "torch_dtype": "bfloat16"}
    text = json.dumps({**settings, **CONFIGS[name], "num_hidden_layers": 2})
    (tmp_path / "config.json").write_text(text)
    config = transformers.AutoConfig.from_pretrained(tmp_path)
    with torch.device("cuda"):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if key.endswith(".bias"):  # fresh models have zeros there
                parameter.normal_(0, 0.1)
            elif "norm" in key:  # and ones here
                parameter.uniform_(0.5, 1.5)
    model.save_pretrained(tmp_path)
    vocabulary = CONFIGS[name]["vocab_size"]
    engine = Engine(tmp_path, device="cuda", max_model_len=8192, max_num_seqs=8, kv_cache_memory_bytes=2**30)

    def reference(ids: list[int], rows: slice) -> Any:
        with torch.no_grad():
            return (
                model(torch.tensor([ids], device="cuda"))
                .logits[0, rows]
                .float()
                .log_softmax(-1)
                .cpu()
                .numpy()
            )

    rng = np.random.default_rng(0)
    ids = rng.integers(0, vocabulary, 20).tolist()
    output = engine.generate(ids, greedy(1, prompt_logprobs=vocabulary))[0]
    divergences, clear = [], 0
    for row, expected in zip(output.prompt_logprobs[1:], reference(ids, slice(0, -1)), strict=True):  # type: ignore[index]
        assert row is not None
        ours = np.empty(vocabulary)
        ours[list(row)] = [entry.logprob for entry in row.values()]
        divergences.append(float((np.exp(expected) * (expected - ours)).sum()))
        second, best = np.sort(expected)[-2:]
        if best - second > 0.1:
            clear += 1
            assert int(np.argmax(ours)) == int(np.argmax(expected))
    assert clear >= 3
    assert np.mean(divergences) < 1e-3

    ids = rng.integers(0, vocabulary, 4500).tolist()
    completion = engine.generate(ids, greedy(12, ignore_eos=True, logprobs=20))[0]
    tokens = tokens_of(completion)
    expected_rows = reference(ids + tokens, slice(len(ids) - 1, -1))
    worst = 0.0
    for token, row, expected in zip(tokens, completion.outputs[0].logprobs or [], expected_rows, strict=True):
        assert float(expected.max() - expected[token]) < 0.1
        worst = max(worst, *(abs(entry.logprob - float(expected[t])) for t, entry in row.items()))
    assert worst < 0.1
