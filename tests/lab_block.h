/* lab_block.h - a transformer block with tensor parallelism, forward and backward, as a user writes
   it with fsdp_dtensor.h; and the same block on full tensors without the library.

       n1 = x / rms(x) * norm1;  qkv = n1 qkvw^T + qkvb;  o = causal attention of each head
       mid = x + o projw^T + projb;  n2 = mid / rms(mid) * norm2
       y = mid + tanh(n2 fcw^T + fcb) outw^T + outb

   Heads and hidden channels are sharded. Norms, and biases after a sum, are a replicated unit,
   which
   stays open. By default there is a sum over tp after each half; in backward before it. With `sp`
   each
   rank has its part of the tokens where no linear needs all of them. With `overlap` the
   redistribution
   of dX runs while the products compute dW.

   SPDX-License-Identifier: MIT */
#ifndef LAB_BLOCK_H
#define LAB_BLOCK_H
#include <math.h> /* exp, sqrt, tanh */
#include "lab_bed.h"

enum { BK_QKVW, BK_QKVB, BK_PROJW, BK_FCW, BK_FCB, BK_OUTW, BK_CUT };
enum { BK_NORM1 = BK_CUT, BK_PROJB, BK_NORM2, BK_OUTB, BK_PARAMS };

typedef struct block_net {
    int64_t batch, context, d, heads, size, hidden; /* batch: of each data-parallel rank */
    int dp, tp, sp, overlap;
    uint64_t seed;
} block_net;

/* One rank, or (on.model NULL) the whole block. */
typedef struct blk {
    const block_net *net;
    bed on;
    fsdp_unit *unit[2];                         /* the sharded parameters, the replicated ones */
    int64_t tokens, rows, first, heads, hidden; /* rows: this rank's tokens, from `first` on */
    fsdp_redistribution *gather, *gather_back, *scatter, *scatter_back;
    float *x, *n1, *qkv, *prob, *o, *mid, *n2, *h, *y, *dy, *dx; /* y, dx: the results */
    float *narrow, *wide, *sum, *dwide, *dh, *dqkv, *dmid;
    float *w[BK_PARAMS], *g[BK_PARAMS];
} blk;

H_FN int block_ndim(int k) { return k <= BK_PROJW ? 3 : k == BK_FCW || k == BK_OUTW ? 2 : 1; }
/* Sets the shape of parameter k for this many heads and hidden channels. */
H_FN void block_shape(const block_net *net, int k, int64_t heads, int64_t hidden, int64_t *shape) {
    const int64_t all[BK_PARAMS][3] = {{3, heads, net->size * net->d},
                                       {3, heads, net->size},
                                       {net->d, heads, net->size},
                                       {hidden, net->d, 1},
                                       {hidden, 1, 1},
                                       {net->d, hidden, 1},
                                       {net->d, 1, 1},
                                       {net->d, 1, 1},
                                       {net->d, 1, 1},
                                       {net->d, 1, 1}};
    memcpy(shape, all[k], sizeof all[k]);
}
H_FN int64_t block_numel(const blk *b, int k) {
    int64_t shape[3];
    block_shape(b->net, k, b->heads, b->hidden, shape);
    return lab_numel(3, shape);
}
H_FN double block_value(const block_net *net, int k, int64_t at) {
    const int norm = k == BK_NORM1 || k == BK_NORM2;
    return golden_value(net->seed + (uint64_t)k, (uint64_t)at, 1) + norm;
}
H_FN void block_feed(blk *b, int data) {
    const uint64_t seed = b->net->seed + 100 * (uint64_t)(data + 1);
    for (int64_t i = 0; i < b->rows * b->net->d; i++) {
        const uint64_t at = (uint64_t)(b->first * b->net->d + i);
        b->x[i] = (float)golden_value(seed, at, 2);
        b->dy[i] = (float)golden_value(seed + 1, at, 2);
    }
}

/* ---- a rank ---------------------------------------------------------------------------------- */

H_FN void block_fill(void *user, const fsdp_param_view *part) {
    const blk *b = (const blk *)user;
    fsdp_param_view v;
    CALL(b->on.w, fsdp_tp_view(b->on.dm, part, &v));
    for (int64_t i = 0; i < v.numel; i++)
        lab_put(v.data, v.dtype, i,
                block_value(b->net, (int)(intptr_t)v.user, fsdp_view_index(&v, i)));
}
H_FN void block_unit(blk *b, int replicated) {
    static const int8_t dims[BK_CUT] = {1, 1, 1, 0, 0, 1}, shards[BK_CUT] = {2, 2, 0, 0, 0, 0};
    const int from = replicated ? BK_CUT : 0, count = (replicated ? BK_PARAMS : BK_CUT) - from;
    fsdp_param_desc d[BK_PARAMS];
    fsdp_placement tp[BK_PARAMS];
    fsdp_tp_unit_desc ud = FSDP_ZERO;
    memset(tp, 0, sizeof tp);
    for (int k = from; k < from + count; k++) {
        int64_t shape[3];
        block_shape(b->net, k, b->net->heads, b->net->hidden, shape);
        d[k] = lab_desc(block_ndim(k), shape, replicated ? 0 : shards[k], FSDP_F32, 0);
        d[k].user = (void *)(intptr_t)k;
        if (!replicated) tp[k].kind = FSDP_SHARD, tp[k].dim = dims[k];
    }
    ud.unit.name = replicated ? "rest" : "block", ud.unit.params = d + from;
    ud.unit.num_params = count, ud.tp = tp + from, ud.partial_grads = b->net->sp;
    if (replicated) ud.unit.reshard_after_forward = FSDP_RESHARD_NEVER;
    CALL(b->on.w, fsdp_tp_fully_shard(b->on.dm, &ud, &b->unit[replicated]));
}

H_FN fsdp_spec block_spec(const blk *b, int kind) {
    const int64_t shape[2] = {b->tokens * b->net->dp, b->net->d};
    fsdp_placement place[2];
    fsdp_spec s;
    memset(place, 0, sizeof place);
    place[0].kind = FSDP_SHARD, place[1].kind = (int8_t)kind;
    place[1].order = kind == FSDP_SHARD;
    CHECK_OK(fsdp_spec_init(&s, 2, b->on.shape, place, FSDP_F32, 2, shape));
    return s;
}
H_FN void block_ways(blk *b) {
    const fsdp_spec all = block_spec(b, FSDP_REPLICATE), adds = block_spec(b, FSDP_PARTIAL);
    const fsdp_spec mine = b->net->sp ? block_spec(b, FSDP_SHARD) : all;
    fsdp_redistribution_desc d = FSDP_ZERO;
    d.name = "to a half", d.from = mine, d.to = all;
    CALL(b->on.w, fsdp_redistribution_create(b->on.dm, &d, &b->gather));
    d.name = "from a half", d.from = adds, d.to = mine;
    CALL(b->on.w, fsdp_redistribution_create(b->on.dm, &d, &b->scatter));
    CALL(b->on.w, fsdp_redistribution_create_backward(b->gather, &adds, &b->gather_back));
    CALL(b->on.w, fsdp_redistribution_create_backward(b->scatter, NULL, &b->scatter_back));
}
/* Allocates floats, with room for the padding of unevenly sharded tokens. */
H_FN float *block_floats(blk *b, int64_t count) {
    void *ptr = NULL;
    if (b->on.model) CALL(b->on.w, fsdp_dmesh_alloc(b->on.dm, count * 4, &ptr));
    else ptr = lab_zeros((size_t)count, sizeof(float));
    return (float *)ptr;
}
H_FN void block_memory(blk *b) {
    const block_net *net = b->net;
    const int64_t width = b->heads * net->size, room = (b->tokens + net->tp) * net->d;
    float **const sums[] = {&b->x,  &b->n1,     &b->mid,  &b->n2,  &b->y,     &b->dy,
                            &b->dx, &b->narrow, &b->wide, &b->sum, &b->dwide, &b->dmid};
    for (size_t i = 0; i < sizeof sums / sizeof *sums; i++) *sums[i] = block_floats(b, room);
    b->qkv = (float *)lab_zeros((size_t)(3 * width * b->tokens), sizeof(float));
    b->dqkv = (float *)lab_zeros((size_t)(3 * width * b->tokens), sizeof(float));
    b->o = (float *)lab_zeros((size_t)(width * b->tokens), sizeof(float));
    b->prob = (float *)lab_zeros((size_t)(b->tokens * net->context * b->heads), sizeof(float));
    b->h = (float *)lab_zeros((size_t)(b->tokens * b->hidden), sizeof(float));
    const int64_t most = width > b->hidden ? width : b->hidden;
    b->dh = (float *)lab_zeros((size_t)(b->tokens * most), sizeof(float));
}
H_FN void block_sizes(blk *b, const block_net *net, int rank, int ranks) {
    fsdp_range r;
    b->net = net, b->tokens = net->batch * net->context;
    CHECK_OK(fsdp_shard_range(b->tokens, net->sp ? ranks : 1, net->sp ? rank : 0, &r));
    b->rows = r.count, b->first = r.start;
    CHECK_OK(fsdp_shard_range(net->heads, ranks, rank, &r));
    b->heads = r.count;
    CHECK_OK(fsdp_shard_range(net->hidden, ranks, rank, &r));
    b->hidden = r.count;
}
/* Opens a block on a mesh (dp, tp). The ranks of tp are replicas of the model. */
H_FN void block_open(blk *b, const block_net *net, fsdp_world *w) {
    fsdp_model_desc md = FSDP_ZERO;
    fsdp_mesh_info info;
    memset(b, 0, sizeof *b);
    bed_locate(&b->on, w, lab_mesh2(w, net->dp, net->tp, "dp", "tp"));
    CALL(w, fsdp_mesh_info_init(b->on.mesh, FSDP_MESH_INFO_HSDP, 0, 1, &info));
    md.mesh_info = &info;
    bed_make(&b->on, &md, net->overlap);
    block_sizes(b, net, b->on.coord[1], net->tp);
    block_unit(b, 1), block_unit(b, 0);
    block_ways(b);
    CALL(w, fsdp_init_params(b->on.model, block_fill, b));
    block_memory(b);
}
/* Opens a block on full tensors. */
H_FN void block_open_whole(blk *b, const block_net *net) {
    memset(b, 0, sizeof *b);
    block_sizes(b, net, 0, 1);
    block_memory(b);
    for (int k = 0; k < BK_PARAMS; k++) {
        b->w[k] = (float *)lab_zeros((size_t)block_numel(b, k), sizeof(float));
        b->g[k] = (float *)lab_zeros((size_t)block_numel(b, k), sizeof(float));
        for (int64_t i = 0; i < block_numel(b, k); i++) b->w[k][i] = (float)block_value(net, k, i);
    }
}
H_FN void block_close(blk *b) {
    float *const sums[] = {b->x,  b->n1,     b->mid,  b->n2,  b->y,     b->dy,
                           b->dx, b->narrow, b->wide, b->sum, b->dwide, b->dmid};
    free(b->qkv), free(b->dqkv), free(b->o), free(b->prob), free(b->h), free(b->dh);
    free(b->on.log.ops);
    if (b->on.model) return;
    for (size_t i = 0; i < sizeof sums / sizeof *sums; i++) free(sums[i]);
    for (int k = 0; k < BK_PARAMS; k++) free(b->w[k]), free(b->g[k]);
}

/* ---- differences between a rank and the whole block ------------------------------------------ */

/* Redistributes `from` into `to`; `work` runs meanwhile. */
H_FN void block_move(blk *b, fsdp_redistribution *way, float *to, const float *from,
                     void (*work)(blk *b)) {
    if (!b->on.model) {
        memcpy(to, from, (size_t)(b->tokens * b->net->d) * sizeof *to);
        if (work) work(b);
        return;
    }
    if (b->net->overlap) CALL(b->on.w, fsdp_redistribute_begin(way, to, from));
    else CALL(b->on.w, fsdp_redistribute(way, to, from));
    if (work) work(b);
    if (b->net->overlap) CALL(b->on.w, fsdp_redistribute_wait(way));
    lab_settle(b->on.w, b->on.model);
}
H_FN void block_hook(blk *b, fsdp_status (*hook)(fsdp_unit *)) {
    for (int i = 0; i < 2 && b->on.model; i++) CALL(b->on.w, hook(b->unit[i]));
}
H_FN void block_pointers(blk *b, int grads) {
    for (int k = 0; k < BK_PARAMS && b->on.model; k++) {
        fsdp_unit *unit = b->unit[k >= BK_CUT];
        const int index = k >= BK_CUT ? k - BK_CUT : k;
        b->w[k] = (float *)fsdp_data(unit, index);
        if (grads) b->g[k] = (float *)fsdp_grad(unit, index);
        CHECK(b->w[k] && (!grads || b->g[k]));
    }
}

/* ---- forward --------------------------------------------------------------------------------- */

/* out[n][o] = in[n][i] w[o][i]^T, plus b unless it is NULL; sums in double */
H_FN void block_linear(float *out, const float *in, const float *w, const float *b, int64_t n,
                       int64_t o, int64_t i) {
    for (int64_t r = 0; r < n; r++)
        for (int64_t c = 0; c < o; c++) {
            double sum = b ? (double)b[c] : 0;
            for (int64_t k = 0; k < i; k++) sum += (double)in[r * i + k] * (double)w[c * i + k];
            out[r * o + c] = (float)sum;
        }
}
H_FN void block_linear_dx(float *dx, const float *dy, const float *w, int64_t n, int64_t o,
                          int64_t i) {
    for (int64_t r = 0; r < n; r++)
        for (int64_t k = 0; k < i; k++) {
            double sum = 0;
            for (int64_t c = 0; c < o; c++) sum += (double)dy[r * o + c] * (double)w[c * i + k];
            dx[r * i + k] = (float)sum;
        }
}
H_FN void block_linear_dw(float *dw, float *db, const float *dy, const float *in, int64_t n,
                          int64_t o, int64_t i) {
    for (int64_t c = 0; c < o; c++) {
        double bias = 0;
        for (int64_t r = 0; r < n; r++) bias += (double)dy[r * o + c];
        if (db) db[c] += (float)bias;
        for (int64_t k = 0; k < i && dw; k++) {
            double sum = 0;
            for (int64_t r = 0; r < n; r++) sum += (double)dy[r * o + c] * (double)in[r * i + k];
            dw[c * i + k] += (float)sum;
        }
    }
}
H_FN double block_inv(const float *row, int64_t d) {
    double sum = 0;
    for (int64_t i = 0; i < d; i++) sum += (double)row[i] * (double)row[i];
    return 1 / sqrt(sum / (double)d + 1e-5);
}
H_FN void block_norm(blk *b, float *whole, const float *in, const float *w) {
    const int64_t d = b->net->d;
    for (int64_t i = 0; i < b->rows * d; i++)
        b->narrow[i] = (float)((double)in[i] * block_inv(in + i / d * d, d) * (double)w[i % d]);
    block_move(b, b->gather, whole, b->narrow, NULL);
}
/* dx = dy + the gradient through the norm of `in`, whose output has the gradient b->sum */
H_FN void block_norm_back(blk *b, float *dx, const float *dy, const float *in, const float *w,
                          float *dw) {
    const int64_t d = b->net->d;
    for (int64_t r = 0; r < b->rows; r++) {
        const float *x = in + r * d, *dn = b->sum + r * d;
        const double inv = block_inv(x, d);
        double dot = 0;
        for (int64_t i = 0; i < d; i++) {
            dot += (double)dn[i] * (double)w[i] * (double)x[i];
            dw[i] += (float)((double)dn[i] * (double)x[i] * inv);
        }
        for (int64_t i = 0; i < d; i++)
            dx[r * d + i] = (float)((double)dy[r * d + i] + inv * (double)dn[i] * (double)w[i] -
                                    inv * inv * inv * (double)x[i] * dot / (double)d);
    }
}

/* q, k or v (0, 1, 2) of a token and head */
H_FN float *block_at(const blk *b, float *qkv, int which, int64_t token, int64_t head) {
    return qkv + ((token * 3 + which) * b->heads + head) * b->net->size;
}
H_FN double block_dot(const float *a, const float *b, int64_t n) {
    double sum = 0;
    for (int64_t i = 0; i < n; i++) sum += (double)a[i] * (double)b[i];
    return sum;
}
H_FN void block_attention(blk *b, int64_t token, int64_t head) {
    const int64_t T = b->net->context, size = b->net->size, begin = token / T * T;
    float *p = b->prob + (token * b->heads + head) * T,
          *out = b->o + (token * b->heads + head) * size;
    const float *q = block_at(b, b->qkv, 0, token, head);
    double e[64], sum = 0;
    CHECK(T <= 64);
    for (int64_t t = begin; t <= token; t++)
        sum += e[t - begin] = exp(block_dot(q, block_at(b, b->qkv, 1, t, head), size) /
                                  sqrt((double)size));
    for (int64_t i = 0; i < size; i++) {
        double value = 0;
        for (int64_t t = begin; t <= token; t++)
            value += e[t - begin] / sum * (double)block_at(b, b->qkv, 2, t, head)[i];
        out[i] = (float)value;
    }
    for (int64_t t = begin; t <= token; t++) p[t - begin] = (float)(e[t - begin] / sum);
}
/* dout: gradient of the head's output */
H_FN void block_attention_back(blk *b, int64_t token, int64_t head, const float *dout) {
    const int64_t T = b->net->context, size = b->net->size, begin = token / T * T;
    const float *p = b->prob + (token * b->heads + head) * T;
    double dp[64], mean = 0;
    for (int64_t t = begin; t <= token; t++) {
        dp[t - begin] = block_dot(dout, block_at(b, b->qkv, 2, t, head), size);
        mean += dp[t - begin] * (double)p[t - begin];
    }
    for (int64_t t = begin; t <= token; t++) {
        const double weight = (double)p[t - begin];
        const double ds = weight * (dp[t - begin] - mean) / sqrt((double)size);
        for (int64_t i = 0; i < size; i++) {
            block_at(b, b->dqkv, 2, t, head)[i] += (float)(weight * (double)dout[i]);
            block_at(b, b->dqkv, 0, token,
                     head)[i] += (float)(ds * (double)block_at(b, b->qkv, 1, t, head)[i]);
            block_at(b, b->dqkv, 1, t,
                     head)[i] += (float)(ds * (double)block_at(b, b->qkv, 0, token, head)[i]);
        }
    }
}

/* out = in + bias + the sum of the partial values in b->wide */
H_FN void block_residual(blk *b, float *out, const float *in, const float *bias) {
    block_move(b, b->scatter, b->sum, b->wide, NULL);
    for (int64_t i = 0; i < b->rows * b->net->d; i++)
        out[i] = (float)((double)in[i] + (double)bias[i % b->net->d] + (double)b->sum[i]);
}
H_FN void block_forward(blk *b) {
    const int64_t R = b->tokens, d = b->net->d, width = b->heads * b->net->size;
    block_hook(b, fsdp_pre_forward);
    block_pointers(b, 0);
    block_norm(b, b->n1, b->x, b->w[BK_NORM1]);
    block_linear(b->qkv, b->n1, b->w[BK_QKVW], b->w[BK_QKVB], R, 3 * width, d);
    for (int64_t t = 0; t < R; t++)
        for (int64_t h = 0; h < b->heads; h++) block_attention(b, t, h);
    block_linear(b->wide, b->o, b->w[BK_PROJW], NULL, R, d, width);
    block_residual(b, b->mid, b->x, b->w[BK_PROJB]);
    block_norm(b, b->n2, b->mid, b->w[BK_NORM2]);
    block_linear(b->h, b->n2, b->w[BK_FCW], b->w[BK_FCB], R, b->hidden, d);
    for (int64_t i = 0; i < R * b->hidden; i++) b->h[i] = (float)tanh((double)b->h[i]);
    block_linear(b->wide, b->h, b->w[BK_OUTW], NULL, R, d, b->hidden);
    block_residual(b, b->y, b->mid, b->w[BK_OUTB]);
    block_hook(b, fsdp_post_forward);
}

/* ---- backward -------------------------------------------------------------------------------- */

H_FN void block_fc_dw(blk *b) {
    block_linear_dw(b->g[BK_FCW], b->g[BK_FCB], b->dh, b->n2, b->tokens, b->hidden, b->net->d);
}
H_FN void block_qkv_dw(blk *b) {
    block_linear_dw(b->g[BK_QKVW], b->g[BK_QKVB], b->dqkv, b->n1, b->tokens,
                    3 * b->heads * b->net->size, b->net->d);
}
H_FN void block_backward(blk *b) {
    const int64_t R = b->tokens, d = b->net->d, width = b->heads * b->net->size;
    block_hook(b, fsdp_pre_backward);
    block_pointers(b, 1);
    block_linear_dw(NULL, b->g[BK_OUTB], b->dy, NULL, b->rows, d, 0);
    memcpy(b->narrow, b->dy, (size_t)(b->rows * d) * sizeof(float));
    block_move(b, b->scatter_back, b->dwide, b->narrow, NULL);
    block_linear_dw(b->g[BK_OUTW], NULL, b->dwide, b->h, R, d, b->hidden);
    block_linear_dx(b->dh, b->dwide, b->w[BK_OUTW], R, d, b->hidden);
    for (int64_t i = 0; i < R * b->hidden; i++)
        b->dh[i] = (float)((double)b->dh[i] * (1 - (double)b->h[i] * (double)b->h[i]));
    block_linear_dx(b->wide, b->dh, b->w[BK_FCW], R, b->hidden, d);
    block_move(b, b->gather_back, b->sum, b->wide, block_fc_dw);
    block_norm_back(b, b->dmid, b->dy, b->mid, b->w[BK_NORM2], b->g[BK_NORM2]);
    block_linear_dw(NULL, b->g[BK_PROJB], b->dmid, NULL, b->rows, d, 0);
    memcpy(b->narrow, b->dmid, (size_t)(b->rows * d) * sizeof(float));
    block_move(b, b->scatter_back, b->dwide, b->narrow, NULL);
    block_linear_dw(b->g[BK_PROJW], NULL, b->dwide, b->o, R, d, width);
    block_linear_dx(b->dh, b->dwide, b->w[BK_PROJW], R, d, width);
    memset(b->dqkv, 0, (size_t)(3 * width * R) * sizeof(float));
    for (int64_t t = 0; t < R; t++)
        for (int64_t h = 0; h < b->heads; h++)
            block_attention_back(b, t, h, b->dh + (t * b->heads + h) * b->net->size);
    block_linear_dx(b->wide, b->dqkv, b->w[BK_QKVW], R, 3 * width, d);
    block_move(b, b->gather_back, b->sum, b->wide, block_qkv_dw);
    block_norm_back(b, b->dx, b->dmid, b->x, b->w[BK_NORM1], b->g[BK_NORM1]);
    block_hook(b, fsdp_post_backward);
    if (b->on.model) CALL(b->on.w, fsdp_finalize_backward(b->on.model));
}
#endif
