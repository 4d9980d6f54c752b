// Written by tools/amalgamate.py from fsdp_plan.h, plan/: change those files.
/* fsdp_plan.h - step plans: a training step that is recorded, optimised, proven and replayed; an
   extension of fsdp.h

   What torch.compile does for FSDP, without a compiler. The trainer stays as it is and says one
   line more:

       #define FSDP_IMPLEMENTATION          // in one .c or .cc file of the program
       #include "fsdp_plan.h"               // includes fsdp.h; link with -lm

       fsdp_plan *plan;
       if (fsdp_plan_create(model, NULL, &plan)) return 1;    // after the last fsdp_fully_shard

   The first step runs by calls. The second one is recorded: at its end the library makes a plan.
   From the third step on the hooks answer from a tape: fewer and larger collectives, in slots of at
   most `most_bytes`, and the same bits. Before the first replay the library proves that the step
   cannot deadlock, that nothing races, and that slots need no more memory than the plan says:
   docs/plan.md lists what the proof looks at, and what it assumes. If the program then does
   something else, the step goes on by calls, and what it computes is the same.

   SPDX-License-Identifier: MIT (full text at the end of fsdp.h) */
#ifndef FSDP_PLAN_H
#define FSDP_PLAN_H

#include "fsdp.h"

#ifdef __cplusplus
extern "C" {
#endif
// clang-format off

typedef struct fsdp_plan fsdp_plan;

// Passes, in the order in which they run.
#define FSDP_PASS_LIST(X)                                                                         \
    X(ONCE, "once")     /* off by default: a unit that is reduced several times in a step is */   \
                        /* reduced once; sums are rounded in another order (PyTorch's) */         \
    X(BUCKET, "bucket") /* neighbours are gathered, and reduced, by one collective */             \
    X(KEEP, "keep")     /* parameters stay where their next use comes soonest: fewer gathers */   \
    X(AHEAD, "ahead")   /* gathers are issued before their use, as far as slots allow */          \
    X(ARENA, "arena")   /* slots that never meet share memory */
enum {
#define FSDP_X(name, text) FSDP_PASS_##name,
    FSDP_PASS_LIST(FSDP_X)
#undef FSDP_X
    FSDP_PASS_COUNT
};

typedef enum fsdp_plan_mode {
    FSDP_PLAN_WARM_UP = 0, // steps by calls, not recorded
    FSDP_PLAN_RECORDING,   // by calls, recorded
    FSDP_PLAN_REPLAYING,   // from the tape
    FSDP_PLAN_BY_CALLS,    // this step goes on by calls: it was another one, or has left
    FSDP_PLAN_PAUSED,
    FSDP_PLAN_REFUSED,     // by calls for good: see fsdp_plan_why
    FSDP_PLAN_MODE_COUNT
} fsdp_plan_mode;

// What things take, for fsdp_plan_simulate and fsdp_plan_desc.cost. The same on all ranks. Nothing
// is measured by the library: no decision looks at a clock.
typedef struct fsdp_plan_cost {
    uint32_t size, start_canary;
    double gather_latency_ns, gather_bytes_per_ns;   // of one collective; of its full side
    double reduce_latency_ns, reduce_bytes_per_ns;
    double replica_latency_ns, replica_bytes_per_ns; // all_reduce over replicas
    double copy_bytes_per_ns, issue_ns;              // copies, zeros; the host, for each op
    const int64_t *compute_ns; // [num_compute]: the caller's work behind call k;
    int32_t num_compute;       // fewer than calls: the last one stands for the rest
    int32_t shared_links;      // 1: gathers and reductions slow each other down
    uint64_t end_canary;
} fsdp_plan_cost;

typedef struct fsdp_plan_desc {
    uint32_t size, start_canary;
    uint32_t without, with;     // 1u << FSDP_PASS_*: left out; taken although off by default
    int32_t warm_up;            // steps before the one that is recorded; 0: 1
    int32_t ahead;              // gathers under way before their use; 0: 1 with lanes or streams,
                                // none inline, where an earlier one hides nothing; -1: none
    int32_t most_kinds;         // kinds of steps that are kept; 0: 8
    int32_t strict;             // 1: a call that is not the plan's is FSDP_ERR_INVALID_STATE
    int64_t most_bytes;         // of the slots of one kind of step; 0: what steps by calls hold, at
                                // least 4 MiB
    int64_t bucket_bytes;       // of the full side of a joined collective; 0: 1 MiB; -1: none is
                                // joined
    int64_t first_bucket_bytes; // of the first one of forward and of backward, which nothing hides;
                                // 0: as bucket_bytes
    const fsdp_plan_cost *cost; // NULL: all passes are taken. Else bucket, keep and ahead each only
                                // if fsdp_plan_simulate says that it makes the step no slower.
                                // Copied
    uint64_t end_canary;
} fsdp_plan_desc;

/* fsdp_plan_create - plan the steps of a model from now on; commits the model
   desc        NULL: defaults
   plan        owned by the model: ends with fsdp_plan_destroy, the model or the world
   Effect      after warm_up steps one is recorded; fsdp_finalize_backward of that step makes the
               plan (collective, blocks, allocates); then steps are replayed. A step that is
               another one, or becomes it, goes on by calls; what it computes is the same. If a plan
               of other options has needed more memory meanwhile, the first call of a step does
               that, too
   Result      FSDP_OK; INVALID_ARG (the text names the field), INVALID_STATE (a unit is not idle,
               the model has a plan), MISMATCH (ranks gave other descs: which field),
               OUT_OF_MEMORY (also if another rank has failed), what commit returns
   Collective  yes: every rank of the model's mesh gives the same desc      Blocks yes
   Allocates   yes
   Source      torch: torch.compile of a model under fully_shard; torchtitan: graph_trainer */
FSDP_API FSDP_MUST_CHECK fsdp_status fsdp_plan_create(fsdp_model *model, const fsdp_plan_desc *desc,
                                                      fsdp_plan **plan);

/* fsdp_plan_destroy - the model goes by calls again, from the next call on; NULL is allowed
   Collective  yes (see fsdp_plan_pause)      Blocks for operations under way
   Allocates   no; later steps allocate the slots of calls anew. Slots that units still hold go with
               the model */
FSDP_API void fsdp_plan_destroy(fsdp_plan *plan);

/* fsdp_plan_state - what the current or next step does; FSDP_PLAN_MODE_COUNT for NULL
   fsdp_plan_why   - one line: why it goes by calls or was refused, what has changed; "" otherwise,
               never NULL, valid until the next call of the step
   Collective  no      Blocks no      Allocates no
   Source      torch: compiled_autograd_enabled, torch.compiler.is_compiling */
FSDP_API fsdp_plan_mode fsdp_plan_state(const fsdp_plan *plan);
FSDP_API const char *fsdp_plan_why(const fsdp_plan *plan);

/* fsdp_plan_pause  - 1: steps go by calls and are not looked at, plans are kept; 0: go on with the
               next step
   fsdp_plan_forget - drop all plans and record anew
   Effect      in a step: its next call and all behind it go by calls; reductions that have waited
               for a later call are made
   Result      FSDP_OK; INVALID_ARG; in a step collective errors
   Collective  yes      Blocks inline, in a step: until reduced; forget: for operations under way
   Allocates   no, but those reductions take slots of calls at their first use */
FSDP_API fsdp_status fsdp_plan_pause(fsdp_plan *plan, int paused);
FSDP_API fsdp_status fsdp_plan_forget(fsdp_plan *plan);

/* fsdp_plan_count - kinds of steps that have a plan: their index is 0 .. count-1, newest last
   fsdp_plan_text  - one of them as text (format: docs/plan.md): the same on all ranks
   what        FSDP_PLAN_TEXT_DECISIONS: program and decisions; _OPS: with ops, slots and reasons
   buf         room for cap bytes, always terminated when cap > 0; may be NULL with cap 0
   Result      text: length of the whole text without its end, as snprintf; 0 when there is none
   Collective  no      Blocks no      Allocates no */
enum { FSDP_PLAN_TEXT_DECISIONS = 0, FSDP_PLAN_TEXT_OPS = 1 };
FSDP_API int fsdp_plan_count(const fsdp_plan *plan);
FSDP_API size_t fsdp_plan_text(const fsdp_plan *plan, int index, int what, char *buf, size_t cap);

/* fsdp_plan_load - take a plan from text instead of a recorded step: memory is known, and the proof
   made, before the first step. Decisions may have been edited; ops in the text have to be those
   that follow from them
   Result      FSDP_OK; INVALID_ARG (line and column, what was expected; or the two lines of a
               refutation), INVALID_STATE (a step is under way, a unit is not idle, steps are
               REFUSED), MISMATCH (another model, world or mode: what differs; other ranks gave
               another text), CORRUPT (its end is missing, or its hash is wrong), OUT_OF_MEMORY
               (bytes needed and allowed; or another rank has failed). Nothing changes then; but if
               a rank has no memory for the slots, all plans are dropped
   Collective  yes: every rank of the model's mesh      Blocks yes      Allocates yes */
FSDP_API FSDP_MUST_CHECK fsdp_status fsdp_plan_load(fsdp_plan *plan, const char *text,
                                                    size_t length);

// [0]: by calls, [1]: by the plan.
typedef struct fsdp_plan_report {
    int32_t calls, forward_calls, units, buckets; // of the program; joined collectives
    int32_t ops[2], gathers[2], reductions[2], replicas[2];
    uint64_t gather_bytes[2], reduce_bytes[2];    // read from other ranks in one step
    int64_t bytes[2];                             // of slots
    int64_t bound;                                // no placement of these slots needs less
    int32_t crossing;     // parameters gathered in forward that still are when backward begins
    int32_t most_open;    // units gathered at a time, with those under way
    uint64_t hash;        // of the plan; equal on all ranks
    uint64_t replayed, left, recorded; // steps so far
    int64_t host_bytes;   // tables of the plan
} fsdp_plan_report;

/* fsdp_plan_report_get - numbers of one plan
   Result      FSDP_OK; INVALID_ARG
   Collective  no      Blocks no      Allocates no */
FSDP_API fsdp_status fsdp_plan_report_get(const fsdp_plan *plan, int index, fsdp_plan_report *out);

enum {
    FSDP_PROOF_OK = 0,
    FSDP_PROOF_DEADLOCK,
    FSDP_PROOF_RACE,
    FSDP_PROOF_MEMORY,
    FSDP_PROOF_USE,
    FSDP_PROOF_COUNT
};
typedef struct fsdp_plan_proof {
    int32_t refuted;                       // FSDP_PROOF_*
    int32_t ranks, programs;               // looked at; different ones among them
    int64_t ops, accesses, waits, waits_implied, comms, buffers, bytes;
    char text[512];                        // refuted: two lines, the counterexample; else one line
} fsdp_plan_proof;

/* fsdp_plan_prove       - the proof that was made before the plan ran: again, with its numbers
   fsdp_plan_prove_texts - the same for texts of several ranks, which may differ: without a world
   texts       [num] of fsdp_plan_text with ops, of ranks 0 .. num-1; equal ones may be one pointer
   Result      FSDP_OK, also when refuted; INVALID_ARG (line and column), OUT_OF_MEMORY
   Collective  no      Blocks no      Allocates temporary tables      Thread any (prove_texts) */
FSDP_API fsdp_status fsdp_plan_prove(const fsdp_plan *plan, int index, fsdp_plan_proof *out);
FSDP_API fsdp_status fsdp_plan_prove_texts(const char *const *texts, int num, fsdp_plan_proof *out);

typedef struct fsdp_plan_times {
    int64_t step_ns, compute_ns, bound_ns;  // bound: no order of these ops is faster
    int64_t gather_ns, reduce_ns, replica_ns; // under way
    int64_t exposed_ns;                     // the caller's stream waits for collectives
    int64_t peak_bytes;                     // of slots
    int32_t worst_call;                     // at which it waits longest, and how long
    int64_t worst_ns;
} fsdp_plan_times;

/* fsdp_plan_simulate - the time of a step under given costs: of the plan, or of its calls
   by_calls    1: rehearses the calls between two steps, with the options that the model has now
   Result      FSDP_OK; INVALID_ARG, OUT_OF_MEMORY; by_calls: INVALID_STATE (a unit is not idle, or
               options are not those of the plan)
   Collective  no      Blocks by_calls: for operations under way      Allocates temporary tables */
FSDP_API fsdp_status fsdp_plan_simulate(const fsdp_plan *plan, int index, int by_calls,
                                        const fsdp_plan_cost *cost, fsdp_plan_times *out);

/* fsdp_pass_name - "keep"; "?" out of range
   Collective  no      Blocks no      Allocates no      Thread any */
FSDP_API const char *fsdp_pass_name(int pass);

// clang-format on
#ifdef __cplusplus
}
#endif
#endif // FSDP_PLAN_H

/* ============================================================================================ */
/* Implementation, leaves first. */

#if defined(FSDP_IMPLEMENTATION) && !defined(FSDP_PLAN_IMPLEMENTED)
#define FSDP_PLAN_IMPLEMENTED

#include <stdio.h>  // snprintf
#include <stdlib.h> // calloc, free
#include <string.h> // memcpy, memset, strcmp

#ifdef __cplusplus
extern "C" {
#endif

enum { FSDPI_PLAN_TEXT = 512 }; // room for a line that says why


/* ==== plan/objects.h ========================================================================
   what a plan is made of, and its memory */

// A step has three forms. The program: the calls that the trainer made. The decisions: what is done
// otherwise than by calls. The tape: the records and states that follow from both, made by a
// rehearsal. The listing says what the tape does in words that are the same on every rank: texts,
// proofs and simulations are made from it.

typedef struct fsdpi_plan_call {
    fsdp_unit *unit; // NULL: finalize
    int32_t call;    // FSDP_CALL_*
    int32_t index;   // of the unit; -1
} fsdpi_plan_call;

// Why a decision was taken; behind the words stands the call that they speak of.
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
    X(KEEP, "keep")       /* not freed behind this call, though by calls it is */                  \
    X(FREE, "free")       /* freed behind this call */                                             \
    X(COLLECT, "collect") /* gradients of this post_backward wait */                               \
    X(REDUCE, "reduce")   /* gradients that waited are reduced with those of this post_backward */

enum {
#define FSDP_X(name, text) FSDPI_PLAN_##name,
    FSDPI_PLAN_ACT_LIST(FSDP_X)
#undef FSDP_X
        FSDPI_PLAN_ACT_COUNT
};

typedef struct fsdpi_plan_act {
    int32_t call; // in which it happens
    int32_t unit;
    int32_t group; // acts of one call and group are joined; -1: alone
    int32_t at;    // the call that `why` speaks of
    uint8_t what;  // FSDPI_PLAN_GATHER, ...
    uint8_t late;  // GATHER: behind the call's own work; else before it
    uint8_t why;   // FSDPI_PLAN_WHY_*
    uint8_t reserved;
} fsdpi_plan_act;

// The decisions of a plan.
typedef struct fsdpi_plan_choice {
    fsdpi_plan_act *acts; // by call: before its own work, then behind it
    int32_t num_acts, cap_acts;
    uint8_t *managed; // [units] whose parameters are gathered and freed by acts alone
    uint8_t *waits;   // [units] whose reduction is moved behind a later call
    int8_t *sync;     // [calls] of a pre_backward: gradient sync from there on; -1: as it is
} fsdpi_plan_choice;

// Buffers that are no slots, where a listing says from where and to where.
enum {
    FSDPI_PLAN_NONE = -1,
    FSDPI_PLAN_SHARDS = -2, // the block of shards; the unit's part of it
    FSDPI_PLAN_GRADS = -3,  // the block of shard gradients
    FSDPI_PLAN_HOST = -4,   // host memory: flags of use
    FSDPI_PLAN_OTHER = -5,  // an extension's
    FSDPI_PLAN_HELD = -6,   // a slot that a unit holds since before the step: here of pool GATHER,
    FSDPI_PLAN_HELD_COUNT = FSDP_POOL_ROUT - FSDP_POOL_GATHER + 1 // down to -10: of pool ROUT
};

// One place for a slot. Places may overlap.
typedef struct fsdpi_plan_slot {
    int64_t offset, bytes; // in the arena; offset -1: its own memory, since it outlasts the step
    int32_t pool;          // FSDP_POOL_*
    int32_t older;         // it is the slot that the unit held when the step began
} fsdpi_plan_slot;

// A unit that takes part in a line, and its buffers: index of a slot, or FSDPI_PLAN_*.
typedef struct fsdpi_plan_member {
    int32_t unit, src, dst;
} fsdpi_plan_member;

// One thing done, in a listing: a record, or what happens to a buffer.
typedef struct fsdpi_plan_line {
    int32_t call;                 // index
    int32_t members, num_members; // place in listing.members; several: joined
    int32_t comm;                 // index in listing.comms, -1
    uint32_t digest;              // of lists, in bits that are equal on all ranks
    uint64_t count, bytes;
    double scale;
    uint8_t kind, label, stream; // FSDP_OP_*; FSDP_LABEL_*; FSDP_STREAM_*
    uint8_t dtype, out_dtype, accumulate, in_place, redop;
} fsdpi_plan_line;

typedef struct fsdpi_plan_unit {
    char *name;                       // unique in the listing
    int64_t gather_bytes, grad_bytes; // of its slots; grad 0: its gradients have no elements
    // Its parameters: 1: in forward, 2: in backward, 3: both; 0: they are its shards, or were
    // gathered before the step.
    int32_t reads;
} fsdpi_plan_unit;

enum { FSDPI_PLAN_COMM = 32, FSDPI_PLAN_COMMS = 16 };
enum {
    FSDPI_PLAN_STATE = 512,          // room for the state of a unit
    FSDPI_PLAN_JOINED = 64,          // units that are joined, at most
    FSDPI_PLAN_PATIENCE = 3,         // steps in a row that leave a plan, or cannot be recorded
    FSDPI_PLAN_LEAST_BYTES = 4 << 20 // that slots may have, if the desc does not say
};

typedef struct fsdpi_plan_listing {
    uint64_t model, kind; // hashes: of the model, of options and of the state at the begin
    int32_t num_units, num_params, shards, replicas, mode; // mode: FSDPI_PLAN_INLINE, ...
    int32_t fused; // the backend's reduce_scatter casts, scales and adds
    int32_t num_calls, forward_calls;
    int64_t bytes, bound, by_calls;
    int32_t gathers[2], reductions[2], replica_ops[2], ops[2];
    uint64_t gather_bytes[2], reduce_bytes[2];
    fsdpi_plan_unit *units; // [num_units]
    fsdpi_plan_call *calls; // [num_calls]; of a text unit is NULL
    fsdpi_plan_choice choice;
    fsdpi_plan_slot *slots;
    int32_t num_slots, cap_slots;
    fsdpi_plan_line *lines; // by call, in the order of issue
    int32_t num_lines, cap_lines;
    fsdpi_plan_member *members;
    int32_t num_members, cap_members;
    char comms[FSDPI_PLAN_COMMS][FSDPI_PLAN_COMM];
    int32_t num_comms;
    uint64_t hash; // of its text with ops
} fsdpi_plan_listing;

enum { FSDPI_PLAN_INLINE, FSDPI_PLAN_LANES, FSDPI_PLAN_STREAMS, FSDPI_PLAN_MODES };

// One use of a slot: from the record that acquires it to the one that releases it.
typedef struct fsdpi_plan_use {
    int32_t unit, pool;
    int64_t bytes;
    int32_t from, to; // records; to: num_ops if it is held at the end
    int32_t slot;     // where it lies, in the listing
    int32_t glue;     // the use that has to lie right behind it; -1
    int32_t glued;    // it lies behind another one
} fsdpi_plan_use;

// The state of a unit behind a call.
typedef struct fsdpi_plan_state {
    fsdp_unit *of;
    int32_t unit;
    int32_t at; // in tape.saved, in states
} fsdpi_plan_state;

// What a replayed call does: states, then runs of records.
typedef struct fsdpi_plan_step {
    fsdp_unit *unit;
    int32_t call;
    int32_t num_states, num_runs;
    const struct fsdpi_plan_state *states;
    const struct fsdpi_plan_run *runs;
} fsdpi_plan_step;

// Records that follow one another; before them a unit's flags of use are brought up to date.
typedef struct fsdpi_plan_run {
    int32_t begin, end;
    fsdp_unit *flags; // NULL: none
} fsdpi_plan_run;

typedef struct fsdpi_plan_pair { // of a record: the uses whose buffers it has; -1: others
    int32_t src, dst;
} fsdpi_plan_pair;

typedef struct fsdpi_plan_group {
    int32_t op, members, num_members;
} fsdpi_plan_group;

typedef struct fsdpi_plan_tape {
    fsdp_op *ops;
    fsdpi_plan_pair *pairs; // of ops
    int32_t num_ops, cap_ops, cap_pairs;
    fsdpi_plan_state *states;
    int32_t num_states, cap_states;
    char *saved; // [num_states] the bytes
    int32_t cap_saved;
    fsdpi_plan_run *runs;
    int32_t num_runs, cap_runs;
    fsdpi_plan_use *uses;
    int32_t num_uses, cap_uses;
    fsdp_buf **bufs; // of uses
    int32_t cap_bufs;
    fsdpi_plan_group *groups; // of joined collectives
    int32_t num_groups, cap_groups;
    fsdpi_plan_member *members; // of groups; src and dst are uses
    int32_t num_members, cap_members;
    void **made; // lists and names of joined collectives
    int32_t num_made, cap_made;
    // [num_calls + 1], by call: where its records, runs and states begin. The last call, finalize,
    // has none: the core does it.
    int32_t *ops_at, *runs_at, *states_at;
    fsdpi_plan_step *steps; // [num_calls] the same, for replays
    // [num_calls]: where the call's own records begin and end; what its unit holds behind it
    int32_t *own, *own_end;
    uint8_t *storage, *holds; // holds: a slot of any pool
    uint8_t *held;            // [units] gathered before the step
    fsdp_op *hooks;           // [num_calls] the marker of each call
} fsdpi_plan_tape;

// A kind of step: the same options, the same state at the begin.
typedef struct fsdpi_plan_kind {
    fsdp_plan *plan;
    uint64_t settings, used_at; // fsdp_model_settings; number of the step that used it last
    char *begin;                // [num_units] states
    fsdpi_plan_call *calls;
    int32_t num_calls;
    int32_t left;    // how often in a row a step has left it
    int32_t unbound; // its places are in an arena that is gone
    uint64_t replayed;
    fsdpi_plan_listing listing;
    fsdpi_plan_tape tape;
    fsdp_buf **bufs;  // by slot of the listing
    fsdp_buf **older; // slots that units hold when such a step begins
    int32_t num_older, cap_older;
} fsdpi_plan_kind;

struct fsdp_plan {
    fsdp_model *model;
    fsdp_world *world;
    fsdp_extension extension, memory; // memory: goes with the model; it frees what plans have
    fsdp_plan_desc desc;
    fsdp_plan_cost cost; // desc.cost points to it, if there is one
    int64_t *compute_ns; // of cost
    const fsdp_mesh *mesh;
    fsdp_unit **units;
    int32_t *params; // [num_units] how many each has
    int32_t num_units;
    size_t unit_bytes;           // of a unit's state
    int32_t mode;                // fsdp_plan_mode
    int32_t mode_of_world;       // FSDPI_PLAN_INLINE, ...
    int32_t warm;                // steps that are still to come before one is recorded
    int32_t open;                // a step has begun
    int32_t lost;                // there was no memory to record a call of it
    int32_t broken;              // strict: the step has left its plan, and no call has failed yet
    int32_t at;                  // the next call of the program
    const fsdpi_plan_step *next; // in a replay: it; else NULL
    int32_t differ;              // recordings in a row that were of no use
    uint64_t settings;           // at the begin of the step
    uint64_t steps, replayed, left, recorded;
    fsdpi_plan_kind *kind; // that is replayed
    fsdpi_plan_kind *last; // that had the arena last; NULL: nothing of it is under way
    fsdpi_plan_kind **kinds;
    int32_t num_kinds, cap_kinds;
    fsdpi_plan_call *calls; // that are recorded
    int32_t num_calls, cap_calls;
    char *begin;       // [num_units] states at the begin of the step
    fsdp_buf **strays; // slots of plans that are gone, which units still held then
    int32_t num_strays, cap_strays;
    fsdp_buf *arena;
    int32_t pool; // of the arena
    char why[FSDPI_PLAN_TEXT];
};


/* ==== plan/memory.h =========================================================================
   lists of a plan, and how it fails */

// Memory comes from the model's allocator; for texts that belong to no model, from malloc.

static fsdp_status fsdpi_plan_alloc(fsdp_model *m, size_t bytes, void **out) {
    if (m) return fsdp_alloc(m, FSDP_MEMORY_HOST, (int64_t)bytes, "plan: a table", out);
    *out = calloc(bytes ? bytes : 1, 1);
    return *out ? FSDP_OK
                : fsdp_fail(NULL, FSDP_ERR_OUT_OF_MEMORY,
                            "[E970] plan: no memory for a table of %llu bytes",
                            (unsigned long long)bytes);
}

static void fsdpi_plan_free(fsdp_model *m, void *ptr) {
    if (m) fsdp_free(m, FSDP_MEMORY_HOST, ptr, 0);
    else free(ptr);
}

// Room for one more element of `size` bytes behind `num`.
static fsdp_status fsdpi_plan_grow(fsdp_model *m, void **list, int32_t num, int32_t *cap,
                                   size_t size) {
    void *larger;
    if (num < *cap) return FSDP_OK;
    int32_t room = *cap ? 2 * *cap : 16;
    fsdp_status status = fsdpi_plan_alloc(m, (size_t)room * size, &larger);
    if (status) return status;
    if (num) memcpy(larger, *list, (size_t)num * size);
    fsdpi_plan_free(m, *list);
    *list = larger;
    *cap = room;
    return FSDP_OK;
}

static uint64_t fsdpi_plan_mix(uint64_t h, uint64_t x) { // splitmix64 of a running value
    h = (h ^ x) * 0x9E3779B97F4A7C15u + 0xD1B54A32D192ED03u;
    h = (h ^ (h >> 30)) * 0xBF58476D1CE4E5B9u;
    h = (h ^ (h >> 27)) * 0x94D049BB133111EBu;
    return h ^ (h >> 31);
}

static uint64_t fsdpi_plan_mix_bytes(uint64_t h, const char *bytes, size_t size) {
    for (size_t i = 0; i < size; i++) h = fsdpi_plan_mix(h, (unsigned char)bytes[i]);
    return fsdpi_plan_mix(h, size);
}

static const char *fsdpi_plan_call_name(int call) {
    static const char *const names[FSDP_CALL_COUNT] = {
#define FSDP_X(name, text) text,
        FSDP_CALL_LIST(FSDP_X)
#undef FSDP_X
    };
    return call >= 0 && call < FSDP_CALL_COUNT ? names[call] : "?";
}

static int fsdpi_plan_is_collective(int kind) {
    return kind == FSDP_OP_ALL_GATHER || kind == FSDP_OP_REDUCE_SCATTER ||
           kind == FSDP_OP_ALL_REDUCE;
}


/* ==== plan/tape.h ===========================================================================
   rehearsals: from a program and decisions to records and states */

// Owns: fsdpi_plan_tape. A rehearsal runs the program through the core's own rows. What a plan does
// otherwise, it does there by public calls: so every state of a replay is one that a program could
// have brought about, and a plan can be left at any call.

static void fsdpi_plan_tape_free(fsdp_plan *p, fsdpi_plan_tape *t) {
    for (int i = 0; i < t->num_made; i++) fsdpi_plan_free(p->model, t->made[i]);
    void *const lists[] = {t->ops,     t->pairs,   t->states,    t->saved,  t->runs,
                           t->uses,    t->bufs,    t->made,      t->ops_at, t->runs_at,
                           t->groups,  t->members, t->states_at, t->own,    t->own_end,
                           t->storage, t->holds,   t->held,      t->steps,  t->hooks};
    for (size_t i = 0; i < sizeof lists / sizeof *lists; i++) fsdpi_plan_free(p->model, lists[i]);
    memset(t, 0, sizeof *t);
}

static fsdp_status fsdpi_plan_tape_new(fsdp_plan *p, fsdpi_plan_tape *t, int num_calls) {
    int32_t **const lists[] = {&t->ops_at, &t->runs_at, &t->states_at, &t->own, &t->own_end};
    fsdp_status status = FSDP_OK;
    memset(t, 0, sizeof *t);
    for (size_t i = 0; i < sizeof lists / sizeof *lists && !status; i++)
        status = fsdpi_plan_alloc(p->model, (size_t)(num_calls + 1) * sizeof(int32_t),
                                  (void **)lists[i]);
    if (!status) status = fsdpi_plan_alloc(p->model, (size_t)num_calls + 1, (void **)&t->storage);
    if (!status) status = fsdpi_plan_alloc(p->model, (size_t)num_calls + 1, (void **)&t->holds);
    if (!status) status = fsdpi_plan_alloc(p->model, (size_t)p->num_units, (void **)&t->held);
    if (!status)
        status = fsdpi_plan_alloc(p->model, (size_t)(num_calls + 1) * sizeof *t->steps,
                                  (void **)&t->steps);
    if (!status)
        status = fsdpi_plan_alloc(p->model, (size_t)num_calls * sizeof *t->hooks,
                                  (void **)&t->hooks);
    return status;
}

static fsdp_status fsdpi_plan_add_op(fsdp_plan *p, fsdpi_plan_tape *t, const fsdp_op *op,
                                     fsdpi_plan_pair pair) {
    fsdp_status status = fsdpi_plan_grow(p->model, (void **)&t->ops, t->num_ops, &t->cap_ops,
                                         sizeof *t->ops);
    if (!status)
        status = fsdpi_plan_grow(p->model, (void **)&t->pairs, t->num_ops, &t->cap_pairs,
                                 sizeof *t->pairs);
    if (status) return status;
    t->ops[t->num_ops] = *op;
    t->pairs[t->num_ops++] = pair;
    return FSDP_OK;
}

static fsdp_status fsdpi_plan_add_state(fsdp_plan *p, fsdpi_plan_tape *t, int unit,
                                        const char *bytes) {
    fsdp_status status = fsdpi_plan_grow(p->model, (void **)&t->states, t->num_states,
                                         &t->cap_states, sizeof *t->states);
    if (!status)
        status = fsdpi_plan_grow(p->model, (void **)&t->saved, t->num_states, &t->cap_saved,
                                 p->unit_bytes);
    if (status) return status;
    memcpy(t->saved + (size_t)t->num_states * p->unit_bytes, bytes, p->unit_bytes);
    t->states[t->num_states].of = p->units[unit];
    t->states[t->num_states].unit = unit;
    t->states[t->num_states].at = t->num_states;
    t->num_states++;
    return FSDP_OK;
}

static int fsdpi_plan_index(const fsdp_plan *p, const fsdp_unit *unit) {
    for (int i = 0; i < p->num_units; i++)
        if (p->units[i] == unit) return i;
    return -1;
}

static int64_t fsdpi_plan_slot_bytes(const fsdp_unit *unit, int pool) {
    fsdp_memory mem = FSDP_ZERO;
    (void)fsdp_unit_memory(unit, &mem);
    return mem.pool_bytes[pool];
}

static uint8_t fsdpi_plan_holds(const fsdp_unit *unit) { // a slot
    fsdp_memory mem;
    int slots = 0;
    if (fsdp_unit_memory(unit, &mem)) return 1;
    for (int pool = FSDP_POOL_GATHER; pool <= FSDP_POOL_ROUT; pool++) slots += mem.pool_slots[pool];
    return slots != 0;
}

static void fsdpi_plan_states_now(const fsdp_plan *p, char *out) {
    for (int i = 0; i < p->num_units; i++)
        (void)fsdp_unit_snapshot(p->units[i], out + (size_t)i * p->unit_bytes, p->unit_bytes);
}

/* -------------------------------------------------------------------------------------------- */
// The rehearsal.

typedef struct fsdpi_plan_show {
    fsdp_plan *plan;
    fsdpi_plan_tape *tape;
    const fsdpi_plan_kind *kind;
    const fsdpi_plan_choice *choice; // NULL: by calls
    fsdp_buf *const *bufs;           // by use; NULL: buffers without memory
    fsdp_status status;
    int quiet;     // records are not looked at
    int call;      // that is made
    int own;       // the call whose own work is under way; -1
    int lasts;     // units hold slots behind finalize
    int64_t next;  // where the next buffer without memory lies
    char *last;    // [units] their states behind the call before
    uint8_t *seen; // [units] the same in outline; 0: there was a record or an act
    int32_t *acts; // [num_acts][2] where the records of each act begin and end
} fsdpi_plan_show;

// The use that has a buffer now: the last one that took it.
static int fsdpi_plan_use_of(const fsdpi_plan_tape *t, const fsdp_buf *buf) {
    int i = buf ? t->num_uses - 1 : -1;
    while (i >= 0 && t->bufs[i] != buf) i--;
    return i;
}

// `buffer` of a rehearsal: a slot for each use, in the order of acquiring.
static fsdp_buf *fsdpi_plan_give(void *user, fsdp_model *model, fsdp_unit *unit, int pool,
                                 fsdp_buf *released) {
    fsdpi_plan_show *s = (fsdpi_plan_show *)user;
    fsdpi_plan_tape *t = s->tape;
    fsdpi_plan_use use;
    fsdp_buf *buf = NULL;
    int n = t->num_uses;
    if (released) return NULL;
    memset(&use, 0, sizeof use);
    use.unit = fsdpi_plan_index(s->plan, unit);
    use.pool = pool;
    use.bytes = fsdpi_plan_slot_bytes(unit, pool);
    use.slot = use.glue = -1;
    fsdp_status status = fsdpi_plan_grow(model, (void **)&t->uses, n, &t->cap_uses, sizeof use);
    if (!status)
        status = fsdpi_plan_grow(model, (void **)&t->bufs, n, &t->cap_bufs, sizeof *t->bufs);
    if (!status && s->bufs) buf = s->bufs[n];
    else if (!status) status = fsdp_buf_part(model, NULL, s->next, use.bytes, &buf);
    s->next += use.bytes;
    if (status) s->status = status;
    if (!buf) return NULL;
    t->uses[n] = use;
    t->bufs[n] = buf;
    t->num_uses++;
    return buf;
}

// A unit's state as it can be told at once, not 0. Behind a call only units are looked at that
// were called, had a record or an act, or whose outline is another one.
static uint8_t fsdpi_plan_outline(const fsdp_unit *unit) {
    const int state = (int)fsdp_unit_state(unit), storage = (int)fsdp_unit_storage(unit);
    return (uint8_t)(1 + state * FSDP_STORAGE_COUNT + storage);
}

// `op` of a rehearsal.
static int fsdpi_plan_see(void *user, fsdp_model *model, fsdp_op *op) {
    fsdpi_plan_show *s = (fsdpi_plan_show *)user;
    int unit = s->own >= 0 && op->unit == s->kind->calls[s->own].unit
                   ? -1 // it is called
                   : fsdpi_plan_index(s->plan, op->unit);
    if (unit >= 0) s->seen[unit] = 0;
    fsdpi_plan_pair pair = {fsdpi_plan_use_of(s->tape, op->src),
                            fsdpi_plan_use_of(s->tape, op->dst)};
    if (op->kind == FSDP_OP_HOOK && s->own >= 0) s->tape->hooks[s->own] = *op;
    if (s->quiet || op->kind == FSDP_OP_HOOK || op->model != model || s->status) return 1;
    s->status = fsdpi_plan_add_op(s->plan, s->tape, op, pair);
    return 1;
}

static fsdp_status fsdpi_plan_make_call(fsdp_unit *unit, int call) {
    static fsdp_status (*const calls[])(fsdp_unit *) = {
        fsdp_pre_forward, fsdp_post_forward, fsdp_pre_backward, fsdp_post_backward,
        fsdp_unshard,     fsdp_wait,         fsdp_reshard}; // in the order of FSDP_CALL_LIST
    return calls[call](unit);
}

// The state of a unit, if it is another one than behind the call before.
static fsdp_status fsdpi_plan_note(fsdpi_plan_show *s, int unit) {
    fsdp_plan *p = s->plan;
    char *last = s->last + (size_t)unit * p->unit_bytes, now[FSDPI_PLAN_STATE];
    s->seen[unit] = fsdpi_plan_outline(p->units[unit]);
    (void)fsdp_unit_snapshot(p->units[unit], now, sizeof now);
    if (memcmp(last, now, p->unit_bytes) == 0) return FSDP_OK;
    memcpy(last, now, p->unit_bytes);
    return fsdpi_plan_add_state(p, s->tape, unit, now);
}

// Nothing changes but in the ways that fsdpi_plan_outline names: at the end no state is another.
static fsdp_status fsdpi_plan_all_noted(const fsdpi_plan_show *s) {
    const fsdp_plan *p = s->plan;
    char now[FSDPI_PLAN_STATE];
    for (int u = 0; u < p->num_units; u++) {
        (void)fsdp_unit_snapshot(p->units[u], now, sizeof now);
        if (memcmp(s->last + (size_t)u * p->unit_bytes, now, p->unit_bytes) != 0)
            return fsdp_fail(p->world, FSDP_ERR_INTERNAL,
                             "[E929] plan: '%.200s' has changed without a record",
                             fsdp_unit_name(p->units[u]));
    }
    return FSDP_OK;
}

static int fsdpi_plan_is_late(const fsdpi_plan_act *act) {
    return act->what != FSDPI_PLAN_GATHER || act->late;
}

// The acts of a call, before its own work or behind it.
static fsdp_status fsdpi_plan_do_acts(fsdpi_plan_show *s, int call, int *at, int late) {
    const fsdpi_plan_choice *c = s->choice;
    fsdp_status status = FSDP_OK;
    for (; *at < c->num_acts && c->acts[*at].call == call && !status; ++*at) {
        const fsdpi_plan_act *act = &c->acts[*at];
        if (fsdpi_plan_is_late(act) != late) break;
        s->seen[act->unit] = 0;
        s->acts[2 * *at] = s->tape->num_ops;
        if (act->what == FSDPI_PLAN_GATHER) status = fsdp_unshard(s->plan->units[act->unit]);
        if (act->what == FSDPI_PLAN_FREE) status = fsdp_reshard(s->plan->units[act->unit]);
        if (act->what == FSDPI_PLAN_REDUCE) {
            status = fsdp_set_requires_gradient_sync(s->plan->model, s->plan->units[act->unit], 1);
            if (!status) status = fsdp_unit_reduce(s->plan->units[act->unit]);
        }
        s->acts[2 * *at + 1] = s->tape->num_ops;
    }
    return status;
}

// Managed units: their hooks neither gather ahead nor free.
static fsdp_status fsdpi_plan_manage(fsdpi_plan_show *s) {
    fsdp_plan *p = s->plan;
    fsdp_status status = FSDP_OK;
    for (int i = 0; i < p->num_units && !status; i++) {
        fsdp_unit *u = p->units[i];
        status = fsdp_set_modules_to_forward_prefetch(u, NULL, 0);
        if (!status && s->choice->waits[i])
            status = fsdp_set_requires_gradient_sync(p->model, u, 0);
        if (!s->choice->managed[i] || status) continue;
        status = fsdp_set_reshard_after_forward(p->model, u, FSDP_RESHARD_NEVER);
        if (!status) status = fsdp_set_reshard_after_backward(p->model, u, 0);
        if (!status) status = fsdp_set_unshard_in_backward(p->model, u, 0);
    }
    return status;
}

// The calls of a rehearsal.
static fsdp_status fsdpi_plan_play(void *user) {
    fsdpi_plan_show *s = (fsdpi_plan_show *)user;
    fsdp_plan *p = s->plan;
    const fsdpi_plan_kind *k = s->kind;
    fsdpi_plan_tape *t = s->tape;
    fsdp_status status = FSDP_OK;
    int at = 0;
    for (int i = 0; i < p->num_units && !status; i++)
        status = fsdp_unit_restore(p->units[i], k->begin + (size_t)i * p->unit_bytes,
                                   p->unit_bytes);
    fsdpi_plan_states_now(p, s->last); // a restored state is not in the order of forwards
    for (int i = 0; i < p->num_units; i++) {
        t->held[i] = fsdp_unit_storage(p->units[i]) != FSDP_STORAGE_SHARDED;
        s->seen[i] = fsdpi_plan_outline(p->units[i]);
    }
    if (!status && s->choice) status = fsdpi_plan_manage(s);
    for (int i = 0; i + 1 < k->num_calls && !status && !s->status; i++) {
        const fsdpi_plan_call *call = &k->calls[i];
        s->call = i;
        t->ops_at[i] = t->num_ops;
        t->states_at[i] = t->num_states;
        if (s->choice) status = fsdpi_plan_do_acts(s, i, &at, 0);
        if (!status && s->choice && s->choice->sync[i] >= 0)
            status = fsdp_set_requires_gradient_sync(p->model, call->unit, s->choice->sync[i]);
        t->own[i] = t->num_ops;
        s->own = i;
        if (!status) status = fsdpi_plan_make_call(call->unit, call->call);
        s->own = -1;
        t->own_end[i] = t->num_ops;
        t->storage[i] = (uint8_t)fsdp_unit_storage(call->unit);
        t->holds[i] = fsdpi_plan_holds(call->unit);
        if (!status && s->choice) status = fsdpi_plan_do_acts(s, i, &at, 1);
        for (int u = 0; u < p->num_units && !status; u++)
            if (u == call->index || s->seen[u] != fsdpi_plan_outline(p->units[u]))
                status = fsdpi_plan_note(s, u);
    }
    if (!status && !s->status) status = fsdpi_plan_all_noted(s);
    t->ops_at[k->num_calls - 1] = t->ops_at[k->num_calls] = t->num_ops;
    t->states_at[k->num_calls - 1] = t->states_at[k->num_calls] = t->num_states;
    s->quiet = 1;
    return s->status ? s->status : status;
}

// A unit's slot is given back, even if the world has failed.
static void fsdpi_plan_release(fsdp_plan *p, fsdp_buf *buf) {
    fsdp_op op;
    fsdp_op_init(&op, p->model, NULL, FSDP_OP_RELEASE, FSDP_LABEL_NONE, FSDP_STREAM_COMPUTE);
    op.src = buf;
    op.what = "plan";
    (void)fsdp_emit(p->model, &op);
}

// What is held when a rehearsal ends is not held in truth; also if it has failed: buffers that are
// held stay. Returns a unit that held one, or NULL.
static fsdp_unit *fsdpi_plan_give_back(fsdpi_plan_show *s) {
    fsdp_plan *p = s->plan;
    fsdp_unit *holder = NULL;
    for (int i = 0; i < s->tape->num_uses; i++) {
        if (!fsdp_buf_held(s->tape->bufs[i])) continue;
        holder = p->units[s->tape->uses[i].unit];
        fsdpi_plan_release(p, s->tape->bufs[i]);
    }
    return holder;
}

static fsdp_status fsdpi_plan_play_all(void *user) {
    fsdp_status status = fsdpi_plan_play(user);
    (void)fsdpi_plan_give_back((fsdpi_plan_show *)user);
    return status;
}

// choice NULL: by calls. bufs NULL: without memory.
static void fsdpi_plan_show_new(fsdpi_plan_show *s, fsdp_plan *p, fsdpi_plan_tape *tape,
                                const fsdpi_plan_kind *kind, const fsdpi_plan_choice *choice,
                                fsdp_buf *const *bufs) {
    memset(s, 0, sizeof *s);
    memset(tape, 0, sizeof *tape);
    s->plan = p;
    s->tape = tape;
    s->kind = kind;
    s->choice = choice;
    s->bufs = bufs;
    s->next = 4096;
    s->own = -1;
}

/* The program through the core's rows, with the decisions of a choice or by calls. bufs: the slots
   of uses, in order; NULL: buffers without memory, which last as long as the tape. */
static fsdp_status fsdpi_plan_rehearse_with(fsdpi_plan_show *s, fsdp_status (*run)(void *user)) {
    fsdp_plan *p = s->plan;
    fsdp_extension e = FSDP_ZERO;
    int num_acts = s->choice ? s->choice->num_acts : 0;
    e.user = s;
    e.op = fsdpi_plan_see;
    e.buffer = fsdpi_plan_give;
    fsdp_status status = fsdpi_plan_tape_new(p, s->tape, s->kind->num_calls);
    if (!status)
        status = fsdpi_plan_alloc(p->model, (size_t)p->num_units * p->unit_bytes,
                                  (void **)&s->last);
    if (!status) status = fsdpi_plan_alloc(p->model, (size_t)p->num_units, (void **)&s->seen);
    if (!status)
        status = fsdpi_plan_alloc(p->model, 2 * (size_t)num_acts * sizeof *s->acts,
                                  (void **)&s->acts);
    if (!status) status = fsdp_rehearse(p->model, &e, run, s);
    for (int i = 0; i < s->tape->num_uses && !s->bufs; i++)
        fsdp_buf_destroy(p->model, s->tape->bufs[i]);
    return status;
}

static fsdp_status fsdpi_plan_rehearse(fsdpi_plan_show *s) {
    return fsdpi_plan_rehearse_with(s, fsdpi_plan_play_all);
}

static void fsdpi_plan_show_end(fsdpi_plan_show *s) {
    fsdpi_plan_free(s->plan->model, s->last);
    fsdpi_plan_free(s->plan->model, s->seen);
    fsdpi_plan_free(s->plan->model, s->acts);
}


/* ==== plan/join.h ===========================================================================
   collectives of several units become one */

// Owns: the way from what a rehearsal showed to the records of a tape. What units do beside their
// collectives stays as it is: copies first, then one collective over all their lists, and so on.

typedef struct fsdpi_plan_range {
    int32_t begin, end; // records of the rehearsal
} fsdpi_plan_range;

// Bytes of an all_reduce that a rank has to receive, as the core counts them.
static uint64_t fsdpi_plan_reduce_bytes(const fsdp_op *op) {
    uint64_t size = (uint64_t)op->group_size, whole = op->count * fsdp_dtype_size(op->dtype);
    return (2 * (size - 1) * whole + size - 1) / size;
}

static fsdp_status fsdpi_plan_keep(fsdp_plan *p, fsdpi_plan_tape *t, size_t bytes, void **out) {
    fsdp_status status = fsdpi_plan_grow(p->model, (void **)&t->made, t->num_made, &t->cap_made,
                                         sizeof *t->made);
    if (!status) status = fsdpi_plan_alloc(p->model, bytes, out);
    if (!status) t->made[t->num_made++] = *out;
    return status;
}

// "h.0..h.3", and the hash of what the ranks have to agree on.
static fsdp_status fsdpi_plan_join_names(fsdp_plan *p, fsdpi_plan_tape *t, fsdp_op *op,
                                         const fsdp_op *const *parts, int num) {
    const char *first = parts[0]->what, *last = parts[num - 1]->what;
    size_t size = strlen(first) + strlen(last) + 3;
    void *text;
    fsdp_status status = fsdpi_plan_keep(p, t, size, &text);
    if (status) return status;
    snprintf((char *)text, size, "%s..%s", first, last);
    op->what = (const char *)text;
    for (int i = 1; i < num; i++) {
        op->what_hash = fsdpi_plan_mix(op->what_hash, parts[i]->what_hash);
        for (int a = 0; a < FSDP_AGREE_COUNT; a++)
            op->agree[a] = (uint8_t)fsdpi_plan_mix(op->agree[a], parts[i]->agree[a]);
    }
    return FSDP_OK;
}

// All lists as one, whose offsets are from the lowest addresses.
static fsdp_status fsdpi_plan_join_lists(fsdp_plan *p, fsdpi_plan_tape *t, fsdp_op *op,
                                         const fsdp_op *const *parts, int num) {
    int gathers = op->kind == FSDP_OP_ALL_GATHER;
    int64_t src_size = (int64_t)fsdp_dtype_size(op->dtype),
            dst_size = (int64_t)fsdp_dtype_size(gathers ? op->dtype : op->out_dtype);
    void *list;
    op->count = op->bytes = op->list_count = 0;
    for (int i = 0; i < num; i++) {
        if ((const char *)parts[i]->src_ptr < (const char *)op->src_ptr)
            op->src_ptr = parts[i]->src_ptr;
        if ((const char *)parts[i]->dst_ptr < (const char *)op->dst_ptr)
            op->dst_ptr = parts[i]->dst_ptr;
        op->count += parts[i]->count;
        op->bytes += parts[i]->bytes;
        op->list_count += parts[i]->list_count;
    }
    fsdp_status status = fsdpi_plan_keep(p, t, op->list_count * sizeof(fsdp_seg), &list);
    if (status) return status;
    fsdp_seg *seg = (fsdp_seg *)list;
    for (int i = 0; i < num; i++) {
        int64_t src = ((const char *)parts[i]->src_ptr - (const char *)op->src_ptr) / src_size,
                dst = ((const char *)parts[i]->dst_ptr - (const char *)op->dst_ptr) / dst_size;
        for (uint32_t k = 0; k < parts[i]->list_count; k++, seg++) {
            *seg = ((const fsdp_seg *)parts[i]->list)[k];
            seg->shard += gathers ? src : dst;
            seg->full += gathers ? dst : src;
        }
    }
    op->list = list;
    return FSDP_OK;
}

/* All ranges side by side, from the first one on. While a rehearsal has buffers without memory they
   do not lie so yet: what counts is the sizes of the slots, which fsdpi_plan_glue puts side by
   side. */
static void fsdpi_plan_join_ranges(const fsdpi_plan_tape *raw, const int32_t *which, fsdp_op *op,
                                   const fsdp_op *const *parts, int num) {
    int64_t span = 0;
    for (int i = 0; i + 1 < num; i++) span += raw->uses[raw->pairs[which[i]].dst].bytes;
    op->count = (uint64_t)span / fsdp_dtype_size(op->dtype) + parts[num - 1]->count;
    op->bytes = fsdpi_plan_reduce_bytes(op);
}

static fsdp_status fsdpi_plan_add_use(fsdp_plan *p, fsdpi_plan_tape *t, const fsdp_op *of,
                                      fsdpi_plan_pair pair, int writes) {
    fsdp_op op;
    if ((writes ? pair.dst : pair.src) < 0) return FSDP_OK;
    fsdp_op_init(&op, p->model, of->unit, FSDP_OP_USE, of->label, of->stream);
    op.src = writes ? NULL : of->src;
    op.dst = writes ? of->dst : NULL;
    pair.src = writes ? -1 : pair.src;
    pair.dst = writes ? pair.dst : -1;
    return fsdpi_plan_add_op(p, t, &op, pair);
}

// Who is in a joined record.
static fsdp_status fsdpi_plan_add_group(fsdp_plan *p, fsdpi_plan_tape *t,
                                        const fsdpi_plan_tape *raw, const int32_t *which, int num) {
    fsdpi_plan_group group = {t->num_ops - 1, t->num_members, num};
    fsdp_status status = fsdpi_plan_grow(p->model, (void **)&t->groups, t->num_groups,
                                         &t->cap_groups, sizeof group);
    if (!status) t->groups[t->num_groups++] = group;
    for (int i = 0; i < num && !status; i++) {
        fsdpi_plan_member member = {fsdpi_plan_index(p, raw->ops[which[i]].unit),
                                    raw->pairs[which[i]].src, raw->pairs[which[i]].dst};
        status = fsdpi_plan_grow(p->model, (void **)&t->members, t->num_members, &t->cap_members,
                                 sizeof member);
        if (!status) t->members[t->num_members++] = member;
    }
    return status;
}

/* One collective for those of several units. Where streams run at the same time, it has to wait for
   the buffers of all, and all are written only behind it. */
static fsdp_status fsdpi_plan_join(fsdp_plan *p, const fsdpi_plan_tape *raw, fsdpi_plan_tape *t,
                                   const int32_t *which, int num) {
    const fsdp_op *parts[FSDPI_PLAN_JOINED];
    fsdp_status status = FSDP_OK;
    for (int i = 0; i < num; i++) parts[i] = &raw->ops[which[i]];
    fsdp_op op = *parts[0];
    int several = p->mode_of_world != FSDPI_PLAN_INLINE, both = parts[0]->src == parts[0]->dst;
    status = fsdpi_plan_join_names(p, t, &op, parts, num);
    if (!status && op.kind != FSDP_OP_ALL_REDUCE)
        status = fsdpi_plan_join_lists(p, t, &op, parts, num);
    else if (!status) fsdpi_plan_join_ranges(raw, which, &op, parts, num);
    for (int i = 1; i < num && several && !status; i++) {
        if (!both) status = fsdpi_plan_add_use(p, t, parts[i], raw->pairs[which[i]], 0);
        if (!status) status = fsdpi_plan_add_use(p, t, parts[i], raw->pairs[which[i]], 1);
    }
    if (!status) status = fsdpi_plan_add_op(p, t, &op, raw->pairs[which[0]]);
    if (!status) status = fsdpi_plan_add_group(p, t, raw, which, num);
    for (int i = 1; i < num && several && !status; i++)
        status = fsdpi_plan_add_use(p, t, parts[i], raw->pairs[which[i]], 1);
    return status;
}

// Stage by stage: what each range does up to its next collective, then these as one.
static fsdp_status fsdpi_plan_merge(fsdp_plan *p, const fsdpi_plan_tape *raw, fsdpi_plan_tape *t,
                                    fsdpi_plan_range *ranges, int num) {
    fsdp_status status = FSDP_OK;
    while (!status) {
        int32_t at[FSDPI_PLAN_JOINED];
        int waiting = 0;
        for (int i = 0; i < num && !status; i++) {
            fsdpi_plan_range *r = &ranges[i];
            for (; r->begin < r->end && !status; r->begin++) {
                if (fsdpi_plan_is_collective(raw->ops[r->begin].kind)) break;
                status = fsdpi_plan_add_op(p, t, &raw->ops[r->begin], raw->pairs[r->begin]);
            }
            if (r->begin < r->end) at[waiting++] = r->begin++;
        }
        if (!waiting || status) return status;
        if (waiting != num)
            return fsdp_fail(p->world, FSDP_ERR_INTERNAL,
                             "[E971] plan: %d of %d units that are joined have a collective",
                             waiting, num);
        status = fsdpi_plan_join(p, raw, t, at, num);
    }
    return status;
}

static fsdp_status fsdpi_plan_copy(fsdp_plan *p, const fsdpi_plan_tape *raw, fsdpi_plan_tape *t,
                                   int begin, int end) {
    fsdp_status status = FSDP_OK;
    for (int i = begin; i < end && !status; i++)
        status = fsdpi_plan_add_op(p, t, &raw->ops[i], raw->pairs[i]);
    return status;
}

// What an act does. A reduction that waited begins with what the caller need not wait for here.
static fsdpi_plan_range fsdpi_plan_act_range(const fsdpi_plan_show *s, int act) {
    fsdpi_plan_range range = {s->acts[2 * act], s->acts[2 * act + 1]};
    while (s->choice->acts[act].what == FSDPI_PLAN_REDUCE && range.begin < range.end &&
           s->tape->ops[range.begin].kind == FSDP_OP_USE)
        range.begin++;
    return range;
}

static int fsdpi_plan_is_joined(const fsdpi_plan_act *a, const fsdpi_plan_act *b) {
    return a->group >= 0 && a->group == b->group && a->call == b->call && a->what == b->what &&
           (a->what == FSDPI_PLAN_GATHER || a->what == FSDPI_PLAN_REDUCE);
}

// Acts of a call from *at on, before its own work or behind it: those of a group are joined.
static fsdp_status fsdpi_plan_arrange_acts(const fsdpi_plan_show *s, fsdpi_plan_tape *t, int call,
                                           int *at, int late) {
    const fsdpi_plan_choice *c = s->choice;
    fsdp_status status = FSDP_OK;
    while (*at < c->num_acts && c->acts[*at].call == call && !status &&
           fsdpi_plan_is_late(&c->acts[*at]) == late) {
        fsdpi_plan_range ranges[FSDPI_PLAN_JOINED];
        const fsdpi_plan_act *first = &c->acts[*at];
        int num = 0;
        do ranges[num++] = fsdpi_plan_act_range(s, (*at)++);
        while (num < FSDPI_PLAN_JOINED && *at < c->num_acts &&
               fsdpi_plan_is_joined(first, &c->acts[*at]));
        status = num > 1 ? fsdpi_plan_merge(s->plan, s->tape, t, ranges, num)
                         : fsdpi_plan_copy(s->plan, s->tape, t, ranges[0].begin, ranges[0].end);
    }
    return status;
}

// Runs of a call: flags of use are brought up to date before each record that sends them.
static fsdp_status fsdpi_plan_arrange_runs(fsdp_plan *p, fsdpi_plan_tape *t, int begin) {
    fsdp_status status = FSDP_OK;
    fsdpi_plan_run run = {begin, begin, NULL};
    for (int i = begin; i <= t->num_ops && !status; i++) {
        const fsdp_op *op = i < t->num_ops ? &t->ops[i] : NULL;
        int sends = op && op->kind == FSDP_OP_COPY && op->label == FSDP_LABEL_USERS;
        if (op && !sends) continue;
        run.end = i;
        if (run.end > run.begin) {
            status = fsdpi_plan_grow(p->model, (void **)&t->runs, t->num_runs, &t->cap_runs,
                                     sizeof run);
            if (!status) t->runs[t->num_runs++] = run;
        }
        run.begin = i;
        run.flags = op ? p->units[fsdpi_plan_index(p, op->unit)] : NULL;
    }
    return status;
}

// From where to where each use is held.
static void fsdpi_plan_measure(fsdpi_plan_tape *t) {
    for (int i = 0; i < t->num_uses; i++) t->uses[i].from = t->uses[i].to = t->num_ops;
    for (int i = 0; i < t->num_ops; i++) {
        const fsdpi_plan_pair *pair = &t->pairs[i];
        if (t->ops[i].kind == FSDP_OP_ACQUIRE && pair->dst >= 0) t->uses[pair->dst].from = i;
        if (t->ops[i].kind == FSDP_OP_RELEASE && pair->src >= 0) t->uses[pair->src].to = i;
    }
}

// Ranges of a joined all_reduce have to lie side by side.
static void fsdpi_plan_glue(fsdpi_plan_tape *t) {
    for (int g = 0; g < t->num_groups; g++) {
        const fsdpi_plan_member *member = &t->members[t->groups[g].members];
        if (t->ops[t->groups[g].op].kind != FSDP_OP_ALL_REDUCE) continue;
        for (int i = 0; i + 1 < t->groups[g].num_members; i++) {
            t->uses[member[i].dst].glue = member[i + 1].dst;
            t->uses[member[i + 1].dst].glued = 1;
        }
    }
}

/* What a rehearsal has shown, in the order in which it will be done. The tape that is made has the
   rehearsal's uses. */
static fsdp_status fsdpi_plan_arrange(const fsdpi_plan_show *s, fsdpi_plan_tape *t) {
    const fsdpi_plan_tape *raw = s->tape;
    int num_calls = s->kind->num_calls, at = 0;
    fsdp_status status = fsdpi_plan_tape_new(s->plan, t, num_calls);
    for (int i = 0; i < raw->num_uses && !status; i++) {
        status = fsdpi_plan_grow(s->plan->model, (void **)&t->uses, i, &t->cap_uses,
                                 sizeof *t->uses);
        if (!status) t->uses[t->num_uses++] = raw->uses[i];
    }
    for (int i = 0; i < num_calls && !status; i++) {
        int begin = t->num_ops;
        t->ops_at[i] = t->num_ops;
        t->runs_at[i] = t->num_runs;
        t->states_at[i] = t->num_states;
        t->storage[i] = raw->storage[i];
        if (i + 1 == num_calls) break; // finalize is the core's
        fsdpi_plan_pair none = {-1, -1};
        status = fsdpi_plan_add_op(s->plan, t, &raw->hooks[i], none);
        if (!status && s->choice) status = fsdpi_plan_arrange_acts(s, t, i, &at, 0);
        if (!status) status = fsdpi_plan_copy(s->plan, raw, t, raw->own[i], raw->own_end[i]);
        if (!status && s->choice) status = fsdpi_plan_arrange_acts(s, t, i, &at, 1);
        for (int k = raw->states_at[i]; k < raw->states_at[i + 1] && !status; k++)
            status = fsdpi_plan_add_state(s->plan, t, raw->states[k].unit,
                                          raw->saved +
                                              (size_t)raw->states[k].at * s->plan->unit_bytes);
        if (!status) status = fsdpi_plan_arrange_runs(s->plan, t, begin);
    }
    if (status) return status;
    t->ops_at[num_calls] = t->num_ops;
    t->runs_at[num_calls] = t->num_runs;
    t->states_at[num_calls] = t->num_states;
    for (int i = 0; i < num_calls; i++) {
        fsdpi_plan_step *step = &t->steps[i];
        step->unit = s->kind->calls[i].unit;
        step->call = s->kind->calls[i].call;
        step->states = t->states + t->states_at[i];
        step->num_states = t->states_at[i + 1] - t->states_at[i];
        step->runs = t->runs + t->runs_at[i];
        step->num_runs = t->runs_at[i + 1] - t->runs_at[i];
    }
    fsdpi_plan_measure(t);
    fsdpi_plan_glue(t);
    return status;
}


/* ==== plan/passes.h =========================================================================
   decisions: what is gathered together, kept, gathered ahead, reduced together */

// Owns: fsdpi_plan_choice. A pass is a function of what happens by calls; no pass looks at a clock.
// A span is the time in which a unit needs its parameters: from the pre_* that gathers by calls to
// the call that frees by calls. An item is what is gathered at once: a unit, or several that are
// always used one after the other.

typedef struct fsdpi_plan_span {
    int32_t owner;      // unit, or item
    int32_t begin, end; // calls
    int32_t next;       // the owner's next span, or -1
    int32_t kept;       // from here to the next one
    int32_t first, num; // of an item: its spans of units
} fsdpi_plan_span;

typedef struct fsdpi_plan_facts {
    const fsdpi_plan_kind *kind;
    int32_t num_units, num_calls;
    uint8_t *managed;       // [units] acts may gather and free
    fsdpi_plan_span *spans; // of units, by begin
    int32_t num_spans, cap_spans;
    int64_t *base;                     // [calls] bytes of slots that no pass decides about
    int64_t *bytes;                    // [units] of a gathered slot
    uint64_t *gathers, *reduces;       // [units] how; equal ones can be joined; 0: cannot be
    int32_t *posts, *post, *last_call; // [units] post_backward calls; the last one; the last call
    int32_t *item;                     // [units] index
    int64_t *item_bytes;               // [items]
    int32_t num_items;
    fsdpi_plan_span *item_spans;
    int32_t num_item_spans, cap_item_spans;
    int32_t *order; // [units] scratch
} fsdpi_plan_facts;

static void fsdpi_plan_facts_end(fsdp_plan *p, fsdpi_plan_facts *f) {
    void *const lists[] = {f->managed, f->spans,      f->base,     f->bytes, f->gathers,
                           f->reduces, f->posts,      f->post,     f->item,  f->item_bytes,
                           f->order,   f->item_spans, f->last_call};
    for (size_t i = 0; i < sizeof lists / sizeof *lists; i++) fsdpi_plan_free(p->model, lists[i]);
    memset(f, 0, sizeof *f);
}

static fsdp_status fsdpi_plan_facts_new(fsdp_plan *p, const fsdpi_plan_kind *k,
                                        fsdpi_plan_facts *f) {
    int32_t **const numbers[] = {&f->posts, &f->post, &f->item, &f->order, &f->last_call};
    int64_t **const sizes[] = {&f->bytes, &f->item_bytes};
    uint64_t **const hashes[] = {&f->gathers, &f->reduces};
    size_t units = (size_t)p->num_units;
    f->kind = k;
    f->num_units = p->num_units;
    f->num_calls = k->num_calls;
    fsdp_status status = fsdpi_plan_alloc(p->model, units, (void **)&f->managed);
    if (!status) status = fsdpi_plan_alloc(p->model, (size_t)f->num_calls * 8, (void **)&f->base);
    for (int i = 0; i < 5 && !status; i++)
        status = fsdpi_plan_alloc(p->model, units * sizeof(int32_t), (void **)numbers[i]);
    for (int i = 0; i < 2 && !status; i++)
        status = fsdpi_plan_alloc(p->model, units * sizeof(int64_t), (void **)sizes[i]);
    for (int i = 0; i < 2 && !status; i++)
        status = fsdpi_plan_alloc(p->model, units * sizeof(uint64_t), (void **)hashes[i]);
    return status;
}

// What a collective has to share with those that it is joined with.
static uint64_t fsdpi_plan_sort_of(const fsdp_op *op, const fsdpi_plan_pair *pair) {
    uint64_t h = fsdpi_plan_mix(op->kind, (uint64_t)(uintptr_t)op->comm), scale;
    memcpy(&scale, &op->scale, sizeof scale);
    h = fsdpi_plan_mix(h, (uint64_t)op->dtype << 24 | (uint64_t)op->out_dtype << 16 |
                              (uint64_t)op->in_place << 8 | op->redop);
    h = fsdpi_plan_mix(fsdpi_plan_mix(h, scale), op->accumulate);
    h = fsdpi_plan_mix(h, pair->src < 0 ? (uint64_t)(uintptr_t)op->src : 0);
    return fsdpi_plan_mix(h, pair->dst < 0 ? (uint64_t)(uintptr_t)op->dst : 0);
}

// How units gather: all gathers of a unit alike, and without functions of the user.
static void fsdpi_plan_find_gathers(const fsdp_plan *p, fsdpi_plan_facts *f,
                                    const fsdpi_plan_tape *t) {
    for (int i = 0; i < t->num_ops; i++) {
        const fsdp_op *op = &t->ops[i];
        int u = op->unit ? fsdpi_plan_index(p, op->unit) : -1;
        if (u < 0) continue;
        if (op->kind == FSDP_OP_CALL && op->label == FSDP_LABEL_GRAD_HOOK) f->managed[u] = 0;
        if (op->label == FSDP_LABEL_PRE_GATHER || op->label == FSDP_LABEL_POST_GATHER ||
            (op->custom && op->label == FSDP_LABEL_GATHER))
            f->gathers[u] = 1; // equal to none
        if (op->kind != FSDP_OP_ALL_GATHER || op->label != FSDP_LABEL_GATHER) continue;
        uint64_t sort = fsdpi_plan_sort_of(op, &t->pairs[i]);
        if (!f->gathers[u]) f->gathers[u] = sort;
        else if (f->gathers[u] != sort) f->gathers[u] = 1;
    }
    for (int u = 0; u < f->num_units; u++)
        if (f->gathers[u] == 1) f->gathers[u] = 0;
}

// How units reduce in their post_backward. accumulate counts: neighbours add both, or neither.
static void fsdpi_plan_find_reduces(fsdpi_plan_facts *f, const fsdpi_plan_tape *t) {
    for (int k = 0; k + 1 < f->num_calls; k++) {
        const fsdpi_plan_call *call = &f->kind->calls[k];
        uint64_t sort = 0;
        int joins = 1;
        if (call->index >= 0) f->last_call[call->index] = k;
        if (call->call != FSDP_CALL_POST_BACKWARD) continue;
        f->posts[call->index]++;
        f->post[call->index] = k;
        for (int i = t->own[k]; i < t->own_end[k]; i++) {
            const fsdp_op *op = &t->ops[i];
            if (op->kind == FSDP_OP_CALL || op->custom) joins = 0;
            if (op->kind == FSDP_OP_ALL_REDUCE && t->pairs[i].dst < 0) joins = 0; // lies elsewhere
            if (fsdpi_plan_is_collective(op->kind) && op->label != FSDP_LABEL_GATHER)
                sort = fsdpi_plan_mix(sort, fsdpi_plan_sort_of(op, &t->pairs[i]));
        }
        f->reduces[call->index] = joins && !t->holds[k] ? sort : 0;
    }
}

// Spans of units, and which of them acts may gather and free.
static fsdp_status fsdpi_plan_find_spans(fsdp_plan *p, fsdpi_plan_facts *f,
                                         const fsdpi_plan_tape *t) {
    fsdp_status status = FSDP_OK;
    for (int u = 0; u < f->num_units; u++) {
        f->order[u] = -1; // the open span
        f->managed[u] = !t->held[u];
    }
    for (int i = 0; i < t->num_uses; i++)
        if (t->uses[i].pool == FSDP_POOL_GATHER) f->bytes[t->uses[i].unit] = t->uses[i].bytes;
    for (int k = 0; k + 1 < f->num_calls && !status; k++) {
        const fsdpi_plan_call *call = &f->kind->calls[k];
        int u = call->index,
            begins = call->call == FSDP_CALL_PRE_FORWARD || call->call == FSDP_CALL_PRE_BACKWARD;
        if (call->call >= FSDP_CALL_UNSHARD || t->storage[k] == FSDP_STORAGE_SHARDED_POST_FORWARD ||
            (begins && t->storage[k] != FSDP_STORAGE_UNSHARDED) || f->bytes[u] == 0)
            f->managed[u] = 0;
        if (begins && f->order[u] < 0) {
            fsdpi_plan_span span = {u, k, f->num_calls, -1, 0, 0, 0};
            status = fsdpi_plan_grow(p->model, (void **)&f->spans, f->num_spans, &f->cap_spans,
                                     sizeof span);
            if (status) break;
            f->order[u] = f->num_spans;
            f->spans[f->num_spans++] = span;
        }
        if (t->storage[k] == FSDP_STORAGE_SHARDED && f->order[u] >= 0) {
            f->spans[f->order[u]].end = k;
            f->order[u] = -1;
        }
    }
    fsdpi_plan_find_gathers(p, f, t);
    fsdpi_plan_find_reduces(f, t);
    // A slot that outlasts the step has memory of its own, at another distance on each rank.
    for (int i = 0; i < f->num_spans; i++)
        if (f->spans[i].end >= f->num_calls) f->gathers[f->spans[i].owner] = 0;
    int kept = 0;
    for (int i = 0; i < f->num_spans; i++)
        if (f->managed[f->spans[i].owner]) f->spans[kept++] = f->spans[i];
    f->num_spans = kept;
    return status;
}

// Bytes of slots at each call, without those that passes decide about: the most at any record.
static void fsdpi_plan_find_base(fsdpi_plan_facts *f, const fsdpi_plan_tape *t) {
    int64_t now = 0;
    for (int k = 0; k < f->num_calls; k++) {
        f->base[k] = now;
        for (int i = t->ops_at[k]; i < t->ops_at[k + 1] && k + 1 < f->num_calls; i++) {
            const fsdpi_plan_pair *pair = &t->pairs[i];
            int use = t->ops[i].kind == FSDP_OP_ACQUIRE   ? pair->dst
                      : t->ops[i].kind == FSDP_OP_RELEASE ? pair->src
                                                          : -1;
            if (use < 0 || (t->uses[use].pool == FSDP_POOL_GATHER && f->managed[t->uses[use].unit]))
                continue;
            now += t->ops[i].kind == FSDP_OP_ACQUIRE ? t->uses[use].bytes : -t->uses[use].bytes;
            if (now > f->base[k]) f->base[k] = now;
        }
    }
}

/* -------------------------------------------------------------------------------------------- */
// The pass `bucket`.

// Is every span of one unit right before or behind one of the other, and never inside of one?
static int fsdpi_plan_are_neighbours(const fsdpi_plan_facts *f, int a, int b) {
    int pairs = 0, ended = -1; // the last call of earlier pairs
    for (int i = 0; i < f->num_spans; i++) {
        const fsdpi_plan_span *span = &f->spans[i];
        if (span->owner != a && span->owner != b) continue;
        if (i + 1 == f->num_spans || span[1].owner != (span->owner == a ? b : a) ||
            span->end >= span[1].begin || span->begin <= ended)
            return 0;
        ended = span[1].end;
        pairs++;
        i++;
    }
    return pairs > 0;
}

// One item for each group of neighbours that gather alike.
static void fsdpi_plan_pass_bucket_gathers(const fsdp_plan *p, fsdpi_plan_facts *f, int on) {
    int64_t cap = p->desc.first_bucket_bytes;
    int last = -1, members = 0;
    f->num_items = 0;
    for (int u = 0; u < f->num_units; u++) f->item[u] = -1;
    for (int i = 0; i < f->num_spans; i++) { // in the order of first use
        int u = f->spans[i].owner;
        if (f->item[u] >= 0) continue;
        int joins = on && last >= 0 && f->item_bytes[f->num_items - 1] < cap &&
                    members < FSDPI_PLAN_JOINED && f->gathers[u] &&
                    f->gathers[u] == f->gathers[last] && fsdpi_plan_are_neighbours(f, last, u);
        if (!joins) {
            if (last >= 0) cap = p->desc.bucket_bytes;
            f->item_bytes[f->num_items++] = 0;
            members = 0;
        }
        f->item[u] = f->num_items - 1;
        f->item_bytes[f->item[u]] += f->bytes[u];
        members++;
        last = u;
    }
}

static fsdp_status fsdpi_plan_item_spans(fsdp_plan *p, fsdpi_plan_facts *f) {
    fsdp_status status = FSDP_OK;
    f->num_item_spans = 0;
    for (int i = 0; i < f->num_spans && !status;) {
        const fsdpi_plan_span *first = &f->spans[i];
        fsdpi_plan_span span = {f->item[first->owner], first->begin, first->end, -1, 0, i, 0};
        int members = 0;
        for (int u = 0; u < f->num_units; u++) members += f->item[u] == span.owner;
        for (; span.num < members; span.num++, i++)
            if (f->spans[i].end > span.end) span.end = f->spans[i].end;
        status = fsdpi_plan_grow(p->model, (void **)&f->item_spans, f->num_item_spans,
                                 &f->cap_item_spans, sizeof span);
        for (int k = f->num_item_spans - 1; k >= 0 && !status; k--)
            if (f->item_spans[k].owner == span.owner) {
                f->item_spans[k].next = f->num_item_spans;
                break;
            }
        if (!status) f->item_spans[f->num_item_spans++] = span;
    }
    return status;
}

/* -------------------------------------------------------------------------------------------- */
// The pass `keep`: Belady's rule. The future is known, so what goes is what is needed last.

static int fsdpi_plan_farthest(const fsdpi_plan_facts *f, const int32_t *at, int call) {
    int best = -1;
    for (int i = 0; i < f->num_items; i++) {
        const fsdpi_plan_span *span = at[i] >= 0 ? &f->item_spans[at[i]] : NULL;
        if (!span || span->end >= call) continue; // not there, or open
        if (best >= 0) {
            int next = f->item_spans[span->next].begin,
                other = f->item_spans[f->item_spans[at[best]].next].begin;
            if (next < other || (next == other && f->item_bytes[i] < f->item_bytes[best])) continue;
        }
        best = i;
    }
    return best;
}

/* Which spans are kept until the next one, so that no call holds more than `most` bytes, if that is
   enough for open units; *worst: the call that holds most. */
static void fsdpi_plan_pass_keep(fsdpi_plan_facts *f, uint32_t passes, int64_t most, int *worst) {
    int on = (passes & 1u << FSDP_PASS_KEEP) != 0, shares = (passes & 1u << FSDP_PASS_ARENA) != 0;
    int32_t *at = f->order;      // of an item that is there: its newest span; -1
    int64_t peak = -1, base = 0; // of slots that share no memory, the most at any call
    int next = 0;
    for (int k = 0; k + 1 < f->num_calls && !shares; k++)
        if (f->base[k] > base) base = f->base[k];
    for (int i = 0; i < f->num_items; i++) at[i] = -1;
    for (int k = 0; k + 1 < f->num_calls; k++) {
        int64_t now = shares ? f->base[k] : base;
        if (next < f->num_item_spans && f->item_spans[next].begin == k) {
            at[f->item_spans[next].owner] = next;
            next++;
        }
        for (int i = 0; i < f->num_items; i++) now += at[i] >= 0 ? f->item_bytes[i] : 0;
        for (int i; now > most && (i = fsdpi_plan_farthest(f, at, k)) >= 0;) {
            now -= f->item_bytes[i];
            f->item_spans[at[i]].kept = 0;
            at[i] = -1;
        }
        if (now > peak) *worst = k;
        if (now > peak) peak = now;
        for (int i = 0; i < f->num_items; i++) {
            fsdpi_plan_span *span = at[i] >= 0 ? &f->item_spans[at[i]] : NULL;
            if (!span || span->end != k) continue;
            span->kept = on && span->next >= 0;
            if (!span->kept) at[i] = -1;
        }
    }
}

/* -------------------------------------------------------------------------------------------- */
// From spans to acts.

static fsdp_status fsdpi_plan_act_add(fsdp_plan *p, fsdpi_plan_choice *c, int call, int what,
                                      int late, int unit, int group, int why, int at) {
    fsdpi_plan_act act;
    fsdp_status status = fsdpi_plan_grow(p->model, (void **)&c->acts, c->num_acts, &c->cap_acts,
                                         sizeof act);
    memset(&act, 0, sizeof act);
    act.call = call;
    act.what = (uint8_t)what;
    act.late = (uint8_t)late;
    act.unit = unit;
    act.group = group;
    act.why = (uint8_t)why;
    act.at = at;
    if (!status) c->acts[c->num_acts++] = act;
    return status;
}

// A unit is gathered once at a time, so that no more than all others can be under way.
static int fsdpi_plan_most_ahead(const fsdpi_plan_facts *f, int ahead) {
    return ahead < f->num_units ? ahead : f->num_units - 1;
}

// Gathers, in order: each behind the own work of the call that needs the one `ahead` before it, or
// the first one.
static fsdp_status fsdpi_plan_pass_ahead(fsdp_plan *p, const fsdpi_plan_facts *f, int ahead,
                                         fsdpi_plan_choice *c) {
    int32_t *gather = f->order, num = 0, last = 0; // spans of the last `ahead` + 1 gathers
    fsdp_status status = FSDP_OK;
    ahead = fsdpi_plan_most_ahead(f, ahead);
    for (int i = 0; i < f->num_item_spans && !status; i++) {
        const fsdpi_plan_span *span = &f->item_spans[i];
        int issued = span->begin, freed = -1, is_kept = 0, why = FSDPI_PLAN_WHY_DEMAND;
        for (int k = 0; k < i; k++)
            if (f->item_spans[k].next == i) {
                is_kept = f->item_spans[k].kept;
                freed = f->item_spans[k].end;
            }
        if (is_kept) continue;
        gather[num % f->num_units] = i;
        if (ahead > 0 && num > 0)
            issued = f->item_spans[gather[num < ahead ? 0 : (num - ahead) % f->num_units]].begin;
        if (issued < freed) issued = freed;
        if (issued < last) issued = last;
        if (issued > span->begin) issued = span->begin;
        last = issued;
        num++;
        int late = issued < span->begin;
        if (span->num > 1) why = FSDPI_PLAN_WHY_JOINED;
        if (late) why = FSDPI_PLAN_WHY_AHEAD;
        for (int k = 0; k < span->num && !status; k++)
            status = fsdpi_plan_act_add(p, c, issued, FSDPI_PLAN_GATHER, late,
                                        f->spans[span->first + k].owner, span->num > 1 ? i : -1,
                                        why, span->begin);
    }
    return status;
}

// What is freed, and what is not though by calls it is.
static fsdp_status fsdpi_plan_free_acts(fsdp_plan *p, const fsdpi_plan_facts *f,
                                        fsdpi_plan_choice *c) {
    fsdp_status status = FSDP_OK;
    for (int i = 0; i < f->num_item_spans && !status; i++) {
        const fsdpi_plan_span *span = &f->item_spans[i];
        int next = span->next >= 0 ? f->item_spans[span->next].begin : -1;
        for (int k = 0; k < span->num && !status; k++) {
            const fsdpi_plan_span *one = &f->spans[span->first + k];
            if (one->end >= f->num_calls) continue; // finalize frees it
            int why = span->kept ? FSDPI_PLAN_WHY_NEXT_USE
                      : next < 0 ? FSDPI_PLAN_WHY_LAST_USE
                                 : FSDPI_PLAN_WHY_FARTHEST;
            status = fsdpi_plan_act_add(p, c, one->end,
                                        span->kept ? FSDPI_PLAN_KEEP : FSDPI_PLAN_FREE, 1,
                                        one->owner, -1, why, next);
        }
    }
    return status;
}

/* The pass `bucket` for reductions: of units that follow one another, each of which has one
   post_backward and no call behind it. They wait for the last one. */
static fsdp_status fsdpi_plan_pass_bucket_reductions(fsdp_plan *p, const fsdpi_plan_facts *f,
                                                     fsdpi_plan_choice *c) {
    int32_t *bucket = f->order, num = 0, first_bucket = 1;
    int64_t bytes = 0;
    fsdp_status status = FSDP_OK;
    for (int k = 0; k < f->num_calls && !status; k++) {
        const fsdpi_plan_call *call = &f->kind->calls[k];
        int u = call->index, is_post = call->call == FSDP_CALL_POST_BACKWARD;
        int fits = is_post && f->posts[u] == 1 && f->last_call[u] == k && f->reduces[u] != 0 &&
                   (!num || f->reduces[u] == f->reduces[bucket[0]]);
        int64_t cap = first_bucket ? p->desc.first_bucket_bytes : p->desc.bucket_bytes;
        if (num && ((is_post && !fits) || bytes >= cap || num == FSDPI_PLAN_JOINED ||
                    k + 1 == f->num_calls)) {
            for (int i = 0; i < num && num > 1 && !status; i++) {
                int last = f->post[bucket[num - 1]];
                c->waits[bucket[i]] = 1;
                status = fsdpi_plan_act_add(p, c, f->post[bucket[i]], FSDPI_PLAN_COLLECT, 1,
                                            bucket[i], -1, FSDPI_PLAN_WHY_JOINED, last);
                if (!status)
                    status = fsdpi_plan_act_add(p, c, last, FSDPI_PLAN_REDUCE, 1, bucket[i],
                                                bucket[0], FSDPI_PLAN_WHY_JOINED,
                                                f->post[bucket[i]]);
            }
            num = 0;
            bytes = 0;
            first_bucket = 0;
            fits = is_post && f->posts[u] == 1 && f->last_call[u] == k && f->reduces[u] != 0;
        }
        if (!fits) continue;
        bucket[num++] = u;
        bytes += fsdpi_plan_slot_bytes(call->unit, FSDP_POOL_GRAD);
    }
    return status;
}

// The pass `once`: all but the last post_backward of a unit collect.
static fsdp_status fsdpi_plan_pass_once(fsdp_plan *p, const fsdpi_plan_facts *f,
                                        fsdpi_plan_choice *c) {
    fsdp_status status = FSDP_OK;
    for (int k = 0; k < f->num_calls && !status; k++) {
        const fsdpi_plan_call *call = &f->kind->calls[k];
        int u = call->index, post = k;
        if (call->call != FSDP_CALL_PRE_BACKWARD || f->posts[u] < 2 || !f->reduces[u]) continue;
        while (post < f->num_calls && (f->kind->calls[post].index != u ||
                                       f->kind->calls[post].call != FSDP_CALL_POST_BACKWARD))
            post++;
        c->sync[k] = post >= f->post[u];
        if (!c->sync[k])
            status = fsdpi_plan_act_add(p, c, post, FSDPI_PLAN_COLLECT, 1, u, -1,
                                        FSDPI_PLAN_WHY_ONCE, f->post[u]);
    }
    return status;
}

static int fsdpi_plan_act_order(const fsdpi_plan_act *a) { // within a call
    return a->what == FSDPI_PLAN_GATHER ? (a->late ? 5 : 0) : a->what;
}

static void fsdpi_plan_sort_acts(fsdpi_plan_choice *c) { // stable: insertion, nearly sorted
    for (int i = 1; i < c->num_acts; i++) {
        fsdpi_plan_act act = c->acts[i];
        int k = i;
        for (; k > 0; k--) {
            const fsdpi_plan_act *before = &c->acts[k - 1];
            if (before->call < act.call ||
                (before->call == act.call &&
                 fsdpi_plan_act_order(before) <= fsdpi_plan_act_order(&act)))
                break;
            c->acts[k] = *before;
        }
        c->acts[k] = act;
    }
}

static void fsdpi_plan_choice_end(fsdp_plan *p, fsdpi_plan_choice *c) {
    fsdpi_plan_free(p->model, c->acts);
    fsdpi_plan_free(p->model, c->managed);
    fsdpi_plan_free(p->model, c->waits);
    fsdpi_plan_free(p->model, c->sync);
    memset(c, 0, sizeof *c);
}

static fsdp_status fsdpi_plan_choice_new(fsdp_plan *p, fsdpi_plan_choice *c, int num_calls) {
    memset(c, 0, sizeof *c);
    fsdp_status status = fsdpi_plan_alloc(p->model, (size_t)p->num_units, (void **)&c->managed);
    if (!status) status = fsdpi_plan_alloc(p->model, (size_t)p->num_units, (void **)&c->waits);
    if (!status) status = fsdpi_plan_alloc(p->model, (size_t)num_calls, (void **)&c->sync);
    if (!status) memset(c->sync, -1, (size_t)num_calls);
    return status;
}

// All decisions, so that slots need at most `most` bytes. *worst: the call that needs most.
static fsdp_status fsdpi_plan_decide(fsdp_plan *p, fsdpi_plan_facts *f, uint32_t passes,
                                     int64_t most, fsdpi_plan_choice *c, int *worst) {
    int buckets = passes & 1u << FSDP_PASS_BUCKET && p->desc.bucket_bytes > 0;
    int ahead = passes & 1u << FSDP_PASS_AHEAD ? p->desc.ahead : 0;
    int64_t largest = 0;
    fsdp_status status = fsdpi_plan_choice_new(p, c, f->num_calls);
    if (status) return status;
    if (p->mode_of_world != FSDPI_PLAN_INLINE) passes &= ~(1u << FSDP_PASS_ARENA);
    memcpy(c->managed, f->managed, (size_t)p->num_units);
    fsdpi_plan_pass_bucket_gathers(p, f, buckets);
    status = fsdpi_plan_item_spans(p, f);
    for (int i = 0; i < f->num_items; i++)
        if (f->item_bytes[i] > largest) largest = f->item_bytes[i];
    fsdpi_plan_pass_keep(f, passes, most - fsdpi_plan_most_ahead(f, ahead) * largest, worst);
    if (!status) status = fsdpi_plan_pass_ahead(p, f, ahead, c);
    if (!status) status = fsdpi_plan_free_acts(p, f, c);
    if (!status && passes & 1u << FSDP_PASS_ONCE) status = fsdpi_plan_pass_once(p, f, c);
    if (!status && buckets) status = fsdpi_plan_pass_bucket_reductions(p, f, c);
    if (!status) fsdpi_plan_sort_acts(c);
    return status;
}


/* ==== plan/place.h ==========================================================================
   where slots lie */

// Owns: fsdpi_plan_slot, and which use has which. Uses that never meet may share memory. A use that
// is held at the end of the step has memory of its own, which outlasts the step.

// Uses that lie side by side count as one, from the first to the last of them.
typedef struct fsdpi_plan_piece {
    int32_t head, from, to;
    int64_t bytes, offset;
} fsdpi_plan_piece;

typedef struct fsdpi_plan_places {
    fsdpi_plan_piece *pieces;
    int32_t num;
    int32_t *order; // [num]
    int64_t *kept;  // [num] offsets of the best order
    int64_t bytes;
} fsdpi_plan_places;

static fsdpi_plan_piece fsdpi_plan_piece_of(const fsdpi_plan_tape *t, int head) {
    fsdpi_plan_piece piece = {head, t->uses[head].from, t->uses[head].to, 0, -1};
    for (int i = head; i >= 0; i = t->uses[i].glue) {
        if (t->uses[i].from < piece.from) piece.from = t->uses[i].from;
        if (t->uses[i].to > piece.to) piece.to = t->uses[i].to;
        piece.bytes += t->uses[i].bytes;
    }
    return piece;
}

// Does one come before another in an order? 0: size; 1: first use; 2: size times life.
static int fsdpi_plan_comes_before(const fsdpi_plan_piece *a, const fsdpi_plan_piece *b,
                                   int order) {
    double x = (double)a->bytes, y = (double)b->bytes;
    if (order == 2) x *= a->to - a->from, y *= b->to - b->from;
    if (order != 1 && x != y) return x > y;
    return a->from != b->from ? a->from < b->from : a->head < b->head;
}

// First fit in one order; the bytes of the whole.
static int64_t fsdpi_plan_first_fit(fsdpi_plan_places *pl, int order) {
    int64_t whole = 0;
    for (int i = 0; i < pl->num; i++) {
        int k = i;
        for (;
             k > 0 && fsdpi_plan_comes_before(&pl->pieces[i], &pl->pieces[pl->order[k - 1]], order);
             k--)
            pl->order[k] = pl->order[k - 1];
        pl->order[k] = i;
    }
    for (int i = 0; i < pl->num; i++) {
        fsdpi_plan_piece *piece = &pl->pieces[pl->order[i]];
        int64_t at = 0;
        for (int moved = 1; moved;) { // up to the first gap between those that it meets
            moved = 0;
            for (int k = 0; k < i; k++) {
                const fsdpi_plan_piece *other = &pl->pieces[pl->order[k]];
                if (other->from > piece->to || piece->from > other->to ||
                    other->offset >= at + piece->bytes || at >= other->offset + other->bytes)
                    continue;
                at = other->offset + other->bytes;
                moved = 1;
            }
        }
        piece->offset = at;
        if (at + piece->bytes > whole) whole = at + piece->bytes;
    }
    return whole;
}

static void fsdpi_plan_best_fit(fsdpi_plan_places *pl) {
    pl->bytes = INT64_MAX;
    for (int order = 0; order < 3; order++) {
        int64_t bytes = fsdpi_plan_first_fit(pl, order);
        if (bytes >= pl->bytes) continue;
        pl->bytes = bytes;
        for (int i = 0; i < pl->num; i++) pl->kept[i] = pl->pieces[i].offset;
    }
    for (int i = 0; i < pl->num; i++) pl->pieces[i].offset = pl->kept[i];
}

// Is a slot like this one filled while another is in use? As in the core's pools.
static int fsdpi_plan_is_ahead(const fsdpi_plan_tape *t, const fsdpi_plan_use *use) {
    for (int i = 0; i < t->num_uses && use->pool == FSDP_POOL_GATHER; i++)
        if (t->uses[i].pool == use->pool && t->uses[i].bytes == use->bytes &&
            t->uses[i].unit != use->unit)
            return 1;
    for (int i = 0; i < t->num_ops; i++) {
        int at = use->pool == FSDP_POOL_GRAD ? t->pairs[i].src : t->pairs[i].dst;
        int reads = use->pool == FSDP_POOL_GRAD && (t->ops[i].kind == FSDP_OP_REDUCE_SCATTER ||
                                                    t->ops[i].kind == FSDP_OP_ALL_REDUCE);
        int sums = use->pool == FSDP_POOL_ROUT && t->ops[i].kind == FSDP_OP_ALL_REDUCE;
        if ((reads || sums) && at >= 0 && t->uses[at].pool == use->pool &&
            t->uses[at].bytes == use->bytes)
            return 1;
    }
    return 0;
}

/* As the pools would have them: each size its own slots, the least recently released one first.
   deep: two from the begin on, where one is filled while the other is in use. */
static void fsdpi_plan_pool_fit(const fsdpi_plan_tape *t, fsdpi_plan_places *pl, int deep) {
    int num = 0; // slots; order[n]: the last piece in slot n
    pl->bytes = 0;
    for (int i = 0; i < pl->num; i++) {
        fsdpi_plan_piece *piece = &pl->pieces[i];
        int best = -1, slots = 0;
        for (int n = 0; n < num; n++) {
            const fsdpi_plan_piece *other = &pl->pieces[pl->order[n]];
            if (other->bytes != piece->bytes ||
                t->uses[other->head].pool != t->uses[piece->head].pool)
                continue;
            slots++;
            if (other->to < piece->from && (best < 0 || other->to < pl->pieces[pl->order[best]].to))
                best = n;
        }
        int depth = deep && slots == 1 && fsdpi_plan_is_ahead(t, &t->uses[piece->head]) ? 2 : 1;
        if (best < 0 || slots < depth) {
            best = num++;
            piece->offset = pl->bytes;
            pl->bytes += piece->bytes;
        } else {
            piece->offset = pl->pieces[pl->order[best]].offset;
        }
        pl->order[best] = i;
    }
}

// The most bytes that are held at one record: no placement needs less.
static int64_t fsdpi_plan_bound(const fsdpi_plan_places *pl) {
    int64_t most = 0;
    for (int i = 0; i < pl->num; i++) { // some piece begins where it is reached
        int64_t now = 0;
        for (int k = 0; k < pl->num; k++)
            if (pl->pieces[k].from <= pl->pieces[i].from && pl->pieces[k].to >= pl->pieces[i].from)
                now += pl->pieces[k].bytes;
        if (now > most) most = now;
    }
    return most;
}

static fsdp_status fsdpi_plan_slot_for(fsdp_plan *p, fsdpi_plan_listing *l, fsdpi_plan_use *use,
                                       int64_t offset) {
    fsdpi_plan_slot slot = {offset, use->bytes, use->pool, 0};
    for (int i = 0; i < l->num_slots && offset >= 0; i++)
        if (l->slots[i].offset == offset && l->slots[i].bytes == use->bytes &&
            l->slots[i].pool == use->pool) {
            use->slot = i;
            return FSDP_OK;
        }
    fsdp_status status = fsdpi_plan_grow(p->model, (void **)&l->slots, l->num_slots, &l->cap_slots,
                                         sizeof slot);
    use->slot = l->num_slots;
    if (!status) l->slots[l->num_slots++] = slot;
    return status;
}

static void fsdpi_plan_places_end(fsdp_plan *p, fsdpi_plan_places *pl) {
    fsdpi_plan_free(p->model, pl->pieces);
    fsdpi_plan_free(p->model, pl->order);
    fsdpi_plan_free(p->model, pl->kept);
}

/* The slot that a unit held when the step began, and gave back before it took one that it holds at
   the end: it gets the same again. So a step leaves units as it found them, and the next one is of
   the same kind. NULL: there is none. */
static fsdp_buf *fsdpi_plan_older(const fsdpi_plan_tape *t, const fsdp_unit *unit,
                                  const fsdpi_plan_use *use) {
    for (int i = 0; i < use->from && i < t->num_ops; i++)
        if (t->ops[i].kind == FSDP_OP_RELEASE && t->pairs[i].src < 0 && t->ops[i].unit == unit &&
            t->ops[i].pool == use->pool && fsdp_buf_nbytes(t->ops[i].src) >= use->bytes)
            return t->ops[i].src;
    return NULL;
}

// Places for all uses of a tape: l->slots, l->bytes, l->bound.
static fsdp_status fsdpi_plan_place(fsdp_plan *p, fsdpi_plan_tape *t, fsdpi_plan_listing *l,
                                    uint32_t passes) {
    fsdpi_plan_places pl;
    size_t room = (size_t)t->num_uses;
    int64_t lasting = 0;
    memset(&pl, 0, sizeof pl);
    l->num_slots = 0;
    fsdp_status status = fsdpi_plan_alloc(p->model, room * sizeof *pl.pieces, (void **)&pl.pieces);
    if (!status) status = fsdpi_plan_alloc(p->model, room * 4, (void **)&pl.order);
    if (!status) status = fsdpi_plan_alloc(p->model, room * 8, (void **)&pl.kept);
    for (int i = 0; i < t->num_uses && !status; i++) {
        fsdpi_plan_piece piece = fsdpi_plan_piece_of(t, i);
        if (t->uses[i].glued) continue;
        if (piece.to >= t->num_ops) {
            status = fsdpi_plan_slot_for(p, l, &t->uses[i], -1);
            if (!status)
                l->slots[t->uses[i].slot].older = fsdpi_plan_older(t, p->units[t->uses[i].unit],
                                                                   &t->uses[i]) != NULL;
            lasting += t->uses[i].bytes;
        } else {
            pl.pieces[pl.num++] = piece;
        }
    }
    int inlined = p->mode_of_world == FSDPI_PLAN_INLINE;
    if (!status) {
        l->bound = fsdpi_plan_bound(&pl) + lasting;
        int64_t arena = INT64_MAX;
        if (passes & 1u << FSDP_PASS_ARENA && inlined) {
            fsdpi_plan_best_fit(&pl);
            arena = pl.bytes;
        }
        fsdpi_plan_pool_fit(t, &pl, !inlined);
        if (arena < pl.bytes - pl.bytes / 20) {
            for (int i = 0; i < pl.num; i++) pl.pieces[i].offset = pl.kept[i];
            pl.bytes = arena;
        }
    }
    for (int i = 0; i < pl.num && !status; i++) {
        int64_t at = pl.pieces[i].offset;
        for (int u = pl.pieces[i].head; u >= 0 && !status; u = t->uses[u].glue) {
            status = fsdpi_plan_slot_for(p, l, &t->uses[u], at);
            at += t->uses[u].bytes;
        }
    }
    l->bytes = pl.bytes + lasting;
    fsdpi_plan_places_end(p, &pl);
    return status;
}


/* ==== plan/listing.h ========================================================================
   what a tape does, in words that are the same on every rank */

// Owns: fsdpi_plan_listing.

static void fsdpi_plan_listing_end(fsdp_model *m, fsdpi_plan_listing *l) {
    for (int i = 0; i < l->num_units && l->units; i++) fsdpi_plan_free(m, l->units[i].name);
    void *const lists[] = {l->units, l->calls,        l->choice.acts, l->choice.managed, l->slots,
                           l->lines, l->choice.waits, l->choice.sync, l->members};
    for (size_t i = 0; i < sizeof lists / sizeof *lists; i++) fsdpi_plan_free(m, lists[i]);
    memset(l, 0, sizeof *l);
}

static fsdp_status fsdpi_plan_string(fsdp_model *m, const char *text, size_t length, char **out) {
    fsdp_status status = fsdpi_plan_alloc(m, length + 1, (void **)out);
    if (!status) memcpy(*out, text, length);
    return status;
}

static fsdp_status fsdpi_plan_line_add(fsdp_model *m, fsdpi_plan_listing *l,
                                       const fsdpi_plan_line *line) {
    fsdp_status status = fsdpi_plan_grow(m, (void **)&l->lines, l->num_lines, &l->cap_lines,
                                         sizeof *line);
    if (!status) l->lines[l->num_lines++] = *line;
    return status;
}

static fsdp_status fsdpi_plan_member_add(fsdp_model *m, fsdpi_plan_listing *l, int unit, int src,
                                         int dst) {
    fsdpi_plan_member member = {unit, src, dst};
    fsdp_status status = fsdpi_plan_grow(m, (void **)&l->members, l->num_members, &l->cap_members,
                                         sizeof member);
    if (!status) l->members[l->num_members++] = member;
    return status;
}

// Bytes without those of slots that outlast a step.
static int64_t fsdpi_plan_arena_bytes(const fsdpi_plan_listing *l) {
    int64_t bytes = l->bytes;
    for (int i = 0; i < l->num_slots; i++) bytes -= l->slots[i].offset < 0 ? l->slots[i].bytes : 0;
    return bytes;
}

// The place of a group in the listing; -1: it has too many.
static int fsdpi_plan_comm_add(fsdpi_plan_listing *l, const char *name) {
    int i = 0;
    while (i < l->num_comms && strcmp(l->comms[i], name) != 0) i++;
    if (i == FSDPI_PLAN_COMMS) return -1;
    if (i == l->num_comms) snprintf(l->comms[l->num_comms++], FSDPI_PLAN_COMM, "%s", name);
    return i;
}

// Groups are numbered in the order in which the tape uses them.
static int fsdpi_plan_comm_of(const fsdpi_plan_tape *t, fsdpi_plan_listing *l, const fsdp_op *op) {
    const fsdp_comm *seen[FSDPI_PLAN_COMMS];
    char name[FSDPI_PLAN_COMM];
    int num = 0;
    if (!op->comm) return -1;
    for (const fsdp_op *at = t->ops; at <= op; at++) {
        int i = 0;
        while (i < num && seen[i] != at->comm) i++;
        if (at->comm && i == num && num < FSDPI_PLAN_COMMS) seen[num++] = at->comm;
        if (at != op) continue;
        snprintf(name, sizeof name, "group%d", i);
    }
    return fsdpi_plan_comm_add(l, name);
}

// Of what is equal on all ranks: segments; not blocks, which hold the rank's own place.
static uint32_t fsdpi_plan_digest(const fsdp_op *op) {
    uint64_t h = fsdpi_plan_mix(op->kind, (uint64_t)op->group_size);
    const fsdp_seg *seg = (const fsdp_seg *)op->list;
    h = fsdpi_plan_mix(h, op->redop);
    if (op->kind == FSDP_OP_ALL_GATHER || op->kind == FSDP_OP_REDUCE_SCATTER)
        for (uint32_t i = 0; i < op->list_count; i++)
            h = fsdpi_plan_mix(fsdpi_plan_mix(h, (uint64_t)seg[i].full),
                               fsdpi_plan_mix((uint64_t)seg[i].shard, (uint64_t)seg[i].count));
    return (uint32_t)h;
}

// The place of events in a table with one for each slot, block, and older slot of each unit; -1:
// it has none.
static int fsdpi_plan_events(const fsdpi_plan_listing *l) {
    return l->num_slots + 2 + FSDPI_PLAN_HELD_COUNT * l->num_units;
}
static int fsdpi_plan_event_of(const fsdpi_plan_listing *l, int unit, int place) {
    int held = FSDPI_PLAN_HELD - place;
    return place >= 0                   ? place
           : place == FSDPI_PLAN_SHARDS ? l->num_slots
           : place == FSDPI_PLAN_GRADS  ? l->num_slots + 1
           : held >= 0 && unit >= 0     ? l->num_slots + 2 + held * l->num_units + unit
                                        : -1;
}

// A buffer that is none of the tape's: a block of the model, host memory, or an older slot.
static int fsdpi_plan_place_of(const fsdpi_plan_tape *t, const fsdp_op *op, int use, int writes) {
    const fsdp_buf *buf = writes ? op->dst : op->src;
    if (use >= 0) return t->uses[use].slot;
    if (!buf) return op->label == FSDP_LABEL_USERS && !writes ? FSDPI_PLAN_HOST : FSDPI_PLAN_NONE;
    int pool = fsdp_buf_pool(buf), held = pool - FSDP_POOL_GATHER;
    return pool == FSDP_POOL_SHARD                     ? FSDPI_PLAN_SHARDS
           : pool == FSDP_POOL_SGRAD                   ? FSDPI_PLAN_GRADS
           : held >= 0 && held < FSDPI_PLAN_HELD_COUNT ? FSDPI_PLAN_HELD - held
                                                       : FSDPI_PLAN_OTHER;
}

static fsdp_status fsdpi_plan_list_op(fsdp_plan *p, const fsdpi_plan_tape *t, fsdpi_plan_listing *l,
                                      int call, int i, int *group) {
    const fsdp_op *op = &t->ops[i];
    fsdpi_plan_line line;
    fsdp_status status = FSDP_OK;
    memset(&line, 0, sizeof line);
    line.call = call;
    line.members = l->num_members;
    line.comm = fsdpi_plan_comm_of(t, l, op);
    line.kind = op->kind;
    line.label = op->label;
    line.stream = op->stream;
    line.dtype = op->dtype;
    line.out_dtype = op->out_dtype;
    line.accumulate = op->accumulate;
    line.in_place = op->in_place;
    line.redop = op->redop;
    line.count = op->count;
    line.bytes = op->bytes;
    line.scale = op->scale;
    line.digest = fsdpi_plan_digest(op);
    if (op->comm && line.comm < 0)
        return fsdp_fail(p->world, FSDP_ERR_UNSUPPORTED,
                         "[E945] plan: a step uses more than %d groups of ranks: give units that "
                         "have the same ranks one mesh",
                         FSDPI_PLAN_COMMS);
    const fsdpi_plan_group *g = *group < t->num_groups ? &t->groups[*group] : NULL;
    if (g && g->op == i) {
        ++*group;
        for (int k = 0; k < g->num_members && !status; k++) {
            const fsdpi_plan_member *from = &t->members[g->members + k];
            status = fsdpi_plan_member_add(p->model, l, from->unit,
                                           fsdpi_plan_place_of(t, op, from->src, 0),
                                           fsdpi_plan_place_of(t, op, from->dst, 1));
        }
        line.num_members = g->num_members;
    } else {
        status = fsdpi_plan_member_add(p->model, l, fsdpi_plan_index(p, op->unit),
                                       fsdpi_plan_place_of(t, op, t->pairs[i].src, 0),
                                       fsdpi_plan_place_of(t, op, t->pairs[i].dst, 1));
        line.num_members = 1;
    }
    return status ? status : fsdpi_plan_line_add(p->model, l, &line);
}

// A unit's name in a text: its own, as far as there is room. Its number follows as often as an
// earlier unit has that name, since a text finds units by name.
static fsdp_status fsdpi_plan_name_unit(fsdp_plan *p, fsdpi_plan_listing *l, int u) {
    char name[512];
    snprintf(name, sizeof name, "%.480s", fsdp_unit_name(p->units[u]));
    for (int i = 0; i < u; i++) {
        if (strcmp(l->units[i].name, name) != 0) continue;
        snprintf(name + strlen(name), sizeof name - strlen(name), "#%d", u);
        i = -1; // an earlier name may be the new one
    }
    l->units[u].gather_bytes = fsdpi_plan_slot_bytes(p->units[u], FSDP_POOL_GATHER);
    return fsdpi_plan_string(p->model, name, strlen(name), &l->units[u].name);
}

// Bytes of slots for gradients: 0 where a unit's gradients have no elements.
static void fsdpi_plan_size_grads(const fsdp_plan *p, fsdpi_plan_listing *l) {
    fsdp_param_view v = FSDP_ZERO;
    for (int u = 0; fsdp_next_param(p->model, &v);) {
        int64_t numel = v.requires_grad;
        while (p->units[u] != v.unit) u++;
        for (int d = 0; d < v.ndim; d++) numel *= v.shape[d];
        if (numel) l->units[u].grad_bytes = fsdpi_plan_slot_bytes(p->units[u], FSDP_POOL_GRAD);
    }
}

// [0]: of calls, [1]: of the plan.
static void fsdpi_plan_count_ops(const fsdpi_plan_tape *t, fsdpi_plan_listing *l, int which) {
    l->gathers[which] = l->reductions[which] = l->replica_ops[which] = l->ops[which] = 0;
    l->gather_bytes[which] = l->reduce_bytes[which] = 0;
    for (int i = 0; i < t->num_ops; i++) {
        const fsdp_op *op = &t->ops[i];
        l->ops[which] += op->kind < FSDP_OP_HOOK;
        if (op->kind == FSDP_OP_ALL_GATHER) {
            l->gathers[which]++;
            l->gather_bytes[which] += op->bytes;
        } else if (op->kind == FSDP_OP_REDUCE_SCATTER) {
            l->reductions[which]++;
            l->reduce_bytes[which] += op->bytes;
        } else if (op->kind == FSDP_OP_ALL_REDUCE) {
            l->replica_ops[which]++;
            l->reduce_bytes[which] += op->bytes;
        }
    }
}

// The model in a number: what has to be equal for a text to be of use.
static uint64_t fsdpi_plan_model_hash(const fsdp_plan *p) {
    fsdp_param_view v = FSDP_ZERO;
    uint64_t h = (uint64_t)p->num_units;
    while (fsdp_next_param(p->model, &v)) {
        h = fsdpi_plan_mix_bytes(h, v.name, strlen(v.name));
        h = fsdpi_plan_mix_bytes(h, v.unit_name, strlen(v.unit_name));
        h = fsdpi_plan_mix(h, (uint64_t)v.dtype << 32 | (uint64_t)v.grad_dtype << 16 |
                                  (uint64_t)v.requires_grad << 8 | (uint64_t)v.ndim);
        for (int d = 0; d < v.ndim; d++) h = fsdpi_plan_mix(h, (uint64_t)v.shape[d]);
        h = fsdpi_plan_mix(h, (uint64_t)v.shard_dim);
    }
    return h;
}

// Are a unit's groups of ranks, if it has some, those of a mesh?
static int fsdpi_plan_is_within(const fsdp_mesh_info *unit, const fsdp_mesh_info *all) {
    return (!unit->shard_comm || unit->shard_comm == all->shard_comm) &&
           (!unit->replicate_comm || unit->replicate_comm == all->replicate_comm);
}

// The groups of the unit that has most of them.
static fsdp_status fsdpi_plan_units_mesh(const fsdp_plan *p, fsdp_mesh_info *out) {
    fsdp_mesh_info own = FSDP_ZERO;
    fsdp_status status = FSDP_OK;
    for (int u = 0, most = -1; u < p->num_units && !status; u++) {
        status = fsdp_unit_mesh_info(p->units[u], &own);
        int groups = (own.shard_comm != NULL) + (own.replicate_comm != NULL);
        if (groups <= most) continue;
        most = groups;
        *out = own;
    }
    return status;
}

/* The one mesh that a plan knows: the model's; or if that has all ranks of the world, which agree
   on the plan, the units' (buckets of fsdp_replicate.h). *stranger: a unit on neither, or NULL. */
static fsdp_status fsdpi_plan_mesh_info(const fsdp_plan *p, fsdp_mesh_info *out,
                                        fsdp_unit **stranger) {
    fsdp_mesh_info own = FSDP_ZERO;
    fsdp_unit *strange[2] = {NULL, NULL}; // to the model, to the units
    int ways = 1 + (fsdp_mesh_size(p->mesh, -1) == fsdp_world_size(p->world));
    fsdp_status status = FSDP_OK;
    for (int way = 0; way < ways && (!way || strange[0]) && !status; way++) {
        status = way ? fsdpi_plan_units_mesh(p, out) : fsdp_model_mesh_info(p->model, out);
        for (int u = 0; u < p->num_units && !strange[way] && !status; u++) {
            status = fsdp_unit_mesh_info(p->units[u], &own);
            if (!fsdpi_plan_is_within(&own, out)) strange[way] = p->units[u];
        }
    }
    *stranger = ways > 1 && !strange[1] ? NULL : strange[0];
    return status;
}

static fsdp_status fsdpi_plan_list(fsdp_plan *p, const fsdpi_plan_kind *k, const fsdpi_plan_tape *t,
                                   fsdpi_plan_listing *l) {
    fsdp_mesh_info info = FSDP_ZERO;
    fsdp_unit *stranger;
    int group = 0;
    fsdp_status status = fsdpi_plan_mesh_info(p, &info, &stranger);
    l->model = fsdpi_plan_model_hash(p);
    l->kind = fsdpi_plan_mix(k->settings, (uint64_t)k->num_calls);
    l->num_units = p->num_units;
    l->num_params = fsdp_num_params(p->model);
    l->shards = info.shard_mesh_size;
    l->replicas = info.replicate_mesh_size;
    l->mode = p->mode_of_world;
    l->num_calls = l->forward_calls = k->num_calls;
    if (!status)
        status = fsdpi_plan_alloc(p->model, (size_t)p->num_units * sizeof *l->units,
                                  (void **)&l->units);
    if (!status)
        status = fsdpi_plan_alloc(p->model, (size_t)k->num_calls * sizeof *l->calls,
                                  (void **)&l->calls);
    for (int u = 0; u < p->num_units && !status; u++) status = fsdpi_plan_name_unit(p, l, u);
    if (!status) fsdpi_plan_size_grads(p, l);
    for (int c = 0; c < k->num_calls && !status; c++) {
        l->calls[c] = k->calls[c];
        if (l->forward_calls == k->num_calls && k->calls[c].call == FSDP_CALL_PRE_BACKWARD)
            l->forward_calls = c;
        for (int i = t->ops_at[c]; i < t->ops_at[c + 1] && c + 1 < k->num_calls && !status; i++)
            if (t->ops[i].kind != FSDP_OP_HOOK) status = fsdpi_plan_list_op(p, t, l, c, i, &group);
    }
    return status;
}


/* ==== plan/text.h ===========================================================================
   a plan as text */

// Owns: the format, which docs/plan.md describes. One statement per line, fields with one blank
// between them; nothing in it differs between ranks.

// Where text goes: into a buffer as far as it has room, into a hash, or both.
typedef struct fsdpi_plan_out {
    char *buf;
    size_t cap, used;
    uint64_t hash;
} fsdpi_plan_out;

static void fsdpi_plan_put_bytes(fsdpi_plan_out *o, const char *text, size_t length) {
    for (size_t i = 0; i < length; i++) {
        o->hash = (o->hash ^ (unsigned char)text[i]) * 0x100000001B3u; // FNV-1a
        if (o->used + 1 < o->cap) o->buf[o->used] = text[i];
        o->used++;
    }
    if (o->cap) o->buf[o->used < o->cap ? o->used : o->cap - 1] = 0;
}

static void fsdpi_plan_put(fsdpi_plan_out *o, const char *format, ...) FSDP_PRINTF(2, 3);
static void fsdpi_plan_put(fsdpi_plan_out *o, const char *format, ...) {
    char text[256];
    va_list args;
    va_start(args, format);
    int length = vsnprintf(text, sizeof text, format, args);
    va_end(args);
    if (length > 0)
        fsdpi_plan_put_bytes(o, text, length < (int)sizeof text ? (size_t)length : sizeof text - 1);
}

static void fsdpi_plan_put_name(fsdpi_plan_out *o, const char *name) {
    fsdpi_plan_put_bytes(o, " '", 2);
    for (; *name; name++) {
        if (*name == '\'' || *name == '\\') fsdpi_plan_put(o, "\\%c", *name);
        else if (*name == '\n') fsdpi_plan_put(o, "\\n");
        else if ((unsigned char)*name < ' ' || (unsigned char)*name > '~')
            fsdpi_plan_put(o, "\\x%02X", (unsigned char)*name);
        else fsdpi_plan_put_bytes(o, name, 1);
    }
    fsdpi_plan_put_bytes(o, "'", 1);
}

static void fsdpi_plan_put_unit(fsdpi_plan_out *o, const fsdpi_plan_listing *l, int unit) {
    if (unit >= 0) fsdpi_plan_put_name(o, l->units[unit].name);
    else fsdpi_plan_put(o, " model");
}

static const char *const fsdpi_plan_streams[FSDP_STREAM_COUNT] = {"COMPUTE", "GATHER", "REDUCE",
                                                                  "ALLREDUCE", "EXTENSION"};
static const char *const fsdpi_plan_modes[FSDPI_PLAN_MODES] = {"inline", "lanes", "streams"};
static const char *const fsdpi_plan_blocks[] = {
    "none",        "shards",     "grads",     "host",     "other",
    "held_gather", "held_slice", "held_grad", "held_rin", "held_rout"};
static const char *const fsdpi_plan_words[FSDPI_PLAN_ACT_COUNT] = {
#define FSDP_X(name, text) text,
    FSDPI_PLAN_ACT_LIST(FSDP_X)
#undef FSDP_X
};
static const char *const fsdpi_plan_reasons[FSDPI_PLAN_WHY_COUNT] = {
#define FSDP_X(name, text) text,
    FSDPI_PLAN_WHY_LIST(FSDP_X)
#undef FSDP_X
};
static const char *const fsdpi_plan_readings[4] = {"none", "forward", "backward", "both"};
// Short, and without blanks.
static const char *const fsdpi_plan_pools[] = {"shard", "sgrad", "gather", "slice",
                                               "grad",  "rin",   "rout"};

// The label NONE has no text.
static const char *fsdpi_plan_label(int label) {
    const char *name = fsdp_label_name(label);
    return *name ? name : "none";
}

static void fsdpi_plan_put_place(fsdpi_plan_out *o, int place) {
    if (place < 0) fsdpi_plan_put(o, " %s", fsdpi_plan_blocks[-1 - place]);
    else fsdpi_plan_put(o, " slot %d", place);
}

// Acts of a call that are joined stand in one line; returns the next one.
static int fsdpi_plan_put_act(fsdpi_plan_out *o, const fsdpi_plan_listing *l, int i) {
    const fsdpi_plan_act *acts = l->choice.acts, *first = &acts[i];
    fsdpi_plan_put(o, "  %s%s", fsdpi_plan_words[first->what],
                   first->what == FSDPI_PLAN_GATHER && first->late ? " behind" : "");
    do fsdpi_plan_put_unit(o, l, acts[i++].unit);
    while (first->group >= 0 && i < l->choice.num_acts && acts[i].call == first->call &&
           acts[i].what == first->what && acts[i].group == first->group);
    fsdpi_plan_put(o, " why %s", fsdpi_plan_reasons[first->why]);
    if (first->at >= 0 && first->what != FSDPI_PLAN_REDUCE)
        fsdpi_plan_put(o, " at call %d", first->at);
    fsdpi_plan_put(o, "\n");
    return i;
}

static void fsdpi_plan_put_members(fsdpi_plan_out *o, const fsdpi_plan_listing *l,
                                   const fsdpi_plan_line *line) {
    const fsdpi_plan_member *m = &l->members[line->members];
    for (int i = 0; i < line->num_members; i++) fsdpi_plan_put_unit(o, l, m[i].unit);
}

static void fsdpi_plan_put_op(fsdpi_plan_out *o, const fsdpi_plan_listing *l,
                              const fsdpi_plan_line *line) {
    const fsdpi_plan_member *m = &l->members[line->members];
    fsdpi_plan_put(o, "  op %d %s %s", (int)(line - l->lines), fsdp_op_name(line->kind),
                   fsdpi_plan_label(line->label));
    fsdpi_plan_put_members(o, l, line);
    fsdpi_plan_put(o, " %s %llu %llu %s %s", fsdpi_plan_streams[line->stream],
                   (unsigned long long)line->count, (unsigned long long)line->bytes,
                   fsdp_dtype_name(line->dtype), fsdp_dtype_name(line->out_dtype));
    for (int i = 0; i < line->num_members; i++) {
        fsdpi_plan_put_place(o, m[i].src);
        fsdpi_plan_put_place(o, m[i].dst);
    }
    if (line->scale != 1) fsdpi_plan_put(o, " scale %a", line->scale);
    if (line->accumulate) fsdpi_plan_put(o, " add");
    if (line->in_place) fsdpi_plan_put(o, " in_place");
    if (line->comm >= 0) fsdpi_plan_put(o, " comm %s", l->comms[line->comm]);
    fsdpi_plan_put(o, " #%08x\n", line->digest);
}

static void fsdpi_plan_put_line(fsdpi_plan_out *o, const fsdpi_plan_listing *l,
                                const fsdpi_plan_line *line) {
    const fsdpi_plan_member *m = &l->members[line->members];
    switch (line->kind) {
    case FSDP_OP_ACQUIRE:
        fsdpi_plan_put(o, "  acquire");
        fsdpi_plan_put_members(o, l, line);
        fsdpi_plan_put_place(o, m->dst);
        fsdpi_plan_put(o, "\n");
        break;
    case FSDP_OP_RELEASE:
        fsdpi_plan_put(o, "  release");
        fsdpi_plan_put_members(o, l, line);
        fsdpi_plan_put_place(o, m->src);
        fsdpi_plan_put(o, " %s\n", fsdpi_plan_streams[line->stream]);
        break;
    case FSDP_OP_WROTE:
        fsdpi_plan_put(o, "  wrote");
        fsdpi_plan_put_members(o, l, line);
        fsdpi_plan_put_place(o, m->dst);
        fsdpi_plan_put(o, "\n");
        break;
    default: fsdpi_plan_put_op(o, l, line);
    }
}

static void fsdpi_plan_put_call(fsdpi_plan_out *o, const fsdpi_plan_listing *l, int call, int *act,
                                int *line, int what) {
    fsdpi_plan_put(o, "call %d %s", call, fsdpi_plan_call_name(l->calls[call].call));
    if (l->calls[call].index >= 0) fsdpi_plan_put_unit(o, l, l->calls[call].index);
    fsdpi_plan_put(o, "\n");
    while (*act < l->choice.num_acts && l->choice.acts[*act].call == call)
        *act = fsdpi_plan_put_act(o, l, *act);
    for (; *line < l->num_lines && l->lines[*line].call == call; ++*line)
        if (what == FSDP_PLAN_TEXT_OPS) fsdpi_plan_put_line(o, l, &l->lines[*line]);
}

static void fsdpi_plan_put_head(fsdpi_plan_out *o, const fsdpi_plan_listing *l) {
    fsdpi_plan_put(o, "fsdp plan 1\n");
    fsdpi_plan_put(o, "model %016llx units %d params %d shards %d replicas %d mode %s\n",
                   (unsigned long long)l->model, l->num_units, l->num_params, l->shards,
                   l->replicas, fsdpi_plan_modes[l->mode]);
    fsdpi_plan_put(o, "kind %016llx calls %d forward %d\n", (unsigned long long)l->kind,
                   l->num_calls, l->forward_calls);
    fsdpi_plan_put(o, "bytes %lld bound %lld by_calls %lld\n", (long long)l->bytes,
                   (long long)l->bound, (long long)l->by_calls);
    fsdpi_plan_put(o, "count gathers %d %d reductions %d %d replicas %d %d ops %d %d\n",
                   l->gathers[0], l->gathers[1], l->reductions[0], l->reductions[1],
                   l->replica_ops[0], l->replica_ops[1], l->ops[0], l->ops[1]);
    fsdpi_plan_put(o, "read gathers %llu %llu reductions %llu %llu\n",
                   (unsigned long long)l->gather_bytes[0], (unsigned long long)l->gather_bytes[1],
                   (unsigned long long)l->reduce_bytes[0], (unsigned long long)l->reduce_bytes[1]);
    for (int u = 0; u < l->num_units; u++) {
        fsdpi_plan_put(o, "unit %d", u);
        fsdpi_plan_put_name(o, l->units[u].name);
        fsdpi_plan_put(o, " gather %lld grad %lld reads %s\n", (long long)l->units[u].gather_bytes,
                       (long long)l->units[u].grad_bytes, fsdpi_plan_readings[l->units[u].reads]);
    }
}

static void fsdpi_plan_put_all(fsdpi_plan_out *o, const fsdpi_plan_listing *l, int what) {
    int act = 0, line = 0;
    o->hash = 0xCBF29CE484222325u;
    fsdpi_plan_put_head(o, l);
    for (int i = 0; i < l->num_slots && what == FSDP_PLAN_TEXT_OPS; i++) {
        fsdpi_plan_put(o, "slot %d %s ", i, fsdpi_plan_pools[l->slots[i].pool]);
        if (l->slots[i].offset >= 0) fsdpi_plan_put(o, "at %lld", (long long)l->slots[i].offset);
        else fsdpi_plan_put(o, "lasts");
        fsdpi_plan_put(o, " bytes %lld\n", (long long)l->slots[i].bytes);
    }
    for (int c = 0; c < l->num_calls; c++) fsdpi_plan_put_call(o, l, c, &act, &line, what);
    fsdpi_plan_put(o, "end %016llx\n", (unsigned long long)o->hash);
}

static uint64_t fsdpi_plan_text_hash(const fsdpi_plan_listing *l) {
    fsdpi_plan_out o = {NULL, 0, 0, 0};
    fsdpi_plan_put_all(&o, l, FSDP_PLAN_TEXT_OPS);
    return o.hash ? o.hash : 1;
}

// Of one call: its text.
static uint64_t fsdpi_plan_call_hash(const fsdpi_plan_listing *l, int call) {
    fsdpi_plan_out o = {NULL, 0, 0, 0xCBF29CE484222325u};
    int act = 0, line = 0;
    while (act < l->choice.num_acts && l->choice.acts[act].call < call) act++;
    while (line < l->num_lines && l->lines[line].call < call) line++;
    fsdpi_plan_put_call(&o, l, call, &act, &line, FSDP_PLAN_TEXT_OPS);
    return o.hash;
}

// A call in one line, for an error's text.
static void fsdpi_plan_call_words(const fsdpi_plan_listing *l, int call, char *buf, size_t cap) {
    fsdpi_plan_out o = {buf, cap, 0, 0};
    int act = 0, line = 0;
    if (call >= l->num_calls) {
        fsdpi_plan_put(&o, "no such call");
        return;
    }
    while (act < l->choice.num_acts && l->choice.acts[act].call < call) act++;
    fsdpi_plan_put_call(&o, l, call, &act, &line, FSDP_PLAN_TEXT_DECISIONS);
    for (int i = 0; i < 2; i++) { // without "call N "
        const char *blank = strchr(buf, ' ');
        if (blank) memmove(buf, blank + 1, strlen(blank));
    }
    for (char *at = buf; *at; at++)
        if (*at == '\n') *at = at[1] ? ';' : 0;
}

/* -------------------------------------------------------------------------------------------- */

FSDP_API int fsdp_plan_count(const fsdp_plan *plan) { return plan ? plan->num_kinds : 0; }

FSDP_API size_t fsdp_plan_text(const fsdp_plan *plan, int index, int what, char *buf, size_t cap) {
    fsdpi_plan_out o = {buf, buf ? cap : 0, 0, 0};
    if (o.cap) *buf = 0;
    if (!plan || index < 0 || index >= plan->num_kinds) return 0;
    fsdpi_plan_put_all(&o, &plan->kinds[index]->listing, what);
    return o.used;
}

FSDP_API const char *fsdp_pass_name(int pass) {
    static const char *const names[FSDP_PASS_COUNT] = {
#define FSDP_X(name, text) text,
        FSDP_PASS_LIST(FSDP_X)
#undef FSDP_X
    };
    return pass >= 0 && pass < FSDP_PASS_COUNT ? names[pass] : "?";
}


/* ==== plan/parse.h ==========================================================================
   a listing from a text */

// Owns: the other way of the format in plan/text.h. What a reader takes is printed again and
// compared, so that a text has one form only, and its reader need not look at blanks.

enum { FSDPI_PLAN_MOST = 64 << 20, FSDPI_PLAN_MOST_UNITS = 1 << 20 };

typedef struct fsdpi_plan_in {
    fsdp_model *model; // whose memory; NULL: malloc
    fsdp_world *world; // for error texts
    const char *text, *at, *end;
    fsdpi_plan_listing *l;
    int ops; // the text has ops
    fsdp_status status;
} fsdpi_plan_in;

// The first fault counts: where, what was expected there, and what stands there.
static void fsdpi_plan_expect(fsdpi_plan_in *in, const char *expected) {
    int line = 1, used = 0;
    char got[48];
    const char *begin = in->text;
    if (in->status) return;
    for (const char *c = in->text; c < in->at; c++)
        if (*c == '\n') {
            line++;
            begin = c + 1;
        }
    for (const char *c = in->at; c < in->end && *c != '\n' && used < 40; c++)
        got[used++] = *c < ' ' || *c > '~' ? '?' : *c;
    got[used] = 0;
    in->status = fsdp_fail(
        in->world, FSDP_ERR_INVALID_ARG,
        "[E982] plan: line %d, column %d: expected %s, got %s%s%s: correct it there, and end an "
        "edited text with 'end 0000000000000000'",
        line, (int)(in->at - begin) + 1, expected, used ? "'" : "",
        used               ? got
        : in->at < in->end ? "the end of the line"
                           : "the last line",
        used ? "'" : "");
}

static int fsdpi_plan_peek(const fsdpi_plan_in *in, const char *word) {
    size_t length = strlen(word);
    return (size_t)(in->end - in->at) >= length && memcmp(in->at, word, length) == 0;
}

// Takes a word, with the blanks in it; 0: it is not there.
static int fsdpi_plan_take(fsdpi_plan_in *in, const char *word) {
    if (in->status || !fsdpi_plan_peek(in, word)) return 0;
    in->at += strlen(word);
    return 1;
}
static void fsdpi_plan_need(fsdpi_plan_in *in, const char *word) {
    if (fsdpi_plan_take(in, word)) return;
    char words[48];
    if (*word == '\n' && !in->status && in->at < in->end && *in->at == '\n') in->at++, word++;
    snprintf(words, sizeof words, "'%s'", word);
    fsdpi_plan_expect(in, *word == '\n' ? "the end of the line" : words);
}

static uint64_t fsdpi_plan_hex(fsdpi_plan_in *in, int digits) {
    uint64_t value = 0;
    for (int i = 0; i < digits && !in->status; i++) {
        int c = in->at < in->end ? *in->at : 0;
        int digit = c >= '0' && c <= '9' ? c - '0' : c >= 'a' && c <= 'f' ? c - 'a' + 10 : -1;
        if (digit < 0) fsdpi_plan_expect(in, "a hexadecimal digit");
        else in->at++;
        value = value << 4 | (uint64_t)(digit < 0 ? 0 : digit);
    }
    return value;
}

static int64_t fsdpi_plan_number(fsdpi_plan_in *in, int64_t most) {
    int64_t value = 0;
    const char *first = in->at;
    while (in->at < in->end && *in->at >= '0' && *in->at <= '9' && !in->status) {
        if (value > (most - (*in->at - '0')) / 10) {
            fsdpi_plan_expect(in, "a smaller number");
            return 0;
        }
        value = 10 * value + (*in->at++ - '0');
    }
    if (in->at == first) fsdpi_plan_expect(in, "a number");
    return value;
}
static int fsdpi_plan_int(fsdpi_plan_in *in) { return (int)fsdpi_plan_number(in, INT32_MAX); }

static int fsdpi_plan_index_of(fsdpi_plan_in *in, int count, const char *what) {
    int64_t value = fsdpi_plan_number(in, INT32_MAX);
    if (value >= count) fsdpi_plan_expect(in, what);
    return value < count ? (int)value : 0;
}

// One of several words: the longest that stands there.
static int fsdpi_plan_choose(fsdpi_plan_in *in, const char *const *words, int count,
                             const char *what) {
    int best = -1;
    for (int i = 0; i < count; i++)
        if (words[i] && *words[i] && fsdpi_plan_peek(in, words[i]) &&
            (best < 0 || strlen(words[i]) > strlen(words[best])))
            best = i;
    if (best < 0 || in->status) {
        fsdpi_plan_expect(in, what);
        return 0;
    }
    in->at += strlen(words[best]);
    return best;
}

// A quoted name, into a buffer.
static void fsdpi_plan_name(fsdpi_plan_in *in, char *out, size_t cap) {
    size_t used = 0;
    fsdpi_plan_need(in, "'");
    while (in->at < in->end && *in->at != '\'' && *in->at != '\n' && !in->status) {
        int c = (unsigned char)*in->at++;
        if (c == '\\' && in->at < in->end) {
            c = (unsigned char)*in->at++;
            if (c == 'n') c = '\n';
            else if (c == 'x') {
                int high = in->at < in->end ? *in->at++ : 0, low = in->at < in->end ? *in->at++ : 0;
                high = high >= 'A' ? high - 'A' + 10 : high - '0';
                low = low >= 'A' ? low - 'A' + 10 : low - '0';
                c = (high & 15) << 4 | (low & 15);
            }
        }
        if (used + 1 < cap) out[used++] = (char)c;
        else fsdpi_plan_expect(in, "a shorter name");
    }
    out[used] = 0;
    fsdpi_plan_need(in, "'");
}

// A unit by its name; -1: " model".
static int fsdpi_plan_read_unit(fsdpi_plan_in *in) {
    char name[512];
    if (fsdpi_plan_take(in, " model")) return -1;
    fsdpi_plan_need(in, " ");
    const char *at = in->at;
    fsdpi_plan_name(in, name, sizeof name);
    for (int u = 0; u < in->l->num_units && !in->status; u++)
        if (strcmp(in->l->units[u].name, name) == 0) return u;
    in->at = at;
    fsdpi_plan_expect(in, "the name of a unit");
    return 0;
}

static int fsdpi_plan_place_in(fsdpi_plan_in *in) {
    fsdpi_plan_need(in, " ");
    if (fsdpi_plan_take(in, "slot ")) return fsdpi_plan_index_of(in, in->l->num_slots, "a slot");
    return -1 - fsdpi_plan_choose(in, fsdpi_plan_blocks,
                                  (int)(sizeof fsdpi_plan_blocks / sizeof *fsdpi_plan_blocks),
                                  "slot, shards, grads, host, none, other, or held_ and a pool");
}

static int fsdpi_plan_label_in(fsdpi_plan_in *in) {
    const char *names[FSDP_LABEL_COUNT];
    for (int i = 0; i < FSDP_LABEL_COUNT; i++) names[i] = fsdpi_plan_label(i);
    return fsdpi_plan_choose(in, names, FSDP_LABEL_COUNT, "the name of a label");
}
static int fsdpi_plan_kind_in(fsdpi_plan_in *in) {
    const char *names[FSDP_OP_COUNT];
    for (int i = 0; i < FSDP_OP_COUNT; i++) names[i] = fsdp_op_name(i);
    return fsdpi_plan_choose(in, names, FSDP_OP_COUNT, "the name of an op");
}
static int fsdpi_plan_dtype_in(fsdpi_plan_in *in) {
    const char *names[FSDP_DTYPE_COUNT];
    for (int i = 0; i < FSDP_DTYPE_COUNT; i++) names[i] = fsdp_dtype_name((fsdp_dtype)i);
    return fsdpi_plan_choose(in, names, FSDP_DTYPE_COUNT, "a dtype");
}
static int fsdpi_plan_call_in(fsdpi_plan_in *in) {
    const char *names[FSDP_CALL_FINALIZE + 1];
    for (int i = 0; i <= FSDP_CALL_FINALIZE; i++) names[i] = fsdpi_plan_call_name(i);
    return fsdpi_plan_choose(in, names, FSDP_CALL_FINALIZE + 1, "a call of a step");
}

/* -------------------------------------------------------------------------------------------- */

static void fsdpi_plan_read_units(fsdpi_plan_in *in) {
    fsdpi_plan_listing *l = in->l;
    if (!in->status)
        in->status = fsdpi_plan_alloc(in->model, (size_t)l->num_units * sizeof *l->units,
                                      (void **)&l->units);
    for (int u = 0; u < l->num_units && !in->status; u++) {
        char name[512];
        fsdpi_plan_need(in, "unit ");
        if (fsdpi_plan_int(in) != u) fsdpi_plan_expect(in, "units in order");
        fsdpi_plan_need(in, " ");
        fsdpi_plan_name(in, name, sizeof name);
        fsdpi_plan_need(in, " gather ");
        l->units[u].gather_bytes = fsdpi_plan_number(in, INT64_MAX);
        fsdpi_plan_need(in, " grad ");
        l->units[u].grad_bytes = fsdpi_plan_number(in, INT64_MAX);
        fsdpi_plan_need(in, " reads ");
        l->units[u].reads = fsdpi_plan_choose(in, fsdpi_plan_readings, 4, "what it reads");
        fsdpi_plan_need(in, "\n");
        if (!in->status)
            in->status = fsdpi_plan_string(in->model, name, strlen(name), &l->units[u].name);
    }
}

static void fsdpi_plan_read_head(fsdpi_plan_in *in) {
    fsdpi_plan_listing *l = in->l;
    fsdpi_plan_need(in, "fsdp plan 1");
    fsdpi_plan_need(in, "\nmodel ");
    l->model = fsdpi_plan_hex(in, 16);
    fsdpi_plan_need(in, " units ");
    l->num_units = (int32_t)fsdpi_plan_number(in, FSDPI_PLAN_MOST_UNITS);
    fsdpi_plan_need(in, " params ");
    l->num_params = fsdpi_plan_int(in);
    fsdpi_plan_need(in, " shards ");
    l->shards = fsdpi_plan_int(in);
    fsdpi_plan_need(in, " replicas ");
    l->replicas = fsdpi_plan_int(in);
    fsdpi_plan_need(in, " mode ");
    l->mode = fsdpi_plan_choose(in, fsdpi_plan_modes, FSDPI_PLAN_MODES, "inline, lanes or streams");
    fsdpi_plan_need(in, "\nkind ");
    l->kind = fsdpi_plan_hex(in, 16);
    fsdpi_plan_need(in, " calls ");
    l->num_calls = fsdpi_plan_int(in);
    fsdpi_plan_need(in, " forward ");
    l->forward_calls = fsdpi_plan_int(in);
    fsdpi_plan_need(in, "\nbytes ");
    l->bytes = fsdpi_plan_number(in, INT64_MAX);
    fsdpi_plan_need(in, " bound ");
    l->bound = fsdpi_plan_number(in, INT64_MAX);
    fsdpi_plan_need(in, " by_calls ");
    l->by_calls = fsdpi_plan_number(in, INT64_MAX);
    static const char *const words[4] = {"\ncount gathers ", " reductions ", " replicas ", " ops "};
    int32_t *const counts[4] = {l->gathers, l->reductions, l->replica_ops, l->ops};
    for (int i = 0; i < 8; i++) {
        fsdpi_plan_need(in, i % 2 ? " " : words[i / 2]);
        counts[i / 2][i % 2] = fsdpi_plan_int(in);
    }
    for (int i = 0; i < 4; i++) {
        fsdpi_plan_need(in, i == 0 ? "\nread gathers " : i == 2 ? " reductions " : " ");
        (i < 2 ? l->gather_bytes : l->reduce_bytes)[i % 2] = (uint64_t)fsdpi_plan_number(in,
                                                                                         INT64_MAX);
    }
    fsdpi_plan_need(in, "\n");
    if (l->shards < 1 || l->replicas < 1) fsdpi_plan_expect(in, "shards and replicas of 1 or more");
    if (l->num_calls > (in->end - in->text) / 8 || l->num_units > (in->end - in->text) / 8)
        fsdpi_plan_expect(in, "as many calls and units as the text has");
    fsdpi_plan_read_units(in);
}

static void fsdpi_plan_read_slots(fsdpi_plan_in *in) {
    fsdpi_plan_listing *l = in->l;
    while (!in->status && fsdpi_plan_take(in, "slot ")) {
        fsdpi_plan_slot slot;
        memset(&slot, 0, sizeof slot);
        if (fsdpi_plan_int(in) != l->num_slots) fsdpi_plan_expect(in, "slots in order");
        fsdpi_plan_need(in, " ");
        slot.pool = fsdpi_plan_choose(in, fsdpi_plan_pools, 7, "the name of a pool");
        slot.offset = -1;
        if (fsdpi_plan_take(in, " at ")) slot.offset = fsdpi_plan_number(in, INT64_MAX / 2);
        else fsdpi_plan_need(in, " lasts");
        fsdpi_plan_need(in, " bytes ");
        slot.bytes = fsdpi_plan_number(in, INT64_MAX / 2);
        fsdpi_plan_need(in, "\n");
        if (!in->status)
            in->status = fsdpi_plan_grow(in->model, (void **)&l->slots, l->num_slots, &l->cap_slots,
                                         sizeof slot);
        if (!in->status) l->slots[l->num_slots++] = slot;
        in->ops = 1;
    }
}

// Units of an act, joined in one group; its reason.
static void fsdpi_plan_read_act(fsdpi_plan_in *in, int call, int what) {
    fsdpi_plan_listing *l = in->l;
    int first = l->choice.num_acts, late = what != FSDPI_PLAN_GATHER;
    if (what == FSDPI_PLAN_GATHER && fsdpi_plan_take(in, " behind")) late = 1;
    do {
        fsdpi_plan_act act;
        memset(&act, 0, sizeof act);
        act.call = call;
        act.what = (uint8_t)what;
        act.late = (uint8_t)late;
        act.unit = fsdpi_plan_read_unit(in);
        if (act.unit < 0) fsdpi_plan_expect(in, "the name of a unit");
        if (!in->status)
            in->status = fsdpi_plan_grow(in->model, (void **)&l->choice.acts, l->choice.num_acts,
                                         &l->choice.cap_acts, sizeof act);
        if (!in->status) l->choice.acts[l->choice.num_acts++] = act;
        if (l->choice.num_acts - first > FSDPI_PLAN_JOINED) fsdpi_plan_expect(in, "fewer units");
    } while (!in->status && (fsdpi_plan_peek(in, " '")));
    fsdpi_plan_need(in, " why ");
    int why = fsdpi_plan_choose(in, fsdpi_plan_reasons, FSDPI_PLAN_WHY_COUNT, "a reason");
    int at = fsdpi_plan_take(in, " at call ") ? fsdpi_plan_index_of(in, l->num_calls, "a call")
                                              : -1;
    fsdpi_plan_need(in, "\n");
    for (int i = first; i < l->choice.num_acts && !in->status; i++) {
        l->choice.acts[i].why = (uint8_t)why;
        l->choice.acts[i].at = at;
        l->choice.acts[i].group = l->choice.num_acts - first > 1 ? first : -1;
    }
}

static void fsdpi_plan_read_op(fsdpi_plan_in *in, fsdpi_plan_line *line) {
    fsdpi_plan_listing *l = in->l;
    if (fsdpi_plan_int(in) != l->num_lines) fsdpi_plan_expect(in, "ops numbered in order");
    fsdpi_plan_need(in, " ");
    line->kind = (uint8_t)fsdpi_plan_kind_in(in);
    fsdpi_plan_need(in, " ");
    line->label = (uint8_t)fsdpi_plan_label_in(in);
    do {
        int unit = fsdpi_plan_read_unit(in);
        if (!in->status) in->status = fsdpi_plan_member_add(in->model, l, unit, -1, -1);
        line->num_members++;
    } while (!in->status && fsdpi_plan_peek(in, " '"));
    fsdpi_plan_need(in, " ");
    line->stream = (uint8_t)fsdpi_plan_choose(in, fsdpi_plan_streams, FSDP_STREAM_COUNT,
                                              "a stream");
    fsdpi_plan_need(in, " ");
    line->count = (uint64_t)fsdpi_plan_number(in, INT64_MAX);
    fsdpi_plan_need(in, " ");
    line->bytes = (uint64_t)fsdpi_plan_number(in, INT64_MAX);
    fsdpi_plan_need(in, " ");
    line->dtype = (uint8_t)fsdpi_plan_dtype_in(in);
    fsdpi_plan_need(in, " ");
    line->out_dtype = (uint8_t)fsdpi_plan_dtype_in(in);
    for (int i = 0; i < line->num_members && !in->status; i++) {
        l->members[line->members + i].src = fsdpi_plan_place_in(in);
        l->members[line->members + i].dst = fsdpi_plan_place_in(in);
    }
    if (fsdpi_plan_take(in, " scale ")) {
        char number[64];
        size_t used = 0;
        while (in->at<in->end && * in->at> ' ' && used + 1 < sizeof number)
            number[used++] = *in->at++;
        number[used] = 0;
        line->scale = strtod(number, NULL);
    }
    line->accumulate = (uint8_t)fsdpi_plan_take(in, " add");
    line->in_place = (uint8_t)fsdpi_plan_take(in, " in_place");
    if (fsdpi_plan_take(in, " comm ")) {
        char name[FSDPI_PLAN_COMM];
        size_t used = 0;
        while (in->at<in->end && * in->at> ' ' && used + 1 < sizeof name) name[used++] = *in->at++;
        name[used] = 0;
        line->comm = fsdpi_plan_comm_add(l, name);
        if (line->comm < 0) fsdpi_plan_expect(in, "fewer groups");
    }
    fsdpi_plan_need(in, " #");
    line->digest = (uint32_t)fsdpi_plan_hex(in, 8);
}

// A line about a slot: the unit, and the slot.
static void fsdpi_plan_read_slot_line(fsdpi_plan_in *in, fsdpi_plan_line *line, int kind) {
    int unit = fsdpi_plan_read_unit(in), place = fsdpi_plan_place_in(in);
    line->kind = (uint8_t)kind;
    line->num_members = 1;
    if (kind == FSDP_OP_RELEASE) {
        fsdpi_plan_need(in, " ");
        line->stream = (uint8_t)fsdpi_plan_choose(in, fsdpi_plan_streams, FSDP_STREAM_COUNT,
                                                  "a stream");
    }
    if (!in->status)
        in->status = fsdpi_plan_member_add(in->model, in->l, unit,
                                           kind == FSDP_OP_RELEASE ? place : FSDPI_PLAN_NONE,
                                           kind == FSDP_OP_RELEASE ? FSDPI_PLAN_NONE : place);
}

// One line of a call, without its two blanks; 0: it is none.
static int fsdpi_plan_read_line(fsdpi_plan_in *in, int call) {
    static const char *const words[] = {"op ", "acquire", "release", "wrote"};
    static const uint8_t kinds[] = {0, FSDP_OP_ACQUIRE, FSDP_OP_RELEASE, FSDP_OP_WROTE};
    fsdpi_plan_line line;
    for (int what = 0; what < FSDPI_PLAN_ACT_COUNT; what++)
        if (fsdpi_plan_take(in, fsdpi_plan_words[what])) {
            fsdpi_plan_read_act(in, call, what);
            return 1;
        }
    memset(&line, 0, sizeof line);
    line.call = call;
    line.members = in->l->num_members;
    line.comm = -1;
    line.scale = 1;
    for (int i = 0; i < 4; i++) {
        if (!fsdpi_plan_take(in, words[i])) continue;
        if (i == 0) fsdpi_plan_read_op(in, &line);
        else fsdpi_plan_read_slot_line(in, &line, kinds[i]);
        fsdpi_plan_need(in, "\n");
        if (!in->status) in->status = fsdpi_plan_line_add(in->model, in->l, &line);
        in->ops = 1;
        return 1;
    }
    return 0;
}

static void fsdpi_plan_read_calls(fsdpi_plan_in *in) {
    fsdpi_plan_listing *l = in->l;
    if (!in->status)
        in->status = fsdpi_plan_alloc(in->model, (size_t)l->num_calls * sizeof *l->calls,
                                      (void **)&l->calls);
    for (int c = 0; c < l->num_calls && !in->status; c++) {
        fsdpi_plan_need(in, "call ");
        if (fsdpi_plan_int(in) != c) fsdpi_plan_expect(in, "calls in order");
        fsdpi_plan_need(in, " ");
        l->calls[c].call = fsdpi_plan_call_in(in);
        l->calls[c].index = -1;
        if ((l->calls[c].call == FSDP_CALL_FINALIZE) != (c + 1 == l->num_calls))
            fsdpi_plan_expect(in, "finalize_backward as the last call, and nowhere else");
        if (c + 1 < l->num_calls) l->calls[c].index = fsdpi_plan_read_unit(in);
        if (c + 1 < l->num_calls && l->calls[c].index < 0)
            fsdpi_plan_expect(in, "the name of a unit");
        fsdpi_plan_need(in, "\n");
        while (!in->status && fsdpi_plan_take(in, "  "))
            if (!fsdpi_plan_read_line(in, c))
                fsdpi_plan_expect(in, "gather, keep, free, collect, reduce, op, acquire, release "
                                      "or wrote");
    }
}

// The end of a text: its hash, or zeros, which say that it was edited.
static fsdp_status fsdpi_plan_check_end(fsdp_world *w, const char *text, size_t length) {
    static const char word[] = "end 0123456789abcdef\n";
    const size_t size = sizeof word - 1;
    uint64_t hash = 0xCBF29CE484222325u, given = 0;
    int bad = length < size || memcmp(text + length - size, "end ", 4) != 0 ||
              text[length - 1] != '\n' || (length > size && text[length - size - 1] != '\n');
    for (size_t i = length - size + 4; i + 1 < length && !bad; i++) {
        int c = text[i], digit = c >= '0' && c <= '9' ? c - '0' : c - 'a' + 10;
        bad = digit < 0 || digit > 15;
        given = given << 4 | (uint64_t)digit;
    }
    for (size_t i = 0; i + size < length && !bad; i++)
        hash = (hash ^ (unsigned char)text[i]) * 0x100000001B3u;
    if (!bad && (given == hash || given == 0)) return FSDP_OK;
    return fsdp_fail(w, FSDP_ERR_CORRUPT,
                     bad ? "[E983] plan: the text does not end with 'end' and its hash"
                         : "[E984] plan: the text has hash %016llx, and ends with %016llx: if you "
                           "have edited it, end it with 16 zeros",
                     (unsigned long long)hash, (unsigned long long)given);
}

// Where two texts differ first: as if that had been expected.
static void fsdpi_plan_same_text(fsdpi_plan_in *in, const char *printed, size_t length,
                                 const char *expected) {
    size_t size = (size_t)(in->end - in->text), i = 0;
    while (i < size && i < length && in->text[i] == printed[i]) i++;
    if (i == size && i == length) return;
    size_t line = i;
    while (line > 0 && printed[line - 1] != '\n') line--;
    char words[200];
    const char *stop = (const char *)memchr(printed + line, '\n', length - line);
    snprintf(words, sizeof words, "%s'%.*s'", expected,
             (int)(stop ? stop - printed - (ptrdiff_t)line : (ptrdiff_t)(length - line)) > 150
                 ? 150
                 : (int)(stop ? stop - printed - (ptrdiff_t)line : (ptrdiff_t)(length - line)),
             printed + line);
    in->at = in->text + (i < size ? i : size);
    fsdpi_plan_expect(in, words);
}

// Prints a listing into memory of its own; the text without its last line.
static fsdp_status fsdpi_plan_print(fsdp_model *m, const fsdpi_plan_listing *l, int what,
                                    char **out, size_t *length) {
    fsdpi_plan_out o = {NULL, 0, 0, 0};
    fsdpi_plan_put_all(&o, l, what);
    size_t size = o.used;
    fsdp_status status = fsdpi_plan_alloc(m, size + 1, (void **)out);
    if (status) return status;
    o.buf = *out;
    o.cap = size + 1;
    o.used = 0;
    fsdpi_plan_put_all(&o, l, what);
    *length = size - (sizeof "end 0123456789abcdef\n" - 1);
    return FSDP_OK;
}

/* A listing from a text. *ops: whether it has ops. m NULL: memory from malloc. The caller ends the
   listing, after a failure, too. */
static fsdp_status fsdpi_plan_parse(fsdp_model *m, const char *text, size_t length,
                                    fsdpi_plan_listing *l, int *ops) {
    fsdpi_plan_in in;
    char *printed = NULL;
    size_t size = 0;
    memset(l, 0, sizeof *l);
    memset(&in, 0, sizeof in);
    in.model = m;
    in.world = fsdp_model_world(m);
    if (length > FSDPI_PLAN_MOST)
        return fsdp_fail(in.world, FSDP_ERR_INVALID_ARG,
                         "[E985] plan: the text has %llu bytes, expected at most 64 MiB",
                         (unsigned long long)length);
    in.status = fsdpi_plan_check_end(in.world, text, length);
    if (in.status) return in.status;
    in.text = in.at = text;
    in.end = text + length - (sizeof "end 0123456789abcdef\n" - 1);
    in.l = l;
    fsdpi_plan_read_head(&in);
    fsdpi_plan_read_slots(&in);
    fsdpi_plan_read_calls(&in);
    if (!in.status && in.at != in.end) fsdpi_plan_expect(&in, "a call, or the end");
    if (!in.status)
        in.status = fsdpi_plan_print(m, l, in.ops ? FSDP_PLAN_TEXT_OPS : FSDP_PLAN_TEXT_DECISIONS,
                                     &printed, &size);
    if (!in.status) fsdpi_plan_same_text(&in, printed, size, "");
    fsdpi_plan_free(m, printed);
    *ops = in.ops;
    return in.status;
}


/* ==== plan/prove.h ==========================================================================
   the proof that a plan may run */

// Owns: the verdict on listings. What is proven, and what is assumed: docs/plan.md. A listing is
// walked in the order of issue; the waits are those that the core derives from the buffers. Each
// stream carries a vector clock, each piece of memory the clocks of its last accesses. COMPUTE is
// the caller, too: it reads gathered parameters until they are released, and writes gradients until
// WROTE.

// An access: by whom, at which of its ticks, and for the text at which line.
typedef struct fsdpi_plan_touch {
    int32_t stream, line, call; // line -1: the caller's own
    uint32_t tick;              // 0: none
} fsdpi_plan_touch;

typedef struct fsdpi_plan_clock {
    uint32_t at[FSDP_STREAM_COUNT];
} fsdpi_plan_clock;

typedef struct fsdpi_plan_mark { // an event
    fsdpi_plan_clock clock;
    int32_t stream, is_set;
} fsdpi_plan_mark;

// A slot, or a unit's part of a block.
typedef struct fsdpi_plan_region {
    fsdpi_plan_touch write, read[FSDP_STREAM_COUNT];
    fsdpi_plan_mark ready, avail; // of a slot, or of a whole block
    int32_t unit, held;           // who holds the slot
    int32_t full, version;        // gathered: 1: issued, 2: waited for, 3: read; of which shards
    int32_t grads;                // FSDPI_PLAN_EMPTY, ...
    int32_t summed;               // over replicas, in place
} fsdpi_plan_region;

// Gradients in a slot.
enum {
    FSDPI_PLAN_EMPTY,
    FSDPI_PLAN_TOUCHED, // the caller has written them, and nothing says so
    FSDPI_PLAN_FRESH,   // no reduction has read them
    FSDPI_PLAN_TAKEN    // one has
};

// Slots of the arena by offset, to find those that share memory.
typedef struct fsdpi_plan_reach {
    int64_t offset, end; // end: the farthest one up to here
    int32_t slot;
} fsdpi_plan_reach;

typedef struct fsdpi_plan_prover {
    fsdp_model *model;
    const fsdpi_plan_listing *l;
    fsdp_plan_proof *out;
    fsdpi_plan_clock now[FSDP_STREAM_COUNT];
    fsdpi_plan_region *slots, *shards, *grads; // [fsdpi_plan_events], [units], [units]
    fsdpi_plan_reach *reach;                   // [num_reach]
    int32_t *upto, num_reach;                  // [slots] the last one in `reach` that may share
    int32_t *version, *gathered, *written;     // [units] of shards; slots of parameters, gradients
    int32_t *collects, *opened;                // [units] gathers from others; the caller reads now
    // By group and label: the first collective of this sort; tick 0: none.
    fsdpi_plan_touch first[FSDPI_PLAN_COMMS][FSDP_LABEL_COUNT];
    int64_t held_bytes, arena;
    int32_t call, line, walk;
} fsdpi_plan_prover;

static int fsdpi_plan_actor(const fsdpi_plan_prover *v, int stream) {
    return v->l->mode == FSDPI_PLAN_INLINE ? FSDP_STREAM_COMPUTE : stream;
}

static void fsdpi_plan_say_call(fsdpi_plan_out *o, const fsdpi_plan_listing *l, int call) {
    fsdpi_plan_put(o, "call %d %s", call, fsdpi_plan_call_name(l->calls[call].call));
    if (l->calls[call].index >= 0) fsdpi_plan_put_unit(o, l, l->calls[call].index);
}

static void fsdpi_plan_say_line(fsdpi_plan_out *o, const fsdpi_plan_listing *l, int line) {
    const fsdpi_plan_line *at = &l->lines[line];
    const fsdpi_plan_member *m = &l->members[at->members];
    fsdpi_plan_put(o, "op %d %s", line, fsdp_op_name(at->kind));
    fsdpi_plan_put_unit(o, l, m->unit);
    if (at->num_members > 1) {
        fsdpi_plan_put(o, " ..");
        fsdpi_plan_put_unit(o, l, m[at->num_members - 1].unit);
    }
}

static void fsdpi_plan_refuted(fsdpi_plan_prover *v, int how) {
    if (!v->out->refuted) v->out->refuted = how;
}

// The two lines of a counterexample go where the verdict is; only the first one counts.
static fsdpi_plan_out fsdpi_plan_counter(const fsdpi_plan_prover *v) {
    fsdpi_plan_out o = {v->out->text, sizeof v->out->text, 0, 0};
    if (v->out->refuted) o.buf = NULL, o.cap = 0;
    return o;
}

static void fsdpi_plan_say_place(fsdpi_plan_out *o, const fsdpi_plan_prover *v, int place) {
    const fsdpi_plan_slot *slot = place >= 0 ? &v->l->slots[place] : NULL;
    fsdpi_plan_put_place(o, place);
    if (slot && slot->offset >= 0)
        fsdpi_plan_put(o, " [%lld, %lld)", (long long)slot->offset,
                       (long long)(slot->offset + slot->bytes));
}

static void fsdpi_plan_say_touch(fsdpi_plan_out *o, const fsdpi_plan_prover *v,
                                 const fsdpi_plan_touch *t) {
    fsdpi_plan_say_call(o, v->l, t->call);
    fsdpi_plan_put(o, ":");
    if (t->line < 0) fsdpi_plan_put(o, " the caller on COMPUTE");
    else {
        fsdpi_plan_put(o, " ");
        fsdpi_plan_say_line(o, v->l, t->line);
        fsdpi_plan_put(o, " on %s", fsdpi_plan_streams[t->stream]);
    }
}

// Two accesses, one of them a write, that nothing orders.
static void fsdpi_plan_race(fsdpi_plan_prover *v, const fsdpi_plan_touch *now, int place,
                            int writes, const fsdpi_plan_touch *then, int wrote) {
    fsdpi_plan_out o = fsdpi_plan_counter(v);
    fsdpi_plan_say_touch(&o, v, now);
    fsdpi_plan_put(&o, writes ? " writes" : " reads");
    fsdpi_plan_say_place(&o, v, place);
    fsdpi_plan_put(&o, "\n");
    fsdpi_plan_say_touch(&o, v, then);
    fsdpi_plan_put(&o, " has %s it last, and no event lies between", wrote ? "written" : "read");
    fsdpi_plan_refuted(v, FSDP_PROOF_RACE);
}

static int fsdpi_plan_is_ordered(const fsdpi_plan_prover *v, const fsdpi_plan_touch *then,
                                 int stream) {
    return then->tick <= v->now[stream].at[then->stream];
}

static void fsdpi_plan_check_touch(fsdpi_plan_prover *v, const fsdpi_plan_region *r, int place,
                                   const fsdpi_plan_touch *now, int writes) {
    if (!fsdpi_plan_is_ordered(v, &r->write, now->stream))
        fsdpi_plan_race(v, now, place, writes, &r->write, 1);
    for (int s = 0; s < FSDP_STREAM_COUNT && writes; s++)
        if (!fsdpi_plan_is_ordered(v, &r->read[s], now->stream))
            fsdpi_plan_race(v, now, place, writes, &r->read[s], 0);
}

static int fsdpi_plan_overlap(const fsdpi_plan_slot *a, const fsdpi_plan_slot *b) {
    return a->offset >= 0 && b->offset >= 0 && a->offset < b->offset + b->bytes &&
           b->offset < a->offset + a->bytes;
}

static int fsdpi_plan_by_offset(const void *a, const void *b) {
    int64_t x = ((const fsdpi_plan_reach *)a)->offset, y = ((const fsdpi_plan_reach *)b)->offset;
    return (x > y) - (x < y);
}

static fsdp_status fsdpi_plan_find_reach(fsdpi_plan_prover *v) {
    const fsdpi_plan_listing *l = v->l;
    size_t num = (size_t)l->num_slots;
    fsdp_status status = fsdpi_plan_alloc(v->model, num * sizeof *v->reach, (void **)&v->reach);
    if (!status) status = fsdpi_plan_alloc(v->model, num * sizeof *v->upto, (void **)&v->upto);
    if (status) return status;
    for (int i = 0; i < l->num_slots; i++) {
        const fsdpi_plan_slot *slot = &l->slots[i];
        fsdpi_plan_reach reach = {slot->offset, slot->offset + slot->bytes, i};
        if (slot->offset >= 0) v->reach[v->num_reach++] = reach;
    }
    qsort(v->reach, (size_t)v->num_reach, sizeof *v->reach, fsdpi_plan_by_offset);
    for (int i = 1; i < v->num_reach; i++)
        if (v->reach[i].end < v->reach[i - 1].end) v->reach[i].end = v->reach[i - 1].end;
    for (int i = 0; i < l->num_slots; i++) {
        int64_t end = l->slots[i].offset + l->slots[i].bytes;
        int low = 0, high = l->slots[i].offset >= 0 ? v->num_reach : 0;
        while (low < high) { // how many begin before its end
            int middle = low + (high - low) / 2;
            if (v->reach[middle].offset < end) low = middle + 1;
            else high = middle;
        }
        v->upto[i] = low - 1;
    }
    return FSDP_OK;
}

// The next slot, from `reach[*at]` down, that shares memory with one; -1: there is none.
static int fsdpi_plan_shares(const fsdpi_plan_prover *v, int place, int *at) {
    const fsdpi_plan_slot *slots = v->l->slots;
    while (*at >= 0 && v->reach[*at].end > slots[place].offset) {
        int i = v->reach[(*at)--].slot;
        if (i != place && fsdpi_plan_overlap(&slots[i], &slots[place])) return i;
    }
    return -1;
}

// An access of a unit's parameters or gradients, or of a slot: checked against all that share
// memory.
static void fsdpi_plan_access(fsdpi_plan_prover *v, int unit, int place, int stream, int line,
                              int writes) {
    const fsdpi_plan_listing *l = v->l;
    fsdpi_plan_touch now = {stream, line, v->call, v->now[stream].at[stream]};
    int event = fsdpi_plan_event_of(l, unit, place),
        is_block = place == FSDPI_PLAN_SHARDS || place == FSDPI_PLAN_GRADS;
    if (event < 0 || (is_block && unit < 0)) return;
    fsdpi_plan_region *r = !is_block                    ? &v->slots[event]
                           : place == FSDPI_PLAN_SHARDS ? &v->shards[unit]
                                                        : &v->grads[unit];
    v->out->accesses++;
    for (int i, at = place >= 0 ? v->upto[place] : -1; (i = fsdpi_plan_shares(v, place, &at)) >= 0;)
        fsdpi_plan_check_touch(v, &v->slots[i], place, &now, writes);
    fsdpi_plan_check_touch(v, r, place, &now, writes);
    if (writes) r->write = now;
    else r->read[stream] = now;
}

static void fsdpi_plan_join_clock(fsdpi_plan_prover *v, int stream, const fsdpi_plan_mark *mark) {
    int adds = 0;
    if (!mark->is_set || mark->stream == stream) return;
    for (int s = 0; s < FSDP_STREAM_COUNT; s++) {
        adds |= mark->clock.at[s] > v->now[stream].at[s];
        if (mark->clock.at[s] > v->now[stream].at[s]) v->now[stream].at[s] = mark->clock.at[s];
    }
    v->out->waits++;
    v->out->waits_implied += !adds;
}

static void fsdpi_plan_set_mark(const fsdpi_plan_prover *v, int stream, fsdpi_plan_mark *mark) {
    mark->clock = v->now[stream];
    mark->stream = stream;
    mark->is_set = 1;
}

// What has the events of a place; NULL where there are none.
static fsdpi_plan_region *fsdpi_plan_events_of(fsdpi_plan_prover *v, int unit, int place) {
    int event = fsdpi_plan_event_of(v->l, unit, place);
    return event >= 0 ? &v->slots[event] : NULL;
}

// The three rules of fsdp_emit.
static void fsdpi_plan_derive(fsdpi_plan_prover *v, int stream, const fsdpi_plan_region *src,
                              const fsdpi_plan_region *dst) {
    if (src) fsdpi_plan_join_clock(v, stream, &src->ready);
    if (dst && dst != src)
        fsdpi_plan_join_clock(v, stream, dst->avail.is_set ? &dst->avail : &dst->ready);
}

// One line of words about the line that is looked at, and one about what is wrong.
static void fsdpi_plan_wrong(fsdpi_plan_prover *v, int how, const char *what, int unit, int place) {
    fsdpi_plan_out o = fsdpi_plan_counter(v);
    fsdpi_plan_say_call(&o, v->l, v->call);
    if (v->line >= 0) {
        fsdpi_plan_put(&o, ": ");
        fsdpi_plan_say_line(&o, v->l, v->line);
    }
    fsdpi_plan_put(&o, "\n%s", what);
    if (unit >= 0) fsdpi_plan_put_unit(&o, v->l, unit);
    if (place != FSDPI_PLAN_NONE) fsdpi_plan_say_place(&o, v, place);
    fsdpi_plan_refuted(v, how);
}

/* -------------------------------------------------------------------------------------------- */
// What a line does to slots.

// What a unit's slot has to have; 0: texts do not say.
static int64_t fsdpi_plan_needs(const fsdpi_plan_listing *l, int pool, int unit) {
    if (unit < 0) return 0;
    return pool == FSDP_POOL_GATHER ? l->units[unit].gather_bytes
           : pool == FSDP_POOL_GRAD ? l->units[unit].grad_bytes
                                    : 0;
}

static void fsdpi_plan_see_acquire(fsdpi_plan_prover *v, const fsdpi_plan_member *m) {
    const fsdpi_plan_listing *l = v->l;
    if (m->dst < 0) return;
    fsdpi_plan_region *r = &v->slots[m->dst];
    const fsdpi_plan_slot *slot = &l->slots[m->dst];
    if (r->held) fsdpi_plan_wrong(v, FSDP_PROOF_MEMORY, "the slot is held by", r->unit, m->dst);
    for (int i, at = v->upto[m->dst]; (i = fsdpi_plan_shares(v, m->dst, &at)) >= 0;)
        if (v->slots[i].held)
            fsdpi_plan_wrong(v, FSDP_PROOF_MEMORY, "its memory is held by", v->slots[i].unit, i);
    if (slot->offset >= 0 && slot->offset + slot->bytes > v->arena)
        fsdpi_plan_wrong(v, FSDP_PROOF_MEMORY, "the arena ends before", -1, m->dst);
    r->held = 1;
    r->unit = m->unit;
    r->full = r->summed = 0;
    r->grads = FSDPI_PLAN_EMPTY;
    v->held_bytes += slot->bytes;
    if (v->held_bytes > v->out->bytes) v->out->bytes = v->held_bytes;
    if (v->held_bytes > l->bytes)
        fsdpi_plan_wrong(v, FSDP_PROOF_MEMORY, "slots need more bytes than the plan has, with", -1,
                         m->dst);
    if (slot->bytes < fsdpi_plan_needs(l, slot->pool, m->unit))
        fsdpi_plan_wrong(v, FSDP_PROOF_MEMORY, "the slot is too small for", m->unit, m->dst);
    if (slot->pool == FSDP_POOL_GRAD && m->unit >= 0) v->written[m->unit] = m->dst;
    if (slot->pool != FSDP_POOL_GATHER || m->unit < 0) return;
    v->gathered[m->unit] = m->dst;
}

static void fsdpi_plan_see_release(fsdpi_plan_prover *v, const fsdpi_plan_line *line,
                                   const fsdpi_plan_member *m) {
    int actor = fsdpi_plan_actor(v, line->stream);
    fsdpi_plan_region *r = fsdpi_plan_events_of(v, m->unit, m->src);
    if (r && m->src < 0 && !r->avail.is_set) fsdpi_plan_set_mark(v, actor, &r->avail);
    if (m->src < 0) return;
    if (!r->held) fsdpi_plan_wrong(v, FSDP_PROOF_USE, "nobody holds", -1, m->src);
    else if (r->unit != m->unit)
        fsdpi_plan_wrong(v, FSDP_PROOF_USE, "it is held by", r->unit, m->src);
    if (r->grads == FSDPI_PLAN_TOUCHED || r->grads == FSDPI_PLAN_FRESH)
        fsdpi_plan_wrong(v, FSDP_PROOF_USE, "gradients are in no reduction: those of", m->unit,
                         m->src);
    if (v->l->slots[m->src].pool == FSDP_POOL_GATHER && r->full)
        fsdpi_plan_access(v, m->unit, m->src, FSDP_STREAM_COMPUTE, -1, 0);
    if (!r->avail.is_set) fsdpi_plan_set_mark(v, actor, &r->avail);
    r->held = 0;
    v->held_bytes -= v->l->slots[m->src].bytes;
    if (m->unit >= 0 && v->gathered[m->unit] == m->src) v->gathered[m->unit] = -1;
    if (m->unit >= 0 && v->written[m->unit] == m->src) v->written[m->unit] = -1;
}

// Has a unit gradients with elements? What is in the slots of another one is not looked at.
static int fsdpi_plan_has_grads(const fsdpi_plan_prover *v, int unit) {
    return unit < 0 || v->l->units[unit].grad_bytes > 0;
}

static void fsdpi_plan_see_wrote(fsdpi_plan_prover *v, const fsdpi_plan_member *m) {
    fsdpi_plan_region *r = fsdpi_plan_events_of(v, m->unit, m->dst);
    if (!r) return;
    fsdpi_plan_access(v, m->unit, m->dst, FSDP_STREAM_COMPUTE, -1, 1);
    fsdpi_plan_set_mark(v, FSDP_STREAM_COMPUTE, &r->ready);
    if (m->dst < 0) return;
    if (!v->slots[m->dst].held) fsdpi_plan_wrong(v, FSDP_PROOF_USE, "nobody holds", -1, m->dst);
    else if (v->slots[m->dst].unit != m->unit)
        fsdpi_plan_wrong(v, FSDP_PROOF_USE, "it is held by", v->slots[m->dst].unit, m->dst);
    if (v->slots[m->dst].grads == FSDPI_PLAN_TAKEN)
        fsdpi_plan_wrong(v, FSDP_PROOF_USE, "a reduction has read gradients: those of", m->unit,
                         m->dst);
    if (fsdpi_plan_has_grads(v, m->unit)) v->slots[m->dst].grads = FSDPI_PLAN_FRESH;
}

// Gradients in a slot: zeroed, brought on, reduced.
static void fsdpi_plan_see_grads(fsdpi_plan_prover *v, const fsdpi_plan_line *line,
                                 const fsdpi_plan_member *m) {
    fsdpi_plan_region *src = m->src >= 0 ? &v->slots[m->src] : NULL,
                      *dst = m->dst >= 0 ? &v->slots[m->dst] : NULL;
    int sums = line->label == FSDP_LABEL_ACC || line->label == FSDP_LABEL_REDUCE ||
               line->label == FSDP_LABEL_PARTIAL || line->label == FSDP_LABEL_REPLICAS ||
               line->label == FSDP_LABEL_RED_OUT;
    if (!fsdpi_plan_has_grads(v, m->unit)) {
        if (line->kind == FSDP_OP_COPY && line->label == FSDP_LABEL_ACC) // a zero may be of flags
            fsdpi_plan_wrong(v, FSDP_PROOF_USE,
                             "its gradients have no elements, says the head:", m->unit,
                             FSDPI_PLAN_NONE);
        return;
    }
    if (dst && line->label == FSDP_LABEL_GRADS && dst->grads != FSDPI_PLAN_EMPTY &&
        line->kind == FSDP_OP_ZERO)
        fsdpi_plan_wrong(v, FSDP_PROOF_USE, "gradients are there already: those of", m->unit,
                         m->dst);
    if (dst && line->label == FSDP_LABEL_USERS && dst->grads != FSDPI_PLAN_FRESH)
        fsdpi_plan_wrong(v, FSDP_PROOF_USE, "no gradients wait there: those of", m->unit, m->dst);
    if (dst && dst->summed && line->kind != FSDP_OP_USE && line->kind != FSDP_OP_CALL &&
        (src == dst || line->label == FSDP_LABEL_USERS))
        fsdpi_plan_wrong(v, FSDP_PROOF_USE, "they are summed over replicas already: those of",
                         m->unit, m->dst);
    if (!sums || line->kind == FSDP_OP_USE) return;
    if (dst && line->kind == FSDP_OP_ZERO && dst->grads != FSDPI_PLAN_EMPTY)
        fsdpi_plan_wrong(v, FSDP_PROOF_USE, "gradients are there already: those of", m->unit,
                         m->dst);
    if (dst && m->src <= FSDPI_PLAN_HELD) dst->grads = FSDPI_PLAN_FRESH; // they wait since before
    if (!src) return;
    // Copies bring parts of a slot on, so that there may be several; a collective takes it whole.
    if (src->grads != FSDPI_PLAN_FRESH &&
        (src->grads != FSDPI_PLAN_TAKEN || line->kind != FSDP_OP_COPY || src == dst))
        fsdpi_plan_wrong(v, FSDP_PROOF_USE, "no gradients wait there: those of", m->unit, m->src);
    if (src != dst) src->grads = FSDPI_PLAN_TAKEN;
    if (src != dst && dst) dst->grads = FSDPI_PLAN_FRESH;
    if (dst) dst->summed = line->label == FSDP_LABEL_REPLICAS;
}

static void fsdpi_plan_see_gather(fsdpi_plan_prover *v, const fsdpi_plan_line *line,
                                  const fsdpi_plan_member *m) {
    int fills = line->kind == FSDP_OP_ALL_GATHER ||
                (m->unit >= 0 && !v->collects[m->unit] && line->label == FSDP_LABEL_COPY_IN);
    int copies = line->kind == FSDP_OP_COPY && line->label == FSDP_LABEL_COPY_IN;
    int gathers = line->label == FSDP_LABEL_GATHER || line->label == FSDP_LABEL_COPY_IN ||
                  line->label == FSDP_LABEL_COPY_OUT || line->label == FSDP_LABEL_PRE_GATHER ||
                  line->label == FSDP_LABEL_POST_GATHER || line->label == FSDP_LABEL_NONE;
    if (m->dst >= 0 && !gathers && v->l->slots[m->dst].pool == FSDP_POOL_GATHER)
        fsdpi_plan_wrong(v, FSDP_PROOF_USE, "parameters lie there: those of", m->unit, m->dst);
    if (m->dst >= 0 && m->unit >= 0 && v->slots[m->dst].full && copies && v->collects[m->unit])
        fsdpi_plan_wrong(v, FSDP_PROOF_USE, "it is gathered already:", m->unit, m->dst);
    if (m->dst >= 0 && line->kind == FSDP_OP_COPY && line->label == FSDP_LABEL_COPY_OUT &&
        (v->slots[m->dst].full == 0 || v->slots[m->dst].full == 3))
        fsdpi_plan_wrong(v, FSDP_PROOF_USE,
                         v->slots[m->dst].full ? "it is in use:" : "nothing was gathered:", m->unit,
                         m->dst);
    if (m->dst >= 0 && fills && m->unit >= 0) {
        if (v->slots[m->dst].full && line->kind == FSDP_OP_ALL_GATHER)
            fsdpi_plan_wrong(v, FSDP_PROOF_USE, "it is gathered already:", m->unit, m->dst);
        v->slots[m->dst].full = 1;
        v->slots[m->dst].version = v->version[m->unit];
    }
    if (line->kind == FSDP_OP_USE && line->label == FSDP_LABEL_GATHER && m->src >= 0 &&
        line->stream == FSDP_STREAM_COMPUTE && v->slots[m->src].full == 1)
        v->slots[m->src].full = 2;
}

/* Collectives of one sort on a group are on one stream, so that they begin in the order of issue on
   all ranks. A world with one communicator runs gathers and reductions on two streams; then the
   backend keeps the order of issue. */
static void fsdpi_plan_see_comm(fsdpi_plan_prover *v, const fsdpi_plan_line *line) {
    if (line->comm < 0) return;
    fsdpi_plan_touch now = {line->stream, v->line, v->call, 1},
                     *first = &v->first[line->comm][line->label];
    if (!first->tick) *first = now;
    if (first->stream == now.stream) return;
    fsdpi_plan_out o = fsdpi_plan_counter(v);
    fsdpi_plan_say_touch(&o, v, &now);
    fsdpi_plan_put(&o, " runs on %s\n", v->l->comms[line->comm]);
    fsdpi_plan_say_touch(&o, v, first);
    fsdpi_plan_put(&o, " is of the same sort, and nothing orders the two on all ranks");
    fsdpi_plan_refuted(v, FSDP_PROOF_DEADLOCK);
}

static void fsdpi_plan_see_op(fsdpi_plan_prover *v, const fsdpi_plan_line *line) {
    int actor = fsdpi_plan_actor(v, line->stream);
    const fsdpi_plan_member *m = &v->l->members[line->members];
    v->out->ops++;
    v->now[actor].at[actor]++;
    fsdpi_plan_see_comm(v, line);
    // The other members have records of their own for it.
    fsdpi_plan_region *dst_events = fsdpi_plan_events_of(v, m->unit, m->dst);
    fsdpi_plan_derive(v, actor, fsdpi_plan_events_of(v, m->unit, m->src), dst_events);
    if (dst_events) dst_events->avail.is_set = 0;
    for (int i = 0; i < line->num_members; i++) {
        int src = m[i].src, dst = m[i].dst, uses = line->kind == FSDP_OP_USE;
        for (int k = 0; k < 2; k++)
            if ((k ? dst : src) >= 0 && !v->slots[k ? dst : src].held)
                fsdpi_plan_wrong(v, FSDP_PROOF_USE, "nobody holds", -1, k ? dst : src);
            else if ((k ? dst : src) >= 0 && m[i].unit != v->slots[k ? dst : src].unit)
                fsdpi_plan_wrong(v, FSDP_PROOF_USE, "it is held by", v->slots[k ? dst : src].unit,
                                 k ? dst : src);
        if (!uses && src != FSDPI_PLAN_NONE)
            fsdpi_plan_access(v, m[i].unit, src, actor, v->line, 0);
        if (!uses && dst != FSDPI_PLAN_NONE)
            fsdpi_plan_access(v, m[i].unit, dst, actor, v->line, 1);
        fsdpi_plan_see_grads(v, line, &m[i]);
        fsdpi_plan_see_gather(v, line, &m[i]);
        if (line->label == FSDP_LABEL_GRAD_HOOK && m[i].unit >= 0) v->version[m[i].unit]++;
    }
    if (dst_events) fsdpi_plan_set_mark(v, actor, &dst_events->ready);
}

// A call begins: behind it the caller may no longer read, before it it has read.
static void fsdpi_plan_see_call(fsdpi_plan_prover *v, int ends) {
    const fsdpi_plan_call *call = &v->l->calls[v->call];
    int u = call->index, slot = u >= 0 ? v->gathered[u] : -1;
    int posts = call->call == FSDP_CALL_POST_FORWARD || call->call == FSDP_CALL_POST_BACKWARD;
    int back = call->call == FSDP_CALL_PRE_BACKWARD || call->call == FSDP_CALL_POST_BACKWARD;
    int reads = u >= 0 && call->call <= FSDP_CALL_POST_BACKWARD && v->l->units[u].reads & 1 << back;
    v->line = -1;
    if (!ends) {
        v->now[FSDP_STREAM_COMPUTE].at[FSDP_STREAM_COMPUTE]++;
        if (posts && u >= 0 && v->opened[u] && (slot < 0 || v->slots[slot].full < 3))
            fsdpi_plan_wrong(v, FSDP_PROOF_USE, "its parameters were freed while in use:", u,
                             FSDPI_PLAN_NONE);
        if (posts && u >= 0) v->opened[u] = 0;
        if (posts && slot >= 0 && v->slots[slot].full > !reads) // else only what was waited for
            fsdpi_plan_access(v, u, slot, FSDP_STREAM_COMPUTE, -1, 0);
        int writes = call->call == FSDP_CALL_POST_BACKWARD && fsdpi_plan_has_grads(v, u),
            grads = u >= 0 && writes ? v->written[u] : -1;
        if (grads >= 0) {
            fsdpi_plan_access(v, u, grads, FSDP_STREAM_COMPUTE, -1, 1);
            if (v->slots[grads].grads == FSDPI_PLAN_TAKEN)
                fsdpi_plan_wrong(v, FSDP_PROOF_USE, "a reduction has read gradients: those of", u,
                                 grads);
            v->slots[grads].grads = FSDPI_PLAN_TOUCHED;
        }
        return;
    }
    if (call->call == FSDP_CALL_PRE_BACKWARD && u >= 0 && v->written[u] >= 0 &&
        fsdpi_plan_has_grads(v, u)) // the caller writes from here on
        fsdpi_plan_access(v, u, v->written[u], FSDP_STREAM_COMPUTE, -1, 1);
    if (posts || !reads) return;
    if (slot < 0 || v->slots[slot].full < 2) {
        fsdpi_plan_wrong(v, FSDP_PROOF_USE,
                         slot < 0               ? "its parameters are not gathered:"
                         : !v->slots[slot].full ? "nothing was gathered to the slot of"
                                                : "nobody has waited for the gather of",
                         u, slot < 0 ? FSDPI_PLAN_NONE : slot);
    } else if (v->slots[slot].version != v->version[u]) {
        fsdpi_plan_wrong(v, FSDP_PROOF_USE, "shards were written after the gather of", u, slot);
    } else {
        fsdpi_plan_access(v, u, slot, FSDP_STREAM_COMPUTE, -1, 0);
        v->slots[slot].full = 3;
        v->opened[u] = 1;
    }
}

/* A slot that outlasts steps: a step of another kind comes between, which fills what units bring
   along to this one, and reduces and gives back what units hold behind it. */
static void fsdpi_plan_see_between(fsdpi_plan_prover *v, fsdpi_plan_region *r) {
    fsdpi_plan_join_clock(v, FSDP_STREAM_COMPUTE, &r->ready);
    fsdpi_plan_join_clock(v, FSDP_STREAM_COMPUTE, &r->avail);
    fsdpi_plan_set_mark(v, FSDP_STREAM_COMPUTE, &r->ready);
    r->avail.is_set = 0;
    r->grads = FSDPI_PLAN_TAKEN;
}

/* The core's finalize: COMPUTE waits for shards, their gradients, and gathers that nobody has
   waited for (those that go on: in fsdp_params_writable); then the caller writes shards. */
static void fsdpi_plan_see_end(fsdpi_plan_prover *v) {
    const fsdpi_plan_listing *l = v->l;
    fsdpi_plan_region *grads = fsdpi_plan_events_of(v, -1, FSDPI_PLAN_GRADS);
    fsdpi_plan_region *shards = fsdpi_plan_events_of(v, -1, FSDPI_PLAN_SHARDS);
    fsdpi_plan_join_clock(v, FSDP_STREAM_COMPUTE, &grads->ready);
    fsdpi_plan_join_clock(v, FSDP_STREAM_COMPUTE, &shards->ready); // which hooks may have written
    for (int i = 0; i < l->num_slots; i++)
        if (v->slots[i].held && v->slots[i].full == 1)
            fsdpi_plan_join_clock(v, FSDP_STREAM_COMPUTE, &v->slots[i].ready);
    v->line = -1;
    v->now[FSDP_STREAM_COMPUTE].at[FSDP_STREAM_COMPUTE]++;
    for (int u = 0; u < l->num_units; u++) {
        if (fsdpi_plan_has_grads(v, u))
            fsdpi_plan_access(v, u, FSDPI_PLAN_GRADS, FSDP_STREAM_COMPUTE, -1, 0);
        fsdpi_plan_access(v, u, FSDPI_PLAN_SHARDS, FSDP_STREAM_COMPUTE, -1, 1);
        v->version[u]++;
    }
    fsdpi_plan_set_mark(v, FSDP_STREAM_COMPUTE, &shards->ready);
    for (int i = 0; i < fsdpi_plan_events(l); i++) {
        int lasts = i < l->num_slots && l->slots[i].offset < 0;
        if (lasts || i >= l->num_slots + 2) fsdpi_plan_see_between(v, &v->slots[i]);
    }
    for (int i = 0; i < l->num_slots; i++) {
        if (!v->slots[i].held) continue;
        if (l->slots[i].offset >= 0 && l->slots[i].pool != FSDP_POOL_GATHER)
            fsdpi_plan_wrong(v, FSDP_PROOF_MEMORY, "held when the step ends, by", v->slots[i].unit,
                             i);
        // Finalize frees what a unit that is open to the end has.
        fsdpi_plan_member m = {v->slots[i].unit, i, FSDPI_PLAN_NONE};
        fsdpi_plan_line line;
        memset(&line, 0, sizeof line);
        line.stream = FSDP_STREAM_COMPUTE;
        fsdpi_plan_see_release(v, &line, &m);
    }
}

static void fsdpi_plan_walk(fsdpi_plan_prover *v) {
    const fsdpi_plan_listing *l = v->l;
    int line = 0;
    for (int u = 0; u < l->num_units; u++) v->opened[u] = 0;
    for (v->call = 0; v->call < l->num_calls && !v->out->refuted; v->call++) {
        fsdpi_plan_see_call(v, 0);
        for (; line < l->num_lines && l->lines[line].call == v->call; line++) {
            const fsdpi_plan_line *at = &l->lines[line];
            v->line = line;
            if (at->kind == FSDP_OP_ACQUIRE) fsdpi_plan_see_acquire(v, &l->members[at->members]);
            else if (at->kind == FSDP_OP_RELEASE)
                fsdpi_plan_see_release(v, at, &l->members[at->members]);
            else if (at->kind == FSDP_OP_WROTE) fsdpi_plan_see_wrote(v, &l->members[at->members]);
            else fsdpi_plan_see_op(v, at);
        }
        fsdpi_plan_see_call(v, 1);
    }
    v->call = l->num_calls - 1;
    if (!v->out->refuted) fsdpi_plan_see_end(v);
}

// Bytes of an op beside its elements, and beside the slots in which they have to be.
static void fsdpi_plan_check_numbers(fsdpi_plan_prover *v, const fsdpi_plan_line *line) {
    const fsdpi_plan_listing *l = v->l;
    const fsdpi_plan_member *m = &l->members[line->members];
    uint64_t part = line->count * fsdp_dtype_size(line->dtype), room[2] = {0, 0};
    uint64_t size = (uint64_t)l->shards, replicas = (uint64_t)l->replicas, whole = part;
    int known[2] = {1, 1}, all = 1; // all bytes of the slots are in slots
    for (int i = 0; i < line->num_members; i++)
        for (int k = 0; k < 2; k++) {
            int place = k ? m[i].dst : m[i].src;
            if (place >= 0) room[k] += (uint64_t)l->slots[place].bytes;
            else known[k] = 0;
        }
    switch (line->kind) {
    case FSDP_OP_COPY: all = line->bytes == line->count * fsdp_dtype_size(line->out_dtype); break;
    case FSDP_OP_ZERO: all = line->bytes == part; break;
    case FSDP_OP_ALL_GATHER:
    case FSDP_OP_REDUCE_SCATTER: // of a group that is the shards', or a part of them
        whole = line->bytes + part;
        all = part > 0 && whole % part == 0 && size % (whole / part) == 0;
        break;
    case FSDP_OP_ALL_REDUCE:
        all = line->bytes == (2 * (replicas - 1) * part + replicas - 1) / replicas;
        break;
    default: return;
    }
    int reads = line->kind == FSDP_OP_REDUCE_SCATTER || line->kind == FSDP_OP_COPY;
    int writes = line->kind == FSDP_OP_ALL_GATHER || line->kind == FSDP_OP_ZERO;
    if (!all)
        fsdpi_plan_wrong(v, FSDP_PROOF_USE, "its bytes are not those of its elements:", m->unit,
                         FSDPI_PLAN_NONE);
    if ((reads && known[0] && whole > room[0]) || (writes && known[1] && whole > room[1]) ||
        (line->kind == FSDP_OP_COPY && known[1] && line->bytes > room[1]))
        fsdpi_plan_wrong(v, FSDP_PROOF_MEMORY, "it needs more bytes than its slots have:", m->unit,
                         FSDPI_PLAN_NONE);
}

/* A plan has no more collectives than calls have, and gathers no more bytes. Reductions that are
   joined may read more bytes: gradients that wait are in reduce_dtype, those that do not may be
   sent in the dtype of the parameters. */
static void fsdpi_plan_check_calls(fsdpi_plan_prover *v) {
    const fsdpi_plan_listing *l = v->l;
    if (l->gathers[1] <= l->gathers[0] && l->reductions[1] <= l->reductions[0] &&
        l->replica_ops[1] <= l->replica_ops[0] && l->gather_bytes[1] <= l->gather_bytes[0])
        return;
    fsdpi_plan_out o = fsdpi_plan_counter(v);
    fsdpi_plan_put(&o, "by calls: %d gathers of %llu bytes, %d reductions, %d over replicas\n",
                   l->gathers[0], (unsigned long long)l->gather_bytes[0], l->reductions[0],
                   l->replica_ops[0]);
    fsdpi_plan_put(&o, "the plan has more: %d of %llu, %d, %d", l->gathers[1],
                   (unsigned long long)l->gather_bytes[1], l->reductions[1], l->replica_ops[1]);
    fsdpi_plan_refuted(v, FSDP_PROOF_USE);
}

// The numbers of the head are those of the lines.
static void fsdpi_plan_check_counts(fsdpi_plan_prover *v) {
    const fsdpi_plan_listing *l = v->l;
    int gathers = 0, reductions = 0, replicas = 0, ops = 0;
    uint64_t gathered = 0, reduced = 0;
    for (int i = 0; i < l->num_lines; i++) {
        const fsdpi_plan_line *line = &l->lines[i];
        gathers += line->kind == FSDP_OP_ALL_GATHER;
        reductions += line->kind == FSDP_OP_REDUCE_SCATTER;
        replicas += line->kind == FSDP_OP_ALL_REDUCE;
        ops += line->kind < FSDP_OP_HOOK;
        if (line->kind == FSDP_OP_ALL_GATHER) gathered += line->bytes;
        else if (fsdpi_plan_is_collective(line->kind)) reduced += line->bytes;
        v->line = i;
        v->call = line->call;
        if (!v->out->refuted) fsdpi_plan_check_numbers(v, line);
    }
    if (v->out->refuted) return;
    fsdpi_plan_out o = fsdpi_plan_counter(v);
    if (gathers != l->gathers[1] || reductions != l->reductions[1] ||
        replicas != l->replica_ops[1] || ops != l->ops[1]) {
        fsdpi_plan_put(&o, "count gathers %d reductions %d replicas %d ops %d\n", l->gathers[1],
                       l->reductions[1], l->replica_ops[1], l->ops[1]);
        fsdpi_plan_put(&o, "the lines have %d, %d, %d and %d of them", gathers, reductions,
                       replicas, ops);
        fsdpi_plan_refuted(v, FSDP_PROOF_USE);
    } else if (gathered != l->gather_bytes[1] || reduced != l->reduce_bytes[1]) {
        fsdpi_plan_put(&o, "read gathers %llu reductions %llu\n",
                       (unsigned long long)l->gather_bytes[1],
                       (unsigned long long)l->reduce_bytes[1]);
        fsdpi_plan_put(&o, "the lines read %llu and %llu bytes", (unsigned long long)gathered,
                       (unsigned long long)reduced);
        fsdpi_plan_refuted(v, FSDP_PROOF_USE);
    }
    if (!v->out->refuted) fsdpi_plan_check_calls(v);
}

/* One program, which every rank runs: three times, so that what the end of a step leaves to the
   next one is looked at, too. m NULL: a text's. */
static fsdp_status fsdpi_plan_prove_one(fsdp_model *m, const fsdpi_plan_listing *l,
                                        fsdp_plan_proof *out) {
    fsdpi_plan_prover v;
    size_t slots = (size_t)fsdpi_plan_events(l) * sizeof *v.slots,
           units = (size_t)l->num_units * sizeof *v.slots;
    memset(&v, 0, sizeof v);
    memset(out, 0, sizeof *out);
    v.model = m;
    v.l = l;
    v.out = out;
    v.arena = fsdpi_plan_arena_bytes(l);
    out->ranks = (int32_t)((int64_t)l->shards * l->replicas);
    out->programs = 1;
    out->comms = l->num_comms;
    out->buffers = l->num_slots;
    fsdp_status status = fsdpi_plan_alloc(m, slots, (void **)&v.slots);
    if (!status) status = fsdpi_plan_find_reach(&v);
    if (!status) status = fsdpi_plan_alloc(m, units, (void **)&v.shards);
    if (!status) status = fsdpi_plan_alloc(m, units, (void **)&v.grads);
    if (!status) status = fsdpi_plan_alloc(m, (size_t)l->num_units * 4, (void **)&v.version);
    if (!status) status = fsdpi_plan_alloc(m, (size_t)l->num_units * 4, (void **)&v.gathered);
    if (!status) status = fsdpi_plan_alloc(m, (size_t)l->num_units * 4, (void **)&v.written);
    if (!status) status = fsdpi_plan_alloc(m, (size_t)l->num_units * 4, (void **)&v.collects);
    if (!status) status = fsdpi_plan_alloc(m, (size_t)l->num_units * 4, (void **)&v.opened);
    for (int u = 0; u < l->num_units && !status; u++) v.gathered[u] = v.written[u] = -1;
    for (int u = 0; u < l->num_units && !status; u++) v.collects[u] = l->shards > 1;
    for (v.walk = 0; v.walk < 3 && !status && !out->refuted; v.walk++) fsdpi_plan_walk(&v);
    if (!status && !out->refuted) fsdpi_plan_check_counts(&v);
    if (!status && !out->refuted)
        snprintf(out->text, sizeof out->text,
                 "proven: %lld ops and %lld accesses in %d walks, %lld bytes of %lld",
                 (long long)out->ops, (long long)out->accesses, v.walk, (long long)out->bytes,
                 (long long)l->bytes);
    fsdpi_plan_free(m, v.slots);
    fsdpi_plan_free(m, v.reach);
    fsdpi_plan_free(m, v.upto);
    fsdpi_plan_free(m, v.shards);
    fsdpi_plan_free(m, v.grads);
    fsdpi_plan_free(m, v.version);
    fsdpi_plan_free(m, v.gathered);
    fsdpi_plan_free(m, v.written);
    fsdpi_plan_free(m, v.opened);
    fsdpi_plan_free(m, v.collects);
    return status;
}


/* ==== plan/ranks.h ==========================================================================
   texts of several ranks, run against each other */

// Owns: the verdict on programs that differ. Each rank issues its collectives in the order of its
// text and waits at each of them for the members of its group, as inline ranks do: where streams
// run beside each other, ranks wait less. Ranks are numbered as in the mesh, shards fastest.

typedef struct fsdpi_plan_ranks {
    fsdpi_plan_listing *programs; // different ones
    int32_t *program, *at;        // [num]: of a rank; the line at which it waits
    int32_t num, num_programs, shards;
} fsdpi_plan_ranks;

static const fsdpi_plan_listing *fsdpi_plan_of(const fsdpi_plan_ranks *r, int rank) {
    return &r->programs[r->program[rank]];
}

// The next collective of a rank from `line` on; the number of lines: it has ended.
static int fsdpi_plan_next_collective(const fsdpi_plan_listing *l, int line) {
    while (line < l->num_lines && !fsdpi_plan_is_collective(l->lines[line].kind)) line++;
    return line;
}

static int fsdpi_plan_is_replica_line(const fsdpi_plan_line *line) {
    return line->label == FSDP_LABEL_REPLICAS;
}

// Is `other` in the group of a collective of `rank`?
static int fsdpi_plan_shares_group(const fsdpi_plan_ranks *r, const fsdpi_plan_line *line, int rank,
                                   int other) {
    return fsdpi_plan_is_replica_line(line) ? rank % r->shards == other % r->shards
                                            : rank / r->shards == other / r->shards;
}

// What ranks compare when they meet.
static uint64_t fsdpi_plan_fingerprint(const fsdpi_plan_listing *l, const fsdpi_plan_line *line) {
    uint64_t h = fsdpi_plan_mix((uint64_t)line->kind << 8 | line->label, line->count);
    h = fsdpi_plan_mix(h, (uint64_t)line->dtype << 16 | (uint64_t)line->out_dtype << 8 |
                              line->accumulate);
    h = fsdpi_plan_mix(h, line->digest);
    for (int i = 0; i < line->num_members; i++) {
        int unit = l->members[line->members + i].unit;
        const char *name = unit >= 0 ? l->units[unit].name : "";
        h = fsdpi_plan_mix_bytes(h, name, strlen(name));
    }
    return h;
}

static void fsdpi_plan_say_rank(fsdpi_plan_out *o, const fsdpi_plan_ranks *r, int rank, int other) {
    const fsdpi_plan_listing *l = fsdpi_plan_of(r, rank);
    fsdpi_plan_put(o, "rank %d: ", rank);
    if (r->at[rank] >= l->num_lines) {
        fsdpi_plan_put(o, "has ended its step");
        return;
    }
    const fsdpi_plan_line *line = &l->lines[r->at[rank]];
    fsdpi_plan_say_call(o, l, line->call);
    fsdpi_plan_put(o, ", ");
    fsdpi_plan_say_line(o, l, r->at[rank]);
    if (line->comm >= 0) fsdpi_plan_put(o, " on %s", l->comms[line->comm]);
    if (other >= 0) fsdpi_plan_put(o, " waits for rank %d", other);
}

static void fsdpi_plan_stuck(const fsdpi_plan_ranks *r, int rank, int other, int mismatch,
                             fsdp_plan_proof *out) {
    fsdpi_plan_out o = {out->text, sizeof out->text, 0, 0};
    fsdpi_plan_say_rank(&o, r, rank, mismatch ? -1 : other);
    fsdpi_plan_put(&o, mismatch ? ", which differs from\n" : "\n");
    fsdpi_plan_say_rank(&o, r, other, -1);
    const fsdpi_plan_listing *l = fsdpi_plan_of(r, other);
    int waits = !mismatch && r->at[other] < l->num_lines ? 1 : 0;
    for (int i = 0; i < r->num && waits; i++)
        if (i != other && fsdpi_plan_shares_group(r, &l->lines[r->at[other]], other, i) &&
            r->at[i] != r->at[other]) {
            fsdpi_plan_put(&o, " waits for rank %d", i);
            break;
        }
    out->refuted = FSDP_PROOF_DEADLOCK;
}

/* Can the collective at which a rank waits run? 1: all members are there. 0: not yet; *other is
   a member that is elsewhere. -1: a member is there with another one. */
static int fsdpi_plan_meets(const fsdpi_plan_ranks *r, int rank, int *other) {
    const fsdpi_plan_listing *l = fsdpi_plan_of(r, rank);
    const fsdpi_plan_line *line = &l->lines[r->at[rank]];
    int all = 1;
    for (int i = 0; i < r->num; i++) {
        const fsdpi_plan_listing *theirs = fsdpi_plan_of(r, i);
        const fsdpi_plan_line *at;
        if (i == rank || !fsdpi_plan_shares_group(r, line, rank, i)) continue;
        *other = i;
        if (r->at[i] >= theirs->num_lines) return 0;
        at = &theirs->lines[r->at[i]];
        if (fsdpi_plan_is_replica_line(at) != fsdpi_plan_is_replica_line(line)) return 0;
        if (fsdpi_plan_fingerprint(theirs, at) != fsdpi_plan_fingerprint(l, line)) all = -1;
        if (all < 0) return -1;
    }
    return all;
}

// A rank passes its collective, and with it the members of its group.
static void fsdpi_plan_pass(fsdpi_plan_ranks *r, int rank) {
    const fsdpi_plan_line *line = &fsdpi_plan_of(r, rank)->lines[r->at[rank]];
    for (int i = 0; i < r->num; i++)
        if (i == rank || fsdpi_plan_shares_group(r, line, rank, i))
            r->at[i] = fsdpi_plan_next_collective(fsdpi_plan_of(r, i), r->at[i] + 1);
}

// Runs all ranks until they have ended, or none can go on.
static void fsdpi_plan_rendezvous(fsdpi_plan_ranks *r, fsdp_plan_proof *out) {
    for (int i = 0; i < r->num; i++) r->at[i] = fsdpi_plan_next_collective(fsdpi_plan_of(r, i), 0);
    for (int moved = 1; moved && !out->refuted;) {
        int stuck = -1, awaited = -1;
        moved = 0;
        for (int i = 0; i < r->num && !out->refuted; i++) {
            int other = -1, meets;
            if (r->at[i] >= fsdpi_plan_of(r, i)->num_lines) continue;
            meets = fsdpi_plan_meets(r, i, &other);
            if (meets < 0) fsdpi_plan_stuck(r, i, other, 1, out);
            if (meets == 0 && stuck < 0) stuck = i, awaited = other;
            if (meets <= 0) continue;
            out->ops++;
            moved = 1;
            fsdpi_plan_pass(r, i);
        }
        if (!moved && stuck >= 0 && !out->refuted) fsdpi_plan_stuck(r, stuck, awaited, 0, out);
    }
}

static void fsdpi_plan_ranks_end(fsdpi_plan_ranks *r) {
    for (int i = 0; i < r->num_programs; i++) fsdpi_plan_listing_end(NULL, &r->programs[i]);
    fsdpi_plan_free(NULL, r->programs);
    fsdpi_plan_free(NULL, r->program);
    fsdpi_plan_free(NULL, r->at);
}

// Groups are those of one mesh.
static fsdp_status fsdpi_plan_same_world(const fsdpi_plan_ranks *r, int known, int text) {
    const fsdpi_plan_listing *a = &r->programs[0], *b = &r->programs[known];
    if (a->shards == b->shards && a->replicas == b->replicas && a->mode == b->mode) return FSDP_OK;
    return fsdp_fail(NULL, FSDP_ERR_INVALID_ARG,
                     "[E999] plan_prove_texts: text %d is of shards %d, replicas %d, mode %s, "
                     "expected shards %d, replicas %d, mode %s",
                     text, b->shards, b->replicas, fsdpi_plan_modes[b->mode], a->shards,
                     a->replicas, fsdpi_plan_modes[a->mode]);
}

// Each different text is read once.
static fsdp_status fsdpi_plan_read_ranks(const char *const *texts, int num, fsdpi_plan_ranks *r) {
    fsdp_status status = fsdpi_plan_alloc(NULL, (size_t)num * sizeof *r->programs,
                                          (void **)&r->programs);
    if (!status) status = fsdpi_plan_alloc(NULL, (size_t)num * 4, (void **)&r->program);
    if (!status) status = fsdpi_plan_alloc(NULL, (size_t)num * 4, (void **)&r->at); // first ranks
    for (int i = 0; i < num && !status; i++) {
        int known = 0, ops = 0;
        while (known < r->num_programs && texts[r->at[known]] != texts[i] &&
               strcmp(texts[r->at[known]], texts[i]) != 0)
            known++;
        r->program[i] = known;
        if (known < r->num_programs) continue;
        r->at[known] = i;
        r->num_programs++;
        status = fsdpi_plan_parse(NULL, texts[i], strlen(texts[i]), &r->programs[known], &ops);
        if (!status && !ops && r->programs[known].num_calls > 1)
            status = fsdp_fail(NULL, FSDP_ERR_INVALID_ARG,
                               "[E986] plan_prove_texts: text %d has no ops: take it with "
                               "FSDP_PLAN_TEXT_OPS",
                               i);
        if (!status) status = fsdpi_plan_same_world(r, known, i);
    }
    r->num = num;
    r->shards = status ? 1 : r->programs[0].shards;
    if (!status && r->num_programs > 1 &&
        (int64_t)num != (int64_t)r->shards * r->programs[0].replicas)
        status = fsdp_fail(
            NULL, FSDP_ERR_INVALID_ARG,
            "[E969] plan_prove_texts: %d texts that differ, expected %lld texts, of all "
            "ranks",
            num, (long long)r->shards * r->programs[0].replicas);
    return status;
}

FSDP_API fsdp_status fsdp_plan_prove_texts(const char *const *texts, int num,
                                           fsdp_plan_proof *out) {
    fsdpi_plan_ranks r;
    fsdp_plan_proof one;
    memset(&r, 0, sizeof r);
    for (int i = 0; i < num; i++)
        if (!texts || !texts[i]) num = 0;
    if (!texts || num < 1 || !out)
        return fsdp_fail(
            NULL, FSDP_ERR_INVALID_ARG,
            "[E987] plan_prove_texts: texts, one of them or out is NULL, or num is not "
            ">= 1");
    memset(out, 0, sizeof *out);
    fsdp_status status = fsdpi_plan_read_ranks(texts, num, &r);
    for (int i = 0; i < r.num_programs && !status && !out->refuted; i++) {
        status = fsdpi_plan_prove_one(NULL, &r.programs[i], &one);
        if (!status) *out = one;
    }
    out->ranks = num;
    out->programs = r.num_programs;
    if (!status && !out->refuted && r.num_programs > 1) fsdpi_plan_rendezvous(&r, out);
    fsdpi_plan_ranks_end(&r);
    return status;
}

FSDP_API fsdp_status fsdp_plan_prove(const fsdp_plan *plan, int index, fsdp_plan_proof *out) {
    if (!plan || !out || index < 0 || index >= plan->num_kinds)
        return fsdp_fail(plan ? plan->world : NULL, FSDP_ERR_INVALID_ARG,
                         "[E988] plan_prove: plan or out is NULL, or index %d is not below the "
                         "number of plans, which is %d",
                         index, fsdp_plan_count(plan));
    return fsdpi_plan_prove_one(plan->model, &plan->kinds[index]->listing, out);
}


/* ==== plan/simulate.h =======================================================================
   the time of a step under given costs */

// Owns: clocks. An op begins when the host has issued it, its stream is free, what it waits for is
// done, and for a collective its group is free. Nanoseconds are whole numbers, so that all ranks
// get the same ones. Inline the host does everything itself; with lanes it is the stream COMPUTE.

typedef struct fsdpi_plan_clocks {
    const fsdpi_plan_listing *l;
    const fsdp_plan_cost *cost;
    fsdp_plan_times *out;
    int64_t host, stream[FSDP_STREAM_COUNT], comm[FSDPI_PLAN_COMMS], busy[FSDPI_PLAN_COMMS], link;
    int64_t *ready, *avail; // [fsdpi_plan_events]; avail -1: not set
    int64_t waited;         // by the caller in this call
    int64_t first_gather, last_reduction;
} fsdpi_plan_clocks;

static int64_t fsdpi_plan_later(int64_t a, int64_t b) { return a > b ? a : b; }

static int64_t fsdpi_plan_duration(double latency, uint64_t bytes, double rate) {
    return (int64_t)(latency + (rate > 0 ? (double)bytes / rate : 0) + 0.5);
}

// Of a collective its full side: what it reads from others, and this rank's own part.
static int64_t fsdpi_plan_takes(const fsdp_plan_cost *c, const fsdpi_plan_line *line) {
    uint64_t part = line->count * fsdp_dtype_size(line->dtype);
    switch (line->kind) {
    case FSDP_OP_ALL_GATHER:
        return fsdpi_plan_duration(c->gather_latency_ns, line->bytes + part,
                                   c->gather_bytes_per_ns);
    case FSDP_OP_REDUCE_SCATTER:
        return fsdpi_plan_duration(c->reduce_latency_ns, line->bytes + part,
                                   c->reduce_bytes_per_ns);
    case FSDP_OP_ALL_REDUCE:
        return fsdpi_plan_duration(c->replica_latency_ns, part, c->replica_bytes_per_ns);
    case FSDP_OP_COPY:
    case FSDP_OP_ZERO: return fsdpi_plan_duration(0, line->bytes, c->copy_bytes_per_ns);
    default: return 0;
    }
}

// The clock of a stream: inline, and for COMPUTE with lanes, the host's.
static int64_t *fsdpi_plan_clock_of(fsdpi_plan_clocks *k, int stream) {
    int is_host = k->l->mode == FSDPI_PLAN_INLINE ||
                  (k->l->mode == FSDPI_PLAN_LANES && stream == FSDP_STREAM_COMPUTE);
    return is_host ? &k->host : &k->stream[stream];
}

static void fsdpi_plan_run_line(fsdpi_plan_clocks *k, const fsdpi_plan_line *line) {
    const fsdpi_plan_member *m = &k->l->members[line->members];
    int src = fsdpi_plan_event_of(k->l, m->unit, m->src);
    int dst = fsdpi_plan_event_of(k->l, m->unit, m->dst);
    int64_t *clock = fsdpi_plan_clock_of(k, line->stream), takes;
    if (line->kind == FSDP_OP_ACQUIRE) return;
    if (line->kind == FSDP_OP_RELEASE) {
        if (src >= 0 && k->avail[src] < 0) k->avail[src] = *clock;
        return;
    }
    if (line->kind == FSDP_OP_WROTE) {
        if (dst >= 0) k->ready[dst] = *fsdpi_plan_clock_of(k, FSDP_STREAM_COMPUTE);
        return;
    }
    k->host += (int64_t)k->cost->issue_ns;
    int64_t begin = fsdpi_plan_later(k->host, *clock), free_at = begin;
    if (src >= 0) begin = fsdpi_plan_later(begin, k->ready[src]);
    if (dst >= 0 && dst != src)
        begin = fsdpi_plan_later(begin, k->avail[dst] >= 0 ? k->avail[dst] : k->ready[dst]);
    if (dst >= 0) k->avail[dst] = -1;
    takes = fsdpi_plan_takes(k->cost, line);
    if (fsdpi_plan_is_collective(line->kind)) {
        int64_t *of = line->kind == FSDP_OP_ALL_GATHER       ? &k->out->gather_ns
                      : line->kind == FSDP_OP_REDUCE_SCATTER ? &k->out->reduce_ns
                                                             : &k->out->replica_ns;
        if (line->comm >= 0) begin = fsdpi_plan_later(begin, k->comm[line->comm]);
        if (k->cost->shared_links) begin = fsdpi_plan_later(begin, k->link);
        if (line->comm >= 0) k->busy[line->comm] += takes;
        if (line->comm >= 0) k->comm[line->comm] = begin + takes;
        k->link = begin + takes;
        *of += takes;
        if (line->kind == FSDP_OP_ALL_GATHER && !k->first_gather) k->first_gather = takes;
        if (line->kind != FSDP_OP_ALL_GATHER) k->last_reduction = takes;
    }
    // The caller waits: for what another stream does, and inline for the collective itself.
    if (line->kind == FSDP_OP_USE && line->stream == FSDP_STREAM_COMPUTE)
        k->waited += begin - free_at;
    if (k->l->mode == FSDPI_PLAN_INLINE && fsdpi_plan_is_collective(line->kind)) k->waited += takes;
    *clock = begin + takes;
    if (dst >= 0) k->ready[dst] = begin + takes;
}

static void fsdpi_plan_run_calls(fsdpi_plan_clocks *k) {
    const fsdp_plan_cost *c = k->cost;
    int line = 0;
    for (int i = 0; i < k->l->num_calls; i++) {
        int64_t work = c->num_compute > 0
                           ? c->compute_ns[i < c->num_compute ? i : c->num_compute - 1]
                           : 0;
        int64_t *clock = fsdpi_plan_clock_of(k, FSDP_STREAM_COMPUTE);
        k->waited = 0;
        for (; line < k->l->num_lines && k->l->lines[line].call == i; line++)
            fsdpi_plan_run_line(k, &k->l->lines[line]);
        if (i + 1 == k->l->num_calls) { // finalize waits for shard gradients
            int64_t now = fsdpi_plan_later(*clock, k->host);
            int64_t grads = k->ready[k->l->num_slots + 1];
            k->waited += grads > now ? grads - now : 0;
            *clock = fsdpi_plan_later(now, grads);
        }
        k->out->exposed_ns += k->waited;
        if (k->waited > k->out->worst_ns) {
            k->out->worst_ns = k->waited;
            k->out->worst_call = i;
        }
        *clock = fsdpi_plan_later(*clock, k->host) + work;
        k->out->compute_ns += work;
    }
}

static fsdp_status fsdpi_plan_time(fsdp_model *m, const fsdpi_plan_listing *l,
                                   const fsdp_plan_cost *cost, fsdp_plan_times *out) {
    fsdpi_plan_clocks k;
    size_t room = (size_t)fsdpi_plan_events(l) * sizeof(int64_t);
    memset(&k, 0, sizeof k);
    memset(out, 0, sizeof *out);
    k.l = l;
    k.cost = cost;
    k.out = out;
    fsdp_status status = fsdpi_plan_alloc(m, room, (void **)&k.ready);
    if (!status) status = fsdpi_plan_alloc(m, room, (void **)&k.avail);
    if (!status) {
        memset(k.avail, -1, room);
        fsdpi_plan_run_calls(&k);
        out->step_ns = k.host;
        for (int s = 0; s < FSDP_STREAM_COUNT; s++)
            out->step_ns = fsdpi_plan_later(out->step_ns, k.stream[s]);
        out->bound_ns = k.first_gather + out->compute_ns + k.last_reduction;
        for (int i = 0; i < l->num_comms; i++)
            out->bound_ns = fsdpi_plan_later(out->bound_ns, k.busy[i]);
        out->peak_bytes = l->bytes;
    }
    fsdpi_plan_free(m, k.ready);
    fsdpi_plan_free(m, k.avail);
    return status;
}

static fsdp_status fsdpi_plan_check_cost(fsdp_world *w, const fsdp_plan_cost *c) {
    const double numbers[8] = {c->gather_latency_ns,  c->gather_bytes_per_ns,
                               c->reduce_latency_ns,  c->reduce_bytes_per_ns,
                               c->replica_latency_ns, c->replica_bytes_per_ns,
                               c->copy_bytes_per_ns,  c->issue_ns};
    int bad = c->num_compute < 0 || (c->num_compute > 0 && !c->compute_ns);
    for (int i = 0; i < 8; i++) bad |= !(numbers[i] >= 0 && numbers[i] < 1e18);
    for (int i = 0; i < c->num_compute && !bad; i++) bad |= c->compute_ns[i] < 0;
    if (!bad) return FSDP_OK;
    return fsdp_fail(w, FSDP_ERR_INVALID_ARG,
                     "[E997] plan: fsdp_plan_cost has a number that is negative or not finite, or "
                     "num_compute numbers are not at compute_ns");
}

// The plan's own costs, with their list of the caller's work. cost: checked, or NULL.
static fsdp_status fsdpi_plan_copy_cost(fsdp_plan *p, const fsdp_plan_cost *cost) {
    if (!cost) return FSDP_OK;
    size_t bytes = (size_t)cost->num_compute * sizeof *cost->compute_ns;
    fsdp_status status = fsdpi_plan_alloc(p->model, bytes, (void **)&p->compute_ns);
    if (status) return status;
    if (bytes) memcpy(p->compute_ns, cost->compute_ns, bytes);
    p->cost = *cost;
    p->cost.compute_ns = p->compute_ns;
    p->desc.cost = &p->cost;
    return FSDP_OK;
}

// Time and number of collectives of a kind that has a tape and places, under the plan's costs.
static fsdp_status fsdpi_plan_time_kind(fsdp_plan *p, const fsdpi_plan_kind *k, int64_t *takes,
                                        int64_t *collectives) {
    fsdpi_plan_listing l;
    fsdp_plan_times times;
    memset(&l, 0, sizeof l);
    l.slots = k->listing.slots; // of the kind
    l.num_slots = k->listing.num_slots;
    fsdp_status status = fsdpi_plan_list(p, k, &k->tape, &l);
    if (!status) status = fsdpi_plan_time(p->model, &l, &p->cost, &times);
    if (!status) *takes = times.step_ns;
    for (int i = 0; i < l.num_lines; i++) *collectives += fsdpi_plan_is_collective(l.lines[i].kind);
    l.slots = NULL;
    fsdpi_plan_listing_end(p->model, &l);
    return status;
}


/* ==== plan/make.h ===========================================================================
   from a recorded step to a plan that every rank has */

// Owns: fsdpi_plan_kind. All of this happens in fsdp_finalize_backward of the recorded step, while
// every unit is idle; the ranks take part in each agreement whatever has happened to them before.

static uint32_t fsdpi_plan_passes(const fsdp_plan *p) {
    uint32_t all = (1u << FSDP_PASS_COUNT) - 1;
    uint32_t usual = all & ~(1u << FSDP_PASS_ONCE);
    return ((usual & ~p->desc.without) | p->desc.with) & all;
}

// Why steps go by calls from now on.
static void fsdpi_plan_refuse(fsdp_plan *p, const char *text) {
    p->mode = FSDP_PLAN_REFUSED;
    snprintf(p->why, sizeof p->why, "%.*s", (int)sizeof p->why - 1, text);
}

// The same, where nothing has told the log yet.
static void fsdpi_plan_refuse_loudly(fsdp_plan *p, fsdp_status status, const char *text) {
    fsdpi_plan_refuse(p, text);
    (void)fsdp_fail(p->world, status, "[E966] plan: steps go by calls from now on: %s", text);
}

// Room for all slots that kinds and `more` have, so that none is lost later.
static fsdp_status fsdpi_plan_strays_room(fsdp_plan *p, int more) {
    int room = p->num_strays + more;
    fsdp_status status = FSDP_OK;
    for (int i = 0; i < p->num_kinds; i++) room += p->kinds[i]->listing.num_slots;
    while (!status && p->cap_strays < room) // it grows when it is full
        status = fsdpi_plan_grow(p->model, (void **)&p->strays, p->cap_strays, &p->cap_strays,
                                 sizeof *p->strays);
    return status;
}

/* Slots of plans that are gone: units have given them back by now, or are made to. `all`: the model
   ends, or the units' slots go with it. */
static void fsdpi_plan_sweep(fsdp_plan *p, int all) {
    int kept = 0;
    for (int i = 0; i < p->num_strays; i++) {
        int held = fsdp_buf_held(p->strays[i]);
        if (held && !all) {
            p->strays[kept++] = p->strays[i];
            continue;
        }
        if (held) fsdpi_plan_release(p, p->strays[i]);
        fsdp_buf_destroy(p->model, p->strays[i]);
    }
    p->num_strays = kept;
}

// lasting: also those that outlast a step. A slot that a unit still holds becomes a stray.
static void fsdpi_plan_bufs_free(fsdp_plan *p, fsdpi_plan_kind *k, int lasting) {
    for (int i = 0; i < k->listing.num_slots && k->bufs; i++) {
        const fsdpi_plan_slot *slot = &k->listing.slots[i];
        if (!k->bufs[i] || (slot->offset < 0 && !lasting)) continue;
        if (slot->older) k->bufs[i] = NULL; // not the plan's
        else if (!fsdp_buf_held(k->bufs[i])) fsdp_buf_destroy(p->model, k->bufs[i]);
        else p->strays[p->num_strays++] = k->bufs[i];
        k->bufs[i] = NULL;
    }
}

static void fsdpi_plan_kind_free(fsdp_plan *p, fsdpi_plan_kind *k) {
    if (!k) return;
    (void)fsdp_wait_stream(p->model, -1); // records under way read its lists
    if (p->last == k) p->last = NULL;
    fsdpi_plan_bufs_free(p, k, 1);
    fsdpi_plan_tape_free(p, &k->tape);
    fsdpi_plan_listing_end(p->model, &k->listing);
    fsdpi_plan_free(p->model, k->begin);
    fsdpi_plan_free(p->model, k->calls);
    fsdpi_plan_free(p->model, k->bufs);
    fsdpi_plan_free(p->model, k->older);
    fsdpi_plan_free(p->model, k);
}

/* -------------------------------------------------------------------------------------------- */
// Slots that units hold when a step begins.

typedef struct fsdpi_plan_find {
    fsdp_plan *plan;
    fsdpi_plan_kind *kind;
    fsdp_status status;
} fsdpi_plan_find;

static int fsdpi_plan_see_older(void *user, fsdp_model *model, fsdp_op *op) {
    fsdpi_plan_find *f = (fsdpi_plan_find *)user;
    fsdpi_plan_kind *k = f->kind;
    if (op->kind != FSDP_OP_RELEASE || !op->src || f->status) return 1;
    f->status = fsdpi_plan_grow(model, (void **)&k->older, k->num_older, &k->cap_older,
                                sizeof *k->older);
    if (!f->status) k->older[k->num_older++] = op->src;
    return 1;
}

static fsdp_status fsdpi_plan_drop_all_slots(void *user) {
    fsdpi_plan_find *f = (fsdpi_plan_find *)user;
    fsdp_plan *p = f->plan;
    fsdp_status status = FSDP_OK;
    for (int i = 0; i < p->num_units && !status; i++)
        status = fsdp_unit_restore(p->units[i], f->kind->begin + (size_t)i * p->unit_bytes,
                                   p->unit_bytes);
    if (!status) status = fsdp_model_reset(p->model);
    return status ? status : f->status;
}

// k->older: a rehearsed reset gives back all that units held.
static fsdp_status fsdpi_plan_find_older(fsdp_plan *p, fsdpi_plan_kind *k) {
    fsdpi_plan_find f = {p, k, FSDP_OK};
    fsdp_extension e = FSDP_ZERO;
    e.user = &f;
    e.op = fsdpi_plan_see_older;
    return fsdp_rehearse(p->model, &e, fsdpi_plan_drop_all_slots, &f);
}

static int fsdpi_plan_kind_has(const fsdpi_plan_kind *k, const fsdp_buf *buf) {
    for (int i = 0; i < k->listing.num_slots && k->bufs; i++)
        if (k->bufs[i] == buf && !k->listing.slots[i].older) return 1;
    return 0;
}

static int fsdpi_plan_is_part(const fsdp_plan *p, const fsdp_buf *buf) {
    const char *begin = (const char *)fsdp_buf_ptr(p->arena), *at = (const char *)fsdp_buf_ptr(buf);
    return p->arena && at >= begin && at < begin + fsdp_buf_nbytes(p->arena);
}

/* Will slots that units hold when such a step begins be gone? fsdp_pools_trim frees those of pools
   that no unit holds now. A part of the arena is gone with the next replay, which writes there. */
static int fsdpi_plan_is_fleeting(const fsdp_plan *p, const fsdpi_plan_kind *k) {
    for (int i = 0; i < k->num_older; i++) {
        int owned = fsdp_buf_held(k->older[i]);
        if (fsdpi_plan_is_part(p, k->older[i])) return 1;
        for (int n = 0; n < p->num_kinds; n++)
            owned |= fsdpi_plan_kind_has(p->kinds[n], k->older[i]);
        if (!owned) return 1;
    }
    return 0;
}

// The tables of a plan.
static int64_t fsdpi_plan_host_bytes(const fsdpi_plan_kind *k) {
    const fsdpi_plan_tape *t = &k->tape;
    const fsdpi_plan_listing *l = &k->listing;
    size_t bytes = (size_t)t->cap_ops * sizeof *t->ops + (size_t)t->cap_pairs * sizeof *t->pairs +
                   (size_t)t->cap_runs * sizeof *t->runs + (size_t)t->cap_uses * sizeof *t->uses +
                   (size_t)l->cap_lines * sizeof *l->lines +
                   (size_t)l->cap_members * sizeof *l->members +
                   (size_t)l->choice.cap_acts * sizeof *l->choice.acts +
                   (size_t)k->num_calls * sizeof *k->calls;
    return (int64_t)bytes;
}

// Bytes of slots that the model has now: what steps by calls have taken.
static int64_t fsdpi_plan_pool_bytes(const fsdp_plan *p) {
    fsdp_memory mem;
    int64_t bytes = 0;
    if (fsdp_model_memory(p->model, &mem)) return 0;
    for (int pool = FSDP_POOL_GATHER; pool <= FSDP_POOL_ROUT; pool++) bytes += mem.pool_bytes[pool];
    return bytes;
}

// The kind's program as it will be done: k->tape. bufs NULL: without memory.
static fsdp_status fsdpi_plan_tape_make(fsdp_plan *p, fsdpi_plan_kind *k,
                                        const fsdpi_plan_choice *choice, fsdp_buf *const *bufs,
                                        fsdpi_plan_tape *out) {
    fsdpi_plan_tape raw;
    fsdpi_plan_show show;
    memset(out, 0, sizeof *out);
    fsdpi_plan_show_new(&show, p, &raw, k, choice, bufs);
    fsdp_status status = fsdpi_plan_rehearse(&show);
    if (!status) status = fsdpi_plan_arrange(&show, out);
    fsdpi_plan_show_end(&show);
    fsdpi_plan_tape_free(p, &raw);
    return status;
}

static fsdp_status fsdpi_plan_by_calls(fsdp_plan *p, fsdpi_plan_kind *k, fsdpi_plan_tape *raw) {
    fsdpi_plan_show show;
    fsdpi_plan_show_new(&show, p, raw, k, NULL, NULL);
    fsdp_status status = fsdpi_plan_rehearse(&show);
    fsdpi_plan_show_end(&show);
    return status;
}

static fsdp_status fsdpi_plan_too_large(fsdp_plan *p, const fsdpi_plan_kind *k, int call,
                                        int64_t bytes, int64_t most) {
    char text[FSDPI_PLAN_TEXT];
    const fsdpi_plan_call *at = &k->calls[call];
    snprintf(text, sizeof text, "call %d %s '%.100s': slots need %lld bytes, %lld are allowed",
             call, fsdpi_plan_call_name(at->call), fsdp_unit_name(at->unit), (long long)bytes,
             (long long)most);
    fsdpi_plan_refuse_loudly(p, FSDP_ERR_OUT_OF_MEMORY, text);
    return FSDP_ERR_OUT_OF_MEMORY;
}

// Decisions, a tape without memory, places.
static fsdp_status fsdpi_plan_try(fsdp_plan *p, fsdpi_plan_kind *k, fsdpi_plan_facts *f,
                                  uint32_t passes, int64_t most, int *worst) {
    fsdpi_plan_listing *l = &k->listing;
    int decides = (passes & ~(1u << FSDP_PASS_ARENA)) != 0;
    fsdpi_plan_choice_end(p, &l->choice);
    fsdpi_plan_tape_free(p, &k->tape);
    fsdp_status status = decides ? fsdpi_plan_decide(p, f, passes, most, &l->choice, worst)
                                 : FSDP_OK;
    if (!status) status = fsdpi_plan_tape_make(p, k, decides ? &l->choice : NULL, NULL, &k->tape);
    return status ? status : fsdpi_plan_place(p, &k->tape, l, passes);
}

/* What fits: all of these passes, with fewer units kept from try to try; else without those that
   take memory; else the calls as they are. */
static fsdp_status fsdpi_plan_fit(fsdp_plan *p, fsdpi_plan_kind *k, fsdpi_plan_facts *f,
                                  uint32_t all, int64_t most) {
    const uint32_t keep = 1u << FSDP_PASS_KEEP, arena = 1u << FSDP_PASS_ARENA;
    const uint32_t sets[3] = {all, all & (keep | arena), all & arena};
    const fsdpi_plan_listing *l = &k->listing;
    int worst = 0;
    for (int i = 0; i < 3; i++) {
        int64_t budget = most;
        for (int tries = 0; tries < 8 && budget >= 0; tries++) {
            fsdp_status status = fsdpi_plan_try(p, k, f, sets[i], budget, &worst);
            if (status || l->bytes <= most) return status;
            if (!(sets[i] & keep)) break;
            budget -= l->bytes - most;
        }
    }
    return fsdpi_plan_too_large(p, k, worst, l->bytes, most);
}

/* The passes that are taken: all of them, or with costs those that do not make the step slower, one
   after the other. If two plans take the same time, the one with fewer collectives is taken. */
static fsdp_status fsdpi_plan_weigh(fsdp_plan *p, fsdpi_plan_kind *k, fsdpi_plan_facts *f,
                                    int64_t most) {
    const int weighed[3] = {FSDP_PASS_BUCKET, FSDP_PASS_KEEP, FSDP_PASS_AHEAD};
    uint32_t all = fsdpi_plan_passes(p), taken = all;
    int64_t least = INT64_MAX, fewest = INT64_MAX;
    fsdp_status status = FSDP_OK;
    if (!p->desc.cost) return fsdpi_plan_fit(p, k, f, all, most);
    for (int i = 0; i < 3; i++) taken &= ~(1u << weighed[i]);
    for (int i = -1; i < 3 && !status; i++) { // -1: none of the three
        uint32_t tried = i < 0 ? taken : taken | (all & 1u << weighed[i]);
        int64_t takes = 0, collectives = 0;
        if (i >= 0 && tried == taken) continue;
        status = fsdpi_plan_fit(p, k, f, tried, most);
        if (!status) status = fsdpi_plan_time_kind(p, k, &takes, &collectives);
        if (takes > least || (takes == least && collectives > fewest)) continue;
        taken = tried;
        least = takes;
        fewest = collectives;
    }
    return status ? status : fsdpi_plan_fit(p, k, f, taken, most);
}

// Buffers for the places of a kind, and its tape with them.
static fsdp_status fsdpi_plan_bind(fsdp_plan *p, fsdpi_plan_kind *k) {
    fsdpi_plan_listing *l = &k->listing;
    fsdpi_plan_tape old = k->tape;
    fsdp_buf **bufs = NULL;
    fsdp_status status = fsdpi_plan_strays_room(p, l->num_slots);
    if (!k->bufs && !status)
        status = fsdpi_plan_alloc(p->model, (size_t)(l->num_slots + 1) * sizeof *k->bufs,
                                  (void **)&k->bufs);
    if (!status) fsdpi_plan_bufs_free(p, k, 0);
    for (int i = 0; i < l->num_slots && !status; i++) {
        const fsdpi_plan_slot *slot = &l->slots[i];
        if (k->bufs[i]) continue;
        for (int u = 0; u < old.num_uses && slot->older; u++)
            if (old.uses[u].slot == i)
                k->bufs[i] = fsdpi_plan_older(&old, p->units[old.uses[u].unit], &old.uses[u]);
        if (k->bufs[i]) continue;
        status = slot->offset < 0
                     ? fsdp_buf_create(p->model, p->pool, FSDP_MEMORY_DEVICE, slot->bytes,
                                       &k->bufs[i])
                     : fsdp_buf_part(p->model, p->arena, slot->offset, slot->bytes, &k->bufs[i]);
    }
    if (!status)
        status = fsdpi_plan_alloc(p->model, (size_t)(old.num_uses + 1) * sizeof *bufs,
                                  (void **)&bufs);
    for (int i = 0; i < old.num_uses && !status; i++) bufs[i] = k->bufs[old.uses[i].slot];
    memset(&k->tape, 0, sizeof k->tape);
    if (!status)
        status = fsdpi_plan_tape_make(p, k, l->choice.managed ? &l->choice : NULL, bufs, &k->tape);
    if (!status && (k->tape.num_uses != old.num_uses || k->tape.num_ops != old.num_ops))
        status = fsdp_fail(p->world, FSDP_ERR_INTERNAL,
                           "[E972] plan: the rehearsal with slots has %d records and %d uses of "
                           "slots, expected %d and %d",
                           k->tape.num_ops, k->tape.num_uses, old.num_ops, old.num_uses);
    if (!status) { // uses share slots now, so that only the first rehearsal can tell them apart
        if (old.num_uses) memcpy(k->tape.uses, old.uses, (size_t)old.num_uses * sizeof *old.uses);
        if (old.num_ops) memcpy(k->tape.pairs, old.pairs, (size_t)old.num_ops * sizeof *old.pairs);
    }
    fsdpi_plan_tape_free(p, &old);
    fsdpi_plan_free(p->model, bufs);
    return status;
}

// A kind is dropped, and with it those that begin with slots of its own.
static void fsdpi_plan_drop(fsdp_plan *p, int index) {
    fsdpi_plan_kind *k = p->kinds[index];
    if (p->kind == k) p->kind = NULL;
    p->num_kinds--;
    for (int i = index; i < p->num_kinds; i++) p->kinds[i] = p->kinds[i + 1];
    for (int i = p->num_kinds - 1; i >= 0; i--)
        for (int n = 0; i < p->num_kinds && n < p->kinds[i]->num_older; n++)
            if (fsdpi_plan_kind_has(k, p->kinds[i]->older[n])) {
                fsdpi_plan_drop(p, i);
                n = -1; // another one is in its place, or none
            }
    fsdpi_plan_kind_free(p, k);
}

static void fsdpi_plan_drop_kind(fsdp_plan *p, const fsdpi_plan_kind *k) {
    for (int i = 0; i < p->num_kinds; i++)
        if (p->kinds[i] == k) {
            fsdpi_plan_drop(p, i);
            return;
        }
}

// The arena stays while a unit holds a part of it.
static void fsdpi_plan_drop_all(fsdp_plan *p) {
    fsdpi_plan_sweep(p, 0);
    while (p->num_kinds) fsdpi_plan_drop(p, p->num_kinds - 1);
    for (int i = 0; i < p->num_strays; i++)
        if (fsdpi_plan_is_part(p, p->strays[i])) return;
    fsdp_buf_destroy(p->model, p->arena);
    p->arena = NULL;
}

// Memory for all kinds: the arena is as large as the largest needs it. A rehearsal shows what the
// options are now, so that a kind of other options is bound when it comes again.
static fsdp_status fsdpi_plan_bind_all(fsdp_plan *p, fsdpi_plan_kind *k) {
    int64_t bytes = fsdpi_plan_arena_bytes(&k->listing);
    for (int i = p->num_kinds - 1; i >= 0; i--)
        if (i < p->num_kinds && fsdpi_plan_is_fleeting(p, p->kinds[i])) fsdpi_plan_drop(p, i);
    fsdp_status status = fsdp_pools_trim(p->model);
    if (status) return status;
    if (bytes > fsdp_buf_nbytes(p->arena)) {
        for (int i = 0; i < p->num_kinds; i++) fsdpi_plan_bufs_free(p, p->kinds[i], 0);
        fsdp_buf_destroy(p->model, p->arena);
        p->arena = NULL;
        status = fsdp_buf_create(p->model, p->pool, FSDP_MEMORY_DEVICE, bytes, &p->arena);
        for (int i = 0; i < p->num_kinds && !status; i++) {
            p->kinds[i]->unbound = p->kinds[i]->settings != k->settings;
            if (!p->kinds[i]->unbound) status = fsdpi_plan_bind(p, p->kinds[i]);
        }
    }
    return status ? status : fsdpi_plan_bind(p, k);
}

/* -------------------------------------------------------------------------------------------- */
// Agreement of the ranks.

// The smallest of each number over all ranks of the model's mesh.
static fsdp_status fsdpi_plan_least(const fsdp_plan *p, int64_t *values, int count) {
    return fsdp_all_reduce(p->world, p->mesh, values, count, FSDP_I64, FSDP_MIN);
}

/* The first call at which a rank differs from rank 0 of the mesh, with both sides. It allocates
   nothing, so that no rank can drop out. */
static fsdp_status fsdpi_plan_differs(fsdp_plan *p, const fsdpi_plan_kind *k) {
    enum { WORDS = 160, HASHES = 64 };
    union {
        char text[WORDS];
        int32_t numbers[WORDS / 4];
    } theirs = {"options or sizes"};
    char first[WORDS];
    uint64_t hashes[HASHES];
    const fsdpi_plan_listing *l = &k->listing;
    int64_t calls = l->num_calls, least = INT64_MAX;
    fsdp_status status = fsdp_broadcast(p->world, p->mesh, &calls, sizeof calls, 0);
    for (int64_t c = 0; c < calls && !status; c++) {
        uint64_t mine = c < l->num_calls ? fsdpi_plan_call_hash(l, (int)c) : 0;
        for (int i = 0; i < HASHES && c % HASHES == 0; i++)
            hashes[i] = c + i < l->num_calls ? fsdpi_plan_call_hash(l, (int)c + i) : 0;
        if (c % HASHES == 0) status = fsdp_broadcast(p->world, p->mesh, hashes, sizeof hashes, 0);
        if (hashes[c % HASHES] != mine && least == INT64_MAX) least = c << 32 | fsdp_rank(p->world);
    }
    if (!status) status = fsdpi_plan_least(p, &least, 1);
    int call = least == INT64_MAX ? -1 : (int)(least >> 32), rank = (int)(least & 0x7FFFFFFF);
    if (call >= 0) fsdpi_plan_call_words(l, call, theirs.text, WORDS);
    else rank = -1;
    memcpy(first, theirs.text, WORDS);
    if (!status) status = fsdp_broadcast(p->world, p->mesh, first, sizeof first, 0);
    if (rank >= 0 && rank != fsdp_rank(p->world)) memset(&theirs, 0, sizeof theirs);
    if (!status && rank >= 0) // one rank has words, the others have zeros
        status = fsdp_all_reduce(p->world, p->mesh, theirs.numbers, WORDS / 4, FSDP_I32, FSDP_SUM);
    if (status) return status;
    return fsdp_fail(p->world, FSDP_ERR_MISMATCH,
                     "[E973] plan: rank %d differs from the mesh's first rank at call %d: %s, "
                     "expected %s: make the same calls, with the same options, on all ranks",
                     rank, call, theirs.text, first);
}

/* Whether all ranks got so far. status: this rank's. values[0] is written; behind it the least of
   each number over all ranks. */
static fsdp_status fsdpi_plan_together(fsdp_world *w, const fsdp_mesh *mesh, fsdp_status status,
                                       int64_t *values, int count) {
    values[0] = !status;
    fsdp_status reached = fsdp_all_reduce(w, mesh, values, count, FSDP_I64, FSDP_MIN);
    if (reached || values[0]) return reached;
    return status ? status
                  : fsdp_fail(w, FSDP_ERR_OUT_OF_MEMORY,
                              "[E974] plan: another rank could not make the plan: see its log; "
                              "steps go by calls");
}

// Likewise, and if `hash` is not 0, with the same hash.
static fsdp_status fsdpi_plan_agree(fsdp_plan *p, const fsdpi_plan_kind *k, fsdp_status status,
                                    uint64_t hash) {
    int64_t values[3] = {0, (int64_t)hash, (int64_t)~hash};
    status = fsdpi_plan_together(p->world, p->mesh, status, values, 3);
    return !status && hash && values[1] != ~values[2] ? fsdpi_plan_differs(p, k) : status;
}

/* -------------------------------------------------------------------------------------------- */

// Is there something in the step that depends on more than options and states?
static fsdp_status fsdpi_plan_refusal(fsdp_plan *p, const fsdpi_plan_tape *by_calls) {
    char text[FSDPI_PLAN_TEXT] = "";
    fsdp_mesh_info info = FSDP_ZERO;
    fsdp_unit *stranger;
    fsdp_status status = fsdpi_plan_mesh_info(p, &info, &stranger);
    if (status) return status;
    if (stranger)
        snprintf(text, sizeof text,
                 "unit '%.120s' has other groups of ranks than the others: give all units one mesh",
                 fsdp_unit_name(stranger));
    for (int i = 0; i < p->num_units && !text[0]; i++)
        if (fsdp_unit_follows_use(p->units[i]))
            snprintf(text, sizeof text,
                     "what unit '%.120s' reduces depends on the parameters that were used "
                     "(grads_overwrite, or fsdp_set_reduce_scatter_unused_params 0)",
                     fsdp_unit_name(p->units[i]));
    for (int i = 0; i < by_calls->num_ops && !text[0]; i++)
        if (p->mode_of_world == FSDPI_PLAN_STREAMS &&
            by_calls->ops[i].label == FSDP_LABEL_GRAD_HOOK)
            snprintf(text, sizeof text,
                     "unit '%.120s' has a post-accumulate hook, for which the host waits on this "
                     "device",
                     fsdp_unit_name(by_calls->ops[i].unit));
    if (!text[0]) return FSDP_OK;
    fsdpi_plan_refuse_loudly(p, FSDP_ERR_UNSUPPORTED, text);
    return FSDP_ERR_UNSUPPORTED;
}

// The listing of a kind that has a tape and places.
static fsdp_status fsdpi_plan_finish_listing(fsdp_plan *p, fsdpi_plan_kind *k,
                                             const fsdpi_plan_tape *by_calls,
                                             const fsdpi_plan_facts *f) {
    fsdpi_plan_count_ops(&k->tape, &k->listing, 1);
    fsdp_status status = fsdpi_plan_list(p, k, &k->tape, &k->listing);
    // Units without elements gather nothing. What a unit brings along is not followed: its first
    // use reads what another step gathered, and `reads` cannot tell it from later ones. Likewise
    // where only some visits find a unit gathered (unshard_in_backward 0).
    for (int u = 0; u < p->num_units; u++) f->order[u] = 0;
    for (int i = 0; i < by_calls->num_ops; i++) {
        const fsdp_op *op = &by_calls->ops[i];
        int fills = op->kind == FSDP_OP_ALL_GATHER || op->label == FSDP_LABEL_COPY_IN ||
                    op->label == FSDP_LABEL_PRE_GATHER;
        int u = op->unit && fills ? fsdpi_plan_index(p, op->unit) : -1;
        if (u >= 0) f->order[u] = by_calls->held[u] ? 0 : 3;
    }
    for (int c = 0; c + 1 < k->num_calls && !status; c++) { // what units read, by calls
        int u = k->calls[c].index, call = k->calls[c].call;
        int phase = call == FSDP_CALL_PRE_FORWARD ? 1 : call == FSDP_CALL_PRE_BACKWARD ? 2 : 0;
        if (by_calls->storage[c] != FSDP_STORAGE_UNSHARDED) f->order[u] &= ~phase;
        else k->listing.units[u].reads |= phase;
    }
    for (int u = 0; u < p->num_units && !status; u++) k->listing.units[u].reads &= f->order[u];
    return status;
}

// What this rank can do alone: a plan without memory, and its proof.
static fsdp_status fsdpi_plan_make_alone(fsdp_plan *p, fsdpi_plan_kind *k, int64_t most) {
    fsdpi_plan_tape by_calls;
    fsdpi_plan_facts f;
    memset(&by_calls, 0, sizeof by_calls);
    memset(&f, 0, sizeof f);
    fsdp_status status = fsdpi_plan_by_calls(p, k, &by_calls);
    if (!status) status = fsdpi_plan_refusal(p, &by_calls);
    if (!status) status = fsdpi_plan_facts_new(p, k, &f);
    if (!status) status = fsdpi_plan_find_spans(p, &f, &by_calls);
    if (!status) {
        fsdpi_plan_find_base(&f, &by_calls);
        fsdpi_plan_count_ops(&by_calls, &k->listing, 0);
        status = fsdpi_plan_weigh(p, k, &f, most);
    }
    if (!status) status = fsdpi_plan_finish_listing(p, k, &by_calls, &f);
    fsdp_plan_proof proof;
    if (!status) status = fsdpi_plan_prove_one(p->model, &k->listing, &proof);
    if (!status && proof.refuted) {
        status = fsdp_fail(p->world, FSDP_ERR_INTERNAL,
                           "[E975] plan: refuted, so that steps go by calls: %s", proof.text);
        fsdpi_plan_refuse(p, proof.text);
    }
    fsdpi_plan_facts_end(p, &f);
    fsdpi_plan_tape_free(p, &by_calls);
    return status;
}

/* The plan of a kind, or the reason why there is none. k NULL: this rank has none, and takes part
   in what the others do. *made: on entry 0 if the step has failed here. On return 0 if there is no
   plan, since the step has failed on some rank, or began with slots that will be gone. Returns a
   failure only if the step has failed: ranks that differ, a collective. */
static fsdp_status fsdpi_plan_make(fsdp_plan *p, fsdpi_plan_kind *k, int *made) {
    int64_t by_calls = fsdpi_plan_pool_bytes(p);
    int64_t most = p->desc.most_bytes ? p->desc.most_bytes : by_calls;
    if (!p->desc.most_bytes && most < FSDPI_PLAN_LEAST_BYTES) most = FSDPI_PLAN_LEAST_BYTES;
    if (k) k->listing.by_calls = by_calls;
    int64_t model = (int64_t)fsdpi_plan_model_hash(p);
    int64_t values[4] = {most, *made && (!k || !fsdpi_plan_is_fleeting(p, k)), model, ~model};
    fsdp_status status = fsdpi_plan_least(p, values, 4), own;
    *made = (int)values[1];
    if (status || !*made) return status;
    if (values[2] != ~values[3]) { // alike on all ranks
        fsdpi_plan_refuse_loudly(p, FSDP_ERR_UNSUPPORTED,
                                 "ranks have parameters of other sizes, as tensor parallelism that "
                                 "cuts unevenly gives them: a plan is the same on all ranks");
        return FSDP_OK;
    }
    most = values[0];
    own = k ? fsdpi_plan_make_alone(p, k, most) : FSDP_ERR_OUT_OF_MEMORY;
    if (!own) k->listing.hash = fsdpi_plan_text_hash(&k->listing);
    status = fsdpi_plan_agree(p, k, own, own ? 1 : k->listing.hash);
    if (!status) status = fsdpi_plan_agree(p, k, fsdpi_plan_bind_all(p, k), 0);
    if (!status) return FSDP_OK;
    if (p->mode != FSDP_PLAN_REFUSED) fsdpi_plan_refuse(p, fsdp_last_error(p->world));
    return status == FSDP_ERR_MISMATCH || fsdp_world_status(p->world) ? status : FSDP_OK;
}


/* ==== plan/load.h ===========================================================================
   a plan from a text instead of a recorded step */

// Owns: the way from decisions that somebody wrote to a kind. The text says what calls the program
// makes and what is decided; all else is derived again, and compared with what the text says of it.

static fsdp_status fsdpi_plan_other(const fsdp_plan *p, const char *field, long long theirs,
                                    long long mine) {
    return fsdp_fail(p->world, FSDP_ERR_MISMATCH,
                     "[E989] plan_load: the text is of another model or world: %s is %lld, here it "
                     "is %lld",
                     field, theirs, mine);
}

// Is the text of this model, in a world like this one?
static fsdp_status fsdpi_plan_check_model(const fsdp_plan *p, const fsdpi_plan_listing *l) {
    fsdp_mesh_info info = FSDP_ZERO;
    fsdp_unit *stranger;
    fsdp_status status = fsdpi_plan_mesh_info(p, &info, &stranger);
    if (status) return status;
    if (l->num_units != p->num_units)
        return fsdpi_plan_other(p, "units", l->num_units, p->num_units);
    if (l->num_params != fsdp_num_params(p->model))
        return fsdpi_plan_other(p, "params", l->num_params, fsdp_num_params(p->model));
    if (l->shards != info.shard_mesh_size)
        return fsdpi_plan_other(p, "shards", l->shards, info.shard_mesh_size);
    if (l->replicas != info.replicate_mesh_size)
        return fsdpi_plan_other(p, "replicas", l->replicas, info.replicate_mesh_size);
    if (l->mode != p->mode_of_world)
        return fsdp_fail(p->world, FSDP_ERR_MISMATCH,
                         "[E990] plan_load: the text is of a world that runs %s, this one runs %s",
                         fsdpi_plan_modes[l->mode], fsdpi_plan_modes[p->mode_of_world]);
    if (l->model != fsdpi_plan_model_hash(p))
        return fsdp_fail(
            p->world, FSDP_ERR_MISMATCH,
            "[E991] plan_load: the text is of a model with other names, shapes, dtypes "
            "or frozen parameters");
    return FSDP_OK;
}

/* The states in which steps begin: one step by calls leads there, with gradients dropped behind it.
   If units then hold slots, which no text tells, they are those that units hold now. */
static fsdp_status fsdpi_plan_trial_run(void *user) {
    fsdpi_plan_show *s = (fsdpi_plan_show *)user;
    fsdp_plan *p = s->plan;
    fsdp_status status = fsdpi_plan_play(user);
    if (!status) s->call = s->kind->num_calls - 1;
    if (!status) status = fsdp_finalize_backward(p->model);
    if (!status) status = fsdp_params_changed(p->model);
    if (!status) status = fsdp_zero_grad(p->model);
    if (!status) fsdpi_plan_states_now(p, s->last);
    s->lasts = fsdpi_plan_give_back(s) != NULL;
    if (!status && !s->lasts) memcpy(s->kind->begin, s->last, (size_t)p->num_units * p->unit_bytes);
    return status;
}

static fsdp_status fsdpi_plan_find_begin(fsdp_plan *p, fsdpi_plan_kind *k) {
    fsdpi_plan_tape raw;
    fsdpi_plan_show show;
    fsdpi_plan_show_new(&show, p, &raw, k, NULL, NULL);
    fsdpi_plan_states_now(p, k->begin);
    fsdp_status status = fsdpi_plan_find_older(p, k); // fails if a unit is not idle
    for (int i = 0; i < k->num_older && !status; i++)
        if (fsdpi_plan_is_part(p, k->older[i]))
            status = fsdp_fail(p->world, FSDP_ERR_INVALID_STATE,
                               "[E940] plan_load: a unit holds a slot of a plan since a step that "
                               "left it: run a whole step, or call fsdp_model_reset, first");
    if (status) return status;
    status = fsdpi_plan_rehearse_with(&show, fsdpi_plan_trial_run);
    if (!show.lasts) k->num_older = 0;
    if (status && !fsdp_world_status(p->world) && status != FSDP_ERR_OUT_OF_MEMORY) {
        const fsdpi_plan_call *at = &k->calls[show.call];
        status = fsdp_fail(p->world, FSDP_ERR_INVALID_ARG,
                           "[E992] plan_load: call %d, %s '%.120s', is not possible where the text "
                           "has it: put the calls in the order of your program. %.300s",
                           show.call, fsdpi_plan_call_name(at->call),
                           at->unit ? fsdp_unit_name(at->unit) : "", fsdp_last_error(p->world));
    }
    fsdpi_plan_show_end(&show);
    fsdpi_plan_tape_free(p, &raw);
    return status;
}

// What follows from acts: who waits for a later call, and from which pre_backward on there is sync.
static void fsdpi_plan_derive_choice(const fsdpi_plan_facts *f, fsdpi_plan_choice *c) {
    for (int i = 0; i < c->num_acts; i++) {
        fsdpi_plan_act *act = &c->acts[i];
        if (act->what != FSDPI_PLAN_REDUCE) continue;
        c->waits[act->unit] = 1;
        act->at = f->post[act->unit];
    }
    for (int i = 0; i < c->num_acts; i++) {
        const fsdpi_plan_act *act = &c->acts[i];
        int pre = act->call;
        if (act->what != FSDPI_PLAN_COLLECT || c->waits[act->unit]) continue;
        for (int k = 0; k < f->num_calls; k++) // one that collects makes the others reduce
            if (f->kind->calls[k].index == act->unit && c->sync[k] < 0 &&
                f->kind->calls[k].call == FSDP_CALL_PRE_BACKWARD)
                c->sync[k] = 1;
        while (pre > 0 && (f->kind->calls[pre].index != act->unit ||
                           f->kind->calls[pre].call != FSDP_CALL_PRE_BACKWARD))
            pre--;
        c->sync[pre] = 0;
    }
}

static fsdp_status fsdpi_plan_act_refused(const fsdp_plan *p, const fsdpi_plan_act *act,
                                          const char *why) {
    return fsdp_fail(p->world, FSDP_ERR_INVALID_ARG,
                     "[E993] plan_load: a decision is not possible where the text has it: call %d, "
                     "%s '%.200s': %s",
                     act->call, fsdpi_plan_words[act->what], fsdp_unit_name(p->units[act->unit]),
                     why);
}

static int fsdpi_plan_has_act(const fsdpi_plan_choice *c, int what, int unit, int call) {
    for (int i = 0; i < c->num_acts; i++)
        if (c->acts[i].what == what && c->acts[i].unit == unit &&
            (call < 0 || c->acts[i].call == call))
            return 1;
    return 0;
}

/* What the tape alone does not show: gradients that wait are reduced in this step, and what is kept
   is there. */
static fsdp_status fsdpi_plan_check_acts(const fsdp_plan *p, const fsdpi_plan_facts *f,
                                         const fsdpi_plan_choice *c) {
    for (int i = 0; i < c->num_acts; i++) {
        const fsdpi_plan_act *act = &c->acts[i];
        int u = act->unit, reduced = 0, ends = 0;
        for (int k = act->call + 1; k + 1 < f->num_calls; k++)
            reduced |= f->kind->calls[k].index == u &&
                       f->kind->calls[k].call == FSDP_CALL_POST_BACKWARD &&
                       !fsdpi_plan_has_act(c, FSDPI_PLAN_COLLECT, u, k);
        for (int k = 0; k < f->num_spans; k++)
            ends |= f->spans[k].owner == u && f->spans[k].end == act->call;
        if (i > 0 && act[-1].call == act->call && act->what == FSDPI_PLAN_GATHER && !act->late &&
            (act[-1].what != FSDPI_PLAN_GATHER || act[-1].late))
            return fsdpi_plan_act_refused(p, act, "it comes before what is done behind the call");
        const uint64_t *sort = act->what == FSDPI_PLAN_GATHER ? f->gathers : f->reduces;
        if (i > 0 && fsdpi_plan_is_joined(act - 1, act) &&
            (!sort[u] || sort[u] != sort[act[-1].unit]))
            return fsdpi_plan_act_refused(p, act, "it cannot be joined with the one before it");
        if (act->call + 1 >= f->num_calls)
            return fsdpi_plan_act_refused(p, act, "nothing is decided in finalize_backward");
        if (act->what == FSDPI_PLAN_KEEP && !ends)
            return fsdpi_plan_act_refused(p, act, "by calls it is not freed there");
        if (act->what == FSDPI_PLAN_COLLECT &&
            (f->kind->calls[act->call].index != u ||
             f->kind->calls[act->call].call != FSDP_CALL_POST_BACKWARD))
            return fsdpi_plan_act_refused(p, act, "the call is not its post_backward");
        if (act->what == FSDPI_PLAN_COLLECT && !c->waits[u] && !reduced)
            return fsdpi_plan_act_refused(p, act, "nothing reduces what waits");
        if (act->what == FSDPI_PLAN_REDUCE &&
            (f->posts[u] != 1 || f->last_call[u] != f->post[u] || act->call < f->post[u] ||
             !f->reduces[u] || !fsdpi_plan_has_act(c, FSDPI_PLAN_COLLECT, u, f->post[u])))
            return fsdpi_plan_act_refused(p, act, "its gradients do not wait there");
    }
    for (int k = 0; k < f->num_spans; k++) { // finalize frees what is open, and nothing else
        const fsdpi_plan_span *span = &f->spans[k];
        int last = span->end < f->num_calls, freed = 0;
        for (int i = k + 1; i < f->num_spans; i++) last &= f->spans[i].owner != span->owner;
        for (int i = 0; i < c->num_acts; i++)
            freed |= c->acts[i].what == FSDPI_PLAN_FREE && c->acts[i].unit == span->owner &&
                     c->acts[i].call >= span->end;
        if (last && !freed)
            return fsdp_fail(
                p->world, FSDP_ERR_INVALID_ARG,
                "[E962] plan_load: a decision is missing: '%.200s' is not freed behind "
                "its last use in call %d",
                fsdp_unit_name(p->units[span->owner]), span->end);
    }
    return FSDP_OK;
}

// The kind's tape and listing from the acts of `given`.
static fsdp_status fsdpi_plan_load_alone(fsdp_plan *p, fsdpi_plan_kind *k,
                                         const fsdpi_plan_listing *given, const char *text,
                                         size_t length, int ops) {
    fsdpi_plan_tape by_calls;
    fsdpi_plan_facts f;
    fsdpi_plan_listing *l = &k->listing;
    memset(&by_calls, 0, sizeof by_calls);
    memset(&f, 0, sizeof f);
    fsdp_status status = fsdpi_plan_find_begin(p, k);
    if (!status) status = fsdpi_plan_by_calls(p, k, &by_calls);
    if (!status) status = fsdpi_plan_facts_new(p, k, &f);
    if (!status) status = fsdpi_plan_find_spans(p, &f, &by_calls);
    if (!status) status = fsdpi_plan_choice_new(p, &l->choice, k->num_calls);
    for (int i = 0; i < given->choice.num_acts && !status; i++) {
        const fsdpi_plan_act *act = &given->choice.acts[i];
        status = fsdpi_plan_act_add(p, &l->choice, act->call, act->what, act->late, act->unit,
                                    act->group, act->why, act->at);
    }
    if (!status) {
        memcpy(l->choice.managed, f.managed, (size_t)p->num_units);
        fsdpi_plan_derive_choice(&f, &l->choice);
        status = fsdpi_plan_check_acts(p, &f, &l->choice);
    }
    if (!status) {
        fsdpi_plan_count_ops(&by_calls, l, 0);
        int decides = l->choice.num_acts > 0;
        status = fsdpi_plan_tape_make(p, k, decides ? &l->choice : NULL, NULL, &k->tape);
        if (status && !fsdp_world_status(p->world) && status != FSDP_ERR_OUT_OF_MEMORY)
            status = fsdp_fail(
                p->world, FSDP_ERR_INVALID_ARG,
                "[E968] plan_load: the decisions of the text are not possible together: "
                "%s",
                fsdp_last_error(p->world));
    }
    if (!status) status = fsdpi_plan_place(p, &k->tape, l, fsdpi_plan_passes(p));
    if (!status) status = fsdpi_plan_finish_listing(p, k, &by_calls, &f);
    l->by_calls = given->by_calls;
    fsdp_plan_proof proof;
    if (!status) status = fsdpi_plan_prove_one(p->model, l, &proof);
    if (!status && proof.refuted)
        status = fsdp_fail(p->world, FSDP_ERR_INVALID_ARG, "[E994] plan_load: refuted: %s",
                           proof.text);
    char *printed = NULL;
    size_t size = 0;
    if (!status && ops) status = fsdpi_plan_print(p->model, l, FSDP_PLAN_TEXT_OPS, &printed, &size);
    if (!status && ops) {
        fsdpi_plan_in in;
        memset(&in, 0, sizeof in);
        in.world = p->world;
        in.text = text;
        in.end = text + length - (sizeof "end 0123456789abcdef\n" - 1);
        fsdpi_plan_same_text(&in, printed, size, "what follows from the decisions, ");
        status = in.status;
    }
    fsdpi_plan_free(p->model, printed);
    fsdpi_plan_facts_end(p, &f);
    fsdpi_plan_tape_free(p, &by_calls);
    return status;
}

static fsdp_status fsdpi_plan_load_kind(fsdp_plan *p, const fsdpi_plan_listing *given,
                                        fsdpi_plan_kind **out) {
    fsdpi_plan_kind *k;
    fsdp_status status = fsdpi_plan_alloc(p->model, sizeof *k, (void **)out);
    if (status) return status;
    k = *out;
    status = fsdpi_plan_alloc(p->model, (size_t)p->num_units * p->unit_bytes, (void **)&k->begin);
    if (!status)
        status = fsdpi_plan_alloc(p->model, (size_t)given->num_calls * sizeof *k->calls,
                                  (void **)&k->calls);
    k->plan = p;
    k->settings = fsdp_model_settings(p->model);
    k->num_calls = given->num_calls;
    for (int c = 0; c < given->num_calls && !status; c++) {
        k->calls[c] = given->calls[c];
        k->calls[c].unit = given->calls[c].index >= 0 ? p->units[given->calls[c].index] : NULL;
    }
    return status;
}

// May a plan be loaded now?
static fsdp_status fsdpi_plan_may_load(const fsdp_plan *p, const char *text) {
    if (!p || !text)
        return fsdp_fail(p ? p->world : NULL, FSDP_ERR_INVALID_ARG,
                         "[E995] plan_load: plan or text is NULL");
    if (p->mode == FSDP_PLAN_REFUSED)
        return fsdp_fail(p->world, FSDP_ERR_INVALID_STATE,
                         "[E942] plan_load: steps go by calls for good, so that no plan is used: "
                         "call fsdp_plan_forget first");
    if (p->open || p->num_kinds >= p->desc.most_kinds)
        return fsdp_fail(p->world, FSDP_ERR_INVALID_STATE,
                         "[E996] plan_load: %s: load between steps, and at most %d kinds of steps",
                         p->open ? "a step is under way" : "no place is left", p->desc.most_kinds);
    return FSDP_OK;
}

static fsdp_status fsdpi_plan_load_fits(const fsdp_plan *p, const fsdpi_plan_kind *k) {
    int64_t bytes = k->listing.bytes, most = p->desc.most_bytes;
    if (!most || bytes <= most) return FSDP_OK;
    return fsdp_fail(p->world, FSDP_ERR_OUT_OF_MEMORY,
                     "[E939] plan_load: slots need %lld bytes, %lld are allowed: raise "
                     "fsdp_plan_desc.most_bytes, or keep fewer units",
                     (long long)bytes, (long long)most);
}

FSDP_API fsdp_status fsdp_plan_load(fsdp_plan *plan, const char *text, size_t length) {
    fsdpi_plan_listing given;
    fsdpi_plan_kind *k = NULL;
    int ops = 0;
    memset(&given, 0, sizeof given);
    fsdp_status status = fsdpi_plan_may_load(plan, text);
    if (!plan) return status;
    if (!status) status = fsdpi_plan_parse(plan->model, text, length, &given, &ops);
    if (!status) status = fsdpi_plan_check_model(plan, &given); // commits
    if (!status)
        status = fsdpi_plan_grow(plan->model, (void **)&plan->kinds, plan->num_kinds,
                                 &plan->cap_kinds, sizeof *plan->kinds);
    if (!status) status = fsdpi_plan_load_kind(plan, &given, &k);
    if (!status) status = fsdpi_plan_load_alone(plan, k, &given, text, length, ops);
    if (!status) status = fsdpi_plan_load_fits(plan, k);
    if (!status) k->listing.hash = fsdpi_plan_text_hash(&k->listing);
    status = fsdpi_plan_agree(plan, k, status, status ? 1 : k->listing.hash);
    int binds = !status;
    if (binds) status = fsdpi_plan_agree(plan, k, fsdpi_plan_bind_all(plan, k), 0);
    fsdpi_plan_listing_end(plan->model, &given);
    if (!status) {
        k->used_at = plan->steps;
        plan->kinds[plan->num_kinds++] = k;
        return FSDP_OK;
    }
    fsdpi_plan_kind_free(plan, k);
    if (binds && !fsdp_world_status(plan->world)) { // the other kinds may have lost their places
        fsdpi_plan_drop_all(plan);
        if (plan->mode == FSDP_PLAN_REPLAYING) plan->mode = FSDP_PLAN_RECORDING;
    }
    return status;
}


/* ==== plan/life.h ===========================================================================
   steps recorded, replayed and left; the public functions */

// Owns: fsdp_plan. A step begins with the first call behind a finalize. If its kind is known, its
// calls are answered from the tape for as long as they are the program's.

static const char *fsdpi_plan_unit_name(const fsdp_unit *unit) {
    return unit ? fsdp_unit_name(unit) : "";
}

static void fsdpi_plan_say(fsdp_plan *p, const fsdpi_plan_call *expected, const fsdp_unit *unit,
                           int call) {
    if (!expected)
        snprintf(p->why, sizeof p->why, "options changed before call %d, %s '%.120s'", p->at,
                 fsdpi_plan_call_name(call), fsdpi_plan_unit_name(unit));
    else
        snprintf(p->why, sizeof p->why, "expected %s '%.120s' (call %d of %d), got %s '%.120s'",
                 fsdpi_plan_call_name(expected->call), fsdpi_plan_unit_name(expected->unit), p->at,
                 p->kind->num_calls, fsdpi_plan_call_name(call), fsdpi_plan_unit_name(unit));
}

// COMPUTE has written all places of a kind: behind whoever had them, and before whoever will.
static fsdp_status fsdpi_plan_pass_by(fsdp_plan *p, const fsdpi_plan_kind *k) {
    fsdp_status status = FSDP_OK;
    for (int i = 0; i < k->listing.num_slots && !status; i++) {
        fsdp_op op;
        if (k->listing.slots[i].offset < 0) continue;
        fsdp_op_init(&op, p->model, NULL, FSDP_OP_USE, FSDP_LABEL_NONE, FSDP_STREAM_COMPUTE);
        op.what = "plan";
        op.dst = k->bufs[i];
        status = fsdp_emit(p->model, &op);
    }
    return status;
}

/* Kinds have the same memory, but slots, and with them events, of their own: where streams run at
   the same time, the slots of one come behind those of the other. */
static fsdp_status fsdpi_plan_hand_over(fsdp_plan *p) {
    fsdp_status status = FSDP_OK;
    if (p->last && p->last != p->kind && p->mode_of_world != FSDPI_PLAN_INLINE) {
        status = fsdpi_plan_pass_by(p, p->last);
        if (!status) status = fsdpi_plan_pass_by(p, p->kind);
    }
    p->last = p->kind;
    return status;
}

// A kind whose arena has been replaced meanwhile; without it the step goes by calls, on all ranks.
static fsdp_status fsdpi_plan_bind_again(fsdp_plan *p) {
    fsdpi_plan_kind *k = p->kind;
    fsdp_status status = fsdpi_plan_agree(p, k, fsdpi_plan_bind(p, k), 0);
    k->unbound = status != FSDP_OK;
    if (!status) return FSDP_OK;
    fsdpi_plan_drop_kind(p, k);
    p->kind = NULL;
    p->mode = FSDP_PLAN_BY_CALLS;
    snprintf(p->why, sizeof p->why, "%s", "the tape could not be made again for a new arena");
    return fsdp_world_status(p->world);
}

// Room for a kind. Units may hold slots of one that is dropped: those stay until they are free.
static void fsdpi_plan_make_room(fsdp_plan *p) {
    while (p->num_kinds >= p->desc.most_kinds) {
        int oldest = 0;
        for (int i = 1; i < p->num_kinds; i++)
            if (p->kinds[i]->used_at < p->kinds[oldest]->used_at) oldest = i;
        fsdpi_plan_drop(p, oldest);
    }
}

// The first call of a step: what kind of step is it?
static fsdp_status fsdpi_plan_begin(fsdp_plan *p) {
    fsdp_status status = FSDP_OK;
    p->open = 1;
    p->at = p->num_calls = p->lost = p->broken = 0;
    p->next = NULL;
    p->settings = fsdp_model_settings(p->model);
    p->why[0] = 0;
    p->kind = NULL;
    fsdpi_plan_sweep(p, 0);
    if (!p->num_kinds) fsdpi_plan_drop_all(p); // units have given the arena back by now
    fsdpi_plan_states_now(p, p->begin);
    for (int i = 0; i < p->num_kinds && !p->kind; i++)
        if (p->kinds[i]->settings == p->settings &&
            memcmp(p->kinds[i]->begin, p->begin, (size_t)p->num_units * p->unit_bytes) == 0)
            p->kind = p->kinds[i];
    p->mode = p->kind ? FSDP_PLAN_REPLAYING : p->warm ? FSDP_PLAN_WARM_UP : FSDP_PLAN_RECORDING;
    if (p->mode == FSDP_PLAN_RECORDING) fsdpi_plan_make_room(p);
    if (p->kind && p->kind->unbound) status = fsdpi_plan_bind_again(p);
    if (p->num_kinds && !p->kind && !p->why[0])
        snprintf(p->why, sizeof p->why, "%s",
                 "another kind of step: options, or what units hold, are not those of a plan");
    return p->kind && !status ? fsdpi_plan_hand_over(p) : status;
}

// Is a unit's reduction waiting for a later call?
static int fsdpi_plan_owes(const fsdp_plan *p, const fsdpi_plan_act *act) {
    return act->what == FSDPI_PLAN_COLLECT && act->why == FSDPI_PLAN_WHY_JOINED &&
           act->call < p->at && act->at >= p->at;
}

/* The plan is not followed any further: reductions that wait are made, with the options that they
   had by calls. */
static fsdp_status fsdpi_plan_part(fsdp_plan *p) {
    fsdp_status status = FSDP_OK;
    if (!p->open || p->mode != FSDP_PLAN_REPLAYING) return FSDP_OK;
    const fsdpi_plan_choice *c = &p->kind->listing.choice;
    p->left++;
    p->next = NULL;
    p->mode = FSDP_PLAN_BY_CALLS;
    for (int i = 0; i < c->num_acts && !status; i++)
        if (fsdpi_plan_owes(p, &c->acts[i])) status = fsdp_unit_reduce(p->units[c->acts[i].unit]);
    return status;
}

// From here on the step goes by calls; strict: the next call fails.
static fsdp_status fsdpi_plan_leave(fsdp_plan *p) {
    p->kind->left++;
    p->broken = p->desc.strict;
    return fsdpi_plan_part(p);
}

// Options are about to change. If nothing waits, the next call looks whether they have.
static fsdp_status fsdpi_plan_setter(fsdp_plan *p) {
    int owes = 0;
    if (!p->open || p->mode != FSDP_PLAN_REPLAYING) return FSDP_OK;
    const fsdpi_plan_choice *c = &p->kind->listing.choice;
    for (int i = 0; i < c->num_acts; i++) owes |= fsdpi_plan_owes(p, &c->acts[i]);
    if (!owes) return FSDP_OK;
    snprintf(p->why, sizeof p->why,
             "options changed before call %d, while gradients waited for a later one", p->at);
    return fsdpi_plan_leave(p);
}

/* The program writes shards or their gradients inside of a step. No program of a plan has such a
   call: what was gathered before, or added to, may be another thing behind it. */
static fsdp_status fsdpi_plan_written(fsdp_plan *p, int call) {
    if (!p->open || (p->mode != FSDP_PLAN_REPLAYING && p->mode != FSDP_PLAN_RECORDING))
        return FSDP_OK;
    snprintf(p->why, sizeof p->why,
             "%s inside of a step, before call %d: make it between finalize and the next forward",
             fsdpi_plan_call_name(call), p->mode == FSDP_PLAN_REPLAYING ? p->at : p->num_calls);
    if (p->mode == FSDP_PLAN_REPLAYING) return fsdpi_plan_leave(p);
    p->mode = FSDP_PLAN_BY_CALLS;
    p->differ++;
    return FSDP_OK;
}

// One call from the tape: states first, since what is sent along depends on them.
static fsdp_status fsdpi_plan_replay(fsdp_plan *p, const fsdpi_plan_step *step) {
    const fsdpi_plan_tape *t = &p->kind->tape;
    size_t size = p->unit_bytes;
    fsdp_status status = FSDP_OK;
    p->next = step + 1;
    p->at++;
    for (int i = 0; i < step->num_states && !status; i++)
        status = fsdp_unit_restore(step->states[i].of, t->saved + (size_t)step->states[i].at * size,
                                   size);
    for (int i = 0; i < step->num_runs && !status; i++) {
        const fsdpi_plan_run *run = &step->runs[i];
        if (run->flags) status = fsdp_unit_flag_use(run->flags);
        if (!status) status = fsdp_emit_again(p->model, t->ops + run->begin, run->end - run->begin);
    }
    return status;
}

static void fsdpi_plan_record(fsdp_plan *p, fsdp_unit *unit, int call) {
    fsdpi_plan_call one = {unit, call, unit ? fsdpi_plan_index(p, unit) : -1};
    if (fsdp_model_settings(p->model) != p->settings) {
        p->mode = FSDP_PLAN_BY_CALLS;
        p->differ++;
        snprintf(p->why, sizeof p->why, "%s", "options changed inside of the step");
        return;
    }
    // Without memory this rank goes on to the end of the step, where the others wait for it.
    p->lost |= fsdpi_plan_grow(p->model, (void **)&p->calls, p->num_calls, &p->cap_calls,
                               sizeof one) != FSDP_OK;
    if (!p->lost) p->calls[p->num_calls++] = one;
}

// A kind for the recorded step, at its end. finalized: what the core has said of it.
static fsdp_status fsdpi_plan_recorded(fsdp_plan *p, fsdp_status finalized) {
    fsdpi_plan_kind *k = NULL;
    size_t begin = (size_t)p->num_units * p->unit_bytes,
           calls = (size_t)p->num_calls * sizeof *k->calls;
    fsdp_status status = finalized ? finalized : p->lost ? FSDP_ERR_OUT_OF_MEMORY : FSDP_OK;
    if (!status)
        status = fsdpi_plan_grow(p->model, (void **)&p->kinds, p->num_kinds, &p->cap_kinds,
                                 sizeof *p->kinds);
    p->recorded += !finalized;
    if (!status) status = fsdpi_plan_alloc(p->model, sizeof *k, (void **)&k);
    if (!status) status = fsdpi_plan_alloc(p->model, begin, (void **)&k->begin);
    if (!status) status = fsdpi_plan_alloc(p->model, calls, (void **)&k->calls);
    if (!status) {
        memcpy(k->begin, p->begin, begin);
        memcpy(k->calls, p->calls, calls);
        k->plan = p;
        k->settings = p->settings;
        k->num_calls = p->num_calls;
    }
    if (!status) status = fsdpi_plan_find_older(p, k);
    int made = !finalized;
    status = fsdpi_plan_make(p, status ? NULL : k, &made);
    if (!status && p->mode != FSDP_PLAN_REFUSED && !made) { // the next one like it has a plan
        snprintf(p->why, sizeof p->why, "%s",
                 "it failed on a rank, or began with gradients or parameters of another step");
        fsdpi_plan_kind_free(p, k);
        return FSDP_OK;
    }
    if (!status && p->mode != FSDP_PLAN_REFUSED) {
        k->used_at = p->steps;
        p->kinds[p->num_kinds++] = k;
        p->mode = FSDP_PLAN_REPLAYING; // the next step, if it is like this one
        return FSDP_OK;
    }
    fsdpi_plan_kind_free(p, k);
    if (!fsdp_world_status(p->world))
        fsdpi_plan_drop_all(p); // steps by calls have slots of their own
    return status;
}

// The end of a step.
static int fsdpi_plan_finalize(fsdp_plan *p, fsdp_status *status) {
    fsdpi_plan_kind *k = p->kind;
    p->open = 0;
    p->next = NULL;
    p->steps++;
    if (p->mode == FSDP_PLAN_WARM_UP && --p->warm == 0) {
        p->mode = FSDP_PLAN_RECORDING; // from the next step on
        return 0;
    }
    if (p->mode == FSDP_PLAN_REPLAYING) {
        k->replayed++;
        p->replayed++;
        k->used_at = p->steps;
        k->left = 0;
        p->differ = 0;
    }
    if (p->mode == FSDP_PLAN_BY_CALLS && k && k->left >= FSDPI_PLAN_PATIENCE) {
        fsdpi_plan_drop_kind(p, k);
        p->differ++;
    }
    if (p->differ >= FSDPI_PLAN_PATIENCE) {
        char text[FSDPI_PLAN_TEXT];
        snprintf(text, sizeof text, "steps differ from each other: %.400s", p->why);
        fsdpi_plan_refuse_loudly(p, FSDP_ERR_INVALID_STATE, text);
    }
    if (p->mode != FSDP_PLAN_RECORDING) return 0;
    *status = fsdp_finalize_backward(p->model); // goes to the extensions behind, and to the core
    if (fsdp_world_status(p->world)) return 1;
    fsdp_status made = fsdpi_plan_recorded(p, *status); // the other ranks wait, whatever it says
    if (!*status) *status = made;
    return 1;
}

// A call that is not simply the next one of a replay.
static int fsdpi_plan_look(fsdp_plan *p, fsdp_unit *unit, int call, fsdp_status *status) {
    fsdp_model *model = p->model;
    int ends = call == FSDP_CALL_RESET || call == FSDP_CALL_FINALIZE;
    if (call == FSDP_CALL_SET) {
        *status = fsdpi_plan_setter(p);
        return 0;
    }
    if (call == FSDP_CALL_ZERO_GRAD || call == FSDP_CALL_PARAMS_CHANGED || call == FSDP_CALL_LOAD) {
        *status = fsdpi_plan_written(p, call);
        return 0;
    }
    if (p->mode == FSDP_PLAN_PAUSED)
        p->open = !ends && (p->open || fsdp_is_grad_enabled(model)); // as below
    if (call == FSDP_CALL_RESET) p->open = 0, p->next = NULL;
    if (p->mode >= FSDP_PLAN_PAUSED || call == FSDP_CALL_RESET) return 0;
    if (!p->open && !fsdp_is_grad_enabled(model)) return 0; // an evaluation is no step
    // Finalize is asked about before the core commits: a new layout comes before we look.
    *status = fsdp_model_commit(model);
    if (!*status && !p->open) *status = fsdpi_plan_begin(p);
    if (*status) return 1;
    if (p->mode == FSDP_PLAN_REPLAYING) {
        const fsdpi_plan_call *next = p->at < p->kind->num_calls ? &p->kind->calls[p->at] : NULL;
        int same = fsdp_model_settings(model) == p->settings;
        if (same && next && next->unit == unit && next->call == call) {
            if (!unit) return fsdpi_plan_finalize(p, status);
            *status = fsdpi_plan_replay(p, &p->kind->tape.steps[p->at]);
            return 1;
        }
        fsdpi_plan_say(p, same ? next : NULL, unit, call);
        *status = fsdpi_plan_leave(p);
        if (*status) return 1;
    }
    if (p->broken) {
        p->broken = 0;
        *status = fsdp_fail(p->world, FSDP_ERR_INVALID_STATE, "[E976] plan: %s", p->why);
        return 1;
    }
    if (p->mode == FSDP_PLAN_RECORDING) fsdpi_plan_record(p, unit, call);
    return unit ? 0 : fsdpi_plan_finalize(p, status);
}

// `call` of the extension.
static int fsdpi_plan_answer(void *user, fsdp_model *model, fsdp_unit *unit, int call,
                             fsdp_status *status) {
    fsdp_plan *p = (fsdp_plan *)user;
    const fsdpi_plan_step *expected = p->next; // of a replay under way
    if (expected && unit && expected->unit == unit && expected->call == call &&
        fsdp_model_settings(model) == p->settings) {
        *status = fsdpi_plan_replay(p, expected);
        return 1;
    }
    return fsdpi_plan_look(p, unit, call, status);
}

// What is done with the rest of a step that is under way, or with the next one.
static int fsdpi_plan_mode_now(const fsdp_plan *p) {
    return p->open        ? FSDP_PLAN_BY_CALLS
           : p->num_kinds ? FSDP_PLAN_REPLAYING
           : p->warm      ? FSDP_PLAN_WARM_UP
                          : FSDP_PLAN_RECORDING;
}

// A new layout may come inside of a step, between two visits: the rest of it goes by calls.
static void fsdpi_plan_relayout(void *user, fsdp_model *model) {
    fsdp_plan *p = (fsdp_plan *)user;
    (void)model;
    fsdpi_plan_drop_all(p);
    p->next = NULL;
    if (p->open && p->mode == FSDP_PLAN_REPLAYING) p->left++, p->broken = p->desc.strict;
    if (p->mode == FSDP_PLAN_REPLAYING || p->mode == FSDP_PLAN_RECORDING)
        p->mode = fsdpi_plan_mode_now(p);
    if (p->mode != FSDP_PLAN_REFUSED) // it says why
        snprintf(p->why, sizeof p->why, "%s", "the model has a new layout");
}
static void fsdpi_plan_end(void *user) {
    fsdp_plan *p = (fsdp_plan *)user;
    fsdp_model *m = p->model;
    while (p->num_kinds) fsdpi_plan_drop(p, p->num_kinds - 1);
    fsdpi_plan_sweep(p, 1);
    fsdp_buf_destroy(m, p->arena);
    fsdpi_plan_free(m, p->strays);
    fsdpi_plan_free(m, p->kinds);
    fsdpi_plan_free(m, p->calls);
    fsdpi_plan_free(m, p->begin);
    fsdpi_plan_free(m, p->units);
    fsdpi_plan_free(m, p->params);
    fsdpi_plan_free(m, p->compute_ns);
    fsdpi_plan_free(m, p);
}

/* -------------------------------------------------------------------------------------------- */
// The public functions.

static fsdp_status fsdpi_plan_bad(fsdp_model *m, const char *field, long long value,
                                  const char *expected) {
    return fsdp_fail(fsdp_model_world(m), FSDP_ERR_INVALID_ARG,
                     "[E977] plan_create: %s is %lld, expected %s", field, value, expected);
}

static fsdp_status fsdpi_plan_check_desc(fsdp_model *m, const fsdp_plan_desc *d) {
    const uint32_t all = (1u << FSDP_PASS_COUNT) - 1;
    if (d->without & ~all) return fsdpi_plan_bad(m, "without", d->without, "1u << FSDP_PASS_*");
    if (d->with & ~all) return fsdpi_plan_bad(m, "with", d->with, "1u << FSDP_PASS_*");
    if (d->warm_up < 0) return fsdpi_plan_bad(m, "warm_up", d->warm_up, ">= 0");
    if (d->ahead < -1) return fsdpi_plan_bad(m, "ahead", d->ahead, ">= -1");
    if (d->most_kinds < 0) return fsdpi_plan_bad(m, "most_kinds", d->most_kinds, ">= 0");
    if (d->most_bytes < 0) return fsdpi_plan_bad(m, "most_bytes", d->most_bytes, ">= 0");
    if (d->bucket_bytes < -1) return fsdpi_plan_bad(m, "bucket_bytes", d->bucket_bytes, ">= -1");
    if (d->first_bucket_bytes < 0)
        return fsdpi_plan_bad(m, "first_bucket_bytes", d->first_bucket_bytes, ">= 0");
    return FSDP_OK;
}

static void fsdpi_plan_defaults(fsdp_plan *p) {
    fsdp_plan_desc *d = &p->desc;
    if (!d->warm_up) d->warm_up = 1;
    if (!d->most_kinds) d->most_kinds = 8;
    if (!d->bucket_bytes) d->bucket_bytes = 1 << 20;
    if (!d->first_bucket_bytes) d->first_bucket_bytes = d->bucket_bytes;
    if (!d->ahead) d->ahead = p->mode_of_world != FSDPI_PLAN_INLINE;
    if (d->ahead < 0) d->ahead = 0;
    p->warm = d->warm_up;
}

// 0: without costs.
static uint64_t fsdpi_plan_hash_cost(const fsdp_plan_cost *cost) {
    fsdp_plan_cost c;
    if (!cost) return 0;
    c = *cost;
    c.compute_ns = NULL;
    return fsdpi_plan_mix_bytes(fsdpi_plan_mix_bytes(0, (const char *)cost->compute_ns,
                                                     (size_t)c.num_compute * sizeof(int64_t)),
                                (const char *)&c, sizeof c);
}

/* Do all ranks create the plan, and with the same desc? status: this rank's. Without a plan it goes
   on to the collective, since the others wait there. */
static fsdp_status fsdpi_plan_agree_desc(fsdp_world *w, const fsdp_mesh *mesh,
                                         const fsdp_plan_desc *d, fsdp_status status) {
    static const char *const names[] = {"without",    "with",         "warm_up",
                                        "ahead",      "most_kinds",   "strict",
                                        "most_bytes", "bucket_bytes", "first_bucket_bytes",
                                        "cost"};
    enum { FIELDS = sizeof names / sizeof *names };
    const int64_t mine[FIELDS] = {d->without,
                                  d->with,
                                  d->warm_up,
                                  d->ahead,
                                  d->most_kinds,
                                  d->strict != 0,
                                  d->most_bytes,
                                  d->bucket_bytes,
                                  d->first_bucket_bytes,
                                  (int64_t)(status ? 0 : fsdpi_plan_hash_cost(d->cost))};
    int64_t values[1 + 2 * FIELDS];
    for (int i = 0; i < FIELDS; i++) {
        values[1 + 2 * i] = mine[i];
        values[2 + 2 * i] = ~mine[i];
    }
    status = fsdpi_plan_together(w, mesh, status, values, 1 + 2 * FIELDS);
    for (int i = 0; i < FIELDS && !status; i++) {
        long long least = values[1 + 2 * i], most = ~values[2 + 2 * i];
        if (least != most)
            status = fsdp_fail(w, FSDP_ERR_MISMATCH,
                               "[E937] plan_create: the ranks gave other descs: %s is %lld on one "
                               "and %lld on another: give all the same",
                               names[i], least, most);
    }
    return status;
}

// The desc as it is given, and its costs; d->cost is then NULL or `cost`.
static fsdp_status fsdpi_plan_read_desc(fsdp_model *m, const fsdp_plan_desc *desc,
                                        fsdp_plan_desc *d, fsdp_plan_cost *cost) {
    fsdp_world *w = fsdp_model_world(m);
    fsdp_status status = fsdp_desc_read(w, d, desc, sizeof *d, "fsdp_plan_desc");
    if (!status) status = fsdpi_plan_check_desc(m, d);
    if (status || !d->cost) return status;
    status = fsdp_desc_read(w, cost, d->cost, sizeof *cost, "fsdp_plan_cost");
    d->cost = cost;
    return status ? status : fsdpi_plan_check_cost(w, cost);
}

static fsdp_status fsdpi_plan_find_units(fsdp_plan *p) {
    fsdp_param_view v = FSDP_ZERO;
    fsdp_status status = fsdpi_plan_alloc(
        p->model, (size_t)fsdp_num_units(p->model) * sizeof *p->units, (void **)&p->units);
    if (!status)
        status = fsdpi_plan_alloc(p->model, (size_t)fsdp_num_units(p->model) * sizeof *p->params,
                                  (void **)&p->params);
    while (!status && fsdp_next_param(p->model, &v)) {
        if (p->num_units == 0 || p->units[p->num_units - 1] != v.unit)
            p->units[p->num_units++] = v.unit;
        p->params[p->num_units - 1]++;
    }
    if (!status) p->unit_bytes = fsdp_unit_snapshot(p->units[0], NULL, 0);
    return status ? status
                  : fsdpi_plan_alloc(p->model, (size_t)p->num_units * p->unit_bytes,
                                     (void **)&p->begin);
}

// What this rank does alone: the plan, attached to the model.
static fsdp_status fsdpi_plan_new(fsdp_model *model, const fsdp_plan_desc *d, const fsdp_mesh *mesh,
                                  fsdp_plan **plan) {
    fsdp_plan *p = NULL;
    if (fsdp_find_extension(model, "plan"))
        return fsdp_fail(fsdp_model_world(model), FSDP_ERR_INVALID_STATE,
                         "[E967] plan_create: the model has a plan: call fsdp_plan_destroy first");
    fsdp_status status = fsdpi_plan_alloc(model, sizeof *p, (void **)&p);
    if (status) return status;
    p->model = model;
    p->world = fsdp_model_world(model);
    p->desc = *d;
    p->desc.cost = NULL;
    p->mesh = mesh;
    p->mode_of_world = fsdp_model_run(model);
    p->pool = fsdp_pool_register(model, "arena");
    p->extension.name = "plan";
    p->extension.user = p;
    p->extension.call = fsdpi_plan_answer;
    p->extension.relayout = fsdpi_plan_relayout;
    p->memory.name = "memory of a plan";
    p->memory.user = p;
    p->memory.destroy = fsdpi_plan_end;
    fsdpi_plan_defaults(p);
    status = fsdpi_plan_copy_cost(p, d->cost);
    if (!status) status = fsdpi_plan_find_units(p);
    if (!status && p->pool < 0) status = FSDP_ERR_INVALID_ARG;
    if (!status) status = fsdp_attach(model, &p->memory);
    if (status) {
        fsdpi_plan_end(p);
        return status;
    }
    status = fsdp_attach(model, &p->extension);
    if (status) (void)fsdp_detach(model, &p->memory);
    else *plan = p;
    return status;
}

FSDP_API fsdp_status fsdp_plan_create(fsdp_model *model, const fsdp_plan_desc *desc,
                                      fsdp_plan **plan) {
    fsdp_plan_desc d;
    fsdp_plan *p = NULL;
    fsdp_mesh_info info;
    fsdp_plan_cost cost;
    if (!model || !plan)
        return fsdp_fail(fsdp_model_world(model), FSDP_ERR_INVALID_ARG,
                         "[E978] plan_create: model or plan is NULL");
    *plan = NULL;
    memset(&d, 0, sizeof d);
    fsdp_status status = fsdp_model_commit(model);
    if (!status) status = fsdp_model_mesh_info(model, &info);
    if (status) return status;
    status = fsdpi_plan_read_desc(model, desc, &d, &cost);
    if (!status) status = fsdpi_plan_new(model, &d, info.mesh, &p);
    status = fsdpi_plan_agree_desc(fsdp_model_world(model), info.mesh, &d, status);
    if (status) fsdp_plan_destroy(p);
    else *plan = p;
    return status;
}

// The program by calls, with the slots that pools would give: a listing of its own.
static fsdp_status fsdpi_plan_list_calls(fsdp_plan *p, fsdpi_plan_kind *k, fsdpi_plan_listing *l) {
    fsdpi_plan_tape tape;
    fsdpi_plan_kind plain = *k;
    memset(l, 0, sizeof *l);
    memset(&tape, 0, sizeof tape);
    fsdp_status status = fsdpi_plan_tape_make(p, k, NULL, NULL, &tape);
    if (!status) status = fsdpi_plan_place(p, &tape, l, 0);
    plain.tape = tape;
    if (!status) status = fsdpi_plan_list(p, &plain, &tape, l);
    fsdpi_plan_tape_free(p, &tape);
    return status;
}

FSDP_API fsdp_status fsdp_plan_simulate(const fsdp_plan *plan, int index, int by_calls,
                                        const fsdp_plan_cost *cost, fsdp_plan_times *out) {
    fsdp_plan_cost c;
    fsdp_status status = plan && by_calls ? fsdp_model_commit(plan->model) : FSDP_OK;
    if (status) return status; // a new layout has dropped all plans by now
    if (!plan || !cost || !out || index < 0 || index >= plan->num_kinds)
        return fsdp_fail(
            plan ? plan->world : NULL, FSDP_ERR_INVALID_ARG,
            "[E998] plan_simulate: plan, cost or out is NULL, or index %d is not below "
            "the number of plans, which is %d",
            index, fsdp_plan_count(plan));
    fsdp_plan *p = plan->kinds[index]->plan;
    status = fsdp_desc_read(p->world, &c, cost, sizeof c, "fsdp_plan_cost");
    if (!status) status = fsdpi_plan_check_cost(p->world, &c);
    if (!status && by_calls && plan->kinds[index]->settings != fsdp_model_settings(p->model))
        status = fsdp_fail(p->world, FSDP_ERR_INVALID_STATE,
                           "[E944] plan_simulate: options are not those of plan %d, so that its "
                           "calls would do something else: set them as they were when it was made",
                           index);
    if (status || !by_calls)
        return status ? status : fsdpi_plan_time(p->model, &plan->kinds[index]->listing, &c, out);
    fsdpi_plan_listing calls;
    status = fsdpi_plan_list_calls(p, plan->kinds[index], &calls);
    if (!status) status = fsdpi_plan_time(p->model, &calls, &c, out);
    fsdpi_plan_listing_end(p->model, &calls);
    return status;
}

FSDP_API void fsdp_plan_destroy(fsdp_plan *plan) {
    if (!plan) return;
    (void)fsdpi_plan_part(plan);
    if (fsdp_detach(plan->model, &plan->extension)) return;
    fsdpi_plan_drop_all(plan);
    if (!plan->num_strays) (void)fsdp_detach(plan->model, &plan->memory); // else with the model
}

FSDP_API fsdp_plan_mode fsdp_plan_state(const fsdp_plan *plan) {
    return plan ? (fsdp_plan_mode)plan->mode : FSDP_PLAN_MODE_COUNT;
}

FSDP_API const char *fsdp_plan_why(const fsdp_plan *plan) { return plan ? plan->why : ""; }

FSDP_API fsdp_status fsdp_plan_pause(fsdp_plan *plan, int paused) {
    if (!plan) return fsdp_fail(NULL, FSDP_ERR_INVALID_ARG, "[E979] plan_pause: plan is NULL");
    if (plan->mode == FSDP_PLAN_REFUSED || (plan->mode == FSDP_PLAN_PAUSED) == (paused != 0))
        return FSDP_OK;
    if (!paused) { // with the next step: what is left of this one goes by calls
        plan->mode = fsdpi_plan_mode_now(plan);
        plan->kind = NULL;
        if (!plan->open) plan->why[0] = 0;
        return FSDP_OK;
    }
    fsdp_status status = fsdpi_plan_part(plan);
    plan->mode = FSDP_PLAN_PAUSED;
    plan->next = NULL;
    snprintf(plan->why, sizeof plan->why, "%s", "paused by fsdp_plan_pause");
    return status;
}

FSDP_API fsdp_status fsdp_plan_forget(fsdp_plan *plan) {
    if (!plan) return fsdp_fail(NULL, FSDP_ERR_INVALID_ARG, "[E980] plan_forget: plan is NULL");
    fsdp_status status = fsdpi_plan_part(plan);
    fsdpi_plan_drop_all(plan);
    plan->kind = NULL;
    plan->next = NULL;
    plan->differ = 0;
    if (plan->mode != FSDP_PLAN_PAUSED) plan->mode = fsdpi_plan_mode_now(plan);
    snprintf(plan->why, sizeof plan->why, "%s", "plans were dropped by fsdp_plan_forget");
    return status;
}

// Parameters of units whose slots are held when backward begins; units gathered at a time.
static void fsdpi_plan_count_open(const fsdp_plan *p, const fsdpi_plan_kind *k,
                                  fsdp_plan_report *out) {
    const fsdpi_plan_tape *t = &k->tape;
    int backward = t->ops_at[k->listing.forward_calls], now = 0;
    for (int i = 0; i < t->num_ops; i++) {
        const fsdpi_plan_pair *pair = &t->pairs[i];
        int use = t->ops[i].kind == FSDP_OP_ACQUIRE   ? pair->dst
                  : t->ops[i].kind == FSDP_OP_RELEASE ? pair->src
                                                      : -1;
        if (use < 0 || t->uses[use].pool != FSDP_POOL_GATHER) continue;
        now += t->ops[i].kind == FSDP_OP_ACQUIRE ? 1 : -1;
        if (now > out->most_open) out->most_open = now;
    }
    for (int i = 0; i < t->num_uses; i++)
        if (t->uses[i].pool == FSDP_POOL_GATHER && t->uses[i].from < backward &&
            t->uses[i].to >= backward)
            out->crossing += p->params[t->uses[i].unit];
}

FSDP_API fsdp_status fsdp_plan_report_get(const fsdp_plan *plan, int index, fsdp_plan_report *out) {
    if (!plan || !out || index < 0 || index >= plan->num_kinds)
        return fsdp_fail(plan ? plan->world : NULL, FSDP_ERR_INVALID_ARG,
                         "[E981] plan_report_get: plan or out is NULL, or index %d is not below "
                         "the number of plans, which is %d",
                         index, fsdp_plan_count(plan));
    const fsdpi_plan_kind *k = plan->kinds[index];
    const fsdpi_plan_listing *l = &k->listing;
    memset(out, 0, sizeof *out);
    out->calls = l->num_calls;
    out->forward_calls = l->forward_calls;
    out->units = l->num_units;
    out->buckets = k->tape.num_groups;
    for (int i = 0; i < 2; i++) {
        out->ops[i] = l->ops[i];
        out->gathers[i] = l->gathers[i];
        out->reductions[i] = l->reductions[i];
        out->replicas[i] = l->replica_ops[i];
        out->gather_bytes[i] = l->gather_bytes[i];
        out->reduce_bytes[i] = l->reduce_bytes[i];
    }
    out->bytes[0] = l->by_calls;
    out->bytes[1] = l->bytes;
    out->bound = l->bound;
    fsdpi_plan_count_open(plan, k, out);
    out->hash = l->hash;
    out->replayed = plan->replayed;
    out->left = plan->left;
    out->recorded = plan->recorded;
    out->host_bytes = fsdpi_plan_host_bytes(k);
    return FSDP_OK;
}


#ifdef __cplusplus
}
#endif
#endif // FSDP_IMPLEMENTATION
