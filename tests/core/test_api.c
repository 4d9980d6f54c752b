/* test_api.c - random calls of the public interface, from a seed: see api_fuzz.h. A seed that fails
   prints the command that repeats it.

   SPDX-License-Identifier: MIT */
#include "api_fuzz.h"

static void inputs(uint64_t seed, int count) {
    uint8_t data[2048];
    af_prepare();
    for (int i = 0; i < count; i++) {
        uint64_t at = seed + (uint64_t)i, state = at;
        size_t size = 60 + (size_t)(h_rand64(&state) % (sizeof data - 60));
        for (size_t k = 0; k < size; k++) data[k] = (uint8_t)h_rand64(&state);
        fprintf(stderr, "again: %s --filter=api.one --seed=%llu\n", h_program,
                (unsigned long long)at);
        af_input(data, size);
    }
    h_message("%d inputs, %lld worlds, %lld aborted, %lld calls, %lld refused", count,
              (long long)af_worlds, (long long)af_aborted, (long long)af_calls,
              (long long)af_refused);
}

TEST(api, one) { inputs(h_seed(), 1); }
TEST(api, random_calls, SLOW) { inputs(1000 * h_seed(), W_SLOW ? 300 : 1000); }
TEST(long_api, many_calls, SECONDS(1800) | NIGHT) { inputs(1000000 * h_seed(), W_SLOW ? 5000 : 50000); }
