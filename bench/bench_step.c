/* bench_step.c - training steps of an MLP and of the GPT of examples/gpt: sharded, compared with
   the same loop without sharding

       build/bench/bench_step [--model mlp,gpt] [--case tiny,large,example] [--ranks 2,4]
                              [--comm-threads 0,2] [--prefetch 0|1] [--plan 0|1] [--steps N]
                              [--losses FILE] [--csv]
       FSDP_BACKEND=gloo build/bench/bench_step
       tools/bench_report -o build/bench_step.svg build/bench_step.csv      as a picture

   tiny    layers whose arithmetic is nearly free: what is left is the cost of a unit, its hooks and
           its collectives: (sharded - plain) / units, "extra"
   large   layers of megabytes: throughput
   example the GPT with the sizes of examples/gpt
   plain   every rank trains a copy of its own, all at the same time, without communication
   Parameters, data and optimizer (AdamW) are those of bench/fsdp_step.py, which runs both programs
   and compares times and losses; all of them are functions of a place, see noise().
   hidden  the share of the time in which collectives are under way that the caller spends outside
           of fsdp's functions: 0 inline, where each collective runs inside a hook
   --plan 1  steps are recorded and replayed (fsdp_plan.h), from the third one on, with its defaults
   Times are medians over steps, of rank 0. Writes $FSDP_BUILD/bench_step.csv.

   SPDX-License-Identifier: MIT */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE 1 /* the POSIX calls under -std=c99 too */
#endif
#include "bench/bench.h"
#include <sys/mman.h> // mmap
#include "examples/gpt/gpt.h"
#define FSDP_IMPLEMENTATION
#include "fsdp.h"
#include "fsdp_optim.h"
#include "fsdp_plan.h"

enum {
    WARM_UP = 3,
    STEPS_MAX = 1000,
    LAYERS_MAX = 128,
    SPANS_MAX = 1 << 16,
    PARAMS_MAX = GPT_BLOCK_PARAM_COUNT
};
enum { MLP = 0, GPT, MODELS };
static const char *const model_names[MODELS] = {"mlp", "gpt"};
enum { CASES = 3 };
static const char *const case_names[CASES] = {"tiny", "large", "example"};

// layers, width of a layer, samples or sequences of one rank in a step; GPT: positions, heads
typedef struct {
    int layers, width, batch, context, heads, steps;
} shape;
static const shape shapes[MODELS][CASES] = {
    {{64, 16, 4, 1, 0, 100}, {6, 1024, 64, 1, 0, 20}, {0, 0, 0, 0, 0, 0}},
    {{16, 32, 1, 16, 4, 100}, {6, 256, 4, 64, 4, 20}, {4, 128, 3, 64, 4, 100}}};

static const fsdp_adamw_hyper HYPER = {1e-3, 0.9, 0.999, 1e-8, 0.01, 0};

// Common memory of the ranks: what rank 0 found.
typedef struct {
    double losses[STEPS_MAX]; // mean over the ranks
    double pass_us, optim_us; // medians of a step: forward and backward; the optimizer
    double comm_us, hidden;   // time of a step; share of it
} result;

typedef struct {
    int model, size, world, threads, prefetch, plan, plain, steps;
    shape s;
    result *out;
} job;

// One unit, or without sharding the arrays that stand for it.
typedef struct {
    fsdp_unit *unit;
    int count;
    gpt_param_spec specs[PARAMS_MAX];
    float *w[PARAMS_MAX], *g[PARAMS_MAX];
} layer;

typedef struct {
    const job *j;
    int rank, num_layers; // with the embedding, which is the last one
    layer layers[LAYERS_MAX + 1];
    fsdp_model *model;
    fsdp_adamw *adamw;
    float *flat, *grads, *m, *v; // without sharding
    int64_t numel;
    gpt_config cfg;
    gpt_acts acts;
    uint8_t *tokens;
    int16_t *targets;
    float *x, *u, *wanted; // MLP: (layers + 1, batch, width), (layers, ...), (...)
    float *d;              // (2, batch, width)
    double losses[STEPS_MAX], pass_us[STEPS_MAX], optim_us[STEPS_MAX];
    // Where time goes: collectives of the two kinds, each written by one thread; fsdp's functions.
    bench_span comms[2][SPANS_MAX], calls[SPANS_MAX];
    int num_comms[2], num_calls;
} trainer;

/* ---- numbers --------------------------------------------------------------------------------- */

static double noise(uint64_t x) { // in [-1, 1), a function of x alone
    x = (x + 1) * 0x9E3779B97F4A7C15u;
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
    x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
    return (double)((x ^ (x >> 31)) >> 11) * 0x1p-52 - 1.0;
}

static void init_element(float *to, const gpt_param_spec *spec, int ordinal, int64_t place) {
    double value = noise((uint64_t)ordinal << 32 | (uint64_t)place);
    *to = (float)((double)spec->mean + (double)spec->std * value);
}

static void init_rows(void *user, const fsdp_param_view *block) {
    (void)user;
    for (int64_t k = 0; k < block->numel; k++)
        init_element((float *)block->data + k, (const gpt_param_spec *)block->user, block->ordinal,
                     fsdp_view_index(block, k));
}

/* ---- units ----------------------------------------------------------------------------------- */

// In all that follows `std` of a spec is the bound of uniform numbers.
static void describe(trainer *t) {
    const shape *s = &t->j->s;
    t->num_layers = s->layers + (t->j->model == GPT);
    for (int l = 0; l < s->layers; l++) {
        layer *to = &t->layers[l];
        if (t->j->model == GPT) {
            gpt_block_specs(&t->cfg, to->specs);
            to->count = GPT_BLOCK_PARAM_COUNT;
        } else {
            to->specs[0] = gpt_spec("w", s->width, s->width, 0.0f,
                                    1.0f / sqrtf((float)(s->width * s->layers)));
            to->specs[1] = gpt_spec("b", s->width, 0, 0.0f, 0.0f);
            to->count = 2;
        }
    }
    if (t->j->model != GPT) return;
    gpt_embed_specs(&t->cfg, t->layers[s->layers].specs);
    t->layers[s->layers].count = GPT_EMBED_PARAM_COUNT;
}

// Records of an extension: when the collectives of the units ran, inline or in threads.
static void comm_ran(void *user, fsdp_model *model, const fsdp_op *op, int64_t begin_ns,
                     int64_t end_ns) {
    trainer *t = (trainer *)user;
    int kind = op->kind == FSDP_OP_REDUCE_SCATTER;
    bench_span ran = {begin_ns, end_ns};
    (void)model;
    if (!op->unit || (op->kind != FSDP_OP_ALL_GATHER && !kind)) return;
    if (t->num_comms[kind] < SPANS_MAX) t->comms[kind][t->num_comms[kind]++] = ran;
}

static fsdp_status shard(trainer *t, layer *l, int outermost) {
    fsdp_param_desc params[PARAMS_MAX];
    fsdp_unit_desc desc = FSDP_ZERO;
    for (int i = 0; i < l->count; i++) {
        const gpt_param_spec *s = &l->specs[i];
        params[i] = s->cols ? fsdp_mat(s->name, s->rows, s->cols) : fsdp_vec(s->name, s->rows);
        params[i].user = &l->specs[i];
    }
    desc.params = params;
    desc.num_params = l->count;
    desc.reshard_after_forward = outermost ? FSDP_RESHARD_NEVER : FSDP_RESHARD_ALWAYS;
    return fsdp_fully_shard(t->model, &desc, &l->unit);
}

// With threads and prefetch the next layer is gathered while this one computes, in forward as in
// backward.
static fsdp_status build(trainer *t, fsdp_world *world) {
    int blocks = t->j->s.layers;
    fsdp_adamw_desc desc = fsdp_adamw_defaults();
    fsdp_extension times = FSDP_ZERO;
    desc.weight_decay = HYPER.weight_decay;
    times.name = "times";
    times.user = t;
    times.ran = comm_ran;
    fsdp_status status = fsdp_model_create(world, NULL, &t->model);
    for (int l = 0; l < t->num_layers && !status; l++)
        status = shard(t, &t->layers[l], l == blocks);
    for (int l = 0; l + 1 < blocks && t->j->threads && t->j->prefetch && !status; l++)
        status = fsdp_set_modules_to_forward_prefetch(t->layers[l].unit, &t->layers[l + 1].unit, 1);
    if (!status) status = fsdp_init_params(t->model, init_rows, NULL);
    if (!status) status = fsdp_adamw_create(t->model, &desc, &t->adamw);
    fsdp_plan *plan;
    if (!status && t->j->plan) status = fsdp_plan_create(t->model, NULL, &plan);
    return status ? status : fsdp_attach(t->model, &times);
}

// Without sharding: one array of all parameters, one of all gradients.
static fsdp_status build_plain(trainer *t) {
    for (int l = 0; l < t->num_layers; l++)
        for (int i = 0; i < t->layers[l].count; i++)
            t->numel += gpt_spec_numel(&t->layers[l].specs[i]);
    t->flat = (float *)calloc((size_t)t->numel * 4, sizeof *t->flat);
    if (!t->flat) return FSDP_ERR_OUT_OF_MEMORY;
    t->grads = t->flat + t->numel, t->m = t->grads + t->numel, t->v = t->m + t->numel;
    int64_t at = 0;
    for (int l = 0, ordinal = 0; l < t->num_layers; l++)
        for (int i = 0; i < t->layers[l].count; i++, ordinal++) {
            int64_t numel = gpt_spec_numel(&t->layers[l].specs[i]);
            t->layers[l].w[i] = t->flat + at, t->layers[l].g[i] = t->grads + at;
            for (int64_t k = 0; k < numel; k++)
                init_element(t->flat + at + k, &t->layers[l].specs[i], ordinal, k);
            at += numel;
        }
    return FSDP_OK;
}

typedef fsdp_status (*hook)(fsdp_unit *unit);

static void call(trainer *t, layer *l, hook f) {
    if (!l->unit) return;
    bench_span now = {bench_now_ns(), 0};
    (void)f(l->unit); // fsdp_finalize_backward tells
    now.end = bench_now_ns();
    if (t->num_calls < SPANS_MAX) t->calls[t->num_calls++] = now;
    if (f == fsdp_pre_forward || f == fsdp_pre_backward)
        for (int i = 0; i < l->count; i++) l->w[i] = (float *)fsdp_data(l->unit, i);
    if (f == fsdp_pre_backward)
        for (int i = 0; i < l->count; i++) l->g[i] = (float *)fsdp_grad(l->unit, i);
}

/* ---- the two models -------------------------------------------------------------------------- */

static void fill_batch(trainer *t, int step) {
    const shape *s = &t->j->s;
    for (int b = 0; b < s->batch; b++) {
        int64_t sample = ((int64_t)step * t->j->world + t->rank) * s->batch + b;
        for (int i = 0; i < s->context && t->j->model == GPT; i++) {
            int64_t first = sample % 97, stride = sample % 5 + 1;
            t->tokens[b * s->context + i] = (uint8_t)(first + stride * i);
            t->targets[b * s->context + i] = (uint8_t)(first + stride * (i + 1));
        }
        for (int i = 0; i < s->width && t->j->model == MLP; i++) {
            uint64_t place = (uint64_t)1 << 48 | (uint64_t)(sample * s->width);
            t->x[b * s->width + i] = (float)noise(place + (uint64_t)i);
            t->wanted[b * s->width + i] = (float)noise(place + (uint64_t)((i + 1) % s->width));
        }
    }
}

// y = x + gelu(w x + b) in each layer; mean squared error.
static double mlp_pass(trainer *t) {
    const shape *s = &t->j->s;
    const int B = s->batch, N = s->width, size = B * N;
    double loss = 0.0;
    float *d = t->d, *branch = t->d + size;
    for (int l = 0; l < s->layers; l++) {
        layer *at = &t->layers[l];
        float *x = t->x + (ptrdiff_t)l * size, *u = t->u + (ptrdiff_t)l * size;
        call(t, at, fsdp_pre_forward);
        gpt_linear_forward(u, x, at->w[0], at->w[1], B, N, N);
        gpt_gelu_forward(branch, u, size);
        gpt_residual_forward(x + size, x, branch, size);
        call(t, at, fsdp_post_forward);
    }
    for (int i = 0; i < size; i++) {
        float error = t->x[(ptrdiff_t)s->layers * size + i] - t->wanted[i];
        loss += (double)error * (double)error / size;
        d[i] = 2.0f * error / (float)size;
    }
    for (int l = s->layers - 1; l >= 0; l--) {
        layer *at = &t->layers[l];
        float *x = t->x + (ptrdiff_t)l * size, *u = t->u + (ptrdiff_t)l * size;
        call(t, at, fsdp_pre_backward);
        memcpy(branch, d, (size_t)size * sizeof *d);
        gpt_gelu_backward(branch, u, size);
        gpt_linear_backward(u, at->g[0], at->g[1], branch, x, at->w[0], B, N, N);
        gpt_residual_forward(d, d, u, size);
        call(t, at, fsdp_post_backward);
    }
    return loss;
}

static double gpt_pass(trainer *t) {
    const gpt_config *cfg = &t->cfg;
    gpt_acts *acts = &t->acts;
    layer *embed = &t->layers[cfg->layers];
    call(t, embed, fsdp_pre_forward);
    gpt_embed_forward(cfg, embed->w, t->tokens, gpt_x(cfg, acts, 0));
    for (int l = 0; l < cfg->layers; l++) {
        call(t, &t->layers[l], fsdp_pre_forward);
        gpt_block_forward(cfg, t->layers[l].w, &acts->blocks[l], acts->tmp, gpt_x(cfg, acts, l),
                          gpt_x(cfg, acts, l + 1));
        call(t, &t->layers[l], fsdp_post_forward);
    }
    gpt_head_forward(cfg, embed->w, acts, gpt_x(cfg, acts, cfg->layers));
    call(t, embed, fsdp_post_forward);
    const int tokens = cfg->batch * cfg->context;
    double loss = gpt_loss_forward(cfg, acts, t->targets) / tokens;
    gpt_loss_backward(cfg, acts, t->targets, 1.0f / (float)tokens);
    call(t, embed, fsdp_pre_backward);
    gpt_head_backward(cfg, embed->w, embed->g, acts, gpt_x(cfg, acts, cfg->layers));
    for (int l = cfg->layers - 1; l >= 0; l--) {
        call(t, &t->layers[l], fsdp_pre_backward);
        gpt_block_backward(cfg, t->layers[l].w, t->layers[l].g, &acts->blocks[l], acts,
                           gpt_x(cfg, acts, l));
        call(t, &t->layers[l], fsdp_post_backward);
    }
    gpt_embed_backward(cfg, embed->g, t->tokens, acts->dx);
    call(t, embed, fsdp_post_backward);
    return loss;
}

static fsdp_status allocate(trainer *t) {
    const shape *s = &t->j->s;
    size_t size = (size_t)s->batch * (size_t)s->width, layers = (size_t)s->layers;
    size_t tokens = (size_t)s->batch * (size_t)s->context;
    t->cfg.batch = s->batch, t->cfg.context = s->context, t->cfg.channels = s->width;
    t->cfg.heads = s->heads, t->cfg.layers = s->layers, t->cfg.vocab = 256;
    t->targets = (int16_t *)malloc(tokens * (sizeof *t->targets + sizeof *t->tokens));
    t->tokens = (uint8_t *)(t->targets + tokens);
    t->x = (float *)malloc((2 * layers + 4) * size * sizeof *t->x);
    t->u = t->x + (layers + 1) * size;
    t->wanted = t->u + layers * size;
    t->d = t->wanted + size;
    if (!t->targets || !t->x || (t->j->model == GPT && gpt_acts_create(&t->cfg, &t->acts)))
        return FSDP_ERR_OUT_OF_MEMORY;
    return FSDP_OK;
}

/* ---- training -------------------------------------------------------------------------------- */

static fsdp_status update(trainer *t, int step) {
    if (!t->model) {
        fsdp_adamw_hyper hyper = HYPER;
        hyper.step = step + 1;
        fsdp_adamw_update(t->flat, t->grads, t->m, t->v, t->numel, &hyper);
        memset(t->grads, 0, (size_t)t->numel * sizeof *t->grads);
        return FSDP_OK;
    }
    fsdp_status status = fsdp_adamw_step(t->adamw, HYPER.lr);
    return status ? status : fsdp_zero_grad(t->model);
}

static fsdp_status train_step(trainer *t, int step) {
    fsdp_status status = FSDP_OK;
    fill_batch(t, step);
    int64_t begin = bench_now_ns();
    t->losses[step] = t->j->model == GPT ? gpt_pass(t) : mlp_pass(t);
    bench_span last = {bench_now_ns(), 0};
    if (t->model) status = fsdp_finalize_backward(t->model);
    last.end = bench_now_ns();
    if (t->num_calls < SPANS_MAX) t->calls[t->num_calls++] = last;
    if (!status) status = update(t, step);
    t->pass_us[step] = (double)(last.end - begin) * 1e-3;
    t->optim_us[step] = (double)(bench_now_ns() - last.end) * 1e-3;
    return status;
}

static fsdp_status train(fsdp_world *world, trainer *t) {
    const job *j = t->j;
    double all = 0.0, hidden = 0.0;
    fsdp_status status = allocate(t);
    describe(t);
    if (!status) status = j->plain ? build_plain(t) : build(t, world);
    if (!status) status = fsdp_barrier(world);
    for (int step = 0; step < j->steps && !status; step++) {
        if (step == WARM_UP) t->num_comms[0] = t->num_comms[1] = t->num_calls = 0;
        status = train_step(t, step);
    }
    if (!status) status = fsdp_all_reduce(world, NULL, t->losses, j->steps, FSDP_F64, FSDP_SUM);
    if (status || t->rank) return status;
    int counted = j->steps - WARM_UP;
    for (int kind = 0; kind < 2; kind++)
        bench_overlap(t->comms[kind], t->num_comms[kind], t->calls, t->num_calls, &all, &hidden);
    for (int step = 0; step < j->steps; step++) j->out->losses[step] = t->losses[step] / j->world;
    j->out->pass_us = bench_summarize(t->pass_us + WARM_UP, counted).median;
    j->out->optim_us = bench_summarize(t->optim_us + WARM_UP, counted).median;
    j->out->comm_us = all * 1e-3 / counted;
    j->out->hidden = all > 0 ? hidden / all : 0;
    return FSDP_OK;
}

static int rank_main(fsdp_world *world, void *arg) {
    trainer *t = (trainer *)calloc(1, sizeof *t);
    if (!t) return FSDP_ERR_OUT_OF_MEMORY;
    t->j = (const job *)arg;
    t->rank = fsdp_rank(world);
    fsdp_status status = train(world, t);
    gpt_acts_destroy(&t->acts);
    free(t->flat);
    free(t->x);
    free(t->targets);
    free(t);
    return (int)status;
}

/* ---- the program ----------------------------------------------------------------------------- */

typedef struct {
    const char *models, *cases, *losses;
    int worlds[8], threads[8], num_worlds, num_threads, prefetch, plan, steps, csv;
} options;

static int run(job *j, int plain) {
    fsdp_world_desc world = FSDP_ZERO;
    fsdp_spawn_desc desc = FSDP_ZERO;
    world.comm_threads = j->threads ? j->threads : -1;
    desc.world = &world;
    desc.num_ranks = j->world;
    j->plain = plain;
    return fsdp_spawn(&desc, rank_main, j) != FSDP_OK; // the reason has been logged
}

static int write_losses(const job *j, const char *path) {
    FILE *file = fopen(path, "w");
    if (!file) {
        perror(path);
        return 1;
    }
    for (int step = 0; step < j->steps; step++) fprintf(file, "%.9g\n", j->out->losses[step]);
    return fclose(file) != 0;
}

// One line of the table: sharded, and without.
static int measure(job *j, const options *o, FILE *csv) {
    const char *backend = getenv("FSDP_BACKEND");
    int units = j->s.layers + (j->model == GPT);
    if (run(j, 0) || (o->losses && write_losses(j, o->losses))) return 1;
    result sharded = *j->out;
    if (run(j, 1)) return 1;
    const result *plain = j->out;
    double extra = (sharded.pass_us - plain->pass_us) / units;
    if (!backend || !*backend) backend = "default";
    fprintf(csv, "%s,%s,%d,%s,%d,%d,%.1f,%.1f,%.1f,%.1f,%.2f,%.1f,%.3f,%.6f,%.6f\n",
            model_names[j->model], case_names[j->size], j->world, backend, j->threads, units,
            sharded.pass_us, sharded.optim_us, plain->pass_us, plain->optim_us, extra,
            sharded.comm_us, sharded.hidden, sharded.losses[0], sharded.losses[j->steps - 1]);
    if (!o->csv)
        printf("%-4s %-6s %2d %-8s %5d %10.1f %10.1f %10.1f %10.1f %10.2f %10.1f %7.2f  %.4f -> "
               "%.4f\n",
               model_names[j->model], case_names[j->size], j->world, backend, j->threads,
               sharded.pass_us, sharded.optim_us, plain->pass_us, plain->optim_us, extra,
               sharded.comm_us, sharded.hidden, sharded.losses[0], sharded.losses[j->steps - 1]);
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
    for (j.model = 0; j.model < MODELS; j.model++)
        for (j.size = 0; j.size < CASES; j.size++)
            for (int w = 0; w < o->num_worlds; w++)
                for (int l = 0; l < o->num_threads && !failed; l++) {
                    if (!strstr(o->models, model_names[j.model])) continue;
                    j.s = shapes[j.model][j.size];
                    if (!strstr(o->cases, case_names[j.size]) || !j.s.layers) continue;
                    j.world = o->worlds[w], j.threads = o->threads[l], j.prefetch = o->prefetch;
                    j.plan = o->plan;
                    j.steps = o->steps ? o->steps : j.s.steps;
                    failed = measure(&j, o, csv);
                }
    return failed;
}

static int parse(int argc, char **argv, options *o) {
    const char *ranks = "2,4", *threads = "0,2";
    int steps[8] = {0}, prefetch[8] = {1}, plan[8] = {0};
    memset(o, 0, sizeof *o);
    o->models = "mlp,gpt", o->cases = "tiny,large";
    for (int i = 1; i < argc; i++) {
        const char *value = i + 1 < argc ? argv[i + 1] : "";
        if (!strcmp(argv[i], "--csv")) {
            o->csv = 1;
            continue;
        }
        if (!strcmp(argv[i], "--model")) o->models = value;
        else if (!strcmp(argv[i], "--case")) o->cases = value;
        else if (!strcmp(argv[i], "--ranks")) ranks = value;
        else if (!strcmp(argv[i], "--comm-threads")) threads = value;
        else if (!strcmp(argv[i], "--losses")) o->losses = value;
        else if (!strcmp(argv[i], "--prefetch")) {
            if (bench_parse_list(value, 0, 1, prefetch) != 1) return 0;
        } else if (!strcmp(argv[i], "--plan")) {
            if (bench_parse_list(value, 0, 1, plan) != 1) return 0;
        } else if (strcmp(argv[i], "--steps") ||
                   bench_parse_list(value, WARM_UP + 1, STEPS_MAX, steps) != 1)
            return 0;
        i++;
    }
    o->steps = steps[0], o->prefetch = prefetch[0], o->plan = plan[0];
    o->num_worlds = bench_parse_list(ranks, 1, 64, o->worlds);
    o->num_threads = bench_parse_list(threads, 0, 2, o->threads);
    return o->num_worlds && o->num_threads;
}

int main(int argc, char **argv) {
    static const char columns[] =
        "model,case,world,backend,threads,units,pass_us,optim_us,plain_pass_us,plain_optim_us,"
        "extra_us_per_unit,comm_us,hidden,loss_first,loss_last";
    options o;
    if (!parse(argc, argv, &o)) {
        fprintf(
            stderr,
            "usage: bench_step [--model mlp,gpt] [--case tiny,large,example] [--ranks 2,4] "
            "[--comm-threads 0,2] [--prefetch 0|1] [--plan 0|1] [--steps %d..%d] [--losses FILE] "
            "[--csv]\n"
            "--losses: the loss of each step, of the last line of the table\n",
            WARM_UP + 1, STEPS_MAX);
        return 2;
    }
#ifdef GEMM_BLAS
    openblas_set_num_threads(1); // the ranks are the parallelism
#endif
    FILE *csv = o.csv ? stdout : bench_csv("bench_step", columns);
    if (o.csv) printf("%s\n", columns);
    else
        printf("%-4s %-6s %2s %-8s %5s %10s %10s %10s %10s %10s %10s %7s  loss\n", "", "case", "W",
               "backend", "threads", "pass us", "optim us", "plain pass", "plain opt.",
               "extra/unit", "comm us", "hidden");
    int failed = measure_all(&o, csv);
    if (!o.csv) fclose(csv);
    return failed;
}
