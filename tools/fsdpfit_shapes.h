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
    int by_regex;       // 1: `unit` was given; 0: units are found by numbers in names
} name_rules;

typedef struct shape {
    char *unit, *name;  // unit "": it is in no layer
    int ndim, is_found; // is_found: the unit is to be found in the name
    int64_t dims[FSDP_MAX_DIMS];
} shape;

enum { STATES, BUFFERS, PACKED, SKIPPED, KINDS, SHOWN = 6 };
static const char *const kinds[KINDS] = {"states of a training", "buffers",
                                         "integers, and scales of packed weights", "by --skip"};
static struct {
    shape *at;
    int count, cap, left_out;
    int64_t numel, packed; // elements that count; bytes of integers that may hold weights
    struct {
        int count, names;
        int64_t bytes;
        char name[SHOWN][64]; // numbers as *
    } left[KINDS];
} list;

static int add_shape(const char *unit, size_t length, const char *name, int ndim,
                     const int64_t *dims) {
    double numel = 1;
    if (list.count == list.cap) {
        list.cap = list.cap ? 2 * list.cap : 64;
        list.at = (shape *)realloc(list.at, (size_t)list.cap * sizeof *list.at);
    }
    shape *s = list.at ? &list.at[list.count++] : NULL;
    if (!s || !(s->unit = strndup(unit, length)) || !(s->name = strdup(name))) return no_memory();
    s->ndim = ndim ? ndim : 1, s->dims[0] = 1; // a scalar is a vector of one element
    s->is_found = 0;
    for (int d = 0; d < ndim && d < FSDP_MAX_DIMS; d++) s->dims[d] = dims[d];
    for (int d = 0; d < s->ndim && d < FSDP_MAX_DIMS; d++) numel *= (double)s->dims[d];
    if (numel > 0 && numel < 1e18) list.numel += (int64_t)numel;
    return 0;
}

enum { IS_STATE, IS_BUFFER, IS_MASK, IS_SCALE, IS_LAYER, IS_EXPERT, NAMES };
static const char *const names[NAMES] = {
    ("(^|\\.)(optim|optimizers?|optim_state|optimizer_state)\\.|"
     "^((module|model)\\.)?(ema|swa|[a-z_]*_(ema|swa)|(avg|averaged?)_model|shadow_params|"
     "(ema|swa)_(model|module|weights|params|net|unet|shadow))\\.|"
     "\\.(exp_avg|(max_)?exp_avg_sq|momentum_buffer)$"),
    ("(^|\\.)(running_mean|running_var|num_batches_tracked|n_averaged|_?ema_(cluster_size|w)|"
     "(original_)?inv_freq|position_ids|relative_position_index|relative_coords_table|freqs_cis|"
     "(cos|sin)_cached|masked_bias|(attn|causal)_mask)$"),
    "(^|[._])(attn|attention)\\.bias$", // a causal mask of two dims
    ("(_scale_inv|(weight|input|output|global|[qkv])_scale(_2)?|[._]scales|qzeros|zero_point|"
     "absmax|quant_map|\\.SCB)$"),
    "(layer|block)s?[._]?$|(^|[._])h[._]?$",
    "experts?[._]$"};
static int matches(int which, const char *name) {
    static regex_t compiled[NAMES];
    static int is_compiled[NAMES];
    if (!is_compiled[which])
        is_compiled[which] = !regcomp(&compiled[which], names[which],
                                      REG_EXTENDED | REG_ICASE | REG_NOSUB);
    return is_compiled[which] && !regexec(&compiled[which], name, 0, NULL, 0);
}

// Returns why a tensor of a file is no parameter; KINDS: it is one. Floating buffers are known by
// name only.
static int why_left_out(const fsdp_checkpoint_tensor *t, const name_rules *rules) {
    const char *dtype = fsdp_safetensors_dtype_name(t->file_dtype);
    const int is_float = (*dtype == 'F' || !strcmp(dtype, "BF16")) && strcmp(dtype, "F8_E8M0") != 0;
    regmatch_t match;
    if (!regexec(&rules->skip, t->name, 1, &match, 0)) return SKIPPED;
    if (fsdpi_ck_is_reserved(t->name) || matches(IS_STATE, t->name)) return STATES;
    if (matches(IS_BUFFER, t->name) || (t->ndim > 1 && matches(IS_MASK, t->name))) return BUFFERS;
    return is_float && !matches(IS_SCALE, t->name) ? KINDS : PACKED;
}

static void leave_out(const fsdp_checkpoint_tensor *t, int kind) {
    char name[64];
    size_t n = 0, used = 0;
    for (const char *c = t->name; *c && used < sizeof name - 1; c += n ? n : 1) {
        n = strspn(c, "0123456789");
        name[used++] = n ? '*' : *c;
    }
    name[used] = 0;
    const int64_t bytes = t->nbytes;
    list.left_out++, list.left[kind].count++, list.left[kind].bytes += bytes;
    if (kind == PACKED && strcmp(fsdp_safetensors_dtype_name(t->file_dtype), "BOOL") != 0)
        list.packed += bytes;
    for (int i = 0; i < list.left[kind].names; i++)
        if (i == SHOWN || !strcmp(list.left[kind].name[i], name)) return;
    if (list.left[kind].names < SHOWN) strcpy(list.left[kind].name[list.left[kind].names], name);
    list.left[kind].names++; // SHOWN + 1: there are others
}

// Returns 1 if more weights may be packed than are counted: a byte can hold two weights of 4 bits.
static int is_packed(void) { return 2 * (double)list.packed > (double)list.numel; }

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
        const int kind = why_left_out(&t, rules);
        size_t length = 0;
        if (rules->by_regex && !regexec(&rules->unit, t.name, 1, &match, 0))
            length = (size_t)match.rm_eo;
        while (length && t.name[length - 1] == '.') length--;
        if (kind < KINDS) leave_out(&t, kind);
        else bad = add_shape(t.name, length, t.name, t.ndim, t.shape);
        if (kind == KINDS && !bad) list.at[list.count - 1].is_found = !rules->by_regex;
    }
    fsdp_checkpoint_close(r);
    return bad;
}

// Reads the shapes below a path. An index stands for its directory, whose reader takes it.
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

/* ---- units by numbers in names ---------------------------------------------------------------

   A list is what has numbered members: a.layers.0, a.layers.1, ..., or encoder_layer_0. Of the lists
   in a name the outermost one has the units, so experts.3 of layers.7 is none. If its members
   differ, it is a list of stages, as in Swin and ResNet: then the members of the inner list are the
   units, and the other parameters of a stage are a unit, too. A list with single tensors as members
   counts only if it is called layer, block or h, and so does a list with one member. */

static int of_kind(int kind, const char *name, int length) {
    char text[FSDP_CHECKPOINT_NAME];
    snprintf(text, sizeof text, "%.*s", length, name);
    return matches(kind, text);
}

// Returns where the number at or after `from` begins that ends a list's name, and sets *end; -1:
// there is none.
static int next_number(const char *name, int from, int *end) {
    for (int at = from; name[at]; at = *end + (name[*end] == '.')) {
        int digits = *end = at + (int)strcspn(name + at, ".");
        while (digits > at && strchr("0123456789", name[digits - 1])) digits--;
        if (digits < *end && name[*end] && (digits == at || of_kind(IS_LAYER, name, digits)))
            return digits;
    }
    return -1;
}

static int64_t numel_of(const shape *s) {
    int64_t n = 1;
    for (int d = 0; d < s->ndim; d++)
        n = s->dims[d] > 0 && n < INT64_MAX / s->dims[d] ? n * s->dims[d] : 0;
    return n;
}

typedef struct member {
    int begin, end, length; // its shapes; the length of its name
    const shape *most;      // its largest tensor
} member;

// Returns 1 if the largest tensors of two members are equal.
static int alike(const member *a, const member *b) {
    return !strcmp(a->most->name + a->length, b->most->name + b->length) &&
           a->most->ndim == b->most->ndim &&
           !memcmp(a->most->dims, b->most->dims, (size_t)a->most->ndim * sizeof *a->most->dims);
}

// Sets the units of names in [begin, end), of the lists whose numbers come at or after `from`.
static int find_units(int begin, int end, int from, int is_inner) {
    int bad = 0, next;
    for (int i = begin; i < end && !bad; i = next) {
        const char *name = list.at[i].name;
        int stop, n = 0, twins = 0, modules = 0;
        const int number = next_number(name, from, &stop);
        next = i + 1;
        if (number < 0) continue;
        for (; next < end && !strncmp(list.at[next].name, name, (size_t)number); next++)
            if (next_number(list.at[next].name, from, &stop) != number) break;
        member *m = (member *)calloc((size_t)(next - i), sizeof *m);
        if (!m) return no_memory();
        for (int k = i; k < next; k++) {
            const char *other = list.at[k].name;
            (void)next_number(other, from, &stop);
            if (!n || m[n - 1].length != stop ||
                strncmp(other, list.at[k - 1].name, (size_t)stop)) {
                m[n].begin = k, m[n].length = stop, m[n++].most = &list.at[k];
                modules++;
                m[n - 1].end = 0; // until a name has two parts
            }
            if (strchr(other + stop + 1, '.')) m[n - 1].end = 1;
            if (numel_of(&list.at[k]) > numel_of(m[n - 1].most)) m[n - 1].most = &list.at[k];
        }
        for (int k = 0; k < n; k++) {
            int found = 0;
            modules -= !m[k].end;
            m[k].end = k + 1 < n ? m[k + 1].begin : next;
            for (int o = k > 64 ? k - 64 : 0; o < n && o < k + 64 && !found; o++)
                found = o != k && alike(&m[k], &m[o]);
            twins += found;
        }
        const int named = of_kind(IS_LAYER, name, number);
        const int is_list = is_inner ? n > 1 && modules == n && !of_kind(IS_EXPERT, name, number)
                                     : named || (n > 1 && modules == n);
        const int stages = !is_inner && n > 1 && 2 * twins <= n;
        for (int k = 0; k < n && !bad; k++) {
            for (int t = m[k].begin; t < m[k].end && is_list && !bad; t++) {
                free(list.at[t].unit);
                list.at[t].unit = strndup(list.at[t].name, (size_t)m[k].length);
                if (!list.at[t].unit) bad = no_memory();
            }
            if (!bad && (!is_list || stages))
                bad = find_units(m[k].begin, m[k].end, m[k].length + 1, is_inner || is_list);
        }
        free(m);
    }
    return bad;
}
static int by_whole_name(const void *a, const void *b) {
    const shape *x = (const shape *)a, *y = (const shape *)b;
    return x->is_found != y->is_found ? x->is_found - y->is_found : by_name(x->name, y->name);
}

/* ---- what there is --------------------------------------------------------------------------- */

// Returns a text such as "12.40 GiB", in one of four buffers that take turns.
static const char *gib(int64_t bytes) {
    static const char *const units[] = {"bytes", "KiB", "MiB", "GiB", "TiB", "PiB"};
    static char texts[4][24];
    static unsigned turn;
    char *out = texts[turn++ % 4];
    double x = (double)bytes;
    int u = 0;
    for (; x >= 1024 && u < 5; u++) x /= 1024;
    snprintf(out, sizeof texts[0], u ? "%.2f %s" : "%.0f %s", x, units[u]);
    return out;
}

static void show_left_out(void) {
    for (int k = 0; k < KINDS; k++) {
        if (!list.left[k].count) continue;
        printf("left out: %d tensors, %s: %s:", list.left[k].count, gib(list.left[k].bytes),
               kinds[k]);
        for (int i = 0; i < list.left[k].names && i < SHOWN; i++)
            fputs(" ", stdout), put_safe(stdout, list.left[k].name[i]);
        printf(list.left[k].names > SHOWN ? " ...\n" : "\n");
    }
    if (is_packed())
        printf(
            "most of the model is not counted: it may be packed (quantised). The bytes below are "
            "a lower bound\n");
    else if (list.packed)
        printf("if these integers are packed (quantised) weights, the bytes below are a lower "
               "bound\n");
}

// Sorts the shapes, and says what there is.
static int sort_shapes(void) {
    int units = 0, root = 0, first = 0;
    if (!list.count) show_left_out();
    if (!list.count) return complain("[E475] there are no parameters");
    qsort(list.at, (size_t)list.count, sizeof *list.at, by_whole_name);
    while (first < list.count && !list.at[first].is_found) first++;
    if (find_units(first, list.count, 0, 0)) return EXIT_UNREADABLE;
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
    show_left_out();
    if (root) printf("in no layer, so in the unit 'root', which is open around the others:");
    for (int i = 0; i < root; i++) fputs(" ", stdout), put_safe(stdout, list.at[i].name);
    if (root) printf("\n");
    if (2 * root > list.count && first < list.count)
        printf("most parameters are in no layer: --unit says where the name of a unit ends\n");
    return 0;
}

#endif // FSDPFIT_SHAPES_H
