#!/usr/bin/env bash
# Everything there is to test, in stages; about 20 minutes on 2 cores. All stages run, and the end says which failed.
# Brings PyTorch and transformers into .venv, to compare with: a large download. The fast tests alone: ./test.sh
#
#   ./full_test.sh             what this machine can run; a missing tool is named and its stage left out
#   ./full_test.sh --strict    a stage that is left out counts as failed
#   ./full_test.sh --gpu       the tests that need an NVIDIA GPU; the report is build/gpu_tests.json
#   ./full_test.sh STAGE...    some stages: build lint unit old_cpu asan tsan fuzz aarch64 site pytest
#   FUZZ_SECONDS=60            how long each fuzzer runs
source "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/scripts/common.sh"

ALL=(build lint unit old_cpu asan tsan fuzz aarch64 site pytest)
strict=false
gpu=false
one=
stages=()
help_if_asked "$@"
for argument in "$@"; do
  case $argument in
    --strict) strict=true ;;
    --gpu) gpu=true ;;
    --one)
      one=$2
      break
      ;;
    -*) wrong_use "no option is called $argument" ;;
    *)
      [[ " ${ALL[*]} " == *" $argument "* ]] || wrong_use "no stage is called $argument; there are: ${ALL[*]}"
      stages+=("$argument")
      ;;
  esac
done
((${#stages[@]})) || stages=("${ALL[@]}")
cd "$ROOT"

FUZZ_SECONDS=${FUZZ_SECONDS:-60}
LEFT_OUT=77 # the exit status of a stage that this machine cannot run

left_out() {
  echo "left out: $*"
  exit $LEFT_OUT
}

stage_build() {
  # The CPU wheel lies on the machines this runs on most; elsewhere the usual one comes.
  "$ROOT/build.sh" test lint
  "$PY" -c 'import torch' 2>/dev/null || "$PY" -m pip install -q "torch==2.13.0" || "$PY" -m pip install -q torch
  "$ROOT/build.sh" hf server site course
  # Only for the vocabulary file and the reference tokenizer in it; its dependencies are not needed.
  "$PY" -m pip install -q --no-deps "llama-models==0.3.0"
}

stage_lint() { "$ROOT/lint.sh"; }

stage_unit() {
  build_cpp_tests build/dev
  build/dev/tiny_vllm_tests
}

# Neither qemu nor ThreadSanitizer can follow a fork of a program that has threads. The other stages run these tests.
NO_FORK=-in_the_child_of_a_fork

# The processors of 2008 and 2013, without AVX and without AVX-512: kernels they lack must not run.
stage_old_cpu() {
  local cpu
  [[ $(uname -m) == x86_64 ]] || left_out "this is not an x86-64 machine"
  command -v qemu-x86_64 >/dev/null || left_out "no emulator: sudo apt-get install -y qemu-user"
  build_cpp_tests build/dev
  for cpu in Nehalem Haswell; do
    echo "$cpu:"
    qemu-x86_64 -cpu $cpu build/dev/tiny_vllm_tests $NO_FORK 2> >(grep -v "TCG doesn't support" >&2)
  done
}

sanitized() { # FOLDER SANITIZERS COMMAND...
  # -O1 -g1: half the time that g++ takes for -O2 -g, and still line numbers in the reports.
  build_cpp_tests "build/$1" -DTINY_VLLM_SANITIZE="$2" -DCMAKE_BUILD_TYPE=Debug -DCMAKE_CXX_FLAGS_DEBUG="-O1 -g1" \
    -DTINY_VLLM_CUDA=OFF -DTINY_VLLM_BUILD_PYTHON=OFF
  shift 2
  UBSAN_OPTIONS=print_stacktrace=1 ASAN_OPTIONS=detect_stack_use_after_return=1 TSAN_OPTIONS=halt_on_error=1 "$@"
}

stage_asan() { sanitized asan address,undefined build/asan/tiny_vllm_tests; }

# ThreadSanitizer needs its shadow where a randomised address space may put something else.
stage_tsan() { sanitized tsan thread setarch -R build/tsan/tiny_vllm_tests $NO_FORK; }

# The newest clang that has both libFuzzer and std::source_location (16 and later).
find_fuzzing_clang() {
  local compiler probe
  probe=$(mktemp -d)
  printf '%s\n' '#include <cstddef>' '#include <cstdint>' '#include <source_location>' \
    'extern "C" int LLVMFuzzerTestOneInput(const uint8_t*, size_t) {' \
    '  return std::source_location::current().line() == 0;' '}' >"$probe/probe.cpp"
  for compiler in clang++-{22,21,20,19,18,17,16} clang++; do
    if "$compiler" -std=c++20 -fsanitize=fuzzer,address "$probe/probe.cpp" -o "$probe/probe" 2>/dev/null; then
      echo "$compiler"
      break
    fi
  done
  rm -r "$probe"
}

stage_fuzz() {
  local clang source name dictionary options
  clang=$(find_fuzzing_clang)
  [[ -n $clang ]] || left_out "no clang 16 or newer with libFuzzer: sudo apt-get install -y clang-16 libclang-rt-16-dev"
  run_logged fuzz cmake_venv -S . -B build/fuzz -G Ninja -DPython_EXECUTABLE="$PY" -DCMAKE_CXX_COMPILER="$clang" \
    -DCMAKE_BUILD_TYPE=Debug -DCMAKE_CXX_FLAGS_DEBUG="-O1 -g1" -DTINY_VLLM_BUILD_FUZZ=ON -DTINY_VLLM_BUILD_PYTHON=OFF \
    -DTINY_VLLM_CUDA=OFF
  run_logged fuzz cmake_venv --build build/fuzz
  "$PY" tests/fuzz/make_seeds.py build/fuzz/corpus/fuzz_safetensors
  for source in tests/fuzz/*.cpp; do
    name=$(basename "$source" .cpp)
    options=(-max_total_time="$FUZZ_SECONDS" -timeout=5 -rss_limit_mb=512 -malloc_limit_mb=256 -artifact_prefix=build/fuzz/)
    dictionary=tests/fuzz/${name#fuzz_}.dict
    [[ ! -e $dictionary ]] || options+=("-dict=$dictionary")
    mkdir -p "build/fuzz/corpus/$name"
    echo "$name, $FUZZ_SECONDS s with $clang"
    run_logged "$name" "build/fuzz/$name" "${options[@]}" "build/fuzz/corpus/$name"
    grep -h '^Done' "$LOGS/$name.log"
  done
}

stage_aarch64() {
  local compiler=aarch64-linux-gnu-g++
  command -v $compiler >/dev/null || left_out "no cross compiler: sudo apt-get install -y g++-aarch64-linux-gnu"
  build_cpp_tests build/aarch64 -DCMAKE_SYSTEM_NAME=Linux -DCMAKE_SYSTEM_PROCESSOR=aarch64 \
    -DCMAKE_CXX_COMPILER=$compiler -DTINY_VLLM_BUILD_PYTHON=OFF
  if command -v qemu-aarch64 >/dev/null; then
    qemu-aarch64 -L /usr/aarch64-linux-gnu build/aarch64/tiny_vllm_tests $NO_FORK
  else
    echo "compiled, not run: qemu-aarch64 is missing (sudo apt-get install -y qemu-user)"
  fi
}

# The course's web pages. A link that leads nowhere or a formula that cannot be shown ends it.
stage_site() {
  "$ROOT/build.sh" site
  NO_MKDOCS_2_WARNING=1 "$PY" -m mkdocs build --strict
  echo "build/site/index.html"
}

# With TINY_VLLM_FULL_TEST=1 a test that lacks something fails where it would else be skipped.
stage_pytest() { TINY_VLLM_FULL_TEST=1 "$PY" -m pytest -q -n auto -m "not gpu"; }

gpu_tests() {
  local reason
  "$ROOT/build.sh" test
  reason=$("$PY" -c 'from tiny_vllm import _core; print(_core.cuda_devices()[1])')
  [[ -z $reason ]] || die "No GPU test was run: $reason."
  "$ROOT/build.sh" hf
  build_cpp_tests build/dev
  run_logged cuda_tests cmake_venv --build build/dev --target tiny_vllm_cuda_tests
  exec "$PY" scripts/gpu_tests.py build/dev/tiny_vllm_cuda_tests
}

if [[ ${CI:-} ]]; then
  export CMAKE_ARGS="${CMAKE_ARGS:-} -DTINY_VLLM_WERROR=ON"
fi

if $gpu; then gpu_tests; fi

# Each stage runs in a bash of its own, in which the first command that fails ends it.
if [[ $one ]]; then
  "stage_$one"
  exit
fi

passed=0
failed=()
summary=()
started=$SECONDS

summarize() {
  printf '\n==== summary ====\n'
  printf '%s\n' "${summary[@]}"
}

# interrupted STATUS: ends the stage that runs, with all that it has started, and says how far it came.
interrupted() {
  trap '' INT TERM HUP
  if [[ ${running:-} ]]; then
    kill -TERM -- "-$running" 2>/dev/null || true
    wait "$running" || true
    # What takes longer to end than the shell of the stage.
    for _ in {1..20}; do
      kill -0 -- "-$running" 2>/dev/null || break
      sleep 0.1
    done
    kill -KILL -- "-$running" 2>/dev/null || true
    # Also a killed program takes a moment to end.
    for _ in {1..20}; do
      kill -0 -- "-$running" 2>/dev/null || break
      sleep 0.1
    done
  fi
  [[ -z ${stage:-} ]] || summary+=("interrupted $stage, $((SECONDS - started)) s")
  summarize
  exit "$1"
}
trap 'interrupted 129' HUP
trap 'interrupted 130' INT
trap 'interrupted 143' TERM

for stage in "${stages[@]}"; do
  printf '\n==== %s ====\n' "$stage"
  started=$SECONDS
  status=0
  # A process group of its own, which can be ended as a whole.
  set -m
  bash "$ROOT/full_test.sh" --one "$stage" </dev/null &
  running=$!
  set +m
  wait "$running" || status=$?
  running=
  took="$((SECONDS - started)) s"
  if ((status == 0)); then
    passed=$((passed + 1))
    summary+=("passed    $stage, $took")
  elif ((status == LEFT_OUT)) && ! $strict; then
    summary+=("left out  $stage")
  else
    failed+=("$stage")
    summary+=("FAILED    $stage, $took")
  fi
  echo "---- $stage: $took"
done

summarize
echo "stages: $passed passed, ${#failed[@]} failed, $((${#stages[@]} - passed - ${#failed[@]})) skipped"
((${#failed[@]} == 0))
