#!/usr/bin/env bash
# What limits each kernel on a GPU, with Nsight Compute. The report is written to build/profiles, for `ncu-ui`.
#
#   ./ncu.sh SCENARIO [KERNEL-NAME-REGEX]    SCENARIO: prefill, decode-1 or decode-64
source "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/scripts/common.sh"

help_if_asked "$@"
(($# <= 2)) || wrong_use "too many arguments: ${*:3}"
prepare_profile ncu "Nsight Compute, which comes with the CUDA toolkit or as nsight-compute" "$@"
report=$ROOT/build/profiles/$1
# CUDA graphs would hide the kernels in them; a few launches of each tell enough, as every one is replayed many times.
ncu --force-overwrite --set full --kernel-name "regex:${2:-.*}" --launch-skip 200 --launch-count 40 --export "$report" \
  "$PY" -m tiny_vllm bench "$1" --device cuda --enforce-eager
echo "open it with: ncu-ui $report.ncu-rep"
