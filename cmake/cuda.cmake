# Decides whether the CUDA backend is built, and says why.
#
#   TINY_VLLM_CUDA            AUTO (default): built when a working nvcc is found; ON: an error otherwise; OFF
#   CMAKE_CUDA_COMPILER       which nvcc; else $CUDACXX, $CUDA_HOME, $CUDA_PATH, PATH, /usr/local/cuda
#   CMAKE_CUDA_ARCHITECTURES  which GPUs ($CUDAARCHS too); `native` means the GPU of this machine
#
# Sets tv_cuda (ON or OFF), tv_cuda_reason (one sentence), tv_cuda_version and tv_cuda_architectures ("80;90").

# Machine code for each generation since Ampere. The PTX of 80 lets any other GPU since then run, after a wait while
# the driver compiles it; the PTX of 120 does it for those to come.
set(tv_default_cuda_architectures 80 86-real 89-real 90a-real 100-real 120)

# `reason` is printed, and is an error where CUDA was asked for by name.
function(tv_no_cuda reason)
  if(TINY_VLLM_CUDA STREQUAL "ON")
    message(FATAL_ERROR "TINY_VLLM_CUDA=ON, but the CUDA backend cannot be built: ${reason}")
  endif()
  set(tv_cuda OFF PARENT_SCOPE)
  set(tv_cuda_reason "${reason}" PARENT_SCOPE)
endfunction()

# One small kernel, so that a missing header, a refused host compiler or a broken install is seen here.
# Sets `result` to the compiler's complaint, "" if there is none.
function(tv_try_nvcc nvcc result)
  set(folder ${CMAKE_BINARY_DIR}/cuda_probe)
  file(WRITE ${folder}/probe.cu "#include <cuda_runtime.h>\n#include <vector>\n__global__ void kernel(float* x) { *x = 1; }\n")
  set(host_compiler)
  if(CMAKE_CUDA_HOST_COMPILER)
    set(host_compiler -ccbin ${CMAKE_CUDA_HOST_COMPILER})
  endif()
  execute_process(COMMAND ${nvcc} -std=c++20 ${host_compiler} -c probe.cu -o probe.o WORKING_DIRECTORY ${folder}
                  RESULT_VARIABLE status OUTPUT_VARIABLE output ERROR_VARIABLE output)
  if(status EQUAL 0)
    set(${result} "" PARENT_SCOPE)
  else()
    string(STRIP "${status}: ${output}" output)
    string(SUBSTRING "${output}" 0 600 output)
    set(${result} "${nvcc} does not compile a small program (exit status ${output})" PARENT_SCOPE)
  endif()
endfunction()

# Looks for cublas_v2.h where nvcc finds it by itself, and in the nvidia-cublas package beside our Python.
# Sets `result` to the folder to add, which is "" for the first, or to NOTFOUND.
function(tv_find_cublas nvcc result)
  set(probe ${CMAKE_BINARY_DIR}/cuda_probe/cublas.cu)
  file(WRITE ${probe} "#include <cublasLt.h>\n#include <cublas_v2.h>\n")
  execute_process(COMMAND ${Python_EXECUTABLE} -c "import nvidia; print(*nvidia.__path__, sep=';')"
                  OUTPUT_VARIABLE packages ERROR_QUIET OUTPUT_STRIP_TRAILING_WHITESPACE)
  set(options "")
  foreach(package ${packages})
    list(APPEND options -I${package}/cu13/include -I${package}/cublas/include)
  endforeach()
  foreach(option "" ${options})
    execute_process(COMMAND ${nvcc} ${option} -E ${probe} RESULT_VARIABLE status OUTPUT_QUIET ERROR_QUIET)
    if(status EQUAL 0)
      string(REGEX REPLACE "^-I" "" folder "${option}")
      set(${result} "${folder}" PARENT_SCOPE)
      return()
    endif()
  endforeach()
  set(${result} NOTFOUND PARENT_SCOPE)
endfunction()

# The compute capabilities of the GPUs in this machine, "86;90".
function(tv_native_architectures result)
  execute_process(COMMAND nvidia-smi --query-gpu=compute_cap --format=csv,noheader
                  RESULT_VARIABLE status OUTPUT_VARIABLE output ERROR_VARIABLE output)
  string(REGEX MATCHALL "[0-9]+\\.[0-9]+" found "${output}")
  if(NOT status EQUAL 0 OR NOT found)
    message(FATAL_ERROR "CMAKE_CUDA_ARCHITECTURES=native means the GPU of this machine, and none was found "
                        "(nvidia-smi: ${status}). Name the architectures instead, as in "
                        "-DCMAKE_CUDA_ARCHITECTURES=90, or leave it out to build for all common ones.")
  endif()
  string(REPLACE "." "" found "${found}")
  list(REMOVE_DUPLICATES found)
  list(TRANSFORM found APPEND "-real")
  set(${result} "${found}" PARENT_SCOPE)
endfunction()

# Sets CMAKE_CUDA_ARCHITECTURES to numbers that this nvcc knows.
macro(tv_choose_architectures nvcc)
  execute_process(COMMAND ${nvcc} --list-gpu-arch OUTPUT_VARIABLE tv_known ERROR_QUIET)
  string(REGEX MATCHALL "[0-9]+" tv_known "${tv_known}")
  if(NOT CMAKE_CUDA_ARCHITECTURES AND DEFINED ENV{CUDAARCHS})
    set(CMAKE_CUDA_ARCHITECTURES $ENV{CUDAARCHS})
  endif()
  if(NOT CMAKE_CUDA_ARCHITECTURES)
    foreach(arch ${tv_default_cuda_architectures})
      string(REGEX MATCH "[0-9]+" number ${arch})
      if(number IN_LIST tv_known)
        list(APPEND CMAKE_CUDA_ARCHITECTURES ${arch})
      endif()
    endforeach()
  elseif(CMAKE_CUDA_ARCHITECTURES STREQUAL "native")
    tv_native_architectures(CMAKE_CUDA_ARCHITECTURES)
  endif()
  # Hopper's warpgroup products exist for 90a alone, whose code no other GPU runs anyway.
  list(TRANSFORM CMAKE_CUDA_ARCHITECTURES REPLACE "^90(-real)?$" "90a-real")
  foreach(arch ${CMAKE_CUDA_ARCHITECTURES})
    string(REGEX MATCH "^[0-9]+" number ${arch})
    if(NOT number IN_LIST tv_known)
      list(JOIN tv_known ", " tv_known)
      message(FATAL_ERROR "CMAKE_CUDA_ARCHITECTURES: \"${arch}\" is not one that this nvcc compiles for (${tv_known})")
    endif()
  endforeach()
  set(CMAKE_CUDA_ARCHITECTURES "${CMAKE_CUDA_ARCHITECTURES}" CACHE STRING "GPUs to compile for" FORCE)
endmacro()

set(tv_cuda OFF)
set(tv_cuda_version "")
set(tv_cuda_architectures "")

if(TINY_VLLM_CUDA STREQUAL "OFF")
  set(tv_cuda_reason "switched off by TINY_VLLM_CUDA=OFF")
elseif(CMAKE_CROSSCOMPILING)
  tv_no_cuda("this is a cross build")
elseif(CMAKE_VERSION VERSION_LESS 3.26)
  tv_no_cuda("CMake ${CMAKE_VERSION} cannot ask nvcc for C++20, 3.26 can (`pip install cmake` brings a newer one)")
else()
  if(CMAKE_CUDA_COMPILER)
    find_program(TINY_VLLM_NVCC ${CMAKE_CUDA_COMPILER} NO_CACHE)
  else()
    find_program(TINY_VLLM_NVCC NAMES $ENV{CUDACXX} nvcc HINTS $ENV{CUDA_HOME}/bin $ENV{CUDA_PATH}/bin
                 PATHS /usr/local/cuda/bin NO_CACHE)
  endif()
  # nvcc would pick the g++ on PATH; the two halves of one binary should come from one compiler.
  if(NOT CMAKE_CUDA_HOST_COMPILER AND NOT DEFINED ENV{CUDAHOSTCXX})
    set(CMAKE_CUDA_HOST_COMPILER ${CMAKE_CXX_COMPILER})
  endif()
  if(NOT TINY_VLLM_NVCC)
    tv_no_cuda("no nvcc on PATH, in CUDA_HOME or in /usr/local/cuda (-DCMAKE_CUDA_COMPILER=... names one)")
  else()
    tv_try_nvcc(${TINY_VLLM_NVCC} tv_complaint)
    tv_find_cublas(${TINY_VLLM_NVCC} tv_cublas_include)
    if(tv_complaint)
      tv_no_cuda("${tv_complaint}")
    elseif(tv_cublas_include STREQUAL NOTFOUND)
      tv_no_cuda("${TINY_VLLM_NVCC} finds no cublas_v2.h, and there is none beside ${Python_EXECUTABLE} (`pip install nvidia-cublas` brings it)")
    else()
      tv_choose_architectures(${TINY_VLLM_NVCC})
      set(CMAKE_CUDA_COMPILER ${TINY_VLLM_NVCC})
      set(tv_cuda ON)
      enable_language(CUDA)
      set(tv_cuda_version ${CMAKE_CUDA_COMPILER_VERSION})
      string(REGEX REPLACE "-(real|virtual)" "" tv_cuda_architectures "${CMAKE_CUDA_ARCHITECTURES}")
      set(tv_cuda_reason "nvcc ${tv_cuda_version}, ${TINY_VLLM_NVCC}")
    endif()
  endif()
endif()

if(tv_cuda)
  list(JOIN tv_cuda_architectures ", " tv_text)
  message(STATUS "CUDA backend: yes (TINY_VLLM_CUDA=${TINY_VLLM_CUDA}; ${tv_cuda_reason}; architectures ${tv_text})")
else()
  message(STATUS "CUDA backend: no (TINY_VLLM_CUDA=${TINY_VLLM_CUDA}; ${tv_cuda_reason})")
endif()
