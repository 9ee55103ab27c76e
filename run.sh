#!/usr/bin/env bash
# Builds tiny-vllm if need be and generates text: ./run.sh "The capital of France is". Options: ./run.sh --help
source "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/scripts/common.sh"

if [[ ! -x $PY ]]; then
  cache=${XDG_CACHE_HOME:-~/.cache}/tiny-vllm
  echo "The first run makes .venv and builds the engine: about 2 minutes on 2 cores, logs in $LOGS." >&2
  echo "The default model (93 MB) is kept in ${TINY_VLLM_CACHE:-$cache}, or where TINY_VLLM_CACHE says." >&2
fi
"$ROOT/build.sh" >&2
exec "$PY" -m tiny_vllm run "$@"
