"""A hook of MkDocs: formulas become MathML while the site is built.

One that cannot be converted is a warning, and so an error with --strict.
"""

from __future__ import annotations

import logging
import re
import xml.etree.ElementTree as etree
from collections.abc import Iterator
from html import unescape

from latex2mathml import commands as latex
from latex2mathml.converter import convert_to_element
from markdown import Extension, Markdown
from markdown.treeprocessors import Treeprocessor
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import Files
from mkdocs.structure.pages import Page

log = logging.getLogger("mkdocs.hooks.formulas")  # below "mkdocs", where --strict counts the warnings


class Formulas(Extension):
    page = ""  # the one that is being read, for the warnings

    def extendMarkdown(self, md: Markdown) -> None:
        # After all else in a line, and before the table of contents.
        md.treeprocessors.register(ToMathML(md), "formulas", 15)


formulas = Formulas()


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    config.markdown_extensions.append(formulas)
    fence = {"name": "math", "class": "", "format": math_fence}
    config.mdx_configs["pymdownx.superfences"] = {"custom_fences": [fence]}
    return config


def on_page_markdown(markdown: str, *, page: Page, config: MkDocsConfig, files: Files) -> None:
    formulas.page = page.file.src_uri


class ToMathML(Treeprocessor):
    """Of what pymdownx.arithmatex has found."""

    def run(self, root: etree.Element) -> None:
        for element in list(root.iter()):
            tail = element.tail or ""
            if element.get("class") == "arithmatex":
                display = "inline" if element.tag == "span" else "block"
                tex = element.text[2:-2]  # between \\( and \\), or \\[ and \\]
                element.text = None
                element.append(mathml(tex if display == "inline" else unescape(tex), display))
                if tail.startswith("$"):
                    warn(tex, "$$ stands in a line of text")
            text = "" if element.tag == "code" else element.text or ""
            if left := re.search(r"\$\$.*|\\[a-z]{2,}.*", f"{text}\n{tail}"):
                warn(left[0], "it does not stand between dollars")


def math_fence(source: str, language: str, name: str, options: object, md: Markdown, **kwargs: object) -> str:
    """```math is another way to write $$."""
    return f'<div class="arithmatex">{md.serializer(mathml(source, "block"))}</div>'


def mathml(tex: str, display: str) -> etree.Element:
    try:
        math = convert_to_element(tex.replace("{aligned}", "{align*}"), display=display)
    except Exception as error:  # its errors have no class in common
        warn(tex, type(error).__name__)
        return etree.Element("math")
    for problem in problems(tex, math):
        warn(tex, problem)
    for row in math.iter():
        space(list(row))
    return math


def space(row: list[etree.Element]) -> None:
    """TeX's spaces, where the converter leaves others."""
    for before, element, after in zip([None, *row], row, [*row[1:], None], strict=False):
        if f"\\{element.text}" in (*latex.FUNCTIONS, *latex.LIMIT):
            # log, max: a thin space on both sides, but none before a bracket.
            element.tag = "mo"
            element.set("lspace", "0.17em")
            element.set("rspace", "0" if after is not None and after.text == LEFT else "0.17em")
        elif element.text == INFINITY:
            element.tag = "mi"  # not an operator
        elif element.text == MINUS and before is not None and before.text in (EQUALS, LEFT, COMMA):
            element.set("form", "prefix")  # a sign


# As the converter writes them.
INFINITY, MINUS, EQUALS, LEFT, COMMA = "&#x0221E;", "&#x02212;", "&#x0003D;", "&#x00028;", "&#x0002C;"

# How many parts these have in MathML.
PARTS = {"mfrac": 2, "mroot": 2, "msub": 2, "msup": 2, "msubsup": 3, "munder": 2, "mover": 2, "munderover": 3}


def problems(tex: str, math: etree.Element) -> Iterator[str]:
    """What the converter did not understand, and let pass."""
    braces = re.findall(r"\\.|[{}]", tex)
    if braces.count("{") != braces.count("}"):
        yield "a brace is missing"
    for name in re.findall(r"\\begin\{(.*?)\}", tex):
        if name != "aligned" and f"\\{name}" not in latex.MATRICES:
            yield f"there is no environment {name}"
    for element in math.iter():
        if left := re.search(r"\\\w*|[{}]|&(?!#)", element.text or ""):
            yield f"{left[0]} is not understood"
        if len(element) != PARTS.get(element.tag, len(element)):
            yield f"{element.tag} has {len(element)} parts"
        if element.tag == "mo" and not element.text and not element.attrib:
            yield "there is an operator without a name"


def warn(tex: str, why: str) -> None:
    log.warning(
        f"Doc file '{formulas.page}' contains a formula that cannot be converted: {tex.strip()} ({why})"
    )
