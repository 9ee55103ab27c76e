"""min_tokens, logit_bias, allowed_token_ids and bad_words, on models whose logits are known."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import fixtures
import numpy as np
import pytest
from helpers import check_all_blocks_are_back, exact, greedy, open_engine, prompt_of, tokens_of
from tiny_vllm.errors import InvalidRequestError
from tiny_vllm.sampling_params import SamplingParams

# The same logits at each step. 4 is the best, then 9, 2, 6.
LOGITS = [0.3, -0.7, 1.1, 0.0, 1.7, -0.2, 0.9, 0.6, -0.5, 1.4, 0.1, -0.3, 0.5, 0.75, -0.1, 0.2]


@pytest.fixture(scope="module")
def fixed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return fixtures.write_fixed(tmp_path_factory.mktemp("fixed"), LOGITS)


def first_tokens(folder: Path, count: int = 3, **fields: Any) -> list[int]:
    return tokens_of(open_engine(folder).generate([0], greedy(count, ignore_eos=True, **fields))[0])


def test_each_alone(fixed: Path) -> None:
    assert first_tokens(fixed) == [4, 4, 4]
    assert first_tokens(fixed, logit_bias={4: -0.5}) == [9, 9, 9]
    assert first_tokens(fixed, logit_bias={4: -0.25}) == [4, 4, 4]
    assert first_tokens(fixed, logit_bias={"6": 0.9, 2: -100}) == [6, 6, 6]
    assert first_tokens(fixed, logit_bias={}) == [4, 4, 4]
    assert first_tokens(fixed, allowed_token_ids=[1, 3, 8]) == [3, 3, 3]
    assert first_tokens(fixed, allowed_token_ids=range(16)) == [4, 4, 4]


def test_min_tokens_keeps_away_what_ends_the_output(fixed: Path) -> None:
    """Also for draws: never before, and at once when nothing else is likely."""
    engine = open_engine(fixed)
    for least in (0, 1, 3):
        params = SamplingParams(
            temperature=0, max_tokens=6, min_tokens=least, stop_token_ids=[4], ignore_eos=True
        )
        completion = engine.generate([0], params)[0].outputs[0]
        assert completion.token_ids == [9] * least + [4]
        assert (completion.finish_reason, completion.stop_reason) == ("stop", 4)
    params = [
        SamplingParams(seed=i, max_tokens=8, min_tokens=5, stop_token_ids=[4, 9, 2, 6], ignore_eos=True)
        for i in range(40)
    ]
    for output in engine.generate([[0]] * 40, params):
        tokens = tokens_of(output)
        assert len(tokens) >= 6 or output.outputs[0].finish_reason == "length"
        assert not {4, 9, 2, 6} & set(tokens[:5])
    check_all_blocks_are_back(engine)


def test_min_tokens_and_the_models_end_token(tmp_path: Path) -> None:
    folder = fixtures.write_fixed(tmp_path, LOGITS, eos_token_id=4)
    engine = open_engine(folder)
    for least, expected in ((0, [4]), (2, [9, 9, 4])):
        output = engine.generate([0], SamplingParams(temperature=0, min_tokens=least))[0]
        assert tokens_of(output) == expected
    ignored = SamplingParams(temperature=0, min_tokens=2, max_tokens=3, ignore_eos=True)
    assert tokens_of(engine.generate([0], ignored)[0]) == [4, 4, 4]


def test_draws_with_biases_follow_their_distribution(fixed: Path) -> None:
    """Chi-square of 4,000 draws against softmax(logits + bias) over the allowed tokens."""
    bias = {4: -1.0, 1: 2.5, 9: 0.5}
    allowed = [1, 2, 4, 6, 9, 13]
    x = np.array([LOGITS[t] + bias.get(t, 0) for t in allowed])
    expected = np.exp(x) / np.exp(x).sum()
    params = [
        SamplingParams(seed=i, max_tokens=500, ignore_eos=True, logit_bias=bias, allowed_token_ids=allowed)
        for i in range(8)
    ]
    outputs = open_engine(fixed, num_blocks=400).generate([[0]] * 8, params)
    tokens = [t for output in outputs for t in tokens_of(output)]
    counts = np.array([tokens.count(t) for t in allowed])
    assert counts.sum() == len(tokens) == 4000
    assert ((counts - 4000 * expected) ** 2 / (4000 * expected)).sum() < 20.5  # 5 degrees, p = 0.001


def test_logprobs_stay_those_of_the_raw_logits(fixed: Path) -> None:
    engine = open_engine(fixed)
    raw = np.array(LOGITS) - np.log(np.exp(LOGITS).sum())
    for fields in ({"logit_bias": {8: 50}}, {"allowed_token_ids": [8]}, {"repetition_penalty": 2.0}):
        params = greedy(4, ignore_eos=True, logprobs=3, **fields)  # type: ignore[arg-type]
        completion = engine.generate([4], params)[0].outputs[0]
        for token, row in zip(completion.token_ids, completion.logprobs or [], strict=True):
            assert row[token].logprob == pytest.approx(raw[token], abs=1e-5)
            assert {t for t, entry in row.items() if entry.rank <= 3} == {4, 9, 2}


def test_bad_words(rand_folder: Path) -> None:
    """Each letter is a token here: the last one of a word is banned after its others."""
    engine = open_engine(rand_folder)
    prompt, letters = prompt_of(9), list(range(97, 123))

    def text(**fields: Any) -> str:
        params = greedy(40, ignore_eos=True, allowed_token_ids=letters, **fields)
        return engine.generate(prompt, params)[0].outputs[0].text

    plain = text()
    assert len(plain) == 40
    word = plain[:3]
    without = text(bad_words=[word])
    assert without[:2] == plain[:2]
    assert word not in without
    assert text(bad_words=[plain[0]])[0] != plain[0]
    assert not set(text(bad_words=list("abcdefghijklm"))) & set("abcdefghijklm")
    assert text(bad_words=[plain + "a"]) == plain  # longer than the output


def test_nothing_left_to_choose_ends_that_request_alone(rand_folder: Path) -> None:
    engine = open_engine(rand_folder)
    healthy = greedy(8, ignore_eos=True)
    alone = exact(engine.generate(prompt_of(5), healthy)[0])
    stuck = SamplingParams(allowed_token_ids=[65], stop_token_ids=[65], min_tokens=2, max_tokens=4)
    outputs = engine.generate([prompt_of(5), prompt_of(7)], [healthy, stuck])
    assert exact(outputs[0]) == alone
    assert outputs[1].outputs[0].finish_reason == "error"
    assert "no token is allowed" in str(outputs[1].outputs[0].stop_reason)
    check_all_blocks_are_back(engine)


def test_mixed_batches_equal_each_request_alone(rand_folder: Path) -> None:
    """Edits of all kinds side by side, more requests than run at once, choices that need the last token."""
    kinds: list[dict[str, Any]] = [
        {},
        {"logit_bias": {65: 3, 66: -100}},
        {"allowed_token_ids": list(range(60, 90)), "logprobs": 2},
        {"bad_words": ["A", "BC", "C D"]},
        {"min_tokens": 6, "stop_token_ids": list(range(0, 512, 2))},
        {"min_tokens": 3, "bad_words": ["ab"], "repetition_penalty": 1.3, "logprobs": 70},
    ]
    params = [SamplingParams(seed=i, max_tokens=8, temperature=1.5, **kinds[i % 6]) for i in range(18)]
    prompts = [prompt_of(3 + i, seed=i) for i in range(18)]
    alone = [open_engine(rand_folder).generate(p, q)[0] for p, q in zip(prompts, params, strict=True)]
    for options in (
        {"max_num_seqs": 5},
        {"num_blocks": 12},
        {"scheduler": "static"},
        {"enforce_eager": True},
    ):
        engine = open_engine(rand_folder, **options)  # type: ignore[arg-type]
        outputs = engine.generate(prompts, params)
        assert [tokens_of(o) for o in outputs] == [tokens_of(o) for o in alone]
        check_all_blocks_are_back(engine)


def test_wrong_values_are_refused_by_name(rand_folder: Path, tmp_path: Path) -> None:
    wrong: dict[str, list[Any]] = {
        "min_tokens": [-1, 17, 1.5, True, None],
        "logit_bias": [
            "1", [1], {1: 101}, {-1: 0}, {1: float("nan")}, {"x": 1}, {1: "2"}, {True: 1},
        ],
        "allowed_token_ids": [[], [-1], "1", [1.0], 5],
        "bad_words": ["word", [""], [" "], [3], 3],
    }  # fmt: skip
    for name, values in wrong.items():
        for value in values:
            with pytest.raises(InvalidRequestError, match=name):
                SamplingParams(**{name: value})
    engine = open_engine(rand_folder)
    for fields in ({"logit_bias": {512: 1}}, {"allowed_token_ids": [512]}):
        with pytest.raises(InvalidRequestError, match=next(iter(fields))):
            engine.generate([1], SamplingParams(**fields))  # type: ignore[arg-type]
    bare = open_engine(fixtures.write_fixed(tmp_path, LOGITS))
    with pytest.raises(InvalidRequestError, match="bad_words"):
        bare.generate([1], SamplingParams(bad_words=["x"]))
    check_all_blocks_are_back(engine)
