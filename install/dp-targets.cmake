# dp-targets.cmake - what a project links, whether dp.h is installed or a part of its tree.
#
#   dp::headers                         the headers: one C file of yours defines DP_IMPLEMENTATION,
#                                       for which stb_ds.h has to be there
#   dp::dp                              the library, compiled once, for C and C++
#   dp::cuda dp::nccl dp::hip dp::rccl  dp::dp, and dp.h declares what is in these headers: if the
#                                       library was made with them
#   dp::mpi                             in place of dp::dp: the library that knows MPI
#   dp::train                           dp::dp, which has all headers around training

# dp_targets(folder of headers, library, library that knows MPI or "", what they were made with, what
# has to be linked beside them, the same for MPI)
function(dp_targets include library mpi_library with beside beside_mpi)
  if(TARGET dp::dp)
    return()
  endif()
  add_library(dp::headers INTERFACE IMPORTED GLOBAL)
  set_target_properties(dp::headers PROPERTIES INTERFACE_INCLUDE_DIRECTORIES "${include}"
    INTERFACE_LINK_LIBRARIES "${beside}")
  find_path(DP_STB NAMES stb_ds.h PATH_SUFFIXES stb)
  if(DP_STB)
    target_include_directories(dp::headers SYSTEM INTERFACE "${DP_STB}")
  endif()

  add_library(dp::dp INTERFACE IMPORTED GLOBAL)
  set_target_properties(dp::dp PROPERTIES INTERFACE_INCLUDE_DIRECTORIES "${include}"
    INTERFACE_LINK_LIBRARIES "${library};${beside}")
  foreach(part IN LISTS with ITEMS train)
    if(part STREQUAL "mpi")
      continue()
    endif()
    add_library(dp::${part} INTERFACE IMPORTED GLOBAL)
    set_target_properties(dp::${part} PROPERTIES INTERFACE_LINK_LIBRARIES dp::dp)
    if(NOT part STREQUAL "train")
      string(TOUPPER "DP_USE_${part}" define)
      set_target_properties(dp::${part} PROPERTIES INTERFACE_COMPILE_DEFINITIONS ${define})
      list(APPEND defines ${define})
    endif()
  endforeach()
  if(NOT mpi_library)
    return()
  endif()
  add_library(dp::mpi INTERFACE IMPORTED GLOBAL)
  set_target_properties(dp::mpi PROPERTIES INTERFACE_INCLUDE_DIRECTORIES "${include}"
    INTERFACE_COMPILE_DEFINITIONS "DP_USE_MPI;${defines}"
    INTERFACE_LINK_LIBRARIES "${mpi_library};${beside};${beside_mpi}")
  # A program has one of the two libraries: CMake refuses targets that disagree in this.
  set_target_properties(dp::dp PROPERTIES INTERFACE_DP_LIBRARY dp
    COMPATIBLE_INTERFACE_STRING DP_LIBRARY)
  set_target_properties(dp::mpi PROPERTIES INTERFACE_DP_LIBRARY dp-mpi
    COMPATIBLE_INTERFACE_STRING DP_LIBRARY)
endfunction()
