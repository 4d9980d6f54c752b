/* core/init.h - a world begins and ends; collectives on host data

   A part of fsdp.h. SPDX-License-Identifier: MIT (full text at the end of fsdp.h) */

static void fsdpi_world_messages(fsdp_world *w, const fsdp_world_desc *d) {
    w->rank = d->world_size > 0 ? d->rank : -1; // -1: not known yet
    w->log_level = d->log_level == FSDP_LOG_NONE ? 0 : d->log_level ? d->log_level : FSDP_LOG_WARN;
    w->boot.logger = d->logger;
    w->boot.log_level = w->log_level;
    if (!d->logger.log) w->boot.logger.log = fsdpi_stderr_log;
}

static fsdp_status fsdpi_world_make(fsdp_world *early, fsdp_world_desc *d, fsdp_world **out) {
    fsdp_status status = fsdpi_world_resolve(early, d);
    if (!status) status = fsdpi_job_name(early, d, early->job, sizeof early->job);
    if (!status) status = fsdpi_store_name(early, d, early->store, sizeof early->store);
    if (status) return status;
    fsdp_world *w = (fsdp_world *)fsdpi_alloc(&d->allocator, sizeof *w);
    if (w) w->state = fsdpi_own_word(1);
    if (!w || !w->state) {
        fsdpi_free(&d->allocator, w);
        return fsdpi_no_memory(early, "fsdp_init", "", sizeof *w);
    }
    memcpy(w->job, early->job, sizeof w->job);
    memcpy(w->store, early->store, sizeof w->store);
    fsdpi_world_messages(w, d);
    w->boot.rank = w->rank;
    w->size = w->boot.size = d->world_size;
    w->boot.local_rank = d->local_rank;
    w->boot.stuck = &w->stuck;
    w->boot.threads = d->threads;
    w->boot.allocator = d->allocator;
    w->boot.clock = d->clock;
    w->boot.user = d->user;
    w->boot.job = w->job;
    w->boot.store = w->store;
    status = fsdpi_world_choose(w, d); // on GPUs, first compilations and connections take long
    if (!status && !d->timeout_ms)
        d->timeout_ms = w->device_ops->flags & FSDP_DEVICE_ASYNC ? 600000 : 60000;
    w->boot.timeout_ns = (int64_t)d->timeout_ms * 1000000;
    if (!status) status = fsdpi_world_open_comm(w);
    if (!status) status = fsdpi_world_open_device(w);
    if (!status) status = fsdpi_world_open_streams(w, d->lanes);
    if (status && w->comm) status = fsdpi_fail_together(w, status); // the others are in it, too
    if (status) {
        fsdpi_set_error(early, fsdp_last_error(w));
        fsdpi_world_close(w);
        return status;
    }
    char text[160];
    fsdpi_text t = {text, sizeof text, 0};
    fsdpi_say(&t, "collectives run ");
    fsdpi_say_mode(&t, w);
    if (w->rank == 0 && w->size > 1) fsdpi_log(w, FSDP_LOG_INFO, FSDP_OK, text);
    *out = w;
    return FSDP_OK;
}

FSDP_API fsdp_status fsdp_init(const fsdp_world_desc *desc, fsdp_world **world) {
    fsdp_world_desc d;
    fsdp_world early; // speaks for the world until there is one
    if (!world) return fsdpi_null(NULL, "fsdp_init", "world");
    *world = NULL;
    fsdp_status status = fsdp_desc_read(NULL, &d, desc, sizeof d, "fsdp_world_desc");
    if (status) return status;
    memset(&early, 0, sizeof early);
    fsdpi_world_messages(&early, &d);
    status = fsdpi_world_make(&early, &d, world);
    if (status) fsdpi_set_error(NULL, early.error);
    return status;
}

FSDP_API fsdp_status fsdp_shutdown(fsdp_world *world) {
    if (!world) return FSDP_OK;
    if (fsdpi_is_child(world)) return fsdpi_failed(world);
    fsdpi_drain(world);
    while (world->models) {
        fsdp_model *m = world->models;
        world->models = m->next;
        fsdpi_model_close(m);
    }
    while (world->meshes) {
        fsdp_mesh *mesh = world->meshes;
        world->meshes = mesh->next;
        fsdpi_mesh_free(mesh);
    }
    fsdp_status failed = fsdpi_failed(world);
    fsdpi_world_close(world);
    return failed;
}

FSDP_API void fsdp_abort(fsdp_world *world, const char *why) {
    if (!world) return;
    (void)fsdpi_world_fail(world, FSDP_ERR_ABORTED, "rank %d: [E401] it aborted the world: %s",
                           world->rank, why ? why : "no reason given");
}

FSDP_API fsdp_status fsdp_set_stream(fsdp_world *world, void *native) {
    if (!world) return fsdpi_null(NULL, "set_stream", "world");
    fsdp_status status = fsdpi_failed(world);
    if (status) return status;
    if (world->mode != FSDPI_NATIVE)
        return fsdp_fail(world, FSDP_ERR_UNSUPPORTED,
                         "[E803] set_stream: device %s has no streams: omit the call on it",
                         world->device_ops->name);
    void **compute = &world->streams[FSDP_STREAM_COMPUTE];
    if (!native) native = world->own_stream;
    status = world->device_ops->record(world->device, *compute, world->fence);
    if (!status) status = world->device_ops->wait(world->device, native, world->fence);
    if (status) return fsdpi_device_fail(world, status, "ordering streams of");
    *compute = native;
    return FSDP_OK;
}

FSDP_API int fsdp_rank(const fsdp_world *world) { return world ? world->rank : -1; }
FSDP_API int fsdp_world_size(const fsdp_world *world) { return world ? world->size : -1; }
FSDP_API int fsdp_local_rank(const fsdp_world *w) { return w ? w->boot.local_rank : -1; }
FSDP_API const char *fsdp_last_error(const fsdp_world *world) {
    if (!world) return fsdpi_thread_error;
    return fsdpi_failed(world) ? world->failure : world->error;
}

// Checks that collectives on host data share.
static fsdp_status fsdpi_host_call(fsdp_world *w, const fsdp_mesh *mesh, const void *data,
                                   int64_t count, const char *what) {
    if (!w) return fsdpi_null(NULL, what, "world");
    fsdp_status status = fsdpi_failed(w);
    if (status) return status;
    if (count < 0 || count > INT64_MAX / 8 || (count > 0 && !data))
        return fsdpi_bad(w, "[E104] %s: count is %lld and data is %s, expected 0..2^60 and data",
                         what, (long long)count, data ? "given" : "NULL");
    if (mesh && (mesh->world != w || mesh->coord[0] < 0))
        return fsdpi_bad(w, "[E105] %s: give a mesh of this world, on a rank that is in the mesh",
                         what);
    return FSDP_OK;
}

/* Over the world (mesh NULL), or over a mesh: dim by dim. A reduction of all dims is one over the
   mesh. A broadcast reaches first those that differ from the root in dim 0 alone, then those that
   differ in dims 0 and 1, and so on; what others send meanwhile is overwritten later. */
static fsdp_status fsdpi_host_mesh(fsdp_world *w, const fsdp_mesh *mesh, fsdp_op *op, int root,
                                   void *data, int64_t count) {
    fsdp_status status = FSDP_OK;
    for (int d = 0; d < (mesh ? mesh->ndim : 1) && !status; d++) {
        fsdp_comm *comm = mesh ? mesh->gather_comm[d] : w->comm; // NULL: a group of one
        op->group_size = mesh ? mesh->shape[d] : w->size;
        op->root = mesh ? root / fsdpi_mesh_stride(mesh, d) % mesh->shape[d] : root;
        if (comm) status = fsdpi_host_collective(w, comm, op, (char *)data, count);
    }
    return status;
}

FSDP_API fsdp_status fsdp_all_reduce(fsdp_world *world, const fsdp_mesh *mesh, void *data,
                                     int64_t count, fsdp_dtype dtype, fsdp_redop op) {
    fsdp_status status = fsdpi_host_call(world, mesh, data, count, "all_reduce");
    if (status) return status;
    if (!(fsdp_dtype_is_float(dtype) || dtype == FSDP_I32 || dtype == FSDP_I64) || op < FSDP_SUM ||
        op > FSDP_MIN)
        return fsdpi_bad(world,
                         "[E106] all_reduce: dtype is %s and op is %d, expected f32, f64, f16, "
                         "bf16, i32 or i64, and FSDP_SUM, FSDP_MAX or FSDP_MIN",
                         fsdp_dtype_name(dtype), op);
    fsdp_op record = fsdpi_host_op(FSDP_OP_ALL_REDUCE, "fsdp_all_reduce", dtype);
    record.redop = (uint8_t)op;
    return fsdpi_host_mesh(world, mesh, &record, 0, data, count);
}

FSDP_API fsdp_status fsdp_broadcast(fsdp_world *world, const fsdp_mesh *mesh, void *data,
                                    int64_t nbytes, int root) {
    fsdp_status status = fsdpi_host_call(world, mesh, data, nbytes, "broadcast");
    if (status) return status;
    int size = mesh ? fsdpi_mesh_numel(mesh) : world->size;
    if (root < 0 || root >= size)
        return fsdpi_bad(world, "[E107] broadcast: root is %d, expected 0..%d", root, size - 1);
    fsdp_op record = fsdpi_host_op(FSDP_OP_BROADCAST, "fsdp_broadcast", FSDP_U8);
    return fsdpi_host_mesh(world, mesh, &record, root, data, nbytes);
}

FSDP_API fsdp_status fsdp_barrier(fsdp_world *world) {
    int32_t one = 1;
    fsdp_status status = fsdpi_host_call(world, NULL, &one, 1, "barrier");
    if (status) return status;
    fsdp_op record = fsdpi_host_op(FSDP_OP_ALL_REDUCE, "fsdp_barrier", FSDP_I32);
    return fsdpi_host_mesh(world, NULL, &record, 0, &one, 1);
}
