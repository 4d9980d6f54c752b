/* bench_host.c - what the library costs the host: nanoseconds per call with a device and a comm
   that do nothing, for units of 12 parameters, W from 2 to 1,024, inline and with streams.

       build/bench/bench_host                nanoseconds
       build/bench/bench_host --callgrind    and instructions, counted by valgrind
       tools/bench_report -o build/bench_host.svg build/bench_host.csv      as a picture

   Goals: 80 ns for pre_ and post_forward together, 160 ns for pre_ and post_backward, at any W.
   Writes $FSDP_BUILD/bench_host.csv.

   SPDX-License-Identifier: MIT */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE 1 /* the POSIX calls under -std=c99 too */
#endif
#include "bench/bench.h"
#define FSDP_NO_BACKEND
#include "tests/library.c" /* what it measures */
#include "tests/sim.h"
#include "bench/host_cost.h"

enum { WARM_UP = 40, STEPS = 400, WIDTH = 128 };

typedef struct {
    double samples[HOST_LOOPS][STEPS];
    int step;
    int64_t begin;
} timing;

static void mark(void *user, int loop, int end) {
    timing *t = (timing *)user;
    if (!end) t->begin = bench_now_ns();
    else if (t->step >= 0)
        t->samples[loop][t->step] = (double)(bench_now_ns() - t->begin) / host_loops[loop].calls;
}

static int measure(FILE *csv, int world, int async, fsdp_dtype dtype, int callgrind) {
    const host_case c = {world, async, dtype, WIDTH, 0, HOST_CALLS};
    host_model h;
    static timing t;
    if (host_open(&h, &c)) {
        fprintf(stderr, "bench_host: %s\n", fsdp_last_error(h.s.world));
        return 1;
    }
    for (t.step = -WARM_UP; t.step < STEPS; t.step++) host_step(&h, mark, &t);
    (void)sim_close(&h.s);
    double instructions[HOST_LOOPS];
    int counted = callgrind && !host_instructions(&c, instructions);
    if (callgrind && !counted) fprintf(stderr, "bench_host: valgrind cannot be used here\n");
    for (int loop = 0; loop < HOST_LOOPS; loop++) {
        static const double goals[HOST_LOOPS] = {80, 160, 0, 0, 0};
        bench_stats r = bench_summarize(t.samples[loop], STEPS);
        char count[32] = "";
        if (counted) snprintf(count, sizeof count, "%.0f", instructions[loop]);
        printf("%-8s %-6s %5d  %-9s %8.1f %8.1f %8.1f  %8s  %s\n", fsdp_dtype_name(dtype),
               async ? "streams" : "inline", world, host_loops[loop].name, r.min, r.median, r.p95,
               count,
               goals[loop] <= 0          ? ""
               : r.median <= goals[loop] ? "goal met"
                                         : "above the goal");
        fprintf(csv, "%s,%s,%d,%s,%.1f,%.1f,%.1f,%s\n", fsdp_dtype_name(dtype),
                async ? "streams" : "inline", world, host_loops[loop].name, r.min, r.median, r.p95,
                count);
        fflush(stdout);
    }
    return 0;
}

int main(int argc, char **argv) {
    static const int worlds[] = {2, 16, 128, 1024};
    static const fsdp_dtype dtypes[] = {FSDP_F32, FSDP_BF16};
    int callgrind = argc > 1 && !strcmp(argv[1], "--callgrind"), failed = 0;
    if (argc > 1 && !callgrind) {
        fprintf(stderr, "usage: %s [--callgrind]\n", argv[0]);
        return 2;
    }
    FILE *csv = bench_csv("bench_host",
                          "param_dtype,mode,world,call,min_ns,median_ns,p95_ns,instructions");
    printf("%-8s %-6s %5s  %-9s %8s %8s %8s  %8s\n", "dtype", "mode", "world", "call", "min ns",
           "median", "p95", "instr.");
    for (int k = 0; k < 2; k++)
        for (int async = 0; async < 2; async++)
            for (size_t i = 0; i < sizeof worlds / sizeof *worlds; i++)
                failed |= measure(csv, worlds[i], async, dtypes[k], callgrind);
    fclose(csv);
    return failed;
}
