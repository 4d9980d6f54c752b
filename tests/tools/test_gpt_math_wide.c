/* test_gpt_math_wide.c - test_gpt_math.c for the tiles of gpt.h that processors with AVX-512 use;
   others compute them in parts.

   SPDX-License-Identifier: MIT */
#define GEMM_WIDE
#pragma GCC diagnostic ignored "-Wpsabi" /* no value of that type leaves this file */
#include "test_gpt_math.c"
