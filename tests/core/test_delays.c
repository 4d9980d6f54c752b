/* test_delays.c - the bits of a training do not depend on how it runs: layout, threads or
   processes, inline or worker threads, prefetching, fused reductions, offloading, the time of
   resharding, and delays. A backend that wraps another one injects delays before every collective,
   and the trainer between its calls. They are pseudo-random, equal for equal --seed, and different
   on every rank. The bits do not depend either on whether steps are eager or replayed from a plan,
   or on whether redistributions overlap with other work.

   SPDX-License-Identifier: MIT */
#define TAGS SLOW | TSAN | AT_NIGHT(ASAN)
#include "harness.h"
#include "lab.h"
#include "sim.h"
#include "lab_block.h"

enum { WIDTH = 8, UNITS = 8, PARAMS = 2, KINDS = 4, STEPS = 5 * KINDS, MICROS = 2 };
enum { RANKS = 4, RUNS = 64 };

/* ---- the model ------------------------------------------------------------------------------- */

typedef struct {
    int ndim, shard_dim, frozen;
    int64_t shape[3];
} shape;
// Units 1 to 4 are equal, so that they share slots.
#define ALIKE                                                                                      \
    {                                                                                              \
        {2, 0, 0, {41, 9, 0}}, {                                                                   \
            1, 0, 0, { 7, 0, 0 }                                                                   \
        }                                                                                          \
    }
static const shape net[UNITS][PARAMS] = {
    {{2, 0, 0, {33, 16, 0}}, {1, 0, 0, {5, 0, 0}}},
    ALIKE,
    ALIKE,
    ALIKE,
    ALIKE,
    {{2, 1, 0, {16, 20, 0}}, {2, 0, 1, {12, 8, 0}}},
    {{2, 0, 0, {0, 4, 0}}, {3, 2, 0, {8, 8, 3}}},
    {{2, 0, 0, {130, 9, 0}}, {1, 0, 0, {48, 0, 0}}},
};
enum { MOST = 130 * 9 }; // largest number of elements of a parameter

static int64_t numel(int u, int i) { return lab_numel(net[u][i].ndim, net[u][i].shape); }

typedef struct {
    const char *name;
    fsdp_dtype stored, param, reduce, grad;
} numbers;
static const numbers kinds[] = {
    {"f32", FSDP_F32, 0, 0, 0},
    {"bf16_f32", FSDP_F32, FSDP_BF16, FSDP_F32, 0},
    {"bf16_bf16", FSDP_F32, FSDP_BF16, FSDP_BF16, 0},
    {"f16_f16", FSDP_F32, FSDP_F16, FSDP_F16, 0},
    {"f64", FSDP_F64, 0, 0, 0},
    {"bf16_grad_f32", FSDP_BF16, 0, 0, FSDP_F32},
};

/* Options of a run: they must not change a bit. */
enum {
    PREFETCH_DEFAULT = 0,
    PREFETCH_ALWAYS,
    PREFETCH_NONE,
    PREFETCH_1,
    PREFETCH_2,
    PREFETCH_3,
    PREFETCH_BUDGET,
    PREFETCHES
};
typedef struct {
    lab_guard guard; // guards its comms
    int lanes, layout, prefetch, reshard, offload, delay, debug, other_input;
    int planned; // replayed from a plan; 0: eager
    uint64_t seed;
    int rank; // set by each rank in its own copy
} way;
static const int64_t direct_min[3] = {FSDP_DIRECT_NEVER, 1, 600};

static void describe(const way *w, char *text, size_t size) {
    static const char *const layouts[3] = {"packed", "direct", "mixed"};
    static const char *const prefetches[PREFETCHES] = {
        "implicit by default",       "implicit", "no", "lists of 1", "lists of 2", "lists of 3",
        "lists of 3 within a budget"};
    snprintf(text, size,
             "lanes=%d %s, %s prefetch, reshard=%d plain=%d offload=%d delay=%d debug=%d", w->lanes,
             layouts[w->layout], prefetches[w->prefetch], w->reshard, w->guard.plain, w->offload,
             w->delay, w->debug);
}

/* Returns the options of a run. Run 0 is the simplest, and run 1 repeats it. Any 63 consecutive
   runs contain all pairs of worker threads, layout and prefetch. */
static way make_way(int run, int shards) {
    way w;
    uint64_t h = lab_hash(h_seed(), (uint64_t)run, 17, 0);
    const int reshards[3] = {FSDP_RESHARD_ALWAYS, FSDP_RESHARD_NEVER, shards % 2 ? shards : 2};
    memset(&w, 0, sizeof w);
    w.seed = h;
    w.reshard = FSDP_RESHARD_ALWAYS;
    if (run < 2) return w;
    w.lanes = run % 3;
    w.layout = run / 3 % 3;
    w.prefetch = run % PREFETCHES;
    w.reshard = shards > 1 ? reshards[h % 3] : reshards[h % 2];
    w.guard.plain = h >> 8 & 1;
    w.offload = h >> 9 & 1;
    w.debug = h >> 10 & 1;
    w.delay = h >> 11 & 1 ? 0 : (int)(h >> 12 & 3);
    return w;
}

/* ---- a slow backend -------------------------------------------------------------------------- */

enum { DELAY_NS = 200000 };

enum { AT_COMM = 1, AT_HOOK = 2 }; // the places of delays

/* Sleeps for 0 to 0.2 ms, or not at all. */
static void dawdle(const way *w, int where, uint64_t what, uint64_t which) {
    struct timespec t = {0, 0};
    uint64_t h = lab_hash(w->seed + (uint64_t)w->rank, what, which, 0);
    if (!(w->delay & where) || h % 4 == 0) return;
    t.tv_nsec = (long)(h / 4 % DELAY_NS);
    nanosleep(&t, NULL);
}

static fsdp_status slow_comm(lab_guard *guard, const fsdp_group *group, const fsdp_coll *coll) {
    const way *w = (const way *)(void *)guard;
    if (group) dawdle(w, AT_COMM, 1, (uint64_t)group->color + 2);
    if (coll) dawdle(w, AT_COMM, 2 + (uint64_t)coll->kind, coll->seq);
    return FSDP_OK;
}

/* ---- one training on one rank ---------------------------------------------------------------- */

typedef struct {
    const way *way;
    fsdp_world *world;
    sim *sim; // the simulated device, or NULL
    fsdp_model *model;
    fsdp_plan *plan; // the plan, or NULL
    fsdp_unit *unit[UNITS];
    int rank, step;
    int64_t replayed;
    uint64_t calls, hash;
    float x[MICROS][UNITS + 1][WIDTH], z[MICROS][UNITS][WIDTH];
} trainer;

#define HOOK(t, call)                                                                              \
    do {                                                                                           \
        dawdle((t)->way, AT_HOOK, 99, (t)->calls++);                                               \
        CALL((t)->world, call);                                                                    \
    } while (0)

static void start_values(void *user, const fsdp_param_view *block) {
    uint64_t unit = (uint64_t)(intptr_t)block->unit_user * PARAMS + (uint64_t)block->index;
    (void)user;
    for (int64_t k = 0; k < block->numel; k++) {
        double x = (double)(lab_hash(unit, (uint64_t)fsdp_view_index(block, k), 3, 0) >> 11) /
                       0x1p53 -
                   0.5;
        lab_put(block->data, block->dtype, k, x);
    }
}

static void set_prefetch(trainer *t, int depth) {
    for (int u = 0; u < UNITS; u++) {
        fsdp_unit *ahead[3], *behind[3];
        int a = 0, b = 0;
        for (int k = 1; k <= depth; k++) {
            if (u + k < UNITS) ahead[a++] = t->unit[u + k];
            if (u - k >= 0) behind[b++] = t->unit[u - k];
        }
        CALL(t->world, fsdp_set_modules_to_forward_prefetch(t->unit[u], ahead, a));
        CALL(t->world, fsdp_set_modules_to_backward_prefetch(t->unit[u], behind, b));
    }
}

static void build(trainer *t, const numbers *kind, const fsdp_mesh *mesh) {
    const way *w = t->way;
    fsdp_model_desc md = FSDP_ZERO;
    md.mesh = mesh;
    md.param_dtype = kind->param;
    md.reduce_dtype = kind->reduce;
    md.grad_dtype = kind->grad;
    md.reshard_after_forward = w->reshard;
    md.cpu_offload = w->offload;
    md.debug = w->debug;
    md.direct_min = direct_min[w->layout];
    md.implicit_prefetch = w->prefetch == PREFETCH_DEFAULT  ? FSDP_PREFETCH_DEFAULT
                           : w->prefetch == PREFETCH_ALWAYS ? FSDP_PREFETCH_ALWAYS
                                                            : FSDP_PREFETCH_NEVER;
    md.prefetch_bytes = w->prefetch == PREFETCH_BUDGET ? 6000 : 0;
    CALL(t->world, fsdp_model_create(t->world, &md, &t->model));
    for (int u = 0; u < UNITS; u++) {
        fsdp_param_desc pd[PARAMS];
        fsdp_unit_desc ud = FSDP_ZERO;
        for (int i = 0; i < PARAMS; i++) {
            const shape *s = &net[u][i];
            pd[i] = lab_desc(s->ndim, s->shape, s->shard_dim, kind->stored, s->frozen);
        }
        ud.user = (void *)(intptr_t)u;
        t->unit[u] = lab_unit(t->world, t->model, &ud, pd, PARAMS);
    }
    CALL(t->world, fsdp_set_reduce_scatter_unused_params(t->model, NULL, 1)); // see uses
    if (w->prefetch >= PREFETCH_1)
        set_prefetch(t, w->prefetch == PREFETCH_BUDGET ? 3 : w->prefetch - PREFETCH_1 + 1);
    CALL(t->world, fsdp_init_params(t->model, start_values, t));
    if (w->planned) CALL(t->world, fsdp_plan_create(t->model, NULL, &t->plan));
}
static void take_down(trainer *t) {
    for (int k = 0; t->plan && k < fsdp_plan_count(t->plan); k++) {
        fsdp_plan_report report;
        CALL(t->world, fsdp_plan_report_get(t->plan, k, &report));
        t->replayed += (int64_t)report.replayed;
    }
    if (t->plan)
        W_CHECK(fsdp_plan_state(t->plan) != FSDP_PLAN_REFUSED, "%s", fsdp_plan_why(t->plan));
    fsdp_plan_destroy(t->plan);
    fsdp_model_destroy(t->model);
}

/* Returns a gathered parameter as floats, in `room`. */
static const float *load(const trainer *t, int u, int i, fsdp_dtype dtype, float *room) {
    const void *data = fsdp_data(t->unit[u], i);
    W_CHECK(data != NULL, "no data: %s", fsdp_last_error(t->world));
    if (t->sim) sim_read(t->sim, "a layer", data, numel(u, i) * (int64_t)fsdp_dtype_size(dtype));
    CHECK_OK(fsdp_convert(room, FSDP_F32, data, dtype, numel(u, i)));
    return room;
}

/* Returns 1 if this rank uses a parameter: some are used by some ranks only, and one by one rank
   in one microbatch. */
static int uses(const trainer *t, int u, int i, int micro) {
    if (u == 0 && i == 1) return micro == 1 && t->rank == t->step % fsdp_world_size(t->world);
    return i == 0 || u % 2 || (t->rank + micro + t->step) % 2 == 0;
}

static void forward(trainer *t, fsdp_dtype dtype, int micro) {
    float room[MOST], (*x)[WIDTH] = t->x[micro];
    for (int j = 0; j < WIDTH; j++) {
        uint64_t which = (uint64_t)((t->step * MICROS + micro) * RANKS + t->rank);
        uint64_t h = lab_hash(which, (uint64_t)j, 5 + (uint64_t)t->way->other_input, 0);
        x[0][j] = (float)(h >> 40) / 8388608.0f - 1.0f;
    }
    for (int u = 0; u < UNITS; u++) {
        float *z = t->z[micro][u];
        HOOK(t, fsdp_pre_forward(t->unit[u]));
        memset(z, 0, sizeof t->z[micro][u]);
        for (int i = 0; i < PARAMS; i++) {
            const float *p = uses(t, u, i, micro) ? load(t, u, i, dtype, room) : NULL;
            for (int64_t e = 0; p && e < numel(u, i); e++)
                z[e % WIDTH] += p[e] * x[u][(e / WIDTH + i) % WIDTH];
        }
        for (int j = 0; j < WIDTH; j++)
            x[u + 1][j] = x[u][j] / 2 + z[j] / (1 + (z[j] < 0 ? -z[j] : z[j]));
        HOOK(t, fsdp_post_forward(t->unit[u]));
    }
}

static void add_grad(const trainer *t, int u, int i, fsdp_dtype dtype, const float *dp) {
    double sum[MOST]; // rounds as the library does, which may add itself or leave it to the caller
    void *grad = fsdp_grad(t->unit[u], i);
    W_CHECK(grad != NULL, "no gradient: %s", fsdp_last_error(t->world));
    if (t->sim) sim_write(t->sim, "a layer", grad, numel(u, i) * (int64_t)fsdp_dtype_size(dtype));
    lab_load(sum, grad, dtype, numel(u, i));
    for (int64_t e = 0; e < numel(u, i); e++) sum[e] += (double)dp[e];
    lab_store(grad, dtype, sum, numel(u, i));
}

/* Runs the backward of a unit. dy: the gradient of its output; on return that of its input. */
static void backward_unit(trainer *t, fsdp_dtype dtype, int micro, int u, float *dy) {
    float room[MOST], dp[MOST], dx[WIDTH], dz[WIDTH];
    HOOK(t, fsdp_pre_backward(t->unit[u]));
    for (int j = 0; j < WIDTH; j++) {
        float z = t->z[micro][u][j], d = 1 + (z < 0 ? -z : z);
        dz[j] = dy[j] / (d * d);
        dx[j] = dy[j] / 2;
    }
    for (int i = 0; i < PARAMS; i++) {
        if (!uses(t, u, i, micro)) continue;
        const float *p = load(t, u, i, dtype, room);
        for (int64_t e = 0; e < numel(u, i); e++) {
            int64_t from = (e / WIDTH + i) % WIDTH;
            dp[e] = dz[e % WIDTH] * t->x[micro][u][from];
            dx[from] += dz[e % WIDTH] * p[e] / 16;
        }
        if (!net[u][i].frozen) add_grad(t, u, i, dtype, dp);
    }
    memcpy(dy, dx, sizeof dx);
    HOOK(t, fsdp_post_backward(t->unit[u]));
}

/* Runs backward. first_first: each unit has its own loss, and unit 0 comes first, so that the
   last unit of the previous backward is the first one of this. */
static void backward(trainer *t, fsdp_dtype dtype, int micro, int first_first) {
    float dy[WIDTH];
    for (int k = 0; k < UNITS; k++) {
        int u = first_first ? k : UNITS - 1 - k;
        for (int j = 0; j < WIDTH && (k == 0 || first_first); j++)
            dy[j] = t->x[micro][u + 1][j] - 0.25f;
        backward_unit(t, dtype, micro, u, dy);
    }
}

/* Notes that the caller reads or writes its shard of a parameter. */
static void touch(const trainer *t, const fsdp_param_view *v, int write) {
    if (!t->sim) return;
    (write ? sim_write : sim_read)(t->sim, "a shard", v->shard,
                                   v->numel * (int64_t)fsdp_dtype_size(v->dtype));
    if (v->shard_grad)
        sim_read(t->sim, "a gradient", v->shard_grad,
                 v->numel * (int64_t)fsdp_dtype_size(v->grad_dtype));
}

/* Adds shards and gradients of all parameters to the hash. Returns the number of gradients. */
static int64_t fold_all(trainer *t) {
    fsdp_param_view v = FSDP_ZERO;
    int64_t grads = 0;
    while (fsdp_next_param(t->model, &v)) {
        touch(t, &v, 0);
        lab_fold(&t->hash, v.shard, (size_t)v.numel * fsdp_dtype_size(v.dtype));
        lab_fold(&t->hash, v.shard_grad ? "has" : "none", 4);
        if (!v.shard_grad) continue;
        lab_fold(&t->hash, v.shard_grad, (size_t)v.numel * fsdp_dtype_size(v.grad_dtype));
        grads += v.numel;
    }
    return grads;
}

static void update(trainer *t) {
    fsdp_param_view v = FSDP_ZERO;
    while (fsdp_next_param(t->model, &v)) {
        if (v.shard_grad) touch(t, &v, 1);
        for (int64_t k = 0; v.shard_grad && k < v.numel; k++) {
            double p = lab_get(v.shard, v.dtype, k), g = lab_get(v.shard_grad, v.grad_dtype, k);
            lab_put(v.shard, v.dtype, k, p - 0.125 * g);
        }
    }
    HOOK(t, fsdp_params_changed(t->model));
}

/* Runs the microbatches of a step. Step 0 reduces them together, step 1 one by one, step 2 keeps
   sums over the shard group in between, and step 3 has two forwards before two backwards; then
   it repeats. */
static void train_micros(trainer *t, fsdp_dtype dtype) {
    for (int m = 0; m < MICROS; m++) {
        const int last = m + 1 == MICROS, kind = t->step % KINDS;
        CALL(t->world, fsdp_set_requires_gradient_sync(t->model, NULL, last || kind != 0));
        CALL(t->world, fsdp_set_requires_all_reduce(t->model, NULL, last || kind != 2));
        CALL(t->world, fsdp_set_is_last_backward(t->model, last));
        forward(t, dtype, m);
        if (kind == 3 && !last) continue;
        backward(t, dtype, m, 0);
        if (kind == 3) backward(t, dtype, 0, 1);
        HOOK(t, fsdp_finalize_backward(t->model));
    }
}

static void train_step(trainer *t, fsdp_dtype dtype, uint64_t *out) {
    double norm = 0;
    train_micros(t, dtype);
    t->hash = 14695981039346656037u;
    W_CHECK(fold_all(t) > 0, "there are no gradients");
    HOOK(t, fsdp_clip_grad_norm(t->model, 1.0, &norm));
    W_CHECK(norm > 1e-3 && norm < 1e6, "the norm is %g", norm);
    lab_fold(&t->hash, &norm, sizeof norm);
    update(t);
    fold_all(t);
    *out = t->hash;
    if (t->step % KINDS != 1) CALL(t->world, fsdp_zero_grad(t->model)); // otherwise they add up
    CALL(t->world, fsdp_set_grad_enabled(t->model, 0));                 // an evaluation in between
    forward(t, dtype, 0);
    CALL(t->world, fsdp_set_grad_enabled(t->model, 1));
    t->step++;
}

/* ---- many runs ------------------------------------------------------------------------------- */

typedef struct {
    int ranks, shards, runs;
    int steps;    // number of steps compared
    int base;     // number in the job's names
    int threaded; // ranks are threads
    const numbers *kind;
    fsdp_threads threads[RUNS];
    way way[RUNS];
    uint64_t hash[RUNS][RANKS][STEPS];
    int64_t replayed; // replayed steps of rank 0
} batch;

static void run_rank(int rank, int ranks, void *arg) {
    batch *b = (batch *)arg;
    fsdp_comm_ops ops = lab_guard_ops();
    fsdp_dtype dtype = b->kind->param ? b->kind->param : b->kind->stored;
    for (int run = 0; run < b->runs; run++) {
        way *w = (way *)malloc(sizeof *w);
        trainer *t = (trainer *)lab_zeros(1, sizeof *t);
        char job[100], text[200];
        CHECK(w);
        *w = b->way[run];
        w->guard.before = slow_comm;
        w->rank = rank;
        describe(w, text, sizeof text);
        snprintf(w_case, sizeof w_case, "run %d of %s on %d %s: %s", run, b->kind->name, ranks,
                 b->threaded ? "threads" : "processes", text);
        snprintf(job, sizeof job, "delays-%d-%d", b->base, run);
        fsdp_world_desc d = w_desc(rank, ranks, b->threaded ? &b->threads[run] : NULL, job,
                                   w->lanes);
        d.comm_ops = &ops;
        d.user = w;
        CALL(NULL, fsdp_init(&d, &t->world));
        fsdp_mesh *mesh = b->shards < ranks ? lab_hsdp(t->world, ranks / b->shards, b->shards)
                                            : NULL;
        t->way = w;
        t->rank = rank;
        build(t, b->kind, mesh);
        while (t->step < b->steps) train_step(t, dtype, &b->hash[run][rank][t->step]);
        take_down(t);
        if (rank == 0) b->replayed += t->replayed;
        CALL(NULL, fsdp_shutdown(t->world));
        free(t);
        free(w);
    }
}

/* Returns the run of `a` with the expected bits: run 0. In f16, a backend that is not fused
   divides at another point: then the first run that is not fused. */
static int reference(const batch *a, const way *w) {
    int run = 0;
    if (strstr(a->kind->name, "f16_f16"))
        while (run < a->runs && a->way[run].guard.plain != w->guard.plain) run++;
    return run;
}

static void compare(const batch *a, const batch *b) {
    for (int run = 0, of; run < b->runs; run++)
        for (int r = 0; r < b->ranks; r++)
            for (int s = 0; s < b->steps; s++) {
                char text[200];
                describe(&b->way[run], text, sizeof text);
                of = reference(a, &b->way[run]);
                if (of == a->runs) continue; /* no run of its kind */
                CHECK_MSG(a->hash[of][r][s] == b->hash[run][r][s],
                          "%s: rank %d of %d (%s), step %d: other bits in run %d: %s",
                          b->kind->name, r, b->ranks, b->threaded ? "threads" : "processes", s, run,
                          text);
            }
}

static batch *new_batch(int ranks, int shards, const numbers *kind, int runs, int from) {
    batch *b = (batch *)mmap(NULL, sizeof *b, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS,
                             -1, 0);
    CHECK((void *)b != MAP_FAILED);
    b->ranks = ranks;
    b->shards = shards;
    b->kind = kind;
    b->runs = runs;
    b->steps = KINDS;
    b->base = (int)getpid() * 2 + (from > 0);
    for (int run = 0; run < runs; run++) b->way[run] = make_way(run ? run + from : 0, shards);
    return b;
}

static void same_bits(int ranks, int shards, const numbers *kind, int threads, int processes) {
    batch *a = new_batch(ranks, shards, kind, threads, 0), *b = NULL, *other = NULL;
    int64_t start = h_now_ms();
    a->threaded = 1;
    for (int run = 0; run < RUNS; run++) a->threads[run].size = ranks;
    b = new_batch(ranks, shards, kind, processes, 1000);
    h_ranks_proc(ranks, run_rank, b); // before there are threads
    h_ranks_thread(ranks, run_rank, a);
    compare(a, a);
    compare(a, b);
    other = new_batch(ranks, shards, kind, 1, 0); // other input must change the hashes
    other->way[0].other_input = 1;
    h_ranks_proc(ranks, run_rank, other);
    for (int r = 0; r < ranks; r++)
        for (int s = 0; s < KINDS; s++) CHECK(a->hash[0][r][s] != other->hash[0][r][s]);
    h_message("%d runs on threads, %d on processes, %d ms", threads, processes,
              (int)(h_now_ms() - start));
    munmap(a, sizeof *a);
    munmap(b, sizeof *b);
    munmap(other, sizeof *other);
}

typedef struct {
    const char *name;
    int ranks, shards;
    const numbers *kind;
} row_of_bits;
#define ROW(n, s, k, name)                                                                         \
    { "N=" #n "/" name, n, s, &kinds[k] }
static const row_of_bits rows[] = {
    ROW(1, 1, 0, "f32"),      ROW(2, 2, 0, "f32"),       ROW(2, 2, 4, "f64"),
    ROW(3, 3, 1, "bf16_f32"), ROW(3, 3, 2, "bf16_bf16"), ROW(4, 2, 0, "2x2/f32"),
    ROW(4, 2, 2, "2x2/bf16"), ROW(4, 2, 3, "2x2/f16"),   ROW(4, 4, 5, "bf16_grad_f32"),
};

/* PyTorch: test_fully_shard_memory.py test_ar_buffer_lifetime_mixed_dtype. Done: the bits do not
   depend on delays (PyTorch: sums of gradients). On streams the race checker of delays.streams
   checks that no buffer is used again before its all-reduce has ended. */
TEST_P(delays, same_bits, rows, row->ranks > 3 ? AT_NIGHT(TSAN) : 0) {
    same_bits(row->ranks, row->shards, row->kind, W_SLOW ? 8 : 16, W_SLOW ? 4 : 6);
}

static const row_of_bits all_rows[] = {
#define ROWS_OF(n, s, name)                                                                        \
    ROW(n, s, 0, name "f32"), ROW(n, s, 1, name "bf16_f32"), ROW(n, s, 2, name "bf16_bf16"),       \
        ROW(n, s, 3, name "f16_f16"), ROW(n, s, 4, name "f64"), ROW(n, s, 5, name "bf16_grad_f32")
    ROWS_OF(1, 1, ""), ROWS_OF(2, 2, ""), ROWS_OF(2, 1, "replicas/"),
    ROWS_OF(3, 3, ""), ROWS_OF(4, 4, ""), ROWS_OF(4, 2, "2x2/"),
};
TEST_P(long_delays, same_bits, all_rows, SECONDS(300) | NIGHT) {
    same_bits(row->ranks, row->shards, row->kind, W_SLOW ? 20 : 32, W_SLOW ? 10 : 16);
}

/* ---- streams --------------------------------------------------------------------------------- */

/* Runs on the simulated device, where every rank does the same. Run 0 is inline. Returns 1 if
   reductions are fused. */
static int on_streams(const numbers *kind, int run, int steps, uint64_t *hash, int64_t *replayed) {
    static const int64_t latencies[] = {0, 1000, 1000000, 500000000};
    const fsdp_dtype dtype = kind->param ? kind->param : kind->stored;
    trainer *t = (trainer *)lab_zeros(1, sizeof *t);
    way w = make_way(run ? run + 1 : 0, 2);
    char text[200];
    sim s;
    sim_init(&s, 4, 1);
    s.async = run > 0, s.checks = 1, s.fused = !w.guard.plain;
    s.latency_ns = latencies[w.seed >> 16 & 3], s.copy_bytes_per_ns = w.seed >> 18 & 1 ? 100 : 0;
    w.lanes = w.delay = 0;
    w.planned = run > 0 && steps > KINDS;
    describe(&w, text, sizeof text);
    snprintf(w_case, sizeof w_case, "run %d, %lld ns: %s", run, (long long)s.latency_ns, text);
    CHECK(sim_open(&s));
    t->way = &w, t->sim = &s, t->world = s.world, t->rank = 1;
    build(t, kind, lab_hsdp(s.world, 2, 2));
    while (t->step < steps) train_step(t, dtype, &hash[t->step]);
    take_down(t);
    *replayed += t->replayed;
    W_CHECK(!s.races, "%d races, first: %s", s.races, s.race);
    CHECK_EQ_INT(sim_close(&s), 0);
    free(t);
    return s.fused;
}

/* However long collectives take, no buffer is used before they have ended, and no bit changes.
   (In f16 a reduction that is not fused divides at another point.) */
static int64_t streams(const numbers *kind, int runs, int steps) {
    uint64_t hash[2][STEPS], now[STEPS];
    int64_t replayed = 0;
    int seen[2] = {0, 0};
    for (int run = 0; run < runs; run++) {
        const int fused = on_streams(kind, run, steps, now, &replayed),
                  of = strcmp(kind->name, "f16_f16") ? 0 : fused;
        if (!seen[of]++) memcpy(hash[of], now, sizeof now);
        for (int s = 0; s < steps; s++)
            CHECK_MSG(now[s] == hash[of][s], "step %d: other bits [%s]", s, w_case);
    }
    return replayed;
}
TEST_P(delays, streams, kinds) { CHECK_EQ_INT(streams(row, W_SLOW ? 5 : 22, KINDS), 0); }

/* ---- planned --------------------------------------------------------------------------------- */

static const row_of_bits planned_rows[] = {
    ROW(2, 2, 0, "f32"),
    ROW(3, 3, 1, "bf16_f32"),
    ROW(4, 2, 0, "2x2/f32"),
};
/* Run 0 is eager. */
TEST_P(delays, planned, planned_rows, row->ranks > 3 ? AT_NIGHT(TSAN) : 0) {
    const int runs = W_SLOW ? 4 : 6;
    batch *b = new_batch(row->ranks, row->shards, row->kind, runs, 0);
    b->steps = STEPS, b->threaded = 1;
    for (int run = 0; run < runs; run++) b->threads[run].size = row->ranks;
    for (int run = 1; run < runs; run++) b->way[run].planned = 1;
    h_ranks_thread(row->ranks, run_rank, b);
    compare(b, b);
    h_message("%lld steps were replayed", (long long)b->replayed);
    CHECK(b->replayed > runs);
    munmap(b, sizeof *b);
}
TEST_P(delays, planned_on_streams, kinds, row == kinds ? 0 : AT_NIGHT(TSAN)) {
    const int64_t replayed = streams(row, W_SLOW ? 3 : 10, STEPS);
    h_message("%lld steps were replayed", (long long)replayed);
    CHECK(replayed > 10);
}

/* ---- tensor parallelism ---------------------------------------------------------------------- */

/* A transformer block on (dp, tp). Every second run starts its redistributions, computes
   gradients of weights, and waits. */
typedef struct {
    batch b;
    block_net net;
} tp_batch;

static void run_block(int rank, int ranks, void *arg) {
    tp_batch *t = (tp_batch *)arg;
    batch *b = &t->b;
    fsdp_comm_ops ops = lab_guard_ops();
    for (int run = 0; run < b->runs; run++) {
        way *w = (way *)malloc(sizeof *w);
        blk *block = (blk *)lab_zeros(1, sizeof *block);
        block_net mine = t->net;
        fsdp_world *world;
        uint64_t calls = 0;
        char job[100], text[200];
        CHECK(w);
        *w = b->way[run];
        w->guard.before = slow_comm, w->rank = rank;
        mine.overlap = run % 2, mine.seed += (uint64_t)w->other_input;
        describe(w, text, sizeof text);
        snprintf(w_case, sizeof w_case, "run %d, overlap %d: %s", run, mine.overlap, text);
        snprintf(job, sizeof job, "delays-tp-%d-%d", b->base, run);
        fsdp_world_desc d = w_desc(rank, ranks, b->threaded ? &b->threads[run] : NULL, job,
                                   w->lanes);
        d.comm_ops = &ops, d.user = w;
        CALL(NULL, fsdp_init(&d, &world));
        block_open(block, &mine, world);
        for (int step = 0; step < b->steps; step++) {
            uint64_t *hash = &b->hash[run][rank][step];
            const size_t bytes = (size_t)(block->rows * mine.d) * sizeof(float);
            fsdp_param_view v = FSDP_ZERO;
            *hash = 14695981039346656037u;
            block_feed(block, block->on.coord[0]);
            dawdle(w, AT_HOOK, 99, calls++);
            block_forward(block);
            dawdle(w, AT_HOOK, 99, calls++);
            block_backward(block);
            lab_fold(hash, block->y, bytes), lab_fold(hash, block->dx, bytes);
            while (fsdp_next_param(block->on.model, &v))
                for (int64_t k = 0; v.shard_grad && k < v.numel; k++) {
                    float *p = (float *)v.shard + k;
                    *p -= 0.125f * ((const float *)v.shard_grad)[k];
                    lab_fold(hash, p, sizeof *p);
                }
            CALL(world, fsdp_params_changed(block->on.model));
            CALL(world, fsdp_zero_grad(block->on.model));
        }
        block_close(block);
        CALL(NULL, fsdp_shutdown(world));
        free(block), free(w);
    }
}

static tp_batch *new_tp_batch(const block_net *of, int runs, int from, int threaded) {
    tp_batch *t = (tp_batch *)mmap(NULL, sizeof *t, PROT_READ | PROT_WRITE,
                                   MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    CHECK((void *)t != MAP_FAILED);
    t->net = *of;
    batch *b = &t->b;
    b->ranks = of->dp * of->tp, b->shards = of->dp, b->kind = &kinds[0], b->runs = runs;
    b->steps = KINDS, b->base = (int)getpid() * 2 + (from > 0), b->threaded = threaded;
    for (int run = 0; run < runs; run++) {
        b->way[run] = make_way(run ? run + from : 0, 1);
        b->threads[run].size = b->ranks;
    }
    return t;
}

static const struct {
    const char *name;
    block_net net;
} tp_rows[] = {{"2x2,plain", {2, 6, 10, 4, 4, 16, 2, 2, 0, 0, 5}},
               {"2x2,sequence", {2, 6, 10, 4, 4, 16, 2, 2, 1, 0, 6}},
               {"1x3,uneven", {2, 5, 10, 4, 4, 11, 1, 3, 1, 0, 7}}};
TEST_P(delays, tensor_parallel, tp_rows) {
    const int threads = W_SLOW ? 6 : 18, processes = W_SLOW ? 3 : 6;
    tp_batch *a = new_tp_batch(&row->net, threads, 0, 1);
    tp_batch *b = new_tp_batch(&row->net, processes, 1000, 0);
    tp_batch *other = new_tp_batch(&row->net, 1, 0, 0);
    const int ranks = a->b.ranks;
    other->b.way[0].other_input = 1, other->b.base += 1000000;
    h_ranks_proc(ranks, run_block, b); // before there are threads
    h_ranks_proc(ranks, run_block, other);
    h_ranks_thread(ranks, run_block, a);
    compare(&a->b, &a->b);
    compare(&a->b, &b->b);
    for (int r = 0; r < ranks; r++)
        for (int s = 0; s < KINDS; s++) CHECK(a->b.hash[0][r][s] != other->b.hash[0][r][s]);
    munmap(a, sizeof *a), munmap(b, sizeof *b), munmap(other, sizeof *other);
}
