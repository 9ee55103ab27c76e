"""Keeps the pages of the course true: what they quote from the code, and what they say is printed.

    python scripts/course_pages.py check              quotes and line links of all pages; says what is stale
    python scripts/course_pages.py update             brings them up to date
    python scripts/course_pages.py outputs 6 7        runs experiments, puts what they print into chapters
    python scripts/course_pages.py figures 6 7        draws figures

The last two take numbers of chapters and the word journey; without any, they do all.

In a page, a quote is a comment, and below it what this script writes:

    <!-- quote cuda/kernels/rms_norm.cu "void rms_norm_kernel(" -->
    <!-- quote cpp/sched/scheduler.cpp "the first line's text" .. "the last line's text" -->
    <!-- quote cpp/sched/scheduler.cpp "a line before them" > "the first" .. "the last" -->

The text must stand on one line of the file alone, or be the first after "a line before them". Without a last
line the quote ends with the block that begins there: at the closing brace, or in Python where the indentation
returns.

A link to a line has that line's text as its title, and the script keeps the number right:

    [engine.cpp:120](../../cpp/engine/engine.cpp#L120 "StepBatch Engine::make_batch(")

And a part of what the chapter's experiment prints, by its heading, where numbers after "≈" may differ:

    <!-- output: How many bytes -->
    <!-- output cuda: Five kernels -->       of a GPU, from benchmarks/results/course_cuda.json
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
COURSE = ROOT / "docs" / "course"
CUDA_REPORT = ROOT / "benchmarks" / "results" / "course_cuda.json"
LANGUAGES = {".cpp": "cpp", ".h": "cpp", ".cu": "cpp", ".py": "python", ".sh": "bash", ".json": "json"}
MOST_LINES = 60  # of a quote: longer ones are not read

# What this script writes below a quote: a block that ends at its own fence, and a link that says lines.
# Nothing else may be taken for it, because it is written anew.
_BODY = (
    r"\n?(?P<fence>`{3,})\w*\n(?:(?!(?P=fence)$).*\n)*(?P=fence)\n"
    r"\n?\[[^\]\n]*, lines? [^\]\n]*\]\([^)\n]*#L[^)\n]*\)\n"
)
_QUOTE = re.compile(
    r'^<!-- quote (?P<file>\S+) (?:"(?P<within>[^\n]+?)" > )?"(?P<first>[^\n]+?)"'
    rf'(?: \.\. "(?P<last>[^\n]+?)")? -->\n(?P<body>{_BODY})?',
    re.MULTILINE,
)
_CODE = re.compile(r"^(?P<code>`{3,})[^`\n]*\n(?:.*\n)*?(?P=code)$", re.MULTILINE)
_LINE_LINK = re.compile(
    r'\[(?P<text>[^\]]*)\]\((?P<target>[^)#\s]+)#L(?P<line>\d+)(?: "(?P<title>[^"]+)")?\)'
)
_OUTPUT = re.compile(
    r"^<!-- output(?P<device> cuda)?: (?P<title>[^\n]+?) -->\n(?P<body>```text\n(?:(?!```$).*\n)*```\n)?",
    re.MULTILINE,
)


class Stale(Exception):
    """A quote or link that cannot be brought up to date by itself."""


def pages(root: Path = ROOT) -> list[Path]:
    found = [*root.glob("*.md"), *(root / "docs").rglob("*.md"), *(root / "course").rglob("*.md")]
    return sorted(found)


def chapter_page(name: str) -> Path:
    """Of a number, or of the journey."""
    pattern = f"{int(name):02}-*.md" if name.isdecimal() else f"{name}.md"
    found = list(COURSE.glob(pattern))
    if len(found) != 1:
        sys.exit(f"course_pages.py: {len(found)} pages are called docs/course/{pattern}, expected one")
    return found[0]


def _only_line(lines: list[str], text: str, after: int = 0) -> int:
    """The index of the one line that has this text; after another line, of the first."""
    found = [i for i, line in enumerate(lines) if text in line and i >= after]
    if not found:
        raise Stale(f'no line has "{text}"')
    if len(found) > 1 and after == 0:
        raise Stale(f'{len(found)} lines have "{text}"')
    return found[0]


def _indent(line: str) -> int:
    return len(line) - len(line.lstrip())


def _end_of_block(lines: list[str], first: int, language: str) -> int:
    """The index of the last line of the block that begins at `first`, which may be a comment above it."""
    indent = _indent(lines[first])
    comment = "#" if language in ("python", "bash") else "//"
    start = first
    while start + 1 < len(lines) and lines[start].lstrip().startswith(comment):
        start += 1
    if language == "python":
        end = start
        for i in range(start + 1, len(lines)):
            if not lines[i].strip():
                continue
            if _indent(lines[i]) <= indent and not lines[i].lstrip().startswith((")", "]", "}")):
                break
            end = i
        return end
    for i in range(start, len(lines)):
        line = lines[i]
        if i == start and line.rstrip().endswith(";"):
            return i
        if _indent(line) == indent and line.lstrip().startswith("}"):
            return i
        if i == start and line.rstrip().endswith("}") and line.count("{") == line.count("}"):
            return i
    raise Stale(f'the block of "{lines[first].strip()}" does not end')


def quoted(root: Path, file: str, within: str | None, first: str, last: str | None) -> tuple[str, int, int]:
    """The text, and its first and last line, from 1."""
    path = root / file
    if not path.is_file():
        raise Stale(f"{file} is not there")
    lines = path.read_text(encoding="utf-8").splitlines()
    language = LANGUAGES.get(path.suffix, "text")
    try:
        after = 0 if within is None else _only_line(lines, within)
        begin = _only_line(lines, first, after)
        end = _end_of_block(lines, begin, language) if last is None else _only_line(lines, last, begin + 1)
    except Stale as problem:
        raise Stale(f"{file}: {problem}") from None
    if end - begin >= MOST_LINES:
        raise Stale(
            f'{file}: the quote from "{first}" has {end - begin + 1} lines, at most {MOST_LINES} are read'
        )
    part = lines[begin : end + 1]
    shift = min(_indent(line) for line in part if line.strip())
    return "\n".join(line[shift:] for line in part), begin + 1, end + 1


def _with_quotes(page: Path, text: str, root: Path) -> str:
    def fresh(match: re.Match[str]) -> str:
        code, begin, end = quoted(root, match["file"], match["within"], match["first"], match["last"])
        target = os.path.relpath(root / match["file"], page.parent)
        directive = match[0].splitlines()[0]
        language = LANGUAGES.get(Path(match["file"]).suffix, "text")
        fence = "`" * max(3, 1 + max(map(len, re.findall(r"^`{3,}", code, re.MULTILINE)), default=0))
        where = f"line {begin}" if begin == end else f"lines {begin}–{end}"
        anchor = f"#L{begin}" if begin == end else f"#L{begin}-L{end}"
        link = f"[{match['file']}, {where}]({target}{anchor})"
        return f"{directive}\n{fence}{language}\n{code}\n{fence}\n\n{link}\n"

    result, count = _QUOTE.subn(fresh, text)
    if count != len(re.findall(r"<!--\s*quote", _CODE.sub("", text), re.IGNORECASE)):
        raise Stale("a quote is not written as scripts/course_pages.py --help says")
    return result


def _with_line_links(page: Path, text: str, root: Path) -> str:
    def fresh(match: re.Match[str]) -> str:
        if "://" in match["target"]:
            return match[0]  # of another repository
        file = os.path.relpath((page.parent / match["target"]).resolve(), root)
        if not match["title"]:
            raise Stale(f"the link to {file}#L{match['line']} has no title with the line's text")
        path = page.parent / match["target"]
        if not path.is_file():
            raise Stale(f"{file} is not there")
        try:
            line = _only_line(path.read_text(encoding="utf-8").splitlines(), match["title"]) + 1
        except Stale as problem:
            raise Stale(f"{file}: {problem}") from None
        shown = re.sub(r"(\.\w+):\d+", rf"\1:{line}", match["text"])
        return f'[{shown}]({match["target"]}#L{line} "{match["title"]}")'

    result, count = _LINE_LINK.subn(fresh, text)
    if count != len(re.findall(r"\]\([^)#\s]+#L\d", text)):
        raise Stale("a link to a line is not written as scripts/course_pages.py --help says")
    return result


def fresh_page(page: Path, root: Path = ROOT) -> str:
    """The page as it should be. Raises Stale, which names the page."""
    text = _with_last_newline(page.read_text(encoding="utf-8"))
    parts, end = [], 0
    try:
        text = _with_quotes(page, text, root)
        # Not in code, and not the links below quotes.
        for match in re.finditer(f"{_QUOTE.pattern}|{_CODE.pattern}", text, re.MULTILINE):
            parts += [_with_line_links(page, text[end : match.start()], root), match[0]]
            end = match.end()
        parts.append(_with_line_links(page, text[end:], root))
    except Stale as problem:
        raise Stale(f"{page.relative_to(root)}: {problem}") from None
    return "".join(parts)


def _with_last_newline(text: str) -> str:
    return text if text.endswith("\n") else text + "\n"


def output_sections(name: str) -> dict[str, str]:
    """What the chapter's experiment prints on a CPU, by its headings."""
    return sections(_run_experiment(name))


def _run_experiment(name: str, *options: str) -> str:
    command = [sys.executable, "-m", "tiny_vllm.course", name, "--device", "cpu", *options]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"course_pages.py: the experiment {name} failed:\n{done.stdout}{done.stderr}")
    return done.stdout


def cuda_sections(name: str) -> dict[str, str]:
    """What it printed on the GPU of the report."""
    if not CUDA_REPORT.is_file():
        return {}
    report = json.loads(CUDA_REPORT.read_text(encoding="utf-8"))
    return sections(report["chapters"].get(name, ""))


def sections(text: str) -> dict[str, str]:
    parts = re.split(r"^== (.+) ==$", text, flags=re.MULTILINE)
    return {title: text.strip("\n") for title, text in zip(parts[1::2], parts[2::2], strict=True)}


def without_measures(text: str) -> str:
    """Numbers after "≈" left out, and the spaces that align them."""
    return re.sub(r" +", " ", re.sub(r"≈ ?[\d.,]+(e[+-]?\d+)?", "≈", text))


def shown_outputs(text: str, device: str) -> dict[str, str]:
    """What a chapter says is printed on this device, by heading."""
    _check_outputs(text)
    return {
        m["title"]: (m["body"] or "").removeprefix("```text\n").removesuffix("\n```\n")
        for m in _OUTPUT.finditer(text)
        if (m["device"] is not None) == (device == "cuda")
    }


def _check_outputs(text: str) -> None:
    found = [(m["device"], m["title"]) for m in _OUTPUT.finditer(text)]
    if len(found) != len(re.findall(r"<!--\s*output", _CODE.sub("", text), re.IGNORECASE)):
        raise Stale("an output is not written as scripts/course_pages.py --help says")
    for device, title in found:
        if found.count((device, title)) > 1:
            raise Stale(f'"{title}" is shown twice')


def with_outputs(text: str, cpu: dict[str, str], cuda: dict[str, str]) -> str:
    def fresh(match: re.Match[str]) -> str:
        sections = cuda if match["device"] else cpu
        if match["device"] and not sections:
            return match[0]  # no report yet
        if match["title"] not in sections:
            raise Stale(f'nothing is printed under "{match["title"]}"; there is {", ".join(sections)}')
        return f"{match[0].splitlines()[0]}\n```text\n{sections[match['title']]}\n```\n"

    text = _with_last_newline(text)
    _check_outputs(text)
    return _OUTPUT.sub(fresh, text)


def check() -> int:
    stale = []
    for page in pages():
        try:
            if fresh_page(page) != page.read_text(encoding="utf-8"):
                stale.append(f"{page.relative_to(ROOT)}: a quote or a line number is stale")
        except Stale as problem:
            stale.append(str(problem))
    for problem in stale:
        print(problem, file=sys.stderr)
    if stale:
        print("python scripts/course_pages.py update brings quotes and numbers up to date", file=sys.stderr)
    return bool(stale)


def update() -> int:
    status = 0
    for page in pages():
        try:
            _write_if_other(page, fresh_page(page))
        except Stale as problem:
            print(problem, file=sys.stderr)
            status = 1
    return status


def outputs(names: list[str]) -> int:
    status = 0
    for name in names:
        page = chapter_page(name)
        text = page.read_text(encoding="utf-8")
        try:
            _write_if_other(page, with_outputs(text, output_sections(name), cuda_sections(name)))
        except Stale as problem:
            print(f"{page.relative_to(ROOT)}: {problem}", file=sys.stderr)
            status = 1
    return status


def figures(names: list[str]) -> int:
    for name in names:
        file = COURSE / "figures" / f"{chapter_page(name).stem}.svg"
        file.parent.mkdir(exist_ok=True)
        _run_experiment(name, "--figure", str(file))
        print(f"wrote {file.relative_to(ROOT)}")
    return 0


def _write_if_other(page: Path, text: str) -> None:
    if page.read_text(encoding="utf-8") != text:
        page.write_text(text, encoding="utf-8")
        print(f"updated {page.relative_to(ROOT)}")


def main(arguments: list[str]) -> int:
    command, names = (arguments or ["--help"])[0], arguments[1:]
    with_names: dict[str, Callable[[list[str]], int]] = {"outputs": outputs, "figures": figures}
    if command in with_names and all(name.isdecimal() or name == "journey" for name in names):
        numbers = [str(int(page.name[:2])) for page in sorted(COURSE.glob("[0-9][0-9]-*.md"))]
        return with_names[command](names or [*numbers, "journey"])
    if command == "check" and not names:
        return check()
    if command == "update" and not names:
        return update()
    print(__doc__)
    return 0 if command in ("-h", "--help") else 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
