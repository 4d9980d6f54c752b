/* fsdp_signature.h - the signature of a rank's call, and its text for errors

   Ranks compare signatures before they move data, and every error text is made of them. Included by
   the comm base, the store and the devices. It moves no data and does not wait.

   SPDX-License-Identifier: MIT (full text at the end of fsdp.h) */
#ifndef FSDP_H
#include "../fsdp.h"
#endif
#ifndef FSDPI_BACKENDS_SIGNATURE_H
#define FSDPI_BACKENDS_SIGNATURE_H

#include "../src/base/macros.h"
#include "../src/base/os.h"
#include "../src/base/text.h"
#include "../src/core/flight.h" // operations other than collectives

#include <string.h>

/* The call that a rank is about to make. Ranks compare `key`, a hash of everything that must be
   equal. From the other fields error texts name the difference. The struct is sent unchanged: it
   has no pointers and no padding. */
typedef struct fsdpi_signature {
    uint64_t key;
    // For backends that read peers' memory: the buffer's offset in its allocation in bytes, and
    // that allocation's location, bytes and number. Ranks may differ in these.
    uint64_t offset, at, part, number;
    uint64_t fingerprint, count, segs, seq;
    uint64_t block, members; // split: location of the new group's block; hash of its members
    int64_t since_ns;        // time at which the rank began the call
    int32_t root;            // send, recv: world rank of the other side; broadcast: the root
    uint32_t num_segs;
    uint8_t kind, dtype, out_dtype, redop, in_place, state, reserved;
    uint8_t agree[FSDP_AGREE_COUNT]; // short hashes of the fingerprint's parts
    // Longer texts are cut. what: the name, and after its end the parameter without a gradient.
    char what[48], comm[32];
} fsdpi_signature;

#define FSDPI_RECORD_WORDS (sizeof(fsdpi_signature) / sizeof(uint64_t))
#define FSDPI_REASON       800

// A rank's current activity, which other ranks read if it is missing.
typedef struct fsdpi_activity {
    uint64_t last[FSDPI_RECORD_WORDS]; // its last operation on any comm, written word by word
    uint32_t busy;                     // [relaxed, release] number of current operations
    uint32_t writing;                  // [release] 1: `last` is being written
    uint32_t waits;                    // [release] 1 + the rank for which it waits; 0: not known
} fsdpi_activity;

enum { FSDPI_PEER_ABSENT, FSDPI_PEER_JOINED, FSDPI_PEER_LEFT, FSDPI_PEER_LOST };

// The state of a rank as other ranks know it. busy: 0: `text` was its last operation; 1: it is in
// that operation; FSDPI_WAITS_FOR + r: and waits there for rank r.
#define FSDPI_WAITS_FOR 2
typedef struct fsdpi_peer {
    int32_t state, busy;
    int64_t silent_ns; // time since its last beat; -1: the backend has no beats
    int64_t since_ns;  // since it began the operation
    char text[160];    // "": none so far
    char host[48];     // an address of its host; "": not known
} fsdpi_peer;

// The failure of a world. Only the first one counts, on all ranks.
typedef struct fsdpi_failure {
    int32_t status, rank;                    // rank: the one that reports it; -1: the store
    int32_t lost;                            // the rank that was lost, or -1
    char subject[192], reason[FSDPI_REASON]; // subject: the operation; "": no single operation
} fsdpi_failure;

/* -------------------------------------------------------------------------------------------- */
// Texts of signatures, peers and failures.

static int64_t fsdpi_boot_now(const fsdp_boot *boot) {
    return boot->clock.now_ns(boot->clock.user);
}

// Returns 1 if the device hangs: its memory then stays until the process ends.
static FSDPI_UNUSED int fsdpi_boot_is_hung(const fsdp_boot *boot) {
    return boot->hung && FSDPI_LOAD(boot->hung);
}

static FSDPI_UNUSED void fsdpi_boot_log(const fsdp_boot *boot, int level, const char *text) {
    if (boot->logger.log && level <= boot->log_level)
        (boot->logger.log)(level, FSDP_OK, boot->rank, text, boot->logger.user);
}

static int fsdpi_is_pair(int kind) { return kind == FSDP_OP_SEND || kind == FSDP_OP_RECV; }

// Adds "all_gather of 'h.3' on 'shard' (forward, op 17)" or "send of 'h.3' to rank 2 (op 18)".
static void fsdpi_say_op(fsdpi_text *t, const fsdpi_signature *r) {
    static const char *const states[FSDP_STATE_COUNT] = {"", "forward, ", "pre_backward, ",
                                                         "post_backward, "};
    if (r->kind == FSDPI_OPEN) fsdpi_text_add(t, "open of job '%s'", r->what);
    else if (r->kind == FSDPI_SPLIT) fsdpi_text_add(t, "split into '%s'", r->what);
    else if (r->kind == FSDPI_CLOSE) fsdpi_text_add(t, "close");
    else fsdpi_text_add(t, "%s of '%s'", fsdp_op_name(r->kind), r->what);
    if (fsdpi_is_pair(r->kind) && r->root >= 0)
        fsdpi_text_add(t, " %s rank %d", r->kind == FSDP_OP_SEND ? "to" : "from", (int)r->root);
    if (r->comm[0]) fsdpi_text_add(t, " on '%s'", r->comm);
    if (r->kind < FSDP_OP_COUNT)
        fsdpi_text_add(t, " (%sop %llu)", r->state < FSDP_STATE_COUNT ? states[r->state] : "",
                       (unsigned long long)r->seq);
}

// Adds "it is in all_gather of 'h.3' (forward, op 17), for 1.2 s". past: the rank has ended.
static FSDPI_UNUSED void fsdpi_say_done(fsdpi_text *t, int busy, int past, const char *operation,
                                        int64_t since_ns) {
    double since = (double)since_ns * 1e-9;
    if (busy) fsdpi_text_add(t, "it %s in %s, for %.1f s", past ? "was" : "is", operation, since);
    else fsdpi_text_add(t, "its last operation was %s, %.1f s ago", operation, since);
}

// Adds "it is in all_gather of 'h.3', for 1.2 s; last heard of 0.1 s ago".
static FSDPI_UNUSED void fsdpi_say_peer(fsdpi_text *t, const fsdpi_peer *p) {
    if (p->state == FSDPI_PEER_ABSENT) fsdpi_text_add(t, "it has not joined the job");
    if (p->state == FSDPI_PEER_LEFT) fsdpi_text_add(t, "it has shut down");
    if (p->state == FSDPI_PEER_ABSENT || p->state == FSDPI_PEER_LEFT) return;
    if (!p->text[0]) fsdpi_text_add(t, "it has not begun an operation");
    else fsdpi_say_done(t, p->busy, p->state == FSDPI_PEER_LOST, p->text, p->since_ns);
    if (p->silent_ns >= 0)
        fsdpi_text_add(t, "; last heard of %.1f s ago", (double)p->silent_ns * 1e-9);
}

// Adds a failure, for a rank that was in no operation of the world yet.
static FSDPI_UNUSED void fsdpi_say_failure(fsdpi_text *t, const fsdpi_failure *v) {
    if (v->subject[0]) fsdpi_text_add(t, "rank %d failed in %s: ", (int)v->rank, v->subject);
    if (v->reason[0]) fsdpi_text_add(t, "%s", v->reason);
    else fsdpi_text_add(t, "[E408] rank %d has aborted the job", (int)v->rank);
}

// Adds the fields in which two calls differ. If the operations differ, compares only operation and
// unit.
static FSDP_COLD void fsdpi_say_differences(fsdpi_text *t, const fsdpi_signature *a,
                                            const fsdpi_signature *b) {
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
    };
    static const char *const parts[FSDP_AGREE_COUNT] = {FSDP_AGREE_LIST(FSDPI_TEXT_OF)};
    const char *comma = " (differs in ";
    const size_t most = a->kind == b->kind ? sizeof fields / sizeof *fields : 2;
    for (size_t i = 0; i < most; i++) {
        if (!fields[i].differs) continue;
        fsdpi_text_add(t, "%s%s", comma, fields[i].name);
        comma = ", ";
    }
    for (size_t i = 0; i < FSDP_AGREE_COUNT && a->fingerprint != b->fingerprint; i++) {
        if (a->kind != b->kind || a->agree[i] == b->agree[i]) continue;
        fsdpi_text_add(t, "%s%s", comma, parts[i]);
        comma = ", ";
    }
    if (comma[0] == ',') fsdpi_text_add(t, ")");
    else if (a->fingerprint != b->fingerprint) fsdpi_text_add(t, " (differs in its settings)");
}

/* Writes word by word: another rank may read the signature for an error text meanwhile, which may
   then mix two operations. Ranks that compare signatures read after a barrier: these are whole. */
static void fsdpi_signature_put(uint64_t *to, const fsdpi_signature *record) {
    for (size_t i = 0; i < FSDPI_RECORD_WORDS; i++) {
        uint64_t word;
        memcpy(&word, (const char *)record + i * sizeof word, sizeof word);
        __atomic_store_n(&to[i], word, __ATOMIC_RELAXED);
    }
}

static fsdpi_signature fsdpi_signature_get(const uint64_t *from) {
    fsdpi_signature record;
    uint64_t words[FSDPI_RECORD_WORDS];
    for (size_t i = 0; i < FSDPI_RECORD_WORDS; i++)
        words[i] = __atomic_load_n(&from[i], __ATOMIC_RELAXED);
    memcpy(&record, words, sizeof record);
    record.what[sizeof record.what - 1] = record.comm[sizeof record.comm - 1] = 0;
    return record;
}

static FSDPI_UNUSED void fsdpi_activity_begin(fsdpi_activity *trace,
                                              const fsdpi_signature *record) {
    __atomic_add_fetch(&trace->busy, 1u, __ATOMIC_RELAXED);
    // Two threads of one rank may be here at once: the activity then has one of the operations.
    if (__atomic_exchange_n(&trace->writing, 1u, __ATOMIC_ACQUIRE)) return;
    fsdpi_signature_put(trace->last, record);
    FSDPI_STORE(&trace->writing, 0u);
}

static FSDPI_UNUSED void fsdpi_activity_end(fsdpi_activity *trace) {
    __atomic_sub_fetch(&trace->busy, 1u, __ATOMIC_RELEASE);
}

// Returns fsdpi_peer.busy, and the last operation as text, and its start.
static FSDPI_UNUSED int fsdpi_activity_read(const fsdpi_activity *trace, char *text, size_t cap,
                                            int64_t *since_ns) {
    fsdpi_signature last = fsdpi_signature_get(trace->last);
    fsdpi_text t = {text, cap, 0};
    fsdpi_say_op(&t, &last);
    *since_ns = last.since_ns;
    return FSDPI_LOAD(&trace->busy) ? 1 + (int)FSDPI_LOAD(&trace->waits) : 0;
}

// Notes the rank for which this one waits; -1: the wait is over. trace may be NULL.
static FSDPI_UNUSED void fsdpi_trace_wait(fsdpi_activity *trace, int rank) {
    if (trace) FSDPI_STORE(&trace->waits, (uint32_t)(rank + 1));
}

static FSDPI_NOINLINE void fsdpi_copy_name(char *to, size_t cap, const char *from) {
    memset(to, 0, cap);
    if (from) fsdpi_cut(to, cap, from);
}

#endif // FSDPI_BACKENDS_SIGNATURE_H
