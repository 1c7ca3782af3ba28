# lib/cmake/moe of the build tree: with -DMoE_DIR=<build>/lib/cmake/moe another
# project takes our dialect and passes by find_package(MoE), as it takes MLIR by
# find_package(MLIR). Nothing of it is installed: a wheel has no LLVM to link.
set(moe_cmake_dir "${PROJECT_BINARY_DIR}/lib/cmake/moe")
get_property(moe_exported GLOBAL PROPERTY MOE_LIBS)
export(TARGETS ${moe_exported} moe_runtime MoEMLIROptions MoEMLIRLibraries
  FILE "${moe_cmake_dir}/MoETargets.cmake")

include(CMakePackageConfigHelpers)
configure_file("${PROJECT_SOURCE_DIR}/cmake/MoEConfig.cmake.in"
  "${moe_cmake_dir}/MoEConfig.cmake" @ONLY)
write_basic_package_version_file("${moe_cmake_dir}/MoEConfigVersion.cmake"
  COMPATIBILITY ExactVersion)
