/* test_safetensors.c - fsdp_safetensors.h: whether golden headers are accepted, and their lists;
   error texts, printed headers, checksums, boxes; hostile bytes.

   SPDX-License-Identifier: MIT */
#include "harness.h"
#include "lab.h"
#include "golden.h"
#include "fuzz_safetensors.c"

#define COUNT(table) ((int64_t)(sizeof(table) / sizeof *(table)))

/* ---- files ----------------------------------------------------------------------------------- */

typedef struct blob {
    char *at;
    int64_t size;
} blob;

static blob load(const char *path) {
    blob b = {NULL, 0};
    FILE *f = fopen(path, "rb");
    CHECK_MSG(f != NULL, "%s", path);
    CHECK(fseek(f, 0, SEEK_END) == 0);
    b.size = ftell(f);
    rewind(f);
    b.at = (char *)malloc((size_t)b.size + 1);
    CHECK(b.at && fread(b.at, 1, (size_t)b.size, f) == (size_t)b.size);
    b.at[b.size] = 0;
    fclose(f);
    return b;
}

static blob load_golden(const char *folder, const char *file) {
    char path[600];
    snprintf(path, sizeof path, "%s/%s/%s", golden_dir(), folder, file);
    golden_needs(folder);
    return load(path);
}

static int64_t header_of(const blob *b) {
    char why[200];
    int64_t n;
    CHECK_OK(fsdp_safetensors_header_bytes(b->at, b->size, &n, why, sizeof why));
    return n;
}

/* ---- golden headers -------------------------------------------------------------------------- */

static blob unhex(const char *hex) {
    blob b = {(char *)malloc(strlen(hex) / 2 + 1), 0};
    unsigned byte;
    CHECK(b.at != NULL);
    for (; sscanf(hex, "%2x", &byte) == 1; hex += 2) b.at[b.size++] = (char)byte;
    return b;
}

static char *put_utf8(char *to, unsigned c) {
    if (c < 0x80) {
        *to++ = (char)c;
    } else if (c < 0x800) {
        *to++ = (char)(0xC0 | c >> 6), *to++ = (char)(0x80 | (c & 0x3F));
    } else if (c < 0x10000) {
        *to++ = (char)(0xE0 | c >> 12);
        *to++ = (char)(0x80 | (c >> 6 & 0x3F)), *to++ = (char)(0x80 | (c & 0x3F));
    } else {
        *to++ = (char)(0xF0 | c >> 18), *to++ = (char)(0x80 | (c >> 12 & 0x3F));
        *to++ = (char)(0x80 | (c >> 6 & 0x3F)), *to++ = (char)(0x80 | (c & 0x3F));
    }
    return to;
}

/* Decodes Python's unicode_escape. */
static void unescape(const char *from, char *to) {
    unsigned c;
    while (*from) {
        if (*from != '\\') {
            *to++ = *from++;
            continue;
        }
        char kind = from[1];
        int digits = kind == 'x' ? 2 : kind == 'u' ? 4 : kind == 'U' ? 8 : 0;
        from += 2;
        if (digits) {
            char hex[9] = {0};
            memcpy(hex, from, (size_t)digits);
            CHECK(sscanf(hex, "%x", &c) == 1);
            to = put_utf8(to, c);
            from += digits;
        } else {
            static const char kinds[] = "ntr\\", means[] = "\n\t\r\\";
            const char *found = strchr(kinds, kind);
            CHECK(kind && found);
            *to++ = means[found - kinds];
        }
    }
    *to = 0;
}

/* Returns the header that the file does not contain: its name is too long for a line. */
static blob name_5000(void) {
    blob b = {(char *)calloc(6000, 1), 0};
    CHECK(b.at != NULL);
    int64_t n = snprintf(
        b.at + 8, 5900, "{\"%05000d\":{\"dtype\":\"I32\",\"shape\":[2,2],\"data_offsets\":[0,16]}}",
        7);
    b.at[0] = (char)(n & 0xFF), b.at[1] = (char)(n >> 8);
    b.size = 8 + n + 16;
    return b;
}

TEST(safetensors, golden_results, VALGRIND) {
    golden g;
    int cases = 0, accepted = 0, stricter = 0, tensors = 0;
    GOLDEN_OPEN(&g, "safetensors.txt", "safetensors");
    while (golden_case(&g)) {
        int want = -1, ours = 0;
        blob b = {NULL, 0};
        st_list l;
        cases++;
        while (golden_line(&g)) {
            if (golden_is(&g, "verdict")) want = !strcmp(golden_word(&g), "ok");
            if (golden_is(&g, "ours")) ours = !strcmp(golden_word(&g), "CORRUPT");
            if (golden_is(&g, "hex")) b = unhex(golden_peek(&g) ? golden_word(&g) : "");
            if (golden_is(&g, "long")) {
                b = name_5000();
                CHECK_EQ_INT(b.size, golden_int(&g));
            }
        }
        CHECK(want >= 0 && b.at != NULL);
        l = st_read_file(b.at, b.size);
        CHECK_MSG(l.status == (want && !ours ? FSDP_OK : FSDP_ERR_CORRUPT), "%s: %s", g.name,
                  l.why);
        stricter += ours;
        golden_again(&g);
        while (!l.status && golden_line(&g)) {
            char name[1024];
            int found = 0;
            if (golden_is(&g, "tensors")) CHECK_EQ_INT(golden_int(&g), l.n);
            if (!golden_is(&g, "t")) continue;
            CHECK(golden_peek(&g) && strlen(golden_peek(&g)) < sizeof name);
            unescape(golden_word(&g), name);
            for (int64_t i = 0; i < l.n; i++) {
                const fsdp_safetensors_entry *e = &l.e[i];
                if (strcmp(e->name, name) != 0) continue;
                found++;
                CHECK_EQ_STR(fsdp_safetensors_dtype_name(e->file_dtype), golden_word(&g));
                CHECK_EQ_INT(e->begin, golden_int(&g));
                CHECK_EQ_INT(e->end, golden_int(&g));
                CHECK_EQ_INT(e->ndim, golden_int(&g));
                for (int d = 0; d < e->ndim; d++) {
                    int64_t size = golden_int(&g);
                    if (d < FSDP_MAX_DIMS) CHECK_EQ_INT(e->shape[d], size);
                }
            }
            CHECK_MSG(found == 1, "%s: %d times '%s'", g.name, found, name);
            tensors++;
        }
        if (!l.status) st_check(&l, b.size - 8 - header_of(&b));
        accepted += !l.status;
        st_free(&l);
        free(b.at);
    }
    GOLDEN_CLOSE(&g);
    CHECK(cases > 0);
    if (!strcmp(golden_dir(), GOLDEN_DIR)) CHECK(cases == 113 && stricter == 5);
    h_message("%d cases, %d accepted, %d tensors", cases, accepted, tensors);
}

/* ---- error texts ----------------------------------------------------------------------------- */

#define T "\"t\":{\"dtype\":\"I32\",\"shape\":[2,2],\"data_offsets\":[0,16]}"
#define T2(name, offsets)                                                                          \
    "\"" name "\":{\"dtype\":\"I32\",\"shape\":[2],\"data_offsets\":" offsets "}"
#define SHARDED(info) "{\"__metadata__\":{\"DCP_SHARDING_INFO\":\"" info "\"}," T "}"
#define LONG40        "0123456789012345678901234567890123456789"

static const struct {
    const char *header, *why;
    int64_t data;
} texts[] = {
    {"{" T "}", "", 16},
    {"", "at byte 8: expected '{', got the end", 0},
    {"[]", "at byte 8: expected '{', got '['", 0},
    {"{} x", "at byte 11: expected nothing behind the header's '}', got 'x'", 0},
    {"{\"a\xff\":1}", "at byte 11: byte 0xff is no UTF-8", 0},
    {"{\"a\n\":1}", "at byte 11: a string has byte 0x0a, which it may have as an escape", 0},
    {"{\"a\\x\":1}", "at byte 11: an escape that JSON does not have", 0},
    {"{\"a\\ud83d\":1}", "at byte 11: an escape that JSON does not have", 0},
    {"{\"a\\ud83dx\":1}", "at byte 11: an escape that JSON does not have", 0},
    {"{\"a\\ud83d\\u0041\":1}", "at byte 11: an escape that JSON does not have", 0},
    {"{\"a\\ud83d\\ud83d\":1}", "at byte 11: an escape that JSON does not have", 0},
    {"{\"a\\ude00\":1}", "at byte 11: an escape that JSON does not have", 0},
    {"{\"a\\u00g0\":1}", "at byte 11: an escape that JSON does not have", 0},
    {"{\"a\\u00:0\":1}", "at byte 11: an escape that JSON does not have", 0},
    {"{\"a\\u00", "at byte 11: an escape that JSON does not have", 0},
    {"{\"a\\", "at byte 11: an escape that JSON does not have", 0},
    {"{\"a", "at byte 11: expected the end of a string, got the end", 0},
    {"{7:1}", "at byte 9: expected a string, got '7'", 0},
    {"{\"t\" 1}", "at byte 13: expected ':', got '1'", 0},
    {"{\"t\":1}", "at byte 13: expected '{', got '1'", 0},
    {"{" T ",}", "at byte 65: expected a string, got '}'", 16},
    {"{" T " " T "}", "at byte 65: expected ',' or '}', got '\"'", 16},
    {"{\"\":1}", "at byte 10: a name without bytes", 0},
    {"{\"a\\u0000\":1}", "at byte 11: a name with a NUL", 0},
    {"{\"t\":{\"dtype\":\"i32\"}}", "tensor 't': 'i32' is no dtype of the format", 0},
    {"{\"t\":{\"dtype\":\"I32\",\"dtype\":\"I32\"}}", "at byte 36: tensor 't' has 'dtype' twice",
     0},
    {"{\"t\":{\"shape\":[1]}}", "tensor 't' has no 'dtype'", 0},
    {"{\"t\":{\"dtype\":\"U8\",\"shape\":[1]}}", "tensor 't' has no 'data_offsets'", 0},
    {"{\"t\":{\"shape\":1}}", "at byte 22: expected '[', got '1'", 0},
    {"{\"t\":{\"shape\":[-1]}}", "at byte 23: expected an integer, got '-'", 0},
    {"{\"t\":{\"shape\":[01]}}", "at byte 23: an integer begins with 0", 0},
    {"{\"t\":{\"shape\":[1.0]}}", "at byte 24: expected the end of an integer, got '.'", 0},
    {"{\"t\":{\"shape\":[1e0]}}", "at byte 24: expected the end of an integer, got 'e'", 0},
    {"{\"t\":{\"shape\":[1 2]}}", "at byte 25: expected ',' or ']', got '2'", 0},
    {"{\"t\":{\"shape\":[4611686018427387905]}}", "at byte 23: an integer above 2^62", 0},
    {"{\"t\":{\"shape\":[9223372036854775808]}}", "at byte 23: an integer above 2^62", 0},
    {"{\"t\":{\"shape\":[40000000000000000000]}}", "at byte 23: an integer above 2^62", 0},
    {"{\"t\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[0,1,2]}}",
     "tensor 't': data_offsets has 3 numbers, expected 2", 1},
    {"{\"x\":{\"dtype\":\"I32\",\"shape\":[2,2],\"data_offsets\":[16,20]}}",
     "tensor 'x': bytes 16..20 for i32 [2, 2], expected 16", 20},
    {"{\"x\":{\"dtype\":\"F8_E4M3\",\"shape\":[1,1,1,1,1,1,1,1,2],\"data_offsets\":[1,0]}}",
     "tensor 'x': bytes 1..0 for F8_E4M3 [1, 1, 1, 1, 1, 1, 1, 1, ...], expected 2", 1},
    {"{\"x\":{\"dtype\":\"F64\",\"shape\":[],\"data_offsets\":[0,7]}}",
     "tensor 'x': bytes 0..7 for f64 [], expected 8", 7},
    {"{\"x\":{\"dtype\":\"F4\",\"shape\":[3],\"data_offsets\":[0,2]}}",
     "tensor 'x': F4 [3] does not end at a whole byte", 2},
    {"{\"x\":{\"dtype\":\"U8\",\"shape\":[4294967296,4294967296],\"data_offsets\":[0,0]}}",
     "tensor 'x': u8 [4294967296, 4294967296] has more than 2^64 bits", 0},
    {"{\"x\":{\"dtype\":\"U8\",\"shape\":[2305843009213693952],\"data_offsets\":[0,0]}}",
     "tensor 'x': u8 [2305843009213693952] has more than 2^64 bits", 0},
    {"{" T2("a", "[0,8]") "," T2("a", "[8,16]") "}", "tensor 'a' is there twice", 16},
    {"{" T2("a", "[0,8]") "," T2("\\u0061", "[8,16]") "}", "tensor 'a' is there twice", 16},
    {"{" T2("a", "[8,16]") "," T2("b", "[12,20]") "," T2("c", "[0,8]") "}",
     "'a' and 'b' both take bytes 12..16", 20},
    {"{" T2("a", "[8,16]") "," T2("b", "[8,16]") "," T2("c", "[0,8]") "}",
     "'a' and 'b' both take bytes 8..16", 16},
    {"{" T2("a", "[4,12]") "}", "bytes 0..4 of the data are in no tensor", 12},
    {"{" T2("a", "[12,20]") "," T2("b", "[0,8]") "}", "bytes 8..12 of the data are in no tensor",
     20},
    {"{" T "}", "is cut off: 15 bytes of data, the header tells 16", 15},
    {"{" T "}", "has 17 bytes of data, the header tells 16", 17},
    {"{}", "has 1 bytes of data, the header tells 0", 1},
    {"{\"__metadata__\":1}", "at byte 24: expected '{', got '1'", 0},
    {"{\"__metadata__\":{\"a\":1}}", "at byte 29: expected a string, got '1'", 0},
    {"{\"__metadata__\":nul}", "at byte 24: expected a value, got 'n'", 0},
    {"{\"__metadata__\":null,\"__metadata__\":{}}", "at byte 44: '__metadata__' is there twice", 0},
    {"{\"__metadata__\":{\"DCP_SHARDING_INFO\":\"{}\",\"DCP_SHARDING_INFO\":\"{}\"}}",
     "at byte 74: 'DCP_SHARDING_INFO' is there twice", 0},
    {"{\"t\":{\"x\":tru}}", "at byte 18: expected a value, got 't'", 0},
    {"{\"t\":{\"x\":-}}", "at byte 19: expected a digit, got '}'", 0},
    {"{\"t\":{\"x\":1.}}", "at byte 20: expected a digit, got '}'", 0},
    {"{\"t\":{\"x\":1e+}}", "at byte 21: expected a digit, got '}'", 0},
    {"{\"t\":{\"x\":[1}}}", "at byte 20: expected ',' or ']', got '}'", 0},
    {"{\"t\":{\"x\":{\"a\":1]}}", "at byte 24: expected ',' or '}', got ']'", 0},
    {"{\"t\":{\"x\":[1,]}}", "at byte 21: expected a value, got ']'", 0},
    {"{\"t\":{\"x\":{1}}}", "at byte 19: expected a string, got '1'", 0},
    /* names are shortened to whole characters; characters that control a terminal are not shown */
    {"{\"" LONG40 LONG40 "\":1}", "at byte 92: expected '{', got '1'", 0},
    {"{\"" LONG40 LONG40 "\":{}}", "tensor '" LONG40 "012345678901234567890123...' has no 'dtype'",
     0},
    {"{\"" LONG40 "01234567890123456789012\xc3\xa9g\":{}}",
     "tensor '" LONG40 "01234567890123456789012...' has no 'dtype'", 0},
    {"{\"\\u001b[31m\\n\x7f\":{}}",
     "tensor '?[31m?"
     "?' has no 'dtype'",
     0},
    /* the sharding info: positions refer to its own text */
    {SHARDED("{\\\"t\\\":{\\\"saved_offsets\\\":[0,4]}}"), "", 16},
    {SHARDED(""), "DCP_SHARDING_INFO: at byte 0: expected '{', got the end", 16},
    {SHARDED("{\\\"t\\\":{\\\"saved_offsets\\\":[0,4]}}}"),
     "DCP_SHARDING_INFO: at byte 29: expected nothing behind its '}', got '}'", 16},
    {SHARDED("{\\\"t\\\":7}"), "DCP_SHARDING_INFO: at byte 5: expected '{', got '7'", 16},
    {SHARDED("{}"), "DCP_SHARDING_INFO: tensor 't' is missing", 16},
    {SHARDED("{\\\"u\\\":{}}"), "DCP_SHARDING_INFO: 'u' is no tensor of the file", 16},
    {SHARDED("{\\\"t\\\\u0000\\\":{}}"), "DCP_SHARDING_INFO: 't' is no tensor of the file", 16},
    {SHARDED("{\\\"t\\\":{}}"), "DCP_SHARDING_INFO: tensor 't' has no 'saved_offsets'", 16},
    {SHARDED("{\\\"t\\\":{\\\"saved_offsets\\\":[0,0]},\\\"t\\\":{\\\"saved_offsets\\\":[0,0]}}"),
     "DCP_SHARDING_INFO: tensor 't' is there twice", 16},
    {SHARDED("{\\\"t\\\":{\\\"saved_offsets\\\":[0,0],\\\"saved_offsets\\\":[0,0]}}"),
     "DCP_SHARDING_INFO: at byte 44: tensor 't' has 'saved_offsets' twice", 16},
    {SHARDED("{\\\"t\\\":{\\\"saved_offsets\\\":[0]}}"),
     "DCP_SHARDING_INFO: tensor 't': saved_offsets has 1 numbers for 2 dims", 16},
    {SHARDED("{\\\"t\\\":{\\\"saved_offsets\\\":[0,0],\\\"global_shape\\\":[2,2,1]}}"),
     "DCP_SHARDING_INFO: tensor 't': global_shape has 3 numbers for 2 dims", 16},
    {SHARDED("{\\\"t\\\":{\\\"saved_offsets\\\":[0,3],\\\"global_shape\\\":[2,4]}}"),
     "DCP_SHARDING_INFO: tensor 't': 3..5 of 4 in dim 1", 16},
    {SHARDED("{\\\"t\\\":{\\\"saved_offsets\\\":[0,0],\\\"global_shape\\\":[1,4]}}"),
     "DCP_SHARDING_INFO: tensor 't': 0..2 of 1 in dim 0", 16},
    {SHARDED("{\\\"t\\\":{\\\"saved_offsets\\\":[4611686018427387903,0]}}"),
     "DCP_SHARDING_INFO: tensor 't': 4611686018427387903..4611686018427387905 of "
     "4611686018427387904 in dim 0",
     16},
    {"{\"__metadata__\":{\"DCP_SHARDING_INFO\":\"{\\\"t\\\":{}}\"}}",
     "DCP_SHARDING_INFO: 't' is no tensor of the file", 0},
};

TEST(safetensors, texts, VALGRIND) {
    for (int64_t i = 0; i < COUNT(texts); i++) {
        const char *h = texts[i].header;
        st_list l = st_read(h, (int64_t)strlen(h), texts[i].data);
        CHECK_MSG(!strcmp(l.why, texts[i].why), "%s\n  %s\n  %s", h, l.why, texts[i].why);
        st_free(&l);
    }
}

TEST(safetensors, texts_of_sizes, VALGRIND) {
    static const struct {
        uint64_t n;
        int64_t file, want;
        const char *why;
    } rows[] = {
        {0, 0, 0, "has 0 bytes, expected at least 8"},
        {0, 7, 0, "has 7 bytes, expected at least 8"},
        {0, 8, 0, ""},
        {60, 8, 0, "is cut off: 0 bytes after the first 8, a header of 60"},
        {60, 67, 0, "is cut off: 59 bytes after the first 8, a header of 60"},
        {60, 68, 60, ""},
        {100000000, 100000008, 100000000, ""},
        {100000001, 200000000, 0,
         "is no safetensors file: header of 100000001 bytes, at most 100000000"},
        {UINT64_MAX, INT64_MAX, 0,
         "is no safetensors file: header of 18446744073709551615 bytes, at most 100000000"},
        {0x0808000004034b50u, 9000, 0, /* torch.save: a ZIP archive, or the old format */
         "is no safetensors file, but one of torch.save (a pickle): write its tensors with "
         "safetensors.torch.save_file"},
        {0x469cfc6c0a8a0280u, 9000, 0,
         "is no safetensors file, but one of torch.save (a pickle): write its tensors with "
         "safetensors.torch.save_file"},
        {0x280, 9000, 0x280, ""}, /* begins like a pickle */
        {0x4034b50, INT64_MAX, 0x4034b50, ""},
    };
    char why[120];
    int64_t n = -1;
    for (int64_t i = 0; i < COUNT(rows); i++) {
        uint8_t first[8];
        for (int k = 0; k < 8; k++) first[k] = (uint8_t)(rows[i].n >> 8 * k);
        fsdp_status s = fsdp_safetensors_header_bytes(first, rows[i].file, &n, why, sizeof why);
        CHECK_STATUS(s, rows[i].why[0] ? FSDP_ERR_CORRUPT : FSDP_OK);
        CHECK_EQ_STR(why, rows[i].why);
        CHECK_EQ_INT(n, rows[i].want);
    }
    CHECK_OK(fsdp_safetensors_header_bytes("\0\0\0\0\0\0\0", 8, &n, NULL, 0));
    CHECK_STATUS(fsdp_safetensors_header_bytes(NULL, 8, &n, why, 9), FSDP_ERR_INVALID_ARG);
    CHECK_STATUS(fsdp_safetensors_header_bytes(why, -1, &n, why, 9), FSDP_ERR_INVALID_ARG);
    CHECK_STATUS(fsdp_safetensors_header_bytes(why, 8, NULL, why, 9), FSDP_ERR_INVALID_ARG);
}

/* A text is truncated to its buffer, after a whole character. */
TEST(safetensors, short_rooms, VALGRIND) {
    static const char h[] = "{\"\xc3\xa9\xf0\x9f\x98\x80\":{}}",
                      whole[] = "tensor '\xc3\xa9\xf0\x9f\x98\x80' has no 'dtype'";
    fsdp_safetensors_info info;
    for (size_t cap = 0; cap <= sizeof whole + 1; cap++) {
        char *why = (char *)st_room((int64_t)cap);
        size_t n = cap ? cap - 1 : 0;
        CHECK_STATUS(fsdp_safetensors_parse(h, sizeof h - 1, 0, NULL, NULL, &info, why, cap),
                     FSDP_ERR_CORRUPT);
        st_end(why, (int64_t)cap);
        if (n > sizeof whole - 1) n = sizeof whole - 1;
        n = n == 9 ? 8 : n > 10 && n < 14 ? 10 : n; /* characters of two and four bytes */
        if (cap) CHECK_EQ_INT(strlen(why), n);
        if (cap) CHECK_EQ_MEM(why, whole, n);
        free(why);
    }
    CHECK_STATUS(fsdp_safetensors_parse(h, sizeof h - 1, 0, NULL, NULL, &info, NULL, 10),
                 FSDP_ERR_CORRUPT);
    CHECK_EQ_INT(info.num_entries, 0);
}

/* The bytes that are valid UTF-8, by their code points: the shortest form, no surrogates. */
TEST(safetensors, utf8, VALGRIND) {
    static const uint8_t more[] = {0x22, 0x7f, 0x80, 0x8f, 0x90, 0x9f, 0xa0, 0xbf, 0xc0, 0xff};
    int accepted = 0;
    for (int lead = 0x80; lead < 256; lead++)
        for (int k = 0; k < 1000; k++) {
            uint8_t h[] = "{\"xxxx\":1}";
            int size = lead < 0xE0 ? 2 : lead < 0xF0 ? 3 : 4, want = lead >= 0xC0 && lead < 0xF8;
            uint32_t c = (uint32_t)lead & (size == 2 ? 0x1F : size == 3 ? 0x0F : 0x07);
            h[2] = (uint8_t)lead, h[3] = more[k % 10], h[4] = more[k / 10 % 10],
            h[5] = more[k / 100];
            for (int i = 1; i < size; i++) {
                want &= (h[2 + i] & 0xC0) == 0x80;
                c = c << 6 | (h[2 + i] & 0x3F);
            }
            want &= c >= (size == 2 ? 0x80u : size == 3 ? 0x800u : 0x10000u) && c <= 0x10FFFF;
            want &= c < 0xD800 || c > 0xDFFF;
            for (int i = size; i < 4; i++) h[2 + i] = 'x';
            st_list l = st_read(h, sizeof h - 1, 0);
            CHECK_EQ_INT(!strstr(l.why, "is no UTF-8"), want);
            accepted += want;
            st_free(&l);
        }
    CHECK(accepted > 1000);
    /* bytes after the header are not read */
    static const char cut[] = "{\"\xf0\x9f\x98\x80";
    fsdp_safetensors_info info;
    char why[100];
    for (int64_t n = 3; n < 6; n++) {
        CHECK_STATUS(fsdp_safetensors_parse(cut, n, 0, NULL, NULL, &info, why, sizeof why),
                     FSDP_ERR_CORRUPT);
        CHECK_EQ_STR(why, "at byte 10: byte 0xf0 is no UTF-8");
    }
    CHECK_STATUS(fsdp_safetensors_parse(cut, 6, 0, NULL, NULL, &info, why, sizeof why),
                 FSDP_ERR_CORRUPT);
    CHECK_EQ_STR(why, "at byte 14: expected the end of a string, got the end");
}

TEST(safetensors, arguments, VALGRIND) {
    static const char h[] = "{" T "}";
    fsdp_safetensors_entry e;
    fsdp_safetensors_info info;
    char text[64], why[64] = "x";
    const int64_t n = sizeof h - 1;
    CHECK_STATUS(fsdp_safetensors_parse(NULL, n, 16, NULL, NULL, &info, why, 64),
                 FSDP_ERR_INVALID_ARG);
    CHECK_EQ_STR(why, "");
    CHECK_STATUS(fsdp_safetensors_parse(h, -1, 16, NULL, NULL, &info, why, 64),
                 FSDP_ERR_INVALID_ARG);
    CHECK_STATUS(fsdp_safetensors_parse(h, n, -1, NULL, NULL, &info, why, 64),
                 FSDP_ERR_INVALID_ARG);
    CHECK_STATUS(fsdp_safetensors_parse(h, n, 16, NULL, NULL, NULL, why, 64), FSDP_ERR_INVALID_ARG);
    CHECK_STATUS(fsdp_safetensors_parse(h, n, 16, &e, NULL, &info, why, 64), FSDP_ERR_INVALID_ARG);
    CHECK_STATUS(fsdp_safetensors_parse(h, n, 16, NULL, text, &info, why, 64),
                 FSDP_ERR_INVALID_ARG);
    CHECK_OK(fsdp_safetensors_parse(h, n, 16, &e, text, &info, why, 64));
    CHECK_EQ_STR(e.name, "t");
    CHECK_EQ_INT(info.num_entries, 1);
    CHECK_EQ_INT(info.text_bytes, 2 + 4 + 1);
    /* without tensors entries may be NULL */
    CHECK_OK(fsdp_safetensors_parse("{}", 2, 0, NULL, text, &info, why, 64));
    CHECK_EQ_INT(info.text_bytes, 1);
    CHECK_STATUS(fsdp_safetensors_parse("{}", 2, 1, NULL, NULL, &info, why, 64), FSDP_ERR_CORRUPT);
    CHECK_EQ_STR(fsdp_safetensors_dtype_name(-1), "?");
    CHECK_EQ_STR(fsdp_safetensors_dtype_name(0), "BOOL");
    CHECK_EQ_STR(fsdp_safetensors_dtype_name(21), "U64");
    CHECK_EQ_STR(fsdp_safetensors_dtype_name(22), "?");
}

/* ---- contents that are read ------------------------------------------------------------------ */

TEST(safetensors, metadata) {
    static const struct {
        const char *pairs, *writer;
        int sharding;
    } rows[] = {
        {"{}", "", 0},
        {"null", "", 0},
        {"{\"fsdp.writer\":\"3/8\"}", "3/8", 0},
        {"{\"fsdp.writer\":\"12345678901/12345678901\"}", "12345678901/12345678901", 0},
        {"{\"fsdp.writer\":\"12345678901/123456789012\"}", "", 0},
        {"{\"fsdp\\u002ewriter\":\"\\u0033/8\",\"DCP_SHARDING_INF\\u004f\":\"{}\"}", "3/8", 1},
        {"{\"DCP_SHARDING_INFOS\":\"x\",\"dcp_sharding_info\":\"x\"}", "", 0},
    };
    for (int64_t i = 0; i < COUNT(rows); i++) {
        char h[200];
        snprintf(h, sizeof h, "{\"__met\\u0061data__\" : %s }", rows[i].pairs);
        st_list l = st_read(h, (int64_t)strlen(h), 0);
        CHECK_MSG(!l.status, "%s: %s", h, l.why);
        CHECK_EQ_STR(l.info.writer, rows[i].writer);
        CHECK_EQ_INT(l.info.has_sharding, rows[i].sharding);
        st_free(&l);
    }
}

/* Keys and dtypes with escapes, values that are skipped, more dims than the library has; an empty
   tensor between others. */
TEST(safetensors, unusual_headers, VALGRIND) {
    static const char h[] = "\t{\"b\":{\"sh\\u0061pe\":[2,2,1,1,1,1,1,1,1],\"x\":[[],{},{\"a\":[1,-"
                            "0.5e+3,true,false,null,"
                            "\"\\ud83d\\ude00\\b\\f\\n\\r\\t\\/"
                            "\"],\"a\":0}],\"dtype\":\"\\u00551\\u0036\",\"data_offsets\":[4,12]},"
                            "\"z\":{\"dtype\":\"F32\",\"shape\":[7,0],\"data_offsets\":[4,4]},"
                            "\"a\":{\"data_offsets\":[0,4],\"shape\":[],\"dtype\":\"I32\"},"
                            "\"y\":{\"dtype\":\"I8\",\"shape\":[0],\"data_offsets\":[4,4]}}\r\n";
    static const char *const names[] = {"a", "z", "y", "b"};
    st_list l = st_read(h, sizeof h - 1, 12);
    CHECK_MSG(!l.status, "%s", l.why);
    CHECK_EQ_INT(l.n, 4);
    for (int i = 0; i < 4; i++) CHECK_EQ_STR(l.e[i].name, names[i]);
    CHECK(l.e[0].ndim == 0 && l.e[0].dtype == FSDP_I32 && l.e[0].end == 4);
    CHECK(l.e[1].ndim == 2 && l.e[1].shape[0] == 7 && l.e[1].dtype == FSDP_F32);
    CHECK(l.e[3].ndim == 9 && l.e[3].shape[1] == 2 && l.e[3].shape[7] == 1);
    CHECK(l.e[3].dtype == FSDP_SAFETENSORS_OTHER && l.e[3].begin == 4 && l.e[3].end == 12);
    CHECK_EQ_STR(fsdp_safetensors_dtype_name(l.e[3].file_dtype), "U16");
    st_check(&l, 12);
    st_free(&l);
}

/* Names in the sharding info have their own escapes, and its other members are skipped. */
TEST(safetensors, sharding_info, VALGRIND) {
    static const char h[] =
        "{\"__metadata__\":{\"DCP_SHARDING_INFO\":\" { \\\"a\\\\\\\"\\u00e9\\\\u00e9\\\" : "
        "{\\\"x\\\":[{}], \\\"saved_offsets\\\" : [ 3 , 1 ],\\\"global_shape\\\":[7,4]},"
        "\\\"s\\\":{\\\"saved_offsets\\\":[]},\\\"n\\\":{\\\"saved_offsets\\\":[1,2,3,4,5,6,7,8,9]}"
        "} \"},"
        "\"n\":{\"dtype\":\"U8\",\"shape\":[1,1,1,1,1,1,1,1,1],\"data_offsets\":[6,7]},"
        "\"a\\\"\xc3\xa9\xc3\xa9\":{\"dtype\":\"U8\",\"shape\":[2,3],\"data_offsets\":[0,6]},"
        "\"s\":{\"dtype\":\"U8\",\"shape\":[],\"data_offsets\":[7,8]}}";
    st_list l = st_read(h, sizeof h - 1, 8);
    CHECK_MSG(!l.status, "%s", l.why);
    CHECK_EQ_INT(l.info.has_sharding, 1);
    CHECK_EQ_STR(l.e[0].name, "a\"\xc3\xa9\xc3\xa9");
    CHECK(l.e[0].start[0] == 3 && l.e[0].start[1] == 1 && l.e[0].whole[0] == 7);
    CHECK(l.e[0].whole[1] == 4 && !l.e[0].whole[2]);
    CHECK(l.e[1].start[0] == 1 && l.e[1].start[7] == 8 && !l.e[1].whole[0]);
    CHECK(!l.e[2].start[0] && !l.e[2].whole[0] && l.e[2].ndim == 0);
    st_check(&l, 8);
    st_free(&l);
}

TEST(safetensors, depth, VALGRIND) {
    for (int depth = 120; depth < 135; depth++)
        for (int kind = 0; kind < 2; kind++) {
            char h[2000] = "{\"t\":{\"x\":";
            for (int i = 0; i < depth - 2; i++) strcat(h, kind ? "{\"a\":" : "[");
            strcat(h, kind ? "0" : "");
            for (int i = 0; i < depth - 2; i++) strcat(h, kind ? "}" : "]");
            strcat(h, ",\"dtype\":\"U8\",\"shape\":[0],\"data_offsets\":[0,0]}}");
            st_list l = st_read(h, (int64_t)strlen(h), 0);
            CHECK_STATUS(l.status, depth <= 127 ? FSDP_OK : FSDP_ERR_CORRUPT);
            if (l.status) CHECK(strstr(l.why, "more than 127 levels") != NULL);
            st_free(&l);
        }
}

/* ---- contents that are printed --------------------------------------------------------------- */

static fsdp_safetensors_entry entry(const char *name, fsdp_dtype dtype, int ndim,
                                    const int64_t *n) {
    fsdp_safetensors_entry e;
    memset(&e, 0, sizeof e);
    e.name = name, e.dtype = dtype, e.ndim = ndim;
    for (int d = 0; d < ndim; d++)
        e.shape[d] = n[d], e.start[d] = n[ndim + d], e.whole[d] = n[2 * ndim + d];
    return e;
}

#define M "optim.state.h.0.w"
/* The entries of example.py, in arbitrary order. */
static void example_entries(int writer, fsdp_safetensors_entry *e, int *n) {
    static const int64_t w[2][6] = {{2, 2, 0, 0, 3, 2}, {1, 2, 2, 0, 3, 2}};
    static const int64_t b[2][3] = {{1, 0, 2}, {1, 1, 2}};
    static const int64_t blob_of[2][3] = {{3, 0, 3}, {2, 0, 2}};
    *n = 0;
    e[(*n)++] = entry(writer ? "fsdp.blob.rng.1" : "fsdp.blob.loader", FSDP_U8, 1, blob_of[writer]);
    e[(*n)++] = entry(M ".exp_avg_sq", FSDP_F32, 2, w[writer]);
    e[(*n)++] = entry("h.0.w", FSDP_F32, 2, w[writer]);
    e[(*n)++] = entry("h.0.b", FSDP_BF16, 1, b[writer]);
    if (!writer) e[(*n)++] = entry(M ".step", FSDP_F64, 0, NULL);
    e[(*n)++] = entry(M ".exp_avg", FSDP_F32, 2, w[writer]);
}

TEST(safetensors, example, VALGRIND) {
    static const char *const keys[] = {"DCP_VERSION", "format", "fsdp.writer"};
    static const uint32_t crcs[2][2] = {{0x2dffa9cd, 0xed7da8d4}, {0x37198ef1, 0xe30ff69c}};
    for (int writer = 0; writer < 2; writer++) {
        const char *values[] = {"1.0", "pt", writer ? "2/2" : "1/2"};
        char file[60];
        fsdp_safetensors_entry e[8];
        int n;
        int64_t size, header;
        snprintf(file, sizeof file, "shard-0000%d-model-00001-of-00001.safetensors", writer + 1);
        blob b = load_golden("example/step-00000017", file);
        header = header_of(&b);
        example_entries(writer, e, &n);
        char *made = st_print_and_read(e, n, 1, keys, values, 3, &size);
        CHECK(made && size == header);
        CHECK_EQ_MEM(made, b.at + 8, (size_t)size);
        st_list l = st_read_file(b.at, b.size);
        CHECK_OK(l.status);
        CHECK_EQ_STR(l.info.writer, values[2]);
        CHECK_EQ_INT(fsdp_crc32c(0, b.at, 8 + header), crcs[writer][0]);
        CHECK_EQ_INT(fsdp_crc32c(0, b.at + 8 + header, b.size - 8 - header), crcs[writer][1]);
        st_free(&l);
        free(made);
        free(b.at);
    }
}

/* Returns the text without the spaces at its end, which must be as few as possible. */
static const char *printed(fsdp_safetensors_entry *e, int n, int sharded, const char *const *keys,
                           const char *const *values, int pairs) {
    static char copy[4000];
    int64_t size;
    char *made = st_print_and_read(e, n, sharded, keys, values, pairs, &size);
    CHECK(made != NULL && size < (int64_t)sizeof copy);
    int64_t end = size;
    while (made[end - 1] == ' ') end--;
    CHECK_EQ_INT((end + 7) / 8 * 8, size);
    memcpy(copy, made, (size_t)end);
    copy[end] = 0;
    free(made);
    return copy;
}

TEST(safetensors, order, VALGRIND) {
    static const int64_t one[3] = {1, 0, 1};
    static const struct {
        const char *name;
        fsdp_dtype dtype;
    } want[] = {{"k", FSDP_I64},  {"j", FSDP_F64}, {"i", FSDP_F32},      {"h", FSDP_I32},
                {"g", FSDP_BF16}, {"f", FSDP_F16}, {"e", FSDP_I16},      {"d", FSDP_I8},
                {"A", FSDP_U8},   {"B", FSDP_U8},  {"a", FSDP_U8},       {"a.b", FSDP_U8},
                {"ab", FSDP_U8},  {"b", FSDP_U8},  {"\xc3\xa9", FSDP_U8}};
    enum { N = 15 };
    fsdp_safetensors_entry e[N];
    uint64_t seed = h_seed();
    for (int times = 0; times < 200; times++) {
        int64_t end = 0;
        for (int i = 0; i < N; i++) e[i] = entry(want[i].name, want[i].dtype, 1, one);
        for (int i = N - 1; i > 0; i--) {
            int k = (int)(h_rand64(&seed) % (uint64_t)(i + 1));
            fsdp_safetensors_entry x = e[i];
            e[i] = e[k], e[k] = x;
        }
        (void)printed(e, N, times & 1, NULL, NULL, 0);
        for (int i = 0; i < N; i++) {
            CHECK_EQ_STR(e[i].name, want[i].name);
            CHECK_EQ_INT(e[i].dtype, want[i].dtype);
            CHECK_EQ_INT(e[i].begin, end);
            end += (int64_t)fsdp_dtype_size(want[i].dtype);
            CHECK_EQ_INT(e[i].end, end);
        }
    }
}

TEST(safetensors, printed_texts, VALGRIND) {
    static const char *const keys[] = {"A", "DCP_SHARDING_INFN", "DCP_SHARDING_INFOS", "f\x01\"",
                                       "format"};
    static const char *const values[] = {"", "1", "2", "\x1f\x7f\xc3\xa9/", "pt"};
    static const int64_t two[] = {2, 1, 3, 0, 9, 3}, none[] = {0, 3, 7, 0, 0, 0},
                         zero[] = {0, 0, 0};
    fsdp_safetensors_entry e[3];
    CHECK_EQ_STR(printed(e, 0, 0, NULL, NULL, 0), "{}");
    CHECK_EQ_STR(printed(e, 0, 0, keys + 4, values + 4, 1),
                 "{\"__metadata__\":{\"format\":\"pt\"}}");
    CHECK_EQ_STR(printed(e, 0, 1, NULL, NULL, 0),
                 "{\"__metadata__\":{\"DCP_SHARDING_INFO\":\"{}\"}}");
    e[0] = entry("q\"\\/\b\f\n\r\t\x01\x1f\x7f\xc3\xa9", FSDP_BF16, 2, two);
    CHECK_EQ_STR(
        printed(e, 1, 0, NULL, NULL, 0),
        "{\"q\\\"\\\\/\\b\\f\\n\\r\\t\\u0001\\u001f\x7f\xc3\xa9\":{\"dtype\":\"BF16\",\"shape\":"
        "[2,1],\"data_offsets\":[0,4]}}");
    CHECK_EQ_STR(
        printed(e, 1, 1, keys, values, 5),
        "{\"__metadata__\":{\"A\":\"\",\"DCP_SHARDING_INFN\":\"1\",\"DCP_SHARDING_INFO\":"
        "\"{\\\"q\\\\\\\"\\\\\\\\/\\\\b\\\\f\\\\n\\\\r\\\\t\\\\u0001\\\\u001f\x7f\xc3\xa9\\\":"
        "{\\\"saved_offsets\\\":[3,0],\\\"global_shape\\\":[9,3]}}\",\"DCP_SHARDING_INFOS\":"
        "\"2\",\"f\\u0001\\\"\":\"\\u001f\x7f\xc3\xa9/\",\"format\":\"pt\"},"
        "\"q\\\"\\\\/\\b\\f\\n\\r\\t\\u0001\\u001f\x7f\xc3\xa9\":{\"dtype\":\"BF16\",\"shape\":"
        "[2,1],\"data_offsets\":[0,4]}}");
    /* a global shape that is not given is not written; one without elements is */
    e[0] = entry("a", FSDP_U8, 2, none), e[1] = entry("b", FSDP_U8, 1, zero);
    e[2] = entry("s", FSDP_U8, 0, NULL);
    CHECK_EQ_STR(
        printed(e, 3, 1, NULL, NULL, 0),
        "{\"__metadata__\":{\"DCP_SHARDING_INFO\":\"{\\\"a\\\":{\\\"saved_offsets\\\":[7,0]},"
        "\\\"b\\\":{\\\"saved_offsets\\\":[0],\\\"global_shape\\\":[0]},\\\"s\\\":"
        "{\\\"saved_offsets\\\":[],\\\"global_shape\\\":[]}}\"},\"a\":{\"dtype\":\"U8\","
        "\"shape\":[0,3],\"data_offsets\":[0,0]},\"b\":{\"dtype\":\"U8\",\"shape\":[0],"
        "\"data_offsets\":[0,0]},\"s\":{\"dtype\":\"U8\",\"shape\":[],\"data_offsets\":[0,1]}}");
}

static int64_t refused(fsdp_safetensors_entry *e, int64_t n, int sharded) {
    return fsdp_safetensors_print(e, n, sharded, NULL, NULL, 0, NULL, 0);
}

TEST(safetensors, refused_lists, VALGRIND) {
    static const int64_t n[] = {2, 3, 5};
    const int64_t most = (int64_t)1 << 62;
    const fsdp_safetensors_entry good = entry("a", FSDP_F32, 1, n);
    fsdp_safetensors_entry e[3] = {good, good, good};
    char *longest = (char *)calloc(4098, 1);
    CHECK(longest != NULL);
    memset(longest, 'n', 4096);
    e[1].name = "b", e[1].dtype = FSDP_I64, e[2].name = "a", e[2].dtype = FSDP_U8;
    CHECK(refused(e, 2, 1) > 0);
    CHECK_EQ_INT(refused(e, 3, 0), -1); /* twice, with another dtype */
    CHECK_EQ_INT(refused(e, -1, 0), -1);
    CHECK_EQ_INT(refused(NULL, 1, 0), -1);
    CHECK_EQ_INT(refused(NULL, 0, 0), 8);
    static const char *const names[] = {NULL, "", "__metadata__", "\xff", "a\xc3", "\xed\xa0\x80"};
    for (int64_t i = 0; i < COUNT(names); i++) {
        e[0] = good, e[0].name = names[i];
        CHECK_EQ_INT(refused(e, 1, 0), -1);
    }
    e[0] = good, e[0].name = longest;
    CHECK(refused(e, 1, 0) > 4096);
    longest[4096] = 'n';
    CHECK_EQ_INT(refused(e, 1, 0), -1);
    free(longest);
    for (int dtype = -1; dtype < 70; dtype++) {
        e[0] = good, e[0].dtype = dtype, e[0].file_dtype = -1; /* counts for OTHER only */
        CHECK_EQ_INT(refused(e, 1, 0) > 0, dtype > 0 && dtype < FSDP_DTYPE_COUNT);
    }
    for (int file_dtype = -1; file_dtype < 40; file_dtype++) { /* dtypes that the library lacks */
        static const char *const others[] = {
            "BOOL",        "F4",          "F6_E2M3", "F6_E3M2", "F8_E5M2", "F8_E4M3", "F8_E8M0",
            "F8_E4M3FNUZ", "F8_E5M2FNUZ", "U16",     "U32",     "C64",     "U64"};
        int is_other = 0;
        for (int i = 0; i < COUNT(others); i++)
            is_other |= !strcmp(fsdp_safetensors_dtype_name(file_dtype), others[i]);
        e[0] = good, e[0].dtype = FSDP_SAFETENSORS_OTHER, e[0].file_dtype = file_dtype;
        e[0].shape[0] = 8;
        CHECK_EQ_INT(refused(e, 1, 0) > 0, is_other);
        e[0].shape[0] = 1; /* half a byte at the end */
        const int whole_bytes = strncmp(fsdp_safetensors_dtype_name(file_dtype), "F4", 2) &&
                                strncmp(fsdp_safetensors_dtype_name(file_dtype), "F6", 2);
        CHECK_EQ_INT(refused(e, 1, 0) > 0, is_other && whole_bytes);
    }
    for (int ndim = -1; ndim < 11; ndim++) {
        e[0] = good, e[0].ndim = ndim;
        CHECK_EQ_INT(refused(e, 1, 0) > 0, ndim >= 0 && ndim <= FSDP_MAX_DIMS);
    }
    const struct {
        int64_t shape, start, whole;
        int plain, sharded;
    } rows[] = {{-1, 0, 5, 0, 0},       {2, -1, 5, 1, 0},           {2, 4, 5, 1, 0},
                {6, 0, 5, 1, 0},        {2, 0, -5, 1, 0},           {2, 0, 0, 1, 1},
                {0, most, 0, 1, 1},     {0, most + 1, 0, 1, 0},     {1, most, 0, 1, 0},
                {2, 0, most, 1, 1},     {2, 0, most + 1, 1, 0},     {most, 0, 0, 0, 0},
                {most / 8, 0, 0, 1, 1}, {most / 8 + 1, 0, 0, 1, 1}, {most / 4, 0, 0, 1, 1},
                {most / 2, 0, 0, 0, 0}};
    for (int64_t i = 0; i < COUNT(rows); i++) {
        e[0] = good, e[0].dtype = FSDP_U8;
        e[0].shape[0] = rows[i].shape, e[0].start[0] = rows[i].start, e[0].whole[0] = rows[i].whole;
        CHECK_MSG((refused(e, 1, 0) > 0) == rows[i].plain, "row %d", (int)i);
        CHECK_MSG((refused(e, 1, 1) > 0) == rows[i].sharded, "row %d, sharded", (int)i);
    }
    /* 2^62 bytes together, and one more */
    for (int i = 0; i < 3; i++) {
        e[i] = good, e[i].name = i == 0 ? "a" : i == 1 ? "b" : "c", e[i].dtype = FSDP_U8;
        e[i].shape[0] = i < 2 ? most / 4 : most / 2;
    }
    CHECK_EQ_INT(refused(e, 3, 0), -1); /* the last one by itself has 2^64 bits */
    e[2].shape[0] = most / 4;
    CHECK(refused(e, 3, 0) > 0);
}

/* A header has at most 100,000,000 bytes. */
TEST(safetensors, largest) {
    enum { CONTROLS = 16666662 }; /* 6 bytes each; 25 other bytes */
    static const char *const key[] = {"a"};
    char *text = (char *)lab_zeros(CONTROLS + 6, 1), why[100];
    const char *value[1];
    fsdp_safetensors_info info;
    value[0] = text;
    memset(text, 1, CONTROLS);
    memset(text + CONTROLS, 'x', 3);
    if (!W_SLOW)
        CHECK_EQ_INT(fsdp_safetensors_print(NULL, 0, 0, key, value, 1, NULL, 0), 100000000);
    text[CONTROLS + 3] = 'x';
    if (!W_SLOW) CHECK_EQ_INT(fsdp_safetensors_print(NULL, 0, 0, key, value, 1, NULL, 0), -1);
    free(text);
    /* not read */
    CHECK_STATUS(fsdp_safetensors_parse("", 100000001, 0, NULL, NULL, &info, why, sizeof why),
                 FSDP_ERR_CORRUPT);
    CHECK_EQ_STR(why, "header of 100000001 bytes, at most 100000000");
}

TEST(safetensors, refused_pairs, VALGRIND) {
    static const struct {
        const char *keys[2], *values[2];
        int num, ok;
    } rows[] = {{{"a", "b"}, {"", ""}, 2, 1},     {{"b", "a"}, {"", ""}, 2, 0},
                {{"a", "a"}, {"", ""}, 2, 0},     {{"a", NULL}, {"", ""}, 2, 0},
                {{"a", "b"}, {NULL, ""}, 2, 0},   {{"\xff", "b"}, {"", ""}, 1, 0},
                {{"a", "b"}, {"\xff", ""}, 1, 0}, {{"", "b"}, {"\xff", ""}, 0, 1},
                {{"a", "b"}, {"", ""}, -1, 0},    {{"DCP_SHARDING_INFO", "b"}, {"{}", ""}, 1, 0}};
    for (int64_t i = 0; i < COUNT(rows); i++)
        for (int sharded = 0; sharded < 2; sharded++) {
            int64_t n = fsdp_safetensors_print(NULL, 0, sharded, rows[i].keys, rows[i].values,
                                               rows[i].num, NULL, 0);
            CHECK_MSG((n > 0) == rows[i].ok, "row %d", (int)i);
        }
    CHECK_EQ_INT(fsdp_safetensors_print(NULL, 0, 0, NULL, rows[0].values, 1, NULL, 0), -1);
    CHECK_EQ_INT(fsdp_safetensors_print(NULL, 0, 0, rows[0].keys, NULL, 1, NULL, 0), -1);
}

/* Random lists are read as they were printed (st_print_and_read compares them). */
TEST(safetensors, print_and_read, VALGRIND) {
    static const char *const pieces[] = {"a",
                                         "b",
                                         "layers.",
                                         "\"",
                                         "\\",
                                         "\n",
                                         "\x01",
                                         "\xc3\xa9",
                                         "\xf0\x9f\x98\x80",
                                         "\x7f",
                                         "/",
                                         "{",
                                         "DCP_SHARDING_INFO"};
    enum { N = 40, NAME = 120 };
    uint64_t seed = h_seed();
    int lists = W_SLOW ? 300 : 3000, made = 0;
    for (int i = 0; i < lists; i++) {
        fsdp_safetensors_entry e[N];
        static char names[N][NAME];
        int n = (int)(h_rand64(&seed) % (N + 1)), sharded = i & 1;
        int64_t size;
        memset(e, 0, sizeof e);
        for (int k = 0; k < n; k++) {
            uint64_t r = h_rand64(&seed);
            int told = (int)(r >> 32) & 1;
            e[k].name = names[k];
            snprintf(names[k], NAME, "%d", k); /* so that all differ */
            for (int times = (int)(r % 4); times > 0; times--)
                strcat(names[k], pieces[h_rand64(&seed) % 13]);
            e[k].dtype = 1 + (fsdp_dtype)((r >> 8) % 9);
            e[k].ndim = (int32_t)((r >> 16) % 9);
            for (int d = 0; d < e[k].ndim; d++) {
                e[k].shape[d] = (int64_t)(h_rand64(&seed) % 4);
                if (!sharded) continue;
                e[k].start[d] = (int64_t)(h_rand64(&seed) % 3) << (r >> 40) % 60;
                e[k].whole[d] = told ? e[k].start[d] + e[k].shape[d] + (int64_t)(r >> 60) : 0;
            }
        }
        char *header = st_print_and_read(e, n, sharded, NULL, NULL, 0, &size);
        CHECK(header != NULL);
        free(header);
        made += n;
    }
    h_message("%d lists, %d tensors", lists, made);
}

/* Files of the reference are read and printed again: the bytes are equal. PyTorch's metadata has no
   order, so that only the tensors of its files are compared. */
TEST(safetensors, bytes_of_the_reference, VALGRIND) {
    static const char *const files[] = {
        "transformers_gpt2/model-00001-of-00003.safetensors",
        "transformers_gpt2/model-00002-of-00003.safetensors",
        "transformers_gpt2/model-00003-of-00003.safetensors",
        "torch_fsdp_w3/shard-00002-model-00001-of-00001.safetensors",
        "torch_fsdp_w4/shard-00004-model-00001-of-00001.safetensors",
        "torch_2d_2x2/shard-00003-model-00001-of-00001.safetensors"};
    static const char *const key[] = {"format"}, *const value[] = {"pt"};
    for (int64_t i = 0; i < COUNT(files); i++) {
        blob b = load_golden("checkpoints", files[i]);
        int whole = strstr(files[i], "transformers") != NULL;
        int64_t size, header = header_of(&b);
        st_list l = st_read_file(b.at, b.size);
        CHECK_MSG(!l.status, "%s: %s", files[i], l.why);
        CHECK_EQ_INT(l.info.has_sharding, !whole);
        char *again = st_print_and_read(l.e, l.n, 0, key, value, whole, &size);
        CHECK(again != NULL);
        if (whole) {
            CHECK_EQ_INT(size, header);
            CHECK_EQ_MEM(again, b.at + 8, (size_t)size);
        } else {
            const char *end = b.at + 8 + header;
            while (end[-1] == ' ') end--;
            while (again[size - 1] == ' ') size--;
            CHECK_EQ_MEM(again + 1, end - (size - 1), (size_t)size - 1);
        }
        free(again);
        st_free(&l);
        free(b.at);
    }
}

/* ---- golden checkpoints ---------------------------------------------------------------------- */

static uint64_t seed_of(const char *name) {
    uint32_t h = 0x811C9DC5u;
    for (; *name; name++) h = (h ^ (unsigned char)*name) * 0x01000193u;
    return h;
}

enum { FILES = 4 };
typedef struct dir {
    blob file[FILES];
    st_list list[FILES];
    int64_t data[FILES]; /* offset of the data */
    int num;
    int64_t boxes, met;
} dir;

static void dir_add(dir *c, const char *folder, const char *file) {
    char path[300];
    snprintf(path, sizeof path, "checkpoints/%s", folder);
    CHECK(c->num < FILES);
    blob b = load_golden(path, file);
    st_list l = st_read_file(b.at, b.size);
    CHECK_MSG(!l.status, "%s/%s: %s", folder, file, l.why);
    st_check(&l, b.size - 8 - header_of(&b));
    c->data[c->num] = 8 + header_of(&b), c->boxes += l.n;
    c->file[c->num] = b, c->list[c->num++] = l;
}

static void dir_close(dir *c) {
    CHECK_EQ_INT(c->met, c->boxes);
    for (int i = 0; i < c->num; i++) {
        st_free(&c->list[i]);
        free(c->file[i].at);
    }
}

/* Checks every element of a tensor in all its boxes: it is `value`, or follows from the formula. */
static void dir_tensor(dir *c, const char *name, fsdp_dtype dtype, int ndim, const int64_t *shape,
                       const double *value) {
    static char seen[1 << 16];
    int64_t numel = st_numel(ndim, shape), origin[FSDP_MAX_DIMS] = {0}, have = 0, boxes = 0;
    CHECK(numel <= (int64_t)sizeof seen);
    memset(seen, 0, sizeof seen);
    for (int i = 0; i < c->num; i++)
        for (int64_t k = 0; k < c->list[i].n; k++) {
            const fsdp_safetensors_entry *e = &c->list[i].e[k];
            fsdp_box_overlap o;
            if (strcmp(e->name, name) != 0) continue;
            c->met++, boxes++;
            CHECK(e->dtype == dtype && e->ndim == ndim);
            const char *data = c->file[i].at + c->data[i] + e->begin;
            int64_t size = (int64_t)fsdp_dtype_size(dtype);
            fsdp_box_begin(ndim, e->start, e->shape, origin, shape, &o);
            CHECK_EQ_INT(o.rows * o.elements, st_numel(ndim, e->shape)); /* all of it is inside */
            if (o.rows) do
                    for (int64_t j = 0; j < o.elements; j++) {
                        double got[1], want[1] = {value ? *value
                                                        : golden_value(seed_of(name),
                                                                       (uint64_t)(o.dst + j), 1)};
                        char element[8], rounded[8];
                        memcpy(element, data + (o.src + j) * size,
                               (size_t)size); /* at any alignment */
                        CHECK_OK(fsdp_convert(rounded, dtype, want, FSDP_F64, 1));
                        CHECK_OK(fsdp_convert(got, FSDP_F64, element, dtype, 1));
                        CHECK_MSG(!memcmp(element, rounded, (size_t)size), "%s[%lld]: %g, not %g",
                                  name, (long long)(o.dst + j), got[0], want[0]);
                        CHECK(!seen[o.dst + j]++);
                        have++;
                    }
                while (fsdp_box_next(&o));
        }
    CHECK_MSG(boxes > 0, "no '%s'", name);
    CHECK_EQ_INT(have, numel);
}

static fsdp_dtype torch_dtype(const char *word) {
    if (!strcmp(word, "float32")) return FSDP_F32;
    if (!strcmp(word, "float16")) return FSDP_F16;
    CHECK_EQ_STR(word, "bfloat16");
    return FSDP_BF16;
}

TEST(safetensors, golden_checkpoints, VALGRIND) {
    golden g;
    int cases = 0, files = 0, tensors = 0;
    GOLDEN_OPEN(&g, "checkpoints/cases.txt", "checkpoints");
    while (golden_case(&g)) {
        dir c;
        memset(&c, 0, sizeof c);
        cases++;
        while (golden_line(&g)) {
            int64_t shape[FSDP_MAX_DIMS];
            char name[200];
            if (golden_is(&g, "files")) {
                for (int64_t n = golden_int(&g); n > 0; n--) {
                    const char *file = golden_word(&g);
                    if (strstr(file, ".safetensors") && !strstr(file, ".json"))
                        dir_add(&c, g.name, file), files++;
                }
            } else if (golden_is(&g, "tensor")) {
                snprintf(name, sizeof name, "%s", golden_word(&g));
                fsdp_dtype dtype = torch_dtype(golden_word(&g));
                int ndim = (int)golden_int(&g);
                golden_ints(&g, ndim, shape);
                dir_tensor(&c, name, dtype, ndim, shape, NULL);
                tensors++;
            } else if (golden_is(&g, "step")) {
                snprintf(name, sizeof name, "optim.state.%s.step", golden_word(&g));
                double step = (double)golden_int(&g);
                dir_tensor(&c, name, FSDP_F32, 0, NULL, &step);
            }
        }
        dir_close(&c); /* no other tensors */
    }
    GOLDEN_CLOSE(&g);
    CHECK(cases > 0);
    if (!strcmp(golden_dir(), GOLDEN_DIR)) CHECK(cases == 7 && files == 20);
    h_message("%d directories, %d files, %d tensors", cases, files, tensors);
}

/* The index names each tensor and its file. */
TEST(safetensors, golden_transformers, VALGRIND) {
    static const char *const names[] = {"model-00001-of-00003.safetensors",
                                        "model-00002-of-00003.safetensors",
                                        "model-00003-of-00003.safetensors"};
    blob index = load_golden("checkpoints/transformers_gpt2", "model.safetensors.index.json");
    dir c;
    int64_t lines = 0;
    memset(&c, 0, sizeof c);
    for (int i = 0; i < 3; i++) dir_add(&c, "transformers_gpt2", names[i]);
    for (int i = 0; i < 3; i++)
        for (int64_t k = 0; k < c.list[i].n; k++) {
            const fsdp_safetensors_entry *e = &c.list[i].e[k];
            char line[300];
            snprintf(line, sizeof line, "\"%s\": \"%s\"", e->name, names[i]);
            CHECK_MSG(strstr(index.at, line) != NULL, "%s", line);
            dir_tensor(&c, e->name, FSDP_F32, e->ndim, e->shape, NULL);
        }
    for (const char *at = index.at; (at = strstr(at, ": \"model-")) != NULL; at++) lines++;
    CHECK_EQ_INT(lines, c.boxes);
    CHECK_EQ_INT(lines, 28);
    dir_close(&c);
    free(index.at);
}

/* ---- hostile bytes --------------------------------------------------------------------------- */

static const char odd_header[] =
    "{\"__metadata__\":{\"a\":\"\\ud83d\\ude00\",\"DCP_SHARDING_INFO\":\"{\\\"n\\\\u00e9\\\":"
    "{\\\"saved_offsets\\\":[1,2],\\\"global_shape\\\":[3,4]},\\\"z\\\":{\\\"saved_offsets\\\":[]}}"
    "\"},"
    "\"n\\u00e9\":{\"dtype\":\"F16\",\"shape\":[2,2],\"data_offsets\":[0,8],\"x\":[1.5e3,{\"y\":"
    "null}]},"
    "\"z\":{\"dtype\":\"U8\",\"shape\":[],\"data_offsets\":[8,9]}}";

typedef struct hostile {
    blob header;
    int64_t data;
} hostile;

/* Returns one of three headers: a plain one, one of this library, an unusual one. */
static hostile hostile_of(int which) {
    static const char plain[] =
        "{\"__metadata__\":{\"format\":\"pt\"},\"w\":{\"dtype\":\"F32\",\"shape\":"
        "[2,1],\"data_offsets\":[0,8]},\"b\":{\"dtype\":\"BF16\",\"shape\":[1],"
        "\"data_offsets\":[8,10]}}  ";
    hostile h;
    memset(&h, 0, sizeof h);
    if (which == 1) {
        blob b = load_golden("example/step-00000017",
                             "shard-00001-model-00001-of-00001.safetensors");
        h.header.size = header_of(&b), h.data = b.size - 8 - h.header.size;
        memmove(b.at, b.at + 8, (size_t)h.header.size);
        h.header.at = b.at;
        return h;
    }
    h.header.size = which ? (int64_t)sizeof odd_header - 1 : (int64_t)sizeof plain - 1;
    h.data = which ? 9 : 10;
    h.header.at = (char *)malloc((size_t)h.header.size);
    CHECK(h.header.at != NULL);
    memcpy(h.header.at, which ? odd_header : plain, (size_t)h.header.size);
    return h;
}

TEST(safetensors, truncated, VALGRIND) {
    for (int which = 0; which < 3; which++) {
        hostile h = hostile_of(which);
        int64_t whole = h.header.size;
        while (h.header.at[whole - 1] == ' ') whole--;
        for (int64_t n = 0; n <= h.header.size; n++) {
            st_list l = st_read(h.header.at, n, h.data);
            CHECK_STATUS(l.status, n < whole ? FSDP_ERR_CORRUPT : FSDP_OK);
            st_free(&l);
        }
        free(h.header.at);
    }
}

/* No flip may crash; a second call gives the same result; an accepted list fits the data. The
   number of accepted flips is known: in names, in texts of the metadata, in letters of skipped
   keys. */
TEST(safetensors, flipped_bits, VALGRIND) {
    static const int want[3] = {69, 846, 243};
    for (int which = 0; which < 3; which++) {
        hostile h = hostile_of(which);
        int accepted = 0;
        for (int64_t bit = 0; bit < 8 * h.header.size; bit++) {
            h.header.at[bit / 8] = (char)(h.header.at[bit / 8] ^ 1 << bit % 8);
            st_list l = st_read(h.header.at, h.header.size, h.data);
            st_list again = st_read(h.header.at, h.header.size, h.data);
            CHECK(l.status == again.status && !strcmp(l.why, again.why));
            if (!l.status) st_check(&l, h.data);
            accepted += !l.status;
            st_free(&l);
            st_free(&again);
            h.header.at[bit / 8] = (char)(h.header.at[bit / 8] ^ 1 << bit % 8);
        }
        h_message("header %d: %d of %lld flips accepted", which, accepted,
                  (long long)(8 * h.header.size));
        CHECK_EQ_INT(accepted, want[which]);
        free(h.header.at);
    }
}

typedef struct seeds {
    uint8_t *at[200];
    size_t size[200];
    int num;
} seeds;

static void keep_seed(const char *name, const uint8_t *input, size_t size, void *arg) {
    seeds *s = (seeds *)arg;
    (void)name;
    if (s->num == 200) return; /* enough */
    s->at[s->num] = (uint8_t *)malloc(size);
    CHECK(s->at[s->num] != NULL);
    memcpy(s->at[s->num], input, size);
    s->size[s->num++] = size;
}

/* Runs tests/safetensors/fuzz_safetensors.c without libFuzzer: the golden headers, then headers in
   which bytes were changed, removed, or copied from others. */
TEST(safetensors, mutations) {
    static const char *const words[] = {
        "{", "}",  "[",  "]",    ",",         ":",         "\"",           "\\", "\\u0000",
        "0", "-1", "16", "null", "\"shape\"", "\"dtype\"", "__metadata__", " ",  "\xc3"};
    seeds s;
    uint64_t seed = h_seed();
    int runs = W_SLOW ? 10000 : 100000;
    uint8_t buf[4096];
    memset(&s, 0, sizeof s);
    golden_needs("safetensors.txt");
    fuzz_golden(keep_seed, &s);
    CHECK(s.num > 0);
    for (int which = 0; which < 3; which++) {
        hostile h = hostile_of(which);
        buf[0] = 0;
        memcpy(buf + 1, h.header.at, (size_t)h.header.size);
        keep_seed("", buf, (size_t)h.header.size + 1, &s);
        free(h.header.at);
    }
    for (int i = 0; i < s.num; i++) (void)LLVMFuzzerTestOneInput(s.at[i], s.size[i]);
    for (int run = 0; run < runs; run++) {
        const uint64_t r = h_rand64(&seed);
        int from = (int)(r % (uint64_t)s.num), kind = (int)(r >> 32 & 7);
        size_t n = s.size[from];
        memcpy(buf, s.at[from], n);
        if (kind >= 4) /* boxes and lists may have any bytes */
            for (size_t i = n = 1 + (r >> 40) % 200; i > 0; i--) buf[i] = (uint8_t)h_rand64(&seed);
        buf[0] = (uint8_t)(kind < 4 ? 0 : kind < 6 ? 4 : 5);
        for (int times = kind < 4 ? 1 + (int)(r >> 35 & 3) : 0; times > 0; times--) {
            const uint64_t q = h_rand64(&seed);
            size_t at = 1 + (size_t)(q >> 16) % n, length = 1 + (size_t)(q >> 40) % 20;
            const char *word = words[(q >> 8) % 18];
            if (at >= n) continue;
            if (length > n - at) length = n - at;
            switch (q % 4) {
            case 0: buf[at] = (uint8_t)(q >> 48); break;
            case 1:
                memmove(buf + at, buf + at + length, n - at - length);
                n -= length;
                break;
            case 2:
                if (n + length > 3000) break;
                memmove(buf + at + length, buf + at, n - at);
                n += length;
                break;
            default: /* replaces bytes by a word */
                length = strlen(word);
                if (at + length <= n) memcpy(buf + at, word, length);
            }
        }
        (void)LLVMFuzzerTestOneInput(buf, n);
    }
    for (int i = 0; i < s.num; i++) free(s.at[i]);
}

/* ---- many tensors ---------------------------------------------------------------------------- */

TEST(safetensors, many) {
    static const int64_t n[] = {3, 5, 2, 0, 9, 5};
    static const fsdp_dtype dtypes[] = {FSDP_U8, FSDP_F32, FSDP_BF16, FSDP_F32};
    int64_t num = W_SLOW ? 10000 : 100000, size, begin = 0, took[3];
    fsdp_safetensors_entry *e = (fsdp_safetensors_entry *)lab_zeros((size_t)num, sizeof *e);
    char *names = (char *)lab_zeros((size_t)num, 32), why[200];
    fsdp_safetensors_info info;
    for (int64_t i = 0; i < num; i++) { /* names in arbitrary order */
        snprintf(names + 32 * i, 32, "layers.%lld.w", (long long)(i * 7919 % num));
        e[i] = entry(names + 32 * i, dtypes[i % 4], 2, n);
    }
    size = fsdp_safetensors_print(e, num, 1, NULL, NULL, 0, NULL, 0);
    char *buf = (char *)lab_zeros((size_t)size, 1), *text;
    for (int64_t i = num - 1; i > 0; i--) {
        fsdp_safetensors_entry x = e[i];
        int64_t k = i * 104729 % num;
        e[i] = e[k], e[k] = x;
    }
    begin = h_calm_ms();
    CHECK_EQ_INT(fsdp_safetensors_print(e, num, 1, NULL, NULL, 0, buf, size), size);
    took[0] = h_calm_ms() - begin;
    int64_t data = e[num - 1].end;
    begin = h_calm_ms();
    CHECK_OK(fsdp_safetensors_parse(buf, size, data, NULL, NULL, &info, why, sizeof why));
    took[1] = h_calm_ms() - begin;
    CHECK_EQ_INT(info.num_entries, num);
    text = (char *)lab_zeros((size_t)info.text_bytes, 1);
    fsdp_safetensors_entry *got = (fsdp_safetensors_entry *)lab_zeros((size_t)num, sizeof *got);
    begin = h_calm_ms();
    CHECK_OK(fsdp_safetensors_parse(buf, size, data, got, text, &info, why, sizeof why));
    took[2] = h_calm_ms() - begin;
    for (int64_t i = 0; i < num; i++) CHECK(st_same_entry(&e[i], &got[i]));
    h_message("%lld tensors, %lld bytes: printed in %lld ms, measured in %lld, read in %lld",
              (long long)num, (long long)size, (long long)took[0], (long long)took[1],
              (long long)took[2]);
    if (!W_SLOW) CHECK(took[0] < 1000 && took[1] + took[2] < 1000);
    free(e), free(got), free(names), free(text), free(buf);
}

/* A name that occurs again far away; ranges that overlap far away. */
TEST(safetensors, many_with_a_fault) {
    enum { N = 3000 };
    char *h = (char *)lab_zeros(N * 80, 1), want[100];
    for (int fault = 0; fault < 3; fault++) {
        int64_t size = 1;
        h[0] = '{';
        for (int i = 0; i < N; i++) {
            int name = fault == 0 && i == N - 5 ? 17 : i, at = i * 1999 % N;
            if (fault == 1 && i == N - 5) at = 17;
            if (fault == 2 && i == N - 5) at = N;
            size += sprintf(h + size,
                            "%s\"t%d\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[%d,%d]}",
                            i ? "," : "", name, at, at + 1);
        }
        h[size++] = '}';
        st_list l = st_read(h, size, N);
        int missing = (N - 5) * 1999 % N, there = 0;
        while (there * 1999 % N != 17) there++;
        if (fault == 0) snprintf(want, sizeof want, "tensor 't17' is there twice");
        if (fault == 1 && missing < 17)
            snprintf(want, sizeof want, "bytes %d..%d of the data are in no tensor", missing,
                     missing + 1);
        else if (fault == 1)
            snprintf(want, sizeof want, "'t%d' and 't%d' both take bytes 17..18", there, N - 5);
        if (fault == 2)
            snprintf(want, sizeof want, "bytes %d..%d of the data are in no tensor", missing,
                     missing + 1);
        CHECK_EQ_STR(l.why, want);
        st_free(&l);
    }
    free(h);
}

/* ---- checksums ------------------------------------------------------------------------------- */

static uint32_t crc_by_bits(uint32_t crc, const void *data, int64_t n) {
    const uint8_t *p = (const uint8_t *)data;
    crc = ~crc;
    for (; n > 0; n--) {
        crc ^= *p++;
        for (int k = 0; k < 8; k++) crc = crc & 1 ? crc >> 1 ^ 0x82F63B78u : crc >> 1;
    }
    return ~crc;
}

TEST(crc32c, known) {
    uint8_t b[32];
    CHECK_EQ_INT(fsdp_crc32c(0, "123456789", 9), 0xe3069283);
    CHECK_EQ_INT(fsdp_crc32c(0, "a", 1), 0xc1d04330);
    CHECK_EQ_INT(fsdp_crc32c(0, NULL, 0), 0);
    CHECK_EQ_INT(fsdp_crc32c(0x1234567, b, -1), 0x1234567);
    memset(b, 0, 32); /* the four examples of RFC 3720 */
    CHECK_EQ_INT(fsdp_crc32c(0, b, 32), 0x8a9136aa);
    memset(b, 0xff, 32);
    CHECK_EQ_INT(fsdp_crc32c(0, b, 32), 0x62a8ab43);
    for (int i = 0; i < 32; i++) b[i] = (uint8_t)i;
    CHECK_EQ_INT(fsdp_crc32c(0, b, 32), 0x46dd794e);
    for (int i = 0; i < 32; i++) b[i] = (uint8_t)(31 - i);
    CHECK_EQ_INT(fsdp_crc32c(0, b, 32), 0x113fdb5c);
    /* the small file in the specification of checkpoints */
    hostile h = hostile_of(0);
    uint32_t crc = fsdp_crc32c(0, "\x90\0\0\0\0\0\0\0", 8);
    crc = fsdp_crc32c(crc, h.header.at, h.header.size);
    crc = fsdp_crc32c(crc, "\0\0\x80\x3f\0\0\0\xc0\x80\x3f", 10);
    CHECK_EQ_INT(crc, 0x5e57dda6);
    free(h.header.at);
}

/* Every alignment and length, with the table and the instruction, compared with a bitwise loop. */
TEST(crc32c, alignments) {
    enum { N = 16 + 300 };
    uint8_t raw[N];
    uint64_t seed = h_seed();
    for (int i = 0; i < N; i++) raw[i] = (uint8_t)h_rand64(&seed);
    for (int at = 0; at < 16; at++)
        for (int n = 0; n <= 300; n++) {
            uint32_t begin = (uint32_t)h_rand64(&seed), want = crc_by_bits(begin, raw + at, n);
            CHECK_EQ_INT(fsdp_crc32c(begin, raw + at, n), want);
            CHECK_EQ_INT(lib_crc32c_by_table(begin, raw + at, n), want);
        }
    h_message(lib_has_crc32c() ? "by an instruction, and by the table" : "by the table alone");
}

/* Long inputs are processed in three lanes of 4096 bytes: about one, two and three rounds of them.
   */
TEST(crc32c, lanes) {
    enum { ROUND = 3 * 4096, N = 3 * ROUND + 64 };
    uint8_t *raw = (uint8_t *)lab_zeros(N, 1);
    uint64_t seed = h_seed();
    for (int i = 0; i < N; i++) raw[i] = (uint8_t)h_rand64(&seed);
    for (int rounds = 1; rounds <= 3; rounds++)
        for (int more = -17; more <= 17; more++) {
            uint32_t begin = (uint32_t)h_rand64(&seed);
            int at = more & 7, n = rounds * ROUND + more;
            CHECK_EQ_INT(fsdp_crc32c(begin, raw + at, n), crc_by_bits(begin, raw + at, n));
        }
    free(raw);
}

TEST(crc32c, pieces) {
    enum { N = 1 << 20 };
    uint8_t *raw = (uint8_t *)lab_zeros(N, 1);
    uint64_t seed = h_seed();
    for (int i = 0; i < N; i++) raw[i] = (uint8_t)h_rand64(&seed);
    uint32_t whole = crc_by_bits(0, raw, N);
    CHECK_EQ_INT(fsdp_crc32c(0, raw, N), whole);
    CHECK_EQ_INT(lib_crc32c_by_table(0, raw, N), whole);
    for (int times = 0; times < 50; times++) {
        uint32_t crc = 0;
        for (int64_t at = 0, n; at < N; at += n) {
            n = (int64_t)(h_rand64(&seed) % (times % 2 ? 100 : 100000));
            if (n > N - at) n = N - at;
            crc = fsdp_crc32c(crc, raw + at, n);
        }
        CHECK_EQ_INT(crc, whole);
    }
    free(raw);
}

/* ---- boxes ----------------------------------------------------------------------------------- */

/* Section "Resharding": the runs of each saved box that each rank reads. */
static const struct {
    int ndim;
    int64_t saved[4], wanted[4]; /* start, shape */
    int64_t rows, elements, src, dst, last_src, last_dst;
} reshards[] = {
    /* 7 x 3 on 4 ranks, to 3 */
    {2, {0, 0, 2, 3}, {0, 0, 3, 3}, 1, 6, 0, 0, 0, 0},
    {2, {2, 0, 2, 3}, {0, 0, 3, 3}, 1, 3, 0, 6, 0, 6},
    {2, {2, 0, 2, 3}, {3, 0, 3, 3}, 1, 3, 3, 0, 3, 0},
    {2, {4, 0, 2, 3}, {3, 0, 3, 3}, 1, 6, 0, 3, 0, 3},
    {2, {6, 0, 1, 3}, {6, 0, 1, 3}, 1, 3, 0, 0, 0, 0},
    {2, {0, 0, 2, 3}, {3, 0, 3, 3}, 0, 0, 0, 0, 0, 0},
    /* 6 x 5 in 2 x 2 boxes, to rows on 3 ranks */
    {2, {0, 0, 3, 3}, {0, 0, 2, 5}, 2, 3, 0, 0, 3, 5},
    {2, {0, 3, 3, 2}, {0, 0, 2, 5}, 2, 2, 0, 3, 2, 8},
    {2, {0, 0, 3, 3}, {2, 0, 2, 5}, 1, 3, 6, 0, 6, 0},
    {2, {0, 3, 3, 2}, {2, 0, 2, 5}, 1, 2, 4, 3, 4, 3},
    {2, {3, 0, 3, 3}, {2, 0, 2, 5}, 1, 3, 0, 5, 0, 5},
    {2, {3, 3, 3, 2}, {2, 0, 2, 5}, 1, 2, 0, 8, 0, 8},
    {2, {3, 0, 3, 3}, {4, 0, 2, 5}, 2, 3, 3, 0, 6, 5},
    {2, {3, 3, 3, 2}, {4, 0, 2, 5}, 2, 2, 2, 3, 4, 8},
    /* 2 rows on 4 ranks, to 3 */
    {1, {0, 1}, {0, 1}, 1, 1, 0, 0, 0, 0},
    {1, {1, 1}, {1, 1}, 1, 1, 0, 0, 0, 0},
    {1, {2, 0}, {1, 1}, 0, 0, 0, 0, 0, 0},
    {1, {1, 1}, {2, 0}, 0, 0, 0, 0, 0, 0},
    {1, {2, 0}, {2, 0}, 0, 0, 0, 0, 0, 0},
    {0, {0}, {0}, 1, 1, 0, 0, 0, 0},
};

TEST(boxes, null) {
    const int64_t one[1] = {1};
    fsdp_box_overlap o;
    fsdp_box_begin(1, one, one, one, one, NULL);
    for (int k = 0; k < 4; k++) {
        memset(&o, 1, sizeof o);
        fsdp_box_begin(1, k == 0 ? NULL : one, k == 1 ? NULL : one, k == 2 ? NULL : one,
                       k == 3 ? NULL : one, &o);
        CHECK_EQ_INT(o.rows, 0);
    }
    fsdp_box_begin(0, NULL, NULL, NULL, NULL, &o);
    CHECK_EQ_INT(o.rows, 1);
    CHECK_EQ_INT(fsdp_box_next(NULL), 0);
}
TEST(boxes, resharding) {
    for (int64_t i = 0; i < COUNT(reshards); i++) {
        int n = reshards[i].ndim;
        int64_t runs = 0, src = 0, dst = 0;
        fsdp_box_overlap o;
        fsdp_box_begin(n, reshards[i].saved, reshards[i].saved + n, reshards[i].wanted,
                       reshards[i].wanted + n, &o);
        CHECK_MSG(o.rows == reshards[i].rows && o.elements == reshards[i].elements,
                  "row %d: %lld of %lld", (int)i, (long long)o.rows, (long long)o.elements);
        CHECK(o.src == reshards[i].src && o.dst == reshards[i].dst);
        if (o.rows) do
                src = o.src, dst = o.dst, runs++;
            while (fsdp_box_next(&o));
        CHECK_MSG(runs == reshards[i].rows && src == reshards[i].last_src &&
                      dst == reshards[i].last_dst,
                  "row %d", (int)i);
    }
}

/* Random boxes of 1 to 4 dims, element by element. */
TEST(boxes, brute) {
    uint64_t seed = h_seed();
    int64_t pairs = W_SLOW ? 50000 : 1000000, shared = 0;
    for (int64_t i = 0; i < pairs; i++) {
        int64_t n[4][4];
        int ndim = 1 + (int)(h_rand64(&seed) % 4), small = ndim < 3 ? 9 : ndim == 3 ? 6 : 4;
        uint64_t r = h_rand64(&seed);
        for (int d = 0; d < ndim; d++, r >>= 16) {
            n[0][d] = (int64_t)(r & 15) % small, n[1][d] = (int64_t)(r >> 4 & 15) % small;
            n[2][d] = (int64_t)(r >> 8 & 15) % small, n[3][d] = (int64_t)(r >> 12 & 15) % small;
            if ((r & 3) == 3) n[2][d] = n[0][d], n[3][d] = n[1][d]; /* a dim that is not sharded */
        }
        st_check_boxes(ndim, n[0], n[1], n[2], n[3]);
        fsdp_box_overlap o;
        fsdp_box_begin(ndim, n[0], n[1], n[2], n[3], &o);
        shared += o.rows > 0;
    }
    h_message("%lld pairs, %lld of them share something", (long long)pairs, (long long)shared);
    CHECK(shared > pairs / 4);
}

TEST(boxes, large_and_wrong) {
    const int64_t most = (int64_t)1 << 62;
    int64_t zero[8] = {0}, shape[8] = {1, 1, 1, 1, 1, 1, 1, 1}, other[8];
    fsdp_box_overlap o;
    fsdp_box_begin(8, zero, shape, zero, shape, &o);
    CHECK(o.rows == 1 && o.elements == 1 && o.outer == 0);
    fsdp_box_begin(-1, zero, shape, zero, shape, &o);
    CHECK(!o.rows && !fsdp_box_next(&o));
    fsdp_box_begin(9, zero, shape, zero, shape, &o);
    CHECK_EQ_INT(o.rows, 0);
    shape[0] = most;
    fsdp_box_begin(1, zero, shape, zero, shape, &o);
    CHECK(o.rows == 1 && o.elements == most);
    other[0] = most - 1, other[1] = 1;
    fsdp_box_begin(1, other, other + 1, zero, shape, &o);
    CHECK(o.rows == 1 && o.elements == 1 && o.src == 0 && o.dst == most - 1);
    shape[1] = 2; /* more than 2^62 elements */
    fsdp_box_begin(2, zero, shape, zero, shape, &o);
    CHECK_EQ_INT(o.rows, 0);
    shape[2] = 0; /* no elements */
    fsdp_box_begin(3, zero, shape, zero, shape, &o);
    CHECK_EQ_INT(o.rows, 0);
    for (int which = 0; which < 4; which++)
        for (int wrong = 0; wrong < 3; wrong++) {
            int64_t n[4] = {0, 5, 0, 5};
            n[which] = wrong == 0 ? -1 : wrong == 1 ? most + 1 : INT64_MIN;
            fsdp_box_begin(1, n, n + 1, n + 2, n + 3, &o);
            CHECK_EQ_INT(o.rows, 0);
        }
}
