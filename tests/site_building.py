"""What tests of the web site share: building it, and building small ones."""

from __future__ import annotations

import functools
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import packaging_steps as steps
from conftest import missing, require_package
from markdown_it import MarkdownIt  # comes with rich


@dataclass
class Site:
    """One that was built."""

    folder: Path
    log: str
    failed: bool

    def page(self, name: str) -> str:
        return (self.folder / name).read_text(encoding="utf-8")

    def article(self, name: str) -> str:
        """A page without the nav and the like."""
        found = re.search(r"<article.*?</article>", self.page(name), re.DOTALL)
        assert found
        return re.sub(r'<div class="footnote">.*?</div>', "", found[0], flags=re.DOTALL)

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


def commonmark(text: str) -> str:
    """The page by another program, which reads Markdown as GitHub does."""
    return MarkdownIt("commonmark").enable(["table", "strikethrough"]).render(text)


def elements(html: str) -> dict[str, int]:
    """How many there are of what Python-Markdown may read otherwise (scripts/site/like_github.py)."""
    tags = ("ul", "ol", "li", "table", "tr", "h2", "h3", "details", "strong", "img")
    return {tag: len(re.findall(rf"<{tag}[ >]", html)) for tag in tags}
