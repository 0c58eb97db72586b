# SPDX-License-Identifier: Apache-2.0
# Describes zlib as `treadle::zlib`: with it the IDX reader opens gzip files, without it the reader says so in a sentence.
# ZLIB::ZLIB itself is visible only in the folder that looked for it, so its paths are copied onto a global target.
include_guard(DIRECTORY)

option(TREADLE_WITH_ZLIB "Read gzip data files through zlib, where zlib is found" ON)

function(treadle_find_zlib)
  if(TARGET treadle::zlib)
    return()
  endif()
  add_library(treadle::zlib INTERFACE IMPORTED GLOBAL)
  if(TREADLE_WITH_ZLIB)
    find_package(ZLIB QUIET)
  endif()
  if(TREADLE_WITH_ZLIB AND ZLIB_FOUND)
    set_target_properties(treadle::zlib PROPERTIES
      INTERFACE_INCLUDE_DIRECTORIES "${ZLIB_INCLUDE_DIRS}"
      INTERFACE_LINK_LIBRARIES "${ZLIB_LIBRARIES}"
      INTERFACE_COMPILE_DEFINITIONS TREADLE_HAS_ZLIB=1)
  else()
    set_target_properties(treadle::zlib PROPERTIES INTERFACE_COMPILE_DEFINITIONS TREADLE_HAS_ZLIB=0)
    message(STATUS "Treadle: without zlib, gzip data files cannot be read")
  endif()
endfunction()
