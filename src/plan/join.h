/* plan/join.h - collectives of several units become one

   Turns the ops of a dry run into the ops of a tape. A unit's other ops are unchanged: first the
   copies of all units, then one collective over all their lists, and so on.
   Callers: make.h (fsdpi_plan_arrange).

   A part of fsdp_plan.h. SPDX-License-Identifier: MIT (full text at the end of fsdp.h) */
#ifndef FSDP_PLAN_H
#include "../../fsdp_plan.h"
#endif
#ifndef FSDPI_PLAN_JOIN_H
#define FSDPI_PLAN_JOIN_H

#include "../core/ops.h"
#include "memory.h"
#include "objects.h"
#include "tape.h"

#include <stdio.h>
#include <string.h>

typedef struct fsdpi_plan_range {
    int32_t begin, end; // indices of ops in the dry run
} fsdpi_plan_range;

static fsdp_status fsdpi_plan_keep(fsdp_plan *p, fsdpi_plan_tape *t, size_t bytes, void **out) {
    fsdp_status status = fsdpi_plan_grow(p->model, (void **)&t->made, t->num_made, &t->cap_made,
                                         sizeof *t->made);
    if (!status) status = fsdpi_plan_alloc(p->model, bytes, out);
    if (!status) t->made[t->num_made++] = *out;
    return status;
}

// Sets the name "h.0..h.3", and the hash of all that ranks must agree on.
static fsdp_status fsdpi_plan_join_names(fsdp_plan *p, fsdpi_plan_tape *t, fsdp_op *op,
                                         const fsdp_op *const *parts, int num) {
    const char *first = parts[0]->what, *last = parts[num - 1]->what;
    size_t size = strlen(first) + strlen(last) + 3;
    void *text;
    fsdp_status status = fsdpi_plan_keep(p, t, size, &text);
    if (status) return status;
    snprintf((char *)text, size, "%s..%s", first, last);
    op->what = (const char *)text;
    for (int i = 1; i < num; i++) {
        op->what_hash = fsdpi_plan_mix(op->what_hash, parts[i]->what_hash);
        for (int a = 0; a < FSDP_AGREE_COUNT; a++)
            op->agree[a] = (uint8_t)fsdpi_plan_mix(op->agree[a], parts[i]->agree[a]);
    }
    return FSDP_OK;
}

// Joins the lists of all units' ops. Offsets are relative to the lowest address of any of them.
static fsdp_status fsdpi_plan_join_lists(fsdp_plan *p, fsdpi_plan_tape *t, fsdp_op *op,
                                         const fsdp_op *const *parts, int num) {
    int gathers = op->kind == FSDP_OP_ALL_GATHER;
    int64_t src_size = (int64_t)fsdp_dtype_size(op->dtype),
            dst_size = (int64_t)fsdp_dtype_size(gathers ? op->dtype : op->out_dtype);
    void *list;
    op->count = op->list_count = 0;
    for (int i = 0; i < num; i++) {
        if ((const char *)parts[i]->src_ptr < (const char *)op->src_ptr)
            op->src_ptr = parts[i]->src_ptr;
        if ((const char *)parts[i]->dst_ptr < (const char *)op->dst_ptr)
            op->dst_ptr = parts[i]->dst_ptr;
        op->count += parts[i]->count;
        op->list_count += parts[i]->list_count;
    }
    fsdp_status status = fsdpi_plan_keep(p, t, op->list_count * sizeof(fsdp_seg), &list);
    if (status) return status;
    fsdp_seg *seg = (fsdp_seg *)list;
    for (int i = 0; i < num; i++) {
        int64_t src = ((const char *)parts[i]->src_ptr - (const char *)op->src_ptr) / src_size,
                dst = ((const char *)parts[i]->dst_ptr - (const char *)op->dst_ptr) / dst_size;
        for (uint32_t k = 0; k < parts[i]->list_count; k++, seg++) {
            *seg = ((const fsdp_seg *)parts[i]->list)[k];
            seg->shard += gathers ? src : dst;
            seg->full += gathers ? dst : src;
        }
    }
    op->list = list;
    return FSDP_OK;
}

/* Makes one range of all ranges, from the first one on. In a dry run with buffers without memory
   they are not adjacent yet: only the sizes of the slots count, which fsdpi_plan_make_adjacent
   makes adjacent. */
static void fsdpi_plan_join_ranges(const fsdpi_plan_tape *raw, const int32_t *which, fsdp_op *op,
                                   const fsdp_op *const *parts, int num) {
    int64_t span = 0;
    for (int i = 0; i + 1 < num; i++) span += raw->uses[raw->pairs[which[i]].dst].bytes;
    op->count = (uint64_t)span / fsdp_dtype_size(op->dtype) + parts[num - 1]->count;
}

static fsdp_status fsdpi_plan_add_use(fsdp_plan *p, fsdpi_plan_tape *t, const fsdp_op *of,
                                      fsdpi_plan_pair pair, int writes) {
    fsdp_op op;
    if ((writes ? pair.dst : pair.src) < 0) return FSDP_OK;
    fsdp_op_init(&op, p->model, of->unit, FSDP_OP_WAIT, of->label, of->stream);
    op.src = writes ? NULL : of->src;
    op.dst = writes ? of->dst : NULL;
    pair.src = writes ? -1 : pair.src;
    pair.dst = writes ? pair.dst : -1;
    return fsdpi_plan_add_op(p, t, &op, pair);
}

// Notes the members of a bucketed op.
static fsdp_status fsdpi_plan_add_group(fsdp_plan *p, fsdpi_plan_tape *t,
                                        const fsdpi_plan_tape *raw, const int32_t *which, int num) {
    fsdpi_plan_group group = {t->num_ops - 1, t->num_members, num};
    fsdp_status status = fsdpi_plan_grow(p->model, (void **)&t->groups, t->num_groups,
                                         &t->cap_groups, sizeof group);
    if (!status) t->groups[t->num_groups++] = group;
    for (int i = 0; i < num && !status; i++) {
        fsdpi_plan_member member = {fsdpi_plan_index(raw->ops[which[i]].unit),
                                    raw->pairs[which[i]].src, raw->pairs[which[i]].dst};
        status = fsdpi_plan_grow(p->model, (void **)&t->members, t->num_members, &t->cap_members,
                                 sizeof member);
        if (!status) t->members[t->num_members++] = member;
    }
    return status;
}

/* Makes one collective of those of several units. If streams run at the same time, it waits for
   the buffers of all units, and later work on any of them waits for it. */
static fsdp_status fsdpi_plan_join(fsdp_plan *p, const fsdpi_plan_tape *raw, fsdpi_plan_tape *t,
                                   const int32_t *which, int num) {
    const fsdp_op *parts[FSDPI_PLAN_JOINED];
    fsdp_status status = FSDP_OK;
    for (int i = 0; i < num; i++) parts[i] = &raw->ops[which[i]];
    fsdp_op op = *parts[0];
    int several = p->mode_of_world != FSDP_RUN_INLINE, both = parts[0]->src == parts[0]->dst;
    status = fsdpi_plan_join_names(p, t, &op, parts, num);
    if (!status && op.kind != FSDP_OP_ALL_REDUCE)
        status = fsdpi_plan_join_lists(p, t, &op, parts, num);
    else if (!status) fsdpi_plan_join_ranges(raw, which, &op, parts, num);
    op.bytes = fsdpi_op_bytes(&op);
    for (int i = 1; i < num && several && !status; i++) {
        if (!both) status = fsdpi_plan_add_use(p, t, parts[i], raw->pairs[which[i]], 0);
        if (!status) status = fsdpi_plan_add_use(p, t, parts[i], raw->pairs[which[i]], 1);
    }
    if (!status) status = fsdpi_plan_add_op(p, t, &op, raw->pairs[which[0]]);
    if (!status) status = fsdpi_plan_add_group(p, t, raw, which, num);
    for (int i = 1; i < num && several && !status; i++)
        status = fsdpi_plan_add_use(p, t, parts[i], raw->pairs[which[i]], 1);
    return status;
}

// Merges ranges in stages: first each range does its work up to its next collective, then one
// collective follows for all ranges.
static fsdp_status fsdpi_plan_merge(fsdp_plan *p, const fsdpi_plan_tape *raw, fsdpi_plan_tape *t,
                                    fsdpi_plan_range *ranges, int num) {
    fsdp_status status = FSDP_OK;
    while (!status) {
        int32_t at[FSDPI_PLAN_JOINED];
        int waiting = 0;
        for (int i = 0; i < num && !status; i++) {
            fsdpi_plan_range *r = &ranges[i];
            for (; r->begin < r->end && !status; r->begin++) {
                if (fsdpi_plan_is_collective(raw->ops[r->begin].kind)) break;
                status = fsdpi_plan_add_op(p, t, &raw->ops[r->begin], raw->pairs[r->begin]);
            }
            if (r->begin < r->end) at[waiting++] = r->begin++;
        }
        if (!waiting || status) return status;
        if (waiting != num)
            return fsdp_fail(p->world, FSDP_ERR_INTERNAL,
                             "[E971] plan: %d of %d units that are joined have a collective",
                             waiting, num);
        status = fsdpi_plan_join(p, raw, t, at, num);
    }
    return status;
}

static fsdp_status fsdpi_plan_copy(fsdp_plan *p, const fsdpi_plan_tape *raw, fsdpi_plan_tape *t,
                                   int begin, int end) {
    fsdp_status status = FSDP_OK;
    for (int i = begin; i < end && !status; i++)
        status = fsdpi_plan_add_op(p, t, &raw->ops[i], raw->pairs[i]);
    return status;
}

// Returns the ops of an act. A deferred reduction begins with a WAIT that the caller does not need
// here: it is left out.
static fsdpi_plan_range fsdpi_plan_act_range(const fsdpi_plan_lowering *s, int act) {
    fsdpi_plan_range range = {s->acts[2 * act], s->acts[2 * act + 1]};
    while (s->choice->acts[act].what == FSDPI_PLAN_REDUCE && range.begin < range.end &&
           s->tape->ops[range.begin].kind == FSDP_OP_WAIT)
        range.begin++;
    return range;
}

static int fsdpi_plan_is_joined(const fsdpi_plan_act *a, const fsdpi_plan_act *b) {
    return a->group >= 0 && a->group == b->group && a->call == b->call && a->what == b->what &&
           (a->what == FSDPI_PLAN_GATHER || a->what == FSDPI_PLAN_REDUCE);
}

// Adds the acts of a call, beginning with *at: those before its own work, or those after it (late).
// Acts of one group are bucketed.
static fsdp_status fsdpi_plan_arrange_acts(const fsdpi_plan_lowering *s, fsdpi_plan_tape *t,
                                           int call, int *at, int late) {
    const fsdpi_plan_decisions *c = s->choice;
    fsdp_status status = FSDP_OK;
    while (*at < c->num_acts && c->acts[*at].call == call && !status &&
           fsdpi_plan_is_late(&c->acts[*at]) == late) {
        fsdpi_plan_range ranges[FSDPI_PLAN_JOINED];
        const fsdpi_plan_act *first = &c->acts[*at];
        int num = 0;
        do ranges[num++] = fsdpi_plan_act_range(s, (*at)++);
        while (num < FSDPI_PLAN_JOINED && *at < c->num_acts &&
               fsdpi_plan_is_joined(first, &c->acts[*at]));
        status = num > 1 ? fsdpi_plan_merge(s->plan, s->tape, t, ranges, num)
                         : fsdpi_plan_copy(s->plan, s->tape, t, ranges[0].begin, ranges[0].end);
    }
    return status;
}

// Sets, for each use of a slot, the range of ops during which it is held.
static void fsdpi_plan_measure(fsdpi_plan_tape *t) {
    for (int i = 0; i < t->num_uses; i++) t->uses[i].from = t->uses[i].to = t->num_ops;
    for (int i = 0; i < t->num_ops; i++) {
        const fsdpi_plan_pair *pair = &t->pairs[i];
        if (t->ops[i].kind == FSDP_OP_ACQUIRE && pair->dst >= 0) t->uses[pair->dst].from = i;
        if (t->ops[i].kind == FSDP_OP_RELEASE && pair->src >= 0) t->uses[pair->src].to = i;
    }
}

// Makes the ranges of a bucketed all_reduce adjacent.
static void fsdpi_plan_make_adjacent(fsdpi_plan_tape *t) {
    for (int g = 0; g < t->num_groups; g++) {
        const fsdpi_plan_member *member = &t->members[t->groups[g].members];
        if (t->ops[t->groups[g].op].kind != FSDP_OP_ALL_REDUCE) continue;
        for (int i = 0; i + 1 < t->groups[g].num_members; i++) {
            t->uses[member[i].dst].next_adjacent = member[i + 1].dst;
            t->uses[member[i + 1].dst].is_adjacent = 1;
        }
    }
}

/* Makes a tape from a dry run, in the order of execution. The tape has the uses of the dry run. */
static fsdp_status fsdpi_plan_arrange(const fsdpi_plan_lowering *s, fsdpi_plan_tape *t) {
    const fsdpi_plan_tape *raw = s->tape;
    int num_calls = s->kind->num_calls, at = 0;
    fsdp_status status = fsdpi_plan_tape_new(s->plan, t, num_calls);
    for (int i = 0; i < raw->num_uses && !status; i++) {
        status = fsdpi_plan_grow(s->plan->model, (void **)&t->uses, i, &t->cap_uses,
                                 sizeof *t->uses);
        if (!status) t->uses[t->num_uses++] = raw->uses[i];
    }
    for (int i = 0; i < num_calls && !status; i++) {
        t->ops_at[i] = t->num_ops;
        t->states_at[i] = t->num_states;
        t->storage[i] = raw->storage[i];
        if (i + 1 == num_calls) break; // the core runs finalize
        fsdpi_plan_pair none = {-1, -1};
        status = fsdpi_plan_add_op(s->plan, t, &raw->hooks[i], none);
        if (!status && s->choice) status = fsdpi_plan_arrange_acts(s, t, i, &at, 0);
        if (!status) status = fsdpi_plan_copy(s->plan, raw, t, raw->own[i], raw->own_end[i]);
        if (!status && s->choice) status = fsdpi_plan_arrange_acts(s, t, i, &at, 1);
        for (int k = raw->states_at[i]; k < raw->states_at[i + 1] && !status; k++)
            status = fsdpi_plan_add_state(s->plan, t, raw->states[k].unit, &raw->states[k].saved);
    }
    if (status) return status;
    t->ops_at[num_calls] = t->num_ops;
    t->states_at[num_calls] = t->num_states;
    for (int i = 0, group = 0; i < num_calls; i++) {
        fsdpi_plan_step *step = &t->steps[i];
        step->unit = s->kind->calls[i].unit;
        step->call = s->kind->calls[i].call;
        step->ops = t->ops + t->ops_at[i];
        step->num_ops = t->ops_at[i + 1] - t->ops_at[i];
        step->num_states = t->states_at[i + 1] - t->states_at[i];
        if (step->num_states) step->states = t->states + t->states_at[i];
        const int first = group;
        while (group < t->num_groups && t->groups[group].op < t->ops_at[i + 1]) group++;
        step->num_joined = group - first;
        if (step->num_joined) step->joined = t->groups + first;
    }
    fsdpi_plan_measure(t);
    fsdpi_plan_make_adjacent(t);
    return status;
}

#endif // FSDPI_PLAN_JOIN_H
