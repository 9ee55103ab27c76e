#!/usr/bin/env bash
# A timeline of the engine on a GPU, with Nsight Systems. The report is written to build/profiles, for `nsys-ui`.
# Where nsys is missing, the engine times its kernels itself, and the timeline is for ui.perfetto.dev.
#
#   ./nsys.sh SCENARIO [OPTION of `tiny-vllm bench`...]    SCENARIO: prefill, decode-1 or decode-64
source "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/scripts/common.sh"

help_if_asked "$@"
check_scenario "$@"
report=$ROOT/build/profiles/$1
bench=("$PY" -m tiny_vllm bench "$1" --device cuda "${@:2}")
prepare_profile
if ! command -v nsys >/dev/null; then
  echo "nsys is missing (Nsight Systems: it comes with the CUDA toolkit or as nsight-systems-cli)." \
    "Instead, the engine times its kernels itself: $report.json" >&2
  exec "${bench[@]}" --profile "$report.json"
fi
nsys profile --force-overwrite=true --trace=cuda,nvtx,osrt --output="$report" "${bench[@]}"
nsys stats --report cuda_gpu_kern_sum "$report.nsys-rep"
echo "open it with: nsys-ui $report.nsys-rep"
