/* 06_ddp.c - DDP: an all-reduce for each layer, and for each bucket of layers, with the same losses
   cc -O2 -I. examples/06_ddp.c -o 06_ddp -pthread -lm && ./06_ddp

   Four ranks hold all parameters, and each sees samples of its own. 24 small layers have 48
   gradients of 16 or 256 numbers. Layer by layer these are 24 messages in each step. In buckets
   they are 3, of 8 layers each, on their way while backward continues. Sums are in the order of the
   ranks, so losses are equal to the bit.

   SPDX-License-Identifier: MIT */
#define FSDP_IMPLEMENTATION
#include "fsdp_optim.h"
#include "fsdp_replicate.h"
#include <math.h>  // sin
#include <stdio.h> // printf

enum { RANKS = 4, L = 24, C = 16, STEPS = 60 };

typedef struct {
    const char *name;
    int buckets;                        // in: 0: a unit for each layer
    unsigned long long messages, bytes; // out: of a step, of rank 0
    float loss[STEPS];
} way;

typedef struct {
    fsdp_replicate *rep; // buckets, or NULL
    fsdp_unit *unit[L];  // then: layers
} net;

static void my_init(void *user, const fsdp_param_view *rows) { // the same on all ranks
    (void)user;
    for (int64_t k = 0; k < rows->numel; k++)
        fsdp_view_data_f32(rows)[k] = rows->ndim == 2 ? 0.02f * (float)sin(37.0 * (double)k) : 0;
}

static fsdp_status make_net(fsdp_model *model, int buckets, net *n) {
    fsdp_param_desc p[2 * L];
    for (int l = 0; l < L; l++) p[2 * l] = fsdp_mat(NULL, C, C), p[2 * l + 1] = fsdp_vec(NULL, C);
    if (buckets) {
        fsdp_replicate_desc rd = FSDP_ZERO;
        rd.params = p, rd.num_params = 2 * L;
        rd.bucket_bytes = 8 << 10; // 0: PyTorch's default, 1 MiB and then 25 MiB
        return fsdp_replicate_create(model, &rd, &n->rep);
    }
    fsdp_mesh *mesh;
    fsdp_mesh_info info;
    fsdp_status status = fsdp_mesh_1d(fsdp_model_world(model), "replica", &mesh);
    if (!status) status = fsdp_mesh_info_init(mesh, FSDP_MESH_INFO_DDP, -1, 0, &info);
    for (int l = 0; l < L && !status; l++) {
        fsdp_unit_desc ud = FSDP_ZERO;
        ud.params = &p[2 * l], ud.num_params = 2, ud.mesh_info = &info;
        status = fsdp_fully_shard(model, &ud, &n->unit[l]);
    }
    return status;
}

// Parameter p: the weights and the bias of layer p / 2.
static const float *data(net *n, int p) {
    return n->rep ? fsdp_replicate_data_f32(n->rep, p) : fsdp_data_f32(n->unit[p / 2], p % 2);
}
static float *grad(net *n, int p) {
    return n->rep ? fsdp_replicate_grad_f32(n->rep, p) : fsdp_grad_f32(n->unit[p / 2], p % 2);
}

// A layer is y = x + W x + b.
static fsdp_status step(net *n, int number, float *out) {
    float x[L + 1][C], d[L + 1][C], loss = 0;
    for (int i = 0; i < C; i++) x[0][i] = (float)sin(0.7 * (i + 1) * (i + 1) * (1 + number));
    if (n->rep) fsdp_replicate_pre_forward(n->rep);
    for (int l = 0; l < L; l++) {
        if (!n->rep) fsdp_pre_forward(n->unit[l]);
        const float *w = data(n, 2 * l), *b = data(n, 2 * l + 1);
        for (int i = 0; i < C; i++) {
            x[l + 1][i] = x[l][i] + b[i];
            for (int j = 0; j < C; j++) x[l + 1][i] += w[i * C + j] * x[l][j];
        }
        if (!n->rep) fsdp_post_forward(n->unit[l]);
    }
    if (n->rep) fsdp_replicate_post_forward(n->rep);
    for (int i = 0; i < C; i++) { // the task: the input in reverse order
        d[L][i] = x[L][i] - x[0][C - 1 - i];
        loss += 0.5f * d[L][i] * d[L][i];
    }
    for (int l = L - 1; l >= 0; l--) {
        if (!n->rep) fsdp_pre_backward(n->unit[l]);
        const float *w = data(n, 2 * l);
        float *dw = grad(n, 2 * l), *db = grad(n, 2 * l + 1);
        for (int i = 0; i < C; i++) d[l][i] = d[l + 1][i], db[i] += d[l + 1][i];
        for (int i = 0; i < C; i++) {
            for (int j = 0; j < C; j++) {
                dw[i * C + j] += d[l + 1][i] * x[l][j];
                d[l][j] += w[i * C + j] * d[l + 1][i];
            }
        }
        if (n->rep) fsdp_replicate_ready(n->rep, 2 * l, 2); // complete buckets are on their way
        if (!n->rep) fsdp_post_backward(n->unit[l]);        // this layer is
    }
    *out = loss;
    return n->rep ? fsdp_replicate_post_backward(n->rep) : FSDP_OK;
}

static int train(fsdp_world *world, void *arg) {
    way *out = (way *)arg;
    net n = FSDP_ZERO;
    fsdp_model *model;
    fsdp_adamw *opt = NULL;
    fsdp_counters c = FSDP_ZERO;
    fsdp_status status = fsdp_model_create(world, NULL, &model);
    if (!status) status = make_net(model, out->buckets, &n);
    if (!status) status = fsdp_init_params(model, my_init, NULL);
    if (!status) status = fsdp_adamw_create(model, NULL, &opt);
    for (int s = 0; s < STEPS && !status; s++) {
        float loss = 0; // failures of all calls of the step show here
        status = step(&n, fsdp_rank(world) + RANKS * (s % 3), &loss);
        if (!status) status = fsdp_finalize_backward(model);
        if (!status && s == 0) status = fsdp_model_counters(model, &c);
        if (!status) status = fsdp_all_reduce(world, NULL, &loss, 1, FSDP_F32, FSDP_SUM);
        if (!status) status = fsdp_adamw_step(opt, 0.001);
        if (!status) status = fsdp_zero_grad(model);
        if (fsdp_rank(world) == 0) out->loss[s] = loss / (float)RANKS;
    }
    if (fsdp_rank(world) != 0) return (int)status;
    out->messages = c.calls[FSDP_OP_ALL_REDUCE];
    out->bytes = c.bytes[FSDP_OP_ALL_REDUCE];
    return (int)status;
}

int main(void) {
    static way ways[2] = {{"a unit for each layer", 0, 0, 0, {0}}, {"buckets", 1, 0, 0, {0}}};
    fsdp_spawn_desc desc = FSDP_ZERO;
    desc.threads = 1, desc.num_ranks = RANKS;
    int good = 1;
    printf("%d layers, %d ranks       all-reduces  bytes read in each step\n", L, RANKS);
    for (int i = 0; i < 2; i++) {
        if (fsdp_spawn(&desc, train, &ways[i])) return 1;
        printf("%-22s %11llu %12llu  loss %.6f -> %.6f\n", ways[i].name, ways[i].messages,
               ways[i].bytes, (double)ways[i].loss[0], (double)ways[i].loss[STEPS - 1]);
        good &= ways[i].loss[STEPS - 1] < 0.5f * ways[i].loss[0];
    }
    for (int s = 0; s < STEPS; s++) good &= ways[0].loss[s] == ways[1].loss[s];
    puts(good ? "the same losses, and learnt" : "NOT the same, or not learnt");
    return !good;
}
