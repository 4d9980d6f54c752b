/* plan/listing.h - what a tape does, in text that is the same on every rank

   Makes and destroys fsdpi_plan_listing.
   Callers: make.h (fsdpi_plan_count_ops), simulate.h (fsdpi_plan_listing_end), prove.h
     (fsdpi_plan_events) and others.

   A part of fsdp_plan.h. SPDX-License-Identifier: MIT (full text at the end of fsdp.h) */
#ifndef FSDP_PLAN_H
#include "../../fsdp_plan.h"
#endif
#ifndef FSDPI_PLAN_LISTING_H
#define FSDPI_PLAN_LISTING_H

#include "../core/objects.h"
#include "memory.h"
#include "objects.h"
#include "tape.h"

#include <stdio.h>
#include <string.h>

static void fsdpi_plan_listing_end(fsdp_model *m, fsdpi_plan_listing *l) {
    for (int i = 0; i < l->num_units && l->units; i++) fsdpi_plan_free(m, l->units[i].name);
    void *const lists[] = {l->units, l->calls,        l->choice.acts, l->choice.managed, l->slots,
                           l->lines, l->choice.waits, l->choice.sync, l->members};
    for (size_t i = 0; i < sizeof lists / sizeof *lists; i++) fsdpi_plan_free(m, lists[i]);
    memset(l, 0, sizeof *l);
}

static fsdp_status fsdpi_plan_string(fsdp_model *m, const char *text, size_t length, char **out) {
    fsdp_status status = fsdpi_plan_alloc(m, length + 1, (void **)out);
    if (!status) memcpy(*out, text, length);
    return status;
}

static fsdp_status fsdpi_plan_line_add(fsdp_model *m, fsdpi_plan_listing *l,
                                       const fsdpi_plan_line *line) {
    fsdp_status status = fsdpi_plan_grow(m, (void **)&l->lines, l->num_lines, &l->cap_lines,
                                         sizeof *line);
    if (!status) l->lines[l->num_lines++] = *line;
    return status;
}

static fsdp_status fsdpi_plan_member_add(fsdp_model *m, fsdpi_plan_listing *l, int unit, int src,
                                         int dst) {
    fsdpi_plan_member member = {unit, src, dst};
    fsdp_status status = fsdpi_plan_grow(m, (void **)&l->members, l->num_members, &l->cap_members,
                                         sizeof member);
    if (!status) l->members[l->num_members++] = member;
    return status;
}

// Returns the bytes without those of slots that outlast a step.
static int64_t fsdpi_plan_arena_bytes(const fsdpi_plan_listing *l) {
    int64_t bytes = l->bytes;
    for (int i = 0; i < l->num_slots; i++) bytes -= l->slots[i].offset < 0 ? l->slots[i].bytes : 0;
    return bytes;
}

// Returns the index of a group in the listing; -1: the listing is full.
static int fsdpi_plan_comm_add(fsdpi_plan_listing *l, const char *name) {
    int i = 0;
    while (i < l->num_comms && strcmp(l->comms[i], name) != 0) i++;
    if (i == FSDPI_PLAN_COMMS) return -1;
    if (i == l->num_comms)
        snprintf(l->comms[l->num_comms++], FSDPI_PLAN_COMM, "%.*s", FSDPI_PLAN_COMM - 1, name);
    return i;
}

// Returns the index of an op's group. Groups are numbered in the order in which the tape uses them.
static int fsdpi_plan_comm_of(const fsdpi_plan_tape *t, fsdpi_plan_listing *l, const fsdp_op *op) {
    const fsdp_comm *seen[FSDPI_PLAN_COMMS];
    char name[FSDPI_PLAN_COMM];
    int num = 0;
    if (!op->comm) return -1;
    for (const fsdp_op *at = t->ops; at <= op; at++) {
        int i = 0;
        while (i < num && seen[i] != at->comm) i++;
        if (at->comm && i == num && num < FSDPI_PLAN_COMMS) seen[num++] = at->comm;
        if (at != op) continue;
        snprintf(name, sizeof name, "group%d", i);
    }
    return fsdpi_plan_comm_add(l, name);
}

// Returns a hash of properties that are equal on all ranks: segments, but not blocks, which contain
// the rank's own offset.
static uint32_t fsdpi_plan_digest(const fsdp_op *op) {
    uint64_t h = fsdpi_plan_mix(op->kind, (uint64_t)op->group_size);
    const fsdp_seg *seg = (const fsdp_seg *)op->list;
    h = fsdpi_plan_mix(h, op->redop);
    if (op->kind == FSDP_OP_ALL_GATHER || op->kind == FSDP_OP_REDUCE_SCATTER)
        for (uint32_t i = 0; i < op->list_count; i++)
            h = fsdpi_plan_mix(fsdpi_plan_mix(h, (uint64_t)seg[i].full),
                               fsdpi_plan_mix((uint64_t)seg[i].shard, (uint64_t)seg[i].count));
    return (uint32_t)h;
}

// Returns the number of entries in a table of events: one per slot, per block, and per carried-over
// slot of each unit.
static int fsdpi_plan_events(const fsdpi_plan_listing *l) {
    return l->num_slots + 2 + FSDPI_PLAN_HELD_COUNT * l->num_units;
}
static int fsdpi_plan_event_of(const fsdpi_plan_listing *l, int unit, int place) {
    int held = FSDPI_PLAN_HELD - place;
    return place >= 0                   ? place
           : place == FSDPI_PLAN_SHARDS ? l->num_slots
           : place == FSDPI_PLAN_GRADS  ? l->num_slots + 1
           : held >= 0 && unit >= 0     ? l->num_slots + 2 + held * l->num_units + unit
                                        : -1;
}

// Returns the place of a buffer that is not the tape's: a block of the model, host memory, or an
// carried-over slot.
static int fsdpi_plan_place_of(const fsdpi_plan_tape *t, const fsdp_op *op, int use, int writes) {
    const fsdp_buf *buf = writes ? op->dst : op->src;
    if (use >= 0) return t->uses[use].slot;
    if (!buf) return FSDPI_PLAN_NONE;
    int pool = buf->acquired_pool, held = pool - FSDP_POOL_GATHER;
    return pool == FSDP_POOL_SHARD                     ? FSDPI_PLAN_SHARDS
           : pool == FSDP_POOL_SHARD_GRAD              ? FSDPI_PLAN_GRADS
           : held >= 0 && held < FSDPI_PLAN_HELD_COUNT ? FSDPI_PLAN_HELD - held
                                                       : FSDPI_PLAN_OTHER;
}

static fsdp_status fsdpi_plan_list_op(fsdp_plan *p, const fsdpi_plan_tape *t, fsdpi_plan_listing *l,
                                      int call, int i, int *group) {
    const fsdp_op *op = &t->ops[i];
    fsdpi_plan_line line;
    fsdp_status status = FSDP_OK;
    memset(&line, 0, sizeof line);
    line.call = call;
    line.members = l->num_members;
    line.comm = fsdpi_plan_comm_of(t, l, op);
    line.kind = op->kind;
    line.label = op->label;
    line.stream = op->stream;
    line.dtype = op->dtype;
    line.out_dtype = op->out_dtype;
    line.accumulate = op->accumulate;
    line.in_place = op->in_place;
    line.redop = op->redop;
    line.count = op->count;
    line.bytes = op->bytes;
    line.scale = op->scale;
    line.digest = fsdpi_plan_digest(op);
    if (op->comm && line.comm < 0)
        return fsdp_fail(p->world, FSDP_ERR_UNSUPPORTED,
                         "[E945] plan: a step uses more than %d groups of ranks: give units that "
                         "have the same ranks one mesh",
                         FSDPI_PLAN_COMMS);
    const fsdpi_plan_group *g = *group < t->num_groups ? &t->groups[*group] : NULL;
    if (g && g->op == i) {
        ++*group;
        for (int k = 0; k < g->num_members && !status; k++) {
            const fsdpi_plan_member *from = &t->members[g->members + k];
            status = fsdpi_plan_member_add(p->model, l, from->unit,
                                           fsdpi_plan_place_of(t, op, from->src, 0),
                                           fsdpi_plan_place_of(t, op, from->dst, 1));
        }
        line.num_members = g->num_members;
    } else {
        status = fsdpi_plan_member_add(p->model, l, fsdpi_plan_index(op->unit),
                                       fsdpi_plan_place_of(t, op, t->pairs[i].src, 0),
                                       fsdpi_plan_place_of(t, op, t->pairs[i].dst, 1));
        line.num_members = 1;
    }
    return status ? status : fsdpi_plan_line_add(p->model, l, &line);
}

// Returns the bytes of slots for gradients; 0 if a unit's gradients have no elements.
static int64_t fsdpi_plan_grad_bytes(const fsdp_unit *unit) {
    int64_t most = 0;
    for (int i = 0; i < unit->desc.num_params; i++) {
        const fsdpi_param *p = &unit->params[i];
        int64_t numel = p->requires_grad;
        for (int d = 0; d < p->lay.ndim; d++) numel *= p->lay.shape[d];
        if (numel > most) most = numel;
    }
    return most ? fsdpi_plan_slot_bytes(unit, FSDP_POOL_GRAD) : 0;
}

// Names a unit in a text: its own name, as far as it fits. A number follows if an earlier unit has
// that name, since a text finds units by name.
static fsdp_status fsdpi_plan_name_unit(fsdp_plan *p, fsdpi_plan_listing *l, int u) {
    char name[512];
    snprintf(name, sizeof name, "%.480s", fsdp_unit_label(p->units[u]));
    for (int i = 0; i < u; i++) {
        if (strcmp(l->units[i].name, name) != 0) continue;
        snprintf(name + strlen(name), sizeof name - strlen(name), "#%d", u);
        i = -1; // an earlier name may equal the new one
    }
    l->units[u].gather_bytes = fsdpi_plan_slot_bytes(p->units[u], FSDP_POOL_GATHER);
    l->units[u].grad_bytes = fsdpi_plan_grad_bytes(p->units[u]);
    return fsdpi_plan_string(p->model, name, strlen(name), &l->units[u].name);
}

// Counts ops. which 0: of the eager step; 1: of the plan.
static void fsdpi_plan_count_ops(const fsdpi_plan_tape *t, fsdpi_plan_listing *l, int which) {
    l->gathers[which] = l->reductions[which] = l->replica_ops[which] = l->ops[which] = 0;
    l->gather_bytes[which] = l->reduce_bytes[which] = 0;
    for (int i = 0; i < t->num_ops; i++) {
        const fsdp_op *op = &t->ops[i];
        l->ops[which] += op->kind < FSDP_OP_HOOK;
        if (op->kind == FSDP_OP_ALL_GATHER) {
            l->gathers[which]++;
            l->gather_bytes[which] += op->bytes;
        } else if (op->kind == FSDP_OP_REDUCE_SCATTER) {
            l->reductions[which]++;
            l->reduce_bytes[which] += op->bytes;
        } else if (op->kind == FSDP_OP_ALL_REDUCE) {
            l->replica_ops[which]++;
            l->reduce_bytes[which] += op->bytes;
        }
    }
}

// Returns a hash of the model. A plan's text applies only to models with the same hash.
static uint64_t fsdpi_plan_model_hash(const fsdp_plan *p) {
    fsdp_param_view v = FSDP_ZERO;
    uint64_t h = (uint64_t)p->num_units;
    while (fsdp_next_param(p->model, &v)) {
        h = fsdpi_plan_mix_bytes(h, v.name, strlen(v.name));
        h = fsdpi_plan_mix_bytes(h, v.unit_name, strlen(v.unit_name));
        h = fsdpi_plan_mix(h, (uint64_t)v.dtype << 32 | (uint64_t)v.grad_dtype << 16 |
                                  (uint64_t)v.requires_grad << 8 | (uint64_t)v.ndim);
        for (int d = 0; d < v.ndim; d++) h = fsdpi_plan_mix(h, (uint64_t)v.shape[d]);
        h = fsdpi_plan_mix(h, (uint64_t)v.shard_dim);
    }
    return h;
}

// Returns 1 if a unit's groups of ranks, if any, are those of a mesh.
static int fsdpi_plan_is_within(const fsdp_mesh_info *unit, const fsdp_mesh_info *all) {
    return (!unit->shard_comm || unit->shard_comm == all->shard_comm) &&
           (!unit->replicate_comm || unit->replicate_comm == all->replicate_comm);
}

static const fsdp_unit *fsdpi_plan_outside_of(const fsdp_plan *p, const fsdp_mesh_info *mesh) {
    for (int u = 0; u < p->num_units; u++)
        if (!fsdpi_plan_is_within(&p->units[u]->desc.info, mesh)) return p->units[u];
    return NULL;
}

/* Returns the one mesh that a plan knows: the model's. If a unit has other groups, and the
   model's mesh has all ranks of the world, it is the mesh of the unit that has most groups (as
   the buckets of fsdp_replicate.h). Sets *outside to a unit whose groups are not those of that
   mesh, or NULL. */
static const fsdp_mesh_info *fsdpi_plan_mesh_info(const fsdp_plan *p, const fsdp_unit **outside) {
    const fsdp_mesh_info *mesh = &p->model->info;
    *outside = fsdpi_plan_outside_of(p, mesh);
    if (!*outside || fsdp_mesh_size(p->mesh, -1) != p->world->size) return mesh;
    for (int u = 0, most = -1; u < p->num_units; u++) {
        const fsdp_mesh_info *own = &p->units[u]->desc.info;
        int groups = (own->shard_comm != NULL) + (own->replicate_comm != NULL);
        if (groups <= most) continue;
        most = groups;
        mesh = own;
    }
    if (!fsdpi_plan_outside_of(p, mesh)) *outside = NULL;
    return mesh;
}

static fsdp_status fsdpi_plan_list(fsdp_plan *p, const fsdpi_plan_variant *k,
                                   const fsdpi_plan_tape *t, fsdpi_plan_listing *l) {
    const fsdp_unit *outside;
    const fsdp_mesh_info *mesh = fsdpi_plan_mesh_info(p, &outside);
    int group = 0;
    l->model = fsdpi_plan_model_hash(p);
    l->kind = fsdpi_plan_mix(k->options, (uint64_t)k->num_calls);
    l->num_units = p->num_units;
    l->num_params = fsdp_num_params(p->model);
    l->shards = mesh->shard_mesh_size;
    l->replicas = mesh->replicate_mesh_size;
    l->mode = p->mode_of_world;
    l->num_calls = l->forward_calls = k->num_calls;
    fsdp_status status = fsdpi_plan_alloc(p->model, (size_t)p->num_units * sizeof *l->units,
                                          (void **)&l->units);
    if (!status)
        status = fsdpi_plan_alloc(p->model, (size_t)k->num_calls * sizeof *l->calls,
                                  (void **)&l->calls);
    for (int u = 0; u < p->num_units && !status; u++) status = fsdpi_plan_name_unit(p, l, u);
    for (int c = 0; c < k->num_calls && !status; c++) {
        l->calls[c] = k->calls[c];
        if (l->forward_calls == k->num_calls && k->calls[c].call == FSDP_CALL_PRE_BACKWARD)
            l->forward_calls = c;
        for (int i = t->ops_at[c]; i < t->ops_at[c + 1] && c + 1 < k->num_calls && !status; i++)
            if (t->ops[i].kind != FSDP_OP_HOOK) status = fsdpi_plan_list_op(p, t, l, c, i, &group);
    }
    return status;
}

// Fails if an argument is NULL, or there is no plan `index`. which: the call and its pointers.
static fsdp_status fsdpi_plan_check_index(const fsdp_plan *plan, int index, int given,
                                          const char *which) {
    if (plan && given && index >= 0 && index < plan->num_kinds) return FSDP_OK;
    return fsdp_fail(plan ? plan->world : NULL, FSDP_ERR_INVALID_ARG,
                     "[E981] %s is NULL, or index %d is not below the number of plans, which is %d",
                     which, index, fsdp_plan_count(plan));
}

#endif // FSDPI_PLAN_LISTING_H
