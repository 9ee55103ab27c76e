"""How the next token is chosen, on a model whose logits are the same at each step."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import fixtures
import numpy as np
import pytest
from helpers import exact, greedy, open_engine, prompt_of, tokens_of
from tiny_vllm.engine import Engine
from tiny_vllm.errors import InvalidRequestError
from tiny_vllm.outputs import CompletionOutput
from tiny_vllm.sampling_params import SamplingParams

# 16 tokens with distinct probabilities between 0.19 and 0.016, in no order.
LOGITS = [0.3, -0.7, 1.1, 0.0, 1.7, -0.2, 0.9, 0.6, -0.5, 1.4, 0.1, -0.3, 0.5, 0.75, -0.1, 0.2]


def probabilities(logits: Sequence[float], temperature: float = 1.0) -> np.ndarray:
    x = np.asarray(logits, np.float64) / temperature
    x = np.exp(x - x.max())
    return x / x.sum()


def filtered(
    logits: Sequence[float], temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0
) -> np.ndarray:
    """What to draw from, by the definitions: temperature, min_p, top_k, then top_p over what is left."""
    p = probabilities(logits, temperature)
    p[p < min_p * p.max()] = 0
    order = np.argsort(-p, kind="stable")  # of equals the lower id comes first
    if top_k > 0:
        p[order[top_k:]] = 0
    p /= p.sum()
    before = np.cumsum(p[order]) - p[order]  # the mass of all more likely tokens
    p[order[(before >= top_p - 1e-12) & (before > 0)]] = 0
    return p / p.sum()


@pytest.fixture(scope="module")
def fixed(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Sequence[float]], Engine]:
    engines: dict[tuple[float, ...], Engine] = {}

    def engine(logits: Sequence[float] = LOGITS) -> Engine:
        key = tuple(logits)
        if key not in engines:
            engines[key] = open_engine(fixtures.write_fixed(tmp_path_factory.mktemp("fixed"), logits))
        return engines[key]

    return engine


def draws(engine: Engine, count: int, **fields: Any) -> list[int]:
    """Independent draws: eight sequences with a seed each."""
    params = [
        SamplingParams(seed=100 + i, max_tokens=count // 8, ignore_eos=True, **fields) for i in range(8)
    ]
    return [token for output in engine.generate([[0]] * 8, params) for token in tokens_of(output)]


# ---- logits and their probabilities ------------------------------------------------------------------------


def test_the_fixed_model_has_these_logits(fixed: Callable[..., Engine]) -> None:
    output = fixed().generate([3, 1, 2], greedy(2, logprobs=16, prompt_logprobs=16))[0]
    rows = [*(output.outputs[0].logprobs or ()), *(output.prompt_logprobs or ())[1:]]
    assert len(rows) == 4
    for row in rows:
        assert row is not None
        assert row.keys() == set(range(16))
        np.testing.assert_allclose(
            [row[i].logprob for i in range(16)], np.log(probabilities(LOGITS)), rtol=0, atol=1e-6
        )
        assert [row[i].rank for i in np.argsort(LOGITS)[::-1]] == list(range(1, 17))


@pytest.mark.parametrize("fields", [{"temperature": 3.0}, {"top_k": 2}, {"top_p": 0.2}, {"min_p": 0.9}])
def test_logprobs_are_of_the_raw_logits(fields: dict[str, Any], fixed: Callable[..., Engine]) -> None:
    """Not of the filtered ones, and with the rank of the chosen token in the whole vocabulary."""
    output = fixed().generate(
        [0], SamplingParams(seed=3, max_tokens=50, ignore_eos=True, logprobs=1, **fields)
    )[0]
    completion = output.outputs[0]
    assert completion.logprobs is not None
    raw = np.log(probabilities(LOGITS))
    ranks = {int(token): i + 1 for i, token in enumerate(np.argsort(LOGITS)[::-1])}
    for token, row in zip(completion.token_ids, completion.logprobs, strict=True):
        assert row[token].logprob == pytest.approx(raw[token], abs=1e-6)
        assert row[token].rank == ranks[token]
        assert row[4].rank == 1  # logprobs=1: the best one is there, chosen or not
        assert len(row) == (1 if token == 4 else 2)
    chosen = [raw[t] for t in completion.token_ids]
    assert completion.cumulative_logprob == pytest.approx(sum(chosen), abs=1e-4)


def test_logprobs_zero_reports_the_chosen_token_only(fixed: Callable[..., Engine]) -> None:
    completion = fixed().generate([0], SamplingParams(seed=3, max_tokens=5, logprobs=0))[0].outputs[0]
    assert completion.logprobs is not None
    assert [list(row) for row in completion.logprobs] == [[t] for t in completion.token_ids]


# ---- which tokens may be drawn -----------------------------------------------------------------------------

FILTERS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.5},
    {"temperature": 2.0},
    {"top_k": 5},
    {"top_k": 16},
    {"top_k": 1000},
    {"top_k": -1},
    {"top_p": 0.5},
    {"top_p": 0.999999},
    {"min_p": 0.4},
    {"min_p": 1.0},
    {"top_k": 6, "top_p": 0.7},
    {"min_p": 0.3, "top_p": 0.8},
    {"min_p": 0.2, "top_k": 7, "top_p": 0.9, "temperature": 0.8},
]


def label(fields: dict[str, Any]) -> str:
    return ",".join(f"{k}={v}" for k, v in fields.items()) or "plain"


@pytest.mark.parametrize("fields", FILTERS, ids=label)
def test_filters_and_frequencies(fields: dict[str, Any], fixed: Callable[..., Engine]) -> None:
    """4,000 draws: exactly the tokens that the definitions keep, as often as they should be (chi-square).

    The seeds are fixed, so that the test always has the same outcome. A right sampler exceeds the bound, the
    99.99th percentile, for one choice of seeds in 10,000.
    """
    expected = filtered(LOGITS, **{**fields, "top_k": max(fields.get("top_k", 0), 0)})
    count = Counter(draws(fixed(), 4000, **fields))
    assert set(count) == set(np.flatnonzero(expected))
    kept = np.flatnonzero(expected)
    observed = np.array([count[int(t)] for t in kept])
    chi_square = float(((observed - 4000 * expected[kept]) ** 2 / (4000 * expected[kept])).sum())
    assert chi_square <= chi_square_bound(len(kept) - 1)


def chi_square_bound(degrees: int, z: float = 3.719) -> float:
    """The percentile where a normal variable has z, here 99.99, by Wilson and Hilferty's approximation (PNAS
    17, 1931) and a little more.
    """
    if degrees == 0:
        return 0.0
    return degrees * (1 - 2 / (9 * degrees) + z * math.sqrt(2 / (9 * degrees))) ** 3 + 1


def test_top_p_keeps_the_token_that_crosses_the_border(fixed: Callable[..., Engine]) -> None:
    """Probabilities 1/2, 1/4, 1/8, 1/16, 1/16: for each border the least set whose sum reaches it."""
    engine = fixed([math.log(p) for p in (0.5, 0.25, 0.125, 0.0625, 0.0625)])
    for top_p, kept in (
        (0.4, 1),
        (0.51, 2),
        (0.74, 2),
        (0.76, 3),
        (0.874, 3),
        (0.876, 4),
        (0.94, 5),
        (1.0, 5),
    ):
        assert set(draws(engine, 1600, top_p=top_p)) == set(range(kept)), top_p


def test_equal_logits_are_kept_from_the_lowest_id(fixed: Callable[..., Engine]) -> None:
    engine = fixed([1.0] * 8)
    assert set(draws(engine, 800, top_k=3)) == {0, 1, 2}
    assert set(draws(engine, 800, top_p=0.3)) == {0, 1, 2}
    assert set(draws(engine, 800, min_p=1.0)) == set(range(8))
    assert tokens_of(engine.generate([5], greedy(4, ignore_eos=True))[0]) == [0, 0, 0, 0]


def test_no_ops_are_exact(fixed: Callable[..., Engine]) -> None:
    """top_k=0, top_k=-1, top_k=V, top_p=1 and min_p=0 draw the very same tokens as no filter at all."""
    plain = draws(fixed(), 400)
    for fields in ({"top_k": 0}, {"top_k": -1}, {"top_k": 16}, {"top_p": 1.0}, {"min_p": 0.0}):
        assert draws(fixed(), 400, **fields) == plain


def test_a_large_vocabulary(fixed: Callable[..., Engine]) -> None:
    """top_p over far more tokens than are sorted at first: 2,000 equal ones, of which half are kept."""
    engine = fixed([0.0] * 2000)
    assert max(draws(engine, 4000, top_p=0.5)) < 1000
    assert max(draws(engine, 4000, top_p=0.9)) in range(1700, 1800)


# ---- the draw itself ---------------------------------------------------------------------------------------


def philox(counter: list[int], key: int) -> list[int]:
    """Philox 4x32-10 (Salmon et al., SC 2011), in plain integers."""
    c0, c1, c2, c3 = counter
    k0, k1 = key & 0xFFFFFFFF, key >> 32
    for _ in range(10):
        a, b = 0xD2511F53 * c0, 0xCD9E8D57 * c2
        c0, c1, c2, c3 = (b >> 32) ^ c1 ^ k0, b & 0xFFFFFFFF, (a >> 32) ^ c3 ^ k1, a & 0xFFFFFFFF
        k0, k1 = (k0 + 0x9E3779B9) & 0xFFFFFFFF, (k1 + 0xBB67AE85) & 0xFFFFFFFF
    return [c0, c1, c2, c3]


def test_philox_known_answers() -> None:
    """From the paper's test vectors, so that the reference below is one."""
    assert philox([0] * 4, 0) == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]
    pi = [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344]
    assert philox(pi, 0x299F31D0A4093822) == [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1]


def race(p: np.ndarray, seed: int, position: int) -> int:
    """argmax of p / e with e ~ Exp(1): token i takes word i % 4 of block i // 4 of the stream (seed,
    position).
    """
    words = [w for block in range(-(-len(p) // 4)) for w in philox([block, position, 0, 0], seed)]
    e = [-math.log((w + 0.5) / 2**32) for w in words[: len(p)]]
    return int(np.argmax(p / e))


@pytest.mark.parametrize(
    "fields", [{}, {"temperature": 0.6, "top_k": 7}, {"min_p": 0.1, "top_p": 0.8}], ids=label
)
def test_every_draw_is_the_documented_race(fields: dict[str, Any], fixed: Callable[..., Engine]) -> None:
    """Token for token what the definition says, for two sequences: output i draws from seed + i."""
    p = filtered(LOGITS, **fields)
    seed = 2**40 + 7
    output = fixed().generate(
        [1, 2, 3], SamplingParams(n=2, seed=seed, max_tokens=60, ignore_eos=True, **fields)
    )[0]
    for completion in output.outputs:
        expected = [race(p, seed + completion.index, position) for position in range(3, 63)]
        assert completion.token_ids == expected


def test_seeds(rand_folder: Path) -> None:
    """A seed repeats, in another engine as well; other seeds and other engine seeds give something else."""
    prompts = [[1, 2, 3]] * 3

    def run(engine_seed: int, seed: int | None) -> list[list[int]]:
        engine = open_engine(rand_folder, seed=engine_seed)
        return [tokens_of(o) for o in engine.generate(prompts, SamplingParams(seed=seed, max_tokens=10))]

    seeded = run(0, 5)
    assert seeded == run(1, 5)
    assert seeded[0] == seeded[1] == seeded[2]
    assert seeded != run(0, 6)
    unseeded = run(0, None)
    assert unseeded == run(0, None)
    assert unseeded != run(1, None)
    assert len({tuple(tokens) for tokens in unseeded}) == 3  # each request has its own numbers
    assert run(0, -1) != run(0, 1)  # a negative seed is one of its own


# ---- penalties ---------------------------------------------------------------------------------------------

PENALTIES: list[dict[str, Any]] = [
    {"repetition_penalty": 1.3},
    {"repetition_penalty": 0.8},
    {"frequency_penalty": 0.07},
    {"frequency_penalty": -0.05},
    {"presence_penalty": 1.1},
    {"presence_penalty": -2.0},
    {"repetition_penalty": 1.2, "frequency_penalty": 0.1, "presence_penalty": -0.3},
]


def penalized(
    logits: Any,
    prompt: Sequence[int],
    output: Sequence[int],
    repetition_penalty: float = 1.0,
    frequency_penalty: float = 0.0,
    presence_penalty: float = 0.0,
) -> np.ndarray:
    """By the definitions, in float32: repetition for what the prompt or the output has, frequency for each
    time and presence for once in the output.
    """
    x = np.array(logits, np.float32)
    seen = np.zeros(len(x), bool)
    seen[[*prompt, *output]] = True
    count = np.bincount(np.asarray(output, np.int64), minlength=len(x)).astype(np.float32)
    repetition = np.where(seen, np.float32(repetition_penalty), np.float32(1))
    x = np.where(x > 0, x / repetition, x * repetition)
    x -= np.float32(frequency_penalty) * count
    x -= np.float32(presence_penalty) * (count > 0)
    return x


def penalized_draws(
    logits: Sequence[float],
    prompt: Sequence[int],
    count: int,
    seed: int,
    filters: dict[str, Any],
    **penalties: Any,
) -> list[int]:
    """The tokens that a request gets, one after the other."""
    output: list[int] = []
    while len(output) < count:
        x = penalized(logits, prompt, output, **penalties)
        output.append(race(filtered([float(v) for v in x], **filters), seed, len(prompt) + len(output)))
    return output


@pytest.mark.parametrize("penalties", PENALTIES, ids=label)
@pytest.mark.parametrize(
    "filters", [{}, {"temperature": 0.6, "top_k": 7}, {"min_p": 0.1, "top_p": 0.8}], ids=label
)
def test_every_draw_is_from_the_penalized_logits(
    filters: dict[str, Any], penalties: dict[str, Any], fixed: Callable[..., Engine]
) -> None:
    """Before all filters, for two sequences with a history each. What is reported are the raw logits."""
    prompt, seed = [4, 1, 4, 4, 13], 77
    raw = np.log(probabilities(LOGITS))
    output = fixed().generate(
        prompt,
        SamplingParams(n=2, seed=seed, max_tokens=60, ignore_eos=True, logprobs=1, **filters, **penalties),
    )[0]
    for completion in output.outputs:
        expected = penalized_draws(LOGITS, prompt, 60, seed + completion.index, filters, **penalties)
        assert completion.token_ids == expected
        assert completion.logprobs is not None
        for token, row in zip(expected, completion.logprobs, strict=True):
            assert row[token].logprob == pytest.approx(raw[token], abs=1e-6)
            assert row[4].rank == 1
    assert output.outputs[0].token_ids != penalized_draws(LOGITS, prompt, 60, seed, filters)


@pytest.mark.parametrize("penalties", PENALTIES, ids=label)
def test_the_history_is_all_of_the_prompt_whoever_computed_it(
    penalties: dict[str, Any], fixed: Callable[..., Engine], tmp_path: Path
) -> None:
    """Found in the prefix cache, read in chunks, or computed again after a preemption."""
    prompts = [
        [*([4] * 40), 9, 2, token] for token in (6, 7, 12)
    ]  # the best token lies far back, and only there
    params = SamplingParams(seed=5, max_tokens=50, ignore_eos=True, temperature=0.4, **penalties)
    expected = [penalized_draws(LOGITS, p, 50, 5, {"temperature": 0.4}, **penalties) for p in prompts]

    engine = fixed()
    engine.generate(prompts[0], greedy(1))
    outputs = [engine.generate(p, params)[0] for p in prompts]
    assert all(o.num_cached_tokens >= 32 for o in outputs)
    assert [tokens_of(o) for o in outputs] == expected

    folder = fixtures.write_fixed(tmp_path, LOGITS)
    tight = open_engine(folder, num_blocks=40, block_size=4, max_num_batched_tokens=16)
    assert [tokens_of(o) for o in tight.generate(prompts, params)] == expected
    assert tight.metrics()["num_preemptions"] > 0


@pytest.mark.parametrize(
    "penalties",
    [{"frequency_penalty": 0.5}, {"presence_penalty": 1.5}, {"presence_penalty": -1.0}],
    ids=label,
)
def test_greedy_with_penalties_on_a_model_with_a_history(
    penalties: dict[str, Any], rand_folder: Path
) -> None:
    """The logits differ at each step here, and the log probabilities of all tokens tell what was chosen from:
    these two penalties do not mind a constant.
    """
    prompts = [prompt_of(length, seed=length) for length in (1, 20, 33)]
    engine = open_engine(rand_folder)
    outputs = engine.generate(prompts, greedy(30, ignore_eos=True, logprobs=512, **penalties))
    plain = engine.generate(prompts, greedy(30, ignore_eos=True))
    assert [tokens_of(o) for o in outputs] != [tokens_of(o) for o in plain]
    for prompt, output in zip(prompts, outputs, strict=True):
        completion: CompletionOutput = output.outputs[0]
        assert completion.logprobs is not None
        for i, row in enumerate(completion.logprobs):
            raw = [row[token].logprob for token in range(512)]
            x = penalized(raw, prompt, completion.token_ids[:i], **penalties)
            assert x.max() - x[completion.token_ids[i]] < 1e-5


def test_extreme_penalties_still_choose(fixed: Callable[..., Engine]) -> None:
    """Beyond what float32 holds a logit becomes the largest or smallest one, never NaN or infinity."""

    def run(**penalties: float) -> list[int]:
        params = greedy(3, ignore_eos=True, **penalties)
        return tokens_of(fixed().generate([4, 1, 3], params)[0])

    assert run(repetition_penalty=1e300) == [9, 2, 6]  # each best token is 0 after its turn
    assert run(repetition_penalty=1e-300) == [4, 4, 4]
    assert run(repetition_penalty=5e-324, presence_penalty=2.0, frequency_penalty=2.0) == [4, 4, 4]


# ---- values that no request may have -----------------------------------------------------------------------


def test_logprobs_of_all_tokens(rand_folder: Path) -> None:
    """-1 is the whole vocabulary, beside a request that wants none."""
    engine = open_engine(rand_folder)
    params = [greedy(3, logprobs=n, prompt_logprobs=n) for n in (-1, 512)]
    every, counted, _ = engine.generate([[1, 2, 3]] * 3, [*params, greedy(3)])
    assert exact(every) == exact(counted)
    assert all(len(row) == 512 for row in every.outputs[0].logprobs or ())
    assert [row and len(row) for row in every.prompt_logprobs or ()] == [None, 512, 512]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("n", 0),
        ("n", -1),
        ("n", 1.5),
        ("n", True),
        ("temperature", -0.1),
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("temperature", "hot"),
        ("top_p", 0.0),
        ("top_p", -1.0),
        ("top_p", 1.1),
        ("top_p", math.nan),
        ("top_k", -2),
        ("top_k", 0.4),
        ("top_k", 2**63),
        ("min_p", -0.1),
        ("min_p", 1.1),
        ("repetition_penalty", 0.0),
        ("repetition_penalty", -1.0),
        ("repetition_penalty", math.inf),
        ("repetition_penalty", "1"),
        ("frequency_penalty", 2.1),
        ("frequency_penalty", -2.1),
        ("frequency_penalty", math.nan),
        ("presence_penalty", 2.1),
        ("presence_penalty", -2.1),
        ("presence_penalty", None),
        ("seed", 1.5),
        ("seed", "1"),
        ("seed", 2**63),
        ("max_tokens", 0),
        ("max_tokens", -1),
        ("max_tokens", 2**63),
        ("max_tokens", 1.0),
        ("ignore_eos", 1),
        ("stop_token_ids", [-1]),
        ("stop_token_ids", [2**31]),
        ("stop_token_ids", ["x"]),
        ("stop_token_ids", "x"),
        ("stop_token_ids", 5),
        ("stop_token_ids", 0),
        ("logprobs", -2),
        ("logprobs", True),
        ("logprobs", 2**31),
        ("prompt_logprobs", -2),
        ("prompt_logprobs", 0.5),
    ],
)
def test_bad_values_are_refused_by_name(field: str, value: Any) -> None:
    with pytest.raises(InvalidRequestError, match=field):
        SamplingParams(**{field: value})


def test_vllm_defaults() -> None:
    params = SamplingParams()
    assert (params.n, params.temperature, params.top_p, params.top_k, params.min_p) == (1, 1.0, 1.0, 0, 0.0)
    assert (params.max_tokens, params.seed, params.ignore_eos, params.stop_token_ids) == (16, None, False, [])
    assert (params.repetition_penalty, params.frequency_penalty, params.presence_penalty) == (1.0, 0.0, 0.0)
    assert (params.logprobs, params.prompt_logprobs) == (None, None)
    assert params == SamplingParams() != SamplingParams(top_k=3)
    assert "top_k=3" in repr(SamplingParams(top_k=3))
