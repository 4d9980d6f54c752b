/* safetensors/format.h - what the format is made of: dtypes, sizes, UTF-8, texts

   Callers: programs, json.h (fsdpi_st_puts), write.h (fsdpi_st_puts), read.h (fsdpi_st_end) and
     others.

   A part of fsdp_safetensors.h. SPDX-License-Identifier: MIT (full text at the end of fsdp.h) */
#ifndef FSDP_SAFETENSORS_H
#include "../../fsdp_safetensors.h"
#endif
#ifndef FSDPI_SAFETENSORS_FORMAT_H
#define FSDPI_SAFETENSORS_FORMAT_H

#include <string.h>

// Dtypes, sizes, UTF-8, and an appender of texts.

enum { FSDPI_ST_HEADER = 100000000, FSDPI_ST_NAME = 4096, FSDPI_ST_DEPTH = 127 };
#define FSDPI_ST_SHARDING "DCP_SHARDING_INFO"

// The format's dtypes with their bits, in its order. A file stores tensors of the last dtypes
// first, so that each tensor is aligned.
#define FSDPI_ST_DTYPE_LIST(X)                                                                     \
    X(BOOL, 8, SAFETENSORS_OTHER)                                                                  \
    X(F4, 4, SAFETENSORS_OTHER)                                                                    \
    X(F6_E2M3, 6, SAFETENSORS_OTHER)                                                               \
    X(F6_E3M2, 6, SAFETENSORS_OTHER)                                                               \
    X(U8, 8, U8)                                                                                   \
    X(I8, 8, I8)                                                                                   \
    X(F8_E5M2, 8, SAFETENSORS_OTHER)                                                               \
    X(F8_E4M3, 8, SAFETENSORS_OTHER)                                                               \
    X(F8_E8M0, 8, SAFETENSORS_OTHER)                                                               \
    X(F8_E4M3FNUZ, 8, SAFETENSORS_OTHER)                                                           \
    X(F8_E5M2FNUZ, 8, SAFETENSORS_OTHER)                                                           \
    X(I16, 16, I16)                                                                                \
    X(U16, 16, SAFETENSORS_OTHER)                                                                  \
    X(F16, 16, F16)                                                                                \
    X(BF16, 16, BF16)                                                                              \
    X(I32, 32, I32)                                                                                \
    X(U32, 32, SAFETENSORS_OTHER)                                                                  \
    X(F32, 32, F32)                                                                                \
    X(C64, 64, SAFETENSORS_OTHER)                                                                  \
    X(F64, 64, F64)                                                                                \
    X(I64, 64, I64)                                                                                \
    X(U64, 64, SAFETENSORS_OTHER)

static const struct {
    char name[14];
    uint8_t bits, dtype;
} fsdpi_st_dtypes[] = {
#define FSDP_X(name, bits, dtype) {#name, bits, FSDP_##dtype},
    FSDPI_ST_DTYPE_LIST(FSDP_X)
#undef FSDP_X
};
enum { FSDPI_ST_DTYPES = sizeof fsdpi_st_dtypes / sizeof *fsdpi_st_dtypes };

FSDP_API const char *fsdp_safetensors_dtype_name(int32_t file_dtype) {
    return file_dtype >= 0 && file_dtype < FSDPI_ST_DTYPES ? fsdpi_st_dtypes[file_dtype].name : "?";
}

// Multiplies *numel by a size. Returns 0 if the product exceeds 64 bits. As in the reference, sizes
// are multiplied from left to right: an overflow fails even if a later size is 0.
static int fsdpi_st_numel(uint64_t *numel, uint64_t size) {
    if (size && *numel > UINT64_MAX / size) return 0;
    *numel *= size;
    return 1;
}

// Returns the bytes of the UTF-8 character at s, or 0 if it is invalid. Requires n > 0 bytes at s.
static int fsdpi_st_character(const unsigned char *s, int64_t n) {
    int size = s[0] >= 0xF0 ? 4 : s[0] >= 0xE0 ? 3 : 2;
    if (s[0] < 0x80) return 1;
    if (s[0] < 0xC2 || s[0] > 0xF4 || size > n) return 0;
    for (int i = 1; i < size; i++)
        if ((s[i] & 0xC0) != 0x80) return 0;
    if (s[0] == 0xE0 && s[1] < 0xA0) return 0;  // has a shorter form
    if (s[0] == 0xED && s[1] >= 0xA0) return 0; // a surrogate
    if (s[0] == 0xF0 && s[1] < 0x90) return 0;  // has a shorter form
    if (s[0] == 0xF4 && s[1] >= 0x90) return 0; // above U+10FFFF
    return size;
}

// Returns the number of bytes before the first one that is not UTF-8, or n.
static int64_t fsdpi_st_utf8(const unsigned char *s, int64_t n) {
    int64_t at = 0;
    for (int size = 1; at < n && size > 0; at += size) size = fsdpi_st_character(s + at, n - at);
    return at;
}

static int fsdpi_st_encode(uint32_t c, char *out) {
    int size = c < 0x80 ? 1 : c < 0x800 ? 2 : c < 0x10000 ? 3 : 4;
    static const uint8_t lead[] = {0, 0, 0xC0, 0xE0, 0xF0};
    for (int i = size - 1; i > 0; i--, c >>= 6) out[i] = (char)(0x80 | (c & 0x3F));
    out[0] = (char)(lead[size] | c);
    return size;
}

// A text. Bytes that do not fit are counted, but not written.
typedef struct fsdpi_st_out {
    char *to;
    int64_t cap, used;
} fsdpi_st_out;

static void fsdpi_st_put(fsdpi_st_out *o, const char *from, int64_t n) {
    int64_t room = o->cap - o->used;
    if (n < room) room = n;
    if (room > 0) memcpy(o->to + o->used, from, (size_t)room);
    o->used += n;
}

static void fsdpi_st_puts(fsdpi_st_out *o, const char *text) {
    fsdpi_st_put(o, text, (int64_t)strlen(text));
}

static void fsdpi_st_put_number(fsdpi_st_out *o, uint64_t x) {
    char digits[20];
    int at = 20;
    do digits[--at] = (char)('0' + x % 10);
    while (x /= 10);
    fsdpi_st_put(o, digits + at, 20 - at);
}

static void fsdpi_st_put_list(fsdpi_st_out *o, int ndim, const int64_t *list, const char *comma) {
    fsdpi_st_puts(o, "[");
    for (int d = 0; d < ndim && d < FSDP_MAX_DIMS; d++) {
        if (d) fsdpi_st_puts(o, comma);
        fsdpi_st_put_number(o, (uint64_t)list[d]);
    }
    fsdpi_st_puts(o, ndim > FSDP_MAX_DIMS ? ", ...]" : "]");
}

// Appends the beginning of a text from a file to an error text, without control characters.
static void fsdpi_st_put_shown(fsdpi_st_out *o, const char *s) {
    int n = 0;
    while (n < 64 && s[n]) n++;
    if (s[n])
        while (n > 0 && ((unsigned char)s[n] & 0xC0) == 0x80) n--; // whole characters
    for (int i = 0; i < n; i++)
        fsdpi_st_put(o, (unsigned char)s[i] < 0x20 || s[i] == 0x7F ? "?" : s + i, 1);
    if (s[n]) fsdpi_st_puts(o, "...");
}

// Terminates a text in its cap + 1 bytes, after a complete character.
static void fsdpi_st_end(fsdpi_st_out *o) {
    int64_t n = o->used < o->cap ? o->used : o->cap, last = n;
    if (!o->to) return;
    while (last > 0 && ((unsigned char)o->to[last - 1] & 0xC0) == 0x80) last--;
    if (last > 0 && !fsdpi_st_character((unsigned char *)o->to + last - 1, n - last + 1))
        n = last - 1;
    o->to[n] = 0;
}

static fsdpi_st_out fsdpi_st_why(char *why, size_t cap) {
    fsdpi_st_out o = {why && cap ? why : NULL, why && cap ? (int64_t)cap - 1 : 0, 0};
    return o;
}

#endif // FSDPI_SAFETENSORS_FORMAT_H
