/* lab_tp.h - a net with tensor parallelism, as a user writes it with fsdp_dtensor.h, and the same
   net on full tensors without the library, which gives the expected training.

       h = emb[ids] or x;  of each block  h = h + net2(softsign(net1(h * norm)))
       y = h * norm of the root, or logits = y head^T
       loss = sum((y - t)^2) / (tokens d), or the mean cross-entropy

   net1, its bias, emb and head are sharded along dim 0, net2 along dim 1. Norms and the bias of
   net2 are in one replicated unit that is made first and stays open. emb and head are a unit, and
   each block is one. With `sp` tokens are sharded along dim 0 except where a linear needs all of
   them.

   SPDX-License-Identifier: MIT */
#ifndef LAB_TP_H
#define LAB_TP_H
#include <math.h> /* fabs, log */
#include "lab.h"
#include "golden.h"
#include "lab_bed.h"

enum { TP_PARAMS = 64, TP_BLOCKS = 8, TP_STEPS = 32, TP_DATA = 8 };
enum { TP_NORM, TP_W1, TP_B1, TP_W2, TP_B2, TP_EMB, TP_ROOT, TP_HEAD, TP_ROLES };
enum { TP_REPLICATED, TP_VOCAB, TP_BLOCK }; /* units; from TP_BLOCK on, one for each block */

typedef struct tp_param {
    char name[48];
    int role, block, unit, index; /* index: in its unit */
    int cut, ndim, shard_dim, frozen;
    int64_t shape[2], numel, at; /* at: offset in an array of all parameters */
    uint64_t seed;
    double scale, base; /* range of initial values */
} tp_param;

typedef struct tp_opt {
    int sgd;
    double lr, a, b, c, decay; /* sgd: momentum, dampening, nesterov; adamw: betas, eps */
} tp_opt;

typedef struct tp_net {
    const char *name;
    int replicas, shards, tp, stages, tp_first; /* sizes of mesh dims; 0: no such dim */
    int blocks, sp;
    int64_t tokens, d, hidden, vocab;               /* tokens: of each rank that has its own data */
    int micro, no_sync, recompute, raf, given_mesh; /* given_mesh: the model gets a mesh_info */
    fsdp_dtype param_dtype, reduce_dtype;
    double clip_p, max_norm; /* clip_p 0: no clipping */
    int steps, num_params;
    uint64_t seed; /* seed of the data */
    tp_param params[TP_PARAMS];
    int64_t total, most;
} tp_net;

/* Results of a training, on a rank or on full tensors. */
typedef struct tp_story {
    double loss[TP_STEPS][TP_DATA], norm[TP_STEPS]; /* loss: of the ranks with their own data */
    double *grad[TP_STEPS], *final;                 /* [total]; grad before clipping */
} tp_story;

/* One rank, or, with model == NULL, the full tensors. */
typedef struct tp_rank {
    const tp_net *net;
    bed on;
    fsdp_unit *unit[TP_BLOCK + TP_BLOCKS];
    fsdp_adamw *adamw;
    fsdp_sgd *sgd;
    /* index of the data, and of the part in that mesh dim */
    int data, num_data, tp, num_tp, tp_dim;
    int64_t first, rows; /* this rank's tokens, if the sequence is sharded */
    int64_t hidden, vocab, vocab_first;
    fsdp_redistribution *gather, *gather_back, *scatter, *scatter_back, *max, *sums;
    float *h[TP_BLOCKS + 1], *full[TP_BLOCKS], *z[TP_BLOCKS], *s[TP_BLOCKS];
    float *a, *branch, *o, *dh, *dfull, *y, *yfull, *t, *logits, *row_max, *row_sums, *row_dout;
    int64_t *ids;
    double *w1, *w2, *b, *g; /* [most] */
    float *value, *m, *v;    /* [total], full: parameters, state of the optimizer */
    double *grad;            /* [total], full */
    int log_begin, log_end;  /* ops of the last step, without the reads of its results */
    w_heap *heap; /* may be NULL; the world's: steps from the third on allocate nothing */
    double *private_memory;
} tp_rank;

/* ---- the net -------------------------------------------------------------------------------- */

/* Returns the parameter's index, or -1 if the net has none. */
H_FN int tp_find(const tp_net *net, int role, int block) {
    for (int p = 0; p < net->num_params; p++)
        if (net->params[p].role == role && (role > TP_B2 || net->params[p].block == block))
            return p;
    return -1;
}

/* Adds a parameter; its shape, unit and sharding follow from the role. */
H_FN tp_param *tp_add(tp_net *net, int role, int block) {
    tp_param *p = &net->params[net->num_params];
    int64_t rows[TP_ROLES] = {net->d, net->hidden, net->hidden, net->d,
                              net->d, net->vocab,  net->d,      net->vocab};
    int64_t columns[TP_ROLES] = {0, net->d, 0, net->hidden, 0, net->d, 0, net->d};
    CHECK(net->num_params < TP_PARAMS && block < TP_BLOCKS);
    memset(p, 0, sizeof *p);
    p->role = role, p->block = block;
    p->cut = role == TP_W1 || role == TP_B1 || role == TP_W2 || role == TP_EMB || role == TP_HEAD;
    p->unit = !p->cut ? TP_REPLICATED : role > TP_B2 ? TP_VOCAB : TP_BLOCK + block;
    for (int i = 0; i < net->num_params; i++) p->index += net->params[i].unit == p->unit;
    p->ndim = columns[role] ? 2 : 1;
    p->shape[0] = rows[role], p->shape[1] = columns[role];
    p->numel = lab_numel(p->ndim, p->shape);
    p->at = net->total;
    net->total += p->numel;
    if (p->numel > net->most) net->most = p->numel;
    net->num_params++;
    return p;
}

/* Adds all parameters, with values that keep wide nets from amplifying rounding errors. */
H_FN void tp_fill_net(tp_net *net) {
    static const char *const names[TP_ROLES] = {"norm", "w1",  "b1",   "w2",
                                                "b2",   "emb", "root", "head"};
    for (int i = 0; i < 5 * net->blocks + (net->vocab ? 3 : 1); i++) {
        int block = i / 5, role = i % 5;
        if (block == net->blocks) role = net->vocab ? TP_EMB + role : TP_ROOT;
        tp_param *p = tp_add(net, role, block);
        snprintf(p->name, sizeof p->name, "%d.%s", block, names[role]);
        p->seed = net->seed + 1000 + (uint64_t)i;
        p->scale = p->ndim == 1 ? 1
                   : net->d > 8 ? 0.5
                                : 2,
        p->base = role == TP_NORM || role == TP_ROOT;
    }
}

H_FN int tp_tp_dim(const tp_param *p) { return p->role == TP_W2 ? 1 : 0; }

H_FN void tp_story_make(tp_story *s, const tp_net *net) {
    memset(s, 0, sizeof *s);
    CHECK(net->steps <= TP_STEPS);
    for (int i = 0; i < net->steps; i++) s->grad[i] = lab_doubles(net->total);
    s->final = lab_doubles(net->total);
}
H_FN void tp_story_free(tp_story *s, const tp_net *net) {
    for (int i = 0; i < net->steps; i++) free(s->grad[i]);
    free(s->final);
}

/* ---- opening a rank ------------------------------------------------------------------------- */

enum { TP_ALL, TP_SEQUENCE, TP_ADDENDS }; /* placement of an activation on tp */

/* Returns the spec of a tensor in which each rank with its own data has `rows` rows. */
H_FN fsdp_spec tp_spec(const tp_rank *t, int how, int op, int64_t rows, int64_t columns) {
    fsdp_placement place[DIMS];
    const int64_t tensor[2] = {rows * t->num_data, columns};
    const int ndim = t->on.ndim, tp = t->tp_dim;
    fsdp_spec s;
    memset(place, 0, sizeof place);
    for (int m = 0; m < ndim; m++) {
        place[m].kind = FSDP_SHARD; /* tp shards last, wherever it is in the mesh */
        place[m].order = (int8_t)(m == tp ? ndim - 1 : m - (m > tp));
        if (m != tp) continue;
        place[m].kind = (int8_t)(how == TP_ALL        ? FSDP_REPLICATE
                                 : how == TP_SEQUENCE ? FSDP_SHARD
                                                      : FSDP_PARTIAL);
        place[m].op = (int8_t)op;
    }
    CHECK_OK(fsdp_spec_init(&s, ndim, t->on.shape, place, FSDP_F32, columns ? 2 : 1, tensor));
    return s;
}

H_FN fsdp_redistribution *tp_way(tp_rank *t, const char *name, const fsdp_spec *from,
                                 const fsdp_spec *to) {
    fsdp_redistribution_desc d = FSDP_ZERO;
    fsdp_redistribution *r = NULL;
    d.name = name, d.from = *from, d.to = *to;
    CALL(t->on.w, fsdp_redistribution_create(t->on.dm, &d, &r));
    return r;
}

H_FN void tp_ways(tp_rank *t) {
    const tp_net *net = t->net;
    int seq = net->sp ? TP_SEQUENCE : TP_ALL;
    fsdp_spec all = tp_spec(t, TP_ALL, 0, net->tokens, net->d);
    fsdp_spec mine = tp_spec(t, seq, 0, net->tokens, net->d);
    fsdp_spec adds = tp_spec(t, TP_ADDENDS, FSDP_SUM, net->tokens, net->d);
    t->gather = tp_way(t, "to a linear", &mine, &all);
    t->scatter = tp_way(t, "from a linear", &adds, &mine);
    CALL(t->on.w, fsdp_redistribution_create_backward(t->gather, &adds, &t->gather_back));
    CALL(t->on.w, fsdp_redistribution_create_backward(t->scatter, NULL, &t->scatter_back));
    fsdp_spec max = tp_spec(t, TP_ADDENDS, FSDP_MAX, net->tokens, 0);
    fsdp_spec sums = tp_spec(t, TP_ADDENDS, FSDP_SUM, 2 * net->tokens, 0);
    fsdp_spec max_all = tp_spec(t, TP_ALL, 0, net->tokens, 0);
    fsdp_spec sums_all = tp_spec(t, TP_ALL, 0, 2 * net->tokens, 0);
    if (net->vocab) t->max = tp_way(t, "loss, max", &max, &max_all);
    if (net->vocab) t->sums = tp_way(t, "loss, sums", &sums, &sums_all);
}

/* Fills values by the index in the full tensor. */
H_FN void tp_fill(void *user, const fsdp_param_view *block) {
    tp_rank *t = (tp_rank *)user;
    const tp_param *p = (const tp_param *)block->user;
    fsdp_param_view v;
    CALL(t->on.w, fsdp_tp_view(t->on.dm, block, &v));
    for (int64_t k = 0; k < v.numel; k++) {
        uint64_t at = (uint64_t)fsdp_view_index(&v, k);
        CHECK(at < (uint64_t)p->numel);
        lab_put(v.data, v.dtype, k, golden_value(p->seed, at, p->scale) + p->base);
    }
}

/* Makes the mesh: (stages, replicas, shards, tp), or with tp first, without dims of size 0. A stage
   has a slice of it. */
H_FN void tp_make_mesh(tp_rank *t, fsdp_world *w, fsdp_model_desc *md, fsdp_mesh_info *info) {
    const tp_net *net = t->net;
    const int order[2][4] = {{0, 1, 2, 3}, {3, 0, 1, 2}};
    const int sizes[4] = {net->stages, net->replicas, net->shards, net->tp};
    const char *const all[4] = {"pp", "dp_replicate", net->replicas ? "dp_shard" : "dp", "tp"};
    const char *names[4];
    int32_t shape[4], dims[4], ndim = 0, shard = -1, replicate = -1;
    for (int k = 0; k < 4; k++) {
        int i = order[net->tp_first][k];
        if (!sizes[i]) continue;
        if (i == 1) replicate = ndim;
        if (i == 2) shard = ndim;
        dims[ndim] = ndim, names[ndim] = all[i], shape[ndim++] = sizes[i];
    }
    fsdp_mesh *whole = lab_mesh(w, ndim, shape, names, NULL), *mine = whole;
    if (net->stages) CALL(w, fsdp_mesh_slice(whole, dims + 1, ndim - 1, &mine));
    bed_locate(&t->on, w, mine);
    if (!net->given_mesh) return;
    int kind = shard < 0       ? FSDP_MESH_INFO_DDP
               : replicate < 0 ? FSDP_MESH_INFO_FSDP
                               : FSDP_MESH_INFO_HSDP;
    CALL(w, fsdp_mesh_info_init(whole, kind, shard, replicate, info));
    md->mesh_info = info;
}

H_FN void tp_make_unit(tp_rank *t, int unit) {
    fsdp_param_desc d[TP_PARAMS];
    fsdp_placement tp[TP_PARAMS];
    fsdp_tp_unit_desc ud = FSDP_ZERO;
    int count = 0;
    memset(tp, 0, sizeof tp);
    for (int i = 0; i < t->net->num_params; i++) {
        const tp_param *p = &t->net->params[i];
        if (p->unit != unit) continue;
        d[count] = lab_desc(p->ndim, p->shape, p->shard_dim, FSDP_F32, p->frozen);
        d[count].name = p->name, d[count].user = (void *)(uintptr_t)p;
        if (p->cut) tp[count].kind = FSDP_SHARD, tp[count].dim = (int8_t)tp_tp_dim(p);
        count++;
    }
    if (!count) return;
    ud.unit.params = d, ud.unit.num_params = count, ud.tp = tp;
    if (unit < TP_BLOCK) ud.unit.reshard_after_forward = FSDP_RESHARD_NEVER;
    ud.partial_grads = t->net->sp;
    CALL(t->on.w, fsdp_tp_fully_shard(t->on.dm, &ud, &t->unit[unit]));
}

H_FN float *tp_floats(tp_rank *t, int64_t count) {
    void *ptr = NULL;
    if (t->on.model)
        CALL(t->on.w, fsdp_dmesh_alloc(t->on.dm, count * (int64_t)sizeof(float), &ptr));
    else ptr = lab_zeros((size_t)count, sizeof(float));
    return (float *)ptr;
}

/* Returns the rows of the largest of n parts. */
H_FN int64_t tp_padded(int64_t rows, int n) {
    fsdp_range r;
    CHECK_OK(fsdp_shard_range(rows, n, 0, &r));
    return r.padded;
}

/* Allocates activations, including the padding of uneven shards. */
H_FN void tp_memory(tp_rank *t) {
    const tp_net *net = t->net;
    int64_t n = net->tokens, padded = tp_padded(n, t->num_tp) * t->num_tp;
    int64_t size = padded * net->d;
    for (int b = 0; b <= net->blocks; b++) t->h[b] = tp_floats(t, size);
    for (int b = 0; b < net->blocks; b++) {
        t->full[b] = tp_floats(t, size);
        t->z[b] = tp_floats(t, n * t->hidden), t->s[b] = tp_floats(t, n * t->hidden);
    }
    float **wide[] = {&t->a, &t->branch, &t->o, &t->dh, &t->dfull, &t->y, &t->yfull, &t->t};
    for (size_t i = 0; i < sizeof wide / sizeof *wide; i++) *wide[i] = tp_floats(t, size);
    t->logits = tp_floats(t, n * t->vocab);
    t->row_max = tp_floats(t, n), t->row_sums = tp_floats(t, 2 * n), t->row_dout = tp_floats(t, n);
    t->ids = (int64_t *)lab_zeros((size_t)(2 * n), sizeof *t->ids);
    t->private_memory = lab_doubles(4 * net->most);
    t->w1 = t->private_memory, t->w2 = t->w1 + net->most;
    t->b = t->w2 + net->most, t->g = t->b + net->most;
}

H_FN void tp_sizes(tp_rank *t) {
    const tp_net *net = t->net;
    fsdp_range r;
    CHECK_OK(fsdp_shard_range(net->tokens, t->num_tp, t->tp, &r));
    t->first = net->sp ? r.start : 0, t->rows = net->sp ? r.count : net->tokens;
    CHECK_OK(fsdp_shard_range(net->hidden, t->num_tp, t->tp, &r));
    t->hidden = r.count;
    CHECK_OK(fsdp_shard_range(net->vocab, t->num_tp, t->tp, &r));
    t->vocab = r.count, t->vocab_first = r.start;
}

H_FN void tp_open(tp_rank *t, const tp_net *net, fsdp_world *w, const tp_opt *o) {
    fsdp_model_desc md = FSDP_ZERO;
    fsdp_mesh_info info;
    fsdp_adamw_desc adamw = fsdp_adamw_defaults();
    fsdp_sgd_desc sgd = fsdp_sgd_defaults();
    memset(t, 0, sizeof *t);
    t->net = net;
    tp_make_mesh(t, w, &md, &info);
    md.param_dtype = net->param_dtype, md.reduce_dtype = net->reduce_dtype;
    md.reshard_after_forward = net->raf;
    md.fill_bytes = 64; /* initial values come in several blocks */
    bed_make(&t->on, &md, 0);
    const int tp = t->tp_dim = fsdp_mesh_dim(t->on.mesh, "tp");
    t->tp = t->on.coord[tp], t->num_tp = t->on.shape[tp];
    t->num_data = fsdp_mesh_size(t->on.mesh, -1) / t->num_tp;
    t->data = 0; /* the other dims count data, row-major */
    for (int m = 0; m < t->on.ndim; m++)
        if (m != tp) t->data = t->data * t->on.shape[m] + t->on.coord[m];
    tp_sizes(t);
    tp_ways(t);
    for (int u = 0; u < TP_BLOCK + net->blocks; u++) tp_make_unit(t, u);
    CALL(w, fsdp_init_params(t->on.model, tp_fill, t));
    adamw.beta1 = o->a, adamw.beta2 = o->b, adamw.eps = o->c, adamw.weight_decay = o->decay;
    sgd.momentum = o->a, sgd.dampening = o->b, sgd.nesterov = o->c > 0, sgd.weight_decay = o->decay;
    if (o->sgd) CALL(w, fsdp_sgd_create(t->on.model, &sgd, &t->sgd));
    else CALL(w, fsdp_adamw_create(t->on.model, &adamw, &t->adamw));
    tp_memory(t);
    bed_watch(&t->on);
}
H_FN void tp_close(tp_rank *t) { free(t->ids), free(t->private_memory), free(t->on.log.ops); }

/* ---- differences between a rank and full tensors -------------------------------------------- */

H_FN void tp_hook(tp_rank *t, fsdp_status (*hook)(fsdp_unit *), int unit) {
    if (t->on.model && t->unit[unit]) CALL(t->on.w, hook(t->unit[unit]));
}

/* Returns the elements of this rank's part, which a unit gathers. */
H_FN int64_t tp_part(const tp_rank *t, const tp_param *p) {
    fsdp_range r;
    if (!p->cut) return p->numel;
    CHECK_OK(fsdp_shard_range(p->shape[tp_tp_dim(p)], t->num_tp, t->tp, &r));
    return p->ndim == 1 ? r.count : r.count * p->shape[!tp_tp_dim(p)];
}

H_FN fsdp_dtype tp_dtype(const tp_net *net) {
    return net->param_dtype ? net->param_dtype : FSDP_F32;
}

H_FN void tp_load(tp_rank *t, int role, int block, double *out) {
    int i = tp_find(t->net, role, block);
    CHECK(i >= 0);
    const tp_param *p = &t->net->params[i];
    if (t->on.model) {
        const void *data = fsdp_data(t->unit[p->unit], p->index);
        CHECK(data != NULL);
        lab_settle(t->on.w, t->on.model);
        lab_load(out, data, tp_dtype(t->net), tp_part(t, p));
    } else
        for (int64_t k = 0; k < p->numel; k++)
            out[k] = lab_round(tp_dtype(t->net), (double)t->value[p->at + k]);
}

/* Adds to the gradient; for full tensors, the share of one rank with its own data. */
H_FN void tp_add_grad(tp_rank *t, int role, int block, const double *g) {
    const tp_param *p = &t->net->params[tp_find(t->net, role, block)];
    fsdp_dtype dtype = tp_dtype(t->net);
    if (p->frozen) return;
    void *grad = t->on.model ? fsdp_grad(t->unit[p->unit], p->index) : NULL;
    CHECK(!t->on.model || grad);
    if (grad) lab_settle(t->on.w, t->on.model);
    for (int64_t k = 0; k < tp_part(t, p); k++)
        if (grad) lab_put(grad, dtype, k, lab_get(grad, dtype, k) + g[k]);
        else t->grad[p->at + k] += lab_round(dtype, g[k]) / t->num_data;
}

/* Redistributes; for full tensors, copies. */
H_FN void tp_move(tp_rank *t, fsdp_redistribution *r, float *dst, const float *src, int64_t count) {
    if (t->on.model) {
        CALL(t->on.w, fsdp_redistribute(r, dst, src));
        lab_settle(t->on.w, t->on.model);
    } else if (dst != src) memcpy(dst, src, (size_t)count * sizeof *dst);
}

/* ---- forward and backward ------------------------------------------------------------------- */

/* out[n][o] = x[n][i] w[o][i]^T, with a bias or NULL. Sums are in f64 and are rounded once. */
H_FN void tp_linear(float *out, const float *x, const double *w, const double *b, int64_t n,
                    int64_t o, int64_t i) {
    for (int64_t r = 0; r < n; r++)
        for (int64_t c = 0; c < o; c++) {
            double sum = b ? b[c] : 0;
            for (int64_t k = 0; k < i; k++) sum += (double)x[r * i + k] * w[c * i + k];
            out[r * o + c] = (float)sum;
        }
}
H_FN void tp_linear_dx(float *dx, const float *dy, const double *w, int64_t n, int64_t o,
                       int64_t i) {
    for (int64_t r = 0; r < n; r++)
        for (int64_t k = 0; k < i; k++) {
            double sum = 0;
            for (int64_t c = 0; c < o; c++) sum += (double)dy[r * o + c] * w[c * i + k];
            dx[r * i + k] = (float)sum;
        }
}
H_FN void tp_linear_dw(double *dw, const float *dy, const float *x, int64_t n, int64_t o,
                       int64_t i) {
    for (int64_t c = 0; c < o; c++)
        for (int64_t k = 0; k < i; k++) {
            double sum = 0;
            for (int64_t r = 0; r < n; r++) sum += (double)dy[r * o + c] * (double)x[r * i + k];
            dw[c * i + k] = sum;
        }
}
/* Sums rows, or their products with x if it is not NULL. */
H_FN void tp_rows_sum(double *sum, const float *dy, const float *x, int64_t n, int64_t o) {
    for (int64_t c = 0; c < o; c++) sum[c] = 0;
    for (int64_t r = 0; r < n * o; r++) sum[r % o] += (double)dy[r] * (x ? (double)x[r] : 1);
}
H_FN void tp_scale(float *out, const float *x, const double *w, int64_t n, int64_t d) {
    for (int64_t k = 0; k < n * d; k++) out[k] = (float)((double)x[k] * w[k % d]);
}

/* Computes the values for a block's backward: the gathered input of net1, and both sides of
   softsign. */
H_FN void tp_block_inner(tp_rank *t, int b) {
    const tp_net *net = t->net;
    int64_t size = t->rows * net->d;
    tp_load(t, TP_NORM, b, t->b);
    tp_scale(t->a, t->h[b], t->b, t->rows, net->d);
    tp_move(t, t->gather, t->full[b], t->a, size);
    tp_load(t, TP_W1, b, t->w1), tp_load(t, TP_B1, b, t->b);
    tp_linear(t->z[b], t->full[b], t->w1, t->b, net->tokens, t->hidden, net->d);
    for (int64_t k = 0; k < net->tokens * t->hidden; k++)
        t->s[b][k] = (float)((double)t->z[b][k] / (1 + fabs((double)t->z[b][k])));
    tp_load(t, TP_W2, b, t->w2);
    tp_linear(t->o, t->s[b], t->w2, NULL, net->tokens, net->d, t->hidden);
    tp_move(t, t->scatter, t->branch, t->o, size);
}

H_FN void tp_block(tp_rank *t, int b) {
    int64_t d = t->net->d;
    tp_hook(t, fsdp_pre_forward, TP_BLOCK + b);
    tp_block_inner(t, b);
    tp_load(t, TP_B2, b, t->b);
    for (int64_t k = 0; k < t->rows * d; k++)
        t->h[b + 1][k] = (float)((double)t->h[b][k] + (double)t->branch[k] + t->b[k % d]);
    tp_hook(t, fsdp_post_forward, TP_BLOCK + b);
}

/* dh: gradient of the block's output; on return, of its input. */
H_FN void tp_block_back(tp_rank *t, int b) {
    const tp_net *net = t->net;
    int64_t size = t->rows * net->d, n = net->tokens;
    tp_hook(t, fsdp_pre_backward, TP_BLOCK + b);
    if (net->recompute) {
        tp_hook(t, fsdp_pre_forward, TP_BLOCK + b);
        tp_block_inner(t, b);
        tp_hook(t, fsdp_post_forward, TP_BLOCK + b);
    }
    tp_rows_sum(t->g, t->dh, NULL, t->rows, net->d);
    tp_add_grad(t, TP_B2, b, t->g);
    tp_move(t, t->scatter_back, t->dfull, t->dh, size);
    tp_linear_dw(t->g, t->dfull, t->s[b], n, net->d, t->hidden);
    tp_add_grad(t, TP_W2, b, t->g);
    tp_load(t, TP_W2, b, t->w2);
    float *dz = t->s[b]; /* softsign's output is not needed any more */
    tp_linear_dx(dz, t->dfull, t->w2, n, net->d, t->hidden);
    for (int64_t k = 0; k < n * t->hidden; k++) {
        double root = 1 + fabs((double)t->z[b][k]);
        dz[k] = (float)((double)dz[k] / (root * root));
    }
    tp_rows_sum(t->g, dz, NULL, n, t->hidden);
    tp_add_grad(t, TP_B1, b, t->g);
    tp_linear_dw(t->g, dz, t->full[b], n, t->hidden, net->d);
    tp_add_grad(t, TP_W1, b, t->g);
    tp_load(t, TP_W1, b, t->w1);
    tp_linear_dx(t->o, dz, t->w1, n, t->hidden, net->d);
    tp_move(t, t->gather_back, t->branch, t->o, size);
    tp_rows_sum(t->g, t->branch, t->h[b], t->rows, net->d);
    tp_add_grad(t, TP_NORM, b, t->g);
    tp_load(t, TP_NORM, b, t->b);
    for (int64_t k = 0; k < size; k++)
        t->dh[k] = (float)((double)t->dh[k] + (double)t->branch[k] * t->b[k % net->d]);
    tp_hook(t, fsdp_post_backward, TP_BLOCK + b);
}

/* Rows that this rank lacks are written as zeros, not multiplied. */
H_FN void tp_embed(tp_rank *t) {
    int64_t d = t->net->d;
    tp_load(t, TP_EMB, 0, t->w1);
    for (int64_t n = 0; n < t->net->tokens; n++) {
        int64_t row = t->ids[n] - t->vocab_first;
        for (int64_t k = 0; k < d; k++)
            t->o[n * d + k] = row >= 0 && row < t->vocab ? (float)t->w1[row * d + k] : 0;
    }
    tp_move(t, t->scatter, t->h[0], t->o, t->rows * d);
}
H_FN void tp_embed_back(tp_rank *t) {
    int64_t d = t->net->d;
    tp_move(t, t->scatter_back, t->dfull, t->dh, t->rows * d);
    for (int64_t k = 0; k < t->vocab * d; k++) t->g[k] = 0;
    for (int64_t n = 0; n < t->net->tokens; n++) {
        int64_t row = t->ids[n] - t->vocab_first;
        for (int64_t k = 0; k < d && row >= 0 && row < t->vocab; k++)
            t->g[row * d + k] += (double)t->dfull[n * d + k];
    }
    tp_add_grad(t, TP_EMB, 0, t->g);
}

/* Returns the mean cross-entropy of y head^T, and stores the gradient of y in `branch`. */
H_FN double tp_cross_entropy(tp_rank *t) {
    const tp_net *net = t->net;
    int64_t n = net->tokens, size = t->rows * net->d;
    const int64_t *targets = t->ids + n;
    double loss = 0;
    tp_move(t, t->gather, t->yfull, t->y, size);
    tp_load(t, TP_HEAD, 0, t->w1);
    tp_linear(t->logits, t->yfull, t->w1, NULL, n, t->vocab, net->d);
    CHECK_OK(fsdp_loss_parallel_max(t->logits, FSDP_F32, n, t->vocab, t->row_max));
    tp_move(t, t->max, t->row_max, t->row_max, n);
    CHECK_OK(fsdp_loss_parallel_sums(t->logits, FSDP_F32, n, t->vocab, t->vocab_first, targets,
                                     t->row_max, t->row_sums));
    tp_move(t, t->sums, t->row_sums, t->row_sums, 2 * n);
    for (int64_t r = 0; r < n; r++) {
        loss += (log((double)t->row_sums[r]) - (double)t->row_sums[n + r]) / (double)n;
        t->row_dout[r] = (float)(1 / (double)n);
    }
    CHECK_OK(fsdp_loss_parallel_grad(t->logits, t->logits, FSDP_F32, n, t->vocab, t->vocab_first,
                                     targets, t->row_max, t->row_sums, t->row_dout));
    tp_linear_dw(t->g, t->logits, t->yfull, n, t->vocab, net->d);
    tp_add_grad(t, TP_HEAD, 0, t->g);
    tp_linear_dx(t->o, t->logits, t->w1, n, t->vocab, net->d);
    tp_move(t, t->gather_back, t->branch, t->o, size);
    return loss;
}

H_FN double tp_square_error(tp_rank *t) {
    const tp_net *net = t->net;
    double loss = 0, all = (double)(net->tokens * net->d);
    for (int64_t k = 0; k < t->rows * net->d; k++) {
        double off = (double)t->y[k] - (double)t->t[k];
        loss += off * off / all;
        t->branch[k] = (float)(2 * off / all);
    }
    if (net->sp && t->on.model)
        CALL(t->on.w, fsdp_all_reduce(t->on.w, t->on.dim[t->tp_dim], &loss, 1, FSDP_F64, FSDP_SUM));
    return loss;
}

H_FN void tp_feed(tp_rank *t, int step, int micro, int data) {
    const tp_net *net = t->net;
    uint64_t seed = net->seed + 100000 * (uint64_t)step + 1000 * (uint64_t)micro + (uint64_t)data;
    for (int64_t k = 0; k < 2 * net->tokens && net->vocab; k++)
        t->ids[k] = (int64_t)((golden_value(seed, (uint64_t)k, 1) + 0.5) * (double)net->vocab);
    for (int64_t k = 0; k < t->rows * net->d && !net->vocab; k++) {
        uint64_t at = (uint64_t)(t->first * net->d + k);
        t->h[0][k] = (float)golden_value(seed, at, 2);
        t->t[k] = (float)golden_value(seed + 500, at, 2);
    }
}

/* One microbatch. Returns its loss. */
H_FN double tp_micro(tp_rank *t, int step, int micro, int data) {
    const tp_net *net = t->net;
    int64_t d = net->d;
    tp_feed(t, step, micro, data);
    tp_hook(t, fsdp_pre_forward, TP_REPLICATED), tp_hook(t, fsdp_pre_forward, TP_VOCAB);
    if (net->vocab) tp_embed(t);
    for (int b = 0; b < net->blocks; b++) tp_block(t, b);
    tp_load(t, TP_ROOT, 0, t->b);
    tp_scale(t->y, t->h[net->blocks], t->b, t->rows, d);
    tp_hook(t, fsdp_post_forward, TP_VOCAB), tp_hook(t, fsdp_post_forward, TP_REPLICATED);

    tp_hook(t, fsdp_pre_backward, TP_REPLICATED), tp_hook(t, fsdp_pre_backward, TP_VOCAB);
    double loss = net->vocab ? tp_cross_entropy(t) : tp_square_error(t);
    tp_rows_sum(t->g, t->branch, t->h[net->blocks], t->rows, d);
    tp_add_grad(t, TP_ROOT, 0, t->g);
    tp_load(t, TP_ROOT, 0, t->b);
    tp_scale(t->dh, t->branch, t->b, t->rows, d);
    for (int b = net->blocks - 1; b >= 0; b--) tp_block_back(t, b);
    if (net->vocab) tp_embed_back(t);
    tp_hook(t, fsdp_post_backward, TP_VOCAB), tp_hook(t, fsdp_post_backward, TP_REPLICATED);
    if (t->on.model) CALL(t->on.w, fsdp_finalize_backward(t->on.model));
    return loss;
}

/* ---- training on whole tensors -------------------------------------------------------------- */

H_FN double tp_whole_norm(const tp_net *net, const double *grad) {
    double sum = 0, most = 0;
    for (int64_t k = 0; k < net->total; k++) {
        double x = fabs(grad[k]);
        sum += pow(x, net->clip_p < 1e300 ? net->clip_p : 1);
        most = x > most ? x : most;
    }
    return net->clip_p < 1e300 ? pow(sum, 1 / net->clip_p) : most;
}

H_FN void tp_whole_update(tp_rank *t, const tp_opt *o, int step) {
    fsdp_adamw_hyper adamw = {o->lr, o->a, o->b, o->c, o->decay, step + 1};
    fsdp_sgd_hyper sgd = {o->lr, o->a, o->b, o->decay, o->c > 0, 0, step + 1};
    for (int i = 0; i < t->net->num_params; i++) {
        const tp_param *p = &t->net->params[i];
        if (p->frozen) continue;
        float *g = (float *)lab_zeros((size_t)p->numel, sizeof *g);
        for (int64_t k = 0; k < p->numel; k++) g[k] = (float)t->grad[p->at + k];
        if (o->sgd) fsdp_sgd_update(t->value + p->at, g, t->m + p->at, p->numel, &sgd);
        else fsdp_adamw_update(t->value + p->at, g, t->m + p->at, t->v + p->at, p->numel, &adamw);
        free(g);
    }
}

H_FN void tp_whole_open(tp_rank *t, const tp_net *net) {
    size_t total = (size_t)net->total;
    memset(t, 0, sizeof *t);
    t->net = net, t->num_tp = 1;
    t->num_data = (net->replicas ? net->replicas : 1) * (net->shards ? net->shards : 1);
    tp_sizes(t);
    tp_memory(t);
    t->value = (float *)lab_zeros(total, sizeof *t->value);
    t->m = (float *)lab_zeros(total, sizeof *t->m), t->v = (float *)lab_zeros(total, sizeof *t->v);
    t->grad = lab_doubles(net->total);
    for (int i = 0; i < net->num_params; i++) {
        const tp_param *p = &net->params[i];
        for (int64_t k = 0; k < p->numel; k++)
            t->value[p->at + k] = (float)(golden_value(p->seed, (uint64_t)k, p->scale) + p->base);
    }
}
H_FN void tp_whole_close(tp_rank *t) {
    float *all[] = {t->a,      t->branch,  t->o,        t->dh,       t->dfull, t->y, t->yfull, t->t,
                    t->logits, t->row_max, t->row_sums, t->row_dout, t->value, t->m, t->v};
    for (int b = 0; b <= t->net->blocks; b++) free(t->h[b]);
    for (int b = 0; b < t->net->blocks; b++) free(t->full[b]), free(t->z[b]), free(t->s[b]);
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) free(all[i]);
    free(t->grad), free(t->ids), free(t->private_memory);
}

/* Nets of several stages have one norm, and so one factor. */
H_FN void tp_tell(const tp_net *nets, int count, const tp_opt *o, tp_story *stories) {
    tp_rank *t = (tp_rank *)lab_zeros((size_t)count, sizeof *t);
    for (int i = 0; i < count; i++) tp_whole_open(&t[i], &nets[i]);
    for (int step = 0; step < nets->steps; step++) {
        double norm = 0, p = nets->clip_p;
        for (int i = 0; i < count; i++) {
            memset(t[i].grad, 0, (size_t)nets[i].total * sizeof(double));
            for (int d = 0; d < t[i].num_data; d++)
                for (int m = 0; m < nets[i].micro; m++)
                    stories[i].loss[step][d] += tp_micro(&t[i], step, m, d);
            memcpy(stories[i].grad[step], t[i].grad, (size_t)nets[i].total * sizeof(double));
            double mine = p > 0 ? tp_whole_norm(&nets[i], t[i].grad) : 0;
            norm = p > 1e300 ? (mine > norm ? mine : norm) : norm + pow(mine, p > 0 ? p : 1);
        }
        if (p > 0 && p < 1e300) norm = pow(norm, 1 / p);
        double factor = p > 0 ? nets->max_norm / (norm + 1e-6) : 1;
        for (int i = 0; i < count; i++) {
            stories[i].norm[step] = norm;
            for (int64_t k = 0; k < nets[i].total && factor < 1; k++) t[i].grad[k] *= factor;
            tp_whole_update(&t[i], o, step);
        }
    }
    for (int i = 0; i < count; i++) {
        for (int64_t k = 0; k < nets[i].total; k++) stories[i].final[k] = (double)t[i].value[k];
        tp_whole_close(&t[i]);
    }
    free(t);
}

/* ---- training on ranks ---------------------------------------------------------------------- */

/* Reads full parameters, or their gradients; 0 for parameters without a gradient. */
H_FN void tp_whole_tensors(tp_rank *t, int grad, double *out) {
    float *full = (float *)lab_zeros((size_t)t->net->most, sizeof *full);
    for (int i = 0; i < t->net->num_params; i++) {
        const tp_param *p = &t->net->params[i];
        if (grad && p->frozen) continue;
        CALL(t->on.w, fsdp_tp_param_full(t->on.dm, t->unit[p->unit], p->index, grad, full));
        for (int64_t k = 0; k < p->numel; k++) out[p->at + k] = (double)full[k];
    }
    free(full);
}

/* Returns the placement of a parameter on the mesh: tp shards before FSDP. */
H_FN fsdp_spec tp_param_spec(const tp_rank *t, const tp_param *p) {
    fsdp_placement place[DIMS];
    const int tp = t->tp_dim;
    int dp = fsdp_mesh_dim(t->on.mesh, t->net->replicas ? "dp_shard" : "dp");
    fsdp_spec s;
    memset(place, 0, sizeof place);
    if (p->cut) place[tp].kind = FSDP_SHARD, place[tp].dim = (int8_t)tp_tp_dim(p);
    if (dp >= 0) {
        place[dp].kind = FSDP_SHARD, place[dp].dim = (int8_t)p->shard_dim;
        place[dp].order = p->cut && tp_tp_dim(p) == p->shard_dim;
    }
    CHECK_OK(fsdp_spec_init(&s, t->on.ndim, t->on.shape, place, FSDP_F32, p->ndim, p->shape));
    return s;
}

/* Checks that each shard is the part of its spec, and that replicas are equal. */
H_FN void tp_check_shards(tp_rank *t) {
    for (int i = 0; i < t->net->num_params; i++) {
        const tp_param *p = &t->net->params[i];
        fsdp_spec s = tp_param_spec(t, p);
        fsdp_local l;
        fsdp_param_view v = lab_view(t->on.w, t->unit[p->unit], p->index), whole;
        CALL(t->on.w, fsdp_tp_view(t->on.dm, &v, &whole));
        CHECK_OK(fsdp_spec_local(&s, t->on.coord, &l));
        CHECK_EQ_INT(v.numel, l.numel);
        CHECK_EQ_MEM(whole.shape, p->shape, (size_t)p->ndim * sizeof *p->shape);
        if (l.numel) CHECK_EQ_MEM(whole.start, l.start, (size_t)p->ndim * sizeof *l.start);
        if (l.numel) CHECK_EQ_MEM(whole.local_shape, l.shape, (size_t)p->ndim * sizeof *l.shape);
        CALL(t->on.w, fsdp_dtensor_check(t->on.dm, &s, v.shard, p->name));
    }
}

/* Counts ops on activations of this kind in the last step. */
H_FN int tp_count(const tp_rank *t, int kind) {
    return lab_count_ops(&t->on.log, t->log_begin, kind, t->on.label, NULL);
}

/* Runs forward and backward of all microbatches, clipping and the update; reads the full gradients
   in between. */
H_FN void tp_step(tp_rank *t, const tp_opt *o, int step, tp_story *out) {
    const tp_net *net = t->net;
    int64_t before = t->heap ? w_allocations(t->heap) : 0, after;
    t->log_begin = t->on.log.num;
    for (int m = 0; m < net->micro; m++) {
        int sync = !net->no_sync || m == net->micro - 1;
        CALL(t->on.w, fsdp_set_requires_gradient_sync(t->on.model, NULL, sync));
        out->loss[step][t->data] += tp_micro(t, step, m, t->data);
    }
    t->log_end = t->on.log.num;
    after = t->heap ? w_allocations(t->heap) : 0;
    if (step > 1) CHECK_EQ_INT(after - before, 0);
    tp_whole_tensors(t, 1, out->grad[step]);
    before = t->heap ? w_allocations(t->heap) : 0;
    if (net->clip_p > 0) {
        fsdp_clip_desc clip = FSDP_ZERO;
        clip.max_norm = net->max_norm, clip.norm_type = net->clip_p;
        CALL(t->on.w, fsdp_clip_grads(t->on.model, &clip, &out->norm[step]));
    }
    if (o->sgd) CALL(t->on.w, fsdp_sgd_step(t->sgd, o->lr));
    else CALL(t->on.w, fsdp_adamw_step(t->adamw, o->lr));
    CALL(t->on.w, fsdp_zero_grad(t->on.model));
    after = t->heap ? w_allocations(t->heap) : 0;
    if (step > 1) CHECK_EQ_INT(after - before, 0);
    /* What differs in between differs at the end, too: an update adds to the shards. */
    if (step == 0 || step == net->steps - 1) tp_check_shards(t);
}
#endif
