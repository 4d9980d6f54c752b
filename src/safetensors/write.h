/* safetensors/write.h - writing headers

   Prints headers.
   Callers: programs, checkpoint/export.h (fsdpi_st_escape) and checkpoint/table.h
     (fsdpi_st_is_text).

   A part of fsdp_safetensors.h. SPDX-License-Identifier: MIT (full text at the end of fsdp.h) */
#ifndef FSDP_SAFETENSORS_H
#include "../../fsdp_safetensors.h"
#endif
#ifndef FSDPI_SAFETENSORS_WRITE_H
#define FSDPI_SAFETENSORS_WRITE_H

#include "box.h"
#include "format.h"
#include "read.h"

#include <string.h>

static int fsdpi_st_escape(char c, char *out) {
    static const char meant[] = "\"\\\b\f\n\r\t", letters[] = "\"\\bfnrt";
    static const char hex[] = "0123456789abcdef";
    const char *at = c ? strchr(meant, c) : NULL;
    unsigned char u = (unsigned char)c;
    if (at) {
        out[0] = '\\', out[1] = letters[at - meant];
        return 2;
    }
    out[0] = c;
    if (u >= 0x20) return 1;
    memcpy(out, "\\u00", 4);
    out[4] = hex[u >> 4], out[5] = hex[u & 15];
    return 6;
}

// Appends a string in quotes; `twice`: escaped for a text that is a string itself.
static void fsdpi_st_put_string(fsdpi_st_out *o, const char *s, int twice) {
    const char *quote = twice ? "\\\"" : "\"";
    char once[6], again[6];
    fsdpi_st_puts(o, quote);
    for (; *s; s++) {
        int n = fsdpi_st_escape(*s, once);
        if (!twice) fsdpi_st_put(o, once, n);
        for (int i = 0; i < n && twice; i++)
            fsdpi_st_put(o, again, fsdpi_st_escape(once[i], again));
    }
    fsdpi_st_puts(o, quote);
}

// Returns 1 if the caller has set the whole shape. All 0 counts only if start and shape are 0 as
// well.
static int fsdpi_st_has_whole(const fsdp_safetensors_entry *e) {
    int64_t whole = 0, box = 0;
    for (int d = 0; d < e->ndim; d++) whole |= e->whole[d], box |= e->start[d] | e->shape[d];
    return whole || !box;
}

static int fsdpi_st_is_text(const char *s) {
    int64_t n = s ? (int64_t)strlen(s) : -1;
    return n >= 0 && fsdpi_st_utf8((const unsigned char *)s, n) == n;
}

// Checks an entry to be written, and sets its dtype and its number of bytes.
static int fsdpi_st_check_printed(fsdp_safetensors_entry *e, int sharded) {
    uint64_t numel = 1;
    if (!fsdpi_st_is_text(e->name) || !e->name[0] || strlen(e->name) > FSDPI_ST_NAME ||
        strcmp(e->name, "__metadata__") == 0)
        return 0;
    const int other = e->dtype == FSDP_SAFETENSORS_OTHER; // then file_dtype counts
    if ((!other && !fsdp_dtype_size(e->dtype)) || e->ndim < 0 || e->ndim > FSDP_MAX_DIMS) return 0;
    if (!other) e->file_dtype = 0;
    if (e->file_dtype < 0 || e->file_dtype >= FSDPI_ST_DTYPES) return 0;
    while (!other && fsdpi_st_dtypes[e->file_dtype].dtype != e->dtype) e->file_dtype++;
    if (fsdpi_st_dtypes[e->file_dtype].dtype != e->dtype) return 0;
    for (int d = 0; d < e->ndim; d++) {
        int64_t size = e->shape[d], most = FSDPI_ST_MOST;
        if (size < 0 || size > most || !fsdpi_st_numel(&numel, (uint64_t)size)) return 0;
        if (!sharded) continue;
        if (fsdpi_st_has_whole(e)) most = e->whole[d];
        if (most < 0 || most > FSDPI_ST_MOST || size > most || e->start[d] < 0 ||
            e->start[d] > most - size)
            return 0;
    }
    if (!fsdpi_st_numel(&numel, fsdpi_st_dtypes[e->file_dtype].bits) || numel % 8) return 0;
    e->begin = 0, e->end = (int64_t)(numel / 8);
    return 1;
}

static int fsdpi_st_check_pairs(const char *const *keys, const char *const *values, int num) {
    if (num < 0 || (num > 0 && (!keys || !values))) return 0;
    for (int i = 0; i < num; i++)
        if (!fsdpi_st_is_text(keys[i]) || !fsdpi_st_is_text(values[i]) ||
            strcmp(keys[i], FSDPI_ST_SHARDING) == 0 || (i && strcmp(keys[i - 1], keys[i]) >= 0))
            return 0;
    return 1;
}

static void fsdpi_st_put_sharding(fsdpi_st_out *o, const fsdp_safetensors_entry *entries,
                                  int64_t num) {
    fsdpi_st_puts(o, "\"" FSDPI_ST_SHARDING "\":\"{");
    for (int64_t i = 0; i < num; i++) {
        const fsdp_safetensors_entry *e = &entries[i];
        if (i) fsdpi_st_puts(o, ",");
        fsdpi_st_put_string(o, e->name, 1);
        fsdpi_st_puts(o, ":{\\\"saved_offsets\\\":");
        fsdpi_st_put_list(o, e->ndim, e->start, ",");
        if (fsdpi_st_has_whole(e)) {
            fsdpi_st_puts(o, ",\\\"global_shape\\\":");
            fsdpi_st_put_list(o, e->ndim, e->whole, ",");
        }
        fsdpi_st_puts(o, "}");
    }
    fsdpi_st_puts(o, "}\"");
}

static void fsdpi_st_put_header(fsdpi_st_out *o, const fsdp_safetensors_entry *entries, int64_t num,
                                int sharded, const char *const *keys, const char *const *values,
                                int num_pairs) {
    int written = 0, members = 0;
    fsdpi_st_puts(o, "{");
    if (sharded || num_pairs) {
        fsdpi_st_puts(o, "\"__metadata__\":{");
        for (int i = 0; i <= num_pairs; i++) {
            if (sharded && !written && (i == num_pairs || strcmp(keys[i], FSDPI_ST_SHARDING) > 0)) {
                if (members++) fsdpi_st_puts(o, ",");
                fsdpi_st_put_sharding(o, entries, num);
                written = 1;
            }
            if (i == num_pairs) break;
            if (members++) fsdpi_st_puts(o, ",");
            fsdpi_st_put_string(o, keys[i], 0);
            fsdpi_st_puts(o, ":");
            fsdpi_st_put_string(o, values[i], 0);
        }
        fsdpi_st_puts(o, "}");
    }
    for (int64_t i = 0; i < num; i++) {
        const fsdp_safetensors_entry *e = &entries[i];
        const int64_t bytes[2] = {e->begin, e->end};
        if (i || members) fsdpi_st_puts(o, ",");
        fsdpi_st_put_string(o, e->name, 0);
        fsdpi_st_puts(o, ":{\"dtype\":\"");
        fsdpi_st_puts(o, fsdpi_st_dtypes[e->file_dtype].name);
        fsdpi_st_puts(o, "\",\"shape\":");
        fsdpi_st_put_list(o, e->ndim, e->shape, ",");
        fsdpi_st_puts(o, ",\"data_offsets\":");
        fsdpi_st_put_list(o, 2, bytes, ",");
        fsdpi_st_puts(o, "}");
    }
    fsdpi_st_puts(o, "}");
    while (o->used % 8) fsdpi_st_puts(o, " ");
}

FSDP_API int64_t fsdp_safetensors_print(fsdp_safetensors_entry *entries, int64_t num, int sharded,
                                        const char *const *keys, const char *const *values,
                                        int num_pairs, char *buf, int64_t cap) {
    fsdpi_st_sorted s = {entries, NULL, num, fsdpi_st_by_name};
    fsdpi_st_out o = {buf, buf && cap > 0 ? cap : 0, 0};
    int64_t end = 0;
    if (num < 0 || (num && !entries) || !fsdpi_st_check_pairs(keys, values, num_pairs)) return -1;
    for (int64_t i = 0; i < num; i++)
        if (!fsdpi_st_check_printed(&entries[i], sharded)) return -1;
    fsdpi_st_sort(&s); // equal names become adjacent
    for (int64_t i = 1; i < num; i++)
        if (strcmp(entries[i - 1].name, entries[i].name) == 0) return -1;
    s.before = fsdpi_st_by_file;
    fsdpi_st_sort(&s);
    for (int64_t i = 0; i < num; i++) {
        if (entries[i].end > FSDPI_ST_MOST - end) return -1;
        entries[i].begin = end;
        end = entries[i].end += end;
    }
    fsdpi_st_put_header(&o, entries, num, sharded, keys, values, num_pairs);
    return o.used > FSDPI_ST_HEADER ? -1 : o.used;
}

#endif // FSDPI_SAFETENSORS_WRITE_H
