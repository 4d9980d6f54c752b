/* fuzz_store.c - a libFuzzer target: the server's core of backends/fsdp_store.h, without sockets

       clang -std=c99 -g -O1 -I. -fsanitize=fuzzer,address,undefined tests/private/fuzz_store.c \
           -o build/fuzz_store -pthread -lm
       build/fuzz_store -max_len=4096 -max_total_time=600

   An input is a list of steps: what (1 byte), at which connection (1), how much (2, little endian),
   and as many bytes. tests/private/test_store.c feeds the same core from a seed, with a model of what it
   has to answer; this one finds what a seed does not think of.

   SPDX-License-Identifier: MIT */
#define FSDP_IMPLEMENTATION
#include "fsdp.h"
// After it:
#include "backends/fsdp_store.h"

enum { SIZE = 3, CONNS = 6, HEADER = 24 };
enum { CONNECT, FEED, HELLO, FRAME, EXPIRE, DISCONNECT, EVICT, DRAIN, STEPS };

typedef struct {
    fsdpi_store_core core;
    fsdpi_conn *conns[CONNS];
    int64_t now;
} state;

static int64_t live; // bytes

static void *count_alloc(size_t size, size_t align, void *user) {
    live += (int64_t)size;
    return fsdpi_libc_alloc(size, align, user);
}

static void count_free(void *ptr, size_t size, void *user) {
    live -= (int64_t)size;
    fsdpi_libc_free(ptr, size, user);
}

static const uint8_t token[32] = {1, 2, 3}, nonce[32] = {4, 5, 6};

static void must(int condition) {
    if (!condition) abort();
}

static void feed(state *s, fsdpi_conn *conn, const void *data, size_t size) {
    char *block = (char *)malloc(size); // of its own: a read beyond it is seen
    must(!size || block);
    if (size) memcpy(block, data, size);
    if (size) fsdpi_store_core_feed(&s->core, conn, block, size, s->now);
    free(block);
}

// A hello of a program that knows the token; rank and size are the input's.
static void hello(state *s, fsdpi_conn *conn, const uint8_t *data, size_t size) {
    char value[FSDPI_STORE_HELLO_BYTES] = {0}, out[HEADER + sizeof value], *at = out;
    uint8_t mac[32];
    fsdpi_hmac_sha256(token, sizeof token, nonce, sizeof nonce, mac);
    memcpy(value, mac, sizeof mac);
    (void)fsdpi_le_put(value + 32, FSDPI_STORE_VERSION, 4);
    (void)fsdpi_le_put(value + 36, size > 0 ? data[0] % SIZE : 0, 4);
    (void)fsdpi_le_put(value + 40, SIZE, 4);
    for (size_t i = 1; i < size && i < sizeof value - 44; i++) value[43 + i] = (char)data[i];
    at = fsdpi_le_put(at, FSDPI_STORE_MAGIC, 4);
    at = fsdpi_le_put(at, FSDPI_STORE_HELLO, 2);
    at = fsdpi_le_put(at, 0, 8);
    at = fsdpi_le_put(at, 0, 2);
    at = fsdpi_le_put(at, sizeof value, 8);
    memcpy(at, value, sizeof value);
    feed(s, conn, out, sizeof out);
}

// A frame with a right header: first byte the op, second the size of the key.
static void frame(state *s, fsdpi_conn *conn, const uint8_t *data, size_t size) {
    char header[HEADER], *at = header;
    if (size < 2) return;
    size_t key_size = data[1] < size - 2 ? data[1] : size - 2;
    at = fsdpi_le_put(at, FSDPI_STORE_MAGIC, 4);
    at = fsdpi_le_put(at, FSDPI_STORE_SET + data[0] % 8, 2);
    at = fsdpi_le_put(at, 0, 6);
    at = fsdpi_le_put(at, key_size, 4);
    (void)fsdpi_le_put(at, size - 2 - key_size, 8);
    feed(s, conn, header, sizeof header);
    feed(s, conn, data + 2, size - 2);
}

// All that the core has to say is whole frames.
static void drain(state *s, fsdpi_conn *conn) {
    fsdpi_frame f;
    int whole;
    while ((whole = conn->out.block ? fsdpi_frame_get(&conn->out, &f) : 0) > 0) {
        must(f.op == FSDPI_STORE_CHALLENGE || f.op == FSDPI_STORE_REPLY ||
             f.op == FSDPI_STORE_REFUSED || f.op >= FSDPI_STORE_ALL_JOINED);
        fsdpi_frame_drop(&s->core.allocator, &conn->out, &f);
    }
    must(whole == 0 && conn->out.begin == conn->out.end);
}

static void part(state *s, int i) {
    if (s->conns[i]) fsdpi_store_core_disconnect(&s->core, s->conns[i], s->now);
    s->conns[i] = NULL;
}

static void step(state *s, int what, int i, const uint8_t *data, size_t size) {
    fsdpi_conn *conn = s->conns[i];
    if (!conn && what != CONNECT) return;
    if (!conn) {
        s->conns[i] = fsdpi_store_core_connect(&s->core, nonce, s->now);
        must(s->conns[i] != NULL);
        return;
    }
    switch (what) {
    case FEED: feed(s, conn, data, size); break;
    case HELLO: hello(s, conn, data, size); break;
    case FRAME: frame(s, conn, data, size); break;
    case EXPIRE: s->now += (int64_t)size * 1000000; break;
    case DISCONNECT: part(s, i); break;
    case EVICT: (void)fsdpi_store_core_evict(&s->core); break;
    default: drain(s, conn); break;
    }
    (void)fsdpi_store_core_expire(&s->core, s->now);
    for (int k = 0; k < CONNS; k++) // as the server does
        if (s->conns[k] && s->conns[k]->state == FSDPI_CONN_BROKEN) part(s, k);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    static state s;
    fsdp_allocator a;
    memset(&s, 0, sizeof s);
    a.alloc = count_alloc, a.free = count_free, a.user = NULL;
    must(fsdpi_store_core_open(&s.core, &a, SIZE, size % 2 ? 0 : -1, token));
    while (size >= 4) {
        size_t bytes = data[2] | (size_t)data[3] << 8;
        if (bytes > size - 4) bytes = size - 4;
        step(&s, data[0] % STEPS, data[1] % CONNS, data + 4, bytes);
        data += 4 + bytes, size -= 4 + bytes;
        must(live < 4 << 20);
    }
    for (int i = 0; i < CONNS; i++)
        if (s.conns[i]) drain(&s, s.conns[i]);
    fsdpi_store_core_close(&s.core);
    must(live == 0);
    return 0;
}
