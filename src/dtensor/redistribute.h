/* dtensor/redistribute.h - a route on data: copies and collectives

   Makes and runs fsdp_redistribution. For each step of the route it has the layout of parts in the
   collective: a part is contiguous and row-major, at the beginning of its `count` elements; no rank
   reads the elements after it. So a gather needs no copy before it. It needs no copy after it
   either if the parts in order are the result: cut along dim 0, or with dims of length 1 before the
   cut dim.
   State: fsdp_redistribution.
   Callers: programs and units.h (fsdpi_dt_bytes_of).

   A part of fsdp_dtensor.h. SPDX-License-Identifier: MIT (full text at the end of fsdp.h) */
#ifndef FSDP_DTENSOR_H
#include "../../fsdp_dtensor.h"
#endif
#ifndef FSDPI_DTENSOR_REDISTRIBUTE_H
#define FSDPI_DTENSOR_REDISTRIBUTE_H

#include "../base/hash.h"
#include "mesh.h"
#include "route.h"
#include "spec.h"

#include <stdio.h>
#include <string.h>

static int64_t fsdpi_dt_bytes_of(fsdp_dtype dtype) { return (int64_t)fsdp_dtype_size(dtype); }

/* -------------------------------------------------------------------------------------------- */
// The layout of parts.

// Returns 1 if a spec is for a mesh of dm's shape.
static int fsdpi_dt_is_on(const fsdp_dmesh *dm, const fsdp_spec *s) {
    return s->mesh_ndim == dm->ndim &&
           memcmp(s->mesh_shape, dm->shape, (size_t)dm->ndim * sizeof *dm->shape) == 0;
}

// Returns the length of a dim of this rank's part in a spec, without the cut of mesh dim `without`.
static int64_t fsdpi_dt_cut_rows(const fsdp_dmesh *dm, const fsdp_spec *s, int dim, int without) {
    fsdp_range range = {0, s->shape[dim], 0};
    int m;
    for (int order = 0; (m = fsdpi_dt_cut_at(s, dim, order)) >= 0; order++)
        if (m != without) (void)fsdp_shard_range(range.count, dm->shape[m], dm->coord[m], &range);
    return range.count;
}

// Returns the product of the dims after `dim`. fsdpi_dt_outer_of multiplies those before it.
static int64_t fsdpi_dt_inner(int ndim, const int64_t *shape, int dim) {
    return fsdpi_dt_numel(ndim - dim - 1, shape + dim + 1);
}
static int64_t fsdpi_dt_outer_of(const int64_t *shape, int dim) {
    return fsdpi_dt_numel(dim, shape);
}

// Adds a copy of the rows that rank k of n has of a tensor's dim: from the tensor to element `at`
// of the pieces, or back.
static void fsdpi_dt_piece(fsdpi_dt_copy *copy, int back, int ndim, const int64_t *shape, int dim,
                           int n, int k, int64_t at) {
    int64_t inner = fsdpi_dt_inner(ndim, shape, dim), height = fsdpi_dt_outer_of(shape, dim);
    fsdp_range r = {0, 0, 0};
    (void)fsdp_shard_range(shape[dim], n, k, &r);
    int64_t tensor = r.start * inner, width = r.count * inner, row = shape[dim] * inner;
    fsdp_block to = {tensor, at, width, height, row, width};
    fsdp_block from = {at, tensor, width, height, width, row};
    if (!width || !height) return;
    copy->blocks[copy->num++] = back ? from : to;
    copy->count += width * height;
}

// Adds copies of the pieces of all ranks, each at a multiple of `count` elements. Returns 1 if no
// copy is needed: the pieces in this order are the tensor.
static int fsdpi_dt_all_pieces(fsdpi_dt_copy *copy, int back, int ndim, const int64_t *shape,
                               int dim, int n, int64_t count) {
    for (int k = 0; k < n; k++) fsdpi_dt_piece(copy, back, ndim, shape, dim, n, k, k * count);
    return fsdpi_dt_outer_of(shape, dim) == 1 &&
           fsdpi_dt_ceil(shape[dim], n) * fsdpi_dt_inner(ndim, shape, dim) == count;
}

/* Computes a step on mesh dim m, which cuts tensor dim j instead of i. s: the spec before the
   step, changed to the one after it. `wide`: the shape of this rank's part without m's cuts. */
static void fsdpi_dt_lay(const fsdp_redistribution *r, fsdp_spec *s, const fsdp_step *step,
                         fsdpi_dt_stage *st) {
    const fsdp_dmesh *dm = r->dm;
    int m = step->mesh_dim, n = dm->shape[m], me = dm->coord[m], ndim = s->ndim;
    int i = step->from.kind == FSDP_SHARD ? step->from.dim : -1;
    int j = step->to.kind == FSDP_SHARD ? step->to.dim : -1;
    int64_t wide[FSDP_MAX_DIMS], in[FSDP_MAX_DIMS], out[FSDP_MAX_DIMS];
    fsdp_range mine = {0, 0, 0};
    st->kind = step->kind, st->mesh_dim = m, st->redop = s->place[m].op, st->factor = 1;
    st->is_packed = st->is_whole = 1;
    for (int d = 0; d < ndim; d++) {
        in[d] = out[d] = wide[d] = fsdpi_dt_cut_rows(dm, s, d, m);
        (void)fsdp_shard_range(wide[d], n, me, &mine);
        if (d == i) in[d] = mine.count;
        if (d == j) out[d] = mine.count;
        wide[d] = d == i || d == j ? fsdpi_dt_ceil(wide[d], n) : wide[d];
    }
    int64_t count = fsdpi_dt_numel(ndim, wide); // elements of the largest piece
    st->in = fsdpi_dt_numel(ndim, in), st->out = fsdpi_dt_numel(ndim, out);
    switch (st->kind) {
    case FSDP_STEP_SLICE: fsdpi_dt_piece(&st->before, 0, ndim, in, j, n, me, 0); break;
    case FSDP_STEP_PAD: fsdpi_dt_piece(&st->before, 1, ndim, out, i, n, me, 0); break;
    case FSDP_STEP_OWN: st->keeps = step->to.op != FSDP_SUM || me == 0; break;
    default:
        if (j >= 0) st->is_packed = fsdpi_dt_all_pieces(&st->before, 0, ndim, in, j, n, count);
        if (i >= 0) st->is_whole = fsdpi_dt_all_pieces(&st->behind, 1, ndim, out, i, n, count);
        st->seg.count = count;
        if (i < 0 && st->redop == FSDP_AVG) st->factor = 1.0 / n;
    }
    st->reads = j >= 0 ? n * count : count;
    st->writes = i >= 0 ? n * count : count;
    s->place[m] = step->to;
}

// Removes the cut of a mesh dim of one rank: it cuts nothing, and routes do not count its order.
static void fsdpi_dt_uncut(fsdp_spec *s, int m) {
    const fsdp_placement was = s->place[m];
    memset(&s->place[m], 0, sizeof was);
    for (int i = 0; i < s->mesh_ndim && was.kind == FSDP_SHARD; i++)
        if (fsdpi_dt_cuts(&s->place[i], was.dim) && s->place[i].order > was.order)
            s->place[i].order--;
}

// Computes parts and stages for the sizes in r->from.
static void fsdpi_dt_lay_all(fsdp_redistribution *r) {
    const fsdp_dmesh *dm = r->dm;
    fsdp_spec s = r->from;
    fsdp_block *blocks = r->blocks;
    (void)fsdp_spec_local(&r->from, dm->coord, &r->part[0]);
    (void)fsdp_spec_local(&r->to, dm->coord, &r->part[1]);
    for (int m = 0; m < dm->ndim; m++) // routes skip dims of one rank
        if (dm->shape[m] == 1) fsdpi_dt_uncut(&s, m);
    r->all_in_place = 1;
    for (int k = 0; k < r->route.num_steps; k++) {
        fsdpi_dt_stage *st = &r->stages[k];
        int n = dm->shape[r->route.steps[k].mesh_dim];
        memset(st, 0, sizeof *st);
        st->before.blocks = blocks, st->behind.blocks = blocks + n;
        blocks += 2 * n;
        fsdpi_dt_lay(r, &s, &r->route.steps[k], st);
        r->all_in_place &= st->kind == FSDP_STEP_ALL_REDUCE;
    }
}

/* -------------------------------------------------------------------------------------------- */
// Creation and destruction.

// Checks a spec as fsdpi_dt_known does. A failure is reported in `w`.
static fsdp_status fsdpi_dt_known_in(fsdp_world *w, const char *call, const fsdp_spec *spec) {
    fsdpi_dt_world = w;
    const fsdp_status status = fsdpi_dt_known(call, spec);
    fsdpi_dt_world = NULL;
    return status;
}

static fsdp_status fsdpi_dt_check_desc(const fsdp_dmesh *dm, const fsdp_redistribution_desc *d) {
    const char *why = NULL;
    int avg = 0, extreme = 0, whole = !fsdp_dtype_is_float(d->from.dtype);
    fsdp_status status = fsdpi_dt_known_in(dm->world, "redistribution_create", &d->from);
    if (!status) status = fsdpi_dt_known_in(dm->world, "redistribution_create", &d->to);
    if (status) return status;
    for (int m = 0; m < d->from.mesh_ndim; m++) {
        const fsdp_placement *p = &d->to.place[m]; // has partial values of `from`
        avg |= d->from.place[m].kind == FSDP_PARTIAL && d->from.place[m].op == FSDP_AVG;
        extreme |= p->kind == FSDP_PARTIAL && (p->op == FSDP_MAX || p->op == FSDP_MIN);
    }
    if (!fsdpi_dt_is_on(dm, &d->from))
        why = "its specs are of a mesh of another shape: make them with the shape of dm's mesh";
    else if (d->name && strlen(d->name) >= FSDPI_DT_NAME) why = "its name has more than 63 bytes";
    else if (d->comm_dtype && (whole || !fsdp_dtype_is_float(d->comm_dtype)))
        why = "comm_dtype is for tensors of a floating dtype, and is one";
    else if (whole && (avg || d->scale != 0))
        why = "integers have neither a scale nor addends of AVG: use SUM, and divide yourself";
    else if (!(d->scale - d->scale == 0)) why = "scale is not finite: pass 0 for 1";
    else if (d->scale < 0 && extreme)
        why = "a negative scale turns addends of MAX into those of MIN: reduce them first";
    if (!why) return FSDP_OK;
    return fsdp_fail(dm->world, FSDP_ERR_INVALID_ARG, "[E011] redistribution_create: '%.63s': %s",
                     d->name ? d->name : "redistribute", why);
}

static int fsdpi_dt_same(const fsdp_spec *a, const fsdp_spec *b) {
    return memcmp(a, b, sizeof *a) == 0;
}

// Hashes all that ranks must agree on, with the current sizes: other sizes may give the same number
// of elements.
static void fsdpi_dt_set_hash(fsdp_redistribution *r) {
    r->hash = fsdpi_hash_bytes(2, r->name, strlen(r->name));
    r->hash = fsdpi_hash_bytes(r->hash, &r->from, sizeof r->from);
    r->hash = fsdpi_hash_bytes(r->hash, &r->to, sizeof r->to);
    r->hash = fsdpi_hash_bytes(r->hash, &r->scale, sizeof r->scale);
    r->hash = fsdpi_hash(r->hash, (uint64_t)r->desc_dtype);
}

// Reuses the route of an earlier redistribution between equal specs, or finds a new one.
static fsdp_status fsdpi_dt_find_route(fsdp_redistribution *r) {
    fsdp_dmesh *dm = r->dm;
    for (const fsdp_redistribution *at = dm->redistributions; at; at = at->next)
        if (fsdpi_dt_same(&at->first_from, &r->from) && fsdpi_dt_same(&at->first_to, &r->to)) {
            r->route = at->route;
            return FSDP_OK;
        }
    fsdpi_dt_world = dm->world;
    fsdp_status status = fsdp_route_find(&r->from, &r->to, &dm->links, dm->scratch,
                                         FSDP_ROUTE_SCRATCH, &r->route);
    fsdpi_dt_world = NULL;
    dm->routes += !status && r->route.num_steps > 0;
    return status;
}

// Allocates tables, staging memory and the ticket of a redistribution that has a route.
static fsdp_status fsdpi_dt_prepare(fsdp_redistribution *r) {
    fsdp_dmesh *dm = r->dm;
    int64_t size = fsdpi_dt_bytes_of(r->dtype), comm = fsdpi_dt_bytes_of(r->comm_dtype);
    int blocks = 0;
    for (int k = 0; k < r->route.num_steps; k++)
        blocks += 2 * dm->shape[r->route.steps[k].mesh_dim];
    fsdp_status status = fsdpi_dt_alloc(dm->model, (size_t)r->route.num_steps * sizeof *r->stages,
                                        (void **)&r->stages);
    if (!status)
        status = fsdpi_dt_alloc(dm->model, (size_t)blocks * sizeof *r->blocks, (void **)&r->blocks);
    if (!status) fsdpi_dt_lay_all(r);
    if (!status && r->route.num_steps)
        status = fsdpi_dt_staging(dm, r->route.most_bytes / size * (comm > size ? comm : size),
                                  r->name);
    if (!status && r->route.num_collectives && dm->overlap)
        status = fsdp_buf_view(dm->model, dm->staging[1][0], 0, 0, &r->ticket);
    return status;
}

FSDP_API fsdp_status fsdp_redistribution_create(fsdp_dmesh *dm,
                                                const fsdp_redistribution_desc *desc,
                                                fsdp_redistribution **out) {
    fsdp_redistribution_desc d;
    fsdp_redistribution *r;
    if (!dm || !desc || !out)
        return fsdp_fail_null(dm ? dm->world : NULL, "redistribution_create", "dm, desc or out");
    *out = NULL;
    fsdp_status status = fsdp_desc_read(dm->world, &d, desc, sizeof d, "fsdp_redistribution_desc");
    if (!status) status = fsdpi_dt_check_desc(dm, &d);
    if (status) return status;
    const char *name = d.name ? d.name : "redistribute";
    if (d.scale == 0) d.scale = 1;
    for (r = dm->redistributions; r; r = r->next)
        if (fsdpi_dt_same(&r->first_from, &d.from) && fsdpi_dt_same(&r->first_to, &d.to) &&
            r->desc_dtype == d.comm_dtype && r->scale == d.scale && !strcmp(r->name, name)) {
            *out = r;
            return FSDP_OK;
        }
    status = fsdpi_dt_alloc(dm->model, sizeof *r, (void **)&r);
    if (status) return status;
    r->dm = dm;
    snprintf(r->name, sizeof r->name, "%s", name);
    r->from = r->first_from = d.from;
    r->to = r->first_to = d.to;
    r->dtype = d.from.dtype;
    r->desc_dtype = d.comm_dtype;
    r->scale = d.scale;
    fsdpi_dt_set_hash(r);
    status = fsdpi_dt_find_route(r);
    r->comm_dtype = d.comm_dtype && r->route.num_collectives ? d.comm_dtype : r->dtype;
    if (!status) status = fsdpi_dt_prepare(r);
    if (status) {
        fsdpi_dt_end_redistribution(dm, r);
        return status;
    }
    r->next = dm->redistributions;
    dm->redistributions = *out = r;
    return FSDP_OK;
}

/* Computes the factor of the backward redistribution: each partial value of a mean over n has
   factor 1/n. A maximum or minimum has no backward, since the values decide which partial value
   it is. */
static fsdp_status fsdpi_dt_back_scale(const fsdp_redistribution *forward, double *scale) {
    *scale = fsdp_dtype_is_float(forward->dtype) ? forward->scale : 0;
    for (int m = 0; m < forward->first_from.mesh_ndim; m++) {
        const fsdp_placement *p = &forward->first_from.place[m];
        const int n = forward->dm->shape[m];
        if (p->kind != FSDP_PARTIAL || forward->first_to.place[m].kind == FSDP_PARTIAL || n == 1)
            continue;
        if (p->op == FSDP_AVG) *scale /= n;
        else if (p->op != FSDP_SUM)
            return fsdp_fail(forward->dm->world, FSDP_ERR_INVALID_ARG,
                             "[E035] redistribution_create_backward: '%s' joins addends of MAX or "
                             "MIN in mesh dim %d: their gradient is that of the result on ranks "
                             "whose addend is the result, and 0 on others: take the way back of "
                             "SUM, and set these to 0",
                             forward->name, m);
    }
    return FSDP_OK;
}

FSDP_API fsdp_status fsdp_redistribution_create_backward(fsdp_redistribution *forward,
                                                         const fsdp_spec *grad,
                                                         fsdp_redistribution **out) {
    fsdp_redistribution_desc d;
    char name[FSDPI_DT_NAME];
    if (!forward || !out)
        return fsdp_fail_null(forward ? forward->dm->world : NULL, "redistribution_create_backward",
                              "forward or out");
    *out = NULL;
    memset(&d, 0, sizeof d);
    d.from = grad ? *grad : forward->first_to;
    d.to = forward->first_from;
    fsdp_status status =
        fsdpi_dt_known_in(forward->dm->world, "redistribution_create_backward", &d.from);
    if (!status) status = fsdpi_dt_back_scale(forward, &d.scale);
    if (status) return status;
    for (int m = 0; m < d.to.mesh_ndim; m++) {
        int adds = d.from.place[m].kind == FSDP_PARTIAL;
        if (!grad && adds) memset(&d.from.place[m], 0, sizeof d.from.place[m]), adds = 0;
        if (d.to.place[m].kind != FSDP_PARTIAL) continue;
        memset(&d.to.place[m], 0, sizeof d.to.place[m]);
        if (adds) d.to.place[m] = d.from.place[m];
    }
    snprintf(name, sizeof name, "%.*s backward", FSDPI_DT_NAME - FSDPI_DT_BACKWARD - 1,
             forward->name);
    d.name = name;
    d.comm_dtype = forward->desc_dtype;
    return fsdp_redistribution_create(forward->dm, &d, out);
}

FSDP_API fsdp_status fsdp_redistribution_resize(fsdp_redistribution *r, int dim, int64_t size) {
    if (!r || dim < 0 || dim >= r->from.ndim || size < 0 || size > r->first_from.shape[dim])
        return fsdp_fail(r ? r->dm->world : NULL, FSDP_ERR_INVALID_ARG,
                         "[E014] redistribution_resize: '%s': dim %d is to have %lld rows, "
                         "expected a dim of the tensor and at most the rows in the desc, %lld: "
                         "create it with the largest size",
                         r ? r->name : "NULL", dim, (long long)size,
                         r && dim >= 0 && dim < r->from.ndim ? (long long)r->first_from.shape[dim]
                                                             : 0);
    if (r->begun)
        return fsdp_fail(r->dm->world, FSDP_ERR_INVALID_STATE,
                         "[E015] redistribution_resize: '%s' is under way: call "
                         "fsdp_redistribute_wait first",
                         r->name);
    fsdp_status status = fsdp_wait_stream(r->dm->model, FSDP_STREAM_COMPUTE);
    if (status) return status;
    r->from.shape[dim] = r->to.shape[dim] = size;
    fsdpi_dt_set_hash(r);
    fsdpi_dt_lay_all(r);
    return FSDP_OK;
}

FSDP_API fsdp_status fsdp_redistribution_get(const fsdp_redistribution *r,
                                             fsdp_redistribution_info *out) {
    if (!r || !out)
        return fsdp_fail_null(r ? r->dm->world : NULL, "redistribution_get", "r or out");
    memset(out, 0, sizeof *out);
    int num = r->route.num_steps;
    const fsdpi_dt_stage *first = r->stages, *last = r->stages + num - 1;
    int64_t size = fsdpi_dt_bytes_of(r->dtype), reads = r->part[0].numel, writes = r->part[1].numel;
    if (num && first->is_packed && first->reads > reads) reads = first->reads;
    if (num && last->is_whole && last->writes > writes) writes = last->writes;
    out->route = r->route;
    out->from = r->part[0];
    out->to = r->part[1];
    out->src_capacity = reads * size;
    out->dst_capacity = writes * size;
    out->routes = r->dm->routes;
    out->runs = r->runs;
    return FSDP_OK;
}

/* -------------------------------------------------------------------------------------------- */
// Execution: the part is sent from src through staging memory to dst.

typedef struct fsdpi_dt_run {
    fsdp_redistribution *r;
    char *src, *dst, *at, *staging[2]; // at: where the part is now
    int stream;                        // 0: the caller's; 1: the extensions'
    int is_loose;                      // 1: the last op does not use the ticket
    double factor;                     // remaining factor of the part
    fsdp_status status;
} fsdpi_dt_run;

// Returns the number of elements at src or dst that peers may read or the library may write. The
// part itself has `part` elements.
static int64_t fsdpi_dt_elements(const fsdpi_dt_run *run, const char *at, int64_t part) {
    int begins;
    int64_t room = fsdpi_dt_room(run->r->dm, at, &begins) / fsdpi_dt_bytes_of(run->r->dtype);
    return begins || room < part ? room : part;
}

static int fsdpi_dt_is_staged(const fsdpi_dt_run *run, const char *at) {
    return at == run->staging[0] || at == run->staging[1];
}

static fsdp_dtype fsdpi_dt_dtype_at(const fsdpi_dt_run *run, const char *at) {
    return fsdpi_dt_is_staged(run, at) ? run->r->comm_dtype : run->r->dtype;
}

static char *fsdpi_dt_other(const fsdpi_dt_run *run, const char *at) {
    return run->staging[at == run->staging[0]];
}

static void fsdpi_dt_begin_op(const fsdpi_dt_run *run, fsdp_op *op, int kind, const char *src,
                              char *dst) {
    const fsdp_redistribution *r = run->r;
    fsdp_op_init(op, r->dm->model, NULL, kind, r->dm->label,
                 run->stream ? FSDP_STREAM_EXTENSION : FSDP_STREAM_COMPUTE);
    op->what = r->name;
    op->what_hash = r->hash;
    op->src_ptr = src;
    op->dst_ptr = dst;
}

static void fsdpi_dt_emit(fsdpi_dt_run *run, fsdp_op *op) {
    run->is_loose = op->kind == FSDP_OP_ZERO;
    if (run->stream) op->src = run->r->ticket;
    if (run->stream && !run->is_loose) op->dst = run->r->ticket;
    if (!run->status) run->status = fsdp_emit(run->r->dm->model, op);
}

// Copies the part or its pieces to `to`. The last copy, to dst, multiplies by the factor.
static void fsdpi_dt_copy_to(fsdpi_dt_run *run, char *to, const fsdpi_dt_copy *copy, int is_last) {
    fsdp_op op;
    fsdpi_dt_begin_op(run, &op, FSDP_OP_COPY, run->at, to);
    op.dtype = (uint8_t)fsdpi_dt_dtype_at(run, run->at);
    op.out_dtype = (uint8_t)fsdpi_dt_dtype_at(run, to);
    op.list = copy->blocks;
    op.list_count = (uint32_t)copy->num;
    op.count = (uint64_t)copy->count;
    if (is_last) op.scale = run->factor, run->factor = 1;
    run->at = to;
    if (copy->count) fsdpi_dt_emit(run, &op);
}

// Copies a whole part. whole: memory for the list, which lives as long as the redistribution.
static void fsdpi_dt_copy_all(fsdpi_dt_run *run, char *to, fsdp_block *whole, int64_t count,
                              int is_last) {
    fsdp_block block = {0, 0, count, 1, count, count};
    fsdpi_dt_copy copy = {whole, 1, count};
    *whole = block;
    fsdpi_dt_copy_to(run, to, &copy, is_last);
}

static void fsdpi_dt_zero(fsdpi_dt_run *run, char *to, int64_t count) {
    fsdp_op op;
    fsdpi_dt_begin_op(run, &op, FSDP_OP_ZERO, NULL, to);
    op.dtype = op.out_dtype = (uint8_t)fsdpi_dt_dtype_at(run, to);
    op.count = (uint64_t)count;
    op.bytes = op.count * fsdp_dtype_size(op.dtype);
    if (count) fsdpi_dt_emit(run, &op);
}

static void fsdpi_dt_local(fsdpi_dt_run *run, fsdpi_dt_stage *st, int is_last) {
    char *to = is_last ? run->dst : fsdpi_dt_other(run, run->at);
    if (st->keeps) return;
    if (st->kind != FSDP_STEP_SLICE) fsdpi_dt_zero(run, to, st->out);
    if (st->kind != FSDP_STEP_OWN) fsdpi_dt_copy_to(run, to, &st->before, is_last);
    run->at = to;
}

static void fsdpi_dt_collective(fsdpi_dt_run *run, const fsdpi_dt_stage *st, int kind, char *to) {
    const fsdp_dmesh *dm = run->r->dm;
    fsdp_op op;
    fsdpi_dt_begin_op(run, &op, kind, run->at, to);
    op.comm = dm->comm[run->stream][st->mesh_dim];
    op.group_size = dm->shape[st->mesh_dim];
    op.dtype = op.out_dtype = (uint8_t)run->r->comm_dtype;
    op.redop = (uint8_t)(st->redop == FSDP_AVG ? FSDP_SUM : st->redop);
    op.in_place = run->at == to;
    op.count = (uint64_t)st->seg.count;
    op.list = &st->seg;
    op.list_count = kind == FSDP_OP_ALL_GATHER || kind == FSDP_OP_REDUCE_SCATTER;
    run->factor *= st->factor;
    run->at = to;
    fsdpi_dt_emit(run, &op);
}

// Reduces in place at dst if peers may read there and this is the last step.
static void fsdpi_dt_all_reduce(fsdpi_dt_run *run, fsdpi_dt_stage *st, int is_last) {
    const fsdp_redistribution *r = run->r;
    char *home = fsdpi_dt_is_staged(run, run->at) ? run->at : run->staging[0];
    if (is_last && r->comm_dtype == r->dtype &&
        fsdpi_dt_elements(run, run->dst, st->out) >= st->out)
        home = run->dst;
    if (home != run->at) fsdpi_dt_copy_all(run, home, st->before.blocks, st->in, 0);
    fsdpi_dt_collective(run, st, FSDP_OP_ALL_REDUCE, home);
}

static void fsdpi_dt_exchange(fsdpi_dt_run *run, fsdpi_dt_stage *st, int is_last) {
    int kind = st->kind == FSDP_STEP_ALL_GATHER       ? FSDP_OP_ALL_GATHER
               : st->kind == FSDP_STEP_REDUCE_SCATTER ? FSDP_OP_REDUCE_SCATTER
                                                      : FSDP_OP_ALL_TO_ALL;
    const fsdp_redistribution *r = run->r;
    int cast = r->comm_dtype != r->dtype, first = run->at == run->src;
    int64_t room = first ? fsdpi_dt_elements(run, run->at, st->in) : st->reads;
    if (!st->is_packed) fsdpi_dt_copy_to(run, fsdpi_dt_other(run, run->at), &st->before, 0);
    else if (room < st->reads || (first && cast))
        fsdpi_dt_copy_all(run, fsdpi_dt_other(run, run->at), st->before.blocks, st->in, 0);
    int fits = st->writes == st->out || fsdpi_dt_elements(run, run->dst, st->out) >= st->writes;
    char *other = fsdpi_dt_other(run, run->at);
    fsdpi_dt_collective(run, st, kind, is_last && st->is_whole && fits && !cast ? run->dst : other);
    if (!st->is_whole)
        fsdpi_dt_copy_to(run, is_last ? run->dst : fsdpi_dt_other(run, run->at), &st->behind,
                         is_last);
}

static fsdp_status fsdpi_dt_nothing(const fsdp_op *op, void *stream) {
    (void)op, (void)stream;
    return FSDP_OK;
}

// Emits the ops of all steps.
static fsdp_status fsdpi_dt_run_all(fsdp_redistribution *r, int stream, void *dst,
                                    const void *src) {
    fsdpi_dt_run run;
    memset(&run, 0, sizeof run);
    run.r = r;
    run.src = run.at = (char *)(uintptr_t)src;
    run.dst = (char *)dst;
    run.stream = stream;
    run.factor = r->scale;
    for (int i = 0; i < 2; i++) run.staging[i] = (char *)fsdp_buf_ptr(r->dm->staging[stream][i]);
    for (int k = 0; k < r->route.num_steps && !run.status; k++) {
        fsdpi_dt_stage *st = &r->stages[k];
        int is_last = k + 1 == r->route.num_steps;
        if (!fsdpi_dt_is_collective(st->kind)) fsdpi_dt_local(&run, st, is_last);
        // No rank of the group has elements here, but a later step may bring other groups' sums.
        else if (!st->seg.count) run.factor *= st->factor;
        else if (st->kind == FSDP_STEP_ALL_REDUCE) fsdpi_dt_all_reduce(&run, st, is_last);
        else fsdpi_dt_exchange(&run, st, is_last);
    }
    if (run.at != run.dst || run.factor != 1)
        fsdpi_dt_copy_all(&run, run.dst, &r->whole, r->part[1].numel, 1);
    if (stream && run.is_loose && !run.status) {
        fsdp_op op;
        fsdpi_dt_begin_op(&run, &op, FSDP_OP_CALL, NULL, NULL);
        op.call = fsdpi_dt_nothing;
        fsdpi_dt_emit(&run, &op);
    }
    r->runs += !run.status;
    return run.status;
}

static fsdp_status fsdpi_dt_check_run(const fsdp_redistribution *r, const void *dst,
                                      const void *src) {
    if (!r) return fsdp_fail_null(NULL, "redistribute", "r");
    fsdp_world *w = r->dm->world;
    int64_t in = r->part[0].numel, out = r->part[1].numel;
    if ((in && !src) || (out && !dst))
        return fsdp_fail(w, FSDP_ERR_INVALID_ARG,
                         "[E018] redistribute: '%s': %s is NULL and its part has %lld elements: "
                         "pass memory for them",
                         r->name, in && !src ? "src" : "dst", (long long)(in && !src ? in : out));
    uintptr_t a = (uintptr_t)src, b = (uintptr_t)dst, size = (uintptr_t)fsdpi_dt_bytes_of(r->dtype);
    int apart = !in || !out || a + (uintptr_t)in * size <= b || b + (uintptr_t)out * size <= a;
    if (!apart && !(a == b && r->all_in_place))
        return fsdp_fail(w, FSDP_ERR_INVALID_ARG,
                         "[E019] redistribute: '%s': dst overlaps src: that is possible only if "
                         "both are equal and each step is an all_reduce: pass other memory",
                         r->name);
    if (r->begun)
        return fsdp_fail(w, FSDP_ERR_INVALID_STATE,
                         "[E020] redistribute: '%s' is under way: call fsdp_redistribute_wait "
                         "first, or create another one with a name of its own",
                         r->name);
    return FSDP_OK;
}

FSDP_API fsdp_status fsdp_redistribute(fsdp_redistribution *r, void *dst, const void *src) {
    fsdp_status status = fsdpi_dt_check_run(r, dst, src);
    return status ? status : fsdpi_dt_run_all(r, 0, dst, src);
}

// Orders the extensions' and the caller's streams: GRADS_WRITTEN before the steps, WAIT after.
static fsdp_status fsdpi_dt_mark(const fsdp_redistribution *r, int kind) {
    fsdp_op op;
    fsdp_op_init(&op, r->dm->model, NULL, kind, r->dm->label, FSDP_STREAM_COMPUTE);
    op.what = r->name;
    if (kind == FSDP_OP_GRADS_WRITTEN) op.dst = r->ticket;
    else op.src = r->ticket;
    return fsdp_emit(r->dm->model, &op);
}

FSDP_API fsdp_status fsdp_redistribute_begin(fsdp_redistribution *r, void *dst, const void *src) {
    fsdp_status status = fsdpi_dt_check_run(r, dst, src);
    if (status || !r->ticket) return status ? status : fsdpi_dt_run_all(r, 0, dst, src);
    status = fsdpi_dt_mark(r, FSDP_OP_GRADS_WRITTEN);
    if (!status) status = fsdpi_dt_run_all(r, 1, dst, src);
    r->begun = !status;
    return status;
}

FSDP_API fsdp_status fsdp_redistribute_wait(fsdp_redistribution *r) {
    if (!r) return fsdp_fail_null(NULL, "redistribute_wait", "r");
    if (!r->begun) return fsdp_world_status(r->dm->world);
    r->begun = 0;
    return fsdpi_dt_mark(r, FSDP_OP_WAIT);
}

/* -------------------------------------------------------------------------------------------- */
// Comparison of replicas' bytes.

static fsdp_status fsdpi_dt_hash_part(fsdp_dmesh *dm, const void *data, int64_t bytes,
                                      uint64_t *hash) {
    char chunk[4096];
    fsdp_status status = FSDP_OK;
    *hash = 3;
    for (int64_t at = 0; at < bytes && !status; at += (int64_t)sizeof chunk) {
        int64_t now = bytes - at < (int64_t)sizeof chunk ? bytes - at : (int64_t)sizeof chunk;
        status = fsdp_transfer(dm->model, chunk, (const char *)data + at, now);
        *hash = fsdpi_hash_bytes(*hash, chunk, (size_t)now);
    }
    return status;
}

// Takes the minimum of each number over the ranks that should hold equal bytes.
static fsdp_status fsdpi_dt_min_over_ranks(const fsdp_dmesh *dm, const fsdp_spec *spec,
                                           int64_t *values, int count) {
    fsdp_status status = FSDP_OK;
    for (int m = 0; m < dm->ndim && !status; m++)
        if (spec->place[m].kind == FSDP_REPLICATE && dm->shape[m] > 1)
            status = fsdp_all_reduce(dm->world, dm->dim_mesh[m], values, count, FSDP_I64, FSDP_MIN);
    return status;
}

FSDP_API fsdp_status fsdp_dtensor_check(fsdp_dmesh *dm, const fsdp_spec *spec, const void *data,
                                        const char *what) {
    fsdp_local part;
    uint64_t hash;
    if (!dm || !what) return fsdp_fail_null(dm ? dm->world : NULL, "dtensor_check", "dm or what");
    fsdp_status status = fsdpi_dt_known_in(dm->world, "dtensor_check", spec);
    if (status) return status;
    int other = !fsdpi_dt_is_on(dm, spec);
    if (!other) status = fsdp_spec_local(spec, dm->coord, &part);
    if (!other && !status && part.numel && !data) other = 1;
    if (other)
        return fsdp_fail(dm->world, FSDP_ERR_INVALID_ARG,
                         "[E023] dtensor_check: '%s': the spec is of a mesh of another shape, or "
                         "data is NULL: pass a spec of dm's mesh, and this rank's part",
                         what);
    if (!status)
        status = fsdpi_dt_hash_part(dm, data, part.numel * fsdpi_dt_bytes_of(spec->dtype), &hash);
    if (status) return status;
    int64_t mine = (int64_t)hash, ends[2] = {mine, ~mine}, rank = fsdp_rank(dm->world);
    status = fsdpi_dt_min_over_ranks(dm, spec, ends, 2);
    if (status || ends[0] == ~ends[1]) return status;
    int64_t ranks[2] = {mine == ends[0] ? rank : INT64_MAX, mine == ~ends[1] ? rank : INT64_MAX};
    status = fsdpi_dt_min_over_ranks(dm, spec, ranks, 2);
    if (status) return status;
    return fsdp_fail(dm->world, FSDP_ERR_CORRUPT,
                     "[E024] dtensor_check: '%s': ranks %lld and %lld should hold the same bytes "
                     "and do not: look for what they computed differently, or broadcast it again",
                     what, (long long)ranks[0], (long long)ranks[1]);
}

#endif // FSDPI_DTENSOR_REDISTRIBUTE_H
