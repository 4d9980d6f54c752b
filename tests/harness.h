/* harness.h - the framework of all tests: each test is its own process, ranks are processes or
   threads, and the output is GoogleTest's. C99 and C++11, POSIX. Include it first, in one file:

       #include "harness.h"
       TEST(dtype, size) { CHECK_EQ_INT(fsdp_dtype_size(FSDP_F16), 2); }

       static const struct { const char *name; int world; } sizes[] = {{"W=1", 1}, {"W=3", 3}};
       static void body(int rank, int world, void *arg) { ... CHECK(...) ... }
       TEST_P(gather, ranks, sizes) { h_ranks_proc(row->world, body, NULL); }

   A program: TEST  TEST_P; main() comes with the header.
   Tags (H_TAG_LIST) name the variants in which a test runs, and SECONDS its timeout. They follow
   the test's name; for all tests of a file they precede this header. In a TEST_P they may use `row`:
       #define TAGS GLOO
       TEST(mesh, random, SLOW | SECONDS(300)) { ... }
       TEST_P(gather, ranks, sizes, row->world > 8 ? AT_NIGHT(GLOO) : 0) { ... }
   A test without tags runs over shared memory, and again with the address sanitizer.
   In a test: CHECK  CHECK_MSG  CHECK_EQ_INT  CHECK_EQ_STR  CHECK_EQ_MEM  CHECK_NEAR  CHECK_OK
              CHECK_STATUS  SKIP  h_message  h_tmpdir  h_free_port  h_seed  h_rand64  h_now_ms
              h_calm_ms  h_entries
   Ranks:     h_ranks_proc  h_ranks_thread  h_mark  h_await_marks  h_die
   A failed check prints and ends its process at once, so it is valid in any thread and any child.

   Options: --filter=A:-B  names with A (a glob if it has * or ?), without B; --tags=A:-B  tests
            with the tag A, without B; night.A: those with AT_NIGHT(A); --list; --seed=N; --tap;
            --repeat=N; --timeout-mult=X (also the environment's TEST_TIMEOUT_MULT).
   Exit status: 0 if something ran and nothing failed, otherwise 1.

   SPDX-License-Identifier: MIT */
#ifndef HARNESS_H
#define HARNESS_H
#ifndef _GNU_SOURCE
#define _GNU_SOURCE 1 /* the POSIX calls under -std=c99 too */
#endif
#include <arpa/inet.h>  /* htonl, ntohs */
#include <dirent.h>     /* opendir */
#include <errno.h>      /* errno */
#include <fcntl.h>      /* open */
#include <fnmatch.h>    /* fnmatch */
#include <ftw.h>        /* nftw */
#include <netinet/in.h> /* sockaddr_in */
#include <pthread.h>    /* pthread_create, pthread_join */
#include <signal.h>     /* kill, raise, signal, sigtimedwait */
#include <stdarg.h>     /* va_list */
#include <stdint.h>     /* int64_t, uint64_t */
#include <stdio.h>      /* printf, tmpfile */
#include <stdlib.h>     /* calloc, exit, qsort, strtod, strtoull */
#include <string.h>     /* memcpy, strcmp, strsignal, strstr */
#include <sys/mman.h>   /* mmap */
#include <sys/socket.h> /* bind, getsockname, socket */
#include <sys/stat.h>   /* mkdir */
#include <sys/wait.h>   /* waitid, waitpid */
#include <time.h>       /* clock_gettime, nanosleep */
#include <unistd.h>     /* fork, dup2, setpgid, write, _exit */

#define H_FN           static __attribute__((unused))
#define H_PRINTF(a, b) __attribute__((format(printf, a, b)))
#define H_TIMEOUT_S    60 /* default timeout of a test, in seconds */
enum { H_EXIT_FAILED = 1, H_EXIT_SKIPPED = 77, H_EXIT_TIMEOUT = 78 };
enum { H_RANKS_MAX = 512, H_TEXT_MAX = 1024, H_NOTES_MAX = 8192 };
enum { H_RUNNING, H_RETURNED, H_DIES }; /* states of a process of the test */

/* The state that a test's processes share with the runner; one shared mapping, cleared for each
   test. */
typedef struct {
    int first;                   /* 1 + the rank whose check failed first */
    int notes_length;            /* claimed bytes of notes */
    char notes[H_NOTES_MAX];     /* lines of h_message */
    char skip[H_TEXT_MAX];       /* reason */
    char state[H_RANKS_MAX + 1]; /* the test's state, then each rank's */
    int marks[8];                /* number of arrivals at each place: h_mark */
} h_board;

/* A test's tags, tags for make nightly only, refused tags, and timeout. The table tests/variants
   selects tests by tags; SLOW and MANY_RANKS do not occur in it. */
typedef uint64_t h_tags;
#define H_TAG_LIST(X)                                                                              \
    X(SLOW, "slow") /* left out by make quick */                                                   \
    X(MANY_RANKS, "many_ranks") /* more ranks than three, which already show all cases: SLOW,      \
                       and with ASAN, TSAN, BITS, STUB_TSAN at night only */                       \
    X(SHM, "shm")   /* over shared memory: each test without NO(SHM) */                            \
    X(ASAN, "asan") /* SHM with the address sanitizer: each test without NO(ASAN) */               \
    X(TSAN, "tsan") /* SHM with the thread sanitizer: code in our threads */                       \
    X(BITS, "bits") /* SHM with -Ofast: bits that no compiler option may change */                 \
    X(VALGRIND, "valgrind")                                                                        \
    X(GLOO, "gloo") /* over Gloo: several ranks on a real backend */                               \
    X(GLOO_ASAN, "gloo_asan")                                                                      \
    X(GLOO_TSAN, "gloo_tsan")                                                                      \
    X(NCCL, "nccl") /* over NCCL: on its stand-in, and on a GPU */                                 \
    X(ONE_GPU, "one_gpu") /* over NCCL on its stand-in, by ranks that share a GPU */               \
    X(STUB, "stub") /* built with the stand-ins for CUDA and NCCL */                               \
    X(STUB_ASAN, "stub_asan")                                                                      \
    X(STUB_TSAN, "stub_tsan")                                                                      \
    X(GPU, "gpu") /* built for a GPU, for make gpu-test */
#define H_ONE(name, word) H_##name##_AT,
enum { H_TAG_LIST(H_ONE) H_NUM_TAGS };
#undef H_ONE
#define H_ONE(name, word)                                                                          \
    static const h_tags name __attribute__((unused)) = (h_tags)1 << H_##name##_AT;
H_TAG_LIST(H_ONE)
#undef H_ONE
#define AT_NIGHT(tags) ((h_tags)(tags) << 16)     /* these only in make nightly */
#define NO(tags)       ((h_tags)(tags) << 32)     /* none of these */
#define SECONDS(n)     ((h_tags)((n) * 10) << 48) /* timeout; default: H_TIMEOUT_S */
#define NIGHT          (AT_NIGHT(SHM) | NO(0xffff)) /* in make nightly, and in no other variant */
#ifndef TAGS
#define TAGS 0
#endif

typedef struct {
    const char *name;
    void (*run)(size_t row);
    size_t row;
    double seconds;
    h_tags day, night;
} h_test;

static h_test *h_tests;
static int h_test_count;
static h_board *h_shared;
static uint64_t h_seed_value = 1;
static int64_t h_start_ms, h_start_calm_ms, h_limit_ms; /* of this test */
static char h_base[256], h_dir[320]; /* temporary directory of the run, and of this test */
static const char *h_filter = "", *h_tag_filter = "", *h_program = "";
static int h_tap;
static volatile sig_atomic_t h_signal;
static __thread int h_rank = -1; /* rank of this process or thread */
static __thread int h_is_thread;

/* ---- time, random numbers, places ------------------------------------------------------------ */

H_FN int64_t h_now_ms(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (int64_t)t.tv_sec * 1000 + t.tv_nsec / 1000000;
}

/* Returns the time since boot in which this machine had more to run than cores, or its host
   withheld cores. If the kernel does not report it: 95 % of the time. If it does so at first, but
   cannot be read now: as if all time since then were such. */
H_FN int64_t h_stalled_ms(void) {
    static __thread int64_t last, last_at;
    static __thread int reported = 1;
    FILE *f = fopen("/proc/pressure/cpu", "r"), *g = fopen("/proc/stat", "r");
    long long us = 0, stolen = 0;
    const int told = f && fscanf(f, "some %*s %*s %*s total=%lld", &us) == 1 && g &&
                     fscanf(g, "cpu %*s %*s %*s %*s %*s %*s %*s %lld", &stolen) == 1;
    const int64_t now = h_now_ms();
    if (f) fclose(f);
    if (g) fclose(g);
    if (!last_at) reported = told;
    if (!reported) last = now / 20 * 19;
    else if (told) last = us / 1000 + stolen * 1000 / sysconf(_SC_CLK_TCK);
    else last += now - last_at;
    last_at = now;
    return last;
}

/* Returns a clock that stands still while the machine is overloaded. Measure upper bounds of
   time with it, so that a busy machine fails no test, and lower bounds with h_now_ms. */
H_FN int64_t h_calm_ms(void) { return h_now_ms() - h_stalled_ms(); }

/* Returns 1 if this test has had its time and `more` ms: of the calm clock, or ten times as much. */
H_FN int h_is_over(int more) {
    const int64_t limit = h_limit_ms + more, took = h_now_ms() - h_start_ms;
    return took > limit && (took > 10 * limit || h_calm_ms() - h_start_calm_ms > limit);
}

/* Sleeps 0.1 ms at first, then longer, up to 3 ms. */
H_FN void h_nap(long *ns) {
    struct timespec t = {0, 0};
    *ns = *ns < 50000 ? 100000 : *ns > 1500000 ? 3000000 : *ns * 2;
    t.tv_nsec = *ns;
    nanosleep(&t, NULL);
}

/* The end of a child process wakes its parent, which does not look again and again. h_hold_ends
   blocks SIGCHLD before the fork, so that none is missed, and h_child releases it. h_await_end
   returns at the next signal, or after 20 ms: another thread may have received the signal. */
static sigset_t h_released; /* the signal mask before h_hold_ends */
H_FN void h_hold_ends(void) {
    sigset_t held;
    sigemptyset(&held);
    sigaddset(&held, SIGCHLD);
    pthread_sigmask(SIG_BLOCK, &held, &h_released);
}
H_FN void h_release_ends(void) { pthread_sigmask(SIG_SETMASK, &h_released, NULL); }
H_FN void h_await_end(void) {
    const struct timespec most = {0, 20000000};
    sigset_t held;
    sigemptyset(&held);
    sigaddset(&held, SIGCHLD);
    sigtimedwait(&held, NULL, &most);
}

/* Ranks of a test, threads or processes, note and await arrivals at a place. A test that needs
   an order waits for these; a sleep only makes an order likely. */
H_FN void h_mark(int place) { __atomic_add_fetch(&h_shared->marks[place], 1, __ATOMIC_SEQ_CST); }
H_FN void h_await_marks(int place, int count) {
    long ns = 0;
    while (__atomic_load_n(&h_shared->marks[place], __ATOMIC_SEQ_CST) < count) h_nap(&ns);
}

H_FN uint64_t h_seed(void) { return h_seed_value; }

/* splitmix64 */
H_FN uint64_t h_rand64(uint64_t *state) {
    uint64_t z = (*state += 0x9e3779b97f4a7c15u);
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
}

/* Returns the directory of this test, which is removed after it; the same one for all its ranks. */
H_FN const char *h_tmpdir(void) {
    if (mkdir(h_dir, 0700) && errno != EEXIST) perror(h_dir);
    return h_dir;
}

/* Returns a TCP port of the loopback interface that was free a moment ago; 0 if there is none.
   It is below the ports that the system assigns, where another socket might listen. */
H_FN int h_free_port(void) {
    static unsigned next;
    for (int tries = 0; tries < 1000; tries++) {
        struct sockaddr_in a;
        unsigned port = 10000 + ((unsigned)getpid() * 61 + 17 * next++) % 20000;
        int fd = socket(AF_INET, SOCK_STREAM, 0);
        memset(&a, 0, sizeof a);
        a.sin_family = AF_INET;
        a.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
        a.sin_port = htons((uint16_t)port);
        int is_free = fd >= 0 && !bind(fd, (struct sockaddr *)&a, sizeof a);
        if (fd >= 0) close(fd);
        if (is_free) return (int)port;
    }
    return 0;
}

/* ---- output of a test ------------------------------------------------------------------------ */

/* Writes the whole text at once, so that lines of ranks do not mix. */
H_FN void h_write(const char *text, int length) {
    ssize_t done = length > 0 ? write(STDERR_FILENO, text, (size_t)length) : 0;
    (void)done;
}

/* Prints the place and the reason, and ends the process. If several threads fail, only the first
   one prints. */
H_FN H_PRINTF(4, 5)
    __attribute__((noreturn)) void h_fail(const char *file, int line, const char *what,
                                          const char *format, ...) {
    static int failing;
    char text[2 * H_TEXT_MAX];
    int none = 0, length = 0, room = (int)sizeof text - 2;
    va_list args;
    while (__atomic_exchange_n(&failing, 1, __ATOMIC_SEQ_CST)) pause();
    __atomic_compare_exchange_n(&h_shared->first, &none, h_rank + 1, 0, __ATOMIC_SEQ_CST,
                                __ATOMIC_SEQ_CST);
    if (h_is_thread) length += snprintf(text, (size_t)room, "r%d|", h_rank);
    length += snprintf(text + length, (size_t)(room - length), "%s:%d: ", file, line);
    if (h_rank >= 0 && length < room)
        length += snprintf(text + length, (size_t)(room - length), "rank %d: ", h_rank);
    if (length < room) length += snprintf(text + length, (size_t)(room - length), "%s: ", what);
    va_start(args, format);
    if (length < room) length += vsnprintf(text + length, (size_t)(room - length), format, args);
    va_end(args);
    if (length > room) length = room;
    text[length++] = '\n';
    h_write(text, length);
    _exit(H_EXIT_FAILED);
}

/* Notes a line that is shown even if the test passes: a number of cases, a measured figure. */
H_FN H_PRINTF(1, 2) void h_message(const char *format, ...) {
    char text[H_TEXT_MAX];
    int length, at;
    va_list args;
    va_start(args, format);
    length = vsnprintf(text, sizeof text - 1, format, args);
    va_end(args);
    if (length < 0) return;
    if (length > (int)sizeof text - 2) length = (int)sizeof text - 2;
    text[length++] = '\n';
    at = __atomic_fetch_add(&h_shared->notes_length, length, __ATOMIC_SEQ_CST);
    if (at + length < H_NOTES_MAX) memcpy(h_shared->notes + at, text, (size_t)length);
}

/* Ends the test as skipped; the output has the reason. */
H_FN __attribute__((noreturn)) void h_skip(const char *reason) {
    snprintf(h_shared->skip, sizeof h_shared->skip, "%s", reason);
    _exit(H_EXIT_SKIPPED);
}

/* For tests of failures: this rank (a process) dies by the signal, which fails no test. */
H_FN __attribute__((noreturn)) void h_die(int sig) {
    h_shared->state[h_rank + 1] = H_DIES;
    signal(sig, SIG_DFL);
    raise(sig);
    _exit(H_EXIT_FAILED);
}

H_FN void h_check_int(const char *file, int line, const char *what, long long a, long long b) {
    if (a != b) h_fail(file, line, what, "%lld != %lld", a, b);
}

H_FN void h_check_str(const char *file, int line, const char *what, const char *a, const char *b) {
    if (a == b || (a && b && !strcmp(a, b))) return;
    h_fail(file, line, what, "\"%s\" != \"%s\"", a ? a : "(null)", b ? b : "(null)");
}

/* Returns 0 if x is finite, 1 if infinite, 2 if NaN; from the bits, so that it works with
   -Ofast. */
H_FN int h_non_finite(double x) {
    uint64_t bits;
    memcpy(&bits, &x, sizeof bits);
    bits &= 0x7fffffffffffffffu;
    return bits < 0x7ff0000000000000u ? 0 : bits == 0x7ff0000000000000u ? 1 : 2;
}

H_FN void h_check_near(const char *file, int line, const char *what, double a, double b,
                       double tolerance) {
    int ok = !memcmp(&a, &b, sizeof a) && h_non_finite(a) < 2;
    if (!h_non_finite(a) && !h_non_finite(b)) ok = (a > b ? a - b : b - a) <= tolerance;
    if (!ok) h_fail(file, line, what, "%.17g and %.17g, within %g", a, b, tolerance);
}

H_FN void h_check_mem(const char *file, int line, const char *what, const void *a, const void *b,
                      size_t nbytes) {
    const unsigned char *x = (const unsigned char *)a, *y = (const unsigned char *)b;
    size_t i = 0, different = 0, k;
    if (!nbytes || !memcmp(a, b, nbytes)) return;
    while (x[i] == y[i]) i++;
    for (k = i; k < nbytes; k++) different += x[k] != y[k];
    h_fail(file, line, what, "%zu of %zu bytes differ, first at %zu: 0x%02x != 0x%02x", different,
           nbytes, i, x[i], y[i]);
}

H_FN void h_check_status(const char *file, int line, const char *what, int got, int expected) {
    if (got != expected) h_fail(file, line, what, "status %d, expected %d", got, expected);
}

#define H_HERE(what) __FILE__, __LINE__, what
#define CHECK(cond)                                                                                \
    do {                                                                                           \
        if (!(cond)) h_fail(H_HERE("CHECK(" #cond ")"), "is false");                               \
    } while (0)
#define CHECK_MSG(cond, ...) /* ... is a format and its values */                                  \
    do {                                                                                           \
        if (!(cond)) h_fail(H_HERE("CHECK(" #cond ")"), __VA_ARGS__);                              \
    } while (0)
#define CHECK_EQ_INT(a, b)                                                                         \
    h_check_int(H_HERE("CHECK_EQ_INT(" #a ", " #b ")"), (long long)(a), (long long)(b))
#define CHECK_EQ_STR(a, b)          h_check_str(H_HERE("CHECK_EQ_STR(" #a ", " #b ")"), a, b)
#define CHECK_EQ_MEM(a, b, nbytes)  h_check_mem(H_HERE("CHECK_EQ_MEM(" #a ", " #b ")"), a, b, nbytes)
#define CHECK_NEAR(a, b, tolerance) /* absolute */                                                 \
    h_check_near(H_HERE("CHECK_NEAR(" #a ", " #b ")"), (double)(a), (double)(b),                   \
                 (double)(tolerance))
#define CHECK_OK(status) h_check_status(H_HERE("CHECK_OK(" #status ")"), (int)(status), 0)
#define CHECK_STATUS(status, expected)                                                             \
    h_check_status(H_HERE("CHECK_STATUS(" #status ", " #expected ")"), (int)(status),              \
                   (int)(expected))
#define SKIP(reason) h_skip(reason)

/* Returns the number of entries of a directory, with "." and ".."; of /proc/self/fd: the number
   of descriptors, and one more. */
H_FN int h_entries(const char *path) {
    DIR *dir = opendir(path);
    int n = 0;
    CHECK_MSG(dir != NULL, "%s", path);
    while (readdir(dir)) n++;
    closedir(dir);
    return n;
}

/* ---- ranks ----------------------------------------------------------------------------------- */

typedef void (*h_rank_fn)(int rank, int world, void *arg);
typedef struct {
    int rank, world;
    h_rank_fn fn;
    void *arg;
} h_thread;

H_FN void *h_thread_main(void *p) {
    h_thread *t = (h_thread *)p;
    h_rank = t->rank;
    h_is_thread = 1;
    t->fn(t->rank, t->world, t->arg);
    return NULL;
}

/* Runs fn on every rank, each a thread of this process. */
H_FN void h_ranks_thread(int world, h_rank_fn fn, void *arg) {
    h_thread *t = (h_thread *)calloc((size_t)world, sizeof *t);
    pthread_t *id = (pthread_t *)calloc((size_t)world, sizeof *id);
    int r;
    CHECK(t && id);
    for (r = 0; r < world; r++) {
        t[r].rank = r, t[r].world = world, t[r].fn = fn, t[r].arg = arg;
        CHECK_EQ_INT(pthread_create(&id[r], NULL, h_thread_main, &t[r]), 0);
    }
    for (r = 0; r < world; r++) pthread_join(id[r], NULL);
    free(t);
    free(id);
}

/* Ranks that share a GPU (tools/one_gpu.sh) must look like separate hosts: sets another name for
   each. */
H_FN void h_seem_a_host(int rank) {
    char host[128];
    if (!getenv("NCCL_HOSTID")) return;
    snprintf(host, sizeof host, "%s%d", getenv("NCCL_HOSTID"), rank);
    setenv("NCCL_HOSTID", host, 1);
}

/* Runs the body in a new process: output goes to the file, there is no input, and the runner
   learns that the body has returned. */
H_FN void h_child(FILE *log, int rank, void (*body)(size_t), size_t row, h_rank_fn fn, int world,
                  void *arg) {
    int null = open("/dev/null", O_RDONLY);
    h_release_ends();
    h_rank = rank;
    if (rank >= 0) h_seem_a_host(rank);
    dup2(null, STDIN_FILENO);
    dup2(fileno(log), STDOUT_FILENO);
    dup2(fileno(log), STDERR_FILENO);
    close(null);
    setvbuf(stdout, NULL, _IOLBF, 0);
    if (body) body(row);
    else fn(rank, world, arg);
    h_shared->state[rank + 1] = H_RETURNED;
    exit(0); /* not _exit: leak checkers and coverage end their work here */
}

/* Copies the file, and puts the prefix before each line. */
H_FN void h_dump(FILE *log, FILE *to, const char *prefix) {
    int c, at_start = 1;
    rewind(log);
    while ((c = fgetc(log)) != EOF) {
        if (at_start) fputs(prefix, to);
        fputc(c, to);
        at_start = c == '\n';
    }
    if (!at_start) fputc('\n', to);
    fclose(log);
}

/* Returns a text that says why a process ended wrongly; NULL: it did not. */
H_FN const char *h_why_failed(int status, int state, char *text, size_t size) {
    if (state == H_DIES) return NULL;
    if (WIFSIGNALED(status))
        snprintf(text, size, "signal %d (%s)", WTERMSIG(status), strsignal(WTERMSIG(status)));
    else if (WEXITSTATUS(status)) snprintf(text, size, "exit code %d", WEXITSTATUS(status));
    else if (state != H_RETURNED) snprintf(text, size, "exit(0) before the end of the test");
    else return NULL;
    return text;
}

/* Reaps ranks that have ended, until one is bad, all are done or time is up. Returns the
   culprit: a rank that died without a failed check, otherwise the rank whose check failed first,
   otherwise the first bad one seen; -1: none. As a failed check may follow from a death that is
   not visible yet, it looks once more. */
H_FN int h_ranks_wait(int world, pid_t *pid, int *status) {
    int culprit = -1, hard = 0, left = world, looks = 2, r;
    char text[H_TEXT_MAX];
    while (left && !hard && looks && !h_is_over(0)) {
        for (r = left = 0; r < world; r++) {
            if (!pid[r]) continue;
            if (waitpid(pid[r], &status[r], WNOHANG) != pid[r]) {
                left++;
                continue;
            }
            pid[r] = 0;
            if (!h_why_failed(status[r], h_shared->state[r + 1], text, sizeof text)) continue;
            if (culprit < 0 || (!hard && WIFSIGNALED(status[r]))) culprit = r;
            hard = hard || WIFSIGNALED(status[r]);
        }
        if (culprit >= 0) looks--;
        if (culprit >= 0 && looks) usleep(20000);
        else if (left && !hard) h_await_end();
    }
    r = __atomic_load_n(&h_shared->first, __ATOMIC_SEQ_CST) - 1;
    if (culprit >= 0 && !hard && r >= 0 && WEXITSTATUS(status[culprit]) == H_EXIT_FAILED)
        culprit = r;
    return culprit;
}

/* Runs fn on every rank, each a process. The first bad end ends all ranks, and the test. */
H_FN void h_ranks_proc_at(const char *file, int line, int world, h_rank_fn fn, void *arg) {
    pid_t *pid = (pid_t *)calloc((size_t)world, sizeof *pid);
    int *status = (int *)calloc((size_t)world, sizeof *status);
    FILE **log = (FILE **)calloc((size_t)world, sizeof *log);
    char text[H_TEXT_MAX], prefix[16], late[H_TEXT_MAX] = "";
    int r, culprit, length = 0;
    CHECK(pid && status && log && world <= H_RANKS_MAX);
    memset(h_shared->state + 1, H_RUNNING, H_RANKS_MAX);
    fflush(NULL);
    h_hold_ends();
    for (r = 0; r < world; r++) {
        CHECK((log[r] = tmpfile()) != NULL);
        CHECK((pid[r] = fork()) >= 0);
        if (!pid[r]) h_child(log[r], r, NULL, 0, fn, world, arg);
    }
    culprit = h_ranks_wait(world, pid, status);
    h_release_ends();
    for (r = 0; r < world; r++) {
        if (!pid[r] || r == culprit) continue;
        length += snprintf(late + length, sizeof late - (size_t)length, " %d", r);
        if (length > H_TEXT_MAX - 16) length = H_TEXT_MAX - 16;
        kill(pid[r], SIGKILL);
    }
    for (r = 0; r < world; r++)
        if (pid[r]) waitpid(pid[r], &status[r], 0);
    for (r = 0; r <= world; r++) { /* the culprit's output comes last */
        int who = r < world ? r : culprit;
        if (who < 0 || (who == culprit && r < world)) continue;
        snprintf(prefix, sizeof prefix, "r%d|", who);
        h_dump(log[who], stderr, prefix);
    }
    if (culprit >= 0) {
        if (WIFEXITED(status[culprit]) && WEXITSTATUS(status[culprit]) == H_EXIT_SKIPPED)
            _exit(H_EXIT_SKIPPED);
        h_why_failed(status[culprit], h_shared->state[culprit + 1], text, sizeof text);
        h_fail(file, line, "h_ranks_proc", "rank %d of %d failed first: %s", culprit, world, text);
    }
    if (late[0]) {
        fprintf(stderr, "%s:%d: h_ranks_proc: still running of %d ranks:%s\n", file, line, world,
                late);
        _exit(H_EXIT_TIMEOUT);
    }
    free(pid);
    free(status);
    free(log);
}
#define h_ranks_proc(world, fn, arg) h_ranks_proc_at(__FILE__, __LINE__, world, fn, arg)

/* ---- registration ---------------------------------------------------------------------------- */

/* Adds tags to a test: later ones, its own, override those of its file. Among tags that are
   added together, AT_NIGHT overrides NO, and both override the others. */
H_FN void h_say(h_test *t, h_tags words) {
    const h_tags day = words & 0xffff, night = words >> 16 & 0xffff, no = words >> 32 & 0xffff;
    t->night = (t->night & ~day & ~no) | night;
    t->day = (t->day | day) & ~no & ~night;
    if (words >> 48) t->seconds = (double)(words >> 48) / 10;
}

H_FN void h_register(const char *name, const char *row_name, void (*run)(size_t), size_t row,
                     h_tags file, h_tags own) {
    size_t size = strlen(name) + (row_name ? strlen(row_name) : 0) + 2;
    char *full = (char *)malloc(size);
    h_test *t;
    h_tests = (h_test *)realloc(h_tests, sizeof *h_tests * (size_t)(h_test_count + 1));
    if (!full || !h_tests) abort();
    snprintf(full, size, "%s%s%s", name, row_name ? "/" : "", row_name ? row_name : "");
    t = &h_tests[h_test_count++];
    memset(t, 0, sizeof *t);
    t->name = full, t->run = run, t->row = row;
    h_say(t, SHM | ASAN | SECONDS(H_TIMEOUT_S));
    h_say(t, file);
    h_say(t, own);
    if (!(t->day & SHM)) h_say(t, NO(ASAN));
    if (t->day & MANY_RANKS) h_say(t, SLOW | AT_NIGHT(t->day & (ASAN | TSAN | BITS | STUB_TSAN)));
}

/* TEST(suite, name) or TEST(suite, name, TAGS_AND_SECONDS). */
#define TEST(...) H_TEST(__VA_ARGS__, 0, 0)
#define H_TEST(suite, title, own, ...)                                                             \
    static void h_test_##suite##_##title(void);                                                    \
    static void h_run_##suite##_##title(size_t i) { (void)i, h_test_##suite##_##title(); }         \
    static void __attribute__((constructor)) h_reg_##suite##_##title(void) {                       \
        h_register(#suite "." #title, NULL, h_run_##suite##_##title, 0, TAGS, own);                \
    }                                                                                              \
    static void h_test_##suite##_##title(void)

/* One test for each element of an array of structs that have a `const char *name`; the body has
   its element in `row`. TEST_P(suite, name, table), or with tags as a fourth argument. */
#define TEST_P(...) H_TEST_P(__VA_ARGS__, 0, 0)
#define H_TEST_P(suite, title, table, own, ...)                                                    \
    static void h_test_##suite##_##title(__typeof__(&(table)[0]) row);                             \
    static void h_run_##suite##_##title(size_t i) { h_test_##suite##_##title(&(table)[i]); }       \
    static void __attribute__((constructor)) h_reg_##suite##_##title(void) {                       \
        size_t i;                                                                                  \
        for (i = 0; i < sizeof(table) / sizeof(table)[0]; i++) {                                   \
            __typeof__(&(table)[0]) row = &(table)[i];                                             \
            h_register(#suite "." #title, row->name, h_run_##suite##_##title, i, TAGS, own);       \
        }                                                                                          \
    }                                                                                              \
    static void h_test_##suite##_##title(__typeof__(&(table)[0]) row __attribute__((unused)))

/* ---- the runner ------------------------------------------------------------------------------ */

H_FN int h_by_name(const void *a, const void *b) {
    return strcmp(((const h_test *)a)->name, ((const h_test *)b)->name);
}

/* Returns 1 if the test matches one of the words, separated by ':', and none that begins with
   '-'. */
H_FN int h_chosen(const char *words, int (*matches)(const h_test *, const char *),
                  const h_test *t) {
    const char *p = words;
    int any_positive = 0, chosen = 0, excluded = 0;
    while (*p) {
        char word[H_TEXT_MAX];
        size_t length = strcspn(p, ":"), minus = *p == '-';
        snprintf(word, sizeof word, "%.*s", (int)(length - minus), p + minus);
        if (minus) excluded |= matches(t, word);
        else any_positive = 1, chosen |= matches(t, word);
        p += length + (p[length] == ':');
    }
    return !excluded && (chosen || !any_positive);
}

H_FN int h_has_name(const h_test *t, const char *pattern) {
    if (strpbrk(pattern, "*?")) return !fnmatch(pattern, t->name, 0);
    return strstr(t->name, pattern) != NULL;
}

H_FN int h_has_tag(const h_test *t, const char *word) {
#define H_ONE(name, word) word,
    static const char *const words[] = {H_TAG_LIST(H_ONE)};
#undef H_ONE
    int at_night = !strncmp(word, "night.", 6), i;
    for (i = 0; i < H_NUM_TAGS; i++)
        if (!strcmp(words[i], word + 6 * at_night)) return (int)((at_night ? t->night : t->day) >> i & 1);
    fprintf(stderr, "%s: no tag is named '%s'\n", h_program, word);
    exit(2);
}

H_FN void h_on_signal(int sig) { h_signal = sig; }

H_FN int h_remove(const char *path, const struct stat *s, int type, struct FTW *f) {
    (void)s, (void)type, (void)f;
    return remove(path);
}

H_FN void h_remove_tree(const char *path) { nftw(path, h_remove, 16, FTW_DEPTH | FTW_PHYS); }

/* Waits for the test's process until its time is up, then ends its whole group. Reaps the
   process last, so that its id, which is the group's, cannot be reused before. Returns 1 if it
   ended in time. */
H_FN int h_await(pid_t pid, int *status) {
    siginfo_t info;
    for (;;) {
        memset(&info, 0, sizeof info);
        if (waitid(P_PID, (id_t)pid, &info, WEXITED | WNOHANG | WNOWAIT) == 0 && info.si_pid) break;
        if (h_signal || h_is_over(500)) break; /* h_ranks_proc may report first */
        h_await_end();
    }
    kill(-pid, SIGKILL);
    waitpid(pid, status, 0);
    return info.si_pid != 0;
}

/* Runs one test and prints its lines. Returns 0, H_EXIT_FAILED or H_EXIT_SKIPPED. */
H_FN int h_run_test(const h_test *t, int number, double mult) {
    FILE *log = tmpfile();
    int status = 0, in_time, length;
    const char *bad, *prefix = h_tap ? "# " : "";
    char text[H_TEXT_MAX], *note, *end;
    pid_t pid;
    h_start_ms = h_now_ms(), h_start_calm_ms = h_calm_ms();
    h_limit_ms = (int64_t)(t->seconds * mult * 1000);
    memset(h_shared, 0, sizeof *h_shared);
    snprintf(h_dir, sizeof h_dir, "%s/%d", h_base, number);
    if (!h_tap) printf("[ RUN      ] %s\n", t->name);
    fflush(NULL);
    h_hold_ends();
    pid = log ? fork() : -1;
    if (pid < 0) perror("harness"), exit(1);
    if (!pid) {
        setpgid(0, 0);
        signal(SIGINT, SIG_DFL), signal(SIGTERM, SIG_DFL);
        h_child(log, -1, t->run, t->row, NULL, 0, NULL);
    }
    setpgid(pid, pid);
    in_time = h_await(pid, &status);
    h_release_ends();
    h_remove_tree(h_dir);
    if (!in_time && h_signal) {
        snprintf(text, sizeof text, "interrupted by signal %d", (int)h_signal);
        bad = text;
    } else if (!in_time || (WIFEXITED(status) && WEXITSTATUS(status) == H_EXIT_TIMEOUT)) {
        snprintf(text, sizeof text, "timed out after %g s", t->seconds * mult);
        bad = text;
    } else {
        bad = h_why_failed(status, h_shared->state[0], text, sizeof text);
    }
    length = h_shared->notes_length < H_NOTES_MAX ? h_shared->notes_length : H_NOTES_MAX;
    h_shared->notes[length ? length - 1 : 0] = 0;
    for (note = strtok_r(h_shared->notes, "\n", &end); note; note = strtok_r(NULL, "\n", &end))
        printf("%s %s\n", h_tap ? "#" : "[     NOTE ]", note);
    if (bad && WIFEXITED(status) && WEXITSTATUS(status) == H_EXIT_SKIPPED) {
        const char *reason = h_shared->skip[0] ? h_shared->skip : "no reason given";
        if (h_tap) printf("ok %d - %s # SKIP %s\n", number, t->name, reason);
        else printf("[  SKIPPED ] %s (%s)\n", t->name, reason);
        fclose(log);
        return H_EXIT_SKIPPED;
    }
    if (bad) {
        h_dump(log, stdout, prefix);
        printf("%s%s: %s\n%sagain: %s '--filter=%s' --seed=%llu\n", prefix, t->name, bad, prefix,
               h_program, t->name, (unsigned long long)h_seed_value);
    } else {
        fclose(log);
    }
    if (h_tap) printf("%s %d - %s\n", bad ? "not ok" : "ok", number, t->name);
    else
        printf("[%s] %s (%lld ms)\n", bad ? "  FAILED  " : "       OK ", t->name,
               (long long)(h_now_ms() - h_start_ms));
    return bad ? H_EXIT_FAILED : 0;
}

H_FN void h_print_list(const char *head, int wanted, const int *result, int count) {
    int i, n = 0;
    for (i = 0; i < count; i++) n += result[i] == wanted;
    if (!n) return;
    printf("[%s] %d test%s, listed below:\n", head, n, n == 1 ? "" : "s");
    for (i = 0; i < count; i++)
        if (result[i] == wanted) printf("[%s] %s\n", head, h_tests[i % h_test_count].name);
}

/* Runs the selected tests, h_tests[0 .. h_test_count), `repeat` times. Returns the exit status. */
H_FN int h_run_all(int repeat, double mult) {
    int total = h_test_count * repeat, passed = 0, failed = 0, i;
    int *result = (int *)calloc((size_t)total + 1, sizeof *result);
    const char *tmp = getenv("TMPDIR");
    int64_t start = h_now_ms();
    h_shared = (h_board *)mmap(NULL, sizeof *h_shared, PROT_READ | PROT_WRITE,
                               MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    snprintf(h_base, sizeof h_base, "%s/test-XXXXXX", tmp && *tmp ? tmp : "/tmp");
    if (!result || h_shared == (h_board *)MAP_FAILED || !mkdtemp(h_base)) {
        perror("harness");
        return 1;
    }
    signal(SIGINT, h_on_signal), signal(SIGTERM, h_on_signal);
    if (h_tap) printf("1..%d\n", total);
    else printf("[==========] Running %d test%s.\n", total, total == 1 ? "" : "s");
    for (i = 0; i < total && !h_signal; i++) {
        result[i] = h_run_test(&h_tests[i % h_test_count], i + 1, mult);
        passed += result[i] == 0;
        failed += result[i] == H_EXIT_FAILED;
        if ((i + 1) % h_test_count == 0) h_seed_value++; /* the next round gets other numbers */
    }
    h_remove_tree(h_base);
    if (h_signal) return 128 + h_signal;
    if (!h_tap) {
        printf("[==========] %d test%s ran. (%lld ms total)\n", total, total == 1 ? "" : "s",
               (long long)(h_now_ms() - start));
        printf("[  PASSED  ] %d test%s.\n", passed, passed == 1 ? "" : "s");
        h_print_list("  SKIPPED ", H_EXIT_SKIPPED, result, total);
        h_print_list("  FAILED  ", H_EXIT_FAILED, result, total);
    }
    free(result);
    return failed || !total;
}

H_FN int h_main(int argc, char **argv) {
    const char *env = getenv("TEST_TIMEOUT_MULT");
    double mult = env && *env ? strtod(env, NULL) : 1;
    int list = 0, repeat = 1, kept = 0, i;
    h_program = argv[0];
    for (i = 1; i < argc; i++) {
        const char *a = argv[i], *value = strchr(a, '=') ? strchr(a, '=') + 1 : "";
        if (!strncmp(a, "--filter=", 9)) h_filter = value;
        else if (!strncmp(a, "--tags=", 7)) h_tag_filter = value;
        else if (!strncmp(a, "--seed=", 7)) h_seed_value = strtoull(value, NULL, 0);
        else if (!strncmp(a, "--repeat=", 9)) repeat = (int)strtol(value, NULL, 10);
        else if (!strncmp(a, "--timeout-mult=", 15)) mult = strtod(value, NULL);
        else if (!strcmp(a, "--list")) list = 1;
        else if (!strcmp(a, "--tap")) h_tap = 1;
        else {
            fprintf(stderr,
                    "usage: %s [--filter=A:-B] [--tags=A:-B] [--list] [--seed=N] [--tap] "
                    "[--repeat=N] [--timeout-mult=X]\n",
                    argv[0]);
            return 2;
        }
    }
    if (h_test_count) qsort(h_tests, (size_t)h_test_count, sizeof *h_tests, h_by_name);
    for (i = 0; i < h_test_count; i++) {
        if (i && !strcmp(h_tests[i].name, h_tests[i - 1].name)) {
            fprintf(stderr, "two tests are named %s\n", h_tests[i].name);
            return 2;
        }
    }
    for (i = 0; i < h_test_count; i++) {
        h_test t = h_tests[i];
        if (!h_chosen(h_tag_filter, h_has_tag, &t)) continue;
        if (!h_chosen(h_filter, h_has_name, &t)) continue;
        h_tests[i] = h_tests[kept]; /* kept for leak checkers */
        h_tests[kept++] = t;
    }
    h_test_count = kept;
    for (i = 0; list && i < kept; i++) puts(h_tests[i].name);
    return list ? 0 : h_run_all(kept && repeat > 0 ? repeat : 0, mult > 0 ? mult : 1);
}

int main(int argc, char **argv) { return h_main(argc, argv); }
#endif /* HARNESS_H */
