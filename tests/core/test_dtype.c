/* test_dtype.c - conversions between element types, and the library's reduction, bit by bit.

   The reference is slow and simple: a table of the value of each 16-bit pattern, and a search in it
   for the nearest value. It takes inputs apart with integers, so that it also holds on a processor
   that flushes subnormals to zero (gcc -Ofast links that in). There, f32 subnormals on the way from
   and to f64 are zero, which is all that flushing changes.

   SPDX-License-Identifier: MIT */
#define TAGS BITS | AT_NIGHT(ASAN)
#include "harness.h"
#include <math.h> /* ldexp */
#include "library.c"
#include "lab.h"

enum { BATCH = 1 << 16 };
#define NORMAL32 0x3810000000000000u /* f64 pattern of the smallest normal f32 */

/* ---- the reference --------------------------------------------------------------------------- */

typedef struct {
    const char *name;
    fsdp_dtype dtype;
    int exp_bits, mant_bits;
} half; /* a 16-bit float */
static const half halves[] = {{"f16", FSDP_F16, 5, 10}, {"bf16", FSDP_BF16, 8, 7}};

static unsigned infinity_of(const half *k) { return 0x7FFFu >> k->mant_bits << k->mant_bits; }

/* Returns the values of the non-negative patterns, ascending. In place of infinity it has the
   value that would follow the largest one: numbers nearer to that than to the largest overflow. */
static const double *worths(const half *k) {
    static double tables[2][32768];
    static int ready[2];
    int bias = (1 << (k->exp_bits - 1)) - 1, hidden = 1 << k->mant_bits;
    double *w = tables[k - halves];
    for (int h = 0; !ready[k - halves] && h <= (int)infinity_of(k); h++) {
        int e = h >> k->mant_bits, m = h & (hidden - 1);
        w[h] = ldexp(e ? m + hidden : m, (e ? e : 1) - bias - k->mant_bits);
    }
    ready[k - halves] = 1;
    return w;
}

/* Returns 1 if arithmetic flushes f32 subnormals to zero. */
static int flushing(void) {
    volatile float tiny = lab_from_bits32(1), smallest = lab_from_bits32(0x00800000u);
    volatile double wide = (double)tiny;
    volatile float below = smallest * 0.5f;
    return lab_bits(wide) == 0 || lab_bits32(below) == 0;
}

/* Returns |x| of a finite f32 pattern, exactly. */
static double worth32(uint32_t u) {
    int e = (int)(u >> 23 & 255u), m = (int)(u & 0x7FFFFFu);
    return e ? ldexp(m + 0x800000, e - 150) : ldexp(m, -149);
}

/* Returns the pattern nearest to x >= 0; on a tie the even one. */
static unsigned nearest(const half *k, double x) {
    const double *w = worths(k);
    unsigned lo = 0, hi = infinity_of(k);
    volatile double below, above; /* exact: the operands are close and have few bits */
    if (x >= w[hi]) return hi;
    while (hi - lo > 1) { /* w[lo] <= x < w[hi] */
        unsigned mid = (lo + hi) / 2;
        if (x < w[mid]) hi = mid;
        else lo = mid;
    }
    below = x - w[lo], above = w[hi] - x;
    if (below == above) return lo % 2 ? hi : lo;
    return below < above ? lo : hi;
}

/* Returns the 16-bit pattern of an f32 pattern. A NaN keeps its sign and the upper bits of its
   payload, and becomes quiet. */
static unsigned model_of_32(const half *k, uint32_t u) {
    unsigned sign = u >> 16 & 0x8000u, quiet = 1u << (k->mant_bits - 1);
    if ((u & 0x7FFFFFFFu) > 0x7F800000u)
        return sign | infinity_of(k) | quiet | ((u & 0x7FFFFFu) >> (23 - k->mant_bits));
    if ((u & 0x7FFFFFFFu) == 0x7F800000u) return sign | infinity_of(k);
    return sign | nearest(k, worth32(u));
}

static int is_nan16(const half *k, unsigned h) { return (h & 0x7FFFu) > infinity_of(k); }

/* Returns the f32 pattern of a 16-bit pattern. */
static uint32_t model_to_32(const half *k, unsigned h) {
    uint32_t sign = (h & 0x8000u) << 16, mant = h & ((1u << k->mant_bits) - 1);
    if (is_nan16(k, h)) return sign | 0x7FC00000u | mant << (23 - k->mant_bits);
    if ((h & 0x7FFFu) == infinity_of(k)) return sign | 0x7F800000u;
    if (k->exp_bits == 8) return (uint32_t)h << 16; /* bf16 is the upper half of f32 */
    return sign | lab_bits32((float)worths(k)[h & 0x7FFFu]);
}

/* ---- 16 bits to 32 and 64, and back ---------------------------------------------------------- */

TEST_P(dtype, all_patterns, halves) {
    static uint16_t h[BATCH], back[BATCH];
    static float f[BATCH];
    static double d[BATCH];
    for (unsigned i = 0; i < BATCH; i++) h[i] = (uint16_t)i;
    CHECK_OK(fsdp_convert(f, FSDP_F32, h, row->dtype, BATCH));
    for (unsigned i = 0; i < BATCH; i++)
        CHECK_MSG(lab_bits32(f[i]) == model_to_32(row, i), "0x%04x gives 0x%08x, expected 0x%08x",
                  i, lab_bits32(f[i]), model_to_32(row, i));
    CHECK_OK(fsdp_convert(back, row->dtype, f, FSDP_F32, BATCH));
    for (unsigned i = 0; i < BATCH; i++) {
        unsigned want = is_nan16(row, i) ? i | 1u << (row->mant_bits - 1) : i;
        CHECK_MSG(back[i] == want, "0x%04x came back as 0x%04x by f32", i, back[i]);
    }
    memset(back, 0, sizeof back);
    CHECK_OK(fsdp_convert(d, FSDP_F64, h, row->dtype, BATCH));
    for (unsigned i = 0; i < BATCH; i++) {
        uint64_t sign = (uint64_t)(i & 0x8000u) << 48, u = lab_bits(d[i]);
        if (is_nan16(row, i))
            CHECK_MSG((u & ~sign) > 0x7FF8000000000000u - 1 && (u & sign) == sign, "0x%04x", i);
        else if ((i & 0x7FFFu) == infinity_of(row))
            CHECK_MSG(u == (sign | 0x7FF0000000000000u), "0x%04x", i);
        else if (!(flushing() && worths(row)[i & 0x7FFFu] < lab_from_bits(NORMAL32) && u == sign))
            CHECK_MSG(u == (sign | lab_bits(worths(row)[i & 0x7FFFu])), "0x%04x gives %a", i, d[i]);
        else d[i] = lab_from_bits(sign | lab_bits(worths(row)[i & 0x7FFFu]));
    }
    CHECK_OK(fsdp_convert(back, row->dtype, d, FSDP_F64, BATCH));
    for (unsigned i = 0; i < BATCH; i++) {
        if (is_nan16(row, i)) CHECK_MSG(is_nan16(row, back[i]), "0x%04x: 0x%04x", i, back[i]);
        else if (!(flushing() && worths(row)[i & 0x7FFFu] < lab_from_bits(NORMAL32) &&
                   back[i] == (i & 0x8000u)))
            CHECK_MSG(back[i] == i, "0x%04x came back as 0x%04x by f64", i, back[i]);
    }
    CHECK_OK(fsdp_convert(back, row->dtype, h, row->dtype, BATCH)); /* a copy changes no bit */
    CHECK_EQ_MEM(back, h, sizeof h);
    h_message("%s: %d patterns", row->name, BATCH);
}

/* f16 <-> bf16 convert as if through f32, which holds both exactly. */
TEST(dtype, between_halves) {
    static uint16_t in[BATCH], out[BATCH];
    for (unsigned i = 0; i < BATCH; i++) in[i] = (uint16_t)i;
    for (int a = 0; a < 2; a++) {
        const half *from = &halves[a], *to = &halves[1 - a];
        CHECK_OK(fsdp_convert(out, to->dtype, in, from->dtype, BATCH));
        for (unsigned i = 0; i < BATCH; i++)
            CHECK_MSG(out[i] == model_of_32(to, model_to_32(from, i)), "0x%04x gives 0x%04x", i,
                      out[i]);
    }
}

/* ---- rounding -------------------------------------------------------------------------------- */

static uint32_t queue32[BATCH];
static uint64_t queue64[BATCH];
static int queued32, queued64;
static int64_t cases;

static void flush32(const half *k) {
    static uint16_t out[BATCH];
    CHECK_OK(fsdp_convert(out, k->dtype, queue32, FSDP_F32, queued32));
    for (int i = 0; i < queued32; i++)
        CHECK_MSG(out[i] == model_of_32(k, queue32[i]), "f32 0x%08x gives 0x%04x, expected 0x%04x",
                  queue32[i], out[i], model_of_32(k, queue32[i]));
    cases += queued32;
    queued32 = 0;
}
static void put32(const half *k, uint32_t u) {
    queue32[queued32++] = u;
    if (queued32 == BATCH) flush32(k);
}

static void flush64(const half *k) {
    static uint16_t out[BATCH];
    CHECK_OK(fsdp_convert(out, k->dtype, queue64, FSDP_F64, queued64));
    for (int i = 0; i < queued64; i++) {
        uint64_t u = queue64[i], a = u & 0x7FFFFFFFFFFFFFFFu;
        unsigned sign = (unsigned)(u >> 48) & 0x8000u, want = sign | infinity_of(k);
        if (a < 0x0010000000000000u) want = sign; /* too small to count; perhaps flushed */
        else if (a < 0x7FF0000000000000u) want = sign | nearest(k, lab_from_bits(a));
        if (a > 0x7FF0000000000000u)
            CHECK_MSG(is_nan16(k, out[i]) && (out[i] & 0x8000u) == sign,
                      "f64 NaN 0x%llx gives 0x%04x", (unsigned long long)u, out[i]);
        else if (!(flushing() && a < NORMAL32 && out[i] == sign))
            CHECK_MSG(out[i] == want, "f64 0x%016llx gives 0x%04x, expected 0x%04x",
                      (unsigned long long)u, out[i], want);
    }
    cases += queued64;
    queued64 = 0;
}
static void put64(const half *k, uint64_t u) {
    queue64[queued64++] = u;
    if (queued64 == BATCH) flush64(k);
}

/* For each 16-bit value of both signs: the half-way point above it and the floats around that,
   the value itself and the floats around it. */
TEST_P(dtype, half_way_points_of_f32, halves) {
    const double *w = worths(row);
    for (unsigned h = 0; h < infinity_of(row); h++) {
        for (uint32_t sign = 0; sign <= 1; sign++) {
            uint32_t at = model_to_32(row, h);
            uint32_t mid = row->dtype == FSDP_BF16 ? at + 0x8000u
                                                   : lab_bits32((float)((w[h] + w[h + 1]) / 2));
            CHECK(worth32(mid) - w[h] == w[h + 1] - worth32(mid));
            for (uint32_t k = 0; k <= 6; k++) put32(row, (mid - 3 + k) | sign << 31);
            for (uint32_t k = at ? 0 : 2; k <= 4; k++) put32(row, (at - 2 + k) | sign << 31);
        }
    }
    flush32(row);
    h_message("%s: %lld values", row->name, (long long)cases);
}

/* Half-way points in f64, and values that come out wrong if they are rounded to f32 first. */
TEST_P(dtype, half_way_points_of_f64, halves) {
    const double *w = worths(row);
    for (unsigned h = 0; h < infinity_of(row); h++) {
        uint64_t mid = lab_bits((w[h] + w[h + 1]) / 2); /* exact */
        static const uint64_t offsets[] = {0,
                                           1,
                                           2,
                                           1u << 27,
                                           1u << 28,
                                           (1u << 28) + 1,
                                           (1u << 28) - 1,
                                           1u << 29,
                                           (1u << 29) - 1,
                                           3u << 28};
        for (uint64_t sign = 0; sign <= 1; sign++) {
            for (size_t k = 0; k < sizeof offsets / sizeof *offsets; k++) {
                put64(row, (mid + offsets[k]) | sign << 63);
                put64(row, (mid - offsets[k]) | sign << 63);
            }
            put64(row, lab_bits(w[h]) | sign << 63);
        }
    }
    flush64(row);
    h_message("%s: %lld values", row->name, (long long)cases);
}

TEST_P(dtype, random_f32, halves) {
    uint64_t rng = h_seed();
    for (int i = 0; i < 3000000; i++) put32(row, (uint32_t)(h_rand64(&rng) >> 32));
    for (int i = 0; i < 1000000; i++) { /* 16 bits are not yet all zero or infinite */
        uint64_t r = h_rand64(&rng);
        put32(row, (uint32_t)(r & 0x807FFFFFu) | (100u + (uint32_t)(r >> 40) % 46u) << 23);
    }
    flush32(row);
    h_message("%s: %lld values", row->name, (long long)cases);
}

TEST_P(dtype, random_f64, halves) {
    uint64_t rng = h_seed();
    for (int i = 0; i < 500000; i++) put64(row, h_rand64(&rng));
    for (int i = 0; i < 1500000; i++) {
        uint64_t r = h_rand64(&rng), spread = row->dtype == FSDP_F16 ? 48 : 300;
        uint64_t e = 1023 - spread / 2 + h_rand64(&rng) % spread;
        put64(row, (r & 0x800FFFFFFFFFFFFFu) | e << 52);
    }
    flush64(row);
    h_message("%s: %lld values", row->name, (long long)cases);
}

/* Rounding is monotonic. Together with the half-way points that proves it for every f32: for all
   on request, otherwise for random blocks. */
TEST_P(dtype, monotonous, halves, SECONDS(300)) {
    static uint16_t out[BATCH];
    int all = getenv("FSDP_TEST_LONG") != NULL, blocks = all ? 0x7F80 : 400;
    uint64_t rng = h_seed();
    for (int b = 0; b < blocks; b++) {
        uint32_t base = (all ? (uint32_t)b : (uint32_t)(h_rand64(&rng) % 0x7F80u)) << 16;
        for (uint32_t i = 0; i < BATCH; i++) queue32[i] = base + i;
        CHECK_OK(fsdp_convert(out, row->dtype, queue32, FSDP_F32, BATCH));
        CHECK_EQ_INT(out[0], model_of_32(row, base));
        for (uint32_t i = 1; i < BATCH; i++)
            CHECK_MSG(out[i] >= out[i - 1], "f32 0x%08x", base + i);
        CHECK(model_of_32(row, base + BATCH - 1) == out[BATCH - 1]);
    }
    h_message("%s: %lld values", row->name, (long long)blocks * BATCH);
}

TEST(dtype, f64_to_f32) {
    static const struct {
        uint64_t in;
        uint32_t out;
    } rows[] = {
        {0x0000000000000000u, 0x00000000u}, {0x8000000000000000u, 0x80000000u},
        {0x3FF0000000000000u, 0x3F800000u}, {0x3FF0000010000000u, 0x3F800000u}, /* a tie: to even */
        {0x3FF0000010000001u, 0x3F800001u}, {0x3FF0000030000000u, 0x3F800002u},
        {0x47EFFFFFE0000000u, 0x7F7FFFFFu}, {0x47EFFFFFEFFFFFFFu, 0x7F7FFFFFu},
        {0x47EFFFFFF0000000u, 0x7F800000u}, {0xC7F0000000000000u, 0xFF800000u},
        {0x7FF0000000000000u, 0x7F800000u}, {0xFFF0000000000000u, 0xFF800000u},
        {0x3810000000000000u, 0x00800000u}, {0x0000000000000001u, 0x00000000u}};
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        uint32_t out = 1;
        CHECK_OK(fsdp_convert(&out, FSDP_F32, &rows[i].in, FSDP_F64, 1));
        CHECK_MSG(out == rows[i].out, "0x%016llx gives 0x%08x", (unsigned long long)rows[i].in,
                  out);
    }
    static double d[BATCH];
    static float f[BATCH], back[BATCH];
    uint64_t rng = h_seed();
    for (int i = 0; i < BATCH; i++) {
        uint32_t u = (uint32_t)h_rand64(&rng);
        if ((u & 0x7F800000u) == 0 || (u & 0x7F800000u) == 0x7F800000u) u ^= 0x40000000u;
        f[i] = lab_from_bits32(u); /* normal */
    }
    CHECK_OK(fsdp_convert(d, FSDP_F64, f, FSDP_F32, BATCH));
    for (int i = 0; i < BATCH; i++)
        CHECK(lab_bits(d[i]) ==
              (lab_bits(worth32(lab_bits32(f[i]))) | (uint64_t)(lab_bits32(f[i]) >> 31) << 63));
    CHECK_OK(fsdp_convert(back, FSDP_F32, d, FSDP_F64, BATCH));
    CHECK_EQ_MEM(back, f, sizeof f);
    uint64_t nan = 0xFFF4000000000000u;
    uint32_t out;
    CHECK_OK(fsdp_convert(&out, FSDP_F32, &nan, FSDP_F64, 1));
    CHECK((out & 0x7FC00000u) == 0x7FC00000u);
}

/* ---- arguments ------------------------------------------------------------------------------- */

TEST(dtype, sizes_and_names) {
    static const struct {
        fsdp_dtype dtype;
        size_t size;
        int is_float;
        const char *name;
    } rows[] = {
        {FSDP_F32, 4, 1, "f32"},      {FSDP_F64, 8, 1, "f64"},       {FSDP_F16, 2, 1, "f16"},
        {FSDP_BF16, 2, 1, "bf16"},    {FSDP_U8, 1, 0, "u8"},         {FSDP_I8, 1, 0, "i8"},
        {FSDP_I16, 2, 0, "i16"},      {FSDP_I32, 4, 0, "i32"},       {FSDP_I64, 8, 0, "i64"},
        {FSDP_DTYPE_KEEP, 0, 0, "?"}, {FSDP_DTYPE_COUNT, 0, 0, "?"}, {-1, 0, 0, "?"},
        {INT32_MAX, 0, 0, "?"},       {INT32_MIN, 0, 0, "?"}};
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        CHECK_EQ_INT(fsdp_dtype_size(rows[i].dtype), rows[i].size);
        CHECK_EQ_INT(fsdp_dtype_is_float(rows[i].dtype), rows[i].is_float);
        CHECK_EQ_STR(fsdp_dtype_name(rows[i].dtype), rows[i].name);
    }
    CHECK_EQ_STR(fsdp_status_name(FSDP_OK), "FSDP_OK");
    CHECK_EQ_STR(fsdp_status_name(FSDP_ERR_TIMEOUT), "FSDP_ERR_TIMEOUT");
    CHECK_EQ_STR(fsdp_status_name((fsdp_status)13), "FSDP_?");
    for (int s = 0; s <= 12; s++) {
        CHECK(strncmp(fsdp_status_name((fsdp_status)s), s ? "FSDP_ERR_" : "FSDP_OK", s ? 9 : 7) ==
              0);
        CHECK(fsdp_status_text((fsdp_status)s)[0] != 0);
    }
    CHECK_EQ_STR(fsdp_status_text((fsdp_status)15), "no such status");
}

TEST(dtype, convert_refuses) {
    static const fsdp_dtype bad[] = {FSDP_DTYPE_KEEP, FSDP_DTYPE_COUNT, -1, 1000};
    char a[64], b[64], before[64];
    memset(a, 5, sizeof a);
    memset(b, 6, sizeof b);
    memcpy(before, a, sizeof a);
    for (int i = 0; i < 4; i++) {
        CHECK_STATUS(fsdp_convert(a, bad[i], b, FSDP_F32, 1), FSDP_ERR_INVALID_ARG);
        CHECK_STATUS(fsdp_convert(a, FSDP_F32, b, bad[i], 1), FSDP_ERR_INVALID_ARG);
        CHECK_STATUS(fsdp_convert(a, bad[i], b, bad[i], 0), FSDP_ERR_INVALID_ARG);
    }
    CHECK_STATUS(fsdp_convert(a, FSDP_F32, b, FSDP_F32, -1), FSDP_ERR_INVALID_ARG);
    CHECK_STATUS(fsdp_convert(a, FSDP_BF16, b, FSDP_F32, INT64_MIN), FSDP_ERR_INVALID_ARG);
    CHECK_STATUS(fsdp_convert(NULL, FSDP_BF16, b, FSDP_F32, 1), FSDP_ERR_INVALID_ARG);
    CHECK_STATUS(fsdp_convert(a, FSDP_BF16, NULL, FSDP_F32, 1), FSDP_ERR_INVALID_ARG);
    CHECK_OK(fsdp_convert(NULL, FSDP_BF16, NULL, FSDP_F32, 0));
    for (fsdp_dtype x = 1; x < FSDP_DTYPE_COUNT; x++)
        for (fsdp_dtype y = 1; y < FSDP_DTYPE_COUNT; y++) {
            int fine = x == y || (fsdp_dtype_is_float(x) && fsdp_dtype_is_float(y));
            CHECK_STATUS(fsdp_convert(a, x, b, y, 0), fine ? FSDP_OK : FSDP_ERR_INVALID_ARG);
            if (!fine) CHECK_STATUS(fsdp_convert(a, x, b, y, 1), FSDP_ERR_INVALID_ARG);
        }
    CHECK_EQ_MEM(a, before, sizeof a);
    for (fsdp_dtype x = 1; x < FSDP_DTYPE_COUNT;
         x++) { /* equal types are copied, also onto themselves */
        memset(a, 5, sizeof a);
        CHECK_OK(fsdp_convert(a, x, b, x, 7));
        CHECK_EQ_MEM(a, b, 7 * fsdp_dtype_size(x));
        CHECK(a[7 * fsdp_dtype_size(x)] == 5);
        CHECK_OK(fsdp_convert(b, x, b, x, 7));
    }
}

TEST(dtype, casts) {
    float f[3] = {1.5f, -2, 0}, out[3] = {7, 7, 7};
    int32_t n[3] = {1, 2, 3};
    uint16_t h[3] = {9, 9, 9};
    CHECK(fsdp_cast_if_needed(h, FSDP_DTYPE_KEEP, f, FSDP_F32, 3) == f);
    CHECK(fsdp_cast_if_needed(h, FSDP_F32, f, FSDP_F32, 3) == f);
    CHECK(fsdp_cast_if_needed(h, FSDP_I32, n, FSDP_I32, 3) == n);
    CHECK(h[0] == 9 && h[1] == 9 && h[2] == 9);
    CHECK(fsdp_cast_if_needed(h, FSDP_BF16, f, FSDP_F32, 3) == h);
    CHECK(h[0] == 0x3FC0 && h[1] == 0xC000 && h[2] == 0);
    CHECK(fsdp_cast_if_needed(out, FSDP_F32, h, FSDP_BF16, 3) == out);
    CHECK_EQ_MEM(out, f, sizeof f);
    CHECK(fsdp_cast_if_needed(h, FSDP_BF16, n, FSDP_I32, 3) == NULL);
    CHECK(fsdp_cast_if_needed(NULL, FSDP_BF16, f, FSDP_F32, 3) == NULL);
    CHECK(fsdp_cast_if_needed(h, FSDP_BF16, f, FSDP_F32, -1) == NULL);
    CHECK(h[0] == 0x3FC0);
    CHECK(fsdp_cast_floating(h, FSDP_BF16, n, FSDP_I32, 3) == n); /* not floating: passes through */
    CHECK(fsdp_cast_floating(h, FSDP_BF16, n, FSDP_U8, 3) == n);
    CHECK(fsdp_cast_floating(h, FSDP_F16, f, FSDP_F32, 3) == h && h[0] == 0x3E00);
    CHECK(fsdp_cast_floating(h, FSDP_F32, f, FSDP_F32, 3) == f);
    CHECK(fsdp_cast_floating(h, FSDP_DTYPE_KEEP, f, FSDP_F32, 3) == f);
}

/* ---- the reduction --------------------------------------------------------------------------- */

static const fsdp_dtype floats[] = {FSDP_F32, FSDP_F64, FSDP_F16, FSDP_BF16};

static float get32(const void *p, fsdp_dtype dtype, size_t i) {
    uint16_t h;
    if (dtype == FSDP_F32) return ((const float *)p)[i];
    h = ((const uint16_t *)p)[i];
    return lab_from_bits32(model_to_32(&halves[dtype == FSDP_BF16], h));
}
static double get64(const void *p, fsdp_dtype dtype, size_t i) {
    return dtype == FSDP_F64 ? ((const double *)p)[i] : (double)get32(p, dtype, i);
}
static unsigned nearest_signed(fsdp_dtype dtype, double x) {
    return (x < 0 ? 0x8000u : 0) | nearest(&halves[dtype == FSDP_BF16], x < 0 ? -x : x);
}

/* Reduces one element, one operation at a time; each result is rounded because it is volatile. */
static void reduce_one(void *dst, fsdp_dtype dst_dtype, const char *const *srcs, int num_srcs,
                       fsdp_dtype dtype, size_t i, double scale, int accumulate, fsdp_redop redop) {
    volatile double acc64 = get64(srcs[0], dtype, i), x64;
    volatile float acc32 = dtype == FSDP_F64 ? 0 : get32(srcs[0], dtype, i), x32;
    int wide = dtype == FSDP_F64 || dst_dtype == FSDP_F64;
    for (int k = 1; k < num_srcs; k++) {
        x64 = get64(srcs[k], dtype, i);
        x32 = dtype == FSDP_F64 ? 0 : get32(srcs[k], dtype, i);
        if (redop == FSDP_SUM) acc64 = acc64 + x64, acc32 = acc32 + x32;
        else if (redop == FSDP_MAX ? x64 > acc64 : x64 < acc64) acc64 = x64, acc32 = x32;
    }
    acc64 = acc64 * scale, acc32 = acc32 * (float)scale;
    if (accumulate) {
        x64 = get64(dst, dst_dtype, i);
        x32 = dst_dtype == FSDP_F64 ? 0 : get32(dst, dst_dtype, i);
        acc64 = x64 + acc64, acc32 = x32 + acc32;
    }
    if (dst_dtype == FSDP_F64) ((double *)dst)[i] = acc64;
    else if (dst_dtype == FSDP_F32) ((float *)dst)[i] = wide ? (float)acc64 : acc32;
    else ((uint16_t *)dst)[i] = (uint16_t)nearest_signed(dst_dtype, wide ? acc64 : (double)acc32);
}

/* Fills in random numbers of all sizes that stay finite and normal. */
static void fill_random(void *p, fsdp_dtype dtype, size_t count, uint64_t *rng) {
    for (size_t i = 0; i < count; i++) {
        uint64_t r = h_rand64(rng);
        double x = ldexp((double)(int64_t)(r >> 20) + 1, -44 - (int)(r % 12)) * (r & 4096 ? 1 : -1);
        if (dtype == FSDP_F64) ((double *)p)[i] = x;
        else if (dtype == FSDP_F32) ((float *)p)[i] = (float)x;
        else ((uint16_t *)p)[i] = (uint16_t)nearest_signed(dtype, x);
    }
}

enum { MOST = 2500, SRCS = 5, PAD = 16 };

TEST(dtype, reduce) {
    static const size_t counts[] = {0, 1, 7, 1023, 1024, 1025, MOST};
    static const double scales[] = {1, 0.25, 1.0 / 3};
    static char src[SRCS][MOST * 8], got[MOST * 8 + PAD], want[MOST * 8 + PAD];
    static char before[4][MOST * 8];
    const char *srcs[SRCS];
    uint64_t rng = h_seed();
    int64_t runs = 0;
    for (int b = 0; b < 4; b++) fill_random(before[b], floats[b], MOST, &rng);
    for (int k = 0; k < SRCS; k++) srcs[k] = src[k];
    for (int a = 0; a < 4; a++) {
        for (int k = 0; k < SRCS; k++) fill_random(src[k], floats[a], MOST, &rng);
        for (int run = 0; run < 4 * 7 * 3 * 2 * SRCS * 3; run++) {
            int r = run;
            fsdp_dtype to = floats[r % 4];
            size_t count = counts[(r /= 4) % 7], size = fsdp_dtype_size(to);
            double scale = scales[(r /= 7) % 3];
            int accumulate = (r /= 3) % 2, num = (r /= 2) % SRCS + 1;
            fsdp_redop redop = (r / SRCS) % 3;
            memset(got, 0x5A, sizeof got);
            memcpy(got, before[run % 4], MOST * size);
            memcpy(want, got, sizeof got);
            fsdpi_reduce(got, to, srcs, num, floats[a], count, scale, accumulate, redop);
            for (size_t i = 0; i < count; i++)
                reduce_one(want, to, srcs, num, floats[a], i, scale, accumulate, redop);
            if (memcmp(got, want, sizeof got) != 0)
                h_fail(H_HERE("reduce"),
                       "%d x %s -> %s, %zu elements, scale %g, accumulate %d, op %d", num,
                       fsdp_dtype_name(floats[a]), fsdp_dtype_name(to), count, scale, accumulate,
                       (int)redop);
            if (count <= 7) { /* one call per element gives the same bits */
                for (size_t i = 0; i < count; i++) {
                    const char *one[SRCS];
                    for (int k = 0; k < num; k++) one[k] = src[k] + i * fsdp_dtype_size(floats[a]);
                    memcpy(want + MOST * 8, got + i * size, size);
                    if (!accumulate) {
                        fsdpi_reduce(want, to, one, num, floats[a], 1, scale, 0, redop);
                        CHECK_EQ_MEM(want, want + MOST * 8, size);
                    }
                }
            }
            runs++;
        }
    }
    h_message("%lld combinations of types, counts, scales and operations", (long long)runs);
}

/* Blocks of any size from any element on give the bits of one call. */
TEST(dtype, reduce_in_pieces) {
    static char src[3][MOST * 8], whole[MOST * 8], pieces[MOST * 8];
    uint64_t rng = h_seed();
    for (int a = 0; a < 4; a++)
        for (int b = 0; b < 4; b++)
            for (int accumulate = 0; accumulate < 2; accumulate++) {
                size_t in = fsdp_dtype_size(floats[a]), out = fsdp_dtype_size(floats[b]);
                const char *srcs[3] = {src[0], src[1], src[2]}, *part[3];
                for (int k = 0; k < 3; k++) fill_random(src[k], floats[a], MOST, &rng);
                fill_random(whole, floats[b], MOST, &rng);
                memcpy(pieces, whole, sizeof whole);
                fsdpi_reduce(whole, floats[b], srcs, 3, floats[a], MOST, 0.3, accumulate, FSDP_SUM);
                for (size_t at = 0, n; at < MOST; at += n) {
                    n = 1 + (size_t)(h_rand64(&rng) % 300);
                    if (n > MOST - at) n = MOST - at;
                    for (int k = 0; k < 3; k++) part[k] = src[k] + at * in;
                    fsdpi_reduce(pieces + at * out, floats[b], part, 3, floats[a], n, 0.3,
                                 accumulate, FSDP_SUM);
                }
                CHECK_EQ_MEM(whole, pieces, MOST * out);
            }
}

/* Returns a pattern of any kind: zeros, subnormals, numbers of all sizes, infinities, quiet and
   signalling NaNs, of both signs. */
static uint32_t any_pattern(fsdp_dtype dtype, uint64_t *rng) {
    uint64_t r = h_rand64(rng);
    int mant = dtype == FSDP_F32 ? 23 : halves[dtype == FSDP_BF16].mant_bits;
    uint32_t bits = dtype == FSDP_F32 ? 32 : 16, exps = (1u << (bits - 1 - (unsigned)mant)) - 1;
    uint32_t exp = (r & 15) == 0   ? 0
                   : (r & 15) == 1 ? exps
                   : (r & 1)       ? exps / 2 + (uint32_t)(r >> 8) % 8
                                   : (uint32_t)(r >> 8) % exps;
    uint32_t low = (r & 48) == 0 ? 0 : (uint32_t)(r >> 16) & ((1u << mant) - 1);
    return (uint32_t)(r >> 63) << (bits - 1) | exp << mant | low;
}
static void fill_any(char *p, fsdp_dtype dtype, size_t count, uint64_t *rng) {
    for (size_t i = 0; i < count; i++) {
        uint32_t u = any_pattern(dtype, rng);
        uint16_t h = (uint16_t)u;
        if (dtype == FSDP_F32) memcpy(p + i * 4, &u, 4);
        else memcpy(p + i * 2, &h, 2);
    }
}

/* Reduces with the reference loop, without the fast loops. */
static void reduce_by_blocks(char *dst, fsdp_dtype to, const char *const *srcs, int num,
                             fsdp_dtype from, size_t count, float scale, int accumulate) {
    const char *block[FSDPI_MAX_SRCS];
    for (size_t at = 0; at < count; at += FSDPI_BLOCK) {
        size_t n = count - at < FSDPI_BLOCK ? count - at : FSDPI_BLOCK;
        for (int k = 0; k < num; k++) block[k] = srcs[k] + at * fsdp_dtype_size(from);
        fsdpi_reduce_block(dst + at * fsdp_dtype_size(to), to, block, num, from, n, (double)scale,
                           accumulate, FSDP_SUM, 0);
    }
}

static int is_finite_at(const char *p, fsdp_dtype dtype, size_t i) {
    uint32_t u;
    uint16_t h;
    memcpy(&u, p + i * 4 * (dtype == FSDP_F32), 4);
    memcpy(&h, p + i * 2 * (dtype != FSDP_F32), 2);
    if (dtype == FSDP_F32) return (u & 0x7F800000u) != 0x7F800000u;
    return (h & infinity_of(&halves[dtype == FSDP_BF16])) != infinity_of(&halves[dtype == FSDP_BF16]);
}
static int is_nan_at(const char *p, fsdp_dtype dtype, size_t i) {
    float x = get32(p, dtype, i);
    return (lab_bits32(x) & 0x7FFFFFFFu) > 0x7F800000u;
}

enum { LONGEST = 1100, SOURCES = 19, ROOM = LONGEST * 4 + 64 };
static const fsdp_dtype narrow_floats[] = {FSDP_F32, FSDP_F16, FSDP_BF16};

/* Compares with the reference for every combination of dtypes, number of sources, scale and
   accumulate, at lengths around vectors and blocks, at each alignment, in place and not. If an
   element has several NaNs or infinities, the payload of the NaN depends on the compiler's order
   of the two operands of an addition, in the reference, too; then both must be NaN. */
TEST(dtype, loops_have_the_bits_of_the_blocks) {
    static char src[SOURCES][ROOM], got[ROOM], want[ROOM], before[ROOM];
    static const size_t counts[] = {0, 1, 15, 16, 17, 31, 32, 48, 511, 512, 513, 528, 1024, LONGEST};
    static const double scales[] = {1, 0.25, 1.0 / 3, -2, 1 + 1e-12}; /* as an f32 the last is 1 */
    uint64_t rng = h_seed();
    int64_t runs = 0, several = 0;
    for (int pair = 0; pair < 9; pair++)
        for (int num = 1; num <= SOURCES; num++)
            for (int mode = 0; mode < 10; mode++) {
                fsdp_dtype from = narrow_floats[pair / 3], to = narrow_floats[pair % 3];
                size_t in = fsdp_dtype_size(from), out = fsdp_dtype_size(to);
                size_t count = counts[(size_t)runs % (sizeof counts / sizeof *counts)];
                double scale = scales[mode % 5];
                int is_one = scale == 1 || (mode % 5 == 4 && from == FSDP_F32);
                const char *srcs[SOURCES];
                int accumulate = mode / 5, which = from == to && num > 1 && runs % 3 == 0;
                for (int k = 0; k < num; k++) {
                    char *at = src[k] + in * (size_t)(h_rand64(&rng) % 16);
                    fill_any(at, from, count, &rng);
                    srcs[k] = at;
                }
                size_t shift = out * (size_t)(h_rand64(&rng) % 16);
                memset(got, 0x5A, sizeof got);
                fill_any(got + shift, to, count, &rng);
                if (which) memcpy(got + shift, srcs[num / 2], count * in);
                memcpy(before, got + shift, count * out);
                memcpy(want, got, sizeof got);
                if (from == to && num == 1 && is_one && !accumulate) /* a copy changes no bit */
                    memcpy(want + shift, srcs[0], count * in);
                else
                    reduce_by_blocks(want + shift, to, srcs, num, from, count, (float)scale,
                                     accumulate);
                const char *kept = srcs[num / 2];
                if (which) srcs[num / 2] = got + shift; /* in place */
                fsdpi_reduce(got + shift, to, srcs, num, from, count, scale, accumulate, FSDP_SUM);
                srcs[num / 2] = kept;
                for (size_t i = 0; i < count; i++) {
                    int finite = !accumulate || is_finite_at(before, to, i);
                    char *g = got + shift + i * out, *w = want + shift + i * out;
                    for (int k = 0; k < num; k++) finite += is_finite_at(srcs[k], from, i);
                    if (finite >= num || memcmp(g, w, out) == 0) several += finite < num;
                    else if (is_nan_at(g, to, 0) && is_nan_at(w, to, 0)) memcpy(g, w, out), several++;
                }
                if (memcmp(got, want, sizeof got) != 0) {
                    size_t i = 0;
                    while (got[i] == want[i]) i++;
                    h_fail(H_HERE("loops"),
                           "%d x %s -> %s, %zu elements, scale %g, accumulate %d, in place %d: "
                           "element %lld differs",
                           num, fsdp_dtype_name(from), fsdp_dtype_name(to), count, scale,
                           accumulate, which, (long long)((i - shift) / out));
                }
                runs++;
            }
    h_message("%lld runs, %lld elements with several that are not finite", (long long)runs,
              (long long)several);
}

/* Compares the code for any processor of the architecture with the code for wide vectors. */
TEST(dtype, loops_of_every_processor) {
    static char src[8][ROOM], base[ROOM], wide[ROOM];
    static const struct {
        fsdp_dtype from, to;
        int num;
    } rows[] = {{FSDP_F32, FSDP_F32, 1},  {FSDP_F32, FSDP_F32, 2},   {FSDP_F32, FSDP_F32, 3},
                {FSDP_F32, FSDP_F32, 4},  {FSDP_F32, FSDP_F32, 8},   {FSDP_BF16, FSDP_F32, 1},
                {FSDP_BF16, FSDP_F32, 2}, {FSDP_BF16, FSDP_F32, 3},  {FSDP_BF16, FSDP_F32, 4},
                {FSDP_BF16, FSDP_F32, 8}, {FSDP_F16, FSDP_F32, 1},   {FSDP_F32, FSDP_F16, 1},
                {FSDP_F32, FSDP_BF16, 1}};
    enum { COUNT = 1024 };
    uint64_t rng = h_seed();
    if (!fsdpi_has_wide()) SKIP("this build or this processor has no second set of loops");
    for (size_t r = 0; r < sizeof rows / sizeof *rows; r++) {
        const char *srcs[8];
        for (int k = 0; k < 8; k++) {
            fill_any(src[k], rows[r].from, COUNT, &rng);
            srcs[k] = src[k];
        }
        for (size_t i = 0; i < COUNT && rows[r].num > 1; i++) /* one NaN at most: see above */
            for (int k = 0, finite = 1; k < rows[r].num; k++) {
                if (!finite) memset(src[k] + i * fsdp_dtype_size(rows[r].from), 0, 2);
                if (!finite && rows[r].from == FSDP_F32) memset(src[k] + i * 4, 0, 4);
                finite &= is_finite_at(src[k], rows[r].from, i);
            }
        fsdpi_loop_base(base, rows[r].to, srcs, rows[r].num, rows[r].from, COUNT, 1.0f / 3);
        fsdpi_loop_wide(wide, rows[r].to, srcs, rows[r].num, rows[r].from, COUNT, 1.0f / 3);
        CHECK_MSG(memcmp(base, wide, COUNT * fsdp_dtype_size(rows[r].to)) == 0, "row %zu", r);
    }
}

/* Results so large that they bypass the caches, and the largest length that does not: each
   number of sources, to destinations with and without the alignment for that, also into the
   first source. */
TEST(dtype, results_around_the_caches) {
    static const int nums[] = {1, 2, 3, 5, 8, 9};
    enum { NUM = 9, ELEMENTS = FSDPI_STREAM / 2 + 5000, BYTES = ELEMENTS * 4 };
    char *src[NUM], *room = (char *)malloc(BYTES), *want = (char *)malloc(BYTES);
    uint64_t rng = h_seed();
    for (int k = 0; k < NUM; k++) src[k] = (char *)malloc(BYTES);
    for (int run = 0; run < 9 * 6 * 5; run++) {
        fsdp_dtype from = narrow_floats[run / 90], to = narrow_floats[run / 30 % 3];
        size_t in = fsdp_dtype_size(from), out = fsdp_dtype_size(to);
        int num = nums[run / 5 % 6], mode = run % 5;
        size_t least = FSDPI_STREAM / out, shift = mode == 1 ? out : 0;
        size_t count = mode == 4 ? least - 1 : least + (size_t)(h_rand64(&rng) % 4900);
        int accumulate = mode == 2, in_place = mode == 3 && from == to && num > 1;
        const char *srcs[NUM];
        for (int k = 0; k < NUM; k++) srcs[k] = src[k];
        for (int k = 0; k < NUM && run % 90 == 0; k++)
            for (size_t i = 0; i < ELEMENTS; i++) {
                float x = (float)((int32_t)h_rand64(&rng) % 4096) / 16;
                uint16_t h = from == FSDP_F16 ? fsdpi_f32_to_f16(x) : fsdpi_f32_to_bf16(x);
                if (from == FSDP_F32) memcpy(src[k] + i * 4, &x, 4);
                else memcpy(src[k] + i * 2, &h, 2);
            }
        memset(room, 0x3A, BYTES);
        if (in_place) memcpy(room, src[0], count * in);
        memcpy(want, room, BYTES);
        reduce_by_blocks(want + shift, to, srcs, num, from, count, 0.3f, accumulate);
        if (in_place) srcs[0] = room;
        fsdpi_reduce(room + shift, to, srcs, num, from, count, (double)0.3f, accumulate, FSDP_SUM);
        CHECK_MSG(memcmp(room, want, BYTES) == 0, "%d x %s -> %s, %zu elements, mode %d", num,
                  fsdp_dtype_name(from), fsdp_dtype_name(to), count, mode);
    }
    for (int k = 0; k < NUM; k++) free(src[k]);
    free(room);
    free(want);
}

/* MAX and MIN: a NaN of rank 0 stays, NaNs of other ranks are ignored, and of zeros the first
   one stays; also in a program built without support for NaN and signed zeros. */
TEST(dtype, extremes_next_to_nan) {
    static const fsdp_dtype dtypes[] = {FSDP_F64, FSDP_F32, FSDP_F16, FSDP_BF16};
    static const double nan = (double)NAN, rows[][5] = {/* sources; MAX, MIN; NaN: 0 is not */
        {1, nan, 2, 2, 1}, {nan, 1, 2, nan, nan}, {1, 2, nan, 2, 1}, {-0.0, 0, -0.0, -0.0, -0.0},
        {0, -0.0, nan, 0, 0}, {nan, nan, 3, nan, nan}, {-3, nan, nan, -3, -3}};
    enum { MOST_OF_THEM = 70, ROWS = sizeof rows / sizeof *rows };
    for (int n = 0; n < 4 * 2 * MOST_OF_THEM; n++) {
        fsdp_dtype dtype = dtypes[n % 4];
        size_t count = (size_t)n / 8, size = fsdp_dtype_size(dtype);
        int least = n / 4 % 2;
        char src[3][MOST_OF_THEM * 8], got[MOST_OF_THEM * 8];
        const char *srcs[3] = {src[0], src[1], src[2]};
        for (size_t i = 0; i < 3 * count; i++)
            CHECK(!fsdp_convert(src[i % 3] + i / 3 * size, dtype, &rows[i / 3 % ROWS][i % 3], FSDP_F64,
                                1));
        fsdpi_reduce(got, dtype, srcs, 3, dtype, count, 1, 0, least ? FSDP_MIN : FSDP_MAX);
        for (size_t i = 0; i < count; i++) {
            double x, want = rows[i % ROWS][3 + least];
            CHECK(!fsdp_convert(&x, FSDP_F64, got + i * size, dtype, 1));
            int same = fsdpi_is_nan(want) ? fsdpi_is_nan(x) : memcmp(&x, &want, sizeof x) == 0;
            CHECK_MSG(same, "%s of %s, %zu of %zu: %g", least ? "MIN" : "MAX",
                      fsdp_dtype_name(dtype), i, count, x);
        }
    }
}

/* The sum depends on the order of the ranks: rank 0 comes first, the destination last. */
TEST(dtype, rank_order) {
    static const struct {
        float x[4];
        float dst, want;
    } rows[] = {{{16777216, 1, 1, -16777216}, 0, 0},
                {{1, 1, 16777216, -16777216}, 0, 2},
                {{16777216, -16777216, 1, 1}, 0, 2},
                {{1, 1, 1, 1}, 16777216, 16777220}, /* the four are added first */
                {{16777216, 1, 1, 1}, -16777216, 0}};
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        const char *srcs[4];
        float got = rows[i].dst;
        for (int k = 0; k < 4; k++) srcs[k] = (const char *)&rows[i].x[k];
        fsdpi_reduce(&got, FSDP_F32, srcs, 4, FSDP_F32, 1, 1, 1, FSDP_SUM);
        CHECK_MSG(lab_bits32(got) == lab_bits32(rows[i].want), "row %zu: %g", i, (double)got);
    }
    /* bf16 sources are summed in f32 and rounded once */
    uint16_t h[4] = {0x4380 /* 256 */, 0x3F80, 0x3F80, 0x3F80}, out = 0;
    const char *srcs[4];
    for (int k = 0; k < 4; k++) srcs[k] = (const char *)&h[k];
    fsdpi_reduce(&out, FSDP_BF16, srcs, 4, FSDP_BF16, 1, 1, 0, FSDP_SUM);
    CHECK_EQ_INT(out, 0x4382); /* 259 is half way: to even, 260 */
}

TEST(dtype, reduce_in_place) {
    static float x[3][MOST], first[MOST], want[MOST];
    uint64_t rng = h_seed();
    for (int which = 0; which < 3; which++) {
        const char *srcs[3] = {(const char *)x[0], (const char *)x[1], (const char *)x[2]};
        for (int k = 0; k < 3; k++) fill_random(x[k], FSDP_F32, MOST, &rng);
        memcpy(first, x[which], sizeof first);
        memset(want, 0, sizeof want);
        fsdpi_reduce(want, FSDP_F32, srcs, 3, FSDP_F32, MOST, 0.5, 0, FSDP_SUM);
        fsdpi_reduce(x[which], FSDP_F32, srcs, 3, FSDP_F32, MOST, 0.5, 0, FSDP_SUM);
        CHECK_EQ_MEM(x[which], want, sizeof want);
        memcpy(x[which], first, sizeof first); /* scaled onto itself */
        fsdpi_reduce(x[which], FSDP_F32, srcs + which, 1, FSDP_F32, MOST, 0.1, 0, FSDP_SUM);
        for (int i = 0; i < MOST; i++) {
            volatile float scaled = first[i] * 0.1f;
            CHECK(lab_bits32(x[which][i]) == lab_bits32(scaled));
        }
    }
}

/* Infinities and NaN pass through sums; a cast and a scale keep -0. */
TEST(dtype, reduce_special_values) {
    uint32_t in[6] = {0x7F800000u, 0xFF800000u, 0x7FC00001u, 0x80000000u, 0x00000000u, 0x3F800000u};
    uint32_t out[6];
    const char *srcs[2] = {(const char *)in, (const char *)in};
    fsdpi_reduce(out, FSDP_F32, srcs, 1, FSDP_F32, 6, 0.5, 0, FSDP_SUM);
    CHECK(out[0] == 0x7F800000u && out[1] == 0xFF800000u && out[3] == 0x80000000u && out[4] == 0);
    CHECK((out[2] & 0x7FC00000u) == 0x7FC00000u && out[5] == 0x3F000000u);
    fsdpi_reduce(out, FSDP_F32, srcs, 2, FSDP_F32, 6, 1, 0, FSDP_SUM);
    CHECK(out[0] == 0x7F800000u && out[1] == 0xFF800000u && out[3] == 0x80000000u && out[4] == 0);
    CHECK((out[2] & 0x7FC00000u) == 0x7FC00000u && out[5] == 0x40000000u);
    uint32_t turned[2] = {in[1], in[0]}; /* inf - inf */
    srcs[1] = (const char *)turned;
    fsdpi_reduce(out, FSDP_F32, srcs, 2, FSDP_F32, 2, 1, 0, FSDP_SUM);
    CHECK((out[0] & 0x7FC00000u) == 0x7FC00000u && (out[1] & 0x7FC00000u) == 0x7FC00000u);
}

TEST(dtype, reduce_integers) {
    int32_t a[4] = {1, -5, INT32_MAX, 7}, b[4] = {2, 3, 1, INT32_MIN}, out[4];
    int64_t x[3] = {INT64_MAX, -4, 1}, y[3] = {1, 4, 1}, z[3];
    const char *srcs[2] = {(const char *)a, (const char *)b};
    fsdpi_reduce(out, FSDP_I32, srcs, 2, FSDP_I32, 4, 1, 0, FSDP_SUM);
    CHECK(out[0] == 3 && out[1] == -2);
    fsdpi_reduce(out, FSDP_I32, srcs, 2, FSDP_I32, 4, 1, 0, FSDP_MAX);
    CHECK(out[0] == 2 && out[1] == 3 && out[2] == INT32_MAX && out[3] == 7);
    fsdpi_reduce(out, FSDP_I32, srcs, 2, FSDP_I32, 4, 1, 0, FSDP_MIN);
    CHECK(out[0] == 1 && out[1] == -5 && out[2] == 1 && out[3] == INT32_MIN);
    fsdpi_reduce(a, FSDP_I32, srcs, 2, FSDP_I32, 2, 1, 0, FSDP_SUM); /* in place */
    CHECK(a[0] == 3 && a[1] == -2);
    srcs[0] = (const char *)x, srcs[1] = (const char *)y;
    fsdpi_reduce(z, FSDP_I64, srcs, 2, FSDP_I64, 3, 1, 0, FSDP_SUM);
    CHECK(z[0] == INT64_MIN && z[1] == 0 && z[2] == 2); /* its fallback memory */
    fsdpi_reduce(z, FSDP_I64, srcs, 2, FSDP_I64, 3, 1, 0, FSDP_MAX);
    CHECK(z[0] == INT64_MAX && z[1] == 4 && z[2] == 1);
}

TEST(dtype, sum_of_squares) {
    static char buffer[MOST * 8 + 64];
    static const size_t counts[] = {0, 1, 2, 7, 8, 9, 1023, 1024, 1025, 1031, MOST};
    for (int a = 0; a < 4; a++)
        for (size_t c = 0; c < sizeof counts / sizeof *counts; c++)
            for (size_t shift = 0; shift < 5; shift++) { /* the alignment does not matter */
                char *p = buffer + shift * fsdp_dtype_size(floats[a]);
                uint64_t same = h_seed() + c;
                volatile double lanes[8] = {0, 0, 0, 0, 0, 0, 0, 0}, plain = 0;
                fill_random(p, floats[a], counts[c], &same);
                for (size_t i = 0; i < counts[c]; i++) {
                    volatile double square = get64(p, floats[a], i) * get64(p, floats[a], i);
                    lanes[i % 8] = lanes[i % 8] + square;
                    plain = plain + square;
                }
                for (int step = 1; step < 8;
                     step *= 2) /* neighbours first, then pairs, then fours */
                    for (int i = 0; i < 8; i += 2 * step) lanes[i] = lanes[i] + lanes[i + step];
                double got = fsdpi_sum_powers(p, floats[a], counts[c], 2);
                CHECK_MSG(lab_bits(got) == lab_bits(lanes[0]), "%s %zu: %a, not %a",
                          fsdp_dtype_name(floats[a]), counts[c], got, lanes[0]);
                CHECK_NEAR(got, plain, 1e-12 * plain);
            }
    float whole[4000]; /* exact for integers */
    for (int i = 0; i < 4000; i++) whole[i] = (float)(i % 101 - 50);
    double want = 0;
    for (int i = 0; i < 4000; i++) want += (double)((i % 101 - 50) * (i % 101 - 50));
    CHECK(lab_bits(fsdpi_sum_powers(whole, FSDP_F32, 4000, 2)) == lab_bits(want));
    whole[17] = lab_from_bits32(0x7F800000u);
    CHECK(lab_bits(fsdpi_sum_powers(whole, FSDP_F32, 4000, 2)) == 0x7FF0000000000000u);
    whole[18] = lab_from_bits32(0x7FC00000u);
    CHECK(h_non_finite(fsdpi_sum_powers(whole, FSDP_F32, 4000, 2)) == 2);
}
