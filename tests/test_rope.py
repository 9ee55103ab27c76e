"""Rotary angles against those of transformers, recorded and live."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import tiny_models
from tiny_vllm import _core
from tiny_vllm.errors import InvalidRequestError

DATA = Path(__file__).resolve().parent / "data"
GOLDEN = json.loads((DATA / "rope_golden.json").read_text(encoding="utf-8"))["cases"]

Floats = npt.NDArray[np.float64]


def rope_of(config: dict[str, Any]) -> Any:
    return _core.Rope(_core.parse_config(json.dumps(config)))


def check(rope: Any, expected: dict[str, Any]) -> None:
    """Frequencies within four units of the last place, and angles as exact as the frequencies allow: off by
    position times the difference in frequency, and by the rounding of the product and of cos and sin."""
    assert rope.attention_scaling == pytest.approx(expected["attention_scaling"], rel=1e-7)
    for row in expected["rows"]:
        position = row["position"]
        inv_freq: Floats = np.array(row["inv_freq"])
        ours: Floats = rope.inv_freq(position + 1).astype(np.float64)
        np.testing.assert_allclose(ours, inv_freq, rtol=2.0**-21)
        cos_sin: Floats = np.array(row["cos_sin"])
        got = rope.cos_sin(position, position + 1)
        assert got.dtype == np.float32
        angle_error = position * np.abs(ours - inv_freq) + position * inv_freq * 2.0**-23
        bound = rope.attention_scaling * (angle_error + 2.0**-22)
        assert (np.abs(got - cos_sin) <= bound[:, None]).all(), (position, np.abs(got - cos_sin).max())


@pytest.mark.parametrize("name", GOLDEN)
def test_same_as_transformers_recorded(name: str) -> None:
    check(rope_of(GOLDEN[name]["config"]), GOLDEN[name])


def test_the_recorded_cases_differ() -> None:
    """A kind of rope that falls back to another one would otherwise go unseen."""
    last = {name: np.array(case["rows"][-1]["inv_freq"]) for name, case in GOLDEN.items()}
    plain = last["default"]
    for name in (
        "linear",
        "dynamic",
        "yarn",
        "yarn, no original length",
        "yarn, not truncated",
        "yarn, a step",
    ):
        assert np.abs(last[name] / plain - 1).max() > 0.1, name
    for a, b in (
        ("yarn", "yarn, not truncated"),
        ("yarn", "yarn, a step"),
        ("yarn", "yarn, no original length"),
    ):
        assert np.abs(last[a] / last[b] - 1).max() > 0.01, (a, b)
    assert GOLDEN["yarn, mscale"]["attention_scaling"] != GOLDEN["yarn"]["attention_scaling"]


@pytest.mark.slow
@pytest.mark.usefixtures("transformers")
def test_same_as_transformers_live() -> None:
    sys.path.insert(0, str(DATA))
    import make_rope_golden

    assert list(make_rope_golden.CASES) == list(GOLDEN)
    for config in make_rope_golden.CASES.values():
        check(rope_of(config), make_rope_golden.angles_of(config))
    for name in tiny_models.MODELS:
        config = tiny_models.config_of(name)
        check(rope_of(config), make_rope_golden.angles_of(config))


def test_llama_3_2_1b_against_its_definition() -> None:
    """In float64 from the formula: 32 frequencies, of which the slow ones are divided by 32."""
    rope = rope_of(GOLDEN["llama 3.2 1b"]["config"])
    plain = 500000.0 ** -(np.arange(32) / 32)
    turns = 8192 * plain / (2 * np.pi)
    smooth = np.clip((turns - 1) / (4 - 1), 0, 1)
    expected = plain * (smooth + (1 - smooth) / 32)
    np.testing.assert_allclose(rope.inv_freq(), expected, rtol=1e-6)
    assert (smooth == 1).sum() > 10
    assert (smooth == 0).sum() > 10
    assert ((smooth > 0) & (smooth < 1)).any()
    for position in (1, 17, 4095):
        pairs = rope.cos_sin(position)
        expected_pairs = np.stack([np.cos(position * expected), np.sin(position * expected)], axis=-1)
        np.testing.assert_allclose(pairs, expected_pairs, atol=position * 1e-6)


@pytest.mark.parametrize("name", GOLDEN)
def test_position_zero_does_not_turn(name: str) -> None:
    rope = rope_of(GOLDEN[name]["config"])
    pairs = rope.cos_sin(0)
    assert (pairs[:, 0] == np.float32(rope.attention_scaling)).all()
    assert (pairs[:, 1] == 0).all()


def test_only_dynamic_scaling_looks_at_the_length() -> None:
    for name, case in GOLDEN.items():
        rope = rope_of(case["config"])
        assert rope.depends_on_length == (name == "dynamic")
        same = np.array_equal(rope.cos_sin(100, 101), rope.cos_sin(100, 100_000))
        assert same == (name != "dynamic")


def test_dynamic_scaling_starts_at_the_trained_length_and_remembers_nothing() -> None:
    rope = rope_of(GOLDEN["dynamic"]["config"])
    plain = rope_of(GOLDEN["default"]["config"])
    for length in (1, 4095, 4096):
        assert np.array_equal(rope.inv_freq(length), plain.inv_freq())
    fresh = {n: rope_of(GOLDEN["dynamic"]["config"]).inv_freq(n) for n in (4097, 5000, 9000)}
    assert (fresh[5000][1:] < plain.inv_freq()[1:]).all()
    for length in (5000, 4096, 9000, 5000, 4097, 9000):  # going back and forth
        assert np.array_equal(rope.inv_freq(length), fresh.get(length, plain.inv_freq()))


def test_negative_positions_are_refused() -> None:
    with pytest.raises(InvalidRequestError, match="position must be 0 or more, found -1"):
        rope_of(GOLDEN["default"]["config"]).cos_sin(-1)
