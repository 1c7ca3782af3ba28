# Thin wrappers: one place that knows how a file which includes MLIR headers is
# compiled and what it links.

# The compile options of every target that includes MLIR's C++ headers. They sit
# on a target, not on the directory: nanobind, gtest and torch need RTTI.
add_library(MoEMLIROptions INTERFACE)
target_include_directories(MoEMLIROptions INTERFACE
  "${PROJECT_SOURCE_DIR}/include" "${PROJECT_BINARY_DIR}/include")
target_include_directories(MoEMLIROptions SYSTEM INTERFACE
  ${LLVM_INCLUDE_DIRS} ${MLIR_INCLUDE_DIRS})
separate_arguments(moe_llvm_definitions NATIVE_COMMAND "${LLVM_DEFINITIONS}")
target_compile_options(MoEMLIROptions INTERFACE
  # The compiler itself is not hot, and its headers are heavy: -O1 halves the
  # build. Runtime and simulator have their own options.
  ${moe_llvm_definitions} -O1 -fno-rtti -Wall -Wextra -Wno-unused-parameter
  $<$<BOOL:${MOE_ENABLE_ASSERTIONS}>:-UNDEBUG>)

# The shared libraries, by their own names: a static MLIR archive beside
# libMLIR.so would give one process two sets of TypeIDs.
add_library(MoEMLIRLibraries INTERFACE)
target_link_libraries(MoEMLIRLibraries INTERFACE MLIR LLVM)

# What a user of the C API links.
if(MOE_BUNDLE_LLVM)
  include(BundleLLVM)
  set(MOE_COMPILER_LIBRARIES moe_compiler moe_runtime)
else()
  set(MOE_COMPILER_LIBRARIES MoECAPI MoEMLIRLibraries)
endif()

# Parsing MLIR's headers takes most of a compilation's time, those of the GPU and
# LLVM dialects most of all: a file that builds NVVM's ops takes 3 s instead of 14
# with all of them precompiled. The dialect of this project is in it as well, as
# nearly every file includes it: what changes it compiles them all again anyway.
# It serves files with the same options only, which is why tools are compiled
# with -fPIC too.
set(moe_pch_source "${PROJECT_BINARY_DIR}/MoEPrecompiledHeaders.cpp")
file(CONFIGURE OUTPUT "${moe_pch_source}" CONTENT "")
add_library(MoEPrecompiledHeaders OBJECT "${moe_pch_source}")
target_link_libraries(MoEPrecompiledHeaders PRIVATE MoEMLIROptions)
add_dependencies(MoEPrecompiledHeaders MoETableGen)
target_precompile_headers(MoEPrecompiledHeaders PRIVATE
  <mlir/Dialect/Affine/IR/AffineOps.h>
  <mlir/Dialect/Arith/IR/Arith.h>
  <mlir/Dialect/Func/IR/FuncOps.h>
  <mlir/Dialect/GPU/IR/GPUDialect.h>
  <mlir/Dialect/LLVMIR/LLVMDialect.h>
  <mlir/Dialect/LLVMIR/NVVMDialect.h>
  <mlir/Dialect/Linalg/IR/Linalg.h>
  <mlir/Dialect/Math/IR/Math.h>
  <mlir/Dialect/MemRef/IR/MemRef.h>
  <mlir/Dialect/SCF/IR/SCF.h>
  <mlir/Dialect/Tensor/IR/Tensor.h>
  <mlir/Dialect/Vector/IR/VectorOps.h>
  <mlir/IR/PatternMatch.h>
  <mlir/Pass/Pass.h>
  "${PROJECT_SOURCE_DIR}/include/MoE/Dialect/MoE/IR/MoE.h")

# add_moe_library(<name> <source>... [DEPENDS <target>...] [LINK_LIBS <lib>...])
# A static, position-independent library. MLIR is not recorded in it, so the
# same archive serves tools, plugin and Python module.
function(add_moe_library name)
  cmake_parse_arguments(ARG "" "" "DEPENDS;LINK_LIBS" ${ARGN})
  add_library(${name} STATIC ${ARG_UNPARSED_ARGUMENTS})
  target_link_libraries(${name} PRIVATE MoEMLIROptions PUBLIC ${ARG_LINK_LIBS})
  target_precompile_headers(${name} REUSE_FROM MoEPrecompiledHeaders)
  add_dependencies(${name} MoETableGen ${ARG_DEPENDS})
  set_property(GLOBAL APPEND PROPERTY MOE_LIBS ${name})
endfunction()

# add_moe_tool(<name> <source>... [LINK_LIBS <lib>...])
function(add_moe_tool name)
  cmake_parse_arguments(ARG "" "" "LINK_LIBS" ${ARGN})
  if(MOE_BUNDLE_LLVM)
    moe_add_bundled_tool(${name} ${ARG_UNPARSED_ARGUMENTS})
  else()
    add_executable(${name} ${ARG_UNPARSED_ARGUMENTS})
    moe_set_tool_options(${name})
    target_link_libraries(${name} PRIVATE ${ARG_LINK_LIBS} MoEMLIRLibraries)
  endif()
  # Installed, the libraries are found beside us in site-packages.
  set_target_properties(${name} PROPERTIES
    BUILD_RPATH "${MLIR_INSTALL_PREFIX}/lib;${LLVM_LIBRARY_DIR}"
    INSTALL_RPATH "${MOE_TOOL_RPATH}")
  install(TARGETS ${name} RUNTIME DESTINATION ${MOE_INSTALL_DIR}/bin)
endfunction()

# The options of a target that holds the sources of a tool.
function(moe_set_tool_options target)
  target_link_libraries(${target} PRIVATE MoEMLIROptions)
  target_compile_options(${target} PRIVATE -fPIC)
  target_precompile_headers(${target} REUSE_FROM MoEPrecompiledHeaders)
  add_dependencies(${target} MoETableGen)
endfunction()

# Installed, what we link lies beside us, and LLVM's wheels beside the package.
set(MOE_MODULE_RPATH "$ORIGIN")
set(MOE_TOOL_RPATH "$ORIGIN/..")
if(NOT MOE_BUNDLE_LLVM)
  list(APPEND MOE_MODULE_RPATH "$ORIGIN/../mlir/lib" "$ORIGIN/../llvm/lib")
  list(APPEND MOE_TOOL_RPATH "$ORIGIN/../../mlir/lib" "$ORIGIN/../../llvm/lib")
endif()
