/* checkpoint/manifest.h - the manifest of a checkpoint, printed and read

   Prints and reads manifest.json (docs/checkpoints.md), the last file that a save writes: it lists
   files, sizes and checksums. The headers of the data files say where each tensor lies.
   Callers: export.h (fsdpi_ck_say), save.h (fsdpi_ck_print_begin), open.h (fsdpi_ck_index_stem) and
     others.

   A part of fsdp_checkpoint.h. SPDX-License-Identifier: MIT (full text at the end of fsdp.h) */
#ifndef FSDP_CHECKPOINT_H
#include "../../fsdp_checkpoint.h"
#endif
#ifndef FSDPI_CHECKPOINT_MANIFEST_H
#define FSDPI_CHECKPOINT_MANIFEST_H

#include "files.h"
#include "../safetensors/format.h"
#include "../safetensors/json.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

// One data file of a checkpoint, as in the manifest.
typedef struct fsdpi_ck_file {
    const char *name;
    int64_t bytes, header; // bytes of the file; N of its header
    uint32_t header_crc;   // CRC of the first 8 + N bytes
    const uint32_t *crcs;  // CRC of each MiB of its data
    int64_t num_crcs;
} fsdpi_ck_file;

static int64_t fsdpi_ck_blocks(int64_t nbytes) {
    return (nbytes + FSDPI_CK_BLOCK - 1) / FSDPI_CK_BLOCK;
}
static void fsdpi_ck_shard_name(char out[FSDPI_CK_LEAF], int rank) {
    snprintf(out, FSDPI_CK_LEAF, "shard-%05d-model-00001-of-00001.safetensors", rank + 1);
}
static void fsdpi_ck_step_name(char out[FSDPI_CK_LEAF], int64_t step) {
    snprintf(out, FSDPI_CK_LEAF, "step-%08lld", (long long)step);
}

/* Prints the beginning of a data file: N in 8 bytes, and the header of `num` entries. With
   `sharded` these belong to rank `writer` of `writers`; otherwise they are whole tensors, as
   transformers saves them. Returns its bytes and writes at most `room` of them to `to`;
   negative: an entry cannot be printed. */
static int64_t fsdpi_ck_print_begin(fsdp_safetensors_entry *entries, int64_t num, int sharded,
                                    int writer, int writers, char *to, int64_t room) {
    static const char *const keys[3] = {"DCP_VERSION", "format", "fsdp.writer"};
    char who[32];
    const char *values[3] = {"1.0", "pt", who};
    const int first = !sharded, pairs = sharded ? 3 : 1; // otherwise only the format
    snprintf(who, sizeof who, "%d/%d", writer + 1, writers);
    int64_t n = fsdp_safetensors_print(entries, num, sharded, keys + first, values + first, pairs,
                                       room > 8 ? to + 8 : NULL, room > 8 ? room - 8 : 0);
    for (int i = 0; i < 8 && i < room; i++) to[i] = (char)((uint64_t)n >> (8 * i) & 255);
    return n < 0 ? n : 8 + n;
}

// Returns an upper bound for the bytes of a manifest's text.
static int64_t fsdpi_ck_manifest_room(int64_t num_files, int64_t num_crcs) {
    return 256 + num_files * 256 + num_crcs * 8;
}

typedef struct fsdpi_ck_print {
    char *buf;
    int64_t used;
} fsdpi_ck_print;
FSDP_PRINTF(2, 3) static void fsdpi_ck_say(fsdpi_ck_print *p, const char *format, ...) {
    va_list args;
    va_start(args, format);
    int n = vsnprintf(p->buf + p->used, 256, format, args);
    va_end(args);
    p->used += n > 0 ? n : 0;
}

/* Prints the manifest of `size` files. world: number of ranks whose blobs are in the files.
   sizes: three numbers per file: bytes of the header and the 8 before it, bytes of the data, CRC
   of the header; a file with 0 header bytes does not exist. Returns the bytes of the text. */
static int64_t fsdpi_ck_print_manifest(char *buf, int64_t step, int64_t world, int size,
                                       const int64_t *sizes, const uint32_t *crcs) {
    fsdpi_ck_print p = {buf, 0};
    const char *between = "";
    char name[FSDPI_CK_LEAF];
    fsdpi_ck_say(&p,
                 "{\"fsdp_checkpoint\":1,\n\"step\":%lld,\n\"world\":%lld,\n\"block\":%d,\n"
                 "\"files\":[",
                 (long long)step, (long long)world, FSDPI_CK_BLOCK);
    for (int r = 0; r < size; r++) {
        const int64_t *s = sizes + 3 * (int64_t)r;
        if (!s[0]) continue;
        fsdpi_ck_shard_name(name, r);
        fsdpi_ck_say(&p,
                     "%s\n{\"name\":\"%s\",\"bytes\":%lld,\"header\":%lld,\"header_crc\":"
                     "\"%08x\",\"crc\":\"",
                     between, name, (long long)(s[0] + s[1]), (long long)(s[0] - 8),
                     (unsigned)s[2]);
        for (int64_t b = fsdpi_ck_blocks(s[1]); b > 0; b--) fsdpi_ck_say(&p, "%08x", *crcs++);
        fsdpi_ck_say(&p, "\"}");
        between = ",";
    }
    fsdpi_ck_say(&p, "\n]");
    fsdpi_ck_say(&p, ",\n\"crc32c\":\"%08x\"}\n", fsdp_crc32c(0, buf, p.used));
    return p.used;
}

/* -------------------------------------------------------------------------------------------- */
// Reading. The bytes of the file are not trusted. Each is read twice: once to measure, once to fill
// memory.

// Returns 1 if it is a plain file name with this ending: no path, no leading dot, only
// [A-Za-z0-9._-].
static int fsdpi_ck_is_plain(const char *name, const char *end) {
    size_t n = strlen(name), k = strlen(end);
    if (n <= k || n > 255 || *name == '.' || strcmp(name + n - k, end) != 0) return 0;
    for (const char *c = name; *c; c++)
        if (!((*c >= 'a' && *c <= 'z') || (*c >= 'A' && *c <= 'Z') || (*c >= '0' && *c <= '9') ||
              *c == '.' || *c == '_' || *c == '-'))
            return 0;
    return 1;
}
// Returns 1 if it can name a data file.
static int fsdpi_ck_is_leaf(const char *name) { return fsdpi_ck_is_plain(name, ".safetensors"); }

// Returns the bytes of NAME.safetensors in NAME.safetensors.index[.variant].json; 0: another name.
static int64_t fsdpi_ck_index_stem(const char *name) {
    const char *at = strstr(name, ".safetensors.index.");
    return at && at > name && fsdpi_ck_is_plain(name, ".json")
               ? at - name + (int64_t)strlen(".safetensors")
               : 0;
}

typedef struct fsdpi_ck_manifest {
    int64_t step, world;
    int64_t num_files, num_crcs, text_bytes;
    fsdpi_ck_file *files; // files, crcs, text: memory for them, or NULL to measure
    uint32_t *crcs;
    char *text;
    fsdpi_st_reader r;
    fsdpi_st_out why;
} fsdpi_ck_manifest;

static int fsdpi_ck_read_leaf(fsdpi_st_reader *r, char out[256]) {
    fsdpi_st_string s;
    if (!fsdpi_st_read_string(r, &s)) return 0;
    out[0] = 0;
    if (s.bytes < 256) fsdpi_st_copy(r, &s, out, 255);
    if (fsdpi_ck_is_leaf(out)) return 1;
    return fsdpi_st_wrong(r, "before byte %p: a name that a data file cannot have: expected "
                             "letters, digits, '.', '_', '-' and .safetensors at the end");
}

// Reads a string of hexadecimal numbers, 8 digits each. Stores the first `room` of them.
static int fsdpi_ck_read_crcs(fsdpi_st_reader *r, uint32_t *crcs, int64_t room, int64_t *count) {
    fsdpi_st_string s;
    if (!fsdpi_st_read_string(r, &s)) return 0;
    *count = (s.end - s.begin) / 8;
    int bad = (s.end - s.begin) % 8 != 0;
    for (int64_t i = 0; i < *count && !bad; i++) {
        int high = fsdpi_st_hex(r->text + s.begin + 8 * i, 4);
        int low = fsdpi_st_hex(r->text + s.begin + 8 * i + 4, 4);
        bad = high < 0 || low < 0;
        if (i < room && !bad) crcs[i] = (uint32_t)high << 16 | (uint32_t)low;
    }
    return bad ? fsdpi_st_wrong(r, "before byte %p: a checksum that is not 8 hexadecimal digits")
               : 1;
}

static int fsdpi_ck_read_file(fsdpi_ck_manifest *m) {
    fsdpi_st_reader *r = &m->r;
    fsdpi_st_string key;
    fsdpi_ck_file f;
    char name[256] = "";
    int64_t members = 0, one = 0;
    int more, seen = 0;
    memset(&f, 0, sizeof f);
    if (!fsdpi_st_took(r, '{')) return fsdpi_st_expected(r, "'{'");
    while ((more = fsdpi_st_read_member(r, &members, &key)) > 0) {
        int which = fsdpi_st_is(r, &key, "name")         ? 1
                    : fsdpi_st_is(r, &key, "bytes")      ? 2
                    : fsdpi_st_is(r, &key, "header")     ? 4
                    : fsdpi_st_is(r, &key, "header_crc") ? 8
                    : fsdpi_st_is(r, &key, "crc")        ? 16
                                                         : 0;
        int ok = which == 1    ? fsdpi_ck_read_leaf(r, name)
                 : which == 2  ? fsdpi_st_read_integer(r, &f.bytes)
                 : which == 4  ? fsdpi_st_read_integer(r, &f.header)
                 : which == 8  ? fsdpi_ck_read_crcs(r, &f.header_crc, 1, &one) && one == 1
                 : which == 16 ? fsdpi_ck_read_crcs(r, m->crcs ? m->crcs + m->num_crcs : NULL,
                                                    m->crcs ? INT64_MAX : 0, &f.num_crcs)
                               : fsdpi_st_skip(r, 3);
        if (!ok || seen & which) return more < 0 ? 0 : fsdpi_st_expected(r, "each member once");
        seen |= which;
    }
    if (more < 0) return 0;
    if (seen != 31) return fsdpi_st_expected(r, "name, bytes, header, header_crc and crc");
    int64_t data = f.bytes - 8 - f.header;
    if (f.header > FSDPI_CK_MOST_HEADER || data < 0 || f.num_crcs != fsdpi_ck_blocks(data))
        return fsdpi_st_expected(r, "sizes that agree with the number of checksums");
    if (m->files) {
        f.name = m->text + m->text_bytes;
        f.crcs = m->crcs + m->num_crcs;
        memcpy(m->text + m->text_bytes, name, strlen(name) + 1);
        m->files[m->num_files] = f;
    }
    m->num_files++;
    m->num_crcs += f.num_crcs;
    m->text_bytes += (int64_t)strlen(name) + 1;
    return m->num_files <= FSDPI_CK_MOST_FILES || fsdpi_st_expected(r, "at most 1,000,000 files");
}

static int fsdpi_ck_read_files(fsdpi_ck_manifest *m) {
    fsdpi_st_reader *r = &m->r;
    if (!fsdpi_st_took(r, '[')) return fsdpi_st_expected(r, "'['");
    if (fsdpi_st_took(r, ']')) return 1;
    do {
        if (!fsdpi_ck_read_file(m)) return 0;
    } while (fsdpi_st_took(r, ','));
    return fsdpi_st_took(r, ']') || fsdpi_st_expected(r, "',' or ']'");
}

static int fsdpi_ck_read_members(fsdpi_ck_manifest *m, int64_t *version) {
    fsdpi_st_reader *r = &m->r;
    fsdpi_st_string key;
    int64_t members = 0, block = 0;
    int more, seen = 0;
    if (!fsdpi_st_took(r, '{')) return fsdpi_st_expected(r, "'{'");
    while ((more = fsdpi_st_read_member(r, &members, &key)) > 0) {
        int which = fsdpi_st_is(r, &key, "fsdp_checkpoint") ? 1
                    : fsdpi_st_is(r, &key, "step")          ? 2
                    : fsdpi_st_is(r, &key, "world")         ? 4
                    : fsdpi_st_is(r, &key, "block")         ? 8
                    : fsdpi_st_is(r, &key, "files")         ? 16
                                                            : 0;
        if (seen & which) return fsdpi_st_expected(r, "each member once");
        seen |= which;
        int ok = which == 1    ? fsdpi_st_read_integer(r, version)
                 : which == 2  ? fsdpi_st_read_integer(r, &m->step)
                 : which == 4  ? fsdpi_st_read_integer(r, &m->world)
                 : which == 8  ? fsdpi_st_read_integer(r, &block)
                 : which == 16 ? fsdpi_ck_read_files(m)
                               : fsdpi_st_skip(r, 1);
        if (!ok) return 0;
        if (*version > 1) return 0;
    }
    if (more < 0) return 0;
    if (fsdpi_st_peek(r) != -1) return fsdpi_st_expected(r, "the end");
    if (seen != 31 || *version != 1 || block != FSDPI_CK_BLOCK)
        return fsdpi_st_expected(r, "fsdp_checkpoint 1, step, world, block 1048576 and files");
    return 1;
}

static int fsdpi_ck_by_leaf(const void *a, const void *b) {
    return strcmp(((const fsdpi_ck_file *)a)->name, ((const fsdpi_ck_file *)b)->name);
}

/* Reads a manifest; with files, crcs and text NULL it measures. Returns OK, or CORRUPT or
   UNSUPPORTED with the reason in `why`. */
static fsdp_status fsdpi_ck_parse_manifest(fsdpi_ck_manifest *m, const char *text, int64_t nbytes,
                                           char *why, size_t cap) {
    static const char tail[] = ",\n\"crc32c\":\"";
    int64_t end = nbytes - 23, version = 0, one = 0;
    uint32_t crc = 0;
    m->num_files = m->num_crcs = m->text_bytes = 0;
    m->why = fsdpi_st_why(why, cap);
    memset(&m->r, 0, sizeof m->r);
    m->r.text = (const unsigned char *)text;
    m->r.size = nbytes;
    m->r.inside = "";
    m->r.why = &m->why;
    fsdpi_st_reader at_tail = m->r;
    at_tail.at = end + 11;
    int ok = end > 0 && memcmp(text + end, tail, sizeof tail - 1) == 0 &&
             fsdpi_ck_read_crcs(&at_tail, &crc, 1, &one) && one == 1;
    if (!ok) (void)fsdpi_st_wrong(&m->r, "the manifest is cut off: its last line has no crc32c");
    if (ok && fsdp_crc32c(0, text, end) != crc)
        ok = fsdpi_st_wrong(&m->r, "the manifest was changed: its checksum differs");
    if (ok) ok = fsdpi_st_utf8(m->r.text, nbytes) == nbytes || fsdpi_st_wrong(&m->r, "not UTF-8");
    if (ok) ok = fsdpi_ck_read_members(m, &version);
    if (version > 1) {
        fsdpi_st_end(&m->why);
        snprintf(why, cap, "manifest version %lld, this library reads 1: use a newer one",
                 (long long)version);
        return FSDP_ERR_UNSUPPORTED;
    }
    if (ok && m->files) {
        qsort(m->files, (size_t)m->num_files, sizeof *m->files, fsdpi_ck_by_leaf);
        for (int64_t i = 1; i < m->num_files && ok; i++)
            if (strcmp(m->files[i - 1].name, m->files[i].name) == 0)
                ok = fsdpi_st_wrong(&m->r, "the manifest lists a file twice");
    }
    fsdpi_st_end(&m->why);
    return ok ? FSDP_OK : FSDP_ERR_CORRUPT;
}

// One line of a Hugging Face index: the file that a tensor is in.
typedef struct fsdpi_ck_where {
    const char *name, *leaf;
    int there; // 1: the tensor is only in other files; 2: it is in this file
} fsdpi_ck_where;

typedef struct fsdpi_ck_index {
    int64_t num, text_bytes;
    fsdpi_ck_where *list; // list, text: memory for them, or NULL to measure
    char *text;
} fsdpi_ck_index;

static int fsdpi_ck_read_where(fsdpi_ck_index *x, fsdpi_st_reader *r, const fsdpi_st_string *key) {
    char leaf[256];
    if (!fsdpi_ck_read_leaf(r, leaf)) return 0;
    if (x->list) {
        char *to = x->text + x->text_bytes;
        x->list[x->num].name = to;
        fsdpi_st_copy(r, key, to, key->bytes);
        x->list[x->num].leaf = to + key->bytes + 1;
        x->list[x->num].there = 0;
        memcpy(to + key->bytes + 1, leaf, strlen(leaf) + 1);
    }
    x->text_bytes += key->bytes + 1 + (int64_t)strlen(leaf) + 1;
    x->num++;
    return 1;
}

static fsdp_status fsdpi_ck_parse_index(fsdpi_ck_index *x, const char *text, int64_t nbytes,
                                        char *why, size_t cap) {
    fsdpi_st_out out = fsdpi_st_why(why, cap);
    fsdpi_st_reader r;
    fsdpi_st_string key;
    int64_t members = 0, inner = 0;
    int more = 1, ok = 1, seen = 0;
    memset(&r, 0, sizeof r);
    r.text = (const unsigned char *)text, r.size = nbytes, r.inside = "", r.why = &out;
    x->num = x->text_bytes = 0;
    if (fsdpi_st_utf8(r.text, nbytes) != nbytes) ok = fsdpi_st_wrong(&r, "not UTF-8");
    if (ok && !fsdpi_st_took(&r, '{')) ok = fsdpi_st_expected(&r, "'{'");
    while (ok && (more = fsdpi_st_read_member(&r, &members, &key)) > 0) {
        if (!fsdpi_st_is(&r, &key, "weight_map")) {
            ok = fsdpi_st_skip(&r, 1);
            continue;
        }
        if (seen++) ok = fsdpi_st_expected(&r, "weight_map once");
        if (ok && !fsdpi_st_took(&r, '{')) ok = fsdpi_st_expected(&r, "'{'");
        while (ok && (more = fsdpi_st_read_member(&r, &inner, &key)) > 0)
            ok = fsdpi_ck_read_where(x, &r, &key);
        if (more < 0) ok = 0;
    }
    if (more < 0) ok = 0;
    if (ok && (!seen || fsdpi_st_peek(&r) != -1))
        ok = fsdpi_st_expected(&r, "weight_map, then the end");
    fsdpi_st_end(&out);
    return ok ? FSDP_OK : FSDP_ERR_CORRUPT;
}

#endif // FSDPI_CHECKPOINT_MANIFEST_H
