#!/usr/bin/env bash
# Checks that every C++ file is formatted, and that ruff and mypy find nothing in Python; --fix
# mends instead what it can.
set -euo pipefail
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
cd "$root"
venv="${MOE_MLIR_VENV:-$root/.venv}"
format="$venv/bin/clang-format"
ruff="$venv/bin/ruff"
types="$venv/bin/mypy"
for tool in "$format" "$ruff" "$types"; do
  [ -x "$tool" ] || { echo "error: expected $tool, found none: run ./setup.sh" >&2; exit 1; }
done
mode=(--dry-run --Werror)
lint=(check --quiet)
[ "${1:-}" = --fix ] && mode=(-i) && lint+=(--fix)
git ls-files -z '*.cpp' '*.h' | xargs -0 --no-run-if-empty "$format" "${mode[@]}"
"$ruff" "${lint[@]}" .
"$types" --no-error-summary
echo "formatting: ok"
