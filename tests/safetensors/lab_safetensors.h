/* lab_safetensors.h - helpers for tests of fsdp_safetensors.h: a header read in memory of exactly
   its size, invariants of every accepted list, and boxes compared element by element.

   SPDX-License-Identifier: MIT */
#ifndef LAB_SAFETENSORS_H
#define LAB_SAFETENSORS_H
#include "fsdp_safetensors.h"
#include <stdint.h> /* int64_t */
#include <stdio.h>  /* fprintf */
#include <stdlib.h> /* abort, calloc, free, malloc */
#include <string.h> /* memcmp, memcpy, memset, strcmp, strlen */

#define ST_FN static __attribute__((unused))
#ifdef HARNESS_H
#define st_must(condition) CHECK(condition)
#else
#define st_must(condition)                                                                         \
    do {                                                                                           \
        if (condition) break;                                                                      \
        fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, #condition);                            \
        abort();                                                                                   \
    } while (0)
#endif

enum { ST_GUARD = 8 }; /* bytes after each block, which must not change */

ST_FN void *st_room(int64_t nbytes) {
    char *room = (char *)malloc((size_t)nbytes + ST_GUARD);
    st_must(room != NULL);
    memset(room, 0x5a, (size_t)nbytes + ST_GUARD);
    return room;
}
ST_FN void st_end(const void *room, int64_t nbytes) {
    for (int i = 0; i < ST_GUARD; i++) st_must(((const char *)room)[nbytes + i] == 0x5a);
}

/* ---- headers --------------------------------------------------------------------------------- */

typedef struct st_list {
    fsdp_safetensors_entry *e;
    char *text, why[240];
    fsdp_safetensors_info info;
    int64_t n;
    fsdp_status status;
} st_list;

ST_FN void st_free(st_list *l) {
    free(l->e);
    free(l->text);
    memset(l, 0, sizeof *l);
}

/* Makes both calls in blocks of exactly the stated size, so that a sanitizer detects accesses after
   them; without one, checks the bytes after them. */
ST_FN st_list st_read(const void *header, int64_t nbytes, int64_t data_bytes) {
    char *own = (char *)malloc(nbytes ? (size_t)nbytes : 1);
    fsdp_safetensors_info info;
    st_list l;
    memset(&l, 0, sizeof l);
    st_must(own != NULL);
    if (nbytes) memcpy(own, header, (size_t)nbytes);
    l.status = fsdp_safetensors_parse(own, nbytes, data_bytes, NULL, NULL, &info, l.why,
                                      sizeof l.why);
    st_must(l.status == FSDP_OK || l.status == FSDP_ERR_CORRUPT);
    st_must((l.status == FSDP_OK) == !l.why[0] && strlen(l.why) < sizeof l.why);
    if (!l.status) {
        int64_t entries = info.num_entries * (int64_t)sizeof *l.e;
        st_must(info.num_entries >= 0 && info.num_entries * 40 <= nbytes);
        st_must(info.text_bytes > 0 && info.text_bytes <= 2 * nbytes);
        l.e = (fsdp_safetensors_entry *)st_room(entries);
        l.text = (char *)st_room(info.text_bytes);
        l.status = fsdp_safetensors_parse(own, nbytes, data_bytes, l.e, l.text, &l.info, l.why,
                                          sizeof l.why);
        st_must(l.status == FSDP_OK || l.status == FSDP_ERR_CORRUPT);
        st_must((l.status == FSDP_OK) == !l.why[0] && strlen(l.why) < sizeof l.why);
        st_end(l.e, entries);
        st_end(l.text, info.text_bytes);
    }
    if (!l.status) st_must(memcmp(&info, &l.info, sizeof info) == 0);
    l.n = l.info.num_entries;
    free(own);
    return l;
}

/* Reads a file, including its first 8 bytes. */
ST_FN st_list st_read_file(const void *file, int64_t nbytes) {
    int64_t header = -1;
    st_list l;
    memset(&l, 0, sizeof l);
    l.status = fsdp_safetensors_header_bytes(file, nbytes, &header, l.why, sizeof l.why);
    st_must((l.status == FSDP_OK) == !l.why[0]);
    if (l.status) {
        st_must(l.status == FSDP_ERR_CORRUPT && header == 0);
        return l;
    }
    st_must(header >= 0 && 8 + header <= nbytes);
    return st_read((const char *)file + 8, header, nbytes - 8 - header);
}

ST_FN int st_same_entry(const fsdp_safetensors_entry *a, const fsdp_safetensors_entry *b) {
    return !strcmp(a->name, b->name) && a->dtype == b->dtype && a->ndim == b->ndim &&
           !memcmp(a->shape, b->shape, sizeof a->shape) &&
           !memcmp(a->start, b->start, sizeof a->start) &&
           !memcmp(a->whole, b->whole, sizeof a->whole) && a->begin == b->begin &&
           a->end == b->end && a->file_dtype == b->file_dtype;
}

/* Checks the invariants of an accepted list: names are unique, and every byte is covered once. */
ST_FN void st_check(const st_list *l, int64_t data_bytes) {
    int64_t end = 0;
    for (int64_t i = 0; i < l->n; i++) {
        const fsdp_safetensors_entry *e = &l->e[i];
        size_t length = strlen(e->name);
        st_must(length >= 1 && length <= 4096);
        st_must(e->begin == end && e->end >= end);
        end = e->end;
        st_must(e->ndim >= 0);
        if (e->dtype != FSDP_SAFETENSORS_OTHER && e->ndim <= FSDP_MAX_DIMS) {
            int64_t bytes = (int64_t)fsdp_dtype_size(e->dtype);
            int empty = 0;
            for (int d = 0; d < e->ndim; d++) empty |= e->shape[d] == 0;
            for (int d = 0; d < e->ndim && !empty; d++) bytes *= e->shape[d];
            st_must(e->end - e->begin == (empty ? 0 : bytes));
        }
        for (int d = 0; d < FSDP_MAX_DIMS; d++) {
            st_must(e->shape[d] >= 0 && e->start[d] >= 0 && e->whole[d] >= 0);
            st_must(d < e->ndim || (!e->shape[d] && !e->start[d] && !e->whole[d]));
            st_must(l->info.has_sharding || (!e->start[d] && !e->whole[d]));
        }
        for (int64_t k = 0; k < i && l->n < 100; k++) st_must(strcmp(l->e[k].name, e->name) != 0);
    }
    st_must(end == data_bytes);
}

/* Prints these entries and reads them again: they must be equal. Returns the header, which the
   caller frees, or NULL if they cannot be printed. */
ST_FN char *st_print_and_read(fsdp_safetensors_entry *e, int64_t n, int sharded,
                              const char *const *keys, const char *const *values, int pairs,
                              int64_t *size) {
    int64_t need = fsdp_safetensors_print(e, n, sharded, keys, values, pairs, NULL, 0);
    *size = need;
    if (need < 0) return NULL;
    st_must(need % 8 == 0 && need > 0);
    char *buf = (char *)st_room(need), *less = (char *)st_room(need / 2);
    st_must(fsdp_safetensors_print(e, n, sharded, keys, values, pairs, buf, need) == need);
    st_must(fsdp_safetensors_print(e, n, sharded, keys, values, pairs, less, need / 2) == need);
    st_end(buf, need);
    st_end(less, need / 2);
    free(less);
    st_list l = st_read(buf, need, n ? e[n - 1].end : 0);
    if (l.status) fprintf(stderr, "%.*s\n%s\n", (int)need, buf, l.why);
    st_must(l.status == FSDP_OK && l.n == n && l.info.has_sharding == (sharded != 0));
    for (int64_t i = 0; i < n; i++) {
        fsdp_safetensors_entry want = e[i];
        if (!sharded) memset(want.start, 0, sizeof want.start);
        if (!sharded) memset(want.whole, 0, sizeof want.whole);
        st_must(st_same_entry(&want, &l.e[i]));
    }
    st_check(&l, n ? e[n - 1].end : 0);
    st_free(&l);
    return buf;
}

/* ---- boxes ----------------------------------------------------------------------------------- */

enum { ST_BOX = 4096 }; /* maximum number of elements */

ST_FN int64_t st_numel(int ndim, const int64_t *shape) {
    int64_t n = 1;
    for (int d = 0; d < ndim; d++) n *= shape[d];
    return n;
}

/* Returns the index of an element of one box in another, or -1. */
ST_FN int64_t st_place(int ndim, int64_t k, const int64_t *start, const int64_t *shape,
                       const int64_t *other_start, const int64_t *other_shape) {
    int64_t at[FSDP_MAX_DIMS] = {0}, place = 0;
    for (int d = ndim - 1; d >= 0; d--) {
        at[d] = start[d] + k % shape[d];
        k /= shape[d];
    }
    for (int d = 0; d < ndim; d++) {
        int64_t in = at[d] - other_start[d];
        if (in < 0 || in >= other_shape[d]) return -1;
        place = place * other_shape[d] + in;
    }
    return place;
}

/* Checks that each shared element occurs once, in the order of dst, at its indices, and that runs
   have maximum length. */
ST_FN void st_check_boxes(int ndim, const int64_t *src_start, const int64_t *src_shape,
                          const int64_t *dst_start, const int64_t *dst_shape) {
    int64_t numel = st_numel(ndim, dst_shape), k = 0, runs = 0, src_end = -1, dst_end = -1;
    fsdp_box_overlap o, first;
    fsdp_box_begin(ndim, src_start, src_shape, dst_start, dst_shape, &o);
    first = o;
    st_must(numel <= ST_BOX);
    if (o.rows) do {
            st_must(o.src != src_end || o.dst != dst_end);
            src_end = o.src + o.elements, dst_end = o.dst + o.elements;
            st_must(o.elements > 0);
            runs++;
            for (int64_t i = 0; i < o.elements; i++, k++) {
                while (k < o.dst + i)
                    st_must(st_place(ndim, k++, dst_start, dst_shape, src_start, src_shape) < 0);
                st_must(k == o.dst + i);
                st_must(st_place(ndim, k, dst_start, dst_shape, src_start, src_shape) == o.src + i);
            }
        } while (fsdp_box_next(&o));
    for (; k < numel; k++)
        st_must(st_place(ndim, k, dst_start, dst_shape, src_start, src_shape) < 0);
    st_must(runs == first.rows && (o.rows != 0) == (o.elements != 0));
    st_must(memcmp(&o, &first, sizeof o) == 0); /* back at its first run */
}
#endif
