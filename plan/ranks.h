/* plan/ranks.h - texts of several ranks, run against each other

   A part of fsdp_plan.h. SPDX-License-Identifier: MIT (full text at the end of fsdp.h) */

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

// What ranks compare when they meet.
static uint64_t fsdpi_plan_fingerprint(const fsdpi_plan_listing *l, const fsdpi_plan_line *line) {
    uint64_t h = fsdpi_plan_mix((uint64_t)line->kind << 8 | line->label, line->count);
    h = fsdpi_plan_mix(h, (uint64_t)line->dtype << 16 | (uint64_t)line->out_dtype << 8 |
                              line->accumulate);
    h = fsdpi_plan_mix(h, line->digest);
    for (int i = 0; i < line->num_members; i++) {
        int unit = l->members[line->members + i].unit;
        const char *name = unit >= 0 ? l->units[unit].name : "";
        h = fsdpi_plan_mix_bytes(h, name, strlen(name));
    }
    return h;
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

static void fsdpi_plan_stuck(const fsdpi_plan_ranks *r, int rank, int other, int mismatch,
                             fsdp_plan_proof *out) {
    fsdpi_plan_out o = {out->text, sizeof out->text, 0, 0};
    fsdpi_plan_say_rank(&o, r, rank, mismatch ? -1 : other);
    fsdpi_plan_put(&o, mismatch ? ", which differs from\n" : "\n");
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
   a member that is elsewhere. -1: a member is there with another one. */
static int fsdpi_plan_meets(const fsdpi_plan_ranks *r, int rank, int *other) {
    const fsdpi_plan_listing *l = fsdpi_plan_of(r, rank);
    const fsdpi_plan_line *line = &l->lines[r->at[rank]];
    int all = 1;
    for (int i = 0; i < r->num; i++) {
        const fsdpi_plan_listing *theirs = fsdpi_plan_of(r, i);
        const fsdpi_plan_line *at;
        if (i == rank || !fsdpi_plan_shares_group(r, line, rank, i)) continue;
        *other = i;
        if (r->at[i] >= theirs->num_lines) return 0;
        at = &theirs->lines[r->at[i]];
        if (fsdpi_plan_is_replica_line(at) != fsdpi_plan_is_replica_line(line)) return 0;
        if (fsdpi_plan_fingerprint(theirs, at) != fsdpi_plan_fingerprint(l, line)) all = -1;
        if (all < 0) return -1;
    }
    return all;
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
            if (r->at[i] >= fsdpi_plan_of(r, i)->num_lines) continue;
            meets = fsdpi_plan_meets(r, i, &other);
            if (meets < 0) fsdpi_plan_stuck(r, i, other, 1, out);
            if (meets == 0 && stuck < 0) stuck = i, awaited = other;
            if (meets <= 0) continue;
            out->ops++;
            moved = 1;
            fsdpi_plan_pass(r, i);
        }
        if (!moved && stuck >= 0 && !out->refuted) fsdpi_plan_stuck(r, stuck, awaited, 0, out);
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
