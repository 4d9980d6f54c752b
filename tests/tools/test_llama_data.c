/* test_llama_data.c - examples/llama/llama_data.h: files of tokens, masks, and the order of rows

   SPDX-License-Identifier: MIT */
#include "harness.h"
#include "examples/llama/llama_data.h"

#include <dirent.h> // opendir

/* ---- files ----------------------------------------------------------------------------------- */

enum { TOKENS = 41, VOCAB = 70000 };

static const char *in_tmpdir(const char *name) {
    static char paths[4][512];
    static int next;
    char *path = paths[next++ % 4];
    snprintf(path, sizeof paths[0], "%s/%s", h_tmpdir(), name);
    return path;
}

static void put_le(uint8_t *to, uint32_t value, int bytes) {
    for (int i = 0; i < bytes; i++) to[i] = (uint8_t)(value >> 8 * i);
}

static uint32_t token_at(int i, int width) {
    return (uint32_t)(i * 7919 + 3) % (width == 2 ? 65536 : VOCAB);
}

/* Returns the bytes of a file of tokens. */
static size_t make_tokens(uint8_t *to, int width, int count) {
    memset(to, 0, LLAMA_DATA_HEADER);
    put_le(to, width == 2 ? 20240520 : 20240801, 4);
    put_le(to + 4, width == 2 ? 1 : 7, 4);
    put_le(to + 8, (uint32_t)count, 4);
    for (int i = 0; i < count; i++) {
        put_le(to + LLAMA_DATA_HEADER + i * width, token_at(i, width), width);
    }
    return LLAMA_DATA_HEADER + (size_t)(count * width);
}

static const char *put(const char *name, const uint8_t *bytes, size_t count) {
    const char *path = in_tmpdir(name);
    FILE *f = fopen(path, "wb");
    CHECK(f != NULL && fwrite(bytes, 1, count, f) == count && fclose(f) == 0);
    return path;
}

/* Returns the number of open descriptors and of mapped files of the test. */
static int count_open(void) {
    int count = 0;
    char line[1200];
    DIR *d = opendir("/proc/self/fd");
    while (d && readdir(d)) count++;
    if (d) closedir(d);
    FILE *maps = fopen("/proc/self/maps", "r");
    while (maps && fgets(line, sizeof line, maps)) count += strstr(line, h_tmpdir()) != NULL;
    if (maps) fclose(maps);
    return count;
}

static const struct {
    const char *name;
    int width;
} widths[] = {{"u16", 2}, {"u32", 4}};

/* Rows share one token; the label of a token is the next one, unless the mask says no; the rest of
   the file that makes no whole row is left out. */
TEST_P(llama_data, rows, widths, 0) {
    uint8_t bytes[LLAMA_DATA_HEADER + 4 * TOKENS], mask[TOKENS];
    const size_t size = make_tokens(bytes, row->width, TOKENS);
    const char *path = put("tokens", bytes, size);
    llama_data d;
    char why[600];
    const int before = count_open();
    for (int i = 0; i < TOKENS; i++) mask[i] = i % 3 != 1;
    for (int masked = 0; masked < 2; masked++) {
        CHECK_MSG(!llama_data_open(&d, path, masked ? put("mask", mask, TOKENS) : NULL, VOCAB, why,
                                   sizeof why),
                  "%s", why);
        CHECK_EQ_INT(d.num_tokens, TOKENS);
        for (int T = 1; T <= TOKENS; T++) {
            CHECK_EQ_INT(llama_data_rows(&d, T), (TOKENS - 1) / T);
            for (int r = 0; r < (TOKENS - 1) / T; r++) {
                int32_t tokens[TOKENS], labels[TOKENS];
                llama_data_row(&d, r, T, tokens, labels);
                for (int t = 0; t < T; t++) {
                    const int at = r * T + t;
                    CHECK_EQ_INT(tokens[t], token_at(at, row->width));
                    if (masked && !mask[at + 1]) CHECK_EQ_INT(labels[t], -100);
                    else CHECK_EQ_INT(labels[t], token_at(at + 1, row->width));
                }
            }
        }
        llama_data_close(&d);
    }
    CHECK_EQ_INT(count_open(), before);
}

/* What a resume compares: each other token, each other byte of a mask, and no mask give other
   numbers. */
TEST(llama_data, hash) {
    uint8_t bytes[LLAMA_DATA_HEADER + 4 * TOKENS], mask[TOKENS];
    const size_t size = make_tokens(bytes, 2, TOKENS);
    uint64_t seen[2 * TOKENS + 2];
    char why[600];
    llama_data d;
    memset(mask, 1, sizeof mask);
    for (int i = 0; i < 2 * TOKENS + 2; i++) {
        uint8_t *other = i < TOKENS       ? &bytes[LLAMA_DATA_HEADER + 2 * i]
                         : i < 2 * TOKENS ? &mask[i - TOKENS]
                                          : NULL;
        if (other) *other ^= 1;
        const char *path = put("tokens", bytes, size);
        const char *of_mask = i < 2 * TOKENS + 1 ? put("mask", mask, TOKENS) : NULL;
        CHECK(!llama_data_open(&d, path, of_mask, VOCAB, why, sizeof why));
        seen[i] = d.hash;
        llama_data_close(&d);
        if (other) *other ^= 1;
        for (int k = 0; k < i; k++) CHECK(seen[i] != seen[k]);
    }
}

/* ---- refusals -------------------------------------------------------------------------------- */

typedef enum fault {
    NO_FILE,
    FOLDER,
    PIPE,
    EMPTY,
    SHORT,
    MAGIC,
    VERSION,
    FEWER,
    MORE,
    ODD,
    HIGH,
    NO_MASK,
    SHORT_MASK
} fault;
static const struct {
    const char *name;
    fault what;
    const char *line; /* after the path */
} refusals[] = {
    {"no_file", NO_FILE, ": No such file or directory"},
    {"folder", FOLDER, ": expected a file"},
    {"pipe", PIPE, ": expected a file"},
    {"empty", EMPTY, ": the file is empty"},
    {"short", SHORT, ": size: expected a header of 1024 bytes, got 1023"},
    {"magic", MAGIC,
     ": magic and version: expected 20240520 and 1, or 20240801 and 7, got 20240521 and 1: "
     "tokens.py makes such files"},
    {"version", VERSION,
     ": magic and version: expected 20240520 and 1, or 20240801 and 7, got 20240520 and 7: "
     "tokens.py makes such files"},
    {"fewer", FEWER, ": size: expected 1104 bytes for 40 tokens, got 1106"},
    {"more", MORE, ": size: expected 1108 bytes for 42 tokens, got 1106"},
    {"odd", ODD, ": size: expected 1106 bytes for 41 tokens, got 1105"},
    {"high", HIGH, ": token 40: expected less than vocab_size, 100, got 100"},
    {"no_mask", NO_MASK, ": No such file or directory"},
    {"short_mask", SHORT_MASK, ": size: expected a byte for each of 41 tokens, got 40"}};

TEST_P(llama_data, refusals, refusals, 0) {
    uint8_t bytes[LLAMA_DATA_HEADER + 4 * TOKENS], mask[TOKENS];
    llama_data d, zero;
    char why[600], want[600];
    const int before = count_open();
    size_t size = make_tokens(bytes, 2, TOKENS);
    const char *path, *of_mask = NULL;
    const fault f = row->what;
    memset(&zero, 0, sizeof zero);
    memset(&d, 1, sizeof d);
    memset(mask, 1, sizeof mask);
    if (f == MAGIC) put_le(bytes, 20240521, 4);
    if (f == VERSION) put_le(bytes + 4, 7, 4);
    if (f == FEWER || f == MORE) put_le(bytes + 8, f == FEWER ? TOKENS - 1 : TOKENS + 1, 4);
    if (f == HIGH) {
        for (int i = 0; i < TOKENS - 1; i++) put_le(bytes + LLAMA_DATA_HEADER + 2 * i, 99, 2);
        put_le(bytes + LLAMA_DATA_HEADER + 2 * (TOKENS - 1), 100, 2);
    }
    size -= f == ODD;
    if (f == SHORT) size = LLAMA_DATA_HEADER - 1;
    if (f == EMPTY) size = 0;
    path = f == NO_FILE ? in_tmpdir("none") : f == FOLDER ? h_tmpdir() : put("tokens", bytes, size);
    if (f == PIPE) {
        path = in_tmpdir("pipe");
        CHECK_EQ_INT(mkfifo(path, 0600), 0);
    }
    if (f == NO_MASK) of_mask = in_tmpdir("none");
    if (f == SHORT_MASK) of_mask = put("mask", mask, TOKENS - 1);
    CHECK_EQ_INT(llama_data_open(&d, path, of_mask, f == HIGH ? 100 : VOCAB, why, sizeof why), -1);
    snprintf(want, sizeof want, "%s%s", of_mask ? of_mask : path, row->line);
    CHECK_EQ_STR(why, want);
    CHECK(!memcmp(&d, &zero, sizeof d));
    CHECK_EQ_INT(llama_data_rows(&d, 8), 0);
    CHECK_EQ_INT(count_open(), before);
}

/* ---- the order of rows ----------------------------------------------------------------------- */

/* Every row comes once in an epoch; epochs and seeds have different orders. */
TEST(llama_data, every_row_once_an_epoch) {
    enum { MOST = 300 };
    static const uint64_t seeds[3] = {0, 1, UINT64_MAX};
    static int64_t orders[6][MOST];
    for (int64_t rows = 1; rows <= MOST; rows++) {
        for (int64_t k = 0; k < 6; k++) { /* two epochs of three seeds */
            char seen[MOST] = {0};
            int64_t moved = 0;
            for (int64_t i = 0; i < rows; i++) {
                const int64_t r = llama_data_pick(rows, seeds[k / 2], k % 2 * rows + i);
                CHECK(r >= 0 && r < rows && !seen[r]);
                seen[r] = 1, orders[k][i] = r, moved += r != i;
            }
            CHECK(rows < 20 || moved > rows / 2);
        }
        for (int a = 0; rows >= 20 && a < 6; a++) {
            for (int b = 0; b < a; b++)
                CHECK(memcmp(orders[a], orders[b], (size_t)rows * sizeof(int64_t)) != 0);
        }
    }
}

/* Neighbours of an epoch are no neighbours of the file: on average they lie a third of it apart. */
TEST(llama_data, rows_are_mixed) {
    const int64_t rows = 10000;
    double distance = 0.0;
    for (int64_t i = 1; i < rows; i++) {
        const int64_t a = llama_data_pick(rows, 1, i - 1), b = llama_data_pick(rows, 1, i);
        distance += (double)(a < b ? b - a : a - b);
    }
    CHECK_NEAR(distance / (double)rows / (double)rows, 1.0 / 3.0, 0.02);
}
