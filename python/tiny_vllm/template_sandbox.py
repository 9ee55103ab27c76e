"""Jinja's sandbox with a bill: a chat template can neither run for ever nor fill the memory.

Jinja keeps a template from reaching out, but not from asking for `'a' * 10**10`. Here loops and calls are
counted, and what makes texts, lists and numbers large is looked at before it is done. Below the limits the
text is that of Jinja's own sandbox. A template that breaks one raises jinja2's SecurityError.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterable, Iterator
from contextvars import ContextVar
from typing import Any

from jinja2 import nodes, pass_eval_context
from jinja2.exceptions import SecurityError
from jinja2.runtime import markup_join, str_join
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

MAX_SIZE = 16_000_000  # characters of a text, items of a list: more than any model's context holds
MAX_STEPS = 2_000_000  # rounds of loops and calls in a rendering; a hundred characters or items count as one
MAX_BITS = 4096  # of a whole number

_SIZED = (str, bytes, list, tuple, dict)
_WIDE_FORMAT = {"%": re.compile(r"%[^a-zA-Z%]*(\d{5}|\*)"), "{": re.compile(r"\{[^{}]*(\d{5}|\{)")}
_steps: ContextVar[list[int]] = ContextVar("steps")


def start_counting() -> None:
    """Each rendering begins with this."""
    _steps.set([0])


def _spend(*values: Any) -> None:
    count = _steps.get([0])  # a constant may be computed while the template is compiled
    count[0] += 1 + sum(len(v) // 100 for v in values if isinstance(v, (*_SIZED, range)))
    if count[0] > MAX_STEPS:
        raise SecurityError(f"more than {MAX_STEPS} steps")


def _check_size(size: int) -> None:
    if size > MAX_SIZE:
        raise SecurityError(f"a text or list of more than {MAX_SIZE} characters or items")


def _weigh(value: Any, weight: int = 0) -> int:
    """`weight` and the characters and items of a value; what it holds twice counts twice, as when printed."""
    weight += len(value) if isinstance(value, _SIZED) else 1
    _check_size(weight)
    if isinstance(value, (list, tuple, dict)):
        for part in value.values() if isinstance(value, dict) else value:
            weight = _weigh(part, weight)
    return weight


def _width(arguments: list[Any]) -> int:
    return max((abs(a) if isinstance(a, int) else _weigh(a) for a in arguments), default=0)


def _joined(value: Any, arguments: list[Any]) -> int:
    items, separator = (
        (arguments[0], value) if isinstance(value, (str, bytes)) else (value, str(arguments[:1]))
    )
    return (len(items) if isinstance(items, _SIZED) else 100_000) * len(separator)


def _replaced(value: Any, arguments: list[Any]) -> int:
    old, new, *_ = arguments
    return (value if isinstance(value, bytes) else str(value)).count(old) * len(new)


# How large a result may be, before it is made: of filters and of methods, from the value and the arguments.
_PREDICTED: dict[str, Callable[[Any, list[Any]], int]] = {
    **dict.fromkeys(
        ["batch", "center", "ljust", "rjust", "slice", "to_bytes", "zfill"], lambda v, a: _width(a)
    ),
    **dict.fromkeys(["expandtabs", "indent", "tojson"], lambda v, a: _weigh(v) * _width(a)),
    "join": _joined,
    "replace": _replaced,
    "round": lambda v, a: _width(a) * MAX_SIZE // 1000,  # computes 10 to this power
    "translate": lambda v, a: _weigh(v) * _width(a),
    "wordwrap": lambda v, a: _weigh(v) * _width([x for x in a if isinstance(x, str)]),
}


def _bounded(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """A filter that looks at what it is given."""
    at = 1 if hasattr(function, "jinja_pass_arg") else 0  # the value comes after the context or environment
    only_looks = name in ("count", "default", "first", "last", "length", "map", "selectattr", "rejectattr")

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        value, arguments = args[at], [*args[at + 1 :], *kwargs.values()]
        if not only_looks:
            _weigh(value)
            _check_size(_PREDICTED[name](value, arguments) if name in _PREDICTED else 0)
        if name == "format":
            _check_format("%", str(value))
        result = function(*args, **kwargs)
        _spend(value, result)
        return result

    return call


def _check_format(mark: str, text: str) -> None:
    if _WIDE_FORMAT[mark].search(text):
        raise SecurityError("a format with a width of five digits, or one that is not a plain number")


def _counted(values: Iterable[Any]) -> Iterator[Any]:
    for value in values:
        _spend()
        yield value


@pass_eval_context
def _concatenated(context: nodes.EvalContext, parts: list[Any]) -> str:
    return (markup_join if context.autoescape else str_join)(parts)


class _Instrument(NodeTransformer):
    """`for x in y` becomes `for x in y | _counted`, and `a ~ b` becomes `[a, b] | _concatenated`."""

    def visit_For(self, node: nodes.For) -> nodes.Node:
        self.generic_visit(node)
        node.iter = nodes.Filter(node.iter, "_counted", [], [], None, None, lineno=node.lineno)
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        parts = nodes.List(node.nodes, lineno=node.lineno)
        return nodes.Filter(parts, "_concatenated", [], [], None, None, lineno=node.lineno)


class BoundedEnvironment(ImmutableSandboxedEnvironment):
    """Call `bound_filters` when all filters are there, and `start_counting` before each rendering."""

    intercepted_binops = frozenset(["+", "*", "**", "%"])

    def __init__(self, **options: Any) -> None:
        super().__init__(finalize=self._finalized, **options)
        self.globals.pop("lipsum")

    def bound_filters(self) -> None:
        self.filters["_concatenated"] = _concatenated
        self.filters = {name: _bounded(name, function) for name, function in self.filters.items()}
        self.filters["_counted"] = _counted

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree: nodes.Template = _Instrument().visit(super()._parse(source, name, filename))
        return tree

    @staticmethod
    def _finalized(value: Any) -> Any:
        _weigh(value)
        return value

    @staticmethod
    def concat(pieces: Iterable[str]) -> str:
        """The text of a template, a macro or a block."""
        kept, size = [], 0
        for piece in pieces:
            size += len(piece)
            _check_size(size)
            kept.append(piece)
        text = "".join(kept)
        _spend(text)
        return text

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        if operator == "%" and isinstance(left, str):
            _weigh(right)
            _check_format("%", left)
        elif operator in ("*", "**") and isinstance(left, int) and isinstance(right, int):
            size, times = left.bit_length(), right.bit_length()
            if (size + times if operator == "*" else size * right) > MAX_BITS:
                raise SecurityError(f"a number of more than {MAX_BITS} bits")
        elif operator == "*":
            for many, times in ((left, right), (right, left)):
                if isinstance(many, _SIZED) and isinstance(times, int):
                    _check_size(len(many) * times)
        result = super().call_binop(context, operator, left, right)
        _check_size(len(result) if isinstance(result, _SIZED) else 0)
        _spend(result)
        return result

    def wrap_str_format(self, value: Any) -> Any:
        wrapped = super().wrap_str_format(value)
        if wrapped is not None:
            _check_format("{", value.__self__.replace("{{", "").replace("}}", ""))
        return wrapped

    # The names are odd because a template may give any other to what it calls.
    def call(__self, __context: Any, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        value, name = getattr(__obj, "__self__", None), getattr(__obj, "__name__", "")
        _spend(value)
        if isinstance(value, (str, bytes, int)) and name in _PREDICTED:
            arguments = [*args, *kwargs.values()]
            _weigh(arguments)
            _check_size(_PREDICTED[name](value, arguments))
        return super().call(__context, __obj, *args, **kwargs)
