/* fsdp_store.h - the store at which ranks on several hosts meet, and which detects lost ranks

   A key-value store, its server and its client, used by backends whose ranks share no memory.

   The server. boot->store is its address:
   - "tcp://HOST:PORT"  rank 0 serves there, or at the next port if another program has this one:
                        all ranks look at PORT..PORT+16, in rounds, until the deadline. With
                        TORCHELASTIC_USE_AGENT_STORE=True, MASTER_PORT is torchrun's own.
   - "file:///PATH"     rank 0 serves on a free port and writes the address to the file
   - "host:" or NULL    all ranks are on one host: an abstract unix socket, named from the user and
                        the job's name
   - If a launcher serves, it sets FSDP_STORE_SERVED (fsdpi_store_learn_served). Then no rank
     serves, however long the launcher is silent.

   Authentication. Programs and store must know the job's token: each side proves it to the other
   before it sends anything else. The token comes from FSDP_TOKEN and the job's name. Without
   FSDP_TOKEN it comes from a secret of mpirun. Without both it comes from user and job, which
   others can guess, and the library warns. After the proof every frame has a tag: 16 bytes of
   HMAC-SHA-256 with a key of this connection and direction, over the number of the frame and the
   frame. A program that forwards a connection can read, delay and end it, but it cannot change,
   add, repeat or leave out a frame. Nothing is encrypted. docs/cluster.md says what an attacker can
   do.

   The states of a rank in the server:

       ABSENT --HELLO--> JOINED --BYE--> LEFT      In a launcher's store all are ABSENT again, and
                            |                      the store is empty, once all have LEFT: programs
                            +--its end--> LOST     open one world after another.

   A world begins when all have joined, and may end with a failure. A rank that aborts sends one,
   and the server makes one when a rank is lost or missing. The first failure is pushed to all
   ranks, and every later call fails with its status. A failure that cannot reach the server counts
   on the rank that sent it. If the server ends in order (CLOSING), ranks continue without a store.
   If it vanishes, the world fails.

   Frames, both ways, little endian: u32 "FKV1", u16 op, u16 flags, u32 id, u32 key size, u64 value
   size, key, value. A request's answer has its id. From PROVE on the value ends with the tag.

       CHALLENGE  server   nonce[32], first on a connection. id: the version; in version 1 it was 0
       PROVE      client   nonce[32]
       PROVEN     server   to PROVE; or REFUSED without a tag: then this is another job's
       HELLO      client   i32 rank, i32 size, i64 timeout, i64 what is left of it
       REPLY      server   flags: fsdp_status. To HELLO: i32 who serves (-1: a launcher); GET: the
                           value; ASK: i32 state, i32 busy, i64 silent, i64 since, text
       REFUSED    server   to PROVE or HELLO, which is the end; value: a text. flags: fsdp_status,
                           or 0: try other ports, too, or LATER: try this port again
       SET, GET, DELETE    client   with a key; GET: i64 timeout, waits for the key. Afterwards
                           the server forgets it: the client has its own clock
       BEAT       client   i32 busy (fsdpi_peer), i64 since, text: the rank's operation
       ASK        client   i32 rank: requests its state, and the time since its last frame
       ABORT      client   as VERDICT
       BYE        client   the rank leaves in order; the server closes the connection
       JOINED     push     all ranks have joined; a text: an address of the server's host, or empty
       LEFT       push     i32 rank
       VERDICT    push     the failure: i32 status, i32 rank that sent it, i32 rank that is lost,
                           subject, 0, reason
       CLOSING    push     the server ends

   A key is HMAC(HMAC(token, "fsdp store"), u32 version, u32 0: of the client, 1: of the server, its
   nonce, the client's); numbers of frames count from 0 in each direction, PROVE and PROVEN are 0.
   The client proves first: so a program that only connects gets no data for guessing the token. The
   client waits only for a short time until the server has proven itself, so a wrong server costs it
   a second or two.

   Layers: fsdpi_store_core is a state machine without sockets or a clock: it takes and gives bytes
   of connections. fsdpi_store_server is a thread that moves these bytes. fsdpi_store is a client:
   one thread reads, and sends beats; callers wait on futexes.

   SPDX-License-Identifier: MIT (full text at the end of fsdp.h) */
#ifndef FSDP_H
#include "../fsdp.h"
#endif
#ifndef FSDPI_BACKENDS_STORE_H
#define FSDPI_BACKENDS_STORE_H

#include "../src/base/hash.h"
#include "../src/base/macros.h"
#include "../src/base/os.h"
#include "../src/base/text.h"
#include "../src/core/alloc.h"
#include "../src/core/launch.h"
#include "fsdp_signature.h" // fsdpi_failure

#include <asm/socket.h>  // SO_REUSEADDR, which strict C99 hides
#include <errno.h>       // errno
#include <fcntl.h>       // open, fcntl
#include <ifaddrs.h>     // getifaddrs
#include <netinet/in.h>  // sockaddr_in, sockaddr_in6
#include <netinet/tcp.h> // TCP_NODELAY
#include <poll.h>        // poll
#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h> // eventfd: wakes a thread that polls
#include <sys/socket.h>  // socket and others
#include <sys/stat.h>    // fstat
#include <sys/syscall.h>
#include <sys/un.h> // sockaddr_un
#include <unistd.h>

// <netdb.h>, which strict C99 empties.
struct fsdpi_addrinfo {
    int ai_flags, ai_family, ai_socktype, ai_protocol;
    socklen_t ai_addrlen;
    struct sockaddr *ai_addr;
    char *ai_canonname;
    struct fsdpi_addrinfo *ai_next;
};
extern int fsdpi_getaddrinfo(const char *host, const char *service,
                             const struct fsdpi_addrinfo *hints,
                             struct fsdpi_addrinfo **out) __asm__("getaddrinfo");
extern void fsdpi_freeaddrinfo(struct fsdpi_addrinfo *list) __asm__("freeaddrinfo");
extern const char *fsdpi_gai_strerror(int code) __asm__("gai_strerror");
extern int fsdpi_getnameinfo(const struct sockaddr *address, socklen_t size, char *host,
                             socklen_t host_cap, char *service, socklen_t service_cap,
                             int flags) __asm__("getnameinfo");

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
#define FSDPI_STORE_STRANGERS   64                          // connections that are not ranks'
#define FSDPI_STORE_BUCKETS     1024
#define FSDPI_STORE_PLACES      (2 * FSDPI_STORE_HOSTS) // most addresses that are tried
#define FSDPI_STORE_PORTS       17                      // ports that are tried
#define FSDPI_STORE_PATIENCE    ((int64_t)5000000000)   // for an untrusted peer to prove itself
#define FSDPI_STORE_KNOCK_NS    ((int64_t)1000000000)   // for a server to prove itself
#define FSDPI_STORE_GRACE       ((int64_t)200000000)    // for BYE to be sent
#define FSDPI_STORE_FAREWELL    ((int64_t)1000000000)   // for CLOSING to be read: TCP may resend it
#define FSDPI_STORE_ABORT_NS    ((int64_t)100000000)    // for a failure to be pushed back
#define FSDPI_STORE_LINGER      ((int64_t)500000000)    // for ranks that connect after one is lost
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
    FSDPI_STORE_VERDICT, FSDPI_STORE_CLOSING, FSDPI_STORE_PROVE, FSDPI_STORE_PROVEN
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

typedef struct fsdpi_store_desc {
    fsdp_boot boot;
    // Called by the client's thread; must not call the store, and must return soon. May be NULL.
    void (*beat)(void *user, fsdpi_store_beat *out); // reports this rank's operation; *out is 0
    void (*event)(void *user); // the world has failed, a rank has left, or the store has ended
    void *user;
} fsdpi_store_desc;

typedef struct fsdpi_store fsdpi_store;
typedef struct fsdpi_store_server fsdpi_store_server;

/* -------------------------------------------------------------------------------------------- */
// SHA-256 (FIPS 180-4) and HMAC (RFC 2104).

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

static uint32_t fsdpi_sha256_turn(uint32_t x, int n) { return x >> n | x << (32 - n); }

static inline void fsdpi_sha256_step(uint32_t *d, uint32_t *h, uint32_t a, uint32_t b, uint32_t c,
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

/* -------------------------------------------------------------------------------------------- */
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

#define FSDPI_VERDICT_BYTES (12 + sizeof(fsdpi_failure))

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

/* -------------------------------------------------------------------------------------------- */
// The server's state. Invariants: no call blocks, reads a clock or uses a socket; only
// fsdpi_store_core_disconnect frees a connection; a connection without proof of the token costs no
// more than its struct and FSDPI_STORE_FIRST bytes, for FSDPI_STORE_PATIENCE.

enum {
    FSDPI_CONN_STRANGER, // has not proven the token
    FSDPI_CONN_PROVEN,   // has proven the token, and has not given its rank
    FSDPI_CONN_RANK,
    FSDPI_CONN_ENDING, // `out` is still sent
    FSDPI_CONN_BROKEN  // must be closed and disconnected at once
};

typedef struct fsdpi_conn {
    struct fsdpi_conn *next;
    int fd; // the caller's
    int state, rank, waits;
    int64_t deadline;   // before the proof, and for a connection that is ending
    fsdp_status status; // a rank's, if it is broken: the status of the failure
    const char *why;    // and the reason
    uint8_t nonce[FSDPI_STORE_NONCE];
    fsdpi_seal seal_in, seal_out;
    int is_remote;       // 1: from another host
    char reached[64];    // this host's address of the connection; "": useless for other hosts
    fsdpi_queue in, out; // out: the caller sends and drops these
} fsdpi_conn;

typedef struct fsdpi_store_entry {
    struct fsdpi_store_entry *next;
    uint64_t hash;
    size_t bytes, value_size; // bytes: of the block, which has the key and the value as well
    char *key, *value;
} fsdpi_store_entry;

// A GET without an answer yet.
typedef struct fsdpi_store_wait {
    struct fsdpi_store_wait *next;
    fsdpi_conn *conn;
    uint64_t hash;
    int64_t deadline;
    uint32_t id;
    char key[FSDPI_STORE_KEY_MAX + 1];
} fsdpi_store_wait;

typedef struct fsdpi_store_rank {
    int32_t state;
    int64_t heard_ns; // time of the rank's last frame
    fsdpi_store_beat beat;
} fsdpi_store_rank;

typedef struct fsdpi_store_core {
    fsdp_allocator allocator;
    int size, server_rank; // server_rank: -1: a launcher
    uint8_t token[32];
    char where[256];  // its address, for texts
    char reached[64]; // an address under which other hosts reach this one, once that is known
    int closing, num_conns, num_joined;
    int num_refused, num_old;         // refused for their token, and for their version
    int64_t join_ns, join_timeout_ns; // deadline and timeout of joining
    size_t total;
    fsdpi_failure verdict; // status FSDP_OK: none
    fsdpi_store_rank *ranks;
    fsdpi_conn *conns;
    fsdpi_store_wait *waits;
    fsdpi_store_entry *entries[FSDPI_STORE_BUCKETS];
} fsdpi_store_core;

static int64_t fsdpi_store_after(int64_t now, int64_t timeout) {
    return timeout > INT64_MAX - now ? INT64_MAX : now + timeout;
}

static void fsdpi_conn_break(fsdpi_conn *conn, fsdp_status status, const char *why) {
    conn->state = FSDPI_CONN_BROKEN;
    conn->status = status;
    conn->why = why;
}

static void fsdpi_conn_end(fsdpi_conn *conn, int64_t now) {
    conn->state = FSDPI_CONN_ENDING;
    conn->rank = -1;
    conn->deadline = fsdpi_store_after(now, FSDPI_STORE_FAREWELL);
}

static void fsdpi_store_core_send(fsdpi_store_core *core, fsdpi_conn *conn, int op, int flags,
                                  uint32_t id, const void *value, size_t bytes) {
    fsdpi_frame f = {(uint16_t)op, (uint16_t)flags, id, 0, bytes, NULL, (const char *)value};
    if (conn->state > FSDPI_CONN_RANK) return;
    if (fsdpi_queue_size(&conn->out) + bytes > FSDPI_STORE_OUT_MAX)
        fsdpi_conn_break(conn, FSDP_ERR_PEER_LOST, "does not read the messages of the store");
    else if (!fsdpi_frame_put(&core->allocator, &conn->out, &f, &conn->seal_out))
        fsdpi_conn_break(conn, FSDP_ERR_OUT_OF_MEMORY,
                         "is cut off: the store has no memory for messages to it");
}

static void fsdpi_store_core_push(fsdpi_store_core *core, int op, const void *value, size_t bytes) {
    for (fsdpi_conn *conn = core->conns; conn; conn = conn->next)
        if (conn->state == FSDPI_CONN_RANK)
            fsdpi_store_core_send(core, conn, op, 0, 0, value, bytes);
}

// Drops the waits of a connection, and those whose deadline has passed.
static void fsdpi_store_core_forget(fsdpi_store_core *core, const fsdpi_conn *conn, int64_t now) {
    for (fsdpi_store_wait **link = &core->waits; *link;) {
        fsdpi_store_wait *wait = *link;
        if (wait->conn != conn && wait->deadline > now) {
            link = &wait->next;
            continue;
        }
        *link = wait->next;
        wait->conn->waits--;
        fsdpi_free(&core->allocator, wait);
    }
}

static void fsdpi_store_core_clear(fsdpi_store_core *core) {
    for (int i = 0; i < FSDPI_STORE_BUCKETS; i++)
        while (core->entries[i]) {
            fsdpi_store_entry *entry = core->entries[i];
            core->entries[i] = entry->next;
            fsdpi_free(&core->allocator, entry);
        }
    core->total = 0;
}

// Sets the world's failure, unless there is one.
static void fsdpi_store_core_judge(fsdpi_store_core *core, const fsdpi_failure *v) {
    char value[FSDPI_VERDICT_BYTES];
    if (core->verdict.status || core->closing) return;
    core->verdict = *v;
    fsdpi_store_core_push(core, FSDPI_STORE_VERDICT, value, fsdpi_failure_put(value, v));
}

static FSDP_PRINTF(4, 5) void fsdpi_store_core_fail(fsdpi_store_core *core, fsdp_status status,
                                                    int lost, const char *format, ...) {
    fsdpi_failure v;
    va_list args;
    memset(&v, 0, sizeof v);
    v.status = (int32_t)status;
    v.rank = -1;
    v.lost = lost;
    va_start(args, format);
    (void)vsnprintf(v.reason, sizeof v.reason, format, args);
    va_end(args);
    fsdpi_store_core_judge(core, &v);
}

static fsdpi_peer fsdpi_store_core_peer(const fsdpi_store_core *core, int rank, int64_t now) {
    const fsdpi_store_rank *r = &core->ranks[rank];
    fsdpi_peer p;
    memset(&p, 0, sizeof p);
    p.state = r->state;
    p.busy = r->beat.busy;
    p.silent_ns = now - r->heard_ns;
    p.since_ns = fsdpi_store_after(p.silent_ns, r->beat.since_ns);
    memcpy(p.text, r->beat.text, sizeof p.text);
    return p;
}

/* Marks a rank as left: it has sent BYE, or knows that its world has ended. After the last rank a
   launcher's store accepts the next world; without a launcher rank 0 opens another store. */
static void fsdpi_store_core_leave(fsdpi_store_core *core, int rank) {
    int left = 0;
    core->ranks[rank].state = FSDPI_PEER_LEFT;
    for (int r = 0; r < core->size; r++) left += core->ranks[r].state == FSDPI_PEER_LEFT;
    if (left < core->size || core->server_rank >= 0) return;
    memset(core->ranks, 0, (size_t)core->size * sizeof *core->ranks);
    memset(&core->verdict, 0, sizeof core->verdict);
    core->num_joined = 0;
    core->join_ns = INT64_MAX;
    fsdpi_store_core_clear(core);
}

static FSDP_PRINTF(5, 6) void fsdpi_store_core_refuse(fsdpi_store_core *core, fsdpi_conn *conn,
                                                      int status, int64_t now, const char *format,
                                                      ...) {
    char text[400];
    va_list args;
    va_start(args, format);
    (void)vsnprintf(text, sizeof text, format, args);
    va_end(args);
    fsdpi_store_core_send(core, conn, FSDPI_STORE_REFUSED, status, 0, text, strlen(text));
    if (conn->state != FSDPI_CONN_BROKEN) fsdpi_conn_end(conn, now);
}

static void fsdpi_store_core_join(fsdpi_store_core *core, fsdpi_conn *conn, int rank,
                                  int64_t timeout, int64_t left, int64_t now) {
    char value[4];
    fsdpi_store_rank *r = &core->ranks[rank];
    memset(r, 0, sizeof *r);
    r->state = FSDPI_PEER_JOINED;
    r->heard_ns = now;
    conn->state = FSDPI_CONN_RANK;
    conn->rank = rank;
    if (!core->reached[0]) memcpy(core->reached, conn->reached, sizeof core->reached);
    (void)fsdpi_le_put(value, (uint32_t)core->server_rank, 4);
    fsdpi_store_core_send(core, conn, FSDPI_STORE_REPLY, FSDP_OK, 0, value, sizeof value);
    if (fsdpi_store_after(now, left) < core->join_ns) { // the first one whose time is over
        core->join_ns = fsdpi_store_after(now, left);
        core->join_timeout_ns = timeout;
    }
    if (++core->num_joined < core->size) return;
    core->join_ns = INT64_MAX;
    fsdpi_store_core_push(core, FSDPI_STORE_ALL_JOINED, core->reached, strlen(core->reached));
}

/* The first frame of a connection: a client proves that it knows the token. The tag of the answer
   proves the same of the server. A client that is refused may be a rank of another job. */
static void fsdpi_store_core_prove(fsdpi_store_core *core, fsdpi_conn *conn, fsdpi_frame *f,
                                   int64_t now) {
    if (f->op == FSDPI_STORE_PROVE && !f->key_size &&
        f->value_size == FSDPI_STORE_NONCE + FSDPI_STORE_TAG) {
        fsdpi_seal_make(&conn->seal_in, core->token, 0, conn->nonce, f->value);
        fsdpi_seal_make(&conn->seal_out, core->token, 1, conn->nonce, f->value);
        if (fsdpi_seal_open(&conn->seal_in, f)) {
            conn->state = FSDPI_CONN_PROVEN;
            fsdpi_store_core_send(core, conn, FSDPI_STORE_PROVEN, 0, 0, NULL, 0);
            return;
        }
        conn->seal_out.on = 0;
        core->num_refused++;
        fsdpi_store_core_refuse(core, conn, 0, now, "%s", FSDPI_STORE_OTHER_JOB);
    } else if (f->op == FSDPI_STORE_HELLO && f->value_size == FSDPI_STORE_HELLO_1) {
        core->num_old++;
        fsdpi_store_core_refuse(core, conn, 0, now, FSDPI_STORE_OTHER_VERSION,
                                (unsigned)FSDPI_STORE_VERSION, 1u);
    } else fsdpi_conn_break(conn, FSDP_OK, NULL);
}

static void fsdpi_store_core_hello(fsdpi_store_core *core, fsdpi_conn *conn, const fsdpi_frame *f,
                                   int64_t now) {
    if (f->op != FSDPI_STORE_HELLO || f->value_size != FSDPI_STORE_HELLO_BYTES) {
        fsdpi_conn_break(conn, FSDP_OK, NULL);
        return;
    }
    int32_t rank = fsdpi_le_i32(f->value), size = fsdpi_le_i32(f->value + 4);
    if (size != core->size || rank < 0 || rank >= size) {
        char text[400];
        (void)snprintf(text, sizeof text,
                       "[E704] rank %d was started as one of %d ranks, but the store at %s was "
                       "opened for %d: give all ranks the same world size",
                       (int)rank, (int)size, core->where, core->size);
        fsdpi_store_core_refuse(core, conn, FSDP_ERR_MISMATCH, now, "%s", text);
        if (core->num_joined < core->size) // a late client must not end a complete world
            fsdpi_store_core_fail(core, FSDP_ERR_MISMATCH, -1, "%s", text);
    } else if (core->ranks[rank].state == FSDPI_PEER_JOINED) {
        fsdpi_store_core_refuse(core, conn, FSDP_ERR_INVALID_ARG, now,
                                "[E705] rank %d has joined already: give each program its own "
                                "rank, each job its own FSDP_JOB_ID or FSDP_TOKEN, and each of the "
                                "worlds that a program has open its own fsdp_world_desc.job",
                                (int)rank);
    } else if (core->ranks[rank].state != FSDPI_PEER_ABSENT) {
        fsdpi_store_core_refuse(core, conn, FSDPI_STORE_LATER, now,
                                "still serves an earlier world of this job");
    } else if (core->verdict.status) {
        char value[FSDPI_VERDICT_BYTES];
        fsdpi_store_core_send(core, conn, FSDPI_STORE_VERDICT, 0, 0, value,
                              fsdpi_failure_put(value, &core->verdict));
        fsdpi_conn_end(conn, now);
        fsdpi_store_core_leave(core, (int)rank);
    } else {
        fsdpi_store_core_join(core, conn, (int)rank, fsdpi_le_i64(f->value + 8),
                              fsdpi_le_i64(f->value + 16), now);
    }
}

static fsdpi_store_entry **fsdpi_store_core_find(fsdpi_store_core *core, const char *key,
                                                 uint64_t hash) {
    fsdpi_store_entry **link = &core->entries[hash % FSDPI_STORE_BUCKETS];
    while (*link && ((*link)->hash != hash || strcmp((*link)->key, key) != 0))
        link = &(*link)->next;
    return link;
}

static void fsdpi_store_core_remove(fsdpi_store_core *core, fsdpi_store_entry **link) {
    fsdpi_store_entry *entry = *link;
    if (!entry) return;
    *link = entry->next;
    core->total -= entry->bytes;
    fsdpi_free(&core->allocator, entry);
}

/* Answers the waits of a connection (NULL: of all) whose key is there. If a client reads slowly, it
   gets one large value after the other. */
static void fsdpi_store_core_answer(fsdpi_store_core *core, const fsdpi_conn *conn) {
    for (fsdpi_store_wait *wait = core->waits; wait; wait = wait->next) {
        if (conn && wait->conn != conn) continue;
        const fsdpi_store_entry *entry = *fsdpi_store_core_find(core, wait->key, wait->hash);
        if (!entry || fsdpi_queue_size(&wait->conn->out) > FSDPI_STORE_VALUE_MAX) continue;
        fsdpi_store_core_send(core, wait->conn, FSDPI_STORE_REPLY, FSDP_OK, wait->id, entry->value,
                              entry->value_size);
        wait->deadline = INT64_MIN; // so that fsdpi_store_core_forget drops it
    }
    fsdpi_store_core_forget(core, NULL, INT64_MIN);
}

// Sets a key. If the value cannot be stored, the old one stays.
static fsdp_status fsdpi_store_core_set(fsdpi_store_core *core, const char *key,
                                        const fsdpi_frame *f) {
    uint64_t hash = fsdpi_hash_text(key);
    fsdpi_store_entry **old = fsdpi_store_core_find(core, key, hash);
    size_t bytes = sizeof(fsdpi_store_entry) + f->key_size + 1 + f->value_size;
    if (core->total - (*old ? (*old)->bytes : 0) + bytes > FSDPI_STORE_TOTAL_MAX)
        return FSDP_ERR_OUT_OF_MEMORY;
    fsdpi_store_entry *entry = (fsdpi_store_entry *)fsdpi_alloc(&core->allocator, bytes);
    if (!entry) return FSDP_ERR_OUT_OF_MEMORY;
    entry->hash = hash;
    entry->bytes = bytes;
    entry->value_size = f->value_size;
    entry->key = (char *)(entry + 1);
    entry->value = entry->key + f->key_size + 1;
    memcpy(entry->key, key, f->key_size + 1);
    if (f->value_size) memcpy(entry->value, f->value, f->value_size);
    fsdpi_store_core_remove(core, old);
    fsdpi_store_entry **bucket = &core->entries[hash % FSDPI_STORE_BUCKETS];
    entry->next = *bucket;
    *bucket = entry;
    core->total += bytes;
    fsdpi_store_core_answer(core, NULL);
    return FSDP_OK;
}

static void fsdpi_store_core_get(fsdpi_store_core *core, fsdpi_conn *conn, const char *key,
                                 const fsdpi_frame *f, int64_t now) {
    fsdpi_store_wait *wait = NULL;
    if (conn->waits < FSDPI_STORE_WAITS_MAX)
        wait = (fsdpi_store_wait *)fsdpi_alloc(&core->allocator, sizeof *wait);
    if (!wait) {
        fsdpi_store_core_send(core, conn, FSDPI_STORE_REPLY, FSDP_ERR_OUT_OF_MEMORY, f->id, NULL,
                              0);
        return;
    }
    wait->conn = conn;
    wait->hash = fsdpi_hash_text(key);
    wait->deadline = fsdpi_store_after(now, fsdpi_le_i64(f->value));
    wait->id = f->id;
    memcpy(wait->key, key, f->key_size);
    wait->next = core->waits;
    core->waits = wait;
    conn->waits++;
    fsdpi_store_core_answer(core, conn);
}

static void fsdpi_store_core_ask(fsdpi_store_core *core, fsdpi_conn *conn, const fsdpi_frame *f,
                                 int64_t now) {
    char value[24 + sizeof core->ranks->beat.text], *at = value;
    int32_t rank = fsdpi_le_i32(f->value);
    if (rank < 0 || rank >= core->size) {
        fsdpi_store_core_send(core, conn, FSDPI_STORE_REPLY, FSDP_ERR_INVALID_ARG, f->id, NULL, 0);
        return;
    }
    fsdpi_peer p = fsdpi_store_core_peer(core, (int)rank, now);
    at = fsdpi_le_put(at, (uint32_t)p.state, 4);
    at = fsdpi_le_put(at, (uint32_t)p.busy, 4);
    at = fsdpi_le_put(at, (uint64_t)p.silent_ns, 8);
    at = fsdpi_le_put(at, (uint64_t)p.since_ns, 8);
    memcpy(at, p.text, strlen(p.text));
    fsdpi_store_core_send(core, conn, FSDPI_STORE_REPLY, FSDP_OK, f->id, value,
                          24 + strlen(p.text));
}

static void fsdpi_store_core_bye(fsdpi_store_core *core, fsdpi_conn *conn, int64_t now) {
    char value[4];
    int rank = conn->rank;
    (void)fsdpi_le_put(value, (uint32_t)rank, 4);
    fsdpi_store_core_forget(core, conn, INT64_MIN);
    fsdpi_conn_end(conn, now);
    if (core->num_joined < core->size)
        fsdpi_store_core_fail(core, FSDP_ERR_PEER_LOST, rank,
                              "[E701] rank %d has left before all ranks had joined", rank);
    fsdpi_store_core_push(core, FSDPI_STORE_RANK_LEFT, value, sizeof value);
    fsdpi_store_core_leave(core, rank);
}

// Returns the smallest value size of an op; SIZE_MAX: a client must not send the op.
static size_t fsdpi_store_core_least(int op) {
    switch (op) {
    case FSDPI_STORE_SET:
    case FSDPI_STORE_DELETE:
    case FSDPI_STORE_BYE: return 0;
    case FSDPI_STORE_GET: return 8;
    case FSDPI_STORE_BEAT: return 12;
    case FSDPI_STORE_ASK: return 4;
    case FSDPI_STORE_ABORT: return 12;
    default: return SIZE_MAX;
    }
}

static void fsdpi_store_core_frame(fsdpi_store_core *core, fsdpi_conn *conn, const fsdpi_frame *f,
                                   int64_t now) {
    char key[FSDPI_STORE_KEY_MAX + 1];
    fsdpi_failure v;
    int32_t status = FSDP_OK;
    fsdpi_store_rank *r = &core->ranks[conn->rank];
    if (f->value_size < fsdpi_store_core_least(f->op) ||
        (f->key_size && memchr(f->key, 0, f->key_size))) {
        fsdpi_conn_break(conn, FSDP_ERR_PEER_LOST,
                         "has sent the store a message that is not in its protocol");
        return;
    }
    (void)fsdpi_frame_text(key, sizeof key, f->key, f->key_size);
    r->heard_ns = now;
    switch (f->op) {
    case FSDPI_STORE_SET: status = (int32_t)fsdpi_store_core_set(core, key, f); break;
    case FSDPI_STORE_GET: fsdpi_store_core_get(core, conn, key, f, now); return;
    case FSDPI_STORE_DELETE:
        fsdpi_store_core_remove(core, fsdpi_store_core_find(core, key, fsdpi_hash_text(key)));
        break;
    case FSDPI_STORE_BEAT:
        r->beat.busy = fsdpi_le_i32(f->value);
        r->beat.since_ns = fsdpi_le_i64(f->value + 4);
        (void)fsdpi_frame_text(r->beat.text, sizeof r->beat.text, f->value + 12,
                               f->value_size - 12);
        return;
    case FSDPI_STORE_ASK: fsdpi_store_core_ask(core, conn, f, now); return;
    case FSDPI_STORE_ABORT:
        (void)fsdpi_failure_get(f, &v);
        v.rank = conn->rank;
        fsdpi_store_core_judge(core, &v);
        return;
    default: fsdpi_store_core_bye(core, conn, now); return;
    }
    fsdpi_store_core_send(core, conn, FSDPI_STORE_REPLY, status, f->id, NULL, 0);
}

static int fsdpi_store_core_open(fsdpi_store_core *core, const fsdp_allocator *allocator, int size,
                                 int server_rank, const uint8_t token[32]) {
    memset(core, 0, sizeof *core);
    core->allocator = *allocator;
    core->size = size;
    core->server_rank = server_rank;
    core->join_ns = INT64_MAX;
    memcpy(core->token, token, sizeof core->token);
    core->ranks = (fsdpi_store_rank *)fsdpi_alloc(allocator, (size_t)size * sizeof *core->ranks);
    return core->ranks != NULL;
}

// Makes a connection. Returns NULL if there is no memory.
static fsdpi_conn *fsdpi_store_core_connect(fsdpi_store_core *core,
                                            const uint8_t nonce[FSDPI_STORE_NONCE], int64_t now) {
    fsdpi_conn *conn = (fsdpi_conn *)fsdpi_alloc(&core->allocator, sizeof *conn);
    if (!conn) return NULL;
    conn->rank = -1;
    conn->deadline = fsdpi_store_after(now, FSDPI_STORE_PATIENCE);
    memcpy(conn->nonce, nonce, sizeof conn->nonce);
    conn->next = core->conns;
    core->conns = conn;
    core->num_conns++;
    fsdpi_store_core_send(core, conn, FSDPI_STORE_CHALLENGE, 0, FSDPI_STORE_VERSION, nonce,
                          sizeof conn->nonce);
    return conn;
}

// Ends a connection on which a frame was changed. The other direction is intact: the rank gets the
// reason.
static void fsdpi_store_core_cut_off(fsdpi_store_core *core, fsdpi_conn *conn, int64_t now) {
    int rank = conn->rank;
    if (rank < 0) {
        fsdpi_conn_break(conn, FSDP_OK, NULL);
        return;
    }
    core->ranks[rank].state = FSDPI_PEER_LOST;
    fsdpi_store_core_fail(core, FSDP_ERR_IO, rank,
                          "[E792] rank %d is cut off: its messages to the store were changed on "
                          "their way, or others were put between them: look at the network "
                          "between them",
                          rank);
    fsdpi_store_core_forget(core, conn, INT64_MIN);
    fsdpi_conn_end(conn, now);
}

// Handles bytes that have arrived on a connection.
static void fsdpi_store_core_feed(fsdpi_store_core *core, fsdpi_conn *conn, const void *data,
                                  size_t size, int64_t now) {
    fsdpi_frame f;
    if (conn->state < FSDPI_CONN_RANK && fsdpi_queue_size(&conn->in) + size > FSDPI_STORE_FIRST) {
        fsdpi_conn_break(conn, FSDP_OK, NULL);
        return;
    }
    if (conn->state > FSDPI_CONN_RANK) return;
    if (!fsdpi_queue_add(&core->allocator, &conn->in, data, size))
        fsdpi_conn_break(conn, FSDP_ERR_OUT_OF_MEMORY,
                         "is cut off: the store has no memory for its messages");
    while (conn->state <= FSDPI_CONN_RANK) {
        int whole = fsdpi_frame_get(&conn->in, &f);
        if (whole == 0) return;
        if (whole < 0) {
            fsdpi_store_core_cut_off(core, conn, now);
            return;
        }
        if (conn->state == FSDPI_CONN_STRANGER) fsdpi_store_core_prove(core, conn, &f, now);
        else if (!fsdpi_seal_open(&conn->seal_in, &f)) fsdpi_store_core_cut_off(core, conn, now);
        else if (conn->state == FSDPI_CONN_PROVEN) fsdpi_store_core_hello(core, conn, &f, now);
        else fsdpi_store_core_frame(core, conn, &f, now);
        fsdpi_frame_drop(&core->allocator, &conn->in);
    }
}

// Frees a connection that has ended, or will be closed. If its rank has not left, it is lost.
static void fsdpi_store_core_disconnect(fsdpi_store_core *core, fsdpi_conn *conn, int64_t now) {
    int rank = conn->rank;
    fsdp_status status = conn->why ? conn->status : FSDP_ERR_PEER_LOST;
    const char *why = conn->why ? conn->why : "has died or ended without fsdp_shutdown";
    fsdpi_conn **link = &core->conns;
    while (*link != conn) link = &(*link)->next;
    *link = conn->next;
    core->num_conns--;
    fsdpi_store_core_forget(core, conn, INT64_MIN);
    fsdpi_queue_free(&core->allocator, &conn->in);
    fsdpi_queue_free(&core->allocator, &conn->out);
    fsdpi_free(&core->allocator, conn);
    if (rank < 0 || core->closing) return;
    char last[400];
    fsdpi_text t = {last, sizeof last, 0};
    core->ranks[rank].state = FSDPI_PEER_LOST;
    fsdpi_peer p = fsdpi_store_core_peer(core, rank, now);
    fsdpi_say_peer(&t, &p);
    fsdpi_store_core_fail(core, status, rank, "[E706] rank %d %s; %s", rank, why, last);
}

// Fails the world if ranks are missing at the deadline of joining.
static void fsdpi_store_core_late(fsdpi_store_core *core) {
    char list[200];
    fsdpi_text t = {list, sizeof list, 0};
    int missing = 0, said = 0;
    for (int r = 0; r < core->size; r++) missing += core->ranks[r].state == FSDPI_PEER_ABSENT;
    core->join_ns = INT64_MAX;
    fsdpi_text_add(&t, missing > 1 ? "ranks" : "rank");
    for (int r = 0; r < core->size && said < 16; r++)
        if (core->ranks[r].state == FSDPI_PEER_ABSENT)
            fsdpi_text_add(&t, "%s %d", said++ ? "," : "", r);
    if (missing > said) fsdpi_text_add(&t, " and %d more", missing - said);
    fsdpi_store_core_fail(
        core, FSDP_ERR_TIMEOUT, -1,
        "[E707] %s %s not joined within %.1f s. The store is at %s: find out what %s there "
        "(FSDP_STORE, MASTER_ADDR and MASTER_PORT give the address, FSDP_TIMEOUT_MS gives the "
        "time)%s",
        list, missing > 1 ? "have" : "has", (double)core->join_timeout_ns * 1e-9, core->where,
        missing > 1 ? "keeps them from getting" : "keeps it from getting",
        core->num_refused ? "; others have called with another token: set FSDP_TOKEN and "
                            "FSDP_JOB_ID to the same values on all ranks"
        : core->num_old   ? "; others have called that speak version 1 of the store's protocol: "
                            "start all ranks with the same build"
                          : "");
}

// Handles all deadlines that have passed. Returns the time of the next call.
static int64_t fsdpi_store_core_expire(fsdpi_store_core *core, int64_t now) {
    if (core->join_ns <= now) fsdpi_store_core_late(core);
    fsdpi_store_core_forget(core, NULL, now);
    int64_t next = core->join_ns;
    for (fsdpi_conn *conn = core->conns; conn; conn = conn->next) {
        if (conn->state == FSDPI_CONN_RANK || conn->state == FSDPI_CONN_BROKEN) continue;
        if (conn->deadline <= now) fsdpi_conn_break(conn, FSDP_OK, NULL);
        else if (conn->deadline < next) next = conn->deadline;
    }
    for (fsdpi_store_wait *wait = core->waits; wait; wait = wait->next)
        if (wait->deadline < next) next = wait->deadline;
    return next;
}

// Returns the worth of a connection, from 0, which is being refused, to 3, a rank's.
static int fsdpi_conn_worth(const fsdpi_conn *conn) {
    if (conn->state == FSDPI_CONN_RANK) return 3; // seal_out: it has the right token
    return conn->seal_out.on ? 2 : conn->state == FSDPI_CONN_STRANGER;
}

/* Closes the oldest of the least valuable connections, if there are too many. So connections that
   are being refused do not keep out a rank. Returns 0 if all connections are ranks'. */
static int fsdpi_store_core_evict(fsdpi_store_core *core) {
    fsdpi_conn *least = NULL;
    for (fsdpi_conn *conn = core->conns; conn; conn = conn->next) // newest first
        if (fsdpi_conn_worth(conn) <= (least ? fsdpi_conn_worth(least) : 2)) least = conn;
    if (least) fsdpi_conn_break(least, FSDP_OK, NULL);
    return least != NULL;
}

// Returns 1 if ranks that have yet to connect must get the failure: a lost rank, or a mismatch.
static int fsdpi_store_core_owes(const fsdpi_store_core *core) {
    int absent = 0, status = core->verdict.status;
    for (int r = 0; r < core->size; r++) absent += core->ranks[r].state == FSDPI_PEER_ABSENT;
    return (status == FSDP_ERR_PEER_LOST || status == FSDP_ERR_MISMATCH) && absent;
}

static void fsdpi_store_core_farewell(fsdpi_store_core *core, int64_t now) {
    fsdpi_store_core_push(core, FSDPI_STORE_CLOSING, NULL, 0);
    core->closing = 1;
    for (fsdpi_conn *conn = core->conns; conn; conn = conn->next)
        if (conn->state != FSDPI_CONN_BROKEN) fsdpi_conn_end(conn, now);
}

static void fsdpi_store_core_close(fsdpi_store_core *core) {
    core->closing = 1;
    while (core->conns) fsdpi_store_core_disconnect(core, core->conns, 0);
    fsdpi_store_core_clear(core);
    fsdpi_free(&core->allocator, core->ranks);
}

/* -------------------------------------------------------------------------------------------- */
// Addresses and sockets. Sockets do not block, and an exec closes them.

enum { FSDPI_STORE_TCP, FSDPI_STORE_FILE, FSDPI_STORE_HOST };

// The parsed address in boot->store.
typedef struct fsdpi_store_where {
    int kind, port;
    char host[256];
    const char *path;
} fsdpi_store_where;

typedef struct fsdpi_store_place {
    union {
        struct sockaddr any;
        struct sockaddr_in v4;
        struct sockaddr_in6 v6;
        struct sockaddr_un un;
    } at;
    socklen_t size;
} fsdpi_store_place;

static int fsdpi_store_parse(const char *text, fsdpi_store_where *out) {
    memset(out, 0, sizeof *out);
    out->kind = FSDPI_STORE_HOST;
    if (!text || !strcmp(text, "host:")) return 1;
    if (!strncmp(text, "file:///", 8)) {
        out->kind = FSDPI_STORE_FILE;
        out->path = text + 7;
        return text[8] != 0;
    }
    out->kind = FSDPI_STORE_TCP;
    if (strncmp(text, "tcp://", 6) != 0) return 0;
    const char *host = text + 6, *colon = strrchr(host, ':');
    size_t bracket = *host == '[', length = colon ? (size_t)(colon - host) : 0;
    if (length <= 2 * bracket || length >= sizeof out->host || (bracket && colon[-1] != ']') ||
        (!bracket && memchr(host, ':', length)))
        return 0;
    memcpy(out->host, host + bracket, length - 2 * bracket);
    char *end;
    long port = strtol(colon + 1, &end, 10);
    out->port = (int)port;
    return colon[1] >= '0' && colon[1] <= '9' && !*end && port <= 65535;
}

// Makes an IPv4 address that is mapped to IPv6 an IPv4 address.
static void fsdpi_store_unmap(fsdpi_store_place *p) {
    static const uint8_t mapped[12] = {0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xFF, 0xFF};
    struct sockaddr_in6 v6 = p->at.v6;
    if (p->at.any.sa_family != AF_INET6 || memcmp(&v6.sin6_addr, mapped, 12) != 0) return;
    memset(p, 0, sizeof *p);
    p->at.v4.sin_family = AF_INET;
    p->at.v4.sin_port = v6.sin6_port;
    memcpy(&p->at.v4.sin_addr, (const char *)&v6.sin6_addr + 12, 4);
    p->size = sizeof p->at.v4;
}

static int fsdpi_store_is_loopback(const fsdpi_store_place *p) {
    static const uint8_t one[16] = {0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1};
    if (p->at.any.sa_family == AF_INET6) return memcmp(&p->at.v6.sin6_addr, one, 16) == 0;
    return p->at.any.sa_family != AF_INET || ntohl(p->at.v4.sin_addr.s_addr) >> 24 == 127;
}

// Sets 0.0.0.0 or ::, all addresses of this host. Keeps the port.
static void fsdpi_store_set_any(fsdpi_store_place *p) {
    if (p->at.any.sa_family == AF_INET6) memset(&p->at.v6.sin6_addr, 0, 16);
    if (p->at.any.sa_family == AF_INET) p->at.v4.sin_addr.s_addr = htonl(INADDR_ANY);
}

// Sets the address by which this host reaches a server that is bound to all addresses.
static void fsdpi_store_localise(fsdpi_store_place *p) {
    fsdpi_store_place any = *p;
    fsdpi_store_set_any(&any);
    if (p->at.any.sa_family == AF_UNIX || memcmp(&any, p, sizeof any) != 0) return;
    if (p->at.any.sa_family == AF_INET6) ((uint8_t *)&p->at.v6.sin6_addr)[15] = 1;
    else p->at.v4.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
}

static void fsdpi_store_set_port(fsdpi_store_place *p, int port) {
    if (p->at.any.sa_family == AF_INET6) p->at.v6.sin6_port = htons((uint16_t)port);
    if (p->at.any.sa_family == AF_INET) p->at.v4.sin_port = htons((uint16_t)port);
}

static int fsdpi_store_get_port(const fsdpi_store_place *p) {
    if (p->at.any.sa_family == AF_INET6) return ntohs(p->at.v6.sin6_port);
    return p->at.any.sa_family == AF_INET ? ntohs(p->at.v4.sin_port) : 0;
}

// Writes "127.0.0.1" or "fe80::1%eth0"; for a unix socket "127.0.0.1", where its users are.
static void fsdpi_store_host_text(const fsdpi_store_place *p, char *out, size_t cap) {
    if (p->at.any.sa_family == AF_UNIX ||
        fsdpi_getnameinfo(&p->at.any, p->size, out, (socklen_t)cap, NULL, 0,
                          1 /* NI_NUMERICHOST */))
        (void)snprintf(out, cap, "127.0.0.1");
}

// Writes an address in the form of boot->store.
static void fsdpi_store_place_text(const fsdpi_store_place *p, char *out, size_t cap) {
    char host[64];
    int v6 = p->at.any.sa_family == AF_INET6;
    fsdpi_store_host_text(p, host, sizeof host);
    if (p->at.any.sa_family == AF_UNIX) (void)snprintf(out, cap, "host: (this host)");
    else
        (void)snprintf(out, cap, "tcp://%s%s%s:%d", v6 ? "[" : "", host, v6 ? "]" : "",
                       fsdpi_store_get_port(p));
}

// Makes an abstract unix address, which needs no file, and ends with its socket.
static void fsdpi_store_unix(const char *job, fsdpi_store_place *p) {
    memset(p, 0, sizeof *p);
    p->at.un.sun_family = AF_UNIX;
    int used = snprintf(p->at.un.sun_path + 1, sizeof p->at.un.sun_path - 1,
                        "fsdp-store-%lu-%016llx", (unsigned long)getuid(),
                        (unsigned long long)fsdpi_hash_text(job));
    p->size = (socklen_t)(offsetof(struct sockaddr_un, sun_path) + 1 + (size_t)used);
}

// Runs start(arg) in a thread with a stack of `stack` bytes; 0: the usual size. The thread gets no
// signals.
static int fsdpi_store_thread(pthread_t *thread, void *(*start)(void *), void *arg, size_t stack) {
    uint64_t all = ~(uint64_t)0, before = 0;
    pthread_attr_t attr;
    int rc = pthread_attr_init(&attr);
    if (rc) return rc;
    if (stack) (void)pthread_attr_setstacksize(&attr, stack);
    (void)fsdpi_syscall(SYS_rt_sigprocmask, 2 /* SIG_SETMASK */, &all, &before, sizeof all);
    rc = pthread_create(thread, &attr, start, arg);
    if (rc == EINVAL) rc = pthread_create(thread, NULL, start, arg); // it is too small
    (void)fsdpi_syscall(SYS_rt_sigprocmask, 2, &before, NULL, sizeof all);
    (void)pthread_attr_destroy(&attr);
    return rc;
}

// A question to the resolver, with two threads. The one that ends last frees it.
typedef struct fsdpi_store_question {
    uint32_t state; // the caller sleeps on it
    int rc;
    struct fsdpi_addrinfo hints, *list;
    char host[256];
} fsdpi_store_question;

enum { FSDPI_STORE_ASKED, FSDPI_STORE_ANSWERED, FSDPI_STORE_GIVEN_UP };

static void fsdpi_store_forget_question(fsdpi_store_question *q) {
    if (q->list) fsdpi_freeaddrinfo(q->list);
    fsdpi_libc_free(q, sizeof *q, NULL);
}

static void *fsdpi_store_resolve(void *arg) {
    fsdpi_store_question *q = (fsdpi_store_question *)arg;
    uint32_t *state = &q->state;
    fsdpi_pin_library();
    q->rc = fsdpi_getaddrinfo(q->host, NULL, &q->hints, &q->list);
    if (q->rc) q->list = NULL;
    uint32_t before = __atomic_exchange_n(state, (uint32_t)FSDPI_STORE_ANSWERED, __ATOMIC_ACQ_REL);
    if (before == FSDPI_STORE_GIVEN_UP) fsdpi_store_forget_question(q);
    else fsdpi_futex_wake_all(state, 0); // if it is free already, that does no harm
    return NULL;
}

/* Asks the resolver, which has its own deadlines. A thread waits for it, and is abandoned at
   `deadline`; until it has ended, the library must stay loaded. Returns NULL if there is no answer;
   *rc: the resolver's error, or 0: no answer in time. */
static struct fsdpi_addrinfo *fsdpi_store_ask_resolver(const fsdp_clock *clock, const char *host,
                                                       int64_t deadline, int *rc) {
    struct fsdpi_addrinfo *list = NULL;
    pthread_t thread;
    fsdpi_store_question *q = (fsdpi_store_question *)fsdpi_libc_alloc(sizeof *q, 64, NULL);
    *rc = -10; // EAI_MEMORY
    if (!q) return NULL;
    memset(q, 0, sizeof *q);
    q->hints.ai_socktype = SOCK_STREAM;
    (void)snprintf(q->host, sizeof q->host, "%s", host);
    if (fsdpi_store_thread(&thread, fsdpi_store_resolve, q, 0)) {
        fsdpi_libc_free(q, sizeof *q, NULL);
        return NULL;
    }
    (void)pthread_detach(thread);
    for (int64_t left; FSDPI_LOAD(&q->state) == FSDPI_STORE_ASKED &&
                       (left = deadline - clock->now_ns(clock->user)) > 0;)
        fsdpi_futex_wait(&q->state, FSDPI_STORE_ASKED, left < 50000000 ? left : 50000000, 0);
    *rc = 0;
    if (__atomic_exchange_n(&q->state, (uint32_t)FSDPI_STORE_GIVEN_UP, __ATOMIC_ACQ_REL) ==
        FSDPI_STORE_ASKED)
        return NULL;
    *rc = q->rc;
    list = q->list;
    q->list = NULL;
    fsdpi_store_forget_question(q);
    return list;
}

// Looks up a name. Returns the number of its addresses in out, at most max.
static int fsdpi_store_lookup_name(const fsdp_clock *clock, const char *host, int64_t deadline,
                                   fsdpi_store_place *out, int max, fsdpi_text *why) {
    struct fsdpi_addrinfo hints, *list = NULL;
    int count = 0;
    memset(&hints, 0, sizeof hints);
    hints.ai_socktype = SOCK_STREAM;
    hints.ai_flags = 4; // AI_NUMERICHOST: an address is its own answer
    int rc = fsdpi_getaddrinfo(host, NULL, &hints, &list);
    if (rc) list = fsdpi_store_ask_resolver(clock, host, deadline, &rc);
    if (!list) {
        fsdpi_text_add(why, "[E728] host '%s': %s", host,
                       rc ? fsdpi_gai_strerror(rc) : "the resolver has not answered in time");
        return 0;
    }
    for (int v6 = 0; v6 < 2; v6++) // all hosts have the same order
        for (struct fsdpi_addrinfo *i = list; i && count < max; i = i->ai_next) {
            if (i->ai_family != (v6 ? AF_INET6 : AF_INET)) continue;
            memset(&out[count], 0, sizeof *out);
            memcpy(&out[count].at, i->ai_addr, i->ai_addrlen);
            out[count++].size = i->ai_addrlen;
        }
    fsdpi_freeaddrinfo(list);
    if (!count) fsdpi_text_add(why, "[E729] host '%s' has no address", host);
    return count;
}

// Looks up a name, or each of the names "a,b": these share `max`. Each round does so, since a name
// may appear later than the program starts.
static int fsdpi_store_lookup(const fsdp_clock *clock, const char *host, int64_t deadline,
                              fsdpi_store_place *out, int max, fsdpi_text *why) {
    char name[sizeof(((fsdpi_store_where *)0)->host)];
    int names = 1, count = 0;
    for (const char *p = host; (p = strchr(p, ',')) != NULL; p++) names++;
    const int each = names < max ? max / names : 1;
    for (; host && count < max; host = strchr(host, ','), host += host != NULL) {
        (void)snprintf(name, sizeof name, "%.*s", (int)strcspn(host, ","), host);
        count += fsdpi_store_lookup_name(clock, name, deadline, out + count, each, why);
    }
    return count;
}

// Returns 1 if a list "a,b" has the name.
static int fsdpi_store_listed(const char *list, const char *name) {
    size_t length = strlen(name);
    while (list) {
        if (!strncmp(list, name, length) && (list[length] == ',' || !list[length])) return 1;
        list = strchr(list, ',');
        if (list) list++;
    }
    return 0;
}

// Finds the address of the interface that the user has set for this rank; size 0: none is set.
static fsdp_status fsdpi_store_interface(int family, fsdpi_store_place *out, fsdpi_text *error) {
    const char *name = "FSDP_SOCKET_IFNAME", *list = fsdpi_env(name);
    struct ifaddrs *all = NULL;
    out->size = 0;
    if (!list) list = fsdpi_env(name = "GLOO_SOCKET_IFNAME");
    if (!list) return FSDP_OK;
    int excludes = *list == '^';
    if (getifaddrs(&all)) {
        fsdpi_text_add(error, "[E708] the system cannot list the interfaces for %s: %s", name,
                       strerror(errno));
        return FSDP_ERR_IO;
    }
    char seen[320];
    fsdpi_text t = {seen, sizeof seen, 0};
    for (struct ifaddrs *i = all; i && !out->size; i = i->ifa_next) {
        fsdpi_store_place p;
        char host[64];
        if (!i->ifa_addr || !(i->ifa_flags & 1 /* IFF_UP */) || i->ifa_addr->sa_family != family)
            continue;
        memset(&p, 0, sizeof p);
        p.size = family == AF_INET6 ? sizeof p.at.v6 : sizeof p.at.v4;
        memcpy(&p.at, i->ifa_addr, p.size);
        int listed = fsdpi_store_listed(list + excludes, i->ifa_name);
        if (excludes ? !listed && !fsdpi_store_is_loopback(&p) : listed) *out = p;
        fsdpi_store_host_text(&p, host, sizeof host);
        fsdpi_text_add(&t, "%s %s (%s)", t.used ? "," : "", i->ifa_name, host);
    }
    if (!out->size)
        fsdpi_text_add(
            error,
            "[E709] environment variable %s is '%s', but no such interface is up with an "
            "IPv%d address. Interfaces that have one:%s",
            name, list, family == AF_INET6 ? 6 : 4, t.used ? seen : " none");
    freeifaddrs(all);
    return out->size ? FSDP_OK : FSDP_ERR_INVALID_ARG;
}

// Adds the addresses of this host that others may reach.
static void fsdpi_store_say_own(fsdpi_text *t) {
    const size_t before = t->used;
    struct ifaddrs *all = NULL;
    char host[64];
    (void)getifaddrs(&all); // after a failure there is none
    for (struct ifaddrs *i = all; i; i = i->ifa_next) {
        fsdpi_store_place p;
        const int family = i->ifa_addr ? i->ifa_addr->sa_family : AF_UNSPEC;
        if (family != AF_INET && family != AF_INET6) continue;
        memset(&p, 0, sizeof p);
        p.size = family == AF_INET6 ? sizeof p.at.v6 : sizeof p.at.v4;
        memcpy(&p.at, i->ifa_addr, p.size);
        if (fsdpi_store_is_loopback(&p)) continue;
        fsdpi_store_host_text(&p, host, sizeof host);
        fsdpi_text_add(t, "%s%s", t->used > before ? ", " : "", host);
    }
    if (all) freeifaddrs(all);
    if (t->used == before) fsdpi_text_add(t, "only loopback addresses");
}

// Finds the source address of packets from this host to others. The connect of a datagram socket
// reads the routing table and sends nothing; its target is an address that is reserved for
// documentation.
static void fsdpi_store_outward(fsdpi_store_place *out) {
    int fd = fsdpi_fd(socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0));
    memset(out, 0, sizeof *out);
    out->at.v4.sin_family = AF_INET;
    out->at.v4.sin_addr.s_addr = htonl(0xC0000201); // 192.0.2.1
    fsdpi_store_set_port(out, 9);
    out->size = sizeof out->at.v4;
    if (fd < 0 || connect(fd, &out->at.any, out->size) || getsockname(fd, &out->at.any, &out->size))
        out->at.v4.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    if (fd >= 0) (void)close(fd);
}

// Returns 1 if a connection comes from another host: its ends then have different addresses.
static int fsdpi_store_is_remote(int fd) {
    fsdpi_store_place ends[2];
    memset(ends, 0, sizeof ends);
    for (int i = 0; i < 2; i++) {
        ends[i].size = sizeof ends[i].at;
        if (i ? getpeername(fd, &ends[i].at.any, &ends[i].size)
              : getsockname(fd, &ends[i].at.any, &ends[i].size))
            return 0;
        if (ends[i].at.any.sa_family == AF_UNIX) return 0;
        fsdpi_store_set_port(&ends[i], 0);
    }
    return memcmp(ends, ends + 1, sizeof *ends) != 0;
}

// Returns the text of a broken connection to another host; NULL: the process has ended. A process
// that ends closes its connection; a reset, or no answer, may also come from a firewall.
static const char *fsdpi_store_why_broken(int is_remote, int error) {
    if (!is_remote) return NULL;
    return error == ECONNRESET || error == EPIPE
               ? "has lost its connection to the store: it was reset, by a firewall or a proxy on "
                 "the way, or as its process or host ended"
               : "has lost its connection to the store: its host does not answer";
}

static int fsdpi_store_socket(const fsdpi_store_place *p) {
    return fsdpi_fd(socket(p->at.any.sa_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
}

static void fsdpi_store_prompt(int fd) { // send small frames at once; fails on unix sockets
    int one = 1;
    (void)setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
}

static int fsdpi_store_poll_ms(int64_t ns, int64_t most) {
    if (ns <= 0) return 0;
    return (int)((ns < most ? ns : most) / 1000000) + 1;
}

// Sends as many bytes as possible without a wait. Returns 0 if the connection has ended.
static int fsdpi_store_flush(const fsdp_allocator *a, int fd, fsdpi_queue *b) {
    while (fsdpi_queue_size(b)) {
        ssize_t sent = send(fd, b->block + b->begin, fsdpi_queue_size(b), MSG_NOSIGNAL);
        if (sent < 0) return errno == EAGAIN || errno == EINTR;
        fsdpi_queue_drop(a, b, (size_t)sent);
    }
    return 1;
}

static void fsdpi_store_wake(int fd) {
    uint64_t one = 1;
    ssize_t written = write(fd, &one, sizeof one); // if it is full, the thread is awake
    (void)written;
}

/* -------------------------------------------------------------------------------------------- */
// Sockets of the server, and the thread that moves bytes between them and the core.

struct fsdpi_store_server {
    fsdpi_store_core core;
    fsdp_allocator allocator;
    fsdp_clock clock;
    int listener, wake, max_conns, is_deaf; // deaf: the program has closed `wake`
    uint32_t stop;
    int64_t accept_ns;       // no accept before this time: descriptors are short
    fsdpi_store_place place; // its address from its own host
    char file[512];          // the file with its address, "": none
    pthread_t thread;
    struct pollfd *polls; // wake, listener, connections in the order of the core's list
    char scratch[FSDPI_STORE_READ];
};

static int64_t fsdpi_store_server_now(const fsdpi_store_server *server) {
    return server->clock.now_ns(server->clock.user);
}

static void fsdpi_store_server_accept(fsdpi_store_server *server, int64_t now) {
    while (server->core.num_conns < server->max_conns) {
        uint8_t nonce[FSDPI_STORE_NONCE];
        fsdpi_store_place here;
        int fd = fsdpi_fd((int)fsdpi_syscall(SYS_accept4, server->listener, NULL, NULL,
                                             SOCK_CLOEXEC | SOCK_NONBLOCK));
        if (fd < 0) {
            if (errno == EAGAIN || errno == EINTR || errno == ECONNABORTED) return;
            if (!fsdpi_store_core_evict(&server->core)) // its descriptor is free then
                server->accept_ns = now + FSDPI_STORE_GRACE;
            return;
        }
        here.size = sizeof here.at;
        int known = !getsockname(fd, &here.at.any, &here.size);
        fsdpi_conn *conn = NULL;
        if (known && (here.at.any.sa_family != AF_UNIX || fsdpi_same_user(fd)) &&
            fsdpi_random(nonce, sizeof nonce))
            conn = fsdpi_store_core_connect(&server->core, nonce, now);
        if (!conn) {
            (void)close(fd);
            continue;
        }
        conn->fd = fd;
        conn->is_remote = fsdpi_store_is_remote(fd);
        fsdpi_store_prompt(fd);
        fsdpi_store_unmap(&here);
        if (!fsdpi_store_is_loopback(&here)) // kept per connection, which may be untrusted
            fsdpi_store_host_text(&here, conn->reached, sizeof conn->reached);
    }
    (void)fsdpi_store_core_evict(&server->core);
}

static void fsdpi_store_server_move(fsdpi_store_server *server, fsdpi_conn *conn, int events,
                                    int64_t now) {
    int open = 1, error = 0;
    if (events & (POLLIN | POLLHUP | POLLERR | POLLNVAL)) {
        ssize_t got = recv(conn->fd, server->scratch, sizeof server->scratch, 0);
        if (got < 0 && errno == EBADF) // the program has closed this socket
            fsdpi_conn_break(conn, FSDP_ERR_PEER_LOST,
                             "is cut off: the program of the store has closed its connection");
        open = got > 0 || (got < 0 && (errno == EAGAIN || errno == EINTR));
        if (!open && got < 0) error = errno;
        if (got > 0) fsdpi_store_core_feed(&server->core, conn, server->scratch, (size_t)got, now);
    }
    if (open && conn->state != FSDPI_CONN_BROKEN) {
        open = fsdpi_store_flush(&server->allocator, conn->fd, &conn->out);
        if (!open) error = errno;
    }
    if (error && !conn->why)
        fsdpi_conn_break(conn, FSDP_ERR_PEER_LOST, fsdpi_store_why_broken(conn->is_remote, error));
    if (open && conn->waits) fsdpi_store_core_answer(&server->core, conn);
    // All is sent. The peer closes first: a close with unread input would be a reset.
    if (open && conn->state == FSDPI_CONN_ENDING && !fsdpi_queue_size(&conn->out))
        (void)shutdown(conn->fd, SHUT_WR);
    if (open && conn->state != FSDPI_CONN_BROKEN) return;
    (void)close(conn->fd);
    fsdpi_store_core_disconnect(&server->core, conn, now);
}

// Waits for an event, and handles it. Returns 0 if there was none.
static int fsdpi_store_server_round(fsdpi_store_server *server, int64_t most) {
    int64_t now = fsdpi_store_server_now(server),
            next = fsdpi_store_core_expire(&server->core, now);
    nfds_t count = 2;
    int listens = server->listener >= 0 && server->accept_ns <= now;
    memset(server->polls, 0, 2 * sizeof *server->polls);
    server->polls[0].fd = FSDPI_LOAD(&server->stop) || server->is_deaf ? -1 : server->wake;
    server->polls[0].events = POLLIN;
    server->polls[1].fd = listens ? server->listener : -1;
    server->polls[1].events = POLLIN;
    if (!listens && server->listener >= 0 && server->accept_ns < next) next = server->accept_ns;
    for (fsdpi_conn *conn = server->core.conns; conn; conn = conn->next) {
        struct pollfd *p = &server->polls[count++];
        p->fd = conn->fd;
        p->events = fsdpi_queue_size(&conn->out) ? POLLIN | POLLOUT : POLLIN;
        p->revents = 0;
        if (conn->state == FSDPI_CONN_BROKEN) next = now;
    }
    int ready = poll(server->polls, count, fsdpi_store_poll_ms(next - now, most));
    now = fsdpi_store_server_now(server);
    server->is_deaf |= ready > 0 && (server->polls[0].revents & POLLNVAL);
    count = 2;
    for (fsdpi_conn *conn = server->core.conns, *after; conn; conn = after) {
        int events = ready > 0 ? server->polls[count].revents : 0;
        after = conn->next;
        count++;
        if (events || conn->state == FSDPI_CONN_BROKEN)
            fsdpi_store_server_move(server, conn, events, now);
    }
    if (ready > 0 && server->polls[1].revents) fsdpi_store_server_accept(server, now);
    return ready;
}

static void *fsdpi_store_server_main(void *arg) {
    fsdpi_store_server *server = (fsdpi_store_server *)arg;
    fsdpi_pin_library();
    while (!FSDPI_LOAD(&server->stop)) (void)fsdpi_store_server_round(server, 1000000000);
    int64_t now = fsdpi_store_server_now(server), end = now + FSDPI_STORE_LINGER;
    // The launcher may stop because a rank has ended, which this thread has not seen yet.
    while (fsdpi_store_server_round(server, 0) != 0 && fsdpi_store_server_now(server) < end)
        continue;
    while (fsdpi_store_core_owes(&server->core) && fsdpi_store_server_now(server) < end)
        (void)fsdpi_store_server_round(server, 10000000);
    // No new connections; then CLOSING, and time for clients to read it.
    (void)close(server->listener);
    server->listener = -1;
    now = fsdpi_store_server_now(server), end = now + FSDPI_STORE_FAREWELL;
    fsdpi_store_core_farewell(&server->core, now);
    for (fsdpi_conn *conn = server->core.conns, *after; conn; conn = after) {
        after = conn->next;
        fsdpi_store_server_move(server, conn, 0, now);
    }
    while (server->core.conns && fsdpi_store_server_now(server) < end)
        (void)fsdpi_store_server_round(server, 10000000);
    return NULL;
}

static void fsdpi_store_server_free(fsdpi_store_server *server) {
    fsdp_allocator allocator = server->allocator;
    if (server->file[0]) (void)unlink(server->file);
    for (fsdpi_conn *conn = server->core.conns; conn; conn = conn->next) (void)close(conn->fd);
    fsdpi_store_core_close(&server->core);
    if (server->listener >= 0) (void)close(server->listener);
    if (server->wake >= 0) (void)close(server->wake);
    fsdpi_free(&allocator, server->polls);
    fsdpi_free(&allocator, server);
}

// Sends the ranks CLOSING, and ends the store.
static FSDPI_UNUSED void fsdpi_store_stop(fsdpi_store_server *server) {
    if (!server) return;
    FSDPI_STORE(&server->stop, 1u);
    fsdpi_store_wake(server->wake);
    (void)pthread_join(server->thread, NULL);
    fsdpi_store_server_free(server);
}

static FSDPI_UNUSED int fsdpi_store_port(const fsdpi_store_server *server) {
    return fsdpi_store_get_port(&server->place);
}

// Returns a listening socket; or -1, and errno. *place: the address to which it is bound.
static int fsdpi_store_listen(fsdpi_store_place *place) {
    int fd = fsdpi_store_socket(place), one = 1;
    if (fd < 0) return -1;
    if (place->at.any.sa_family != AF_UNIX)
        (void)setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &one, sizeof one);
    if (bind(fd, &place->at.any, place->size) || listen(fd, SOMAXCONN)) {
        int why = errno;
        (void)close(fd);
        errno = why;
        return -1;
    }
    place->size = sizeof place->at;
    (void)getsockname(fd, &place->at.any, &place->size);
    return fd;
}

// Writes the address to a file. Readers see the whole line or none. A pipe or a link at the path is
// not opened.
static int fsdpi_store_write_file(fsdpi_store_server *server, const char *path) {
    char fresh[sizeof server->file + 8], text[128];
    errno = ENAMETOOLONG;
    if (strlen(path) >= sizeof server->file) return 0;
    memcpy(server->file, path, strlen(path) + 1);
    (void)snprintf(fresh, sizeof fresh, "%s.new", path);
    fsdpi_store_place_text(&server->place, text, sizeof text);
    (void)unlink(fresh);
    int fd = fsdpi_fd(open(fresh, O_WRONLY | O_CREAT | O_EXCL | FSDPI_STORE_CLOEXEC, 0666));
    if (fd < 0) return 0;
    size_t length = strlen(text);
    text[length] = '\n';
    int done = write(fd, text, length + 1) == (ssize_t)length + 1;
    done &= !close(fd);
    return done && !rename(fresh, path);
}

// Serves on a listening socket, in a thread. The server takes over the socket; after a failure it
// is closed.
static fsdp_status fsdpi_store_start(const fsdpi_store_desc *d, const fsdpi_store_where *where,
                                     int server_rank, int listener, const fsdpi_store_place *place,
                                     fsdpi_store_server **out, fsdpi_text *error) {
    const fsdp_allocator *a = &d->boot.allocator;
    uint8_t token[32];
    fsdpi_store_server *server = (fsdpi_store_server *)fsdpi_alloc(a, sizeof *server);
    if (!server) {
        (void)close(listener);
        fsdpi_text_add(
            error, "[E710] the allocator has returned NULL for %u bytes of memory for the store",
            (unsigned)sizeof *server);
        return FSDP_ERR_OUT_OF_MEMORY;
    }
    server->allocator = *a;
    server->clock = d->boot.clock;
    server->listener = listener;
    server->max_conns = 2 * d->boot.size + FSDPI_STORE_STRANGERS;
    server->place = *place;
    server->wake = fsdpi_fd(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
    server->polls = (struct pollfd *)fsdpi_alloc(a, (size_t)(server->max_conns + 2) *
                                                        sizeof *server->polls);
    (void)fsdpi_store_token(d->boot.job, token);
    fsdp_status status = FSDP_OK;
    int rc = 0;
    if (!fsdpi_store_core_open(&server->core, a, d->boot.size, server_rank, token) ||
        !server->polls) {
        status = FSDP_ERR_OUT_OF_MEMORY;
        fsdpi_text_add(error,
                       "[E711] the allocator has returned NULL for memory of a store of %d ranks",
                       d->boot.size);
    } else {
        char text[128];
        fsdpi_store_place_text(place, text, sizeof text);
        (void)snprintf(server->core.where, sizeof server->core.where, "%s%s%s", text,
                       where->path ? ", as said in " : "", where->path ? where->path : "");
        fsdpi_store_localise(&server->place);
    }
    if (!status && where->kind == FSDPI_STORE_FILE &&
        !fsdpi_store_write_file(server, where->path)) {
        status = FSDP_ERR_IO;
        fsdpi_text_add(
            error,
            "[E712] this rank cannot write file '%s' (FSDP_STORE), where ranks look for the "
            "store: %s",
            where->path, strerror(errno));
    }
    if (!status &&
        (server->wake < 0 || (rc = fsdpi_store_thread(&server->thread, fsdpi_store_server_main,
                                                      server, FSDPI_STORE_STACK)))) {
        status = FSDP_ERR_BACKEND;
        fsdpi_text_add(error, "[E713] the system refused to start the store's thread: %s",
                       strerror(server->wake < 0 ? errno : rc));
    }
    if (status) fsdpi_store_server_free(server);
    else *out = server;
    return status;
}

static int fsdpi_store_not_here(int why) { return why == EADDRNOTAVAIL || why == EAFNOSUPPORT; }

/* Listens at the first of the addresses that belongs to this host; any: at all addresses of this
   host. Also listens at all addresses if the name is a loopback address here: on other hosts it may
   be another one (Debian's 127.0.1.1). */
static int fsdpi_store_claim(const fsdpi_store_where *where, const fsdpi_store_place *list,
                             int count, int port, int any, fsdpi_store_place *out) {
    int is_local_name = !strcmp(where->host, "localhost") || !strncmp(where->host, "127.", 4) ||
                        !strcmp(where->host, "::1");
    errno = EADDRNOTAVAIL;
    for (int i = 0; i < count; i++) {
        *out = list[i];
        fsdpi_store_set_port(out, port);
        if (out->at.any.sa_family != AF_UNIX && !is_local_name &&
            (any || fsdpi_store_is_loopback(out)))
            fsdpi_store_set_any(out);
        int fd = fsdpi_store_listen(out);
        if (fd >= 0 || !fsdpi_store_not_here(errno)) return fd;
    }
    return -1;
}

// Listens on a free port, for a store whose address is written to a file.
static fsdp_status fsdpi_store_claim_free(fsdpi_store_place *out, int *fd, fsdpi_text *error) {
    fsdp_status status = fsdpi_store_interface(AF_INET, out, error);
    if (status) return status;
    if (!out->size) fsdpi_store_outward(out);
    fsdpi_store_set_port(out, 0);
    *fd = fsdpi_store_listen(out);
    if (*fd >= 0) return FSDP_OK;
    fsdpi_text_add(error, "[E714] this rank cannot listen on any port: %s", strerror(errno));
    return FSDP_ERR_IO;
}

/* Serves for other processes, which find it by the same address (or by fsdpi_store_port, if the
   port was taken). desc: boot.size, timeout_ns, job, store, allocator, clock. */
static FSDPI_UNUSED fsdp_status fsdpi_store_serve(const fsdpi_store_desc *d,
                                                  fsdpi_store_server **out, char *error,
                                                  size_t cap) {
    fsdpi_store_where where;
    fsdpi_store_place list[FSDPI_STORE_PLACES], place;
    fsdpi_text t = {error, cap, 0};
    int fd = -1, count = 1;
    *out = NULL;
    if (!fsdpi_store_parse(d->boot.store, &where)) {
        fsdpi_text_add(
            &t,
            "[E715] the store's address is '%s', expected tcp://HOST:PORT with a port up to 65535, "
            "file:///PATH or host:",
            d->boot.store);
        return FSDP_ERR_INVALID_ARG;
    }
    if (where.kind == FSDPI_STORE_FILE) {
        fsdp_status status = fsdpi_store_claim_free(&place, &fd, &t);
        if (status) return status;
    }
    if (where.kind == FSDPI_STORE_HOST) fsdpi_store_unix(d->boot.job, &list[0]);
    if (where.kind == FSDPI_STORE_TCP)
        count = fsdpi_store_lookup(&d->boot.clock, where.host, INT64_MAX, list, FSDPI_STORE_PLACES,
                                   &t);
    if (!count) return FSDP_ERR_IO;
    int ports = where.kind == FSDPI_STORE_TCP ? FSDPI_STORE_PORTS : 1;
    for (int i = 0; i < ports && where.port + i <= 65535 && fd < 0; i++) {
        fd = fsdpi_store_claim(&where, list, count, where.port + i, 0, &place);
        if (fd < 0 && fsdpi_store_not_here(errno))
            fd = fsdpi_store_claim(&where, list, count, where.port + i, 1, &place);
        if (fd < 0 && errno != EADDRINUSE) break;
    }
    if (fd >= 0) return fsdpi_store_start(d, &where, -1, fd, &place, out, &t);
    fsdpi_text_add(&t, "[E716] the launcher cannot serve a store at '%s' (FSDP_STORE): %s",
                   d->boot.store ? d->boot.store : "host:", strerror(errno));
    return FSDP_ERR_IO;
}

/* -------------------------------------------------------------------------------------------- */
// A rank's connection. Before the thread runs, open uses the socket; afterwards only the thread
// does. `lock` guards the fields out, requests and `verdict`.

typedef struct fsdpi_store_request {
    struct fsdpi_store_request *next;
    uint32_t id, done; // the caller sleeps on done
    fsdp_status status;
    void *value; // in the caller's memory
    size_t cap, bytes;
} fsdpi_store_request;

struct fsdpi_store {
    fsdpi_store_desc desc;
    fsdpi_store_where where;
    fsdpi_store_server *server; // NULL: another process serves
    int fd, wake, server_rank, running;
    int is_remote;        // the server is on another host
    int is_served, ports; // is_served: by a launcher; ports: number of ports that are tried
    pthread_t thread;
    fsdpi_seal seal_in, seal_out; // the connection's
    fsdpi_queue in, out;
    uint32_t lock, next_id, changed; // changed: counts events; callers sleep on it
    uint32_t joined, gone, leaving, judged;
    fsdpi_store_request *requests;
    fsdpi_failure verdict;   // valid if judged
    const char *why;         // reason of a broken connection, whose server may live; or NULL
    uint8_t *left;           // [size]
    fsdpi_store_place local; // local address of the connection
    char address[64];
};

static int64_t fsdpi_store_now(const fsdpi_store *s) {
    return s->desc.boot.clock.now_ns(s->desc.boot.clock.user);
}

// Waits for one frame. Returns 1 if it has arrived; 0: not in time; -1: the connection has ended,
// or the other side is no store.
static int fsdpi_store_await(fsdpi_store *s, int64_t until, fsdpi_frame *f) {
    const fsdp_allocator *a = &s->desc.boot.allocator;
    for (;;) {
        int whole = fsdpi_frame_get(&s->in, f);
        int64_t left = until - fsdpi_store_now(s);
        if (whole || left <= 0) return whole;
        if (!fsdpi_store_flush(a, s->fd, &s->out)) return -1; // bytes that could not be sent before
        struct pollfd p = {s->fd, POLLIN, 0};
        if (fsdpi_queue_size(&s->out)) p.events |= POLLOUT;
        if (poll(&p, 1, fsdpi_store_poll_ms(left, 1000000000)) <= 0) continue;
        if (!(p.revents & ~POLLOUT)) continue;
        if (!fsdpi_queue_reserve(a, &s->in, 4096)) return -1;
        ssize_t got = recv(s->fd, s->in.block + s->in.end, s->in.cap - s->in.end, 0);
        if (got == 0 || (got < 0 && errno != EAGAIN && errno != EINTR)) return -1;
        if (got > 0) s->in.end += (size_t)got;
    }
}

static void fsdpi_store_hang_up(fsdpi_store *s) {
    if (s->fd >= 0) (void)close(s->fd);
    s->fd = -1;
    s->seal_in.on = s->seal_out.on = 0;
    fsdpi_queue_free(&s->desc.boot.allocator, &s->in);
    fsdpi_queue_free(&s->desc.boot.allocator, &s->out);
}

// Connects. Returns 0, or the errno of the failure.
static int fsdpi_store_connect(fsdpi_store *s, const fsdpi_store_place *p, int64_t until) {
    int why = 0;
    socklen_t size = sizeof why;
    s->fd = fsdpi_store_socket(p);
    if (s->fd < 0) return errno;
    fsdpi_store_prompt(s->fd);
    if (!connect(s->fd, &p->at.any, p->size)) return 0;
    if (errno != EINPROGRESS) return errno;
    for (int64_t left; (left = until - fsdpi_store_now(s)) > 0;) {
        struct pollfd w = {s->fd, POLLOUT, 0};
        if (poll(&w, 1, fsdpi_store_poll_ms(left, 1000000000)) <= 0) continue;
        return getsockopt(s->fd, SOL_SOCKET, SO_ERROR, &why, &size) ? errno : why;
    }
    return ETIMEDOUT;
}

static int fsdpi_store_say(fsdpi_store *s, int op, const char *value, size_t bytes) {
    fsdpi_frame f = {(uint16_t)op, 0, 0, 0, bytes, NULL, value};
    return fsdpi_frame_put(&s->desc.boot.allocator, &s->out, &f, &s->seal_out) &&
           fsdpi_store_flush(&s->desc.boot.allocator, s->fd, &s->out);
}

/* Proves to a server that this rank knows the token, without the rank's number. The tag of the
   frame is the proof. */
static int fsdpi_store_say_prove(fsdpi_store *s, const char *nonce) {
    char mine[FSDPI_STORE_NONCE];
    uint8_t token[32];
    if (!fsdpi_random(mine, sizeof mine)) return 0;
    (void)fsdpi_store_token(s->desc.boot.job, token);
    fsdpi_seal_make(&s->seal_out, token, 0, nonce, mine);
    fsdpi_seal_make(&s->seal_in, token, 1, nonce, mine);
    return fsdpi_store_say(s, FSDPI_STORE_PROVE, mine, sizeof mine);
}

static int fsdpi_store_say_hello(fsdpi_store *s, int64_t deadline) {
    char value[FSDPI_STORE_HELLO_BYTES], *at = value;
    at = fsdpi_le_put(at, (uint32_t)s->desc.boot.rank, 4);
    at = fsdpi_le_put(at, (uint32_t)s->desc.boot.size, 4);
    at = fsdpi_le_put(at, (uint64_t)s->desc.boot.timeout_ns, 8);
    (void)fsdpi_le_put(at, (uint64_t)(deadline - fsdpi_store_now(s)), 8);
    return fsdpi_store_say(s, FSDPI_STORE_HELLO, value, sizeof value);
}

// One attempt at one address.
typedef struct fsdpi_store_try {
    int64_t deadline, patience; // `patience`: timeout of a silent server
    int decided, later, why;    // later: try this address again; why: errno, or 0
    fsdp_status status;
    fsdpi_text said; // the finding at each address
} fsdpi_store_try;

// Handles the server's answer to HELLO.
static void fsdpi_store_answered(fsdpi_store *s, const fsdpi_frame *f, const char *name,
                                 fsdpi_store_try *t) {
    fsdpi_failure v;
    if (f->op == FSDPI_STORE_REPLY && f->value_size == 4) {
        s->server_rank = fsdpi_le_i32(f->value);
        t->decided = 1;
        t->status = FSDP_OK;
    } else if (f->op == FSDPI_STORE_VERDICT && fsdpi_failure_get(f, &v)) {
        t->decided = 1;
        t->status = (fsdp_status)v.status;
        t->said.used = 0;
        fsdpi_say_failure(&t->said, &v);
    } else if (f->op == FSDPI_STORE_REFUSED) {
        char text[400];
        (void)fsdpi_frame_text(text, sizeof text, f->value, f->value_size);
        t->decided = f->flags != FSDP_OK && f->flags <= FSDP_ERR_INTERNAL;
        t->later = f->flags == FSDPI_STORE_LATER;
        t->status = (fsdp_status)f->flags;
        if (t->decided) t->said.used = 0;
        if (t->decided) fsdpi_text_add(&t->said, "%s", text);
        else fsdpi_text_add(&t->said, "; %s %s", name, text);
    } else {
        fsdpi_text_add(&t->said, "; %s is this job's store, and has given no answer", name);
    }
}

static int64_t fsdpi_store_soon(const fsdpi_store *s, const fsdpi_store_try *t) {
    int64_t soon = fsdpi_store_after(fsdpi_store_now(s), t->patience);
    return soon < t->deadline ? soon : t->deadline;
}

/* Runs the proof of the token by both sides. Returns 1 if this is the job's store. Before its proof
   the other side may be any program: none of its texts are shown. */
static int fsdpi_store_know(fsdpi_store *s, const char *name, fsdpi_store_try *t) {
    fsdpi_frame f;
    int whole = fsdpi_store_await(s, fsdpi_store_soon(s, t), &f);
    if (whole <= 0 || f.op != FSDPI_STORE_CHALLENGE || f.value_size != FSDPI_STORE_NONCE) {
        fsdpi_text_add(&t->said, "; %s is not served by fsdp, or does not answer", name);
        return 0;
    }
    unsigned version = f.id ? (unsigned)f.id : 1;
    if (version != FSDPI_STORE_VERSION) {
        fsdpi_text_add(&t->said, "; %s ", name);
        fsdpi_text_add(&t->said, FSDPI_STORE_OTHER_VERSION, version, (unsigned)FSDPI_STORE_VERSION);
        return 0;
    }
    whole = fsdpi_store_say_prove(s, f.value);
    fsdpi_frame_drop(&s->desc.boot.allocator, &s->in);
    if (whole) whole = fsdpi_store_await(s, fsdpi_store_soon(s, t), &f);
    if (whole == 0)
        fsdpi_text_add(&t->said,
                       "; %s sends a challenge, but does not answer what is said to it: it is "
                       "no store, or is stopped",
                       name);
    else if (whole < 0) fsdpi_text_add(&t->said, "; %s has closed the connection", name);
    else if (f.op == FSDPI_STORE_REFUSED)
        fsdpi_text_add(&t->said, "; %s %s", name, FSDPI_STORE_OTHER_JOB);
    else if (f.op != FSDPI_STORE_PROVEN || !fsdpi_seal_open(&s->seal_in, &f))
        fsdpi_text_add(&t->said, "; %s speaks as a store, but does not know this job's token",
                       name);
    else {
        fsdpi_frame_drop(&s->desc.boot.allocator, &s->in);
        return 1;
    }
    return 0;
}

/* Tries to join at an address. After HELLO it does not give up before the deadline: the server,
   which has proven itself by then, may count this rank, and would take it for lost. */
static void fsdpi_store_knock(fsdpi_store *s, const fsdpi_store_place *p, fsdpi_store_try *t) {
    char name[128];
    fsdpi_frame f;
    fsdpi_store_place_text(p, name, sizeof name);
    t->why = fsdpi_store_connect(s, p, fsdpi_store_soon(s, t));
    if (t->why) {
        // Most ports refuse, or are silent as the one before: the text does not name them.
        int is_news = t->why != ECONNREFUSED && t->patience == FSDPI_STORE_KNOCK_NS;
        if (is_news || !t->said.used) fsdpi_text_add(&t->said, "; %s: %s", name, strerror(t->why));
    } else if (p->at.any.sa_family == AF_UNIX && !fsdpi_same_user(s->fd)) {
        fsdpi_text_add(&t->said, "; %s is served by another user", name);
    } else if (fsdpi_store_know(s, name, t)) {
        int whole = fsdpi_store_say_hello(s, t->deadline) ? fsdpi_store_await(s, t->deadline, &f)
                                                          : -1;
        if (whole > 0 && fsdpi_seal_open(&s->seal_in, &f)) {
            fsdpi_store_answered(s, &f, name, t);
            fsdpi_frame_drop(&s->desc.boot.allocator, &s->in);
        } else if (whole == 0) {
            fsdpi_text_add(&t->said, "; %s is this job's store, and is stopped or cut off", name);
        } else {
            fsdpi_text_add(&t->said, "; %s is this job's store, and has closed the connection",
                           name);
        }
    }
    if (!t->decided || t->status) fsdpi_store_hang_up(s);
}

// Makes this rank serve; it is its own first client.
static void fsdpi_store_begin(fsdpi_store *s, int fd, const fsdpi_store_place *p,
                              fsdpi_store_try *t) {
    t->said.used = 0;
    t->status = fsdpi_store_start(&s->desc, &s->where, s->desc.boot.rank, fd, p, &s->server,
                                  &t->said);
    t->decided = t->status != FSDP_OK;
    if (!t->decided) fsdpi_store_knock(s, &s->server->place, t);
}

// Reads the address that rank 0 or a launcher has written to the file.
static int fsdpi_store_read_file(const char *path, fsdpi_store_where *out, fsdpi_text *why) {
    char line[320];
    struct stat info;
    // With O_NONBLOCK it does not wait if the path is a pipe.
    int fd = fsdpi_fd(open(path, O_RDONLY | O_NONBLOCK | FSDPI_STORE_CLOEXEC));
    if (fd < 0) {
        fsdpi_text_add(why, "; file '%s': %s", path, strerror(errno));
        return 0;
    }
    int is_file = !fstat(fd, &info) && S_ISREG(info.st_mode);
    ssize_t got = is_file ? read(fd, line, sizeof line - 1) : 0;
    (void)close(fd);
    line[got > 0 ? got : 0] = 0;
    line[strcspn(line, "\n")] = 0;
    if (fsdpi_store_parse(line, out) && out->kind == FSDPI_STORE_TCP) return 1;
    fsdpi_text_add(why, "; file '%s' does not contain a store's address", path);
    return 0;
}

// Returns 1 if torchrun has started this program, and uses the port itself.
static int fsdpi_store_is_torchrun(int port) {
    const char *agent = fsdpi_env("TORCHELASTIC_USE_AGENT_STORE"), *own = fsdpi_env("MASTER_PORT");
    return agent && own && !strcmp(agent, "True") && strtol(own, NULL, 10) == port;
}

/* Reads FSDP_STORE_SERVED, in which a launcher that serves a job puts the address, a blank, and the
   job's name. "-PORT" after the address: at a port up to that one. Then no rank serves; if the
   launcher does not answer, ranks wait for it. */
static void fsdpi_store_learn_served(fsdpi_store *s) {
    const char *at = fsdpi_env("FSDP_STORE_SERVED");
    const char *store = s->desc.boot.store ? s->desc.boot.store : "host:";
    s->ports = s->where.kind == FSDPI_STORE_TCP ? FSDPI_STORE_PORTS : 1;
    if (!at || strncmp(at, store, strlen(store)) != 0) return;
    at += strlen(store);
    int is_exact = *at != '-';
    if (!is_exact) at += 1 + strspn(at + 1, "0123456789");
    s->is_served = *at == ' ' && !strcmp(at + 1, s->desc.boot.job);
    if (s->is_served && is_exact) s->ports = 1;
}

/* Warns that the store's address is none of this host, on which this rank serves all the same: the
   network may forward that address to it. */
static void fsdpi_store_warn_elsewhere(const fsdpi_store *s) {
    char own[400], line[1000];
    fsdpi_text t = {own, sizeof own, 0};
    if (s->desc.boot.size == 1) return;
    fsdpi_store_say_own(&t);
    (void)snprintf(line, sizeof line,
                   "[E567] the store's address %s (FSDP_STORE, or MASTER_ADDR) is none of this "
                   "host, on which rank 0 runs and which has %s: rank 0 serves on all of them, and "
                   "other ranks find it only if the network forwards that address to this host "
                   "(NAT, a container's port). Else give all ranks an address of this host, or "
                   "start rank 0 on the host that has it",
                   s->where.host, own);
    fsdpi_boot_log(&s->desc.boot, FSDP_LOG_WARN, line);
}

// Tries every address once. Rank 0 serves at the first one that is free, unless a launcher serves.
static void fsdpi_store_round(fsdpi_store *s, fsdpi_store_try *t) {
    fsdpi_store_place list[FSDPI_STORE_PLACES], p;
    fsdpi_store_where where = s->where;
    int serves = s->desc.boot.rank == 0 && !s->is_served, is_file = where.kind == FSDPI_STORE_FILE,
        count = 1;
    uint8_t slow[FSDPI_STORE_PLACES] = {0};
    if (s->server) {
        fsdpi_store_knock(s, &s->server->place, t);
        return;
    }
    if (where.kind == FSDPI_STORE_HOST) fsdpi_store_unix(s->desc.boot.job, &list[0]);
    else if (is_file && !fsdpi_store_read_file(s->where.path, &where, &t->said)) count = 0;
    else
        count = fsdpi_store_lookup(&s->desc.boot.clock, where.host, t->deadline, list,
                                   FSDPI_STORE_PLACES, &t->said);
    for (int k = 0; k < s->ports && where.port + k <= 65535; k++) {
        int fd = -1, port = where.port + k, not_here = 0;
        if (!is_file && fsdpi_store_is_torchrun(port)) continue;
        if (serves && !is_file && count) {
            fd = fsdpi_store_claim(&where, list, count, port, 0, &p);
            not_here = fd < 0 && fsdpi_store_not_here(errno);
            if (fd < 0 && !not_here && errno != EADDRINUSE)
                fsdpi_text_add(&t->said, "; cannot listen on port %d: %s", port, strerror(errno));
        }
        for (int i = 0; i < count && fd < 0 && !t->decided && !t->later; i++) {
            fsdpi_store_place at = list[i];
            fsdpi_store_set_port(&at, port);
            t->patience = slow[i] ? FSDPI_STORE_KNOCK_NS / 10 : FSDPI_STORE_KNOCK_NS;
            fsdpi_store_knock(s, &at, t);
            slow[i] = slow[i] || t->why == ETIMEDOUT; // then all ports of this host are slow
        }
        if (not_here && !t->decided && !t->later) {
            fd = fsdpi_store_claim(&where, list, count, port, 1, &p);
            if (fd >= 0) fsdpi_store_warn_elsewhere(s);
        }
        if (fd >= 0) fsdpi_store_begin(s, fd, &p, t);
        if (fd >= 0 || t->decided || t->later) return;
    }
    if (!serves || !is_file) return;
    int fd;
    t->said.used = 0;
    t->status = fsdpi_store_claim_free(&p, &fd, &t->said);
    t->decided = t->status != FSDP_OK;
    if (!t->decided) fsdpi_store_begin(s, fd, &p, t);
}

// Tries all addresses in rounds, until one decides or the deadline has passed.
static fsdp_status fsdpi_store_seek(fsdpi_store *s, int64_t deadline, fsdpi_text *error) {
    char rounds[2][640], *said = rounds[0]; // the deadline may cut the last round short
    const fsdp_boot *boot = &s->desc.boot;
    int64_t pause = 10000000, most = boot->size > 64 ? 1000000000 : 200000000;
    for (uint64_t turn = 0;; turn++) {
        char *now_said = rounds[turn % 2];
        fsdpi_store_try t = {deadline, FSDPI_STORE_KNOCK_NS,           0, 0, 0,
                             FSDP_OK,  {now_said, sizeof rounds[0], 0}};
        now_said[0] = 0;
        fsdpi_store_round(s, &t);
        if (t.decided) {
            if (t.status) fsdpi_text_add(error, "%s", now_said);
            return t.status;
        }
        int64_t left = deadline - fsdpi_store_now(s);
        if (left > 0 || turn == 0) said = now_said;
        if (left <= 0) break;
        // Partly random: ranks that have started together should not all try again together.
        int64_t wait = pause - pause / 4 +
                       (int64_t)(fsdpi_hash((uint64_t)boot->rank, turn) % (uint64_t)(pause / 2));
        fsdpi_sleep_ns(wait < left ? wait : left);
        pause = 2 * pause < most ? 2 * pause : most;
    }
    if (s->is_served)
        fsdpi_text_add(
            error,
            "[E791] the launcher serves the store of job '%s' at %s, and has not let this "
            "rank in within %.1f s: %s. Look whether it runs (fsdprun of node 0), and whether "
            "this host reaches it",
            boot->job, boot->store ? boot->store : "host:", (double)boot->timeout_ns * 1e-9,
            said[0] == ';' ? said + 2 : said);
    else
        fsdpi_text_add(
            error,
            "[E717] no store of job '%s' was found at %s within %.1f s: %s. Rank 0 has to run "
            "there (FSDP_STORE, or MASTER_ADDR and MASTER_PORT, give the address). Set "
            "FSDP_JOB_ID and FSDP_TOKEN to the same values on all ranks",
            boot->job, boot->store ? boot->store : "host:", (double)boot->timeout_ns * 1e-9,
            said[0] == ';' ? said + 2 : said);
    return FSDP_ERR_TIMEOUT;
}

static void fsdpi_store_change(fsdpi_store *s) {
    __atomic_add_fetch(&s->changed, 1u, __ATOMIC_ACQ_REL);
    fsdpi_futex_wake_all(&s->changed, 0);
}

// Returns the status with which calls fail from now on; FSDP_OK: they do not.
static fsdp_status fsdpi_store_ended(fsdpi_store *s) {
    if (FSDPI_LOAD(&s->judged)) return (fsdp_status)s->verdict.status;
    return FSDPI_LOAD(&s->gone) ? FSDP_ERR_PEER_LOST : FSDP_OK;
}

static void fsdpi_store_finish(fsdpi_store_request *r, fsdp_status status) {
    r->status = status;
    FSDPI_STORE(&r->done, 1u); // the caller may return before the next line: that does no harm
    fsdpi_futex_wake_all(&r->done, 0);
}

// Ends all waits for answers, which will not arrive. Requires the lock.
static void fsdpi_store_finish_all(fsdpi_store *s) {
    for (fsdpi_store_request *r = s->requests, *next; r; r = next) {
        next = r->next;
        fsdpi_store_finish(r, fsdpi_store_ended(s));
    }
    s->requests = NULL;
}

// Sets the world's failure on this rank, unless there is one.
static void fsdpi_store_judge(fsdpi_store *s, const fsdpi_failure *v) {
    fsdpi_lock(&s->lock);
    int first = !s->judged;
    if (first) {
        s->verdict = *v;
        FSDPI_STORE(&s->judged, 1u);
        fsdpi_store_finish_all(s);
    }
    fsdpi_unlock(&s->lock);
    if (first) fsdpi_store_change(s);
}

// Returns the server's name, for texts.
static const char *fsdpi_store_who(const fsdpi_store *s) {
    return s->server_rank < 0 ? "the launcher" : "rank 0";
}

// Sends the server the reason why this rank leaves, if that direction works. Without it the rank
// seems dead.
static void fsdpi_store_confess(fsdpi_store *s, const fsdpi_failure *v) {
    const fsdp_allocator *a = &s->desc.boot.allocator;
    char value[FSDPI_VERDICT_BYTES];
    fsdpi_frame f = {FSDPI_STORE_ABORT, 0, 0, 0, fsdpi_failure_put(value, v), NULL, value};
    fsdpi_lock(&s->lock);
    if (fsdpi_frame_put(a, &s->out, &f, &s->seal_out)) (void)fsdpi_store_flush(a, s->fd, &s->out);
    fsdpi_unlock(&s->lock);
}

/* Handles the end of the connection: the server has announced it (FSDP_OK), the server has died
   (PEER_LOST), a frame was changed (IO), or this rank has no memory. */
static void fsdpi_store_lose(fsdpi_store *s, fsdp_status status) {
    if (status && !FSDPI_LOAD(&s->leaving)) {
        fsdpi_failure v;
        memset(&v, 0, sizeof v);
        v.status = (int32_t)status;
        v.rank = status == FSDP_ERR_PEER_LOST ? -1 : s->desc.boot.rank; // all ranks see this loss
        v.lost = status == FSDP_ERR_PEER_LOST ? s->server_rank
                 : status == FSDP_ERR_IO      ? -1
                                              : s->desc.boot.rank;
        if (status == FSDP_ERR_PEER_LOST && s->why)
            (void)snprintf(v.reason, sizeof v.reason,
                           "[E793] rank %d %s. It is not known whether %s, which serves the store, "
                           "still runs: look at its log, and at the network between them",
                           s->desc.boot.rank, s->why, fsdpi_store_who(s));
        else if (status == FSDP_ERR_PEER_LOST)
            (void)snprintf(v.reason, sizeof v.reason, "[E718] %s, which serves the store, has died",
                           fsdpi_store_who(s));
        else if (status == FSDP_ERR_IO)
            (void)snprintf(v.reason, sizeof v.reason,
                           "[E790] rank %d: messages of the store were changed on their way from "
                           "%s, or others were put between them: look at the network between them",
                           s->desc.boot.rank, fsdpi_store_who(s));
        else if (status == FSDP_ERR_OUT_OF_MEMORY)
            (void)snprintf(v.reason, sizeof v.reason,
                           "[E719] rank %d has no memory for messages of the store",
                           s->desc.boot.rank);
        else
            (void)snprintf(v.reason, sizeof v.reason,
                           "[E730] the program of rank %d has closed descriptors of the library: "
                           "close only those that it has opened itself",
                           s->desc.boot.rank);
        fsdpi_store_judge(s, &v);
        if (status == FSDP_ERR_IO) fsdpi_store_confess(s, &v);
    }
    fsdpi_lock(&s->lock);
    FSDPI_STORE(&s->gone, 1u);
    fsdpi_store_finish_all(s);
    fsdpi_store_hang_up(s);
    fsdpi_unlock(&s->lock);
    fsdpi_store_change(s);
}

static void fsdpi_store_reply(fsdpi_store *s, const fsdpi_frame *f) {
    fsdpi_lock(&s->lock);
    fsdpi_store_request **link = &s->requests, *r;
    while (*link && (*link)->id != f->id) link = &(*link)->next;
    r = *link; // NULL: the caller has abandoned it
    if (r) {
        fsdp_status status = f->flags <= FSDP_ERR_INTERNAL ? (fsdp_status)f->flags
                                                           : FSDP_ERR_INTERNAL;
        *link = r->next;
        r->bytes = f->value_size;
        if (f->value_size > r->cap) status = FSDP_ERR_INVALID_ARG;
        else if (f->value_size) memcpy(r->value, f->value, f->value_size);
        fsdpi_store_finish(r, status);
    }
    fsdpi_unlock(&s->lock);
}

// Handles one frame of the server. Returns 0 if the connection has ended.
static int fsdpi_store_take(fsdpi_store *s, const fsdpi_frame *f) {
    fsdpi_failure v;
    int32_t rank;
    switch (f->op) {
    case FSDPI_STORE_REPLY: fsdpi_store_reply(s, f); return 1;
    case FSDPI_STORE_ALL_JOINED:
        if (f->value_size)
            (void)fsdpi_frame_text(s->address, sizeof s->address, f->value, f->value_size);
        FSDPI_STORE(&s->joined, 1u);
        break;
    case FSDPI_STORE_RANK_LEFT:
        rank = f->value_size == 4 ? fsdpi_le_i32(f->value) : -1;
        if (rank < 0 || rank >= s->desc.boot.size) return 1;
        __atomic_store_n(&s->left[rank], (uint8_t)1, __ATOMIC_RELEASE);
        break;
    case FSDPI_STORE_VERDICT:
        if (fsdpi_failure_get(f, &v)) fsdpi_store_judge(s, &v);
        return 1;
    case FSDPI_STORE_CLOSING: fsdpi_store_lose(s, FSDP_OK); return 0;
    default: return 1;
    }
    fsdpi_store_change(s);
    return 1;
}

// Handles all frames that have arrived. Returns 0 if the connection has ended.
static int fsdpi_store_take_all(fsdpi_store *s) {
    fsdpi_frame f;
    int whole;
    while ((whole = fsdpi_frame_get(&s->in, &f)) > 0) {
        if (!fsdpi_seal_open(&s->seal_in, &f)) whole = -1;
        if (whole < 0) break;
        if (!fsdpi_store_take(s, &f)) return 0;
        fsdpi_frame_drop(&s->desc.boot.allocator, &s->in);
    }
    if (whole < 0) fsdpi_store_lose(s, FSDP_ERR_IO);
    return whole == 0;
}

static void fsdpi_store_receive(fsdpi_store *s) {
    if (!fsdpi_queue_reserve(&s->desc.boot.allocator, &s->in, FSDPI_STORE_READ)) {
        fsdpi_store_lose(s, FSDP_ERR_OUT_OF_MEMORY);
        return;
    }
    ssize_t got = recv(s->fd, s->in.block + s->in.end, s->in.cap - s->in.end, 0);
    if (got > 0) {
        s->in.end += (size_t)got;
        (void)fsdpi_store_take_all(s);
    } else if (got == 0 || (errno != EAGAIN && errno != EINTR)) {
        if (got < 0) s->why = fsdpi_store_why_broken(s->is_remote, errno);
        fsdpi_store_lose(s,
                         got < 0 && errno == EBADF ? FSDP_ERR_INVALID_STATE : FSDP_ERR_PEER_LOST);
    }
}

// Queues a frame, and wakes the thread. The frame's answer goes to *r; r NULL: no answer.
static fsdp_status fsdpi_store_post(fsdpi_store *s, fsdpi_frame *f, fsdpi_store_request *r) {
    fsdpi_lock(&s->lock);
    fsdp_status status = fsdpi_store_ended(s);
    f->id = ++s->next_id;
    if (!status && !fsdpi_frame_put(&s->desc.boot.allocator, &s->out, f, &s->seal_out))
        status = FSDP_ERR_OUT_OF_MEMORY;
    if (!status && r) {
        r->id = f->id;
        r->next = s->requests;
        s->requests = r;
    }
    fsdpi_unlock(&s->lock);
    if (!status) fsdpi_store_wake(s->wake);
    return status;
}

static void fsdpi_store_beat_once(fsdpi_store *s) {
    fsdpi_store_beat beat;
    char value[12 + sizeof beat.text], *at = value;
    memset(&beat, 0, sizeof beat);
    if (s->desc.beat) s->desc.beat(s->desc.user, &beat);
    beat.text[sizeof beat.text - 1] = 0;
    at = fsdpi_le_put(at, (uint32_t)beat.busy, 4);
    at = fsdpi_le_put(at, (uint64_t)beat.since_ns, 8);
    memcpy(at, beat.text, strlen(beat.text));
    fsdpi_frame f = {FSDPI_STORE_BEAT, 0, 0, 0, 12 + strlen(beat.text), NULL, value};
    (void)fsdpi_store_post(s, &f, NULL);
}

// Returns the time between two beats: the server gets at most 1,000 beats per second.
static int64_t fsdpi_store_beat_ns(int size) {
    return size > 50 ? (int64_t)size * 1000000 : FSDPI_STORE_BEAT_NS;
}

static void *fsdpi_store_main(void *arg) {
    fsdpi_store *s = (fsdpi_store *)arg;
    int64_t interval = fsdpi_store_beat_ns(s->desc.boot.size);
    int64_t beat_ns = 0, leave_ns = INT64_MAX;
    fsdpi_pin_library();
    uint32_t told = 0;
    int events = POLLIN, wake = s->wake;
    (void)fsdpi_store_take_all(s); // frames that came with the answer to HELLO
    for (;;) {
        int64_t now = fsdpi_store_now(s);
        uint32_t changed = FSDPI_LOAD(&s->changed);
        if (changed != told && s->desc.event) s->desc.event(s->desc.user);
        told = changed;
        int leaving = FSDPI_LOAD(&s->leaving) != 0;
        if (leaving && leave_ns == INT64_MAX) leave_ns = now + FSDPI_STORE_GRACE;
        if (leaving && (s->gone || now >= leave_ns)) return NULL;
        if (!leaving && !s->gone && now >= beat_ns) {
            if (!(events & POLLOUT)) fsdpi_store_beat_once(s); // bytes wait if the server is slow
            beat_ns = now + interval;
        }
        fsdpi_lock(&s->lock);
        // If it cannot send, reading finds out that the connection has ended.
        if (s->fd >= 0 && !fsdpi_store_flush(&s->desc.boot.allocator, s->fd, &s->out)) {
            fsdpi_queue_free(&s->desc.boot.allocator, &s->out);
            (void)shutdown(s->fd, SHUT_RDWR);
        }
        events = fsdpi_queue_size(&s->out) ? POLLIN | POLLOUT : POLLIN;
        fsdpi_unlock(&s->lock);
        struct pollfd p[2] = {{s->fd, (short)events, 0}, {wake, POLLIN, 0}};
        int64_t next = leaving ? leave_ns : s->gone ? INT64_MAX : beat_ns;
        if (poll(p, 2, fsdpi_store_poll_ms(next - now, 1000000000)) <= 0) continue;
        uint64_t count;
        ssize_t drained = p[1].revents ? read(wake, &count, sizeof count) : 0;
        (void)drained;
        if (p[0].revents & ~POLLOUT) fsdpi_store_receive(s);
        if (!(p[1].revents & POLLNVAL)) continue;
        wake = -1;
        fsdpi_store_lose(s, FSDP_ERR_INVALID_STATE);
    }
}

// Sends one request, and waits for its answer.
static fsdp_status fsdpi_store_call(fsdpi_store *s, int op, const char *key, const void *in,
                                    size_t bytes, void *out, size_t cap, size_t *out_bytes,
                                    int64_t timeout_ns) {
    fsdpi_store_request r;
    size_t key_size = strlen(key);
    fsdpi_frame f = {(uint16_t)op, 0, 0, key_size, bytes, key, (const char *)in};
    int64_t until = fsdpi_store_after(fsdpi_store_now(s), timeout_ns);
    memset(&r, 0, sizeof r);
    r.value = out;
    r.cap = cap;
    if (out_bytes) *out_bytes = 0;
    if (key_size > FSDPI_STORE_KEY_MAX || bytes > FSDPI_STORE_VALUE_MAX)
        return FSDP_ERR_INVALID_ARG;
    fsdp_status status = fsdpi_store_post(s, &f, &r);
    if (status) return status;
    for (int64_t left; !FSDPI_LOAD(&r.done) && (left = until - fsdpi_store_now(s)) > 0;)
        fsdpi_futex_wait(&r.done, 0, left < 50000000 ? left : 50000000, 0);
    fsdpi_lock(&s->lock);
    if (!r.done) { // abandoned: a later answer is dropped
        fsdpi_store_request **link = &s->requests;
        while (*link != &r) link = &(*link)->next;
        *link = r.next;
        r.status = FSDP_ERR_TIMEOUT;
    }
    fsdpi_unlock(&s->lock);
    if (out_bytes) *out_bytes = r.bytes;
    return r.status;
}

/* The functions for callers. Several threads may call them at once. After a failure of the world
   they fail with its status; after the server has ended in order, with FSDP_ERR_PEER_LOST; without
   an answer in time, with FSDP_ERR_TIMEOUT. */

static FSDPI_UNUSED fsdp_status fsdpi_store_set_within(fsdpi_store *s, const char *key,
                                                       const void *value, size_t bytes,
                                                       int64_t timeout_ns) {
    return fsdpi_store_call(s, FSDPI_STORE_SET, key, value, bytes, NULL, 0, NULL, timeout_ns);
}

static FSDPI_UNUSED fsdp_status fsdpi_store_set(fsdpi_store *s, const char *key, const void *value,
                                                size_t bytes) {
    return fsdpi_store_set_within(s, key, value, bytes, s->desc.boot.timeout_ns);
}

// Waits until the key exists. Returns INVALID_ARG with *bytes > cap if the value is larger than
// cap.
static FSDPI_UNUSED fsdp_status fsdpi_store_get(fsdpi_store *s, const char *key, void *value,
                                                size_t cap, size_t *bytes, int64_t timeout_ns) {
    char timeout[8];
    if (timeout_ns < 0) timeout_ns = 0;
    (void)fsdpi_le_put(timeout, (uint64_t)timeout_ns, 8);
    return fsdpi_store_call(s, FSDPI_STORE_GET, key, timeout, sizeof timeout, value, cap, bytes,
                            timeout_ns);
}

static FSDPI_UNUSED fsdp_status fsdpi_store_delete(fsdpi_store *s, const char *key) {
    return fsdpi_store_call(s, FSDPI_STORE_DELETE, key, NULL, 0, NULL, 0, NULL,
                            s->desc.boot.timeout_ns);
}

// Asks for the state of a rank at its last frame.
static FSDPI_UNUSED fsdp_status fsdpi_store_ask(fsdpi_store *s, int rank, fsdpi_peer *out,
                                                int64_t timeout_ns) {
    char which[4], value[24 + sizeof out->text];
    size_t bytes;
    memset(out, 0, sizeof *out);
    (void)fsdpi_le_put(which, (uint32_t)rank, 4);
    fsdp_status status = fsdpi_store_call(s, FSDPI_STORE_ASK, "", which, sizeof which, value,
                                          sizeof value, &bytes, timeout_ns);
    if (status) return status;
    if (bytes < 24) return FSDP_ERR_INTERNAL;
    out->state = fsdpi_le_i32(value);
    out->busy = fsdpi_le_i32(value + 4);
    out->silent_ns = fsdpi_le_i64(value + 8);
    out->since_ns = fsdpi_le_i64(value + 16);
    (void)fsdpi_frame_text(out->text, sizeof out->text, value + 24, bytes - 24);
    return FSDP_OK;
}

// Returns 1 if the world has failed; *out, unless out is NULL, gets the failure.
static FSDPI_UNUSED int fsdpi_store_verdict(fsdpi_store *s, fsdpi_failure *out) {
    if (!FSDPI_LOAD(&s->judged)) return 0;
    if (out) *out = s->verdict; // written once
    return 1;
}

/* Fails the world. On return there is a failure: the job's first, or, if the server does not answer
   within FSDPI_STORE_ABORT_NS, this one. Any thread may call it. */
static FSDPI_UNUSED void fsdpi_store_abort(fsdpi_store *s, fsdp_status status, const char *subject,
                                           const char *reason) {
    fsdpi_failure v;
    char value[FSDPI_VERDICT_BYTES];
    memset(&v, 0, sizeof v);
    v.status = (int32_t)status;
    v.rank = s->desc.boot.rank;
    v.lost = -1;
    (void)snprintf(v.subject, sizeof v.subject, "%s", subject);
    (void)snprintf(v.reason, sizeof v.reason, "%s", reason);
    fsdpi_frame f = {FSDPI_STORE_ABORT, 0, 0, 0, fsdpi_failure_put(value, &v), NULL, value};
    int64_t left, until = fsdpi_store_now(s) + FSDPI_STORE_ABORT_NS;
    int told = !fsdpi_store_post(s, &f, NULL);
    while (told && (left = until - fsdpi_store_now(s)) > 0) {
        uint32_t changed = FSDPI_LOAD(&s->changed);
        if (fsdpi_store_ended(s)) break;
        fsdpi_futex_wait(&s->changed, changed, left, 0);
    }
    fsdpi_store_judge(s, &v);
    fsdpi_store_wake(s->wake);
}

// Returns 1 if a rank has left in order.
static FSDPI_UNUSED int fsdpi_store_has_left(fsdpi_store *s, int rank) {
    return __atomic_load_n(&s->left[rank], __ATOMIC_ACQUIRE);
}

// Returns a numeric address under which peers reach this rank's host.
static FSDPI_UNUSED const char *fsdpi_store_address(const fsdpi_store *s) { return s->address; }

// Sends BYE, so that this rank is not taken for dead, and ends the store if this rank serves.
static FSDPI_UNUSED void fsdpi_store_close(fsdpi_store *s) {
    if (!s) return;
    fsdp_allocator allocator = s->desc.boot.allocator;
    if (s->running) {
        fsdpi_frame f = {FSDPI_STORE_BYE, 0, 0, 0, 0, NULL, NULL};
        fsdpi_lock(&s->lock);
        if (!s->gone) // also after a failure
            (void)fsdpi_frame_put(&allocator, &s->out, &f, &s->seal_out);
        FSDPI_STORE(&s->leaving, 1u);
        fsdpi_unlock(&s->lock);
        fsdpi_store_wake(s->wake);
        (void)pthread_join(s->thread, NULL);
    }
    fsdpi_store_hang_up(s);
    fsdpi_store_stop(s->server);
    if (s->wake >= 0) (void)close(s->wake);
    fsdpi_free(&allocator, s->left);
    fsdpi_free(&allocator, s);
}

// Waits until all ranks have joined.
static fsdp_status fsdpi_store_meet(fsdpi_store *s, int64_t deadline, fsdpi_text *error) {
    for (int64_t left = 1; left > 0;) {
        uint32_t changed = FSDPI_LOAD(&s->changed);
        if (FSDPI_LOAD(&s->joined) || fsdpi_store_ended(s)) break;
        left = fsdpi_store_after(deadline, FSDPI_STORE_GRACE) - fsdpi_store_now(s);
        if (left > 0) fsdpi_futex_wait(&s->changed, changed, left < 50000000 ? left : 50000000, 0);
    }
    if (FSDPI_LOAD(&s->joined)) return FSDP_OK; // a failure since then is for fsdpi_store_verdict
    if (FSDPI_LOAD(&s->judged)) fsdpi_say_failure(error, &s->verdict);
    else if (FSDPI_LOAD(&s->gone))
        fsdpi_text_add(
            error, "[E720] %s, which serves the store, has closed it before all ranks had joined",
            fsdpi_store_who(s));
    else
        fsdpi_text_add(
            error, "[E721] the store does not answer: %s, which serves it, is stopped or cut off",
            fsdpi_store_who(s));
    fsdp_status status = fsdpi_store_ended(s);
    return status ? status : FSDP_ERR_TIMEOUT;
}

// Finds the address that the user gives, otherwise the local address of the connection to the
// store.
static fsdp_status fsdpi_store_find_address(fsdpi_store *s, fsdpi_text *error) {
    fsdpi_store_place chosen;
    int family = s->local.at.any.sa_family;
    fsdp_status status = FSDP_OK;
    chosen.size = 0;
    if (family != AF_UNIX) status = fsdpi_store_interface(family, &chosen, error);
    if (chosen.size) fsdpi_store_host_text(&chosen, s->address, sizeof s->address);
    else if (!s->address[0] || !fsdpi_store_is_loopback(&s->local))
        fsdpi_store_host_text(&s->local, s->address, sizeof s->address);
    if (!status) return FSDP_OK;
    char reason[FSDPI_REASON];
    (void)snprintf(reason, sizeof reason, "rank %d: %s", s->desc.boot.rank, error->buf);
    fsdpi_store_abort(s, status, "", reason); // other ranks have joined already
    return status;
}

// Warns, on one rank, that the token can be guessed. On one host the system distinguishes users.
static void fsdpi_store_warn(const fsdpi_store *s) {
    const fsdp_boot *boot = &s->desc.boot;
    uint8_t token[32];
    if (boot->rank || boot->size == 1 || s->where.kind == FSDPI_STORE_HOST ||
        fsdpi_store_token(boot->job, token))
        return;
    fsdpi_boot_log(boot, FSDP_LOG_WARN,
                   "[E762] this job has no secret: who reaches its store and knows or guesses the "
                   "name of the job can join it, or end it. Set FSDP_TOKEN to a random value, the "
                   "same on all ranks (docs/cluster.md, Trust)");
}

static fsdp_status fsdpi_store_try_open(fsdpi_store *s, fsdpi_text *error) {
    const fsdp_boot *boot = &s->desc.boot;
    int64_t deadline = fsdpi_store_after(fsdpi_store_now(s), boot->timeout_ns);
    s->wake = fsdpi_fd(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
    s->left = (uint8_t *)fsdpi_alloc(&boot->allocator, (size_t)boot->size);
    if (s->wake < 0 || !s->left) {
        if (s->left) fsdpi_text_add(error, "[E722] no file descriptor is left: raise ulimit -n");
        else
            fsdpi_text_add(error, "[E723] the allocator has returned NULL for %d bytes of memory",
                           boot->size);
        return s->left ? FSDP_ERR_IO : FSDP_ERR_OUT_OF_MEMORY;
    }
    if (boot->store && !*boot->store) {
        fsdpi_text_add(error, FSDPI_NO_STORE);
        return FSDP_ERR_INVALID_ARG;
    }
    if (!fsdpi_store_parse(boot->store, &s->where) ||
        (s->where.kind == FSDPI_STORE_TCP && !s->where.port)) {
        fsdpi_text_add(
            error,
            "[E725] the store's address (FSDP_STORE, or MASTER_ADDR and MASTER_PORT) is "
            "'%s', expected tcp://HOST:PORT with a port from 1 to 65535, file:///PATH or "
            "host:",
            boot->store);
        return FSDP_ERR_INVALID_ARG;
    }
    fsdpi_store_learn_served(s);
    fsdp_status status = fsdpi_store_seek(s, deadline, error);
    if (status) return status;
    fsdpi_store_warn(s);
    s->is_remote = fsdpi_store_is_remote(s->fd);
    s->local.size = sizeof s->local.at;
    (void)getsockname(s->fd, &s->local.at.any, &s->local.size);
    fsdpi_store_unmap(&s->local);
    int rc = fsdpi_store_thread(&s->thread, fsdpi_store_main, s, FSDPI_STORE_STACK);
    if (rc) {
        fsdpi_text_add(error, "[E726] the system refused to start the store's thread: %s",
                       strerror(rc));
        return FSDP_ERR_BACKEND;
    }
    s->running = 1;
    status = fsdpi_store_meet(s, deadline, error);
    return status ? status : fsdpi_store_find_address(s, error);
}

/* Meets the other ranks: serves if this rank must, joins, and waits until all have joined, at most
   boot.timeout_ns. After a failure *out is NULL and error has a text, without "rank N". */
static FSDPI_UNUSED fsdp_status fsdpi_store_open(const fsdpi_store_desc *desc, fsdpi_store **out,
                                                 char *error, size_t cap) {
    fsdpi_text t = {error, cap, 0};
    fsdpi_store *s = (fsdpi_store *)fsdpi_alloc(&desc->boot.allocator, sizeof *s);
    *out = NULL;
    if (!s) {
        fsdpi_text_add(&t, "[E727] the allocator has returned NULL for %u bytes of memory",
                       (unsigned)sizeof *s);
        return FSDP_ERR_OUT_OF_MEMORY;
    }
    s->desc = *desc;
    s->fd = s->wake = -1;
    fsdp_status status = fsdpi_store_try_open(s, &t);
    if (status) fsdpi_store_close(s);
    else *out = s;
    return status;
}

#endif // FSDPI_BACKENDS_STORE_H
