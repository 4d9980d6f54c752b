/* llama_data.h - tokens of a training: files in the form of llm.c, a mask, and which row a step has

   A file of tokens begins with 256 numbers of 4 bytes, little-endian: 20240520 and 1, then tokens
   have 2 bytes; or 20240801 and 7, then they have 4; the third number is how many tokens there
   are. A mask has one byte for each token; 0: the token is no label.

   Row r are the tokens r*T to r*T + T: the first T are inputs, the last T are labels, so that
   neighbours share one token. The order of rows is a permutation of each epoch, computed for one
   index at a time: the place in the data is a number, on any number of ranks.

   Files are mapped: do not make one shorter while it is open.

   This file knows nothing about sharding. SPDX-License-Identifier: MIT */
#ifndef LLAMA_DATA_H
#define LLAMA_DATA_H

#include "examples/common/program.h" // mix_bits

#include <errno.h>    // errno
#include <fcntl.h>    // open
#include <stddef.h>   // size_t
#include <stdint.h>   // int32_t, int64_t
#include <stdio.h>    // snprintf
#include <string.h>   // memset, memcpy, strerror
#include <sys/mman.h> // mmap, munmap
#include <sys/stat.h> // fstat
#include <unistd.h>   // close

enum { LLAMA_DATA_HEADER = 1024, LLAMA_UNCOUNTED = -100 };

typedef struct llama_bytes {
    const uint8_t *at;
    size_t count;
} llama_bytes;

typedef struct llama_data {
    llama_bytes file, mask; // mapped; mask.at NULL: every token is a label
    int width;              // bytes of a token
    int64_t num_tokens;
    uint64_t hash; // of all bytes
} llama_data;

static inline void llama_bytes_unmap(llama_bytes *b) {
    if (b->count) (void)munmap((void *)(uintptr_t)b->at, b->count);
    memset(b, 0, sizeof *b);
}

static inline void llama_data_close(llama_data *d) {
    llama_bytes_unmap(&d->file);
    llama_bytes_unmap(&d->mask);
    memset(d, 0, sizeof *d);
}

/* Returns 0; -1: `why` has a line. */
static inline int llama_bytes_map(llama_bytes *b, const char *path, char *why, size_t cap) {
    struct stat st;
    void *at = MAP_FAILED;
    // a pipe without a writer must not block
    const int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    const int is_file = fd >= 0 && !fstat(fd, &st) && S_ISREG(st.st_mode);
    if (is_file && st.st_size > 0)
        at = mmap(NULL, (size_t)st.st_size, PROT_READ, MAP_PRIVATE, fd, 0);
    if (at != MAP_FAILED) b->at = (const uint8_t *)at, b->count = (size_t)st.st_size;
    else if (fd >= 0 && !is_file) snprintf(why, cap, "%s: expected a file", path);
    else if (fd >= 0 && !st.st_size) snprintf(why, cap, "%s: the file is empty", path);
    else snprintf(why, cap, "%s: %s", path, strerror(errno));
    if (fd >= 0) close(fd);
    return at == MAP_FAILED ? -1 : 0;
}

static inline uint32_t llama_le32(const uint8_t *p) {
    return p[0] | (uint32_t)p[1] << 8 | (uint32_t)p[2] << 16 | (uint32_t)p[3] << 24;
}

static inline uint32_t llama_token(const llama_data *d, int64_t i) {
    const uint8_t *p = d->file.at + LLAMA_DATA_HEADER + i * d->width;
    return d->width == 2 ? p[0] | (uint32_t)p[1] << 8 : llama_le32(p);
}

/* FNV-1a over words of 8 bytes, then the rest. */
static inline uint64_t llama_bytes_hash(const llama_bytes *b, uint64_t h) {
    size_t i = 0;
    for (; i + 8 <= b->count; i += 8) {
        const uint64_t high = llama_le32(b->at + i + 4);
        h = (h ^ (high << 32 | llama_le32(b->at + i))) * UINT64_C(1099511628211);
        h ^= h >> 29;
    }
    for (; i < b->count; i++) h = (h ^ b->at[i]) * UINT64_C(1099511628211);
    return h;
}

/* Checks the header and every token. Returns 0; -1: `why` has a line. */
static inline int llama_data_check(llama_data *d, const char *path, int vocab, char *why,
                                   size_t cap) {
    const llama_bytes *f = &d->file;
    if (f->count < LLAMA_DATA_HEADER) {
        snprintf(why, cap, "%s: size: expected a header of %d bytes, got %zu", path,
                 (int)LLAMA_DATA_HEADER, f->count);
        return -1;
    }
    const uint32_t magic = llama_le32(f->at), version = llama_le32(f->at + 4);
    d->width = magic == 20240520 && version == 1 ? 2 : magic == 20240801 && version == 7 ? 4 : 0;
    if (!d->width) {
        snprintf(why, cap,
                 "%s: magic and version: expected 20240520 and 1, or 20240801 and 7, got %u and "
                 "%u: tokens.py makes such files",
                 path, magic, version);
        return -1;
    }
    d->num_tokens = llama_le32(f->at + 8);
    const uint64_t size = LLAMA_DATA_HEADER + (uint64_t)d->num_tokens * (uint64_t)d->width;
    if (size != f->count) {
        snprintf(why, cap, "%s: size: expected %llu bytes for %lld tokens, got %zu", path,
                 (unsigned long long)size, (long long)d->num_tokens, f->count);
        return -1;
    }
    for (int64_t i = 0; i < d->num_tokens; i++) {
        if (llama_token(d, i) < (uint32_t)vocab) continue;
        snprintf(why, cap, "%s: token %lld: expected less than vocab_size, %d, got %u", path,
                 (long long)i, vocab, llama_token(d, i));
        return -1;
    }
    return 0;
}

/* Opens a file of tokens, and a mask unless that is NULL, and checks them whole. Returns 0; -1:
   `why` has a line, and *d is empty. End it with llama_data_close. */
static inline int llama_data_open(llama_data *d, const char *tokens, const char *mask, int vocab,
                                  char *why, size_t cap) {
    memset(d, 0, sizeof *d);
    int failed = llama_bytes_map(&d->file, tokens, why, cap) ||
                 llama_data_check(d, tokens, vocab, why, cap) ||
                 (mask && llama_bytes_map(&d->mask, mask, why, cap));
    if (!failed && mask && d->mask.count != (size_t)d->num_tokens) {
        snprintf(why, cap, "%s: size: expected a byte for each of %lld tokens, got %zu", mask,
                 (long long)d->num_tokens, d->mask.count);
        failed = 1;
    }
    if (failed) {
        llama_data_close(d);
        return -1;
    }
    d->hash = llama_bytes_hash(&d->mask,
                               llama_bytes_hash(&d->file, UINT64_C(14695981039346656037)));
    return 0;
}

/* Returns how many whole rows of T inputs there are. */
static inline int64_t llama_data_rows(const llama_data *d, int T) {
    return d->num_tokens > 0 ? (d->num_tokens - 1) / T : 0;
}

/* Sets T tokens of a row, and the label that follows each: negative if it does not count. */
static inline void llama_data_row(const llama_data *d, int64_t row, int T, int32_t *tokens,
                                  int32_t *labels) {
    for (int t = 0; t < T; t++) {
        const int64_t at = row * T + t;
        tokens[t] = (int32_t)llama_token(d, at);
        labels[t] = d->mask.at && !d->mask.at[at + 1] ? LLAMA_UNCOUNTED
                                                      : (int32_t)llama_token(d, at + 1);
    }
}

/* Returns the row at a place of the whole training. Each epoch is a permutation of all rows: a
   Feistel network permutes the numbers below a power of 4, and is applied until the result is a
   row. */
static inline int64_t llama_data_pick(int64_t rows, uint64_t seed, int64_t place) {
    const uint64_t epoch = (uint64_t)(place / rows), key = mix_bits(mix_bits(seed) + epoch);
    uint64_t x = (uint64_t)(place % rows);
    int half = 1;
    while (UINT64_C(1) << 2 * half < (uint64_t)rows) half++;
    const uint64_t ones = (UINT64_C(1) << half) - 1;
    do {
        for (uint64_t round = 0; round < 4; round++) {
            const uint64_t left = x >> half, right = x & ones;
            x = right << half |
                (left ^ (mix_bits(key + round * 0x9E3779B97F4A7C15u + right) & ones));
        }
    } while (x >= (uint64_t)rows);
    return (int64_t)x;
}

#endif // LLAMA_DATA_H
