/* fsdp_trace.h - what a step did, and when: an extension of fsdp.h that every program has

       FSDP_TRACE=DIR ./program                // records steps 3 to 5, a file of each rank in DIR
       fsdptrace json DIR -o trace.json        // opens in Perfetto

   The program stays as it is: fsdp.h includes the recorder, src/trace/record.h. This header is for
   programs that begin and end a trace themselves, or add work of their own to it.
   docs/observability.md explains what the tools print.

       fsdp_trace *trace;
       if (fsdp_trace_start(model, NULL, &trace)) return 1;    // before the first step
       ...
       if (fsdp_trace_stop(trace)) return 1;                   // DIR/JOB.RANK.trace is complete

   SPDX-License-Identifier: MIT (full text at the end of fsdp.h)

   COST
     A traced step allocates nothing and makes no system call. A record is 48 bytes in memory, and
     goes to the file after the last step. The times of records are the library's (fsdp_extension,
     `ran`): on a device with streams they need events, also in the steps before. After the last
     traced step a trace costs nothing.
   NUMBERS OF STEPS are those of the error texts: finished steps before it, so 0 is the first one. A
     step ends when the next one begins: what an optimizer does is a part of it.
   SEVERAL MODELS of a world have a file each: JOB.RANK.trace, JOB-1.RANK.trace, ... */
#include "fsdp.h"

#ifndef FSDP_TRACE_H
#define FSDP_TRACE_H
#ifdef FSDP_MATH_ONLY
#error "fsdp_trace.h has no pure functions: with FSDP_MATH_ONLY leave it out"
#else

#ifdef __cplusplus
extern "C" {
#endif

typedef struct fsdp_trace fsdp_trace;

typedef struct fsdp_trace_desc {
    uint32_t size, start_canary;
    const char *dir;               // made if only it is missing. NULL: FSDP_TRACE
    int64_t first_step, last_step; // both 0: FSDP_TRACE_STEPS ("3:5"), else 3 and 5
    int64_t records;               // room; 0: 64 for each unit and step, and at least 65,536
    uint64_t end_canary;
} fsdp_trace_desc;

/* fsdp_trace_start - record steps of a model; commits the model
   desc        NULL: defaults
   trace       ends with fsdp_trace_stop or the model. If FSDP_TRACE has started one, it is that.
               NULL: you do not need it; NULL in it after a failure
   Effect      the first call after the last step writes the file. If that fails, it is logged.
               Records that have no room are left out and counted.
               A file that an earlier run has left in its place is removed
   Result      FSDP_OK; INVALID_ARG (the text names the field), INVALID_STATE (a unit is not idle;
               the model has a trace, or a plan already), UNSUPPORTED (the device cannot measure
               times), OUT_OF_MEMORY, IO (the directory); errors of commit and collective ones
   Collective  yes: every rank of the model's mesh      Blocks, Allocates yes
   Source      torch: torch.profiler.profile, schedule */
FSDP_API FSDP_MUST_CHECK fsdp_status fsdp_trace_start(fsdp_model *model,
                                                      const fsdp_trace_desc *desc,
                                                      fsdp_trace **trace);

/* fsdp_trace_stop - end a trace between two steps; if its file is not written, write what there is
   trace       NULL: nothing happens
   Result      FSDP_OK; IO (also if it was logged before), INVALID_STATE (called by an extension);
               collective errors. The trace has ended all the same, but after INVALID_STATE
   Collective  yes: every rank of the model's mesh      Blocks yes */
FSDP_API fsdp_status fsdp_trace_stop(fsdp_trace *trace);

/* fsdp_trace_span - add work of the caller's to a trace
   trace       NULL: nothing happens
   name        a literal, or a text that stays; 47 bytes of it count. A trace has room for 64 names
   begin_ns, end_ns  on the world's clock: fsdp_now
   Thread      the one that uses the world */
FSDP_API void fsdp_trace_span(fsdp_trace *trace, const char *name, int64_t begin_ns,
                              int64_t end_ns);

/* fsdp_trace_report - where the time of a traced step went, as `fsdptrace why DIR` prints it, but
               without what would help
   dir         has the files of all ranks; of several jobs the last one counts. NULL: FSDP_TRACE
   buf         cap bytes: the text, or why there is none; cut if it is longer
   Result      FSDP_OK; INVALID_ARG, IO, OUT_OF_MEMORY, INVALID_STATE (no rank has a whole step)
   Collective  no: one rank calls it, when all have stopped      Blocks, Allocates yes */
#ifndef FSDP_STATIC // there its definition, which not every program has, declares it
FSDP_API fsdp_status fsdp_trace_report(const char *dir, char *buf, size_t cap);
#endif

#ifdef __cplusplus
}
#endif
#endif // FSDP_MATH_ONLY
#endif // FSDP_TRACE_H

/* ============================================================================================ */
/* fsdp.h has included the recorder; this adds what reads its files.                              */

#if defined(FSDPI_TRACE_RECORD_H) && !defined(FSDP_TRACE_IMPLEMENTED)
#define FSDP_TRACE_IMPLEMENTED
#include "src/trace/breakdown.h"
#endif
