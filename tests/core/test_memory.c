/* test_memory.c - memory is known before the first step, to the byte; a steady step allocates
   nothing; addresses repeat; bytes moved and copied follow the formulas.

   SPDX-License-Identifier: MIT */
#define TAGS     AT_NIGHT(TSAN | ASAN)
#define RANKS(n) ((n) > 3 ? MANY_RANKS : (n) == 2 ? VALGRIND : 0)
#include "harness.h"
#include "lab.h"
#include "sim.h"

/* ---- counts every allocation of the process -------------------------------------------------- */

static int64_t libc_calls; /* calls of malloc, mmap and the like, in all threads, while `watched` */
static int watched;
#if defined(__GLIBC__) && !defined(W_SANITIZED)
#include <sys/syscall.h> /* SYS_mmap */
#define INTERPOSED 1
extern void *libc_malloc(size_t size) __asm__("__libc_malloc");
extern void *libc_calloc(size_t count, size_t size) __asm__("__libc_calloc");
extern void *libc_realloc(void *ptr, size_t size) __asm__("__libc_realloc");
extern void *libc_memalign(size_t align, size_t size) __asm__("__libc_memalign");
extern void libc_free(void *ptr) __asm__("__libc_free");

static void seen(void) {
    if (__atomic_load_n(&watched, __ATOMIC_RELAXED))
        __atomic_add_fetch(&libc_calls, 1, __ATOMIC_RELAXED);
}
void *malloc(size_t size) { return seen(), libc_malloc(size); }
void *calloc(size_t count, size_t size) { return seen(), libc_calloc(count, size); }
void *realloc(void *ptr, size_t size) { return seen(), libc_realloc(ptr, size); }
void *memalign(size_t align, size_t size);
void *memalign(size_t align, size_t size) { return seen(), libc_memalign(align, size); }
void *aligned_alloc(size_t align, size_t size) { return seen(), libc_memalign(align, size); }
int posix_memalign(void **out, size_t align, size_t size) {
    seen();
    return (*out = libc_memalign(align, size)) ? 0 : ENOMEM;
}
void free(void *ptr) {
    if (ptr) seen();
    libc_free(ptr);
}
void *mmap(void *addr, size_t size, int prot, int flags, int fd, off_t offset) {
    seen();
    return (void *)syscall(SYS_mmap, addr, size, prot, flags, fd, offset);
}
#else
#define INTERPOSED 0
#endif

/* ---- models ---------------------------------------------------------------------------------- */

enum { MAX_UNITS = 14, MAX_PARAMS = 12, MAX_WORLD = 5 };

typedef struct {
    int ndim, dim, frozen;
    int64_t shape[3];
} param;
typedef struct {
    param params[MAX_PARAMS];
    int count, never;
} unit;
typedef struct {
    unit units[MAX_UNITS];
    int count;
    fsdp_dtype dtype, param, reduce;
    int never, lanes, plain, debug, replicas; /* replicas: 0, or the replicas of HSDP */
    int64_t direct_min;
} net;

static param mat(int64_t rows, int64_t cols) {
    param p = {2, 0, 0, {rows, cols, 0}};
    return p;
}
static param vec(int64_t n) {
    param p = {1, 0, 0, {n, 0, 0}};
    return p;
}

static int64_t stored_of(const param *p, int world) { /* elements of a stored shard */
    int64_t chunk = (p->shape[p->dim] + world - 1) / world, numel = 1;
    for (int d = 0; d < p->ndim; d++) numel *= d == p->dim ? chunk : p->shape[d];
    return numel;
}

/* Makes a GPT: blocks between embeddings, which stay open around the blocks. */
static void gpt(net *n, int layers, int64_t c, int64_t vocab, int64_t context) {
    const param block[MAX_PARAMS] = {vec(c),        vec(c),     mat(3 * c, c), vec(3 * c),
                                     mat(c, c),     vec(c),     vec(c),        vec(c),
                                     mat(4 * c, c), vec(4 * c), mat(c, 4 * c), vec(c)};
    unit *u = &n->units[0];
    memset(n, 0, sizeof *n);
    u->params[0] = mat(vocab, c);
    u->params[1] = mat(context, c);
    u->params[2] = u->params[3] = vec(c);
    u->count = 4;
    u->never = 1;
    for (n->count = 1; n->count <= layers; n->count++) {
        memcpy(n->units[n->count].params, block, sizeof block);
        n->units[n->count].count = MAX_PARAMS;
    }
    n->dtype = FSDP_F32;
}

static void random_net(uint64_t *state, net *n) {
    memset(n, 0, sizeof *n);
    n->count = 1 + lab_pick(state, 6);
    for (int u = 0; u < n->count; u++) {
        int frozen = lab_pick(state, 7) == 0;
        n->units[u].count = 1 + lab_pick(state, 5);
        n->units[u].never = lab_pick(state, 4) == 0;
        for (int i = 0; i < n->units[u].count; i++) {
            param *p = &n->units[u].params[i];
            p->ndim = 1 + lab_pick(state, 3);
            p->dim = lab_pick(state, 3) ? 0 : lab_pick(state, p->ndim);
            p->frozen = frozen || lab_pick(state, 6) == 0;
            for (int d = 0; d < p->ndim; d++)
                p->shape[d] = lab_pick(state, 15) ? 1 + lab_pick(state, 20) : 0;
            if (p->ndim > 1 && lab_pick(state, 2)) p->shape[1] = 16;
        }
    }
}

static void random_settings(uint64_t *state, net *n) {
    static const struct {
        fsdp_dtype dtype, param, reduce;
    } kinds[] = {{FSDP_F32, 0, 0},
                 {FSDP_F32, FSDP_BF16, FSDP_F32},
                 {FSDP_F32, FSDP_BF16, FSDP_BF16},
                 {FSDP_F32, FSDP_F32, FSDP_BF16},
                 {FSDP_F64, 0, 0},
                 {FSDP_BF16, 0, 0},
                 {FSDP_F64, FSDP_F32, FSDP_F32}};
    int kind = lab_pick(state, 7);
    n->dtype = kinds[kind].dtype;
    n->param = kinds[kind].param;
    n->reduce = kinds[kind].reduce;
    n->never = lab_pick(state, 3) == 0;
    n->lanes = lab_pick(state, 3);
    n->plain = lab_pick(state, 3) == 0;
    n->debug = lab_pick(state, 2);
    n->direct_min = lab_pick(state, 2)   ? 1 + lab_pick(state, 8000)
                    : lab_pick(state, 2) ? 1
                                         : FSDP_DIRECT_NEVER;
}

typedef struct {
    const net *net;
    fsdp_world *world;
    fsdp_model *model;
    fsdp_unit *unit[MAX_UNITS];
    int rank, size;
    fsdp_dtype param_dtype, reduce_dtype;
    void *seen[4 * MAX_UNITS * MAX_PARAMS]; /* addresses in a step */
    int num_seen, changed;
} job;

static void build(job *x, const net *n, fsdp_world *world) {
    fsdp_model_desc md = FSDP_ZERO;
    fsdp_mesh_info info;
    memset(x, 0, sizeof *x);
    x->net = n;
    x->world = world;
    x->rank = fsdp_rank(world);
    x->size = fsdp_world_size(world);
    x->param_dtype = n->param ? n->param : n->dtype;
    x->reduce_dtype = n->reduce ? n->reduce : n->dtype;
    md.param_dtype = n->param;
    md.reduce_dtype = n->reduce;
    md.debug = n->debug;
    md.fill_bytes = 4096;
    md.direct_min = n->direct_min;
    if (n->never) md.reshard_after_forward = FSDP_RESHARD_NEVER;
    if (n->replicas) {
        static const char *const names[2] = {"replicate", "shard"};
        const int32_t shape[2] = {n->replicas, x->size / n->replicas};
        CALL(world, fsdp_mesh_info_init(lab_mesh(world, 2, shape, names, NULL), FSDP_MESH_INFO_HSDP,
                                        1, 0, &info));
        md.mesh_info = &info;
    }
    CALL(world, fsdp_model_create(world, &md, &x->model));
    for (int u = 0; u < n->count; u++) {
        fsdp_param_desc pd[MAX_PARAMS];
        fsdp_unit_desc ud = FSDP_ZERO;
        for (int i = 0; i < n->units[u].count; i++) {
            const param *p = &n->units[u].params[i];
            pd[i] = lab_desc(p->ndim, p->shape, p->dim, n->dtype, p->frozen);
        }
        ud.reshard_after_forward = n->units[u].never ? FSDP_RESHARD_NEVER : FSDP_RESHARD_DEFAULT;
        x->unit[u] = lab_unit(world, x->model, &ud, pd, n->units[u].count);
    }
}

static void note(job *x, void *at, int step) {
    W_CHECK(at != NULL, "a buffer is NULL");
    if (step <= 2) x->seen[x->num_seen] = at;
    x->changed += x->seen[x->num_seen++] != at;
}

static void use_unit(job *x, int u, int backward, int step) {
    for (int i = 0; i < x->net->units[u].count; i++) {
        const param *p = &x->net->units[u].params[i];
        size_t bytes = (size_t)lab_numel(p->ndim, p->shape) * fsdp_dtype_size(x->param_dtype);
        note(x, fsdp_data(x->unit[u], i), step);
        if (!backward || p->frozen) continue;
        void *grad = fsdp_grad(x->unit[u], i);
        note(x, grad, step);
        memset(grad, 0, bytes);
    }
}

/* Runs forward, or backward in reverse order. In a model that reshards, units that never reshard
   are open around the others. */
static void half_step(job *x, int backward, int step) {
    int count = x->net->count, reshards = 0;
    for (int u = 0; u < count; u++) reshards |= !x->net->never && !x->net->units[u].never;
    for (int pass = 0; pass < 3; pass++)
        for (int k = 0; k < count; k++) {
            int u = backward ? count - 1 - k : k;
            if ((reshards && x->net->units[u].never) != (pass != 1)) continue;
            if (pass < 2)
                CALL(x->world,
                     backward ? fsdp_pre_backward(x->unit[u]) : fsdp_pre_forward(x->unit[u]));
            if (pass < 2) use_unit(x, u, backward, step);
            if (pass > 0)
                CALL(x->world,
                     backward ? fsdp_post_backward(x->unit[u]) : fsdp_post_forward(x->unit[u]));
        }
}

static void optimize(job *x) {
    fsdp_param_view v = FSDP_ZERO;
    double norm;
    CALL(x->world, fsdp_clip_grad_norm(x->model, 1.0, &norm));
    while (fsdp_next_param(x->model, &v))
        if (v.shard_grad && v.numel && v.dtype == FSDP_F32) ((float *)v.shard)[0] -= 0.5f;
    CALL(x->world, fsdp_params_changed(x->model));
    CALL(x->world, fsdp_zero_grad(x->model));
}

/* Runs a step. `step` counts from 1. */
static void train_step(job *x, int step) {
    x->num_seen = 0;
    half_step(x, 0, step);
    half_step(x, 1, step);
    CALL(x->world, fsdp_finalize_backward(x->model));
}

/* ---- prediction ------------------------------------------------------------------------------ */

static void same_memory(const fsdp_memory *a, const fsdp_memory *b, const char *when) {
    for (int pool = 0; pool < FSDP_POOL_COUNT; pool++)
        W_CHECK(a->pool_bytes[pool] == b->pool_bytes[pool] &&
                    a->pool_slots[pool] == b->pool_slots[pool],
                "%s: %s: predicted %lld bytes in %d buffers, measured %lld in %d", when,
                fsdp_pool_name(pool), (long long)a->pool_bytes[pool], a->pool_slots[pool],
                (long long)b->pool_bytes[pool], b->pool_slots[pool]);
    W_CHECK(a->total_bytes == b->total_bytes && a->unsharded_bytes == b->unsharded_bytes,
            "%s: total bytes", when);
}

typedef struct {
    int count;
    net *net;
    void (*one)(job *x, void *arg); /* is called with the model of each net */
    void *arg;
} nets;

enum { PLACES = 6 }; /* worlds of a rank: by worker threads, and plain or not */
static void open_worlds(lab_rank *r, fsdp_comm_ops *plain, fsdp_world **worlds) {
    *plain = w_plain();
    for (int i = 0; i < PLACES; i++) worlds[i] = lab_world(r, i, i / 2, i % 2 ? plain : NULL);
}
static void close_worlds(fsdp_world **worlds) {
    for (int i = 0; i < PLACES; i++) CALL(NULL, fsdp_shutdown(worlds[i]));
}

/* Builds the model of each net, in the world that the net needs. */
static void nets_rank(lab_rank *r) {
    const nets *n = (const nets *)r->arg;
    fsdp_comm_ops plain;
    fsdp_world *worlds[PLACES];
    job *x = (job *)lab_zeros(1, sizeof *x);
    open_worlds(r, &plain, worlds);
    for (int i = 0; i < n->count; i++) {
        const net *t = &n->net[i];
        snprintf(w_case, sizeof w_case, "net %d: W=%d %s/%s/%s lanes=%d never=%d plain=%d", i,
                 r->size, fsdp_dtype_name(t->dtype), fsdp_dtype_name(t->param),
                 fsdp_dtype_name(t->reduce), t->lanes, t->never, t->plain);
        build(x, t, worlds[2 * t->lanes + t->plain]);
        n->one(x, n->arg);
        fsdp_model_destroy(x->model);
    }
    close_worlds(worlds);
    free(x);
}

/* Makes random nets, and one in `each` is a GPT of 1 to `layers` layers. */
static net *make_nets(uint64_t *state, int count, int each, int layers, int wide) {
    net *list = (net *)lab_zeros((size_t)count, sizeof *list);
    for (int i = 0; i < count; i++) {
        if (i % each) random_net(state, &list[i]);
        else
            gpt(&list[i], 1 + i / each % layers, wide ? 16 * (1 + lab_pick(state, 3)) : 16,
                64 + (wide ? lab_pick(state, 40) : 0), 30);
        random_settings(state, &list[i]);
    }
    return list;
}

static void on_nets(int world, int processes, net *list, int count, void (*one)(job *x, void *arg),
                    void *arg) {
    nets n = {count, list, one, arg};
    lab_how how = FSDP_ZERO;
    how.job = "memory", how.bare = 1, how.processes = processes;
    lab_run(world, &how, nets_rank, &n);
    free(list);
}
static void on_places(int world, void (*body)(lab_rank *r)) {
    lab_how how = FSDP_ZERO;
    how.job = "memory", how.bare = 1;
    lab_run(world, &how, body, NULL);
}

static void predict_one(job *x, void *arg) {
    int64_t *largest = (int64_t *)arg;
    fsdp_memory before, zero, measured, after;
    int64_t unsharded = 0;
    fsdp_counters c = FSDP_ZERO;
    CALL(x->world, fsdp_model_predict(x->model, &before));
    CALL(x->world, fsdp_model_memory(x->model, &zero));
    W_CHECK(zero.total_bytes == 0, "memory before commit");
    for (int u = 0; u < x->net->count; u++)
        for (int i = 0; i < x->net->units[u].count; i++) {
            const param *p = &x->net->units[u].params[i];
            unsharded += lab_numel(p->ndim, p->shape) * (int64_t)fsdp_dtype_size(x->net->dtype) *
                         (p->frozen ? 1 : 2);
        }
    W_CHECK(before.unsharded_bytes == unsharded, "unsharded_bytes");
    for (int on = 0; on < 2; on++) { /* predicts a whole step, also in a microbatch without sync */
        CALL(x->world, fsdp_set_requires_gradient_sync(x->model, NULL, on));
        CALL(x->world, fsdp_set_requires_all_reduce(x->model, NULL, on));
        CALL(x->world, fsdp_set_reshard_after_backward(x->model, NULL, on));
        CALL(x->world, fsdp_model_predict(x->model, &after));
        same_memory(&before, &after, "predicted with other options");
    }
    CALL(x->world, fsdp_model_commit(x->model));
    CALL(x->world, fsdp_model_predict(x->model, &after));
    same_memory(&before, &after, "predicted again after commit");
    for (int step = 1; step <= 3; step++) {
        train_step(x, step);
        CALL(x->world, fsdp_model_memory(x->model, &measured));
        same_memory(&before, &measured, "after a step");
        optimize(x);
        CALL(x->world, fsdp_model_predict(x->model, &after));
        same_memory(&before, &after, "predicted again after a step");
    }
    CALL(x->world, fsdp_model_memory(x->model, &after));
    same_memory(&before, &after, "after clip and zero_grad");
    CALL(x->world, fsdp_model_counters(x->model, &c));
    W_CHECK(c.allocations > 0 && measured.host_bytes > 0, "nothing was counted");
    if (x->rank == 0 && before.total_bytes > *largest) *largest = before.total_bytes;
}

static const struct {
    const char *name;
    int world;
} worlds[] = {{"W=1", 1}, {"W=2", 2}, {"W=3", 3}, {"W=4", 4}};

static void predict_all(int world, int count, int is_thread) {
    uint64_t state = h_seed() * 77 + (uint64_t)world;
    int64_t largest = 0;
    on_nets(world, !is_thread, make_nets(&state, count, 4, 12, 1), count, predict_one, &largest);
    if (is_thread)
        h_message("%d models, predicted and measured alike to the byte; the largest has %lld",
                  count, (long long)largest);
}

TEST_P(memory, prediction, worlds, RANKS(row->world) | (row->world > 2 ? SLOW : 0)) {
    predict_all(row->world, 240 / row->world, 1);
}
TEST_P(memory, prediction_of_processes, worlds, RANKS(row->world)) {
    predict_all(row->world, 60 / row->world, 0);
}
TEST_P(long_memory, prediction, worlds, SECONDS(300) | NIGHT) {
    predict_all(row->world, 4000 / row->world, 1);
}

/* Microbatches without sync, without all-reduce, or with kept parameters: one model for each set
   of these options, and more microbatches than the prediction simulates. */
static void predict_kept(job *x, void *arg) {
    const net *n = x->net;
    fsdp_world *w = x->world;
    for (int kept = 1; kept < 8; kept++) {
        fsdp_predict_desc d = FSDP_ZERO;
        fsdp_memory predicted, measured;
        d.without_sync = kept & 1, d.without_all_reduce = kept >> 1 & 1;
        d.without_reshard = kept >> 2 & 1;
        CALL(w, fsdp_model_predict_step(x->model, &d, &predicted));
        for (int left = 7; left >= 0; left--) { /* two steps */
            const int keeps = left % 4 ? kept : 0;
            CALL(w, fsdp_set_requires_gradient_sync(x->model, NULL, !(keeps & 1)));
            if (keeps & 2) CALL(w, fsdp_set_requires_all_reduce(x->model, NULL, 0));
            CALL(w, fsdp_set_reshard_after_backward(x->model, NULL, !(keeps & 4)));
            train_step(x, 1);
            if (left % 4 == 0) optimize(x);
        }
        CALL(w, fsdp_model_memory(x->model, &measured));
        same_memory(&predicted, &measured, "after microbatches");
        CALL(w, fsdp_model_predict(x->model, &predicted));
        if (kept & 1 && x->rank == 0)
            *(int64_t *)arg += measured.total_bytes - predicted.total_bytes;
        fsdp_model_destroy(x->model);
        build(x, n, w);
    }
}
static const struct {
    const char *name;
    int world, replicas;
} kept_worlds[] = {{"1", 1, 0}, {"2", 2, 0},   {"3", 3, 0},
                   {"4", 4, 0}, {"2x2", 4, 2}, {"3x1", 3, 3}};
TEST_P(memory, prediction_of_microbatches, kept_worlds,
       RANKS(row->world) | (row->world > 2 ? SLOW : 0)) {
    uint64_t state = h_seed() * 79 + (uint64_t)row->world;
    const int count = 48 / row->world;
    int64_t more = 0;
    net *list = make_nets(&state, count, 4, 6, 1);
    for (int i = 0; i < count; i++) list[i].replicas = row->replicas;
    on_nets(row->world, 0, list, count, predict_kept, &more);
    CHECK_MSG(more > 0, "microbatches without sync keep nothing");
}

/* A unit that never reshards, and opens after one of the same size has closed: it takes the same slot,
   which the prediction knows only if it is told that units open in order. */
static void in_order_rank(lab_rank *r) {
    const fsdp_param_desc w[3] = {fsdp_mat("w", 64, 48), fsdp_mat("w", 8, 8),
                                  fsdp_mat("w", 64, 48)};
    fsdp_predict_desc in_order = FSDP_ZERO;
    fsdp_memory around, predicted, measured;
    fsdp_model *m;
    fsdp_unit *u[3];
    in_order.in_order = 1;
    CALL(r->w, fsdp_model_create(r->w, NULL, &m));
    for (int i = 0; i < 3; i++) {
        fsdp_unit_desc d = FSDP_ZERO;
        d.name = i ? i > 1 ? "head" : "layer" : "embed", d.params = &w[i], d.num_params = 1;
        d.reshard_after_forward = i > 1 ? FSDP_RESHARD_NEVER : FSDP_RESHARD_ALWAYS;
        CALL(r->w, fsdp_fully_shard(m, &d, &u[i]));
    }
    CALL(r->w, fsdp_model_predict(m, &around));
    CALL(r->w, fsdp_model_predict_step(m, &in_order, &predicted));
    for (int step = 0; step < 2; step++) {
        for (int i = 0; i < 3; i++) {
            CALL(r->w, fsdp_pre_forward(u[i]));
            CALL(r->w, fsdp_post_forward(u[i]));
        }
        for (int i = 3; i-- > 0;) {
            CALL(r->w, fsdp_pre_backward(u[i]));
            (void)fsdp_grad_f32(u[i], 0);
            CALL(r->w, fsdp_post_backward(u[i]));
        }
        CALL(r->w, fsdp_finalize_backward(m));
        CALL(r->w, fsdp_zero_grad(m));
    }
    CALL(r->w, fsdp_model_memory(m, &measured));
    same_memory(&predicted, &measured, "after steps in order");
    const int64_t more = around.total_bytes - measured.total_bytes;
    W_CHECK(more > 0, "a head that is open around the embedding takes no slot of its own");
}
TEST(memory, prediction_in_order, RANKS(2)) { lab_run(2, NULL, in_order_rank, NULL); }

/* ---- formulas -------------------------------------------------------------------------------- */

static int64_t up(int64_t x, int64_t to) { return (x + to - 1) / to * to; }

/* Checks each pool against a formula of the sizes, for equal units with one matrix that is
   gathered in place, or with two packed vectors. */
static void formula_one(fsdp_world *w, int world, net *n, int layers, int packed, int inline_) {
    fsdp_memory m;
    job *x = (job *)lab_zeros(1, sizeof *x);
    int64_t s = 0, k = 0, train = packed ? 2 : 1, finals = 0;
    int64_t bo = (int64_t)fsdp_dtype_size(n->dtype), bp, br, b[FSDP_POOL_COUNT] = {0};
    int cast, depth = inline_ ? 1 : 2;
    n->count = layers;
    for (int u = 0; u < layers; u++) {
        n->units[u].count = (int)train;
        n->units[u].params[0] = packed ? vec(37) : mat(21, 32);
        n->units[u].params[1] = vec(50);
    }
    build(x, n, w);
    bp = (int64_t)fsdp_dtype_size(x->param_dtype);
    const int64_t ap = 64 / bp, ao = 64 / bo; /* elements in 64 bytes: gathered; stored */
    for (int i = 0; i < train; i++) { /* one rank pads the shards, so that the next is aligned */
        const int64_t stored = stored_of(&n->units[0].params[i], world);
        s += world == 1 ? up(stored, ap) : stored;
    }
    if (packed && world > 1) k = s;
    for (int i = 0; i < train && k; i++)
        finals += up(world * stored_of(&n->units[0].params[i], world), ap);
    br = (int64_t)fsdp_dtype_size(x->reduce_dtype);
    cast = x->param_dtype != n->dtype;
    b[FSDP_POOL_SHARD] = up(layers * up(s, ao) * bo, 64);
    b[FSDP_POOL_SHARD_GRAD] = up(layers * up(s, ao) * bo, 64);
    if (world > 1 || cast || W_ASAN)
        b[FSDP_POOL_GATHER] = (layers > 1 ? depth : 1) * up((up(world * s, ap) + finals) * bp, 64);
    int widens = bp == 2 && x->reduce_dtype == FSDP_F32 && !(n->plain && world > 1);
    int converts = x->param_dtype != x->reduce_dtype && !widens; /* the copy frees the slot early */
    if (world > 1 || cast || x->reduce_dtype != n->dtype)
        b[FSDP_POOL_GRAD] = (converts ? 1 : depth) * up((up(world * s, ap) + finals) * bp, 64);
    if (converts) b[FSDP_POOL_REDUCE_IN] = up(world * s * br, 64);
    int narrow = x->reduce_dtype != FSDP_F32 && x->reduce_dtype != FSDP_F64;
    if (world > 1 && (n->plain ? x->reduce_dtype != n->dtype : narrow))
        b[FSDP_POOL_REDUCE_OUT] = up(s * br, 64);
    b[FSDP_POOL_SCRATCH] = 64;
    train_step(x, 1);
    CALL(w, fsdp_model_memory(x->model, &m));
    for (int pool = 0; pool < FSDP_POOL_COUNT; pool++)
        W_CHECK(m.pool_bytes[pool] == b[pool], "%s: %lld bytes, the formula gives %lld",
                fsdp_pool_name(pool), (long long)m.pool_bytes[pool], (long long)b[pool]);
    W_CHECK(k == 0 || world > 1, "pack");
    fsdp_model_destroy(x->model);
    free(x);
}

static void formula_rank(lab_rank *r) {
    static const fsdp_dtype kinds[][3] = {{FSDP_F32, 0, 0},
                                          {FSDP_F32, FSDP_BF16, FSDP_F32},
                                          {FSDP_F32, FSDP_BF16, FSDP_BF16},
                                          {FSDP_F32, FSDP_F32, FSDP_BF16},
                                          {FSDP_F64, 0, 0},
                                          {FSDP_BF16, 0, 0}};
    const int world = r->size;
    fsdp_comm_ops plain;
    fsdp_world *w[PLACES];
    open_worlds(r, &plain, w);
    for (int kind = 0; kind < 6; kind++)
        for (int place = 0; place < PLACES; place++)
            for (int layers = 1; layers <= 5; layers += 2)
                for (int packed = 0; packed < 2; packed++) {
                    net *n = (net *)lab_zeros(1, sizeof *n);
                    n->dtype = kinds[kind][0], n->param = kinds[kind][1],
                    n->reduce = kinds[kind][2];
                    n->plain = place % 2, n->lanes = place / 2;
                    n->direct_min = packed ? FSDP_DIRECT_NEVER : 1;
                    snprintf(w_case, sizeof w_case, "W=%d kind=%d place=%d layers=%d packed=%d",
                             world, kind, place, layers, packed);
                    formula_one(w[place], world, n, layers, packed, n->lanes == 0);
                    free(n);
                }
    close_worlds(w);
}

TEST_P(memory, formulas, worlds, RANKS(row->world)) { on_places(row->world, formula_rank); }

/* Peaks of PyTorch's FSDP2 above the resident shards and shard gradients, for L equal units with
   U elements each: 4 U if parameters are freed after forward, (L + 1) U if they are kept. */
static void peak_rank(lab_rank *r) {
    fsdp_comm_ops plain;
    fsdp_world *w[PLACES];
    open_worlds(r, &plain, w);
    for (int lanes = 0; lanes < 2; lanes++)
        for (int never = 0; never < 2; never++)
            for (int layers = 2; layers <= 8; layers += 3) {
                net *n = (net *)lab_zeros(1, sizeof *n);
                job *x = (job *)lab_zeros(1, sizeof *x);
                fsdp_memory m;
                int64_t whole = 4 * 96 * 128, flags = 64 * 16;
                snprintf(w_case, sizeof w_case, "W=%d lanes=%d never=%d L=%d", r->size, lanes,
                         never, layers);
                n->count = layers;
                n->never = never;
                n->dtype = FSDP_F32;
                n->direct_min = 1;
                for (int u = 0; u < layers; u++)
                    n->units[u].params[0] = mat(96, 128), n->units[u].count = 1;
                build(x, n, w[2 * lanes]);
                for (int step = 1; step <= 3; step++) train_step(x, step), optimize(x);
                CALL(x->world, fsdp_model_memory(x->model, &m));
                int64_t above = m.total_bytes - m.pool_bytes[FSDP_POOL_SHARD] -
                                m.pool_bytes[FSDP_POOL_SHARD_GRAD];
                int64_t theirs = never ? layers + 1 : 4;
                if (lanes && never) theirs++; /* a second slot of gradients, which overlaps */
                W_CHECK(above <= theirs * whole + flags, "%.3f units above the shards, upstream %d",
                        (double)above / (double)whole, (int)theirs);
                if (!lanes && !never)
                    W_CHECK(above <= 2 * whole + flags, "inline: %.3f units",
                            (double)above / (double)whole);
                fsdp_model_destroy(x->model);
                free(x);
                free(n);
            }
    close_worlds(w);
}

TEST_P(memory, not_above_upstream, worlds, RANKS(row->world)) { on_places(row->world, peak_rank); }

/* ---- steady state: no allocation, the same addresses ----------------------------------------- */

typedef struct {
    int world, is_thread;
    net net;
    fsdp_threads threads;
    char job[100];
    pthread_barrier_t meet;
    w_heap heap[MAX_WORLD];
    int microbatches; /* all except the last one are without sync */
} steady;

static void steady_step(job *x, const steady *s, int step) {
    for (int m = 0; m < s->microbatches; m++) {
        CALL(x->world, fsdp_set_requires_gradient_sync(x->model, NULL, m + 1 == s->microbatches));
        train_step(x, step);
    }
    optimize(x);
}

static void steady_rank(int rank, int world, void *arg) {
    steady *s = (steady *)arg;
    fsdp_comm_ops plain = w_plain();
    fsdp_world *w;
    fsdp_world_desc d = w_desc(rank, world, s->is_thread ? &s->threads : NULL, s->job,
                               s->net.lanes);
    fsdp_counters before = FSDP_ZERO, after = FSDP_ZERO;
    w_heap *heap = &s->heap[rank];
    job *x = (job *)lab_zeros(1, sizeof *x);
    if (s->net.plain) d.comm_ops = &plain;
    w_heap_use(heap, &d);
    CALL(NULL, fsdp_init(&d, &w));
    build(x, &s->net, w);
    steady_step(x, s, 1);
    x->changed = 0;
    steady_step(x, s, 2);
    x->changed = 0;
    if (s->is_thread) pthread_barrier_wait(&s->meet);
    else CALL(w, fsdp_barrier(w));
    int64_t total = w_allocations(heap);
    CALL(w, fsdp_model_counters(x->model, &before));
    if (rank == 0 || !s->is_thread) __atomic_store_n(&watched, 1, __ATOMIC_SEQ_CST);
    for (int step = 3; step <= 8; step++) steady_step(x, s, step);
    if (s->is_thread) pthread_barrier_wait(&s->meet);
    __atomic_store_n(&watched, 0, __ATOMIC_SEQ_CST);
    CALL(w, fsdp_model_counters(x->model, &after));
    W_CHECK(heap->total == total, "%lld allocations in six steps",
            (long long)(heap->total - total));
    W_CHECK(before.allocations == after.allocations, "the model has counted allocations");
    W_CHECK(__atomic_load_n(&libc_calls, __ATOMIC_SEQ_CST) == 0,
            "%lld calls of malloc, free and so on in six steps", (long long)libc_calls);
    W_CHECK(x->changed == 0, "%d addresses have changed since the second step", x->changed);
    CALL(NULL, fsdp_shutdown(w));
    W_CHECK(!s->is_thread || s->world > 1 || heap->live == 0, "%lld blocks are left",
            (long long)heap->live);
    free(x);
}

static void steady_all(int world, int is_thread, int count) {
    uint64_t state = h_seed() * 13 + (uint64_t)world;
    for (int i = 0; i < count; i++) {
        steady *s = (steady *)lab_zeros(1, sizeof *s);
        if (i % 3 == 0) gpt(&s->net, 1 + i % 8, 16 + 16 * (i % 2), 70, 20);
        else random_net(&state, &s->net);
        random_settings(&state, &s->net);
        s->net.lanes = i % 3;
        s->world = s->threads.size = world;
        s->is_thread = is_thread;
        s->microbatches = 1 + i % 2;
        snprintf(s->job, sizeof s->job, "steady-%d-%d", (int)getpid(), i);
        snprintf(w_case, sizeof w_case, "net %d", i);
        CHECK_EQ_INT(pthread_barrier_init(&s->meet, NULL, (unsigned)world), 0);
        if (is_thread) h_ranks_thread(world, steady_rank, s);
        else h_ranks_proc(world, steady_rank, s);
        for (int r = 0; r < world && is_thread; r++)
            CHECK_MSG(s->heap[r].live == 0 && s->heap[r].live_bytes == 0,
                      "rank %d: %lld blocks are left", r, (long long)s->heap[r].live);
        pthread_barrier_destroy(&s->meet);
        free(s);
    }
    h_message("%d models, steps 3 to 8: no allocation by desc.allocator%s", count,
              INTERPOSED ? ", malloc or mmap" : "; malloc is not interposed under sanitizers");
}

TEST_P(memory, steady_state, worlds, RANKS(row->world)) { steady_all(row->world, 1, 18); }
TEST_P(memory, steady_state_of_processes, worlds, RANKS(row->world)) {
    steady_all(row->world, 0, 6);
}

TEST(memory, malloc_is_counted) {
    if (!INTERPOSED) SKIP("a sanitizer has its own malloc, or the libc is not glibc");
    __atomic_store_n(&watched, 1,
                     __ATOMIC_SEQ_CST); /* compilers know that malloc reads no variable */
    void *volatile p = malloc(10);
    free(p);
    __atomic_store_n(&watched, 0, __ATOMIC_SEQ_CST);
    CHECK_EQ_INT(__atomic_load_n(&libc_calls, __ATOMIC_SEQ_CST), 2);
}

/* ---- bytes moved ----------------------------------------------------------------------------- */

typedef struct {
    uint64_t calls[FSDP_OP_COUNT], bytes[FSDP_OP_COUNT];
} traffic;

static void count_traffic(traffic *t, int kind, int64_t bytes) {
    t->calls[kind]++;
    t->bytes[kind] += (uint64_t)bytes;
}

/* Computes the collectives of one step from the shapes. */
static void expect_step(const job *x, traffic *t) {
    const net *n = x->net;
    int64_t w = x->size, bp = (int64_t)fsdp_dtype_size(x->param_dtype);
    int widens = bp == 2 && x->reduce_dtype == FSDP_F32 && !n->plain;
    int64_t input = x->param_dtype == x->reduce_dtype || widens
                        ? bp
                        : (int64_t)fsdp_dtype_size(x->reduce_dtype);
    memset(t, 0, sizeof *t);
    for (int u = 0; u < n->count; u++) {
        int64_t s = 0, st = 0;
        int never = n->never || n->units[u].never;
        for (int i = 0; i < n->units[u].count; i++) {
            const param *p = &n->units[u].params[i];
            s += stored_of(p, x->size);
            st += p->frozen ? 0 : stored_of(p, x->size);
        }
        for (int pass = 0; pass < (never ? 1 : 2) && w > 1 && s > 0; pass++)
            count_traffic(t, FSDP_OP_ALL_GATHER, (w - 1) * s * bp);
        if (w > 1 && st > 0) count_traffic(t, FSDP_OP_REDUCE_SCATTER, (w - 1) * st * input);
    }
}

static void same_traffic(const fsdp_counters *a, const fsdp_counters *b, const traffic *t,
                         int kind) {
    W_CHECK(b->calls[kind] - a->calls[kind] == t->calls[kind], "%s: %llu calls, expected %llu",
            fsdp_op_name(kind), (unsigned long long)(b->calls[kind] - a->calls[kind]),
            (unsigned long long)t->calls[kind]);
    W_CHECK(b->bytes[kind] - a->bytes[kind] == t->bytes[kind], "%s: %llu bytes, expected %llu",
            fsdp_op_name(kind), (unsigned long long)(b->bytes[kind] - a->bytes[kind]),
            (unsigned long long)t->bytes[kind]);
}

/* The counters equal the sums over the ops that an observer sees. */
typedef struct {
    traffic seen;
    uint64_t last_seq, labels[FSDP_LABEL_COUNT];
    int bad;
} observer;

static int observe(void *user, fsdp_model *model, fsdp_op *op) {
    observer *o = (observer *)user;
    (void)model;
    o->bad += op->seq != o->last_seq + 1 && o->last_seq;
    o->last_seq = op->seq;
    o->labels[op->label]++;
    o->seen.calls[op->kind]++;
    o->seen.bytes[op->kind] += op->bytes;
    return 0;
}

static void traffic_one(job *x, void *arg) {
    (void)arg;
    fsdp_counters a = FSDP_ZERO, b = FSDP_ZERO;
    traffic step;
    observer o;
    fsdp_extension watcher = FSDP_ZERO;
    watcher.op = observe;
    watcher.user = &o;
    memset(&o, 0, sizeof o);
    expect_step(x, &step);
    for (int n = 1; n <= 3; n++) {
        CALL(x->world, fsdp_model_counters(x->model, &a));
        if (n == 3) CALL(x->world, fsdp_attach(x->model, &watcher));
        train_step(x, n);
        CALL(x->world, fsdp_model_counters(x->model, &b));
        same_traffic(&a, &b, &step, FSDP_OP_ALL_GATHER);
        same_traffic(&a, &b, &step, FSDP_OP_REDUCE_SCATTER);
        W_CHECK(b.calls[FSDP_OP_ALL_REDUCE] == a.calls[FSDP_OP_ALL_REDUCE] &&
                    b.calls[FSDP_OP_BROADCAST] == a.calls[FSDP_OP_BROADCAST],
                "another collective was issued");
        if (n == 3) {
            for (int kind = 0; kind < FSDP_OP_COUNT; kind++) same_traffic(&a, &b, &o.seen, kind);
            W_CHECK(o.bad == 0, "records are not numbered in order");
            CALL(x->world, fsdp_detach(x->model, &watcher));
        }
        a = b;
        optimize(x);
        CALL(x->world, fsdp_model_counters(x->model, &b));
        W_CHECK(b.calls[FSDP_OP_ALL_REDUCE] - a.calls[FSDP_OP_ALL_REDUCE] == (x->size > 1) &&
                    b.bytes[FSDP_OP_ALL_REDUCE] - a.bytes[FSDP_OP_ALL_REDUCE] ==
                        (uint64_t)((2 * (x->size - 1) * 8 + x->size - 1) / x->size),
                "clip: all_reduce");
    }
    for (int u = 0; u < x->net->count; u++)
        for (int i = 0; i < x->net->units[u].count; i++) {
            const param *p = &x->net->units[u].params[i];
            int64_t bytes = stored_of(p, x->size) * (int64_t)fsdp_dtype_size(x->net->dtype);
            CALL(x->world, fsdp_model_counters(x->model, &a));
            CALL(x->world, fsdp_param_full(x->unit[u], i, NULL));
            CALL(x->world, fsdp_model_counters(x->model, &b));
            W_CHECK(b.bytes[FSDP_OP_ALL_GATHER] - a.bytes[FSDP_OP_ALL_GATHER] ==
                        (uint64_t)((x->size - 1) * bytes),
                    "param_full: bytes");
        }
}

TEST_P(memory, bytes_moved, worlds, RANKS(row->world)) {
    const int count = 120 / row->world;
    uint64_t state = h_seed() * 5 + (uint64_t)row->world;
    on_nets(row->world, 0, make_nets(&state, count, 4, 6, 0), count, traffic_one, NULL);
    h_message("%d models", count);
}

/* Copies and fills of a step, where they follow from the sizes. */
typedef struct {
    const char *name;
    int world;
    fsdp_dtype param, reduce;
    int packed;
    uint64_t copies, copied, fills, filled; /* per step and unit; copied and filled in bytes */
} copies_row;

/* A unit is a matrix of 24 x 16, and, packed, two vectors of 48 and 96: no padding for W <= 4. */
enum { CM = 384, CV = 144 };
static const copies_row copies_rows[] = {
    /* one rank: parameters and gradients are the shards; after zero_grad they are cleared */
    {"W=1/f32", 1, 0, 0, 0, 0, 0, 1, CM * 4},
    {"W=1/f32_packed", 1, 0, 0, 1, 0, 0, 1, CV * 4},
    /* one rank with a cast: two gathers, one reduction */
    {"W=1/bf16", 1, FSDP_BF16, FSDP_F32, 0, 3, CM *(2 + 2 + 4), 1, CM * 2},
    /* direct, one dtype: only casts */
    {"W=2/f32", 2, 0, 0, 0, 0, 0, 1, CM * 4},
    {"W=4/bf16", 4, FSDP_BF16, FSDP_F32, 0, 2, 2 * CM / 4 * 2, 1, CM * 2},
    /* packed: two copy-outs, one chunk_cat */
    {"W=2/f32_packed", 2, 0, 0, 1, 3, 3 * CV * 4, 1, (CV + CV) * 4},
};

static void copies_rank(lab_rank *r) {
    const copies_row *row = (const copies_row *)r->arg;
    if (W_ASAN && r->size == 1) SKIP("with AddressSanitizer one rank copies its shards");
    fsdp_world *w = r->w;
    const int world = r->size;
    fsdp_counters a = FSDP_ZERO, b = FSDP_ZERO;
    job *x = (job *)lab_zeros(1, sizeof *x);
    net *n = (net *)lab_zeros(1, sizeof *n);
    n->count = 3;
    n->dtype = FSDP_F32, n->param = row->param, n->reduce = row->reduce;
    n->direct_min = row->packed ? FSDP_DIRECT_NEVER : 1;
    for (int u = 0; u < n->count; u++) {
        n->units[u].params[0] = row->packed ? vec(48) : mat(24, 16);
        n->units[u].params[1] = vec(96);
        n->units[u].count = row->packed ? 2 : 1;
    }
    snprintf(w_case, sizeof w_case, "%s", row->name);
    build(x, n, w);
    for (int step = 1; step <= 4; step++) {
        CALL(w, fsdp_model_counters(x->model, &a));
        train_step(x, step);
        CALL(w, fsdp_model_counters(x->model, &b));
        uint64_t copies = b.calls[FSDP_OP_COPY] - a.calls[FSDP_OP_COPY];
        uint64_t copied = b.bytes[FSDP_OP_COPY] - a.bytes[FSDP_OP_COPY];
        uint64_t fills = b.calls[FSDP_OP_ZERO] - a.calls[FSDP_OP_ZERO];
        uint64_t filled = b.bytes[FSDP_OP_ZERO] - a.bytes[FSDP_OP_ZERO];
        int fresh = step == 1 && world == 1 && !row->param; /* gradients are zero at first */
        W_CHECK(copies == 3 * row->copies && copied == 3 * row->copied,
                "step %d: %llu copies of %llu bytes, expected %llu of %llu", step,
                (unsigned long long)copies, (unsigned long long)copied,
                (unsigned long long)(3 * row->copies), (unsigned long long)(3 * row->copied));
        W_CHECK(fresh ? !fills : fills == 3 * row->fills && filled == 3 * row->filled,
                "step %d: %llu fills of %llu bytes, expected %llu of %llu", step,
                (unsigned long long)fills, (unsigned long long)filled,
                (unsigned long long)(3 * row->fills), (unsigned long long)(3 * row->filled));
        for (int kind = FSDP_OP_ALL_GATHER; kind <= FSDP_OP_BROADCAST && world == 1; kind++)
            W_CHECK(b.calls[kind] == 0, "one rank has issued %s", fsdp_op_name(kind));
        CALL(w, fsdp_zero_grad(x->model));
    }
    lab_end(r);
    free(n);
    free(x);
}

TEST_P(memory, copies, copies_rows, RANKS(row->world)) {
    lab_run(row->world, NULL, copies_rank, (void *)(uintptr_t)row);
}

/* One rank without casts: the caller's pointers point to the shards themselves. */
static void aliases(lab_rank *r) {
    if (W_ASAN) SKIP("with AddressSanitizer one rank copies its shards");
    fsdp_world *w = r->w;
    job *x = (job *)lab_zeros(1, sizeof *x);
    net *n = (net *)lab_zeros(1, sizeof *n);
    fsdp_param_view v = FSDP_ZERO;
    fsdp_flat flat;
    gpt(n, 2, 16, 40, 8);
    build(x, n, w);
    CALL(w, fsdp_model_flat(x->model, FSDP_F32, &flat));
    for (int u = 0; u < n->count; u++) lab_forward(w, x->unit[u]);
    for (int u = n->count - 1; u >= 0; u--) {
        CALL(w, fsdp_pre_backward(x->unit[u]));
        for (int i = 0; i < n->units[u].count; i++) {
            CALL(w, fsdp_param_view_get(x->unit[u], i, &v));
            CHECK(fsdp_data(x->unit[u], i) == v.shard);
            CHECK((char *)fsdp_grad(x->unit[u], i) - (char *)flat.grads ==
                  (char *)v.shard - (char *)flat.shards);
        }
        CALL(w, fsdp_post_backward(x->unit[u]));
    }
    CALL(w, fsdp_finalize_backward(x->model));
    lab_end(r);
    free(n);
    free(x);
}
TEST(memory, one_rank_aliases) { lab_run(1, NULL, aliases, NULL); }

/* Reserved memory equals the memory that the first step allocates. */
static void reserve_one(job *x, void *arg) {
    fsdp_memory reserved, trained;
    (void)arg;
    CALL(x->world, fsdp_model_reserve(x->model));
    CALL(x->world, fsdp_model_reserve(x->model));
    CALL(x->world, fsdp_model_memory(x->model, &reserved));
    train_step(x, 1);
    CALL(x->world, fsdp_model_memory(x->model, &trained));
    same_memory(&reserved, &trained, "reserved and after a step");
}

TEST_P(memory, reserve, worlds, RANKS(row->world)) {
    enum { COUNT = 30 };
    uint64_t state = h_seed();
    net *list = make_nets(&state, COUNT, 2, 5, 0);
    for (int i = 0; i < COUNT; i++) {
        list[i].never = 0;
        for (int u = 0; u < list[i].count; u++) list[i].units[u].never = 0;
    }
    on_nets(row->world, 0, list, COUNT, reserve_one, NULL);
}

/* With worker threads or streams, too, the only unit of a size has one slot: its parameters have
   the same address in forward and backward. Two units of one size share two slots. */
static void alone(fsdp_world *w) {
    static const int64_t rows[] = {64, 8, 8};
    fsdp_model *m = lab_model(w, NULL);
    fsdp_unit *units[3];
    const void *at = NULL;
    fsdp_memory memory;
    for (int u = 0; u < 3; u++) {
        fsdp_param_desc p = fsdp_mat("w", rows[u], 4);
        units[u] = lab_unit(w, m, NULL, &p, 1);
    }
    for (int step = 0; step < 3; step++) {
        for (int u = 0; u < 3; u++) {
            CALL(w, fsdp_pre_forward(units[u]));
            if (!at) at = fsdp_data(units[0], 0);
            CHECK(at && (u > 0 || W_ASAN || fsdp_data(units[0], 0) == at));
            CALL(w, fsdp_post_forward(units[u]));
        }
        for (int u = 2; u >= 0; u--) {
            CALL(w, fsdp_pre_backward(units[u]));
            CHECK(u > 0 || W_ASAN || fsdp_data(units[0], 0) == at);
            CALL(w, fsdp_post_backward(units[u]));
        }
        CALL(w, fsdp_finalize_backward(m));
        CALL(w, fsdp_params_changed(m));
    }
    CALL(w, fsdp_model_memory(m, &memory));
    CHECK_EQ_INT(memory.pool_slots[FSDP_POOL_GATHER], 3);
}
static void alone_rank(lab_rank *r) { alone(r->w); }
TEST(memory, one_slot_where_a_second_is_never_used) {
    lab_how how = FSDP_ZERO;
    how.lanes = 2;
    lab_run(2, &how, alone_rank, NULL);
    sim s; /* on a device with streams */
    sim_init(&s, 2, 1);
    CHECK(sim_open(&s));
    alone(s.world);
    CHECK_EQ_INT(sim_close(&s), 0);
}

/* The shards of each unit begin at a multiple of 64 bytes, whatever the sizes of earlier units. */
static void begin_aligned(lab_rank *r) {
    fsdp_model *m = lab_model(r->w, NULL);
    fsdp_unit *units[4];
    for (int u = 0; u < 4; u++) {
        fsdp_param_desc p = fsdp_mat("w", 2 * u + 3, 3);
        p.frozen = u == 2;
        units[u] = lab_unit(r->w, m, NULL, &p, 1);
    }
    CALL(r->w, fsdp_model_commit(m));
    for (int u = 0; u < 4; u++) CHECK_EQ_INT((intptr_t)lab_view(r->w, units[u], 0).shard % 64, 0);
}
TEST(memory, units_begin_aligned) {
    for (int ranks = 1; ranks <= 3; ranks++) lab_run(ranks, NULL, begin_aligned, NULL);
}

/* Sums over the shard group alternate between two slots, so that a unit's reduction does not
   wait for the previous unit's all-reduce; inline nothing waits, and there is one slot. */
static void sums_take_turns(int replicas, int async) {
    enum { UNITS = 4 };
    sim s;
    fsdp_model_desc md = FSDP_ZERO;
    fsdp_param_desc p = fsdp_mat("w", 64, 4);
    fsdp_unit *units[UNITS];
    fsdp_memory predicted, memory;
    const void *last = NULL;
    int sums = 0;
    sim_init(&s, 2 * replicas, 1);
    s.async = async;
    CHECK(sim_open(&s));
    md.mesh = lab_hsdp(s.world, replicas, 2);
    fsdp_model *m = lab_model(s.world, &md);
    for (int u = 0; u < UNITS; u++) units[u] = lab_unit(s.world, m, NULL, &p, 1);
    CALL(s.world, fsdp_model_predict(m, &predicted));
    CALL(s.world, sim_watch(&s, m));
    for (int step = 0; step < 2; step++) {
        for (int u = 0; u < UNITS; u++) lab_forward(s.world, units[u]);
        for (int u = UNITS - 1; u >= 0; u--) {
            CALL(s.world, fsdp_pre_backward(units[u]));
            CHECK(fsdp_grad(units[u], 0) != NULL);
            CALL(s.world, fsdp_post_backward(units[u]));
        }
        CALL(s.world, fsdp_finalize_backward(m));
    }
    for (int n = 0; n < s.num_ops; n++) {
        const fsdp_op *op = &s.ops[n];
        for (int k = 0; k < op->num_waits && sums < 2; k++) /* later ones reuse a slot */
            CHECK(op->stream != FSDP_STREAM_REDUCE || op->wait[k].stream != FSDP_STREAM_ALLREDUCE);
        if (op->kind != FSDP_OP_REDUCE_SCATTER) continue;
        CHECK_EQ_INT(op->dst_ptr != last, async || !sums);
        last = op->dst_ptr;
        sums++;
    }
    CHECK_EQ_INT(sums, 2 * UNITS);
    CALL(s.world, fsdp_model_memory(m, &memory));
    CHECK_EQ_INT(memory.pool_slots[FSDP_POOL_REDUCE_OUT], async ? 2 : 1);
    CHECK_EQ_INT(predicted.pool_slots[FSDP_POOL_REDUCE_OUT], async ? 2 : 1);
    CHECK_EQ_INT(sim_close(&s), 0);
}
TEST(memory, sums_of_replicas_take_turns) {
    for (int k = 0; k < 4; k++) sums_take_turns(2 + k / 2, k % 2);
}
