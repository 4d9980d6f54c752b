/* test_budget.c - the host's cost of the hooks in instructions, which unlike times do not depend on
   what else the machine does: below a bound, and the same for 2 and for 1,024 ranks.

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
/* Asked before fsdp.h, whose pragmas about optimisation gcc lets show in these macros. */
#if defined(__OPTIMIZE__) && !defined(__OPTIMIZE_SIZE__) && !defined(INSTRUMENTED)
#define FOR_SPEED 1
#endif
#include "harness.h"
#include "lab.h"
#include "sim.h"
#include "bench/host_cost.h"

/* The goals are 200 ns for a unit's hooks of forward and 400 ns for those of backward; about ten
   of these instructions take a nanosecond. Getters are called for every parameter. */
static const struct {
    const char *name;
    int async;
    fsdp_dtype dtype;
    int dim;
    double bounds[HOST_LOOPS]; /* forward, backward, finalize, data, grad */
} budgets[] = {
    {"inline", 0, FSDP_F32, 0, {1200, 3300, 1500, 120, 120}},
    {"streams", 1, FSDP_BF16, 0, {1700, 4300, 1500, 120, 120}},
    {"by_columns", 0, FSDP_F32, 1, {1200, 3300, 1500, 120, 120}},
};

TEST_P_TIMEOUT(budget, instructions, budgets, 120) {
#ifndef FOR_SPEED
    SKIP("built with a sanitizer, or not for speed");
#else
    double few[HOST_LOOPS], many[HOST_LOOPS];
    if (host_instructions(2, row->async, row->dtype, 64, row->dim, few))
        SKIP("valgrind cannot be used here");
    CHECK(!host_instructions(1024, row->async, row->dtype, 64, row->dim, many));
    for (int i = 0; i < HOST_LOOPS; i++) {
        h_message("%-9s %5.0f instructions with 2 ranks, %5.0f with 1,024, at most %.0f",
                  host_loops[i].name, few[i], many[i], row->bounds[i]);
        CHECK(few[i] > 0 && few[i] <= row->bounds[i]);
        CHECK_NEAR(many[i], few[i], 8);
    }
#endif
}
