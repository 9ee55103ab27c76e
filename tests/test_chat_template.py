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
from tiny_vllm import template_sandbox
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


_GROW = "{% set ns = namespace(s=['a']) %}{% for i in range(60) %}{% set ns.s = STEP %}{% endfor %}{{ ns.s }}"
_GROW_TEXT = _GROW.replace("['a']", "'a'")


@pytest.mark.parametrize(
    "template",
    [
        "{{ 'a' * 10**10 }}",
        "{{ 10**10 * 'a' }}",
        "{{ [1] * 10**10 }}",
        "{{ 10**(10**8) }}",
        "{{ 'a'.ljust(10**10) }}",
        "{{ 'a' | center(10**10) }}",
        "{{ 'a' | center(10000000000) }}",
        "{{ 'a\nb' | indent(10**10) }}",
        "{{ [1] | tojson(indent=10**10) }}",
        "{{ [1] | batch(10**10, 0) | list }}",
        "{{ [1] | slice(10**10) | list }}",
        "{{ 0.1 | round(10**8, 'ceil') }}",
        "{{ messages | map('center', 10**10) | list }}",
        "{{ ('a,' * 100) | replace('a', 'b' * 10**7) }}",
        "{{ ('a,' * 100).replace('a', 'b' * 10**7) }}",
        "{{ (['b'] * 10**5) | join('a' * 10**6) }}",
        "{{ ('a' * 10**6).join(['b'] * 10**5) }}",
        "{{ 'aaaa'.translate({97: 'b' * 10**7}) }}",
        "{{ '\t'.expandtabs(10**10) }}",
        "{{ (1).to_bytes(10**10, 'big') }}",
        "{{ '%1000000000d' % 1 }}",
        "{{ '%*d' % (10**9, 1) }}",
        "{{ '%1000000000d' | format(1) }}",
        "{{ '{:1000000000}'.format(1) }}",
        "{{ '{:{}}'.format(1, 10**9) }}",
        _GROW_TEXT.replace("STEP", "ns.s ~ ns.s"),
        _GROW_TEXT.replace("STEP", "ns.s + ns.s"),
        _GROW_TEXT.replace("= STEP %}", "%}{{ ns.s }}{{ ns.s }}{% endset %}"),
        _GROW.replace("STEP", "[ns.s, ns.s]"),
    ],
)
def test_a_template_cannot_fill_the_memory(template: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of these takes many gigabytes in Jinja's own sandbox, or the rest of the day."""
    monkeypatch.setattr(template_sandbox, "MAX_SIZE", 10_000_000 if "10**7" in template else 1_000_000)
    with pytest.raises(InvalidRequestError, match="tried what its sandbox forbids: a "):
        render_chat(template, [USER])


@pytest.mark.parametrize(
    "template",
    [
        "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
        "{% for i in range(99999) %}{{ range(99999) | sum }}{% endfor %}",
        "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    ],
)
def test_a_template_cannot_run_for_ever(template: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template_sandbox, "MAX_STEPS", 50_000)
    with pytest.raises(InvalidRequestError, match="forbids: more than 50000 steps"):
        render_chat(template, [USER])
    # Each rendering starts anew.
    assert render_chat("{% for i in range(40000) %}{% endfor %}x", [USER]) == "x"
    assert render_chat("{% for i in range(40000) %}{% endfor %}x", [USER]) == "x"


@pytest.mark.parametrize(
    ("template", "match"),
    [
        ("{{ cycler() }}", "at least one item"),
        ("{{ lipsum() }}", "'lipsum' is undefined"),
        ("{% for m in messages recursive %}{{ loop(messages) }}{% endfor %}", "recursion"),
        ("{% if '\ud800'.encode() %}{% endif %}", "surrogates not allowed"),
    ],
)
def test_whatever_a_template_raises_is_typed(template: str, match: str) -> None:
    with pytest.raises(InvalidRequestError, match=match):
        render_chat(template, [USER])


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
    ],
)
def test_below_the_limits_the_text_is_that_of_jinja(template: str) -> None:
    plain = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
    messages = [
        {"role": role, "content": text} for role, text in (("user", "<"), ("bot", "y"), ("user", "z"))
    ]
    assert render_chat(template, messages) == plain.from_string(template).render(messages=messages)


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
