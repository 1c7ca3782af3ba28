# The runtime as a package for programs that run artifacts: libraries, headers,
# and what find_package(MoERuntime) and pkg-config read. Nothing here needs LLVM.
# It is installed in one of two layouts, and found in the build tree as well:
#
#   the wheel   ${MOE_INSTALL_DIR} is the prefix, and the libraries are in it,
#               where Python looks for them
#   a prefix    lib, include and bin: `cmake --install build --component runtime`,
#               or all that there is with MOE_ENABLE_COMPILER=OFF
#
# A program is built against the package, so nothing of it names a folder of the
# machine that installed it.
include(CMakePackageConfigHelpers)
include(GNUInstallDirs)

set(moe_runtime_config_dir "${PROJECT_BINARY_DIR}/lib/cmake/MoERuntime")
if(MOE_ENABLE_COMPILER)
  set(moe_runtime_component COMPONENT runtime EXCLUDE_FROM_ALL)
else()
  set(moe_runtime_component COMPONENT runtime)
endif()

# moe_install_runtime(<target>..): shared libraries and programs of the runtime.
function(moe_install_runtime)
  foreach(target ${ARGN})
    get_target_property(type ${target} TYPE)
    if(type STREQUAL "EXECUTABLE")
      set_target_properties(${target} PROPERTIES
        INSTALL_RPATH "$ORIGIN/..;$ORIGIN/../${CMAKE_INSTALL_LIBDIR}")
      set(wheel_export)
      set(prefix_export)
    else()
      set(wheel_export EXPORT MoERuntimeWheelTargets)
      set(prefix_export EXPORT MoERuntimeTargets)
      set_property(GLOBAL APPEND PROPERTY MOE_RUNTIME_LIBRARIES ${target})
    endif()
    if(MOE_ENABLE_COMPILER)
      install(TARGETS ${target} ${wheel_export}
        LIBRARY DESTINATION ${MOE_INSTALL_DIR}
        RUNTIME DESTINATION ${MOE_INSTALL_DIR}/bin
        INCLUDES DESTINATION ${MOE_INSTALL_DIR}/include)
    endif()
    install(TARGETS ${target} ${prefix_export}
      LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR} ${moe_runtime_component}
      RUNTIME DESTINATION ${CMAKE_INSTALL_BINDIR} ${moe_runtime_component}
      INCLUDES DESTINATION ${CMAKE_INSTALL_INCLUDEDIR})
  endforeach()
endfunction()

# moe_write_pkg_config(<file> <prefix> <includedir> <libdir>)
function(moe_write_pkg_config file MOE_PC_PREFIX MOE_PC_INCLUDEDIR MOE_PC_LIBDIR)
  configure_file("${PROJECT_SOURCE_DIR}/cmake/moe-runtime.pc.in" "${file}" @ONLY)
endfunction()

# moe_install_runtime_layout(<name> <export> <prefix> <libdir> <includedir>
#   <folder of the libraries in the prefix> <component>..)
# Headers and package files of one layout, below <prefix>.
function(moe_install_runtime_layout name export prefix libdir includedir libraries)
  set(component ${ARGN})
  set(generated "${PROJECT_BINARY_DIR}/cmake/runtime-${name}")
  install(DIRECTORY "${PROJECT_SOURCE_DIR}/include/MoE/Runtime"
    DESTINATION ${prefix}${includedir}/MoE ${component} FILES_MATCHING PATTERN "*.h")

  install(EXPORT ${export} NAMESPACE MoE:: FILE MoERuntimeTargets.cmake
    DESTINATION ${prefix}${libdir}/cmake/MoERuntime ${component})
  configure_package_config_file("${PROJECT_SOURCE_DIR}/cmake/MoERuntimeConfig.cmake.in"
    "${generated}/MoERuntimeConfig.cmake"
    INSTALL_DESTINATION ${prefix}${libdir}/cmake/MoERuntime)
  install(FILES "${generated}/MoERuntimeConfig.cmake"
    "${moe_runtime_config_dir}/MoERuntimeConfigVersion.cmake"
    DESTINATION ${prefix}${libdir}/cmake/MoERuntime ${component})

  file(RELATIVE_PATH up "/${libdir}/pkgconfig" "/")
  string(REGEX REPLACE "/$" "" up "${up}")
  moe_write_pkg_config("${generated}/moe-runtime.pc" "\${pcfiledir}/${up}"
    "\${prefix}/${includedir}" "\${prefix}${libraries}")
  install(FILES "${generated}/moe-runtime.pc"
    DESTINATION ${prefix}${libdir}/pkgconfig ${component})
endfunction()

# All package files, when all libraries are known.
function(moe_install_runtime_package)
  # What docs/Versions.md promises of the headers.
  write_basic_package_version_file("${moe_runtime_config_dir}/MoERuntimeConfigVersion.cmake"
    COMPATIBILITY SameMinorVersion)
  if(MOE_ENABLE_COMPILER)
    moe_install_runtime_layout(wheel MoERuntimeWheelTargets ${MOE_INSTALL_DIR}/ lib include "")
  endif()
  moe_install_runtime_layout(prefix MoERuntimeTargets "" ${CMAKE_INSTALL_LIBDIR}
    ${CMAKE_INSTALL_INCLUDEDIR} /${CMAKE_INSTALL_LIBDIR} ${moe_runtime_component})
  install(FILES "${PROJECT_SOURCE_DIR}/LICENSE" "${PROJECT_SOURCE_DIR}/THIRD_PARTY_NOTICES"
    DESTINATION ${CMAKE_INSTALL_DOCDIR} ${moe_runtime_component})

  # The build tree, where the libraries are in the Python package.
  get_property(libraries GLOBAL PROPERTY MOE_RUNTIME_LIBRARIES)
  export(TARGETS ${libraries} NAMESPACE MoE::
    FILE "${moe_runtime_config_dir}/MoERuntimeTargets.cmake")
  configure_package_config_file("${PROJECT_SOURCE_DIR}/cmake/MoERuntimeConfig.cmake.in"
    "${moe_runtime_config_dir}/MoERuntimeConfig.cmake"
    INSTALL_DESTINATION "${moe_runtime_config_dir}" INSTALL_PREFIX "${PROJECT_BINARY_DIR}")
  moe_write_pkg_config("${PROJECT_BINARY_DIR}/lib/pkgconfig/moe-runtime.pc"
    "${PROJECT_SOURCE_DIR}" "\${prefix}/include" "${MOE_PYTHON_PACKAGE_DIR}")
endfunction()
