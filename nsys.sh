#!/usr/bin/env bash
# A timeline of the engine on a GPU, with Nsight Systems. The report is written to build/profiles, for `nsys-ui`.
#
#   ./nsys.sh SCENARIO [OPTION of `tiny-vllm bench`...]    SCENARIO: prefill, decode-1 or decode-64
source "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/scripts/common.sh"

help_if_asked "$@"
prepare_profile nsys "Nsight Systems, which comes with the CUDA toolkit or as nsight-systems-cli" "$@"
report=$ROOT/build/profiles/$1
nsys profile --force-overwrite=true --trace=cuda,nvtx,osrt --output="$report" \
  "$PY" -m tiny_vllm bench "$1" --device cuda "${@:2}"
nsys stats --report cuda_gpu_kern_sum "$report.nsys-rep"
echo "open it with: nsys-ui $report.nsys-rep"
