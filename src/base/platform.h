/* base/platform.h - where the library runs; elsewhere one #error, and nothing after it

   Callers: fsdp.h, before it asks for FSDP_IMPLEMENTATION.

   A part of fsdp.h. SPDX-License-Identifier: MIT (full text at the end of fsdp.h) */
#ifndef FSDPI_BASE_PLATFORM_H
#define FSDPI_BASE_PLATFORM_H

#include <stdint.h> // UINTPTR_MAX

// The implementation stops here, not in its first function that does not compile. Evaluation with
// more bits is method 1 or 2; gcc says -1 where it may choose for each operation. With -ffast-math
// clang says -1, too, and float_control sets that right.
#if !defined(__linux__) && !defined(FSDP_MATH_ONLY)
#error "fsdp.h runs on Linux; elsewhere define FSDP_MATH_ONLY: its pure functions alone"
#elif (!defined(__GNUC__) || defined(__TINYC__)) && !defined(FSDP_MATH_ONLY)
#error "fsdp.h needs gcc or clang; otherwise define FSDP_MATH_ONLY: its pure functions alone"
#elif UINTPTR_MAX < UINT64_MAX && !defined(FSDP_MATH_ONLY)
#error "fsdp.h needs 64 bits: leave out -m32; or define FSDP_MATH_ONLY: its pure functions alone"
#elif defined(__clang__) && defined(__FAST_MATH__) && !defined(__x86_64__) &&                      \
    !defined(__i386__) && !defined(__powerpc64__) && !defined(__s390x__) &&                        \
    !(defined(__aarch64__) && __clang_major__ >= 15)
#error "this clang ignores float_control, so -Ofast and -ffast-math change results: leave them out"
#elif defined(__FLT_EVAL_METHOD__) &&                                                              \
    (__FLT_EVAL_METHOD__ == 1 || __FLT_EVAL_METHOD__ == 2 ||                                       \
     (__FLT_EVAL_METHOD__ < 0 && !defined(__clang__)))
#error "floats are computed with more bits, which changes results: add -msse2 -mfpmath=sse"
#else
#define FSDPI_RUNS_HERE
#endif

#ifndef FSDPI_RUNS_HERE
#undef FSDP_IMPLEMENTATION // the extensions leave theirs out, too
#endif

#endif // FSDPI_BASE_PLATFORM_H
