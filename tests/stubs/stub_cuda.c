/* stub_cuda.c - the CUDA runtime on the host: streams are threads with a queue, device memory is
   the heap. See stub.h. For tests only.

   SPDX-License-Identifier: MIT */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE 1 /* the POSIX calls, also with -std=c99 */
#endif
#include "stub_core.h"

#include <fcntl.h>    /* open */
#include <limits.h>   /* INT_MAX */
#include <pthread.h>  /* pthread_create, pthread_mutex_lock, pthread_cond_wait */
#include <stdarg.h>   /* va_list */
#include <stdio.h>    /* fprintf, snprintf */
#include <stdlib.h>   /* abort, calloc, free, getenv, posix_memalign */
#include <string.h>   /* memcpy, memset, strcmp */
#include <sys/mman.h> /* mmap, mprotect */
#include <time.h>     /* clock_gettime */

enum { NAMES = 128, RULES = 64, RING = 1024, ALIGN = 256, LANES = 8, KERNELS = 512 };

/* The body of an op. A graph keeps it and runs it many times. */
typedef struct work {
    const char *name;
    void (*body)(void *arg); /* may be NULL */
    void *arg;
    void (*release)(void *arg); /* called after the last run; may be NULL */
} work;

typedef struct op {
    struct op *next;
    uint64_t seq;
    work w;
    int num_deps;
    stub_point deps[1]; /* num_deps elements */
} op;

/* A node of a graph: work, or one of the two halves of an order between its lanes. */
typedef struct node {
    struct node *next;
    int lane;   /* lane of the stream in which it was captured; 0: the origin stream */
    int record; /* number of an event's record; -1: none */
    int wait;   /* number of the record that it waits for; -1: none */
    work w;
} node;

struct CUgraph_st {
    int uses, device, num_lanes, num_records; /* uses: by the caller, executables and launches */
    node *first, **last;
};

struct CUgraphExec_st {
    cudaGraph_t graph;
    cudaStream_t lanes[LANES]; /* [0] is the launch's stream */
    stub_point *points;        /* positions of the records in the last launch */
    stub_clock *clocks;
};

/* A capture under way. Its number is never reused: it identifies events of ended captures. */
typedef struct capture {
    struct capture *next;
    uint64_t number;
    enum cudaStreamCaptureMode mode;
    pthread_t thread; /* that began the capture */
    int invalid, num_lanes;
    cudaStream_t lanes[LANES];
    int work[LANES];        /* number of nodes with work so far */
    int seen[LANES][LANES]; /* [lane][other]: number of nodes of another lane before it */
    cudaGraph_t graph;
} capture;

/* Invariant: ops complete in the order of their numbers; completed <= issued. A destroyed stream is
   reused for a new one once its queue is empty: numbers continue, so that old events stay valid. */
struct CUstream_st {
    struct CUstream_st *next;
    capture *capture; /* NULL: not captured; receives its ops */
    int lane;         /* index in the capture */
    int device, blocking, alive, priority, actor;
    int has_thread;
    uint64_t issued, completed;
    op *head, **tail, *current; /* current: the running op; a forked child can still reach it */
    pthread_cond_t work, moved; /* it has an op to run; it has completed one */
    stub_clock clock;
};

struct CUevent_st {
    stub_point point;  /* position of the last record */
    stub_clock *clock; /* its 1 KiB are allocated at the first record: a world makes 2,048 events */
    uint64_t capture;  /* capture of the last record; 0: none */
    int record;        /* number of the record in that capture */
    int seen[LANES];
    double issued_ms; /* host time of the last record: the event's time */
};

/* The last write of 4 bytes, and reads after it by up to four actors. A slot applies to the bytes
   in its mask; actor 0 means none. Slot 0 is the writer. */
enum { SLOTS = 5 };
typedef struct cell {
    uint32_t time[SLOTS];
    uint8_t actor[SLOTS], mask[SLOTS];
} cell;

typedef struct block {
    struct block *next;
    stub_memory m;
    int registered;
    size_t mapped; /* bytes of separate pages, which can be protected; 0: from the heap */
    cell *shadow;  /* allocated at the first checked access to a part */
    cell whole;    /* the last write of the whole block before that; cells without access take it */
    size_t end;    /* no cell from here on was accessed */
} block;

/* A host thread, present or former. */
typedef struct host {
    struct host *next;
    int actor, alive;
    stub_clock clock;
} host;

typedef struct rule {
    const char *name; /* NULL: any */
    char text[48];
    int nth, code;
} rule;

typedef void (*kernel)(const void *params, unsigned block_index);

typedef struct state {
    struct state *inherited; /* state of the process that forked this one; only kept */
    struct CUstream_st *streams;
    block *blocks;
    block *doomed; /* freed after a sticky error: ops may still use them */
    capture *captures;
    uint64_t num_captures; /* so far */
    host *hosts;
    int actors;
    int64_t live[STUB_KINDS];
    struct {
        const char *name;
        int64_t calls;
    } names[NAMES];
    int num_names;
    int64_t calls, waits;
    int open;    /* running ops: device memory is accessible */
    int is_used; /* CUDA has been called, so it fails in forked children */
    kernel loaded[KERNELS];
    int num_loaded;
    int failed, sticky;
    int64_t races;
    char race[512];
    const char *steps[STUB_ACTORS][RING]; /* names of the last steps of each actor */
} state;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t left_driver = PTHREAD_COND_INITIALIZER; /* in_driver is smaller */
static pthread_key_t thread_key;
static state *now;
/* Kept in forked children. */
static int settings[STUB_SETTINGS] = {0, 0, 0, 8,   NCCL_VERSION_CODE, 16384,          1, 0, 0,
                                      0, 0, 1, 132, INT_MAX,           CUDART_VERSION, 2};
static rule rules[RULES];
static int num_rules, checks, checks_die, is_set_up, is_forked, ignored_wait;
static int in_driver; /* threads in a cudaFree that waits, with STUB_DRIVER */

static __thread int my_device;
static __thread cudaError_t my_error;
static __thread state *my_state; /* state of my_host and my_stream */
static __thread host *my_host;
static __thread cudaStream_t my_stream;             /* cudaStreamPerThread */
static __thread cudaStream_t running;               /* stream whose op this thread runs */
static __thread enum cudaStreamCaptureMode my_mode; /* for captures; the default is global */

/* ---- process --------------------------------------------------------------------------------- */

void stub_die(const char *format, ...) {
    va_list args;
    va_start(args, format);
    fprintf(stderr, "stub: ");
    vfprintf(stderr, format, args);
    fprintf(stderr, "\n");
    va_end(args);
    abort();
}

static void new_state(void) {
    state *s = (state *)calloc(1, sizeof *s);
    if (!s) stub_die("out of memory");
    s->inherited = now;
    now = s;
}

static void after_fork(void) {
    pthread_mutex_init(&lock, NULL);
    pthread_cond_init(&left_driver, NULL);
    is_forked |= now && now->is_used;
    new_state();
}

/* Threads that join an ended thread know its completed steps. The stub does not see joins, so it
   gives them to all threads: the checker may miss a race, but does not report a false one. */
static void thread_ends(void *value) {
    host *me = (host *)value;
    pthread_mutex_lock(&lock);
    for (host *h = now->hosts; h && my_state == now; h = h->next)
        for (int i = 0; i < STUB_ACTORS; i++)
            if (h->clock.at[i] < me->clock.at[i]) h->clock.at[i] = me->clock.at[i];
    me->alive = 0;
    pthread_mutex_unlock(&lock);
}

static int env_int(const char *name, int fallback) {
    const char *text = getenv(name);
    return text && *text ? atoi(text) : fallback;
}

static void add_rule(const char *name, size_t length, int nth, int code) {
    if (num_rules == RULES || length >= sizeof rules[0].text) stub_die("too many failures");
    rule *r = &rules[num_rules++];
    memcpy(r->text, name, length);
    r->text[length] = 0;
    r->name = length ? r->text : NULL;
    r->nth = nth;
    r->code = code;
}

static void read_environment(void) {
    const char *text = getenv("FSDP_STUB_FAIL");
    settings[STUB_SYNC] = env_int("FSDP_STUB_SYNC", 0);
    settings[STUB_PROGRESS] = env_int("FSDP_STUB_PROGRESS", 0);
    settings[STUB_DEVICES] = env_int("FSDP_STUB_DEVICES", settings[STUB_DEVICES]);
    settings[STUB_NCCL_VERSION] = env_int("FSDP_STUB_NCCL_VERSION", settings[STUB_NCCL_VERSION]);
    settings[STUB_PROTECT] = env_int("FSDP_STUB_PROTECT", 0);
    settings[STUB_SMS] = env_int("FSDP_STUB_SMS", settings[STUB_SMS]);
    settings[STUB_DRIVER_VERSION] = env_int("FSDP_STUB_DRIVER_VERSION", CUDART_VERSION);
    settings[STUB_BLOCKING] = env_int("CUDA_LAUNCH_BLOCKING", 0);
    const char *loading = getenv("CUDA_MODULE_LOADING");
    settings[STUB_LAZY] = !loading || strcmp(loading, "EAGER") != 0;
    checks = checks_die = env_int("FSDP_STUB_CHECKS", 0);
    if (checks) settings[STUB_SYNC] = 1;
    while (text && *text) {
        const char *colon = strchr(text, ':');
        char *end = NULL;
        long nth = colon ? strtol(colon + 1, &end, 10) : 0, code = 0;
        if (end && *end == ':') code = strtol(end + 1, &end, 10);
        if (nth < 1 || code < 1) stub_die("FSDP_STUB_FAIL: expected name:nth:code, got %s", text);
        add_rule(text, (size_t)(colon - text), (int)nth, (int)code);
        text = *end == ',' ? end + 1 : NULL;
    }
}

/* Takes the lock and sets up the stub. Every entry point calls it. */
static state *begin(void) {
    pthread_mutex_lock(&lock);
    if (!is_set_up) {
        is_set_up = 1;
        read_environment();
        pthread_key_create(&thread_key, thread_ends);
        pthread_atfork(NULL, NULL, after_fork);
    }
    if (!now) new_state();
    if (my_state != now) {
        my_state = now;
        my_host = NULL;
        my_stream = NULL;
    }
    return now;
}

static void end(void) { pthread_mutex_unlock(&lock); }

void stub_set(int setting, int value) {
    begin();
    settings[setting] = value;
    end();
}

int stub_get(int setting) {
    begin();
    int value = settings[setting];
    end();
    return value;
}

int stub_is_forked(void) {
    begin();
    int forked = is_forked;
    end();
    return forked;
}

/* ---- counts and injected failures ------------------------------------------------------------ */

static int place_of(state *s, const char *name) {
    int i = 0;
    while (i < s->num_names && strcmp(s->names[i].name, name)) i++;
    if (i == NAMES) stub_die("too many functions");
    if (i == s->num_names) s->names[s->num_names++].name = name;
    return i;
}

static int match_rules(state *s, const char *name) {
    int code = 0;
    for (int i = 0; i < num_rules; i++) {
        rule *r = &rules[i];
        if (r->nth < 1 || (r->name && strcmp(r->name, name))) continue;
        if (--r->nth == 0 && !code) code = r->code;
    }
    s->failed += code != 0;
    return code;
}

static void count_call(state *s, const char *name) {
    s->names[place_of(s, name)].calls++;
    s->calls++;
}

int stub_enter(const char *name) {
    state *s = begin();
    count_call(s, name);
    int code = match_rules(s, name);
    end();
    return code;
}

int64_t stub_count(const char *name) {
    state *s = begin();
    int64_t calls = s->calls;
    if (name) {
        calls = 0;
        for (int i = 0; i < s->num_names; i++)
            if (!strcmp(s->names[i].name, name)) calls = s->names[i].calls;
    }
    end();
    return calls;
}

void stub_count_reset(void) {
    state *s = begin();
    for (int i = 0; i < s->num_names; i++) s->names[i].calls = 0;
    s->calls = 0;
    end();
}

void stub_fail(const char *name, int nth, int code) {
    begin();
    add_rule(name ? name : "", name ? strlen(name) : 0, nth, code);
    end();
}

int stub_failed(void) {
    int failed = begin()->failed;
    end();
    return failed;
}

void stub_fail_clear(void) {
    state *s = begin();
    num_rules = 0;
    s->sticky = 0;
    end();
    my_error = cudaSuccess;
}

int64_t stub_live(int kind) {
    int64_t live = begin()->live[kind];
    end();
    return live;
}

void stub_live_add(int kind, int64_t amount) {
    begin()->live[kind] += amount;
    end();
}

/* ---- race checker: clocks -----------------------------------------------------------------------
   Each op of a stream and each access of a host thread is a step of that actor. The clocks say
   whether a step comes after an earlier one; they are joined where CUDA orders. Under lock. */

static void join(stub_clock *clock, const stub_clock *with) {
    if (checks && with) /* NULL: of an event that was not recorded */
        for (int i = 0; i <= now->actors; i++)
            if (clock->at[i] < with->at[i]) clock->at[i] = with->at[i];
}

static int new_actor(state *s) {
    if (++s->actors == STUB_ACTORS) stub_die("too many streams and threads for the race checker");
    return s->actors;
}

static void step(state *s, stub_clock *clock, int actor, const char *name) {
    s->steps[actor][++clock->at[actor] % RING] = name;
}

/* Returns the calling thread's host. A new one knows everything that other threads have seen so
   far. */
static host *myself(state *s) {
    if (my_host) return my_host;
    host *h = s->hosts;
    while (h && h->alive) h = h->next;
    if (!h) {
        h = (host *)calloc(1, sizeof *h);
        if (!h) stub_die("out of memory");
        if (checks) h->actor = new_actor(s);
        h->next = s->hosts;
        s->hosts = h;
    }
    for (host *other = s->hosts; other; other = other->next) join(&h->clock, &other->clock);
    h->alive = 1;
    my_host = h;
    pthread_setspecific(thread_key, h);
    return h;
}

stub_thread stub_thread_get(void) {
    stub_thread t = {my_device, NULL};
    t.host = myself(begin());
    end();
    return t;
}

void stub_thread_set(stub_thread thread) {
    begin();
    my_device = thread.device;
    my_host = (host *)thread.host;
    end();
}

/* ---- race checker: memory -------------------------------------------------------------------- */

static block *find_block(state *s, const void *ptr) {
    const char *p = (const char *)ptr;
    block *b = s->blocks;
    while (b && !(p >= b->m.base && p < b->m.base + b->m.size)) b = b->next;
    return b;
}

/* Writes the origin of a step for the text. */
static const char *who(state *s, int actor, uint32_t time, char *text, size_t size) {
    const char *name = s->steps[actor][time % RING];
    struct CUstream_st *t = s->streams;
    while (t && t->actor != actor) t = t->next;
    snprintf(text, size, "%s (%s %d, step %u)", name ? name : "?",
             !t                 ? "host thread"
             : t->blocking == 2 ? "default stream"
                                : "stream",
             actor, time);
    return text;
}

static void race(state *s, const block *b, size_t at, const char *what, int actor, uint32_t time,
                 const char *before, int other, uint32_t then) {
    char a[128], c[128];
    if (s->races++) return;
    snprintf(s->race, sizeof s->race,
             "%s at byte %zu of the allocation %p (%zu bytes) by %s is not ordered behind %s by %s",
             what, at, (void *)b->m.base, b->m.size, who(s, actor, time, a, sizeof a), before,
             who(s, other, then, c, sizeof c));
    if (checks_die) stub_die("race: %s", s->race);
}

static int is_before(const cell *k, int slot, const stub_clock *clock) {
    return !k->actor[slot] || clock->at[k->actor[slot]] >= k->time[slot];
}

static void note_read(cell *k, int actor, uint32_t time, uint8_t mask, const stub_clock *clock) {
    int slot = 0;
    for (int i = 1; i < SLOTS && !slot; i++) /* the same reader */
        if (k->actor[i] == actor && (k->mask[i] & ~mask) == 0) slot = i;
    for (int i = 1; i < SLOTS && !slot; i++)
        if (!k->actor[i] || (is_before(k, i, clock) && (k->mask[i] & ~mask) == 0)) slot = i;
    if (!slot) slot = 1; /* drops a reader: a race may be missed */
    k->actor[slot] = (uint8_t)actor;
    k->time[slot] = time;
    k->mask[slot] = mask;
}

static void note_write(cell *k, int actor, uint32_t time, uint8_t mask) {
    for (int i = 1; i < SLOTS; i++)
        if ((k->mask[i] & ~mask) == 0) k->actor[i] = 0;
    k->actor[0] = (uint8_t)actor;
    k->time[0] = time;
    k->mask[0] = mask;
}

static void check_access(state *s, const void *ptr, size_t nbytes, int write, int actor,
                         const stub_clock *clock) {
    block *b = find_block(s, ptr);
    size_t at = b ? (size_t)((const char *)ptr - b->m.base) : 0;
    uint32_t time = clock->at[actor];
    int seen = 0;
    if (!nbytes) return;
    if (!b || nbytes > b->m.size - at) {
        char text[128];
        if (!s->races++)
            snprintf(s->race, sizeof s->race,
                     "%zu bytes at %p that %s accesses are no memory of the device", nbytes, ptr,
                     who(s, actor, time, text, sizeof text));
        if (checks_die) stub_die("race: %s", s->race);
        return;
    }
    if (!b->shadow && write && nbytes == b->m.size) { /* as new memory is cleared */
        if (!is_before(&b->whole, 0, clock))
            race(s, b, 0, "the write", actor, time, "the write", b->whole.actor[0],
                 b->whole.time[0]);
        note_write(&b->whole, actor, time, 15);
        return;
    }
    if (!b->shadow) b->shadow = (cell *)calloc(b->m.size / 4 + 1, sizeof(cell));
    if (!b->shadow) stub_die("out of memory for the race checker");
    const size_t last = (at + nbytes - 1) / 4;
    cell none, before, after; /* none; the last cell of which all bytes were accessed */
    int is_known = 0;
    memset(&none, 0, sizeof none);
    after = before = none;
    if (last >= b->end) b->end = last + 1;
    for (size_t i = at / 4; i <= last; i++) {
        cell *k = &b->shadow[i];
        uint8_t mask = 15;
        if (is_known && i < last && !memcmp(k, &before, sizeof before)) { /* most of an array */
            *k = after;
            continue;
        }
        before = *k;
        if (b->whole.actor[0] && !memcmp(k, &none, sizeof none)) *k = b->whole;
        if (i * 4 < at) mask = (uint8_t)(mask & (15u << (at - i * 4)));
        if (i * 4 + 4 > at + nbytes) mask = (uint8_t)(mask & (15u >> (i * 4 + 4 - at - nbytes)));
        for (int slot = 0; slot < (write ? SLOTS : 1) && !seen; slot++) {
            if (is_before(k, slot, clock) || !(k->mask[slot] & mask)) continue;
            seen = 1;
            race(s, b, i * 4, write ? "the write" : "the read", actor, time,
                 slot ? "the read" : "the write", k->actor[slot], k->time[slot]);
        }
        if (write) note_write(k, actor, time, mask);
        else note_read(k, actor, time, mask, clock);
        after = *k;
        is_known = mask == 15;
    }
}

static void check_free(state *s, const block *b, const char *name) {
    host *h = myself(s);
    if (!b->shadow && !b->whole.actor[0]) return;
    step(s, &h->clock, h->actor, name);
    if (!is_before(&b->whole, 0, &h->clock)) {
        race(s, b, 0, "the end", h->actor, h->clock.at[h->actor], "the write", b->whole.actor[0],
             b->whole.time[0]);
        return;
    }
    for (size_t i = 0; i < b->end; i++)
        for (int slot = 0; slot < SLOTS; slot++) {
            const cell *k = &b->shadow[i];
            if (is_before(k, slot, &h->clock)) continue;
            race(s, b, i * 4, "the end", h->actor, h->clock.at[h->actor],
                 slot ? "the read" : "the write", k->actor[slot], k->time[slot]);
            return;
        }
}

/* A kernel that reads pinned memory waits for the bus: such reads are counted. */
void fsdp_stub_touch(const void *ptr, size_t nbytes, int write) {
    if (!checks) return;
    if (!running) stub_die("fsdp_stub_touch outside of a kernel");
    state *s = begin();
    const block *b = find_block(s, ptr);
    if (!write && b && b->m.type == cudaMemoryTypeHost)
        s->names[place_of(s, "read of pinned memory")].calls++;
    check_access(s, ptr, nbytes, write, running->actor, &running->clock);
    end();
}

static void host_access(const void *ptr, size_t nbytes, int write, const char *name) {
    state *s = begin();
    host *h = myself(s);
    if (checks && find_block(s, ptr)) {
        step(s, &h->clock, h->actor, name);
        check_access(s, ptr, nbytes, write, h->actor, &h->clock);
    }
    end();
}

void stub_host_read(const void *ptr, size_t nbytes) { host_access(ptr, nbytes, 0, "the host"); }
void stub_host_write(const void *ptr, size_t nbytes) { host_access(ptr, nbytes, 1, "the host"); }

void stub_checks(int on) {
    state *s = begin();
    if (on && !checks && (s->streams || s->hosts || s->blocks))
        stub_die("stub_checks comes too late: there are streams or allocations");
    checks = on;
    if (on) settings[STUB_SYNC] = 1;
    end();
}

int64_t stub_races(void) {
    int64_t races = begin()->races;
    end();
    return races;
}

const char *stub_race_text(void) {
    const char *text = begin()->race;
    end();
    return text;
}

void stub_ignore_wait(int nth) {
    begin();
    ignored_wait = nth;
    end();
}

int64_t stub_waits(void) {
    int64_t waits = begin()->waits;
    end();
    return waits;
}

/* ---- streams --------------------------------------------------------------------------------- */

static int is_done(stub_point p) { return !p.stream || p.stream->completed >= p.seq; }

static void wait_done(stub_point p) {
    while (!is_done(p)) pthread_cond_wait(&p.stream->moved, &lock);
}

static void protect(char *from, const char *to, int is_open) {
    if (from < to)
        mprotect(from, (size_t)(to - from), is_open ? PROT_READ | PROT_WRITE : PROT_NONE);
}

/* Makes device memory accessible while ops run, if the host must not access it. Newer blocks come
   first and have higher addresses: one call of the kernel opens a whole run of neighbours. */
static void open_memory(state *s, int delta) {
    char *from = NULL, *to = NULL;
    s->open += delta;
    if (s->open > 1 || (s->open == 1 && delta < 0)) return;
    for (block *b = s->blocks; b; b = b->next) {
        if (!b->mapped) continue;
        if (b->m.base + b->mapped != from) {
            protect(from, to, s->open);
            to = b->m.base + b->mapped;
        }
        from = b->m.base;
    }
    protect(from, to, s->open);
}

/* Waits for the op's dependencies, runs it without the lock, and marks it as complete. */
static void run_op(cudaStream_t s, op *o) {
    cudaStream_t outer = running;
    stub_point before = {s, o->seq - 1};
    s->current = o;
    wait_done(before);
    for (int i = 0; i < o->num_deps; i++) wait_done(o->deps[i]);
    if (o->w.body) {
        open_memory(now, 1);
        end();
        running = s;
        o->w.body(o->w.arg);
        if (o->w.release) o->w.release(o->w.arg);
        running = outer;
        pthread_mutex_lock(&lock);
        open_memory(now, -1);
    }
    s->completed = o->seq;
    s->current = NULL;
    pthread_cond_broadcast(&s->moved);
    free(o);
}

static void *stream_main(void *arg) {
    cudaStream_t s = (cudaStream_t)arg;
    pthread_mutex_lock(&lock);
    my_device = s->device;
    while (s->alive || s->head) {
        op *o = s->head;
        if (!o) {
            pthread_cond_wait(&s->work, &lock);
            continue;
        }
        s->current = o; /* before it leaves the list: a fork may happen in between */
        s->head = o->next;
        if (!s->head) s->tail = &s->head;
        run_op(s, o);
    }
    s->has_thread = 0;
    end();
    return NULL;
}

static cudaStream_t new_stream(state *s, int device, int blocking, int priority) {
    struct CUstream_st *t = s->streams;
    while (t && (t->alive || t->has_thread || t->completed < t->issued)) t = t->next;
    if (!t) {
        t = (struct CUstream_st *)calloc(1, sizeof *t);
        if (!t) stub_die("out of memory");
        pthread_cond_init(&t->work, NULL);
        pthread_cond_init(&t->moved, NULL);
        if (checks) t->actor = new_actor(s);
        t->next = s->streams;
        s->streams = t;
    }
    t->tail = &t->head;
    t->alive = 1;
    t->device = device;
    t->blocking = blocking;
    t->priority = priority;
    return t;
}

/* Returns the legacy default stream of a device: blocking is 2. */
static cudaStream_t legacy_of(state *s, int device) {
    struct CUstream_st *t = s->streams;
    while (t && !(t->blocking == 2 && t->device == device)) t = t->next;
    return t ? t : new_stream(s, device, 2, 0);
}

static cudaStream_t resolve(state *s, cudaStream_t handle, int device) {
    struct CUstream_st *t = s->streams;
    if (!handle || handle == cudaStreamLegacy) return legacy_of(s, device);
    if (handle == cudaStreamPerThread) {
        if (!my_stream || my_stream->device != device) my_stream = new_stream(s, device, 1, 0);
        return my_stream;
    }
    while (t && t != handle) t = t->next;
    return t && t->alive ? t : NULL;
}

cudaStream_t stub_stream(cudaStream_t handle, int device) {
    cudaStream_t t = resolve(begin(), handle, device);
    end();
    return t && t->device == device && !t->capture ? t : NULL;
}

stub_point stub_tail(cudaStream_t stream) {
    begin();
    stub_point p = {stream, stream->issued};
    end();
    return p;
}

/* The legacy default stream is ordered with all streams of its device that do not opt out. */
static int add_legacy(state *s, cudaStream_t stream, stub_point *deps) {
    int n = 0;
    for (struct CUstream_st *t = s->streams; t; t = t->next) {
        if (t == stream || t->device != stream->device || !t->blocking || !stream->blocking)
            continue;
        if (t->blocking != 2 && stream->blocking != 2) continue;
        if (deps) {
            deps[n].stream = t;
            deps[n].seq = t->issued;
        }
        join(&stream->clock, &t->clock);
        n++;
    }
    return n;
}

static void start_thread(cudaStream_t t) {
    pthread_t id;
    pthread_attr_t attr;
    pthread_attr_init(&attr);
    pthread_attr_setdetachstate(&attr, PTHREAD_CREATE_DETACHED);
    if (pthread_create(&id, &attr, stream_main, t)) stub_die("no thread for a stream");
    pthread_attr_destroy(&attr);
    t->has_thread = 1;
}

/* Requires the lock, and releases it while the op runs in synchronous mode. */
static stub_point submit(state *s, cudaStream_t t, work w, const stub_point *deps, int num_deps,
                         stub_clock *clock) {
    int legacy = add_legacy(s, t, NULL);
    op *o = (op *)calloc(1, sizeof *o + (size_t)(num_deps + legacy) * sizeof *deps);
    if (!o) stub_die("out of memory");
    o->w = w;
    o->seq = ++t->issued;
    o->num_deps = num_deps + add_legacy(s, t, o->deps + num_deps);
    if (num_deps) memcpy(o->deps, deps, (size_t)num_deps * sizeof *deps);
    stub_point p = {t, o->seq};
    if (checks) {
        join(&t->clock, &myself(s)->clock);
        for (int i = 0; i < num_deps;
             i++) /* for other ops than the last one, the caller knows the clock */
            if (deps[i].stream && deps[i].seq == deps[i].stream->issued && deps[i].stream != t)
                join(&t->clock, &deps[i].stream->clock);
        if (clock) join(&t->clock, clock);
        step(s, &t->clock, t->actor, w.name);
        if (clock) *clock = t->clock;
    }
    if (settings[STUB_SYNC]) {
        run_op(t, o);
        return p;
    }
    if (!t->has_thread) start_thread(t);
    *t->tail = o;
    t->tail = &o->next;
    pthread_cond_signal(&t->work);
    return p;
}

stub_point stub_submit(cudaStream_t stream, const char *name, void (*body)(void *arg), void *arg,
                       const stub_point *deps, int num_deps, stub_clock *clock) {
    const work w = {name, body, arg, NULL};
    stub_point p = submit(begin(), stream, w, deps, num_deps, clock);
    end();
    return p;
}

/* The host has seen a point, so it knows the stream's clock. A later clock is too large only if
   another thread uses the stream at the same time. */
static void host_knows(state *s, const stub_clock *clock) {
    if (checks) join(&myself(s)->clock, clock);
}

void stub_wait(stub_point point) {
    state *s = begin();
    if (point.stream) {
        wait_done(point);
        host_knows(s, &point.stream->clock);
    }
    end();
}

static void wait_device(state *s, int device) {
    for (struct CUstream_st *t = s->streams; t; t = t->next) {
        stub_point p = {t, t->issued};
        if (t->device != device) continue;
        wait_done(p);
        host_knows(s, &t->clock);
    }
}

/* ---- errors of the runtime ------------------------------------------------------------------- */

static cudaError_t fails(cudaError_t error) {
    if (error) my_error = error;
    return error;
}

/* uses: the call needs the driver, which does not work after a fork. */
static cudaError_t enter_as(const char *name, int uses) {
    state *s = begin();
    count_call(s, name);
    int code = match_rules(s, name);
    if (code >= 700 && code < 800) s->sticky = code;
    if (s->sticky) code = s->sticky;
    if (uses && is_forked) code = cudaErrorInitializationError;
    static int driver = -1; /* a file of the driver, open for the process's lifetime */
    if (uses && driver < 0) driver = open("/dev/zero", O_RDWR | O_CLOEXEC);
    s->is_used |= uses;
    end();
    return fails((cudaError_t)code);
}

static cudaError_t enter(const char *name) { return enter_as(name, 1); }

#define ENTER(name)                                                                                \
    do {                                                                                           \
        cudaError_t entered = enter(name);                                                         \
        if (entered) return entered;                                                               \
    } while (0)

cudaError_t cudaGetLastError(void) {
    state *s = begin();
    count_call(s, "cudaGetLastError");
    cudaError_t error = s->sticky ? (cudaError_t)s->sticky : my_error;
    end();
    my_error = cudaSuccess;
    return error;
}

cudaError_t cudaPeekAtLastError(void) {
    state *s = begin();
    count_call(s, "cudaPeekAtLastError");
    cudaError_t error = s->sticky ? (cudaError_t)s->sticky : my_error;
    end();
    return error;
}

static const struct {
    cudaError_t code;
    const char *name, *text;
} error_table[] = {
    {cudaSuccess, "cudaSuccess", "no error"},
    {cudaErrorInvalidValue, "cudaErrorInvalidValue", "invalid argument"},
    {cudaErrorMemoryAllocation, "cudaErrorMemoryAllocation", "out of memory"},
    {cudaErrorInitializationError, "cudaErrorInitializationError", "initialization error"},
    {cudaErrorCudartUnloading, "cudaErrorCudartUnloading", "driver shutting down"},
    {cudaErrorInvalidConfiguration, "cudaErrorInvalidConfiguration", "invalid configuration"},
    {cudaErrorInvalidPitchValue, "cudaErrorInvalidPitchValue", "invalid pitch argument"},
    {cudaErrorInvalidMemcpyDirection, "cudaErrorInvalidMemcpyDirection", "invalid copy direction"},
    {cudaErrorInsufficientDriver, "cudaErrorInsufficientDriver", "the driver is too old"},
    {cudaErrorNoDevice, "cudaErrorNoDevice", "no device"},
    {cudaErrorInvalidDevice, "cudaErrorInvalidDevice", "invalid device"},
    {cudaErrorECCUncorrectable, "cudaErrorECCUncorrectable", "uncorrectable memory error"},
    {cudaErrorInvalidResourceHandle, "cudaErrorInvalidResourceHandle", "invalid resource handle"},
    {cudaErrorNotReady, "cudaErrorNotReady", "device not ready"},
    {cudaErrorIllegalAddress, "cudaErrorIllegalAddress", "an illegal address was accessed"},
    {cudaErrorLaunchOutOfResources, "cudaErrorLaunchOutOfResources", "too many resources"},
    {cudaErrorLaunchFailure, "cudaErrorLaunchFailure", "unspecified launch failure"},
    {cudaErrorNotSupported, "cudaErrorNotSupported", "not supported"},
    {cudaErrorIllegalState, "cudaErrorIllegalState", "not in this state"},
    {cudaErrorStreamCaptureUnsupported, "cudaErrorStreamCaptureUnsupported", "not while capturing"},
    {cudaErrorStreamCaptureInvalidated, "cudaErrorStreamCaptureInvalidated",
     "the capture has failed before"},
    {cudaErrorStreamCaptureMerge, "cudaErrorStreamCaptureMerge", "it would join two captures"},
    {cudaErrorStreamCaptureUnmatched, "cudaErrorStreamCaptureUnmatched",
     "the capture began in another stream"},
    {cudaErrorStreamCaptureUnjoined, "cudaErrorStreamCaptureUnjoined",
     "a stream of the capture was not joined to the first"},
    {cudaErrorStreamCaptureIsolation, "cudaErrorStreamCaptureIsolation",
     "a capture cannot wait for what is outside of it"},
    {cudaErrorStreamCaptureImplicit, "cudaErrorStreamCaptureImplicit",
     "the legacy stream would wait for a capture"},
    {cudaErrorCapturedEvent, "cudaErrorCapturedEvent", "the event was recorded in a capture"},
    {cudaErrorStreamCaptureWrongThread, "cudaErrorStreamCaptureWrongThread",
     "another thread began the capture"},
    {cudaErrorUnknown, "cudaErrorUnknown", "unknown error"},
};

static size_t error_row(cudaError_t error) {
    size_t i = 0, last = sizeof error_table / sizeof *error_table - 1;
    while (i < last && error_table[i].code != error) i++;
    return i;
}

const char *cudaGetErrorString(cudaError_t error) { return error_table[error_row(error)].text; }
const char *cudaGetErrorName(cudaError_t error) { return error_table[error_row(error)].name; }

/* ---- captures -----------------------------------------------------------------------------------
   A captured stream keeps its ops for a graph instead of running them. Rules as in CUDA: an order
   across the border of a capture, or a wait of the host, is an error, and after an error the
   capture can only be ended. Stricter than CUDA: no pageable memory, no collectives. All under
   lock. */

static capture *find_capture(state *s, uint64_t number) {
    capture *c = s->captures;
    while (c && c->number != number) c = c->next;
    return c;
}

static cudaError_t spoil(capture *c, cudaError_t error) {
    if (c) c->invalid = 1;
    return error;
}

/* Returns 1 if a stream of the capture is ordered with the legacy stream, which is an error. */
static int touches_capture(const capture *c, const struct CUstream_st *legacy) {
    int found = 0;
    for (int i = 0; i < c->num_lanes; i++)
        found |= c->lanes[i]->device == legacy->device && c->lanes[i]->blocking;
    return found;
}

/* Returns the stream of a handle for ops, or NULL and an error. */
static cudaStream_t usable(state *s, cudaStream_t handle, cudaError_t *error) {
    cudaStream_t t = resolve(s, handle, my_device);
    *error = t ? cudaSuccess : cudaErrorInvalidResourceHandle;
    for (capture *c = s->captures; t && t->blocking == 2 && c; c = c->next)
        if (touches_capture(c, t)) *error = spoil(c, cudaErrorStreamCaptureImplicit);
    if (t && t->capture && t->capture->invalid) *error = cudaErrorStreamCaptureInvalidated;
    return *error ? NULL : t;
}

/* Returns the stream of a handle for the host to wait for, or NULL and an error. */
static cudaStream_t awaitable(state *s, cudaStream_t handle, cudaError_t *error) {
    cudaStream_t t = usable(s, handle, error);
    if (t && t->capture) *error = spoil(t->capture, cudaErrorStreamCaptureUnsupported);
    return *error ? NULL : t;
}

/* Returns 1 if a capture forbids this thread calls that may wait implicitly, such as cudaMalloc. */
static int is_forbidden(state *s) {
    int found = 0;
    for (capture *c = s->captures; c; c = c->next) {
        int forbids = c->mode == cudaStreamCaptureModeGlobal &&
                      my_mode == cudaStreamCaptureModeGlobal;
        if (pthread_equal(c->thread, pthread_self()))
            forbids = c->mode != cudaStreamCaptureModeRelaxed &&
                      my_mode != cudaStreamCaptureModeRelaxed;
        c->invalid |= forbids;
        found |= forbids;
    }
    return found;
}

static cudaError_t forbidden(void) {
    int found = is_forbidden(begin());
    end();
    return fails(found ? cudaErrorStreamCaptureUnsupported : cudaSuccess);
}

#define ENTER_WAITING(name)                                                                        \
    do {                                                                                           \
        ENTER(name);                                                                               \
        if (forbidden()) return cudaErrorStreamCaptureUnsupported;                                 \
    } while (0)

static void keep(const struct CUstream_st *t, int record, int wait, work w) {
    cudaGraph_t graph = t->capture->graph;
    node *n = (node *)calloc(1, sizeof *n);
    if (!n) stub_die("out of memory");
    n->lane = t->lane;
    n->record = record;
    n->wait = wait;
    n->w = w;
    *graph->last = n;
    graph->last = &n->next;
}

/* Issues an op, or adds it to a graph. The result for a graph is no point. */
static stub_point put(state *s, cudaStream_t t, work w) {
    stub_point none = {NULL, 0};
    capture *c = t->capture;
    if (!c) return submit(s, t, w, NULL, 0, NULL);
    keep(t, -1, -1, w);
    c->seen[t->lane][t->lane] = ++c->work[t->lane];
    return none;
}

static void join_capture(capture *c, cudaStream_t t) {
    if (c->num_lanes == LANES) stub_die("too many streams in a capture");
    t->capture = c;
    t->lane = c->num_lanes++;
    c->lanes[t->lane] = t;
}

static void record_captured(const struct CUstream_st *t, cudaEvent_t event) {
    capture *c = t->capture;
    const work none = {"cudaEventRecord", NULL, NULL, NULL};
    event->capture = c->number;
    event->record = c->graph->num_records++;
    memcpy(event->seen, c->seen[t->lane], sizeof event->seen);
    keep(t, event->record, -1, none);
}

/* Handles a wait with the stream, the event or both captured. A stream that is not captured joins
   the capture. */
static cudaError_t wait_captured(state *s, cudaStream_t t, const struct CUevent_st *event) {
    capture *c = find_capture(s, event->capture);
    const work none = {"cudaStreamWaitEvent", NULL, NULL, NULL};
    if (!c && t->capture) return spoil(t->capture, cudaErrorStreamCaptureIsolation);
    if (!c) return cudaErrorCapturedEvent; /* its capture has ended: it never happens */
    if (t->capture && t->capture != c)
        return spoil(t->capture, spoil(c, cudaErrorStreamCaptureMerge));
    if (c->invalid) return cudaErrorStreamCaptureInvalidated;
    if (t->blocking == 2) return spoil(c, cudaErrorStreamCaptureImplicit);
    if (!t->capture) join_capture(c, t);
    keep(t, -1, event->record, none);
    for (int i = 0; i < LANES; i++)
        if (c->seen[t->lane][i] < event->seen[i]) c->seen[t->lane][i] = event->seen[i];
    return cudaSuccess;
}

static void drop_graph(cudaGraph_t graph) {
    if (--graph->uses) return;
    for (node *n = graph->first, *next; n; n = next) {
        next = n->next;
        if (n->w.release) n->w.release(n->w.arg);
        free(n);
    }
    free(graph);
}

/* Ends a capture: its streams are ordinary ones again. Returns the graph. */
static cudaGraph_t end_capture(state *s, capture *c) {
    cudaGraph_t graph = c->graph;
    capture **link = &s->captures;
    while (*link != c) link = &(*link)->next;
    *link = c->next;
    graph->num_lanes = c->num_lanes;
    for (int i = 0; i < c->num_lanes; i++) c->lanes[i]->capture = NULL;
    free(c);
    return graph;
}

static cudaError_t begin_capture(state *s, cudaStream_t t, enum cudaStreamCaptureMode mode) {
    if (t->blocking == 2) return cudaErrorStreamCaptureUnsupported;
    if (t->capture) return cudaErrorIllegalState;
    capture *c = (capture *)calloc(1, sizeof *c);
    if (c) c->graph = (cudaGraph_t)calloc(1, sizeof *c->graph);
    if (!c || !c->graph) stub_die("out of memory");
    c->graph->uses = 1;
    c->graph->device = t->device;
    c->graph->last = &c->graph->first;
    c->number = ++s->num_captures;
    c->mode = mode;
    c->thread = pthread_self();
    c->next = s->captures;
    s->captures = c;
    join_capture(c, t);
    return cudaSuccess;
}

cudaError_t cudaStreamBeginCapture(cudaStream_t stream, enum cudaStreamCaptureMode mode) {
    ENTER("cudaStreamBeginCapture");
    state *s = begin();
    cudaError_t error;
    cudaStream_t t = usable(s, stream, &error);
    if (t) error = begin_capture(s, t, mode);
    end();
    return fails(error);
}

/* Returns the reason why a capture cannot be ended here; the capture continues. */
static cudaError_t check_end(const struct CUstream_st *t) {
    if (!t) return cudaErrorInvalidResourceHandle;
    if (!t->capture) return cudaErrorIllegalState;
    if (t->lane) return cudaErrorStreamCaptureUnmatched;
    int here = pthread_equal(t->capture->thread, pthread_self());
    return here || t->capture->mode == cudaStreamCaptureModeRelaxed
               ? cudaSuccess
               : cudaErrorStreamCaptureWrongThread;
}

cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t *graph) {
    ENTER("cudaStreamEndCapture");
    state *s = begin();
    cudaStream_t t = resolve(s, stream, my_device);
    cudaError_t error = check_end(t);
    *graph = NULL;
    if (!error) {
        capture *c = t->capture;
        for (int i = 0; i < c->num_lanes; i++)
            if (c->seen[0][i] < c->work[i]) error = cudaErrorStreamCaptureUnjoined;
        if (c->invalid) error = cudaErrorStreamCaptureInvalidated;
        *graph = end_capture(s, c);
        s->live[STUB_GRAPHS]++;
        if (error) {
            s->live[STUB_GRAPHS]--;
            drop_graph(*graph);
            *graph = NULL;
        }
    }
    end();
    return fails(error);
}

/* ---- graphs ---------------------------------------------------------------------------------- */

cudaError_t cudaGraphInstantiate(cudaGraphExec_t *exec, cudaGraph_t graph,
                                 unsigned long long flags) {
    ENTER_WAITING("cudaGraphInstantiate");
    if (!graph || flags) return fails(cudaErrorInvalidValue);
    state *s = begin();
    size_t points = (size_t)graph->num_records + 1; /* and the end of the last launch */
    cudaGraphExec_t e = (cudaGraphExec_t)calloc(1, sizeof *e);
    if (e) e->points = (stub_point *)calloc(points, sizeof *e->points);
    if (e) e->clocks = (stub_clock *)calloc(checks ? points : 1, sizeof *e->clocks);
    if (!e || !e->points || !e->clocks) stub_die("out of memory");
    e->graph = graph;
    graph->uses++;
    for (int i = 1; i < graph->num_lanes; i++) e->lanes[i] = new_stream(s, graph->device, 0, 0);
    s->live[STUB_GRAPHS]++;
    *exec = e;
    end();
    return cudaSuccess;
}

static void launch_done(void *arg) {
    begin();
    drop_graph((cudaGraph_t)arg);
    end();
}

static void wait_record(state *s, cudaStream_t t, const char *name, const struct CUgraphExec_st *e,
                        int record) {
    const work none = {name, NULL, NULL, NULL};
    if (checks) join(&t->clock, &e->clocks[record]);
    submit(s, t, none, &e->points[record], 1, NULL);
}

static void mark_record(state *s, cudaStream_t t, work w, struct CUgraphExec_st *e, int record) {
    e->points[record] = submit(s, t, w, NULL, 0, NULL);
    if (checks) e->clocks[record] = t->clock;
}

/* Runs the graph after the stream's ops and the previous launch. Later ops of the stream run after
   it, as forked lanes have been joined. */
static void launch_graph(state *s, cudaGraphExec_t e, cudaStream_t t) {
    cudaGraph_t graph = e->graph;
    const work done = {"cudaGraphLaunch", launch_done, graph, NULL};
    graph->uses++;
    e->lanes[0] = t;
    wait_record(s, t, "cudaGraphLaunch", e, graph->num_records);
    for (const node *n = graph->first; n; n = n->next) {
        work w = n->w;
        w.release = NULL; /* it will run again */
        if (n->wait >= 0) wait_record(s, e->lanes[n->lane], w.name, e, n->wait);
        else if (n->record >= 0) mark_record(s, e->lanes[n->lane], w, e, n->record);
        else submit(s, e->lanes[n->lane], w, NULL, 0, NULL);
    }
    mark_record(s, t, done, e, graph->num_records);
}

cudaError_t cudaGraphLaunch(cudaGraphExec_t exec, cudaStream_t stream) {
    ENTER("cudaGraphLaunch");
    if (!exec) return fails(cudaErrorInvalidValue);
    state *s = begin();
    cudaError_t error;
    cudaStream_t t = awaitable(s, stream, &error); /* graphs in graphs are not supported */
    if (t) launch_graph(s, exec, t);
    end();
    return fails(error);
}

/* Running launches complete first. */
cudaError_t cudaGraphExecDestroy(cudaGraphExec_t exec) {
    cudaError_t entered = enter("cudaGraphExecDestroy");
    if (!exec) return entered ? entered : fails(cudaErrorInvalidValue);
    state *s = begin();
    for (int i = 1; i < exec->graph->num_lanes; i++) {
        exec->lanes[i]->alive = 0;
        pthread_cond_signal(&exec->lanes[i]->work);
    }
    drop_graph(exec->graph);
    s->live[STUB_GRAPHS]--;
    end();
    free(exec->points);
    free(exec->clocks);
    free(exec);
    return entered;
}

/* Executable graphs remain valid. */
cudaError_t cudaGraphDestroy(cudaGraph_t graph) {
    cudaError_t entered = enter("cudaGraphDestroy");
    if (!graph) return entered ? entered : fails(cudaErrorInvalidValue);
    state *s = begin();
    drop_graph(graph);
    s->live[STUB_GRAPHS]--;
    end();
    return entered;
}

/* ---- devices --------------------------------------------------------------------------------- */

cudaError_t cudaGetDeviceCount(int *count) {
    ENTER("cudaGetDeviceCount");
    *count = stub_get(STUB_DEVICES);
    return *count ? cudaSuccess : fails(cudaErrorNoDevice);
}

cudaError_t cudaSetDevice(int device) {
    ENTER("cudaSetDevice");
    if (device < 0 || device >= stub_get(STUB_DEVICES)) return fails(cudaErrorInvalidDevice);
    my_device = device;
    return cudaSuccess;
}

cudaError_t cudaGetDevice(int *device) {
    ENTER("cudaGetDevice");
    *device = my_device;
    return cudaSuccess;
}

cudaError_t cudaDeviceGetAttribute(int *value, enum cudaDeviceAttr attr, int device) {
    ENTER("cudaDeviceGetAttribute");
    if (device < 0 || device >= stub_get(STUB_DEVICES)) return fails(cudaErrorInvalidDevice);
    *value = attr == cudaDevAttrMultiProcessorCount                ? stub_get(STUB_SMS)
             : attr == cudaDevAttrMaxPitch                         ? stub_get(STUB_MAX_PITCH)
             : attr == cudaDevAttrSingleToDoublePrecisionPerfRatio ? stub_get(STUB_F64_RATIO)
             : attr == cudaDevAttrComputeCapabilityMajor           ? 9
             : attr == cudaDevAttrManagedMemory                    ? 1
             : attr == cudaDevAttrConcurrentManagedAccess          ? 1
                                                                   : 0;
    return cudaSuccess;
}

cudaError_t cudaDeviceGetStreamPriorityRange(int *least, int *greatest) {
    ENTER("cudaDeviceGetStreamPriorityRange");
    *least = 0;
    *greatest = -5;
    return cudaSuccess;
}

cudaError_t cudaDeviceSynchronize(void) {
    ENTER("cudaDeviceSynchronize");
    state *s = begin();
    cudaError_t error = cudaSuccess;
    for (capture *c = s->captures; c; c = c->next)
        if (c->graph->device == my_device) error = spoil(c, cudaErrorStreamCaptureUnsupported);
    if (!error) wait_device(s, my_device);
    end();
    return fails(error);
}

cudaError_t cudaDriverGetVersion(int *version) {
    cudaError_t entered = enter_as("cudaDriverGetVersion", 0);
    *version = stub_get(STUB_DRIVER_VERSION);
    return entered;
}

cudaError_t cudaRuntimeGetVersion(int *version) {
    cudaError_t entered = enter_as("cudaRuntimeGetVersion", 0);
    *version = CUDART_VERSION;
    return entered;
}

/* ---- memory ---------------------------------------------------------------------------------- */

int stub_find(const void *ptr, size_t nbytes, stub_memory *out) {
    block *b = find_block(begin(), ptr);
    int found = b && nbytes <= b->m.size - (size_t)((const char *)ptr - b->m.base);
    if (found) *out = b->m;
    end();
    return found;
}

void stub_register(const void *ptr, int delta) {
    block *b = find_block(begin(), ptr);
    if (b) b->registered += delta;
    end();
}

/* Addresses of memory that can be protected. Each is used once: an access after cudaFree always
   fails. */
#define REACH ((size_t)1 << 36)
static char *next_page, *last_page;

static void *map_pages(char *at, size_t bytes, int access) {
    return mmap(at, bytes, access,
                MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | (at ? MAP_FIXED : 0), -1, 0);
}

static void *take_memory(block *b, size_t size, size_t align, int is_protected) {
    void *base = NULL;
    if (!is_protected) return posix_memalign(&base, align, size) ? NULL : base;
    b->mapped = (size + 4095) / 4096 * 4096;
    if (!next_page) {
        base = map_pages(NULL, REACH, PROT_NONE);
        if (base == MAP_FAILED) stub_die("no addresses for device memory");
        next_page = (char *)base, last_page = next_page + REACH;
    }
    if (b->mapped > (size_t)(last_page - next_page))
        stub_die("no addresses left for device memory");
    base = map_pages(next_page, b->mapped, PROT_READ | PROT_WRITE);
    next_page += b->mapped;
    return base == MAP_FAILED ? NULL : base;
}

/* Fills the pages of the first `used` bytes with a pattern, as CUDA does not clear memory. */
cudaError_t stub_alloc(void **ptr, size_t size, size_t used, size_t align,
                       enum cudaMemoryType type) {
    const size_t pages = (used + 4095) / 4096 * 4096;
    int kind = type == cudaMemoryTypeHost ? STUB_PINNED_BYTES : STUB_DEVICE_BYTES;
    state *s = begin();
    int64_t total = (int64_t)settings[STUB_TOTAL_MIB] << 20;
    block *b = NULL;
    void *base = NULL;
    *ptr = NULL;
    if (kind == STUB_PINNED_BYTES || (int64_t)size <= total - s->live[STUB_DEVICE_BYTES])
        b = (block *)calloc(1, sizeof *b);
    int is_protected = settings[STUB_PROTECT] && type == cudaMemoryTypeDevice;
    if (b) base = take_memory(b, size, align, is_protected);
    if (base) {
        memset(base, 0xCB, pages < size ? pages : size);
        if (is_protected && !s->open) mprotect(base, b->mapped, PROT_NONE);
        b->m.base = (char *)base;
        b->m.size = size;
        b->m.type = type;
        b->m.align = align;
        b->m.device = my_device;
        b->next = s->blocks;
        s->blocks = b;
        s->live[kind] += (int64_t)size;
        *ptr = base;
    } else {
        free(b);
    }
    end();
    return base ? cudaSuccess : cudaErrorMemoryAllocation;
}

static void drop_block(block *b) {
    if (b->mapped) map_pages(b->m.base, b->mapped, PROT_NONE);
    else free(b->m.base);
    free(b->shadow);
    free(b);
}

cudaError_t stub_free(void *ptr, const char *name) {
    state *s = begin();
    block **link = &s->blocks;
    while (*link && (*link)->m.base != (char *)ptr) link = &(*link)->next;
    block *b = *link;
    if (b) {
        if (b->registered) stub_die("%s: the memory is still registered with a comm", name);
        if (checks) check_free(s, b, name);
        s->live[b->m.type == cudaMemoryTypeHost ? STUB_PINNED_BYTES : STUB_DEVICE_BYTES] -=
            (int64_t)b->m.size;
        *link = b->next;
        b->next = s->doomed;
        if (s->sticky) s->doomed = b;
        else drop_block(b);
    }
    end();
    return b ? cudaSuccess : cudaErrorInvalidValue;
}

static cudaError_t allocate(const char *name, void **ptr, size_t size, enum cudaMemoryType type) {
    *ptr = NULL;
    ENTER_WAITING(name);
    return size ? fails(stub_alloc(ptr, size, size, ALIGN, type)) : cudaSuccess;
}

cudaError_t cudaMalloc(void **ptr, size_t size) {
    return allocate("cudaMalloc", ptr, size, cudaMemoryTypeDevice);
}

cudaError_t cudaMallocManaged(void **ptr, size_t size, unsigned flags) {
    (void)flags;
    return allocate("cudaMallocManaged", ptr, size, cudaMemoryTypeManaged);
}

cudaError_t cudaMallocHost(void **ptr, size_t size) {
    return allocate("cudaMallocHost", ptr, size, cudaMemoryTypeHost);
}

/* Waits for the whole device, as CUDA does. The checker does not rely on that, as CUDA does not
   promise it. After a sticky error nothing can be waited for. */
static cudaError_t release(const char *name, void *ptr, int is_host) {
    cudaError_t entered = enter(name);
    stub_memory m;
    if (!ptr) return entered;
    if (forbidden()) return cudaErrorStreamCaptureUnsupported;
    if (!stub_find(ptr, 1, &m) || m.base != (char *)ptr || m.align != ALIGN ||
        is_host != (m.type == cudaMemoryTypeHost))
        return fails(cudaErrorInvalidValue);
    state *s = begin();
    int broken = s->sticky;
    in_driver += settings[STUB_DRIVER];
    if (!broken && !checks) wait_device(s, m.device);
    if (in_driver) in_driver--;
    pthread_cond_broadcast(&left_driver);
    end();
    cudaError_t error = stub_free(ptr, name);
    return entered ? entered : fails(error);
}

cudaError_t cudaFree(void *ptr) { return release("cudaFree", ptr, 0); }
cudaError_t cudaFreeHost(void *ptr) { return release("cudaFreeHost", ptr, 1); }

cudaError_t cudaMemGetInfo(size_t *left, size_t *total) {
    ENTER("cudaMemGetInfo");
    *total = (size_t)stub_get(STUB_TOTAL_MIB) << 20;
    *left = *total - (size_t)stub_live(STUB_DEVICE_BYTES);
    return cudaSuccess;
}

cudaError_t cudaPointerGetAttributes(struct cudaPointerAttributes *attributes, const void *ptr) {
    ENTER("cudaPointerGetAttributes");
    stub_memory m;
    memset(attributes, 0, sizeof *attributes);
    attributes->device = -2; /* as in CUDA for unknown memory */
    if (!stub_find(ptr, 1, &m)) {
        attributes->hostPointer = (void *)(uintptr_t)ptr;
        return cudaSuccess;
    }
    attributes->type = m.type;
    attributes->device = m.device;
    attributes->devicePointer = (void *)(uintptr_t)ptr;
    if (m.type != cudaMemoryTypeDevice) attributes->hostPointer = (void *)(uintptr_t)ptr;
    return cudaSuccess;
}

/* ---- copies ---------------------------------------------------------------------------------- */

typedef struct copy {
    char *dst;
    const char *src; /* NULL: fill with value */
    size_t dpitch, spitch, width, height;
    int value;
    void *staged;           /* a copy of pageable memory */
    int dst_seen, src_seen; /* memory of the stub, which the race checker sees */
} copy;

static void copy_body(void *arg) {
    copy *c = (copy *)arg;
    for (size_t y = 0; y < c->height && c->width; y++) {
        char *to = c->dst + y * c->dpitch;
        if (c->src_seen) fsdp_stub_touch(c->src + y * c->spitch, c->width, 0);
        if (c->dst_seen) fsdp_stub_touch(to, c->width, 1);
        if (c->src) memmove(to, c->src + y * c->spitch, c->width);
        else memset(to, c->value, c->width);
    }
}

static void copy_free(void *arg) {
    copy *c = (copy *)arg;
    free(c->staged);
    free(c);
}

static int on_device(const void *ptr, enum cudaMemoryType *type) {
    stub_memory m;
    *type = stub_find(ptr, 1, &m) ? m.type : cudaMemoryTypeUnregistered;
    return *type == cudaMemoryTypeDevice;
}

/* Returns 1 if the copy's kind matches both ends. Managed memory counts as both. */
static int fits_kind(enum cudaMemcpyKind kind, enum cudaMemoryType dst, enum cudaMemoryType src) {
    int to = kind == cudaMemcpyHostToDevice || kind == cudaMemcpyDeviceToDevice;
    int from = kind == cudaMemcpyDeviceToHost || kind == cudaMemcpyDeviceToDevice;
    if (kind == cudaMemcpyDefault) return 1;
    return (dst == cudaMemoryTypeManaged || to == (dst == cudaMemoryTypeDevice)) &&
           (src == cudaMemoryTypeManaged || from == (src == cudaMemoryTypeDevice));
}

static size_t extent(size_t pitch, const copy *c) {
    return c->height ? pitch * (c->height - 1) + c->width : 0;
}

/* Pageable memory is read before the call returns; a copy to it is then complete. A capture has no
   such copies. */
static cudaError_t start_copy(const char *name, copy c, enum cudaMemcpyKind kind,
                              cudaStream_t handle, int blocks) {
    enum cudaMemoryType dst, src = cudaMemoryTypeUnregistered;
    stub_memory m;
    (void)on_device(c.dst, &dst);
    if (c.src) (void)on_device(c.src, &src);
    if (!c.width || !c.height) return cudaSuccess;
    if (!c.src && dst == cudaMemoryTypeUnregistered) return fails(cudaErrorInvalidValue);
    if (c.src && !fits_kind(kind, dst, src)) return fails(cudaErrorInvalidMemcpyDirection);
    c.dst_seen = dst != cudaMemoryTypeUnregistered;
    c.src_seen = src != cudaMemoryTypeUnregistered;
    if ((c.dst_seen && !stub_find(c.dst, extent(c.dpitch, &c), &m)) ||
        (c.src_seen && !stub_find(c.src, extent(c.spitch, &c), &m)))
        return fails(cudaErrorInvalidValue);
    if (c.src && !c.src_seen) {
        c.staged = malloc(extent(c.spitch, &c));
        if (!c.staged) return fails(cudaErrorMemoryAllocation);
        memcpy(c.staged, c.src, extent(c.spitch, &c));
        c.src = (const char *)c.staged;
    }
    copy *queued = (copy *)malloc(sizeof *queued);
    if (!queued) stub_die("out of memory");
    *queued = c;
    const work w = {name, copy_body, queued, copy_free};
    stub_point p = {NULL, 0};
    cudaError_t error;
    state *s = begin();
    int is_pageable = c.src && (!c.dst_seen || !c.src_seen);
    cudaStream_t stream = is_pageable ? awaitable(s, handle, &error) : usable(s, handle, &error);
    if (stream) p = put(s, stream, w);
    end();
    if (!stream) copy_free(queued);
    else if (blocks || (c.src && !c.dst_seen)) stub_wait(p);
    return fails(error);
}

static copy a_copy(void *dst, size_t dpitch, const void *src, size_t spitch, size_t width,
                   size_t height) {
    copy c;
    memset(&c, 0, sizeof c);
    c.dst = (char *)dst;
    c.src = (const char *)src;
    c.dpitch = dpitch;
    c.spitch = spitch;
    c.width = width;
    c.height = height;
    return c;
}

cudaError_t cudaMemsetAsync(void *ptr, int value, size_t count, cudaStream_t stream) {
    ENTER("cudaMemsetAsync");
    copy c = a_copy(ptr, 0, NULL, 0, count, 1);
    c.value = value;
    return start_copy("cudaMemsetAsync", c, cudaMemcpyDefault, stream, 0);
}

cudaError_t cudaMemset(void *ptr, int value, size_t count) { /* asynchronous for device memory */
    ENTER_WAITING("cudaMemset");
    copy c = a_copy(ptr, 0, NULL, 0, count, 1);
    c.value = value;
    return start_copy("cudaMemset", c, cudaMemcpyDefault, NULL, 0);
}

cudaError_t cudaMemcpyAsync(void *dst, const void *src, size_t count, enum cudaMemcpyKind kind,
                            cudaStream_t stream) {
    ENTER("cudaMemcpyAsync");
    if (count && !src) return fails(cudaErrorInvalidValue);
    return start_copy("cudaMemcpyAsync", a_copy(dst, 0, src, 0, count, 1), kind, stream, 0);
}

cudaError_t cudaMemcpy(void *dst, const void *src, size_t count, enum cudaMemcpyKind kind) {
    enum cudaMemoryType to, from;
    ENTER_WAITING("cudaMemcpy");
    if (count && !src) return fails(cudaErrorInvalidValue);
    /* both on the device: the host does not wait */
    int inside = on_device(dst, &to) & on_device(src, &from);
    return start_copy("cudaMemcpy", a_copy(dst, 0, src, 0, count, 1), kind, NULL, !inside);
}

cudaError_t cudaMemcpy2DAsync(void *dst, size_t dpitch, const void *src, size_t spitch,
                              size_t width, size_t height, enum cudaMemcpyKind kind,
                              cudaStream_t stream) {
    ENTER("cudaMemcpy2DAsync");
    if (width > dpitch || width > spitch || (width && height && !src))
        return fails(cudaErrorInvalidValue);
    if (dpitch > (size_t)stub_get(STUB_MAX_PITCH) || spitch > (size_t)stub_get(STUB_MAX_PITCH))
        return fails(cudaErrorInvalidPitchValue);
    return start_copy("cudaMemcpy2DAsync", a_copy(dst, dpitch, src, spitch, width, height), kind,
                      stream, 0);
}

/* ---- kernels --------------------------------------------------------------------------------- */

typedef struct launch {
    void (*body)(const void *params, unsigned block_index);
    unsigned grid;
    double params[1]; /* have any length; aligned for any content */
} launch;

static void launch_body(void *arg) {
    launch *l = (launch *)arg;
    for (unsigned i = 0; i < l->grid; i++) l->body(l->params, i);
}

/* Loads a kernel at its first use, for which the device must be idle. A capture waits for nothing.
   */
static void load(state *s, kernel body, int waits, int is_launch) {
    int i = 0;
    while (i < s->num_loaded && s->loaded[i] != body) i++;
    if (i < s->num_loaded) return;
    if (i == KERNELS) stub_die("too many kernels");
    s->loaded[s->num_loaded++] = body;
    if (is_launch) count_call(s, "first launch");
    if (waits && settings[STUB_LAZY] && !settings[STUB_SYNC]) wait_device(s, my_device);
}

cudaError_t fsdp_stub_load(void (*body)(const void *params, unsigned block_index)) {
    ENTER("load");
    load(begin(), body, 1, 0);
    end();
    return cudaSuccess;
}

cudaError_t fsdp_stub_launch(void (*body)(const void *params, unsigned block_index),
                             const void *params, size_t size, unsigned grid, cudaStream_t stream) {
    ENTER("launch");
    if (!grid || grid > 0x7fffffffu || size > 32764) return fails(cudaErrorInvalidConfiguration);
    if (size > 4096 && stub_get(STUB_DRIVER_VERSION) < 12010) return fails(cudaErrorInvalidValue);
    launch *l = (launch *)malloc(sizeof *l + size);
    if (!l) stub_die("out of memory");
    l->body = body;
    l->grid = grid;
    memcpy(l->params, params, size);
    const work w = {"launch", launch_body, l, free};
    state *s = begin();
    cudaError_t error;
    stub_point p = {NULL, 0};
    cudaStream_t t = usable(s, stream, &error);
    if (t) load(s, body, !t->capture, 1);
    if (t) p = put(s, t, w);
    int blocks = settings[STUB_BLOCKING];
    end();
    if (!t) free(l);
    if (blocks) stub_wait(p);
    return fails(error);
}

/* ---- host functions in a stream -------------------------------------------------------------- */

typedef struct host_call {
    cudaHostFn_t fn;
    void *user;
} host_call;

static void host_call_body(void *arg) {
    const host_call *c = (const host_call *)arg;
    c->fn(c->user);
}

cudaError_t cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t fn, void *user) {
    ENTER("cudaLaunchHostFunc");
    host_call *c = (host_call *)malloc(sizeof *c);
    if (!c) stub_die("out of memory");
    c->fn = fn;
    c->user = user;
    const work w = {"cudaLaunchHostFunc", host_call_body, c, free};
    state *s = begin();
    cudaError_t error;
    cudaStream_t t = usable(s, stream, &error);
    if (t) put(s, t, w);
    end();
    if (!t) free(c);
    return fails(error);
}

/* ---- streams and events ---------------------------------------------------------------------- */

static cudaError_t create_stream(cudaStream_t *stream, unsigned flags, int priority) {
    state *s = begin();
    *stream = new_stream(s, my_device, flags != cudaStreamNonBlocking, priority);
    s->live[STUB_STREAMS]++;
    end();
    return cudaSuccess;
}

cudaError_t cudaStreamCreateWithFlags(cudaStream_t *stream, unsigned flags) {
    ENTER("cudaStreamCreateWithFlags");
    return create_stream(stream, flags, 0);
}

cudaError_t cudaStreamCreateWithPriority(cudaStream_t *stream, unsigned flags, int priority) {
    ENTER("cudaStreamCreateWithPriority");
    return create_stream(stream, flags, priority);
}

/* Returns at once; queued ops still run. */
cudaError_t cudaStreamDestroy(cudaStream_t stream) {
    cudaError_t entered = enter("cudaStreamDestroy");
    state *s = begin();
    struct CUstream_st *t = s->streams;
    while (t && t != stream) t = t->next;
    int ok = t && t->alive && t->blocking != 2;
    if (ok && t->capture) stub_die("cudaStreamDestroy: the stream is captured");
    if (ok) {
        t->alive = 0;
        s->live[STUB_STREAMS]--;
        pthread_cond_signal(&t->work);
    }
    end();
    return entered ? entered : ok ? cudaSuccess : fails(cudaErrorInvalidResourceHandle);
}

/* Waits despite an injected failure: queued ops may use memory that is freed next. After a sticky
   error nothing can be waited for. */
cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
    cudaError_t entered = enter("cudaStreamSynchronize"), error;
    state *s = begin();
    cudaStream_t t = awaitable(s, stream, &error);
    if (t && !s->sticky) {
        stub_point p = {t, t->issued};
        wait_done(p);
        host_knows(s, &t->clock);
    }
    end();
    return entered ? entered : fails(error);
}

cudaError_t cudaStreamQuery(cudaStream_t stream) {
    ENTER("cudaStreamQuery");
    state *s = begin();
    cudaError_t error;
    cudaStream_t t = awaitable(s, stream, &error);
    if (t && t->completed != t->issued) error = cudaErrorNotReady;
    if (!error) host_knows(s, &t->clock);
    end();
    return fails(error);
}

cudaError_t cudaStreamIsCapturing(cudaStream_t stream, enum cudaStreamCaptureStatus *status) {
    ENTER("cudaStreamIsCapturing");
    state *s = begin();
    cudaStream_t t = resolve(s, stream, my_device);
    cudaError_t error = t ? cudaSuccess : cudaErrorInvalidResourceHandle;
    for (const capture *c = s->captures; t && t->blocking == 2 && c; c = c->next)
        if (touches_capture(c, t)) error = cudaErrorStreamCaptureImplicit;
    *status = !t || !t->capture     ? cudaStreamCaptureStatusNone
              : t->capture->invalid ? cudaStreamCaptureStatusInvalidated
                                    : cudaStreamCaptureStatusActive;
    end();
    return fails(error);
}

cudaError_t cudaThreadExchangeStreamCaptureMode(enum cudaStreamCaptureMode *mode) {
    ENTER("cudaThreadExchangeStreamCaptureMode");
    const enum cudaStreamCaptureMode before = my_mode;
    my_mode = *mode;
    *mode = before;
    return cudaSuccess;
}

cudaError_t cudaEventCreateWithFlags(cudaEvent_t *event, unsigned flags) {
    ENTER("cudaEventCreateWithFlags");
    (void)flags;
    *event = (cudaEvent_t)calloc(1, sizeof **event);
    if (!*event) stub_die("out of memory");
    stub_live_add(STUB_EVENTS, 1);
    return cudaSuccess;
}

cudaError_t cudaEventDestroy(cudaEvent_t event) {
    cudaError_t entered = enter("cudaEventDestroy");
    if (!event) return entered ? entered : fails(cudaErrorInvalidResourceHandle);
    free(event->clock);
    free(event);
    stub_live_add(STUB_EVENTS, -1);
    return entered;
}

static void note_clock(cudaEvent_t event, const stub_clock *clock) {
    if (!event->clock) event->clock = (stub_clock *)malloc(sizeof *clock);
    if (!event->clock) stub_die("out of memory");
    *event->clock = *clock;
}

cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
    ENTER("cudaEventRecord");
    const work none = {"cudaEventRecord", NULL, NULL, NULL};
    state *s = begin();
    cudaError_t error;
    cudaStream_t t = usable(s, stream, &error);
    struct timespec at;
    clock_gettime(CLOCK_MONOTONIC, &at);
    event->issued_ms = (double)at.tv_sec * 1e3 + (double)at.tv_nsec * 1e-6;
    if (t && t->capture) {
        record_captured(t, event);
    } else if (t) {
        event->capture = 0;
        event->point = submit(s, t, none, NULL, 0, NULL);
        if (checks) note_clock(event, &t->clock);
    }
    end();
    return fails(error);
}

cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned flags) {
    ENTER("cudaStreamWaitEvent");
    (void)flags;
    const work none = {"cudaStreamWaitEvent", NULL, NULL, NULL};
    state *s = begin();
    cudaError_t error;
    cudaStream_t t = usable(s, stream, &error);
    s->waits++;
    int ignored = ignored_wait > 0 && --ignored_wait == 0;
    if (t && !ignored && (t->capture || event->capture)) {
        error = wait_captured(s, t, event);
    } else if (t && !ignored && event->point.stream) {
        join(&t->clock, event->clock);
        submit(s, t, none, &event->point, 1, NULL);
    }
    end();
    return fails(error);
}

cudaError_t cudaEventQuery(cudaEvent_t event) {
    ENTER_WAITING("cudaEventQuery");
    state *s = begin();
    while (in_driver) pthread_cond_wait(&left_driver, &lock);
    cudaError_t error = is_done(event->point) ? cudaSuccess : cudaErrorNotReady;
    if (event->capture) error = spoil(find_capture(s, event->capture), cudaErrorCapturedEvent);
    if (!error) host_knows(s, event->clock);
    end();
    return fails(error);
}

cudaError_t cudaEventElapsedTime(float *ms, cudaEvent_t start, cudaEvent_t end) {
    ENTER("cudaEventElapsedTime");
    *ms = (float)(end->issued_ms - start->issued_ms);
    return cudaSuccess;
}

cudaError_t cudaEventSynchronize(cudaEvent_t event) {
    ENTER_WAITING("cudaEventSynchronize");
    state *s = begin();
    cudaError_t error = cudaSuccess;
    stub_point p = event->point; /* a copy: the event may be recorded again */
    if (event->capture) error = spoil(find_capture(s, event->capture), cudaErrorCapturedEvent);
    if (!error) wait_done(p);
    if (!error) host_knows(s, event->clock);
    end();
    return fails(error);
}
