/* faults.h - a job of a few ranks, each a process, that a test kills, stops or delays: the position
   of each rank, its results and their times, and limits that grow with the load of the machine.
   Tests of backends check with it that no rank hangs, and that each gets a status that names the
   culprit. Include it after library.c and lab.h.

       static void body(job *j, int rank) { ... at(j, rank, AT_STEP) ... tell(j, rank, ...) }

       job *j = new_job("gloo", 3, 20000, body);    // then change what you like
       start(j);
       J_CHECK(j, await(j, 1, AT_STEP, 5), "it does not run");
       mark(j);                                     // from now on time is counted
       kill(j->pid[1], SIGKILL);
       J_CHECK(j, !finish(j, 8000), "a rank hangs");
       all_got(j, 1, FSDP_ERR_PEER_LOST, NULL);     // all but rank 1
       all_know(j, 1, 1000);

   SPDX-License-Identifier: MIT */
#ifndef FAULTS_H
#define FAULTS_H
#include <malloc.h>    /* mallinfo2 */
#include <sys/prctl.h> /* prctl: ranks end with their test */

/* ---- a job ----------------------------------------------------------------------------------- */

enum { RANKS = 4, UNITS = 3, CYCLES = W_SLOW ? 20 : 100 };
enum {
    AT_START,
    AT_INIT,
    AT_SPLIT,
    AT_GATHER,
    AT_SCATTER,
    AT_REDUCE,
    AT_BROADCAST,
    AT_BARRIER,
    AT_FIRST,
    AT_STEP,
    AT_FINALIZE,
    AT_ODD,
    AT_CLOSE,
    AT_END,
    PLACES
};
static const char *const places[PLACES] = {
    "start",   "init",       "split", "gather",   "scatter", "reduce", "broadcast",
    "barrier", "first step", "step",  "finalize", "odd",     "close",  "end"};

typedef struct {
    int place, visits[PLACES];   /* its current place, and the number of visits to each */
    int status, again, shutdown; /* its result, the next call's, and shutdown's */
    int ended, how;              /* 1: its process has ended; waitpid's status */
    int64_t failed_ns, left_ns;  /* time of its result, end of its shutdown */
    uint64_t bits;               /* hash of all its parameters */
    char text[1400];
} report;

/* In shared memory of all its processes. */
typedef struct job job;
struct job {
    void (*body)(job *j, int rank);
    void (*begin)(job *j, int rank);          /* a rank's first action; NULL: none */
    void (*quirk)(job *j, fsdp_world *world); /* the victims' action before odd_step */
    const void *extra;
    const char *backend;
    int world, timeout_ms, lanes, rounds, odd_step;
    int victim, other;  /* the ranks that cause the failure; -1: none */
    int late_ms[RANKS]; /* -1: never comes */
    int lasts;          /* all_got: the next call and shutdown gave the same */
    int offload;        /* parameters are in host memory */
    int gate;           /* set by one process, awaited by another; see serve */
    size_t bytes;       /* size of the largest buffer */
    char name[64], store[96], token[RANKS][32];
    pid_t pid[RANKS];
    int64_t fault_ns; /* time of the fault */
    int64_t stall_ns; /* h_stalled_ms at that time, in ns */
    int64_t gap_ns;   /* the longest time in which this test did not run */
    report rank[RANKS];
};

/* Returns the factor by which time limits grow here. */
H_FN double slowness(void) {
    const char *mult = getenv("TEST_TIMEOUT_MULT");
    double slow = mult && *mult ? strtod(mult, NULL) : 1;
    if (W_SLOW && slow < 3) slow = 3;
    return slow < 1 ? 1 : slow;
}

/* Returns 1 on NCCL. There ranks compare their calls before each collective, and wait: a rank is
   in the operation that it names. With worker threads they do not: the host has continued, and
   names the place where it waits. */
H_FN int on_nccl(void) {
    const char *backend = getenv("FSDP_BACKEND");
    return backend && !strcmp(backend, "nccl");
}
H_FN void environment(job *j, int rank) { /* for job.begin */
    (void)rank;
    if (!on_nccl()) return;
    unsetenv("FSDP_STUB_CHECKS"); /* with it, the stand-in's calls wait for each other */
    setenv("FSDP_CUDA_MANAGED", "1", 1);
    setenv("FSDP_NCCL_CHECK", j->lanes ? "0" : "1", 1);
}

H_FN int64_t now_ns(void) { return fsdpi_monotonic_ns(NULL); }

/* Sets the time of the fault, from which the ranks' times count. */
H_FN void mark(job *j) {
    j->fault_ns = now_ns();
    j->stall_ns = h_stalled_ms() * 1000000;
}

/* Returns zeros in memory that this process shares with its later children. */
H_FN void *shared(size_t bytes) {
    void *p = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    CHECK(p != MAP_FAILED);
    return p;
}

H_FN job *new_job(const char *backend, int world, int timeout_ms, void (*body)(job *, int)) {
    static int made;
    job *j = (job *)shared(sizeof *j);
    j->backend = backend;
    j->world = world, j->body = body, j->rounds = 1 << 30, j->odd_step = 5;
    j->timeout_ms = (int)(timeout_ms * slowness());
    j->victim = j->other = -1;
    snprintf(j->name, sizeof j->name, "faults-%d-%d", (int)getpid(), made++);
    snprintf(j->store, sizeof j->store, "host:");
    mark(j);
    return j;
}

H_FN int is_victim(const job *j, int rank) { return rank == j->victim || rank == j->other; }

/* ---- reports of ranks ------------------------------------------------------------------------ */

H_FN void at(job *j, int rank, int place) {
    report *r = &j->rank[rank];
    __atomic_store_n(&r->place, place, __ATOMIC_SEQ_CST);
    __atomic_fetch_add(&r->visits[place], 1, __ATOMIC_SEQ_CST);
}

/* Notes a rank's result; only the first one counts. */
H_FN void tell(job *j, int rank, fsdp_status status, const char *text) {
    report *r = &j->rank[rank];
    if (r->failed_ns) return;
    r->status = (int)status;
    snprintf(r->text, sizeof r->text, "%s", status ? text : "");
    __atomic_store_n(&r->failed_ns, now_ns(), __ATOMIC_SEQ_CST);
}

/* Notes a rank's result, and those of the next call and of shutdown. world NULL: there is none. */
H_FN void leave(job *j, int rank, fsdp_world *world, fsdp_status status) {
    report *r = &j->rank[rank];
    tell(j, rank, status, fsdp_last_error(world));
    at(j, rank, AT_CLOSE);
    r->again = status && world ? (int)fsdp_barrier(world) : (int)status;
    fsdp_status ended = fsdp_shutdown(world);
    r->shutdown = world ? (int)ended : (int)status;
}

/* ---- running a job --------------------------------------------------------------------------- */

H_FN void rank_main(job *j, int rank) {
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    h_rank = rank;
    if (j->begin) j->begin(j, rank);
    h_seem_a_host(rank);
    if (j->late_ms[rank]) usleep((useconds_t)j->late_ms[rank] * 1000);
    if (j->token[rank][0]) setenv("FSDP_TOKEN", j->token[rank], 1);
    j->body(j, rank);
    j->rank[rank].left_ns = now_ns();
    at(j, rank, AT_END);
    exit(0); /* not _exit: leak checkers end their work here */
}

H_FN void start(job *j) {
    fflush(NULL);
    for (int k = 0; k < j->world; k++) {
        j->rank[k].ended = j->late_ms[k] < 0;
        if (j->rank[k].ended) continue;
        pid_t pid = fork();
        CHECK(pid >= 0);
        if (!pid) rank_main(j, k);
        j->pid[k] = pid;
    }
}

/* Looks at the processes once, and sleeps `us`. Returns the number of running ones. */
H_FN int look_for(job *j, useconds_t us) {
    static int64_t last;
    int64_t now = now_ns();
    int running = 0;
    if (last && now - last < 1000000000 && now - last > j->gap_ns) j->gap_ns = now - last;
    last = now;
    for (int k = 0; k < j->world; k++) {
        report *r = &j->rank[k];
        if (!r->ended && waitpid(j->pid[k], &r->how, WNOHANG) == j->pid[k]) r->ended = 1;
        running += !r->ended;
    }
    if (running) usleep(us);
    return running;
}
H_FN int look(job *j) { return look_for(j, 300); }

/* Returns a time limit for this machine: longer by its slowness, and by the time that others
   used it. */
H_FN int64_t allowed_ms(const job *j, int64_t ms) {
    int64_t busy_ns = h_stalled_ms() * 1000000 - j->stall_ns + 4 * j->gap_ns;
    return (int64_t)((double)ms * slowness()) + busy_ns / 1000000;
}

/* Returns the time from the fault to a rank's result. */
H_FN int took_ms(const job *j, int rank) {
    return (int)((j->rank[rank].failed_ns - j->fault_ns) / 1000000);
}

/* Returns the duration of a rank's shutdown. */
H_FN int shutdown_ms(const job *j, int rank) {
    return (int)((j->rank[rank].left_ns - j->rank[rank].failed_ns) / 1000000);
}

/* Returns 1 if more time has passed since `begin_ns` than is allowed. To ask the kernel how busy
   the machine was takes long: it is done only later than a quiet machine would need. */
H_FN int is_overdue(const job *j, int64_t begin_ns, int64_t limit_ms) {
    const int64_t took_ms = (now_ns() - begin_ns) / 1000000;
    return took_ms > limit_ms && took_ms > allowed_ms(j, limit_ms);
}

/* Waits until all ranks have ended. Prints and kills those that are late, and returns their
   number. */
H_FN int finish(job *j, int64_t limit_ms) {
    int64_t begin = now_ns();
    int left = look(j);
    while (left && !is_overdue(j, begin, limit_ms)) left = look_for(j, 2000);
    for (int k = 0; k < j->world && left; k++) {
        report *r = &j->rank[k];
        if (r->ended) continue;
        fprintf(stderr, "rank %d of %d hangs in %s, status %d '%s'\n", k, j->world,
                places[r->place], r->status, r->text);
        kill(j->pid[k], SIGKILL);
        waitpid(j->pid[k], &r->how, 0);
        r->ended = 1;
    }
    return left;
}

/* Waits until a rank has come to a place for the nth time. Returns 0 if the job ended before, or
   hangs. */
H_FN int await(job *j, int rank, int place, int nth) {
    int64_t end = now_ns() + allowed_ms(j, 20000) * 1000000;
    while (__atomic_load_n(&j->rank[rank].visits[place], __ATOMIC_SEQ_CST) < nth)
        if (!look(j) || j->rank[rank].ended || now_ns() > end) return 0;
    return 1;
}

/* Waits until all ranks except one have a result. Returns 0 if that took too long. */
H_FN int await_results(job *j, int except, int64_t limit_ms) {
    int64_t begin = now_ns();
    for (int k = 0; k < j->world; k++)
        while (k != except && !__atomic_load_n(&j->rank[k].failed_ns, __ATOMIC_SEQ_CST)) {
            (void)look(j);
            if (is_overdue(j, begin, limit_ms)) return 0;
        }
    return 1;
}

/* ---- results of ranks ------------------------------------------------------------------------ */

/* Returns 1 if the text names a rank, as in "rank 2" or "ranks 0, 2"; the speaker's prefix does
   not count. */
H_FN int names(const char *text, int speaker, int who) {
    char own[24];
    snprintf(own, sizeof own, "rank %d: ", speaker);
    if (!strncmp(text, own, strlen(own))) text += strlen(own);
    for (const char *p = text; (p = strstr(p, "ank")) != NULL;) {
        int is_word = p > text && strchr("rR", p[-1]) && (p - 1 == text || p[-2] < 'a');
        p += p[3] == 's' ? 4 : 3;
        for (char *end; is_word && *p == ' '; p = *end == ',' ? end + 1 : end) {
            long rank = strtol(p, &end, 10);
            if (end == p) break;
            if (rank == who) return 1;
        }
    }
    return 0;
}

H_FN void shows(const job *j) {
    for (int k = 0; k < j->world; k++) {
        const report *r = &j->rank[k];
        fprintf(
            stderr,
            "rank %d%s, ended %x in %s, after %d ms got %s, then %s, shutdown %s in %d ms: %s\n", k,
            is_victim(j, k) ? " (victim)" : "", r->how, places[r->place], took_ms(j, k),
            fsdp_status_name((fsdp_status)r->status), fsdp_status_name((fsdp_status)r->again),
            fsdp_status_name((fsdp_status)r->shutdown), shutdown_ms(j, k), r->text);
    }
}

#define J_CHECK(j, cond, ...) /* ... is a format and its values; prints all ranks' results */      \
    do {                                                                                           \
        if (!(cond)) shows(j);                                                                     \
        CHECK_MSG(cond, __VA_ARGS__);                                                              \
    } while (0)

H_FN int in_order(const report *r) { return r->ended && WIFEXITED(r->how) && !WEXITSTATUS(r->how); }

/* Checks that all ranks except one have ended normally, with this status and this part of the
   text. */
H_FN void all_got(const job *j, int except, fsdp_status status, const char *part) {
    for (int k = 0; k < j->world; k++) {
        const report *r = &j->rank[k];
        if (k == except) continue;
        J_CHECK(j, in_order(r), "rank %d did not end in order: %x", k, r->how);
        J_CHECK(j, r->status == (int)status, "rank %d got %s", k,
                fsdp_status_name((fsdp_status)r->status));
        J_CHECK(j, !j->lasts || (r->again == r->status && r->shutdown == r->status),
                "rank %d: another status later", k);
        J_CHECK(j, !part || strstr(r->text, part), "rank %d does not say '%s'", k, part);
    }
}

/* Checks that all ranks except one got their result at most limit_ms after the fault. */
H_FN void all_know(const job *j, int except, int limit_ms) {
    int slowest = 0;
    for (int k = 0; k < j->world; k++) {
        int took = took_ms(j, k);
        if (k == except) continue;
        J_CHECK(j, took <= allowed_ms(j, limit_ms), "rank %d: after %d ms", k, took);
        if (took > slowest) slowest = took;
    }
    h_message("all know after %d ms", slowest);
}

H_FN void all_name(const job *j, int except, int who) {
    for (int k = 0; k < j->world; k++)
        J_CHECK(j, k == except || k == who || names(j->rank[k].text, k, who),
                "rank %d does not name rank %d", k, who);
}

H_FN void sleeps(job *j, int rank) {
    at(j, rank, AT_SPLIT);
    while (rank == 1) pause();
}
/* A test of this file. */
H_FN void watchdog(void) {
    job *j = new_job(NULL, 3, 1000, sleeps);
    start(j);
    CHECK(await(j, 1, AT_SPLIT, 1));
    for (int k = 0; k < 3; k += 2) {
        CHECK(!await(j, k, AT_SPLIT, 2)); /* it never comes there twice: it ends */
        CHECK(j->rank[k].ended);
    }
    CHECK_EQ_INT(finish(j, 0), 1);
    CHECK(WIFSIGNALED(j->rank[1].how) && j->rank[0].place == AT_END && !look(j));
}

/* ---- kill -9, many times --------------------------------------------------------------------- */

typedef struct {
    int faults, hangs, unnamed, wrong;
    const char *name; /* name of the current kill */
    int place;
    uint64_t seed;
    int64_t slowest_ns;
    const char *slowest;
} tally;

H_FN void complain(const job *j, const tally *sum, const char *what) {
    fprintf(stderr, "%s, seed %llu, W=%d, lanes %d, rank %d killed: %s\n", sum->name,
            (unsigned long long)sum->seed, j->world, j->lanes, j->victim, what);
    shows(j);
}
H_FN void wrong(const job *j, tally *sum, const char *what) {
    sum->wrong++;
    complain(j, sum, what);
}

/* Checks a survivor's result: PEER_LOST soon after the death. If the victim had not joined yet,
   it is missing, at the deadline. Returns the limit in ms. */
H_FN int64_t check_result(const job *j, int k, tally *sum) {
    const report *r = &j->rank[k];
    int64_t took = r->failed_ns - j->fault_ns, limit_ms = allowed_ms(j, 1000);
    if (sum->place == AT_INIT && r->status == FSDP_ERR_TIMEOUT) limit_ms += j->timeout_ms;
    else if (r->status != FSDP_ERR_PEER_LOST) wrong(j, sum, "another status than PEER_LOST");
    else if (took > sum->slowest_ns) sum->slowest_ns = took, sum->slowest = sum->name;
    if (!names(r->text, k, j->victim))
        sum->unnamed++, complain(j, sum, "a text does not name the culprit");
    if (took > limit_ms * 1000000) wrong(j, sum, "later than allowed");
    if (r->again != r->status || (j->lasts && r->shutdown != r->status))
        wrong(j, sum, "another status later");
    return limit_ms;
}

/* Starts a job, and kills the victim `delay` us after it has come to sum->place for the nth
   time. Returns 1 if the other ranks have ended. */
H_FN int strike(job *j, int nth, useconds_t delay, tally *sum) {
    start(j);
    if (!await(j, j->victim, sum->place, nth)) {
        wrong(j, sum, "the victim did not come that far");
        sum->hangs += finish(j, 100);
        return 0;
    }
    usleep(delay);
    mark(j);
    kill(j->pid[j->victim], SIGKILL);
    int hangs = finish(j, 8000);
    if (hangs) complain(j, sum, "a survivor hangs");
    sum->hangs += hangs;
    sum->faults++;
    return !hangs;
}

H_FN void kills(int count, void (*one_kill)(int i, tally *sum)) {
    tally sum;
    memset(&sum, 0, sizeof sum);
    sum.slowest = "none";
    for (int i = 0; i < count; i++) {
        sum.seed = h_seed() * 1000003 + (uint64_t)i;
        one_kill(i, &sum);
    }
    h_message("%d faults injected, %d hangs, %d unnamed culprits; slowest detection %.1f ms (%s)",
              sum.faults, sum.hangs, sum.unnamed, (double)sum.slowest_ns * 1e-6, sum.slowest);
    CHECK_EQ_INT(sum.hangs, 0);
    CHECK_EQ_INT(sum.unnamed, 0);
    CHECK_EQ_INT(sum.wrong, 0);
    CHECK_EQ_INT(sum.faults, count);
}

/* ---- actions of ranks ------------------------------------------------------------------------ */

#define TRY(call)                                                                                  \
    do {                                                                                           \
        fsdp_status status_ = (call);                                                              \
        if (status_) return status_;                                                               \
    } while (0)

H_FN fsdp_world_desc desc_of(job *j, int rank) {
    fsdp_world_desc d = w_desc(rank, j->world, NULL, j->name, j->lanes);
    d.timeout_ms = j->timeout_ms;
    d.store = j->store;
    d.backend = j->backend;
    return d;
}

/* Returns a boot for calls of a backend's own functions. */
H_FN fsdp_boot boot_of(const job *j, int rank) {
    fsdp_boot boot;
    memset(&boot, 0, sizeof boot);
    boot.rank = boot.local_rank = rank;
    boot.size = j->world;
    boot.timeout_ns = (int64_t)j->timeout_ms * 1000000;
    boot.job = j->name;
    boot.store = j->store;
    boot.allocator.alloc = fsdpi_libc_alloc;
    boot.allocator.free = fsdpi_libc_free;
    boot.logger.log = w_quiet;
    boot.clock.now_ns = fsdpi_monotonic_ns;
    return boot;
}

H_FN void first_values(void *user, const fsdp_param_view *block) {
    (void)user;
    for (int64_t k = 0; k < block->numel; k++)
        ((float *)block->data)[k] = (float)((fsdp_view_index(block, k) * 7 + block->ordinal) % 23);
}

/* Makes units of different sizes over a mesh that is not the world itself: reversed, or of two
   dims. */
H_FN fsdp_status make_model(const job *j, fsdp_world *world, int width, fsdp_model **model,
                            fsdp_unit *unit[UNITS]) {
    int32_t backwards[RANKS], n = fsdp_world_size(world);
    fsdp_mesh_desc md = FSDP_ZERO;
    fsdp_model_desc d = FSDP_ZERO;
    fsdp_mesh *mesh;
    for (int32_t k = 0; k < n; k++) backwards[k] = n - 1 - k;
    md.ndim = n == 4 ? 2 : 1;
    md.shape[0] = n == 4 ? 2 : n, md.shape[1] = 2;
    md.names[0] = n == 4 ? "replicate" : "shard", md.names[1] = n == 4 ? "shard" : NULL;
    md.ranks = backwards;
    TRY(fsdp_mesh_create(world, &md, &mesh));
    d.mesh = mesh;
    d.cpu_offload = j->offload;
    TRY(fsdp_model_create(world, &d, model));
    for (int u = 0; u < UNITS; u++) {
        fsdp_param_desc p[2] = {fsdp_mat("w", width + u, width), fsdp_vec("b", width)};
        fsdp_unit_desc ud = FSDP_ZERO;
        ud.params = p;
        ud.num_params = 2;
        TRY(fsdp_fully_shard(*model, &ud, &unit[u]));
    }
    return fsdp_init_params(*model, first_values, NULL);
}

H_FN void exits(job *j, fsdp_world *world) {
    (void)j, (void)world;
    _exit(0);
}
H_FN void shuts_down(job *j, fsdp_world *world) {
    tell(j, h_rank, fsdp_shutdown(world), "");
    exit(0);
}

/* ---- a launcher ------------------------------------------------------------------------------ */

#if defined(FSDP_BACKEND_GLOO) || defined(FSDP_BACKEND_NCCL) /* ranks meet at a store */

/* Forks a process that serves the store while j->gate is 1. */
H_FN pid_t serve(job *j) {
    fsdpi_store_desc d = FSDP_ZERO;
    fsdpi_store_server *server = NULL;
    char error[512];
    int64_t begin = now_ns();
    pid_t pid = fork();
    CHECK(pid >= 0);
    if (pid) {
        while (!__atomic_load_n(&j->gate, __ATOMIC_SEQ_CST) && now_ns() - begin < 20000000000)
            usleep(1000);
        CHECK_EQ_INT(__atomic_load_n(&j->gate, __ATOMIC_SEQ_CST), 1);
        return pid;
    }
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    d.boot = boot_of(j, 0);
    d.boot.timeout_ns = 20000000000;
    if (fsdpi_store_serve(&d, &server, error, sizeof error)) fprintf(stderr, "%s\n", error);
    __atomic_store_n(&j->gate, server ? 1 : -1, __ATOMIC_SEQ_CST);
    while (server && __atomic_load_n(&j->gate, __ATOMIC_SEQ_CST) == 1) usleep(1000);
    fsdpi_store_stop(server);
    exit(0);
}

/* Runs a job whose launcher ends while the ranks train. */
H_FN void launcher_ends(job *j, int is_killed) {
    pid_t pid = serve(j);
    start(j);
    for (int k = 0; k < j->world; k++) J_CHECK(j, await(j, k, AT_STEP, 3), "it does not run");
    mark(j);
    if (is_killed) kill(pid, SIGKILL);
    else __atomic_store_n(&j->gate, 2, __ATOMIC_SEQ_CST);
    J_CHECK(j, !finish(j, 20000), "a rank hangs");
    CHECK_EQ_INT(waitpid(pid, NULL, 0), pid);
}

#endif /* a store */

/* ---- no resources are left ------------------------------------------------------------------- */

typedef struct {
    int descriptors, threads;
    size_t heap;
} usage;
H_FN usage usage_now(void) {
    usage u;
    u.descriptors = h_entries("/proc/self/fd"), u.threads = h_entries("/proc/self/task");
#ifdef __GLIBC__
    u.heap = mallinfo2().uordblks;
#else
    u.heap = 0; /* musl does not count */
#endif
    return u;
}

/* Checks that usage has not grown. The kernel may take a moment to remove a thread from its
   lists, and the heap keeps a few freed blocks of each size: our own bytes are counted exactly. */
H_FN void same_usage(usage before, size_t heap) {
    usage now = usage_now();
    for (int i = 0;
         i < 1000 && (now.descriptors > before.descriptors || now.threads > before.threads); i++)
        usleep(1000), now = usage_now();
    CHECK_MSG(now.descriptors <= before.descriptors && now.threads <= before.threads,
              "%d descriptors and %d threads, then %d and %d", before.descriptors, before.threads,
              now.descriptors, now.threads);
    CHECK_MSG(W_SLOW || now.heap <= before.heap + heap, "heap: %zu bytes, then %zu", before.heap,
              now.heap);
}
#endif
