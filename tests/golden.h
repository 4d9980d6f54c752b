/* golden.h - reads the reference data of tests/golden: PyTorch's answers, as lines of a key and
   values. tests/golden/README.md describes the format. C99 and C++11; needs only libc.

       golden g;
       if (!golden_open(&g, "optim.txt", "optim")) ...             // g.error says why
       while (golden_case(&g))                                     // g.name is the case
           while (golden_line(&g)) {                             // g.key is the record's first word
               if (golden_is(&g, "tensor")) numel = golden_int(&g), seed = golden_seed(&g);
               else if (golden_is(&g, "step")) t = golden_int(&g), golden_nums(&g, numel, want);
           }                                                       // other keys are skipped
       if (g.error[0]) ...                                       // a value was missing or malformed
       golden_close(&g);

   Files without cases (chunk.txt) need golden_line only. Nothing is assumed about the cases in a
   file.
   The folder is the environment's FSDP_GOLDEN_DIR, by default tests/golden. g.error keeps the first
   mistake in a file, with file and line; from then on golden_line and golden_case return 0.

   SPDX-License-Identifier: MIT */
#ifndef GOLDEN_H
#define GOLDEN_H
#include <errno.h>  /* errno, ENOENT */
#include <stdarg.h> /* va_list */
#include <stdint.h> /* int64_t, uint64_t */
#include <stdio.h>  /* fopen, fread, vsnprintf */
#include <stdlib.h> /* getenv, malloc, strtod, strtoll, strtoull */
#include <string.h> /* strcmp, strerror, strlen */

#define GOLDEN_FN  static __attribute__((unused))
#define GOLDEN_DIR "tests/golden"

typedef struct golden {
    const char *key;  /* first word of the current record */
    const char *name; /* name of the current case; "" before the first one */
    char error[512];  /* "": no error so far */
    int missing;      /* the file does not exist, in a folder that is not the project's own */
    /* private */
    char *text;         /* the file; each space and line end is a NUL: words are C strings */
    const char **lines; /* [num_lines + 1], the last one is the end of the text */
    int64_t num_lines;
    int64_t next;   /* line to be read next */
    int64_t first;  /* first line of the current case */
    const char *at; /* next unread word of the current record */
    char path[400];
} golden;

/* ---- numbers --------------------------------------------------------------------------------- */

GOLDEN_FN uint64_t golden_splitmix64(uint64_t x) {
    x += 0x9E3779B97F4A7C15u;
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
    x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
    return x ^ (x >> 31);
}

/* Returns element `index` of the closed-form tensor; exact in f32 if the scale is a power of
   two. */
GOLDEN_FN double golden_value(uint64_t seed, uint64_t index, double scale) {
    uint64_t u = golden_splitmix64(seed + 0x9E3779B97F4A7C15u * index);
    return ((double)(u >> 40) / 16777216.0 - 0.5) * scale;
}

/* Fill in the whole row-major tensor, in f32 or in f64. */
GOLDEN_FN void golden_fill(float *out, uint64_t seed, int64_t numel, double scale) {
    for (int64_t i = 0; i < numel; i++) out[i] = (float)golden_value(seed, (uint64_t)i, scale);
}
GOLDEN_FN void golden_fill_f64(double *out, uint64_t seed, int64_t numel, double scale) {
    for (int64_t i = 0; i < numel; i++) out[i] = golden_value(seed, (uint64_t)i, scale);
}

/* ---- files ----------------------------------------------------------------------------------- */

GOLDEN_FN const char *golden_dir(void) {
    const char *dir = getenv("FSDP_GOLDEN_DIR");
    return dir && *dir ? dir : GOLDEN_DIR;
}

/* Keeps the first mistake. Returns 0. */
GOLDEN_FN __attribute__((format(printf, 2, 3))) int golden_fail(golden *g, const char *format,
                                                                ...) {
    char what[256];
    va_list args;
    if (g->error[0]) return 0;
    va_start(args, format);
    vsnprintf(what, sizeof what, format, args);
    va_end(args);
    if (g->next > 0 && g->key)
        snprintf(g->error, sizeof g->error, "%.200s:%lld: %s: %.200s", g->path, (long long)g->next,
                 g->key, what);
    else snprintf(g->error, sizeof g->error, "%.200s: %.250s", g->path, what);
    return 0;
}

GOLDEN_FN void golden_close(golden *g) {
    free(g->text);
    free((void *)g->lines);
    g->text = NULL;
    g->lines = NULL;
    g->num_lines = g->next = 0;
}

/* Reads the whole file, and adds a line end, if there is none, and a NUL. */
GOLDEN_FN char *golden_slurp(golden *g, size_t *size) {
    size_t room = 1 << 16, used = 0;
    char *text = (char *)malloc(room + 2);
    FILE *file = fopen(g->path, "rb");
    if (!file) {
        g->missing = errno == ENOENT && strcmp(golden_dir(), GOLDEN_DIR) != 0;
        golden_fail(g, "%s", strerror(errno));
    }
    while (file && text) {
        size_t got = fread(text + used, 1, room - used, file);
        used += got;
        if (!got) break;
        if (used == room) {
            char *more = (char *)realloc(text, 2 * room + 2);
            if (!more) free(text);
            text = more, room *= 2;
        }
    }
    if (file) fclose(file);
    if (!text) golden_fail(g, "out of memory");
    if (text) text[used] = '\n', text[used + 1] = 0;
    *size = used + 1;
    if (!g->error[0]) return text;
    free(text);
    return NULL;
}

/* Splits the text into lines and words. */
GOLDEN_FN int golden_cut(golden *g, size_t size) {
    int64_t count = 0;
    size_t i;
    for (i = 0; i < size; i++) count += g->text[i] == '\n';
    g->lines = (const char **)malloc(sizeof *g->lines * (size_t)(count + 1));
    if (!g->lines) return golden_fail(g, "out of memory");
    g->lines[0] = g->text;
    for (i = 0; i < size; i++) {
        char c = g->text[i];
        if (c == '\n' || c == ' ' || c == '\r' || c == '\t') g->text[i] = 0;
        if (c == '\n') g->lines[++g->num_lines] = g->text + i + 1;
    }
    return 1;
}

/* ---- values of the current record ------------------------------------------------------------ */

/* Returns the next word without taking it; NULL: none is left. */
GOLDEN_FN const char *golden_peek(golden *g) {
    const char *stop = g->next > 0 ? g->lines[g->next] : NULL;
    while (stop && g->at < stop && !*g->at) g->at++;
    return stop && g->at < stop ? g->at : NULL;
}

/* Returns the next word; "", and sets an error, if none is left. It lives until golden_close. */
GOLDEN_FN const char *golden_word(golden *g) {
    const char *word = golden_peek(g);
    if (!word) golden_fail(g, "a value is missing");
    if (!word) return "";
    g->at += strlen(word);
    return word;
}

/* Returns the number of unread values of the record. */
GOLDEN_FN int64_t golden_left(golden *g) {
    const char *at = g->at, *word;
    int64_t count = 0;
    for (; (word = golden_peek(g)) != NULL; count++) g->at += strlen(word);
    g->at = at;
    return count;
}

GOLDEN_FN int64_t golden_int(golden *g) {
    const char *word = golden_word(g);
    char *end;
    long long x = strtoll(word, &end, 10);
    if (!*word || *end) golden_fail(g, "'%s' is not an integer", word);
    return x;
}

GOLDEN_FN uint64_t golden_seed(golden *g) {
    const char *word = golden_word(g);
    char *end;
    unsigned long long x = strtoull(word, &end, 10);
    if (!*word || *end) golden_fail(g, "'%s' is not an integer", word);
    return x;
}

GOLDEN_FN double golden_num(golden *g) {
    const char *word = golden_word(g);
    char *end;
    double x = strtod(word, &end);
    if (!*word || *end) golden_fail(g, "'%s' is not a number", word);
    return x;
}

GOLDEN_FN void golden_ints(golden *g, int64_t count, int64_t *out) {
    for (int64_t i = 0; i < count; i++) out[i] = golden_int(g);
}
GOLDEN_FN void golden_nums(golden *g, int64_t count, double *out) {
    for (int64_t i = 0; i < count; i++) out[i] = golden_num(g);
}

/* ---- records and cases ----------------------------------------------------------------------- */

/* Steps to the next line that is not blank. Returns 0 at the end of the file, or after a
   mistake. */
GOLDEN_FN int golden_step(golden *g) {
    while (!g->error[0] && g->next < g->num_lines) {
        g->at = g->lines[g->next++];
        g->key = golden_peek(g);
        if (!g->key) continue;
        g->at += strlen(g->key);
        return 1;
    }
    return 0;
}

GOLDEN_FN int golden_is(const golden *g, const char *key) { return !strcmp(g->key, key); }

/* Steps to the next record of this case. Returns 0 after the last one. */
GOLDEN_FN int golden_line(golden *g) {
    int64_t before = g->next;
    if (!golden_step(g)) return 0;
    if (!golden_is(g, "case")) return 1;
    g->next = before;
    g->at = before > 0 ? g->lines[before] : g->text;
    return 0;
}

/* Steps to the next case, from any position. Returns 0 after the last one. */
GOLDEN_FN int golden_case(golden *g) {
    while (golden_step(g)) {
        if (!golden_is(g, "case")) continue;
        g->name = golden_word(g);
        g->first = g->next;
        return !g->error[0];
    }
    return 0;
}

/* Returns to the first record of this case: a case may be read in several passes. */
GOLDEN_FN void golden_again(golden *g) { g->next = g->first; }

/* Opens a file of the golden folder and checks its first line. Returns 1; or 0 with g->error
   set, and g->missing if a folder of other data has no such file. Close it in either case. */
GOLDEN_FN int golden_open(golden *g, const char *file, const char *kind) {
    size_t size;
    memset(g, 0, sizeof *g);
    g->name = "";
    snprintf(g->path, sizeof g->path, "%s/%s", golden_dir(), file);
    g->text = golden_slurp(g, &size);
    if (!g->text || !golden_cut(g, size)) return 0;
    if (!golden_step(g) || !golden_is(g, "fsdp-golden") || golden_int(g) != 1 ||
        strcmp(golden_word(g), kind) != 0)
        return golden_fail(g, "the first line is not 'fsdp-golden 1 %s'", kind);
    g->first = g->next;
    return 1;
}

/* Opens a file in a test: fails, or skips if another data folder lacks the file. Needs harness.h
   first. */
#ifdef HARNESS_H
#define GOLDEN_OPEN(g, file, kind)                                                                 \
    do {                                                                                           \
        if (!golden_open(g, file, kind)) {                                                         \
            if ((g)->missing) h_skip((g)->error);                                                  \
            h_fail(H_HERE("golden_open"), "%s", (g)->error);                                       \
        }                                                                                          \
    } while (0)
/* Skips if another data folder lacks this part. */
GOLDEN_FN void golden_needs(const char *part) {
    char path[500];
    snprintf(path, sizeof path, "%.300s/%.150s", golden_dir(), part);
    if (strcmp(golden_dir(), GOLDEN_DIR) && access(path, F_OK)) h_skip(path);
}
#define GOLDEN_CLOSE(g)                                                                            \
    do {                                                                                           \
        CHECK_MSG(!(g)->error[0], "%s", (g)->error);                                               \
        golden_close(g);                                                                           \
    } while (0)
#endif
#endif /* GOLDEN_H */
