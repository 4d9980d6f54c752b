/* fsdp_record.h - what backends share: the record of what a rank is about to do and the words in
   which it is told, the part of a comm that every backend has, the checks of a collective's
   arguments, the list of allocations, and how much memory is left

   Included by the backends' headers. It moves no data and waits for nobody.

   SPDX-License-Identifier: MIT (full text at the end of fsdp.h) */
#include "../fsdp.h" // declarations; nothing when fsdp.h itself includes this file

#if defined(FSDP_IMPLEMENTATION) && !defined(FSDP_RECORD_IMPLEMENTED) && !defined(FSDP_MATH_ONLY)
#define FSDP_RECORD_IMPLEMENTED

#ifdef __cplusplus
extern "C" {
#endif

// Operations that are not fsdp_coll.
enum { FSDPI_OPEN = FSDP_OP_COUNT + 1, FSDPI_SPLIT, FSDPI_CLOSE };

/* What a rank is about to do. Ranks compare `key`, a hash of everything that has to agree; the rest
   is there to say what differs. Sent and shared as it is: no pointers, no padding. */
typedef struct fsdpi_record {
    uint64_t key;
    // Backends that read peers' memory: where the buffer is, in bytes behind the begin of its
    // allocation; that allocation's place, bytes and number. Differs between ranks as it likes.
    uint64_t offset, at, part, number;
    uint64_t fingerprint, count, segs, seq;
    uint64_t block, members; // split: where the new group's block is, who is in it
    int64_t since_ns;        // when the rank came
    int32_t root;            // send, recv: the world rank of the other one, or -1
    uint32_t num_segs;
    uint8_t kind, dtype, out_dtype, redop, in_place, state, reserved[2];
    char what[48], comm[16]; // cut if they are longer
} fsdpi_record;

#define FSDPI_MAX_RANKS    4096 // of a comm; backends that reduce themselves: FSDPI_MAX_SRCS
#define FSDPI_RECORD_WORDS (sizeof(fsdpi_record) / sizeof(uint64_t))
#define FSDPI_REASON       800

// What a rank does, for whoever asks why it is not elsewhere.
typedef struct fsdpi_trace {
    uint64_t last[FSDPI_RECORD_WORDS]; // its last operation on any comm
    uint32_t busy, writing;            // in how many operations it is; last is being written
} fsdpi_trace;

// Why a world has ended. The first one stands, on all ranks.
typedef struct fsdpi_verdict {
    int32_t status, rank; // rank: that told it; -1: the store, or this rank by itself
    int32_t lost;         // the rank that was lost, or -1
    char subject[192], reason[FSDPI_REASON]; // subject: the operation, "" if no single one
} fsdpi_verdict;

// The part of a comm that every backend has; its first member.
typedef struct fsdpi_comm {
    const fsdp_boot *boot;
    int index, size;                // this rank's place among the members
    int32_t ranks[FSDPI_MAX_RANKS]; // world ranks of the members
    fsdpi_record now;
    char error[1280]; // text of the last failure
} fsdpi_comm;

/* -------------------------------------------------------------------------------------------- */
// >>record_text
// Owns: the words.

static int64_t fsdpi_boot_now(const fsdp_boot *boot) {
    return boot->clock.now_ns(boot->clock.user);
}

// Memory of a device that does not end its work is left to the end of the process.
static FSDPI_UNUSED int fsdpi_boot_is_stuck(const fsdp_boot *boot) {
    return boot->stuck && FSDPI_LOAD(boot->stuck);
}

static FSDPI_UNUSED void fsdpi_boot_log(const fsdp_boot *boot, int level, const char *text) {
    if (boot->logger.log && level <= boot->log_level)
        (boot->logger.log)(level, FSDP_OK, boot->rank, text, boot->logger.user);
}

static int fsdpi_is_pair(int kind) { return kind == FSDP_OP_SEND || kind == FSDP_OP_RECV; }

// "all_gather of 'h.3' on 'shard' (forward, op 17)", "send of 'h.3' to rank 2 (op 18)"
static void fsdpi_say_op(fsdpi_text *t, const fsdpi_record *r) {
    static const char *const states[FSDP_STATE_COUNT] = {"", "forward, ", "pre_backward, ",
                                                         "post_backward, "};
    if (r->kind == FSDPI_OPEN) fsdpi_say(t, "open of job '%s'", r->what);
    else if (r->kind == FSDPI_SPLIT) fsdpi_say(t, "split into '%s'", r->what);
    else if (r->kind == FSDPI_CLOSE) fsdpi_say(t, "close");
    else fsdpi_say(t, "%s of '%s'", fsdp_op_name(r->kind), r->what);
    if (fsdpi_is_pair(r->kind) && r->root >= 0)
        fsdpi_say(t, " %s rank %d", r->kind == FSDP_OP_SEND ? "to" : "from", (int)r->root);
    if (r->comm[0]) fsdpi_say(t, " on '%s'", r->comm);
    if (r->kind < FSDP_OP_COUNT)
        fsdpi_say(t, " (%sop %llu)", r->state < FSDP_STATE_COUNT ? states[r->state] : "",
                  (unsigned long long)r->seq);
}

// "rank 2" or "ranks 0, 1, 3": the members that are marked.
static void fsdpi_say_ranks(fsdpi_text *t, const fsdpi_comm *c, const uint8_t *marked) {
    int total = 0, said = 0;
    for (int k = 0; k < c->size; k++) total += marked[k] != 0;
    fsdpi_say(t, total > 1 ? "ranks" : "rank");
    for (int k = 0; k < c->size && said < 16; k++)
        if (marked[k]) fsdpi_say(t, "%s %d", said++ ? "," : "", (int)c->ranks[k]);
    if (total > said) fsdpi_say(t, " and %d more", total - said);
}

/* "ranks 1, 2 have not come within 2.0 s; rank 1: its last operation was ...". say_last tells what
   a rank of the world did last. */
static void fsdpi_say_late(fsdpi_text *t, fsdpi_comm *c, const uint8_t *missing, const char *verb,
                           void (*say_last)(fsdpi_text *t, fsdpi_comm *c, int rank)) {
    int total = 0, said = 0;
    for (int k = 0; k < c->size; k++) total += missing[k] != 0;
    fsdpi_say_ranks(t, c, missing);
    fsdpi_say(t, " %s not %s within %.1f s", total > 1 ? "have" : "has", verb,
              (double)c->boot->timeout_ns * 1e-9);
    for (int k = 0; k < c->size && said < 3; k++) {
        if (!missing[k]) continue;
        fsdpi_say(t, "; ");
        if (total > 1) fsdpi_say(t, "rank %d: ", (int)c->ranks[k]);
        say_last(t, c, c->ranks[k]);
        said++;
    }
}

// "it is in all_gather of 'h.3' (forward, op 17), for 1.2 s"; past: of a rank that is no more.
static void fsdpi_say_done(fsdpi_text *t, int busy, int past, const char *operation,
                           int64_t since_ns) {
    double since = (double)since_ns * 1e-9;
    if (busy) fsdpi_say(t, "it %s in %s, for %.1f s", past ? "was" : "is", operation, since);
    else fsdpi_say(t, "its last operation was %s, %.1f s ago", operation, since);
}

// A failure of this call on this rank alone. The text goes where error_text finds it.
static FSDP_PRINTF(3, 4) fsdp_status
    fsdpi_comm_error(fsdpi_comm *c, fsdp_status status, const char *format, ...) {
    char reason[FSDPI_REASON];
    va_list args;
    va_start(args, format);
    (void)vsnprintf(reason, sizeof reason, format, args);
    va_end(args);
    fsdpi_text t = {c->error, sizeof c->error, 0};
    fsdpi_say(&t, "rank %d: ", c->boot->rank);
    fsdpi_say_op(&t, &c->now);
    fsdpi_say(&t, ": %s", reason);
    return status;
}

// What this rank does, as the subject of a verdict.
static void fsdpi_comm_subject(const fsdpi_comm *c, char *subject, size_t cap) {
    fsdpi_text t = {subject, cap, 0};
    fsdpi_say_op(&t, &c->now);
}

// The status and text of a failed world for this rank: who I am, what I was in, what happened.
static fsdp_status fsdpi_comm_report(fsdpi_comm *c, const fsdpi_verdict *v) {
    char subject[sizeof v->subject];
    fsdpi_comm_subject(c, subject, sizeof subject);
    if (!v->subject[0] || !strcmp(v->subject, subject))
        return fsdpi_comm_error(c, (fsdp_status)v->status, "%s", v->reason);
    return fsdpi_comm_error(c, (fsdp_status)v->status, "rank %d failed in %s: %s", (int)v->rank,
                            v->subject, v->reason);
}

// A verdict for who was in no operation of the world yet.
static FSDPI_UNUSED void fsdpi_say_verdict(fsdpi_text *t, const fsdpi_verdict *v) {
    if (v->subject[0]) fsdpi_say(t, "rank %d failed in %s: ", (int)v->rank, v->subject);
    if (v->reason[0]) fsdpi_say(t, "%s", v->reason);
    else fsdpi_say(t, "rank %d has aborted the job", (int)v->rank);
}

// The reason of an abort that the user or the core asked for.
static void fsdpi_say_abort(fsdpi_text *t, const fsdp_boot *boot, const char *why) {
    if (!why || strncmp(why, "rank ", 5)) fsdpi_say(t, "aborted by rank %d: ", boot->rank);
    fsdpi_say(t, "%s", why ? why : "no reason given");
}

// Fields in which two calls differ.
static void fsdpi_say_differences(fsdpi_text *t, const fsdpi_record *a, const fsdpi_record *b) {
    const struct {
        int differs;
        const char *name;
    } fields[] = {
        {a->kind != b->kind, "operation"},
        {strcmp(a->what, b->what) != 0, "unit"},
        {a->state != b->state, "state"},
        {a->dtype != b->dtype || a->out_dtype != b->out_dtype, "dtype"},
        {a->count != b->count, "count"},
        {a->segs != b->segs, "segments"},
        {a->root != b->root, "root"},
        {a->redop != b->redop, "reduction"},
        {a->in_place != b->in_place, "in_place"},
        {a->fingerprint != b->fingerprint, "fingerprint"},
    };
    const char *comma = " (differs in ";
    for (size_t i = 0; i < sizeof fields / sizeof *fields; i++) {
        if (!fields[i].differs) continue;
        fsdpi_say(t, "%s%s", comma, fields[i].name);
        comma = ", ";
    }
    if (comma[0] == ',') fsdpi_say(t, ")");
}

// "all_gather of 'h.3' (op 17), 64 elements of f32"
static void fsdpi_say_call(fsdpi_text *t, const fsdpi_record *r) {
    fsdpi_say_op(t, r);
    if (r->kind < FSDP_OP_COUNT)
        fsdpi_say(t, ", %llu elements of %s", (unsigned long long)r->count,
                  fsdp_dtype_name(r->dtype));
}

static FSDPI_UNUSED int fsdpi_is_like_pair(const fsdpi_record *a, const fsdpi_record *b) {
    return a->key == b->key && a->kind != b->kind;
}

// The two of a send and recv that do not fit together.
static FSDPI_UNUSED void fsdpi_say_unlike_pair(fsdpi_text *t, int rank, const fsdpi_record *a,
                                               int other, const fsdpi_record *b) {
    fsdpi_record like = *b;
    like.kind = a->kind, like.root = a->root; // in which they have to differ
    fsdpi_say(t, "ranks disagree: rank %d: ", rank);
    fsdpi_say_call(t, a);
    fsdpi_say(t, "; rank %d: ", other);
    fsdpi_say_call(t, b);
    fsdpi_say_differences(t, a, &like);
}

/* "ranks disagree: ranks 0, 2: all_gather of ...; rank 1: ...". record_of gives what a member
   showed. */
static FSDPI_UNUSED void fsdpi_say_disagreement(fsdpi_text *t, const fsdpi_comm *c,
                                                fsdpi_record (*record_of)(const fsdpi_comm *c,
                                                                          int k)) {
    fsdpi_record first = record_of(c, 0);
    fsdpi_say(t, "ranks disagree");
    for (int k = 0; k < c->size; k++) {
        fsdpi_record record = record_of(c, k);
        uint8_t equal[FSDPI_MAX_SRCS];
        int is_first = 1;
        for (int j = 0; j < c->size; j++) {
            equal[j] = record_of(c, j).key == record.key;
            is_first &= !(equal[j] && j < k);
        }
        if (!is_first) continue;
        fsdpi_say(t, k ? "; " : ": ");
        fsdpi_say_ranks(t, c, equal);
        fsdpi_say(t, ": ");
        fsdpi_say_call(t, &record);
        fsdpi_say_differences(t, &first, &record);
    }
}

/* Word by word, since the author of an error text may read while the owner writes; the text may
   then mix two operations. Ranks that compare are ordered by a barrier and see whole ones. */
static void fsdpi_record_put(uint64_t *to, const fsdpi_record *record) {
    for (size_t i = 0; i < FSDPI_RECORD_WORDS; i++) {
        uint64_t word;
        memcpy(&word, (const char *)record + i * sizeof word, sizeof word);
        __atomic_store_n(&to[i], word, __ATOMIC_RELAXED);
    }
}

static fsdpi_record fsdpi_record_get(const uint64_t *from) {
    fsdpi_record record;
    uint64_t words[FSDPI_RECORD_WORDS];
    for (size_t i = 0; i < FSDPI_RECORD_WORDS; i++)
        words[i] = __atomic_load_n(&from[i], __ATOMIC_RELAXED);
    memcpy(&record, words, sizeof record);
    record.what[sizeof record.what - 1] = record.comm[sizeof record.comm - 1] = 0;
    return record;
}

static FSDPI_UNUSED void fsdpi_trace_begin(fsdpi_trace *trace, const fsdpi_record *record) {
    __atomic_add_fetch(&trace->busy, 1u, __ATOMIC_RELAXED);
    // Two threads of one rank may be here; the trace need not have both.
    if (__atomic_exchange_n(&trace->writing, 1u, __ATOMIC_ACQUIRE)) return;
    fsdpi_record_put(trace->last, record);
    FSDPI_STORE(&trace->writing, 0u);
}

static FSDPI_UNUSED void fsdpi_trace_end(fsdpi_trace *trace) {
    __atomic_sub_fetch(&trace->busy, 1u, __ATOMIC_RELEASE);
}

// Whether the rank is busy; its last operation as text, and when that began.
static FSDPI_UNUSED int fsdpi_trace_read(const fsdpi_trace *trace, char *text, size_t cap,
                                         int64_t *since_ns) {
    fsdpi_record last = fsdpi_record_get(trace->last);
    fsdpi_text t = {text, cap, 0};
    fsdpi_say_op(&t, &last);
    *since_ns = last.since_ns;
    return FSDPI_LOAD(&trace->busy) > 0;
}

/* -------------------------------------------------------------------------------------------- */
// >>record_check
// Owns: what a call says of itself, and whether its arguments make sense.

static FSDPI_NOINLINE void fsdpi_copy_name(char *to, size_t cap, const char *from) {
    size_t length = from ? strlen(from) : 0;
    memset(to, 0, cap);
    if (length) memcpy(to, from, length < cap ? length : cap - 1);
}

// Fills c->now, but for its key.
static void fsdpi_describe(fsdpi_comm *c, const fsdp_coll *op, const char *what) {
    fsdpi_record *r = &c->now;
    fsdpi_copy_name(r->what, sizeof r->what, what);
    r->fingerprint = r->count = r->segs = r->seq = r->block = r->members = 0;
    r->offset = r->at = r->part = r->number = 0;
    r->kind = r->dtype = r->out_dtype = r->redop = r->in_place = r->state = 0;
    r->root = 0, r->num_segs = 0;
    if (!op) return;
    r->kind = op->kind, r->dtype = op->dtype, r->redop = op->redop, r->in_place = op->in_place,
    r->state = op->state;
    r->fingerprint = op->fingerprint, r->count = op->count, r->seq = op->seq,
    r->num_segs = op->num_segs;
    if (op->kind == FSDP_OP_REDUCE_SCATTER) r->out_dtype = op->out_dtype;
    if (op->kind == FSDP_OP_BROADCAST) r->root = op->root;
    if (fsdpi_is_pair(op->kind))
        r->root = op->root >= 0 && op->root < c->size ? (int)c->ranks[op->root] : -1;
}

static void fsdpi_make_key(fsdpi_record *r, const fsdp_coll *op) {
    for (uint32_t s = 0; op && s < op->num_segs && op->segs; s++) {
        r->segs = fsdpi_hash(r->segs, (uint64_t)op->segs[s].shard);
        r->segs = fsdpi_hash(r->segs, (uint64_t)op->segs[s].full);
        r->segs = fsdpi_hash(r->segs, (uint64_t)op->segs[s].count);
    }
    uint64_t bytes, h;
    uint8_t kind = r->kind;
    if (kind == FSDP_OP_RECV) r->kind = FSDP_OP_SEND; // which match each other
    memcpy(&bytes, &r->kind, sizeof bytes); // the six bytes from kind to state, and two zeros
    r->kind = kind;
    h = fsdpi_hash(fsdpi_hash_text(r->what), bytes);
    h = fsdpi_hash(fsdpi_hash(h, r->fingerprint), r->count);
    h = fsdpi_hash(h, r->segs);
    r->key = fsdpi_hash(h, fsdpi_is_pair(kind) ? 0 : (uint64_t)(uint32_t)r->root);
}

static fsdp_status fsdpi_check_reduction(fsdpi_comm *c, const fsdp_coll *op) {
    int is_int = op->dtype == FSDP_I32 || op->dtype == FSDP_I64,
        is_float = fsdp_dtype_is_float(op->dtype);
    if (op->kind == FSDP_OP_ALL_REDUCE && !is_int && !is_float)
        return fsdpi_comm_error(c, FSDP_ERR_UNSUPPORTED, "%s cannot be reduced",
                                fsdp_dtype_name(op->dtype));
    if (op->kind != FSDP_OP_REDUCE_SCATTER) return FSDP_OK;
    int plain = op->out_dtype == op->dtype && op->scale == 1.0 && !op->accumulate;
    if (is_float ? fsdp_dtype_is_float(op->out_dtype) : is_int && plain) return FSDP_OK;
    return fsdpi_comm_error(c, FSDP_ERR_UNSUPPORTED, "%s cannot be reduced to %s%s",
                            fsdp_dtype_name(op->dtype), fsdp_dtype_name(op->out_dtype),
                            plain ? "" : " with a scale or accumulation");
}

/* Whether the arguments make sense, for a backend that knows `kinds`; and the range of elements
   that peers read, after *shared. */
static fsdp_status fsdpi_check(fsdpi_comm *c, uint32_t kinds, const fsdp_coll *op,
                               const void **shared, int64_t *low, int64_t *high) {
    int is_list = op->kind == FSDP_OP_ALL_GATHER || op->kind == FSDP_OP_REDUCE_SCATTER;
    int64_t most = INT64_MAX / 32 / c->size; // elements: sums and bytes of them do not overflow
    if (op->kind >= FSDP_OP_COUNT || !(kinds >> op->kind & 1))
        return fsdpi_comm_error(c, FSDP_ERR_UNSUPPORTED, "this backend does not know operation %d",
                                op->kind);
    if (!fsdp_dtype_size(op->dtype) || op->count > (uint64_t)most ||
        (is_list && op->num_segs && !op->segs))
        return fsdpi_comm_error(
            c, FSDP_ERR_INVALID_ARG, "dtype %d, %llu elements, %u segments at %p", op->dtype,
            (unsigned long long)op->count, op->num_segs, (const void *)op->segs);
    if (op->kind == FSDP_OP_BROADCAST && (op->root < 0 || op->root >= c->size))
        return fsdpi_comm_error(c, FSDP_ERR_INVALID_ARG, "root is %d, expected 0 to %d",
                                (int)op->root, c->size - 1);
    if (fsdpi_is_pair(op->kind) && (op->root < 0 || op->root >= c->size || op->root == c->index))
        return fsdpi_comm_error(c, FSDP_ERR_INVALID_ARG,
                                "the other member is %d, expected 0 to %d, and not %d",
                                (int)op->root, c->size - 1, c->index);
    fsdp_status status = fsdpi_check_reduction(c, op);
    if (status) return status;
    int from_shard = op->kind == FSDP_OP_ALL_GATHER && !op->in_place;
    int from_src = from_shard || op->kind == FSDP_OP_REDUCE_SCATTER ||
                   op->kind == FSDP_OP_ALL_TO_ALL || op->kind == FSDP_OP_SEND;
    *shared = from_src ? op->src : op->dst;
    *low = is_list ? INT64_MAX : 0;
    *high = is_list ? 0 : (int64_t)op->count * (op->kind == FSDP_OP_ALL_TO_ALL ? c->size : 1);
    for (uint32_t s = 0; is_list && s < op->num_segs; s++) {
        const fsdp_seg *seg = &op->segs[s];
        if (seg->shard < 0 || seg->full < 0 || seg->count < 0 || seg->shard > most ||
            seg->full > most || seg->count > most)
            return fsdpi_comm_error(c, FSDP_ERR_INVALID_ARG, "segment %u is {%lld, %lld, %lld}", s,
                                    (long long)seg->shard, (long long)seg->full,
                                    (long long)seg->count);
        int64_t start = from_shard ? seg->shard : seg->full;
        int64_t end = start + (from_shard ? 1 : c->size) * seg->count;
        if (seg->count && start < *low) *low = start;
        if (seg->count && end > *high) *high = end;
    }
    if (*high == 0) *low = 0;
    if (*high > 0 && (!*shared || (!op->dst && op->kind != FSDP_OP_SEND)))
        return fsdpi_comm_error(c, FSDP_ERR_INVALID_ARG, "src is %p and dst %p", op->src, op->dst);
    return FSDP_OK;
}

static fsdp_status fsdpi_check_world(fsdpi_comm *c, int most) {
    if (c->boot->size < 1 || c->boot->rank < 0 || c->boot->rank >= c->boot->size)
        return fsdpi_comm_error(c, FSDP_ERR_INVALID_ARG, "rank %d of %d", c->boot->rank,
                                c->boot->size);
    if (c->boot->size > most)
        return fsdpi_comm_error(c, FSDP_ERR_UNSUPPORTED, "%d ranks, at most %d", c->boot->size,
                                most);
    c->index = c->boot->rank;
    c->size = c->boot->size;
    for (int k = 0; k < c->size; k++) c->ranks[k] = k;
    return FSDP_OK;
}

/* Checks a new group's members, fills the child from them, and the parent's record with a hash of
   them. Returns the first member's index in the parent; -1, with the text: they make no sense. */
static int fsdpi_split_members(fsdpi_comm *parent, const fsdp_group *g, fsdpi_comm *child) {
    uint64_t h = fsdpi_hash((uint64_t)g->color, (uint64_t)g->size);
    int first = -1, wrong = g->size < 1 || g->size > parent->size || g->index < 0 ||
                            g->index >= g->size || !g->ranks ||
                            g->ranks[g->index] != parent->boot->rank;
    for (int i = 0; !wrong && i < g->size; i++) {
        int at = 0, times = 0;
        while (at < parent->size && parent->ranks[at] != g->ranks[i]) at++;
        for (int j = 0; j < g->size; j++) times += g->ranks[j] == g->ranks[i];
        wrong = at == parent->size || times != 1;
        if (i == 0) first = at;
        child->ranks[i] = g->ranks[i];
        h = fsdpi_hash(h, (uint64_t)g->ranks[i]);
    }
    if (wrong) {
        (void)fsdpi_comm_error(parent, FSDP_ERR_INVALID_ARG,
                               "the group's ranks (%d, this one at index %d) are not different "
                               "members of the parent",
                               g->size, g->index);
        return -1;
    }
    parent->now.members = h;
    child->boot = parent->boot;
    child->index = g->index;
    child->size = g->size;
    fsdpi_copy_name(child->now.comm, sizeof child->now.comm, g->name);
    return first;
}

/* What a split begins with, for backends that move messages: the parent's record, and the block of
   `size` bytes of the new comm, filled so far; NULL where this rank is in none. OUT_OF_MEMORY: the
   caller ends the world, for the others are on their way. INVALID_ARG: the text is the parent's. */
static FSDPI_UNUSED fsdp_status fsdpi_split_begin(fsdpi_comm *parent, const fsdp_group *g,
                                                  size_t size, fsdpi_comm **out) {
    *out = NULL;
    parent->now.key = FSDPI_SPLIT; // names and members differ between groups; that it is one not
    if (g->color < 0) return FSDP_OK;
    fsdpi_comm *child = (fsdpi_comm *)fsdpi_alloc(&parent->boot->allocator, size);
    if (!child) return FSDP_ERR_OUT_OF_MEMORY;
    if (fsdpi_split_members(parent, g, child) < 0) {
        fsdpi_free(&parent->boot->allocator, child);
        return FSDP_ERR_INVALID_ARG;
    }
    fsdpi_describe(child, NULL, g->name);
    child->now.kind = FSDPI_SPLIT;
    *out = child;
    return FSDP_OK;
}

/* -------------------------------------------------------------------------------------------- */
// >>record_memory
// Owns: the list of a world's allocations, and how much memory is left.

// An allocation. A backend that maps the parts of all ranks has them side by side from base on.
typedef struct fsdpi_chunk {
    char *base;
    size_t size, part; // asked for; distance from one rank's part to the next one's
    uint64_t at;       // of the backend: where it is, or where it came from
    uint64_t number;   // of the backend: among this rank's allocations
} fsdpi_chunk;

typedef struct fsdpi_chunks {
    uint32_t lock; // one thread allocates while another is in a collective
    int count, max;
    fsdpi_chunk *list; // by address
} fsdpi_chunks;

// Index of the last chunk that begins at or before p; -1: none.
static int fsdpi_chunk_before(const fsdpi_chunks *chunks, uintptr_t p) {
    int low = 0, high = chunks->count;
    while (low < high) {
        int middle = (low + high) / 2;
        if ((uintptr_t)chunks->list[middle].base <= p) low = middle + 1;
        else high = middle;
    }
    return low - 1;
}

static int fsdpi_chunk_insert(fsdpi_chunks *chunks, const fsdp_allocator *a, fsdpi_chunk chunk) {
    int done = 0;
    fsdpi_lock(&chunks->lock);
    if (chunks->count == chunks->max) {
        int max = chunks->max ? 2 * chunks->max : 32;
        fsdpi_chunk *more = (fsdpi_chunk *)fsdpi_alloc(a, (size_t)max * sizeof *more);
        if (more && chunks->count) memcpy(more, chunks->list, (size_t)chunks->count * sizeof *more);
        if (more) {
            fsdpi_free(a, chunks->list);
            chunks->list = more;
            chunks->max = max;
        }
    }
    if (chunks->count < chunks->max) {
        int i = fsdpi_chunk_before(chunks, (uintptr_t)chunk.base) + 1;
        memmove(chunks->list + i + 1, chunks->list + i, (size_t)(chunks->count - i) * sizeof chunk);
        chunks->list[i] = chunk;
        chunks->count++;
        done = 1;
    }
    fsdpi_unlock(&chunks->lock);
    return done;
}

// Takes out the chunk whose part of this rank begins at ptr.
static int fsdpi_chunk_take(fsdpi_chunks *chunks, int rank, const void *ptr, fsdpi_chunk *out) {
    fsdpi_lock(&chunks->lock);
    int i = fsdpi_chunk_before(chunks, (uintptr_t)ptr);
    int known = i >= 0 &&
                chunks->list[i].base + chunks->list[i].part * (size_t)rank == (const char *)ptr;
    if (known) {
        *out = chunks->list[i];
        chunks->count--;
        memmove(chunks->list + i, chunks->list + i + 1, (size_t)(chunks->count - i) * sizeof *out);
    }
    fsdpi_unlock(&chunks->lock);
    return known;
}

// Finds the allocation of bytes [low, high) after p, all of which have to be this rank's.
static fsdp_status fsdpi_chunk_find(fsdpi_comm *c, fsdpi_chunks *chunks, const fsdp_coll *op,
                                    const void *p, size_t low, size_t high, fsdpi_chunk *out) {
    fsdpi_chunk chunk = {NULL, 0, 0, 0, 0};
    fsdpi_lock(&chunks->lock);
    int i = fsdpi_chunk_before(chunks, (uintptr_t)p + low);
    if (i >= 0) chunk = chunks->list[i];
    fsdpi_unlock(&chunks->lock);
    uintptr_t mine = (uintptr_t)chunk.base + chunk.part * (size_t)c->boot->rank, at = (uintptr_t)p;
    *out = chunk;
    if (chunk.base && at + low >= mine && at + high <= mine + chunk.size) return FSDP_OK;
    return fsdpi_comm_error(c, FSDP_ERR_INVALID_ARG,
                            "bytes %llu to %llu of %s are read by peers and do not lie in one "
                            "allocation of this backend's alloc",
                            (unsigned long long)low, (unsigned long long)high,
                            p == op->src ? "src" : "dst");
}

// The number after `key` at the start of a line of a small text file, or -1. "": the first line.
static int64_t fsdpi_read_number(const char *path, const char *key) {
    char line[256];
    int64_t value = -1;
    FILE *file = fopen(path, "r");
    if (!file) return -1;
    while (value < 0 && fgets(line, sizeof line, file)) {
        char *end = line + strlen(key);
        if (!strncmp(line, key, strlen(key)) && strspn(end, " \t0123456789") > 0)
            value = (int64_t)strtoull(end, NULL, 10);
        else if (!*key) break;
    }
    (void)fclose(file);
    return value;
}

// Lowers *least to what a control group and those above it still allow; page cache can be dropped.
static void fsdpi_group_limit(const char *root, const char *path, const char *limit_name,
                              const char *usage_name, int64_t *least) {
    char dir[400], name[480];
    if (snprintf(dir, sizeof dir, "%s%s", root, path) >= (int)sizeof dir) return;
    for (;;) {
        (void)snprintf(name, sizeof name, "%s/%s", dir, limit_name);
        int64_t limit = fsdpi_read_number(name, "");
        (void)snprintf(name, sizeof name, "%s/%s", dir, usage_name);
        int64_t used = fsdpi_read_number(name, "");
        (void)snprintf(name, sizeof name, "%s/memory.stat", dir);
        int64_t cache = fsdpi_read_number(name, "inactive_file ") +
                        fsdpi_read_number(name, "active_file ");
        int64_t left = limit - used + (cache > 0 ? cache : 0);
        if (limit >= 0 && used >= 0 && left < *least) *least = left > 0 ? left : 0;
        char *slash = strrchr(dir, '/');
        if (!slash || slash < dir + strlen(root)) return;
        *slash = 0;
    }
}

// Bytes that can be had before the kernel starts to kill, and whose limit that is.
static int64_t fsdpi_memory_left(const char **whose) {
    char line[400];
    int64_t machine = fsdpi_read_number("/proc/meminfo", "MemAvailable:"), least;
    if (machine < 0) machine = INT64_MAX / 1024;
    least = machine *= 1024;
    FILE *file = fopen("/proc/self/cgroup", "r");
    while (file && fgets(line, sizeof line, file)) {
        char *path = strchr(line, '/');
        line[strcspn(line, "\n")] = 0;
        if (!path) continue;
        if (!strncmp(line, "0::", 3))
            fsdpi_group_limit("/sys/fs/cgroup", path, "memory.max", "memory.current", &least);
        else if (strstr(line, ":memory:"))
            fsdpi_group_limit("/sys/fs/cgroup/memory", path, "memory.limit_in_bytes",
                              "memory.usage_in_bytes", &least);
    }
    if (file) (void)fclose(file);
    *whose = least < machine ? "its control group" : "the machine";
    return least;
}

// Failures of alloc leave c->now alone: a lane may be in a collective of the same comm.
static FSDPI_UNUSED fsdp_status fsdpi_no_memory(fsdpi_comm *c, size_t size, const char *what) {
    const char *whose;
    int64_t left = fsdpi_memory_left(&whose);
    fsdpi_text t = {c->error, sizeof c->error, 0};
    fsdpi_say(&t,
              "rank %d: alloc of %llu bytes (%.1f MiB) on each of %d ranks: %s; %s has %.1f MiB "
              "left. Free memory, raise the limit, or shard over more machines",
              c->boot->rank, (unsigned long long)size, (double)size / 1048576, c->boot->size, what,
              whose, (double)left / 1048576);
    return FSDP_ERR_OUT_OF_MEMORY;
}

// The two blocks of a world that is being opened, or the text of why there are none.
static int fsdpi_open_blocks(const fsdp_boot *boot, size_t comm_size, void **comm,
                             size_t world_size, void **world) {
    *comm = fsdpi_alloc(&boot->allocator, comm_size);
    *world = fsdpi_alloc(&boot->allocator, world_size);
    if (*comm && *world) return 1;
    fsdpi_free(&boot->allocator, *comm);
    fsdpi_free(&boot->allocator, *world);
    (void)snprintf(fsdpi_thread_error, sizeof fsdpi_thread_error, "rank %d: the allocator refused",
                   boot->rank);
    return 0;
}

// A failed open: its text goes where error_text(NULL) finds it.
static void fsdpi_open_failed(const fsdpi_comm *c) {
    fsdpi_copy_name(fsdpi_thread_error, sizeof fsdpi_thread_error, c->error);
}

#ifdef __cplusplus
}
#endif
#endif // FSDP_IMPLEMENTATION
