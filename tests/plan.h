/* plan.h - nets for tests of plans. A net is a list of units and the calls of a step. The same
   training runs eagerly and with a plan, and the results are compared bit by bit.

   Gradients are a function of the gathered parameters, the rank, the step and the call, so that any
   difference in a gather or a reduction shows in later results.

   SPDX-License-Identifier: MIT */
#ifndef PLAN_H
#define PLAN_H
#include "lab.h"
#include "sim.h"

enum { PLAN_UNITS = 72, PLAN_CALLS = 320, PLAN_STEPS = 320, PLAN_PARAMS = 12 };

enum {                           /* options of a net, a set */
       PLAN_SUM_HOOK = 1,        /* all-reduce hooks */
       PLAN_GRAD_HOOK = 2,       /* post-accumulate hooks that write shards */
       PLAN_CUSTOM = 4,          /* custom collectives of the test */
       PLAN_STRINGS = 8,         /* parameter 0 has a gather extension */
       PLAN_LISTS = 16,          /* prefetch lists */
       PLAN_NO_RESHARD = 32,     /* reshard_after_backward 0 */
       PLAN_NO_UNSHARD = 64,     /* unshard_in_backward 0: backward needs no parameters */
       PLAN_UNUSED = 128,        /* parameters are used in some steps, equally on all ranks */
       PLAN_NO_ALL_REDUCE = 256, /* fsdp_set_requires_all_reduce 0 */
       PLAN_SOME_USED = 512      /* by rank and step: fsdp_set_reduce_scatter_unused_params 1 */
};

typedef struct plan_net {
    const char *name;
    int num_units, num_params;    /* num_params: of each unit */
    int64_t rows[PLAN_PARAMS][2]; /* shapes: matrices; a second size of 0: vectors */
    int num_calls;
    struct {
        int16_t unit, call; /* FSDP_CALL_* */
    } calls[PLAN_CALLS];
    fsdp_model_desc model;
    int never;                      /* 1 + the unit that stays open around the others */
    int replicas;                   /* 0: one-dimensional; otherwise HSDP, or with all ranks DDP */
    int frozen;                     /* 1 + the parameter that is frozen in each unit */
    int frozen_unit;                /* 1 + the unit whose parameters are all frozen */
    int sets;                       /* PLAN_* */
    fsdp_dtype dtypes[PLAN_PARAMS]; /* stored dtypes; 0: f32 */
    int keep[PLAN_PARAMS];          /* keep_dtype */
    int scaled;                     /* units differ in size: rows times 1 + unit % scaled */
    const char *const *names;       /* names of units; NULL: h.0, h.1, ... */
    int reshard[PLAN_UNITS];        /* reshard_after_forward of each unit; 0: as the model */
    int empty;                      /* 1 + the unit whose parameters have no elements */
} plan_net;

typedef struct plan_result {
    uint64_t hash[PLAN_STEPS]; /* hash of the data in all hooks, and of the shards */
    uint64_t grads[PLAN_STEPS];
    fsdp_counters counters[PLAN_STEPS];
    fsdp_memory memory;
    fsdp_plan_report report;
    fsdp_plan_mode mode[PLAN_STEPS]; /* after each step */
    char why[PLAN_STEPS][160];
    int count;
} plan_result;

typedef struct plan_bed { /* one rank */
    const plan_net *net;
    fsdp_world *w;
    fsdp_model *model;
    fsdp_unit *unit[PLAN_UNITS];
    fsdp_plan *plan;
    sim *s; /* the simulated device; NULL: a real one */
    uint64_t hash;
    int step;
    int keeps_grads; /* steps do not call fsdp_zero_grad */
    int rests;       /* steps do not change parameters, so that they stay gathered */
    int is_partial;  /* steps may end without gradients */
    int freezes;     /* parameters are frozen and thawed: gradients are not checked */
    int frozen_now;  /* parameter 0 of unit 1 is frozen now */
    int64_t numel[PLAN_UNITS][PLAN_PARAMS];
    const void *readable[PLAN_UNITS]; /* address that the unit's callback has got; NULL: none now */
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
/* Appends a forward of the units in `order`, and a backward in reverse. */
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
/* Returns a net of three layers, used as 0 0 1 1 2 2 0 1 2 0 1 2, and in reverse. */
H_FN plan_net plan_nested(void) {
    static const int order[12] = {0, 0, 1, 1, 2, 2, 0, 1, 2, 0, 1, 2};
    plan_net n = plan_chain(3, 16, 16);
    n.name = "nested";
    n.num_calls = 0;
    plan_visit(&n, order, 12);
    return n;
}

/* Returns a net whose last unit is visited twice in forward; its second backward stays open to
   the end. */
H_FN plan_net plan_open_again(int units) {
    plan_net n = plan_chain(units, 16, 16);
    n.num_calls = 0;
    for (int u = 0; u < units; u++) plan_pair(&n, u, 0);
    plan_pair(&n, units - 1, 0);
    plan_pair(&n, units - 1, 1);
    plan_call(&n, units - 1, FSDP_CALL_PRE_BACKWARD);
    for (int u = units - 2; u >= 0; u--) plan_pair(&n, u, 1);
    return n;
}

H_FN void plan_fill(void *user, const fsdp_param_view *v) {
    (void)user;
    for (int64_t k = 0; k < v->numel; k++) {
        uint64_t h = lab_hash(7, (uint64_t)v->ordinal, (uint64_t)fsdp_view_index(v, k), 3);
        lab_put(v->data, v->dtype, k, (double)(h % 2001) / 1000 - 1);
    }
}

/* ---- options of a net ------------------------------------------------------------------------ */

static sim *plan_sim;          /* the simulated device of this process, or NULL */
static int64_t plan_called[4]; /* all-reduce hooks, grad hooks, reductions, strings */

H_FN void plan_count(int what) { __atomic_add_fetch(&plan_called[what], 1, __ATOMIC_SEQ_CST); }
H_FN int64_t plan_counted(int what) { /* by all ranks of this process */
    return __atomic_load_n(&plan_called[what], __ATOMIC_SEQ_CST);
}

H_FN fsdp_status plan_sum_hook(void *user, fsdp_unit *unit, void *data, int64_t numel,
                               fsdp_dtype dtype, void *stream) {
    if (!plan_sim) lib_wait(stream);
    (void)user, (void)unit;
    plan_count(0);
    if (plan_sim)
        sim_called(plan_sim, stream, "hook", data, numel * (int64_t)fsdp_dtype_size(dtype), 1);
    for (int64_t k = 0; k < numel; k++) lab_put(data, dtype, k, lab_get(data, dtype, k) * 0.75);
    return FSDP_OK;
}
H_FN fsdp_status plan_grad_hook(void *user, const fsdp_param_view *v, void *stream) {
    if (!plan_sim) lib_wait(stream);
    (void)user;
    plan_count(1);
    if (plan_sim)
        sim_called(plan_sim, stream, "hook", v->shard,
                   v->numel * (int64_t)fsdp_dtype_size(v->dtype), 1);
    for (int64_t k = 0; k < v->numel; k++)
        lab_put(v->shard, v->dtype, k,
                lab_get(v->shard, v->dtype, k) - lab_get(v->shard_grad, v->grad_dtype, k) / 16);
    return FSDP_OK;
}
H_FN fsdp_status plan_custom(void *user, const fsdp_comm_ops *ops, fsdp_comm *comm,
                             const fsdp_coll *coll) {
    (void)user;
    if (coll->kind != FSDP_OP_ALL_GATHER) plan_count(2);
    return ops->run(comm, coll);
}
/* Two tensors per shard: the shard, and 8 bytes. */
H_FN int plan_sizes(void *user, int64_t numel, int64_t nbytes[FSDP_GATHER_TENSORS]) {
    (void)user;
    nbytes[0] = numel * (int64_t)sizeof(float);
    nbytes[1] = 8;
    return 2;
}
H_FN fsdp_status plan_pre(void *user, const fsdp_param_view *v, void *const *strings,
                          void *stream) {
    if (!plan_sim) lib_wait(stream);
    float *out = (float *)strings[0];
    (void)user;
    plan_count(3);
    if (plan_sim && v->numel)
        sim_called(plan_sim, stream, "pre", strings[0], v->numel * (int64_t)sizeof(float), 1);
    for (int64_t k = 0; k < v->numel; k++) out[k] = (float)(2 * lab_get(v->shard, v->dtype, k));
    memset(strings[1], 7, 8);
    return FSDP_OK;
}
H_FN fsdp_status plan_post(void *user, const fsdp_param_view *v, const void *const *gathered,
                           void *full, fsdp_dtype dtype, void *stream) {
    if (!plan_sim) lib_wait(stream);
    const float *in = (const float *)gathered[0];
    int64_t numel = lab_full_numel(v);
    (void)user;
    plan_count(3);
    CHECK_EQ_INT(((const unsigned char *)gathered[1])[7], 7);
    if (plan_sim) {
        sim_called(plan_sim, stream, "post", in, numel * (int64_t)sizeof(float), 0);
        sim_called(plan_sim, stream, "post", full, numel * (int64_t)fsdp_dtype_size(dtype), 1);
    }
    for (int64_t k = 0; k < numel; k++) lab_put(full, dtype, k, (double)in[k] / 2);
    return FSDP_OK;
}

H_FN void plan_set(plan_bed *b, fsdp_unit *u, int index) {
    int sets = b->net->sets;
    if (sets & PLAN_SUM_HOOK) CALL(b->w, fsdp_set_all_reduce_hook(u, plan_sum_hook, NULL));
    if (sets & PLAN_GRAD_HOOK)
        CALL(b->w, fsdp_set_post_accumulate_hook(u, 0, plan_grad_hook, NULL));
    if (sets & PLAN_CUSTOM && index % 2 == 0) {
        CALL(b->w, fsdp_set_custom_all_gather(u, plan_custom, NULL));
        CALL(b->w, fsdp_set_custom_reduce_scatter(u, plan_custom, NULL));
        CALL(b->w, fsdp_set_custom_all_reduce(u, plan_custom, NULL));
    }
    if (sets & PLAN_LISTS) {
        if (index + 1 < b->net->num_units)
            CALL(b->w, fsdp_set_modules_to_forward_prefetch(u, &b->unit[index + 1], 1));
        if (index > 0) CALL(b->w, fsdp_set_modules_to_backward_prefetch(u, &b->unit[index - 1], 1));
    }
    if (sets & PLAN_NO_RESHARD) CALL(b->w, fsdp_set_reshard_after_backward(b->model, u, 0));
    if (sets & PLAN_NO_UNSHARD) CALL(b->w, fsdp_set_unshard_in_backward(b->model, u, 0));
    if (sets & PLAN_SOME_USED) CALL(b->w, fsdp_set_reduce_scatter_unused_params(b->model, u, 1));
    if (sets & PLAN_NO_ALL_REDUCE) CALL(b->w, fsdp_set_requires_all_reduce(b->model, u, 0));
}

/* Checks that the callback of each unit knows the address of its parameters, in replays too. */
H_FN void plan_check_readable(const plan_bed *b) {
    for (int i = 0; i < b->net->num_units && !fsdp_world_status(b->w); i++) {
        const int is = fsdp_unit_storage(b->unit[i]) == FSDP_STORAGE_UNSHARDED;
        W_CHECK(b->readable[i] == (is ? fsdp_data(b->unit[i], 0) : NULL),
                "unit %d: storage %d, its callback has %s", i, (int)fsdp_unit_storage(b->unit[i]),
                b->readable[i] ? "an address" : "none");
    }
}
H_FN void plan_called_back(fsdp_unit *u, int readable, void *user) {
    plan_bed *b = (plan_bed *)user;
    int i = 0;
    while (b->unit[i] != u) i++;
    CHECK((b->readable[i] == NULL) == readable);
    if (!readable && !fsdp_world_status(b->w)) CHECK(fsdp_data(u, 0) == b->readable[i]);
    b->readable[i] = readable ? fsdp_data(u, 0) : NULL;
}

H_FN void plan_open(plan_bed *b, const plan_net *net, fsdp_world *w) {
    static const fsdp_gather_extension strings = {plan_sizes, plan_pre, plan_post, NULL};
    static __thread fsdp_mesh_info info;
    fsdp_model_desc md = net->model;
    memset(b, 0, sizeof *b);
    b->net = net, b->w = w;
    if (net->replicas) {
        fsdp_mesh *mesh = NULL;
        fsdp_mesh_desc d = FSDP_ZERO;
        int size = fsdp_world_size(w);
        d.ndim = 2, d.shape[0] = net->replicas, d.shape[1] = size / net->replicas;
        d.names[0] = "replicas", d.names[1] = "shards";
        CALL(w, fsdp_mesh_create(w, &d, &mesh));
        CALL(w, fsdp_mesh_info_init(
                    mesh, size == net->replicas ? FSDP_MESH_INFO_DDP : FSDP_MESH_INFO_HSDP,
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
            if (net->empty == u + 1) rows = 0;
            p[i] = net->rows[i][1] ? fsdp_mat(NULL, rows, net->rows[i][1]) : fsdp_vec(NULL, rows);
            p[i].frozen = net->frozen == i + 1 || net->frozen_unit == u + 1;
            p[i].dtype = net->dtypes[i];
            p[i].keep_dtype = net->keep[i];
            if (net->sets & PLAN_STRINGS && i == 0) p[i].extension = &strings;
            b->numel[u][i] = rows * (net->rows[i][1] ? net->rows[i][1] : 1);
        }
        ud.name = net->names ? net->names[u] : name;
        ud.params = p, ud.num_params = net->num_params;
        ud.reshard_after_forward = net->never == u + 1 ? FSDP_RESHARD_NEVER : net->reshard[u];
        CALL(w, fsdp_fully_shard(b->model, &ud, &b->unit[u]));
        CALL(w, fsdp_set_unit_callback(b->unit[u], plan_called_back, b));
    }
    CALL(w, fsdp_init_params(b->model, plan_fill, NULL));
    for (int u = 0; u < net->num_units && net->sets; u++) plan_set(b, b->unit[u], u);
}

/* Returns the dtype of gathered parameter i and of its gradient. */
H_FN fsdp_dtype plan_dtype(const plan_net *n, int i) {
    fsdp_dtype own = n->dtypes[i] ? n->dtypes[i] : FSDP_F32;
    return n->model.param_dtype && !n->keep[i] ? n->model.param_dtype : own;
}
H_FN void plan_read(const plan_bed *b, const void *ptr, int64_t nbytes) {
    if (b->s) sim_read(b->s, "the caller", ptr, nbytes);
}
H_FN void plan_write(const plan_bed *b, const void *ptr, int64_t nbytes) {
    if (b->s) sim_write(b->s, "the caller", ptr, nbytes);
}

/* Returns 1 if a parameter is unused. PLAN_UNUSED: only in one step, which is replayed, a unit
   has no used parameter. */
/* PLAN_UNUSED: only in one step, which is replayed, a unit has no parameter that is used. */
H_FN int plan_is_idle(const plan_bed *b, int unit, int param) {
    const uint64_t step = (uint64_t)b->step, at = (uint64_t)unit * PLAN_PARAMS + (uint64_t)param;
    if (b->net->sets & PLAN_SOME_USED)
        return lab_hash((uint64_t)fsdp_rank(b->w), step, at, 0) % 2 == 0;
    if (!(b->net->sets & PLAN_UNUSED)) return 0;
    return (step == 3 && unit == 1) || (param > 0 && lab_hash(step, at, 0, 0) % 2 == 0);
}
H_FN void plan_look(plan_bed *b, int unit, int call_index, int backward) {
    const plan_net *n = b->net;
    for (int i = 0; i < n->num_params; i++) {
        fsdp_dtype dtype = plan_dtype(n, i);
        int blind = backward && n->sets & PLAN_NO_UNSHARD;
        const void *data = blind ? NULL : fsdp_data(b->unit[unit], i);
        int64_t numel = b->numel[unit][i], bytes = numel * (int64_t)fsdp_dtype_size(dtype);
        CHECK(data || blind);
        if (data) plan_read(b, data, bytes);
        if (data) lab_fold_fast(&b->hash, data, (size_t)bytes);
        int idle = plan_is_idle(b, unit, i);
        void *grad = backward && !idle ? fsdp_grad(b->unit[unit], i) : NULL;
        CHECK(!backward || idle || b->freezes ||
              (grad == NULL) == (n->frozen == i + 1 || n->frozen_unit == unit + 1 ||
                                 (b->frozen_now && unit == 1 && i == 0)));
        if (grad) plan_write(b, grad, bytes);
        if (!grad) continue;
        double *value = lab_doubles(2 * numel), *sum = value + numel;
        if (data) lab_load(value, data, dtype, numel);
        lab_load(sum, grad, dtype, numel);
        for (int64_t k = 0; k < numel; k++) {
            uint64_t h = lab_hash((uint64_t)fsdp_rank(b->w), (uint64_t)b->step,
                                  (uint64_t)call_index * 16 + (uint64_t)i, (uint64_t)k);
            sum[k] += (blind ? 1 : value[k]) * ((double)(h % 17) - 8) / 64;
        }
        lab_store(grad, dtype, sum, numel);
        free(value);
    }
}

H_FN fsdp_status plan_hook(plan_bed *b, int unit, int call) {
    static fsdp_status (*const calls[])(fsdp_unit *) = {
        fsdp_pre_forward, fsdp_post_forward, fsdp_pre_backward, fsdp_post_backward,
        fsdp_unshard,     fsdp_wait,         fsdp_reshard};
    return calls[call](b->unit[unit]);
}

/* Runs calls [from, to) of a step. Adds gathered data to the hash after the pre_* calls and
   again before the post_* calls: nothing may write it in between. */
H_FN void plan_calls(plan_bed *b, int from, int to) {
    for (int i = from; i < to; i++) {
        int unit = b->net->calls[i].unit, call = b->net->calls[i].call;
        if (call == FSDP_CALL_POST_FORWARD) plan_look(b, unit, i, 0);
        if (call == FSDP_CALL_POST_BACKWARD) plan_look(b, unit, i, 1);
        CALL(b->w, plan_hook(b, unit, call));
        plan_check_readable(b);
        if (call == FSDP_CALL_PRE_FORWARD || call == FSDP_CALL_WAIT) plan_look(b, unit, i, 0);
        if (call == FSDP_CALL_PRE_BACKWARD) plan_look(b, unit, i, 1);
    }
}

/* Updates: returns a hash of the gradients, subtracts them from the shards, and zeroes them. */
H_FN uint64_t plan_update(plan_bed *b) {
    fsdp_param_view v = FSDP_ZERO;
    uint64_t grads = 1;
    while (fsdp_next_param(b->model, &v)) {
        int has = v.shard_grad != NULL;
        lab_fold(&grads, &has, sizeof has);
        W_CHECK(b->is_partial || b->net->sets & PLAN_UNUSED ||
                    (v.shard_grad != NULL) == v.requires_grad,
                "unit %s: %s", v.unit_name, fsdp_last_error(b->w));
        if (!v.shard_grad) continue;
        plan_read(b, v.shard_grad, v.numel * (int64_t)fsdp_dtype_size(v.grad_dtype));
        lab_fold_fast(&grads, v.shard_grad, (size_t)v.numel * fsdp_dtype_size(v.grad_dtype));
        if (b->rests) continue;
        plan_write(b, v.shard, v.numel * (int64_t)fsdp_dtype_size(v.dtype));
        for (int64_t k = 0; k < v.numel; k++)
            lab_put(v.shard, v.dtype, k,
                    lab_get(v.shard, v.dtype, k) - lab_get(v.shard_grad, v.grad_dtype, k) / 8);
        lab_fold(&b->hash, v.shard, (size_t)v.numel * fsdp_dtype_size(v.dtype));
        for (int64_t k = 0; k < v.numel; k++) { /* infinities and NaNs would compare nothing */
            double x = lab_get(v.shard, v.dtype, k);
            CHECK(x > -1e3 && x < 1e3);
        }
    }
    if (!b->rests) CALL(b->w, fsdp_params_changed(b->model));
    if (!b->keeps_grads) CALL(b->w, fsdp_zero_grad(b->model));
    return grads;
}

/* Ends a step after finalize: updates, and notes the results. */
H_FN void plan_step_end(plan_bed *b, plan_result *out) {
    int i = b->step;
    CHECK(i < PLAN_STEPS);
    out->grads[i] = plan_update(b);
    out->hash[i] = b->hash;
    CALL(b->w, fsdp_model_counters(b->model, &out->counters[i]));
    if (b->plan) {
        out->mode[i] = fsdp_plan_state(b->plan);
        snprintf(out->why[i], sizeof out->why[i], "%.159s", fsdp_plan_why(b->plan));
    }
    b->step++;
}

H_FN void plan_step(plan_bed *b, plan_result *out) {
    plan_calls(b, 0, b->net->num_calls);
    CALL(b->w, fsdp_finalize_backward(b->model));
    plan_check_readable(b);
    plan_step_end(b, out);
}

/* Returns the bytes of all slots, including those of plans. */
H_FN int64_t plan_slots(const fsdp_memory *m) {
    int64_t bytes = 0;
    for (int pool = FSDP_POOL_GATHER; pool <= FSDP_POOL_REDUCE_OUT; pool++)
        bytes += m->pool_bytes[pool];
    for (int pool = FSDP_POOL_COUNT; pool < (int)FSDP_POOL_MAX; pool++)
        bytes += m->pool_bytes[pool];
    return bytes;
}

H_FN void plan_train(fsdp_world *w, const plan_net *net, const fsdp_plan_desc *desc, int planned,
                     int steps, plan_result *out) {
    plan_bed b;
    memset(out, 0, sizeof *out);
    plan_open(&b, net, w);
    b.s = plan_sim;
    if (planned) CALL(w, fsdp_plan_create(b.model, desc, &b.plan));
    for (int i = 0; i < steps; i++) plan_step(&b, out);
    CALL(w, fsdp_model_memory(b.model, &out->memory));
    out->count = fsdp_plan_count(b.plan);
    if (out->count) CALL(w, fsdp_plan_report_get(b.plan, out->count - 1, &out->report));
    fsdp_model_destroy(b.model);
}
#endif
