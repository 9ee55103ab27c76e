"""From logits to the next token: the whole chain, against a reference written from the definitions.

Those are the docstring of SamplingParams and what vLLM documents: structured_outputs, allowed_token_ids,
bad_words, min_tokens and logit_bias, then the three penalties, then temperature, min_p, top_k and top_p. Here
all of it is float64 and numpy. The tokenizers below have a token for each byte.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Collection, Sequence
from itertools import product
from typing import Any

import fixtures
import numpy as np
import pytest
from helpers import DEVICE, check_all_blocks_are_back, open_engine, prompt_of
from test_sampling import chi_square_bound
from tiny_vllm.engine import Engine
from tiny_vllm.outputs import CompletionOutput
from tiny_vllm.sampling_params import SamplingParams

Array = Any
Language = Collection[bytes]  # what an output may be, word by word

# ---- the reference -----------------------------------------------------------------------------------------


def edited(
    logits: Array,
    params: SamplingParams,
    prompt: Sequence[int],
    output: Sequence[int],
    end_ids: Collection[int] = (),
    language: Language | None = None,
) -> Array:
    """(V): the logits that temperature and filters get, -infinity for what cannot be chosen."""
    x = np.array(logits, np.float64)
    V = len(x)

    def ban(ids: Collection[int]) -> None:
        x[list(ids)] = -np.inf

    if language is not None:
        said = bytes(output)
        may_follow = {word[len(said)] for word in language if word.startswith(said) and word != said}
        if said in language:
            may_follow |= set(end_ids)
        ban(set(range(V)) - may_follow)
    if params.allowed_token_ids is not None:
        ban(set(range(V)) - set(params.allowed_token_ids))
    for word in params.bad_words:
        *before, last = word.encode()
        if list(output[len(output) - len(before) :]) == before:
            ban([last])
    if len(output) < params.min_tokens:
        ban(params.stop_token_ids)
        if not params.ignore_eos:
            ban(end_ids)
    for token, bias in (params.logit_bias or {}).items():
        x[token] += bias

    counts = Counter(output)
    for token in {*prompt, *output}:
        factor = params.repetition_penalty
        x[token] = x[token] / factor if x[token] > 0 else x[token] * factor
        x[token] -= params.frequency_penalty * counts[token]
        x[token] -= params.presence_penalty * (token in counts)
    return x


def distribution(x: Array, params: SamplingParams) -> Array:
    """(V): the probability of each token, of edited logits. All zero if there is none to choose."""
    if np.isneginf(x).all():
        return np.zeros(len(x))
    if params.temperature == 0:
        return np.eye(len(x))[int(np.argmax(x))]
    p = np.exp((x - x.max()) / params.temperature)
    p /= p.sum()
    p[p < params.min_p * p.max()] = 0
    order = np.argsort(-p, kind="stable")  # of equals the lower id comes first
    if params.top_k > 0:
        p[order[params.top_k :]] = 0
    p /= p.sum()
    if params.top_p < 1:
        reached = np.cumsum(p[order])
        p[order[1 + int(np.searchsorted(reached, params.top_p)) :]] = 0
    return p / p.sum()


def log_softmax(logits: Array) -> Array:
    x = np.asarray(logits, np.float64) - np.max(logits)
    return x - np.log(np.exp(x).sum())


def end_of(
    output: Sequence[int], params: SamplingParams, end_ids: Collection[int], language: Language | None
) -> tuple[str, Any] | None:
    """Why an output ends after its last token: finish_reason and stop_reason. None: it goes on."""
    if output[-1] in end_ids and not params.ignore_eos:
        return "stop", None
    if output[-1] in params.stop_token_ids:
        return "stop", output[-1]
    if params.max_tokens is not None and len(output) == params.max_tokens:
        return "length", None
    if language is not None and not any(w.startswith(bytes(output)) and w != bytes(output) for w in language):
        return "stop", None
    return None


# ---- models ------------------------------------------------------------------------------------------------

LETTERS = b"abcde"
END = ord("e")
FIXED = [-60 - 0.01 * i for i in range(256)]  # all others: distinct, and never drawn
for _letter, _logit in zip(LETTERS, (0.417, 1.331, -0.523, 0.889, 0.137), strict=True):
    FIXED[_letter] = _logit


@pytest.fixture(scope="module")
def fixed_engine(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    """Says the five letters at random. "e" is its end token."""
    folder = fixtures.write_fixed(tmp_path_factory.mktemp("fixed"), FIXED, eos_token_id=END)
    fixtures.write_byte_tokenizer(folder)
    return open_engine(folder, num_blocks=2100, max_num_seqs=2048)


ZERO = 511  # its logit is 0, so that log probabilities tell what the others are


@pytest.fixture(scope="module")
def rand_engine(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    tensors = fixtures.random_tensors(fixtures.RAND)
    tensors["lm_head.weight"][ZERO] = 0
    folder = fixtures.write_model(tmp_path_factory.mktemp("rand"), fixtures.RAND, tensors)
    fixtures.write_byte_tokenizer(folder)
    return open_engine(folder, num_blocks=512)


# ---- parity ------------------------------------------------------------------------------------------------

WORDS = [bytes(word) for size in (2, 4) for word in product(b"abd", repeat=size)]
REGEX = "[abd]{2}([abd]{2})?"  # the same in one expression


def combination(rng: random.Random, vocabulary: Sequence[int], letters: str) -> dict[str, Any]:
    """Some fields with random values. `vocabulary`: ids to edit; `letters`: what words are made of."""

    def some(most: int) -> list[int]:
        return rng.sample(vocabulary, rng.randint(1, most))

    choices: dict[str, Any] = {
        "temperature": rng.choice([0.0, 0.0, 0.3, 0.8, 1.5, 3.0]),
        "top_k": rng.choice([-1, 0, 1, 2, 3, 10, 10_000]),
        "top_p": rng.choice([0.05, 0.3, 0.7, 0.95]),
        "min_p": rng.choice([0.01, 0.1, 0.5]),
        "repetition_penalty": rng.choice([0.6, 1.1, 1.7]),
        "frequency_penalty": rng.choice([-1.5, -0.3, 0.4, 2.0]),
        "presence_penalty": rng.choice([-2.0, -0.4, 0.6, 1.7]),
        "logit_bias": {token: round(rng.uniform(-9, 9), 3) for token in some(4)},
        "allowed_token_ids": some(len(vocabulary)),
        "bad_words": ["".join(rng.choices(letters, k=rng.randint(1, 3))) for _ in range(rng.randint(1, 3))],
        "min_tokens": rng.randint(1, 6),
        "stop_token_ids": some(2),
        "structured_outputs": {"regex": REGEX},
        "n": 2,
        "logprobs": rng.choice([0, 1, 7]),
    }
    chance = rng.choice([0.15, 0.4, 0.7])
    rare = {"structured_outputs", "allowed_token_ids"}
    fields = {k: v for k, v in choices.items() if rng.random() < chance * (0.5 if k in rare else 1)}
    return {"logprobs": 3, **fields, "max_tokens": 10, "seed": rng.randrange(2**40)}


def language_of(fields: dict[str, Any]) -> Language | None:
    return WORDS if "structured_outputs" in fields else None


def assert_parity(
    completion: CompletionOutput,
    raw: Array,
    params: SamplingParams,
    prompt: Sequence[int],
    end_ids: Collection[int],
    language: Language | None,
) -> None:
    """raw (steps, V): the logits before each token, and, if there is one more row, after the last."""
    tokens = completion.token_ids
    greedy = params.temperature == 0 or params.top_k == 1
    for i, token in enumerate(tokens):
        x = edited(raw[i], params, prompt, tokens[:i], end_ids, language)
        assert distribution(x, params)[token] > 0, (i, token, params)
        if greedy:
            best, second = -np.sort(-x)[:2]
            assert token == int(np.argmax(x))
            assert best - second > 1e-4, "a near tie says nothing: choose another seed for the list"
        end = end_of(tokens[: i + 1], params, end_ids, language)
        assert (end is not None) == (i == len(tokens) - 1 and completion.finish_reason != "error")
        if end is not None:
            assert (completion.finish_reason, completion.stop_reason) == end
    if completion.finish_reason == "error":
        x = edited(raw[len(tokens)], params, prompt, tokens, end_ids, language)
        assert not distribution(x, params).any()
        assert "no token is allowed" in str(completion.stop_reason)

    assert completion.logprobs is not None
    assert completion.cumulative_logprob is not None
    total = 0.0
    for token, row, logits in zip(tokens, completion.logprobs, raw[: len(tokens)], strict=True):
        wanted = log_softmax(logits)
        near = 0 if DEVICE == "cpu" else 1e-5  # a GPU's logits depend on the batch, and so may close ranks
        for id, entry in row.items():
            assert entry.logprob == pytest.approx(wanted[id], abs=1e-4)
            first, last = 1 + (logits > logits[id] + near).sum(), (logits >= logits[id] - near).sum()
            assert first <= entry.rank <= last
        ranks = sorted(
            entry.rank for id, entry in row.items() if id != token or entry.rank <= params.logprobs
        )
        assert ranks == list(range(1, (params.logprobs or 0) + 1))
        total += wanted[token]
    assert completion.cumulative_logprob == pytest.approx(total, abs=1e-3)


def test_random_combinations_on_known_logits(fixed_engine: Engine) -> None:
    """200 requests in one batch: tokens, ends, log probabilities and ranks are the reference's."""
    rng = random.Random(1)
    fields = [combination(rng, [*LETTERS, *b"xyz"], "abcd") for _ in range(199)]
    nothing = {"structured_outputs": {"regex": REGEX}, "allowed_token_ids": [97], "bad_words": ["aa"]}
    fields.append({**nothing, "max_tokens": 10, "seed": 1, "logprobs": 3})
    prompts = [[rng.choice(LETTERS) for _ in range(rng.randint(1, 20))] for _ in fields]
    for i, some in enumerate(fields):
        some["ignore_eos"] = i % 2 == 0 or "structured_outputs" in some
        if "structured_outputs" in some:
            some["stop_token_ids"] = []
    params = [SamplingParams(**some) for some in fields]
    reasons: Counter[str | None] = Counter()
    for output, prompt, some, p in zip(
        fixed_engine.generate(prompts, params), prompts, fields, params, strict=True
    ):
        for completion in output.outputs:
            raw = np.tile(np.array(FIXED), (len(completion.token_ids) + 1, 1))
            assert_parity(completion, raw, p, prompt, {END}, language_of(some))
            reasons[completion.finish_reason] += 1
    assert reasons.keys() == {"stop", "length", "error"}
    check_all_blocks_are_back(fixed_engine)


def test_random_combinations_on_a_model_with_a_history(rand_engine: Engine) -> None:
    """The same on RAND. Its raw logits come from a second run that has the same tokens as its prompt."""
    rng = random.Random(2)
    fields = [combination(rng, range(60, 130), "abdABD") for _ in range(60)]
    prompts = [prompt_of(rng.randint(1, 9), seed=i) for i in range(60)]
    params = [SamplingParams(**some) for some in fields]
    outputs = rand_engine.generate(prompts, params)
    told = [(i, completion) for i, output in enumerate(outputs) for completion in output.outputs]
    again = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=512, logprobs=512, detokenize=False)
    forced = rand_engine.generate([prompts[i] + c.token_ids for i, c in told], again)
    lengths = Counter(len(c.token_ids) for _, c in told)
    assert len(lengths) > 3
    for (i, completion), whole in zip(told, forced, strict=True):
        assert whole.prompt_logprobs is not None
        rows = [*whole.prompt_logprobs, whole.outputs[0].logprobs[0]]  # type: ignore[index]
        raw = np.array(
            [[row[t].logprob - row[ZERO].logprob for t in range(512)] for row in rows[len(prompts[i]) :]]  # type: ignore[index]
        )
        assert_parity(completion, raw, params[i], prompts[i], (), language_of(fields[i]))
    check_all_blocks_are_back(rand_engine)


def test_prompt_logprobs_are_those_of_the_raw_logits(fixed_engine: Engine) -> None:
    """Whatever the parameters do to the logits of the output."""
    prompt = [*b"abcde", 7, *b"ca"]
    raw = log_softmax(FIXED)
    for fields in ({}, {"logit_bias": {97: 9}, "repetition_penalty": 1.9, "temperature": 0.3, "top_k": 2}):
        output = fixed_engine.generate(prompt, SamplingParams(prompt_logprobs=2, **fields))[0]  # type: ignore[arg-type]
        assert output.prompt_logprobs is not None
        assert output.prompt_logprobs[0] is None
        for token, row in zip(prompt[1:], output.prompt_logprobs[1:], strict=True):
            assert row is not None
            assert row.keys() == {token, *b"bd"}  # these are the two most likely ones
            for id, entry in row.items():
                assert entry.logprob == pytest.approx(raw[id], abs=1e-4)
                assert entry.rank == 1 + (raw > raw[id]).sum()


# ---- distributions -----------------------------------------------------------------------------------------

DRAWS = 2000


def paths(
    params: SamplingParams, prompt: Sequence[int], language: Language | None = None
) -> dict[tuple[int, ...], float]:
    """The probability of each whole output."""
    whole: dict[tuple[int, ...], float] = {}
    open_: list[tuple[tuple[int, ...], float]] = [((), 1.0)]
    while open_:
        output, p = open_.pop()
        chances = distribution(edited(FIXED, params, prompt, output, {END}, language), params)
        for token in np.flatnonzero(chances > 1e-15):
            longer = (*output, int(token))
            ended = end_of(longer, params, {END}, language) is not None
            (whole.__setitem__ if ended else lambda *item: open_.append(item))(longer, p * chances[token])
    return whole


def chi_square(counts: Counter[tuple[int, ...]], chances: dict[tuple[int, ...], float]) -> tuple[float, int]:
    """And its degrees of freedom. What is expected less than five times is one cell; the impossible: inf."""
    if counts.keys() - chances.keys():
        return float("inf"), 1
    total = sum(counts.values())
    rare = [path for path, p in chances.items() if p * total < 5]
    cells = [(counts[path], p * total) for path, p in chances.items() if p * total >= 5]
    if rare:
        cells.append((sum(counts[path] for path in rare), total * sum(chances[path] for path in rare)))
    return sum((n - mean) ** 2 / mean for n, mean in cells), len(cells) - 1


FINITE = [b"a", b"ab", b"ac", b"b", b"cad", b"cd"]  # "e" is the end token: after "a" it may come
EDITS: list[dict[str, Any]] = [
    {"logit_bias": {97: 1.5, 98: -2.0, 120: 61.0}},
    {"allowed_token_ids": [98, 99, 101]},
    {"bad_words": ["ab", "d", "bcb"]},
    {"min_tokens": 2, "ignore_eos": False},
    {"min_tokens": 2, "stop_token_ids": [98, 100]},
    {"repetition_penalty": 1.8},
    {"frequency_penalty": 1.2},
    {"presence_penalty": -1.1},
    {"structured_outputs": {"regex": "a[bc]?|b|c(ad|d)"}},
    {"temperature": 0.7, "top_k": 3, "presence_penalty": 0.8, "logit_bias": {99: 1.0}},
    {"temperature": 1.7, "top_p": 0.8, "repetition_penalty": 0.7, "bad_words": ["ba"]},
    {"temperature": 1.3, "min_p": 0.35, "frequency_penalty": -0.5, "min_tokens": 1, "ignore_eos": False},
    {
        "temperature": 2.0, "min_p": 0.1, "top_k": 4, "top_p": 0.9, "allowed_token_ids": [97, 98, 99, 100],
        "structured_outputs": {"regex": "a[bc]?|b|c(ad|d)"}, "repetition_penalty": 1.4,
    },
]  # fmt: skip


@pytest.mark.parametrize("fields", EDITS, ids=lambda fields: ",".join(fields))
def test_how_often_each_output_comes(fields: dict[str, Any], fixed_engine: Engine) -> None:
    """2,000 outputs of up to three tokens, as often as the reference says (chi-square), history and all.

    The seeds are fixed. A right sampler exceeds the bound for one choice of seeds in a million. The same
    counts are far from what would come without the edits, so the test could fail.
    """
    prompt, base = [97, 97, 99], {"n": DRAWS, "seed": 11, "max_tokens": 3}
    language = FINITE if "structured_outputs" in fields else None
    params = SamplingParams(**{**base, "ignore_eos": language is None, **fields})
    output = fixed_engine.generate(prompt, params)[0]
    counts = Counter(tuple(c.token_ids) for c in output.outputs)
    value, degrees = chi_square(counts, paths(params, prompt, language))
    assert value <= chi_square_bound(degrees, z=4.753)
    without = SamplingParams(**base, ignore_eos=params.ignore_eos, stop_token_ids=params.stop_token_ids)
    value, degrees = chi_square(counts, paths(without, prompt))
    assert value > 2 * chi_square_bound(degrees, z=4.753)


def test_the_order_of_the_filters(fixed_engine: Engine) -> None:
    """top_p is a share of what min_p and top_k have left: two of b, d and a. Of all it would be three."""
    params = SamplingParams(n=DRAWS, seed=3, max_tokens=1, ignore_eos=True, min_p=0.3, top_k=3, top_p=0.7)
    p = np.sort(np.exp([FIXED[letter] for letter in LETTERS]))[::-1]
    p /= p.sum()
    assert p[:2].sum() < 0.7 < p[:2].sum() / p[:3].sum()
    drawn = {c.token_ids[0] for c in fixed_engine.generate([1], params)[0].outputs}
    assert drawn == set(b"bd")


def test_penalties_come_after_biases_and_in_their_order(fixed_engine: Engine) -> None:
    """A bias of -1 turns a's 0.4 negative, so repetition_penalty multiplies; frequency comes after that.

    Some (0.4 - 1) * 2 = -1.2 and not 0.4 / 2 - 1 = -0.8; then c, with 3.3 / 2 - 0.6 = 1.05 and not
    (3.3 - 0.6) / 2 = 1.35. Each time b lies between the two.
    """
    engine, base = fixed_engine, {"temperature": 0, "ignore_eos": True, "max_tokens": 1}
    bias = {97: -1.0, 98: -2.3, 100: -9, 101: -9, 99: -9}  # b: some -1.0
    params = SamplingParams(**base, logit_bias=bias, repetition_penalty=2.0)
    assert engine.generate([97], params)[0].outputs[0].token_ids == [98]
    assert engine.generate([100], params)[0].outputs[0].token_ids == [97]  # a is not in this prompt: -0.6
    params = SamplingParams(
        **{**base, "max_tokens": 2}, logit_bias={99: 3.8, 98: -0.1}, repetition_penalty=2.0,
        frequency_penalty=0.6,
    )  # fmt: skip
    assert engine.generate([1], params)[0].outputs[0].token_ids == [99, 98]  # 1.05 < 1.2 < 1.35
