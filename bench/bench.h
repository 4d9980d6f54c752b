/* bench.h - what every benchmark needs: a clock, repeats with a warm-up, order statistics, CSV.

       static double one(void *arg) {
           int64_t t = bench_now_ns();
           work(arg);
           return (double)(bench_now_ns() - t);
       }
       bench_stats s = bench_run(one, NULL, 3, 0.5, 1000);
       FILE *csv = bench_csv("bench_work", "case,ns_median");
       fprintf(csv, "x,%.1f\n", s.median);

   Medians and ratios are to be quoted; a minimum says what the machine can do when left alone.

   SPDX-License-Identifier: MIT */
#ifndef BENCH_H
#define BENCH_H
#include <stdint.h> // int64_t
#include <stdio.h>  // FILE
#include <stdlib.h> // qsort, getenv
#include <time.h>   // clock_gettime

#define BENCH_FN static __attribute__((unused))
enum { BENCH_SAMPLES_MAX = 4096 };

typedef struct {
    double min, median, p95;
    int samples;
} bench_stats;

BENCH_FN int64_t bench_now_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

BENCH_FN int bench_compare(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

/* Sorts the samples. */
BENCH_FN bench_stats bench_summarize(double *samples, int count) {
    bench_stats s = {0, 0, 0, count};
    if (count == 0) return s;
    qsort(samples, (size_t)count, sizeof *samples, bench_compare);
    s.min = samples[0];
    s.median = (samples[(count - 1) / 2] + samples[count / 2]) / 2;
    s.p95 = samples[(count - 1) * 95 / 100];
    return s;
}

/* Calls `one`, which returns what it measured, `warm_up` times for nothing; then for `seconds` or
   `most` times, whichever ends first, but five times at least. */
BENCH_FN bench_stats bench_run(double (*one)(void *), void *arg, int warm_up, double seconds,
                               int most) {
    static double samples[BENCH_SAMPLES_MAX];
    int count = 0;
    if (most > BENCH_SAMPLES_MAX) most = BENCH_SAMPLES_MAX;
    for (int i = 0; i < warm_up; i++) (void)one(arg);
    int64_t end = bench_now_ns() + (int64_t)(seconds * 1e9);
    while (count < most && (count < 5 || bench_now_ns() < end)) samples[count++] = one(arg);
    return bench_summarize(samples, count);
}

/* NAME.csv in $FSDP_BUILD, or here, with its first line. Ends the program when it cannot. */
BENCH_FN FILE *bench_csv(const char *name, const char *columns) {
    const char *dir = getenv("FSDP_BUILD");
    char path[512];
    snprintf(path, sizeof path, "%s/%s.csv", dir && *dir ? dir : ".", name);
    FILE *csv = fopen(path, "w");
    if (!csv) {
        perror(path);
        exit(1);
    }
    fprintf(csv, "%s\n", columns);
    printf("%s\n", path);
    return csv;
}
#endif
