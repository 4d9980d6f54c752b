/* fuzz_safetensors.c - a libFuzzer target: headers, pairs of boxes, and printed lists

       clang -std=c99 -g -O1 -I. -Itests -fsanitize=fuzzer,address,undefined \
           -fno-sanitize-recover=all tests/safetensors/fuzz_safetensors.c tests/library.c \
           -o build/fuzz_safetensors -pthread -lm
       mkdir build/seeds && FSDP_FUZZ_SEEDS=build/seeds build/fuzz_safetensors -runs=0 # golden
   cases
       build/fuzz_safetensors -max_len=4096 -max_total_time=600 build/seeds

   An input has a kind (1 byte) and the rest. Kind 0: a header, with as much data as it describes;
   an accepted header is printed again if possible. 4: two boxes. 5: a list that is printed and
   read. 6: JSON. (1 to 3 are for the files of a checkpoint.) tests/safetensors/test_safetensors.c includes
   this file, and runs the golden cases and mutations of them from a seed.

   SPDX-License-Identifier: MIT */
#include "lab_safetensors.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);
int LLVMFuzzerInitialize(int *argc, char ***argv);

/* Reads a header for a file of the size of its tensors, which an error text states. */
static void fuzz_header(const char *header, int64_t nbytes) {
    int64_t data_bytes = 0, size;
    st_list l = st_read(header, nbytes, 0);
    const char *told = strstr(l.why, "the header tells ");
    if (told && !strncmp(l.why, "is cut off: 0 bytes of data", 27)) {
        data_bytes = strtoll(told + 17, NULL, 10);
        st_free(&l);
        l = st_read(header, nbytes, data_bytes);
    }
    if (!l.status) {
        int printable = 1;
        st_check(&l, data_bytes);
        for (int64_t i = 0; i < l.n; i++) printable &= l.e[i].ndim <= FSDP_MAX_DIMS;
        char *again = st_print_and_read(l.e, l.n, l.info.has_sharding, NULL, NULL, 0, &size);
        if (printable != (again != NULL)) fprintf(stderr, "%.*s\n", (int)nbytes, header);
        st_must(printable == (again != NULL));
        free(again);
    }
    st_free(&l);
}

static void fuzz_boxes(const uint8_t *data, size_t size) {
    int64_t n[4][FSDP_MAX_DIMS];
    fsdp_box_overlap o;
    int ndim = size ? data[0] % 5 : 0, wild = size && data[0] >= 0xc0;
    memset(n, 0, sizeof n);
    for (size_t i = 0; i < 4 * FSDP_MAX_DIMS && i + 1 < size; i++)
        n[i % 4][i / 4] = data[i + 1] % (i % 2 ? 8 : 12);
    if (!wild) {
        st_check_boxes(ndim, n[0], n[1], n[2], n[3]);
        return;
    }
    for (size_t i = 0; 8 * i + 9 <= size && i < 32; i++)
        memcpy(&n[i % 4][i / 4], data + 1 + 8 * i, 8);
    fsdp_box_begin(data[0] % 16 - 3, n[0], n[1], n[2], n[3], &o);
    for (int i = 0; i < 1000 && o.rows; i++) {
        st_must(o.src >= 0 && o.dst >= 0 && o.elements > 0);
        if (!fsdp_box_next(&o)) break;
    }
}

/* Returns bytes of an input, one after the other, then 0. */
typedef struct fuzz_bytes {
    const uint8_t *at, *end;
} fuzz_bytes;
static int fuzz_byte(fuzz_bytes *b) { return b->at < b->end ? *b->at++ : 0; }

/* Returns a text of at most `most` bytes; some are not UTF-8. */
static char *fuzz_text(fuzz_bytes *b, int most) {
    static const char *const pieces[] = {"\"",           "\\",
                                         "\n",           "\x01",
                                         "\xc3\xa9",     "\xf0\x9f\x98\x80",
                                         "__metadata__", "DCP_SHARDING_INFO",
                                         "\xff",         "\x7f"};
    int n = fuzz_byte(b) % (most + 1);
    char *s = (char *)calloc((size_t)n * 20 + 1, 1);
    st_must(s != NULL);
    for (int i = 0; i < n; i++) {
        int c = fuzz_byte(b);
        if (c < 10) strcat(s, pieces[c]);
        else s[strlen(s)] = (char)(c < 128 ? c : 'a' + c % 26);
    }
    return s;
}

static void fuzz_print(const uint8_t *data, size_t size) {
    enum { MOST = 12 };
    fuzz_bytes b = {data, data + size};
    fsdp_safetensors_entry e[MOST];
    char *words[MOST + 6];
    const char *keys[3], *values[3];
    int n = fuzz_byte(&b) % (MOST + 1), sharded = fuzz_byte(&b) & 1, pairs = fuzz_byte(&b) % 4;
    int64_t bytes;
    memset(e, 0, sizeof e);
    for (int i = 0; i < n; i++) {
        e[i].name = words[i] = fuzz_text(&b, 6);
        e[i].dtype = fuzz_byte(&b) % 11;
        e[i].ndim = fuzz_byte(&b) % (FSDP_MAX_DIMS + 2) - 1;
        for (int d = 0; d < e[i].ndim && d < FSDP_MAX_DIMS; d++) {
            int c = fuzz_byte(&b), much = c >= 0xf8;
            e[i].shape[d] = much ? (int64_t)1 << c % 63 : c % 5;
            if (!sharded) continue;
            e[i].start[d] = fuzz_byte(&b) % 4;
            e[i].whole[d] = c % 2 ? e[i].start[d] + e[i].shape[d] % 1000 + c % 3 : 0;
        }
    }
    for (int i = 0; i < pairs; i++) {
        keys[i] = words[n + 2 * i] = fuzz_text(&b, 4);
        values[i] = words[n + 2 * i + 1] = fuzz_text(&b, 8);
    }
    free(st_print_and_read(e, n, sharded, keys, values, pairs, &bytes));
    for (int i = 0; i < n + 2 * pairs; i++) free(words[i]);
}

/* Walks a value and all that is in it, and finds each member again. A scalar may be inside 127 levels. */
static void fuzz_json_value(const fsdp_json *in, int level) {
    fsdp_json key, value, found;
    int64_t whole = 0, at = in->begin;
    double x = 0;
    char text[8], name[64];
    int64_t bytes = fsdp_json_string(in, text, sizeof text);
    st_must(level <= 128 && in->begin < in->end && in->kind != FSDP_JSON_NONE);
    st_must((in->kind == FSDP_JSON_STRING) == (bytes >= 0) && memchr(text, 0, sizeof text));
    if (fsdp_json_int(in, &whole) && fsdp_json_double(in, &x))
        st_must((double)whole - x <= 1024 && x - (double)whole <= 1024);
    memset(&value, 0, sizeof value);
    while (fsdp_json_next(in, &key, &value)) {
        st_must(value.begin > at && value.end < in->end);
        st_must((key.kind == FSDP_JSON_STRING) == (in->kind == FSDP_JSON_OBJECT));
        at = value.end;
        bytes = fsdp_json_string(&key, name, sizeof name);
        if (bytes >= 0 && bytes < 64 && !memchr(name, 0, (size_t)bytes))
            st_must(fsdp_json_find(in, name, &found) && found.begin >= value.begin);
        fuzz_json_value(&value, level + 1);
    }
}

static void fuzz_json(const uint8_t *data, size_t size) {
    char why[200], *text = (char *)malloc(size ? size : 1); // of this size: for the sanitizer
    fsdp_json value;
    st_must(text != NULL);
    memcpy(text, data, size);
    fsdp_status status = fsdp_json_parse(text, (int64_t)size, &value, why, sizeof why);
    st_must(status ? !value.kind && *why : value.kind && !*why);
    if (!status) fuzz_json_value(&value, 1);
    free(text);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    if (!size) return 0;
    if (data[0] % 8 == 0) fuzz_header((const char *)data + 1, (int64_t)size - 1);
    if (data[0] % 8 == 4) fuzz_boxes(data + 1, size - 1);
    if (data[0] % 8 == 5) fuzz_print(data + 1, size - 1);
    if (data[0] % 8 == 6) fuzz_json(data + 1, size - 1);
    return 0;
}

/* ---- the golden cases, as inputs ------------------------------------------------------------- */

typedef void fuzz_each(const char *name, const uint8_t *input, size_t size, void *arg);

/* Calls `each` for each golden header, after a byte 0. */
static void fuzz_golden(fuzz_each *each, void *arg) {
    const char *dir = getenv("FSDP_GOLDEN_DIR");
    char path[400], name[100] = "";
    snprintf(path, sizeof path, "%s/safetensors.txt", dir && *dir ? dir : "tests/golden");
    FILE *f = fopen(path, "r");
    static char line[1 << 16];
    st_must(f != NULL);
    while (fgets(line, sizeof line, f)) {
        uint8_t raw[1 << 12];
        size_t n = 0;
        unsigned byte;
        if (sscanf(line, "case %99s", name) == 1 || strncmp(line, "hex ", 4) != 0) continue;
        for (const char *at = line + 4; n < sizeof raw && sscanf(at, "%2x", &byte) == 1; at += 2)
            raw[n++] = (uint8_t)byte;
        uint64_t header = 0;
        for (int i = 7; i >= 0 && n >= 8; i--) header = header << 8 | raw[i];
        if (n < 8 || header > n - 8) continue;
        raw[7] = 0;
        each(name, raw + 7, 1 + (size_t)header, arg);
    }
    fclose(f);
}

static void fuzz_write(const char *name, const uint8_t *input, size_t size, void *arg) {
    char path[600];
    snprintf(path, sizeof path, "%s/%s", (const char *)arg, name);
    FILE *f = fopen(path, "wb");
    st_must(f && fwrite(input, 1, size, f) == size && !fclose(f));
}

int LLVMFuzzerInitialize(int *argc, char ***argv) {
    char *seeds = getenv("FSDP_FUZZ_SEEDS");
    (void)argc, (void)argv;
    if (seeds) fuzz_golden(fuzz_write, seeds);
    return 0;
}
