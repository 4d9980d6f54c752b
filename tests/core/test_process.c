/* test_process.c - changes that a program may make to its own process: it closes its standard
   descriptors, or all of them; forks; ends a thread of a rank; unloads the library. Its peers do
   not suffer.

   SPDX-License-Identifier: MIT */
#define TAGS GLOO
#include "harness.h"
#include "lab.h"
#include "fsdp_checkpoint.h"
#include "fsdp_optim.h"
#include <dlfcn.h>       /* dlopen */
#include <sched.h>       /* unshare */
#include <sys/mount.h>   /* mount */
#include <sys/syscall.h> /* SYS_pwrite64 */

static int over(const char *name) {
    const char *backend = getenv("FSDP_BACKEND");
    return !strcmp(backend ? backend : "shm", name);
}

/* ---- a training whose numbers are known ------------------------------------------------------ */

enum { ROWS = 24, COLUMNS = 16 };

typedef struct {
    lab_rank *r;
    fsdp_model *model;
    fsdp_unit *unit;
    int steps;
} training;

static void zeros(void *user, const fsdp_param_view *block) {
    (void)user;
    memset(block->data, 0, (size_t)block->numel * sizeof(float));
}
static training begin(lab_rank *r) {
    const fsdp_param_desc w = fsdp_mat("w", ROWS, COLUMNS);
    training t = {r, lab_model(r->w, NULL), NULL, 0};
    t.unit = lab_unit(r->w, t.model, NULL, &w, 1);
    CALL(r->w, fsdp_init_params(t.model, zeros, NULL));
    return t;
}
/* Runs a step. Rank k's gradient is 2k + 2: the mean is size + 1, and each step subtracts it. */
static void step(training *t) {
    fsdp_world *w = t->r->w;
    fsdp_param_view v = FSDP_ZERO;
    lab_forward(w, t->unit);
    CALL(w, fsdp_pre_backward(t->unit));
    float *grad = (float *)fsdp_grad(t->unit, 0);
    for (int i = 0; i < ROWS * COLUMNS; i++) grad[i] += (float)(2 * t->r->rank + 2);
    CALL(w, fsdp_post_backward(t->unit));
    CALL(w, fsdp_finalize_backward(t->model));
    while (fsdp_next_param(t->model, &v))
        for (int64_t k = 0; k < v.numel; k++)
            ((float *)v.shard)[k] -= ((const float *)v.shard_grad)[k];
    fsdp_params_changed(t->model);
    fsdp_zero_grad(t->model);
    t->steps++;
    CALL(w, fsdp_pre_forward(t->unit));
    const float *data = (const float *)fsdp_data(t->unit, 0);
    for (int i = 0; i < ROWS * COLUMNS; i++)
        CHECK_EQ_INT((int)data[i], -t->steps * (t->r->size + 1));
    CALL(w, fsdp_post_forward(t->unit));
    CALL(w, fsdp_pre_backward(t->unit)); /* so that the next step begins with its own forward */
    CALL(w, fsdp_post_backward(t->unit));
    CALL(w, fsdp_finalize_backward(t->model));
    fsdp_zero_grad(t->model);
}

/* ---- descriptors 0 to 2 ---------------------------------------------------------------------- */

static const struct {
    const char *name;
    int closed[3], lanes;
} closings[] = {{"stderr", {0, 0, 1}, 0}, {"outputs", {0, 1, 1}, 0}, {"all", {1, 1, 1}, 2}};

/* Prints as a trainer does, which ignores the result. */
static void print(const int *which) {
    static const char line[] = "step 7, loss 2.5, 1200 tokens a second, and so on, and so on\n";
    for (int i = 0; i < 200; i++)
        for (int fd = 0; fd < 3; fd++) {
            const ssize_t done = which[fd] ? write(fd, line, sizeof line - 1) : 0;
            (void)done;
        }
}
/* Returns 1 if the descriptor is closed or opens the null device. */
static int is_free(int fd) {
    char link[40], to[64];
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    const ssize_t length = readlink(link, to, sizeof to - 1);
    to[length < 0 ? 0 : length] = 0;
    return length < 0 || !strcmp(to, "/dev/null");
}
static void closed(lab_rank *r) {
    const int *which = closings[*(const int *)r->arg].closed;
    const int saved = fcntl(2, F_DUPFD_CLOEXEC, 100); /* so that a failed check is printed */
    for (int fd = 0; fd < 3; fd++)
        if (which[fd]) close(fd);
    r->w = lab_world(r, 0, closings[*(const int *)r->arg].lanes, NULL);
    int taken = 0;
    for (int fd = 0; fd < 3; fd++) taken += which[fd] && !is_free(fd);
    print(which);
    CHECK_EQ_INT(dup2(saved, 2), 2);
    CHECK_MSG(!taken, "%d of the descriptors 0 to 2 are the library's", taken);
    training t = begin(r);
    for (int i = 0; i < 3; i++) step(&t);
}
TEST_P(descriptors, closed, closings, NCCL) {
    const int which = (int)(row - closings);
    lab_how how = {"closed", 1, 0, 1, 0, NULL, NULL};
    lab_run(3, &how, closed, (void *)(uintptr_t)&which);
}

/* Count the library's calls of pread and pwrite, and those on the descriptors that a program
   prints to. */
static int file_calls, low_calls;
ssize_t pwrite(int fd, const void *data, size_t nbytes, off_t at) {
    file_calls++, low_calls += fd < 3;
    return (ssize_t)syscall(SYS_pwrite64, fd, data, nbytes, at);
}
ssize_t pread(int fd, void *data, size_t nbytes, off_t at) {
    file_calls++, low_calls += fd < 3;
    return (ssize_t)syscall(SYS_pread64, fd, data, nbytes, at);
}
static void saved(lab_rank *r) {
    fsdp_checkpoint *ck;
    char dir[400];
    const int copy = fcntl(2, F_DUPFD_CLOEXEC, 100);
    training t = begin(r);
    step(&t);
    CALL(r->w, fsdp_checkpoint_create(t.model, NULL, &ck));
    for (int fd = 0; fd < 3; fd++) close(fd);
    const fsdp_status saved_too = fsdp_checkpoint_save(ck, h_tmpdir(), 7);
    const int writes = file_calls;
    snprintf(dir, sizeof dir, "%s/step-00000007", h_tmpdir());
    const fsdp_status loaded = fsdp_checkpoint_load(ck, dir, NULL);
    for (int fd = 0; fd < 3; fd++) CHECK_EQ_INT(dup2(copy, fd), fd);
    CALL(r->w, saved_too);
    CALL(r->w, loaded);
    CHECK(writes > 0 && file_calls > writes);
    CHECK_EQ_INT(low_calls, 0);
}
TEST(descriptors, of_checkpoints) {
    lab_how how = {"saved", 1, 0, 0, 0, NULL, NULL};
    lab_run(1, &how, saved, NULL);
}

/* ---- descriptors that are the library's ------------------------------------------------------ */

/* Opens and closes each file that the process has open, as tools do that list them. */
static void open_and_close_all(void) {
    for (int fd = 3; fd < 256; fd++) {
        char link[40];
        snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
        const int copy = fcntl(fd, F_GETFD) < 0 ? -1 : open(link, O_RDONLY | O_NONBLOCK);
        if (copy >= 0) close(copy);
    }
}
static void looks_at_its_files(lab_rank *r) {
    training t = begin(r);
    step(&t);
    if (r->rank == 1) {
        open_and_close_all();
        h_mark(0);
        usleep(300000); /* the others check meanwhile whether this rank lives */
    }
    CALL(r->w, fsdp_barrier(r->w));
    step(&t);
}
TEST(descriptors, opened_and_closed_by_the_program) {
    lab_how how = {"looks", 1, 0, 0, 0, NULL, NULL};
    lab_run(3, &how, looks_at_its_files, NULL);
}

/* Rank 1 closes descriptors that it has not opened, and opens its own files with their numbers. */
enum { OWN = 64, OWN_NBYTES = 70000 };
static void closes_all(lab_rank *r) {
    const int puts_own = *(const int *)r->arg;
    int own[OWN], count = 0;
    char name[400];
    training t = begin(r);
    step(&t);
    CALL(r->w, fsdp_barrier(r->w));
    if (r->rank == 1) {
        for (int fd = 3; fd < 256; fd++) close(fd);
        snprintf(name, sizeof name, "%s/own", h_tmpdir());
        for (; puts_own && count < OWN; count++) {
            char data[256];
            own[count] = open(name, O_RDWR | O_CREAT | O_EXCL, 0600);
            CHECK(own[count] >= 0 && !unlink(name));
            memset(data, 'a' + count % 26, sizeof data);
            for (int i = 0; i < OWN_NBYTES; i += (int)sizeof data)
                CHECK_EQ_INT(write(own[count], data, sizeof data), sizeof data);
        }
    }
    /* Existing objects may work or not; new ones get a status on all ranks. */
    fsdp_status status = fsdp_barrier(r->w);
    fsdp_model *second = NULL;
    fsdp_unit *unit = NULL;
    const fsdp_param_desc p = fsdp_mat("second", 512, 512);
    fsdp_unit_desc d = FSDP_ZERO;
    d.params = &p, d.num_params = 1;
    if (!status) status = fsdp_model_create(r->w, NULL, &second);
    if (!status) status = fsdp_fully_shard(second, &d, &unit);
    if (!status) status = fsdp_init_params(second, zeros, NULL);
    if (!status) status = fsdp_pre_forward(unit);
    CHECK_MSG(status, "the library did not miss its descriptors");
    if (r->rank == 1 && over("shm"))
        CHECK_MSG(strstr(fsdp_last_error(r->w), "the program has closed the library's descriptor"),
                  "%s", fsdp_last_error(r->w));
    (void)fsdp_shutdown(r->w);
    r->w = NULL;
    for (int k = 0; k < count; k++) {
        struct stat st;
        char data;
        CHECK_MSG(!fstat(own[k], &st), "the library has closed a file of the program");
        CHECK(st.st_size >= OWN_NBYTES);
        for (int i = 0; i < OWN_NBYTES; i += 1000) {
            CHECK_EQ_INT(pread(own[k], &data, 1, i), 1);
            CHECK_EQ_INT(data, 'a' + k % 26);
        }
        close(own[k]);
    }
}
static const struct {
    const char *name;
    int puts_own;
} closes[] = {{"closed", 0}, {"replaced", 1}};
TEST_P(descriptors, closed_by_the_program, closes) {
    if (!over("shm")) SKIP("Gloo ends a process that closes its descriptors");
    lab_how how = {"closes", 1, 0, 0, 0, NULL, NULL};
    lab_run(3, &how, closes_all, (void *)(uintptr_t)&row->puts_own);
}

/* ---- forks ----------------------------------------------------------------------------------- */

#define no_rank(status, w) is_no_rank(__LINE__, status, w)
static void is_no_rank(int line, fsdp_status status, const fsdp_world *w) {
    CHECK_MSG(status == FSDP_ERR_INVALID_STATE, "line %d: %s", line, fsdp_status_name(status));
    CHECK_MSG(strstr(fsdp_last_error(w), "is a child that the rank's process has forked"), "%s",
              fsdp_last_error(w));
}
static void await_child(pid_t child) {
    int how = -1;
    CHECK_EQ_INT(waitpid(child, &how, 0), child);
    CHECK_MSG(how == 0, "the child has ended with %#x", how);
}
static __thread int destroyed;
static void count_destroyed(void *user) {
    (void)user;
    destroyed++;
}
enum { BUF_NBYTES = 1 << 16 };
static void in_the_child(training *t, fsdp_adamw *adamw, fsdp_checkpoint *ck,
                         const fsdp_extension *extension, fsdp_buf *buf) {
    fsdp_world *w = t->r->w;
    fsdp_model *second;
    double x = 1;
    fsdp_abort(w, "a child is no rank");
    no_rank(fsdp_all_reduce(w, NULL, &x, 1, FSDP_F64, FSDP_SUM), w);
    no_rank(fsdp_barrier(w), w);
    no_rank(fsdp_pre_forward(t->unit), w);
    no_rank(fsdp_finalize_backward(t->model), w);
    no_rank(fsdp_model_create(w, NULL, &second), w);
    no_rank(fsdp_model_commit(t->model), w);
    no_rank(fsdp_adamw_step(adamw, 1e-3), w);
    no_rank(fsdp_checkpoint_wait(ck), w); /* its save is under way */
    no_rank(fsdp_checkpoint_save(ck, h_tmpdir(), 7), w);
    no_rank(fsdp_detach(t->model, extension), w);
    fsdp_buf_destroy(t->model, buf); /* waits for the worker threads, in the parent only */
    fsdp_checkpoint_destroy(ck);
    fsdp_adamw_destroy(adamw);
    fsdp_model_destroy(t->model);
    no_rank(fsdp_shutdown(w), w);
    CHECK_EQ_INT(destroyed, 0);
    CHECK_EQ_INT(fsdp_rank(w), t->r->rank);
    _exit(0);
}
/* Rank 0 forks while its worker thread waits for the others, and while nothing is under way. */
static void forks(lab_rank *r) {
    training t = begin(r);
    fsdp_adamw *adamw;
    fsdp_checkpoint *ck;
    fsdp_buf *buf;
    fsdp_extension extension = FSDP_ZERO;
    extension.destroy = count_destroyed;
    CALL(r->w, fsdp_attach(t.model, &extension));
    CALL(r->w, fsdp_buf_create(t.model, FSDP_POOL_SCRATCH, FSDP_MEMORY_DEVICE, BUF_NBYTES, &buf));
    memset(fsdp_buf_ptr(buf), 'x', BUF_NBYTES);
    CALL(r->w, fsdp_adamw_create(t.model, NULL, &adamw));
    CALL(r->w, fsdp_checkpoint_create(t.model, NULL, &ck));
    for (int busy = 0; busy < 2; busy++) {
        step(&t);
        const int is_async = r->start->how.lanes > 0 && !over("nccl"); /* nccl's calls may wait */
        CALL(r->w, fsdp_checkpoint_save_async(ck, h_tmpdir(), busy));
        if (busy && r->rank && is_async) h_await_marks(0, 1);
        if (busy && is_async) CALL(r->w, fsdp_unshard(t.unit));
        if (r->rank == 0) {
            const pid_t child = fork();
            CHECK(child >= 0);
            if (child == 0) in_the_child(&t, adamw, ck, &extension, buf);
            await_child(child);
            for (int i = 0; i < BUF_NBYTES; i++) CHECK_EQ_INT(((char *)fsdp_buf_ptr(buf))[i], 'x');
        }
        if (busy && r->rank == 0) h_mark(0);
        CALL(r->w, fsdp_checkpoint_wait(ck));
        step(&t);
    }
    CALL(r->w, fsdp_barrier(r->w));
    fsdp_buf_destroy(t.model, buf);
    CHECK_EQ_INT(destroyed, 0);
    fsdp_model_destroy(t.model);
    CHECK_EQ_INT(destroyed, 1);
}
static const struct {
    const char *name;
    int processes, lanes, refused; /* refused: the kernel knows no MADV_WIPEONFORK */
} ranks[] = {{"processes/inline", 1, 0, 0},
             {"processes/lanes=1", 1, 1, 0},
             {"processes/lanes=2", 1, 2, 0},
             {"processes/lanes=1/no_wipe", 1, 1, 1},
             {"threads/inline", 0, 0, 0},
             {"threads/lanes=2", 0, 2, 0},
             {"threads/inline/no_wipe", 0, 0, 1}};
static int refuses_wipes, wipes;
int madvise(void *at, size_t nbytes, int advice) {
    const int is_wipe = advice == 18; /* MADV_WIPEONFORK */
    wipes += is_wipe;
    if (is_wipe && refuses_wipes) return errno = EINVAL, -1;
    return (int)syscall(SYS_madvise, at, nbytes, advice);
}
static void forks_counted(lab_rank *r) {
    CHECK_MSG(wipes > 0, "the library no longer calls madvise: this test refuses nothing");
    forks(r);
}
TEST_P(forks, child_is_no_rank, ranks, NCCL) {
    lab_how how = {"forks", row->processes, row->lanes, 0, 0, NULL, NULL};
    refuses_wipes = row->refused;
    lab_run(2, &how, forks_counted, NULL);
}

/* A child logs the reason once. */
static int said;
static void count_logs(int level, fsdp_status code, int rank, const char *text, void *user) {
    (void)level, (void)rank, (void)user;
    said += code == FSDP_ERR_INVALID_STATE && strstr(text, "has forked") != NULL;
}
static void logs(lab_rank *r) {
    fsdp_world_desc d = w_desc(r->rank, r->size, NULL, w_job("logs"), 0);
    fsdp_world *w;
    d.logger.log = count_logs;
    CALL(NULL, fsdp_init(&d, &w));
    const pid_t child = fork();
    CHECK(child >= 0);
    if (child == 0) {
        for (int i = 0; i < 3; i++) no_rank(fsdp_barrier(w), w);
        no_rank(fsdp_shutdown(w), w);
        CHECK_EQ_INT(said, 1);
        _exit(0);
    }
    await_child(child);
    CALL(w, fsdp_barrier(w));
    CALL(NULL, fsdp_shutdown(w));
    CHECK_EQ_INT(said, 0);
}
TEST(forks, child_says_so_once, NCCL) {
    lab_how how = {"logs", 1, 0, 1, 0, NULL, NULL};
    lab_run(2, &how, logs, NULL);
}

static void orphans(lab_rank *r) {
    int *child = (int *)r->arg; /* in shared memory */
    CALL(r->w, fsdp_barrier(r->w));
    if (r->rank == 1) {
        const pid_t pid = fork();
        CHECK(pid >= 0);
        while (pid == 0) pause();
        *child = (int)pid;
        h_die(SIGKILL);
    }
    const int64_t start = h_calm_ms();
    CHECK_STATUS(fsdp_barrier(r->w), FSDP_ERR_PEER_LOST);
    CHECK_MSG(strstr(fsdp_last_error(r->w), "rank 1 "), "%s", fsdp_last_error(r->w));
    CHECK(h_calm_ms() - start < 10000); /* the deadline is 30 s */
}
TEST(forks, child_that_outlives_the_rank, NCCL) {
    if (!over("shm")) SKIP("a child keeps the rank's connections open: the deadline tells");
    lab_how how = {"orphans", 1, 0, 0, 0, NULL, NULL};
    int *child = (int *)mmap(NULL, sizeof *child, PROT_READ | PROT_WRITE,
                             MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    CHECK(child != (int *)MAP_FAILED);
    lab_run(3, &how, orphans, child);
    CHECK_EQ_INT(kill(*child, SIGKILL), 0); /* the child lived the whole time */
}

/* ---- file systems and memory that are full --------------------------------------------------- */

/* Makes a mount namespace in which /dev/shm and /tmp have one page each, which is in use. */
static const char *fill_places(void) {
    static const char *const places[] = {"/dev/shm", "/tmp"};
    char name[40], page[4096] = "";
    if (unshare(CLONE_NEWNS) || mount("none", "/", NULL, MS_REC | MS_PRIVATE, NULL))
        return "mount namespaces are not permitted here";
    for (int i = 0; i < 2; i++) {
        if (mount("tiny", places[i], "tmpfs", 0, "size=4k")) return "no tmpfs can be mounted here";
        snprintf(name, sizeof name, "%s/page", places[i]);
        const int fd = open(name, O_WRONLY | O_CREAT, 0600);
        CHECK(fd >= 0 && write(fd, page, sizeof page) == sizeof page);
        CHECK(write(fd, page, 1) == -1 && errno == ENOSPC);
        close(fd);
    }
    return NULL;
}
static void trains_in_full_places(lab_rank *r) {
    const char *why = fill_places();
    if (why) SKIP(why);
    r->w = lab_world(r, 0, 0, NULL);
    training t = begin(r);
    for (int i = 0; i < 3; i++) step(&t);
}
TEST(places, full, SLOW) {
    lab_how how = {"places", 1, 0, 1, 0, NULL, NULL};
    lab_run(2, &how, trains_in_full_places, NULL);
}

/* Makes a control group of 64 MiB, version 1 or 2; "" if that fails. */
static char group_dir[128];
static int write_to(const char *name, long long value) {
    char path[200], text[32];
    snprintf(path, sizeof path, "%s/%s", group_dir, name);
    const int fd = open(path, O_WRONLY), length = snprintf(text, sizeof text, "%lld", value);
    const int done = fd >= 0 && write(fd, text, (size_t)length) == length;
    if (fd >= 0) close(fd);
    return done;
}
static int make_group(void) {
    static const char *const roots[] = {"/sys/fs/cgroup/memory", "/sys/fs/cgroup"};
    static const char *const limits[] = {"memory.limit_in_bytes", "memory.max"};
    for (int kind = 0; kind < 2; kind++) {
        snprintf(group_dir, sizeof group_dir, "%s/fsdp-test-%d", roots[kind], (int)getpid());
        if (!mkdir(group_dir, 0700) && write_to(limits[kind], 64 << 20)) return 1;
        rmdir(group_dir);
    }
    return 0;
}
/* Allocates more than the group allows, in steps: all ranks get a status, and none is killed. */
static void grows(lab_rank *r) {
    if (!write_to("cgroup.procs", getpid())) SKIP("this process cannot move to a control group");
    r->w = lab_world(r, 0, 0, NULL);
    fsdp_model *model = lab_model(r->w, NULL);
    fsdp_status status = FSDP_OK;
    fsdp_buf *buf;
    int units = 0;
    CALL(r->w, fsdp_barrier(r->w)); /* at the same time: there is enough for one of them */
    CHECK_STATUS(fsdp_buf_create(model, FSDP_POOL_SCRATCH, FSDP_MEMORY_DEVICE, 40 << 20, &buf),
                 FSDP_ERR_OUT_OF_MEMORY);
    for (; units < 64 && !status; units++) {
        const fsdp_param_desc p = fsdp_mat("w", 1024, 1024);
        fsdp_unit_desc d = FSDP_ZERO;
        fsdp_unit *unit;
        d.params = &p, d.num_params = 1;
        status = fsdp_model_create(r->w, NULL, &model);
        if (!status) status = fsdp_fully_shard(model, &d, &unit);
        if (!status) status = fsdp_init_params(model, zeros, NULL);
        if (!status) status = fsdp_pre_forward(unit);
    }
    CHECK_STATUS(status, FSDP_ERR_OUT_OF_MEMORY);
    CHECK_MSG(units > 1, "%s", fsdp_last_error(r->w));
    CHECK_MSG(strstr(fsdp_last_error(r->w), "control group"), "%s", fsdp_last_error(r->w));
    if (r->rank == 0) h_message("refused at unit %d of 4 MiB", units);
}
TEST(places, control_group, SLOW) {
    lab_how how = {"group", 1, 0, 1, 0, NULL, NULL};
    if (!over("shm")) SKIP("other backends leave memory to malloc");
    if (!make_group()) SKIP("no control group can be made here");
    const pid_t test = fork(); /* its parent removes the group */
    int end;
    CHECK(test >= 0);
    if (test == 0) {
        lab_run(2, &how, grows, NULL);
        _exit(0);
    }
    CHECK_EQ_INT(waitpid(test, &end, 0), test);
    CHECK_EQ_INT(rmdir(group_dir), 0);
    if (WIFEXITED(end) && WEXITSTATUS(end) == H_EXIT_SKIPPED) _exit(H_EXIT_SKIPPED);
    CHECK_MSG(end == 0, "%#x", end);
}

/* ---- threads that end, libraries that are unloaded ------------------------------------------- */

static int ends_its_thread(fsdp_world *world, void *arg) {
    if (fsdp_rank(world) == 1) pthread_exit(NULL);
    const fsdp_status status = fsdp_barrier(world);
    if (strstr(fsdp_last_error(world), "[E517] rank 1 has ended its thread"))
        __atomic_add_fetch((int *)arg, 1, __ATOMIC_SEQ_CST);
    return (int)status;
}
TEST(threads, rank_that_ends_its_thread) {
    fsdp_world_desc world = FSDP_ZERO;
    fsdp_spawn_desc d = FSDP_ZERO;
    const int64_t start = h_calm_ms();
    world.timeout_ms = 30000, world.logger.log = w_quiet;
    int heard = 0;
    d.num_ranks = 3, d.threads = 1, d.world = &world;
    CHECK_STATUS(fsdp_spawn(&d, ends_its_thread, &heard), FSDP_ERR_PEER_LOST);
    CHECK_EQ_INT(heard, 2);
    CHECK_MSG(strstr(fsdp_last_error(NULL), "rank 1 has ended its thread"), "%s",
              fsdp_last_error(NULL));
    CHECK(h_calm_ms() - start < 10000);
}

static int is_mapped(const char *name) {
    char line[512];
    int n = 0;
    FILE *f = fopen("/proc/self/maps", "r");
    CHECK(f != NULL);
    while (fgets(line, sizeof line, f)) n += strstr(line, name) != NULL;
    fclose(f);
    return n;
}
typedef fsdp_status (*init_fn)(const fsdp_world_desc *, fsdp_world **);
typedef fsdp_status (*shutdown_fn)(fsdp_world *);
TEST(threads, library_is_unloaded_under_them, NO(GLOO)) {
    char path[300];
    fsdp_world_desc d = w_desc(0, 1, NULL, w_job("unloaded"), 1);
    d.backend = "shm"; /* the only backend in that library */
    fsdp_world *w = NULL;
    void *init, *shutdown_too;
    init_fn begin_world;
    shutdown_fn end_world;
    snprintf(path, sizeof path, "%s/libfsdp.so", getenv("FSDP_BUILD") ? getenv("FSDP_BUILD") : ".");
    if (access(path, R_OK)) SKIP("no libfsdp.so in FSDP_BUILD: make lib");
    void *lib = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    CHECK_MSG(lib != NULL, "%s", dlerror());
    init = dlsym(lib, "fsdp_init"), shutdown_too = dlsym(lib, "fsdp_shutdown");
    memcpy(&begin_world, &init, sizeof init);
    memcpy(&end_world, &shutdown_too, sizeof init);
    CHECK_OK(begin_world(&d, &w));
    CHECK_OK(dlclose(lib));
    CHECK(is_mapped("libfsdp.so")); /* its worker thread needs it */
    usleep(200000);                 /* the worker thread wakes up now and then */
    CHECK_OK(end_world(w));
}
