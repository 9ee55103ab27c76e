"""A hook of MkDocs (mkdocs.yml): which pages the site has.

Links are written for GitHub, from file to file. They work on the site because each file that git knows is one
of its pages: Markdown is rendered, a source file is shown with the numbers of its lines, a folder is a list.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from functools import cache
from pathlib import Path, PurePosixPath
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files, InclusionLevel
from mkdocs.structure.pages import Page
from pygments import highlight
from pygments.formatters import HtmlFormatter
from pygments.lexers import TextLexer, get_lexer_by_name, get_lexer_for_filename
from pygments.util import ClassNotFound


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    config.nav = list(expand(config.nav, root(config)))
    return config


def root(config: MkDocsConfig) -> Path:
    return Path(config.config_file_path).parent


def repository_files(folder: Path) -> list[str]:
    """What git knows, and what is new and not ignored."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=folder, check=True, capture_output=True, text=True).stdout
    return sorted(name for name in set(listed.split("\0")) if (folder / name).is_file())


def expand(nav: list[Any], folder: Path) -> Iterator[Any]:
    """The nav with files in place of patterns. A pattern that fits no file leaves nothing."""
    for entry in nav:
        title, value = (None, entry) if isinstance(entry, str) else next(iter(entry.items()))
        if isinstance(value, list):
            inside = list(expand(value, folder))
            yield from [{title: inside}] if inside else []
        else:
            names = sorted(path.relative_to(folder).as_posix() for path in folder.glob(value))
            yield from ({title: name} if title else name for name in names)


def on_files(files: Files, *, config: MkDocsConfig) -> Files:
    here = root(config)
    names = repository_files(here)
    folders = {str(folder) for name in names for folder in PurePosixPath(name).parents} - {"."}
    for name in names:
        if name.endswith(".md"):
            # A README.md of a folder is README.html, because index.html lists the folder's files.
            target = "index.html" if name == "README.md" else name.removesuffix(".md") + ".html"
            files.append(File(name, str(here), config.site_dir, False, dest_uri=target))
        elif name.endswith((".svg", ".png")):
            files.append(File(name, str(here), config.site_dir, False))
        else:
            source = (here / name).read_text(encoding="utf-8", errors="replace")
            files.append(SourcePage(config, name, f"{name}.html", "", source))
    for folder in sorted(folders):
        inside = [PurePosixPath(name) for name in sorted([*names, *folders])]
        inside = [name for name in inside if str(name.parent) == folder]
        links = "\n".join(f"- [{name.name}]({name.parent.name}/{name.name})" for name in inside)
        files.append(SourcePage(config, folder, f"{folder}/index.html", links))
    return files


class SourcePage(File):
    """A source file or a folder. MkDocs makes a page of it although its name does not end in .md."""

    def __init__(self, config: MkDocsConfig, name: str, target: str, text: str, source: str = "") -> None:
        """`text` is Markdown; `source` comes below it, as it is."""
        super().__init__(
            name, None, config.site_dir, False, dest_uri=target, inclusion=InclusionLevel.NOT_IN_NAV
        )
        # The search finds the name, but rather a page that is called so.
        self.content_string = (
            f"---\nhide: [toc]\nsearch: {{boost: 0.5}}\n---\n# {self.name_with_links()}\n\n{text}"
        )
        self.source = source

    def name_with_links(self) -> str:
        """The name, with links to the folders above."""
        *folders, here = PurePosixPath(self.src_uri).parts
        ups = reversed(range(len(folders)))
        links = [f"[{name}]({'../' * up or '.'})/" for name, up in zip(folders, ups, strict=True)]
        return "".join([*links, here])

    def is_documentation_page(self) -> bool:
        return True


def on_page_content(html: str, *, page: Page, config: MkDocsConfig, files: Files) -> None:
    """MkDocs looks whether there is an anchor for each link. It is told of the lines here."""
    if isinstance(page.file, SourcePage):
        page.present_anchor_ids.update(f"L{number}" for number, _ in numbered(page.file.source))
    for links in (page.links_to_anchors or {}).values():
        for anchor, link in list(links.items()):
            if re.fullmatch(r"L\d+-L\d+", anchor):
                # Several lines: the first and the last must be there.
                del links[anchor]
                links.update(dict.fromkeys(anchor.split("-"), link))


def on_page_context(context: object, *, page: Page, config: MkDocsConfig, nav: object) -> None:
    """The source comes into its page after the search has read that: it would be most of the build."""
    if isinstance(page.file, SourcePage) and page.file.source:
        page.content += source_html(page.file.src_uri, page.file.source)


@cache  # `mkdocs serve` builds again and again
def source_html(name: str, source: str) -> str:
    try:
        # Pygments takes .h for C.
        lexer = get_lexer_by_name("cpp") if name.endswith(".h") else get_lexer_for_filename(name)
    except ClassNotFound:
        lexer = TextLexer()
    lexer.stripnl = False  # or empty lines at the head would not count
    lines = "".join(
        f'<span class="line" id="L{number}"><a href="#L{number}" data-number="{number}"></a>{line}\n</span>'
        for number, line in numbered(highlight(source, lexer, HtmlFormatter(nowrap=True)))
    )
    return f'<div class="highlight source"><pre><code>{lines}</code></pre></div>'


def numbered(text: str) -> Iterator[tuple[int, str]]:
    return enumerate(text.removesuffix("\n").split("\n"), 1)


def on_serve(server: Any, *, config: MkDocsConfig, builder: object) -> Any:
    """What `mkdocs serve` watches beside docs_dir."""
    pages = [name for name in repository_files(root(config)) if name.endswith(".md")]
    for name in ["docs", *(name for name in pages if not name.startswith("docs/"))]:
        server.watch(str(root(config) / name))
    return server
