/* test_checkpoint_faults.c - checkpoints while files fail: every file call of every rank in turn
   fails, comes short, waits, hangs, or is the last of its process; the power is cut after any of
   them; the disk is full; bytes of the files change; memory runs out; ranks die, stop or stay away.
   Each time all ranks must get one status and a text that names the culprit, and the old or the new
   checkpoint must be found, with the saved values bit by bit.

   SPDX-License-Identifier: MIT */
#define TAGS SLOW | AT_NIGHT(ASAN)
#include "harness.h"
#include <sched.h>     /* unshare */
#include <sys/mount.h> /* mount */
#include "lab.h"
#include "disk.h"
#include "fsdp_checkpoint.h"
#include "fsdp_optim.h"
#include "fuzz_checkpoint.c"

enum { MOST = 3, COMMON = 24, OWN = 8, TEXT = 1100 };

/* ---- a rank with a model whose values follow from a formula ---------------------------------- */

typedef struct counter { /* counts the collectives that a rank begins */
    lab_guard guard;
    int count, marks;
} counter;
typedef struct bed bed;
typedef struct stage { /* data that the ranks of a test share */
    disk *d;
    bed *beds[MOST];
    int status[MOST];
    char text[MOST][TEXT];
    int tries, faults; /* calls with a fault; those in which it happened */
    int gate;          /* 1: hung calls may return */
    const void *row;
} stage;
struct bed { /* one rank */
    stage *all;
    counter meets;
    fsdp_comm_ops comm_ops;
    fsdp_world *w;
    fsdp_model *model;
    fsdp_checkpoint *ck;
    shake s;
    int rank, size, timeout_ms;
    int system;   /* the library's own file calls */
    int64_t rows; /* in the large parameter; 0: there is none */
    const fsdp_allocator *allocator;
    char dir[400];
    unsigned char common[COMMON], own[OWN];
};

static fsdp_status count_coll(lab_guard *g, const fsdp_group *group, const fsdp_coll *coll) {
    counter *c = (counter *)(void *)g;
    (void)group;
    if (coll) __atomic_add_fetch(&c->count, 1, __ATOMIC_SEQ_CST);
    if (coll && c->marks) h_mark(c->marks);
    return FSDP_OK;
}
static int count_of(const bed *b) { return __atomic_load_n(&b->meets.count, __ATOMIC_SEQ_CST); }

static void bed_world(bed *b, lab_rank *r, int number) {
    fsdp_world_desc d = w_desc(r->rank, r->size,
                               r->start->how.processes ? NULL : &r->start->threads[number],
                               w_job("ckfaults"), 0);
    b->meets.guard.before = count_coll;
    b->comm_ops = lab_guard_ops();
    d.allocator = b->allocator ? *b->allocator : w_heap_allocator(r->heap);
    d.comm_ops = &b->comm_ops;
    d.user = &b->meets.guard;
    if (b->timeout_ms) d.timeout_ms = b->timeout_ms;
    CALL(NULL, fsdp_init(&d, &b->w));
    b->rank = r->rank, b->size = r->size;
}
/* Makes parameters: rows over ranks, a single element, a frozen one, and a large one on request. */
static void bed_model(bed *b) {
    const int64_t w[2] = {5, 3}, n[1] = {1}, v[1] = {3};
    fsdp_param_desc p[3] = {lab_desc(2, w, 0, FSDP_F32, 0), lab_desc(1, n, 0, FSDP_F32, 0),
                            lab_desc(1, &b->rows, 0, FSDP_F32, 1)};
    fsdp_param_desc q = lab_desc(1, v, 0, FSDP_BF16, 1);
    fsdp_unit_desc like = FSDP_ZERO;
    fsdp_adamw *opt;
    p[0].name = "w", p[1].name = "n", p[2].name = "large", q.name = "v";
    b->model = lab_model(b->w, NULL);
    like.name = "a";
    lab_unit(b->w, b->model, &like, p, b->rows ? 3 : 2);
    like.name = "b";
    lab_unit(b->w, b->model, &like, &q, 1);
    CALL(b->w, fsdp_adamw_create(b->model, NULL, &opt));
}
static fsdp_status bed_create(bed *b, const fsdp_checkpoint_desc *like) {
    fsdp_checkpoint_desc d = FSDP_ZERO;
    fsdp_checkpoint_blob blobs[2] = {{"common", b->common, COMMON, 0, 0},
                                     {"own", b->own, OWN, 1, 0}};
    if (like) d = *like;
    d.blobs = blobs, d.num_blobs = 2;
    if (!b->system) d.files = &shake_ops, d.files_user = &b->s;
    return fsdp_checkpoint_create(b->model, &d, &b->ck);
}
static void bed_open(bed *b, lab_rank *r, stage *all, int number,
                     const fsdp_checkpoint_desc *like) {
    b->all = all;
    all->beds[r->rank] = b;
    if (!b->s.real) shake_init(&b->s, &disk_ops, all->d, r->rank);
    if (!b->dir[0]) snprintf(b->dir, sizeof b->dir, "run");
    bed_world(b, r, number);
    bed_model(b);
    CALL(b->w, bed_create(b, like));
}
static void bed_close(bed *b) {
    fsdp_checkpoint_destroy(b->ck);
    CHECK_OK(fsdp_shutdown(b->w));
    CHECK_EQ_INT(b->s.files, 0);
}
static void meet(const bed *b) { CALL(b->w, fsdp_barrier(b->w)); }

/* Writes the elements of this rank's rows, or returns the number of wrong ones. */
static int64_t numbers(void *data, fsdp_dtype dtype, const fsdp_param_view *v, int64_t numel,
                       uint64_t salt, int write) {
    size_t size = fsdp_dtype_size(dtype);
    int64_t wrong = 0;
    for (int64_t k = 0; k < numel; k++) {
        uint64_t bits = lab_hash(salt, (uint64_t)fsdp_view_index(v, k), 3, 1);
        char *at = (char *)data + (size_t)k * size;
        if (write) memcpy(at, &bits, size);
        else wrong += memcmp(at, &bits, size) != 0;
    }
    return wrong;
}
static int64_t bytes(unsigned char *at, int count, uint64_t salt, int write) {
    int64_t wrong = 0;
    for (int i = 0; i < count; i++) {
        unsigned char x = (unsigned char)lab_hash(salt, (uint64_t)i, 5, 2);
        if (write) at[i] = x;
        else wrong += at[i] != x;
    }
    return wrong;
}
/* Writes or checks everything that a checkpoint has of this rank, by a seed. other_world: blobs of
   ranks are not loaded. */
static int64_t values(bed *b, int64_t seed, int write, int other_world) {
    fsdp_param_view v = FSDP_ZERO, of[4];
    fsdp_state_item item;
    uint64_t s = (uint64_t)seed;
    int64_t wrong = 0;
    while (fsdp_next_param(b->model, &v)) {
        of[v.ordinal] = v;
        wrong += numbers(v.shard, v.dtype, &v, v.numel, lab_hash(s, (uint64_t)v.ordinal, 0, 0),
                         write);
    }
    memset(&item, 0, sizeof item);
    CALL(b->w, fsdp_next_state(b->model, &item));
    while (item.name) {
        uint64_t salt = lab_hash(s, (uint64_t)item.ordinal, 1, 0);
        lab_fold(&salt, item.name, strlen(item.name));
        if (item.sharded) {
            wrong += numbers(item.data, item.dtype, &of[item.ordinal], item.numel, salt, write);
        } else {
            CHECK(item.dtype == FSDP_I64 && item.numel == 1);
            if (write) *(int64_t *)item.data = (int64_t)(salt >> 40);
            else wrong += *(const int64_t *)item.data != (int64_t)(salt >> 40);
        }
        CALL(b->w, fsdp_next_state(b->model, &item));
    }
    wrong += bytes(b->common, COMMON, lab_hash(s, 7, 7, 7), write);
    if (write || !other_world)
        wrong += bytes(b->own, OWN, lab_hash(s, 8, (uint64_t)b->rank, 8), write);
    if (!write) return wrong;
    CALL(b->w, fsdp_state_loaded(b->model));
    CALL(b->w, fsdp_params_changed(b->model));
    return 0;
}
static void scramble(bed *b) { (void)values(b, -77, 1, 0); }

static int64_t find(bed *b, char path[FSDP_CHECKPOINT_PATH]) {
    int64_t step = -2;
    CALL(b->w, fsdp_checkpoint_find(b->ck, b->dir, -1, path, FSDP_CHECKPOINT_PATH, &step));
    return step;
}
/* Checks that the newest checkpoint is this one (-1: there is none), with its values. */
static void has(bed *b, int64_t step) {
    char path[FSDP_CHECKPOINT_PATH];
    fsdp_checkpoint_report report;
    int64_t found = find(b, path);
    W_CHECK(found == step, "found step %lld, expected %lld", (long long)found, (long long)step);
    if (step < 0) return;
    scramble(b);
    CALL(b->w, fsdp_checkpoint_load(b->ck, path, NULL));
    int64_t wrong = values(b, step, 0, 0);
    W_CHECK(!wrong, "%lld numbers of step %lld are wrong", (long long)wrong, (long long)step);
    CALL(b->w, fsdp_checkpoint_last_report(b->ck, &report));
    CHECK_EQ_INT(report.step, step);
    CHECK_EQ_INT(report.verified, 1);
}

/* ---- every file call fails, comes short, or waits -------------------------------------------- */

enum { SAVE, ASYNC, FIRST, KEEP, LOAD, FIND, EXPORT };
static const char *const op_names[] = {"save", "save_async", "first save", "keep",
                                       "load", "find",       "export_model"};
typedef struct fault {
    int kind, error;
} fault;
static const fault faults[] = {
    {SHAKE_ERROR, ENOSPC}, {SHAKE_ERROR, EIO},    {SHAKE_ERROR, EINTR},
    {SHAKE_SHORT_1, 0},    {SHAKE_SHORT_HALF, 0}, {SHAKE_SHORT_ALL_BUT_1, 0},
    {SHAKE_ZERO, 0},       {SHAKE_DEAD, EIO},     {SHAKE_WAIT, 0}};
enum { NUM_FAULTS = (int)(sizeof faults / sizeof *faults) };

typedef struct calls_row {
    const char *name;
    int op, size, all; /* all: every fault at every call */
    int64_t stage_bytes;
} calls_row;

/* A file call takes long: until every other rank has run three more collectives. */
static void slow_event(shake *s) {
    stage *all = (stage *)s->arg;
    int begin[MOST];
    long ns = 0;
    for (int r = 0; r < MOST; r++) begin[r] = all->beds[r] ? count_of(all->beds[r]) : 0;
    for (int r = 0; r < MOST; r++)
        while (all->beds[r] && r != s->rank && count_of(all->beds[r]) < begin[r] + 3) h_nap(&ns);
}

static const char *export_path(const bed *b, char out[FSDP_CHECKPOINT_PATH]) {
    snprintf(out, FSDP_CHECKPOINT_PATH, "%s/out%d", b->dir, b->all->tries);
    return out;
}
/* Checks that an export is whole or not there. */
static void has_export(bed *b, int64_t step, int is_there) {
    fsdp_checkpoint_load_desc d = FSDP_ZERO;
    char path[FSDP_CHECKPOINT_PATH];
    fsdp_param_view v = FSDP_ZERO;
    d.params_only = 1;
    W_CHECK((disk_node_at(b->all->d, export_path(b, path)) >= 0) == is_there, "%.400s: expected %d",
            path, is_there);
    if (!is_there) return;
    scramble(b);
    CALL(b->w, fsdp_checkpoint_load(b->ck, path, &d));
    while (fsdp_next_param(b->model, &v))
        W_CHECK(!numbers(v.shard, v.dtype, &v, v.numel,
                         lab_hash((uint64_t)step, (uint64_t)v.ordinal, 0, 0), 0),
                "%.400s: parameter %d is wrong", path, v.ordinal);
}

static fsdp_status call_op(bed *b, int op, int64_t step) {
    static const fsdp_checkpoint_text text = {"config.json", "{}", 2};
    fsdp_checkpoint_export_desc desc = FSDP_ZERO;
    char path[FSDP_CHECKPOINT_PATH];
    int64_t found;
    fsdp_status status;
    desc.texts = &text, desc.num_texts = 1;
    switch (op) {
    case LOAD:
        snprintf(path, sizeof path, "%s/step-%08lld", b->dir, (long long)step);
        return fsdp_checkpoint_load(b->ck, path, NULL);
    case FIND: return fsdp_checkpoint_find(b->ck, b->dir, -1, path, sizeof path, &found);
    case EXPORT:
        return fsdp_checkpoint_export_model(b->ck, export_path(b, path), &desc);
    case ASYNC:
        status = fsdp_checkpoint_save_async(b->ck, b->dir, step);
        if (status) return status;
        scramble(b); /* the trainer continues */
        return fsdp_checkpoint_wait(b->ck);
    default: return fsdp_checkpoint_save(b->ck, b->dir, step);
    }
}

/* Returns 1 if the call succeeds nevertheless. */
static int is_survived(const shake *s, int op) {
    static const char *const again[] = {"create", "open",  "read",
                                        "write",  "fsync", "fsync of the directory"};
    int interrupted = s->kind == SHAKE_ERROR && s->error == EINTR, repeated = 0;
    for (int i = 0; i < 6; i++) repeated |= !strcmp(s->call, again[i]);
    const int committed = s->committed && op != EXPORT; /* which syncs the parent, too */
    return s->fired == 2 || committed || (interrupted && repeated) || s->kind == SHAKE_WAIT ||
           (s->kind >= SHAKE_SHORT_1 && s->kind <= SHAKE_SHORT_ALL_BUT_1);
}

/* Checks that all ranks have the same status, and texts with the rank, the call and the file. */
static void check_texts(const bed *b, const shake *s, fsdp_status expected) {
    char who[24];
    const stage *all = b->all;
    snprintf(who, sizeof who, "rank %d", s->rank);
    for (int r = 0; r < b->size; r++) {
        W_CHECK(all->status[r] == (int)expected, "rank %d got %s, expected %s: %s", r,
                fsdp_status_name((fsdp_status)all->status[r]), fsdp_status_name(expected),
                all->text[r]);
        if (!expected) continue;
        W_CHECK(strstr(all->text[r], who), "rank %d does not name %s: %s", r, who, all->text[r]);
        W_CHECK(strstr(all->text[r], s->path), "rank %d does not name %.200s: %s", r, s->path,
                all->text[r]);
        W_CHECK(expected == FSDP_ERR_CORRUPT || strstr(all->text[r], s->call),
                "rank %d does not name %s: %s", r, s->call, all->text[r]);
    }
}
static void drop_leftovers(disk *d, const char *dir) {
    int node = disk_node_at(d, dir);
    for (int i = 0; node >= 0 && i < d->nodes[node].num;)
        if (d->nodes[node].entries[i].name[0] != '.') i++;
        else disk_drop_name(d, node, d->nodes[node].entries[i].name);
}

/* Makes one call in which file call number `at` of a rank has a fault, then the same call without.
   Returns the number of file calls of that rank. */
static int attempt(bed *b, int op, int rank, int at, const fault *f, int64_t *last) {
    stage *all = b->all;
    shake *s = &all->beds[rank]->s;
    const int saves = op <= KEEP;
    int64_t step = saves ? *last + 1 : *last;
    snprintf(w_case, sizeof w_case, "%s, call %d of rank %d, fault %d (%s)", op_names[op], at, rank,
             f->kind, strerror(f->error));
    if (op == FIRST) {
        snprintf(b->dir, sizeof b->dir, "run%d", all->tries);
        step = 0, *last = -1;
    }
    if (saves || op == EXPORT) (void)values(b, step, 1, 0);
    else scramble(b);
    meet(b);
    shake_arm(&b->s, b->rank == rank ? at : -1, f->kind, f->error);
    all->status[b->rank] = (int)call_op(b, op, step);
    snprintf(all->text[b->rank], TEXT, "%s", fsdp_last_error(b->w));
    shake_off(&b->s);
    CHECK_EQ_INT(b->s.files, 0);
    meet(b);
    const int ok = !s->fired || is_survived(s, op);
    int calls = s->calls;
    /* a truncated manifest counts as none */
    if (op == FIND && f->kind == SHAKE_ZERO && s->fired == 1) {
        check_texts(b, s, FSDP_OK);
    } else {
        check_texts(b, s,
                    ok                                    ? FSDP_OK
                    : f->kind == SHAKE_ZERO && op == LOAD ? FSDP_ERR_CORRUPT
                                                          : FSDP_ERR_IO);
    }
    if (saves && !(f->kind == SHAKE_DEAD && rank == 0) && !s->committed)
        CHECK_EQ_INT(disk_count(all->d, b->dir, ".tmp"), 0);
    meet(b);
    if (op == EXPORT && !(f->kind == SHAKE_DEAD && s->fired))
        has_export(b, step,
                   ok || (!strcmp(s->call, "fsync of the directory") && !strcmp(s->path, b->dir)));
    meet(b);
    if (b->rank == 0) all->tries++, all->faults += s->fired == 1;
    if (b->rank == 0 && op != KEEP) drop_leftovers(all->d, b->dir);
    meet(b);
    has(b, ok ? step : *last);
    if (!ok && saves) { /* the same call works as usual */
        (void)values(b, step, 1, 0);
        CALL(b->w, call_op(b, op, step));
        has(b, step);
    } else if (op == LOAD) {
        scramble(b);
        CALL(b->w, call_op(b, op, step));
        W_CHECK(!values(b, step, 0, 0), "wrong values");
    }
    *last = step;
    if (op == KEEP && s->committed) { /* it left something: the next save removes it */
        (void)values(b, ++*last, 1, 0);
        CALL(b->w, call_op(b, op, *last));
    }
    meet(b);
    if (op == KEEP) {
        CHECK_EQ_INT(disk_count(all->d, b->dir, "step-"), 2);
        CHECK_EQ_INT(disk_count(all->d, b->dir, ".tmp"), 0);
    }
    return calls;
}

static int is_chosen(const calls_row *row, int at, int fault_at) {
    if (row->all) return 1;
    if (faults[fault_at].kind == SHAKE_WAIT) return at % 6 == (int)(h_seed() % 6);
    return ((uint64_t)(at + fault_at) + h_seed()) % (faults[fault_at].kind == SHAKE_DEAD ? 2 : 4) ==
           0;
}
static void calls_body(lab_rank *r) {
    stage *all = (stage *)r->arg;
    const calls_row *row = (const calls_row *)all->row;
    const fault none = {SHAKE_NONE, 0};
    fsdp_checkpoint_desc d = FSDP_ZERO;
    bed b;
    int64_t last = -1;
    memset(&b, 0, sizeof b);
    if (row->op == KEEP) d.keep = 2;
    d.stage_bytes = row->stage_bytes;
    bed_open(&b, r, all, 0, &d);
    b.s.event = slow_event, b.s.arg = all;
    for (int64_t step = 0; step < 2; step++) { /* two older checkpoints */
        (void)values(&b, last = step, 1, 0);
        CALL(b.w, fsdp_checkpoint_save(b.ck, b.dir, step));
    }
    for (int rank = 0; rank < r->size; rank++) {
        int calls = attempt(&b, row->op, rank, 1 << 20, &none, &last);
        for (int f = 0; f < NUM_FAULTS; f++)
            for (int at = 0; at < calls; at++)
                if (is_chosen(row, at, f)) (void)attempt(&b, row->op, rank, at, &faults[f], &last);
    }
    bed_close(&b);
}
static void run_calls(const calls_row *row) {
    stage *all = (stage *)lab_zeros(1, sizeof *all);
    lab_how how;
    memset(&how, 0, sizeof how);
    how.bare = 1;
    all->d = disk_new();
    all->d->quiet = 1;
    all->row = row;
    lab_run(row->size, &how, calls_body, all);
    CHECK(all->faults > 0);
    h_message("%d calls with a file call that fails, comes short or waits: 0 wrong, 0 hangs, "
              "0 leaks",
              all->faults);
    disk_free(all->d);
    free(all);
}
static const calls_row some_calls[] = {{"save", SAVE, 2, 0, 0},
                                       {"save_async", ASYNC, 2, 0, 0},
                                       {"save_async_ring", ASYNC, 2, 0, 100},
                                       {"first", FIRST, 2, 0, 0},
                                       {"keep", KEEP, 2, 0, 0},
                                       {"load", LOAD, 2, 0, 0},
                                       {"find", FIND, 2, 0, 0},
                                       {"export_model", EXPORT, 2, 0, 0}};
TEST_P(checkpoint_faults, every_call, some_calls, ASAN) { run_calls(row); }
static const calls_row all_calls[] = {
    {"save/W=2", SAVE, 2, 1, 0},        {"save_async/W=2", ASYNC, 2, 1, 0},
    {"first/W=2", FIRST, 2, 1, 0},      {"keep/W=2", KEEP, 2, 1, 0},
    {"load/W=2", LOAD, 2, 1, 0},        {"find/W=2", FIND, 2, 1, 0},
    {"save/W=3", SAVE, 3, 1, 0},        {"save_async/W=3", ASYNC, 3, 1, 0},
    {"first/W=3", FIRST, 3, 1, 0},      {"keep/W=3", KEEP, 3, 1, 0},
    {"load/W=3", LOAD, 3, 1, 0},        {"find/W=3", FIND, 3, 1, 0},
    {"save_async_ring", ASYNC, 2, 1, 8}, {"export_model", EXPORT, 3, 1, 0}};
TEST_P(long_checkpoint_faults, every_call, all_calls, SECONDS(600) | NIGHT) { run_calls(row); }

/* ---- a file call that never returns ---------------------------------------------------------- */

/* Allocates separate pages: any access to freed memory ends the process by a signal. */
static size_t pages_of(size_t size) { return (size / 4096 + 1) * 4096; }
static void *paged_alloc(size_t size, size_t align, void *user) {
    (void)user;
    CHECK(align <= 4096);
    void *ptr = mmap(NULL, pages_of(size), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1,
                     0);
    if (ptr == MAP_FAILED) return NULL;
    memset(ptr, 0xa5, size);
    return ptr;
}
static void paged_free(void *ptr, size_t size, void *user) {
    (void)user;
    if (ptr) CHECK_EQ_INT(munmap(ptr, pages_of(size)), 0);
}
/* A list of memory that a thread may use until the end, for leak checkers. */
static void *kept[1 << 12];
static void keep(void *ptr) {
    static int num;
    int i = __atomic_fetch_add(&num, 1, __ATOMIC_SEQ_CST);
    CHECK(i < (1 << 12));
    kept[i] = ptr;
}

typedef struct stall_row {
    const char *name;
    int op, size, all;
} stall_row;

static void hang_event(shake *s) {
    stage *all = (stage *)s->arg;
    long ns = 0;
    while (!__atomic_load_n(&all->gate, __ATOMIC_SEQ_CST)) h_nap(&ns);
}
/* On a busy machine a call that does not hang may take too long as well: then it is slow, and the
   case is repeated with more time, finally with enough for any machine. */
enum { STALL_MS = 150, STALL_MOST_MS = 9600 };
typedef struct stall_case {
    stage all;
    int rank, at, calls, stall_ms, slow;
} stall_case;

/* Returns 1 if the texts are those of a hang in this call. */
static int stall_is_reported(const stall_case *c, int size) {
    const stage *all = &c->all;
    const shake *s = &all->beds[c->rank]->s;
    char who[24], told[40];
    int good = 1;
    snprintf(who, sizeof who, "rank %d", c->rank);
    snprintf(told, sizeof told, "no progress for %d ms", c->stall_ms);
    for (int q = 0; q < size && good; q++)
        good = !s->fired ? !all->status[q]
                         : all->status[q] == FSDP_ERR_IO && strstr(all->text[q], who) &&
                               strstr(all->text[q], told) &&
                               (s->committed ||
                                (strstr(all->text[q], s->call) && strstr(all->text[q], s->path)));
    return good;
}
/* The object reports the reason, and does not touch memory that the thread may use. */
static void stall_again(bed *b, const stall_case *c) {
    char path[FSDP_CHECKPOINT_PATH];
    int64_t found;
    REFUSED_AS(FSDP_ERR_IO, b->w, fsdp_checkpoint_save(b->ck, b->dir, 9), "no progress");
    REFUSED_AS(FSDP_ERR_IO, b->w,
               fsdp_checkpoint_find(b->ck, b->dir, -1, path, sizeof path, &found), "no progress");
    REFUSED_AS(FSDP_ERR_IO, b->w, fsdp_checkpoint_load(b->ck, "run/step-00000000", NULL),
               "no progress");
    if (b->rank == c->rank) CHECK_EQ_INT(fsdp_checkpoint_nbytes(b->ck), -1);
}
static void stall_body(lab_rank *r) {
    stall_case *c = (stall_case *)r->arg;
    stage *all = &c->all;
    const stall_row *row = (const stall_row *)all->row;
    fsdp_checkpoint_desc d = FSDP_ZERO;
    fsdp_allocator keeps = FSDP_ZERO;
    bed *b = (bed *)lab_zeros(1, sizeof *b); /* a thread may use it after the end of the test */
    keep(b);
    keeps.alloc = paged_alloc, keeps.free = paged_free;
    b->allocator = &keeps;
    if (row->op == KEEP) d.keep = 1;
    d.stall_ms = c->stall_ms;
    bed_open(b, r, all, 0, &d);
    b->s.event = hang_event, b->s.arg = all;
    (void)values(b, 0, 1, 0);
    if (fsdp_checkpoint_save(b->ck, b->dir, 0)) c->slow = 1;
    meet(b);
    if (!c->slow) {
        if (row->op <= KEEP) (void)values(b, 1, 1, 0);
        meet(b);
        const int kind = (c->at + 1) % (row->op <= KEEP ? 3 : 2); /* the way in which it returns */
        shake_arm(&b->s, b->rank == c->rank ? c->at : -1, kind == 2 ? SHAKE_WAIT : SHAKE_HANG,
                  kind ? 0 : EIO);
        all->status[b->rank] = (int)call_op(b, row->op, row->op <= KEEP ? 1 : 0);
        snprintf(all->text[b->rank], TEXT, "%s", fsdp_last_error(b->w));
        if (c->rank == b->rank) c->calls = b->s.calls;
        meet(b);
        const int told = stall_is_reported(c, b->size);
        W_CHECK(told || c->stall_ms < STALL_MOST_MS, "%s of %.200s: %s", all->beds[c->rank]->s.call,
                all->beds[c->rank]->s.path, all->text[b->rank]);
        if (told && all->beds[c->rank]->s.fired) stall_again(b, c);
        meet(b);
        if (!told) c->slow = 1;
    }
    CHECK_OK(fsdp_shutdown(b->w)); /* destroys the model, and with it the object */
    if (__atomic_add_fetch(&all->tries, 1, __ATOMIC_SEQ_CST) == r->size) /* all have ended */
        __atomic_store_n(&all->gate, 1, __ATOMIC_SEQ_CST);
}

/* Runs one hang in a process with its own threads. Returns the number of file calls of the rank. */
static int stall(const stall_row *row, int rank, int at, int *fired) {
    const int threads = h_entries("/proc/self/task");
    for (int ms = STALL_MS;; ms *= 4) {
        stall_case *c = (stall_case *)lab_zeros(1, sizeof *c);
        lab_how how;
        long ns = 0;
        snprintf(w_case, sizeof w_case, "%s: call %d of rank %d hangs", row->name, at, rank);
        memset(&how, 0, sizeof how);
        how.bare = 1;
        keep(c);
        c->rank = rank, c->at = at, c->stall_ms = ms;
        c->all.row = row;
        c->all.d = disk_new();
        c->all.d->quiet = 1;
        lab_run(row->size, &how, stall_body, c);
        while (h_entries("/proc/self/task") > threads) h_nap(&ns); /* the hung thread has ended */
        disk_free(c->all.d);
        if (c->slow) continue;
        *fired += c->all.beds[rank]->s.fired;
        return c->calls;
    }
}
static void run_stall(const stall_row *row) {
    int fired = 0, tries = 0;
    for (int rank = 0; rank < row->size; rank++) {
        int calls = stall(row, rank, 1 << 20, &fired);
        for (int at = 0; at < calls; at++) {
            if (!row->all && (uint64_t)at % 4 != h_seed() % 4) continue;
            (void)stall(row, rank, at, &fired);
            tries++;
        }
    }
    CHECK(tries > 0);
    CHECK_EQ_INT(fired, tries);
    h_message("%d file calls that hang: IO on all ranks, nothing freed is read", fired);
}
static const stall_row some_stalls[] = {{"save", SAVE, 2, 0},
                                        {"save_async", ASYNC, 2, 0},
                                        {"keep", KEEP, 2, 0},
                                        {"load", LOAD, 2, 0},
                                        {"find", FIND, 2, 0},
                                        {"export_model", EXPORT, 2, 0}};
TEST_P(checkpoint_faults, stall, some_stalls, ASAN) { run_stall(row); }
static const stall_row all_stalls[] = {{"save", SAVE, 2, 1},    {"save_async", ASYNC, 2, 1},
                                       {"keep", KEEP, 2, 1},    {"load", LOAD, 2, 1},
                                       {"find", FIND, 2, 1},    {"save/W=3", SAVE, 3, 1},
                                       {"load/W=3", LOAD, 3, 1}, {"export_model", EXPORT, 3, 1}};
TEST_P(long_checkpoint_faults, stall, all_stalls, SECONDS(600) | NIGHT) { run_stall(row); }

/* ---- a process is killed at a file call ------------------------------------------------------ */

typedef struct kill_case { /* in memory that all processes share */
    char dir[400];
    int rank, at, after, op;
    int64_t step;
    int calls;
} kill_case;
typedef struct kill_row {
    const char *name;
    int size, all;
} kill_row;

static void die_event(shake *s) {
    h_rank = s->rank; /* in this thread, which is the worker's */
    h_die(SIGKILL);
}
static void kill_body(lab_rank *r) {
    kill_case *c = (kill_case *)r->arg;
    stage all;
    bed b;
    fsdp_checkpoint_desc d = FSDP_ZERO;
    memset(&all, 0, sizeof all);
    memset(&b, 0, sizeof b);
    d.keep = 2;
    d.no_sync = 1; /* the system's files survive */
    snprintf(b.dir, sizeof b.dir, "%s", c->dir);
    shake_init(&b.s, &system_ops, NULL, r->rank);
    b.s.event = die_event;
    bed_open(&b, r, &all, 0, &d);
    (void)values(&b, c->step, 1, 0);
    meet(&b);
    if (r->rank == c->rank) shake_arm(&b.s, c->at, c->after ? SHAKE_AFTER : SHAKE_WAIT, 0);
    fsdp_status status = call_op(&b, c->op, c->step);
    if (r->rank == c->rank) c->calls = b.s.calls; /* it has survived */
    CHECK_MSG(!status || status == FSDP_ERR_PEER_LOST, "%s", fsdp_last_error(b.w));
    (void)fsdp_shutdown(b.w);
}
/* A new job of one rank looks for checkpoints. */
typedef struct look_case {
    const char *dir;
    int64_t older, newer, found;
} look_case;
static void look_body(lab_rank *r) {
    look_case *l = (look_case *)r->arg;
    stage all;
    bed b;
    char path[FSDP_CHECKPOINT_PATH];
    memset(&all, 0, sizeof all);
    memset(&b, 0, sizeof b);
    snprintf(b.dir, sizeof b.dir, "%s", l->dir);
    shake_init(&b.s, &system_ops, NULL, r->rank);
    bed_open(&b, r, &all, 0, NULL);
    l->found = find(&b, path);
    W_CHECK(l->found == l->older || l->found == l->newer, "found %lld, expected %lld or %lld",
            (long long)l->found, (long long)l->older, (long long)l->newer);
    if (l->found >= 0) {
        scramble(&b);
        CALL(b.w, fsdp_checkpoint_load(b.ck, path, NULL));
        W_CHECK(!values(&b, l->found, 0, 1), "wrong values of step %lld", (long long)l->found);
    }
    bed_close(&b);
}
static int64_t look(const char *dir, int64_t older, int64_t newer) {
    look_case l = {dir, older, newer, -2};
    lab_how how;
    memset(&how, 0, sizeof how);
    how.bare = 1;
    lab_run(1, &how, look_body, &l);
    return l.found;
}
static int kill_no_leftover(void *arg, const char *name) {
    (void)arg;
    CHECK_MSG(name[0] != '.', "%s was left", name);
    return 0;
}
static void run_kills(const kill_row *row) {
    kill_case *c = (kill_case *)mmap(NULL, sizeof *c, PROT_READ | PROT_WRITE,
                                     MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    CHECK(c != MAP_FAILED);
    int kills = 0, news = 0;
    int64_t last = -1;
    lab_how how;
    char job[40];
    memset(&how, 0, sizeof how);
    how.bare = how.processes = 1;
    snprintf(c->dir, sizeof c->dir, "%s/run", h_tmpdir());
    for (int i = 0, at = 0, round = 0; round < 2 * row->size; i++) {
        snprintf(job, sizeof job, "kill%d", i);
        how.job = job;
        c->rank = round / 2, c->after = round % 2, c->at = at;
        c->op = i % 2 ? ASYNC : SAVE;
        c->step = last + 1;
        c->calls = -1;
        snprintf(w_case, sizeof w_case, "rank %d killed %s call %d", c->rank,
                 c->after ? "behind" : "before", at);
        lab_run(row->size, &how, kill_body, c);
        int64_t found = look(c->dir, last, c->step);
        if (c->calls < 0) kills++, news += found != last;
        else CHECK_EQ_INT(found, c->step);
        last = found;
        at += row->all ? 1 : 1 + (int)((h_seed() + (uint64_t)at) % 5);
        if (c->calls >= 0) at = 0, round++;
    }
    CHECK(kills > 2 * row->size);
    (void)system_ops.list(NULL, c->dir, kill_no_leftover, NULL); /* the last save has cleaned up */
    h_message("%d ranks killed at a file call; %d times the new checkpoint was there, else the "
              "old one; 0 wrong, 0 mixtures",
              kills, news);
}
static const kill_row some_kills[] = {{"W=2", 2, 0}};
TEST_P(checkpoint_faults, kill, some_kills, SECONDS(120)) { run_kills(row); }
static const kill_row all_kills[] = {{"W=2", 2, 1}, {"W=3", 3, 1}};
TEST_P(long_checkpoint_faults, kill, all_kills, SECONDS(600) | NIGHT) { run_kills(row); }

/* ---- power cuts ------------------------------------------------------------------------------ */

enum { POWER_SAVES = 3, SEEN = 1 << 14 };
typedef struct power_row {
    const char *name;
    int lost, no_sync, subsets; /* lost: syncs that have no effect */
} power_row;

static void power_save(lab_rank *r) {
    stage *all = (stage *)r->arg;
    fsdp_checkpoint_desc d = FSDP_ZERO;
    bed b;
    memset(&b, 0, sizeof b);
    d.keep = 1;
    d.no_sync = ((const power_row *)all->row)->no_sync;
    bed_open(&b, r, all, 0, &d);
    for (int64_t step = 0; step < POWER_SAVES; step++) {
        (void)values(&b, step, 1, 0);
        CALL(b.w, call_op(&b, step == 1 ? ASYNC : SAVE, step));
        meet(&b);
        if (r->rank == 0) disk_mark(all->d, (int)step); /* the save has returned */
        meet(&b);
    }
    bed_close(&b);
}

/* Returns what is wrong after a cut, or NULL. `done` is the newest step whose save had returned. */
static const char *power_failure_text(bed *b, disk *cut, int64_t done, int no_sync) {
    char path[FSDP_CHECKPOINT_PATH];
    int64_t found = -2;
    b->s.user = cut;
    fsdp_status status = fsdp_checkpoint_find(b->ck, b->dir, -1, path, sizeof path, &found);
    if (status) return "find fails";
    if (!no_sync && found != done && found != done + 1) return "neither old nor new is found";
    snprintf(path, sizeof path, "%s/step-%08lld", b->dir, (long long)done + 1);
    if (!no_sync && disk_node_at(cut, path) >= 0 && found != done + 1)
        return "a directory has its name, and is not complete";
    if (found < 0) return NULL;
    snprintf(path, sizeof path, "%s/step-%08lld", b->dir, (long long)found);
    scramble(b);
    status = fsdp_checkpoint_load(b->ck, path, NULL);
    if (!status) return values(b, found, 0, 1) ? "WRONG VALUES" : NULL;
    return no_sync && status == FSDP_ERR_CORRUPT ? NULL : "what is found does not load";
}

/* Chooses the effects of a cut that happen: number i of `count` choices. */
static void power_choose(unsigned char *chosen, int effects, int i, int all, uint64_t *seed) {
    static const int of_8[] = {0, 8, 4, 7, 1, 4, 6, 2};
    for (int e = 0; e < effects; e++)
        chosen[e] = (unsigned char)(all ? i >> e & 1 : lab_pick(seed, 8) < of_8[i % 8]);
    if (!all && effects && i % 8 == 5) /* all but one */
        memset(chosen, 1, (size_t)effects), chosen[lab_pick(seed, effects)] = 0;
}

typedef struct power_tally {
    int64_t cuts, disks;
    int points;
    const char *bad;
    uint64_t seen[SEEN];
} power_tally;

static int power_is_new(power_tally *t, uint64_t hash) {
    uint64_t at = hash % SEEN;
    for (; t->seen[at]; at = (at + 1) % SEEN)
        if (t->seen[at] == hash) return 0;
    t->seen[at] = hash;
    CHECK(++t->disks < SEEN / 2);
    return 1;
}

/* Cuts after every entry of the log. Stops at the first failure. */
static void power_cuts(bed *b, const disk *d, const power_row *row, power_tally *t) {
    uint64_t seed = h_seed() * 77 + (uint64_t)row->lost;
    int64_t done = -1;
    for (int upto = 0; upto <= d->num_log; upto++) {
        if (upto && d->log[upto - 1].kind == DISK_MARK) done = d->log[upto - 1].node;
        int effects = disk_num_effects(d, upto, row->lost), all = effects <= 10;
        int count = !all ? row->subsets : 1 << effects;
        unsigned char *chosen = (unsigned char *)lab_zeros((size_t)effects, 1);
        t->points++;
        for (int i = 0; i < count; i++) {
            power_choose(chosen, effects, i, all, &seed);
            disk *cut = disk_cut(d, upto, row->lost, chosen);
            t->cuts++;
            if (power_is_new(t, lab_hash(disk_hash(cut, 0), (uint64_t)(done + 1), 0, 0) | 1))
                t->bad = power_failure_text(b, cut, done, row->no_sync);
            b->s.user = NULL;
            disk_free(cut);
            if (!t->bad) continue;
            snprintf(w_case, sizeof w_case, "cut behind entry %d of %d, %d effects, choice %d",
                     upto, d->num_log, effects, i);
            break;
        }
        free(chosen);
        if (t->bad) return;
    }
}
static void power_look(lab_rank *r) {
    stage *all = (stage *)r->arg;
    const power_row *row = (const power_row *)all->row;
    power_tally *t = (power_tally *)lab_zeros(1, sizeof *t);
    bed b;
    memset(&b, 0, sizeof b);
    bed_open(&b, r, all, 0, NULL);
    power_cuts(&b, all->d, row, t);
    if (row->lost) {
        W_CHECK(t->bad,
                "%lld cuts without the syncs of %s, and nothing was lost: does this test "
                "see anything?",
                (long long)t->cuts, row->name);
        h_message("without the sync of %s: %s, at power cut %lld", row->name, t->bad,
                  (long long)t->cuts);
    } else {
        W_CHECK(!t->bad, "%s", t->bad);
        h_message("%lld power cuts behind %d places, %lld different disks: 0 wrong, 0 mixtures",
                  (long long)t->cuts, t->points, (long long)t->disks);
    }
    free(t);
    bed_close(&b);
}
static void run_power(const power_row *row) {
    stage *all = (stage *)lab_zeros(1, sizeof *all);
    lab_how how;
    memset(&how, 0, sizeof how);
    how.bare = 1;
    all->d = disk_new();
    all->row = row;
    lab_run(2, &how, power_save, all);
    all->d->quiet = 1;
    lab_run(1, &how, power_look, all);
    disk_free(all->d);
    free(all);
}
static const power_row some_power[] = {{"sync", 0, 0, 300}, {"no_sync", 0, 1, 300}};
TEST_P(checkpoint_faults, power_cut, some_power) { run_power(row); }
static const power_row all_power[] = {{"sync", 0, 0, 1000}, {"no_sync", 0, 1, 1000}};
TEST_P(long_checkpoint_faults, power_cut, all_power, SECONDS(600) | NIGHT) { run_power(row); }
/* Each sync is needed; otherwise the model of the disk would detect nothing. */
static const power_row lost_syncs[] = {{"data files", DISK_OF_DATA, 0, 60},
                                       {"manifest", DISK_OF_MANIFEST, 0, 60},
                                       {"temporary directory", DISK_OF_TEMPORARY, 0, 60},
                                       {"directory", DISK_OF_RUN, 0, 60},
                                       {"parent", DISK_OF_PARENT, 0, 60}};
TEST_P(checkpoint_faults, power_cut_without_sync, lost_syncs) { run_power(row); }

/* ---- bytes of the files change --------------------------------------------------------------- */

enum { FLIP, TRUNCATE, REMOVE, SWAP };
typedef struct damage_row {
    const char *name;
    int size, verify, stride;
} damage_row;
static const char *const damaged[3] = {"manifest.json",
                                       "shard-00001-model-00001-of-00001.safetensors",
                                       "shard-00002-model-00001-of-00001.safetensors"};

static void damage_save(lab_rank *r) {
    stage *all = (stage *)r->arg;
    bed b;
    memset(&b, 0, sizeof b);
    bed_open(&b, r, all, 0, NULL);
    for (int64_t step = 0; step < 2; step++) {
        (void)values(&b, step, 1, 0);
        CALL(b.w, fsdp_checkpoint_save(b.ck, b.dir, step));
    }
    bed_close(&b);
}
static disk_node *damage_node(const stage *all, int step, int file) {
    char path[200];
    snprintf(path, sizeof path, "run/step-%08d/%s", step, damaged[file]);
    int node = disk_node_at(all->d, path);
    CHECK(node >= 0);
    return &all->d->nodes[node];
}
static void swap_nodes(disk_node *a, disk_node *b) {
    disk_node x = *a;
    *a = *b, *b = x;
}
/* Loads step 1 as it is: it has its values, or fails and names one of the files. Returns 1 if it
   failed. */
static int damage_load(bed *b, const damage_row *row, const char *file, const char *other) {
    fsdp_checkpoint_load_desc d = FSDP_ZERO;
    fsdp_checkpoint_report report;
    int foreign = b->size != 2 || (disk_node_at(b->all->d, "run/step-00000001/manifest.json") < 0);
    d.verify = row->verify;
    scramble(b);
    fsdp_status status = fsdp_checkpoint_load(b->ck, "run/step-00000001", &d);
    const char *text = fsdp_last_error(b->w);
    W_CHECK(!status || status == FSDP_ERR_CORRUPT || status == FSDP_ERR_IO, "%s: %s",
            fsdp_status_name(status), text);
    W_CHECK(!status || strstr(text, file) || (other && strstr(text, other)), "no name: %s", text);
    if (!status) W_CHECK(!values(b, 1, 0, foreign), "WRONG VALUES");
    if (!status && !strstr(w_case, "removal")) {
        CALL(b->w, fsdp_checkpoint_last_report(b->ck, &report));
        CHECK_EQ_INT(report.step, 1);
    }
    CHECK_EQ_INT(b->s.files, 0);
    return status != FSDP_OK;
}
/* Applies one damage, which rank 0 makes and undoes. */
static int damage(bed *b, const damage_row *row, int kind, int file, int64_t at) {
    stage *all = b->all;
    disk_node *x = damage_node(all, 1, file);
    char path[FSDP_CHECKPOINT_PATH];
    const unsigned char bit = (unsigned char)(1 << lab_hash((uint64_t)at, 1, h_seed(), 0) % 8);
    const int64_t size = x->size;
    const int dir = disk_node_at(all->d, "run/step-00000001"), node = (int)(x - all->d->nodes);
    disk_node *with = kind != SWAP ? NULL
                      : at         ? damage_node(all, 1, 3 - file)
                                   : damage_node(all, 0, file);
    snprintf(w_case, sizeof w_case, "%s of %s, %lld",
             kind == FLIP       ? "flip"
             : kind == TRUNCATE ? "truncation"
             : kind == REMOVE   ? "removal"
                                : "swap",
             damaged[file], (long long)at);
    meet(b);
    if (b->rank == 0 && kind == FLIP) x->data[at] ^= bit;
    if (b->rank == 0 && kind == TRUNCATE) x->size = at;
    if (b->rank == 0 && kind == REMOVE) disk_drop_name(all->d, dir, damaged[file]);
    if (b->rank == 0 && kind == SWAP) swap_nodes(x, with);
    meet(b);
    int failed = damage_load(b, row, damaged[file],
                             kind != SWAP ? NULL
                             : file       ? damaged[3 - file]
                                          : "shard-"); /* the data does not match the manifest */
    if (kind == TRUNCATE || kind == REMOVE) CHECK_EQ_INT(find(b, path), 0); /* the previous one */
    meet(b);
    if (b->rank == 0 && kind == FLIP) x->data[at] ^= bit;
    if (b->rank == 0 && kind == TRUNCATE) x->size = size;
    if (b->rank == 0 && kind == REMOVE) disk_put_name(all->d, dir, damaged[file], node);
    if (b->rank == 0 && kind == SWAP) swap_nodes(x, with);
    meet(b);
    return failed;
}
static void damage_body(lab_rank *r) {
    stage *all = (stage *)r->arg;
    const damage_row *row = (const damage_row *)all->row;
    int64_t first = (int64_t)(h_seed() % (uint64_t)row->stride);
    int tries = 0, failed = 0;
    bed b;
    memset(&b, 0, sizeof b);
    bed_open(&b, r, all, 0, NULL);
    CHECK_EQ_INT(damage_load(&b, row, "", NULL), 0);
    for (int file = 0; file < 3; file++) {
        for (int64_t at = first; at < damage_node(all, 1, file)->size; at += row->stride) {
            tries += 2;
            failed += damage(&b, row, FLIP, file, at);
            W_CHECK(damage(&b, row, TRUNCATE, file, at), "it loads");
            failed++;
        }
        tries += 2;
        failed += damage(&b, row, REMOVE, file, 0);
        failed += damage(&b, row, SWAP, file, 0); /* with the file of another step */
    }
    failed += damage(&b, row, SWAP, 1, 1); /* with the file of another rank */
    CHECK_EQ_INT(damage_load(&b, row, "", NULL), 0);
    CHECK(failed > tries - tries / 20 - 3); /* few bits have no meaning */
    if (r->rank == 0)
        h_message("%d damaged files: %d times CORRUPT or IO, else equal bits; 0 wrong", tries + 1,
                  failed);
    bed_close(&b);
}
static void run_damage(const damage_row *row) {
    stage *all = (stage *)lab_zeros(1, sizeof *all);
    lab_how how;
    memset(&how, 0, sizeof how);
    how.bare = 1;
    all->d = disk_new();
    all->d->quiet = 1;
    all->row = row;
    lab_run(2, &how, damage_save, all);
    memset(all->beds, 0, sizeof all->beds);
    lab_run(row->size, &how, damage_body, all);
    disk_free(all->d);
    free(all);
}
static const damage_row some_damage[] = {{"same_ranks", 2, FSDP_VERIFY_READ, 37},
                                         {"one_rank", 1, FSDP_VERIFY_READ, 17},
                                         {"three_ranks_all", 3, FSDP_VERIFY_ALL, 71}};
TEST_P(checkpoint_faults, damage, some_damage) { run_damage(row); }
static const damage_row all_damage[] = {{"same_ranks", 2, FSDP_VERIFY_READ, 1},
                                        {"one_rank", 1, FSDP_VERIFY_READ, 1},
                                        {"one_rank_all", 1, FSDP_VERIFY_ALL, 1},
                                        {"three_ranks", 3, FSDP_VERIFY_READ, 5},
                                        {"three_ranks_all", 3, FSDP_VERIFY_ALL, 5}};
TEST_P(long_checkpoint_faults, damage, all_damage, SECONDS(900) | NIGHT) { run_damage(row); }

/* ---- memory runs out ------------------------------------------------------------------------- */

typedef struct memory_row {
    const char *name;
    int op; /* or -1: create; -2: create of a model that is not committed */
} memory_row;

static fsdp_status memory_call(bed *b, int op) {
    return op < 0 ? bed_create(b, NULL) : call_op(b, op, op <= KEEP ? 1 : 0);
}
/* Lets allocation number n of a rank fail in one call. Returns 1 if there was such an allocation.
   */
static int memory_try(bed *b, lab_rank *r, int op, int rank, int n) {
    stage *all = b->all;
    snprintf(w_case, sizeof w_case, "allocation %d of rank %d", n, rank);
    snprintf(b->dir, sizeof b->dir, "run%d", all->tries);
    if (op == -2) {
        fsdp_param_desc p = fsdp_vec("w", 7);
        b->model = lab_model(b->w, NULL);
        lab_unit(b->w, b->model, NULL, &p, 1);
    }
    const int64_t live = r->heap->live, failures = r->heap->failures;
    if (op >= 0) {
        CALL(b->w, bed_create(b, NULL));
        if (op >= LOAD) { /* with another object: this one has no tables yet */
            fsdp_checkpoint *mine = b->ck;
            CALL(b->w, bed_create(b, NULL));
            (void)values(b, 0, 1, 0);
            CALL(b->w, fsdp_checkpoint_save(b->ck, b->dir, 0));
            fsdp_checkpoint_destroy(b->ck);
            b->ck = mine;
        }
        (void)values(b, op <= KEEP ? 1 : 0, 1, 0);
    }
    meet(b);
    if (r->rank == rank) w_fail(r->heap, n);
    all->status[r->rank] = (int)memory_call(b, op);
    snprintf(all->text[r->rank], TEXT, "%s", fsdp_last_error(b->w));
    w_fail(r->heap, -1);
    if (r->rank == rank) all->faults = r->heap->failures > failures;
    meet(b);
    const int fired = all->faults;
    char who[24];
    snprintf(who, sizeof who, "rank %d", rank);
    for (int q = 0; q < r->size; q++) {
        W_CHECK(all->status[q] == (fired ? FSDP_ERR_OUT_OF_MEMORY : FSDP_OK), "rank %d got %s: %s",
                q, fsdp_status_name((fsdp_status)all->status[q]), all->text[q]);
        W_CHECK(!fired || strstr(all->text[q], who), "rank %d does not name %s: %s", q, who,
                all->text[q]);
    }
    if (fired) CALL(b->w, memory_call(b, op)); /* the next call works */
    if (op >= 0 && op <= KEEP) has(b, 1);
    if (op == LOAD) W_CHECK(!values(b, 0, 0, 0), "wrong values");
    fsdp_checkpoint_destroy(b->ck);
    if (op != -2)
        W_CHECK(r->heap->live == live, "%lld blocks, %lld before", (long long)r->heap->live,
                (long long)live);
    else fsdp_model_destroy(b->model);
    b->ck = NULL;
    meet(b);
    if (r->rank == 0) all->tries++;
    meet(b);
    return fired;
}
static void memory_body(lab_rank *r) {
    stage *all = (stage *)r->arg;
    const int op = ((const memory_row *)all->row)->op;
    int fired = 0;
    bed b;
    memset(&b, 0, sizeof b);
    bed_open(&b, r, all, 0, NULL);
    fsdp_checkpoint_destroy(b.ck);
    for (int rank = 0; rank < r->size; rank++)
        /* a failed allocation in a commit ends the world: only those before it: object, blobs,
           steps */
        for (int n = 0; op != -2 || n < 3 - rank; n++) {
            int was_there = memory_try(&b, r, op, rank, n);
            CHECK(was_there || op != -2);
            if (!was_there) break;
            fired++;
        }
    CHECK(fired > 1);
    if (r->rank == 0) h_message("%d allocations failed: OUT_OF_MEMORY on all, 0 leaks", fired);
    b.ck = NULL;
    bed_close(&b);
}
static const memory_row memory_rows[] = {{"create", -1}, {"create_and_commit", -2},
                                         {"save", SAVE}, {"save_async", ASYNC},
                                         {"load", LOAD}, {"find", FIND}};
TEST_P(checkpoint_faults, out_of_memory, memory_rows, ASAN) {
    stage *all = (stage *)lab_zeros(1, sizeof *all);
    lab_how how;
    memset(&how, 0, sizeof how);
    how.bare = 1;
    all->d = disk_new();
    all->d->quiet = 1;
    all->row = row;
    lab_run(2, &how, memory_body, all);
    disk_free(all->d);
    free(all);
}

/* In host memory a save makes no copies, and save_async one block of them. */
static void copies_body(lab_rank *r) {
    bed b;
    memset(&b, 0, sizeof b);
    bed_open(&b, r, (stage *)r->arg, 0, NULL);
    CALL(b.w, fsdp_checkpoint_save(b.ck, b.dir, 0));
    const int64_t live = r->heap->live, nbytes = r->heap->live_bytes, total = r->heap->total;
    CALL(b.w, fsdp_checkpoint_save(b.ck, b.dir, 1));
    CHECK_EQ_INT(r->heap->total, total);
    CALL(b.w, fsdp_checkpoint_save_async(b.ck, b.dir, 2));
    CALL(b.w, fsdp_checkpoint_wait(b.ck));
    CHECK_EQ_INT(r->heap->live, live + 1);
    CHECK(r->heap->live_bytes >= nbytes + fsdp_checkpoint_nbytes(b.ck));
    bed_close(&b);
}
TEST(checkpoint_faults, copies, ASAN) {
    stage *all = (stage *)lab_zeros(1, sizeof *all);
    lab_how how;
    memset(&how, 0, sizeof how);
    how.bare = 1;
    all->d = disk_new();
    lab_run(2, &how, copies_body, all);
    disk_free(all->d);
    free(all);
}

/* ---- the disk is full ------------------------------------------------------------------------ */

enum { FULL_BYTES = 4 << 20 };
typedef struct full_case {
    const char *dir;
    int64_t rows;
    int saved;
} full_case;

static void full_empty(const char *dir) {
    h_remove_tree(dir);
    CHECK(mkdir(dir, 0700) == 0 || errno == EEXIST || errno == EBUSY);
}
static void full_body(lab_rank *r) {
    full_case *c = (full_case *)r->arg;
    static stage all;
    bed b;
    memset(&b, 0, sizeof b);
    b.system = 1;
    b.rows = c->rows;
    snprintf(b.dir, sizeof b.dir, "%s/run", c->dir);
    bed_open(&b, r, &all, 0, NULL);
    (void)values(&b, 0, 1, 0);
    fsdp_status status = fsdp_checkpoint_save(b.ck, b.dir, 0);
    W_CHECK(!status ||
                (status == FSDP_ERR_IO && strstr(fsdp_last_error(b.w), "No space left on device")),
            "%s", fsdp_last_error(b.w));
    const int first = !status;
    has(&b, first ? 0 : -1);
    if (first) { /* a second one */
        (void)values(&b, 1, 1, 0);
        status = fsdp_checkpoint_save(b.ck, b.dir, 1);
        W_CHECK(!status || (status == FSDP_ERR_IO &&
                            strstr(fsdp_last_error(b.w), "No space left on device")),
                "%s", fsdp_last_error(b.w));
        has(&b, status ? 0 : 1);
    }
    int entries = h_entries(b.dir) - 2; /* no failed save has left anything */
    W_CHECK(entries == first + (first && !status), "%d names in %s", entries, b.dir);
    if (r->rank == 0) c->saved = first + (first && !status);
    meet(&b);
    if (status && r->rank == 0) h_remove_tree(b.dir); /* with space, the same save works */
    meet(&b);
    if (status && first) {
        (void)values(&b, 1, 1, 0);
        CALL(b.w, fsdp_checkpoint_save(b.ck, b.dir, 1));
        has(&b, 1);
    }
    bed_close(&b);
}
TEST(checkpoint_faults, full_disk, ASAN) {
    full_case c = {h_tmpdir(), 0, 0};
    int count[3] = {0, 0, 0};
    lab_how how;
    char options[40];
    memset(&how, 0, sizeof how);
    how.bare = 1;
    snprintf(options, sizeof options, "size=%d", FULL_BYTES);
    if (unshare(CLONE_NEWNS) || mount("none", "/", NULL, MS_REC | MS_PRIVATE, NULL) ||
        mount("tmpfs", c.dir, "tmpfs", 0, options))
        SKIP("a file system cannot be mounted here");
    for (int half = 1; half <= 2; half++) /* one or two checkpoints fill it */
        for (int64_t i = -3; i <= 2; i++) {
            c.rows = (FULL_BYTES / (3 - half) + i * 8192 + 700) / 4;
            snprintf(w_case, sizeof w_case, "%lld bytes", (long long)c.rows * 4);
            lab_run(2, &how, full_body, &c);
            count[c.saved]++;
            full_empty(c.dir);
        }
    h_message("%d checkpoints did not fit, %d had no room for a second, %d had", count[0], count[1],
              count[2]);
    CHECK(count[0] && count[1] && count[2]);
}

/* ---- a rank dies, stops, or stays away while others wait for files --------------------------- */

enum { DIES, STOPS, LEAVES, LOST_MS = 3000, MEETS = 1, TOLD = 2 };
typedef struct lost_case { /* in memory that all processes share */
    int how, op;
    pid_t victim;
    char dir[400];
} lost_case;
typedef struct lost_row {
    const char *name;
    int how, op;
} lost_row;

/* Runs within a file call of the victim, after some collectives of rank 0 with the others. */
static void lost_event(shake *s) {
    const lost_case *c = (const lost_case *)s->arg;
    h_await_marks(MEETS, 8);
    h_rank = s->rank;
    if (c->how == DIES) h_die(SIGKILL);
    h_shared->state[s->rank + 1] = H_DIES; /* rank 0 kills it */
    raise(SIGSTOP);
}
static void lost_body(lab_rank *r) {
    lost_case *c = (lost_case *)r->arg;
    stage all;
    bed b;
    fsdp_checkpoint_desc d = FSDP_ZERO;
    memset(&all, 0, sizeof all);
    memset(&b, 0, sizeof b);
    d.no_sync = 1;
    snprintf(b.dir, sizeof b.dir, "%s", c->dir);
    shake_init(&b.s, &system_ops, NULL, r->rank);
    b.s.event = lost_event, b.s.arg = c;
    b.timeout_ms = LOST_MS;
    bed_open(&b, r, &all, 0, &d);
    (void)values(&b, 0, 1, 0);
    CALL(b.w, fsdp_checkpoint_save(b.ck, b.dir, 0));
    (void)values(&b, 1, 1, 0);
    meet(&b);
    int64_t begin = h_calm_ms();
    if (r->rank == 0) b.meets.marks = MEETS;
    if (r->rank == 1) c->victim = getpid();
    if (r->rank == 1 && c->how != LEAVES) shake_arm(&b.s, 1, SHAKE_WAIT, 0);
    fsdp_status status;
    if (c->how == LEAVES) { /* it begins a save, and does not complete it */
        CALL(b.w, fsdp_checkpoint_save_async(b.ck, b.dir, 1));
        if (r->rank == 1) h_await_marks(TOLD, r->size - 1);
        status = fsdp_checkpoint_wait(b.ck);
    } else {
        status = call_op(&b, c->op, c->op == LOAD ? 0 : 1);
    }
    int64_t took = h_calm_ms() - begin;
    CHECK_MSG(r->rank == 1 || status == (c->how == DIES ? FSDP_ERR_PEER_LOST : FSDP_ERR_TIMEOUT),
              "%s: %s", fsdp_status_name(status), fsdp_last_error(b.w));
    CHECK_MSG(r->rank == 1 || strstr(fsdp_last_error(b.w), "rank 1"), "%s", fsdp_last_error(b.w));
    CHECK_MSG(r->rank == 1 || took < 3 * LOST_MS, "after %d ms", (int)took);
    h_mark(TOLD);
    if (r->rank == 0 && c->how == STOPS) {
        h_await_marks(TOLD, r->size - 1);
        kill(c->victim, SIGKILL);
    }
    (void)fsdp_shutdown(b.w);
}
static void run_lost(const lost_row *row) {
    lost_case *c = (lost_case *)mmap(NULL, sizeof *c, PROT_READ | PROT_WRITE,
                                     MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    lab_how how;
    CHECK(c != MAP_FAILED);
    memset(&how, 0, sizeof how);
    how.bare = how.processes = 1;
    how.job = "lost";
    c->how = row->how, c->op = row->op;
    snprintf(c->dir, sizeof c->dir, "%s/run", h_tmpdir());
    lab_run(3, &how, lost_body, c);
    (void)look(c->dir, 0, 0); /* the old one exists */
}
static const lost_row lost_rows[] = {{"dies", DIES, SAVE},
                                     {"dies/load", DIES, LOAD},
                                     {"stops", STOPS, SAVE},
                                     {"stops/load", STOPS, LOAD},
                                     {"leaves", LEAVES, ASYNC}};
TEST_P(checkpoint_faults, lost_rank, lost_rows, ASAN) { run_lost(row); }

/* ---- untrusted files ------------------------------------------------------------------------- */

typedef struct seeds {
    uint8_t *input[8];
    size_t size[8];
    int num;
} seeds;
static void keep_seed(const char *name, const uint8_t *input, size_t size, void *arg) {
    seeds *s = (seeds *)arg;
    (void)name;
    CHECK(s->num < 8);
    s->input[s->num] = (uint8_t *)malloc(size);
    CHECK(s->input[s->num] != NULL);
    memcpy(s->input[s->num], input, size);
    s->size[s->num++] = size;
}
/* Makes one to four changes: a bit, a byte, a number changed by one, bytes moved or removed. */
static size_t mutate(uint8_t *in, size_t size, uint64_t *random) {
    static const char chars[] = "\"{}[],:0123456789aefx\\ -.";
    for (int i = 1 + lab_pick(random, 4); i > 0 && size > 8; i--) {
        size_t at = 1 + (size_t)lab_pick(random, (int)size - 1), n;
        switch (lab_pick(random, 6)) {
        case 0: in[at] ^= (uint8_t)(1 << lab_pick(random, 8)); break;
        case 1: in[at] = (uint8_t)h_rand64(random); break;
        case 2: in[at] = (uint8_t)chars[lab_pick(random, (int)sizeof chars - 1)]; break;
        case 3: in[at] = (uint8_t)(in[at] + lab_pick(random, 3) - 1); break;
        case 4:
            n = (size_t)lab_pick(random, 9);
            if (at + n < size) memmove(in + at, in + at + n, size - at - n), size -= n;
            break;
        default:
            n = (size_t)lab_pick(random, 9);
            memmove(in + at + n, in + at, size - at), size += n;
            break;
        }
    }
    return size;
}
static void run_fuzz(int count) {
    uint64_t random = h_seed() * 31 + 5;
    uint8_t *in = (uint8_t *)lab_zeros(1 << 17, 1);
    seeds s;
    memset(&s, 0, sizeof s);
    fuzz_seeds(keep_seed, &s);
    for (int i = 0; i < s.num; i++) {
        int64_t peak;
        (void)LLVMFuzzerTestOneInput(s.input[i], s.size[i]);
        CHECK_MSG(fuzz_load(s.input[i][1], &peak) == FSDP_OK, "seed %d: %s", i,
                  fsdp_last_error(fuzz.w));
    }
    for (int i = 0; i < count; i++) {
        int which = i % s.num;
        memcpy(in, s.input[which], s.size[which]);
        (void)LLVMFuzzerTestOneInput(in, mutate(in, s.size[which], &random));
    }
    h_message("%d damaged directories: no fault, the same status twice", count);
    CHECK_OK(fsdp_shutdown(fuzz.w));
    for (int i = 0; i < s.num; i++) free(s.input[i]);
    for (int i = 0; i < 3; i++) free(fuzz.example[i]);
    disk_free(fuzz.d);
    free(in);
}
TEST(checkpoint_faults, fuzz, ASAN) { run_fuzz(W_SLOW ? 2000 : 10000); }
TEST(long_checkpoint_faults, fuzz, SECONDS(600) | NIGHT) { run_fuzz(1000000); }
