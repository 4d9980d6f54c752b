/* core/template.h - op templates: built at commit, filled in and emitted in each step

   State: fsdpi_unit_layout.templates. After commit only fsdpi_emit_step changes them, and
   fsdpi_emit, which sets an op's number and waits.
   Callers: commit.h (fsdpi_templates_make); gather.h and grads.h (fsdpi_emit_step).
   Source: torch: foreach_all_gather, foreach_reduce.

   A part of fsdp.h. SPDX-License-Identifier: MIT (full text at the end of fsdp.h) */
#ifndef FSDP_H
#include "../../fsdp.h"
#endif
#ifndef FSDPI_CORE_TEMPLATE_H
#define FSDPI_CORE_TEMPLATE_H

#include "../base/hash.h"
#include "../base/macros.h"
#include "error.h"
#include "grad_path.h"
#include "layout.h"
#include "mesh.h"
#include "objects.h"
#include "ops.h"
#include "pool.h"
#include "run.h"
#include "unit.h"

#include <stddef.h>
#include <string.h>

// Returns a view of a parameter without its gradient: only the caller's thread knows whether there
// is one.
static fsdp_param_view fsdpi_view_static(const fsdp_unit *u, int index) {
    const fsdpi_param *p = &u->params[index];
    const fsdpi_flat_block *flat = fsdpi_flat_of(u, fsdpi_dtype_group_of(u, p));
    fsdp_param_view v = FSDP_ZERO;
    v.unit = u->model->units[u->desc.index];
    v.name = p->name;
    v.unit_name = u->desc.own_name;
    v.user = p->user;
    v.unit_user = u->desc.user;
    v.ordinal = p->ordinal;
    v.index = index;
    v.dtype = p->dtype;
    v.grad_dtype = fsdpi_grad_dtype(u->model, p->dtype);
    v.ndim = p->lay.ndim;
    v.shard_dim = p->lay.shard_dim;
    v.requires_grad = p->requires_grad;
    v.has_hook = p->grad_hook != NULL;
    memcpy(v.shape, p->lay.shape, sizeof v.shape);
    memcpy(v.local_shape, p->lay.shape, sizeof v.local_shape);
    v.start[v.shard_dim] = p->lay.start;
    v.local_shape[v.shard_dim] = p->lay.local_numel ? p->lay.rows : 0;
    v.numel = p->lay.local_numel;
    v.data = v.shard = flat->shard->ptr + fsdpi_bytes(p->lay.shard_offset, p->dtype);
    return v;
}

static fsdp_status fsdpi_call_pre_gather(const fsdp_op *op, void *stream) {
    const fsdpi_param *p = &op->unit->params[op->root];
    fsdp_param_view v = fsdpi_view_static(op->unit, op->root);
    void *strings[FSDP_GATHER_TENSORS];
    for (int i = 0; i < p->num_strings; i++)
        strings[i] = (char *)op->dst_ptr + p->string_offset[i] +
                     op->unit->desc.info.shard_mesh_rank * p->string_bytes[i];
    return p->extension.pre_all_gather(p->extension.user, &v, strings, stream);
}

static fsdp_status fsdpi_call_post_gather(const fsdp_op *op, void *stream) {
    const fsdpi_param *p = &op->unit->params[op->root];
    fsdp_param_view v = fsdpi_view_static(op->unit, op->root);
    fsdp_dtype dtype = fsdpi_dtype_group_of(op->unit, p)->param_dtype;
    const void *gathered[FSDP_GATHER_TENSORS];
    for (int i = 0; i < p->num_strings; i++)
        gathered[i] = (char *)op->dst_ptr + p->string_offset[i];
    return p->extension.post_all_gather(
        p->extension.user, &v, gathered,
        (char *)op->dst_ptr + fsdpi_bytes(p->lay.full_offset, dtype), dtype, stream);
}

static fsdp_status fsdpi_call_all_reduce_hook(const fsdp_op *op, void *stream) {
    fsdp_unit *u = op->unit->model->units[op->unit->desc.index];
    return u->options.all_reduce_hook(u->options.all_reduce_user, u, op->dst_ptr,
                                      u->layout.train_numel, u->layout.reduce_dtype, stream);
}

enum { FSDPI_NO_GROUP, FSDPI_SHARDS, FSDPI_SLICES, FSDPI_SUMS, FSDPI_REPLICAS };

typedef struct fsdpi_step_row {
    uint8_t op, label, stream, group;
    uint8_t each;  // 1: an op for each dtype group; 0: one op for the unit
    uint16_t work; // offset of the fsdpi_op_list in the group or in the layout, in bytes; 0: none
    fsdp_status (*call)(const fsdp_op *op, void *stream); // for groups with an extension, or CALL
} fsdpi_step_row;

#define FSDPI_PART(name) 1, offsetof(fsdpi_dtype_group, name)
#define FSDPI_UNIT(name) 0, offsetof(fsdpi_unit_layout, name)
#define FSDPI_NO_WORK    0, 0
static const fsdpi_step_row fsdpi_step_rows[FSDPI_STEP_COUNT] = {
#define FSDP_X(name, op, label, stream, group, work, call, text)                                   \
    {FSDP_OP_##op, FSDP_LABEL_##label, FSDP_STREAM_##stream, FSDPI_##group, FSDPI_##work, call},
    FSDPI_STEP_LIST(FSDP_X)
#undef FSDP_X
};

static int fsdpi_step_stream(const fsdp_unit *u, int kind) {
    int last = u->facts.replicas > 1 ? FSDP_STREAM_ALLREDUCE : FSDP_STREAM_REDUCE;
    int stream = fsdpi_step_rows[kind].stream;
    return stream == FSDP_STREAM_COUNT ? last : stream;
}

// Returns the dtype of a place of a dtype group, or (NULL) of the whole unit.
static fsdp_dtype fsdpi_place_dtype(const fsdp_unit *u, const fsdpi_dtype_group *part, int place) {
    const fsdpi_dtype_group *first = part ? part : &u->layout.parts[u->layout.first_train];
    switch (place) {
    case FSDP_POOL_SHARD: return first->dtype;
    case FSDP_POOL_SHARD_GRAD: return fsdpi_grad_dtype(u->model, first->dtype);
    case FSDP_POOL_GRAD: return first->param_dtype;
    case FSDP_POOL_GATHER:
    case FSDP_POOL_SLICE: return part ? part->param_dtype : u->layout.gather_dtype;
    default: return u->layout.reduce_dtype;
    }
}

// Builds a template at `t`, for a dtype group or (NULL) the unit. Returns the next place, or `t` if
// the step has no work.
static fsdpi_template *fsdpi_template_make(fsdp_unit *u, int kind, const fsdpi_dtype_group *part,
                                           fsdpi_template *t) {
    const fsdpi_step_row *row = &fsdpi_step_rows[kind];
    const char *owner = part ? (const char *)part : (const char *)&u->layout;
    const int sizes[] = {0, fsdpi_shards(u), u->desc.slices, fsdpi_shards(u), fsdpi_replicas(u)};
    const fsdp_mesh_info *info = &u->desc.info;
    fsdp_comm *const comms[] = {NULL, info->shard_comm, u->desc.slice_comm,
                                fsdpi_reduce_comm(info->mesh, info->shard_mesh_dim),
                                fsdpi_reduce_comm(info->mesh, info->replicate_mesh_dim)};
    const int calls = row->call && (!part || part->extended);
    int label = row->label;
    memset(t, 0, sizeof *t); // from = to = SHARD, as in no step: places are not set
    if (calls && kind == FSDPI_STEP_COPY_IN) label = FSDP_LABEL_PRE_GATHER;
    if (calls && kind == FSDPI_STEP_COPY_OUT) label = FSDP_LABEL_POST_GATHER;
    t->op = fsdpi_op(u->model, u, calls ? (int)FSDP_OP_CALL : row->op, label,
                     fsdpi_step_stream(u, kind));
    t->part = part;
    t->is_compared = row->group == FSDPI_SUMS || row->group == FSDPI_REPLICAS;
    t->op.group_size = sizes[row->group];
    t->op.comm = comms[row->group];
    if (row->group && t->op.group_size < 2) return t;
    if (calls) {
        t->op.call = row->call;
        t->op.root = part ? (int32_t)(part->extended - u->params) : -1;
    } else if (row->work) {
        t->work = (const fsdpi_op_list *)(const void *)(owner + row->work);
        if (t->work->count == 0) return t;
    }
    return t + 1;
}

static int fsdpi_templates_max(const fsdp_unit *u) {
    int most = 0;
    for (int kind = 0; kind < FSDPI_STEP_COUNT; kind++)
        most += fsdpi_step_rows[kind].each ? u->layout.num_parts : 1;
    return most;
}

// Builds all templates of a unit. Requires its lists and the flat blocks.
static void fsdpi_templates_make(fsdp_unit *u) {
    fsdpi_unit_layout *l = &u->layout;
    fsdpi_template *t = l->templates[0];
    for (int kind = 0; kind < FSDPI_STEP_COUNT; kind++) {
        int each = fsdpi_step_rows[kind].each;
        l->templates[kind] = t;
        if (kind >= FSDPI_STEP_ZERO_GRAD && l->num_train == 0) continue;
        for (int k = 0; k < (each ? l->num_parts : 1); k++)
            t = fsdpi_template_make(u, kind, each ? &l->parts[k] : NULL, t);
    }
    l->templates[FSDPI_STEP_COUNT] = t;
}

// Returns the address of the pointer to a place's buffer: a unit's slots change from use to use.
static fsdp_buf *const *fsdpi_template_place(const fsdp_unit *u, const fsdpi_template *t,
                                             int place) {
    static fsdp_buf *const none = NULL;
    const fsdpi_flat_block *flat = fsdpi_flat_of(
        u, t->part ? t->part : &u->layout.parts[u->layout.first_train]);
    return place == FSDPI_NOWHERE          ? &none
           : place == FSDP_POOL_SHARD      ? &flat->shard
           : place == FSDP_POOL_SHARD_GRAD ? &flat->grad
                                           : &u->state.slot[place];
}

// Sets the fields that depend on the places that a step reads and writes. These rarely change.
static FSDPI_NOINLINE void fsdpi_template_set_places(fsdp_unit *u, fsdpi_template *t,
                                                     const fsdpi_step *s) {
    fsdp_op *op = &t->op;
    const int group = fsdpi_step_rows[s->kind].group;
    // TO_OUT and SCATTER have two lists: one for GRAD, which has whole parameters, and one for
    // REDUCE_IN.
    const int second = group == FSDPI_SUMS && s->from == FSDP_POOL_REDUCE_IN;
    fsdp_dtype to = op->kind == FSDP_OP_ZERO ? FSDP_U8 : fsdpi_place_dtype(u, t->part, s->to);
    fsdp_dtype from = s->from == FSDPI_NOWHERE ? to : fsdpi_place_dtype(u, t->part, s->from);
    t->from = s->from;
    t->to = s->to;
    t->src = fsdpi_template_place(u, t, s->from);
    t->dst = fsdpi_template_place(u, t, s->to);
    op->in_place = group && s->from == s->to;
    if (t->work) fsdpi_op_work(op, from, to, t->work + second);
    t->begin = s->kind == FSDPI_STEP_GATHER && s->from == FSDP_POOL_SHARD
                   ? fsdpi_bytes(u->layout.gather_begin, from)
                   : 0;
}

/* Sets the fields of a reduction that ranks compare: the unit, the gradients it held before the
   reduction, and its parameters without a gradient. op->unused names the first of these. */
static void fsdpi_set_compared(const fsdp_unit *u, int held, fsdp_op *op) {
    uint64_t unused = 0;
    int used = 0;
    op->unused = NULL;
    for (int k = 0; k < u->use_words; k++) // the sum of eight bytes, 0 or 1 each
        used += (int)((u->use[k] & FSDPI_USE_EACH * FSDPI_USE_USED) * FSDPI_USE_EACH >> 56);
    for (int i = 0; used < u->layout.num_train && i < u->desc.num_params; i++) {
        if (!u->params[i].requires_grad || *fsdpi_use(u, i) & FSDPI_USE_USED) continue;
        if (!op->unused) op->unused = u->params[i].name;
        unused = fsdpi_hash(unused, (uint64_t)i);
    }
    const uint64_t alike[] = {(uint64_t)held, unused};
    op->what_hash = fsdpi_hash_words(u->layout.hash, alike, 2);
    op->agree[FSDP_AGREE_USED] = (uint8_t)(op->unused ? unused | 1 : 0);
    op->agree[FSDP_AGREE_ACCUMULATE] = (uint8_t)held;
}

// Emits the ops of a step, in the order of its stream. Acquires the slot it writes before the first
// op and releases the slot it reads after the last op, if the step says so.
static fsdp_status fsdpi_emit_step(fsdp_unit *u, const fsdpi_step *s) {
    fsdp_model *m = u->model;
    fsdpi_template *t = u->layout.templates[s->kind], *end = u->layout.templates[s->kind + 1];
    if (s->how & FSDPI_ACQUIRES) {
        int pool = s->to == FSDPI_FRESH ? (int)FSDP_POOL_REDUCE_OUT : s->to;
        FSDPI_TRY(fsdpi_acquire(u, pool, &u->state.slot[s->to]));
    }
    for (; t != end; t++) {
        fsdp_op *op = &t->op;
        if (t->from != s->from || t->to != s->to) fsdpi_template_set_places(u, t, s);
        op->src = *t->src;
        op->dst = *t->dst;
        if (op->src) op->src_ptr = op->src->ptr + t->begin;
        if (op->dst) op->dst_ptr = op->dst->ptr;
        op->state = m->call_state;
        op->step = m->step;
        op->given = m->agreed_hash;
        if (s->kind >= FSDPI_STEP_ZERO_GRAD) {
            const double factor = u->facts.divide_factor;
            const int divides = s->how & FSDPI_DIVIDES;
            op->scale = divides ? s->scale / factor : s->scale;
            op->share = divides ? s->scale : 0;
            op->factor = divides || t->is_compared ? factor : 0;
            op->accumulate = s->how & FSDPI_ADDS;
            if (t->is_compared) fsdpi_set_compared(u, u->route.held, op);
        }
        FSDPI_TRY(fsdpi_emit(m, op));
    }
    if (!(s->how & FSDPI_RELEASES)) return FSDP_OK;
    return fsdpi_release(u, &u->state.slot[s->from], fsdpi_step_stream(u, s->kind));
}

#endif // FSDPI_CORE_TEMPLATE_H
