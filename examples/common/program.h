/* program.h - what the trainers among the examples share as programs: exit statuses, the time,
   whether a launcher has started the job before, and bits that look random

   SPDX-License-Identifier: MIT */
#ifndef EXAMPLES_PROGRAM_H
#define EXAMPLES_PROGRAM_H

#include <stdint.h> // uint64_t
#include <stdlib.h> // getenv, atoi
#include <time.h>   // clock_gettime

enum { EXIT_DONE = 0, EXIT_FAILED = 1, EXIT_IMPOSSIBLE = 2 };

static inline double now_seconds(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

/* Returns 1 if a launcher has started this job before, or a manager has queued it again. */
static inline int is_started_again(void) {
    static const char *const counts[] = {"FSDP_RESTART_COUNT", // set by fsdprun --max-restarts
                                         "TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT"};
    int is_again = 0;
    for (size_t i = 0; i < sizeof counts / sizeof *counts; i++) {
        const char *count = getenv(counts[i]);
        is_again |= count && atoi(count) > 0;
    }
    return is_again;
}

/* Returns a number whose every bit depends on every bit of x: the last steps of splitmix64. */
static inline uint64_t mix_bits(uint64_t x) {
    x = (x ^ (x >> 30)) * UINT64_C(0xBF58476D1CE4E5B9);
    x = (x ^ (x >> 27)) * UINT64_C(0x94D049BB133111EB);
    return x ^ (x >> 31);
}

#endif // EXAMPLES_PROGRAM_H
