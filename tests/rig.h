/* rig.h - a model of a root and layers on the simulated device of sim.h, and scripts of calls that
   it plays: see play(). The gathers, reductions and reshards are a text, as in PyTorch's tests.

       rig r;
       config c = {0};                      // 4 ranks, inline, a root and three layers
       rig_open(&r, &c);
       play(&r, FWD BWD ".");
       CHECK_EQ_STR(r.trace, ...);
       rig_close(&r);

   SPDX-License-Identifier: MIT */
#ifndef RIG_H
#define RIG_H
#include "lab.h"
#include "sim.h"

enum { MAX_UNITS = 12, TRACE = 4096 };
enum { ALWAYS = FSDP_RESHARD_ALWAYS, NEVER = FSDP_RESHARD_NEVER };

typedef struct {
    int world, async, unfused, comm_lanes; /* 0: 4, inline, fused, 2 */
    int layers;                            /* 0: 3 */
    int root, inner; /* reshard_after_forward; 0: NEVER for the root, ALWAYS */
    fsdp_dtype param, reduce;
    int debug;
    int64_t direct_min;
    int replicas, offload; /* HSDP of world/replicas x replicas */
    const char *names;     /* one letter for each unit; NULL: r, 0, 1, ... for the layers */
    int prefetch;          /* FSDP_PREFETCH_* */
} config;

typedef struct {
    sim s;
    config c;
    fsdp_model *model;
    fsdp_unit *units[MAX_UNITS]; /* the root, then the layers */
    int num_units;
    int show_reshard;
    uint8_t by_user[MAX_UNITS]; /* fsdp_unshard was called */
    uint8_t storage[MAX_UNITS]; /* as last seen */
    char trace[TRACE];
    int used;
} rig;

/* Appends an event to the trace: its name, its unit and the unit's training state. */
H_FN void say(rig *r, const char *what, const char *unit, const char *state) {
    int room = TRACE - r->used;
    r->used += snprintf(r->trace + r->used, (size_t)room, "%s%s%s%s", r->used ? " " : "", what,
                        unit, state);
    CHECK(r->used < TRACE);
}

/* Notes a reshard of each unit that has become sharded, or a slice, since the last look. */
H_FN void look(rig *r) {
    for (int i = 0; i < r->num_units; i++) {
        uint8_t now = (uint8_t)fsdp_unit_storage(r->units[i]), was = r->storage[i];
        int sharded = now == FSDP_STORAGE_SHARDED || now == FSDP_STORAGE_SHARDED_POST_FORWARD;
        if (r->show_reshard && sharded && was != now &&
            (was == FSDP_STORAGE_UNSHARDED || was == FSDP_STORAGE_IN_FLIGHT))
            say(r, "R", fsdp_unit_name(r->units[i]), "");
        r->storage[i] = now;
    }
}

/* Notes the events of upstream's tests: U all-gather, with the training state for which it is
   issued; P reduction. */
H_FN void observe(void *user, const fsdp_op *op) {
    static const char *const states[] = {":I", ":F", ":B", ":P"}; /* PRE_BACKWARD is upstream's B */
    rig *r = (rig *)user;
    look(r);
    if (op->kind == FSDP_OP_ALL_GATHER && op->label == FSDP_LABEL_GATHER)
        say(r, "U", op->what, states[op->state]);
    if (op->kind == FSDP_OP_REDUCE_SCATTER) say(r, "P", op->what, "");
}

/* Fills in a layer's parameters of each kind: direct, packed, uneven, along dim 1, empty,
   frozen. */
H_FN int mixed_params(fsdp_param_desc *p) {
    p[0] = fsdp_mat("w", 8, 16);
    p[1] = fsdp_vec("b", 5);
    p[2] = fsdp_mat("side", 3, 6);
    p[2].shard_dim = 1;
    p[3] = fsdp_mat("none", 0, 7);
    p[4] = fsdp_mat("still", 6, 3);
    p[4].frozen = 1;
    p[5] = fsdp_vec("one", 1);
    return 6;
}

H_FN void rig_open(rig *r, const config *c) {
    const char *const names = c->names ? c->names : "r0123456789";
    memset(r, 0, sizeof *r);
    r->c = *c;
    sim_init(&r->s, c->world ? c->world : 4, 0);
    r->s.rank = r->s.world_size - 1; /* the rank with empty and short shards */
    r->s.async = c->async;
    r->s.fused = !c->unfused;
    r->s.checks = 1;
    if (c->comm_lanes) r->s.comm_lanes = c->comm_lanes;
    CHECK(sim_open(&r->s));
    fsdp_model_desc md = FSDP_ZERO;
    md.param_dtype = c->param;
    md.reduce_dtype = c->reduce;
    md.debug = c->debug;
    md.direct_min = c->direct_min ? c->direct_min : 256;
    md.cpu_offload = c->offload;
    md.implicit_prefetch = c->prefetch;
    if (c->replicas > 1) md.mesh = lab_hsdp(r->s.world, c->replicas, r->s.world_size / c->replicas);
    CHECK_OK(fsdp_model_create(r->s.world, &md, &r->model));
    int count = c->names ? (int)strlen(names) : c->layers ? c->layers + 1 : 4;
    for (int i = 0; i < count; i++) {
        const char name[2] = {names[i], 0};
        fsdp_param_desc p[6];
        fsdp_unit_desc ud = FSDP_ZERO;
        ud.name = name;
        ud.params = p;
        ud.num_params = mixed_params(p);
        ud.reshard_after_forward = i == 0 ? (c->root ? c->root : NEVER) : c->inner;
        CHECK_OK(fsdp_fully_shard(r->model, &ud, &r->units[r->num_units++]));
    }
    r->s.on_op = observe;
    r->s.on_op_user = r;
    CHECK_OK(sim_watch(&r->s, r->model));
}

H_FN void rig_close(rig *r) {
    int64_t left = sim_close(&r->s);
    CHECK_MSG(r->s.races == 0, "%d races, first: %s", r->s.races, r->s.race);
    CHECK_EQ_INT(left, 0);
}

H_FN fsdp_unit *named(const rig *r, char name) {
    for (int i = 0; i < r->num_units; i++)
        if (fsdp_unit_name(r->units[i])[0] == name) return r->units[i];
    CHECK_MSG(0, "no unit %c", name);
    return NULL;
}

/* The caller's computation: reads the parameters, and in backward writes the gradients. */
H_FN void use_unit(rig *r, fsdp_unit *u, int backward) {
    fsdp_param_view v = FSDP_ZERO;
    for (int i = 0; fsdp_param_view_get(u, i, &v) == FSDP_OK; i++) {
        int64_t numel = lab_full_numel(&v);
        int64_t size = (int64_t)fsdp_dtype_size(r->c.param ? r->c.param : FSDP_F32);
        void *data = fsdp_data(u, i);
        CHECK(data);
        sim_read(&r->s, "layer", data, numel * size);
        if (backward && v.requires_grad) {
            sim_write(&r->s, "backward", fsdp_grad(u, i), numel * size);
            memset(fsdp_grad(u, i), 0x3f, (size_t)(numel * size)); /* 0.75 in f32 and in bf16 */
        }
        if (i == fsdp_num_params(r->model) / r->num_units - 1) break;
    }
}

/* The caller's own optimizer: waits for the gathers that the caller started, reads all
   gradients, and writes all shards. */
H_FN void optimize(rig *r) {
    fsdp_flat flat = FSDP_ZERO;
    for (int i = 0; i < r->num_units; i++)
        if (r->by_user[i]) CHECK_OK(fsdp_wait(r->units[i]));
    memset(r->by_user, 0, sizeof r->by_user);
    CHECK_OK(fsdp_model_flat(r->model, FSDP_F32, &flat));
    int actor = r->c.offload ? SIM_HOST : sim_caller(&r->s); /* offloaded: in host memory */
    sim_work(&r->s, actor, 0, 0);
    sim_touch(&r->s, actor, "optimizer", flat.grads, flat.numel * 4, 0);
    sim_touch(&r->s, actor, "optimizer", flat.shards, flat.numel * 4, 1);
    CHECK_OK(fsdp_params_changed(r->model));
}

H_FN uint64_t ops_of(const rig *r, int kind) {
    fsdp_counters c = FSDP_ZERO;
    CHECK_OK(fsdp_model_counters(r->model, &c));
    return c.calls[kind];
}

/* Finalizes; the host reads offloaded gradients. */
H_FN void finalize(rig *r) {
    fsdp_flat flat = FSDP_ZERO;
    CHECK_OK(fsdp_finalize_backward(r->model));
    CHECK_OK(fsdp_model_flat(r->model, FSDP_F32, &flat));
    if (r->c.offload) sim_touch(&r->s, SIM_HOST, "finalize", flat.grads, flat.numel * 4, 0);
}

/* Runs a script:
   (x )x  pre_ and post_forward of unit x (r, 0, 1, ...)      [x ]x  pre_ and post_backward
   ux wx sx  unshard, wait, reshard                           .      finalize, and the host reads
   g+ g-  grad enabled         y+ y-  gradient sync           l+ l-  is_last_backward
   k+ k-  reshard_after_backward      a+ a-  requires_all_reduce
   o optimizer step        c clip         n clip, no norm     z zero_grad
   spaces mean nothing */
H_FN void play(rig *r, const char *script) {
    double norm;
    for (const char *at = script; *at; at++) {
        char call = *at;
        if (call == ' ') continue;
        if (strchr(".ocnz", call)) {
            if (call == '.') finalize(r);
            if (call == 'o') optimize(r);
            if (call == 'c') {
                CHECK_OK(fsdp_clip_grad_norm(r->model, 1.0, &norm));
                int n = r->s.num_ops - 1; /* the op that writes the norm */
                while (n >= 0 && r->s.ops[n].kind != FSDP_OP_NORM) n--;
                CHECK(n >= 0);
                sim_touch(&r->s, SIM_HOST, "clip", r->s.ops[n].dst_ptr, 8, 0);
            }
            if (call == 'n') CHECK_OK(fsdp_clip_grad_norm(r->model, 1.0, NULL));
            if (call == 'z') CHECK_OK(fsdp_zero_grad(r->model));
            look(r);
            continue;
        }
        char what = *++at;
        CHECK_MSG(what, "script ends after %c", call);
        int on = what == '+';
        fsdp_unit *u = strchr("gylka", call) ? NULL : named(r, what);
        switch (call) {
        case '(':
            CHECK_OK(fsdp_pre_forward(u));
            use_unit(r, u, 0);
            break;
        case ')':
            use_unit(r, u, 0);
            CHECK_OK(fsdp_post_forward(u));
            break;
        case '[':
            CHECK_OK(fsdp_pre_backward(u));
            use_unit(r, u, 1);
            break;
        case ']':
            use_unit(r, u, 1);
            CHECK_OK(fsdp_post_backward(u));
            break;
        case 'u':
            CHECK_OK(fsdp_unshard(u));
            for (int i = 0; i < r->num_units; i++) r->by_user[i] |= r->units[i] == u;
            break;
        case 'w': CHECK_OK(fsdp_wait(u)); break;
        case 's': CHECK_OK(fsdp_reshard(u)); break;
        case 'g': CHECK_OK(fsdp_set_grad_enabled(r->model, on)); break;
        case 'y': CHECK_OK(fsdp_set_requires_gradient_sync(r->model, NULL, on)); break;
        case 'l': CHECK_OK(fsdp_set_is_last_backward(r->model, on)); break;
        case 'k': CHECK_OK(fsdp_set_reshard_after_backward(r->model, NULL, on)); break;
        case 'a': CHECK_OK(fsdp_set_requires_all_reduce(r->model, NULL, on)); break;
        default: CHECK_MSG(0, "no such call: %c", call);
        }
        look(r);
    }
}

#define FWD  "(r (0 )0 (1 )1 (2 )2 )r"
#define BWD  "[r [2 ]2 [1 ]1 [0 ]0 ]r"
#define FWD4 "(r (0 )0 (1 )1 (2 )2 (3 )3 )r"
#define BWD4 "[r [3 ]3 [2 ]2 [1 ]1 [0 ]0 ]r"
#define UF   "Ur:F U0:F U1:F U2:F"
#endif
