/* 10_muon.c - Muon for the matrices and AdamW for the rest, on 4 ranks, compared with only AdamW
   cc -O2 -I. examples/10_muon.c -o 10_muon -pthread -lm && ./10_muon
   with OpenBLAS: add -DUSE_CBLAS $(pkg-config --cflags --libs openblas)

   Each rank computes some of the matrices whole, sends the result to those that have the rows, and
   keeps momentum and moments of its own rows. fsdp_muon_describe tells who does what.

   SPDX-License-Identifier: MIT */
#define FSDP_IMPLEMENTATION
#include "fsdp_muon.h" // includes fsdp_optim.h and fsdp.h
#include <math.h>      // sin
#include <stdio.h>     // printf
#include <string.h>    // memcpy
#ifdef USE_CBLAS
#include <cblas.h>
#endif

enum { RANKS = 4, L = 4, C = 32, SAMPLES = 3, STEPS = 60 };

typedef struct {
    int muon;          // in
    float loss[STEPS]; // out
    char how[320];
} way;

#ifdef USE_CBLAS // a product of another library in place of fsdp_host_gemm
static fsdp_status by_cblas(void *user, void *stream, int64_t m, int64_t n, int64_t k, float alpha,
                            const void *a, int64_t lda, int a_transposed, const void *b,
                            int64_t ldb, int b_transposed, float beta, void *c, int64_t ldc,
                            fsdp_dtype dtype) {
    (void)user, (void)stream;
    if (dtype != FSDP_F32) return FSDP_ERR_UNSUPPORTED;
    cblas_sgemm(CblasRowMajor, a_transposed ? CblasTrans : CblasNoTrans,
                b_transposed ? CblasTrans : CblasNoTrans, (int)m, (int)n, (int)k, alpha,
                (const float *)a, (int)lda, (const float *)b, (int)ldb, beta, (float *)c, (int)ldc);
    return FSDP_OK;
}
#endif

static void my_init(void *user, const fsdp_param_view *rows) {
    (void)user;
    for (int64_t k = 0; k < rows->numel; k++)
        fsdp_view_data_f32(rows)[k] =
            rows->ndim == 2 ? 0.05f * (float)sin(37.0 * (double)fsdp_view_index(rows, k)) : 0;
}

// Returns a negative group for the parameters that Muon updates: AdamW leaves them out.
static int others(void *user, const fsdp_param_view *param) {
    return fsdp_muon_takes((const fsdp_muon *)user, param) ? -1 : 0;
}

// Forward and backward of a sample: y = x + W x + b in each layer; the task: the input reversed.
static float train(fsdp_unit **h, int place) {
    float x[L + 1][C], d[C], next[C], loss = 0;
    for (int i = 0; i < C; i++) x[0][i] = (float)sin(0.7 * (i + 1) * (i + 1) * (1 + place));
    for (int l = 0; l < L; l++) {
        const float *w = fsdp_data_f32(h[l], 0), *b = fsdp_data_f32(h[l], 1);
        for (int i = 0; i < C; i++) {
            x[l + 1][i] = x[l][i] + b[i];
            for (int j = 0; j < C; j++) x[l + 1][i] += w[i * C + j] * x[l][j];
        }
    }
    for (int i = 0; i < C; i++) {
        d[i] = (x[L][i] - x[0][C - 1 - i]) / (float)SAMPLES;
        loss += d[i] * d[i] * (float)SAMPLES / 2;
    }
    for (int l = L - 1; l >= 0; l--) {
        const float *w = fsdp_data_f32(h[l], 0);
        float *dw = fsdp_grad_f32(h[l], 0), *db = fsdp_grad_f32(h[l], 1);
        for (int i = 0; i < C; i++) next[i] = d[i], db[i] += d[i];
        for (int i = 0; i < C; i++)
            for (int j = 0; j < C; j++)
                dw[i * C + j] += d[i] * x[l][j], next[j] += w[i * C + j] * d[i];
        memcpy(d, next, sizeof d);
    }
    return loss;
}

static int rank_main(fsdp_world *world, void *arg) {
    way *w = (way *)arg;
    fsdp_model_desc desc = FSDP_ZERO;
    fsdp_muon_desc md = fsdp_muon_defaults();
    fsdp_adamw_desc ad = fsdp_adamw_defaults();
    fsdp_model *model;
    fsdp_unit *h[L];
    fsdp_muon *muon = NULL;
    fsdp_adamw *adamw;
    desc.reshard_after_forward = FSDP_RESHARD_NEVER; // so that all layers are open at once
    if (fsdp_model_create(world, &desc, &model)) return 1;
    for (int l = 0; l < L; l++) {
        fsdp_param_desc params[2] = {fsdp_mat("w", C, C), fsdp_vec("b", C)};
        fsdp_unit_desc ud = FSDP_ZERO;
        ud.params = params, ud.num_params = 2;
        if (fsdp_fully_shard(model, &ud, &h[l])) return 1;
    }
    if (fsdp_init_params(model, my_init, NULL)) return 1;
    md.adjust = FSDP_MUON_MATCH_RMS_ADAMW; // steps of AdamW's length, and so its learning rate
#ifdef USE_CBLAS
    md.gemm = by_cblas;
#endif
    if (w->muon && fsdp_muon_create(model, &md, &muon)) return 1;
    ad.group = others, ad.user = muon;
    if (fsdp_adamw_create(model, &ad, &adamw)) return 1;
    for (int s = 0; s < STEPS; s++) {
        float loss = 0;
        for (int l = 0; l < L; l++) fsdp_pre_forward(h[l]), fsdp_post_forward(h[l]);
        for (int l = 0; l < L; l++) fsdp_pre_backward(h[l]);
        for (int i = 0; i < SAMPLES; i++) loss += train(h, fsdp_rank(world) * SAMPLES + i);
        for (int l = L - 1; l >= 0; l--) fsdp_post_backward(h[l]);
        if (fsdp_finalize_backward(model)) return 1;
        const double lr = 0.04 * (1 - (double)s / (double)STEPS);
        if (muon && fsdp_muon_step(muon, lr)) return 1;
        if (fsdp_adamw_step(adamw, lr) || fsdp_zero_grad(model)) return 1;
        if (fsdp_all_reduce(world, NULL, &loss, 1, FSDP_F32, FSDP_SUM)) return 1;
        if (fsdp_rank(world) == 0) w->loss[s] = loss / (RANKS * SAMPLES);
    }
    if (fsdp_rank(world) == 0 && muon) (void)fsdp_muon_describe(muon, w->how, sizeof w->how);
    return 0;
}

int main(void) {
    static way ways[2] = {{0, {0}, ""}, {1, {0}, ""}};
    fsdp_spawn_desc spawn = FSDP_ZERO;
    spawn.num_ranks = RANKS, spawn.threads = 1;
    for (int i = 0; i < 2; i++) {
        if (fsdp_spawn(&spawn, rank_main, &ways[i])) return 1;
        printf("%-14s loss %.4f -> %.4f\n", i ? "Muon and AdamW" : "AdamW", (double)ways[i].loss[0],
               (double)ways[i].loss[STEPS - 1]);
    }
    printf("%s\n", ways[1].how);
    return !(ways[1].loss[STEPS - 1] < ways[1].loss[0] / 10);
}
