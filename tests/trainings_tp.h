/* trainings_tp.h - trainings that tests with upstream's names share, with tensor parallelism of
   fsdp_dtensor.h in addition: PyTorch's stack of MLPs. Include it after trainings.h.

   SPDX-License-Identifier: MIT */
#ifndef TRAININGS_TP_H
#define TRAININGS_TP_H
#include "lab_bed.h"

/* ---- a rank ---------------------------------------------------------------------------------- */

enum { TP = 2, TP_WAYS = 4 };

/* State of a rank in addition to fs_run. */
typedef struct tp_own {
    bed on; /* its model is x->model */
    fsdp_redistribution *way[TP_WAYS];
    float *part[2];
} tp_own;

FS_FN tp_own *tp_of(const fs_run *x) { return (tp_own *)x->own; }

/* Returns the spec of the rows of all data-parallel ranks, which mesh dims shard from left to
   right. Mesh dim `m` has placement `kind`. */
FS_FN fsdp_spec tp_rows(const fs_run *x, const bed *on, int m, int kind) {
    const int tp = fsdp_mesh_dim(on->mesh, "tp");
    const int64_t tensor[2] = {x->net->batch * x->size, x->net->in};
    fsdp_placement place[DIMS];
    fsdp_spec s;
    memset(place, 0, sizeof place);
    for (int k = 0; k < on->ndim; k++) {
        place[k].kind = (int8_t)(k == m ? kind : k == tp ? FSDP_REPLICATE : FSDP_SHARD);
        if (place[k].kind == FSDP_SHARD) place[k].order = (int8_t)(k - (tp >= 0 && tp < k));
    }
    CHECK_OK(fsdp_spec_init(&s, on->ndim, on->shape, place, FSDP_F32, 2, tensor));
    return s;
}
FS_FN fsdp_redistribution *tp_way(const fs_run *x, const bed *on, const char *name, fsdp_spec from,
                                  fsdp_spec to) {
    fsdp_redistribution_desc d = FSDP_ZERO;
    fsdp_redistribution *r = NULL;
    d.name = name, d.from = from, d.to = to;
    CALL(x->world, fsdp_redistribution_create(on->dm, &d, &r));
    return r;
}
/* Redistributes activations: doubles, sent as f32. */
FS_FN void tp_move(const fs_run *x, int way, double *to, int64_t out, const double *from,
                   int64_t in) {
    const tp_own *own = tp_of(x);
    float *const dst = own->part[out != in];
    lab_store(own->part[0], FSDP_F32, from, in);
    CALL(x->world, fsdp_redistribute(own->way[way], dst, own->part[0]));
    lab_settle(x->world, x->model);
    lab_load(to, dst, FSDP_F32, out);
}

/* ---- the net --------------------------------------------------------------------------------- */

/* MLPs: a linear sharded by rows over tp, a relu, a linear sharded by columns, whose bias is
   replicated, and a relu. These biases are unit 0, which is open around the others. */
enum { TP_MLPS = 3, TP_ROWS_END = 3, TP_LAYERS = 5 };
static const int64_t tp_widths[TP_MLPS] TR_CONST = {3, 4, 3}; /* times the dim */

/* Makes the part of a rank. avoids: FSDP shards the first linear along the dim that tp does not
   shard. */
FS_FN void tp_net(fs_net *net, int64_t d, int mlps, int avoids, int ranks, int place) {
    fs_net_begin(net, mlps == TP_MLPS ? 8 : 2, d);
    net->around = 1;
    net->seed += 5; /* with other seeds relus of dim 3 are zero from the start */
    fs_unit_add(net, "row biases");
    for (int u = 0; u < mlps; u++) fs_param_add(net, 0, d, 0, 0);
    for (int u = 0; u < mlps; u++) {
        fsdp_range mine;
        const int unit = fs_unit_add(net, "mlp");
        const int64_t wide = (mlps == TP_MLPS ? tp_widths[u] : 4) * d;
        CHECK_OK(fsdp_shard_range(wide, ranks, place, &mine));
        fs_linear(net, unit, d, mine.count);
        net->units[unit].params[0].shard_dim = avoids;
        fs_relu(net);
        fs_layer_add(net, FS_UNEMBED, unit, fs_param_add(net, unit, d, mine.count, 0), mine.count,
                     d);
        fs_layer_add(net, FS_BIAS, 0, u, d, d);
        fs_relu(net);
    }
}

enum { TP_SUM, TP_SUM_BACK };
FS_FN void tp_sum(const fs_run *x, int way, double *a) {
    const int64_t count = x->net->batch * x->net->in;
    if (x->model) tp_move(x, way, a, count, a, count);
}
FS_FN void tp_forward(fs_run *x, fs_tape *t, int u) {
    const int at = TP_LAYERS * u;
    fs_pre_forward(x, 1 + u);
    fs_layers_forward(x, t, 1 + u, at, at + TP_ROWS_END);
    tp_sum(x, TP_SUM, t->in[at + TP_ROWS_END]);
    fs_layers_forward(x, t, 0, at + TP_ROWS_END, at + TP_LAYERS);
    fs_post_forward(x, 1 + u);
}
/* Runs a microbatch. The first input needs no gradient. */
FS_FN double tp_micro(fs_run *x, int it, int m) {
    fs_tape *t = &x->tape[0];
    (void)it, (void)m;
    fs_feed(x, t);
    fs_pre_forward(x, 0);
    for (int u = 0; u + 1 < x->net->count; u++) {
        tp_forward(x, t, u);
        if (x->c->ac) fs_forget(x, t, TP_LAYERS * u, TP_LAYERS * (u + 1));
    }
    fs_post_forward(x, 0);
    double loss = fs_loss(x, t, 1);
    fs_pre_backward(x, 0);
    for (int u = x->net->count - 2; u >= 0; u--) {
        fs_pre_backward(x, 1 + u);
        if (x->c->ac) tp_forward(x, t, u);
        fs_layers_backward(x, t, TP_LAYERS * u, TP_LAYERS * (u + 1));
        if (u) tp_sum(x, TP_SUM_BACK, x->dx);
        fs_post_backward(x, 1 + u);
    }
    fs_post_backward(x, 0);
    return loss;
}

/* ---- a rank of a mesh ------------------------------------------------------------------------ */

/* The last dim is tp, unless no_tp. Each position of the dims before `first` has its own
   training. */
typedef struct {
    fs_net local[TP];
    const char *name;
    int ndim, shape[3], first, shard, replicate; /* shard, replicate: -1: there is none */
    const char *names[3];
    int no_tp, mlps;                    /* mlps 0: three */
    int raf;                            /* 0: several */
    fsdp_mesh *(*merge)(fsdp_world *w); /* makes the mesh, from one with more dims; or NULL */
} parallel;

FS_FN int tp_size(const parallel *p) { return p->no_tp ? 1 : p->shape[p->ndim - 1]; }

FS_FN void tp_locate(fs_run *x) {
    const parallel *p = (const parallel *)x->c->user;
    tp_own *own = (tp_own *)lab_zeros(1, sizeof *own);
    int32_t shape[3], inner[3], n = 0;
    for (int m = 0; m < p->ndim; m++) shape[m] = p->shape[m];
    for (int m = p->first; m < p->ndim; m++) inner[n++] = m;
    fsdp_mesh *all = p->merge ? p->merge(x->world)
                              : lab_mesh(x->world, p->ndim, shape, p->names, NULL);
    x->mesh = all;
    if (p->first) CALL(x->world, fsdp_mesh_slice(all, inner, n, &x->mesh));
    bed_locate(&own->on, x->world, x->mesh);
    for (int m = 0; m < n; m++) CHECK_EQ_INT(own->on.shape[m], p->shape[p->first + m]);
    const int kind = p->shard < 0       ? FSDP_MESH_INFO_DDP
                     : p->replicate < 0 ? FSDP_MESH_INFO_FSDP
                                        : FSDP_MESH_INFO_HSDP;
    CALL(x->world, fsdp_mesh_info_init(all, kind, p->shard, p->replicate, &x->info));
    x->rank = 0;
    for (int m = 0; m < n - !p->no_tp; m++) x->rank = x->rank * own->on.shape[m] + own->on.coord[m];
    x->net = &p->local[p->no_tp ? 0 : own->on.coord[n - 1]];
    x->own = own;
}

/* Makes a unit with the shapes of full tensors. */
FS_FN void tp_make_unit(fs_run *x, int unit, const fsdp_placement *tp, int raf) {
    const fs_unit *whole = &x->whole->units[unit];
    fsdp_param_desc d[FS_PARAMS];
    fsdp_tp_unit_desc ud = FSDP_ZERO;
    for (int p = 0; p < whole->count; p++) {
        d[p] = fs_param_desc_of(x, unit, p);
        memcpy(d[p].shape, whole->params[p].shape, sizeof whole->params[p].shape);
    }
    ud.unit.name = whole->name, ud.unit.params = d, ud.unit.num_params = whole->count, ud.tp = tp;
    ud.unit.reshard_after_forward = raf, ud.unit.user = (void *)(intptr_t)unit;
    CALL(x->world, fsdp_tp_fully_shard(x->dm, &ud, &x->unit[unit]));
}

FS_FN void tp_alloc(const fs_run *x, const bed *on, int64_t count) {
    for (int i = 0; i < 2; i++)
        CALL(x->world,
             fsdp_dmesh_alloc(on->dm, count * (int64_t)sizeof(float), (void **)&tp_of(x)->part[i]));
}

static const fsdp_placement tp_cuts[3] TR_CONST = {
    {FSDP_SHARD, 0, 0, 0}, {FSDP_SHARD, 0, 0, 0}, {FSDP_SHARD, 1, 0, 0}};

FS_FN void tp_make(fs_run *x) {
    static const fsdp_placement whole[TP_MLPS] = {
        {FSDP_REPLICATE, 0, 0, 0}, {FSDP_REPLICATE, 0, 0, 0}, {FSDP_REPLICATE, 0, 0, 0}};
    tp_own *own = tp_of(x);
    bed *on = &own->on;
    const int tp = fsdp_mesh_dim(on->mesh, "tp");
    on->model = x->model;
    bed_renew(on);
    x->dm = on->dm;
    for (int u = 0; u < x->whole->count; u++)
        tp_make_unit(x, u, u && tp >= 0 ? tp_cuts : whole, u ? 0 : FSDP_RESHARD_NEVER);
    const fsdp_spec adds = tp_rows(x, on, tp, FSDP_PARTIAL),
                    all = tp_rows(x, on, tp, FSDP_REPLICATE);
    own->way[TP_SUM] = tp_way(x, on, "row-parallel out", adds, all);
    own->way[TP_SUM_BACK] = tp_way(x, on, "column-parallel in, backward", adds, all);
    tp_alloc(x, on, x->net->batch * x->net->in);
}

/* ---- checks ---------------------------------------------------------------------------------- */

/* Checks that each shard is at the position of tensor parallelism and then FSDP, on a mesh with
   these dims; and that ranks with replicas have equal data. */
FS_FN void tp_placed(fs_run *x) {
    const bed *on = &tp_of(x)->on;
    const int tp = fsdp_mesh_dim(on->mesh, "tp");
    int shard = fsdp_mesh_dim(on->mesh, "dp_shard");
    fsdp_param_view v = FSDP_ZERO;
    if (shard < 0) shard = fsdp_mesh_dim(on->mesh, "dp");
    while (fsdp_next_param(x->model, &v)) {
        const int u = fs_view_unit(&v), p = fs_view_param(&v);
        const fs_param *q = &x->whole->units[u].params[p];
        const fsdp_param_view whole = fs_whole_view(x, &v);
        fsdp_placement place[DIMS];
        fsdp_spec s;
        fsdp_local l;
        memset(place, 0, sizeof place);
        if (u && tp >= 0) place[tp] = tp_cuts[p];
        if (shard >= 0) place[shard].kind = FSDP_SHARD, place[shard].dim = (int8_t)q->shard_dim;
        if (shard >= 0) place[shard].order = u && tp >= 0 && tp_cuts[p].dim == q->shard_dim;
        CHECK_OK(fsdp_spec_init(&s, on->ndim, on->shape, place, FSDP_F32, q->ndim, q->shape));
        CHECK_OK(fsdp_spec_local(&s, on->coord, &l));
        CHECK_EQ_INT(whole.numel, l.numel);
        for (int d = 0; d < q->ndim; d++) {
            CHECK_EQ_INT(whole.shape[d], q->shape[d]);
            if (l.numel) CHECK_EQ_INT(whole.start[d], l.start[d]);
            if (l.numel) CHECK_EQ_INT(whole.local_shape[d], l.shape[d]);
        }
        CALL(x->world, fsdp_dtensor_check(x->dm, &s, v.shard, "a parameter"));
    }
}

/* Checks the tensors gathered over FSDP and tensor parallelism. it -1: before the first
   iteration. */
FS_FN void tp_gathered(fs_run *x, int it) {
    for (int u = 0; u < x->whole->count; u++)
        for (int p = 0; p < x->whole->units[u].count; p++) {
            const fs_param *q = &x->whole->units[u].params[p];
            float *full = (float *)lab_zeros((size_t)q->numel, sizeof *full);
            CALL(x->world, fsdp_tp_param_full(x->dm, x->unit[u], p, 0, full));
            for (int64_t e = 0; e < q->numel; e++) {
                if (it < 0) CHECK(lab_same((double)full[e], fs_initial(x->whole, u, p, e)));
                else
                    fs_check_near(x, "gathered parameter", u, p, e, (double)full[e],
                                  x->story->param[it][q->at + e]);
            }
            free(full);
        }
}
FS_FN void tp_build(fs_run *x) {
    tp_placed(x);
    tp_gathered(x, -1);
    tp_of(x)->on.label = fsdp_label_register(x->model, "activation");
    fs_watch(x);
}
/* Checks the all-reduces of activations in a step; DDP gathers nothing. */
FS_FN void tp_after(fs_run *x, int it, int m) {
    const int mlps = x->whole->count - 1;
    const int sums = tp_size((const parallel *)x->c->user) > 1
                         ? (1 + (x->c->ac > 0)) * mlps + mlps - 1
                         : 0;
    (void)it, (void)m;
    CHECK_EQ_INT(fs_seen(x, -1, tp_of(x)->on.label, -1), sums);
    CHECK_EQ_INT(fs_seen(x, FSDP_OP_ALL_REDUCE, tp_of(x)->on.label, -1), sums);
    if (x->c->shards == 1) CHECK_EQ_INT(fs_seen(x, FSDP_OP_ALL_GATHER, FSDP_LABEL_GATHER, -1), 0);
}
FS_FN void tp_end(fs_run *x, int it) {
    x->log.num = 0;
    if (it + 1 < x->c->iters) return;
    tp_gathered(x, it);
    tp_placed(x);
    free(x->own);
    x->own = NULL;
}

/* Trains one net for `iters` iterations; all reshard modes and recomputes share the reference. */
FS_FN void tp_train(parallel *p, int64_t d, int iters) {
    static fs_net net;
    const int mlps = p->mlps ? p->mlps : TP_MLPS, avoids = p->mlps && !p->no_tp;
    const int shards = p->shard < 0 ? 1 : p->shape[p->shard];
    tp_net(&net, d, mlps, avoids, 1, 0);
    for (int place = 0; place < tp_size(p); place++)
        tp_net(&p->local[place], d, mlps, avoids, tp_size(p), place);
    fs_conf c = fs_conf_of(&net, p->replicate < 0 ? 1 : p->shape[p->replicate], shards);
    c.name = p->name ? p->name : "", c.threads = 1;
    for (int k = 0; k < p->ndim; k++) c.threads *= p->shape[k];
    c.locate = tp_locate, c.make = tp_make, c.micro = tp_micro, c.user = p;
    c.build = tp_build, c.after = tp_after, c.end = tp_end;
    c.rtol = c.atol =
        1e-5; /* partial sums are rounded before they are added; Adam amplifies that */
    c.iters = iters;
    fs_story *s = fs_tell(&c);
    for (int k = shards > 1 && !p->raf ? 0 : 2; k < 4; k++) {
        c.raf = p->raf ? p->raf : k & 1 || shards == 1 ? NEVER : ALWAYS;
        c.ac = shards > 1 && !p->raf ? k >> 1 : k & 1;
        fs_train_and_compare(&c, s);
    }
    fs_story_free(s, &c);
}
FS_FN void train_tp_and_compare(parallel *p) {
    static const int64_t dims[] = {3, 5, 16, 17};
    for (size_t i = 0; i < COUNT(dims); i++) tp_train(p, dims[i], W_SLOW ? 3 : FS_ITERS);
}
#endif
