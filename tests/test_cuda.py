"""What only a GPU can show: graphs, long contexts, defaults, and the full shape of Llama-3.2-1B beside
transformers on the same GPU. Run by full_test.sh --gpu.
"""

from __future__ import annotations

import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any

import fixtures
import numpy as np
import pytest
import tiny_models
from helpers import check_all_blocks_are_back, exact, greedy, open_engine, prompt_of, tokens_of
from tiny_vllm import ops
from tiny_vllm.engine import Engine
from tiny_vllm.errors import InvalidRequestError
from tiny_vllm.kernel_profile import chrome_trace, table
from tiny_vllm.sampling_params import SamplingParams

pytestmark = pytest.mark.gpu


def test_auto_takes_the_gpu_and_says_so(rand_folder: Path) -> None:
    engine = Engine(rand_folder, kv_cache_memory_bytes=2**20)
    info = engine.info()
    assert info["device"].startswith("cuda, ")
    assert (info["max_num_seqs"], info["max_num_batched_tokens"]) == (256, 8192)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_graphs_and_eager_steps_agree(rand_folder: Path, dtype: str) -> None:
    """Batches that shrink from 21 requests to one: many shapes are recorded and replayed, padded and not."""
    prompts = [prompt_of(3 + 5 * n, seed=n) for n in range(21)]
    params = [
        SamplingParams(temperature=n % 3 / 2, seed=n, top_p=0.9, max_tokens=4 + 3 * n, ignore_eos=True)
        for n in range(21)
    ]
    results = []
    for eager in (True, False):
        engine = open_engine(rand_folder, num_blocks=400, dtype=dtype, enforce_eager=eager, max_num_seqs=32)
        results += [[exact(o) for o in engine.generate(prompts, params)] for _ in range(2)]
        check_all_blocks_are_back(engine)
    for result in results[1:]:
        assert result == results[0]


def test_a_batch_of_the_largest_size_is_padded_within_the_buffers(rand_folder: Path) -> None:
    for limit in (1, 3, 5, 9, 17, 33):
        engine = open_engine(rand_folder, max_num_batched_tokens=limit, max_num_seqs=limit)
        outputs = engine.generate([prompt_of(4, seed=n) for n in range(limit)], greedy(5))
        assert [o.outputs[0].finish_reason for o in outputs] == ["length"] * limit


def test_more_rows_than_logits_are_held(rand_folder: Path) -> None:
    """432 sequences from the first step on: the same draws as one at a time."""
    count = 432
    prompts = [prompt_of(4, seed=n) for n in range(count)]
    params = [
        SamplingParams(seed=n, top_p=0.9, max_tokens=4, ignore_eos=True, logprobs=1) for n in range(count)
    ]
    options: dict[str, Any] = {"num_blocks": 2 * count, "max_num_batched_tokens": 2048, "dtype": "float32"}
    together = open_engine(rand_folder, max_num_seqs=count, **options).generate(prompts, params)
    alone = open_engine(rand_folder, max_num_seqs=1, **options)
    for i in (0, 1, 255, 256, 300, 431):
        assert tokens_of(together[i]) == tokens_of(alone.generate(prompts[i], params[i])[0])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_long_contexts(tmp_path: Path, dtype: str) -> None:
    """33,000 tokens in chunks, then decodes with split contexts: tokens and logprobs as on the CPU."""
    folder = fixtures.write_rand(
        tmp_path, max_position_embeddings=40_000, hidden_size=64, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, intermediate_size=64, dtype=dtype,
    )  # fmt: skip
    prompt = prompt_of(33_000, seed=1)
    outputs = []
    for device in ("cpu", "cuda"):
        options: dict[str, Any] = {"device": device, "dtype": dtype, "max_num_batched_tokens": 4096}
        engine = open_engine(folder, num_blocks=2100, num_threads=2, **options)
        outputs += engine.generate(prompt, greedy(8, logprobs=512))[0].outputs
    cpu, cuda = ([{t: e.logprob for t, e in row.items()} for row in o.logprobs or []] for o in outputs)
    first = [max(abs(a[t] - b[t]) for t in a) for a, b in zip(cpu, cuda, strict=True)]
    assert first[0] < (1e-4 if dtype == "float32" else 0.05)
    if dtype == "float32":
        assert outputs[0].token_ids == outputs[1].token_ids
        assert max(first) < 1e-4


@pytest.mark.parametrize("name", ["llama_gqa_9_3", "qwen3", "mistral_window"])
def test_bfloat16_stays_near_float32(name: str, tmp_path: Path) -> None:
    """On models of other shapes: the mean divergence of the next-token distributions is small."""
    tiny_models.write_model(name, tmp_path)
    prompt = prompt_of(60, seed=3)
    rows = []
    for dtype in ("float32", "bfloat16"):
        engine = open_engine(tmp_path, dtype=dtype)
        vocabulary = engine.info()["vocab_size"]
        output = engine.generate(prompt, greedy(1, prompt_logprobs=vocabulary))[0]
        rows.append(
            np.array([[row[t].logprob for t in range(vocabulary)] for row in output.prompt_logprobs[1:]])  # type: ignore[index]
        )
    kl = (np.exp(rows[0]) * (rows[0] - rows[1])).sum(axis=1)
    assert kl.mean() < 0.02


def test_a_failed_start_gives_the_memory_back(rand_folder: Path) -> None:
    def free() -> int:
        import torch

        return int(torch.cuda.mem_get_info()[0])

    pytest.importorskip("torch")
    open_engine(rand_folder)
    before = free()
    for _ in range(3):
        with pytest.raises(InvalidRequestError):
            open_engine(rand_folder, scheduler="continuous", max_model_len=10**9)
    for _ in range(3):
        engine = open_engine(rand_folder, kv_cache_memory_bytes=2**30)
        del engine
    assert abs(free() - before) < 2**28


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_profile_holds_every_kernel(tmp_path: Path, dtype: str) -> None:
    """One prefill and three decodes: all launches, one after the other, with what they must move."""
    folder = fixtures.write_rand(tmp_path, dtype=dtype)
    prompts = [prompt_of(20, seed=n) for n in range(3)]
    plain = open_engine(folder, dtype=dtype).generate(prompts, greedy(4, ignore_eos=True))
    engine = open_engine(folder, dtype=dtype, profile=True)
    outputs = engine.generate(prompts, greedy(4, ignore_eos=True))
    assert [tokens_of(o) for o in outputs] == [tokens_of(o) for o in plain]
    records = engine.take_profile()
    assert engine.take_profile() == []

    steps = [list(group) for _, group in groupby(records, key=lambda r: r.step)]
    assert [step[0].tokens for step in steps] == [60, 3, 3, 3]
    assert all(len({r.tokens for r in step}) == 1 for step in steps)
    for step in steps:
        names = [r.name for r in step]
        attention = [name for name in names if name.startswith("attention")]
        assert len(attention) == engine.info()["num_layers"]
        assert {"gather_rows", "rope_and_cache", "race"} <= set(names)
    assert len({tuple(r.name for r in step) for step in steps[1:]}) == 1
    assert records[0].start_us == 0
    assert all(r.duration_us > 0 for r in records)
    assert all(a.start_us + a.duration_us <= b.start_us for a, b in pairwise(records))
    # Those that choose tokens have no formula: what they read depends on the logits.
    assert {r.name for r in records if r.bytes == 0} <= {"find_cuts", "race"}
    for record in records:
        product = any(word in record.name for word in ("attention", "gemm", "gemv"))
        assert (record.flops > 0) == product, record.name
    kv_bytes = 2 * 3 * 21 * 2 * 64 * (4 if dtype == "float32" else 2)  # keys and values of 3 contexts
    query_bytes = 2 * 3 * 8 * 64 * (4 if dtype == "float32" else 2)  # and queries and results
    first_decode = next(r for r in steps[1] if r.name.startswith("attention"))
    assert first_decode.bytes == kv_bytes + query_bytes
    assert first_decode.flops == 4 * 3 * 21 * 8 * 64

    trace = json.loads(json.dumps(chrome_trace(records, engine.info()["device"])))
    slices = [e for e in trace["traceEvents"] if e["ph"] == "X"]
    kernels = iter([e for e in slices if e["cat"] == "kernel"])
    for step in (e for e in slices if e["cat"] == "step"):
        for _ in range(step["args"]["kernels"]):
            kernel = next(kernels)
            assert step["ts"] <= kernel["ts"]
            assert kernel["ts"] + kernel["dur"] <= step["ts"] + step["dur"] + 0.002  # rounded
    assert next(kernels, None) is None
    assert {line.split()[0] for line in table(records).splitlines()[1:]} == {r.name for r in records}


def test_without_profile_there_are_no_records(rand_folder: Path) -> None:
    engine = open_engine(rand_folder)
    engine.generate(prompt_of(5), greedy(2))
    assert engine.take_profile() == []


def test_ops_from_several_threads() -> None:
    """Each product as if it were alone."""
    rng = np.random.default_rng(0)
    x, weight = rng.standard_normal((3, 64), np.float32), rng.standard_normal((200, 64), np.float32)
    alone = [ops.matmul(x + i, weight, device="cuda") for i in range(40)]
    with ThreadPoolExecutor(4) as pool:
        together = list(pool.map(lambda i: ops.matmul(x + i, weight, device="cuda"), range(40)))
    for a, b in zip(alone, together, strict=True):
        assert np.array_equal(a, b)


def test_bench_writes_a_profile(rand_folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "profile.json"
    options = ["--model", rand_folder, "--device", "cuda", "--kv-cache-memory-bytes", 2**26]
    command = [sys.executable, "-m", "tiny_vllm", "bench", "decode-1", *options, "--profile", file]
    done = subprocess.run([*map(str, command)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    head, *_, summary, where = done.stdout.splitlines()
    assert head.split()[:2] == ["kernel", "calls"]
    assert summary.startswith("128 steps, ")
    assert where == f"open {file} at https://ui.perfetto.dev"
    events = json.loads(file.read_text())["traceEvents"]
    assert len([e for e in events if e["ph"] == "X" and e["cat"] == "step"]) == 128


def llama_32_1b() -> dict[str, Any]:
    """The exact config.json of Llama-3.2-1B-Instruct, as far as it matters here."""
    scaling = {
        "rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }  # fmt: skip
    return {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 2048,
        "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32,
        "num_key_value_heads": 8, "head_dim": 64,
        "vocab_size": 128256, "max_position_embeddings": 131072, "rms_norm_eps": 1e-5,
        "hidden_act": "silu", "rope_theta": 500000.0, "rope_scaling": scaling, "tie_word_embeddings": True,
        "attention_bias": False, "mlp_bias": False, "bos_token_id": 128000, "eos_token_id": 128001,
        "torch_dtype": "bfloat16",
    }  # fmt: skip


def test_llama_32_1b_beside_transformers_on_this_gpu(tmp_path: Path, transformers: Any) -> None:
    """Random weights of the full shape, in bfloat16 on both sides. With the reference's tokens given, the
    most likely next token is the same wherever its lead is clear, and the distributions hardly differ.
    """
    import torch

    torch.manual_seed(0)
    (tmp_path / "config.json").write_text(json.dumps(llama_32_1b()))
    config = transformers.AutoConfig.from_pretrained(tmp_path)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).cuda().eval()
    model.save_pretrained(tmp_path)

    engine = Engine(tmp_path, device="cuda", max_model_len=4096, max_num_seqs=8)
    rng = np.random.default_rng(0)
    divergences, wrong, clear = [], 0, 0
    for length in (40, 30):
        ids = rng.integers(0, 128_000, length).tolist()
        output = engine.generate(ids, greedy(1, prompt_logprobs=128_256))[0]
        with torch.no_grad():
            logits = model(torch.tensor([ids], device="cuda")).logits[0, :-1].float()
        expected = logits.log_softmax(-1).cpu().numpy()
        for row, reference in zip(output.prompt_logprobs[1:], expected, strict=True):  # type: ignore[index]
            assert row is not None
            ours = np.empty(128_256)
            ours[list(row)] = [entry.logprob for entry in row.values()]
            divergences.append(float((np.exp(reference) * (reference - ours)).sum()))
            second, best = np.sort(reference)[-2:]
            if best - second > 0.1:  # logits of a few are rounded to steps of 1/64 by bfloat16
                clear += 1
                wrong += int(np.argmax(ours) != np.argmax(reference))
    assert clear >= 10
    assert wrong == 0
    assert np.mean(divergences) < 1e-3

    # Decodes, with graphs, follow the prefills: the tokens that a longer prompt gives.
    prompt = rng.integers(0, 128_000, 50).tolist()
    tokens = tokens_of(engine.generate(prompt, greedy(24, ignore_eos=True))[0])
    with torch.no_grad():
        logits = model(torch.tensor([prompt + tokens], device="cuda")).logits[0, len(prompt) - 1 : -1].float()
    best = logits.max(-1).values
    chosen = logits.gather(-1, torch.tensor(tokens, device="cuda")[:, None])[:, 0]
    assert float((best - chosen).max()) < 0.1
