/* safetensors/read.h - reading headers

   Callers: programs and write.h (fsdpi_st_sort).

   A part of fsdp_safetensors.h. SPDX-License-Identifier: MIT (full text at the end of fsdp.h) */
#ifndef FSDP_SAFETENSORS_H
#include "../../fsdp_safetensors.h"
#endif
#ifndef FSDPI_SAFETENSORS_READ_H
#define FSDPI_SAFETENSORS_READ_H

#include "box.h"
#include "crc.h"
#include "format.h"
#include "json.h"

#include <string.h>

// A heap sort of entries or of their indices.

typedef int (*fsdpi_st_order)(const fsdp_safetensors_entry *a, const fsdp_safetensors_entry *b);

typedef struct fsdpi_st_sorted {
    fsdp_safetensors_entry *entries;
    char *index; // NULL, or uint32_t[n] at any address, sorted instead of the entries
    int64_t n;
    fsdpi_st_order before;
} fsdpi_st_sorted;

static uint32_t fsdpi_st_index(const fsdpi_st_sorted *s, int64_t i) {
    uint32_t at;
    memcpy(&at, s->index + 4 * i, 4);
    return at;
}

static fsdp_safetensors_entry *fsdpi_st_entry_at(const fsdpi_st_sorted *s, int64_t i) {
    return &s->entries[s->index ? (int64_t)fsdpi_st_index(s, i) : i];
}

static int fsdpi_st_before(const fsdpi_st_sorted *s, int64_t i, int64_t j) {
    return s->before(fsdpi_st_entry_at(s, i), fsdpi_st_entry_at(s, j));
}

static void fsdpi_st_swap(const fsdpi_st_sorted *s, int64_t i, int64_t j) {
    if (s->index) {
        uint32_t a = fsdpi_st_index(s, i), b = fsdpi_st_index(s, j);
        memcpy(s->index + 4 * i, &b, 4);
        memcpy(s->index + 4 * j, &a, 4);
    } else {
        fsdp_safetensors_entry e = s->entries[i];
        s->entries[i] = s->entries[j];
        s->entries[j] = e;
    }
}

static void fsdpi_st_sift(const fsdpi_st_sorted *s, int64_t at, int64_t n) {
    for (int64_t child; (child = 2 * at + 1) < n; at = child) {
        if (child + 1 < n && fsdpi_st_before(s, child, child + 1)) child++;
        if (!fsdpi_st_before(s, at, child)) return;
        fsdpi_st_swap(s, at, child);
    }
}

static void fsdpi_st_sort(const fsdpi_st_sorted *s) {
    int64_t i = 1;
    while (i < s->n && !fsdpi_st_before(s, i, i - 1)) i++;
    if (i >= s->n) return; // already sorted, as in most files
    for (i = s->n / 2; i > 0; i--) fsdpi_st_sift(s, i - 1, s->n);
    for (i = s->n - 1; i > 0; i--) {
        fsdpi_st_swap(s, 0, i);
        fsdpi_st_sift(s, 0, i);
    }
}

static int fsdpi_st_by_name(const fsdp_safetensors_entry *a, const fsdp_safetensors_entry *b) {
    return strcmp(a->name, b->name) < 0;
}

// Returns 1 if a comes before b. At one offset an empty entry comes first; otherwise the order of
// the header counts.
static int fsdpi_st_by_place(const fsdp_safetensors_entry *a, const fsdp_safetensors_entry *b) {
    if (a->begin != b->begin) return a->begin < b->begin;
    return a->end != b->end ? a->end < b->end : a->name < b->name;
}

static int fsdpi_st_by_file(const fsdp_safetensors_entry *a, const fsdp_safetensors_entry *b) {
    if (a->file_dtype != b->file_dtype) return a->file_dtype > b->file_dtype;
    return fsdpi_st_by_name(a, b);
}

/* -------------------------------------------------------------------------------------------- */
// Reads headers. Invariant: the call that measures and the one with room run the same code.

typedef struct fsdpi_st_parser {
    fsdpi_st_reader r;
    fsdp_safetensors_entry *entries;
    char *text; // NULL: only measure
    int64_t data_bytes;
    int64_t num, names;       // number of entries; bytes of their names
    int metadata;             // number of times that the header has it
    int no_room;              // 1: entries were passed, but their text does not fit
    fsdpi_st_string sharding; // begin 0: none
    fsdp_safetensors_info *info;
} fsdpi_st_parser;

static int fsdpi_st_check_entry(const fsdpi_st_reader *r, fsdp_safetensors_entry *e,
                                const fsdpi_st_list *shape, const fsdpi_st_list *offsets) {
    uint64_t bits = fsdpi_st_dtypes[e->file_dtype].bits, numel = shape->numel;
    fsdpi_st_facts f = {NULL, NULL, {offsets->v[0], offsets->v[1], 0, 0}, e};
    e->ndim = (int32_t)shape->count;
    memcpy(e->shape, shape->v, sizeof e->shape);
    e->begin = offsets->v[0];
    e->end = offsets->v[1];
    if (offsets->count != 2)
        return fsdpi_st_fail(r, "tensor '%t': data_offsets has %0 numbers, expected 2",
                             fsdpi_st_numbers(NULL, offsets->count, 0, 0));
    if (shape->overflow || !fsdpi_st_numel(&numel, bits))
        return fsdpi_st_fail(r, "tensor '%t': %e has more than 2^64 bits", f);
    if (numel % 8) return fsdpi_st_fail(r, "tensor '%t': %e does not end at a whole byte", f);
    f.n[2] = (int64_t)(numel / 8);
    if (e->end < e->begin || e->end - e->begin != f.n[2])
        return fsdpi_st_fail(r, "tensor '%t': bytes %0..%1 for %e, expected %2", f);
    return 1;
}

static int fsdpi_st_read_dtype(fsdpi_st_reader *r, fsdp_safetensors_entry *e) {
    fsdpi_st_string s;
    char name[72];
    if (!fsdpi_st_read_string(r, &s)) return 0;
    for (int i = 0; i < FSDPI_ST_DTYPES; i++) {
        if (!fsdpi_st_is(r, &s, fsdpi_st_dtypes[i].name)) continue;
        e->dtype = fsdpi_st_dtypes[i].dtype;
        e->file_dtype = i;
        return 1;
    }
    fsdpi_st_copy(r, &s, name, 70);
    return fsdpi_st_fail(r, "tensor '%t': '%a' is no dtype of the format",
                         fsdpi_st_numbers(name, 0, 0, 0));
}

static int fsdpi_st_read_entry(fsdpi_st_reader *r, fsdp_safetensors_entry *e) {
    static const char *const words[] = {"dtype", "shape", "data_offsets"};
    fsdpi_st_list lists[2];
    fsdpi_st_string key;
    int64_t count = 0;
    int seen = 0, more, what;
    memset(e, 0, sizeof *e);
    if (!fsdpi_st_took(r, '{')) return fsdpi_st_expected(r, "'{'");
    while ((more = fsdpi_st_read_member(r, &count, &key)) > 0) {
        for (what = 0; what < 3 && !fsdpi_st_is(r, &key, words[what]);) what++;
        if (seen & 1 << what & 7)
            return fsdpi_st_fail(r, "at byte %p: tensor '%t' has '%a' twice",
                                 fsdpi_st_numbers(words[what], 0, 0, 0));
        seen |= 1 << what;
        if (!(what == 0  ? fsdpi_st_read_dtype(r, e)
              : what < 3 ? fsdpi_st_read_list(r, &lists[what - 1])
                         : fsdpi_st_skip(r, 2)))
            return 0;
    }
    if (more < 0) return 0;
    for (what = 0; what < 3; what++)
        if (!(seen & 1 << what))
            return fsdpi_st_fail(r, "tensor '%t' has no '%a'",
                                 fsdpi_st_numbers(words[what], 0, 0, 0));
    return fsdpi_st_check_entry(r, e, &lists[0], &lists[1]);
}

static int fsdpi_st_read_metadata(fsdpi_st_parser *p) {
    fsdpi_st_reader *r = &p->r;
    fsdpi_st_string key, value;
    int64_t count = 0;
    int more;
    if (p->metadata++) return fsdpi_st_wrong(r, "at byte %p: '__metadata__' is there twice");
    if (fsdpi_st_peek(r) == 'n') return fsdpi_st_read_word(r, "null");
    if (!fsdpi_st_took(r, '{')) return fsdpi_st_expected(r, "'{'");
    while ((more = fsdpi_st_read_member(r, &count, &key)) > 0) {
        if (!fsdpi_st_read_string(r, &value)) return 0;
        if (fsdpi_st_is(r, &key, FSDPI_ST_SHARDING)) {
            if (p->sharding.begin)
                return fsdpi_st_wrong(r, "at byte %p: '" FSDPI_ST_SHARDING "' is there twice");
            p->sharding = value;
        }
        if (fsdpi_st_is(r, &key, "fsdp.writer") && value.bytes < (int64_t)sizeof p->info->writer)
            fsdpi_st_copy(r, &value, p->info->writer, value.bytes);
    }
    return more == 0;
}

static int fsdpi_st_check_name(fsdpi_st_reader *r, const fsdpi_st_string *s) {
    char unit[4];
    int taken, size;
    int64_t at = r->at;
    r->name = *s;
    r->at = s->begin;
    if (!s->bytes) return fsdpi_st_wrong(r, "at byte %p: a name without bytes");
    if (s->bytes > FSDPI_ST_NAME)
        return fsdpi_st_fail(r, "at byte %p: a name of %0 bytes, at most %1",
                             fsdpi_st_numbers(NULL, s->bytes, FSDPI_ST_NAME, 0));
    for (; r->at < s->end; r->at += taken) {
        size = fsdpi_st_decode(r->text + r->at, s->end - r->at, unit, &taken);
        if (size == 1 && !unit[0]) return fsdpi_st_wrong(r, "at byte %p: a name with a NUL");
    }
    r->at = at;
    return 1;
}

// Reads all members of the header.
static int fsdpi_st_read_header(fsdpi_st_parser *p) {
    fsdpi_st_reader *r = &p->r;
    fsdp_safetensors_entry measured, *e;
    fsdpi_st_string key;
    int64_t count = 0;
    int more;
    if (!fsdpi_st_took(r, '{')) return fsdpi_st_expected(r, "'{'");
    while ((more = fsdpi_st_read_member(r, &count, &key)) > 0) {
        if (fsdpi_st_is(r, &key, "__metadata__")) {
            if (!fsdpi_st_read_metadata(p)) return 0;
            continue;
        }
        p->no_room = p->text && !p->entries;
        if (p->no_room) return 0;
        e = p->text ? &p->entries[p->num] : &measured;
        if (!fsdpi_st_check_name(r, &key) || !fsdpi_st_read_entry(r, e)) return 0;
        if (p->text) {
            e->name = p->text + p->names;
            fsdpi_st_copy(r, &key, p->text + p->names, key.bytes);
        }
        p->num++;
        p->names += key.bytes + 1;
    }
    if (more < 0) return 0;
    return fsdpi_st_peek(r) < 0 || fsdpi_st_expected(r, "nothing behind the header's '}'");
}

static int fsdpi_st_check_names(const fsdpi_st_parser *p, const fsdpi_st_sorted *s) {
    for (int64_t i = 1; i < s->n; i++) {
        const char *name = fsdpi_st_entry_at(s, i)->name;
        if (strcmp(name, fsdpi_st_entry_at(s, i - 1)->name) == 0)
            return fsdpi_st_fail(&p->r, "tensor '%a' is there twice",
                                 fsdpi_st_numbers(name, 0, 0, 0));
    }
    return 1;
}

static fsdp_safetensors_entry *fsdpi_st_find(const fsdpi_st_sorted *s, const char *name) {
    int64_t low = 0, high = s->n;
    while (low < high) {
        int64_t middle = low + (high - low) / 2;
        int order = strcmp(fsdpi_st_entry_at(s, middle)->name, name);
        if (order == 0) return fsdpi_st_entry_at(s, middle);
        if (order < 0) low = middle + 1;
        else high = middle;
    }
    return NULL;
}

static int fsdpi_st_check_box(const fsdpi_st_reader *r, fsdp_safetensors_entry *e,
                              const fsdpi_st_list *start, const fsdpi_st_list *whole) {
    fsdpi_st_facts f = {e->name, NULL, {start->count, e->ndim, 0, 0}, e};
    if (start->count != e->ndim)
        return fsdpi_st_fail(r, "tensor '%a': saved_offsets has %0 numbers for %1 dims", f);
    f.n[0] = whole ? whole->count : e->ndim;
    if (f.n[0] != e->ndim)
        return fsdpi_st_fail(r, "tensor '%a': global_shape has %0 numbers for %1 dims", f);
    for (int d = 0; d < e->ndim && d < FSDP_MAX_DIMS; d++) {
        int64_t most = whole ? whole->v[d] : FSDPI_ST_MOST;
        f.n[0] = start->v[d], f.n[1] = f.n[0] + e->shape[d], f.n[2] = most, f.n[3] = d;
        if (e->shape[d] > most || start->v[d] > most - e->shape[d])
            return fsdpi_st_fail(r, "tensor '%a': %0..%1 of %2 in dim %3", f);
    }
    memcpy(e->start, start->v, sizeof e->start);
    if (whole) memcpy(e->whole, whole->v, sizeof e->whole);
    return 1;
}

// Reads the sharding info of one tensor.
static int fsdpi_st_read_box(fsdpi_st_reader *r, fsdp_safetensors_entry *e) {
    static const char *const words[] = {"saved_offsets", "global_shape"};
    fsdpi_st_list lists[2];
    fsdpi_st_string key;
    int64_t count = 0;
    int seen = 0, more;
    if (!fsdpi_st_took(r, '{')) return fsdpi_st_expected(r, "'{'");
    while ((more = fsdpi_st_read_member(r, &count, &key)) > 0) {
        int what = fsdpi_st_is(r, &key, words[0]) ? 0 : fsdpi_st_is(r, &key, words[1]) ? 1 : 2;
        if (seen & 1 << what & 3) {
            fsdpi_st_facts f = fsdpi_st_numbers(e->name, 0, 0, 0);
            f.b = words[what];
            return fsdpi_st_fail(r, "at byte %p: tensor '%a' has '%b' twice", f);
        }
        seen |= 1 << what;
        if (!(what < 2 ? fsdpi_st_read_list(r, &lists[what]) : fsdpi_st_skip(r, 2))) return 0;
    }
    if (more < 0) return 0;
    if (!(seen & 1))
        return fsdpi_st_fail(r, "tensor '%a' has no 'saved_offsets'",
                             fsdpi_st_numbers(e->name, 0, 0, 0));
    return fsdpi_st_check_box(r, e, &lists[0], seen & 2 ? &lists[1] : NULL);
}

// Reads sharding info: JSON in a string of the header. The string is decoded into the caller's
// text, and read there, together with its names.
static int fsdpi_st_read_sharding(fsdpi_st_parser *p, const fsdpi_st_sorted *s) {
    char *room = p->text + p->names;
    fsdpi_st_reader r = {(const unsigned char *)room, p->sharding.bytes, 0, 0, "", p->r.name, NULL};
    fsdpi_st_string key;
    int64_t count = 0;
    int more;
    r.inside = FSDPI_ST_SHARDING ": ", r.why = p->r.why;
    fsdpi_st_copy(&p->r, &p->sharding, room, p->sharding.bytes);
    for (int64_t i = 0; i < p->num; i++) p->entries[i].start[0] = -1; // not known yet
    if (!fsdpi_st_took(&r, '{')) return fsdpi_st_expected(&r, "'{'");
    while ((more = fsdpi_st_read_member(&r, &count, &key)) > 0) {
        char *name = room + key.begin;
        fsdpi_st_copy(&r, &key, name, key.bytes);
        fsdp_safetensors_entry *e = (int64_t)strlen(name) == key.bytes ? fsdpi_st_find(s, name)
                                                                       : NULL;
        if (!e)
            return fsdpi_st_fail(&r, "'%a' is no tensor of the file",
                                 fsdpi_st_numbers(name, 0, 0, 0));
        if (e->start[0] >= 0)
            return fsdpi_st_fail(&r, "tensor '%a' is there twice", fsdpi_st_numbers(name, 0, 0, 0));
        if (!fsdpi_st_read_box(&r, e)) return 0;
    }
    if (more < 0) return 0;
    if (fsdpi_st_peek(&r) >= 0) return fsdpi_st_expected(&r, "nothing behind its '}'");
    for (int64_t i = 0; i < p->num; i++)
        if (p->entries[i].start[0] < 0)
            return fsdpi_st_fail(&r, "tensor '%a' is missing",
                                 fsdpi_st_numbers(p->entries[i].name, 0, 0, 0));
    return 1;
}

// Sorts entries by offset. Fails unless their bytes are contiguous up to the end.
static int fsdpi_st_check_places(const fsdpi_st_parser *p) {
    fsdpi_st_facts f = fsdpi_st_numbers(NULL, 0, 0, 0);
    int64_t end = 0;
    for (int64_t i = 0; i < p->num; i++, end = f.n[1]) {
        const fsdp_safetensors_entry *e = &p->entries[i];
        f.n[0] = e->begin, f.n[1] = e->end;
        if (e->begin > end) {
            f.n[0] = end, f.n[1] = e->begin;
            return fsdpi_st_fail(&p->r, "bytes %0..%1 of the data are in no tensor", f);
        }
        if (e->begin < end) { // so it is not the first one
            f.a = e[-1].name, f.b = e->name;
            if (end < f.n[1]) f.n[1] = end;
            return fsdpi_st_fail(&p->r, "'%a' and '%b' both take bytes %0..%1", f);
        }
    }
    f.n[0] = p->data_bytes, f.n[1] = end;
    if (end > p->data_bytes)
        return fsdpi_st_fail(&p->r, "is cut off: %0 bytes of data, the header tells %1", f);
    if (end < p->data_bytes)
        return fsdpi_st_fail(&p->r, "has %0 bytes of data, the header tells %1", f);
    return 1;
}

static int fsdpi_st_parse(fsdpi_st_parser *p) {
    fsdpi_st_reader *r = &p->r;
    int64_t sharding;
    if (r->size > FSDPI_ST_HEADER)
        return fsdpi_st_fail(r, "header of %0 bytes, at most %1",
                             fsdpi_st_numbers(NULL, r->size, FSDPI_ST_HEADER, 0));
    r->at = fsdpi_st_utf8(r->text, r->size);
    if (r->at < r->size) return fsdpi_st_wrong(r, "at byte %p: %g is no UTF-8");
    r->at = 0;
    if (!fsdpi_st_read_header(p)) return 0;
    sharding = p->sharding.begin ? p->sharding.bytes + 1 : 0;
    p->info->num_entries = p->num;
    p->info->text_bytes = p->names + sharding + 4 * p->num + 1; // never 0
    p->info->has_sharding = p->sharding.begin != 0;
    if (p->text) {
        fsdpi_st_sorted s = {p->entries, p->text + p->names + sharding, p->num, fsdpi_st_by_name};
        for (uint32_t i = 0; i < p->num; i++) memcpy(s.index + 4 * (int64_t)i, &i, 4);
        fsdpi_st_sort(&s);
        if (!fsdpi_st_check_names(p, &s)) return 0;
        if (sharding && !fsdpi_st_read_sharding(p, &s)) return 0;
        s.index = NULL, s.before = fsdpi_st_by_place;
        fsdpi_st_sort(&s);
    }
    return (p->num && !p->text) || fsdpi_st_check_places(p);
}

FSDP_API fsdp_status fsdp_safetensors_header_bytes(const void *first, int64_t file_bytes,
                                                   int64_t *header_bytes, char *why,
                                                   size_t why_cap) {
    fsdpi_st_out o = fsdpi_st_why(why, why_cap);
    fsdpi_st_reader r = {NULL, 0, 0, 0, "", {0, 0, 0}, &o};
    fsdpi_st_facts f = fsdpi_st_numbers(NULL, file_bytes, 8, 0);
    int ok = 1;
    uint64_t size;
    fsdpi_st_end(&o);
    if (file_bytes < 0 || !header_bytes || (!first && file_bytes >= 8)) return FSDP_ERR_INVALID_ARG;
    *header_bytes = 0;
    size = file_bytes < 8 ? 0 : fsdpi_st_little_endian((const unsigned char *)first);
    if (file_bytes < 8) {
        ok = fsdpi_st_fail(&r, "has %0 bytes, expected at least %1", f);
    } else if (size > FSDPI_ST_HEADER) {
        const int zip = memcmp(first, "PK\3\4", 4) == 0, pickle = memcmp(first, "\x80\2", 2) == 0;
        f.n[0] = (int64_t)size, f.n[1] = FSDPI_ST_HEADER;
        ok = fsdpi_st_fail(&r,
                           zip || pickle
                               ? "is no safetensors file, but one of torch.save (a pickle): write "
                                 "its tensors with safetensors.torch.save_file"
                               : "is no safetensors file: header of %0 bytes, at most %1",
                           f);
    } else if ((int64_t)size > file_bytes - 8) {
        f.n[0] = file_bytes - 8, f.n[1] = (int64_t)size;
        ok = fsdpi_st_fail(&r, "is cut off: %0 bytes after the first 8, a header of %1", f);
    } else {
        *header_bytes = (int64_t)size;
    }
    fsdpi_st_end(&o);
    return ok ? FSDP_OK : FSDP_ERR_CORRUPT;
}

FSDP_API fsdp_status fsdp_safetensors_parse(const char *header, int64_t header_bytes,
                                            int64_t data_bytes, fsdp_safetensors_entry *entries,
                                            char *text, fsdp_safetensors_info *info, char *why,
                                            size_t why_cap) {
    fsdpi_st_out o = fsdpi_st_why(why, why_cap);
    fsdpi_st_parser p;
    fsdpi_st_end(&o);
    if (!header || header_bytes < 0 || data_bytes < 0 || !info || (entries && !text))
        return FSDP_ERR_INVALID_ARG;
    memset(&p, 0, sizeof p);
    memset(info, 0, sizeof *info);
#if defined(__BYTE_ORDER__) && __BYTE_ORDER__ == __ORDER_BIG_ENDIAN__
    return FSDP_ERR_UNSUPPORTED; // the format is little-endian
#endif
    p.r.text = (const unsigned char *)header, p.r.size = header_bytes;
    p.r.origin = 8, p.r.inside = "", p.r.why = &o;
    p.entries = entries, p.text = text, p.data_bytes = data_bytes, p.info = info;
    if (fsdpi_st_parse(&p)) return FSDP_OK;
    fsdpi_st_end(&o);
    memset(info, 0, sizeof *info);
    return p.no_room ? FSDP_ERR_INVALID_ARG : FSDP_ERR_CORRUPT;
}

#endif // FSDPI_SAFETENSORS_READ_H
