/* test_budget.c - the host's cost of the hooks in instructions, which do not depend on other work
   of the machine, as times do: within a bound, and equal for 2 and for 1,024 ranks.

   SPDX-License-Identifier: MIT */
#if defined(__has_feature)
#if __has_feature(address_sanitizer) || __has_feature(thread_sanitizer) ||                         \
    __has_feature(memory_sanitizer)
#define INSTRUMENTED 1
#endif
#endif
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define INSTRUMENTED 1
#endif
/* Evaluated before fsdp.h, whose pragmas about optimisation change these macros in gcc. */
#if defined(__OPTIMIZE__) && !defined(__OPTIMIZE_SIZE__) && !defined(INSTRUMENTED)
#define FOR_SPEED 1
#endif
#define TAGS NO(ASAN) | SLOW
#include "harness.h"
#include "lab.h"
#include "sim.h"
#include "bench/host_cost.h"

/* About twelve of these instructions take a nanosecond. The goals, 80 ns for a unit's forward
   hooks and 160 ns for its backward hooks, are in bench/bench_host.c. Getters are called for
   every parameter. */
static const struct {
    const char *name;
    int async;
    fsdp_dtype dtype;
    int dim;
    double bounds[HOST_LOOPS]; /* forward, backward, finalize, data, grad */
    const char *asked;         /* variable that enables a flight record or a trace */
} budgets[] = {
    {"inline", 0, FSDP_F32, 0, {931, 2000, 480, 97, 107}, NULL},
    {"streams", 1, FSDP_BF16, 0, {1850, 3480, 495, 97, 107}, NULL},
    {"by_columns", 0, FSDP_F32, 1, {931, 2000, 480, 97, 107}, NULL},
    {"recorded", 0, FSDP_F32, 0, {1500, 2840, 520, 97, 107}, "FSDP_FLIGHT_RECORD"},
    {"traced", 0, FSDP_F32, 0, {4800, 8780, 1040, 97, 107}, "FSDP_TRACE"},
};
#ifdef FOR_SPEED
static host_case case_of(int world, int async, fsdp_dtype dtype, int dim, int way) {
    const host_case c = {world, async, dtype, 64, dim, way};
    return c;
}
#endif

TEST_P(budget, instructions, budgets, SECONDS(120)) {
#ifndef FOR_SPEED
    SKIP("built with a sanitizer, or not for speed");
#else
    double few[HOST_LOOPS], many[HOST_LOOPS];
    const host_case two = case_of(2, row->async, row->dtype, row->dim, HOST_CALLS),
                    big = case_of(1024, row->async, row->dtype, row->dim, HOST_CALLS);
    if (row->asked) setenv(row->asked, h_tmpdir(), 1);
    setenv("FSDP_TRACE_STEPS", "0:100", 1);
    if (host_instructions(&two, few)) SKIP("valgrind cannot be used here");
    CHECK(!host_instructions(&big, many));
    for (int i = 0; i < HOST_LOOPS; i++) {
        h_message("%-9s %5.0f instructions with 2 ranks, %5.0f with 1,024, at most %.0f",
                  host_loops[i].name, few[i], many[i], row->bounds[i]);
        CHECK(few[i] > 0 && few[i] <= row->bounds[i]);
        CHECK_NEAR(many[i], few[i], 0.01 * few[i]); /* names are found by their addresses */
    }
#endif
}

/* Instructions of a replayed step in per cent of an eager step's: a unit's hooks; hooks and
   finalize. */
static const struct {
    const char *name;
    int async;
    fsdp_dtype dtype;
    double hooks[HOST_WAYS], all[HOST_WAYS]; /* at most; eager: 100 */
} replays[] = {
    {"inline", 0, FSDP_F32, {100, 95, 84}, {100, 97, 87}},
    {"streams", 1, FSDP_BF16, {100, 103, 107}, {100, 103, 107}},
};

TEST_P(budget, replays, replays, SECONDS(120)) {
#ifndef FOR_SPEED
    SKIP("built with a sanitizer, or not for speed");
#else
    static const char *const ways[HOST_WAYS] = {"by calls", "replayed", "planned"};
    double hooks[HOST_WAYS], all[HOST_WAYS];
    for (int way = 0; way < HOST_WAYS; way++) {
        const host_case c = case_of(2, row->async, row->dtype, 0, way);
        double loops[HOST_LOOPS];
        if (host_instructions(&c, loops)) {
            CHECK(way == HOST_CALLS);
            SKIP("valgrind cannot be used here");
        }
        hooks[way] = loops[0] + loops[1];
        all[way] = hooks[way] + loops[2];
        h_message("%-9s hooks %5.0f instructions, %3.0f %%; with finalize %5.0f, %3.0f %%",
                  ways[way], hooks[way], 100 * hooks[way] / hooks[0], all[way],
                  100 * all[way] / all[0]);
        CHECK(100 * hooks[way] <= row->hooks[way] * hooks[0]);
        CHECK(100 * all[way] <= row->all[way] * all[0]);
    }
#endif
}
