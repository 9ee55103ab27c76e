"""Speed of the whole engine on the CPU, beside the machine's limits and beside other engines.

    python benchmarks/cpu_engine.py                          # the bundled model, all peers that are installed
    python benchmarks/cpu_engine.py --rounds 5 --json out.json
    python benchmarks/cpu_engine.py --model DIR --dummy      # any config.json, random weights

Progress goes to standard error, the table to standard output; with llama.cpp three rounds take some minutes.

Every engine gets the same bf16 weights, the same number of threads and the same random token ids: one
prompt of 512 tokens, 128 new tokens; then 8 prompts at once. Engines take turns, round by round, because
the memory bandwidth of shared machines drifts within a minute; the table shows the median of the rounds.
Bandwidth is measured in each.

Decode GB/s counts the weights once a step and keys and values once a request and step: what must be read.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from arguments import writable_file
from tiny_vllm import Engine, Error, SamplingParams, _core

PROMPT, NEW, BATCH = 512, 128, 8
PEERS = ("llama.cpp", "transformers")


def say(text: str) -> None:
    """What is going on, for the one who waits."""
    print(text, file=sys.stderr, flush=True)


def prompts(count: int, vocab_size: int, seed: int) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return rng.integers(3, min(vocab_size, 49000), size=(count, PROMPT)).tolist()


class TinyVllm:
    """Both schedulers do the same here; the prefix cache is off so that every prompt is computed."""

    name = "tiny-vllm bf16"

    def __init__(self, model: Path | None, threads: int, **options: Any) -> None:
        self.engine = Engine(
            model, num_threads=threads, enable_prefix_caching=False, max_num_batched_tokens=PROMPT,
            max_model_len=PROMPT + NEW + 1, **options,
        )  # fmt: skip
        self.vocab_size = int(self.engine.info()["vocab_size"])

    def run(self, batch: list[list[int]]) -> dict[str, float]:
        params = SamplingParams(temperature=0, max_tokens=NEW, ignore_eos=True)
        for i, ids in enumerate(batch):
            self.engine.add_request(str(i), ids, params)
        start = time.perf_counter()
        decode_start, at_start = start, self.engine.metrics()
        # Decode is timed from the step on that gave the last request its first token.
        begun: set[str] = set()
        outputs = {}
        while self.engine.has_unfinished_requests():
            for out in self.engine.step():
                outputs[out.request_id] = out
                begun.add(out.request_id)
            if len(begun) == len(batch) and decode_start == start:
                decode_start, at_start = time.perf_counter(), self.engine.metrics()
                done_before = sum(len(o.outputs[0].token_ids) for o in outputs.values())
        end = time.perf_counter()
        tokens = sum(len(o.outputs[0].token_ids) for o in outputs.values()) - done_before
        read = self.engine.metrics()["bytes_read"] - at_start["bytes_read"]
        return {
            "prefill": len(batch) * PROMPT / (decode_start - start),
            "decode": tokens / (end - decode_start),
            "decode_GBps": read / (end - decode_start) / 1e9,
        }


class LlamaCpp:
    """llama-cpp-python's low-level interface: a batch for each prompt, then one token a sequence and step."""

    name = "llama.cpp bf16"

    def __init__(self, model: Path, threads: int, folder: Path) -> None:
        import llama_cpp
        from tiny_vllm.gguf_export import write_gguf_bf16

        self.lib = llama_cpp
        path = folder / "model.gguf"
        write_gguf_bf16(model, path)
        llama_cpp.llama_backend_init()
        self._quiet = llama_cpp.llama_log_callback(lambda level, text, data: None)
        llama_cpp.llama_log_set(self._quiet, None)
        self.model = llama_cpp.llama_model_load_from_file(
            str(path).encode(), llama_cpp.llama_model_default_params()
        )
        self.threads = threads

    def run(self, batch: list[list[int]]) -> dict[str, float]:
        lib, n = self.lib, len(batch)
        params = lib.llama_context_default_params()
        params.n_ctx, params.n_batch, params.n_ubatch, params.n_seq_max = (
            n * (PROMPT + NEW + 8),
            PROMPT,
            PROMPT,
            n,
        )
        params.n_threads = params.n_threads_batch = self.threads
        context = lib.llama_init_from_model(self.model, params)
        vocab = lib.llama_vocab_n_tokens(lib.llama_model_get_vocab(self.model))
        step = lib.llama_batch_init(PROMPT, 0, 1)

        def decode(
            rows: list[tuple[int, int, int, bool]],
        ) -> None:  # (token, position, sequence, logits wanted)
            step.n_tokens = len(rows)
            for i, (token, position, sequence, wanted) in enumerate(rows):
                step.token[i], step.pos[i], step.n_seq_id[i], step.logits[i] = token, position, 1, wanted
                step.seq_id[i][0] = sequence
            if lib.llama_decode(context, step) != 0:
                raise RuntimeError("llama_decode failed")

        def argmax(row: int) -> int:
            logits = np.ctypeslib.as_array(lib.llama_get_logits_ith(context, row), shape=(vocab,))
            return int(logits.argmax())

        start = time.perf_counter()
        last = []
        for s, ids in enumerate(batch):
            decode([(t, p, s, p == PROMPT - 1) for p, t in enumerate(ids)])
            last.append(argmax(PROMPT - 1))
        prefilled = time.perf_counter()
        for i in range(NEW - 1):
            decode([(t, PROMPT + i, s, True) for s, t in enumerate(last)])
            last = [argmax(s) for s in range(n)]
        end = time.perf_counter()
        lib.llama_batch_free(step)
        lib.llama_free(context)
        return {"prefill": n * PROMPT / (prefilled - start), "decode": n * (NEW - 1) / (end - prefilled)}


class Transformers:
    """Hugging Face transformers with its KV cache, SDPA attention, eager PyTorch."""

    name = "transformers bf16"

    def __init__(self, model: Path, threads: int) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        torch.set_num_threads(threads)
        self.torch = torch
        self.model = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16).eval()

    def run(self, batch: list[list[int]]) -> dict[str, float]:
        torch = self.torch
        with torch.no_grad():
            start = time.perf_counter()
            out = self.model(torch.tensor(batch), use_cache=True, logits_to_keep=1)
            token = out.logits[:, -1].argmax(-1, keepdim=True)
            prefilled = time.perf_counter()
            steps = NEW // 4  # it is slow, and every step takes the same time
            for _ in range(steps):
                out = self.model(token, past_key_values=out.past_key_values, use_cache=True)
                token = out.logits[:, -1].argmax(-1, keepdim=True)
            end = time.perf_counter()
        n = len(batch)
        return {"prefill": n * PROMPT / (prefilled - start), "decode": n * steps / (end - prefilled)}


def installed_peers(model: Path, threads: int, folder: Path, wanted: list[str]) -> list[Any]:
    makers: dict[str, Callable[[], Any]] = {
        "llama.cpp": lambda: LlamaCpp(model, threads, folder),
        "transformers": lambda: Transformers(model, threads),
    }
    peers = []
    for name in wanted:
        say(f"loading the model into {name}")
        try:
            peers.append(makers[name]())
        except ImportError as error:
            say(f"{name}: not installed ({error.name}), left out")
    return peers


def commit() -> str:
    done = subprocess.run(
        ["git", "describe", "--always", "--dirty"], cwd=Path(__file__).parent, capture_output=True, text=True
    )
    return done.stdout.strip() or "unknown"


def processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor()


def positive(text: str) -> int:
    """An argument that counts something."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number, 1 or more; got {text!r}")
    return int(text)


def peer_names(text: str) -> list[str]:
    """The argument of --peers."""
    names = [name for name in text.split(",") if name]
    for name in names:
        if name not in PEERS:
            raise argparse.ArgumentTypeError(f"no engine is called {name!r}; there are: {', '.join(PEERS)}")
    return list(dict.fromkeys(names))


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, help="a Hugging Face folder; default: the bundled model")
    parser.add_argument("--dummy", action="store_true", help="random weights; peers are left out")
    parser.add_argument("--threads", type=positive, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--rounds", type=positive, default=3)
    parser.add_argument(
        "--peers",
        type=peer_names,
        default=list(PEERS),
        help=f"some of {','.join(PEERS)} (the default); empty: none",
    )
    parser.add_argument("--isa", default="auto", help="instruction set of our kernels")
    parser.add_argument("--json", type=writable_file, help="write all figures here")
    return parser.parse_args()


def main() -> None:
    args = arguments()
    options: dict[str, Any] = {"cpu_isa": args.isa, "load_format": "dummy" if args.dummy else "auto"}
    say(f"loading the model into {TinyVllm.name}")
    try:
        ours = TinyVllm(args.model, args.threads, **options)
    except Error as error:
        sys.exit(f"cpu_engine.py: error: {error}")
    with tempfile.TemporaryDirectory() as folder:
        wanted = [] if args.dummy else args.peers
        engines = [ours, *installed_peers(ours.engine.model_folder, args.threads, Path(folder), wanted)]
        results: dict[str, dict[int, list[dict[str, float]]]] = {e.name: {1: [], BATCH: []} for e in engines}
        bandwidth = []
        for engine in engines:  # warm-up: page in the weights, start the threads
            say(f"warm-up: {engine.name}")
            engine.run(prompts(1, ours.vocab_size, 0))
        for round_number in range(args.rounds):
            for size in (1, BATCH):
                for engine in engines:
                    say(f"round {round_number + 1} of {args.rounds}, batch of {size}: {engine.name}")
                    bandwidth.append(_core.measure_read_bandwidth(args.threads))
                    figures = engine.run(prompts(size, ours.vocab_size, 1 + round_number))
                    results[engine.name][size].append(figures)

    peak = statistics.median(bandwidth)
    print(f"{processor()}, {args.threads} threads, {ours.engine.info()['device']}")
    print(f"prompt {PROMPT}, {NEW} new tokens, median of {args.rounds} rounds; commit {commit()}")
    print(f"read bandwidth {peak:.1f} GB/s (from {min(bandwidth):.1f} to {max(bandwidth):.1f})\n")
    print(
        "| engine | prefill, tok/s | decode, tok/s | GB/s | of bandwidth | batch-8 prefill | batch-8 decode |"
    )
    print("| --- | ---: | ---: | ---: | ---: | ---: | ---: |")
    for engine in engines:
        mid = {
            size: {k: statistics.median(r[k] for r in runs) for k in runs[0]}
            for size, runs in results[engine.name].items()
        }
        rate = mid[1].get("decode_GBps")
        share = ["–", "–"] if rate is None else [f"{rate:.1f}", f"{100 * rate / peak:.0f} %"]
        cells = [f"{mid[1]['prefill']:.0f}", f"{mid[1]['decode']:.1f}", *share]
        cells += [f"{mid[BATCH]['prefill']:.0f}", f"{mid[BATCH]['decode']:.1f}"]
        print(f"| {engine.name} | " + " | ".join(cells) + " |")

    if args.json:
        report = {
            "command": shlex.join(["python", *sys.orig_argv[1:]]),
            "commit": commit(), "processor": processor(),
            "threads": args.threads, "device": ours.engine.info()["device"],
            "prompt": PROMPT, "new_tokens": NEW,
            "read_bandwidth_GBps": bandwidth,
            "results": {name: {str(size): runs for size, runs in r.items()} for name, r in results.items()},
        }  # fmt: skip
        args.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
