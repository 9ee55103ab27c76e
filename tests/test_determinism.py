"""A request gets the same tokens and the same log probabilities, to the last bit, whatever else the engine
does.

Each test runs the same requests in another way (batched, chunked, preempted, cached, on other threads) and
compares with each request alone. This is what makes a seed worth giving, and it is the strictest test of
paging and scheduling: a wrong slot, a stale block or a sum in another order changes some bit.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny_models
from helpers import check_all_blocks_are_back, exact, finish, open_engine, prompt_of
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tiny_vllm import _core
from tiny_vllm.outputs import RequestOutput
from tiny_vllm.sampling_params import SamplingParams

pytestmark = pytest.mark.cpu_only  # it is what the CPU backend promises

Request = tuple[list[int], SamplingParams]
DTYPES = ["float32", "bfloat16"]


def requests() -> list[Request]:
    """Greedy and sampled, short and long, around block edges, n > 1, and a pair with a common beginning."""

    def params(**fields: Any) -> SamplingParams:
        return SamplingParams(**{"max_tokens": 12, "ignore_eos": True, "logprobs": 3, **fields})

    common = prompt_of(40, seed=1)
    return [
        (common + prompt_of(7, seed=2), params(temperature=0.0)),
        (common + prompt_of(30, seed=3), params(temperature=0.0, prompt_logprobs=2)),
        (prompt_of(1, seed=4), params(seed=11)),
        (prompt_of(16, seed=5), params(seed=12, temperature=0.7, top_p=0.9)),
        (prompt_of(33, seed=6), params(seed=13, top_k=20, n=3)),
        (prompt_of(100, seed=7), params(seed=14, temperature=1.5, min_p=0.02, max_tokens=20)),
        (prompt_of(31, seed=8), params(temperature=0.0, n=2, max_tokens=3)),
        (common + prompt_of(7, seed=2), params(seed=15, temperature=2.0)),
    ]


@pytest.fixture(scope="module")
def folder_of(rand_folder: Path, rand_bf16_folder: Path) -> Callable[[str], Path]:
    return lambda dtype: rand_bf16_folder if dtype == "bfloat16" else rand_folder


@pytest.fixture(scope="module")
def alone(folder_of: Callable[[str], Path]) -> Callable[..., list[Any]]:
    """Each of requests() alone: one thread, no prefix cache, the whole prompt in one step."""
    known: dict[tuple[str, str], list[Any]] = {}

    def run(dtype: str, isa: str = "auto") -> list[Any]:
        if (dtype, isa) not in known:
            engine = open_engine(
                folder_of(dtype), dtype=dtype, cpu_isa=isa, num_threads=1, enable_prefix_caching=False
            )
            known[dtype, isa] = [exact(engine.generate(*request)[0]) for request in requests()]
        return known[dtype, isa]

    return run


def batched(engine: Any) -> list[RequestOutput]:
    prompts, params = zip(*requests(), strict=True)
    outputs = engine.generate(list(prompts), list(params))
    check_all_blocks_are_back(engine)
    return outputs


def test_the_requests_are_worth_comparing(alone: Callable[..., list[Any]]) -> None:
    """Sampling takes other tokens than greedy, children differ, and the number formats can be told apart."""
    results = alone("float32")
    assert results[0][1][1] != results[7][1][1]
    children = [tuple(completion[1]) for completion in results[4][1:]]
    assert len(set(children)) == 3
    assert results != alone("bfloat16")


# Every pair of values of two options occurs at least once.
OPTIONS: dict[str, list[Any]] = {
    "max_num_batched_tokens": [8, 33, 64, 512],
    "block_size": [1, 4, 16, 32],
    "num_threads": [1, 2, 3],
    "scheduler": ["continuous", "static"],
    "enable_prefix_caching": [True, False],
}


def pairwise(options: dict[str, list[Any]]) -> list[dict[str, Any]]:
    """A small set of combinations that has each pair of values: take the one with the most new pairs, until
    none.
    """
    names = list(options)

    def pairs(values: tuple[Any, ...]) -> set[Any]:
        return set(itertools.combinations(zip(names, values, strict=True), 2))

    candidates = list(itertools.product(*options.values()))
    missing = set().union(*map(pairs, candidates))
    chosen = []
    while missing:
        best = max(candidates, key=lambda values: len(pairs(values) & missing))
        missing -= pairs(best)
        chosen.append(dict(zip(names, best, strict=True)))
    return chosen


@pytest.mark.parametrize("options", pairwise(OPTIONS), ids=lambda o: "-".join(str(v) for v in o.values()))
@pytest.mark.parametrize("dtype", DTYPES)
def test_batched_chunked_and_cached(
    dtype: str, options: dict[str, Any], folder_of: Callable[[str], Path], alone: Callable[..., list[Any]]
) -> None:
    engine = open_engine(folder_of(dtype), dtype=dtype, num_blocks=4096 // options["block_size"], **options)
    assert [exact(output) for output in batched(engine)] == alone(dtype)
    again = batched(engine)  # with a warm prefix cache, if there is one
    assert [exact(output) for output in again] == alone(dtype)
    cached = [output.num_cached_tokens for output in again]
    if options["enable_prefix_caching"]:
        assert cached[0] == cached[7] == 46 // options["block_size"] * options["block_size"]
        assert cached[1] == 0  # its prompt's logits are wanted, so all of it is computed
    else:
        assert cached == [0] * len(cached)


@pytest.mark.parametrize("scheduler", ["continuous", "static"])
@pytest.mark.parametrize("caching", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_tiny_pool(
    dtype: str,
    caching: bool,
    scheduler: str,
    folder_of: Callable[[str], Path],
    alone: Callable[..., list[Any]],
) -> None:
    """A pool of 40 blocks of 4, for requests of up to 120 tokens. Continuous batching has to preempt."""
    engine = open_engine(
        folder_of(dtype),
        dtype=dtype,
        num_blocks=40,
        block_size=4,
        max_num_batched_tokens=48,
        enable_prefix_caching=caching,
        scheduler=scheduler,
    )
    assert [exact(output) for output in batched(engine)] == alone(dtype)
    assert (engine.metrics()["num_preemptions"] > 0) == (scheduler == "continuous")


@pytest.mark.parametrize("dtype", DTYPES)
def test_preempted_in_the_middle_of_a_prompt(dtype: str, folder_of: Callable[[str], Path]) -> None:
    """One that decodes takes the blocks of one that is still reading its prompt and reporting on it."""
    params = SamplingParams(temperature=0.0, max_tokens=20, logprobs=1, prompt_logprobs=2, ignore_eos=True)
    prompts = [prompt_of(4, seed=1), prompt_of(60, seed=2)]
    expected = [
        exact(o) for p in prompts for o in open_engine(folder_of(dtype), dtype=dtype).generate(p, params)
    ]
    engine = open_engine(folder_of(dtype), dtype=dtype, num_blocks=20, block_size=4, max_num_batched_tokens=4)
    engine.add_request("0", prompts[0], params)
    engine.step()
    engine.add_request("1", prompts[1], params)
    while not engine.metrics()["num_preemptions"]:
        assert [o.request_id for o in engine.step()] == ["0"]
    last = finish(engine)
    assert [exact(last["0"]), exact(last["1"])] == expected
    check_all_blocks_are_back(engine)


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_instruction_set(
    dtype: str, folder_of: Callable[[str], Path], alone: Callable[..., list[Any]]
) -> None:
    """Kernels may differ from each other in the last bits, but each is the same alone and in a batch."""
    sets = ["reference", *available_instruction_sets(folder_of(dtype))]
    assert "portable" in sets
    for isa in sets:
        engine = open_engine(
            folder_of(dtype), dtype=dtype, cpu_isa=isa, num_threads=3, max_num_batched_tokens=40, block_size=4
        )
        assert [exact(output) for output in batched(engine)] == alone(dtype, isa), isa


def available_instruction_sets(folder: Path) -> list[str]:
    """Of those compiled in, the ones that this processor has."""
    from tiny_vllm.errors import DeviceError

    found = []
    for isa in _core.build_info()["instruction_sets"]:
        try:
            open_engine(folder, cpu_isa=isa)
        except DeviceError:
            continue
        found.append(isa)
    return found


@pytest.mark.parametrize("dtype", DTYPES)
def test_arriving_one_by_one(
    dtype: str, folder_of: Callable[[str], Path], alone: Callable[..., list[Any]]
) -> None:
    """A new request every second step: prefills and decodes share steps. One is aborted on the way."""
    engine = open_engine(folder_of(dtype), dtype=dtype, max_num_batched_tokens=24, block_size=4)
    last: dict[str, RequestOutput] = {}
    for i, (prompt, params) in enumerate(requests()):
        engine.add_request(str(i), prompt, params)
        engine.add_request(f"aborted {i}", prompt_of(20, seed=50 + i), params)
        for _ in range(2):
            last.update((output.request_id, output) for output in engine.step())
        engine.abort_request(f"aborted {i}")
    last.update(finish(engine))
    assert [exact(last[str(i)]) for i in range(len(requests()))] == alone(dtype)
    check_all_blocks_are_back(engine)


@settings(deadline=None, max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_schedule(
    data: st.DataObject, folder_of: Callable[[str], Path], alone: Callable[..., list[Any]]
) -> None:
    """Random options, random arrivals, random aborts."""
    engine = open_engine(
        folder_of("bfloat16"),
        dtype="bfloat16",
        block_size=(block_size := data.draw(st.sampled_from([1, 3, 4, 16]))),
        num_blocks=data.draw(st.integers(160, 400)) // block_size,
        max_num_batched_tokens=data.draw(st.integers(1, 70)),
        max_num_seqs=data.draw(st.integers(3, 8)),
        enable_prefix_caching=data.draw(st.booleans()),
        scheduler=data.draw(st.sampled_from(["continuous", "static"])),
    )
    last: dict[str, RequestOutput] = {}
    for i in data.draw(st.permutations(range(len(requests())))):
        prompt, params = requests()[i]
        engine.add_request(str(i), prompt, params)
        for _ in range(data.draw(st.integers(0, 6))):
            last.update((output.request_id, output) for output in engine.step())
            engine._core.check_invariants()
        if data.draw(st.booleans()):
            victim = str(data.draw(st.integers(0, 7)))
            engine.abort_request(victim)
    last.update(finish(engine))
    complete = {request_id: output for request_id, output in last.items() if output.finished}
    for request_id, output in complete.items():
        assert exact(output) == alone("bfloat16")[int(request_id)]
    check_all_blocks_are_back(engine)


@pytest.mark.parametrize("name", ["llama_rope_dynamic", "mistral_window", "qwen3", "llama_gqa_9_3"])
def test_other_architectures(name: str, tmp_path: Path) -> None:
    """Sliding windows, head norms, odd sizes, and rotary angles that depend on the length, in a tiny pool."""
    tiny_models.write_model(name, tmp_path)
    batch = [
        (ids, SamplingParams(max_tokens=20, ignore_eos=True, logprobs=2, seed=i, temperature=0.8))
        for i, ids in enumerate(
            [prompt_of(50), [*prompt_of(50), 1, 2], prompt_of(70), prompt_of(5), prompt_of(50)]
        )
    ]
    one = open_engine(
        tmp_path, dtype="bfloat16", enable_prefix_caching=False, num_threads=1, max_model_len=128
    )
    expected = [exact(one.generate(*request)[0]) for request in batch]
    for options in ({"num_blocks": 40, "block_size": 4}, {"num_blocks": 100, "block_size": 16}):
        engine = open_engine(
            tmp_path, dtype="bfloat16", max_num_batched_tokens=24, max_model_len=128, **options
        )
        for _ in range(2):
            outputs = engine.generate([prompt for prompt, _ in batch], [params for _, params in batch])
            assert [exact(output) for output in outputs] == expected
        assert (engine.metrics()["num_preemptions"] > 0) == (options["num_blocks"] == 40)
        assert engine.metrics()["prefix_cache_hit_tokens"] > 0


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES)
def test_bundled_model(dtype: str, bundled_folder: Path) -> None:
    """The same with 30 layers, 9 query heads and a vocabulary of 49,152: alone, and all together in a small
    pool.
    """
    batch = [
        (
            "The capital of France is",
            SamplingParams(max_tokens=10, temperature=0.0, logprobs=3, ignore_eos=True),
        ),
        (
            "Once upon a time, there was a little girl who",
            SamplingParams(max_tokens=10, seed=1, logprobs=3, n=2),
        ),
        ("1 2 3 4 5 6 7 8 9 10 11 12 13 14", SamplingParams(max_tokens=10, seed=2, top_p=0.9, logprobs=3)),
        ("The " * 60, SamplingParams(max_tokens=10, temperature=0.0, prompt_logprobs=1, ignore_eos=True)),
    ]
    one = open_engine(
        bundled_folder, dtype=dtype, num_threads=1, enable_prefix_caching=False, max_model_len=256
    )
    expected = [exact(one.generate(*request)[0]) for request in batch]
    del one
    engine = open_engine(
        bundled_folder, dtype=dtype, num_blocks=8, num_threads=2, max_num_batched_tokens=40, max_model_len=256
    )
    outputs = engine.generate([prompt for prompt, _ in batch], [params for _, params in batch])
    assert [exact(output) for output in outputs] == expected
    check_all_blocks_are_back(engine)
