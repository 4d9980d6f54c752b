/* core/world.h - rank, size, the opened tables, and the objects made from the world

   A part of fsdp.h. SPDX-License-Identifier: MIT (full text at the end of fsdp.h) */

// Owns: rank, size, the opened tables, lanes, and the objects made from the world.

// Fill in what the desc leaves to the environment, and check the rest.
static fsdp_status fsdpi_world_resolve(fsdp_world *w, fsdp_world_desc *d) {
    fsdp_status status = FSDP_OK;
    if (d->world_size == 0) {
        status = fsdpi_env_ranks(w, d);
        if (!status && d->world_size == 1) fsdpi_tell_alone(w);
    }
    if (!status && d->timeout_ms == 0)
        status = fsdpi_world_env_int(w, "FSDP_TIMEOUT_MS", 1, 0x7FFFFFFF, &d->timeout_ms);
    const char *lanes = fsdpi_env("FSDP_LANES");
    if (!status && d->lanes == 0 && lanes && *lanes) {
        status = fsdpi_world_env_int(w, "FSDP_LANES", 0, 2, &d->lanes);
        if (d->lanes == 0) d->lanes = -1;
    }
    if (!status && d->log_level == FSDP_LOG_DEFAULT) status = fsdpi_env_log_level(w, &d->log_level);
    if (status) return status;
    if (d->world_size < 1 || d->rank < 0 || d->rank >= d->world_size)
        return fsdpi_bad(w, "[E508] rank is %d, world_size is %d, expected 0 <= rank < world_size",
                         d->rank, d->world_size);
    if (d->timeout_ms < 0 || d->lanes < -1 || d->lanes > 2 || d->local_rank < 0 ||
        d->log_level < 0 || d->log_level > FSDP_LOG_NONE)
        return fsdpi_bad(w,
                         "[E151] fsdp_world_desc: timeout_ms %d, lanes %d, local_rank %d, "
                         "log_level %d: expected >= 0, -1..2, >= 0 and 0..%d",
                         d->timeout_ms, d->lanes, d->local_rank, d->log_level, FSDP_LOG_NONE);
    if (!d->allocator.alloc != !d->allocator.free)
        return fsdpi_bad(
            w, "[E152] fsdp_world_desc.allocator: alloc or free is NULL: give both or none");
    if (!d->allocator.alloc) {
        d->allocator.alloc = fsdpi_libc_alloc;
        d->allocator.free = fsdpi_libc_free;
    }
    if (!d->logger.log) d->logger.log = fsdpi_stderr_log;
    if (!d->clock.now_ns) d->clock.now_ns = fsdpi_monotonic_ns;
    return FSDP_OK;
}

static fsdp_status fsdpi_table_check(fsdp_world *w, const char *what, uint32_t version,
                                     uint32_t size, uint32_t want_version, size_t want_size) {
    if (version == want_version && size == want_size) return FSDP_OK;
    return fsdpi_bad(
        w, "[E153] %s table has version %u and size %u, expected %u and %u: use the same fsdp.h",
        what, version, size, want_version, (unsigned)want_size);
}

#define FSDPI_BOUNCE 65536 // bytes of a collective on host data that travel at a time

// Chooses backend and device. A world of one rank needs the device only.
static fsdp_status fsdpi_world_choose(fsdp_world *w, const fsdp_world_desc *d) {
    const char *name = d->backend ? d->backend : fsdpi_env("FSDP_BACKEND");
    int is_spread;
    fsdp_status status = fsdpi_env_is_spread(w, d, &is_spread);
    if (status) return status;
    const fsdpi_backend *b = fsdpi_find_backend(name, is_spread);
    w->device_ops = d->device_ops             ? d->device_ops
                    : b->name && !d->comm_ops ? b->device_ops()
                                              : fsdpi_host_ops();
    int is_missing = !b->name && !d->comm_ops;
    if (w->size == 1 && (!is_missing || !name || d->device_ops)) return FSDP_OK;
    if (is_missing) {
        char text[128];
        fsdpi_text compiled = {text, sizeof text, 0};
        for (b = fsdpi_backends; b->name; b++) fsdpi_say(&compiled, " %s", b->name);
        return fsdp_fail(w, FSDP_ERR_UNSUPPORTED,
                         "[E520] backend '%s'%s is not compiled in: this program has%s. For gloo, "
                         "build with -DFSDP_BACKEND_GLOO (docs/cluster.md); for nccl: docs/gpu.md",
                         name        ? name
                         : is_spread ? "gloo"
                                     : "",
                         d->backend || !is_spread ? "" : ", for ranks on several hosts,",
                         b == fsdpi_backends ? " none" : text);
    }
    w->comm_ops = d->comm_ops ? d->comm_ops : b->comm_ops();
    if (fsdpi_ranks_meet(w->comm_ops)) status = fsdpi_job_check(w, d);
    if (status) return status;
    if (!is_spread || d->comm_ops || !b->one_host) return FSDP_OK;
    return fsdp_fail(w, FSDP_ERR_UNSUPPORTED,
                     "[E521] backend '%s' serves one host, the launcher has started ranks on "
                     "several hosts: set FSDP_BACKEND=gloo (docs/cluster.md)",
                     b->name);
}

static fsdp_status fsdpi_world_open_comm(fsdp_world *w) {
    if (!w->comm_ops) return FSDP_OK;
    fsdp_status status = fsdpi_table_check(w, "a backend's", w->comm_ops->version,
                                           w->comm_ops->size, FSDP_COMM_VERSION,
                                           sizeof *w->comm_ops);
    if (status) return status;
    status = w->comm_ops->open(&w->boot, &w->caps, &w->comm);
    if (status) {
        const char *text = w->comm_ops->error_text(NULL);
        w->comm = NULL;
        fsdpi_set_error(w, text);
        fsdpi_log(w, FSDP_LOG_ERROR, status, text);
        return status;
    }
    w->reduce_comm = w->comm;
    w->num_comms = 2; // the world's two
    uint32_t needed = 1u << FSDP_OP_ALL_GATHER | 1u << FSDP_OP_REDUCE_SCATTER |
                      1u << FSDP_OP_ALL_REDUCE | 1u << FSDP_OP_BROADCAST;
    if ((w->caps.kinds & needed) != needed)
        return fsdp_fail(
            w, FSDP_ERR_UNSUPPORTED,
            "[E522] backend %s lacks all_gather, reduce_scatter, all_reduce or broadcast",
            w->comm_ops->name);
    status = w->comm_ops->alloc(w->comm, FSDPI_BOUNCE, &w->bounce);
    if (status) {
        w->bounce = NULL;
        return fsdpi_world_fail(w, status, "%s", w->comm_ops->error_text(w->comm));
    }
    return FSDP_OK;
}

static fsdp_status fsdpi_world_open_device(fsdp_world *w) {
    fsdp_status status = fsdpi_table_check(w, "a device's", w->device_ops->version,
                                           w->device_ops->size, FSDP_DEVICE_VERSION,
                                           sizeof *w->device_ops);
    if (status) return status;
    status = w->device_ops->open(&w->boot, &w->device);
    if (status) {
        w->device = NULL;
        return fsdpi_device_error(w, status, "open a context");
    }
    return FSDP_OK;
}

// How records run, for fsdp_model_describe and the log.
static void fsdpi_say_mode(fsdpi_text *t, const fsdp_world *w) {
    static const char *const texts[] = {"inline", "in a worker thread", "in two worker threads"};
    int lanes = w->mode != FSDPI_INLINE;
    lanes += w->lanes[FSDP_STREAM_GATHER] != w->lanes[FSDP_STREAM_REDUCE];
    if (w->mode == FSDPI_NATIVE) fsdpi_say(t, "on streams of %s", w->device_ops->name);
    else fsdpi_say(t, "%s, %s", texts[lanes], w->because);
}

// Streams of a device, or worker threads; a second communicator where two may run at once.
static fsdp_status fsdpi_world_open_streams(fsdp_world *w, int lanes) {
    fsdp_status status = FSDP_OK;
    w->because = lanes             ? "as fsdp_world_desc.lanes or FSDP_LANES says"
                 : w->caps.because ? w->caps.because
                                   : "by default";
    if (!lanes) lanes = w->caps.default_lanes;
    if (w->device_ops->flags & FSDP_DEVICE_ASYNC) {
        w->mode = FSDPI_NATIVE;
        for (int s = 0; s < FSDP_STREAM_EXTENSION && !status; s++)
            status = w->device_ops->stream(w->device, s, &w->streams[s]);
        w->own_stream = w->streams[FSDP_STREAM_COMPUTE];
        if (!status) status = w->device_ops->event(w->device, &w->fence);
        for (unsigned i = 0; i < FSDP_STREAM_COUNT * FSDPI_POINTS && !status; i++)
            status = w->device_ops->event(w->device, &w->points[i].event);
        if (status) return fsdpi_device_error(w, status, "make a stream");
    } else if (lanes > 0) {
        w->mode = FSDPI_LANES;
        int two = lanes > 1 && (w->size == 1 || w->caps.lanes > 1);
        status = fsdpi_lane_start(w, FSDP_STREAM_GATHER);
        if (!status && two) status = fsdpi_lane_start(w, FSDP_STREAM_REDUCE);
        if (!status && !two) w->lanes[FSDP_STREAM_REDUCE] = w->lanes[FSDP_STREAM_GATHER];
        w->lanes[FSDP_STREAM_ALLREDUCE] = w->lanes[FSDP_STREAM_REDUCE];
        if (status) return fsdpi_fail_together(w, status);
    }
    if (w->size == 1 || w->mode == FSDPI_INLINE || w->caps.lanes < 2) return FSDP_OK;
    int32_t *ranks = (int32_t *)fsdpi_alloc(&w->boot.allocator, (size_t)w->size * sizeof *ranks);
    if (!ranks)
        return fsdpi_fail_together(
            w, fsdpi_no_memory(w, "list of ranks", "", (size_t)w->size * sizeof *ranks));
    for (int r = 0; r < w->size; r++) ranks[r] = r;
    fsdp_group group = {0, w->rank, w->size, FSDP_STREAM_REDUCE, ranks, "reductions of lanes"};
    status = w->comm_ops->split(w->comm, &group, &w->reduce_comm);
    fsdpi_free(&w->boot.allocator, ranks);
    if (!status) return FSDP_OK;
    w->reduce_comm = w->comm;
    return fsdpi_world_fail(w, status, "%s", w->comm_ops->error_text(w->comm));
}

static void fsdpi_world_close(fsdp_world *w) {
    fsdpi_lanes_stop(w);
    fsdpi_timeline_close(w);
    w->streams[FSDP_STREAM_COMPUTE] = w->own_stream;
    for (int s = 0; s < FSDP_STREAM_COUNT; s++)
        if (w->streams[s]) w->device_ops->destroy(w->device, w->streams[s], NULL);
    if (w->fence) w->device_ops->destroy(w->device, NULL, w->fence);
    for (unsigned i = 0; i < FSDP_STREAM_COUNT * FSDPI_POINTS; i++)
        if (w->points[i].event) w->device_ops->destroy(w->device, NULL, w->points[i].event);
    if (w->comm && w->reduce_comm != w->comm) w->comm_ops->close(w->reduce_comm);
    if (w->bounce) w->comm_ops->free(w->comm, w->bounce, FSDPI_BOUNCE);
    if (w->comm) w->comm_ops->close(w->comm);
    if (w->device) w->device_ops->close(w->device);
    fsdp_allocator allocator = w->boot.allocator;
    (void)munmap(w->state, sizeof *w->state);
    fsdpi_free(&allocator, w);
}

static fsdp_op fsdpi_host_op(int kind, const char *what, fsdp_dtype dtype) {
    fsdp_op op = FSDP_ZERO;
    op.kind = (uint8_t)kind;
    op.what = what;
    op.dtype = (uint8_t)dtype;
    op.in_place = 1;
    return op;
}

// A collective on host data, or on the device's: through memory that peers may read, FSDPI_BOUNCE
// bytes at a time.
static fsdp_status fsdpi_host_collective(fsdp_world *w, fsdp_comm *comm, fsdp_op *op, char *data,
                                         int64_t count) {
    size_t size = fsdp_dtype_size(op->dtype);
    int64_t step = (int64_t)(FSDPI_BOUNCE / size);
    op->label = FSDP_LABEL_WORLD;
    op->what_hash = fsdpi_hash_text(op->what);
    op->comm = comm;
    op->src_ptr = op->dst_ptr = w->bounce;
    op->out_dtype = op->dtype;
    op->scale = 1.0;
    fsdpi_drain(w); // lanes may be using the communicator
    int64_t at = 0;
    do {
        int64_t num = fsdpi_min(step, count - at);
        op->count = (uint64_t)num;
        op->bytes = fsdpi_coll_bytes(op->kind, (uint64_t)op->group_size, (uint64_t)num * size);
        char *piece = data + (size_t)at * size;
        fsdp_status status = fsdpi_transfer(w, w->bounce, piece, (size_t)num * size);
        if (!status) status = fsdpi_emit_world(w, op, NULL);
        if (!status) status = fsdpi_transfer(w, piece, w->bounce, (size_t)num * size);
        if (status) return status;
        at += num;
    } while (at < count);
    return FSDP_OK;
}
