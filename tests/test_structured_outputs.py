"""Outputs that keep to a schema, an expression, a list or a grammar, on models that would not by themselves.

RAND has a token for each byte and 256 without text, so whatever a grammar lets through is spelt byte by byte,
and nothing of it is likely.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import fixtures
import pytest
import small_tokenizers
from helpers import check_all_blocks_are_back, exact, finish, greedy, open_engine, prompt_of, solo, tokens_of
from tiny_vllm import AsyncEngine, StructuredOutputsParams, requests
from tiny_vllm.errors import InvalidRequestError
from tiny_vllm.outputs import RequestOutput
from tiny_vllm.sampling_params import SamplingParams
from tokenizers import normalizers

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 4},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 2},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
ODD = ['say "yes"', "back\\slash", "two\nlines", "tab\t", "日本", "🌶", "{x}", "/a|b/", "a", "ab"]


class Pydantic:
    def model_json_schema(self) -> dict[str, Any]:
        return PERSON


def guided(max_tokens: int = 200, **fields: Any) -> SamplingParams:
    kinds = ("json", "regex", "choice", "grammar", "json_object", "disable_any_whitespace")
    structure = {name: fields.pop(name) for name in kinds if name in fields}
    return SamplingParams(max_tokens=max_tokens, structured_outputs=structure, **fields)


def is_person(text: str) -> bool:
    person = json.loads(text)
    return (
        list(person) == ["name", "age", "tags"]
        and len(person["name"]) <= 4
        and 0 <= person["age"] <= 120
        and set(person["tags"]) <= {"a", "b"}
        and len(person["tags"]) <= 2
    )


# ---- each kind ---------------------------------------------------------------------------------------------


def test_draws_keep_to_each_kind(rand_folder: Path) -> None:
    """At temperature 1, 2 draws of each, in one batch."""
    kinds: list[tuple[dict[str, Any], Any]] = [
        ({"regex": r"[a-f]{3}-\d+\.(x|yz)"}, lambda t: re.fullmatch(r"[a-f]{3}-\d+\.(x|yz)", t)),
        ({"regex": "é+ñ"}, lambda t: re.fullmatch("é+ñ", t)),
        ({"choice": ODD}, lambda t: t in ODD),
        ({"grammar": 'root ::= "(" root ")" | [0-3]'}, lambda t: re.fullmatch(r"(\(*)[0-3](\)*)", t)),
        ({"grammar": 'start: "<" word ">"\nword: /[a-c]+/'}, lambda t: re.fullmatch("<[a-c]+>", t)),
        ({"grammar": '?start: x\n!x: "a" | "b"'}, lambda t: t in "ab"),
        ({"json": PERSON, "disable_any_whitespace": True}, is_person),
        ({"json": json.dumps(PERSON), "disable_any_whitespace": True}, is_person),
        (
            {"json": {"enum": ["x", 2, None]}, "disable_any_whitespace": True},
            lambda t: t in ('"x"', "2", "null"),
        ),
    ]
    requests = [(kind, check, seed) for kind, check in kinds for seed in range(2)]
    engine = open_engine(rand_folder)
    params = [guided(400, seed=seed, **kind) for kind, _, seed in requests]
    for output, (kind, check, _) in zip(engine.generate([[1]] * len(params), params), requests, strict=True):
        completion = output.outputs[0]
        if completion.finish_reason == "length":
            continue
        assert (completion.finish_reason, completion.stop_reason) == ("stop", None), kind
        assert check(completion.text), (kind, completion.text)
    check_all_blocks_are_back(engine)


def test_any_object(rand_folder: Path) -> None:
    """The strings of a random model have no end, so it is helped to one."""
    quote_and_braces = {ord(c): 8.0 for c in '"{}:,1'}
    params = [
        guided(300, json_object=True, disable_any_whitespace=True, seed=seed, logit_bias=quote_and_braces)
        for seed in range(6)
    ]
    engine = open_engine(rand_folder)
    finished = [o.outputs[0] for o in engine.generate([[1]] * 6, params)]
    complete = [c.text for c in finished if c.finish_reason == "stop"]
    assert len(complete) >= 3
    assert all(isinstance(json.loads(text), dict) for text in complete)


@pytest.mark.parametrize("choices", [ODD, ["yes", "no", "note", "yet"], ["only"]])
def test_the_likeliest_that_may_follow_is_taken(choices: list[str], rand_folder: Path) -> None:
    """Greedy, beside the definition: of all tokens that continue a choice, the one with the largest logit.

    The log probabilities of all tokens stay those of the raw logits.
    """
    engine = open_engine(rand_folder)
    prompt = prompt_of(9)
    plain = engine.generate(prompt, greedy(1, logprobs=512))[0].outputs[0]
    completion = engine.generate(prompt, guided(temperature=0.0, choice=choices, logprobs=512))[0].outputs[0]
    assert completion.logprobs is not None
    assert plain.logprobs is not None
    assert {t: e.rank for t, e in completion.logprobs[0].items()} == {
        t: e.rank for t, e in plain.logprobs[0].items()
    }
    wanted = [text.encode() for text in choices]
    said = b""
    for token, row in zip(completion.token_ids, completion.logprobs, strict=True):
        allowed = {w[len(said)] for w in wanted if w.startswith(said) and len(w) > len(said)}
        assert token == min(allowed, key=lambda t: row[t].rank)
        said += bytes([token])
    assert completion.text == said.decode()
    assert completion.text in choices
    assert completion.finish_reason == "stop"


# ---- where it ends -----------------------------------------------------------------------------------------


def test_it_ends_when_nothing_may_follow(rand_folder: Path) -> None:
    engine = open_engine(rand_folder)
    for fields in ({}, {"ignore_eos": True}, {"min_tokens": 9}):
        completion = engine.generate([1], guided(choice=["abc"], temperature=0.0, **fields))[0].outputs[0]
        assert (completion.text, completion.token_ids) == ("abc", [97, 98, 99])
        assert (completion.finish_reason, completion.stop_reason) == ("stop", None)
    cut = engine.generate([1], guided(2, choice=["abc"], temperature=0.0))[0].outputs[0]
    assert (cut.text, cut.finish_reason) == ("ab", "length")
    exactly = engine.generate([1], guided(3, choice=["abc"], temperature=0.0))[0].outputs[0]
    assert (exactly.text, exactly.finish_reason) == ("abc", "stop"), (
        "complete, though there was no room for more"
    )


@pytest.mark.parametrize("eos", [300, [300, 301]])
def test_the_models_end_token(eos: Any, tmp_path: Path) -> None:
    """It may come where the text may end, and nowhere else; each of several."""
    logits = [0.0] * 512
    last = 301 if isinstance(eos, list) else 300
    logits[last] = 30.0  # it would end at once
    logits[ord("a")] = 20.0
    folder = fixtures.write_fixed(tmp_path, logits, eos_token_id=eos)
    fixtures.write_byte_tokenizer(folder)
    engine = open_engine(folder)
    completion = engine.generate([1], guided(regex="aa[ab]*", temperature=0.0))[0].outputs[0]
    assert completion.token_ids == [97, 97, last]
    assert (completion.text, completion.finish_reason) == ("aa", "stop")
    ignoring = engine.generate([1], guided(5, regex="aa[ab]*", temperature=0.0, ignore_eos=True))[0]
    assert tokens_of(ignoring)[:3] == [97, 97, last]
    later = engine.generate([1], guided(regex="aa[ab]*", temperature=0.0, min_tokens=4))[0].outputs[0]
    assert (later.text, later.finish_reason) == ("aaaa", "stop")


def test_a_special_token_is_no_text(tmp_path: Path) -> None:
    """A grammar that allows "<|x|>" allows its letters, and not the token of that name."""
    logits = [0.0] * 512
    logits[256] = 30.0
    folder = fixtures.write_fixed(tmp_path, logits)
    fixtures.write_byte_tokenizer(folder, special=["<|x|>"])
    completion = open_engine(folder).generate([1], guided(choice=["<|x|>"], temperature=0.0))[0].outputs[0]
    assert completion.text == "<|x|>"
    assert completion.token_ids == list(b"<|x|>")


def test_tokenizers_that_write_a_text_in_another_way(tmp_path: Path) -> None:
    """SentencePiece puts a space in front, NFC composes letters. The text is the grammar's all the same."""
    nfc = small_tokenizers.byte_level_backend()
    nfc.normalizer = normalizers.NFC()
    number = {
        "type": "object",
        "properties": {"n": {"enum": [1, 22]}},
        "required": ["n"],
        "additionalProperties": False,
    }
    words = ["yes", "no", "perhaps", "cafe\u0301"]
    for name, backend in (("spm", small_tokenizers.sentencepiece_backend()), ("nfc", nfc)):
        tokenizer = json.loads(backend.to_str())
        tokenizer["model"]["ignore_merges"] = True
        folder = fixtures.write_fixed(
            tmp_path / name, [(7 * i % 13) / 40 for i in range(300)], eos_token_id=2
        )
        small_tokenizers.write_folder(folder, tokenizer, {"eos_token": "</s>"})
        engine = open_engine(folder)
        params = [guided(40, seed=seed, choice=words) for seed in range(6)]
        params += [guided(40, seed=seed, json=number, disable_any_whitespace=True) for seed in range(3)]
        texts = [(o.outputs[0].text, o.outputs[0].finish_reason) for o in engine.generate([[5]] * 9, params)]
        assert {reason for _, reason in texts} == {"stop"}
        assert {text for text, _ in texts[:6]} <= set(words)
        assert {text for text, _ in texts[6:]} <= {'{"n":1}', '{"n":22}'}


# ---- with others -------------------------------------------------------------------------------------------


def mixed() -> list[SamplingParams]:
    return [
        guided(60, json=PERSON, disable_any_whitespace=True, seed=1),
        SamplingParams(max_tokens=20, seed=2, logprobs=2),
        guided(30, regex="[a-z]+", seed=3, n=3, repetition_penalty=1.2, logprobs=3),
        guided(30, regex="(ab|cd)*e", seed=4, stop="cdab"),
        SamplingParams(max_tokens=25, seed=5, bad_words=["a b"], frequency_penalty=0.5),
        guided(40, choice=ODD, temperature=0.0),
        guided(20, regex="[^B]*", allowed_token_ids=[65, 66, 67], seed=6, temperature=9.0),
        guided(20, regex="[xyz]*", logit_bias={120: -100.0, 121: 3.0}, min_tokens=20, seed=7, top_k=3),
    ]


@pytest.mark.parametrize(
    "options",
    [{}, {"num_blocks": 10}, {"scheduler": "static"}, {"max_num_batched_tokens": 7, "max_num_seqs": 4}],
)
def test_a_mixed_batch_is_what_each_request_is_alone(options: dict[str, Any], rand_folder: Path) -> None:
    params = mixed()
    prompts = [prompt_of(3 + 5 * i, seed=i) for i in range(len(params))]
    expected = [exact(solo(rand_folder, [p], q)[0]) for p, q in zip(prompts, params, strict=True)]
    engine = open_engine(rand_folder, **options)
    assert [exact(o) for o in engine.generate(prompts, params)] == expected
    check_all_blocks_are_back(engine)
    stopped = engine.generate(prompts[3], params[3])[0].outputs[0]
    assert stopped.finish_reason in ("stop", "length")
    assert "cdab" not in stopped.text
    assert set(tokens_of(engine.generate(prompts[6], params[6])[0])) == {65, 67}
    assert set(tokens_of(engine.generate(prompts[7], params[7])[0])) <= {121, 122}


def test_streams_are_the_same_text(rand_folder: Path) -> None:
    engine = open_engine(rand_folder)
    params = guided(60, json=PERSON, disable_any_whitespace=True, seed=1)
    whole = engine.generate([1, 2], params)[0].outputs[0].text
    assert "".join(engine.stream([1, 2], params)) == whole

    async def in_a_loop() -> list[str]:
        async with AsyncEngine.from_engine(engine) as served:

            async def one() -> str:
                return "".join([piece async for piece in served.stream([1, 2], params)])

            return list(await asyncio.gather(one(), one()))

    assert asyncio.run(in_a_loop()) == [whole, whole]
    check_all_blocks_are_back(engine)


def test_step_by_step_with_aborts(rand_folder: Path) -> None:
    engine = open_engine(rand_folder)
    params = guided(60, regex="[a-m]{40}", seed=1)
    for name in "abc":
        engine.add_request(name, [1, 2], params)
    last: dict[str, RequestOutput] = {}
    for i in range(12):
        last.update((output.request_id, output) for output in engine.step())
        if i == 5:
            engine.abort_request("b")
    last.update(finish(engine))
    assert last["a"].outputs[0].text == last["c"].outputs[0].text
    assert re.fullmatch("[a-m]{40}", last["a"].outputs[0].text)
    check_all_blocks_are_back(engine)


def test_nothing_left_to_choose_ends_that_request_alone(rand_folder: Path) -> None:
    engine = open_engine(rand_folder)
    params = [guided(5, choice=["abc"], allowed_token_ids=[97, 99]), greedy(5)]
    ended, other = engine.generate([[1], [1]], params)
    assert ended.outputs[0].token_ids == [97]
    assert ended.outputs[0].finish_reason == "error"
    assert "no token is allowed" in str(ended.outputs[0].stop_reason)
    assert exact(other) == exact(solo(rand_folder, [[1]], greedy(5))[0])
    check_all_blocks_are_back(engine)


def test_a_handler_steps_before_the_core_hears_what_may_come(
    rand_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = open_engine(rand_folder)
    params = guided(60, regex="[a-m]{20}", seed=1)
    expected = engine.generate([1, 2], params)[0].outputs[0].text
    read = requests._Answer.guidance
    handled: list[RequestOutput] = []
    calls = 0

    def guidance(self: requests._Answer) -> list[tuple[int, int, bytes]]:
        nonlocal calls
        found = read(self)
        calls += 1
        if calls in (3, 8, 9):
            handled.extend(engine.step())
        return found

    monkeypatch.setattr(requests._Answer, "guidance", guidance)
    engine.add_request("a", [1, 2], params)
    last = finish(engine)
    assert len(handled) == 3
    assert last["a"].outputs[0].text == expected
    check_all_blocks_are_back(engine)


# ---- what is refused ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({}, "exactly one of json, regex, choice, grammar, json_object, got none"),
        ({"regex": "a", "choice": ["b"]}, "exactly one of .*, got regex, choice"),
        ({"regex": 7}, "regex must be a text, got 7"),
        ({"regex": ""}, "regex must be a text"),
        ({"regex": "\ud800"}, "regex must be a text"),
        ({"choice": ["a", "\ud800"]}, "choice must be a list of texts"),
        ({"choice": ["a"] * 10_001}, "choice has 10001 texts, and may have 10000"),
        ({"choice": "abc"}, "choice must be a list of texts"),
        ({"choice": []}, "choice must be a list of texts"),
        ({"choice": ["a", ""]}, "choice must be a list of texts"),
        ({"choice": ["a", 1]}, "choice must be a list of texts"),
        ({"grammar": b"x"}, "grammar must be a text"),
        ({"json": 3}, "json must be a dict or a text"),
        ({"json": Pydantic}, r"json must be a dict or a text, .*; give its model_json_schema\(\)"),
        ({"json_object": False}, "exactly one"),
        ({"json_object": 1}, "json_object must be a bool"),
        ({"regex": "a", "disable_any_whitespace": True}, "concern JSON"),
        ({"json_object": True, "disable_any_whitespace": 1}, "disable_any_whitespace must be True or False"),
        ({"json_object": True, "disable_any_whitespace": True, "whitespace_pattern": " "}, "not both"),
        ({"structural_tag": "x"}, "has no field 'structural_tag'"),
    ],
)
def test_wrong_fields_are_refused_by_name(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        StructuredOutputsParams(**fields)
    with pytest.raises(InvalidRequestError, match=message):
        SamplingParams(structured_outputs=fields)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"regex": "a("}, r"structured_outputs\.regex: unclosed group$"),
        ({"regex": "()"}, r"structured_outputs\.regex: nothing but the empty text matches it"),
        ({"regex": "(?=a)b"}, r"structured_outputs\.regex: look-around, .* is not supported$"),
        ({"grammar": "start: x\nx: ("}, r"structured_outputs\.grammar: line 2, column 5: Expected token"),
        ({"json": {"type": "nonsense"}}, r"structured_outputs\.json: Invalid type: nonsense"),
        ({"json": "{not json"}, r"structured_outputs\.json: "),
        ({"json": {"uniqueItems": True, "type": "array"}}, r"structured_outputs\.json: .*uniqueItems"),
        ({"json": {"x": {1, 2}}}, r"structured_outputs\.json is not JSON"),
        (
            {"grammar": "start: nobody"},
            r'structured_outputs\.grammar: line 1, column 8: unknown name: "nobody"$',
        ),
        ({"grammar": "root ::= ("}, r"structured_outputs\.grammar \(GBNF\): "),
        ({"json_object": True, "whitespace_pattern": "("}, r"structured_outputs\.json_object: "),
    ],
)
def test_a_grammar_that_is_none_harms_nobody(fields: dict[str, Any], message: str, rand_folder: Path) -> None:
    engine = open_engine(rand_folder)
    engine.add_request("good", [1, 2], greedy(6))
    engine.step()
    with pytest.raises(InvalidRequestError, match=message):
        engine.add_request("bad", [1], SamplingParams(structured_outputs=StructuredOutputsParams(**fields)))
    assert exact(finish(engine)["good"]) == exact(solo(rand_folder, [[1, 2]], greedy(6))[0])


def test_without_a_tokenizer(tmp_path: Path) -> None:
    engine = open_engine(fixtures.write_rand(tmp_path))
    with pytest.raises(InvalidRequestError, match=r"structured_outputs cannot be used: .* has no tokenizer"):
        engine.generate([1], guided(choice=["a"]))


def test_old_names_say_the_new_one() -> None:
    with pytest.raises(InvalidRequestError, match=r"guided_decoding.*structured_outputs"):
        SamplingParams(guided_decoding={"regex": "a"})


def test_params_are_values() -> None:
    params = StructuredOutputsParams(choice=("a", "b"))
    assert params == StructuredOutputsParams(choice=["a", "b"])
    assert params != StructuredOutputsParams(choice=["b", "a"])
    assert repr(params) == "StructuredOutputsParams(choice=['a', 'b'])"
    whole = SamplingParams(structured_outputs=params)
    params.choice = ["c"]
    assert whole.structured_outputs is not None
    assert whole.structured_outputs.choice == ["a", "b"]
    whole.structured_outputs.choice = []
    with pytest.raises(InvalidRequestError, match="choice"):
        whole.checked_copy()


def test_the_bundled_model(bundled_folder: Path) -> None:
    """Tokens of several letters, and spaces where the schema leaves them free."""
    engine = open_engine(bundled_folder, dtype="bfloat16", num_blocks=64, max_model_len=512)
    chats: Sequence[Any] = [
        [{"role": "user", "content": "Who was Ada Lovelace? Answer in JSON with name and age."}],
        [{"role": "user", "content": "Is the sky blue?"}],
    ]
    params = [guided(100, json=PERSON, temperature=0.0), guided(choice=["yes", "no"], temperature=0.0)]
    person, answer = engine.chat(chats, params)
    assert is_person(person.outputs[0].text)
    assert answer.outputs[0].text in ("yes", "no")
