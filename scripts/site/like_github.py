"""A hook of MkDocs: what GitHub reads otherwise than Python-Markdown is read as on GitHub."""

from __future__ import annotations

import re
import xml.etree.ElementTree as etree

from markdown import Extension, Markdown
from markdown.blockprocessors import BlockProcessor
from markdown.preprocessors import Preprocessor
from markdown.util import HTML_PLACEHOLDER
from mkdocs.config.defaults import MkDocsConfig


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    config.markdown_extensions.insert(0, LikeGitHub())  # first: it changes what the others build on
    return config


class LikeGitHub(Extension):
    def extendMarkdown(self, md: Markdown) -> None:
        md.tab_length = 2  # what belongs to a list item may be indented by two spaces
        md.build_parser()
        md.registerExtension(self)
        self.md = md
        md.preprocessors.register(Details(md), "details", 22)  # after fences, before HTML
        md.parser.blockprocessors.register(EmptyLines(md.parser), "empty_lines", 95)  # before indentation

    def reset(self) -> None:
        # Indented code, which two spaces would make of too much. There are fences for it.
        self.md.parser.blockprocessors.deregister("code", strict=False)


class Details(Preprocessor):
    """An HTML block of <details> ends at an empty line. What follows, up to </details>, is Markdown."""

    def run(self, lines: list[str]) -> list[str]:
        html = re.compile(r"^</?details\b.*?(?=\n\s*\n|\Z)", re.MULTILINE | re.DOTALL)
        text = html.sub(lambda found: f"\n{self.md.htmlStash.store(found[0])}\n", "\n".join(lines))
        return text.split("\n")


class EmptyLines(BlockProcessor):
    """What may follow text without the empty line that Python-Markdown wants: a list, a formula, code."""

    ITEM = re.compile(r"^( *)([*+-]|\d+\.) ", re.MULTILINE)
    # Code has been put aside by now, and a placeholder stands for it.
    ALONE = re.compile(rf"^ *(\$\$.*?\$\$|{HTML_PLACEHOLDER % '[0-9]+'}) *$", re.MULTILINE | re.DOTALL)

    def test(self, parent: etree.Element, block: str) -> bool:
        return self.parts(block) != [block]

    def run(self, parent: etree.Element, blocks: list[str]) -> None:
        blocks[:1] = self.parts(blocks[0])

    def parts(self, block: str) -> list[str]:
        indent = len(block) - len(block.lstrip(" "))
        is_list = bool(self.ITEM.match(block))
        for item in self.ITEM.finditer(block, 1):
            # One further out goes on with an outer list. After text a list begins, a numbered one with 1.
            begins = not is_list and len(item[1]) == indent and item[2] in ("*", "+", "-", "1.")
            if begins or len(item[1]) < indent:
                return [block[: item.start() - 1], block[item.start() :]]
        alone = self.ALONE.search(block)
        if alone and not is_list and indent < self.tab_length:
            parts = (block[: alone.start()].rstrip("\n"), alone[1], block[alone.end() + 1 :])
            return [part for part in parts if part]
        return [block]
