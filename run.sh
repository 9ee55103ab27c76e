#!/usr/bin/env bash
# Builds tiny-vllm if need be and generates text: ./run.sh "The capital of France is". Options: ./run.sh --help
source "$(dirname "${BASH_SOURCE[0]}")/scripts/common.sh"

"$ROOT/build.sh" >&2
exec "$PY" -m tiny_vllm run "$@"
