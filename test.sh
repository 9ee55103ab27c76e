#!/usr/bin/env bash
# The fast tests, C++ and Python: about two minutes on 2 cores, after the build. The last line says what was skipped and why.
#
#   ./test.sh                  all of them
#   ./test.sh -k scheduler     arguments go to pytest; for its options: .venv/bin/python -m pytest --help
source "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/scripts/common.sh"

help_if_asked "$@"
"$ROOT/build.sh" test
build_cpp_tests "$ROOT/build/dev"
"$ROOT/build/dev/tiny_vllm_tests"
cd "$ROOT"
report=$LOGS/pytest.xml
rm -f "$report"
status=0
"$PY" -m pytest -q -n auto -m "not slow and not gpu" --junitxml="$report" "$@" || status=$?
if [[ -e $report ]]; then
  "$PY" -c '
import collections, sys, xml.etree.ElementTree as tree
skipped = [s.get("message") for s in tree.parse(sys.argv[1]).iter("skipped") if s.get("type") == "pytest.skip"]
reasons = [f"{count} x {reason}" for reason, count in collections.Counter(skipped).most_common()]
print(f"{len(skipped)} skipped" + ": " * bool(reasons) + "; ".join(reasons))' "$report"
fi
exit $status
