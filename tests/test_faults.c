/* test_faults.c - what goes wrong: every host allocation, every operation of the backend and of the
   device, wrong arguments, interrupted steps. No call hangs, nothing leaks, and the text says why. */
#include "harness.h"
#define FSDP_IMPLEMENTATION
#include "fsdp.h"
#include "world.h"

enum { UNITS = 3, MAX_WORLD = 4 };

/* Deadline of worlds in which a rank does not come; longer under sanitizers. */
static int patience_ms(void) {
    const char *mult = getenv("TEST_TIMEOUT_MULT");
    return mult && *mult && atof(mult) > 1 ? 1500 : 400;
}

/* ---- the life of a job, from init to shutdown -------------------------------------------------------- */

typedef struct {
    int rank, size, lanes, retry; /* retry: a call that fails is repeated without faults, and succeeds */
    fsdp_world_desc desc;
    w_heap heap;
    fsdp_world *world;
    fsdp_model *model;
    fsdp_unit *unit[UNITS];
    fsdp_status status; /* of the call that failed */
    const char *call;
    char text[1100];
    int retried, calls;
    double norm;
    float full[64];
} life;

static void stop_faults(life *x);

/* Runs a call of the life; 0: it has failed, and nothing more is called. */
static int went_well(life *x, fsdp_status status, const char *call) {
    x->calls++;
    if (status == FSDP_OK) return 1;
    const char *text = fsdp_last_error(x->world);
    snprintf(x->text, sizeof x->text, "%s", text);
    x->status = status;
    x->call = call;
    W_CHECK(strlen(text) > 8, "%s failed with %s and says '%s'", call, fsdp_status_name(status), text);
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
        ((float *)block->data)[k] = (float)(fsdp_view_index(block, k) % 17) / 8 + (float)block->ordinal;
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

/* Everything that allocates or communicates, once or twice. */
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
    /* what was predicted is what there is, also after calls that had to be repeated */
    fsdp_memory again;
    TRY(x, fsdp_model_predict(x->model, &again));
    for (int pool = 0; pool < FSDP_POOL_SCRATCH; pool++)
        W_CHECK(again.pool_bytes[pool] == memory.pool_bytes[pool],
                "%s: predicted %lld bytes, measured %lld", fsdp_pool_name(pool),
                (long long)again.pool_bytes[pool], (long long)memory.pool_bytes[pool]);
}

/* ---- host allocations ----------------------------------------------------------------------------------- */

typedef struct {
    const char *name;
    int world, victim, lanes, mixed, persistent;
} oom_row;
static const oom_row oom_rows[] = {
    {"W=1", 1, 0, 0, 0, 0},          {"W=1/mixed", 1, 0, 0, 1, 0},
    {"W=1/lanes", 1, 0, 2, 1, 0},    {"W=1/persistent", 1, 0, 1, 0, 1},
    {"W=2/rank=0", 2, 0, 0, 0, 0},   {"W=2/rank=1", 2, 1, 0, 1, 1},
    {"W=2/lanes", 2, 1, 2, 1, 0},    {"W=3/rank=1", 3, 1, 0, 0, 1},
    {"W=3/lanes", 3, 2, 1, 0, 0},
};

typedef struct {
    const oom_row *row;
    int64_t n; /* the allocation that fails; -1: none */
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
    x->desc.timeout_ms = patience_ms();
    w_heap_use(&x->heap, &x->desc);
    if (rank == o->row->victim) {
        x->heap.fail_at = o->n;
        x->heap.persistent = o->row->persistent;
        x->retry = world == 1;
    }
    live_on(x, o->row->mixed);
    o->closed[rank] = fsdp_shutdown(x->world);
}

/* A failure is told with its reason; the others are told which rank it was. */
static void oom_check(const oom *o, const life *x, const life *good) {
    int hit = o->lives[o->row->victim].heap.failures > 0;
    char who[20];
    snprintf(who, sizeof who, "rank %d", o->row->victim);
    snprintf(w_case, sizeof w_case, "%s, allocation %lld, rank %d", o->row->name, (long long)o->n, x->rank);
    W_CHECK(x->heap.live == 0 && x->heap.live_bytes == 0, "%lld blocks of %lld bytes are left; %s: %s",
            (long long)x->heap.live, (long long)x->heap.live_bytes, x->call ? x->call : "", x->text);
    if (x->size == 1 || !hit) {
        W_CHECK(x->retry || !x->status, "%s: %s", x->call, x->text);
        W_CHECK(!memcmp(x->full, good->full, sizeof x->full) && !memcmp(&x->norm, &good->norm, sizeof x->norm),
                "another result than without a fault (after %s: %s)", x->call ? x->call : "", x->text);
        W_CHECK(!o->closed[x->rank], "shutdown: %s", fsdp_status_name(o->closed[x->rank]));
    }
    if (x->status && x->rank == o->row->victim)
        W_CHECK(x->status == FSDP_ERR_OUT_OF_MEMORY && (strstr(x->text, "memory") || strstr(x->text, "alloc")),
                "%s: %s: %s", x->call, fsdp_status_name(x->status), x->text);
    if (x->status && x->rank != o->row->victim)
        W_CHECK(strstr(x->text, who) != NULL, "%s: %s: does not name the culprit: %s", x->call,
                fsdp_status_name(x->status), x->text);
}

TEST_P(faults, host_allocations, oom_rows) {
    life *good = (life *)calloc(MAX_WORLD, sizeof *good);
    oom o;
    int64_t failed = 0, retried = 0, unnoticed = 0, n;
    int hit = 1;
    memset(&o, 0, sizeof o);
    o.row = row;
    o.threads.size = row->world;
    o.lives = (life *)calloc(MAX_WORLD, sizeof *o.lives);
    CHECK(good && o.lives);
    for (n = -1; n <= 0 || hit; n++) {
        o.n = n;
        if (row->world == 1) oom_rank(0, 1, &o);
        else h_ranks_thread(row->world, oom_rank, &o);
        if (n < 0) memcpy(good, o.lives, MAX_WORLD * sizeof *good);
        for (int r = 0; r < row->world; r++) oom_check(&o, &o.lives[r], &good[r]);
        CHECK(o.threads.common == NULL);
        const life *victim = &o.lives[row->victim];
        hit = victim->heap.failures > 0;
        failed += victim->status != FSDP_OK;
        retried += victim->retried;
        unnoticed += hit && !victim->status;
        CHECK(n >= 0 || !hit);
    }
    CHECK_EQ_INT(o.lives[row->victim].status, 0);
    h_message("%lld allocations, each failed: %lld calls reported it, %lld of them succeeded at once "
              "when repeated, %lld did without", (long long)(n - 1), (long long)failed,
              (long long)retried, (long long)unnoticed);
    free(o.lives);
    free(good);
}

/* ---- operations of the backend and of the device ------------------------------------------------------- */

typedef struct {
    int64_t at, count; /* operation `at` fails; counted so far */
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

typedef struct {
    fsdp_comm *real;
    fault *fault;
    int failed;
} bad_comm;
#define REAL (fsdp_shm_comm_ops())
#define BAD(comm) ((bad_comm *)(void *)(comm))

static fsdp_comm *bad_wrap(fsdp_comm *real, fault *f) {
    bad_comm *c = real ? (bad_comm *)calloc(1, sizeof *c) : NULL;
    if (!c) return NULL;
    c->real = real;
    c->fault = f;
    return (fsdp_comm *)(void *)c;
}
static fsdp_status bad_open(const fsdp_boot *boot, fsdp_caps *caps, fsdp_comm **out) {
    fsdp_comm *real;
    fsdp_status status = REAL->open(boot, caps, &real);
    *out = status ? NULL : bad_wrap(real, (fault *)boot->user);
    return status;
}
static fsdp_status bad_split(fsdp_comm *comm, const fsdp_group *group, fsdp_comm **out) {
    fsdp_comm *real;
    if (fires(BAD(comm)->fault, "split", group->name)) return BAD(comm)->failed = 1, BAD(comm)->fault->status;
    fsdp_status status = REAL->split(BAD(comm)->real, group, &real);
    *out = status ? NULL : bad_wrap(real, BAD(comm)->fault);
    return status;
}
static void bad_close(fsdp_comm *comm) {
    REAL->close(BAD(comm)->real);
    free(BAD(comm));
}
static fsdp_status bad_run(fsdp_comm *comm, const fsdp_coll *op) {
    if (fires(BAD(comm)->fault, fsdp_op_name(op->kind), op->what))
        return BAD(comm)->failed = 1, BAD(comm)->fault->status;
    return REAL->run(BAD(comm)->real, op);
}
static fsdp_status bad_alloc(fsdp_comm *comm, size_t size, void **out) {
    if (fires(BAD(comm)->fault, "alloc", "")) return BAD(comm)->failed = 1, FSDP_ERR_OUT_OF_MEMORY;
    return REAL->alloc(BAD(comm)->real, size, out);
}
static void bad_free(fsdp_comm *comm, void *ptr, size_t size) { REAL->free(BAD(comm)->real, ptr, size); }
static const char *bad_text(fsdp_comm *comm) {
    if (!comm) return REAL->error_text(NULL);
    return BAD(comm)->failed ? BAD(comm)->fault->text : REAL->error_text(BAD(comm)->real);
}
static void bad_abort(fsdp_comm *comm, fsdp_status status, const char *why) {
    REAL->abort(BAD(comm)->real, status, why);
}
static fsdp_status bad_poll(fsdp_comm *comm) { return REAL->poll(BAD(comm)->real); }

static fsdp_comm_ops bad_comm_ops(void) {
    fsdp_comm_ops ops = *REAL;
    ops.name = "bad";
    ops.open = bad_open, ops.split = bad_split, ops.close = bad_close, ops.run = bad_run;
    ops.alloc = bad_alloc, ops.free = bad_free, ops.error_text = bad_text, ops.abort = bad_abort;
    ops.poll = bad_poll;
    return ops;
}

typedef struct {
    fsdp_device *real;
    fault *fault;
} bad_device;
#define HOST (fsdpi_host_ops())
#define DEV(device) ((bad_device *)(void *)(device))

static fsdp_status bad_device_open(const fsdp_boot *boot, fsdp_device **out) {
    bad_device *d = (bad_device *)calloc(1, sizeof *d);
    fault *f = (fault *)boot->user;
    CHECK(d != NULL);
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
static fsdp_status bad_device_alloc(fsdp_device *device, size_t size, void **out) {
    if (fires(DEV(device)->fault, "alloc", "")) return FSDP_ERR_OUT_OF_MEMORY;
    return HOST->alloc(DEV(device)->real, size, out);
}
static void bad_device_free(fsdp_device *device, void *ptr, size_t size) {
    HOST->free(DEV(device)->real, ptr, size);
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

/* After the failure of a collective call: the same status everywhere, memory to write to. */
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
            float *data = (float *)fsdp_data(x->unit[u], i), *grad = (float *)fsdp_grad(x->unit[u], i);
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
    CHECK_STATUS(fsdp_zero_grad(x->model), s);
    CHECK_STATUS(fsdp_params_changed(x->model), s);
    CHECK_STATUS(fsdp_init_params(x->model, fill, NULL), s);
    CHECK_STATUS(fsdp_param_load(x->unit[0], 0, NULL), s);
    CHECK_STATUS(fsdp_param_full(x->unit[0], 0, NULL), s);
    CHECK_STATUS(fsdp_param_full_grad(x->unit[0], 0, NULL), s);
    CHECK_STATUS(fsdp_model_reset(x->model), s);
    CHECK_STATUS(fsdp_set_requires_gradient_sync(x->model, NULL, 1), s);
    W_CHECK(!strcmp(fsdp_last_error(w), x->text), "the text has changed to: %s", fsdp_last_error(w));
}

static void broken_rank(int rank, int world, void *arg) {
    broken *b = (broken *)arg;
    life *x = &b->lives[rank];
    fault *f = &b->faults[rank];
    fsdp_comm_ops comm = bad_comm_ops();
    fsdp_device_ops device = bad_device_ops();
    snprintf(w_case, sizeof w_case, "%s, operation %lld, rank %d", b->row->name, (long long)b->at, rank);
    memset(x, 0, sizeof *x);
    memset(f, 0, sizeof *f);
    x->rank = rank;
    x->size = world;
    f->at = rank == b->row->victim ? b->at : -1;
    f->status = b->row->status;
    x->desc = w_desc(rank, world, world > 1 ? &b->threads : NULL, "broken", b->row->lanes);
    x->desc.timeout_ms = 10 * patience_ms();
    x->desc.user = f;
    if (b->row->device) x->desc.device_ops = &device;
    else x->desc.comm_ops = &comm;
    w_heap_use(&x->heap, &x->desc);
    live_on(x, rank % 2 == 0 || world > 1);
    if (x->status && x->world && fsdpi_failed(x->world)) check_sticky(b, x);
    b->closed[rank] = fsdp_shutdown(x->world);
    if (x->status && x->world) W_CHECK(b->closed[rank] == x->status || b->closed[rank] == 0, "shutdown");
}

static void broken_check(const broken *b, const life *x) {
    const fault *f = &b->faults[b->row->victim];
    char who[20];
    snprintf(who, sizeof who, "rank %d", b->row->victim);
    snprintf(w_case, sizeof w_case, "%s, operation %lld (%s), rank %d", b->row->name, (long long)b->at,
             f->text, x->rank);
    W_CHECK(x->heap.live == 0 && x->heap.live_bytes == 0, "%lld blocks are left", (long long)x->heap.live);
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

TEST_P(faults, operations, op_rows) {
    broken *b = (broken *)calloc(1, sizeof *b);
    int64_t at;
    int fired = 1;
    CHECK(b != NULL);
    b->row = row;
    b->threads.size = row->world;
    for (at = -1; at <= 0 || fired; at++) {
        b->at = at;
        if (row->world == 1) broken_rank(0, 1, b);
        else h_ranks_thread(row->world, broken_rank, b);
        for (int r = 0; r < row->world; r++) broken_check(b, &b->lives[r]);
        fired = b->faults[row->victim].fired;
    }
    h_message("%lld operations, each failed; %d getters gave memory afterwards", (long long)(at - 1),
              b->checked_getters);
    free(b);
}
