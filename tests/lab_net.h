/* lab_net.h - nets for tests. A net is a table of parameters, from which units and models are made.
   lab_truth has the expected result of training it with gradients that are whole numbers: their sum
   is exact in any order, so that each element is known to the bit.

       static const lab_param rows[] = {{0, "w", FSDP_F32, 0, 0, 2, 0, {7, 5}},
                                        {0, "b", FSDP_F32, 0, 0, 1, 0, {3}}};
       static const lab_net net = {rows, 2, 1};

   SPDX-License-Identifier: MIT */
#ifndef LAB_NET_H
#define LAB_NET_H
#include "lab.h"

enum { LAB_UNITS = 8, LAB_PARAMS = 16, LAB_NUMEL = 640 };

typedef struct lab_param {
    int unit;
    const char *name;
    fsdp_dtype dtype;
    int tag; /* for use by the test */
    int frozen, ndim, shard_dim;
    int64_t shape[3];
} lab_param;

typedef struct lab_net {
    const lab_param *rows; /* the rows of each unit are adjacent */
    int count, units;
} lab_net;

typedef struct lab_built { /* a model of a net, on one rank */
    const lab_net *net;
    fsdp_world *w;
    fsdp_model *model;
    fsdp_unit *unit[LAB_UNITS];
    int index[LAB_PARAMS], frozen[LAB_PARAMS]; /* index in the unit; current flag */
} lab_built;

H_FN int64_t lab_numel_of(const lab_net *net, int p) {
    return lab_numel(net->rows[p].ndim, net->rows[p].shape);
}
H_FN size_t lab_nbytes_of(const lab_net *net, int p) {
    return (size_t)lab_numel_of(net, p) * fsdp_dtype_size(net->rows[p].dtype);
}
/* Returns the first parameter of a unit. */
H_FN int lab_first_of(const lab_net *net, int unit) {
    int p = 0;
    while (p < net->count && net->rows[p].unit != unit) p++;
    return p;
}
/* Returns the row of a view's parameter. */
H_FN int lab_row_of(const lab_net *net, const fsdp_param_view *v) {
    return (int)((const lab_param *)v->user - net->rows);
}

/* Sets the descs of a unit's parameters. Returns their number. */
H_FN int lab_descs(const lab_built *m, int unit, fsdp_param_desc *out) {
    int count = 0;
    for (int p = lab_first_of(m->net, unit); p < m->net->count; p++) {
        const lab_param *row = &m->net->rows[p];
        if (row->unit != unit) break;
        out[count] = lab_desc(row->ndim, row->shape, row->shard_dim, row->dtype, m->frozen[p]);
        out[count].name = row->name;
        out[count++].user = (void *)(uintptr_t)row;
    }
    return count;
}

/* Starts a model, before its units are made: sets which parameters are frozen. */
H_FN void lab_begin(lab_built *m, const lab_net *net, fsdp_world *w) {
    CHECK(net->count <= LAB_PARAMS && net->units <= LAB_UNITS);
    m->net = net, m->w = w;
    for (int p = 0; p < net->count; p++) {
        m->frozen[p] = net->rows[p].frozen;
        m->index[p] = p - lab_first_of(net, net->rows[p].unit);
    }
}
H_FN fsdp_status lab_try_units(lab_built *m) {
    fsdp_status status = FSDP_OK;
    for (int u = 0; u < m->net->units && !status; u++) {
        fsdp_param_desc d[LAB_PARAMS];
        fsdp_unit_desc ud = FSDP_ZERO;
        ud.params = d, ud.num_params = lab_descs(m, u, d);
        status = fsdp_fully_shard(m->model, &ud, &m->unit[u]);
    }
    return status;
}
H_FN void lab_build(lab_built *m, const lab_net *net, fsdp_world *w, const fsdp_model_desc *desc) {
    lab_begin(m, net, w);
    m->model = lab_model(w, desc);
    CALL(w, lab_try_units(m));
}

/* Returns a number in [-2, 2) with a few digits. */
H_FN double lab_value(int64_t a, int64_t b) {
    return (double)((a * 7919 + b * 104729 + a * b) % 4001) / 1000 - 2;
}
H_FN void lab_fill(void *user, const fsdp_param_view *block) { /* for fsdp_init_params */
    (void)user;
    for (int64_t k = 0; k < block->numel; k++)
        lab_put(block->data, block->dtype, k, lab_value(block->ordinal, fsdp_view_index(block, k)));
}

/* Return the unit of parameter p; this rank's view of p. */
H_FN fsdp_unit *lab_unit_of(const lab_built *m, int p) { return m->unit[m->net->rows[p].unit]; }
H_FN fsdp_param_view lab_view_of(const lab_built *m, int p) {
    return lab_view(m->w, lab_unit_of(m, p), m->index[p]);
}
H_FN const void *lab_data(const lab_built *m, int p) {
    const void *data = fsdp_data(lab_unit_of(m, p), m->index[p]);
    W_CHECK(data != NULL, "no data of %s: %s", m->net->rows[p].name, fsdp_last_error(m->w));
    return data;
}
H_FN void *lab_grad(const lab_built *m, int p) {
    void *grad = fsdp_grad(lab_unit_of(m, p), m->index[p]);
    W_CHECK(grad != NULL, "no gradient of %s: %s", m->net->rows[p].name, fsdp_last_error(m->w));
    return grad;
}
/* Freezes or thaws parameter p. */
H_FN void lab_freeze(lab_built *m, int p, int frozen) {
    CALL(m->w, fsdp_set_requires_grad(lab_unit_of(m, p), m->index[p], !frozen));
    m->frozen[p] = frozen;
}
H_FN void lab_forwards(const lab_built *m) {
    for (int u = 0; u < m->net->units; u++) lab_forward(m->w, m->unit[u]);
}

/* ---- the expected result, in f32 ------------------------------------------------------------- */

typedef struct lab_truth {
    float weight[LAB_PARAMS][LAB_NUMEL], grad[LAB_PARAMS][LAB_NUMEL];
    double kept[LAB_PARAMS][LAB_NUMEL];    /* sums over ranks of unreduced gradients */
    double partial[LAB_PARAMS][LAB_NUMEL]; /* partial sums, reduced over the shards only */
    int has[LAB_PARAMS], has_kept[LAB_PARAMS], has_partial[LAB_PARAMS];
} lab_truth;

/* Reduces the sums to a gradient; or, without the replicas, keeps them for the next reduction.
   Only the product with 1/members, and additions to it, are rounded. */
H_FN void lab_reduce(lab_truth *t, const lab_net *net, int p, int members, int partial) {
    const float factor = 1.0f / (float)members;
    for (int64_t e = 0; e < lab_numel_of(net, p); e++) {
        t->partial[p][e] += t->kept[p][e];
        t->kept[p][e] = 0;
        if (partial) continue;
        volatile float mean = (float)t->partial[p][e] * factor, old = t->grad[p][e];
        t->grad[p][e] = t->has[p] ? old + mean : mean;
        t->partial[p][e] = 0;
    }
    t->has_kept[p] = 0;
    t->has_partial[p] = partial;
    t->has[p] |= !partial;
}

/* Runs a step of SGD; the rate is a power of two, so that the product is exact. */
H_FN void lab_descend(float *weight, const float *grad, int64_t numel, float rate) {
    for (int64_t k = 0; k < numel; k++) {
        volatile float move = rate * grad[k];
        weight[k] -= move;
    }
}
H_FN void lab_descend_truth(const lab_built *m, lab_truth *t, float rate) {
    for (int p = 0; p < m->net->count; p++)
        if (t->has[p] && !m->frozen[p])
            lab_descend(t->weight[p], t->grad[p], lab_numel_of(m->net, p), rate);
    memset(t->has, 0, sizeof t->has);
}
/* Runs a step of SGD on the shards and on the expected weights, and drops the gradients. */
H_FN void lab_update(const lab_built *m, lab_truth *t, float rate) {
    fsdp_param_view v = FSDP_ZERO;
    while (fsdp_next_param(m->model, &v))
        if (v.shard_grad) lab_descend((float *)v.shard, (const float *)v.shard_grad, v.numel, rate);
    CALL(m->w, fsdp_params_changed(m->model));
    CALL(m->w, fsdp_zero_grad(m->model));
    lab_descend_truth(m, t, rate);
}

/* Checks a unit's gathered parameters, in the dtype in which they are gathered. */
H_FN void lab_check_data(const lab_built *m, const lab_truth *t, int unit, fsdp_dtype dtype) {
    for (int p = lab_first_of(m->net, unit); p < m->net->count && m->net->rows[p].unit == unit;
         p++) {
        const void *data = lab_data(m, p);
        for (int64_t k = 0; k < lab_numel_of(m->net, p); k++) {
            double want = lab_round(dtype, (double)t->weight[p][k]), got = lab_get(data, dtype, k);
            W_CHECK(lab_same(got, want), "parameter %d at %lld: %g, expected %g", p, (long long)k,
                    got, want);
        }
    }
}

/* Checks one float of a shard. */
H_FN void lab_check_float(const char *what, int p, int64_t at, float got, float want) {
    W_CHECK(!memcmp(&got, &want, sizeof got), "%s of %d at %lld: %g, expected %g", what, p,
            (long long)at, (double)got, (double)want);
}
/* Checks this rank's shards and gradients, bit for bit, and that no other gradient exists. */
H_FN void lab_check_params(const lab_built *m, const lab_truth *t) {
    fsdp_param_view v = FSDP_ZERO;
    while (fsdp_next_param(m->model, &v))
        for (int64_t k = 0; k < v.numel; k++)
            lab_check_float("parameter", lab_row_of(m->net, &v), k, ((const float *)v.shard)[k],
                            t->weight[lab_row_of(m->net, &v)][fsdp_view_index(&v, k)]);
}
H_FN void lab_check_grads(const lab_built *m, const lab_truth *t) {
    fsdp_param_view v = FSDP_ZERO;
    while (fsdp_next_param(m->model, &v)) {
        const int p = lab_row_of(m->net, &v);
        W_CHECK((v.shard_grad != NULL) == (t->has[p] && !m->frozen[p]),
                "parameter %d has %s gradient", p, v.shard_grad ? "a" : "no");
        W_CHECK(v.requires_grad == !m->frozen[p], "parameter %d", p);
        for (int64_t k = 0; v.shard_grad && k < v.numel; k++)
            lab_check_float("gradient", p, k, ((const float *)v.shard_grad)[k],
                            t->grad[p][fsdp_view_index(&v, k)]);
    }
}
/* Checks the full parameter p, or (grads) its full gradient: zeros if it has none. */
H_FN void lab_check_full(const lab_built *m, const lab_truth *t, int p, int grads) {
    float full[LAB_NUMEL], zeros[LAB_NUMEL] = {0};
    memset(full, 0x55, sizeof full);
    CALL(m->w, grads ? fsdp_param_full_grad(lab_unit_of(m, p), m->index[p], full)
                     : fsdp_param_full(lab_unit_of(m, p), m->index[p], full));
    CHECK_EQ_MEM(full,
                 !grads      ? t->weight[p]
                 : t->has[p] ? t->grad[p]
                             : zeros,
                 lab_nbytes_of(m->net, p));
}

/* ---- optimizers ------------------------------------------------------------------------------ */

typedef struct lab_optim_kind {
    const char *name;
    int sgd, grouped;
    double beta1, momentum, dampening, weight_decay;
    int nesterov;
} lab_optim_kind;

static const lab_optim_kind lab_optim_kinds[]
    __attribute__((unused)) = {{"adamw", 0, 0, 0, 0, 0, 0, 0},
                               {"adamw_groups", 0, 1, 0.3, 0, 0, 0.1, 0},
                               {"sgd", 1, 0, 0, 0, 0, 0, 0},
                               {"sgd_groups", 1, 1, 0, 0.9, 0.25, 0.1, 0},
                               {"sgd_nesterov", 1, 1, 0, 0.5, 0, 0, 1}};
static const struct { /* values of fsdp_optim_group */
    double lr_scale, weight_decay;
} lab_optim_groups[3] __attribute__((unused)) = {{1, FSDP_OPTIM_SAME}, {2, 0}, {0, 0.5}};

typedef struct lab_optim { /* one of the two */
    const lab_optim_kind *kind;
    fsdp_adamw *adamw;
    fsdp_sgd *sgd;
} lab_optim;

/* Returns a parameter's group, which is the tag of its row. */
H_FN int lab_group_of(void *user, const fsdp_param_view *v) {
    CHECK(v->requires_grad);
    return ((const lab_net *)user)->rows[lab_row_of((const lab_net *)user, v)].tag;
}
H_FN fsdp_status lab_make_optim(lab_optim *o, const lab_optim_kind *kind, const lab_built *m) {
    fsdp_adamw_desc a = fsdp_adamw_defaults();
    fsdp_sgd_desc s = fsdp_sgd_defaults();
    o->kind = kind;
    a.beta1 = kind->beta1, a.weight_decay = s.weight_decay = kind->weight_decay;
    s.momentum = kind->momentum, s.dampening = kind->dampening, s.nesterov = kind->nesterov;
    if (kind->grouped) {
        a.num_groups = s.num_groups = 3;
        for (int i = 0; i < 3; i++) {
            a.groups[i].lr_scale = s.groups[i].lr_scale = lab_optim_groups[i].lr_scale;
            a.groups[i].weight_decay = s.groups[i].weight_decay = lab_optim_groups[i].weight_decay;
        }
        a.group = s.group = lab_group_of;
        a.user = s.user = (void *)(uintptr_t)m->net;
    }
    return kind->sgd ? fsdp_sgd_create(m->model, &s, &o->sgd)
                     : fsdp_adamw_create(m->model, kind->grouped ? &a : NULL, &o->adamw);
}
H_FN fsdp_status lab_optim_step(const lab_optim *o, double lr) {
    return o->sgd ? fsdp_sgd_step(o->sgd, lr) : fsdp_adamw_step(o->adamw, lr);
}
H_FN int64_t lab_optim_nbytes(const lab_optim *o) {
    return o->sgd ? fsdp_sgd_nbytes(o->sgd) : fsdp_adamw_nbytes(o->adamw);
}
H_FN fsdp_optim_state lab_optim_state(const lab_built *m, const lab_optim *o, int ordinal) {
    fsdp_optim_state s;
    CALL(m->w,
         o->sgd ? fsdp_sgd_state(o->sgd, ordinal, &s) : fsdp_adamw_state(o->adamw, ordinal, &s));
    return s;
}
H_FN void lab_optim_destroy(lab_optim *o) {
    fsdp_sgd_destroy(o->sgd);
    fsdp_adamw_destroy(o->adamw);
    o->sgd = NULL, o->adamw = NULL;
}
#endif
