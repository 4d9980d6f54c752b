/* test_faults.c - failures: every host allocation, every operation of the backend and of the
   device, wrong arguments, interrupted steps. No call hangs, nothing leaks, and the text gives the
   reason.

   SPDX-License-Identifier: MIT */
#define TAGS TSAN
#include "harness.h"
#include "library.c"
#include "lab.h"

enum { UNITS = 3, MAX_WORLD = 4 };

/* Returns a deadline: a short one if a rank will not come, and otherwise one that must not pass. */
static int deadline_ms(int awaited) {
    const char *mult = getenv("TEST_TIMEOUT_MULT");
    int slow = mult && *mult && atof(mult) > 1;
    return awaited ? (slow ? 1000 : 80) : (slow ? 60000 : 10000);
}

/* ---- the life of a job, from init to shutdown ------------------------------------------------ */

typedef struct {
    int rank, size;
    int retry; /* a call that fails is repeated without faults, and succeeds */
    fsdp_world_desc desc;
    w_heap heap;
    fsdp_world *world;
    fsdp_model *model;
    fsdp_unit *unit[UNITS];
    fsdp_status status; /* status of the call that failed */
    const char *call;
    char text[1100];
    int retried, calls;
    double norm;
    float full[64];
} life;

static void stop_faults(life *x);

/* Notes the status of a call. Returns 0 if it failed: then no more calls are made. */
static int went_well(life *x, fsdp_status status, const char *call) {
    x->calls++;
    if (status == FSDP_OK) return 1;
    const char *text = fsdp_last_error(x->world);
    snprintf(x->text, sizeof x->text, "%s", text);
    x->status = status;
    x->call = call;
    W_CHECK(strlen(text) > 8, "%s failed with %s and says '%s'", call, fsdp_status_name(status),
            text);
    return 0;
}
#define TRY(x, expression)                                                                         \
    do {                                                                                           \
        if (went_well((x), (expression), #expression)) break;                                      \
        if (!(x)->retry) return;                                                                   \
        stop_faults(x);                                                                            \
        (x)->retried++;                                                                            \
        W_CHECK((x)->status == FSDP_ERR_OUT_OF_MEMORY, "%s: %s", #expression, (x)->text);          \
        CALL((x)->world, (expression));                                                            \
    } while (0)

static void stop_faults(life *x) { __atomic_store_n(&x->heap.fail_at, -1, __ATOMIC_SEQ_CST); }

static void fill(void *user, const fsdp_param_view *block) {
    (void)user;
    for (int64_t k = 0; k < block->numel; k++)
        ((float *)block->data)[k] = (float)(fsdp_view_index(block, k) % 17) / 8 +
                                    (float)block->ordinal;
}

static fsdp_status shard(life *x, int u) {
    static const char *const names[UNITS] = {"first", "second", "third"};
    fsdp_param_desc p[3] = {fsdp_mat("w", 7, 16), fsdp_vec("b", 5), fsdp_mat("c", 3, 6)};
    fsdp_unit_desc d = FSDP_ZERO;
    p[2].shard_dim = 1;
    p[1].frozen = u == 1;
    d.name = names[u];
    d.params = p;
    d.num_params = 3;
    return fsdp_fully_shard(x->model, &d, &x->unit[u]);
}

static const int64_t numel[3] = {112, 5, 18};

static void write_grads(life *x, int u) {
    for (int i = 0; i < 3; i++) {
        float *data = (float *)fsdp_data(x->unit[u], i), *grad = (float *)fsdp_grad(x->unit[u], i);
        W_CHECK(data != NULL || x->status, "no data");
        for (int64_t e = 0; e < numel[i] && grad && data; e++)
            grad[e] += data[e] * (float)(x->rank + 1) / 4;
    }
}

static void descend(life *x) {
    fsdp_param_view v = FSDP_ZERO;
    while (fsdp_next_param(x->model, &v))
        for (int64_t k = 0; v.shard_grad && k < v.numel; k++)
            ((float *)v.shard)[k] -= 0.25f * ((float *)v.shard_grad)[k];
}

static void live_step(life *x) {
    for (int u = 0; u < UNITS; u++) {
        TRY(x, fsdp_pre_forward(x->unit[u]));
        (void)fsdp_data(x->unit[u], 0);
        TRY(x, fsdp_post_forward(x->unit[u]));
    }
    for (int u = UNITS - 1; u >= 0; u--) {
        TRY(x, fsdp_pre_backward(x->unit[u]));
        write_grads(x, u);
        TRY(x, fsdp_post_backward(x->unit[u]));
    }
    TRY(x, fsdp_finalize_backward(x->model));
}

/* Makes every call that allocates or communicates, once or twice. */
static void live_on(life *x, int mixed) {
    fsdp_mesh *mesh, *whole;
    fsdp_model_desc md = FSDP_ZERO;
    fsdp_mesh_desc grid = FSDP_ZERO;
    fsdp_memory memory;
    float loss = (float)x->rank;
    md.param_dtype = FSDP_F32;
    md.reduce_dtype = mixed ? FSDP_BF16 : FSDP_F32;
    md.direct_min = 300;
    md.debug = 1;
    grid.ndim = 1;
    grid.shape[0] = x->size;
    grid.names[0] = "reversed";
    const int32_t backwards[MAX_WORLD] = {x->size - 1, x->size - 2, x->size - 3, x->size - 4};
    grid.ranks = backwards;
    TRY(x, fsdp_init(&x->desc, &x->world));
    TRY(x, fsdp_mesh_1d(x->world, "whole", &whole));
    TRY(x, fsdp_mesh_create(x->world, &grid, &mesh));
    TRY(x, fsdp_all_reduce(x->world, mesh, &loss, 1, FSDP_F32, FSDP_SUM));
    TRY(x, fsdp_barrier(x->world));
    md.mesh = whole;
    TRY(x, fsdp_model_create(x->world, &md, &x->model));
    fsdp_model_destroy(x->model);
    x->model = NULL;
    md.mesh = NULL;
    TRY(x, fsdp_model_create(x->world, &md, &x->model));
    for (int u = 0; u < UNITS; u++) TRY(x, shard(x, u));
    TRY(x, fsdp_model_predict(x->model, &memory));
    TRY(x, fsdp_init_params(x->model, fill, NULL));
    TRY(x, fsdp_model_reserve(x->model));
    for (int step = 0; step < 2; step++) {
        live_step(x);
        if (x->status && !x->retry) return;
        TRY(x, fsdp_clip_grad_norm(x->model, 1.0, &x->norm));
        descend(x);
        TRY(x, fsdp_params_changed(x->model));
        TRY(x, fsdp_zero_grad(x->model));
    }
    TRY(x, fsdp_param_load(x->unit[2], 1, "12345678901234567890"));
    TRY(x, fsdp_param_full(x->unit[0], 2, x->full));
    TRY(x, fsdp_param_full_grad(x->unit[0], 2, NULL));
    TRY(x, fsdp_model_reset(x->model));
    TRY(x, fsdp_broadcast(x->world, NULL, &loss, 4, 0));
    TRY(x, fsdp_model_memory(x->model, &memory));
    /* the prediction equals the measurement, also after repeated calls */
    fsdp_memory again;
    TRY(x, fsdp_model_predict(x->model, &again));
    for (int pool = 0; pool < FSDP_POOL_SCRATCH; pool++)
        W_CHECK(again.pool_bytes[pool] == memory.pool_bytes[pool],
                "%s: predicted %lld bytes, measured %lld", fsdp_pool_name(pool),
                (long long)again.pool_bytes[pool], (long long)memory.pool_bytes[pool]);
}

/* ---- host allocations ------------------------------------------------------------------------ */

typedef struct {
    const char *name;
    int world, victim, lanes, mixed, persistent;
} oom_row;
static const oom_row oom_rows[] = {
    {"W=1", 1, 0, 0, 0, 0},        {"W=1/mixed", 1, 0, 0, 1, 0},
    {"W=1/lanes", 1, 0, 2, 1, 0},  {"W=1/persistent", 1, 0, 1, 0, 1},
    {"W=2/rank=0", 2, 0, 0, 0, 0}, {"W=2/rank=1", 2, 1, 0, 1, 1},
    {"W=2/lanes", 2, 1, 2, 1, 0},  {"W=3/rank=1", 3, 1, 0, 0, 1},
    {"W=3/lanes", 3, 2, 1, 0, 0},
};

typedef struct {
    const oom_row *row;
    int64_t n;   /* the allocation that fails; -1: none */
    int patient; /* with a long deadline */
    fsdp_threads threads;
    life *lives;
    fsdp_status closed[MAX_WORLD];
} oom;

static void oom_rank(int rank, int world, void *arg) {
    oom *o = (oom *)arg;
    life *x = &o->lives[rank];
    snprintf(w_case, sizeof w_case, "%s, allocation %lld", o->row->name, (long long)o->n);
    memset(x, 0, sizeof *x);
    x->rank = rank;
    x->size = world;
    x->desc = w_desc(rank, world, world > 1 ? &o->threads : NULL, "oom", o->row->lanes);
    x->desc.timeout_ms = deadline_ms(o->n >= 0 && o->n < 6 && /* before it has joined */
                                     !o->patient);
    w_heap_use(&x->heap, &x->desc);
    if (rank == o->row->victim) {
        x->heap.fail_at = o->n;
        x->heap.persistent = o->row->persistent;
        x->retry = world == 1;
    }
    live_on(x, o->row->mixed);
    o->closed[rank] = fsdp_shutdown(x->world);
}

/* Checks that the failing rank's text gives the reason, and that the other ranks' texts name
   that rank. */
static void oom_check(const oom *o, const life *x, const life *good) {
    int hit = o->lives[o->row->victim].heap.failures > 0;
    char who[20];
    snprintf(who, sizeof who, "rank %d", o->row->victim);
    snprintf(w_case, sizeof w_case, "%s, allocation %lld, rank %d", o->row->name, (long long)o->n,
             x->rank);
    W_CHECK(x->heap.live == 0 && x->heap.live_bytes == 0,
            "%lld blocks of %lld bytes are left; %s: %s", (long long)x->heap.live,
            (long long)x->heap.live_bytes, x->call ? x->call : "", x->text);
    if (x->size == 1 || !hit) {
        W_CHECK(x->retry || !x->status, "%s: %s", x->call, x->text);
        W_CHECK(!memcmp(x->full, good->full, sizeof x->full) &&
                    !memcmp(&x->norm, &good->norm, sizeof x->norm),
                "another result than without a fault (after %s: %s)", x->call ? x->call : "",
                x->text);
        W_CHECK(!o->closed[x->rank], "shutdown: %s", fsdp_status_name(o->closed[x->rank]));
    }
    if (x->status && x->rank == o->row->victim)
        W_CHECK(x->status == FSDP_ERR_OUT_OF_MEMORY &&
                    (strstr(x->text, "memory") || strstr(x->text, "alloc")),
                "%s: %s: %s", x->call, fsdp_status_name(x->status), x->text);
    if (x->status && x->rank != o->row->victim)
        W_CHECK(strstr(x->text, who) != NULL, "%s: %s: does not name the culprit: %s", x->call,
                fsdp_status_name(x->status), x->text);
}

/* Runs a life with that failure; again with a long deadline if a rank timed out before the
   failure. Returns 1 if the allocation failed. */
static int oom_live(oom *o, const oom_row *row) {
    int late = 0;
    for (o->patient = 0; o->patient <= late; o->patient++) {
        if (row->world == 1) oom_rank(0, 1, o);
        else h_ranks_thread(row->world, oom_rank, o);
        for (int r = 0; r < row->world; r++) late |= o->lives[r].status == FSDP_ERR_TIMEOUT;
        late &= o->lives[row->victim].heap.failures == 0;
    }
    return o->lives[row->victim].heap.failures > 0;
}

TEST_P(faults, host_allocations, oom_rows, AT_NIGHT(TSAN) | (row->lanes ? SLOW : 0)) {
    life *good = (life *)lab_zeros(MAX_WORLD, sizeof *good);
    oom o;
    int64_t failed = 0, retried = 0, unnoticed = 0, n;
    int hit = 1;
    memset(&o, 0, sizeof o);
    o.row = row;
    o.threads.size = row->world;
    o.lives = (life *)lab_zeros(MAX_WORLD, sizeof *o.lives);
    for (n = -1; n <= 0 || hit; n++) {
        o.n = n;
        hit = oom_live(&o, row);
        if (n < 0) memcpy(good, o.lives, MAX_WORLD * sizeof *good);
        for (int r = 0; r < row->world; r++) oom_check(&o, &o.lives[r], &good[r]);
        CHECK(o.threads.common == NULL);
        const life *victim = &o.lives[row->victim];
        failed += victim->status != FSDP_OK;
        retried += victim->retried;
        unnoticed += hit && !victim->status;
        CHECK(n >= 0 || !hit);
    }
    CHECK_EQ_INT(o.lives[row->victim].status, 0);
    h_message(
        "%lld allocations, each failed: %lld calls reported it, %lld of them succeeded at once "
        "when repeated, %lld did without",
        (long long)(n - 1), (long long)failed, (long long)retried, (long long)unnoticed);
    free(o.lives);
    free(good);
}

/* ---- operations of the backend and of the device --------------------------------------------- */

typedef struct {
    lab_guard guard;   /* guards a comm */
    int64_t at, count; /* operation `at` fails; number of operations so far */
    fsdp_status status;
    int fired;
    char text[120];
} fault;

static int fires(fault *f, const char *what, const char *name) {
    int64_t n = __atomic_fetch_add(&f->count, 1, __ATOMIC_SEQ_CST);
    if (n != f->at) return 0;
    snprintf(f->text, sizeof f->text, "the test fails %s %s", what, name);
    __atomic_store_n(&f->fired, 1, __ATOMIC_SEQ_CST);
    return 1;
}

static fsdp_status bad_comm(lab_guard *guard, const fsdp_group *group, const fsdp_coll *coll) {
    fault *f = (fault *)(void *)guard;
    if (coll) return fires(f, fsdp_op_name(coll->kind), coll->what) ? f->status : FSDP_OK;
    if (group) return fires(f, "split", group->name) ? f->status : FSDP_OK;
    return fires(f, "alloc", "") ? FSDP_ERR_OUT_OF_MEMORY : FSDP_OK;
}

typedef struct {
    fsdp_device *real;
    fault *fault;
} bad_device;
#define HOST        (fsdpi_host_ops())
#define DEV(device) ((bad_device *)(void *)(device))

static fsdp_status bad_device_open(const fsdp_boot *boot, fsdp_device **out) {
    bad_device *d = (bad_device *)lab_zeros(1, sizeof *d);
    fault *f = (fault *)boot->user;
    *out = NULL;
    if (fires(f, "open", "") || HOST->open(boot, &d->real)) return free(d), f->status;
    d->fault = f;
    *out = (fsdp_device *)(void *)d;
    return FSDP_OK;
}
static void bad_device_close(fsdp_device *device) {
    HOST->close(DEV(device)->real);
    free(DEV(device));
}
static fsdp_status bad_device_alloc(fsdp_device *device, int kind, size_t size, void **out) {
    if (fires(DEV(device)->fault, "alloc", "")) return FSDP_ERR_OUT_OF_MEMORY;
    return HOST->alloc(DEV(device)->real, kind, size, out);
}
static void bad_device_free(fsdp_device *device, int kind, void *ptr, size_t size) {
    HOST->free(DEV(device)->real, kind, ptr, size);
}
static fsdp_status bad_copy(fsdp_device *device, void *stream, const fsdp_op *op) {
    if (fires(DEV(device)->fault, "copy", op->what)) return DEV(device)->fault->status;
    return HOST->copy(DEV(device)->real, stream, op);
}
static fsdp_status bad_zero(fsdp_device *device, void *stream, const fsdp_op *op) {
    if (fires(DEV(device)->fault, "zero", op->what)) return DEV(device)->fault->status;
    return HOST->zero(DEV(device)->real, stream, op);
}
static fsdp_status bad_norm(fsdp_device *device, void *stream, const fsdp_op *op) {
    if (fires(DEV(device)->fault, "norm", op->what)) return DEV(device)->fault->status;
    return HOST->norm(DEV(device)->real, stream, op);
}
static fsdp_device_ops bad_device_ops(void) {
    fsdp_device_ops ops = *HOST;
    ops.name = "bad";
    ops.open = bad_device_open, ops.close = bad_device_close;
    ops.alloc = bad_device_alloc, ops.free = bad_device_free;
    ops.copy = bad_copy, ops.zero = bad_zero, ops.norm = bad_norm;
    return ops;
}

typedef struct {
    const char *name;
    int world, victim, lanes, device, is_thread;
    fsdp_status status;
} op_row;
static const op_row op_rows[] = {
    {"device/W=1", 1, 0, 0, 1, 1, FSDP_ERR_BACKEND},
    {"device/W=1/lanes", 1, 0, 2, 1, 1, FSDP_ERR_BACKEND},
    {"device/W=2", 2, 1, 0, 1, 1, FSDP_ERR_BACKEND},
    {"device/W=3/lanes", 3, 0, 1, 1, 1, FSDP_ERR_BACKEND},
    {"comm/W=2/rank=0", 2, 0, 0, 0, 1, FSDP_ERR_BACKEND},
    {"comm/W=2/rank=1", 2, 1, 0, 0, 1, FSDP_ERR_IO},
    {"comm/W=2/lanes", 2, 1, 2, 0, 1, FSDP_ERR_BACKEND},
    {"comm/W=3/lanes", 3, 1, 1, 0, 1, FSDP_ERR_TIMEOUT},
    {"comm/W=3", 3, 2, 0, 0, 1, FSDP_ERR_BACKEND},
};

typedef struct {
    const op_row *row;
    int64_t at;
    fsdp_threads threads;
    life lives[MAX_WORLD];
    fault faults[MAX_WORLD];
    fsdp_status closed[MAX_WORLD];
    int checked_getters;
} broken;

/* After a failed collective call each call returns the same status, and getters return memory. */
static void check_sticky(broken *b, life *x) {
    fsdp_status s = x->status;
    fsdp_mesh *mesh;
    fsdp_model *model;
    fsdp_world *w = x->world;
    double norm;
    float one = 1;
    W_CHECK(fsdpi_failed(w) == s, "%s: %s is not sticky", x->call, fsdp_status_name(s));
    CHECK_STATUS(fsdp_barrier(w), s);
    CHECK_STATUS(fsdp_all_reduce(w, NULL, &one, 1, FSDP_F32, FSDP_SUM), s);
    CHECK_STATUS(fsdp_broadcast(w, NULL, &one, 4, 0), s);
    CHECK_STATUS(fsdp_mesh_1d(w, "late", &mesh), s);
    CHECK_STATUS(fsdp_model_create(w, NULL, &model), s);
    CHECK(mesh == NULL && model == NULL);
    for (int u = 0; u < UNITS && x->model; u++) {
        if (!x->unit[u]) return;
        CHECK_STATUS(fsdp_pre_forward(x->unit[u]), s);
        CHECK_STATUS(fsdp_post_forward(x->unit[u]), s);
        CHECK_STATUS(fsdp_pre_backward(x->unit[u]), s);
        CHECK_STATUS(fsdp_post_backward(x->unit[u]), s);
        CHECK_STATUS(fsdp_unshard(x->unit[u]), s);
        CHECK_STATUS(fsdp_wait(x->unit[u]), s);
        CHECK_STATUS(fsdp_reshard(x->unit[u]), s);
        for (int i = 0; i < 3 && x->model->committed; i++) {
            float *data = (float *)fsdp_data(x->unit[u], i),
                  *grad = (float *)fsdp_grad(x->unit[u], i);
            W_CHECK(data && (grad || (u == 1 && i == 1)), "%s: no memory to write to", x->call);
            for (int64_t e = 0; e < numel[i]; e++) {
                data[e] = 1;
                if (grad) grad[e] = 1;
            }
            __atomic_add_fetch(&b->checked_getters, 1, __ATOMIC_SEQ_CST);
        }
    }
    if (!x->model) return;
    CHECK_STATUS(fsdp_finalize_backward(x->model), s);
    CHECK_STATUS(fsdp_clip_grad_norm(x->model, 1, &norm), s);
    CHECK_STATUS(fsdp_grad_norm(x->model, &norm), s);
    CHECK_STATUS(fsdp_zero_grad(x->model), s);
    CHECK_STATUS(fsdp_params_changed(x->model), s);
    CHECK_STATUS(fsdp_init_params(x->model, fill, NULL), s);
    CHECK_STATUS(fsdp_param_load(x->unit[0], 0, NULL), s);
    CHECK_STATUS(fsdp_param_full(x->unit[0], 0, NULL), s);
    CHECK_STATUS(fsdp_param_full_grad(x->unit[0], 0, NULL), s);
    CHECK_STATUS(fsdp_model_reset(x->model), s);
    CHECK_STATUS(fsdp_set_requires_gradient_sync(x->model, NULL, 1), s);
    W_CHECK(!strcmp(fsdp_last_error(w), x->text), "the text has changed to: %s",
            fsdp_last_error(w));
}

static void broken_rank(int rank, int world, void *arg) {
    broken *b = (broken *)arg;
    life *x = &b->lives[rank];
    fault *f = &b->faults[rank];
    fsdp_comm_ops comm = lab_guard_ops();
    fsdp_device_ops device = bad_device_ops();
    snprintf(w_case, sizeof w_case, "%s, operation %lld, rank %d", b->row->name, (long long)b->at,
             rank);
    memset(x, 0, sizeof *x);
    memset(f, 0, sizeof *f);
    x->rank = rank;
    x->size = world;
    f->at = rank == b->row->victim ? b->at : -1;
    f->status = b->row->status;
    f->guard.before = bad_comm, f->guard.text = f->text;
    x->desc = w_desc(rank, world, world > 1 ? &b->threads : NULL, "broken", b->row->lanes);
    x->desc.timeout_ms = deadline_ms(0);
    x->desc.user = f;
    if (b->row->device) x->desc.device_ops = &device;
    else x->desc.comm_ops = &comm;
    w_heap_use(&x->heap, &x->desc);
    live_on(x, rank % 2 == 0 || world > 1);
    if (x->status && x->world && fsdpi_failed(x->world)) check_sticky(b, x);
    b->closed[rank] = fsdp_shutdown(x->world);
    if (x->status && x->world)
        W_CHECK(b->closed[rank] == x->status || b->closed[rank] == 0, "shutdown");
}

static void broken_check(const broken *b, const life *x) {
    const fault *f = &b->faults[b->row->victim];
    char who[20];
    snprintf(who, sizeof who, "rank %d", b->row->victim);
    snprintf(w_case, sizeof w_case, "%s, operation %lld (%s), rank %d", b->row->name,
             (long long)b->at, f->text, x->rank);
    W_CHECK(x->heap.live == 0 && x->heap.live_bytes == 0, "%lld blocks are left",
            (long long)x->heap.live);
    W_CHECK(!x->status == !f->fired, "%s: %s", x->call ? x->call : "", x->text);
    if (!f->fired) return;
    if (x->rank == b->row->victim) {
        int memory = strstr(f->text, " alloc ") != NULL;
        W_CHECK(x->status == (memory ? FSDP_ERR_OUT_OF_MEMORY : f->status), "%s: %s: %s", x->call,
                fsdp_status_name(x->status), x->text);
    } else {
        W_CHECK(strstr(x->text, who) != NULL, "%s: %s: does not name the culprit: %s", x->call,
                fsdp_status_name(x->status), x->text);
    }
}

TEST_P(faults, operations, op_rows, row->lanes ? SLOW | (row->world > 2 ? AT_NIGHT(TSAN) : 0) : 0) {
    broken *b = (broken *)lab_zeros(1, sizeof *b);
    int64_t at;
    int fired = 1;
    b->row = row;
    b->threads.size = row->world;
    for (at = -1; at <= 0 || fired; at++) {
        b->at = at;
        if (row->world == 1) broken_rank(0, 1, b);
        else h_ranks_thread(row->world, broken_rank, b);
        for (int r = 0; r < row->world; r++) broken_check(b, &b->lives[r]);
        fired = b->faults[row->victim].fired;
    }
    h_message("%lld operations, each failed; %d getters gave memory afterwards",
              (long long)(at - 1), b->checked_getters);
    free(b);
}

/* ---- another rank, or another thread, ends the world ----------------------------------------- */

typedef struct {
    int world, lanes, from_thread;
    int ready; /* number of ranks that have a model */
    fsdp_threads threads;
    life lives[MAX_WORLD];
} ended;

static void *abort_later(void *arg) {
    ended *e = (ended *)arg;
    while (__atomic_load_n(&e->ready, __ATOMIC_SEQ_CST) < e->world) usleep(300);
    usleep(2000);
    fsdp_abort(e->lives[0].world, "the test says so");
    return NULL;
}

static void ended_rank(int rank, int world, void *arg) {
    ended *e = (ended *)arg;
    life *x = &e->lives[rank];
    pthread_t id;
    int started = 0;
    snprintf(w_case, sizeof w_case, "W=%d lanes=%d thread=%d", world, e->lanes, e->from_thread);
    memset(x, 0, sizeof *x);
    x->rank = rank;
    x->size = world;
    x->desc = w_desc(rank, world, &e->threads, "ended", e->lanes);
    w_heap_use(&x->heap, &x->desc);
    CALL(NULL, fsdp_init(&x->desc, &x->world));
    CALL(x->world, fsdp_model_create(x->world, NULL, &x->model));
    for (int u = 0; u < UNITS; u++) CALL(x->world, shard(x, u));
    CALL(x->world, fsdp_init_params(x->model, fill, NULL));
    __atomic_add_fetch(&e->ready, 1, __ATOMIC_SEQ_CST);
    if (rank == 0 && e->from_thread) {
        CHECK_EQ_INT(pthread_create(&id, NULL, abort_later, e), 0);
        started = 1;
    }
    for (int step = 0; !x->status; step++) {
        if (rank == 0 && step == 3 && !started) fsdp_abort(x->world, "the test says so");
        live_step(x);
        if (!x->status) (void)went_well(x, fsdp_param_full(x->unit[0], 2, x->full), "param_full");
    }
    CHECK_STATUS(x->status, FSDP_ERR_ABORTED);
    W_CHECK(strstr(x->text, "rank 0") && strstr(x->text, "the test says so"), "%s: %s", x->call,
            x->text);
    if (started) pthread_join(id, NULL);
    CHECK_STATUS(fsdp_shutdown(x->world), FSDP_ERR_ABORTED);
}

static const struct {
    const char *name;
    int world, lanes, from_thread;
} ended_rows[] = {{"W=1", 1, 0, 0},       {"W=1/thread", 1, 1, 1}, {"W=2", 2, 0, 0},
                  {"W=2/lanes", 2, 1, 0}, {"W=2/thread", 2, 0, 1}, {"W=3/lanes/thread", 3, 2, 1}};

TEST_P(faults, abort, ended_rows, row->lanes ? SLOW : 0) {
    for (int n = 0; n < 5; n++) {
        ended *e = (ended *)lab_zeros(1, sizeof *e);
        e->world = e->threads.size = row->world;
        e->lanes = row->lanes;
        e->from_thread = row->from_thread;
        h_ranks_thread(row->world, ended_rank, e);
        for (int r = 0; r < row->world; r++) CHECK_EQ_INT(e->lives[r].heap.live, 0);
        free(e);
    }
}

/* ---- interrupted steps ----------------------------------------------------------------------- */

typedef struct {
    int world, lanes, mixed, cuts;
    fsdp_threads threads;
    float *expected; /* per rank: shards and gradients after an uninterrupted step */
} resets;
enum { RESET_CALLS = 3 * (2 * UNITS + 2 * UNITS + 1), RESET_FLOATS = 1024 };

static void reset_build(life *x, fsdp_world *w, int mixed) {
    fsdp_model_desc md = FSDP_ZERO;
    md.param_dtype = mixed ? FSDP_F32 : FSDP_DTYPE_KEEP;
    md.reduce_dtype = mixed ? FSDP_BF16 : FSDP_DTYPE_KEEP;
    md.direct_min = 300;
    md.debug = 1;
    x->world = w;
    x->rank = fsdp_rank(w);
    x->size = fsdp_world_size(w);
    CALL(w, fsdp_model_create(w, &md, &x->model));
    for (int u = 0; u < UNITS; u++) CALL(w, shard(x, u));
    CALL(w, fsdp_init_params(x->model, fill, NULL));
}

/* Makes call `at` of three microbatches; the first two are without sync. */
static fsdp_status reset_call(life *x, int at) {
    int per = 4 * UNITS + 1, micro = at / per, k = at % per;
    if (k == 0) CALL(x->world, fsdp_set_requires_gradient_sync(x->model, NULL, micro == 2));
    if (k < 2 * UNITS)
        return k % 2 ? fsdp_post_forward(x->unit[k / 2]) : fsdp_pre_forward(x->unit[k / 2]);
    k -= 2 * UNITS;
    if (k == 2 * UNITS) return fsdp_finalize_backward(x->model);
    int u = UNITS - 1 - k / 2;
    if (k % 2 == 0) return fsdp_pre_backward(x->unit[u]);
    write_grads(x, u);
    return fsdp_post_backward(x->unit[u]);
}

/* Copies this rank's shards and gradients to `out`. */
static int reset_state(life *x, float *out) {
    fsdp_param_view v = FSDP_ZERO;
    int n = 0;
    while (fsdp_next_param(x->model, &v)) {
        out[n++] = v.shard_grad != NULL;
        for (int64_t k = 0; k < v.numel; k++) {
            CHECK(n + 2 < RESET_FLOATS);
            out[n++] = ((float *)v.shard)[k];
            if (v.shard_grad) out[n++] = ((float *)v.shard_grad)[k];
        }
    }
    return n;
}

static void reset_rank(int rank, int world, void *arg) {
    resets *s = (resets *)arg;
    fsdp_world_desc d = w_desc(rank, world, &s->threads, "reset", s->lanes);
    fsdp_world *w;
    float want[RESET_FLOATS], got[RESET_FLOATS];
    int n = 0;
    CALL(NULL, fsdp_init(&d, &w));
    for (int cut = -1; cut < RESET_CALLS; cut++) {
        life *x = (life *)lab_zeros(1, sizeof *x);
        snprintf(w_case, sizeof w_case, "W=%d lanes=%d mixed=%d, reset after call %d", world,
                 s->lanes, s->mixed, cut);
        reset_build(x, w, s->mixed);
        for (int at = 0; at <= cut; at++) CALL(w, reset_call(x, at));
        if (cut >= 0 && cut % 4 == 1) /* a wrong call is forgotten, too */
            CHECK_STATUS(fsdp_post_backward(x->unit[0]), FSDP_ERR_INVALID_STATE);
        if (cut >= 0) CALL(w, fsdp_model_reset(x->model));
        for (int u = 0; u < UNITS; u++)
            CHECK(fsdp_unit_state(x->unit[u]) == FSDP_STATE_IDLE &&
                  fsdp_unit_storage(x->unit[u]) == FSDP_STORAGE_SHARDED);
        for (int at = 0; at < RESET_CALLS; at++) CALL(w, reset_call(x, at));
        if (cut < 0) {
            n = reset_state(x, want);
        } else {
            W_CHECK(reset_state(x, got) == n, "another set of gradients");
            for (int k = 0; k < n; k++)
                W_CHECK(!memcmp(&got[k], &want[k], sizeof *got), "value %d is %g, expected %g", k,
                        (double)got[k], (double)want[k]);
        }
        fsdp_model_destroy(x->model);
        free(x);
        if (rank == 0) s->cuts++;
    }
    CALL(NULL, fsdp_shutdown(w));
}

static const struct {
    const char *name;
    int world;
} worlds[] = {{"W=1", 1}, {"W=2", 2}, {"W=3", 3}};

TEST_P(faults, reset, worlds, AT_NIGHT(TSAN)) {
    int cuts = 0;
    for (int k = 0; k < 6; k += row->world == 3 ? 5 : 1) {
        resets s;
        memset(&s, 0, sizeof s);
        s.world = s.threads.size = row->world;
        s.lanes = k % 3;
        s.mixed = k / 3;
        h_ranks_thread(row->world, reset_rank, &s);
        cuts += s.cuts;
    }
    h_message("%d interrupted steps", cuts);
}

/* ---- wrong arguments ------------------------------------------------------------------------- */

static char logged[1100]; /* the last line of the logger */
static int log_lines;
static void keep_log(int level, fsdp_status code, int rank, const char *text, void *user) {
    (void)code, (void)rank;
    CHECK(user == logged && level == FSDP_LOG_ERROR);
    snprintf(logged, sizeof logged, "%s", text);
    log_lines++;
}

static fsdp_world *one_rank(w_heap *heap) {
    fsdp_world *w;
    fsdp_world_desc d = w_desc(0, 1, NULL, NULL, 0);
    if (heap) w_heap_use(heap, &d);
    CALL(NULL, fsdp_init(&d, &w));
    return w;
}

/* A desc with one field changed is refused, and no world is made. */
#define BAD_WORLD(change, word)                                                                    \
    do {                                                                                           \
        fsdp_world_desc d = w_desc(0, 1, NULL, NULL, 0);                                           \
        fsdp_world *w = (fsdp_world *)&d;                                                          \
        w_heap heap;                                                                               \
        w_heap_use(&heap, &d);                                                                     \
        change;                                                                                    \
        REFUSED(NULL, fsdp_init(&d, &w), word);                                                    \
        CHECK(w == NULL && heap.live == 0);                                                        \
    } while (0)

TEST(faults, world_descs) {
    fsdp_device_ops device = *fsdpi_host_ops();
    fsdp_comm_ops comm = *fsdp_shm_comm_ops();
    REFUSED(NULL, fsdp_init(NULL, NULL), "NULL");
    BAD_WORLD(d.size = (uint32_t)sizeof d + 8, "size");
    BAD_WORLD(d.size = 23, "size");
    BAD_WORLD(d.size = 1, "size");
    BAD_WORLD(d.start_canary = 1, "canary");
    BAD_WORLD(d.end_canary = 1, "canary");
    BAD_WORLD(d.end_canary = (uint64_t)1 << 63, "canary");
    BAD_WORLD(d.rank = -1, "rank is -1, world_size is 1");
    BAD_WORLD(d.rank = 1, "rank is 1, world_size is 1");
    BAD_WORLD(d.world_size = -1, "world_size is -1");
    BAD_WORLD(d.world_size = INT32_MIN, "world_size is -2147483648");
    BAD_WORLD(d.local_rank = -1, "local_rank -1");
    BAD_WORLD(d.timeout_ms = -1, "timeout_ms -1");
    BAD_WORLD(d.comm_threads = 3, "comm_threads 3");
    BAD_WORLD(d.comm_threads = INT32_MAX, "comm_threads");
    BAD_WORLD(d.log_level = -1, "log_level -1");
    BAD_WORLD(d.log_level = FSDP_LOG_NONE + 1, "log_level 5");
    BAD_WORLD(d.allocator.alloc = NULL, "allocator");
    BAD_WORLD(d.allocator.free = NULL, "allocator");
    device.version++;
    BAD_WORLD(d.device_ops = &device, "version");
    device.version--, device.size--;
    BAD_WORLD(d.device_ops = &device, "size");
    comm.version++;
    BAD_WORLD((d.world_size = 2, d.job = "x", d.comm_ops = &comm), "version");
    comm.version--, comm.size = 0;
    BAD_WORLD((d.world_size = 2, d.job = "x", d.comm_ops = &comm), "size");
    char job[300];
    memset(job, 'j', sizeof job - 1), job[sizeof job - 1] = 0;
    BAD_WORLD(d.job = job, "name is longer");
    fsdp_world_desc d = w_desc(0, 300, NULL, "many", 0);
    fsdp_world *w;
    fsdp_threads threads = {0, 300, NULL};
    d.threads = &threads;
    REFUSED_AS(FSDP_ERR_UNSUPPORTED, NULL, fsdp_init(&d, &w), "256");
    d = w_desc(0, 2, NULL, "x", 0);
    d.backend = "smoke signals";
    REFUSED_AS(FSDP_ERR_UNSUPPORTED, NULL, fsdp_init(&d, &w), "smoke signals");
    CHECK(w == NULL);
}

/* A wrong value in a launcher's environment is named. */
static void with_env(const char *name, const char *value, fsdp_status expected, const char *word) {
    fsdp_world *w = NULL;
    fsdp_world_desc d = w_desc(0, 0, NULL, NULL, 0);
    d.comm_threads = d.timeout_ms = 0;
    CHECK_EQ_INT(setenv(name, value, 1), 0);
    fsdp_status status = fsdp_init(&d, &w);
    if (expected) REFUSED_AS(expected, NULL, status, word);
    else CALL(NULL, status);
    CHECK((w == NULL) == (expected != FSDP_OK));
    CHECK_STATUS(fsdp_shutdown(w), FSDP_OK);
    unsetenv(name);
}

TEST(faults, environment) {
    static const char *const names[] = {
        "RANK",        "WORLD_SIZE",      "LOCAL_RANK",        "MASTER_PORT",
        "FSDP_JOB_ID", "FSDP_TIMEOUT_MS", "FSDP_COMM_THREADS", "FSDP_LOG_LEVEL",
        "FSDP_BACKEND"};
    for (int i = 0; i < 9; i++) unsetenv(names[i]);
    with_env("RANK", "0", FSDP_ERR_INVALID_ARG, "WORLD_SIZE is not");
    with_env("WORLD_SIZE", "2", FSDP_ERR_INVALID_ARG, "RANK is not");
    with_env("FSDP_TIMEOUT_MS", "soon", FSDP_ERR_INVALID_ARG, "FSDP_TIMEOUT_MS is 'soon'");
    with_env("FSDP_TIMEOUT_MS", "0", FSDP_ERR_INVALID_ARG, "FSDP_TIMEOUT_MS");
    with_env("FSDP_TIMEOUT_MS", "99999999999", FSDP_ERR_INVALID_ARG, "FSDP_TIMEOUT_MS");
    with_env("FSDP_TIMEOUT_MS", "500", FSDP_OK, "");
    with_env("FSDP_COMM_THREADS", "many", FSDP_ERR_INVALID_ARG, "FSDP_COMM_THREADS");
    with_env("FSDP_COMM_THREADS", "7", FSDP_ERR_INVALID_ARG,
             "FSDP_COMM_THREADS is '7', expected an integer from 0 to 2");
    with_env("FSDP_COMM_THREADS", "2", FSDP_OK, "");
    with_env("FSDP_COMM_THREADS", "", FSDP_OK, "");
    with_env("FSDP_LOG_LEVEL", "loud", FSDP_ERR_INVALID_ARG, "FSDP_LOG_LEVEL is 'loud'");
    with_env("FSDP_LOG_LEVEL", "none", FSDP_OK, "");
    with_env("FSDP_BACKEND", "nothing", FSDP_ERR_UNSUPPORTED, "nothing");
    CHECK_EQ_INT(setenv("WORLD_SIZE", "2", 1), 0);
    with_env("RANK", "2", FSDP_ERR_INVALID_ARG, "RANK is 2");
    with_env("RANK", "-1", FSDP_ERR_INVALID_ARG, "RANK is '-1'");
    with_env("RANK", "1x", FSDP_ERR_INVALID_ARG, "RANK is '1x'");
    with_env("RANK", "0", FSDP_ERR_INVALID_ARG, "common job name");
    CHECK_EQ_INT(setenv("RANK", "0", 1), 0);
    with_env("WORLD_SIZE", "0", FSDP_ERR_INVALID_ARG, "WORLD_SIZE");
    CHECK_EQ_INT(setenv("WORLD_SIZE", "1", 1), 0);
    with_env("LOCAL_RANK", "first", FSDP_ERR_INVALID_ARG, "LOCAL_RANK is 'first'");
    with_env("LOCAL_RANK", "0", FSDP_OK, "");
}

/* The backend sets the default number of worker threads, and the model's description gives the
   reason. */
static fsdp_status spread_open(const fsdp_boot *boot, fsdp_caps *caps, fsdp_comm **out) {
    fsdp_status status = fsdp_shm_comm_ops()->open(boot, caps, out);
    caps->default_comm_threads = 2, caps->mode_reason = "as this test has it";
    return status;
}
static const struct {
    const char *name;
    int spread, lanes;
    const char *variable, *expected; /* variable: a value, or NAME=VALUE */
} runs[] = {{"default", 0, 0, NULL, "inline, by default"},
            {"asked", 0, 1, NULL,
             "in a worker thread, as fsdp_world_desc.comm_threads or FSDP_COMM_THREADS says"},
            {"variable", 0, 0, "2",
             "in two worker threads, as fsdp_world_desc.comm_threads or FSDP_COMM_THREADS says"},
            {"old_name", 0, 0, "FSDP_LANES=2",
             "in two worker threads, as fsdp_world_desc.comm_threads or FSDP_COMM_THREADS says"},
            {"old_name_inline", 1, 0, "FSDP_LANES=0",
             "inline, as fsdp_world_desc.comm_threads or FSDP_COMM_THREADS says"},
            {"spread", 1, 0, NULL, "in two worker threads, as this test has it"},
            {"spread_empty", 1, 0, "", "in two worker threads, as this test has it"},
            {"spread_inline", 1, -1, NULL,
             "inline, as fsdp_world_desc.comm_threads or FSDP_COMM_THREADS says"},
            {"spread_variable", 1, 0, "0",
             "inline, as fsdp_world_desc.comm_threads or FSDP_COMM_THREADS says"},
            {"spread_one", 1, 0, "1",
             "in a worker thread, as fsdp_world_desc.comm_threads or FSDP_COMM_THREADS says"},
            {"spread_desc_first", 1, 1, "0",
             "in a worker thread, as fsdp_world_desc.comm_threads or FSDP_COMM_THREADS says"}};
static void how_it_runs(int rank, int world, void *arg) {
    const size_t k = (size_t)(uintptr_t)arg;
    fsdp_world_desc d = w_desc(rank, world, NULL, w_job(runs[k].name), 0);
    fsdp_comm_ops ops = *fsdp_shm_comm_ops();
    fsdp_world *w = NULL;
    fsdp_model *model;
    char text[200], expected[200];
    ops.open = spread_open;
    d.comm_threads = runs[k].lanes;
    if (runs[k].spread) d.comm_ops = &ops;
    const char *value = runs[k].variable;
    if (value && strchr(value, '=')) CHECK_EQ_INT(putenv((char *)(uintptr_t)value), 0);
    else if (value) CHECK_EQ_INT(setenv("FSDP_COMM_THREADS", value, 1), 0);
    CALL(NULL, fsdp_init(&d, &w));
    CALL(w, fsdp_model_create(w, NULL, &model));
    (void)fsdp_model_describe(model, text, sizeof text);
    snprintf(expected, sizeof expected, "rank %d of 2; collectives run %s\n", rank,
             runs[k].expected);
    CHECK_MSG(strstr(text, expected), "%s, expected %s", text, expected);
    CHECK_STATUS(fsdp_shutdown(w), FSDP_OK);
}
TEST_P(faults, comm_threads_by_default, runs) {
    unsetenv("FSDP_COMM_THREADS");
    unsetenv("FSDP_LANES");
    h_ranks_proc(2, how_it_runs, (void *)(uintptr_t)(row - runs));
}

/* Older programs have shorter structs: only the fields that they know, followed by a canary. */
#define CUT(type, field, buffer, desc)                                                             \
    do {                                                                                           \
        uint32_t cut_size = (uint32_t)(offsetof(type, field) + 8);                                 \
        memset(buffer, 0, sizeof buffer);                                                          \
        memcpy(buffer, &(desc), offsetof(type, field));                                            \
        memcpy(buffer, &cut_size, sizeof cut_size);                                                \
    } while (0)

TEST(faults, older_programs) {
    union {
        char bytes[1024];
        uint64_t align;
    } b;
    uint64_t one = 1;
    fsdp_world *w;
    fsdp_model *m;
    fsdp_unit *u;
    fsdp_world_desc d = w_desc(0, 1, NULL, NULL, 0);
    CUT(fsdp_world_desc, clock, b.bytes, d);
    CALL(NULL, fsdp_init((fsdp_world_desc *)(void *)b.bytes, &w));
    CALL(NULL, fsdp_shutdown(w));
    memcpy(b.bytes + offsetof(fsdp_world_desc, clock), &one, sizeof one);
    REFUSED(NULL, fsdp_init((fsdp_world_desc *)(void *)b.bytes, &w), "canary");
    w = one_rank(NULL);
    fsdp_model_desc md = FSDP_ZERO;
    md.direct_min = 77;
    CUT(fsdp_model_desc, fill_bytes, b.bytes, md);
    CALL(w, fsdp_model_create(w, (fsdp_model_desc *)(void *)b.bytes, &m));
    CHECK(m->desc.direct_min == 77 && m->desc.fill_bytes == 16 << 20);
    fsdp_param_desc p = fsdp_mat("w", 6, 5);
    char *array = b.bytes;
    size_t stride = offsetof(fsdp_param_desc, shard_dim) + 8; /* without shard_dim and frozen */
    memset(b.bytes, 0, sizeof b.bytes);
    for (int i = 0; i < 3; i++) {
        static const char *const names[] = {"u", "v", "w"};
        p.size = (uint32_t)stride;
        p.name = names[i];
        p.shape[0] = 6 + i;
        memcpy(array + (size_t)i * stride, &p, stride - 8);
    }
    u = lab_unit(w, m, NULL, (fsdp_param_desc *)(void *)array, 3);
    for (int i = 0; i < 3; i++) {
        fsdp_param_view v = lab_view(w, u, i);
        CHECK(v.shape[0] == 6 + i && v.shape[1] == 5 && v.numel == 5 * (6 + i) && v.requires_grad);
    }
    lab_forward(w, u);
    CALL(NULL, fsdp_shutdown(w));
}

#define BAD_MODEL(change, word)                                                                    \
    do {                                                                                           \
        fsdp_model_desc md = FSDP_ZERO;                                                            \
        fsdp_model *made = (fsdp_model *)&md;                                                      \
        int64_t live = heap.live;                                                                  \
        change;                                                                                    \
        REFUSED(w, fsdp_model_create(w, &md, &made), word);                                        \
        CHECK(made == NULL && heap.live == live);                                                  \
    } while (0)

TEST(faults, model_descs) {
    w_heap heap, other_heap;
    fsdp_world *w = one_rank(&heap), *other = one_rank(&other_heap);
    fsdp_mesh *mesh;
    fsdp_mesh_desc grid = FSDP_ZERO;
    fsdp_model *m;
    REFUSED(NULL, fsdp_model_create(NULL, NULL, &m), "NULL");
    REFUSED(w, fsdp_model_create(w, NULL, NULL), "NULL");
    BAD_MODEL(md.size = (uint32_t)sizeof md + 1, "size");
    BAD_MODEL(md.size = 16, "size");
    BAD_MODEL(md.start_canary = 9, "canary");
    BAD_MODEL(md.end_canary = 9, "canary");
    BAD_MODEL(md.param_dtype = -1, "param_dtype");
    BAD_MODEL(md.param_dtype = FSDP_DTYPE_COUNT, "param_dtype");
    BAD_MODEL(md.param_dtype = FSDP_I32, "param_dtype");
    BAD_MODEL(md.reduce_dtype = 1000, "reduce_dtype");
    BAD_MODEL(md.reduce_dtype = FSDP_U8, "reduce_dtype");
    BAD_MODEL(md.grad_dtype = FSDP_I8, "grad_dtype");
    BAD_MODEL(md.output_dtype = FSDP_U8, "output_dtype");
    BAD_MODEL(md.implicit_prefetch = 2, "implicit_prefetch 2");
    BAD_MODEL(md.implicit_prefetch = -2, "implicit_prefetch -2");
    BAD_MODEL(md.prefetch_bytes = -1, "prefetch_bytes");
    BAD_MODEL(md.reshard_after_forward = -2, "reshard_after_forward is -2");
    BAD_MODEL(md.direct_min = -1, "direct_min -1");
    BAD_MODEL(md.fill_bytes = -1, "fill_bytes -1");
    BAD_MODEL(md.fill_bytes = INT64_MIN, "fill_bytes");
    CALL(other, fsdp_mesh_1d(other, NULL, &mesh));
    BAD_MODEL(md.mesh = mesh, "another world");
    grid.ndim = 2, grid.shape[0] = grid.shape[1] = 1;
    CALL(w, fsdp_mesh_create(w, &grid, &mesh));
    fsdp_model_desc md = FSDP_ZERO;
    md.mesh = mesh;
    REFUSED(w, fsdp_model_create(w, &md, &m), "name"); /* the dim that shards is not given */
    grid.ndim = 3, grid.shape[2] = 1;
    CALL(w, fsdp_mesh_create(w, &grid, &mesh));
    md.mesh = mesh;
    REFUSED(w, fsdp_model_create(w, &md, &m), "3");
    /* an int of the model is checked against the shard group of each unit that uses it */
    md.mesh = NULL, md.reshard_after_forward = 2;
    fsdp_param_desc p = fsdp_vec("b", 4);
    fsdp_unit_desc ud = FSDP_ZERO;
    fsdp_unit *u;
    ud.params = &p, ud.num_params = 1;
    CALL(w, fsdp_model_create(w, &md, &m));
    REFUSED(w, fsdp_fully_shard(m, &ud, &u), "reshard_after_forward is 2");
    grid.ndim = 0;
    REFUSED(w, fsdp_mesh_create(w, &grid, &mesh), "ndim is 0");
    grid.ndim = FSDP_MAX_DIMS + 1;
    REFUSED(w, fsdp_mesh_create(w, &grid, &mesh), "ndim is 9");
    grid.ndim = 1, grid.shape[0] = 0;
    REFUSED(w, fsdp_mesh_create(w, &grid, &mesh), "size of dim 0 is 0");
    grid.shape[0] = -3;
    REFUSED(w, fsdp_mesh_create(w, &grid, &mesh), "-3");
    grid.shape[0] = 2;
    REFUSED(w, fsdp_mesh_create(w, &grid, &mesh), "the product of the sizes exceeds");
    grid.shape[0] = 1;
    grid.end_canary = 1;
    REFUSED(w, fsdp_mesh_create(w, &grid, &mesh), "canary");
    grid.end_canary = 0;
    const int32_t ranks[1] = {1};
    grid.ranks = ranks;
    REFUSED(w, fsdp_mesh_create(w, &grid, &mesh), "ranks has 1, expected 0..0");
    CHECK(mesh == NULL);
    REFUSED(w, fsdp_mesh_create(w, NULL, &mesh), "NULL");
    REFUSED(NULL, fsdp_mesh_create(NULL, &grid, &mesh), "NULL");
    CALL(NULL, fsdp_shutdown(other));
    CALL(NULL, fsdp_shutdown(w));
    CHECK(heap.live == 0 && other_heap.live == 0);
}

/* A unit with one wrong field is refused, and the model is unchanged. */
#define BAD_UNIT_AS(status, change, word)                                                          \
    do {                                                                                           \
        fsdp_param_desc p[2] = {fsdp_mat("good", 4, 4), fsdp_mat("weight", 6, 5)};                 \
        fsdp_unit_desc ud = FSDP_ZERO;                                                             \
        fsdp_unit *u = (fsdp_unit *)&ud;                                                           \
        ud.params = p, ud.num_params = 2, ud.name = "layer";                                       \
        change;                                                                                    \
        REFUSED_AS(status, w, fsdp_fully_shard(m, &ud, &u), word);                                 \
        CHECK(u == NULL && fsdp_num_units(m) == 1 && fsdp_num_params(m) == 1);                     \
    } while (0)
#define BAD_UNIT(change, word) BAD_UNIT_AS(FSDP_ERR_INVALID_ARG, change, word)

TEST(faults, unit_descs) {
    w_heap heap;
    fsdp_world *w = one_rank(&heap);
    fsdp_model *m;
    fsdp_unit *unit;
    fsdp_memory before, after;
    fsdp_param_desc good = fsdp_vec("b", 10);
    fsdp_unit_desc gd = FSDP_ZERO;
    CALL(w, fsdp_model_create(w, NULL, &m));
    REFUSED_AS(FSDP_ERR_INVALID_STATE, w, fsdp_model_commit(m), "no units");
    REFUSED_AS(FSDP_ERR_INVALID_STATE, w, fsdp_finalize_backward(m), "no units");
    REFUSED_AS(FSDP_ERR_INVALID_STATE, w, fsdp_model_predict(m, &before), "no units");
    gd.params = &good, gd.num_params = 1;
    CALL(w, fsdp_fully_shard(m, &gd, &unit));
    CALL(w, fsdp_model_predict(m, &before));
    REFUSED(NULL, fsdp_fully_shard(NULL, &gd, &unit), "NULL");
    REFUSED(w, fsdp_fully_shard(m, NULL, &unit), "NULL");
    REFUSED(w, fsdp_fully_shard(m, &gd, NULL), "NULL");
    BAD_UNIT(ud.size = (uint32_t)sizeof ud + 8, "size");
    BAD_UNIT(ud.start_canary = 1, "canary");
    BAD_UNIT(ud.end_canary = 1, "canary");
    BAD_UNIT(ud.params = NULL, "params");
    BAD_UNIT(ud.num_params = 0, "num_params is 0");
    BAD_UNIT(ud.num_params = -1, "num_params is -1");
    BAD_UNIT(ud.reshard_after_forward = 2, "reshard_after_forward is 2");
    BAD_UNIT(ud.reshard_after_forward = -7, "reshard_after_forward is -7");
    BAD_UNIT(ud.param_dtype = FSDP_I8, "param_dtype");
    BAD_UNIT(ud.param_dtype = 99, "param_dtype");
    BAD_UNIT(ud.reduce_dtype = -5, "reduce_dtype");
    BAD_UNIT(p[1].size = (uint32_t)sizeof p[1] + 8, "size");
    BAD_UNIT(p[1].start_canary = 1, "canary");
    BAD_UNIT(p[1].end_canary = 1, "canary");
    BAD_UNIT(p[1].dtype = -1, "'weight'");
    BAD_UNIT(p[1].dtype = FSDP_DTYPE_COUNT, "dtype is 10");
    BAD_UNIT(p[0].dtype = p[1].dtype = FSDP_I32, "requires a gradient");
    BAD_UNIT(p[0].dtype = FSDP_U8, "'good'");
    BAD_UNIT(p[1].ndim = 0, "scalar");
    BAD_UNIT(p[1].ndim = 0, "'weight'");
    BAD_UNIT(p[1].ndim = -1, "ndim is -1");
    BAD_UNIT(p[1].ndim = FSDP_MAX_DIMS + 1, "ndim is 9");
    BAD_UNIT(p[1].shard_dim = 2, "shard_dim is 2");
    BAD_UNIT(p[1].shard_dim = -3, "shard_dim is -3");
    BAD_UNIT(p[1].shape[0] = -1, "size of dim 0 is -1");
    BAD_UNIT(p[1].shape[1] = INT64_MIN, "of dim 1");
    BAD_UNIT(p[1].shape[0] = INT64_MAX, "'layer'");
    BAD_UNIT((p[1].shape[0] = INT64_MAX, p[1].shape[1] = 0), "'layer'");
    BAD_UNIT((p[1].shape[0] = (int64_t)1 << 31, p[1].shape[1] = (int64_t)1 << 31), "'layer'");
    BAD_UNIT((p[0].shape[0] = p[1].shape[0] = (int64_t)1 << 57), "'layer'");
    BAD_UNIT(p[1].dtype = FSDP_I32, "'weight'"); /* only frozen parameters may be integers */
    CALL(w, fsdp_model_predict(m, &after));
    CHECK_EQ_MEM(before.pool_bytes, after.pool_bytes, sizeof before.pool_bytes);
    CALL(w, fsdp_model_commit(m));
    CALL(w, fsdp_model_commit(m));
    REFUSED_AS(FSDP_ERR_INVALID_STATE, w, fsdp_fully_shard(m, &gd, &unit), "committed");
    CHECK(unit == NULL);
    CALL(NULL, fsdp_shutdown(w));
    CHECK_EQ_INT(heap.live, 0);
}

/* A model that is too large: commit refuses it with its size, and it can be destroyed. */
TEST(faults, too_large) {
    w_heap heap;
    fsdp_world *w = one_rank(&heap);
    fsdp_model *m;
    fsdp_unit *u;
    fsdp_memory predicted;
    fsdp_param_desc p = fsdp_mat("huge", (int64_t)1 << 40, 1 << 10);
    fsdp_unit_desc ud = FSDP_ZERO;
    ud.params = &p, ud.num_params = 1;
    CALL(w, fsdp_model_create(w, NULL, &m));
    CALL(w, fsdp_fully_shard(m, &ud, &u));
    CALL(w, fsdp_model_predict(m, &predicted));
    CHECK(predicted.total_bytes >= (int64_t)1 << 53);
    REFUSED_AS(FSDP_ERR_OUT_OF_MEMORY, w, fsdp_model_commit(m), "4503599627370496");
    REFUSED_AS(FSDP_ERR_OUT_OF_MEMORY, w, fsdp_pre_forward(u), "shards");
    CHECK(fsdp_data(u, 0) == NULL);
    CHECK_STATUS(fsdp_shutdown(w), FSDP_OK);
    CHECK_EQ_INT(heap.live, 0);
}

TEST(faults, null_and_range) {
    w_heap heap;
    fsdp_world *w = one_rank(&heap);
    fsdp_model *m;
    fsdp_unit *u;
    fsdp_param_view v = FSDP_ZERO;
    fsdp_flat flat;
    fsdp_memory memory;
    fsdp_counters counters;
    fsdp_mesh *mesh;
    fsdp_mesh_info info;
    double x = 1;
    fsdp_param_desc p = fsdp_mat("w", 4, 4);
    fsdp_unit_desc ud = FSDP_ZERO;
    ud.params = &p, ud.num_params = 1, ud.name = "only";
    REFUSED(NULL, fsdp_model_commit(NULL), "NULL");
    REFUSED(NULL, fsdp_model_reserve(NULL), "NULL");
    REFUSED(NULL, fsdp_model_reset(NULL), "NULL");
    REFUSED(NULL, fsdp_finalize_backward(NULL), "NULL");
    REFUSED(NULL, fsdp_zero_grad(NULL), "NULL");
    REFUSED(NULL, fsdp_params_changed(NULL), "NULL");
    REFUSED(NULL, fsdp_init_params(NULL, fill, NULL), "NULL");
    REFUSED(NULL, fsdp_clip_grad_norm(NULL, 1, &x), "NULL");
    REFUSED(NULL, fsdp_grad_norm(NULL, &x), "NULL");
    REFUSED(NULL, fsdp_model_flat(NULL, FSDP_F32, &flat), "NULL");
    REFUSED(NULL, fsdp_model_memory(NULL, &memory), "NULL");
    REFUSED(NULL, fsdp_model_predict(NULL, &memory), "NULL");
    REFUSED(NULL, fsdp_model_counters(NULL, &counters), "NULL");
    REFUSED(NULL, fsdp_set_grad_enabled(NULL, 1), "NULL");
    REFUSED(NULL, fsdp_set_is_last_backward(NULL, 1), "NULL");
    REFUSED(NULL, fsdp_set_requires_gradient_sync(NULL, NULL, 1), "NULL");
    REFUSED(NULL, fsdp_set_reshard_after_forward(NULL, NULL, 1), "NULL");
    REFUSED(NULL, fsdp_set_reshard_after_backward(NULL, NULL, 1), "NULL");
    REFUSED(NULL, fsdp_attach(NULL, NULL), "NULL");
    REFUSED(NULL, fsdp_param_at(NULL, 0, &v), "NULL");
    REFUSED(NULL, fsdp_param_view_get(NULL, 0, &v), "NULL");
    REFUSED(NULL, fsdp_param_load(NULL, 0, &x), "NULL");
    REFUSED(NULL, fsdp_param_full(NULL, 0, &x), "NULL");
    REFUSED(NULL, fsdp_param_full_grad(NULL, 0, &x), "NULL");
    REFUSED(NULL, fsdp_pre_forward(NULL), "NULL");
    REFUSED(NULL, fsdp_post_forward(NULL), "NULL");
    REFUSED(NULL, fsdp_pre_backward(NULL), "NULL");
    REFUSED(NULL, fsdp_post_backward(NULL), "NULL");
    REFUSED(NULL, fsdp_unshard(NULL), "NULL");
    REFUSED(NULL, fsdp_wait(NULL), "NULL");
    REFUSED(NULL, fsdp_reshard(NULL), "NULL");
    REFUSED(NULL, fsdp_unit_mesh_info(NULL, &info), "NULL");
    REFUSED(NULL, fsdp_barrier(NULL), "NULL");
    REFUSED(NULL, fsdp_all_reduce(NULL, NULL, &x, 1, FSDP_F64, FSDP_SUM), "NULL");
    REFUSED(NULL, fsdp_broadcast(NULL, NULL, &x, 8, 0), "NULL");
    REFUSED(NULL, fsdp_mesh_info_init(NULL, FSDP_MESH_INFO_FSDP, 0, -1, &info), "NULL");
    CHECK(fsdp_data(NULL, 0) == NULL && fsdp_grad(NULL, 0) == NULL);
    CHECK(fsdp_num_params(NULL) == 0 && fsdp_num_units(NULL) == 0 && !*fsdp_unit_name(NULL));
    CHECK(fsdp_rank(NULL) == -1 && fsdp_world_size(NULL) == -1 && fsdp_local_rank(NULL) == -1);
    CHECK(fsdp_mesh_ndim(NULL) == -1 && fsdp_mesh_size(NULL, 0) == -1 &&
          fsdp_mesh_rank(NULL, 0) == -1);
    CHECK(fsdp_next_param(NULL, &v) == 0);
    char text[5] = "xxxx";
    CHECK(fsdp_model_describe(NULL, text, sizeof text) == 0 && !*text);
    CHECK_EQ_INT(fsdp_model_describe(NULL, text + 1, 0), 0);
    CHECK_EQ_INT(text[1], 'x');
    CHECK_STATUS(fsdp_shutdown(NULL), FSDP_OK);
    fsdp_model_destroy(NULL);
    fsdp_abort(NULL, "nobody");

    CALL(w, fsdp_model_create(w, NULL, &m));
    CHECK(fsdp_next_param(m, &v) == 0);
    CALL(w, fsdp_fully_shard(m, &ud, &u));
    CHECK(lab_undefined(m, fsdp_data(u, 0)) && lab_undefined(m, fsdp_grad(u, 0))); /* uncommitted */
    REFUSED(w, fsdp_init_params(m, NULL, NULL), "fn is NULL");
    REFUSED(w, fsdp_param_at(m, 1, &v), "parameter 1");
    REFUSED(w, fsdp_param_at(m, -1, &v), "parameter -1");
    REFUSED(w, fsdp_param_view_get(u, 1, &v), "parameter 1");
    REFUSED(w, fsdp_param_view_get(u, -1, &v), "'only'");
    REFUSED(w, fsdp_param_load(u, 1, &x), "parameter 1");
    REFUSED(w, fsdp_param_load(u, 0, NULL), "full is NULL");
    CALL(w, fsdp_param_full(u, 0, NULL)); /* takes part, and keeps nothing */
    REFUSED(w, fsdp_param_full(u, 1, &x), "'only'");
    REFUSED(w, fsdp_param_full_grad(u, INT32_MIN, &x), "'only'");
    REFUSED(w, fsdp_model_flat(m, 0, &flat), "dtype is 0");
    REFUSED(w, fsdp_model_flat(m, FSDP_DTYPE_COUNT, &flat), "dtype is 10");
    REFUSED(w, fsdp_model_flat(m, FSDP_F32, NULL), "NULL");
    REFUSED(w, fsdp_set_reshard_after_forward(m, NULL, 0), "mode is 0");
    REFUSED(w, fsdp_all_reduce(w, NULL, &x, -1, FSDP_F64, FSDP_SUM), "count is -1");
    REFUSED(w, fsdp_all_reduce(w, NULL, NULL, 1, FSDP_F64, FSDP_SUM), "NULL");
    REFUSED(w, fsdp_all_reduce(w, NULL, &x, 1, FSDP_U8, FSDP_SUM), "u8");
    REFUSED(w, fsdp_all_reduce(w, NULL, &x, 1, 0, FSDP_SUM), "dtype");
    REFUSED(w, fsdp_all_reduce(w, NULL, &x, 1, FSDP_F64, 3), "op is 3");
    REFUSED(w, fsdp_broadcast(w, NULL, &x, 8, 1), "root is 1");
    REFUSED(w, fsdp_broadcast(w, NULL, &x, -8, 0), "-8");
    CALL(w, fsdp_mesh_1d(w, NULL, &mesh));
    REFUSED(w, fsdp_mesh_info_init(mesh, 7, 0, -1, &info), "kind is 7");
    REFUSED(w, fsdp_mesh_info_init(mesh, FSDP_MESH_INFO_FSDP, -1, -1, &info), "E120");
    REFUSED(w, fsdp_mesh_info_init(mesh, FSDP_MESH_INFO_FSDP, 0, 0, &info), "FSDP");
    REFUSED(w, fsdp_mesh_info_init(mesh, FSDP_MESH_INFO_DDP, 0, -1, &info), "DDP");
    REFUSED(w, fsdp_mesh_info_init(mesh, FSDP_MESH_INFO_HSDP, 0, -1, &info), "HSDP");
    REFUSED(w, fsdp_mesh_info_init(mesh, FSDP_MESH_INFO_HSDP, 0, 0, &info), "two different");
    REFUSED(w, fsdp_mesh_info_init(mesh, FSDP_MESH_INFO_FSDP, 1, -1, &info), "shard_dim 1");
    REFUSED(NULL, fsdp_mesh_info_init(mesh, FSDP_MESH_INFO_FSDP, 0, -1, NULL), "NULL");
    fsdp_model *second;
    fsdp_unit *other;
    CALL(w, fsdp_model_create(w, NULL, &second));
    CALL(w, fsdp_fully_shard(second, &ud, &other));
    REFUSED(w, fsdp_set_requires_gradient_sync(m, other, 0), "another model");
    CHECK(lab_undefined(m, fsdp_data(u, 0))); /* sharded */
    CHECK_STATUS(fsdp_finalize_backward(m), FSDP_ERR_INVALID_STATE);
    CALL(w, fsdp_pre_forward(u));
    CHECK(fsdp_data(u, 0) != NULL && !lab_undefined(m, fsdp_data(u, 0)));
    CHECK(lab_undefined(m, fsdp_data(u, 1)) && lab_undefined(m, fsdp_data(u, -1)));
    CHECK(lab_undefined(m, fsdp_grad(u, 0)) && lab_undefined(m, fsdp_grad(u, 7)));
    CALL(w, fsdp_post_forward(u));
    CALL(w, fsdp_pre_backward(u));
    CHECK(fsdp_grad(u, 0) != NULL && !lab_undefined(m, fsdp_grad(u, 0)));
    CHECK(lab_undefined(m, fsdp_grad(u, 7)) && lab_undefined(m, fsdp_grad(u, -1)));
    CALL(w, fsdp_post_backward(u));
    CHECK_STATUS(fsdp_finalize_backward(m), FSDP_ERR_INVALID_ARG); /* parameter 1, as the first */
    CALL(w, fsdp_finalize_backward(m));
    CALL(NULL, fsdp_shutdown(w));
    CHECK_EQ_INT(heap.live, 0);
}

/* The desc's logger gets each failure once, at its level. */
TEST(faults, logger) {
    fsdp_world_desc d = w_desc(0, 1, NULL, NULL, 0);
    fsdp_world *w;
    fsdp_model_desc md = FSDP_ZERO;
    fsdp_model *m;
    d.logger.log = keep_log;
    d.logger.user = logged;
    d.comm_threads = 9;
    REFUSED(NULL, fsdp_init(&d, &w), "comm_threads 9");
    CHECK_EQ_INT(log_lines, 1);
    CHECK(strstr(logged, "comm_threads 9") != NULL);
    d.comm_threads = -1;
    CALL(NULL, fsdp_init(&d, &w));
    CHECK_EQ_INT(log_lines, 1);
    REFUSED(w, fsdp_barrier(w) ? FSDP_OK : fsdp_broadcast(w, NULL, &d, 1, 4), "root is 4");
    CHECK_EQ_INT(log_lines, 2);
    CHECK_EQ_STR(logged, fsdp_last_error(w));
    CHECK(strstr(logged, "rank 0") != NULL);
    md.end_canary = 1;
    REFUSED(w, fsdp_model_create(w, &md, &m), "canary");
    CHECK_EQ_INT(log_lines, 3);
    CALL(NULL, fsdp_shutdown(w));
    d.log_level = FSDP_LOG_NONE;
    CALL(NULL, fsdp_init(&d, &w));
    REFUSED(w, fsdp_broadcast(w, NULL, &d, 1, 4), "root is 4");
    CALL(NULL, fsdp_shutdown(w));
    CHECK_EQ_INT(log_lines, 3);
}
