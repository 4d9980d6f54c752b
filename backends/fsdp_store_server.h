/* fsdp_store_server.h - the server's sockets, and its thread

   Callers: fsdp_store.h (fsdpi_store_claim), tools/fsdprun.c (fsdpi_store_port) and fsdp_gloo.h
     (fsdpi_store_listen).

   A part of fsdp_store.h, which has the protocol.
   SPDX-License-Identifier: MIT (full text at the end of fsdp.h) */
#ifndef FSDP_H
#include "../fsdp.h"
#endif
#ifndef FSDPI_BACKENDS_STORE_SERVER_H
#define FSDPI_BACKENDS_STORE_SERVER_H

#include "../src/base/macros.h"
#include "../src/base/os.h"
#include "../src/base/os_net.h"
#include "../src/base/text.h"
#include "../src/core/alloc.h"
#include "fsdp_signature.h"
#include "fsdp_store_core.h"
#include "fsdp_store_frames.h"
#include "fsdp_store_sockets.h"
#include "fsdp_store_token.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

typedef struct fsdpi_store_desc {
    fsdp_boot boot;
    // Called by the client's thread; must not call the store, and must return soon. May be NULL.
    void (*beat)(void *user, fsdpi_store_beat *out); // reports this rank's operation; *out is 0
    void (*event)(void *user); // the world has failed, a rank has left, or the store has ended
    void *user;
} fsdpi_store_desc;

typedef struct fsdpi_store_server fsdpi_store_server;

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
        int fd = fsdpi_accept(server->listener);
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
    now = fsdpi_store_server_now(server), end = now + FSDPI_STORE_CLOSE_NS;
    fsdpi_store_core_say_closing(&server->core, now);
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
    server->max_conns = 2 * d->boot.size + FSDPI_STORE_UNTRUSTED;
    server->place = *place;
    server->wake = fsdpi_event();
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

#endif // FSDPI_BACKENDS_STORE_SERVER_H
