/* fuzz_api.c - a libFuzzer target: calls of the public interface, see tests/api_fuzz.h

       clang -std=c99 -g -O1 -I. -Itests -fsanitize=fuzzer,address,undefined \
           tests/private/fuzz_api.c tests/library.c -o build/fuzz_api -pthread -lm
       build/fuzz_api -max_len=4096 -max_total_time=600

   tests/test_api.c makes the same calls from a seed.

   SPDX-License-Identifier: MIT */
#define main unused_main /* libFuzzer has its own */
int main(int argc, char **argv);
#include "api_fuzz.h"
#undef main

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    static int ready;
    if (!ready++) af_prepare();
    if (size <= 4096) af_input(data, size);
    return 0;
}
