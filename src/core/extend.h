/* core/extend.h - what extensions call: ops, buffers, memory, copies, agreement

   Callers: programs, plan/replay.h (fsdpi_do_marker) and plan/tape.h (fsdpi_buf_place).

   A part of fsdp.h. SPDX-License-Identifier: MIT (full text at the end of fsdp.h) */
#ifndef FSDP_H
#include "../../fsdp.h"
#endif
#ifndef FSDPI_CORE_EXTEND_H
#define FSDPI_CORE_EXTEND_H

#include "../base/hash.h"
#include "../base/os.h"
#include "alloc.h"
#include "commit.h"
#include "error.h"
#include "flight.h"
#include "guard.h"
#include "mesh.h"
#include "objects.h"
#include "ops.h"
#include "params.h"
#include "pool.h"
#include "run.h"
#include "step.h"
#include "ext_dispatch.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* -------------------------------------------------------------------------------------------- */
// Ops of extensions, and names of their labels and pools.

static int fsdpi_register(fsdp_model *m, fsdpi_names *names, int most, const char *name,
                          const char *what) {
    size_t length = name ? strlen(name) : 0;
    for (int i = 0; i < names->count && length; i++)
        if (strcmp(names->text[i], name) == 0) return i;
    if (length && length < FSDPI_NAME && names->count < most) {
        memcpy(names->text[names->count], name, length + 1);
        return names->count++;
    }
    (void)fsdpi_invalid_arg(m->world,
                            "[E904] %s_register: name '%s', expected 1..%d bytes and <= %d names",
                            what, name ? name : "", FSDPI_NAME - 1, most);
    return -1;
}

FSDP_API int fsdp_label_register(fsdp_model *model, const char *name) {
    int i = model ? fsdpi_register(model, &model->labels, FSDPI_NAMES, name, "label") : -1;
    return i < 0 ? -1 : FSDP_LABEL_COUNT + i;
}

FSDP_API int fsdp_pool_register(fsdp_model *model, const char *name) {
    int i = model ? fsdpi_register(model, &model->pools, (int)FSDP_POOL_MAX - (int)FSDP_POOL_COUNT,
                                   name, "pool")
                  : -1;
    return i < 0 ? -1 : FSDP_POOL_COUNT + i;
}

FSDP_API int64_t fsdp_now(const fsdp_world *world) { return world ? fsdpi_now(world) : 0; }

FSDP_API const char *fsdp_world_job(const fsdp_world *world) { return world ? world->job : ""; }

FSDP_API uint64_t fsdp_world_id(const fsdp_world *world) { return world ? world->id : 0; }

// A world whose clock is not the system's has a clock of its own.
FSDP_API uint64_t fsdp_clock_id(const fsdp_world *world) {
    const int64_t before = fsdpi_system_ns(1 /* CLOCK_MONOTONIC */), now = fsdp_now(world);
    const int is_system = now >= before && now <= fsdpi_system_ns(1);
    const uint64_t id = fsdpi_system_clock_id();
    return is_system ? id : fsdpi_hash(id, (uint64_t)(unsigned)fsdp_rank(world));
}

FSDP_API int fsdp_model_number(const fsdp_model *model) { return model ? model->number : 0; }

FSDP_API void fsdp_op_init(fsdp_op *op, const fsdp_model *model, const fsdp_unit *unit, int kind,
                           int label, int stream) {
    if (op && model) *op = fsdpi_op(model, unit, kind, label, stream);
}

static int fsdpi_is_collective(int k) { return k >= FSDP_OP_ALL_GATHER && k <= FSDP_OP_RECV; }

// Returns a clause that names an error in an extension's op, or NULL.
static const char *fsdpi_op_fault(const fsdp_model *m, const fsdp_op *op) {
    const void *src = op->src_ptr, *dst = op->dst_ptr;
    int reads = op->kind == FSDP_OP_COPY || op->kind == FSDP_OP_NORM;
    if (op->kind >= FSDP_OP_COUNT) return "kind is not one of FSDP_OP_*";
    if (op->stream >= FSDP_STREAM_COUNT) return "stream is not one of FSDP_STREAM_*";
    if (op->label >= FSDP_LABEL_COUNT + m->labels.count) return "label is not registered";
    if (op->model != m) return "model is not this model: make the op with fsdp_op_init";
    if (!op->what) return "what is NULL, expected the name of a unit or a call";
    if (op->kind == FSDP_OP_CALL && !op->call) return "call is NULL";
    if (op->kind == FSDP_OP_UPDATE && (!op->list || !op->list_count))
        return "list is empty, expected fsdp_updates";
    if (op->kind == FSDP_OP_UPDATE && !op->call && !m->world->device_ops->update)
        return "call is NULL, and the device has no function for updates";
    if ((reads || op->kind == FSDP_OP_ALL_GATHER || op->kind == FSDP_OP_REDUCE_SCATTER) &&
        (!op->list || !op->list_count))
        return "list is empty";
    if (reads && (!src || !dst)) return "src or dst is NULL";
    if (reads && (!fsdp_dtype_size(op->dtype) || !fsdp_dtype_size(op->out_dtype)))
        return "dtype or out_dtype is not one of FSDP_F32, ...";
    if (op->kind == FSDP_OP_ZERO && !dst) return "dst is NULL";
    if (op->kind == FSDP_OP_ZERO && op->dst &&
        ((const char *)dst < op->dst->ptr ||
         (uint64_t)((const char *)dst - op->dst->ptr) + op->bytes > op->dst->bytes))
        return "dst_ptr and bytes are not inside of dst";
    if (!fsdpi_is_collective(op->kind)) return NULL;
    if (!op->comm) return "comm is NULL: a group of one rank has no collectives";
    if (op->group_size < 2) return "group_size is less than 2";
    int in_place = op->kind == FSDP_OP_ALL_REDUCE || op->kind == FSDP_OP_BROADCAST;
    fsdpi_subgroup group;
    if (!fsdp_dtype_size(op->dtype)) return "dtype is not one of FSDP_F32, ...";
    if (op->root < 0 || op->root >= op->group_size) return "root is not a member of the group";
    if (op->kind != FSDP_OP_RECV && !(op->kind == FSDP_OP_ALL_GATHER && op->in_place) && !src)
        return "src is NULL";
    if (op->kind != FSDP_OP_SEND && !dst) return "dst is NULL";
    if (in_place && src != dst) return "src and dst differ, but this operation works in place";
    if (!fsdpi_comm_number(m->world, op->comm, &group))
        return "comm is not a group of this world: get one from fsdp_mesh_comm";
    return op->group_size != group.size ? "group_size is not the size of comm's group" : NULL;
}

// Applies a marker op to a slot that an extension gives to a unit.
static void fsdpi_do_marker(fsdp_model *m, const fsdp_op *op) {
    if (op->kind == FSDP_OP_ACQUIRE && op->dst) fsdpi_hold(m, op->dst);
    if (op->kind == FSDP_OP_GRADS_WRITTEN && op->dst)
        fsdpi_mark(m->world, FSDP_STREAM_COMPUTE, &op->dst->ready, NULL);
    if (op->kind != FSDP_OP_RELEASE || !op->src) return;
    op->src->held = 0;
    op->src->released = ++m->release_seq;
    fsdpi_mark_released(m->world, op->stream, op->src);
}

FSDP_API fsdp_status fsdp_emit(fsdp_model *model, fsdp_op *op) {
    if (!model || !op) return fsdpi_null_of(model, "emit", "model or op");
    fsdp_world *w = model->world;
    if (op->src && !op->src_ptr) op->src_ptr = op->src->ptr;
    if (op->dst && !op->dst_ptr) op->dst_ptr = op->dst->ptr;
    const char *fault = fsdpi_op_fault(model, op);
    if (fault)
        return fsdpi_invalid_arg(w, "[E905] emit: %s (%s) of '%s': %s", fsdp_op_name(op->kind),
                                 fsdp_op_label(op), op->what ? op->what : "", fault);
    const int is_marker = op->kind >= FSDP_OP_HOOK;
    if (is_marker) fsdpi_do_marker(model, op);
    if (is_marker) return fsdpi_show(model, op);
    const int communicates = fsdpi_is_collective(op->kind);
    if (communicates && !(w->caps.kinds & 1u << op->kind))
        return fsdp_fail(w, FSDP_ERR_UNSUPPORTED, "[E906] emit: backend %s does not have %s",
                         w->comm_ops->name, fsdp_op_name(op->kind));
    if (!op->bytes && (communicates || op->kind == FSDP_OP_COPY)) op->bytes = fsdpi_op_bytes(op);
    fsdp_status status = fsdpi_failed(w);
    if (!status && op->stream == FSDP_STREAM_EXTENSION) status = fsdpi_extension_stream(w);
    if (status) return fsdpi_fail_together(w, status);
    return fsdpi_emit(model, op);
}

/* -------------------------------------------------------------------------------------------- */
// Buffers and memory of extensions.

FSDP_API fsdp_status fsdp_buf_create(fsdp_model *model, int pool, int memory, int64_t nbytes,
                                     fsdp_buf **buf) {
    if (!model || !buf) return fsdpi_null_of(model, "buf_create", "model or buf");
    *buf = NULL;
    FSDPI_TRY(fsdpi_failed(model->world));
    if (pool < 0 || pool >= FSDP_POOL_COUNT + model->pools.count || nbytes < 0 ||
        (memory != FSDP_MEMORY_DEVICE && memory != FSDP_MEMORY_PINNED))
        return fsdpi_invalid_arg(
            model->world,
            "[E908] buf_create: pool %d, memory %d, nbytes %lld: expected FSDP_POOL_* "
            "or a registered one, FSDP_MEMORY_DEVICE or _PINNED, nbytes >= 0",
            pool, memory, (long long)nbytes);
    return fsdpi_buf_make(model, pool, (size_t)nbytes, memory == FSDP_MEMORY_PINNED, buf);
}

// Makes a buffer in the caller's memory. No pool counts it.
static fsdp_status fsdpi_buf_place(fsdp_model *m, char *ptr, int64_t nbytes, fsdp_buf **buf) {
    *buf = (fsdp_buf *)fsdpi_model_alloc(m, sizeof **buf);
    if (!*buf) return fsdpi_no_memory(m->world, "buf_view", "", sizeof **buf);
    (*buf)->is_view = 1;
    (*buf)->bytes = (size_t)nbytes;
    (*buf)->number = ++m->num_bufs;
    (*buf)->pool = (*buf)->acquired_pool = FSDP_POOL_SCRATCH;
    (*buf)->ptr = ptr;
    return FSDP_OK;
}

FSDP_API fsdp_status fsdp_buf_view(fsdp_model *model, const fsdp_buf *whole, int64_t offset,
                                   int64_t nbytes, fsdp_buf **buf) {
    if (!model || !buf) return fsdpi_null_of(model, "buf_view", "model or buf");
    *buf = NULL;
    if (offset < 0 || nbytes < 0 || nbytes > INT64_MAX - offset ||
        offset + nbytes > fsdp_buf_nbytes(whole))
        return fsdpi_invalid_arg(
            model->world, "[E909] buf_view: %lld bytes at %lld exceed %lld bytes",
            (long long)nbytes, (long long)offset, (long long)fsdp_buf_nbytes(whole));
    FSDPI_TRY(fsdpi_buf_place(model, whole ? whole->ptr + offset : NULL, nbytes, buf));
    if (!whole) return FSDP_OK;
    (*buf)->pool = (*buf)->acquired_pool = whole->pool;
    (*buf)->pinned = whole->pinned;
    return FSDP_OK;
}

FSDP_API void fsdp_buf_destroy(fsdp_model *model, fsdp_buf *buf) {
    if (!model || !buf) return;
    if (buf->held) {
        (void)fsdp_fail(model->world, FSDP_ERR_INVALID_STATE,
                        "[E910] buf_destroy: a unit holds it: wait until the unit gives it back");
        return;
    }
    fsdpi_drain(model->world);
    fsdpi_buf_free(model, buf);
}

FSDP_API void *fsdp_buf_ptr(const fsdp_buf *buf) { return buf ? buf->ptr : NULL; }
FSDP_API int64_t fsdp_buf_nbytes(const fsdp_buf *buf) { return buf ? (int64_t)buf->bytes : 0; }

FSDP_API fsdp_status fsdp_pools_trim(fsdp_model *model) {
    if (!model) return fsdp_fail_null(NULL, "pools_trim", "model");
    FSDPI_TRY(fsdpi_refuse_in_dry_run(model, "pools_trim"));
    fsdpi_drain(model->world);
    for (int i = 0; i < model->num_classes; i++) {
        fsdpi_slot_class *c = &model->classes[i];
        int kept = 0;
        for (int k = 0; k < c->count; k++) {
            if (c->slots[k]->held) c->slots[kept++] = c->slots[k];
            else fsdpi_buf_free(model, c->slots[k]);
        }
        c->count = kept;
    }
    return fsdpi_failed(model->world);
}

FSDP_API fsdp_status fsdp_update_place(fsdp_model *model, const char *what, int *memory) {
    if (!model || !what || !memory)
        return fsdpi_null_of(model, "update_place", "model, what or memory");
    const fsdp_world *w = model->world;
    FSDPI_TRY(fsdpi_commit(model));
    *memory = fsdpi_updates_on_device(model) ? FSDP_MEMORY_DEVICE : FSDP_MEMORY_HOST;
    if (model->desc.cpu_offload || fsdpi_is_host(w) || w->device_ops->update) return FSDP_OK;
    return fsdp_fail(model->world, FSDP_ERR_UNSUPPORTED,
                     "[E911] %s: device %s has the shards, but no updates: set cpu_offload", what,
                     w->device_ops->name);
}

FSDP_API fsdp_status fsdp_alloc(fsdp_model *model, int memory, int64_t nbytes, const char *what,
                                void **ptr) {
    if (!model || !what || !ptr) return fsdpi_null_of(model, "alloc", "model, what or ptr");
    fsdp_world *w = model->world;
    int device = memory == FSDP_MEMORY_DEVICE || memory == FSDP_MEMORY_PINNED;
    fsdp_status status = FSDP_OK;
    *ptr = NULL;
    if ((!device && memory != FSDP_MEMORY_HOST) || nbytes < 0)
        return fsdpi_invalid_arg(
            w,
            "[E912] %s: memory is %d, nbytes %lld: expected FSDP_MEMORY_HOST, _DEVICE "
            "or _PINNED, >= 0",
            what, memory, (long long)nbytes);
    if (!device) *ptr = fsdpi_model_alloc(model, (size_t)nbytes);
    else status = w->device_ops->alloc(w->device, memory, (size_t)nbytes, ptr);
    if (!*ptr && !status) status = FSDP_ERR_OUT_OF_MEMORY;
    model->counters.allocations += !status && device;
    if (!status) return FSDP_OK;
    *ptr = NULL;
    char text[160];
    snprintf(text, sizeof text, "[E304] %.80s of %lld bytes%s%s", what, (long long)nbytes,
             device ? " on device " : "", device ? w->device_ops->name : "");
    return fsdpi_alloc_failed(model, status, nbytes, text,
                              device ? fsdpi_device_text(w, status)
                                     : "the allocator returned NULL");
}

FSDP_API void fsdp_free(fsdp_model *model, int memory, void *ptr, int64_t nbytes) {
    if (!model || !ptr) return;
    const fsdp_world *w = model->world;
    if (memory == FSDP_MEMORY_HOST) fsdpi_model_free(model, ptr);
    else w->device_ops->free(w->device, memory, ptr, (size_t)nbytes);
}

/* -------------------------------------------------------------------------------------------- */
// Copies, waits, and bytes that ranks must agree on.

FSDP_API fsdp_status fsdp_transfer(fsdp_model *model, void *dst, const void *src, int64_t nbytes) {
    if (!model || (nbytes > 0 && (!dst || !src)))
        return fsdpi_null_of(model, "transfer", "model, dst or src");
    if (nbytes < 0)
        return fsdpi_invalid_arg(model->world, "[E913] transfer: nbytes is %lld, expected >= 0",
                                 (long long)nbytes);
    FSDPI_TRY(fsdpi_failed(model->world));
    return fsdpi_transfer(model->world, dst, src, (size_t)nbytes);
}

FSDP_API fsdp_status fsdp_lock_params(fsdp_model *model, const char *why) {
    if (!model) return fsdp_fail_null(NULL, "lock_params", "model");
    if (why && model->write_lock_text)
        return fsdp_fail(model->world, FSDP_ERR_INVALID_STATE, "[E232] lock_params: %s",
                         model->write_lock_text);
    model->write_lock_text = why;
    return FSDP_OK;
}

FSDP_API const char *fsdp_lock_reason(const fsdp_model *model) {
    return model ? model->write_lock_text : NULL;
}

FSDP_API fsdp_status fsdp_wait_stream(fsdp_model *model, int stream) {
    if (!model) return fsdp_fail_null(NULL, "wait_stream", "model");
    if (stream < -1 || stream >= FSDP_STREAM_COUNT)
        return fsdpi_invalid_arg(
            model->world, "[E914] wait_stream: stream is %d, expected FSDP_STREAM_* or -1", stream);
    if (stream >= 0) return fsdpi_sync(model->world, stream);
    fsdpi_drain(model->world);
    return fsdpi_failed(model->world);
}

FSDP_API fsdp_status fsdp_agree(fsdp_model *model, const void *data, int64_t nbytes) {
    if (!model || (nbytes > 0 && !data))
        return fsdp_fail_null(fsdp_model_world(model), "agree", "model or data");
    for (int64_t i = 0; i < nbytes; i += 8) {
        uint64_t word = 0;
        memcpy(&word, (const char *)data + i, (size_t)(nbytes - i < 8 ? nbytes - i : 8));
        model->agreed_hash = fsdpi_hash(model->agreed_hash, word);
    }
    return fsdpi_failed(model->world);
}

#endif // FSDPI_CORE_EXTEND_H
