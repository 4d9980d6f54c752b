/* fsdp_cuda.cu - the kernels of fsdp_cuda.h: copies, norms, optimizers

       nvcc -O3 -arch=native -c fsdp_cuda.cu        and link with -lcudart -lstdc++

   A program that compiles fsdp.h's implementation with nvcc needs no object: fsdp_cuda.h includes
   this file then. Requires C++11 and sm_70, or later; CUDA 12.1 or later uses large kernel
   parameters, which need a driver of 530 or later. The bits do not depend on the flags of nvcc,
   --use_fast_math included.

   Without a GPU, for tests: against the headers of tests/stubs kernels are loops over blocks and
   threads. As C++: g++ -x c++ -std=c++11 -O2 -ffp-contract=off -I../tests/stubs -c fsdp_cuda.cu

   SPDX-License-Identifier: MIT (full text at the end of fsdp.h) */

#include "../fsdp.h"
#include "../src/base/float.h"
#include "fsdp_cuda_kernels.h"

#include <cuda_runtime_api.h> // cudaLaunchKernel
#include <math.h>             // fabs, pow, sqrt, INFINITY
#include <string.h>           // memcpy

#ifdef FSDP_CUDA_EMULATION
#define FSDPI_DEVICE
#define FSDPI_CALLED
#define FSDPI_SHARED
#define FSDPI_UNROLL
#define FSDPI_ROLLED
#define FSDPI_EACH_THREAD(t) for (uint32_t t = 0; t < FSDPI_THREADS; t++)
#define FSDPI_SYNC()
#else
#define FSDPI_DEVICE                        __device__ __forceinline__
#define FSDPI_CALLED                        __device__ __noinline__
#define FSDPI_SHARED                        __shared__
#define FSDPI_UNROLL                        _Pragma("unroll")
#define FSDPI_ROLLED                        _Pragma("unroll 1")
#define FSDPI_EACH_THREAD(t)            for (uint32_t t = threadIdx.x, once_ = 1; once_; once_ = 0)
#define FSDPI_SYNC()                        __syncthreads()
#define fsdp_stub_touch(ptr, nbytes, write) ((void)(ptr), (void)(nbytes), (void)(write))
#endif

// Returns what fsdp_dtype_size returns, which a program with FSDP_STATIC does not export. The next
// function does so for fsdp_dtype_is_float.
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

// Functions are also static: nvcc gives an anonymous namespace a name that the linker sees.
namespace fsdpi_cuda {
namespace {

enum {
    FSDPI_THREADS = 256,
    FSDPI_ITEMS = 4,                          // items that a thread of a tile processes at once
    FSDPI_TILE = FSDPI_THREADS * FSDPI_ITEMS, // items
    FSDPI_NORM_TILE = 16384,                  // elements
    FSDPI_GRID = 16384,                       // most thread blocks
#if CUDART_VERSION >= 12010
    FSDPI_PARAMS = 32764, // bytes that travel with a launch
#else
    FSDPI_PARAMS = 4096,
#endif
    FSDPI_FEW = 24, // runs of a launch: usually, and at most
    FSDPI_MANY = (FSDPI_PARAMS - 128) / (int)sizeof(fsdpi_cuda_run) // 128: other parameters
};

/* -------------------------------------------------------------------------------------------- */
/* Launches. A kernel is a struct with Params, which travel with the launch, and block(). A launch
   into the stream LOADS only loads the kernel. */
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

// Returns the number of thread blocks: one per tile, but at most FSDPI_GRID.
static uint32_t grid_of(int64_t tiles) {
    return tiles < FSDPI_GRID ? (uint32_t)tiles : (uint32_t)FSDPI_GRID;
}

// Returns true if the driver accepts parameters of FSDPI_PARAMS bytes. An older driver does not,
// even if the compiler does.
static bool has_large_params() {
    int version = 0;
    return FSDPI_PARAMS <= 4096 ||
           (cudaDriverGetVersion(&version) == cudaSuccess && version >= 12010);
}

/* -------------------------------------------------------------------------------------------- */
/* Numbers. Arithmetic uses named instructions, since nvcc's flags change the meaning of operators:
   each rounds to nearest, none is fused, none flushes subnormals. CPUs keep the payload of an input
   NaN, GPUs do not: where bits of NaNs are promised, this code makes them.                       */

#ifdef FSDP_CUDA_EMULATION
template <class T> T plus(T a, T b) { return a + b; }
template <class T> T minus(T a, T b) { return a - b; }
template <class T> T times(T a, T b) { return a * b; }
template <class T> T over(T a, T b) { return a / b; }
inline float fused(float a, float b, float c) { return fmaf(a, b, c); }
inline double fused(double a, double b, double c) { return fma(a, b, c); }
inline double add_exact(double a, double b, double c) { return a * b + c; }
inline float plain_f16(uint16_t h) { return fsdpi_f16_to_f32(h); }
inline double plain(float x) { return (double)x; }
inline float root(float x) { return sqrtf(x); }
inline double root(double x) { return sqrt(x); }
inline float narrow(double x) { return (float)x; }
inline double widen(float x) { return (double)x; }
// Returns a + b. `volatile` keeps compilers from adding operations, such as + 0, which change some
// NaNs.
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
FSDPI_DEVICE double fused(double a, double b, double c) {
    double r;
    asm("fma.rn.f64 %0, %1, %2, %3;" : "=d"(r) : "d"(a), "d"(b), "d"(c));
    return r;
}
// Requires that a * b is exact.
FSDPI_DEVICE double add_exact(double a, double b, double c) { return fused(a, b, c); }
// Converts as the code for CPUs does, except for the bits of a NaN.
FSDPI_DEVICE float plain_f16(uint16_t h) {
    float r;
    asm("cvt.f32.f16 %0, %1;" : "=f"(r) : "h"(h));
    return r;
}
FSDPI_DEVICE double plain(float x) {
    double r;
    asm("cvt.f64.f32 %0, %1;" : "=d"(r) : "f"(x));
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

// Returns the first NaN of the two, as on x86. If there is none (inf - inf, 0 * inf), returns a
// negative NaN, as on x86.
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

// Rounds to odd, as fsdpi_f64_to_f32_odd does, which nvcc's flags and a GPU's NaNs would change.
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

// Element types: the stored type, and the type of calculations. plain: converts to a number, but
// for the bits of a NaN.
struct F32 {
    typedef float Bits;
    typedef float Number;
    static FSDPI_DEVICE float number(float x) { return x; }
    static FSDPI_DEVICE float plain(float x) { return x; }
    static FSDPI_DEVICE float bits(float x) { return x; }
    static FSDPI_DEVICE float bits(double x) { return narrow(x); }
};
struct F64 {
    typedef double Bits;
    typedef double Number;
    static FSDPI_DEVICE double number(double x) { return x; }
    static FSDPI_DEVICE double plain(double x) { return x; }
    static FSDPI_DEVICE double bits(double x) { return x; }
};
struct F16 {
    typedef uint16_t Bits;
    typedef float Number;
    static FSDPI_DEVICE float number(uint16_t h) { return fsdpi_f16_to_f32(h); }
    static FSDPI_DEVICE float plain(uint16_t h) { return plain_f16(h); }
    static FSDPI_DEVICE uint16_t bits(float x) { return fsdpi_f32_to_f16(x); }
    static FSDPI_DEVICE uint16_t bits(double x) { return fsdpi_f32_to_f16(narrow_odd(x)); }
};
struct BF16 {
    typedef uint16_t Bits;
    typedef float Number;
    static FSDPI_DEVICE float number(uint16_t h) { return fsdpi_bf16_to_f32(h); }
    static FSDPI_DEVICE float plain(uint16_t h) { return fsdpi_f32_of((uint32_t)h << 16); }
    static FSDPI_DEVICE uint16_t bits(float x) { return fsdpi_f32_to_bf16(x); }
    static FSDPI_DEVICE uint16_t bits(double x) { return fsdpi_f32_to_bf16(narrow_odd(x)); }
};

template <class A, class B> struct Wider { typedef double Number; };
template <> struct Wider<float, float> { typedef float Number; };

/* -------------------------------------------------------------------------------------------- */
// Memory. A chunk is a thread's part of one array: a vector, or one element.

template <class Bits, unsigned V> struct Chunk { Bits bits[V]; };

// Returns the alignment of a vector of `nbytes` bytes.
constexpr size_t alignment(size_t nbytes) { return nbytes < 16 ? nbytes : 16; }

#ifndef FSDP_CUDA_EMULATION
// The type that one instruction moves of a vector of NBYTES bytes.
template <size_t NBYTES> struct Word { typedef uint4 Type; };
template <> struct Word<4> { typedef uint32_t Type; };
template <> struct Word<8> { typedef uint2 Type; };
#endif

template <class Bits, unsigned V>
FSDPI_DEVICE void fetch(Chunk<Bits, V> *chunk, const void *from, bool is_vector) {
#ifdef FSDP_CUDA_EMULATION
    size_t nbytes = is_vector ? sizeof *chunk : sizeof(Bits);
    if ((uintptr_t)from % alignment(nbytes)) __builtin_trap(); // as on a GPU
    memcpy(chunk->bits, from, nbytes);
#else
    typedef typename Word<sizeof *chunk>::Type W;
    if (!is_vector) {
        chunk->bits[0] = *(const Bits *)from;
        return;
    }
    FSDPI_UNROLL for (int i = 0; i < (int)(sizeof *chunk / sizeof(W)); i++) {
        W word = ((const W *)from)[i];
        memcpy((char *)chunk + i * sizeof word, &word, sizeof word);
    }
#endif
}

// Stores a chunk without keeping it in a cache: results are large, and not read soon.
template <class Bits, unsigned V>
FSDPI_DEVICE void put(void *to, const Chunk<Bits, V> &chunk, bool is_vector) {
#ifdef FSDP_CUDA_EMULATION
    size_t nbytes = is_vector ? sizeof chunk : sizeof(Bits);
    if ((uintptr_t)to % alignment(nbytes)) __builtin_trap();
    memcpy(to, chunk.bits, nbytes);
#else
    typedef typename Word<sizeof chunk>::Type W;
    if (!is_vector) {
        __stcs((Bits *)to, chunk.bits[0]);
        return;
    }
    FSDPI_UNROLL for (int i = 0; i < (int)(sizeof chunk / sizeof(W)); i++) {
        W word;
        memcpy(&word, (const char *)&chunk + i * sizeof word, sizeof word);
        __stcs((W *)to + i, word);
    }
#endif
}

// Reports accesses of rows to a checker of races.
FSDPI_DEVICE void touch_rows(const fsdpi_cuda_run &run, const char *ptr, int64_t pitch,
                             size_t element, int write) {
    for (int64_t row = 0; row < run.height; row++)
        fsdp_stub_touch(ptr + row * pitch, (size_t)run.width * element, write);
}

// Returns the smallest number of elements before the first vector, equal in all arrays; -1: there
// is none. sizes: bytes of an element of each array.
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

// Cuts the rows into vectors, if head >= 0. A row that is shorter than head has none.
static void cut(fsdpi_cuda_run *run, int head, unsigned vector) {
    if (head < 0) return;
    run->head = head;
    run->vectors = (run->width - head) / (int64_t)vector;
}

// Makes a block a run of single elements; without gaps it is one row. Returns false if it is empty.
static bool run_of(fsdpi_cuda_run *run, const fsdp_block &b, const void *src, size_t in, void *dst,
                   size_t out) {
    if (b.width <= 0 || b.height <= 0) return false;
    bool is_row = b.height == 1 || (b.src_pitch == b.width && b.dst_pitch == b.width);
    run->src = src ? (const char *)src + b.src * (int64_t)in : NULL;
    run->dst = dst ? (char *)dst + b.dst * (int64_t)out : NULL;
    run->src_pitch = is_row ? 0 : b.src_pitch * (int64_t)in;
    run->dst_pitch = is_row ? 0 : b.dst_pitch * (int64_t)out;
    run->width = is_row ? b.width * b.height : b.width;
    run->height = is_row ? 1 : b.height;
    run->vectors = run->head = run->first = 0;
    return true;
}

// The runs of one launch, a part of a list. N: the capacity.
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
// Copies. The operation on an element is a Move, a Cast or a Clip.

struct Terms {
    double scale;
    int accumulate;
    double norm_type; // order of a clip's norm
    const double *sum;
};

// begin() reads values that lie on the device, and returns false if there is nothing to do.
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

// Returns x to the power p. Stays a call: inlined in the loops of norms it would take registers
// that other powers need.
FSDPI_CALLED double power(double x, double p) { return pow(x, p); }

// Clips in place; scale is the largest norm.
template <class P> struct Clip : Cast<P, P> {
    static FSDPI_DEVICE bool begin(Terms *terms) {
        fsdp_stub_touch(terms->sum, sizeof *terms->sum, 0);
        double p = terms->norm_type, norm = *terms->sum;
        if (p == 2) norm = root(norm);
        else if (p < (double)INFINITY) norm = power(norm, over(1.0, p));
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
    // Elements of a vector: adjacent threads move adjacent words, of 16 bytes on the wider side.
    static const unsigned V = 16 / (IN < OUT ? OUT : IN);

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

// Launches for as many blocks from *next on as fit in a launch, and advances *next.
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
/* Norms. Some launches reduce each tile to one number, and a last one reduces these numbers. The
   order of elements depends only on their positions in the run, and the order of tiles only on
   their positions in the list: so the bits depend on neither the GPU nor the number of thread
   blocks or launches. */

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

// Adds two numbers, or returns the larger one. As integers, magnitudes keep their order, with NaN
// above infinity.
FSDPI_DEVICE double join(double a, double b, int norm) {
    if (norm != LARGEST) return plus(a, b);
    return magnitude_bits(b) > magnitude_bits(a) ? b : a;
}

// Reduces all lanes to lanes[0], as a tree.
FSDPI_DEVICE void join_lanes(double *lanes, int norm) {
    for (uint32_t half = FSDPI_THREADS / 2; half; half /= 2) {
        FSDPI_EACH_THREAD(t) {
            if (t < half) lanes[t] = join(lanes[t], lanes[t + half], norm);
        }
        FSDPI_SYNC();
    }
}

// A thread's sum in f64, in which the product of two f32 numbers is exact.
template <int NORM> struct Wide {
    double sum;
    FSDPI_DEVICE Wide() : sum(0) {}
    FSDPI_DEVICE void add(float number, double p) {
        double x = plain(number);
        if (NORM == SQUARES) sum = add_exact(x, x, sum);
        else add(x, p);
    }
    FSDPI_DEVICE void add(double x, double p) {
        double next = NORM == SQUARES  ? times(x, x)
                      : NORM == POWERS ? power(magnitude(x), p)
                                       : magnitude(x);
        sum = join(sum, next, NORM);
    }
    FSDPI_DEVICE double value() const { return sum; }
};

// The largest magnitude of f32 numbers. As integers, magnitudes keep their order.
struct Most {
    uint32_t most;
    FSDPI_DEVICE Most() : most(0) {}
    template <class T> FSDPI_DEVICE void add(T x, double) {
        uint32_t magnitude = fsdpi_f32_bits(to<float>(x)) & 0x7FFFFFFFu;
        if (magnitude > most) most = magnitude;
    }
    FSDPI_DEVICE double value() const { return plain(fsdpi_f32_of(most)); }
};

// A sum in f32 for a device with few units for f64: `rest` is the sum of the rounding errors.
template <int NORM> struct Pair : Most {
    float sum, rest;
    FSDPI_DEVICE Pair() : sum(0), rest(0) {}
    template <class T> FSDPI_DEVICE void add(T number, double p) {
        float x = to<float>(number);
        float next = NORM == SQUARES ? times(x, x) : fsdpi_f32_of(fsdpi_f32_bits(x) & 0x7FFFFFFFu);
        float lost = NORM == SQUARES ? fused(x, x, -next) : 0;
        float whole = plus(sum, next), came = minus(whole, sum);
        lost = plus(lost, plus(minus(sum, minus(whole, came)), minus(next, came)));
        rest = plus(rest, lost);
        sum = whole;
        Most::add(x, p);
    }
    // From 2^-40 to 2^60: no square overflows, and numbers that vanish are too small to matter.
    FSDPI_DEVICE bool holds() const {
        return most == 0 || (most >= 87u << 23 && most <= 187u << 23);
    }
    FSDPI_DEVICE double value() const { return plus(plain(sum), plain(rest)); }
};

template <unsigned N> struct NormParams {
    double p;
    double *tiles; // a number per tile
    int norm;
    bool in_pairs;
    Runs<N> runs;
};

template <class In, unsigned N> struct NormTiles {
    typedef NormParams<N> Params;
    typedef typename In::Bits Bits;
    static const unsigned SIZE = sizeof(Bits), V = 16 / SIZE; // V: elements of a vector

    // Sums a thread's elements: every FSDPI_THREADS-th group of V. The first `vectors` groups are
    // read as vectors, the others element by element.
    template <class Sum>
    static FSDPI_DEVICE Sum sum_of(const fsdpi_cuda_run &run, const fsdpi_cuda_tile &tile,
                                   uint32_t vectors, double p, uint32_t t) {
        Sum sum;
        const char *begin = run.src + tile.item * SIZE; // if it has vectors, it is one row
        for (uint32_t at = t; at < vectors; at += FSDPI_ITEMS * FSDPI_THREADS) {
            Chunk<Bits, V> chunk[FSDPI_ITEMS];
            FSDPI_UNROLL for (uint32_t k = 0; k < FSDPI_ITEMS; k++) {
                uint32_t next = at + k * FSDPI_THREADS;
                if (next < vectors) fetch(&chunk[k], begin + next * 16, true);
            }
            FSDPI_UNROLL for (uint32_t k = 0; k < FSDPI_ITEMS; k++) {
                if (at + k * FSDPI_THREADS >= vectors) continue;
                FSDPI_UNROLL for (uint32_t j = 0; j < V; j++)
                    sum.add(In::plain(chunk[k].bits[j]), p);
            }
        }
        uint32_t at = vectors / FSDPI_THREADS * FSDPI_THREADS + t; // first group without a vector
        for (at += at < vectors ? FSDPI_THREADS : 0; at * V < tile.count; at += FSDPI_THREADS)
            FSDPI_ROLLED for (uint32_t i = at * V; i < at * V + V && i < tile.count; i++) {
                int64_t row, column;
                Chunk<Bits, 1> one;
                fsdpi_cuda_item(&tile, i, &row, &column);
                fetch(&one, run.src + row * run.src_pitch + column * SIZE, false);
                sum.add(In::plain(one.bits[0]), p);
            }
        return sum;
    }

    template <int NORM>
    static FSDPI_DEVICE double thread(const Params &p, const fsdpi_cuda_run &run,
                                      const fsdpi_cuda_tile &tile, uint32_t vectors, uint32_t t) {
        if (SIZE < sizeof(double) && p.in_pairs) {
            Pair<NORM> pair = sum_of<Pair<NORM>>(run, tile, vectors, p.p, t);
            if (pair.holds()) return pair.value();
        }
        return sum_of<Wide<NORM>>(run, tile, vectors, p.p, t).value();
    }

    static FSDPI_DEVICE double thread(const Params &p, const fsdpi_cuda_run &run,
                                      const fsdpi_cuda_tile &tile, uint32_t t) {
        const uint32_t vectors = run.vectors ? tile.count / V : 0;
        switch (p.norm) {
        case SQUARES: return thread<SQUARES>(p, run, tile, vectors, t);
        case MAGNITUDES: return thread<MAGNITUDES>(p, run, tile, vectors, t);
        case POWERS: return sum_of<Wide<POWERS>>(run, tile, 0, p.p, t).value(); // little code
        default: break;
        }
        if (SIZE < sizeof(double)) return sum_of<Most>(run, tile, vectors, p.p, t).value();
        return sum_of<Wide<LARGEST>>(run, tile, vectors, p.p, t).value();
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

// Reduces the numbers of all tiles in one thread block: first in each thread, then as a tree.
struct NormWhole {
    struct Params {
        const double *tiles;
        double *out;
        int64_t num;
        int norm, accumulate;
    };
    static FSDPI_DEVICE void block(const Params &p, uint32_t) {
        enum { AHEAD = 8 }; // loads of a thread that are outstanding at the same time
        FSDPI_SHARED double lanes[FSDPI_THREADS];
        fsdp_stub_touch(p.tiles, (size_t)p.num * sizeof(double), 0);
        fsdp_stub_touch(p.out, sizeof(double), 1);
        FSDPI_EACH_THREAD(t) {
            double sum = 0, next[AHEAD];
            for (int64_t at = t; at < p.num; at += AHEAD * FSDPI_THREADS) {
                FSDPI_UNROLL for (int k = 0; k < AHEAD; k++)
                    next[k] = at + k * FSDPI_THREADS < p.num ? p.tiles[at + k * FSDPI_THREADS] : 0;
                FSDPI_UNROLL for (int k = 0; k < AHEAD; k++) sum = join(sum, next[k], p.norm);
            }
            lanes[t] = sum;
        }
        FSDPI_SYNC();
        join_lanes(lanes, p.norm);
        FSDPI_EACH_THREAD(t) {
            if (t == 0) *p.out = p.accumulate ? join(*p.out, lanes[0], p.norm) : lanes[0];
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

template <class In, unsigned N>
static int norm_part(const NormJob &job, uint32_t *next, int64_t *tiles) {
    typedef NormTiles<In, N> Kernel;
    static const size_t size = Kernel::SIZE;
    static const unsigned V = Kernel::V;
    NormParams<N> p;
    p.p = job.p;
    p.norm = job.norm;
    p.in_pairs = job.in_pairs;
    p.tiles = job.partials + *tiles;
    p.runs.tiles = p.runs.grid = p.runs.num = 0;
    for (; *next < job.num && p.runs.num < N; ++*next) {
        fsdpi_cuda_run run;
        fsdp_block b = job.blocks[*next];
        b.dst_pitch = b.src_pitch;
        if (!run_of(&run, b, job.src, size, NULL, size)) continue;
        const void *src = run.src;
        if (run.height == 1 && head_of(&src, &size, 1, V) == 0) cut(&run, 0, V);
        append(&p.runs, run, fsdpi_cuda_tiles(run.width, run.height, FSDPI_NORM_TILE));
    }
    *tiles += p.runs.tiles;
    return p.runs.num ? launch<Kernel>(job.stream, p.runs.grid, p) : 0;
}

// Launches the norm of a list. The norm of an empty list is 0.
template <class In> static int norm_list(const NormJob &job) {
    uint32_t next = 0;
    int64_t tiles = 0;
    int error = 0;
    bool is_few = job.num <= FSDPI_FEW || !has_large_params();
    while (next < job.num && !error)
        error = is_few || job.num - next <= FSDPI_FEW
                    ? norm_part<In, FSDPI_FEW>(job, &next, &tiles)
                    : norm_part<In, FSDPI_MANY>(job, &next, &tiles);
    NormWhole::Params whole = {job.partials, job.out, tiles, job.norm, job.accumulate};
    return error ? error : launch<NormWhole>(job.stream, 1, whole);
}

/* -------------------------------------------------------------------------------------------- */
/* Optimizers. The operations are those of fsdp_optim.h, in the same order. A launch has a list of
   runs of one dtype: src is the gradient, and dst the parameter. */

template <class T> struct AdamW {
    T decay, weight, beta2, gain, bias, eps, rate;
    bool from_g; // true: lerp from the gradient, the nearer end
    static AdamW of(const double *s) {
        AdamW a = {(T)s[0], (T)s[1], (T)s[2], (T)s[3], (T)s[4], (T)s[5], (T)s[6], false};
        a.from_g = a.weight >= (T)0.5;
        if (a.from_g) a.weight -= (T)1;
        return a;
    }
    int states() const { return 2; }
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
    static Sgd of(const double *s) {
        Sgd a = {(T)-s[0], (T)s[1], (T)s[2], (T)s[3], s[3] > 0, s[1] > 0, s[4] != 0, s[5] != 0};
        return a;
    }
    int states() const { return has_buffer; }
    FSDPI_DEVICE void step(T *p, T d, T *b, T *) const {
        if (decays) d = plus(d, times(decay, *p));
        if (has_buffer) *b = fresh ? d : plus(times(*b, momentum), times(gain, d));
        if (has_buffer) d = nesterov ? plus(d, times(momentum, *b)) : *b;
        *p = plus(*p, times(rate, d));
    }
};

template <class T> struct Momentum { // p is u, first the momentum buffer
    T weight, momentum;
    bool nesterov;
    static Momentum of(const double *s) {
        Momentum a = {(T)s[0], (T)s[1], s[2] > 0};
        return a;
    }
    int states() const { return 1; }
    FSDPI_DEVICE void step(T *p, T g, T *b, T *) const {
        *b = plus(*b, times(minus(g, *b), weight));
        *p = nesterov ? plus(g, times(minus(*b, g), momentum)) : *b;
    }
};

template <class T> struct Muon {
    T decay, rate;
    static Muon of(const double *s) {
        Muon a = {(T)s[0], (T)s[1]};
        return a;
    }
    int states() const { return 0; }
    FSDPI_DEVICE void step(T *p, T x, T *, T *) const {
        *p = minus(times(*p, decay), times(rate, x));
    }
};

FSDPI_DEVICE uint32_t stir(uint32_t h) {
    h = (h ^ (h >> 16)) * 0x85EBCA6Bu;
    h = (h ^ (h >> 13)) * 0xC2B2AE35u;
    return h ^ (h >> 16);
}

// Rounding of a run's results.
template <class P> struct Rounding {
    static Rounding of(const fsdp_update &) { return Rounding(); }
    FSDPI_DEVICE typename P::Bits bits(typename P::Number x, int64_t) const { return P::bits(x); }
};
template <> struct Rounding<BF16> { // stochastic; if `row` is 0, to nearest
    uint64_t key;
    int64_t at, row, pitch;
    static Rounding of(const fsdp_update &u) {
        Rounding r = {u.key, u.at, u.rounds ? u.row : 0, u.pitch};
        return r;
    }
    FSDPI_DEVICE uint16_t bits(float x, int64_t i) const { // x: element i
        uint32_t bits = fsdpi_f32_bits(x);
        if (!row || (bits & 0x7FFFFFFFu) > 0x7F7F0000u) return BF16::bits(x);
        int64_t rows = i < row ? 0 : i / row;
        uint64_t index = (uint64_t)(at + rows * pitch + (i - rows * row));
        uint32_t high = (uint32_t)(index >> 32) * 0x9E3779B9u + (uint32_t)(key >> 32);
        uint32_t chance = stir(stir((uint32_t)index + (uint32_t)key) ^ high) >> 16;
        return (uint16_t)((bits + chance) >> 16);
    }
};

// Fetches a chunk of a dtype that is known at run time. A kernel for each dtype would mean four
// times as many kernels.
template <class G, class Number, unsigned V>
FSDPI_DEVICE void fetch_as(Chunk<Number, V> *numbers, const void *from, int64_t column,
                           bool is_vector) {
    Chunk<typename G::Bits, V> chunk;
    fetch(&chunk, (const typename G::Bits *)from + column, is_vector);
    FSDPI_UNROLL for (unsigned j = 0; j < V; j++) {
        if (j == 0 || is_vector) numbers->bits[j] = to<Number>(G::number(chunk.bits[j]));
    }
}
template <class Number, unsigned V>
FSDPI_DEVICE void fetch_any(Chunk<Number, V> *numbers, const void *from, int dtype, int64_t column,
                            bool is_vector) {
    switch (dtype) {
    case FSDP_F32: fetch_as<F32>(numbers, from, column, is_vector); break;
    case FSDP_F64: fetch_as<F64>(numbers, from, column, is_vector); break;
    case FSDP_F16: fetch_as<F16>(numbers, from, column, is_vector); break;
    default: fetch_as<BF16>(numbers, from, column, is_vector); break;
    }
}

// Parameters of a run, in addition to its parameter and its gradient.
template <template <class> class Rule, class P> struct Update {
    typedef typename P::Number Number;
    Number *first, *second; // states, or NULL
    int grad_dtype;
    Rule<Number> rule;
    Rounding<P> rounding;
};

template <template <class> class Rule, class P, unsigned N> struct Updates {
    struct Params {
        Runs<N> runs;
        Update<Rule, P> update[N];
    };
    typedef typename P::Bits Bits;
    typedef typename P::Number Number;
    static const unsigned ROOM = N, V = 16 / sizeof(Number);

    static void set(Params *p, const fsdp_update &u, fsdpi_cuda_run *run) {
        const Rule<Number> rule = Rule<Number>::of(u.scalars);
        Update<Rule, P> one = {rule.states() > 0 ? (Number *)u.first : NULL,
                               rule.states() > 1 ? (Number *)u.second : NULL, u.grad_dtype, rule,
                               Rounding<P>::of(u)};
        const void *arrays[] = {u.grad, u.param, one.first, one.second};
        const size_t sizes[] = {fsdpi_cuda_size_of(u.grad_dtype), sizeof(Bits), sizeof(Number),
                                sizeof(Number)};
        p->update[p->runs.num] = one;
        run->src = (const char *)u.grad;
        run->dst = (char *)u.param;
        cut(run, head_of(arrays, sizes, 4, V), V);
    }

    static FSDPI_DEVICE void item(const fsdpi_cuda_run &run, const Update<Rule, P> &u, int64_t at,
                                  bool is_vector) {
        Chunk<Bits, V> p;
        Chunk<Number, V> g, first, second;
        fetch(&p, (const Bits *)run.dst + at, is_vector);
        if (u.first) fetch(&first, u.first + at, is_vector);
        if (u.second) fetch(&second, u.second + at, is_vector);
        fetch_any(&g, run.src, u.grad_dtype, at, is_vector); // last, as its conversion waits for it
        FSDPI_UNROLL for (unsigned j = 0; j < V; j++) {
            if (j > 0 && !is_vector) continue;
            Number x = to<Number>(P::number(p.bits[j]));
            u.rule.step(&x, g.bits[j], &first.bits[j], &second.bits[j]);
            p.bits[j] = u.rounding.bits(x, at + j);
        }
        put((Bits *)run.dst + at, p, is_vector);
        if (u.first) put(u.first + at, first, is_vector);
        if (u.second) put(u.second + at, second, is_vector);
    }

    static FSDPI_DEVICE void touch(const fsdpi_cuda_run &run, const Update<Rule, P> &u) {
        size_t grad = u.grad_dtype == FSDP_F64 ? 8 : u.grad_dtype == FSDP_F32 ? 4 : 2;
        touch_rows(run, run.src, 0, grad, 0);
        touch_rows(run, run.dst, 0, sizeof(Bits), 1);
        if (u.first) touch_rows(run, (const char *)u.first, 0, sizeof(Number), 1);
        if (u.second) touch_rows(run, (const char *)u.second, 0, sizeof(Number), 1);
    }

    static FSDPI_DEVICE void block(const Params &p, uint32_t index) {
        for (int64_t at = index; at < p.runs.tiles; at += p.runs.grid) {
            uint32_t which = fsdpi_cuda_find(p.runs.run, p.runs.num, at);
            const fsdpi_cuda_run &run = p.runs.run[which]; // a copy would take registers
            const Update<Rule, P> &update = p.update[which];
            fsdpi_cuda_tile tile = fsdpi_cuda_tile_at(fsdpi_cuda_row_items(&run, V), 1,
                                                      at - run.first, FSDPI_TILE);
            if (at == run.first) touch(run, update);
            FSDPI_EACH_THREAD(t) {
                for (uint32_t i = t; i < tile.count; i += FSDPI_THREADS) {
                    int64_t place = tile.item + i;
                    item(run, update, fsdpi_cuda_column(&run, place, V), place < run.vectors);
                }
            }
        }
    }
};

FSDPI_DEVICE bool is_finite(float x) { return (fsdpi_f32_bits(x) & 0x7F800000u) != 0x7F800000u; }
FSDPI_DEVICE bool is_finite(double x) { return magnitude_bits(x) < 0x7FF0000000000000ull; }

template <class G, unsigned N> struct Unscale {
    typedef typename G::Number Number;
    typedef typename G::Bits Bits;
    struct Params {
        double scalar;      // the factor, or the least norm
        const double *norm; // its square, or NULL
        int32_t *found;     // or NULL
        Runs<N> runs;
    };
    static const unsigned ROOM = N, V = 16 / sizeof(Bits);

    static void set(Params *p, const fsdp_update &u, fsdpi_cuda_run *run) {
        const void *grad = u.grad;
        const size_t size = sizeof(Bits);
        p->scalar = u.scalars[0];
        p->norm = (const double *)u.first;
        p->found = u.found;
        run->dst = (char *)u.grad;
        cut(run, head_of(&grad, &size, 1, V), V);
    }

    // Scales a chunk. Returns true if all elements were finite.
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
        const double norm = p.norm ? root(*p.norm) : 1;
        const double scalar = p.norm ? over(1.0, norm < p.scalar ? p.scalar : norm) : p.scalar;
        const Number factor = (Number)(float)scalar;
        if (index == 0 && p.norm) fsdp_stub_touch(p.norm, sizeof *p.norm, 0);
        if (index == 0 && p.found) fsdp_stub_touch(p.found, sizeof *p.found, 1);
        FSDPI_EACH_THREAD(t) {
            if (t == 0) found[0] = 0;
        }
        FSDPI_SYNC();
        for (int64_t at = index; at < p.runs.tiles; at += p.runs.grid) {
            const fsdpi_cuda_run run = p.runs.run[fsdpi_cuda_find(p.runs.run, p.runs.num, at)];
            fsdpi_cuda_tile tile = fsdpi_cuda_tile_at(fsdpi_cuda_row_items(&run, V), 1,
                                                      at - run.first, FSDPI_TILE);
            if (at == run.first) touch_rows(run, run.dst, 0, sizeof(Bits), 1);
            FSDPI_EACH_THREAD(t) {
                for (uint32_t i = t; i < tile.count; i += FSDPI_THREADS) {
                    int64_t place = tile.item + i;
                    Bits *grad = (Bits *)run.dst + fsdpi_cuda_column(&run, place, V);
                    if (!item(grad, factor, place < run.vectors)) found[0] = 1;
                }
            }
        }
        FSDPI_SYNC();
        FSDPI_EACH_THREAD(t) {
            if (t == 0 && found[0] && p.found) join_flag(p.found);
        }
    }
};

// Averages of parameters: see FSDP_UPDATE_EMA.
template <class T> struct Lerp {
    T weight;
    bool from_end; // true: from `to`, the nearer end
    static Lerp of(double gain) {
        Lerp l = {(T)gain, (T)gain >= (T)0.5};
        if (l.from_end) l.weight -= (T)1;
        return l;
    }
    FSDPI_DEVICE T operator()(T from, T to) const {
        return fused(minus(to, from), weight, from_end ? to : from);
    }
};

// Parameters of a run of averages, in addition to the averaged parameter.
template <class P> struct AverageUpdate {
    typename P::Number *average;
    typename P::Bits *bits; // for parameters of 16 bits; otherwise NULL
    int act;                // FSDP_EMA_*
    Lerp<typename P::Number> lerp;
};

template <class P, unsigned N> struct Average {
    typedef typename P::Bits Bits;
    typedef typename P::Number Number;
    typedef AverageUpdate<P> Update;
    struct Params {
        Runs<N> runs;
        Update update[N];
    };
    static const unsigned ROOM = N, V = 16 / sizeof(Number);
    static const bool IS_NARROW = sizeof(Bits) < sizeof(Number);

    static void set(Params *p, const fsdp_update &u, fsdpi_cuda_run *run) {
        const Update one = {(Number *)u.first, IS_NARROW ? (Bits *)u.second : NULL,
                            (int)u.scalars[1], Lerp<Number>::of(u.scalars[0])};
        const void *arrays[] = {u.param, one.average, one.bits};
        const size_t sizes[] = {sizeof(Bits), sizeof(Number), sizeof(Bits)};
        p->update[p->runs.num] = one;
        run->dst = (char *)u.param;
        cut(run, head_of(arrays, sizes, 3, V), V);
    }

    static FSDPI_DEVICE void swap(Bits *param, const Update &u, int64_t at, bool is_vector) {
        Chunk<Bits, V> p, kept;
        Chunk<Number, V> average;
        fetch(&p, param + at, is_vector);
        fetch(&average, u.average + at, is_vector);
        if (u.act == FSDP_EMA_SWAP) kept = p;
        else if (IS_NARROW) fetch(&kept, u.bits + at, is_vector);
        FSDPI_UNROLL for (unsigned j = 0; j < V; j++) {
            if (j > 0 && !is_vector) continue;
            const Number x = average.bits[j];
            average.bits[j] = P::number(p.bits[j]);
            p.bits[j] = IS_NARROW && u.act == FSDP_EMA_SWAP_BACK ? kept.bits[j] : P::bits(x);
        }
        put(param + at, p, is_vector);
        if (!IS_NARROW) put(u.average + at, average, is_vector);
        else if (u.act == FSDP_EMA_SWAP) put(u.bits + at, kept, is_vector);
    }

    static FSDPI_DEVICE void average(const Bits *param, const Update &u, int64_t at,
                                     bool is_vector) {
        Chunk<Bits, V> p;
        Chunk<Number, V> average;
        fetch(&p, param + at, is_vector);
        fetch(&average, u.average + at, is_vector);
        FSDPI_UNROLL for (unsigned j = 0; j < V; j++) {
            if (j > 0 && !is_vector) continue;
            const Number x = P::number(p.bits[j]);
            average.bits[j] = u.act == FSDP_EMA_COPY ? x : u.lerp(average.bits[j], x);
        }
        put(u.average + at, average, is_vector);
    }

    static FSDPI_DEVICE void touch(const fsdpi_cuda_run &run, const Update &u) {
        const int swaps = u.act >= FSDP_EMA_SWAP;
        touch_rows(run, run.dst, 0, sizeof(Bits), swaps);
        touch_rows(run, (const char *)u.average, 0, sizeof(Number), !swaps || !IS_NARROW);
        if (swaps && IS_NARROW)
            touch_rows(run, (const char *)u.bits, 0, sizeof(Bits), u.act == FSDP_EMA_SWAP);
    }

    static FSDPI_DEVICE void block(const Params &p, uint32_t index) {
        for (int64_t at = index; at < p.runs.tiles; at += p.runs.grid) {
            uint32_t which = fsdpi_cuda_find(p.runs.run, p.runs.num, at);
            const fsdpi_cuda_run &run = p.runs.run[which];
            const Update &update = p.update[which];
            fsdpi_cuda_tile tile = fsdpi_cuda_tile_at(fsdpi_cuda_row_items(&run, V), 1,
                                                      at - run.first, FSDPI_TILE);
            if (at == run.first) touch(run, update);
            FSDPI_EACH_THREAD(t) {
                for (uint32_t i = t; i < tile.count; i += FSDPI_THREADS) {
                    int64_t place = tile.item + i, column = fsdpi_cuda_column(&run, place, V);
                    Bits *param = (Bits *)run.dst;
                    if (update.act >= FSDP_EMA_SWAP)
                        swap(param, update, column, place < run.vectors);
                    else average(param, update, column, place < run.vectors);
                }
            }
        }
    }
};

struct UpdateJob {
    void *stream;
    const fsdp_update *updates;
    uint32_t num;
    bool is_few;
};

static int dtype_of(const fsdp_update &u) {
    return u.kind == FSDP_UPDATE_UNSCALE ? u.grad_dtype : u.dtype;
}

// Launches for as many updates of this dtype from *next on as fit in a launch. Advances *next.
template <class Kernel> static int update_part(const UpdateJob &job, int dtype, uint32_t *next) {
    typename Kernel::Params p;
    p.runs.tiles = p.runs.grid = p.runs.num = 0;
    for (; *next < job.num && p.runs.num < Kernel::ROOM; ++*next) {
        const fsdp_update &u = job.updates[*next];
        const fsdp_block row = {0, 0, u.count, 1, 0, 0};
        fsdpi_cuda_run run;
        if (dtype_of(u) != dtype || !run_of(&run, row, NULL, 0, NULL, 0)) continue;
        Kernel::set(&p, u, &run);
        append(&p.runs, run,
               fsdpi_cuda_tiles(fsdpi_cuda_row_items(&run, Kernel::V), 1, FSDPI_TILE));
    }
    return p.runs.num ? launch<Kernel>(job.stream, p.runs.grid, p) : 0;
}

template <class Few, class Many> static int update_list(const UpdateJob &job, int dtype) {
    int error = 0;
    for (uint32_t next = 0; next < job.num && !error;)
        error = job.is_few ? update_part<Few>(job, dtype, &next)
                           : update_part<Many>(job, dtype, &next);
    return error;
}

template <template <class> class Rule, class P>
static int update_by(const UpdateJob &job, int dtype) {
    const unsigned many = (FSDPI_PARAMS - 128) / (sizeof(fsdpi_cuda_run) + sizeof(Update<Rule, P>));
    return update_list<Updates<Rule, P, FSDPI_FEW>, Updates<Rule, P, many>>(job, dtype);
}

template <class P> static int average_list(const UpdateJob &job, int dtype) {
    const unsigned many =
        (FSDPI_PARAMS - 128) / (sizeof(fsdpi_cuda_run) + sizeof(AverageUpdate<P>));
    return update_list<Average<P, FSDPI_FEW>, Average<P, many>>(job, dtype);
}

template <class P> static int update_as(const UpdateJob &job, int dtype) {
    switch (job.updates->kind) {
    case FSDP_UPDATE_ADAMW: return update_by<AdamW, P>(job, dtype);
    case FSDP_UPDATE_SGD: return update_by<Sgd, P>(job, dtype);
    case FSDP_UPDATE_MOMENTUM: return update_by<Momentum, P>(job, dtype);
    case FSDP_UPDATE_MUON: return update_by<Muon, P>(job, dtype);
    case FSDP_UPDATE_EMA: return average_list<P>(job, dtype);
    default: return update_list<Unscale<P, FSDPI_FEW>, Unscale<P, FSDPI_MANY>>(job, dtype);
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
        count += tiles;
    }
    return (size_t)count;
}

FSDP_CUDA_API int fsdp_cuda_norm(void *stream, double *out, const void *src, int dtype,
                                 const fsdp_block *blocks, uint32_t num, double p, int accumulate,
                                 int in_pairs, double *partials) {
    using namespace fsdpi_cuda;
    int norm = p == (double)INFINITY ? LARGEST : p == 2 ? SQUARES : p == 1 ? MAGNITUDES : POWERS;
    bool pairs = in_pairs != 0;
    NormJob job = {stream, out, partials, src, dtype, norm, accumulate, pairs, blocks, num, p};
    switch (dtype) {
    case FSDP_F32: return norm_list<F32>(job);
    case FSDP_F64: return norm_list<F64>(job);
    case FSDP_F16: return norm_list<F16>(job);
    case FSDP_BF16: return norm_list<BF16>(job);
    default: return cudaErrorInvalidValue;
    }
}

FSDP_CUDA_API int fsdp_cuda_update(void *stream, const fsdp_update *updates, uint32_t num) {
    using namespace fsdpi_cuda;
    UpdateJob job = {stream, updates, num, num <= FSDPI_FEW || !has_large_params()};
    for (uint32_t i = 0; i < num; i++) {
        int kind = updates[i].kind;
        if (kind < FSDP_UPDATE_ADAMW || kind > FSDP_UPDATE_MUON || kind != updates->kind ||
            !fsdpi_cuda_is_float(updates[i].grad_dtype) ||
            !fsdpi_cuda_is_float(dtype_of(updates[i])))
            return cudaErrorInvalidValue;
    }
    int error = num ? update_as<F32>(job, FSDP_F32) : 0;
    if (num && !error) error = update_as<F64>(job, FSDP_F64);
    if (num && !error) error = update_as<F16>(job, FSDP_F16);
    if (num && !error) error = update_as<BF16>(job, FSDP_BF16);
    return error;
}

} // extern "C"

namespace fsdpi_cuda {
namespace {

const int floats[] = {FSDP_F32, FSDP_F64, FSDP_F16, FSDP_BF16};

// Loads the kernels of a dtype: copies to all dtypes, the clip and the norm, for `num` blocks.
static int load_lists(int dtype, const fsdp_block *blocks, uint32_t num) {
    void *at = (void *)(uintptr_t)4096; // not read: no kernel runs
    double *numbers = (double *)at;
    int error = 0;
    for (int to = 0; to < 4 && !error; to++)
        error = fsdp_cuda_copy(FSDPI_LOADS, at, floats[to], at, dtype, blocks, num, 2, 0);
    if (!error) error = fsdp_cuda_clip(FSDPI_LOADS, at, dtype, blocks, num, 1, 2, numbers);
    if (!error)
        error = fsdp_cuda_norm(FSDPI_LOADS, numbers, at, dtype, blocks, num, 2, 0, 0, numbers);
    return error;
}

// Loads the kernels of a dtype's updates, for `num` updates.
static int load_updates(int dtype, uint32_t num) {
    void *at = (void *)(uintptr_t)4096;
    fsdp_update u[FSDPI_FEW + 1];
    int error = 0;
    memset(u, 0, sizeof u);
    for (int kind = FSDP_UPDATE_ADAMW; kind <= FSDP_UPDATE_MUON && !error; kind++) {
        for (uint32_t i = 0; i < num; i++) {
            u[i].kind = (uint8_t)kind;
            u[i].dtype = u[i].grad_dtype = (uint8_t)dtype;
            u[i].count = 1;
            u[i].param = u[i].grad = u[i].first = u[i].second = at;
            u[i].found = (int32_t *)at;
        }
        error = fsdp_cuda_update(FSDPI_LOADS, u, num);
    }
    return error;
}

} // namespace
} // namespace fsdpi_cuda

extern "C" {

FSDP_CUDA_API int fsdp_cuda_load(void) {
    using namespace fsdpi_cuda;
    static const int sizes[] = {FSDP_U8, FSDP_F16, FSDP_F32, FSDP_F64}; // a dtype per element size
    void *at = (void *)(uintptr_t)4096;
    fsdp_block blocks[FSDPI_FEW + 1];
    const fsdp_block one = {0, 0, 1, 1, 1, 1};
    int error = 0;
    for (uint32_t i = 0; i <= FSDPI_FEW; i++) blocks[i] = one;
    for (uint32_t num = 1; num <= FSDPI_FEW + 1; num += FSDPI_FEW)
        for (int i = 0; i < 4 && !error; i++) {
            error = fsdp_cuda_copy(FSDPI_LOADS, at, sizes[i], at, sizes[i], blocks, num, 1, 0);
            if (!error) error = load_lists(floats[i], blocks, num);
            if (!error) error = load_updates(floats[i], num);
        }
    return error;
}

} // extern "C"
