/* trace/read.h - trace files read and checked; clocks and collectives of all ranks brought together

   A part of fsdp_trace.h. SPDX-License-Identifier: MIT (full text at the end of fsdp.h) */
#ifndef FSDP_TRACE_H
#include "../fsdp_trace.h"
#endif
#ifndef FSDPI_TRACE_READ_H
#define FSDPI_TRACE_READ_H

#include "format.h"

// The trace of a rank, as its file has it, but: records are in the order of begin_ns, and their
// times, those of steps and of `head` are those of the job's clock: that of its first rank.
typedef struct fsdpi_tr_rank {
    fsdpi_tr_header head;
#define FSDP_X(number, name, type)                                                                 \
    type *name;                                                                                    \
    uint64_t num_##name;
    FSDPI_TR_SECTIONS(FSDP_X)
#undef FSDP_X
    int64_t *peers_ns;  // [num_records] of a collective that is matched: when the last member came
    int32_t *last;      // [num_records] which one that was, its rank; -1: not matched
    int64_t shift_ns;   // the rank's clock + shift_ns = the job's clock
    int64_t error_ns;   // of shift_ns, at most; 0: the same clock. -1: not known (--force)
    void *memory;
} fsdpi_tr_rank;

typedef struct fsdpi_tr_job {
    char job[128];
    int32_t num, size; // files that were found; ranks of the job
    fsdpi_tr_rank *rank; // [num], in the order of ranks
} fsdpi_tr_job;

/* Reads the files of a job. job NULL: the only one that DIR has files of. force: also if clocks
   were not compared. Returns 0, or -1 with the reason in `why`. */
static int fsdpi_tr_read(const char *dir, const char *job, int force, fsdpi_tr_job *out,
                            char *why, size_t cap);
static void fsdpi_tr_free(fsdpi_tr_job *job);

// A text by its place in TEXT or, with `list` and its length, by the number in a list of names.
static const char *fsdpi_tr_text(const fsdpi_tr_rank *r, uint64_t at);
static const char *fsdpi_tr_name(const fsdpi_tr_rank *r, const uint32_t *list, uint64_t num,
                                    uint64_t number);

#endif // FSDPI_TRACE_READ_H
