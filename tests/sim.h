/* sim.h - a test device and a test comm that only count ops and keep a simulated clock. One process
   plays one rank of any world.

       sim s;
       sim_init(&s, 4, 0);                  // world of 4, rank 0; then change what you like
       s.async = 0;                         // inline instead of streams
       fsdp_world *world = sim_open(&s);    // fsdp_init with the tables of this file
       ...
       sim_watch(&s, model);                // s.ops: every op that the model emits
       ...
       sim_close(&s);                       // fsdp_shutdown, and frees the sim's memory

   Time. The host and each stream have a clock in nanoseconds. Work on a stream starts when the
   stream is free, and not before the host has issued it; collectives of one process group run one
   after another. Without streams the host does all work itself. sim_compute is the caller's own
   work.

   Races. With s.checks every element of device memory keeps its last writer and its last readers,
   and the host and the streams have vector clocks that change only through record, wait and sync.
   An access that is not ordered after an earlier conflicting one is a race: s.races, s.race.
   sim_read and sim_write note the caller's accesses, sim_called those of functions that the library
   calls in a stream's order. s.ignore_wait leaves one wait out.

   Data. With s.moves data move as if every rank held this rank's data. With s.opaque device memory
   is at addresses that crash the host, which finds accesses outside the tables. A test reads and
   fills it through sim_host.

   With s.null the tables do nothing, so that only the library's cost on the host remains.

   SPDX-License-Identifier: MIT */
#ifndef SIM_H
#define SIM_H
#include "library.h"
#include <sys/mman.h> /* mmap: addresses without memory */

#define SIM_FN    static __attribute__((unused))
#define SIM_GRAIN 2 /* bytes of device memory that share a cell */
enum { SIM_MEMORY_COMM = 2, SIM_MEMORY_KINDS }; /* after FSDP_MEMORY_PINNED */

enum { SIM_HOST = FSDP_STREAM_COUNT, SIM_ACTORS }; /* the streams, and the host */

typedef struct { /* last accesses to these bytes; a clock of 0: none */
    uint32_t writer, written, read[SIM_ACTORS];
} sim_cell;

typedef struct sim_block { /* one block of memory of the tables */
    char *ptr;             /* its address */
    char *data;            /* its contents; at another address if the host must not access it */
    size_t nbytes;
    int number, kind; /* kind: FSDP_MEMORY_*; SIM_MEMORY_COMM: the comm's */
    sim_cell *cells;
    struct sim_block *next;
} sim_block;

typedef struct sim_event {
    int64_t time;
    int actor; /* the actor that recorded it */
    uint32_t clock[SIM_ACTORS];
} sim_event;

typedef struct sim_stream {
    struct sim *owner;
    int actor;
} sim_stream;

typedef struct sim_group { /* a comm */
    struct sim *owner;
    int size, rank;
    int64_t free_at;
    struct sim_group *next;
} sim_group;

typedef struct sim {
    /* Set by sim_init; may be changed before sim_open: */
    int world_size, rank;
    int async;      /* streams; 0: inline */
    int null;       /* nothing is counted, and there are no clocks and no race checks */
    int threads;    /* worker threads of the host device: 0, 1, 2; the sim then only counts ops */
    int fused;      /* FSDP_CAP_FUSED_REDUCE */
    int comm_lanes; /* fsdp_caps.comm_threads */
    int all_to_all; /* the comm has all_to_all */
    int opaque;     /* the host cannot read device memory */
    int no_update;  /* the device has no function for updates */
    int moves, checks;
    int64_t latency_ns, coll_bytes_per_ns, copy_bytes_per_ns;
    int64_t ignore_wait; /* number of the wait that is left out; -1: none */
    /* Results: */
    fsdp_world *world;
    int64_t now[SIM_ACTORS], busy[SIM_ACTORS]; /* clocks; time spent working */
    int64_t last_cost;                         /* cost of the latest work */
    int64_t waits, records, syncs;
    uint64_t colls[FSDP_OP_COUNT],
        coll_bytes[FSDP_OP_COUNT]; /* collectives; bytes received from other ranks */
    uint64_t works;                /* number of copies, zeros and norms */
    uint64_t updates, updated;     /* number of optimizer and scaler updates; their elements */
    uint64_t calls;                /* number of sim_called calls */
    int64_t live_blocks, live_events, live_streams, live_groups, num_blocks;
    int64_t live_bytes[SIM_MEMORY_KINDS];
    int bad_frees; /* with another kind or size than allocated, or of unknown memory */
    fsdp_op *ops;
    int num_ops, cap_ops;
    void (*on_op)(void *user, const fsdp_op *op); /* called for each op that sim_watch sees */
    void (*on_wait)(void *user, int stream); /* called before a wait for an event of `stream` */
    void *on_op_user;
    int num_logged;
    char logged[1024]; /* the latest text */
    int races;
    char race[512]; /* the first one */
    /* Private: */
    fsdp_device_ops device; /* the table of this world's device */
    uint32_t clock[SIM_ACTORS][SIM_ACTORS];
    sim_block *blocks;
    sim_group *groups;
    sim_stream streams[FSDP_STREAM_COUNT];
} sim;

/* ---- races ----------------------------------------------------------------------------------- */

SIM_FN void sim_report(sim *s, int actor, const char *what, int write, const char *other,
                       uint32_t by, int block, size_t offset) {
    static const char *const actors[SIM_ACTORS] = {"COMPUTE", "GATHER", "REDUCE", "ALLREDUCE",
                                                   "EXTENSION", "the host"};
    if (s->races++ == 0)
        snprintf(s->race, sizeof s->race,
                 "%s on %s %s byte %zu of block %d, %s by %s without an event between", what,
                 actors[actor], write ? "writes" : "reads", offset, block, other, actors[by]);
}

SIM_FN sim_block *sim_find(sim *s, const void *ptr) {
    for (sim_block *b = s->blocks; b; b = b->next)
        if ((const char *)ptr >= b->ptr && (const char *)ptr < b->ptr + b->nbytes) return b;
    return NULL;
}

/* Notes an access of an actor to device memory, and checks it. Other memory is not checked. */
SIM_FN void sim_touch(sim *s, int actor, const char *what, const void *ptr, int64_t nbytes,
                      int write) {
    const uint32_t *clock = s->clock[actor];
    sim_block *b = s->checks && nbytes > 0 ? sim_find(s, ptr) : NULL;
    if (!b) return;
    size_t at = (size_t)((const char *)ptr - b->ptr), end = at + (size_t)nbytes;
    if (end > b->nbytes) {
        if (s->races++ == 0)
            snprintf(s->race, sizeof s->race, "%s goes beyond block %d: bytes %zu to %zu of %zu",
                     what, b->number, at, end, b->nbytes);
        return;
    }
    for (size_t i = at / SIM_GRAIN; i < (end + SIM_GRAIN - 1) / SIM_GRAIN; i++) {
        sim_cell *c = &b->cells[i];
        if (c->written > clock[c->writer])
            sim_report(s, actor, what, write, "written", c->writer, b->number, i * SIM_GRAIN);
        for (uint32_t a = 0; write && a < SIM_ACTORS; a++)
            if (c->read[a] > clock[a])
                sim_report(s, actor, what, write, "read", a, b->number, i * SIM_GRAIN);
        if (!write) {
            c->read[actor] = clock[actor];
            continue;
        }
        memset(c->read, 0, sizeof c->read);
        c->writer = (uint32_t)actor;
        c->written = clock[actor];
    }
}

SIM_FN void sim_join(uint32_t *into, const uint32_t *from) {
    for (int a = 0; a < SIM_ACTORS; a++)
        if (from[a] > into[a]) into[a] = from[a];
}

/* ---- time ------------------------------------------------------------------------------------ */

SIM_FN int sim_actor(const void *stream) {
    return stream ? ((const sim_stream *)stream)->actor : SIM_HOST;
}

/* Runs work that the host issues: it starts after all that the host has done or waited for. */
SIM_FN void sim_work(sim *s, int actor, int64_t not_before, int64_t cost) {
    s->clock[SIM_HOST][SIM_HOST]++;
    if (actor != SIM_HOST) {
        sim_join(s->clock[actor], s->clock[SIM_HOST]);
        s->clock[actor][actor]++;
        if (s->now[actor] < s->now[SIM_HOST]) s->now[actor] = s->now[SIM_HOST];
    }
    if (s->now[actor] < not_before) s->now[actor] = not_before;
    s->now[actor] += cost;
    s->busy[actor] += cost;
    s->last_cost = cost;
}

SIM_FN int64_t sim_cost(uint64_t nbytes, int64_t bytes_per_ns) {
    return bytes_per_ns ? (int64_t)((nbytes + (uint64_t)bytes_per_ns - 1) / (uint64_t)bytes_per_ns)
                        : 0;
}

/* Returns the caller's stream; without streams the host. */
SIM_FN int sim_caller(const sim *s) { return s->async ? FSDP_STREAM_COMPUTE : SIM_HOST; }

SIM_FN void sim_compute(sim *s, int64_t cost) { sim_work(s, sim_caller(s), 0, cost); }

SIM_FN void sim_read(sim *s, const char *what, const void *ptr, int64_t nbytes) {
    sim_work(s, sim_caller(s), 0, 0);
    sim_touch(s, sim_caller(s), what, ptr, nbytes, 0);
}

SIM_FN void sim_write(sim *s, const char *what, const void *ptr, int64_t nbytes) {
    sim_work(s, sim_caller(s), 0, 0);
    sim_touch(s, sim_caller(s), what, ptr, nbytes, 1);
}

/* Notes the access of a user's function that the library calls for an op CALL, in the order of
   the stream that it gets; NULL: at once. */
SIM_FN void sim_called(sim *s, const void *stream, const char *what, const void *ptr,
                       int64_t nbytes, int write) {
    s->calls++;
    sim_work(s, sim_actor(stream), 0, sim_cost((uint64_t)nbytes, s->copy_bytes_per_ns));
    sim_touch(s, sim_actor(stream), what, ptr, nbytes, write);
}

/* Makes the host wait for the caller's stream, as a program does that reads the loss. */
SIM_FN void sim_host_waits(sim *s) {
    if (s->now[SIM_HOST] < s->now[FSDP_STREAM_COMPUTE])
        s->now[SIM_HOST] = s->now[FSDP_STREAM_COMPUTE];
    sim_join(s->clock[SIM_HOST], s->clock[FSDP_STREAM_COMPUTE]);
}

/* Returns the time when all issued work is done. */
SIM_FN int64_t sim_end(const sim *s) {
    int64_t end = 0;
    for (int a = 0; a < SIM_ACTORS; a++)
        if (s->now[a] > end) end = s->now[a];
    return end;
}

/* ---- memory ---------------------------------------------------------------------------------- */

/* Returns addresses that cannot be accessed. */
SIM_FN char *sim_hidden(size_t size) {
    void *ptr = mmap(NULL, size + 64, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    return ptr == MAP_FAILED ? NULL : (char *)ptr;
}

/* Returns the data at an address of device memory, for the tables and for tests; other addresses
   as they are. */
SIM_FN void *sim_host(sim *s, const void *ptr) {
    sim_block *b = s->opaque && ptr ? sim_find(s, ptr) : NULL;
    return b ? b->data + ((const char *)ptr - b->ptr) : (void *)(uintptr_t)ptr;
}

SIM_FN fsdp_status sim_alloc(sim *s, int kind, size_t size, void **ptr) {
    sim_block *b = (sim_block *)calloc(1, sizeof *b);
    *ptr = NULL;
    if (b) b->data = (char *)calloc(1, size + 64);
    if (b && b->data) b->ptr = s->opaque && kind != FSDP_MEMORY_PINNED ? sim_hidden(size) : b->data;
    if (b && b->ptr && s->checks)
        b->cells = (sim_cell *)calloc(size / SIM_GRAIN + 1, sizeof *b->cells);
    if (!b || !b->ptr || (s->checks && !b->cells)) return FSDP_ERR_OUT_OF_MEMORY;
    b->nbytes = size;
    b->kind = kind;
    b->number = (int)s->num_blocks++;
    b->next = s->blocks;
    s->blocks = b;
    s->live_blocks++;
    s->live_bytes[kind] += (int64_t)size;
    *ptr = b->ptr;
    return FSDP_OK;
}

SIM_FN void sim_free(sim *s, int kind, const void *ptr, size_t size) {
    for (sim_block **at = &s->blocks; *at; at = &(*at)->next) {
        sim_block *b = *at;
        if (b->ptr != (const char *)ptr) continue;
        s->bad_frees += b->kind != kind || b->nbytes != size;
        s->live_bytes[b->kind] -= (int64_t)b->nbytes;
        sim_touch(s, SIM_HOST, "free", b->ptr, (int64_t)b->nbytes, 1); /* no actor still uses it */
        *at = b->next;
        if (b->ptr != b->data) (void)munmap(b->ptr, b->nbytes + 64);
        free(b->data);
        free(b->cells);
        free(b);
        s->live_blocks--;
        return;
    }
    s->bad_frees += ptr != NULL;
}

/* ---- the device ------------------------------------------------------------------------------ */

SIM_FN sim *sim_of(fsdp_device *device) { return (sim *)(void *)device; }

SIM_FN fsdp_status sim_device_open(const fsdp_boot *boot, fsdp_device **device) {
    *device = (fsdp_device *)boot->user;
    return FSDP_OK;
}
SIM_FN void sim_device_close(fsdp_device *device) { (void)device; }
SIM_FN fsdp_status sim_device_alloc(fsdp_device *device, int kind, size_t size, void **ptr) {
    return sim_alloc(sim_of(device), kind, size, ptr);
}
SIM_FN void sim_device_free(fsdp_device *device, int kind, void *ptr, size_t size) {
    sim_free(sim_of(device), kind, ptr, size);
}

SIM_FN fsdp_status sim_device_stream(fsdp_device *device, int stream, void **native) {
    sim *s = sim_of(device);
    s->streams[stream].owner = s;
    s->streams[stream].actor = stream;
    s->live_streams++;
    *native = &s->streams[stream];
    return FSDP_OK;
}
SIM_FN fsdp_status sim_device_event(fsdp_device *device, void **native) {
    *native = calloc(1, sizeof(sim_event));
    if (!*native) return FSDP_ERR_OUT_OF_MEMORY;
    sim_of(device)->live_events++;
    return FSDP_OK;
}
SIM_FN void sim_device_destroy(fsdp_device *device, void *stream, void *event) {
    if (stream) sim_of(device)->live_streams--;
    if (event) sim_of(device)->live_events--;
    free(event);
}

SIM_FN fsdp_status sim_device_record(fsdp_device *device, void *stream, void *event) {
    sim *s = sim_of(device);
    sim_event *e = (sim_event *)event;
    int actor = sim_actor(stream);
    s->records++;
    sim_work(s, actor, 0, 0);
    e->time = s->now[actor];
    e->actor = actor;
    memcpy(e->clock, s->clock[actor], sizeof e->clock);
    return FSDP_OK;
}

SIM_FN fsdp_status sim_device_wait(fsdp_device *device, void *stream, void *event) {
    sim *s = sim_of(device);
    const sim_event *e = (const sim_event *)event;
    int actor = sim_actor(stream);
    if (s->on_wait) s->on_wait(s->on_op_user, e->actor);
    if (s->waits++ == s->ignore_wait) return FSDP_OK;
    if (s->now[actor] < e->time) s->now[actor] = e->time;
    sim_join(s->clock[actor], e->clock);
    return FSDP_OK;
}

SIM_FN fsdp_status sim_device_sync(fsdp_device *device, void *event, int64_t timeout_ns) {
    sim *s = sim_of(device);
    const sim_event *e = (const sim_event *)event;
    if (timeout_ns == 0 && s->now[SIM_HOST] < e->time) return FSDP_ERR_TIMEOUT; /* only a query */
    s->syncs++;
    if (s->now[SIM_HOST] < e->time) s->now[SIM_HOST] = e->time;
    sim_join(s->clock[SIM_HOST], e->clock);
    return FSDP_OK;
}

SIM_FN fsdp_status sim_device_elapsed(fsdp_device *device, void *from, void *to, int64_t *ns) {
    (void)device;
    *ns = ((const sim_event *)to)->time - ((const sim_event *)from)->time;
    return FSDP_OK;
}

/* Returns the op with addresses that the host can access. */
SIM_FN fsdp_op sim_on_host(sim *s, const fsdp_op *op) {
    fsdp_op real = *op;
    real.src_ptr = sim_host(s, op->src_ptr);
    real.dst_ptr = sim_host(s, op->dst_ptr);
    real.clip = (const double *)sim_host(s, op->clip);
    return real;
}

/* Notes the accesses to the blocks of one side of a copy. */
SIM_FN void sim_touch_blocks(sim *s, int actor, const fsdp_op *op, int write) {
    const fsdp_block *blocks = (const fsdp_block *)op->list;
    int64_t size = (int64_t)fsdp_dtype_size(write ? op->out_dtype : op->dtype);
    const char *base = write ? (const char *)op->dst_ptr : (const char *)op->src_ptr;
    for (uint32_t i = 0; s->checks && i < op->list_count; i++) {
        const fsdp_block *b = &blocks[i];
        for (int64_t row = 0; row < b->height; row++) {
            int64_t at = write ? b->dst + row * b->dst_pitch : b->src + row * b->src_pitch;
            sim_touch(s, actor, fsdp_label_name(op->label), base + at * size, b->width * size,
                      write);
        }
    }
}

SIM_FN fsdp_status sim_device_copy(fsdp_device *device, void *stream, const fsdp_op *op) {
    sim *s = sim_of(device);
    int actor = sim_actor(stream);
    if (s->threads) return FSDP_OK;
    s->works++;
    sim_work(s, actor, 0, sim_cost(op->bytes, s->copy_bytes_per_ns));
    sim_touch_blocks(s, actor, op, 0);
    sim_touch_blocks(s, actor, op, 1);
    if (op->clip) sim_touch(s, actor, "clip", op->clip, (int64_t)sizeof *op->clip, 0);
    fsdp_op real = sim_on_host(s, op);
    return s->moves ? lib_host_ops()->copy(NULL, NULL, &real) : FSDP_OK;
}

SIM_FN fsdp_status sim_device_zero(fsdp_device *device, void *stream, const fsdp_op *op) {
    sim *s = sim_of(device);
    int actor = sim_actor(stream);
    if (s->threads) return FSDP_OK;
    s->works++;
    sim_work(s, actor, 0, sim_cost(op->bytes, s->copy_bytes_per_ns));
    sim_touch(s, actor, fsdp_label_name(op->label), op->dst_ptr, (int64_t)op->bytes, 1);
    fsdp_op real = sim_on_host(s, op);
    return s->moves ? lib_host_ops()->zero(NULL, NULL, &real) : FSDP_OK;
}

SIM_FN fsdp_status sim_device_norm(fsdp_device *device, void *stream, const fsdp_op *op) {
    sim *s = sim_of(device);
    int actor = sim_actor(stream);
    if (s->threads) return FSDP_OK;
    s->works++;
    sim_work(s, actor, 0, sim_cost(op->count * fsdp_dtype_size(op->dtype), s->copy_bytes_per_ns));
    sim_touch_blocks(s, actor, op, 0);
    sim_touch(s, actor, "norm", op->dst_ptr, (int64_t)sizeof(double), 1);
    fsdp_op real = sim_on_host(s, op);
    return s->moves ? lib_host_ops()->norm(NULL, NULL, &real) : FSDP_OK;
}

SIM_FN void sim_update(sim *s, int actor, const fsdp_update *u) {
    int64_t state = u->count * (u->dtype == FSDP_F64 ? 8 : 4), second = state,
            grads = u->count * (int64_t)fsdp_dtype_size(u->grad_dtype);
    const int ema = u->kind == FSDP_UPDATE_EMA, swaps = ema && u->scalars[1] >= FSDP_EMA_SWAP;
    if (ema) second = u->count * (int64_t)fsdp_dtype_size(u->dtype);
    s->updated += (uint64_t)u->count;
    sim_work(s, actor, 0, sim_cost((uint64_t)grads, s->copy_bytes_per_ns));
    if (u->grad) sim_touch(s, actor, "update", u->grad, grads, u->kind == FSDP_UPDATE_UNSCALE);
    if (u->param)
        sim_touch(s, actor, "update", u->param, u->count * (int64_t)fsdp_dtype_size(u->dtype),
                  !ema || swaps);
    if (u->first && u->kind == FSDP_UPDATE_UNSCALE) sim_touch(s, actor, "update", u->first, 8, 0);
    else if (u->first) sim_touch(s, actor, "update", u->first, state, 1);
    if (u->second) sim_touch(s, actor, "update", u->second, second, 1);
    if (u->found) sim_touch(s, actor, "update", u->found, (int64_t)sizeof *u->found, 1);
    fsdp_update real = *u;
    real.param = sim_host(s, u->param);
    real.grad = sim_host(s, u->grad);
    real.first = sim_host(s, u->first);
    real.second = sim_host(s, u->second);
    real.found = (int32_t *)sim_host(s, u->found);
    if (s->moves) lib_host_update(&real);
}

SIM_FN fsdp_status sim_device_update(fsdp_device *device, void *stream, const fsdp_update *runs,
                                     uint32_t num) {
    sim *s = sim_of(device);
    s->updates++;
    for (uint32_t i = 0; i < num; i++) sim_update(s, sim_actor(stream), &runs[i]);
    return FSDP_OK;
}

/* ---- the comm -------------------------------------------------------------------------------- */

SIM_FN sim_group *sim_group_of(fsdp_comm *comm) { return (sim_group *)(void *)comm; }

SIM_FN fsdp_status sim_group_new(sim *s, int size, int rank, fsdp_comm **out) {
    sim_group *g = (sim_group *)calloc(1, sizeof *g);
    if (!g) return FSDP_ERR_OUT_OF_MEMORY;
    g->owner = s;
    g->size = size;
    g->rank = rank;
    g->next = s->groups;
    s->groups = g;
    s->live_groups++;
    *out = (fsdp_comm *)(void *)g;
    return FSDP_OK;
}

SIM_FN fsdp_status sim_comm_open(const fsdp_boot *boot, fsdp_caps *caps, fsdp_comm **world) {
    sim *s = (sim *)boot->user;
    caps->kinds = 1u << FSDP_OP_ALL_GATHER | 1u << FSDP_OP_REDUCE_SCATTER |
                  1u << FSDP_OP_ALL_REDUCE | 1u << FSDP_OP_BROADCAST;
    if (s->all_to_all) caps->kinds |= 1u << FSDP_OP_ALL_TO_ALL;
    caps->flags = s->fused ? FSDP_CAP_FUSED_REDUCE : 0;
    caps->comm_threads = s->comm_lanes;
    return sim_group_new(s, boot->size, boot->rank, world);
}

SIM_FN fsdp_status sim_comm_split(fsdp_comm *parent, const fsdp_group *group, fsdp_comm **out) {
    *out = NULL;
    return group->color < 0
               ? FSDP_OK
               : sim_group_new(sim_group_of(parent)->owner, group->size, group->index, out);
}

SIM_FN void sim_comm_close(fsdp_comm *comm) {
    sim_group *g = sim_group_of(comm);
    for (sim_group **at = &g->owner->groups; *at; at = &(*at)->next) {
        if (*at != g) continue;
        *at = g->next;
        break;
    }
    g->owner->live_groups--;
    free(g);
}

/* Notes the accesses of a collective on this rank. Reads by peers count as its own reads. */
SIM_FN void sim_touch_coll(sim *s, int actor, const sim_group *g, const fsdp_coll *c) {
    const char *what = fsdp_op_name(c->kind), *src = (const char *)c->src,
               *dst = (const char *)c->dst;
    int64_t in = (int64_t)fsdp_dtype_size(c->dtype), out = (int64_t)fsdp_dtype_size(c->out_dtype);
    for (uint32_t i = 0; i < c->num_segs; i++) {
        const fsdp_seg *seg = &c->segs[i];
        if (c->kind == FSDP_OP_ALL_GATHER) {
            int64_t part = seg->count * in, at = seg->full * in, mine = c->in_place ? g->rank : -1;
            if (!c->in_place) sim_touch(s, actor, what, src + seg->shard * in, part, 0);
            for (int k = 0; k < g->size; k++)
                sim_touch(s, actor, what, dst + at + k * part, part, k != mine);
        } else {
            sim_touch(s, actor, what, src + seg->full * in, g->size * seg->count * in, 0);
            sim_touch(s, actor, what, dst + seg->shard * out, seg->count * out, 1);
        }
    }
    const int64_t all = (int64_t)c->count * in * (c->kind == FSDP_OP_ALL_TO_ALL ? g->size : 1);
    if (c->kind == FSDP_OP_ALL_TO_ALL) sim_touch(s, actor, what, src, all, 0);
    if (c->num_segs == 0) sim_touch(s, actor, what, dst, all, 1);
}

/* Moves data as if every rank held this rank's: a gather and an exchange repeat it, a sum
   multiplies it. */
SIM_FN void sim_move(const sim_group *g, const fsdp_coll *c) {
    size_t in = fsdp_dtype_size(c->dtype), out = fsdp_dtype_size(c->out_dtype);
    const char *src = (const char *)sim_host(g->owner, c->src);
    char *dst = (char *)sim_host(g->owner, c->dst);
    for (uint32_t i = 0; i < c->num_segs; i++) {
        const fsdp_seg *seg = &c->segs[i];
        size_t part = (size_t)seg->count * in;
        char *full = dst + (size_t)seg->full * in;
        const char *mine = c->in_place ? full + (size_t)g->rank * part
                                       : src + (size_t)seg->shard * in;
        const char *piece = src + ((size_t)seg->full + (size_t)g->rank * (size_t)seg->count) * in;
        for (int k = 0; c->kind == FSDP_OP_ALL_GATHER && k < g->size; k++)
            if (full + (size_t)k * part != mine) memcpy(full + (size_t)k * part, mine, part);
        if (c->kind == FSDP_OP_REDUCE_SCATTER)
            lib_sum(dst + (size_t)seg->shard * out, c->out_dtype, piece, c->dtype, (size_t)seg->count,
                    c->scale * g->size, c->accumulate);
    }
    const size_t pair = (size_t)c->count * in;
    for (int k = 0; c->kind == FSDP_OP_ALL_TO_ALL && k < g->size; k++)
        memcpy(dst + (size_t)k * pair, src + (size_t)g->rank * pair, pair);
    if (c->kind == FSDP_OP_ALL_REDUCE && c->redop == FSDP_SUM && fsdp_dtype_is_float(c->dtype))
        lib_sum(dst, c->dtype, dst, c->dtype, (size_t)c->count, g->size, 0);
}

/* Returns the bytes that a rank receives in an all_reduce of `bytes` over R ranks: 2 (R-1)/R of
   them, rounded up. */
SIM_FN uint64_t sim_all_reduce_bytes(uint64_t bytes, int ranks) {
    const uint64_t size = (uint64_t)ranks;
    return (2 * (size - 1) * bytes + size - 1) / size;
}

SIM_FN fsdp_status sim_comm_run(fsdp_comm *comm, const fsdp_coll *c) {
    sim_group *g = sim_group_of(comm);
    sim *s = g->owner;
    int actor = sim_actor(c->stream);
    uint64_t nbytes = c->count * fsdp_dtype_size(c->dtype);
    nbytes = c->kind == FSDP_OP_ALL_REDUCE ? sim_all_reduce_bytes(nbytes, g->size)
                                           : nbytes * (uint64_t)(g->size - 1);
    if (s->threads) return FSDP_OK;
    s->colls[c->kind]++;
    s->coll_bytes[c->kind] += lib_coll_bytes(c->kind, (uint64_t)g->size,
                                               c->count * fsdp_dtype_size(c->dtype));
    sim_work(s, actor, g->free_at, s->latency_ns + sim_cost(nbytes, s->coll_bytes_per_ns));
    g->free_at = s->now[actor];
    if (s->checks) sim_touch_coll(s, actor, g, c);
    if (s->moves) sim_move(g, c);
    return FSDP_OK;
}

SIM_FN fsdp_status sim_comm_alloc(fsdp_comm *world, size_t size, void **ptr) {
    return sim_alloc(sim_group_of(world)->owner, SIM_MEMORY_COMM, size, ptr);
}
SIM_FN void sim_comm_free(fsdp_comm *world, void *ptr, size_t size) {
    sim_free(sim_group_of(world)->owner, SIM_MEMORY_COMM, ptr, size);
}
SIM_FN const char *sim_comm_error(fsdp_comm *comm) {
    (void)comm;
    return "the simulated comm does not fail";
}
SIM_FN void sim_comm_abort(fsdp_comm *world, fsdp_status status, const char *why) {
    (void)world, (void)status, (void)why;
}

/* ---- worlds ---------------------------------------------------------------------------------- */

/* Functions that do nothing. */
SIM_FN fsdp_status sim_null_work(fsdp_device *device, void *stream, const fsdp_op *op) {
    (void)device, (void)stream, (void)op;
    return FSDP_OK;
}
SIM_FN fsdp_status sim_null_event(fsdp_device *device, void *stream, void *event) {
    (void)device, (void)stream, (void)event;
    return FSDP_OK;
}
SIM_FN fsdp_status sim_null_sync(fsdp_device *device, void *event, int64_t timeout_ns) {
    (void)device, (void)event, (void)timeout_ns;
    return FSDP_OK;
}
SIM_FN fsdp_status sim_null_run(fsdp_comm *comm, const fsdp_coll *c) {
    (void)comm, (void)c;
    return FSDP_OK;
}

SIM_FN const fsdp_comm_ops *sim_comm_table(int null) {
    static const fsdp_comm_ops ops[2] = {
        {FSDP_COMM_VERSION, sizeof(fsdp_comm_ops), "sim", sim_comm_open, sim_comm_split,
         sim_comm_close, sim_comm_run, sim_comm_alloc, sim_comm_free, sim_comm_error,
         sim_comm_abort, NULL},
        {FSDP_COMM_VERSION, sizeof(fsdp_comm_ops), "null", sim_comm_open, sim_comm_split,
         sim_comm_close, sim_null_run, sim_comm_alloc, sim_comm_free, sim_comm_error,
         sim_comm_abort, NULL}};
    return &ops[null];
}

SIM_FN fsdp_device_ops sim_device_table(const sim *s) {
    fsdp_device_ops ops = {FSDP_DEVICE_VERSION,
                           sizeof(fsdp_device_ops),
                           FSDP_DEVICE_ASYNC | FSDP_DEVICE_HOST,
                           "sim",
                           sim_device_open,
                           sim_device_close,
                           sim_device_alloc,
                           sim_device_free,
                           sim_device_stream,
                           sim_device_event,
                           sim_device_destroy,
                           sim_device_record,
                           sim_device_wait,
                           sim_device_sync,
                           sim_device_event,
                           sim_device_elapsed,
                           sim_device_copy,
                           sim_device_zero,
                           sim_device_norm,
                           sim_device_update,
                           NULL};
    if (s->null) {
        ops.name = "null";
        ops.record = ops.wait = sim_null_event, ops.sync = sim_null_sync;
        ops.copy = ops.zero = ops.norm = sim_null_work;
        ops.timer = NULL, ops.elapsed = NULL, ops.update = NULL;
    }
    if (!s->async) {
        ops.name = s->null ? "null inline" : "sim inline";
        ops.flags &= ~(uint32_t)FSDP_DEVICE_ASYNC;
        ops.stream = NULL, ops.event = NULL, ops.destroy = NULL;
        ops.record = ops.wait = NULL, ops.sync = NULL;
        ops.timer = NULL, ops.elapsed = NULL;
    }
    if (s->opaque) ops.flags &= ~(uint32_t)FSDP_DEVICE_HOST;
    if (s->no_update) ops.update = NULL;
    return ops;
}

SIM_FN void sim_logged(int level, fsdp_status code, int rank, const char *text, void *user) {
    sim *s = (sim *)user;
    (void)level, (void)code, (void)rank;
    s->num_logged++;
    snprintf(s->logged, sizeof s->logged, "%s", text);
}

SIM_FN int64_t sim_clock(void *user) { return ((sim *)user)->now[SIM_HOST]; }

SIM_FN void sim_init(sim *s, int world_size, int rank) {
    memset(s, 0, sizeof *s);
    s->world_size = world_size;
    s->rank = rank;
    s->async = s->fused = s->moves = 1;
    s->comm_lanes = 2;
    s->ignore_wait = -1;
    s->latency_ns = 1000;
    s->coll_bytes_per_ns = 10;
    s->copy_bytes_per_ns = 100;
}

/* Returns the world, or NULL if fsdp_init failed. */
SIM_FN fsdp_world *sim_open(sim *s) {
    fsdp_world_desc d = FSDP_ZERO;
    d.world_size = s->world_size;
    d.rank = s->rank;
    d.comm_threads = s->threads ? s->threads : -1;
    d.job = "sim";
    d.timeout_ms = 1000;
    d.log_level = FSDP_LOG_WARN;
    d.logger.log = sim_logged;
    d.clock.now_ns = sim_clock;
    d.logger.user = d.clock.user = d.user = s;
    d.comm_ops = sim_comm_table(s->null);
    s->device = sim_device_table(s);
    d.device_ops = &s->device;
    if (fsdp_init(&d, &s->world)) s->world = NULL;
    return s->world;
}

SIM_FN int sim_saw(void *user, fsdp_model *model, fsdp_op *op) {
    sim *s = (sim *)user;
    (void)model;
    if (!op->model || op->kind > FSDP_OP_HOOK) return 0; /* the model's ops, without slot markers */
    if (s->num_ops == s->cap_ops) {
        int cap = s->cap_ops ? 2 * s->cap_ops : 256;
        fsdp_op *bigger = (fsdp_op *)realloc(s->ops, (size_t)cap * sizeof *bigger);
        if (!bigger) return 0;
        s->ops = bigger;
        s->cap_ops = cap;
    }
    s->ops[s->num_ops++] = *op;
    if (s->on_op) s->on_op(s->on_op_user, op);
    return 0;
}

SIM_FN fsdp_status sim_watch(sim *s, fsdp_model *model) {
    fsdp_extension extension = FSDP_ZERO;
    extension.op = sim_saw;
    extension.user = s;
    return fsdp_attach(model, &extension);
}

/* Returns the number of objects that the library has not freed, or has freed wrongly. */
SIM_FN int64_t sim_close(sim *s) {
    (void)fsdp_shutdown(s->world);
    free(s->ops);
    s->ops = NULL;
    s->world = NULL;
    return s->live_blocks + s->live_events + s->live_streams + s->live_groups + s->bad_frees;
}
#endif /* SIM_H */
