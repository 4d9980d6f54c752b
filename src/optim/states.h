/* optim/states.h - the states of an optimizer, and which elements a step updates

   An optimizer's memory, and the elements that a step updates. Invariants: the table is in address
   order, and states lie in table order without padding. If the shards of two neighbours touch,
   their gradients and states touch as well, so one run covers both. Table and states fit the
   model's layout unless `moved` is set.
   Callers: ema.h (fsdpi_optim_create), muon.h (fsdpi_optim_create), adamw_sgd.h
     (fsdpi_optim_create) and others.

   A part of fsdp_optim.h. SPDX-License-Identifier: MIT (full text at the end of fsdp.h) */
#ifndef FSDP_OPTIM_H
#include "../../fsdp_optim.h"
#endif
#ifndef FSDPI_OPTIM_STATES_H
#define FSDPI_OPTIM_STATES_H

#include "../base/float.h"
#include "kernels.h"
#include "updates.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

typedef struct fsdpi_optim_param {
    fsdp_unit *unit;
    int32_t index, ordinal; // index in the unit; ordinal in the model
    int32_t group;
    fsdp_dtype dtype;
    int64_t numel; // elements of this rank's rows
    int64_t state; // offset of its state, in elements of the state's type
    int64_t step;  // number of updates so far
    char *shard;
} fsdpi_optim_param;

struct fsdp_optim {
    fsdp_model *model;
    fsdp_extension extension;
    const char *name;
    int mark; // of its parameters: FSDP_UPDATES_*
    fsdp_status (*step)(fsdp_optim *o, double lr);
    const char *state_names[2];
    const char *step_name;                  // NULL: updates do not depend on t
    int memory;                             // FSDP_MEMORY_HOST or _DEVICE, where updates run
    int place;                              // memory of states: `memory` or FSDP_MEMORY_PINNED
    int num_params, num_groups, num_states; // num_states: numbers per element
    int rounds;                             // 1: bf16 is rounded stochastically, from `seed`
    uint64_t seed;
    double weight_decay;                        // from the desc
    fsdp_optim_group groups[FSDP_OPTIM_GROUPS]; // resolved
    fsdp_optim_group_fn group;
    void *user;
    int moved;                         // 1: the model has a new layout since the table was made
    int laid;                          // number of tables made
    int warned;                        // 1: has warned that no parameter had a gradient
    fsdpi_optim_param *params, *spare; // spare: memory for the next table
    fsdp_update *updates;              // for one step: at most one per parameter
    char *held;                        // [ordinal] 1: frozen, but has a state
    char *states[2][2];                // [first, second][f32, f64], in one block
    int keeps_bits;                    // 1: the block can also save the 16-bit parameters
    char *bits;                        // saved 16-bit parameters
    int64_t bits_from;                 // first state of a 16-bit parameter
    int64_t state_bytes;               // bytes of the block
    int64_t nbytes;                    // bytes of host memory
    int64_t buffer_bytes;              // bytes of its fsdp_bufs
};

// Contiguous elements.
typedef struct fsdpi_optim_span {
    fsdpi_optim_param *first;
    char *grad;
    fsdp_dtype grad_dtype;
    int64_t numel, step;
} fsdpi_optim_span;

// Sets the kind and the scalars of a run's update.
typedef void (*fsdpi_optim_fn)(fsdp_optim *o, const fsdpi_optim_span *run, double lr,
                               fsdp_update *u);

static int fsdpi_optim_bad(double x, double below) {
    return fsdpi_is_nan(x) || x < 0 || !(x < below);
}

// A number that a caller passes, and its range.
#define FSDPI_OPTIM_FINITE 1.7976931348623157e308 // `below` of one that is finite
typedef struct fsdpi_optim_range {
    const char *field;
    double value, least, below;
} fsdpi_optim_range;

static fsdp_status fsdpi_optim_ranges(fsdp_world *w, const char *what, const fsdpi_optim_range *r,
                                      int num) {
    fsdp_status status = FSDP_OK;
    char text[32] = "";
    for (; num > 0 && !status; num--, r++) {
        if (!fsdpi_is_nan(r->value) && r->value >= r->least && r->value < r->below) continue;
        if (r->below < FSDPI_OPTIM_FINITE) snprintf(text, sizeof text, " and < %g", r->below);
        status = fsdp_fail(w, FSDP_ERR_INVALID_ARG,
                           "[E930] %s: %s is %g, expected a finite number >= %g%s", what, r->field,
                           r->value, r->least, text);
    }
    return status;
}

#define FSDPI_OPTIM_MAGIC 0x4F707469u // in a desc that fsdp_*_defaults has filled

static fsdp_status fsdpi_optim_begun(const fsdp_optim *o, fsdp_world *w, uint32_t magic) {
    if (magic == FSDPI_OPTIM_MAGIC) return FSDP_OK;
    return fsdp_fail(w, FSDP_ERR_INVALID_ARG,
                     "[E921] %s: the desc does not come from fsdp_%s_defaults(): begin with "
                     "fsdp_%s_defaults(), and change the fields that you need",
                     o->name, o->extension.name, o->extension.name);
}

// Copies a caller's group after checking it. `field` names it in texts.
static fsdp_status fsdpi_optim_take_group(fsdp_optim *o, fsdp_world *w, const char *what,
                                          const char *field, int k, const fsdp_optim_group *given) {
    fsdp_optim_group g = *given;
    char scale[64], decay[64];
    if (g.magic != FSDPI_OPTIM_MAGIC)
        return fsdp_fail(w, FSDP_ERR_INVALID_ARG,
                         "[E922] %s: %s does not come from fsdp_%s_defaults(): change the fields "
                         "of desc.groups[%d], and do not replace all of it",
                         what, field, o->extension.name, k);
    if (g.weight_decay <= FSDP_OPTIM_SAME && g.weight_decay >= FSDP_OPTIM_SAME)
        g.weight_decay = o->weight_decay;
    snprintf(scale, sizeof scale, "%s.lr_scale", field);
    snprintf(decay, sizeof decay, "%s.weight_decay", field);
    const fsdpi_optim_range ranges[] = {{scale, g.lr_scale, 0, FSDPI_OPTIM_FINITE},
                                        {decay, g.weight_decay, 0, FSDPI_OPTIM_FINITE}};
    fsdp_status status = fsdpi_optim_ranges(w, what, ranges, 2);
    if (!status) o->groups[k] = g;
    return status;
}

static fsdp_status fsdpi_optim_groups(fsdp_optim *o, fsdp_world *w, int num_groups,
                                      const fsdp_optim_group *groups, double weight_decay) {
    fsdp_status status = FSDP_OK;
    char field[32];
    if (num_groups < 0 || num_groups > FSDP_OPTIM_GROUPS)
        return fsdp_fail(w, FSDP_ERR_INVALID_ARG,
                         "[E931] %s: desc.num_groups is %d, expected 0..%d", o->name, num_groups,
                         FSDP_OPTIM_GROUPS);
    o->num_groups = num_groups ? num_groups : 1;
    o->weight_decay = weight_decay;
    o->groups[0].lr_scale = 1;
    o->groups[0].weight_decay = weight_decay;
    for (int i = 0; i < num_groups && !status; i++) {
        snprintf(field, sizeof field, "desc.groups[%d]", i);
        status = fsdpi_optim_take_group(o, w, o->name, field, i, &groups[i]);
    }
    return status;
}

static fsdp_status fsdpi_optim_agree_group(const fsdp_optim *o, int k) {
    const double group[] = {(double)k, o->groups[k].lr_scale, o->groups[k].weight_decay};
    return fsdp_agree(o->model, group, sizeof group);
}

// Compares the settings of an optimizer on all ranks.
static fsdp_status fsdpi_optim_agree(const fsdp_optim *o, const double *given, size_t nbytes) {
    fsdp_status status = fsdp_agree(o->model, given, (int64_t)nbytes);
    if (o->rounds && !status) status = fsdp_agree(o->model, &o->seed, sizeof o->seed);
    for (int i = 0; i < o->num_groups && !status; i++) status = fsdpi_optim_agree_group(o, i);
    return status;
}

// Writes the name of a call on an optimizer (NULL: "optim") for texts, as "adamw_state".
static void fsdpi_optim_what(const fsdp_optim *o, const char *verb, char what[32]) {
    snprintf(what, 32, "%s_%s", o ? o->extension.name : "optim", verb);
}

// Sets a group. The next step computes its scalars from it, even in a replay: a plan contains ops,
// but no updates.
FSDP_API fsdp_status fsdp_optim_set_group(fsdp_optim *o, int k, const fsdp_optim_group *group) {
    char what[32];
    fsdpi_optim_what(o, "set_group", what);
    if (!o || !group)
        return fsdp_fail_null(fsdp_model_world(o ? o->model : NULL), what,
                              "the optimizer or group");
    fsdp_world *w = fsdp_model_world(o->model);
    fsdp_status status = fsdp_world_status(w);
    if (status) return status;
    if (k < 0 || k >= o->num_groups)
        return fsdp_fail(w, FSDP_ERR_INVALID_ARG,
                         "[E924] %s: the optimizer has no group %d, expected 0..%d", what, k,
                         o->num_groups - 1);
    status = fsdpi_optim_take_group(o, w, what, "group", k, group);
    return status ? status : fsdpi_optim_agree_group(o, k);
}

static fsdpi_optim_param *fsdpi_optim_find(const fsdp_optim *o, int ordinal) {
    for (int i = 0; i < o->num_params; i++)
        if (o->params[i].ordinal == ordinal) return &o->params[i];
    return NULL;
}

// Makes the table of the current layout in address order. It contains parameters that require a
// gradient, those in the old table, whose state is kept while they are frozen, and those whose
// states a checkpoint has.
static fsdp_status fsdpi_optim_collect(const fsdp_optim *old, fsdp_optim *o, const char *what) {
    for (fsdp_dtype dtype = 1; dtype < FSDP_DTYPE_COUNT; dtype++) { // each dtype has its own block
        fsdp_param_view v = FSDP_ZERO;
        int begin = o->num_params;
        while (fsdp_next_param(o->model, &v)) {
            if (v.dtype != dtype) continue;
            const fsdpi_optim_param *known = fsdpi_optim_find(old, v.ordinal);
            if (!v.requires_grad && !known && !o->held[v.ordinal]) continue;
            int chosen = known ? known->group : o->group ? o->group(o->user, &v) : 0;
            if (chosen >= o->num_groups)
                return fsdp_fail(fsdp_model_world(o->model), FSDP_ERR_INVALID_ARG,
                                 "[E932] %s: the group of parameter '%s' of unit '%s' is %d, "
                                 "expected at most %d",
                                 what, v.name, fsdp_unit_label(v.unit), chosen, o->num_groups - 1);
            if (chosen < 0) continue;
            int at = o->num_params++;
            for (; at > begin && o->params[at - 1].shard > (char *)v.shard; at--)
                o->params[at] = o->params[at - 1];
            fsdpi_optim_param p = {v.unit,         v.index, v.ordinal, chosen,
                                   dtype,          v.numel, 0,         known ? known->step : 0,
                                   (char *)v.shard};
            o->params[at] = p;
        }
    }
    return FSDP_OK;
}

static int fsdpi_optim_wide(const fsdpi_optim_param *p) { return p->dtype == FSDP_F64; }

static size_t fsdpi_optim_size(int wide) { return wide ? sizeof(double) : sizeof(float); }

// Returns the number of elements for a row of states: each row begins at a multiple of 64 bytes.
static int64_t fsdpi_optim_room(int64_t numel) { return (numel + 15) / 16 * 16; }

// Allocates one zeroed block for all states: first and second numbers in f32, then those in f64.
static fsdp_status fsdpi_optim_alloc_states(fsdp_optim *o, const char *what) {
    int64_t numel[2] = {0, 0}, total = 0;
    o->state_bytes = 0;
    o->bits_from = 0;
    for (int i = 0; i < o->num_params; i++) { // f32 first: the states of 16-bit parameters are last
        fsdpi_optim_param *p = &o->params[i];
        p->state = numel[fsdpi_optim_wide(p)];
        numel[fsdpi_optim_wide(p)] += p->numel;
        if (p->dtype == FSDP_F32) o->bits_from += p->numel;
    }
    if (o->keeps_bits)
        total = fsdpi_optim_room(numel[0] - o->bits_from) * (int64_t)sizeof(uint16_t);
    for (int wide = 0; wide < 2; wide++)
        total += fsdpi_optim_room(numel[wide]) * (int64_t)fsdpi_optim_size(wide) * o->num_states;
    if (total == 0) return FSDP_OK;
    char text[96];
    void *block;
    snprintf(text, sizeof text, "%s: no memory for a state", what);
    fsdp_status status = fsdp_alloc(o->model, o->place, total, text, &block);
    if (status) return status;
    char *at = (char *)block;
    o->state_bytes = total;
    for (int wide = 0; wide < 2; wide++)
        for (int k = 0; k < o->num_states; k++) {
            o->states[k][wide] = at;
            at += (size_t)fsdpi_optim_room(numel[wide]) * fsdpi_optim_size(wide);
        }
    o->bits = at;
    return FSDP_OK;
}

// Moves one state of one parameter. The host converts it if the model has been cast.
static fsdp_status fsdpi_optim_move_one(const fsdp_optim *old, const fsdpi_optim_param *from,
                                        const fsdp_optim *o, const fsdpi_optim_param *to, int k) {
    int was = fsdpi_optim_wide(from), is = fsdpi_optim_wide(to);
    size_t in_size = fsdpi_optim_size(was), out_size = fsdpi_optim_size(is);
    double in[512], out[512];
    const int64_t piece = (int64_t)(sizeof in / sizeof *in);
    fsdp_status status = FSDP_OK;
    if (to->numel == 0) return FSDP_OK;
    const char *src = old->states[k][was] + (size_t)from->state * in_size;
    char *dst = o->states[k][is] + (size_t)to->state * out_size;
    if (was == is)
        return fsdpi_optim_copy(o->model, o->place, dst, src, (size_t)to->numel * in_size);
    for (int64_t at = 0; at < to->numel && !status; at += piece) {
        size_t count = (size_t)(to->numel - at < piece ? to->numel - at : piece);
        status = fsdpi_optim_copy(o->model, o->place, in, src + (size_t)at * in_size,
                                  count * in_size);
        if (!status)
            status = fsdp_convert(out, is ? FSDP_F64 : FSDP_F32, in, was ? FSDP_F64 : FSDP_F32,
                                  (int64_t)count);
        if (!status)
            status = fsdpi_optim_copy(o->model, o->place, dst + (size_t)at * out_size, out,
                                      count * out_size);
    }
    return status;
}

static void *fsdpi_optim_bits(const fsdp_optim *o, const fsdpi_optim_param *p) {
    return o->bits + (size_t)(p->state - o->bits_from) * sizeof(uint16_t);
}

// Moves the states of all parameters to the new block.
static fsdp_status fsdpi_optim_move(const fsdp_optim *old, const fsdp_optim *o) {
    fsdp_status status = FSDP_OK;
    for (int i = 0; i < o->num_params; i++) {
        const fsdpi_optim_param *to = &o->params[i], *from = fsdpi_optim_find(old, to->ordinal);
        for (int k = 0; k < o->num_states && from && !status; k++)
            status = fsdpi_optim_move_one(old, from, o, to, k);
        if (o->keeps_bits && from && !status && fsdp_dtype_size(to->dtype) == sizeof(uint16_t) &&
            from->dtype == to->dtype && to->numel)
            status = fsdpi_optim_copy(o->model, o->place, fsdpi_optim_bits(o, to),
                                      fsdpi_optim_bits(old, from),
                                      (size_t)to->numel * sizeof(uint16_t));
    }
    return status;
}

// Makes table and states for the model's current layout. After a failure the old ones remain.
static fsdp_status fsdpi_optim_apply_layout(fsdp_optim *o, const char *what) {
    fsdp_model *m = o->model;
    if (!o->moved) return FSDP_OK;
    fsdp_optim old = *o, next = *o;
    int64_t before = fsdpi_optim_host_bytes(m);
    next.params = old.spare;
    next.spare = old.params;
    next.num_params = 0;
    next.moved = 0;
    next.laid++;
    memset(next.states, 0, sizeof next.states);
    fsdp_status status = fsdpi_optim_collect(&old, &next, what);
    if (!status) status = fsdpi_optim_alloc_states(&next, what);
    if (!status && o->place == FSDP_MEMORY_PINNED)
        status = fsdp_wait_stream(m, FSDP_STREAM_COMPUTE);
    if (!status) status = fsdpi_optim_move(&old, &next);
    if (status) {
        fsdp_free(m, next.place, next.states[0][0], next.state_bytes);
        return status;
    }
    fsdp_free(m, old.place, old.states[0][0], old.state_bytes); // no update is outstanding
    next.nbytes += fsdpi_optim_host_bytes(m) - before;
    *o = next;
    return FSDP_OK;
}

static void fsdpi_optim_relayout(void *user, fsdp_model *model) {
    (void)model;
    ((fsdp_optim *)user)->moved = 1; // the next use makes the table, since that may fail
}

// Describes item `index` for a checkpoint: a state of a parameter, or its t.
static fsdp_status fsdpi_optim_item(void *user, fsdp_model *model, int index,
                                    fsdp_state_item *item) {
    fsdp_optim *o = (fsdp_optim *)user;
    for (int i = 0; !item && i < o->num_params; i++) // a load writes steps in place
        if (o->params[i].step < 0)
            return fsdp_fail(fsdp_model_world(model), FSDP_ERR_INVALID_ARG,
                             "[E933] %s: the step of parameter %d is %lld, expected >= 0", o->name,
                             o->params[i].ordinal, (long long)o->params[i].step);
    if (!item) return FSDP_OK;
    // A query of sizes does not change averages. Other states begin as zeros for any caller.
    fsdp_status status = item->sizes_only && o->keeps_bits ? FSDP_OK
                                                           : fsdpi_optim_apply_layout(o, o->name);
    const int items = o->num_states + (o->step_name != NULL); // items of a parameter
    const int place = index / items, which = index % items;
    if (status || place >= o->num_params) return status;
    fsdpi_optim_param *p = &o->params[place];
    int wide = fsdpi_optim_wide(p);
    item->ordinal = p->ordinal;
    item->updates = o->mark;
    item->name = which < o->num_states ? o->state_names[which] : o->step_name;
    if (which == o->num_states) {
        item->dtype = FSDP_I64;
        item->memory = FSDP_MEMORY_HOST;
        item->numel = 1;
        item->data = &p->step;
        return FSDP_OK;
    }
    item->sharded = 1;
    item->dtype = wide ? FSDP_F64 : FSDP_F32;
    item->memory = o->place == FSDP_MEMORY_PINNED ? FSDP_MEMORY_HOST : o->place;
    if (o->states[which][wide]) // NULL: this rank has no elements of this width
        item->data = o->states[which][wide] + (size_t)p->state * fsdpi_optim_size(wide);
    return FSDP_OK;
}

// Reserves a state of this parameter, for which a checkpoint has values. The next use allocates it,
// since outstanding updates may still write to the current memory.
static fsdp_status fsdpi_optim_hold(void *user, fsdp_model *model, int ordinal) {
    fsdp_optim *o = (fsdp_optim *)user;
    if (o->held[ordinal]) return FSDP_OK;
    o->held[ordinal] = 1;
    o->moved = 1;
    return o->memory == FSDP_MEMORY_DEVICE ? fsdp_wait_stream(model, FSDP_STREAM_COMPUTE) : FSDP_OK;
}

static void fsdpi_optim_free(void *user) {
    fsdp_optim *o = (fsdp_optim *)user;
    fsdp_free(o->model, o->place, o->states[0][0], o->state_bytes);
    fsdp_free(o->model, FSDP_MEMORY_HOST, o, 0);
}

FSDP_API void fsdp_optim_destroy(fsdp_optim *o) {
    if (!o) return;
    if (o->memory == FSDP_MEMORY_DEVICE) (void)fsdp_wait_stream(o->model, FSDP_STREAM_COMPUTE);
    (void)fsdp_detach(o->model, &o->extension);
}

FSDP_API int64_t fsdp_optim_nbytes(const fsdp_optim *o) {
    if (!o) return 0;
    return o->nbytes + o->buffer_bytes + (o->place == FSDP_MEMORY_HOST ? 0 : o->state_bytes);
}

// Fails if an optimizer that updates parameters in another way has one of these parameters.
static fsdp_status fsdpi_optim_alone(const fsdp_optim *o) {
    fsdp_state_item item = FSDP_ZERO;
    item.sizes_only = 1;
    fsdp_status status = fsdp_next_state(o->model, &item);
    for (; !status && item.name; status = fsdp_next_state(o->model, &item)) {
        const fsdpi_optim_param *p = fsdpi_optim_find(o, item.ordinal);
        fsdp_param_view v = FSDP_ZERO;
        if (!p || !item.updates || item.updates == o->mark) continue;
        status = fsdp_param_view_get(p->unit, p->index, &v);
        if (status) return status;
        return fsdp_fail(fsdp_model_world(o->model), FSDP_ERR_INVALID_ARG,
                         "[E9020] %s: %s has parameter '%s' of unit '%s' already, and %s would "
                         "update it again: desc.group of AdamW or SGD returns -1 where "
                         "fsdp_muon_takes returns 1, or desc.take of Muon returns 0",
                         o->name, item.extension, v.name, fsdp_unit_label(v.unit),
                         o->extension.name);
    }
    return status;
}

// Makes an optimizer of `size` bytes, with its settings, tables and states.
static fsdp_status fsdpi_optim_create(fsdp_model *m, const fsdp_optim *settings, int64_t size,
                                      fsdp_optim_group_fn group, void *user, fsdp_optim **out) {
    int memory = FSDP_MEMORY_HOST, most = fsdp_num_params(m);
    char text[96];
    void *room;
    fsdp_status status = fsdp_update_place(m, settings->name, &memory);
    if (status) return status;
    int64_t before = fsdpi_optim_host_bytes(m), head = (size + 63) / 64 * 64;
    snprintf(text, sizeof text, "%s: no memory for a table of %d parameters", settings->name, most);
    status = fsdp_alloc(
        m, FSDP_MEMORY_HOST,
        head + most * (2 * (int64_t)sizeof(fsdpi_optim_param) + (int64_t)sizeof(fsdp_update) + 1),
        text, &room);
    if (status) return status;
    fsdp_optim *o = (fsdp_optim *)room;
    *o = *settings;
    o->model = m;
    o->memory = memory;
    if (memory == FSDP_MEMORY_HOST) o->place = memory;
    o->group = group;
    o->user = user;
    o->params = (fsdpi_optim_param *)(void *)((char *)o + head);
    o->spare = o->params + most;
    o->updates = (fsdp_update *)(void *)(o->spare + most);
    o->held = (char *)(o->updates + most);
    o->moved = 1;
    o->extension.user = o;
    o->extension.relayout = fsdpi_optim_relayout;
    if (!o->extension.state) o->extension.state = fsdpi_optim_item;
    o->extension.hold = fsdpi_optim_hold;
    if (!o->extension.destroy) o->extension.destroy = fsdpi_optim_free;
    status = fsdpi_optim_apply_layout(o, o->name);
    if (!status && o->mark) status = fsdpi_optim_alone(o);
    if (!status) status = fsdp_attach(m, &o->extension);
    if (status) {
        fsdpi_optim_free(o);
        return status;
    }
    o->nbytes = fsdpi_optim_host_bytes(m) - before;
    *out = o;
    return FSDP_OK;
}

// Returns the final mix of splitmix64, a generator.
static uint64_t fsdpi_optim_mix(uint64_t x) {
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
    x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
    return x ^ (x >> 31);
}

// Sets the key and the positions from which the random bits of a span come, which lies in one
// parameter. Positions are those in the whole parameter: the bits do not depend on rank or layout.
static fsdp_status fsdpi_optim_rounds(const fsdp_optim *o, const fsdpi_optim_span *run,
                                      fsdp_update *u) {
    fsdp_param_view v = FSDP_ZERO;
    fsdp_status status = fsdp_param_view_get(run->first->unit, run->first->index, &v);
    uint64_t step = fsdpi_optim_mix(o->seed + (uint64_t)run->step * 0x9E3779B97F4A7C15u);
    u->rounds = 1;
    u->key = fsdpi_optim_mix(step + (uint64_t)(v.ordinal + 1) * 0x9E3779B97F4A7C15u);
    u->at = fsdp_view_index(&v, 0);
    u->row = u->pitch = 1;
    for (int d = v.shard_dim; d < v.ndim; d++) {
        u->row *= v.local_shape[d];
        u->pitch *= v.shape[d];
    }
    return status;
}

// Appends a run to the updates of a step, unless it is empty.
static fsdp_status fsdpi_optim_append(fsdp_optim *o, const fsdpi_optim_span *run,
                                      fsdpi_optim_fn fill, double lr, int *num) {
    if (run->numel == 0) return FSDP_OK;
    fsdp_update *u = &o->updates[(*num)++];
    int wide = fsdpi_optim_wide(run->first);
    size_t offset = (size_t)run->first->state * fsdpi_optim_size(wide);
    memset(u, 0, sizeof *u);
    u->dtype = (uint8_t)run->first->dtype;
    u->grad_dtype = (uint8_t)run->grad_dtype;
    u->count = run->numel;
    u->param = run->first->shard;
    u->grad = run->grad;
    if (o->states[0][wide]) u->first = o->states[0][wide] + offset;
    if (o->states[1][wide]) u->second = o->states[1][wide] + offset;
    fill(o, run, lr * o->groups[run->first->group].lr_scale, u);
    return o->rounds && u->dtype == FSDP_BF16 ? fsdpi_optim_rounds(o, run, u) : FSDP_OK;
}

// Returns 1 if the parameter begins at the end of the run, so that one run can cover both.
static int fsdpi_optim_joins(const fsdpi_optim_span *run, const fsdpi_optim_param *p,
                             const fsdp_param_view *v) {
    return run->numel > 0 && run->first->dtype == p->dtype && run->grad_dtype == v->grad_dtype &&
           run->first->group == p->group && run->step == p->step &&
           run->first->shard + (size_t)run->numel * fsdp_dtype_size(p->dtype) == p->shard &&
           (!run->grad || run->grad + (size_t)run->numel * fsdp_dtype_size(v->grad_dtype) ==
                              (const char *)v->shard_grad) &&
           run->first->state + run->numel == p->state;
}

// Extends the run by the parameter. If that is impossible, appends the run to the updates and
// begins the next one.
static fsdp_status fsdpi_optim_extend(fsdp_optim *o, fsdpi_optim_span *run, fsdpi_optim_param *p,
                                      const fsdp_param_view *v, fsdpi_optim_fn fill, double lr,
                                      int *num) {
    fsdp_status status = FSDP_OK;
    if (!fsdpi_optim_joins(run, p, v) || (o->rounds && p->dtype == FSDP_BF16)) {
        status = fsdpi_optim_append(o, run, fill, lr, num);
        run->first = p;
        run->grad = (char *)v->shard_grad;
        run->grad_dtype = v->grad_dtype;
        run->numel = 0;
        run->step = p->step;
    }
    run->numel += p->numel;
    return status;
}

// Warns once if a step has found no gradient.
static void fsdpi_optim_tell(fsdp_optim *o, const char *what) {
    fsdp_param_view v = FSDP_ZERO;
    while (!o->warned && fsdp_next_param(o->model, &v))
        if (v.shard_grad) return;
    if (!o->warned)
        fsdp_warn(fsdp_model_world(o->model),
                  "[E923] %s: no parameter has a gradient, so nothing is updated: run a backward "
                  "with gradient sync (fsdp_set_requires_gradient_sync) before, and call "
                  "fsdp_zero_grad after the step",
                  what);
    o->warned = 1;
}

// Fails if a step with this learning rate is not allowed now.
static fsdp_status fsdpi_optim_begin(const fsdp_optim *o, double lr, const char *what) {
    fsdp_status status = fsdp_call_begin(o->model, FSDP_CALL_PARAMS_CHANGED, what);
    if (status) return status;
    if (fsdpi_optim_bad(lr, HUGE_VAL))
        return fsdp_fail(fsdp_model_world(o->model), FSDP_ERR_INVALID_ARG,
                         "[E934] %s: lr is %g, expected a finite number >= 0", what, lr);
    return fsdp_params_writable(o->model); // an outstanding gather may still be reading the shards
}

static fsdp_status fsdpi_optim_step(fsdp_optim *o, double lr, const char *what,
                                    fsdpi_optim_fn fill) {
    fsdp_status status = fsdpi_optim_begin(o, lr, what);
    if (!status) status = fsdpi_optim_apply_layout(o, what);
    if (!status) status = fsdp_agree(o->model, &lr, sizeof lr);
    if (status) return status;
    fsdpi_optim_span run = {NULL, NULL, FSDP_DTYPE_KEEP, 0, 0};
    int num = 0; // number of updates
    for (int i = 0; i < o->num_params && !status; i++) {
        fsdpi_optim_param *p = &o->params[i];
        fsdp_param_view v = FSDP_ZERO;
        status = fsdp_param_view_get(p->unit, p->index, &v);
        if (status || !v.shard_grad) continue;
        p->step++;
        status = fsdpi_optim_extend(o, &run, p, &v, fill, lr, &num);
    }
    if (!status) status = fsdpi_optim_append(o, &run, fill, lr, &num);
    if (!status) status = fsdpi_optim_emit(o->model, o->memory, what, o->updates, num);
    if (!status && o->num_params && !run.first) fsdpi_optim_tell(o, what);
    return status ? status : fsdp_params_changed(o->model);
}

FSDP_API fsdp_status fsdp_optim_step(fsdp_optim *o, double lr) {
    return o ? o->step(o, lr) : fsdp_fail_null(NULL, "optim_step", "the optimizer");
}

FSDP_API fsdp_status fsdp_optim_state_get(fsdp_optim *o, int ordinal, fsdp_optim_state *out) {
    char what[32];
    fsdpi_optim_what(o, "state", what);
    if (!o || !out)
        return fsdp_fail_null(fsdp_model_world(o ? o->model : NULL), what, "the optimizer or out");
    fsdp_world *w = fsdp_model_world(o->model);
    int num = fsdp_num_params(o->model);
    if (ordinal < 0 || ordinal >= num)
        return fsdp_fail(w, FSDP_ERR_INVALID_ARG,
                         "[E936] %s: the model has no parameter %d, expected 0..%d", what, ordinal,
                         num - 1);
    fsdp_status status = FSDP_OK;
    if (!fsdp_world_status(w)) { // in a failed world the table is unchanged
        status = fsdp_model_commit(o->model);
        if (!status) status = fsdpi_optim_apply_layout(o, what);
    }
    memset(out, 0, sizeof *out);
    out->group = -1;
    fsdpi_optim_param *p = status ? NULL : fsdpi_optim_find(o, ordinal);
    if (!p) return status;
    int wide = fsdpi_optim_wide(p);
    size_t offset = (size_t)p->state * fsdpi_optim_size(wide);
    out->dtype = wide ? FSDP_F64 : FSDP_F32;
    out->group = p->group;
    out->numel = p->numel;
    out->step = &p->step;
    if (o->states[0][wide]) out->first = o->states[0][wide] + offset;
    if (o->states[1][wide]) out->second = o->states[1][wide] + offset;
    return FSDP_OK;
}

#endif // FSDPI_OPTIM_STATES_H
