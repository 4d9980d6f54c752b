/* fsdpfit_shapes.h - the shapes of a model and its units, from safetensors headers or from lines of
   a text file; a part of fsdpfit.c

   SPDX-License-Identifier: MIT */
#ifndef FSDPFIT_SHAPES_H
#define FSDPFIT_SHAPES_H

#include "../fsdp_checkpoint.h"
#include "put_safe.h"
#include <errno.h>
#include <regex.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { EXIT_UNREADABLE = 2 };

static int complain(const char *format, ...) __attribute__((format(printf, 1, 2)));
static int complain(const char *format, ...) {
    char text[FSDP_CHECKPOINT_PATH + 1400];
    va_list args;
    va_start(args, format);
    vsnprintf(text, sizeof text, format, args);
    va_end(args);
    fflush(stdout);
    fputs("fsdpfit: ", stderr);
    put_safe(stderr, text);
    fputs("\n", stderr);
    return EXIT_UNREADABLE;
}

static int no_memory(void) { return complain("[E471] no memory for the shapes"); }

typedef struct name_rules {
    regex_t unit, skip; // where the name of a unit ends; tensors that are no parameters
} name_rules;

typedef struct shape {
    char *unit, *name; // unit "": it is in no layer
    int ndim;
    int64_t dims[FSDP_MAX_DIMS];
} shape;
static struct {
    shape *at;
    int count, cap, left_out;
} list;

static int add_shape(const char *unit, size_t length, const char *name, int ndim,
                     const int64_t *dims) {
    if (list.count == list.cap) {
        list.cap = list.cap ? 2 * list.cap : 64;
        list.at = (shape *)realloc(list.at, (size_t)list.cap * sizeof *list.at);
    }
    shape *s = list.at ? &list.at[list.count++] : NULL;
    if (!s || !(s->unit = strndup(unit, length)) || !(s->name = strdup(name))) return no_memory();
    s->ndim = ndim ? ndim : 1, s->dims[0] = 1; // a scalar is a vector of one element
    for (int d = 0; d < ndim && d < FSDP_MAX_DIMS; d++) s->dims[d] = dims[d];
    return 0;
}

// Lines "unit NAME: param NAME ROWS COLS ... param ...". The unit root is in no layer.
static int read_lines(const char *path, FILE *file) {
    char *line = NULL, *end, unit[200], name[200], whole[404];
    size_t cap = 0;
    int bad = 0;
    for (int number = 1; !bad && getline(&line, &cap, file) >= 0; number++) {
        char *at = line + strspn(line, " \t\r\n");
        int used = 0, ndim = 0;
        if (!*at || *at == '#') continue;
        if (sscanf(at, "unit %199[^: \t]:%n", unit, &used) == 1) at += used;
        while (!bad && used && sscanf(at, " param %199s%n", name, &used) == 1) {
            int64_t dims[FSDP_MAX_DIMS];
            const int is_root = !strcmp(unit, "root");
            at += used;
            for (ndim = 0; ndim < FSDP_MAX_DIMS; at = end, ndim++) {
                dims[ndim] = strtoll(at, &end, 10);
                if (end == at) break;
            }
            snprintf(whole, sizeof whole, "%s%s%s", is_root ? "" : unit, is_root ? "" : ".", name);
            if (!ndim) break;
            bad = add_shape(unit, is_root ? 0 : strlen(unit), whole, ndim, dims);
        }
        if (!bad && (!ndim || at[strspn(at, " \t\r\n")]))
            bad = complain("[E472] %s, line %d: expected unit NAME: param NAME ROWS COLS ...", path,
                           number);
    }
    free(line);
    return bad;
}

static int read_headers(const char *path, const name_rules *rules) {
    char text[FSDP_CHECKPOINT_PATH + 1024];
    fsdp_checkpoint_reader *r;
    fsdp_checkpoint_tensor t;
    regmatch_t match;
    int bad = 0;
    if (fsdp_checkpoint_open(path, NULL, NULL, &r, text, sizeof text))
        return complain("[E473] %s", text);
    for (int64_t i = 0; !bad && !fsdp_checkpoint_tensor_at(r, i, &t); i++) {
        // Dtypes that the library lacks, too: F8_E4M3, ... are floating, I64, U8, BOOL, ... are not.
        const char *dtype = fsdp_safetensors_dtype_name(t.file_dtype);
        const int counts = (*dtype == 'F' || !strcmp(dtype, "BF16")) &&
                           regexec(&rules->skip, t.name, 1, &match, 0) != 0;
        size_t length = regexec(&rules->unit, t.name, 1, &match, 0) ? 0 : (size_t)match.rm_eo;
        while (length && t.name[length - 1] == '.') length--;
        if (counts) bad = add_shape(t.name, length, t.name, t.ndim, t.shape);
        list.left_out += !counts;
    }
    fsdp_checkpoint_close(r);
    return bad;
}

// An index stands for its directory, whose reader takes it.
static int read_path(const char *path, const name_rules *rules) {
    char dir[FSDP_CHECKPOINT_PATH], begin[5] = "";
    const char *slash = strrchr(path, '/'), *index = strstr(path, ".index.json");
    FILE *file = fopen(path, "rb");
    if (!file) return complain("[E474] %s: %s", path, strerror(errno));
    const int is_text = fread(begin, 1, 4, file) && (*begin == '#' || !strcmp(begin, "unit"));
    rewind(file);
    const int bad = is_text ? read_lines(path, file) : 0;
    (void)fclose(file);
    snprintf(dir, sizeof dir, "%.*s", slash ? (int)(slash - path + 1) : 1, slash ? path : ".");
    return is_text ? bad : read_headers(index && !index[11] ? dir : path, rules);
}

// Numbers in names count as numbers: layers.2 comes before layers.10.
static int by_name(const char *a, const char *b) {
    for (; *a && *b; a++, b++) {
        const size_t na = strspn(a, "0123456789"), nb = strspn(b, "0123456789");
        if (na && nb && na != nb) return na < nb ? -1 : 1;
        if (*a != *b) return (unsigned char)*a < (unsigned char)*b ? -1 : 1;
    }
    return (*a != 0) - (*b != 0);
}
static int by_unit(const void *a, const void *b) {
    const shape *x = (const shape *)a, *y = (const shape *)b;
    const int order = by_name(x->unit, y->unit); // the root is the first one
    return order ? order : by_name(x->name, y->name);
}

// Sorts the shapes, and says what there is.
static int sort_shapes(void) {
    int units = 0, root = 0;
    if (!list.count) return complain("[E475] there are no parameters");
    qsort(list.at, (size_t)list.count, sizeof *list.at, by_unit);
    for (int i = 0; i < list.count; i++) {
        const shape *s = &list.at[i];
        if (i && !by_unit(s - 1, s))
            return complain("[E476] parameter '%s' is there twice", s->name);
        units += !i || strcmp(s[-1].unit, s->unit) != 0;
        root += !*s->unit;
    }
    printf("%d parameters in %d units; %d tensors are left out\n", list.count, units,
           list.left_out);
    if (root) printf("in no layer, so in the unit 'root', which is open around the others:");
    for (int i = 0; i < root; i++) fputs(" ", stdout), put_safe(stdout, list.at[i].name);
    if (root) printf("\n");
    return 0;
}

#endif // FSDPFIT_SHAPES_H
