#!/usr/bin/env bash
# Sets up what ./run, ./test and ./bench need: a virtual environment with pinned
# wheels, and the build. Does only what is missing, so it resumes after an
# interruption and costs a second when nothing changed.
#
#   ./setup.sh            builds everything
#   ./setup.sh TARGET..   builds these targets of CMake; `moe-compiler` is what
#                         ./run and ./bench need, without simulator and tests
#   MOE_MLIR_VENV   the environment to use   (default .venv)
#   MOE_MLIR_BUILD  the build directory      (default build)
set -euo pipefail
root="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
venv="${MOE_MLIR_VENV:-$root/.venv}"
build="${MOE_MLIR_BUILD:-$root/build}"
say() { printf 'setup: %s\n' "$*" >&2; }
fail() { printf 'setup: error: %s\n' "$*" >&2; exit 1; }

command -v g++ >/dev/null || command -v clang++ >/dev/null ||
  fail "expected a C++20 compiler, found neither g++ nor clang++: install one (g++ 12 or newer)"

cores="$(nproc)"
# CPU seconds of an average step of the build: measured over a whole one, which
# took 13 minutes of user and system time for 330 steps.
seconds_per_step=3
if [ ! -f "$build/build.ninja" ]; then
  say "the first call installs wheels (1.3 GB) and compiles (some 15 minutes of CPU time; $cores cores here)"
fi

if [ ! -x "$venv/bin/python" ]; then
  say "creating the environment $venv"
  "${PYTHON:-python3}" -c 'import sys; sys.exit(sys.version_info < (3, 11))' ||
    fail "expected Python 3.11 or newer as ${PYTHON:-python3}: set PYTHON to one"
  "${PYTHON:-python3}" -m venv "$venv"
fi

# The stamp holds what was installed; an interrupted installation leaves none.
stamp="$venv/.moe-requirements"
if ! cmp -s "$root/requirements.txt" "$stamp"; then
  say "installing the pinned wheels (about 1.3 GB, two or three minutes)"
  # Twice quiet: errors, but no warnings about indexes that somebody configured.
  "$venv/bin/python" -m pip install --quiet --quiet --disable-pip-version-check \
    -r "$root/requirements.txt" ||
    fail "the installation of $root/requirements.txt failed (above)"
  cp "$root/requirements.txt" "$stamp"
fi

export PATH="$venv/bin:$PATH"
if [ ! -f "$build/build.ninja" ]; then
  say "configuring $build"
  launcher=()
  if command -v ccache >/dev/null; then
    # Without this ccache refuses compilations that use precompiled headers.
    sloppiness=pch_defines,time_macros,include_file_mtime,include_file_ctime
    launcher=("-DCMAKE_CXX_COMPILER_LAUNCHER=env;CCACHE_SLOPPINESS=$sloppiness;ccache")
  fi
  cmake -G Ninja -S "$root" -B "$build" -DPython_EXECUTABLE="$venv/bin/python" \
    "${launcher[@]}" ${MOE_MLIR_CMAKE_ARGS:-} >"$root/.cmake.log" 2>&1 ||
    { cat "$root/.cmake.log" >&2; rm -f "$build/build.ninja"; fail "the configuration failed"; }
  rm -f "$root/.cmake.log"
fi
# A build that has most of its way before it says how long that is. Its log has
# at least a line for each step that was ever done.
steps="$(ninja -C "$build" -t commands "$@" | wc -l)"
touch -a "$build/.ninja_log"
finished="$(wc -l <"$build/.ninja_log")"
if [ $((steps - finished)) -gt 10 ]; then
  minutes=$((((steps - finished) * seconds_per_step + 59 * cores) / (60 * cores)))
  say "compiling $((steps - finished)) files: about $minutes minutes on $cores cores, less with ccache"
fi
# Ninja reports progress itself where someone watches, and errors always.
if [ -t 2 ]; then
  ninja -C "$build" "$@" >&2
else
  ninja -C "$build" --quiet "$@" >&2
fi
