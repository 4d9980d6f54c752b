/* core/alloc.h - host memory, of a world and of a model

   A block is aligned to 64 bytes and, except for scratch, zero-filled. Its size is stored before
   it, since the caller's allocator gets the size when the library frees the block.
   State: fsdp_model.counters.allocations.
   Callers: unit.h (fsdpi_model_free), backends/fsdp_nccl.h (fsdpi_free), predict.h
     (fsdpi_model_free) and others.

   A part of fsdp.h. SPDX-License-Identifier: MIT (full text at the end of fsdp.h) */
#ifndef FSDP_H
#include "../../fsdp.h"
#endif
#ifndef FSDPI_CORE_ALLOC_H
#define FSDPI_CORE_ALLOC_H

#include "error.h"
#include "../base/macros.h"
#include "objects.h"

#include <stdlib.h>
#include <string.h>

#define FSDPI_ALIGN 64

static void *fsdpi_libc_alloc(size_t size, size_t align, void *user) {
    (void)user;
    char *raw = (char *)malloc(size + align + sizeof(void *)); // strict C99 hides posix_memalign
    if (!raw) return NULL;
    uintptr_t at = ((uintptr_t)raw + sizeof(void *) + align - 1) & ~(uintptr_t)(align - 1);
    memcpy((char *)at - sizeof raw, &raw, sizeof raw);
    return (char *)at;
}

static void fsdpi_libc_free(void *ptr, size_t size, void *user) {
    void *raw;
    (void)size, (void)user;
    memcpy(&raw, (char *)ptr - sizeof raw, sizeof raw);
    free(raw);
}

// Allocates a block without clearing it: pages that the caller does not write cost nothing.
static void *fsdpi_alloc_scratch(const fsdp_allocator *a, size_t size) {
    if (size > SIZE_MAX - 2 * FSDPI_ALIGN) return NULL;
    size += FSDPI_ALIGN;
    char *raw = (char *)a->alloc(size, FSDPI_ALIGN, a->user);
    if (!raw) return NULL;
    memcpy(raw, &size, sizeof size);
    return raw + FSDPI_ALIGN;
}

static void *fsdpi_alloc(const fsdp_allocator *a, size_t size) {
    void *block = fsdpi_alloc_scratch(a, size);
    return block ? memset(block, 0, size) : NULL;
}

static size_t fsdpi_alloc_size(const void *ptr) {
    size_t size;
    memcpy(&size, (const char *)ptr - FSDPI_ALIGN, sizeof size);
    return size;
}

static FSDPI_NOINLINE void fsdpi_free(const fsdp_allocator *a, void *ptr) {
    if (ptr) a->free((char *)ptr - FSDPI_ALIGN, fsdpi_alloc_size(ptr), a->user);
}

static char *fsdpi_copy_text(const fsdp_allocator *a, const char *text) {
    size_t size = strlen(text) + 1;
    char *copy = (char *)fsdpi_alloc(a, size);
    if (copy) memcpy(copy, text, size);
    return copy;
}

static void *fsdpi_model_alloc(fsdp_model *m, size_t size) {
    void *ptr = fsdpi_alloc(&m->world->boot.allocator, size);
    if (!ptr) return NULL;
    m->host_bytes += (int64_t)fsdpi_alloc_size(ptr);
    m->counters.allocations++;
    return ptr;
}

static FSDPI_NOINLINE void fsdpi_model_free(fsdp_model *m, void *ptr) {
    if (!ptr) return;
    m->host_bytes -= (int64_t)fsdpi_alloc_size(ptr);
    fsdpi_free(&m->world->boot.allocator, ptr);
}

// Makes room for one more element; the array may move. On failure nothing changes.
static fsdp_status fsdpi_grow(fsdp_model *m, void **array, int count, int *cap, size_t size,
                              const char *what, const char *name) {
    if (count < *cap) return FSDP_OK;
    int wanted = *cap ? 2 * *cap : 8;
    void *bigger = fsdpi_model_alloc(m, (size_t)wanted * size);
    if (!bigger) return fsdpi_no_memory(m->world, what, name, (size_t)wanted * size);
    if (count) memcpy(bigger, *array, (size_t)count * size);
    fsdpi_model_free(m, *array);
    *array = bigger;
    *cap = wanted;
    return FSDP_OK;
}

#endif // FSDPI_CORE_ALLOC_H
