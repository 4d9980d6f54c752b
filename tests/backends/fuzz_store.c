/* fuzz_store.c - a libFuzzer target: the server's core of backends/fsdp_store.h, without sockets

       clang -std=c99 -g -O1 -I. -fsanitize=fuzzer,address,undefined tests/backends/fuzz_store.c \
           -o build/fuzz_store -pthread -lm
       build/fuzz_store -max_len=4096 -max_total_time=600

   An input is a list of steps: the step's kind (1 byte), a connection (1), a size (2, little
   endian), and that many bytes. tests/backends/test_store.c feeds the same core from a seed and
   checks its replies against a model; this target finds inputs that no seed produces.

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
    char *block = (char *)malloc(size); // so that a read after its end is detected
    must(!size || block);
    if (size) memcpy(block, data, size);
    if (size) fsdpi_store_core_feed(&s->core, conn, block, size, s->now);
    free(block);
}

// Feeds the frame that the client would send next, with a tag once the connection has a key.
static void say(state *s, fsdpi_conn *conn, int op, const uint8_t *key, size_t key_size,
                const uint8_t *value, size_t value_size) {
    fsdpi_queue out = {NULL, 0, 0, 0};
    fsdpi_frame f = {(uint16_t)op,       0, 0, key_size, value_size, (const char *)key,
                     (const char *)value};
    fsdpi_seal seal = conn->seal_in;
    seal.on = conn->state != FSDPI_CONN_UNTRUSTED;
    if (op == FSDPI_STORE_PROVE) fsdpi_seal_make(&seal, token, 0, conn->nonce, value);
    must(fsdpi_frame_put(&s->core.allocator, &out, &f, &seal));
    feed(s, conn, out.block, out.end);
    fsdpi_queue_free(&s->core.allocator, &out);
}

// Feeds the proof of the token, then a hello, whose rank and size come from the input.
static void hello(state *s, fsdpi_conn *conn, const uint8_t *data, size_t size) {
    uint8_t value[FSDPI_STORE_HELLO_BYTES] = {0};
    if (conn->state == FSDPI_CONN_UNTRUSTED)
        say(s, conn, FSDPI_STORE_PROVE, NULL, 0, nonce, sizeof nonce);
    if (conn->state != FSDPI_CONN_PROVEN) return;
    value[0] = size > 0 ? data[0] % SIZE : 0, value[4] = SIZE;
    for (size_t i = 1; i < size && i < sizeof value - 8; i++) value[7 + i] = data[i];
    say(s, conn, FSDPI_STORE_HELLO, NULL, 0, value, sizeof value);
}

// Feeds a frame with a valid header: the first byte is the op, the second the size of the key.
static void frame(state *s, fsdpi_conn *conn, const uint8_t *data, size_t size) {
    if (size < 2) return;
    size_t key_size = data[1] < size - 2 ? data[1] : size - 2;
    say(s, conn, FSDPI_STORE_SET + data[0] % 8, data + 2, key_size, data + 2 + key_size,
        size - 2 - key_size);
}

// Checks that the core sends only whole frames.
static void drain(state *s, fsdpi_conn *conn) {
    fsdpi_frame f;
    int whole;
    while ((whole = conn->out.block ? fsdpi_frame_get(&conn->out, &f) : 0) > 0) {
        must(f.op == FSDPI_STORE_CHALLENGE || f.op == FSDPI_STORE_REPLY ||
             f.op == FSDPI_STORE_REFUSED || f.op == FSDPI_STORE_PROVEN ||
             (f.op >= FSDPI_STORE_ALL_JOINED && f.op <= FSDPI_STORE_CLOSING));
        fsdpi_frame_drop(&s->core.allocator, &conn->out);
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
