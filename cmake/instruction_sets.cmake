# cpp/cpu/kernels_<set>.cpp is compiled for its instruction set, and everything else for the plainest processor of the
# architecture: the binary runs everywhere, and the CPU backend asks the processor which kernels it may call.
# Never -march=native: a build must not depend on the machine that made it.
#
# Removes from the list variable `sources` the kernels that this compiler or architecture cannot build, and sets
# tv_instruction_sets to what is left. Each set also becomes a macro TV_KERNELS_<SET> for the core.

set(tv_avx512 -mavx512f -mavx512bw -mavx512dq -mavx512vl -mavx2 -mfma -mf16c)
set(tv_flags_avx2 -mavx2 -mfma -mf16c)
set(tv_flags_avx512 ${tv_avx512})
set(tv_flags_avx512_bf16 ${tv_avx512} -mavx512bf16)
set(tv_flags_amx ${tv_avx512} -mavx512bf16 -mamx-tile -mamx-bf16)
set(tv_flags_neon "")  # part of every aarch64 processor

set(tv_sets_x86_64 avx2 avx512 avx512_bf16 amx)
set(tv_sets_aarch64 neon)

include(CheckCXXCompilerFlag)

function(tv_add_instruction_sets sources)
  string(TOLOWER "${CMAKE_SYSTEM_PROCESSOR}" processor)
  if(processor MATCHES "^(x86_64|amd64)$")
    set(wanted ${tv_sets_x86_64})
  elseif(processor MATCHES "^(aarch64|arm64)$")
    set(wanted ${tv_sets_aarch64})
  else()
    set(wanted "")
  endif()

  set(built portable)
  set(list ${${sources}})
  foreach(isa ${tv_sets_x86_64} ${tv_sets_aarch64})
    set(file ${CMAKE_SOURCE_DIR}/cpp/cpu/kernels_${isa}.cpp)
    if(NOT file IN_LIST list)
      continue()
    endif()
    if(isa IN_LIST wanted AND tv_flags_${isa})
      list(JOIN tv_flags_${isa} " " flags)
      check_cxx_compiler_flag("${flags}" TV_COMPILES_${isa})
    else()
      set(TV_COMPILES_${isa} ON)
    endif()
    if(isa IN_LIST wanted AND TV_COMPILES_${isa})
      set_source_files_properties(${file} PROPERTIES COMPILE_OPTIONS "${tv_flags_${isa}}")
      list(APPEND built ${isa})
    else()
      list(REMOVE_ITEM list ${file})
    endif()
  endforeach()
  set(${sources} ${list} PARENT_SCOPE)
  set(tv_instruction_sets ${built} PARENT_SCOPE)
  message(STATUS "CPU kernels for ${CMAKE_SYSTEM_PROCESSOR}: ${built}")
endfunction()
