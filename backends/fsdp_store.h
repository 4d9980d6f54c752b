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
       ABORT      client   as FAILURE
       BYE        client   the rank leaves in order; the server closes the connection
       JOINED     push     all ranks have joined; a text: an address of the server's host, or empty
       LEFT       push     i32 rank
       FAILURE    push     the failure: i32 status, i32 rank that sent it, i32 rank that is lost,
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
#include "../src/base/os_net.h"
#include "../src/base/text.h"
#include "../src/core/alloc.h"
#include "../src/core/launch.h"
#include "fsdp_signature.h"
#include "fsdp_store_core.h"
#include "fsdp_store_frames.h"
#include "fsdp_store_server.h"
#include "fsdp_store_sockets.h"
#include "fsdp_store_token.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

typedef struct fsdpi_store fsdpi_store;

typedef struct fsdpi_store_request {
    struct fsdpi_store_request *next;
    uint32_t id, done; // the caller sleeps on done
    fsdp_status status;
    void *value; // in the caller's memory
    size_t cap, bytes;
} fsdpi_store_request;

// A rank's connection. Before the thread runs, open uses the socket; afterwards only the thread
// does. `lock` guards out, requests, next_id and failure.
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
    fsdpi_failure failure;   // valid if judged
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
    int64_t deadline, silence_ns; // silence_ns: timeout of a silent server
    int decided, later, why;      // later: try this address again; why: errno, or 0
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
    } else if (f->op == FSDPI_STORE_FAILURE && fsdpi_failure_get(f, &v)) {
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
    int64_t soon = fsdpi_store_after(fsdpi_store_now(s), t->silence_ns);
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
        int is_news = t->why != ECONNREFUSED && t->silence_ns == FSDPI_STORE_KNOCK_NS;
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
            t->silence_ns = slow[i] ? FSDPI_STORE_KNOCK_NS / 10 : FSDPI_STORE_KNOCK_NS;
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
    if (FSDPI_LOAD(&s->judged)) return (fsdp_status)s->failure.status;
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
        s->failure = *v;
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
    char value[FSDPI_FAILURE_BYTES];
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
    case FSDPI_STORE_FAILURE:
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

// Queries the state of a rank at its last frame.
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
static FSDPI_UNUSED int fsdpi_store_failure(fsdpi_store *s, fsdpi_failure *out) {
    if (!FSDPI_LOAD(&s->judged)) return 0;
    if (out) *out = s->failure; // written once
    return 1;
}

/* Fails the world. On return there is a failure: the job's first, or, if the server does not answer
   within FSDPI_STORE_ABORT_NS, this one. Any thread may call it. */
static FSDPI_UNUSED void fsdpi_store_abort(fsdpi_store *s, fsdp_status status, const char *subject,
                                           const char *reason) {
    fsdpi_failure v;
    char value[FSDPI_FAILURE_BYTES];
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
    if (FSDPI_LOAD(&s->joined)) return FSDP_OK; // a failure since then is for fsdpi_store_failure
    if (FSDPI_LOAD(&s->judged)) fsdpi_say_failure(error, &s->failure);
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
    s->wake = fsdpi_event();
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
