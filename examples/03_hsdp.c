/* 03_hsdp.c - hybrid sharding (HSDP): sharded over 2 ranks, replicated on 2 such groups
   cc -O2 -I. examples/03_hsdp.c -o 03_hsdp -pthread -lm && ./03_hsdp

   Four ranks train the same model twice. Plain FSDP shards it over all of them. HSDP arranges them
   as a 2-D mesh, whose dim 0 replicates and whose dim 1 shards:

                  shard 0   shard 1
       replica 0  rank 0    rank 1        parameters are gathered inside a row: one host, say;
       replica 1  rank 2    rank 3        between rows only sums of a shard's gradients travel

   A rank holds twice as much, and less is gathered from others. What is learnt is the same.

   SPDX-License-Identifier: MIT */
#define FSDP_IMPLEMENTATION
#include "fsdp.h"
#include "fsdp_optim.h"
#include <math.h>  // fabs, sin
#include <stdio.h> // printf

enum { RANKS = 4, L = 3, C = 48, STEPS = 120 };

typedef struct {
    int replicas;                              // in: 1 is plain FSDP
    int shard, replica;                        // out: those of the last rank
    double first, last;                        // loss
    unsigned long long held, gathered, summed; // bytes: of shards; read by a rank in one step
} result;

static void my_init(void *user, const fsdp_param_view *rows) { // each rank fills only its own rows
    (void)user;
    for (int64_t k = 0; k < rows->numel; k++)
        fsdp_view_data_f32(rows)[k] = 0.02f * (float)sin(37.0 * (double)fsdp_view_index(rows, k));
}

static void layer_forward(float *y, const float *x, const float *w, const float *b) {
    for (int i = 0; i < C; i++) { // y = x + W x + b
        y[i] = x[i] + b[i];
        for (int j = 0; j < C; j++) y[i] += w[i * C + j] * x[j];
    }
}
static void layer_backward(float *dx, const float *dy, const float *x, const float *w, float *dw,
                           float *db) {
    for (int i = 0; i < C; i++) dx[i] = dy[i];
    for (int i = 0; i < C; i++) { // gradients of parameters are added
        db[i] += dy[i];
        for (int j = 0; j < C; j++) dw[i * C + j] += dy[i] * x[j], dx[j] += w[i * C + j] * dy[i];
    }
}

// Forward and backward of this rank's sample; its loss. The task: the input in reverse order.
static double sample(fsdp_unit **h, int step, int rank) {
    float x[L + 1][C], d[L + 1][C];
    double loss = 0.0;
    for (int i = 0; i < C; i++)
        x[0][i] = (float)sin(0.7 * (i + 1) * (i + 1) * (1 + step % 2 + 2 * rank));
    for (int l = 0; l < L; l++) {
        fsdp_pre_forward(h[l]);
        layer_forward(x[l + 1], x[l], fsdp_data_f32(h[l], 0), fsdp_data_f32(h[l], 1));
        fsdp_post_forward(h[l]);
    }
    for (int i = 0; i < C; i++) {
        d[L][i] = x[L][i] - x[0][C - 1 - i];
        loss += 0.5 * (double)d[L][i] * (double)d[L][i];
    }
    for (int l = L - 1; l >= 0; l--) {
        fsdp_pre_backward(h[l]);
        layer_backward(d[l], d[l + 1], x[l], fsdp_data_f32(h[l], 0), fsdp_grad_f32(h[l], 0),
                       fsdp_grad_f32(h[l], 1));
        fsdp_post_backward(h[l]);
    }
    return loss;
}

static int train(fsdp_world *world, void *arg) {
    result *out = (result *)arg, mine = *out;
    fsdp_mesh *mesh;
    fsdp_model *model;
    fsdp_unit *h[L];
    fsdp_adamw *opt;

    // The only lines that differ from plain FSDP: a mesh of two dims, given to the model.
    fsdp_mesh_desc grid = FSDP_ZERO;
    grid.ndim = 2;
    grid.shape[0] = mine.replicas, grid.shape[1] = RANKS / mine.replicas;
    grid.names[0] = "replicate", grid.names[1] = "shard";
    fsdp_status status = fsdp_mesh_create(world, &grid, &mesh);
    fsdp_model_desc md = FSDP_ZERO;
    md.mesh = mine.replicas > 1 ? mesh : NULL; // NULL: 1-D over all ranks

    if (!status) status = fsdp_model_create(world, &md, &model);
    for (int l = 0; l < L && !status; l++) {
        fsdp_param_desc p[2] = {fsdp_mat("w", C, C), fsdp_vec("b", C)};
        fsdp_unit_desc ud = FSDP_ZERO;
        ud.params = p, ud.num_params = 2;
        status = fsdp_fully_shard(model, &ud, &h[l]);
    }
    if (!status) status = fsdp_init_params(model, my_init, NULL);
    if (!status) status = fsdp_adamw_create(model, NULL, &opt);

    for (int step = 0; step < STEPS && !status; step++) {
        double loss = sample(h, step, fsdp_rank(world));
        status = fsdp_finalize_backward(model);
        if (!status) status = fsdp_adamw_step(opt, 0.002);
        if (!status) status = fsdp_zero_grad(model);
        if (!status) status = fsdp_all_reduce(world, NULL, &loss, 1, FSDP_F64, FSDP_SUM);
        if (step == 0) mine.first = loss / (double)RANKS;
        mine.last = loss / (double)RANKS;
    }
    fsdp_memory memory = FSDP_ZERO;
    fsdp_counters counters = FSDP_ZERO;
    if (!status) status = fsdp_model_memory(model, &memory);
    if (!status) status = fsdp_model_counters(model, &counters);
    if (status || fsdp_rank(world) != RANKS - 1) return (int)status;
    mine.replica = fsdp_mesh_rank(mesh, 0), mine.shard = fsdp_mesh_rank(mesh, 1);
    mine.held = (unsigned long long)memory.pool_bytes[FSDP_POOL_SHARD];
    mine.gathered = counters.bytes[FSDP_OP_ALL_GATHER] / STEPS;
    mine.summed = (counters.bytes[FSDP_OP_REDUCE_SCATTER] + counters.bytes[FSDP_OP_ALL_REDUCE]) /
                  STEPS;
    *out = mine;
    return FSDP_OK;
}

static void print(const char *name, const result *r) {
    printf("%s  loss %.4f -> %.4f  rank 3 is shard %d of replica %d, holds %llu bytes,\n", name,
           r->first, r->last, r->shard, r->replica, r->held);
    printf("                   reads %llu to gather and %llu to reduce in each step\n", r->gathered,
           r->summed);
}

int main(void) {
    result fsdp = {1, 0, 0, 0, 0, 0, 0, 0}, hsdp = {2, 0, 0, 0, 0, 0, 0, 0};
    fsdp_spawn_desc desc = FSDP_ZERO;
    desc.threads = 1; // ranks as threads write to this program's memory; processes would not
    desc.num_ranks = RANKS;
    if (fsdp_spawn(&desc, train, &fsdp) || fsdp_spawn(&desc, train, &hsdp)) return 1;
    print("FSDP, 1 x 4", &fsdp);
    print("HSDP, 2 x 2", &hsdp);
    const int same = fabs(fsdp.last - hsdp.last) < 1e-4 * fsdp.first;
    const int learnt = fsdp.last < 0.1 * fsdp.first;
    printf(same && learnt ? "the same, and learnt\n" : "NOT as expected\n");
    return !(same && learnt);
}
