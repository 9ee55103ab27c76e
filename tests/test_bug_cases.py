"""Public failures of engines like this one, replayed. One test for each; its first line says what is right.

The numbers are those of the project's list of such reports. test_bug_cases_text.py and
test_bug_cases_scheduling.py have the first five classes. Cases that concern one part alone (tokenizer, block
allocator, scheduler, kernels, safetensors, packaging) are tested with that part.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

import fixtures
import numpy as np
import pytest
from helpers import (
    check_all_blocks_are_back,
    exact,
    greedy,
    open_engine,
    prompt_of,
    python_process,
    solo,
    tokens_of,
)
from tiny_vllm.engine import Engine
from tiny_vllm.errors import Error, ModelLoadError, OutOfMemoryError
from tiny_vllm.sampling_params import SamplingParams

# ---- class 6: numbers --------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_b33_logits_that_are_not_numbers(dtype: str, tmp_path: Path) -> None:
    """Right: that request ends with "error" and says why; its batch mates and whoever gets its blocks do not
    notice.
    """
    poison = 5
    config = fixtures.RAND
    tensors = fixtures.random_tensors(config)
    tensors["model.embed_tokens.weight"][poison] = np.nan
    tensors["lm_head.weight"][poison] = 0  # nobody says it
    fixtures.write_model(tmp_path, config, tensors, dtype)
    fixtures.write_byte_tokenizer(tmp_path)
    healthy = [[7, 8, 9], [t for t in prompt_of(40) if t != poison]]
    params = SamplingParams(seed=1, max_tokens=12, logprobs=1)
    alone = [exact(o) for o in solo(tmp_path, healthy, params, dtype=dtype)]

    # 7 blocks: the next request gets those that hold the NaN keys and values, and fills them in part only.
    engine = open_engine(tmp_path, dtype=dtype, num_blocks=7, enable_prefix_caching=False)
    for sick in ([1, poison, 2], [*prompt_of(20, seed=3), poison], [poison] * 30):
        outputs = engine.generate([healthy[0], sick, healthy[1]], params)
        failed = outputs[1].outputs[0]
        assert (failed.token_ids, failed.finish_reason) == ([], "error")
        assert "NaN" in str(failed.stop_reason)
        assert [exact(outputs[0]), exact(outputs[2])] == alone
        check_all_blocks_are_back(engine)
        for prompt, expected in zip(healthy, alone, strict=True):
            assert exact(engine.generate(prompt, params)[0]) == expected

    # Who sees the poison through attention alone, 32 keys of nothing else or one among many, has no answer.
    engine = open_engine(tmp_path, dtype=dtype, num_blocks=40)
    for count in (32, 1):
        output = engine.generate([poison] * count + healthy[1] * 2, params)[0].outputs[0]
        assert (output.token_ids, output.finish_reason) == ([], "error")

    # What comes before the poison is as it was, also for those who find it in the prefix cache.
    before = healthy[1][:32]
    assert engine.generate([*before, poison], params)[0].outputs[0].finish_reason == "error"
    after = engine.generate([*before, 9], params)[0]
    assert after.num_cached_tokens == 32
    assert after.outputs[0].finish_reason == "length"
    shown = engine.generate([*before, poison, 3], SamplingParams(max_tokens=1, prompt_logprobs=0))[0]
    assert shown.outputs[0].finish_reason == "error"
    rows = [next(iter(row.values())).logprob for row in shown.prompt_logprobs[1:]]  # type: ignore[index, union-attr]
    assert np.isfinite(rows[:32]).all()
    assert not np.isfinite(rows[32])

    both = engine.generate([poison], SamplingParams(n=2, prompt_logprobs=1, max_tokens=4))[0]
    assert [c.finish_reason for c in both.outputs] == ["error", "error"]
    with pytest.raises(Error, match="NaN"):
        list(engine.stream([1, poison], params))
    check_all_blocks_are_back(engine)


# ---- class 7: weights --------------------------------------------------------------------------------------


def test_b36_lm_head_there_or_not(tmp_path: Path) -> None:
    """Right: tied models use the embedding whatever the file has; an untied one without lm_head is refused by
    name.
    """
    tied, untied = ({**fixtures.RAND, "tie_word_embeddings": tie} for tie in (True, False))
    silent = {key: value for key, value in tied.items() if key != "tie_word_embeddings"}
    tensors = fixtures.random_tensors(untied)
    without = {name: t for name, t in tensors.items() if name != "lm_head.weight"}
    extra = {"model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(32, np.float32)}

    def run(name: str, config: dict[str, Any], weights: fixtures.Tensors) -> list[int]:
        folder = fixtures.write_model(tmp_path / name, config, weights)
        return tokens_of(open_engine(folder).generate([1, 2, 3], greedy(8))[0])

    expected = run("tied", tied, without)
    with pytest.warns(UserWarning, match=r"lm_head\.weight"):
        assert run("tied, another lm_head in the file", tied, tensors) == expected
    assert run("untied", untied, tensors) != expected
    with pytest.raises(ModelLoadError, match=r"lm_head\.weight"):
        run("untied without", untied, without)
    # The family's default is untied.
    assert run("no key", silent, tensors) == run("untied again", untied, tensors)
    with pytest.raises(ModelLoadError, match=r"lm_head\.weight"):
        run("no key without", silent, without)
    with pytest.warns(UserWarning, match="inv_freq"):
        assert run("an extra tensor", tied, {**without, **extra}) == expected


def test_b39_head_dim_is_not_hidden_by_heads(tmp_path: Path) -> None:
    """Right: null and absent mean hidden / heads; weights that disagree are refused with both numbers."""
    derived = {**fixtures.RAND, "head_dim": 32}  # 256 / 8
    tensors = fixtures.random_tensors(derived)

    def run(name: str, config: dict[str, Any]) -> list[Any]:
        folder = fixtures.write_model(tmp_path / name, config, tensors)
        return exact(open_engine(folder).generate(prompt_of(20), greedy(8, logprobs=3))[0])

    expected = run("stated", derived)
    assert run("null", {**derived, "head_dim": None}) == expected
    assert run("absent", {k: v for k, v in derived.items() if k != "head_dim"}) == expected
    with pytest.raises(ModelLoadError, match=r"q_proj.*256, 256.*512, 256"):
        run("disagreeing", {**derived, "head_dim": 64})


# ---- class 8: the device -----------------------------------------------------------------------------------


@pytest.mark.cpu_only  # CUDA cannot be used in the child of a fork
def test_b42_fork_with_a_running_thread_pool(rand_folder: Path) -> None:
    """Right: a forked child can build an engine, use the parent's, and tokenize; the parent goes on."""
    script = f"""
import os, signal
from pathlib import Path
from helpers import greedy, open_engine, tokens_of
signal.alarm(60)
folder = Path({str(rand_folder)!r})

def in_child(work):
    pid = os.fork()
    if pid == 0:
        os._exit(0 if work() else 1)
    assert os.waitpid(pid, 0)[1] == 0, work

engine = open_engine(folder, num_threads=3)
prompt = list(range(100))
expected = tokens_of(engine.generate(prompt, greedy(8))[0])
in_child(lambda: tokens_of(engine.generate(prompt, greedy(8))[0]) == expected)
in_child(lambda: tokens_of(open_engine(folder, num_threads=3).generate(prompt, greedy(8))[0]) == expected)
in_child(lambda: engine.tokenizer.encode("hi") == [104, 105])
assert tokens_of(engine.generate(prompt, greedy(8))[0]) == expected
print("fine")
"""
    result = subprocess.run(python_process(script), capture_output=True, text=True, timeout=120)
    assert result.stdout == "fine\n", result.stderr


@pytest.mark.cpu_only  # it is the size of the main memory that it exceeds
def test_b43_more_memory_than_there_is(rand_folder: Path, tmp_path: Path) -> None:
    """Right: an error with wanted and available memory; what it took is back, and the next start works."""
    ram = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    for wanted in (2 * ram, 2**50):
        with pytest.raises(
            OutOfMemoryError, match=r"wanted \d+ MiB.* \d+ MiB are available; lower kv_cache_memory_bytes"
        ):
            open_engine(rand_folder, kv_cache_memory_bytes=wanted)
    with pytest.raises(
        OutOfMemoryError, match="kv_cache_memory_bytes is 100, but one block of 16 tokens takes 32768 bytes"
    ):
        open_engine(rand_folder, kv_cache_memory_bytes=100)
    # Weights that no machine has room for: 4 TiB from a config.json alone.
    huge = fixtures.llama_config(
        hidden_size=2**15, intermediate_size=2**17, num_hidden_layers=256, vocab_size=2**17
    )
    fixtures.write_json(tmp_path / "config.json", huge)
    with pytest.raises(OutOfMemoryError, match="wanted"):
        Engine(tmp_path, device="cpu", load_format="dummy")
    assert len(tokens_of(open_engine(rand_folder).generate([1], greedy(3))[0])) == 3


# ---- class 10: building and packaging ----------------------------------------------------------------------


def test_b57_odd_paths(rand_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Right: letters of any script, spaces, relative paths and symlinks name a model as well as any other
    path.
    """
    expected = tokens_of(open_engine(rand_folder).generate("hi", greedy(5))[0])
    odd = tmp_path / "модель é 模型"
    fixtures.write_rand(odd)
    fixtures.write_byte_tokenizer(odd)
    (tmp_path / "link").symlink_to(odd, target_is_directory=True)
    monkeypatch.chdir(tmp_path)
    for model in (odd, str(odd), Path(odd.name), f"./{odd.name}/", tmp_path / "link", "link/../link"):
        engine = Engine(model, device="cpu", dtype="float32", kv_cache_memory_bytes=2**20)
        assert tokens_of(engine.generate("hi", greedy(5))[0]) == expected


@pytest.mark.usefixtures("transformers")
@pytest.mark.parametrize("order", ["torch, tiny_vllm", "tiny_vllm, torch"])
def test_b57_torch_before_and_after(order: str, rand_folder: Path) -> None:
    """Right: with torch in the process, whichever came first, the output is the same, and torch works."""
    expected = tokens_of(open_engine(rand_folder).generate("hi", greedy(5))[0])
    script = f"""
import {order}
from pathlib import Path
from helpers import greedy, open_engine, tokens_of
torch.set_num_threads(2)
assert float((torch.ones(300, 300) @ torch.ones(300, 300)).sum()) == 300**3
print(tokens_of(open_engine(Path({str(rand_folder)!r})).generate("hi", greedy(5))[0]))
assert float((torch.ones(300, 300) @ torch.ones(300, 300)).sum()) == 300**3
"""
    result = subprocess.run(python_process(script), capture_output=True, text=True, timeout=300)
    assert result.stdout == f"{expected}\n", result.stderr
