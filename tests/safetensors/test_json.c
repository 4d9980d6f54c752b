/* test_json.c - fsdp_json_*: texts that are accepted and refused, members, strings and numbers;
   hostile bytes.

   SPDX-License-Identifier: MIT */
#include "harness.h"
#include "lab.h"
#include "fuzz_safetensors.c"
#include <inttypes.h>
#include <math.h>
#include <sys/mman.h>

static fsdp_json parse(const char *text) {
    fsdp_json v;
    char why[200];
    CHECK_OK(fsdp_json_parse(text, (int64_t)strlen(text), &v, why, sizeof why));
    CHECK_EQ_STR(why, "");
    return v;
}

static const struct {
    const char *name, *text, *why;
} refused[] = {{"empty", "", "at byte 0: expected a value, got the end"},
               {"word", "{\"a\": nul}", "at byte 6: expected a value, got 'n'"},
               {"nan", "[NaN]", "at byte 1: expected a value, got 'N'"},
               {"rest", "{} x", "at byte 3: expected the end, got 'x'"},
               {"comma", "{\"a\": 1,}", "at byte 8: expected a string, got '}'"},
               {"colon", "{\"a\" 1}", "at byte 5: expected ':', got '1'"},
               {"cut", "{\"a\": [1, 2", "at byte 11: expected ',' or ']', got the end"},
               {"crossed", "[1}", "at byte 2: expected ',' or ']', got '}'"},
               {"zero", "[01]", "at byte 2: expected ',' or ']', got '1'"},
               {"digits", "[1.]", "at byte 3: expected a digit, got ']'"},
               {"escape", "[\"\\x\"]", "at byte 2: an escape that JSON does not have"},
               {"utf8", "[\"\xff\"]", "at byte 2: byte 0xff is not UTF-8"}};

TEST_P(json, refused, refused, 0) {
    fsdp_json v;
    char why[200];
    memset(&v, 1, sizeof v);
    CHECK_STATUS(fsdp_json_parse(row->text, (int64_t)strlen(row->text), &v, why, sizeof why),
                 FSDP_ERR_CORRUPT);
    CHECK_EQ_STR(why, row->why);
    CHECK_EQ_INT(v.kind, FSDP_JSON_NONE);
    CHECK(!fsdp_json_next(&v, NULL, &v) && !fsdp_json_find(&v, "a", &v));
}

TEST(json, arguments) {
    fsdp_json v, w;
    int64_t i = 7;
    double d = 7;
    CHECK_STATUS(fsdp_json_parse(NULL, 0, &v, NULL, 0), FSDP_ERR_INVALID_ARG);
    CHECK_STATUS(fsdp_json_parse("1", -1, &v, NULL, 0), FSDP_ERR_INVALID_ARG);
    CHECK_STATUS(fsdp_json_parse("1", 1, NULL, NULL, 0), FSDP_ERR_INVALID_ARG);
    CHECK_STATUS(fsdp_json_parse("x", 1, &v, NULL, 0), FSDP_ERR_CORRUPT);
    v = parse("{\"a\": \"b\"}");
    memset(&w, 0, sizeof w);
    CHECK(!fsdp_json_next(NULL, NULL, &w) && !fsdp_json_next(&v, NULL, NULL));
    CHECK(!fsdp_json_find(NULL, "a", &w) && !fsdp_json_find(&v, NULL, &w));
    CHECK(!fsdp_json_find(&v, "a", NULL));
    CHECK(!fsdp_json_int(NULL, &i) && !fsdp_json_int(&v, &i) && !fsdp_json_double(&v, &d));
    CHECK(!fsdp_json_double(NULL, &d) && fsdp_json_string(NULL, NULL, 0) == -1);
    CHECK(i == 7 && lab_same(d, 7));
    CHECK(fsdp_json_next(&v, NULL, &w) && fsdp_json_string(&w, NULL, 0) == 1);
}

/* Levels: 127 are read, 128 are refused; nothing recurses. */
TEST(json, levels) {
    char text[300], why[100];
    fsdp_json v;
    for (int levels = 127; levels <= 128; levels++) {
        memset(text, '[', (size_t)levels), memset(text + levels, ']', (size_t)levels);
        CHECK_EQ_INT(fsdp_json_parse(text, 2 * levels, &v, why, sizeof why),
                     levels == 127 ? FSDP_OK : FSDP_ERR_CORRUPT);
    }
    CHECK_EQ_STR(why, "at byte 127: more than 127 levels");
}

TEST(json, members) {
    const char *text = " {\"a\": 1, \"\\u0062\": [true, false, null, {}, [], \"s\", -2.5e1], "
                       "\"a\": 2, \"a\\u0000\": 3, \"ab\": 4, \"\": 5} ";
    static const int kinds[] = {FSDP_JSON_TRUE, FSDP_JSON_FALSE,  FSDP_JSON_NULL,  FSDP_JSON_OBJECT,
                                FSDP_JSON_LIST, FSDP_JSON_STRING, FSDP_JSON_NUMBER};
    static const char *const keys[] = {"a", "b", "a", "a", "ab", ""};
    fsdp_json v = parse(text), key, at, list, none;
    int64_t n = 0;
    char name[8];
    int count = 0;
    CHECK_EQ_INT(v.begin, 1), CHECK_EQ_INT(v.end, (int64_t)strlen(text) - 1);
    memset(&at, 0, sizeof at);
    while (fsdp_json_next(&v, &key, &at)) {
        CHECK_EQ_INT(fsdp_json_string(&key, name, sizeof name),
                     (int64_t)strlen(keys[count]) + (count == 3));
        CHECK_EQ_STR(name, keys[count]);
        count++;
    }
    CHECK_EQ_INT(count, 6);
    CHECK(fsdp_json_find(&v, "a", &at) && fsdp_json_int(&at, &n) && n == 2);
    CHECK(fsdp_json_find(&v, "ab", &at) && fsdp_json_int(&at, &n) && n == 4);
    CHECK(fsdp_json_find(&v, "", &at) && fsdp_json_int(&at, &n) && n == 5);
    CHECK(!fsdp_json_find(&v, "c", &at) && at.kind == FSDP_JSON_NONE);
    CHECK(fsdp_json_find(&v, "b", &list) && !fsdp_json_find(&list, "b", &none));
    count = 0;
    for (memset(&at, 0, sizeof at); fsdp_json_next(&list, &key, &at); count++) {
        CHECK_EQ_INT(at.kind, kinds[count]);
        CHECK_EQ_INT(key.kind, FSDP_JSON_NONE);
        if (at.kind == FSDP_JSON_OBJECT || (count != 6 && at.kind != FSDP_JSON_STRING))
            CHECK(!fsdp_json_next(&at, NULL, &none) && !fsdp_json_find(&at, "a", &none));
    }
    CHECK_EQ_INT(count, 7);
}

TEST(json, strings) {
    fsdp_json v = parse("\"\\u00e9 \\ud83d\\ude00 \\n\\\" \xc3\xa9\"");
    char to[24], few[4];
    CHECK_EQ_INT(fsdp_json_string(&v, to, sizeof to), 13);
    CHECK_EQ_STR(to, "\xc3\xa9 \xf0\x9f\x98\x80 \n\" \xc3\xa9");
    CHECK_EQ_INT(fsdp_json_string(&v, few, sizeof few), 13);
    CHECK_EQ_STR(few, "\xc3\xa9 "); // whole characters
    v = parse("17");
    CHECK_EQ_INT(fsdp_json_string(&v, to, sizeof to), -1);
    CHECK_EQ_STR(to, "");
}

static const struct {
    const char *name, *text;
    int is_int;
    int64_t n;
} integers[] = {{"zero", "0", 1, 0},
                {"minus_zero", "-0", 1, 0},
                {"plain", "128256", 1, 128256},
                {"negative", "-17", 1, -17},
                {"largest", "4611686018427387904", 1, (int64_t)1 << 62},
                {"smallest", "-4611686018427387904", 1, -((int64_t)1 << 62)},
                {"too_large", "4611686018427387905", 0, 0},
                {"fraction", "1.0", 0, 0},
                {"power", "1e3", 0, 0},
                {"word", "true", 0, 0},
                {"string", "\"1\"", 0, 0}};

TEST_P(json, int, integers, 0) {
    fsdp_json v = parse(row->text);
    int64_t n = 77;
    CHECK_EQ_INT(fsdp_json_int(&v, &n), row->is_int);
    CHECK_EQ_INT(n, row->is_int ? row->n : 77);
}

/* Doubles compared with strtod, over random digits and powers; short ones are exact. */
TEST(json, double) {
    static const char *const exact[] = {"1e-05", "1e-06", "500000.0", "10000",  "0.02",  "-2.5E+3",
                                        "0",     "-0.0",  "8.0",      "1.0e22", "1e-22", "0e999"};
    uint64_t state = h_seed();
    fsdp_json v;
    double got = 0;
    for (size_t i = 0; i < sizeof exact / sizeof *exact; i++) {
        v = parse(exact[i]);
        CHECK(fsdp_json_double(&v, &got));
        CHECK_MSG(lab_same(got, strtod(exact[i], NULL)), "%s: %.17g", exact[i], got);
    }
    for (int i = 0; i < 20000; i++) {
        char text[80];
        const int digits = 1 + lab_pick(&state, 25), power = lab_pick(&state, 600) - 300;
        int n = snprintf(text, sizeof text, "%d.", lab_pick(&state, 10));
        for (int k = 0; k < digits; k++) text[n++] = (char)('0' + lab_pick(&state, 10));
        snprintf(text + n, sizeof text - (size_t)n, "e%d", power);
        const double want = strtod(text, NULL);
        v = parse(text);
        CHECK(fsdp_json_double(&v, &got));
        CHECK_MSG(fabs(got - want) <= 4e-15 * fabs(want), "%s: %.17g, expected %.17g", text, got,
                  want);
        if (digits < 15 && power < 22 && power > 14 - 22)
            CHECK_MSG(lab_same(got, want), "%s: %.17g, expected %.17g", text, got, want);
    }
    v = parse("[1e309, -1e99999999999999999999, 1e-99999999999999999999]");
    fsdp_json at;
    memset(&at, 0, sizeof at);
    got = 3;
    for (int i = 0; i < 2; i++)
        CHECK(fsdp_json_next(&v, NULL, &at) && !fsdp_json_double(&at, &got) && lab_same(got, 3));
    CHECK(fsdp_json_next(&v, NULL, &at) && fsdp_json_double(&at, &got) && lab_same(got, 0));
}

/* Each prefix of a text, and random changes of it: no byte outside is read, and what is accepted can
   be walked. */
TEST(json, hostile) {
    static const char text[] =
        "6{\"model_type\": \"llama\", \"rope\": {\"factor\": 8.0, \"x\": [1, -2, {\"\\u0041\": "
        "null}]}, \"eps\": 1e-05, \"tied\": true, \"eos\": [1, 2], \"\\ud83d\\ude00\": \"\"}";
    enum { SIZE = sizeof text - 1 };
    uint64_t state = h_seed();
    uint8_t copy[SIZE + 8];
    for (size_t n = 1; n <= SIZE; n++) {
        memcpy(copy, text, n);
        LLVMFuzzerTestOneInput(copy, n);
    }
    for (int i = 0; i < 20000; i++) {
        size_t n = SIZE;
        memcpy(copy, text, SIZE);
        for (int k = lab_pick(&state, 4); k >= 0; k--) {
            const int at = 1 + lab_pick(&state, (int)n - 1),
                      other = 1 + lab_pick(&state, (int)n - 1);
            if (lab_pick(&state, 3)) copy[at] = copy[other];
            else copy[at] = (uint8_t)lab_pick(&state, 256);
        }
        LLVMFuzzerTestOneInput(copy, n);
    }
}

/* ---- faults ---------------------------------------------------------------------------------- */
/* The functions allocate nothing, which the gate math_only asserts: they may call mem* and str*
   alone. What can fail is the text, and the room for what they write. */

enum { GUARD_PAGES = 2, GUARD_PAGE = 65536 };
static char *guard_end; /* of memory before a page without access */
static void guard_open(void) {
    char *at = (char *)mmap(NULL, GUARD_PAGES * GUARD_PAGE, PROT_READ | PROT_WRITE,
                            MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    guard_end = at + GUARD_PAGE;
    CHECK(at != (char *)MAP_FAILED && !mprotect(guard_end, GUARD_PAGE, PROT_NONE));
}
static void guard_close(void) { munmap(guard_end - GUARD_PAGE, GUARD_PAGES * GUARD_PAGE); }

/* Parses n bytes that end at the guard, and walks the value. Returns the status; a refusal names a
   byte of the text, *at, or its end. */
static fsdp_status guarded(const void *text, size_t n, char *why, size_t cap, int64_t *at) {
    fsdp_json v;
    *at = -1;
    memset(&v, 1, sizeof v);
    memcpy(guard_end - n, text, n);
    const fsdp_status status = fsdp_json_parse(guard_end - n, (int64_t)n, &v, why, cap);
    if (!status) {
        CHECK_EQ_STR(why, "");
        fuzz_json_value(&v, 1);
        return status;
    }
    CHECK_EQ_INT(status, FSDP_ERR_CORRUPT), CHECK_EQ_INT(v.kind, FSDP_JSON_NONE);
    CHECK_MSG(sscanf(why, "at byte %" SCNd64 ": ", at) == 1, "'%s'", why);
    CHECK_MSG(*at >= 0 && *at <= (int64_t)n, "byte %lld of %d", (long long)*at, (int)n);
    return status;
}

/* Cut at each byte, the text is refused there or at its last word or string. With each byte changed
   to each value it is read, or refused at the first byte that cannot continue it: what follows does
   not matter. */
TEST(json, each_byte_is_wrong) {
    static const char text[] =
        " {\"a\": {\"f\": -8.25e+2, \"x\": [1, 20, {\"\\u0041\\ud83d\\ude00\": null}]}, "
        "\"e\": false, \"\": true, \"s\": \"\\n\\\\\"} ";
    enum { SIZE = sizeof text - 1 };
    char why[200], again[200], copy[SIZE + 1];
    int64_t at, other;
    int accepted = 0, refusals = 0;
    guard_open();
    CHECK_OK(guarded(text, SIZE, why, sizeof why, &at));
    for (size_t n = 0; n < SIZE - 1; n++) { /* the last byte is a space */
        CHECK_STATUS(guarded(text, n, why, sizeof why, &at), FSDP_ERR_CORRUPT);
        CHECK_MSG(at + 13 > (int64_t)n, "cut to %d bytes: %s", (int)n, why); /* two \u escapes */
    }
    for (size_t k = 0; k < SIZE; k++) {
        for (int byte = 0; byte < 256; byte++) {
            memcpy(copy, text, SIZE), copy[k] = (char)byte;
            if (!guarded(copy, SIZE, why, sizeof why, &at)) {
                accepted++;
                continue;
            }
            refusals++;
            CHECK_MSG(byte < 0x80 || at == (int64_t)k, "byte %d is 0x%x: %s", (int)k, byte, why);
            if (!strstr(why, ": expected") || at == SIZE) continue;
            CHECK_STATUS(guarded(copy, (size_t)at + 1, again, sizeof again, &other),
                         FSDP_ERR_CORRUPT);
            CHECK_EQ_STR(again, why);
        }
    }
    CHECK(accepted > 500 && refusals > 20000);
    guard_close();
}

/* Objects and lists in each other, as deep as allowed and deeper; cut off at each level. A million
   levels are refused at the same byte. */
TEST(json, each_depth) {
    static char text[1 << 20];
    char why[200];
    int64_t at;
    guard_open();
    for (int form = 0; form < 3; form++) { /* lists, objects, both in turn */
        for (int levels = 1; levels <= 160; levels++) {
            size_t open = 0, n;
            for (int k = 0; k < levels; k++) {
                const int list = form == 0 || (form == 2 && k % 2);
                memcpy(text + open, list ? "[   " : "{\"\":", 4), open += 4;
            }
            text[open] = '1';
            n = open + 1;
            for (int k = levels; k-- > 0;)
                text[n++] = form == 0 || (form == 2 && k % 2) ? ']' : '}';
            const fsdp_status status = guarded(text, n, why, sizeof why, &at);
            CHECK_MSG((levels <= 127) == !status, "form %d, %d levels: %s", form, levels, why);
            if (status) CHECK_EQ_STR(why, "at byte 508: more than 127 levels");
            for (size_t cut = n - 1; cut > n - 1 - (size_t)levels; cut--)
                CHECK_STATUS(guarded(text, cut, why, sizeof why, &at), FSDP_ERR_CORRUPT);
        }
    }
    guard_close();
    fsdp_json v;
    memset(text, '[', sizeof text);
    CHECK_STATUS(fsdp_json_parse(text, sizeof text, &v, why, sizeof why), FSDP_ERR_CORRUPT);
    CHECK_EQ_STR(why, "at byte 127: more than 127 levels");
}

#define ODD(text)                                                                                  \
    { #text, text, sizeof text - 1 }
static const struct {
    const char *name, *text;
    size_t nbytes;
} odd[] = {ODD("\xef\xbb\xbf{}"),
           ODD("\0"),
           ODD("{}\0"),
           ODD("[1\0]"),
           ODD("\"a\0b\""),
           ODD("\"\\ud800\""),
           ODD("\"\\ud800\\u0041\""),
           ODD("\"\\udc00\""),
           ODD("\"\\ud83d\\ud"),
           ODD("\"\\u00g0\""),
           ODD("\"\\u12\""),
           ODD("\"\\"),
           ODD("\"\x01\""),
           ODD("\"\t\""),
           ODD("\"\n\""),
           ODD("\"\xc0\x80\""),
           ODD("\"\xed\xa0\x80\""),
           ODD("\"\xf4\x90\x80\x80\""),
           ODD("\"\xf0\x9f\x98\""),
           ODD("\"\x80\""),
           ODD("\"\xe2\x82"),
           ODD("+1"),
           ODD(".5"),
           ODD("1e"),
           ODD("1e+"),
           ODD("-"),
           ODD("--1"),
           ODD("-a"),
           ODD("0x10"),
           ODD("1_0"),
           ODD("Infinity"),
           ODD("-Infinity"),
           ODD("nan"),
           ODD("True"),
           ODD("nulll"),
           ODD("tru"),
           ODD("'a'"),
           ODD("{a: 1}"),
           ODD("{1: 1}"),
           ODD("{\"a\":}"),
           ODD("{\"a\": 1 \"b\": 2}"),
           ODD("{,}"),
           ODD("[,]"),
           ODD("[1 2]"),
           ODD("[1,,2]"),
           ODD("//\n1"),
           ODD("/**/1"),
           ODD("[1]]"),
           ODD("1 2"),
           ODD("{}{}"),
           ODD("\xc2\xa0"
               "1"),
           ODD("\v1"),
           ODD("\f1")};
TEST(json, odd_texts) {
    char why[200];
    int64_t at;
    guard_open();
    for (size_t i = 0; i < sizeof odd / sizeof *odd; i++) {
        snprintf(w_case, sizeof w_case, "%s", odd[i].name);
        W_CHECK(guarded(odd[i].text, odd[i].nbytes, why, sizeof why, &at), "is accepted");
    }
    *w_case = 0;
    guard_close();
}

/* The room of the text of a failure, and of a string, ends at the guard. */
TEST(json, each_room) {
    static const char bad[] = "[\"\\ud83d\\ude00\xc3\xa9\", nul]";
    static const char *const begins = "\xf0\x9f\x98\x80\xc3\xa9";
    char whole[200];
    fsdp_json v, at;
    CHECK_STATUS(fsdp_json_parse(bad, sizeof bad - 1, &v, whole, sizeof whole), FSDP_ERR_CORRUPT);
    guard_open();
    for (size_t cap = 0; cap <= strlen(whole) + 1; cap++) {
        char *why = guard_end - cap;
        memset(guard_end - 200, 'x', 200);
        CHECK_STATUS(fsdp_json_parse(bad, sizeof bad - 1, &v, why, cap), FSDP_ERR_CORRUPT);
        CHECK(why[-1] == 'x' && (!cap || strlen(why) < cap));
        if (cap > strlen(whole)) CHECK_EQ_STR(why, whole);
    }
    v = parse("[\"\\ud83d\\ude00\xc3\xa9\"]");
    memset(&at, 0, sizeof at);
    CHECK(fsdp_json_next(&v, NULL, &at));
    for (size_t cap = 0; cap <= 8; cap++) {
        char *to = guard_end - cap;
        memset(guard_end - 10, 'x', 10);
        CHECK_EQ_INT(fsdp_json_string(&at, to, cap), 6);
        const size_t fits = cap > 6 ? 6 : cap > 4 ? 4 : 0; /* whole characters */
        CHECK(to[-1] == 'x' && (!cap || (strlen(to) == fits && !memcmp(to, begins, fits))));
    }
    guard_close();
}
