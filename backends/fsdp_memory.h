/* fsdp_memory.h - the list of a world's allocations

   Included by the comm base.

   SPDX-License-Identifier: MIT (full text at the end of fsdp.h) */
#ifndef FSDP_H
#include "../fsdp.h"
#endif
#ifndef FSDPI_BACKENDS_MEMORY_H
#define FSDPI_BACKENDS_MEMORY_H

#include "../src/core/alloc.h"
#include "../src/base/os.h"

#include <string.h>

// An allocation. If a backend maps the parts of all ranks, they lie one after another from base on.
typedef struct fsdpi_chunk {
    char *base;
    size_t size, part; // bytes that the caller wanted; bytes from one rank's part to the next one's
    uint64_t at;       // the backend's: location of the memory, or its allocator
    uint64_t number;   // the backend's: number among this rank's allocations
} fsdpi_chunk;

typedef struct fsdpi_chunks {
    uint32_t lock; // one thread allocates while another is in a collective
    int count, cap;
    fsdpi_chunk *list; // by address
} fsdpi_chunks;

// Returns the index of the last chunk that begins at or before p; -1: none.
static int fsdpi_chunk_before(const fsdpi_chunks *chunks, uintptr_t p) {
    int low = 0, high = chunks->count;
    while (low < high) {
        int middle = (low + high) / 2;
        if ((uintptr_t)chunks->list[middle].base <= p) low = middle + 1;
        else high = middle;
    }
    return low - 1;
}

static int fsdpi_chunk_insert(fsdpi_chunks *chunks, const fsdp_allocator *a, fsdpi_chunk chunk) {
    int done = 0;
    fsdpi_lock(&chunks->lock);
    if (chunks->count == chunks->cap) {
        int cap = chunks->cap ? 2 * chunks->cap : 32;
        fsdpi_chunk *more = (fsdpi_chunk *)fsdpi_alloc(a, (size_t)cap * sizeof *more);
        if (more && chunks->count) memcpy(more, chunks->list, (size_t)chunks->count * sizeof *more);
        if (more) {
            fsdpi_free(a, chunks->list);
            chunks->list = more;
            chunks->cap = cap;
        }
    }
    if (chunks->count < chunks->cap) {
        int i = fsdpi_chunk_before(chunks, (uintptr_t)chunk.base) + 1;
        memmove(chunks->list + i + 1, chunks->list + i, (size_t)(chunks->count - i) * sizeof chunk);
        chunks->list[i] = chunk;
        chunks->count++;
        done = 1;
    }
    fsdpi_unlock(&chunks->lock);
    return done;
}

// Removes the chunk in which this rank's part begins at ptr. Returns 0 if there is none.
static int fsdpi_chunk_take(fsdpi_chunks *chunks, int rank, const void *ptr, fsdpi_chunk *out) {
    fsdpi_lock(&chunks->lock);
    int i = fsdpi_chunk_before(chunks, (uintptr_t)ptr);
    int known = i >= 0 &&
                chunks->list[i].base + chunks->list[i].part * (size_t)rank == (const char *)ptr;
    if (known) {
        *out = chunks->list[i];
        chunks->count--;
        memmove(chunks->list + i, chunks->list + i + 1, (size_t)(chunks->count - i) * sizeof *out);
    }
    fsdpi_unlock(&chunks->lock);
    return known;
}

#endif // FSDPI_BACKENDS_MEMORY_H
