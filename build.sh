#!/usr/bin/env bash
# Builds tiny-vllm into .venv of this folder, with what it needs from PyPI. Called again, it builds what changed.
#
#   ./build.sh [EXTRA...]   EXTRA brings the packages of an extra of pyproject.toml too:
#     test      for the tests
#     lint      for lint.sh
#     course    to draw the figures of the course anew
#     site      to build the course's web pages
#     hf        torch and transformers, to compare with
#     bench     for benchmarks over HTTP, which are not there yet
#     server    dependencies of the HTTP server, which is not there yet
#   PYTHON=python3.12       which Python makes the .venv (3.10 or newer; default: the first good one on PATH)
#   CMAKE_ARGS=-DTINY_VLLM_CUDA=ON    options of CMakeLists.txt
#   CUDAARCHS="80;90a"                GPUs to compile for; default: this machine's, and all common ones where it has none
#
# The first build takes about 2 minutes on 2 cores; with CUDA kernels, some minutes more. What pip and the compiler say goes to build/logs.
source "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/scripts/common.sh"

help_if_asked "$@"
known=$(sed -n '/^\[project.optional-dependencies\]/,/^\[project.scripts\]/s/^\([a-z]*\) = \[.*/\1/p' "$ROOT/pyproject.toml")
known=${known//$'\n'/ }
for extra in "$@"; do
  [[ $extra != -* ]] || wrong_use "no option is called $extra"
  [[ " $known " == *" $extra "* ]] || wrong_use "no extra is called $extra; there are: $known"
done

good_python() { "$1" -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null; }

find_python() {
  local candidates=("${PYTHON:-}") candidate
  [[ -n ${PYTHON:-} ]] || candidates=(python3 python3.14 python3.13 python3.12 python3.11 python3.10)
  for candidate in "${candidates[@]}"; do
    if good_python "$candidate"; then
      command -v "$candidate"
      return
    fi
  done
  die "tiny-vllm needs Python 3.10 or newer; ${candidates[0]} is" \
    "$("${candidates[0]}" --version 2>&1 || true). Name another one with PYTHON=/path/to/python3 $0"
}

# The compiler, the Python headers and venv are the system's: name in one line what is missing.
check_system() {
  local python=$1 missing=() found
  found=$(mktemp -d)
  printf '#include <concepts>\n#include <source_location>\nint main() { return std::source_location().line() != 0; }\n' \
    >"$found/probe.cpp"
  "${CXX:-c++}" -std=c++20 "$found/probe.cpp" -o "$found/probe" 2>/dev/null || missing+=(g++)
  rm -r "$found"
  "$python" -c 'import os, sysconfig; os.stat(sysconfig.get_path("include") + "/Python.h")' 2>/dev/null ||
    missing+=(python3-dev)
  [[ -x $PY ]] || "$python" -c 'import ensurepip, venv' 2>/dev/null || missing+=(python3-venv)
  if ((${#missing[@]})); then
    die "The build needs a C++20 compiler, the headers of $python and its venv module. This brings what is missing:
  sudo apt-get install -y ${missing[*]}"
  fi
}

# A hash of all that decides what the build makes.
fingerprint() {
  cd "$ROOT"
  {
    "$PY" -c 'import sys; print(sys.version, sys.prefix)'
    printf '%s\n' "${CMAKE_ARGS:-}" "${CXX:-}" "${CUDACXX:-}" "${CUDAARCHS:-}" build.sh
    find python/tiny_vllm -name '*.py' | LC_ALL=C sort
    find CMakeLists.txt pyproject.toml build.sh cmake cpp cuda -type f | LC_ALL=C sort | tr '\n' '\0' | xargs -0 sha256sum
  } | sha256sum
}

build_requirements() {
  "$PY" -c '
import sys
try:
    import tomllib
except ImportError:
    from pip._vendor import tomli as tomllib
with open(sys.argv[1], "rb") as file:
    print("\n".join(tomllib.load(file)["build-system"]["requires"]))' "$ROOT/pyproject.toml"
}

# The nvcc that the build will find, or nothing.
find_nvcc() {
  local nvcc=${CUDACXX:-nvcc}
  [[ "${CMAKE_ARGS:-}" != *TINY_VLLM_CUDA=OFF* ]] || return 0
  command -v "$nvcc" || command -v "${CUDA_HOME:-/usr/local/cuda}/bin/nvcc" || true
}

# What the build makes, and how long that takes.
what_is_built() {
  local gpus=${CUDAARCHS:-}
  if [[ ${CMAKE_ARGS:-} == *CMAKE_CUDA_ARCHITECTURES=* ]]; then
    gpus=${CMAKE_ARGS##*CMAKE_CUDA_ARCHITECTURES=}
    gpus=${gpus%% *}
  fi
  case $gpus in
    native) gpus="the GPU of this machine" ;;
    "") gpus="all common GPUs" ;;
    *) gpus="GPUs of architecture ${gpus//;/, }" ;;
  esac
  if [[ $(find_nvcc) ]]; then
    echo "tiny-vllm with CUDA kernels for $gpus (about 2 minutes the first time, and some more for the kernels"
  else
    echo "tiny-vllm (about 2 minutes the first time"
  fi
}

# The package that has cuBLAS, when there is an nvcc that has none: the compiler alone comes without the libraries.
cublas_requirement() {
  local nvcc version
  nvcc=$(find_nvcc)
  [[ $nvcc ]] || return 0
  version=$("$nvcc" --version 2>/dev/null | sed -n 's/.*release \([0-9]*\.[0-9]*\).*/\1/p')
  [[ $version ]] || return 0
  ! echo '#include <cublas_v2.h>' | "$nvcc" -E -x cu - >/dev/null 2>&1 || return 0
  if ((${version%.*} >= 13)); then
    echo "nvidia-cublas==$version.*"
  else
    echo "nvidia-cublas-cu${version%.*}==$version.*"
  fi
}

# Where there is a GPU, kernels are compiled for it alone, unless somebody asked for others: that is much quicker.
if [[ -z ${CUDAARCHS:-} && ${CMAKE_ARGS:-} != *CMAKE_CUDA_ARCHITECTURES* ]] && nvidia-smi -L >/dev/null 2>&1; then
  export CUDAARCHS=native
fi

mkdir -p "$LOGS"
if command -v flock >/dev/null; then
  exec 9>"$LOGS/build.lock"
  flock 9
fi

if [[ -x $PY ]] && good_python "$PY" && [[ $("$PY" -c 'import sys; print(sys.prefix)') == "$VENV" ]]; then
  check_system "$PY"
else
  python=$(find_python)
  check_system "$python"
  echo "making .venv with $python"
  rm -rf "$VENV"
  run_logged venv "$python" -m venv "$VENV"
fi

pip() { run_logged pip "$PY" -m pip --disable-pip-version-check "$@"; }

stamps=$VENV/.tiny_vllm
mkdir -p "$stamps"
now=$(fingerprint)
if [[ $(cat "$stamps/build" 2>/dev/null) == "$now" ]]; then
  echo "tiny-vllm is up to date"
else
  echo "building $(what_is_built); what the compiler says is in $LOGS/build.log)"
  rm -f "$stamps/build"
  mapfile -t requirements < <(build_requirements && cublas_requirement)
  # The pip that comes with an older Python does not know -C.
  pip install "pip>=23.1" "${requirements[@]}" "cmake>=3.26" "ninja>=1.11"
  # CMake would keep the GPUs of the build before, whatever CUDAARCHS says now.
  [[ ! -e $ROOT/build/dev/CMakeCache.txt ]] || sed -i 's/^\(CMAKE_CUDA_ARCHITECTURES:[A-Z]*=\).*/\1/' "$ROOT/build/dev/CMakeCache.txt"
  # Without build isolation the paths stay the same from build to build, and ninja recompiles what changed only.
  PATH="$VENV/bin:$PATH" run_logged build "$PY" -m pip --disable-pip-version-check install -v --no-build-isolation \
    -Cbuild-dir="$ROOT/build/dev" -e "$ROOT"
  echo "$now" >"$stamps/build"
fi

extras_version=$(sha256sum <"$ROOT/pyproject.toml")
for extra in "$@"; do
  [[ $(cat "$stamps/extra-$extra" 2>/dev/null) == "$extras_version" ]] && continue
  echo "installing the extra [$extra]"
  # pip takes the tiny-vllm that is installed, and only adds what the extra needs.
  pip install "tiny-vllm[$extra]"
  echo "$extras_version" >"$stamps/extra-$extra"
done
