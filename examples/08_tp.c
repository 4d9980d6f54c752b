/* 08_tp.c - tensor parallelism and FSDP at the same time: an MLP with sequence parallel on 2 x 2
   cc -O2 -I. examples/08_tp.c -o 08_tp -pthread -lm && ./08_tp

   y = x + w2 tanh(w1 (x * g)), with w1 cut by rows (column-parallel), w2 by columns (row-parallel)
   over the 2 ranks of tp; g is whole on each. FSDP shards all of it over the 2 ranks of dp. Between
   the two matrices a rank has all tokens and half of the hidden channels; outside of them half of
   the tokens and all channels. The losses are those of one rank.

   SPDX-License-Identifier: MIT */
#define FSDP_IMPLEMENTATION
#include "fsdp_dtensor.h"
#include "fsdp_optim.h"
#include <math.h>   // sin, tanh
#include <stdio.h>  // printf
#include <string.h> // memset

enum { TOKENS = 16, D = 8, H = 24, STEPS = 30 }; // TOKENS: of each rank of dp

typedef struct {
    int dp, tp;        // in: ranks
    float loss[STEPS]; // out
} run;

typedef struct {
    fsdp_dmesh *dm;
    fsdp_unit *cut, *whole;
    fsdp_redistribution *gather, *scatter, *gather_grad, *scatter_grad;
} net;

static void my_init(void *user, const fsdp_param_view *rows) { // by the place in the whole tensor
    fsdp_param_view v;
    if (fsdp_tp_view((fsdp_dmesh *)user, rows, &v)) return;
    for (int64_t k = 0; k < v.numel; k++)
        fsdp_view_data_f32(&v)[k] =
            v.ndim == 1 ? 1.0f : 0.2f * (float)sin(37.0 * (double)fsdp_view_index(&v, k) + v.ndim);
}

// Two units: w1 and w2, which tp cuts, and g, which each of its ranks has whole.
static fsdp_status make_units(net *n) {
    const fsdp_placement cut[2] = {{FSDP_SHARD, 0, 0, 0}, {FSDP_SHARD, 1, 0, 0}};
    const fsdp_placement whole[1] = {{FSDP_REPLICATE, 0, 0, 0}};
    fsdp_param_desc w[2] = {fsdp_mat("w1", H, D), fsdp_mat("w2", D, H)}, g = fsdp_vec("g", D);
    fsdp_tp_unit_desc d = FSDP_ZERO;
    d.unit.params = w, d.unit.num_params = 2, d.tp = cut;
    fsdp_status status = fsdp_tp_fully_shard(n->dm, &d, &n->cut);
    d.unit.params = &g, d.unit.num_params = 1, d.tp = whole;
    d.partial_grads = 1; // each rank sees its own tokens: the gradient is the sum
    return status ? status : fsdp_tp_fully_shard(n->dm, &d, &n->whole);
}

// Tokens to all ranks of tp, addends of all tokens to their ranks; and back for gradients.
static fsdp_status make_ways(net *n, const run *r) {
    const int32_t mesh[2] = {r->dp, r->tp};
    const int64_t shape[2] = {TOKENS, D};
    const fsdp_placement cut[2] = {{FSDP_REPLICATE, 0, 0, 0}, {FSDP_SHARD, 0, 0, 0}};
    const fsdp_placement sum[2] = {{FSDP_REPLICATE, 0, 0, 0}, {FSDP_PARTIAL, 0, FSDP_SUM, 0}};
    const fsdp_placement all[2] = {{FSDP_REPLICATE, 0, 0, 0}, {FSDP_REPLICATE, 0, 0, 0}};
    fsdp_redistribution_desc in = FSDP_ZERO, out = FSDP_ZERO;
    in.name = "mlp in", out.name = "mlp out";
    fsdp_status status = fsdp_spec_init(&in.from, 2, mesh, cut, FSDP_F32, 2, shape);
    if (!status) status = fsdp_spec_init(&in.to, 2, mesh, all, FSDP_F32, 2, shape);
    if (!status) status = fsdp_spec_init(&out.from, 2, mesh, sum, FSDP_F32, 2, shape);
    out.to = in.from;
    if (!status) status = fsdp_redistribution_create(n->dm, &in, &n->gather);
    if (!status) status = fsdp_redistribution_create(n->dm, &out, &n->scatter);
    if (!status)
        status = fsdp_redistribution_create_backward(n->gather, &out.from, &n->gather_grad);
    return status ? status
                  : fsdp_redistribution_create_backward(n->scatter, NULL, &n->scatter_grad);
}

// out(rows, n) = or += a(rows, k) b, where b is stored (n, k) if trans, else (k, n)
static void product(float *out, const float *a, const float *b, int rows, int n, int k, int trans) {
    for (int i = 0; i < rows; i++)
        for (int j = 0; j < n; j++) {
            float sum = 0;
            for (int p = 0; p < k; p++) sum += a[i * k + p] * (trans ? b[j * k + p] : b[p * n + j]);
            out[i * n + j] = sum;
        }
}
static void add_outer(float *dw, const float *a, const float *b, int rows, int n, int k) {
    for (int i = 0; i < rows; i++) // dw(n, k) += a(rows, n)^T b(rows, k)
        for (int j = 0; j < n; j++)
            for (int p = 0; p < k; p++) dw[j * k + p] += a[i * n + j] * b[i * k + p];
}

// Forward and backward of this rank's tokens; returns its addend of the loss, the mean of (y-t)^2.
static float train(net *n, const run *r, int dp, int tp, int step) {
    static const float scale = 2.0f / (TOKENS * D);
    float x[TOKENS * D], xg[TOKENS * D], dy[TOKENS * D], dx[TOKENS * D], loss = 0;
    float in[TOKENS * D], a[TOKENS * H], da[TOKENS * H], wide[TOKENS * D];
    const int mine = TOKENS / r->tp, h = H / r->tp, first = tp * mine;
    fsdp_pre_forward(n->whole), fsdp_pre_forward(n->cut);
    const float *g = fsdp_data_f32(n->whole, 0);
    const float *w1 = fsdp_data_f32(n->cut, 0), *w2 = fsdp_data_f32(n->cut, 1);
    for (int i = 0; i < mine * D; i++) {
        x[i] = (float)sin(0.9 * ((dp * TOKENS + first) * D + i + 1) + step % 3);
        xg[i] = x[i] * g[i % D];
    }
    fsdp_redistribute(n->gather, in, xg); // all tokens
    product(a, in, w1, TOKENS, h, D, 1);
    for (int i = 0; i < TOKENS * h; i++) a[i] = (float)tanh((double)a[i]);
    product(wide, a, w2, TOKENS, D, h, 1);   // addends: this rank's hidden channels
    fsdp_redistribute(n->scatter, dy, wide); // summed, my tokens
    for (int i = 0; i < mine * D; i++) {     // the target is the input, channels reversed
        float e = x[i] + dy[i] - x[i / D * D + D - 1 - i % D];
        loss += e * e / (TOKENS * D);
        dy[i] = scale * e;
    }
    fsdp_post_forward(n->cut), fsdp_post_forward(n->whole);

    fsdp_pre_backward(n->whole), fsdp_pre_backward(n->cut);
    w1 = fsdp_data_f32(n->cut, 0), w2 = fsdp_data_f32(n->cut, 1);
    fsdp_redistribute(n->scatter_grad, wide, dy); // of all tokens
    product(da, wide, w2, TOKENS, h, D, 0);
    add_outer(fsdp_grad_f32(n->cut, 1), wide, a, TOKENS, D, h);
    for (int i = 0; i < TOKENS * h; i++) da[i] *= 1 - a[i] * a[i];
    add_outer(fsdp_grad_f32(n->cut, 0), da, in, TOKENS, h, D);
    product(wide, da, w1, TOKENS, D, h, 0); // addends
    fsdp_redistribute(n->gather_grad, dx, wide);
    fsdp_post_backward(n->cut);
    float *dg = fsdp_grad_f32(n->whole, 0); // addends: of my tokens
    for (int i = 0; i < mine * D; i++) dg[i % D] += dx[i] * x[i];
    fsdp_post_backward(n->whole);
    return loss;
}

static int rank_main(fsdp_world *world, void *arg) {
    run *r = (run *)arg;
    net n;
    fsdp_mesh_desc md = FSDP_ZERO;
    fsdp_model_desc desc = FSDP_ZERO;
    fsdp_dmesh_desc dd = FSDP_ZERO;
    fsdp_mesh_info info;
    fsdp_model *model;
    fsdp_mesh *mesh;
    fsdp_adamw *opt;
    md.ndim = 2, md.shape[0] = r->dp, md.shape[1] = r->tp, md.names[0] = "dp", md.names[1] = "tp";
    if (fsdp_mesh_create(world, &md, &mesh)) return 1;
    if (fsdp_mesh_info_init(mesh, FSDP_MESH_INFO_HSDP, 0, 1, &info)) return 1;
    desc.mesh_info = &info, dd.mesh = mesh; // all ranks: norms are over all of them
    if (fsdp_model_create(world, &desc, &model) || fsdp_dmesh_create(model, &dd, &n.dm)) return 1;
    if (make_units(&n) || make_ways(&n, r) || fsdp_init_params(model, my_init, n.dm)) return 1;
    if (fsdp_adamw_create(model, NULL, &opt)) return 1;
    for (int s = 0; s < STEPS; s++) {
        double loss = (double)train(&n, r, fsdp_mesh_rank(mesh, 0), fsdp_mesh_rank(mesh, 1), s);
        if (fsdp_finalize_backward(model) || fsdp_clip_grad_norm(model, 1.0, NULL)) return 1;
        if (fsdp_adamw_step(opt, 0.02) || fsdp_zero_grad(model)) return 1;
        if (fsdp_all_reduce(world, NULL, &loss, 1, FSDP_F64, FSDP_SUM)) return 1;
        if (fsdp_rank(world) == 0) r->loss[s] = (float)(loss / r->dp);
    }
    return 0;
}

int main(void) {
    static run runs[] = {{2, 1, {0}}, {2, 2, {0}}, {1, 4, {0}}};
    float worst = 0;
    for (int i = 0; i < 3; i++) {
        fsdp_spawn_desc spawn = FSDP_ZERO;
        spawn.num_ranks = runs[i].dp * runs[i].tp, spawn.threads = 1;
        if (fsdp_spawn(&spawn, rank_main, &runs[i])) return 1;
        printf("dp %d, tp %d: loss %.6f -> %.6f\n", runs[i].dp, runs[i].tp, (double)runs[i].loss[0],
               (double)runs[i].loss[STEPS - 1]);
    }
    for (int s = 0; s < STEPS; s++) worst = fmaxf(worst, fabsf(runs[0].loss[s] - runs[1].loss[s]));
    printf("with tp and without: at most %.1g apart in %d steps\n", (double)worst, STEPS);
    return worst > 1e-5f || runs[1].loss[STEPS - 1] > runs[1].loss[0] / 2;
}
