"""Makes the page that shows a trace: one HTML file that needs nothing else.

The sources are in the folder `page`: page.html is the frame, page.css the look, and the scripts are best read
in this order: replay.js (which state follows from the records), words.js (what happened, in words), draw.js
(the pictures), page.js (buttons, keys, and who asks whom).
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Sequence
from importlib.resources import files
from typing import Any

from tiny_vllm.trace.format import check_trace

SCRIPTS = ("replay.js", "words.js", "draw.js", "page.js")


def make_page(traces: Sequence[dict[str, Any]], names: Sequence[str] | None = None) -> str:
    """A page that shows one trace, or two of the same requests side by side.

    `names` is what the page calls them, by default the name of the scheduler. Raises TraceError when one
    is not in the format of docs/trace.md.
    """
    if len(traces) not in (1, 2):
        raise ValueError(f"a page shows one trace or two; {len(traces)} were given")
    labels = list(names) if names is not None else [f"trace {i + 1}" for i in range(len(traces))]
    for trace, label in zip(traces, labels, strict=True):
        check_trace(trace, label)
    data = {"names": labels, "traces": list(traces)}
    style = _source("page.css")
    script = '"use strict";\n' + "\n".join(_source(name) for name in SCRIPTS)
    parts = {
        # The page may run this script and use this style, and nothing else, wherever its data came from.
        "{{policy}}": "default-src 'none'; img-src data:; base-uri 'none'; form-action 'none'; "
        f"script-src {_hash(script)}; style-src {_hash(style)}",
        "{{style}}": style,
        "{{script}}": script,
        "{{data}}": _embedded(data),
    }
    page = _source("page.html")
    # One pass: what a part holds is not searched for the names of the others.
    pieces = []
    while page:
        name = min((p for p in parts if p in page), key=page.index, default=None)
        before, _, page = page.partition(name) if name else (page, "", "")
        pieces += [before, parts[name] if name else ""]
    return "".join(pieces)


def _source(name: str) -> str:
    return (files("tiny_vllm.trace") / "page" / name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    digest = base64.b64encode(hashlib.sha256(text.encode("utf-8")).digest()).decode("ascii")
    return f"'sha256-{digest}'"


def _embedded(data: object) -> str:
    """JSON that may stand in an HTML element: without <, nothing in it can end the element or begin another.

    All that is not ASCII is escaped as well, and with it U+2028, lone surrogates and whatever an encoding
    could spoil.
    """
    text = json.dumps(data, separators=(",", ":"), ensure_ascii=True, allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
