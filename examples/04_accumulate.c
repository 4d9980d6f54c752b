/* 04_accumulate.c - microbatches and ranks with different numbers of tokens: three ways, one result
   cc -O2 -I. examples/04_accumulate.c -o 04_accumulate -pthread -lm && ./04_accumulate

   A step takes 4 microbatches. Reducing each one over the ranks is right, but only the sum counts:
   fsdp_set_requires_gradient_sync(model, NULL, 0) leaves gradients where they are until the last
   one, for the memory of the full gradients. And if parameters stay gathered until then, they are
   gathered once, for the memory of the full parameters. All numbers here are short binary
   fractions, whose sums are exact in any order: the three ways give the same bits.

   Rows have different lengths, so each microbatch of each rank counts another number of tokens. A
   mean for each microbatch would weigh the tokens of short rows more, and a microbatch without a
   token would be 0 / 0. Therefore each one adds the gradient of its *summed* loss, and the factor
   that divides is the number of tokens of all ranks and microbatches. The last line of the output
   shows the gradient of the means of microbatches: it is another one.

   SPDX-License-Identifier: MIT */
#define FSDP_IMPLEMENTATION
#include "fsdp.h"
#include <stdio.h>  // printf
#include <string.h> // memcmp

enum { RANKS = 4, L = 3, C = 24, MICROBATCHES = 4, ROWS = 9, IGNORED = -1 };

// Labels that count, by rank and microbatch: 64 in all. The other rows are padding.
static const int lengths[RANKS][MICROBATCHES] = {{5, 0, 7, 2}, {1, 8, 3, 6}, {4, 4, 2, 9}, {3, 1, 6, 3}};

typedef struct {
    const char *name;
    int last_only, stay; // in: reduce the last microbatch only; parameters stay gathered
    int of_means;        // in: average the mean of each microbatch instead
    unsigned long long gathers, reduces, bytes, held; // calls, bytes read, memory of slots
    float grad[L][C * C];
} way;

static float fraction(int64_t k) { return (float)((k * 37 + k / 5) % 7 - 3) / 8; }

static void my_init(void *user, const fsdp_param_view *rows) {
    (void)user;
    for (int64_t k = 0; k < rows->numel; k++)
        fsdp_view_data_f32(rows)[k] = fraction(fsdp_view_index(rows, k) + rows->ordinal) / 4;
}

// y += W x, or with `back` dx += W^T dy
static void product(float *y, const float *w, const float *x, int back) {
    for (int i = 0; i < C; i++)
        for (int j = 0; j < C; j++)
            if (back) y[j] += w[i * C + j] * x[i];
            else y[i] += w[i * C + j] * x[j];
}

// A layer is y = x + W x. The loss is the sum of `scale` times the last y, over the rows that count.
static void microbatch(fsdp_unit **h, int number, const int *labels, float scale) {
    float x[L + 1][ROWS][C], d[ROWS][C];
    for (int r = 0; r < ROWS; r++)
        for (int i = 0; i < C; i++) {
            x[0][r][i] = fraction(i + 11 * (number * ROWS + r)) / 2;
            d[r][i] = labels[r] == IGNORED ? 0 : scale; // the gradient of the loss
        }
    for (int l = 0; l < L; l++) {
        fsdp_pre_forward(h[l]);
        const float *w = fsdp_data_f32(h[l], 0);
        memcpy(x[l + 1], x[l], sizeof x[l]);
        for (int r = 0; r < ROWS; r++) product(x[l + 1][r], w, x[l][r], 0);
        fsdp_post_forward(h[l]);
    }
    for (int l = L - 1; l >= 0; l--) {
        fsdp_pre_backward(h[l]);
        const float *w = fsdp_data_f32(h[l], 0);
        float *dw = fsdp_grad_f32(h[l], 0); // added to: it may hold earlier microbatches
        for (int r = 0; r < ROWS; r++) {
            for (int k = 0; k < C * C; k++) dw[k] += d[r][k / C] * x[l][r][k % C];
            float dy[C];
            memcpy(dy, d[r], sizeof dy);
            product(d[r], w, dy, 1);
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

    // All tokens of the step, before its first backward. Ranks need the same number.
    const int *mine = lengths[fsdp_rank(world)];
    double tokens = 0;
    for (int m = 0; m < MICROBATCHES; m++) tokens += mine[m];
    if (!status) status = fsdp_all_reduce(world, NULL, &tokens, 1, FSDP_F64, FSDP_SUM);
    if (!status && !out->of_means)
        status = fsdp_set_gradient_divide_factor(model, NULL, tokens);

    for (int m = 0; m < MICROBATCHES && !status; m++) {
        const int last = m == MICROBATCHES - 1;
        float scale = 1;
        int labels[ROWS];
        for (int r = 0; r < ROWS; r++) labels[r] = r < mine[m] ? r : IGNORED;
        if (out->of_means) scale = mine[m] ? 1.0f / (float)(mine[m] * MICROBATCHES) : 0;
        if (out->last_only) fsdp_set_requires_gradient_sync(model, NULL, last);
        if (out->stay) fsdp_set_reshard_after_backward(model, NULL, last);
        microbatch(h, fsdp_rank(world) * MICROBATCHES + m, labels, scale);
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
    static way ways[4] = {{"every microbatch is reduced", 0, 0, 0, 0, 0, 0, 0, {{0}}},
                          {"only the last one is", 1, 0, 0, 0, 0, 0, 0, {{0}}},
                          {"and parameters stay gathered", 1, 1, 0, 0, 0, 0, 0, {{0}}},
                          {"the mean of each microbatch", 0, 0, 1, 0, 0, 0, 0, {{0}}}};
    fsdp_spawn_desc desc = FSDP_ZERO;
    desc.threads = 1;
    desc.num_ranks = RANKS;
    int same = 1;
    printf("%d layers, %d microbatches      all-gathers reduce-scatters  bytes read  slots\n", L,
           MICROBATCHES);
    for (int i = 0; i < 4; i++) {
        const way *w = &ways[i];
        if (fsdp_spawn(&desc, step, &ways[i])) return 1;
        printf("%-30s %10llu %15llu %11llu %6llu\n", w->name, w->gathers, w->reduces, w->bytes,
               w->held);
        if (!w->of_means) same &= !memcmp(w->grad, ways[0].grad, sizeof w->grad);
    }
    const float *g = ways[0].grad[0], *means = ways[3].grad[0];
    printf("gradients %g %g %g ...: %s\n", (double)g[0], (double)g[1], (double)g[2],
           same ? "the same bits in the first three" : "NOT the same");
    printf("of means  %g %g %g ...: not the gradient of the mean over tokens\n", (double)means[0],
           (double)means[1], (double)means[2]);
    return !same || !memcmp(ways[0].grad, ways[3].grad, sizeof ways[0].grad);
}
