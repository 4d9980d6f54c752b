/* test_gpt_math_wide.c - the same for the tiles of gpt.h that processors with AVX-512 take; others
   compute them in pieces.

   SPDX-License-Identifier: MIT */
#define GPT_WIDE
#pragma GCC diagnostic ignored "-Wpsabi" /* nothing of that type leaves this file */
#include "test_gpt_math.c"
