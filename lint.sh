#!/usr/bin/env bash
# Formatting and static checks: clang-format, ruff, mypy.
#
#   ./lint.sh          only says what is wrong
#   ./lint.sh --fix    first formats what can be formatted
source "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/scripts/common.sh"

help_if_asked "$@"
case $* in
  "") fix=false ;;
  --fix) fix=true ;;
  *) wrong_use "the only option is --fix; got $*" ;;
esac

"$ROOT/build.sh" lint
cd "$ROOT"
bin=$VENV/bin
mapfile -t cpp_files < <(find benchmarks course cpp cuda tests -name '*.h' -o -name '*.cpp' -o -name '*.cu' -o -name '*.cuh' | LC_ALL=C sort)

failed=()
check() {
  echo "-- $1"
  "$@" || failed+=("$1")
}

if $fix; then
  "$bin/clang-format" -i "${cpp_files[@]}"
  "$bin/ruff" check --fix --quiet . || true
  "$bin/ruff" format --quiet .
fi
clang_format() { "$bin/clang-format" --dry-run --Werror "${cpp_files[@]}"; }
ruff_check() { "$bin/ruff" check .; }
ruff_format() { "$bin/ruff" format --check .; }
mypy() { "$bin/mypy"; }
check clang_format
check ruff_check
check ruff_format
check mypy
if ((${#failed[@]})); then
  die "lint: ${failed[*]} failed; ./lint.sh --fix formats what can be formatted"
fi
echo "lint: all good"
