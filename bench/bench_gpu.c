/* bench_gpu.c - the library's cost on a GPU: its kernels compared with cudaMemcpyAsync, hooks with
   the calls of the CUDA runtime that they make, memory with the prediction, and collectives

       make gpu-bench                                 all of it, and the trainer's overhead
       build/nccl/bench/bench_gpu [--small]           on one rank; --small: sizes for a trial
       tools/fsdprun -n 2 tools/one_gpu.sh build/nccl/bench/bench_gpu      the collectives

   Shapes are those of a layer of Llama 3 8B on 8 ranks. A kernel's rate counts what it has to read
   and write, as does that of the cudaMemcpyAsync of as many bytes, measured in turn with it.
   Goals: 85 % of memcpy, 90 % for AdamW and where gradients are added; 5 us for each hook beyond the
   calls of the runtime; memory as predicted.
   Appends to $FSDP_BUILD/bench_gpu.csv: each line has date, device and command.

   SPDX-License-Identifier: MIT */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE 1 /* the POSIX calls under -std=c99 too */
#endif
#include "bench/bench.h"
#ifndef FSDP_BACKEND_NCCL
#define FSDP_BACKEND_NCCL
#endif
#define FSDP_IMPLEMENTATION
#include "fsdp.h"
#include "fsdp_optim.h"
#include "backends/fsdp_cuda_kernels.h"

enum { PARAMS = 9, RANKS = 8, CALLS = 10 /* in one sample */, UNITS = 8, HOOK_STEPS = 30 };
enum { RUNS = 98 }; /* AdamW's, for a GPT of 12 layers: matrices decay, vectors do not */
static const int64_t SHAPES[PARAMS][2] = {{4096, 4096},  {1024, 4096},  {1024, 4096},
                                          {4096, 4096},  {14336, 4096}, {14336, 4096},
                                          {4096, 14336}, {4096, 1},     {4096, 1}};

static int is_small;
static const char *command;

/* ---- results --------------------------------------------------------------------------------- */

static FILE *open_csv(void) {
    const char *dir = getenv("FSDP_BUILD");
    char path[512];
    snprintf(path, sizeof path, "%s/bench_gpu.csv", dir && *dir ? dir : ".");
    FILE *csv = fopen(path, "a");
    if (!csv) {
        perror(path);
        exit(1);
    }
    if (ftell(csv) == 0) fputs("date,device,command,what,value,unit,beside,ratio,goal\n", csv);
    return csv;
}

/* Prints one line, with the ratio of value and `beside`, which is NAN if there is no comparison. */
static void result(const char *what, double value, const char *unit, double beside,
                   const char *goal) {
    static FILE *csv;
    char day[32], device[128] = "unknown";
    time_t now = time(NULL);
    struct tm at;
    int ordinal = 0, major = 0, minor = 0, count = 0;
    if (!csv) csv = open_csv();
    localtime_r(&now, &at);
    strftime(day, sizeof day, "%Y-%m-%d", &at);
    (void)cudaGetDevice(&ordinal);
    (void)cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, ordinal);
    (void)cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, ordinal);
    (void)cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, ordinal);
    const char *name = getenv("GPU_NAME"); /* from nvidia-smi, by gpu_bench.sh */
    snprintf(device, sizeof device, "%s (sm_%d%d; %d SMs)", name && *name ? name : "CUDA device",
             major, minor, count);
    printf("%-36s %12.3f %-8s beside %12.3f  ratio %6.3f  %s\n", what, value, unit, beside,
           value / beside, goal);
    fprintf(csv, "%s,%s,%s,%s,%.4f,%s,%.4f,%.4f,%s\n", day, device, command, what, value, unit,
            beside, value / beside, goal);
    fflush(csv);
}

static void check(int result, const char *what) {
    if (!result) return;
    fprintf(stderr, "bench_gpu: %s: %s\n", what, cudaGetErrorString((cudaError_t)result));
    exit(1);
}

static void must(fsdp_status status, fsdp_world *world) {
    if (!status) return;
    fprintf(stderr, "bench_gpu: %s\n", fsdp_last_error(world));
    exit(1);
}

/* ---- kernels --------------------------------------------------------------------------------- */

typedef struct kernels {
    int64_t chunk[PARAMS], shard, full; /* elements: of a rank, of all ranks */
    char *a, *b;                        /* as large as `full` in f32 */
    double *norm, *partials;
    fsdp_block blocks[PARAMS];
    int out_dtype, dtype, accumulate;
    double scale;
    size_t moved; /* bytes read and written in one call */
    fsdp_update updates[RUNS];
    uint32_t num_updates;
} kernels;

static void *device_memory(size_t size) {
    void *ptr = NULL;
    check((int)cudaMalloc(&ptr, size), "cudaMalloc");
    check((int)cudaMemset(ptr, 0, size), "cudaMemset");
    return ptr;
}

static int call_copy(kernels *k) {
    return fsdp_cuda_copy(NULL, k->b, k->out_dtype, k->a, k->dtype, k->blocks, PARAMS, k->scale,
                          k->accumulate);
}
static int call_norm(kernels *k) {
    return fsdp_cuda_norm(NULL, k->norm, k->a, k->dtype, k->blocks, PARAMS, 2, 0, 0, k->partials);
}
static int call_norm_in_pairs(kernels *k) {
    return fsdp_cuda_norm(NULL, k->norm, k->a, k->dtype, k->blocks, PARAMS, 2, 0, 1, k->partials);
}
static int call_update(kernels *k) { return fsdp_cuda_update(NULL, k->updates, k->num_updates); }
static int call_memcpy(kernels *k) {
    return (int)cudaMemcpyAsync(k->b, k->a, k->moved / 2, cudaMemcpyDeviceToDevice, NULL);
}

typedef struct {
    int (*call)(kernels *k);
    kernels *k;
} timed;

static double seconds_of(void *arg) {
    timed *t = (timed *)arg;
    int64_t begin = bench_now_ns();
    for (int i = 0; i < CALLS; i++) check(t->call(t->k), "a launch");
    check((int)cudaDeviceSynchronize(), "cudaDeviceSynchronize");
    return (double)(bench_now_ns() - begin) * 1e-9 / CALLS;
}

static void compare(const char *what, kernels *k, int (*call)(kernels *), const char *goal) {
    timed ours = {call, k}, theirs = {call_memcpy, k};
    double rate[2], gigabytes = (double)k->moved * 1e-9, budget = is_small ? 0 : 0.5;
    int most = is_small ? 1 : 50;
    rate[0] = gigabytes / bench_run(seconds_of, &ours, 3, budget, most).median;
    rate[1] = gigabytes / bench_run(seconds_of, &theirs, 3, budget, most).median;
    result(what, rate[0], "GB/s", rate[1], goal);
}

/* Shards of all parameters, one after the other, to the same order; what was gathered, rank by
   rank, to each parameter whole; and the reverse. */
enum { SHARDS, TO_PARAMS, TO_RANKS };

static void set_copy(kernels *k, int shape, int out_dtype, int dtype, double scale, int add) {
    int64_t shard = 0, full = 0, elements = shape == SHARDS ? k->shard : k->full;
    for (int i = 0; i < PARAMS; i++) {
        int64_t n = k->chunk[i], height = shape == SHARDS ? 1 : RANKS;
        fsdp_block b = {shard, shape == SHARDS ? shard : full, n, height, k->shard, n};
        if (shape == TO_RANKS) b.src = full, b.dst = shard, b.src_pitch = n, b.dst_pitch = k->shard;
        k->blocks[i] = b;
        shard += n;
        full += n * RANKS;
    }
    k->out_dtype = out_dtype, k->dtype = dtype, k->scale = scale, k->accumulate = add;
    k->moved = (size_t)elements *
               (fsdp_dtype_size(dtype) + fsdp_dtype_size(out_dtype) * (add ? 2 : 1));
}

/* Sets AdamW of the shards, in `runs` parts. */
static void set_updates(kernels *k, int runs) {
    static const double scalars[8] = {1 - 1e-5, 0.1, 0.95, 0.05, 0.3, 1e-8, -1e-3, 0};
    int64_t count = k->shard / runs / 64 * 64; /* each begins at a multiple of 256 bytes */
    for (int i = 0; i < runs; i++) {
        fsdp_update *u = &k->updates[i];
        memset(u, 0, sizeof *u);
        u->kind = FSDP_UPDATE_ADAMW;
        u->dtype = u->grad_dtype = FSDP_F32;
        u->count = count;
        u->param = k->b + i * count * 4, u->grad = k->a + i * count * 4;
        u->first = k->b + (k->shard + i * count) * 4;
        u->second = k->b + (2 * k->shard + i * count) * 4;
        memcpy(u->scalars, scalars, sizeof scalars);
        if (i % 2) u->scalars[0] = 1;
    }
    k->num_updates = (uint32_t)runs;
    k->moved = (size_t)(count * runs) * 28;
}

static void bench_kernels(void) {
    kernels k;
    memset(&k, 0, sizeof k);
    for (int i = 0; i < PARAMS; i++) {
        int64_t rows = SHAPES[i][0] / (is_small ? 64 : 1), cols = SHAPES[i][1];
        if (is_small && cols > 1) cols /= 64;
        k.chunk[i] = rows / RANKS * cols;
        k.shard += k.chunk[i];
    }
    k.full = k.shard * RANKS;
    k.a = (char *)device_memory((size_t)k.full * sizeof(float));
    k.b = (char *)device_memory((size_t)k.full * sizeof(float));
    k.norm = (double *)device_memory(sizeof(double));

    set_copy(&k, SHARDS, FSDP_BF16, FSDP_F32, 1, 0);
    compare("copy_in f32 -> bf16", &k, call_copy, "0.85");
    set_copy(&k, TO_PARAMS, FSDP_BF16, FSDP_BF16, 1, 0);
    compare("copy_out bf16", &k, call_copy, "0.85");
    set_copy(&k, TO_RANKS, FSDP_BF16, FSDP_BF16, 1, 0);
    compare("chunk_cat bf16", &k, call_copy, "0.85");
    set_copy(&k, TO_RANKS, FSDP_F32, FSDP_BF16, 0.125, 0);
    compare("chunk_cat bf16 -> f32 scaled", &k, call_copy, "0.85");
    set_copy(&k, SHARDS, FSDP_F32, FSDP_BF16, 0.125, 1);
    compare("red_out bf16 -> f32 added", &k, call_copy, "0.90");
    set_copy(&k, SHARDS, FSDP_F32, FSDP_F32, 0.125, 0);
    compare("red_out f32", &k, call_copy, "0.85");

    set_copy(&k, SHARDS, FSDP_F32, FSDP_F32, 1, 0);
    k.moved = (size_t)k.shard * sizeof(float);
    size_t partials = fsdp_cuda_norm_partials(k.blocks, PARAMS);
    k.partials = (double *)device_memory((partials ? partials : 1) * sizeof(double));
    compare("norm f32", &k, call_norm, "0.85");
    compare("norm f32 in pairs", &k, call_norm_in_pairs, "0.85");
    set_copy(&k, SHARDS, FSDP_BF16, FSDP_BF16, 1, 0);
    k.moved = (size_t)k.shard * 2;
    compare("norm bf16", &k, call_norm, "0.85");
    compare("norm bf16 in pairs", &k, call_norm_in_pairs, "0.85");

    set_updates(&k, 1);
    compare("AdamW f32", &k, call_update, "0.90");
    set_updates(&k, RUNS);
    compare("AdamW f32 of 98 runs", &k, call_update, "0.90");

    check((int)cudaFree(k.a) | (int)cudaFree(k.b), "cudaFree");
    check((int)cudaFree(k.norm) | (int)cudaFree(k.partials), "cudaFree");
}

/* ---- hooks: a device table that adds up the time of the runtime's calls ---------------------- */

static struct {
    const fsdp_device_ops *ops;
    int64_t ns, calls;
} inside;

#define INSIDE(call)                                                                               \
    int64_t begin = bench_now_ns();                                                                \
    fsdp_status status = inside.ops->call;                                                         \
    inside.ns += bench_now_ns() - begin;                                                           \
    inside.calls++;                                                                                \
    return status

static fsdp_status timed_record(fsdp_device *d, void *stream, void *event) {
    INSIDE(record(d, stream, event));
}
static fsdp_status timed_wait(fsdp_device *d, void *stream, void *event) {
    INSIDE(wait(d, stream, event));
}
static fsdp_status timed_copy(fsdp_device *d, void *stream, const fsdp_op *op) {
    INSIDE(copy(d, stream, op));
}
static fsdp_status timed_zero(fsdp_device *d, void *stream, const fsdp_op *op) {
    INSIDE(zero(d, stream, op));
}

typedef struct {
    fsdp_world *world;
    fsdp_model *model;
    fsdp_unit *units[UNITS];
} trainer;

/* Units of these matrices and of a vector. */
static void open_trainer(trainer *t, const fsdp_device_ops *ops, int units, int matrices,
                         int64_t width, fsdp_dtype dtype, int64_t direct_min) {
    fsdp_world_desc desc = FSDP_ZERO;
    fsdp_model_desc model = FSDP_ZERO;
    fsdp_param_desc params[12];
    fsdp_unit_desc unit = FSDP_ZERO;
    memset(t, 0, sizeof *t);
    desc.backend = "nccl";
    desc.device_ops = ops;
    must(fsdp_init(&desc, &t->world), NULL);
    model.param_dtype = dtype;
    model.direct_min = direct_min;
    must(fsdp_model_create(t->world, &model, &t->model), t->world);
    for (int i = 0; i < matrices; i++) params[i] = fsdp_mat(NULL, width, width);
    params[matrices] = fsdp_vec("b", width);
    unit.params = params;
    unit.num_params = matrices + 1;
    for (int i = 0; i < units; i++) must(fsdp_fully_shard(t->model, &unit, &t->units[i]), t->world);
}

static void step(trainer *t, int units) {
    for (int i = 0; i < units; i++) {
        (void)fsdp_pre_forward(t->units[i]);
        (void)fsdp_post_forward(t->units[i]);
    }
    for (int i = units; i-- > 0;) {
        (void)fsdp_pre_backward(t->units[i]);
        (void)fsdp_post_backward(t->units[i]);
    }
}

static void end_step(trainer *t) {
    must(fsdp_finalize_backward(t->model), t->world);
    must(fsdp_params_changed(t->model), t->world);
    must(fsdp_zero_grad(t->model), t->world);
    check((int)cudaDeviceSynchronize(), "cudaDeviceSynchronize");
}

static void bench_hooks(void) {
    fsdp_device_ops ops = *(inside.ops = fsdp_cuda_device_ops());
    trainer t;
    int64_t total = 0, hooks = 0;
    ops.record = timed_record, ops.wait = timed_wait;
    ops.copy = timed_copy, ops.zero = timed_zero;
    open_trainer(&t, &ops, UNITS, 11, 256, FSDP_BF16, 0);
    for (int i = 0; i < HOOK_STEPS + 3; i++) {
        if (i == 3) total = hooks = inside.ns = inside.calls = 0; /* it is warm now */
        int64_t begin = bench_now_ns();
        step(&t, UNITS);
        total += bench_now_ns() - begin;
        hooks += 4 * UNITS;
        end_step(&t);
    }
    result("host time of a hook without launches",
           (double)(total - inside.ns) * 1e-3 / (double)hooks, "us", 5.0, "1.00");
    result("host time of a hook", (double)total * 1e-3 / (double)hooks, "us",
           (double)inside.ns * 1e-3 / (double)hooks, "");
    must(fsdp_shutdown(t.world), NULL);
}

/* ---- memory ---------------------------------------------------------------------------------- */

static void bench_memory(void) {
    trainer t;
    size_t before, after, all;
    fsdp_memory memory;
    int64_t width = is_small ? 512 : 4096;
    open_trainer(&t, NULL, 4, 4, width, FSDP_BF16, 0);
    must(fsdp_model_predict(t.model, &memory), t.world);
    check((int)cudaMemGetInfo(&before, &all), "cudaMemGetInfo");
    for (int i = 0; i < 3; i++) {
        step(&t, 4);
        end_step(&t);
    }
    check((int)cudaMemGetInfo(&after, &all), "cudaMemGetInfo");
    result("memory taken beside predicted", (double)(before - after), "bytes",
           (double)memory.total_bytes, "1.00");
    must(fsdp_model_memory(t.model, &memory), t.world);
    result("memory taken beside allocated", (double)(before - after), "bytes",
           (double)memory.total_bytes, "1.00");
    must(fsdp_shutdown(t.world), NULL);
}

/* ---- collectives: as the caller of hooks sees them ------------------------------------------- */

static double gather_seconds(void *arg) {
    trainer *t = (trainer *)arg;
    int64_t begin = bench_now_ns();
    (void)fsdp_pre_forward(t->units[0]);
    (void)fsdp_post_forward(t->units[0]);
    check((int)cudaDeviceSynchronize(), "cudaDeviceSynchronize");
    return (double)(bench_now_ns() - begin) * 1e-9;
}

static double reduce_seconds(void *arg) {
    trainer *t = (trainer *)arg;
    (void)fsdp_pre_forward(t->units[0]);
    (void)fsdp_post_forward(t->units[0]);
    (void)fsdp_pre_backward(t->units[0]);
    check((int)cudaDeviceSynchronize(), "cudaDeviceSynchronize");
    int64_t begin = bench_now_ns();
    (void)fsdp_post_backward(t->units[0]);
    must(fsdp_finalize_backward(t->model), t->world);
    check((int)cudaDeviceSynchronize(), "cudaDeviceSynchronize");
    double seconds = (double)(bench_now_ns() - begin) * 1e-9;
    must(fsdp_zero_grad(t->model), t->world);
    return seconds;
}

/* Compares four matrices that arrive in place, by one operation each, with the same four packed:
   one operation and a copy out. direct_min should be the size from which the first way is faster. */
static void bench_direct(int64_t width) {
    double us[2][2]; /* gather, reduce; in place, packed */
    char what[64];
    int is_first = 0, ranks = 0;
    for (int packed = 0; packed < 2; packed++) {
        trainer t;
        open_trainer(&t, NULL, 1, 4, width, FSDP_DTYPE_KEEP, packed ? FSDP_DIRECT_NEVER : 1);
        ranks = fsdp_world_size(t.world), is_first = fsdp_rank(t.world) == 0;
        us[0][packed] = bench_run(gather_seconds, &t, 3, 0, 5).median * 1e6;
        us[1][packed] = bench_run(reduce_seconds, &t, 3, 0, 5).median * 1e6;
        must(fsdp_shutdown(t.world), NULL);
    }
    for (int k = 0; k < 2 && is_first; k++) {
        snprintf(what, sizeof what, "%s W=%d 4 x %lld KiB in place", k ? "reduce" : "gather", ranks,
                 (long long)(width * width * 4 / 1024));
        result(what, us[k][0], "us", us[k][1], "");
    }
}

/* As many samples on all ranks. */
static void bench_collectives(void) {
    static const int64_t widths[] = {128, 512, 2048, 4096};
    for (size_t i = 0; i < (is_small ? 2 : sizeof widths / sizeof *widths); i++) {
        trainer t;
        char what[64];
        double bytes = (double)(widths[i] * (widths[i] + 1)) * 4;
        open_trainer(&t, NULL, 1, 1, widths[i], FSDP_DTYPE_KEEP, 0);
        int ranks = fsdp_world_size(t.world), is_first = fsdp_rank(t.world) == 0;
        double gather = bench_run(gather_seconds, &t, 3, 0, 5).median;
        double reduce = bench_run(reduce_seconds, &t, 3, 0, 5).median;
        snprintf(what, sizeof what, "gather W=%d %.0f KiB", ranks, bytes / 1024);
        if (is_first) result(what, bytes * 1e-9 / gather, "GB/s", gather * 1e6, "");
        snprintf(what, sizeof what, "reduce W=%d %.0f KiB", ranks, bytes / 1024);
        if (is_first) result(what, bytes * 1e-9 / reduce, "GB/s", reduce * 1e6, "");
        must(fsdp_shutdown(t.world), NULL);
        bench_direct(widths[i]);
    }
}

int main(int argc, char **argv) {
    const char *ranks = getenv("WORLD_SIZE");
    static char text[512];
    is_small = argc > 1 && !strcmp(argv[1], "--small");
    if (argc > 2 || (argc == 2 && !is_small)) {
        fprintf(stderr, "usage: %s [--small]\n", argv[0]);
        return 2;
    }
    snprintf(text, sizeof text, "%s%s%s%s", ranks ? "fsdprun -n " : "", ranks ? ranks : "",
             ranks ? " bench_gpu" : "bench_gpu", is_small ? " --small" : "");
    command = text;
    if (ranks && strcmp(ranks, "1") != 0) {
        bench_collectives();
        return 0;
    }
    bench_kernels();
    bench_hooks();
    bench_memory();
    return 0;
}
