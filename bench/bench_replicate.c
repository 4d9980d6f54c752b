/* bench_replicate.c - DDP: one unit for each parameter, buckets, and one bucket, compared with
   the same passes without communication; and the host cost of a parameter's grad and ready

       build/bench/bench_replicate [--ranks 2,4] [--kib 16,256] [--comm-threads 0,2] [--batch 1]
                                   [--rows plain,units,buckets,small,one] [--steps N] [--rounds N]
                                   [--csv] [--host]
       FSDP_BACKEND=gloo build/bench/bench_replicate

   The net has 160 layers y = x * w, element by element, with one parameter of --kib KiB each. So
   arithmetic is nearly free, unless --batch is large.
   plain    each rank trains a copy of its own, all at the same time, without communication
   units    fsdp_fully_shard with a mesh info of kind DDP, one unit for each layer
   buckets  fsdp_replicate with its default caps, 1 MiB and then 25 MiB
   small    fsdp_replicate with buckets of 1 MiB
   one      fsdp_replicate with one bucket
   pass     a forward, a backward and fsdp_finalize_backward: median over the steps of a run, then
            over rounds; of rank 0. The rows of a table run in turn in each round
   extra    what a row's pass takes more than that of plain
   comm     how long its all-reduces are under way, mean over steps
   hidden   the share of the time in which collectives are under way that the caller spends outside
            of the library's functions: 0 inline, where each collective runs inside a call
   zero     how long zeros are written into messages before a bucket's first gradient; copy: how
            long sums are divided and added to the gradients that optimizers see. Means over steps
   --host   only the cost of the calls, with a device and a comm that do nothing. Goal: 80 ns for
            grad and ready of a parameter, compared with the core's hooks of the same units
   bench/compare_ddp.py compares with PyTorch. Writes $FSDP_BUILD/bench_replicate.csv.

   SPDX-License-Identifier: MIT */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE 1 /* the POSIX calls under -std=c99 too */
#endif
#include "bench/bench.h"
#include "tests/library.c" /* what it measures */
#include "tests/sim.h"

enum { LAYERS = 160, WARM_UP = 3, STEPS_MAX = 1000, ROUNDS_MAX = 64, SPANS_MAX = 1 << 19 };
enum { PLAIN = 0, UNITS, BUCKETS, SMALL, ONE, MODES };
static const char *const mode_names[MODES] = {"plain", "units", "buckets", "small", "one"};

// Common memory of the ranks: what rank 0 found.
typedef struct {
    double pass_us, comm_us, hidden; // times of a step; share of them
    double zero_us, copy_us;         // times of a step
    double loss, checksum;           // the last step's mean loss over the ranks, and its gradients
    int buckets;
} result;

typedef struct {
    int ranks, kib, threads, batch, steps, mode;
    result *out;
} job;

typedef struct {
    const job *j;
    int rank, numel;
    fsdp_model *model;
    fsdp_replicate *rep;      // in modes BUCKETS, SMALL and ONE
    fsdp_unit *units[LAYERS]; // in mode UNITS
    float *w, *g;             // in mode PLAIN: (LAYERS, numel)
    float *x, *d;             // (LAYERS + 1, batch, numel), (batch, numel)
    double pass_us[STEPS_MAX], loss;
    bench_span comms[SPANS_MAX], calls[SPANS_MAX];
    int num_comms, num_calls;
    int64_t zero_ns, copy_ns;
} trainer;

static int indices[LAYERS]; // fsdp_param_desc.user points into it

/* ---- the net --------------------------------------------------------------------------------- */

// Closed forms that bench/compare_ddp.py has, too; binary fractions.
static float first_weight(int layer, int64_t k) {
    return 1.0f + (float)((k * 7 + layer * 13) % 64 - 32) / 8192.0f;
}
static float input(int sample, int64_t k) {
    return (float)((k * 5 + sample * 11) % 128 + 64) / 128.0f;
}

static void layer_forward(float *restrict y, const float *restrict x, const float *restrict w,
                          int batch, int numel) {
    for (int b = 0; b < batch; b++)
        for (int k = 0; k < numel; k++) y[b * numel + k] = x[b * numel + k] * w[k];
}

// d holds the gradient of y and becomes that of x.
static void layer_backward(float *restrict d, float *restrict g, const float *restrict x,
                           const float *restrict w, int batch, int numel) {
    for (int b = 0; b < batch; b++)
        for (int k = 0; k < numel; k++) {
            g[k] += d[b * numel + k] * x[b * numel + k];
            d[b * numel + k] *= w[k];
        }
}

/* ---- units and buckets ----------------------------------------------------------------------- */

static void init(void *user, const fsdp_param_view *block) {
    (void)user;
    for (int64_t k = 0; k < block->numel; k++)
        ((float *)block->data)[k] = first_weight(*(const int *)block->user,
                                                 fsdp_view_index(block, k));
}

// Records of an extension: when all-reduces ran, inline or in threads, and work around them.
static void comm_ran(void *user, fsdp_model *model, const fsdp_op *op, int64_t begin_ns,
                     int64_t end_ns) {
    trainer *t = (trainer *)user;
    bench_span ran = {begin_ns, end_ns};
    (void)model;
    if (op->kind == FSDP_OP_ZERO) t->zero_ns += end_ns - begin_ns;
    if (op->kind == FSDP_OP_COPY) t->copy_ns += end_ns - begin_ns;
    if (op->unit && op->kind == FSDP_OP_ALL_REDUCE && t->num_comms < SPANS_MAX)
        t->comms[t->num_comms++] = ran;
}

static fsdp_status make_buckets(fsdp_model *model, int numel, int64_t cap, fsdp_replicate **rep) {
    fsdp_param_desc params[LAYERS];
    fsdp_replicate_desc desc = FSDP_ZERO;
    for (int i = 0; i < LAYERS; i++) {
        params[i] = fsdp_vec(NULL, numel);
        params[i].user = &indices[i];
        indices[i] = i;
    }
    desc.params = params;
    desc.num_params = LAYERS;
    desc.bucket_bytes = cap;
    return fsdp_replicate_create(model, &desc, rep);
}

static fsdp_status make_units(trainer *t, fsdp_world *world) {
    fsdp_mesh *mesh = NULL;
    fsdp_mesh_info info;
    fsdp_status status = fsdp_mesh_1d(world, "replica", &mesh);
    if (!status) status = fsdp_mesh_info_init(mesh, FSDP_MESH_INFO_DDP, -1, 0, &info);
    for (int i = 0; i < LAYERS && !status; i++) {
        fsdp_param_desc param = fsdp_vec("w", t->numel);
        fsdp_unit_desc desc = FSDP_ZERO;
        indices[i] = i;
        param.user = &indices[i];
        desc.params = &param;
        desc.num_params = 1;
        desc.reshard_after_forward = FSDP_RESHARD_NEVER;
        desc.mesh_info = &info;
        status = fsdp_fully_shard(t->model, &desc, &t->units[i]);
    }
    return status;
}

static fsdp_status build(trainer *t, fsdp_world *world) {
    static fsdp_extension times;
    static const int64_t caps[MODES] = {0, 0, 0, 1 << 20, INT64_MAX}; // 0: the default
    size_t size = (size_t)t->j->batch * (size_t)t->numel;
    t->x = (float *)malloc((LAYERS + 2) * size * sizeof *t->x);
    if (!t->x) return FSDP_ERR_OUT_OF_MEMORY;
    t->d = t->x + (LAYERS + 1) * size;
    if (t->j->mode == PLAIN) {
        t->w = (float *)calloc((size_t)t->numel * 2 * LAYERS, sizeof *t->w);
        if (!t->w) return FSDP_ERR_OUT_OF_MEMORY;
        t->g = t->w + (ptrdiff_t)LAYERS * t->numel;
        for (int l = 0; l < LAYERS; l++)
            for (int k = 0; k < t->numel; k++)
                t->w[(ptrdiff_t)l * t->numel + k] = first_weight(l, k);
        return FSDP_OK;
    }
    times.name = "times";
    times.user = t;
    times.ran = comm_ran;
    fsdp_model_desc md = FSDP_ZERO;
    fsdp_status status = fsdp_model_create(world, &md, &t->model);
    if (!status && t->j->mode == UNITS) status = make_units(t, world);
    else if (!status) status = make_buckets(t->model, t->numel, caps[t->j->mode], &t->rep);
    if (!status) status = fsdp_init_params(t->model, init, NULL);
    return status ? status : fsdp_attach(t->model, &times);
}

/* ---- a pass ---------------------------------------------------------------------------------- */

static void called(trainer *t, int64_t begin) {
    bench_span now = {begin, bench_now_ns()};
    if (t->num_calls < SPANS_MAX) t->calls[t->num_calls++] = now;
}

// Calls the hooks before forward or backward of a layer; finalize returns their failures.
static const float *open_layer(trainer *t, int l, int backward, float **g) {
    if (t->j->mode == PLAIN) {
        if (g) *g = t->g + (ptrdiff_t)l * t->numel;
        return t->w + (ptrdiff_t)l * t->numel;
    }
    int64_t begin = bench_now_ns();
    const float *w;
    if (t->rep) {
        w = (const float *)fsdp_replicate_data(t->rep, l);
        if (g) *g = (float *)fsdp_replicate_grad(t->rep, l);
    } else {
        (void)(backward ? fsdp_pre_backward(t->units[l]) : fsdp_pre_forward(t->units[l]));
        w = (const float *)fsdp_data(t->units[l], 0);
        if (g) *g = (float *)fsdp_grad(t->units[l], 0);
    }
    called(t, begin);
    return w;
}

static void close_layer(trainer *t, int l, int backward) {
    if (t->j->mode == PLAIN || (t->rep && !backward)) return;
    int64_t begin = bench_now_ns();
    if (t->rep) (void)fsdp_replicate_ready(t->rep, l, 1);
    else (void)(backward ? fsdp_post_backward(t->units[l]) : fsdp_post_forward(t->units[l]));
    called(t, begin);
}

static void around(trainer *t, fsdp_status (*call)(fsdp_replicate *rep)) {
    int64_t begin = bench_now_ns();
    if (!t->rep) return;
    (void)call(t->rep);
    called(t, begin);
}

static fsdp_status pass(trainer *t) {
    int batch = t->j->batch, size = batch * t->numel;
    fsdp_status status = FSDP_OK;
    float *g = NULL;
    around(t, fsdp_replicate_pre_forward);
    for (int l = 0; l < LAYERS; l++) {
        const float *w = open_layer(t, l, 0, NULL), *x = t->x + (ptrdiff_t)l * size;
        layer_forward(t->x + (ptrdiff_t)(l + 1) * size, x, w, batch, t->numel);
        close_layer(t, l, 0);
    }
    around(t, fsdp_replicate_post_forward);
    t->loss = 0;
    for (int k = 0; k < size; k++) {
        t->loss += (double)t->x[(ptrdiff_t)LAYERS * size + k] / size;
        t->d[k] = 1.0f / (float)size;
    }
    for (int l = LAYERS - 1; l >= 0; l--) {
        const float *w = open_layer(t, l, 1, &g);
        layer_backward(t->d, g, t->x + (ptrdiff_t)l * size, w, batch, t->numel);
        close_layer(t, l, 1);
    }
    around(t, fsdp_replicate_post_backward);
    int64_t begin = bench_now_ns();
    if (t->model) status = fsdp_finalize_backward(t->model);
    called(t, begin);
    return status;
}

/* Each gradient counts by its place, so that swapped ones are found. */
static double checksum(const trainer *t) {
    double sum = 0;
    for (int l = 0; l < LAYERS; l++) {
        fsdp_unit *unit = t->units[l];
        fsdp_param_view v = FSDP_ZERO;
        int index = 0;
        const float *g = t->g ? t->g + (ptrdiff_t)l * t->numel : NULL;
        if (t->rep) (void)fsdp_replicate_unit(t->rep, l, &unit, &index);
        if (unit && !fsdp_param_view_get(unit, index, &v)) g = (const float *)v.shard_grad;
        for (int k = 0; g && k < t->numel; k++) sum += (double)g[k] * (l + 1) * (k % 7 + 1);
    }
    return sum;
}

static fsdp_status train(fsdp_world *world, trainer *t) {
    const job *j = t->j;
    double all = 0.0, hidden = 0.0;
    fsdp_status status = build(t, world);
    if (!status) status = fsdp_barrier(world);
    for (int step = 0; step < j->steps && !status; step++) {
        if (step == WARM_UP) t->num_comms = t->num_calls = 0;
        for (int b = 0; b < j->batch; b++)
            for (int k = 0; k < t->numel; k++)
                t->x[b * t->numel + k] = input(t->rank * j->batch + b, k);
        if (t->model) status = fsdp_zero_grad(t->model);
        else memset(t->g, 0, (size_t)t->numel * LAYERS * sizeof *t->g);
        if (step == WARM_UP) t->zero_ns = t->copy_ns = 0;
        int64_t begin = bench_now_ns();
        if (!status) status = pass(t);
        t->pass_us[step] = (double)(bench_now_ns() - begin) * 1e-3;
    }
    if (!status) status = fsdp_all_reduce(world, NULL, &t->loss, 1, FSDP_F64, FSDP_SUM);
    if (status || t->rank) return status;
    int counted = j->steps - WARM_UP;
    bench_overlap(t->comms, t->num_comms, t->calls, t->num_calls, &all, &hidden);
    j->out->loss = t->loss / j->ranks;
    j->out->checksum = checksum(t);
    j->out->pass_us = bench_summarize(t->pass_us + WARM_UP, counted).median;
    j->out->comm_us = all * 1e-3 / counted;
    j->out->zero_us = (double)t->zero_ns * 1e-3 / counted;
    j->out->copy_us = (double)t->copy_ns * 1e-3 / counted;
    j->out->hidden = all > 0 ? hidden / all : 0;
    j->out->buckets = t->rep ? fsdp_replicate_num_buckets(t->rep) : j->mode == UNITS ? LAYERS : 0;
    return FSDP_OK;
}

static int rank_main(fsdp_world *world, void *arg) {
    trainer *t = (trainer *)calloc(1, sizeof *t);
    if (!t) return FSDP_ERR_OUT_OF_MEMORY;
    t->j = (const job *)arg;
    t->rank = fsdp_rank(world);
    t->numel = t->j->kib * 256;
    fsdp_status status = train(world, t);
    free(t->x);
    free(t->w);
    return (int)status; // its process ends: the model may still know t
}

/* ---- tables ---------------------------------------------------------------------------------- */

typedef struct {
    int ranks[8], kib[8], threads[8], num_ranks, num_kib, num_threads;
    int batch, steps, rounds, csv, host;
    const char *rows;
} options;

static int run(job *j) {
    fsdp_world_desc world = FSDP_ZERO;
    fsdp_spawn_desc desc = FSDP_ZERO;
    world.comm_threads = j->threads ? j->threads : -1;
    desc.world = &world;
    desc.num_ranks = j->ranks;
    return fsdp_spawn(&desc, rank_main, j) != FSDP_OK; // the reason has been logged
}

static int measure(job *j, const options *o, FILE *csv) {
    double pass[MODES][ROUNDS_MAX], comm[MODES][ROUNDS_MAX], hidden[MODES][ROUNDS_MAX];
    double zero[MODES][ROUNDS_MAX], copy[MODES][ROUNDS_MAX];
    double plain = 0;
    result last[MODES];
    memset(last, 0, sizeof last);
    const char *backend = getenv("FSDP_BACKEND");
    if (!backend || !*backend) backend = "default";
    for (int round = 0; round < o->rounds; round++)
        for (j->mode = 0; j->mode < MODES; j->mode++) {
            if (!strstr(o->rows, mode_names[j->mode])) continue;
            if (run(j)) return 1;
            last[j->mode] = *j->out;
            pass[j->mode][round] = j->out->pass_us;
            comm[j->mode][round] = j->out->comm_us;
            hidden[j->mode][round] = j->out->hidden;
            zero[j->mode][round] = j->out->zero_us;
            copy[j->mode][round] = j->out->copy_us;
        }
    for (int mode = 0; mode < MODES; mode++) {
        if (!strstr(o->rows, mode_names[mode])) continue;
        double us = bench_summarize(pass[mode], o->rounds).median;
        double comm_us = bench_summarize(comm[mode], o->rounds).median;
        double zero_us = bench_summarize(zero[mode], o->rounds).median;
        double copy_us = bench_summarize(copy[mode], o->rounds).median;
        double share = bench_summarize(hidden[mode], o->rounds).median;
        if (mode == PLAIN) plain = us;
        fprintf(csv, "%d,%d,%s,%d,%d,%s,%d,%.1f,%.1f,%.1f,%.3f,%.1f,%.1f,%.9g,%.9g\n", j->ranks,
                j->kib, backend, j->threads, j->batch, mode_names[mode], last[mode].buckets, us,
                us - plain, comm_us, share, zero_us, copy_us, last[mode].loss, last[mode].checksum);
        if (!o->csv)
            printf("%5d %4d KiB %-8s %5d %5d  %-8s %7d %10.1f %10.1f %10.1f %7.2f %8.1f %8.1f\n",
                   j->ranks, j->kib, backend, j->threads, j->batch, mode_names[mode],
                   last[mode].buckets, us, us - plain, comm_us, share, zero_us, copy_us);
        // Ranks' gradients are means with buckets or without: to the bit, in whatever units.
        if (mode > UNITS && last[UNITS].buckets &&
            last[mode].checksum - last[UNITS].checksum != 0.0) {
            fprintf(stderr, "bench_replicate: %s has other gradients than units: %.17g, %.17g\n",
                    mode_names[mode], last[mode].checksum, last[UNITS].checksum);
            return 1;
        }
    }
    fflush(NULL);
    return 0;
}

static int measure_all(const options *o, FILE *csv) {
    int failed = 0;
    job j;
    memset(&j, 0, sizeof j);
    j.out = (result *)mmap(NULL, sizeof *j.out, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS,
                           -1, 0);
    if (j.out == MAP_FAILED) return 1;
    j.batch = o->batch, j.steps = o->steps;
    if (!o->csv)
        printf("ranks     size backend  threads batch  row      buckets    pass us   extra us    "
               "comm us  hidden  zero us  copy us\n");
    for (int r = 0; r < o->num_ranks; r++)
        for (int k = 0; k < o->num_kib; k++)
            for (int l = 0; l < o->num_threads && !failed; l++) {
                j.ranks = o->ranks[r], j.kib = o->kib[k], j.threads = o->threads[l];
                failed = measure(&j, o, csv);
            }
    return failed;
}

/* ---- the host's cost ------------------------------------------------------------------------- */

// A backward over the buckets by fsdp_replicate, and by the core's hooks of the same units.
static double by_replicate(fsdp_replicate *rep) {
    int64_t begin = bench_now_ns();
    for (int i = LAYERS - 1; i >= 0; i--) {
        if (!fsdp_replicate_grad(rep, i)) exit(1);
        (void)fsdp_replicate_ready(rep, i, 1);
    }
    (void)fsdp_replicate_post_backward(rep);
    return (double)(bench_now_ns() - begin) / LAYERS;
}

static double by_units(fsdp_unit **units, const int *members, int count) {
    int64_t begin = bench_now_ns();
    for (int k = 0; k < count; k++) {
        (void)fsdp_pre_backward(units[k]);
        for (int i = 0; i < members[k]; i++)
            if (!fsdp_grad(units[k], i)) exit(1);
        (void)fsdp_post_backward(units[k]);
    }
    return (double)(bench_now_ns() - begin) / LAYERS;
}

static int host_cost(int async, int64_t cap) {
    enum { STEPS = 400 };
    static sim s;
    static double samples[2][STEPS];
    fsdp_model *model;
    fsdp_replicate *rep;
    fsdp_unit *units[LAYERS];
    int members[LAYERS] = {0};
    sim_init(&s, 4, 0);
    s.async = async;
    s.null = 1;
    if (!sim_open(&s) || fsdp_model_create(s.world, NULL, &model) ||
        make_buckets(model, 4096, cap, &rep)) {
        fprintf(stderr, "bench_replicate: %s\n", fsdp_last_error(s.world));
        return 1;
    }
    int count = fsdp_replicate_num_buckets(rep);
    for (int k = 0; k < count; k++) {
        int32_t list[LAYERS];
        members[k] = fsdp_replicate_members(rep, k, list, NULL);
        if (fsdp_replicate_unit(rep, list[0], &units[k], NULL)) return 1;
    }
    for (int step = -WARM_UP; step < STEPS; step++)
        for (int way = 0; way < 2; way++) {
            if (fsdp_replicate_pre_forward(rep) || fsdp_replicate_post_forward(rep)) return 1;
            double ns = way ? by_units(units, members, count) : by_replicate(rep);
            if (fsdp_finalize_backward(model) || fsdp_zero_grad(model)) return 1;
            if (step >= 0) samples[way][step] = ns;
        }
    double ours = bench_summarize(samples[0], STEPS).median;
    double core = bench_summarize(samples[1], STEPS).median;
    printf("%-8s %7d %14.1f %12.1f %12.1f  %s\n", async ? "streams" : "inline", count, ours, core,
           ours - core, ours - core <= 80 ? "goal met" : "above the goal");
    (void)sim_close(&s);
    return 0;
}

static int host_costs(void) {
    int failed = 0;
    printf("ns for a parameter    replicate    the core   difference  (goal 80)\n");
    for (int async = 0; async < 2; async++) {
        failed |= host_cost(async, 0);
        failed |= host_cost(async, 1);
    }
    return failed;
}

static int parse(int argc, char **argv, options *o) {
    const char *ranks = "2,4", *kib = "16,256", *threads = "0";
    int batch[8] = {1}, steps[8] = {20}, rounds[8] = {3}, good = 1;
    memset(o, 0, sizeof *o);
    o->rows = "plain,units,buckets,small,one";
    for (int i = 1; i < argc; i++) {
        const char *value = i + 1 < argc ? argv[i + 1] : "";
        if (!strcmp(argv[i], "--csv")) o->csv = 1;
        else if (!strcmp(argv[i], "--host")) o->host = 1;
        else if (i++, !strcmp(argv[i - 1], "--ranks")) ranks = value;
        else if (!strcmp(argv[i - 1], "--kib")) kib = value;
        else if (!strcmp(argv[i - 1], "--comm-threads")) threads = value;
        else if (!strcmp(argv[i - 1], "--rows")) o->rows = value;
        else if (!strcmp(argv[i - 1], "--batch"))
            good &= bench_parse_list(value, 1, 256, batch) == 1;
        else if (!strcmp(argv[i - 1], "--steps"))
            good &= bench_parse_list(value, WARM_UP + 1, STEPS_MAX, steps) == 1;
        else if (!strcmp(argv[i - 1], "--rounds"))
            good &= bench_parse_list(value, 1, ROUNDS_MAX, rounds) == 1;
        else return 0;
    }
    o->batch = batch[0], o->steps = steps[0], o->rounds = rounds[0];
    o->num_ranks = bench_parse_list(ranks, 1, 64, o->ranks);
    o->num_kib = bench_parse_list(kib, 1, 1 << 14, o->kib);
    o->num_threads = bench_parse_list(threads, 0, 2, o->threads);
    return good && o->num_ranks && o->num_kib && o->num_threads;
}

int main(int argc, char **argv) {
    static const char columns[] = "ranks,kib,backend,threads,batch,row,buckets,pass_us,extra_us,"
                                  "comm_us,hidden,zero_us,copy_us,loss,checksum";
    options o;
    if (!parse(argc, argv, &o)) {
        fprintf(
            stderr,
            "usage: %s [--ranks LIST] [--kib LIST] [--comm-threads LIST] [--batch N] [--steps N] "
            "[--rounds N] [--rows plain,units,buckets,small,one] [--csv] "
            "[--host]\n",
            argv[0]);
        return 2;
    }
    if (o.host) return host_costs();
    FILE *csv;
    if (o.csv) {
        printf("%s\n", columns);
        csv = stdout;
    } else {
        csv = bench_csv("bench_replicate", columns);
    }
    int failed = measure_all(&o, csv);
    if (!o.csv) {
        fclose(csv);
        failed |= host_costs();
    }
    return failed;
}
