/* checkpoint/load.h - a load: what this rank wants, from which tensor of the files

   Plans and runs a load. All errors in names, shapes and dtypes are found before a value changes,
   and all ranks agree on them.
   Callers: api.h (fsdpi_ck_report_load).

   A part of fsdp_checkpoint.h. SPDX-License-Identifier: MIT (full text at the end of fsdp.h) */
#ifndef FSDP_CHECKPOINT_H
#include "../../fsdp_checkpoint.h"
#endif
#ifndef FSDPI_CHECKPOINT_LOAD_H
#define FSDPI_CHECKPOINT_LOAD_H

#include "files.h"
#include "rounds.h"
#include "objects.h"
#include "open.h"
#include "read.h"
#include "table.h"
#include "tile.h"
#include "worker.h"

#include <stdio.h>
#include <string.h>

typedef struct fsdpi_ck_load {
    fsdp_checkpoint *ck;
    fsdp_checkpoint_load_desc desc;
    fsdpi_ck_io *io;
    fsdpi_ck_opened opened;
    fsdpi_ck_reader reader;
    fsdpi_ck_buffer numbers; // numbers of extensions as in the files: f64 or i64
    fsdpi_ck_buffer flags;   // FSDPI_CK_* for each tensor in the table
    fsdpi_ck_verify_job verify;
    char missing[512], extra[512], dropped[512];
    char tied[320]; // a hint about a missing matrix, or ""
    int num_wanted, num_missing, num_extra;
    int num_blobs, num_states; // missing ones
    int num_dropped;           // states of this model's parameters that no extension takes
} fsdpi_ck_load;

// A tensor keeps its value, is read, is read as an integer, or becomes zero.
enum { FSDPI_CK_LEFT = 0, FSDPI_CK_READ, FSDPI_CK_INTEGER, FSDPI_CK_ZERO };

static fsdp_status fsdpi_ck_differs(fsdpi_ck_load *l, const char *name, fsdp_dtype there,
                                    int there_ndim, const int64_t *there_shape,
                                    const fsdpi_ck_tensor *x, const char *hint) {
    char a[160], b[160];
    fsdpi_ck_shape_text(a, sizeof a, there, there_ndim, there_shape);
    fsdpi_ck_shape_text(b, sizeof b, x->file_dtype, x->ndim, x->whole);
    return fsdp_fail(l->ck->world, FSDP_ERR_INVALID_ARG,
                     "[E436] %s: '%s' is %s there, and %s here%s", l->io->call, name, a, b, hint);
}

// Returns 1 if elements of dtype `there` can be read into x.
static int fsdpi_ck_takes(const fsdpi_ck_load *l, const fsdpi_ck_tensor *x, fsdp_dtype there) {
    if (there == x->file_dtype) return 1;
    if (x->file_dtype != x->dtype) return there == FSDP_F32 || there == FSDP_I64; // a number
    return l->desc.convert && there != FSDP_SAFETENSORS_OTHER && fsdp_dtype_is_float(there) &&
           fsdp_dtype_is_float(x->file_dtype);
}

/* Adds one source of a tensor to the wanted boxes: rows of dim 0 (after transposing), beginning
   with `row`. */
static fsdp_status fsdpi_ck_want_source(fsdpi_ck_load *l, const fsdpi_ck_tensor *x,
                                        const fsdp_checkpoint_source *s, int64_t first_box,
                                        int64_t count, int64_t *row, char *to) {
    const fsdpi_ck_box *boxes = l->opened.boxes + first_box;
    const fsdp_safetensors_entry *e = boxes[0].entry;
    int64_t whole[FSDP_MAX_DIMS] = {0}, there[FSDP_MAX_DIMS] = {0};
    fsdpi_ck_want w;
    memset(&w, 0, sizeof w);
    if (e->ndim > FSDP_MAX_DIMS || e->dtype == FSDP_SAFETENSORS_OTHER)
        return fsdp_fail(l->ck->world, FSDP_ERR_UNSUPPORTED,
                         "[E437] %s: '%s' is %s with %d dims there, which the library does not "
                         "have: leave it out by desc.source",
                         l->io->call, s->name, fsdp_safetensors_dtype_name(e->file_dtype), e->ndim);
    const int scalar = e->ndim == 0 && x->ndim == 1; // here it is a vector of one element
    fsdpi_ck_whole(boxes, (int)count, there);
    if (scalar) there[0] = 1;
    memcpy(whole, there, sizeof whole);
    if (s->transpose && e->ndim == 2) whole[0] = there[1], whole[1] = there[0];
    int64_t rows = s->rows ? s->rows : whole[0] - s->first;
    int same = e->ndim + scalar == x->ndim && (!s->transpose || x->ndim == 2) && s->first >= 0 &&
               rows >= 0;
    for (int d = 0; d < x->ndim && same; d++)
        same = d ? whole[d] == x->whole[d]
                 : rows <= whole[0] - s->first && rows <= x->whole[0] - *row &&
                       (l->desc.source || rows == x->whole[0]);
    if (!same) return fsdpi_ck_differs(l, s->name, e->dtype, e->ndim, there, x, "");
    if (!fsdpi_ck_takes(l, x, e->dtype))
        return fsdpi_ck_differs(l, s->name, e->dtype, e->ndim, there, x,
                                fsdp_dtype_is_float(e->dtype) && fsdp_dtype_is_float(x->file_dtype)
                                    ? ": set convert"
                                    : "");
    w.ndim = x->ndim;
    w.memory = x->memory;
    w.dtype = x->dtype;
    w.to = to;
    memcpy(w.start, x->start, sizeof w.start);
    memcpy(w.shape, x->shape, sizeof w.shape);
    if (x->ndim) { // rows [*row, *row + rows) of the whole, limited to this rank's box
        int64_t begin = x->start[0] > *row ? x->start[0] : *row;
        int64_t end = x->start[0] + x->shape[0] < *row + rows ? x->start[0] + x->shape[0]
                                                              : *row + rows;
        w.start[0] = begin - *row + s->first;
        w.shape[0] = end > begin ? end - begin : 0;
        w.to += (begin - x->start[0]) * fsdpi_ck_volume(x->ndim - 1, x->shape + 1) *
                (int64_t)fsdp_dtype_size(x->dtype);
        if (!w.shape[0]) w.to = to;
    }
    *row += rows;
    if (s->transpose) {
        int64_t start = w.start[0], shape = w.shape[0];
        w.start[0] = w.start[1], w.shape[0] = w.shape[1];
        w.start[1] = start, w.shape[1] = shape;
        w.pitch = w.shape[0];
    }
    if (!fsdpi_ck_volume(x->ndim, w.shape)) return FSDP_OK;
    w.ndim = e->ndim;
    return fsdpi_ck_add_want(&l->reader, &w, first_box, count);
}

// Lists the sources of a tensor: those that the trainer sets, or its own name.
static int fsdpi_ck_sources(fsdpi_ck_load *l, const fsdpi_ck_tensor *x,
                            fsdp_checkpoint_source *out) {
    memset(out, 0, FSDP_CHECKPOINT_SOURCES * sizeof *out);
    snprintf(out[0].name, sizeof out[0].name, "%s", x->name);
    if (!l->desc.source || x->place != 0 || x->blob >= 0) return 1;
    return l->desc.source(l->desc.user, &x->view, out);
}

// Returns the next name in the files that begins with the prefix, or NULL. *at: the box from which
// to search; -1 at first.
static const char *fsdpi_ck_next_name(const fsdpi_ck_opened *o, const char *prefix, int64_t *at) {
    if (*at < 0) (void)fsdpi_ck_boxes_of(o, prefix, at);
    if (*at >= o->num_boxes) return NULL;
    const char *name = o->boxes[*at].entry->name;
    if (strncmp(name, prefix, strlen(prefix)) != 0) return NULL;
    while (++*at < o->num_boxes && strcmp(o->boxes[*at].entry->name, name) == 0) continue;
    return name;
}
// Returns the parameter in a name "optim.state.PARAMETER.STATE"; both may contain dots. NULL: this
// model has no such parameter.
static fsdpi_ck_tensor *fsdpi_ck_owner(const fsdpi_ck_table *t, const char *name) {
    char param[FSDP_CHECKPOINT_NAME + 128], *dot;
    snprintf(param, sizeof param, "%s", name + strlen(FSDPI_CK_STATES));
    while ((dot = strrchr(param, '.')) != NULL) {
        *dot = 0;
        fsdpi_ck_tensor *x = fsdpi_ck_find_tensor(t, param);
        if (x && x->ordinal >= 0 && x->place == 0) return x;
    }
    return NULL;
}
// Returns 1 if the checkpoint has any state of this parameter.
static int fsdpi_ck_has_states_of(const fsdpi_ck_load *l, const fsdpi_ck_tensor *x) {
    const fsdpi_ck_tensor *p = fsdpi_ck_param_of(&l->ck->table, x);
    char prefix[FSDP_CHECKPOINT_NAME + 32];
    const char *name;
    snprintf(prefix, sizeof prefix, FSDPI_CK_STATES "%s.", p->name);
    for (int64_t at = -1; (name = fsdpi_ck_next_name(&l->opened, prefix, &at)) != NULL;)
        if (fsdpi_ck_owner(&l->ck->table, name) == p) return 1;
    return 0;
}

// Notes a hint if the files lack a matrix and have an embedding of its shape: they may tie both.
static void fsdpi_ck_note_tied(fsdpi_ck_load *l, const fsdpi_ck_tensor *x, const char *lacks) {
    const char *name;
    if (x->ndim != 2 || x->place != 0 || x->blob >= 0 || *l->tied) return;
    for (int64_t at = -1, first; (name = fsdpi_ck_next_name(&l->opened, "", &at)) != NULL;) {
        int64_t there[FSDP_MAX_DIMS] = {0}, count = fsdpi_ck_boxes_of(&l->opened, name, &first);
        const fsdpi_ck_box *boxes = l->opened.boxes + first;
        if (!fsdpi_ck_is_embedding(name)) continue;
        if (boxes[0].entry->ndim != 2) continue;
        fsdpi_ck_whole(boxes, (int)count, there);
        if (there[0] != x->whole[0] || there[1] != x->whole[1]) continue;
        snprintf(l->tied, sizeof l->tied,
                 "; if '%.90s' is tied to '%.90s', declare one parameter, and open its unit for "
                 "both uses (docs/checkpoints.md, Tied weights)",
                 lacks, name);
        return;
    }
}

// Returns FSDPI_CK_* for a tensor that the checkpoint lacks. Counts it if that is an error.
static int fsdpi_ck_without(fsdpi_ck_load *l, const fsdpi_ck_tensor *x, const char *name) {
    const fsdp_checkpoint_blob *b = x->blob >= 0 ? fsdpi_ck_blob(l->ck, x->blob) : NULL;
    if (b && (b->optional || (b->per_rank && l->opened.world != l->ck->size))) return FSDPI_CK_LEFT;
    int64_t at = -1;
    if (x->place != 0 && x->ordinal >= 0 && fsdpi_ck_next_name(&l->opened, FSDPI_CK_STATES, &at) &&
        !fsdpi_ck_has_states_of(l, x))
        return FSDPI_CK_ZERO;
    l->num_blobs += b != NULL;
    l->num_states += !b && x->place != 0;
    fsdpi_ck_note_tied(l, x, name);
    fsdpi_ck_name_some(l->missing, sizeof l->missing, ++l->num_missing, name);
    return FSDPI_CK_LEFT;
}

// Returns the rows of a source: its own number, or all rows of its tensor after `first`. -1: it has
// no number, and the files lack the tensor. 0: its number is wrong, which fails later, when it is
// added.
static int64_t fsdpi_ck_rows_of(const fsdpi_ck_load *l, const fsdp_checkpoint_source *s) {
    int64_t first, there[FSDP_MAX_DIMS] = {0};
    int64_t count = fsdpi_ck_boxes_of(&l->opened, s->name, &first);
    const fsdpi_ck_box *boxes = l->opened.boxes + first;
    if (s->rows) return s->rows;
    if (!count) return -1;
    if (boxes[0].entry->ndim > FSDP_MAX_DIMS || s->first < 0) return 0;
    fsdpi_ck_whole(boxes, (int)count, there);
    int64_t rows = there[s->transpose && boxes[0].entry->ndim == 2];
    return s->first < rows ? rows - s->first : 0;
}

static fsdp_status fsdpi_ck_wrong_rows(fsdpi_ck_load *l, const fsdpi_ck_tensor *x, int64_t rows) {
    return fsdp_fail(l->ck->world, FSDP_ERR_INVALID_ARG,
                     "[E439] %s: the sources of '%s' have %lld rows, expected %lld", l->io->call,
                     x->name, (long long)rows, (long long)x->whole[0]);
}

// Sets the rows of each source, even if tensors are missing: one source without a number has the
// rows that the others leave.
static fsdp_status fsdpi_ck_settle_rows(fsdpi_ck_load *l, const fsdpi_ck_tensor *x,
                                        fsdp_checkpoint_source *s, int num) {
    fsdp_checkpoint_source *untold = NULL;
    int64_t told = 0;
    for (int i = 0; i < num && x->ndim; i++) {
        if (s[i].rows < 0 || s[i].rows > x->whole[0]) return fsdpi_ck_wrong_rows(l, x, s[i].rows);
        int64_t rows = fsdpi_ck_rows_of(l, &s[i]);
        if (rows >= 0) {
            told += fsdpi_ck_less(rows, x->whole[0] + 1); // the trainer's number may be wrong
        } else if (untold && l->desc.partial) {
            return fsdp_fail(l->ck->world, FSDP_ERR_INVALID_ARG,
                             "[E451] %s: %s lacks '%s' and '%s', sources of '%s' that do not tell "
                             "their rows, so nobody knows where the others belong: set `rows` of "
                             "each source",
                             l->io->call, l->opened.dir, untold->name, s[i].name, x->name);
        } else {
            untold = &s[i];
        }
    }
    if (untold && told > x->whole[0]) return fsdpi_ck_wrong_rows(l, x, told);
    if (untold) untold->rows = x->whole[0] - told;
    return FSDP_OK;
}

static fsdp_status fsdpi_ck_plan_tensor(fsdpi_ck_load *l, int index) {
    fsdpi_ck_tensor *x = fsdpi_ck_tensor_at(&l->ck->table, index);
    char *flag = (char *)l->flags.ptr + index;
    fsdp_checkpoint_source s[FSDP_CHECKPOINT_SOURCES];
    int64_t row = 0, first = 0;
    *flag = FSDPI_CK_LEFT;
    // A parameter without elements, and its states, are in no file.
    const fsdpi_ck_tensor *p = x->ordinal < 0 ? x : fsdpi_ck_param_of(&l->ck->table, x);
    if (fsdpi_ck_volume(p->ndim, p->whole) == 0) return FSDP_OK;
    const fsdp_checkpoint_blob *b = x->blob >= 0 ? fsdpi_ck_blob(l->ck, x->blob) : NULL;
    if (b && b->per_rank && l->opened.world != l->ck->size) return FSDP_OK;
    int num = fsdpi_ck_sources(l, x, s), found = 0;
    if (num < 0 || num > FSDP_CHECKPOINT_SOURCES)
        return fsdp_fail(l->ck->world, FSDP_ERR_INVALID_ARG,
                         "[E438] %s: desc.source gives %d sources of '%s', expected 0 to %d",
                         l->io->call, num, x->name, FSDP_CHECKPOINT_SOURCES);
    l->num_wanted += num;
    for (int i = 0; i < num; i++) found += fsdpi_ck_boxes_of(&l->opened, s[i].name, &first) > 0;
    if (!found) {
        for (int i = 0; i < num; i++) *flag = (char)fsdpi_ck_without(l, x, s[i].name);
        return FSDP_OK;
    }
    fsdp_status status = fsdpi_ck_settle_rows(l, x, s, num);
    if (status) return status;
    char *to = (char *)x->data;
    if (x->file_dtype != x->dtype) to = (char *)l->numbers.ptr + 8 * (int64_t)index;
    for (int i = 0; i < num; i++) {
        int64_t count = fsdpi_ck_boxes_of(&l->opened, s[i].name, &first);
        if (!count) {
            fsdpi_ck_name_some(l->missing, sizeof l->missing, ++l->num_missing, s[i].name);
            row += s[i].rows;
            continue;
        }
        fsdpi_ck_tensor number = *x;
        if (x->file_dtype != x->dtype) {
            fsdp_dtype there = l->opened.boxes[first].entry->dtype;
            number.memory = FSDP_MEMORY_HOST;
            number.dtype = there == FSDP_I64 ? FSDP_I64 : FSDP_F64;
            if (fsdpi_ck_takes(l, x, there)) number.file_dtype = there;
        }
        status = fsdpi_ck_want_source(l, &number, &s[i], first, count, &row, to);
        if (status) return status;
        *flag = x->file_dtype != x->dtype && number.dtype == FSDP_I64 ? FSDPI_CK_INTEGER
                                                                      : FSDPI_CK_READ;
    }
    return x->ndim && row != x->whole[0] ? fsdpi_ck_wrong_rows(l, x, row) : FSDP_OK;
}

// Counts names that this rank has not requested.
static void fsdpi_ck_count_extra(fsdpi_ck_load *l) {
    const fsdpi_ck_table *t = &l->ck->table;
    const char *name;
    for (int64_t at = -1; (name = fsdpi_ck_next_name(&l->opened, "", &at)) != NULL;) {
        if (strncmp(name, "fsdp.blob.", 10) == 0 || fsdpi_ck_find_tensor(t, name)) continue;
        if (l->desc.params_only && fsdpi_ck_is_reserved(name)) continue;
        fsdpi_ck_name_some(l->extra, sizeof l->extra, ++l->num_extra, name);
    }
}

// Returns 1 if the load includes states: not with params_only, nor with desc.source, which is for
// parameters.
static int fsdpi_ck_wants_states(const fsdpi_ck_load *l) {
    return !l->desc.params_only && !l->desc.source;
}
static void fsdpi_ck_drop_state(fsdpi_ck_load *l, const char *name) {
    fsdpi_ck_name_some(l->dropped, sizeof l->dropped, ++l->num_dropped, name);
}

// Reserves states of frozen parameters that the files have: their optimizer keeps them until the
// thaw. With skip_frozen they are not read.
static fsdp_status fsdpi_ck_hold_states(fsdpi_ck_load *l) {
    fsdp_checkpoint *ck = l->ck;
    fsdp_status status = FSDP_OK;
    const char *name;
    int held = 0;
    for (int64_t at = -1; (name = fsdpi_ck_next_name(&l->opened, FSDPI_CK_STATES, &at)) != NULL;) {
        const fsdpi_ck_tensor *p = fsdpi_ck_find_tensor(&ck->table, name)
                                       ? NULL
                                       : fsdpi_ck_owner(&ck->table, name);
        if (p && !status) status = fsdp_state_reserve(ck->model, p->ordinal);
        held += p != NULL;
    }
    return status || !held ? status : fsdpi_ck_tabulate(ck, l->io->call, 0);
}

// Counts states of this model's parameters that no extension takes.
static fsdp_status fsdpi_ck_count_dropped(fsdpi_ck_load *l) {
    fsdp_checkpoint *ck = l->ck;
    const fsdpi_ck_table *t = &ck->table;
    fsdp_param_view v = FSDP_ZERO;
    fsdp_checkpoint_place p;
    fsdp_status status = FSDP_OK;
    const char *name;
    for (int64_t at = -1; (name = fsdpi_ck_next_name(&l->opened, FSDPI_CK_STATES, &at)) != NULL;)
        if (!fsdpi_ck_find_tensor(t, name) && fsdpi_ck_owner(t, name)) fsdpi_ck_drop_state(l, name);
    while (!status && ck->desc.skip_frozen && fsdp_next_param(ck->model, &v)) {
        char prefix[FSDP_CHECKPOINT_NAME + 32];
        if (v.requires_grad) continue;
        status = fsdpi_ck_place(ck, l->io->call, &v, &p);
        snprintf(prefix, sizeof prefix, FSDPI_CK_STATES "%s.", p.name);
        for (int64_t at = -1; (name = fsdpi_ck_next_name(&l->opened, prefix, &at)) != NULL;)
            if (!fsdpi_ck_find_tensor(t, name)) fsdpi_ck_drop_state(l, name);
    }
    return status;
}

// Warns, on the lowest rank that drops states or leaves tensors unchanged.
static fsdp_status fsdpi_ck_tell_left(const fsdpi_ck_load *l) {
    fsdp_checkpoint *ck = l->ck;
    int32_t first[2] = {l->num_dropped ? ck->rank : ck->size, l->num_missing ? ck->rank : ck->size};
    fsdp_status status = fsdp_all_reduce(ck->world, NULL, first, 2, FSDP_I32, FSDP_MIN);
    if (!status && first[1] == ck->rank)
        (void)fsdp_fail(ck->world, FSDP_OK,
                        "[E483] %s: %s lacks %d of %d tensors, and partial leaves what they are "
                        "for as it was: %s%s%s: if one of these is a wrong name, correct it; "
                        "desc.source of the load, or desc.place and skip_frozen, say which may be "
                        "missing, and find wrong names",
                        l->io->call, l->opened.dir, l->num_missing, l->num_wanted, l->missing,
                        l->num_extra && !l->desc.source ? "; nobody asks for: " : "",
                        l->desc.source ? "" : l->extra);
    if (!status && first[0] == ck->rank)
        (void)fsdp_fail(ck->world, FSDP_OK,
                        "[E450] %s: %s has %d states of parameters of this model that nothing here "
                        "takes, and they are dropped: %s: create the optimizer before the load, "
                        "let its group function take these parameters, and leave out skip_frozen; "
                        "if you want no states, set params_only",
                        l->io->call, l->opened.dir, l->num_dropped, l->dropped);
    return status;
}

static fsdp_status fsdpi_ck_plan(fsdpi_ck_load *l) {
    fsdp_status status = FSDP_OK;
    for (int i = 0; i < l->ck->table.num && !status; i++) status = fsdpi_ck_plan_tensor(l, i);
    if (status) return status;
    fsdpi_ck_count_extra(l);
    if (fsdpi_ck_wants_states(l)) status = fsdpi_ck_count_dropped(l);
    if (status) return status;
    if (!l->num_missing || l->desc.partial) return FSDP_OK;
    const int misses_params = l->num_blobs + l->num_states < l->num_missing;
    return fsdp_fail(
        l->ck->world, FSDP_ERR_INVALID_ARG,
        "[E440] %s: %s lacks %d of %d tensors: %s; it has %d that nobody asks for%s%s: "
        "%s%s%sset partial to leave them as they are%s%s",
        l->io->call, l->opened.dir, l->num_missing, l->num_wanted, l->missing, l->num_extra,
        l->num_extra ? ": " : "", l->extra,
        l->num_states ? "set params_only if you want no states, or " : "",
        l->num_blobs ? "set `optional` of a blob that may be missing, or " : "",
        misses_params && l->num_extra ? "if one of these is a wrong name, correct it; else " : "",
        misses_params ? ", or give desc.source" : "", l->tied);
}

/* -------------------------------------------------------------------------------------------- */
// Phases. In each of them a rank does its own part, and then makes rounds until all have ended
// theirs.

// Reads the headers on rank 0, and sends them to all ranks.
static fsdp_status fsdpi_ck_share_bulk(fsdpi_ck_load *l, const char *path) {
    fsdp_checkpoint *ck = l->ck;
    fsdp_status mine = ck->rank == 0 ? fsdpi_ck_fetch(l->io, path, &l->opened.bulk) : FSDP_OK;
    fsdp_status status = fsdpi_ck_finish_phase(ck, l->io->call, mine);
    if (status) return status;
    status = fsdp_broadcast(ck->world, NULL, &l->opened.bulk.used, 8, 0);
    if (status) return status;
    mine = fsdpi_ck_reserve(ck->model, &l->opened.bulk.room, l->opened.bulk.used,
                            ck->rank == 0 ? l->opened.bulk.used : 0);
    status = fsdpi_ck_agree(ck->world, l->io->call, mine);
    if (!status && ck->size > 1)
        status = fsdp_broadcast(ck->world, NULL, l->opened.bulk.room.ptr, l->opened.bulk.used, 0);
    return status;
}

static fsdp_status fsdpi_ck_parse_and_plan(fsdpi_ck_load *l) {
    fsdp_checkpoint *ck = l->ck;
    int check = l->desc.verify != FSDP_VERIFY_NONE;
    fsdp_status status = fsdpi_ck_parse_headers(l->io, &l->opened);
    if (!status) status = fsdpi_ck_tabulate(ck, l->io->call, !fsdpi_ck_wants_states(l));
    if (!status && fsdpi_ck_wants_states(l)) status = fsdpi_ck_hold_states(l);
    if (!status) status = fsdpi_ck_reader_init(&l->reader, l->io, &l->opened, check);
    if (!status) status = fsdpi_ck_reserve(ck->model, &l->numbers, 8 * (ck->table.num + 1), 0);
    if (!status) status = fsdpi_ck_reserve(ck->model, &l->flags, ck->table.num + 1, 0);
    return status ? status : fsdpi_ck_plan(l);
}

// Runs a job that the ranks share.
static fsdp_status fsdpi_ck_verify_as(fsdpi_ck_load *l, fsdpi_ck_job job) {
    l->verify.r = &l->reader;
    l->verify.mine = l->ck->rank, l->verify.of = l->ck->size;
    return fsdpi_ck_finish_phase(l->ck, l->io->call, fsdpi_ck_do(l->io, job, &l->verify));
}

// Sets states that the checkpoint lacks to zero, and copies numbers to their tensors.
static fsdp_status fsdpi_ck_settle(fsdpi_ck_load *l) {
    fsdp_status status = FSDP_OK;
    for (int i = 0; i < l->ck->table.num && !status; i++) {
        fsdpi_ck_tensor *x = fsdpi_ck_tensor_at(&l->ck->table, i);
        char flag = ((const char *)l->flags.ptr)[i];
        char *number = (char *)l->numbers.ptr + 8 * (int64_t)i;
        int64_t nbytes = x->numel * (int64_t)fsdp_dtype_size(x->dtype);
        if (flag == FSDPI_CK_ZERO && x->memory == FSDP_MEMORY_DEVICE) {
            memset(l->reader.scratch.ptr, 0, FSDPI_CK_PIECE);
            for (int64_t at = 0, n; at < nbytes && !status; at += n) {
                n = fsdpi_ck_less(nbytes - at, FSDPI_CK_PIECE);
                status = fsdp_transfer(l->ck->model, (char *)x->data + at, l->reader.scratch.ptr,
                                       n);
            }
        } else if (flag == FSDPI_CK_ZERO && nbytes > 0) { // an empty shard has no memory
            memset(x->data, 0, (size_t)nbytes);
        } else if (x->file_dtype != x->dtype && flag == FSDPI_CK_READ) {
            double value;
            memcpy(&value, number, 8);
            *(int64_t *)x->data = value >= 0 && value <= 9007199254740992.0 ? (int64_t)value : -1;
        } else if (flag == FSDPI_CK_INTEGER) {
            memcpy(x->data, number, 8);
        }
    }
    return status;
}

// Reads into the model. After a failure its values are undefined. Extensions are notified of
// replaced parameters; one without elements is in no file.
static fsdp_status fsdpi_ck_read_model(fsdpi_ck_load *l) {
    fsdp_status status = fsdp_params_writable(l->ck->model);
    for (int i = 0; i < l->ck->table.num && !status; i++) {
        const fsdpi_ck_tensor *x = fsdpi_ck_tensor_at(&l->ck->table, i);
        if (x->ordinal < 0 || x->place != 0) continue;
        if (((const char *)l->flags.ptr)[i] || fsdpi_ck_volume(x->ndim, x->whole) == 0)
            status = fsdp_tell_values(l->ck->model, FSDP_VALUES_REPLACE, x->ordinal);
    }
    if (!status) status = fsdpi_ck_read_all(&l->reader);
    return status ? status : fsdpi_ck_settle(l);
}

// Sets the arguments that must be equal on all ranks. l NULL: this rank had no memory, and fails.
static void fsdpi_ck_load_args(const fsdpi_ck_load *l, const char *path, fsdpi_ck_args *out) {
    memset(out, 0, sizeof *out);
    snprintf(out->path, sizeof out->path, "%s", path ? path : "");
    out->params_only = l && l->desc.params_only;
    out->has_source = l && l->desc.source;
    out->verify = l ? l->desc.verify : 0;
}

static void fsdpi_ck_report_load(fsdpi_ck_load *l, int64_t begin_ns) {
    fsdp_checkpoint_report *r = &l->ck->report;
    int rank_blobs = 1;
    for (int i = 0; i < l->ck->desc.num_blobs; i++)
        if (fsdpi_ck_blob(l->ck, i)->per_rank && l->opened.world != l->ck->size) rank_blobs = 0;
    memset(r, 0, sizeof *r);
    r->step = l->opened.step;
    r->bytes = l->reader.read_bytes;
    r->total_bytes = l->opened.total_bytes;
    r->blocked_ns = r->total_ns = fsdpi_ck_now() - begin_ns;
    r->num_reads = l->reader.calls;
    r->num_missing = l->num_missing;
    r->num_extra = l->num_extra;
    r->per_rank_blobs = rank_blobs;
    r->verified = l->opened.step >= 0 && l->desc.verify != FSDP_VERIFY_NONE;
}

static fsdp_status fsdpi_ck_load_all(fsdpi_ck_load *l, const char *path) {
    fsdp_checkpoint *ck = l->ck;
    const char *call = l->io->call;
    fsdp_status status = fsdpi_ck_share_bulk(l, path);
    if (status) return status;
    l->opened.dir = path;
    status = fsdpi_ck_agree(ck->world, call, fsdpi_ck_parse_and_plan(l));
    if (!status && fsdpi_ck_num_twins(&l->opened))
        status = fsdpi_ck_verify_as(l, fsdpi_ck_compare_twins);
    if (!status && l->desc.verify == FSDP_VERIFY_ALL)
        status = fsdpi_ck_verify_as(l, fsdpi_ck_verify_blocks);
    if (!status) status = fsdpi_ck_finish_phase(ck, call, fsdpi_ck_read_model(l));
    if (status) return status;
    status = fsdpi_ck_wants_states(l) ? fsdp_state_loaded(ck->model) : FSDP_OK;
    if (!status) status = fsdp_tell_values(ck->model, FSDP_VALUES_REPLACED, -1);
    if (!status) status = fsdp_params_changed(ck->model);
    status = fsdpi_ck_agree(ck->world, call, status);
    return status ? status : fsdpi_ck_tell_left(l);
}

#endif // FSDPI_CHECKPOINT_LOAD_H
