"""Exercise 12.3: no two buffers overlap while both are needed, and no memory is wasted."""

from __future__ import annotations

import numpy as np
import pytest
from conftest import Exercise

# A layer of the small model; sizes in numbers of a row.
LAYER = [
    ([], ["residual"]),
    (["residual"], ["hidden"]),
    (["hidden"], ["qkv"]),
    (["qkv"], ["qkv"]),
    (["qkv"], ["attention"]),
    (["attention", "residual"], ["residual"]),
    (["residual"], ["hidden again"]),
    (["hidden again"], ["gate_up"]),
    (["gate_up"], ["mlp"]),
    (["mlp", "residual"], ["residual"]),
]
SIZES = {"residual": 576, "hidden": 576, "qkv": 960, "attention": 576, "hidden again": 576} | {
    "gate_up": 3072,
    "mlp": 1536,
}


def _check(ops: list[tuple[list[str], list[str]]], sizes: dict[str, int], begins: dict[str, int]) -> int:
    """The memory that is used."""
    named = {name for op in ops for names in op for name in names}
    assert set(begins) == named
    assert min(begins.values()) >= 0
    places = {n: [i for i, op in enumerate(ops) if n in op[0] or n in op[1]] for n in named}
    for a in named:
        for b in named - {a}:
            together = min(places[a][-1], places[b][-1]) >= max(places[a][0], places[b][0])
            overlap = begins[a] < begins[b] + sizes[b] and begins[b] < begins[a] + sizes[a]
            assert not (together and overlap), f"{a} and {b} overlap while both are needed"
    return max(begins[n] + sizes[n] for n in named)


def test_a_layer_needs_what_its_largest_op_needs(exercise: Exercise) -> None:
    begins = exercise.python("share_memory.py").place(LAYER, SIZES)
    assert _check(LAYER, SIZES, begins) == 576 + 3072 + 1536


def test_a_chain_needs_two(exercise: Exercise) -> None:
    ops: list[tuple[list[str], list[str]]] = [([f"b{i}"], [f"b{i + 1}"]) for i in range(9)]
    sizes = {f"b{i}": 100 for i in range(10)}
    assert _check(ops, sizes, exercise.python("share_memory.py").place(ops, sizes)) == 200


@pytest.mark.parametrize("seed", range(20))
def test_nothing_overlaps(exercise: Exercise, seed: int) -> None:
    rng = np.random.default_rng(seed)
    names = [f"b{i}" for i in range(12)]
    sizes = {name: int(rng.integers(1, 100)) for name in names}
    ops: list[tuple[list[str], list[str]]] = [
        (list(rng.choice(names, 2, replace=False)), list(rng.choice(names, 1))) for _ in range(15)
    ]
    _check(ops, sizes, exercise.python("share_memory.py").place(ops, sizes))
