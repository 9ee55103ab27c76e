"""Exercise 9.2: a detector of attentions that see the future, on honest ones and others."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from conftest import Exercise


def attention(q: Any, k: Any, v: Any, kind: str) -> Any:
    rows = q.shape[0]
    scores = q @ k.T / np.sqrt(q.shape[1])
    hidden = np.triu(np.ones((rows, rows), bool), 1)
    if kind == "one too many":
        hidden = np.triu(np.ones((rows, rows), bool), 2)
    if kind == "last two rows":
        hidden[-2] = False
    if kind == "first row, second token":
        hidden[0, 1] = False
    if kind == "first row, last token":
        hidden[0, -1] = False
    if kind == "window":  # sees the last 3, itself included
        hidden |= ~np.triu(np.ones((rows, rows), bool), -2)
    if kind == "score 0":
        scores = np.where(hidden, 0, scores)
    elif kind not in ("no mask", "weight 0", "value shift"):
        scores = np.where(hidden, -np.inf, scores)
    e = np.exp(scores)
    weights = e / e.sum(axis=1, keepdims=True)
    if kind == "weight 0":
        weights = np.where(hidden, 0, weights)
    if kind == "value shift":  # keys are masked; the values are those of the next token
        e = np.exp(np.where(hidden, -np.inf, scores))
        weights = e / e.sum(axis=1, keepdims=True)
        v = np.roll(v, -1, axis=0)
    return weights @ v


@pytest.mark.parametrize("kind", ["causal", "window"])
def test_honest_ones_are_cleared(exercise: Exercise, kind: str) -> None:
    looks_ahead = exercise.python("looks_ahead.py").looks_ahead
    assert looks_ahead(lambda q, k, v: attention(q, k, v, kind)) is False


@pytest.mark.parametrize(
    "kind",
    [
        "no mask",
        "one too many",
        "score 0",
        "weight 0",
        "value shift",
        "last two rows",
        "first row, second token",
        "first row, last token",
    ],
)
def test_others_are_found(exercise: Exercise, kind: str) -> None:
    looks_ahead = exercise.python("looks_ahead.py").looks_ahead
    assert looks_ahead(lambda q, k, v: attention(q, k, v, kind)) is True
