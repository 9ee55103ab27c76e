"""What a GPU did, kernel by kernel: as a timeline for Perfetto, and as a table.

The records are those of :meth:`tiny_vllm.Engine.take_profile`. Times come from CUDA events around each
kernel, so they hold the kernel's start too, about a microsecond. Kernels of a few microseconds look slower by
that than they are in a recorded step, where one starts while another ends.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import Any, Protocol


class Record(Protocol):
    """``_core.KernelRecord``; cpp/backend/kernel_record.h says what each field is."""

    @property
    def name(self) -> str: ...
    @property
    def step(self) -> int: ...
    @property
    def tokens(self) -> int: ...
    @property
    def start_us(self) -> float: ...
    @property
    def duration_us(self) -> float: ...
    @property
    def bytes(self) -> int: ...
    @property
    def flops(self) -> int: ...


def chrome_trace(records: Sequence[Record], device: str) -> dict[str, Any]:
    """The timeline in Chrome's trace event format, which ui.perfetto.dev and chrome://tracing open.

    One row has the kernels, and one the steps: a slice from the start of a step's first kernel to the end of
    its last. Times are in microseconds and begin at 0 with the first kernel.
    """
    names = {0: ("process_name", device), 1: ("thread_name", "steps"), 2: ("thread_name", "kernels")}
    events: list[dict[str, Any]] = [
        {"ph": "M", "pid": 0, "tid": tid, "name": kind, "args": {"name": name}}
        for tid, (kind, name) in names.items()
    ]
    zero = records[0].start_us if records else 0.0
    for step, group in groupby(records, key=lambda r: r.step):
        kernels = list(group)
        start, end = kernels[0].start_us, kernels[-1].start_us + kernels[-1].duration_us
        busy = sum(k.duration_us for k in kernels)
        about = {"tokens": kernels[0].tokens, "kernels": len(kernels), "busy_us": round(busy, 3)}
        events.append(_slice(1, f"step {step}", "step", start - zero, end - start, about))
        events += [
            _slice(2, k.name, "kernel", k.start_us - zero, k.duration_us, {"tokens": k.tokens, **_rates(k)})
            for k in kernels
        ]
    return {"traceEvents": events, "displayTimeUnit": "ns"}


def _slice(
    tid: int, name: str, category: str, start: float, duration: float, args: dict[str, Any]
) -> dict[str, Any]:
    where = {"ph": "X", "pid": 0, "tid": tid, "ts": round(start, 3), "dur": round(duration, 3)}
    return {"name": name, "cat": category, **where, "args": args}


def _rates(kernel: Record) -> dict[str, float]:
    rates: dict[str, float] = {}
    if kernel.bytes:
        rates |= {"bytes": kernel.bytes, "GB/s": round(kernel.bytes / kernel.duration_us / 1e3, 1)}
    if kernel.flops:
        rates["TFLOP/s"] = round(kernel.flops / kernel.duration_us / 1e6, 2)
    return rates


def table(records: Sequence[Record]) -> str:
    """A line for each kernel, the one that took longest first. –: the kernel has no formula for it."""
    columns = ("kernel", "calls", "total ms", "mean us", "MB", "GB/s", "TFLOP/s", "share")
    by_name: dict[str, list[Record]] = {}
    for record in records:
        by_name.setdefault(record.name, []).append(record)
    busy = sum(r.duration_us for r in records)
    rows = [columns]
    for name, calls in sorted(by_name.items(), key=lambda item: -sum(r.duration_us for r in item[1])):
        us, moved = sum(r.duration_us for r in calls), sum(r.bytes for r in calls)
        flops = sum(r.flops for r in calls)
        rows.append(
            (
                name,
                str(len(calls)),
                f"{us / 1e3:.3f}",
                f"{us / len(calls):.2f}",
                f"{moved / 1e6:,.1f}" if moved else "–",
                f"{moved / us / 1e3:,.1f}" if moved else "–",
                f"{flops / us / 1e6:,.1f}" if flops else "–",
                f"{us / busy:.1%}",
            )
        )
    widths = [max(len(row[i]) for row in rows) for i in range(len(columns))]
    lines = [
        "  ".join([row[0].ljust(widths[0]), *(c.rjust(w) for c, w in zip(row[1:], widths[1:], strict=True))])
        for row in rows
    ]
    return "\n".join(lines)


def summary(records: Sequence[Record]) -> str:
    """One line: how many steps and kernels, and how long they took with and without the gaps."""
    steps = [list(group) for _, group in groupby(records, key=lambda r: r.step)]
    span = sum(s[-1].start_us + s[-1].duration_us - s[0].start_us for s in steps)
    busy = sum(r.duration_us for r in records)
    return (
        f"{_count(len(steps), 'step')}, {_count(len(records), 'kernel')}: {busy / 1e3:.3f} ms in kernels, "
        f"{span / 1e3:.3f} ms from the first to the last of each step"
    )


def _count(number: int, thing: str) -> str:
    return f"{number} {thing}{'' if number == 1 else 's'}"
