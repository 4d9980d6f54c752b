/* test_why.c - where the time of a traced step went (trace/why.h): each nanosecond beside a model
   that asks for every nanosecond by itself; the simulated device's clock; texts of small traces.

   SPDX-License-Identifier: MIT */
#define TAGS NO(GLOO)
#include "harness.h"
#include "library.c"
#include "fsdp_trace.h"
#include "plan.h"

/* ---- made-up traces -------------------------------------------------------------------------- */

enum { MOST = 400, STEPS = 3 };

typedef struct {
    fsdpi_tr_rank rank;
    fsdpi_tr_record rec[MOST];
    int64_t peers[MOST];
    int32_t last[MOST];
    int truth[MOST]; /* of a COMPUTE record that waits: for which record; -1: for none */
    fsdpi_tr_step step[STEPS];
    int num;
    uint64_t draws, seed;
    int64_t host, compute, free_at[FSDP_STREAM_COUNT];
    char ends[1 << 12]; /* no two operations end at the same time */
} toy;

static int draw(toy *t, int below) {
    return (int)(lab_hash(t->seed, t->draws++, 7, 9) % (uint64_t)below);
}
static int toy_run(const toy *t) { return t->rank.head.run; }
static int toy_is_comm(const fsdpi_tr_record *r) {
    return r->kind == FSDP_OP_ALL_GATHER || r->kind == FSDP_OP_REDUCE_SCATTER ||
           r->kind == FSDP_OP_ALL_REDUCE || r->kind == FSDP_OP_BROADCAST;
}

static fsdpi_tr_record *toy_add(toy *t, int kind, int label, int stream, int64_t begin, int64_t end) {
    CHECK(t->num < MOST);
    fsdpi_tr_record *r = &t->rec[t->num];
    memset(r, 0, sizeof *r);
    r->kind = (uint8_t)kind, r->label = (uint8_t)label, r->stream = (uint8_t)stream;
    r->begin_ns = begin, r->end_ns = end;
    r->seq = (uint32_t)t->num + 1;
    r->what = (uint16_t)draw(t, 4);
    t->truth[t->num] = t->last[t->num] = -1;
    if (toy_is_comm(r) && draw(t, 2)) { /* matched: somebody came last, perhaps before this rank */
        t->last[t->num] = draw(t, 4);
        t->peers[t->num] = begin + draw(t, (int)(end - begin) + 1);
    }
    t->num++;
    return r;
}

/* A record on a stream that is not COMPUTE, issued now. */
static void toy_issue(toy *t) {
    static const struct {
        int kind, label, stream;
    } ops[] = {{FSDP_OP_ALL_GATHER, FSDP_LABEL_GATHER, FSDP_STREAM_GATHER},
               {FSDP_OP_COPY, FSDP_LABEL_COPY_OUT, FSDP_STREAM_GATHER},
               {FSDP_OP_REDUCE_SCATTER, FSDP_LABEL_REDUCE, FSDP_STREAM_REDUCE},
               {FSDP_OP_COPY, FSDP_LABEL_RED_OUT, FSDP_STREAM_REDUCE},
               {FSDP_OP_ALL_REDUCE, FSDP_LABEL_REPLICAS, FSDP_STREAM_ALLREDUCE},
               {FSDP_OP_ALL_REDUCE, FSDP_LABEL_CLIP, FSDP_STREAM_REDUCE},
               {FSDP_OP_UPDATE, FSDP_LABEL_COUNT, FSDP_STREAM_EXTENSION}};
    int i = draw(t, 7), s = ops[i].stream;
    int64_t begin = (t->host > t->free_at[s] ? t->host : t->free_at[s]) + draw(t, 4);
    int64_t end = begin + draw(t, 12);
    while (t->ends[end]) end++;
    t->ends[end] = 1;
    t->free_at[s] = end;
    toy_add(t, ops[i].kind, ops[i].label, s, begin, end);
}

/* COMPUTE waits for a record that was issued; or for none, if `of` is -1. */
static void toy_wait(toy *t, int of, int64_t *now) {
    const fsdpi_tr_record *op = of >= 0 ? &t->rec[of] : NULL;
    int label = !op                                            ? FSDP_LABEL_NONE
                : op->label == FSDP_LABEL_CLIP                 ? FSDP_LABEL_CLIP
                : op->stream == FSDP_STREAM_GATHER             ? FSDP_LABEL_GATHER
                : op->stream == FSDP_STREAM_EXTENSION          ? FSDP_LABEL_COUNT
                : draw(t, 2)                                   ? FSDP_LABEL_FINAL
                                                               : FSDP_LABEL_GRADS;
    int zeros = label == FSDP_LABEL_GRADS && draw(t, 2);
    int64_t reached = *now, begin = op && op->end_ns > reached ? op->end_ns : reached;
    int64_t end = begin + (zeros ? draw(t, 4) : 0);
    fsdpi_tr_record *r = toy_add(t, zeros ? FSDP_OP_ZERO : FSDP_OP_USE, label, FSDP_STREAM_COMPUTE,
                                 begin, end);
    r->waited_ns = (uint32_t)(begin - reached);
    if (r->waited_ns) t->truth[r - t->rec] = of;
    *now = end;
}

/* Records of a call. `now`: the clock of COMPUTE. */
static void toy_records(toy *t, int64_t *now) {
    for (int n = draw(t, 5); n > 0; n--) {
        const int what = draw(t, 4);
        const int64_t begin = *now + draw(t, 3), end = begin + draw(t, 8);
        static const int kinds[] = {FSDP_OP_COPY, FSDP_OP_UPDATE, FSDP_OP_NORM, FSDP_OP_BROADCAST,
                                    FSDP_OP_CALL};
        if (toy_run(t) == FSDP_RUN_INLINE && what < 3) {
            toy_issue(t); /* at once, in the caller's thread */
            fsdpi_tr_record *r = &t->rec[t->num - 1];
            const int64_t length = r->end_ns - r->begin_ns;
            r->begin_ns = begin, r->end_ns = begin + length;
            if (t->last[t->num - 1] >= 0) t->peers[t->num - 1] = begin + draw(t, (int)length + 1);
            *now = r->end_ns;
        } else if (toy_run(t) != FSDP_RUN_INLINE && what == 0) toy_issue(t);
        else if (toy_run(t) != FSDP_RUN_INLINE && what == 1) {
            int of = t->num - 1 - draw(t, 12);
            while (of >= 0 && (t->rec[of].kind >= FSDP_OP_HOOK ||
                               t->rec[of].stream == FSDP_STREAM_COMPUTE))
                of--;
            toy_wait(t, of, now);
        } else {
            toy_add(t, kinds[draw(t, 5)], FSDP_LABEL_NONE, FSDP_STREAM_COMPUTE, begin, end);
            *now = end;
        }
    }
}

static void toy_call(toy *t, int call) {
    const int at = t->num, streams = toy_run(t) == FSDP_RUN_STREAMS;
    t->host += draw(t, 6);
    toy_add(t, FSDPI_TR_CALL, call, FSDP_STREAM_COMPUTE, t->host, t->host);
    t->num = at + 1;
    t->rec[at].seq = (uint32_t)at + 2; /* of its first record */
    t->host += draw(t, 3);
    if (streams) {
        t->compute += draw(t, 9); /* work of the caller before it */
        if (t->compute < t->host) t->compute = t->host;
    }
    toy_records(t, streams ? &t->compute : &t->host);
    t->host += draw(t, 3);
    t->rec[at].end_ns = t->host;
    t->rec[at].slot = (uint32_t)(t->num - at - 1);
    /* An inner call, as params_changed of an optimizer. */
    if (call == FSDP_CALL_PARAMS_CHANGED && !streams) {
        int inner = t->num;
        toy_add(t, FSDPI_TR_CALL, call, FSDP_STREAM_COMPUTE, t->host - 1, t->host);
        t->rec[inner].seq = (uint32_t)inner + 1;
    }
}

static int toy_by_begin(const void *a, const void *b) {
    const fsdpi_tr_record *x = (const fsdpi_tr_record *)a, *y = (const fsdpi_tr_record *)b;
    if (x->begin_ns != y->begin_ns) return x->begin_ns < y->begin_ns ? -1 : 1;
    return x->seq < y->seq ? -1 : x->seq > y->seq;
}

/* Sorts records as the reader does, and what belongs to them. */
static void toy_sort(toy *t) {
    static toy old;
    int to[MOST];
    for (int i = 0; i < t->num; i++) t->rec[i].bytes = (uint64_t)i; /* unused otherwise */
    qsort(t->rec, (size_t)t->num, sizeof *t->rec, toy_by_begin);
    old = *t;
    for (int i = 0; i < t->num; i++) to[t->rec[i].bytes] = i;
    for (int i = 0; i < t->num; i++) {
        int from = (int)t->rec[i].bytes;
        t->last[i] = old.last[from], t->peers[i] = old.peers[from];
        t->truth[i] = old.truth[from] < 0 ? -1 : to[old.truth[from]];
    }
}

static void toy_make(toy *t, uint64_t seed, int run) {
    memset(t, 0, sizeof *t);
    t->seed = seed;
    t->rank.head.run = run;
    for (int s = 0; s < STEPS; s++) {
        t->step[s].number = (uint32_t)s + 3, t->step[s].first_seq = (uint32_t)t->num + 2;
        t->step[s].begin_ns = t->host;
        for (int n = 1 + draw(t, 4); n > 0; n--) toy_call(t, draw(t, 4)); /* pre_forward, ... */
        toy_call(t, FSDP_CALL_FINALIZE);
        if (draw(t, 2)) toy_call(t, FSDP_CALL_CLIP);
        if (draw(t, 2)) toy_call(t, FSDP_CALL_PARAMS_CHANGED);
        if (draw(t, 2)) toy_call(t, FSDP_CALL_ZERO_GRAD);
        t->step[s].end_ns = t->host;
    }
    toy_sort(t);
    t->rank.records = t->rec, t->rank.num_records = (uint64_t)t->num;
    t->rank.steps = t->step, t->rank.num_steps = STEPS;
    t->rank.peers_ns = t->peers, t->rank.last = t->last;
}

/* ---- the model: what COMPUTE does in one nanosecond ------------------------------------------- */

typedef struct {
    int64_t begin, end, part[FSDPI_WHY_PART_COUNT], comm, hidden, late;
} model;

static int model_runs(const toy *t, const fsdpi_tr_record *r) {
    return r->kind < FSDP_OP_HOOK &&
           (toy_run(t) == FSDP_RUN_INLINE || r->stream == FSDP_STREAM_COMPUTE);
}
static int model_part(const fsdpi_tr_record *op) { /* whose fault it is that COMPUTE waits */
    static const int parts[] = {FSDPI_WHY_OTHERS, FSDPI_WHY_GATHER, FSDPI_WHY_REDUCE,
                                FSDPI_WHY_REPLICAS, FSDPI_WHY_OTHERS};
    return op->label == FSDP_LABEL_CLIP   ? (int)FSDPI_WHY_CLIP
           : op->kind == FSDP_OP_UPDATE   ? (int)FSDPI_WHY_STEP
                                          : parts[op->stream];
}
static int model_is_late(const toy *t, int i, int64_t ns) {
    return i >= 0 && toy_is_comm(&t->rec[i]) && t->last[i] >= 0 && ns >= t->rec[i].begin_ns &&
           ns < t->peers[i];
}
/* Has COMPUTE come to a record of the call before the call ended? */
static int model_is_idle(const toy *t, const fsdpi_tr_record *call) {
    for (int i = 0; i < t->num; i++) {
        const fsdpi_tr_record *r = &t->rec[i];
        if (model_runs(t, r) && r->seq >= call->seq && r->seq < call->seq + call->slot &&
            r->begin_ns - r->waited_ns <= call->end_ns)
            return 1;
    }
    return toy_run(t) != FSDP_RUN_STREAMS;
}

/* What is waited for or run at a time; of two things that of the record that began first, a wait
   before a run. COMPUTE does one thing at a time, but its runs may follow its waits at once. */
static void model_nanosecond(const toy *t, int64_t ns, model *m) {
    int part = FSDPI_WHY_COMPUTE, late = 0, comm = 0;
    for (int i = 0; i < t->num; i++) {
        const fsdpi_tr_record *r = &t->rec[i];
        const int now = ns >= r->begin_ns && ns < r->end_ns;
        const int waits = ns >= r->begin_ns - r->waited_ns && ns < r->begin_ns;
        if (now && r->kind == FSDPI_TR_CALL && part < FSDPI_WHY_CALLS && model_is_idle(t, r))
            part = FSDPI_WHY_CALLS;
        comm |= now && toy_is_comm(r);
        if (!model_runs(t, r)) continue;
        if (now && !toy_is_comm(r) && part < FSDPI_WHY_UPDATE)
            part = r->kind == FSDP_OP_UPDATE ? FSDPI_WHY_UPDATE : FSDPI_WHY_COPY;
        if (now && toy_is_comm(r)) part = model_part(r), late = model_is_late(t, i, ns);
        if (!waits) continue;
        const int of = t->truth[i];
        part = r->label == FSDP_LABEL_GRADS ? (int)FSDPI_WHY_SLOT : model_part(&t->rec[of]);
        late = model_is_late(t, of, ns);
    }
    m->part[part]++;
    m->late += late, m->comm += comm;
    m->hidden += comm && part < FSDPI_WHY_GATHER;
}

static void model_step(const toy *t, int s, int64_t not_before, model *m) {
    const uint32_t from = t->step[s].first_seq,
                   to = s + 1 < STEPS ? t->step[s + 1].first_seq : UINT32_MAX;
    uint32_t last = 0;
    memset(m, 0, sizeof *m);
    m->begin = INT64_MAX;
    for (int i = 0; i < t->num; i++) {
        const fsdpi_tr_record *r = &t->rec[i];
        if (r->kind != FSDPI_TR_CALL || r->seq < from || r->seq >= to) continue;
        if (r->begin_ns < m->begin) m->begin = r->begin_ns;
        if (r->label != FSDP_CALL_FINALIZE && r->label != FSDP_CALL_CLIP &&
            r->label != FSDP_CALL_PARAMS_CHANGED)
            continue;
        if (r->end_ns > m->end) m->end = r->end_ns;
        if (r->seq + r->slot > last) last = r->seq + r->slot;
    }
    for (int i = 0; i < t->num && toy_run(t) == FSDP_RUN_STREAMS; i++)
        if (model_runs(t, &t->rec[i]) && t->rec[i].seq >= from && t->rec[i].seq < last &&
            t->rec[i].end_ns > m->end)
            m->end = t->rec[i].end_ns;
    if (m->begin < not_before) m->begin = not_before;
    for (int64_t ns = m->begin; ns < m->end; ns++) model_nanosecond(t, ns, m);
}

static const struct {
    const char *name;
    int run;
} runs[] = {{"inline", FSDP_RUN_INLINE}, {"lanes", FSDP_RUN_LANES}, {"streams", FSDP_RUN_STREAMS}};

TEST_P(why, sum_rule, runs) {
    static toy t;
    static int64_t seen[FSDPI_WHY_PART_COUNT];
    int64_t late = 0, hidden = 0, programs = 0;
    memset(seen, 0, sizeof seen);
    for (uint64_t seed = 0; seed < 1000; seed++) {
        toy_make(&t, h_seed() + seed, row->run);
        int64_t end = INT64_MIN;
        for (int s = 0; s < STEPS; s++) {
            fsdpi_why_step step;
            model m;
            int64_t sum = 0, own = 0;
            model_step(&t, s, end, &m);
            int made = fsdpi_why_make_step(&t.rank, (uint64_t)s, end, &step);
            CHECK_EQ_INT(made, m.begin < m.end);
            if (!made) continue;
            CHECK_EQ_INT(step.begin, m.begin);
            CHECK_EQ_INT(step.end, m.end);
            for (int p = 0; p < FSDPI_WHY_PART_COUNT; p++) {
                CHECK_MSG(step.part[p] == m.part[p], "seed %d, step %d, part %d: %lld, expected %lld",
                          (int)seed, s, p, (long long)step.part[p], (long long)m.part[p]);
                sum += step.part[p], seen[p] += step.part[p];
            }
            CHECK_EQ_INT(sum, step.end - step.begin);
            CHECK_EQ_INT(step.part[FSDPI_WHY_COMPUTE] + fsdpi_why_exposed(&step) +
                             fsdpi_why_host(&step),
                         step.end - step.begin);
            for (int i = 0; i < step.num_spans; i++) own += step.spans[i].own;
            CHECK_EQ_INT(own + step.part[FSDPI_WHY_COMPUTE], step.end - step.begin);
            CHECK_EQ_INT(step.comm, m.comm);
            CHECK_EQ_INT(step.hidden, m.hidden);
            CHECK_EQ_INT(step.late, m.late);
            late += step.late, hidden += step.hidden, programs++;
            end = step.end;
            free(step.spans);
        }
    }
    h_message("%d steps", (int)programs);
    for (int p = 0; p < FSDPI_WHY_PART_COUNT; p++) /* inline nothing waits for a slot, or an update */
        CHECK_EQ_INT(seen[p] > 0, row->run != FSDP_RUN_INLINE ||
                                      (p != FSDPI_WHY_SLOT && p != FSDPI_WHY_STEP));
    CHECK(late > 0);
    CHECK_EQ_INT(hidden > 0, row->run != FSDP_RUN_INLINE);
}

/* ---- the simulated device -------------------------------------------------------------------- */

enum { FIRST = 1, LAST = 3 }; /* traced steps */

typedef struct {
    sim s;
    plan_net net;
    plan_bed b;
    fsdp_world *w;
    fsdp_adamw *adamw;
    fsdp_trace *trace;
    int64_t work[PLAN_CALLS + 4]; /* of the caller, behind each call; then finalize, clip, adamw */
    int clips;
    int64_t idle[LAST + 1], compute[LAST + 1], comm[LAST + 1]; /* what the clocks say of a step */
    fsdpi_tr_job job;
} bed;

static int64_t bed_comm(const bed *d) { /* of all collectives so far, one after another */
    int64_t ns = 0;
    for (int k = 0; k < FSDP_OP_COUNT; k++)
        ns += d->s.latency_ns * (int64_t)d->s.colls[k] + (int64_t)d->s.coll_bytes[k];
    return ns;
}
static int64_t bed_idle(const bed *d) {
    return d->s.now[FSDP_STREAM_COMPUTE] - d->s.busy[FSDP_STREAM_COMPUTE];
}

static void bed_step(bed *d, int step) {
    const plan_net *n = &d->net;
    const int64_t idle = bed_idle(d), comm = bed_comm(d);
    int64_t compute = 0;
    int i = 0;
    for (; i < n->num_calls; i++) {
        const int unit = n->calls[i].unit, call = n->calls[i].call;
        CALL(d->w, plan_hook(&d->b, unit, call));
        if (call == FSDP_CALL_PRE_FORWARD) plan_look(&d->b, unit, i, 0);
        if (call == FSDP_CALL_PRE_BACKWARD) plan_look(&d->b, unit, i, 1);
        sim_compute(&d->s, d->work[i]);
        compute += d->work[i];
    }
    CALL(d->w, fsdp_finalize_backward(d->b.model));
    sim_compute(&d->s, d->work[i]);
    if (d->clips) {
        CALL(d->w, fsdp_clip_grad_norm(d->b.model, 1, NULL));
        sim_compute(&d->s, d->work[i + 1]);
        compute += d->work[i + 1];
    }
    CALL(d->w, fsdp_adamw_step(d->adamw, 1e-3));
    if (step <= LAST) {
        d->idle[step] = bed_idle(d) - idle;
        d->comm[step] = bed_comm(d) - comm, d->compute[step] = compute + d->work[i];
    }
    sim_compute(&d->s, d->work[i + 2]);
    CALL(d->w, fsdp_zero_grad(d->b.model));
    d->b.step++;
}

/* Steps of a net, traced, and the trace read. The caller frees the job. */
static void bed_run(bed *d, const char *dir) {
    fsdp_trace_desc td = FSDP_ZERO;
    char why[256];
    d->w = sim_open(&d->s);
    CHECK(d->w != NULL);
    plan_open(&d->b, &d->net, d->w);
    CALL(d->w, fsdp_adamw_create(d->b.model, NULL, &d->adamw));
    td.dir = dir, td.first_step = FIRST, td.last_step = LAST;
    CALL(d->w, fsdp_trace_start(d->b.model, &td, &d->trace));
    for (int step = 0; step <= LAST + 1; step++) {
        if (step == FIRST) sim_host_waits(&d->s);
        bed_step(d, step);
    }
    CALL(d->w, fsdp_trace_stop(d->trace));
    fsdp_model_destroy(d->b.model);
    CHECK_EQ_INT(sim_close(&d->s), 0);
    CHECK_MSG(!fsdpi_tr_read(dir, NULL, 0, &d->job, why, sizeof why), "%s", why);
}

static int below(uint64_t seed, int what, int number) {
    return (int)(lab_hash(seed, (uint64_t)what, 11, 5) % (uint64_t)number);
}

static void bed_draw(bed *d, uint64_t seed, int async) {
    static const fsdp_dtype dtypes[] = {FSDP_DTYPE_KEEP, FSDP_BF16};
    int order[8];
    memset(d, 0, sizeof *d);
    d->net = plan_chain(1 + below(seed, 0, 6), 1 + below(seed, 1, 40), 1 + below(seed, 2, 12));
    for (int i = 0; i < 8; i++) order[i] = below(seed, 20 + i, d->net.num_units);
    if (below(seed, 3, 3) == 0) d->net.num_calls = 0, plan_visit(&d->net, order, 8);
    d->net.scaled = below(seed, 4, 4);
    d->net.replicas = below(seed, 5, 3) ? 0 : 2;
    d->net.model.param_dtype = dtypes[below(seed, 6, 2)];
    d->net.model.reduce_dtype = d->net.model.param_dtype ? FSDP_F32 : FSDP_DTYPE_KEEP;
    d->net.never = below(seed, 7, 2) ? 0 : 1 + below(seed, 8, d->net.num_units);
    d->net.sets = below(seed, 9, 3) ? 0 : PLAN_LISTS;
    if (below(seed, 10, 4) == 0) d->net.sets |= PLAN_SUM_HOOK | PLAN_GRAD_HOOK;
    sim_init(&d->s, below(seed, 11, 4) ? 4 : 2, 0);
    d->s.async = async, d->s.fused = below(seed, 12, 2);
    d->s.latency_ns = below(seed, 13, 3000), d->s.coll_bytes_per_ns = 1;
    d->s.copy_bytes_per_ns = below(seed, 14, 20);
    d->clips = below(seed, 15, 2);
    for (int i = 0; i < PLAN_CALLS + 4; i++) d->work[i] = below(seed, 100 + i, 6000);
}

static const struct {
    const char *name;
    int async;
} devices[] = {{"inline", 0}, {"streams", 1}};

/* 1,000 programs in all. What COMPUTE waits is what its clock did not work. */
TEST_P(why, simulated_device, devices) {
    static bed d;
    int64_t exposed = 0, computed = 0;
    for (uint64_t seed = 0; seed < 500; seed++) {
        char dir[4096];
        int64_t end = INT64_MIN;
        snprintf(dir, sizeof dir, "%s/%d", h_tmpdir(), (int)seed);
        bed_draw(&d, h_seed() + seed, row->async);
        plan_sim = &d.s;
        bed_run(&d, dir);
        CHECK_EQ_INT((int64_t)d.job.rank[0].num_steps, LAST - FIRST + 1);
        CHECK_EQ_INT((int64_t)d.job.rank[0].head.dropped, 0);
        for (int i = FIRST; i <= LAST; i++) {
            fsdpi_why_step step;
            CHECK_EQ_INT(fsdpi_why_make_step(&d.job.rank[0], (uint64_t)(i - FIRST), end, &step), 1);
            int64_t waits = fsdpi_why_exposed(&step), host = fsdpi_why_host(&step);
            int64_t all = step.part[FSDPI_WHY_COMPUTE] + waits + host;
            CHECK_EQ_INT(all, step.end - step.begin);
            CHECK_MSG(waits == (row->async ? d.idle[i] : d.comm[i]), "seed %d, step %d: %lld of %lld",
                      (int)seed, i, (long long)waits,
                      (long long)(row->async ? d.idle[i] : d.comm[i]));
            if (!row->async) CHECK_EQ_INT(step.part[FSDPI_WHY_COMPUTE], d.compute[i]);
            if (!row->async) CHECK_EQ_INT(step.hidden, 0);
            if (!row->async) CHECK_EQ_INT(step.comm, waits);
            exposed += waits, computed += step.part[FSDPI_WHY_COMPUTE];
            end = step.end;
            free(step.spans);
        }
        fsdpi_tr_free(&d.job);
    }
    h_message("exposed %lld us, compute %lld us", (long long)exposed / 1000,
              (long long)computed / 1000);
    CHECK(exposed > 0 && computed > 0);
}

/* spec: 4 layers, forward 3 us, backward 6 us each; a gather 1 us, a reduction 2 us. */
TEST_P(why, worked_example, devices) {
    static bed d;
    char text[4096];
    fsdpi_why y;
    memset(&d, 0, sizeof d);
    d.net = plan_chain(4, 10, 100); /* in bf16: halves of 1000 bytes; gradients are reduced in f32 */
    d.net.num_params = 1;
    d.net.model.param_dtype = FSDP_BF16, d.net.model.reduce_dtype = FSDP_F32;
    sim_init(&d.s, 2, 0);
    d.s.async = row->async, d.s.fused = 0;
    d.s.latency_ns = 0, d.s.coll_bytes_per_ns = 1, d.s.copy_bytes_per_ns = 0;
    for (int i = 0; i < d.net.num_calls; i++)
        d.work[i] = d.net.calls[i].call == FSDP_CALL_PRE_FORWARD    ? 3000
                    : d.net.calls[i].call == FSDP_CALL_PRE_BACKWARD ? 6000
                                                                    : 0;
    plan_sim = &d.s;
    bed_run(&d, h_tmpdir());
    CHECK_EQ_INT(fsdpi_why_make(&d.job, &y), 1);
    CHECK_EQ_INT(y.step.end - y.step.begin, row->async ? 39000 : 52000);
    CHECK_EQ_INT(y.step.part[FSDPI_WHY_COMPUTE], 36000);
    CHECK_EQ_INT(y.step.part[FSDPI_WHY_GATHER], row->async ? 1000 : 8000);
    CHECK_EQ_INT(y.step.part[FSDPI_WHY_REDUCE], row->async ? 2000 : 8000);
    CHECK_EQ_INT(fsdpi_why_host(&y.step), 0);
    CHECK_EQ_INT(y.step.comm, row->async ? 14000 : 16000); /* two are beside others */
    fsdpi_why_end(&y);
    fsdpi_tr_free(&d.job);
    CHECK_OK(fsdp_trace_report(h_tmpdir(), text, sizeof text));
    h_message("%s", text);
}
