/* sim_hosts.h - several hosts simulated in one process, with their own clock and network:
   processes, threads, descriptors, sockets, a shared folder, and faults. The code under test is
   real; its system calls are renamed to the functions of this file. Everything random comes from
   one seed, so that a run can be repeated. Include it after the library, and before the code under
   test.

       os_begin(seed);
       os_proc *p = os_process(host, start_ns, main, arg);   // as many as you like
       os_plan(...);                                         // faults
       os_run();                                             // until all have ended
       if (os.failed[0]) ...                                 // why the run has failed
       os_end();

   Threads are coroutines: one runs at a time, and the scheduler may choose another one at system
   calls, locks and atomic accesses. A call takes a few microseconds of simulated time. When no
   thread can run, the clock advances to the next event. If there is none, the run hangs, which is a
   failure.

   These also fail a run: a process that ends with an open descriptor, a running thread or allocated
   memory; a socket call that could block; a send that could raise SIGPIPE; a thread that spins.

   Some kinds of faults must not change the result: latency, partial and interrupted calls, late
   starts, short stops. The others, from os_plan, mark the process that they hit as faulty
   (os_proc.faulty), or both ends of a connection.

   SPDX-License-Identifier: MIT */
#ifndef SIM_HOSTS_H
#define SIM_HOSTS_H
#include <ifaddrs.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <pthread.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <ucontext.h>
#ifdef __SANITIZE_ADDRESS__
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#endif

#define OS_FN static __attribute__((unused))
#define OS_MS INT64_C(1000000)
#define OS_S  INT64_C(1000000000)

enum { OS_PROCS = 24, OS_TASKS = 64, OS_FDS = 200, OS_HOSTS = 4, OS_FAULTS = 12, OS_FILES = 4 };
enum { OS_STACK = 512 << 10, OS_SPIN = 30000, OS_STEPS = 4000000, OS_BACKLOG = 64 };

/* System calls that a fault can hit. */
#define OS_SITE_LIST(X)                                                                            \
    X(SOCKET)                                                                                      \
    X(CONNECT) X(BIND) X(LISTEN) X(ACCEPT) X(POLL) X(SEND) X(RECV) X(READ) X(WRITE) X(EVENTFD)     \
        X(GETSOCKNAME) X(SETSOCKOPT) X(GETSOCKOPT) X(THREAD) X(RANDOM) X(RESOLVE) X(OPEN)          \
            X(RENAME) X(ALLOC)
enum {
#define OS_SITE_ENUM(name) OS_##name,
    OS_SITE_LIST(OS_SITE_ENUM) OS_SITES
};
static const char *const os_site_names[] = {
#define OS_SITE_NAME(name) #name,
    OS_SITE_LIST(OS_SITE_NAME)};

/* Kinds of faults. A run counts the faults of each kind. */
#define OS_KIND_LIST(X)                                                                            \
    X(part)                                                                                        \
    X(interrupted) X(again) X(late) X(stop) X(long_stop) X(death) X(call) X(memory) X(reset)       \
        X(cut) X(closed) X(killed) X(wrong)
enum {
#define OS_KIND_ENUM(name) OS_DID_##name,
    OS_KIND_LIST(OS_KIND_ENUM) OS_KINDS
};
static const char *const os_kind_names[] = {
#define OS_KIND_NAME(name) #name,
    OS_KIND_LIST(OS_KIND_NAME)};

typedef struct { /* address of a socket */
    int family, port;
    uint32_t ip;
    char name[112];
} os_address;

struct os_proc;
enum { OS_STREAM, OS_DGRAM, OS_EVENT, OS_DISK };
typedef struct os_sock {
    struct os_proc *proc; /* NULL: closed, or not accepted yet */
    int id, refs, kind, host, blocking, listening, connecting, connected, shut, is_reset, is_eof;
    int error, peer; /* peer: id of a socket, or -1 */
    os_address local, remote;
    char *in;                               /* received bytes */
    size_t size, cap, flying, window;       /* flying: bytes under way to this socket */
    int64_t last;                           /* latest arrival: nothing arrives earlier */
    uint64_t count;                         /* value of an eventfd; read position of a file */
    int file;                               /* index in os.files */
    int queue[OS_BACKLOG], queued, backlog; /* connections that wait for accept */
} os_sock;

enum { OS_FREE, OS_READY, OS_BLOCKED, OS_DONE };
typedef struct os_task {
    ucontext_t context;
    char *stack;
    void *fake; /* fake stack of the sanitizer */
    struct os_proc *proc;
    void *(*start)(void *);
    void *arg;
    int state, polls;
    int64_t wake, second; /* second: start of the second in which `calls` counts */
    int calls;
    const uint32_t *word; /* address that the task sleeps on */
    int joins;            /* task that it waits for, or -1 */
    int detached;         /* frees itself; may still run when its process ends */
} os_task;

typedef struct os_block {
    struct os_block *next, *before;
    size_t size;
} os_block;

typedef struct os_proc {
    int id, host, used, dead, ended, faulty, touched, exit_code;
    const char *name;
    int rank;                                       /* for the test; -1: none */
    int64_t start, stopped, stop_sum, died, offset; /* offset: of its clock */
    int64_t calls, kill_at;                         /* kill_at: in calls; 0: never */
    int site_calls[OS_SITES];
    int first_fd, fd_limit, fds[OS_FDS]; /* socket + 1 */
    os_block blocks;                     /* memory of its allocator, a ring */
    int num_blocks;
    const char *token, *served; /* values of FSDP_TOKEN and FSDP_STORE_SERVED */
    void *user;
} os_proc;

enum { OS_SYN, OS_CONNECTED, OS_REFUSED, OS_DATA, OS_FIN, OS_RST, OS_PLAN };
typedef struct os_event {
    int64_t at;
    uint64_t order;
    int kind, to, from;
    char *data;
    size_t size;
    os_address where;
} os_event;

/* A planned fault. count: number of calls that fail; for OS_CUT, whether the host becomes faulty.
   */
enum { OS_STOP, OS_LONG_STOP, OS_KILL, OS_KILL_CALL, OS_CALL, OS_RESET, OS_CUT, OS_CLOSE };
typedef struct os_fault {
    int kind, proc, site, nth, count, error;
    int64_t at, length;
} os_fault;

static struct {
    uint64_t seed, rng, order, digest;
    int64_t now, limit, cut_until[OS_HOSTS], cut_for[OS_HOSTS];
    int64_t latency, jitter;                   /* ns, between hosts */
    int parts, interrupts, yields, slow_names; /* 1 in N calls; 0: never */
    os_task tasks[OS_TASKS];
    os_proc procs[OS_PROCS];
    os_fault faults[OS_FAULTS];
    int num_procs, num_faults, task, trace;
    os_sock **socks;
    int num_socks, cap_socks;
    os_event *heap;
    int num_events, cap_events;
    ucontext_t scheduler;
    void *scheduler_fake;
    const void *scheduler_stack;
    size_t scheduler_size;
    struct {
        char name[128], text[400];
        size_t size;
    } files[OS_FILES];
    int64_t did[OS_KINDS], sites[OS_SITES], steps;
    char failed[1200];
} os;

OS_FN uint64_t os_rand(uint64_t n) { return n ? h_rand64(&os.rng) % n : 0; }
OS_FN int64_t os_between(int64_t a, int64_t b) {
    return a + (int64_t)os_rand((uint64_t)(b - a + 1));
}
OS_FN int os_one_in(int n) { return n > 0 && os_rand((uint64_t)n) == 0; }
OS_FN os_task *os_me(void) { return &os.tasks[os.task]; }
OS_FN os_proc *os_self(void) { return os_me()->proc; }

/* Only the first failure is kept. */
OS_FN H_PRINTF(1, 2) void os_fail(const char *format, ...) {
    va_list args;
    if (os.failed[0]) return;
    va_start(args, format);
    vsnprintf(os.failed, sizeof os.failed, format, args);
    va_end(args);
    if (!os.failed[0]) os.failed[0] = '?';
}

OS_FN H_PRINTF(1, 2) void os_say(const char *format, ...) {
    va_list args;
    if (!os.trace) return;
    fprintf(stderr, "%12.6f %-10s ", (double)os.now * 1e-9, os.task >= 0 ? os_self()->name : "-");
    va_start(args, format);
    vfprintf(stderr, format, args);
    va_end(args);
    fputc('\n', stderr);
}

/* ---- coroutines ------------------------------------------------------------------------------ */

#ifdef __SANITIZE_ADDRESS__
#define OS_LEAVE(fake, stack, size)  __sanitizer_start_switch_fiber(fake, stack, size)
#define OS_ARRIVE(fake, stack, size) __sanitizer_finish_switch_fiber(fake, stack, size)
#else
#define OS_LEAVE(fake, stack, size)  (void)0
#define OS_ARRIVE(fake, stack, size) (void)0
#endif

/* Yields to the scheduler. Returns when this task is chosen again. */
OS_FN void os_switch(void) {
    os_task *t = os_me();
    OS_LEAVE(&t->fake, os.scheduler_stack, os.scheduler_size);
    swapcontext(&t->context, &os.scheduler);
    OS_ARRIVE(t->fake, NULL, NULL);
}

OS_FN void os_task_main(void) {
    os_task *t = os_me();
    OS_ARRIVE(NULL, &os.scheduler_stack, &os.scheduler_size);
    (void)t->start(t->arg);
    t->state = t->detached ? OS_FREE : OS_DONE;
    for (int i = 0; i < OS_TASKS; i++)
        if (os.tasks[i].state == OS_BLOCKED && os.tasks[i].joins == os.task)
            os.tasks[i].state = OS_READY;
    OS_LEAVE(NULL, os.scheduler_stack, os.scheduler_size);
    swapcontext(&t->context, &os.scheduler);
}

OS_FN os_task *os_task_free(void) { /* NULL: too many tasks */
    for (int i = 0; i < OS_TASKS; i++)
        if (os.tasks[i].state == OS_FREE) return &os.tasks[i];
    return NULL;
}

OS_FN void os_task_begin(os_task *t, os_proc *p, void *(*start)(void *), void *arg) {
    if (!t->stack)
        t->stack = (char *)mmap(NULL, OS_STACK, PROT_READ | PROT_WRITE,
                                MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    CHECK(t->stack != MAP_FAILED);
#ifdef __SANITIZE_ADDRESS__
    ASAN_UNPOISON_MEMORY_REGION(t->stack, OS_STACK); /* its last user may have been killed */
#endif
    t->proc = p, t->start = start, t->arg = arg, t->state = OS_READY;
    t->polls = t->calls = 0, t->second = os.now, t->word = NULL, t->joins = -1, t->fake = NULL;
    t->detached = 0;
    CHECK(!getcontext(&t->context));
    t->context.uc_stack.ss_sp = t->stack;
    t->context.uc_stack.ss_size = OS_STACK;
    t->context.uc_link = NULL;
    makecontext(&t->context, os_task_main, 0);
}

OS_FN void os_block_until(int64_t wake) {
    os_task *t = os_me();
    t->state = OS_BLOCKED;
    t->wake = wake;
    os_switch();
    t->word = NULL, t->polls = 0, t->joins = -1;
}

OS_FN void os_yield(void) {
    if (os.task >= 0 && os_one_in(os.yields)) os_switch();
}

OS_FN void os_poke(const os_proc *p) { /* wakes tasks that poll */
    for (int i = 0; i < OS_TASKS; i++)
        if (os.tasks[i].state == OS_BLOCKED && os.tasks[i].polls && os.tasks[i].proc == p)
            os.tasks[i].state = OS_READY;
}

/* ---- faults ---------------------------------------------------------------------------------- */

OS_FN os_fault *os_plan(int kind, os_proc *p) {
    os_fault *f = &os.faults[os.num_faults];
    CHECK(os.num_faults < OS_FAULTS);
    memset(f, 0, sizeof *f);
    f->kind = kind, f->proc = p ? p->id : -1, f->count = 1;
    os.num_faults++;
    return f;
}

OS_FN void os_blame(os_proc *p, int kind) {
    p->faulty = 1;
    os.did[kind]++;
}

/* Returns 1, with errno set, if this call fails as planned. */
OS_FN int os_site(int site) {
    os_proc *p = os_self();
    int nth = p->site_calls[site]++;
    for (int i = 0; i < os.num_faults; i++) {
        os_fault *f = &os.faults[i];
        if (f->kind != OS_CALL || f->proc != p->id || f->site != site || nth < f->nth ||
            nth >= f->nth + f->count)
            continue;
        os_blame(p, site == OS_ALLOC ? OS_DID_memory : OS_DID_call);
        os.sites[site]++;
        os_say("fault: %s number %d: %s", os_site_names[site], nth, strerror(f->error));
        errno = f->error;
        return 1;
    }
    return 0;
}

OS_FN void os_kill(os_proc *p, int kind);

/* Starts every system call. */
OS_FN void os_enter(void) {
    os_task *t = os_me();
    os_proc *p = t->proc;
    os.now += os_between(500, 6000);
    p->calls++;
    if (os.now - t->second > OS_S) t->second = os.now, t->calls = 0;
    if (++t->calls > OS_SPIN) os_fail("%s spins: %d calls in a second", p->name, t->calls);
    if (p->kill_at && p->calls >= p->kill_at) os_kill(p, OS_DID_death);
    if (p->dead || os.failed[0] || os_one_in(os.yields)) os_switch();
}

OS_FN int os_interrupted(void) {
    if (!os_one_in(os.interrupts)) return 0;
    os.did[OS_DID_interrupted]++;
    errno = EINTR;
    return 1;
}

/* Returns `size` or, at random, a part of it. */
OS_FN size_t os_part(size_t size) {
    if (size < 2 || !os_one_in(os.parts)) return size;
    os.did[OS_DID_part]++;
    return 1 + os_rand(size - 1);
}

/* ---- the network ----------------------------------------------------------------------------- */

OS_FN int os_event_before(const os_event *a, const os_event *b) {
    return a->at < b->at || (a->at == b->at && a->order < b->order);
}

OS_FN os_event *os_event_add(int64_t at, int kind, int to, int from) {
    if (os.num_events == os.cap_events) {
        os.cap_events = os.cap_events ? 2 * os.cap_events : 64;
        os.heap = (os_event *)realloc(os.heap, (size_t)os.cap_events * sizeof *os.heap);
        CHECK(os.heap != NULL);
    }
    os_event e;
    memset(&e, 0, sizeof e);
    e.at = at, e.order = ++os.order, e.kind = kind, e.to = to, e.from = from;
    int i = os.num_events++;
    for (; i > 0 && os_event_before(&e, &os.heap[(i - 1) / 2]); i = (i - 1) / 2)
        os.heap[i] = os.heap[(i - 1) / 2];
    os.heap[i] = e;
    return &os.heap[i];
}

OS_FN os_event os_event_take(void) {
    os_event first = os.heap[0], last = os.heap[--os.num_events];
    int i = 0;
    for (;;) {
        int k = 2 * i + 1;
        if (k >= os.num_events) break;
        if (k + 1 < os.num_events && os_event_before(&os.heap[k + 1], &os.heap[k])) k++;
        if (!os_event_before(&os.heap[k], &last)) break;
        os.heap[i] = os.heap[k];
        i = k;
    }
    if (os.num_events) os.heap[i] = last;
    return first;
}

/* Returns the time at which data that is sent now arrives. */
OS_FN int64_t os_arrival(int from, int to) {
    int64_t at = os.now + os_between(5000, 40000);
    if (from == to) return at;
    int64_t cut = os.cut_until[from] > os.cut_until[to] ? os.cut_until[from] : os.cut_until[to];
    if (cut > at) at = cut;
    return at + os.latency + (int64_t)os_rand((uint64_t)os.jitter + 1);
}

/* Adds an event that arrives in stream order. */
OS_FN os_event *os_send_to(int kind, os_sock *to, os_sock *from) {
    int64_t at = os_arrival(from->host, to->host);
    if (at < to->last) at = to->last;
    to->last = at;
    return os_event_add(at, kind, to->id, from->id);
}

OS_FN os_sock *os_sock_of(int id) { return id >= 0 ? os.socks[id] : NULL; }

OS_FN os_sock *os_sock_new(os_proc *p, int host, int kind) {
    if (os.num_socks == os.cap_socks) {
        os.cap_socks = os.cap_socks ? 2 * os.cap_socks : 256;
        os.socks = (os_sock **)realloc(os.socks, (size_t)os.cap_socks * sizeof *os.socks);
        CHECK(os.socks != NULL);
    }
    os_sock *s = (os_sock *)calloc(1, sizeof *s);
    CHECK(s != NULL);
    s->proc = p, s->id = os.num_socks, s->host = host, s->kind = kind, s->peer = -1, s->refs = 1;
    s->window = (size_t)os_between(2000, 200000);
    os.socks[os.num_socks++] = s;
    return s;
}

OS_FN void os_sock_reset(os_sock *s) {
    s->is_reset = 1;
    s->error = ECONNRESET;
    s->size = 0;
    if (s->proc) os_poke(s->proc);
}

/* Drops a reference. The last one closes the socket. */
OS_FN void os_sock_close(os_sock *s) {
    os_sock *peer = os_sock_of(s->peer);
    if (--s->refs > 0) return;
    for (int i = 0; i < s->queued; i++) {
        os_sock *q = os_sock_of(s->queue[i]);
        if (os_sock_of(q->peer)) (void)os_send_to(OS_RST, os_sock_of(q->peer), q);
    }
    if (peer && s->connected && !s->is_reset) (void)os_send_to(s->size ? OS_RST : OS_FIN, peer, s);
    s->proc = NULL;
    s->listening = s->queued = 0;
    free(s->in);
    s->in = NULL, s->size = s->cap = 0;
}

OS_FN int os_is_own(int host, uint32_t ip) {
    return ip == INADDR_ANY || ip >> 24 == 127 || ip == (uint32_t)(0x0A000001 + host);
}

/* Returns the socket that listens at an address of a host. */
OS_FN os_sock *os_listener(int host, const os_address *a) {
    for (int i = 0; i < os.num_socks; i++) {
        os_sock *s = os.socks[i];
        if (!s->proc || !s->listening || s->host != host || s->local.family != a->family) continue;
        if (a->family == AF_UNIX
                ? !strcmp(s->local.name, a->name)
                : s->local.port == a->port && (s->local.ip == INADDR_ANY || s->local.ip == a->ip))
            return s;
    }
    return NULL;
}

OS_FN int os_host_of(int from, uint32_t ip) { /* -1: there is no such host */
    int host = (int)(ip - 0x0A000001);
    if (ip == INADDR_ANY || ip >> 24 == 127) return from;
    return host >= 0 && host < OS_HOSTS ? host : -1;
}

/* Adds a connection from c to the queue of l. */
OS_FN os_sock *os_queue(os_sock *l, os_sock *c, const os_address *where) {
    os_sock *s = os_sock_new(NULL, l->host, OS_STREAM);
    s->connected = 1, s->peer = c->id, s->local = *where, s->remote = c->local;
    l->queue[l->queued++] = s->id;
    os_poke(l->proc);
    return s;
}

OS_FN void os_on_syn(os_event *e) {
    os_sock *c = os_sock_of(e->from);
    int host = os_host_of(c->host, e->where.ip);
    os_sock *l = os_listener(host, &e->where);
    if (!c->proc) return;
    if (!l) {
        (void)os_event_add(os_arrival(host, c->host), OS_REFUSED, c->id, c->id);
    } else if (l->queued >= l->backlog) { /* the client's system tries again */
        os_event_add(os.now + OS_S, OS_SYN, c->id, c->id)->where = e->where;
    } else {
        os_sock *s = os_queue(l, c, &e->where);
        c->peer = s->id;
        (void)os_send_to(OS_CONNECTED, c, s);
    }
}

OS_FN void os_on_data(os_sock *s, os_event *e) {
    s->flying -= e->size;
    if (s->is_reset) return;
    if (!s->refs) { /* the socket is closed: its sender gets a reset */
        if (os_sock_of(e->from)->refs) (void)os_send_to(OS_RST, os_sock_of(e->from), s);
        return;
    }
    if (s->size + e->size > s->cap) {
        s->cap = 2 * (s->size + e->size);
        s->in = (char *)realloc(s->in, s->cap);
        CHECK(s->in != NULL);
    }
    memcpy(s->in + s->size, e->data, e->size);
    s->size += e->size;
}

OS_FN void os_planned(os_fault *f);

OS_FN void os_deliver(os_event *e) {
    os_sock *s = e->kind == OS_PLAN ? NULL : os_sock_of(e->to);
    switch (e->kind) {
    case OS_SYN: os_on_syn(e); break;
    case OS_CONNECTED:
        s->connecting = 0, s->connected = 1;
        if (!s->refs) (void)os_send_to(OS_RST, os_sock_of(s->peer), s);
        break;
    case OS_REFUSED: s->connecting = 0, s->error = ECONNREFUSED; break;
    case OS_DATA: os_on_data(s, e); break;
    case OS_FIN: s->is_eof = 1; break;
    case OS_RST:
        if (s->refs) os_sock_reset(s);
        break;
    default: os_planned(&os.faults[e->to]); break;
    }
    if (s && s->proc) os_poke(s->proc);
    free(e->data);
}

/* ---- processes ------------------------------------------------------------------------------- */

OS_FN os_proc *os_process(const char *name, int host, int64_t start, void *(*fn)(void *),
                          void *user) {
    os_proc *p = &os.procs[os.num_procs];
    CHECK(os.num_procs < OS_PROCS);
    memset(p, 0, sizeof *p);
    p->id = os.num_procs++, p->host = host, p->name = name, p->start = start, p->user = user;
    p->used = 1, p->rank = -1, p->first_fd = 3, p->fd_limit = OS_FDS;
    p->offset = os_between(0, 1000) * OS_S;
    p->blocks.next = p->blocks.before = &p->blocks;
    os_task *t = os_task_free();
    CHECK(t != NULL);
    os_task_begin(t, p, fn, user);
    t->state = OS_BLOCKED;
    t->wake = start;
    return p;
}

OS_FN void os_free_all(os_proc *p) {
    while (p->blocks.next != &p->blocks) {
        os_block *b = p->blocks.next;
        p->blocks.next = b->next;
        free(b);
    }
    p->num_blocks = 0;
}

OS_FN void os_close_all(os_proc *p) {
    for (int fd = 0; fd < OS_FDS; fd++)
        if (p->fds[fd]) os_sock_close(os.socks[p->fds[fd] - 1]);
    memset(p->fds, 0, sizeof p->fds);
}

/* Kills a process, as SIGKILL does. Does not return if the caller is part of it. */
OS_FN void os_kill(os_proc *p, int kind) {
    if (p->dead) return;
    os_blame(p, kind);
    os_say("fault: %s is killed", p->name);
    p->dead = 1, p->died = os.now, p->exit_code = 137;
    for (int i = 0; i < OS_TASKS; i++)
        if (os.tasks[i].proc == p && os.tasks[i].state != OS_FREE) os.tasks[i].state = OS_DONE;
    os_close_all(p);
    os_free_all(p);
}

/* Ends a process when its main thread returns. Anything that is left is a defect of the library. */
OS_FN void os_exit(int code) {
    os_proc *p = os_self();
    int open = 0, aside = 0; /* aside: detached threads, which have one block of memory each */
    for (int fd = 0; fd < OS_FDS; fd++) open += p->fds[fd] != 0;
    for (int i = 0; i < OS_TASKS; i++) {
        os_task *t = &os.tasks[i];
        if (i == os.task || t->proc != p || t->state == OS_FREE) continue;
        if (t->detached) t->state = OS_FREE, aside++;
        else os_fail("%s ends with a thread", p->name);
    }
    if (open) os_fail("%s ends with %d descriptors", p->name, open);
    if (p->num_blocks > aside) os_fail("%s ends with %d blocks of memory", p->name, p->num_blocks);
    os_close_all(p);
    os_free_all(p);
    p->dead = p->ended = 1, p->died = os.now, p->exit_code = code;
    os_say("exit(%d)", code);
}

OS_FN void os_stop(os_proc *p, int64_t length, int kind) {
    int64_t until = os.now + length;
    if (p->dead || until <= p->stopped) return;
    p->stop_sum += until - (p->stopped > os.now ? p->stopped : os.now);
    p->stopped = until;
    os.did[kind]++;
    if (kind == OS_DID_long_stop) p->faulty = 1;
    os_say("fault: %s is stopped for %.3f s", p->name, (double)length * 1e-9);
}

OS_FN void os_touch(os_sock *s) {
    if (s->proc) s->proc->faulty = 1;
}

OS_FN void os_planned(os_fault *f) {
    os_proc *p = f->proc >= 0 ? &os.procs[f->proc] : NULL;
    int seen = 0, wanted = f->nth;
    if (f->kind == OS_STOP) os_stop(p, f->length, OS_DID_stop);
    if (f->kind == OS_LONG_STOP) os_stop(p, f->length, OS_DID_long_stop);
    if (f->kind == OS_KILL) os_kill(p, OS_DID_death);
    if (f->kind == OS_CUT) {
        os.cut_until[p->host] = os.now + f->length;
        os.cut_for[p->host] = f->length;
        os.did[OS_DID_cut]++;
        os_say("fault: host %d is cut off for %.3f s", p->host, (double)f->length * 1e-9);
        for (int i = 0; i < os.num_procs; i++) /* all processes of this host */
            if (os.procs[i].host == p->host && f->count) os.procs[i].faulty = 1;
    }
    for (int i = 0; f->kind == OS_RESET && i < os.num_socks; i++) {
        os_sock *s = os.socks[i], *peer = os_sock_of(s->peer);
        if (!s->proc || !s->connected || s->is_reset || !peer || !peer->proc || seen++ < wanted)
            continue;
        os.did[OS_DID_reset]++;
        os_say("fault: %s and %s are parted", s->proc->name, peer->proc->name);
        os_touch(s), os_touch(peer);
        os_sock_reset(s), os_sock_reset(peer);
        return;
    }
    for (int fd = 3; f->kind == OS_CLOSE && fd < OS_FDS && !p->dead; fd++) {
        if (!p->fds[fd] || seen++ < wanted) continue;
        os_blame(p, OS_DID_closed);
        os_say("fault: %s closes descriptor %d", p->name, fd);
        os_sock_close(os.socks[p->fds[fd] - 1]);
        p->fds[fd] = 0;
        os_poke(p);
        return;
    }
}

/* ---- the scheduler --------------------------------------------------------------------------- */

OS_FN void os_begin(uint64_t seed) {
    os.seed = os.rng = seed;
    os.now = OS_S, os.limit = 600 * OS_S, os.task = -1, os.order = 0, os.steps = 0;
    os.trace = getenv("SIM_TRACE") != NULL;
    os.num_procs = os.num_faults = os.num_socks = os.num_events = 0;
    os.failed[0] = 0;
    memset(os.did, 0, sizeof os.did);
    memset(os.sites, 0, sizeof os.sites);
    memset(os.cut_until, 0, sizeof os.cut_until);
    memset(os.cut_for, 0, sizeof os.cut_for);
    memset(os.files, 0, sizeof os.files);
    for (int i = 0; i < OS_TASKS; i++) os.tasks[i].state = OS_FREE;
    os.latency = os_one_in(2) ? 100000 : os_between(0, 20 * OS_MS);
    os.jitter = os_one_in(2) ? 100000 : os_between(0, 20 * OS_MS);
    os.parts = os_one_in(2) ? 0 : (int)os_between(2, 20);
    os.interrupts = os_one_in(2) ? 0 : (int)os_between(10, 100);
    os.yields = (int)os_between(2, 40);
    os.slow_names = os_one_in(4) ? (int)os_between(1, 10) : 0;
}

OS_FN void os_end(void) {
    for (int i = 0; i < os.num_procs; i++)
        if (!os.procs[i].dead) os_free_all(&os.procs[i]);
    for (int i = 0; i < os.num_events; i++) free(os.heap[i].data);
    for (int i = 0; i < os.num_socks; i++) free(os.socks[i]->in), free(os.socks[i]);
    os.num_socks = os.num_events = 0;
}

/* Returns the time at which a task can run, or INT64_MAX if another task must wake it. */
OS_FN int64_t os_ready_at(const os_task *t) {
    int64_t at = t->state == OS_READY ? os.now : t->state == OS_BLOCKED ? t->wake : INT64_MAX;
    return at < INT64_MAX && t->proc->stopped > at ? t->proc->stopped : at;
}

OS_FN void os_resume(int i) {
    os_task *t = &os.tasks[i];
    os.task = i;
    t->state = OS_READY;
    OS_LEAVE(&os.scheduler_fake, t->stack, OS_STACK);
    swapcontext(&os.scheduler, &t->context);
    OS_ARRIVE(os.scheduler_fake, NULL, NULL);
    os.task = -1;
    os.steps++;
}

OS_FN void os_reap(void) { /* ended tasks of dead processes; others are joined */
    for (int i = 0; i < OS_TASKS; i++)
        if (os.tasks[i].state == OS_DONE && os.tasks[i].proc->dead) os.tasks[i].state = OS_FREE;
}

OS_FN void os_run(void) {
    for (int i = 0; i < os.num_faults; i++) {
        os_fault *f = &os.faults[i];
        if (f->kind == OS_KILL_CALL) os.procs[f->proc].kill_at = f->nth;
        else if (f->kind != OS_CALL) (void)os_event_add(f->at, OS_PLAN, i, -1);
    }
    while (!os.failed[0]) {
        int ready[OS_TASKS], count = 0, alive = 0;
        int64_t next = INT64_MAX;
        while (os.num_events && os.heap[0].at <= os.now) {
            os_event e = os_event_take();
            os_deliver(&e);
        }
        os_reap();
        for (int i = 0; i < OS_TASKS; i++) {
            if (os.tasks[i].state != OS_READY && os.tasks[i].state != OS_BLOCKED) continue;
            int64_t at = os_ready_at(&os.tasks[i]);
            alive++;
            if (at <= os.now) ready[count++] = i;
            else if (at < next) next = at;
        }
        if (!alive) return;
        if (os.steps > OS_STEPS) os_fail("no end after %d steps", OS_STEPS);
        if (os.now > os.limit) os_fail("no end after %.0f s", (double)os.limit * 1e-9);
        if (count) {
            os_resume(ready[os_rand((uint64_t)count)]);
            continue;
        }
        if (os.num_events && os.heap[0].at < next) next = os.heap[0].at;
        if (next == INT64_MAX) os_fail("all hang");
        else os.now = next;
    }
}

/* ---- system calls ---------------------------------------------------------------------------- */

OS_FN int64_t os_clock(void *user) {
    (void)user;
    os_enter();
    return os.now + os_self()->offset;
}

OS_FN void os_sleep(int64_t ns) {
    os_enter();
    os_block_until(os.now + (ns > 0 ? ns : 0));
}

OS_FN os_sock *os_fd(int fd) {
    int id = fd >= 0 && fd < OS_FDS ? os_self()->fds[fd] : 0;
    if (!id) errno = EBADF;
    return id ? os.socks[id - 1] : NULL;
}

OS_FN int os_fd_new(os_sock *s, int from) {
    os_proc *p = os_self();
    for (int fd = from > p->first_fd ? from : p->first_fd; fd < p->fd_limit; fd++) {
        if (p->fds[fd]) continue;
        p->fds[fd] = s->id + 1;
        return fd;
    }
    errno = EMFILE;
    return -1;
}

OS_FN int os_open_sock(int kind, int family) {
    os_sock *s = os_sock_new(os_self(), os_self()->host, kind);
    s->local.family = family;
    int fd = os_fd_new(s, 0);
    if (fd < 0) s->proc = NULL, s->refs = 0;
    return fd;
}

OS_FN int os_socket(int family, int type) { /* it does not block */
    os_enter();
    if (os_site(OS_SOCKET)) return -1;
    if (family != AF_INET && family != AF_UNIX) return errno = EAFNOSUPPORT, -1;
    return os_open_sock(type == SOCK_DGRAM ? OS_DGRAM : OS_STREAM, family);
}

OS_FN int os_eventfd(void) {
    os_enter();
    return os_site(OS_EVENTFD) ? -1 : os_open_sock(OS_EVENT, 0);
}

OS_FN int os_close(int fd) {
    os_enter();
    os_sock *s = os_fd(fd);
    if (!s) return -1;
    os_self()->fds[fd] = 0;
    os_sock_close(s);
    return 0;
}

OS_FN os_address os_address_in(const struct sockaddr *a, socklen_t size) {
    os_address out;
    memset(&out, 0, sizeof out);
    out.family = a->sa_family;
    if (a->sa_family == AF_INET) {
        struct sockaddr_in v4;
        memcpy(&v4, a, sizeof v4);
        out.ip = ntohl(v4.sin_addr.s_addr);
        out.port = ntohs(v4.sin_port);
    } else if (a->sa_family == AF_UNIX) {
        size_t length = (size_t)size - offsetof(struct sockaddr_un, sun_path) - 1;
        CHECK(length < sizeof out.name);
        memcpy(out.name, (const char *)a + offsetof(struct sockaddr_un, sun_path) + 1, length);
    }
    return out;
}

OS_FN void os_address_out(const os_address *from, struct sockaddr *a, socklen_t *size) {
    struct sockaddr_in v4;
    sa_family_t family = (sa_family_t)from->family;
    if (from->family != AF_INET) { /* a Unix address, whose name may be abstract */
        size_t length = strlen(from->name), head = offsetof(struct sockaddr_un, sun_path);
        memcpy(a, &family, sizeof family);
        memset((char *)a + head, 0, length ? 1 : 0);
        memcpy((char *)a + head + 1, from->name, length);
        *size = (socklen_t)(length ? head + 1 + length : sizeof family);
        return;
    }
    memset(&v4, 0, sizeof v4);
    v4.sin_family = AF_INET;
    v4.sin_addr.s_addr = htonl(from->ip);
    v4.sin_port = htons((uint16_t)from->port);
    memcpy(a, &v4, sizeof v4);
    *size = sizeof v4;
}

OS_FN int os_bind(int fd, const struct sockaddr *a, socklen_t size) {
    os_enter();
    os_sock *s = os_fd(fd);
    if (!s || os_site(OS_BIND)) return -1;
    os_address at = os_address_in(a, size);
    if (at.family == AF_INET && !os_is_own(s->host, at.ip)) return errno = EADDRNOTAVAIL, -1;
    if (at.family == AF_INET && !at.port) at.port = (int)os_between(40000, 60000);
    for (int i = 0; i < os.num_socks; i++) {
        const os_sock *o = os.socks[i];
        if (!o->listening || o->host != s->host || o->local.family != at.family) continue;
        if (at.family == AF_UNIX
                ? !strcmp(o->local.name, at.name)
                : o->local.port == at.port && (!o->local.ip || !at.ip || o->local.ip == at.ip))
            return errno = EADDRINUSE, -1;
    }
    s->local = at;
    return 0;
}

OS_FN int os_listen(int fd, int backlog) {
    os_enter();
    os_sock *s = os_fd(fd);
    if (!s || os_site(OS_LISTEN)) return -1;
    for (int i = 0; i < os.num_socks; i++) /* only one socket of a port may listen */
        if (os.socks[i]->listening && os.socks[i]->host == s->host &&
            os_listener(s->host, &s->local))
            return errno = EADDRINUSE, -1;
    s->listening = 1;
    s->backlog = backlog < OS_BACKLOG ? backlog : OS_BACKLOG;
    return 0;
}

OS_FN int os_connect(int fd, const struct sockaddr *a, socklen_t size) {
    os_enter();
    os_sock *s = os_fd(fd);
    if (!s || os_site(OS_CONNECT)) return -1;
    os_address at = os_address_in(a, size);
    int host = at.family == AF_INET ? os_host_of(s->host, at.ip) : s->host;
    s->local.ip = host == s->host && at.family == AF_INET ? at.ip
                                                          : (uint32_t)(0x0A000001 + s->host);
    s->local.port = (int)os_between(40000, 60000);
    s->remote = at;
    if (s->kind == OS_DGRAM) return 0;
    os_say("connects %d to %x:%d", fd, at.ip, at.port);
    if (s->blocking) os_fail("%s calls connect on a socket that blocks", os_self()->name);
    if (at.family == AF_UNIX) {
        os_sock *l = os_listener(s->host, &at);
        if (!l) return errno = ECONNREFUSED, -1;
        if (l->queued >= l->backlog) return errno = EAGAIN, -1;
        s->peer = os_queue(l, s, &at)->id;
        s->connected = 1;
        return 0;
    }
    if (host < 0) return errno = ENETUNREACH, -1;
    s->connecting = 1;
    os_event_add(os_arrival(s->host, host), OS_SYN, s->id, s->id)->where = at;
    errno = EINPROGRESS;
    return -1;
}

OS_FN int os_accept(int fd) {
    os_enter();
    os_sock *s = os_fd(fd);
    if (!s || os_interrupted() || os_site(OS_ACCEPT)) return -1;
    if (s->blocking) os_fail("%s calls accept on a socket that blocks", os_self()->name);
    if (!s->queued) return errno = EAGAIN, -1;
    os_sock *c = os_sock_of(s->queue[0]);
    int got = os_fd_new(c, 0);
    if (got < 0) return -1;
    s->queued--;
    memmove(s->queue, s->queue + 1, (size_t)s->queued * sizeof *s->queue);
    c->proc = os_self();
    c->blocking = 0;
    os_say("accepts %d", got);
    return got;
}

/* Returns os_site for a call on a connection. A permanent failure makes the other end faulty as
   well. */
OS_FN int os_site_of(int site, const os_sock *s) {
    const os_sock *peer = os_sock_of(s->peer);
    if (!os_site(site)) return 0;
    if (errno != EINTR && errno != EAGAIN && peer && peer->proc) peer->proc->faulty = 1;
    return 1;
}

OS_FN size_t os_room(const os_sock *s) {
    const os_sock *peer = os_sock_of(s->peer);
    if (!peer || !peer->refs) return 65536; /* sent data is lost */
    size_t used = peer->size + peer->flying;
    return used < peer->window ? peer->window - used : 0;
}

OS_FN ssize_t os_send(int fd, const void *data, size_t size, int flags) {
    os_enter();
    os_sock *s = os_fd(fd);
    if (!s || os_interrupted() || os_site_of(OS_SEND, s)) return -1;
    if (s->blocking) os_fail("%s calls send on a socket that blocks", os_self()->name);
    if (!(flags & MSG_NOSIGNAL)) os_fail("a send that could raise SIGPIPE");
    if (s->error) return errno = s->error, s->error = 0, -1;
    if (s->is_reset || s->shut || !s->connected) return errno = s->connecting ? EAGAIN : EPIPE, -1;
    size_t room = os_room(s);
    if (size > room) size = room;
    if (!size || os_one_in(20 * os.parts)) {
        os.did[OS_DID_again] += size != 0;
        return errno = EAGAIN, -1;
    }
    size = os_part(size);
    os_sock *peer = os_sock_of(s->peer);
    os_event *e = os_send_to(OS_DATA, peer, s);
    e->data = (char *)malloc(size);
    CHECK(e->data != NULL);
    memcpy(e->data, data, size);
    e->size = size;
    peer->flying += size;
    return (ssize_t)size;
}

OS_FN ssize_t os_recv(int fd, void *data, size_t size, int flags) {
    os_enter();
    os_sock *s = os_fd(fd);
    if (!s || os_interrupted() || os_site_of(OS_RECV, s)) return -1;
    if (s->blocking && !(flags & MSG_DONTWAIT))
        os_fail("%s calls recv on a socket that blocks", os_self()->name);
    if (s->error) return errno = s->error, s->error = 0, -1;
    if (!s->size) return s->is_eof || s->is_reset ? 0 : (errno = EAGAIN, -1);
    size_t some = os_part(size < s->size ? size : s->size);
    memcpy(data, s->in, some);
    if (flags & MSG_PEEK) return (ssize_t)some;
    s->size -= some;
    memmove(s->in, s->in + some, s->size);
    os_sock *peer = os_sock_of(s->peer);
    if (peer && peer->proc) os_poke(peer->proc); /* the peer has room to send again */
    return (ssize_t)some;
}

OS_FN ssize_t os_file_read(os_sock *s, void *data, size_t size);
OS_FN ssize_t os_file_write(const os_sock *s, const void *data, size_t size);

/* A read or write of a descriptor that is no eventfd. This may happen only after a planned close,
   when the number has been reused. */
OS_FN ssize_t os_astray(const char *call, int fd) {
    if (!os.did[OS_DID_closed]) os_fail("%s of descriptor %d, no eventfd", call, fd);
    errno = EINVAL;
    return -1;
}

OS_FN ssize_t os_read(int fd, void *data, size_t size) {
    os_enter();
    os_sock *s = os_fd(fd);
    if (!s || os_interrupted() || os_site(OS_READ)) return -1;
    if (s->kind == OS_DISK) return os_file_read(s, data, size);
    if (s->kind != OS_EVENT || size < 8) return os_astray("read", fd);
    if (!s->count) return errno = EAGAIN, -1;
    memcpy(data, &s->count, 8);
    s->count = 0;
    return 8;
}

OS_FN ssize_t os_write(int fd, const void *data, size_t size) {
    uint64_t more;
    os_enter();
    os_sock *s = os_fd(fd);
    if (!s || os_site(OS_WRITE)) return -1;
    if (s->kind == OS_DISK) return os_file_write(s, data, size);
    if (s->kind != OS_EVENT || size != 8) return os_astray("write", fd);
    memcpy(&more, data, 8);
    s->count += more;
    os_poke(os_self());
    return 8;
}

OS_FN int os_shutdown(int fd, int how) {
    os_enter();
    os_sock *s = os_fd(fd), *peer = s ? os_sock_of(s->peer) : NULL;
    if (!s) return -1;
    if (!s->connected || s->is_reset) return errno = ENOTCONN, -1;
    if (how != SHUT_RD && !s->shut && peer) (void)os_send_to(OS_FIN, peer, s);
    s->shut |= how != SHUT_RD;
    s->is_eof |= how != SHUT_WR;
    return 0;
}

OS_FN int os_events(int fd) {
    const os_sock *s = os_fd(fd);
    int out = 0;
    if (!s) return POLLNVAL;
    if (s->kind == OS_EVENT) return s->count ? POLLIN | POLLOUT : POLLOUT;
    if (s->listening) return s->queued ? POLLIN : 0;
    if (s->connecting) return 0;
    if (s->error) out |= POLLERR | POLLHUP;
    if (!s->connected) return out | POLLOUT | POLLHUP;
    if (s->size || s->is_eof || s->is_reset) out |= POLLIN;
    if (s->is_reset || (s->is_eof && s->shut)) out |= POLLHUP;
    if (s->is_reset || os_room(s)) out |= POLLOUT;
    return out;
}

OS_FN int os_poll(struct pollfd *p, nfds_t count, int timeout_ms) {
    os_enter();
    int64_t until = timeout_ms < 0 ? INT64_MAX : os.now + timeout_ms * OS_MS;
    if (os_site(OS_POLL)) return -1;
    for (;;) {
        int ready = 0;
        for (nfds_t i = 0; i < count; i++) {
            int events = p[i].fd < 0 ? 0 : os_events(p[i].fd);
            p[i].revents = (short)(events & (p[i].events | POLLERR | POLLHUP | POLLNVAL));
            ready += p[i].revents != 0;
        }
        if (ready || os.now >= until) return ready;
        if (os_interrupted()) return -1;
        os_me()->polls = 1;
        os_block_until(until);
        if (os.failed[0]) os_switch();
    }
}

OS_FN int os_getsockname(int fd, struct sockaddr *a, socklen_t *size) {
    os_enter();
    const os_sock *s = os_fd(fd);
    if (!s || os_site(OS_GETSOCKNAME)) return -1;
    os_address_out(&s->local, a, size);
    return 0;
}

OS_FN int os_getpeername(int fd, struct sockaddr *a, socklen_t *size) {
    os_enter();
    const os_sock *s = os_fd(fd);
    if (!s) return -1;
    if (!s->connected || s->is_reset) return errno = ENOTCONN, -1;
    os_address_out(&s->remote, a, size);
    return 0;
}

OS_FN int os_setsockopt(int fd, int level, int option, const void *value, socklen_t size) {
    (void)level, (void)option, (void)value, (void)size;
    os_enter();
    return !os_fd(fd) || os_site(OS_SETSOCKOPT) ? -1 : 0;
}

OS_FN int os_getsockopt(int fd, int level, int option, void *value, socklen_t *size) {
    (void)level;
    os_enter();
    os_sock *s = os_fd(fd);
    if (!s || os_site(OS_GETSOCKOPT)) return -1;
    if (option != SO_ERROR) return os_fail("getsockopt of %d", option), -1;
    memcpy(value, &s->error, sizeof s->error);
    *size = sizeof s->error;
    s->error = 0;
    return 0;
}

OS_FN int os_fcntl(int fd, int command, int value) {
    os_enter();
    os_sock *s = os_fd(fd);
    if (!s) return -1;
    if (command == F_DUPFD_CLOEXEC) {
        int copy = os_fd_new(s, value);
        s->refs += copy >= 0;
        return copy;
    }
    if (command == F_GETFL) return s->blocking ? 0 : O_NONBLOCK;
    if (command == F_SETFL) s->blocking = !(value & O_NONBLOCK);
    return 0;
}

OS_FN int os_same_user(int fd) { return os_fd(fd) != NULL; }

/* ---- threads --------------------------------------------------------------------------------- */

OS_FN int os_thread_create(pthread_t *out, const pthread_attr_t *attr, void *(*fn)(void *),
                           void *arg) {
    (void)attr;
    os_enter();
    if (os_site(OS_THREAD)) return errno;
    os_task *t = os_task_free();
    if (!t) return EAGAIN;
    os_task_begin(t, os_self(), fn, arg);
    *out = (pthread_t)(t - os.tasks);
    return 0;
}

OS_FN int os_thread_join(pthread_t thread, void **out) {
    int i = (int)(intptr_t)thread; /* in musl pthread_t is a pointer */
    (void)out;
    os_enter();
    while (os.tasks[i].state != OS_DONE) {
        os_me()->joins = i;
        os_block_until(INT64_MAX);
    }
    os.tasks[i].state = OS_FREE;
    return 0;
}

OS_FN int os_thread_detach(pthread_t thread) {
    os_task *t = &os.tasks[(int)(intptr_t)thread];
    t->detached = 1;
    if (t->state == OS_DONE) t->state = OS_FREE;
    return 0;
}

OS_FN void os_futex_wait(uint32_t *word, uint32_t expected, int64_t timeout_ns, int shared) {
    (void)shared;
    os_enter();
    if (__atomic_load_n(word, __ATOMIC_ACQUIRE) != expected || timeout_ns <= 0) return;
    os_me()->word = word;
    os_block_until(os.now + timeout_ns);
}

OS_FN void os_futex_wake_all(uint32_t *word, int shared) {
    (void)shared;
    for (int i = 0; i < OS_TASKS; i++)
        if (os.tasks[i].state == OS_BLOCKED && os.tasks[i].word == word)
            os.tasks[i].state = OS_READY;
    os_enter();
}

OS_FN void os_lock(uint32_t *lock) {
    os_yield();
    while (*lock) {
        os_me()->word = lock;
        os_block_until(INT64_MAX);
    }
    *lock = 1;
}

OS_FN void os_unlock(uint32_t *lock) {
    *lock = 0;
    os_futex_wake_all(lock, 0);
}

/* ---- the rest -------------------------------------------------------------------------------- */

OS_FN int os_random(void *to, size_t size) {
    unsigned char *out = (unsigned char *)to;
    os_enter();
    if (os_site(OS_RANDOM)) return 0;
    for (size_t i = 0; i < size; i++) out[i] = (unsigned char)os_rand(256);
    return 1;
}

OS_FN const char *os_env(const char *name) {
    if (!strcmp(name, "FSDP_STORE_SERVED")) return os_self()->served;
    return !strcmp(name, "FSDP_TOKEN") ? os_self()->token : NULL;
}

OS_FN void *os_alloc(size_t size, size_t align, void *user) {
    os_proc *p = os_self();
    (void)align, (void)user;
    if (os_site(OS_ALLOC)) return NULL;
    os_block *b = (os_block *)malloc(sizeof *b + 16 + size);
    CHECK(b != NULL);
    b->size = size;
    b->next = &p->blocks, b->before = p->blocks.before;
    b->before->next = b->next->before = b;
    p->num_blocks++;
    return (char *)b + sizeof *b + (16 - sizeof *b % 16) % 16;
}

OS_FN void os_free(void *ptr, size_t size, void *user) {
    (void)user;
    if (!ptr) return;
    os_block *b = (os_block *)(void *)((char *)ptr - sizeof *b - (16 - sizeof *b % 16) % 16);
    if (b->size != size) os_fail("a free of another size");
    b->next->before = b->before, b->before->next = b->next;
    os_self()->num_blocks--;
    free(b);
}

OS_FN int os_file(const char *name) { /* index of the file, or of the first free entry */
    int free_one = 0;
    for (int i = OS_FILES - 1; i >= 0; i--) {
        if (!strcmp(os.files[i].name, name)) return i;
        if (!os.files[i].name[0]) free_one = i;
    }
    return free_one;
}

OS_FN int os_open(const char *name, int flags, ...) {
    os_enter();
    int i = os_file(name), is_there = os.files[i].name[0] != 0;
    if (os_site(OS_OPEN)) return -1;
    if (!(flags & O_CREAT) && !is_there) return errno = ENOENT, -1;
    if ((flags & O_EXCL) && is_there) return errno = EEXIST, -1;
    if (!(flags & O_CLOEXEC)) os_fail("a file that outlives an exec");
    int fd = os_open_sock(OS_DISK, 0);
    if (fd < 0) return -1;
    os_fd(fd)->file = i;
    if (!is_there) os.files[i].size = 0;
    snprintf(os.files[i].name, sizeof os.files[i].name, "%s", name);
    return fd;
}

OS_FN int os_fstat(int fd, struct stat *out) {
    os_enter();
    const os_sock *s = os_fd(fd);
    if (!s) return -1;
    memset(out, 0, sizeof *out);
    out->st_mode = s->kind == OS_DISK ? S_IFREG | 0600 : S_IFSOCK;
    return 0;
}

OS_FN ssize_t os_file_read(os_sock *s, void *data, size_t size) {
    size_t left = os.files[s->file].size - (size_t)s->count, some = size < left ? size : left;
    memcpy(data, os.files[s->file].text + s->count, some);
    s->count += some;
    return (ssize_t)some;
}

OS_FN ssize_t os_file_write(const os_sock *s, const void *data, size_t size) {
    size_t at = os.files[s->file].size;
    if (at + size > sizeof os.files[0].text) return errno = ENOSPC, -1;
    memcpy(os.files[s->file].text + at, data, size);
    os.files[s->file].size += size;
    return (ssize_t)size;
}

OS_FN int os_rename(const char *from, const char *to) {
    os_enter();
    int i = os_file(from), k = os_file(to);
    if (os_site(OS_RENAME)) return -1;
    memcpy(os.files[k].text, os.files[i].text, sizeof os.files[k].text);
    os.files[k].size = os.files[i].size;
    snprintf(os.files[k].name, sizeof os.files[k].name, "%s", to);
    if (i != k) memset(&os.files[i], 0, sizeof os.files[i]);
    return 0;
}

OS_FN int os_unlink(const char *name) {
    os_enter();
    int i = os_file(name);
    if (!os.files[i].name[0]) return errno = ENOENT, -1;
    memset(&os.files[i], 0, sizeof os.files[i]);
    return 0;
}

/* Resolves node-K, and self-K, which is a loopback address on its own host. */
OS_FN int os_resolve(const char *host, uint32_t *ip) {
    unsigned a, b, c, d;
    int k = strlen(host) == 6 ? host[5] - '0' : -1;
    if (sscanf(host, "%u.%u.%u.%u", &a, &b, &c, &d) == 4)
        return *ip = a << 24 | b << 16 | c << 8 | d, 1;
    if (!strcmp(host, "localhost")) return *ip = INADDR_LOOPBACK, 1;
    if (k < 0 || k >= OS_HOSTS) return 0;
    *ip = (uint32_t)(0x0A000001 + k);
    if (!strncmp(host, "self-", 5) && k == os_self()->host) *ip = 0x7F000101;
    return 1;
}

/* Replaces the C library's getaddrinfo, which the store calls through a static function. */
int getaddrinfo(const char *host, const char *service, const struct addrinfo *hints,
                struct addrinfo **out);
void freeaddrinfo(struct addrinfo *list);
int getaddrinfo(const char *host, const char *service, const struct addrinfo *hints,
                struct addrinfo **out) {
    uint32_t ip;
    (void)service;
    os_enter();
    int is_name = host[strspn(host, "0123456789.")] != 0;
    if (is_name && (hints->ai_flags & AI_NUMERICHOST)) return EAI_NONAME;
    if (is_name && os_one_in(os.slow_names)) os_block_until(os.now + os_between(1, 2000) * OS_MS);
    if (os_site(OS_RESOLVE) || !os_resolve(host, &ip)) return EAI_AGAIN;
    struct addrinfo *a = (struct addrinfo *)calloc(1, sizeof *a + sizeof(struct sockaddr_in));
    CHECK(a != NULL);
    struct sockaddr_in *v4 = (struct sockaddr_in *)(void *)(a + 1);
    v4->sin_family = AF_INET;
    v4->sin_addr.s_addr = htonl(ip);
    a->ai_family = AF_INET;
    a->ai_socktype = SOCK_STREAM;
    a->ai_addr = (struct sockaddr *)(void *)v4;
    a->ai_addrlen = sizeof *v4;
    *out = a;
    return 0;
}
void freeaddrinfo(struct addrinfo *list) { free(list); }

/* The code that is included from here on calls the functions of this file. */
#define close                os_close
#define bind                 os_bind
#define listen               os_listen
#define connect              os_connect
#define send                 os_send
#define recv                 os_recv
#define read                 os_read
#define write                os_write
#define shutdown             os_shutdown
#define poll                 os_poll
#define getsockname          os_getsockname
#define getpeername          os_getpeername
#define setsockopt           os_setsockopt
#define getsockopt           os_getsockopt
#define fcntl                os_fcntl
#define open                 os_open
#define fstat(fd, out)       os_fstat(fd, out)
#define rename               os_rename
#define unlink               os_unlink
#define pthread_create       os_thread_create
#define pthread_join         os_thread_join
#define pthread_detach       os_thread_detach
#define fsdpi_libc_alloc     os_alloc
#define fsdpi_libc_free      os_free
#define fsdpi_random         os_random
#define fsdpi_futex_wait     os_futex_wait
#define fsdpi_futex_wake_all os_futex_wake_all
#define fsdpi_lock           os_lock
#define fsdpi_unlock         os_unlock
#define fsdpi_sleep_ns       os_sleep
#define fsdpi_same_user      os_same_user
#define fsdpi_accept         os_accept
#define fsdpi_socket         os_socket
#define fsdpi_block_signals(more) (more)
#define fsdpi_set_blocked_signals(blocked) (void)(blocked)
#define fsdpi_event          os_eventfd
#define fsdpi_env            os_env
#undef FSDPI_LOAD
#undef FSDPI_STORE
#define FSDPI_LOAD(p)     (os_yield(), __atomic_load_n((p), __ATOMIC_ACQUIRE))
#define FSDPI_STORE(p, v) (__atomic_store_n((p), (v), __ATOMIC_RELEASE), os_yield())
#endif
