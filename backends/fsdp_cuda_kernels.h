/* fsdp_cuda_kernels.h - the functions of fsdp_cuda.cu (CUDA C++) that fsdp_cuda.h (C) calls

   Functions that launch kernels, and the kernels' arithmetic of indices, which is plain C, so that
   tests can use sizes that no memory has.

   All launches are asynchronous: they neither block nor allocate. After they have returned, only
   device memory is read. `stream` is a cudaStream_t; the result is a cudaError_t, 0 being
   cudaSuccess. Included after fsdp.h.

   SPDX-License-Identifier: MIT (full text at the end of fsdp.h) */
#ifndef FSDP_H
#include "../fsdp.h"
#endif
#ifndef FSDP_CUDA_KERNELS_H
#define FSDP_CUDA_KERNELS_H

#include <stddef.h> // size_t
#include <stdint.h> // int64_t, uint32_t

#ifdef __CUDACC__
#define FSDPI_CUDA_INLINE static __host__ __device__ __forceinline__
#else
#define FSDPI_CUDA_INLINE static inline
#endif

// The kernels are a part of the unit that has the library, and private if all of it is.
#if defined(__CUDACC__) && defined(FSDP_STATIC)
#define FSDP_CUDA_API static __attribute__((unused))
#else
#define FSDP_CUDA_API extern
#endif

#ifdef __cplusplus
extern "C" {
#endif

/* Loads all kernels onto the current device, so that no launch has to wait. This call may wait. */
FSDP_CUDA_API int fsdp_cuda_load(void);

/* dst (+)= scale * src, block by block, with the arithmetic and the bits of the CPU's copy: f32, or
   f64 where a dtype is f64. dst and src may be the same memory if blocks and dtypes are the same.
   Written rows must not overlap; read rows may overlap, and src_pitch may be 0.
   Integers are copied as they are: equal dtypes, scale 1, no accumulate.                         */
FSDP_CUDA_API int fsdp_cuda_copy(void *stream, void *dst, int out_dtype, const void *src, int dtype,
                                 const fsdp_block *blocks, uint32_t num, double scale,
                                 int accumulate);

/* *out (device memory) = sum of |x|^p over the blocks' rows in f64; p infinite: the largest |x|, a
   NaN being larger than infinity. accumulate: joined with the value in *out. The order of additions
   depends only on the sizes of the blocks and on their order: with equal in_pairs a list gives
   equal bits wherever its blocks lie, with or without gaps between rows, on any GPU and driver.
   in_pairs    for a device that has few units for f64, where that adds up too slowly: a thread adds
               up its elements of a tile in two f32, to about 44 bits, if p is 1 or 2 and no f64 is
               given; elements of which a square leaves the range of f32 are added up in f64
   partials    device memory of fsdp_cuda_norm_partials() doubles, aligned as doubles are         */
FSDP_CUDA_API size_t fsdp_cuda_norm_partials(const fsdp_block *blocks, uint32_t num);
FSDP_CUDA_API int fsdp_cuda_norm(void *stream, double *out, const void *src, int dtype,
                                 const fsdp_block *blocks, uint32_t num, double p,
                                 int accumulate, int in_pairs, double *partials);

/* data *= max_norm / (norm + 1e-6) if that is less than 1, or NaN. *sum (device memory) is a result
   of fsdp_cuda_norm with this p, perhaps over other elements, too. Bits are those of
   fsdp_cuda_copy with this scale; after a NaN norm all are NaN. Blocks are in place: dst as src. */
FSDP_CUDA_API int fsdp_cuda_clip(void *stream, void *data, int dtype, const fsdp_block *blocks,
                                 uint32_t num, double max_norm, double p, const double *sum);

/* The runs of a step, all of one kind: the bits of fsdp_optim.h on the CPU, except which NaN it is.
   Runs of one dtype of parameters (UNSCALE: of gradients) are one launch, if they are at most 190;
   with an nvcc before 12.1 or a driver before 530, at most 24. Runs of UNSCALE have one scale and
   one `found`.                                                                                   */
FSDP_CUDA_API int fsdp_cuda_update(void *stream, const fsdp_update *updates, uint32_t num);

/* -------------------------------------------------------------------------------------------- */
/* The division of kernels' work. A run is a block whose rows are sequences of items: first whole
   vectors, which begin `head` elements into the row, then the single elements before and after
   them. A tile is a fixed number of items, in the order of rows; a thread block does one at a time.
   If a run has several rows, a thread does one 64-bit division for a tile, and 32-bit ones for its
   items.                                                                                         */

typedef struct fsdpi_cuda_run {
    const char *src;
    char *dst;
    int64_t src_pitch, dst_pitch; // bytes
    int64_t width, height;        // elements, rows
    int64_t vectors, head;        // of each row
    int64_t first;                // first tile, among those of the launch
} fsdpi_cuda_run;

typedef struct fsdpi_cuda_tile {
    int64_t row, item;        // row and item of the tile's first item
    uint32_t count;           // items
    uint32_t room, row_items; // items of its first row, of the others: at most the tile's size
} fsdpi_cuda_tile;

// Returns the number of items of a row. vector: elements of one vector.
FSDPI_CUDA_INLINE int64_t fsdpi_cuda_row_items(const fsdpi_cuda_run *run, uint32_t vector) {
    return run->width - run->vectors * (vector - 1);
}

FSDPI_CUDA_INLINE int64_t fsdpi_cuda_tiles(int64_t row_items, int64_t height, uint32_t size) {
    int64_t items = row_items * height;
    return items / size + (items % size != 0);
}

// Returns the run of a tile of the launch. Every run has a tile.
FSDPI_CUDA_INLINE uint32_t fsdpi_cuda_find(const fsdpi_cuda_run *runs, uint32_t num, int64_t tile) {
    uint32_t low = 0, high = num;
    while (high - low > 1) {
        uint32_t middle = (low + high) / 2;
        if (runs[middle].first <= tile) low = middle;
        else high = middle;
    }
    return low;
}

// Returns a tile of a run. index: the tile's index in its run; size: items of a whole tile.
FSDPI_CUDA_INLINE fsdpi_cuda_tile fsdpi_cuda_tile_at(int64_t row_items, int64_t height,
                                                     int64_t index, uint32_t size) {
    fsdpi_cuda_tile t;
    int64_t begin = index * size, left = row_items * height - begin, room;
    t.row = height == 1 ? 0 : begin / row_items;
    t.item = begin - t.row * row_items;
    room = row_items - t.item;
    t.count = left < size ? (uint32_t)left : size;
    t.room = room < size ? (uint32_t)room : size;
    // A longer row ends in a later tile.
    t.row_items = row_items < size ? (uint32_t)row_items : size;
    return t;
}

// Finds row and item of item i < count of a tile.
FSDPI_CUDA_INLINE void fsdpi_cuda_item(const fsdpi_cuda_tile *t, uint32_t i, int64_t *row,
                                       int64_t *item) {
    *row = t->row;
    *item = t->item + i;
    if (i < t->room) return;
    uint32_t past = i - t->room, rows = past / t->row_items;
    *row = t->row + 1 + rows;
    *item = past - rows * t->row_items;
}

// Returns the column of an item's first element.
FSDPI_CUDA_INLINE int64_t fsdpi_cuda_column(const fsdpi_cuda_run *run, int64_t item,
                                            uint32_t vector) {
    int64_t single = item - run->vectors;
    if (single < 0) return run->head + item * vector;
    return single < run->head ? single : single + run->vectors * vector;
}

#ifdef __cplusplus
}
#endif
#endif
