/* plan/objects.h - what a plan is made of

   Callers: make.h, api.h (fsdpi_plan_variant) and others.

   A part of fsdp_plan.h. SPDX-License-Identifier: MIT (full text at the end of fsdp.h) */
#ifndef FSDP_PLAN_H
#include "../../fsdp_plan.h"
#endif
#ifndef FSDPI_PLAN_OBJECTS_H
#define FSDPI_PLAN_OBJECTS_H

#include "../core/objects.h"

enum { FSDPI_PLAN_TEXT = 512 }; // bytes of a reason

// A step has three forms. The program: the calls that the trainer made. The decisions: where a
// replay differs from the eager step. The tape: the ops and states that follow from both, derived
// by a dry run. The listing describes the tape with text that is equal on every rank: texts, proofs
// and simulations are made from it.

typedef struct fsdpi_plan_call {
    fsdp_unit *unit; // NULL: finalize
    int32_t call;    // FSDP_CALL_*
    int32_t index;   // index of the unit; -1: none
} fsdpi_plan_call;

// Reasons for a decision. In a text, the call that a reason refers to follows the words.
#define FSDPI_PLAN_WHY_LIST(X)                                                                     \
    X(DEMAND, "needed")                                                                            \
    X(JOINED, "joined")                                                                            \
    X(AHEAD, "ahead of its use")                                                                   \
    X(NEXT_USE, "next use")                                                                        \
    X(FARTHEST, "memory is needed before its next use")                                            \
    X(LAST_USE, "last use")                                                                        \
    X(ONCE, "reduced once")

enum {
#define FSDP_X(name, text) FSDPI_PLAN_WHY_##name,
    FSDPI_PLAN_WHY_LIST(FSDP_X)
#undef FSDP_X
        FSDPI_PLAN_WHY_COUNT
};

// Decisions, in the words of a text.
#define FSDPI_PLAN_ACT_LIST(X)                                                                     \
    X(GATHER, "gather")   /* issued in this call */                                                \
    X(KEEP, "keep")       /* not freed after this call, where the eager step does */               \
    X(FREE, "free")       /* freed after this call */                                              \
    X(COLLECT, "collect") /* gradients of this post_backward wait */                               \
    X(REDUCE, "reduce")   /* gradients that waited are reduced with those of this post_backward */

enum {
#define FSDP_X(name, text) FSDPI_PLAN_##name,
    FSDPI_PLAN_ACT_LIST(FSDP_X)
#undef FSDP_X
        FSDPI_PLAN_ACT_COUNT
};

typedef struct fsdpi_plan_act {
    int32_t call; // call in which it happens
    int32_t unit;
    int32_t group; // acts of one call and group are bucketed; -1: no group
    int32_t at;    // the call that `why` refers to
    uint8_t what;  // FSDPI_PLAN_GATHER, ...
    uint8_t late;  // GATHER: 1: after the call's own work, 0: before it
    uint8_t why;   // FSDPI_PLAN_WHY_*
    uint8_t reserved;
} fsdpi_plan_act;

// The decisions of a plan.
typedef struct fsdpi_plan_decisions {
    fsdpi_plan_act *acts; // by call: those before its own work, then those after it
    int32_t num_acts, cap_acts;
    uint8_t *managed; // [units] 1: only acts gather and free its parameters
    uint8_t *waits;   // [units] 1: its reduction waits for a later call
    int8_t *sync;     // [calls] of a pre_backward: new gradient sync; -1: unchanged
} fsdpi_plan_decisions;

// Places of a listing's line that are not slots.
enum {
    FSDPI_PLAN_NONE = -1,
    FSDPI_PLAN_SHARDS = -2, // the block of shards; the unit's part of it
    FSDPI_PLAN_GRADS = -3,  // the block of shard gradients
    FSDPI_PLAN_OTHER = -4,  // an extension's buffer
    FSDPI_PLAN_HELD = -5,   // slot that a unit has held since before the step: pool GATHER,
    FSDPI_PLAN_HELD_COUNT = FSDP_POOL_REDUCE_OUT - FSDP_POOL_GATHER +
                            1 // down to -9: of pool REDUCE_OUT
};

// Place of a slot. Places may overlap.
typedef struct fsdpi_plan_slot {
    int64_t offset, bytes; // in the arena; offset -1: its own memory, since it outlasts the step
    int32_t pool;          // FSDP_POOL_*
    int32_t carried_over;  // 1: the slot that the unit held when the step began
} fsdpi_plan_slot;

// A unit in a line, and its buffers: indices of slots, or FSDPI_PLAN_*.
typedef struct fsdpi_plan_member {
    int32_t unit, src, dst;
} fsdpi_plan_member;

// One line of a listing: an op, or an event of a buffer.
typedef struct fsdpi_plan_line {
    int32_t call;                 // index
    int32_t members, num_members; // range in listing.members; several: bucketed
    int32_t comm;                 // index in listing.comms; -1: none
    uint32_t digest;              // digest of lists: parts that are equal on all ranks
    uint64_t count, bytes;
    double scale;
    uint8_t kind, label, stream; // FSDP_OP_*; FSDP_LABEL_*; FSDP_STREAM_*
    uint8_t dtype, out_dtype, accumulate, in_place, redop;
} fsdpi_plan_line;

typedef struct fsdpi_plan_unit {
    char *name;                       // unique in the listing
    int64_t gather_bytes, grad_bytes; // bytes of its slots; grad_bytes 0: no elements
    // How its parameters are read: 1: in forward, 2: in backward, 3: both; 0: they are its shards,
    // or were gathered before the step.
    int32_t reads;
} fsdpi_plan_unit;

enum { FSDPI_PLAN_COMM = 32, FSDPI_PLAN_COMMS = 16 };
enum {
    FSDPI_PLAN_JOINED = 64,          // most units in one bucket
    FSDPI_PLAN_MOST_MISSES = 3,         // consecutive steps that leave a plan or cannot be recorded
    FSDPI_PLAN_LEAST_BYTES = 4 << 20 // bytes of slots, if the desc has no limit
};

typedef struct fsdpi_plan_listing {
    uint64_t model, kind; // hashes: of the model; of options and initial state
    int32_t num_units, num_params, shards, replicas, mode; // mode: FSDP_RUN_*
    int32_t num_calls, forward_calls;
    int64_t bytes, bound, eager;
    int32_t gathers[2], reductions[2], replica_ops[2], ops[2];
    uint64_t gather_bytes[2], reduce_bytes[2];
    fsdpi_plan_unit *units; // [num_units]
    fsdpi_plan_call *calls; // [num_calls]
    fsdpi_plan_decisions choice;
    fsdpi_plan_slot *slots;
    int32_t num_slots, cap_slots;
    fsdpi_plan_line *lines; // by call, in the order of issue
    int32_t num_lines, cap_lines;
    fsdpi_plan_member *members;
    int32_t num_members, cap_members;
    char comms[FSDPI_PLAN_COMMS][FSDPI_PLAN_COMM];
    int32_t num_comms;
    uint64_t hash; // hash of its text with ops
} fsdpi_plan_listing;

// One use of a slot: from the op that acquires it to the one that releases it.
typedef struct fsdpi_plan_use {
    int32_t unit, pool;
    int64_t bytes;
    int32_t from, to; // indices of ops; to: num_ops if it is held at the end
    int32_t slot;     // index of its place in the listing
    int32_t next_adjacent; // the use whose memory must follow directly; -1: none
    int32_t is_adjacent;   // 1: its memory follows that of another use
} fsdpi_plan_use;

// A unit after a call: its states, the state of its gradients, and its slots.
typedef struct fsdpi_plan_saved {
    fsdpi_state state;
    uint64_t slots; // hash of their numbers: a later buffer may have the address of a freed one
} fsdpi_plan_saved;

typedef struct fsdpi_plan_state {
    fsdp_unit *unit;
    fsdpi_plan_saved saved;
} fsdpi_plan_state;

typedef struct fsdpi_plan_pair { // uses of an op's buffers; -1: others
    int32_t src, dst;
} fsdpi_plan_pair;

typedef struct fsdpi_plan_group {
    int32_t op, members, num_members;
} fsdpi_plan_group;

// A call of a replay: it emits ops, and then puts units into states.
typedef struct fsdpi_plan_step {
    fsdp_unit *unit;
    int32_t call;
    int32_t num_ops, num_joined, num_states;
    fsdp_op *ops;
    const fsdpi_plan_group *joined; // collectives among the ops
    const fsdpi_plan_state *states;
} fsdpi_plan_step;

typedef struct fsdpi_plan_tape {
    fsdp_op *ops;
    fsdpi_plan_pair *pairs; // [num_ops] the uses of each op
    int32_t num_ops, cap_ops, cap_pairs;
    fsdpi_plan_state *states;
    int32_t num_states, cap_states;
    fsdpi_plan_use *uses;
    int32_t num_uses, cap_uses;
    fsdp_buf **bufs; // [num_uses]
    int32_t cap_bufs;
    fsdpi_plan_group *groups; // bucketed collectives
    int32_t num_groups, cap_groups;
    fsdpi_plan_member *members; // members of groups; src and dst are uses
    int32_t num_members, cap_members;
    void **made; // lists and names of bucketed collectives
    int32_t num_made, cap_made;
    // [num_calls + 1], by call: index of its first op and state. The last call, finalize, has none:
    // the core runs it.
    int32_t *ops_at, *states_at;
    fsdpi_plan_step *steps; // [num_calls] the same ranges, for replays
    // [num_calls]: where the call's own ops begin and end; what its unit holds after it
    int32_t *own, *own_end;
    uint8_t *storage, *holds; // holds: 1: a slot of any pool
    uint8_t *held;            // [units] 1: gathered before the step
    fsdp_op *hooks;           // [num_calls] the marker of each call
} fsdpi_plan_tape;

// A step variant: the options and the initial unit states for which one tape is valid.
typedef struct fsdpi_plan_variant {
    fsdp_plan *plan;
    uint64_t options, used_at; // fsdpi_plan_options; number of the last step that used it
    fsdpi_plan_saved *begin;   // [num_units] initial states
    fsdpi_plan_call *calls;
    int32_t num_calls;
    int32_t left;     // consecutive steps that have left it
    int32_t unbound;  // 1: its arena has been destroyed
    int32_t fleeting; // 1: it begins with a slot that will be destroyed: fsdpi_plan_find_fleeting
    uint64_t replayed;
    fsdpi_plan_listing listing;
    fsdpi_plan_tape tape;
    fsdp_buf **bufs; // by slot of the listing
} fsdpi_plan_variant;

struct fsdp_plan {
    fsdp_model *model;
    fsdp_world *world;
    fsdp_extension extension, memory; // memory: frees plans, with the model
    fsdp_plan_desc desc;
    fsdp_plan_cost cost; // desc.cost points to it, unless it is NULL
    int64_t *compute_ns; // cost.compute_ns
    const fsdp_mesh *mesh;
    fsdp_unit **units; // the model's
    int32_t num_units;
    int32_t mode;                // fsdp_plan_mode
    int32_t mode_of_world;       // FSDP_RUN_*
    int32_t warm;                // steps before one is recorded
    int32_t open;                // 1: a step has begun
    int32_t lost;                // 1: there was no memory to record a call
    int32_t broken;              // strict: 1: has left its plan, no call has failed
    int32_t at;                  // index of the next call in the program
    const fsdpi_plan_step *next; // the next step of a replay; NULL: no replay
    int32_t differ;              // consecutive recordings whose plan was not used
    uint64_t settings, options;  // fsdpi_plan_settings now; fsdpi_plan_options when the step began
    uint64_t steps, replayed, left, recorded;
    fsdpi_plan_variant *kind; // the variant being replayed
    fsdpi_plan_variant *last; // the last to use the arena; NULL: none of its ops is outstanding
    fsdpi_plan_variant **kinds;
    int32_t num_kinds, cap_kinds;
    fsdpi_plan_call *calls; // the recorded calls
    int32_t num_calls, cap_calls;
    fsdpi_plan_saved *begin; // [num_units] states when the step began
    fsdp_buf **retired_bufs; // slots of dropped plans that a unit still held
    int32_t num_retired_bufs, cap_retired_bufs;
    fsdp_buf *arena;
    int32_t pool; // pool of the arena
    char why[FSDPI_PLAN_TEXT];
};

#endif // FSDPI_PLAN_OBJECTS_H
