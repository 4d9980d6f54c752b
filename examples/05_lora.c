/* 05_lora.c - fine-tuning by low-rank adapters: a frozen bf16 base, small trainable matrices
   cc -O2 -I. examples/05_lora.c -o 05_lora -pthread -lm
   ./05_lora                          one rank
   tools/fsdprun -n 4 ./05_lora       four ranks, each with a quarter of every matrix

   A layer is y = x + W x + B (A x), where W (C,C) is frozen and A (R,C), B (C,R) are adapters. All
   of them are sharded and gathered, whatever the dtypes; only adapters have gradients and
   optimizer states.

   SPDX-License-Identifier: MIT */
#define FSDP_IMPLEMENTATION
#include "fsdp.h"
#include "fsdp_optim.h"
#include <math.h>   // sin
#include <stdio.h>  // printf
#include <string.h> // memcpy, memcmp

enum { L = 2, C = 96, R = 4, STEPS = 150 };
enum { BASE, DOWN, UP }; // parameters of a unit: W, A, B

static void my_init(void *user, const fsdp_param_view *rows) {
    (void)user;
    for (int64_t k = 0; k < rows->numel; k++) { // B begins as zero: training starts from the base
        const double wave = sin(37.0 * (double)fsdp_view_index(rows, k) + rows->ordinal);
        const float value = rows->index == UP ? 0.0f : (float)(0.05 * wave);
        if (rows->index == BASE)
            fsdp_convert((uint16_t *)rows->data + k, FSDP_BF16, &value, FSDP_F32, 1);
        else fsdp_view_data_f32(rows)[k] = value;
    }
}

// out(rows) += m(rows,cols) v(cols); and transposed: out(cols) += m(rows,cols)' v(rows).
static void add_product(float *out, const float *m, const float *v, int rows, int cols) {
    for (int i = 0; i < rows; i++)
        for (int j = 0; j < cols; j++) out[i] += m[i * cols + j] * v[j];
}
static void add_transposed(float *out, const float *m, const float *v, int rows, int cols) {
    for (int i = 0; i < rows; i++)
        for (int j = 0; j < cols; j++) out[j] += m[i * cols + j] * v[i];
}
static void add_outer(float *m, const float *u, const float *v, int rows, int cols) {
    for (int i = 0; i < rows; i++)
        for (int j = 0; j < cols; j++) m[i * cols + j] += u[i] * v[j];
}

// t is A x, kept for backward.
static void layer_forward(fsdp_unit *unit, const float *x, float *t, float *y) {
    static float w[C * C];
    fsdp_convert(w, FSDP_F32, fsdp_data_as(unit, BASE, FSDP_BF16), FSDP_BF16, C * C);
    memcpy(y, x, C * sizeof *y);
    memset(t, 0, R * sizeof *t);
    add_product(y, w, x, C, C);
    add_product(t, fsdp_data_f32(unit, DOWN), x, R, C);
    add_product(y, fsdp_data_f32(unit, UP), t, C, R);
}
static void layer_backward(fsdp_unit *unit, const float *x, const float *t, const float *dy,
                           float *dx) {
    static float w[C * C];
    float dt[R] = {0};
    fsdp_convert(w, FSDP_F32, fsdp_data_as(unit, BASE, FSDP_BF16), FSDP_BF16, C * C);
    memcpy(dx, dy, C * sizeof *dx);
    add_transposed(dx, w, dy, C, C); // through the base, but there is no gradient of it
    add_transposed(dt, fsdp_data_f32(unit, UP), dy, C, R);
    add_transposed(dx, fsdp_data_f32(unit, DOWN), dt, R, C);
    add_outer(fsdp_grad_f32(unit, UP), dy, t, C, R);
    add_outer(fsdp_grad_f32(unit, DOWN), dt, x, R, C);
}

// Forward and backward of this rank's sample; its loss. The task: the input in reverse order.
static double sample(fsdp_unit **h, int step, int rank) {
    float x[L + 1][C], t[L][R], d[L + 1][C];
    double loss = 0.0;
    for (int i = 0; i < C; i++) x[0][i] = (float)sin(0.7 * (i + 1) * (1 + (step + rank) % 2));
    for (int l = 0; l < L; l++) {
        fsdp_pre_forward(h[l]);
        layer_forward(h[l], x[l], t[l], x[l + 1]);
        fsdp_post_forward(h[l]);
    }
    for (int i = 0; i < C; i++) {
        d[L][i] = x[L][i] - x[0][C - 1 - i];
        loss += 0.5 * (double)d[L][i] * (double)d[L][i];
    }
    for (int l = L - 1; l >= 0; l--) {
        fsdp_pre_backward(h[l]);
        layer_backward(h[l], x[l], t[l], d[l + 1], d[l]);
        fsdp_post_backward(h[l]);
    }
    return loss;
}

// All of the base, in one piece on every rank.
static fsdp_status read_base(fsdp_unit **h, uint16_t *base) {
    for (int l = 0; l < L; l++) {
        fsdp_status status = fsdp_param_full(h[l], BASE, base + l * C * C);
        if (status) return status;
    }
    return FSDP_OK;
}

int main(void) {
    fsdp_world *world;
    fsdp_model *model;
    fsdp_unit *h[L];
    fsdp_adamw *opt;
    if (fsdp_init(NULL, &world) || fsdp_model_create(world, NULL, &model)) return 1;
    for (int l = 0; l < L; l++) {
        fsdp_param_desc p[3] = {fsdp_mat("W", C, C), fsdp_mat("A", R, C), fsdp_mat("B", C, R)};
        p[BASE].frozen = 1;
        p[BASE].dtype = FSDP_BF16; // dtype of the stored shard; adapters are f32
        fsdp_unit_desc ud = FSDP_ZERO;
        ud.params = p, ud.num_params = 3;
        if (fsdp_fully_shard(model, &ud, &h[l])) return 1;
    }
    if (fsdp_init_params(model, my_init, NULL) || fsdp_adamw_create(model, NULL, &opt)) return 1;

    static uint16_t before[L * C * C], after[L * C * C];
    if (read_base(h, before)) return 1;
    for (int step = 0; step < STEPS; step++) {
        double loss = sample(h, step, fsdp_rank(world));
        if (fsdp_finalize_backward(model)) return 1;
        if (fsdp_adamw_step(opt, 0.01) || fsdp_zero_grad(model)) return 1;
        if (fsdp_all_reduce(world, NULL, &loss, 1, FSDP_F64, FSDP_SUM)) return 1;
        if (fsdp_rank(world) == 0 && (step % 50 == 0 || step == STEPS - 1))
            printf("step %3d  loss %.3f\n", step, loss / fsdp_world_size(world));
    }

    fsdp_memory memory;
    if (read_base(h, after) || fsdp_model_memory(model, &memory)) return 1;
    const int unchanged = !memcmp(before, after, sizeof before);
    if (fsdp_rank(world) == 0) {
        printf("base      %d parameters, adapters %d\n", L * C * C, L * 2 * R * C);
        printf("shards    %lld bytes on this rank\n",
               (long long)memory.pool_bytes[FSDP_POOL_SHARD]);
        printf("gradients %lld bytes of shards, %lld while a layer is in backward\n",
               (long long)memory.pool_bytes[FSDP_POOL_SHARD_GRAD],
               (long long)memory.pool_bytes[FSDP_POOL_GRAD]);
        printf("the base is %s\n", unchanged ? "unchanged" : "NOT unchanged");
    }
    return fsdp_shutdown(world) != FSDP_OK || !unchanged;
}
