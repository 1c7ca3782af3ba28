# libmoe_compiler.so: our compiler, its tools, and what they use of LLVM and MLIR.
#
# A wheel with it needs no wheels of LLVM. There is one copy of LLVM, although
# a Python module and four tools use it: each tool is a function of the library
# and a program that calls it. All symbols but theirs and those of the C API are
# local, so that another LLVM in the process, as Triton's, is another's.
add_library(moe_compiler SHARED)
set_target_properties(moe_compiler PROPERTIES
  LIBRARY_OUTPUT_DIRECTORY "${MOE_PYTHON_PACKAGE_DIR}"
  LINKER_LANGUAGE CXX INSTALL_RPATH "$ORIGIN")
install(TARGETS moe_compiler LIBRARY DESTINATION ${MOE_INSTALL_DIR})

# What is exported has to be visible in its object files, too.
function(moe_export_from target)
  set_target_properties(${target} PROPERTIES CXX_VISIBILITY_PRESET default)
endfunction()

# moe_add_bundled_tool(<name> <source>...)
function(moe_add_bundled_tool name)
  string(MAKE_C_IDENTIFIER "${name}_main" main)
  # The tool's own name is the program's; its definitions have to reach these.
  add_library(${name}-objects OBJECT ${ARGN})
  moe_set_tool_options(${name}-objects)
  moe_export_from(${name}-objects)
  target_compile_definitions(${name}-objects PRIVATE main=${main}
    $<TARGET_PROPERTY:${name},COMPILE_DEFINITIONS>)
  target_sources(moe_compiler PRIVATE $<TARGET_OBJECTS:${name}-objects>)

  set(program "${CMAKE_CURRENT_BINARY_DIR}/${name}-program.cpp")
  file(CONFIGURE OUTPUT "${program}" CONTENT
    "int @main@(int, char **);\nint main(int argc, char **argv) { return @main@(argc, argv); }\n"
    @ONLY)
  add_executable(${name} "${program}")
  target_link_libraries(${name} PRIVATE moe_compiler)
endfunction()

# Upstream's passes ask for all targets that LLVM was built with: those that we
# do not compile for become functions of nothing, and a tenth is saved.
function(moe_leave_out_other_targets)
  set(others ${LLVM_TARGETS_TO_BUILD})
  list(REMOVE_ITEM others ${LLVM_NATIVE_ARCH} NVPTX)
  set(text "")
  foreach(other ${others})
    foreach(part Target TargetInfo TargetMC AsmPrinter AsmParser Disassembler)
      string(APPEND text "extern \"C\" void LLVMInitialize${other}${part}() {}\n")
    endforeach()
  endforeach()
  set(source "${PROJECT_BINARY_DIR}/OtherTargets.cpp")
  file(CONFIGURE OUTPUT "${source}" CONTENT "${text}" @ONLY)
  target_sources(moe_compiler PRIVATE "${source}")
endfunction()

# Links the library, when all libraries and tools are known.
function(moe_add_compiler_library)
  moe_export_from(MoECAPI)
  moe_leave_out_other_targets()
  get_property(own GLOBAL PROPERTY MOE_LIBS)
  get_property(archives GLOBAL PROPERTY MLIR_ALL_LIBS)
  list(APPEND archives ${LLVM_AVAILABLE_LIBS})
  list(FILTER archives EXCLUDE REGEX "^MLIRCAPI")
  # Paths instead of targets: those of MLIR name libLLVM.so as what they need.
  set(paths)
  foreach(archive ${own} ${archives})
    get_target_property(type ${archive} TYPE)
    if(type STREQUAL "STATIC_LIBRARY")
      list(APPEND paths "$<TARGET_FILE:${archive}>")
    endif()
  endforeach()

  set(exports "${PROJECT_BINARY_DIR}/moe_compiler.exports")
  file(CONFIGURE OUTPUT "${exports}" CONTENT
    "{ global: moe*; extern \"C++\" { moe_*_main*; }; local: *; };\n" @ONLY)
  add_dependencies(moe_compiler ${own})
  target_link_libraries(moe_compiler PRIVATE
    -Wl,--whole-archive $<TARGET_FILE:MoECAPI> -Wl,--no-whole-archive
    -Wl,--start-group ${paths} -Wl,--end-group
    moe_runtime Threads::Threads ${CMAKE_DL_LIBS})
  # The same code under several names once: a tenth of the library.
  include(CheckLinkerFlag)
  foreach(linker lld gold)
    check_linker_flag(CXX "-fuse-ld=${linker};-Wl,--icf=safe" MOE_HAS_${linker})
    if(MOE_HAS_${linker})
      target_link_options(moe_compiler PRIVATE -fuse-ld=${linker} -Wl,--icf=safe)
      break()
    endif()
  endforeach()
  # By the build ID the disk cache tells one compiler from another (compiler/code_id.py).
  target_link_options(moe_compiler PRIVATE
    -Wl,-O2,--gc-sections,-z,defs,--build-id=sha1,--version-script=${exports})
  set_target_properties(moe_compiler PROPERTIES LINK_DEPENDS "${exports};${paths}")
endfunction()
