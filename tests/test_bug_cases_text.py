"""Public failures of engines like this one, replayed: tokenizers and text, sampling, and where outputs end.

The first line of each test says what is right. The numbers are those of the project's list of such reports.
What concerns tokenizers alone is tested with these.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import fixtures
import numpy as np
import pytest
from helpers import check_all_blocks_are_back, exact, finish, greedy, open_engine, prompt_of, solo, tokens_of
from small_tokenizers import PIECES, sentencepiece_backend, write_folder
from tiny_vllm import RequestOutputKind
from tiny_vllm.errors import InvalidRequestError
from tiny_vllm.sampling_params import SamplingParams

V = 512  # the vocabulary of the models below


# ---- class 1: tokenizer and detokenizer --------------------------------------------------------------------


def test_b01_one_token_carries_half_a_character(tmp_path: Path) -> None:
    """Right: whole text and joined pieces are the UTF-8 of all bytes; logprobs have each token's bytes."""
    said = "é你🌶ok"
    pieces = [b"\xc3", b"\xa9\xe4\xbd\xa0", b"\xf0\x9f", b"\x8c", b"\xb6o", b"k"]
    assert b"".join(pieces) == said.encode()
    engine = open_engine(fixtures.write_text_chain(tmp_path, pieces))
    start = [fixtures.CHAIN_START]

    output = engine.generate(start, greedy(logprobs=1))[0].outputs[0]
    assert (output.text, output.finish_reason) == (said, "stop")
    assert output.logprobs is not None
    chosen = [row[token] for row, token in zip(output.logprobs, output.token_ids, strict=True)]
    assert [entry.decoded_bytes for entry in chosen[:-1]] == pieces
    # The text of one token alone has no other way to show half a character.
    assert [entry.decoded_token for entry in chosen[:-1]] == [p.decode(errors="replace") for p in pieces]

    assert list(engine.stream(start, greedy())) == ["é你", "🌶o", "k"]
    texts = [o.outputs[0].text for o in engine.start_stream(start, greedy())]
    assert texts == ["", "é你", "é你", "é你", "é你🌶o", said, said]

    deltas = engine.start_stream(start, greedy(output_kind=RequestOutputKind.DELTA))
    assert [o.outputs[0].text for o in deltas] == ["", "é你", "", "", "🌶o", "k", ""]
    for stop, before in (("é", ""), ("你", "é"), ("🌶", "é你"), ("你🌶", "é"), ("\ufffd", said)):
        assert engine.generate(start, greedy(stop=stop))[0].outputs[0].text == before
        assert "".join(engine.stream(start, greedy(stop=stop))) == before

    # Cut in the middle of a character, the text says so, once, at the end.
    assert engine.generate(start, greedy(3))[0].outputs[0].text == "é你\ufffd"
    assert list(engine.stream(start, greedy(3))) == ["é你", "\ufffd"]
    # A character that the prompt left unfinished belongs to the output.
    assert engine.generate([*start, 0xC3], greedy())[0].outputs[0].text == said


def test_b03_spaces_vanish_when_decoding_piece_by_piece(tmp_path: Path) -> None:
    """Right: whole text and joined pieces are the decode of all ids; a continued word keeps its space."""
    first = {piece: 259 + i for i, piece in enumerate(PIECES)}
    words = [first[piece] for piece in ("▁I", "▁am", "▁here")]
    fixtures.write_chain(tmp_path, words)
    backend = json.loads(sentencepiece_backend(PIECES).to_str())
    backend["model"]["ignore_merges"] = True  # a vocabulary without merges is legal then
    write_folder(tmp_path, backend)
    engine = open_engine(tmp_path)
    prompt = [fixtures.CHAIN_START]  # no token of the vocabulary, so the text begins here
    output = engine.generate(prompt, greedy())[0].outputs[0]
    assert output.token_ids[:3] == words
    assert output.text == "I am here" == engine.tokenizer.decode(words)  # type: ignore[union-attr]
    assert list(engine.stream(prompt, greedy())) == ["I", " am", " here"]
    deltas = engine.start_stream(prompt, greedy(output_kind=RequestOutputKind.DELTA))
    assert "".join(o.outputs[0].text for o in deltas) == "I am here"

    after = [fixtures.CHAIN_START, words[0]]  # the prompt ends in "I"
    assert engine.generate(after, greedy())[0].outputs[0].text == " am here"
    assert list(engine.stream(after, greedy())) == [" am", " here"]
    assert engine.generate(after, greedy(stop=" he"))[0].outputs[0].text == " am"


@pytest.mark.parametrize(
    ("template", "add_bos", "chat", "plain"),
    [
        ("{{ bos_token }}{{ messages[0].content }}", True, "<s>hi", "<s>hi"),
        ("{{ messages[0].content }}", True, "hi", "<s>hi"),
        ("{{ bos_token }}{{ messages[0].content }}", False, "<s>hi", "hi"),
    ],
    ids=["template and tokenizer", "tokenizer only", "template only"],
)
def test_b04_begin_token_once(template: str, add_bos: bool, chat: str, plain: str, tmp_path: Path) -> None:
    """Right: the ids of a chat are those of the template's text alone; a completion begins as the tokenizer
    says.
    """
    fixtures.write_fixed(tmp_path, [0.0] * 300)
    fixtures.write_byte_tokenizer(
        tmp_path, special=["<s>", "</s>"], bos="<s>", eos="</s>", add_bos=add_bos, chat_template=template
    )
    engine = open_engine(tmp_path)
    ids = {"<s>hi": [256, *b"hi"], "hi": [*b"hi"]}
    messages = [{"role": "user", "content": "hi"}]
    assert engine.chat(messages, greedy(1))[0].prompt_token_ids == ids[chat]
    assert next(engine.start_stream(messages, greedy(1))).prompt_token_ids == ids[chat]
    assert engine.generate("hi", greedy(1))[0].prompt_token_ids == ids[plain]
    assert next(engine.start_stream("hi", greedy(1))).prompt_token_ids == ids[plain]


# ---- class 2: sampling -------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("scale", [1, 100])
def test_b07_greedy_by_every_road(scale: int, dtype: str, tmp_path: Path) -> None:
    """Right: temperature 0, top_k=1 and tiny top_p always take the lowest tied id; tiny temperatures take a
    tied one.
    """
    logits = np.linspace(-3, 20, 32)
    logits[[7, 9]] = 30
    engine = open_engine(fixtures.write_fixed(tmp_path, logits * scale), dtype=dtype)
    one = {"max_tokens": 50, "ignore_eos": True}
    strict = [
        SamplingParams(temperature=0.0, **one),
        SamplingParams(temperature=0.0, top_p=0.5, top_k=9, **one),
        SamplingParams(temperature=1.0, top_k=1, **one),
        SamplingParams(top_p=1e-6, **one),
    ]
    tiny = [SamplingParams(temperature=t, seed=3, **one) for t in (1e-7, 1e-6, 1e-5, 1e-4, 1e-3)]
    together = engine.generate([[1]] * 9, strict + tiny)
    singly = [engine.generate([1], params)[0] for params in strict + tiny]
    for outputs in (together, singly):
        for output in outputs[:4]:
            assert set(tokens_of(output)) == {7}
        for output in outputs[4:]:
            assert set(tokens_of(output)) == {7, 9}
    with pytest.raises(InvalidRequestError, match="top_p"):
        SamplingParams(top_p=0)


def test_b10_penalties_count_the_right_tokens(tmp_path: Path) -> None:
    """Right: repetition covers prompt and output, once; presence and frequency the output only; whoever is
    beside such a request has nothing of it; 1.0 and 0.0 change nothing.

    Greedy: what is chosen shows to within 0.01 where a logit has gone, for the rival's is planted there.
    """
    prompt, mate_prompt = [7, 8, 7], [7, 8] * 20

    def run(name: str, planted: dict[int, float], max_tokens: int = 1, **penalties: float) -> list[int]:
        logits = np.full(16, -9.0)
        logits[list(planted)] = list(planted.values())
        engine = open_engine(fixtures.write_fixed(tmp_path / name, logits))
        alone = [engine.generate(mate_prompt, greedy(5, logprobs=16))[0]]
        params = greedy(max_tokens, ignore_eos=True, **penalties)
        together = engine.generate([prompt, mate_prompt], [params, greedy(5, logprobs=16)])
        assert exact(together[1]) == exact(alone[0])
        return tokens_of(together[0])

    assert run("r1", {7: 4, 9: 1.99}, repetition_penalty=2.0) == [7]  # 4 becomes 2, once
    assert run("r2", {7: 4, 9: 2.01}, repetition_penalty=2.0) == [9]
    assert run("r3", {8: -4, 9: -8.01}, repetition_penalty=2.0) == [8]  # -4 becomes -8, once
    assert run("r4", {8: -4, 9: -7.99}, repetition_penalty=2.0) == [9]
    # 3 is not in the prompt: 4 when it is chosen first, 2 from then on.
    assert run("r5", {3: 4, 9: 1.99}, 3, repetition_penalty=2.0) == [3, 3, 3]
    assert run("r6", {3: 4, 9: 2.01}, 3, repetition_penalty=2.0) == [3, 9, 3]

    # What is in the prompt alone costs nothing. Then 4, 3, 3, ... and 4, 3, 2, ...
    assert run("p1", {7: 4, 9: 3.99}, presence_penalty=1.0) == [7]
    assert run("p2", {7: 4, 9: 2.99}, 4, presence_penalty=1.0) == [7, 7, 7, 7]
    assert run("f1", {7: 4, 9: 3.99}, frequency_penalty=1.0) == [7]
    assert run("f2", {7: 4, 9: 2.01}, 4, frequency_penalty=1.0) == [7, 7, 9, 7]
    assert run("f3", {7: 4, 9: 1.99}, 4, frequency_penalty=1.0) == [7, 7, 7, 9]

    engine = open_engine(fixtures.write_fixed(tmp_path / "none", np.linspace(-3, 2, 16)))
    plain = SamplingParams(seed=1, max_tokens=50, logprobs=3)
    none = SamplingParams(
        seed=1,
        max_tokens=50,
        logprobs=3,
        repetition_penalty=1.0,
        presence_penalty=0.0,
        frequency_penalty=-0.0,
    )
    assert exact(engine.generate(prompt, none)[0]) == exact(engine.generate(prompt, plain)[0])


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("logit_bias", {"abc": 5}),
        ("stop", [""]),
        ("stop", ["a", ""]),
        ("stop", 7),
        ("stop", [7]),
        ("best_of", 2),
        ("use_beam_search", True),
    ],
)
def test_b12_b13_what_is_not_there_is_refused(field: str, value: Any) -> None:
    """Right: what is unknown or makes no sense is refused by name, never accepted and ignored."""
    with pytest.raises(InvalidRequestError, match=field):
        SamplingParams(**{field: value})


def test_b11_ids_and_counts_outside_the_vocabulary(rand_folder: Path) -> None:
    """Right: each is refused alone; the healthy request ends unchanged; log probabilities are finite."""
    engine = open_engine(rand_folder)
    engine.add_request("healthy", [1, 2, 3], greedy(20))
    bad: list[tuple[Any, dict[str, Any], str]] = [
        ([1], {"logprobs": V + 1}, "logprobs"),
        ([1], {"logprobs": 1_000_000}, "logprobs"),
        ([1], {"prompt_logprobs": V + 1}, "prompt_logprobs"),
        ([1], {"stop_token_ids": [V]}, "stop_token_ids"),
        ([1], {"logit_bias": {V: 5}}, "logit_bias"),
        ([1], {"logit_bias": {-1: 5}}, "logit_bias"),
        ([1], {"logit_bias": {"abc": 5}}, "logit_bias"),
        ([1], {"logit_bias": {2**40: 5}}, "logit_bias"),
        ([1], {"allowed_token_ids": [1, V]}, "allowed_token_ids"),
        ([-1], {}, "-1"),
        ([V], {}, "512"),
        ([1, 2**31], {}, str(2**31)),
        ([1, 2**70], {}, str(2**70)),
        ([1.0], {}, "1.0"),
        ([True], {}, "True"),
        (["a"], {}, "'a'"),
    ]
    for i, (prompt, fields, message) in enumerate(bad):
        engine.step()
        with pytest.raises(InvalidRequestError, match=message):
            engine.add_request(f"bad {i}", prompt, SamplingParams(**fields))
    last = finish(engine)
    assert list(last) == ["healthy"]
    assert exact(last["healthy"]) == exact(solo(rand_folder, [[1, 2, 3]], greedy(20))[0])

    output = engine.generate([1], SamplingParams(top_k=1, logprobs=5, max_tokens=4))[0].outputs[0]
    assert output.logprobs is not None
    json.dumps([[entry.logprob for entry in row.values()] for row in output.logprobs], allow_nan=False)
    # Nor do tokens that are not allowed have the log probability -infinity.
    one = engine.generate([1], greedy(2, allowed_token_ids=[9], logit_bias={9: -100}, logprobs=V))[0]
    assert tokens_of(one) == [9, 9]
    assert one.outputs[0].logprobs is not None
    assert all(np.isfinite([e.logprob for e in row.values()]).all() for row in one.outputs[0].logprobs)
    whole = engine.generate([1], greedy(1, logprobs=V))[0].outputs[0]  # all of the vocabulary is allowed
    assert whole.logprobs is not None
    assert len(whole.logprobs[0]) == V


@pytest.mark.parametrize("eos", [[5, 6], [6, 5]])
def test_b12_min_tokens_off_by_one(eos: list[int], tmp_path: Path) -> None:
    """Right: exactly min_tokens ordinary tokens, then each end token is free at the next place; the length of
    the prompt does not matter; with ignore_eos nothing is held back, least of all the last token.
    """
    logits = np.linspace(-3, 0, 64)
    logits[[5, 6, 3, 63]] = 9, 8, 4, 2
    engine = open_engine(fixtures.write_fixed(tmp_path / "ends", logits, eos_token_id=eos))
    for length in (1, 100):
        for least in (0, 1, 4):
            for banned, end in (({}, 5), ({5: -100.0}, 6)):  # the second end token on top as well
                params = greedy(20, min_tokens=least, logit_bias=banned)
                completion = engine.generate([9] * length, params)[0].outputs[0]
                assert completion.token_ids == [3] * least + [end]
                assert (completion.finish_reason, completion.stop_reason) == ("stop", None)
        further = greedy(20, min_tokens=2, stop_token_ids=[3, 63])
        completion = engine.generate([9] * length, further)[0].outputs[0]
        assert completion.token_ids == [62, 62, 5]  # 3 and 63 end the output too
        exactly = engine.generate([9] * length, greedy(4, min_tokens=4))[0].outputs[0]
        assert (exactly.token_ids, exactly.finish_reason) == ([3] * 4, "length")

    # An end id that stands for "none" must not fall on the last column.
    logits[63] = 8.5
    engine = open_engine(fixtures.write_fixed(tmp_path / "last", logits, eos_token_id=eos))
    for fields in ({"ignore_eos": True}, {"ignore_eos": True, "min_tokens": 4}):
        completion = engine.generate([9], greedy(4, **fields, logprobs=2))[0].outputs[0]  # type: ignore[arg-type]
        assert completion.token_ids == [5] * 4
        without = engine.generate([9], greedy(4, **fields, logit_bias={5: -50}))[0].outputs[0]  # type: ignore[arg-type]
        assert without.token_ids == [63] * 4
    held = engine.generate([9], greedy(4, min_tokens=2))[0].outputs[0]
    assert held.token_ids == [63, 63, 5]


# ---- class 3: stopping -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("stop", "text", "stop_reason"),
    [
        (["a bet"], "alph", "a bet"),
        ("a bet", "alph", "a bet"),
        (["ga", "a b"], "alph", "a b"),
        (["mma"], "alpha beta ga", "mma"),
        ([], "alpha beta gamma", None),
        (None, "alpha beta gamma", None),
        ([f"{i} beta" for i in range(9)] + ["ta g"], "alpha be", "ta g"),
        (["PROMPT"], "alpha beta gamma", None),
        (["Tal"], "alpha beta gamma", None),  # the prompt's last letter and the first token
        (["alpha beta gamma"], "", "alpha beta gamma"),
        (["gamma", "beta gamma", "mm"], "alpha beta ga", "mm"),
        (["ma", "a gamma", "mma"], "alpha bet", "a gamma"),
        (("lp", "alp"), "", "alp"),
        (["gammas", "alphabet"], "alpha beta gamma", None),
    ],
)
def test_b13_stop_text_that_does_not_match_token_edges(
    stop: Any, text: str, stop_reason: str | None, tmp_path: Path
) -> None:
    """Right: cut before the earliest stop text; nothing of it is streamed; the prompt's does not count."""
    engine = open_engine(fixtures.write_text_chain(tmp_path, [b"al", b"pha be", b"ta ga", b"mma"]))
    prompt = [*b"PROMPT", fixtures.CHAIN_START]
    params = greedy(stop=stop)
    output = engine.generate(prompt, params)[0].outputs[0]
    assert (output.text, output.finish_reason, output.stop_reason) == (text, "stop", stop_reason)
    assert "".join(engine.stream(prompt, params)) == text
    assert all(text.startswith(o.outputs[0].text) for o in engine.start_stream(prompt, params))
    check_all_blocks_are_back(engine)


@pytest.mark.parametrize(
    ("config_eos", "generation_config"),
    [
        (300, {"eos_token_id": [300, 301, 302]}),  # as Llama 3 does
        ([300, 301, 302], {}),  # the list is in config.json only
        ([300, 301, 302], None),  # there is no generation_config.json
        (..., {"eos_token_id": [301, 302]}),  # config.json does not have the key
        (None, {"eos_token_id": 302}),  # it is null
    ],
    ids=["both", "config only", "no generation_config", "absent", "null"],
)
def test_b15_several_end_ids(
    config_eos: Any, generation_config: dict[str, Any] | None, tmp_path: Path
) -> None:
    """Right: each listed id ends the output with "stop"; token_ids has it, the text does not."""
    letters = list(b"abc")
    fixtures.write_chain(tmp_path, [*letters, 302, *b"def"], eos=config_eos)
    fixtures.write_byte_tokenizer(tmp_path, special=[f"<|{i}|>" for i in range(256, 320)], eos="<|300|>")
    if generation_config is not None:
        fixtures.write_json(tmp_path / "generation_config.json", generation_config)
    engine = open_engine(tmp_path)
    output = engine.generate([fixtures.CHAIN_START], greedy())[0].outputs[0]
    assert output.token_ids == [*letters, 302]
    assert (output.text, output.finish_reason, output.stop_reason) == ("abc", "stop", None)
    assert "".join(engine.stream([fixtures.CHAIN_START], greedy())) == "abc"
    beyond = engine.generate([fixtures.CHAIN_START], greedy(6, ignore_eos=True))[0].outputs[0]
    assert beyond.token_ids == [*letters, 302, *b"de"]
    assert beyond.text == "abcde"


def test_b15_only_the_tokenizer_knows_the_end(tmp_path: Path) -> None:
    """Right: when neither file names an end id, the tokenizer's end token ends the output."""
    fixtures.write_chain(tmp_path, [*b"abc", 256, *b"def"], eos=...)
    fixtures.write_byte_tokenizer(tmp_path, special=["<end>"], eos="<end>")
    output = open_engine(tmp_path).generate([fixtures.CHAIN_START], greedy())[0].outputs[0]
    assert (output.text, output.finish_reason) == ("abc", "stop")


@pytest.mark.parametrize("scheduler", ["continuous", "static"])
@pytest.mark.parametrize("caching", [True, False])
def test_b17_a_prompt_as_long_as_the_model(scheduler: str, caching: bool, rand_folder: Path) -> None:
    """Right: M-1 tokens leave room for one, M are refused with both numbers, 0 is refused, None runs to M."""
    M = 64
    engine = open_engine(rand_folder, max_model_len=M, scheduler=scheduler, enable_prefix_caching=caching)
    for length in (1, M - 2, M - 1):
        for max_tokens in (1, 2, 1000, 2**63 - 1, None):
            expected = min(max_tokens or M, M - length)
            output = engine.generate(prompt_of(length), SamplingParams(max_tokens=max_tokens))[0].outputs[0]
            assert (len(output.token_ids), output.finish_reason) == (expected, "length")
    for length in (M, M + 1, 10 * M):
        with pytest.raises(InvalidRequestError, match=rf"{length} tokens.*{M}"):
            engine.generate(prompt_of(length), greedy(1))
    with pytest.raises(InvalidRequestError, match="max_tokens"):
        SamplingParams(max_tokens=0)
    assert len(tokens_of(engine.generate([1], greedy(5))[0])) == 5
    check_all_blocks_are_back(engine)
