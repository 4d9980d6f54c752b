/* plan/ranks.h - texts of several ranks, run against each other

   A part of fsdp_plan.h. SPDX-License-Identifier: MIT (full text at the end of fsdp.h) */
#ifndef FSDP_PLAN_H
#include "../../fsdp_plan.h"
#endif
#ifndef FSDPI_PLAN_RANKS_H
#define FSDPI_PLAN_RANKS_H

#include "listing.h"
#include "memory.h"
#include "objects.h"
#include "parse.h"
#include "prove.h"
#include "text.h"

#include <string.h>

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

static const char *fsdpi_plan_member_name(const fsdpi_plan_listing *l, const fsdpi_plan_line *line,
                                          int member) {
    int unit = l->members[line->members + member].unit;
    return unit >= 0 ? l->units[unit].name : "";
}

// What ranks compare when they meet: in what do two collectives differ? NULL: in nothing.
static const char *fsdpi_plan_differs_in(const fsdpi_plan_listing *l, const fsdpi_plan_line *a,
                                         const fsdpi_plan_listing *other,
                                         const fsdpi_plan_line *b) {
    if (a->kind != b->kind || a->label != b->label) return "kind";
    if (a->num_members != b->num_members) return "number of units";
    for (int i = 0; i < a->num_members; i++)
        if (strcmp(fsdpi_plan_member_name(l, a, i), fsdpi_plan_member_name(other, b, i)) != 0)
            return "unit";
    if (a->count != b->count) return "number of elements";
    if (a->dtype != b->dtype || a->out_dtype != b->out_dtype) return "dtypes";
    if (a->accumulate != b->accumulate) return "whether it adds";
    return a->digest != b->digest ? "segments" : NULL;
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

// mismatch: in what two ranks that meet differ; NULL: they do not meet.
static void fsdpi_plan_stuck(const fsdpi_plan_ranks *r, int rank, int other, const char *mismatch,
                             fsdp_plan_proof *out) {
    fsdpi_plan_out o = {out->text, sizeof out->text, 0, 0};
    fsdpi_plan_say_rank(&o, r, rank, mismatch ? -1 : other);
    if (mismatch) fsdpi_plan_put(&o, ", which differs in %s from", mismatch);
    fsdpi_plan_put(&o, "\n");
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
   a member that is elsewhere. -1: a member is there with another one, which differs in *what. */
static int fsdpi_plan_meets(const fsdpi_plan_ranks *r, int rank, int *other, const char **what) {
    const fsdpi_plan_listing *l = fsdpi_plan_of(r, rank);
    const fsdpi_plan_line *line = &l->lines[r->at[rank]];
    for (int i = 0; i < r->num; i++) {
        const fsdpi_plan_listing *theirs = fsdpi_plan_of(r, i);
        const fsdpi_plan_line *at;
        if (i == rank || !fsdpi_plan_shares_group(r, line, rank, i)) continue;
        *other = i;
        if (r->at[i] >= theirs->num_lines) return 0;
        at = &theirs->lines[r->at[i]];
        if (fsdpi_plan_is_replica_line(at) != fsdpi_plan_is_replica_line(line)) return 0;
        *what = fsdpi_plan_differs_in(l, line, theirs, at);
        if (*what) return -1;
    }
    return 1;
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
            const char *what = NULL;
            if (r->at[i] >= fsdpi_plan_of(r, i)->num_lines) continue;
            meets = fsdpi_plan_meets(r, i, &other, &what);
            if (meets < 0) fsdpi_plan_stuck(r, i, other, what, out);
            if (meets == 0 && stuck < 0) stuck = i, awaited = other;
            if (meets <= 0) continue;
            out->ops++;
            moved = 1;
            fsdpi_plan_pass(r, i);
        }
        if (!moved && stuck >= 0 && !out->refuted) fsdpi_plan_stuck(r, stuck, awaited, NULL, out);
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

#endif // FSDPI_PLAN_RANKS_H
