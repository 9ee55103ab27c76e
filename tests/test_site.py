"""The web site (mkdocs.yml): the real one, and small ones with something broken in them."""

from __future__ import annotations

import functools
import http.server
import json
import posixpath
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from html import unescape
from pathlib import Path
from urllib.parse import unquote, urlsplit

import packaging_steps as steps
import pytest
from browser import Tab, start_chromium
from conftest import missing, require_package
from markdown_it import MarkdownIt  # comes with rich

ADDRESS = re.compile(r'<(\w+)\s[^<>]*?(?:href|src)="([^"]*)"')
FETCHED = ("script", "link", "img", "iframe", "source", "video")


@dataclass
class Site:
    """One that was built."""

    folder: Path
    log: str
    failed: bool

    def page(self, name: str) -> str:
        return (self.folder / name).read_text(encoding="utf-8")

    @functools.cached_property
    def pages(self) -> dict[str, str]:
        return {
            path.relative_to(self.folder).as_posix(): path.read_text() for path in self.folder.rglob("*.html")
        }

    @functools.cached_property
    def in_nav(self) -> list[str]:
        """In its order, which is the same on all pages."""
        return re.findall(r'<a href="([^"#]+)" class="md-nav__link', self.page("CHANGELOG.html"))


def build(repository: Path, to: Path) -> Site:
    """As the stage `site` of full_test.sh does it."""
    for package in ("mkdocs", "material", "latex2mathml"):
        require_package(package)
    if not (repository / ".git").exists():
        missing("the site is built from a git clone")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", to]
    done = steps.run_any(*command, cwd=repository, env=steps.clean_environment(NO_MKDOCS_2_WARNING="1"))
    return Site(to, done.stdout, done.returncode != 0)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Site:
    """That of this repository."""
    built = build(steps.ROOT, tmp_path_factory.mktemp("site"))
    assert not built.failed, built.log
    return built


def small_site(folder: Path, files: dict[str, str]) -> Site:
    """A repository with these files, built with the settings of this one."""
    for name in ("docs/site", "scripts/site"):
        shutil.copytree(steps.ROOT / name, folder / name)
    for name in ("mkdocs.yml", ".gitignore"):
        shutil.copy(steps.ROOT / name, folder / name)
    for name, text in {"README.md": "# A small site\n", **files}.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text, encoding="utf-8")
    subprocess.run(["git", "init", "-q", folder], check=True)
    return build(folder, folder / "build" / "site")


# ---- the real site ----


def test_it_has_the_pages_in_order(site: Site) -> None:
    chapters = sorted(path.stem for path in steps.ROOT.glob("docs/course/[0-9]*.md"))
    shown = [name for name in site.in_nav if re.match(r"docs/course/\d", name)]
    assert shown == [f"docs/course/{name}.html" for name in chapters]
    assert {"index.html", "docs/design.html", "docs/trace.html", "benchmarks/README.html"} < set(site.in_nav)
    assert {"CONTRIBUTING.html", "CHANGELOG.html"} < set(site.in_nav)


def test_every_link_leads_to_a_page_and_an_anchor_of_it(site: Site) -> None:
    """Also those that are written in HTML, which MkDocs does not look at."""
    anchors = {name: {"", *re.findall(r'\sid="([^"]+)"', html)} for name, html in site.pages.items()}
    broken = []
    for name, html in site.pages.items():
        for _, link in ADDRESS.findall(html):
            address = urlsplit(unescape(link))
            if address.scheme or address.netloc or name == "404.html":
                continue
            target = posixpath.normpath(posixpath.join(posixpath.dirname(name), unquote(address.path)))
            target = target if address.path else name
            fragment = unquote(address.fragment)
            wanted = fragment.split("-") if re.match(r"L\d+-L\d+$", fragment) else [fragment]
            if not (site.folder / target).is_file() or not anchors.get(target, {""}).issuperset(wanted):
                broken.append(f"{name}: {link}")
    assert not broken


def test_nothing_comes_from_another_host(site: Site) -> None:
    fetched = [
        (name, address)
        for name, html in site.pages.items()
        for tag, address in ADDRESS.findall(html)
        if tag in FETCHED and urlsplit(address).netloc
    ]
    assert not fetched
    for style in site.folder.rglob("*.css"):
        assert not re.search(r"url\([\"']?(?:https?:)?//|@import", style.read_text()), style


def test_no_link_leads_to_a_host_of_repositories(site: Site) -> None:
    hosts = {urlsplit(address).netloc for html in site.pages.values() for _, address in ADDRESS.findall(html)}
    assert not [host for host in hosts if re.search(r"git|bitbucket|codeberg", host)]


def test_a_source_file_has_an_anchor_for_each_line(site: Site) -> None:
    source = (steps.ROOT / "cpp/kv/block_allocator.h").read_text()
    html = site.page("cpp/kv/block_allocator.h.html")
    assert re.findall(r'<span class="line" id="L(\d+)">', html) == [
        str(number + 1) for number in range(source.count("\n"))
    ]
    code = re.search(r'<div class="highlight source"><pre><code>(.*?)</code>', html, re.DOTALL)
    assert code
    assert unescape(re.sub(r"<.*?>", "", code[1])) == source
    assert '<span class="k">class</span>' in html


def test_a_folder_lists_its_files(site: Site) -> None:
    html = site.page("cpp/kv/index.html")
    assert '<a href="block_allocator.h.html">block_allocator.h</a>' in html
    assert '<a href="../index.html">cpp</a>/kv' in html


def test_the_search_knows_every_page_and_the_code_in_it(site: Site) -> None:
    entries = json.loads(site.page("search/search_index.json"))["docs"]
    found = {entry["location"].partition("#")[0] or "index.html" for entry in entries}
    assert set(site.in_nav) <= found
    assert any("engine.has_unfinished_requests" in entry["text"] for entry in entries)
    assert "cpp/kv/block_allocator.h.html" in found  # by its name


def counts(html: str, *tags: str) -> dict[str, int]:
    return {tag: len(re.findall(rf"<{tag}[ >]", html)) for tag in tags}


def test_pages_have_the_lists_and_tables_that_github_shows(site: Site) -> None:
    """Python-Markdown reads some of them otherwise (scripts/site/like_github.py)."""
    commonmark = MarkdownIt("commonmark").enable(["table", "strikethrough"])
    tags = ("ul", "ol", "li", "table", "tr", "h2", "h3", "details", "strong", "img")
    for name in site.in_nav:
        source = "README.md" if name == "index.html" else name.removesuffix(".html") + ".md"
        article = re.search(r"<article.*?</article>", site.pages[name], re.DOTALL)
        assert article
        shown = re.sub(r'<div class="footnote">.*?</div>', "", article[0], flags=re.DOTALL)
        text = (steps.ROOT / source).read_text(encoding="utf-8")
        assert counts(shown, *tags) == counts(commonmark.render(text), *tags), name


# ---- small ones ----


def test_a_new_chapter_needs_no_edit(tmp_path: Path) -> None:
    built = small_site(
        tmp_path,
        {
            f"docs/course/{name}.md": f"# {title}\n"
            for name, title in {
                "10-ten": "10 · Ten",
                "02-two": "2 · Two",
                "00-start": "0 · Start",
                "journey": "A journey",
            }.items()
        },
    )
    assert not built.failed, built.log
    html = built.page("docs/course/02-two.html")
    shown = re.findall(r'class="md-nav__link.*?<span class="md-ellipsis">\s*(.*?)\s*</span>', html, re.DOTALL)
    titles = ["0 · Start", "2 · Two", "10 · Ten", "A journey"]
    assert [title for title in dict.fromkeys(shown) if title in titles] == titles
    assert 'aria-label="Previous: 0 · Start"' in html
    assert 'aria-label="Next: 10 · Ten"' in html


def test_formulas_become_mathml(tmp_path: Path) -> None:
    text = r"""# 1 · The factor $\sqrt{d}$

The norm is $\sqrt{\frac{1}{n}\sum_{i=1}^{n} x_i^2 + \epsilon}$, the block $\lfloor p / B \rfloor$.
It costs $5, and `$HOME` is not a formula.

$$
\mathrm{softmax}(x)_i = \frac{e^{x_i - \max_j x_j}}{\sum_k e^{x_k - \max_j x_j}}
$$
In a line with text before it and after it:
$$ (Q K^\top) \odot M $$
and so on.

- In a list:
  $$
  a_{ij} = \begin{cases} 1 & \text{if } i \ge j \\ 0 & \text{else} \end{cases}
  $$
- and another

| a | b |
| --- | --- |
| $x_1$ | $\begin{pmatrix} a & b \\ c & d \end{pmatrix}$ |

```math
\begin{aligned} a &= b \\ &= c \end{aligned}
```

<details><summary>The answer</summary>

It is **bold** and $x^2$.

</details>

<!-- $nothing$ -->
"""
    built = small_site(tmp_path, {"docs/course/01-a.md": text})
    assert not built.failed, built.log
    html = built.page("docs/course/01-a.html")
    assert html.count("<math ") == 10
    assert html.count('<math display="block"') == 4
    assert "\\" not in re.sub(r"<script.*?</script>", "", html, flags=re.DOTALL)
    assert "$$" not in html
    assert "<msqrt>" in html
    assert re.search(r'<li>In a list:\s*<div class="arithmatex">\s*<math display="block"', html)
    assert re.search(
        r"<details><summary>The answer</summary>\s*<p>It is <strong>bold</strong> and <span", html
    )


BROKEN = {
    "[a page](02-nosuch.md)": "contains a link '02-nosuch.md'",
    "[an anchor](../../README.md#nosuch)": "#nosuch', but the doc 'README.md' does not contain an anchor",
    "[an anchor here](#nosuch)": "contains a link '#nosuch', but there is no such anchor on this page",
    "[a file](../../code.cpp)": "contains a link '../../code.cpp', but the target 'code.cpp' is not found",
    "[a folder](../../cpp/nosuch)": "contains an unrecognized relative link '../../cpp/nosuch'",
    "[from the root](/README.md)": "contains an absolute link '/README.md'",
    "[line 4 of 3](../../code.py#L4)": "'../../code.py#L4', but the doc 'code.py' does not contain",
    "[lines 2 to 5](../../code.py#L2-L5)": "#L2-L5', but the doc 'code.py' does not contain an anchor '#L5'",
    "![an image](figures/nosuch.svg)": "contains a link 'figures/nosuch.svg'",
    r"$\frac{a}$": r"cannot be converted: \frac{a} (mfrac has 1 parts)",
    r"$\sqrt{x$": r"cannot be converted: \sqrt{x (a brace is missing)",
    r"$\nosuch{x}$": r"cannot be converted: \nosuch{x} (\nosuch is not understood)",
    r"$y_$": "cannot be converted: y_ (MissingSuperScriptOrSubscriptError)",
    r"$a & b$": "cannot be converted: a & b (& is not understood)",
    r"$\begin{nosuch} a \end{nosuch}$": "(there is no environment nosuch)",
    r"$\operatorname*{arg\,max} x$": "(there is an operator without a name)",
    "in a line: $$z$$": "cannot be converted: z ($$ stands in a line of text)",
    "$$\nalso not closed": "cannot be converted: $$ (it does not stand between dollars)",
    r"not closed: $\frac{a}{b}": r"cannot be converted: \frac{a}{b} (it does not stand between dollars",
}


@pytest.fixture(scope="module")
def broken(tmp_path_factory: pytest.TempPathFactory) -> Site:
    chapter = "# 1 · Broken\n\n" + "\n\n".join(BROKEN)
    files = {
        "docs/course/01-broken.md": chapter,
        "code.py": "1\n2\n3\n",
        "cpp/a.cpp": "",
        "docs/aside/page.md": "# Aside\n",
        "cpp/README.md": "# C++\n",
    }
    return small_site(tmp_path_factory.mktemp("broken"), files)


@pytest.mark.parametrize("part", BROKEN)
def test_what_is_broken_fails_and_is_named(part: str, broken: Site) -> None:
    warnings = [line for line in broken.log.splitlines() if line.startswith("WARNING")]
    assert [line for line in warnings if BROKEN[part] in line and "'docs/course/01-broken.md'" in line], (
        broken.log
    )


def test_a_page_that_is_not_in_the_nav_fails(broken: Site) -> None:
    assert re.search(r'not included in the "nav" configuration:\s+- docs/aside/page.md\n', broken.log)


def test_each_warning_counts(broken: Site) -> None:
    assert broken.failed
    assert f"Aborted with {len(BROKEN) + 1} warnings in strict mode!" in broken.log


# ---- in a browser ----


@pytest.fixture(scope="module")
def tab() -> Iterator[Tab]:
    chromium = start_chromium()
    yield Tab(chromium)
    chromium.quit()


@pytest.fixture(scope="module")
def address(site: Site) -> Iterator[str]:
    """Where the site is served: from files the search cannot be read."""

    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, format: str, *args: object) -> None:
            pass

    handler = functools.partial(Quiet, directory=str(site.folder))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def test_the_search_finds(tab: Tab, address: str) -> None:
    tab.open(f"{address}/index.html")
    box = tab.chromium.find_element("css selector", ".md-search__input")
    box.click()
    box.send_keys("preempts the newest request")
    tab.wait_for("document.querySelectorAll('.md-search-result__link').length")
    found = tab.js("[...document.querySelectorAll('.md-search-result__link')].map(link => link.href)")
    assert any(f"{address}/docs/design.html" in link for link in found)
    loaded = tab.js("performance.getEntriesByType('resource').map(entry => entry.name)")
    assert all(name.startswith((address, "blob:", "data:")) for name in loaded)
    assert not tab.complaints()


def test_a_link_to_lines_marks_them(tab: Tab, address: str) -> None:
    tab.open(f"{address}/cpp/kv/block_allocator.h.html", hash="#L60-L70")
    tab.wait_for("document.querySelector('.marked')")
    assert tab.js("[...document.querySelectorAll('.marked')].map(line => line.id)") == [
        f"L{number}" for number in range(60, 71)
    ]
    tab.wait_for("document.getElementById('L60').getBoundingClientRect().top > 0")
    assert tab.js("document.getElementById('L60').getBoundingClientRect().bottom < innerHeight")


@pytest.mark.slow
def test_no_page_is_wider_than_a_phone(tab: Tab, address: str, site: Site) -> None:
    for name in [*site.in_nav, "cuda/kernels/rms_norm.cu.html", "cpp/kv/index.html"]:
        tab.open(f"{address}/{name}", size="phone", scheme="dark")
        assert tab.js("document.documentElement.scrollWidth") <= 390, name


def test_brackets_grow_with_what_is_in_them(tab: Tab, tmp_path: Path) -> None:
    """As they do in a font for mathematics; style.css names some."""
    text = "# 1 · A\n\n$$ (x) $$\n\n$$\\left( \\frac{\\frac{a}{b}}{\\frac{c}{d}} \\right)$$\n"
    built = small_site(tmp_path, {"docs/course/01-a.md": text})
    tab.open(built.folder / "docs/course/01-a.html")
    low, high = tab.js(
        "[...document.querySelectorAll('mo:first-child')].map(bracket => bracket.clientHeight)"
    )
    assert high > 2 * low
