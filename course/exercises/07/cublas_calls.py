"""Exercise 7.1: what to ask cuBLAS for.

cuBLAS reads memory column after column, and computes C (m x n) = op(A) (m x k) · op(B) (k x n), where op is
"N", as it is, or "T", transposed. A leading dimension is the distance from where a column begins in memory
to where the next one does.

Our matrices lie row after row: x (M, K), weight, and out (M, N).
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Call:
    op_a: str  # "N" or "T"
    op_b: str
    m: int
    n: int
    k: int
    a: str  # "x" or "weight": whose memory
    lda: int
    b: str
    ldb: int
    ldc: int  # C is out's memory


def with_weight_rows(m: int, n: int, k: int) -> Call:
    """out (M, N) = x (M, K) · weight (N, K)ᵀ: what the engine does."""
    raise NotImplementedError("Your turn")


def with_weight_columns(m: int, n: int, k: int) -> Call:
    """out (M, N) = x (M, K) · weight (K, N): how GPT-2 keeps its weights."""
    raise NotImplementedError("Your turn")


def with_part_of_rows(m: int, n: int, k: int, width: int) -> Call:
    """out (M, N) = x · weight (N, K)ᵀ, where x is the first K columns of a matrix (M, width)."""
    raise NotImplementedError("Your turn")
