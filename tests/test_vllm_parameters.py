"""Every field of vLLM V1's SamplingParams: its name, its default, its borders, and that it does something.

What a value at the neutral end of a field means is "nothing": the very same output, to the last bit.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fixtures
import pytest
from helpers import exact, open_engine
from small_tokenizers import write_folder
from tiny_vllm import RequestOutputKind
from tiny_vllm.errors import InvalidRequestError
from tiny_vllm.outputs import RequestOutput
from tiny_vllm.sampling_params import SamplingParams
from tiny_vllm.structured_outputs import StructuredOutputsParams
from tokenizers import AddedToken, models
from tokenizers import Tokenizer as Backend

BIG = 2**63 - 1

# By field: the default as vLLM has it after __post_init__; values that are taken; values that are refused.
FIELDS: dict[str, tuple[Any, list[Any], list[Any]]] = {
    "n": (1, [1, 2, 64], [None, "1", math.nan, 2**63]),
    "presence_penalty": (0.0, [-2, -2.0, 0, 2.0], [2.0000001, -2.0000001, "0", True, math.inf]),
    "frequency_penalty": (0.0, [-2, -2.0, 0, 2.0], [2.0000001, -2.0000001, None, True, -math.inf]),
    "repetition_penalty": (1.0, [1, 1e-6, 0.5, 2, 10.0], [-0.0, -1e-9, None, True, math.nan, 10**400]),
    "temperature": (1.0, [0, 0.0, 1e-9, 2, 100.0], [-1e-9, None, True, 10**400]),
    "top_p": (1.0, [1e-9, 0.5, 1], [-0.0, 1.0000001, "1", None, math.inf]),
    "top_k": (0, [-1, 0, 1, 10**9, BIG], [-3, 1.0, "1", None, True]),
    "min_p": (0.0, [0, 0.5, 1, 1.0], [-1e-9, 1.0000001, math.nan, None, "0"]),
    "seed": (None, [None, -1, 0, 1, BIG, -(2**63)], [True, 2**64, math.nan, [1]]),
    "stop": ([], [None, "a", ["a"], ["a", "bc"], [], ("a",), "é🌶"], [[None], ["a", 1], 0, True]),
    "stop_token_ids": ([], [None, [], [0], [5, 5], (1, 2), range(3)], [[1.0], [None], [True], {1: 2}, b"1"]),
    "include_stop_str_in_output": (False, [True, False], [None, "no", 0]),
    "bad_words": ([], [None, [], ["a"], ["a b", " c"], ("a",)], [[None], b"a", {"a": 1}, ["a", "\n"], True]),
    "ignore_eos": (False, [True, False], [None, "False", 0]),
    "max_tokens": (16, [1, 16, BIG, None], [True, "16", math.nan, 0.5]),
    "min_tokens": (0, [0, 1, 16], [17, -(2**63), 2**63, "1", math.nan]),
    "logprobs": (None, [None, -1, 0, 1, 20, 2**31 - 1], ["1", 1.0, -(2**63), 2**63]),
    "prompt_logprobs": (None, [None, -1, 0, 1, 20, 2**31 - 1], ["1", True, 2**31, math.inf]),
    "detokenize": (True, [True, False], [0, 1, "yes"]),
    "skip_special_tokens": (True, [True, False], [0, 1, None]),
    "spaces_between_special_tokens": (True, [True, False], [1, "", None]),
    "logit_bias": (
        None,
        [None, {}, {0: 100}, {5: -100.0}, {"7": 0.5}, {2**31 - 2: 1}],
        [[], {1: math.inf}, {1: True}, {1: None}, {1: 100.0001}, {2**31: 1}, {"1.5": 1}, {"-1": 1}],
    ),
    "allowed_token_ids": (
        None,
        [None, [0], [3, 3], (1, 2), range(3), {4}],
        [[True], [2**31], [None], {1: 2}, b"a", range(0)],
    ),
    "truncate_prompt_tokens": (None, [None, -1, 1, 10**9], ["1", 2**63, -(2**63), math.nan]),
    "output_kind": (RequestOutputKind.CUMULATIVE, list(RequestOutputKind), [1.0, -1, "FINAL_ONLY", [0]]),
    "structured_outputs": (
        None,
        [None, StructuredOutputsParams(regex="a"), {"choice": ["a"]}, {"json": {}}, {"json_object": True}],
        ["json", 1, [], {1: 2}, {}, True],
    ),
}  # fmt: skip

DEFAULTS = [(name, default) for name, (default, _, _) in FIELDS.items()]
ACCEPTED = [(name, value) for name, (_, accepted, _) in FIELDS.items() for value in accepted]
REFUSED = [(name, value) for name, (_, _, refused) in FIELDS.items() for value in refused]


def label(value: Any) -> str:
    return str(value)[:30]


# ---- names, defaults, ranges -------------------------------------------------------------------------------


def test_the_fields_are_vllms() -> None:
    """None is missing, and there is none that vLLM does not have."""
    arguments = inspect.signature(SamplingParams).parameters
    assert {n for n, p in arguments.items() if p.kind is not p.VAR_KEYWORD} == FIELDS.keys()
    assert vars(SamplingParams()).keys() == FIELDS.keys()
    assert all(f"        {name}: " in (SamplingParams.__doc__ or "") for name in FIELDS)


@pytest.mark.parametrize(("name", "default"), DEFAULTS, ids=label)
def test_the_default_is_vllms(name: str, default: Any) -> None:
    got = getattr(SamplingParams(), name)
    assert (type(got), got) == (type(default), default)


@pytest.mark.parametrize(("name", "value"), ACCEPTED, ids=label)
def test_what_is_taken(name: str, value: Any) -> None:
    """It is kept, compares, is shown by repr(), and survives a copy."""
    params = SamplingParams(**{name: value})
    kept = getattr(params, name)
    default = FIELDS[name][0]
    if value is None or (name == "seed" and value == -1):
        assert kept == (default if default == [] else None)
    elif name == "stop" and isinstance(value, str):
        assert kept == [value]
    elif name == "logit_bias":
        assert kept == {int(token): float(bias) for token, bias in value.items()}
    elif name == "structured_outputs":
        assert kept == (StructuredOutputsParams(**value) if isinstance(value, dict) else value)
    elif isinstance(default, list) or name == "allowed_token_ids":
        assert kept == list(value)
    else:
        assert kept == value
        assert default is None or type(kept) is type(default)
    others = {field: v for field, v in vars(params).items() if field != name}
    assert others == {field: v for field, v in vars(SamplingParams()).items() if field != name}
    assert f"{name}={kept!r}" in repr(params)
    assert params.checked_copy() == params
    assert (params == SamplingParams()) == (kept == default)


@pytest.mark.parametrize(("name", "value"), REFUSED, ids=label)
def test_what_is_refused(name: str, value: Any) -> None:
    """By name, whether it is an argument or assigned later."""
    with pytest.raises(InvalidRequestError, match=rf"\b{name}\b"):
        SamplingParams(**{name: value})
    params = SamplingParams()
    setattr(params, name, value)
    with pytest.raises(InvalidRequestError, match=rf"\b{name}\b"):
        params.checked_copy()


@pytest.mark.parametrize("name", ["best_of", "use_beam_search", "logits_processors", "Top_k"])
def test_no_other_field_is_swallowed(name: str) -> None:
    with pytest.raises(InvalidRequestError, match=f"no field '{name}'"):
        SamplingParams(**{name: 1})


def test_only_n_may_be_positional() -> None:
    assert SamplingParams(3).n == 3
    with pytest.raises(TypeError):
        SamplingParams(1, 0.5)  # type: ignore[misc]


# ---- what each does alone ----------------------------------------------------------------------------------

# b, then d, a, e, c; a special token far behind. Ids beyond 257 are not text.
V = 260
LOGITS = [-20.0 - 0.01 * i for i in range(V)]
for _letter, _logit in zip(b"abcde", (0.417, 1.331, -0.523, 0.889, 0.137), strict=True):
    LOGITS[_letter] = _logit
PROMPT = list(b"xyzzy")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., RequestOutput]:
    """Each in an engine of its own, so that requests without a seed repeat as well."""
    folders: dict[Any, Path] = {}

    def answer(eos: Any = ..., **fields: Any) -> RequestOutput:
        if eos not in folders:
            folder = fixtures.write_fixed(tmp_path_factory.mktemp("fixed"), LOGITS, eos_token_id=eos)
            fixtures.write_byte_tokenizer(folder, special=["<one>", "<two>"])
            folders[eos] = folder
        return open_engine(folders[eos], num_blocks=64).generate(PROMPT, SamplingParams(**fields))[0]

    return answer


GREEDY = {"temperature": 0, "max_tokens": 4, "logprobs": 1}
DRAWN = {"seed": 7, "max_tokens": 12, "logprobs": 1}


@pytest.mark.parametrize(
    ("base", "fields", "text"),
    [
        (GREEDY, {}, "bbbb"),
        (GREEDY, {"presence_penalty": 2.0}, "bdae"),  # each once: then b is the best again
        (GREEDY, {"presence_penalty": -2.0, "logit_bias": {98: -0.5}}, "dddd"),
        (GREEDY, {"frequency_penalty": 0.5}, "bdba"),
        (GREEDY, {"frequency_penalty": -2.0, "bad_words": ["bb"]}, "bdbd"),
        (GREEDY, {"repetition_penalty": 2.0}, "bdbb"),
        (GREEDY, {"repetition_penalty": 0.5}, "bbbb"),
        (GREEDY, {"min_tokens": 4}, "bbbb"),
        (GREEDY, {"bad_words": ["b"]}, "dddd"),
        (GREEDY, {"bad_words": ["bb", "da"]}, "bdbd"),
        (GREEDY, {"logit_bias": {100: 0.5}}, "dddd"),
        (GREEDY, {"logit_bias": {98: -100}}, "dddd"),
        (GREEDY, {"allowed_token_ids": [97, 99, 259]}, "aaaa"),
        (GREEDY, {"structured_outputs": {"choice": ["cab", "ca"]}}, "cab"),
        (GREEDY, {"structured_outputs": {"regex": "[ce]+"}}, "eeee"),
        (GREEDY, {"max_tokens": 1}, "b"),
        (GREEDY, {"stop": "bbb"}, ""),
        (GREEDY, {"stop": ["bbb"], "include_stop_str_in_output": True}, "bbb"),
        (GREEDY, {"stop": "bb", "min_tokens": 2}, "b"),
        (GREEDY, {"stop_token_ids": [98]}, ""),
        (GREEDY, {"stop_token_ids": [98], "include_stop_str_in_output": True}, "b"),
        (GREEDY, {"stop_token_ids": [98], "min_tokens": 2}, "dd"),
        (GREEDY, {"eos": 98}, ""),
        (GREEDY, {"eos": 98, "ignore_eos": True}, "bbbb"),
        (GREEDY, {"eos": 98, "min_tokens": 3}, "ddd"),
        (GREEDY, {"detokenize": False}, ""),
        (GREEDY, {"logit_bias": {256: 50}}, ""),
        (GREEDY, {"logit_bias": {256: 50}, "skip_special_tokens": False}, "<one><one><one><one>"),
        (DRAWN, {"temperature": 0}, "b" * 12),
        (DRAWN, {"temperature": 1e-3}, "b" * 12),
        (DRAWN, {"top_k": 1}, "b" * 12),
        (DRAWN, {"top_p": 0.01}, "b" * 12),
        (DRAWN, {"min_p": 1.0}, "b" * 12),
    ],
    ids=label,
)  # fmt: skip
def test_each_field_alone(
    base: dict[str, Any], fields: dict[str, Any], text: str, run: Callable[..., RequestOutput]
) -> None:
    """On logits that are b 1.331, d 0.889, a 0.417, e 0.137, c -0.523 at each step."""
    assert run(**{**base, **fields}).outputs[0].text == text


def test_draws_are_draws(run: Callable[..., RequestOutput]) -> None:
    """Without which the five last lines above say nothing. A seed repeats, another gives something else."""
    plain = run(**DRAWN).outputs[0]
    assert len(set(plain.text)) > 2
    assert run(**DRAWN).outputs[0] == plain
    assert run(**{**DRAWN, "seed": 8}).outputs[0].text != plain.text
    three = run(**DRAWN, n=3).outputs
    assert [c.index for c in three] == [0, 1, 2]
    assert three[0] == plain
    assert three[1].text == run(**{**DRAWN, "seed": 8}).outputs[0].text


def test_reports(run: Callable[..., RequestOutput]) -> None:
    """logprobs and prompt_logprobs: None gives none, 0 the token's own, k the k best ones too."""
    for k in (None, 0, 1, 3, V):
        output = run(**{**GREEDY, "logprobs": k}, prompt_logprobs=k)
        (completion,) = output.outputs
        assert completion.text == "bbbb"
        if k is None:
            assert (completion.logprobs, completion.cumulative_logprob, output.prompt_logprobs) == (None,) * 3
            continue
        assert completion.logprobs is not None
        assert output.prompt_logprobs is not None
        assert [len(row) for row in completion.logprobs] == [max(k, 1)] * 4
        assert output.prompt_logprobs[0] is None
        assert [len(row or ()) for row in output.prompt_logprobs[1:]] == [min(k + 1, V)] * 4


def test_truncate_prompt_tokens(run: Callable[..., RequestOutput]) -> None:
    """The last tokens are kept. What is cut off is not in the history of repetition_penalty either."""
    bias = dict.fromkeys(b"xyz", 25.0)  # 3.8, 3.79 and 3.78; a ninth of it in the history
    for kept, text in ((None, "b"), (5, "b"), (-1, "b"), (4, "x"), (1, "x")):
        fields = {"truncate_prompt_tokens": kept, "logit_bias": bias, "repetition_penalty": 9.0}
        output = run(**{**GREEDY, **fields, "max_tokens": 1})
        assert output.prompt_token_ids == PROMPT[-kept if kept in (4, 1) else 0 :]
        assert output.outputs[0].text == text


def test_an_output_runs_to_the_end_of_the_model(run: Callable[..., RequestOutput]) -> None:
    """max_tokens=None: as many as max_model_len leaves."""
    completion = run(**{**GREEDY, "max_tokens": None}).outputs[0]
    assert (len(completion.token_ids), completion.finish_reason) == (1024 - len(PROMPT), "length")


NEUTRAL: list[dict[str, Any]] = [
    {"n": 1}, {"presence_penalty": 0}, {"presence_penalty": -0.0},
    {"frequency_penalty": 0}, {"frequency_penalty": -0.0},
    {"repetition_penalty": 1}, {"temperature": 1}, {"top_p": 1}, {"top_k": -1}, {"top_k": 0}, {"top_k": V},
    {"top_k": BIG}, {"min_p": 0}, {"min_p": -0.0}, {"stop": None}, {"stop": []}, {"stop": ["never said"]},
    {"stop_token_ids": []}, {"stop_token_ids": [255]}, {"include_stop_str_in_output": True},
    {"bad_words": []}, {"bad_words": ["xyz"]}, {"ignore_eos": True}, {"max_tokens": 12}, {"min_tokens": 0},
    {"min_tokens": 12}, {"skip_special_tokens": False}, {"spaces_between_special_tokens": False},
    {"logit_bias": {}}, {"logit_bias": {98: 0.0}}, {"logit_bias": {255: -100.0}},
    {"allowed_token_ids": range(V)}, {"truncate_prompt_tokens": -1}, {"truncate_prompt_tokens": 5},
    {"truncate_prompt_tokens": 1024}, *({"output_kind": kind} for kind in RequestOutputKind),
    {"structured_outputs": None}, {"structured_outputs": {"regex": r"(?s:.*)"}},
]  # fmt: skip


@pytest.mark.parametrize("fields", NEUTRAL, ids=label)
@pytest.mark.parametrize("seed", [7, None])
def test_neutral_values_change_nothing(
    seed: int | None, fields: dict[str, Any], run: Callable[..., RequestOutput]
) -> None:
    base = {**DRAWN, "seed": seed, "prompt_logprobs": 1}
    assert exact(run(**{**base, **fields})) == exact(run(**base))


def test_spaces_between_special_tokens(tmp_path: Path) -> None:
    """For a tokenizer that joins its tokens by spaces: those between two special tokens go, no other."""
    vocabulary = {chr(0x4E00 + i): i for i in range(300)}
    backend = Backend(models.BPE(vocab=vocabulary, merges=[]))
    special = [AddedToken(text, special=True, normalized=False) for text in ("<one>", "<two>")]
    backend.add_special_tokens(special)
    write_folder(tmp_path, backend)
    engine = open_engine(fixtures.write_chain(tmp_path, [0, 300, 301, 1]))
    for skip, spaces, text in (
        (True, True, "一 丁"),
        (True, False, "一 丁"),
        (False, True, "一 <one> <two> 丁"),
        (False, False, "一 <one><two> 丁"),
    ):
        params = SamplingParams(
            temperature=0, max_tokens=4, skip_special_tokens=skip, spaces_between_special_tokens=spaces
        )
        assert engine.generate([fixtures.CHAIN_START], params)[0].outputs[0].text == text
        assert "".join(engine.stream([fixtures.CHAIN_START], params)) == text
