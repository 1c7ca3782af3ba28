#!/bin/bash
# Builds the simulator alone with the thread sanitizer and runs its corpus on all host threads:
#
#   utils/tsan_simulator.sh [pytest arguments]
#
# Only the simulator is instrumented; Python loads it behind the sanitizer's runtime. Kernels that
# race are no subject: their accesses become accesses of the simulator.
set -euo pipefail
cd "$(dirname "$0")/.."
build=build-tsan
# Debug: otherwise the simulator compiles itself with -O3, which takes long with a sanitizer.
cmake -S . -B $build -G Ninja -DMOE_ENABLE_COMPILER=OFF -DCMAKE_BUILD_TYPE=Debug \
  -DCMAKE_CXX_FLAGS="-fsanitize=thread -g1" > /dev/null
ninja -C $build moe_sim
library=$(find $build -name libmoe_sim.so)
runtime=$(${CXX:-c++} -print-file-name=libtsan.so)
MOE_MLIR_SIM_LIBRARY=$PWD/$library LD_PRELOAD=$(readlink -f "$runtime") \
  TSAN_OPTIONS="exitcode=66 halt_on_error=1" PYTHONPATH=${PYTHONPATH:-build/python} \
  python3 -m pytest -q -p no:cacheprovider \
  "${@:-tests/python/sim/test_corpus.py::test_equal_seeds_give_equal_runs}"
