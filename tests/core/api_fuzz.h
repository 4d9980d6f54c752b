/* api_fuzz.h - turns any bytes into calls of the public interface, in any order, with any arguments
   that a caller can pass: wrong numbers, sizes near INT64_MAX, NULLs, wrong descs. There are two
   models in one world: a victim, which gets any call, and a training, between whose calls other
   calls must be refused. The training must end with the bits of an undisturbed one; if the world
   was aborted, a training in a new world must. tests/core/fuzz_api.c gets the bytes from libFuzzer,
   tests/core/test_api.c from a seed.

   A pointer that is not NULL points to what the call expects: the library cannot check more.

   SPDX-License-Identifier: MIT */
#ifndef API_FUZZ_H
#define API_FUZZ_H
#include "lab.h"
#include <sys/resource.h> /* setrlimit */

enum { AF_KINDS = 4, AF_MESHES = 6, AF_UNITS = 4, AF_STEPS = 2, AF_BYTES = 64 << 20 };
enum { AF_DIM = 6 };

typedef struct {
    const uint8_t *data; /* the rest of the input */
    size_t size;
    int kind;
    fsdp_world *w, *other; /* other: a second world of one rank; its mesh is one of the meshes */
    fsdp_mesh *mesh[AF_MESHES];
    fsdp_model *model, *training;
    fsdp_unit *unit[AF_UNITS], *own[2]; /* the victim's; the training's */
    fsdp_adamw *adamw;
    fsdp_grad_scaler *scaler;
    int64_t live; /* bytes of the allocator */
    int64_t calls, refused;
    int pokes;
} af;

static uint64_t af_bits[AF_KINDS]; /* bits of undisturbed trainings */
static int64_t af_calls, af_refused, af_worlds, af_aborted;

#define AF_MUST(cond, ...)                                                                         \
    do {                                                                                           \
        if (cond) break;                                                                           \
        fprintf(stderr, "%s:%d: %s: ", __FILE__, __LINE__, #cond);                                 \
        fprintf(stderr, __VA_ARGS__);                                                              \
        fputc('\n', stderr);                                                                       \
        abort();                                                                                   \
    } while (0)

/* ---- bytes into arguments -------------------------------------------------------------------- */

H_FN unsigned af_byte(af *z) {
    if (!z->size) return 0;
    z->size--;
    return *z->data++;
}
H_FN int af_pick(af *z, int n) { return (int)(af_byte(z) % (unsigned)n); }
H_FN int64_t af_number(af *z) {
    static const int64_t numbers[] = {0,
                                      1,
                                      2,
                                      3,
                                      5,
                                      8,
                                      -1,
                                      -2,
                                      64,
                                      1000,
                                      INT32_MAX,
                                      INT32_MIN,
                                      (int64_t)1 << 31,
                                      (int64_t)1 << 32,
                                      (int64_t)1 << 40,
                                      (int64_t)1 << 62,
                                      INT64_MAX,
                                      INT64_MAX - 1,
                                      INT64_MAX / 2,
                                      INT64_MAX / 4 + 1,
                                      INT64_MIN};
    unsigned b = af_byte(z);
    if (b < 128) return numbers[b % (sizeof numbers / sizeof *numbers)];
    return (int64_t)b - 128;
}
H_FN int32_t af_int(af *z) { return (int32_t)af_number(z); }
H_FN int32_t af_small(af *z) { return af_pick(z, 8) ? af_pick(z, 4) : af_int(z); }
H_FN fsdp_dtype af_dtype(af *z) { return (fsdp_dtype)(af_pick(z, 8) ? af_pick(z, 10) : af_int(z)); }
H_FN double af_double(af *z) {
    static const double values[] = {0, 1, -1, 0.5, 1e300, 1e-300, 3};
    int k = af_pick(z, 10);
    return k < 7 ? values[k] : k == 7 ? LAB_INF : k == 8 ? LAB_NAN : -LAB_INF;
}
H_FN const char *af_name(af *z) {
    static char longest[5000];
    static const char *const names[] = {NULL, "", "a", "b", "a", "\n%s\xff", longest, "dp"};
    memset(longest, 'x', sizeof longest - 1);
    return names[af_pick(z, 8)];
}
H_FN fsdp_mesh *af_mesh(af *z) { return z->mesh[af_pick(z, AF_MESHES)]; }
H_FN fsdp_unit *af_unit(af *z) { return z->unit[af_pick(z, AF_UNITS)]; }
/* In 4 of 24 calls writes a wrong value over a canary or the size of a desc, or sets the right
   size. */
H_FN void af_spoil(af *z, void *desc, size_t size) {
    uint32_t wrong = (uint32_t)af_number(z);
    int how = af_pick(z, 24);
    if (how == 0) memcpy(desc, &wrong, 4);
    if (how == 1) memcpy((char *)desc + 4, &wrong, 4);
    if (how == 2) memcpy((char *)desc + size - 4, &wrong, 4);
    if (how == 3) wrong = (uint32_t)size, memcpy(desc, &wrong, 4);
}

/* ---- a world --------------------------------------------------------------------------------- */

H_FN void *af_alloc(size_t size, size_t align, void *user) {
    af *z = (af *)user;
    void *ptr = NULL;
    if (size > AF_BYTES || z->live + (int64_t)size > AF_BYTES) return NULL;
    if (posix_memalign(&ptr, align, size)) return NULL;
    memset(ptr, 0xa5, size);
    __atomic_add_fetch(&z->live, (int64_t)size, __ATOMIC_SEQ_CST);
    return ptr;
}
H_FN void af_free(void *ptr, size_t size, void *user) {
    af *z = (af *)user;
    if (ptr) __atomic_sub_fetch(&z->live, (int64_t)size, __ATOMIC_SEQ_CST);
    free(ptr);
}

H_FN fsdp_world_desc af_desc(af *z, int kind) {
    static const int sizes[AF_KINDS] = {1, 1, 4, 1000};
    fsdp_world_desc d = w_desc(sizes[kind] / 2, sizes[kind], NULL, "api", kind == 1 ? 2 : 0);
    d.local_rank = 0;
    if (sizes[kind] > 1) d.backend = "fake";
    d.allocator.alloc = af_alloc, d.allocator.free = af_free, d.allocator.user = z;
    return d;
}

H_FN void af_open(af *z) {
    fsdp_world_desc d = af_desc(z, z->kind);
    fsdp_status status = fsdp_init(&d, &z->w);
    AF_MUST(!status, "%s", fsdp_last_error(NULL));
    d = af_desc(z, 0);
    status = fsdp_init(&d, &z->other);
    AF_MUST(!status, "%s", fsdp_last_error(NULL));
    AF_MUST(!fsdp_mesh_1d(z->other, "other", &z->mesh[0]), "%s", fsdp_last_error(z->other));
    af_worlds += 2;
}

/* Shuts down: the status is the failure that aborted the world, and no memory is left. */
H_FN void af_close(af *z) {
    AF_MUST(!fsdp_shutdown(z->other), "the other world");
    fsdp_status failed = lib_failed(z->w), status = fsdp_shutdown(z->w);
    AF_MUST(status == failed, "shutdown: %d, expected %d", (int)status, (int)failed);
    AF_MUST(z->live == 0, "%lld bytes are left", (long long)z->live);
    af_aborted += failed != FSDP_OK;
    z->w = NULL, z->model = z->training = NULL, z->adamw = NULL, z->scaler = NULL;
    memset(z->mesh, 0, sizeof z->mesh);
    memset(z->unit, 0, sizeof z->unit);
}

/* ---- calls to the victim --------------------------------------------------------------------- */

/* Counts a call. Returns its status, which must be valid and not FSDP_ERR_INTERNAL. */
H_FN fsdp_status af_did(af *z, fsdp_status status) {
    z->calls++;
    AF_MUST((int)status >= 0 && status <= FSDP_ERR_INTERNAL, "status %d", (int)status);
    AF_MUST(status != FSDP_ERR_INTERNAL, "%s", fsdp_last_error(z->w));
    if (status) z->refused++;
    return status;
}

H_FN void af_meshes(af *z) {
    fsdp_mesh_desc d = FSDP_ZERO;
    int32_t numbers[8], count;
    const char *names[2] = {af_name(z), af_name(z)};
    fsdp_mesh *made = NULL, *of = af_mesh(z), **at = &z->mesh[af_pick(z, AF_MESHES)];
    for (int i = 0; i < 8; i++) numbers[i] = af_small(z);
    switch (af_pick(z, 6)) {
    case 0:
        d.ndim = af_small(z);
        for (int i = 0; i < FSDP_MAX_DIMS; i++) d.shape[i] = af_small(z), d.names[i] = af_name(z);
        /* d.ranks must have as many ranks as the shape has positions */
        count = d.ndim == 1 && d.shape[0] > 0 && d.shape[0] <= 8;
        d.ranks = count ? numbers : NULL;
        af_spoil(z, &d, sizeof d);
        if (!af_did(z, fsdp_mesh_create(z->w, &d, &made))) *at = made;
        break;
    case 1:
        if (!af_did(z, fsdp_mesh_1d(z->w, names[0], &made))) *at = made;
        break;
    case 2:
        count = af_pick(z, 9);
        if (!af_did(z, fsdp_mesh_slice(of, numbers, count, &made))) *at = made;
        break;
    case 3:
        if (of && !af_did(z, fsdp_mesh_flatten(of, names[0], &made))) *at = made;
        break;
    case 4:
        if (of && !af_did(z, fsdp_mesh_unflatten(of, numbers[0], numbers[1], names, &made)))
            *at = made;
        break;
    default: {
        fsdp_mesh_info info;
        (void)(fsdp_mesh_ndim(of) + fsdp_mesh_size(of, numbers[0]) +
               fsdp_mesh_rank(of, numbers[1]) + fsdp_mesh_dim(of, names[0]) +
               fsdp_mesh_ranks(of, numbers[2], NULL) + fsdp_mesh_equal(of, af_mesh(z)));
        (void)af_did(z, fsdp_mesh_info_init(of, numbers[3], numbers[4], numbers[5], &info));
    }
    }
}

H_FN void af_make_model(af *z) {
    fsdp_model_desc d = FSDP_ZERO;
    if (z->model) fsdp_model_destroy(z->model);
    z->model = NULL, z->adamw = NULL, z->scaler = NULL;
    memset(z->unit, 0, sizeof z->unit);
    d.mesh = af_pick(z, 3) ? NULL : af_mesh(z);
    d.param_dtype = af_pick(z, 3) ? (fsdp_dtype)0 : af_dtype(z);
    d.reduce_dtype = af_pick(z, 3) ? (fsdp_dtype)0 : af_dtype(z);
    d.grad_dtype = af_pick(z, 4) ? (fsdp_dtype)0 : af_dtype(z);
    d.output_dtype = af_pick(z, 4) ? (fsdp_dtype)0 : af_dtype(z);
    d.reshard_after_forward = af_small(z);
    d.cpu_offload = af_pick(z, 6) ? 0 : af_small(z);
    d.implicit_prefetch = af_pick(z, 4) ? 0 : af_small(z);
    d.prefetch_bytes = af_pick(z, 4) ? 0 : af_number(z);
    d.direct_min = af_pick(z, 3) ? 0 : af_number(z);
    d.fill_bytes = af_pick(z, 4) ? 0 : af_number(z);
    af_spoil(z, &d, sizeof d);
    fsdp_model *made = NULL;
    if (!af_did(z, fsdp_model_create(z->w, af_pick(z, 6) ? &d : NULL, &made))) z->model = made;
}

H_FN void af_make_unit(af *z) {
    fsdp_param_desc p[3];
    fsdp_unit_desc d = FSDP_ZERO;
    fsdp_unit *made = NULL;
    memset(p, 0, sizeof p);
    fsdp_dtype trained = af_pick(z, 2) ? (fsdp_dtype)0 : af_dtype(z);
    for (int i = 0; i < 3; i++) {
        p[i].name = af_name(z);
        p[i].ndim = 1 + af_pick(z, 3);
        if (!af_pick(z, 8)) p[i].ndim = af_int(z);
        int wild = !af_pick(z, 3);
        for (int k = 0; k < FSDP_MAX_DIMS; k++)
            p[i].shape[k] = wild ? af_number(z) : 1 + af_pick(z, 9);
        p[i].shard_dim = af_pick(z, 3) ? 0 : af_small(z);
        p[i].frozen = !af_pick(z, 3);
        p[i].dtype = p[i].frozen || !af_pick(z, 16) ? af_dtype(z) : trained; /* otherwise refused */
        p[i].keep_dtype = !af_pick(z, 4);
        af_spoil(z, &p[i], sizeof p[i]);
        p[i].size = 0; /* a wrong size moves the next desc */
    }
    d.name = af_name(z);
    d.params = af_pick(z, 16) ? p : NULL;
    d.num_params = af_pick(z, 8) ? 1 + af_pick(z, 3) : -af_pick(z, 3);
    d.reshard_after_forward = af_pick(z, 2) ? 0 : af_small(z);
    d.param_dtype = af_pick(z, 6) ? (fsdp_dtype)0 : af_dtype(z);
    d.mesh = af_pick(z, 6) ? NULL : af_mesh(z);
    af_spoil(z, &d, sizeof d);
    if (!af_did(z, fsdp_fully_shard(z->model, &d, &made))) z->unit[af_pick(z, AF_UNITS)] = made;
}

H_FN void af_fill(void *user, const fsdp_param_view *block) {
    (void)user;
    memset(block->data, 0, (size_t)block->numel * fsdp_dtype_size(block->dtype));
}

/* Returns room for a full parameter; NULL if it is too large or there is no memory. */
H_FN void *af_room(const fsdp_param_view *v) {
    double bytes = (double)fsdp_dtype_size(FSDP_F64);
    for (int d = 0; d < v->ndim; d++) bytes *= (double)v->shape[d];
    return bytes > 1 << 20 ? NULL : calloc(1, (size_t)bytes + 1);
}

H_FN void af_params(af *z) {
    fsdp_param_view v = FSDP_ZERO;
    fsdp_flat flat;
    fsdp_unit *u = af_unit(z);
    int index = af_small(z), rounds = 0;
    switch (af_pick(z, 10)) {
    case 0: (void)af_did(z, fsdp_model_commit(z->model)); break;
    case 1: (void)af_did(z, fsdp_model_reserve(z->model)); break;
    case 2:
        (void)af_did(z, fsdp_init_params(z->model, af_pick(z, 8) ? af_fill : NULL, NULL));
        break;
    case 3: (void)af_did(z, fsdp_param_at(z->model, index, &v)); break;
    case 4:
        while (rounds++ < 100 && fsdp_next_param(z->model, &v))
            AF_MUST(v.shard != NULL, "no shard of parameter %d", v.ordinal);
        break;
    case 5: (void)af_did(z, fsdp_model_flat(z->model, af_dtype(z), &flat)); break;
    case 6:
    case 7:
    case 8: {
        int what = af_pick(z, 3);
        void *room = af_did(z, fsdp_param_view_get(u, index, &v)) ? NULL : af_room(&v);
        if (!room) break;
        if (what == 0) (void)af_did(z, fsdp_param_load(u, index, room));
        if (what == 1) (void)af_did(z, fsdp_param_full(u, index, room));
        if (what == 2) (void)af_did(z, fsdp_param_full_grad(u, index, room));
        free(room);
        break;
    }
    default: (void)af_did(z, fsdp_params_changed(z->model)); break;
    }
}

H_FN void af_hooks(af *z) {
    fsdp_unit *u = af_unit(z);
    double norm;
    fsdp_clip_desc clip = FSDP_ZERO;
    int index = af_small(z);
    switch (af_pick(z, 14)) {
    case 0: (void)af_did(z, fsdp_pre_forward(u)); break;
    case 1: (void)af_did(z, fsdp_post_forward(u)); break;
    case 2: (void)af_did(z, fsdp_pre_backward(u)); break;
    case 3: (void)af_did(z, fsdp_post_backward(u)); break;
    case 4: (void)af_did(z, fsdp_finalize_backward(z->model)); break;
    case 5: (void)fsdp_data(u, index); break;
    case 6: (void)fsdp_grad(u, index); break;
    case 7: (void)af_did(z, fsdp_unshard(u)); break;
    case 8: (void)af_did(z, fsdp_wait(u)); break;
    case 9: (void)af_did(z, fsdp_reshard(u)); break;
    case 10: (void)af_did(z, fsdp_zero_grad(z->model)); break;
    case 11:
        clip.max_norm = af_double(z), clip.norm_type = af_double(z);
        clip.error_if_nonfinite = af_small(z);
        af_spoil(z, &clip, sizeof clip);
        (void)af_did(z, fsdp_clip_grads(z->model, &clip, &norm));
        break;
    case 12: (void)af_did(z, fsdp_grad_norm(z->model, af_pick(z, 4) ? &norm : NULL)); break;
    default: (void)af_did(z, fsdp_model_reset(z->model)); break;
    }
}

H_FN void af_setters(af *z) {
    fsdp_unit *u = af_unit(z), *targets[4] = {af_unit(z), af_unit(z), u, NULL};
    fsdp_model *m = z->model;
    int value = af_small(z), count = af_pick(z, 4) - 1, forward = af_pick(z, 2);
    switch (af_pick(z, 13)) {
    case 0: (void)af_did(z, fsdp_set_grad_enabled(m, value)); break;
    case 1: (void)af_did(z, fsdp_set_is_last_backward(m, value)); break;
    case 2: (void)af_did(z, fsdp_set_requires_gradient_sync(m, u, value)); break;
    case 3: (void)af_did(z, fsdp_set_requires_all_reduce(m, u, value)); break;
    case 4: (void)af_did(z, fsdp_set_reshard_after_forward(m, u, value)); break;
    case 5: (void)af_did(z, fsdp_set_reshard_after_backward(m, u, value)); break;
    case 6: (void)af_did(z, fsdp_set_unshard_in_backward(m, u, value)); break;
    case 7: (void)af_did(z, fsdp_set_gradient_divide_factor(m, u, af_double(z))); break;
    case 8: (void)af_did(z, fsdp_set_reduce_scatter_unused_params(m, u, value)); break;
    case 9:
        (void)af_did(z, forward ? fsdp_set_modules_to_forward_prefetch(u, targets, count)
                                : fsdp_set_modules_to_backward_prefetch(u, targets, count));
        break;
    case 10: (void)af_did(z, fsdp_set_requires_grad(u, value, af_pick(z, 2))); break;
    case 11: (void)af_did(z, fsdp_model_cast(m, af_dtype(z))); break;
    default: (void)fsdp_is_grad_enabled(m); break;
    }
}

H_FN void af_look(af *z) {
    fsdp_memory memory;
    fsdp_counters counters;
    fsdp_mesh_info info;
    char text[300];
    fsdp_unit *u = af_unit(z);
    switch (af_pick(z, 8)) {
    case 0: (void)af_did(z, fsdp_model_memory(z->model, &memory)); break;
    case 1: (void)af_did(z, fsdp_model_predict(z->model, &memory)); break;
    case 2: (void)af_did(z, fsdp_unit_memory(u, &memory)); break;
    case 3: (void)fsdp_model_describe(z->model, text, (size_t)af_pick(z, 250)); break;
    case 4: (void)af_did(z, fsdp_model_counters(z->model, &counters)); break;
    case 5: (void)af_did(z, fsdp_unit_mesh_info(u, &info)); break;
    case 6: (void)af_did(z, fsdp_model_mesh_info(z->model, &info)); break;
    default:
        (void)(fsdp_num_params(z->model) + fsdp_num_units(z->model) + (int)fsdp_unit_state(u) +
               (int)fsdp_unit_storage(u));
        AF_MUST(fsdp_unit_name(u) && fsdp_last_error(z->w) && fsdp_last_error(NULL), "no text");
        break;
    }
}

H_FN void af_collectives(af *z) {
    double data[32] = {0};
    fsdp_mesh *mesh = af_mesh(z);
    int64_t count = af_number(z);
    if (count > 32 && count <= INT64_MAX / 2) count = 32; /* within `data`, or impossible */
    switch (af_pick(z, 3)) {
    case 0:
        (void)af_did(
            z, fsdp_all_reduce(z->w, mesh, data, count, af_dtype(z), (fsdp_redop)af_small(z)));
        break;
    case 1:
        if (count > 256) count = 256;
        (void)af_did(z, fsdp_broadcast(z->w, mesh, data, count, af_small(z)));
        break;
    default: (void)af_did(z, fsdp_barrier(z->w)); break;
    }
}

H_FN void af_optimizers(af *z) {
    fsdp_adamw_desc d = fsdp_adamw_defaults();
    fsdp_optim_state state;
    int what = af_pick(z, 8);
    if (what == 0 && z->adamw) fsdp_adamw_destroy(z->adamw), z->adamw = NULL;
    if (what == 1 && !z->adamw) {
        if (!af_pick(z, 3)) d.beta1 = af_double(z);
        if (!af_pick(z, 3)) d.eps = af_double(z);
        af_spoil(z, &d, sizeof d);
        if (af_did(z, fsdp_adamw_create(z->model, &d, &z->adamw))) z->adamw = NULL;
    }
    if (what == 2) (void)af_did(z, fsdp_adamw_step(z->adamw, af_double(z)));
    if (what == 3) (void)af_did(z, fsdp_adamw_state(z->adamw, af_small(z), &state));
    if (what == 4 && !z->scaler && af_did(z, fsdp_grad_scaler_create(z->model, NULL, &z->scaler)))
        z->scaler = NULL;
    if (what == 5) (void)af_did(z, fsdp_grad_scaler_unscale(z->scaler));
    if (what == 6) (void)af_did(z, fsdp_grad_scaler_update(z->scaler));
    if (what == 7) (void)(fsdp_adamw_nbytes(z->adamw) + fsdp_grad_scaler_found_inf(z->scaler));
}

/* Opens and closes another world, from any desc that does not wait for other ranks. */
H_FN void af_other_worlds(af *z) {
    fsdp_world_desc d = af_desc(z, 0);
    fsdp_world *w = NULL;
    d.timeout_ms = 1;
    d.rank = af_small(z);
    d.world_size = af_pick(z, 4) ? 1 : af_int(z);
    if (d.world_size > 1) d.backend = "fake";
    if (!af_pick(z, 3)) d.timeout_ms = af_int(z);
    if (!af_pick(z, 3)) d.comm_threads = af_int(z);
    if (!af_pick(z, 3)) d.log_level = af_int(z);
    if (!af_pick(z, 6)) d.backend = af_name(z);
    if (!af_pick(z, 6)) d.store = af_name(z);
    if (!af_pick(z, 6)) d.job = af_name(z);
    if (!af_pick(z, 6)) d.allocator.free = NULL;
    if (d.world_size == 0) d.world_size = 1; /* 0 would read the environment */
    af_spoil(z, &d, sizeof d);
    fsdp_status status = fsdp_init(&d, &w);
    z->calls++;
    AF_MUST((status == FSDP_OK) == (w != NULL), "%d", (int)status);
    AF_MUST(!status || fsdp_last_error(NULL)[0], "no text");
    if (status) z->refused++;
    else AF_MUST(!fsdp_shutdown(w), "shutdown");
}

/* Makes a valid model with units, in most cases, so that later calls have an effect. */
H_FN void af_need(af *z) {
    fsdp_param_desc p[2] = {fsdp_mat("w", 5, 4), fsdp_vec("b", 7)};
    fsdp_unit_desc d = FSDP_ZERO;
    if (z->model || !af_pick(z, 8)) return;
    if (af_did(z, fsdp_model_create(z->w, NULL, &z->model))) z->model = NULL;
    d.params = p, d.num_params = 2;
    for (int u = 0; u < AF_UNITS && z->model; u++)
        if (af_did(z, fsdp_fully_shard(z->model, &d, &z->unit[u]))) z->unit[u] = NULL;
}

/* Makes the hooks of a step of the victim in the right order, as far as they succeed, with other
   calls in between. */
H_FN void af_step(af *z) {
    int odd = af_pick(z, 40);
    for (int at = 0; at < 4 * AF_UNITS; at++) {
        int k = at % (2 * AF_UNITS) / 2, backward = at >= 2 * AF_UNITS;
        fsdp_unit *u = z->unit[backward ? AF_UNITS - 1 - k : k];
        if (at == odd) af_hooks(z);
        if (!u) continue;
        if (!backward) (void)af_did(z, at % 2 ? fsdp_post_forward(u) : fsdp_pre_forward(u));
        else (void)af_did(z, at % 2 ? fsdp_post_backward(u) : fsdp_pre_backward(u));
    }
    (void)af_did(z, fsdp_finalize_backward(z->model));
    if (odd & 1) (void)af_did(z, fsdp_model_reset(z->model));
}

H_FN void af_call(af *z) {
    af_need(z);
    switch (af_pick(z, 18)) {
    case 0:
    case 1: af_meshes(z); break;
    case 2: af_make_model(z); break;
    case 3:
    case 4: af_make_unit(z); break;
    case 15:
    case 16: af_step(z); break;
    case 5:
    case 6: af_params(z); break;
    case 7:
    case 8:
    case 9:
    case 10: af_hooks(z); break;
    case 11: af_setters(z); break;
    case 12: af_look(z); break;
    case 13: af_collectives(z); break;
    case 14: af_optimizers(z); break;
    default:
        if (af_pick(z, 4)) af_other_worlds(z);
        else if (!af_pick(z, 8)) fsdp_abort(z->w, af_name(z));
        break;
    }
}

/* ---- calls that must be refused, between those of a training --------------------------------- */

/* Makes a call in the wrong order; idle: no unit is open. Returns a status that must not be
   FSDP_OK. */
H_FN fsdp_status af_wrong_order(af *z, fsdp_unit *u, int idle) {
    static const int64_t nothing[1] = {0};
    double norm;
    switch (af_pick(z, 6)) {
    case 0: return idle ? fsdp_post_forward(u) : fsdp_params_changed(z->training);
    case 1: return idle ? fsdp_post_backward(u) : fsdp_zero_grad(z->training);
    case 2: return idle ? fsdp_pre_backward(u) : fsdp_clip_grad_norm(z->training, 1, &norm);
    case 3: return idle ? fsdp_post_forward(u) : fsdp_param_load(u, 0, nothing);
    case 4: return idle ? fsdp_post_backward(u) : fsdp_param_full(u, 0, NULL);
    default: return idle ? fsdp_pre_backward(u) : fsdp_set_requires_grad(u, 0, 0);
    }
}

H_FN fsdp_status af_wrong_argument(af *z, fsdp_unit *u) {
    fsdp_param_view v;
    fsdp_unit *made, *targets[1] = {NULL};
    fsdp_param_desc p = fsdp_vec("late", 4);
    fsdp_unit_desc d = FSDP_ZERO;
    fsdp_flat flat;
    float x[4] = {0};
    int far = 2 + (int)(af_byte(z) & 1) * (INT32_MAX - 2);
    d.params = &p, d.num_params = 1;
    switch (af_pick(z, 16)) {
    case 0: return fsdp_fully_shard(z->training, &d, &made); /* it is committed */
    case 1: return fsdp_param_load(u, far, x);
    case 2: return fsdp_param_full(u, -far, NULL);
    case 3: return fsdp_param_view_get(u, far, &v);
    case 4: return fsdp_param_at(z->training, 100 + far / 2, &v);
    case 5: return fsdp_set_requires_grad(u, far, 0);
    case 6: return fsdp_set_modules_to_forward_prefetch(u, targets, 1);
    case 7: return fsdp_set_modules_to_backward_prefetch(u, NULL, far);
    case 8: return fsdp_set_reshard_after_forward(z->training, u, -far);
    case 9: return fsdp_model_flat(z->training, (fsdp_dtype)99, &flat);
    case 10: return fsdp_all_reduce(z->w, NULL, x, -1, FSDP_F32, FSDP_SUM);
    case 11: return fsdp_all_reduce(z->w, NULL, x, 4, (fsdp_dtype)77, FSDP_SUM);
    case 12: return fsdp_broadcast(z->w, NULL, x, 16, -far);
    case 13: return fsdp_set_gradient_divide_factor(z->training, u, LAB_NAN);
    case 14: return fsdp_pre_forward(NULL);
    default: return fsdp_model_cast(z->training, FSDP_I32);
    }
}

H_FN void af_poke(af *z, fsdp_unit *u, int idle) {
    if (!z->pokes || af_pick(z, 3)) return;
    int order = af_pick(z, 2), much = z->size > 2;
    fsdp_status status = order ? af_wrong_order(z, u, idle) : af_wrong_argument(z, u);
    z->calls++, z->refused++, z->pokes++;
    AF_MUST(status, "accepted: %s, idle %d, input left %d", order ? "order" : "argument", idle,
            much);
    AF_MUST(!lib_failed(z->w), "a refused call has ended the world: %s", fsdp_last_error(z->w));
}

H_FN void af_fill_own(void *user, const fsdp_param_view *block) {
    (void)user;
    for (int64_t k = 0; k < block->numel; k++)
        ((float *)block->data)[k] = (float)(fsdp_view_index(block, k) % 13) / 8 -
                                    (float)block->ordinal;
}

H_FN void af_train_step(af *z) {
    for (int u = 0; u < 2; u++) {
        af_poke(z, z->own[u], 1);
        AF_MUST(!fsdp_pre_forward(z->own[u]), "%s", fsdp_last_error(z->w));
        af_poke(z, z->own[u], 0);
        AF_MUST(!fsdp_post_forward(z->own[u]), "%s", fsdp_last_error(z->w));
    }
    for (int u = 1; u >= 0; u--) {
        AF_MUST(!fsdp_pre_backward(z->own[u]), "%s", fsdp_last_error(z->w));
        for (int i = 0; i < 2; i++) {
            float *data = (float *)fsdp_data(z->own[u], i),
                  *grad = (float *)fsdp_grad(z->own[u], i);
            AF_MUST(data && grad, "%s", fsdp_last_error(z->w));
            for (int k = 0; k < AF_DIM; k++) grad[k] += data[k] / 4 + 1;
        }
        af_poke(z, z->own[u], 0);
        AF_MUST(!fsdp_post_backward(z->own[u]), "%s", fsdp_last_error(z->w));
    }
    fsdp_status status = fsdp_finalize_backward(z->training);
    AF_MUST(!status || z->pokes > 1, "%s", fsdp_last_error(z->w));
    AF_MUST(!lib_failed(z->w), "%s", fsdp_last_error(z->w));
}

/* Trains two steps. Returns a hash of the bits. */
H_FN uint64_t af_train(af *z, int pokes) {
    fsdp_param_desc p[2] = {fsdp_mat("w", AF_DIM, 3), fsdp_vec("b", AF_DIM)};
    fsdp_unit_desc d = FSDP_ZERO;
    uint64_t hash = 1;
    d.params = p, d.num_params = 2;
    z->pokes = 0;
    AF_MUST(!fsdp_model_create(z->w, NULL, &z->training), "%s", fsdp_last_error(z->w));
    for (int u = 0; u < 2; u++)
        AF_MUST(!fsdp_fully_shard(z->training, &d, &z->own[u]), "%s", fsdp_last_error(z->w));
    AF_MUST(!fsdp_init_params(z->training, af_fill_own, NULL), "%s", fsdp_last_error(z->w));
    z->pokes = pokes;
    for (int step = 0; step < AF_STEPS; step++) {
        fsdp_param_view v = FSDP_ZERO;
        af_train_step(z);
        while (fsdp_next_param(z->training, &v)) {
            for (int64_t k = 0; v.shard_grad && k < v.numel; k++)
                ((float *)v.shard)[k] -= 0.25f * ((float *)v.shard_grad)[k];
            lab_fold(&hash, v.shard, (size_t)v.numel * 4);
        }
        AF_MUST(!fsdp_params_changed(z->training), "%s", fsdp_last_error(z->w));
        AF_MUST(!fsdp_zero_grad(z->training), "%s", fsdp_last_error(z->w));
    }
    fsdp_model_destroy(z->training);
    z->training = NULL;
    return hash;
}

/* ---- an input -------------------------------------------------------------------------------- */

H_FN void af_prepare(void) {
    static af z;
    setenv("FSDP_LOG_LEVEL", "none", 1);
    struct rlimit limit = {1 << 28, RLIM_INFINITY}; /* limits shared memory, too */
    (void)setrlimit(RLIMIT_FSIZE, &limit);
    for (int kind = 0; kind < AF_KINDS; kind++) {
        memset(&z, 0, sizeof z);
        z.kind = kind;
        af_open(&z);
        af_bits[kind] = af_train(&z, 0);
        af_close(&z);
    }
}

H_FN void af_input(const uint8_t *data, size_t size) {
    af z;
    memset(&z, 0, sizeof z);
    z.data = data, z.size = size;
    z.kind = af_pick(&z, AF_KINDS);
    af_open(&z);
    while (z.size > 40) af_call(&z); /* the rest is for the training */
    if (lib_failed(z.w)) { /* by fsdp_abort, or memory was too short on one of several ranks */
        af_close(&z);
        af_open(&z);
    }
    uint64_t bits = af_train(&z, 1);
    AF_MUST(bits == af_bits[z.kind], "other bits than undisturbed, kind %d", z.kind);
    af_calls += z.calls, af_refused += z.refused;
    af_close(&z);
}
#endif
