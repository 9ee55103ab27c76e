"""Each op of the forward pass on numpy arrays, one call an idea.

These are the engine's own kernels, not copies of them. Arrays are float32, or bfloat16
(`ml_dtypes.bfloat16`); all arrays of a call have the same type. Inputs are never changed; results are new
arrays.

Every function takes

- `device`: "cpu" or "cuda"
- `isa`: CPU instruction set, one of `available_isas()`, or "auto" for the best one
- `num_threads`: CPU threads, 0 for as many as this process may use

and raises `DeviceError` when the device or instruction set cannot be used and `InvalidRequestError`, which
names the argument, when shapes or types do not fit together or a number is out of range. Numbers that count
or name something are whole numbers: 1.9 is refused, not cut to 1.

Shapes: T tokens, D hidden size, H query heads, Hk KV heads, Dh head dim, F feed-forward width, NB blocks,
BS block size, R requests, B blocks of the longest request.
"""

from __future__ import annotations

import functools
import math
import operator
import threading
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from tiny_vllm import _core
from tiny_vllm._core import available_isas
from tiny_vllm.cuda_libraries import find_cuda_libraries
from tiny_vllm.errors import InvalidRequestError, shown

__all__ = [
    "act_mul",
    "available_isas",
    "bfloat16",
    "copy_block",
    "embedding",
    "gather_rows",
    "matmul",
    "matmul_add",
    "measure_read_bandwidth",
    "norm_matmul",
    "paged_attention",
    "rms_norm",
    "rope_and_cache",
    "sample",
]

Array = npt.NDArray[Any]
bfloat16: np.dtype[Any] = np.dtype(ml_dtypes.bfloat16)


_INT32_MAX = 2**31 - 1
_FLOAT32_MAX = float(np.finfo(np.float32).max)
_FLOAT64_MAX = float(np.finfo(np.float64).max)


@functools.lru_cache(maxsize=16)
def _made_ops(device: str, isa: str, num_threads: int, thread: int) -> _core.Ops:
    find_cuda_libraries(device)
    return _core.Ops(device=device, num_threads=num_threads, cpu_isa=isa)


def _ops(device: str, isa: str, num_threads: int) -> _core.Ops:
    _check_text("device", device)
    _check_text("isa", isa)
    # A GPU's stream and scratch memory are one caller's at a time, so each thread gets its own.
    thread = threading.get_ident() if device == "cuda" else 0
    return _made_ops(device, isa, _whole_number("num_threads", num_threads, 0, _INT32_MAX), thread)


def _to_device(ops: _core.Ops, array: Array) -> _core.DeviceArray:
    return ops.array(array.view(np.uint16) if array.dtype == bfloat16 else array)


def _to_numpy(array: _core.DeviceArray) -> Array:
    result: Array = array.numpy()
    return result.view(bfloat16) if array.dtype == "bfloat16" else result


def _poisoned(ops: _core.Ops, shape: tuple[int, ...], dtype: np.dtype[Any]) -> _core.DeviceArray:
    """An output full of NaN: whatever an op forgets to write is seen."""
    return _to_device(ops, np.full(shape, np.nan, dtype))


def _check(condition: bool, message: str) -> None:
    if not condition:
        raise InvalidRequestError(message)


def _check_text(name: str, value: Any) -> None:
    _check(isinstance(value, str), f"{name} is {shown(value)}, expected text")


def _whole_number(name: str, value: Any, low: int, high: int) -> int:
    try:
        number = low - 1 if isinstance(value, (bool, np.bool_)) else operator.index(value)
    except TypeError:
        number = low - 1
    _check(low <= number <= high, f"{name} is {shown(value)}, expected a whole number from {low} to {high}")
    return number


def _is_number(value: Any, low: float, high: float) -> bool:
    if isinstance(value, bool) or not isinstance(value, (int, float, np.integer, np.floating)):
        return False
    return low <= (value if isinstance(value, int) else float(value)) <= high


def _real_number(name: str, value: Any, low: float = -_FLOAT32_MAX) -> float:
    """A finite number of at least `low` that float32 can hold."""
    fits = _is_number(value, low, _FLOAT32_MAX)
    expected = "a finite float32" + (" of 0 or more" if low == 0 else "")
    _check(fits, f"{name} is {shown(value)}, expected {expected}")
    return float(value)


def _whole_numbers(name: str, values: npt.ArrayLike, ndim: int, kind: Any = np.int32) -> Array:
    """`values` as an array of int32 or int64 that holds the same numbers: nothing is rounded or wrapped."""
    info = np.iinfo(kind)
    try:
        array = np.asarray(values)
    except (TypeError, ValueError, OverflowError):  # such as rows of different lengths
        array = np.asarray(None)
    if array.size == 0 and array.dtype.kind == "f":  # numpy's type for an empty list
        array = array.astype(kind)
    whole = array.dtype.kind in "iu"
    fits = whole and (array.size == 0 or (array.min() >= info.min and array.max() <= info.max))
    _check(fits, f"{name} must hold whole numbers that {info.dtype} can hold")
    _check(array.ndim == ndim, f"{name} has shape {array.shape}, expected {ndim} dimension{'s' * (ndim > 1)}")
    return array.astype(kind)


def _finite_number(name: str, value: Any) -> float:
    _check(
        _is_number(value, -_FLOAT64_MAX, _FLOAT64_MAX), f"{name} is {shown(value)}, expected a finite number"
    )
    return float(value)


def _for_each_row(name: str, value: Any, rows: int, checked: Callable[[str, Any], Any]) -> list[Any]:
    """One number for all rows, or one for each row, as a list that `checked` has been through."""
    column: Any
    if isinstance(value, (list, tuple)):
        column = list(value)  # numpy would make floats of [2**64 - 1, 1]
    else:
        try:
            array = np.asarray(value)
            column = value if array.dtype.kind in "mM" else array.tolist()  # times may become plain numbers
        except (TypeError, ValueError, OverflowError):
            column = value
    if not isinstance(column, list):
        return [checked(name, column)] * rows
    _check(
        len(column) == rows, f"{name} has {len(column)} values, expected one, or one for each of {rows} rows"
    )
    return [checked(f"{name}[{row}]", number) for row, number in enumerate(column)]


def _check_array(name: str, array: Any) -> None:
    found = type(array).__name__
    _check(isinstance(array, np.ndarray), f"{name} is of type {found}, expected a numpy array")


def _check_types(first: str, x: Array, **others: Array) -> np.dtype[Any]:
    """All arrays of a call have one type, float32 or bfloat16."""
    for name, array in {first: x, **others}.items():
        _check_array(name, array)
    dtype = x.dtype
    _check(dtype == np.float32 or dtype == bfloat16, f"{first} is {dtype}, expected float32 or bfloat16")
    for name, array in others.items():
        _check(array.dtype == dtype, f"{name} is {array.dtype}, but {first} is {dtype}")
    return dtype


def _given(**optional: Array | None) -> dict[str, Array]:
    """Those of the arguments that are not None."""
    return {name: array for name, array in optional.items() if array is not None}


def _check_shape(name: str, array: Array, shape: tuple[int, ...]) -> None:
    _check(array.shape == shape, f"{name} has shape {array.shape}, expected {shape}")


def measure_read_bandwidth(num_threads: int = 0, bytes: int = 1 << 29) -> float:
    """GB/s that this many threads read memory with: the ceiling of decoding. 0: all CPUs of this process."""
    threads = _whole_number("num_threads", num_threads, 0, _INT32_MAX)
    return _core.measure_read_bandwidth(threads, _whole_number("bytes", bytes, 1, 2**63 - 1))


def embedding(
    table: Array, ids: npt.ArrayLike, *, device: str = "cpu", isa: str = "auto", num_threads: int = 0
) -> Array:
    """table (V, D), ids (T) -> (T, D): row ids[t] of the table for each token."""
    return _gather("table", table, "ids", ids, _ops(device, isa, num_threads))


def gather_rows(
    x: Array, rows: npt.ArrayLike, *, device: str = "cpu", isa: str = "auto", num_threads: int = 0
) -> Array:
    """x (T, D), rows (n) -> (n, D)."""
    return _gather("x", x, "rows", rows, _ops(device, isa, num_threads))


def _gather(name: str, x: Array, rows_name: str, rows: npt.ArrayLike, ops: _core.Ops) -> Array:
    dtype = _check_types(name, x)
    _check(x.ndim == 2, f"{name} has shape {x.shape}, expected two dimensions")
    numbers = _whole_numbers(rows_name, rows, 1)
    for row in numbers[(numbers < 0) | (numbers >= x.shape[0])][:1]:
        _check(False, f"{rows_name} has row {row} of a table with {x.shape[0]} rows")
    out = _poisoned(ops, (numbers.size, x.shape[1]), dtype)
    ops.gather_rows(_to_device(ops, x), numbers, out)
    return _to_numpy(out)


def rms_norm(
    x: Array,
    weight: Array,
    eps: float = 1e-5,
    *,
    device: str = "cpu",
    isa: str = "auto",
    num_threads: int = 0,
) -> Array:
    """x (T, D), weight (D) -> (T, D): round(x / sqrt(mean(x²) + eps)) * weight, per row.

    Source: Zhang and Sennrich, arXiv 1910.07467; rounded as the Hugging Face models round.
    """
    dtype = _check_types("x", x, weight=weight)
    _check(x.ndim == 2, f"x has shape {x.shape}, expected two dimensions")
    _check_shape("weight", weight, x.shape[1:])
    eps = _real_number("eps", eps, 0)
    ops = _ops(device, isa, num_threads)
    out = _poisoned(ops, x.shape, dtype)
    ops.rms_norm(_to_device(ops, x), _to_device(ops, weight), eps, out)
    return _to_numpy(out)


def _check_product(x: Array, weight: Array, bias: Array | None) -> None:
    """x (T, K), weight (N, K), bias (N) or None."""
    _check(
        x.ndim == 2 and weight.ndim == 2, f"x {x.shape} and weight {weight.shape} must have two dimensions"
    )
    _check(x.shape[1] == weight.shape[1], f"x has {x.shape[1]} columns, but weight {weight.shape[1]}")
    if bias is not None:
        _check_shape("bias", bias, weight.shape[:1])


def matmul(
    x: Array,
    weight: Array,
    bias: Array | None = None,
    *,
    out_dtype: npt.DTypeLike | None = None,
    device: str = "cpu",
    isa: str = "auto",
    num_threads: int = 0,
) -> Array:
    """x (T, K), weight (N, K), bias (N) or None -> x weightᵀ + bias (T, N).

    out_dtype: the type of x, or float32.
    """
    dtype = _check_types("x", x, weight=weight, **_given(bias=bias))
    _check_product(x, weight, bias)
    try:
        result = dtype if out_dtype is None else np.dtype(out_dtype)
    except TypeError:
        raise InvalidRequestError(f"out_dtype is {shown(out_dtype)}, expected {dtype} or float32") from None
    _check(result in (dtype, np.float32), f"out_dtype is {result}, expected {dtype} or float32")
    ops = _ops(device, isa, num_threads)
    out = _poisoned(ops, (x.shape[0], weight.shape[0]), result)
    bias_on_device = None if bias is None else _to_device(ops, bias)
    ops.matmul(_to_device(ops, x), _to_device(ops, weight), bias_on_device, out)
    return _to_numpy(out)


def matmul_add(
    out: Array,
    x: Array,
    weight: Array,
    bias: Array | None = None,
    *,
    device: str = "cpu",
    isa: str = "auto",
    num_threads: int = 0,
) -> Array:
    """out (T, N), x (T, K), weight (N, K), bias (N) or None -> out + (x weightᵀ + bias) (T, N).

    The product may be rounded to the type of x before it is added, as in the Hugging Face models.
    """
    _check_types("x", x, out=out, weight=weight, **_given(bias=bias))
    _check_product(x, weight, bias)
    _check_shape("out", out, (x.shape[0], weight.shape[0]))
    ops = _ops(device, isa, num_threads)
    total = _to_device(ops, out)
    bias_on_device = None if bias is None else _to_device(ops, bias)
    ops.matmul_add(_to_device(ops, x), _to_device(ops, weight), bias_on_device, total)
    return _to_numpy(total)


def norm_matmul(
    x: Array,
    norm_weight: Array,
    weight: Array,
    bias: Array | None = None,
    *,
    eps: float = 1e-5,
    activation: str | None = None,
    device: str = "cpu",
    isa: str = "auto",
    num_threads: int = 0,
) -> Array:
    """x (T, D), norm_weight (D), weight (N, D), bias (N) or None -> rms_norm(x) weightᵀ + bias (T, N).

    With an activation, act_mul() of that: (T, N/2). A device may do all of it in one kernel.
    """
    dtype = _check_types("x", x, norm_weight=norm_weight, weight=weight, **_given(bias=bias))
    _check_product(x, weight, bias)
    _check_shape("norm_weight", norm_weight, x.shape[1:])
    eps = _real_number("eps", eps, 0)
    rows, columns = x.shape[0], weight.shape[0]
    ops = _ops(device, isa, num_threads)
    room, product = _poisoned(ops, x.shape, dtype), _poisoned(ops, (rows, columns), dtype)
    bias_on_device = None if bias is None else _to_device(ops, bias)
    normed = _to_device(ops, x), _to_device(ops, norm_weight), eps, room
    if activation is None:
        ops.norm_matmul(*normed, _to_device(ops, weight), bias_on_device, product)
        return _to_numpy(product)
    _check_text("activation", activation)
    _check(columns % 2 == 0, f"weight has {columns} rows, expected an even number with an activation")
    out = _poisoned(ops, (rows, columns // 2), dtype)
    ops.norm_matmul_act_mul(*normed, _to_device(ops, weight), bias_on_device, activation, product, out)
    return _to_numpy(out)


def rope_and_cache(
    qkv: Array,
    keys: Array,
    values: Array,
    *,
    slot_mapping: npt.ArrayLike,
    cos_sin: npt.ArrayLike,
    num_heads: int,
    q_norm: Array | None = None,
    k_norm: Array | None = None,
    eps: float = 1e-6,
    device: str = "cpu",
    isa: str = "auto",
    num_threads: int = 0,
) -> tuple[Array, Array, Array]:
    """Rotates queries and keys and writes keys and values into the cache.

    qkv (T, (H+2Hk)·Dh), keys and values (NB, Hk, BS, Dh), slot_mapping (T): block * BS + offset,
    cos_sin (T, Dh/2, 2), q_norm and k_norm (Dh): each head is normalised first, as rms_norm does.
    Returns qkv with its queries rotated, and the two caches.

    Source: Su et al., arXiv 2104.09864, in the half-split form of the Hugging Face models.
    """
    _check_types("qkv", qkv, keys=keys, values=values, **_given(q_norm=q_norm, k_norm=k_norm))
    num_heads = _whole_number("num_heads", num_heads, 1, _INT32_MAX)
    eps = _real_number("eps", eps, 0)
    num_kv_heads, block_size, head_dim = _check_cache(qkv, keys, values, num_heads)
    tokens = qkv.shape[0]
    slots = _whole_numbers("slot_mapping", slot_mapping, 1, np.int64)
    _check_shape("slot_mapping", slots, (tokens,))
    limit = keys.shape[0] * block_size
    _check(bool(np.all((slots >= 0) & (slots < limit))), f"slot_mapping must lie in 0..{limit - 1}")
    try:
        angles = np.asarray(cos_sin, np.float32)
    except (TypeError, ValueError, OverflowError):
        raise InvalidRequestError("cos_sin must hold numbers") from None
    _check_shape("cos_sin", angles, (tokens, head_dim // 2, 2))
    for name, norm in (("q_norm", q_norm), ("k_norm", k_norm)):
        if norm is not None:
            _check_shape(name, norm, (head_dim,))

    ops = _ops(device, isa, num_threads)
    batch = _core.OpsBatch(
        query_start=np.array([0, tokens]),
        context_len=np.array([tokens]),
        block_tables=np.zeros((1, 0)),
        slot_mapping=slots,
        cos_sin=angles,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        block_size=block_size,
    )
    arrays = [_to_device(ops, a) for a in (qkv, keys, values)]
    norms = [None if norm is None else _to_device(ops, norm) for norm in (q_norm, k_norm)]
    ops.rope_and_cache(arrays[0], norms[0], norms[1], eps, batch, arrays[1], arrays[2])
    return _to_numpy(arrays[0]), _to_numpy(arrays[1]), _to_numpy(arrays[2])


def paged_attention(
    qkv: Array,
    keys: Array,
    values: Array,
    *,
    block_tables: npt.ArrayLike,
    context_len: npt.ArrayLike,
    query_start: npt.ArrayLike,
    num_heads: int,
    scale: float | None = None,
    sliding_window: int = 0,
    device: str = "cpu",
    isa: str = "auto",
    num_threads: int = 0,
) -> Array:
    """Causal attention over a paged cache -> (T, H·Dh).

    qkv (T, (H+2Hk)·Dh), of which only the queries are read; keys and values (NB, Hk, BS, Dh);
    block_tables (R, B); context_len (R): keys that a request's last row sees, those of its own rows included;
    or 0: a request without keys, whose rows give zeros. query_start (R+1): first row of each request, then T.
    scale: of the scores, 1/sqrt(Dh) unless given. sliding_window: keys that a query sees, itself included; 0
    for all.

    Source: Kwon et al., arXiv 2309.06180 (paging); Dao et al., arXiv 2205.14135 (softmax as a stream).
    """
    dtype = _check_types("qkv", qkv, keys=keys, values=values)
    num_heads = _whole_number("num_heads", num_heads, 1, _INT32_MAX)
    sliding_window = _whole_number("sliding_window", sliding_window, 0, _INT32_MAX)
    num_kv_heads, block_size, head_dim = _check_cache(qkv, keys, values, num_heads)
    scale = 1 / math.sqrt(head_dim) if scale is None else _real_number("scale", scale)
    tokens = qkv.shape[0]
    tables = _whole_numbers("block_tables", block_tables, 2)
    contexts = _whole_numbers("context_len", context_len, 1)
    starts = _whole_numbers("query_start", query_start, 1)
    requests = contexts.size
    _check_shape("block_tables", tables, (requests, tables.shape[1]))
    _check_shape("query_start", starts, (requests + 1,))
    ordered = starts[0] == 0 and starts[-1] == tokens and bool(np.all(np.diff(starts) >= 0))
    _check(bool(ordered), f"query_start must rise from 0 to {tokens}")
    for r, (context, rows) in enumerate(zip(contexts.tolist(), np.diff(starts).tolist(), strict=True)):
        _check(
            context == 0 or context >= rows,
            f"context_len[{r}] is {context}, expected 0, or {rows} or more: the request's own rows count",
        )
        needed = -(-context // block_size)
        _check(
            needed <= tables.shape[1],
            f"context_len[{r}] is {context}: needs {needed} blocks, the block table has {tables.shape[1]}",
        )
        # A sliding window leaves the blocks before it behind.
        oldest = max(0, context - rows - sliding_window + 1) if sliding_window else 0
        used = tables[r, oldest // block_size : needed]
        for block in used[(used < 0) | (used >= keys.shape[0])][:1]:
            _check(False, f"block_tables[{r}] has block {block} of {keys.shape[0]}")

    ops = _ops(device, isa, num_threads)
    batch = _core.OpsBatch(
        query_start=starts,
        context_len=contexts,
        block_tables=tables,
        slot_mapping=np.zeros(tokens, np.int64),
        cos_sin=np.zeros(0, np.float32),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        block_size=block_size,
        sliding_window=sliding_window,
        scale=scale,
    )
    out = _poisoned(ops, (tokens, num_heads * head_dim), dtype)
    ops.paged_attention(_to_device(ops, qkv), batch, _to_device(ops, keys), _to_device(ops, values), out)
    return _to_numpy(out)


def _check_cache(qkv: Array, keys: Array, values: Array, num_heads: int) -> tuple[int, int, int]:
    """The cache's (Hk, BS, Dh), after a look at whether qkv belongs to it."""
    _check(keys.ndim == 4, f"keys has shape {keys.shape}, expected (NB, Hk, BS, Dh)")
    _check_shape("values", values, keys.shape)
    _, num_kv_heads, block_size, head_dim = keys.shape
    _check(
        keys.shape[0] > 0 and block_size > 0,
        f"keys has shape {keys.shape}, expected 1 or more blocks (NB) of 1 or more tokens (BS)",
    )
    _check(
        num_kv_heads > 0 and num_heads % num_kv_heads == 0,
        f"{num_heads} query heads cannot share {num_kv_heads} KV heads evenly",
    )
    _check(
        head_dim % 2 == 0 and 0 < head_dim <= 512,
        f"head_dim is {head_dim}, expected an even number up to 512",
    )
    _check(qkv.ndim == 2, f"qkv has shape {qkv.shape}, expected two dimensions")
    _check_shape("qkv", qkv, (qkv.shape[0], (num_heads + 2 * num_kv_heads) * head_dim))
    return num_kv_heads, block_size, head_dim


def act_mul(
    gate_up: Array, activation: str = "silu", *, device: str = "cpu", isa: str = "auto", num_threads: int = 0
) -> Array:
    """gate_up (T, 2F) -> (T, F): activation(gate) * up; activation is silu, gelu or gelu_tanh.

    Source: Shazeer, arXiv 2002.05202. activation(gate) is rounded before the product, as in the Hugging Face
    models.
    """
    dtype = _check_types("gate_up", gate_up)
    _check_text("activation", activation)
    _check(
        gate_up.ndim == 2 and gate_up.shape[1] % 2 == 0,
        f"gate_up has shape {gate_up.shape}, expected (T, 2F)",
    )
    ops = _ops(device, isa, num_threads)
    out = _poisoned(ops, (gate_up.shape[0], gate_up.shape[1] // 2), dtype)
    ops.act_mul(_to_device(ops, gate_up), activation, out)
    return _to_numpy(out)


def copy_block(
    keys: Array,
    values: Array,
    src: int,
    dst: int,
    *,
    device: str = "cpu",
    isa: str = "auto",
    num_threads: int = 0,
) -> tuple[Array, Array]:
    """keys and values (NB, Hk, BS, Dh) with block src copied over block dst."""
    _check_types("keys", keys, values=values)
    _check(keys.ndim == 4, f"keys has shape {keys.shape}, expected (NB, Hk, BS, Dh)")
    _check_shape("values", values, keys.shape)
    blocks = keys.shape[0]
    src, dst = (_whole_number(name, n, 0, blocks - 1) for name, n in (("src", src), ("dst", dst)))
    ops = _ops(device, isa, num_threads)
    arrays = [_to_device(ops, a) for a in (keys, values)]
    ops.copy_block(arrays[0], arrays[1], src, dst)
    return _to_numpy(arrays[0]), _to_numpy(arrays[1])


def sample(
    logits: Array,
    *,
    temperature: npt.ArrayLike = 1.0,
    top_k: npt.ArrayLike = 0,
    top_p: npt.ArrayLike = 1.0,
    min_p: npt.ArrayLike = 0.0,
    seeds: npt.ArrayLike = 0,
    positions: npt.ArrayLike = 0,
    device: str = "cpu",
    isa: str = "auto",
    num_threads: int = 0,
) -> npt.NDArray[np.int32]:
    """logits (n, V) float32 -> a token for each row (n).

    A row with NaN or +infinity, or only -infinity, has no answer: -1. Each parameter is one number, or one
    for each row. The first four mean what they mean in `SamplingParams` and raise `InvalidRequestError` for
    the same values; temperature 0 takes the largest logit. A draw depends on nothing but its row, seed (below
    2**64) and position (below 2**63).

    Source: the exponential race (see cpp/sample/sampler.h) on the random numbers of Salmon et al., SC 2011.
    """
    _check_array("logits", logits)
    _check(
        logits.dtype == np.float32 and logits.ndim == 2, "logits must be float32 with two dimensions (n, V)"
    )
    rows, vocab_size = logits.shape
    _check(vocab_size > 0, "logits have no columns")

    def whole(low: int, high: int) -> Callable[[str, Any], int]:
        return lambda name, value: _whole_number(name, value, low, high)

    columns = [
        _for_each_row("temperature", temperature, rows, _finite_number),
        _for_each_row("top_k", top_k, rows, whole(-1, 2**63 - 1)),
        _for_each_row("top_p", top_p, rows, _finite_number),
        _for_each_row("min_p", min_p, rows, _finite_number),
        _for_each_row("seeds", seeds, rows, whole(0, 2**64 - 1)),
        _for_each_row("positions", positions, rows, whole(0, 2**63 - 1)),
    ]
    ops = _ops(device, isa, num_threads)
    sample_rows = [_core.SampleRow(*row) for row in zip(*columns, strict=True)]
    return np.array(_core.sample(ops, _to_device(ops, logits), sample_rows), np.int32)
