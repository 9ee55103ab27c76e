"""The tiny models are the ones that the golden numbers were computed from."""

from __future__ import annotations

from pathlib import Path

import pytest
import tiny_models

GOLDEN = tiny_models.load_golden()["models"]


def test_every_model_has_golden_numbers() -> None:
    assert len(GOLDEN) == 29
    assert list(GOLDEN) == list(tiny_models.MODELS)


@pytest.mark.parametrize("name", tiny_models.MODELS)
def test_weights_are_byte_identical(name: str, tmp_path: Path) -> None:
    assert tiny_models.write_model(name, tmp_path / name) == GOLDEN[name]["weights_sha256"]
    assert [p["n"] for p in GOLDEN[name]["prompts"]] == list(tiny_models.MODELS[name].prompt_lengths)
