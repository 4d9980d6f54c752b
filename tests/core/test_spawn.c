/* test_spawn.c - fsdp_spawn: ranks as processes and as threads, their failures and their ends.

   SPDX-License-Identifier: MIT */
#define TAGS TSAN | GLOO
#include "harness.h"
#include "lab.h"

typedef struct {
    const char *name;
    int threads, ranks;
} mode;
static const mode modes[] = {{"processes/W=1", 0, 1}, {"processes/W=2", 0, 2},
                             {"processes/W=4", 0, 4}, {"threads/W=1", 1, 1},
                             {"threads/W=2", 1, 2},   {"threads/W=4", 1, 4}};
static const mode both[] = {{"processes", 0, 3}, {"threads", 1, 3}};

static int grace_ms = 600;

static fsdp_status spawn(const mode *m, fsdp_rank_fn fn, void *arg) {
    fsdp_world_desc world = FSDP_ZERO;
    fsdp_spawn_desc d = FSDP_ZERO;
    world.timeout_ms = 20000;
    d.num_ranks = m->ranks, d.threads = m->threads, d.world = &world, d.grace_ms = grace_ms;
    return fsdp_spawn(&d, fn, arg);
}

static void text_has(const char *part) {
    CHECK_MSG(strstr(fsdp_last_error(NULL), part), "\"%s\" does not say \"%s\"",
              fsdp_last_error(NULL), part);
}

/* Maps a shared integer. The harness's shared page cannot be used: processes are counted, too. */
static int *shared_int(void) {
    int *p = (int *)mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    CHECK(p != (int *)MAP_FAILED);
    return p;
}

static int sums(fsdp_world *world, void *arg) {
    double x = fsdp_rank(world) + 1;
    int n = fsdp_world_size(world);
    if (fsdp_all_reduce(world, NULL, &x, 1, FSDP_F64, FSDP_SUM)) return 100;
    if (h_non_finite(x) || (int)x != n * (n + 1) / 2) return 101;
    if (fsdp_local_rank(world) != fsdp_rank(world)) return 102;
    __atomic_fetch_add((int *)arg, 1 << 4 * fsdp_rank(world), __ATOMIC_SEQ_CST);
    return (int)fsdp_barrier(world);
}
TEST_P(spawn, every_rank_runs_once, modes, row->ranks > 3 ? MANY_RANKS : 0) {
    int *ran = shared_int();
    CHECK_OK(spawn(row, sums, ran));
    CHECK_EQ_INT(*ran, 0x1111 & ((1 << 4 * row->ranks) - 1));
    CHECK_OK(spawn(row, sums, ran)); /* again, in the same program */
}

static int own_status(fsdp_world *world, void *arg) {
    (void)arg;
    if (fsdp_rank(world) == 1) return FSDP_ERR_CORRUPT;
    return (int)fsdp_barrier(world); /* the other ranks wait for it */
}
TEST_P(spawn, a_status_comes_back, both) {
    int64_t start = h_calm_ms();
    CHECK_STATUS(spawn(row, own_status, NULL), FSDP_ERR_CORRUPT);
    text_has("rank 1: [E512] the rank's function returned 10");
    CHECK(h_calm_ms() - start < 2000);
}

static int other_value(fsdp_world *world, void *arg) {
    (void)arg;
    return fsdp_rank(world) == 2 ? -7 : (int)fsdp_barrier(world);
}
/* The other ranks' status has the reason, not that this rank has shut down. */
static int three(fsdp_world *world, void *arg) {
    if (fsdp_rank(world) == 1) return 3000;
    const fsdp_status status = fsdp_barrier(world);
    if (status == FSDP_ERR_ABORTED && strstr(fsdp_last_error(world), "returned 3000, expected 0"))
        __atomic_fetch_add((int *)arg, 1, __ATOMIC_SEQ_CST);
    return (int)status;
}
TEST(spawn, the_others_hear_what_was_returned) {
    const mode threads = {"threads", 1, 3};
    int heard = 0;
    CHECK_STATUS(spawn(&threads, three, &heard), FSDP_ERR_INTERNAL);
    CHECK_EQ_INT(heard, 2);
}

TEST_P(spawn, another_value_is_internal, both) {
    CHECK_STATUS(spawn(row, other_value, NULL), FSDP_ERR_INTERNAL);
    text_has("rank 2: [E512] the rank's function returned -7");
}

static int library_failure(fsdp_world *world, void *arg) {
    float x = 0;
    (void)arg;
    if (fsdp_rank(world) == 1) return (int)fsdp_all_reduce(world, NULL, &x, 1, FSDP_U8, FSDP_SUM);
    return (int)fsdp_barrier(world);
}
TEST_P(spawn, the_text_of_the_library_comes_back, both) {
    CHECK_STATUS(spawn(row, library_failure, NULL), FSDP_ERR_INVALID_ARG);
    text_has("rank 1: ");
    text_has("u8");
}

static int overlooks(fsdp_world *world, void *arg) {
    (void)arg;
    if (fsdp_rank(world) == 0) fsdp_abort(world, "enough");
    (void)fsdp_barrier(world);
    return 0;
}
TEST_P(spawn, an_aborted_world_is_a_failure_even_if_the_function_says_0, both) {
    CHECK_STATUS(spawn(row, overlooks, NULL), FSDP_ERR_ABORTED);
    text_has("enough");
}

static int killed(fsdp_world *world, void *arg) {
    (void)arg;
    if (fsdp_rank(world) == 1) raise(SIGKILL);
    return (int)fsdp_barrier(world);
}
TEST(spawn, a_killed_process_is_named) {
    int64_t start = h_calm_ms();
    CHECK_STATUS(spawn(&both[0], killed, NULL), FSDP_ERR_PEER_LOST);
    text_has("rank 1 was killed by signal 9");
    CHECK(h_calm_ms() - start < 2000);
    CHECK_EQ_INT(waitpid(-1, NULL, WNOHANG), -1); /* no child is left, not even a zombie */
}

static int leaves(fsdp_world *world, void *arg) {
    (void)arg;
    if (fsdp_rank(world) == 2) exit(3);
    return (int)fsdp_barrier(world);
}
TEST(spawn, a_process_that_exits_is_named) {
    CHECK_STATUS(spawn(&both[0], leaves, NULL), FSDP_ERR_PEER_LOST);
    text_has("rank 2 ended with exit code 3 inside its function");
}

static int computes_on(fsdp_world *world, void *arg) {
    if (fsdp_rank(world) == 0) return FSDP_ERR_IO;
    if (*(int *)arg) signal(SIGTERM, SIG_IGN);
    while (pause() < 0) {
    } /* in no collective: the library cannot reach it */
    return 0;
}
TEST(spawn, who_computes_on_is_terminated) {
    grace_ms = 1600; /* terminated after half of it */
    int ignore = 0;
    int64_t start = h_now_ms(), calm = h_calm_ms();
    CHECK_STATUS(spawn(&both[0], computes_on, &ignore), FSDP_ERR_IO);
    CHECK(h_now_ms() - start >= 800 && h_calm_ms() - calm < 1550);
    CHECK_EQ_INT(waitpid(-1, NULL, WNOHANG), -1);
}
TEST(spawn, who_ignores_that_is_killed) {
    int ignore = 1;
    int64_t start = h_now_ms(), calm = h_calm_ms();
    CHECK_STATUS(spawn(&both[0], computes_on, &ignore), FSDP_ERR_IO);
    CHECK(h_now_ms() - start >= 600 && h_calm_ms() - calm < 2000);
}

static int tells_pid(fsdp_world *world, void *arg) {
    __atomic_store_n((int *)arg + fsdp_rank(world), (int)getpid(), __ATOMIC_SEQ_CST);
    while (pause() < 0) {
    }
    return 0;
}
TEST(spawn, ranks_die_with_their_parent) {
    int *pids = shared_int();
    pid_t parent = fork();
    CHECK(parent >= 0);
    if (parent == 0) _exit((int)spawn(&both[0], tells_pid, pids));
    for (int k = 0; k < 3; k++)
        while (!__atomic_load_n(&pids[k], __ATOMIC_SEQ_CST)) usleep(1000);
    kill(parent, SIGKILL);
    CHECK_EQ_INT(waitpid(parent, NULL, 0), parent);
    for (int k = 0, waited = 0; k < 3; k++)
        for (;; waited++, usleep(1000)) { /* the process that adopts them reaps them */
            char path[64], state = 'X';
            snprintf(path, sizeof path, "/proc/%d/stat", pids[k]);
            FILE *f = fopen(path, "r");
            if (f && fscanf(f, "%*d (%*[^)]) %c", &state) != 1) state = 'X';
            if (f) fclose(f);
            if (state == 'X' || state == 'Z') break;
            CHECK_MSG(waited < 1000, "process %d is alive: %c", pids[k], state);
        }
}

static int prints(fsdp_world *world, void *arg) {
    (void)arg;
    printf("r%d\n", fsdp_rank(world));
    return 0;
}
TEST(spawn, output_comes_once) {
    char path[400], text[256];
    size_t length;
    snprintf(path, sizeof path, "%s/out", h_tmpdir());
    fflush(stdout);
    int saved = dup(STDOUT_FILENO), file = open(path, O_CREAT | O_RDWR, 0600);
    dup2(file, STDOUT_FILENO);
    setvbuf(stdout, NULL, _IOFBF, 4096);
    printf("before\n"); /* still buffered when the ranks are forked */
    CHECK_OK(spawn(&both[0], prints, NULL));
    fflush(stdout);
    dup2(saved, STDOUT_FILENO);
    length = (size_t)pread(file, text, sizeof text - 1, 0);
    text[length] = 0;
    CHECK_EQ_INT(length, strlen("before\nr0\nr1\nr2\n"));
    CHECK(strstr(text, "before\n") == text && strstr(text, "r0\n") && strstr(text, "r1\n") &&
          strstr(text, "r2\n"));
}

static int nothing(fsdp_world *world, void *arg) {
    (void)world, (void)arg;
    return 0;
}

/* With closed descriptors the report comes back, and ranks can write to descriptors 0 to 2. */
static int prints_where_nobody_listens(fsdp_world *world, void *arg) {
    struct stat st;
    (void)arg;
    for (int fd = 0; fd < 3; fd++)
        if (fstat(fd, &st) || !S_ISCHR(st.st_mode) || write(fd, "step 1\n", 7) != 7)
            return 100 + fd;
    return fsdp_rank(world) == 1 ? FSDP_ERR_CORRUPT : (int)fsdp_barrier(world);
}
static const struct {
    const char *name;
    int first;
} open_ones[] = {{"none", 0}, {"stdin", 1}, {"all_but_stderr", 2}};
TEST_P(spawn, with_closed_descriptors, open_ones) {
    const pid_t program = fork();
    int how;
    CHECK(program >= 0);
    if (program == 0) {
        const int null = open("/dev/null", O_RDWR);
        for (int fd = 0; fd < 3; fd++) fd < row->first ? dup2(null, fd) : close(fd);
        close(null);
        const fsdp_status status = spawn(&both[0], prints_where_nobody_listens, NULL);
        const int named = strstr(fsdp_last_error(NULL), "rank 1: [E512] the rank's function") !=
                          NULL;
        for (int fd = row->first; fd < 3; fd++) /* the program's own descriptors stay closed */
            if (fcntl(fd, F_GETFD) >= 0) _exit(50 + fd);
        _exit(named ? (int)status : 90);
    }
    CHECK_EQ_INT(waitpid(program, &how, 0), program);
    CHECK_MSG(how == FSDP_ERR_CORRUPT << 8, "%#x", how);
}

/* A program writes to descriptors that it has not opened, the report pipe among them. */
static int writes_junk(fsdp_world *world, void *arg) {
    char junk[1032]; /* size of a report */
    struct stat st;
    memset(junk, *(const int *)arg, sizeof junk);
    for (int fd = 3; fd < 100 && fsdp_rank(world) == 0; fd++)
        if (!fstat(fd, &st) && S_ISFIFO(st.st_mode)) {
            const ssize_t done = write(fd, junk, sizeof junk);
            (void)done;
        }
    return (int)fsdp_barrier(world);
}
TEST(spawn, what_comes_out_of_the_pipe_is_checked) {
    static const int bytes[] = {0x7f, 0x80, 0xff};
    for (int i = 0; i < 3; i++)
        CHECK_OK(spawn(&both[0], writes_junk, (void *)(uintptr_t)&bytes[i]));
}
TEST(spawn, bad_requests_are_refused) {
    fsdp_spawn_desc d = FSDP_ZERO;
    CHECK_STATUS(fsdp_spawn(&d, nothing, NULL), FSDP_ERR_INVALID_ARG);
    text_has("num_ranks is 0");
    d.num_ranks = 257;
    CHECK_STATUS(fsdp_spawn(&d, nothing, NULL), FSDP_ERR_INVALID_ARG);
    text_has("num_ranks is 257");
    text_has("from 1 to 256");
    d.num_ranks = 2;
    CHECK_STATUS(fsdp_spawn(&d, NULL, NULL), FSDP_ERR_INVALID_ARG);
    d.grace_ms = -1;
    CHECK_STATUS(fsdp_spawn(&d, nothing, NULL), FSDP_ERR_INVALID_ARG);
    d.grace_ms = 0;
    d.end_canary = 1;
    CHECK_STATUS(fsdp_spawn(&d, nothing, NULL), FSDP_ERR_INVALID_ARG);
    text_has("canary");
}

/* A world that cannot be opened fails on every rank; one text comes back. */
TEST_P(spawn, a_bad_world_is_refused, both) {
    fsdp_world_desc world = FSDP_ZERO;
    fsdp_spawn_desc d = FSDP_ZERO;
    world.backend = "carrier pigeon";
    d.num_ranks = 2, d.threads = row->threads, d.world = &world;
    CHECK_STATUS(fsdp_spawn(&d, nothing, NULL), FSDP_ERR_UNSUPPORTED);
    text_has("carrier pigeon");
}

static int inner(fsdp_world *world, void *arg) { return (int)fsdp_barrier(world) + *(int *)arg; }
static int outer(fsdp_world *world, void *arg) {
    fsdp_spawn_desc d = FSDP_ZERO;
    d.num_ranks = 2, d.threads = 1;
    int value = (int)fsdp_spawn(&d, inner, arg);
    return value ? value : (int)fsdp_barrier(world);
}
TEST_P(spawn, jobs_nest, both) {
    int zero = 0;
    CHECK_OK(spawn(row, outer, &zero));
}

static void *spawn_main(void *arg) {
    const mode two = {"threads", 1, 2};
    for (int i = 0; i < 10; i++) CHECK_OK(spawn(&two, inner, arg));
    return NULL;
}
TEST(spawn, threads_may_spawn_at_once) {
    pthread_t t[2];
    int zero = 0;
    for (int i = 0; i < 2; i++) CHECK_EQ_INT(pthread_create(&t[i], NULL, spawn_main, &zero), 0);
    for (int i = 0; i < 2; i++) pthread_join(t[i], NULL);
}
