/* test_cuda_kernels.c - the kernels of backends/fsdp_cuda.cu compared with the CPU code, bit by
   bit, and their index arithmetic with sizes that exceed any memory.

   Without a GPU, where kernels are loops (B: a directory for objects):
       g++ -x c++ -std=c++11 -O2 -ffp-contract=off -Itests/stubs -c backends/fsdp_cuda.cu -o $B/cu.o
       for f in stub_cuda stub_nccl; do
           gcc -std=c99 -O2 -I. -Itests/stubs -c tests/stubs/$f.c -o $B/$f.o; done
       gcc -std=c99 -O2 -I. -Itests -Itests/stubs -o $B/test_cuda_kernels \
           tests/backends/test_cuda_kernels.c $B/cu.o $B/stub_cuda.o $B/stub_nccl.o -lstdc++ -pthread -lm
   On a GPU, where all memory is pinned so that host and device can read it:
       nvcc -O3 -arch=native -c backends/fsdp_cuda.cu -o $B/cu.o
       gcc -std=c99 -O2 -I. -Itests -I$CUDA_HOME/include -o $B/test_cuda_kernels \
           tests/backends/test_cuda_kernels.c $B/cu.o -L$CUDA_HOME/lib64 -lcudart -lstdc++ -pthread -lm

   SPDX-License-Identifier: MIT */
#define TAGS NO(SHM) | STUB | STUB_ASAN | GPU
#include "harness.h"
#include "library.c"
#include "lab.h"
#include "backends/fsdp_cuda_kernels.h"
#include <cuda_runtime_api.h>
#include <math.h> /* fabs, pow */
#ifdef FSDP_CUDA_EMULATION
#include "stubs/stub.h"
#endif

enum { ROOM = 1 << 14, PAGE = 4096 }; /* ROOM: bytes on each side of a copy */
static const fsdp_dtype floats[] = {FSDP_F32, FSDP_F64, FSDP_F16, FSDP_BF16};

/* ---- memory and numbers ---------------------------------------------------------------------- */

/* Returns memory. Where the kernels are emulated, an access after its end faults. */
static void *memory(size_t nbytes) {
    void *ptr = NULL;
#ifdef FSDP_CUDA_EMULATION
    size_t whole = (nbytes + PAGE - 1) / PAGE * PAGE;
    char *base = (char *)mmap(NULL, whole + PAGE, PROT_READ | PROT_WRITE,
                              MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    CHECK(base != (char *)MAP_FAILED && !mprotect(base + whole, PAGE, PROT_NONE));
    stub_set(STUB_SYNC, 1);
    ptr = base;
#else
    CHECK_EQ_INT(cudaMallocHost(&ptr, nbytes), 0);
#endif
    return ptr;
}

static void finish(int error) {
    CHECK_EQ_INT(error, 0);
    CHECK_EQ_INT(cudaDeviceSynchronize(), 0);
}

static void store(void *at, size_t i, fsdp_dtype dtype, double x) {
    (void)fsdp_convert((char *)at + i * fsdp_dtype_size(dtype), dtype, &x, FSDP_F64, 1);
}

static double load(const void *at, size_t i, fsdp_dtype dtype) {
    double x;
    (void)fsdp_convert(&x, FSDP_F64, (const char *)at + i * fsdp_dtype_size(dtype), dtype, 1);
    return x;
}

/* Bit patterns that are special in one dtype, or halfway between two numbers of a smaller one; in
   f64 and f32. */
static const uint64_t special64[] = {
    0x0000000000000000u, 0x8000000000000000u, 0x0000000000000001u, 0x800FFFFFFFFFFFFFu,
    0x7FF0000000000000u, 0xFFF0000000000000u, 0x7FEFFFFFFFFFFFFFu, 0x3FF0000010000000u,
    0x3FF0000030000000u, 0x3FF0000010000001u, 0x3FF0100000000000u, 0x3FF0100000000001u,
    0x3FF0020000000000u, 0x3FF0060000000001u, 0x47EFFFFFF0000000u, 0x47EFFFFFEFFFFFFFu,
    0x36A0000000000000u, 0x3690000000000000u, 0x3690000000000001u, 0x380FFFFFFFFFFFFFu,
    0x40EFFE0000000000u, 0x40EFFDFFFFFFFFFFu, 0x3E60000000000000u, 0x3E70000000000000u,
    0x7FF0000000000001u, 0x7FF8000000000000u, 0xFFF4123456789ABCu, 0x7FFFFFFFFFFFFFFFu};
static const uint32_t special32[] = {
    0x00000000u, 0x80000000u, 0x00000001u, 0x807FFFFFu, 0x7F800000u, 0xFF800000u,
    0x7F7FFFFFu, 0x3F808000u, 0x3F818000u, 0x3F808001u, 0x3F801000u, 0x3F803000u,
    0x3F801001u, 0x477FEFFFu, 0x477FF000u, 0x33000000u, 0x33000001u, 0x387FFFFFu,
    0x38800000u, 0x7F7F7FFFu, 0x7F800001u, 0x7FC00000u, 0xFFA12345u, 0x7FFFFFFFu};
static const uint16_t special16[] = {0x0000, 0x8000, 0x0001, 0x83FF, 0x7C00, 0xFC00,
                                     0x7BFF, 0x7C01, 0x7E00, 0xFD23, 0x7F80, 0xFF80,
                                     0x7F81, 0x7FC0, 0xFFA1, 0x7FFF};
enum { NANS64 = 4, NANS32 = 4 }; /* number of NaNs at the end of each table */

/* Fills with numbers of all kinds. With nans == 0 there is no NaN: if an operation has two, its
   result is either. */
static void fill(void *at, fsdp_dtype dtype, size_t count, int nans, uint64_t *seed) {
    size_t size = fsdp_dtype_size(dtype), n64 = sizeof special64 / sizeof *special64,
           n32 = sizeof special32 / sizeof *special32, n16 = sizeof special16 / sizeof *special16;
    for (size_t i = 0; i < count; i++) {
        uint64_t r = h_rand64(seed), u = h_rand64(seed);
        char *to = (char *)at + i * size;
        double x = ((double)(u >> 12) / 4503599627370496.0 - 0.5) * (r & 64 ? 8 : 1e-3);
        if (fsdp_dtype_is_float(dtype) && (r & 3) > 1) {
            store(at, i, dtype, x);
            continue;
        }
        if ((r & 3) == 1 && size == 8) u = special64[u % (n64 - (nans ? 0 : NANS64))];
        else if ((r & 3) == 1 && size == 4) u = special32[u % (n32 - (nans ? 0 : NANS32))];
        else if ((r & 3) == 1 && size == 2) u = special16[u % n16];
        memcpy(to, &u, size); /* requires little endian */
        if (nans || !fsdp_dtype_is_float(dtype)) continue;
        if (h_non_finite(load(at, i, dtype)) == 2) store(at, i, dtype, 1);
    }
}

/* ---- copies ---------------------------------------------------------------------------------- */

/* Copies as the CPU does. */
static void host_copy(void *dst, fsdp_dtype out, const void *src, fsdp_dtype in,
                      const fsdp_block *blocks, uint32_t num, double scale, int accumulate) {
    fsdp_op op;
    memset(&op, 0, sizeof op);
    op.dtype = (uint8_t)in, op.out_dtype = (uint8_t)out;
    op.src_ptr = src, op.dst_ptr = dst;
    op.list = blocks, op.list_count = num;
    op.scale = scale, op.accumulate = (uint8_t)accumulate;
    CHECK_OK(fsdpi_host_copy(NULL, NULL, &op));
}

/* Copies without the library's loops: one element at a time, one row and column at a time. */
static void slow_copy(void *dst, fsdp_dtype out, const void *src, fsdp_dtype in,
                      const fsdp_block *blocks, uint32_t num, double scale, int accumulate) {
    for (const fsdp_block *b = blocks; b < blocks + num; b++)
        for (int64_t row = 0; row < b->height; row++)
            for (int64_t i = 0; i < b->width; i++) {
                int64_t from = b->src + row * b->src_pitch + i,
                        to = b->dst + row * b->dst_pitch + i;
                const char *one = (const char *)src + (size_t)from * fsdp_dtype_size(in);
                fsdpi_reduce((char *)dst + (size_t)to * fsdp_dtype_size(out), out, &one, 1, in, 1,
                             scale, accumulate, FSDP_SUM);
            }
}

typedef struct {
    char *src, *dst, *expected; /* ROOM bytes each */
    fsdp_dtype in, out;
    double scale;
    int accumulate;
} copying;

static copying copying_new(fsdp_dtype in, fsdp_dtype out) {
    copying c = {NULL, NULL, NULL, 0, 0, 1, 0};
    c.src = (char *)memory(ROOM), c.dst = (char *)memory(ROOM), c.expected = (char *)memory(ROOM);
    c.in = in, c.out = out;
    return c;
}

/* Runs a list on both sides and compares all of dst. at_end: src and dst end where their memory
   ends. */
static void compare(const copying *c, const fsdp_block *blocks, uint32_t num, int at_end,
                    const char *old) {
    int64_t last_src = 0, last_dst = 0;
    for (uint32_t i = 0; i < num; i++) {
        const fsdp_block *b = &blocks[i];
        int64_t src = b->src + (b->height - 1) * b->src_pitch + b->width;
        int64_t dst = b->dst + (b->height - 1) * b->dst_pitch + b->width;
        if (src > last_src) last_src = src;
        if (dst > last_dst) last_dst = dst;
    }
    size_t in = fsdp_dtype_size(c->in), out = fsdp_dtype_size(c->out);
    size_t skip_src = at_end ? ROOM - (size_t)last_src * in : 0;
    size_t skip_dst = at_end ? ROOM - (size_t)last_dst * out : 0;
    memcpy(c->dst, old, ROOM);
    memcpy(c->expected, old, ROOM);
    host_copy(c->expected + skip_dst, c->out, c->src + skip_src, c->in, blocks, num, c->scale,
              c->accumulate);
    finish(fsdp_cuda_copy(NULL, c->dst + skip_dst, c->out, c->src + skip_src, c->in, blocks, num,
                          c->scale, c->accumulate));
    if (!memcmp(c->dst, c->expected, ROOM)) return;
    const fsdp_block *b = blocks;
    h_message(
        "%s -> %s, scale %g, accumulate %d, at the end %d, %u blocks; the first: src %d, dst %d, "
        "%d x %d, pitches %d and %d",
        fsdp_dtype_name(c->in), fsdp_dtype_name(c->out), c->scale, c->accumulate, at_end, num,
        (int)b->src, (int)b->dst, (int)b->height, (int)b->width, (int)b->src_pitch,
        (int)b->dst_pitch);
    CHECK_EQ_MEM(c->dst, c->expected, ROOM);
}

static const double scales[] = {1, 0.5, 1.0 / 3, -3.7, 0, 1e-40, 1 + 1e-12, 1e30, HUGE_VAL};

/* Rows of every width at every pair of offsets. Row count, pitches, scale and accumulate vary.
   num_scales == 1: a copy of bytes. */
static void every_row(fsdp_dtype in, fsdp_dtype out, size_t num_scales) {
    uint64_t seed = h_seed() * 1000 + (uint64_t)(in * 10 + out);
    copying c = copying_new(in, out);
    char *old = (char *)memory(ROOM);
    fill(c.src, in, ROOM / fsdp_dtype_size(in), 1, &seed);
    fill(old, out, ROOM / fsdp_dtype_size(out), 0, &seed);
    for (int src = 0; src < 18; src++)
        for (int dst = 0; dst < 18; dst++)
            for (int width = 0; width <= 70; width++) {
                uint64_t r = h_rand64(&seed);
                fsdp_block b = {src, dst, width, 1 + (int64_t)(r & 3), width, width};
                unsigned pitch = (unsigned)(r >> 2 & 3);
                if (pitch == 1) b.src_pitch += (int64_t)(r >> 8 & 15);
                if (pitch == 2) b.dst_pitch += (int64_t)(r >> 8 & 15);
                if (pitch == 3) b.src_pitch = r & 128 ? 0 : 80, b.dst_pitch = 96;
                c.scale = scales[(r >> 16) % num_scales];
                c.accumulate = num_scales > 1 && (r >> 24 & 1);
                compare(&c, &b, 1, r >> 25 & 1, old);
            }
}

static const struct {
    const char *name;
    fsdp_dtype dtype;
} rows_of[] = {{"f32", FSDP_F32}, {"f64", FSDP_F64}, {"f16", FSDP_F16}, {"bf16", FSDP_BF16}};

TEST_P(copy, every_row_to, rows_of, AT_NIGHT(STUB_ASAN)) {
    for (int i = 0; i < 4; i++) every_row(floats[i], row->dtype, sizeof scales / sizeof *scales);
}

TEST(copy, every_row_of_bytes) {
    for (fsdp_dtype d = 1; d < FSDP_DTYPE_COUNT; d++) every_row(d, d, 1);
}

/* Fills in a list of blocks that do not overlap in dst, at other offsets in src. */
static uint32_t random_list(fsdp_block *blocks, uint32_t num, int64_t room_src, int64_t room_dst,
                            uint64_t *seed) {
    int64_t dst = (int64_t)(h_rand64(seed) % 5);
    int64_t most = (room_src < room_dst ? room_src : room_dst) / ((int64_t)num + 1);
    for (uint32_t i = 0; i < num; i++) {
        uint64_t r = h_rand64(seed);
        fsdp_block b = {0, dst + (int64_t)(r & 1), 0, 0, 0, 0};
        b.height = (int64_t)(r >> 4 & 3);
        b.dst_pitch = (most - 1) / (b.height ? b.height : 1);
        b.width = b.dst_pitch ? (int64_t)(r >> 8) % (b.dst_pitch + 1) : 0;
        if (b.width < 0) b.width = -b.width;
        if (r & 2) b.dst_pitch = b.width;
        b.src_pitch = r & 4 ? b.width : (int64_t)(r >> 40 & 31);
        int64_t extent = (b.height ? b.height - 1 : 0) * b.src_pitch + b.width;
        b.src = (int64_t)(h_rand64(seed) >> 8) % (room_src - extent + 1);
        blocks[i] = b;
        dst += most;
    }
    return num;
}

TEST(copy, lists_of_blocks) {
    static const uint32_t nums[] = {0, 1, 2, 24, 25, 453, 454, 600};
    static fsdp_block blocks[600];
    uint64_t seed = h_seed();
    char *old = (char *)memory(ROOM), *slow = (char *)memory(ROOM);
    for (int k = 0; k < 16; k++) {
        copying c = copying_new(floats[k / 4], floats[k % 4]);
        int64_t in = (int64_t)fsdp_dtype_size(c.in), out = (int64_t)fsdp_dtype_size(c.out);
        fill(c.src, c.in, (size_t)(ROOM / in), 1, &seed);
        fill(old, c.out, (size_t)(ROOM / out), 0, &seed);
        for (size_t n = 0; n < 8 * 6; n++) {
            uint32_t num = random_list(blocks, nums[n % 8], ROOM / in, ROOM / out, &seed);
            c.scale = n < 16 ? 1 : scales[n % 9];
            c.accumulate = n / 8 % 2;
            compare(&c, blocks, num, 0, old);
            memcpy(slow, old, ROOM);
            slow_copy(slow, c.out, c.src, c.in, blocks, num, c.scale, c.accumulate);
            CHECK_EQ_MEM(c.dst, slow, ROOM);
        }
    }
}

TEST(copy, in_place) {
    uint64_t seed = h_seed();
    for (int k = 0; k < 4; k++) {
        copying c = copying_new(floats[k], floats[k]);
        size_t size = fsdp_dtype_size(c.in);
        for (int n = 0; n < 2000; n++) {
            uint64_t r = h_rand64(&seed);
            fsdp_block b = {(int64_t)(r & 15),          0,   (int64_t)(r >> 4 & 255),
                            1 + (int64_t)(r >> 12 & 3), 256, 256};
            b.dst = b.src;
            fill(c.dst, c.in, ROOM / size / 4, 1, &seed);
            memcpy(c.expected, c.dst, ROOM);
            double scale = scales[(r >> 16) % 9];
            host_copy(c.expected, c.in, c.expected, c.in, &b, 1, scale, 0);
            finish(fsdp_cuda_copy(NULL, c.dst, c.in, c.dst, c.in, &b, 1, scale, 0));
            CHECK_EQ_MEM(c.dst, c.expected, ROOM);
        }
    }
}

/* Returns 1 if x and y differ by at most the error that fsdp.h states for norms that use `pow`,
   whose last bits depend on the processor: relative, or the smallest number of the dtype. */
static int nearly(double x, double y, fsdp_dtype dtype) {
    const double units[] = {0x1p-22, 0x1p-49, 0x1p-10, 0x1p-7},
                 least[] = {0x1p-149, 0x1p-1074, 0x1p-24, 0x1p-133};
    int k = 0;
    while (floats[k] != dtype) k++;
    if (h_non_finite(x) || h_non_finite(y)) return h_non_finite(x) == h_non_finite(y);
    return fabs(x - y) <= units[k] * fabs(y) || fabs(x - y) <= least[k];
}

static void check_clipped(const copying *c, int is_near) {
    for (size_t i = 0; is_near && i < ROOM / fsdp_dtype_size(c->in); i++) {
        double x = load(c->dst, i, c->in), y = load(c->expected, i, c->in);
        CHECK_MSG(nearly(x, y, c->in), "%s: %.17g, expected %.17g", fsdp_dtype_name(c->in), x, y);
    }
    if (!is_near) CHECK_EQ_MEM(c->dst, c->expected, ROOM);
}

/* Clips with a factor that is computed from memory, also for norms that are small enough or not
   finite. If the norm uses `pow`, the device gets the next larger sum, as if its `pow` had erred.
   */
TEST(copy, clipped) {
    static const double powers[] = {2, 1, 3, 0.5, HUGE_VAL},
                        sums[] = {0, 1e-3, 0.999998, 1, 2, 3.7, 1e30, HUGE_VAL, (double)NAN};
    static fsdp_block blocks[60];
    uint64_t seed = h_seed();
    double *sum = (double *)memory(sizeof *sum);
    int left_alone = 0;
    for (int k = 0; k < 4; k++) {
        copying c = copying_new(floats[k], floats[k]);
        size_t size = fsdp_dtype_size(c.in);
        for (int n = 0; n < 45 * 12; n++) {
            fsdp_op op;
            uint32_t num = (uint32_t)(n / 45 % 3 == 2 ? 60 : n / 45 % 3);
            int64_t room = (int64_t)(ROOM / size) / 61;
            fill(c.dst, c.in, ROOM / size, 1, &seed);
            memcpy(c.expected, c.dst, ROOM);
            for (uint32_t i = 0; i < num; i++) {
                int64_t skip = (int64_t)(h_rand64(&seed) % 16), at = i * room + skip;
                fsdp_block b = {at, at, (int64_t)(h_rand64(&seed) % (uint64_t)(room - skip + 1)),
                                1,  0,  0};
                blocks[i] = b;
            }
            int is_power = n / 9 % 5 == 2 || n / 9 % 5 == 3;
            *sum = sums[n % 9];
            memset(&op, 0, sizeof op);
            op.dtype = op.out_dtype = (uint8_t)c.in;
            op.src_ptr = op.dst_ptr = c.expected;
            op.list = blocks, op.list_count = num;
            op.clip = sum, op.norm_type = powers[n / 9 % 5];
            op.scale = n & 1 ? 1 : 1e-3;
            CHECK_OK(fsdpi_host_copy(NULL, NULL, &op));
            left_alone += num == 60 && !memcmp(c.expected, c.dst, ROOM);
            if (is_power) *sum = nextafter(*sum, HUGE_VAL);
            finish(fsdp_cuda_clip(NULL, c.dst, c.in, blocks, num, op.scale, op.norm_type, sum));
            for (size_t i = 0; n % 9 == 8 && i < ROOM / size; i++) /* any NaN will do */
                if (h_non_finite(load(c.dst, i, c.in)) == 2 &&
                    h_non_finite(load(c.expected, i, c.in)) == 2)
                    store(c.dst, i, c.in, 0), store(c.expected, i, c.in, 0);
            check_clipped(&c, is_power);
        }
        CHECK(fsdp_cuda_clip(NULL, c.dst, FSDP_I32, blocks, 1, 1, 2, sum));
    }
    CHECK_MSG(left_alone > 4 * 30 && left_alone < 4 * 60, "%d", left_alone);
}

/* More tiles than thread blocks: rows of one and three elements, and large rows with unaligned
   ends. */
TEST(copy, many_tiles, AT_NIGHT(STUB_ASAN)) {
    const int64_t count = 17 * 1024 * 1024 + 321;
    uint8_t *src = (uint8_t *)memory((size_t)count + 64),
            *dst = (uint8_t *)memory((size_t)count + 64);
    uint8_t *expected = (uint8_t *)memory((size_t)count + 64);
    fsdp_block blocks[] = {{1, 2, 0, 1, 0, 0},
                           {0, 0, 3, 0, 3, 4},
                           {1, 3, 1, 0, 1, 2},
                           {5, 5, 0, 1, 0, 0},
                           {0, 3, 1000003, 16, 1000004, 1000008}};
    uint64_t seed = h_seed();
    blocks[0].width = blocks[3].width = count;
    blocks[1].height = count / 4, blocks[2].height = count / 2;
    for (int64_t i = 0; i < count + 64; i++) src[i] = (uint8_t)h_rand64(&seed);
    for (size_t k = 0; k < sizeof blocks / sizeof *blocks; k++) {
        memset(dst, 0xA5, (size_t)count + 64);
        memset(expected, 0xA5, (size_t)count + 64);
        host_copy(expected, FSDP_U8, src, FSDP_U8, &blocks[k], 1, 1, 0);
        finish(fsdp_cuda_copy(NULL, dst, FSDP_U8, src, FSDP_U8, &blocks[k], 1, 1, 0));
        CHECK_EQ_MEM(dst, expected, (size_t)count + 64);
    }
}

TEST(copy, what_it_refuses) {
    copying c = copying_new(FSDP_F32, FSDP_F32);
    fsdp_block b = {0, 0, 8, 1, 8, 8};
    memset(c.dst, 0x5A, ROOM);
    memset(c.expected, 0x5A, ROOM);
    CHECK(fsdp_cuda_copy(NULL, c.dst, FSDP_I32, c.src, FSDP_I32, &b, 1, 2.0, 0));
    CHECK(fsdp_cuda_copy(NULL, c.dst, FSDP_I32, c.src, FSDP_I32, &b, 1, 1.0, 1));
    CHECK(fsdp_cuda_copy(NULL, c.dst, FSDP_I32, c.src, FSDP_F32, &b, 1, 1.0, 0));
    CHECK(fsdp_cuda_copy(NULL, c.dst, FSDP_F32, c.src, FSDP_U8, &b, 1, 1.0, 0));
    CHECK(fsdp_cuda_copy(NULL, c.dst, 0, c.src, 0, &b, 1, 1.0, 0));
    CHECK(fsdp_cuda_copy(NULL, c.dst, 99, c.src, 99, &b, 1, 1.0, 0));
    CHECK_EQ_INT(cudaDeviceSynchronize(), 0);
    CHECK_EQ_MEM(c.dst, c.expected, ROOM);
}

#ifdef FSDP_CUDA_EMULATION
/* Rows that lie gigabytes apart. Most of the memory is never touched. */
TEST(copy, far_apart) {
    const int64_t far = ((int64_t)1 << 31) + 24; /* pitch in elements */
    const size_t nbytes = (size_t)far * 4 * 3 + PAGE;
    float *src = (float *)memory(nbytes), *dst = (float *)memory(nbytes);
    fsdp_block b = {3, 1, 21, 3, far, far + 2};
    for (int64_t row = 0; row < 3; row++)
        for (int64_t i = 0; i < 21; i++) src[3 + row * far + i] = (float)(row * 100 + i);
    finish(fsdp_cuda_copy(NULL, dst, FSDP_F32, src, FSDP_F32, &b, 1, 2.0, 1));
    for (int64_t row = 0; row < 3; row++)
        for (int64_t i = -1; i < 22; i++) {
            float x = dst[1 + row * (far + 2) + i];
            CHECK_EQ_INT((int)x, i < 0 || i == 21 ? 0 : 2 * (row * 100 + i));
        }
}

TEST(launch, errors_are_returned) {
    copying c = copying_new(FSDP_F32, FSDP_BF16);
    double *out = (double *)memory(64);
    fsdp_block b[2] = {{0, 0, 8, 1, 8, 8}, {0, 0, 0, 7, 8, 8}};
    for (int nth = 1; nth <= 2; nth++) {
        stub_fail("launch", nth, cudaErrorInvalidValue);
        CHECK_EQ_INT(fsdp_cuda_norm(NULL, out, c.src, FSDP_F32, b, 1, 2, 0, 0, out + 1),
                     cudaErrorInvalidValue);
        CHECK_EQ_INT(stub_failed(), nth);
    }
    stub_fail("launch", 1, cudaErrorInvalidValue);
    CHECK_EQ_INT(fsdp_cuda_copy(NULL, c.dst, FSDP_BF16, c.src, FSDP_F32, b, 1, 1, 0),
                 cudaErrorInvalidValue);
    /* Empty calls launch nothing. */
    int64_t before = stub_count("launch");
    fsdp_update none;
    memset(&none, 0, sizeof none);
    none.kind = FSDP_UPDATE_SGD, none.dtype = none.grad_dtype = FSDP_F32;
    CHECK_EQ_INT(fsdp_cuda_copy(NULL, c.dst, FSDP_BF16, c.src, FSDP_F32, b + 1, 1, 1, 0), 0);
    CHECK_EQ_INT(fsdp_cuda_copy(NULL, c.dst, FSDP_BF16, c.src, FSDP_F32, NULL, 0, 1, 0), 0);
    CHECK_EQ_INT(fsdp_cuda_update(NULL, &none, 1), 0);
    CHECK_EQ_INT(stub_count("launch"), before);
}
#endif

/* ---- norms ----------------------------------------------------------------------------------- */

/* Returns a norm from the device. NaNs around the partial results would show in the result. */
static double norm(const void *src, fsdp_dtype dtype, const fsdp_block *blocks, uint32_t num,
                   double p, int in_pairs, int accumulate, double start) {
    static double *out;
    size_t count = fsdp_cuda_norm_partials(blocks, num);
    if (!out) out = (double *)memory(sizeof(double) * (1 << 20));
    CHECK(count + 2 < 1 << 20);
    memset(out + 1, 0xFF, (count + 1) * sizeof *out);
    out[0] = start;
    finish(fsdp_cuda_norm(NULL, out, src, dtype, blocks, num, p, accumulate, in_pairs, out + 1));
    uint64_t guard;
    memcpy(&guard, &out[1 + count], sizeof guard);
    CHECK_EQ_INT(guard, UINT64_MAX);
    return out[0];
}

static double slow_norm(const void *src, fsdp_dtype dtype, const fsdp_block *blocks, uint32_t num,
                        double p) {
    long double sum = 0;
    double most = 0;
    for (const fsdp_block *b = blocks; b < blocks + num; b++)
        for (int64_t row = 0; row < b->height; row++)
            for (int64_t i = 0; i < b->width; i++) {
                double x = fabs(load(src, (size_t)(b->src + row * b->src_pitch + i), dtype));
                sum += p == 2 ? (long double)x * (long double)x : (long double)pow(x, p);
                if (x > most) most = x;
            }
    return p < HUGE_VAL ? (double)sum : most;
}

static void fill_plain(void *at, fsdp_dtype dtype, size_t count, uint64_t *seed) {
    for (size_t i = 0; i < count; i++)
        store(at, i, dtype, (double)(h_rand64(seed) >> 11) / 4503599627370496.0 - 1);
}

static const struct {
    const char *name;
    double p;
    int in_pairs;
} norms[] = {{"p=2", 2, 0},       {"p=1", 1, 0},        {"p=3", 3, 0},
             {"p=0.5", 0.5, 0},   {"max", HUGE_VAL, 0}, {"p=2/pairs", 2, 1},
             {"p=1/pairs", 1, 1}, {"p=3/pairs", 3, 1},  {"max/pairs", HUGE_VAL, 1}};

/* Compares with a sum in element order. The bits do not depend on the elements' alignment. */
TEST_P(norm, of_one_block, norms) {
    static const int64_t counts[] = {0,    1,    2,    3,    7,     8,     9,     63,   255,
                                     1000, 2048, 4097, 8191, 16383, 16384, 16385, 70001};
    uint64_t seed = h_seed();
    char *values = (char *)memory(8 * 80000), *moved = (char *)memory(8 * 80000);
    for (int k = 0; k < 4; k++) {
        size_t size = fsdp_dtype_size(floats[k]);
        fill_plain(values, floats[k], 80000, &seed);
        for (size_t c = 0; c < sizeof counts / sizeof *counts; c++) {
            fsdp_block b = {0, 0, counts[c], 1, 0, 0};
            double expected = slow_norm(values, floats[k], &b, 1, row->p);
            double first = norm(values, floats[k], &b, 1, row->p, row->in_pairs, 0, 7);
            CHECK_NEAR(first, expected, row->p < HUGE_VAL ? 1e-13 * expected : 0);
            for (b.src = 1; b.src < 18; b.src++) {
                memcpy(moved + (size_t)b.src * size, values, (size_t)counts[c] * size);
                double again = norm(moved, floats[k], &b, 1, row->p, row->in_pairs, 0, 0);
                CHECK_EQ_MEM(&again, &first, sizeof first);
            }
        }
    }
}

/* The bits do not depend on a driver that limits the size of launches, nor on whether elements lie
   in one row or in rows with gaps. Two calls that accumulate come close to one. */
TEST_P(norm, of_lists, norms) {
    static const uint32_t nums[] = {0, 1, 2, 24, 25, 453, 454, 600};
    static fsdp_block blocks[600], rows[600];
    uint64_t seed = h_seed();
    char *values = (char *)memory(8 * 90000), *gaps = (char *)memory(8 * 90000);
    for (int k = 0; k < 4; k++) {
        size_t size = fsdp_dtype_size(floats[k]);
        fill_plain(values, floats[k], 90000, &seed);
        for (size_t n = 0; n < sizeof nums / sizeof *nums; n++) {
            uint32_t num = nums[n], split = num ? (uint32_t)(h_rand64(&seed) % num) : 0;
            int64_t at = 0, longest = num ? 60000 / num : 0;
            for (uint32_t i = 0; i < num; i++) {
                int64_t width = (int64_t)(h_rand64(&seed) % (uint64_t)longest) / 3;
                fsdp_block whole = {at, 0, width * 3, 1, 0, 0};
                fsdp_block three = {at + at / 2, 0, width, 3, width + width / 2, 0};
                blocks[i] = whole, rows[i] = three;
                for (int64_t r = 0; r < 3; r++)
                    memcpy(gaps + (size_t)(three.src + r * three.src_pitch) * size,
                           values + (size_t)(at + r * width) * size, (size_t)width * size);
                at += width * 3;
            }
            double whole = norm(values, floats[k], blocks, num, row->p, row->in_pairs, 0, 3);
            double first = norm(values, floats[k], blocks, split, row->p, row->in_pairs, 0, 3);
            double both = norm(values, floats[k], blocks + split, num - split, row->p,
                               row->in_pairs, 1, first);
            double apart = norm(gaps, floats[k], rows, num, row->p, row->in_pairs, 0, 3);
            double expected = slow_norm(values, floats[k], blocks, num, row->p);
            CHECK_NEAR(whole, expected, row->p < HUGE_VAL ? 1e-13 * expected : 0);
            CHECK_NEAR(both, expected, row->p < HUGE_VAL ? 1e-13 * expected : 0);
            CHECK_EQ_MEM(&apart, &whole, sizeof whole);
#ifdef FSDP_CUDA_EMULATION
            stub_set(STUB_DRIVER_VERSION, 12000);
            double by_few = norm(values, floats[k], blocks, num, row->p, row->in_pairs, 0, 3);
            stub_set(STUB_DRIVER_VERSION, 13000);
            CHECK_EQ_MEM(&by_few, &whole, sizeof whole);
#endif
        }
    }
}

/* With a NaN the maximum is NaN; otherwise an infinity is. Sums are not finite either. */
TEST(norm, not_finite) {
    char *values = (char *)memory(8 * 10000);
    fsdp_block b = {0, 0, 10000, 1, 0, 0};
    uint64_t seed = h_seed();
    for (int k = 0; k < 4; k++)
        for (int n = 0; n < 50; n++) {
            int pairs = n % 2;
            fill_plain(values, floats[k], 10000, &seed);
            size_t at = h_rand64(&seed) % 10000;
            store(values, at, floats[k], -HUGE_VAL);
            CHECK(norm(values, floats[k], &b, 1, HUGE_VAL, pairs, 0, 0) == HUGE_VAL);
            CHECK(norm(values, floats[k], &b, 1, 2, pairs, 0, 0) == HUGE_VAL);
            store(values, (at + 1 + h_rand64(&seed) % 9999) % 10000, floats[k], -(double)NAN);
            CHECK_EQ_INT(h_non_finite(norm(values, floats[k], &b, 1, HUGE_VAL, pairs, 0, 0)), 2);
            CHECK_EQ_INT(h_non_finite(norm(values, floats[k], &b, 1, 2, pairs, 0, 0)), 2);
            CHECK_EQ_INT(
                h_non_finite(norm(values, floats[k], &b, 0, HUGE_VAL, pairs, 1, (double)NAN)), 2);
        }
}

/* More tiles than thread blocks: one row, many times. */
TEST(norm, many_tiles, AT_NIGHT(STUB_ASAN)) {
    char *values = (char *)memory(8 * 8192);
    fsdp_block b = {0, 0, 8191, 16384 + 77, 0, 0};
    uint64_t seed = h_seed();
    fill_plain(values, FSDP_BF16, 8192, &seed);
    fsdp_block once = {0, 0, 8191, 1, 0, 0};
    double expected = slow_norm(values, FSDP_BF16, &once, 1, 2) * (double)b.height;
    for (int pairs = 0; pairs < 2; pairs++)
        CHECK_NEAR(norm(values, FSDP_BF16, &b, 1, 2, pairs, 0, 0), expected, 1e-13 * expected);
}

/* A pair of f32 holds a sum to about 44 bits, one f32 to 24; here the last term is below 24.
   Squares that exceed the range of f32 are summed without pairs. */
TEST(norm, in_pairs) {
    enum { COUNT = 9000 };
    static const float terms[3] = {1, 0x1p-12f, 0x1p-25f};
    static const double sizes[] = {0x1p-148, 0x1p-120, 0x1p-62, 0x1p-41, 0x1p-39,
                                   1,        0x1p59,   0x1p61,  0x1p64,  0x1p126};
    fsdp_block b = {0, 0, 3, 1, 0, 0};
    uint64_t seed = h_seed();
    float *values = (float *)memory(4 * COUNT);
    memcpy(values, terms, sizeof terms);
    CHECK(norm(values, FSDP_F32, &b, 1, 2, 0, 0, 0) == 1 + 0x1p-24 + 0x1p-50);
    CHECK(norm(values, FSDP_F32, &b, 1, 2, 1, 0, 0) == 1 + 0x1p-24);
    b.width = COUNT;
    memset(values, 0, 4 * COUNT);
    CHECK(norm(values, FSDP_F32, &b, 1, 2, 1, 0, 0) == 0);
    for (size_t large = 0; large < sizeof sizes / sizeof *sizes; large++)
        for (size_t small = 0; small <= large; small++)
            for (double p = 1; p <= 2; p++) {
                for (int i = 0; i < COUNT; i++) { /* some threads see large values */
                    double x = (double)(h_rand64(&seed) >> 11) * 0x1p-53;
                    int is_large = h_rand64(&seed) % 64 == 0;
                    values[i] = (float)(x * sizes[is_large ? large : small]);
                }
                double expected = norm(values, FSDP_F32, &b, 1, p, 0, 0, 0);
                CHECK_NEAR(norm(values, FSDP_F32, &b, 1, p, 1, 0, 0), expected, 1e-12 * expected);
            }
}

/* ---- optimizers ------------------------------------------------------------------------------ */

enum { STATES = 4, COUNT_MAX = 6000, ARRAY_BYTES = (COUNT_MAX + 16) * 8 };

/* p, g, m, v of one side; offsets() places each up to 15 elements into its memory. */
typedef struct {
    char *at[STATES];
} arrays;

/* Gives both sides the same values. Random numbers are drawn once per dtype; v is never negative.
   */
static void arrays_fill(arrays *a, arrays *b, const fsdp_dtype *dtypes, uint64_t *seed) {
    static char *pools[2][FSDP_DTYPE_COUNT];
    for (int k = 0; k < STATES; k++) {
        char **pool = &pools[k == 3][dtypes[k]];
        size_t size = fsdp_dtype_size(dtypes[k]);
        if (!*pool) {
            *pool = (char *)memory(2 * ARRAY_BYTES);
            fill_plain(*pool, dtypes[k], 2 * ARRAY_BYTES / size, seed);
            for (size_t i = 0; k == 3 && i < 2 * ARRAY_BYTES / size; i++)
                store(*pool, i, dtypes[k], fabs(load(*pool, i, dtypes[k])));
        }
        if (!a->at[k])
            a->at[k] = (char *)memory(ARRAY_BYTES), b->at[k] = (char *)memory(ARRAY_BYTES);
        memcpy(a->at[k], *pool + h_rand64(seed) % (ARRAY_BYTES / size) * size, ARRAY_BYTES);
        memcpy(b->at[k], a->at[k], ARRAY_BYTES);
    }
}

static void *place(const arrays *a, int k, const fsdp_dtype *dtypes, const int *offset) {
    return a->at[k] + (size_t)offset[k] * fsdp_dtype_size(dtypes[k]);
}

static fsdp_update update_of(int kind, const arrays *a, const fsdp_dtype *dtypes, const int *offset,
                             int64_t count) {
    fsdp_update u;
    memset(&u, 0, sizeof u);
    u.kind = (uint8_t)kind, u.dtype = (uint8_t)dtypes[0], u.grad_dtype = (uint8_t)dtypes[1];
    u.count = count;
    u.param = place(a, 0, dtypes, offset), u.grad = place(a, 1, dtypes, offset);
    u.first = place(a, 2, dtypes, offset), u.second = place(a, 3, dtypes, offset);
    return u;
}

static void arrays_equal(const arrays *a, const arrays *b) {
    for (int k = 0; k < STATES; k++) CHECK_EQ_MEM(a->at[k], b->at[k], ARRAY_BYTES);
}

static const int64_t update_counts[] = {0, 1, 3, 4, 5, 8, 31, 1023, 1029, 4096, COUNT_MAX};

static void offsets(int *offset, uint64_t *seed) {
    uint64_t r = h_rand64(seed);
    for (int k = 0; k < STATES; k++) /* often equal, so that vectors work */
        offset[k] = (int)(r >> (r & 1 ? 8 : 8 + 4 * k) & 15);
}

static void adamw_steps(const fsdp_dtype *dtypes, int64_t count, uint64_t *seed) {
    static const fsdp_adamw_hyper hypers[] = {{1e-3, 0.9, 0.999, 1e-8, 0.01, 0},
                                              {0.3, 0.4, 0.5, 1e-3, 0, 0},
                                              {1e-2, 0, 0, 1e-30, 0.1, 0}};
    static arrays host, device;
    int offset[STATES];
    for (int h = 0; h < 3; h++) {
        fsdp_adamw_hyper hyper = hypers[h];
        arrays_fill(&host, &device, dtypes, seed);
        offsets(offset, seed);
        fsdp_update u = update_of(FSDP_UPDATE_ADAMW, &device, dtypes, offset, count);
        for (hyper.step = 1; hyper.step <= 3; hyper.step++) {
            fsdpi_adamw_scalars k = fsdpi_adamw_prepare(&hyper);
            double scalars[] = {k.decay, k.lerp, k.beta2, k.gain, k.root, k.eps, k.rate};
            memcpy(u.scalars, scalars, sizeof scalars);
            CHECK_OK(fsdp_adamw_update_as(dtypes[0], place(&host, 0, dtypes, offset), dtypes[1],
                                          place(&host, 1, dtypes, offset),
                                          place(&host, 2, dtypes, offset),
                                          place(&host, 3, dtypes, offset), count, &hyper));
            finish(fsdp_cuda_update(NULL, &u, 1));
        }
        arrays_equal(&device, &host);
    }
}

static void sgd_steps(const fsdp_dtype *dtypes, int64_t count, uint64_t *seed) {
    static const fsdp_sgd_hyper hypers[] = {
        {0.1, 0, 0, 0, 0, 0, 0},       {0.1, 0, 0, 0.01, 0, 0, 0},   {0.1, 0.9, 0, 0, 0, 0, 0},
        {0.1, 0.9, 0.2, 0.3, 0, 0, 0}, {0.1, 0.9, 0, 0.01, 1, 0, 0}, {3, 0.7, 0, 0, 1, 0, 0}};
    static arrays host, device;
    int offset[STATES];
    for (int h = 0; h < 6; h++) {
        fsdp_sgd_hyper hyper = hypers[h];
        arrays_fill(&host, &device, dtypes, seed);
        offsets(offset, seed);
        fsdp_update u = update_of(FSDP_UPDATE_SGD, &device, dtypes, offset, count);
        if (hyper.momentum <= 0) u.first = (void *)1; /* the kernel must not read it */
        u.second = (void *)1;
        for (hyper.step = 1; hyper.step <= 3; hyper.step++) {
            double scalars[] = {hyper.lr,           hyper.momentum, 1 - hyper.dampening,
                                hyper.weight_decay, hyper.nesterov, hyper.step <= 1};
            memcpy(u.scalars, scalars, sizeof scalars);
            CHECK_OK(fsdp_sgd_update_as(dtypes[0], place(&host, 0, dtypes, offset), dtypes[1],
                                        place(&host, 1, dtypes, offset),
                                        place(&host, 2, dtypes, offset), count, &hyper));
            finish(fsdp_cuda_update(NULL, &u, 1));
        }
        arrays_equal(&device, &host);
    }
}

static void unscale_one(const fsdp_dtype *dtypes, int64_t count, uint64_t *seed) {
    static const float factors[] = {1.0f / 65536, 1.0f / 3, 2, 1};
    static int32_t *found;
    static arrays host, device;
    int offset[STATES];
    if (!found) found = (int32_t *)memory(sizeof *found);
    for (int n = 0; n < 6; n++) {
        arrays_fill(&host, &device, dtypes, seed);
        offsets(offset, seed);
        fsdp_update u = update_of(FSDP_UPDATE_UNSCALE, &device, dtypes, offset, count);
        char *g = (char *)place(&host, 1, dtypes, offset);
        if (n > 2) fill(g, dtypes[1], (size_t)count, 1, seed); /* includes NaNs */
        size_t at = count ? h_rand64(seed) % (size_t)count : 0;
        if (n == 2 && count) store(g, at, dtypes[1], HUGE_VAL);
        memcpy(u.grad, g, (size_t)count * fsdp_dtype_size(dtypes[1]));
        u.param = u.first = u.second = NULL;
        u.found = found;
        u.scalars[0] = (double)factors[n % 4];
        *found = n == 1;
        int32_t expected = (int32_t)fsdpi_unscale(dtypes[1], g, count, factors[n % 4]) | (n == 1);
        finish(fsdp_cuda_update(NULL, &u, 1));
        CHECK_EQ_INT(*found, expected);
        if (n < 3) CHECK_EQ_INT(expected, n == 1 || (n == 2 && count));
        arrays_equal(&device, &host);
    }
}

/* Averages with weights on both sides of a lerp's switch, a swap and the swap back. A swap keeps
   the bits of the parameter's dtype. */
static void ema_acts(const fsdp_dtype *all, int64_t count, uint64_t *seed) {
    static const double weights[] = {0.001, 0.1, 0.75, 1, 0};
    static const int acts[] = {FSDP_EMA_AVERAGE, FSDP_EMA_SWAP, FSDP_EMA_SWAP_BACK, FSDP_EMA_AVERAGE,
                               FSDP_EMA_COPY};
    const fsdp_dtype dtypes[STATES] = {all[0], all[0], all[2], all[0]};
    static arrays host, device;
    int offset[STATES];
    for (int w = 0; w < 5; w++) {
        arrays_fill(&host, &device, dtypes, seed);
        offsets(offset, seed);
        fsdp_update u = update_of(FSDP_UPDATE_EMA, &device, dtypes, offset, count);
        fsdp_update on_host = update_of(FSDP_UPDATE_EMA, &host, dtypes, offset, count);
        u.grad = on_host.grad = NULL;
        for (int a = 0; a < 5; a++) {
            u.scalars[0] = on_host.scalars[0] = weights[w];
            u.scalars[1] = on_host.scalars[1] = acts[a];
            finish(fsdp_cuda_update(NULL, &u, 1));
            fsdpi_optim_host_update(&on_host);
            arrays_equal(&device, &host);
        }
    }
}

/* Both kinds of Muon updates, compared with fsdpi_optim_host_update. */
static void muon_steps(const fsdp_dtype *dtypes, int64_t count, uint64_t *seed) {
    static const double scalars[][3] = {{0.05, 0.95, 1}, {0.3, 0.7, 0}, {0.998, 0.02, 0}};
    static arrays host, device;
    int offset[STATES];
    if (dtypes[2] == FSDP_F64) return; /* Muon has f32 states only */
    for (int n = 0; n < 3; n++) {
        const int kind = n < 2 ? FSDP_UPDATE_MOMENTUM : FSDP_UPDATE_MUON;
        arrays_fill(&host, &device, dtypes, seed);
        offsets(offset, seed);
        fsdp_update u = update_of(kind, &device, dtypes, offset, count);
        fsdp_update on_host = update_of(kind, &host, dtypes, offset, count);
        memcpy(u.scalars, scalars[n], sizeof scalars[n]);
        memcpy(on_host.scalars, scalars[n], sizeof scalars[n]);
        if (kind == FSDP_UPDATE_MUON) u.first = (void *)1; /* the kernel must not read it */
        u.second = (void *)1;
        for (int step = 0; step < 3; step++) {
            finish(fsdp_cuda_update(NULL, &u, 1));
            fsdpi_optim_host_update(&on_host);
        }
        arrays_equal(&device, &host);
    }
}

/* Divides by a norm, but by at least 0.5. */
static void normalize_one(const fsdp_dtype *dtypes, int64_t count, uint64_t *seed) {
    static const double squares[] = {9.7, 0, 0.24, 0.26};
    static double *norm;
    static arrays host, device;
    int offset[STATES];
    if (!norm) norm = (double *)memory(sizeof *norm);
    for (int n = 0; n < 4; n++) {
        arrays_fill(&host, &device, dtypes, seed);
        offsets(offset, seed);
        fsdp_update u = update_of(FSDP_UPDATE_UNSCALE, &device, dtypes, offset, count);
        fsdp_update on_host = update_of(FSDP_UPDATE_UNSCALE, &host, dtypes, offset, count);
        u.first = on_host.first = norm;
        u.scalars[0] = on_host.scalars[0] = 0.5;
        u.found = on_host.found = NULL;
        *norm = squares[n];
        finish(fsdp_cuda_update(NULL, &u, 1));
        fsdpi_optim_host_update(&on_host);
        arrays_equal(&device, &host);
    }
}

static const struct {
    const char *name;
    void (*steps)(const fsdp_dtype *dtypes, int64_t count, uint64_t *seed);
} updates[] = {{"adamw", adamw_steps},
               {"sgd", sgd_steps},
               {"ema", ema_acts},
               {"muon", muon_steps},
               {"normalize", normalize_one},
               {"unscale", unscale_one}};

TEST_P(update, bits_of_the_cpu, updates) {
    uint64_t seed = h_seed();
    for (int k = 0; k < 16; k++) {
        fsdp_dtype state = floats[k / 4] == FSDP_F64 ? FSDP_F64 : FSDP_F32;
        fsdp_dtype dtypes[STATES] = {floats[k / 4], floats[k % 4], state, state};
        for (size_t c = 0; c < sizeof update_counts / sizeof *update_counts; c++)
            for (int n = 0; n < 3; n++) row->steps(dtypes, update_counts[c], &seed);
    }
}

/* Stochastic rounding equals the host's: rows of any length in tensors of more than 2^32 elements.
   Other dtypes round to nearest. */
static void rounded(int kind, const fsdp_dtype *dtypes, int64_t count, uint64_t *seed) {
    static const int64_t starts[] = {0, 7, 0xFFFFFF00, (int64_t)1 << 41};
    static const double scalars[2][7] = {{0.999, 0.1, 0.99, 0.01, 0.5, 1e-3, -1e-2},
                                         {1e-2, 0.9, 1, 0.1, 0, 0, 0}};
    static arrays host, device;
    int offset[STATES];
    arrays_fill(&host, &device, dtypes, seed);
    offsets(offset, seed);
    fsdp_update u = update_of(kind, &device, dtypes, offset, count);
    fsdp_update on_host = update_of(kind, &host, dtypes, offset, count);
    memcpy(u.scalars, scalars[kind == FSDP_UPDATE_SGD], sizeof scalars[0]);
    u.rounds = 1;
    u.key = h_rand64(seed);
    u.at = starts[h_rand64(seed) % 4];
    u.row = h_rand64(seed) % 2 ? count : 1 + (int64_t)(h_rand64(seed) % 40);
    u.pitch = u.row + (int64_t)(h_rand64(seed) % 40);
    on_host.key = u.key, on_host.at = u.at, on_host.row = u.row, on_host.pitch = u.pitch;
    on_host.rounds = 1;
    memcpy(on_host.scalars, u.scalars, sizeof u.scalars);
    finish(fsdp_cuda_update(NULL, &u, 1));
    fsdpi_optim_host_update(&on_host);
    arrays_equal(&device, &host);
    if (count < 1000 || dtypes[0] != FSDP_BF16) return;
    u.key++; /* the same update with another key: the arrays differ only in how they are rounded */
    finish(fsdp_cuda_update(NULL, &u, 1));
    fsdpi_optim_host_update(&on_host);
    CHECK(memcmp(device.at[0], host.at[0], ARRAY_BYTES) != 0);
    for (int k = 1; k < STATES; k++) CHECK_EQ_MEM(device.at[k], host.at[k], ARRAY_BYTES);
}

TEST(update, rounded) {
    uint64_t seed = h_seed();
    for (int k = 0; k < 16; k++) {
        fsdp_dtype state = floats[k / 4] == FSDP_F64 ? FSDP_F64 : FSDP_F32;
        fsdp_dtype dtypes[STATES] = {floats[k / 4], floats[k % 4], state, state};
        for (size_t c = 1; c < sizeof update_counts / sizeof *update_counts; c++)
            for (int n = 0; n < (dtypes[0] == FSDP_BF16 ? 6 : 1); n++) {
                rounded(FSDP_UPDATE_ADAMW, dtypes, update_counts[c], &seed);
                rounded(FSDP_UPDATE_SGD, dtypes, update_counts[c], &seed);
            }
    }
}

/* More tiles than thread blocks, without vectors. The last tile has a value that is not finite. */
TEST(update, many_tiles, AT_NIGHT(STUB_ASAN)) {
    const int64_t count = 16384 * 1024 + 555;
    char *p = (char *)memory((size_t)count * 2 + 64), *g = (char *)memory((size_t)count * 2 + 64);
    char *expected = (char *)memory((size_t)count * 2 + 64);
    int32_t *found = (int32_t *)memory(sizeof *found);
    fsdp_sgd_hyper hyper = {0.1, 0, 0, 0.01, 0, 0, 1};
    double scalars[] = {hyper.lr, 0, 1, hyper.weight_decay, 0, 1};
    uint64_t seed = h_seed();
    for (int64_t i = 0; i < count / 4; i++) {
        uint64_t r = h_rand64(&seed) & 0xBFFFBFFFBFFFBFFFu; /* finite values */
        memcpy(p + 2 + i * 8, &r, sizeof r);
        r = h_rand64(&seed) & 0xBFFFBFFFBFFFBFFFu;
        memcpy(g + i * 8, &r, sizeof r);
    }
    memcpy(expected, p, (size_t)count * 2 + 64);
    fsdp_update u;
    memset(&u, 0, sizeof u);
    u.kind = FSDP_UPDATE_SGD, u.dtype = u.grad_dtype = FSDP_BF16;
    u.count = count, u.param = p + 2, u.grad = g;
    memcpy(u.scalars, scalars, sizeof scalars);
    CHECK_OK(fsdp_sgd_update_as(FSDP_BF16, expected + 2, FSDP_BF16, g, NULL, count, &hyper));
    finish(fsdp_cuda_update(NULL, &u, 1));
    CHECK_EQ_MEM(p, expected, (size_t)count * 2 + 64);
    memcpy(g, expected, (size_t)count * 2 + 64);
    u.kind = FSDP_UPDATE_UNSCALE, u.grad = g + 2, u.found = found, u.scalars[0] = 0.5;
    finish(fsdp_cuda_update(NULL, &u, 1));
    CHECK_EQ_INT(*found, 0);
    memcpy(g, expected, (size_t)count * 2 + 64);
    store(g + 2, (size_t)count - 1, FSDP_BF16, HUGE_VAL);
    memcpy(expected, g, (size_t)count * 2 + 64);
    CHECK_EQ_INT(fsdpi_unscale(FSDP_BF16, expected + 2, count, 0.5f), 1);
    finish(fsdp_cuda_update(NULL, &u, 1));
    CHECK_EQ_INT(*found, 1);
    CHECK_EQ_MEM(g, expected, (size_t)count * 2 + 64);
}

/* Lists of updates with several dtypes, sizes and scalars: the result equals single calls. Updates
   of a dtype share a launch, unless there are too many. */
static void list_of_updates(int kind, uint32_t num, uint64_t *seed) {
    enum { MOST = 700, ROW = 40 * 8 }; /* bytes of an update in each array */
    static fsdp_update list[MOST];
    static char *data[2][STATES];
    static int32_t *found;
    int launches = 0, seen[FSDP_DTYPE_COUNT] = {0};
    if (!found) found = (int32_t *)memory(sizeof *found);
    for (int k = 0; k < 2 * STATES; k++)
        if (!data[k % 2][k / 2]) data[k % 2][k / 2] = (char *)memory(MOST * ROW);
    for (uint32_t i = 0; i < num; i++) {
        uint64_t r = h_rand64(seed);
        fsdp_dtype dtype = floats[num < MOST ? r & 3 : 0], grad = floats[r >> 2 & 3];
        const int muon = kind == FSDP_UPDATE_MOMENTUM || kind == FSDP_UPDATE_MUON;
        if (muon && dtype == FSDP_F64) dtype = FSDP_F32;
        fsdp_dtype state = dtype == FSDP_F64 ? FSDP_F64 : FSDP_F32;
        if (kind == FSDP_UPDATE_EMA) grad = dtype; /* dtype of `second` */
        const fsdp_dtype dtypes[STATES] = {dtype, grad, state, kind == FSDP_UPDATE_EMA ? dtype : state};
        fsdp_update *u = &list[i];
        void **to[STATES] = {&u->param, &u->grad, &u->first, &u->second};
        memset(u, 0, sizeof *u);
        u->kind = (uint8_t)kind, u->dtype = (uint8_t)dtype, u->grad_dtype = (uint8_t)grad;
        u->count = (int64_t)(r >> 8) % 33;
        if (u->count < 0) u->count = 0;
        for (int k = 0; k < STATES; k++) {
            *to[k] = data[0][k] + i * ROW + (r >> (4 + k) & 7) * fsdp_dtype_size(dtypes[k]);
            for (size_t e = 0; e < (size_t)u->count; e++) /* second moments are not negative */
                store(*to[k], e, dtypes[k], (double)(h_rand64(seed) >> 40) * 0x1p-24);
        }
        for (int s = 0; s < 7; s++) u->scalars[s] = (double)(1 + h_rand64(seed) % 999) / 1024;
        if (kind == FSDP_UPDATE_UNSCALE) u->scalars[0] = 0.25, u->first = NULL;
        if (kind == FSDP_UPDATE_SGD && i % 2) u->scalars[1] = 0; /* no momentum */
        if (kind == FSDP_UPDATE_EMA) u->scalars[1] = i % 4;
        u->found = found;
        u->rounds = dtype == FSDP_BF16 && i % 3 == 0;
        u->key = h_rand64(seed), u->at = i, u->row = 7, u->pitch = 9;
        if (u->count) seen[kind == FSDP_UPDATE_UNSCALE ? grad : dtype]++;
    }
    for (int k = 0; k < STATES; k++) memcpy(data[1][k], data[0][k], MOST * ROW);
    /* a launch has at most 254 or 271 updates, and all 700 may have one dtype */
    for (int k = 0; k < 4; k++) launches += (seen[floats[k]] > 0) + 2 * (seen[floats[k]] > 508);
#ifdef FSDP_CUDA_EMULATION
    int64_t before = stub_count("launch");
#endif
    finish(fsdp_cuda_update(NULL, list, num));
#ifdef FSDP_CUDA_EMULATION
    if (kind != FSDP_UPDATE_UNSCALE || num < MOST)
        CHECK_EQ_INT(stub_count("launch") - before, launches);
#endif
    for (uint32_t i = 0; i < num; i++) {
        fsdp_update one = list[i];
        void **to[STATES] = {&one.param, &one.grad, &one.first, &one.second};
        for (int k = 0; k < STATES; k++)
            if (*to[k]) *to[k] = data[1][k] + ((char *)*to[k] - data[0][k]);
        fsdpi_optim_host_update(&one);
    }
    for (int k = 0; k < STATES; k++) CHECK_EQ_MEM(data[0][k], data[1][k], MOST * ROW);
}

TEST(update, of_lists) {
    static const uint32_t nums[] = {0, 1, 2, 24, 25, 100, 700};
    uint64_t seed = h_seed();
    for (int kind = FSDP_UPDATE_ADAMW; kind <= FSDP_UPDATE_MUON; kind++)
        for (size_t n = 0; n < sizeof nums / sizeof *nums; n++)
            list_of_updates(kind, nums[n], &seed);
}

TEST(update, a_nan_stays) {
    static const int kinds[] = {FSDP_UPDATE_ADAMW, FSDP_UPDATE_SGD};
    float *a = (float *)memory(64 * sizeof *a);
    for (int k = 0; k < 2; k++) {
        fsdp_update u;
        memset(&u, 0, sizeof u);
        for (int i = 0; i < 64; i++) a[i] = 1;
        a[16 + 5] = (float)NAN;
        u.kind = (uint8_t)kinds[k], u.dtype = u.grad_dtype = FSDP_F32;
        u.count = 16;
        u.param = a, u.grad = a + 16, u.first = a + 32, u.second = a + 48;
        for (int i = 0; i < 7; i++) u.scalars[i] = 0.5;
        finish(fsdp_cuda_update(NULL, &u, 1));
        for (int i = 0; i < 16; i++) CHECK_EQ_INT(h_non_finite((double)a[i]), i == 5 ? 2 : 0);
    }
}

TEST(update, what_it_refuses) {
    fsdp_update u;
    float x[4] = {1, 2, 3, 4};
    memset(&u, 0, sizeof u);
    u.count = 4;
    u.param = u.grad = x;
    for (int kind = 0; kind < 8; kind++)
        for (int dtype = 0; dtype < 12; dtype++) {
            u.kind = (uint8_t)kind;
            u.dtype = FSDP_F32, u.grad_dtype = (uint8_t)dtype;
            if (kind < 1 || kind > FSDP_UPDATE_MUON || !fsdp_dtype_is_float(dtype))
                CHECK(fsdp_cuda_update(NULL, &u, 1));
            u.dtype = (uint8_t)dtype, u.grad_dtype = FSDP_I32;
            CHECK(fsdp_cuda_update(NULL, &u, 1));
        }
    fsdp_update two[2] = {u, u}; /* two kinds in one list */
    two[0].dtype = two[0].grad_dtype = two[1].dtype = two[1].grad_dtype = FSDP_F32;
    two[0].kind = FSDP_UPDATE_SGD, two[1].kind = FSDP_UPDATE_ADAMW;
    CHECK(fsdp_cuda_update(NULL, two, 2));
}

/* ---- indices --------------------------------------------------------------------------------- */

/* Checks each item of a tile with arithmetic in 64 bits. */
static void check_tile(int64_t row_items, int64_t height, int64_t index, uint32_t size) {
    fsdpi_cuda_tile t = fsdpi_cuda_tile_at(row_items, height, index, size);
    int64_t begin = index * size, all = row_items * height;
    CHECK_EQ_INT(t.count, all - begin < size ? all - begin : size);
    for (uint32_t i = 0; i < t.count; i++) {
        int64_t row, item;
        fsdpi_cuda_item(&t, i, &row, &item);
        CHECK_MSG(row == (begin + i) / row_items && item == (begin + i) % row_items,
                  "%lld x %lld, tile %lld, item %u: row %lld, item %lld", (long long)height,
                  (long long)row_items, (long long)index, i, (long long)row, (long long)item);
    }
}

TEST(index, tiles_of_huge_blocks) {
    static const int64_t sizes[] = {1,
                                    2,
                                    3,
                                    7,
                                    255,
                                    1023,
                                    1024,
                                    1025,
                                    8192,
                                    100003,
                                    ((int64_t)1 << 31) - 1,
                                    (int64_t)1 << 31,
                                    ((int64_t)1 << 32) + 5,
                                    ((int64_t)1 << 40) + 3,
                                    (int64_t)1 << 61};
    static const uint32_t tiles[] = {1, 256, 1024, 8192};
    uint64_t seed = h_seed();
    int cases = 0, num = (int)(sizeof sizes / sizeof *sizes);
    for (int k = 0; k < num * num * 4; k++) {
        int64_t items = sizes[k / 4 % num], height = sizes[k / 4 / num];
        uint32_t size = tiles[k % 4];
        if (height > ((int64_t)1 << 61) / items) continue;
        int64_t count = fsdpi_cuda_tiles(items, height, size);
        CHECK_EQ_INT(count, (items * height + size - 1) / size);
        check_tile(items, height, 0, size);
        check_tile(items, height, count - 1, size);
        for (int n = 0; n < 8; n++) {
            int64_t row = (int64_t)(h_rand64(&seed) % (uint64_t)height);
            check_tile(items, height, (int64_t)(h_rand64(&seed) % (uint64_t)count), size);
            check_tile(items, height, ((row + 1) * items - 1) / size, size); /* the row's end */
        }
        cases++;
    }
    CHECK(cases > 400);
    CHECK_EQ_INT(fsdpi_cuda_tiles(0, 5, 1024), 0);
}

/* The items of a row are its elements, each once: vectors in order, then the others. */
TEST(index, columns_of_rows) {
    for (uint32_t vector = 1; vector <= 16; vector *= 2)
        for (int64_t width = 0; width < 80; width++)
            for (int64_t head = 0; head < vector && head <= width; head++)
                for (int64_t vectors = 0; head + vectors * vector <= width; vectors++) {
                    fsdpi_cuda_run run;
                    char seen[80] = {0};
                    memset(&run, 0, sizeof run);
                    run.width = width, run.head = vectors ? head : 0, run.vectors = vectors;
                    int64_t items = fsdpi_cuda_row_items(&run, vector);
                    for (int64_t item = 0; item < items; item++) {
                        int64_t at = fsdpi_cuda_column(&run, item, vector);
                        for (int64_t j = 0; j < (item < vectors ? vector : 1); j++) {
                            CHECK(at + j >= 0 && at + j < width && !seen[at + j]);
                            seen[at + j] = 1;
                        }
                        if (item < vectors) CHECK_EQ_INT((at - head) % vector, 0);
                    }
                    CHECK(!memchr(seen, 0, (size_t)width));
                }
    fsdpi_cuda_run run;
    memset(&run, 0, sizeof run);
    run.width = ((int64_t)1 << 40) + 13, run.head = 3, run.vectors = ((int64_t)1 << 37) + 1;
    CHECK_EQ_INT(fsdpi_cuda_row_items(&run, 8), ((int64_t)1 << 37) + 6);
    CHECK_EQ_INT(fsdpi_cuda_column(&run, (int64_t)1 << 37, 8), ((int64_t)1 << 40) + 3);
    CHECK_EQ_INT(fsdpi_cuda_column(&run, ((int64_t)1 << 37) + 5, 8), ((int64_t)1 << 40) + 12);
}

TEST(index, runs_of_tiles) {
    static fsdpi_cuda_run runs[600];
    uint64_t seed = h_seed();
    for (uint32_t num = 1; num <= 600; num += 1 + num / 3) {
        int64_t tiles = 0;
        for (uint32_t i = 0; i < num; i++) {
            runs[i].first = tiles;
            tiles += 1 + (int64_t)(h_rand64(&seed) % 5) * (i == num / 2 ? (int64_t)1 << 40 : 1);
        }
        for (uint32_t i = 0; i < num; i++) {
            int64_t next = i + 1 < num ? runs[i + 1].first : tiles;
            CHECK_EQ_INT(fsdpi_cuda_find(runs, num, runs[i].first), i);
            CHECK_EQ_INT(fsdpi_cuda_find(runs, num, next - 1), i);
        }
    }
}
