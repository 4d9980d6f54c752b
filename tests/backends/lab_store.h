/* lab_store.h - helpers for tests of the store: worlds of clients, a server in a separate process,
   and frames written by hand. Include it after library.c.

   SPDX-License-Identifier: MIT */
#ifndef LAB_STORE_H
#define LAB_STORE_H
#include "harness.h"
#include <ifaddrs.h>     /* getifaddrs */
#include <netdb.h>       /* getnameinfo */
#include <netinet/tcp.h> /* TCP_NODELAY */
#include "lab.h"
// After it:
#include "backends/fsdp_signature.h"
#include "backends/fsdp_store.h"

/* ---- worlds ---------------------------------------------------------------------------------- */

enum { RANKS = 128, FLAGS = 16, MIB = 1 << 20 };
enum { AT_HOST, AT_IPV4, AT_IPV6, AT_NAME, AT_FILE, AT_OWN4, AT_OWN6 };
#define MS INT64_C(1000000)

typedef struct {
    int world, threads, timeout_ms, port;
    char job[64], address[400], own[100]; /* own: expected fsdpi_store_address, or "" */
    fsdp_allocator allocator;
    int pids[RANKS], flags[FLAGS];
    int64_t when; /* start of a measurement, in ms */
    fsdpi_failure failures[RANKS];
    int up, down, squatter, served_at; /* fields of the separate process */
    int num_joined, *joined;           /* joined ranks; `joined` points to the counter in use */
    const void *extra;
} setup;

typedef struct {
    fsdpi_store *store;
    int rank, busy, beats;
    int *joined; /* counter of its setup */
    uint32_t events;
    const char *doing; /* text of its heartbeats */
    char error[1024];
} client;

/* Returns the limit for an action that should take `ms`: the machine may be busy. */
H_FN int slack(int ms) { return W_SLOW ? ms * 5 + 1000 : ms + 400; }

/* Writes this host's first address that other hosts could reach. Returns 0 if there is none. */
H_FN int own_address(int family, char *out, size_t cap) {
    struct ifaddrs *all = NULL;
    int found = 0;
    CHECK(!getifaddrs(&all));
    for (struct ifaddrs *i = all; i && !found; i = i->ifa_next) {
        if (!i->ifa_addr || i->ifa_addr->sa_family != family || (i->ifa_flags & 8 /* loopback */))
            continue;
        socklen_t size = family == AF_INET ? sizeof(struct sockaddr_in)
                                           : sizeof(struct sockaddr_in6);
        found = !getnameinfo(i->ifa_addr, size, out, (socklen_t)cap, NULL, 0, NI_NUMERICHOST) &&
                !strchr(out, '%'); /* not an address of one link only */
    }
    freeifaddrs(all);
    return found;
}

H_FN void set_address(setup *s, int at) {
    char own[100];
    s->port = at == AT_HOST || at == AT_FILE ? 0 : h_free_port();
    if (at == AT_HOST) snprintf(s->address, sizeof s->address, "host:");
    if (at == AT_FILE) snprintf(s->address, sizeof s->address, "file://%s/meet", h_tmpdir());
    if (at == AT_IPV4) snprintf(s->address, sizeof s->address, "tcp://127.0.0.1:%d", s->port);
    if (at == AT_IPV6) snprintf(s->address, sizeof s->address, "tcp://[::1]:%d", s->port);
    if (at == AT_OWN4 || at == AT_OWN6) {
        if (!own_address(at == AT_OWN4 ? AF_INET : AF_INET6, own, sizeof own))
            SKIP("this machine has no such address");
        snprintf(s->address, sizeof s->address, at == AT_OWN4 ? "tcp://%s:%d" : "tcp://[%s]:%d",
                 own, s->port);
        CHECK_EQ_INT(snprintf(s->own, sizeof s->own, "%s", own), (int)strlen(own));
    }
    if (at == AT_NAME) snprintf(s->address, sizeof s->address, "tcp://localhost:%d", s->port);
}

H_FN int has_ipv6(void) {
    struct sockaddr_in6 a;
    int fd = socket(AF_INET6, SOCK_STREAM, 0), ok;
    memset(&a, 0, sizeof a);
    a.sin6_family = AF_INET6;
    a.sin6_addr.s6_addr[15] = 1;
    ok = fd >= 0 && !bind(fd, (struct sockaddr *)&a, sizeof a);
    if (fd >= 0) close(fd);
    return ok;
}

/* Returns a setup in memory that forked ranks share. */
H_FN setup *make_setup(int at, int world, int threads, int timeout_ms) {
    static const char *const names[] = {"FSDP_TOKEN",
                                        "FSDP_STORE",
                                        "FSDP_SOCKET_IFNAME",
                                        "GLOO_SOCKET_IFNAME",
                                        "TORCHELASTIC_USE_AGENT_STORE",
                                        "FSDP_STORE_SERVED",
                                        "MASTER_PORT"};
    setup *s = (setup *)mmap(NULL, sizeof *s, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS,
                             -1, 0);
    CHECK(s != (setup *)MAP_FAILED && world <= RANKS);
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) unsetenv(names[i]);
    if (at == AT_IPV6 && !has_ipv6()) SKIP("no IPv6 on this machine");
    s->world = world, s->threads = threads, s->timeout_ms = timeout_ms;
    s->joined = &s->num_joined;
    s->allocator.alloc = fsdpi_libc_alloc, s->allocator.free = fsdpi_libc_free;
    snprintf(s->job, sizeof s->job, "store-%d-%lld", (int)getpid(), (long long)h_now_ms());
    set_address(s, at);
    return s;
}

H_FN void run(setup *s, h_rank_fn fn) {
    memset(s->flags, 0, sizeof s->flags);
    s->num_joined = 0;
    if (s->threads) h_ranks_thread(s->world, fn, s);
    else h_ranks_proc(s->world, fn, s);
}

H_FN void await_flag(int *flag, int count);

/* Runs fn in a separate process until s->down. A thread would not do: a program with threads should
   not fork, least of all under a sanitizer. Returns once fn has set s->up. */
H_FN pid_t aside(void (*fn)(setup *s), setup *s) {
    fflush(NULL);
    s->up = s->down = 0;
    pid_t pid = fork();
    CHECK(pid >= 0);
    if (!pid) fn(s), exit(0);
    await_flag(&s->up, 1);
    return pid;
}
H_FN void aside_ends(setup *s, pid_t pid) {
    int status = 0;
    __atomic_store_n(&s->down, 1, __ATOMIC_SEQ_CST);
    CHECK_EQ_INT(waitpid(pid, &status, 0), pid);
    CHECK_EQ_INT(status, 0);
}

H_FN void raise_flag(int *flag) { __atomic_add_fetch(flag, 1, __ATOMIC_SEQ_CST); }

H_FN void await_flag(int *flag, int count) {
    while (__atomic_load_n(flag, __ATOMIC_SEQ_CST) < count) usleep(300);
}

/* A barrier of the world. Use each flag once. */
H_FN void gather_at(setup *s, int flag) {
    raise_flag(&s->flags[flag]);
    await_flag(&s->flags[flag], s->world);
}

/* The first heartbeat is due once the store has let the rank in. */
H_FN void on_beat(void *user, fsdpi_store_beat *out) {
    client *c = (client *)user;
    if (c->beats++ == 0) raise_flag(c->joined);
    const char *doing = __atomic_load_n(&c->doing, __ATOMIC_SEQ_CST);
    out->busy = __atomic_load_n(&c->busy, __ATOMIC_SEQ_CST);
    out->since_ns = 5 * MS;
    snprintf(out->text, sizeof out->text, "%s", doing ? doing : "");
}

/* Sets the state that the next heartbeats report. */
H_FN void does(client *c, int busy, const char *doing) {
    __atomic_store_n(&c->busy, busy, __ATOMIC_SEQ_CST);
    __atomic_store_n(&c->doing, doing, __ATOMIC_SEQ_CST);
}

H_FN void on_event(void *user) {
    __atomic_add_fetch(&((client *)user)->events, 1, __ATOMIC_SEQ_CST);
}

H_FN fsdpi_store_desc make_desc(const setup *s, int rank, int world) {
    fsdpi_store_desc d;
    memset(&d, 0, sizeof d);
    d.boot.rank = rank, d.boot.size = world, d.boot.timeout_ns = s->timeout_ms * MS;
    d.boot.job = s->job, d.boot.store = s->address;
    d.boot.allocator = s->allocator;
    d.boot.logger.log = w_quiet, d.boot.clock.now_ns = fsdpi_monotonic_ns;
    return d;
}

H_FN fsdp_status open_as(client *c, setup *s, int rank, int world) {
    fsdpi_store_desc d = make_desc(s, rank, world);
    memset(c, 0, sizeof *c);
    c->rank = rank;
    c->joined = s->joined;
    d.beat = on_beat, d.event = on_event, d.user = c;
    fsdp_status status = fsdpi_store_open(&d, &c->store, c->error, sizeof c->error);
    CHECK((status == FSDP_OK) == (c->store != NULL));
    CHECK_MSG(!status || c->error[0], "status %d without a text", (int)status);
    return status;
}

H_FN void enter(client *c, setup *s, int rank) {
    fsdp_status status = open_as(c, s, rank, s->world);
    CHECK_MSG(!status, "%s: %s", fsdp_status_name(status), c->error);
    s->pids[rank] = (int)getpid();
}

H_FN void says(const char *text, const char *part) {
    CHECK_MSG(strcasestr(text, part), "\"%s\" does not say \"%s\"", text, part);
}

/* Checks that at most limit_ms, with slack, have passed since start_ms, on h_calm_ms. */
H_FN void within(int64_t start_ms, int limit_ms) {
    int64_t took = h_calm_ms() - start_ms;
    CHECK_MSG(took <= slack(limit_ms), "took %lld ms, expected at most %d", (long long)took,
              slack(limit_ms));
}

H_FN fsdpi_failure await_failure(client *c, int limit_ms) {
    fsdpi_failure v;
    int64_t start = h_calm_ms();
    memset(&v, 0, sizeof v);
    while (!fsdpi_store_failure(c->store, &v)) {
        CHECK_MSG(limit_ms && h_calm_ms() - start <= slack(limit_ms), "no failure in time");
        usleep(300);
    }
    return v;
}

H_FN void no_failure(client *c) {
    fsdpi_failure v;
    memset(&v, 0, sizeof v);
    CHECK_MSG(!fsdpi_store_failure(c->store, &v), "status %d, '%s'", (int)v.status, v.reason);
}

H_FN void put(client *c, const char *key, const void *value, size_t size) {
    fsdp_status status = fsdpi_store_set(c->store, key, value, size);
    CHECK_MSG(!status, "rank %d: set of '%s', %zu bytes: %s", c->rank, key, size,
              fsdp_status_name(status));
}

H_FN fsdp_status try_get(client *c, const char *key, void *value, size_t cap, size_t *size,
                         int timeout_ms) {
    return fsdpi_store_get(c->store, key, value, cap, size, timeout_ms * MS);
}

H_FN void get_text(client *c, const char *key, const char *expected) {
    char text[256];
    size_t size = 0;
    fsdp_status status = try_get(c, key, text, sizeof text - 1, &size, 20000);
    CHECK_MSG(!status, "rank %d: get of '%s': %s", c->rank, key, fsdp_status_name(status));
    text[size] = 0;
    CHECK_EQ_STR(text, expected);
}

/* The server closes with rank 0: all ranks wait until everyone is done. */
H_FN void leave(client *c, setup *s, int ranks) {
    raise_flag(&s->flags[FLAGS - 1]);
    await_flag(&s->flags[FLAGS - 1], ranks);
    fsdpi_store_close(c->store);
}

H_FN int count_fds(void) { return h_entries("/proc/self/fd"); }

/* Checks that no thread is left but this one and a sanitizer's. A joined thread may be listed a
   moment longer. */
H_FN void no_threads(void) {
    int most = 2 + 1 + 2 * W_SLOW; /* the entries ".", ".." and this thread */
    for (int i = 0; i < 500 && h_entries("/proc/self/task") > most; i++) usleep(1000);
    CHECK_MSG(h_entries("/proc/self/task") <= most, "%d threads", h_entries("/proc/self/task") - 2);
}

/* Each rank sets a key and reads the keys of all, including those that are set later. */
H_FN void exchange(client *c, int world, const char *what) {
    char key[64], value[64];
    snprintf(key, sizeof key, "%s/%d", what, c->rank);
    snprintf(value, sizeof value, "%s of rank %d", what, c->rank);
    put(c, key, value, strlen(value));
    for (int k = 0; k < world; k++) {
        int peer = (c->rank + k) % world;
        snprintf(key, sizeof key, "%s/%d", what, peer);
        snprintf(value, sizeof value, "%s of rank %d", what, peer);
        get_text(c, key, value);
    }
}

H_FN int listen_at(int port) {
    struct sockaddr_in a;
    int one = 1, fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    memset(&a, 0, sizeof a);
    a.sin_family = AF_INET, a.sin_port = htons((uint16_t)port);
    a.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &one, sizeof one);
    CHECK(!bind(fd, (struct sockaddr *)&a, sizeof a));
    return fd;
}

H_FN void reset_close(int fd) {
    struct linger l = {1, 0};
    setsockopt(fd, SOL_SOCKET, SO_LINGER, &l, sizeof l);
    close(fd);
}

H_FN fsdpi_store_server *serve(setup *s, int world) {
    fsdpi_store_server *server = NULL;
    fsdpi_store_desc d = make_desc(s, -1, world);
    char error[1024] = "";
    fsdp_status status = fsdpi_store_serve(&d, &server, error, sizeof error);
    CHECK_MSG(!status, "%s: %s", fsdp_status_name(status), error);
    return server;
}

H_FN void serves_aside(setup *s) {
    fsdpi_store_server *server = serve(s, s->world);
    s->served_at = fsdpi_store_port(server);
    raise_flag(&s->up);
    await_flag(&s->down, 1);
    fsdpi_store_stop(server);
}

/* ---- the wire -------------------------------------------------------------------------------- */
/* Frames, keys and tags are built here a second time, so that a mistake in the library cannot
   cancel out. Only HMAC is the library's: it has test vectors. */

enum { HEADER = 24, TAG = 16, NONCE = 32, PROVE_BYTES = NONCE + TAG, HELLO_BYTES = 24 };
enum {
    OP_CHALLENGE = 1,
    OP_HELLO,
    OP_REPLY,
    OP_REFUSED,
    OP_SET,
    OP_GET,
    OP_DELETE,
    OP_BEAT,
    OP_ASK,
    OP_ABORT,
    OP_BYE,
    OP_JOINED,
    OP_LEFT,
    OP_FAILURE,
    OP_CLOSING,
    OP_PROVE,
    OP_PROVEN
};

/* One end of a connection: its two keys, and the number of frames in each direction. */
typedef struct {
    int fd, sealed;
    uint8_t key_out[32], key_in[32];
    uint64_t out, in;
} wire;

H_FN void number(unsigned char *to, uint64_t value, int bytes) {
    for (int i = 0; i < bytes; i++) to[i] = (unsigned char)(value >> (8 * i));
}

H_FN uint64_t number_at(const unsigned char *from, int bytes) {
    uint64_t value = 0;
    for (int i = bytes; i-- > 0;) value = value << 8 | from[i];
    return value;
}

H_FN size_t header(unsigned char *to, int op, uint32_t id, uint64_t key_size, uint64_t size) {
    memcpy(to, "FKV1", 4);
    number(to + 4, (uint64_t)op, 2), number(to + 6, 0, 2), number(to + 8, id, 4);
    number(to + 12, key_size, 4), number(to + 16, size, 8);
    return HEADER;
}

H_FN size_t frame(unsigned char *to, int op, uint32_t id, const char *key, const void *value,
                  size_t size) {
    size_t key_size = key ? strlen(key) : 0, at = header(to, op, id, key_size, size);
    if (key_size) memcpy(to + at, key, key_size);
    if (size) memcpy(to + at + key_size, value, size);
    return at + key_size + size;
}

/* Computes the tag of a frame without one, from the frame's number and the key. */
H_FN void tag_of(const uint8_t key[32], uint64_t count, const unsigned char *whole, size_t size,
                 uint8_t tag[32]) {
    unsigned char *text = (unsigned char *)malloc(8 + size);
    CHECK(text != NULL);
    number(text, count, 8);
    memcpy(text + 8, whole, size);
    number(text + 8 + 16, number_at(whole + 16, 8) + TAG, 8); /* includes the tag */
    fsdpi_hmac_sha256(key, 32, text, 8 + size, tag);
    free(text);
}

/* Appends a tag to a frame, which must have room for it. Returns the new size. */
H_FN size_t seal(wire *w, unsigned char *whole, size_t size) {
    uint8_t tag[32];
    if (!w->sealed) return size;
    tag_of(w->key_out, w->out++, whole, size, tag);
    memcpy(whole + size, tag, TAG);
    number(whole + 16, number_at(whole + 16, 8) + TAG, 8);
    return size + TAG;
}

/* Derives the keys of a connection, for the client's end or the server's. */
H_FN void make_keys(wire *w, const uint8_t token[32], int is_server, const void *server_nonce,
                    const void *client_nonce) {
    uint8_t own[32], text[8 + 2 * NONCE], keys[2][32];
    fsdpi_hmac_sha256(token, 32, "fsdp store", 10, own);
    for (int of_server = 0; of_server < 2; of_server++) {
        number(text, 2, 4), number(text + 4, (uint64_t)of_server, 4); /* 2 is the version */
        memcpy(text + 8, server_nonce, NONCE), memcpy(text + 8 + NONCE, client_nonce, NONCE);
        fsdpi_hmac_sha256(own, 32, text, sizeof text, keys[of_server]);
    }
    memcpy(w->key_out, keys[is_server], 32), memcpy(w->key_in, keys[!is_server], 32);
    w->sealed = 1, w->out = w->in = 0;
}

/* Writes a PROVE that uses these keys: 72 bytes. */
H_FN size_t prove(wire *w, unsigned char *to, const uint8_t token[32], const void *server_nonce,
                  const void *client_nonce) {
    make_keys(w, token, 0, server_nonce, client_nonce);
    return seal(w, to, frame(to, OP_PROVE, 0, NULL, client_nonce, NONCE));
}

/* Writes a HELLO without a tag. */
H_FN size_t hello(unsigned char *to, int rank, int size, uint64_t timeout, uint64_t left) {
    unsigned char value[HELLO_BYTES];
    number(value, (uint64_t)(int64_t)rank, 4), number(value + 4, (uint64_t)(int64_t)size, 4);
    number(value + 8, timeout, 8), number(value + 16, left, 8);
    return frame(to, OP_HELLO, 1, NULL, value, sizeof value);
}

H_FN int raw_connect(int port) {
    struct sockaddr_in a;
    struct timeval limit = {3, 0};
    int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    memset(&a, 0, sizeof a);
    a.sin_family = AF_INET, a.sin_port = htons((uint16_t)port);
    a.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    if (fd < 0) return -1;
    setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof limit);
    setsockopt(fd, SOL_SOCKET, SO_SNDTIMEO, &limit, sizeof limit);
    if (!connect(fd, (struct sockaddr *)&a, sizeof a)) return fd;
    close(fd);
    return -1;
}

H_FN void raw_send(int fd, const void *data, size_t size) {
    ssize_t done = 1; /* the peer may be slow, or may have closed */
    for (size_t at = 0; at < size && done > 0; at += (size_t)done)
        done = send(fd, (const char *)data + at, size - at, MSG_NOSIGNAL);
}

/* Returns 1 if all bytes have arrived. */
H_FN int raw_read(int fd, void *to, size_t size) {
    for (size_t at = 0; at < size;) {
        ssize_t got = recv(fd, (char *)to + at, size - at, 0);
        if (got <= 0) return 0;
        at += (size_t)got;
    }
    return 1;
}

/* Reads a frame, checks its tag, and cuts its value to `cap`. Returns the op, or 0 if the
   connection has ended. A REFUSED that replies to PROVE has no tag. */
H_FN int wire_frame(wire *w, char *value, size_t cap, int *flags) {
    static unsigned char whole[HEADER + 17 * MIB];
    uint8_t tag[32];
    if (!raw_read(w->fd, whole, HEADER)) return 0;
    CHECK(!memcmp(whole, "FKV1", 4));
    CHECK_EQ_INT(number_at(whole + 12, 4), 0);
    size_t size = (size_t)number_at(whole + 16, 8);
    int op = (int)number_at(whole + 4, 2);
    CHECK(size <= 16 * MIB + TAG);
    if (!raw_read(w->fd, whole + HEADER, size)) return 0;
    if (flags) *flags = (int)number_at(whole + 6, 2);
    if (w->sealed && !(op == OP_REFUSED && w->in == 0)) {
        CHECK(size >= TAG);
        size -= TAG;
        number(whole + 16, size, 8);
        tag_of(w->key_in, w->in++, whole, HEADER + size, tag);
        CHECK_EQ_MEM(tag, whole + HEADER + size, TAG);
    }
    for (size_t i = 0; i < size && i < cap; i++) value[i] = (char)whole[HEADER + i];
    if (cap) value[size < cap ? size : cap - 1] = 0;
    return op;
}

H_FN void wire_send(wire *w, int op, const char *key, const void *value, size_t size) {
    unsigned char out[HEADER + 600 + TAG];
    CHECK(size <= 300);
    raw_send(w->fd, out, seal(w, out, frame(out, op, 1, key, value, size)));
}

/* Opens a connection and proves knowledge of the token, for this job or another one. Returns the
   reply's op. */
H_FN int raw_prove(wire *w, const setup *s, const char *job) {
    unsigned char nonce[NONCE + 1], mine[NONCE], out[HEADER + PROVE_BYTES];
    uint8_t token[32];
    memset(w, 0, sizeof *w);
    w->fd = -1;
    for (int i = 0; w->fd < 0 && i < 3000; i++) { /* until a server listens */
        w->fd = raw_connect(s->port);
        if (w->fd < 0) usleep(1000);
    }
    CHECK(w->fd >= 0);
    CHECK_EQ_INT(wire_frame(w, (char *)nonce, sizeof nonce, NULL), OP_CHALLENGE);
    memset(mine, 77, sizeof mine);
    (void)fsdpi_store_token(job, token);
    raw_send(w->fd, out, prove(w, out, token, nonce, mine));
    return wire_frame(w, NULL, 0, NULL);
}

/* Opens a connection, proves knowledge of the token and sends a HELLO. */
H_FN void raw_member(wire *w, const setup *s, int rank, int size) {
    unsigned char out[HEADER + HELLO_BYTES + TAG];
    CHECK_EQ_INT(raw_prove(w, s, s->job), OP_PROVEN);
    raw_send(w->fd, out, seal(w, out, hello(out, rank, size, 20000 * MS, 20000 * MS)));
}

#endif
