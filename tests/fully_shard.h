/* fully_shard.h - the frame of the tests that are named as upstream's: a small net is trained twice
   by the same code, once by a replicated copy in plain C whose gradients are averaged over the
   ranks, once by the library on thread ranks; losses, gradients and parameters are compared after
   every microbatch and every optimizer step. Include it after fsdp_optim.h with its implementation,
   harness.h and lab.h.

       static fs_net net;
       fs_net_begin(&net, 4, 16);                   // batches of 4 vectors of 16 numbers
       fs_unit_add(&net, "root");
       fs_linear(&net, 0, 16, 15);                  // unit, inputs, outputs
       fs_conf c = fs_conf_of(&net, 1, 2);          // 1 replica of 2 shards
       c.iters = 10;
       fs_train(&c);

   The callbacks of fs_conf change what a rank does: `micro` is forward and backward of a
   microbatch, by default fs_micro. They run in the copy too, where x->model is NULL and the
   wrappers of hooks do nothing. Activations and gradients are doubles that are rounded to the dtype
   they have after every layer.

   SPDX-License-Identifier: MIT */
#ifndef FULLY_SHARD_H
#define FULLY_SHARD_H
#include <math.h> /* fabs, frexp, isinf, ldexp, nearbyint, sqrt */

#define FS_FN static __attribute__((unused))

enum { FS_UNITS = 12, FS_PARAMS = 12, FS_LAYERS = 64, FS_RANKS = 8, FS_MICROS = 4, FS_TAPES = 4 };
enum { FS_ITERS = 10 };
/* What the model does: units that shard (and replicate, with replicas); units that replicate only;
   buckets of fsdp_replicate.h, which replicate. */
enum { FS_SHARD, FS_REPLICATE, FS_BUCKETS };
enum { FS_LINEAR, FS_RELU, FS_NORM, FS_EMBED, FS_UNEMBED, FS_BIAS, FS_SAVE, FS_ADD };

typedef struct fs_param {
    int ndim, shard_dim, frozen, keep_dtype;
    fsdp_dtype stored; /* KEEP: as the conf */
    int64_t shape[2], numel;
    double offset; /* initial values are near it */
    int at;        /* of its numbers among those of all parameters */
} fs_param;

typedef struct fs_unit {
    const char *name;
    fs_param params[FS_PARAMS];
    int count, raf, keep_inputs, block; /* block: it has one */
    fsdp_dtype param, reduce, output;   /* KEEP: as the conf */
} fs_unit;

typedef struct fs_layer {
    int kind, unit, p; /* unit -1: of no parameters, belongs to the layers before it */
    int from;          /* ADD: the layer SAVE whose input is added */
    int64_t in, out;   /* numbers per row */
} fs_layer;

typedef struct fs_net {
    fs_unit units[FS_UNITS];
    fs_layer layers[FS_LAYERS];
    int count, num_layers, numel;
    int around; /* unit 0 is open around the others, as a root is */
    int64_t batch, in, wide, vocab;
    uint64_t seed;
} fs_net;

typedef struct fs_run fs_run;

enum { FS_AC_NONE, FS_AC_OWN, FS_AC_NESTED };

typedef struct fs_conf {
    const char *name; /* for texts of failures */
    const fs_net *net;
    int replicas, shards, mesh_2d; /* mesh_2d: HSDP with one replica too */
    int how;                       /* FS_*; all but FS_SHARD: with one shard */
    int threads;                   /* 0: replicas*shards ranks; else see locate */
    int iters, micros;
    fsdp_dtype stored, param, reduce, grad; /* of units that say nothing */
    fsdp_dtype made; /* in the descs, if `build` casts the model; 0: as it is stored */
    int raf, offload, prefetch, lanes, plain, ac, ahead;
    int ac_blocks;     /* of ac: units without a block are not recomputed */
    int sgd;           /* also where all parameters are f32, which Adam trains else */
    int reduce_unused; /* fsdp_set_reduce_scatter_unused_params */
    int in_backward;   /* hooks that `build` sets update the parameters, by fs_update_shard */
    int keep_grads;    /* zero_grad in every second iteration only */
    int zero_in_place; /* as PyTorch's tests: in every second iteration zeros are written instead */
    int thaw;          /* from this iteration on nothing is frozen; 0: never */
    int64_t direct_min, bucket_bytes; /* bucket_bytes 0: small ones, so that there are several */
    double clip_p, max_norm;          /* gradients are clipped before the update; 0: not */
    double rtol, atol, divide;        /* 0: by the dtypes, and all ranks */
    const fsdp_comm_ops *comm_ops;
    void (*locate)(fs_run *x);                 /* sets x->rank, x->mesh, x->net, x->global */
    void (*make)(fs_run *x);                   /* the units, else all on the model's mesh */
    void (*build)(fs_run *x);                  /* when the units are made */
    void (*before)(fs_run *x, int it, int m);  /* a microbatch: setters */
    double (*micro)(fs_run *x, int it, int m); /* returns the loss */
    void (*after)(fs_run *x, int it, int m);   /* the library only: after finalize */
    void (*clipped)(fs_run *x, int it);        /* the library only: before the optimizer */
    void (*end)(fs_run *x, int it);            /* the library only: after the optimizer */
    void *user;
} fs_conf;

typedef struct fs_tape { /* input of each layer, and of the loss */
    double *in[FS_LAYERS + 1];
    fsdp_dtype dtype[FS_LAYERS + 1];
    int64_t *tokens;
} fs_tape;

typedef struct fs_story { /* what has to come out */
    double loss[FS_ITERS][FS_RANKS][FS_MICROS];
    double *grad[FS_ITERS][FS_MICROS], *param[FS_ITERS], norm[FS_ITERS];
    uint8_t has[FS_ITERS][FS_MICROS][FS_UNITS][FS_PARAMS];
    int plain; /* the backend does not divide f16 sums */
} fs_story;

typedef struct fs_copy { /* the replicated copy, of all ranks */
    double *master, *grad, *slot[FS_RANKS], *kept[FS_RANKS], *partial[FS_RANKS];
    uint8_t kept_live[FS_UNITS], partial_live[FS_UNITS], has[FS_UNITS][FS_PARAMS];
    uint8_t used[FS_UNITS][FS_PARAMS];
    int sync[FS_UNITS], all_reduce[FS_UNITS];
    int64_t updates[FS_UNITS][FS_PARAMS];
    double *m, *v;
} fs_copy;

struct fs_run {
    const fs_conf *c;
    const fs_net *net;   /* what this rank trains */
    const fs_net *whole; /* what the story is of: the same, but for tensor and expert parallelism */
    int64_t (*global)(const fs_run *x, int unit, int p, int64_t element); /* its place in whole */
    const fs_story *story;
    int rank, size, it, micro;
    int adam; /* by Adam, as PyTorch's tests; else by SGD */
    double lr;
    fsdp_world *world;
    fsdp_mesh *mesh, *other;   /* other: the caller's */
    fsdp_mesh_info info;       /* of the model, if info.mesh is not NULL; else it is on `mesh` */
    fsdp_dmesh *dm;            /* of units that tensor parallelism cuts; NULL: none */
    void *own;                 /* the test's */
    fsdp_model *model;         /* NULL: this is the copy */
    fsdp_unit *unit[FS_UNITS]; /* FS_BUCKETS: the bucket of its first parameter */
    fsdp_replicate *rep;       /* FS_BUCKETS, with parameters in the order of units */
    fsdp_adamw *adamw;
    fs_copy *copy;
    fs_tape tape[FS_TAPES];
    double *data; /* full parameters, in the dtype of computing */
    double *y, *dx, *dy, *target, *save[FS_LAYERS], *tmp; /* [batch][wide] and more */
    double *memory;
    void *raw[2]; /* for casts through the library */
    lab_log log;  /* after fs_watch */
};

/* ---- nets ------------------------------------------------------------------------------------ */

FS_FN void fs_net_begin(fs_net *net, int64_t batch, int64_t in) {
    memset(net, 0, sizeof *net);
    net->batch = batch, net->in = net->wide = in, net->seed = 4000;
}

FS_FN int fs_unit_add(fs_net *net, const char *name) {
    CHECK(net->count < FS_UNITS);
    net->units[net->count].name = name;
    return net->count++;
}

FS_FN int fs_param_add(fs_net *net, int unit, int64_t rows, int64_t cols, double offset) {
    fs_unit *u = &net->units[unit];
    CHECK(u->count < FS_PARAMS);
    fs_param *p = &u->params[u->count];
    p->ndim = cols ? 2 : 1, p->shape[0] = rows, p->shape[1] = cols;
    p->numel = rows * (cols ? cols : 1), p->offset = offset, p->at = net->numel;
    net->numel += (int)p->numel;
    return u->count++;
}

FS_FN int fs_layer_add(fs_net *net, int kind, int unit, int p, int64_t in, int64_t out) {
    CHECK(net->num_layers < FS_LAYERS);
    fs_layer l = {kind, unit, p, 0, in, out};
    if (out > net->wide) net->wide = out;
    net->layers[net->num_layers] = l;
    return net->num_layers++;
}

/* Numbers per row behind the last layer. */
FS_FN int64_t fs_width(const fs_net *net) {
    return net->num_layers ? net->layers[net->num_layers - 1].out : net->in;
}

FS_FN void fs_linear(fs_net *net, int unit, int64_t in, int64_t out) {
    int p = fs_param_add(net, unit, out, in, 0);
    fs_param_add(net, unit, out, 0, 0);
    fs_layer_add(net, FS_LINEAR, unit, p, in, out);
}
FS_FN void fs_relu(fs_net *net) { fs_layer_add(net, FS_RELU, -1, 0, fs_width(net), fs_width(net)); }
FS_FN void fs_norm(fs_net *net, int unit, int64_t d) {
    int p = fs_param_add(net, unit, d, 0, 1);
    fs_param_add(net, unit, d, 0, 0);
    fs_layer_add(net, FS_NORM, unit, p, d, d);
}
FS_FN void fs_mlp(fs_net *net, int unit, int64_t d, int64_t mult) {
    fs_linear(net, unit, d, mult * d);
    fs_relu(net);
    fs_linear(net, unit, mult * d, d);
    fs_relu(net);
}
/* Normalised, two linears, added to the input. */
FS_FN void fs_block(fs_net *net, int unit, int64_t d) {
    int from = fs_layer_add(net, FS_SAVE, unit, 0, d, d);
    net->units[unit].block = 1;
    fs_norm(net, unit, d);
    fs_linear(net, unit, d, 2 * d);
    fs_relu(net);
    fs_linear(net, unit, 2 * d, d);
    net->layers[fs_layer_add(net, FS_ADD, unit, 0, d, d)].from = from;
}

/* Embedding and final norm in the root, blocks, and a head that is tied to the embedding or not. */
FS_FN void fs_transformer(fs_net *net, int blocks, int64_t d, int64_t vocab, int tied) {
    static const char *const names[] = {"0", "1", "2", "3", "4", "5", "6", "7"};
    fs_net_begin(net, 4, 1);
    fs_unit_add(net, "root");
    net->around = 1, net->vocab = vocab;
    fs_layer_add(net, FS_EMBED, 0, fs_param_add(net, 0, vocab, d, 0), 1, d);
    for (int i = 0; i < blocks; i++) fs_block(net, fs_unit_add(net, names[i]), d);
    fs_norm(net, 0, d);
    fs_layer_add(net, FS_UNEMBED, 0, tied ? 0 : fs_param_add(net, 0, vocab, d, 0), d, vocab);
}

FS_FN fs_conf fs_conf_of(const fs_net *net, int replicas, int shards) {
    fs_conf c;
    memset(&c, 0, sizeof c);
    c.name = "", c.net = net, c.replicas = replicas, c.shards = shards;
    c.iters = FS_ITERS, c.micros = 1, c.zero_in_place = 1;
    return c;
}
/* So many ranks that shard, or that replicate. */
FS_FN fs_conf fs_conf_by(int how, const fs_net *net, int ranks) {
    fs_conf c = fs_conf_of(net, how == FS_SHARD ? 1 : ranks, how == FS_SHARD ? ranks : 1);
    c.how = how;
    return c;
}

/* ---- numbers --------------------------------------------------------------------------------- */

/* [-0.5, 0.5), a multiple of 2^-12: exact in f32, and rounded in bf16 and f16 */
FS_FN double fs_value(uint64_t a, uint64_t b, uint64_t c) {
    return (double)(lab_hash(a, b, c, 0) & 0xfff) / 4096 - 0.5;
}
FS_FN double fs_initial(const fs_net *net, int unit, int p, int64_t element) {
    const fs_param *q = &net->units[unit].params[p];
    double x = fs_value(net->seed, (uint64_t)q->at, (uint64_t)element); /* whatever the units */
    return q->offset + (q->ndim == 2 && q->shape[1] > 8 ? x / 2 : x);
}
/* what 0: an input; 1: a target; 2: a token */
FS_FN double fs_sample(const fs_run *x, int what, int64_t i) {
    uint64_t at = (uint64_t)((x->it * FS_MICROS + x->micro) * FS_RANKS + x->rank);
    return fs_value(x->net->seed + 1 + (uint64_t)what, at, (uint64_t)i);
}

FS_FN fsdp_dtype fs_stored(const fs_run *x, int unit, int p) {
    fsdp_dtype of = x->net->units[unit].params[p].stored;
    return of ? of : x->c->stored ? x->c->stored : FSDP_F32;
}
FS_FN fsdp_dtype fs_kept_grad(const fs_run *x, int unit, int p) {
    return x->c->grad ? x->c->grad : fs_stored(x, unit, p);
}
FS_FN fsdp_dtype fs_computed(const fs_run *x, int unit, int p) {
    fsdp_dtype of = x->net->units[unit].param;
    if (x->net->units[unit].params[p].keep_dtype) return fs_stored(x, unit, p);
    return of ? of : x->c->param ? x->c->param : fs_stored(x, unit, p);
}
FS_FN int fs_frozen(const fs_run *x, int unit, int p) {
    return x->net->units[unit].params[p].frozen && !(x->c->thaw && x->it >= x->c->thaw);
}
/* That of the policy, else the one to which those of the gradients are promoted. */
FS_FN fsdp_dtype fs_reduced(const fs_run *x, int unit) {
    const fs_unit *u = &x->net->units[unit];
    fsdp_dtype widest = u->reduce ? u->reduce : x->c->reduce;
    if (widest) return widest;
    for (int p = 0; p < u->count; p++) {
        fsdp_dtype of = fs_kept_grad(x, unit, p);
        if (fs_frozen(x, unit, p) || of == widest) continue;
        widest = !widest || of == FSDP_F64 ? of : widest == FSDP_F64 ? widest : FSDP_F32;
    }
    return widest;
}

/* ---- hooks, parameters and gradients: of the library, or of the copy ------------------------- */

#define FS_HOOK(name)                                                                              \
    FS_FN void fs_##name(fs_run *x, int unit) {                                                    \
        if (x->model && !x->rep) CALL(x->world, fsdp_##name(x->unit[unit]));                       \
    }
FS_HOOK(pre_forward)
FS_HOOK(post_forward)
FS_HOOK(pre_backward)
FS_HOOK(post_backward)
FS_HOOK(unshard)
/* Where a parameter is among those of fsdp_replicate.h. */
FS_FN int fs_bucketed(const fs_run *x, int unit, int p) {
    for (int u = 0; u < unit; u++) p += x->net->units[u].count;
    return p;
}
/* The group of layers from `from` on has been through backward: nothing reads the parameters of its
   unit any more, unless a layer before it does. */
FS_FN void fs_ready(fs_run *x, int unit, int from) {
    for (int l = 0; l < from; l++)
        if (x->net->layers[l].unit == unit) return;
    if (x->rep && (x->it + unit) % 4 < 3) /* else it is left to fsdp_replicate_post_backward */
        CALL(x->world,
             fsdp_replicate_ready(x->rep, fs_bucketed(x, unit, 0), x->net->units[unit].count));
}
/* The end of a backward that is not the last one of the microbatch, or of the last one. */
FS_FN void fs_set_last(fs_run *x, int last) {
    if (x->model) CALL(x->world, fsdp_set_is_last_backward(x->model, last));
}
FS_FN void fs_finalize(fs_run *x) {
    if (x->model) CALL(x->world, fsdp_finalize_backward(x->model));
}

/* unit -1: all */
FS_FN void fs_set_sync(fs_run *x, int unit, int sync) {
    CHECK(unit < 0 || !x->rep); /* units are no buckets */
    if (x->model)
        CALL(x->world,
             fsdp_set_requires_gradient_sync(x->model, unit < 0 ? NULL : x->unit[unit], sync));
    for (int u = 0; x->copy && u < FS_UNITS; u++)
        if (unit < 0 || u == unit) x->copy->sync[u] = sync, x->copy->all_reduce[u] = sync;
}
FS_FN void fs_set_all_reduce(fs_run *x, int unit, int required) {
    if (x->model)
        CALL(x->world,
             fsdp_set_requires_all_reduce(x->model, unit < 0 ? NULL : x->unit[unit], required));
    for (int u = 0; x->copy && u < FS_UNITS; u++)
        if (unit < 0 || u == unit) x->copy->all_reduce[u] = required;
}

/* The full parameter, in doubles; valid until the next call for it. */
FS_FN const double *fs_data(fs_run *x, int unit, int p) {
    const fs_param *q = &x->net->units[unit].params[p];
    fsdp_dtype type = fs_computed(x, unit, p);
    double *out = x->data + q->at;
    if (x->model) {
        const void *data = x->rep ? fsdp_replicate_data(x->rep, fs_bucketed(x, unit, p))
                                  : fsdp_data(x->unit[unit], p);
        W_CHECK(data != NULL, "no data of unit %d: %s", unit, fsdp_last_error(x->world));
        lab_load(out, data, type, q->numel);
    }
    for (int64_t e = 0; !x->model && e < q->numel; e++)
        out[e] = lab_round(type, x->copy->master[q->at + e]);
    return out;
}

/* Adds, as autograd does: a value of the gradient's dtype, and the sum rounded again. */
FS_FN void fs_add_grad(fs_run *x, int unit, int p, const double *value) {
    const fs_param *q = &x->net->units[unit].params[p];
    fsdp_dtype type = fs_computed(x, unit, p);
    void *grad = NULL;
    double *sum = x->tmp;
    if (fs_frozen(x, unit, p)) return;
    if (x->model) {
        grad = x->rep ? fsdp_replicate_grad(x->rep, fs_bucketed(x, unit, p))
                      : fsdp_grad(x->unit[unit], p);
        W_CHECK(grad != NULL, "no gradient of unit %d: %s", unit, fsdp_last_error(x->world));
        lab_load(sum, grad, type, q->numel);
    } else {
        sum = x->copy->slot[x->rank] + q->at;
        x->copy->used[unit][p] = 1;
    }
    for (int64_t e = 0; e < q->numel; e++)
        sum[e] = lab_round(type, sum[e] + lab_round(type, value[e]));
    if (x->model) lab_store(grad, type, sum, q->numel);
}

/* An activation as the unit's policy wants it, by the library's own helper. */
FS_FN void fs_cast_in(fs_run *x, int unit, double *act, fsdp_dtype *type, int64_t count) {
    const fs_unit *u = &x->net->units[unit];
    fsdp_dtype to = u->param ? u->param : x->c->param;
    if (x->model) {
        lab_store(x->raw[0], *type, act, count);
        const void *out = fsdp_cast_forward_input(x->unit[unit], x->raw[1], x->raw[0], type, count);
        lab_load(act, out, *type, count);
    } else if (to && !u->keep_inputs) {
        for (int64_t i = 0; i < count; i++) act[i] = lab_round(to, act[i]);
        *type = to;
    }
}
FS_FN void fs_cast_out(fs_run *x, int unit, double *act, fsdp_dtype *type, int64_t count) {
    fsdp_dtype to = x->net->units[unit].output;
    if (x->model) {
        lab_store(x->raw[0], *type, act, count);
        const void *out = fsdp_cast_forward_output(x->unit[unit], x->raw[1], x->raw[0], type,
                                                   count);
        lab_load(act, out, *type, count);
    } else if (to) {
        for (int64_t i = 0; i < count; i++) act[i] = lab_round(to, act[i]);
        *type = to;
    }
}

/* ---- layers ---------------------------------------------------------------------------------- */

/* out[batch][l->out] = in w^T + b; without a bias for the head of an embedding */
FS_FN void fs_matmul(const fs_net *net, const fs_layer *l, const double *w, const double *b,
                     const double *in, double *out) {
    for (int64_t n = 0; n < net->batch; n++)
        for (int64_t o = 0; o < l->out; o++) {
            double sum = b ? b[o] : 0;
            for (int64_t i = 0; i < l->in; i++) sum += in[n * l->in + i] * w[o * l->in + i];
            out[n * l->out + o] = sum;
        }
}
FS_FN void fs_matmul_back(fs_run *x, const fs_layer *l, const double *w, const double *in,
                          int bias) {
    const fs_net *net = x->net;
    double *dw = x->tmp + net->numel, *db = dw + l->out * l->in;
    memset(dw, 0, (size_t)(l->out * (l->in + 1)) * sizeof *dw);
    memset(x->y, 0, (size_t)(net->batch * l->in) * sizeof *x->y);
    for (int64_t n = 0; n < net->batch; n++)
        for (int64_t o = 0; o < l->out; o++) {
            double d = x->dx[n * l->out + o];
            db[o] += d;
            for (int64_t i = 0; i < l->in; i++) {
                dw[o * l->in + i] += d * in[n * l->in + i];
                x->y[n * l->in + i] += d * w[o * l->in + i];
            }
        }
    memcpy(x->dx, x->y, (size_t)(net->batch * l->in) * sizeof *x->y);
    fs_add_grad(x, l->unit, l->p, dw);
    if (bias) fs_add_grad(x, l->unit, l->p + 1, db);
}

/* Mean and one over the deviation of a row. */
FS_FN void fs_moments(const double *row, int64_t n, double *mean, double *inv) {
    double sum = 0, squares = 0;
    for (int64_t i = 0; i < n; i++) sum += row[i];
    *mean = sum / (double)n;
    for (int64_t i = 0; i < n; i++) squares += (row[i] - *mean) * (row[i] - *mean);
    *inv = 1 / sqrt(squares / (double)n + 1e-5);
}
FS_FN void fs_norm_forward(const fs_net *net, const fs_layer *l, const double *w, const double *b,
                           const double *in, double *out) {
    for (int64_t n = 0; n < net->batch; n++) {
        double mean, inv;
        fs_moments(in + n * l->in, l->in, &mean, &inv);
        for (int64_t i = 0; i < l->in; i++)
            out[n * l->in + i] = (in[n * l->in + i] - mean) * inv * w[i] + b[i];
    }
}
FS_FN void fs_norm_back(fs_run *x, const fs_layer *l, const double *w, const double *in) {
    int64_t d = l->in;
    double *dw = x->tmp + x->net->numel, *db = dw + d;
    memset(dw, 0, 2 * (size_t)d * sizeof *dw);
    for (int64_t n = 0; n < x->net->batch; n++) {
        double mean, inv, a = 0, b = 0, *dy = x->dx + n * d;
        fs_moments(in + n * d, d, &mean, &inv);
        for (int64_t i = 0; i < d; i++) {
            double hat = (in[n * d + i] - mean) * inv;
            dw[i] += dy[i] * hat, db[i] += dy[i];
            a += dy[i] * w[i], b += dy[i] * w[i] * hat;
        }
        for (int64_t i = 0; i < d; i++) {
            double hat = (in[n * d + i] - mean) * inv;
            dy[i] = inv * (dy[i] * w[i] - a / (double)d - hat * b / (double)d);
        }
    }
    fs_add_grad(x, l->unit, l->p, dw);
    fs_add_grad(x, l->unit, l->p + 1, db);
}

/* A layer's output becomes the next one's input. */
FS_FN void fs_layer_forward(fs_run *x, fs_tape *t, int at) {
    const fs_layer *l = &x->net->layers[at];
    const double *in = t->in[at];
    double *out = t->in[at + 1];
    int64_t batch = x->net->batch;
    int typed = l->kind == FS_LINEAR || l->kind == FS_NORM || l->kind == FS_EMBED ||
                l->kind == FS_UNEMBED || l->kind == FS_BIAS;
    const double *w = typed ? fs_data(x, l->unit, l->p) : NULL;
    if (l->kind == FS_LINEAR) fs_matmul(x->net, l, w, fs_data(x, l->unit, l->p + 1), in, out);
    if (l->kind == FS_UNEMBED) fs_matmul(x->net, l, w, NULL, in, out);
    if (l->kind == FS_NORM) fs_norm_forward(x->net, l, w, fs_data(x, l->unit, l->p + 1), in, out);
    for (int64_t n = 0; l->kind == FS_EMBED && n < batch; n++)
        memcpy(out + n * l->out, w + t->tokens[n] * l->out, (size_t)l->out * sizeof *out);
    for (int64_t i = 0; l->kind == FS_BIAS && i < batch * l->out; i++)
        out[i] = in[i] + w[i % l->out];
    for (int64_t i = 0; !typed && i < batch * l->out; i++)
        out[i] = l->kind == FS_RELU && !(in[i] > 0) ? 0
                 : l->kind == FS_ADD                ? in[i] + t->in[l->from][i]
                                                    : in[i];
    t->dtype[at + 1] = typed ? fs_computed(x, l->unit, l->p) : t->dtype[at];
    for (int64_t i = 0; i < batch * l->out; i++) out[i] = lab_round(t->dtype[at + 1], out[i]);
}

/* x->dx: of the output, then of the input. */
FS_FN void fs_layer_backward(fs_run *x, const fs_tape *t, int at) {
    const fs_layer *l = &x->net->layers[at];
    const double *in = t->in[at];
    int64_t batch = x->net->batch;
    if (l->kind == FS_LINEAR) fs_matmul_back(x, l, fs_data(x, l->unit, l->p), in, 1);
    if (l->kind == FS_UNEMBED) fs_matmul_back(x, l, fs_data(x, l->unit, l->p), in, 0);
    if (l->kind == FS_NORM) fs_norm_back(x, l, fs_data(x, l->unit, l->p), in);
    if (l->kind == FS_EMBED) {
        double *dw = x->tmp + x->net->numel;
        memset(dw, 0, (size_t)(x->net->vocab * l->out) * sizeof *dw);
        for (int64_t n = 0; n < batch; n++)
            for (int64_t i = 0; i < l->out; i++)
                dw[t->tokens[n] * l->out + i] += x->dx[n * l->out + i];
        fs_add_grad(x, l->unit, l->p, dw);
    }
    if (l->kind == FS_BIAS) {
        double *db = x->tmp + x->net->numel;
        memset(db, 0, (size_t)l->out * sizeof *db);
        for (int64_t i = 0; i < batch * l->out; i++) db[i % l->out] += x->dx[i];
        fs_add_grad(x, l->unit, l->p, db);
    }
    for (int64_t i = 0; i < batch * l->in; i++) {
        if (l->kind == FS_RELU && !(in[i] > 0)) x->dx[i] = 0;
        if (l->kind == FS_ADD) x->save[l->from][i] = x->dx[i];
        if (l->kind == FS_SAVE) x->dx[i] += x->save[at][i];
        x->dx[i] = lab_round(t->dtype[at], x->dx[i]);
    }
}

/* ---- forward and backward -------------------------------------------------------------------- */

/* Returns the end of the group of layers that begins at `from`, and sets *unit to its unit. A layer
   without a unit belongs to the group before it. */
FS_FN int fs_group(const fs_net *net, int from, int *unit) {
    int to = from;
    *unit = net->layers[from].unit;
    while (to < net->num_layers && (net->layers[to].unit < 0 || net->layers[to].unit == *unit))
        to++;
    return to;
}
FS_FN int fs_group_before(const fs_net *net, int to, int *unit) {
    int from = 0, next;
    while ((next = fs_group(net, from, unit)) < to) from = next;
    return from;
}

FS_FN void fs_feed(fs_run *x, fs_tape *t) {
    const fs_net *net = x->net;
    int64_t outs = net->batch * net->wide;
    t->dtype[0] = x->c->stored == FSDP_F64 ? FSDP_F64 : FSDP_F32;
    for (int64_t i = 0; i < net->batch * net->in; i++) t->in[0][i] = 2 * fs_sample(x, 0, i);
    for (int64_t i = 0; i < outs; i++) x->target[i] = fs_sample(x, 1, i) + 0.5; /* of relus, too */
    for (int64_t n = 0; net->vocab && n < net->batch; n++)
        t->tokens[n] = (int64_t)((fs_sample(x, 2, n) + 0.5) * (double)net->vocab);
}

FS_FN void fs_layers_forward(fs_run *x, fs_tape *t, int unit, int from, int to) {
    if (x->net->layers[from].kind != FS_EMBED)
        fs_cast_in(x, unit, t->in[from], &t->dtype[from], x->net->batch * x->net->layers[from].in);
    for (int l = from; l < to; l++) fs_layer_forward(x, t, l);
    fs_cast_out(x, unit, t->in[to], &t->dtype[to], x->net->batch * x->net->layers[to - 1].out);
}
FS_FN void fs_layers_backward(fs_run *x, const fs_tape *t, int from, int to) {
    for (int l = to - 1; l >= from; l--) fs_layer_backward(x, t, l);
}

/* How a unit is recomputed: FS_AC_*. Not what is open around the others. */
FS_FN int fs_recompute(const fs_run *x, int unit) {
    if (x->net->around && unit == 0) return FS_AC_NONE;
    return x->c->ac_blocks && !x->net->units[unit].block ? FS_AC_NONE : x->c->ac;
}
/* Recompute has to bring back what lies inside of a group of layers. */
FS_FN void fs_forget(fs_run *x, fs_tape *t, int from, int to) {
    for (int l = from + 1; l < to; l++)
        memset(t->in[l], 0xff, (size_t)(x->net->batch * x->net->wide) * sizeof(double));
}
FS_FN void fs_group_forward(fs_run *x, fs_tape *t, int unit, int from, int to) {
    int root = x->net->around && unit == 0, next = -1;
    if (!root) fs_pre_forward(x, unit);
    if (x->c->ahead && to < x->net->num_layers) {
        fs_group(x->net, to, &next);
        fs_unshard(x, next);
    }
    fs_layers_forward(x, t, unit, from, to);
    if (!root) fs_post_forward(x, unit);
}
FS_FN void fs_forward(fs_run *x, fs_tape *t) {
    const fs_net *net = x->net;
    int unit;
    if (x->rep) CALL(x->world, fsdp_replicate_pre_forward(x->rep));
    if (net->around) fs_pre_forward(x, 0);
    for (int from = 0, to; from < net->num_layers; from = to) {
        to = fs_group(net, from, &unit);
        fs_group_forward(x, t, unit, from, to);
        if (fs_recompute(x, unit)) fs_forget(x, t, from, to);
    }
    if (net->around) fs_post_forward(x, 0);
    if (x->rep) CALL(x->world, fsdp_replicate_post_forward(x->rep));
}

/* x->dx: of the input of layer `to`, then of layer `from`. */
FS_FN void fs_group_backward(fs_run *x, fs_tape *t, int unit, int from, int to) {
    int root = x->net->around && unit == 0, ac = fs_recompute(x, unit), next = -1;
    int first = !x->net->around && to == x->net->num_layers; /* there are no others yet */
    if (ac == FS_AC_NESTED && first) ac = FS_AC_OWN;
    if (ac == FS_AC_NESTED) {
        fs_pre_forward(x, unit);
        fs_layers_forward(x, t, unit, from, to);
        fs_post_forward(x, unit);
    }
    if (!root) fs_pre_backward(x, unit);
    if (x->c->ahead && from > 0) {
        fs_group_before(x->net, from, &next);
        fs_unshard(x, next);
    }
    if (ac == FS_AC_OWN) {
        fs_pre_forward(x, unit);
        fs_layers_forward(x, t, unit, from, to);
        fs_post_forward(x, unit);
    }
    fs_layers_backward(x, t, from, to);
    if (!root) fs_post_backward(x, unit);
}
/* The root's backward is ended by finalize in every second iteration. */
FS_FN void fs_backward(fs_run *x, fs_tape *t) {
    int unit, from;
    if (x->net->around) fs_pre_backward(x, 0);
    for (int to = x->net->num_layers; to > 0; to = from) {
        from = fs_group_before(x->net, to, &unit);
        fs_group_backward(x, t, unit, from, to);
        fs_ready(x, unit, from);
    }
    if (x->net->around && x->it % 2) fs_post_backward(x, 0);
    if (x->rep) CALL(x->world, fsdp_replicate_post_backward(x->rep));
}

/* Mean of the squared distance to the target; its gradient in x->dx. `share`: of a larger mean. */
FS_FN double fs_loss_at(fs_run *x, const fs_tape *t, int layer, double share) {
    const fs_net *net = x->net;
    int64_t count = net->batch * (layer ? net->layers[layer - 1].out : net->in);
    double loss = 0;
    for (int64_t i = 0; i < count; i++) {
        double off = t->in[layer][i] - x->target[i];
        loss += off * off;
        x->dx[i] = lab_round(t->dtype[layer], 2 * share * off / (double)count);
    }
    return share * loss / (double)count;
}
FS_FN double fs_loss(fs_run *x, const fs_tape *t, double share) {
    return fs_loss_at(x, t, x->net->num_layers, share);
}

FS_FN double fs_micro(fs_run *x, int it, int m) {
    (void)it, (void)m;
    fs_feed(x, &x->tape[0]);
    fs_forward(x, &x->tape[0]);
    double loss = fs_loss(x, &x->tape[0], 1);
    fs_backward(x, &x->tape[0]);
    return loss;
}

/* ---- a run ----------------------------------------------------------------------------------- */

FS_FN void fs_run_init(fs_run *x, const fs_conf *c, int rank) {
    const fs_net *net = c->net;
    int64_t act = net->batch * net->wide, all = net->numel;
    int64_t acts = FS_TAPES * (net->num_layers + 1) + net->num_layers + 4;
    memset(x, 0, sizeof *x);
    x->c = c, x->net = x->whole = net, x->rank = rank, x->size = c->replicas * c->shards;
    double *at = x->memory = lab_doubles(acts * act + 3 * all + act);
    for (int t = 0; t < FS_TAPES; t++) {
        for (int l = 0; l <= net->num_layers; l++, at += act) x->tape[t].in[l] = at;
        x->tape[t].tokens = (int64_t *)calloc((size_t)net->batch, sizeof(int64_t));
        CHECK(x->tape[t].tokens != NULL);
    }
    for (int l = 0; l < net->num_layers; l++, at += act) x->save[l] = at;
    x->y = at, x->dx = at + act, x->dy = at + 2 * act, x->target = at + 3 * act;
    x->data = at + 4 * act, x->tmp = x->data + all; /* [2 * numel + act] */
    for (int i = 0; i < 2; i++) {
        x->raw[i] = calloc((size_t)act, sizeof(double));
        CHECK(x->raw[i] != NULL);
    }
}
/* For the net that this rank trains. */
FS_FN void fs_choose_optim(fs_run *x) {
    x->adam = !x->c->sgd;
    for (int u = 0; u < x->net->count; u++)
        for (int p = 0; p < x->net->units[u].count; p++) x->adam &= fs_stored(x, u, p) == FSDP_F32;
    x->lr = x->adam ? 0.01 : 0.05;
}
FS_FN void fs_run_free(fs_run *x) {
    for (int t = 0; t < FS_TAPES; t++) free(x->tape[t].tokens);
    free(x->raw[0]), free(x->raw[1]);
    free(x->log.ops);
    free(x->memory);
}

/* ---- the copy -------------------------------------------------------------------------------- */

/* f32 for everything but f64 */
FS_FN double fs_mid(fsdp_dtype type, double x) { return type == FSDP_F64 ? x : (double)(float)x; }

/* A divide factor is split around a reduction in f16: what goes in, sums over shards and sums over
   replicas before they are rounded, and (the rest) what comes out. */
typedef struct {
    double in, shards, replicas;
} fs_split;
FS_FN fs_split fs_split_factor(const fs_run *x, fsdp_dtype reduce, double factor) {
    fs_split s = {1, 1, 1};
    if (reduce != FSDP_F16 || x->size == 1) return s;
    if (x->c->plain || !lab_divides()) {
        while (fmod(factor, s.in) <= 0 && factor / s.in > s.in) s.in *= 2;
        return s;
    }
    while (s.shards < x->c->shards && 2 * s.shards <= factor) s.shards *= 2;
    if (x->c->replicas == 1) s.shards = factor;
    s.replicas = factor / s.shards;
    return s;
}

/* One element of the ranks' gradients: added up over shards, then over replicas. */
FS_FN void fs_copy_element(fs_run *x, int unit, int p, int64_t at) {
    fs_copy *o = x->copy;
    fsdp_dtype red = fs_reduced(x, unit), store = fs_kept_grad(x, unit, p);
    int shards = x->c->shards, replicas = x->c->replicas;
    double factor = x->c->divide > 0 ? x->c->divide : x->size, total = 0;
    const fs_split split = fs_split_factor(x, red, factor);
    const double rest = split.in * split.shards * split.replicas / factor;
    for (int q = 0; q < replicas; q++) {
        double sum = 0;
        for (int r = q * shards; r < (q + 1) * shards; r++)
            sum = fs_mid(red, sum + lab_round(red, o->kept[r][at] / split.in));
        sum = lab_round(red, fs_mid(red, sum * fs_mid(red, 1 / split.shards)));
        if (o->partial_live[unit]) sum = lab_round(red, fs_mid(red, sum + o->partial[q][at]));
        o->partial[q][at] = sum;
        total = fs_mid(red, total + sum);
    }
    if (!o->all_reduce[unit] && replicas > 1) return;
    total = lab_round(red, fs_mid(red, total * fs_mid(red, 1 / split.replicas)));
    total = fs_mid(red, total * fs_mid(red, rest));
    o->grad[at] = lab_round(store, o->has[unit][p] ? fs_mid(store, o->grad[at] + total) : total);
}

/* The end of a microbatch on all ranks. */
FS_FN void fs_copy_reduce(fs_run *x) {
    fs_copy *o = x->copy;
    for (int u = 0; u < x->net->count; u++) {
        const fs_unit *unit = &x->net->units[u];
        int partial = !o->all_reduce[u] && x->c->replicas > 1;
        fsdp_dtype red = fs_reduced(x, u);
        for (int p = 0; p < unit->count; p++)
            for (int64_t e = 0; e < unit->params[p].numel; e++) {
                int64_t at = unit->params[p].at + e;
                for (int r = 0; r < x->size; r++) {
                    double *slot = &o->slot[r][at], *kept = &o->kept[r][at];
                    *kept = lab_round(red, o->kept_live[u] ? fs_mid(red, *kept + *slot) : *slot);
                    *slot = 0;
                }
                if (o->sync[u] && !fs_frozen(x, u, p)) fs_copy_element(x, u, p, at);
            }
        o->kept_live[u] = !o->sync[u];
        if (!o->sync[u]) continue;
        o->partial_live[u] = (uint8_t)partial;
        for (int p = 0; p < unit->count && !partial; p++)
            o->has[u][p] |= o->used[u][p], o->used[u][p] = 0;
    }
}

FS_FN double fs_sgd(double lr, double p, double g) { return p - lr * g; }

/* The p-norm of what there is, which is scaled if that is too large. */
FS_FN double fs_copy_clip(fs_run *x) {
    fs_copy *o = x->copy;
    double sum = 0, p = x->c->clip_p;
    for (int pass = 0; pass < 2; pass++) {
        double norm = isinf(p) ? sum : pow(sum, 1 / p), coef = x->c->max_norm / (norm + 1e-6);
        for (int u = 0; u < x->net->count; u++)
            for (int i = 0; i < x->net->units[u].count; i++) {
                const fs_param *q = &x->net->units[u].params[i];
                for (int64_t e = 0; o->has[u][i] && e < q->numel; e++) {
                    double *g = &o->grad[q->at + e], a = fabs(*g);
                    if (pass && coef < 1) *g = lab_round(fs_kept_grad(x, u, i), *g * coef);
                    if (!pass) sum = isinf(p) ? (a > sum ? a : sum) : sum + pow(a, p);
                }
            }
        if (pass) return norm;
    }
    return 0;
}

FS_FN void fs_copy_update(fs_run *x) {
    fs_copy *o = x->copy;
    double lr = x->lr;
    for (int u = 0; u < x->net->count; u++)
        for (int p = 0; p < x->net->units[u].count; p++) {
            const fs_param *q = &x->net->units[u].params[p];
            fsdp_dtype store = fs_stored(x, u, p);
            fsdp_adamw_hyper hyper = {lr, 0.9, 0.999, 1e-8, 0, 0};
            if (!o->has[u][p]) continue;
            hyper.step = ++o->updates[u][p];
            for (int64_t e = 0; !x->adam && e < q->numel; e++) {
                double *at = &o->master[q->at + e];
                *at = lab_round(store, fs_sgd(lr, *at, o->grad[q->at + e]));
            }
            if (!x->adam) continue;
            float *t = (float *)malloc((size_t)q->numel * 4 * sizeof *t);
            double *all[4] = {o->master + q->at, o->grad + q->at, o->m + q->at, o->v + q->at};
            CHECK(t != NULL);
            for (int64_t i = 0; i < 4 * q->numel; i++)
                t[i] = (float)all[i / q->numel][i % q->numel];
            fsdp_adamw_update(t, t + q->numel, t + 2 * q->numel, t + 3 * q->numel, q->numel,
                              &hyper);
            for (int64_t i = 0; i < 4 * q->numel; i++)
                all[i / q->numel][i % q->numel] = (double)t[i];
            free(t);
        }
}

FS_FN double fs_micro_of(fs_run *x, int it, int m) {
    x->it = it, x->micro = m;
    if (x->c->before) x->c->before(x, it, m);
    return x->c->micro ? x->c->micro(x, it, m) : fs_micro(x, it, m);
}

FS_FN void fs_copy_init(fs_run *x, fs_copy *o) {
    const fs_net *net = x->net;
    memset(o, 0, sizeof *o);
    o->master = lab_doubles(net->numel), o->grad = lab_doubles(net->numel);
    o->m = lab_doubles(net->numel), o->v = lab_doubles(net->numel);
    for (int r = 0; r < x->size; r++) {
        o->slot[r] = lab_doubles(net->numel), o->kept[r] = lab_doubles(net->numel);
        o->partial[r] = lab_doubles(net->numel);
    }
    x->copy = o;
    for (int u = 0; u < net->count; u++)
        for (int p = 0; p < net->units[u].count; p++)
            for (int64_t e = 0; e < net->units[u].params[p].numel; e++)
                o->master[net->units[u].params[p].at + e] = lab_round(fs_stored(x, u, p),
                                                                      fs_initial(net, u, p, e));
    for (int u = 0; u < FS_UNITS; u++) o->sync[u] = o->all_reduce[u] = 1;
}
FS_FN void fs_copy_free(fs_copy *o, int size) {
    for (int r = 0; r < size; r++) free(o->slot[r]), free(o->kept[r]), free(o->partial[r]);
    free(o->master), free(o->grad), free(o->m), free(o->v);
}

/* What becomes of the gradients after an iteration. */
enum { FS_GONE, FS_KEPT, FS_ZEROS };
FS_FN int fs_grads_then(const fs_conf *c, int it) {
    return c->keep_grads && it % 2 == 0 ? FS_KEPT : c->zero_in_place && it % 2 ? FS_ZEROS : FS_GONE;
}

/* There is something to be compared in each unit: a net of relus may die. */
FS_FN void fs_check_alive(const fs_run *x, double loss) {
    const fs_copy *o = x->copy;
    CHECK(loss > 0);
    for (int u = 0; u < x->net->count; u++) {
        double most = 0;
        int has = 0;
        for (int p = 0; p < x->net->units[u].count; p++) {
            const fs_param *q = &x->net->units[u].params[p];
            for (int64_t e = q->at; o->has[u][p] && e < q->at + q->numel; e++, has++)
                if (fabs(o->grad[e]) > most) most = fabs(o->grad[e]);
        }
        W_CHECK(!has || most > 1e-9, "iteration %d, unit %d: all gradients are %g", x->it, u, most);
    }
}

FS_FN fs_story *fs_tell(const fs_conf *c) {
    fs_story *s = (fs_story *)lab_zeros(1, sizeof *s);
    fs_run *x = (fs_run *)malloc(sizeof *x);
    static fs_copy o;
    size_t bytes = (size_t)c->net->numel * sizeof(double);
    CHECK(x && c->replicas * c->shards <= FS_RANKS && c->iters <= FS_ITERS);
    CHECK(c->micros <= FS_MICROS);
    fs_run_init(x, c, 0);
    fs_copy_init(x, &o);
    s->plain = c->plain;
    fs_choose_optim(x);
    for (int it = 0; it < c->iters; it++) {
        for (int m = 0; m < c->micros; m++) {
            for (x->rank = 0; x->rank < x->size; x->rank++)
                s->loss[it][x->rank][m] = fs_micro_of(x, it, m);
            fs_copy_reduce(x);
            s->grad[it][m] = lab_doubles(c->net->numel);
            memcpy(s->grad[it][m], o.grad, bytes);
            memcpy(s->has[it][m], o.has, sizeof o.has);
        }
        fs_check_alive(x, s->loss[it][0][0]);
        if (c->clip_p > 0) s->norm[it] = fs_copy_clip(x);
        fs_copy_update(x);
        s->param[it] = lab_doubles(c->net->numel);
        memcpy(s->param[it], o.master, bytes);
        if (fs_grads_then(c, it) == FS_GONE) memset(o.has, 0, sizeof o.has);
        if (fs_grads_then(c, it) == FS_ZEROS) memset(o.grad, 0, bytes);
    }
    fs_copy_free(&o, x->size);
    fs_run_free(x);
    free(x);
    return s;
}
FS_FN void fs_story_free(fs_story *s, const fs_conf *c) {
    for (int it = 0; it < c->iters; it++) {
        for (int m = 0; m < c->micros; m++) free(s->grad[it][m]);
        free(s->param[it]);
    }
    free(s);
}

/* ---- the library ----------------------------------------------------------------------------- */

FS_FN int64_t fs_global(const fs_run *x, int unit, int p, int64_t element) {
    return x->global ? x->global(x, unit, p, element) : element;
}

/* Which parameter a view is of: the user of its desc says. */
FS_FN int fs_view_unit(const fsdp_param_view *v) { return (int)(intptr_t)v->user / FS_PARAMS; }
FS_FN int fs_view_param(const fsdp_param_view *v) { return (int)(intptr_t)v->user % FS_PARAMS; }

/* As it lies in the whole tensor of a unit that tensor parallelism cuts. */
FS_FN fsdp_param_view fs_whole_view(const fs_run *x, const fsdp_param_view *v) {
    fsdp_param_view whole = *v;
    if (x->dm) CALL(x->world, fsdp_tp_view(x->dm, v, &whole));
    return whole;
}
FS_FN void fs_fill(void *user, const fsdp_param_view *block) {
    const fs_run *x = (const fs_run *)user;
    const fsdp_param_view v = fs_whole_view(x, block);
    const int u = fs_view_unit(block), p = fs_view_param(block);
    for (int64_t k = 0; k < block->numel; k++) {
        int64_t e = fs_global(x, u, p, fsdp_view_index(&v, k));
        lab_put(block->data, block->dtype, k,
                lab_round(block->dtype, fs_initial(x->whole, u, p, e)));
    }
}

FS_FN fsdp_param_desc fs_param_desc_of(const fs_run *x, int unit, int p) {
    const fs_param *q = &x->net->units[unit].params[p];
    fsdp_param_desc d = FSDP_ZERO;
    d.ndim = q->ndim, d.shard_dim = q->shard_dim, d.frozen = q->frozen;
    d.keep_dtype = q->keep_dtype, d.dtype = x->c->made ? x->c->made : fs_stored(x, unit, p);
    d.shape[0] = q->shape[0], d.shape[1] = q->shape[1];
    d.user = (void *)(intptr_t)(unit * FS_PARAMS + p);
    return d;
}

/* mesh, info NULL: as the model. */
FS_FN void fs_make_unit_on(fs_run *x, int unit, const fsdp_mesh *mesh, const fsdp_mesh_info *info) {
    const fs_unit *from = &x->net->units[unit];
    fsdp_param_desc d[FS_PARAMS];
    fsdp_unit_desc ud = FSDP_ZERO;
    for (int p = 0; p < from->count; p++) d[p] = fs_param_desc_of(x, unit, p);
    ud.name = from->name, ud.params = d, ud.num_params = from->count, ud.mesh = mesh;
    ud.mesh_info = info;
    ud.param_dtype = from->param, ud.reduce_dtype = from->reduce, ud.output_dtype = from->output;
    ud.keep_forward_inputs = from->keep_inputs;
    ud.reshard_after_forward = from->raf;
    ud.user = (void *)(intptr_t)unit;
    if (x->net->around && unit == 0 && !from->raf && !x->c->raf)
        ud.reshard_after_forward = FSDP_RESHARD_NEVER; /* as upstream's root does */
    CALL(x->world, fsdp_fully_shard(x->model, &ud, &x->unit[unit]));
}

FS_FN void fs_make_unit(fs_run *x, int unit, const fsdp_mesh *mesh) {
    fs_make_unit_on(x, unit, mesh, NULL);
}

FS_FN void fs_make_buckets(fs_run *x) {
    static const int64_t caps[2] = {64, 1024};
    const int small = !x->c->bucket_bytes;
    fsdp_param_desc d[FS_UNITS * FS_PARAMS];
    fsdp_replicate_desc rd = FSDP_ZERO;
    int count = 0;
    for (int u = 0; u < x->net->count; u++)
        for (int p = 0; p < x->net->units[u].count; p++) d[count++] = fs_param_desc_of(x, u, p);
    rd.params = d, rd.num_params = count, rd.caps = caps, rd.num_caps = small ? 2 : 0;
    rd.bucket_bytes = x->c->bucket_bytes;
    CALL(x->world, fsdp_replicate_create(x->model, &rd, &x->rep));
    for (int u = 0; u < x->net->count; u++)
        CALL(x->world, fsdp_replicate_unit(x->rep, fs_bucketed(x, u, 0), &x->unit[u], NULL));
}
FS_FN void fs_make_units(fs_run *x) {
    if (x->c->make) x->c->make(x);
    else if (x->c->how == FS_BUCKETS) fs_make_buckets(x);
    else
        for (int u = 0; u < x->net->count; u++) fs_make_unit(x, u, NULL);
}

FS_FN void fs_make_mesh(fs_run *x) {
    const int32_t replicas = x->c->replicas;
    static const char *const name = "replicate";
    CHECK(x->c->how == FS_SHARD || x->c->shards == 1);
    if (x->c->how) x->mesh = lab_mesh(x->world, 1, &replicas, &name, NULL);
    if (x->c->how) return;
    if (x->c->replicas == 1 && !x->c->mesh_2d) return;
    x->mesh = lab_mesh2(x->world, x->c->replicas, x->c->shards, "dp_replicate", "dp_shard");
}

FS_FN void fs_make_model(fs_run *x) {
    const fs_conf *c = x->c;
    fsdp_model_desc md = FSDP_ZERO;
    fsdp_mesh_info info;
    if (c->how) CALL(x->world, fsdp_mesh_info_init(x->mesh, FSDP_MESH_INFO_DDP, -1, 0, &info));
    md.mesh_info = x->info.mesh ? &x->info : c->how ? &info : NULL;
    md.mesh = x->info.mesh ? NULL : x->mesh;
    md.param_dtype = c->param, md.reduce_dtype = c->reduce, md.grad_dtype = c->grad;
    md.reshard_after_forward = c->raf, md.cpu_offload = c->offload;
    md.implicit_prefetch = c->prefetch, md.direct_min = c->direct_min, md.debug = 1;
    CALL(x->world, fsdp_model_create(x->world, &md, &x->model));
}

FS_FN void fs_check_near(const fs_run *x, const char *what, int u, int p, int64_t e, double got,
                         double want) {
    fsdp_dtype red = fs_reduced(x, u), store = fs_kept_grad(x, u, p);
    double rtol = x->c->rtol, atol = x->c->atol;
    int wide = red == FSDP_F64 && store == FSDP_F64;
    if (rtol <= 0) rtol = wide ? 1e-13 : 1.3e-6;
    if (atol <= 0) atol = wide ? 1e-14 : 1e-6;
    W_CHECK(fabs(got - want) <= atol + rtol * fabs(want),
            "iteration %d, microbatch %d: %s of unit %d, parameter %d, element %lld: %.9g, "
            "expected %.9g",
            x->it, x->micro, what, u, p, (long long)e, got, want);
}

/* A shard, or its gradient, against the numbers of the story. */
FS_FN void fs_compare(fs_run *x, const char *what, const fsdp_param_view *v, const void *data,
                      fsdp_dtype type, const double *want) {
    const int u = fs_view_unit(v), p = fs_view_param(v);
    const fsdp_param_view whole = fs_whole_view(x, v);
    int64_t at = x->whole->units[u].params[p].at;
    for (int64_t k = 0; k < v->numel; k++) {
        int64_t e = fs_global(x, u, p, fsdp_view_index(&whole, k));
        fs_check_near(x, what, u, p, e, lab_get(data, type, k), want[at + e]);
    }
}
FS_FN void fs_compare_grads(fs_run *x) {
    const fs_story *s = x->story;
    fsdp_param_view v = FSDP_ZERO;
    while (fsdp_next_param(x->model, &v)) {
        const int u = fs_view_unit(&v), p = fs_view_param(&v);
        W_CHECK(s->has[x->it][x->micro][u][p] == (v.shard_grad != NULL),
                "iteration %d, microbatch %d: unit %d, parameter %d %s a gradient", x->it, x->micro,
                u, p, v.shard_grad ? "has" : "lacks");
        W_CHECK(v.grad_dtype == fs_kept_grad(x, u, p) && v.dtype == fs_stored(x, u, p), "dtypes");
        if (v.shard_grad)
            fs_compare(x, "gradient", &v, v.shard_grad, v.grad_dtype, s->grad[x->it][x->micro]);
    }
}
FS_FN void fs_compare_params(fs_run *x) {
    fsdp_param_view v = FSDP_ZERO;
    while (fsdp_next_param(x->model, &v))
        fs_compare(x, "parameter", &v, v.shard, v.dtype, x->story->param[x->it]);
}

/* The optimizer: AdamW of fsdp_optim.h without decay, which is Adam; or a loop of the caller's. */
FS_FN void fs_make_optim(fs_run *x) {
    fsdp_adamw_desc d = fsdp_adamw_defaults();
    fs_choose_optim(x);
    d.weight_decay = 0;
    if (x->adam) CALL(x->world, fsdp_adamw_create(x->model, &d, &x->adamw));
}
FS_FN void fs_update_shard(const fs_run *x, const fsdp_param_view *v) {
    for (int64_t k = 0; v->shard_grad && k < v->numel; k++) {
        double p = lab_get(v->shard, v->dtype, k), g = lab_get(v->shard_grad, v->grad_dtype, k);
        lab_put(v->shard, v->dtype, k, lab_round(v->dtype, fs_sgd(x->lr, p, g)));
    }
}
FS_FN void fs_update(fs_run *x) {
    fsdp_param_view v = FSDP_ZERO;
    if (x->adam) {
        CALL(x->world, fsdp_adamw_step(x->adamw, x->lr));
        return;
    }
    if (x->c->in_backward) return;
    while (fsdp_next_param(x->model, &v)) fs_update_shard(x, &v);
    CALL(x->world, fsdp_params_changed(x->model));
}

FS_FN void fs_clip(fs_run *x) {
    fsdp_clip_desc d = FSDP_ZERO;
    double norm, want = x->story->norm[x->it];
    d.max_norm = x->c->max_norm, d.norm_type = x->c->clip_p;
    CALL(x->world, fsdp_clip_grads(x->model, &d, &norm));
    W_CHECK(fabs(norm - want) <= 1e-6 * want, "iteration %d: norm %.9g, expected %.9g", x->it, norm,
            want);
}

FS_FN void fs_forget_grads(fs_run *x, int how) {
    fsdp_param_view v = FSDP_ZERO;
    if (how == FS_GONE) CALL(x->world, fsdp_zero_grad(x->model));
    while (how == FS_ZEROS && fsdp_next_param(x->model, &v))
        if (v.shard_grad) memset(v.shard_grad, 0, (size_t)v.numel * fsdp_dtype_size(v.grad_dtype));
}

/* Iterations from..to-1. */
FS_FN void fs_iterate(fs_run *x, int from, int to) {
    const fs_conf *c = x->c;
    for (int it = from; it < to; it++) {
        for (int m = 0; m < c->micros; m++) {
            double loss = fs_micro_of(x, it, m), want = x->story->loss[it][x->rank][m];
            CALL(x->world, fsdp_finalize_backward(x->model));
            W_CHECK(fabs(loss - want) <= (c->atol > 0 ? c->atol : 1e-6) +
                                             (c->rtol > 0 ? c->rtol : 1.3e-6) * fabs(want),
                    "iteration %d, microbatch %d: loss %.9g, expected %.9g", it, m, loss, want);
            fs_compare_grads(x);
            if (c->after) c->after(x, it, m);
        }
        if (c->clip_p > 0) fs_clip(x);
        if (c->clipped) c->clipped(x, it);
        fs_update(x);
        fs_compare_params(x);
        fs_forget_grads(x, fs_grads_then(c, it));
        if (c->end) c->end(x, it);
    }
}

typedef struct fs_job {
    const fs_conf *c;
    const fs_story *story;
} fs_job;

/* A rank's world, model and units. */
FS_FN void fs_rank_begin(fs_run *x, const lab_rank *r, const fs_job *j) {
    const fs_conf *c = j->c;
    snprintf(w_case, sizeof w_case, "%s %dx%d, rank %d", c->name, c->replicas, c->shards, r->rank);
    fs_run_init(x, c, r->rank);
    x->story = j->story, x->world = r->w;
    if (c->locate) c->locate(x);
    else fs_make_mesh(x);
    fs_make_model(x);
    fs_make_units(x);
    CALL(x->world, fsdp_init_params(x->model, fs_fill, x));
    if (c->reduce_unused) CALL(x->world, fsdp_set_reduce_scatter_unused_params(x->model, NULL, 1));
    if (c->divide > 0) CALL(x->world, fsdp_set_gradient_divide_factor(x->model, NULL, c->divide));
    fs_make_optim(x);
    if (c->build) c->build(x);
}
FS_FN void fs_rank_main(lab_rank *r) {
    const fs_job *j = (const fs_job *)r->arg;
    fs_run *x = (fs_run *)lab_zeros(1, sizeof *x);
    fs_rank_begin(x, r, j);
    fs_iterate(x, 0, j->c->iters);
    lab_end(r);
    fs_run_free(x);
    free(x);
}
FS_FN void fs_on_ranks(const fs_conf *c, void (*body)(lab_rank *r), void *arg) {
    fsdp_comm_ops plain = w_plain();
    lab_how how = FSDP_ZERO;
    how.job = "fully_shard", how.lanes = c->lanes;
    how.comm_ops = c->plain ? &plain : c->comm_ops;
    lab_run(c->threads ? c->threads : c->replicas * c->shards, &how, body, arg);
}

/* The library's training beside a story that may have been told for several. */
FS_FN void fs_train_and_compare(const fs_conf *c, const fs_story *told) {
    const int f16 = c->reduce == FSDP_F16 || (!c->reduce && c->param == FSDP_F16);
    fs_story *own = f16 && told->plain != c->plain ? fs_tell(c) : NULL;
    fs_job j = {c, own ? own : told};
    fs_on_ranks(c, fs_rank_main, &j);
    if (own) fs_story_free(own, c);
}
/* Both trainings, and the comparison. */
FS_FN void fs_train(const fs_conf *c) {
    fs_story *s = fs_tell(c);
    fs_train_and_compare(c, s);
    fs_story_free(s, c);
}

/* ---- what was issued ------------------------------------------------------------------------- */

/* From here on x->log has the records that the model emits. */
FS_FN void fs_watch(fs_run *x) {
    if (!x->log.ops) lab_watch(&x->log, x->world, x->model);
    x->log.num = 0;
}
/* How many of a kind, with a label (-1: any), of a unit (-1: any). */
FS_FN int fs_seen(const fs_run *x, int kind, int label, int unit) {
    return lab_count_ops(&x->log, 0, kind, label, unit < 0 ? NULL : x->unit[unit]);
}
/* The first one; NULL: none. */
FS_FN const fsdp_op *fs_find(const fs_run *x, int kind, int label, int unit) {
    const int n = lab_next_op(&x->log, 0, kind, label, unit < 0 ? NULL : x->unit[unit]);
    return n < 0 ? NULL : &x->log.ops[n];
}
FS_FN int fs_calls(const fs_run *x, int kind) {
    fsdp_counters c = FSDP_ZERO;
    CHECK_OK(fsdp_model_counters(x->model, &c));
    return (int)c.calls[kind];
}

/* ---- a backend that dawdles ------------------------------------------------------------------ */

enum { FS_SLOW_GATHER = 1, FS_SLOW_REDUCE = 2, FS_SLOW_FORWARD = 4, FS_SLOW_OPTIM = 8 };
static int fs_slow; /* which of them */

FS_FN void fs_dawdle(uint64_t a, uint64_t b) {
    usleep((useconds_t)(lab_hash(a, b, h_seed(), 0) % 1500));
}

FS_FN fsdp_status fs_slow_run(fsdp_comm *comm, const fsdp_coll *coll) {
    int gather = coll->kind == FSDP_OP_ALL_GATHER;
    if (fs_slow & (gather ? FS_SLOW_GATHER : FS_SLOW_REDUCE))
        fs_dawdle(coll->seq, (uint64_t)h_rank);
    return fsdp_shm_comm_ops()->run(comm, coll);
}
FS_FN fsdp_comm_ops fs_slow_ops(void) {
    fsdp_comm_ops ops = *fsdp_shm_comm_ops();
    ops.run = fs_slow_run;
    ops.name = "slow";
    return ops;
}
#endif /* FULLY_SHARD_H */
