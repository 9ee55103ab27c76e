# cpp/cpu/kernels_<set>.cpp is compiled for its instruction set, and everything else for the plainest processor of the
# architecture: the binary runs everywhere, and the CPU backend asks the processor which kernels it may call.
# Never -march=native: a build must not depend on the machine that made it.
#
# Each set in the binary is also a macro TV_KERNELS_<SET>.

set(tv_avx512 -mavx512f -mavx512bw -mavx512dq -mavx512vl -mavx2 -mfma -mf16c)
set(tv_flags_avx2 -mavx2 -mfma -mf16c)
set(tv_flags_avx512 ${tv_avx512})
set(tv_flags_avx512_bf16 ${tv_avx512} -mavx512bf16)
set(tv_flags_amx ${tv_avx512} -mavx512bf16 -mamx-tile -mamx-bf16)
set(tv_flags_neon "")  # part of every aarch64 processor

include(CheckCXXCompilerFlag)

# Takes the kernels that this compiler or architecture cannot build out of the list variable `sources`, gives the others
# their flags, and sets tv_instruction_sets to what will be in the binary.
function(tv_choose_instruction_sets sources)
  string(TOLOWER "${CMAKE_SYSTEM_PROCESSOR}" processor)
  set(candidates "")
  if(processor MATCHES "^(x86_64|amd64)$")
    set(candidates avx2 avx512 avx512_bf16 amx)
  elseif(processor MATCHES "^(aarch64|arm64)$")
    set(candidates neon)
  endif()

  set(left ${${sources}})
  set(built portable)
  foreach(isa avx2 avx512 avx512_bf16 amx neon)
    set(file ${CMAKE_SOURCE_DIR}/cpp/cpu/kernels_${isa}.cpp)
    if(NOT file IN_LIST left)
      continue()
    endif()
    set(usable OFF)
    if(isa IN_LIST candidates)
      set(usable ON)
      if(tv_flags_${isa})
        list(JOIN tv_flags_${isa} " " flags)
        check_cxx_compiler_flag("${flags}" TV_COMPILES_${isa})
        set(usable ${TV_COMPILES_${isa}})
      endif()
    endif()
    if(usable)
      set_source_files_properties(${file} PROPERTIES COMPILE_OPTIONS "${tv_flags_${isa}}")
      list(APPEND built ${isa})
    else()
      list(REMOVE_ITEM left ${file})
    endif()
  endforeach()
  set(${sources} ${left} PARENT_SCOPE)
  set(tv_instruction_sets ${built} PARENT_SCOPE)
  list(JOIN built ", " built)
  message(STATUS "CPU kernels for ${CMAKE_SYSTEM_PROCESSOR}: ${built}")
endfunction()
