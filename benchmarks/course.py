"""What the course's experiments print on a GPU, and whether its solutions run there.

    python benchmarks/course.py --json benchmarks/results/course_cuda.json       # some minutes on an H200
    python benchmarks/course.py 6 18                                             # these chapters alone

docs/course quotes the report. An experiment that fails has its error in the report, and the command fails.
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from datetime import date
from pathlib import Path

from arguments import writable_file
from cuda_engine import commit, driver
from tiny_vllm import _core
from tiny_vllm.course.lab import REPOSITORY, chapters


def chapter(text: str) -> int:
    if not text.isdecimal() or int(text) not in chapters():
        raise argparse.ArgumentTypeError(f"there is no experiment {text!r}")
    return int(text)


def experiment(number: int) -> tuple[str, str]:
    """What it prints, and what went wrong, or nothing."""
    command = [sys.executable, "-m", "tiny_vllm.course", str(number), "--device", "cuda"]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True)
    return done.stdout, done.stderr[-2000:] if done.returncode else ""


def solutions(number: int) -> dict[str, int]:
    """What becomes of the tests of the chapter's exercises on the GPU."""
    folder = REPOSITORY / "course" / "exercises" / f"{number:02}"
    with tempfile.TemporaryDirectory() as temporary:
        report = Path(temporary) / "report.xml"
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junitxml={report}"]
        command += ["--solution", "--device", "cuda", str(folder)]
        done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True)
        if not report.is_file():
            return {"passed": 0, "skipped": 0, "failed": 1}
        cases = list(ElementTree.parse(report).iter("testcase"))
        skipped = sum(case.find("skipped") is not None for case in cases)
        failed = sum(len(case) > 0 for case in cases) - skipped
        if failed:
            print(done.stdout[-3000:], file=sys.stderr)
        return {"passed": len(cases) - skipped - failed, "skipped": skipped, "failed": failed}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("chapters", nargs="*", type=chapter, metavar="chapter", help="default: all")
    parser.add_argument("--json", type=writable_file, help="write the results there")
    parser.add_argument("--commit", default=None, help="what to call this version, when git is not there")
    args = parser.parse_args()
    devices, why_none = _core.cuda_devices()
    if why_none:
        sys.exit(f"no GPU: {why_none}")
    printed, problems, solved = {}, {}, {}
    for number in args.chapters or chapters():
        printed[str(number)], problem = experiment(number)
        if problem:
            problems[str(number)] = problem
        solved[str(number)] = solutions(number)
        print(f"chapter {number}: {problem or 'printed'}; exercises: {solved[str(number)]}", flush=True)
    if args.json:
        report = {
            "command": " ".join(["python", *sys.argv]),
            "device": devices[0].name,
            "driver": driver(),
            "commit": args.commit or commit(),
            "date": date.today().isoformat(),
            "python": platform.python_version(),
            "chapters": printed,
            "problems": problems,
            "exercises": solved,
        }
        args.json.write_text(json.dumps(report, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    return bool(problems) or any(s["failed"] for s in solved.values())


if __name__ == "__main__":
    sys.exit(main())
