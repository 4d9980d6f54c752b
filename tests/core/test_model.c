/* test_model.c - random calls, possible or not, on random models, compared with a small model
   written from the documents only: the transition table (core-flow.md 1), the pools (3) and the
   manual at the top of fsdp.h. After each call the model predicts the status, each unit's state,
   the collectives issued, the slots held, and the bytes of each pool.

       FSDP_SEED=123 build/tests/test_model --filter=model.streams     repeats one seed
       FSDP_TRACE=1                                                    prints every call

   One process plays one rank of a world on the tables of sim.h, inline or with streams, where the
   race checker runs. A seed makes many models, with some thousand calls each.

   SPDX-License-Identifier: MIT */
#include "harness.h"
#include <math.h> /* HUGE_VAL */
#include "lab.h"
#include "sim.h"
#include "transitions.h"

enum { MAX_UNITS = 5, MAX_PARAMS = 4, MAX_LIST = 3, MAX_CLASSES = 64, MAX_COLLS = 64 };
enum { MAX_ORDER = 64 * MAX_UNITS }; /* the order of forwards is bounded */
enum { ALWAYS = FSDP_RESHARD_ALWAYS, NEVER = FSDP_RESHARD_NEVER };

/* ---- the description of a program ------------------------------------------------------------ */

typedef struct {
    int ndim, dim, frozen, keep;
    int64_t shape[2];
    fsdp_dtype dtype;
} param;

typedef struct {
    param params[MAX_PARAMS];
    int num_params, reshard;
    int own_mesh, kind, shards, replicas; /* kind: FSDP_MESH_INFO_* */
    fsdp_dtype param_dtype, reduce_dtype; /* KEEP: the model's */
} unit;

typedef struct {
    int world, rank, async, lanes, fused, comm_lanes;
    int kind, shards, replicas, reshard;
    fsdp_dtype param_dtype, reduce_dtype, grad_dtype;
    int offload, implicit, debug, hooks; /* hooks: they may be set */
    int64_t budget, direct_min;
    unit units[MAX_UNITS];
    int num_units;
} net;

static int one_in(uint64_t *seed, int n) { return lab_pick(seed, n) == 0; }

static int64_t stored_of(const param *p, int shards) { /* elements of a stored shard */
    int64_t numel = 1;
    for (int d = 0; d < p->ndim; d++)
        numel *= d == p->dim ? (p->shape[d] + shards - 1) / shards : p->shape[d];
    return numel;
}

static void random_mesh(uint64_t *seed, int world, int *kind, int *shards, int *replicas) {
    *kind = lab_pick(seed, 3);
    *shards = *kind == FSDP_MESH_INFO_DDP ? 1 : world;
    if (*kind == FSDP_MESH_INFO_HSDP) do
            *shards = 1 + lab_pick(seed, world);
        while (world % *shards);
    *replicas = world / *shards;
}

/* Returns 0, or a number of slices that divides the shard group's size. */
static int random_slices(uint64_t *seed, int shards) {
    int n = 2 + lab_pick(seed, shards);
    return n < shards && shards % n == 0 ? n : 0;
}

static void random_unit(uint64_t *seed, const net *n, unit *u, fsdp_dtype dtype, int mixed) {
    static const fsdp_dtype floats[] = {FSDP_F32, FSDP_BF16, FSDP_F64};
    static const fsdp_dtype casts[] = {FSDP_DTYPE_KEEP, FSDP_DTYPE_KEEP, FSDP_F32, FSDP_BF16};
    int frozen = one_in(seed, 8);
    if (mixed && one_in(seed, 3)) dtype = floats[lab_pick(seed, 3)]; /* for all trained ones */
    u->num_params = 1 + lab_pick(seed, MAX_PARAMS);
    for (int i = 0; i < u->num_params; i++) {
        param *p = &u->params[i];
        p->ndim = 1 + lab_pick(seed, 2);
        p->dim = p->ndim == 2 && one_in(seed, 3);
        for (int d = 0; d < p->ndim; d++)
            p->shape[d] = one_in(seed, 12) ? 0 : 1 + lab_pick(seed, 9);
        p->frozen = frozen || one_in(seed, 4);
        p->dtype = p->frozen && mixed && one_in(seed, 2) ? floats[lab_pick(seed, 3)] : dtype;
        p->keep = mixed && one_in(seed, 3);
    }
    u->param_dtype = one_in(seed, 4) ? casts[lab_pick(seed, 4)] : FSDP_DTYPE_KEEP;
    u->reduce_dtype = one_in(seed, 4) ? casts[lab_pick(seed, 4)] : FSDP_DTYPE_KEEP;
    u->kind = n->kind, u->shards = n->shards, u->replicas = n->replicas;
    u->own_mesh = one_in(seed, 6);
    if (u->own_mesh) random_mesh(seed, n->world, &u->kind, &u->shards, &u->replicas);
    u->reshard = lab_pick(seed, 3) - 1;
    if (one_in(seed, 2) && random_slices(seed, u->shards))
        u->reshard = random_slices(seed, u->shards);
}

/* Ops run inline, on streams of the device, or in worker threads. */
enum { INLINE, STREAMS, LANES };

static void random_net(uint64_t *seed, net *n, int mode) {
    static const int worlds[] = {1, 2, 3, 4, 4, 6, 8};
    static const fsdp_dtype casts[] = {FSDP_DTYPE_KEEP, FSDP_DTYPE_KEEP, FSDP_BF16, FSDP_F16,
                                       FSDP_F32};
    fsdp_dtype dtype = one_in(seed, 4) ? FSDP_BF16 : one_in(seed, 8) ? FSDP_F64 : FSDP_F32;
    int mixed = one_in(seed, 3);
    memset(n, 0, sizeof *n);
    n->world = worlds[lab_pick(seed, 7)];
    n->rank = lab_pick(seed, n->world);
    n->async = mode == STREAMS;
    n->lanes = mode == LANES ? 1 + lab_pick(seed, 2) : 0;
    n->fused = !one_in(seed, 3);
    n->comm_lanes = 1 + lab_pick(seed, 3);
    random_mesh(seed, n->world, &n->kind, &n->shards, &n->replicas);
    n->reshard = one_in(seed, 5) ? NEVER : FSDP_RESHARD_DEFAULT;
    n->param_dtype = casts[lab_pick(seed, 5)];
    n->reduce_dtype = casts[lab_pick(seed, 5)];
    n->grad_dtype = one_in(seed, 5) ? FSDP_F32 : FSDP_DTYPE_KEEP;
    n->offload = one_in(seed, 6);
    n->implicit = lab_pick(seed, 3) - 1;
    n->debug = one_in(seed, 4);
    n->hooks = one_in(seed, 3);
    n->budget = one_in(seed, 3) ? 64 + lab_pick(seed, 448) : 0;
    n->direct_min = one_in(seed, 2) ? 1 : one_in(seed, 2) ? 128 : FSDP_DIRECT_NEVER;
    n->num_units = 1 + lab_pick(seed, MAX_UNITS);
    for (int i = 0; i < n->num_units; i++) random_unit(seed, n, &n->units[i], dtype, mixed);
}

/* ---- the model ------------------------------------------------------------------------------- */

typedef struct {
    int state, storage, stale, due;
    int newest; /* its newest entry in the order of forwards; -1: none */
    int reshard, keep_backward, sync, all_reduce, no_unshard, reduce_unused;
    double factor;
    int lists[2][MAX_LIST], counts[2]; /* prefetch lists of forward and backward */
    int sum_hook, grad_hooks[MAX_PARAMS];
    int frozen[MAX_PARAMS];
    int used[MAX_PARAMS];    /* since the last reduction */
    int partly[MAX_PARAMS];  /* in sums that wait for the all-reduce */
    int reduced[MAX_PARAMS]; /* set in the gradient at finalize */
    int has[MAX_PARAMS];     /* has a shard gradient */
    int unreduced, partial;  /* 1 if microbatches wait for the reduction, for the all-reduce */
    int summed;              /* some gradient was reduced since zero_grad */
    int slices;              /* number of slices, of which the unit keeps one */
    int holds[FSDP_POOL_COUNT], prefetched;
    int64_t bytes[FSDP_POOL_COUNT]; /* size of one slot */
} unit_model;

typedef struct {
    int pool, slots, held;
    int64_t bytes;
} slot_class;

typedef struct {
    int kind, label, unit, group;
    uint64_t count, nbytes; /* nbytes: size of one element */
} coll;

typedef struct {
    const net *n;
    int backward, grad_enabled, is_last, failed; /* failed: a hook failed since finalize */
    unit_model units[MAX_UNITS];
    int order[MAX_ORDER], before[MAX_ORDER], num_order; /* the unit, and its previous entry */
    slot_class classes[MAX_CLASSES];
    int num_classes;
    /* The latest call: */
    coll colls[MAX_COLLS];
    int num_colls;
    int copies_in, slices, sums_seen, grads_seen; /* numbers of copies and of hook calls */
} model;

static void model_start(model *m, const net *n) {
    memset(m, 0, sizeof *m);
    m->n = n;
    m->grad_enabled = m->is_last = 1;
    for (int i = 0; i < n->num_units; i++) {
        unit_model *u = &m->units[i];
        u->sync = u->all_reduce = 1;
        u->newest = -1;
        u->reshard = n->units[i].reshard ? n->units[i].reshard : n->reshard ? n->reshard : ALWAYS;
        for (int k = 0; k < n->units[i].num_params; k++)
            u->frozen[k] = n->units[i].params[k].frozen;
    }
}

/* -- derived from the descs -- */

static fsdp_dtype gathered_as(const net *n, const unit *u, const param *p) {
    fsdp_dtype cast = u->param_dtype ? u->param_dtype : n->param_dtype;
    return p->keep || !cast ? p->dtype : cast;
}
static fsdp_dtype grad_as(const net *n, const param *p) {
    return n->grad_dtype ? n->grad_dtype : p->dtype;
}
static int size_of(fsdp_dtype dtype) { return (int)fsdp_dtype_size(dtype); }

enum { ALL, TRAINABLE, NOT_EMPTY };

/* Returns the number of pairs of dtypes (stored, gathered) of a unit's parameters. */
static int pairs_of(const model *m, int i, int which) {
    const unit *u = &m->n->units[i];
    int pairs = 0, counts[MAX_PARAMS];
    for (int k = 0; k < u->num_params; k++) {
        counts[k] = which == TRAINABLE   ? !m->units[i].frozen[k]
                    : which == NOT_EMPTY ? stored_of(&u->params[k], u->shards) > 0
                                         : 1;
        int old = !counts[k];
        for (int j = 0; j < k && !old; j++)
            old = counts[j] && u->params[j].dtype == u->params[k].dtype &&
                  gathered_as(m->n, u, &u->params[j]) == gathered_as(m->n, u, &u->params[k]);
        pairs += !old;
    }
    return pairs;
}

static int trainables(const model *m, int i) {
    int count = 0;
    for (int k = 0; k < m->n->units[i].num_params; k++) count += !m->units[i].frozen[k];
    return count;
}

/* Alignment of full parameters, in bytes. A rank that is the whole shard group pads its shards
   to it. */
static int64_t grain_of(const net *n) { return n->async ? 256 : 64; }
static int64_t aligned(int64_t x, int64_t to) { return x ? (x + to - 1) / to * to : to; }
static int64_t held_of(const net *n, const unit *u, const param *p) {
    int64_t stored = stored_of(p, u->shards);
    return u->shards > 1 || !stored ? stored
                                    : aligned(stored, grain_of(n) / size_of(gathered_as(n, u, p)));
}

/* Returns the number of elements that one rank contributes to a gather of the unit over its
   shard group. Sets *nbytes to the size of an element. */
static uint64_t gather_count(const model *m, int i, uint64_t *nbytes) {
    const unit *u = &m->n->units[i];
    uint64_t elements = 0, bytes = 0;
    for (int k = 0; k < u->num_params; k++) {
        uint64_t stored = (uint64_t)held_of(m->n, u, &u->params[k]);
        elements += stored;
        bytes += stored * (uint64_t)size_of(gathered_as(m->n, u, &u->params[k]));
    }
    int one = pairs_of(m, i, ALL) == 1;
    *nbytes = one ? (uint64_t)size_of(gathered_as(m->n, u, &u->params[0])) : 1;
    return one ? elements : bytes;
}

static int casts(const model *m, int i) {
    const unit *u = &m->n->units[i];
    int cast = 0;
    for (int k = 0; k < u->num_params; k++)
        cast |= gathered_as(m->n, u, &u->params[k]) != u->params[k].dtype;
    return cast;
}

/* Returns the dtype of the reduction: the policy's, otherwise that of the shard gradients. */
static fsdp_dtype reduced_in(const model *m, int i) {
    const unit *u = &m->n->units[i];
    fsdp_dtype d = u->reduce_dtype ? u->reduce_dtype : m->n->reduce_dtype;
    for (int k = 0; k < u->num_params && !d; k++)
        if (!m->units[i].frozen[k]) d = grad_as(m->n, &u->params[k]);
    return d;
}

/* Returns the dtype of the gathered gradients if all trainable parameters have the same pair of
   dtypes, otherwise 0: the gradients do not lie in one block. */
static fsdp_dtype grads_in(const model *m, int i) {
    const unit *u = &m->n->units[i];
    int k = 0;
    if (pairs_of(m, i, TRAINABLE) != 1) return 0;
    while (m->units[i].frozen[k]) k++;
    return gathered_as(m->n, u, &u->params[k]);
}
static int is_wide(fsdp_dtype d) { return d == FSDP_F32 || d == FSDP_F64; }

/* Returns 1 if shards are copied into the slot: if they are cast, come from the host or from
   several blocks; with debug or AddressSanitizer also in a shard group of one, so that a kept
   pointer finds NaN or is reported. */
static int moves(const model *m, int i) {
    return m->n->offload || casts(m, i) || pairs_of(m, i, ALL) > 1 ||
           ((m->n->debug || (W_ASAN && !m->n->async)) && m->n->units[i].shards == 1);
}

/* Returns 1 if the reduction writes the gradients, or the unreduced ones, straight into the
   shard gradients, and casts, scales and adds on the way. */
static int straight(const model *m, int i, int hook) {
    const unit *d = &m->n->units[i];
    return d->replicas == 1 && (d->shards == 1 || (m->n->fused && !m->n->offload)) &&
           pairs_of(m, i, TRAINABLE) == 1 && is_wide(reduced_in(m, i)) && !hook;
}

/* Returns 1 if the gradients must be copied before their reduction, because no sum in another
   dtype takes them as they are. hook: an all-reduce hook is set, which gets the sums in their
   dtype. */
static int converts(const model *m, int i, int hook) {
    fsdp_dtype in = grads_in(m, i), red = reduced_in(m, i);
    int narrow = in == FSDP_BF16 || in == FSDP_F16;
    int fuses = m->n->fused && m->n->units[i].shards > 1 && pairs_of(m, i, TRAINABLE) == 1;
    return in != red && !((fuses || straight(m, i, hook)) && red == FSDP_F32 && narrow);
}

/* -- slots -- */

/* With streams there are two slots of a size if one may be filled while the other is in use,
   whichever unit takes a slot first. The parameters of the only unit of a size are never in two
   slots. */
static int filled_ahead(const model *m, int pool, int64_t bytes) {
    int ahead = 0, units = 0;
    for (int i = 0; i < m->n->num_units; i++) {
        if (m->units[i].bytes[pool] != bytes) continue;
        ahead |= pool == FSDP_POOL_GATHER && units++ > 0;
        ahead |= pool == FSDP_POOL_GRAD && !converts(m, i, 0); /* hooks may be set and removed */
        ahead |= pool == FSDP_POOL_REDUCE_OUT && m->n->units[i].replicas > 1;
    }
    return ahead && (m->n->async || m->n->lanes);
}

/* Returns the class of slots of one pool and size, whichever units take them. */
static slot_class *class_of(model *m, int pool, int64_t bytes) {
    slot_class *c = m->classes;
    while (c < m->classes + m->num_classes && (c->pool != pool || c->bytes != bytes)) c++;
    CHECK(c < m->classes + MAX_CLASSES);
    if (c == m->classes + m->num_classes) {
        m->num_classes++;
        c->pool = pool;
        c->bytes = bytes;
        c->held = c->slots = 0;
    }
    return c;
}

static void take(model *m, int i, int pool) {
    unit_model *u = &m->units[i];
    if (u->bytes[pool] == 0) return;
    slot_class *c = class_of(m, pool, u->bytes[pool]);
    if (c->slots == 0) c->slots = filled_ahead(m, pool, c->bytes) ? 2 : 1;
    u->holds[pool]++;
    if (++c->held > c->slots) c->slots = c->held;
}

static void give(model *m, int i, int pool) {
    unit_model *u = &m->units[i];
    if (u->holds[pool] == 0) return;
    u->holds[pool]--;
    class_of(m, pool, u->bytes[pool])->held--;
}

static void issue(model *m, int kind, int label, int i, int group, uint64_t count,
                  uint64_t nbytes) {
    CHECK(m->num_colls < MAX_COLLS);
    coll *c = &m->colls[m->num_colls++];
    c->kind = kind, c->label = label, c->unit = i, c->group = group;
    c->count = count, c->nbytes = nbytes;
}

/* -- actions -- */

static void reshard(model *m, int i) {
    unit_model *u = &m->units[i];
    give(m, i, FSDP_POOL_GATHER);
    give(m, i, FSDP_POOL_SLICE);
    u->storage = FSDP_STORAGE_SHARDED;
    u->stale = u->prefetched = 0;
}

static int gathers(const unit_model *u) { /* Returns 1 if unshard gathers. */
    return u->stale || u->storage == FSDP_STORAGE_SHARDED ||
           u->storage == FSDP_STORAGE_SHARDED_POST_FORWARD;
}

static void unshard(model *m, int i) {
    unit_model *u = &m->units[i];
    const unit *d = &m->n->units[i];
    uint64_t nbytes, count = gather_count(m, i, &nbytes);
    if (!gathers(u)) return;
    if (u->stale) reshard(m, i);
    take(m, i, FSDP_POOL_GATHER);
    if (u->storage == FSDP_STORAGE_SHARDED_POST_FORWARD) {
        count *= (uint64_t)(d->shards / u->slices);
        if (count) issue(m, FSDP_OP_ALL_GATHER, FSDP_LABEL_GATHER, i, u->slices, count, nbytes);
        give(m, i, FSDP_POOL_SLICE);
    } else {
        int moved = moves(m, i);
        m->copies_in += moved ? pairs_of(m, i, NOT_EMPTY) : 0;
    }
    if (u->storage == FSDP_STORAGE_SHARDED && d->shards > 1 && count) {
        issue(m, FSDP_OP_ALL_GATHER, FSDP_LABEL_GATHER, i, d->shards, count, nbytes);
    }
    u->storage = FSDP_STORAGE_IN_FLIGHT;
}

static void wait_for(unit_model *u) {
    if (u->storage == FSDP_STORAGE_IN_FLIGHT) u->storage = FSDP_STORAGE_UNSHARDED;
    u->prefetched = 0;
}

static void prefetch(model *m, int target, int backward) {
    unit_model *u = &m->units[target];
    int64_t ahead = u->bytes[FSDP_POOL_GATHER];
    if (!gathers(u) || (backward && u->no_unshard)) return;
    for (int i = 0; i < m->n->num_units; i++)
        if (m->units[i].prefetched) ahead += m->units[i].bytes[FSDP_POOL_GATHER];
    if (m->n->budget && ahead > m->n->budget) return;
    unshard(m, target);
    u->prefetched = 1;
}

static void reshard_forward(model *m, int i) {
    unit_model *u = &m->units[i];
    int n = u->reshard;
    uint64_t nbytes, count = gather_count(m, i, &nbytes);
    if (n == NEVER) return;
    reshard(m, i);
    if (n < 2 || n >= m->n->units[i].shards) return;
    take(m, i, FSDP_POOL_SLICE);
    u->storage = FSDP_STORAGE_SHARDED_POST_FORWARD;
    u->slices = n;
    m->slices += count > 0;
}

/* A gather that no call has waited for was not needed. */
static void reshard_backward(model *m, int i) {
    const unit_model *u = &m->units[i];
    if (u->storage == FSDP_STORAGE_IN_FLIGHT ? m->is_last : !u->keep_backward) reshard(m, i);
}

/* Returns 1 if backward writes straight into the shard gradient. */
static int aliases(const model *m, int i) {
    const unit *d = &m->n->units[i];
    const unit_model *u = &m->units[i];
    if (d->shards * d->replicas > 1 || m->n->offload || !u->sync || u->unreduced) return 0;
    if (u->sum_hook) return 0;
    if (!(u->factor <= 1 && u->factor >= 1) && u->factor > 0) return 0;
    if (pairs_of(m, i, ALL) > 1) return 0;
    for (int k = 0; k < d->num_params; k++)
        if (!u->frozen[k] && (gathered_as(m->n, d, &d->params[k]) != d->params[k].dtype ||
                              grad_as(m->n, &d->params[k]) != d->params[k].dtype ||
                              reduced_in(m, i) != d->params[k].dtype))
            return 0;
    return 1;
}

static void grads(model *m, int i) {
    for (int k = 0; k < m->n->units[i].num_params; k++) /* zeros if backward writes nothing */
        if (m->units[i].reduce_unused && !m->units[i].frozen[k]) m->units[i].used[k] = 1;
    if (trainables(m, i) == 0 || aliases(m, i) || m->units[i].holds[FSDP_POOL_GRAD]) return;
    take(m, i, FSDP_POOL_GRAD);
}

/* Returns 1 if post_backward reduces. If one rank holds the full parameters, the sums over the
   shard group are the gradients themselves: without the all-reduce nothing is reduced yet. */
static int syncs(const model *m, int i) {
    const unit *d = &m->n->units[i];
    const unit_model *u = &m->units[i];
    return u->sync && (u->all_reduce || d->shards > 1 || d->replicas == 1);
}

/* The gradients of a backward become the reduction's input, or wait for the reduction. */
static void accumulate(model *m, int i) {
    unit_model *u = &m->units[i];
    int waits = !syncs(m, i) || u->unreduced;
    if (aliases(m, i)) return;
    if (waits ? grads_in(m, i) == reduced_in(m, i) : !converts(m, i, u->sum_hook)) return;
    if (u->holds[FSDP_POOL_REDUCE_IN] == 0) take(m, i, FSDP_POOL_REDUCE_IN);
    give(m, i, FSDP_POOL_GRAD);
}

/* Returns 1 if the reduction needs an output apart from the shard gradients. */
static int takes_out(const model *m, int i) {
    const unit *d = &m->n->units[i];
    if (d->shards == 1 || straight(m, i, m->units[i].sum_hook)) return 0;
    if (d->replicas > 1 || m->n->fused || m->n->offload || pairs_of(m, i, TRAINABLE) > 1 ||
        m->units[i].sum_hook)
        return 1;
    for (int k = 0; k < d->num_params; k++)
        if (!m->units[i].frozen[k] && reduced_in(m, i) != grad_as(m->n, &d->params[k])) return 1;
    return m->units[i].summed;
}

/* The sums over the shard group, after the all-reduce over the replicas if there are any, go
   into the shard gradients. */
static void sum_replicas(model *m, int i, uint64_t count) {
    const unit *d = &m->n->units[i];
    unit_model *u = &m->units[i];
    int waits = d->replicas > 1 && !u->all_reduce;
    u->partial |= waits;
    if (waits) {
        while (u->holds[FSDP_POOL_REDUCE_OUT] > 1) give(m, i, FSDP_POOL_REDUCE_OUT);
        return;
    }
    if (d->replicas > 1 && count)
        issue(m, FSDP_OP_ALL_REDUCE, FSDP_LABEL_REPLICAS, i, d->replicas, count,
              (uint64_t)size_of(reduced_in(m, i)));
    m->sums_seen += u->sum_hook;
    for (int k = 0; k < d->num_params; k++) {
        u->reduced[k] |= u->partly[k];
        u->partly[k] = 0;
        if (!u->grad_hooks[k] || u->frozen[k] || !(u->reduced[k] || u->has[k])) continue;
        m->grads_seen++;
        u->stale = u->storage != FSDP_STORAGE_SHARDED; /* the hook may have written the shard */
    }
    while (u->holds[FSDP_POOL_REDUCE_OUT] > 0) give(m, i, FSDP_POOL_REDUCE_OUT);
    u->partial = 0;
    u->summed = 1;
}

/* Reduces the gradients of a backward (fresh) and the unreduced ones into the shard gradients,
   as far as the unit's policy allows. */
static void reduce(model *m, int i, int fresh) {
    const unit *d = &m->n->units[i];
    unit_model *u = &m->units[i];
    int any = u->partial;
    uint64_t count = 0;
    if (trainables(m, i) == 0) return;
    for (int k = 0; k < d->num_params; k++) {
        any |= u->used[k];
        if (!u->frozen[k]) count += (uint64_t)held_of(m->n, d, &d->params[k]);
    }
    if (!any) { /* no parameter was used, and no gradient waits */
        give(m, i, FSDP_POOL_GRAD);
        give(m, i, FSDP_POOL_REDUCE_IN);
        u->unreduced = 0;
        return;
    }
    if (fresh) accumulate(m, i);
    u->unreduced |= fresh;
    if (!syncs(m, i)) return;
    if (u->unreduced) {
        fsdp_dtype in = u->holds[FSDP_POOL_REDUCE_IN] ? reduced_in(m, i) : grads_in(m, i);
        int adds = u->partial && m->n->fused && is_wide(reduced_in(m, i)); /* to waiting sums */
        if (takes_out(m, i) && !adds) take(m, i, FSDP_POOL_REDUCE_OUT);
        if (d->shards > 1 && count)
            issue(m, FSDP_OP_REDUCE_SCATTER, FSDP_LABEL_REDUCE, i, d->shards, count,
                  (uint64_t)size_of(in));
        for (int k = 0; k < d->num_params; k++) {
            u->partly[k] |= u->used[k];
            u->used[k] = 0;
        }
    }
    give(m, i, FSDP_POOL_GRAD);
    give(m, i, FSDP_POOL_REDUCE_IN);
    u->unreduced = 0;
    sum_replicas(m, i, count);
}

/* -- calls -- */

static char cell_of(const model *m, int i, int call) {
    const unit_model *u = &m->units[i];
    return documented[call].cells[4 * u->state + 2 * m->backward + (u->due > 0)];
}

/* Returns 1 if the call is possible: for unit i, or for all units if i < 0. Some calls require
   that no unit holds unreduced gradients. */
static int possible(const model *m, int i, int call) {
    int reduced = call == FSDP_CALL_LOAD || call == FSDP_CALL_REQUIRES_GRAD;
    for (int k = 0; k < m->n->num_units; k++)
        if ((i < 0 || k == i) && (cell_of(m, k, call) == '.' ||
                                  (reduced && (m->units[k].unreduced || m->units[k].partial))))
            return 0;
    return 1;
}

static void record_forward(model *m, int i) {
    unit_model *u = &m->units[i];
    u->due++;
    if (m->num_order == 64 * m->n->num_units) return;
    m->order[m->num_order] = i;
    m->before[m->num_order] = u->newest;
    u->newest = m->num_order++;
}

static void prefetch_backward(model *m, int i) {
    unit_model *u = &m->units[i];
    int at = u->newest, implicit = m->n->implicit;
    if (at >= 0) u->newest = m->before[at];
    for (int k = 0; k < u->counts[1]; k++) prefetch(m, u->lists[1][k], 1);
    if (u->counts[1] > 0 || at <= 0 || implicit == FSDP_PREFETCH_NEVER) return;
    if (implicit == FSDP_PREFETCH_ALWAYS || m->n->async || m->n->lanes)
        prefetch(m, m->order[at - 1], 1);
}

static void call_hook(model *m, int i, int call) {
    unit_model *u = &m->units[i];
    char next = cell_of(m, i, call);
    int recompute = m->backward;
    if (call == FSDP_CALL_UNSHARD || call == FSDP_CALL_PRE_FORWARD) unshard(m, i);
    if (call == FSDP_CALL_WAIT || call == FSDP_CALL_PRE_FORWARD) wait_for(u);
    if (call == FSDP_CALL_RESHARD) reshard(m, i);
    for (int k = 0; call == FSDP_CALL_PRE_FORWARD && !recompute && k < u->counts[0]; k++)
        prefetch(m, u->lists[0][k], 0);
    if (call == FSDP_CALL_POST_FORWARD && !recompute) {
        if (m->grad_enabled) record_forward(m, i);
        reshard_forward(m, i);
    }
    if (call == FSDP_CALL_PRE_BACKWARD && next == 'P') {
        u->due -= m->is_last; /* otherwise another backward may follow */
        m->backward = 1;
        if (!u->no_unshard) unshard(m, i);
        wait_for(u);
        grads(m, i);
        prefetch_backward(m, i);
    }
    if (call == FSDP_CALL_POST_BACKWARD) {
        reshard_backward(m, i);
        reduce(m, i, 1);
    }
    if (next != '=') u->state = (int)(strchr(state_letters, next) - state_letters);
}

static void finalize(model *m) {
    for (int i = 0; i < m->n->num_units; i++) {
        unit_model *u = &m->units[i];
        int open = u->state == FSDP_STATE_PRE_BACKWARD;
        reshard_backward(m, i);
        if (open || (u->sync && (u->unreduced || u->partial))) reduce(m, i, open);
        u->state = FSDP_STATE_IDLE;
        for (int k = 0; k < MAX_PARAMS; k++) {
            u->has[k] |= u->reduced[k];
            u->reduced[k] = 0;
        }
        if (m->is_last) u->due = 0, u->newest = -1;
    }
    m->backward = 0;
    if (m->is_last) m->num_order = 0;
}

static void forget_grads(unit_model *u) {
    memset(u->has, 0, sizeof u->has);
    memset(u->reduced, 0, sizeof u->reduced);
    u->summed = 0;
}

static void reset(model *m) {
    for (int i = 0; i < m->n->num_units; i++) {
        unit_model *u = &m->units[i];
        reshard(m, i);
        give(m, i, FSDP_POOL_GRAD);
        give(m, i, FSDP_POOL_REDUCE_IN);
        give(m, i, FSDP_POOL_REDUCE_OUT);
        forget_grads(u);
        memset(u->used, 0, sizeof u->used);
        memset(u->partly, 0, sizeof u->partly);
        u->unreduced = u->partial = u->due = u->state = 0;
        u->newest = -1;
    }
    m->backward = m->num_order = 0;
}

static void stale_all(model *m) {
    for (int i = 0; i < m->n->num_units; i++)
        m->units[i].stale = m->units[i].storage != FSDP_STORAGE_SHARDED;
}

/* Makes a public call on unit i, or on the model if i < 0. Returns the expected status. */
static fsdp_status call_model(model *m, int i, int call) {
    int hook = call <= FSDP_CALL_RESHARD,
        remembered = hook || call == FSDP_CALL_SET || call == FSDP_CALL_REQUIRES_GRAD ||
                     call == FSDP_CALL_ZERO_GRAD ||
                     call == FSDP_CALL_PARAMS_CHANGED; /* callers may ignore its status */
    int failed = m->failed;
    if (!possible(m, i, call)) {
        m->failed |= remembered;
        return FSDP_ERR_INVALID_STATE;
    }
    if (hook) call_hook(m, i, call);
    if (call == FSDP_CALL_FINALIZE) finalize(m);
    if (call == FSDP_CALL_RESET) reset(m);
    if (call == FSDP_CALL_PARAMS_CHANGED || call == FSDP_CALL_LOAD) stale_all(m);
    for (int k = 0; call == FSDP_CALL_ZERO_GRAD && k < m->n->num_units; k++)
        forget_grads(&m->units[k]);
    if (call != FSDP_CALL_FINALIZE && call != FSDP_CALL_RESET) return FSDP_OK;
    m->failed = 0;
    return call == FSDP_CALL_FINALIZE && failed ? FSDP_ERR_INVALID_STATE : FSDP_OK;
}

/* ---- the library under test ------------------------------------------------------------------ */

typedef struct {
    sim s;
    net n;
    model m;
    fsdp_model *model;
    fsdp_unit *units[MAX_UNITS];
    const void *readable[MAX_UNITS]; /* address that the unit's callback has got; NULL: none now */
    fsdp_op colls[MAX_COLLS];        /* ops of the latest call */
    int num_colls;
    int copies_in, slices, sums_seen, grads_seen; /* latest call, too */
    int shards_read;                              /* a gather was issued since finalize */
    uint64_t seed, at;                            /* seed of the run; state of its random numbers */
    int64_t step;
    char call[128];
    int trace;
    int64_t possible, impossible, gathers, reductions, all_reduces, prefetches;
} bed;

/* Checks a condition; a failure prints the step and the command that repeats it. */
#define MODEL_CHECK(b, cond, ...)                                                                  \
    do {                                                                                           \
        char model_text[1600];                                                                     \
        if (cond) break;                                                                           \
        snprintf(model_text, sizeof model_text, __VA_ARGS__);                                      \
        h_fail(H_HERE(#cond),                                                                      \
               "step %lld, %s: %s\n  repeat with FSDP_SEED=%llu (and FSDP_TRACE=1 to see every "   \
               "call):",                                                                           \
               (long long)(b)->step, (b)->call, model_text, (unsigned long long)(b)->seed);        \
    } while (0)

static void see(void *user, const fsdp_op *op) {
    bed *b = (bed *)user;
    b->s.num_ops = 0;
    b->copies_in += op->label == FSDP_LABEL_COPY_IN;
    b->slices += op->label == FSDP_LABEL_SLICE;
    b->shards_read |= op->label == FSDP_LABEL_COPY_IN || op->label == FSDP_LABEL_GATHER;
    if (op->kind < FSDP_OP_ALL_GATHER || op->kind > FSDP_OP_BROADCAST) return;
    CHECK(b->num_colls < MAX_COLLS);
    b->colls[b->num_colls++] = *op;
}

static fsdp_mesh_info make_mesh(bed *b, int kind, int shards, int replicas) {
    static const char *const names[] = {"replicate", "shard"};
    fsdp_mesh_desc d = FSDP_ZERO;
    fsdp_mesh_info info;
    fsdp_mesh *mesh;
    int both = kind == FSDP_MESH_INFO_HSDP;
    d.ndim = both ? 2 : 1;
    d.shape[0] = both ? replicas : shards * replicas;
    d.shape[1] = shards;
    d.names[0] = names[kind == FSDP_MESH_INFO_FSDP];
    d.names[1] = both ? names[1] : NULL;
    CHECK_OK(fsdp_mesh_create(b->s.world, &d, &mesh));
    CHECK_OK(fsdp_mesh_info_init(mesh, kind,
                                 both                         ? 1
                                 : kind == FSDP_MESH_INFO_DDP ? -1
                                                              : 0,
                                 kind == FSDP_MESH_INFO_FSDP ? -1 : 0, &info));
    CHECK_EQ_INT(info.shard_mesh_size, shards);
    CHECK_EQ_INT(info.replicate_mesh_size, replicas);
    return info;
}

/* The callback of each unit: the parameters are readable in both of its calls. */
static void called_back(fsdp_unit *u, int readable, void *user) {
    bed *b = (bed *)user;
    int i = 0;
    while (b->units[i] != u) i++;
    MODEL_CHECK(b, (b->readable[i] == NULL) == readable, "unit %d: callback %d twice", i, readable);
    const void *data = fsdp_data(u, 0);
    MODEL_CHECK(b, !lab_undefined(b->model, data), "unit %d: not readable in a callback", i);
    if (!readable) MODEL_CHECK(b, data == b->readable[i], "unit %d: other address", i);
    b->readable[i] = readable ? data : NULL;
}

static void bed_unit(bed *b, int i) {
    const unit *u = &b->n.units[i];
    fsdp_param_desc p[MAX_PARAMS];
    fsdp_unit_desc d = FSDP_ZERO;
    fsdp_mesh_info info;
    for (int k = 0; k < u->num_params; k++) {
        const param *x = &u->params[k];
        p[k] = x->ndim == 2 ? fsdp_mat(NULL, x->shape[0], x->shape[1])
                            : fsdp_vec(NULL, x->shape[0]);
        p[k].shard_dim = x->dim, p[k].dtype = x->dtype;
        p[k].frozen = x->frozen, p[k].keep_dtype = x->keep;
    }
    d.params = p;
    d.num_params = u->num_params;
    d.reshard_after_forward = u->reshard;
    d.param_dtype = u->param_dtype, d.reduce_dtype = u->reduce_dtype;
    if (u->own_mesh) {
        info = make_mesh(b, u->kind, u->shards, u->replicas);
        d.mesh_info = &info;
    }
    CHECK_OK(fsdp_fully_shard(b->model, &d, &b->units[i]));
    CHECK_OK(fsdp_set_unit_callback(b->units[i], called_back, b));
}

static void measure(bed *b);
static void print_net(const bed *b);

static void bed_open(bed *b) {
    const net *n = &b->n;
    fsdp_model_desc d = FSDP_ZERO;
    fsdp_mesh_info info;
    sim_init(&b->s, n->world, n->rank);
    b->s.async = n->async, b->s.threads = n->lanes, b->s.fused = n->fused;
    b->s.comm_lanes = n->comm_lanes;
    b->s.checks = n->async;
    CHECK(sim_open(&b->s));
    info = make_mesh(b, n->kind, n->shards, n->replicas);
    if (n->kind == FSDP_MESH_INFO_DDP) d.mesh_info = &info;
    else if (n->kind == FSDP_MESH_INFO_HSDP || n->rank % 2) d.mesh = info.mesh;
    d.param_dtype = n->param_dtype, d.reduce_dtype = n->reduce_dtype, d.grad_dtype = n->grad_dtype;
    d.reshard_after_forward = n->reshard;
    d.cpu_offload = n->offload, d.implicit_prefetch = n->implicit, d.debug = n->debug;
    d.prefetch_bytes = n->budget, d.direct_min = n->direct_min;
    CHECK_OK(fsdp_model_create(b->s.world, &d, &b->model));
    for (int i = 0; i < n->num_units; i++) bed_unit(b, i);
    for (int i = 0; i < n->num_units; i++) { /* loaded before the first layout */
        static const double zeros[128];
        if (one_in(&b->at, 2)) CHECK_OK(fsdp_param_load(b->units[i], 0, zeros));
    }
    b->s.on_op = see;
    b->s.on_op_user = b;
    CHECK_OK(sim_watch(&b->s, b->model));
    CHECK_OK(fsdp_model_commit(b->model));
    model_start(&b->m, n);
    measure(b);
    if (b->trace) print_net(b);
}

/* Prints the model's description, with FSDP_TRACE. */
static void print_net(const bed *b) {
    const net *n = &b->n;
    fprintf(stderr,
            "world %d rank %d (%d x %d, kind %d) %s fused %d comm lanes %d; %s/%s/%s "
            "offload %d implicit %d debug %d budget %lld direct %lld\n",
            n->world, n->rank, n->shards, n->replicas, n->kind,
            n->async   ? "streams"
            : n->lanes ? "lanes"
                       : "inline",
            n->fused, n->comm_lanes, fsdp_dtype_name(n->param_dtype),
            fsdp_dtype_name(n->reduce_dtype), fsdp_dtype_name(n->grad_dtype), n->offload,
            n->implicit, n->debug, (long long)n->budget, (long long)n->direct_min);
    for (int i = 0; i < n->num_units; i++) {
        const unit *u = &n->units[i];
        fprintf(stderr, "  unit %d: %d x %d%s, reshard %d, %s/%s;", i, u->shards, u->replicas,
                u->own_mesh ? " (own)" : "", u->reshard, fsdp_dtype_name(u->param_dtype),
                fsdp_dtype_name(u->reduce_dtype));
        for (int k = 0; k < u->num_params; k++) {
            const param *p = &u->params[k];
            fprintf(stderr, " %s%s%s[%d%s%.0d]/%d", p->frozen ? "frozen " : "",
                    p->keep ? "keep " : "", fsdp_dtype_name(p->dtype), (int)p->shape[0],
                    p->ndim == 2 ? "," : "", p->ndim == 2 ? (int)p->shape[1] : 0, p->dim);
        }
        fprintf(stderr, "; slots");
        for (int k = 0; k < FSDP_POOL_COUNT; k++)
            if (b->m.units[i].bytes[k])
                fprintf(stderr, " %s %lld", fsdp_pool_name(k), (long long)b->m.units[i].bytes[k]);
        fprintf(stderr, "\n");
    }
}

static void bed_close(bed *b) {
    MODEL_CHECK(b, b->s.races == 0, "%d races, first: %s", b->s.races, b->s.race);
    CHECK_EQ_INT(sim_close(&b->s), 0);
    for (int i = 0; i < b->n.num_units; i++) CHECK(!b->readable[i]);
}

/* ---- comparison ------------------------------------------------------------------------------ */

static void compare_states(bed *b) {
    static const char *const states[] = {"IDLE", "FORWARD", "PRE_BACKWARD", "POST_BACKWARD"};
    static const char *const storages[] = {"SHARDED", "IN_FLIGHT", "UNSHARDED",
                                           "SHARDED_POST_FORWARD"};
    for (int i = 0; i < b->n.num_units; i++) {
        const unit_model *u = &b->m.units[i];
        int state = (int)fsdp_unit_state(b->units[i]),
            storage = (int)fsdp_unit_storage(b->units[i]);
        MODEL_CHECK(b, state == u->state, "unit %d is %s, model %s", i, states[state],
                    states[u->state]);
        MODEL_CHECK(b, storage == u->storage, "unit %d is %s, model %s", i, storages[storage],
                    storages[u->storage]);
        const void *now = storage == FSDP_STORAGE_UNSHARDED ? fsdp_data(b->units[i], 0) : NULL;
        MODEL_CHECK(b, b->readable[i] == now, "unit %d: its callback has %s, and it is %s", i,
                    b->readable[i] ? "an address" : "none", storages[storage]);
    }
}

static void compare_colls(bed *b) {
    const model *m = &b->m;
    for (int k = 0; k < b->num_colls || k < m->num_colls; k++) {
        char got[160] = "nothing", wanted[160] = "nothing";
        const fsdp_op *op = &b->colls[k];
        const coll *c = &m->colls[k];
        if (k < b->num_colls)
            snprintf(got, sizeof got, "%s %s of %s: %llu of %llu bytes over %d",
                     fsdp_op_name(op->kind), fsdp_label_name(op->label),
                     op->unit ? fsdp_unit_name(op->unit) : "the model",
                     (unsigned long long)op->count, (unsigned long long)fsdp_dtype_size(op->dtype),
                     op->group_size);
        if (k < m->num_colls)
            snprintf(wanted, sizeof wanted, "%s %s of %s: %llu of %llu bytes over %d",
                     fsdp_op_name(c->kind), fsdp_label_name(c->label),
                     c->unit < 0 ? "the model" : fsdp_unit_name(b->units[c->unit]),
                     (unsigned long long)c->count, (unsigned long long)c->nbytes, c->group);
        MODEL_CHECK(b, !strcmp(got, wanted), "collective %d is \"%s\", model \"%s\"", k, got,
                    wanted);
        const uint64_t bytes = op->kind == FSDP_OP_ALL_REDUCE
                                   ? sim_all_reduce_bytes(c->count * c->nbytes, c->group)
                                   : (uint64_t)(c->group - 1) * c->count * c->nbytes;
        MODEL_CHECK(b, op->bytes == bytes, "collective %d: %llu bytes, model %llu", k,
                    (unsigned long long)op->bytes, (unsigned long long)bytes);
    }
}

static void compare_rest(bed *b) {
    const model *m = &b->m;
    MODEL_CHECK(b, b->copies_in == m->copies_in, "%d copies in, model %d", b->copies_in,
                m->copies_in);
    MODEL_CHECK(b, b->slices == m->slices, "%d slices, model %d", b->slices, m->slices);
    if (b->n.lanes) return; /* hooks run in worker threads, after the call */
    MODEL_CHECK(b, b->sums_seen == m->sums_seen, "%d calls of all-reduce hooks, model %d",
                b->sums_seen, m->sums_seen);
    MODEL_CHECK(b, b->grads_seen == m->grads_seen, "%d calls of gradient hooks, model %d",
                b->grads_seen, m->grads_seen);
}

static const int pools[] = {FSDP_POOL_GATHER, FSDP_POOL_SLICE, FSDP_POOL_GRAD, FSDP_POOL_REDUCE_IN,
                            FSDP_POOL_REDUCE_OUT};
enum { NUM_POOLS = sizeof pools / sizeof *pools };

static void compare_pools(bed *b, const model *m, const fsdp_memory *now) {
    for (int k = 0; k < NUM_POOLS; k++) {
        int64_t bytes = 0;
        int slots = 0, pool = pools[k];
        for (int c = 0; c < m->num_classes; c++) {
            if (m->classes[c].pool != pool) continue;
            bytes += m->classes[c].bytes * m->classes[c].slots;
            slots += m->classes[c].slots;
        }
        MODEL_CHECK(b, now->pool_slots[pool] == slots && now->pool_bytes[pool] == bytes,
                    "%s: %lld bytes in %d slots, model %lld in %d", fsdp_pool_name(pool),
                    (long long)now->pool_bytes[pool], now->pool_slots[pool], (long long)bytes,
                    slots);
    }
}

static void compare_memory(bed *b) {
    fsdp_memory now;
    CHECK_OK(fsdp_model_memory(b->model, &now));
    compare_pools(b, &b->m, &now);
    for (int i = 0; i < b->n.num_units; i++) {
        CHECK_OK(fsdp_unit_memory(b->units[i], &now));
        for (int k = 0; k < NUM_POOLS; k++)
            MODEL_CHECK(b, now.pool_slots[pools[k]] == b->m.units[i].holds[pools[k]],
                        "unit %d holds %d slots of %s, model %d", i, now.pool_slots[pools[k]],
                        fsdp_pool_name(pools[k]), b->m.units[i].holds[pools[k]]);
    }
}

/* Takes the sizes of each pool's slots from the library, and checks them against bounds from the
   shapes. Tensors begin at multiples of 64 bytes (streams: 256); packed ones lie in a slot
   twice, before and after copy-out. */
static void measure(bed *b) {
    for (int i = 0; i < b->n.num_units; i++) {
        const unit *d = &b->n.units[i];
        unit_model *u = &b->m.units[i];
        fsdp_memory of;
        int64_t all = 0, grads = 0, sums = 0, train = trainables(&b->m, i), slack;
        const int64_t grain = grain_of(&b->n);
        CHECK_OK(fsdp_unit_memory(b->units[i], &of));
        for (int k = 0; k < d->num_params; k++) {
            int64_t stored = held_of(&b->n, d, &d->params[k]) * d->shards;
            int64_t bytes = stored * size_of(gathered_as(&b->n, d, &d->params[k]));
            all += bytes;
            if (!u->frozen[k]) grads += bytes, sums += stored;
        }
        slack = grain * (2 * d->num_params + 4) + 8 * train * d->shards;
        int64_t red = size_of(reduced_in(&b->m, i)), *bytes = u->bytes;
        int slot = d->shards > 1 || moves(&b->m, i);
        for (int k = 0; k < NUM_POOLS; k++) bytes[pools[k]] = of.pool_bytes[pools[k]];
        MODEL_CHECK(
            b, slot ? bytes[FSDP_POOL_GATHER] >= aligned(all, grain) : !bytes[FSDP_POOL_GATHER],
            "unit %d: slots", i);
        CHECK(bytes[FSDP_POOL_GATHER] <= 2 * all + slack);
        CHECK(bytes[FSDP_POOL_SLICE] <= all / 2 + slack);
        CHECK(train ? bytes[FSDP_POOL_GRAD] >= aligned(grads, grain) : !bytes[FSDP_POOL_GRAD]);
        CHECK(bytes[FSDP_POOL_GRAD] <= 2 * grads + slack);
        CHECK_EQ_INT(bytes[FSDP_POOL_REDUCE_IN], train ? aligned(sums * red, grain) : 0);
        CHECK_EQ_INT(bytes[FSDP_POOL_REDUCE_OUT],
                     train ? aligned(sums / d->shards * red, grain) : 0);
    }
}

/* ---- calls on both --------------------------------------------------------------------------- */

static fsdp_counters counters_of(const bed *b) {
    fsdp_counters c = FSDP_ZERO;
    CHECK_OK(fsdp_model_counters(b->model, &c));
    return c;
}

static H_PRINTF(2, 3) void begin(bed *b, const char *format, ...) {
    va_list args;
    va_start(args, format);
    vsnprintf(b->call, sizeof b->call, format, args);
    va_end(args);
    if (b->trace) fprintf(stderr, "%lld: %s\n", (long long)b->step, b->call);
    b->num_colls = b->m.num_colls = 0;
    b->copies_in = b->slices = b->sums_seen = b->grads_seen = 0;
    b->m.copies_in = b->m.slices = b->m.sums_seen = b->m.grads_seen = 0;
}

/* Compares model and library after a call that was made on both. */
static void agree(bed *b, fsdp_status expected, fsdp_status got, const fsdp_counters *before) {
    fsdp_counters after = counters_of(b);
    MODEL_CHECK(b, got == expected, "%s, model %s (%s)", fsdp_status_name(got),
                fsdp_status_name(expected), fsdp_last_error(b->s.world));
    if (got) b->impossible++;
    else b->possible++;
    if (before) /* a refused call must not issue ops */
        MODEL_CHECK(b, !memcmp(before, &after, sizeof after), "refused, but ops were issued");
    for (int k = 0; k < b->num_colls; k++) {
        b->gathers += b->colls[k].label == FSDP_LABEL_GATHER;
        b->reductions += b->colls[k].label == FSDP_LABEL_REDUCE;
        b->all_reduces += b->colls[k].label == FSDP_LABEL_REPLICAS;
    }
    compare_states(b);
    compare_colls(b);
    compare_rest(b);
    compare_memory(b);
    MODEL_CHECK(b, b->s.races == 0, "%d races, first: %s", b->s.races, b->s.race);
}

static fsdp_status call_library(bed *b, int i, int call) {
    switch (call) {
    case FSDP_CALL_PRE_FORWARD: return fsdp_pre_forward(b->units[i]);
    case FSDP_CALL_POST_FORWARD: return fsdp_post_forward(b->units[i]);
    case FSDP_CALL_PRE_BACKWARD: return fsdp_pre_backward(b->units[i]);
    case FSDP_CALL_POST_BACKWARD: return fsdp_post_backward(b->units[i]);
    case FSDP_CALL_UNSHARD: return fsdp_unshard(b->units[i]);
    case FSDP_CALL_WAIT: return fsdp_wait(b->units[i]);
    case FSDP_CALL_RESHARD: return fsdp_reshard(b->units[i]);
    case FSDP_CALL_FINALIZE: return fsdp_finalize_backward(b->model);
    case FSDP_CALL_PARAMS_CHANGED: return fsdp_params_changed(b->model);
    case FSDP_CALL_ZERO_GRAD: return fsdp_zero_grad(b->model);
    case FSDP_CALL_RESET: return fsdp_model_reset(b->model);
    default: return FSDP_ERR_INTERNAL;
    }
}

static const char *const call_names[FSDP_CALL_COUNT] = {
#define FSDP_X(name, text) text,
    FSDP_CALL_LIST(FSDP_X)
#undef FSDP_X
};

/* Makes a call that has no argument except its unit. */
static void plain(bed *b, int i, int call) {
    fsdp_counters before = counters_of(b);
    int refused = !possible(&b->m, i, call);
    begin(b, "%s of unit %d", call_names[call], i);
    fsdp_status expected = call_model(&b->m, i, call);
    fsdp_status got = call_library(b, i, call);
    if (call == FSDP_CALL_FINALIZE && !refused) b->shards_read = 0;
    agree(b, expected, got, refused ? &before : NULL);
}

/* -- the caller's work -- */

static void touch(bed *b, const char *what, void *ptr, int64_t nbytes, int write) {
    if (b->n.offload && !strcmp(what, "optimizer")) { /* shards are in host memory */
        sim_work(&b->s, SIM_HOST, 0, 0);
        sim_touch(&b->s, SIM_HOST, what, ptr, nbytes, write);
    } else if (write) {
        sim_write(&b->s, what, ptr, nbytes);
    } else {
        sim_read(&b->s, what, ptr, nbytes);
    }
}

/* Reads gathered parameters, and writes the gradients of some. */
static void compute(bed *b) {
    for (int i = 0; i < b->n.num_units; i++) {
        unit_model *u = &b->m.units[i];
        const unit *d = &b->n.units[i];
        for (int k = 0; k < d->num_params && one_in(&b->at, 2); k++) {
            int64_t nbytes = lab_numel(d->params[k].ndim, d->params[k].shape) *
                             size_of(gathered_as(&b->n, d, &d->params[k]));
            /* a stale copy may be the shard itself, which the user's hook has written since */
            if (u->storage == FSDP_STORAGE_UNSHARDED && !(u->stale && b->n.hooks))
                touch(b, "layer", fsdp_data(b->units[i], k), nbytes, 0);
            if (u->state != FSDP_STATE_PRE_BACKWARD || u->frozen[k] || one_in(&b->at, 2)) continue;
            touch(b, "backward", fsdp_grad(b->units[i], k), nbytes, 1);
            u->used[k] = 1;
        }
    }
}

/* Writes shards, after the gathers that read them. */
static void optimize(bed *b) {
    static const fsdp_dtype dtypes[] = {FSDP_F32, FSDP_BF16, FSDP_F64};
    fsdp_flat flat;
    if (!possible(&b->m, -1, FSDP_CALL_PARAMS_CHANGED)) return;
    for (int i = 0; i < b->n.num_units; i++)
        if (b->m.units[i].storage == FSDP_STORAGE_IN_FLIGHT) plain(b, i, FSDP_CALL_WAIT);
    /* The host writes offloaded shards: unless finalize has waited for the stream, the host
       does. */
    if (b->n.offload && b->shards_read && b->n.async) sim_host_waits(&b->s);
    for (int k = 0; k < 3; k++) {
        CHECK_OK(fsdp_model_flat(b->model, dtypes[k], &flat));
        if (flat.numel == 0) continue;
        touch(b, "optimizer", flat.grads, flat.numel * size_of(flat.grad_dtype), 0);
        touch(b, "optimizer", flat.shards, flat.numel * size_of(flat.dtype), 1);
    }
}

/* -- getters -- */

static void get(bed *b, int i) {
    const unit_model *u = &b->m.units[i];
    const unit *d = &b->n.units[i];
    int k = lab_pick(&b->at, d->num_params), logged = b->s.num_logged;
    begin(b, "data and grad of unit %d", i);
    int ok = u->storage == FSDP_STORAGE_UNSHARDED;
    void *data = fsdp_data(b->units[i], k);
    MODEL_CHECK(b, data && lab_undefined(b->model, data) == !ok, "data of a state that is %d", ok);
    MODEL_CHECK(b, ok || strstr(fsdp_last_error(b->s.world), "data: unit"), "no text");
    MODEL_CHECK(b, b->s.num_logged - logged <= !ok, "texts"); /* once in a step */
    b->m.failed |= !ok;
    logged = b->s.num_logged;
    ok = possible(&b->m, i, FSDP_CALL_GRAD);
    void *grad = fsdp_grad(b->units[i], k);
    MODEL_CHECK(b, (grad == NULL) == u->frozen[k], "a frozen one's grad is NULL");
    MODEL_CHECK(b, lab_undefined(b->model, grad) == (!ok && !u->frozen[k]), "grad");
    if (!ok && !u->frozen[k])
        MODEL_CHECK(b, strstr(fsdp_last_error(b->s.world), "grad: unit"), "no text");
    MODEL_CHECK(b, b->s.num_logged - logged <= !ok, "texts");
    if (ok && !u->frozen[k]) b->m.units[i].used[k] = 1;
    b->m.failed |= !ok && !u->frozen[k];
    agree(b, FSDP_OK, FSDP_OK, NULL);
}

static void view(bed *b) {
    int i = lab_pick(&b->at, b->n.num_units), settled = 1;
    begin(b, "views of unit %d", i);
    for (int j = 0; j < b->n.num_units; j++) settled &= b->m.units[j].state == FSDP_STATE_IDLE;
    settled &= !b->m.backward && !b->n.lanes;
    for (int k = 0; k < b->n.units[i].num_params; k++) {
        fsdp_param_view v = FSDP_ZERO;
        CHECK_OK(fsdp_param_view_get(b->units[i], k, &v));
        MODEL_CHECK(b, v.shard && v.data && v.requires_grad == !b->m.units[i].frozen[k], "view");
        if (settled)
            MODEL_CHECK(b, (v.shard_grad != NULL) == b->m.units[i].has[k],
                        "parameter %d has %s gradient, model %d", k, v.shard_grad ? "a" : "no",
                        b->m.units[i].has[k]);
    }
    agree(b, FSDP_OK, FSDP_OK, NULL);
}

static void describe(bed *b) {
    char text[64];
    begin(b, "describe");
    size_t length = fsdp_model_describe(b->model, NULL, 0);
    MODEL_CHECK(b, length > 64, "%zu characters", length);
    CHECK_EQ_INT(fsdp_model_describe(b->model, text, sizeof text), length);
    CHECK_EQ_INT(strlen(text), sizeof text - 1);
    agree(b, FSDP_OK, FSDP_OK, NULL);
}

/* -- setters -- */

static void set_policy(bed *b, int i) {
    enum { FACTOR = LAB_SETTERS };
    int what = lab_pick(&b->at, LAB_SETTERS + 1), on = !one_in(&b->at, 3);
    const int mode = one_in(&b->at, 2) ? ALWAYS : NEVER, value = what == LAB_RAF ? mode : on;
    const double factor = lab_pick(&b->at, 3);
    fsdp_unit *target = i < 0 ? NULL : b->units[i];
    fsdp_counters before = counters_of(b);
    if (b->n.lanes && what == LAB_UNUSED) what = FACTOR;
    begin(b, "%s of unit %d: %g",
          what == FACTOR ? "set_gradient_divide_factor" : lab_setters[what].name, i,
          what == FACTOR ? factor : (double)value);
    fsdp_status expected = call_model(&b->m, i, FSDP_CALL_SET);
    for (int k = 0; k < b->n.num_units && !expected; k++) {
        unit_model *u = &b->m.units[k];
        if (i >= 0 && k != i) continue;
        if (what == LAB_SYNC) u->sync = u->all_reduce = on;
        if (what == LAB_ALL_REDUCE) u->all_reduce = on;
        if (what == LAB_RAF) u->reshard = mode;
        if (what == LAB_RAB) u->keep_backward = !on;
        if (what == LAB_UNSHARD) u->no_unshard = !on;
        if (what == LAB_UNUSED) u->reduce_unused = on;
        if (what == FACTOR) u->factor = factor;
    }
    agree(b, expected,
          what == FACTOR ? fsdp_set_gradient_divide_factor(b->model, target, factor)
                         : lab_setters[what].set(b->model, target, value),
          expected ? &before : NULL);
}

static void set_list(bed *b, int i) {
    int backward = one_in(&b->at, 2), count = lab_pick(&b->at, MAX_LIST + 1), list[MAX_LIST];
    fsdp_unit *targets[MAX_LIST];
    fsdp_counters before = counters_of(b);
    for (int k = 0; k < count; k++) {
        list[k] = lab_pick(&b->at, b->n.num_units);
        targets[k] = b->units[list[k]];
    }
    begin(b, "set_modules_to_%s_prefetch of unit %d: %d", backward ? "backward" : "forward", i,
          count);
    fsdp_status expected = call_model(&b->m, i, FSDP_CALL_SET);
    if (!expected) {
        memcpy(b->m.units[i].lists[backward], list, sizeof list);
        b->m.units[i].counts[backward] = count;
    }
    agree(b, expected,
          backward ? fsdp_set_modules_to_backward_prefetch(b->units[i], targets, count)
                   : fsdp_set_modules_to_forward_prefetch(b->units[i], targets, count),
          NULL);
    if (expected) CHECK_EQ_INT(counters_of(b).allocations, before.allocations);
}

/* Functions of the user, ordered on the stream that they receive. */
static fsdp_status sum_hook(void *user, fsdp_unit *u, void *data, int64_t numel, fsdp_dtype dtype,
                            void *stream) {
    bed *b = (bed *)user;
    (void)u;
    if (b->n.lanes) return FSDP_OK;
    b->sums_seen++;
    sim_called(&b->s, stream, "all-reduce hook", data, numel * size_of(dtype), 1);
    return FSDP_OK;
}

static fsdp_status grad_hook(void *user, const fsdp_param_view *v, void *stream) {
    bed *b = (bed *)user;
    if (b->n.lanes) return FSDP_OK;
    b->grads_seen++;
    CHECK(v->shard && v->shard_grad && v->requires_grad);
    sim_called(&b->s, stream, "gradient hook", v->shard_grad, v->numel * size_of(v->grad_dtype), 0);
    sim_called(&b->s, stream, "gradient hook", v->shard, v->numel * size_of(v->dtype), 1);
    return FSDP_OK;
}

static void set_hook(bed *b, int i) {
    int on = one_in(&b->at, 2), k = lab_pick(&b->at, b->n.units[i].num_params),
        sum = one_in(&b->at, 2);
    fsdp_counters before = counters_of(b);
    begin(b, "set_%s_hook of unit %d: %d", sum ? "all_reduce" : "post_accumulate", i, on);
    fsdp_status expected = call_model(&b->m, i, FSDP_CALL_SET);
    if (!expected && sum) b->m.units[i].sum_hook = on;
    if (!expected && !sum) b->m.units[i].grad_hooks[k] = on;
    agree(b, expected,
          sum ? fsdp_set_all_reduce_hook(b->units[i], on ? sum_hook : NULL, b)
              : fsdp_set_post_accumulate_hook(b->units[i], k, on ? grad_hook : NULL, b),
          expected ? &before : NULL);
}

static void set_switch(bed *b) {
    int on = !one_in(&b->at, 3), grad = one_in(&b->at, 2);
    begin(b, "set_%s: %d", grad ? "grad_enabled" : "is_last_backward", on);
    agree(b, FSDP_OK,
          grad ? fsdp_set_grad_enabled(b->model, on) : fsdp_set_is_last_backward(b->model, on),
          NULL);
    if (grad) b->m.grad_enabled = on;
    else b->m.is_last = on;
}

/* Returns 1 if the unit's trainable parameters would still be stored in one dtype. */
static int trains_with(const bed *b, int i, int k) {
    const unit *u = &b->n.units[i];
    int fits = 1;
    for (int j = 0; j < u->num_params; j++)
        fits &= b->m.units[i].frozen[j] || u->params[j].dtype == u->params[k].dtype;
    return fits;
}

/* Freezes or thaws a parameter: a new layout, in which nothing is gathered and slot sizes
   change. */
static void thaw(bed *b, int i) {
    int k = lab_pick(&b->at, b->n.units[i].num_params), on = one_in(&b->at, 2);
    unit_model *u = &b->m.units[i];
    begin(b, "set_requires_grad of unit %d, parameter %d: %d", i, k, on);
    fsdp_status expected = call_model(&b->m, -1, FSDP_CALL_REQUIRES_GRAD);
    if (!expected && on && !trains_with(b, i, k)) expected = FSDP_ERR_INVALID_ARG;
    fsdp_status got = fsdp_set_requires_grad(b->units[i], k, on);
    if (!expected && !got && u->frozen[k] == on) {
        for (int j = 0; j < b->n.num_units; j++) reshard(&b->m, j);
        u->frozen[k] = !on;
        u->has[k] = u->used[k] = 0;
        CHECK_OK(fsdp_model_commit(b->model));
        b->m.num_classes = 0;
        measure(b);
    }
    agree(b, expected, got, NULL);
}

/* -- calls of the model with arguments -- */

static void clip(bed *b) {
    static const double types[] = {0, 1, 2, 3.5, HUGE_VAL};
    fsdp_clip_desc d = FSDP_ZERO;
    double norm;
    int group = b->n.shards;
    fsdp_counters before = counters_of(b);
    for (int i = 0; i < b->n.num_units; i++) {
        const unit *u = &b->n.units[i]; /* meshes of one dim over all ranks share their group */
        int same = u->kind == b->n.kind && u->kind != FSDP_MESH_INFO_HSDP;
        if (u->own_mesh && !same) group = b->n.world;
    }
    d.max_norm = 1e-3;
    d.norm_type = types[lab_pick(&b->at, 5)];
    begin(b, "clip_grads");
    fsdp_status expected = call_model(&b->m, -1, FSDP_CALL_CLIP);
    if (!expected && group > 1) issue(&b->m, FSDP_OP_ALL_REDUCE, FSDP_LABEL_CLIP, -1, group, 1, 8);
    agree(b, expected, fsdp_clip_grads(b->model, &d, &norm), expected ? &before : NULL);
}

static void full(bed *b, int i) {
    static double buffer[128];
    const unit *d = &b->n.units[i];
    int k = lab_pick(&b->at, d->num_params), grad = one_in(&b->at, 2);
    const param *p = &d->params[k];
    uint64_t stored = (uint64_t)stored_of(p, d->shards);
    fsdp_counters before = counters_of(b);
    begin(b, "param_full%s of unit %d, parameter %d", grad ? "_grad" : "", i, k);
    fsdp_status expected = call_model(&b->m, -1, FSDP_CALL_FULL);
    if (grad && b->m.units[i].frozen[k]) expected = FSDP_ERR_INVALID_STATE; /* no gradient */
    if (!expected && d->shards > 1 && stored && (!grad || b->m.units[i].summed))
        issue(&b->m, FSDP_OP_ALL_GATHER, FSDP_LABEL_FULL, i, d->shards, stored,
              (uint64_t)size_of(grad ? grad_as(&b->n, p) : p->dtype));
    agree(b, expected,
          grad ? fsdp_param_full_grad(b->units[i], k, buffer)
               : fsdp_param_full(b->units[i], k, buffer),
          expected ? &before : NULL);
}

static void load(bed *b, int i) {
    static const double zeros[128];
    fsdp_counters before = counters_of(b);
    for (int k = 0; k < b->n.num_units && possible(&b->m, -1, FSDP_CALL_LOAD); k++)
        if (b->m.units[k].storage == FSDP_STORAGE_IN_FLIGHT) plain(b, k, FSDP_CALL_WAIT);
    before = counters_of(b);
    int none = one_in(&b->at, 8) &&
               lab_numel(b->n.units[i].params[0].ndim, b->n.units[i].params[0].shape) > 0;
    begin(b, "param_load of unit %d%s", i, none ? " from NULL" : "");
    int refused = none || !possible(&b->m, -1, FSDP_CALL_LOAD);
    fsdp_status expected = none ? FSDP_ERR_INVALID_ARG : call_model(&b->m, -1, FSDP_CALL_LOAD);
    fsdp_status got = fsdp_param_load(b->units[i], 0, none ? NULL : zeros);
    if (none && got == FSDP_ERR_INVALID_STATE) expected = got; /* either may be checked first */
    fsdp_param_view v;
    CHECK_OK(fsdp_param_view_get(b->units[i], 0, &v));
    if (!got) /* the library wrote it on the host */
        sim_touch(&b->s, SIM_HOST, "param_load", v.shard, v.numel * size_of(v.dtype), 1);
    agree(b, expected, got, refused ? &before : NULL);
}

/* ---- prediction ------------------------------------------------------------------------------ */

/* The step of a prediction, as in the manual: one forward and one backward of each unit, in the
   order of creation and in reverse. In a model that reshards, a unit that never reshards stays
   open around those that do. All parameters are used, and no earlier gradients exist. */
static void rehearse(const model *m, model *dry) {
    static const int calls[2][2] = {{FSDP_CALL_PRE_FORWARD, FSDP_CALL_POST_FORWARD},
                                    {FSDP_CALL_PRE_BACKWARD, FSDP_CALL_POST_BACKWARD}};
    int n = m->n->num_units, reshards = 0;
    for (int i = 0; i < n; i++) reshards |= m->units[i].reshard != NEVER;
    *dry = *m;
    (void)call_model(dry, -1, FSDP_CALL_RESET);
    dry->num_classes = 0;
    dry->grad_enabled = dry->is_last = 1;
    for (int i = 0; i < n; i++) {
        unit_model *u = &dry->units[i];
        u->sync = u->all_reduce = 1;
        u->keep_backward = 0;
        for (int k = 0; k < MAX_PARAMS; k++) u->used[k] = 1;
    }
    for (int half = 0; half < 2; half++)
        for (int pass = 0; pass < 3; pass++)
            for (int k = 0; k < n; k++) {
                int i = half ? n - 1 - k : k;
                int around = dry->units[i].reshard == NEVER && reshards && m->n->reshard != NEVER;
                dry->num_colls = 0;
                if (around != (pass != 1)) continue;
                if (pass < 2) CHECK_OK(call_model(dry, i, calls[half][0]));
                if (pass > 0) CHECK_OK(call_model(dry, i, calls[half][1]));
            }
    dry->num_colls = 0;
    CHECK_OK(call_model(dry, -1, FSDP_CALL_FINALIZE));
}

static void predict(bed *b) {
    static model dry;
    fsdp_memory said;
    begin(b, "predict");
    rehearse(&b->m, &dry);
    CHECK_OK(fsdp_model_predict(b->model, &said));
    compare_pools(b, &dry, &said);
    agree(b, FSDP_OK, FSDP_OK, NULL);
}

/* Reserved slots exist afterwards, in addition to those that existed. */
static void reserve(bed *b) {
    static model dry;
    begin(b, "reserve");
    rehearse(&b->m, &dry);
    CHECK_OK(fsdp_model_reserve(b->model));
    for (int k = 0; k < dry.num_classes; k++) {
        slot_class *c = class_of(&b->m, dry.classes[k].pool, dry.classes[k].bytes);
        if (c->slots < dry.classes[k].slots) c->slots = dry.classes[k].slots;
    }
    agree(b, FSDP_OK, FSDP_OK, NULL);
}

/* ---- random steps ---------------------------------------------------------------------------- */

/* Returns a unit for which the call is possible, if there is one; in one of 8 calls any unit. */
static int unit_for(bed *b, int call) {
    int n = b->n.num_units, i = lab_pick(&b->at, n);
    if (one_in(&b->at, 8)) return i;
    for (int k = 0; k < n; k++)
        if (possible(&b->m, (i + k) % n, call)) return (i + k) % n;
    return i;
}

/* Makes a random hook, mostly one that is possible: otherwise the walk would not get far. */
static void random_hook(bed *b) {
    static const uint8_t all[] = {FSDP_CALL_PRE_FORWARD, FSDP_CALL_POST_FORWARD,
                                  FSDP_CALL_PRE_BACKWARD, FSDP_CALL_POST_BACKWARD};
    static const uint8_t asides[] = {FSDP_CALL_UNSHARD, FSDP_CALL_WAIT, FSDP_CALL_RESHARD};
    int n = b->n.num_units, count = 0, calls[4 * MAX_UNITS], units[4 * MAX_UNITS];
    for (int k = 0; k < 4 * n; k++) {
        int call = all[k % 4], i = k / 4, state = b->m.units[i].state;
        if (!possible(&b->m, i, call)) continue;
        if (call == FSDP_CALL_PRE_FORWARD && state != FSDP_STATE_IDLE && !one_in(&b->at, 4))
            continue;
        if (call == FSDP_CALL_PRE_BACKWARD && state == FSDP_STATE_PRE_BACKWARD) continue;
        calls[count] = call;
        units[count++] = i;
    }
    if (one_in(&b->at, 6)) {
        int call = asides[lab_pick(&b->at, 3)];
        plain(b, unit_for(b, call), call);
    } else if (count == 0 || one_in(&b->at, 8)) {
        plain(b, lab_pick(&b->at, n), all[lab_pick(&b->at, 4)]);
    } else {
        int k = lab_pick(&b->at, count);
        plain(b, units[k], calls[k]);
    }
}

static void random_call(bed *b) {
    int what = lab_pick(&b->at, 100), n = b->n.num_units;
    if (what < 60) random_hook(b);
    else if (what < 66) compute(b);
    else if (what < 71 && (possible(&b->m, -1, FSDP_CALL_FINALIZE) || one_in(&b->at, 4)))
        plain(b, -1, FSDP_CALL_FINALIZE);
    else if (what < 73) plain(b, -1, FSDP_CALL_ZERO_GRAD);
    else if (what < 75) optimize(b), plain(b, -1, FSDP_CALL_PARAMS_CHANGED);
    else if (what < 77) get(b, lab_pick(&b->at, n));
    else if (what < 79) view(b);
    else if (what < 80) describe(b);
    else if (what < 86) set_policy(b, one_in(&b->at, 3) ? -1 : unit_for(b, FSDP_CALL_SET));
    else if (what < 90) set_list(b, unit_for(b, FSDP_CALL_SET));
    else if (what < 91 && b->n.hooks) set_hook(b, unit_for(b, FSDP_CALL_SET));
    else if (what < 93) set_switch(b);
    else if (what < 95) clip(b);
    else if (what < 97) full(b, lab_pick(&b->at, n));
    else if (what < 98) load(b, lab_pick(&b->at, n));
    else if (what < 99 && one_in(&b->at, 2)) thaw(b, lab_pick(&b->at, n));
    else if (one_in(&b->at, 4)) plain(b, -1, FSDP_CALL_RESET);
    else if (one_in(&b->at, 3)) predict(b);
    else if (one_in(&b->at, 8)) reserve(b);
}

/* Runs `steps` calls of one seed on a sequence of models, and adds to the totals. */
static void run_seed(uint64_t seed, int mode, int64_t steps, int64_t *totals) {
    bed *b = (bed *)lab_zeros(1, sizeof *b);
    int64_t step = 0;
    for (int k = 0; step < steps; k++) {
        memset(b, 0, sizeof *b);
        b->seed = seed;
        b->at = seed * 1000003 + (uint64_t)k;
        b->trace = getenv("FSDP_TRACE") != NULL;
        random_net(&b->at, &b->n, mode);
        int64_t end = step + 200 + lab_pick(&b->at, 2000);
        bed_open(b);
        for (; step < end && step < steps; step++) {
            b->step = step;
            random_call(b);
        }
        totals[0]++;
        totals[1] += b->possible, totals[2] += b->impossible;
        totals[3] += b->gathers, totals[4] += b->reductions, totals[5] += b->all_reduces;
        bed_close(b);
    }
    free(b);
}

static void run_seeds(int mode, int seeds, int64_t steps) {
    int64_t totals[6] = {0};
    const char *one = getenv("FSDP_SEED");
    uint64_t first = one ? strtoull(one, NULL, 10) : h_seed() * 1000;
    if (one) seeds = 1;
    for (int k = 0; k < seeds; k++) run_seed(first + (uint64_t)k, mode, steps, totals);
    h_message("seeds %llu to %llu, %lld calls each, %lld models: %lld possible calls, %lld "
              "refused, %lld gathers, %lld reductions, %lld all-reduces",
              (unsigned long long)first, (unsigned long long)(first + (uint64_t)seeds - 1),
              (long long)steps, (long long)totals[0], (long long)totals[1], (long long)totals[2],
              (long long)totals[3], (long long)totals[4], (long long)totals[5]);
    CHECK(totals[1] > steps / 4 && totals[2] > steps / 40 && totals[3] > 0);
}

TEST(model, inline_calls) { run_seeds(INLINE, 6, 10000); }
TEST(model, streams) { run_seeds(STREAMS, 6, 10000); }
TEST(model, comm_threads) { run_seeds(LANES, 3, 10000); }
TEST(long_model, inline_calls, SECONDS(600) | NIGHT) { run_seeds(INLINE, 12, 100000); }
TEST(long_model, streams, SECONDS(600) | NIGHT) { run_seeds(STREAMS, 12, 100000); }
TEST(long_model, comm_threads, SECONDS(600) | NIGHT) { run_seeds(LANES, 6, 100000); }
