"""What the scripts say before they build anything: help, wrong use, and what the first run will do."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import packaging_steps as steps
import pytest

WITH_HELP = ("build.sh", "run.sh", "test.sh", "full_test.sh", "lint.sh", "nsys.sh", "ncu.sh")


@pytest.fixture
def bare(tmp_path: Path) -> Path:
    """The scripts alone, in a folder without .venv."""
    folder = tmp_path / "tiny vllm é"
    shutil.copytree(steps.ROOT / "scripts", folder / "scripts", ignore=shutil.ignore_patterns("__pycache__"))
    for name in (*WITH_HELP, "pyproject.toml"):
        shutil.copy2(steps.ROOT / name, folder / name)
    return folder


def call(script: Path, *arguments: str, cwd: Path, **env: str) -> subprocess.CompletedProcess[str]:
    """With a PATH that holds a few tools and neither Python nor compiler nor profiler."""
    tools = cwd / "tools"
    tools.mkdir(exist_ok=True)
    for tool in ("bash", "env", "dirname", "basename", "readlink", "sed", "mkdir"):
        if not (tools / tool).exists():
            (tools / tool).symlink_to(shutil.which(tool) or "")
    return subprocess.run(
        [script, *arguments],
        cwd=cwd,
        env=steps.clean_environment(PATH=str(tools), **env),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
    )


@pytest.mark.parametrize("arguments", [["--help"], ["-h"]], ids=str)
@pytest.mark.parametrize("script", WITH_HELP)
def test_help_is_printed_and_nothing_is_built(
    bare: Path, tmp_path: Path, script: str, arguments: list[str]
) -> None:
    done = call(bare / script, *arguments, cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert f"\n  ./{script} " in done.stdout
    assert not (bare / ".venv").exists()
    assert not (bare / "build").exists()


@pytest.mark.parametrize("script", WITH_HELP)
def test_scripts_find_the_repository_through_links(bare: Path, tmp_path: Path, script: str) -> None:
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "first").symlink_to(f"../{bare.name}/{script}")
    (tmp_path / "second").symlink_to("bin/first")
    done = call(tmp_path / "second", "--help", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert f"\n  ./{script} " in done.stdout


@pytest.mark.parametrize(
    ("script", "arguments", "expected"),
    [
        ("build.sh", ["--wrong"], "no option is called --wrong"),
        (
            "build.sh",
            ["test", "nosuch"],
            "no extra is called nosuch; there are: server bench test course site lint hf",
        ),
        ("lint.sh", ["--wrong"], "the only option is --fix; got --wrong"),
        ("lint.sh", ["--fix", "cpp"], "the only option is --fix; got --fix cpp"),
        ("full_test.sh", ["--wrong"], "no option is called --wrong"),
        ("full_test.sh", ["nosuch"], "no stage is called nosuch; there are: build lint unit"),
        ("nsys.sh", [], "a scenario is missing"),
        ("nsys.sh", ["decode-3"], "no scenario is called decode-3"),
        ("ncu.sh", ["--wrong"], "no scenario is called --wrong"),
        ("ncu.sh", ["prefill", "attention", "matmul"], "too many arguments: matmul"),
    ],
)
def test_wrong_use_is_answered_with_the_usage(
    bare: Path, tmp_path: Path, script: str, arguments: list[str], expected: str
) -> None:
    done = call(bare / script, *arguments, cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"{script}: {expected}")
    assert done.stderr.split("\n\n", 1)[1] == call(bare / script, "--help", cwd=tmp_path).stdout
    assert not (bare / "build").exists()


def test_help_of_run_says_what_will_come_until_it_is_built(bare: Path, tmp_path: Path) -> None:
    done = call(bare / "run.sh", "--chat", "Hello", "--help", cwd=tmp_path, TINY_VLLM_CACHE="/some/models")
    assert "The first run makes .venv and builds the engine: about 2 minutes" in done.stdout
    assert "The default model (93 MB) is kept in /some/models" in done.stdout
    pretend_it_is_built(bare, "")
    (bare / "build.sh").write_text("#!/usr/bin/env bash\necho 'tiny-vllm is up to date'\n")
    (bare / ".venv/.tiny_vllm").mkdir()
    (bare / ".venv/.tiny_vllm/build").write_text("")
    done = call(bare / "run.sh", "--chat", "Hello", "--help", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines() == ["-m", "tiny_vllm", "run", "--help"]
    done = call(bare / "run.sh", "--", "--help", cwd=tmp_path)  # a prompt
    assert done.stdout.splitlines() == ["-m", "tiny_vllm", "run", "--", "--help"]


@pytest.mark.parametrize(
    ("env", "expected"),
    [
        ({"CMAKE_ARGS": "-DTINY_VLLM_CUDA=OFF"}, "tiny-vllm (about 2 minutes the first time; "),
        ({"CUDACXX": "nowhere", "CUDA_HOME": "/nowhere"}, "tiny-vllm (about 2 minutes the first time; "),
        ({}, "tiny-vllm with CUDA kernels for all common GPUs (about 2 minutes the first time, and some "),
        ({"CUDAARCHS": "native"}, "tiny-vllm with CUDA kernels for the GPU of this machine (about "),
        ({"CUDAARCHS": "80;90a"}, "tiny-vllm with CUDA kernels for GPUs of architecture 80, 90a (about "),
        (
            {"CUDAARCHS": "80", "CMAKE_ARGS": "-DA=1 -DCMAKE_CUDA_ARCHITECTURES=90 -DB=2"},
            "tiny-vllm with CUDA kernels for GPUs of architecture 90 (about ",
        ),
    ],
    ids=str,
)
def test_the_build_says_what_it_compiles(
    bare: Path, tmp_path: Path, env: dict[str, str], expected: str
) -> None:
    """Up to the first call of pip, which fails here."""
    for folder in ("cmake", "cpp", "cuda", "python/tiny_vllm"):
        (bare / folder).mkdir(parents=True)
    (bare / "CMakeLists.txt").write_text("")
    tools = {
        bare
        / ".venv/bin/python": f"[[ $1 == -c ]] || exit 1; [[ $2 != *sys.prefix* ]] || echo '{bare}/.venv'",
        tmp_path / "tools/nvcc": "echo 'release 13.0,'",
        tmp_path / "tools/nvidia-smi": "exit 1",
        tmp_path / "tools/c++": "exit 0",
    }
    for tool, body in tools.items():
        tool.parent.mkdir(parents=True, exist_ok=True)
        tool.write_text(f"#!/usr/bin/env bash\n{body}\n")
        tool.chmod(0o755)
    path = f"{tmp_path / 'tools'}{os.pathsep}{os.environ['PATH']}"
    done = steps.run_any(bare / "build.sh", cwd=tmp_path, env=steps.clean_environment(PATH=path, **env))
    assert done.returncode == 1
    assert done.stdout.startswith(f"building {expected}")
    assert f"; what the compiler says is in {bare}/build/logs/build.log)\n" in done.stdout


def is_running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"  # ended, though nobody has asked how


@pytest.mark.parametrize(
    ("number", "to_all", "status"), [(signal.SIGTERM, False, 143), (signal.SIGINT, True, 130)], ids=str
)
def test_an_interrupted_test_run_leaves_nothing_behind(
    bare: Path, tmp_path: Path, number: signal.Signals, to_all: bool, status: int
) -> None:
    """A terminal sends SIGINT to the whole group. One program of the stage does not heed it, nor SIGTERM."""
    pids = tmp_path / "pids"
    (bare / "lint.sh").write_text(
        f"""#!/usr/bin/env bash
sleep 600 &
echo $! >>"{pids}"
bash -c 'trap "" TERM INT; echo $$ >>"{pids}"; for _ in {{1..600}}; do sleep 1; done' &
until (($(wc -l <"{pids}") == 2)); do sleep 0.05; done
echo started
wait
"""
    )
    process = subprocess.Popen(
        [bare / "full_test.sh", "lint", "unit"],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        # A shell that runs the tests in the background has switched Ctrl-C off, and bash would keep to that.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    assert process.stdout is not None
    for line in process.stdout:
        if line == "started\n":
            break
    (os.killpg if to_all else os.kill)(process.pid, number)
    rest = process.stdout.read()
    assert process.wait() == status
    assert re.search(r"^==== summary ====\ninterrupted lint, \d+ s\n\Z", rest, re.MULTILINE)
    started = [int(pid) for pid in pids.read_text().split()]
    assert len(started) == 2
    assert not any(is_running(pid) for pid in started)


def test_without_ncu_there_is_one_sentence(bare: Path, tmp_path: Path) -> None:
    pretend_it_is_built(bare, "")
    done = call(bare / "ncu.sh", "decode-64", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("ncu is missing: install Nsight Compute")
    assert len(done.stderr.splitlines()) == 1


def pretend_it_is_built(bare: Path, why_no_gpu: str) -> None:
    """A build.sh that does nothing, and a Python that says why there is no GPU, or how it was called."""
    (bare / "build.sh").write_text("#!/usr/bin/env bash\n")
    python = bare / ".venv/bin/python"
    python.parent.mkdir(parents=True)
    python.write_text(
        f"#!/usr/bin/env bash\nif [[ $1 == -c ]]; then echo '{why_no_gpu}'; else printf '%s\\n' \"$@\"; fi\n"
    )
    python.chmod(0o755)


def test_without_nsys_the_engine_profiles_itself(bare: Path, tmp_path: Path) -> None:
    pretend_it_is_built(bare, "")
    done = call(bare / "nsys.sh", "decode-64", "--model", "a b", cwd=tmp_path)
    timeline = bare / "build/profiles/decode-64.json"
    assert done.returncode == 0
    assert done.stderr.startswith("nsys is missing (Nsight Systems: ")
    assert done.stderr.endswith(f"Instead, the engine times its kernels itself: {timeline}\n")
    expected = ["-m", "tiny_vllm", "bench", "decode-64", "--device", "cuda", "--model", "a b"]
    assert done.stdout.splitlines() == [*expected, "--profile", str(timeline)]
    assert timeline.parent.is_dir()


def test_with_nsys_it_is_used(bare: Path, tmp_path: Path) -> None:
    pretend_it_is_built(bare, "")
    call(bare / "nsys.sh", "--help", cwd=tmp_path)  # makes the tools
    (tmp_path / "tools/nsys").write_text('#!/usr/bin/env bash\necho "nsys $*"\n')
    (tmp_path / "tools/nsys").chmod(0o755)
    done = call(bare / "nsys.sh", "prefill", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert [line.split()[:2] for line in done.stdout.splitlines()[:2]] == [
        ["nsys", "profile"],
        ["nsys", "stats"],
    ]
    assert "--profile" not in done.stdout


@pytest.mark.parametrize("tool", ["nsys", "ncu"])
def test_without_a_gpu_there_is_nothing_to_profile(bare: Path, tmp_path: Path, tool: str) -> None:
    """That is all it says: whether the tool is there does not matter, and no file is promised."""
    pretend_it_is_built(bare, "no driver")
    done = call(bare / f"{tool}.sh", "prefill", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == "There is no GPU to profile: no driver.\n"


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["decode-1"], ["--nvtx", "--nvtx-include", "decode/"]),
        (["prefill", "attention.*"], ["--nvtx", "--kernel-name", "regex:attention.*"]),
    ],
)
def test_ncu_takes_a_step_or_the_kernels_of_a_name(
    bare: Path, tmp_path: Path, arguments: list[str], expected: list[str]
) -> None:
    pretend_it_is_built(bare, "")
    call(bare / "ncu.sh", "--help", cwd=tmp_path)
    (tmp_path / "tools/ncu").write_text("#!/usr/bin/env bash\nprintf '%s\\n' \"$@\"\n")
    (tmp_path / "tools/ncu").chmod(0o755)
    done = call(bare / "ncu.sh", *arguments, cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    options = done.stdout.splitlines()
    at = options.index("--nvtx")
    assert options[at : at + len(expected)] == expected
    assert options[options.index("--clock-control") + 1] == "none"


@pytest.mark.parametrize(
    ("env", "cache"),
    [
        ({"TINY_VLLM_CACHE": "/some/models", "XDG_CACHE_HOME": "/xdg"}, "/some/models"),
        ({"TINY_VLLM_CACHE": "", "XDG_CACHE_HOME": "/xdg"}, "/xdg/tiny-vllm"),
        ({"TINY_VLLM_CACHE": "", "XDG_CACHE_HOME": "", "HOME": "/home/ada"}, "/home/ada/.cache/tiny-vllm"),
    ],
)
def test_the_first_run_says_what_it_will_do(
    bare: Path, tmp_path: Path, env: dict[str, str], cache: str
) -> None:
    """It ends where the build wants a Python."""
    done = call(bare / "run.sh", "Hello", cwd=tmp_path, PYTHON="/nowhere/python3", **env)
    assert done.returncode != 0
    assert done.stdout == ""
    assert f"about 2 minutes on 2 cores, logs in {bare}/build/logs." in done.stderr
    assert f"The default model (93 MB) is kept in {cache}, or where TINY_VLLM_CACHE says." in done.stderr
    assert "tiny-vllm needs Python 3.10 or newer" in done.stderr


def test_skips_are_told_with_their_reasons(tmp_path: Path) -> None:
    (tmp_path / "test_some.py").write_text("""
import pytest
def test_good(): pass
@pytest.mark.skipif(True, reason="no GPU")
def test_skipped(): pass
@pytest.mark.parametrize("i", range(2))
def test_skipped_inside(i): pytest.skip("no qemu")
@pytest.mark.xfail
def test_known(): assert False
""")
    report = tmp_path / "report.xml"
    pytest_run = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junitxml={report}"]
    steps.run(*pytest_run, "--rootdir", tmp_path, tmp_path, cwd=tmp_path)
    out = steps.run(sys.executable, steps.ROOT / "scripts/skip_reasons.py", report, cwd=tmp_path)
    assert out == "3 skipped: 2 x no qemu; 1 x no GPU\n"
    steps.run(*pytest_run, "--rootdir", tmp_path, "-k", "good", tmp_path, cwd=tmp_path)
    out = steps.run(sys.executable, steps.ROOT / "scripts/skip_reasons.py", report, cwd=tmp_path)
    assert out == "0 skipped\n"
