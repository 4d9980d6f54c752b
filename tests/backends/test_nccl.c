/* test_nccl.c - the NCCL backend on the stubs of tests/stubs: the bits of a training on the host,
   the calls of a step, races, registrations, versions, calls in progress, failures of every call.

   SPDX-License-Identifier: MIT */
#define TAGS NO(SHM) | STUB | STUB_ASAN
#include "harness.h"
#include "stub.h"

/* Number of event queries by this thread: the watchdog has its own count. */
static __thread int64_t queries;
static cudaError_t counted_query(cudaEvent_t event) {
    queries++;
    return cudaEventQuery(event);
}
/* The memory that is registered with each comm: nothing may be registered twice. */
enum { NOTED = 256 };
static struct {
    ncclComm_t comm;
    void *base;
} noted[NOTED];
static int num_noted, noted_twice;
static void note(ncclComm_t comm, void *base) {
    if (num_noted == NOTED) return; /* full only after the tests that read it */
    for (int i = 0; i < num_noted; i++)
        noted_twice += noted[i].comm == comm && noted[i].base == base;
    noted[num_noted].comm = comm;
    noted[num_noted++].base = base;
}
static ncclResult_t noted_register(ncclComm_t comm, void *base, size_t size, void **handle) {
    note(comm, base);
    return ncclCommRegister(comm, base, size, handle);
}
static ncclResult_t noted_window(ncclComm_t comm, void *base, size_t size, ncclWindow_t *window,
                                 int flags) {
    note(comm, base);
    return ncclCommWindowRegister(comm, base, size, window, flags);
}
/* Elements of each gather so far. */
static int num_gathers;
static size_t sizes_gathered[64];
static ncclResult_t noted_gather(const void *src, void *dst, size_t count, ncclDataType_t type,
                                 ncclComm_t comm, cudaStream_t stream) {
    if (num_gathers < 64) sizes_gathered[num_gathers] = count;
    num_gathers++;
    return ncclAllGather(src, dst, count, type, comm, stream);
}
/* On a slow machine ranks that end normally close late. */
static int64_t time_to_close_ns = 1500000000;
/* If set, a rank is slow to allocate 32 MiB. */
static int dawdle_ms;
static cudaError_t slow_malloc(void **ptr, size_t size) {
    if (size == (size_t)32 << 20) usleep((useconds_t)dawdle_ms * 1000);
    return cudaMalloc(ptr, size);
}
#define FSDPI_NCCL_CLOSE_NS time_to_close_ns
#define cudaMalloc             slow_malloc
#define ncclAllGather          noted_gather
#define cudaEventQuery         counted_query
#define ncclCommRegister       noted_register
#define ncclCommWindowRegister noted_window
#define LIBRARY_WHOLE
#include "library.c"
#include "lab_net.h"
#undef cudaMalloc
#undef ncclAllGather
#undef cudaEventQuery
#undef ncclCommRegister
#undef ncclCommWindowRegister

enum { UNITS = 5, NUM = 13, ROOM = 1 << 20 };

/* Parameters large enough to be gathered in place, and small ones; sharded by columns, uneven,
   empty, frozen. A parameter's name is not used. */
static const lab_param net[NUM] = {
    {0, NULL, FSDP_F32, 0, 0, 2, 0, {96, 50}}, {0, NULL, FSDP_F32, 0, 0, 2, 0, {7, 5}},
    {0, NULL, FSDP_F32, 0, 0, 1, 0, {3}},      {0, NULL, FSDP_F32, 0, 0, 2, 1, {6, 10}},
    {1, NULL, FSDP_F32, 0, 0, 2, 0, {64, 64}}, {1, NULL, FSDP_F32, 0, 1, 2, 0, {72, 60}},
    {1, NULL, FSDP_F32, 1, 0, 1, 0, {9}},      {1, NULL, FSDP_F32, 0, 0, 1, 0, {0}},
    {2, NULL, FSDP_F32, 0, 0, 2, 0, {30, 4}},  {3, NULL, FSDP_F64, 0, 0, 2, 0, {5, 3}},
    {3, NULL, FSDP_F32, 0, 1, 1, 0, {11}},     {4, NULL, FSDP_BF16, 0, 0, 2, 0, {90, 4}},
    {4, NULL, FSDP_BF16, 0, 0, 1, 0, {2}}};
static const lab_net the_net = {net, NUM, UNITS};

/* A training configuration. `plain`: 16-bit sums are rounded before they are scaled, as on backends
   without fused reductions. `near`: relative tolerance, where bits differ from the host's. */
typedef struct {
    const char *name;
    fsdp_dtype param_dtype, reduce_dtype;
    int64_t direct_min;
    int micros, hsdp, reshard, offload, prefetch, scaler, plain;
    double clip, near;
} variant;
static const variant variants[] = {
    {"f32", 0, 0, 16384, 1, 0, 0, 0, 0, 0, 0, 0, 0},
    {"bf16_f32", FSDP_BF16, FSDP_F32, 8192, 1, 0, 0, 0, 0, 0, 0, 0, 0},
    {"bf16_bf16", FSDP_BF16, FSDP_BF16, 8192, 1, 0, 0, 0, 0, 0, 1, 0, 0},
    {"f32_bf16", FSDP_F32, FSDP_BF16, 16384, 1, 0, 0, 0, 0, 0, 1, 0, 0},
    {"packed", 0, 0, FSDP_DIRECT_NEVER, 2, 0, 0, 0, 1, 0, 0, 0, 0},
    {"direct", 0, 0, 1, 2, 0, 0, 0, 1, 0, 0, 0, 0},
    {"accumulates", FSDP_BF16, FSDP_F32, 8192, 3, 0, 0, 0, 0, 0, 0, 0, 0},
    {"keeps", 0, 0, 16384, 1, 0, FSDP_RESHARD_NEVER, 0, 0, 0, 0, 0, 0},
    {"halves", 0, 0, 16384, 1, 0, 2, 0, 0, 0, 0, 0, 0},
    {"hsdp", FSDP_BF16, FSDP_F32, 8192, 2, 1, 0, 0, 0, 0, 0, 0, 0},
    {"offload", 0, 0, 16384, 2, 0, 0, 1, 0, 0, 0, 0, 0},
    {"scaler", FSDP_F16, FSDP_F32, 8192, 1, 0, 0, 0, 0, 1, 0, 0, 0},
    /* The device adds squares in another order, so that norms differ in the last digits of f64, and
       the coefficient, which is rounded to f32, by one unit in the last place; bf16 parameters then
       differ by one of theirs. */
    {"clip", 0, 0, 16384, 1, 0, 0, 0, 0, 0, 0, 0.25, 1.0 / 128},
};

typedef struct {
    const variant *v;
    int rank, world, native;
    /* everything: no parameter is unused; launched: kernels of the test */
    int everything, launched;
    int faulty;               /* its kernels may fail to start */
    w_heap heap;
    fsdp_world *w;
    fsdp_mesh *mesh;
    lab_built m;
    fsdp_adamw *adamw;
    fsdp_grad_scaler *scaler;
    cudaStream_t stream;
    double *sums; /* of each unit's parameters, by the last forward */
    double *seen; /* results, step by step */
    int64_t num_seen;
} job;

static fsdp_dtype whole_dtype(const job *j, int p) {
    return j->v->param_dtype ? j->v->param_dtype : net[p].dtype;
}

/* ---- the caller's kernels -------------------------------------------------------------------- */

typedef struct {
    const void *param;
    void *grad; /* NULL: a forward */
    double *sum, factor;
    int64_t numel, seed;
    fsdp_dtype dtype;
    int adds, on_device;
} use;

/* A forward sums the parameter; a backward computes gradients from it and from the forward's sum.
   */
static void use_body(const void *params, unsigned block_index) {
    const use *u = (const use *)params;
    size_t bytes = (size_t)u->numel * fsdp_dtype_size(u->dtype);
    (void)block_index;
    if (u->on_device) {
        fsdp_stub_touch(u->param, bytes, 0);
        if (u->grad) fsdp_stub_touch(u->grad, bytes, 1);
        fsdp_stub_touch(u->sum, sizeof *u->sum, !u->grad);
    }
    for (int64_t i = 0; i < u->numel; i++) {
        double x = lab_get(u->param, u->dtype, i);
        if (!u->grad) {
            *u->sum += x;
            continue;
        }
        double g = u->factor * (x / 8 + *u->sum / 64 + lab_value(u->seed, i));
        lab_put(u->grad, u->dtype, i, u->adds ? lab_get(u->grad, u->dtype, i) + g : g);
    }
}

static void zero_body(const void *params, unsigned block_index) {
    const use *u = (const use *)params;
    (void)block_index;
    if (u->on_device) fsdp_stub_touch(u->sum, sizeof *u->sum, 1);
    *u->sum = 0;
}

static void run(job *j, void (*body)(const void *params, unsigned block_index), const use *u) {
    j->launched++;
    if (!j->native) body(u, 0);
    else CHECK((fsdp_stub_launch(body, u, sizeof *u, 1, j->stream) == cudaSuccess) | j->faulty);
}

/* ---- a training ------------------------------------------------------------------------------ */

static fsdp_status open_world(job *j, const char *name, int timeout_ms) {
    static fsdp_comm_ops plain;
    fsdp_world_desc d = w_desc(j->rank, j->world, NULL, w_job(name), 0);
    plain = w_plain();
    d.backend = j->native ? "nccl" : "shm";
    if (j->v->plain && !j->native) d.comm_ops = &plain;
    if (timeout_ms) d.timeout_ms = timeout_ms;
    w_heap_use(&j->heap, &d);
    return fsdp_init(&d, &j->w);
}

static fsdp_status make_model(job *j) {
    fsdp_mesh_desc mesh = FSDP_ZERO;
    fsdp_model_desc md = FSDP_ZERO;
    fsdp_status status = FSDP_OK;
    mesh.ndim = 2, mesh.shape[0] = mesh.shape[1] = 2;
    mesh.names[0] = "replicate", mesh.names[1] = "shard";
    if (j->v->hsdp) status = fsdp_mesh_create(j->w, &mesh, &j->mesh);
    md.mesh = j->mesh;
    md.param_dtype = j->v->param_dtype, md.reduce_dtype = j->v->reduce_dtype;
    md.direct_min = j->v->direct_min, md.reshard_after_forward = j->v->reshard;
    md.cpu_offload = j->v->offload;
    if (!status) status = fsdp_model_create(j->w, &md, &j->m.model);
    lab_begin(&j->m, &the_net, j->w);
    if (!status) status = lab_try_units(&j->m);
    if (!status) status = fsdp_init_params(j->m.model, lab_fill, NULL);
    for (int u = 0; u + 1 < UNITS && j->v->prefetch && !status; u++)
        status = fsdp_set_modules_to_forward_prefetch(j->m.unit[u], &j->m.unit[u + 1], 1);
    if (!status) status = fsdp_adamw_create(j->m.model, NULL, &j->adamw);
    if (!status && j->v->scaler) status = fsdp_grad_scaler_create(j->m.model, NULL, &j->scaler);
    return status;
}

/* Like every call of the library, returns a status: a failure ends the step. */
static fsdp_status forward(job *j) {
    for (int u = 0; u < UNITS; u++) {
        use all = FSDP_ZERO;
        all.sum = &j->sums[u];
        all.on_device = j->native;
        fsdp_status status = fsdp_pre_forward(j->m.unit[u]);
        if (status) return status;
        run(j, zero_body, &all);
        for (int p = 0; p < NUM; p++) {
            if (net[p].unit != u) continue;
            use one = all;
            one.dtype = whole_dtype(j, p);
            one.numel = lab_numel_of(&the_net, p);
            one.param = fsdp_data(j->m.unit[u], j->m.index[p]);
            W_CHECK(one.param != NULL, "%s", fsdp_last_error(j->w));
            if (one.numel) run(j, use_body, &one);
        }
        status = fsdp_post_forward(j->m.unit[u]);
        if (status) return status;
    }
    return FSDP_OK;
}

static fsdp_status backward(job *j, int step, int micro, double factor) {
    for (int u = UNITS - 1; u >= 0; u--) {
        fsdp_status status = fsdp_pre_backward(j->m.unit[u]);
        if (status) return status;
        for (int p = 0; p < NUM; p++) {
            use one = FSDP_ZERO;
            if (net[p].unit != u || net[p].frozen || (net[p].tag && !j->everything)) continue;
            one.sum = &j->sums[u];
            one.on_device = j->native;
            one.factor = factor;
            one.dtype = whole_dtype(j, p);
            one.numel = lab_numel_of(&the_net, p);
            one.seed = 1000 * step + 100 * micro + 17 * j->rank + p;
            one.adds = 1;
            one.param = fsdp_data(j->m.unit[u], j->m.index[p]);
            one.grad = fsdp_grad(j->m.unit[u], j->m.index[p]);
            W_CHECK(one.param && one.grad, "%s", fsdp_last_error(j->w));
            if (one.numel) run(j, use_body, &one);
        }
        status = fsdp_post_backward(j->m.unit[u]);
        if (status) return status;
    }
    return fsdp_finalize_backward(j->m.model);
}

static fsdp_status micro_steps(job *j, int step) {
    fsdp_status status = FSDP_OK;
    double factor = 0.125;
    if (j->scaler) factor *= fsdp_grad_scaler_scale(j->scaler) / 65536;
    if (j->scaler && step == 1) factor = 1e30; /* overflows f16 */
    for (int m = 0; m < j->v->micros && !status; m++) {
        status = fsdp_set_requires_gradient_sync(j->m.model, NULL, m + 1 == j->v->micros);
        if (!status) status = forward(j);
        if (!status) status = backward(j, step, m, factor);
    }
    return status;
}

static fsdp_status update(job *j) {
    fsdp_status status = FSDP_OK;
    int found = 0;
    double norm = 0;
    if (j->scaler) {
        status = fsdp_grad_scaler_unscale(j->scaler);
        found = fsdp_grad_scaler_found_inf(j->scaler);
    }
    if (j->v->clip > 0 && !status)
        status = fsdp_clip_grad_norm(j->m.model, j->v->clip, j->seen ? &norm : NULL);
    if (j->seen) j->seen[j->num_seen++] = norm;
    if (!status && !found) status = fsdp_adamw_step(j->adamw, 0.01);
    if (!status && j->scaler) status = fsdp_grad_scaler_update(j->scaler);
    return status ? status : fsdp_zero_grad(j->m.model);
}

static fsdp_status train_step(job *j, int step) {
    fsdp_status status = micro_steps(j, step);
    return status ? status : update(j);
}

/* Appends all parameters or gradients to `seen`, as the public functions return them. */
static void look(job *j, int grads) {
    char whole[32768];
    for (int p = 0; p < NUM; p++) {
        fsdp_unit *u = j->m.unit[net[p].unit];
        if (grads && net[p].frozen) continue;
        CHECK(j->num_seen + lab_numel_of(&the_net, p) < ROOM);
        CHECK(lab_numel_of(&the_net, p) * (int64_t)fsdp_dtype_size(net[p].dtype) <=
              (int64_t)sizeof whole);
        CALL(j->w, grads ? fsdp_param_full_grad(u, j->m.index[p], whole)
                         : fsdp_param_full(u, j->m.index[p], whole));
        for (int64_t i = 0; i < lab_numel_of(&the_net, p); i++)
            j->seen[j->num_seen++] = lab_get(whole, net[p].dtype, i);
    }
}

static void load_one(job *j) {
    float whole[7 * 5];
    for (int i = 0; i < 7 * 5; i++) whole[i] = (float)lab_value(50, i);
    CALL(j->w, fsdp_param_load(j->m.unit[0], j->m.index[1], whole));
}

static void begin(job *j, const variant *v, int rank, int world, int native) {
    memset(j, 0, sizeof *j);
    j->v = v, j->rank = rank, j->world = world, j->native = native;
    j->stream = cudaStreamLegacy;
    snprintf(w_case, sizeof w_case, "%s, rank %d of %d, %s", v->name, rank, world,
             native ? "nccl" : "shm");
}

static void make_sums(job *j) {
    void *sums = NULL;
    if (!j->native) sums = calloc(UNITS, sizeof *j->sums);
    else CHECK_EQ_INT(cudaMalloc(&sums, UNITS * sizeof *j->sums), 0);
    CHECK(sums != NULL);
    j->sums = (double *)sums;
}

static void start(job *j, const variant *v, int rank, int world, int native) {
    begin(j, v, rank, world, native);
    CALL(NULL, open_world(j, v->name, 0));
    make_sums(j);
    CALL(j->w, make_model(j));
}

static void check_nothing_live(void) {
    static const char *const names[STUB_KINDS] = {"streams",      "events", "bytes",
                                                  "pinned bytes", "comms",  "registrations",
                                                  "windows",      "graphs"};
    for (int k = 0; k < STUB_KINDS; k++)
        W_CHECK(stub_live(k) == 0, "%lld %s are left", (long long)stub_live(k), names[k]);
}

/* Waits for all ranks first: the communicators of a rank that shuts down long before its peers are
   not destroyed. */
static void finish(job *j) {
    CALL(j->w, fsdp_barrier(j->w));
    CALL(j->w, fsdp_shutdown(j->w));
    if (j->native) CHECK_EQ_INT(cudaFree(j->sums), 0);
    else free(j->sums);
    W_CHECK(j->heap.live == 0, "%lld blocks of host memory are left", (long long)j->heap.live);
    if (j->native) check_nothing_live();
}

/* Checks that the shards are in the expected kind of memory. */
static void check_on_device(job *j) {
    struct cudaPointerAttributes at;
    fsdp_flat flat;
    CALL(j->w, fsdp_model_flat(j->m.model, FSDP_F32, &flat));
    CHECK_EQ_INT(cudaPointerGetAttributes(&at, flat.shards), 0);
    CHECK_EQ_INT(at.type, j->v->offload ? cudaMemoryTypeHost : cudaMemoryTypeDevice);
}

static void train(job *j, const variant *v, int rank, int world, int native) {
    start(j, v, rank, world, native);
    j->seen = (double *)lab_zeros(ROOM, sizeof *j->seen);
    load_one(j);
    if (native) check_on_device(j);
    for (int step = 0; step < 3; step++) {
        CALL(j->w, micro_steps(j, step));
        look(j, 1);
        CALL(j->w, update(j));
        look(j, 0);
    }
    finish(j);
}

/* ---- the host's bits ------------------------------------------------------------------------- */

static void compare(const job *a, const job *b) {
    CHECK_EQ_INT(a->num_seen, b->num_seen);
    for (int64_t i = 0; i < a->num_seen; i++) {
        double x = a->seen[i], y = b->seen[i], off = x > y ? x - y : y - x;
        if (!memcmp(&x, &y, sizeof x)) continue;
        W_CHECK(a->v->near > 0 && off <= a->v->near * (y > 0 ? y : -y) + 1e-6,
                "value %lld is %.17g, on the host %.17g", (long long)i, x, y);
    }
}

static void same_as_host(int rank, int world, void *arg) {
    job a, b;
    stub_set(STUB_PROTECT, 1); /* the host cannot read device memory */
    train(&a, (const variant *)arg, rank, world, 1);
    train(&b, (const variant *)arg, rank, world, 0);
    compare(&a, &b);
    free(a.seen), free(b.seen);
}

TEST_P(nccl, same_bits, variants, AT_NIGHT(STUB_ASAN)) {
    int least = row->hsdp ? 4 : row->reshard > 1 ? row->reshard : 1;
    for (int world = least; world <= 4; world += least)
        h_ranks_proc(world, same_as_host, (void *)(uintptr_t)row);
}

/* ---- what a step costs ----------------------------------------------------------------------- */

/* Calls of one step, all in the caller's thread, without the test's own kernels. */
enum { LAUNCH, COPY, SET, RECORD, WAIT, GROUP, GATHER, SCATTER, REDUCE, COUNTED };
static const char *const counted[COUNTED] = {
    "launch",          "cudaMemcpyAsync",     "cudaMemsetAsync",
    "cudaEventRecord", "cudaStreamWaitEvent", "ncclGroupStart",
    "ncclAllGather",   "ncclReduceScatter",   "ncclAllReduce"};
/* Calls for the first step only: they allocate, register, or make the host wait. */
static const char *const never[] = {"cudaMalloc",
                                    "cudaMallocHost",
                                    "cudaMallocManaged",
                                    "cudaFree",
                                    "cudaFreeHost",
                                    "cudaStreamCreateWithFlags",
                                    "cudaStreamCreateWithPriority",
                                    "cudaStreamDestroy",
                                    "cudaStreamSynchronize",
                                    "cudaStreamQuery",
                                    "cudaDeviceSynchronize",
                                    "cudaEventCreateWithFlags",
                                    "cudaEventDestroy",
                                    "cudaEventSynchronize",
                                    "cudaMemcpy",
                                    "cudaMemset",
                                    "cudaMemGetInfo",
                                    "ncclMemAlloc",
                                    "ncclMemFree",
                                    "ncclCommRegister",
                                    "ncclCommDeregister",
                                    "ncclCommWindowRegister",
                                    "ncclCommSplit",
                                    "ncclSend",
                                    "ncclRecv",
                                    "ncclBroadcast"};

static const struct {
    const char *name, *variant;
    int world, expected[COUNTED];
} budgets[] = {
    {"f32,W=1", "f32", 1, {3, 5, 5, 6, 6, 0, 0, 0, 0}},
    {"f32,W=2", "f32", 2, {14, 4, 5, 59, 18, 15, 16, 6, 0}},
    {"bf16_f32,W=2", "bf16_f32", 2, {27, 0, 5, 61, 19, 15, 16, 6, 0}},
    {"keeps,W=2", "keeps", 2, {12, 2, 5, 38, 12, 10, 8, 6, 0}},
    {"accumulates,W=2", "accumulates", 2, {65, 0, 20, 159, 57, 35, 48, 6, 0}},
    {"clip,W=1", "clip", 1, {12, 5, 5, 6, 6, 0, 0, 0, 0}},
    {"clip,W=2", "clip", 2, {23, 4, 5, 63, 20, 16, 16, 6, 1}},
    {"hsdp,W=4", "hsdp", 4, {46, 0, 15, 129, 43, 30, 32, 6, 5}},
};

static const variant *variant_of(const char *name) {
    size_t i = 0;
    while (strcmp(variants[i].name, name)) CHECK(++i < sizeof variants / sizeof *variants);
    return &variants[i];
}

static void steady(int rank, int world, void *arg) {
    size_t row = (size_t)(uintptr_t)arg;
    job j;
    start(&j, variant_of(budgets[row].variant), rank, world, 1);
    j.everything = 1;
    for (int step = 0; step < 7; step++) {
        stub_count_reset();
        queries = j.launched = 0;
        CALL(j.w, train_step(&j, step));
        if (step < 2) continue;
        W_CHECK(queries == 0, "step %d: the caller looked at events %lld times", step,
                (long long)queries);
        for (size_t i = 0; i < sizeof never / sizeof *never; i++)
            W_CHECK(stub_count(never[i]) == 0, "step %d: %lld calls of %s", step,
                    (long long)stub_count(never[i]), never[i]);
        for (int i = 0; i < COUNTED; i++) {
            if (rank && i <= COPY) continue; /* uneven shards may have more pieces there */
            int calls = (int)(stub_count(counted[i]) - (i == LAUNCH ? j.launched : 0));
            W_CHECK(calls == budgets[row].expected[i], "step %d: %d calls of %s, expected %d", step,
                    calls, counted[i], budgets[row].expected[i]);
        }
    }
    finish(&j);
}

TEST_P(nccl, steady_step, budgets) {
    h_ranks_proc(row->world, steady, (void *)(uintptr_t)(row - budgets));
}

/* ---- gathers --------------------------------------------------------------------------------- */

/* A unit is gathered by one group: an operation for each large parameter, and one for all others.
   Only those are copied out, by one kernel. Without a cast, the gather reads the shards in place; a
   cast writes this rank's part of the slot, which is then gathered in place. */
static const struct {
    const char *name;
    int direct, packed;
    fsdp_dtype param_dtype;
    int launches, copies_out;
} units[] = {{"one_direct", 1, 0, 0, 0, 0},          {"three_direct", 3, 0, 0, 0, 0},
             {"four_packed", 0, 4, 0, 1, 1},         {"both", 2, 3, 0, 1, 1},
             {"cast_direct", 2, 0, FSDP_BF16, 1, 0}, {"cast_both", 2, 3, FSDP_BF16, 2, 1}};

static int copies_out, gathers, gathers_in_place;
static int on_op(void *user, fsdp_model *model, fsdp_op *op) {
    (void)user, (void)model;
    copies_out += op->label == FSDP_LABEL_COPY_OUT && op->kind == FSDP_OP_COPY;
    gathers += op->kind == FSDP_OP_ALL_GATHER;
    gathers_in_place += op->kind == FSDP_OP_ALL_GATHER && op->in_place;
    return 0;
}

static fsdp_status make_one_unit(job *j, int direct, int packed, int64_t rows, fsdp_dtype dtype) {
    fsdp_model_desc md = FSDP_ZERO;
    fsdp_unit_desc ud = FSDP_ZERO;
    fsdp_param_desc d[16];
    for (int i = 0; i < direct + packed; i++)
        d[i] = i < direct ? fsdp_mat(NULL, rows, 64) : fsdp_mat(NULL, 5 + i, 3);
    md.direct_min = 8192;
    md.param_dtype = dtype;
    ud.params = d;
    ud.num_params = direct + packed;
    fsdp_status status = fsdp_model_create(j->w, &md, &j->m.model);
    if (!status) status = fsdp_fully_shard(j->m.model, &ud, &j->m.unit[0]);
    return status ? status : fsdp_init_params(j->m.model, lab_fill, NULL);
}

/* Runs one step of units with `count` parameters. Gradients keep the memory's old contents. */
static fsdp_status step_of_units(const lab_built *m, int num, int count) {
    fsdp_status status = FSDP_OK;
    for (int i = 0; i < num && !status; i++) {
        status = fsdp_pre_forward(m->unit[i]);
        if (!status) status = fsdp_post_forward(m->unit[i]);
    }
    for (int i = num - 1; i >= 0 && !status; i--) {
        status = fsdp_pre_backward(m->unit[i]);
        for (int k = 0; k < count && !status; k++) CHECK(fsdp_grad(m->unit[i], k) != NULL);
        if (!status) status = fsdp_post_backward(m->unit[i]);
    }
    if (!status) status = fsdp_finalize_backward(m->model);
    return status ? status : fsdp_zero_grad(m->model);
}

static fsdp_status one_unit_step(job *j, int count) { return step_of_units(&j->m, 1, count); }

static void open_plainly(job *j, int rank, int world, const char *name) {
    begin(j, &variants[0], rank, world, 1);
    snprintf(w_case, sizeof w_case, "%s, rank %d of %d", name, rank, world);
    time_to_close_ns = 20000000000;
    CALL(NULL, open_world(j, name, 0));
    make_sums(j);
}

static void gather(int rank, int world, void *arg) {
    size_t row = (size_t)(uintptr_t)arg;
    int direct = units[row].direct, packed = units[row].packed;
    fsdp_extension watcher = FSDP_ZERO;
    watcher.op = on_op;
    job j;
    open_plainly(&j, rank, world, units[row].name);
    CALL(j.w, make_one_unit(&j, direct, packed, 64, units[row].param_dtype));
    for (int step = 0; step < 2; step++) CALL(j.w, one_unit_step(&j, direct + packed));
    CALL(j.w, fsdp_attach(j.m.model, &watcher));
    stub_count_reset();
    CALL(j.w, fsdp_pre_forward(j.m.unit[0]));
    CHECK_EQ_INT(stub_count("ncclGroupStart"), 1);
    CHECK_EQ_INT(stub_count("ncclAllGather"), direct + (packed > 0));
    CHECK_EQ_INT(stub_count("launch"), units[row].launches);
    CHECK_EQ_INT(stub_count("cudaMemcpyAsync") + stub_count("cudaMemcpy2DAsync"), 0);
    CHECK_EQ_INT(copies_out, units[row].copies_out);
    CHECK_EQ_INT(gathers, 1);
    CHECK_EQ_INT(gathers_in_place, units[row].param_dtype != 0);
    CALL(j.w, fsdp_post_forward(j.m.unit[0]));
    CALL(j.w, fsdp_model_reset(j.m.model));
    finish(&j);
}

TEST_P(nccl, gather, units) { h_ranks_proc(2, gather, (void *)(uintptr_t)(row - units)); }

/* Calls per step for a layer of a GPT: the difference between four layers and three. By default its
   four matrices are gathered and reduced in place; packed, they are copied. On one rank there are
   only copies, and all records and waits order streams. */
enum { LAYER_PARAMS = 12 };
static const struct {
    const char *name;
    fsdp_dtype param_dtype, reduce_dtype;
    int64_t direct_min;
    int world, expected[COUNTED];
} layers[] = {
    {"f32", 0, 0, 0, 2, {4, 0, 1, 11, 6, 3, 10, 5, 0}},
    {"bf16_f32", FSDP_BF16, FSDP_F32, 0, 2, {6, 0, 1, 13, 6, 3, 10, 1, 0}},
    {"bf16_f32,W=1", FSDP_BF16, FSDP_F32, 0, 1, {3, 0, 1, 5, 6, 0, 0, 0, 0}},
    {"f32_packed", 0, 0, FSDP_DIRECT_NEVER, 2, {4, 0, 1, 11, 6, 3, 2, 1, 0}},
    {"bf16_f32_packed", FSDP_BF16, FSDP_F32, FSDP_DIRECT_NEVER, 2, {6, 0, 1, 13, 6, 3, 2, 1, 0}},
};

static fsdp_status make_layers(job *j, int count, size_t row, lab_built *m) {
    enum { C = 256 };
    static const int rows[LAYER_PARAMS] = {C, C, 3 * C, 3 * C, C, C, C, C, 4 * C, 4 * C, C, C};
    static const int columns[LAYER_PARAMS] = {0, 0, C, 0, C, 0, 0, 0, C, 0, 4 * C, 0};
    fsdp_model_desc md = FSDP_ZERO;
    fsdp_unit_desc ud = FSDP_ZERO;
    fsdp_param_desc d[LAYER_PARAMS];
    for (int i = 0; i < LAYER_PARAMS; i++)
        d[i] = columns[i] ? fsdp_mat(NULL, rows[i], columns[i]) : fsdp_vec(NULL, rows[i]);
    md.param_dtype = layers[row].param_dtype, md.reduce_dtype = layers[row].reduce_dtype;
    md.direct_min = layers[row].direct_min;
    ud.params = d, ud.num_params = LAYER_PARAMS;
    fsdp_status status = fsdp_model_create(j->w, &md, &m->model);
    for (int i = 0; i < count && !status; i++)
        status = fsdp_fully_shard(m->model, &ud, &m->unit[i]);
    return status ? status : fsdp_init_params(m->model, lab_fill, NULL);
}

static void layer(int rank, int world, void *arg) {
    size_t row = (size_t)(uintptr_t)arg;
    int sum = 0, counts[2][COUNTED];
    job j;
    open_plainly(&j, rank, world, layers[row].name);
    for (int more = 0; more < 2; more++) {
        lab_built m;
        memset(&m, 0, sizeof m);
        CALL(j.w, make_layers(&j, 3 + more, row, &m));
        for (int step = 0; step < 4; step++) {
            stub_count_reset();
            CALL(j.w, step_of_units(&m, 3 + more, LAYER_PARAMS));
        }
        for (int i = 0; i < COUNTED; i++) counts[more][i] = (int)stub_count(counted[i]);
    }
    for (int i = 0; i < COUNTED; i++) {
        int calls = counts[1][i] - counts[0][i];
        sum += calls;
        W_CHECK(calls == layers[row].expected[i], "%d calls of %s, expected %d", calls, counted[i],
                layers[row].expected[i]);
    }
    h_message("%s: %d calls", layers[row].name, sum);
    finish(&j);
}

TEST_P(nccl, layer, layers, row == layers ? 0 : AT_NIGHT(STUB_ASAN)) {
    h_ranks_proc(row->world, layer, (void *)(uintptr_t)(row - layers));
}

/* A kernel's arguments travel with its launch: no launch of a step reads pinned memory over the
   bus. */
static void arguments(int rank, int world, void *arg) {
    job j;
    lab_built m;
    (void)arg;
    memset(&m, 0, sizeof m);
    stub_checks(1);
    open_plainly(&j, rank, world, "arguments");
    CALL(j.w, make_layers(&j, 2, 1, &m));
    for (int step = 0; step < 3; step++) {
        stub_count_reset();
        CALL(j.w, step_of_units(&m, 2, LAYER_PARAMS));
        CHECK(stub_count("launch") > 0);
        CHECK_EQ_INT(stub_count("read of pinned memory"), 0);
    }
    finish(&j);
}

TEST(nccl, arguments_travel_with_launches, AT_NIGHT(STUB_ASAN)) { h_ranks_proc(2, arguments, NULL); }

/* ---- times ----------------------------------------------------------------------------------- */

typedef struct {
    int64_t last[FSDP_STREAM_COUNT];
    uint64_t told[FSDP_OP_COUNT];
    int bad;
} timed_ops;

static void on_ran(void *user, fsdp_model *model, const fsdp_op *op, int64_t begin, int64_t end) {
    timed_ops *t = (timed_ops *)user;
    if (!model || begin > end || (op->model && begin + 1000 < t->last[op->stream])) t->bad++;
    t->last[op->stream] = end;
    if (op->model) t->told[op->kind]++;
}

/* Extensions get the times of every op, taken from events, once the device has reached them. */
static void times(int rank, int world, void *arg) {
    fsdp_extension watcher = FSDP_ZERO;
    fsdp_counters before = FSDP_ZERO, after = FSDP_ZERO;
    timed_ops t;
    job j;
    (void)arg;
    memset(&t, 0, sizeof t);
    open_plainly(&j, rank, world, "times");
    watcher.ran = on_ran;
    watcher.user = &t;
    CALL(j.w, make_one_unit(&j, 2, 2, 64, FSDP_BF16));
    CALL(j.w, one_unit_step(&j, 4));
    CALL(j.w, fsdp_model_counters(j.m.model, &before));
    CALL(j.w, fsdp_attach(j.m.model, &watcher));
    for (int step = 0; step < 40; step++) CALL(j.w, one_unit_step(&j, 4));
    CALL(j.w, fsdp_wait_stream(j.m.model, -1));
    CALL(j.w, fsdp_model_counters(j.m.model, &after));
    CALL(j.w, fsdp_detach(j.m.model, &watcher));
    W_CHECK(t.bad == 0, "%d of wrong order", t.bad);
    for (int kind = 0; kind < FSDP_OP_WAIT; kind++)
        W_CHECK(t.told[kind] == after.calls[kind] - before.calls[kind], "%llu %s of %llu",
                (unsigned long long)t.told[kind], fsdp_op_name(kind),
                (unsigned long long)(after.calls[kind] - before.calls[kind]));
    CALL(j.w, one_unit_step(&j, 4)); /* no extension listens, and no event is left */
    finish(&j);
}

TEST(nccl, times) { h_ranks_proc(2, times, NULL); }

/* ---- registration ---------------------------------------------------------------------------- */

/* Each large allocation is registered once, with the comm that uses it. Shard gradients are not
   registered. */
enum { NO_REGISTRATION, BUFFERS, WINDOWS, REFUSED };
static const struct {
    const char *name, *value, *comms;
    int version, kind, fails; /* fails: the world ends by a failure */
} registers[] = {{"none", "0", "2", 0, NO_REGISTRATION, 0},
                 {"default", NULL, "2", 0, NO_REGISTRATION, 0},
                 {"buffers", "1", "2", 0, BUFFERS, 0},
                 {"one_comm", "1", "1", 0, BUFFERS, 0},
                 {"buffers_abort", "1", "2", 0, BUFFERS, 1},
                 {"buffers_of_2.26", "1", "2", 22602, BUFFERS, 0},
                 {"buffers_of_2.25", "1", "2", 22505, NO_REGISTRATION, 0},
                 {"buffers_of_2.18", "1", "2", 21800, NO_REGISTRATION, 0},
                 {"windows", "2", "2", 22907, WINDOWS, 0},
                 {"windows_abort", "2", "2", 22907, WINDOWS, 1},
                 {"windows_refused", "2", "2", 22907, REFUSED, 0},
                 {"windows_of_2.28", "2", "2", 22809, BUFFERS, 0}};

static void end_by_failure(job *j, int rank) {
    h_mark(0);
    h_await_marks(0, fsdp_world_size(j->w)); /* no rank is in a call */
    if (rank == 0) fsdp_abort(j->w, "enough");
    int64_t start = h_calm_ms();
    while (!fsdp_zero_grad(j->m.model) && !fsdp_barrier(j->w)) CHECK(h_calm_ms() - start < 3000);
    CHECK_STATUS(fsdp_shutdown(j->w), FSDP_ERR_ABORTED);
    CHECK_EQ_INT(cudaFree(j->sums), 0);
    check_nothing_live();
    CHECK_EQ_INT(j->heap.live, 0);
}

static void registered(int rank, int world, void *arg) {
    size_t row = (size_t)(uintptr_t)arg;
    int kind = registers[row].kind;
    float whole[18];
    job j;
    if (registers[row].value) setenv("FSDP_NCCL_REGISTER", registers[row].value, 1);
    else unsetenv("FSDP_NCCL_REGISTER");
    setenv("FSDP_NCCL_COMMS", registers[row].comms, 1);
    if (registers[row].version) stub_set(STUB_NCCL_VERSION, registers[row].version);
    stub_set(STUB_WINDOWS_WORK, kind != REFUSED);
    open_plainly(&j, rank, world, registers[row].name);
    CALL(j.w, make_one_unit(&j, 1, 2, 16384, 0)); /* shards of 2 MiB, and two small parameters */
    for (int step = 0; step < 4; step++) CALL(j.w, one_unit_step(&j, 3));
    int64_t large = stub_count("ncclMemAlloc"), used = kind == NO_REGISTRATION ? 0 : large - 1;
    CHECK(kind == NO_REGISTRATION ? large == 0 : large >= 4);
    CHECK_EQ_INT(noted_twice, 0);
    CHECK_EQ_INT(num_noted, used);
    CHECK_EQ_INT(stub_live(STUB_REGISTRATIONS), kind == BUFFERS ? used : 0);
    CHECK_EQ_INT(stub_live(STUB_WINDOWS), kind == WINDOWS ? used : 0);
    CALL(j.w, fsdp_param_full(j.m.unit[0], 1, whole));
    for (int i = 0; i < 18; i++) CHECK_NEAR(whole[i], (float)lab_value(1, i), 0);
    if (registers[row].fails) {
        end_by_failure(&j, rank);
        return;
    }
    fsdp_model_destroy(j.m.model); /* registered memory must not be freed: the stub aborts */
    CHECK_EQ_INT(stub_live(STUB_REGISTRATIONS) + stub_live(STUB_WINDOWS), 0);
    finish(&j);
    CHECK_EQ_INT(stub_count("ncclMemAlloc"), stub_count("ncclMemFree"));
}

TEST_P(nccl, registers, registers) {
    h_ranks_proc(2, registered, (void *)(uintptr_t)(row - registers));
}

/* NCCL does not return from ending a registration: memory is not freed any more. */
static void kept(int rank, int world, void *arg) {
    job j;
    setenv("FSDP_NCCL_REGISTER", "1", 1);
    open_plainly(&j, rank, world, "kept");
    CALL(j.w, make_one_unit(&j, 1, 2, 16384, 0));
    CALL(j.w, one_unit_step(&j, 3));
    CHECK(stub_live(STUB_REGISTRATIONS) > 0);
    stub_set(STUB_KEEPS, 1);
    int64_t start = h_calm_ms();
    if (*(int *)arg) {
        fsdp_model_destroy(j.m.model);
        CHECK_STATUS(fsdp_barrier(j.w), FSDP_ERR_TIMEOUT); /* memory is not available any more */
        CHECK_MSG(strstr(fsdp_last_error(j.w), "ending a registration"), "%s",
                  fsdp_last_error(j.w));
    }
    (void)fsdp_shutdown(j.w);
    CHECK(h_calm_ms() - start < 4500);
    CHECK(stub_live(STUB_DEVICE_BYTES) > 0);
    CHECK_EQ_INT(j.heap.live, 0);
    stub_set(STUB_KEEPS, 0);
}
TEST(nccl, registrations_are_kept, AT_NIGHT(STUB_ASAN)) {
    for (int destroys = 0; destroys < 2; destroys++) h_ranks_proc(2, kept, &destroys);
}

/* ---- versions -------------------------------------------------------------------------------- */

/* The library at run time may be older than the header. */
static void too_old(int rank, int world, void *arg) {
    job j;
    (void)arg;
    stub_set(STUB_NCCL_VERSION, 21700);
    begin(&j, &variants[0], rank, world, 1);
    CHECK_STATUS(open_world(&j, "old", 0), FSDP_ERR_UNSUPPORTED);
    CHECK_MSG(strstr(fsdp_last_error(NULL), "version 21700") &&
                  strstr(fsdp_last_error(NULL), "LD_LIBRARY_PATH"),
              "%s", fsdp_last_error(NULL));
    CHECK_EQ_INT(j.heap.live, 0);
    check_nothing_live();
}
TEST(nccl, too_old) { h_ranks_proc(2, too_old, NULL); }

static const struct {
    const char *name;
    int version, groups; /* groups: of communicators that are aborted */
} aborts[] = {{"2.18", 21800, 0}, {"2.21", 22105, 0}, {"2.22", 22200, 1}, {"2.28", 22809, 1}};

static void abort_group(int rank, int world, void *arg) {
    size_t row = (size_t)(uintptr_t)arg;
    job j;
    stub_set(STUB_NCCL_VERSION, aborts[row].version);
    open_plainly(&j, rank, world, aborts[row].name);
    CALL(j.w, make_one_unit(&j, 1, 0, 64, 0));
    CALL(j.w, one_unit_step(&j, 1));
    CALL(j.w, fsdp_barrier(j.w));
    stub_count_reset();
    end_by_failure(&j, rank);
    CHECK(stub_count("ncclCommAbort") >= 2);
    CHECK_EQ_INT(stub_count("ncclGroupStart") - stub_count("ncclAllReduce"), aborts[row].groups);
}
TEST_P(nccl, abort_group, aborts) {
    h_ranks_proc(2, abort_group, (void *)(uintptr_t)(row - aborts));
}

/* ---- calls in progress ----------------------------------------------------------------------- */

static const struct {
    const char *name, *variant;
    int world, polls;
} slow[] = {{"f32,1", "f32", 2, 1},       {"f32,5", "f32", 3, 5},   {"hsdp,2", "hsdp", 4, 2},
            {"halves,3", "halves", 4, 3}, {"clip,4", "clip", 2, 4}, {"scaler,2", "scaler", 2, 2}};

static void in_progress(int rank, int world, void *arg) {
    size_t row = (size_t)(uintptr_t)arg;
    setenv("NCCL_COMM_BLOCKING", "0", 1);
    stub_set(STUB_PROGRESS, slow[row].polls);
    same_as_host(rank, world, (void *)(uintptr_t)variant_of(slow[row].variant));
    CHECK(stub_count("ncclCommGetAsyncError") > 20);
}
TEST_P(nccl, in_progress, slow) {
    h_ranks_proc(row->world, in_progress, (void *)(uintptr_t)(row - slow));
}

/* A call that stays in progress ends at the deadline: when a world opens, a group splits, or in a
   gather. */
static const struct {
    const char *name;
    int where;
    const char *text;
} endless[] = {{"open", 0, "ncclCommInitRankConfig"},
               {"split", 1, "in progress"},
               {"gather", 2, "all_gather is in progress"}};

static void never_done(int rank, int world, void *arg) {
    size_t row = (size_t)(uintptr_t)arg;
    int where = endless[row].where;
    fsdp_status status = FSDP_OK;
    fsdp_mesh *mesh = NULL;
    fsdp_mesh_desc desc = FSDP_ZERO;
    job j;
    begin(&j, &variants[0], rank, world, 1);
    desc.ndim = 2, desc.shape[0] = 2, desc.shape[1] = 1;
    setenv("NCCL_COMM_BLOCKING", "0", 1);
    if (where == 0) stub_set(STUB_PROGRESS, 1000000000);
    int64_t start = h_now_ms(), calm = h_calm_ms();
    status = open_world(&j, "endless", 1000);
    if (where > 0) CALL(NULL, status);
    if (where == 2) CALL(j.w, make_one_unit(&j, 1, 0, 64, 0));
    if (where > 0) {
        CALL(j.w, fsdp_barrier(j.w));
        stub_set(STUB_PROGRESS, 1000000000);
        start = h_now_ms(), calm = h_calm_ms();
        status = where == 1 ? fsdp_mesh_create(j.w, &desc, &mesh) : fsdp_pre_forward(j.m.unit[0]);
    }
    int64_t took = h_now_ms() - start, took_calm = h_calm_ms() - calm;
    W_CHECK(status == FSDP_ERR_TIMEOUT, "%s: %s", fsdp_status_name(status), fsdp_last_error(j.w));
    W_CHECK(strstr(fsdp_last_error(j.w), endless[row].text) != NULL, "%s", fsdp_last_error(j.w));
    W_CHECK(took >= 950 && took_calm < 2500, "it took %d ms", (int)took);
    calm = h_calm_ms();
    if (j.w) CHECK_STATUS(fsdp_shutdown(j.w), status);
    CHECK(h_calm_ms() - calm < 6000);
}
TEST_P(nccl, never_done, endless) {
    h_ranks_proc(2, never_done, (void *)(uintptr_t)(row - endless));
}

/* ---- races ----------------------------------------------------------------------------------- */

static void no_races(int rank, int world, void *arg) {
    job j;
    stub_checks(1);
    train(&j, (const variant *)arg, rank, world, 1);
    W_CHECK(stub_races() == 0, "%lld races, first: %s", (long long)stub_races(), stub_race_text());
    free(j.seen);
}
// Variants with one microbatch run at night: the steps with several microbatches contain their
// events.
TEST_P(nccl, no_races, variants, AT_NIGHT(STUB_ASAN) | (row->micros > 1 ? 0 : AT_NIGHT(STUB))) {
    int least = row->hsdp ? 4 : row->reshard > 1 ? row->reshard : 1;
    for (int world = least; world <= 4; world += least)
        h_ranks_proc(world, no_races, (void *)(uintptr_t)row);
}

/* The op of each wait of a step: its kind, its label, and the wait's index in it. */
enum { MAX_WAITS = 256 };
typedef struct {
    int64_t from;
    int count;
    char op[48], of[MAX_WAITS][64];
} wait_log;

static void note_waits(wait_log *log) {
    for (int k = 0; log->from < stub_waits(); log->from++, k++) {
        CHECK(log->count < MAX_WAITS);
        snprintf(log->of[log->count++], sizeof log->of[0], "%s.%d", log->op, k);
    }
}
static int on_wait(void *user, fsdp_model *model, fsdp_op *op) {
    wait_log *log = (wait_log *)user;
    (void)model;
    note_waits(log);
    snprintf(log->op, sizeof log->op, "%s.%s", fsdp_op_name(op->kind), fsdp_label_name(op->label));
    return 0;
}

/* All waits of a step are necessary: each one, when left out, causes a race in this step or the
   next. */
static void leave_out(int rank, int world, void *arg) {
    wait_log log;
    fsdp_extension watcher = FSDP_ZERO;
    watcher.op = on_wait;
    watcher.user = &log;
    job j;
    stub_checks(1);
    start(&j, (const variant *)arg, rank, world, 1);
    j.everything = 1;
    for (int step = 0; step < 3; step++) CALL(j.w, train_step(&j, step));
    memset(&log, 0, sizeof log);
    log.from = stub_waits();
    CALL(j.w, fsdp_attach(j.m.model, &watcher));
    CALL(j.w, train_step(&j, 3));
    note_waits(&log);
    CALL(j.w, fsdp_detach(j.m.model, &watcher));
    W_CHECK(stub_races() == 0, "%s", stub_race_text());
    for (int nth = 1; nth <= log.count; nth++) {
        int64_t races = stub_races();
        stub_ignore_wait(nth);
        for (int step = 4; step < 6; step++) CALL(j.w, train_step(&j, step));
        /* Offloaded shards are the host's, which has already waited. */
        W_CHECK(stub_races() > races ||
                    (j.v->offload && !strcmp(log.of[nth - 1], "copy.copy_in.0")),
                "wait %d of %d, %s, is not needed", nth, log.count, log.of[nth - 1]);
    }
    finish(&j);
}
TEST_P(nccl, leave_out, variants, AT_NIGHT(STUB_ASAN) | (row->micros > 1 ? 0 : AT_NIGHT(STUB))) {
    h_ranks_proc(row->hsdp ? 4 : 2, leave_out, (void *)(uintptr_t)row);
}

/* ---- options --------------------------------------------------------------------------------- */

static const struct {
    const char *name, *comms;
    int splits;
} lanes[] = {{"one", "1", 0}, {"two", "2", 1}, {"default", NULL, 1}};
static void comms(int rank, int world, void *arg) {
    size_t row = (size_t)(uintptr_t)arg;
    job j;
    if (lanes[row].comms) setenv("FSDP_NCCL_COMMS", lanes[row].comms, 1);
    else unsetenv("FSDP_NCCL_COMMS");
    start(&j, &variants[0], rank, world, 1);
    for (int step = 0; step < 2; step++) CALL(j.w, train_step(&j, step));
    CHECK_EQ_INT(stub_count("ncclCommInitRankConfig"), 1);
    CHECK_EQ_INT(stub_count("ncclCommSplit"), lanes[row].splits);
    CHECK_EQ_INT(stub_live(STUB_COMMS), 1 + lanes[row].splits);
    finish(&j);
}
TEST_P(nccl, comms, lanes) { h_ranks_proc(2, comms, (void *)(uintptr_t)(row - lanes)); }

/* A wrong value of a variable for NCCL or CUDA is an error of fsdp_init, never ignored. */
static const struct {
    const char *name, *variable, *value, *expected;
} wrong_values[] = {{"check", "FSDP_NCCL_CHECK", "yes", "an integer from 0 to 1"},
                    {"check_2", "FSDP_NCCL_CHECK", "2", "an integer from 0 to 1"},
                    {"comms_0", "FSDP_NCCL_COMMS", "0", "an integer from 1 to 2"},
                    {"comms_3", "FSDP_NCCL_COMMS", "3", "an integer from 1 to 2"},
                    {"register", "FSDP_NCCL_REGISTER", "-1", "an integer from 0 to 2"},
                    {"register_3", "FSDP_NCCL_REGISTER", "3", "an integer from 0 to 2"},
                    {"warm_up", "FSDP_NCCL_WARM_UP", "2", "an integer from 0 to 1"},
                    {"managed", "FSDP_CUDA_MANAGED", "true", "an integer from 0 to 1"}};
static void wrong_value(int rank, int world, void *arg) {
    size_t row = (size_t)(uintptr_t)arg;
    char text[200];
    job j;
    begin(&j, &variants[0], rank, world, 1);
    setenv(wrong_values[row].variable, wrong_values[row].value, 1);
    CHECK_STATUS(open_world(&j, "wrong_value", 1000), FSDP_ERR_INVALID_ARG);
    snprintf(text, sizeof text, "[E509] variable %s is '%s', expected %s",
             wrong_values[row].variable, wrong_values[row].value, wrong_values[row].expected);
    W_CHECK(strstr(fsdp_last_error(NULL), text), "%s", fsdp_last_error(NULL));
    check_nothing_live();
}
TEST_P(nccl, wrong_values, wrong_values) {
    /* a world of one rank uses the device only */
    int world = strcmp(row->name, "managed") == 0 ? 1 : 2;
    h_ranks_proc(world, wrong_value, (void *)(uintptr_t)(row - wrong_values));
}

/* The caller's own stream, which nothing else orders: the checker finds operations out of its
   order. */
static void own_stream(int rank, int world, void *arg) {
    int says_so = *(int *)arg;
    cudaStream_t own[2];
    job j;
    stub_checks(1);
    for (int k = 0; k < 2; k++)
        CHECK_EQ_INT(cudaStreamCreateWithFlags(&own[k], cudaStreamNonBlocking), 0);
    start(&j, variant_of("packed"), rank, world, 1);
    for (int step = 0; step < 6; step++) {
        j.stream = step == 2 || step == 5 ? cudaStreamLegacy : own[step % 2];
        void *native = j.stream == cudaStreamLegacy ? NULL : (void *)j.stream;
        if (says_so) CALL(j.w, fsdp_set_stream(j.w, native));
        CALL(j.w, micro_steps(&j, step));
        if (says_so && step == 3) CALL(j.w, fsdp_set_stream(j.w, own[0])); /* within a step */
        CALL(j.w, update(&j));
    }
    W_CHECK(!says_so == (stub_races() > 0), "%lld races: %s", (long long)stub_races(),
            stub_race_text());
    CALL(j.w, fsdp_shutdown(j.w));
    for (int k = 0; k < 2; k++) CHECK_EQ_INT(cudaStreamDestroy(own[k]), 0);
    CHECK_EQ_INT(cudaFree(j.sums), 0);
    check_nothing_live();
}
TEST(nccl, own_stream, AT_NIGHT(STUB_ASAN)) {
    for (int says_so = 0; says_so < 2; says_so++)
        for (int world = 1; world <= 2; world++) h_ranks_proc(world, own_stream, &says_so);
}

/* Steps of several ranks, or with casts, cannot be captured in a graph, wherever the capture
   begins. */
static const struct {
    const char *name, *variant;
    int world, steps;
    char from; /* starts in: forward, backward, update */
} captures[] = {
    {"first_forward", "f32", 2, 0, 'f'}, {"forward", "f32", 2, 2, 'f'},
    {"packed", "packed", 3, 2, 'f'},     {"casts", "bf16_f32", 1, 2, 'f'},
    {"backward", "f32", 2, 2, 'b'},      {"backward_of_kept", "keeps", 2, 2, 'b'},
    {"clip", "clip", 2, 2, 'u'},         {"scaler", "scaler", 1, 2, 'u'},
};

static void captured(int rank, int world, void *arg) {
    size_t row = (size_t)(uintptr_t)arg;
    char from = captures[row].from;
    cudaStream_t own = NULL;
    cudaGraph_t graph = NULL;
    job j;
    CHECK_EQ_INT(cudaStreamCreateWithFlags(&own, cudaStreamNonBlocking), 0);
    start(&j, variant_of(captures[row].variant), rank, world, 1);
    CALL(j.w, fsdp_set_stream(j.w, own));
    j.stream = own;
    for (int step = 0; step < captures[row].steps; step++) CALL(j.w, train_step(&j, step));
    int64_t begin_ms = h_calm_ms();
    fsdp_status status = FSDP_OK;
    if (from == 'b') CALL(j.w, forward(&j));
    if (from == 'u') CALL(j.w, micro_steps(&j, 2));
    status = fsdp_barrier(j.w); /* so that a peer's failure cannot end the calls before this one */
    j.faulty = 1;
    CHECK_EQ_INT(cudaStreamBeginCapture(own, cudaStreamCaptureModeThreadLocal), 0);
    if (!status && from == 'f') status = forward(&j);
    if (!status && from != 'u') status = backward(&j, 2, 0, 1);
    if (!status) status = update(&j);
    CHECK_STATUS(status, FSDP_ERR_UNSUPPORTED);
    CHECK_MSG(strstr(fsdp_last_error(j.w), "CUDA graph"), "%s", fsdp_last_error(j.w));
    (void)cudaStreamEndCapture(own, &graph);
    if (graph) CHECK_EQ_INT(cudaGraphDestroy(graph), 0);
    (void)cudaGetLastError();
    CHECK_STATUS(fsdp_barrier(j.w), FSDP_ERR_UNSUPPORTED);
    (void)fsdp_shutdown(j.w);
    CHECK(h_calm_ms() - begin_ms < 4000);
    CHECK_EQ_INT(cudaStreamDestroy(own), 0);
    CHECK_EQ_INT(cudaFree(j.sums), 0);
    check_nothing_live();
}
TEST_P(nccl, captured, captures) {
    h_ranks_proc(row->world, captured, (void *)(uintptr_t)(row - captures));
}

/* A collective that an extension issues on a captured stream: no event is recorded before it. */
static void captured_collective(int rank, int world, void *arg) {
    const fsdp_comm_ops *ops = fsdp_nccl_comm_ops();
    cudaStream_t own = NULL;
    cudaGraph_t graph = NULL;
    fsdp_coll c;
    job j;
    (void)arg;
    begin(&j, &variants[0], rank, world, 1);
    CALL(NULL, open_world(&j, "captured_collective", 20000));
    make_sums(&j);
    CHECK_EQ_INT(cudaStreamCreateWithFlags(&own, cudaStreamNonBlocking), 0);
    memset(&c, 0, sizeof c);
    c.kind = FSDP_OP_ALL_REDUCE, c.dtype = c.out_dtype = FSDP_F32, c.redop = FSDP_SUM;
    c.scale = 1, c.count = 1, c.what = "sum", c.stream = own;
    CALL(j.w, ops->alloc(j.w->comm, 64, &c.dst));
    c.src = c.dst;
    CALL(j.w, ops->run(j.w->comm, &c));
    CHECK_EQ_INT(cudaStreamSynchronize(own), 0);
    CALL(j.w, fsdp_barrier(j.w));
    h_mark(0);
    h_await_marks(0, world); /* no rank is in a call */
    j.faulty = 1;
    if (rank == 0) {
        CHECK_EQ_INT(cudaStreamBeginCapture(own, cudaStreamCaptureModeThreadLocal), 0);
        CHECK_STATUS(ops->run(j.w->comm, &c), FSDP_ERR_UNSUPPORTED);
        CHECK_MSG(strstr(ops->error_text(j.w->comm), "collectives cannot be captured"), "%s",
                  ops->error_text(j.w->comm));
        (void)cudaStreamEndCapture(own, &graph);
        h_mark(1);
    }
    h_await_marks(1, 1);
    if (graph) CHECK_EQ_INT(cudaGraphDestroy(graph), 0);
    (void)cudaGetLastError();
    ops->free(j.w->comm, c.dst, 64);
    (void)fsdp_shutdown(j.w);
    CHECK_EQ_INT(cudaStreamDestroy(own), 0);
    CHECK_EQ_INT(cudaFree(j.sums), 0);
}
TEST(nccl, captured_collective) { h_ranks_proc(2, captured_collective, NULL); }

TEST(nccl, no_stream_of_host) {
    job j;
    start(&j, &variants[0], 0, 1, 0);
    CHECK_STATUS(fsdp_set_stream(j.w, NULL), FSDP_ERR_UNSUPPORTED);
    CHECK_MSG(strstr(fsdp_last_error(j.w), "has no streams") != NULL, "%s", fsdp_last_error(j.w));
    CHECK_STATUS(fsdp_set_stream(NULL, NULL), FSDP_ERR_INVALID_ARG);
    finish(&j);
}

/* One rank warns once of a setting that slows everything down. */
static int warnings;
static void count_warning(int level, fsdp_status code, int rank, const char *text, void *user) {
    (void)code, (void)rank, (void)user;
    warnings += level == FSDP_LOG_WARN && strstr(text, "CUDA_DEVICE_MAX_CONNECTIONS is 1") != NULL;
}
static void connections(int rank, int world, void *arg) {
    const char *value = (const char *)arg;
    fsdp_world_desc d = w_desc(rank, world, NULL, w_job("connections"), 0);
    fsdp_world *w = NULL;
    setenv("CUDA_DEVICE_MAX_CONNECTIONS", value, 1);
    d.backend = "nccl";
    d.logger.log = count_warning;
    CALL(NULL, fsdp_init(&d, &w));
    CALL(w, fsdp_barrier(w));
    CALL(w, fsdp_shutdown(w));
    CHECK_EQ_INT(warnings, rank == 0 && !strcmp(value, "1"));
}
TEST(nccl, connections) {
    h_ranks_proc(2, connections, (void *)(uintptr_t) "1");
    h_ranks_proc(2, connections, (void *)(uintptr_t) "8");
}

static void no_device(int rank, int world, void *arg) {
    job j;
    (void)arg;
    stub_set(STUB_DEVICES, 0);
    begin(&j, &variants[0], rank, world, 1);
    CHECK_STATUS(open_world(&j, "none", 0), FSDP_ERR_BACKEND);
    CHECK_MSG(strstr(fsdp_last_error(NULL), "no CUDA device") &&
                  strstr(fsdp_last_error(NULL), "nvidia-smi"),
              "%s", fsdp_last_error(NULL));
    CHECK_EQ_INT(j.heap.live, 0);
    check_nothing_live();
}
TEST(nccl, no_device) {
    for (int world = 1; world <= 2; world++) h_ranks_proc(world, no_device, NULL);
}

/* Ranks share devices round robin, if NCCL permits it (2.30, with its variable). */
static void which_device(int rank, int world, void *arg) {
    int count = *(int *)arg, device = -1;
    job j;
    stub_set(STUB_DEVICES, count);
    stub_set(STUB_NCCL_VERSION, 23003);
    setenv("NCCL_MULTI_RANK_GPU_ENABLE", "1", 1);
    open_plainly(&j, rank, world, "device");
    CHECK_EQ_INT(cudaGetDevice(&device), 0);
    CHECK_EQ_INT(device, rank % count);
    finish(&j);
}
TEST(nccl, which_device) {
    for (int count = 1; count <= 3; count++) h_ranks_proc(3, which_device, &count);
}

/* A communicator is warmed up by small operations and by those of 64 KiB and 32 MiB. */
static const struct {
    const char *name, *value;
    int operations; /* for each kind and communicator */
} warmths[] = {{"default", NULL, 3}, {"on", "1", 3}, {"off", "0", 1}};
static void warm(int rank, int world, void *arg) {
    size_t row = (size_t)(uintptr_t)arg;
    int operations = warmths[row].operations;
    job j;
    if (warmths[row].value) setenv("FSDP_NCCL_WARM_UP", warmths[row].value, 1);
    else unsetenv("FSDP_NCCL_WARM_UP");
    begin(&j, &variants[0], rank, world, 1);
    int64_t bytes = stub_live(STUB_DEVICE_BYTES);
    CALL(NULL, open_world(&j, "warm", 0));
    /* Two communicators. In addition, a split compares ranks, and ranks add the numbers that name
       their world. */
    for (int i = GATHER; i <= REDUCE; i++)
        CHECK_EQ_INT(stub_count(counted[i]), 2 * operations + (i == GATHER || i == REDUCE));
    for (int k = 0; k < 2 && operations > 1; k++) {
        CHECK_EQ_INT(sizes_gathered[4 * k + 1] * sizeof(float) * (size_t)world, 64 << 10);
        CHECK_EQ_INT(sizes_gathered[4 * k + 2] * sizeof(float) * (size_t)world, 32 << 20);
    }
    CHECK(stub_live(STUB_DEVICE_BYTES) - bytes < 4 << 20); /* no warm-up buffer is kept */
    CALL(j.w, fsdp_shutdown(j.w));
    check_nothing_live();
}
TEST_P(nccl, warm_up, warmths) { h_ranks_proc(2, warm, (void *)(uintptr_t)(row - warmths)); }

/* A rank does not reach the largest operation: the text says that NCCL connects the ranks in it. */
static void cold(int rank, int world, void *arg) {
    job j;
    (void)arg;
    setenv("FSDP_NCCL_WARM_UP", "1", 1);
    dawdle_ms = rank == 1 ? 2500 : 0;
    begin(&j, &variants[0], rank, world, 1);
    CHECK_STATUS(open_world(&j, "cold", 1000), FSDP_ERR_TIMEOUT);
    CHECK_MSG(strstr(fsdp_last_error(NULL), "a first operation, in which NCCL connects the ranks"),
              "%s", fsdp_last_error(NULL));
    CHECK_EQ_INT(j.heap.live, 0);
}
TEST(nccl, cold_rank) { h_ranks_proc(2, cold, NULL); }

/* Default timeouts: on GPUs it is PyTorch's. */
static void waits_long(int rank, int world, void *arg) {
    int native = *(int *)arg;
    fsdp_world_desc d = w_desc(rank, world, NULL, w_job("waits_long"), 0);
    fsdp_world *w;
    unsetenv("FSDP_TIMEOUT_MS");
    d.backend = native ? "nccl" : "shm";
    d.timeout_ms = 0;
    CALL(NULL, fsdp_init(&d, &w));
    CHECK_EQ_INT(w->boot.timeout_ns, (native ? 600 : 60) * (int64_t)1000000000);
    CALL(w, fsdp_shutdown(w));
    d.timeout_ms = 5000;
    CALL(NULL, fsdp_init(&d, &w));
    CHECK_EQ_INT(w->boot.timeout_ns, 5 * (int64_t)1000000000);
    CALL(w, fsdp_shutdown(w));
}
TEST(nccl, default_deadline) {
    for (int native = 0; native < 2; native++)
        for (int world = 1; world <= 2; world++) h_ranks_proc(world, waits_long, &native);
}

/* Two communicators do not fit on the GPU at the same time, and one rank issues them in another
   order. From NCCL 2.26 on they start in the order of issue, unless the user forbids it. */
static const struct {
    const char *name, *value;
    int version;
    fsdp_status status;
} room[] = {{"2.28", NULL, 22809, FSDP_OK},
            {"2.26", NULL, 22602, FSDP_OK},
            {"2.25", NULL, 22505, FSDP_ERR_TIMEOUT},
            {"forbidden", "0", 22809, FSDP_ERR_TIMEOUT}};
static int room_gate;
static void wait_for_room(const void *params, unsigned block_index) {
    long nap = 0;
    (void)params, (void)block_index;
    while (!__atomic_load_n(&room_gate, __ATOMIC_SEQ_CST)) h_nap(&nap);
}
static void crosses(int rank, int world, void *arg) {
    size_t row = (size_t)(uintptr_t)arg;
    const fsdp_comm_ops *ops = fsdp_nccl_comm_ops();
    cudaStream_t stream[2];
    fsdp_coll c[2];
    int none = 0;
    job j;
    if (room[row].value) setenv("NCCL_LAUNCH_ORDER_IMPLICIT", room[row].value, 1);
    else unsetenv("NCCL_LAUNCH_ORDER_IMPLICIT");
    stub_set(STUB_NCCL_VERSION, room[row].version);
    begin(&j, &variants[0], rank, world, 1);
    CALL(NULL, open_world(&j, "room", room[row].status ? 1000 : 20000));
    CALL(j.w, fsdp_barrier(j.w));
    stub_set(STUB_SMS, 32);
    memset(c, 0, sizeof c);
    for (int k = 0; k < 2; k++) {
        CHECK_EQ_INT(cudaStreamCreateWithFlags(&stream[k], cudaStreamNonBlocking), 0);
        c[k].kind = FSDP_OP_ALL_REDUCE, c[k].dtype = c[k].out_dtype = FSDP_F32;
        c[k].scale = 1, c[k].count = 1, c[k].what = "sum", c[k].stream = stream[k];
        CALL(j.w, ops->alloc(j.w->comm, 64, &c[k].dst));
        c[k].src = c[k].dst;
    }
    const int begun = stub_begun(rank);
    if (rank == 0)
        CHECK_EQ_INT(fsdp_stub_launch(wait_for_room, &none, sizeof none, 1, stream[0]), 0);
    CALL(j.w, ops->run(j.w->comm, &c[0]));
    while (rank == 1 && stub_begun(rank) == begun) usleep(1000);
    CALL(j.w, ops->run(j.w->reduce_comm, &c[1]));
    while (rank == 0 && room[row].status && stub_begun(rank) == begun) usleep(1000);
    __atomic_store_n(&room_gate, 1, __ATOMIC_SEQ_CST);
    CHECK_STATUS(fsdp_barrier(j.w), room[row].status);
    for (int k = 0; k < 2; k++) CHECK_EQ_INT(cudaStreamSynchronize(stream[k]), 0);
    for (int k = 0; k < 2; k++) ops->free(j.w->comm, c[k].dst, 64);
    CHECK_STATUS(fsdp_shutdown(j.w), room[row].status);
    for (int k = 0; k < 2; k++) CHECK_EQ_INT(cudaStreamDestroy(stream[k]), 0);
}
TEST_P(nccl, room, room) { h_ranks_proc(2, crosses, (void *)(uintptr_t)(row - room)); }

/* The environment changes only while no other thread can read it; otherwise a warning names the
   variable to set. */
static const struct {
    const char *name, *before, *after;
    int threads, warns;
} orders[] = {{"alone", NULL, "1", 0, 0},
              {"with_a_thread", NULL, NULL, 1, 1},
              {"forbidden", "0", "0", 0, 0},
              {"forbidden_with_a_thread", "0", "0", 1, 0}};
static int num_order_warnings;
static void hear_order(int level, fsdp_status code, int rank, const char *text, void *user) {
    (void)code, (void)rank, (void)user;
    if (level == FSDP_LOG_WARN && strstr(text, "NCCL_LAUNCH_ORDER_IMPLICIT=1"))
        __atomic_add_fetch(&num_order_warnings, 1, __ATOMIC_SEQ_CST);
}
static void *waits_for_room(void *arg) {
    wait_for_room(arg, 0);
    return NULL;
}
static void orders_launches(int rank, int world, void *arg) {
    const size_t k = (size_t)(uintptr_t)arg;
    const char *after;
    pthread_t beside;
    fsdp_world_desc d = w_desc(rank, world, NULL, w_job("order"), 1);
    fsdp_world *w;
    if (orders[k].before) setenv("NCCL_LAUNCH_ORDER_IMPLICIT", orders[k].before, 1);
    else unsetenv("NCCL_LAUNCH_ORDER_IMPLICIT");
    stub_set(STUB_NCCL_VERSION, 22809);
    d.backend = "nccl", d.logger.log = hear_order;
    if (orders[k].threads) CHECK_EQ_INT(pthread_create(&beside, NULL, waits_for_room, NULL), 0);
    CALL(NULL, fsdp_init(&d, &w));
    after = getenv("NCCL_LAUNCH_ORDER_IMPLICIT");
    CHECK_EQ_STR(after ? after : "unset", orders[k].after ? orders[k].after : "unset");
    CHECK_EQ_INT(num_order_warnings, rank == 0 && orders[k].warns);
    CALL(w, fsdp_shutdown(w));
    __atomic_store_n(&room_gate, 1, __ATOMIC_SEQ_CST);
    if (orders[k].threads) CHECK_EQ_INT(pthread_join(beside, NULL), 0);
}
TEST_P(nccl, order_of_launches, orders) {
    h_ranks_proc(2, orders_launches, (void *)(uintptr_t)(row - orders));
}

/* Two ranks use one device: NCCL reports it, and every rank ends at once, also those that share no
   device. */
static void same_device(int rank, int world, void *arg) {
    job j;
    (void)arg;
    stub_set(STUB_DEVICES, 2);
    begin(&j, &variants[0], rank, world, 1);
    CHECK_STATUS(open_world(&j, "same_device", 20000), FSDP_ERR_BACKEND);
    CHECK_MSG(strstr(fsdp_last_error(NULL), "Duplicate GPU detected"), "%s", fsdp_last_error(NULL));
}
TEST(nccl, same_device) { h_ranks_proc(3, same_device, NULL); }

/* All kernels of the library are loaded before the first step: the first launch of a kernel that is
   not loaded would wait for the device. */
static const struct {
    const char *name, *variant;
} loaded[] = {{"f32", "f32"},         {"bf16_f32", "bf16_f32"},      {"bf16_bf16", "bf16_bf16"},
              {"packed", "packed"},   {"scaler", "scaler"},          {"clip", "clip"},
              {"offload", "offload"}, {"accumulates", "accumulates"}};
static void loads(int rank, int world, void *arg) {
    job j;
    start(&j, variant_of(loaded[(size_t)(uintptr_t)arg].variant), rank, world, 1);
    for (int step = 0; step < 2; step++) CALL(j.w, train_step(&j, step));
    CHECK(stub_count("load") > 80);
    CHECK_EQ_INT(stub_count("first launch"), 2); /* the caller's own kernels */
    finish(&j);
}
TEST_P(nccl, kernels_are_loaded, loaded) {
    h_ranks_proc(1, loads, (void *)(uintptr_t)(row - loaded));
}

/* A driver without large kernel parameters gives the same bits, in more launches. So do a device
   with a small limit for the pitch of 2-D copies, and one with few f64 units. */
static const struct {
    const char *name, *variant;
    int setting, value;
} limits[] = {{"driver_of_12.0/f32", "f32", STUB_DRIVER_VERSION, 12000},
              {"driver_of_12.0/clip", "clip", STUB_DRIVER_VERSION, 12000},
              {"pitch/f32", "f32", STUB_MAX_PITCH, 64},
              {"pitch/offload", "offload", STUB_MAX_PITCH, 64},
              {"slow_f64/clip", "clip", STUB_F64_RATIO, 64}};
static void limited(int rank, int world, void *arg) {
    size_t row = (size_t)(uintptr_t)arg;
    stub_set(limits[row].setting, limits[row].value);
    same_as_host(rank, world, (void *)(uintptr_t)variant_of(limits[row].variant));
}
TEST_P(nccl, limits, limits) { h_ranks_proc(2, limited, (void *)(uintptr_t)(row - limits)); }

/* More blocks than such a driver takes in one launch; rows further apart than a 2-D copy allows. */
static void many_runs(int rank, int world, void *arg) {
    enum { RUNS = 60, ROWS = 5, WIDTH = 3, APART = 40 };
    fsdp_block b[RUNS], rows = {0, 0, WIDTH, ROWS, APART, APART + 1};
    float *data = NULL, seen[256];
    double *sums = NULL;
    fsdp_op op;
    job j;
    (void)arg;
    stub_set(STUB_DRIVER_VERSION, 12000);
    stub_set(STUB_MAX_PITCH, APART);
    begin(&j, &variants[0], rank, world, 1);
    CALL(NULL, open_world(&j, "many_runs", 0));
    CHECK_EQ_INT(cudaMallocHost((void **)&data, 512 * sizeof *data), 0);
    CHECK_EQ_INT(cudaMallocHost((void **)&sums, 512 * sizeof *sums), 0);
    for (int i = 0; i < 512; i++) data[i] = (float)i;
    memset(&op, 0, sizeof op);
    op.kind = FSDP_OP_COPY, op.dtype = op.out_dtype = FSDP_F32, op.scale = 1;
    op.src_ptr = data, op.dst_ptr = data + 256, op.list = &rows, op.list_count = 1;
    CALL(j.w, j.w->device_ops->copy(j.w->device, NULL, &op));
    for (int y = 0; y < ROWS; y++)
        for (int x = 0; x < WIDTH; x++)
            CHECK_NEAR(data[256 + y * (APART + 1) + x], y * APART + x, 0);
    for (int i = 0; i < RUNS; i++) {
        const fsdp_block one = {2 * i, 2 * i, 1, 1, 1, 1};
        b[i] = one;
    }
    op.list = b, op.list_count = RUNS, op.scale = 2;
    CALL(j.w, j.w->device_ops->copy(j.w->device, NULL, &op));
    memcpy(seen, data + 256, sizeof seen);
    for (int i = 0; i < RUNS; i++) CHECK_NEAR(seen[2 * i], 4 * i, 0);
    CHECK_EQ_INT(fsdp_cuda_norm(NULL, sums, data, FSDP_F32, b, RUNS, 1, 0, 0, sums + 1), 0);
    CHECK_EQ_INT(cudaDeviceSynchronize(), 0);
    CHECK_NEAR(sums[0], 2 * RUNS * (RUNS - 1) / 2, 0);
    CHECK_EQ_INT(cudaFreeHost(data), 0);
    CHECK_EQ_INT(cudaFreeHost(sums), 0);
    CALL(j.w, fsdp_shutdown(j.w));
}
TEST(nccl, many_runs) { h_ranks_proc(1, many_runs, NULL); }

/* Norms are summed in pairs of f32 on devices with slow f64 only: there the last of these squares
   is lost. */
static void sums_in_pairs(int rank, int world, void *arg) {
    static const fsdp_block block = {0, 0, 3, 1, 0, 0};
    int ratio = (int)(uintptr_t)arg;
    float *data = NULL;
    double *sum = NULL;
    fsdp_op op;
    job j;
    stub_set(STUB_F64_RATIO, ratio);
    begin(&j, &variants[0], rank, world, 1);
    CALL(NULL, open_world(&j, "sums_in_pairs", 0));
    CHECK_EQ_INT(cudaMallocHost((void **)&data, 3 * sizeof *data), 0);
    CHECK_EQ_INT(cudaMallocHost((void **)&sum, sizeof *sum), 0);
    data[0] = 1, data[1] = 1.0f / 4096, data[2] = data[1] / 8192;
    memset(&op, 0, sizeof op);
    op.kind = FSDP_OP_NORM, op.dtype = FSDP_F32, op.norm_type = 2;
    op.src_ptr = data, op.dst_ptr = sum, op.list = &block, op.list_count = 1;
    CALL(j.w, j.w->device_ops->norm(j.w->device, NULL, &op));
    CHECK_EQ_INT(cudaDeviceSynchronize(), 0);
    double last = (double)data[2] * (double)data[2], others = 1 + (double)data[1] * (double)data[1];
    CHECK(*sum == (ratio > 8 ? others : others + last));
    CHECK_EQ_INT(cudaFreeHost(data), 0);
    CHECK_EQ_INT(cudaFreeHost(sum), 0);
    CALL(j.w, fsdp_shutdown(j.w));
}
TEST(nccl, norms_where_f64_is_slow) {
    static const int ratios[] = {1, 2, 8, 16, 32, 64};
    for (int i = 0; i < 6; i++) h_ranks_proc(1, sums_in_pairs, (void *)(uintptr_t)ratios[i]);
}

/* With CUDA_LAUNCH_BLOCKING a training works, and a call that waits for a peer inside NCCL ends at
   the deadline. */
static void blocking(int rank, int world, void *arg) {
    job j;
    (void)arg;
    setenv("CUDA_LAUNCH_BLOCKING", "1", 1);
    begin(&j, &variants[0], rank, world, 1);
    CALL(NULL, open_world(&j, "blocking", 1500));
    make_sums(&j);
    CALL(j.w, make_model(&j));
    for (int step = 0; step < 2; step++) CALL(j.w, train_step(&j, step));
    CALL(j.w, fsdp_barrier(j.w));
    int64_t start = h_now_ms(), calm = h_calm_ms();
    fsdp_status status = FSDP_OK;
    if (rank)
        while (!fsdpi_backend_poll(j.w)) usleep(5000); /* does not take part */
    else status = fsdp_pre_forward(j.m.unit[0]);
    if (!rank) CHECK_STATUS(status, FSDP_ERR_TIMEOUT);
    CHECK(h_now_ms() - start >= 1400 && h_calm_ms() - calm < 6000);
    CHECK_STATUS(fsdp_barrier(j.w), FSDP_ERR_TIMEOUT);
    CHECK_MSG(strstr(fsdp_last_error(j.w), "unset CUDA_LAUNCH_BLOCKING"), "%s",
              fsdp_last_error(j.w));
    calm = h_calm_ms();
    CHECK_STATUS(fsdp_shutdown(j.w), FSDP_ERR_TIMEOUT);
    CHECK(h_calm_ms() - calm < 6000);
}
TEST(nccl, launch_blocking) { h_ranks_proc(2, blocking, NULL); }

/* With managed memory the host reads and writes between calls. No copy, fill or wait is under way
   on its stream then, whatever the device does later. */
static void managed(int rank, int world, void *arg) {
    job j;
    (void)arg;
    setenv("FSDP_CUDA_MANAGED", "1", 1);
    begin(&j, variant_of("packed"), rank, world, 1);
    CALL(NULL, open_world(&j, "managed", 0));
    make_sums(&j);
    CALL(j.w, make_model(&j));
    for (int step = 0; step < 3; step++) {
        for (int u = 0; u < UNITS; u++) {
            CALL(j.w, fsdp_pre_forward(j.m.unit[u]));
            CHECK_EQ_INT(cudaStreamQuery(cudaStreamLegacy), 0);
            CALL(j.w, fsdp_post_forward(j.m.unit[u]));
        }
        for (int u = UNITS - 1; u >= 0; u--) {
            CALL(j.w, fsdp_pre_backward(j.m.unit[u]));
            CHECK_EQ_INT(cudaStreamQuery(cudaStreamLegacy), 0);
            CALL(j.w, fsdp_post_backward(j.m.unit[u]));
        }
        CALL(j.w, fsdp_finalize_backward(j.m.model));
        CHECK_EQ_INT(cudaStreamQuery(cudaStreamLegacy), 0);
        CALL(j.w, fsdp_adamw_step(j.adamw, 0.01));
        CHECK_EQ_INT(cudaStreamQuery(cudaStreamLegacy), 0);
        CALL(j.w, fsdp_zero_grad(j.m.model));
    }
    finish(&j);
}
TEST(nccl, managed_memory_is_ready) { h_ranks_proc(2, managed, NULL); }

/* Memory cannot be zeroed because the device does not finish its work: no call waits forever,
   nothing is freed that could wait, and getters return memory. */
static int gate; /* number of open gates */
static void wait_at_gate(const void *num, unsigned block_index) {
    long nap = 0;
    (void)block_index;
    while (__atomic_load_n(&gate, __ATOMIC_SEQ_CST) < *(const int *)num) h_nap(&nap);
}
static void never_filled(int rank, int world, void *arg) {
    int of_device = *(int *)arg, first = 1;
    fsdp_status status = FSDP_OK;
    void *ptr = NULL;
    job j;
    begin(&j, &variants[0], rank, world, 1);
    CALL(NULL, open_world(&j, "never_filled", 1000));
    make_sums(&j);
    cudaStream_t setup = fsdpi_cuda_of(j.w->device)->place.setup;
    if (of_device) CALL(j.w, make_one_unit(&j, 1, 0, 64, 0));
    else setup = fsdpi_nccl_world_of((fsdpi_nccl_comm *)(void *)j.w->comm)->place.setup;
    CALL(j.w, fsdp_barrier(j.w));
    CHECK_EQ_INT(fsdp_stub_launch(wait_at_gate, &first, sizeof first, 1, setup), 0);
    int64_t start = h_now_ms(), calm = h_calm_ms();
    if (of_device) status = fsdp_adamw_create(j.m.model, NULL, &j.adamw);
    else status = make_one_unit(&j, 1, 0, 64, 0);
    if (!of_device && !status) status = one_unit_step(&j, 1);
    CHECK_STATUS(status, FSDP_ERR_TIMEOUT);
    CHECK(h_now_ms() - start >= 900 && h_calm_ms() - calm < 3000);
    CHECK_STATUS(fsdp_barrier(j.w), FSDP_ERR_TIMEOUT); /* the world has failed */
    const char *text = fsdp_last_error(j.w);
    CHECK_MSG(strstr(text, "has not finished in time"), "%s", text);
    CHECK_OK(fsdpi_cuda_alloc(j.w->device, FSDP_MEMORY_DEVICE, 100, &ptr));
    CHECK(ptr && fsdp_data(j.m.unit[0], 0));
    calm = h_calm_ms();
    (void)fsdp_shutdown(j.w);
    CHECK(h_calm_ms() - calm < 3000);
    CHECK(stub_live(STUB_DEVICE_BYTES) > 0); /* not freed */
    __atomic_store_n(&gate, 1, __ATOMIC_SEQ_CST);
}
TEST(nccl, never_filled) {
    for (int of_device = 0; of_device < 2; of_device++) h_ranks_proc(2, never_filled, &of_device);
}

/* Querying an event that has not happened yet must not leave an error for a later CUDA call. */
static void leaves_no_error(int rank, int world, void *arg) {
    const int num = 1;
    void *event = NULL;
    job j;
    (void)arg;
    start(&j, &variants[0], rank, world, 1);
    const fsdp_device_ops *device = j.w->device_ops;
    CHECK_OK(device->event(j.w->device, &event));
    __atomic_store_n(&gate, 0, __ATOMIC_SEQ_CST);
    CHECK_EQ_INT(fsdp_stub_launch(wait_at_gate, &num, sizeof num, 1, j.stream), 0);
    CHECK_OK(device->record(j.w->device, (void *)j.stream, event));
    CHECK_STATUS(device->sync(j.w->device, event, 1000000), FSDP_ERR_TIMEOUT);
    CHECK_EQ_INT(cudaGetLastError(), cudaSuccess);
    __atomic_store_n(&gate, 1, __ATOMIC_SEQ_CST);
    CHECK_OK(device->sync(j.w->device, event, (int64_t)20000000000));
    device->destroy(j.w->device, NULL, event);
    finish(&j);
}
TEST(nccl, waiting_leaves_no_error) { h_ranks_proc(1, leaves_no_error, NULL); }

/* A single block without a cast is copied by CUDA: as bytes if its rows are contiguous on both
   sides, otherwise by rows. Nothing next to the rows is written. */
static void copies_rows(int rank, int world, void *arg) {
    static const int64_t cases[][3] = {/* height, src_pitch, dst_pitch; rows of 3 */
                                       {4, 3, 3}, {4, 5, 3}, {4, 3, 7}, {4, 5, 7},
                                       {4, 7, 5}, {1, 9, 2}, {2, 3, 8}};
    enum { ROW = 3, MOST = 64 };
    void *memory[2] = {NULL, NULL};
    job j;
    (void)arg;
    start(&j, &variants[0], rank, world, 1);
    for (int k = 0; k < 2; k++)
        CHECK_EQ_INT(cudaMallocHost(&memory[k], MOST * sizeof(float)), cudaSuccess);
    float *src = (float *)memory[0], *dst = (float *)memory[1];
    for (size_t c = 0; c < sizeof cases / sizeof *cases; c++) {
        fsdp_block b;
        fsdp_op op;
        memset(&b, 0, sizeof b);
        b.src = 2, b.dst = 1;
        b.width = ROW, b.height = cases[c][0], b.src_pitch = cases[c][1], b.dst_pitch = cases[c][2];
        for (int i = 0; i < MOST; i++) src[i] = (float)i, dst[i] = -1;
        memset(&op, 0, sizeof op);
        op.kind = FSDP_OP_COPY, op.scale = 1;
        op.dtype = op.out_dtype = FSDP_F32;
        op.list = &b, op.list_count = 1;
        op.src_ptr = src, op.dst_ptr = dst;
        CHECK_OK(fsdpi_cuda_copy(j.w->device, NULL, &op));
        for (int64_t row = 0; row < b.height; row++)
            for (int64_t i = 0; i < ROW; i++) {
                float *at = &dst[b.dst + row * b.dst_pitch + i];
                CHECK(*at == src[b.src + row * b.src_pitch + i]);
                *at = -1;
            }
        for (int i = 0; i < MOST; i++) CHECK(dst[i] == -1);
    }
    for (int k = 0; k < 2; k++) CHECK_EQ_INT(cudaFreeHost(memory[k]), cudaSuccess);
    finish(&j);
}
TEST(nccl, copies_rows) { h_ranks_proc(1, copies_rows, NULL); }

/* The caller is inside cudaFree, which waits for a collective that a peer does not join; meanwhile
   CUDA does not answer the watchdog. `alone`: no third rank exists that could name the missing one.
   */
static void inside_cuda(int rank, int world, void *arg) {
    int alone = *(int *)arg;
    void *mine = NULL;
    job j;
    begin(&j, &variants[0], rank, world, 1);
    CALL(NULL, open_world(&j, "inside_cuda", 700));
    make_sums(&j);
    CALL(j.w, make_one_unit(&j, 1, 0, 64, 0));
    CHECK_EQ_INT(cudaMalloc(&mine, 64), 0);
    stub_set(STUB_DRIVER, 1);
    CALL(j.w, fsdp_barrier(j.w));
    fsdp_status status = FSDP_OK;
    int64_t start = h_now_ms(), calm = h_calm_ms();
    if (rank == world - 1) { /* does not take part */
        while (!fsdpi_backend_poll(j.w) && h_calm_ms() - calm < 6000) usleep(5000);
    } else {
        status = fsdp_pre_forward(j.m.unit[0]);
        if (!status && (alone || rank == 0)) CHECK_EQ_INT(cudaFree(mine), 0);
        while (!status && !fsdpi_backend_poll(j.w) && h_calm_ms() - calm < 6000) usleep(5000);
    }
    int took = (int)(h_now_ms() - start), took_calm = (int)(h_calm_ms() - calm);
    W_CHECK(took >= 650 && took_calm < (alone ? 3000 : 2000), "it took %d ms", took);
    status = fsdp_barrier(j.w);
    CHECK_STATUS(status, FSDP_ERR_TIMEOUT);
    const char *text = fsdp_last_error(j.w);
    /* on a busy machine the third rank may come second */
    const int may_be_late = took - took_calm > 100 && strstr(text, "CUDA has not returned");
    CHECK_MSG(may_be_late || strstr(text, alone ? "CUDA has not returned" : "rank 2"), "%s", text);
    calm = h_calm_ms();
    CHECK_STATUS(fsdp_shutdown(j.w), FSDP_ERR_TIMEOUT);
    CHECK(h_calm_ms() - calm < 2000);
}
TEST(nccl, inside_cuda) {
    for (int alone = 0; alone < 2; alone++) h_ranks_proc(3 - alone, inside_cuda, &alone);
}

/* CUDA answers the watchdog after the deadline, because a thread was inside cudaFree. The operation
   after the one that it asked about has its own deadline. */
static void *frees(void *ptr) {
    CHECK_EQ_INT(cudaFree(ptr), 0);
    return NULL;
}
static void answers_late(int rank, int world, void *arg) {
    const fsdp_comm_ops *ops = fsdp_nccl_comm_ops();
    fsdp_coll c;
    pthread_t thread;
    void *mine = NULL;
    job j;
    (void)arg;
    begin(&j, &variants[0], rank, world, 1);
    CALL(NULL, open_world(&j, "answers_late", 1500));
    make_sums(&j);
    CHECK_EQ_INT(cudaMalloc(&mine, 64), 0);
    stub_set(STUB_DRIVER, 1);
    memset(&c, 0, sizeof c);
    c.kind = FSDP_OP_ALL_REDUCE, c.dtype = c.out_dtype = FSDP_F32, c.redop = FSDP_SUM;
    c.scale = 1, c.count = 1, c.what = "sum", c.stream = j.stream;
    CALL(j.w, ops->alloc(j.w->comm, 64, &c.dst));
    c.src = c.dst;
    CALL(j.w, fsdp_barrier(j.w));
    usleep(250000); /* the watchdog has seen the barrier's end */
    for (int num = 1; num <= 2; num++) {
        CHECK_EQ_INT(fsdp_stub_launch(wait_at_gate, &num, sizeof num, 1, j.stream), 0);
        CALL(j.w, ops->run(j.w->comm, &c));
        if (num == 1) CHECK_EQ_INT(pthread_create(&thread, NULL, frees, mine), 0);
        usleep(100000); /* the thread is inside cudaFree now */
    }
    usleep(1700000);
    for (int num = 1; num <= 2; num++) {
        __atomic_store_n(&gate, num, __ATOMIC_SEQ_CST);
        usleep(300000);
        CHECK_OK(fsdpi_backend_poll(j.w));
    }
    CHECK_EQ_INT(pthread_join(thread, NULL), 0);
    ops->free(j.w->comm, c.dst, 64);
    finish(&j);
}
TEST(nccl, answers_late) { h_ranks_proc(2, answers_late, NULL); }

/* A captured graph contains the address of a norm's partial sums: larger ones are allocated in
   addition. */
TEST(nccl, partials_stay) {
    struct cudaPointerAttributes at;
    job j;
    start(&j, &variants[0], 0, 1, 1);
    fsdpi_cuda_device *d = fsdpi_cuda_of(j.w->device);
    for (size_t num = 1; num < 1000000; num = 3 * num + 1) {
        CHECK_OK(fsdpi_cuda_make_partials(d, num));
        CHECK(d->num_partials >= num);
    }
    CHECK(d->num_arrays > 8);
    for (int i = 0; i < d->num_arrays; i++) {
        CHECK_EQ_INT(cudaPointerGetAttributes(&at, d->partials[i]), 0);
        CHECK_EQ_INT(at.type, cudaMemoryTypeDevice);
    }
    finish(&j);
}

/* Out of memory: the text has the requested and the available size, and the world fails on all
   ranks. */
static void out_of_memory(int rank, int world, void *arg) {
    job j;
    (void)arg;
    stub_set(STUB_TOTAL_MIB, 4);
    begin(&j, &variants[0], rank, world, 1);
    fsdp_status status = open_world(&j, "memory", 0); /* a peer may have failed already */
    make_sums(&j);
    if (!status) status = make_one_unit(&j, 1, 0, 1 << 16, 0); /* 16 MiB, shards of 8 or 16 */
    if (!status) status = one_unit_step(&j, 1);
    const char *text = fsdp_last_error(j.w);
    CHECK_STATUS(status, FSDP_ERR_OUT_OF_MEMORY);
    CHECK_MSG(strstr(text, "MiB left") && strstr(text, "of 4.0 MiB"), "%s", text);
    (void)fsdp_shutdown(j.w);
    CHECK_EQ_INT(cudaFree(j.sums), 0);
    check_nothing_live();
    CHECK_EQ_INT(j.heap.live, 0);
}
TEST(nccl, out_of_memory) {
    for (int world = 1; world <= 2; world++) h_ranks_proc(world, out_of_memory, NULL);
}

/* ---- failures of calls ----------------------------------------------------------------------- */

/* Every function that the library calls. CLEANUP, PERIODIC: the library continues without it, and
   the world may live. ABANDONS: the other ranks are inside NCCL then; that thread is abandoned,
   with its communicator. If a rank fails before it has reached the store, the others notice only at
   the deadline. */
enum { FAULT_MS = 1500, CLEANUP = 1, PERIODIC = 2, ABANDONS = 4 };
static const struct {
    const char *name;
    int nccl, may;
} calls[] = {{"cudaGetDeviceCount", 0, 0},
             {"cudaSetDevice", 0, PERIODIC}, /* also in threads that call NCCL */
             {"cudaThreadExchangeStreamCaptureMode", 0, CLEANUP},
             {"cudaDeviceGetStreamPriorityRange", 0, 0},
             {"cudaDeviceGetAttribute", 0, 0},
             {"load", 0, 0},
             {"cudaStreamCreateWithFlags", 0, 0},
             {"cudaStreamCreateWithPriority", 0, 0},
             {"cudaEventCreateWithFlags", 0, 0},
             {"cudaMalloc", 0, 0},
             {"cudaMallocHost", 0, 0},
             {"cudaMemsetAsync", 0, 0},
             {"cudaMemcpyAsync", 0, 0},
             {"cudaMemcpy2DAsync", 0, 0},
             {"launch", 0, PERIODIC}, /* also the caller's kernels */
             {"cudaEventRecord", 0, 0},
             {"cudaStreamWaitEvent", 0, 0},
             {"cudaStreamIsCapturing", 0, 0},
             {"cudaStreamSynchronize", 0, 0},
             {"cudaEventQuery", 0, PERIODIC},
             {"cudaStreamDestroy", 0, CLEANUP},
             {"cudaEventDestroy", 0, CLEANUP},
             {"cudaFree", 0, CLEANUP},
             {"cudaFreeHost", 0, CLEANUP},
             {"ncclGetVersion", 1, 0},
             {"ncclGetUniqueId", 1, 0},
             {"ncclCommInitRankConfig", 1, ABANDONS},
             {"ncclCommSplit", 1, ABANDONS},
             {"ncclGroupStart", 1, 0},
             {"ncclGroupEnd", 1, 0},
             {"ncclAllGather", 1, 0},
             {"ncclReduceScatter", 1, 0},
             {"ncclAllReduce", 1, 0},
             {"ncclMemAlloc", 1, PERIODIC},
             {"ncclCommRegister", 1, 0},
             {"ncclCommDeregister", 1, CLEANUP},
             {"ncclMemFree", 1, CLEANUP},
             {"ncclCommGetAsyncError", 1, PERIODIC},
             {"ncclCommFinalize", 1, CLEANUP | ABANDONS},
             {"ncclCommDestroy", 1, CLEANUP}};
enum { CALLS = (int)(sizeof calls / sizeof calls[0]), FAULTS = 4096 };

typedef struct {
    int call, nth, code, rank;   /* call, occurrence, error code, rank */
    int opened[2], took[2];      /* fsdp_init has succeeded; time of everything, in ms */
    int left[2][STUB_KINDS + 1]; /* objects that were not there before; host memory */
    int injected;
    fsdp_status status[2];
    char text[1024]; /* error text of the rank where it failed */
} fault;
typedef struct {
    int counts[2][CALLS];
    int num, begun[2]; /* cases that each rank has begun: they begin together */
    fault list[FAULTS];
} fault_board;
static fault_board *board;

/* Makes a world and a model, runs two steps, makes a larger model, and closes all. Returns the
   first failure. */
static fsdp_status life(job *j, const char *name, char text[1024], int *opened) {
    fsdp_status status = open_world(j, name, FAULT_MS);
    *opened = j->w != NULL;
    if (!status) status = make_model(j);
    for (int step = 0; step < 2 && !status; step++) status = train_step(j, step);
    fsdp_model_destroy(status ? NULL : j->m.model);
    if (!status) status = make_one_unit(j, 1, 1, 16384, 0);
    if (!status) status = one_unit_step(j, 2);
    if (!status) status = fsdp_barrier(j->w);
    snprintf(text, 1024, "%s", fsdp_last_error(j->w));
    fsdp_status end = fsdp_shutdown(j->w);
    return status ? status : end;
}

static void one_life(job *j, int rank, int world, const fault *f, int number, char *text,
                     int *opened, fsdp_status *status) {
    char name[32];
    begin(j, variant_of("clip"), rank, world, 1);
    setenv("FSDP_NCCL_REGISTER", "1", 1);
    j->faulty = 1;
    make_sums(j);
    snprintf(name, sizeof name, "fault%d", number);
    snprintf(w_case, sizeof w_case, "%s, call %d, code %d, on rank %d; rank %d of %d",
             f ? calls[f->call].name : "no failure", f ? f->nth : 0, f ? f->code : 0,
             f ? f->rank : 0, rank, world);
    stub_count_reset();
    if (f && f->rank == rank) stub_fail(calls[f->call].name, f->nth, f->code);
    *status = life(j, name, text, opened);
}

static void count_calls(int rank, int world, void *arg) {
    job j;
    char text[1024];
    int opened;
    fsdp_status status;
    (void)arg;
    one_life(&j, rank, world, NULL, 0, text, &opened, &status);
    W_CHECK(status == FSDP_OK, "%s", text);
    for (int i = 0; i < CALLS; i++) board->counts[rank][i] = (int)stub_count(calls[i].name);
    CHECK_EQ_INT(cudaFree(j.sums), 0);
    check_nothing_live();
}

static void begin_together(int rank, int world, int number) {
    long nap = 0;
    __atomic_store_n(&board->begun[rank], number, __ATOMIC_SEQ_CST);
    while (world > 1 && __atomic_load_n(&board->begun[1 - rank], __ATOMIC_SEQ_CST) < number)
        h_nap(&nap);
}

static void fail_all(int rank, int world, void *arg) {
    (void)arg;
    for (int i = 0; i < board->num; i++) {
        begin_together(rank, world, i + 1);
        fault *f = &board->list[i];
        job j;
        char text[1024];
        fsdp_status status;
        int64_t live[STUB_KINDS];
        int failed = stub_failed();
        int64_t start = h_calm_ms();
        for (int k = 0; k < STUB_KINDS; k++) live[k] = stub_live(k);
        one_life(&j, rank, world, f, i + 1, text, &f->opened[rank], &status);
        f->status[rank] = status;
        f->took[rank] = (int)(h_calm_ms() - start);
        if (f->rank == rank) {
            f->injected = stub_failed() > failed;
            memcpy(f->text, text, sizeof text);
        }
        stub_fail_clear();
        CHECK_EQ_INT(cudaFree(j.sums), 0);
        for (int n = 0; n < 100 && stub_live(STUB_COMMS) > live[STUB_COMMS]; n++)
            usleep(10000); /* an abandoned thread frees what it has got */
        for (int k = 0; k < STUB_KINDS; k++) f->left[rank][k] = (int)(stub_live(k) - live[k]);
        f->left[rank][STUB_KINDS] = (int)j.heap.live;
    }
}

/* Returns what is wrong with a case, or NULL. */
static const char *wrong_with(const fault *f, int world) {
    fsdp_status mine = f->status[f->rank], other = world > 1 ? f->status[1 - f->rank] : mine;
    int may = (calls[f->call].may & (CLEANUP | PERIODIC)) || !f->injected;
    /* A failure to create an optimizer does not fail the world; its peers find this rank gone. A
       failure in a shutdown (it has no text) meets peers that shut down as well. */
    int alone = strstr(f->text, "adamw_create") || (mine && !f->text[0]);
    int abandons = alone || (calls[f->call].may & ABANDONS) ? 2 : 0;
    int limit = FAULT_MS + 2000 + (calls[f->call].may == (CLEANUP | ABANDONS) ? 10000 : 0);
    for (int r = 0; r < world; r++) {
        if (f->took[r] > limit) return "it took too long";
        for (int k = 0; k <= STUB_KINDS; k++)
            if (f->left[r][k] > (k == STUB_COMMS || k == STUB_KINDS ? abandons : 0))
                return "something is left";
    }
    if (!mine && !may) return "no failure";
    if (mine && !may && f->text[0] && !strstr(f->text, "CUDA error") &&
        !strstr(f->text, "NCCL error") && !strstr(f->text, "MiB left") &&
        !strstr(f->text, "no CUDA device"))
        return "the text does not name the failure";
    if (may || alone) return NULL;
    if (f->opened[f->rank] ? mine != other : !other) return "the other rank ended otherwise";
    return NULL;
}

static int check_fault(const fault *f, int world) {
    const char *wrong = wrong_with(f, world);
    if (!wrong) return 0;
    fprintf(stderr, "%s: W=%d %s, call %d of rank %d, code %d: %s\n", wrong, world,
            calls[f->call].name, f->nth, f->rank, f->code, f->text);
    for (int r = 0; r < world; r++) {
        fprintf(stderr, "    rank %d: %s, %s, %d ms; left:", r, fsdp_status_name(f->status[r]),
                f->opened[r] ? "opened" : "not opened", f->took[r]);
        for (int k = 0; k <= STUB_KINDS; k++) fprintf(stderr, " %d", f->left[r][k]);
        fprintf(stderr, "\n");
    }
    return 1;
}

static void plan_fault(int call, int nth, int rank, const int *code) {
    fault *f = &board->list[board->num++];
    memset(f, 0, sizeof *f);
    f->call = call, f->nth = nth, f->rank = rank, f->code = code[calls[call].nccl];
}

/* With most == 2: the first and a middle occurrence, on one rank, in turn. Otherwise on each rank,
   and a sample of frequent calls. */
static void plan_faults(int world, int most, const int *code) {
    for (int i = 0; i < CALLS; i++)
        for (int rank = 0; rank < world; rank++) {
            int count = board->counts[rank][i], step = (count + most - 1) / most;
            if (most == 2 && calls[i].may == (CLEANUP | ABANDONS)) continue; /* takes 10 s */
            if (most == 2 && count && world == 2 && rank != i % 2 && board->counts[1 - rank][i])
                continue;
            for (int nth = 1; nth <= count && board->num < FAULTS; nth += step)
                plan_fault(i, nth, rank, code);
        }
}

static const struct {
    const char *name;
    int world, code[2]; /* error codes of CUDA and NCCL */
} codes[] = {
    {"W=1,out_of_memory", 1, {2, 2}}, {"W=1,sticky", 1, {700, 3}}, {"W=2,sticky", 2, {700, 3}}};
static const struct {
    const char *name;
    int world, code[2];
    /* on NCCL's errors 2 and 3 the library waits for a cause */
} quick_codes[] = {{"W=1", 1, {700, 3}}, {"W=2", 2, {2, 5}}};

static void make_board(void) {
    board = (fault_board *)mmap(NULL, sizeof *board, PROT_READ | PROT_WRITE,
                                MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    CHECK(board != (fault_board *)MAP_FAILED);
}

static void run_faults(int world, const int *code, int most) {
    make_board();
    h_ranks_proc(world, count_calls, NULL);
    plan_faults(world, most, code);
    h_ranks_proc(world, fail_all, NULL);
    int bad = 0;
    for (int i = 0; i < board->num; i++) bad += check_fault(&board->list[i], world);
    CHECK_MSG(bad == 0, "%d of %d failures went wrong", bad, board->num);
    h_message("%d failures", board->num);
}
TEST_P(nccl, faults, quick_codes, AT_NIGHT(STUB_ASAN)) { run_faults(row->world, row->code, 2); }
TEST_P(long_nccl, faults, codes, SECONDS(900) | NO(STUB_ASAN) | AT_NIGHT(STUB)) {
    run_faults(row->world, row->code, 3);
}
