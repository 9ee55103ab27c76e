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
            if left := re.search(r"\$\$.*|\\[a-z]+.*", f"{text}\n{tail}"):
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
    for element in math.iter():
        if f"\\{element.text}" in (*latex.FUNCTIONS, *latex.LIMIT):
            # As in TeX, log and max have a thin space on both sides.
            element.tag = "mo"
            element.attrib.update(lspace="0.17em", rspace="0.17em")
    return math


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
