#!/usr/bin/env bash
# What limits each kernel on a GPU, with Nsight Compute. The report is written to build/profiles, for `ncu-ui`.
#
#   ./ncu.sh SCENARIO [KERNEL-NAME-REGEX]    SCENARIO: prefill, decode-1 or decode-64
#
# Without a regex: the first 40 kernels of a step of the scenario. With one: the first 40 with such a name. Names are
# those of the C++ functions, as in cuda/kernels (gemv_kernel), not those that `tiny-vllm bench --profile` prints (gemv).
source "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/scripts/common.sh"

help_if_asked "$@"
check_scenario "$@"
(($# <= 2)) || wrong_use "too many arguments: ${*:3}"
prepare_profile
command -v ncu >/dev/null ||
  die "ncu is missing: install Nsight Compute, which comes with the CUDA toolkit or as nsight-compute, and put it on PATH."
report=$ROOT/build/profiles/$1
# The backend puts each step into an NVTX range, prefill or decode, and each kernel into one of its own name.
which=(--nvtx --nvtx-include "${1%%-*}/")
[[ -z ${2:-} ]] || which=(--nvtx --kernel-name "regex:$2")
# Each kernel is replayed many times, so a few launches tell enough. CUDA graphs would hide the kernels in them. Clocks
# are left alone: locked to the base clock, as ncu does by itself, kernels are slower than in the engine.
ncu --force-overwrite --set full --clock-control none "${which[@]}" --launch-count 40 --export "$report" \
  "$PY" -m tiny_vllm bench "$1" --device cuda --enforce-eager
echo "open it with: ncu-ui $report.ncu-rep"
