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
   From the third step on the hooks answer from a tape: fewer and larger collectives, gathers that
   begin earlier, less memory, less host time, the same bits. Before the first replay the library
   proves that the step cannot deadlock, that nothing races, and that slots need no more memory than
   the plan says. If the program then does something else, the step goes on by calls, and what it
   computes is the same.

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

// What things take, for fsdp_plan_simulate and for passes that weigh time against memory. The same
// on all ranks. Nothing is measured by the library: no decision looks at a clock.
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
    int64_t most_bytes;         // of all slots; 0: what steps by calls hold, at least 4 MiB
    int64_t bucket_bytes;       // of the full side of a joined collective; 0: 1 MiB; -1: none is
                                // joined
    int64_t first_bucket_bytes; // of the first one of forward and of backward, which nothing hides;
                                // 0: as bucket_bytes
    const fsdp_plan_cost *cost; // NULL: counts and bytes decide. Copied
    uint64_t end_canary;
} fsdp_plan_desc;

/* fsdp_plan_create - plan the steps of a model from now on; commits the model
   desc        NULL: defaults
   plan        owned by the model: ends with fsdp_plan_destroy, the model or the world
   Effect      after warm_up steps one is recorded; fsdp_finalize_backward of that step makes the
               plan (collective, blocks, allocates); then steps are replayed. A step that is
               another one, or becomes it, goes on by calls; what it computes is the same
   Result      FSDP_OK; INVALID_ARG (the text names the field), INVALID_STATE (a unit is not idle,
               the model has a plan), OUT_OF_MEMORY, what commit returns
   Collective  as fsdp_model_commit; every rank of the model's mesh gives the same desc (else the
               first plan is FSDP_ERR_MISMATCH)      Blocks no      Allocates yes
   Source      torch: torch.compile of a model under fully_shard; torchtitan: graph_trainer */
FSDP_API FSDP_MUST_CHECK fsdp_status fsdp_plan_create(fsdp_model *model, const fsdp_plan_desc *desc,
                                                      fsdp_plan **plan);

/* fsdp_plan_destroy - the model goes by calls again, from the next call on; NULL is allowed
   Collective  no, but every rank has to do the same      Blocks for operations under way
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
   Effect      in a step: its next call and all behind it go by calls
   Result      FSDP_OK; INVALID_ARG
   Collective  no, but every rank has to do the same      Blocks no      Allocates no */
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
               refutation), INVALID_STATE (a unit is not idle), MISMATCH (another model, world or
               mode: what differs; other ranks gave another text), CORRUPT (its end is missing, or
               its hash is wrong), OUT_OF_MEMORY (bytes needed and allowed). Nothing changes then
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

/* fsdp_plan_prove       - what made sure that a plan may run: again, or with numbers
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
   Result      FSDP_OK; INVALID_ARG
   Collective  no      Blocks no      Allocates temporary tables */
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
    fsdp_unit *unit;  // NULL: finalize
    int32_t call;     // FSDP_CALL_*
    int32_t index;    // of the unit; -1
} fsdpi_plan_call;

// Why a decision was taken; %s and %d are the call that it speaks of.
#define FSDPI_PLAN_WHY_LIST(X)                                                                     \
    X(DEMAND, "demand")                                                                            \
    X(JOINED, "joined")                                                                            \
    X(AHEAD, "ahead of call %d")                                                                   \
    X(NEXT_USE, "next use at call %d")                                                             \
    X(FARTHEST, "next use at call %d, farthest")                                                   \
    X(LAST_USE, "last use")                                                                        \
    X(ONCE, "reduced once, at call %d")                                                            \
    X(MEMORY, "memory")

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
    int32_t call;  // in which it happens
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
    uint8_t *managed;     // [units] whose parameters are gathered and freed by acts alone
    uint8_t *waits;       // [units] whose reduction is moved behind a later call
    int8_t *sync;         // [calls] of a pre_backward: gradient sync from there on; -1: as it is
} fsdpi_plan_choice;

// Buffers that are no slots, where a listing says from where and to where.
enum {
    FSDPI_PLAN_NONE = -1,
    FSDPI_PLAN_SHARDS = -2, // the block of shards; the unit's part of it
    FSDPI_PLAN_GRADS = -3,  // the block of shard gradients
    FSDPI_PLAN_HOST = -4,   // host memory: flags of use
    FSDPI_PLAN_OTHER = -5   // a slot that a unit holds since before the step
};

// One place for a slot. Places may overlap.
typedef struct fsdpi_plan_slot {
    int64_t offset, bytes; // in the arena; offset -1: its own memory, since it outlasts the step
    int32_t pool;          // FSDP_POOL_*
    int32_t reserved;
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
    char *name;                    // unique in the listing
    int64_t gather_bytes, grad_bytes; // of its slots
} fsdpi_plan_unit;

enum { FSDPI_PLAN_COMM = 32, FSDPI_PLAN_COMMS = 16 };
enum {
    FSDPI_PLAN_STATE = 512, // room for the state of a unit
    FSDPI_PLAN_JOINED = 64, // units that are joined, at most
    FSDPI_PLAN_PATIENCE = 3, // steps in a row that leave a plan, or cannot be recorded
    FSDPI_PLAN_LEAST_BYTES = 4 << 20 // that slots may have, if the desc does not say
};

typedef struct fsdpi_plan_listing {
    uint64_t model, kind;      // hashes: of the model, of options and of the state at the begin
    int32_t num_units, num_params, shards, replicas, mode; // mode: FSDPI_PLAN_INLINE, ...
    int32_t fused;             // the backend's reduce_scatter casts, scales and adds
    int32_t num_calls, forward_calls;
    int64_t bytes, bound, by_calls;
    int32_t gathers[2], reductions[2], replica_ops[2], ops[2];
    uint64_t gather_bytes[2], reduce_bytes[2];
    fsdpi_plan_unit *units;    // [num_units]
    fsdpi_plan_call *calls;    // [num_calls]; of a text unit is NULL
    fsdpi_plan_choice choice;
    fsdpi_plan_slot *slots;
    int32_t num_slots, cap_slots;
    fsdpi_plan_line *lines;    // by call, in the order of issue
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
    int32_t unit;
    int32_t at; // in tape.saved, in states
} fsdpi_plan_state;

// Records that follow one another; before them a unit's flags of use are brought up to date.
typedef struct fsdpi_plan_run {
    int32_t begin, end;
    int32_t flags; // index of the unit; -1: none
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
    // [num_calls]: where the call's own records begin and end; what its unit holds behind it
    int32_t *own, *own_end;
    uint8_t *storage, *holds; // holds: a slot of any pool
    uint8_t *held;            // [units] gathered before the step
} fsdpi_plan_tape;

// A kind of step: the same options, the same state at the begin.
typedef struct fsdpi_plan_kind {
    uint64_t settings, used_at; // fsdp_model_settings; number of the step that used it last
    char *begin;                // [num_units] states
    fsdpi_plan_call *calls;
    int32_t num_calls;
    int32_t left;               // how often in a row a step has left it
    uint64_t replayed;
    fsdpi_plan_listing listing;
    fsdpi_plan_tape tape;
    fsdp_buf **bufs;            // by slot of the listing
} fsdpi_plan_kind;

struct fsdp_plan {
    fsdp_model *model;
    fsdp_world *world;
    fsdp_extension extension;
    fsdp_plan_desc desc;
    fsdp_plan_cost cost;
    const fsdp_mesh *mesh;
    fsdp_unit **units;
    int32_t num_units;
    size_t unit_bytes;          // of a unit's state
    int32_t mode;               // fsdp_plan_mode
    int32_t mode_of_world;      // FSDPI_PLAN_INLINE, ...
    int32_t warm;               // steps that are still to come before one is recorded
    int32_t open;               // a step has begun
    int32_t forgotten;          // plans are dropped when no step is under way
    int32_t at;                 // the next call of the program
    int32_t differ;             // recordings in a row that were of no use
    uint64_t settings;          // at the begin of the step
    uint64_t steps, replayed, left, recorded;
    fsdpi_plan_kind *kind;      // that is replayed
    fsdpi_plan_kind **kinds;
    int32_t num_kinds, cap_kinds;
    fsdpi_plan_call *calls;     // that are recorded
    int32_t num_calls, cap_calls;
    char *begin;                // [num_units] states at the begin of the step
    fsdp_buf *arena;
    int32_t pool;               // of the arena
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
    void *const lists[] = {t->ops,    t->pairs,   t->states,  t->saved,     t->runs,    t->uses,
                           t->bufs,   t->made,    t->ops_at,  t->runs_at,   t->groups,  t->members,
                           t->states_at, t->own,  t->own_end, t->storage,   t->holds,   t->held};
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
    fsdp_memory mem;
    return fsdp_unit_memory(unit, &mem) ? 0 : mem.pool_bytes[pool];
}

static uint8_t fsdpi_plan_holds(const fsdp_unit *unit) { // a slot
    fsdp_memory mem;
    int slots = 0;
    if (fsdp_unit_memory(unit, &mem)) return 1;
    for (int pool = FSDP_POOL_GATHER; pool <= FSDP_POOL_ROUT; pool++) slots += mem.pool_slots[pool];
    return slots != 0;
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
    int64_t next;  // where the next buffer without memory lies
    char *last;    // [units] their states behind the call before
    int32_t *acts; // [num_acts][2] where the records of each act begin and end
    int32_t *tail; // [units][2] likewise: those of finalize that reduce what waits
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

// `op` of a rehearsal.
static int fsdpi_plan_see(void *user, fsdp_model *model, fsdp_op *op) {
    fsdpi_plan_show *s = (fsdpi_plan_show *)user;
    fsdpi_plan_pair pair = {fsdpi_plan_use_of(s->tape, op->src),
                            fsdpi_plan_use_of(s->tape, op->dst)};
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
    (void)fsdp_unit_snapshot(p->units[unit], now, sizeof now);
    if (memcmp(last, now, p->unit_bytes) == 0) return FSDP_OK;
    memcpy(last, now, p->unit_bytes);
    return fsdpi_plan_add_state(p, s->tape, unit, now);
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
        s->acts[2 * *at] = s->tape->num_ops;
        if (act->what == FSDPI_PLAN_GATHER) status = fsdp_unshard(s->plan->units[act->unit]);
        if (act->what == FSDPI_PLAN_FREE) status = fsdp_reshard(s->plan->units[act->unit]);
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

// The end of a step shows how gradients that wait are reduced: unit by unit.
static fsdp_status fsdpi_plan_show_tail(fsdpi_plan_show *s) {
    fsdp_plan *p = s->plan;
    const fsdpi_plan_tape *t = s->tape;
    int begin = t->num_ops, waiting = 0;
    fsdp_status status = FSDP_OK;
    for (int i = 0; i < p->num_units && !status; i++) {
        s->tail[2 * i] = s->tail[2 * i + 1] = 0;
        if (!s->choice->waits[i]) continue;
        waiting++;
        status = fsdp_set_requires_gradient_sync(p->model, p->units[i], 1);
    }
    if (!status && waiting) status = fsdp_finalize_backward(p->model);
    for (int i = 0; i < p->num_units && waiting; i++) {
        int from = begin;
        if (!s->choice->waits[i]) continue;
        while (from < t->num_ops && t->ops[from].unit != p->units[i]) from++;
        while (from < t->num_ops && t->ops[from].kind == FSDP_OP_USE) from++; // of the caller
        int to = from;
        while (to < t->num_ops && t->ops[to].unit == p->units[i]) to++;
        s->tail[2 * i] = from;
        s->tail[2 * i + 1] = to;
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
    memcpy(s->last, k->begin, (size_t)p->num_units * p->unit_bytes);
    for (int i = 0; i < p->num_units; i++)
        t->held[i] = fsdp_unit_storage(p->units[i]) != FSDP_STORAGE_SHARDED;
    if (!status && s->choice) status = fsdpi_plan_manage(s);
    for (int i = 0; i + 1 < k->num_calls && !status && !s->status; i++) {
        const fsdpi_plan_call *call = &k->calls[i];
        t->ops_at[i] = t->num_ops;
        t->states_at[i] = t->num_states;
        if (s->choice) status = fsdpi_plan_do_acts(s, i, &at, 0);
        if (!status && s->choice && s->choice->sync[i] >= 0)
            status = fsdp_set_requires_gradient_sync(p->model, call->unit, s->choice->sync[i]);
        t->own[i] = t->num_ops;
        if (!status) status = fsdpi_plan_make_call(call->unit, call->call);
        t->own_end[i] = t->num_ops;
        t->storage[i] = (uint8_t)fsdp_unit_storage(call->unit);
        t->holds[i] = fsdpi_plan_holds(call->unit);
        if (!status && s->choice) status = fsdpi_plan_do_acts(s, i, &at, 1);
        for (int u = 0; u < p->num_units && !status; u++) status = fsdpi_plan_note(s, u);
    }
    t->ops_at[k->num_calls - 1] = t->ops_at[k->num_calls] = t->num_ops;
    t->states_at[k->num_calls - 1] = t->states_at[k->num_calls] = t->num_states;
    if (!status && !s->status && s->choice) status = fsdpi_plan_show_tail(s);
    s->quiet = 1; // what is held at the end is not held in truth
    for (int i = 0; i < t->num_uses && !status; i++) {
        fsdp_op op;
        if (!fsdp_buf_held(t->bufs[i])) continue;
        fsdp_op_init(&op, p->model, NULL, FSDP_OP_RELEASE, FSDP_LABEL_NONE, FSDP_STREAM_COMPUTE);
        op.src = t->bufs[i];
        op.what = "plan";
        status = fsdp_emit(p->model, &op);
    }
    return s->status ? s->status : status;
}

/* The program through the core's rows, with the decisions of a choice or by calls. bufs: the slots
   of uses, in order; NULL: buffers without memory, which last as long as the tape. */
static fsdp_status fsdpi_plan_rehearse(fsdpi_plan_show *s) {
    fsdp_plan *p = s->plan;
    fsdp_extension e = FSDP_ZERO;
    int num_acts = s->choice ? s->choice->num_acts : 0;
    e.user = s;
    e.op = fsdpi_plan_see;
    e.buffer = fsdpi_plan_give;
    s->status = FSDP_OK;
    s->next = 4096;
    s->quiet = 0;
    s->last = NULL;
    s->acts = s->tail = NULL;
    fsdp_status status = fsdpi_plan_tape_new(p, s->tape, s->kind->num_calls);
    if (!status)
        status = fsdpi_plan_alloc(p->model, (size_t)p->num_units * p->unit_bytes,
                                  (void **)&s->last);
    if (!status)
        status = fsdpi_plan_alloc(p->model, 2 * (size_t)num_acts * sizeof *s->acts,
                                  (void **)&s->acts);
    if (!status)
        status = fsdpi_plan_alloc(p->model, 2 * (size_t)p->num_units * sizeof *s->tail,
                                  (void **)&s->tail);
    if (!status) status = fsdp_rehearse(p->model, &e, fsdpi_plan_play, s);
    for (int i = 0; i < s->tape->num_uses && !s->bufs; i++)
        fsdp_buf_destroy(p->model, s->tape->bufs[i]);
    return status;
}

static void fsdpi_plan_show_end(fsdpi_plan_show *s) {
    fsdpi_plan_free(s->plan->model, s->last);
    fsdpi_plan_free(s->plan->model, s->acts);
    fsdpi_plan_free(s->plan->model, s->tail);
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
   do not lie so yet. */
static void fsdpi_plan_join_ranges(fsdp_op *op, const fsdp_op *const *parts, int num) {
    const fsdp_op *last = parts[num - 1];
    uint64_t size = fsdp_dtype_size(op->dtype);
    uint64_t span = (uint64_t)((const char *)last->dst_ptr - (const char *)op->dst_ptr);
    op->count = span / size + last->count;
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
    else if (!status) fsdpi_plan_join_ranges(&op, parts, num);
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

// Acts of a call from *at on, before its own work or behind it: gathers of a group are joined.
static fsdp_status fsdpi_plan_arrange_acts(const fsdpi_plan_show *s, fsdpi_plan_tape *t, int call,
                                           int *at, int late) {
    const fsdpi_plan_choice *c = s->choice;
    fsdp_status status = FSDP_OK;
    while (*at < c->num_acts && c->acts[*at].call == call && !status &&
           fsdpi_plan_is_late(&c->acts[*at]) == late) {
        fsdpi_plan_range ranges[FSDPI_PLAN_JOINED];
        const fsdpi_plan_act *first = &c->acts[*at];
        int num = 0;
        do {
            ranges[num].begin = s->acts[2 * *at];
            ranges[num++].end = s->acts[2 * *at + 1];
            ++*at;
        } while (first->what == FSDPI_PLAN_GATHER && first->group >= 0 &&
                 num < FSDPI_PLAN_JOINED && *at < c->num_acts && c->acts[*at].call == call &&
                 c->acts[*at].what == FSDPI_PLAN_GATHER && c->acts[*at].group == first->group);
        status = num > 1 ? fsdpi_plan_merge(s->plan, s->tape, t, ranges, num)
                         : fsdpi_plan_copy(s->plan, s->tape, t, ranges[0].begin, ranges[0].end);
    }
    return status;
}

// A call's own work, and behind it the reductions that have waited for it.
static fsdp_status fsdpi_plan_arrange_own(const fsdpi_plan_show *s, fsdpi_plan_tape *t, int call) {
    const fsdpi_plan_choice *c = s->choice;
    fsdpi_plan_range ranges[FSDPI_PLAN_JOINED];
    fsdp_status status = fsdpi_plan_copy(s->plan, s->tape, t, s->tape->own[call],
                                         s->tape->own_end[call]);
    int num = 0;
    for (int i = 0; c && i < c->num_acts && num < FSDPI_PLAN_JOINED; i++) {
        const fsdpi_plan_act *act = &c->acts[i];
        if (act->call != call || act->what != FSDPI_PLAN_REDUCE) continue;
        ranges[num].begin = s->tail[2 * act->unit];
        ranges[num++].end = s->tail[2 * act->unit + 1];
    }
    return status || !num ? status : fsdpi_plan_merge(s->plan, s->tape, t, ranges, num);
}

static const char *fsdpi_plan_state_of(const fsdp_plan *p, const fsdpi_plan_tape *t, int call,
                                       int unit) {
    for (int i = t->states_at[call]; i < t->states_at[call + 1]; i++)
        if (t->states[i].unit == unit) return t->saved + (size_t)t->states[i].at * p->unit_bytes;
    return NULL;
}

// The states behind a call. Units whose reductions were moved here are now as they would be by
// calls behind their own post_backward.
static fsdp_status fsdpi_plan_arrange_states(const fsdpi_plan_show *s,
                                             const fsdpi_plan_tape *by_calls, fsdpi_plan_tape *t,
                                             int call) {
    const fsdpi_plan_choice *c = s->choice;
    const fsdpi_plan_tape *raw = s->tape;
    fsdp_status status = FSDP_OK;
    for (int u = 0; u < s->plan->num_units && !status; u++) {
        const char *bytes = fsdpi_plan_state_of(s->plan, raw, call, u);
        for (int i = 0; c && i < c->num_acts; i++)
            if (c->acts[i].call == call && c->acts[i].unit == u &&
                c->acts[i].what == FSDPI_PLAN_REDUCE)
                bytes = fsdpi_plan_state_of(s->plan, by_calls, c->acts[i].at, u);
        if (bytes) status = fsdpi_plan_add_state(s->plan, t, u, bytes);
    }
    return status;
}

// Runs of a call: flags of use are brought up to date before each record that sends them.
static fsdp_status fsdpi_plan_arrange_runs(fsdp_plan *p, fsdpi_plan_tape *t, int begin) {
    fsdp_status status = FSDP_OK;
    fsdpi_plan_run run = {begin, begin, -1};
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
        run.flags = op ? fsdpi_plan_index(p, op->unit) : -1;
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
static fsdp_status fsdpi_plan_arrange(const fsdpi_plan_show *s, const fsdpi_plan_tape *by_calls,
                                      fsdpi_plan_tape *t) {
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
        if (s->choice) status = fsdpi_plan_arrange_acts(s, t, i, &at, 0);
        if (!status) status = fsdpi_plan_arrange_own(s, t, i);
        if (!status && s->choice) status = fsdpi_plan_arrange_acts(s, t, i, &at, 1);
        if (!status) status = fsdpi_plan_arrange_states(s, by_calls, t, i);
        if (!status) status = fsdpi_plan_arrange_runs(s->plan, t, begin);
    }
    t->ops_at[num_calls] = t->num_ops;
    t->runs_at[num_calls] = t->num_runs;
    t->states_at[num_calls] = t->num_states;
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
    uint8_t *managed;                  // [units] acts may gather and free
    fsdpi_plan_span *spans;            // of units, by begin
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
    int32_t *order;                    // [units] scratch
} fsdpi_plan_facts;

static void fsdpi_plan_facts_end(fsdp_plan *p, fsdpi_plan_facts *f) {
    void *const lists[] = {f->managed, f->spans, f->base,      f->bytes, f->gathers,
                           f->reduces, f->posts, f->post,      f->item,  f->item_bytes,
                           f->order,   f->item_spans, f->last_call};
    for (size_t i = 0; i < sizeof lists / sizeof *lists; i++) fsdpi_plan_free(p->model, lists[i]);
    memset(f, 0, sizeof *f);
}

static fsdp_status fsdpi_plan_facts_new(fsdp_plan *p, fsdpi_plan_facts *f) {
    int32_t **const numbers[] = {&f->posts, &f->post, &f->item, &f->order, &f->last_call};
    int64_t **const sizes[] = {&f->bytes, &f->item_bytes};
    uint64_t **const hashes[] = {&f->gathers, &f->reduces};
    size_t units = (size_t)f->num_units;
    fsdp_status status = fsdpi_plan_alloc(p->model, units, (void **)&f->managed);
    if (!status)
        status = fsdpi_plan_alloc(p->model, (size_t)f->num_calls * 8, (void **)&f->base);
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
        int u = call->index, begins = call->call == FSDP_CALL_PRE_FORWARD ||
                                      call->call == FSDP_CALL_PRE_BACKWARD;
        if (call->call >= FSDP_CALL_UNSHARD ||
            t->storage[k] == FSDP_STORAGE_SHARDED_POST_FORWARD ||
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
            if (use < 0 ||
                (t->uses[use].pool == FSDP_POOL_GATHER && f->managed[t->uses[use].unit]))
                continue;
            now += t->ops[i].kind == FSDP_OP_ACQUIRE ? t->uses[use].bytes : -t->uses[use].bytes;
            if (now > f->base[k]) f->base[k] = now;
        }
    }
}

/* -------------------------------------------------------------------------------------------- */
// The pass `bucket`.

// Is every span of one unit right before or behind one of the other, and never inside of it?
static int fsdpi_plan_are_neighbours(const fsdpi_plan_facts *f, int a, int b) {
    int pairs = 0;
    for (int i = 0; i < f->num_spans; i++) {
        const fsdpi_plan_span *span = &f->spans[i];
        if (span->owner != a && span->owner != b) continue;
        if (i + 1 == f->num_spans || span[1].owner != (span->owner == a ? b : a) ||
            span->end >= span[1].begin)
            return 0;
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
    int32_t *at = f->order; // of an item that is there: its newest span; -1
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

// Gathers, in order: each behind the own work of the call that needs the one `ahead` before it.
static fsdp_status fsdpi_plan_pass_ahead(fsdp_plan *p, const fsdpi_plan_facts *f, int ahead,
                                         fsdpi_plan_choice *c) {
    int32_t *gather = f->order, num = 0, last = 0; // spans of the last `ahead` + 1 gathers
    fsdp_status status = FSDP_OK;
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
        if (ahead > 0 && num >= ahead && ahead < f->num_units)
            issued = f->item_spans[gather[(num - ahead) % f->num_units]].begin;
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
                                        f->spans[span->first + k].owner,
                                        span->num > 1 ? i : -1, why, span->begin);
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
        int fits = is_post && f->posts[u] == 1 && f->last_call[u] == k &&
                   f->reduces[u] != 0 && (!num || f->reduces[u] == f->reduces[bucket[0]]);
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
            fits = is_post && f->posts[u] == 1 && f->last_call[u] == k &&
                   f->reduces[u] != 0;
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
    fsdpi_plan_pass_keep(f, passes, most - ahead * largest, worst);
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
        for (; k > 0 &&
               fsdpi_plan_comes_before(&pl->pieces[i], &pl->pieces[pl->order[k - 1]], order);
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
            if (other->to < piece->from &&
                (best < 0 || other->to < pl->pieces[pl->order[best]].to))
                best = n;
        }
        if (best < 0 || slots < (deep ? 2 : 1)) {
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
        if (arena < pl.bytes - pl.bytes / 20) fsdpi_plan_best_fit(&pl);
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
    void *const lists[] = {l->units, l->calls,   l->choice.acts,    l->choice.managed,
                           l->slots, l->lines,   l->choice.waits,   l->choice.sync,
                           l->members};
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

static int fsdpi_plan_comm_add(fsdpi_plan_listing *l, const char *name) {
    int i = 0;
    while (i < l->num_comms && strcmp(l->comms[i], name) != 0) i++;
    if (i == FSDPI_PLAN_COMMS) return i - 1;
    if (i == l->num_comms) snprintf(l->comms[l->num_comms++], FSDPI_PLAN_COMM, "%s", name);
    return i;
}

// Groups have numbers by order of creation, which is the same on every rank.
static int fsdpi_plan_comm_of(fsdpi_plan_listing *l, const fsdp_op *op) {
    char name[FSDPI_PLAN_COMM];
    if (!op->comm) return -1;
    snprintf(name, sizeof name, "group%d", op->comm_number);
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

// A buffer that is none of the tape's: a block of the model, host memory, or an older slot.
static int fsdpi_plan_place_of(const fsdpi_plan_tape *t, const fsdp_op *op, int use, int writes) {
    const fsdp_buf *buf = writes ? op->dst : op->src;
    if (use >= 0) return t->uses[use].slot;
    if (!buf) return op->label == FSDP_LABEL_USERS && !writes ? FSDPI_PLAN_HOST : FSDPI_PLAN_NONE;
    int is_gather = op->label == FSDP_LABEL_GATHER || op->label == FSDP_LABEL_COPY_IN ||
                    op->label == FSDP_LABEL_PRE_GATHER;
    int is_grads = op->label == FSDP_LABEL_REDUCE || op->label == FSDP_LABEL_RED_OUT ||
                   op->label == FSDP_LABEL_GRADS || op->label == FSDP_LABEL_FINAL ||
                   (op->label == FSDP_LABEL_GRAD_HOOK && !writes);
    int is_slot = op->kind == FSDP_OP_RELEASE || op->kind == FSDP_OP_WROTE ||
                  (is_grads && !writes && op->kind == FSDP_OP_REDUCE_SCATTER);
    if (op->label == FSDP_LABEL_GRAD_HOOK && writes) return FSDPI_PLAN_SHARDS;
    return is_slot     ? FSDPI_PLAN_OTHER
           : is_gather ? FSDPI_PLAN_SHARDS
           : is_grads  ? FSDPI_PLAN_GRADS
                       : FSDPI_PLAN_OTHER;
}

static fsdp_status fsdpi_plan_list_op(fsdp_plan *p, const fsdpi_plan_tape *t,
                                      fsdpi_plan_listing *l, int call, int i, int *group) {
    const fsdp_op *op = &t->ops[i];
    fsdpi_plan_line line;
    fsdp_status status = FSDP_OK;
    memset(&line, 0, sizeof line);
    line.call = call;
    line.members = l->num_members;
    line.comm = fsdpi_plan_comm_of(l, op);
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

// A name that no earlier unit has: that of the unit, with its index if need be.
static fsdp_status fsdpi_plan_name_unit(fsdp_plan *p, fsdpi_plan_listing *l, int u) {
    char name[512];
    int taken = 0;
    for (int i = 0; i < u; i++)
        taken |= strcmp(fsdp_unit_name(p->units[i]), fsdp_unit_name(p->units[u])) == 0;
    snprintf(name, sizeof name, taken ? "%.480s#%d" : "%.480s", fsdp_unit_name(p->units[u]), u);
    l->units[u].gather_bytes = fsdpi_plan_slot_bytes(p->units[u], FSDP_POOL_GATHER);
    l->units[u].grad_bytes = fsdpi_plan_slot_bytes(p->units[u], FSDP_POOL_GRAD);
    return fsdpi_plan_string(p->model, name, strlen(name), &l->units[u].name);
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

static fsdp_status fsdpi_plan_list(fsdp_plan *p, const fsdpi_plan_kind *k, const fsdpi_plan_tape *t,
                                   fsdpi_plan_listing *l) {
    fsdp_mesh_info info = FSDP_ZERO;
    int group = 0;
    fsdp_status status = fsdp_model_mesh_info(p->model, &info);
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
    for (int c = 0; c < k->num_calls && !status; c++) {
        l->calls[c] = k->calls[c];
        if (l->forward_calls == k->num_calls && k->calls[c].call == FSDP_CALL_PRE_BACKWARD)
            l->forward_calls = c;
        for (int i = t->ops_at[c]; i < t->ops_at[c + 1] && c + 1 < k->num_calls && !status; i++)
            status = fsdpi_plan_list_op(p, t, l, c, i, &group);
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
static const char *const fsdpi_plan_blocks[] = {"none", "shards", "grads", "host", "held"};
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

// Of the words, %d stands for the call that they speak of.
static void fsdpi_plan_put_reason(fsdpi_plan_out *o, const fsdpi_plan_act *act) {
    const char *words = fsdpi_plan_reasons[act->why], *call = strstr(words, "%d");
    fsdpi_plan_put_bytes(o, words, call ? (size_t)(call - words) : strlen(words));
    if (call) fsdpi_plan_put(o, "%d%s", act->at, call + 2);
}

// Acts of a call that are joined stand in one line; returns the next one.
static int fsdpi_plan_put_act(fsdpi_plan_out *o, const fsdpi_plan_listing *l, int i) {
    const fsdpi_plan_act *acts = l->choice.acts, *first = &acts[i];
    fsdpi_plan_put(o, "  %s%s", fsdpi_plan_words[first->what],
                   first->what == FSDPI_PLAN_GATHER && first->late ? " behind" : "");
    do fsdpi_plan_put_unit(o, l, acts[i++].unit);
    while (first->group >= 0 && i < l->choice.num_acts && acts[i].call == first->call &&
           acts[i].what == first->what && acts[i].group == first->group);
    fsdpi_plan_put(o, " why ");
    fsdpi_plan_put_reason(o, first);
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
    fsdpi_plan_put(o, "  op %s %s", fsdp_op_name(line->kind), fsdpi_plan_label(line->label));
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
        fsdpi_plan_put(o, " gather %lld grad %lld\n", (long long)l->units[u].gather_bytes,
                       (long long)l->units[u].grad_bytes);
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


/* ==== plan/prove.h ==========================================================================
   the proof */

static fsdp_status fsdpi_plan_prove_one(fsdp_model *m, const fsdpi_plan_listing *l, fsdp_plan_proof *out) {
    (void)m; (void)l;
    memset(out, 0, sizeof *out);
    return FSDP_OK;
}


/* ==== plan/simulate.h =======================================================================
   plan/simulate.h */



/* ==== plan/make.h ===========================================================================
   from a recorded step to a plan that every rank has */

// Owns: fsdpi_plan_kind. All of this happens in fsdp_finalize_backward of the recorded step, while
// every unit is idle; the ranks take part in each agreement whatever has happened to them before.

static uint32_t fsdpi_plan_passes(const fsdp_plan *p) {
    uint32_t all = (1u << FSDP_PASS_COUNT) - 1;
    uint32_t usual = all & ~(1u << FSDP_PASS_ONCE);
    return ((usual & ~p->desc.without) | p->desc.with) & all;
}

// Why steps go by calls; the log has it, too.
static void fsdpi_plan_refuse(fsdp_plan *p, const char *text) {
    p->mode = FSDP_PLAN_REFUSED;
    snprintf(p->why, sizeof p->why, "%.*s", (int)sizeof p->why - 1, text);
}

// A slot that a unit still holds goes with the model.
static void fsdpi_plan_bufs_free(fsdp_plan *p, fsdpi_plan_kind *k, int lasting) {
    for (int i = 0; i < k->listing.num_slots && k->bufs; i++) {
        if (!k->bufs[i] || fsdp_buf_held(k->bufs[i]) ||
            (k->listing.slots[i].offset < 0 && !lasting))
            continue;
        fsdp_buf_destroy(p->model, k->bufs[i]);
        k->bufs[i] = NULL;
    }
}

static void fsdpi_plan_kind_free(fsdp_plan *p, fsdpi_plan_kind *k) {
    if (!k) return;
    (void)fsdp_wait_stream(p->model, -1); // records under way read its lists
    fsdpi_plan_bufs_free(p, k, 1);
    fsdpi_plan_tape_free(p, &k->tape);
    fsdpi_plan_listing_end(p->model, &k->listing);
    fsdpi_plan_free(p->model, k->begin);
    fsdpi_plan_free(p->model, k->calls);
    fsdpi_plan_free(p->model, k->bufs);
    fsdpi_plan_free(p->model, k);
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

static int64_t fsdpi_plan_lasting(const fsdpi_plan_listing *l) {
    int64_t bytes = 0;
    for (int i = 0; i < l->num_slots; i++) bytes += l->slots[i].offset < 0 ? l->slots[i].bytes : 0;
    return bytes;
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
                                        const fsdpi_plan_choice *choice,
                                        const fsdpi_plan_tape *by_calls, fsdp_buf *const *bufs,
                                        fsdpi_plan_tape *out) {
    fsdpi_plan_tape raw;
    fsdpi_plan_show show;
    memset(&show, 0, sizeof show);
    memset(&raw, 0, sizeof raw);
    memset(out, 0, sizeof *out);
    show.plan = p;
    show.tape = &raw;
    show.kind = k;
    show.choice = choice;
    show.bufs = bufs;
    fsdp_status status = fsdpi_plan_rehearse(&show);
    if (!status) status = fsdpi_plan_arrange(&show, by_calls, out);
    fsdpi_plan_show_end(&show);
    fsdpi_plan_tape_free(p, &raw);
    return status;
}

static fsdp_status fsdpi_plan_by_calls(fsdp_plan *p, fsdpi_plan_kind *k, fsdpi_plan_tape *raw) {
    fsdpi_plan_show show;
    memset(&show, 0, sizeof show);
    show.plan = p;
    show.tape = raw;
    show.kind = k;
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
    fsdpi_plan_refuse(p, text);
    return FSDP_ERR_OUT_OF_MEMORY;
}

// Decisions, a tape without memory, places.
static fsdp_status fsdpi_plan_try(fsdp_plan *p, fsdpi_plan_kind *k, fsdpi_plan_facts *f,
                                  const fsdpi_plan_tape *by_calls, uint32_t passes, int64_t most,
                                  int *worst) {
    fsdpi_plan_listing *l = &k->listing;
    int decides = (passes & ~(1u << FSDP_PASS_ARENA)) != 0;
    fsdpi_plan_choice_end(p, &l->choice);
    fsdpi_plan_tape_free(p, &k->tape);
    fsdp_status status = decides ? fsdpi_plan_decide(p, f, passes, most, &l->choice, worst)
                                 : FSDP_OK;
    if (!status)
        status = fsdpi_plan_tape_make(p, k, decides ? &l->choice : NULL, by_calls, NULL, &k->tape);
    return status ? status : fsdpi_plan_place(p, &k->tape, l, passes);
}

/* What fits: all passes, with fewer units kept from try to try; else without those that take
   memory; else the calls as they are. */
static fsdp_status fsdpi_plan_fit(fsdp_plan *p, fsdpi_plan_kind *k, fsdpi_plan_facts *f,
                                  const fsdpi_plan_tape *by_calls, int64_t most) {
    const uint32_t keep = 1u << FSDP_PASS_KEEP, arena = 1u << FSDP_PASS_ARENA;
    const uint32_t all = fsdpi_plan_passes(p), sets[3] = {all, all & (keep | arena), all & arena};
    const fsdpi_plan_listing *l = &k->listing;
    int worst = 0;
    for (int i = 0; i < 3; i++) {
        int64_t budget = most;
        for (int tries = 0; tries < 8 && budget >= 0; tries++) {
            fsdp_status status = fsdpi_plan_try(p, k, f, by_calls, sets[i], budget, &worst);
            if (status || l->bytes <= most) return status;
            if (!(sets[i] & keep)) break;
            budget -= l->bytes - most;
        }
    }
    return fsdpi_plan_too_large(p, k, worst, l->bytes, most);
}

// Buffers for the places of a kind, and its tape with them.
static fsdp_status fsdpi_plan_bind(fsdp_plan *p, fsdpi_plan_kind *k) {
    fsdpi_plan_listing *l = &k->listing;
    fsdpi_plan_tape old = k->tape, by_calls;
    fsdp_buf **bufs = NULL;
    fsdp_status status = FSDP_OK;
    memset(&by_calls, 0, sizeof by_calls);
    if (!k->bufs)
        status = fsdpi_plan_alloc(p->model, (size_t)(l->num_slots + 1) * sizeof *k->bufs,
                                  (void **)&k->bufs);
    if (!status) fsdpi_plan_bufs_free(p, k, 0);
    for (int i = 0; i < l->num_slots && !status; i++) {
        const fsdpi_plan_slot *slot = &l->slots[i];
        if (k->bufs[i]) continue;
        status = slot->offset < 0 ? fsdp_buf_create(p->model, p->pool, FSDP_MEMORY_DEVICE,
                                                    slot->bytes, &k->bufs[i])
                                  : fsdp_buf_part(p->model, p->arena, slot->offset, slot->bytes,
                                                  &k->bufs[i]);
    }
    if (!status)
        status = fsdpi_plan_alloc(p->model, (size_t)(old.num_uses + 1) * sizeof *bufs,
                                  (void **)&bufs);
    for (int i = 0; i < old.num_uses && !status; i++) bufs[i] = k->bufs[old.uses[i].slot];
    if (!status) status = fsdpi_plan_by_calls(p, k, &by_calls);
    memset(&k->tape, 0, sizeof k->tape);
    if (!status)
        status = fsdpi_plan_tape_make(p, k, l->choice.managed ? &l->choice : NULL, &by_calls, bufs,
                                      &k->tape);
    if (!status && (k->tape.num_uses != old.num_uses || k->tape.num_ops != old.num_ops))
        status = fsdp_fail(p->world, FSDP_ERR_INTERNAL,
                           "[E972] plan: the rehearsal with slots has %d records and %d uses of "
                           "slots, expected %d and %d",
                           k->tape.num_ops, k->tape.num_uses, old.num_ops, old.num_uses);
    if (!status) { // uses share slots now, so that only the first rehearsal can tell them apart
        memcpy(k->tape.uses, old.uses, (size_t)old.num_uses * sizeof *old.uses);
        memcpy(k->tape.pairs, old.pairs, (size_t)old.num_ops * sizeof *old.pairs);
    }
    fsdpi_plan_tape_free(p, &old);
    fsdpi_plan_tape_free(p, &by_calls);
    fsdpi_plan_free(p->model, bufs);
    return status;
}

// Memory for all kinds: the arena is as large as the largest needs it.
static fsdp_status fsdpi_plan_bind_all(fsdp_plan *p, fsdpi_plan_kind *k) {
    int64_t bytes = k->listing.bytes - fsdpi_plan_lasting(&k->listing);
    fsdp_status status = fsdp_pools_trim(p->model);
    if (status) return status;
    if (bytes > fsdp_buf_nbytes(p->arena)) {
        for (int i = 0; i < p->num_kinds; i++) fsdpi_plan_bufs_free(p, p->kinds[i], 0);
        fsdp_buf_destroy(p->model, p->arena);
        p->arena = NULL;
        status = fsdp_buf_create(p->model, p->pool, FSDP_MEMORY_DEVICE, bytes, &p->arena);
        for (int i = 0; i < p->num_kinds && !status; i++) status = fsdpi_plan_bind(p, p->kinds[i]);
    }
    return status ? status : fsdpi_plan_bind(p, k);
}

/* -------------------------------------------------------------------------------------------- */
// Agreement of the ranks.

// The smallest of each number over all ranks of the model's mesh.
static fsdp_status fsdpi_plan_least(const fsdp_plan *p, int64_t *values, int count) {
    return fsdp_all_reduce(p->world, p->mesh, values, count, FSDP_I64, FSDP_MIN);
}

// The first call at which a rank differs from rank 0 of the mesh, with both sides.
static fsdp_status fsdpi_plan_differs(fsdp_plan *p, const fsdpi_plan_kind *k) {
    enum { WORDS = 160 };
    char theirs[WORDS] = "options or sizes", first[WORDS];
    const fsdpi_plan_listing *l = &k->listing;
    int size = fsdp_mesh_size(p->mesh, -1), me = 0;
    int64_t calls = l->num_calls, least = INT64_MAX;
    uint64_t *hashes = NULL;
    int32_t *ranks = NULL;
    fsdp_status status = fsdpi_plan_alloc(p->model, (size_t)size * sizeof *ranks, (void **)&ranks);
    if (!status) status = fsdp_broadcast(p->world, p->mesh, &calls, sizeof calls, 0);
    if (!status) status = fsdpi_plan_alloc(p->model, (size_t)calls * 8, (void **)&hashes);
    for (int c = 0; c < calls && c < l->num_calls && !status; c++)
        hashes[c] = fsdpi_plan_call_hash(l, c);
    if (!status) status = fsdp_broadcast(p->world, p->mesh, hashes, calls * 8, 0);
    if (!status) (void)fsdp_mesh_ranks(p->mesh, -1, ranks);
    while (!status && me < size && ranks[me] != fsdp_rank(p->world)) me++;
    for (int c = 0; c < calls && !status && least == INT64_MAX; c++)
        if (c >= l->num_calls || hashes[c] != fsdpi_plan_call_hash(l, c))
            least = (int64_t)c << 32 | me;
    if (!status) status = fsdpi_plan_least(p, &least, 1);
    int call = least == INT64_MAX ? -1 : (int)(least >> 32), who = (int)(least & 0x7FFFFFFF);
    if (call >= 0) fsdpi_plan_call_words(l, call, theirs, sizeof theirs);
    memcpy(first, theirs, sizeof first);
    if (!status) status = fsdp_broadcast(p->world, p->mesh, first, sizeof first, 0);
    if (!status && call >= 0)
        status = fsdp_broadcast(p->world, p->mesh, theirs, sizeof theirs, who);
    int rank = !status && call >= 0 ? ranks[who] : -1;
    fsdpi_plan_free(p->model, ranks);
    fsdpi_plan_free(p->model, hashes);
    if (status) return status;
    return fsdp_fail(p->world, FSDP_ERR_MISMATCH,
                     "[E973] plan: rank %d differs from the mesh's first rank at call %d: %s, "
                     "expected %s: give all ranks the same desc and make the same calls",
                     rank, call, theirs, first);
}

/* Whether all ranks got so far, and if `hash` is not 0, with the same hash. status: this rank's.
   *mine: it failed here, and not on another rank. */
static fsdp_status fsdpi_plan_agree(fsdp_plan *p, const fsdpi_plan_kind *k, fsdp_status status,
                                    uint64_t hash) {
    int64_t values[3] = {!status, (int64_t)hash, (int64_t)~hash};
    fsdp_status reached = fsdpi_plan_least(p, values, 3);
    if (reached) return reached;
    if (!values[0] && status) return status;
    if (!values[0])
        return fsdp_fail(p->world, FSDP_ERR_OUT_OF_MEMORY,
                         "[E974] plan: another rank could not make the plan: see its log; steps go "
                         "by calls");
    return hash && values[1] != ~values[2] ? fsdpi_plan_differs(p, k) : FSDP_OK;
}

/* -------------------------------------------------------------------------------------------- */

// Is there something in the step that depends on more than options and states?
static fsdp_status fsdpi_plan_refusal(fsdp_plan *p, const fsdpi_plan_kind *k,
                                      const fsdpi_plan_tape *by_calls) {
    (void)p, (void)k, (void)by_calls;
    return FSDP_OK;
}

// What this rank can do alone: a plan without memory, and its proof.
static fsdp_status fsdpi_plan_make_alone(fsdp_plan *p, fsdpi_plan_kind *k, int64_t most) {
    fsdpi_plan_tape by_calls;
    fsdpi_plan_facts f;
    memset(&by_calls, 0, sizeof by_calls);
    memset(&f, 0, sizeof f);
    f.kind = k;
    f.num_units = p->num_units;
    f.num_calls = k->num_calls;
    fsdp_status status = fsdpi_plan_by_calls(p, k, &by_calls);
    if (!status) status = fsdpi_plan_refusal(p, k, &by_calls);
    if (!status) status = fsdpi_plan_facts_new(p, &f);
    if (!status) status = fsdpi_plan_find_spans(p, &f, &by_calls);
    if (!status) {
        fsdpi_plan_find_base(&f, &by_calls);
        fsdpi_plan_count_ops(&by_calls, &k->listing, 0);
        status = fsdpi_plan_fit(p, k, &f, &by_calls, most);
    }
    if (!status) {
        fsdpi_plan_count_ops(&k->tape, &k->listing, 1);
        status = fsdpi_plan_list(p, k, &k->tape, &k->listing);
    }
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

/* The plan of a kind, or the reason why there is none. Returns a failure only if the step has
   failed: ranks that differ, a refuted plan, a collective. */
static fsdp_status fsdpi_plan_make(fsdp_plan *p, fsdpi_plan_kind *k) {
    int64_t by_calls = fsdpi_plan_pool_bytes(p);
    int64_t most = p->desc.most_bytes ? p->desc.most_bytes : by_calls;
    if (!p->desc.most_bytes && most < FSDPI_PLAN_LEAST_BYTES) most = FSDPI_PLAN_LEAST_BYTES;
    k->listing.by_calls = by_calls;
    fsdp_status status = fsdpi_plan_least(p, &most, 1), own;
    if (status) return status;
    own = fsdpi_plan_make_alone(p, k, most);
    if (!own) k->listing.hash = fsdpi_plan_text_hash(&k->listing);
    status = fsdpi_plan_agree(p, k, own, own ? 1 : k->listing.hash);
    if (!status) status = fsdpi_plan_agree(p, k, fsdpi_plan_bind_all(p, k), 0);
    if (!status) return FSDP_OK;
    if (p->mode != FSDP_PLAN_REFUSED) fsdpi_plan_refuse(p, fsdp_last_error(p->world));
    int is_the_steps = status == FSDP_ERR_MISMATCH || status == FSDP_ERR_INTERNAL ||
                       fsdp_world_status(p->world);
    return is_the_steps ? status : FSDP_OK;
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
        snprintf(p->why, sizeof p->why,
                 "expected %s '%.120s' (call %d of %d), got %s '%.120s'",
                 fsdpi_plan_call_name(expected->call), fsdpi_plan_unit_name(expected->unit), p->at,
                 p->kind->num_calls, fsdpi_plan_call_name(call), fsdpi_plan_unit_name(unit));
}

static void fsdpi_plan_states_now(const fsdp_plan *p, char *out) {
    for (int i = 0; i < p->num_units; i++)
        (void)fsdp_unit_snapshot(p->units[i], out + (size_t)i * p->unit_bytes, p->unit_bytes);
}

// A kind is dropped: the least recently used one, or one that steps leave again and again.
static void fsdpi_plan_drop(fsdp_plan *p, int index) {
    if (p->kind == p->kinds[index]) p->kind = NULL;
    fsdpi_plan_kind_free(p, p->kinds[index]);
    for (int i = index; i + 1 < p->num_kinds; i++) p->kinds[i] = p->kinds[i + 1];
    p->num_kinds--;
}

static void fsdpi_plan_drop_all(fsdp_plan *p) {
    while (p->num_kinds) fsdpi_plan_drop(p, p->num_kinds - 1);
    fsdp_buf_destroy(p->model, p->arena);
    p->arena = NULL;
}

// The first call of a step: what kind of step is it?
static void fsdpi_plan_begin(fsdp_plan *p) {
    p->open = 1;
    p->at = p->num_calls = 0;
    p->settings = fsdp_model_settings(p->model);
    p->why[0] = 0;
    p->kind = NULL;
    if (p->forgotten) fsdpi_plan_drop_all(p);
    p->forgotten = 0;
    if (p->warm > 0) {
        p->mode = FSDP_PLAN_WARM_UP;
        return;
    }
    fsdpi_plan_states_now(p, p->begin);
    for (int i = 0; i < p->num_kinds && !p->kind; i++)
        if (p->kinds[i]->settings == p->settings &&
            memcmp(p->kinds[i]->begin, p->begin, (size_t)p->num_units * p->unit_bytes) == 0)
            p->kind = p->kinds[i];
    p->mode = p->kind ? FSDP_PLAN_REPLAYING : FSDP_PLAN_RECORDING;
    if (p->num_kinds && !p->kind)
        snprintf(p->why, sizeof p->why, "%s",
                 "another kind of step: options, or what units hold, are not those of a plan");
}

// From here on the step goes by calls.
static void fsdpi_plan_leave(fsdp_plan *p) {
    p->mode = FSDP_PLAN_BY_CALLS;
    p->left++;
    p->kind->left++;
}

// One call from the tape: states first, since what is sent along depends on them.
static fsdp_status fsdpi_plan_replay(fsdp_plan *p, const fsdpi_plan_kind *k) {
    const fsdpi_plan_tape *t = &k->tape;
    int at = p->at++;
    fsdp_status status = FSDP_OK;
    for (int i = t->states_at[at]; i < t->states_at[at + 1] && !status; i++)
        status = fsdp_unit_restore(p->units[t->states[i].unit],
                                   t->saved + (size_t)t->states[i].at * p->unit_bytes,
                                   p->unit_bytes);
    for (int i = t->runs_at[at]; i < t->runs_at[at + 1] && !status; i++) {
        const fsdpi_plan_run *run = &t->runs[i];
        if (run->flags >= 0) status = fsdp_unit_flag_use(p->units[run->flags]);
        if (!status) status = fsdp_emit_again(p->model, t->ops + run->begin, run->end - run->begin);
    }
    return status;
}

static void fsdpi_plan_record(fsdp_plan *p, fsdp_unit *unit, int call) {
    fsdpi_plan_call one = {unit, call, unit ? fsdpi_plan_index(p, unit) : -1};
    int is_new = fsdp_model_settings(p->model) != p->settings;
    if (!is_new && !fsdpi_plan_grow(p->model, (void **)&p->calls, p->num_calls, &p->cap_calls,
                                    sizeof one)) {
        p->calls[p->num_calls++] = one;
        return;
    }
    p->mode = FSDP_PLAN_BY_CALLS;
    p->differ++;
    snprintf(p->why, sizeof p->why, "%s",
             is_new ? "options changed inside of the step" : "no memory to record the step");
}

// A kind for the recorded step, at its end.
static fsdp_status fsdpi_plan_recorded(fsdp_plan *p) {
    fsdpi_plan_kind *k = NULL;
    size_t begin = (size_t)p->num_units * p->unit_bytes,
           calls = (size_t)p->num_calls * sizeof *k->calls;
    fsdp_status status = fsdpi_plan_grow(p->model, (void **)&p->kinds, p->num_kinds, &p->cap_kinds,
                                         sizeof *p->kinds);
    p->recorded++;
    if (!status) status = fsdpi_plan_alloc(p->model, sizeof *k, (void **)&k);
    if (!status) status = fsdpi_plan_alloc(p->model, begin, (void **)&k->begin);
    if (!status) status = fsdpi_plan_alloc(p->model, calls, (void **)&k->calls);
    if (!status) {
        memcpy(k->begin, p->begin, begin);
        memcpy(k->calls, p->calls, calls);
        k->settings = p->settings;
        k->num_calls = p->num_calls;
    }
    while (p->num_kinds >= p->desc.most_kinds) {
        int oldest = 0;
        for (int i = 1; i < p->num_kinds; i++)
            if (p->kinds[i]->used_at < p->kinds[oldest]->used_at) oldest = i;
        fsdpi_plan_drop(p, oldest);
    }
    status = fsdpi_plan_make(p, status ? NULL : k);
    if (!status && p->mode != FSDP_PLAN_REFUSED) {
        k->used_at = p->steps;
        p->kinds[p->num_kinds++] = k;
        return FSDP_OK;
    }
    fsdpi_plan_kind_free(p, k);
    return status;
}

// The end of a step.
static int fsdpi_plan_finalize(fsdp_plan *p, fsdp_status *status) {
    fsdpi_plan_kind *k = p->kind;
    p->open = 0;
    p->steps++;
    if (p->mode == FSDP_PLAN_WARM_UP) p->warm--;
    if (p->mode == FSDP_PLAN_REPLAYING) {
        k->replayed++;
        p->replayed++;
        k->used_at = p->steps;
        k->left = 0;
        p->differ = 0;
    }
    if (p->mode == FSDP_PLAN_BY_CALLS && k && k->left >= FSDPI_PLAN_PATIENCE) {
        for (int i = 0; i < p->num_kinds; i++)
            if (p->kinds[i] == k) fsdpi_plan_drop(p, i);
        p->differ++;
    }
    if (p->differ >= FSDPI_PLAN_PATIENCE) {
        char text[FSDPI_PLAN_TEXT];
        snprintf(text, sizeof text, "steps differ from each other: %.400s", p->why);
        fsdpi_plan_refuse(p, text);
    }
    if (p->mode != FSDP_PLAN_RECORDING) return 0;
    *status = fsdp_finalize_backward(p->model); // goes to the extensions behind, and to the core
    if (!*status) *status = fsdpi_plan_recorded(p);
    return 1;
}

// `call` of the extension.
static int fsdpi_plan_answer(void *user, fsdp_model *model, fsdp_unit *unit, int call,
                             fsdp_status *status) {
    fsdp_plan *p = (fsdp_plan *)user;
    int ends = call == FSDP_CALL_RESET || call == FSDP_CALL_FINALIZE;
    if (p->mode == FSDP_PLAN_PAUSED) p->open = !ends;
    if (call == FSDP_CALL_RESET) p->open = 0;
    if (p->mode >= FSDP_PLAN_PAUSED || call == FSDP_CALL_RESET) return 0;
    if (!p->open && !fsdp_is_grad_enabled(model)) return 0; // an evaluation is no step
    if (!p->open) fsdpi_plan_begin(p);
    if (p->mode == FSDP_PLAN_REPLAYING) {
        const fsdpi_plan_call *next = p->at < p->kind->num_calls ? &p->kind->calls[p->at] : NULL;
        int same = fsdp_model_settings(model) == p->settings;
        if (same && next && next->unit == unit && next->call == call) {
            if (!unit) return fsdpi_plan_finalize(p, status);
            *status = fsdpi_plan_replay(p, p->kind);
            return 1;
        }
        fsdpi_plan_say(p, same ? next : NULL, unit, call);
        fsdpi_plan_leave(p);
        if (p->desc.strict) {
            *status = fsdp_fail(p->world, FSDP_ERR_INVALID_STATE, "[E976] plan: %s", p->why);
            return 1;
        }
    }
    if (p->mode == FSDP_PLAN_RECORDING) fsdpi_plan_record(p, unit, call);
    return unit ? 0 : fsdpi_plan_finalize(p, status);
}

static void fsdpi_plan_relayout(void *user, fsdp_model *model) {
    fsdp_plan *p = (fsdp_plan *)user;
    (void)model;
    fsdpi_plan_drop_all(p);
    p->kind = NULL;
    if (p->mode == FSDP_PLAN_REPLAYING) p->mode = FSDP_PLAN_RECORDING;
    snprintf(p->why, sizeof p->why, "%s", "the model has a new layout");
}

static void fsdpi_plan_end(void *user) {
    fsdp_plan *p = (fsdp_plan *)user;
    fsdp_model *m = p->model;
    fsdpi_plan_drop_all(p);
    fsdpi_plan_free(m, p->kinds);
    fsdpi_plan_free(m, p->calls);
    fsdpi_plan_free(m, p->begin);
    fsdpi_plan_free(m, p->units);
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

static fsdp_status fsdpi_plan_find_units(fsdp_plan *p) {
    fsdp_param_view v = FSDP_ZERO;
    fsdp_status status = fsdpi_plan_alloc(p->model,
                                          (size_t)fsdp_num_units(p->model) * sizeof *p->units,
                                          (void **)&p->units);
    while (!status && fsdp_next_param(p->model, &v))
        if (p->num_units == 0 || p->units[p->num_units - 1] != v.unit)
            p->units[p->num_units++] = v.unit;
    if (!status) p->unit_bytes = fsdp_unit_snapshot(p->units[0], NULL, 0);
    return status ? status
                  : fsdpi_plan_alloc(p->model, (size_t)p->num_units * p->unit_bytes,
                                     (void **)&p->begin);
}

FSDP_API fsdp_status fsdp_plan_create(fsdp_model *model, const fsdp_plan_desc *desc,
                                      fsdp_plan **plan) {
    fsdp_plan_desc d;
    fsdp_plan *p = NULL;
    fsdp_mesh_info info;
    if (!model || !plan)
        return fsdp_fail(fsdp_model_world(model), FSDP_ERR_INVALID_ARG,
                         "[E978] plan_create: model or plan is NULL");
    *plan = NULL;
    fsdp_world *w = fsdp_model_world(model);
    fsdp_status status = fsdp_desc_read(w, &d, desc, sizeof d, "fsdp_plan_desc");
    if (!status) status = fsdpi_plan_check_desc(model, &d);
    if (!status) status = fsdp_model_commit(model);
    if (!status) status = fsdp_model_mesh_info(model, &info);
    if (!status) status = fsdpi_plan_alloc(model, sizeof *p, (void **)&p);
    if (status) return status;
    p->model = model;
    p->world = w;
    p->desc = d;
    p->mesh = info.mesh;
    p->mode_of_world = fsdp_model_run(model);
    p->pool = fsdp_pool_register(model, "arena");
    p->extension.name = "plan";
    p->extension.user = p;
    p->extension.call = fsdpi_plan_answer;
    p->extension.relayout = fsdpi_plan_relayout;
    p->extension.destroy = fsdpi_plan_end;
    fsdpi_plan_defaults(p);
    status = fsdpi_plan_find_units(p);
    if (!status && p->pool < 0) status = FSDP_ERR_INVALID_ARG;
    if (!status) status = fsdp_attach(model, &p->extension);
    if (status) fsdpi_plan_end(p);
    else *plan = p;
    return status;
}

FSDP_API void fsdp_plan_destroy(fsdp_plan *plan) {
    if (plan) (void)fsdp_detach(plan->model, &plan->extension);
}

FSDP_API fsdp_plan_mode fsdp_plan_state(const fsdp_plan *plan) {
    return plan ? (fsdp_plan_mode)plan->mode : FSDP_PLAN_MODE_COUNT;
}

FSDP_API const char *fsdp_plan_why(const fsdp_plan *plan) { return plan ? plan->why : ""; }

FSDP_API fsdp_status fsdp_plan_pause(fsdp_plan *plan, int paused) {
    if (!plan)
        return fsdp_fail(NULL, FSDP_ERR_INVALID_ARG, "[E979] plan_pause: plan is NULL");
    if (plan->mode == FSDP_PLAN_REFUSED || (plan->mode == FSDP_PLAN_PAUSED) == (paused != 0))
        return FSDP_OK;
    if (!paused) { // with the next step: what is left of this one goes by calls
        plan->mode = plan->open ? FSDP_PLAN_BY_CALLS : FSDP_PLAN_RECORDING;
        plan->kind = NULL;
        return FSDP_OK;
    }
    if (plan->open && plan->mode == FSDP_PLAN_REPLAYING) plan->left++;
    plan->mode = FSDP_PLAN_PAUSED;
    snprintf(plan->why, sizeof plan->why, "%s", "paused by fsdp_plan_pause");
    return FSDP_OK;
}

FSDP_API fsdp_status fsdp_plan_forget(fsdp_plan *plan) {
    if (!plan)
        return fsdp_fail(NULL, FSDP_ERR_INVALID_ARG, "[E980] plan_forget: plan is NULL");
    if (plan->open && plan->mode == FSDP_PLAN_REPLAYING) plan->left++;
    plan->forgotten = 1; // units may hold slots of the arena until the step's end
    plan->kind = NULL;
    plan->differ = 0;
    if (plan->mode != FSDP_PLAN_PAUSED)
        plan->mode = plan->open ? FSDP_PLAN_BY_CALLS : FSDP_PLAN_RECORDING;
    snprintf(plan->why, sizeof plan->why, "%s", "plans were dropped by fsdp_plan_forget");
    return FSDP_OK;
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
    fsdp_param_view v = FSDP_ZERO;
    while (fsdp_next_param(p->model, &v))
        for (int i = 0; i < t->num_uses; i++)
            if (t->uses[i].pool == FSDP_POOL_GATHER && p->units[t->uses[i].unit] == v.unit &&
                t->uses[i].from < backward && t->uses[i].to >= backward)
                out->crossing++;
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
