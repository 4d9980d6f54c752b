/* base/hash.h - hashes of words, texts and bytes

   Callers: core/unit.h (fsdpi_hash), backends/fsdp_comm.h (fsdpi_hash), os.h (fsdpi_hash_text) and
     others.

   A part of fsdp.h. SPDX-License-Identifier: MIT (full text at the end of fsdp.h) */
#ifndef FSDP_H
#include "../../fsdp.h"
#endif
#ifndef FSDPI_BASE_HASH_H
#define FSDPI_BASE_HASH_H

#include "macros.h"

#include <string.h>

static uint64_t fsdpi_hash_words(uint64_t h, const uint64_t *x, int count) {
    for (int i = 0; i < count; i++) { // splitmix64 with a running value
        h += x[i] + 0x9E3779B97F4A7C15ull;
        h = (h ^ (h >> 30)) * 0xBF58476D1CE4E5B9ull;
        h = (h ^ (h >> 27)) * 0x94D049BB133111EBull;
        h ^= h >> 31;
    }
    return h;
}
static uint64_t fsdpi_hash(uint64_t h, uint64_t x) { return fsdpi_hash_words(h, &x, 1); }

static uint64_t fsdpi_hash_text(const char *text) {
    uint64_t h = 0;
    for (; *text; text++) h = fsdpi_hash(h, (uint64_t)(unsigned char)*text);
    return h;
}

// Hashes bytes in four independent sums, so that memory is the limit and not the latency of a
// product.
static FSDPI_UNUSED uint64_t fsdpi_hash_bytes(uint64_t h, const void *data, size_t nbytes) {
    const unsigned char *at = (const unsigned char *)data;
    uint64_t sum[4] = {h, 1, 2, 3}, word[4];
    for (; nbytes >= sizeof word; at += sizeof word, nbytes -= sizeof word) {
        memcpy(word, at, sizeof word);
        for (int i = 0; i < 4; i++) {
            sum[i] = (sum[i] ^ word[i]) * 0x9E3779B97F4A7C15u;
            sum[i] ^= sum[i] >> 29;
        }
    }
    for (int i = 0; i < 4; i++) h = fsdpi_hash(h, sum[i]);
    for (; nbytes > 0; at++, nbytes--) h = fsdpi_hash(h, *at);
    return h;
}

#endif // FSDPI_BASE_HASH_H
