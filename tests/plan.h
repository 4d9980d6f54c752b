/* plan.h - nets for tests of plans: a net is a list of units and the calls of a step. The same
   training runs by calls and with a plan; what has to be equal is compared bit by bit.

   Gradients are a function of the gathered parameters, the rank, the step and the call, so that
   whatever a gather or a reduction does otherwise shows in what comes after.

   SPDX-License-Identifier: MIT */
#ifndef PLAN_H
#define PLAN_H
#include "lab.h"

enum { PLAN_UNITS = 72, PLAN_CALLS = 320, PLAN_STEPS = 12, PLAN_PARAMS = 12 };

typedef struct plan_net {
    const char *name;
    int num_units, num_params;    /* of each unit, unless `params` says otherwise */
    int64_t rows[PLAN_PARAMS][2]; /* shapes: matrices; a second size of 0: vectors */
    int num_calls;
    struct {
        int16_t unit, call; /* FSDP_CALL_* */
    } calls[PLAN_CALLS];
    fsdp_model_desc model;
    int never;    /* 1 + the unit that stays open around the others */
    int replicas; /* 0: one-dimensional; else HSDP, or with all ranks DDP */
    int frozen;   /* 1 + the parameter that is frozen in each unit */
    int scaled;   /* units differ in size: rows times 1 + unit % scaled */
} plan_net;

typedef struct plan_result {
    uint64_t hash[PLAN_STEPS]; /* of what every forward and backward saw, and of the shards */
    uint64_t grads[PLAN_STEPS];
    fsdp_counters counters[PLAN_STEPS];
    fsdp_memory memory;
    fsdp_plan_report report;
    fsdp_plan_mode mode[PLAN_STEPS]; /* behind each step */
    char why[PLAN_STEPS][160];
    int count;
} plan_result;

typedef struct plan_bed { /* one rank */
    const plan_net *net;
    fsdp_world *w;
    fsdp_model *model;
    fsdp_unit *unit[PLAN_UNITS];
    fsdp_plan *plan;
    uint64_t hash;
    int step;
    int64_t numel[PLAN_UNITS][PLAN_PARAMS];
} plan_bed;

H_FN void plan_call(plan_net *n, int unit, int call) {
    CHECK(n->num_calls < PLAN_CALLS);
    n->calls[n->num_calls].unit = (int16_t)unit;
    n->calls[n->num_calls++].call = (int16_t)call;
}
H_FN void plan_pair(plan_net *n, int unit, int backward) {
    plan_call(n, unit, backward ? FSDP_CALL_PRE_BACKWARD : FSDP_CALL_PRE_FORWARD);
    plan_call(n, unit, backward ? FSDP_CALL_POST_BACKWARD : FSDP_CALL_POST_FORWARD);
}
/* The units of `order`, and back. */
H_FN void plan_visit(plan_net *n, const int *order, int count) {
    for (int i = 0; i < count; i++) plan_pair(n, order[i], 0);
    for (int i = count - 1; i >= 0; i--) plan_pair(n, order[i], 1);
}
H_FN plan_net plan_chain(int units, int64_t rows, int64_t cols) {
    plan_net n;
    int order[PLAN_UNITS];
    memset(&n, 0, sizeof n);
    n.name = "chain";
    n.num_units = units, n.num_params = 2;
    n.rows[0][0] = rows, n.rows[0][1] = cols, n.rows[1][0] = cols;
    for (int i = 0; i < units; i++) order[i] = i;
    plan_visit(&n, order, units);
    return n;
}
/* Three layers, used as 0 0 1 1 2 2 0 1 2 0 1 2, and back. */
H_FN plan_net plan_nested(void) {
    static const int order[12] = {0, 0, 1, 1, 2, 2, 0, 1, 2, 0, 1, 2};
    plan_net n = plan_chain(3, 16, 16);
    n.name = "nested";
    n.num_calls = 0;
    plan_visit(&n, order, 12);
    return n;
}

H_FN void plan_fill(void *user, const fsdp_param_view *v) {
    (void)user;
    for (int64_t k = 0; k < v->numel; k++) {
        uint64_t h = lab_hash(7, (uint64_t)v->ordinal, (uint64_t)fsdp_view_index(v, k), 3);
        lab_put(v->data, v->dtype, k, (double)(h % 2001) / 1000 - 1);
    }
}

H_FN void plan_open(plan_bed *b, const plan_net *net, fsdp_world *w) {
    static __thread fsdp_mesh_info info;
    fsdp_model_desc md = net->model;
    memset(b, 0, sizeof *b);
    b->net = net, b->w = w;
    if (net->replicas) {
        fsdp_mesh *mesh;
        fsdp_mesh_desc d = FSDP_ZERO;
        int size = fsdp_world_size(w);
        d.ndim = 2, d.shape[0] = net->replicas, d.shape[1] = size / net->replicas;
        d.names[0] = "replicas", d.names[1] = "shards";
        CALL(w, fsdp_mesh_create(w, &d, &mesh));
        CALL(w, fsdp_mesh_info_init(mesh, size == net->replicas ? FSDP_MESH_INFO_DDP
                                                                : FSDP_MESH_INFO_HSDP,
                                    size == net->replicas ? -1 : 1, 0, &info));
        md.mesh_info = &info;
    }
    CALL(w, fsdp_model_create(w, &md, &b->model));
    for (int u = 0; u < net->num_units; u++) {
        fsdp_param_desc p[PLAN_PARAMS];
        fsdp_unit_desc ud = FSDP_ZERO;
        char name[16];
        snprintf(name, sizeof name, "h.%d", u);
        for (int i = 0; i < net->num_params; i++) {
            int64_t rows = net->rows[i][0] * (net->scaled ? 1 + u % net->scaled : 1);
            p[i] = net->rows[i][1] ? fsdp_mat(NULL, rows, net->rows[i][1]) : fsdp_vec(NULL, rows);
            p[i].frozen = net->frozen == i + 1;
            b->numel[u][i] = rows * (net->rows[i][1] ? net->rows[i][1] : 1);
        }
        ud.name = name, ud.params = p, ud.num_params = net->num_params;
        if (net->never == u + 1) ud.reshard_after_forward = FSDP_RESHARD_NEVER;
        CALL(w, fsdp_fully_shard(b->model, &ud, &b->unit[u]));
    }
    CALL(w, fsdp_init_params(b->model, plan_fill, NULL));
}

H_FN fsdp_dtype plan_dtype(const plan_net *n) {
    return n->model.param_dtype ? n->model.param_dtype : FSDP_F32;
}

/* What a unit's parameters are, into the hash; in backward gradients that follow from them. */
H_FN void plan_look(plan_bed *b, int unit, int call_index, int backward) {
    const plan_net *n = b->net;
    fsdp_dtype dtype = plan_dtype(n);
    for (int i = 0; i < n->num_params; i++) {
        const void *data = fsdp_data(b->unit[unit], i);
        CHECK(data);
        lab_fold(&b->hash, data, (size_t)b->numel[unit][i] * fsdp_dtype_size(dtype));
        void *grad = backward && n->frozen != i + 1 ? fsdp_grad(b->unit[unit], i) : NULL;
        for (int64_t k = 0; grad && k < b->numel[unit][i]; k++) {
            uint64_t h = lab_hash((uint64_t)fsdp_rank(b->w), (uint64_t)b->step,
                                  (uint64_t)call_index * 16 + (uint64_t)i, (uint64_t)k);
            double g = lab_get(data, dtype, k) * ((double)(h % 17) - 8) / 64;
            lab_put(grad, dtype, k, lab_get(grad, dtype, k) + g);
        }
    }
}

H_FN fsdp_status plan_hook(plan_bed *b, int unit, int call) {
    static fsdp_status (*const calls[])(fsdp_unit *) = {
        fsdp_pre_forward, fsdp_post_forward, fsdp_pre_backward, fsdp_post_backward,
        fsdp_unshard,     fsdp_wait,         fsdp_reshard};
    return calls[call](b->unit[unit]);
}

/* Calls [from, to) of a step. */
H_FN void plan_calls(plan_bed *b, int from, int to) {
    for (int i = from; i < to; i++) {
        int unit = b->net->calls[i].unit, call = b->net->calls[i].call;
        CALL(b->w, plan_hook(b, unit, call));
        if (call == FSDP_CALL_PRE_FORWARD) plan_look(b, unit, i, 0);
        if (call == FSDP_CALL_PRE_BACKWARD) plan_look(b, unit, i, 1);
    }
}

/* Gradients into a hash; descent; zeros. */
H_FN uint64_t plan_update(plan_bed *b) {
    fsdp_param_view v = FSDP_ZERO;
    uint64_t grads = 1;
    while (fsdp_next_param(b->model, &v)) {
        CHECK((v.shard_grad != NULL) == v.requires_grad);
        if (!v.shard_grad) continue;
        lab_fold(&grads, v.shard_grad, (size_t)v.numel * fsdp_dtype_size(v.grad_dtype));
        for (int64_t k = 0; k < v.numel; k++)
            lab_put(v.shard, v.dtype, k,
                    lab_get(v.shard, v.dtype, k) - lab_get(v.shard_grad, v.grad_dtype, k) / 8);
        lab_fold(&b->hash, v.shard, (size_t)v.numel * fsdp_dtype_size(v.dtype));
    }
    CALL(b->w, fsdp_params_changed(b->model));
    CALL(b->w, fsdp_zero_grad(b->model));
    return grads;
}

H_FN void plan_step(plan_bed *b, plan_result *out) {
    int i = b->step;
    plan_calls(b, 0, b->net->num_calls);
    CALL(b->w, fsdp_finalize_backward(b->model));
    out->grads[i] = plan_update(b);
    out->hash[i] = b->hash;
    CALL(b->w, fsdp_model_counters(b->model, &out->counters[i]));
    if (b->plan) {
        out->mode[i] = fsdp_plan_state(b->plan);
        snprintf(out->why[i], sizeof out->why[i], "%s", fsdp_plan_why(b->plan));
    }
    b->step++;
}

H_FN void plan_train(fsdp_world *w, const plan_net *net, const fsdp_plan_desc *desc, int planned,
                     int steps, plan_result *out) {
    plan_bed b;
    memset(out, 0, sizeof *out);
    plan_open(&b, net, w);
    if (planned) CALL(w, fsdp_plan_create(b.model, desc, &b.plan));
    for (int i = 0; i < steps; i++) plan_step(&b, out);
    CALL(w, fsdp_model_memory(b.model, &out->memory));
    out->count = fsdp_plan_count(b.plan);
    if (out->count) CALL(w, fsdp_plan_report_get(b.plan, out->count - 1, &out->report));
    fsdp_model_destroy(b.model);
}
#endif
