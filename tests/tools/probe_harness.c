/* probe_harness.c - tests that end in every way a test can; test_harness.c runs this program and
   reads its output. It is not a test itself.

   SPDX-License-Identifier: MIT */
#define TAGS GLOO | AT_NIGHT(TSAN) | SECONDS(50)
#include "harness.h"

static void fail_at(int rank, int world, void *arg) {
    printf("hello from %d\n", rank);
    usleep(100000); /* so that all have printed it */
    if (rank == *(int *)arg) CHECK_EQ_INT(rank + 10, world);
    if (rank != *(int *)arg) pause();
}

/* Dies of a signal, under sanitizers too. */
static void crash(void) {
    signal(SIGSEGV, SIG_DFL);
    raise(SIGSEGV);
}

static void crash_at(int rank, int world, void *arg) {
    (void)world;
    if (rank == *(int *)arg) crash();
    pause();
}

static void exit_at(int rank, int world, void *arg) {
    (void)world;
    if (rank == *(int *)arg) exit(0);
}

static void hang_at(int rank, int world, void *arg) {
    (void)world;
    printf("rank %d waits\n", rank);
    while (rank == *(int *)arg) pause();
}

static void skip_at(int rank, int world, void *arg) {
    (void)world;
    if (rank == *(int *)arg) SKIP("rank skips");
    pause();
}

static void die_at(int rank, int world, void *arg) {
    (void)world;
    if (rank == *(int *)arg) h_die(SIGKILL);
}

/* Rank 2 dies of a signal. Rank 0 sees that at the end of a pipe, and fails its own check. */
static void peer_of_crash(int rank, int world, void *arg) {
    const char *fifo = (const char *)arg;
    char c;
    (void)world;
    if (rank == 2 && open(fifo, O_WRONLY) >= 0) crash();
    if (rank == 0) CHECK_MSG(read(open(fifo, O_RDONLY), &c, 1) != 0, "a peer died");
    pause();
}

static void all_well(int rank, int world, void *arg) {
    __atomic_fetch_add((int *)arg, 1, __ATOMIC_SEQ_CST);
    CHECK(rank >= 0 && rank < world);
}

static void *fail_in_thread(void *arg) {
    CHECK_MSG(arg != NULL, "%s %d", "in a thread", 7);
    return arg;
}

/* Forks a grandchild that keeps a pipe open while it lives. */
static void leave_grandchild(void) {
    if (!fork()) {
        const char *fifo = getenv("PROBE_FIFO");
        int fd = open(fifo ? fifo : "/dev/null", O_WRONLY);
        if (write(fd, "alive", 5) == 5) pause();
        _exit(0);
    }
}

TEST(pass, plain) { puts("never shown"); }
TEST(pass, message) { h_message("%d cases", 12); }
TEST(pass, tmpdir) {
    char path[400];
    snprintf(path, sizeof path, "%s/file", h_tmpdir());
    h_message("dir %s", h_tmpdir());
    CHECK(open(path, O_CREAT | O_WRONLY, 0600) >= 0);
}
TEST(pass, ranks_proc) {
    int dies = 1;
    h_ranks_proc(3, die_at, &dies);
}
TEST(pass, ranks_thread) {
    int sum = 0;
    h_ranks_thread(4, all_well, &sum);
    CHECK_EQ_INT(sum, 4);
}
TEST(pass, seed) { h_message("seed %llu", (unsigned long long)h_seed()); }

TEST(fail, check) { CHECK(1 + 1 == 3); }
TEST(fail, integer) { CHECK_EQ_INT(-1, 0xffffffffu); }
TEST(fail, string) { CHECK_EQ_STR("a", NULL); }
TEST(fail, near) { CHECK_NEAR(1.0f, 1.5, 0.25); }
TEST(fail, not_a_number) {
    uint32_t bits = 0x7fc00000u;
    float x;
    memcpy(&x, &bits, sizeof x);
    CHECK_NEAR(x, x, 1e30);
}
TEST(fail, memory) { CHECK_EQ_MEM("abcd", "abxy", 4); }
TEST(fail, ok) { CHECK_OK(6 - 2); }
TEST(fail, status) { CHECK_STATUS(4, 3 + 2); }
TEST(fail, exit_code) { exit(3); }
TEST(fail, early_exit) { exit(0); }
TEST(fail, signal) { crash(); }
TEST(fail, thread) {
    pthread_t t;
    CHECK_EQ_INT(pthread_create(&t, NULL, fail_in_thread, NULL), 0);
    pthread_join(t, NULL);
}
TEST(fail, rank_proc) {
    int r = 2;
    h_ranks_proc(4, fail_at, &r);
}
TEST(fail, rank_thread) {
    int r = 3;
    h_ranks_thread(4, fail_at, &r);
}
TEST(fail, rank_signal) {
    int r = 1;
    h_ranks_proc(3, crash_at, &r);
}
TEST(fail, rank_exit) {
    int r = 1;
    h_ranks_proc(2, exit_at, &r);
}
TEST(fail, rank_culprit) {
    char fifo[400];
    snprintf(fifo, sizeof fifo, "%s/fifo", h_tmpdir());
    CHECK_EQ_INT(mkfifo(fifo, 0600), 0);
    h_ranks_proc(3, peer_of_crash, fifo);
}

TEST(slow, hang, SECONDS(0.2)) { for (;;) pause(); }
TEST(slow, rank_hang, SECONDS(0.3)) {
    int r = 1;
    h_ranks_proc(3, hang_at, &r);
}
TEST(slow, grandchild, SECONDS(0.3)) {
    leave_grandchild();
    for (;;) pause();
}
TEST(slow, interrupted) {
    kill(getppid(), SIGTERM);
    for (;;) pause();
}
TEST(tidy, grandchild) {
    leave_grandchild();
    usleep(100000);
}

TEST(skip, plain) { SKIP("no GPU"); }
TEST(skip, rank) {
    int r = 1;
    h_ranks_proc(3, skip_at, &r);
}

static const struct { const char *name; int value; } rows[] = {{"two", 2}, {"one", 1}};
TEST_P(table, row, rows) { CHECK_EQ_INT(row->value, 2); }

/* Each has other tags than its file. */
TEST(tags, of_the_file) {}
TEST(tags, slow, SLOW) {}
TEST(tags, tsan, TSAN) {}
TEST(tags, not_over_gloo, NO(GLOO)) {}
TEST(tags, gloo_at_night, AT_NIGHT(GLOO)) {}
TEST(tags, night, NIGHT | AT_NIGHT(NCCL)) {}
TEST(tags, not_over_shm, NO(SHM | TSAN) | STUB) {}
TEST(tags, many_ranks, MANY_RANKS | TSAN | BITS) {}
TEST_P(tags, row, rows, row->value > 1 ? NO(ASAN) | SLOW : AT_NIGHT(ASAN)) {}
