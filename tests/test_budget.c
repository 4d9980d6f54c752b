/* test_budget.c - the host's cost of the hooks in instructions, which unlike times do not depend on
   what else the machine does: below a bound, and the same for 2 and for 1,024 ranks. */
#include "harness.h"
#define FSDP_NO_BACKEND
#define FSDP_IMPLEMENTATION
#include "fsdp.h"
#include "sim.h"
#include "bench/host_cost.h"

#if defined(__has_feature)
#if __has_feature(address_sanitizer) || __has_feature(thread_sanitizer) || __has_feature(memory_sanitizer)
#define INSTRUMENTED 1
#endif
#endif
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define INSTRUMENTED 1
#endif

/* Of the goals of 200 ns and 400 ns, at about 3 instructions in a nanosecond. */
static const struct {
    const char *name;
    int async;
    fsdp_dtype dtype;
    double bounds[HOST_LOOPS]; /* forward, backward, finalize, data, grad */
} budgets[] = {
    {"inline", 0, FSDP_F32, {1, 1, 1, 1, 1}},
    {"streams", 1, FSDP_BF16, {1, 1, 1, 1, 1}},
};

TEST_P_TIMEOUT(budget, instructions, budgets, 120) {
#if defined(INSTRUMENTED) || !defined(__OPTIMIZE__)
    SKIP("built with a sanitizer or without optimisation");
#else
    for (int loop = 0; loop < 2; loop++) {
        double few = host_instructions(loop, 2, row->async, row->dtype, 16);
        if (few < 0) SKIP("valgrind cannot be used here");
        double many = host_instructions(loop, 1024, row->async, row->dtype, 16);
        h_message("%-9s %5.0f instructions with 2 ranks, %5.0f with 1,024, at most %.0f", host_loops[loop].name, few, many,
                  row->bounds[loop]);
        CHECK(few > 0 && few <= row->bounds[loop]);
        CHECK_NEAR(many, few, 4); /* counters and sums of other sizes, nothing that grows */
    }
#endif
}
