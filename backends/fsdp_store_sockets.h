/* fsdp_store_sockets.h - addresses and sockets, which do not block

   Callers: fsdp_store_server.h (fsdpi_store_set_port), fsdp_store.h (fsdpi_store_flush),
     fsdp_gloo.h (fsdpi_store_prompt) and others.

   A part of fsdp_store.h, which has the protocol.
   SPDX-License-Identifier: MIT (full text at the end of fsdp.h) */
#ifndef FSDP_H
#include "../fsdp.h"
#endif
#ifndef FSDPI_BACKENDS_STORE_SOCKETS_H
#define FSDPI_BACKENDS_STORE_SOCKETS_H

#include "../src/base/hash.h"
#include "../src/base/os.h"
#include "../src/base/os_net.h"
#include "../src/base/text.h"
#include "../src/core/alloc.h"
#include "../src/core/launch.h"
#include "fsdp_store_frames.h"

#include <errno.h>
#include <fcntl.h>
#include <ifaddrs.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#define FSDPI_STORE_PLACES (2 * FSDPI_STORE_HOSTS) // most addresses that are tried

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

static void fsdpi_store_unix(const char *job, fsdpi_store_place *p) {
    memset(p, 0, sizeof *p);
    p->size = fsdpi_unix_name("store", job, &p->at.un);
}

// Runs start(arg) in a thread with a stack of `stack` bytes; 0: the usual size. The thread gets no
// signals.
static int fsdpi_store_thread(pthread_t *thread, void *(*start)(void *), void *arg, size_t stack) {
    pthread_attr_t attr;
    int rc = pthread_attr_init(&attr);
    if (rc) return rc;
    if (stack) (void)pthread_attr_setstacksize(&attr, stack);
    const uint64_t before = fsdpi_block_signals(~(uint64_t)0);
    rc = pthread_create(thread, &attr, start, arg);
    if (rc == EINVAL) rc = pthread_create(thread, NULL, start, arg); // it is too small
    fsdpi_set_blocked_signals(before);
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

// Looks up a name. Returns the number of its addresses in out, at most `most`.
static int fsdpi_store_lookup_name(const fsdp_clock *clock, const char *host, int64_t deadline,
                                   fsdpi_store_place *out, int most, fsdpi_text *why) {
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
        for (struct fsdpi_addrinfo *i = list; i && count < most; i = i->ai_next) {
            if (i->ai_family != (v6 ? AF_INET6 : AF_INET)) continue;
            memset(&out[count], 0, sizeof *out);
            memcpy(&out[count].at, i->ai_addr, i->ai_addrlen);
            out[count++].size = i->ai_addrlen;
        }
    fsdpi_freeaddrinfo(list);
    if (!count) fsdpi_text_add(why, "[E729] host '%s' has no address", host);
    return count;
}

// Looks up a name, or each of the names "a,b": these share `most`. Each round does so, since a name
// may appear later than the program starts.
static int fsdpi_store_lookup(const fsdp_clock *clock, const char *host, int64_t deadline,
                              fsdpi_store_place *out, int most, fsdpi_text *why) {
    char name[sizeof(((fsdpi_store_where *)0)->host)];
    int names = 1, count = 0;
    for (const char *p = host; (p = strchr(p, ',')) != NULL; p++) names++;
    const int each = names < most ? most / names : 1;
    for (const char *comma = NULL; host && count < most; host = comma ? comma + 1 : NULL) {
        comma = strchr(host, ',');
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
    int fd = fsdpi_socket(AF_INET, SOCK_DGRAM);
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
    return fsdpi_socket(p->at.any.sa_family, SOCK_STREAM);
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

#endif // FSDPI_BACKENDS_STORE_SOCKETS_H
