#!/usr/bin/env bash
# Runs clang-tidy, with the checks of .clang-tidy, on C++ sources:
#   utils/check_tidy.sh [COMMIT]      what differs from COMMIT (default origin/main)
#   utils/check_tidy.sh --newest N    the N that the newest commits changed
#   utils/check_tidy.sh FILE..        these, such as lib/Target/*.cpp
# A file takes some 15 seconds. Needs a build by GCC (MOE_MLIR_BUILD, default build), whose generated
# headers it reads; clang's precompiled header has to be of the same version. clang-tidy is that of
# the environment (MOE_MLIR_VENV, default .venv).
set -euo pipefail
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
cd "$root"
"$root/utils/print_help.sh" "$0" "$@" && exit 0
build="${MOE_MLIR_BUILD:-build}"
tidy="${MOE_MLIR_VENV:-$root/.venv}/bin/clang-tidy"
for file in "$tidy" "$build/compile_commands.json"; do
  [ -e "$file" ] || { echo "error: expected $file, found none: run ./setup.sh" >&2; exit 1; }
done

most=1000000
if [ "${1:-}" = --newest ]; then
  most="${2:?expected a number behind --newest, found none}"
  files="$(git log --name-only --format= -- '*.cpp')"
elif [ -e "${1:-}" ]; then
  ls -- "$@" >/dev/null
  files="$(printf '%s\n' "$@")"
else
  files="$(git diff --name-only "${1:-origin/main}" -- '*.cpp')"
fi

# Each once, of those that still exist.
checked=()
while IFS= read -r file && [ "${#checked[@]}" -lt "$most" ]; do
  [ -f "$file" ] || continue
  if grep -qF "/$file\"" "$build/compile_commands.json"; then
    checked+=("$file")
  else
    echo "tidy: not checked, as $build does not compile it: $file"
  fi
done < <(awk '!seen[$0]++' <<<"$files")
if [ "${#checked[@]}" = 0 ]; then
  echo "tidy: no source to check"
  exit 0
fi
printf 'tidy: %s\n' "${checked[@]}"
# omp.h comes with the compiler.
printf '%s\0' "${checked[@]}" | xargs -0 -P "$(nproc)" -n 1 "$tidy" -p "$build" --quiet \
  "--extra-arg=-idirafter$(c++ -print-file-name=include)" ||
  { echo "error: clang-tidy has findings (above)" >&2; exit 1; }
echo "tidy: ok"
