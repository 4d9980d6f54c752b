/* fsdp_store_frames.h - the frames of the protocol, and queues of bytes to read or write

   Callers: fsdp_store.h (fsdpi_le_put), fsdp_store_core.h (fsdpi_le_put), fsdp_gloo.h
     (fsdpi_le_put) and others.

   A part of fsdp_store.h, which has the protocol.
   SPDX-License-Identifier: MIT (full text at the end of fsdp.h) */
#ifndef FSDP_H
#include "../fsdp.h"
#endif
#ifndef FSDPI_BACKENDS_STORE_FRAMES_H
#define FSDPI_BACKENDS_STORE_FRAMES_H

#include "../src/core/alloc.h"
#include "fsdp_signature.h"
#include "fsdp_store_token.h"

#include <fcntl.h>
#include <string.h>

#define FSDPI_STORE_MAGIC       0x31564B46u // "FKV1"
#define FSDPI_STORE_VERSION     2
#define FSDPI_STORE_HEADER      24
#define FSDPI_STORE_NONCE       32
#define FSDPI_STORE_TAG         16
#define FSDPI_STORE_HELLO_BYTES (4 + 4 + 8 + 8)                            // bytes of its value
#define FSDPI_STORE_HELLO_1     (32 + 4 + 4 + 4 + 8 + 8)                   // in version 1
#define FSDPI_STORE_FIRST       (FSDPI_STORE_HEADER + FSDPI_STORE_HELLO_1) // most before the proof
#define FSDPI_STORE_KEY_MAX     256
#define FSDPI_STORE_VALUE_MAX   ((size_t)16 << 20)
#define FSDPI_STORE_TOTAL_MAX   ((size_t)1 << 30)           // bytes of all entries of a store
#define FSDPI_STORE_OUT_MAX     (3 * FSDPI_STORE_VALUE_MAX) // bytes that one client has not read
#define FSDPI_STORE_WAITS_MAX   64                          // open GETs of one client
#define FSDPI_STORE_UNTRUSTED   64                          // connections that are not ranks'
#define FSDPI_STORE_BUCKETS     1024
#define FSDPI_STORE_PORTS       17                    // ports that are tried
#define FSDPI_STORE_PROOF_NS    ((int64_t)5000000000) // for an untrusted peer to prove itself
#define FSDPI_STORE_KNOCK_NS    ((int64_t)1000000000) // for a server to prove itself
#define FSDPI_STORE_GRACE       ((int64_t)200000000)  // for BYE to be sent
#define FSDPI_STORE_CLOSE_NS    ((int64_t)1000000000) // for CLOSING to be read: TCP may resend it
#define FSDPI_STORE_ABORT_NS    ((int64_t)100000000)  // for a failure to be pushed back
#define FSDPI_STORE_LINGER      ((int64_t)500000000)  // for ranks that connect after one is lost
#define FSDPI_STORE_BEAT_NS     ((int64_t)50000000)
#define FSDPI_STORE_LATER       0xFFFF   // flags of REFUSED: connect again later
#define FSDPI_STORE_CLOEXEC     02000000 // O_CLOEXEC, which strict C99 hides
#define FSDPI_STORE_STACK       ((size_t)256 << 10)
#define FSDPI_STORE_READ        65536 // bytes read at a time

// clang-format off
enum {
    FSDPI_STORE_CHALLENGE = 1, FSDPI_STORE_HELLO, FSDPI_STORE_REPLY, FSDPI_STORE_REFUSED,
    FSDPI_STORE_SET, FSDPI_STORE_GET, FSDPI_STORE_DELETE, FSDPI_STORE_BEAT, FSDPI_STORE_ASK,
    FSDPI_STORE_ABORT, FSDPI_STORE_BYE, FSDPI_STORE_ALL_JOINED, FSDPI_STORE_RANK_LEFT,
    FSDPI_STORE_FAILURE, FSDPI_STORE_CLOSING, FSDPI_STORE_PROVE, FSDPI_STORE_PROVEN
};
// clang-format on

// Texts about the program that serves at an address.
#define FSDPI_STORE_OTHER_JOB "serves another job (its FSDP_TOKEN or FSDP_JOB_ID differs)"
#define FSDPI_STORE_OTHER_VERSION                                                                  \
    "speaks version %u of the store's protocol, and this program version %u: start all ranks, "    \
    "and fsdprun, with the same build"

// The operation that a rank reports.
typedef struct fsdpi_store_beat {
    int32_t busy; // these three: see fsdpi_peer
    int64_t since_ns;
    char text[160];
} fsdpi_store_beat;

// Queues of bytes to read or write, and frames within them.

// Bytes [begin, end) of a block that grows.
typedef struct fsdpi_queue {
    char *block;
    size_t begin, end, cap;
} fsdpi_queue;

typedef struct fsdpi_frame {
    uint16_t op, flags;
    uint32_t id;
    size_t key_size, value_size;
    const char *key, *value;
} fsdpi_frame;

// The key and the count for the tags of frames in one direction of a connection.
typedef struct fsdpi_seal {
    uint8_t key[32];
    uint64_t count; // number of frames so far
    int on;         // 0: frames have no tag yet
} fsdpi_seal;

static size_t fsdpi_queue_size(const fsdpi_queue *b) { return b->end - b->begin; }

static void fsdpi_queue_free(const fsdp_allocator *a, fsdpi_queue *b) {
    fsdpi_free(a, b->block);
    memset(b, 0, sizeof *b);
}

// Makes room for `size` more bytes. Returns 0 if there is no memory; then nothing has changed.
static int fsdpi_queue_reserve(const fsdp_allocator *a, fsdpi_queue *b, size_t size) {
    size_t used = fsdpi_queue_size(b), cap = 256;
    if (b->cap - b->end >= size) return 1;
    while (cap < used + size) cap *= 2;
    char *block = cap <= b->cap ? b->block : (char *)fsdpi_alloc(a, cap);
    if (!block) return 0;
    if (used) memmove(block, b->block + b->begin, used);
    if (block != b->block) {
        fsdpi_free(a, b->block);
        b->block = block;
        b->cap = cap;
    }
    b->begin = 0;
    b->end = used;
    return 1;
}

static int fsdpi_queue_add(const fsdp_allocator *a, fsdpi_queue *b, const void *data, size_t size) {
    if (!fsdpi_queue_reserve(a, b, size)) return 0;
    if (size) memcpy(b->block + b->end, data, size);
    b->end += size;
    return 1;
}

// Drops the first `size` bytes. If a large block becomes empty, it is freed.
static void fsdpi_queue_drop(const fsdp_allocator *a, fsdpi_queue *b, size_t size) {
    b->begin += size;
    if (b->begin < b->end) return;
    b->begin = b->end = 0;
    if (b->cap > 2 * FSDPI_STORE_READ) fsdpi_queue_free(a, b);
}

static char *fsdpi_le_put(char *at, uint64_t value, int bytes) {
    for (int i = 0; i < bytes; i++) *at++ = (char)(unsigned char)(value >> (8 * i));
    return at;
}

static uint64_t fsdpi_le_get(const char *at, int bytes) {
    uint64_t value = 0;
    for (int i = 0; i < bytes; i++) value |= (uint64_t)(unsigned char)at[i] << (8 * i);
    return value;
}

static int32_t fsdpi_le_i32(const char *at) { return (int32_t)(uint32_t)fsdpi_le_get(at, 4); }
static int64_t fsdpi_le_i64(const char *at) { return (int64_t)fsdpi_le_get(at, 8); }

static void fsdpi_frame_header(char header[FSDPI_STORE_HEADER], const fsdpi_frame *f, size_t tag) {
    char *at = fsdpi_le_put(header, FSDPI_STORE_MAGIC, 4);
    at = fsdpi_le_put(at, f->op, 2);
    at = fsdpi_le_put(at, f->flags, 2);
    at = fsdpi_le_put(at, f->id, 4);
    at = fsdpi_le_put(at, f->key_size, 4);
    (void)fsdpi_le_put(at, f->value_size + tag, 8);
}

/* Makes the key of one direction of a connection, from the token and the nonces of both sides. The
   token itself is not the key: so a MAC with the token from elsewhere is useless here. */
static void fsdpi_seal_make(fsdpi_seal *seal, const uint8_t token[32], int of_server,
                            const void *server_nonce, const void *client_nonce) {
    char data[8 + 2 * FSDPI_STORE_NONCE];
    uint8_t own[32];
    (void)fsdpi_le_put(data, FSDPI_STORE_VERSION, 4);
    (void)fsdpi_le_put(data + 4, (uint64_t)of_server, 4);
    memcpy(data + 8, server_nonce, FSDPI_STORE_NONCE);
    memcpy(data + 8 + FSDPI_STORE_NONCE, client_nonce, FSDPI_STORE_NONCE);
    fsdpi_hmac_sha256(token, 32, "fsdp store", 10, own);
    fsdpi_hmac_sha256(own, sizeof own, data, sizeof data, seal->key);
    seal->count = 0;
    seal->on = 1;
}

// Computes the tag of the next frame: the first FSDPI_STORE_TAG bytes of the result.
static void fsdpi_seal_tag(const fsdpi_seal *seal, const fsdpi_frame *f, uint8_t tag[32]) {
    char header[8 + FSDPI_STORE_HEADER];
    fsdpi_sha256 s;
    fsdpi_frame_header(fsdpi_le_put(header, seal->count, 8), f, FSDPI_STORE_TAG);
    fsdpi_hmac_begin(&s, seal->key, sizeof seal->key, 0x36);
    fsdpi_sha256_add(&s, header, sizeof header);
    fsdpi_sha256_add(&s, f->key, f->key_size);
    fsdpi_sha256_add(&s, f->value, f->value_size);
    fsdpi_hmac_end(&s, seal->key, sizeof seal->key, tag);
}

/* Checks and removes the tag of a new frame. Returns 0 if its sender does not know the key, or it
   is not the next frame. The time does not depend on the position of a difference. */
static int fsdpi_seal_open(fsdpi_seal *seal, fsdpi_frame *f) {
    uint8_t tag[32];
    int differs = 0;
    if (!seal->on) return 1;
    if (f->value_size < FSDPI_STORE_TAG) return 0;
    f->value_size -= FSDPI_STORE_TAG;
    fsdpi_seal_tag(seal, f, tag);
    seal->count++;
    for (int i = 0; i < FSDPI_STORE_TAG; i++)
        differs |= tag[i] ^ (uint8_t)f->value[f->value_size + (size_t)i];
    return !differs;
}

static int fsdpi_frame_put(const fsdp_allocator *a, fsdpi_queue *b, const fsdpi_frame *f,
                           fsdpi_seal *seal) {
    char header[FSDPI_STORE_HEADER];
    uint8_t tag[32];
    size_t tag_size = seal->on ? FSDPI_STORE_TAG : 0;
    fsdpi_frame_header(header, f, tag_size);
    if (!fsdpi_queue_reserve(a, b, sizeof header + f->key_size + f->value_size + tag_size))
        return 0;
    (void)fsdpi_queue_add(a, b, header, sizeof header);
    (void)fsdpi_queue_add(a, b, f->key, f->key_size);
    (void)fsdpi_queue_add(a, b, f->value, f->value_size);
    if (seal->on) fsdpi_seal_tag(seal, f, tag);
    (void)fsdpi_queue_add(a, b, tag, tag_size);
    seal->count += seal->on != 0;
    return 1;
}

// Returns 1 if there is a whole frame, which lies in b until it is dropped; 0: not yet; -1: the
// bytes are no frame.
static int fsdpi_frame_get(const fsdpi_queue *b, fsdpi_frame *f) {
    if (fsdpi_queue_size(b) < FSDPI_STORE_HEADER) return 0;
    const char *at = b->block + b->begin;
    uint64_t key_size = fsdpi_le_get(at + 12, 4), value_size = fsdpi_le_get(at + 16, 8);
    if (fsdpi_le_get(at, 4) != FSDPI_STORE_MAGIC || key_size > FSDPI_STORE_KEY_MAX ||
        value_size > FSDPI_STORE_VALUE_MAX + FSDPI_STORE_TAG)
        return -1;
    if (fsdpi_queue_size(b) < FSDPI_STORE_HEADER + key_size + value_size) return 0;
    f->op = (uint16_t)fsdpi_le_get(at + 4, 2);
    f->flags = (uint16_t)fsdpi_le_get(at + 6, 2);
    f->id = (uint32_t)fsdpi_le_get(at + 8, 4);
    f->key_size = (size_t)key_size;
    f->value_size = (size_t)value_size;
    f->key = at + FSDPI_STORE_HEADER;
    f->value = f->key + key_size;
    return 1;
}

// Drops the first frame, which must be complete.
static void fsdpi_frame_drop(const fsdp_allocator *a, fsdpi_queue *b) {
    const char *at = b->block + b->begin;
    fsdpi_queue_drop(a, b,
                     FSDPI_STORE_HEADER + (size_t)fsdpi_le_get(at + 12, 4) +
                         (size_t)fsdpi_le_get(at + 16, 8));
}

// Copies the text in from[0..size), cut to `cap`. Returns its bytes in `from`, including its 0.
static size_t fsdpi_frame_text(char *out, size_t cap, const char *from, size_t size) {
    const char *zero = size ? (const char *)memchr(from, 0, size) : NULL;
    size_t length = zero ? (size_t)(zero - from) : size, kept = length < cap ? length : cap - 1;
    if (kept) memcpy(out, from, kept);
    out[kept] = 0;
    return zero ? length + 1 : length;
}

#define FSDPI_FAILURE_BYTES (12 + sizeof(fsdpi_failure))

static size_t fsdpi_failure_put(char *to, const fsdpi_failure *v) {
    char *at = fsdpi_le_put(to, (uint32_t)v->status, 4);
    at = fsdpi_le_put(at, (uint32_t)v->rank, 4);
    at = fsdpi_le_put(at, (uint32_t)v->lost, 4);
    memcpy(at, v->subject, strlen(v->subject) + 1);
    at += strlen(v->subject) + 1;
    memcpy(at, v->reason, strlen(v->reason));
    return (size_t)(at - to) + strlen(v->reason);
}

static int fsdpi_failure_get(const fsdpi_frame *f, fsdpi_failure *v) {
    if (f->value_size < 12) return 0;
    v->status = fsdpi_le_i32(f->value);
    v->rank = fsdpi_le_i32(f->value + 4);
    v->lost = fsdpi_le_i32(f->value + 8);
    if (v->status <= FSDP_OK || v->status > FSDP_ERR_INTERNAL) v->status = FSDP_ERR_ABORTED;
    size_t used = 12 + fsdpi_frame_text(v->subject, sizeof v->subject, f->value + 12,
                                        f->value_size - 12);
    (void)fsdpi_frame_text(v->reason, sizeof v->reason, f->value + used, f->value_size - used);
    return 1;
}

#endif // FSDPI_BACKENDS_STORE_FRAMES_H
