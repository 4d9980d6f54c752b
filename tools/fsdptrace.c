/* fsdptrace.c - shows which ranks of a job wait for which, and where the time of a step went

       cc -O2 -o fsdptrace tools/fsdptrace.c -pthread -lm
       ./fsdptrace hang DIR
       ./fsdptrace why DIR
       ./fsdptrace json DIR -o trace.json

   `hang` reads the flight records that FSDP_FLIGHT_RECORD=DIR has left: of a job that runs, hangs,
   has failed or was killed. docs/observability.md explains what it prints. Linux.

   SPDX-License-Identifier: MIT */
#define _GNU_SOURCE
#define FSDP_IMPLEMENTATION
#define FSDP_STATIC
#define FSDP_NO_BACKEND
#define FSDP_BACKEND_FAKE
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wunused-function" // a tool uses a part of the library
#include "../fsdp_trace.h"
#include "fsdptrace_helps.h"
#include "fsdptrace_json.h"
#include "put_safe.h"
#pragma GCC diagnostic pop
#include <dirent.h>
#include <limits.h> // PATH_MAX
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

enum { EXIT_WAITS = 1, EXIT_UNREADABLE = 2 };
enum { MOST_RANKS = 1 << 20, LINES = 12, PENDING = 4, TURNS = 64 };

static int fail(const char *what, const char *why) {
    fputs("fsdptrace: ", stderr);
    put_safe(stderr, what);
    fprintf(stderr, ": %s\n", why);
    return EXIT_UNREADABLE;
}
static void *room(size_t bytes) { // zero-filled; a tool ends without it
    void *at = calloc(1, bytes ? bytes : 1);
    if (!at) exit(fail("no memory", strerror(errno)));
    return at;
}

// Returns the list of `num` elements with room for one more. Its room is a power of two.
static void *grow(void *list, int num, size_t size) {
    if (num & (num - 1)) return list;
    list = realloc(list, (size_t)(num ? 2 * num : 1) * size);
    if (!list) exit(fail("no memory", strerror(errno)));
    return list;
}

/* ---- ranks as text --------------------------------------------------------------------------- */

typedef struct set { // ranks, in ascending order
    int *ranks, num;
} set;

static void add(set *s, int rank) {
    if (s->num && s->ranks[s->num - 1] == rank) return;
    s->ranks = (int *)grow(s->ranks, s->num, sizeof *s->ranks);
    s->ranks[s->num++] = rank;
}

// Prints a set of ranks: "0-2, 4-7", "0-4088 in steps of 8".
static const char *ranges(const set *s, char *out, size_t cap) {
    fsdpi_text t = {out, cap, 0};
    int said = 0;
    *out = 0;
    for (int i = 0, next; i < s->num; i = next) {
        int by = i + 1 < s->num ? s->ranks[i + 1] - s->ranks[i] : 1;
        for (next = i + 1; next < s->num && s->ranks[next] - s->ranks[next - 1] == by;) next++;
        if (by > 1 && next - i < 4) next = i + 1;
        if (said == 8 && next < s->num) {
            fsdpi_text_add(&t, " and %d more", s->num - i);
            break;
        }
        fsdpi_text_add(&t, "%s%d", said++ ? ", " : "", s->ranks[i]);
        if (next - i > 1)
            fsdpi_text_add(&t, "%s%d", next - i == 2 ? ", " : "-", s->ranks[next - 1]);
        if (next - i > 2 && by > 1) fsdpi_text_add(&t, " in steps of %d", by);
    }
    return out;
}

/* ---- files ----------------------------------------------------------------------------------- */

// A process. ELSEWHERE: on another host. HIDDEN: on this one, in another PID namespace.
enum { RUNS, STOPPED, ENDED, ELSEWHERE, HIDDEN, PROCESSES };

// CLOCK_MONOTONIC of some ranks. It + shift is the job's clock, if that is known.
typedef struct mono {
    uint64_t id;
    int64_t shift, low, high; // low <= shift <= high, by the collectives of its ranks
    int is_known;
} mono;

typedef struct record {
    const fsdpi_flight_record *f;
    int64_t last_ns; // the last sign of life, on the world's clock
    int process, num;
    int clock;                   // its place in job.clocks
    fsdpi_flight_op op[PENDING]; // that have not ended, the oldest first
    int group[FSDPI_FLIGHT_COMMS];
} record;

typedef struct group {
    uint64_t members;
    int32_t number, size, first, stride;
    uint32_t ended, least, most; // the last operation that has ended on a rank; that all, one have
                                 // begun
    char name[FSDPI_FLIGHT_NAME];
} group;

static struct {
    record *of; // [size]; f NULL: there is no file
    int size, num_groups, num_clocks;
    group *groups;
    mono *clocks;
    int64_t now;   // on the job's clock: now, or the last sign of life of all ranks
    int64_t real;  // the same on CLOCK_REALTIME of the rank that gave that sign
    int is_over;   // no process of the job runs here any more
    int elsewhere; // records of processes of which it is not known whether they run
    int lacks;     // a member has not come to an operation that others have begun
    char job[128], other[128], backend[16]; // other: of which the directory has files, too
} job;

// Finds the next entry that was whole when the file was read. Returns 0 if there is none.
static int next(const record *r, uint32_t *i, fsdpi_flight_op *out) {
    while (r->f && *i < FSDPI_FLIGHT_OPS) {
        *out = r->f->op[(*i)++];
        if (out->number && (out->number - 1) % FSDPI_FLIGHT_OPS == *i - 1 &&
            out->comm < FSDPI_FLIGHT_COMMS)
            return 1;
    }
    return 0;
}

// Returns the state of a record's process. Another process may have got its number.
static int process_of(const fsdpi_flight_record *f) {
    char host[sizeof f->host] = "", state = 0;
    (void)gethostname(host, sizeof host - 1);
    if (strcmp(host, f->host) || f->boot != fsdpi_boot_id()) return ELSEWHERE;
    if (f->pids != fsdpi_namespace("pid")) return HIDDEN;
    if (fsdpi_process_began(f->pid, &state) != f->pid_began) return ENDED;
    return strchr("ZXx", state) ? ENDED : strchr("Tt", state) ? STOPPED : RUNS;
}

static int is_time(int64_t ns) { return ns > 0 && ns < (int64_t)1 << 61; }

static void latest(record *r, int64_t ns) {
    if (is_time(ns) && ns > r->last_ns) r->last_ns = ns;
}

// Sums wrap: numbers in a file may be anything.
static int64_t plus(int64_t a, int64_t b) { return (int64_t)((uint64_t)a + (uint64_t)b); }
static int64_t minus(int64_t a, int64_t b) { return (int64_t)((uint64_t)a - (uint64_t)b); }

// Returns a time of a rank on CLOCK_MONOTONIC of its system, and on the job's clock.
static int64_t mono_of(const record *r, int64_t ns) {
    return plus(ns, minus(r->f->mono_ns, r->f->opened_ns));
}
static int64_t time_of(const record *r, int64_t ns) {
    return plus(mono_of(r, ns), job.clocks[r->clock].shift);
}
static int is_known(const record *r) { return job.clocks[r->clock].is_known; }

/* Returns 1 if the operation has not ended. A backend on streams notes an end some time later, or
   not at all if the process is killed. So on streams an operation that has ended on another rank
   has ended on this one, too. And if members have not come to some operations, the others wait only
   in these: an operation that all members have begun ends. */
static int is_pending(const record *r, const fsdpi_flight_op *o) {
    const group *g = r->group[o->comm] ? &job.groups[r->group[o->comm] - 1] : NULL;
    if (o->end_ns || r->f->state == FSDPI_FLIGHT_SHUT_DOWN) return 0;
    if (!o->on_stream || !g || !o->turn) return 1;
    return o->turn > g->ended && (!job.lacks || o->turn > g->least);
}

static int is_lacking(const record *r) {
    fsdpi_flight_op o;
    for (uint32_t i = 0; next(r, &i, &o);)
        if (r->group[o.comm] && o.turn && is_pending(r, &o) &&
            o.turn > job.groups[r->group[o.comm] - 1].least)
            return 1;
    return 0;
}

// Keeps the oldest ones.
static void find_pending(record *r) {
    fsdpi_flight_op o;
    for (uint32_t i = 0; next(r, &i, &o);) {
        if (!is_pending(r, &o)) continue;
        int at = r->num < PENDING ? r->num : PENDING - 1;
        if (r->num == PENDING && r->op[at].begin_ns <= o.begin_ns) continue;
        for (; at > 0 && r->op[at - 1].begin_ns > o.begin_ns; at--) r->op[at] = r->op[at - 1];
        r->op[at] = o;
        r->num += r->num < PENDING;
    }
}

// Returns a copy of a file, or NULL and *why. Missing bytes at the end count as zeros. All texts in
// it end, even in a damaged file.
static const fsdpi_flight_record *load(const char *path, const char **why) {
    fsdpi_flight_record *f = (fsdpi_flight_record *)room(sizeof *f);
    int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    ssize_t got = fd < 0 ? -1 : pread(fd, f, sizeof *f, 0);
    *why = got < 0 ? strerror(errno) : FSDPI_TR_NOT_OURS;
    if (fd >= 0) (void)close(fd);
    const int64_t far = (int64_t)1 << 61; // so that sums of times do not overflow
    if (got <= (ssize_t)offsetof(fsdpi_flight_record, comm) ||
        memcmp(f->magic, FSDPI_FLIGHT_MAGIC, sizeof f->magic) || f->bytes != sizeof *f ||
        f->rank < 0 || f->rank >= f->size || f->size > MOST_RANKS || f->real_ns < 0 ||
        f->real_ns > far || f->opened_ns < 0 || f->opened_ns > far || f->mono_ns < 0 ||
        f->mono_ns > far) {
        free(f);
        return NULL;
    }
    f->host[sizeof f->host - 1] = f->job[sizeof f->job - 1] = 0;
    f->backend[sizeof f->backend - 1] = f->failure[sizeof f->failure - 1] = 0;
    f->call_what[sizeof f->call_what - 1] = 0;
    for (int i = 0; i < FSDPI_FLIGHT_OPS; i++) f->op[i].what[sizeof f->op[i].what - 1] = 0;
    for (int i = 0; i < FSDPI_FLIGHT_COMMS; i++) f->comm[i].name[sizeof f->comm[i].name - 1] = 0;
    if (f->num_comms > FSDPI_FLIGHT_COMMS) f->num_comms = FSDPI_FLIGHT_COMMS;
    return f;
}

static int group_of(const fsdpi_flight_comm *c) {
    for (int i = 0; i < job.num_groups; i++)
        if (job.groups[i].members == c->members && job.groups[i].number == c->number) return i;
    job.groups = (group *)grow(job.groups, job.num_groups, sizeof *job.groups);
    group *g = &job.groups[job.num_groups];
    memset(g, 0, sizeof *g);
    g->members = c->members, g->number = c->number, g->size = c->size;
    g->first = c->first, g->stride = c->stride;
    g->least = UINT32_MAX;
    snprintf(g->name, sizeof g->name, "%s", c->name);
    return job.num_groups++;
}

static int read_label(const void *bytes, fsdpi_tr_label *out) {
    const fsdpi_flight_record *f = (const fsdpi_flight_record *)bytes;
    snprintf(out->job, sizeof out->job, "%.*s", (int)sizeof f->job - 1, *f->job ? f->job : "job");
    out->rank = f->rank, out->size = f->size, out->real_ns = f->real_ns;
    out->id = f->id, out->own_id = f->own_id;
    return !memcmp(f->magic, FSDPI_FLIGHT_MAGIC, sizeof f->magic) && f->size > 0 &&
           f->size <= MOST_RANKS;
}

// Names the files that are left out.
static void put_notes(const fsdpi_tr_notes *notes) {
    char text[16384] = "";
    fsdpi_why_text t = {text, sizeof text, 0, 0, 0, 0, 0};
    if (notes->num) fsdpi_why_say(&t, "fsdptrace: left out:\n%s", notes->text);
    if (notes->num > FSDPI_TR_NOTES)
        fsdpi_why_say(&t, "and %d more\n", (int)notes->num - FSDPI_TR_NOTES);
    fputs(text, stderr);
}

// Reads the records of the job in DIR that began last, or of the one that is named.
static int read_all(const char *dir, const char *wanted) {
    fsdpi_tr_files files;
    fsdpi_tr_notes notes = {"", 0};
    char text[512] = "", path[PATH_MAX];
    const fsdpi_tr_why reason = {text, sizeof text};
    if (fsdpi_tr_choose(dir, ".flight", wanted, read_label, &files, &notes, &reason) <= 0)
        return fail(dir, *text ? text : "there is no flight record: set FSDP_FLIGHT_RECORD=DIR");
    put_notes(&notes);
    const fsdpi_tr_label *label = files.list;
    job.size = label->size;
    job.of = (record *)room((size_t)job.size * sizeof *job.of);
    memcpy(job.job, label->job, sizeof job.job);
    memcpy(job.other, files.other, sizeof job.other);
    for (; label < files.list + files.num; label++) {
        const char *why;
        fsdpi_tr_path(path, sizeof path, dir, label->job, label->rank, ".flight");
        const fsdpi_flight_record *f = load(path, &why);
        if (!f) (void)fail(path, why);
        if (!f || f->rank != label->rank || f->size != job.size) continue;
        snprintf(job.backend, sizeof job.backend, "%s", f->backend);
        job.of[label->rank].f = f;
    }
    free(files.list);
    return 0;
}

static int clock_of(uint64_t id) {
    for (int i = 0; i < job.num_clocks; i++)
        if (job.clocks[i].id == id) return i;
    job.clocks = (mono *)grow(job.clocks, job.num_clocks, sizeof *job.clocks);
    memset(&job.clocks[job.num_clocks], 0, sizeof *job.clocks);
    job.clocks[job.num_clocks].id = id;
    return job.num_clocks++;
}

// Collects the groups, how far each has come, and the processes.
static void find_groups(void) {
    job.is_over = 1;
    for (int k = 0; k < job.size; k++) {
        record *r = &job.of[k];
        if (!r->f) continue;
        r->clock = clock_of(r->f->clock);
        r->process = process_of(r->f);
        latest(r, r->f->opened_ns);
        latest(r, r->f->call_ns);
        latest(r, r->f->ended_ns);
        for (uint32_t c = 1; c < r->f->num_comms && c < FSDPI_FLIGHT_COMMS; c++) {
            r->group[c] = 1 + group_of(&r->f->comm[c]);
            group *g = &job.groups[r->group[c] - 1];
            if (r->f->comm[c].turns < g->least) g->least = r->f->comm[c].turns;
            if (r->f->comm[c].turns > g->most) g->most = r->f->comm[c].turns;
        }
        fsdpi_flight_op o;
        for (uint32_t i = 0; next(r, &i, &o);) {
            latest(r, o.begin_ns);
            latest(r, o.end_ns);
            group *g = r->group[o.comm] ? &job.groups[r->group[o.comm] - 1] : NULL;
            if (g && o.end_ns && o.turn > g->ended) g->ended = o.turn;
        }
        const int is_open = r->f->state == FSDPI_FLIGHT_RUNS;
        if (r->process == RUNS || r->process == STOPPED) job.is_over = 0;
        if (r->process == HIDDEN && is_open) job.is_over = 0; // perhaps it runs
        job.elsewhere += r->process == ELSEWHERE && is_open;
    }
    int lacks = 0;
    for (int k = 0; k < job.size && !lacks; k++) lacks = is_lacking(&job.of[k]);
    job.lacks = lacks;
    for (int k = 0; k < job.size; k++) find_pending(&job.of[k]);
}

/* ---- clocks ---------------------------------------------------------------------------------- */

typedef struct meeting { // times of one of a group's last TURNS collectives, on the job's clock
    uint32_t turn;
    int64_t came, left; // when the last member came and the first one left; only known clocks
} meeting;

// Returns 1 for an operation that no member leaves before the last one has come.
static int is_meeting(const record *r, const fsdpi_flight_op *o) {
    const int g = r->group[o->comm];
    return o->kind >= FSDP_OP_ALL_GATHER && o->kind <= FSDP_OP_ALL_TO_ALL &&
           o->kind != FSDP_OP_BROADCAST && g && o->turn && o->turn <= job.groups[g - 1].most &&
           job.groups[g - 1].most - o->turn < TURNS && is_time(o->begin_ns);
}

// Sets the times of meetings from ranks with a known clock, or bounds the clocks of the other ranks
// by the times of meetings.
static void compare_clocks(meeting *all, int tell) {
    fsdpi_flight_op o;
    for (int k = 0; k < job.size; k++) {
        const record *r = &job.of[k];
        mono *c = &job.clocks[r->clock];
        for (uint32_t i = 0; r->f && is_known(r) == tell && next(r, &i, &o);) {
            if (!is_meeting(r, &o)) continue;
            meeting *m = &all[(size_t)(r->group[o.comm] - 1) * TURNS + o.turn % TURNS];
            const int has_left = is_time(o.end_ns);
            const int64_t came = mono_of(r, o.begin_ns), left = mono_of(r, o.end_ns);
            if (tell && m->turn != o.turn)
                m->turn = o.turn, m->came = INT64_MIN, m->left = INT64_MAX;
            if (m->turn != o.turn) continue;
            if (tell && plus(came, c->shift) > m->came) m->came = plus(came, c->shift);
            if (tell && has_left && plus(left, c->shift) < m->left) m->left = plus(left, c->shift);
            if (!tell && has_left && minus(m->came, left) > c->low) c->low = minus(m->came, left);
            if (!tell && m->left < INT64_MAX && minus(m->left, came) < c->high)
                c->high = minus(m->left, came);
        }
    }
}

/* Brings all clocks to that of this process, or, if no rank has it, to that of the first rank.
   Clocks of hosts and of time namespaces differ; collectives in which their ranks have met bound
   the difference from both sides. A clock without a meeting stays unknown. */
static void find_clocks(void) {
    const int64_t far = (int64_t)1 << 62;
    const record *first = NULL, *seen = NULL;
    for (int k = job.size - 1; k >= 0; k--) {
        const record *r = &job.of[k];
        if (!r->f) continue;
        if (!first || first->f->clock != fsdpi_system_clock_id() ||
            r->f->clock == fsdpi_system_clock_id())
            first = r;
        if (r->process == RUNS || r->process == STOPPED) seen = r;
    }
    if (!first) return;
    if (first->f->clock != fsdpi_system_clock_id() && seen) first = seen;
    job.clocks[first->clock].is_known = 1;
    meeting *all = NULL;
    if (job.num_clocks > 1) all = (meeting *)room((size_t)job.num_groups * TURNS * sizeof *all);
    for (int found = all != NULL; found;) {
        compare_clocks(all, 1);
        found = 0;
        for (int i = 0; i < job.num_clocks; i++) job.clocks[i].low = -far, job.clocks[i].high = far;
        compare_clocks(all, 0);
        for (int i = 0; i < job.num_clocks; i++) {
            mono *c = &job.clocks[i];
            if (c->is_known || c->low == -far || c->high == far) continue;
            c->shift = plus(c->low, minus(c->high, c->low) / 2);
            c->is_known = found = 1;
        }
    }
    free(all);
    job.now = INT64_MIN;
    for (int k = 0; k < job.size; k++) {
        const record *r = &job.of[k];
        if (!r->f || !is_known(r) || time_of(r, r->last_ns) <= job.now) continue;
        job.now = time_of(r, r->last_ns);
        job.real = plus(r->f->real_ns, minus(r->last_ns, r->f->opened_ns));
    }
    if (job.is_over) return;
    job.now = fsdpi_system_ns(1 /* CLOCK_MONOTONIC */);
    if (first->f->clock != fsdpi_system_clock_id()) // another time namespace: one time of day
        job.now = plus(first->f->mono_ns, minus(fsdpi_system_ns(0), first->f->real_ns));
}

/* ---- what ranks do --------------------------------------------------------------------------- */

// Returns the seconds since `ns`: until now, or, if the rank's clock is unknown, until the last
// time in its record.
static double seconds(const record *r, int64_t ns) {
    const double s = 1e-9 *
                     (double)(is_known(r) ? minus(job.now, time_of(r, ns)) : minus(r->last_ns, ns));
    return s > 0 ? s : 0;
}

// Prints an operation: "all_gather of 'h.3' in 'shard' (forward, step 41, op 1832)".
static void say_operation(fsdpi_text *t, const record *r, const fsdpi_flight_op *o) {
    const char *what = *o->what ? o->what : "?";
    if (o->kind == FSDPI_OPEN) fsdpi_text_add(t, "fsdp_init");
    else if (o->kind == FSDPI_SPLIT) fsdpi_text_add(t, "the making of group '%s'", what);
    else fsdpi_text_add(t, "%s of '%s'", fsdp_op_name(o->kind), what);
    if (o->kind == FSDP_OP_SEND || o->kind == FSDP_OP_RECV)
        fsdpi_text_add(t, " %s member %d", o->kind == FSDP_OP_SEND ? "to" : "from", (int)o->root);
    if (o->kind >= FSDP_OP_COUNT) return;
    if (o->comm > 0 && r->f->comm[o->comm].number > 2)
        fsdpi_text_add(t, " in '%s'", r->f->comm[o->comm].name);
    const int has_state = o->state && o->state < FSDP_STATE_COUNT;
    if (o->label == FSDP_LABEL_WORLD)
        fsdpi_text_add(t, " (op %u of the world)", o->seq); // it belongs to no step
    else
        fsdpi_text_add(t, " (%s%sstep %u, op %u)", has_state ? json_states[o->state] : "",
                       has_state ? ", " : "", o->step, o->seq);
}

static const char *count_of(const fsdpi_flight_op *o, char *out, size_t cap) {
    snprintf(out, cap, "%llu elements of %s", (unsigned long long)o->count,
             fsdp_dtype_name((fsdp_dtype)o->dtype));
    return out;
}

// Returns 1 if two ranks are in the same operation, perhaps in different groups of the same kind.
static int alike(const record *a, const fsdpi_flight_op *x, const record *b,
                 const fsdpi_flight_op *y) {
    return x->kind == y->kind && x->state == y->state && x->step == y->step && x->turn == y->turn &&
           a->f->comm[x->comm].number == b->f->comm[y->comm].number && !strcmp(x->what, y->what);
}

// Prints the unit's or the extension's call that a rank made last.
static void say_call(fsdpi_text *t, const record *r) {
    const fsdpi_flight_record *f = r->f;
    const int has_what = f->call_what[0] != 0;
    if (!f->calls) fsdpi_text_add(t, "it has made no call of a model yet");
    else if (f->call == FSDP_CALL_EXTENSION && has_what)
        fsdpi_text_add(t, "its last call was %s", f->call_what);
    else
        fsdpi_text_add(t, "its last call was %s%s%s%s", fsdpi_tr_call_name((int)f->call),
                       has_what ? " of '" : "", has_what ? f->call_what : "", has_what ? "'" : "");
    fsdpi_text_add(t, ", %.1f s ago", seconds(r, f->call_ns));
}

// Returns the rank that failed first, of those whose clocks are known if there are any.
static const record *first_failure(int *rank) {
    const record *first = NULL;
    for (int k = 0; k < job.size; k++) {
        const record *r = &job.of[k];
        if (!r->f || r->f->state != FSDPI_FLIGHT_FAILED) continue;
        if (first && (is_known(first) > is_known(r) ||
                      (is_known(first) == is_known(r) &&
                       time_of(first, first->f->ended_ns) <= time_of(r, r->f->ended_ns))))
            continue;
        first = r;
        *rank = k;
    }
    return first;
}

// Returns 1 if the rank's process ended before the others failed. Returns 0 if all were killed
// together, or if a launcher killed it after a rank had failed for another reason.
static int has_died(const record *r) {
    int rank;
    const record *failed = first_failure(&rank);
    return r->f && r->f->state == FSDPI_FLIGHT_RUNS && r->process == ENDED &&
           (!job.is_over || (failed && failed->f->status == FSDP_ERR_PEER_LOST));
}

// Prints why a rank is not in the operation that others wait in.
static void say_situation(fsdpi_text *t, int rank) {
    const record *r = &job.of[rank];
    if (!r->f) {
        fsdpi_text_add(t, "there is no readable record of it in the directory");
        return;
    }
    if (r->f->state == FSDPI_FLIGHT_SHUT_DOWN) {
        fsdpi_text_add(t, "it has called fsdp_shutdown, %.1f s ago", seconds(r, r->f->ended_ns));
        return;
    }
    if (r->num) {
        fsdpi_text_add(t, "it %s in ", r->process == ENDED ? "was" : "is");
        say_operation(t, r, &r->op[0]);
        fsdpi_text_add(t, ", for %.1f s", seconds(r, r->op[0].begin_ns));
    } else say_call(t, r);
    static const char *const states[] = {"runs", "is stopped (SIGSTOP)", "has died"};
    if (r->process < ELSEWHERE && (r->process != ENDED || has_died(r)))
        fsdpi_text_add(t, "; process %d %s", (int)r->f->pid, states[r->process]);
}

/* ---- findings -------------------------------------------------------------------------------- */

typedef struct finding {
    set ranks;
    char text[512];
    double seconds;  // the longest time of its ranks
    const record *r; // in `waits`: the first rank and its operation
    const fsdpi_flight_op *o;
} finding;

typedef struct findings {
    finding *list;
    int num;
} findings;

static finding *find_more(findings *all) {
    all->list = (finding *)grow(all->list, all->num, sizeof *all->list);
    memset(&all->list[all->num], 0, sizeof *all->list);
    return &all->list[all->num++];
}

static findings waits, others, parts;
static uint8_t *is_out; // [size] this rank is not in an operation that others wait in

// Finds all ranks in an operation that has not ended.
static void find_waits(void) {
    for (int k = 0; k < job.size; k++) {
        const record *r = &job.of[k];
        for (int i = 0; r->f && i < r->num; i++) {
            const fsdpi_flight_op *o = &r->op[i];
            finding *w = NULL;
            for (int n = 0; n < waits.num && !w; n++)
                if (alike(waits.list[n].r, waits.list[n].o, r, o)) w = &waits.list[n];
            if (!w) {
                w = find_more(&waits);
                w->r = r, w->o = o;
                fsdpi_text t = {w->text, sizeof w->text, 0};
                say_operation(&t, r, o);
            }
            add(&w->ranks, k);
            double s = seconds(r, o->begin_ns);
            if (s > w->seconds) w->seconds = s;
        }
    }
}

static void find_other(int rank) {
    char text[sizeof waits.list->text];
    fsdpi_text t = {text, sizeof text, 0};
    if (is_out[rank]) return;
    is_out[rank] = 1;
    say_situation(&t, rank);
    for (int i = 0; i < others.num; i++)
        if (!strcmp(others.list[i].text, text)) {
            add(&others.list[i].ranks, rank);
            return;
        }
    finding *o = find_more(&others);
    snprintf(o->text, sizeof o->text, "%s", text);
    add(&o->ranks, rank);
}

// Operations of a rank in a group so far; -1: it is no member. Group 0: ranks that join the job.
static int64_t turns_of(int rank, int g) {
    const record *r = &job.of[rank];
    const group *x = g ? &job.groups[g - 1] : NULL;
    if (!x) return r->f ? r->f->comm[0].turns : 0;
    for (uint32_t c = 1; r->f && c < r->f->num_comms && c < FSDPI_FLIGHT_COMMS; c++)
        if (r->group[c] == g) return r->f->comm[c].turns;
    int64_t at = x->stride ? ((int64_t)rank - x->first) / x->stride : -1;
    int would_be = at >= 0 && at < x->size && x->first + at * x->stride == rank;
    return r->f || !would_be ? -1 : 0;
}

// Finds members that have not come to an operation in which others wait, and ranks that cannot
// continue.
static void find_missing(void) {
    for (int g = 0; g <= job.num_groups; g++) {
        uint32_t turn = 0; // the first operation of the group that has not ended
        for (int k = 0; k < job.size; k++)
            for (int i = 0; i < job.of[k].num; i++) {
                const fsdpi_flight_op *o = &job.of[k].op[i];
                int of = o->kind == FSDPI_OPEN ? 0 : o->comm ? job.of[k].group[o->comm] : -1;
                if (of == g && o->turn && (!turn || o->turn < turn)) turn = o->turn;
            }
        for (int k = 0; k < job.size && turn; k++) {
            int64_t turns = turns_of(k, g);
            if (turns >= 0 && turns < (int64_t)turn) find_other(k);
        }
    }
    for (int k = 0; k < job.size && waits.num; k++) {
        const record *r = &job.of[k];
        const int is_stopped = r->f && r->f->state == FSDPI_FLIGHT_RUNS && r->process == STOPPED;
        if (has_died(r) || is_stopped) find_other(k);
    }
}

// Returns a hash of the fields of an operation that must be equal on all ranks; 0: not known yet.
static uint64_t signature(const fsdpi_flight_op *o) {
    const uint64_t name = o->fingerprint ? 0 : fsdpi_hash_text(o->what);
    const uint64_t words[] = {o->kind, o->dtype, o->count, o->fingerprint, name};
    if (o->kind < FSDP_OP_COUNT && !o->fingerprint) return 0; // it is just being written
    return fsdpi_hash_words(1, words, 5) | 1;
}

// Finds an operation of a group on a rank. Returns 0 if it is not there any more, or not yet.
static int turn_of(const record *r, int g, uint32_t turn, fsdpi_flight_op *out) {
    for (uint32_t i = 0; next(r, &i, out);)
        if (out->turn == turn && r->group[out->comm] == g) return 1;
    return 0;
}

// Finds the first of a group's last operations that differs between its members.
static void find_parting(int g) {
    const uint32_t most = job.groups[g - 1].most;
    uint64_t seen[TURNS];
    uint32_t first = 0;
    int who[TURNS], differs = -1;
    fsdpi_flight_op a, b, o;
    memset(seen, 0, sizeof seen);
    for (int k = 0; k < job.size; k++) {
        const record *r = &job.of[k];
        for (uint32_t i = 0; next(r, &i, &o);) {
            if (r->group[o.comm] != g || !o.turn || o.turn > most || most - o.turn >= TURNS)
                continue;
            const uint64_t s = signature(&o);
            uint64_t *had = &seen[o.turn % TURNS];
            if (!s) continue;
            if (!*had) *had = s, who[o.turn % TURNS] = k;
            else if (*had != s && (differs < 0 || o.turn < first)) differs = k, first = o.turn;
        }
    }
    if (differs < 0) return;
    // Both sides, and what all have done before.
    const record *ra = &job.of[who[first % TURNS]], *rb = &job.of[differs];
    if (!turn_of(ra, g, first, &a) || !turn_of(rb, g, first, &b)) return;
    set sides[2] = {{NULL, 0}, {NULL, 0}};
    for (int k = 0; k < job.size; k++)
        if (turn_of(&job.of[k], g, first, &o)) add(&sides[signature(&o) != signature(&a)], k);
    if (!sides[0].num || !sides[1].num) return;
    finding *p = find_more(&parts);
    fsdpi_text t = {p->text, sizeof p->text, 0};
    char ranks[160], count[64];
    fsdpi_text_add(&t, "first difference in group '%s': ", job.groups[g - 1].name);
    for (int side = 0; side < 2; side++) {
        const fsdpi_flight_op *x = side ? &b : &a;
        fsdpi_text_add(&t, "%srank%s %s: ", side ? "; " : "", sides[side].num > 1 ? "s" : "",
                       ranges(&sides[side], ranks, sizeof ranks));
        say_operation(&t, side ? rb : ra, x);
        fsdpi_text_add(&t, ", %s", count_of(x, count, sizeof count));
    }
    if (first > 1 && turn_of(ra, g, first - 1, &o)) {
        fsdpi_text_add(&t, ". Before it: ");
        say_operation(&t, ra, &o);
    }
    p->ranks = sides[sides[1].num <= sides[0].num]; // the smaller side
}

static int by_seconds(const void *a, const void *b) {
    double x = ((const finding *)a)->seconds, y = ((const finding *)b)->seconds;
    return (x < y) - (x > y);
}

/* ---- what is printed ------------------------------------------------------------------------- */

// Names another job of the directory, since only one is shown. name "": there is none.
static void put_other(const char *name) {
    char text[1024] = "";
    fsdpi_why_text t = {text, sizeof text, 0, 0, 0, 0, 0};
    if (*name)
        fsdpi_why_say(&t,
                      "the directory has files of other jobs, too: this one is shown;\n"
                      "another one by --job '%s'\n",
                      name);
    fputs(text, stdout);
}

static void put_ranks(const set *s) {
    putchar('[');
    for (int i = 0; i < s->num; i++) printf("%s%d", i ? ", " : "", s->ranks[i]);
    putchar(']');
}

static void put_findings(const char *key, const findings *all) {
    printf(",\n \"%s\": [", key);
    for (int i = 0; i < all->num; i++) {
        printf("%s\n  {\"ranks\": ", i ? "," : "");
        put_ranks(&all->list[i].ranks);
        if (all->list[i].r) printf(", \"seconds\": %.3f", all->list[i].seconds);
        printf(", \"text\": ");
        json_text(stdout, all->list[i].text);
        putchar('}');
    }
    putchar(']');
}

static void print_json(const set *missing, const char *advice) {
    int rank = -1;
    const record *failed = first_failure(&rank);
    printf("{\"job\": ");
    json_text(stdout, job.job);
    printf(", \"other_job\": ");
    json_text(stdout, job.other);
    printf(", \"backend\": ");
    json_text(stdout, job.backend);
    printf(", \"ranks\": %d, \"is_over\": %s, \"no_record\": ", job.size,
           job.is_over ? "true" : "false");
    put_ranks(missing);
    if (failed) {
        printf(",\n \"failure\": {\"rank\": %d, \"text\": ", rank);
        json_text(stdout, failed->f->failure);
        putchar('}');
    }
    put_findings("waits", &waits);
    put_findings("missing", &others);
    put_findings("differ", &parts);
    printf(",\n \"advice\": ");
    json_text(stdout, advice);
    printf("}\n");
}

static void print_findings(const findings *all, const char *verb) {
    char text[256];
    for (int i = 0; i < all->num && i < LINES; i++) {
        const finding *x = &all->list[i];
        if (verb) {
            printf("rank%s %s %s ", x->ranks.num > 1 ? "s" : "",
                   ranges(&x->ranks, text, sizeof text), x->ranks.num > 1 ? verb : "waits in");
            put_safe(stdout, x->text);
            printf(" for %.1f s\n", x->seconds);
        } else {
            if (x->ranks.num && all == &others)
                printf("rank%s %s: ", x->ranks.num > 1 ? "s" : "",
                       ranges(&x->ranks, text, sizeof text));
            put_safe(stdout, x->text);
            putchar('\n');
        }
    }
    if (all->num > LINES) printf("... and %d more\n", all->num - LINES);
}

static void print_text(const set *missing, const char *first, const char *advice) {
    static const char *const names[PROCESSES] = {
        "run", "stopped", "ended", "on other hosts (whether they run is not known)",
        "in another PID namespace (whether they run is not known)"};
    int num[PROCESSES] = {0}, said = 0, rank = -1;
    char text[256];
    for (int k = 0; k < job.size; k++) num[job.of[k].process] += job.of[k].f != NULL;
    if (*first) printf("%s\n", first);
    printf("job '");
    put_safe(stdout, job.job);
    printf("' over ");
    put_safe(stdout, job.backend);
    printf(", %d rank%s. Processes:", job.size, job.size > 1 ? "s" : "");
    for (int i = 0; i < PROCESSES; i++)
        if (num[i]) printf("%s %d %s", said++ ? "," : "", num[i], names[i]);
    if (missing->num)
        printf("; no readable record of rank%s %s", missing->num > 1 ? "s" : "",
               ranges(missing, text, sizeof text));
    printf("\n");
    put_other(job.other);
    if (job.is_over) {
        time_t at = (time_t)(job.real / 1000000000);
        struct tm tm;
        (void)strftime(text, sizeof text, "%Y-%m-%d %H:%M:%S", localtime_r(&at, &tm));
        printf("%s: times are those at the last sign of life, %s\n",
               job.elsewhere ? "Whether processes run is not known" : "No process runs here", text);
    }
    const record *failed = first_failure(&rank);
    if (failed) {
        printf("rank %d %s, %.1f s ago: ", rank,
               is_known(failed) ? "was the first to report an error" : "has reported an error",
               seconds(failed, failed->f->ended_ns));
        put_safe(stdout, failed->f->failure);
        putchar('\n');
    }
    print_findings(&waits, "wait in");
    print_findings(&others, NULL);
    print_findings(&parts, NULL);
    if (*advice) printf("%s\n", advice);
}

// Returns an advice about the ranks that the others wait for, given by the first of them.
static const char *what_to_do(void) {
    const record *r = &job.of[others.list[0].ranks.ranks[0]];
    if (r->f && r->f->state == FSDPI_FLIGHT_SHUT_DOWN)
        return "The others wait for a rank that has left before them: do all make as many steps?";
    if (r->process == STOPPED) return "The others wait for a process that is stopped: continue it.";
    if (has_died(r))
        return "The others wait for a process that has died: look at its output, and whether the "
               "system has killed it for memory.";
    return "The others wait for these ranks: look at what they do.";
}

static int hang(const char *dir, const char *wanted, double after, int json) {
    int status = read_all(dir, wanted);
    if (status) return status;
    set missing = {NULL, 0};
    is_out = (uint8_t *)room((size_t)job.size);
    find_groups();
    find_clocks();
    for (int k = 0; k < job.size; k++)
        if (!job.of[k].f) add(&missing, k);
    find_waits();
    find_missing();
    for (int g = 1; g <= job.num_groups && waits.num; g++) find_parting(g);
    qsort(waits.list, (size_t)waits.num, sizeof *waits.list, by_seconds);
    double longest = waits.num ? waits.list[0].seconds : 0;
    int rank, hangs = waits.num && (longest > after || (job.is_over && !job.elsewhere));
    int is_lost = first_failure(&rank) != NULL;
    for (int k = 0; k < job.size; k++)
        is_lost |= job.of[k].f && job.of[k].f->state == FSDPI_FLIGHT_RUNS &&
                   job.of[k].process == ENDED;
    int all_wait = others.num > 1; // for each other
    for (int i = 0; i < others.num; i++)
        for (int k = 0; k < others.list[i].ranks.num; k++) {
            const record *r = &job.of[others.list[i].ranks.ranks[k]];
            all_wait &= r->num > 0 && r->process != STOPPED && !has_died(r);
        }
    const char *advice =
        parts.num || all_wait
            ? "The ranks make different calls, or the same with other arguments: look at what the "
              "program does before them."
        : others.num ? what_to_do()
        : waits.num  ? "All ranks of the group are in it: look at network, GPUs and load."
                     : "No rank waits. Processes have ended without fsdp_shutdown.";
    char calm[80] = "No rank waits."; // the lines after it show a moment of a running job
    if (waits.num) snprintf(calm, sizeof calm, "No rank waits longer than %g s.", after);
    const int is_calm = !hangs && !is_lost;
    if (json) print_json(&missing, is_calm ? calm : advice);
    else print_text(&missing, is_calm ? calm : "", is_calm ? "" : advice);
    return hangs || is_lost ? EXIT_WAITS : 0;
}

/* ---- why ------------------------------------------------------------------------------------- */

static int why(const char *dir, const char *wanted, int force, int brief) {
    static char text[1 << 20];
    fsdpi_tr_job traces;
    fsdpi_why y;
    fsdpi_why_text t = {text, sizeof text, 0, 0, 0, 0, 0};
    if (fsdpi_tr_read(dir, wanted, force, &traces, text, sizeof text)) return fail(dir, text);
    put_notes(&traces.notes);
    const int made = fsdpi_why_make(&traces, &y);
    const double percent = 100 / fmax(1, (double)(y.step.end - y.step.begin));
    text[0] = 0;
    if (made > 0) fsdpi_why_screen(&y, &t);
    if (!brief) put_other(traces.other);
    if (made > 0 && brief) {
        printf("%.*s: compute %.0f %%, exposed %.0f %%, host %.0f %%\n",
               (int)strcspn(text, "(") - 1, text,
               percent * (double)y.step.category[FSDPI_WHY_COMPUTE],
               percent * (double)fsdpi_why_exposed(&y.step),
               percent * (double)fsdpi_why_host(&y.step));
        text[0] = 0, t.used = t.line = t.space = t.indent = 0;
        if (!helps_print(&y, &t, 1)) fsdpi_why_say_last(&y, &t);
        fputs(text, stdout);
    } else {
        if (made > 0) (void)helps_print(&y, &t, HELPS_LINES);
        fputs(text, stdout);
    }
    fsdpi_why_end(&y);
    fsdpi_tr_free(&traces);
    return made > 0 ? 0 : fail(dir, made ? "no memory" : "no rank has a whole step in its trace");
}

/* ---- json ------------------------------------------------------------------------------------ */

// Writes the trace as JSON. After a failure there is no new file at `path`.
static int write_json(const char *dir, const char *wanted, int force, const char *path) {
    char text[1024] = "", made[4096];
    fsdpi_tr_job traces;
    if (fsdpi_tr_read(dir, wanted, force, &traces, text, sizeof text)) return fail(dir, text);
    put_notes(&traces.notes);
    if ((size_t)snprintf(made, sizeof made, "%s.new", path) >= sizeof made)
        return fail(path, "the path is too long");
    FILE *to = fopen(made, "w");
    if (!to) return fail(path, strerror(errno));
    int bad = json_write(&traces, to, text, sizeof text);
    if (fflush(to) || ferror(to)) bad = 1, snprintf(text, sizeof text, "%s", strerror(errno));
    if (fclose(to) && !bad) bad = 1, snprintf(text, sizeof text, "%s", strerror(errno));
    if (!bad && rename(made, path)) bad = 1, snprintf(text, sizeof text, "%s", strerror(errno));
    if (bad) (void)unlink(made);
    for (int k = 0; k < traces.num && !bad; k++) {
        const fsdpi_tr_rank *r = &traces.rank[k];
        if (r->head.dropped)
            printf("rank %d: %llu records had no room in the trace\n", r->head.rank,
                   (unsigned long long)r->head.dropped);
        if (r->error_ns < 0) printf("rank %d: its clock was not compared\n", r->head.rank);
        if (r->error_ns > 0)
            printf("rank %d: its clock is known to %.1f us\n", r->head.rank,
                   (double)r->error_ns / 1000);
    }
    if (!bad) printf("%s: ranks: %d of %d\n", path, traces.num, traces.size);
    if (!bad) put_other(traces.other);
    fsdpi_tr_free(&traces);
    return bad ? fail(path, text) : 0;
}

/* ---- arguments ------------------------------------------------------------------------------- */

static void usage(FILE *to) {
    fputs("usage: fsdptrace hang DIR [--after SECONDS] [--job NAME] [--json]\n"
          "Says which ranks wait in which operation and for whom, from the flight records in DIR:\n"
          "run the job with FSDP_FLIGHT_RECORD=DIR. Without --job: of the job that began last.\n"
          "Exit status: 0: no rank waits longer than --after (10) seconds; 1: some do, or the job\n"
          "has failed or was killed; 2: the records cannot be read, or an argument is wrong.\n"
          "\n"
          "       fsdptrace why DIR [--job NAME] [--force] [--brief]\n"
          "       fsdptrace json DIR -o FILE [--job NAME] [--force]\n"
          "Says where the time of a step went, or writes what Perfetto opens, from the traces in\n"
          "DIR: run the job with FSDP_TRACE=DIR. --force: also if clocks of hosts were not\n"
          "compared. Exit status: 0, or 2: no trace can be read, or an argument is wrong.\n",
          to);
}

int main(int argc, char **argv) {
    const char *dir = NULL, *wanted = NULL, *to = NULL, *verb = argc > 2 ? argv[1] : "";
    double after = 10;
    int json = 0, force = 0, brief = 0;
    if (argc > 1 && (!strcmp(argv[1], "--help") || !strcmp(argv[1], "-h"))) {
        usage(stdout);
        return 0;
    }
    const int hangs = !strcmp(verb, "hang"), explains = !strcmp(verb, "why");
    const int writes = !strcmp(verb, "json");
    int bad = !hangs && !explains && !writes;
    (void)unsetenv("FSDP_FLIGHT_RECORD"); // not for worlds without peers
    (void)unsetenv("FSDP_TRACE");
    for (int i = 2; i < argc && !bad; i++) {
        char *end = NULL;
        if (hangs && !strcmp(argv[i], "--json")) json = 1;
        else if (!hangs && !strcmp(argv[i], "--force")) force = 1;
        else if (explains && !strcmp(argv[i], "--brief")) brief = 1;
        else if (writes && !strcmp(argv[i], "-o") && i + 1 < argc) to = argv[++i];
        else if (!strcmp(argv[i], "--job") && i + 1 < argc) wanted = argv[++i];
        else if (hangs && !strcmp(argv[i], "--after") && i + 1 < argc) {
            after = strtod(argv[++i], &end);
            if (*end || end == argv[i] || !(after >= 0)) bad = i;
        } else if (argv[i][0] != '-' && !dir) dir = argv[i];
        else bad = i;
    }
    if (bad > 1)
        fprintf(stderr, "fsdptrace: '%s' is not understood, or lacks its value\n", argv[bad]);
    else if (!bad && !dir) fputs("fsdptrace: no directory is named\n", stderr);
    else if (!bad && writes && !to) fputs("fsdptrace: json needs -o FILE\n", stderr);
    if (bad || !dir || writes != (to != NULL)) {
        usage(stderr);
        return EXIT_UNREADABLE;
    }
    int status = hangs      ? hang(dir, wanted, after, json)
                 : explains ? why(dir, wanted, force, brief)
                            : write_json(dir, wanted, force, to);
    return fflush(stdout) || ferror(stdout) ? fail("standard output", strerror(errno)) : status;
}
