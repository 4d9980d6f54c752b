/* fsdp_memory.h - the list of a world's allocations, and how much memory is left

   Included by the comm base.

   SPDX-License-Identifier: MIT (full text at the end of fsdp.h) */
#ifndef FSDP_H
#include "../fsdp.h"
#endif
#ifndef FSDPI_BACKENDS_MEMORY_H
#define FSDPI_BACKENDS_MEMORY_H

#include "../src/core/alloc.h"
#include "../src/base/os.h"

#include <stdio.h>
#include <stdlib.h>
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

// Returns the number after `key` at the start of a line of a small text file, or -1. key "": the
// first line.
static int64_t fsdpi_read_number(const char *path, const char *key) {
    char line[256];
    int64_t value = -1;
    FILE *file = fopen(path, "r");
    if (!file) return -1;
    while (value < 0 && fgets(line, sizeof line, file)) {
        char *end = line + strlen(key);
        if (!strncmp(line, key, strlen(key)) && strspn(end, " \t0123456789") > 0)
            value = (int64_t)strtoull(end, NULL, 10);
        else if (!*key) break;
    }
    (void)fclose(file);
    return value;
}

// Lowers *least to the bytes that a control group and its parents still allow. Page cache counts as
// free.
static void fsdpi_group_limit(const char *root, const char *path, const char *limit_name,
                              const char *usage_name, int64_t *least) {
    char dir[400], name[480];
    if (snprintf(dir, sizeof dir, "%s%s", root, path) >= (int)sizeof dir) return;
    for (;;) {
        (void)snprintf(name, sizeof name, "%s/%s", dir, limit_name);
        int64_t limit = fsdpi_read_number(name, "");
        (void)snprintf(name, sizeof name, "%s/%s", dir, usage_name);
        int64_t used = fsdpi_read_number(name, "");
        (void)snprintf(name, sizeof name, "%s/memory.stat", dir);
        int64_t cache = fsdpi_read_number(name, "inactive_file ") +
                        fsdpi_read_number(name, "active_file ");
        int64_t left = limit - used + (cache > 0 ? cache : 0);
        if (limit >= 0 && used >= 0 && left < *least) *least = left > 0 ? left : 0;
        char *slash = strrchr(dir, '/');
        if (!slash || slash < dir + strlen(root)) return;
        *slash = 0;
    }
}

// Returns the bytes that processes can still take before the kernel kills some. *whose: the name of
// that limit.
static int64_t fsdpi_memory_left(const char **whose) {
    char line[400];
    int64_t machine = fsdpi_read_number("/proc/meminfo", "MemAvailable:"), least;
    if (machine < 0) machine = INT64_MAX / 1024;
    least = machine *= 1024;
    FILE *file = fopen("/proc/self/cgroup", "r");
    while (file && fgets(line, sizeof line, file)) {
        char *path = strchr(line, '/');
        line[strcspn(line, "\n")] = 0;
        if (!path) continue;
        if (!strncmp(line, "0::", 3))
            fsdpi_group_limit("/sys/fs/cgroup", path, "memory.max", "memory.current", &least);
        else if (strstr(line, ":memory:"))
            fsdpi_group_limit("/sys/fs/cgroup/memory", path, "memory.limit_in_bytes",
                              "memory.usage_in_bytes", &least);
    }
    if (file) (void)fclose(file);
    *whose = least < machine ? "its control group" : "the machine";
    return least;
}

#endif // FSDPI_BACKENDS_MEMORY_H
