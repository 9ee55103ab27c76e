"""Downloads against a small Hub on the loopback interface, each in a process of its own."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from helpers import python_process
from hub_server import Hub, serve

MODEL = "org/some-model.v1"
FIRST, SECOND = "1" * 40, "2" * 40
NEEDED = {
    "config.json": b'{"a": 1}',
    "generation_config.json": b'{"b": 1}',
    "model.safetensors.index.json": json.dumps(
        {"weight_map": {"x": "model-00001-of-00002.safetensors", "y": "model-00002-of-00002.safetensors"}}
    ).encode(),
    "model-00001-of-00002.safetensors": b"first",
    "model-00002-of-00002.safetensors": b"second",
    "tokenizer.json": b'{"c": 1}',
    "tokenizer.model": b"pieces",
    "tokenizer_config.json": b'{"d": 1}',
    "special_tokens_map.json": b'{"e": 1}',
    "chat_template.jinja": b"hello",
    "additional_chat_templates/rag.jinja": b"rag",
}
USELESS = {
    "README.md": b"read me",
    "LICENSE": b"free",
    "pytorch_model.bin": b"pickle",
    "consolidated.safetensors": b"the same in another format",
    "consolidated.00.pth": b"and another",
    "original/tokenizer.model": b"copy",
    "original/consolidated.safetensors": b"copies",
    "onnx/model.safetensors": b"onnx",
    "model.fp16.safetensors": b"half",
    "adapter_model.safetensors": b"adapter",
    "figure.png": b"picture",
    "training_args.json": b"{}",
}
SMALL = {"config.json": b"{}", "model.safetensors": b"weights"}

SCRIPT = """
import json, sys
from tiny_vllm.hub import download
answers = []
for call in json.loads(sys.argv[1]):
    try:
        answers.append(str(download(**call)))
    except Exception as error:
        answers.append([type(error).__name__, str(error)])
print(json.dumps(answers))
"""


def variables(hub: Hub, home: Path) -> dict[str, str]:
    """The environment of a process that knows this Hub only."""
    found = {k: v for k, v in os.environ.items() if not k.startswith(("HF_", "HUGGING"))}
    found.update(HF_ENDPOINT=hub.endpoint, HF_HOME=str(home), HF_HUB_DISABLE_TELEMETRY="1")
    found.update(HF_HUB_DISABLE_XET="1", NO_PROXY="127.0.0.1")
    return found


def download(hub: Hub, home: Path, *calls: dict[str, Any], **environment: str) -> list[Any]:
    """Results of hub.download(MODEL, **call) in a new process: a path, or the kind and text of the error."""
    arguments = json.dumps([{"model_id": MODEL, **call} for call in calls or ({},)])
    result = subprocess.run(
        [sys.executable, "-c", SCRIPT, arguments],
        env={**variables(hub, home), **environment},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert result.returncode == 0, result.stderr
    assert "Fetching" not in result.stderr  # no bar where there is no terminal
    return json.loads(result.stdout)


def files_in(folder: str) -> dict[str, bytes]:
    paths = [path for path in Path(folder).rglob("*") if path.is_file()]
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in paths}


def refusal(answer: Any) -> str:
    kind, text = answer
    assert kind == "ModelLoadError", answer
    assert MODEL in text
    return str(text)


def test_only_what_is_needed_is_fetched(tmp_path: Path) -> None:
    with serve(Hub(MODEL, {FIRST: {**NEEDED, **USELESS}}, {"main": FIRST})) as hub:
        (folder,) = download(hub, tmp_path)
        assert files_in(folder) == NEEDED
        assert hub.requested("GET") == sorted(NEEDED)
        assert not any("Authorization" in headers for _, _, headers in hub.log)

        # A second time only the revision is asked for.
        hub.log.clear()
        assert download(hub, tmp_path, {}, {"local_files_only": True}) == [folder, folder]
        assert hub.requested("GET") == hub.requested("HEAD") == []
    # Without the network there is the cache, asked for or not.
    assert download(hub, tmp_path) == [folder]
    assert download(hub, tmp_path, HF_HUB_OFFLINE="1") == [folder]


def test_revisions_and_another_cache(tmp_path: Path) -> None:
    newer = {**SMALL, "config.json": b'{"new": 1}'}
    revisions = {FIRST: SMALL, SECOND: newer}
    with serve(Hub(MODEL, revisions, {"main": FIRST, "next": SECOND})) as hub:
        old, branch, commit, unknown, elsewhere = download(
            hub,
            tmp_path / "home",
            {},
            {"revision": "next"},
            {"revision": SECOND},
            {"revision": "no-such-branch"},
            {"cache_dir": str(tmp_path / "caché 2")},
        )
    assert files_in(old) == SMALL
    assert files_in(branch) == newer
    assert commit == branch
    assert "(revision no-such-branch) exists, but not in this revision" in refusal(unknown)
    assert files_in(elsewhere) == SMALL
    assert Path(elsewhere).is_relative_to(tmp_path / "caché 2")


def test_ctrl_c_ends_a_download(tmp_path: Path) -> None:
    """Within a piece of a file, and not when the file is whole."""
    weights = bytes(1 << 20) * 400
    files = {**SMALL, "model.safetensors": weights}
    with serve(Hub(MODEL, {FIRST: files}, {"main": FIRST}, slow=True)) as hub:
        process = subprocess.Popen(
            python_process(f"from tiny_vllm.hub import download\ndownload({MODEL!r})"),
            env=variables(hub, tmp_path),
            stderr=subprocess.PIPE,
            text=True,
        )
        while hub.sent < 12 << 20:
            assert process.poll() is None
            time.sleep(0.01)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=60)
        assert err.rstrip().endswith("KeyboardInterrupt")
        assert hub.sent < len(weights) // 2


@pytest.mark.slow
def test_a_connection_that_breaks_is_taken_up_again(tmp_path: Path) -> None:
    weights = os.urandom(1 << 20) * 24  # the library writes pieces of 10 MB
    with serve(Hub(MODEL, {FIRST: {**SMALL, "model.safetensors": weights}}, {"main": FIRST})) as hub:
        hub.cut_after = 12_000_000
        (folder,) = download(hub, tmp_path)
        assert hub.cut_after is None
        assert files_in(folder)["model.safetensors"] == weights
        gets = [
            headers for method, path, headers in hub.log if method == "GET" and path.endswith("safetensors")
        ]
        ranges = [{k.lower(): v for k, v in headers.items()}.get("range") for headers in gets]
        assert ranges == [None, "bytes=10485760-"]


@pytest.mark.slow
def test_after_a_failure_only_the_missing_files_are_fetched(tmp_path: Path) -> None:
    with serve(Hub(MODEL, {FIRST: NEEDED}, {"main": FIRST})) as hub:
        broken = hub.broken = "model-00002-of-00002.safetensors"
        text = refusal(download(hub, tmp_path)[0])
        assert "500" in text
        # What there is so far is not mistaken for the model.
        assert "not (wholly) in the cache" in refusal(download(hub, tmp_path, {"local_files_only": True})[0])
        fetched = set(hub.requested("GET"))
        hub.broken = None
        hub.log.clear()
        (folder,) = download(hub, tmp_path)
        assert files_in(folder) == NEEDED
        assert set(hub.requested("GET")) == set(NEEDED) - (fetched - {broken})


def test_tokens(tmp_path: Path) -> None:
    with serve(Hub(MODEL, {FIRST: SMALL}, {"main": FIRST}, token="hf_secret")) as hub:
        none, wrong, right = download(hub, tmp_path / "1", {}, {"token": "hf_wrong"}, {"token": "hf_secret"})
        assert "if the model is private, give a token" in refusal(none)
        assert "the token is not valid" in refusal(wrong)
        assert files_in(right) == SMALL
        assert files_in(download(hub, tmp_path / "2", HF_TOKEN="hf_secret")[0]) == SMALL
        assert "hf_secret" not in str((none, wrong, right))

        hub.gated = True
        without, refused = download(hub, tmp_path / "3", {}, {"token": "hf_secret"})
        for answer in (without, refused):
            assert f"is gated: accept its licence at {hub.endpoint}/{MODEL}" in refusal(answer)


def test_what_is_not_there(tmp_path: Path) -> None:
    with serve(Hub("other/model", {FIRST: SMALL}, {"main": FIRST})) as hub:
        unknown, hidden, local = download(hub, tmp_path, {"token": "hf_x"}, {}, {"local_files_only": True})
        assert "was not found" in refusal(unknown)
        assert "private" not in refusal(unknown)
        assert "private" in refusal(hidden)
        assert "local_files_only or HF_HUB_OFFLINE forbids" in refusal(local)
        assert "HF_HUB_OFFLINE forbids" in refusal(download(hub, tmp_path, HF_HUB_OFFLINE="1")[0])
        hub.model_id = "x"
    unreachable = f"{hub.endpoint} cannot be reached; check the name, or the network"
    assert unreachable in refusal(download(hub, tmp_path)[0])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("files", "match"),
    [
        ({"config.json": b"{}", "pytorch_model.bin": b"x"}, "has no model.safetensors"),
        ({"model.safetensors": b"x"}, "has no config.json"),
        ({"config.json": b"{}", "model.safetensors.index.json": b"[]"}, "weight_map"),
        ({k: v for k, v in NEEDED.items() if "00002-of" not in k}, "has no model-00002-of-00002.safetensors"),
    ],
)
def test_a_repository_that_is_not_a_whole_model(files: dict[str, bytes], match: str, tmp_path: Path) -> None:
    with serve(Hub(MODEL, {FIRST: files}, {"main": FIRST})) as hub:
        kind, text = download(hub, tmp_path)[0]
    assert kind == "ModelLoadError"
    assert match in text
