/* dtensor/mesh.h - a mesh of a model: its groups, staging memory and memory of the caller

   Creates and destroys fsdp_dmesh. All communication is ops of the core on its groups, on pointers
   of the caller. The caller's stream orders the ops on it; a redistribution's ticket orders ops on
   the extensions' stream.
   State: fsdp_dmesh.
   Callers: programs, redistribute.h (fsdpi_dt_alloc) and units.h (fsdpi_dt_alloc).

   A part of fsdp_dtensor.h. SPDX-License-Identifier: MIT (full text at the end of fsdp.h) */
#ifndef FSDP_DTENSOR_H
#include "../../fsdp_dtensor.h"
#endif
#ifndef FSDPI_DTENSOR_MESH_H
#define FSDPI_DTENSOR_MESH_H

#include "../base/hash.h"
#include "route.h"
#include "spec.h"

#include <string.h>

enum {
    FSDPI_DT_NAME = 64,
    FSDPI_DT_BACKWARD = sizeof " backward" - 1, // characters appended to a name
    FSDPI_DT_STREAMS = 2                        // the caller's and the extensions'
};

typedef struct fsdpi_dt_memory { // a block of fsdp_dmesh_alloc
    fsdp_buf *buf;
    struct fsdpi_dt_memory *next;
} fsdpi_dt_memory;

typedef struct fsdpi_dt_unit { // a cut unit of fsdp_tp_fully_shard
    fsdp_unit *unit;
    int32_t num_params;
    int32_t *dims;  // [num_params] dim that tp cuts
    int64_t *sizes; // [num_params] length of that dim in the whole tensor
    struct fsdpi_dt_unit *next;
} fsdpi_dt_unit;

typedef struct fsdpi_dt_copy {
    fsdp_block *blocks;
    int32_t num;
    int64_t count; // elements
} fsdpi_dt_copy;

typedef struct fsdpi_dt_stage { // a step of the route, at the current sizes
    int32_t kind, mesh_dim;
    fsdp_seg seg;          // count: elements per rank, per pair of ranks, or in total
    int64_t reads, writes; // elements in the collective's two buffers
    int64_t in, out;       // elements in this rank's part before and after the step
    fsdpi_dt_copy before;  // to the layout that the collective reads; a local step has only this
    fsdpi_dt_copy behind;  // from the layout that the collective writes
    int32_t is_packed;     // 1: no copy `before` is needed
    int32_t is_whole;      // 1: no copy `behind` is needed
    int32_t redop, keeps;  // keeps: OWN: this rank keeps its part
    double factor;         // AVG: 1 / ranks
} fsdpi_dt_stage;

struct fsdp_redistribution {
    fsdp_dmesh *dm;
    char name[FSDPI_DT_NAME + FSDPI_DT_BACKWARD];
    fsdp_spec from, to, first_from, first_to; // current sizes; first_*: as passed
    fsdp_local part[2];                       // parts in `from` and in `to`
    fsdp_dtype dtype, comm_dtype, desc_dtype; // src and dst's; the sent data's; the desc's
    double scale;
    uint64_t hash, runs;
    fsdp_route route;
    fsdpi_dt_stage *stages;      // [route.num_steps]
    fsdp_block *blocks;          // the lists of all stages
    fsdp_buf *ticket;            // orders ops on the extensions' stream; NULL: none
    fsdp_block whole;            // list of the last copy
    int32_t begun, all_in_place; // all_in_place: no step changes the size
    fsdp_redistribution *next;
};

struct fsdp_dmesh {
    fsdp_model *model;
    fsdp_world *world;
    const fsdp_mesh *mesh;
    int32_t ndim, shape[FSDP_MAX_DIMS], coord[FSDP_MAX_DIMS];
    int32_t tp, shard, replicate; // dims of the mesh; -1: none
    int32_t is_other;             // 1: the model's mesh_info shards or replicates over other ranks
    int32_t overlap, is_fixed;    // is_fixed: staging does not grow
    fsdp_links links;
    fsdp_comm *comm[FSDPI_DT_STREAMS][FSDP_MAX_DIMS];
    fsdp_buf *staging[FSDPI_DT_STREAMS][2];
    int64_t staging_bytes; // bytes of each staging buffer
    int pool, label;
    uint64_t routes;
    void *scratch;                       // for finding routes
    fsdp_mesh *dim_mesh[FSDP_MAX_DIMS];  // a mesh for each dim
    fsdp_mesh *unit_mesh, *replica_mesh; // see units.h; NULL: not made
    fsdpi_dt_memory *memory;
    fsdpi_dt_unit *units;
    fsdp_redistribution *redistributions;
    fsdp_extension extension;
};

static fsdp_status fsdpi_dt_alloc(fsdp_model *m, size_t bytes, void **out) {
    return fsdp_alloc(m, FSDP_MEMORY_HOST, (int64_t)bytes, "dtensor: a table", out);
}
static void fsdpi_dt_free(fsdp_model *m, void *ptr) { fsdp_free(m, FSDP_MEMORY_HOST, ptr, 0); }

/* -------------------------------------------------------------------------------------------- */
// Memory.

// Makes staging buffers of at least `bytes`. All ranks do so together, since their routes are
// equal.
static fsdp_status fsdpi_dt_staging(fsdp_dmesh *dm, int64_t bytes, const char *name) {
    fsdp_buf *made[FSDPI_DT_STREAMS][2];
    fsdp_status status = FSDP_OK;
    if (bytes <= dm->staging_bytes) return FSDP_OK;
    if (dm->is_fixed)
        return fsdp_fail(dm->world, FSDP_ERR_INVALID_ARG,
                         "[E001] redistribution_create: '%s' needs staging buffers of %lld bytes, "
                         "and fsdp_dmesh_desc.staging_bytes is %lld: pass more, or 0",
                         name, (long long)bytes, (long long)dm->staging_bytes);
    memset(made, 0, sizeof made);
    for (int s = 0; s < 1 + dm->overlap; s++)
        for (int i = 0; i < 2 && !status; i++)
            status = fsdp_buf_create(dm->model, dm->pool, FSDP_MEMORY_DEVICE, bytes, &made[s][i]);
    for (int s = 0; s < 1 + dm->overlap; s++) // on failure the old buffers remain
        for (int i = 0; i < 2; i++) {
            fsdp_buf_destroy(dm->model, status ? made[s][i] : dm->staging[s][i]);
            if (!status) dm->staging[s][i] = made[s][i];
        }
    if (!status) dm->staging_bytes = bytes;
    return status;
}

FSDP_API fsdp_status fsdp_dmesh_alloc(fsdp_dmesh *dm, int64_t nbytes, void **ptr) {
    fsdpi_dt_memory *memory;
    if (!dm || !ptr || nbytes < 0)
        return fsdp_fail(dm ? dm->world : NULL, FSDP_ERR_INVALID_ARG,
                         "[E002] dmesh_alloc: dm or ptr is NULL, or nbytes is negative: pass all");
    *ptr = NULL;
    fsdp_status status = fsdpi_dt_alloc(dm->model, sizeof *memory, (void **)&memory);
    if (status) return status;
    status = fsdp_buf_create(dm->model, dm->pool, FSDP_MEMORY_DEVICE, nbytes, &memory->buf);
    if (status) {
        fsdpi_dt_free(dm->model, memory);
        return status;
    }
    memory->next = dm->memory;
    dm->memory = memory;
    *ptr = fsdp_buf_ptr(memory->buf);
    return FSDP_OK;
}

/* Returns the bytes from ptr to the end of a block that peers may read, or 0 for other memory.
   Sets *begins if ptr is the beginning of the block, so that the part may use all of it. */
static int64_t fsdpi_dt_room(const fsdp_dmesh *dm, const void *ptr, int *begins) {
    for (const fsdpi_dt_memory *at = dm->memory; at; at = at->next) {
        uintptr_t begin = (uintptr_t)fsdp_buf_ptr(at->buf), p = (uintptr_t)ptr;
        uintptr_t bytes = (uintptr_t)fsdp_buf_nbytes(at->buf);
        *begins = p == begin;
        if (p >= begin && p - begin < bytes) return (int64_t)(bytes - (p - begin));
    }
    *begins = 0;
    return 0;
}

/* -------------------------------------------------------------------------------------------- */
// Creation and destruction.

static void fsdpi_dt_end_redistribution(fsdp_dmesh *dm, fsdp_redistribution *r) {
    fsdp_redistribution **at = &dm->redistributions;
    while (*at && *at != r) at = &(*at)->next;
    if (*at) *at = r->next;
    fsdp_buf_destroy(dm->model, r->ticket);
    fsdpi_dt_free(dm->model, r->stages);
    fsdpi_dt_free(dm->model, r->blocks);
    fsdpi_dt_free(dm->model, r);
}

// Handles a reset of the model: it forgets redistributions that have begun.
static int fsdpi_dt_call(void *user, fsdp_model *model, fsdp_unit *unit, int call,
                         fsdp_status *status) {
    fsdp_redistribution *r = call == FSDP_CALL_RESET ? ((fsdp_dmesh *)user)->redistributions : NULL;
    (void)model, (void)unit, (void)status;
    for (; r; r = r->next) r->begun = 0;
    return 0;
}

static void fsdpi_dt_free_unit(const fsdp_dmesh *dm, fsdpi_dt_unit *u) {
    if (!u) return;
    fsdpi_dt_free(dm->model, u->dims);
    fsdpi_dt_free(dm->model, u->sizes);
    fsdpi_dt_free(dm->model, u);
}
static void fsdpi_dt_end_units(fsdp_dmesh *dm) {
    for (fsdpi_dt_unit *u = dm->units, *next; u; u = next) {
        next = u->next;
        fsdpi_dt_free_unit(dm, u);
    }
}

static void fsdpi_dt_end(void *user) {
    fsdp_dmesh *dm = (fsdp_dmesh *)user;
    fsdp_model *m = dm->model;
    (void)fsdp_wait_stream(m, -1); // outstanding ops read the lists
    while (dm->redistributions) fsdpi_dt_end_redistribution(dm, dm->redistributions);
    fsdpi_dt_end_units(dm);
    for (int s = 0; s < FSDPI_DT_STREAMS; s++)
        for (int i = 0; i < 2; i++) fsdp_buf_destroy(m, dm->staging[s][i]);
    for (fsdpi_dt_memory *at = dm->memory, *next; at; at = next) {
        next = at->next;
        fsdp_buf_destroy(m, at->buf);
        fsdpi_dt_free(m, at);
    }
    fsdpi_dt_free(m, dm->scratch);
    fsdpi_dt_free(m, dm);
}

// Sets *dim to the dim that the desc names in `field`.
static fsdp_status fsdpi_dt_named_dim(const fsdp_dmesh *dm, const char *field, const char *name,
                                      int32_t *dim) {
    *dim = fsdp_mesh_dim(dm->mesh, name);
    if (*dim >= 0) return FSDP_OK;
    return fsdp_fail(dm->world, FSDP_ERR_INVALID_ARG,
                     "[E003] dmesh_create: the mesh has no dim '%s', which %s names: name one of "
                     "its dims, or pass NULL",
                     name, field);
}

// Sets of ranks, each as a hash: this rank, and the ranks that differ from it only in certain dims.
typedef struct fsdpi_dt_sets {
    uint64_t alone, dim[FSDP_MAX_DIMS]; // in dm's mesh: over no dim, and over each dim
    uint64_t data, data_tp;             // over the dims that shard and replicate; the same with tp
    uint64_t shards, replicas, all;     // sets in the model's mesh_info
} fsdpi_dt_sets;

static uint64_t fsdpi_dt_ranks_over(const fsdp_mesh *mesh, const int32_t *ranks, int dims) {
    uint64_t set = 0;
    for (int i = 0; i < fsdp_mesh_size(mesh, -1); i++) {
        int is_in = 1, rest = i;
        for (int d = fsdp_mesh_ndim(mesh); d-- > 0;) {
            is_in &= dims >> d & 1 || rest % fsdp_mesh_size(mesh, d) == fsdp_mesh_rank(mesh, d);
            rest /= fsdp_mesh_size(mesh, d);
        }
        if (is_in) set += fsdpi_hash(4, (uint64_t)ranks[i]);
    }
    return set;
}

static int fsdpi_dt_bit(int dim) { return dim < 0 ? 0 : 1 << dim; }

// Returns the dim of a set of more than one rank, or -1.
static int fsdpi_dt_dim_over(const fsdp_dmesh *dm, const fsdpi_dt_sets *s, uint64_t set) {
    int dim = set == s->alone ? dm->ndim : 0;
    while (dim < dm->ndim && s->dim[dim] != set) dim++;
    return dim < dm->ndim ? dim : -1;
}

/* Finds the dims that shard and replicate: they have the ranks over which the model's mesh_info
   does so. That may include tp, but units that tp cuts do not use it. If this mesh has no such
   dims, the dims with the usual names count. */
static void fsdpi_dt_find_dims(fsdp_dmesh *dm, const fsdpi_dt_sets *s) {
    dm->shard = fsdpi_dt_dim_over(dm, s, s->shards);
    dm->replicate = fsdpi_dt_dim_over(dm, s, s->replicas);
    if ((dm->shard < 0 && s->shards != s->alone) ||
        (dm->replicate < 0 && s->replicas != s->alone)) {
        dm->shard = fsdp_mesh_dim(dm->mesh, "dp_shard");
        if (dm->shard < 0) dm->shard = fsdp_mesh_dim(dm->mesh, "dp");
        dm->replicate = fsdp_mesh_dim(dm->mesh, "dp_replicate");
        return;
    }
    if (dm->shard == dm->tp) dm->shard = -1;
    if (dm->replicate == dm->tp) dm->replicate = -1;
}

// Returns 1 if units would shard or replicate over other ranks than the model's mesh_info.
static int fsdpi_dt_is_other(const fsdp_dmesh *dm, const fsdpi_dt_sets *s) {
    if (s->all != s->data && s->all != s->data_tp) return 1;
    uint64_t shards = dm->shard < 0 ? s->alone : s->dim[dm->shard];
    uint64_t replicas = dm->replicate < 0 ? s->alone : s->dim[dm->replicate];
    return (shards != s->alone && shards == s->replicas) ||
           (replicas != s->alone && replicas == s->shards);
}

// Finds the dims with a role, from the names in the desc and from the model's mesh_info.
static fsdp_status fsdpi_dt_name_dims(fsdp_dmesh *dm, const fsdp_dmesh_desc *d,
                                      const fsdp_mesh_info *info) {
    const int shard = fsdpi_dt_bit(info->shard_mesh_dim);
    const int replicate = fsdpi_dt_bit(info->replicate_mesh_dim);
    int32_t *ranks;
    fsdpi_dt_sets s;
    size_t size = (size_t)fsdp_mesh_size(info->mesh, -1); // at least as many as dm's
    fsdp_status status = fsdpi_dt_alloc(dm->model, size * sizeof *ranks, (void **)&ranks);
    if (status) return status;
    (void)fsdp_mesh_ranks(info->mesh, -1, ranks);
    s.shards = fsdpi_dt_ranks_over(info->mesh, ranks, shard);
    s.replicas = fsdpi_dt_ranks_over(info->mesh, ranks, replicate);
    s.all = fsdpi_dt_ranks_over(info->mesh, ranks, shard | replicate);
    (void)fsdp_mesh_ranks(dm->mesh, -1, ranks);
    s.alone = fsdpi_dt_ranks_over(dm->mesh, ranks, 0);
    for (int i = 0; i < dm->ndim; i++) s.dim[i] = fsdpi_dt_ranks_over(dm->mesh, ranks, 1 << i);
    dm->tp = fsdp_mesh_dim(dm->mesh, "tp");
    if (d->tp_dim) status = fsdpi_dt_named_dim(dm, "tp_dim", d->tp_dim, &dm->tp);
    fsdpi_dt_find_dims(dm, &s);
    if (!status && d->shard_dim)
        status = fsdpi_dt_named_dim(dm, "shard_dim", d->shard_dim, &dm->shard);
    if (!status && d->replicate_dim)
        status = fsdpi_dt_named_dim(dm, "replicate_dim", d->replicate_dim, &dm->replicate);
    const int data = fsdpi_dt_bit(dm->shard) | fsdpi_dt_bit(dm->replicate);
    s.data = fsdpi_dt_ranks_over(dm->mesh, ranks, data);
    s.data_tp = fsdpi_dt_ranks_over(dm->mesh, ranks, data | fsdpi_dt_bit(dm->tp));
    dm->is_other = fsdpi_dt_is_other(dm, &s);
    fsdpi_dt_free(dm->model, ranks);
    return status;
}

// Makes the checks that need no other rank.
static fsdp_status fsdpi_dt_check_mesh(fsdp_dmesh *dm, const fsdp_dmesh_desc *d) {
    fsdp_mesh_info info = FSDP_ZERO;
    fsdp_status status = fsdp_model_mesh_info(dm->model, &info);
    if (status) return status;
    if (!d->mesh || fsdp_mesh_world(d->mesh) != dm->world || fsdp_mesh_rank(d->mesh, 0) < 0)
        return fsdp_fail(dm->world, FSDP_ERR_INVALID_ARG,
                         "[E004] dmesh_create: mesh is NULL, of another world, or without this "
                         "rank: pass a mesh of the model's world that this rank is in");
    if (fsdp_mesh_size(info.mesh, -1) < fsdp_mesh_size(d->mesh, -1))
        return fsdp_fail(dm->world, FSDP_ERR_INVALID_ARG,
                         "[E005] dmesh_create: the model's mesh has %d ranks and this one %d, so "
                         "that norms would leave ranks out: give fsdp_model_desc.mesh_info on the "
                         "whole mesh instead of a slice",
                         fsdp_mesh_size(info.mesh, -1), fsdp_mesh_size(d->mesh, -1));
    dm->mesh = d->mesh;
    dm->ndim = fsdp_mesh_ndim(d->mesh);
    for (int i = 0; i < dm->ndim; i++) {
        dm->shape[i] = fsdp_mesh_size(d->mesh, i);
        dm->coord[i] = fsdp_mesh_rank(d->mesh, i);
    }
    status = fsdpi_dt_name_dims(dm, d, &info);
    int twice = (dm->tp >= 0 && (dm->tp == dm->shard || dm->tp == dm->replicate)) ||
                (dm->shard >= 0 && dm->shard == dm->replicate);
    if (!status && twice)
        status = fsdp_fail(dm->world, FSDP_ERR_INVALID_ARG,
                           "[E006] dmesh_create: two of tp_dim, shard_dim and replicate_dim name "
                           "one dim: name three different ones. What is NULL there is as in the "
                           "model's mesh_info");
    if (!status && d->staging_bytes < 0)
        status = fsdp_fail(dm->world, FSDP_ERR_INVALID_ARG,
                           "[E007] dmesh_create: staging_bytes is %lld: pass 0 or more",
                           (long long)d->staging_bytes);
    if (status) return status;
    fsdpi_dt_world = dm->world;
    status = fsdpi_dt_read_links("dmesh_create", &d->links, &dm->links);
    fsdpi_dt_world = NULL;
    return status;
}

// Reports a failure on another rank, whose text has the reason.
static fsdp_status fsdpi_dt_other_failed(fsdp_world *w) {
    return fsdp_fail(w, FSDP_ERR_INVALID_STATE,
                     "[E008] dmesh_create: it failed on another rank: see its log");
}

// Fails if a rank has failed so far. A failed rank must take part.
static fsdp_status fsdpi_dt_all_did(fsdp_world *w, fsdp_status status) {
    int32_t all = !status;
    fsdp_status reached = fsdp_all_reduce(w, NULL, &all, 1, FSDP_I32, FSDP_MIN);
    if (reached || status) return reached ? reached : status;
    return all ? FSDP_OK : fsdpi_dt_other_failed(w);
}

// Returns the status on which all ranks agree. Also fails if ranks pass different descs.
static fsdp_status fsdpi_dt_agree(fsdp_dmesh *dm, const fsdp_dmesh_desc *d, fsdp_status status) {
    int32_t numbers[FSDP_MAX_DIMS + 6];
    memset(numbers, 0, sizeof numbers);
    memcpy(numbers, dm->shape, sizeof dm->shape);
    int32_t *at = numbers + FSDP_MAX_DIMS;
    at[0] = dm->ndim, at[1] = dm->tp, at[2] = dm->shard, at[3] = dm->replicate;
    at[4] = d->overlap != 0, at[5] = d->links.greedy << 1 | d->links.no_all_to_all;
    uint64_t hash = fsdpi_hash_bytes(1, numbers, sizeof numbers);
    hash = fsdpi_hash_bytes(hash, &d->staging_bytes, sizeof d->staging_bytes);
    hash = fsdpi_hash_bytes(hash, &d->links.base_us, sizeof(double));
    hash = fsdpi_hash_bytes(hash, d->links.hop_us, sizeof d->links.hop_us);
    hash = fsdpi_hash_bytes(hash, d->links.gbytes_per_s, sizeof d->links.gbytes_per_s);
    int64_t values[3] = {!status, (int64_t)hash, (int64_t)~hash};
    fsdp_status reached = fsdp_all_reduce(dm->world, NULL, values, 3, FSDP_I64, FSDP_MIN);
    if (reached || status) return reached ? reached : status;
    if (!values[0]) return fsdpi_dt_other_failed(dm->world);
    if (values[1] == ~values[2]) return FSDP_OK;
    return fsdp_fail(dm->world, FSDP_ERR_MISMATCH,
                     "[E009] dmesh_create: the ranks gave other descs: give all the same names, "
                     "staging_bytes, overlap and links, and a mesh of the same shape");
}

/* Makes meshes for units. unit_mesh: without shard_dim and replicate_dim, it has an outer dim of
   one rank, which shards. replica_mesh: (.., replicate x tp), the replicas of a unit that tp
   replicates. */
static fsdp_status fsdpi_dt_unit_meshes(fsdp_dmesh *dm) {
    static const char *const names[2] = {"one", "rest"};
    int32_t *ranks, at[FSDP_MAX_DIMS];
    fsdp_mesh_desc d = FSDP_ZERO;
    int size = fsdp_mesh_size(dm->mesh, -1);
    if (dm->shard < 0 && dm->replicate < 0)
        return fsdp_mesh_unflatten(dm->mesh, 0, 1, names, &dm->unit_mesh);
    if (dm->replicate < 0 || dm->tp < 0) return FSDP_OK;
    if (size != fsdp_world_size(dm->world))
        return fsdp_fail(dm->world, FSDP_ERR_UNSUPPORTED,
                         "[E025] dmesh_create: a mesh with tp_dim and replicate_dim has %d of %d "
                         "ranks: pass one with all ranks of the world",
                         size, fsdp_world_size(dm->world));
    fsdp_status status = fsdpi_dt_alloc(dm->model, 2 * (size_t)size * sizeof *ranks,
                                        (void **)&ranks);
    if (status) return status;
    (void)fsdp_mesh_ranks(dm->mesh, -1, ranks + size);
    int32_t stride[FSDP_MAX_DIMS], order[FSDP_MAX_DIMS], num = 0;
    for (int i = dm->ndim - 1, step = 1; i >= 0; step *= dm->shape[i--]) stride[i] = step;
    for (int i = 0; i < dm->ndim; i++)
        if (i != dm->replicate && i != dm->tp) order[num++] = i, d.shape[d.ndim++] = dm->shape[i];
    order[num++] = dm->replicate, order[num++] = dm->tp;
    d.shape[d.ndim++] = dm->shape[dm->replicate] * dm->shape[dm->tp];
    memset(at, 0, sizeof at);
    for (int i = 0; i < size; i++) {
        int from = 0, k = num - 1;
        for (int x = 0; x < num; x++) from += at[x] * stride[order[x]];
        ranks[i] = ranks[size + from];
        while (k >= 0 && ++at[k] == dm->shape[order[k]]) at[k--] = 0;
    }
    d.ranks = ranks;
    status = fsdp_mesh_create(dm->world, &d, &dm->replica_mesh);
    fsdpi_dt_free(dm->model, ranks);
    return status;
}

static fsdp_status fsdpi_dt_open(fsdp_dmesh *dm, const fsdp_dmesh_desc *d) {
    static const int streams[FSDPI_DT_STREAMS] = {FSDP_STREAM_COMPUTE, FSDP_STREAM_EXTENSION};
    fsdp_status status = FSDP_OK;
    dm->overlap = d->overlap != 0;
    if (dm->overlap) dm->extension.call = fsdpi_dt_call; // otherwise none is ever outstanding
    for (int32_t i = 0; i < dm->ndim && !status; i++) // last: slices are not freed
        status = fsdp_mesh_slice(dm->mesh, &i, 1, &dm->dim_mesh[i]);
    if (!status) status = fsdpi_dt_unit_meshes(dm);
    status = fsdpi_dt_all_did(dm->world, status); // all ranks make the groups together
    for (int s = 0; s < 1 + dm->overlap; s++)
        for (int i = 0; i < dm->ndim && !status; i++)
            status = fsdp_mesh_comm(dm->mesh, i, streams[s], &dm->comm[s][i]);
    if (!fsdp_world_has(dm->world, FSDP_OP_ALL_TO_ALL)) dm->links.no_all_to_all = 1;
    if (!status) status = fsdpi_dt_staging(dm, d->staging_bytes, "");
    dm->is_fixed = d->staging_bytes > 0;
    return status;
}

// Makes a dmesh, up to the point where ranks communicate.
static fsdp_status fsdpi_dt_new(fsdp_model *model, const fsdp_dmesh_desc *d, fsdp_dmesh **out) {
    fsdp_dmesh *dm;
    fsdp_status status = fsdpi_dt_alloc(model, sizeof *dm, (void **)&dm);
    *out = dm;
    if (status) return status;
    dm->model = model;
    dm->world = fsdp_model_world(model);
    dm->extension.name = "dtensor";
    dm->extension.user = dm;
    dm->extension.destroy = fsdpi_dt_end;
    status = fsdpi_dt_check_mesh(dm, d);
    dm->pool = fsdp_pool_register(model, "activations");
    dm->label = fsdp_label_register(model, "activation");
    if (!status && (dm->pool < 0 || dm->label < 0)) status = FSDP_ERR_INVALID_ARG;
    return status ? status : fsdpi_dt_alloc(model, FSDP_ROUTE_SCRATCH, &dm->scratch);
}

FSDP_API fsdp_status fsdp_dmesh_create(fsdp_model *model, const fsdp_dmesh_desc *desc,
                                       fsdp_dmesh **out) {
    fsdp_dmesh_desc d;
    fsdp_dmesh *dm = NULL, none;
    if (!model || !out)
        return fsdp_fail_null(fsdp_model_world(model), "dmesh_create", "model or dm");
    *out = NULL;
    fsdp_world *w = fsdp_model_world(model);
    memset(&none, 0, sizeof none); // for a rank that could not make one
    none.world = w;
    memset(&d, 0, sizeof d);
    fsdp_status status = fsdp_desc_read(w, &d, desc, sizeof d, "fsdp_dmesh_desc");
    if (!status) status = fsdpi_dt_new(model, &d, &dm);
    status = fsdpi_dt_agree(dm ? dm : &none, &d, status);
    if (!status) {
        status = fsdpi_dt_open(dm, &d);
        if (!status) status = fsdp_attach(model, &dm->extension);
        int is_attached = !status;
        status = fsdpi_dt_all_did(w, status);
        if (status && is_attached) {
            (void)fsdp_detach(model, &dm->extension); // also frees it
            return status;
        }
    }
    if (!status) *out = dm;
    else if (dm) fsdpi_dt_end(dm);
    return status;
}

FSDP_API void fsdp_dmesh_destroy(fsdp_dmesh *dm) {
    if (dm) (void)fsdp_detach(dm->model, &dm->extension);
}

#endif // FSDPI_DTENSOR_MESH_H
