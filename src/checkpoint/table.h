/* checkpoint/table.h - the tensors of this rank: names, boxes, memory

   Decides which tensors belong to a checkpoint of this model. Each save and load makes the table
   again, because views and states move when parameters are frozen, thawed or cast.
   Callers: load.h (fsdpi_ck_find_tensor), save.h (fsdpi_ck_tabulate), api.h (fsdpi_ck_tabulate) and
     others.

   A part of fsdp_checkpoint.h. SPDX-License-Identifier: MIT (full text at the end of fsdp.h) */
#ifndef FSDP_CHECKPOINT_H
#include "../../fsdp_checkpoint.h"
#endif
#ifndef FSDPI_CHECKPOINT_TABLE_H
#define FSDPI_CHECKPOINT_TABLE_H

#include "objects.h"
#include "../safetensors/write.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static fsdp_status fsdpi_ck_bad(const fsdp_checkpoint *ck, const char *call, const char *name,
                                const char *why) {
    return fsdp_fail(ck->world, FSDP_ERR_INVALID_ARG, "[E425] %s: '%s': %s", call, name, why);
}

// Adds a tensor with its name; other fields are zero. The table may move, so earlier pointers are
// invalid.
static fsdp_status fsdpi_ck_add(fsdp_checkpoint *ck, fsdpi_ck_tensor **out, const char *name) {
    fsdpi_ck_table *t = &ck->table;
    int64_t length = (int64_t)strlen(name) + 1;
    const int64_t size = (int64_t)sizeof(fsdpi_ck_tensor);
    fsdp_status status = fsdpi_ck_reserve(ck->model, &t->tensors, (t->num + 1) * size,
                                          t->num * size);
    if (!status)
        status = fsdpi_ck_reserve(ck->model, &t->text, t->text_used + length, t->text_used);
    if (status) return status;
    fsdpi_ck_tensor *x = fsdpi_ck_tensor_at(t, t->num++);
    memset(x, 0, sizeof *x);
    memcpy((char *)t->text.ptr + t->text_used, name, (size_t)length);
    x->name_at = t->text_used;
    x->ordinal = x->blob = -1;
    x->num_holders = 1;
    t->text_used += length;
    *out = x;
    return FSDP_OK;
}

#define FSDPI_CK_STATES "optim.state." // then PARAMETER.STATE

static int fsdpi_ck_is_reserved(const char *name) {
    return strncmp(name, FSDPI_CK_STATES, strlen(FSDPI_CK_STATES)) == 0 ||
           strncmp(name, "fsdp.", 5) == 0;
}

// Returns 1 for a name that an embedding has.
static int fsdpi_ck_is_embedding(const char *name) {
    return strstr(name, "wte") || strstr(name, "embed") || strstr(name, "shared");
}

// Appends a name to a text, at most three in total.
static void fsdpi_ck_name_some(char *text, size_t cap, int count, const char *name) {
    size_t used = strlen(text);
    if (count <= 3) snprintf(text + used, cap - used, "%s'%.120s'", count > 1 ? ", " : "", name);
    else if (count == 4) snprintf(text + used, cap - used, ", ...");
}

static void fsdpi_ck_shape_text(char *out, size_t cap, fsdp_dtype dtype, int ndim,
                                const int64_t *shape) {
    size_t used = (size_t)snprintf(out, cap, "%s [",
                                   dtype == FSDP_SAFETENSORS_OTHER ? "another dtype"
                                                                   : fsdp_dtype_name(dtype));
    for (int d = 0; d < ndim && d < FSDP_MAX_DIMS && used < cap; d++)
        used += (size_t)snprintf(out + used, cap - used, d ? ", %lld" : "%lld",
                                 (long long)shape[d]);
    if (used < cap) snprintf(out + used, cap - used, "]");
}

// Sets p to the parameter's place: the name UNIT.PARAM, as desc.place changes it.
static fsdp_status fsdpi_ck_place(fsdp_checkpoint *ck, const char *call, const fsdp_param_view *v,
                                  fsdp_checkpoint_place *p) {
    memset(p, 0, sizeof *p);
    p->num_replicas = 1;
    memcpy(p->shape, v->shape, sizeof p->shape);
    int unit = *v->unit_name && !ck->desc.param_names;
    int n = snprintf(p->name, sizeof p->name, "%s%s%s", unit ? v->unit_name : "", unit ? "." : "",
                     v->name);
    if (n < 0 || n >= FSDP_CHECKPOINT_NAME)
        return fsdpi_ck_bad(ck, call, p->name,
                            "the name is longer than 511 bytes: shorten the "
                            "names of unit and parameter, or give desc.place");
    if (ck->desc.place) ck->desc.place(ck->desc.user, v, p);
    p->name[FSDP_CHECKPOINT_NAME - 1] = 0;
    if (!*p->name && ck->desc.place) return FSDP_OK; // the caller leaves it out
    if (!*p->name)
        return fsdpi_ck_bad(ck, call, p->name,
                            "a parameter has no name, and nor has its unit: give it one, or give "
                            "desc.place");
    if (fsdpi_ck_is_reserved(p->name))
        return fsdpi_ck_bad(ck, call, p->name,
                            "names that begin with 'optim.state.' or 'fsdp.' "
                            "are the library's: give the parameter another one");
    if (p->num_replicas < 1 || p->replica < 0 || p->replica >= p->num_replicas)
        return fsdpi_ck_bad(ck, call, p->name, "place: expected 0 <= replica < num_replicas");
    for (int d = 0; d < v->ndim; d++)
        if (p->start[d] < 0 || p->shape[d] < 0 || p->start[d] > p->shape[d] - v->shape[d])
            return fsdp_fail(ck->world, FSDP_ERR_INVALID_ARG,
                             "[E426] %s: place of '%s': dim %d begins at %lld and has %lld of %lld "
                             "rows: start + rows must lie in the whole tensor",
                             call, p->name, d, (long long)p->start[d], (long long)v->shape[d],
                             (long long)p->shape[d]);
    return FSDP_OK;
}

static fsdp_status fsdpi_ck_add_param(fsdp_checkpoint *ck, const char *call,
                                      const fsdp_param_view *v) {
    fsdp_checkpoint_place p;
    fsdp_mesh_info info = FSDP_ZERO;
    fsdpi_ck_tensor *x;
    int32_t *base = (int32_t *)ck->table.base.ptr + v->ordinal;
    *base = -1;
    if (ck->desc.skip_frozen && !v->requires_grad) return FSDP_OK;
    fsdp_status status = fsdpi_ck_place(ck, call, v, &p);
    if (status || !*p.name) return status;
    status = fsdp_unit_mesh_info(v->unit, &info);
    *base = ck->table.num;
    if (!status) status = fsdpi_ck_add(ck, &x, p.name);
    if (status) return status;
    x->dtype = x->file_dtype = v->dtype;
    x->ndim = v->ndim;
    x->memory = fsdp_model_run_mode(ck->model) == FSDP_RUN_STREAMS ? FSDP_MEMORY_DEVICE
                                                                   : FSDP_MEMORY_HOST;
    x->ordinal = v->ordinal;
    int replicas = info.replicate_mesh_size > 1 ? info.replicate_mesh_size : 1;
    x->holder = p.replica * replicas + (replicas > 1 ? info.replicate_mesh_rank : 0);
    x->num_holders = p.num_replicas * replicas;
    for (int d = 0; d < v->ndim; d++) {
        x->start[d] = p.start[d] + v->start[d];
        x->shape[d] = v->local_shape[d];
        x->whole[d] = p.shape[d];
    }
    x->numel = v->numel;
    x->data = v->shard;
    x->view = *v;
    return FSDP_OK;
}

// Adds an extension's state: with the box of its parameter, or replicated on all ranks.
static fsdp_status fsdpi_ck_add_state(fsdp_checkpoint *ck, const char *call,
                                      const fsdp_state_item *item, int32_t *last, int32_t *place) {
    char name[FSDP_CHECKPOINT_NAME + 128];
    fsdpi_ck_tensor *x, p;
    int of = item->ordinal < 0 ? -1 : ((int32_t *)ck->table.base.ptr)[item->ordinal];
    memset(&p, 0, sizeof p);
    if (item->ordinal >= 0 && of < 0) return FSDP_OK; // the parameter is left out
    if (of >= 0) p = *fsdpi_ck_tensor_at(&ck->table, of);
    const char *owner = of >= 0 ? (char *)ck->table.text.ptr + p.name_at : item->extension;
    int n = snprintf(name, sizeof name, "%s%s.%s", of >= 0 ? FSDPI_CK_STATES : "fsdp.", owner,
                     item->name);
    if (n < 0 || n >= (int)sizeof name)
        return fsdpi_ck_bad(ck, call, item->name, "the name of the state is too long");
    fsdp_status status = fsdpi_ck_add(ck, &x, name);
    if (status) return status;
    x->extension = item->extension;
    x->dtype = x->file_dtype = item->dtype;
    if (item->ndim == 0 && item->dtype == FSDP_I64 && !item->sharded) x->file_dtype = FSDP_F64;
    x->memory = item->memory;
    x->ordinal = item->ordinal;
    x->ndim = item->ndim;
    x->data = item->data;
    x->numel = item->numel;
    *place = item->ordinal == *last ? *place + 1 : 1;
    *last = item->ordinal;
    x->place = *place;
    if (item->sharded) {
        x->holder = p.holder, x->num_holders = p.num_holders;
        memcpy(x->start, p.start, sizeof x->start);
        memcpy(x->shape, p.shape, sizeof x->shape);
        memcpy(x->whole, p.whole, sizeof x->whole);
        return FSDP_OK;
    }
    memcpy(x->shape, item->shape, sizeof x->shape);
    memcpy(x->whole, item->shape, sizeof x->whole);
    // All ranks have it and one writes it: rank 0, or the rank with the parameter's first elements.
    int first = of >= 0 ? p.numel > 0 : ck->rank == 0;
    for (int d = 0; of >= 0 && d < p.ndim; d++) first = first && p.start[d] == 0;
    x->holder = first ? p.holder : 1;
    x->num_holders = !first ? 2 : of >= 0 ? p.num_holders : 1;
    if (!first) x->place = -1; // this rank does not write the state
    return FSDP_OK;
}

static fsdp_status fsdpi_ck_add_blob(fsdp_checkpoint *ck, int index) {
    const fsdp_checkpoint_blob *b = fsdpi_ck_blob(ck, index);
    char name[128];
    fsdpi_ck_tensor *x;
    if (b->per_rank) snprintf(name, sizeof name, "fsdp.blob.%s.%d", b->name, ck->rank);
    else snprintf(name, sizeof name, "fsdp.blob.%s", b->name);
    fsdp_status status = fsdpi_ck_add(ck, &x, name);
    if (status) return status;
    x->dtype = x->file_dtype = FSDP_U8;
    x->memory = FSDP_MEMORY_HOST;
    x->ndim = 1;
    x->blob = index;
    x->shape[0] = x->whole[0] = x->numel = b->nbytes;
    x->data = b->data;
    if (!b->per_rank && ck->rank != 0) x->place = -1;
    return FSDP_OK;
}

typedef struct fsdpi_ck_named {
    const char *name;
    int32_t index;
} fsdpi_ck_named;
static int fsdpi_ck_by_name(const void *a, const void *b) {
    return strcmp(((const fsdpi_ck_named *)a)->name, ((const fsdpi_ck_named *)b)->name);
}
// Returns advice for two objects of one extension that have the same state of a parameter.
static const char *fsdpi_ck_twice(const char *extension) {
    return strcmp(extension, "ema") == 0
               ? "two averages have this state of one parameter: give each a name, "
                 "fsdp_ema_desc.name, or destroy one of them"
           : strcmp(extension, "muon") == 0
               ? "two optimizers have this state of one parameter: destroy one of them, or let "
                 "desc.take of one return 0 for it"
               : "two optimizers have this state of one parameter: destroy one of them, or let "
                 "desc.group of one return -1 for it";
}
static fsdpi_ck_tensor *fsdpi_ck_find_tensor(const fsdpi_ck_table *t, const char *name) {
    fsdpi_ck_named key = {name, 0};
    const fsdpi_ck_named *found = (const fsdpi_ck_named *)bsearch(
        &key, t->order.ptr, (size_t)t->num, sizeof key, fsdpi_ck_by_name);
    return found ? fsdpi_ck_tensor_at(t, found->index) : NULL;
}

// Sorts the tensors by name; from here on names do not move. Names must be distinct, and valid in a
// header.
static fsdp_status fsdpi_ck_sort(fsdp_checkpoint *ck, const char *call) {
    fsdpi_ck_table *t = &ck->table;
    fsdp_status status = fsdpi_ck_reserve(ck->model, &t->order,
                                          (t->num + 1) * (int64_t)sizeof(fsdpi_ck_named), 0);
    if (status) return status;
    fsdpi_ck_named *order = (fsdpi_ck_named *)t->order.ptr;
    for (int i = 0; i < t->num; i++) {
        fsdpi_ck_tensor *x = fsdpi_ck_tensor_at(t, i);
        x->name = (const char *)t->text.ptr + x->name_at;
        if (!fsdpi_st_is_text(x->name) || strcmp(x->name, "__metadata__") == 0)
            return fsdpi_ck_bad(ck, call, x->name,
                                "a name in a file is UTF-8, and not '__metadata__': give units, "
                                "parameters or extensions other names, or give desc.place");
        order[i].name = x->name;
        order[i].index = i;
    }
    qsort(order, (size_t)t->num, sizeof *order, fsdpi_ck_by_name);
    for (int i = 1; i < t->num; i++) {
        const int32_t of = fsdpi_ck_tensor_at(t, order[i].index)->ordinal;
        if (strcmp(order[i - 1].name, order[i].name) != 0) continue;
        if (of >= 0 && of == fsdpi_ck_tensor_at(t, order[i - 1].index)->ordinal)
            return fsdpi_ck_bad(ck, call, order[i].name,
                                fsdpi_ck_twice(fsdpi_ck_tensor_at(t, order[i].index)->extension));
        return fsdpi_ck_bad(ck, call, order[i].name,
                            "two tensors have this name: give units, parameters or extensions "
                            "other names, or give desc.place");
    }
    return FSDP_OK;
}

/* Returns the parameter of state x, or x itself if it is a parameter. Requires x->ordinal >= 0. */
static const fsdpi_ck_tensor *fsdpi_ck_param_of(const fsdpi_ck_table *t, const fsdpi_ck_tensor *x) {
    return fsdpi_ck_tensor_at(t, ((const int32_t *)t->base.ptr)[x->ordinal]);
}

/* Makes the table of this rank's tensors; with params_only it contains only parameters. */
static fsdp_status fsdpi_ck_tabulate(fsdp_checkpoint *ck, const char *call, int params_only) {
    fsdp_param_view v = FSDP_ZERO;
    fsdp_state_item item;
    int32_t last = -2, place = 0;
    ck->table.num = 0;
    ck->table.text_used = 0;
    fsdp_status status = fsdpi_ck_reserve(
        ck->model, &ck->table.base,
        ((int64_t)fsdp_num_params(ck->model) + 1) * (int64_t)sizeof(int32_t), 0);
    while (!status && fsdp_next_param(ck->model, &v)) status = fsdpi_ck_add_param(ck, call, &v);
    memset(&item, 0, sizeof item);
    if (!status && !params_only) status = fsdp_next_state(ck->model, &item);
    while (!status && !params_only && item.name) {
        status = fsdpi_ck_add_state(ck, call, &item, &last, &place);
        if (!status) status = fsdp_next_state(ck->model, &item);
    }
    for (int i = 0; !status && !params_only && i < ck->desc.num_blobs; i++)
        status = fsdpi_ck_add_blob(ck, i);
    return status ? status : fsdpi_ck_sort(ck, call);
}

/* Returns the number of rows of a tensor's box that this rank writes, and sets *first. Ranks
   with the same box take turns, or share its rows. */
static int64_t fsdpi_ck_my_rows(const fsdpi_ck_tensor *x, int64_t *first) {
    fsdp_range mine = FSDP_ZERO;
    int64_t rows = x->ndim ? x->shape[0] : 1;
    int64_t nbytes = x->numel * (int64_t)fsdp_dtype_size(x->file_dtype);
    *first = 0;
    if (x->numel == 0 || x->place < 0) return 0;
    if (x->num_holders == 1) return rows;
    if (x->ndim && rows >= x->num_holders && nbytes >= 65536 * (int64_t)x->num_holders) {
        (void)fsdp_shard_range(rows, x->num_holders, x->holder, &mine);
        *first = mine.start;
        return mine.count;
    }
    int turn = (x->ordinal < 0 ? 0 : x->ordinal) + x->place;
    return turn % x->num_holders == x->holder ? rows : 0;
}

#endif // FSDPI_CHECKPOINT_TABLE_H
