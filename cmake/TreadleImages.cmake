# SPDX-License-Identifier: Apache-2.0
# Describes libjpeg(-turbo) and libpng as `treadle::images`: with them data/image.hpp decodes JPEG and PNG pictures, without one of them
# it says so in a sentence. Their own targets are visible only in the folder that looked for them, so their paths are copied.
include_guard(DIRECTORY)

option(TREADLE_WITH_JPEG "Read JPEG pictures through libjpeg-turbo, where it is found" ON)
option(TREADLE_WITH_PNG "Read PNG pictures through libpng, where it is found" ON)

function(treadle_find_images)
  if(TARGET treadle::images)
    return()
  endif()
  add_library(treadle::images INTERFACE IMPORTED GLOBAL)
  set(include_dirs "")
  set(libraries "")
  set(definitions "")
  foreach(name IN ITEMS JPEG PNG)
    set(has 0)
    if(TREADLE_WITH_${name})
      find_package(${name} QUIET)
      if(${name}_FOUND)
        set(has 1)
        list(APPEND include_dirs ${${name}_INCLUDE_DIRS})
        list(APPEND libraries ${${name}_LIBRARIES})
      endif()
    endif()
    if(NOT has)
      message(STATUS "Treadle: without ${name}, pictures of that kind cannot be read")
    endif()
    list(APPEND definitions TREADLE_HAS_${name}=${has})
  endforeach()
  list(REMOVE_DUPLICATES include_dirs)
  set_target_properties(treadle::images PROPERTIES
    INTERFACE_INCLUDE_DIRECTORIES "${include_dirs}"
    INTERFACE_LINK_LIBRARIES "${libraries}"
    INTERFACE_COMPILE_DEFINITIONS "${definitions}")
endfunction()
