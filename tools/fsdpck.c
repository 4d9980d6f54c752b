/* fsdpck.c - lists, checks, compares, reshards, exports and imports checkpoints, in one process and
   without a job.

       cc -O2 -o fsdpck tools/fsdpck.c -pthread -lm
       ./fsdpck verify run/step-00001000

   It reads what fsdp_checkpoint_load reads. See usage() for the rest. Names in files are
   not trusted: bytes that are not printable ASCII are printed as \xNN. Linux.

   SPDX-License-Identifier: MIT */
#define _GNU_SOURCE
#define FSDP_IMPLEMENTATION
#define FSDP_STATIC
#define FSDP_NO_BACKEND
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wunused-function" // a tool uses a part of the library
#include "../fsdp_checkpoint.h"
#pragma GCC diagnostic pop
#include "put_safe.h"
#include <signal.h> // SIGXFSZ
#include <stdio.h>  // printf
#include <stdlib.h> // malloc, strtoll
#include <string.h> // strcmp
#include <unistd.h> // isatty

enum { MOST_PATTERNS = 64 }; // of each option
enum { EXIT_DIFFERS = 1, EXIT_USAGE = 2, EXIT_IO = 3 };
enum { PIECE = 1 << 20 }; // elements that diff compares at once

// The values of an option that may be given several times. In a pattern one * stands for any text.
typedef struct patterns {
    const char *text[MOST_PATTERNS];
    int num, used[MOST_PATTERNS]; // used: 1: it fits a tensor
} patterns;

// A command line.
typedef struct request {
    const struct verb *verb;
    const char *paths[2];
    int num_paths, help;
    int64_t ranks, max_file_bytes; // 0: not given
    fsdp_dtype dtype;
    int with_optimizer, ema;
    const char *ema_name, *like, *prefix, *file_name;
    patterns skips, renames, transposes;
    fsdp_checkpoint_reader *from; // of export
    char text[FSDP_CHECKPOINT_PATH + 1024];
} request;

typedef struct verb {
    const char *name, *operands, *options;
    int num_paths;
    int (*run)(request *q);
    const char *help;
} verb;

/* ---- what is printed ------------------------------------------------------------------------- */

static struct {
    int64_t done, total, shown_ns;
    int on, drawn;
} bar;

static void end_bar(void) {
    if (bar.drawn) fputs("\r\033[K", stderr);
    bar.drawn = 0;
}
static void draw_bar(void) {
    char cells[41];
    int64_t now = fsdpi_monotonic_ns(NULL);
    if (!bar.on || bar.total <= 0 || (bar.drawn && now - bar.shown_ns < 100000000)) return;
    double part = (double)bar.done / (double)bar.total;
    if (part > 1) part = 1; // blocks at the borders of boxes are read twice
    for (int i = 0; i < 40; i++) cells[i] = i < (int)(40 * part) ? '#' : '.';
    cells[40] = 0;
    fprintf(stderr, "\r[%s] %3d %%", cells, (int)(100 * part));
    fflush(stderr);
    bar.drawn = 1;
    bar.shown_ns = now;
}

// Reads by the system's file calls, and counts the bytes.
static int counted_read(void *user, void *file, void *data, int64_t nbytes, int64_t at,
                        int64_t *done) {
    int error = fsdpi_ck_os_read(user, file, data, nbytes, at, done);
    bar.done += *done;
    draw_bar();
    return error;
}
static fsdp_file_ops counted;

static int complain(const char *format, ...) __attribute__((format(printf, 1, 2)));
static int complain(const char *format, ...) {
    char text[FSDP_CHECKPOINT_PATH + 1200];
    va_list args;
    va_start(args, format);
    vsnprintf(text, sizeof text, format, args);
    va_end(args);
    fputs("fsdpck: ", stderr);
    put_safe(stderr, text);
    fputs("\n", stderr);
    return EXIT_USAGE;
}

static int unknown(const char *what, const char *word) {
    return complain("[E468] unknown %s '%s'; --help explains", what, word);
}
static int expected(const char *where, const char *what) {
    return complain("[E469] %s: expected %s; --help explains", where, what);
}

// Ends a command: prints the failure, and returns the exit status.
static int finish(const request *q, fsdp_status status) {
    end_bar();
    if (!status) return 0;
    fflush(stdout);
    fprintf(stderr, "fsdpck %s: ", q->verb->name);
    put_safe(stderr, q->text[0] ? q->text : fsdp_status_text(status));
    fputs("\n", stderr);
    if (status == FSDP_ERR_CORRUPT) return EXIT_DIFFERS;
    return status == FSDP_ERR_INVALID_ARG || status == FSDP_ERR_UNSUPPORTED ? EXIT_USAGE : EXIT_IO;
}

static void put_shape(const fsdp_checkpoint_tensor *t) {
    printf("%s [", fsdp_safetensors_dtype_name(t->file_dtype));
    for (int d = 0; d < t->ndim && d < FSDP_MAX_DIMS; d++)
        printf(d ? ", %lld" : "%lld", (long long)t->shape[d]);
    printf(t->ndim > FSDP_MAX_DIMS ? ", ...]" : "]");
}

/* ---- verbs ----------------------------------------------------------------------------------- */

static fsdp_status open_path(request *q, int which, fsdp_checkpoint_reader **r,
                             fsdp_checkpoint_contents *c) {
    fsdp_status status = fsdp_checkpoint_open(q->paths[which], &counted, NULL, r, q->text,
                                              sizeof q->text);
    if (!status) status = fsdp_checkpoint_contents_of(*r, c);
    bar.done = 0;
    return status;
}

static int list(request *q) {
    fsdp_checkpoint_reader *r;
    fsdp_checkpoint_contents c;
    fsdp_checkpoint_tensor t;
    fsdp_status status = open_path(q, 0, &r, &c);
    if (status) return finish(q, status);
    put_safe(stdout, q->paths[0]);
    if (c.step >= 0) printf(": step %lld of %lld ranks", (long long)c.step, (long long)c.world);
    else printf(": no manifest");
    printf(", %lld tensors, %lld files, %lld bytes\n", (long long)c.num_tensors,
           (long long)c.num_files, (long long)c.data_bytes);
    for (int64_t i = 0; i < c.num_tensors; i++) {
        (void)fsdp_checkpoint_tensor_at(r, i, &t);
        printf("%12lld  %3d  ", (long long)t.nbytes, t.num_boxes);
        put_safe(stdout, t.name);
        printf("  ");
        put_shape(&t);
        printf("\n");
    }
    fsdp_checkpoint_close(r);
    return finish(q, FSDP_OK);
}

static int verify(request *q) {
    fsdp_checkpoint_reader *r;
    fsdp_checkpoint_contents c;
    fsdp_status status = open_path(q, 0, &r, &c);
    if (status) return finish(q, status);
    fsdp_checkpoint_close(r);
    bar.total = c.data_bytes;
    status = fsdp_checkpoint_verify(q->paths[0], &counted, NULL, q->text, sizeof q->text);
    end_bar();
    if (status) return finish(q, status);
    put_safe(stdout, q->paths[0]);
    printf(": %s\n", q->text);
    return 0;
}

// Returns 1 if the pattern, `length` bytes, fits the name. *begin, *size: what its * stands for.
static int fits(const char *pattern, size_t length, const char *name, const char **begin,
                int *size) {
    const char *star = (const char *)memchr(pattern, '*', length);
    const size_t n = strlen(name), head = star ? (size_t)(star - pattern) : length;
    const size_t tail = star ? length - head - 1 : 0;
    *begin = name + head, *size = (int)n - (int)(head + tail);
    return (star ? n >= head + tail : n == length) && !memcmp(name, pattern, head) &&
           (!star || !memcmp(name + n - tail, star + 1, tail));
}
static int fits_any(const patterns *p, const char *name) {
    const char *begin;
    int size;
    for (int i = 0; i < p->num; i++)
        if (fits(p->text[i], strlen(p->text[i]), name, &begin, &size)) return i + 1;
    return 0;
}
static int is_skipped(const request *q, const char *name) { return fits_any(&q->skips, name); }
static int may_skip(void *user, const char *name) {
    return is_skipped((const request *)user, name);
}
static int unless_skipped(void *user, const char *name, char *out) {
    snprintf(out, FSDP_CHECKPOINT_NAME, "%s", name);
    return !is_skipped((const request *)user, name);
}

/* ---- names of others ------------------------------------------------------------------------- */

// The next item of a list with commas, which ends at `end`: its bytes.
static size_t item(const char *list, const char *end) {
    const char *comma = (const char *)memchr(list, ',', (size_t)(end - list));
    return (size_t)((comma ? comma : end) - list);
}
// Writes PREFIX and the pattern, with the text in place of its *. Returns 0 if that is too long.
static int substitute(const char *prefix, const char *pattern, size_t length, const char *text,
                      int size, char out[FSDP_CHECKPOINT_NAME]) {
    const char *star = (const char *)memchr(pattern, '*', length);
    const int head = star ? (int)(star - pattern) : (int)length;
    const int tail = star ? (int)length - head - 1 : 0;
    const int n = snprintf(out, FSDP_CHECKPOINT_NAME, "%s%.*s%.*s%.*s", prefix, head, pattern,
                           star ? size : 0, text, tail, star ? star + 1 : "");
    return n > 0 && n < FSDP_CHECKPOINT_NAME;
}

static int too_long(const char *name, char why[700]) {
    snprintf(why, 700,
             "[E498] '%.300s' gets more than %d names, or one of more than %d bytes: correct "
             "--rename or --prefix",
             name, FSDP_CHECKPOINT_SOURCES, FSDP_CHECKPOINT_NAME - 1);
    return -1;
}
/* Applies the rule FROM=TO to a tensor. Returns the number of its new names; 0: the rule is for
   others; -1: it cannot be applied: `why` says so. With a list FROM=A,B its tensors are rows of one
   new tensor, in this order; with a list TO a tensor is cut. */
static int apply_rule(request *q, const char *rule, const fsdp_param_view *v,
                      fsdp_checkpoint_source *out, char why[700]) {
    const char *middle = strchr(rule, '='), *end = rule + strlen(rule), *text = "", *from = rule;
    int size = 0, num = 0, found = 0, before = 1;
    for (size_t n; from < middle && !found; from += n + 1) {
        n = item(from, middle);
        found = fits(from, n, v->name, &text, &size);
    }
    if (!found) return 0;
    for (const char *to = middle + 1; to < end; to += item(to, end) + 1, num++)
        if (num == FSDP_CHECKPOINT_SOURCES ||
            !substitute(q->prefix ? q->prefix : "", to, item(to, end), text, size, out[num].name))
            return too_long(v->name, why);
    for (int i = 0; i < num && num > 1 && !q->like && v->ndim && v->shape[0] % num == 0; i++)
        out[i].rows = v->shape[0] / num; // without --like: equal parts
    for (from = rule; memchr(rule, ',', (size_t)(middle - rule)) && from < middle;) {
        const size_t n = item(from, middle);
        char name[FSDP_CHECKPOINT_NAME];
        fsdp_checkpoint_tensor t = FSDP_ZERO;
        if (!substitute("", from, n, text, size, name)) return too_long(v->name, why);
        const int64_t index = fsdpi_ck_index_of(q->from, name);
        if (index < 0) {
            snprintf(why, 700,
                     "[E496] --rename %.200s: '%.200s' fits, and '%.200s' is not there; fsdpck ls "
                     "lists what is",
                     rule, v->name, name);
            return -1;
        }
        (void)fsdp_checkpoint_tensor_at(q->from, index, &t);
        before = before && strcmp(name, v->name) != 0;
        if (before) out[0].first += t.shape[0];
        from += n + 1;
    }
    return num;
}

// Returns the number of a tensor's new names, 0 if it is left out, or -1: `why` says why.
static int new_names(request *q, const fsdp_param_view *v, fsdp_checkpoint_source *out,
                     char why[700]) {
    int num = 0, i = 0, k;
    if (is_skipped(q, v->name)) return 0;
    for (; i < q->renames.num && !num; i++) num = apply_rule(q, q->renames.text[i], v, out, why);
    if (num) q->renames.used[i - 1] = 1;
    if (!num) {
        num = substitute(q->prefix ? q->prefix : "", "*", 1, v->name, (int)strlen(v->name),
                         out[0].name);
        if (!num) num = too_long(v->name, why);
    }
    for (int j = 0; j < num; j++)
        if ((k = fits_any(&q->transposes, out[j].name)) > 0)
            out[j].transpose = q->transposes.used[k - 1] = 1;
    return num;
}
static int source_of(void *user, const fsdp_param_view *v, fsdp_checkpoint_source *out) {
    char why[700];
    return new_names((request *)user, v, out, why);
}

// Tries the names of all tensors. Returns an exit status.
static int check_names(request *q, int64_t num_tensors) {
    char why[700] = "";
    for (int64_t i = 0; i < num_tensors; i++) {
        fsdp_checkpoint_source out[FSDP_CHECKPOINT_SOURCES];
        fsdp_checkpoint_tensor t;
        fsdp_param_view v = FSDP_ZERO;
        (void)fsdp_checkpoint_tensor_at(q->from, i, &t);
        if (fsdpi_ck_is_reserved(t.name)) continue;
        memset(out, 0, sizeof out);
        v.name = t.name;
        v.ndim = t.ndim < FSDP_MAX_DIMS ? t.ndim : FSDP_MAX_DIMS;
        memcpy(v.shape, t.shape, sizeof v.shape);
        if (new_names(q, &v, out, why) < 0) return complain("%s", why);
    }
    for (int k = 0; k < 2; k++) {
        const patterns *p = k ? &q->transposes : &q->renames;
        for (int i = 0; i < p->num; i++)
            if (!p->used[i])
                return complain("[E499] %s %.300s: no tensor of %.300s fits; fsdpck ls lists them",
                                k ? "--transpose" : "--rename", p->text[i], q->paths[0]);
    }
    return 0;
}

static int write_new(request *q, int num_ranks) {
    fsdp_checkpoint_export_desc d = FSDP_ZERO;
    fsdp_checkpoint_reader *r;
    fsdp_checkpoint_contents c;
    fsdp_status status = open_path(q, 0, &r, &c);
    const int renames = q->renames.num || q->transposes.num || q->prefix;
    if (status) return finish(q, status);
    q->from = r;
    int result = renames ? check_names(q, c.num_tensors) : 0;
    if (result) fsdp_checkpoint_close(r);
    if (result) return result;
    if (!strcmp(q->verb->name, "reshard") && c.step < 0) {
        fsdp_checkpoint_close(r);
        return expected("reshard", "a checkpoint with a manifest; import takes others");
    }
    bar.total = c.data_bytes;
    d.dtype = q->dtype;
    d.with_optimizer = q->with_optimizer;
    d.ema = q->ema, d.ema_name = q->ema_name;
    d.max_file_bytes = q->max_file_bytes;
    d.num_ranks = num_ranks;
    d.files = &counted;
    d.like = q->like, d.may_lack = may_skip;
    d.file_name = q->file_name;
    d.user = q;
    if (q->skips.num) d.rename = unless_skipped;
    if (renames) d.source = source_of;
    status = fsdp_checkpoint_export(q->paths[0], q->paths[1], &d, q->text, sizeof q->text);
    fsdp_checkpoint_close(r);
    result = finish(q, status);
    if (!status && q->text[0]) complain("%s", q->text);
    return result;
}
static int export_it(request *q) {
    if (q->with_optimizer && (q->renames.num || q->transposes.num || q->prefix))
        return expected("--with-optimizer", "no --rename, --prefix or --transpose");
    return write_new(q, 0);
}
static int import_it(request *q) { return write_new(q, q->ranks ? (int)q->ranks : 1); }
static int reshard(request *q) {
    if (!q->ranks) return expected("reshard", "--ranks N");
    return write_new(q, (int)q->ranks);
}

/* ---- diff ------------------------------------------------------------------------------------ */

typedef struct comparison {
    fsdp_checkpoint_reader *a, *b;
    fsdp_checkpoint_tensor ta, tb;
    char *room;   // two pieces of elements, and two of doubles
    int64_t size; // bytes of an element
    int64_t different, first, tensors;
    double values[2], largest; // NaN stays the largest
} comparison;

// Elements k .. of a piece, which begins with element `at` of the tensor.
static void compare_piece(comparison *c, int64_t at, int64_t n) {
    const int64_t size = c->size;
    char *x = c->room, *y = x + 8 * PIECE;
    double *dx = (double *)(void *)(y + 8 * PIECE), *dy = dx + PIECE;
    if (!memcmp(x, y, (size_t)(n * size))) return;
    int is_float = fsdp_dtype_is_float(c->ta.dtype);
    if (is_float) (void)fsdp_convert(dx, FSDP_F64, x, c->ta.dtype, n);
    if (is_float) (void)fsdp_convert(dy, FSDP_F64, y, c->ta.dtype, n);
    for (int64_t i = 0; i < n; i++) {
        if (!memcmp(x + i * size, y + i * size, (size_t)size)) continue;
        if (is_float) {
            double d = dx[i] > dy[i] ? dx[i] - dy[i] : dy[i] - dx[i];
            if (d > c->largest || !(d >= 0)) c->largest = d;
            if (!c->different) c->values[0] = dx[i], c->values[1] = dy[i];
        }
        if (!c->different++) c->first = at + i;
    }
}

static fsdp_status compare_values(request *q, comparison *c, int64_t i, int64_t k) {
    int64_t numel = 1, start[FSDP_MAX_DIMS], shape[FSDP_MAX_DIMS], n;
    fsdp_status status = FSDP_OK;
    for (int d = 0; d < c->ta.ndim && d < FSDP_MAX_DIMS; d++) numel *= c->ta.shape[d];
    c->different = 0;
    c->largest = 0;
    c->size = numel ? c->ta.nbytes / numel : 1;
    for (int64_t at = 0; at < numel && !status; at += n) {
        n = fsdpi_ck_next_box(c->ta.ndim, c->ta.shape, at, PIECE, start, shape);
        status = fsdp_checkpoint_read(c->a, i, start, shape, FSDP_DTYPE_KEEP, c->room, q->text,
                                      sizeof q->text);
        if (!status)
            status = fsdp_checkpoint_read(c->b, k, start, shape, FSDP_DTYPE_KEEP,
                                          c->room + 8 * PIECE, q->text, sizeof q->text);
        if (!status) compare_piece(c, at, n);
    }
    if (status || !c->different) return status;
    end_bar();
    put_safe(stdout, c->ta.name);
    printf(": %lld of %lld elements differ, the first at [", (long long)c->different,
           (long long)numel);
    for (int d = 0; d < c->ta.ndim; d++) {
        numel /= c->ta.shape[d];
        printf(d ? ", %lld" : "%lld", (long long)(c->first / numel));
        c->first %= numel;
    }
    printf("]");
    if (fsdp_dtype_is_float(c->ta.dtype))
        printf(": %.9g and %.9g; the largest difference is %.9g", c->values[0], c->values[1],
               c->largest);
    printf("\n");
    c->tensors++;
    return FSDP_OK;
}

// Compares a tensor that both checkpoints have.
static fsdp_status compare_tensor(request *q, comparison *c, int64_t i, int64_t k) {
    int same = c->ta.file_dtype == c->tb.file_dtype && c->ta.ndim == c->tb.ndim &&
               !memcmp(c->ta.shape, c->tb.shape, sizeof c->ta.shape);
    if (same) return compare_values(q, c, i, k);
    end_bar();
    put_safe(stdout, c->ta.name);
    printf(": ");
    put_shape(&c->ta);
    printf(" and ");
    put_shape(&c->tb);
    printf("\n");
    c->tensors++;
    return FSDP_OK;
}

static void only_in(const request *q, comparison *c, int which) {
    end_bar();
    printf("only in ");
    put_safe(stdout, q->paths[which]);
    printf(": ");
    put_safe(stdout, which ? c->tb.name : c->ta.name);
    printf("\n");
    c->tensors++;
}

static int diff(request *q) {
    comparison c = FSDP_ZERO;
    fsdp_checkpoint_contents in[2];
    fsdp_status status = open_path(q, 0, &c.a, &in[0]);
    if (!status) status = open_path(q, 1, &c.b, &in[1]);
    if (!status && !(c.room = (char *)malloc(32 * PIECE))) status = FSDP_ERR_OUT_OF_MEMORY;
    int64_t i = 0, k = 0, all = 0;
    if (!status) bar.total = in[0].data_bytes + in[1].data_bytes;
    while (!status && (i < in[0].num_tensors || k < in[1].num_tensors)) { // both by name
        if (i < in[0].num_tensors) (void)fsdp_checkpoint_tensor_at(c.a, i, &c.ta);
        if (k < in[1].num_tensors) (void)fsdp_checkpoint_tensor_at(c.b, k, &c.tb);
        int order = i >= in[0].num_tensors   ? 1
                    : k >= in[1].num_tensors ? -1
                                             : strcmp(c.ta.name, c.tb.name);
        const int skipped = is_skipped(q, order > 0 ? c.tb.name : c.ta.name);
        if (order && !skipped) only_in(q, &c, order > 0);
        else if (!skipped) status = compare_tensor(q, &c, i, k);
        i += order <= 0;
        k += order >= 0;
        all += !skipped;
    }
    free(c.room);
    fsdp_checkpoint_close(c.a);
    fsdp_checkpoint_close(c.b);
    end_bar();
    if (status) return finish(q, status);
    if (c.tensors) printf("%lld of %lld tensors differ\n", (long long)c.tensors, (long long)all);
    else printf("%lld tensors, all equal\n", (long long)all);
    return c.tensors ? EXIT_DIFFERS : 0;
}

/* ---- what the user wants --------------------------------------------------------------------- */

#define SKIP_HELP                                                                                  \
    "  --skip NAME          without this tensor. One * in it stands for any text. May be given\n"  \
    "                       several times\n"
static const verb verbs[] = {
    {"ls", "PATH", "", 1, list,
     "Lists the tensors: bytes, boxes, name, dtype and shape. Reads and checks headers alone.\n"},
    {"verify", "PATH", "", 1, verify,
     "Checks the manifest, sizes, headers, the coverage of every tensor, and every checksum. Says\n"
     "what was checked, or the first fault. Files of others have no checksums.\n"},
    {"diff", "A B", "[--skip NAME]", 2, diff,
     "Compares tensors: names, dtypes, shapes, and values bit by bit, however they are cut. "
     "Prints\n"
     "a line for each difference. It does not compare steps of manifests.\n" SKIP_HELP},
    {"reshard", "PATH OUT", "--ranks N [--skip NAME]", 2, reshard,
     "Writes a checkpoint of ours again in N data files, so that each of N ranks mostly reads "
     "one.\n"
     "That is never needed: any number of ranks loads any checkpoint. Blobs of each rank stay\n"
     "those of the ranks that saved them.\n" SKIP_HELP},
    {"export", "PATH OUT",
     "[--like DIR] [--rename FROM=TO] [--prefix P] [--transpose NAME] [--dtype D]\n"
     "         [--ema[=NAME]] [--with-optimizer] [--max-file-bytes N] [--file NAME] [--skip NAME]",
     2, export_it,
     "Writes whole tensors for others: model.safetensors, or some files and an index.\n"
     "  --like DIR           a model of Hugging Face: OUT gets its other files (configuration,\n"
     "                       tokenizer, chat template), and must have its tensors, with their\n"
     "                       shapes; other dtypes are reported\n"
     "  --rename FROM=TO     another name. One * in FROM stands for any text, which TO may have,\n"
     "                       too: 'h.*.fc=model.layers.*.fc.weight'. A,B,C=TO: their rows, one\n"
     "                       under the other, become one tensor. FROM=A,B: its rows are cut, as\n"
     "                       in --like or in equal parts. The first option that fits counts\n"
     "  --prefix P           P before each name, after --rename\n"
     "  --transpose NAME     this matrix of OUT is the transposed one (Conv1D of GPT-2). One * in\n"
     "                       NAME stands for any text. Like --rename and --skip, it may be given\n"
     "                       several times\n"
     "  --dtype D            f32, bf16, f16 or f64: floating parameters are converted\n"
     "  --ema                the averages of the weights in place of the weights\n"
     "  --ema=NAME           those with this fsdp_ema_desc.name\n"
     "  --with-optimizer     also what is called optim.state.* and fsdp.*\n"
     "  --max-file-bytes N   of data in a file; KB, MB or GB may follow. Default: 5GB\n"
     "  --file NAME          in place of model.safetensors, for example "
     "adapter_model.safetensors\n" SKIP_HELP},
    {"import", "PATH OUT", "[--ranks N] [--skip NAME]", 2, import_it,
     "Makes a checkpoint of ours of any PATH, with checksums, in N data files (default 1). Call "
     "OUT\n"
     "step-NNNNNNNN, and it has that step; a job finds it in its directory.\n" SKIP_HELP},
};
enum { VERBS = sizeof verbs / sizeof *verbs };

static void usage(FILE *to) {
    fputs("usage: fsdpck VERB PATH...\n\n", to);
    for (int i = 0; i < VERBS; i++)
        fprintf(to, "  fsdpck %s %s%s%s\n", verbs[i].name, verbs[i].operands,
                *verbs[i].options ? " " : "", verbs[i].options);
    fputs(
        "\nfsdpck VERB --help explains each. PATH, A and B: a checkpoint directory of fsdp.h, one\n"
        "of PyTorch's in safetensors form, a directory of Hugging Face, or one .safetensors file.\n"
        "OUT: a new directory; it gets its name when it is complete and on the disk. A killed\n"
        "fsdpck leaves .tmp-export-* beside it, which you may remove.\n"
        "\n"
        "Exit status: 0 right; 1 damaged, or (diff) different; 2 wrong use, or a format that\n"
        "fsdpck does not read; 3 a file call failed, or no memory. Faults go to the standard "
        "error,\n"
        "and, if that is a terminal, a bar of progress. In names, what is not printable ASCII is\n"
        "\\xNN.\n",
        to);
}
static void verb_help(const verb *v) {
    printf(
        "usage: fsdpck %s %s%s%s\n\n%s\n"
        "Exit status: 0 right; 1 damaged%s; 2 wrong use, or a format that fsdpck does not read;\n"
        "3 a file call failed, or no memory\n",
        v->name, v->operands, *v->options ? " " : "", v->options, v->help,
        v->run == diff ? ", or different" : "");
}

static int number(const char *option, const char *text, int64_t most, int units, int64_t *out) {
    static const char *const names[] = {"", "KB", "MB", "GB"};
    char *end = NULL;
    int64_t scale = 1;
    errno = 0;
    *out = *text >= '0' && *text <= '9' ? strtoll(text, &end, 10) : -1;
    for (int i = 0; i < (units ? 4 : 1) && end; i++, scale *= 1000)
        if (!strcmp(end, names[i])) {
            if (!errno && *out > 0 && *out <= most / scale) {
                *out *= scale;
                return 0;
            }
            break;
        }
    char what[100];
    snprintf(what, sizeof what, "a number from 1 to %lld%s", (long long)most,
             units ? ", or one with KB, MB or GB" : "");
    return expected(option, what);
}
static int dtype_of(request *q, const char *text) {
    static const fsdp_dtype known[] = {FSDP_F32, FSDP_BF16, FSDP_F16, FSDP_F64};
    for (int i = 0; i < 4; i++)
        if (!strcmp(text, fsdp_dtype_name(known[i]))) {
            q->dtype = known[i];
            return 0;
        }
    return expected("--dtype", "f32, bf16, f16 or f64");
}

// Returns the value of the option `name`: after = in argv[*i], or the next word. Returns NULL if
// argv[*i] is another option, or if the verb does not have it.
static const char *option(const request *q, const char *name, char **argv, int *i) {
    const size_t length = strlen(name);
    const char *rest = argv[*i] + length;
    if (strncmp(argv[*i], name, length) != 0 || !strstr(q->verb->options, name)) return NULL;
    if (!*rest) return argv[*i + 1] ? argv[++*i] : "";
    return *rest == '=' ? rest + 1 : NULL;
}

static int add(patterns *p, const char *text) {
    p->text[p->num++] = text;
    return 0;
}
static int add_name(patterns *p, const char *option, const char *text) {
    const int good = *text && p->num < MOST_PATTERNS && strchr(text, '*') == strrchr(text, '*');
    return good ? add(p, text) : expected(option, "a name with at most one *, at most 64 times");
}
// Adds a rule FROM=TO. A list with commas is on at most one side, each item has at most one *, and
// TO has one only if FROM has.
static int add_rule(request *q, const char *rule) {
    const char *middle = strchr(rule, '='), *end = rule + strlen(rule);
    int good = middle && middle > rule && middle + 1 < end, items[2] = {0, 0}, stars[2] = {0, 0};
    for (int side = 0; side < 2 && good; side++) {
        const char *stop = side ? end : middle;
        for (const char *at = side ? middle + 1 : rule; good && at <= stop; items[side]++) {
            const size_t n = item(at, stop);
            const char *star = (const char *)memchr(at, '*', n);
            good = n > 0 && (!star || !memchr(star + 1, '*', n - (size_t)(star + 1 - at)));
            stars[side] += star != NULL;
            at += n + 1;
        }
    }
    good = good && q->renames.num < MOST_PATTERNS && (items[0] == 1 || items[1] == 1) &&
           (!stars[0] || stars[0] == items[0]) && (!stars[1] || stars[0]);
    if (!good)
        return expected("--rename",
                        "FROM=TO, with a list of names A,B on at most one side, one * "
                        "in each name of FROM or in none, and one in TO only with it, at most "
                        "64 times");
    return add(&q->renames, rule);
}

// Reads the arguments. Returns 0, or an exit status.
static int read_arguments(request *q, int argc, char **argv) {
    const char *v;
    int bad = 0, only_paths = 0;
    for (int i = 2; i < argc && !bad; i++) {
        if (only_paths || argv[i][0] != '-') {
            if (q->num_paths < q->verb->num_paths) q->paths[q->num_paths] = argv[i];
            q->num_paths++;
        } else if (!strcmp(argv[i], "--")) {
            only_paths = 1;
        } else if (!strcmp(argv[i], "-h") || !strcmp(argv[i], "--help")) {
            q->help = 1;
        } else if (!strcmp(argv[i], "--with-optimizer") &&
                   strstr(q->verb->options, "--with-optimizer")) {
            q->with_optimizer = 1;
        } else if (!strcmp(argv[i], "--ema") && strstr(q->verb->options, "--ema")) {
            q->ema = 1;
        } else if (!strncmp(argv[i], "--ema=", 6) && strstr(q->verb->options, "--ema")) {
            q->ema = 1, q->ema_name = argv[i] + 6;
        } else if ((v = option(q, "--ranks", argv, &i)) != NULL) {
            bad = number("--ranks", v, 99999, 0, &q->ranks);
        } else if ((v = option(q, "--max-file-bytes", argv, &i)) != NULL) {
            bad = number("--max-file-bytes", v, INT64_MAX, 1, &q->max_file_bytes);
        } else if ((v = option(q, "--skip", argv, &i)) != NULL) {
            bad = add_name(&q->skips, "--skip", v);
        } else if ((v = option(q, "--transpose", argv, &i)) != NULL) {
            bad = add_name(&q->transposes, "--transpose", v);
        } else if ((v = option(q, "--rename", argv, &i)) != NULL) {
            bad = add_rule(q, v);
        } else if ((v = option(q, "--like", argv, &i)) != NULL) {
            bad = *v ? 0 : expected("--like", "a directory");
            q->like = v;
        } else if ((v = option(q, "--prefix", argv, &i)) != NULL) {
            bad = *v ? 0 : expected("--prefix", "a text");
            q->prefix = v;
        } else if ((v = option(q, "--file", argv, &i)) != NULL) {
            q->file_name = v;
        } else if ((v = option(q, "--dtype", argv, &i)) != NULL) {
            bad = dtype_of(q, v);
        } else {
            bad = unknown("option", argv[i]);
        }
    }
    if (bad || q->help || q->num_paths == q->verb->num_paths) return bad;
    return expected(q->verb->name, q->verb->operands);
}

int main(int argc, char **argv) {
    static request q;
    if (argc > 1 && (!strcmp(argv[1], "-h") || !strcmp(argv[1], "--help"))) {
        usage(stdout);
        return fflush(stdout) ? EXIT_IO : 0;
    }
    for (int i = 0; i < VERBS && argc > 1; i++)
        if (!strcmp(argv[1], verbs[i].name)) q.verb = &verbs[i];
    if (argc < 2) usage(stderr);
    if (argc < 2) return EXIT_USAGE;
    if (!q.verb) return unknown("verb", argv[1]);
    int result = read_arguments(&q, argc, argv);
    if (result) return result;
    (void)signal(SIGXFSZ, SIG_IGN); // a file above ulimit -f is a failure with a text
    counted = fsdpi_ck_os_files;
    counted.read = counted_read;
    bar.on = isatty(STDERR_FILENO) != 0;
    if (q.help) verb_help(q.verb);
    else result = q.verb->run(&q);
    if ((fflush(stdout) || ferror(stdout)) && result < EXIT_USAGE) {
        perror("fsdpck: standard output");
        return EXIT_IO;
    }
    return result;
}
