"""Traces: the check of the format, the command, and the page in a browser, against a replay in Python."""

from __future__ import annotations

import contextlib
import copy
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import trace_samples as samples
from browser import Tab, start_chromium
from helpers import open_engine, run_a_day
from tiny_vllm import SamplingParams
from tiny_vllm.cli.trace import trace_app
from tiny_vllm.errors import Error
from tiny_vllm.trace import TraceError, check_trace, make_page, read_trace
from trace_replay import replay, texts
from typer.testing import CliRunner

HOSTILE = (
    "</script><script>window.hacked = 1</script><img src=x onerror='window.hacked = 2'>"
    "<!-- <script> \u2028\u2029 \ud800 ]]> {{style}} &lt;b&gt; </title>"
)


@pytest.fixture(scope="module")
def recordings() -> dict[str, samples.Recording]:
    return {
        "continuous": samples.museum("continuous"),
        "ahead": samples.museum("continuous", run_ahead=True),
        "static": samples.museum("static"),
        "static ahead": samples.museum("static", run_ahead=True),
    }


@pytest.fixture(scope="module")
def pair() -> list[samples.Trace]:
    return [samples.same_requests("static").trace, samples.same_requests("continuous").trace]


# --- The samples, and what a replay makes of them ---


def test_the_sample_has_all_that_can_happen(recordings: dict[str, samples.Recording]) -> None:
    for name in ("continuous", "ahead"):
        trace = recordings[name].trace
        for kind in ("released", "preempted", "evicted", "copies"):
            assert any(step[kind] for step in trace["steps"]), kind
        assert any(found for step in trace["steps"] for _, found in step["admitted"])
        assert {"stop", "length", "abort"} <= {s["finish_reason"] for s in trace["sequences"]}
        assert any(s["parent"] is not None for s in trace["sequences"])
    answers = [{s["request_id"]: s["tokens"] for s in recordings[n].trace["sequences"] if s["index"] == 0
                and s["finish_reason"] != "abort"} for n in ("continuous", "static")]  # fmt: skip
    assert {k: v for k, v in answers[0].items() if k in answers[1]} == {
        k: v for k, v in answers[1].items() if k in answers[0]
    }


def test_replay_in_python_is_what_the_scheduler_says(recordings: dict[str, samples.Recording]) -> None:
    for recording in recordings.values():
        for position, truth in enumerate(recording.truth, 1):
            state = replay(recording.trace, position)
            assert {s: t for s, t in state.tables.items() if s in truth.tables} == truth.tables
            assert {s: n for s, n in truth.generated.items() if n} == {
                s: n for s, n in state.generated.items() if s in truth.generated
            }


# --- The format ---


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("format", "other", "is not a trace of tiny-vllm"),
        ("version", 2, "version is 2; this tiny-vllm reads version 1"),
        ("version", True, "version is True; this tiny-vllm reads version 1"),
        ("engine.num_blocks", 5_000_000, "engine.num_blocks must be an integer from 1 to 4000000"),
        ("steps.3.hits", [[0, "x"]], "steps[3].hits[0][1] must be an integer"),
        ("engine", [], "engine must be an object; it is []"),
        ("engine.scheduler", "lifo", 'engine.scheduler must be "continuous" or "static"; it is \'lifo\''),
        ("engine.block_size", 0, "engine.block_size must be an integer from 1 to"),
        ("engine.num_blocks", True, "engine.num_blocks must be an integer"),
        ("engine.enable_prefix_caching", 1, "engine.enable_prefix_caching must be true or false"),
        ("sequences.2.prompt", 5, "sequences[2].prompt must be a string; it is 5"),
        ("sequences.2.parent", 99, "sequences[2].parent must be one of the 15 sequences"),
        ("sequences.0.pieces", ["a"], "sequences[0].pieces must be as long as tokens"),
        ("sequences.0.finish_reason", "bored", "sequences[0].finish_reason must be null or one of stop"),
        ("sequences.0.arrival", -1.0, "sequences[0].arrival must be a number of seconds"),
        ("steps", [], "steps is empty; there is nothing to show"),
        ("steps.3.times", [1, 2, 3], "steps[3].times must be four times in order"),
        ("steps.3.times", [9, 9, 9, 9], "steps[4].times[0] must be 9 or more"),
        ("steps.3.chunks", [[0, 1]], "steps[3].chunks[0] must be a list of 3; it is [0, 1]"),
        ("steps.3.chunks", [[0, 1, 0]], "steps[3].chunks[0][2] must be an integer from 1"),
        ("steps.3.tables", [[0, 0, [1, 32]]], "steps[3].tables[0][2][1] must be one of the 32 blocks"),
        ("steps.3.evicted", ["7"], "steps[3].evicted[0] must be one of the 32 blocks, counted from 0; it is"),
        ("steps.3.released", [15], "steps[3].released[0] must be one of the 15 sequences"),
        ("steps.3.sampled", [[0, 1, None]] * 99, "steps[3].sampled[10] is token 11 of sequence 0"),
        ("steps.3.free_blocks", 33, "steps[3].free_blocks must be an integer from 0 to 32"),
    ],
)  # fmt: skip
def test_what_is_not_in_the_format_is_named(
    recordings: dict[str, samples.Recording], path: str, value: object, message: str
) -> None:
    trace = copy.deepcopy(recordings["continuous"].trace)
    if path == "steps.3.sampled":  # sequence 0 has 10 tokens, and now none before this step
        for step in trace["steps"][:3]:
            step["sampled"] = []
    *way, last = [int(part) if part.isdigit() else part for part in path.split(".")]
    holder: Any = trace
    for part in way:
        holder = holder[part]
    holder[last] = value
    with pytest.raises(TraceError, match=re.escape(message)) as caught:
        check_trace(trace, "my.json")
    assert str(caught.value).startswith("my.json")
    assert isinstance(caught.value, Error)


def test_every_field_is_needed(recordings: dict[str, samples.Recording]) -> None:
    trace = recordings["continuous"].trace
    places = {"engine": trace["engine"], "sequences[0]": trace["sequences"][0], "steps[0]": trace["steps"][0]}
    for place, holder in places.items():
        for key in list(holder):
            value = holder.pop(key)
            with pytest.raises(TraceError, match=re.escape(f"trace: {place}.{key} is missing")):
                check_trace(trace)
            holder[key] = value
    check_trace(trace)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "is not JSON"),
        (b"\xff\xfe", "is not JSON"),
        (b"[" * 100_000, "is not JSON"),
        (b'{"format": NaN}', "is not JSON: NaN is no JSON number"),
        (b'{"format": 1e999}', "is not JSON: 1e999 is no JSON number"),
        (b'{"traceEvents": []}', "is not a trace of tiny-vllm"),
        (b"[]", "is not a trace of tiny-vllm"),
    ],
)
def test_other_files_are_refused(tmp_path: Path, data: bytes, message: str) -> None:
    file = tmp_path / "other.json"
    file.write_bytes(data)
    with pytest.raises(TraceError, match=message):
        read_trace(file)


# --- The command ---


def test_command(
    tmp_path: Path, recordings: dict[str, samples.Recording], monkeypatch: pytest.MonkeyPatch
) -> None:
    trace = tmp_path / "run.json"
    trace.write_text(json.dumps(recordings["continuous"].trace))
    run = CliRunner().invoke
    result = run(trace_app, ["view", str(trace)])
    assert (result.exit_code, result.output) == (0, f"wrote {tmp_path / 'run.html'}\n")
    assert (tmp_path / "run.html").read_text(encoding="utf-8").startswith("<!doctype html>")

    both = tmp_path / "both.html"
    result = run(trace_app, ["view", str(trace), str(trace), "--output", str(both)])
    assert (result.exit_code, result.output) == (0, f"wrote {both}\n")
    assert '"names":["run.json","run.json"]' in both.read_text(encoding="utf-8")

    for opened, note in ((True, ""), (False, f"no browser could be opened; open {both} yourself\n")):
        monkeypatch.setattr("webbrowser.open", lambda _, answer=opened: answer)
        result = run(trace_app, ["view", str(trace), "-o", str(both), "--open"])
        assert (result.exit_code, result.output) == (0, f"wrote {both}\n{note}")

    with pytest.raises(TraceError, match=r"nothing\.json cannot be read: No such file"):
        run(trace_app, ["view", str(tmp_path / "nothing.json")], catch_exceptions=False)
    with pytest.raises(TraceError, match=r"page\.html cannot be written"):
        run(trace_app, ["view", str(trace), "-o", str(tmp_path / "no/page.html")], catch_exceptions=False)
    link = tmp_path / "link.json"
    link.symlink_to(trace)
    for same in (trace, tmp_path / "." / "run.json", link, tmp_path / "x" / ".." / "run.json"):
        (tmp_path / "x").mkdir(exist_ok=True)
        result = run(trace_app, ["view", str(trace), "-o", str(same)])
        assert result.exit_code == 2
        assert "is the trace" in result.output
    assert run(trace_app, ["view", "."]).exit_code == 2
    assert json.loads(trace.read_text()) == recordings["continuous"].trace


def test_page_needs_nothing_else(recordings: dict[str, samples.Recording]) -> None:
    page = make_page([recordings["continuous"].trace])
    assert "{{" not in re.sub(r"<script.*?</script>", "", page, flags=re.S)
    assert not re.search(r"https?://", page)
    assert "default-src 'none'" in page
    assert re.search(r"<noscript>.*JavaScript", page)
    with pytest.raises(ValueError, match="one trace or two"):
        make_page([])


# --- The page ---


@pytest.fixture(scope="module")
def tab() -> Iterator[Tab]:
    chromium = start_chromium()
    yield Tab(chromium)
    chromium.quit()


@pytest.fixture(scope="module")
def pages(
    tmp_path_factory: pytest.TempPathFactory,
    recordings: dict[str, samples.Recording],
    pair: list[samples.Trace],
) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("pages")
    made = {name: make_page([recording.trace]) for name, recording in recordings.items()}
    made["pair"] = make_page(pair)
    files = {}
    for name, page in made.items():
        files[name] = folder / f"{name}.html"
        files[name].write_text(page, encoding="utf-8")
    return files


STATE = """(() => {
  const r = page.runs[args[0]].replay;
  const part = (card, name) => card.querySelector(name).textContent.replace("∅", "");
  const cards = [...page.runs[args[0]].body.querySelectorAll(".text")];
  return {
    position: r.position, owners: r.owners.map((o) => [...o].sort((a, b) => a - b)), seats: [...r.seats],
    filled: [...r.filled], cached: [...r.cached], computed: [...r.computed],
    texts: r.sequences.map((_, s) => r.textOf(s)),
    shown: Object.fromEntries(
      cards.map((card) => [card.dataset.sequence, part(card, ".answer") + part(card, ".newest")])),
  };
})()"""


@pytest.mark.parametrize("name", ["continuous", "ahead", "static", "static ahead"])
def test_slider_shows_the_state_of_each_step(
    tab: Tab, pages: dict[str, Path], recordings: dict[str, samples.Recording], name: str
) -> None:
    """Every block's owners, filling and state, every seat, every text; forwards, and back by keyframes."""
    recording = recordings[name]
    trace, block_size = recording.trace, recording.trace["engine"]["block_size"]
    num_blocks, last = trace["engine"]["num_blocks"], len(trace["steps"])
    tab.open(pages[name])
    for position in [*range(0, last + 1, 3), last, 40, 39, 17, 2, 0]:
        tab.js(
            "(slider.value = args[0], slider.dispatchEvent(new Event('input')))",
            position,
        )
        tab.wait_for(f"page.runs[0].replay.position === {position}")
        seen, expected = tab.js(STATE, 0), replay(trace, position)
        assert seen["owners"] == expected.owners(num_blocks)
        assert [s for s in seen["seats"] if s >= 0] == [s for s in expected.seats if s >= 0]
        assert seen["texts"] == texts(trace, position)
        assert [seen["shown"][str(i)] for i in range(len(seen["texts"]))] == seen["texts"]
        if position == 0:
            continue
        truth, record = recording.truth[position - 1], trace["steps"][position - 1]
        assert sum(seen["cached"]) == record["cached_blocks"]
        for sequence, computed in truth.computed.items():
            assert seen["computed"][sequence] == computed
            for at, block in enumerate(truth.tables[sequence]):
                ends = [seen["computed"][s] - at * block_size for s in expected.owners(num_blocks)[block]]
                most = min(block_size, max(0, *ends))
                # It is full as well when it was found, and its new owner has not gone on from it yet.
                assert seen["filled"][block] in (most, block_size)
        owned = {b for b in range(num_blocks) if seen["owners"][b]}
        assert len(owned) == num_blocks - record["free_blocks"]
        assert {b for b in range(num_blocks) if seen["cached"][b]} <= truth.findable - owned
    assert tab.complaints() == []


STATES = """(() => {
  const replay = new Replay(args[0], "random");
  return replay.records.map((_, i) => {
    replay.seek(i + 1);
    const cached = replay.cached.reduce((a, b) => a + b);
    return [[...replay.tables], [...replay.computed], [...replay.filled], cached];
  });
})()"""


def test_random_runs(tab: Tab, pages: dict[str, Path]) -> None:
    """Tables, computed tokens and the filling of each block are the scheduler's own, in anything it does."""
    tab.open(pages["continuous"])
    seen = 0
    for seed in range(40):
        with contextlib.suppress(samples.UnseenEviction):
            recording = samples.random_run(seed)
            check_trace(recording.trace)
            states = tab.js(STATES, recording.trace)
            for state, truth, step in zip(states, recording.truth, recording.trace["steps"], strict=True):
                check_state(state, truth, step, recording.trace["engine"]["block_size"])
            seen += 1
    assert seen > 20


@pytest.mark.parametrize("scheduler", ["continuous", "static"])
def test_the_engines_own_trace(tab: Tab, pages: dict[str, Path], rand_folder: Path, scheduler: str) -> None:
    """As --trace writes it, of a run with preemptions, evictions, forks and an abort."""
    engine = open_engine(rand_folder, record_events=True, num_blocks=30, block_size=4, scheduler=scheduler)
    run_a_day(engine)
    assert scheduler == "static" or engine.metrics()["num_preemptions"] > 0
    assert engine.metrics()["num_evictions"] > 0
    trace = json.loads(json.dumps(engine.events().trace()))
    check_trace(trace)
    tab.open(pages["continuous"])
    for i, (tables, _, _, cached) in enumerate(tab.js(STATES, trace)):
        assert dict(tables) == replay(trace, i + 1).tables
        assert cached == trace["steps"][i]["cached_blocks"]


def check_state(state: list[Any], truth: samples.Truth, step: dict[str, Any], block_size: int) -> None:
    tables, computed, filled, cached = dict(state[0]), state[1], state[2], state[3]
    assert cached == step["cached_blocks"]
    ended = set(tables) - set(
        truth.tables
    )  # by this step's tokens: the page shows them until they are released
    assert {s: t for s, t in tables.items() if s not in ended} == truth.tables
    expected: dict[int, int] = {}
    for sequence, table in truth.tables.items():
        assert computed[sequence] == truth.computed[sequence]
        for at, block in enumerate(table):
            tokens = min(block_size, max(0, computed[sequence] - at * block_size))
            expected[block] = max(expected.get(block, 0), tokens)
    for block in {block for sequence in ended for block in tables[sequence]}:
        expected.pop(block, None)
    assert {block: filled[block] for block in expected} == expected


def test_step_in_words(tab: Tab, pages: dict[str, Path]) -> None:
    """Admission, chunks, blocks, copies, preemption, ends: each is said in its step."""
    tab.open(pages["ahead"])
    words = "page.runs[0].find('.events-panel').textContent"
    said = tab.js(f"page.stops.map((_, p) => (page.show(p), {words}))")
    whole = " ".join(re.sub(r"\s+", " ", text) for text in said)
    for part in (
        "Before the first step",
        "Step 1: 32 of 32 tokens",
        r"admitted r1 \(24 cached\)",
        r"r1 found 8 in the cache",
        r"prefill r0 \[0, 26\)",
        r"decode r0, r7, r1, r2, r2\[1\], r2\[2\]",
        r"copied block \d+ to \d+, to write there",
        r"\d new blocks",
        r"evicted blocks? \d+",
        r"preempted r9\[1\]: no block was left",
        "computed in vain, had ended: r7",
        "r7 ended: stop",
        "r6 ended: abort ?r6 gave its blocks back",
    ):
        assert re.search(part, whole), part
    assert "released" not in whole
    assert "finished" not in whole


def words_of(tab: Tab, position: int) -> list[str]:
    """The sentences of one step, on a page with one trace."""
    return tab.js(
        "(page.show(args[0]), [...page.runs[0].find('.events').children].map((e) => e.textContent))", position
    )


@pytest.fixture(scope="module")
def by_priority(rand_folder: Path) -> samples.Trace:
    """Two seats. In step 6 one is taken away; later one request is aborted in its seat, one in the queue."""
    engine = open_engine(
        rand_folder, record_events=True, scheduling_policy="priority", max_num_seqs=2, num_blocks=64
    )
    long = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
    engine.add_request("slow0", [5, 6, 7], long, priority=5)
    engine.add_request("slow1", [6, 7, 8], long, priority=5)
    for _ in range(5):
        engine.step()
    short = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    engine.add_request("urgent", [7, 8, 9], short, priority=0)
    engine.add_request("late", [8, 9, 10], long, priority=7)
    for _ in range(3):
        engine.step()
    engine.abort_request("slow0")
    engine.abort_request("late")
    while engine.has_unfinished_requests():
        engine.step()
    return json.loads(json.dumps(engine.events().trace()))  # type: ignore[no-any-return]


def test_a_preemption_says_why(tab: Tab, tmp_path: Path, by_priority: samples.Trace) -> None:
    file = tmp_path / "page.html"
    file.write_text(make_page([by_priority]), encoding="utf-8")
    tab.open(file)
    position = next(i for i, step in enumerate(by_priority["steps"], 1) if step["preempted"])
    assert "preempted slow1 (priority 5): urgent (priority 0) took its place" in words_of(tab, position)
    assert "no block was left" not in " ".join(words_of(tab, position))
    assert "smaller priority numbers go first" in tab.js("about.textContent")
    notes = tab.js("[...document.querySelectorAll('.text .note')].map((n) => n.textContent.split(',')[0])")
    assert notes == ["priority 5", "priority 5", "priority 0", "priority 7"]
    assert "priority 0" in tab.js(
        "page.runs[0].describeSeat({ i: args[0], seat: 1, sequence: 2, kind: DECODE })", 6
    )

    # It did not get the place in the same step.
    other = copy.deepcopy(by_priority)
    step, following = other["steps"][position - 1 : position + 1]
    for key in ("admitted", "tables", "chunks", "sampled"):
        moved = [entry for entry in step[key] if entry[0] == 2]
        step[key] = [entry for entry in step[key] if entry[0] != 2]
        if key == "admitted":
            following[key] = moved + following[key]
    file.write_text(make_page([other]), encoding="utf-8")
    tab.open(file)
    assert "preempted slow1 (priority 5): urgent (priority 0) goes first" in words_of(tab, position)

    # With fcfs, whatever the numbers are, only blocks are a reason; and nothing is said of priorities.
    other = copy.deepcopy(by_priority)
    other["engine"]["scheduling_policy"] = "fcfs"
    file.write_text(make_page([other]), encoding="utf-8")
    tab.open(file)
    assert "preempted slow1: no block was left" in words_of(tab, position)
    assert "priority" not in tab.js("about.textContent + page.runs[0].find('.texts').textContent")
    assert "fcfs" not in tab.js("document.body.innerText")


def test_an_abort_is_said(tab: Tab, tmp_path: Path, by_priority: samples.Trace) -> None:
    """Of a sequence that had a seat, and of one that never had."""
    file = tmp_path / "page.html"
    file.write_text(make_page([by_priority]), encoding="utf-8")
    tab.open(file)
    position = next(i for i, step in enumerate(by_priority["steps"], 1) if 0 in step["released"])
    said = words_of(tab, position)
    assert said[:3] == ["slow0 ended: abort", "late ended: abort", "slow0 gave its blocks back"]
    everything = [sentence for p in range(len(by_priority["steps"]) + 1) for sentence in words_of(tab, p)]
    ends = [sentence for sentence in everything if " ended: " in sentence]
    assert sorted(ends) == [
        "late ended: abort", "slow0 ended: abort", "slow1 ended: length", "urgent ended: length"
    ]  # fmt: skip
    states = tab.js("[...document.querySelectorAll('.text .state')].map((n) => n.textContent)")
    assert states == ["ended: abort", "ended: length", "ended: length", "ended: abort"]


def test_play_and_pause(tab: Tab, pages: dict[str, Path]) -> None:
    tab.open(pages["continuous"])
    tab.js("(speed.value = '60', play.click())")
    assert tab.js("play.textContent") == "Pause"
    tab.wait_for("page.stop > 3")
    tab.js("play.click()")
    stop = tab.js("page.stop")
    assert tab.js("play.textContent") == "Play"
    tab.chromium.execute_async_script("setTimeout(arguments[0], 120)")
    assert tab.js("page.stop") == stop
    tab.keys("SPACE")  # on the button that has just been clicked, or on the page: it plays
    tab.wait_for("page.stop === page.stops.length - 1 && !page.playing")
    assert re.fullmatch(r"end, \d+ steps", tab.js("moment.textContent"))


def test_keyboard_and_address(tab: Tab, pages: dict[str, Path]) -> None:
    tab.open(pages["continuous"], hash="#step=12")
    steps = tab.js("page.runs[0].replay.numSteps")
    assert tab.js("[page.stop, slider.value, moment.textContent]") == [12, "12", f"step 12 of {steps}"]
    tab.keys("ARROW_RIGHT", "ARROW_RIGHT", "ARROW_LEFT")
    assert tab.js("page.stop") == 13
    tab.wait_for("location.hash === '#step=13'")
    tab.js("slider.focus()")  # which would move by itself as well
    tab.keys("ARROW_RIGHT")
    assert tab.js("page.stop") == 14
    tab.keys("END")
    assert tab.js("page.stop === page.stops.length - 1")
    tab.keys("HOME")
    assert tab.js("page.stop") == 0
    tab.js("location.hash = '#step=7'")
    tab.wait_for("page.stop === 7")
    tab.js("document.querySelector('.pages').focus()")  # arrows now go from block to block
    tab.keys("ARROW_RIGHT", "ARROW_RIGHT", "ARROW_DOWN", "ARROW_LEFT")
    assert tab.js("page.stop") == 7
    assert tab.js("page.runs[0].focus === page.runs[0].gridLayout.columns")
    assert re.match(r"Block \d+: ", tab.js("tip.hidden ? '' : tip.textContent"))
    for bad in ("#step=999999", "#step=-1", "#step=x", "#time=1e999", "#<b>"):
        tab.open(pages["continuous"], hash=bad)
        assert tab.complaints() == []


def test_one_request_everywhere(tab: Tab, pages: dict[str, Path]) -> None:
    """A chosen card is marked in the texts, in the words and in the pictures, in both runs."""
    tab.open(pages["pair"], hash="#step=3")
    before = tab.js("page.runs.map((run) => [run.gantt.toDataURL(), run.grid.toDataURL()])")
    tab.js("page.runs[0].body.querySelector('.text[data-sequence=\"1\"] button').click()")
    tab.wait_for("document.querySelectorAll('.text.chosen').length === 2")
    after = tab.js("page.runs.map((run) => [run.gantt.toDataURL(), run.grid.toDataURL()])")
    assert all(a != b for x, y in zip(before, after, strict=True) for a, b in zip(x, y, strict=True))
    assert tab.js("[...document.querySelectorAll('.name.lit')].every((n) => n.textContent === 'r1')")
    tab.keys("ESCAPE")
    tab.wait_for("document.querySelectorAll('.text.chosen').length === 0")
    tab.js("page.applyLight(true)")
    tab.wait_for("!page.lightFrame")
    assert tab.js("page.runs.map((run) => [run.gantt.toDataURL(), run.grid.toDataURL()])") == before


def test_tip_of_a_shared_block(tab: Tab, pages: dict[str, Path]) -> None:
    tab.open(pages["continuous"], hash="#step=5")
    block = tab.js("page.runs[0].replay.owners.findIndex((owners) => owners.length > 1)")
    tip = tab.js("page.runs[0].describeBlock(args[0])", block)
    assert re.match(
        r"Block \d+: 4 of 4 tokens computed, reference count \d, shared by \d\nr0: positions", tip
    )
    assert "You are a helpful guide" in tip


def test_side_by_side(tab: Tab, pages: dict[str, Path], pair: list[samples.Trace]) -> None:
    """One slider for both, by step and by time; the static run has more empty seats, and says so."""
    tab.open(pages["pair"])
    assert tab.js("page.runs.map((run) => run.title)") == ["static batching", "continuous batching"]
    tab.js("page.show(120)")
    assert tab.js("page.runs.map((run) => run.replay.position)") == [120, min(120, len(pair[1]["steps"]))]
    tab.js("document.querySelector('input[value=time]').click()")
    assert tab.js("page.byTime")
    for stop in range(0, tab.js("page.stops.length"), 20):
        time = tab.js("(page.show(args[0]), page.stops[args[0]])", stop)
        for i, trace in enumerate(pair):
            begun = sum(step["times"][0] <= time for step in trace["steps"])
            assert tab.js("page.runs[args[0]].replay.position", i) == begun
    titles = tab.js("page.runs.map((run) => run.chart.querySelector('h3').textContent)")
    empty, numbers = [], []
    for i, (title, trace) in enumerate(zip(titles, pair, strict=True)):
        found = re.fullmatch(
            r"\w+ batching: (([\d.]+) %) of seat-steps were empty, (\d+) steps, .*\sm?s", title
        )
        assert found
        steps = [step for step in trace["steps"] if step["chunks"]]
        assert int(found[3]) == len(steps)
        filled = sum(step["running"] for step in steps)
        assert float(found[2]) == pytest.approx(100 * (1 - filled / (8 * len(steps))), abs=0.51)
        empty.append(float(found[2]))
        numbers.append(len(steps))
        # It is the one measure of emptiness, and the same wherever it stands.
        words = tab.js("page.runs[args[0]].find('.summary').textContent", i)
        assert f"of seat-steps were emptyof 8 seats, in {len(steps)} steps{found[1]}" in words
    assert empty[0] > empty[1] + 20
    assert "seat-time" not in tab.js("document.body.textContent.replace(/<script.*/s, '')")
    assert tab.js("result.textContent") == (
        f"continuous batching needed {numbers[1]} steps in place of {numbers[0]}: "
        "a seat that is free is given to the next request at once."
    )
    assert tab.complaints() == []


def test_no_comparison_of_different_requests(tab: Tab, tmp_path: Path, pair: list[samples.Trace]) -> None:
    other = copy.deepcopy(pair[1])
    other["sequences"][0]["request_id"] = "somebody else"
    for traces, said in (
        ([pair[0], other], ""),
        ([pair[0], pair[0]], f"Both needed {len(pair[0]['steps']) - 1} steps."),
    ):
        file = tmp_path / "page.html"
        file.write_text(make_page(traces), encoding="utf-8")
        tab.open(file)
        assert tab.js("result.hidden ? '' : result.textContent") == said


DRAWN_TEXTS = """(() => {
  const texts = [], run = page.runs[args[0]], original = CanvasRenderingContext2D.prototype.fillText;
  CanvasRenderingContext2D.prototype.fillText = function (text, x, y) {
    texts.push([String(text), x, this.measureText(text).width]);
    original.call(this, text, x, y);
  };
  page.drawWhole();
  CanvasRenderingContext2D.prototype.fillText = original;
  page.show(page.stops.length);
  const cursor = new DOMMatrix(getComputedStyle(run.chart.querySelector(".cursor")).transform).e;
  return [texts.filter(([text]) => text.startsWith("◂")), run.axis.width, cursor];
})()"""


@pytest.mark.parametrize("width", [390, 640, 900, 1280, 1900])
def test_done_is_not_cut_off(tab: Tab, pages: dict[str, Path], width: int) -> None:
    """Where the shorter run ends stands as much as there is room for, and the moment's line beside it."""
    metrics = {"width": width, "height": 800, "deviceScaleFactor": 1, "mobile": False}
    tab.open(pages["pair"])
    tab.chromium.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    for by_time in (False, True):
        tab.js("(page.redraw(), page.setAxis(args[0]))", by_time)
        texts, canvas, cursor = tab.js(DRAWN_TEXTS, 1)
        assert len(texts) == 1
        text, x, wide = texts[0]
        assert text.startswith("◂ done") or width < 1000
        assert cursor + 2 < x
        assert x + wide <= canvas


def test_neighbours_have_no_seam(tab: Tab, pages: dict[str, Path]) -> None:
    """Where a box ends and the next begins, no pixel is a mixture: edges are between pixels."""
    tab.open(pages["pair"])
    for ratio in (1, 1.5, 2):
        metrics = {"width": 1111, "height": 800, "deviceScaleFactor": ratio, "mobile": False}
        tab.chromium.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
        tab.js("page.redraw()")
        edges = tab.js(
            "page.runs[0].replay.starts.flatMap((_, i) => ["
            "page.runs[0].axis.left(i), page.runs[0].axis.right(i)])"
        )
        assert all(abs(edge * ratio - round(edge * ratio)) < 1e-6 for edge in edges)
        assert edges[1:-3:2] == edges[2:-2:2]


def test_only_what_was_used_is_shown(tab: Tab, tmp_path: Path, by_priority: samples.Trace) -> None:
    """Of a large cache, the first row; and curves that end where the run did, which the page says."""
    trace = copy.deepcopy(by_priority)
    trace["engine"].update(num_blocks=2048, max_num_batched_tokens=512)
    for step in trace["steps"]:
        step["free_blocks"] += 2048 - 64
    file = tmp_path / "page.html"
    file.write_text(make_page([trace]), encoding="utf-8")
    tab.open(file)
    shown, columns = tab.js("[page.runs[0].gridLayout.shown, page.runs[0].gridLayout.columns]")
    assert shown % columns == 0
    assert shown < 64
    assert (
        tab.js("page.runs[0].find('.pages-rest').textContent")
        == f"… and {2048 - shown:,} that were never used"
    )
    scales = tab.js("[...document.querySelectorAll('.scale')].map((e) => e.textContent)")
    most = max(step["num_tokens"] for step in trace["steps"])
    assert re.fullmatch(r"axis up to \d+, the run's maximum; there are 2,048 blocks", scales[0])
    assert scales[1] == f"axis up to {most}, the run's maximum; the budget is 512"
    assert tab.js("document.querySelector('.limit-entry').hidden")
    # It opens at the first of the fullest steps.
    full = [i for i, step in enumerate(trace["steps"], 1) if step["running"] == 2]
    assert tab.js("page.stop") == full[1]  # in the first one, both are prefills
    tab.open(file, hash="#step=0")
    assert tab.js("page.stop") == 0


def test_cards_stay_where_they_are(tab: Tab, pages: dict[str, Path]) -> None:
    tab.open(pages["pair"])
    cards = "[...run.body.querySelectorAll('.text')].map((card) => Number(card.dataset.sequence))"
    order = f"page.runs.map((run) => {cards})"
    for position in (0, 10, 60, 200):
        assert tab.js(f"(page.show(args[0]), {order})", position) == [list(range(24))] * 2
    assert tab.js("page.runs[0].replay.topicOf(3)") == "3, please, as you told it to me as a child."


def test_words_are_explained(tab: Tab, pages: dict[str, Path]) -> None:
    tab.open(pages["continuous"])
    assert tab.js("[...document.querySelectorAll('.legend li')].every((li) => li.title.length > 10)")
    tab.js("document.querySelector('#glossary summary').click()")
    assert tab.js("glossary.open && document.documentElement.scrollWidth <= innerWidth")
    terms = ", ".join(tab.js("[...document.querySelectorAll('#glossary dt')].map((dt) => dt.textContent)"))
    for word in ("seat", "step", "prefill chunk", "decode", "block", "owned", "shared", "cached", "free",
                 "prefix cache", "preempted", "computed in vain", "budget", "[a, b)"):  # fmt: skip
        assert word in terms


def test_hostile_text_is_inert(tab: Tab, tmp_path: Path, recordings: dict[str, samples.Recording]) -> None:
    trace = copy.deepcopy(recordings["continuous"].trace)
    trace["engine"]["model"] = trace["engine"]["device"] = HOSTILE
    for i, sequence in enumerate(trace["sequences"]):
        sequence["request_id"] = f"{HOSTILE} {i}"
        sequence["prompt"] = HOSTILE
        sequence["pieces"] = [HOSTILE for _ in sequence["tokens"]]
    page = make_page([trace], [HOSTILE])
    file = tmp_path / "hostile.html"
    file.write_text(page, encoding="utf-8")
    tab.open(file, hash="#step=5")
    assert tab.complaints() == []
    assert tab.js(
        "window.hacked === undefined && document.images.length === 0 && document.scripts.length === 2"
    )
    assert tab.js("about.textContent.includes(page.runs[0].replay.engine.model)")
    tab.js("page.runs[0].body.querySelector('.text button').click()")
    prompt = "document.querySelector('.text.chosen .prompt').textContent"
    tab.wait_for("document.querySelector('.text.chosen')")
    assert tab.js(f"{prompt} === page.runs[0].replay.sequences[0].prompt && {prompt}.includes('\\ud800')")
    # What runs all the same, for example by a hand in the console, is stopped by the page's policy.
    tab.js("document.body.insertAdjacentHTML('beforeend', page.runs[0].replay.engine.model)")
    assert tab.js("document.images.length") == 1
    tab.chromium.execute_async_script("setTimeout(arguments[0], 50)")
    assert tab.js("window.hacked === undefined")


def test_without_a_tokenizer(tab: Tab, tmp_path: Path, recordings: dict[str, samples.Recording]) -> None:
    trace = copy.deepcopy(recordings["continuous"].trace)
    for sequence in trace["sequences"]:
        sequence["prompt"] = sequence["pieces"] = None
    file = tmp_path / "tokens.html"
    file.write_text(make_page([trace]), encoding="utf-8")
    tab.open(file, hash="#step=45")
    first = trace["sequences"][0]
    assert tab.js("document.querySelector('.text[data-sequence=\"0\"] p').textContent") == (
        f"({first['num_prompt_tokens']} prompt tokens) " + "".join(f" {token}" for token in first["tokens"])
    )
    assert tab.complaints() == []


def test_smallest_traces(tab: Tab, tmp_path: Path, recordings: dict[str, samples.Recording]) -> None:
    """One step, in no time; an engine that did nothing; a log taken while requests were running."""
    trace = recordings["continuous"].trace
    one = {**trace, "steps": [{**trace["steps"][0], "times": [0, 0, 0, 0]}]}
    empty = {key: [] if isinstance(value, list) else 0 for key, value in trace["steps"][0].items()}
    nothing = {**trace, "sequences": [], "steps": [{**empty, "times": [0, 0, 0, 0], "free_blocks": 32}]}
    running = {**trace, "steps": trace["steps"][:20]}
    running["sequences"] = [{**s, "end": None, "finish_reason": None} for s in trace["sequences"]]
    for i, traces in enumerate(([one], [nothing], [running], [nothing, trace])):
        file = tmp_path / f"{i}.html"
        file.write_text(make_page(traces), encoding="utf-8")
        tab.open(file, hash="#step=1")
        tab.js("(page.setAxis(true), page.show(1), page.show(page.stops.length), page.setAxis(false))")
        assert "NaN" not in tab.js("document.body.innerText")
        assert tab.complaints() == []
        assert tab.js("page.stop === page.runs[0].replay.records.length || page.runs.length === 2")


# Texts whose boxes must not meet: what holds no other text, unless one scrolls out of a box of its own.
OVERLAPS = """(() => {
  const boxes = [];
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const node = walker.currentNode, parent = node.parentElement;
    const unseen = "script, noscript, template, .hidden, option, #controls, details:not([open]) dl";
    if (!node.textContent.trim() || parent.closest(unseen)) continue;
    const range = document.createRange();
    range.selectNodeContents(node);
    const clip = parent.closest(".texts, .events");
    const frame = clip ? clip.getBoundingClientRect() : { left: 0, top: 0, right: innerWidth, bottom: 1e9 };
    for (const box of range.getClientRects()) {
      if (box.width < 1 || box.bottom > frame.bottom + 1 && clip) continue;
      const text = node.textContent.slice(0, 40);
      boxes.push({ text, l: box.left, r: box.right, t: box.top, b: box.bottom, node });
      if (box.right > innerWidth + 1) return [["sticks out", node.textContent]];
    }
  }
  for (const canvas of document.querySelectorAll("canvas")) {
    const box = canvas.getBoundingClientRect();
    const text = canvas.className || "curve";
    boxes.push({ text, l: box.left, r: box.right, t: box.top, b: box.bottom, node: canvas });
  }
  const bad = [];
  for (const a of boxes) for (const b of boxes) {
    const wide = Math.min(a.r, b.r) - Math.max(a.l, b.l), high = Math.min(a.b, b.b) - Math.max(a.t, b.t);
    if (a !== b && a.node !== b.node && wide > 2 && high > 6) bad.push([a.text, b.text]);
  }
  return bad;
})()"""


@pytest.mark.parametrize("size", ["desktop", "phone"])
@pytest.mark.parametrize("name", ["ahead", "pair"])
def test_nothing_overlaps_or_sticks_out(tab: Tab, pages: dict[str, Path], name: str, size: str) -> None:
    tab.open(pages[name], size=size, scheme="dark" if name == "pair" else "light")
    for share in (0, 0.4, 1):
        tab.js("page.show(args[0] * (page.stops.length - 1))", share)
        assert tab.js("document.documentElement.scrollWidth <= innerWidth")
        assert tab.js(OVERLAPS) == []
    bar = tab.js("document.querySelector('#controls').getBoundingClientRect().toJSON()")
    inside = "[...controls.querySelectorAll('button, select, input, output')]"
    for box in tab.js(f"{inside}.map((e) => e.getBoundingClientRect().toJSON())"):
        assert bar["left"] <= box["left"]
        assert box["right"] <= bar["right"]
    assert tab.complaints() == []


CONTRAST = """(() => {
  const light = (c) => c.match(/[\\d.]+/g).slice(0, 3).map(Number).map((v) => v / 255)
    .map((v) => v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4)
    .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
  const ground = (e) => {
    for (; e; e = e.parentElement) {
      const colour = getComputedStyle(e).backgroundColor;
      if (!/, 0\\)$/.test(colour)) return colour;
    }
  };
  const poor = new Set();
  for (const e of document.querySelectorAll("body *")) {
    if (![...e.childNodes].some((n) => n.nodeType === 3 && n.textContent.trim()) || !e.offsetParent) continue;
    const [a, b] = [light(getComputedStyle(e).color), light(ground(e))];
    const contrast = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
    if (contrast < 4.5) poor.add(`${e.tagName} ${e.className} ${contrast.toFixed(2)}`);
  }
  return [...poor];
})()"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_contrast(tab: Tab, pages: dict[str, Path], scheme: str) -> None:
    """WCAG AA: 4.5 for all text."""
    tab.open(pages["ahead"], scheme=scheme, hash="#step=29")
    assert tab.js("matchMedia('(prefers-color-scheme: dark)').matches") == (scheme == "dark")
    assert tab.js(CONTRAST) == []


@pytest.mark.slow
def test_large_trace(tab: Tab, tmp_path: Path) -> None:
    """256 seats, 2,000 steps and 10,000 blocks load, and the slider goes to any of them."""
    trace = samples.large()
    file = tmp_path / "large.html"
    file.write_text(make_page([trace]), encoding="utf-8")
    tab.open(file)
    last = len(trace["steps"])
    for position in (last, 1500, 1501, 3):
        tab.js("page.show(args[0])", position)
        expected = replay(trace, position)
        assert tab.js("page.runs[0].replay.seats.filter((s) => s >= 0).sort((a, b) => a - b)") == sorted(
            expected.tables
        )
        assert tab.js("page.runs[0].replay.owners.filter((o) => o.length).length") == len(
            {block for table in expected.tables.values() for block in table}
        )
        assert 0 < tab.js("document.querySelectorAll('.text').length") <= 40 or position == last
    assert tab.js("document.documentElement.scrollWidth <= innerWidth")
    assert tab.complaints() == []
