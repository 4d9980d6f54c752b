/* plan/memory.h - memory, lists and hashes of a plan

   Callers: listing.h (fsdpi_plan_mix), passes.h (fsdpi_plan_mix), api.h (fsdpi_plan_free) and
     others.

   A part of fsdp_plan.h. SPDX-License-Identifier: MIT (full text at the end of fsdp.h) */
#ifndef FSDP_PLAN_H
#include "../../fsdp_plan.h"
#endif
#ifndef FSDPI_PLAN_MEMORY_H
#define FSDPI_PLAN_MEMORY_H

#include <string.h>

static fsdp_status fsdpi_plan_alloc(fsdp_model *m, size_t bytes, void **out) {
    return fsdp_alloc(m, FSDP_MEMORY_HOST, (int64_t)bytes, "plan: a table", out);
}

static void fsdpi_plan_free(fsdp_model *m, void *ptr) { fsdp_free(m, FSDP_MEMORY_HOST, ptr, 0); }

// Ensures room for one more element of `size` bytes after `num` of them.
static fsdp_status fsdpi_plan_grow(fsdp_model *m, void **list, int32_t num, int32_t *cap,
                                   size_t size) {
    void *larger;
    if (num < *cap) return FSDP_OK;
    int32_t room = *cap ? 2 * *cap : 16;
    fsdp_status status = fsdpi_plan_alloc(m, (size_t)room * size, &larger);
    if (status) return status;
    if (num) memcpy(larger, *list, (size_t)num * size);
    fsdpi_plan_free(m, *list);
    *list = larger;
    *cap = room;
    return FSDP_OK;
}

static uint64_t fsdpi_plan_mix(uint64_t h, uint64_t x) { // splitmix64 of a running value
    h = (h ^ x) * 0x9E3779B97F4A7C15u + 0xD1B54A32D192ED03u;
    h = (h ^ (h >> 30)) * 0xBF58476D1CE4E5B9u;
    h = (h ^ (h >> 27)) * 0x94D049BB133111EBu;
    return h ^ (h >> 31);
}

static uint64_t fsdpi_plan_mix_bytes(uint64_t h, const char *bytes, size_t size) {
    for (size_t i = 0; i < size; i++) h = fsdpi_plan_mix(h, (unsigned char)bytes[i]);
    return fsdpi_plan_mix(h, size);
}

static uint64_t fsdpi_plan_bits(double x) {
    uint64_t bits;
    memcpy(&bits, &x, sizeof bits);
    return bits;
}

static int fsdpi_plan_is_collective(int kind) {
    return kind == FSDP_OP_ALL_GATHER || kind == FSDP_OP_REDUCE_SCATTER ||
           kind == FSDP_OP_ALL_REDUCE;
}

#endif // FSDPI_PLAN_MEMORY_H
