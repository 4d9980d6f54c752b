/* 04_accumulate.c - gradients of several microbatches: three ways, one result
   cc -O2 -I. examples/04_accumulate.c -o 04_accumulate -pthread -lm && ./04_accumulate

   A step takes 4 microbatches. Reducing each one over the ranks is right, but only the sum counts:
   fsdp_set_requires_gradient_sync(model, NULL, 0) leaves gradients where they are until the last
   one, for the memory of the full gradients. And if parameters stay gathered until then, they are
   gathered once, for the memory of the full parameters. All numbers here are short binary
   fractions, whose sums are exact in any order: the three ways give the same bits.

   SPDX-License-Identifier: MIT */
#define FSDP_IMPLEMENTATION
#include "fsdp.h"
#include <stdio.h>  // printf
#include <string.h> // memcmp

enum { RANKS = 4, L = 3, C = 24, MICROBATCHES = 4 };

typedef struct {
    const char *name;
    int last_only, stay; // in: reduce the last microbatch only; parameters stay gathered
    unsigned long long gathers, reduces, bytes, held; // calls, bytes read, memory of slots
    float grad[L][C * C];
} way;

static float fraction(int64_t k) { return (float)((k * 37 + k / 5) % 7 - 3) / 8; }

static void my_init(void *user, const fsdp_param_view *rows) {
    (void)user;
    for (int64_t k = 0; k < rows->numel; k++)
        fsdp_view_data_f32(rows)[k] = fraction(fsdp_view_index(rows, k) + rows->ordinal) / 4;
}

// A layer is y = x + W x; the loss is the sum of the last y.
static void microbatch(fsdp_unit **h, int number) {
    float x[L + 1][C], d[L + 1][C];
    for (int i = 0; i < C; i++) x[0][i] = fraction(i + 11 * number) / 2, d[L][i] = 1;
    for (int l = 0; l < L; l++) {
        fsdp_pre_forward(h[l]);
        const float *w = fsdp_data_f32(h[l], 0);
        for (int i = 0; i < C; i++) {
            x[l + 1][i] = x[l][i];
            for (int j = 0; j < C; j++) x[l + 1][i] += w[i * C + j] * x[l][j];
        }
        fsdp_post_forward(h[l]);
    }
    for (int l = L - 1; l >= 0; l--) {
        fsdp_pre_backward(h[l]);
        const float *w = fsdp_data_f32(h[l], 0);
        float *dw = fsdp_grad_f32(h[l], 0);
        for (int i = 0; i < C; i++) d[l][i] = d[l + 1][i];
        for (int i = 0; i < C; i++) {
            for (int j = 0; j < C; j++) { // added: the buffer may hold earlier microbatches
                dw[i * C + j] += d[l + 1][i] * x[l][j];
                d[l][j] += d[l + 1][i] * w[i * C + j];
            }
        }
        fsdp_post_backward(h[l]);
    }
}

static int step(fsdp_world *world, void *arg) {
    way *out = (way *)arg;
    fsdp_model *model;
    fsdp_unit *h[L];
    fsdp_model_desc md = FSDP_ZERO;
    if (out->stay) md.reshard_after_forward = FSDP_RESHARD_NEVER;
    fsdp_status status = fsdp_model_create(world, &md, &model);
    for (int l = 0; l < L && !status; l++) {
        fsdp_param_desc p = fsdp_mat("w", C, C);
        fsdp_unit_desc ud = FSDP_ZERO;
        ud.params = &p, ud.num_params = 1;
        status = fsdp_fully_shard(model, &ud, &h[l]);
    }
    if (!status) status = fsdp_init_params(model, my_init, NULL);

    for (int m = 0; m < MICROBATCHES && !status; m++) {
        const int last = m == MICROBATCHES - 1;
        if (out->last_only) fsdp_set_requires_gradient_sync(model, NULL, last);
        if (out->stay) fsdp_set_reshard_after_backward(model, NULL, last);
        microbatch(h, fsdp_rank(world) * MICROBATCHES + m);
        status = fsdp_finalize_backward(model); // after each microbatch
    }

    fsdp_counters counters = FSDP_ZERO;
    fsdp_memory memory = FSDP_ZERO;
    if (!status) status = fsdp_model_counters(model, &counters);
    if (!status) status = fsdp_model_memory(model, &memory);
    for (int l = 0; l < L && !status; l++) // all ranks take part, rank 0 keeps it
        status = fsdp_param_full_grad(h[l], 0, fsdp_rank(world) == 0 ? out->grad[l] : NULL);
    if (status || fsdp_rank(world) != 0) return (int)status;
    out->gathers = counters.calls[FSDP_OP_ALL_GATHER];
    out->reduces = counters.calls[FSDP_OP_REDUCE_SCATTER];
    out->bytes = counters.bytes[FSDP_OP_ALL_GATHER] + counters.bytes[FSDP_OP_REDUCE_SCATTER];
    out->held = (unsigned long long)(memory.pool_bytes[FSDP_POOL_GATHER] +
                                     memory.pool_bytes[FSDP_POOL_GRAD]);
    return FSDP_OK;
}

int main(void) {
    static way ways[3] = {{"every microbatch is reduced", 0, 0, 0, 0, 0, 0, {{0}}},
                          {"only the last one is", 1, 0, 0, 0, 0, 0, {{0}}},
                          {"and parameters stay gathered", 1, 1, 0, 0, 0, 0, {{0}}}};
    fsdp_spawn_desc desc = FSDP_ZERO;
    desc.threads = 1;
    desc.num_ranks = RANKS;
    int same = 1;
    printf("%d layers, %d microbatches      all-gathers reduce-scatters  bytes read  slots\n", L,
           MICROBATCHES);
    for (int i = 0; i < 3; i++) {
        const way *w = &ways[i];
        if (fsdp_spawn(&desc, step, &ways[i])) return 1;
        printf("%-30s %10llu %15llu %11llu %6llu\n", w->name, w->gathers, w->reduces, w->bytes,
               w->held);
        same &= !memcmp(w->grad, ways[0].grad, sizeof w->grad);
    }
    const float *g = ways[0].grad[0];
    printf("gradients %g %g %g ...: %s\n", (double)g[0], (double)g[1], (double)g[2],
           same ? "the same bits in all three" : "NOT the same");
    return !same;
}
