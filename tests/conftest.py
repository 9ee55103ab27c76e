"""What all tests share. Models are written once for each test process; they are small."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path
from typing import Any, NoReturn

import fixtures
import pytest
from helpers import Run
from tiny_vllm import cache


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--device", choices=["cpu", "cuda"], default="cpu", help="what the engines and ops run on"
    )


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--device") == "cuda":
        os.environ["TINY_VLLM_TEST_DEVICE"] = (
            "cuda"  # read by helpers.py and ways.py, also in workers of xdist
        )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """With --device cuda, what is about the CPU alone is left out; without it, what needs a GPU."""
    unwanted = "cpu_only" if config.getoption("--device") == "cuda" else "gpu"
    out = [item for item in items if item.get_closest_marker(unwanted)]
    if out:
        config.hook.pytest_deselected(items=out)
        items[:] = [item for item in items if not item.get_closest_marker(unwanted)]


def missing(reason: str) -> NoReturn:
    """Ends a test that lacks something: skips it, but fails in the full run, where nothing may be missing."""
    if os.environ.get("TINY_VLLM_FULL_TEST") == "1":
        pytest.fail(reason + ", and TINY_VLLM_FULL_TEST=1 asks for everything")
    pytest.skip(reason)


def require_package(name: str) -> None:
    """For tests against another library."""
    if importlib.util.find_spec(name) is None:
        missing(f"the package {name} is not installed")


@pytest.fixture(scope="session")
def transformers() -> Any:
    """The module."""
    require_package("torch")
    require_package("transformers")
    import transformers as module

    module.logging.set_verbosity_error()
    return module


@pytest.fixture(scope="session")
def bundled_folder() -> Path:
    """The folder of the bundled model; the first use fetches it."""
    from tiny_vllm.bundled import bundled_model_folder
    from tiny_vllm.errors import ModelLoadError

    try:
        return bundled_model_folder()
    except ModelLoadError as error:
        missing(str(error))


@pytest.fixture(scope="session")
def rand_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """RAND with a byte-level tokenizer, in float32. No token ends its text."""
    folder = fixtures.write_rand(tmp_path_factory.mktemp("rand"))
    fixtures.write_byte_tokenizer(folder)
    return folder


@pytest.fixture(scope="session")
def rand_bf16_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same with bfloat16 weights."""
    folder = fixtures.write_rand(tmp_path_factory.mktemp("rand-bf16"), dtype="bfloat16")
    fixtures.write_byte_tokenizer(folder)
    return folder


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    return Run(monkeypatch, capsys)


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if the error stream were a terminal."""
    monkeypatch.setenv("TTY_COMPATIBLE", "1")
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(cache.console, "is_interactive", True)
