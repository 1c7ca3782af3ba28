#!/usr/bin/env bash
# Checks that every C++ file is formatted; --fix formats instead.
set -euo pipefail
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
cd "$root"
format="${MOE_MLIR_VENV:-$root/.venv}/bin/clang-format"
[ -x "$format" ] || { echo "error: expected $format, found none: run ./setup.sh" >&2; exit 1; }
mode=(--dry-run --Werror)
[ "${1:-}" = --fix ] && mode=(-i)
git ls-files -z '*.cpp' '*.h' | xargs -0 --no-run-if-empty "$format" "${mode[@]}"
echo "formatting: ok"
