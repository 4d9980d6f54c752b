/* fsdp_store_token.h - the token of a job, from which connections get their keys: SHA-256, HMAC

   SHA-256 (FIPS 180-4) and HMAC (RFC 2104).
   Callers: fsdp_store_frames.h (fsdpi_sha256_add), fsdp_gloo.h (fsdpi_store_token), fsdp_store.h
     (fsdpi_store_token) and others.

   A part of fsdp_store.h, which has the protocol.
   SPDX-License-Identifier: MIT (full text at the end of fsdp.h) */
#ifndef FSDP_H
#include "../fsdp.h"
#endif
#ifndef FSDPI_BACKENDS_STORE_TOKEN_H
#define FSDPI_BACKENDS_STORE_TOKEN_H

#include "../src/base/macros.h"
#include "../src/base/os.h"

#include <stdio.h>
#include <string.h>
#include <unistd.h>

typedef struct fsdpi_sha256 {
    uint32_t h[8];
    uint64_t bytes;
    uint8_t block[64];
} fsdpi_sha256;

static void fsdpi_sha256_begin(fsdpi_sha256 *s) {
    static const uint32_t start[8] = {0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a,
                                      0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19};
    memcpy(s->h, start, sizeof start);
    s->bytes = 0;
}

FSDPI_MERGED uint32_t fsdpi_sha256_turn(uint32_t x, int n) { return x >> n | x << (32 - n); }

FSDPI_MERGED void fsdpi_sha256_step(uint32_t *d, uint32_t *h, uint32_t a, uint32_t b, uint32_t c,
                                    uint32_t e, uint32_t f, uint32_t g, uint32_t more) {
    uint32_t t = *h + more + (g ^ (e & (f ^ g))) +
                 (fsdpi_sha256_turn(e, 6) ^ fsdpi_sha256_turn(e, 11) ^ fsdpi_sha256_turn(e, 25));
    *d += t;
    *h = t + ((a & b) | (c & (a | b))) +
         (fsdpi_sha256_turn(a, 2) ^ fsdpi_sha256_turn(a, 13) ^ fsdpi_sha256_turn(a, 22));
}

static void fsdpi_sha256_mix(uint32_t h[8], const uint8_t block[64]) {
    static const uint32_t k[64] = {
        0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4,
        0xab1c5ed5, 0xd807aa98, 0x12835b01, 0x243185be, 0x550c7dc3, 0x72be5d74, 0x80deb1fe,
        0x9bdc06a7, 0xc19bf174, 0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc, 0x2de92c6f,
        0x4a7484aa, 0x5cb0a9dc, 0x76f988da, 0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7,
        0xc6e00bf3, 0xd5a79147, 0x06ca6351, 0x14292967, 0x27b70a85, 0x2e1b2138, 0x4d2c6dfc,
        0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85, 0xa2bfe8a1, 0xa81a664b,
        0xc24b8b70, 0xc76c51a3, 0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070, 0x19a4c116,
        0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f, 0x682e6ff3,
        0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208, 0x90befffa, 0xa4506ceb, 0xbef9a3f7,
        0xc67178f2};
    uint32_t w[64], v[8];
    for (int i = 0; i < 16; i++)
        w[i] = (uint32_t)block[4 * i] << 24 | (uint32_t)block[4 * i + 1] << 16 |
               (uint32_t)block[4 * i + 2] << 8 | block[4 * i + 3];
    for (int i = 16; i < 64; i++) {
        uint32_t a = w[i - 15], b = w[i - 2];
        w[i] = w[i - 16] + w[i - 7] +
               (fsdpi_sha256_turn(a, 7) ^ fsdpi_sha256_turn(a, 18) ^ a >> 3) +
               (fsdpi_sha256_turn(b, 17) ^ fsdpi_sha256_turn(b, 19) ^ b >> 10);
    }
    memcpy(v, h, sizeof v);
    for (int i = 0; i < 64; i += 8) { // the names move on from step to step, not the values
        fsdpi_sha256_step(v + 3, v + 7, v[0], v[1], v[2], v[4], v[5], v[6], k[i] + w[i]);
        fsdpi_sha256_step(v + 2, v + 6, v[7], v[0], v[1], v[3], v[4], v[5], k[i + 1] + w[i + 1]);
        fsdpi_sha256_step(v + 1, v + 5, v[6], v[7], v[0], v[2], v[3], v[4], k[i + 2] + w[i + 2]);
        fsdpi_sha256_step(v + 0, v + 4, v[5], v[6], v[7], v[1], v[2], v[3], k[i + 3] + w[i + 3]);
        fsdpi_sha256_step(v + 7, v + 3, v[4], v[5], v[6], v[0], v[1], v[2], k[i + 4] + w[i + 4]);
        fsdpi_sha256_step(v + 6, v + 2, v[3], v[4], v[5], v[7], v[0], v[1], k[i + 5] + w[i + 5]);
        fsdpi_sha256_step(v + 5, v + 1, v[2], v[3], v[4], v[6], v[7], v[0], k[i + 6] + w[i + 6]);
        fsdpi_sha256_step(v + 4, v + 0, v[1], v[2], v[3], v[5], v[6], v[7], k[i + 7] + w[i + 7]);
    }
    for (int i = 0; i < 8; i++) h[i] += v[i];
}

static void fsdpi_sha256_add(fsdpi_sha256 *s, const void *data, size_t size) {
    const uint8_t *from = (const uint8_t *)data;
    for (size_t at, take; size; from += take, size -= take) {
        at = (size_t)(s->bytes % 64);
        take = size < 64 - at ? size : 64 - at;
        if (take < 64) memcpy(s->block + at, from, take);
        s->bytes += take;
        if (s->bytes % 64 == 0) fsdpi_sha256_mix(s->h, take < 64 ? s->block : from);
    }
}

static void fsdpi_sha256_end(fsdpi_sha256 *s, uint8_t out[32]) {
    uint64_t bits = s->bytes * 8;
    uint8_t tail[72] = {0x80}; // then zeros up to 8 bytes before the end of a block, then the bits
    size_t pad = 1 + (119 - s->bytes % 64) % 64;
    for (size_t i = 0; i < 8; i++) tail[pad + i] = (uint8_t)(bits >> (56 - 8 * i));
    fsdpi_sha256_add(s, tail, pad + 8);
    for (int i = 0; i < 32; i++) out[i] = (uint8_t)(s->h[i / 4] >> (24 - 8 * (i % 4)));
}

// Begins the inner hash of HMAC (0x36), or the outer one (0x5c). Keys of up to 64 bytes.
static void fsdpi_hmac_begin(fsdpi_sha256 *s, const void *key, size_t key_size, uint8_t with) {
    uint8_t pad[64] = {0};
    memcpy(pad, key, key_size);
    for (int i = 0; i < 64; i++) pad[i] ^= with;
    fsdpi_sha256_begin(s);
    fsdpi_sha256_add(s, pad, sizeof pad);
}

// Ends an HMAC. out may be the key.
static void fsdpi_hmac_end(fsdpi_sha256 *s, const void *key, size_t key_size, uint8_t out[32]) {
    uint8_t inner[32];
    fsdpi_sha256_end(s, inner);
    fsdpi_hmac_begin(s, key, key_size, 0x5c);
    fsdpi_sha256_add(s, inner, sizeof inner);
    fsdpi_sha256_end(s, out);
}

static void fsdpi_hmac_sha256(const void *key, size_t key_size, const void *data, size_t size,
                              uint8_t out[32]) {
    fsdpi_sha256 s;
    fsdpi_hmac_begin(&s, key, key_size, 0x36);
    fsdpi_sha256_add(&s, data, size);
    fsdpi_hmac_end(&s, key, key_size, out);
}

/* Returns the secret of Open MPI's mpirun up to version 4, which only its ranks get: 128 random
   bits. Under srun its variable has two numbers of the job, "012cc14200000000-...". NULL: there is
   no secret. */
static const char *fsdpi_store_mpi_key(void) {
    const char *key = fsdpi_env("OMPI_MCA_orte_precondition_transports");
    if (!key || !fsdpi_env("OMPI_COMM_WORLD_RANK") || strlen(key) != 33) return NULL;
    return strncmp(key + 8, "00000000", 8) ? key : NULL;
}

/* Computes the token, a key that all programs of a job know. It comes from a secret, if there is
   one, and from the job's name, so that jobs with one secret do not meet. Returns 0 if others can
   guess it. */
static int fsdpi_store_token(const char *job, uint8_t token[32]) {
    const char *given = fsdpi_env("FSDP_TOKEN"), *kind = "token ";
    char user[32];
    fsdpi_sha256 s;
    (void)snprintf(user, sizeof user, "%lu", (unsigned long)getuid());
    if (!given) given = fsdpi_store_mpi_key(), kind = "mpirun ";
    int secret = given != NULL;
    if (!given) given = user, kind = "user ";
    fsdpi_sha256_begin(&s);
    fsdpi_sha256_add(&s, kind, strlen(kind));
    fsdpi_sha256_add(&s, given, strlen(given));
    fsdpi_sha256_end(&s, token);
    fsdpi_hmac_sha256(token, 32, job, strlen(job), token);
    return secret;
}

#endif // FSDPI_BACKENDS_STORE_TOKEN_H
