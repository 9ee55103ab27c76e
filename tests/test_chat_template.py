"""Chat templates give the text that transformers gives, to the last space, and cannot reach out of their
sandbox.
"""

from __future__ import annotations

import datetime
from pathlib import Path
from typing import Any

import pytest
from conftest import require_package
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment
from small_tokenizers import byte_level_backend, write_folder
from tiny_vllm.bundled import bundled_model_folder
from tiny_vllm.chat_template import check_messages, render_chat
from tiny_vllm.errors import InvalidRequestError, ModelLoadError
from tiny_vllm.tokenizer import Tokenizer

TEMPLATES = {
    path.stem: path.read_text(encoding="utf-8")
    for path in (Path(__file__).parent / "data").glob("chat_templates/*")
}
SPECIAL = {"bos_token": "<|bos|>", "eos_token": "<|eos|>"}

USER = {"role": "user", "content": '  What is 2 < 3 & "é"?\n'}
ANSWER = {"role": "assistant", "content": " <think>\nhm\n</think>\n\nYes. "}
CALL = {
    "role": "assistant",
    "content": None,
    "tool_calls": [
        {"type": "function", "function": {"name": "weather", "arguments": {"city": "Zürich", "n": 1.5}}}
    ],
}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "Don't <guess>",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string"}},
                "required": ["city"],
            },
        },
    }
]
CHATS: dict[str, list[dict[str, Any]]] = {
    "one": [USER],
    "system": [{"role": "system", "content": " Be brief. "}, USER],
    "turns": [USER, ANSWER, {"role": "user", "content": "안녕 🌶"}],
    "long": [{"role": "system", "content": "s"}, USER, ANSWER, USER, ANSWER, USER, ANSWER],
    "tools": [
        USER,
        CALL,
        {"role": "tool", "content": "12 °C"},
        {"role": "tool", "content": "rain"},
        ANSWER,
        USER,
    ],
    "assistant_first": [ANSWER, USER],
    "empty": [{"role": "user", "content": ""}, {"role": "assistant", "content": ""}],
    "extra_keys": [{"role": "user", "content": "x", "name": "Ann", "weight": 1, "gone": None}],
}
VARIANTS: list[dict[str, Any]] = [
    {},
    {"add_generation_prompt": False},
    {"tools": TOOLS},
    {"enable_thinking": False},
    {"date_string": "1 Jan 2000"},
]


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Tokenizer, Any]]:
    """Each template in a folder, loaded by us and by transformers."""
    require_package("transformers")
    from transformers import AutoTokenizer

    found = {}
    for name, template in TEMPLATES.items():
        folder = tmp_path_factory.mktemp(name)
        write_folder(folder, byte_level_backend(), {**SPECIAL, "chat_template": template})
        found[name] = (Tokenizer.from_folder(folder), AutoTokenizer.from_pretrained(folder))
    bundled = bundled_model_folder()
    found["bundled"] = (Tokenizer.from_folder(bundled), AutoTokenizer.from_pretrained(bundled))
    return found


@pytest.mark.parametrize("chat", CHATS)
@pytest.mark.parametrize("name", [*TEMPLATES, "bundled"])
def test_the_text_is_that_of_transformers(
    name: str, chat: str, tokenizers: dict[str, tuple[Tokenizer, Any]]
) -> None:
    ours, theirs = tokenizers[name]
    compared = 0
    for variant in VARIANTS:
        variables = {"add_generation_prompt": True, **variant}
        try:
            expected = theirs.apply_chat_template(CHATS[chat], tokenize=False, **variables)
        except Exception:
            with pytest.raises(InvalidRequestError):
                ours.apply_chat_template(CHATS[chat], **variables)
            continue
        assert ours.apply_chat_template(CHATS[chat], **variables) == expected
        ids = theirs.apply_chat_template(CHATS[chat], tokenize=True, return_dict=False, **variables)
        assert ours.encode_chat(CHATS[chat], **variables) == ids
        compared += 1
    assert compared == len(VARIANTS) or name in ("llama3_like", "mistral_like", "bundled")


def test_the_templates_use_what_they_are_there_for() -> None:
    """So that the comparison above cannot pass on empty texts."""
    llama = render_chat(TEMPLATES["llama3_like"], CHATS["tools"], tools=TOOLS, **SPECIAL)
    qwen = render_chat(TEMPLATES["qwen_like"], CHATS["tools"], tools=TOOLS, **SPECIAL)
    today = datetime.datetime.now()
    near = [(today - datetime.timedelta(minutes=m)).strftime("%d %b %Y") for m in (0, 1)]
    assert any(f"Today is {day}." in llama for day in near)
    assert '\n        "name": "weather",\n        "description": "Don\'t <guess>"' in llama
    assert '"parameters": {"city": "Zürich", "n": 1.5}}<|eot_id|>' in llama
    assert "\n<result>\n12 °C\n</result>\n<result>\nrain\n</result><|im_end|>" in qwen
    assert llama.startswith("<|bos|><|start_header_id|>system")
    turns = render_chat(TEMPLATES["mistral_like"], CHATS["turns"], **SPECIAL)
    assert "</think>\n\nYes.<|eos|>" in turns
    assert turns.endswith("[INST] 안녕 🌶 [/INST]")
    assert '{"z": "é<&>\'", "a": [1, 2.5, null, true]}' in render_chat(TEMPLATES["spaces"], CHATS["one"])


def test_a_template_that_refuses_says_why() -> None:
    with pytest.raises(InvalidRequestError, match="roles must take turns"):
        render_chat(TEMPLATES["mistral_like"], CHATS["assistant_first"], **SPECIAL)


@pytest.mark.parametrize(
    ("messages", "match"),
    [
        ([], "the list is empty"),
        ("hello", "expected a list"),
        ({"role": "user", "content": "x"}, "expected a list"),
        (None, "expected a list"),
        (["hello"], r"messages\[0\]: expected a mapping"),
        ([USER, 3], r"messages\[1\]: expected a mapping"),
        ([{"content": "x"}], r"messages\[0\]\.role"),
        ([{"role": 3, "content": "x"}], r"messages\[0\]\.role"),
        ([{"role": "", "content": "x"}], r"messages\[0\]\.role"),
        ([{"role": "user"}], r"messages\[0\]\.content: is missing"),
        ([{"role": "user", "content": None}], r"messages\[0\]\.content: is missing"),
        ([{"role": "user", "content": 3}], r"messages\[0\]\.content: expected text"),
        ([{"role": "user", "content": ["x"]}], r"messages\[0\]\.content: expected text"),
        ([{"role": "user", "content": {"text": "x"}}], r"messages\[0\]\.content: expected text"),
        ([{"role": "user", "content": "\ud800"}], "surrogate"),
        ([{"role": "user", "content": "x", "image": object()}], r"messages\[0\]\.image: expected text"),
        ([{"role": 10**5000, "content": "x"}], r"messages\[0\]\.role: .* found a value of type int"),
        ([[10**5000]], r"messages\[0\]: .* found a value of type list"),
        ([{"role": "user", "content": "x", (1, 2): 3}], r"messages\[0\]: has a key .*\(1, 2\)"),
        ([{"role": "user", "content": "x", "a": {10**5000: object()}}], r"a\.a value of type int: expected"),
    ],
)
def test_malformed_messages_are_refused(messages: Any, match: str) -> None:
    with pytest.raises(InvalidRequestError, match=match):
        render_chat("{{ messages }}", messages)


def test_messages_are_copied() -> None:
    part = {"type": "text", "text": "x"}
    message = {"role": "user", "content": [part], "gone": None}
    checked = check_messages((message,))
    assert checked == [{"role": "user", "content": [part]}]
    assert checked[0]["content"][0] is not part


@pytest.mark.parametrize(
    "template",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.__class__() }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update({'a': 1}) }}",
        "{% set ns = namespace() %}{% set ns.__x__ = 1 %}",
        "{{ namespace(_x=1) }}",
        "{{ cycler.__init__.__globals__ }}",
        "{{ raise_exception.__globals__['json'] }}",
        "{% include 'x' %}",
        "{{ 1 / 0 }}",
        "{{ messages + 1 }}",
        "{{ range(10 ** 9) | list }}",
        "{{ messages[7].content.x }}",
        "{% macro a() %}{{ a() }}{% endmacro %}{{ a() }}",
    ],
)
def test_what_a_template_must_not_do(template: str) -> None:
    with pytest.raises(InvalidRequestError):
        render_chat(template, [USER])


@pytest.mark.parametrize(
    ("template", "match"),
    [
        ("\n{{ cycler() }}", "line 2 of .*: at least one item"),  # RuntimeError
        (
            "{% for m in messages recursive %}\n{{ loop(messages) }}{% endfor %}",
            "line [12] of .*: .*recursion",
        ),
        ("{% macro a() %}\n\n{{ a() }}{% endmacro %}{{ a() }}", "line 3 of .*: .*recursion"),
        ("{% if '\ud800'.encode() %}{% endif %}", "line 1 of .*: .*surrogates not allowed"),
        ("a\n\n{{ 'a' * 10**15 }}", "line 3 of .*: MemoryError$"),
        ("{{ 'a' * 10**30 }}", "line 1 of .*: cannot fit 'int'"),  # OverflowError
        ("a\n{{ 1 / 0 }}", "line 2 of .*: division by zero"),
        ("a\n{{ messages + 1 }}", "line 2 of .*: can only concatenate"),  # TypeError
        ("a\n{{ nobody | tojson }}", "line 2 of .*: Object of type Undefined"),
        ("a\n{{ nobody.name }}", "line 2 of .*: 'nobody' is undefined"),
        ("a\n{{ messages.append(1) }}", "line 2 of .* sandbox forbids: .*'append'"),
        ("a\n{% for m in messages %}\n{{ raise_exception('no') }}{% endfor %}", "line 3 of .*: no$"),
        (
            "{% set n = (messages | length) * 10**3000 %}\n{{ raise_exception(n * n) }}",
            "line 2 of .*4300 digits",
        ),
        ("{{ '{a}'.format() }}", "line 1 of .*: 'a'$"),  # KeyError
    ],
)
def test_whatever_a_template_raises_is_typed_and_names_the_line(template: str, match: str) -> None:
    with pytest.raises(InvalidRequestError, match=f"^messages: {match}"):
        render_chat(template, [USER])


@pytest.mark.parametrize("template", ["{{ raise_exception('x' * 10**6) }}", "{{ {}['x' * 10**6].y }}"])
def test_what_a_template_says_is_cut(template: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        render_chat(template, [USER])
    assert "x" * 900 in str(caught.value)
    said = str(caught.value).split("refuses these messages: ")[1]
    assert len(said) == 1000


def test_messages_that_hold_themselves_are_refused() -> None:
    message: dict[str, Any] = {"role": "user", "content": "x"}
    message["self"] = message
    with pytest.raises(InvalidRequestError, match=r"messages\[0\]\.self\.self.*more than 100 deep"):
        check_messages([message])
    tools: list[Any] = []
    tools.append(tools)
    with pytest.raises(InvalidRequestError, match=r"^tools\[0\].*more than 100 deep"):
        render_chat("x", [USER], tools=tools)


@pytest.mark.parametrize(
    "template",
    [
        "{% for m in messages %}{{ loop.index }}/{{ loop.length }}{{ loop.last }}{{ loop.revindex0 }}"
        "{{ (loop.previtem or m).role }}{{ (loop.nextitem or m).role }}"
        "{{ loop.changed(m.role) }};{% endfor %}",
        "{% for m in nobody %}x{% else %}none{% endfor %}"
        "{% for k, v in messages[0].items() %}{{ k }}{% else %}none{% endfor %}",
        "{% for m in messages if m.role == 'user' %}{{ loop.first }}{{ loop.length }}{% endfor %}",
        "{% for x in [1, [2, [3]]] recursive %}"
        "{{ x if x is number else loop(x) }}{{ loop.depth }}{% endfor %}",
        "{% for i in range(9) %}"
        "{% if i == 3 %}{% continue %}{% elif i == 6 %}{% break %}{% endif %}{{ i }}{% endfor %}",
        "{{ 1 ~ 'a' ~ none ~ nobody ~ messages[0].role ~ [1, 'é'] }}{{ 'a' * 3 + 'b' }}{{ 2 ** 10 % 7 }}",
        "{% autoescape true %}{{ messages[0].content ~ ('<' | safe) }}{% endautoescape %}{{ messages }}",
        "{{ none }}{{ 1.50 }}{{ '%05d %s %%' | format(3, 'x') }}{{ '{{{:>9}}}'.format('x') }}{{ '%s' % 1 }}",
        "{{ 'a-b'.replace('-', '+') | upper | center(9) }}|{{ 'a\nb' | indent(4) }}|{{ ','.join('ab') }}",
        "{% macro f(context, obj=1, self_=2) %}{{ context }}{{ obj }}{{ kwargs }}{% endmacro %}"
        "{{ f(context=1, obj=5, me=3) }}",
        "{{ messages | map(attribute='role') | join(', ') }}{{ messages | groupby('role') | length }}"
        "{{ 12345678901 | tojson }}{{ x | default(10**12) }}{{ [3, 1] | sort | batch(2, 0) | list }}",
        "{{ 'x' | join }}{{ 'xy' | join('-') }}{{ [1, 2] | join(0) }}{{ {'a': 1, 'b': 2} | join }}",
        "{{ '1 2' | replace(1, 2) }}{{ 112 | replace(1, 3, 1) }}{{ none | replace('None', 5) }}",
        "{% for m in messages %}{{ messages[loop.index:] | length }}{{ messages[:loop.index0] }}{% endfor %}",
        "{{ lipsum(n=2, html=false) | length > 100 }}",
    ],
)
def test_the_text_is_that_of_jinja(template: str) -> None:
    plain = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
    messages = [
        {"role": role, "content": text} for role, text in (("user", "<"), ("bot", "y"), ("user", "z"))
    ]
    assert render_chat(template, messages) == plain.from_string(template).render(messages=messages)


LONG_CHATS = {
    "accumulates": "{% set ns = namespace(text='') %}{% for m in messages %}"
    "{% set ns.text = ns.text + '<' ~ m.role ~ '>' + m.content + '\n' %}{% endfor %}{{ ns.text }}",
    "captures": "{% set ns = namespace(text='') %}{% for m in messages %}"
    "{% set text %}{{ ns.text }}{{ m.content | trim }}{% endset %}{% set ns.text = text %}{% endfor %}"
    "{{ ns.text }}",
    "collects": "{% set ns = namespace(all=[]) %}{% for m in messages %}"
    "{% set ns.all = ns.all + [m] %}{% endfor %}{{ ns.all | map(attribute='content') | join('|') }}",
    "looks_ahead": "{% for m in messages %}{% set later = namespace(user=false) %}"
    "{% for other in messages[loop.index:] %}{% if other.role == 'user' %}{% set later.user = true %}"
    "{% endif %}{% endfor %}{{ m.content if later.user else m.role }}\n{% endfor %}",
}


@pytest.mark.parametrize(
    ("name", "count"), [*((name, 500) for name in LONG_CHATS), ("looks_ahead", 2100)], ids=str
)
def test_a_long_conversation(name: str, count: int, tmp_path: Path) -> None:
    """Messages of 1,000 characters, with the quadratic idioms of real templates."""
    require_package("transformers")
    from transformers import AutoTokenizer

    messages = [
        {"role": ("user", "assistant")[i % 2], "content": f"{i} é ".ljust(1000, "abc"[i % 3])}
        for i in range(count)
    ]
    write_folder(tmp_path, byte_level_backend(), {**SPECIAL, "chat_template": LONG_CHATS[name]})
    expected = AutoTokenizer.from_pretrained(tmp_path).apply_chat_template(messages, tokenize=False)
    assert render_chat(LONG_CHATS[name], messages, add_generation_prompt=False, **SPECIAL) == expected
    assert len(expected) > 490_000


def test_a_template_that_is_not_jinja() -> None:
    with pytest.raises(ModelLoadError, match="cannot be compiled"):
        render_chat("{{ " + "9" * 5000 + " }}", [USER])
    with pytest.raises(ModelLoadError, match="line 2"):
        render_chat("fine\n{% for %}", [USER])
    with pytest.raises(ModelLoadError, match="no_such_filter"):
        render_chat("{{ messages | no_such_filter }}", [USER])
    with pytest.raises(ModelLoadError, match="nested too deeply"):
        render_chat("{% for m in messages %}" * 30 + "{% endfor %}" * 30, [USER])
    with pytest.raises(ModelLoadError, match="nested too deeply"):
        render_chat("{{ " + "(" * 5000 + ")" * 5000 + " }}", [USER])


def test_names_set_inside_a_generation_block_stay_inside() -> None:
    template = "{% set a = 1 %}{% generation %}{% set a = 2 %}{{ a }}{% endgeneration %}{{ a }}"
    assert render_chat(template, [USER]) == "21"
