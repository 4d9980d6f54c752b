/* fsdp_plan.h - step plans: a training step that is recorded, optimised, proven and replayed

   It does the work of torch.compile for FSDP, without a compiler. The trainer needs one more line:

       #define FSDP_IMPLEMENTATION          // in one .c or .cc file of the program
       #include "fsdp_plan.h"               // includes fsdp.h; link with -lm

       fsdp_plan *plan;
       if (fsdp_plan_create(model, NULL, &plan)) return 1;    // after the last fsdp_fully_shard

   The first step runs eagerly. The second one is recorded: at its end the library makes a plan.
   From the third step on the hooks answer from a tape: fewer and larger collectives, in slots of at
   most `most_bytes`, and the same bits. Before the first replay the library proves that the step
   cannot deadlock, that nothing races, and that slots need no more memory than the plan says:
   docs/plan.md lists the checks and the assumptions of the proof. If the program then makes
   other calls, the step continues eagerly, with the same results.

   SPDX-License-Identifier: MIT (full text at the end of fsdp.h) */
#ifndef FSDP_PLAN_H
#define FSDP_PLAN_H

#include "fsdp.h"

#ifdef FSDP_MATH_ONLY
#error "fsdp_plan.h has no pure functions: with FSDP_MATH_ONLY leave it out"
#else

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
    FSDP_PLAN_WARM_UP = 0, // eager steps, not recorded
    FSDP_PLAN_RECORDING,   // an eager step, recorded
    FSDP_PLAN_REPLAYING,   // from the tape
    FSDP_PLAN_EAGER,       // this step runs eagerly: it differs from the plan, or has left it
    FSDP_PLAN_PAUSED,
    FSDP_PLAN_REFUSED,     // all later steps run eagerly: see fsdp_plan_why
    FSDP_PLAN_MODE_COUNT
} fsdp_plan_mode;
#define FSDP_PLAN_BY_CALLS FSDP_PLAN_EAGER // its name in version 0.1, until 0.4

// Times for fsdp_plan_simulate and fsdp_plan_desc.cost, equal on all ranks. The library measures
// nothing: no decision depends on a clock.
typedef struct fsdp_plan_cost {
    uint32_t size, start_canary;
    double gather_latency_ns, gather_bytes_per_ns;   // a collective's; bytes: its full side
    double reduce_latency_ns, reduce_bytes_per_ns;
    double replica_latency_ns, replica_bytes_per_ns; // all_reduce over replicas
    double copy_bytes_per_ns, issue_ns;              // copies, zeros; the host, for each op
    const int64_t *compute_ns; // [num_compute]: the caller's work after call k;
    int32_t num_compute;       // fewer than calls: the last one stands for the rest
    int32_t shared_links;      // 1: gathers and reductions slow each other down
    uint64_t end_canary;
} fsdp_plan_cost;

typedef struct fsdp_plan_desc {
    uint32_t size, start_canary;
    uint32_t without, with;     // 1u << FSDP_PASS_*: left out; taken although off by default
    int32_t warm_up;            // steps before the one that is recorded; 0: 1
    int32_t ahead;              // gathers under way before their use. 0: 1 with comm threads or
                                // streams, none inline, where it would hide nothing; -1: none
    int32_t most_kinds;         // kinds of steps that are kept; 0: 8
    int32_t strict;             // 1: a call that is not the plan's is FSDP_ERR_INVALID_STATE
    int64_t most_bytes;         // most bytes of a step's slots; 0: as eager steps, at least 4 MiB
    int64_t bucket_bytes;       // full side of a bucket's collective; 0: 1 MiB; -1: no buckets
    int64_t first_bucket_bytes; // the first bucket of forward and of backward, which nothing hides;
                                // 0: as bucket_bytes
    const fsdp_plan_cost *cost; // NULL: all passes run. Otherwise bucket, keep and ahead run if
                                // fsdp_plan_simulate predicts no slower step. Copied
    uint64_t end_canary;
} fsdp_plan_desc;

/* fsdp_plan_create - plan the steps of a model from now on; commits the model
   desc        NULL: defaults
   plan        owned by the model: ends with fsdp_plan_destroy, the model or the world
   Effect      after warm_up steps one is recorded; fsdp_finalize_backward of that step makes the
               plan (collective, blocks, allocates); then steps are replayed. A step that
               differs from all plans runs eagerly, with the same results. If a plan for other
               options has needed more memory meanwhile, the first call of a step makes a plan, too
   Result      FSDP_OK; INVALID_ARG (the text names the field), INVALID_STATE (a unit is not idle,
               the model has a plan), MISMATCH (ranks gave other descs: which field),
               OUT_OF_MEMORY (also if another rank has failed), what commit returns
   Collective  yes: every rank of the model's mesh gives the same desc      Blocks yes
   Allocates   yes
   Source      torch: torch.compile of a model under fully_shard; torchtitan: graph_trainer */
FSDP_API FSDP_MUST_CHECK fsdp_status fsdp_plan_create(fsdp_model *model, const fsdp_plan_desc *desc,
                                                      fsdp_plan **plan);

/* fsdp_plan_destroy - run the model eagerly again, from the next call on; NULL is allowed
   Collective  yes (see fsdp_plan_pause)      Blocks for operations under way
   Allocates   no; later steps allocate the slots of eager steps again. Slots that units still hold
               end with the model */
FSDP_API void fsdp_plan_destroy(fsdp_plan *plan);

/* fsdp_plan_state - what the current or next step does; FSDP_PLAN_MODE_COUNT for NULL
   fsdp_plan_why   - one line: the reason why steps run eagerly or the plan was refused; "" if there
               is none; never NULL, valid until the next call of the step
   Collective  no      Blocks no      Allocates no
   Source      torch: compiled_autograd_enabled, torch.compiler.is_compiling */
FSDP_API fsdp_plan_mode fsdp_plan_state(const fsdp_plan *plan);
FSDP_API const char *fsdp_plan_why(const fsdp_plan *plan);

/* fsdp_plan_pause  - 1: run steps eagerly without recording them, and keep the plans; 0: continue
               with the next step
   fsdp_plan_forget - drop all plans and record again
   Effect      in a step: its next call and all later ones run eagerly; reductions that have waited
               for a later call are made
   Result      FSDP_OK; INVALID_ARG; in a step collective errors
   Collective  yes      Blocks inline, in a step: until reduced; forget: for operations under way
   Allocates   no, but those reductions take eager slots at their first use */
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

// [0]: the eager step, [1]: the plan.
typedef struct fsdp_plan_report {
    int32_t calls, forward_calls, units, buckets; // buckets: joined collectives
    int32_t ops[2], gathers[2], reductions[2], replicas[2];
    uint64_t gather_bytes[2], reduce_bytes[2];    // read from other ranks in one step
    int64_t bytes[2];                             // bytes of all slots
    int64_t bound;                                // no placement of these slots needs less
    int32_t crossing;     // parameters gathered in forward that still are when backward begins
    int32_t most_open;    // units gathered at a time, with those under way
    uint64_t hash;        // the plan's; equal on all ranks
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
    int64_t ops, accesses, waits, waits_implied, comms, buffers, bytes;
    char text[512];                        // refuted: two lines, the counterexample; otherwise one
} fsdp_plan_proof;

/* fsdp_plan_prove - make again the proof that was made before the plan ran, with its numbers
   Result      FSDP_OK, also when refuted; INVALID_ARG, OUT_OF_MEMORY
   Collective  no      Blocks no      Allocates temporary tables */
FSDP_API fsdp_status fsdp_plan_prove(const fsdp_plan *plan, int index, fsdp_plan_proof *out);

typedef struct fsdp_plan_times {
    int64_t step_ns, compute_ns, bound_ns;  // bound: no order of these ops is faster
    int64_t gather_ns, reduce_ns, replica_ns; // under way
    int64_t exposed_ns;                     // the caller's stream waits for collectives
    int64_t peak_bytes;                     // most bytes of slots at a time
    int32_t worst_call;                     // at which it waits longest, and how long
    int64_t worst_ns;
} fsdp_plan_times;

/* fsdp_plan_simulate - the time of a step under given costs: of the plan, or of its calls
   eager       1: a dry run of the eager step, between two steps, with the model's current options
   Result      FSDP_OK; INVALID_ARG, OUT_OF_MEMORY; eager: INVALID_STATE (a unit is not idle, or
               options are not those of the plan)
   Collective  no      Blocks eager: for operations under way      Allocates temporary tables */
FSDP_API fsdp_status fsdp_plan_simulate(const fsdp_plan *plan, int index, int eager,
                                        const fsdp_plan_cost *cost, fsdp_plan_times *out);

/* fsdp_pass_name - "keep"; "?" out of range
   Collective  no      Blocks no      Allocates no      Thread any */
FSDP_API const char *fsdp_pass_name(int pass);

// clang-format on
#ifdef __cplusplus
}
#endif
#endif // FSDP_MATH_ONLY
#endif // FSDP_PLAN_H

/* ============================================================================================ */
/* Implementation: the parts that no other part includes. */

#if defined(FSDP_IMPLEMENTATION) && !defined(FSDP_PLAN_IMPLEMENTED) && !defined(FSDP_MATH_ONLY)
#define FSDP_PLAN_IMPLEMENTED
#include "src/plan/api.h"
#endif // FSDP_IMPLEMENTATION
