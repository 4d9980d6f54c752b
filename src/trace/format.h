/* trace/format.h - what a trace file has

   Callers: read.h (fsdpi_tr_sum) and record.h (fsdpi_tr_sum).

   A part of fsdp_trace.h. SPDX-License-Identifier: MIT (full text at the end of fsdp.h) */
#ifndef FSDP_TRACE_H
#include "../../fsdp_trace.h"
#endif
#ifndef FSDPI_TRACE_FORMAT_H
#define FSDPI_TRACE_FORMAT_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>

/* A file consists of blocks of 64 KiB; the last one may be shorter. The last 8 bytes of a block
   are a sum of the others (fsdpi_tr_sum). Without these sums the file is the header, followed by
   the sections in the order of their list. Numbers are those of the host that wrote it,
   little-endian. A name is an index in NAMES. The first names are those of the units, in the
   order of the model. Times are nanoseconds on the world's clock on that rank. */

enum { FSDPI_TR_BLOCK = 65536, FSDPI_TR_NO_NAME = 65535, FSDPI_TR_MEETINGS = 32 };
#define FSDPI_TR_HELD  UINT32_MAX // a slot
#define FSDPI_TR_MAGIC "fsdptr04"

// Kinds that are no fsdp_op: a call of the program, and work that it has reported.
enum { FSDPI_TR_CALL = FSDP_OP_COUNT, FSDPI_TR_SPAN, FSDPI_TR_KINDS };

// Kinds, calls, streams and states are numbers of the library that wrote the file. A library with
// more or fewer of them cannot read it.
enum { FSDPI_TR_NUMBERS = ((FSDPI_TR_KINDS * 64 + FSDP_CALL_COUNT) * 16 + FSDP_STREAM_COUNT) * 16 +
                          FSDP_STATE_COUNT };

/* An event: an fsdp_op, or one of the kinds above. Markers begin and end when the host issues
   them. */
typedef struct fsdpi_tr_event {
    int64_t begin_ns, end_ns;
    uint64_t bytes;     // fsdp_op.bytes; ACQUIRE, RELEASE, GRADS_WRITTEN: the buffer's
    uint32_t waited_ns; // fsdp_op.waited_ns, at most 2^32 - 1
    uint32_t seq;       // low bits of fsdp_op.seq; CALL: its first event's; SPAN: 0
    uint32_t step;      // number of earlier steps since the model was made
    uint32_t slot;      // ACQUIRE, RELEASE, GRADS_WRITTEN: fsdp_op.slot, or FSDPI_TR_HELD: acquired
                        // before the trace. CALL: number of events that it issued
    uint16_t what;      // a name: the unit's, or the call's
    uint16_t comm;      // fsdp_op.comm_number; 0: none
    uint8_t kind;
    uint8_t label;         // fsdp_op.label; slots and gradients: the pool; CALL: FSDP_CALL_*
    uint8_t stream, state; // as in fsdp_op
} fsdpi_tr_event;

// The sections: enum, name, type of an entry.
#define FSDPI_TR_SECTIONS(X)                                                                       \
    X(TEXT, text, char)         /* texts, each with its end */                                     \
    X(NAMES, names, uint32_t)   /* where they begin in TEXT */                                     \
    X(LABELS, labels, uint32_t) /* the same, also those that extensions have registered */         \
    X(POOLS, pools, fsdpi_tr_pool)                                                                 \
    X(KEPT, kept, fsdpi_tr_pool)                                                                   \
    X(UNITS, units, fsdpi_tr_unit)                                                                 \
    X(PARAMS, params, fsdpi_tr_param)                                                              \
    X(COMMS, comms, fsdpi_tr_comm)                                                                 \
    X(RANKS, ranks, int32_t)                                                                       \
    X(MEETINGS, meetings, fsdpi_tr_meeting)                                                        \
    X(STEPS, steps, fsdpi_tr_step)                                                                 \
    X(RECORDS, records, fsdpi_tr_event)

enum {
#define FSDP_X(number, name, type) FSDPI_TR_IN_##number,
    FSDPI_TR_SECTIONS(FSDP_X)
#undef FSDP_X
        FSDPI_TR_SECTION_COUNT
};

// Memory after the first fsdp_params_changed of the traced steps, otherwise at their end: a pool,
// by its number, or the states of an extension (KEPT: fsdp_next_state), without padding.
typedef struct fsdpi_tr_pool {
    uint32_t name, reserved; // in TEXT
    int64_t bytes;
} fsdpi_tr_pool;

// Options as in fsdp_unit_desc; defaults are replaced by the model's options.
typedef struct fsdpi_tr_unit {
    int32_t num_params;       // in the order of units
    int32_t shards, replicas; // ranks that shard it, and ranks with an identical shard
    int32_t reshard_after_forward, param_dtype, reduce_dtype;
    int64_t slot_bytes[FSDP_POOL_COUNT]; // bytes of a slot; SHARD, SHARD_GRAD: its part
} fsdpi_tr_unit;

typedef struct fsdpi_tr_param {
    uint32_t name; // in TEXT
    int32_t dtype, ndim, shard_dim, requires_grad, reserved;
    int64_t shape[FSDP_MAX_DIMS];
} fsdpi_tr_param;

typedef struct fsdpi_tr_comm {
    uint32_t number, size; // fsdp_op.comm_number
    uint32_t ranks;        // index of its first member in RANKS
} fsdpi_tr_comm;

// A meeting of all ranks of the model's mesh: none left before the last one came. So two clocks can
// be compared: the time when one rank left is later than the time when another one came.
typedef struct fsdpi_tr_meeting {
    int64_t came_ns, left_ns;
} fsdpi_tr_meeting;

typedef struct fsdpi_tr_step { // a recorded step
    uint32_t number, first_seq;
    int64_t begin_ns, end_ns; // begin of the first call; end of the last call before the next step
} fsdpi_tr_step;

typedef struct fsdpi_tr_section {
    uint64_t at, count;      // offset in the file, in bytes; number of entries
    uint32_t size, reserved; // bytes per entry
} fsdpi_tr_section;

typedef struct fsdpi_tr_header {
    char magic[8];
    uint64_t bytes;               // bytes in header and sections, without sums
    uint64_t clock;               // equal on ranks that share a clock
    uint64_t mesh;                // equal on ranks that met
    uint64_t id;                  // fsdp_world_id: equal in all files of a run
    uint64_t dropped;             // events that did not fit
    int64_t real_ns, clock_ns;    // one moment on CLOCK_REALTIME and on the world's clock
    int32_t rank, size, run;      // run: FSDP_RUN_*
    int32_t numbers;              // FSDPI_TR_NUMBERS
    // Options of the model, as in fsdp_model_desc.
    int32_t param_dtype, reduce_dtype, grad_dtype;
    int32_t reshard_after_forward, cpu_offload, implicit_prefetch;
    int64_t prefetch_bytes, direct_min;
    char job[128], host[64];
    fsdpi_tr_section section[FSDPI_TR_SECTION_COUNT];
} fsdpi_tr_header;

// Sums 8-byte words. A change in one word always changes the sum.
static uint64_t fsdpi_tr_sum(const void *data, size_t bytes) {
    uint64_t sum = bytes, word;
    for (size_t i = 0; i + sizeof word <= bytes; i += sizeof word) {
        memcpy(&word, (const char *)data + i, sizeof word);
        sum = (sum ^ word) * 0x9E3779B97F4A7C15u;
        sum ^= sum >> 29;
    }
    return sum;
}

#endif // FSDPI_TRACE_FORMAT_H
