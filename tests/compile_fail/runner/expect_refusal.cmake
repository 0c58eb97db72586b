# SPDX-License-Identifier: Apache-2.0
# Succeeds only if the compile-fail runner refuses SOURCE and prints EXPECT.
cmake_minimum_required(VERSION 3.25)
execute_process(COMMAND ${CMAKE_COMMAND} "-DSOURCE=${SOURCE}" "-DCOMMAND_FILE=${COMMAND_FILE}"
    -P "${CMAKE_CURRENT_LIST_DIR}/../../../cmake/ExpectCompileError.cmake"
  RESULT_VARIABLE status OUTPUT_VARIABLE output ERROR_VARIABLE output)
if(status EQUAL 0)
  message(FATAL_ERROR "the runner accepted ${SOURCE}:\n${output}")
endif()
string(REGEX REPLACE "[ \t\r\n]+" " " output "${output}")
string(FIND "${output}" "${EXPECT}" found)
if(found EQUAL -1)
  message(FATAL_ERROR "the runner refused ${SOURCE} without saying '${EXPECT}':\n${output}")
endif()
