/* 02_mlp.c - mixed precision, gradients sent as bf16, and gradient accumulation
   cc -O2 -I. examples/02_mlp.c -o 02_mlp -pthread -lm && ./02_mlp

   A multilayer perceptron learns sin(3x)*cos(2y). Master weights and optimizer are f32 and sharded;
   layers see bf16 weights and write bf16 gradients, which travel and are averaged in f32. A step
   takes 12 microbatches. Four ranks do three each, one rank does all twelve; only the last one of
   a rank is reduced over the ranks, the others stay where they are (no_sync). The three trainings,
   on 4 ranks, on 4 ranks that send the summed f32 gradients as bf16 (fsdp_compress.h), and on one
   rank, have the same result.

   SPDX-License-Identifier: MIT */
#define FSDP_IMPLEMENTATION
#include "fsdp.h"
#include "fsdp_compress.h"
#include "fsdp_optim.h"
#include <math.h>   // cos, fabs, sin, tanh
#include <stdio.h>  // printf
#include <string.h> // memset

enum { LAYERS = 3, WIDTH = 64, SAMPLES = 8, MICROBATCHES = 12, STEPS = 400 };
static const int size_of[LAYERS + 1] = {2, WIDTH, WIDTH, 1}; // channels before and after a layer

typedef struct {
    const char *name;
    int ranks, compress;
    double first, last;       // out: mean loss of the first and the last 20 steps
    unsigned long long bytes; // out: of gradients that rank 0 receives in a step
} training;

static double noise(uint64_t x) { // in [-1, 1), a function of x alone
    x = (x + 1) * 0x9E3779B97F4A7C15u;
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
    x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
    return (double)((x ^ (x >> 31)) >> 11) / 4503599627370496.0 - 1.0; // 2^52
}

static void init_rows(void *user, const fsdp_param_view *rows) {
    (void)user;
    const double scale = rows->ndim == 2 ? 1.0 / sqrt((double)rows->shape[1]) : 0.0;
    for (int64_t k = 0; k < rows->numel; k++) {
        const uint64_t place = (uint64_t)(fsdp_view_index(rows, k) + 100000 * rows->ordinal);
        fsdp_view_data_f32(rows)[k] = (float)(scale * noise(place));
    }
}

// Parameter `index` of a unit as f32: w has room for it.
static void read_param(fsdp_unit *unit, int index, float *w, int numel) {
    fsdp_convert(w, FSDP_F32, fsdp_data_as(unit, index, FSDP_BF16), FSDP_BF16, numel);
}

// Gradients are added to what the buffer holds, which may be that of earlier microbatches.
static void add_grad(fsdp_unit *unit, int index, const float *g, int numel) {
    float sum[WIDTH * WIDTH];
    void *grad = fsdp_grad_as(unit, index, FSDP_BF16);
    fsdp_convert(sum, FSDP_F32, grad, FSDP_BF16, numel);
    for (int k = 0; k < numel; k++) sum[k] += g[k];
    fsdp_convert(grad, FSDP_BF16, sum, FSDP_F32, numel);
}

// y(out) = tanh(w(out, in) x + b), without tanh in the last layer.
static void layer_forward(fsdp_unit *unit, int l, float x[SAMPLES][WIDTH],
                          float y[SAMPLES][WIDTH]) {
    const int in = size_of[l], out = size_of[l + 1];
    float w[WIDTH * WIDTH], b[WIDTH];
    read_param(unit, 0, w, out * in);
    read_param(unit, 1, b, out);
    for (int s = 0; s < SAMPLES; s++) {
        for (int o = 0; o < out; o++) {
            float sum = b[o];
            for (int i = 0; i < in; i++) sum += w[o * in + i] * x[s][i];
            y[s][o] = l < LAYERS - 1 ? tanhf(sum) : sum;
        }
    }
}

// d holds the gradient of y and becomes that of x.
static void layer_backward(fsdp_unit *unit, int l, float x[SAMPLES][WIDTH], float y[SAMPLES][WIDTH],
                           float d[SAMPLES][WIDTH]) {
    const int in = size_of[l], out = size_of[l + 1];
    float w[WIDTH * WIDTH], dw[WIDTH * WIDTH], db[WIDTH];
    memset(dw, 0, sizeof dw);
    memset(db, 0, sizeof db);
    read_param(unit, 0, w, out * in);
    for (int s = 0; s < SAMPLES; s++) {
        float dx[WIDTH] = {0};
        for (int o = 0; o < out; o++) {
            const float slope = l < LAYERS - 1 ? 1.0f - y[s][o] * y[s][o] : 1.0f;
            const float g = d[s][o] * slope;
            db[o] += g;
            for (int i = 0; i < in; i++) dw[o * in + i] += g * x[s][i], dx[i] += g * w[o * in + i];
        }
        memcpy(d[s], dx, sizeof dx);
    }
    add_grad(unit, 0, dw, out * in);
    add_grad(unit, 1, db, out);
}

// Forward and backward of one microbatch; its loss, a mean over samples and microbatches.
static double microbatch(fsdp_unit **layer, uint64_t first_sample, float share) {
    float x[LAYERS + 1][SAMPLES][WIDTH], d[SAMPLES][WIDTH];
    double loss = 0.0;
    for (int s = 0; s < SAMPLES; s++) {
        for (int i = 0; i < 2; i++) {
            x[0][s][i] = (float)noise(1000000 + 2 * (first_sample + (uint64_t)s) + (uint64_t)i);
        }
    }
    for (int l = 0; l < LAYERS; l++) {
        fsdp_pre_forward(layer[l]);
        layer_forward(layer[l], l, x[l], x[l + 1]);
        fsdp_post_forward(layer[l]);
    }
    for (int s = 0; s < SAMPLES; s++) {
        const double wanted = sin(3.0 * (double)x[0][s][0]) * cos(2.0 * (double)x[0][s][1]);
        const double error = (double)x[LAYERS][s][0] - wanted;
        loss += error * error * (double)share;
        d[s][0] = 2.0f * (float)error * share;
    }
    for (int l = LAYERS - 1; l >= 0; l--) {
        fsdp_pre_backward(layer[l]);
        layer_backward(layer[l], l, x[l], x[l + 1], d);
        fsdp_post_backward(layer[l]);
    }
    return loss;
}

static int train(fsdp_world *world, void *arg) {
    training *t = (training *)arg;
    const int rank = fsdp_rank(world), mine = MICROBATCHES / fsdp_world_size(world);
    fsdp_unit *layer[LAYERS];
    fsdp_adamw *opt;
    fsdp_model *model;
    fsdp_model_desc md = FSDP_ZERO;
    md.param_dtype = FSDP_BF16; // what layers see
    md.reduce_dtype = FSDP_F32; // in what gradients are averaged
    fsdp_status status = fsdp_model_create(world, &md, &model);
    for (int l = 0; l < LAYERS && !status; l++) {
        fsdp_param_desc params[2] = {fsdp_mat("w", size_of[l + 1], size_of[l]),
                                     fsdp_vec("b", size_of[l + 1])};
        fsdp_unit_desc ud = FSDP_ZERO;
        ud.params = params;
        ud.num_params = 2;
        status = fsdp_fully_shard(model, &ud, &layer[l]);
    }
    if (!status) status = fsdp_init_params(model, init_rows, NULL);
    if (!status) status = fsdp_adamw_create(model, NULL, &opt);
    if (!status && t->compress) status = fsdp_compress_create(model, NULL);

    double first = 0.0, last = 0.0;
    for (int step = 0; step < STEPS && !status; step++) {
        double loss = 0.0;
        for (int m = 0; m < mine && !status; m++) {
            const int index = (step * MICROBATCHES) + rank * mine + m; // among all microbatches
            fsdp_set_requires_gradient_sync(model, NULL, m == mine - 1);
            loss += microbatch(layer, (uint64_t)index * SAMPLES, 1.0f / (float)(mine * SAMPLES));
            status = fsdp_finalize_backward(model);
        }
        if (!status) status = fsdp_adamw_step(opt, 0.003);
        if (!status) status = fsdp_zero_grad(model);
        if (!status) status = fsdp_all_reduce(world, NULL, &loss, 1, FSDP_F64, FSDP_SUM);
        loss /= fsdp_world_size(world);
        if (step < 20) first += loss / 20;
        if (step >= STEPS - 20) last += loss / 20;
    }
    fsdp_counters c = FSDP_ZERO;
    if (!status) status = fsdp_model_counters(model, &c);
    if (rank != 0) return (int)status;
    t->first = first, t->last = last;
    t->bytes = c.bytes[t->compress ? FSDP_OP_ALL_TO_ALL : FSDP_OP_REDUCE_SCATTER] / STEPS;
    return (int)status;
}

int main(void) {
    static training all[3] = {
        {"4 ranks", 4, 0, 0, 0, 0}, {"4 ranks, bf16", 4, 1, 0, 0, 0}, {"1 rank", 1, 0, 0, 0, 0}};
    fsdp_spawn_desc desc = FSDP_ZERO;
    desc.threads = 1; // ranks as threads write to this program's memory; processes would not
    int good = 1;
    for (int i = 0; i < 3; i++) {
        const training *t = &all[i];
        desc.num_ranks = t->ranks;
        if (fsdp_spawn(&desc, train, &all[i])) return 1;
        printf("%-14s loss %.6f -> %.6f, rank 0 receives %llu bytes of gradients in each step\n",
               t->name, t->first, t->last, t->bytes);
        good &= t->last < 0.1 * t->first && fabs(t->last - all[0].last) < 1e-3 * t->first;
    }
    puts(good ? "the same, and learnt" : "NOT as expected");
    return !good;
}
