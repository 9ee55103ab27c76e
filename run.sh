#!/usr/bin/env bash
# Builds tiny-vllm if need be and generates text.
#
#   ./run.sh "The capital of France is"           completes the text
#   ./run.sh --chat "What is the largest planet?" answers a question
#   ./run.sh --help                               once it is built: all options, as of `tiny-vllm run`
source "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/scripts/common.sh"

say_what_will_come() {
  local cache=${XDG_CACHE_HOME:-~/.cache}/tiny-vllm
  echo "The first run makes .venv and builds the engine: about 2 minutes on 2 cores, logs in $LOGS."
  echo "The default model (93 MB) is kept in ${TINY_VLLM_CACHE:-$cache}, or where TINY_VLLM_CACHE says."
}

for argument in "$@"; do
  case $argument in
    --) break ;;
    -h | --help)
      # A build that has come to its end left this file.
      [[ ! -e $VENV/.tiny_vllm/build ]] || exec "$PY" -m tiny_vllm run --help
      usage
      echo
      say_what_will_come
      exit
      ;;
  esac
done

[[ -x $PY ]] || say_what_will_come >&2
"$ROOT/build.sh" >&2
exec "$PY" -m tiny_vllm run "$@"
