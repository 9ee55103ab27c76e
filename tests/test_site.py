"""The web site of this repository (mkdocs.yml)."""

from __future__ import annotations

import functools
import http.server
import json
import posixpath
import re
import threading
from collections.abc import Iterator
from html import unescape
from pathlib import Path
from urllib.parse import unquote, urlsplit

import packaging_steps as steps
import pytest
from browser import Tab, start_chromium
from site_building import Site, build, commonmark, elements, small_site

pytestmark = pytest.mark.slow  # building it takes some 10 s

ADDRESS = re.compile(r'<(\w+)\s[^<>]*?(?:href|src)="([^"]*)"')
FETCHED = ("script", "link", "img", "iframe", "source", "video")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Site:
    """That of this repository."""
    built = build(steps.ROOT, tmp_path_factory.mktemp("site"))
    assert not built.failed, built.log
    return built


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


def test_pages_have_the_lists_and_tables_that_github_shows(site: Site) -> None:
    for name in site.in_nav:
        source = "README.md" if name == "index.html" else name.removesuffix(".html") + ".md"
        text = (steps.ROOT / source).read_text(encoding="utf-8")
        assert elements(site.article(name)) == elements(commonmark(text)), name


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
