/* 07_plan.c - a step that is recorded and replayed: fewer gathers, the same bits
   cc -O2 -I. examples/07_plan.c -o 07_plan -pthread -lm && ./07_plan

   A net uses its three layers as 0 0 1 1 2 2 0 1 2 0 1 2. Without a plan each use gathers its layer
   twice, in forward and in backward. A plan knows the whole step: it keeps the layers that are used
   soonest, as far as memory allows. It takes one more line in the trainer. The same training runs
   eagerly, from a plan in the memory of the eager step, and from one that may take two more slots.
   ./07_plan FILE also writes the first plan as text (docs/plan.md reads one).

   SPDX-License-Identifier: MIT */
#define FSDP_IMPLEMENTATION
#include "fsdp_optim.h"
#include "fsdp_plan.h"
#include <math.h>   // sin
#include <stdio.h>  // printf
#include <string.h> // memcmp

enum { RANKS = 2, L = 3, C = 16, VISITS = 12, STEPS = 40 };
static const int order[VISITS] = {0, 0, 1, 1, 2, 2, 0, 1, 2, 0, 1, 2};

typedef struct {
    int planned;                 // in
    long long most_bytes;        // in: of slots, with a plan
    const char *text;            // in: where the plan goes, or NULL
    unsigned long long gathers;  // out: in the last step
    long long slots, slot;       // out: bytes of the eager step: all slots, one gathered layer
    float loss[STEPS], w[C * C]; // out
} run;

static void my_init(void *user, const fsdp_param_view *rows) {
    (void)user;
    for (int64_t k = 0; k < rows->numel; k++)
        fsdp_view_data_f32(rows)[k] = 0.05f * (float)sin(37.0 * (double)fsdp_view_index(rows, k));
}

// A visit is y = x + W x; the task is the input in reverse order. Hooks are as in every example.
static float forward_backward(fsdp_unit **h, int sample) {
    float x[VISITS + 1][C], d[VISITS + 1][C], loss = 0;
    for (int i = 0; i < C; i++) x[0][i] = (float)sin(0.7 * (i + 1) * (i + 1) * (1 + sample));
    for (int v = 0; v < VISITS; v++) {
        fsdp_pre_forward(h[order[v]]);
        const float *w = fsdp_data_f32(h[order[v]], 0);
        for (int i = 0; i < C; i++) {
            x[v + 1][i] = x[v][i];
            for (int j = 0; j < C; j++) x[v + 1][i] += w[i * C + j] * x[v][j];
        }
        fsdp_post_forward(h[order[v]]);
    }
    for (int i = 0; i < C; i++) {
        d[VISITS][i] = x[VISITS][i] - x[0][C - 1 - i];
        loss += 0.5f * d[VISITS][i] * d[VISITS][i];
    }
    for (int v = VISITS - 1; v >= 0; v--) {
        fsdp_pre_backward(h[order[v]]);
        const float *w = fsdp_data_f32(h[order[v]], 0);
        float *dw = fsdp_grad_f32(h[order[v]], 0);
        for (int i = 0; i < C; i++) d[v][i] = d[v + 1][i];
        for (int i = 0; i < C; i++) {
            for (int j = 0; j < C; j++) {
                dw[i * C + j] += d[v + 1][i] * x[v][j];
                d[v][j] += d[v + 1][i] * w[i * C + j];
            }
        }
        fsdp_post_backward(h[order[v]]);
    }
    return loss;
}

static int train(fsdp_world *world, void *arg) {
    run *r = (run *)arg;
    const int tells = fsdp_rank(world) == 0;
    fsdp_model *model;
    fsdp_unit *h[L];
    fsdp_adamw *opt = NULL;
    fsdp_plan *plan = NULL;
    fsdp_plan_desc pd = FSDP_ZERO;
    fsdp_counters before = FSDP_ZERO, after = FSDP_ZERO;
    fsdp_memory memory = FSDP_ZERO;
    fsdp_status status = fsdp_model_create(world, NULL, &model);
    for (int l = 0; l < L && !status; l++) {
        fsdp_param_desc p = fsdp_mat("w", C, C);
        fsdp_unit_desc ud = FSDP_ZERO;
        const char name[] = {'h', '.', (char)('0' + l), 0};
        ud.name = name, ud.params = &p, ud.num_params = 1;
        status = fsdp_fully_shard(model, &ud, &h[l]);
    }
    if (!status) status = fsdp_init_params(model, my_init, NULL);
    if (!status) status = fsdp_adamw_create(model, NULL, &opt);
    pd.most_bytes = r->most_bytes;
    if (!status && r->planned) status = fsdp_plan_create(model, &pd, &plan); // the line more

    for (int s = 0; s < STEPS && !status; s++) {
        before = after;
        float loss = forward_backward(h, fsdp_rank(world) + RANKS * (s % 3));
        status = fsdp_finalize_backward(model); // the second one makes the plan
        if (!status) status = fsdp_all_reduce(world, NULL, &loss, 1, FSDP_F32, FSDP_SUM);
        if (!status) status = fsdp_adamw_step(opt, 0.001);
        if (!status) status = fsdp_zero_grad(model);
        if (!status) status = fsdp_model_counters(model, &after);
        if (tells) r->loss[s] = loss / (float)RANKS;
    }
    if (!status) status = fsdp_param_full(h[0], 0, tells ? r->w : NULL);
    if (!status) status = fsdp_model_memory(model, &memory);
    if (status || !tells) return (int)status;
    r->gathers = after.calls[FSDP_OP_ALL_GATHER] - before.calls[FSDP_OP_ALL_GATHER];
    r->slot = memory.pool_bytes[FSDP_POOL_GATHER];
    for (int pool = FSDP_POOL_GATHER; pool <= FSDP_POOL_REDUCE_OUT; pool++)
        r->slots += memory.pool_bytes[pool];
    if (plan && r->text) { // 64 KiB are more than enough for 49 calls
        static char text[1 << 16];
        FILE *file = fopen(r->text, "w");
        fsdp_plan_text(plan, 0, FSDP_PLAN_TEXT_OPS, text, sizeof text);
        if (!file || (fputs(text, file) < 0) | fclose(file)) return FSDP_ERR_IO;
    }
    return FSDP_OK;
}

int main(int argc, char **argv) {
    static run runs[3];
    fsdp_spawn_desc desc = FSDP_ZERO;
    desc.threads = 1, desc.num_ranks = RANKS;
    if (fsdp_spawn(&desc, train, &runs[0])) return 1;
    for (int i = 1; i < 3; i++) {
        runs[i].planned = 1;
        runs[i].most_bytes = runs[0].slots + (i == 2 ? 2 * runs[0].slot : 0);
        runs[i].text = i == 1 && argc > 1 ? argv[1] : NULL;
        if (fsdp_spawn(&desc, train, &runs[i])) return 1;
    }
    printf("eager: %llu gathers a step, slots of %lld bytes\n", runs[0].gathers, runs[0].slots);
    printf("planned: %llu, with the same memory\n", runs[1].gathers);
    printf("planned: %llu, with two slots more\n", runs[2].gathers);
    int good = runs[0].loss[STEPS - 1] < 0.5f * runs[0].loss[0];
    for (int i = 1; i < 3; i++)
        good &= !memcmp(runs[i].loss, runs[0].loss, sizeof runs[0].loss) &&
                !memcmp(runs[i].w, runs[0].w, sizeof runs[0].w);
    puts(good ? "the same bits in all three, and learnt" : "NOT the same, or not learnt");
    return !good;
}
