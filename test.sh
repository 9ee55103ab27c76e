#!/usr/bin/env bash
# The fast tests, C++ and Python, in under two minutes. Arguments go to pytest: ./test.sh -k scheduler
source "$(dirname "${BASH_SOURCE[0]}")/scripts/common.sh"

"$ROOT/build.sh" test
build_cpp_tests "$ROOT/build/dev"
"$ROOT/build/dev/tiny_vllm_tests"
cd "$ROOT"
exec "$PY" -m pytest -q -n auto -m "not slow and not gpu" "$@"
