/* base/macros.h - what compilers spell in different ways

   Callers: hash.h, reduce.h (FSDPI_UNUSED) and others.

   A part of fsdp.h. SPDX-License-Identifier: MIT (full text at the end of fsdp.h) */
#ifndef FSDP_H
#include "../../fsdp.h"
#endif
#ifndef FSDPI_BASE_MACROS_H
#define FSDPI_BASE_MACROS_H

#if defined(__clang__)
#define FSDPI_NOINLINE __attribute__((noinline))
#define FSDPI_UNUSED   __attribute__((unused))
#elif defined(__GNUC__)
#define FSDPI_NOINLINE __attribute__((noinline, noclone))
#define FSDPI_UNUSED   __attribute__((unused))
#else
#define FSDPI_NOINLINE
#define FSDPI_UNUSED
#endif
#if defined(__GNUC__)
#define FSDPI_MERGED static inline __attribute__((always_inline))
#define FSDPI_PREFETCH(at) __builtin_prefetch(at)
#else
#define FSDPI_MERGED static inline
#define FSDPI_PREFETCH(at) ((void)(at))
#endif

// CUDA kernels use the conversions of float.h, too.
#ifdef __CUDACC__
#define FSDPI_HD __host__ __device__
#else
#define FSDPI_HD
#endif

#endif // FSDPI_BASE_MACROS_H
