/* plan/passes.h - decisions: what is gathered together, kept, gathered ahead, reduced together

   The passes, which make fsdpi_plan_decisions. A pass is a function of the eager step; no pass
   reads a clock. A span is the time in which a unit needs its parameters: from the pre_* call that
   gathers eagerly to the call that frees eagerly. An item is gathered in one collective: a unit, or
   several that are always used one after the other.
   Callers: make.h (fsdpi_plan_find_spans).

   A part of fsdp_plan.h. SPDX-License-Identifier: MIT (full text at the end of fsdp.h) */
#ifndef FSDP_PLAN_H
#include "../../fsdp_plan.h"
#endif
#ifndef FSDPI_PLAN_PASSES_H
#define FSDPI_PLAN_PASSES_H

#include "memory.h"
#include "objects.h"
#include "tape.h"

#include <string.h>

typedef struct fsdpi_plan_span {
    int32_t owner;      // unit, or item
    int32_t begin, end; // indices of calls
    int32_t next;       // the owner's next span; -1: none
    int32_t kept;       // 1: not freed until the next span
    int32_t first, num; // an item's spans of units
} fsdpi_plan_span;

typedef struct fsdpi_plan_facts {
    const fsdpi_plan_variant *kind;
    int32_t num_units, num_calls;
    uint8_t *managed;       // [units] 1: acts may gather and free it
    fsdpi_plan_span *spans; // units' spans, sorted by begin
    int32_t num_spans, cap_spans;
    int64_t *base;                     // [calls] bytes of slots that no pass decides about
    int64_t *bytes;                    // [units] bytes of a gathered slot
    uint64_t *gathers, *reduces;       // [units] join key; equal ones can be bucketed; 0: cannot be
    int32_t *posts, *post, *last_call; // [units] number of post_backward calls; last one; last call
    int32_t *item;                     // [units] index of its item
    int64_t *item_bytes;               // [items]
    int32_t num_items;
    fsdpi_plan_span *item_spans;
    int32_t num_item_spans, cap_item_spans;
    int32_t *order; // [units] scratch
} fsdpi_plan_facts;

static void fsdpi_plan_facts_end(fsdp_plan *p, fsdpi_plan_facts *f) {
    void *const lists[] = {f->managed, f->spans,      f->base,     f->bytes, f->gathers,
                           f->reduces, f->posts,      f->post,     f->item,  f->item_bytes,
                           f->order,   f->item_spans, f->last_call};
    for (size_t i = 0; i < sizeof lists / sizeof *lists; i++) fsdpi_plan_free(p->model, lists[i]);
    memset(f, 0, sizeof *f);
}

static fsdp_status fsdpi_plan_facts_new(fsdp_plan *p, const fsdpi_plan_variant *k,
                                        fsdpi_plan_facts *f) {
    int32_t **const numbers[] = {&f->posts, &f->post, &f->item, &f->order, &f->last_call};
    int64_t **const sizes[] = {&f->bytes, &f->item_bytes};
    uint64_t **const hashes[] = {&f->gathers, &f->reduces};
    size_t units = (size_t)p->num_units;
    f->kind = k;
    f->num_units = p->num_units;
    f->num_calls = k->num_calls;
    fsdp_status status = fsdpi_plan_alloc(p->model, units, (void **)&f->managed);
    if (!status) status = fsdpi_plan_alloc(p->model, (size_t)f->num_calls * 8, (void **)&f->base);
    for (int i = 0; i < 5 && !status; i++)
        status = fsdpi_plan_alloc(p->model, units * sizeof(int32_t), (void **)numbers[i]);
    for (int i = 0; i < 2 && !status; i++)
        status = fsdpi_plan_alloc(p->model, units * sizeof(int64_t), (void **)sizes[i]);
    for (int i = 0; i < 2 && !status; i++)
        status = fsdpi_plan_alloc(p->model, units * sizeof(uint64_t), (void **)hashes[i]);
    return status;
}

// Returns a hash of a collective's properties that must be equal in a bucket.
static uint64_t fsdpi_plan_join_key(const fsdp_op *op, const fsdpi_plan_pair *pair) {
    uint64_t h = fsdpi_plan_mix(op->kind, (uint64_t)(uintptr_t)op->comm);
    h = fsdpi_plan_mix(h, (uint64_t)op->dtype << 24 | (uint64_t)op->out_dtype << 16 |
                              (uint64_t)op->in_place << 8 | op->redop);
    h = fsdpi_plan_mix(fsdpi_plan_mix(h, fsdpi_plan_bits(op->scale)), fsdpi_plan_bits(op->factor));
    h = fsdpi_plan_mix(h, op->accumulate);
    h = fsdpi_plan_mix(h, pair->src < 0 ? (uint64_t)(uintptr_t)op->src : 0);
    return fsdpi_plan_mix(h, pair->dst < 0 ? (uint64_t)(uintptr_t)op->dst : 0);
}

// Finds how units gather. A unit's gathers must have equal keys, and no function of the user.
static void fsdpi_plan_find_gathers(fsdpi_plan_facts *f, const fsdpi_plan_tape *t) {
    for (int i = 0; i < t->num_ops; i++) {
        const fsdp_op *op = &t->ops[i];
        int u = fsdpi_plan_index(op->unit);
        if (u < 0) continue;
        if (op->kind == FSDP_OP_CALL && op->label == FSDP_LABEL_GRAD_HOOK) f->managed[u] = 0;
        if (op->label == FSDP_LABEL_PRE_GATHER || op->label == FSDP_LABEL_POST_GATHER ||
            (op->custom && op->label == FSDP_LABEL_GATHER))
            f->gathers[u] = 1; // equal to none
        if (op->kind != FSDP_OP_ALL_GATHER || op->label != FSDP_LABEL_GATHER) continue;
        uint64_t sort = fsdpi_plan_join_key(op, &t->pairs[i]);
        if (!f->gathers[u]) f->gathers[u] = sort;
        else if (f->gathers[u] != sort) f->gathers[u] = 1;
    }
    for (int u = 0; u < f->num_units; u++)
        if (f->gathers[u] == 1) f->gathers[u] = 0;
}

// Finds how units reduce in post_backward. The key includes accumulate: a bucket adds all or none.
static void fsdpi_plan_find_reduces(fsdpi_plan_facts *f, const fsdpi_plan_tape *t) {
    for (int k = 0; k + 1 < f->num_calls; k++) {
        const fsdpi_plan_call *call = &f->kind->calls[k];
        uint64_t sort = 0;
        int joins = 1;
        if (call->index >= 0) f->last_call[call->index] = k;
        if (call->call != FSDP_CALL_POST_BACKWARD) continue;
        f->posts[call->index]++;
        f->post[call->index] = k;
        for (int i = t->own[k]; i < t->own_end[k]; i++) {
            const fsdp_op *op = &t->ops[i];
            if (op->kind == FSDP_OP_CALL || op->custom) joins = 0;
            if (op->kind == FSDP_OP_ALL_REDUCE && t->pairs[i].dst < 0) joins = 0; // elsewhere
            if (fsdpi_plan_is_collective(op->kind) && op->label != FSDP_LABEL_GATHER)
                sort = fsdpi_plan_mix(sort, fsdpi_plan_join_key(op, &t->pairs[i]));
        }
        f->reduces[call->index] = joins && !t->holds[k] ? sort : 0;
    }
}

// Finds the units' spans, and which of them acts may gather and free.
static fsdp_status fsdpi_plan_find_spans(fsdp_plan *p, fsdpi_plan_facts *f,
                                         const fsdpi_plan_tape *t) {
    fsdp_status status = FSDP_OK;
    for (int u = 0; u < f->num_units; u++) {
        f->order[u] = -1; // the open span of unit u; -1: none
        f->managed[u] = !t->held[u];
    }
    for (int i = 0; i < t->num_uses; i++)
        if (t->uses[i].pool == FSDP_POOL_GATHER) f->bytes[t->uses[i].unit] = t->uses[i].bytes;
    for (int k = 0; k + 1 < f->num_calls && !status; k++) {
        const fsdpi_plan_call *call = &f->kind->calls[k];
        int u = call->index,
            begins = call->call == FSDP_CALL_PRE_FORWARD || call->call == FSDP_CALL_PRE_BACKWARD;
        if (call->call >= FSDP_CALL_UNSHARD || t->storage[k] == FSDP_STORAGE_SHARDED_POST_FORWARD ||
            (begins && t->storage[k] != FSDP_STORAGE_UNSHARDED) || f->bytes[u] == 0)
            f->managed[u] = 0;
        if (begins && f->order[u] < 0) {
            fsdpi_plan_span span = {u, k, f->num_calls, -1, 0, 0, 0};
            status = fsdpi_plan_grow(p->model, (void **)&f->spans, f->num_spans, &f->cap_spans,
                                     sizeof span);
            if (status) break;
            f->order[u] = f->num_spans;
            f->spans[f->num_spans++] = span;
        }
        if (t->storage[k] == FSDP_STORAGE_SHARDED && f->order[u] >= 0) {
            f->spans[f->order[u]].end = k;
            f->order[u] = -1;
        }
    }
    fsdpi_plan_find_gathers(f, t);
    fsdpi_plan_find_reduces(f, t);
    // A slot that outlasts the step has its own memory, at a different distance on each rank.
    for (int i = 0; i < f->num_spans; i++)
        if (f->spans[i].end >= f->num_calls) f->gathers[f->spans[i].owner] = 0;
    int kept = 0;
    for (int i = 0; i < f->num_spans; i++)
        if (f->managed[f->spans[i].owner]) f->spans[kept++] = f->spans[i];
    f->num_spans = kept;
    return status;
}

// Finds the bytes of slots at each call that no pass decides about: the maximum over its ops.
static void fsdpi_plan_find_base(fsdpi_plan_facts *f, const fsdpi_plan_tape *t) {
    int64_t now = 0;
    for (int k = 0; k < f->num_calls; k++) {
        f->base[k] = now;
        for (int i = t->ops_at[k]; i < t->ops_at[k + 1] && k + 1 < f->num_calls; i++) {
            const fsdpi_plan_pair *pair = &t->pairs[i];
            int use = t->ops[i].kind == FSDP_OP_ACQUIRE   ? pair->dst
                      : t->ops[i].kind == FSDP_OP_RELEASE ? pair->src
                                                          : -1;
            if (use < 0 || (t->uses[use].pool == FSDP_POOL_GATHER && f->managed[t->uses[use].unit]))
                continue;
            now += t->ops[i].kind == FSDP_OP_ACQUIRE ? t->uses[use].bytes : -t->uses[use].bytes;
            if (now > f->base[k]) f->base[k] = now;
        }
    }
}

/* -------------------------------------------------------------------------------------------- */
// The pass `bucket`.

// Returns 1 if every span of one unit directly precedes or follows one of the other, and is never
// inside it.
static int fsdpi_plan_are_neighbours(const fsdpi_plan_facts *f, int a, int b) {
    int pairs = 0, ended = -1; // ended: the last call of the pair of spans before
    for (int i = 0; i < f->num_spans; i++) {
        const fsdpi_plan_span *span = &f->spans[i];
        if (span->owner != a && span->owner != b) continue;
        if (i + 1 == f->num_spans || span[1].owner != (span->owner == a ? b : a) ||
            span->end >= span[1].begin || span->begin <= ended)
            return 0;
        ended = span[1].end;
        pairs++;
        i++;
    }
    return pairs > 0;
}

// Makes one item of each group of neighbours that gather with equal keys.
static void fsdpi_plan_pass_bucket_gathers(const fsdp_plan *p, fsdpi_plan_facts *f, int on) {
    int64_t cap = p->desc.first_bucket_bytes;
    int last = -1, members = 0;
    f->num_items = 0;
    for (int u = 0; u < f->num_units; u++) f->item[u] = -1;
    for (int i = 0; i < f->num_spans; i++) { // in the order of first use
        int u = f->spans[i].owner;
        if (f->item[u] >= 0) continue;
        int joins = on && last >= 0 && f->item_bytes[f->num_items - 1] < cap &&
                    members < FSDPI_PLAN_JOINED && f->gathers[u] &&
                    f->gathers[u] == f->gathers[last] && fsdpi_plan_are_neighbours(f, last, u);
        if (!joins) {
            if (last >= 0) cap = p->desc.bucket_bytes;
            f->item_bytes[f->num_items++] = 0;
            members = 0;
        }
        f->item[u] = f->num_items - 1;
        f->item_bytes[f->item[u]] += f->bytes[u];
        members++;
        last = u;
    }
}

static fsdp_status fsdpi_plan_item_spans(fsdp_plan *p, fsdpi_plan_facts *f) {
    fsdp_status status = FSDP_OK;
    f->num_item_spans = 0;
    for (int i = 0; i < f->num_spans && !status;) {
        const fsdpi_plan_span *first = &f->spans[i];
        fsdpi_plan_span span = {f->item[first->owner], first->begin, first->end, -1, 0, i, 0};
        int members = 0;
        for (int u = 0; u < f->num_units; u++) members += f->item[u] == span.owner;
        for (; span.num < members; span.num++, i++)
            if (f->spans[i].end > span.end) span.end = f->spans[i].end;
        status = fsdpi_plan_grow(p->model, (void **)&f->item_spans, f->num_item_spans,
                                 &f->cap_item_spans, sizeof span);
        for (int k = f->num_item_spans - 1; k >= 0 && !status; k--)
            if (f->item_spans[k].owner == span.owner) {
                f->item_spans[k].next = f->num_item_spans;
                break;
            }
        if (!status) f->item_spans[f->num_item_spans++] = span;
    }
    return status;
}

/* -------------------------------------------------------------------------------------------- */
// The pass `keep`, Belady's rule: the future is known, so the item that is needed last is freed.

static int fsdpi_plan_farthest(const fsdpi_plan_facts *f, const int32_t *at, int call) {
    int best = -1;
    for (int i = 0; i < f->num_items; i++) {
        const fsdpi_plan_span *span = at[i] >= 0 ? &f->item_spans[at[i]] : NULL;
        if (!span || span->end >= call) continue; // not gathered, or open
        if (best >= 0) {
            int next = f->item_spans[span->next].begin,
                other = f->item_spans[f->item_spans[at[best]].next].begin;
            if (next < other) continue; // never equal: a call begins one item's span
        }
        best = i;
    }
    return best;
}

/* Chooses the spans that are kept until the next one, so that no call holds more than `most`
   bytes, if that is enough for open units. Sets *worst to the call that holds most. */
static void fsdpi_plan_pass_keep(fsdpi_plan_facts *f, uint32_t passes, int64_t most, int *worst) {
    int on = (passes & 1u << FSDP_PASS_KEEP) != 0, shares = (passes & 1u << FSDP_PASS_ARENA) != 0;
    int32_t *at = f->order;      // [items] newest span of a gathered item; -1
    int64_t peak = -1, base = 0; // base: of slots that share no memory, the most at any call
    int next = 0;
    for (int k = 0; k + 1 < f->num_calls && !shares; k++)
        if (f->base[k] > base) base = f->base[k];
    for (int i = 0; i < f->num_items; i++) at[i] = -1;
    for (int k = 0; k + 1 < f->num_calls; k++) {
        int64_t now = shares ? f->base[k] : base;
        if (next < f->num_item_spans && f->item_spans[next].begin == k) {
            at[f->item_spans[next].owner] = next;
            next++;
        }
        for (int i = 0; i < f->num_items; i++) now += at[i] >= 0 ? f->item_bytes[i] : 0;
        for (int i; now > most && (i = fsdpi_plan_farthest(f, at, k)) >= 0;) {
            now -= f->item_bytes[i];
            f->item_spans[at[i]].kept = 0;
            at[i] = -1;
        }
        if (now > peak) *worst = k;
        if (now > peak) peak = now;
        for (int i = 0; i < f->num_items; i++) {
            fsdpi_plan_span *span = at[i] >= 0 ? &f->item_spans[at[i]] : NULL;
            if (!span || span->end != k) continue;
            span->kept = on && span->next >= 0;
            if (!span->kept) at[i] = -1;
        }
    }
}

/* -------------------------------------------------------------------------------------------- */
// From spans to acts.

static fsdp_status fsdpi_plan_act_add(fsdp_plan *p, fsdpi_plan_decisions *c, int call, int what,
                                      int late, int unit, int group, int why, int at) {
    fsdpi_plan_act act;
    fsdp_status status = fsdpi_plan_grow(p->model, (void **)&c->acts, c->num_acts, &c->cap_acts,
                                         sizeof act);
    memset(&act, 0, sizeof act);
    act.call = call;
    act.what = (uint8_t)what;
    act.late = (uint8_t)late;
    act.unit = unit;
    act.group = group;
    act.why = (uint8_t)why;
    act.at = at;
    if (!status) c->acts[c->num_acts++] = act;
    return status;
}

// Returns the limit for gathers ahead. A unit is gathered once at a time, so at most all others can
// be outstanding.
static int fsdpi_plan_most_ahead(const fsdpi_plan_facts *f, int ahead) {
    return ahead < f->num_units ? ahead : f->num_units - 1;
}

// Issues gathers in order. Each follows the own work of the call that needs the gather `ahead`
// places before it, or the first gather.
static fsdp_status fsdpi_plan_pass_ahead(fsdp_plan *p, const fsdpi_plan_facts *f, int ahead,
                                         fsdpi_plan_decisions *c) {
    int32_t *gather = f->order, num = 0, last = 0; // spans of the last `ahead` + 1 gathers
    fsdp_status status = FSDP_OK;
    ahead = fsdpi_plan_most_ahead(f, ahead);
    for (int i = 0; i < f->num_item_spans && !status; i++) {
        const fsdpi_plan_span *span = &f->item_spans[i];
        int issued = span->begin, freed = -1, is_kept = 0, why = FSDPI_PLAN_WHY_DEMAND;
        for (int k = 0; k < i; k++)
            if (f->item_spans[k].next == i) {
                is_kept = f->item_spans[k].kept;
                freed = f->item_spans[k].end;
            }
        if (is_kept) continue;
        gather[num % f->num_units] = i;
        if (ahead > 0 && num > 0)
            issued = f->item_spans[gather[num < ahead ? 0 : (num - ahead) % f->num_units]].begin;
        if (issued < freed) issued = freed;
        if (issued < last) issued = last;
        if (issued > span->begin) issued = span->begin;
        last = issued;
        num++;
        int late = issued < span->begin;
        if (span->num > 1) why = FSDPI_PLAN_WHY_JOINED;
        if (late) why = FSDPI_PLAN_WHY_AHEAD;
        for (int k = 0; k < span->num && !status; k++)
            status = fsdpi_plan_act_add(p, c, issued, FSDPI_PLAN_GATHER, late,
                                        f->spans[span->first + k].owner, span->num > 1 ? i : -1,
                                        why, span->begin);
    }
    return status;
}

// Ends each span that finalize does not free with an act: KEEP until the next use, or FREE.
static fsdp_status fsdpi_plan_free_acts(fsdp_plan *p, const fsdpi_plan_facts *f,
                                        fsdpi_plan_decisions *c) {
    fsdp_status status = FSDP_OK;
    for (int i = 0; i < f->num_item_spans && !status; i++) {
        const fsdpi_plan_span *span = &f->item_spans[i];
        int next = span->next >= 0 ? f->item_spans[span->next].begin : -1;
        for (int k = 0; k < span->num && !status; k++) {
            const fsdpi_plan_span *one = &f->spans[span->first + k];
            if (one->end >= f->num_calls) continue; // finalize frees it
            int why = span->kept ? FSDPI_PLAN_WHY_NEXT_USE
                      : next < 0 ? FSDPI_PLAN_WHY_LAST_USE
                                 : FSDPI_PLAN_WHY_FARTHEST;
            status = fsdpi_plan_act_add(p, c, one->end,
                                        span->kept ? FSDPI_PLAN_KEEP : FSDPI_PLAN_FREE, 1,
                                        one->owner, -1, why, next);
        }
    }
    return status;
}

// Buckets consecutive units that each have one post_backward and no later call: the pass `bucket`
// for reductions. Their reductions wait for that of the last unit.
static fsdp_status fsdpi_plan_pass_bucket_reductions(fsdp_plan *p, const fsdpi_plan_facts *f,
                                                     fsdpi_plan_decisions *c) {
    int32_t *bucket = f->order, num = 0, first_bucket = 1;
    int64_t bytes = 0;
    fsdp_status status = FSDP_OK;
    for (int k = 0; k < f->num_calls && !status; k++) {
        const fsdpi_plan_call *call = &f->kind->calls[k];
        int u = call->index, is_post = call->call == FSDP_CALL_POST_BACKWARD;
        int waits = is_post && f->posts[u] == 1 && f->last_call[u] == k && f->reduces[u] != 0;
        int fits = waits && (!num || f->reduces[u] == f->reduces[bucket[0]]);
        int64_t cap = first_bucket ? p->desc.first_bucket_bytes : p->desc.bucket_bytes;
        if (num && ((is_post && !fits) || bytes >= cap || num == FSDPI_PLAN_JOINED ||
                    k + 1 == f->num_calls)) {
            for (int i = 0; i < num && num > 1 && !status; i++) {
                int last = f->post[bucket[num - 1]];
                c->waits[bucket[i]] = 1;
                status = fsdpi_plan_act_add(p, c, f->post[bucket[i]], FSDPI_PLAN_COLLECT, 1,
                                            bucket[i], -1, FSDPI_PLAN_WHY_JOINED, last);
                if (!status)
                    status = fsdpi_plan_act_add(p, c, last, FSDPI_PLAN_REDUCE, 1, bucket[i],
                                                bucket[0], FSDPI_PLAN_WHY_JOINED,
                                                f->post[bucket[i]]);
            }
            num = 0;
            bytes = 0;
            first_bucket = 0;
            fits = waits;
        }
        if (!fits) continue;
        bucket[num++] = u;
        bytes += fsdpi_plan_slot_bytes(call->unit, FSDP_POOL_GRAD);
    }
    return status;
}

// Lets only the last post_backward of a unit reduce; earlier ones accumulate: the pass `once`.
static fsdp_status fsdpi_plan_pass_once(fsdp_plan *p, const fsdpi_plan_facts *f,
                                        fsdpi_plan_decisions *c) {
    fsdp_status status = FSDP_OK;
    for (int k = 0; k < f->num_calls && !status; k++) {
        const fsdpi_plan_call *call = &f->kind->calls[k];
        int u = call->index, post = k;
        if (call->call != FSDP_CALL_PRE_BACKWARD || f->posts[u] < 2 || !f->reduces[u]) continue;
        while (post < f->num_calls && (f->kind->calls[post].index != u ||
                                       f->kind->calls[post].call != FSDP_CALL_POST_BACKWARD))
            post++;
        c->sync[k] = post >= f->post[u];
        if (!c->sync[k])
            status = fsdpi_plan_act_add(p, c, post, FSDPI_PLAN_COLLECT, 1, u, -1,
                                        FSDPI_PLAN_WHY_ONCE, f->post[u]);
    }
    return status;
}

static int fsdpi_plan_act_order(const fsdpi_plan_act *a) { // within a call
    return a->what == FSDPI_PLAN_GATHER ? (a->late ? 5 : 0) : a->what;
}

static void fsdpi_plan_sort_acts(fsdpi_plan_decisions *c) { // stable: insertion, nearly sorted
    for (int i = 1; i < c->num_acts; i++) {
        fsdpi_plan_act act = c->acts[i];
        int k = i;
        for (; k > 0; k--) {
            const fsdpi_plan_act *before = &c->acts[k - 1];
            if (before->call < act.call ||
                (before->call == act.call &&
                 fsdpi_plan_act_order(before) <= fsdpi_plan_act_order(&act)))
                break;
            c->acts[k] = *before;
        }
        c->acts[k] = act;
    }
}

static void fsdpi_plan_decisions_end(fsdp_plan *p, fsdpi_plan_decisions *c) {
    fsdpi_plan_free(p->model, c->acts);
    fsdpi_plan_free(p->model, c->managed);
    fsdpi_plan_free(p->model, c->waits);
    fsdpi_plan_free(p->model, c->sync);
    memset(c, 0, sizeof *c);
}

static fsdp_status fsdpi_plan_decisions_new(fsdp_plan *p, fsdpi_plan_decisions *c, int num_calls) {
    memset(c, 0, sizeof *c);
    fsdp_status status = fsdpi_plan_alloc(p->model, (size_t)p->num_units, (void **)&c->managed);
    if (!status) status = fsdpi_plan_alloc(p->model, (size_t)p->num_units, (void **)&c->waits);
    if (!status) status = fsdpi_plan_alloc(p->model, (size_t)num_calls, (void **)&c->sync);
    if (!status) memset(c->sync, -1, (size_t)num_calls);
    return status;
}

// Makes all decisions, so that slots need at most `most` bytes. Sets *worst to the call that needs
// most.
static fsdp_status fsdpi_plan_decide(fsdp_plan *p, fsdpi_plan_facts *f, uint32_t passes,
                                     int64_t most, fsdpi_plan_decisions *c, int *worst) {
    int buckets = passes & 1u << FSDP_PASS_BUCKET && p->desc.bucket_bytes > 0;
    int ahead = passes & 1u << FSDP_PASS_AHEAD ? p->desc.ahead : 0;
    int64_t largest = 0;
    fsdp_status status = fsdpi_plan_decisions_new(p, c, f->num_calls);
    if (status) return status;
    if (p->mode_of_world != FSDP_RUN_INLINE) passes &= ~(1u << FSDP_PASS_ARENA);
    memcpy(c->managed, f->managed, (size_t)p->num_units);
    fsdpi_plan_pass_bucket_gathers(p, f, buckets);
    status = fsdpi_plan_item_spans(p, f);
    for (int i = 0; i < f->num_items; i++)
        if (f->item_bytes[i] > largest) largest = f->item_bytes[i];
    fsdpi_plan_pass_keep(f, passes, most - fsdpi_plan_most_ahead(f, ahead) * largest, worst);
    if (!status) status = fsdpi_plan_pass_ahead(p, f, ahead, c);
    if (!status) status = fsdpi_plan_free_acts(p, f, c);
    if (!status && passes & 1u << FSDP_PASS_ONCE) status = fsdpi_plan_pass_once(p, f, c);
    if (!status && buckets) status = fsdpi_plan_pass_bucket_reductions(p, f, c);
    if (!status) fsdpi_plan_sort_acts(c);
    return status;
}

#endif // FSDPI_PLAN_PASSES_H
