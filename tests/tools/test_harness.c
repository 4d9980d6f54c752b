/* test_harness.c - tests that fail, skip, hang and crash are treated as harness.h says.

   SPDX-License-Identifier: MIT */
#define TAGS NO(ASAN)
#include "harness.h"
#include <sys/resource.h> /* getrlimit, setrlimit */

static char output[65536];

/* Runs the probe, a program in the same directory; its text goes to `output`. Returns its exit
   status. */
static int probe(const char *args) {
    char command[1024];
    const char *slash = strrchr(h_program, '/');
    int dir = slash ? (int)(slash - h_program) : 1, status;
    size_t size;
    FILE *p;
    snprintf(command, sizeof command, "exec %.*s/probe_harness %s 2>&1", dir,
             slash ? h_program : ".", args);
    p = popen(command, "r");
    CHECK(p != NULL);
    size = fread(output, 1, sizeof output - 1, p);
    output[size] = 0;
    status = pclose(p);
    printf("%s\n%s", command, output);
    CHECK(WIFEXITED(status));
    return WEXITSTATUS(status);
}

/* Returns 1 if a line of the probe's output matches; '%' in the pattern stands for any text in a
   line. */
static int has_line(const char *pattern) {
    char copy[sizeof output], *line, *end;
    memcpy(copy, output, sizeof copy);
    for (line = strtok_r(copy, "\n", &end); line; line = strtok_r(NULL, "\n", &end)) {
        char glob[512];
        size_t i, n = 0;
        for (i = 0; pattern[i] && n < sizeof glob - 2; i++) {
            if (strchr("[]*?\\", pattern[i])) glob[n++] = '\\';
            glob[n++] = pattern[i] == '%' ? '*' : pattern[i];
        }
        glob[n] = 0;
        if (!fnmatch(glob, line, 0)) return 1;
    }
    return 0;
}
#define LINE(pattern) CHECK_MSG(has_line(pattern), "no line like: %s", pattern)

static int count(const char *text) {
    int n = 0;
    const char *p = output;
    while ((p = strstr(p, text)) != NULL) n++, p++;
    return n;
}

/* Lines that each failing probe must print, in addition to the common ones. */
static const struct { const char *name, *line, *why; } failures[] = {
    {"fail.check", "%probe_harness.c:%: CHECK(1 + 1 == 3): is false", "exit code 1"},
    {"fail.integer", "%: CHECK_EQ_INT(-1, 0xffffffffu): -1 != 4294967295", "exit code 1"},
    {"fail.string", "%: CHECK_EQ_STR(\"a\", %): \"a\" != \"(null)\"", "exit code 1"},
    {"fail.near", "%: CHECK_NEAR(1.0f, 1.5): 1 and 1.5, within 0.25", "exit code 1"},
    {"fail.not_a_number", "%: CHECK_NEAR(x, x): %nan and %nan, within 1e+30", "exit code 1"},
    {"fail.memory", "%: CHECK_EQ_MEM(%): 2 of 4 bytes differ, first at 2: 0x63 != 0x78",
     "exit code 1"},
    {"fail.ok", "%: CHECK_OK(6 - 2): status 4, expected 0", "exit code 1"},
    {"fail.status", "%: CHECK_STATUS(4, 3 + 2): status 4, expected 5", "exit code 1"},
    {"fail.exit_code", "", "exit code 3"},
    {"fail.early_exit", "", "exit(0) before the end of the test"},
    {"fail.signal", "", "signal 11 (Segmentation fault%)"},
    {"fail.thread", "%: CHECK(arg != NULL): in a thread 7", "exit code 1"},
    {"fail.rank_proc", "r2|%probe_harness.c:%: rank 2: CHECK_EQ_INT(rank + 10, world): 12 != 4",
     "exit code 1"},
    {"fail.rank_thread", "r3|%probe_harness.c:%: rank 3: CHECK_EQ_INT(rank + 10, world): 13 != 4",
     "exit code 1"},
    {"fail.rank_signal", "%: rank 1 of 3 failed first: signal 11 (Segmentation fault%)",
     "exit code 1"},
    {"fail.rank_exit", "%: rank 1 of 2 failed first: exit(0) before the end of the test",
     "exit code 1"},
    {"fail.rank_culprit", "%: rank 2 of 3 failed first: signal 11 (Segmentation fault%)",
     "exit code 1"},
    {"slow.hang", "", "timed out after 0.2 s"},
    {"slow.rank_hang", "%: h_ranks_proc: still running of 3 ranks: 1", "timed out after 0.3 s"},
};

TEST_P(harness, failure, failures) {
    char text[512];
    snprintf(text, sizeof text, "--filter=%s --seed=9", row->name);
    CHECK_EQ_INT(probe(text), 1);
    LINE("[==========] Running 1 test.");
    LINE("[==========] 1 test ran. (% ms total)");
    LINE("[  PASSED  ] 0 tests.");
    LINE("[  FAILED  ] 1 test, listed below:");
    if (row->line[0]) LINE(row->line);
    snprintf(text, sizeof text, "[ RUN      ] %s", row->name);
    LINE(text);
    snprintf(text, sizeof text, "[  FAILED  ] %s (%% ms)", row->name);
    LINE(text);
    snprintf(text, sizeof text, "[  FAILED  ] %s", row->name);
    LINE(text);
    snprintf(text, sizeof text, "%s: %s", row->name, row->why);
    LINE(text);
    snprintf(text, sizeof text, "again: %%probe_harness '--filter=%s' --seed=9", row->name);
    LINE(text);
}

TEST(harness, pass) {
    CHECK_EQ_INT(probe("--filter=pass.*"), 0);
    LINE("[==========] Running 6 tests.");
    LINE("[       OK ] pass.plain (% ms)");
    LINE("[       OK ] pass.ranks_proc (% ms)");
    LINE("[       OK ] pass.ranks_thread (% ms)");
    LINE("[     NOTE ] 12 cases");
    LINE("[==========] 6 tests ran. (% ms total)");
    LINE("[  PASSED  ] 6 tests.");
    CHECK_EQ_INT(count("never shown") + count("FAILED") + count("SKIPPED"), 0);
}

TEST(harness, first_rank_speaks_last) {
    CHECK_EQ_INT(probe("--filter=fail.rank_proc"), 1);
    LINE("r0|hello from 0");
    LINE("r3|hello from 3");
    LINE("%: rank 2 of 4 failed first: exit code 1");
    CHECK_EQ_INT(count("r2|hello"), 1);
    CHECK(strstr(output, "r2|") > strstr(output, "r3|"));
}

TEST(harness, hang_shows_output) {
    CHECK_EQ_INT(probe("--filter=slow.rank_hang"), 1);
    LINE("r1|rank 1 waits");
}

TEST(harness, skip) {
    CHECK_EQ_INT(probe("--filter=skip.*"), 0);
    LINE("[  SKIPPED ] skip.plain (no GPU)");
    LINE("[  SKIPPED ] skip.rank (rank skips)");
    LINE("[  PASSED  ] 0 tests.");
    LINE("[  SKIPPED ] 2 tests, listed below:");
    LINE("[  SKIPPED ] skip.plain");
}

/* A remaining grandchild ends with its test: its pipe is closed. */
TEST(harness, grandchildren_are_killed) {
    static const char *const which[] = {"tidy.grandchild", "slow.grandchild"};
    int i;
    for (i = 0; i < 2; i++) {
        char path[400], args[64], text[8];
        int fd;
        snprintf(path, sizeof path, "%s/fifo%d", h_tmpdir(), i);
        CHECK_EQ_INT(mkfifo(path, 0600), 0);
        setenv("PROBE_FIFO", path, 1);
        fd = open(path, O_RDONLY | O_NONBLOCK);
        snprintf(args, sizeof args, "--filter=%s", which[i]);
        CHECK_EQ_INT(probe(args), i);
        CHECK_EQ_INT(fcntl(fd, F_SETFL, 0), 0);
        CHECK_EQ_INT(read(fd, text, sizeof text), 5);
        CHECK_EQ_INT(read(fd, text, sizeof text), 0);
    }
}

TEST(harness, tap) {
    CHECK_EQ_INT(probe("--tap --filter=table.*:skip.plain:fail.check:pass.message"), 1);
    CHECK(!strncmp(output, "1..5\n", 5));
    LINE("not ok 1 - fail.check");
    LINE("# %: CHECK(1 + 1 == 3): is false");
    LINE("# 12 cases");
    LINE("ok 2 - pass.message");
    LINE("ok 3 - skip.plain # SKIP no GPU");
    LINE("not ok 4 - table.row/one");
    LINE("ok 5 - table.row/two");
    CHECK_EQ_INT(count("["), 0);
}

TEST(harness, list_and_filter) {
    CHECK_EQ_INT(probe("--list --filter=table:pass.*:-*seed:-ranks"), 0);
    CHECK_EQ_STR(output, "pass.message\npass.plain\npass.tmpdir\ntable.row/one\ntable.row/two\n");
    CHECK_EQ_INT(probe("--list --filter=-fail.*:-slow.*:-pass.*:-tags.*"), 0);
    CHECK_EQ_STR(output, "skip.plain\nskip.rank\ntable.row/one\ntable.row/two\ntidy.grandchild\n");
}

/* Tests of the probe's suite `tags` that an option chooses, without the suite's name. */
static const struct { const char *name, *tests; } choices[] = {
    {"slow", "many_ranks row/two slow"},
    {"shm", "gloo_at_night many_ranks not_over_gloo of_the_file row/one row/two slow tsan"},
    {"shm:-slow", "gloo_at_night not_over_gloo of_the_file row/one tsan"},
    {"-slow:-gloo", "gloo_at_night night not_over_gloo"},
    {"gloo:stub", "many_ranks not_over_shm of_the_file row/one row/two slow tsan"},
    {"night.gloo", "gloo_at_night"},
    {"night.shm", "night"},
    {"night.nccl", "night"},
    {"stub", "not_over_shm"},
    {"asan", "gloo_at_night not_over_gloo of_the_file slow tsan"},
    {"night.asan", "many_ranks row/one"},
    {"tsan", "tsan"},
    {"night.tsan", "gloo_at_night many_ranks not_over_gloo of_the_file row/one row/two slow"},
    {"night.bits", "many_ranks"},
    {"valgrind", ""},
};
TEST_P(harness, tags, choices) {
    char args[128], names[512] = "", *line, *end;
    snprintf(args, sizeof args, "--list --filter=tags.* --tags=%s", row->name);
    CHECK_EQ_INT(probe(args), 0);
    for (line = strtok_r(output, "\n", &end); line; line = strtok_r(NULL, "\n", &end))
        snprintf(names + strlen(names), sizeof names - strlen(names), "%s%s", names[0] ? " " : "",
                 line + strlen("tags."));
    CHECK_EQ_STR(names, row->tests);
}

TEST(harness, unknown_tags_fail) {
    static const char *const unknown[] = {"glo", "gloo:glo", "-glo", "-shm:-gloo_", "night.", "GLOO",
                                          "night.night.gloo"};
    size_t i;
    for (i = 0; i < sizeof unknown / sizeof *unknown; i++) {
        char args[64];
        snprintf(args, sizeof args, "--list --tags=%s", unknown[i]);
        CHECK_EQ_INT(probe(args), 2);
        LINE("%probe_harness: no tag is named '%'");
        CHECK_EQ_INT(count("tags."), 0);
    }
}

TEST(harness, nothing_to_run_fails) {
    CHECK_EQ_INT(probe("--filter=no.such.test"), 1);
    LINE("[==========] 0 tests ran. (% ms total)");
    CHECK_EQ_INT(probe("--no-such-option"), 2);
}

TEST(harness, repeat_and_seed) {
    CHECK_EQ_INT(probe("--filter=pass.seed --repeat=3 --seed=41"), 0);
    LINE("[==========] Running 3 tests.");
    LINE("[     NOTE ] seed 41");
    LINE("[     NOTE ] seed 43");
}

TEST(harness, timeout_mult, SLOW) {
    CHECK_EQ_INT(probe("--filter=slow.hang --timeout-mult=3"), 1);
    LINE("slow.hang: timed out after 0.6 s");
    setenv("TEST_TIMEOUT_MULT", "2", 1);
    CHECK_EQ_INT(probe("--filter=slow.hang"), 1);
    LINE("slow.hang: timed out after 0.4 s");
}

/* A test that a signal to its program ends has not timed out. */
TEST(harness, interrupted) {
    CHECK_EQ_INT(probe("--filter=slow.interrupted"), 128 + SIGTERM);
    LINE("slow.interrupted: interrupted by signal 15");
    CHECK_EQ_INT(count("timed out"), 0);
}

/* On a machine under load a test gets ten times its time. */
TEST(harness, limit_is_of_the_calm_clock) {
    const int64_t limit = 1000 * 60 * 60;
    static const struct {
        int took, calm, is_over; /* in limits */
    } rows[] = {{0, 0, 0}, {2, 0, 0}, {9, 0, 0}, {11, 0, 1}, {2, 2, 1}, {0, 2, 0}};
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        const int64_t before[] = {h_start_ms, h_start_calm_ms, h_limit_ms};
        h_limit_ms = limit;
        h_start_ms = h_now_ms() - rows[i].took * limit - 1000;
        h_start_calm_ms = h_calm_ms() - rows[i].calm * limit;
        const int is_over = h_is_over(0);
        h_start_ms = before[0], h_start_calm_ms = before[1], h_limit_ms = before[2];
        CHECK_MSG(is_over == rows[i].is_over, "row %d: %d", (int)i, is_over);
    }
}

/* A moment in which the kernel's files cannot be opened moves the clock by that moment only. */
TEST(harness, calm_clock_without_descriptors) {
    struct rlimit before, none;
    CHECK(!getrlimit(RLIMIT_NOFILE, &before));
    none = before, none.rlim_cur = 3;
    const int64_t begin = h_now_ms(), calm = h_calm_ms();
    CHECK(!setrlimit(RLIMIT_NOFILE, &none));
    const int64_t without = h_calm_ms();
    CHECK(!setrlimit(RLIMIT_NOFILE, &before));
    const int64_t after = h_calm_ms(), took = h_now_ms() - begin + 20;
    CHECK_MSG(llabs(without - calm) <= took && llabs(after - calm) <= took,
              "%lld, without descriptors %lld, then %lld", (long long)calm, (long long)without,
              (long long)after);
}

TEST(harness, tmpdir_is_removed) {
    char *path, *end;
    CHECK_EQ_INT(probe("--filter=pass.tmpdir"), 0);
    path = strstr(output, "dir ");
    CHECK(path != NULL && (end = strchr(path, '\n')) != NULL);
    path += 4;
    *strchr(path, '\n') = 0;
    CHECK(access(path, F_OK) != 0);
    *strrchr(path, '/') = 0;
    CHECK(access(path, F_OK) != 0);
}

/* Known numbers of splitmix64, so that a seed means the same everywhere. */
TEST(harness, random_numbers) {
    uint64_t state = 0;
    CHECK(h_rand64(&state) == 0xe220a8397b1dcdafu);
    CHECK(h_rand64(&state) == 0x6e789e6aa1b965f4u);
}

TEST(harness, free_port) {
    int a = h_free_port();
    CHECK(a > 0 && a < 65536);
}

TEST(harness, near) {
    double inf;
    uint64_t bits = 0x7ff0000000000000u;
    memcpy(&inf, &bits, sizeof inf);
    CHECK_NEAR(inf, inf, 0);
    CHECK_NEAR(1, 1.25f, 0.25);
    CHECK_NEAR(-0.0, 0.0, 0);
}
