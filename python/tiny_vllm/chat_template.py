"""Renders chat templates: Jinja programs that turn a list of messages into one prompt, and come with a model.

A template is written by whoever uploaded the model, so it runs in Jinja's sandbox, which keeps it from files
and from Python's insides. The sandbox does not bound a template's time and memory: `{{ 'a' * 10**10 }}` gets
its ten gigabytes, and a loop may run all day. It is the same in `transformers`; a model folder is to be
trusted that far. Everything that a template may use is set up as there, too, so that the text is the same to
the last space: a chat model answers badly when one newline is off.
"""

from __future__ import annotations

import datetime
import json
import traceback
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any

import jinja2
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from .errors import InvalidRequestError, ModelLoadError, shown

Message = Mapping[str, Any]

_MAX_DEPTH = 100  # of lists and mappings in messages
_MAX_REASON = 1000  # characters of what a template says when it refuses


class _GenerationTag(Extension):
    """`{% generation %} ... {% endgeneration %}`: a mark for training, which only renders what is inside."""

    tags = frozenset({"generation"})  # type: ignore[assignment]

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        # A call block and not the bare statements: names set inside stay inside, as in transformers.
        return jinja2.nodes.CallBlock(self.call_method("_render"), [], [], body).set_lineno(line)

    def _render(self, caller: Callable[[], str]) -> str:
        return caller()


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own filter would escape <, > and & for HTML.
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: object) -> None:
    raise jinja2.exceptions.TemplateError(str(message)[:_MAX_REASON])


def _strftime_now(format: str) -> str:
    return datetime.datetime.now().strftime(format)


class _Namespace(jinja2.utils.Namespace):
    """Jinja's `namespace()`, without names that begin with an underscore: those are Python's own."""

    def __setitem__(self, name: str, value: Any) -> None:
        if name.startswith("_"):
            raise jinja2.exceptions.SecurityError(
                f"the namespace attribute {name!r} begins with an underscore"
            )
        super().__setitem__(name, value)


def _make_namespace(*args: Any, **kwargs: Any) -> _Namespace:
    namespace = _Namespace()
    for name, value in dict(*args, **kwargs).items():
        namespace[name] = value
    return namespace


@lru_cache(maxsize=32)
def compile_template(source: str) -> jinja2.Template:
    """The compiled template. Raises ModelLoadError, with the line, when it is not valid Jinja."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    environment.globals["namespace"] = _make_namespace
    try:
        return environment.from_string(source)
    except jinja2.TemplateSyntaxError as error:
        raise ModelLoadError(f"chat template: line {error.lineno}: {error.message}") from None
    except (
        SyntaxError,
        RecursionError,
        MemoryError,
    ) as error:  # from Python, which compiles what Jinja makes of it
        raise ModelLoadError(f"chat template: nested too deeply: {error}") from None
    except Exception as error:  # such as a number with too many digits
        raise ModelLoadError(f"chat template: cannot be compiled: {error}") from None


def _plain(value: Any, where: str, depth: int = 0) -> Any:
    """A copy made of plain JSON types: a template never gets hold of an object with methods of its own."""
    if value is None or isinstance(value, (bool, int, float)):
        return value
    if isinstance(value, str):
        try:
            value.encode("utf-8")
        except UnicodeEncodeError:
            raise InvalidRequestError(f"{where}: holds half of a surrogate pair, which is not text") from None
        return str(value)
    if depth > _MAX_DEPTH:
        raise InvalidRequestError(f"{where:.80}: lists and mappings lie more than {_MAX_DEPTH} deep")
    if isinstance(value, Mapping):
        copied = {}
        for key, part in value.items():
            if isinstance(key, (list, tuple, Mapping)):
                raise InvalidRequestError(
                    f"{where}: has a key that is neither text nor a number: {shown(key)}"
                )
            copied[_plain(key, where)] = _plain(part, f"{where}.{_name(key)}", depth + 1)
        return copied
    if isinstance(value, (list, tuple)):
        return [_plain(item, f"{where}[{i}]", depth + 1) for i, item in enumerate(value)]
    raise InvalidRequestError(
        f"{where}: expected text, numbers, lists and mappings, found {type(value).__name__}"
    )


def _name(key: object) -> str:
    """A mapping's key in the path of an error."""
    return key if isinstance(key, str) else shown(key)


def check_messages(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """The messages as plain dicts. Raises InvalidRequestError that names the first wrong one.

    A message is a mapping with a text `role`. Its `content` is text or a list of parts (mappings); it may be
    left out, or be None, only beside something else to say, such as tool calls. Keys whose value is None are
    left out, since templates would print the word None.
    """
    if isinstance(messages, (str, bytes, Mapping)) or not isinstance(messages, Sequence):
        raise InvalidRequestError(f"messages: expected a list of messages, found {type(messages).__name__}")
    if not messages:
        raise InvalidRequestError("messages: the list is empty; at least one message is needed")
    checked = []
    for i, message in enumerate(messages):
        where = f"messages[{i}]"
        if not isinstance(message, Mapping):
            raise InvalidRequestError(
                f"{where}: expected a mapping with role and content, found {shown(message)}"
            )
        plain = _plain({key: value for key, value in message.items() if value is not None}, where)
        role, content = plain.get("role"), plain.get("content")
        if not isinstance(role, str) or not role:
            raise InvalidRequestError(f"{where}.role: expected a text such as 'user', found {shown(role)}")
        if content is None and set(plain) == {"role"}:
            raise InvalidRequestError(f"{where}.content: is missing")
        is_parts = isinstance(content, list) and all(isinstance(part, dict) for part in content)
        if content is not None and not isinstance(content, str) and not is_parts:
            raise InvalidRequestError(
                f"{where}.content: expected text or a list of parts, found {shown(content)}"
            )
        checked.append(plain)
    return checked


def render_chat(
    template: str, messages: Sequence[Message], add_generation_prompt: bool = True, **variables: Any
) -> str:
    """The prompt text of a conversation.

    `variables` reach the template by name (`bos_token`, `tools`, `enable_thinking`, ...); those that it does
    not use are its own business, as in transformers.
    Raises InvalidRequestError when the messages are malformed, or, with the template's line, when it refuses
    them (for example because roles do not alternate) or fails on them in any other way; ModelLoadError when
    the template itself is not valid Jinja.
    """
    plain = check_messages(messages)
    compiled = compile_template(template)
    values = {
        "tools": None,
        "documents": None,
        **{key: _plain(value, key) for key, value in variables.items()},
    }
    try:
        return compiled.render(messages=plain, add_generation_prompt=add_generation_prompt, **values)
    except Exception as error:  # a template that was not written for these messages can raise anything
        is_forbidden = isinstance(error, jinja2.exceptions.SecurityError)
        did = "tried what its sandbox forbids" if is_forbidden else "refuses these messages"
        line = _template_line(error)
        where = "" if line is None else f"line {line} of "
        raise InvalidRequestError(f"messages: {where}the chat template {did}: {_reason(error)}") from None


def _template_line(error: Exception) -> int | None:
    """Where in the template an error came up: Jinja puts the template's own lines into the traceback."""
    frames = traceback.walk_tb(error.__traceback__)
    lines = [line for frame, line in frames if frame.f_code.co_filename == "<template>"]
    return lines[-1] if lines else None


def _reason(error: Exception) -> str:
    try:
        return str(error)[:_MAX_REASON] or type(error).__name__
    except Exception:  # such as a KeyError about a number of 5,000 digits
        return type(error).__name__
