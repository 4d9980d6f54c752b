/* 09_checkpoint.c - saves during training, then continues with the same ranks and with fewer
   cc -O2 -I. examples/09_checkpoint.c -o 09_checkpoint -pthread -lm && ./09_checkpoint

   A training of 40 steps on 4 ranks saves after every 10 of them, asynchronously. Then it starts
   again from step 20: 4 ranks compute the same bits, 3 ranks the same except for rounding.
   ./09_checkpoint DIR keeps the files in DIR, to look at.

   SPDX-License-Identifier: MIT */
#define _DEFAULT_SOURCE // mkdtemp
#define FSDP_IMPLEMENTATION
#include "fsdp_checkpoint.h" // includes fsdp.h
#include "fsdp_optim.h"
#include <math.h>   // fabsf, sin
#include <stdio.h>  // printf
#include <stdlib.h> // mkdtemp, system
#include <string.h> // memcmp

enum { L = 3, C = 32, SAMPLES = 12, STEPS = 40, EVERY = 10 }; // SAMPLES: of a step, on all ranks

typedef struct {
    const char *dir;
    int ranks;         // in
    int resume;        // in: continue from the newest checkpoint up to this step; -1: start from 0
    float loss[STEPS]; // out
} job;

static void my_init(void *user, const fsdp_param_view *rows) {
    (void)user;
    for (int64_t k = 0; k < rows->numel; k++)
        fsdp_view_data_f32(rows)[k] = 0.1f * (float)sin(37.0 * (double)fsdp_view_index(rows, k));
}

// Forward and backward of one sample: y = x + W x in each layer; the task: the input reversed.
static float train(fsdp_unit **h, float scale, int place) {
    float x[L + 1][C], d[C], next[C], loss = 0;
    for (int i = 0; i < C; i++) x[0][i] = (float)sin(0.7 * (i + 1) * (i + 1) * (1 + place % 24));
    for (int l = 0; l < L; l++) {
        const float *w = fsdp_data_f32(h[l], 0);
        for (int i = 0; i < C; i++) {
            x[l + 1][i] = x[l][i];
            for (int j = 0; j < C; j++) x[l + 1][i] += w[i * C + j] * x[l][j];
        }
    }
    for (int i = 0; i < C; i++) {
        d[i] = scale * (x[L][i] - x[0][C - 1 - i]);
        loss += d[i] * d[i] / scale / 2;
    }
    for (int l = L - 1; l >= 0; l--) {
        const float *w = fsdp_data_f32(h[l], 0);
        float *dw = fsdp_grad_f32(h[l], 0);
        for (int i = 0; i < C; i++) next[i] = d[i];
        for (int i = 0; i < C; i++)
            for (int j = 0; j < C; j++)
                dw[i * C + j] += d[i] * x[l][j], next[j] += w[i * C + j] * d[i];
        memcpy(d, next, sizeof d);
    }
    return loss;
}

static int rank_main(fsdp_world *world, void *arg) {
    job *j = (job *)arg;
    fsdp_model_desc desc = FSDP_ZERO;
    fsdp_model *model;
    fsdp_unit *h[L];
    fsdp_adamw *opt;
    desc.reshard_after_forward = FSDP_RESHARD_NEVER; // so that all layers are open at once
    if (fsdp_model_create(world, &desc, &model)) return 1;
    for (int l = 0; l < L; l++) {
        static const char *const names[L] = {"h.0", "h.1", "h.2"}; // a parameter is h.0.w in files
        fsdp_param_desc w = fsdp_mat("w", C, C);
        fsdp_unit_desc ud = FSDP_ZERO;
        ud.name = names[l], ud.params = &w, ud.num_params = 1;
        if (fsdp_fully_shard(model, &ud, &h[l])) return 1;
    }
    if (fsdp_init_params(model, my_init, NULL) || fsdp_adamw_create(model, NULL, &opt)) return 1;

    // The checkpoint of this model: parameters, what AdamW keeps, and our place in the data.
    int64_t place = 0, step = -1; // samples that all ranks have seen
    fsdp_checkpoint_blob blob = {"place", &place, sizeof place, 0, 0};
    fsdp_checkpoint_desc cd = FSDP_ZERO;
    fsdp_checkpoint *ck;
    char path[4096];
    cd.blobs = &blob, cd.num_blobs = 1;
    if (fsdp_checkpoint_create(model, &cd, &ck)) return 1; // after the optimizer
    if (j->resume >= 0) {
        if (fsdp_checkpoint_find(ck, j->dir, j->resume, path, sizeof path, &step)) return 1;
        if (step >= 0 && fsdp_checkpoint_load(ck, path, NULL)) return 1; // all ranks, or none
    }
    const int mine = SAMPLES / j->ranks;
    for (int s = step < 0 ? 0 : (int)step; s < STEPS; s++) {
        float loss = 0;
        for (int l = 0; l < L; l++) fsdp_pre_forward(h[l]), fsdp_post_forward(h[l]);
        for (int l = 0; l < L; l++) fsdp_pre_backward(h[l]);
        for (int i = 0; i < mine; i++)
            loss += train(h, 1.0f / (float)mine, (int)place + fsdp_rank(world) * mine + i);
        for (int l = 0; l < L; l++) fsdp_post_backward(h[l]);
        if (fsdp_finalize_backward(model)) return 1;
        if (fsdp_adamw_step(opt, 0.003) || fsdp_zero_grad(model)) return 1;
        if (fsdp_all_reduce(world, NULL, &loss, 1, FSDP_F32, FSDP_SUM)) return 1;
        if (fsdp_rank(world) == 0) j->loss[s] = loss / (float)j->ranks;
        place += SAMPLES;
        if (j->resume < 0 && (s + 1) % EVERY == 0 && fsdp_checkpoint_save_async(ck, j->dir, s + 1))
            return 1;                                 // returns when all is copied
        if (fsdp_checkpoint_poll(ck, NULL)) return 1; // completes a save whose files are written
    }
    fsdp_checkpoint_report report = FSDP_ZERO;
    if (fsdp_checkpoint_wait(ck) || fsdp_checkpoint_last_report(ck, &report)) return 1;
    if (fsdp_rank(world) == 0 && j->resume < 0)
        printf("4 ranks: loss %.5f -> %.5f, saved 4 times %lld bytes\n", (double)j->loss[0],
               (double)j->loss[STEPS - 1], (long long)report.total_bytes);
    return 0;
}

static int start(job *j) {
    fsdp_spawn_desc spawn = FSDP_ZERO;
    spawn.num_ranks = j->ranks, spawn.threads = 1;
    return fsdp_spawn(&spawn, rank_main, j) != FSDP_OK;
}

int main(int argc, char **argv) {
    char own[] = "/tmp/fsdp-checkpoint-XXXXXX", command[64];
    const char *dir = argc > 1 ? argv[1] : mkdtemp(own);
    static job whole, same, fewer;
    float apart = 0;
    int failed = !dir;
    whole.ranks = same.ranks = 4, fewer.ranks = 3;
    whole.dir = same.dir = fewer.dir = dir;
    whole.resume = -1, same.resume = fewer.resume = 25; // the newest one up to step 25: 20
    failed = failed || start(&whole) || start(&same) || start(&fewer);
    if (dir && argc == 1) {
        snprintf(command, sizeof command, "rm -r %s", own);
        failed = system(command) || failed;
    }
    if (failed) return 1;
    const size_t rest = (STEPS - 20) * sizeof(float);
    const int equal = !memcmp(whole.loss + 20, same.loss + 20, rest);
    for (int s = 20; s < STEPS; s++) apart = fmaxf(apart, fabsf(whole.loss[s] - fewer.loss[s]));
    printf("again from step 20, 4 ranks: %s\n", equal ? "the same bits" : "other bits");
    printf("again from step 20, 3 ranks: at most %.1g apart\n", (double)apart);
    return !equal || apart > 1e-5f || whole.loss[STEPS - 1] > whole.loss[0] / 2;
}
