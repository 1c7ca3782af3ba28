# Finds LLVM and MLIR of exactly MOE_LLVM_VERSION.
#
# With -DMLIR_DIR= the user's installation is taken (Debian's libmlir-22-dev is
# tested). Without it the wheels of the Python environment are used: they come
# as two prefixes, site-packages/mlir and site-packages/llvm, and declare no
# dependency on each other, so both directories must be named.
find_package(Python 3.11 REQUIRED COMPONENTS Interpreter Development.Module)

if(NOT MLIR_DIR)
  execute_process(
    COMMAND "${Python_EXECUTABLE}" -c
      "import importlib.util as u; print(';'.join(list(u.find_spec(m).submodule_search_locations)[0] if u.find_spec(m) else '' for m in ('mlir', 'llvm')))"
    OUTPUT_VARIABLE moe_wheels OUTPUT_STRIP_TRAILING_WHITESPACE)
  list(GET moe_wheels 0 moe_mlir_wheel)
  list(GET moe_wheels 1 moe_llvm_wheel)
  if(NOT EXISTS "${moe_mlir_wheel}/lib/cmake/mlir" OR
     NOT EXISTS "${moe_llvm_wheel}/lib/cmake/llvm")
    message(FATAL_ERROR
      "expected MLIR ${MOE_LLVM_VERSION} in the environment of ${Python_EXECUTABLE}, "
      "found none: run ./setup.sh, or pass -DMLIR_DIR=<prefix>/lib/cmake/mlir")
  endif()
  set(MLIR_DIR "${moe_mlir_wheel}/lib/cmake/mlir" CACHE PATH "" FORCE)
  set(LLVM_DIR "${moe_llvm_wheel}/lib/cmake/llvm" CACHE PATH "" FORCE)
endif()

find_package(MLIR REQUIRED CONFIG)
find_package(Threads REQUIRED)
if(NOT LLVM_PACKAGE_VERSION VERSION_EQUAL MOE_LLVM_VERSION)
  message(FATAL_ERROR "expected LLVM ${MOE_LLVM_VERSION}, found "
    "${LLVM_PACKAGE_VERSION} in ${LLVM_DIR}")
endif()
message(STATUS "MLIR ${LLVM_PACKAGE_VERSION} in ${MLIR_DIR}")

list(APPEND CMAKE_MODULE_PATH "${MLIR_CMAKE_DIR}" "${LLVM_CMAKE_DIR}")
include(TableGen)
include(AddLLVM)
include(AddMLIR)
