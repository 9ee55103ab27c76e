#!/usr/bin/env bash
# Builds, and writes the type stubs of the C++ module, python/tiny_vllm/_core.pyi. --check only compares.
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

"$ROOT/build.sh" test >&2
exec "$PY" "$ROOT/scripts/make_stubs.py" "$@"
