/* safetensors/values.h - values of a JSON text for programs

   A value is a range of bytes of the text. Each function reads that range again, so that nothing is
   allocated. fsdp_json_parse checks the whole text first.
   Callers: programs.

   A part of fsdp_safetensors.h. SPDX-License-Identifier: MIT (full text at the end of fsdp.h) */
#ifndef FSDP_SAFETENSORS_H
#include "../../fsdp_safetensors.h"
#endif
#ifndef FSDPI_SAFETENSORS_VALUES_H
#define FSDPI_SAFETENSORS_VALUES_H

#include "format.h"
#include "json.h"

#include <string.h>

static fsdpi_st_reader fsdpi_json_reader(const char *text, int64_t nbytes, fsdpi_st_out *why) {
    fsdpi_st_reader r;
    memset(&r, 0, sizeof r);
    r.text = (const unsigned char *)text, r.size = nbytes;
    r.inside = "", r.why = why;
    return r;
}

static fsdp_json fsdpi_json_none(void) {
    fsdp_json v;
    memset(&v, 0, sizeof v);
    return v;
}

// Reads the next value. Returns kind NONE after a failure, which is in r->why.
static fsdp_json fsdpi_json_read(fsdpi_st_reader *r) {
    fsdp_json v = fsdpi_json_none();
    int c = fsdpi_st_peek(r);
    v.text = (const char *)r->text, v.begin = r->at;
    if (!fsdpi_st_skip(r, 0)) return fsdpi_json_none();
    v.end = r->at;
    v.kind = c == '{'   ? FSDP_JSON_OBJECT
             : c == '[' ? FSDP_JSON_LIST
             : c == '"' ? FSDP_JSON_STRING
             : c == 't' ? FSDP_JSON_TRUE
             : c == 'f' ? FSDP_JSON_FALSE
             : c == 'n' ? FSDP_JSON_NULL
                        : FSDP_JSON_NUMBER;
    return v;
}

FSDP_API fsdp_status fsdp_json_parse(const char *text, int64_t nbytes, fsdp_json *value, char *why,
                                     size_t why_cap) {
    fsdpi_st_out o = fsdpi_st_why(why, why_cap);
    if (o.to) o.to[0] = 0;
    if (value) *value = fsdpi_json_none();
    if (!text || !value || nbytes < 0) return FSDP_ERR_INVALID_ARG;
    fsdpi_st_reader r = fsdpi_json_reader(text, nbytes, &o);
    fsdp_json v = fsdpi_json_none();
    r.at = fsdpi_st_utf8(r.text, nbytes);
    if (r.at < nbytes) {
        fsdpi_st_wrong(&r, "at byte %p: %g is not UTF-8");
    } else {
        r.at = 0;
        v = fsdpi_json_read(&r);
        if (v.kind && fsdpi_st_peek(&r) >= 0) {
            fsdpi_st_expected(&r, "the end");
            v.kind = FSDP_JSON_NONE;
        }
    }
    if (v.kind) *value = v;
    else fsdpi_st_end(&o);
    return v.kind ? FSDP_OK : FSDP_ERR_CORRUPT;
}

FSDP_API int fsdp_json_next(const fsdp_json *in, fsdp_json *key, fsdp_json *value) {
    fsdpi_st_out o = fsdpi_st_why(NULL, 0);
    fsdp_json before = value ? *value : fsdpi_json_none(), name = fsdpi_json_none();
    if (value) *value = name;
    if (key) *key = name;
    if (!in || !value || (in->kind != FSDP_JSON_OBJECT && in->kind != FSDP_JSON_LIST)) return 0;
    fsdpi_st_reader r = fsdpi_json_reader(in->text, in->end, &o);
    r.at = before.kind ? before.end : in->begin + 1;
    if (before.kind ? !fsdpi_st_took(&r, ',') : r.at == in->end) return 0;
    int c = fsdpi_st_peek(&r);
    if (c == '}' || c == ']') return 0;
    if (in->kind == FSDP_JSON_OBJECT) {
        fsdpi_st_string s;
        if (!fsdpi_st_read_key(&r, &s)) return 0;
        name.text = in->text, name.begin = s.begin - 1, name.end = s.end + 1;
        name.kind = FSDP_JSON_STRING;
    }
    *value = fsdpi_json_read(&r);
    if (key && value->kind) *key = name;
    return value->kind != FSDP_JSON_NONE;
}

FSDP_API int fsdp_json_find(const fsdp_json *in, const char *name, fsdp_json *value) {
    fsdp_json key, at = fsdpi_json_none();
    if (value) *value = at;
    if (!in || !name || !value || in->kind != FSDP_JSON_OBJECT) return 0;
    while (fsdp_json_next(in, &key, &at)) {
        fsdpi_st_out o = fsdpi_st_why(NULL, 0);
        fsdpi_st_reader r = fsdpi_json_reader(key.text, key.end, &o);
        const char *rest = name;
        int same = 1;
        for (r.at = key.begin + 1; same && r.at < key.end - 1;) {
            char unit[4];
            int taken, size = fsdpi_st_decode(r.text + r.at, key.end - r.at, unit, &taken);
            same = !memchr(unit, 0, (size_t)size) && !strncmp(rest, unit, (size_t)size);
            if (same) rest += size;
            r.at += taken;
        }
        if (same && !*rest) *value = at;
    }
    return value->kind != FSDP_JSON_NONE;
}

FSDP_API int64_t fsdp_json_string(const fsdp_json *value, char *to, size_t cap) {
    fsdpi_st_out o = fsdpi_st_why(NULL, 0);
    fsdpi_st_string s;
    if (to && cap) to[0] = 0;
    if (!value || value->kind != FSDP_JSON_STRING) return -1;
    fsdpi_st_reader r = fsdpi_json_reader(value->text, value->end, &o);
    r.at = value->begin;
    if (!fsdpi_st_read_string(&r, &s)) return -1;
    if (to && cap) fsdpi_st_copy(&r, &s, to, (int64_t)cap - 1);
    return s.bytes;
}

FSDP_API int fsdp_json_int(const fsdp_json *value, int64_t *out) {
    fsdpi_st_out o = fsdpi_st_why(NULL, 0);
    int64_t x;
    if (!value || !out || value->kind != FSDP_JSON_NUMBER) return 0;
    fsdpi_st_reader r = fsdpi_json_reader(value->text, value->end, &o);
    r.at = value->begin;
    int negative = fsdpi_st_took(&r, '-');
    if (!fsdpi_st_read_integer(&r, &x)) return 0;
    *out = negative ? -x : x;
    return 1;
}

// Digits of a number and its power of ten. Digits after the 18th only count.
typedef struct fsdpi_json_digits {
    uint64_t digits;
    int64_t power;
} fsdpi_json_digits;

static void fsdpi_json_take(fsdpi_st_reader *r, fsdpi_json_digits *d, int fraction) {
    for (; fsdpi_st_is_digit(r); r->at++) {
        int fits = d->digits < 100000000000000000u;
        if (fits) d->digits = d->digits * 10 + (uint64_t)(r->text[r->at] - '0');
        d->power += !fits - fraction;
    }
}

FSDP_API int fsdp_json_double(const fsdp_json *value, double *out) {
    static const double tens[] = {1e0,  1e1,  1e2,  1e3,  1e4,  1e5,  1e6,  1e7,
                                  1e8,  1e9,  1e10, 1e11, 1e12, 1e13, 1e14, 1e15,
                                  1e16, 1e17, 1e18, 1e19, 1e20, 1e21, 1e22};
    fsdpi_json_digits d = {0, 0}, e = {0, 0};
    if (!value || !out || value->kind != FSDP_JSON_NUMBER) return 0;
    fsdpi_st_reader r = fsdpi_json_reader(value->text, value->end, NULL);
    r.at = value->begin;
    int negative = fsdpi_st_took(&r, '-');
    fsdpi_json_take(&r, &d, 0);
    if (fsdpi_st_took(&r, '.')) fsdpi_json_take(&r, &d, 1);
    if (fsdpi_st_took(&r, 'e') || fsdpi_st_took(&r, 'E')) {
        int down = fsdpi_st_took(&r, '-');
        if (!down) (void)fsdpi_st_took(&r, '+');
        fsdpi_json_take(&r, &e, 0);
        if (e.power || e.digits > 100000) e.digits = 100000;
        d.power += down ? -(int64_t)e.digits : (int64_t)e.digits;
    }
    double x = (double)d.digits;
    int64_t step = 0; // of the power of ten, at most 22
    for (; d.power < 0 && x > 0; d.power += step) {
        step = d.power < -22 ? 22 : -d.power;
        x /= tens[step];
    }
    for (; d.power > 0 && x > 0 && x <= 1.7976931348623157e308; d.power -= step) {
        step = d.power > 22 ? 22 : d.power;
        x *= tens[step];
    }
    if (!(x <= 1.7976931348623157e308)) return 0;
    *out = negative ? -x : x;
    return 1;
}

#endif // FSDPI_SAFETENSORS_VALUES_H
