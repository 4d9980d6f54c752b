/* fsdp_cuda.cu - the kernels of fsdp_cuda.h: copies, norms, optimizers

       nvcc -O3 -arch=native -c fsdp_cuda.cu        and link with -lcudart -lstdc++

   A program that compiles fsdp.h's implementation with nvcc needs no object: fsdp_cuda.h includes
   this file then. C++11 or later, sm_70 or later; CUDA 12.1 or later makes use of large kernel
   parameters, which need a driver of 530 or later. The bits do not depend on the flags of nvcc,
   --use_fast_math included.

   Without a GPU, for tests: against the headers of tests/stubs kernels are loops over blocks and
   threads. As C++: g++ -x c++ -std=c++11 -O2 -ffp-contract=off -I../tests/stubs -c fsdp_cuda.cu

   SPDX-License-Identifier: MIT (full text at the end of fsdp.h) */

#include "../fsdp.h"
#include "../core/float.h"
#include "fsdp_cuda_kernels.h"

#include <cuda_runtime_api.h> // cudaLaunchKernel
#include <math.h>             // fabs, pow, sqrt, INFINITY
#include <string.h>           // memcpy

#ifdef FSDP_CUDA_EMULATION
#define FSDPI_DEVICE
#define FSDPI_SHARED
#define FSDPI_UNROLL
#define FSDPI_EACH_THREAD(t) for (uint32_t t = 0; t < FSDPI_THREADS; t++)
#define FSDPI_SYNC()
#else
#define FSDPI_DEVICE                        __device__ __forceinline__
#define FSDPI_SHARED                        __shared__
#define FSDPI_UNROLL                        _Pragma("unroll")
#define FSDPI_EACH_THREAD(t)            for (uint32_t t = threadIdx.x, once_ = 1; once_; once_ = 0)
#define FSDPI_SYNC()                        __syncthreads()
#define fsdp_stub_touch(ptr, nbytes, write) ((void)(ptr), (void)(nbytes), (void)(write))
#endif

// As fsdp_dtype_size and fsdp_dtype_is_float, which a program with FSDP_STATIC keeps to itself.
static size_t fsdpi_cuda_size_of(fsdp_dtype dtype) {
#define FSDP_X(name, value, bytes, is_float) bytes,
    static const size_t sizes[FSDP_DTYPE_COUNT] = {0, FSDP_DTYPE_LIST(FSDP_X)};
#undef FSDP_X
    return dtype > 0 && dtype < FSDP_DTYPE_COUNT ? sizes[dtype] : 0;
}
static int fsdpi_cuda_is_float(fsdp_dtype dtype) {
#define FSDP_X(name, value, bytes, is_float) is_float,
    static const uint8_t floats[FSDP_DTYPE_COUNT] = {0, FSDP_DTYPE_LIST(FSDP_X)};
#undef FSDP_X
    return dtype > 0 && dtype < FSDP_DTYPE_COUNT && floats[dtype];
}

// Functions are static besides: to the linker, nvcc gives a namespace without a name one.
namespace fsdpi_cuda {
namespace {

enum {
    FSDPI_THREADS = 256,
    FSDPI_ITEMS = 4,                          // of a thread in a tile, at work at the same time
    FSDPI_TILE = FSDPI_THREADS * FSDPI_ITEMS, // items
    FSDPI_NORM_TILE = 8192,                   // elements
    FSDPI_GRID = 16384,                       // thread blocks at most
#if CUDART_VERSION >= 12010
    FSDPI_PARAMS = 32764, // bytes that travel with a launch
#else
    FSDPI_PARAMS = 4096,
#endif
    FSDPI_FEW = 24, // runs of a launch: usually, and at most
    FSDPI_MANY = (FSDPI_PARAMS - 128) / (int)sizeof(fsdpi_cuda_run) // what fits beside the rest
};

/* -------------------------------------------------------------------------------------------- */
/* Launches. A kernel is a struct with Params, which travel with the launch, and block(). A launch
   into the stream LOADS is none: the kernel is loaded. */
const char load_mark = 0;
#define FSDPI_LOADS ((void *)(uintptr_t)&load_mark)

#ifdef FSDP_CUDA_EMULATION
template <class Kernel> static void body(const void *params, unsigned index) {
    Kernel::block(*(const typename Kernel::Params *)params, index);
}

template <class Kernel>
static int launch(void *stream, uint32_t grid, const typename Kernel::Params &params) {
    if (stream == FSDPI_LOADS) return (int)fsdp_stub_load(body<Kernel>);
    return (int)fsdp_stub_launch(body<Kernel>, &params, sizeof params, grid, (cudaStream_t)stream);
}
#else
template <class Kernel>
static __global__ void __launch_bounds__(FSDPI_THREADS)
    body(const __grid_constant__ typename Kernel::Params params) {
    Kernel::block(params, blockIdx.x);
}

template <class Kernel>
static int launch(void *stream, uint32_t grid, const typename Kernel::Params &params) {
    cudaFuncAttributes attributes;
    void *args[] = {const_cast<typename Kernel::Params *>(&params)};
    if (stream == FSDPI_LOADS)
        return (int)cudaFuncGetAttributes(&attributes, (const void *)body<Kernel>);
    return (int)cudaLaunchKernel((const void *)body<Kernel>, dim3(grid), dim3(FSDPI_THREADS), args,
                                 0, (cudaStream_t)stream);
}
#endif

// As many thread blocks as tiles, if not too many: then each does several.
static uint32_t grid_of(int64_t tiles) {
    return tiles < FSDPI_GRID ? (uint32_t)tiles : (uint32_t)FSDPI_GRID;
}

// Whether a launch has room for many runs: an older driver has not, whatever the compiler.
static bool has_large_params() {
    int version = 0;
    return FSDPI_PARAMS <= 4096 ||
           (cudaDriverGetVersion(&version) == cudaSuccess && version >= 12010);
}

/* -------------------------------------------------------------------------------------------- */
/* Numbers. Instructions by name, since nvcc's flags change what operators mean: each rounds to
   nearest, none is fused, none flushes subnormals. Processors keep the payload of a NaN that comes
   in, GPUs do not: where bits of NaNs are promised they are made by hand.                        */

#ifdef FSDP_CUDA_EMULATION
template <class T> T plus(T a, T b) { return a + b; }
template <class T> T minus(T a, T b) { return a - b; }
template <class T> T times(T a, T b) { return a * b; }
template <class T> T over(T a, T b) { return a / b; }
inline float fused(float a, float b, float c) { return fmaf(a, b, c); }
inline float root(float x) { return sqrtf(x); }
inline double root(double x) { return sqrt(x); }
inline float narrow(double x) { return (float)x; }
inline double widen(float x) { return (double)x; }
// Lest compilers do more operations than are asked for, adding 0 say: that changes some NaNs.
template <class T> T plus_nan(T a, T b) {
    volatile T r = a + b;
    return r;
}
template <class T> T times_nan(T a, T b) {
    volatile T r = a * b;
    return r;
}
inline void join_flag(int32_t *flag) { *flag |= 1; }
#else
#define FSDPI_BINARY(name, instruction)                                                            \
    FSDPI_DEVICE float name(float a, float b) {                                                    \
        float r;                                                                                   \
        asm(instruction ".rn.f32 %0, %1, %2;" : "=f"(r) : "f"(a), "f"(b));                         \
        return r;                                                                                  \
    }                                                                                              \
    FSDPI_DEVICE double name(double a, double b) {                                                 \
        double r;                                                                                  \
        asm(instruction ".rn.f64 %0, %1, %2;" : "=d"(r) : "d"(a), "d"(b));                         \
        return r;                                                                                  \
    }
FSDPI_BINARY(plus, "add")
FSDPI_BINARY(minus, "sub")
FSDPI_BINARY(times, "mul")
FSDPI_BINARY(over, "div")
#undef FSDPI_BINARY

FSDPI_DEVICE float fused(float a, float b, float c) { // a * b + c
    float r;
    asm("fma.rn.f32 %0, %1, %2, %3;" : "=f"(r) : "f"(a), "f"(b), "f"(c));
    return r;
}
FSDPI_DEVICE float root(float x) {
    float r;
    asm("sqrt.rn.f32 %0, %1;" : "=f"(r) : "f"(x));
    return r;
}
FSDPI_DEVICE double root(double x) {
    double r;
    asm("sqrt.rn.f64 %0, %1;" : "=d"(r) : "d"(x));
    return r;
}

FSDPI_DEVICE uint64_t bits_of(double x) { return (uint64_t)__double_as_longlong(x); }
FSDPI_DEVICE double f64_of(uint64_t u) { return __longlong_as_double((long long)u); }

FSDPI_DEVICE bool is_nan(float x) { return (fsdpi_f32_bits(x) & 0x7FFFFFFFu) > 0x7F800000u; }
FSDPI_DEVICE bool is_nan(double x) {
    return (bits_of(x) & 0x7FFFFFFFFFFFFFFFull) > 0x7FF0000000000000ull;
}
FSDPI_DEVICE float quiet(float x) { return fsdpi_f32_of(fsdpi_f32_bits(x) | 0x00400000u); }
FSDPI_DEVICE double quiet(double x) { return f64_of(bits_of(x) | 0x0008000000000000ull); }

FSDPI_DEVICE float narrow(double x) {
    float r;
    uint64_t u = bits_of(x);
    if (is_nan(x))
        return fsdpi_f32_of((uint32_t)(u >> 32 & 0x80000000u) | 0x7FC00000u |
                            (uint32_t)(u >> 29 & 0x003FFFFFu));
    asm("cvt.rn.f32.f64 %0, %1;" : "=f"(r) : "d"(x));
    return r;
}
FSDPI_DEVICE double widen(float x) {
    double r;
    uint64_t u = fsdpi_f32_bits(x);
    if (is_nan(x))
        return f64_of((u & 0x80000000u) << 32 | 0x7FF8000000000000ull | (u & 0x003FFFFFu) << 29);
    asm("cvt.f64.f32 %0, %1;" : "=d"(r) : "f"(x));
    return r;
}

// The first NaN of the two, as on x86; there inf - inf and 0 * inf are negative.
template <class T> FSDPI_DEVICE T nan_of(T a, T b) {
    return is_nan(a) ? quiet(a) : is_nan(b) ? quiet(b) : quiet((T)-INFINITY);
}
template <class T> FSDPI_DEVICE T plus_nan(T a, T b) {
    T r = plus(a, b);
    return is_nan(r) ? nan_of(a, b) : r;
}
template <class T> FSDPI_DEVICE T times_nan(T a, T b) {
    T r = times(a, b);
    return is_nan(r) ? nan_of(a, b) : r;
}

FSDPI_DEVICE void join_flag(int32_t *flag) { atomicOr(flag, 1); }
#endif

// To odd, as fsdpi_f64_to_f32_odd, which a GPU's flags and NaNs would change.
FSDPI_DEVICE float narrow_odd(double x) {
    float f = narrow(x);
    double back = widen(f);
    if (back == x || !(x == x)) return f;
    uint32_t u = fsdpi_f32_bits(f);
    if (fabs(back) > fabs(x)) u -= 1; // rounded away from zero: step back
    return fsdpi_f32_of(u | 1u);
}

template <class T> FSDPI_DEVICE T to(float x);
template <> FSDPI_DEVICE float to<float>(float x) { return x; }
template <> FSDPI_DEVICE double to<double>(float x) { return widen(x); }
template <class T> FSDPI_DEVICE T to(double x);
template <> FSDPI_DEVICE float to<float>(double x) { return narrow(x); }
template <> FSDPI_DEVICE double to<double>(double x) { return x; }

// Element types: what is stored, and what it is calculated with.
struct F32 {
    typedef float Bits;
    typedef float Number;
    static FSDPI_DEVICE float number(float x) { return x; }
    static FSDPI_DEVICE float bits(float x) { return x; }
    static FSDPI_DEVICE float bits(double x) { return narrow(x); }
};
struct F64 {
    typedef double Bits;
    typedef double Number;
    static FSDPI_DEVICE double number(double x) { return x; }
    static FSDPI_DEVICE double bits(double x) { return x; }
};
struct F16 {
    typedef uint16_t Bits;
    typedef float Number;
    static FSDPI_DEVICE float number(uint16_t h) { return fsdpi_f16_to_f32(h); }
    static FSDPI_DEVICE uint16_t bits(float x) { return fsdpi_f32_to_f16(x); }
    static FSDPI_DEVICE uint16_t bits(double x) { return fsdpi_f32_to_f16(narrow_odd(x)); }
};
struct BF16 {
    typedef uint16_t Bits;
    typedef float Number;
    static FSDPI_DEVICE float number(uint16_t h) { return fsdpi_bf16_to_f32(h); }
    static FSDPI_DEVICE uint16_t bits(float x) { return fsdpi_f32_to_bf16(x); }
    static FSDPI_DEVICE uint16_t bits(double x) { return fsdpi_f32_to_bf16(narrow_odd(x)); }
};

template <class A, class B> struct Wider { typedef double Number; };
template <> struct Wider<float, float> { typedef float Number; };

/* -------------------------------------------------------------------------------------------- */
// Memory. A chunk is what a thread has of one array: a vector, or one element.

template <class Bits, unsigned V> struct Chunk { Bits bits[V]; };

// Bytes that the address of a vector is a multiple of.
constexpr size_t alignment(size_t nbytes) { return nbytes < 16 ? nbytes : 16; }

template <class Bits, unsigned V>
FSDPI_DEVICE void fetch(Chunk<Bits, V> *chunk, const void *from, bool is_vector) {
#ifdef FSDP_CUDA_EMULATION
    size_t nbytes = is_vector ? sizeof *chunk : sizeof(Bits);
    if ((uintptr_t)from % alignment(nbytes)) __builtin_trap(); // as on a GPU
    memcpy(chunk->bits, from, nbytes);
#else
    if (!is_vector) {
        chunk->bits[0] = *(const Bits *)from;
    } else if (sizeof *chunk == sizeof(uint2)) {
        uint2 word = *(const uint2 *)from;
        memcpy(chunk, &word, sizeof word);
    } else {
        FSDPI_UNROLL for (int i = 0; i < (int)(sizeof *chunk / sizeof(uint4)); i++) {
            uint4 word = ((const uint4 *)from)[i];
            memcpy((char *)chunk + i * sizeof word, &word, sizeof word);
        }
    }
#endif
}

// Not to be kept in a cache: what is written is much, and not needed at once.
template <class Bits, unsigned V>
FSDPI_DEVICE void put(void *to, const Chunk<Bits, V> &chunk, bool is_vector) {
#ifdef FSDP_CUDA_EMULATION
    size_t nbytes = is_vector ? sizeof chunk : sizeof(Bits);
    if ((uintptr_t)to % alignment(nbytes)) __builtin_trap();
    memcpy(to, chunk.bits, nbytes);
#else
    if (!is_vector) {
        __stcs((Bits *)to, chunk.bits[0]);
    } else if (sizeof chunk == sizeof(uint2)) {
        uint2 word;
        memcpy(&word, &chunk, sizeof word);
        __stcs((uint2 *)to, word);
    } else {
        FSDPI_UNROLL for (int i = 0; i < (int)(sizeof chunk / sizeof(uint4)); i++) {
            uint4 word;
            memcpy(&word, (const char *)&chunk + i * sizeof word, sizeof word);
            __stcs((uint4 *)to + i, word);
        }
    }
#endif
}

// Tells a checker of races about rows.
FSDPI_DEVICE void touch_rows(const fsdpi_cuda_run &run, const char *ptr, int64_t pitch,
                             size_t element, int write) {
    for (int64_t row = 0; row < run.height; row++)
        fsdp_stub_touch(ptr + row * pitch, (size_t)run.width * element, write);
}

// The smallest number of elements before the first vector, the same in all arrays; -1: there is
// none. sizes: bytes of an element.
static int head_of(const void *const *arrays, const size_t *sizes, int num, unsigned vector) {
    for (unsigned head = 0; head < vector; head++) {
        bool fits = true;
        for (int i = 0; i < num; i++) {
            uintptr_t at = (uintptr_t)arrays[i] + head * sizes[i];
            if (arrays[i] && at % alignment(vector * sizes[i])) fits = false;
        }
        if (fits) return (int)head;
    }
    return -1;
}

// Cuts the rows into vectors where that can be done; a row shorter than head has none.
static void cut(fsdpi_cuda_run *run, int head, unsigned vector) {
    if (head < 0) return;
    run->head = head;
    run->vectors = (run->width - head) / (int64_t)vector;
}

// The block as a run of single elements; without gaps it is one row. false: it is empty.
static bool run_of(fsdpi_cuda_run *run, const fsdp_block &b, const void *src, size_t in, void *dst,
                   size_t out) {
    if (b.width <= 0 || b.height <= 0) return false;
    bool is_row = b.height == 1 || (b.src_pitch == b.width && b.dst_pitch == b.width);
    run->src = (const char *)src + b.src * (int64_t)in;
    run->dst = (char *)dst + b.dst * (int64_t)out;
    run->src_pitch = is_row ? 0 : b.src_pitch * (int64_t)in;
    run->dst_pitch = is_row ? 0 : b.dst_pitch * (int64_t)out;
    run->width = is_row ? b.width * b.height : b.width;
    run->height = is_row ? 1 : b.height;
    run->vectors = run->head = run->first = 0;
    return true;
}

// The part of a list that one launch does. N: room.
template <unsigned N> struct Runs {
    int64_t tiles;
    uint32_t grid, num;
    fsdpi_cuda_run run[N];
};

template <unsigned N> static void append(Runs<N> *runs, fsdpi_cuda_run run, int64_t tiles) {
    run.first = runs->tiles;
    runs->run[runs->num++] = run;
    runs->tiles += tiles;
    runs->grid = grid_of(runs->tiles);
}

/* -------------------------------------------------------------------------------------------- */
// Copies. What is done to an element is a Move, a Cast or a Clip.

struct Terms {
    double scale;
    int accumulate;
    double norm_type; // of a clip
    const double *sum;
};

// begin() looks at what only the device knows; false: there is nothing to do.
template <class T> struct Move {
    typedef T InBits;
    typedef T OutBits;
    static FSDPI_DEVICE bool begin(Terms *) { return true; }
    static FSDPI_DEVICE T apply(T x, T, const Terms &) { return x; }
};

template <class In, class Out> struct Cast {
    typedef typename In::Bits InBits;
    typedef typename Out::Bits OutBits;
    typedef typename Wider<typename In::Number, typename Out::Number>::Number Number;
    static FSDPI_DEVICE bool begin(Terms *) { return true; }
    static FSDPI_DEVICE OutBits apply(InBits x, OutBits old, const Terms &terms) {
        Number value = to<Number>(In::number(x)), scale = to<Number>(terms.scale);
        if (scale != (Number)1) value = times_nan(value, scale);
        if (terms.accumulate) value = plus_nan(to<Number>(Out::number(old)), value);
        return Out::bits(value);
    }
};

// In place; scale is a largest norm.
template <class P> struct Clip : Cast<P, P> {
    static FSDPI_DEVICE bool begin(Terms *terms) {
        fsdp_stub_touch(terms->sum, sizeof *terms->sum, 0);
        double p = terms->norm_type, norm = *terms->sum;
        if (p == 2) norm = root(norm);
        else if (p < (double)INFINITY) norm = pow(norm, over(1.0, p));
        terms->scale = over(terms->scale, plus(norm, 1e-6));
        return !(terms->scale >= 1); // NaN, too
    }
};

template <class Op, unsigned N> struct Copy {
    struct Params {
        Terms terms;
        Runs<N> runs;
    };
    typedef typename Op::InBits InBits;
    typedef typename Op::OutBits OutBits;
    static const unsigned IN = sizeof(InBits), OUT = sizeof(OutBits);
    static const unsigned SMALL = IN < OUT ? IN : OUT, LARGE = IN < OUT ? OUT : IN;
    static const unsigned V = 16 / SMALL * LARGE > 32 ? 32 / LARGE : 16 / SMALL; // of a vector

    static FSDPI_DEVICE void thread(const Terms &terms, const fsdpi_cuda_run &run,
                                    const fsdpi_cuda_tile &tile, uint32_t t) {
        Chunk<InBits, V> in[FSDPI_ITEMS];
        Chunk<OutBits, V> out[FSDPI_ITEMS];
        char *to[FSDPI_ITEMS];
        bool is_vector[FSDPI_ITEMS];
        FSDPI_UNROLL for (uint32_t k = 0; k < FSDPI_ITEMS; k++) {
            uint32_t i = t + k * FSDPI_THREADS;
            if (i >= tile.count) continue;
            int64_t row, item;
            fsdpi_cuda_item(&tile, i, &row, &item);
            int64_t column = fsdpi_cuda_column(&run, item, V);
            is_vector[k] = item < run.vectors;
            to[k] = run.dst + row * run.dst_pitch + column * OUT;
            fetch(&in[k], run.src + row * run.src_pitch + column * IN, is_vector[k]);
            if (terms.accumulate) fetch(&out[k], to[k], is_vector[k]);
        }
        FSDPI_UNROLL for (uint32_t k = 0; k < FSDPI_ITEMS; k++) {
            if (t + k * FSDPI_THREADS >= tile.count) continue;
            FSDPI_UNROLL for (unsigned j = 0; j < V; j++) {
                if (j == 0 || is_vector[k])
                    out[k].bits[j] = Op::apply(in[k].bits[j], out[k].bits[j], terms);
            }
            put(to[k], out[k], is_vector[k]);
        }
    }

    static FSDPI_DEVICE void block(const Params &p, uint32_t index) {
        Terms terms = p.terms;
        if (!Op::begin(&terms)) return;
        for (int64_t at = index; at < p.runs.tiles; at += p.runs.grid) {
            const fsdpi_cuda_run run = p.runs.run[fsdpi_cuda_find(p.runs.run, p.runs.num, at)];
            fsdpi_cuda_tile tile = fsdpi_cuda_tile_at(fsdpi_cuda_row_items(&run, V), run.height,
                                                      at - run.first, FSDPI_TILE);
            if (at == run.first) {
                touch_rows(run, run.src, run.src_pitch, IN, 0);
                touch_rows(run, run.dst, run.dst_pitch, OUT, 1);
            }
            FSDPI_EACH_THREAD(t) { thread(terms, run, tile, t); }
        }
    }
};

struct CopyJob {
    void *stream, *dst;
    const void *src;
    int out_dtype, dtype;
    const fsdp_block *blocks;
    uint32_t num;
    Terms terms;
};

// Launches for as many blocks from *next on as there is room for.
template <class Op, unsigned N> static int copy_part(const CopyJob &job, uint32_t *next) {
    typedef Copy<Op, N> Kernel;
    static const size_t sizes[] = {Kernel::IN, Kernel::OUT};
    static const unsigned V = Kernel::V;
    typename Kernel::Params p;
    p.terms = job.terms;
    p.runs.tiles = p.runs.grid = p.runs.num = 0;
    for (; *next < job.num && p.runs.num < N; ++*next) {
        fsdpi_cuda_run run;
        if (!run_of(&run, job.blocks[*next], job.src, sizes[0], job.dst, sizes[1])) continue;
        const void *arrays[] = {run.src, run.dst};
        bool fits = (size_t)run.src_pitch % alignment(V * sizes[0]) == 0 &&
                    (size_t)run.dst_pitch % alignment(V * sizes[1]) == 0;
        cut(&run, fits ? head_of(arrays, sizes, 2, V) : -1, V);
        append(&p.runs, run,
               fsdpi_cuda_tiles(fsdpi_cuda_row_items(&run, V), run.height, FSDPI_TILE));
    }
    return p.runs.num ? launch<Kernel>(job.stream, p.runs.grid, p) : 0;
}

template <class Op> static int copy_list(const CopyJob &job) {
    int error = 0;
    bool is_few = job.num <= FSDPI_FEW || !has_large_params();
    for (uint32_t next = 0; next < job.num && !error;)
        error = is_few || job.num - next <= FSDPI_FEW ? copy_part<Op, FSDPI_FEW>(job, &next)
                                                      : copy_part<Op, FSDPI_MANY>(job, &next);
    return error;
}

template <class In> static int copy_from(const CopyJob &job) {
    switch (job.out_dtype) {
    case FSDP_F32: return copy_list<Cast<In, F32>>(job);
    case FSDP_F64: return copy_list<Cast<In, F64>>(job);
    case FSDP_F16: return copy_list<Cast<In, F16>>(job);
    case FSDP_BF16: return copy_list<Cast<In, BF16>>(job);
    default: return cudaErrorInvalidValue;
    }
}

static int copy_any(const CopyJob &job) {
    if (job.dtype == job.out_dtype && job.terms.scale == 1 && !job.terms.accumulate) {
        switch (fsdpi_cuda_size_of(job.dtype)) {
        case 1: return copy_list<Move<uint8_t>>(job);
        case 2: return copy_list<Move<uint16_t>>(job);
        case 4: return copy_list<Move<uint32_t>>(job);
        case 8: return copy_list<Move<uint64_t>>(job);
        default: return cudaErrorInvalidValue;
        }
    }
    switch (job.dtype) {
    case FSDP_F32: return copy_from<F32>(job);
    case FSDP_F64: return copy_from<F64>(job);
    case FSDP_F16: return copy_from<F16>(job);
    case FSDP_BF16: return copy_from<BF16>(job);
    default: return cudaErrorInvalidValue;
    }
}

/* -------------------------------------------------------------------------------------------- */
/* Norms. Three launches: one number of each tile, then of each run, then the whole. Which elements
   a thread adds up depends on their places in the run alone, so that bits do.                    */

enum Norm { SQUARES, MAGNITUDES, POWERS, LARGEST };

FSDPI_DEVICE uint64_t magnitude_bits(double x) {
    uint64_t u;
    memcpy(&u, &x, sizeof u);
    return u & 0x7FFFFFFFFFFFFFFFull;
}

FSDPI_DEVICE double magnitude(double x) {
    uint64_t u = magnitude_bits(x);
    memcpy(&x, &u, sizeof x);
    return x;
}

// As integers, magnitudes are in their order, with NaN above infinity.
FSDPI_DEVICE double join(double a, double b, int norm) {
    if (norm != LARGEST) return plus(a, b);
    return magnitude_bits(b) > magnitude_bits(a) ? b : a;
}

FSDPI_DEVICE double term(double x, int norm, double p) {
    switch (norm) {
    case SQUARES: return times(x, x);
    case POWERS: return pow(magnitude(x), p);
    default: return magnitude(x);
    }
}

// lanes[0] = all of them, by a tree.
FSDPI_DEVICE void join_lanes(double *lanes, int norm) {
    for (uint32_t half = FSDPI_THREADS / 2; half; half /= 2) {
        FSDPI_EACH_THREAD(t) {
            if (t < half) lanes[t] = join(lanes[t], lanes[t + half], norm);
        }
        FSDPI_SYNC();
    }
}

// What a thread adds up.
struct Wide {
    double sum;
    FSDPI_DEVICE Wide() : sum(0) {}
    template <class T> FSDPI_DEVICE void add(T x, int norm, double p) {
        sum = join(sum, term(to<double>(x), norm, p), norm);
    }
};

/* The same of f32 for a device that has few units for f64: `rest` is what was rounded off `sum`.
   `most` is the largest magnitude; as integers they are in their order. */
struct Pair {
    float sum, rest;
    uint32_t most;
    FSDPI_DEVICE Pair() : sum(0), rest(0), most(0) {}
    template <class T> FSDPI_DEVICE void add(T number, int norm, double) {
        float x = to<float>(number);
        uint32_t magnitude = fsdpi_f32_bits(x) & 0x7FFFFFFFu;
        float next = norm == SQUARES ? times(x, x) : fsdpi_f32_of(magnitude);
        float lost = norm == SQUARES ? fused(x, x, -next) : 0;
        float whole = plus(sum, next), came = minus(whole, sum);
        lost = plus(lost, plus(minus(sum, minus(whole, came)), minus(next, came)));
        rest = plus(rest, lost);
        sum = whole;
        if (magnitude > most) most = magnitude;
    }
    // From 2^-40 to 2^60: no square overflows, and what vanishes is too small to matter.
    FSDPI_DEVICE bool holds(int norm) const {
        return norm == LARGEST || most == 0 || (most >= 87u << 23 && most <= 187u << 23);
    }
    FSDPI_DEVICE double value(int norm) const {
        return norm == LARGEST ? widen(fsdpi_f32_of(most)) : plus(widen(sum), widen(rest));
    }
};

template <unsigned N> struct NormParams {
    double p;
    double *tiles, *sums; // of every tile, of every run
    int norm;
    bool in_pairs;
    Runs<N> runs;
};

template <class In, unsigned N> struct NormTiles {
    typedef NormParams<N> Params;
    typedef typename In::Bits Bits;
    static const unsigned SIZE = sizeof(Bits), V = 16 / SIZE; // of a vector

    // Elements from the i-th of a tile on. Returns how many: at most a vector, which has vectors.
    static FSDPI_DEVICE uint32_t load(Chunk<Bits, V> *chunk, const fsdpi_cuda_run &run,
                                      const fsdpi_cuda_tile &tile, uint32_t i) {
        int64_t row, column;
        if (i >= tile.count) return 0;
        uint32_t count = tile.count - i < V ? tile.count - i : V;
        if (run.vectors && count == V) {
            fsdpi_cuda_item(&tile, i, &row, &column);
            fetch(chunk, run.src + row * run.src_pitch + column * SIZE, true);
            return V;
        }
        FSDPI_UNROLL for (uint32_t j = 0; j < V; j++) {
            Chunk<Bits, 1> one;
            if (j >= count) continue;
            fsdpi_cuda_item(&tile, i + j, &row, &column);
            fetch(&one, run.src + row * run.src_pitch + column * SIZE, false);
            chunk->bits[j] = one.bits[0];
        }
        return count;
    }

    template <class Sum>
    static FSDPI_DEVICE Sum sum_of(const Params &p, const fsdpi_cuda_run &run,
                                   const fsdpi_cuda_tile &tile, uint32_t t) {
        Sum sum;
        for (uint32_t i = t * V; i < tile.count; i += FSDPI_THREADS * V * FSDPI_ITEMS) {
            Chunk<Bits, V> chunk[FSDPI_ITEMS];
            uint32_t count[FSDPI_ITEMS];
            FSDPI_UNROLL for (uint32_t k = 0; k < FSDPI_ITEMS; k++)
                count[k] = load(&chunk[k], run, tile, i + k * FSDPI_THREADS * V);
            FSDPI_UNROLL for (uint32_t k = 0; k < FSDPI_ITEMS; k++)
                FSDPI_UNROLL for (uint32_t j = 0; j < V; j++) {
                if (j >= count[k]) continue;
                sum.add(In::number(chunk[k].bits[j]), p.norm, p.p);
            }
        }
        return sum;
    }

    static FSDPI_DEVICE double thread(const Params &p, const fsdpi_cuda_run &run,
                                      const fsdpi_cuda_tile &tile, uint32_t t) {
        if (p.in_pairs) {
            Pair pair = sum_of<Pair>(p, run, tile, t);
            if (pair.holds(p.norm)) return pair.value(p.norm);
        }
        return sum_of<Wide>(p, run, tile, t).sum;
    }

    static FSDPI_DEVICE void block(const Params &p, uint32_t index) {
        FSDPI_SHARED double lanes[FSDPI_THREADS];
        for (int64_t at = index; at < p.runs.tiles; at += p.runs.grid) {
            const fsdpi_cuda_run run = p.runs.run[fsdpi_cuda_find(p.runs.run, p.runs.num, at)];
            fsdpi_cuda_tile tile = fsdpi_cuda_tile_at(run.width, run.height, at - run.first,
                                                      FSDPI_NORM_TILE);
            if (at == run.first) touch_rows(run, run.src, run.src_pitch, SIZE, 0);
            fsdp_stub_touch(&p.tiles[at], sizeof(double), 1);
            FSDPI_EACH_THREAD(t) { lanes[t] = thread(p, run, tile, t); }
            FSDPI_SYNC();
            join_lanes(lanes, p.norm);
            FSDPI_EACH_THREAD(t) {
                if (t == 0) p.tiles[at] = lanes[0];
            }
            FSDPI_SYNC();
        }
    }
};

template <unsigned N> struct NormRuns {
    typedef NormParams<N> Params;
    static FSDPI_DEVICE void block(const Params &p, uint32_t index) {
        FSDPI_SHARED double lanes[FSDPI_THREADS];
        int64_t first = p.runs.run[index].first;
        int64_t end = index + 1 < p.runs.num ? p.runs.run[index + 1].first : p.runs.tiles;
        fsdp_stub_touch(&p.tiles[first], (size_t)(end - first) * sizeof(double), 0);
        fsdp_stub_touch(&p.sums[index], sizeof(double), 1);
        FSDPI_EACH_THREAD(t) {
            double sum = 0;
            for (int64_t at = first + t; at < end; at += FSDPI_THREADS)
                sum = join(sum, p.tiles[at], p.norm);
            lanes[t] = sum;
        }
        FSDPI_SYNC();
        join_lanes(lanes, p.norm);
        FSDPI_EACH_THREAD(t) {
            if (t == 0) p.sums[index] = lanes[0];
        }
    }
};

// One thread block: the sums of the runs, in their order.
struct NormWhole {
    struct Params {
        const double *sums;
        double *out;
        uint32_t num;
        int norm, accumulate;
    };
    static FSDPI_DEVICE void block(const Params &p, uint32_t) {
        FSDPI_SHARED double lanes[FSDPI_THREADS];
        FSDPI_SHARED double whole[1];
        fsdp_stub_touch(p.sums, p.num * sizeof(double), 0);
        fsdp_stub_touch(p.out, sizeof(double), 1);
        FSDPI_EACH_THREAD(t) {
            if (t == 0) whole[0] = p.accumulate ? *p.out : 0;
        }
        for (uint32_t at = 0; at < p.num; at += FSDPI_THREADS) {
            FSDPI_EACH_THREAD(t) {
                if (at + t < p.num) lanes[t] = p.sums[at + t];
            }
            FSDPI_SYNC();
            FSDPI_EACH_THREAD(t) {
                for (uint32_t k = 0; t == 0 && k < FSDPI_THREADS && at + k < p.num; k++)
                    whole[0] = join(whole[0], lanes[k], p.norm);
            }
            FSDPI_SYNC();
        }
        FSDPI_EACH_THREAD(t) {
            if (t == 0) *p.out = whole[0];
        }
    }
};

struct NormJob {
    void *stream;
    double *out, *partials;
    const void *src;
    int dtype, norm, accumulate;
    bool in_pairs;
    const fsdp_block *blocks;
    uint32_t num;
    double p;
};

template <class In, unsigned N> static int norm_part(NormJob *job, uint32_t *next) {
    typedef NormTiles<In, N> Kernel;
    static const size_t size = Kernel::SIZE;
    static const unsigned V = Kernel::V;
    NormParams<N> p;
    p.p = job->p;
    p.norm = job->norm;
    p.in_pairs = job->in_pairs;
    p.runs.tiles = p.runs.grid = p.runs.num = 0;
    for (; *next < job->num && p.runs.num < N; ++*next) {
        fsdpi_cuda_run run;
        fsdp_block b = job->blocks[*next];
        b.dst_pitch = b.src_pitch;
        if (!run_of(&run, b, job->src, size, NULL, size)) continue;
        const void *src = run.src;
        if (run.height == 1 && head_of(&src, &size, 1, V) == 0) cut(&run, 0, V);
        append(&p.runs, run, fsdpi_cuda_tiles(run.width, run.height, FSDPI_NORM_TILE));
    }
    NormWhole::Params whole = {job->partials + p.runs.tiles, job->out, p.runs.num, job->norm,
                               job->accumulate};
    p.tiles = job->partials;
    p.sums = job->partials + p.runs.tiles;
    job->partials = p.sums + p.runs.num;
    job->accumulate = 1;
    int error = 0;
    if (p.runs.num) error = launch<Kernel>(job->stream, p.runs.grid, p);
    if (p.runs.num && !error) error = launch<NormRuns<N>>(job->stream, p.runs.num, p);
    return error ? error : launch<NormWhole>(job->stream, 1, whole);
}

// An empty list, too, gives a number: 0.
template <class In> static int norm_list(NormJob job) {
    uint32_t next = 0;
    int error = 0;
    bool is_few = job.num <= FSDPI_FEW || !has_large_params();
    do {
        error = is_few || job.num - next <= FSDPI_FEW ? norm_part<In, FSDPI_FEW>(&job, &next)
                                                      : norm_part<In, FSDPI_MANY>(&job, &next);
    } while (next < job.num && !error);
    return error;
}

/* -------------------------------------------------------------------------------------------- */
// Optimizers. Operation by operation as fsdp_optim.h, in the same order.

enum { FSDPI_UPDATE_VECTOR = 4 };

struct UpdateParams {
    fsdp_update update;
    fsdpi_cuda_run run; // elements of all arrays
    int64_t tiles;
    uint32_t grid;
};

template <class T> struct AdamW {
    T decay, weight, beta2, gain, bias, eps, rate;
    bool from_g; // lerp from its nearer end
    FSDPI_DEVICE AdamW(const double *s)
        : decay(to<T>(s[0])), weight(to<T>(s[1])), beta2(to<T>(s[2])), gain(to<T>(s[3])),
          bias(to<T>(s[4])), eps(to<T>(s[5])), rate(to<T>(s[6])), from_g(weight >= (T)0.5) {
        if (from_g) weight = minus(weight, (T)1);
    }
    FSDPI_DEVICE void step(T *p, T g, T *m, T *v) const {
        T to_m = times(minus(g, *m), weight), to_v = times(times(gain, g), g);
        *m = plus(from_g ? g : *m, to_m);
        *v = plus(times(*v, beta2), to_v);
        T den = plus(over(root(*v), bias), eps);
        *p = plus(times(*p, decay), over(times(rate, *m), den));
    }
};

template <class T> struct Sgd {
    T rate, momentum, gain, decay;
    bool decays, has_buffer, nesterov, fresh;
    FSDPI_DEVICE Sgd(const double *s)
        : rate(to<T>(-s[0])), momentum(to<T>(s[1])), gain(to<T>(s[2])), decay(to<T>(s[3])),
          decays(s[3] > 0), has_buffer(s[1] > 0), nesterov(s[4] != 0), fresh(s[5] != 0) {}
    FSDPI_DEVICE void step(T *p, T d, T *b, T *) const {
        if (decays) d = plus(d, times(decay, *p));
        if (has_buffer) *b = fresh ? d : plus(times(*b, momentum), times(gain, d));
        if (has_buffer) d = nesterov ? plus(d, times(momentum, *b)) : *b;
        *p = plus(*p, times(rate, d));
    }
};

FSDPI_DEVICE uint32_t stir(uint32_t h) {
    h = (h ^ (h >> 16)) * 0x85EBCA6Bu;
    h = (h ^ (h >> 13)) * 0xC2B2AE35u;
    return h ^ (h >> 16);
}

// A result as element i of a run stores it.
template <class P> struct Rounded {
    static FSDPI_DEVICE typename P::Bits bits(const fsdp_update &, typename P::Number x, int64_t) {
        return P::bits(x);
    }
};
template <> struct Rounded<BF16> { // stochastically, if `rounds` says so
    static FSDPI_DEVICE uint16_t bits(const fsdp_update &u, float x, int64_t i) {
        uint32_t bits = fsdpi_f32_bits(x);
        if (!u.rounds || (bits & 0x7FFFFFFFu) > 0x7F7F0000u) return BF16::bits(x);
        int64_t row = i < u.row ? 0 : i / u.row;
        uint64_t index = (uint64_t)(u.at + row * u.pitch + (i - row * u.row));
        uint32_t high = (uint32_t)(index >> 32) * 0x9E3779B9u + (uint32_t)(u.key >> 32);
        return (uint16_t)((bits + (stir(stir((uint32_t)index + (uint32_t)u.key) ^ high) >> 16)) >>
                          16);
    }
};

template <template <class> class Rule, class P, class G> struct Update {
    typedef UpdateParams Params;
    typedef typename P::Number Number;
    static const unsigned V = FSDPI_UPDATE_VECTOR;

    static FSDPI_DEVICE void item(const fsdp_update &u, const Rule<Number> &rule, int64_t column,
                                  bool is_vector) {
        Chunk<typename P::Bits, V> p;
        Chunk<typename G::Bits, V> g;
        Chunk<Number, V> first, second;
        fetch(&g, (typename G::Bits *)u.grad + column, is_vector);
        fetch(&p, (typename P::Bits *)u.param + column, is_vector);
        if (u.first) fetch(&first, (Number *)u.first + column, is_vector);
        if (u.second) fetch(&second, (Number *)u.second + column, is_vector);
        FSDPI_UNROLL for (unsigned j = 0; j < V; j++) {
            if (j > 0 && !is_vector) continue;
            Number x = to<Number>(P::number(p.bits[j]));
            rule.step(&x, to<Number>(G::number(g.bits[j])), &first.bits[j], &second.bits[j]);
            p.bits[j] = Rounded<P>::bits(u, x, column + j);
        }
        put((typename P::Bits *)u.param + column, p, is_vector);
        if (u.first) put((Number *)u.first + column, first, is_vector);
        if (u.second) put((Number *)u.second + column, second, is_vector);
    }

    static FSDPI_DEVICE void touch(const fsdp_update &u) {
        size_t count = (size_t)u.count;
        fsdp_stub_touch(u.grad, count * sizeof(typename G::Bits), 0);
        fsdp_stub_touch(u.param, count * sizeof(typename P::Bits), 1);
        if (u.first) fsdp_stub_touch(u.first, count * sizeof(Number), 1);
        if (u.second) fsdp_stub_touch(u.second, count * sizeof(Number), 1);
    }

    static FSDPI_DEVICE void block(const Params &p, uint32_t index) {
        const Rule<Number> rule(p.update.scalars);
        if (index == 0) touch(p.update);
        for (int64_t at = index; at < p.tiles; at += p.grid) {
            fsdpi_cuda_tile tile = fsdpi_cuda_tile_at(fsdpi_cuda_row_items(&p.run, V), 1, at,
                                                      FSDPI_TILE);
            FSDPI_EACH_THREAD(t) {
                for (uint32_t i = t; i < tile.count; i += FSDPI_THREADS) {
                    int64_t place = tile.item + i;
                    item(p.update, rule, fsdpi_cuda_column(&p.run, place, V),
                         place < p.run.vectors);
                }
            }
        }
    }
};

FSDPI_DEVICE bool is_finite(float x) { return (fsdpi_f32_bits(x) & 0x7F800000u) != 0x7F800000u; }
FSDPI_DEVICE bool is_finite(double x) { return magnitude_bits(x) < 0x7FF0000000000000ull; }

template <class G> struct Unscale {
    typedef UpdateParams Params;
    typedef typename G::Number Number;
    typedef typename G::Bits Bits;
    static const unsigned V = FSDPI_UPDATE_VECTOR;

    // Whether all were finite.
    static FSDPI_DEVICE bool item(Bits *at, Number factor, bool is_vector) {
        Chunk<Bits, V> g;
        bool finite = true;
        fetch(&g, at, is_vector);
        FSDPI_UNROLL for (unsigned j = 0; j < V; j++) {
            if (j > 0 && !is_vector) continue;
            Number x = G::number(g.bits[j]);
            finite = finite && is_finite(x);
            g.bits[j] = G::bits(times_nan(x, factor));
        }
        put(at, g, is_vector);
        return finite;
    }

    static FSDPI_DEVICE void block(const Params &p, uint32_t index) {
        FSDPI_SHARED int found[1];
        const Number factor = to<Number>(p.update.scalars[0]);
        if (index == 0) {
            fsdp_stub_touch(p.update.grad, (size_t)p.update.count * sizeof(Bits), 1);
            fsdp_stub_touch(p.update.found, sizeof *p.update.found, 1);
        }
        FSDPI_EACH_THREAD(t) {
            if (t == 0) found[0] = 0;
        }
        FSDPI_SYNC();
        for (int64_t at = index; at < p.tiles; at += p.grid) {
            fsdpi_cuda_tile tile = fsdpi_cuda_tile_at(fsdpi_cuda_row_items(&p.run, V), 1, at,
                                                      FSDPI_TILE);
            FSDPI_EACH_THREAD(t) {
                for (uint32_t i = t; i < tile.count; i += FSDPI_THREADS) {
                    int64_t place = tile.item + i;
                    Bits *grad = (Bits *)p.update.grad + fsdpi_cuda_column(&p.run, place, V);
                    if (!item(grad, factor, place < p.run.vectors)) found[0] = 1;
                }
            }
        }
        FSDPI_SYNC();
        FSDPI_EACH_THREAD(t) {
            if (t == 0 && found[0]) join_flag(p.update.found);
        }
    }
};

// Arrays that the kind has none of are NULL.
static UpdateParams update_params(const fsdp_update &update) {
    UpdateParams p;
    size_t state = update.dtype == FSDP_F64 ? sizeof(double) : sizeof(float);
    const void *arrays[] = {update.grad, update.param, update.first, update.second};
    const size_t sizes[] = {fsdpi_cuda_size_of(update.grad_dtype), fsdpi_cuda_size_of(update.dtype),
                            state, state};
    const fsdp_block row = {0, 0, update.count, 1, 0, 0};
    p.update = update;
    (void)run_of(&p.run, row, NULL, 0, NULL, 0);
    cut(&p.run, head_of(arrays, sizes, 4, FSDPI_UPDATE_VECTOR), FSDPI_UPDATE_VECTOR);
    p.tiles = fsdpi_cuda_tiles(fsdpi_cuda_row_items(&p.run, FSDPI_UPDATE_VECTOR), 1, FSDPI_TILE);
    p.grid = grid_of(p.tiles);
    return p;
}

template <template <class> class Rule, class P>
static int update_as(void *stream, const UpdateParams &p) {
    switch (p.update.grad_dtype) {
    case FSDP_F32: return launch<Update<Rule, P, F32>>(stream, p.grid, p);
    case FSDP_F64: return launch<Update<Rule, P, F64>>(stream, p.grid, p);
    case FSDP_F16: return launch<Update<Rule, P, F16>>(stream, p.grid, p);
    case FSDP_BF16: return launch<Update<Rule, P, BF16>>(stream, p.grid, p);
    default: return cudaErrorInvalidValue;
    }
}

template <template <class> class Rule>
static int update_by(void *stream, const fsdp_update &update) {
    UpdateParams p = update_params(update);
    switch (update.dtype) {
    case FSDP_F32: return update_as<Rule, F32>(stream, p);
    case FSDP_F64: return update_as<Rule, F64>(stream, p);
    case FSDP_F16: return update_as<Rule, F16>(stream, p);
    case FSDP_BF16: return update_as<Rule, BF16>(stream, p);
    default: return cudaErrorInvalidValue;
    }
}

static int unscale(void *stream, fsdp_update update) {
    update.param = update.first = update.second = NULL;
    UpdateParams p = update_params(update);
    switch (update.grad_dtype) {
    case FSDP_F32: return launch<Unscale<F32>>(stream, p.grid, p);
    case FSDP_F64: return launch<Unscale<F64>>(stream, p.grid, p);
    case FSDP_F16: return launch<Unscale<F16>>(stream, p.grid, p);
    case FSDP_BF16: return launch<Unscale<BF16>>(stream, p.grid, p);
    default: return cudaErrorInvalidValue;
    }
}

} // namespace
} // namespace fsdpi_cuda

extern "C" {

FSDP_CUDA_API int fsdp_cuda_copy(void *stream, void *dst, int out_dtype, const void *src, int dtype,
                                 const fsdp_block *blocks, uint32_t num, double scale,
                                 int accumulate) {
    fsdpi_cuda::CopyJob job = {stream, dst,    src, out_dtype,
                               dtype,  blocks, num, {scale, accumulate, 0, NULL}};
    return fsdpi_cuda::copy_any(job);
}

FSDP_CUDA_API int fsdp_cuda_clip(void *stream, void *data, int dtype, const fsdp_block *blocks,
                                 uint32_t num, double max_norm, double p, const double *sum) {
    using namespace fsdpi_cuda;
    CopyJob job = {stream, data, data, dtype, dtype, blocks, num, {max_norm, 0, p, sum}};
    switch (dtype) {
    case FSDP_F32: return copy_list<Clip<F32>>(job);
    case FSDP_F64: return copy_list<Clip<F64>>(job);
    case FSDP_F16: return copy_list<Clip<F16>>(job);
    case FSDP_BF16: return copy_list<Clip<BF16>>(job);
    default: return cudaErrorInvalidValue;
    }
}

FSDP_CUDA_API size_t fsdp_cuda_norm_partials(const fsdp_block *blocks, uint32_t num) {
    int64_t count = 0;
    for (uint32_t i = 0; i < num; i++) {
        int64_t tiles = fsdpi_cuda_tiles(blocks[i].width, blocks[i].height,
                                         fsdpi_cuda::FSDPI_NORM_TILE);
        count += tiles ? tiles + 1 : 0;
    }
    return (size_t)count;
}

FSDP_CUDA_API int fsdp_cuda_norm(void *stream, double *out, const void *src, int dtype,
                                 const fsdp_block *blocks, uint32_t num, double p, int accumulate,
                                 int in_pairs, double *partials) {
    using namespace fsdpi_cuda;
    int norm = p == (double)INFINITY ? LARGEST : p == 2 ? SQUARES : p == 1 ? MAGNITUDES : POWERS;
    bool pairs = in_pairs && dtype != FSDP_F64 && norm != POWERS;
    NormJob job = {stream, out, partials, src, dtype, norm, accumulate, pairs, blocks, num, p};
    switch (dtype) {
    case FSDP_F32: return norm_list<F32>(job);
    case FSDP_F64: return norm_list<F64>(job);
    case FSDP_F16: return norm_list<F16>(job);
    case FSDP_BF16: return norm_list<BF16>(job);
    default: return cudaErrorInvalidValue;
    }
}

FSDP_CUDA_API int fsdp_cuda_update(void *stream, const fsdp_update *update) {
    fsdp_update u = *update;
    if (!fsdpi_cuda_is_float(u.grad_dtype)) return cudaErrorInvalidValue;
    if (u.kind != FSDP_UPDATE_UNSCALE && !fsdpi_cuda_is_float(u.dtype))
        return cudaErrorInvalidValue;
    if (u.count <= 0) return 0;
    switch (u.kind) {
    case FSDP_UPDATE_ADAMW: return fsdpi_cuda::update_by<fsdpi_cuda::AdamW>(stream, u);
    case FSDP_UPDATE_SGD:
        u.second = NULL;
        if (!(u.scalars[1] > 0)) u.first = NULL;
        return fsdpi_cuda::update_by<fsdpi_cuda::Sgd>(stream, u);
    case FSDP_UPDATE_UNSCALE: return fsdpi_cuda::unscale(stream, u);
    default: return cudaErrorInvalidValue;
    }
}

} // extern "C"

namespace fsdpi_cuda {
namespace {

const int floats[] = {FSDP_F32, FSDP_F64, FSDP_F16, FSDP_BF16};

// Of one dtype: copies to all others, its clip and its norm, for few blocks and for many.
static int load_lists(int dtype, const fsdp_block *blocks, uint32_t num) {
    void *at = (void *)(uintptr_t)4096; // nobody looks there
    double *numbers = (double *)at;
    int error = 0;
    for (int to = 0; to < 4 && !error; to++)
        error = fsdp_cuda_copy(FSDPI_LOADS, at, floats[to], at, dtype, blocks, num, 2, 0);
    if (!error) error = fsdp_cuda_clip(FSDPI_LOADS, at, dtype, blocks, num, 1, 2, numbers);
    if (!error)
        error = fsdp_cuda_norm(FSDPI_LOADS, numbers, at, dtype, blocks, num, 2, 0, 0, numbers);
    return error;
}

static int load_updates(int dtype) {
    void *at = (void *)(uintptr_t)4096;
    fsdp_update u;
    int error = 0;
    memset(&u, 0, sizeof u);
    u.param = u.grad = u.first = u.second = at;
    u.found = (int32_t *)at;
    u.count = 1;
    u.dtype = (uint8_t)dtype;
    for (int grad = 0; grad < 4 && !error; grad++) {
        u.grad_dtype = (uint8_t)floats[grad];
        u.kind = FSDP_UPDATE_ADAMW;
        error = fsdp_cuda_update(FSDPI_LOADS, &u);
        u.kind = FSDP_UPDATE_SGD;
        if (!error) error = fsdp_cuda_update(FSDPI_LOADS, &u);
        u.kind = FSDP_UPDATE_UNSCALE;
        if (!error) error = fsdp_cuda_update(FSDPI_LOADS, &u);
    }
    return error;
}

} // namespace
} // namespace fsdpi_cuda

extern "C" {

FSDP_CUDA_API int fsdp_cuda_load(void) {
    using namespace fsdpi_cuda;
    static const int sizes[] = {FSDP_U8, FSDP_F16, FSDP_F32, FSDP_F64}; // of what is moved
    void *at = (void *)(uintptr_t)4096;
    fsdp_block blocks[FSDPI_FEW + 1];
    const fsdp_block one = {0, 0, 1, 1, 1, 1};
    int error = 0;
    for (uint32_t i = 0; i <= FSDPI_FEW; i++) blocks[i] = one;
    for (uint32_t num = 1; num <= FSDPI_FEW + 1; num += FSDPI_FEW)
        for (int i = 0; i < 4 && !error; i++) {
            error = fsdp_cuda_copy(FSDPI_LOADS, at, sizes[i], at, sizes[i], blocks, num, 1, 0);
            if (!error) error = load_lists(floats[i], blocks, num);
        }
    for (int i = 0; i < 4 && !error; i++) error = load_updates(floats[i]);
    return error;
}

} // extern "C"
