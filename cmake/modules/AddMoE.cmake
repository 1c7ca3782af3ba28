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

# add_moe_library(<name> <source>... [DEPENDS <target>...] [LINK_LIBS <lib>...])
# A static, position-independent library. MLIR is not recorded in it, so the
# same archive serves tools, plugin and Python module.
function(add_moe_library name)
  cmake_parse_arguments(ARG "" "" "DEPENDS;LINK_LIBS" ${ARGN})
  add_library(${name} STATIC ${ARG_UNPARSED_ARGUMENTS})
  target_link_libraries(${name} PRIVATE MoEMLIROptions PUBLIC ${ARG_LINK_LIBS})
  add_dependencies(${name} MoETableGen ${ARG_DEPENDS})
  set_property(GLOBAL APPEND PROPERTY MOE_LIBS ${name})
endfunction()

# add_moe_tool(<name> <source>... [LINK_LIBS <lib>...])
function(add_moe_tool name)
  cmake_parse_arguments(ARG "" "" "LINK_LIBS" ${ARGN})
  add_executable(${name} ${ARG_UNPARSED_ARGUMENTS})
  target_link_libraries(${name} PRIVATE MoEMLIROptions ${ARG_LINK_LIBS}
    MoEMLIRLibraries)
  add_dependencies(${name} MoETableGen)
  set_target_properties(${name} PROPERTIES
    BUILD_RPATH "${MLIR_INSTALL_PREFIX}/lib;${LLVM_LIBRARY_DIR}")
  install(TARGETS ${name} RUNTIME DESTINATION bin)
endfunction()
