"""The record of what the engine did: it is complete, it agrees with itself, and it changes nothing."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from pathlib import Path
from typing import Any

import fixtures
import pytest
from helpers import exact, finish, greedy, open_engine, prompt_of, run_a_day
from tiny_vllm import AsyncEngine, SamplingParams
from tiny_vllm.errors import InvalidRequestError
from tiny_vllm.events import Events

OPTIONS: list[dict[str, Any]] = [
    {},
    {"num_blocks": 30, "block_size": 4},
    {"num_blocks": 30, "scheduler": "static", "max_num_seqs": 4},
    {"num_blocks": 14, "max_num_batched_tokens": 16, "enable_prefix_caching": False},
    {"enforce_eager": True},
]


@pytest.mark.parametrize("options", OPTIONS)
def test_a_replay_arrives_where_the_engine_was(options: dict[str, Any], rand_folder: Path) -> None:
    """Block by block and token by token, from nothing but the trace as it is written to a file."""
    engine = open_engine(rand_folder, record_events=True, **options)
    outputs = run_a_day(engine)
    trace = json.loads(json.dumps(engine.events().trace()))
    sequences, size = trace["sequences"], trace["engine"]["block_size"]
    tables: dict[int, list[int]] = {}
    tokens: dict[int, list[int]] = {}
    evicted = copies = preempted = hits = 0
    waiting = set(range(len(sequences)))
    last_end = 0.0
    for number, step in enumerate(trace["steps"], 1):
        assert step["step"] == number
        assert step["times"] == sorted(step["times"])
        for s in step["released"]:
            tables.pop(s, None)
        for s in step["preempted"]:
            tables.pop(s)
            waiting.add(s)
        for s, cached in step["admitted"]:
            waiting.remove(s)
            hits += cached
        hits += sum(found for _, found in step["hits"])
        for s, first, blocks in step["tables"]:
            tables[s] = [*tables.get(s, [])[:first], *blocks]
        owned = {block for table in tables.values() for block in table}
        assert trace["engine"]["num_blocks"] - len(owned) == step["free_blocks"]
        assert 0 <= step["cached_blocks"] <= step["free_blocks"]
        assert step["running"] == len(tables)
        assert sum(count for _, _, count in step["chunks"]) == step["num_tokens"]
        for s, start, count in step["chunks"]:
            assert len(tables[s]) * size >= start + count
        for s, token, reason in step["sampled"]:
            tokens.setdefault(s, []).append(token)
            assert reason in (None, "stop", "length")
        evicted += len(step["evicted"])
        copies += len(step["copies"])
        preempted += len(step["preempted"])
        if step["chunks"]:
            last_end = max(last_end, step["times"][3])
    assert tables == {}
    metrics = engine.metrics()
    assert (evicted, copies) == (metrics["num_evictions"], metrics["num_block_copies"])
    assert preempted == metrics["num_preemptions"]
    if options == OPTIONS[1]:
        assert preempted > 0
        assert evicted > 0
    assert sum(step["num_tokens"] for step in trace["steps"]) == metrics["num_computed_tokens"]
    assert len([s for s in trace["steps"] if s["chunks"]]) == metrics["num_steps"]
    if options == {}:
        assert hits == metrics["prefix_cache_hit_tokens"] > 0

    assert Counter(s["request_id"] for s in sequences)["three"] == 3
    parent = next(i for i, s in enumerate(sequences) if s["request_id"] == "three" and s["index"] == 0)
    for i, s in enumerate(sequences):
        assert s["parent"] == (parent if s["index"] else None)
        assert s["arrival"] <= s["end"] <= last_end + 60
        assert s["num_prompt_tokens"] > 0
        assert s["tokens"] == tokens.get(i, [])
        if s["request_id"] == "gone":
            assert s["finish_reason"] == "abort"
            continue
        completion = outputs[s["request_id"]].outputs[s["index"]]
        assert s["tokens"] == completion.token_ids
        assert "".join(s["pieces"]) == completion.text
        assert s["finish_reason"] == completion.finish_reason


@pytest.mark.parametrize("options", OPTIONS[:3])
def test_watching_changes_nothing(options: dict[str, Any], rand_folder: Path) -> None:
    watched = run_a_day(open_engine(rand_folder, record_events=True, **options))
    alone = run_a_day(open_engine(rand_folder, **options))
    assert {name: exact(output) for name, output in watched.items()} == {
        name: exact(output) for name, output in alone.items()
    }


def test_in_words(rand_folder: Path) -> None:
    engine = open_engine(rand_folder, record_events=True, max_num_batched_tokens=16)
    engine.add_request("a", prompt_of(20), greedy(3))
    finish(engine)
    engine.add_request("b", prompt_of(20), greedy(1))
    finish(engine)
    lines = str(engine.events()).splitlines()
    assert lines[:2] == [
        "step 1: 16 of 16 tokens; admitted a; prefill a [0, 16)",
        "step 2: 4 of 16 tokens; prefill a [16, 20)",
    ]
    assert lines[2] == "step 3: 1 of 16 tokens; decode a"
    assert "a ended: length" in lines[3]
    told = "\n".join(lines[4:])
    assert "a gave its blocks back" in told
    assert "admitted b (16 cached); prefill b [16, 20); b ended: length" in told
    assert len(engine.events()) == len(lines)


def test_why_in_words(rand_folder: Path) -> None:
    engine = open_engine(rand_folder, record_events=True, scheduling_policy="priority", max_num_seqs=2)
    for name in "ab":
        engine.add_request(name, prompt_of(5), greedy(30), 3)
    engine.step()
    engine.add_request("urgent", prompt_of(5), greedy(2))
    engine.step()
    engine.abort_request("a")
    finish(engine)
    told = str(engine.events())
    assert "preempted b (priority 3): urgent (priority 0) took its place; admitted urgent" in told
    assert "a ended: abort" in told

    engine = open_engine(rand_folder, record_events=True, num_blocks=30, block_size=4)
    run_a_day(engine)
    assert "preempted three[2]: no block was left" in str(engine.events())


def test_what_the_tokens_spell(tmp_path: Path) -> None:
    """Without the token that ended the output; with the stop string, of which the core knows nothing."""
    pieces = [b"on", b"e t", b"wo ", b"three"]
    folder = fixtures.write_text_chain(tmp_path, pieces)
    engine = open_engine(folder, record_events=True)
    for fields in ({}, {"stop": "wo"}, {"structured_outputs": {"choice": ["one two "]}}):
        engine.generate([fixtures.CHAIN_START], greedy(9, **fields))
    spelt = [s["pieces"] for s in engine.events().trace()["sequences"]]
    # Where a grammar leaves one text only, it is spelt as the tokenizer spells it.
    assert spelt == [["on", "e t", "wo ", "three", ""], ["on", "e t", "wo "], list("one two ")]


def test_a_grammar_that_fails_is_an_error_here_too(rand_folder: Path) -> None:
    engine = open_engine(rand_folder, record_events=True)
    params = greedy(10, structured_outputs={"grammar": 'start: "a" start'})
    assert engine.generate([1], params)[0].outputs[0].finish_reason == "error"
    assert engine.events().sequences[0]["finish_reason"] == "error"


def test_files(rand_folder: Path, tmp_path: Path) -> None:
    engine = open_engine(rand_folder, record_events=True, num_blocks=30, block_size=4)
    run_a_day(engine)
    trace, perfetto = engine.events().write(tmp_path / "day.json")
    assert (trace.name, perfetto.name) == ("day.json", "day.perfetto.json")
    assert json.loads(trace.read_text())["format"] == "tiny-vllm-trace"
    events = json.loads(perfetto.read_text())["traceEvents"]
    assert {e["ph"] for e in events} == {"M", "X", "C", "i"}
    rows: dict[tuple[int, int], float] = {}
    for e in sorted((e for e in events if e["ph"] == "X"), key=lambda e: e["ts"]):
        row = (e["pid"], e["tid"])
        assert e["dur"] >= 0
        assert e["ts"] >= rows.get(row, 0.0) - 0.01, "slices of a row do not overlap"
        rows[row] = e["ts"] + e["dur"]
    decodes = [e["name"] for e in events if e["ph"] == "X" and " decode x " in e["name"]]
    assert sum(int(name.rsplit(" ", 1)[1]) for name in decodes) > 60
    assert any(e["name"].startswith("preempted ") for e in events if e["ph"] == "i")


def test_in_an_event_loop(rand_folder: Path) -> None:
    async def main() -> tuple[Events, Events]:
        engine = open_engine(rand_folder, record_events=True)
        async with AsyncEngine.from_engine(engine) as served:
            async for _ in served.generate([1, 2], greedy(5)):
                during = await served.events()
        return during, await served.events()

    during, after = asyncio.run(main())
    assert 0 < len(during) <= len(after)
    assert after.sequences[0]["finish_reason"] == "length"


def test_nobody_asked_for_them(rand_folder: Path) -> None:
    with pytest.raises(InvalidRequestError, match="record_events=True"):
        open_engine(rand_folder).events()


def test_before_anything_has_happened(rand_folder: Path) -> None:
    events = open_engine(rand_folder, record_events=True).events()
    assert (len(events), str(events), events.sequences) == (0, "", [])
    assert events.trace()["steps"] == []
    assert isinstance(events, Events)


def test_a_refused_request_leaves_no_trace(rand_folder: Path) -> None:
    engine = open_engine(rand_folder, record_events=True)
    with pytest.raises(InvalidRequestError):
        engine.add_request("bad", [1], SamplingParams(stop_token_ids=[100_000]))
    engine.generate([1], greedy(1))
    assert [s["request_id"] for s in engine.events().sequences] == ["tiny-vllm-1"]
