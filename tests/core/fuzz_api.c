/* fuzz_api.c - a libFuzzer target: calls of the public interface, see tests/core/api_fuzz.h

       clang -std=c99 -g -O1 -I. -Itests -fsanitize=fuzzer,address,undefined \
           tests/core/fuzz_api.c tests/library.c -o build/fuzz_api -pthread -lm
       mkdir seeds && FSDP_FUZZ_SEEDS=seeds build/fuzz_api -runs=1
       build/fuzz_api -max_len=4096 -max_total_time=600 seeds

   tests/core/test_api.c makes the same calls from a seed.

   SPDX-License-Identifier: MIT */
#define main unused_main /* libFuzzer has its own */
int main(int argc, char **argv);
#include "api_fuzz.h"
#undef main

/* Writes seeds: without them it would take long to find inputs with many calls. */
static void write_seeds(const char *dir) {
    for (uint64_t i = 1; dir && i <= 100; i++) {
        char path[512];
        uint64_t state = i;
        snprintf(path, sizeof path, "%s/calls-%d", dir, (int)i);
        FILE *f = fopen(path, "w");
        AF_MUST(f != NULL, "%s", path);
        for (uint64_t k = 0; k < 20 * i; k++) fputc((int)(h_rand64(&state) & 255), f);
        fclose(f);
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    static int ready;
    if (!ready++) af_prepare(), write_seeds(getenv("FSDP_FUZZ_SEEDS"));
    if (size <= 4096) af_input(data, size);
    return 0;
}
