"""The command line: answers on standard output, figures and errors on standard error, and exit codes."""

from __future__ import annotations

import io
import os
import re
import signal
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace

import fixtures
import numpy as np
import pytest
import tiny_vllm
from helpers import MODEL_OPTIONS, Run, greedy, open_engine, python_process
from tiny_vllm import EngineConfig, SamplingParams, _core, cli
from tiny_vllm.cli import options
from tiny_vllm.trace import read_trace


def test_one_prompt(run: Run, rand_folder: Path) -> None:
    code, out, err = run("run", "Hello", "--model", str(rand_folder), "--max-tokens", "6", *MODEL_OPTIONS)
    answer = open_engine(rand_folder).generate("Hello", greedy(6))[0].outputs[0].text
    assert (code, out) == (0, f"Hello{answer}\n")
    # One line, and no empty ones: where nobody watches there are no bars.
    assert re.fullmatch(r"5 prompt \+ 6 generated tokens \(cut at --max-tokens\), .* tok/s, .* GB/s\n", err)


def test_several_prompts(run: Run, rand_folder: Path, tmp_path: Path) -> None:
    """From the arguments, then from a file or standard input, one a line."""
    answers = open_engine(rand_folder).generate(["a", "b c", "é"], greedy(3))
    expected = "\n".join(f"--- {o.prompt}\n{o.outputs[0].text}\n" for o in answers)
    (tmp_path / "prompts.txt").write_text("b c\n\n  \né\n", encoding="utf-8")
    common = ["--model", str(rand_folder), "--max-tokens", "3", *MODEL_OPTIONS]
    for arguments, stdin in (
        (["a", "b c", "é"], ""),
        (["a", "--file", str(tmp_path / "prompts.txt")], ""),
        (["a", "-f", "-"], "b c\né"),
    ):
        code, out, err = run("run", *arguments, *common, stdin=stdin)
        assert (code, out) == (0, expected)
        assert re.fullmatch(r".* 9 generated tokens \(3 answers cut at --max-tokens\), 3 requests, .*\n", err)


def test_chat(run: Run, tmp_path: Path) -> None:
    fixtures.write_fixed(tmp_path, [0.0] * 65 + [1.0] + [0.0] * 200)
    fixtures.write_byte_tokenizer(tmp_path, chat_template="{{ messages[0].content }}?")
    common = ["--model", str(tmp_path), "--max-tokens", "3", "--chat", *MODEL_OPTIONS]
    assert run("run", "hi", *common)[:2] == (0, "AAA\n")  # the answer alone
    code, out, err = run("run", "hi", "you", *common)
    assert (code, out) == (0, "--- hi\nAAA\n\n--- you\nAAA\n")
    assert "7 prompt + 6 generated tokens" in err


def test_what_cut_an_answer(run: Run, tmp_path: Path) -> None:
    """Nothing is said of an answer that came to its end; a longer limit of the request is not blamed."""
    fixtures.write_fixed(tmp_path, [0.0] * 65 + [1.0] + [0.0] * 200)
    fixtures.write_byte_tokenizer(tmp_path)
    common = ["run", "hi", "--model", str(tmp_path), *MODEL_OPTIONS]
    err = run(*common, "--max-model-len", "6")[2]
    assert (
        "2 prompt + 4 generated tokens (cut at --max-model-len, --max-tokens or the KV cache), first" in err
    )
    fixtures.write_json(tmp_path / "generation_config.json", {"eos_token_id": [65]})
    err = run(*common)[2]
    assert "2 prompt + 1 generated tokens, first" in err


def test_a_model_that_ends_at_once_was_made_for_chat(run: Run, tmp_path: Path) -> None:
    """Said only where the chat template would help and was not asked for."""
    fixtures.write_fixed(tmp_path, [0.0] * 65 + [1.0] + [0.0] * 200)
    fixtures.write_byte_tokenizer(tmp_path, chat_template="{{ messages[0].content }}?")
    common = ["--model", str(tmp_path), "--max-tokens", "3", *MODEL_OPTIONS]
    hint = "the model ended at once; for a question try --chat\n"
    assert hint not in run("run", "hi", *common)[2]  # it says AAA
    fixtures.write_json(tmp_path / "generation_config.json", {"eos_token_id": [65]})
    code, out, err = run("run", "hi", *common)
    assert (code, out) == (0, "hi\n")
    assert err.startswith(hint)
    assert "1 generated tokens" in err.splitlines()[-1]  # the figures stay the last line
    assert run("run", "hi", "you", *common)[2].startswith(f"2 of 2 prompts: {hint}")
    assert hint not in run("run", "hi", "--chat", *common)[2]
    fixtures.write_byte_tokenizer(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("{}")
    assert hint not in run("run", "hi", *common)[2]


def test_flags_of_sampling_reach_the_request(
    run: Run, rand_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[SamplingParams] = []

    def start_stream(self: tiny_vllm.Engine, prompt: object, params: SamplingParams) -> object:
        seen.append(params)
        raise tiny_vllm.InvalidRequestError("enough")

    monkeypatch.setattr(tiny_vllm.Engine, "start_stream", start_stream)
    flags = {"min_p": 0.25, "repetition_penalty": 1.5, "presence_penalty": -0.5, "frequency_penalty": 0.75}
    options = [part for name, value in flags.items() for part in (f"--{name.replace('_', '-')}", str(value))]
    common = ["run", "x", "--model", str(rand_folder), "--temperature", "1", "--seed", "3", *MODEL_OPTIONS]
    run(*common, *options)
    run(*common)
    expected = {"temperature": 1, "seed": 3, "max_tokens": 128}
    assert seen == [SamplingParams(**expected, **flags), SamplingParams(**expected)]  # type: ignore[arg-type]


def test_a_penalty_works_at_temperature_0(run: Run, tmp_path: Path) -> None:
    """A is the likeliest until it has been said; then B, and so on."""
    fixtures.write_fixed(tmp_path, [0.0] * 65 + [1.0, 0.9] + [0.0] * 199)
    fixtures.write_byte_tokenizer(tmp_path)
    common = ["run", "x", "--model", str(tmp_path), "--max-tokens", "4", *MODEL_OPTIONS]
    assert run(*common)[1] == "xAAAA\n"
    assert run(*common, "--frequency-penalty", "0.5")[1] == "xABAB\n"


def test_a_seed_repeats(run: Run, rand_folder: Path) -> None:
    common = ["run", "x", "--model", str(rand_folder), "--temperature", "1", "--top-k", "50", *MODEL_OPTIONS]
    first = run(*common, "--seed", "3")
    assert first[0] == 0
    assert first[:2] == run(*common, "--seed", "3")[:2]
    assert first[:2] != run(*common, "--seed", "4")[:2]
    # It is the seed of SamplingParams.
    params = SamplingParams(temperature=1, top_k=50, seed=3, max_tokens=128)
    assert first[1] == f"x{open_engine(rand_folder).generate('x', params)[0].outputs[0].text}\n"


def test_without_a_seed_each_run_draws_anew(run: Run, rand_folder: Path) -> None:
    """But random weights stay the same: greedy answers of a dummy model repeat."""
    common = ["run", "x", "--model", str(rand_folder), *MODEL_OPTIONS]
    assert run(*common, "--temperature", "1")[:2] != run(*common, "--temperature", "1")[:2]
    code, out, _ = run("run", *["x"] * 2, *common[2:], "--temperature", "1")
    first, second = out.removeprefix("--- x\n").split("\n\n--- x\n")
    assert code == 0
    assert first != second.removesuffix("\n")
    assert run(*common, "--load-format", "dummy")[:2] == run(*common, "--load-format", "dummy")[:2]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--block-size", "0"], r"InvalidRequestError: block_size must be in \[1, 65536\], got 0"),
        (["--temperature", "-1"], "InvalidRequestError: temperature must be"),
        (["--temperature", "1", "--top-p", "0"], "InvalidRequestError: top_p must be"),
        (["--max-tokens", "0"], "InvalidRequestError: max_tokens must be"),
        (["--max-model-len", "5"], "InvalidRequestError: prompt has 5 tokens"),
        (["--chat"], "InvalidRequestError: .* has no chat template"),
        (["--kv-cache-memory-bytes", str(2**60)], "OutOfMemoryError: wanted"),
        (["--model", "./not/there"], "ModelLoadError: .*not/there"),
    ],
)
def test_errors_are_one_sentence(run: Run, rand_folder: Path, arguments: list[str], message: str) -> None:
    code, out, err = run("run", "Hello", "--model", str(rand_folder), *MODEL_OPTIONS, *arguments)
    assert (code, out) == (1, "")
    assert re.search(message, err)
    assert "Traceback" not in err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["run"], "give a prompt"),
        (["run", "x", "--sampling-seed", "1"], "--sampling-seed"),
        (["run", "x", "--top-p", "1.0"], "--top-p: has no effect at temperature 0; give --temperature"),
        (["run", "x", "--top-k", "5"], "--top-k: has no effect at temperature 0; give --temperature"),
        (["run", "x", "--min-p", "0.1"], "--min-p: has no effect at temperature 0; give --temperature"),
        (["run", "x", "--file", os.devnull], f"--file: {os.devnull} holds no prompt; write one a line"),
        (["run", "--file", "-"], "--file: standard input holds no prompt; write one a line"),
        (["bench", "--enable-prefix-caching"], "--enable-prefix-caching"),
        (["bench", "--seed", "1"], "--seed"),
        (["bench", "--profile", "/not/there/p.json"], "--profile: /not/there/p.json cannot be written: no"),
        (["bench", "sprint"], "'sprint' is not one of prefill, decode-1, decode-64"),
        (["run", "x", "--scheduler", "orca"], "orca"),
        (["run", "x", "--top-q", "1"], "--top-q"),
        (
            ["run", "--file", "/not/there.txt"],
            "--file: /not/there.txt cannot be read: No such file or directory\n",
        ),
        (["fly"], "fly"),
    ],
)
def test_wrong_usage(run: Run, arguments: list[str], message: str) -> None:
    code, out, err = run(*arguments)
    assert (code, out) == (2, "")
    assert message in err
    assert err.startswith("Usage: tiny-vllm ")


def test_a_prompt_ends_at_the_end_of_its_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And nowhere else, as at a line separator or a form feed; U+FEFF before the first is no part of it."""
    text = "\ufeffone\u2028line\r\n\x0btwo\x0c\x85\n \nthree"
    prompts = ["one\u2028line", "\x0btwo\x0c\x85", "three"]
    (tmp_path / "prompts.txt").write_bytes(text.encode("utf-8"))
    assert cli.run._read_prompts(tmp_path / "prompts.txt") == prompts
    stdin = io.TextIOWrapper(io.BytesIO(text.encode("utf-8")), encoding="ascii")
    monkeypatch.setattr(sys, "stdin", stdin)
    assert cli.run._read_prompts(Path("-")) == prompts


def _info_process(before: str = "") -> list[str]:
    return python_process(
        f"sys.argv = ['tiny-vllm', 'info']\nfrom tiny_vllm import cli\n{before}\ncli.main()"
    )


def test_a_full_disk_is_one_sentence() -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run(_info_process(), stdout=full, stderr=subprocess.PIPE, text=True)
    assert done.stderr == "standard output cannot be written: No space left on device\n"
    assert done.returncode == 1


def test_a_letter_that_standard_output_lacks_is_one_sentence() -> None:
    speak = "cli.info._core.build_info = lambda: {'compiler': 'caf\u00e9'}"
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    done = subprocess.run(_info_process(speak), capture_output=True, text=True, env=environment)
    assert (done.stdout, done.returncode) == ("Build\n", 1)
    assert done.stderr == "standard output is ascii, which has no '\\xe9'; set PYTHONIOENCODING=utf-8\n"


@pytest.mark.parametrize("when", ["at the exit", "while printing"])
def test_a_reader_that_leaves_hears_nothing(when: str) -> None:
    """As with `| head -1`, which needs no more. Lines are written at once, or when all are there."""
    before = "sys.stdout.reconfigure(line_buffering=True)" if when == "while printing" else ""
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(_info_process(before), stdout=writer, stderr=subprocess.PIPE, text=True)
    os.close(writer)
    assert (done.stderr, done.returncode) == ("", 1)


def test_ctrl_c_ends_the_line(tmp_path: Path) -> None:
    """The shell's prompt does not stand beside the text."""
    fixtures.write_fixed(tmp_path, [0.0] * 65 + [1.0] + [0.0] * 200, max_position_embeddings=10**6)
    fixtures.write_byte_tokenizer(tmp_path)
    arguments = ["tiny-vllm", "run", "x", "--model", str(tmp_path), "--max-tokens", "200000", *MODEL_OPTIONS]
    arguments[-1] = str(2**26)
    process = subprocess.Popen(
        python_process(f"sys.argv = {arguments!r}\nfrom tiny_vllm import cli\ncli.main()"),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.read(3) == "xAA"
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=20)
    assert (process.returncode, err) == (130, "")
    assert re.fullmatch("A*\n", out)


def test_an_answer_that_ends_in_an_error(run: Run, tmp_path: Path) -> None:
    config = fixtures.llama_config()
    tensors = fixtures.random_tensors(config)
    tensors["model.embed_tokens.weight"][ord("x")] = np.nan
    fixtures.write_model(tmp_path, config, tensors)
    fixtures.write_byte_tokenizer(tmp_path)
    code, out, err = run("run", "x", "--model", str(tmp_path), *MODEL_OPTIONS)
    assert (code, out) == (1, "x\n")
    assert "NaN" in err
    # In a batch the others are answered; the answers alone are on standard output.
    code, out, err = run("run", "x", "y", "--max-tokens", "1", "--model", str(tmp_path), *MODEL_OPTIONS)
    answer = open_engine(tmp_path).generate("y", greedy(1))[0].outputs[0].text
    assert (code, out) == (1, f"--- y\n{answer}\n")
    assert re.search("^no answer to 'x': .*NaN", err)


def test_a_prompt_that_is_refused(run: Run, rand_folder: Path) -> None:
    common = ["--model", str(rand_folder), "--max-tokens", "2", "--max-model-len", "8", *MODEL_OPTIONS]
    answer = open_engine(rand_folder).generate("b", greedy(2))[0].outputs[0].text
    code, out, err = run("run", "ab" * 50, "b", *common)
    assert (code, out) == (1, f"--- b\n{answer}\n")
    assert f"no answer to '{'ab' * 28}a...': prompt has 100 tokens" in err
    assert "2 generated tokens" in err


def test_the_help_fits_80_columns(run: Run) -> None:
    """Every option of the engine is there, whole."""
    for command, left_out in (("run", {"profile"}), ("bench", {"enable_prefix_caching", "seed"})):
        code, out, _ = run(command, "--help")
        assert code == 0
        assert max(map(len, out.splitlines())) <= 80
        assert "…" not in out
        assert out.startswith(f"Usage: tiny-vllm {command} ")
        assert "[default: off]" in out
        assert "[default: no-" not in out
        left_out |= {"record_events", "scheduling_policy"}  # --trace; and no request has a priority here
        for f in fields(EngineConfig):
            name = re.search(rf"--{f.name.replace('_', '-')}\s", out)
            assert (name is not None) == (f.name not in left_out), f.name


@pytest.mark.parametrize(
    "arguments",
    [
        ["run", "ab"],
        ["run", "ab", "cd", "--scheduler", "static"],
        ["bench", "decode-1", "--max-model-len", "256"],
    ],
)
def test_trace(run: Run, rand_folder: Path, tmp_path: Path, arguments: list[str]) -> None:
    """It can be viewed, and answers and exit code are as without it."""
    options = ["--model", str(rand_folder), "--dtype", "float32"]
    options += ["--max-tokens", "5"] if arguments[0] == "run" else []
    file = tmp_path / "x.json"
    code, out, err = run(*arguments, *options, "--trace", str(file))
    assert code == 0
    assert f"wrote {file} (look at it: tiny-vllm trace view {file}) and {tmp_path}/x.perfetto.json" in err
    if arguments[0] == "run":
        assert run(*arguments, *options)[:2] == (0, out)
    assert read_trace(file)["engine"]["scheduler"] == ("static" if "static" in arguments else "continuous")
    assert run("trace", "view", str(file)) == (0, f"wrote {tmp_path / 'x.html'}\n", "")
    code, _, err = run(*arguments, *options, "--trace", str(tmp_path / "no/x.json"))
    assert code == 2
    assert "no/x.json cannot be written: no such folder" in " ".join(err.split())


def test_a_trace_overwrites_traces_only(run: Run, rand_folder: Path, tmp_path: Path) -> None:
    prompts = tmp_path / "p.json"
    prompts.write_text("ab\n")
    options = ["--model", str(rand_folder), "--max-tokens", "1"]
    code, _, err = run("run", "--file", str(prompts), "--trace", str(prompts), *options)
    assert code == 2
    assert "p.json is there already and no trace; give another name" in " ".join(err.split())
    assert prompts.read_text() == "ab\n"
    for _ in range(2):
        assert run("run", "ab", "--trace", str(tmp_path / "x.json"), *options)[0] == 0


def test_a_trace_of_what_came_to_a_bad_end(run: Run, rand_folder: Path, tmp_path: Path) -> None:
    long = "x" * 2000
    file = tmp_path / "x.json"
    options = ["--model", str(rand_folder), "--max-tokens", "2", "--trace", str(file)]
    code, _, err = run("run", "ab", long, *options)
    assert code == 1
    assert f"wrote {file}" in err
    assert len(read_trace(file)["sequences"]) == 1


def test_version(run: Run) -> None:
    assert run("--version") == (0, f"tiny-vllm {tiny_vllm.__version__}\n", "")


def test_the_name_it_is_called_by() -> None:
    done = subprocess.run([sys.executable, "-m", "tiny_vllm", "run"], capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr.startswith("Usage: tiny-vllm run ")


def test_info(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = SimpleNamespace(index=1, name="Some GPU", compute_capability=90, memory_bytes=80 * 10**9)
    monkeypatch.setattr(_core, "cuda_devices", lambda: ([], "no driver"))
    code, out, _ = run("info")
    assert code == 0
    for name in ("version", "compiler", "instruction_sets", "cuda_reason"):
        assert re.search(f"^  {name}: ", out, re.MULTILINE)
    assert not re.search(r"\[|True|False", out)
    assert f"instruction_sets: {' '.join(_core.build_info()['instruction_sets'])}\n" in out
    assert f"  cpu: instruction sets {_core.available_isas()[0]} (default), " in out
    assert out.endswith("  cuda: none (no driver)\n")
    monkeypatch.setattr(_core, "cuda_devices", lambda: ([gpu], ""))
    assert run("info")[1].endswith("reference\n  cuda:1: Some GPU, compute capability 9.0, 80.0 GB\n")


@pytest.mark.parametrize(
    ("scenario", "requests", "expected"),
    [("decode-1", 1, "128 new"), ("prefill", 1, "512 prompt"), ("decode-64", 64, "64 new")],
)
def test_bench(run: Run, rand_folder: Path, scenario: str, requests: int, expected: str) -> None:
    options = [*MODEL_OPTIONS[:-1], str(2**26), "--max-num-batched-tokens", "4096"]
    code, out, _ = run("bench", scenario, "--model", str(rand_folder), *options)
    assert code == 0
    steps = {"decode-1": "128 steps", "prefill": "1 step", "decode-64": "64 steps"}[scenario]
    load = r"(\d+) x \((\d+) prompt \+ (\d+) new\)"
    match = re.fullmatch(rf"{scenario}: {load} in (.*) s, (.*) (\w+) tok/s, {steps}, .* GB/s read\n", out)
    assert match is not None, out
    count, kind = expected.split()
    assert (int(match[1]), match[6]) == (requests, kind)
    assert match[2 if kind == "prompt" else 3] == count


def test_bench_counts_only_what_ran(run: Run, rand_folder: Path) -> None:
    """A load that is cut short or refused is not the load of that name: no figures."""
    common = ["--model", str(rand_folder), *MODEL_OPTIONS, "--max-model-len", "64"]
    code, out, err = run("bench", "decode-1", *common)
    assert (code, out) == (1, "")
    assert "decode-1: a request stopped after 32 of its 128 tokens; it needs room for 160" in err
    code, out, err = run("bench", "prefill", *common)
    assert (code, out) == (1, "")
    assert "prompt has 512 tokens" in err


@pytest.mark.parametrize(
    ("device", "options", "warm_up"),
    [
        ("cpu, portable", [], 3),
        ("cuda, Some GPU", [], 128),
        ("cuda, Some GPU", ["--enforce-eager"], 3),
    ],
)
def test_bench_warms_what_the_load_will_need(
    run: Run,
    rand_folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    device: str,
    options: list[str],
    warm_up: int,
) -> None:
    """Where steps are recorded as graphs, a size first met inside the timed run would be recorded there."""
    runs: list[int | None] = []
    generate, info = tiny_vllm.Engine.generate, tiny_vllm.Engine.info

    def watched(self: tiny_vllm.Engine, prompts: list[list[int]], params: SamplingParams) -> object:
        runs.append(params.max_tokens)
        return generate(self, prompts, params)

    monkeypatch.setattr(tiny_vllm.Engine, "generate", watched)
    monkeypatch.setattr(tiny_vllm.Engine, "info", lambda self: {**info(self), "device": device})
    assert run("bench", "decode-1", "--model", str(rand_folder), *MODEL_OPTIONS, *options)[0] == 0
    assert runs == [warm_up, 128]


@pytest.mark.parametrize(
    ("name", "forbidden", "reason"),
    [
        ("there.json", "there.json", "no permission to change this file"),
        ("new.json", ".", "no permission to write in this folder"),
        ("not/there.json", "", "no such folder"),
    ],
)
def test_where_a_profile_goes_is_looked_at_first(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, forbidden: str, reason: str
) -> None:
    """os.access is replaced because the superuser may write everywhere."""
    (tmp_path / "there.json").write_text("{}")
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != tmp_path / forbidden)
    file = tmp_path / name
    code, out, err = run("bench", "prefill", "--model", "./not/there", "--profile", str(file))
    assert (code, out) == (2, "")
    assert f"--profile: {file} cannot be written: {reason}\n" in err


def test_a_profile_needs_a_gpu(run: Run, rand_folder: Path, tmp_path: Path) -> None:
    """Nothing is written where there is nothing to time."""
    file = tmp_path / "profile.json"
    common = ["bench", "prefill", "--model", str(rand_folder), "--profile", str(file)]
    code, out, err = run(*common, *MODEL_OPTIONS)
    assert (code, out) == (1, "")
    assert err == ("InvalidRequestError: profile times the kernels of a GPU; device is 'cpu', not 'cuda'\n")
    assert not file.exists()


@pytest.mark.skipif(not _core.cuda_devices()[1], reason="device auto is a GPU here")
def test_auto_does_not_profile_a_cpu_instead(run: Run, rand_folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "profile.json"
    code, out, err = run("bench", "prefill", "--model", str(rand_folder), "--profile", str(file))
    assert (code, out) == (1, "")
    assert err.startswith("DeviceError: profile times the kernels of a GPU, and there is none: ")
    assert len(err.splitlines()) == 1
    assert not file.exists()


def test_bars_take_turns(
    run: Run, rand_folder: Path, terminal: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The weights' bar begins when the model is there: what fetches it has bars of its own."""

    def fetch(model: str) -> Path:
        print("[fetching]", file=sys.stderr)
        return Path(model)

    monkeypatch.setattr(options, "resolve_model", fetch)
    _, _, err = run("run", "x", "--model", str(rand_folder), "--max-tokens", "1", *MODEL_OPTIONS)
    before, after = err.split("[fetching]")
    assert before == ""
    assert "Loading weights" in after


def test_a_bar_leaves_nothing_behind(run: Run, rand_folder: Path, terminal: None) -> None:
    _, _, err = run("run", "x", "y", "--model", str(rand_folder), "--max-tokens", "1", *MODEL_OPTIONS)
    bars, figures = err.rsplit("\x1b[2K", 1)  # erases the line that the cursor is on
    assert "Loading weights" in bars
    assert "2/2" in bars
    assert re.fullmatch(r"2 prompt \+ 2 generated tokens .*\n", figures)
