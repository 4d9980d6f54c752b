/* safetensors/json.h - a reader of JSON that neither recurses nor allocates

   Reads JSON: spaces, strings, integers, members, and values to skip. A function returns 1, or 0
   after a failure, whose text it has written. No function recurses.
   Callers: read.h (fsdpi_st_fail) and checkpoint/manifest.h (fsdpi_st_expected).

   A part of fsdp_safetensors.h. SPDX-License-Identifier: MIT (full text at the end of fsdp.h) */
#ifndef FSDP_SAFETENSORS_H
#include "../../fsdp_safetensors.h"
#endif
#ifndef FSDPI_SAFETENSORS_JSON_H
#define FSDPI_SAFETENSORS_JSON_H

#include "box.h"
#include "format.h"

#include <string.h>

typedef struct fsdpi_st_string { // its position in the text, between quotes
    int64_t begin, end, bytes;   // bytes: length once decoded
} fsdpi_st_string;

typedef struct fsdpi_st_reader {
    const unsigned char *text; // UTF-8
    int64_t size, at;
    int64_t origin;       // position of the text in the file, for error texts
    const char *inside;   // beginning of error texts
    fsdpi_st_string name; // name of the current tensor
    fsdpi_st_out *why;
} fsdpi_st_reader;

// Values for an error text: %a, %b texts of the file; %0 .. %3 numbers; %e dtype and shape.
typedef struct fsdpi_st_facts {
    const char *a, *b;
    int64_t n[4];
    const fsdp_safetensors_entry *e;
} fsdpi_st_facts;

static fsdpi_st_facts fsdpi_st_numbers(const char *a, int64_t n0, int64_t n1, int64_t n2) {
    fsdpi_st_facts f = {a, NULL, {n0, n1, n2, 0}, NULL};
    return f;
}

static int fsdpi_st_hex(const unsigned char *s, int64_t n) {
    int x = 0;
    if (n < 4) return -1;
    for (int i = 0; i < 4; i++) {
        int c = s[i] >= 'A' ? s[i] | 0x20 : s[i]; // lower case
        if ((c < '0' || c > '9') && (c < 'a' || c > 'f')) return -1;
        x = x * 16 + (c <= '9' ? c - '0' : c - 'a' + 10);
    }
    return x;
}

// Decodes the byte or escape at s into out[4]; s has n > 0 bytes. Returns the bytes in out, or 0
// for an invalid escape. Sets *taken to the bytes of s.
static int fsdpi_st_decode(const unsigned char *s, int64_t n, char *out, int *taken) {
    static const char letters[] = "\"\\/bfnrt", meant[] = "\"\\/\b\f\n\r\t";
    *taken = s[0] == '\\' ? 2 : 1;
    out[0] = (char)s[0];
    if (s[0] != '\\') return 1;
    if (n < 2 || !s[1]) return 0;
    const char *letter = strchr(letters, s[1]);
    if (letter) {
        out[0] = meant[letter - letters];
        return 1;
    }
    int high = s[1] == 'u' ? fsdpi_st_hex(s + 2, n - 2) : -1;
    *taken = 6;
    if (high < 0 || (high & 0xFC00) == 0xDC00) return 0;
    if ((high & 0xFC00) != 0xD800) return fsdpi_st_encode((uint32_t)high, out);
    int low = n >= 12 && s[6] == '\\' && s[7] == 'u' ? fsdpi_st_hex(s + 8, n - 8) : -1;
    *taken = 12;
    if (low < 0 || (low & 0xFC00) != 0xDC00) return 0; // half of a surrogate pair
    return fsdpi_st_encode(0x10000u + ((uint32_t)(high & 0x3FF) << 10) + (uint32_t)(low & 0x3FF),
                           out);
}

// Decodes the string into `to`, at most `room` bytes of whole characters and a NUL. `to` may be the
// text itself.
static void fsdpi_st_copy(const fsdpi_st_reader *r, const fsdpi_st_string *s, char *to,
                          int64_t room) {
    int64_t n = 0;
    for (int64_t at = s->begin; at < s->end;) {
        char unit[4];
        int taken, size = fsdpi_st_decode(r->text + at, s->end - at, unit, &taken);
        if (n + size > room) { // drops what it has of a character that does not fit
            if ((unit[0] & 0xC0) == 0x80)
                while (n && (to[--n] & 0xC0) == 0x80) {}
            break;
        }
        memcpy(to + n, unit, (size_t)size);
        n += size;
        at += taken;
    }
    to[n] = 0;
}

static int fsdpi_st_is(const fsdpi_st_reader *r, const fsdpi_st_string *s, const char *word) {
    char copy[24];
    int64_t n = (int64_t)strlen(word);
    if (s->bytes != n) return 0;
    fsdpi_st_copy(r, s, copy, (int64_t)sizeof copy - 1);
    return memcmp(copy, word, (size_t)n) == 0;
}

static void fsdpi_st_put_got(const fsdpi_st_reader *r, fsdpi_st_out *o) {
    static const char hex[] = "0123456789abcdef";
    int c = r->at < r->size ? r->text[r->at] : -1;
    char shown[] = "'c'", byte[] = "byte 0x00";
    shown[1] = (char)c;
    if (c >= 0) byte[7] = hex[c >> 4], byte[8] = hex[c & 15];
    fsdpi_st_puts(o, c < 0 ? "the end" : c > 0x20 && c < 0x7F ? shown : byte);
}

// Writes an error text. %p: the position; %g: the character there; %t: the tensor being read.
static int fsdpi_st_fail(const fsdpi_st_reader *r, const char *form, fsdpi_st_facts f) {
    fsdpi_st_out *o = r->why;
    char name[72];
    o->used = 0;
    fsdpi_st_puts(o, r->inside);
    for (; *form; form++) {
        if (*form != '%') fsdpi_st_put(o, form, 1);
        else switch (*++form) {
            case 'a': fsdpi_st_put_shown(o, f.a); break;
            case 'b': fsdpi_st_put_shown(o, f.b); break;
            case 'e':
                fsdpi_st_puts(o, f.e->dtype == FSDP_SAFETENSORS_OTHER
                                     ? fsdp_safetensors_dtype_name(f.e->file_dtype)
                                     : fsdp_dtype_name(f.e->dtype));
                fsdpi_st_puts(o, " ");
                fsdpi_st_put_list(o, f.e->ndim, f.e->shape, ", ");
                break;
            case 'g': fsdpi_st_put_got(r, o); break;
            case 'p': fsdpi_st_put_number(o, (uint64_t)(r->origin + r->at)); break;
            case 't':
                fsdpi_st_copy(r, &r->name, name, 70);
                fsdpi_st_put_shown(o, name);
                break;
            default: fsdpi_st_put_number(o, (uint64_t)f.n[*form - '0']);
            }
    }
    return 0;
}

static int fsdpi_st_wrong(const fsdpi_st_reader *r, const char *form) {
    return fsdpi_st_fail(r, form, fsdpi_st_numbers(NULL, 0, 0, 0));
}
static int fsdpi_st_expected(const fsdpi_st_reader *r, const char *what) {
    return fsdpi_st_fail(r, "at byte %p: expected %a, got %g", fsdpi_st_numbers(what, 0, 0, 0));
}

// Skips spaces. Returns the next character, or -1 at the end.
static int fsdpi_st_peek(fsdpi_st_reader *r) {
    for (; r->at < r->size; r->at++) {
        int c = r->text[r->at];
        if (c != ' ' && c != '\t' && c != '\n' && c != '\r') return c;
    }
    return -1;
}

static int fsdpi_st_took(fsdpi_st_reader *r, char c) {
    if (fsdpi_st_peek(r) != c) return 0;
    r->at++;
    return 1;
}

static int fsdpi_st_read_string(fsdpi_st_reader *r, fsdpi_st_string *out) {
    if (fsdpi_st_peek(r) != '"') return fsdpi_st_expected(r, "a string");
    out->begin = ++r->at;
    out->bytes = 0;
    for (; r->at < r->size && r->text[r->at] != '"';) {
        char unit[4];
        int taken = 1, size = 1;
        if (r->text[r->at] < 0x20)
            return fsdpi_st_wrong(r, "at byte %p: a string has %g, which it may have as an escape");
        if (r->text[r->at] == '\\')
            size = fsdpi_st_decode(r->text + r->at, r->size - r->at, unit, &taken);
        if (!size) return fsdpi_st_wrong(r, "at byte %p: an escape that JSON does not have");
        out->bytes += size;
        r->at += taken;
    }
    if (r->at >= r->size) return fsdpi_st_expected(r, "the end of a string");
    out->end = r->at++;
    return 1;
}

static int fsdpi_st_is_digit(const fsdpi_st_reader *r) {
    return r->at < r->size && r->text[r->at] >= '0' && r->text[r->at] <= '9';
}

static int fsdpi_st_read_integer(fsdpi_st_reader *r, int64_t *out) {
    uint64_t x = 0, most = (uint64_t)FSDPI_ST_MOST;
    int c = fsdpi_st_peek(r), large = 0;
    int64_t begin = r->at;
    if (!fsdpi_st_is_digit(r)) return fsdpi_st_expected(r, "an integer");
    for (; fsdpi_st_is_digit(r); r->at++) {
        uint64_t digit = (uint64_t)(r->text[r->at] - '0');
        large |= x > (most - digit) / 10;
        x = large ? 0 : x * 10 + digit;
    }
    if (c == '0' && r->at - begin > 1) {
        r->at = begin;
        return fsdpi_st_wrong(r, "at byte %p: an integer begins with 0");
    }
    c = r->at < r->size ? r->text[r->at] : -1;
    if (c == '.' || c == 'e' || c == 'E') return fsdpi_st_expected(r, "the end of an integer");
    if (large) {
        r->at = begin;
        return fsdpi_st_wrong(r, "at byte %p: an integer above 2^62");
    }
    *out = (int64_t)x;
    return 1;
}

// A list of integers. Only the first FSDP_MAX_DIMS are stored.
typedef struct fsdpi_st_list {
    int64_t count, v[FSDP_MAX_DIMS];
    uint64_t numel; // product of all
    int overflow;
} fsdpi_st_list;

static int fsdpi_st_read_list(fsdpi_st_reader *r, fsdpi_st_list *out) {
    int64_t x = 0;
    memset(out, 0, sizeof *out);
    out->numel = 1;
    if (!fsdpi_st_took(r, '[')) return fsdpi_st_expected(r, "'['");
    if (fsdpi_st_took(r, ']')) return 1;
    do {
        if (!fsdpi_st_read_integer(r, &x)) return 0;
        if (out->count < FSDP_MAX_DIMS) out->v[out->count] = x;
        out->count++;
        out->overflow |= !fsdpi_st_numel(&out->numel, (uint64_t)x);
    } while (fsdpi_st_took(r, ','));
    return fsdpi_st_took(r, ']') || fsdpi_st_expected(r, "',' or ']'");
}

static int fsdpi_st_read_key(fsdpi_st_reader *r, fsdpi_st_string *key) {
    if (!fsdpi_st_read_string(r, key)) return 0;
    return fsdpi_st_took(r, ':') || fsdpi_st_expected(r, "':'");
}

// Reads the next member of an object, after *count members. Returns 1, 0 at the object's end, or -1
// on failure.
static int fsdpi_st_read_member(fsdpi_st_reader *r, int64_t *count, fsdpi_st_string *key) {
    if (fsdpi_st_took(r, '}')) return 0;
    if ((*count)++ && !fsdpi_st_took(r, ',')) {
        fsdpi_st_expected(r, "',' or '}'");
        return -1;
    }
    return fsdpi_st_read_key(r, key) ? 1 : -1;
}

static int fsdpi_st_skip_digits(fsdpi_st_reader *r) {
    if (!fsdpi_st_is_digit(r)) return fsdpi_st_expected(r, "a digit");
    while (fsdpi_st_is_digit(r)) r->at++;
    return 1;
}

static int fsdpi_st_skip_number(fsdpi_st_reader *r) {
    if (r->text[r->at] == '-') r->at++;
    if (r->at < r->size && r->text[r->at] == '0') r->at++; // only the number 0 begins with 0
    else if (!fsdpi_st_skip_digits(r)) return 0;
    if (r->at < r->size && r->text[r->at] == '.') {
        r->at++;
        if (!fsdpi_st_skip_digits(r)) return 0;
    }
    if (r->at >= r->size || (r->text[r->at] | 0x20) != 'e') return 1;
    r->at++;
    if (r->at < r->size && (r->text[r->at] == '+' || r->text[r->at] == '-')) r->at++;
    return fsdpi_st_skip_digits(r);
}

static int fsdpi_st_read_word(fsdpi_st_reader *r, const char *word) {
    int64_t n = (int64_t)strlen(word);
    if (r->size - r->at < n || memcmp(r->text + r->at, word, (size_t)n) != 0)
        return fsdpi_st_expected(r, "a value");
    r->at += n;
    return 1;
}

static int fsdpi_st_skip_scalar(fsdpi_st_reader *r) {
    fsdpi_st_string s;
    int c = fsdpi_st_peek(r);
    if (c == '"') return fsdpi_st_read_string(r, &s);
    if (c == '-' || (c >= '0' && c <= '9')) return fsdpi_st_skip_number(r);
    return fsdpi_st_read_word(r, c == 't' ? "true" : c == 'f' ? "false" : "null");
}

// Skips any value, inside `level` objects.
static int fsdpi_st_skip(fsdpi_st_reader *r, int level) {
    char ends[FSDPI_ST_DEPTH]; // closing characters of open objects and lists
    int depth = 0;
    fsdpi_st_string key;
    for (;;) {
        int c = fsdpi_st_peek(r);
        if (c == '{' || c == '[') {
            if (level + depth == FSDPI_ST_DEPTH)
                return fsdpi_st_fail(r, "at byte %p: more than %0 levels",
                                     fsdpi_st_numbers(NULL, FSDPI_ST_DEPTH, 0, 0));
            ends[depth++] = c == '{' ? '}' : ']';
            r->at++;
            if (fsdpi_st_peek(r) != ends[depth - 1]) {
                if (c == '{' && !fsdpi_st_read_key(r, &key)) return 0;
                continue;
            }
        } else if (!fsdpi_st_skip_scalar(r)) {
            return 0;
        }
        while (depth && fsdpi_st_took(r, ends[depth - 1])) depth--;
        if (!depth) return 1;
        if (!fsdpi_st_took(r, ','))
            return fsdpi_st_expected(r, ends[depth - 1] == '}' ? "',' or '}'" : "',' or ']'");
        if (ends[depth - 1] == '}' && !fsdpi_st_read_key(r, &key)) return 0;
    }
}

#endif // FSDPI_SAFETENSORS_JSON_H
