"""`tiny-vllm convert`: a model in another form, whole or not at all."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import tiny_models
from helpers import MODEL_OPTIONS, Run, python_process
from tiny_vllm import model_files
from tiny_vllm.cli import convert
from tiny_vllm.gguf_export import write_gguf_bf16


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model with bfloat16 weights, without a tokenizer that GGUF files know."""
    folder = tmp_path_factory.mktemp("models") / "small"
    tiny_models.write_model("llama_untied", folder)
    (folder / "tokenizer.json").unlink()
    return folder


@pytest.fixture(scope="module")
def gguf(folder: Path) -> Path:
    return write_gguf_bf16(folder, folder.parent / "small.gguf")


def contents(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_gguf_file_becomes_a_folder(run: Run, gguf: Path, folder: Path, tmp_path: Path) -> None:
    target = tmp_path / "new"
    code, out, err = run("convert", str(gguf), str(target))
    assert (code, err) == (0, "")
    assert (target / "model.safetensors").stat().st_size == pytest.approx(
        (folder / "model.safetensors").stat().st_size, abs=2000
    )
    lines = [f"{target / name}: " for name in names(target)]
    assert [line[: len(begin)] for line, begin in zip(out.splitlines(), lines, strict=False)] == lines
    assert out.endswith(f'run it with: tiny-vllm run --model {target} "Hello"\n')
    assert {"config.json", "model.safetensors"} <= set(names(target))
    assert names(tmp_path) == ["new"]
    assert target.stat().st_mode & 0o777 == 0o755


def test_and_back_to_a_gguf_file(run: Run, gguf: Path, folder: Path, tmp_path: Path) -> None:
    for source, name in ((folder, "a.gguf"), (gguf, "b.gguf")):
        assert run("convert", str(source), str(tmp_path / name))[0] == 0
    assert (tmp_path / "a.gguf").read_bytes() == gguf.read_bytes()
    assert (tmp_path / "b.gguf").stat().st_size == pytest.approx(gguf.stat().st_size, abs=2000)
    assert names(tmp_path) == ["a.gguf", "b.gguf"]


def test_a_folder_is_copied(run: Run, rand_folder: Path, tmp_path: Path) -> None:
    """What the engine reads, and nothing else; and it runs."""
    source, target = tmp_path / "source", tmp_path / "target"
    shutil.copytree(rand_folder, source)
    (source / "model.safetensors").rename(tmp_path / "blob")  # the Hub's cache is made of links
    (source / "model.safetensors").symlink_to(tmp_path / "blob")
    (source / "README.md").write_text("not read")
    (source / "additional_chat_templates").mkdir()
    (source / "additional_chat_templates" / "tool.jinja").write_text("{{ messages }}")
    target.mkdir()  # an empty folder is in nobody's way
    assert run("convert", str(source), str(target))[0] == 0
    expected = contents(source)
    del expected["README.md"]
    assert contents(target) == expected
    assert not (target / "model.safetensors").is_symlink()
    common = ["--max-tokens", "3", *MODEL_OPTIONS]
    assert (
        run("run", "x", "--model", str(target), *common)[:2]
        == run("run", "x", "--model", str(source), *common)[:2]
    )


def test_the_bundled_model_has_a_name(
    run: Run, rand_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model_files, "bundled_model_folder", lambda: rand_folder)
    assert run("convert", "bundled", str(tmp_path / "out"))[0] == 0
    assert contents(tmp_path / "out") == contents(rand_folder)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bundled").mkdir()  # is named ./bundled
    assert run("convert", "bundled", "bundled")[0] == 0
    assert contents(tmp_path / "bundled") == contents(rand_folder)
    assert "is SOURCE itself" in run("convert", "./bundled", "bundled")[2]


@pytest.mark.parametrize("command", ["run", "bench", "chat"])
def test_it_has_that_name_everywhere(
    run: Run, rand_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    monkeypatch.setattr(model_files, "bundled_model_folder", lambda: rand_folder)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bundled").mkdir()
    arguments = {"run": ["x", "--max-tokens", "1"], "bench": ["--max-model-len", "64"], "chat": []}[command]
    _, _, err = run(command, "--model", "bundled", *arguments, *MODEL_OPTIONS)
    wanted = {
        "run": "1 generated tokens",
        "bench": "it needs room for 160",
        "chat": f"{rand_folder} has no chat",
    }
    assert wanted[command] in err
    for model in ("./bundled", str(tmp_path / "bundled")):
        assert "is not a model folder" in run(command, "--model", model, *arguments, *MODEL_OPTIONS)[2]
    assert model_files.resolve_model(Path("bundled")) == Path("bundled")


def test_a_copy_in_the_cache_is_told(
    gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """When it is made."""
    monkeypatch.setenv("TINY_VLLM_CACHE", str(tmp_path))
    folder = model_files.resolve_model(gguf)
    assert folder.parent == tmp_path / "gguf"
    assert re.fullmatch(
        rf"note: converted to {folder} \([0-9]+ MB\); later runs use it\n", capsys.readouterr().err
    )
    assert model_files.resolve_model(gguf) == folder
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("full", "full exists already; give a new name, or --force to replace it"),
        ("there.gguf", "there.gguf exists already; give a new name, or --force to replace it"),
        ("not/there", "not/there cannot be written: no such folder"),
        ("link", "link exists already"),
    ],
)
def test_what_stands_in_the_way_is_said_first(run: Run, tmp_path: Path, target: str, message: str) -> None:
    """Before the model is looked for."""
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "photo.jpg").write_text("")
    (tmp_path / "there.gguf").write_text("")
    (tmp_path / "link").symlink_to(tmp_path / "full")
    code, out, err = run("convert", "./not/a/model", str(tmp_path / target))
    assert (code, out) == (2, "")
    assert err.startswith("Usage: tiny-vllm convert ")
    assert f"Invalid value for TARGET: {tmp_path}/{message}" in err


@pytest.mark.parametrize("name", ["thesis.docx", "train.py", "photo.jpg"])
def test_force_takes_nobodys_work_along(run: Run, rand_folder: Path, tmp_path: Path, name: str) -> None:
    target = tmp_path / "model"
    assert run("convert", str(rand_folder), str(target))[0] == 0
    (target / name).write_text("work")
    code, _, err = run("convert", str(rand_folder), str(target), "--force")
    assert code == 2
    assert "is not a model folder" in " ".join(err.split())
    assert (target / name).read_text() == "work"


@pytest.mark.parametrize("name", ["~nosuchuser/x", "a" * 300])
def test_names_that_cannot_be(run: Run, rand_folder: Path, name: str) -> None:
    for arguments in (
        ("convert", name, "out"),
        ("convert", str(rand_folder), name),
        ("run", "--model", name, "x"),
    ):
        code, _, err = run(*arguments)
        assert code in (1, 2)
        assert "Traceback" not in err
        assert err


def test_force_replaces_models_only(
    run: Run, gguf: Path, folder: Path, rand_folder: Path, tmp_path: Path
) -> None:
    target, photos = tmp_path / "model", tmp_path / "photos"
    shutil.copytree(rand_folder, target)
    (target / "old.safetensors").write_text("")
    photos.mkdir()
    (photos / "photo.jpg").write_text("")
    assert run("convert", str(gguf), str(target))[0] == 2
    assert run("convert", str(gguf), str(target), "--force")[0] == 0
    assert not (target / "old.safetensors").exists()
    code, _, err = run("convert", str(gguf), str(photos), "--force")
    assert code == 2
    assert "photos is not a model folder, and --force replaces nothing else" in err
    (target / "checkpoints").mkdir()
    assert run("convert", str(gguf), str(target), "--force")[0] == 2  # somebody's other work
    (target / "checkpoints").rmdir()
    shutil.copy(gguf, target / "inside.gguf")
    code, _, err = run("convert", str(target / "inside.gguf"), str(target), "--force")
    assert code == 2
    assert "is not a model folder" in err
    code, _, err = run("convert", str(gguf), str(gguf), "--force")
    assert code == 2
    assert "is SOURCE itself" in err
    code, _, err = run("convert", str(rand_folder), str(rand_folder / "inside"))
    assert code == 2
    assert "lie one in the other" in err
    for text in ("my notes", ""):
        (tmp_path / "notes.gguf").write_text(text)
        code, _, err = run("convert", str(rand_folder), str(tmp_path / "notes.gguf"), "--force")
        assert code == 2
        assert "notes.gguf is not a GGUF file, and --force replaces nothing else" in err
        assert (tmp_path / "notes.gguf").read_text() == text
    shutil.copy(gguf, tmp_path / "notes.gguf")
    assert run("convert", str(folder), str(tmp_path / "notes.gguf"), "--force")[0] == 0
    (tmp_path / "notes.gguf").unlink()
    assert names(tmp_path) == ["model", "photos"]
    assert names(photos) == ["photo.jpg"]


def test_a_force_that_fails_leaves_the_old_model(
    run: Run, rand_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "model"
    shutil.copytree(rand_folder, target)
    before = contents(target)
    replace, calls = os.replace, []

    def failing(source: Path, into: Path) -> None:
        calls.append(into)
        if len(calls) == 2:
            raise OSError(5, "Input/output error")
        replace(source, into)

    monkeypatch.setattr(os, "replace", failing)
    code, out, err = run("convert", str(rand_folder), str(target), "--force")
    assert (code, out, err) == (1, "", f"Error: {target} cannot be written: Input/output error\n")
    assert contents(target) == before
    assert names(tmp_path) == ["model"]


@pytest.mark.parametrize("source", ["folder", "gguf"])
@pytest.mark.parametrize("target", ["new", "new.gguf"])
def test_a_full_disk_is_seen_before_the_work(
    run: Run,
    request: pytest.FixtureRequest,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    source: str,
    target: str,
) -> None:
    monkeypatch.setattr(convert.shutil, "disk_usage", lambda _: SimpleNamespace(free=1000))
    code, out, err = run("convert", str(request.getfixturevalue(source)), str(tmp_path / target))
    assert (code, out) == (1, "")
    assert re.fullmatch(
        f"Error: {tmp_path / target} needs [0-9.]+ [kM]B, and {tmp_path} has 1.0 kB free\n", err
    )
    assert names(tmp_path) == []


def test_a_folder_without_weights(run: Run, rand_folder: Path, tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    code, _, err = run("convert", str(source), str(tmp_path / "new"))
    assert code == 1
    assert "is not a model folder: it has no config.json" in err
    shutil.copy(rand_folder / "config.json", source)
    code, _, err = run("convert", str(source), str(tmp_path / "new"))
    assert code == 1
    assert err == f"ModelLoadError: {source} has no weights in safetensors files\n"
    assert names(tmp_path) == ["source"]


@pytest.mark.parametrize("target", ["new", "new.gguf"])
@pytest.mark.parametrize("source", ["folder", "gguf"])
def test_ctrl_c_leaves_nothing_behind(
    request: pytest.FixtureRequest, tmp_path: Path, source: str, target: str
) -> None:
    """It comes when the first bytes are written, and once more while it is cleaned up."""
    model = request.getfixturevalue(source)
    script = f"""
import os, shutil, signal, sys
from contextlib import contextmanager
from tiny_vllm.cli import convert, main
remove = shutil.rmtree

def slow(*arguments, **options):
    os.kill(os.getpid(), signal.SIGINT)
    remove(*arguments, **options)

@contextmanager
def bar(title):
    yield lambda done, total: os.kill(os.getpid(), signal.SIGINT)

convert.shutil.rmtree = slow
convert.byte_progress = bar
sys.argv = ["tiny-vllm", "convert", {str(model)!r}, {str(tmp_path / target)!r}]
main()
"""
    done = subprocess.run(python_process(script), capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (130, "")
    assert done.stderr in ("", f"stopped; {tmp_path / target} is as it was before\n")
    assert names(tmp_path) == []


@pytest.mark.parametrize("stop", [False, True])
def test_the_bar_is_erased(
    run: Run, gguf: Path, tmp_path: Path, terminal: None, monkeypatch: pytest.MonkeyPatch, stop: bool
) -> None:
    """Also by Ctrl-C; and the cursor is seen again."""
    work = convert.convert_gguf

    def interrupted(source: Path, target: Path, progress: Callable[[int, int], None]) -> Path:
        result = work(source, target, progress)
        if stop:
            signal.raise_signal(signal.SIGINT)
        return result

    monkeypatch.setattr(convert, "convert_gguf", interrupted)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        code, _, err = run("convert", str(gguf), str(tmp_path / "new"))
    finally:
        signal.signal(signal.SIGINT, before)
    assert code == (130 if stop else 0)
    bars, after = err.rsplit("\x1b[2K", 1)
    assert "Converting small.gguf" in bars
    assert bars.rindex("\x1b[?25h") > bars.rindex("\x1b[?25l")
    assert after == (f"stopped; {tmp_path / 'new'} is as it was before\n" if stop else "")
    assert names(tmp_path) == ([] if stop else ["new"])
