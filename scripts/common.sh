# Shared by the scripts of the repository root, which source it. They find the repository wherever they are called from,
# through symbolic links too, and keep to its own .venv whatever environment happens to be active.
# shellcheck shell=bash
set -euo pipefail

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
VENV=$ROOT/.venv
PY=$VENV/bin/python
LOGS=$ROOT/build/logs
unset PYTHONPATH PYTHONHOME VIRTUAL_ENV CONDA_PREFIX

die() {
  printf '%s\n' "$*" >&2
  exit 1
}

# The comment at the head of the script that was called says how to use it.
usage() { sed -n '2,/^[^#]/{/^#/s/^# \{0,1\}//p}' "$0"; }

# help_if_asked ARGUMENT...: prints the usage and ends the script when one of them is -h or --help.
help_if_asked() {
  local argument
  for argument in "$@"; do
    if [[ $argument == -h || $argument == --help ]]; then
      usage
      exit 0
    fi
  done
}

# wrong_use WHAT: the script was called with something that it does not know.
wrong_use() {
  printf '%s\n\n' "$(basename "$0"): $*" >&2
  usage >&2
  exit 2
}

# run_logged NAME COMMAND...: quiet while all is well; on failure the end of the output, and where the rest is.
run_logged() {
  local log=$LOGS/$1.log
  shift
  mkdir -p "$LOGS"
  if ! "$@" >"$log" 2>&1 </dev/null; then
    tail -n 40 "$log" >&2
    die "FAILED: $*
The whole output is in $log"
  fi
}

# cmake and ninja come with the .venv, so that their version does not depend on the system.
cmake_venv() { PATH="$VENV/bin:$PATH" "$VENV/bin/cmake" "$@"; }

# check_scenario SCENARIO: ends with the usage when it is none of `tiny-vllm bench`.
check_scenario() {
  [[ ${1:-} ]] || wrong_use "a scenario is missing"
  [[ $1 =~ ^(prefill|decode-1|decode-64)$ ]] || wrong_use "no scenario is called $1"
}

# prepare_profile: builds, and ends with one sentence when there is no GPU.
prepare_profile() {
  local reason
  "$ROOT/build.sh"
  reason=$("$PY" -c 'from tiny_vllm import _core; print(_core.cuda_devices()[1])')
  [[ -z $reason ]] || die "There is no GPU to profile: $reason."
  mkdir -p "$ROOT/build/profiles"
}

# build_cpp_tests FOLDER CMAKE-OPTION...: the C++ unit tests, <FOLDER>/tiny_vllm_tests.
build_cpp_tests() {
  local folder=$1 name
  shift
  name=cpp_tests_$(basename "$folder")
  run_logged "$name" cmake_venv -S "$ROOT" -B "$folder" -G Ninja -DPython_EXECUTABLE="$PY" -DTINY_VLLM_BUILD_TESTS=ON "$@"
  run_logged "$name" cmake_venv --build "$folder" --target tiny_vllm_tests
}
