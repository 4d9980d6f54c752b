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

typedef struct {
    double low, median, high; // 10th, 50th and 90th percentile
} bench_spread;

/* Sorts the samples. */
BENCH_FN bench_spread bench_spread_of(double *samples, int count) {
    bench_spread s = {0, 0, 0};
    if (count == 0) return s;
    s.median = bench_summarize(samples, count).median;
    s.low = samples[(count - 1) / 10];
    s.high = samples[(count - 1) * 9 / 10];
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

/* Numbers separated by commas; 0: not such a list, or one of them is out of range. */
BENCH_FN int bench_parse_list(const char *text, int min, int max, int out[8]) {
    int count = 0;
    for (char *end; count < 8; text = end + 1) {
        long value = strtol(text, &end, 10);
        if (end == text || value < min || value > max) return 0;
        out[count++] = (int)value;
        if (!*end) return count;
        if (*end != ',') return 0;
    }
    return 0;
}

typedef struct {
    int64_t begin, end;
} bench_span;

/* Adds up how long `comms` were under way, and for how much of it the caller was outside of
   `calls`: that part is hidden behind its own work. Both in the order of time; nanoseconds. */
BENCH_FN void bench_overlap(const bench_span *comms, int num_comms, const bench_span *calls,
                            int num_calls, double *all, double *hidden) {
    int next = 0;
    for (int k = 0; k < num_comms; k++) {
        bench_span c = comms[k];
        int64_t covered = c.end - c.begin;
        while (next < num_calls && calls[next].end <= c.begin) next++;
        for (int i = next; i < num_calls && calls[i].begin < c.end; i++) {
            int64_t from = calls[i].begin > c.begin ? calls[i].begin : c.begin;
            int64_t to = calls[i].end < c.end ? calls[i].end : c.end;
            covered -= to - from;
        }
        *all += (double)(c.end - c.begin);
        *hidden += (double)covered;
    }
}
#endif
