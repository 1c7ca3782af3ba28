#!/usr/bin/env bash
# Builds our code with sanitizers. Clean runs end with status 0.
#   utils/sanitize.sh fuzz   builds moe-fuzz (loader, readers, simulator) in build-fuzz with
#                            ASan and UBSan, with libFuzzer where clang++ has it, and feeds every
#                            target of it changed inputs for some seconds
#   utils/sanitize.sh tsan   runs the loops of the CPU runtime from several threads under
#                            ThreadSanitizer; needs clang++, libomp and its libarcher
#   CXX      the compiler                     (default clang++-22, clang++ or g++)
#   SECONDS_PER_TARGET  of `fuzz`             (default 20; 0 only builds)
# The compiler's own code: cmake --preset asan, then the lit suite with that build.
set -euo pipefail
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
"$root/utils/print_help.sh" "$0" "$@" && exit
cd "$root"
fail() { printf 'sanitize: error: %s\n' "$*" >&2; exit 1; }
for candidate in ${CXX:-clang++-22 clang++ g++}; do
  compiler="$(command -v "$candidate")" && break
done
[ -n "${compiler:-}" ] || fail "expected clang++ or g++, found neither"
[ -x "${MOE_MLIR_VENV:-$root/.venv}/bin/python" ] &&
  PATH="${MOE_MLIR_VENV:-$root/.venv}/bin:$PATH"

case "${1:-}" in
fuzz)
  flags="-fsanitize=address,undefined -fno-sanitize=vptr -fno-sanitize-recover=all -fno-omit-frame-pointer"
  coverage=OFF
  resources="$("$compiler" -print-resource-dir 2>/dev/null || true)"
  if compgen -G "$resources/lib/*/libclang_rt.fuzzer_no_main*" >/dev/null; then
    coverage=ON flags="$flags -fsanitize=fuzzer-no-link"
  fi
  llvm="$(python -c 'import importlib.util as u; s = u.find_spec("llvm"); print(list(s.submodule_search_locations)[0] + "/lib/cmake/llvm" if s else "")')"
  cmake -S utils/fuzz/native -B build-fuzz -G Ninja -DCMAKE_CXX_COMPILER="$compiler" \
    -DCMAKE_CXX_FLAGS="$flags" -DMOE_FUZZ_COVERAGE="$coverage" ${llvm:+-DLLVM_DIR="$llvm"} >/dev/null
  ninja -C build-fuzz --quiet moe-fuzz
  seconds="${SECONDS_PER_TARGET:-20}"
  [ "$seconds" = 0 ] && exit
  for target in json sizes npy weights artifact calls ptx kernels; do
    python utils/fuzz "$target" --build build-fuzz --seconds "$seconds"
  done
  ;;
tsan)
  archer="$(find "$(dirname "$(readlink -f "$compiler")")/../lib" -name libarcher.so 2>/dev/null | head -1)"
  [ -n "$archer" ] || fail "expected LLVM's libarcher beside $compiler, which tells ThreadSanitizer of OpenMP: install libomp-dev of its version"
  mkdir -p build-tsan
  "$compiler" -std=c++20 -O1 -g -fsanitize=thread -fopenmp -Iinclude \
    lib/Runtime/MoEParallel.cpp utils/tsan_parallel.cpp -o build-tsan/parallel
  OMP_TOOL_LIBRARIES="$archer" TSAN_OPTIONS="ignore_noninstrumented_modules=1" build-tsan/parallel
  ;;
*)
  fail "expected fuzz or tsan, found '${1:-}'; see --help"
  ;;
esac
