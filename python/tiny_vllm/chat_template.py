"""Renders chat templates: Jinja programs that turn a list of messages into one prompt, and come with a model.

A template is written by whoever uploaded the model, so it runs in a sandbox: it can loop and format, within
limits, but reach nothing outside of the values it is given. Everything that a template may use is set up as
`transformers` does, so that the text is the same to the last space: a chat model answers badly when one
newline is off.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any

import jinja2
from jinja2.ext import Extension, loopcontrols

from .errors import InvalidRequestError, ModelLoadError
from .template_sandbox import BoundedEnvironment, start_counting

Message = Mapping[str, Any]

_MAX_DEPTH = 100  # of lists and mappings in messages


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


def _raise_exception(message: str) -> None:
    raise jinja2.exceptions.TemplateError(message)


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
    environment = BoundedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.bound_filters()
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
        return {_plain(k, where, depth + 1): _plain(v, f"{where}.{k}", depth + 1) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item, f"{where}[{i}]", depth + 1) for i, item in enumerate(value)]
    raise InvalidRequestError(
        f"{where}: expected text, numbers, lists and mappings, found {type(value).__name__}"
    )


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
                f"{where}: expected a mapping with role and content, found {message!r:.80}"
            )
        plain = {key: _plain(value, f"{where}.{key}") for key, value in message.items() if value is not None}
        role, content = plain.get("role"), plain.get("content")
        if not isinstance(role, str) or not role:
            raise InvalidRequestError(f"{where}.role: expected a text such as 'user', found {role!r:.80}")
        if content is None and set(plain) == {"role"}:
            raise InvalidRequestError(f"{where}.content: is missing")
        is_parts = isinstance(content, list) and all(isinstance(part, dict) for part in content)
        if content is not None and not isinstance(content, str) and not is_parts:
            raise InvalidRequestError(
                f"{where}.content: expected text or a list of parts, found {content!r:.80}"
            )
        checked.append(plain)
    return checked


def render_chat(
    template: str, messages: Sequence[Message], add_generation_prompt: bool = True, **variables: Any
) -> str:
    """The prompt text of a conversation.

    `variables` reach the template by name (`bos_token`, `tools`, `enable_thinking`, ...); those that it does
    not use are its own business, as in transformers.
    Raises InvalidRequestError when the messages are malformed or the template refuses them (for example
    because roles do not alternate), ModelLoadError when the template itself is not valid Jinja.
    """
    plain = check_messages(messages)
    compiled = compile_template(template)
    values = {
        "tools": None,
        "documents": None,
        **{key: _plain(value, key) for key, value in variables.items()},
    }
    start_counting()
    try:
        return compiled.render(messages=plain, add_generation_prompt=add_generation_prompt, **values)
    except jinja2.exceptions.SecurityError as error:
        raise InvalidRequestError(
            f"messages: the chat template tried what its sandbox forbids: {error}"
        ) from None
    except Exception as error:  # a template that was not written for these messages can raise anything
        raise InvalidRequestError(
            f"messages: the chat template of this model refuses them: {error or type(error).__name__}"
        ) from None
