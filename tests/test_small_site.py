"""Small web sites with the settings of the real one (mkdocs.yml), and with something broken in them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from site_building import Site, commonmark, elements, small_site


def test_a_new_chapter_needs_no_edit(tmp_path: Path) -> None:
    chapters = {
        "10-ten": "10 · Ten",
        "02-two": "2 · Two",
        "00-start": "0 · Start",
        "journey": "A journey",
    }
    files = {f"docs/course/{name}.md": f"# {title}\n" for name, title in chapters.items()}
    built = small_site(tmp_path, files)
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


def test_lists_are_read_as_on_github(tmp_path: Path) -> None:
    text = """# 1 · Lists

Directly after text:
- one
- two
  - inside, by two spaces
    - further inside

      a paragraph of it
  - inside again
- three

A number that is not 1 begins no list, and so the next line is text.
2. See?

1. A first step:
   - inside, by three spaces

   Its second paragraph.

   ```python
   print("code of the first step")
   ```
2. The second.
   ```python
   print("code of the second step")
   ```
10. The last

    with a paragraph by four.

> A quote
> - with a list
"""
    built = small_site(tmp_path, {"docs/course/01-lists.md": text})
    assert not built.failed, built.log
    article = built.article("docs/course/01-lists.html")
    assert elements(article) == elements(commonmark(text))
    assert (
        len(re.findall(r"</p>\s*<div class=\"highlight\"><pre>", article)) == 2
    )  # beside the text, not in it


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
