"""The course keeps its promises: pages, quotes, what experiments print, figures, exercises."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import packaging_steps as steps
import pytest
from conftest import missing, require_package
from tiny_vllm.course import lab
from tiny_vllm.course.__main__ import main

sys.path.insert(0, str(steps.ROOT / "scripts"))
import course_pages

COURSE = steps.ROOT / "docs" / "course"
CODE = steps.ROOT / "course"
NUMBERS = range(24)
WITHOUT_TENSORS = (4, 16, 19, 22)  # they are about text and requests


def page(number: int) -> Path:
    (found,) = COURSE.glob(f"{number:02}-*.md")
    return found


def title_of(number: int) -> str:
    title = re.match(rf"# {number} · (.+)\n", page(number).read_text(encoding="utf-8"))
    assert title
    return title[1]


def flowing(number: int) -> str:
    """The page in one line: text is wrapped where it happens to be."""
    return " ".join(page(number).read_text(encoding="utf-8").split())


def prose(text: str) -> str:
    """Without code, output, comments and the targets of links."""
    text = re.sub(r"^```.*?^```$|<!--.*?-->", "", text, flags=re.MULTILINE | re.DOTALL)
    return re.sub(r"\]\([^)]*\)", "]", text)


# ---- pages


@pytest.mark.parametrize("number", NUMBERS)
def test_a_chapter_has_its_parts(number: int) -> None:
    text = page(number).read_text(encoding="utf-8")
    assert 800 <= len(prose(text).split()) <= 2500
    assert re.search(r"\$[^$]+\$", text), "no mathematics"
    assert re.search(r"^\|.*\bshape\b", text, re.MULTILINE) or number in WITHOUT_TENSORS, "no shapes"
    assert re.search(r"^<!-- quote ", text, re.MULTILINE), "no code"
    assert re.search(r"^<!-- output: ", text, re.MULTILINE), "no output"
    assert f"python -m tiny_vllm.course {number}\n" in text
    figure = f"figures/{page(number).stem}.svg"
    assert re.search(rf"!\[[^\]]{{20,}}\]\({figure}\)", text), "no figure with a description"
    assert f"python scripts/course_pages.py figures {number}" in flowing(number)
    assert lab.title(number)
    if number + 1 in NUMBERS:
        assert f"]({page(number + 1).name})" in text.splitlines()[-1], (
            "the last line leads to the next chapter"
        )


@pytest.mark.parametrize("number", NUMBERS)
def test_a_chapter_names_its_exercises(number: int) -> None:
    text = flowing(number)
    tests = sorted((CODE / "exercises" / f"{number:02}").glob("test_*.py"))
    assert 2 <= len(tests) <= 4
    for test in tests:
        assert f"pytest course/exercises/{number:02}/{test.name}" in text
    stubs = {f.name for f in (CODE / "exercises" / f"{number:02}").iterdir() if f.is_file()}
    stubs -= {test.name for test in tests}
    for stub in stubs:
        assert f"course/exercises/{number:02}/{stub})" in text
        assert f"course/solutions/{number:02}/{stub})" in text
        assert (CODE / "solutions" / f"{number:02}" / stub).is_file()


def test_the_readme_lists_the_chapters_in_order() -> None:
    readme = (steps.ROOT / "README.md").read_text(encoding="utf-8")
    listed = re.findall(r"\[([^\]]+)\]\(docs/course/(\d\d-[a-z0-9-]+\.md)\)", readme)
    assert listed == [(title_of(n), page(n).name) for n in NUMBERS]


def test_links_lead_somewhere() -> None:
    for file in course_pages.pages():
        for target in re.findall(r"\]\((?!https?:|#)([^)#\s]+)", prose_with_links(file)):
            assert (file.parent / target).exists(), f"{file.relative_to(steps.ROOT)} links to {target}"


def prose_with_links(file: Path) -> str:
    text = file.read_text(encoding="utf-8")
    return re.sub(r"^```.*?^```$|<!--.*?-->", "", text, flags=re.MULTILINE | re.DOTALL)


# ---- quotes


@pytest.mark.parametrize(
    "file", [pytest.param(file, id=str(file.relative_to(steps.ROOT))) for file in course_pages.pages()]
)
def test_quotes_and_line_numbers_are_fresh(file: Path) -> None:
    assert course_pages.fresh_page(file) == file.read_text(encoding="utf-8"), (
        "python scripts/course_pages.py update"
    )


SOURCE = """// What it does.
int twice(int x) {
  const int y = x;
  return 2 * y;
}

int thrice(int x) { return 3 * x; }
int once = 1;
"""


@pytest.fixture
def small(tmp_path: Path) -> Path:
    """A repository with one source file and one page."""
    (tmp_path / "cpp").mkdir()
    (tmp_path / "cpp" / "numbers.cpp").write_text(SOURCE)
    (tmp_path / "page.py").write_text("def f(\n    x,\n):\n    return x\n\n\ny = 1\n")
    return tmp_path


def fresh(root: Path, text: str) -> str:
    (root / "page.md").write_text(text)
    return course_pages.fresh_page(root / "page.md", root)


@pytest.mark.parametrize(
    ("directive", "code", "lines"),
    [
        ('"int twice("', SOURCE.split("\n\n")[0].split("\n", 1)[1], "2–5"),
        ('"// What it does."', SOURCE.split("\n\n")[0], "1–5"),
        ('"const int y" .. "return 2"', "const int y = x;\nreturn 2 * y;", "3–4"),
        ('"int twice(" > "return" .. "}"', "  return 2 * y;\n}", "4–5"),
        ('"int thrice("', "int thrice(int x) { return 3 * x; }", "7"),
        ('"int once"', "int once = 1;", "8"),
    ],
)
def test_a_quote_is_a_block_or_the_lines_named(small: Path, directive: str, code: str, lines: str) -> None:
    text = fresh(small, f"<!-- quote cpp/numbers.cpp {directive} -->\nMore.\n")
    assert f"```cpp\n{code}\n```\n\n[cpp/numbers.cpp, line" in text
    assert f"{lines}](cpp/numbers.cpp#L" in text
    assert text.endswith("\nMore.\n")
    assert fresh(small, text) == text


def test_a_quote_of_python_ends_where_the_indentation_returns(small: Path) -> None:
    text = fresh(small, '<!-- quote page.py "def f(" -->\n')
    assert "```python\ndef f(\n    x,\n):\n    return x\n```\n" in text


def test_a_change_of_the_code_makes_a_page_stale(small: Path) -> None:
    text = fresh(small, '<!-- quote cpp/numbers.cpp "int twice(" -->\n')
    (small / "cpp" / "numbers.cpp").write_text(SOURCE.replace("2 * y", "y + y"))
    changed = fresh(small, text)
    assert changed != text
    assert "y + y" in changed
    (small / "cpp" / "numbers.cpp").write_text("\n" + SOURCE)  # the same lines elsewhere
    assert "lines 3–6](cpp/numbers.cpp#L3-L6)" in fresh(small, text)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ('<!-- quote cpp/gone.cpp "int" -->\n', "cpp/gone.cpp is not there"),
        ('<!-- quote cpp/numbers.cpp "int four(" -->\n', 'no line has "int four("'),
        ('<!-- quote cpp/numbers.cpp "int " -->\n', 'lines have "int "'),
        ("<!-- quote cpp/numbers.cpp int -->\n", "is not written as"),
        ('  <!-- quote cpp/numbers.cpp "int twice(" -->\n', "is not written as"),
        ('<!--quote cpp/numbers.cpp "int twice(" -->\n', "is not written as"),
        ("[x](cpp/numbers.cpp#L2)\n", "has no title"),
        ("[the function, line 2](cpp/numbers.cpp#L2)\n", "has no title"),
        ("[x](cpp/numbers.cpp#L2-L5)\n", "a link to a line is not written as"),
        ("[x](cpp/numbers.cpp#L2 'int twice(')\n", "a link to a line is not written as"),
        ('[a[3]](cpp/numbers.cpp#L2 "int twice(")\n', "a link to a line is not written as"),
        ('[x](cpp/numbers.cpp#L2 "int four(")\n', 'no line has "int four("'),
        ('[x](cpp/gone.cpp#L2 "int")\n', "cpp/gone.cpp is not there"),
    ],
)
def test_what_vanished_is_named(small: Path, text: str, problem: str) -> None:
    with pytest.raises(course_pages.Stale, match=re.escape(problem)) as raised:
        fresh(small, text)
    assert str(raised.value).startswith("page.md: ")


def test_a_link_to_a_line_follows_the_line(small: Path) -> None:
    text = 'See [numbers.cpp:99](cpp/numbers.cpp#L99 "int thrice(int x)").\n'
    assert fresh(small, text) == 'See [numbers.cpp:7](cpp/numbers.cpp#L7 "int thrice(int x)").\n'


def test_only_the_line_number_changes_in_a_link() -> None:
    pattern = "[At 10:30, {0}:{1}]({0}#L{1} {2}) and [theirs](https://github.com/a/b/blob/main/c.h#L7)\n"
    file = "scripts/course_pages.py"
    page = steps.ROOT / "page.md"
    fresh_text = course_pages._with_line_links(page, pattern.format(file, 999, '"def pages("'), steps.ROOT)
    line = 1 + (steps.ROOT / file).read_text(encoding="utf-8").splitlines().index(
        "def pages(root: Path = ROOT) -> list[Path]:"
    )
    assert fresh_text == pattern.format(file, line, '"def pages("')


@pytest.mark.parametrize("newline", ["", "\n"])
def test_what_is_not_the_scripts_own_stays(small: Path, newline: str) -> None:
    mine = "```bash\nmine\n```\n\nProse.\n\n```text\nx\n```\n\n[a link](page.py)"
    text = fresh(small, f'<!-- quote cpp/numbers.cpp "int once" -->\n{mine}{newline}')
    assert text.endswith(f"(cpp/numbers.cpp#L8)\n{mine}\n")
    assert fresh(small, text.rstrip("\n")) == text
    quote = fresh(small, '<!-- quote cpp/numbers.cpp "int once" -->')
    assert fresh(small, quote.rstrip("\n")) == quote, "it was written a second time"


def test_a_quote_may_have_a_fence_in_it(small: Path) -> None:
    (small / "page.py").write_text('X = """\n```\nx\n```\n"""\n')
    text = fresh(small, '<!-- quote page.py "X =" .. "x" -->\nMore.\n')
    assert '````python\nX = """\n```\nx\n````\n\n[page.py, lines 1–3](page.py#L1-L3)\nMore.\n' in text
    assert fresh(small, text) == text


@pytest.mark.parametrize(
    "text",
    [
        "<!-- output: A -->\n```text\n1\n```\n<!-- output: A -->\n```text\n2\n```\n",
        "<!-- output A -->\n",
        " <!-- output: A -->\n",
    ],
)
def test_an_output_that_nobody_would_compare_is_told(text: str) -> None:
    with pytest.raises(course_pages.Stale):
        course_pages.shown_outputs(text, "cpu")


# ---- experiments and figures


@pytest.mark.slow
@pytest.mark.cpu_only
@pytest.mark.parametrize("number", NUMBERS)
def test_the_experiment_prints_and_draws_what_the_chapter_shows(
    number: int, bundled_folder: Path, tmp_path: Path
) -> None:
    require_package("matplotlib")
    figure = tmp_path / "figure.svg"
    command = [
        sys.executable,
        "-m",
        "tiny_vllm.course",
        str(number),
        "--device",
        "cpu",
        "--figure",
        str(figure),
    ]
    done = subprocess.run(command, cwd=steps.ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    printed = course_pages.sections(done.stdout)
    shown = course_pages.shown_outputs(page(number).read_text(encoding="utf-8"), "cpu")
    assert shown
    for title, text in shown.items():
        assert course_pages.without_measures(text) == course_pages.without_measures(printed[title]), title
    assert_same(lab.figure_data(figure), lab.figure_data(COURSE / "figures" / f"{page(number).stem}.svg"))


def assert_same(found: Any, expected: Any, path: str = "data") -> None:
    """Equal but for what is below a key that begins with "measured", and the last digits of other numbers."""
    if isinstance(expected, dict):
        assert isinstance(found, dict)
        assert found.keys() == expected.keys(), path
        for key, value in expected.items():
            if not key.startswith("measured"):
                assert_same(found[key], value, f"{path}.{key}")
    elif isinstance(expected, list):
        assert len(found) == len(expected), path
        for i, (a, b) in enumerate(zip(found, expected, strict=True)):
            assert_same(a, b, f"{path}[{i}]")
    elif isinstance(expected, float):
        assert found == pytest.approx(expected, rel=1e-3, abs=1e-4), path
    else:
        assert found == expected, path


@pytest.mark.parametrize("number", NUMBERS)
def test_what_a_gpu_printed_is_in_its_report(number: int) -> None:
    shown = course_pages.shown_outputs(page(number).read_text(encoding="utf-8"), "cuda")
    reported = course_pages.cuda_sections(str(number)) if shown else {}
    for title, text in shown.items():
        assert text == reported[title]


def test_measures_are_not_compared() -> None:
    same = course_pages.without_measures
    assert same("copy  ≈ 12.3 GB/s  8") == same("copy ≈ 1,234 GB/s   8")
    assert same("copy  ≈ 12.3 GB/s  8") != same("copy  ≈ 12.3 GB/s  9")


def test_the_experiments_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    listed = capsys.readouterr().out
    assert lab.chapters() == list(NUMBERS)
    for number in NUMBERS:
        assert f"  {number:2}  {lab.title(number)}\n" in listed


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["24"], "there is no experiment '24'; there are 0-23 and journey"),
        (["x"], "there is no experiment 'x'"),
        (["-1"], "there is no experiment '-1'"),
        (["--figure", "x.svg"], "--figure needs a chapter"),
    ],
)
def test_wrong_use_is_told(arguments: list[str], problem: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as raised:
        main(arguments)
    assert raised.value.code == 2
    assert problem in capsys.readouterr().err


def test_a_figure_that_cannot_be_written_is_one_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "folder.svg").mkdir()
    for name in ("no/x.svg", "folder.svg", "x.png", ""):
        assert main(["6", "--device", "cpu", "--figure", str(tmp_path / name) if name else ""]) == 1
        printed = capsys.readouterr()
        assert printed.err.startswith(f"error: --figure {tmp_path / name if name else ''}")
        assert printed.out == "", "the experiment ran in vain"


def test_without_a_gpu_it_says_so(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tiny_vllm._core.cuda_devices", lambda: ([], "there is no driver"))
    assert main(["6", "--device", "cuda"]) == 1
    assert capsys.readouterr() == ("", "error: --device cuda: there is no driver\n")


def test_a_terminal_without_its_letters_and_a_reader_who_leaves(bundled_folder: Path) -> None:
    command = [sys.executable, "-m", "tiny_vllm.course"]
    ascii_only = {**os.environ, "PYTHONIOENCODING": "ascii"}
    done = subprocess.run(command, env=ascii_only, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert "  23  Where to go next\n" in done.stdout
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run([*command, "2"], stdout=writer, stderr=subprocess.PIPE, text=True)
    os.close(writer)
    assert (done.returncode, done.stderr) == (1, "")


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (0.01234, "≈ 0.0123 s"),
        (12.345, "≈ 12.3 s"),
        (999.0, "≈ 999 s"),
        (1234.5, "≈ 1,234 s"),
        (0.0, "≈ 0 s"),
    ],
)
def test_a_measure_is_shown_as_one(value: float, shown: str) -> None:
    assert lab.measured(value, "s") == shown
    assert course_pages.without_measures(shown) == "≈ s"


def test_a_table_has_its_numbers_to_the_right(capsys: pytest.CaptureFixture[str]) -> None:
    lab.table(("name", "bytes", "time"), [("a", 12, "≈ 3.1 µs"), ("long name", 3456, "≈ 12 µs")])
    assert capsys.readouterr().out.splitlines() == [
        "name       bytes      time",
        "a             12  ≈ 3.1 µs",
        "long name   3456   ≈ 12 µs",
    ]


def test_a_kernel_that_does_not_compile_is_told_with_its_file(tmp_path: Path) -> None:
    source = tmp_path / "wrong.cu"
    source.write_text("__global__ void f() { return 1; }")
    with pytest.raises(lab.Error, match=r"wrong\.cu does not compile:\n(.|\n)*return"):
        lab.Kernels(source, "cpu")


def test_files_of_one_name_are_two_libraries(tmp_path: Path) -> None:
    for name, number in (("same.cu", 1), ("same.cpp", 2), ("there/same.cu", 3)):
        source = tmp_path / name
        source.parent.mkdir(exist_ok=True)
        source.write_text(f'extern "C" int number() {{ return {number}; }}')
        assert lab.Kernels(source, "cpu").library.number() == number


def test_without_a_compiler_it_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = tmp_path / "right.cu"
    source.write_text("")
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(lab.Error, match="no-such-compiler cannot be run"):
        lab.Kernels(source, "cpu")


def test_a_missing_repository_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lab, "REPOSITORY", tmp_path)
    with pytest.raises(lab.Error, match="needs the repository, not the installed package alone"):
        lab.kernels("rms_norm.cu", "cpu")


# ---- exercises


def outcomes(number: int, tmp_path: Path, *options: str) -> dict[str, str]:
    """What became of each test of a chapter's exercises: "passed" or "failed"."""
    report = tmp_path / "report.xml"
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        f"--junitxml={report}",
        *options,
    ]
    subprocess.run(
        [*command, f"course/exercises/{number:02}"], cwd=steps.ROOT, capture_output=True, check=False
    )
    found = {}
    for case in ElementTree.parse(report).iter("testcase"):
        assert case.find("skipped") is None
        bad = case.find("failure") is not None or case.find("error") is not None
        found[f"{case.get('classname')}.{case.get('name')}"] = "failed" if bad else "passed"
    return found


def is_stub(file: Path) -> bool:
    return "Your turn" in file.read_text(encoding="utf-8")


@pytest.mark.slow
@pytest.mark.cpu_only
@pytest.mark.parametrize("number", NUMBERS)
def test_solutions_pass_and_stubs_fail(number: int, tmp_path: Path) -> None:
    solved = outcomes(number, tmp_path, "--solution")
    assert solved
    assert set(solved.values()) == {"passed"}, solved
    files = [
        f for f in (CODE / "exercises" / f"{number:02}").glob("[!t]*.*") if not f.name.startswith("test_")
    ]
    if not all(is_stub(f) for f in files):
        missing("an exercise was solved in place, so its tests need not fail")
    unsolved = outcomes(number, tmp_path)
    assert unsolved.keys() == solved.keys()
    assert set(unsolved.values()) == {"failed"}, unsolved


@pytest.mark.slow
@pytest.mark.cpu_only
@pytest.mark.parametrize(
    "source",
    [pytest.param(file, id=str(file.relative_to(CODE))) for file in sorted(CODE.rglob("*.cu"))],
)
def test_nvcc_takes_it_too(source: Path, tmp_path: Path) -> None:
    """As far as PTX: that is enough to find what g++ takes and nvcc does not, and three times as quick."""
    nvcc = shutil.which("nvcc")
    if nvcc is None:
        missing("nvcc is not installed")
    options = ["-std=c++20", "-arch=sm_80", "-ptx", "-I", CODE / "kernels"]
    if not is_stub(source):  # in which a gap leaves variables unused
        options += ["-Werror", "all-warnings"]
    steps.run(nvcc, *options, "-o", tmp_path / "out.ptx", source, cwd=steps.ROOT)
