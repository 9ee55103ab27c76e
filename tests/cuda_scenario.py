"""Some of everything on the GPU, for compute-sanitizer: prefills, chunks, decodes with graphs and without,
prefix hits, copies of shared blocks, all ways of sampling; on models that take each attention kernel.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import fixtures
from tiny_vllm import Engine, SamplingParams

# Query heads, KV heads, head dim: the Hopper kernel, the other one with its three widths, and the plain one.
SHAPES = [(4, 2, 64), (2, 1, 128), (4, 1, 32), (3, 1, 80), (2, 2, 256), (2, 1, 20)]

MISTRAL = {"sliding_window": 20, "model_type": "mistral", "architectures": ["MistralForCausalLM"]}


def prompt(n: int, seed: int) -> list[int]:
    return [(7919 * i + 104729 * seed) % 300 for i in range(n)]


def run(folder: Path, dtype: str, device: str) -> int:
    engine = Engine(
        folder, device=device, dtype=dtype, block_size=8, max_num_batched_tokens=48, max_num_seqs=12,
        kv_cache_memory_bytes=fixtures.kv_bytes(folder, 120, 8, dtype),
    )  # fmt: skip
    params = [
        SamplingParams(temperature=0, max_tokens=6, ignore_eos=True),
        SamplingParams(temperature=0.8, top_p=0.9, seed=1, max_tokens=6, ignore_eos=True),
        SamplingParams(top_k=5, min_p=0.01, seed=2, max_tokens=6, ignore_eos=True, n=2),
        SamplingParams(temperature=0, max_tokens=5, ignore_eos=True, logprobs=3, prompt_logprobs=1),
        SamplingParams(
            seed=3, repetition_penalty=1.2, presence_penalty=0.5, max_tokens=7, ignore_eos=True, logprobs=20
        ),
    ]
    tokens = 0
    for _ in range(2):  # the second time with prefix hits, and with graphs
        outputs = engine.generate([prompt(n, n) for n in (70, 9, 33, 1, 20)], params)
        tokens += sum(len(c.token_ids) for o in outputs for c in o.outputs)
        assert all(c.finish_reason == "length" for o in outputs for c in o.outputs), outputs
    return tokens


def run_many(folder: Path, device: str) -> int:
    """More rows in a step than logits are held at a time, in an engine that has seen no other step."""
    count = 432
    engine = Engine(
        folder, device=device, dtype="bfloat16", block_size=8, max_num_batched_tokens=2048,
        max_num_seqs=count, kv_cache_memory_bytes=fixtures.kv_bytes(folder, 2 * count, 8, "bfloat16"),
    )  # fmt: skip
    params = SamplingParams(top_p=0.9, seed=1, max_tokens=4, ignore_eos=True)
    outputs = engine.generate([prompt(4, n) for n in range(count)], params)
    assert all(o.outputs[0].finish_reason == "length" for o in outputs)
    return sum(len(o.outputs[0].token_ids) for o in outputs)


def main(device: str = "cuda") -> None:
    total = 0
    with tempfile.TemporaryDirectory() as root:
        for i, (heads, kv_heads, head_dim) in enumerate(SHAPES):
            folder = fixtures.write_rand(
                Path(root) / str(i),
                dtype="bfloat16",
                num_attention_heads=heads,
                num_key_value_heads=kv_heads,
                head_dim=head_dim,
                **(MISTRAL if i == 2 else {}),
            )
            total += run(folder, "bfloat16", device)
        total += run(Path(root) / "0", "float32", device)
        total += run_many(Path(root) / "0", device)
    print(total, "tokens")


if __name__ == "__main__":
    main(*sys.argv[1:])
