/* fsdp_trace.h - what a step did, and when: an extension of fsdp.h that is in every program

       FSDP_TRACE=DIR ./program                  // steps 3 to 5, one file for each rank in DIR
       fsdptrace json DIR -o trace.json          // opens in Perfetto (ui.perfetto.dev)

   A program needs no change for that: fsdp.h includes the recorder, trace/record.h. This header is
   for programs that begin and end a trace themselves, that add work of their own to it, or that
   print a report. docs/see.md explains what the tools print.

       fsdp_trace *trace;
       if (fsdp_trace_start(model, NULL, &trace)) return 1;    // between two steps
       ...
       if (fsdp_trace_stop(trace)) return 1;                   // writes DIR/JOB.RANK.trace

   SPDX-License-Identifier: MIT (full text at the end of fsdp.h) */
#ifndef FSDP_TRACE_H
#define FSDP_TRACE_H
#include "fsdp.h"
#ifndef FSDP_MATH_ONLY

#ifdef __cplusplus
extern "C" {
#endif

typedef struct fsdp_trace fsdp_trace;

typedef struct fsdp_trace_desc {
    uint32_t size, start_canary;
    const char *dir;    // made if only it is missing. NULL: FSDP_TRACE
    int64_t first_step; // number of finished steps before it, since the model was made
    int64_t last_step;  // 0 both: FSDP_TRACE_STEPS ("3:5"), else 3 to 5
    int64_t records;    // room for so many, of 48 bytes; 0: by units and steps, at least 65536
    uint64_t end_canary;
} fsdp_trace_desc;

/* fsdp_trace_start - record steps of a model from now on; commits the model
   desc        NULL: defaults
   trace       the model owns it; it ends with fsdp_trace_stop or the model
   Effect      when the step after the last one begins, the file is written. Records for which
               there is no room are counted
   Result      FSDP_OK; INVALID_ARG (no directory, steps), INVALID_STATE (a unit is not idle),
               UNSUPPORTED (the device cannot measure times), OUT_OF_MEMORY, collective errors,
               errors of commit
   Collective  yes: every rank of the model's mesh      Blocks yes      Allocates yes
   Source      torch: torch.profiler.profile */
FSDP_API FSDP_MUST_CHECK fsdp_status fsdp_trace_start(fsdp_model *model,
                                                      const fsdp_trace_desc *desc,
                                                      fsdp_trace **trace);

/* fsdp_trace_stop - end a trace, and write its file if that was not done; NULL is allowed
   Result      FSDP_OK; IO (the text says why; the trace has ended all the same); INVALID_STATE
   Collective  yes: every rank of the model's mesh      Blocks yes      Allocates no */
FSDP_API fsdp_status fsdp_trace_stop(fsdp_trace *trace);

/* fsdp_trace_span - add work of the caller to a trace. The trace of a model that FSDP_TRACE has
   started is fsdp_find_extension(model, "trace")
   trace       NULL: nothing happens
   name        at most 47 bytes count; 64 names and units' ones together
   begin_ns, end_ns  on the world's clock: fsdp_now */
FSDP_API void fsdp_trace_span(fsdp_trace *trace, const char *name, int64_t begin_ns,
                              int64_t end_ns);

#ifdef __cplusplus
}
#endif
#endif // FSDP_MATH_ONLY
#endif // FSDP_TRACE_H

/* ============================================================================================ */

#if defined(FSDP_IMPLEMENTATION) && !defined(FSDP_TRACE_IMPLEMENTED) && !defined(FSDP_MATH_ONLY)
#define FSDP_TRACE_IMPLEMENTED
#include "trace/read.h"
#endif
