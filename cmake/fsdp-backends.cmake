# fsdp-backends.cmake - backends that need an object or a library, as targets. The objects are
# compiled in the program's own project, so that they fit its compilers and its libraries.
# SPDX-License-Identifier: MIT

# fsdp::BACKEND from the sources in FOLDER/backends. MISSING gets what this machine or the project
# lacks for it, or nothing.
function(fsdp_add_backend backend folder missing)
    set(${missing} "" PARENT_SCOPE)
    if(TARGET fsdp::${backend})
        return()
    endif()
    if(backend STREQUAL gloo)
        fsdp_add_gloo("${folder}" lacks)
    elseif(backend STREQUAL nccl)
        fsdp_add_nccl("${folder}" lacks)
    else()
        set(lacks "there is no such backend: use gloo or nccl")
    endif()
    set(${missing} "${lacks}" PARENT_SCOPE)
endfunction()

# Both this backend and shared memory: the latter is taken where all ranks are on one host.
function(fsdp_add_gloo folder missing)
    find_path(FSDP_GLOO_INCLUDE_DIR gloo/transport/tcp/device.h
              HINTS ${GLOO_HOME} ENV GLOO_HOME PATH_SUFFIXES include)
    find_library(FSDP_GLOO_LIBRARY gloo HINTS ${GLOO_HOME} ENV GLOO_HOME PATH_SUFFIXES lib)
    if(NOT CMAKE_CXX_COMPILER)
        set(${missing} "needs C++: project(... LANGUAGES C CXX)" PARENT_SCOPE)
        return()
    elseif(NOT FSDP_GLOO_INCLUDE_DIR OR NOT FSDP_GLOO_LIBRARY)
        set(${missing} "needs Gloo: install libgloo-dev, or set GLOO_HOME" PARENT_SCOPE)
        return()
    endif()
    add_library(fsdp_gloo STATIC "${folder}/backends/fsdp_gloo.cc")
    add_library(fsdp::gloo ALIAS fsdp_gloo)
    set_target_properties(fsdp_gloo PROPERTIES POSITION_INDEPENDENT_CODE ON EXPORT_NAME gloo)
    target_compile_features(fsdp_gloo PRIVATE cxx_std_11)
    target_include_directories(fsdp_gloo SYSTEM PRIVATE "${FSDP_GLOO_INCLUDE_DIR}")
    target_compile_definitions(fsdp_gloo INTERFACE FSDP_BACKEND_SHM FSDP_BACKEND_GLOO)
    target_link_libraries(fsdp_gloo PUBLIC fsdp::fsdp "${FSDP_GLOO_LIBRARY}")
endfunction()

# The GPUs that the project names, else sm_80 and what the driver translates from it for newer ones.
function(fsdp_cuda_architectures name)
    if("${${name}}$ENV{CUDAARCHS}" STREQUAL "")
        set(${name} 80 PARENT_SCOPE)
    endif()
endfunction()

# This backend alone: with shared memory beside it a program would run without its GPUs.
function(fsdp_add_nccl folder missing)
    find_package(CUDAToolkit QUIET)
    find_path(FSDP_NCCL_INCLUDE_DIR nccl.h HINTS ${NCCL_HOME} ENV NCCL_HOME ENV NCCL_ROOT
              ${CUDAToolkit_INCLUDE_DIRS} PATH_SUFFIXES include)
    find_library(FSDP_NCCL_LIBRARY nccl HINTS ${NCCL_HOME} ENV NCCL_HOME ENV NCCL_ROOT
                 ${CUDAToolkit_LIBRARY_DIR} PATH_SUFFIXES lib lib64)
    if(NOT CMAKE_CUDA_COMPILER)
        set(${missing} "needs nvcc: project(... LANGUAGES C CXX CUDA)" PARENT_SCOPE)
        return()
    elseif(NOT TARGET CUDA::cudart)
        set(${missing} "needs the CUDA toolkit: set CUDAToolkit_ROOT" PARENT_SCOPE)
        return()
    elseif(NOT FSDP_NCCL_INCLUDE_DIR OR NOT FSDP_NCCL_LIBRARY)
        set(${missing} "needs NCCL: install libnccl-dev, or set NCCL_HOME" PARENT_SCOPE)
        return()
    endif()
    add_library(fsdp_nccl STATIC "${folder}/backends/fsdp_cuda.cu")
    add_library(fsdp::nccl ALIAS fsdp_nccl)
    fsdp_cuda_architectures(CMAKE_CUDA_ARCHITECTURES)
    set_target_properties(fsdp_nccl PROPERTIES POSITION_INDEPENDENT_CODE ON CUDA_STANDARD 14 EXPORT_NAME nccl
                                               CUDA_ARCHITECTURES "${CMAKE_CUDA_ARCHITECTURES}")
    target_include_directories(fsdp_nccl SYSTEM INTERFACE "${FSDP_NCCL_INCLUDE_DIR}")
    target_compile_definitions(fsdp_nccl INTERFACE FSDP_BACKEND_NCCL)
    target_link_libraries(fsdp_nccl PUBLIC fsdp::fsdp CUDA::cudart INTERFACE "${FSDP_NCCL_LIBRARY}")
endfunction()
