/* trace/read.h - trace files read and checked; clocks and collectives of all ranks brought together

   Callers: breakdown.h (fsdpi_tr_name), tools/fsdptrace.c (fsdpi_tr_read), tools/fsdptrace_json.h
     (fsdpi_tr_text) and others.

   A part of fsdp_trace.h. SPDX-License-Identifier: MIT (full text at the end of fsdp.h) */
#ifndef FSDP_TRACE_H
#include "../../fsdp_trace.h"
#endif
#ifndef FSDPI_TRACE_READ_H
#define FSDPI_TRACE_READ_H

#include "format.h"

#include <dirent.h>
#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

// A rank's trace, as in its file, with two changes: events are sorted by begin_ns, and times of
// events and steps are on the job's clock, which is that of its first rank.
typedef struct fsdpi_tr_rank {
    fsdpi_tr_header head;
#define FSDP_X(number, name, type)                                                                 \
    type *name;                                                                                    \
    uint64_t num_##name;
    FSDPI_TR_SECTIONS(FSDP_X)
#undef FSDP_X
    int64_t *peers_ns; // [num_records] for a matched collective: when the last member came
    int32_t *last;     // [num_records] which rank that was; -1: not matched
    int64_t shift_ns;  // job's clock - rank's clock, when the trace began
    int64_t error_ns;  // largest error of the times here; 0: the same clock; -1: unknown (force)
    void *memory;
} fsdpi_tr_rank;

// Files in a directory that are left out: two lines for each of the first ones.
enum { FSDPI_TR_NOTES = 8 };
typedef struct fsdpi_tr_notes {
    char text[4096];
    int32_t num;
} fsdpi_tr_notes;

typedef struct fsdpi_tr_job {
    char job[128], other[128]; // other: another job with files in the directory, or ""
    int32_t num, size;         // files read; ranks of the job
    fsdpi_tr_rank *rank;       // [num], sorted by rank
    fsdpi_tr_notes notes;
} fsdpi_tr_job;

#define FSDPI_TR_NOT_OURS                                                                          \
    "it is damaged, or of another version of fsdp.h, whose fsdptrace reads it"

// Why files cannot be read, in a text of the caller's. The first reason stays.
typedef struct fsdpi_tr_why {
    char *text;
    size_t cap;
} fsdpi_tr_why;

static FSDP_PRINTF(2, 3) int fsdpi_tr_refuse(const fsdpi_tr_why *why, const char *format, ...) {
    va_list args;
    va_start(args, format);
    if (why->cap && !why->text[0]) (void)vsnprintf(why->text, why->cap, format, args);
    va_end(args);
    return -1;
}

// Returns a text by its offset in TEXT. Below: a name by its number, a call by its own.
static const char *fsdpi_tr_text(const fsdpi_tr_rank *r, uint64_t at) {
    return at < r->num_text ? r->text + at : "?";
}
static const char *fsdpi_tr_name(const fsdpi_tr_rank *r, uint32_t what) {
    return what < r->num_names ? fsdpi_tr_text(r, r->names[what]) : "";
}
static const char *fsdpi_tr_call_name(int call) {
    static const char *const names[FSDP_CALL_COUNT] = {
#define FSDP_X(name, text) text,
        FSDP_CALL_LIST(FSDP_X)
#undef FSDP_X
    };
    return call >= 0 && call < FSDP_CALL_COUNT ? names[call] : "?";
}

/* -------------------------------------------------------------------------------------------- */
// Files. Every index and size in a file is checked before it is used.

static int fsdpi_tr_check_sections(fsdpi_tr_rank *r, const char *name, const fsdpi_tr_why *why) {
    char *base = (char *)r->memory;
    uint64_t at = sizeof r->head, i = 0;
#define FSDP_X(number, field, type)                                                                \
    do {                                                                                           \
        const fsdpi_tr_section *s = &r->head.section[i++];                                         \
        if (s->at != at || s->size != sizeof(type) || at > r->head.bytes ||                        \
            s->count > (r->head.bytes - at) / sizeof(type))                                        \
            return fsdpi_tr_refuse(why, "%s: its section %s is of another version, or damaged",    \
                                   name, #field);                                                  \
        r->field = (type *)(void *)(base + at);                                                    \
        r->num_##field = s->count;                                                                 \
        at += (s->count * sizeof(type) + 7) / 8 * 8;                                               \
    } while (0);
    FSDPI_TR_SECTIONS(FSDP_X)
#undef FSDP_X
    return at == r->head.bytes ? 0 : fsdpi_tr_refuse(why, "%s: it has more than sections", name);
}

// Returns 1 if a rank's times are less than nine years from the moment when its file was written.
// So differences of times, and sums of a few, do not overflow.
static int fsdpi_tr_is_time(const fsdpi_tr_header *h, int64_t begin, int64_t end) {
    const int64_t limit = (int64_t)1 << 58;
    return begin > h->clock_ns - limit && end >= begin && end < h->clock_ns + limit;
}

static int fsdpi_tr_is_clock(int64_t ns) {
    return ns > -((int64_t)1 << 61) && ns < (int64_t)1 << 61; // a time of day, until 2043
}

static int fsdpi_tr_is_bytes(int64_t bytes) { return bytes >= 0 && bytes < (int64_t)1 << 56; }

static int fsdpi_tr_is_record(const fsdpi_tr_rank *r, const fsdpi_tr_event *o) {
    uint64_t labels = r->num_labels;
    if (o->kind == FSDPI_TR_CALL) labels = FSDP_CALL_COUNT;
    else if (o->kind > FSDP_OP_HOOK && o->kind < FSDPI_TR_CALL) labels = r->num_pools;
    return o->kind < FSDPI_TR_KINDS && o->label < labels && o->stream < FSDP_STREAM_COUNT &&
           o->state < FSDP_STATE_COUNT && (o->what < r->num_names || o->what == FSDPI_TR_NO_NAME) &&
           o->bytes < (uint64_t)1 << 56 && fsdpi_tr_is_time(&r->head, o->begin_ns, o->end_ns);
}

static int fsdpi_tr_check(fsdpi_tr_rank *r, const char *name, const fsdpi_tr_why *why) {
    const fsdpi_tr_header *h = &r->head;
    if (fsdpi_tr_check_sections(r, name, why)) return -1;
    int good = h->rank >= 0 && h->rank < h->size && h->size <= 1 << 20 && r->num_text > 0 &&
               !r->text[r->num_text - 1] && memchr(h->job, 0, sizeof h->job) &&
               memchr(h->host, 0, sizeof h->host) && r->num_names >= r->num_units;
    if (!fsdpi_tr_is_clock(h->real_ns) || !fsdpi_tr_is_clock(h->clock_ns))
        return fsdpi_tr_refuse(why, "%s: a number in it is out of range", name);
    for (uint64_t i = 0; i < r->num_names; i++) good &= r->names[i] < r->num_text;
    for (uint64_t i = 0; i < r->num_labels; i++) good &= r->labels[i] < r->num_text;
    uint64_t params = 0;
    for (uint64_t i = 0; i < r->num_units; i++) {
        good &= r->units[i].num_params >= 0 && r->units[i].shards > 0 && r->units[i].replicas > 0;
        params += (uint64_t)(uint32_t)r->units[i].num_params;
        for (int k = 0; k < FSDP_POOL_COUNT; k++)
            good &= fsdpi_tr_is_bytes(r->units[i].slot_bytes[k]);
    }
    for (uint64_t i = 0; i < r->num_pools; i++) good &= fsdpi_tr_is_bytes(r->pools[i].bytes);
    for (uint64_t i = 0; i < r->num_kept; i++) good &= fsdpi_tr_is_bytes(r->kept[i].bytes);
    good &= params == r->num_params;
    for (uint64_t i = 0; i < r->num_params; i++)
        good &= r->params[i].ndim > 0 && r->params[i].ndim <= FSDP_MAX_DIMS;
    for (uint64_t i = 0; i < r->num_comms; i++)
        good &= r->comms[i].ranks <= r->num_ranks &&
                r->comms[i].size <= r->num_ranks - r->comms[i].ranks && r->comms[i].size > 0;
    for (uint64_t i = 0; i < r->num_meetings; i++)
        good &= fsdpi_tr_is_time(h, r->meetings[i].came_ns, r->meetings[i].left_ns);
    for (uint64_t i = 0; i < r->num_steps; i++)
        good &= fsdpi_tr_is_time(h, r->steps[i].begin_ns, r->steps[i].end_ns);
    for (uint64_t i = 0; i < r->num_records && good; i++)
        good &= fsdpi_tr_is_record(r, &r->records[i]);
    return good ? 0 : fsdpi_tr_refuse(why, "%s: a number in it is out of range", name);
}

// Opens a regular file: a pipe would block forever. Sets `size` to 0 for anything else.
static FILE *fsdpi_tr_open_file(const char *path, int64_t *size) {
    struct stat st;
    *size = 0;
    if (stat(path, &st) || !S_ISREG(st.st_mode)) return NULL;
    *size = (int64_t)st.st_size;
    return fopen(path, "rb");
}

// Reads the blocks of a file, without their sums.
static int fsdpi_tr_read_file(const char *path, const char *name, fsdpi_tr_rank *r,
                              const fsdpi_tr_why *why) {
    int64_t size, bad = 0;
    FILE *file = fsdpi_tr_open_file(path, &size);
    int error = errno;
    char *at = file && size ? (char *)calloc((size_t)size + sizeof r->head, 1) : NULL, *base = at;
    r->memory = base;
    if (!at) {
        if (file) error = ENOMEM, (void)fclose(file);
        if (!size) return fsdpi_tr_refuse(why, "%s: it is no file, or an empty one", name);
        return fsdpi_tr_refuse(why, "%s: %s", name, strerror(error));
    }
    int64_t left = size;
    for (uint64_t sum; left > 0 && !bad;) {
        size_t piece = left < FSDPI_TR_BLOCK ? (size_t)left : (size_t)FSDPI_TR_BLOCK;
        bad = piece <= sizeof sum || fread(at, piece, 1, file) != 1;
        if (bad) break;
        memcpy(&sum, at + piece - sizeof sum, sizeof sum);
        bad = sum != fsdpi_tr_sum(at, piece - sizeof sum);
        at += piece - sizeof sum, left -= (int64_t)piece;
    }
    (void)fclose(file);
    memcpy(&r->head, base, sizeof r->head);
    if (memcmp(r->head.magic, FSDPI_TR_MAGIC, sizeof r->head.magic) ||
        r->head.numbers != FSDPI_TR_NUMBERS)
        return fsdpi_tr_refuse(why, "%s: " FSDPI_TR_NOT_OURS, name);
    if (bad || r->head.bytes != (uint64_t)(at - base))
        return fsdpi_tr_refuse(why, "%s: it is damaged or cut, at byte %lld", name,
                               (long long)(size - left));
    return fsdpi_tr_check(r, name, why);
}

/* -------------------------------------------------------------------------------------------- */
// Clocks.

// Narrows low <= shift of `b` <= high by meetings k .. end, of which `a` is a member as well.
static void fsdpi_tr_bound(const fsdpi_tr_rank *a, const fsdpi_tr_rank *b, uint64_t k, uint64_t end,
                           int64_t bound[2]) {
    for (; k < end && k < a->num_meetings && k < b->num_meetings; k++) {
        int64_t low = a->meetings[k].came_ns - b->meetings[k].left_ns;
        int64_t high = a->meetings[k].left_ns - b->meetings[k].came_ns;
        if (bound[0] < low) bound[0] = low;
        if (bound[1] > high) bound[1] = high;
    }
}

/* Moves the times of a rank to the first rank's clock. Clocks drift by at most a thousandth: if
   two bounds that are far from exact imply more, that is an error. */
static int fsdpi_tr_shift(fsdpi_tr_rank *r, const fsdpi_tr_rank *first, const int64_t shift[2],
                          const fsdpi_tr_why *why) {
    const int64_t limit = (int64_t)1 << 58;
    for (int k = 0; k < 2; k++) {
        int64_t off = r->head.clock_ns + shift[k] - first->head.clock_ns;
        if (off <= -limit || off >= limit)
            return fsdpi_tr_refuse(why, "the traces of ranks %d and %d are years apart",
                                   first->head.rank, r->head.rank);
    }
    int64_t from = r->num_meetings ? r->meetings[0].came_ns : 0;
    int64_t to = r->num_meetings ? r->meetings[r->num_meetings - 1].left_ns : 0;
    double drift = to > from ? (double)(shift[1] - shift[0]) / (double)(to - from) : 0;
    double more = ((drift < 0 ? -drift : drift) - 1e-3) * (double)(to - from);
    if (more > 0 && more > 2.0 * (double)r->error_ns)
        return fsdpi_tr_refuse(why, "the clocks of ranks %d and %d do not go alike",
                               first->head.rank, r->head.rank);
    if (more > 0) drift = drift < 0 ? -1e-3 : 1e-3, r->error_ns += (int64_t)more;
#define FSDPI_TR_MOVE(t) (t) += shift[0] + (int64_t)(drift * (double)((t)-from))
    for (uint64_t i = 0; i < r->num_records; i++) {
        FSDPI_TR_MOVE(r->records[i].begin_ns);
        FSDPI_TR_MOVE(r->records[i].end_ns);
    }
    for (uint64_t i = 0; i < r->num_steps; i++) {
        FSDPI_TR_MOVE(r->steps[i].begin_ns);
        FSDPI_TR_MOVE(r->steps[i].end_ns);
    }
#undef FSDPI_TR_MOVE
    r->shift_ns = shift[0];
    return 0;
}

/* Finds the shift of rank j's clock, from the meetings of all ranks that have its clock with the
   first one that has the job's. Meetings at the beginning and at the end of the trace give a
   shift each; between them it is a line. */
static int fsdpi_tr_clock_of(const fsdpi_tr_job *job, int j, int force, int64_t shift[2],
                             const fsdpi_tr_why *why) {
    const int64_t limit = (int64_t)1 << 62;
    const fsdpi_tr_rank *r = &job->rank[j], *first = &job->rank[0];
    int64_t bound[2][2] = {{-limit, limit}, {-limit, limit}}, error = 0;
    for (int b = j; b < job->num; b++) {
        if (job->rank[b].head.clock != r->head.clock) continue;
        int a = 0;
        while (a < job->num && (job->rank[a].head.clock != first->head.clock ||
                                job->rank[a].head.mesh != job->rank[b].head.mesh))
            a++;
        if (a == job->num) continue;
        fsdpi_tr_bound(&job->rank[a], &job->rank[b], 0, FSDPI_TR_MEETINGS, bound[0]);
        fsdpi_tr_bound(&job->rank[a], &job->rank[b], FSDPI_TR_MEETINGS, UINT64_MAX, bound[1]);
    }
    int known = bound[0][0] > -limit;
    if (bound[1][0] == -limit) memcpy(bound[1], bound[0], sizeof bound[1]);
    for (int k = 0; k < 2 && known; k++) {
        int64_t middle = (int64_t)(((uint64_t)bound[k][1] - (uint64_t)bound[k][0] + 1) / 2);
        if (bound[k][1] < bound[k][0])
            return fsdpi_tr_refuse(why, "the clocks of ranks %d and %d contradict each other",
                                   first->head.rank, r->head.rank);
        shift[k] = bound[k][0] + middle;
        if (error < middle) error = middle;
    }
    job->rank[j].error_ns = known ? error : -1;
    if (known) return 0;
    shift[0] = shift[1] = r->head.real_ns - r->head.clock_ns -
                          (first->head.real_ns - first->head.clock_ns);
    if (force) return 0;
    return fsdpi_tr_refuse(why,
                           "the clocks of ranks %d and %d were not compared: --force takes "
                           "the hosts' time of day",
                           first->head.rank, r->head.rank);
}

static int fsdpi_tr_clocks(fsdpi_tr_job *job, int force, const fsdpi_tr_why *why) {
    int64_t(*shift)[2] = (int64_t(*)[2])calloc((size_t)job->num, sizeof *shift);
    int status = shift ? 0 : fsdpi_tr_refuse(why, "there is no memory");
    for (int j = 1, i; j < job->num && !status; j++) {
        for (i = 0; job->rank[i].head.clock != job->rank[j].head.clock;) i++;
        if (i == j) status = fsdpi_tr_clock_of(job, j, force, shift[j], why);
        else memcpy(shift[j], shift[i], sizeof *shift);
        if (i != j) job->rank[j].error_ns = job->rank[i].error_ns;
    }
    for (int j = 1; j < job->num && !status; j++)
        status = fsdpi_tr_shift(&job->rank[j], &job->rank[0], shift[j], why);
    free(shift);
    return status;
}

/* -------------------------------------------------------------------------------------------- */
// Collectives on all ranks.

typedef struct fsdpi_tr_meets { // a collective on a rank
    uint64_t group;             // hash of its number and members
    uint32_t turn, size;
    int32_t rank; // index in the job
    uint64_t record;
} fsdpi_tr_meets;

static int fsdpi_tr_by_time(const void *a, const void *b) {
    const fsdpi_tr_event *x = (const fsdpi_tr_event *)a, *y = (const fsdpi_tr_event *)b;
    if (x->begin_ns != y->begin_ns) return x->begin_ns < y->begin_ns ? -1 : 1;
    if (x->end_ns != y->end_ns) return x->end_ns > y->end_ns ? -1 : 1;
    if (x->seq != y->seq) return (int32_t)(x->seq - y->seq) < 0 ? -1 : 1;
    return x->kind - y->kind; // a slot held before the trace is acquired before it is released
}

static int fsdpi_tr_by_group(const void *a, const void *b) {
    const fsdpi_tr_meets *x = (const fsdpi_tr_meets *)a, *y = (const fsdpi_tr_meets *)b;
    if (x->group != y->group) return x->group < y->group ? -1 : 1;
    if (x->turn != y->turn) return x->turn < y->turn ? -1 : 1;
    return x->rank < y->rank ? -1 : x->rank != y->rank;
}

static int fsdpi_tr_is_collective(const fsdpi_tr_event *o) {
    return o->kind >= FSDP_OP_ALL_GATHER && o->kind <= FSDP_OP_ALL_TO_ALL && o->comm;
}

// Numbers the operations of each group on a rank. Returns their number. Operations of a group do
// not overlap.
static uint64_t fsdpi_tr_list(const fsdpi_tr_job *job, int rank, fsdpi_tr_meets *out) {
    const fsdpi_tr_rank *r = &job->rank[rank];
    uint64_t num = 0;
    for (uint64_t c = 0; c < r->num_comms; c++) {
        const fsdpi_tr_comm *comm = &r->comms[c];
        fsdpi_tr_meets m = {comm->number, 0, comm->size, rank, 0};
        for (uint32_t k = 0; k < comm->size; k++)
            m.group = (m.group ^ (uint64_t)(uint32_t)r->ranks[comm->ranks + k]) *
                      0x9E3779B97F4A7C15u;
        for (m.record = 0; m.record < r->num_records; m.record++) {
            const fsdpi_tr_event *o = &r->records[m.record];
            if (!fsdpi_tr_is_collective(o) || o->comm != comm->number) continue;
            m.turn++;
            out[num++] = m;
        }
    }
    return num;
}

// Returns 1 if two members run the same collective, as far as names show.
static int fsdpi_tr_alike(const fsdpi_tr_job *job, const fsdpi_tr_meets *x,
                          const fsdpi_tr_meets *y) {
    const fsdpi_tr_rank *a = &job->rank[x->rank], *b = &job->rank[y->rank];
    const fsdpi_tr_event *o = &a->records[x->record], *p = &b->records[y->record];
    return x->group == y->group && x->turn == y->turn && o->kind == p->kind &&
           !strcmp(fsdpi_tr_name(a, o->what),
                   fsdpi_tr_name(b, p->what));
}

static int fsdpi_tr_match(fsdpi_tr_job *job, const fsdpi_tr_why *why) {
    uint64_t num = 0, room = 0, end;
    for (int k = 0; k < job->num; k++) {
        fsdpi_tr_rank *r = &job->rank[k];
        qsort(r->records, r->num_records, sizeof *r->records, fsdpi_tr_by_time);
        r->peers_ns = (int64_t *)calloc(r->num_records + 1, sizeof *r->peers_ns);
        r->last = (int32_t *)malloc((r->num_records + 1) * sizeof *r->last);
        if (!r->peers_ns || !r->last) return fsdpi_tr_refuse(why, "there is no memory");
        for (uint64_t i = 0; i < r->num_records; i++) {
            r->last[i] = -1;
            if (fsdpi_tr_is_collective(&r->records[i])) room++;
        }
    }
    fsdpi_tr_meets *all = (fsdpi_tr_meets *)calloc(room + 1, sizeof *all);
    if (!all) return fsdpi_tr_refuse(why, "there is no memory");
    for (int k = 0; k < job->num; k++) num += fsdpi_tr_list(job, k, all + num);
    qsort(all, num, sizeof *all, fsdpi_tr_by_group);
    for (uint64_t at = 0; at < num; at = end) {
        int64_t came = INT64_MIN;
        int32_t last = -1;
        for (end = at; end < num && fsdpi_tr_alike(job, &all[at], &all[end]); end++) {
            const fsdpi_tr_rank *r = &job->rank[all[end].rank];
            if (r->records[all[end].record].begin_ns <= came) continue;
            came = r->records[all[end].record].begin_ns, last = r->head.rank;
        }
        for (uint64_t i = at; i < end && end - at == all[at].size; i++) {
            job->rank[all[i].rank].peers_ns[all[i].record] = came;
            job->rank[all[i].rank].last[all[i].record] = last;
        }
    }
    free(all);
    return 0;
}

/* -------------------------------------------------------------------------------------------- */
// A job.

static void fsdpi_tr_free(fsdpi_tr_job *job) {
    for (int k = 0; k < job->num; k++) {
        free(job->rank[k].memory), free(job->rank[k].peers_ns), free(job->rank[k].last);
    }
    free(job->rank);
    job->rank = NULL, job->num = 0;
}

// The header of a file that is named JOB.RANK and an ending.
typedef struct fsdpi_tr_label {
    char job[128];
    int32_t rank, size;
    int64_t real_ns;     // when it was begun or written
    uint64_t id, own_id; // fsdp_world_id, 0: not all ranks have joined; this rank's summand of it
} fsdpi_tr_label;

// The files of one run of a job: their labels, sorted by rank. other: another job with files in the
// directory, or "".
typedef struct fsdpi_tr_files {
    fsdpi_tr_label *list;
    int32_t num;
    char other[128];
} fsdpi_tr_files;

static void fsdpi_tr_path(char *out, size_t cap, const char *dir, const char *job, int rank,
                          const char *end) {
    const int at = (int)strlen(dir) + 1, used = snprintf(out, cap, "%s/%s", dir, job);
    for (int i = at; i < used && (size_t)i < cap; i++)
        if (out[i] == '/' || out[i] == ':') out[i] = '-';
    if ((size_t)used < cap) snprintf(out + used, cap - (size_t)used, ".%d%s", rank, end);
}

// Adds two lines: a file that is left out, and the reason.
static void fsdpi_tr_note(fsdpi_tr_notes *n, const char *name, const char *reason) {
    const size_t used = strlen(n->text);
    if (n->num++ < FSDPI_TR_NOTES)
        (void)snprintf(n->text + used, sizeof n->text - used, "%s:\n    %s\n", name, reason);
}

static int fsdpi_tr_by_run(const void *a, const void *b) {
    const fsdpi_tr_label *x = (const fsdpi_tr_label *)a, *y = (const fsdpi_tr_label *)b;
    if (x->id != y->id) return x->id < y->id ? -1 : 1;
    return x->size != y->size ? x->size - y->size : x->rank - y->rank;
}
static int fsdpi_tr_by_rank(const void *a, const void *b) {
    return ((const fsdpi_tr_label *)a)->rank - ((const fsdpi_tr_label *)b)->rank;
}

/* Chooses one run among files of one job, and moves its files to the front. Returns their
   number. A run gets an id when all its ranks have made their files. So a run without an id is
   later than any other whose files are incomplete. But a rank may not have noted the id yet: in
   that case the sum of all summands is the id. Of two runs with an id the more complete one
   wins, then the later one. Clocks of hosts differ, so they count last. */
static int32_t fsdpi_tr_choose_run(fsdpi_tr_label *list, int32_t num) {
    int32_t best = 0, most = 0, begun = 0;
    int64_t best_ns = 0;
    uint64_t sum = 0;
    qsort(list, (size_t)num, sizeof *list, fsdpi_tr_by_run);
    while (begun < num && !list[begun].id) begun++;
    for (int32_t at = begun, end; at < num; at = end) {
        int64_t latest = 0;
        for (end = at; end < num && list[end].id == list[at].id && list[end].size == list[at].size;)
            if (list[end++].real_ns > latest) latest = list[end - 1].real_ns;
        const int64_t mine = (int64_t)(end - at) * (most ? list[best].size : 1);
        const int64_t others = (int64_t)most * list[at].size;
        if (most && (mine < others || (mine == others && latest <= best_ns))) continue;
        best = at, most = end - at, best_ns = latest;
    }
    for (int32_t i = 0; i < begun; i++) sum += list[i].own_id;
    for (int32_t i = 0; i < most; i++) sum += list[best + i].own_id;
    if (most && most == list[best].size) begun = 0; // the remains of an earlier run
    else if (begun && (!most || begun + most != list[best].size || sum != list[best].id))
        return begun;
    for (int32_t i = 0; i < most; i++) {
        const fsdpi_tr_label was = list[begun + i];
        list[begun + i] = list[best + i], list[best + i] = was;
    }
    return begun + most;
}

/* Finds the files of a run of job `wanted`, or (NULL) of the job with the latest files. read:
   returns 0 if the bytes are no header. Returns 1; 0: no such file; -1: no directory, or no
   memory. If not 1, `why` may hold the reason. The caller frees out->list in any case. */
static int fsdpi_tr_choose(const char *dir, const char *end, const char *wanted,
                           int (*read)(const void *bytes, fsdpi_tr_label *out), fsdpi_tr_files *out,
                           fsdpi_tr_notes *notes, const fsdpi_tr_why *why) {
    char path[4096], named[4096];
    DIR *opened = opendir(dir);
    int32_t num = 0, kept = 0;
    const fsdpi_tr_label *last = NULL, *other = NULL;
    memset(out, 0, sizeof *out);
    if (!opened) return fsdpi_tr_refuse(why, "%s", strerror(errno));
    for (const struct dirent *e; (e = readdir(opened)) != NULL;) {
        uint64_t bytes[512] = {0};
        fsdpi_tr_label label;
        int64_t size;
        const char *dot = strrchr(e->d_name, '.');
        if (!dot || strcmp(dot, end)) continue;
        snprintf(path, sizeof path, "%s/%s", dir, e->d_name);
        memset(&label, 0, sizeof label);
        FILE *file = fsdpi_tr_open_file(path, &size);
        const int good = file && fread(bytes, 1, sizeof bytes, file) > 0 && read(bytes, &label);
        if (file) (void)fclose(file);
        if (good) fsdpi_tr_path(named, sizeof named, dir, label.job, label.rank, end);
        if (!good || strcmp(named, path)) {
            (void)fsdpi_tr_refuse(why, "%s: " FSDPI_TR_NOT_OURS, e->d_name);
            fsdpi_tr_note(notes, e->d_name, FSDPI_TR_NOT_OURS);
            continue;
        }
        if (!(num & (num - 1))) { // there is room for a power of two
            void *more = realloc(out->list, (size_t)(num ? 2 * num : 1) * sizeof *out->list);
            if (!more) (void)closedir(opened);
            if (!more) return fsdpi_tr_refuse(why, "there is no memory");
            out->list = (fsdpi_tr_label *)more;
        }
        out->list[num++] = label;
    }
    (void)closedir(opened);
    for (int32_t i = 0; i < num; i++) {
        const fsdpi_tr_label *x = &out->list[i];
        const int is_wanted = !wanted || !strcmp(x->job, wanted);
        if (is_wanted && (!last || x->real_ns >= last->real_ns)) last = x;
    }
    for (int32_t i = 0; i < num && last; i++)
        if (strcmp(out->list[i].job, last->job) &&
            (!other || out->list[i].real_ns >= other->real_ns))
            other = &out->list[i];
    if (!last) return 0;
    if (other) memcpy(out->other, other->job, sizeof out->other);
    const fsdpi_tr_label job = *last;
    for (int32_t i = 0; i < num; i++)
        if (!strcmp(out->list[i].job, job.job)) out->list[kept++] = out->list[i];
    out->num = fsdpi_tr_choose_run(out->list, kept);
    for (int32_t i = out->num; i < kept; i++) {
        fsdpi_tr_path(path, sizeof path, dir, job.job, out->list[i].rank, end);
        fsdpi_tr_note(notes, strrchr(path, '/') + 1, "it is of another run of the job");
    }
    qsort(out->list, (size_t)out->num, sizeof *out->list, fsdpi_tr_by_rank);
    if (why->cap) why->text[0] = 0;
    return 1;
}

static int fsdpi_tr_read_label(const void *bytes, fsdpi_tr_label *out) {
    fsdpi_tr_header head;
    memcpy(&head, bytes, sizeof head);
    head.job[sizeof head.job - 1] = 0;
    snprintf(out->job, sizeof out->job, "%s", head.job);
    out->rank = head.rank, out->size = head.size, out->real_ns = head.real_ns, out->id = head.id;
    return !memcmp(head.magic, FSDPI_TR_MAGIC, sizeof head.magic) && head.size > 0 &&
           head.size <= 1 << 20;
}

// Reads the files of a run. A file that cannot be read is left out and noted.
static int fsdpi_tr_read_files(const char *dir, const fsdpi_tr_files *files, fsdpi_tr_job *out,
                               const fsdpi_tr_why *why) {
    char path[4096], text[512];
    out->rank = (fsdpi_tr_rank *)calloc((size_t)files->num, sizeof *out->rank);
    if (!out->rank) return fsdpi_tr_refuse(why, "there is no memory");
    for (int32_t i = 0; i < files->num; i++) {
        const fsdpi_tr_label *label = &files->list[i];
        const fsdpi_tr_why reason = {text, sizeof text};
        fsdpi_tr_rank *r = &out->rank[out->num];
        text[0] = 0;
        memset(r, 0, sizeof *r);
        fsdpi_tr_path(path, sizeof path, dir, label->job, label->rank, ".trace");
        const char *name = strrchr(path, '/') + 1;
        int status = fsdpi_tr_read_file(path, name, r, &reason);
        if (!status && (r->head.rank != label->rank || r->head.size != label->size ||
                        r->head.id != label->id)) // the file has been replaced
            status = fsdpi_tr_refuse(&reason, "%s: it is of rank %d of %d", name, r->head.rank,
                                     r->head.size);
        if (!status) out->num++;
        else {
            free(r->memory);
            fsdpi_tr_note(&out->notes, name, text + strlen(name) + 2);
            (void)fsdpi_tr_refuse(why, "%s", text);
        }
    }
    if (out->num && why->cap) why->text[0] = 0;
    return out->num ? 0 : -1;
}

// Finds and reads the files of the job in a directory.
static int fsdpi_tr_find(const char *dir, const char *wanted, fsdpi_tr_job *out,
                         const fsdpi_tr_why *why) {
    fsdpi_tr_files files;
    int status = -1;
    if (fsdpi_tr_choose(dir, ".trace", wanted, fsdpi_tr_read_label, &files, &out->notes, why) > 0) {
        memcpy(out->job, files.list[0].job, sizeof out->job);
        memcpy(out->other, files.other, sizeof out->other);
        out->size = files.list[0].size;
        status = fsdpi_tr_read_files(dir, &files, out, why);
    } else
        (void)fsdpi_tr_refuse(why,
                              "there are no traces (*.trace)%s%s: run the job with "
                              "FSDP_TRACE=DIR; it records steps 3 to 5, or those of "
                              "FSDP_TRACE_STEPS=FIRST:LAST",
                              wanted ? " of job " : "", wanted ? wanted : "");
    free(files.list);
    return status;
}

/* Reads the files of a job. job NULL: of the one written last. force: even if clocks were not
   compared. Returns 0, or -1 with the reason in `why`. */
static int fsdpi_tr_read(const char *dir, const char *job, int force, fsdpi_tr_job *out, char *why,
                         size_t cap) {
    const fsdpi_tr_why reason = {why, cap};
    memset(out, 0, sizeof *out);
    if (cap) why[0] = 0;
    int status = fsdpi_tr_find(dir, job, out, &reason);
    if (!status) status = fsdpi_tr_clocks(out, force, &reason);
    if (!status) status = fsdpi_tr_match(out, &reason);
    if (status) fsdpi_tr_free(out);
    return status;
}

#endif // FSDPI_TRACE_READ_H
