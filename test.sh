#!/usr/bin/env bash
# The fast tests, C++ and Python: about 3 minutes on 2 cores, after the build. The end says what was skipped, and why.
# What compares with PyTorch and transformers is skipped until ./build.sh hf, or ./full_test.sh, has brought these.
#
#   ./test.sh                  all of them
#   ./test.sh -k scheduler     arguments go to pytest; for its options: .venv/bin/python -m pytest --help
source "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/scripts/common.sh"

help_if_asked "$@"
"$ROOT/build.sh" test
cd "$ROOT"
# pytest looks at its options, and does nothing yet.
problem=$("$PY" -m pytest --markers "$@" 2>&1 >/dev/null) || wrong_use "$problem"
build_cpp_tests build/dev
build/dev/tiny_vllm_tests

report=$LOGS/pytest.xml
rm -f "$report"
status=0
"$PY" -m pytest -q -n auto -m "not slow and not gpu" --junitxml="$report" "$@" || status=$?
[[ ! -e $report ]] || "$PY" scripts/skip_reasons.py "$report"
exit $status
