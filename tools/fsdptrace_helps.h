/* fsdptrace_helps.h - what would make a recorded step shorter: it is simulated again, with one
   option changed

   The model of a trace is made again, in a world without peers whose memory is only addresses
   (backends/fsdp_fake.h), as in tools/fsdpfit. Its calls run there as a dry run, and
   fsdp_plan_simulate returns how long they take with the costs of the trace.

   SPDX-License-Identifier: MIT */
#ifndef FSDP_TOOLS_FSDPTRACE_HELPS_H
#define FSDP_TOOLS_FSDPTRACE_HELPS_H

#include "../backends/fsdp_fake.h"
#include "../fsdp_plan.h"
#include "../fsdp_trace.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

enum { HELPS_UNITS = 3, HELPS_LINES = 3, HELPS_OPTIONS = HELPS_UNITS + 3, HELPS_AHEAD = 64 };
#define HELPS_MOST_ERROR 0.15 // largest relative error of a simulation of the recorded step
#define HELPS_LEAST_GAIN 0.01 // smallest gain that is reported, as a share of the step

// Options that a simulation changes, compared with the recorded step. All zero: none.
typedef struct helps_option {
    const char *text;
    int reshards;        // 1 + the unit that never reshards; -1: all
    int overlaps;        // worker threads in place of inline
    int prefetches;      // forward gathers the next unit ahead
    int planned;
    int64_t gain, bytes; // nanoseconds; of slots
} helps_option;

typedef struct helps {
    const fsdpi_why *why;
    const fsdpi_tr_rank *rank;
    const fsdpi_tr_event **calls;           // the program of the step
    int num_calls, shards, replicas, plain; // plain: reductions neither cast nor scale: copies do
    int leads;     // 1: COMPUTE works before the first call, whose gather is under way then
    int64_t *work; // [leads + num_calls] the caller's nanoseconds after each call
    fsdp_plan_cost cost;
} helps;

/* ---- the program and its costs --------------------------------------------------------------- */

// Fits latency + bytes / rate to collectives over `ranks` ranks, by least squares; bytes: those of
// the full buffer. If all have equal bytes, the latency is 0, so that bucketing gains nothing.
static void helps_fit(const helps *h, int kind, double ranks, double *latency, double *rate) {
    const double full = ranks < 2 ? 1 : ranks / (ranks - 1) / (kind == FSDP_OP_ALL_REDUCE ? 2 : 1);
    double n = 0, x = 0, y = 0, xx = 0, xy = 0;
    for (uint64_t i = 0; i < h->rank->num_records; i++) {
        const fsdpi_tr_event *r = &h->rank->records[i];
        if (r->kind != kind || r->label == FSDP_LABEL_CLIP || fsdpi_tr_is_world(r)) continue;
        if (r->begin_ns < h->why->step.begin || r->end_ns > h->why->step.end) continue;
        const double bytes = full * (double)r->bytes, ns = (double)(r->end_ns - r->begin_ns);
        n++, x += bytes, y += ns, xx += bytes * bytes, xy += bytes * ns;
    }
    const double spread = n * xx - x * x;
    double slope = spread > 1e-6 * xx * n ? fmax(0, (n * xy - x * y) / spread) : x > 0 ? y / x : 0;
    *latency = n > 0 ? (y - slope * x) / n : 0;
    if (*latency < 0) *latency = 0, slope = x > 0 ? y / x : 0;
    *rate = slope > 0 ? 1 / slope : 0;
}

/* Returns the caller's work after a call: until the next call begins. On streams: from the call's
   last op on COMPUTE until COMPUTE comes to the next call. */
static int64_t helps_work(const helps *h, int i) {
    const fsdpi_tr_event *call = h->calls[i];
    const int is_last = i + 1 == h->num_calls;
    int64_t begin = call->end_ns, end = is_last ? h->why->step.end : h->calls[i + 1]->begin_ns;
    uint32_t next = UINT32_MAX;
    int has = h->rank->head.run != FSDP_RUN_STREAMS;
    if (!has) end = h->why->step.end;
    for (uint64_t k = 0; k < h->rank->num_records; k++) {
        const fsdpi_tr_event *r = &h->rank->records[k];
        if (h->rank->head.run != FSDP_RUN_STREAMS || !fsdpi_why_on_compute(h->rank, r)) continue;
        if (fsdpi_why_has(call, r)) begin = r->end_ns, has = 1;
        else if (!fsdpi_tr_is_world(r) && r->seq > call->seq && r->seq < next && !is_last)
            next = r->seq, end = r->begin_ns - r->waited_ns;
    }
    return has && end > begin ? end - begin : 0;
}

// Returns the time from the first call of the host until COMPUTE comes to it, on streams.
static int64_t helps_lead(const helps *h) {
    const fsdpi_tr_event *call = h->calls[0], *first = NULL;
    for (uint64_t k = 0; k < h->rank->num_records; k++) {
        const fsdpi_tr_event *r = &h->rank->records[k];
        if (fsdpi_why_has(call, r) && fsdpi_why_on_compute(h->rank, r) &&
            (!first || r->seq < first->seq))
            first = r;
    }
    const int known = first && h->rank->head.run == FSDP_RUN_STREAMS &&
                      call->label == FSDP_CALL_PRE_FORWARD;
    return known ? first->begin_ns - first->waited_ns - h->why->step.begin : 0;
}

static int helps_by_seq(const void *a, const void *b) {
    const uint32_t x = (*(const fsdpi_tr_event *const *)a)->seq,
                   y = (*(const fsdpi_tr_event *const *)b)->seq;
    return x < y ? -1 : x > y;
}

// Reads the program of the step and its costs. Returns NULL, or the reason why a simulation is
// impossible.
static const char *helps_begin(helps *h, const fsdpi_why *y) {
    const fsdpi_tr_rank *rank = y->step.rank;
    const fsdpi_tr_step *step = rank->steps;
    double bytes = 0, copying = 0, issuing = 0, ops = 0;
    memset(h, 0, sizeof *h);
    h->why = y, h->rank = rank;
    h->calls = (const fsdpi_tr_event **)calloc((size_t)rank->num_records + 1, sizeof *h->calls);
    h->work = (int64_t *)calloc((size_t)rank->num_records + 2, sizeof *h->work);
    if (!h->calls || !h->work) return "no memory";
    if (!rank->num_units) return "there is no unit";
    h->shards = rank->units[0].shards, h->replicas = rank->units[0].replicas;
    for (uint64_t u = 0; u < rank->num_units; u++)
        if (rank->units[u].shards != h->shards || rank->units[u].replicas != h->replicas ||
            h->shards > FSDPI_FAKE_RANKS / h->replicas)
            return "units have different meshes";
    for (uint64_t p = FSDP_POOL_COUNT; p < rank->num_pools; p++)
        if (!strcmp(fsdpi_tr_text(rank, rank->pools[p].name), "arena"))
            return "the steps are planned already";
    while (step->number != y->step.number) step++;
    const int is_last = step + 1 == rank->steps + rank->num_steps;
    const uint32_t length = is_last ? UINT32_MAX / 2 : step[1].first_seq - step->first_seq;
    for (uint64_t i = 0; i < rank->num_records; i++) {
        const fsdpi_tr_event *r = &rank->records[i];
        const int is_call = r->kind == FSDPI_TR_CALL && r->label <= FSDP_CALL_FINALIZE;
        if (is_call && r->seq - step->first_seq < length) {
            if (r->label != FSDP_CALL_FINALIZE && r->what >= rank->num_units)
                return "a call is of no unit";
            h->calls[h->num_calls++] = r;
            issuing += (double)(r->end_ns - r->begin_ns);
        }
        if (r->begin_ns < y->step.begin || r->end_ns > y->step.end) continue;
        ops += r->kind < FSDP_OP_HOOK;
        if (r->kind != FSDP_OP_COPY && r->kind != FSDP_OP_ZERO) continue;
        bytes += (double)r->bytes, copying += (double)(r->end_ns - r->begin_ns);
    }
    qsort(h->calls, (size_t)h->num_calls, sizeof *h->calls, helps_by_seq);
    if (!h->num_calls || h->calls[h->num_calls - 1]->label != FSDP_CALL_FINALIZE)
        return "the step does not end with finalize";
    fsdp_plan_cost *c = &h->cost;
    helps_fit(h, FSDP_OP_ALL_GATHER, h->shards, &c->gather_latency_ns, &c->gather_bytes_per_ns);
    helps_fit(h, FSDP_OP_REDUCE_SCATTER, h->shards, &c->reduce_latency_ns, &c->reduce_bytes_per_ns);
    helps_fit(h, FSDP_OP_ALL_REDUCE, h->replicas, &c->replica_latency_ns, &c->replica_bytes_per_ns);
    c->copy_bytes_per_ns = copying > 0 ? bytes / copying : 0;
    if (rank->head.run != FSDP_RUN_STREAMS) issuing = (double)y->step.category[FSDPI_WHY_CALLS];
    c->issue_ns = ops > 0 ? issuing / ops : 0;
    h->work[0] = helps_lead(h);
    h->leads = h->work[0] > 0;
    for (int i = 0; i < h->num_calls; i++) h->work[h->leads + i] = helps_work(h, i);
    c->compute_ns = h->work, c->num_compute = h->leads + h->num_calls;
    return NULL;
}

/* ---- the model, once more -------------------------------------------------------------------- */

static fsdp_status helps_unit(const helps *h, fsdp_model *m, int u, const helps_option *o,
                              const fsdpi_tr_param *from, fsdp_unit **out) {
    const fsdpi_tr_unit *unit = &h->rank->units[u];
    fsdp_param_desc *params = (fsdp_param_desc *)calloc((size_t)unit->num_params + 1,
                                                        sizeof *params);
    fsdp_unit_desc d = FSDP_ZERO;
    if (!params) return FSDP_ERR_OUT_OF_MEMORY;
    for (int i = 0; i < unit->num_params; i++) {
        params[i].dtype = (fsdp_dtype)from[i].dtype, params[i].ndim = from[i].ndim;
        params[i].shard_dim = from[i].shard_dim, params[i].frozen = !from[i].requires_grad;
        memcpy(params[i].shape, from[i].shape, sizeof params[i].shape);
    }
    d.name = fsdpi_tr_name(h->rank, (uint16_t)u);
    d.params = params, d.num_params = unit->num_params;
    d.param_dtype = (fsdp_dtype)unit->param_dtype, d.reduce_dtype = (fsdp_dtype)unit->reduce_dtype;
    d.reshard_after_forward = o->reshards == -1 || o->reshards == u + 1
                                  ? (int)FSDP_RESHARD_NEVER
                                  : unit->reshard_after_forward;
    fsdp_status status = fsdp_fully_shard(m, &d, out);
    free(params);
    return status;
}

// Sets the forward prefetch lists of units as recorded, or with the option to the next unit.
static fsdp_status helps_prefetch(const helps *h, const helps_option *o, fsdp_unit **units) {
    fsdp_status status = FSDP_OK;
    for (int i = 0; i < h->num_calls && !status; i++) {
        const fsdpi_tr_event *call = h->calls[i];
        fsdp_unit *ahead[HELPS_AHEAD];
        int num = 0, next = i + 1;
        if (call->label != FSDP_CALL_PRE_FORWARD) continue;
        for (uint64_t k = 0; k < h->rank->num_records && num < HELPS_AHEAD; k++) {
            const fsdpi_tr_event *r = &h->rank->records[k];
            if (r->kind == FSDP_OP_ALL_GATHER && fsdpi_why_has(call, r) && r->what != call->what &&
                r->what < h->rank->num_units)
                ahead[num++] = units[r->what];
        }
        while (next < h->num_calls && h->calls[next]->label != FSDP_CALL_PRE_FORWARD) next++;
        if (o->prefetches && !num && next < h->num_calls && h->calls[next]->what != call->what)
            ahead[num++] = units[h->calls[next]->what];
        if (num) status = fsdp_set_modules_to_forward_prefetch(units[call->what], ahead, num);
    }
    return status;
}

static fsdp_status helps_step(const helps *h, fsdp_model *m, fsdp_unit **units) {
    static fsdp_status (*const calls[])(fsdp_unit *) = {
        fsdp_pre_forward, fsdp_post_forward, fsdp_pre_backward, fsdp_post_backward,
        fsdp_unshard,     fsdp_wait,         fsdp_reshard};
    fsdp_status status = h->leads ? fsdp_unshard(units[h->calls[0]->what]) : FSDP_OK;
    for (int i = 0; i + 1 < h->num_calls && !status; i++) {
        const int call = h->calls[i]->label;
        fsdp_unit *u = call < FSDP_CALL_FINALIZE ? units[h->calls[i]->what] : NULL;
        status = u ? calls[call](u) : fsdp_finalize_backward(m);
        for (int k = 0; call == FSDP_CALL_PRE_BACKWARD && k < u->desc.num_params; k++)
            if (u->params[k].requires_grad) (void)fsdp_grad(u, k);
    }
    if (!status) status = fsdp_finalize_backward(m);
    if (!status) status = fsdp_params_changed(m);
    return status ? status : fsdp_zero_grad(m);
}

static fsdp_status helps_model(const helps *h, const helps_option *o, fsdp_world *w,
                               fsdp_model **m, fsdp_unit **units) {
    const fsdpi_tr_header *head = &h->rank->head;
    const fsdpi_tr_param *params = h->rank->params;
    fsdp_mesh_desc md = FSDP_ZERO;
    fsdp_model_desc d = FSDP_ZERO;
    fsdp_mesh *mesh = NULL;
    md.ndim = 2, md.shape[0] = h->replicas, md.shape[1] = h->shards;
    md.names[0] = "replicas", md.names[1] = "shards";
    fsdp_status status = h->replicas > 1 ? fsdp_mesh_create(w, &md, &mesh) : FSDP_OK;
    d.mesh = mesh, d.param_dtype = (fsdp_dtype)head->param_dtype;
    d.reduce_dtype = (fsdp_dtype)head->reduce_dtype, d.grad_dtype = (fsdp_dtype)head->grad_dtype;
    d.reshard_after_forward = head->reshard_after_forward, d.cpu_offload = head->cpu_offload;
    d.implicit_prefetch = head->implicit_prefetch, d.prefetch_bytes = head->prefetch_bytes;
    d.direct_min = head->direct_min;
    if (!status) status = fsdp_model_create(w, &d, m);
    for (int u = 0; u < (int)h->rank->num_units && !status; u++) {
        status = helps_unit(h, *m, u, o, params, &units[u]);
        params += h->rank->units[u].num_params;
    }
    return status ? status : helps_prefetch(h, o, units);
}

// Simulates a step with an option. Returns 0, or a failure, whose text is in `why`.
static fsdp_status helps_simulate(const helps *h, const helps_option *o, fsdp_plan_times *out,
                                  char *why, size_t cap) {
    const int run = h->rank->head.run, streams = run == FSDP_RUN_STREAMS;
    fsdp_fake fake = FSDP_ZERO;
    fsdp_world_desc wd = FSDP_ZERO;
    fsdp_world *w = NULL;
    fsdp_model *m = NULL;
    fsdp_plan *plan = NULL;
    fsdp_unit **units = (fsdp_unit **)calloc((size_t)h->rank->num_units, sizeof *units);
    if (!units) return FSDP_ERR_OUT_OF_MEMORY;
    fake.addresses = 1, fake.plain = h->plain;
    wd.backend = "fake", wd.user = &fake, wd.log_level = FSDP_LOG_NONE;
    wd.device_ops = fsdp_fake_device_ops(streams), wd.world_size = h->shards * h->replicas;
    wd.comm_threads = run == FSDP_RUN_THREADS || o->overlaps ? 2 : -1;
    fsdp_status status = fsdp_init(&wd, &w);
    if (!status) status = helps_model(h, o, w, &m, units);
    if (!status) status = fsdp_plan_create(m, NULL, &plan);
    for (int step = 0; step < 2 && !status; step++) status = helps_step(h, m, units);
    if (!status) status = fsdp_plan_simulate(plan, 0, !o->planned, &h->cost, out);
    if (status) snprintf(why, cap, "%.250s", fsdp_last_error(w));
    if (w && fsdp_shutdown(w) && !status) status = FSDP_ERR_INTERNAL;
    free(units);
    return status;
}

// Simulates the recorded step. The trace does not say which kind of reductions it had: takes the
// kind whose time is nearer to the record.
static fsdp_status helps_simulate_record(helps *h, fsdp_plan_times *out, char *why, size_t cap) {
    const fsdpi_why_step *step = &h->why->step;
    fsdp_plan_times times[2];
    helps_option none;
    fsdp_status status = FSDP_OK;
    memset(&none, 0, sizeof none);
    for (h->plain = 0; h->plain < 2 && !status; h->plain++)
        status = helps_simulate(h, &none, &times[h->plain], why, cap);
    if (status) return status;
    h->plain = llabs(times[1].step_ns - (step->end - step->begin)) <
               llabs(times[0].step_ns - (step->end - step->begin));
    *out = times[h->plain];
    return FSDP_OK;
}

/* ---- what helps ------------------------------------------------------------------------------ */

// Orders options by gain per byte, the largest first.
static int helps_by_worth(const void *a, const void *b) {
    const helps_option *x = (const helps_option *)a, *y = (const helps_option *)b;
    const double left = (double)x->gain * fmax(1, (double)y->bytes),
                 right = (double)y->gain * fmax(1, (double)x->bytes);
    return (left < right) - (left > right);
}

// Lists the options to try. Units are those for whose gathers COMPUTE waits longest.
static int helps_list(const helps *h, helps_option list[HELPS_OPTIONS]) {
    const int is_inline = h->rank->head.run == FSDP_RUN_INLINE;
    const helps_option always[] = {
        {"reshard_after_forward never on all units", -1, 0, 0, 0, 0, 0},
        {is_inline ? "worker threads (FSDP_COMM_THREADS=2)" : "forward prefetch of the next unit", 0,
         is_inline, !is_inline, 0, 0, 0},
        {"a plan (fsdp_plan_create)", 0, 0, 0, 1, 0, 0}};
    int num = 0;
    for (int worst; num < HELPS_UNITS; num++) {
        int64_t most = 0;
        for (int u = 0; u < (int)h->rank->num_units; u++) {
            int64_t ns = 0;
            for (int32_t i = 0; i < h->why->step.num_spans; i++) {
                const fsdpi_why_span *s = &h->why->step.spans[i];
                if (s->category == FSDPI_WHY_GATHER && s->op && s->op->what == u) ns += s->own;
            }
            for (int k = 0; k < num; k++) ns *= list[k].reshards != 1 + u;
            if (ns > most) most = ns, worst = u;
        }
        if (!most) break;
        memset(&list[num], 0, sizeof list[num]);
        list[num].reshards = 1 + worst;
    }
    memcpy(&list[num], always, sizeof always);
    return num + (int)(sizeof always / sizeof *always);
}

static void helps_say(const helps *h, const helps_option *o, fsdpi_why_text *t) {
    char letter;
    const double unit = fsdpi_why_unit(llabs(o->bytes), &letter);
    if (o->text) fsdpi_why_say(t, "%s", o->text);
    else
        fsdpi_why_say(t, "reshard_after_forward never on %s",
                      fsdpi_tr_name(h->rank, (uint16_t)(o->reshards - 1)));
    fsdpi_why_say(t, " %+.*f ms for %+.1f %cB\n", FSDPI_WHY_MS(t, -o->gain),
                  (double)o->bytes / unit, letter);
}

/* Says what would help, an advice a line, or why that is not known. most: this many lines.
   Returns 0 if nothing helps. Of a step of microbatches it is the last one that is simulated. */
static int helps_print(const fsdpi_why *whole, fsdpi_why_text *t, int most) {
    helps_option list[HELPS_OPTIONS];
    fsdp_plan_times base, times;
    char why[256] = "no memory";
    helps h;
    int num = 0;
    fsdpi_why last = *whole, *y = &last;
    const uint64_t to = whole->step.to;
    last.step.spans = NULL;
    if (to > whole->step.from) {
        fsdpi_why_step before;
        (void)fsdpi_why_bounds(whole->step.rank, to - 1, to - 1, INT64_MIN, &before);
        if (fsdpi_why_make_step(whole->step.rank, to, to, before.end, &last.step) <= 0) return 0;
    } else last.step = whole->step;
    const double recorded = (double)(y->step.end - y->step.begin);
    const char *reason = helps_begin(&h, y);
    if (!reason && helps_simulate_record(&h, &base, why, sizeof why)) reason = why;
    const double error = reason ? 0 : (double)base.step_ns / recorded - 1;
    const int known = !reason && fabs(error) <= HELPS_MOST_ERROR;
    const int tried = known ? helps_list(&h, list) : 0;
    if (reason) fsdpi_why_say(t, "what would help: not computed: %s\n", reason);
    else if (!known)
        fsdpi_why_say(t,
                      "what would help: not computed: the simulation differs from the record by "
                      "%+.0f %%\n",
                      100 * error);
    for (int i = 0; i < tried; i++) {
        helps_option o = list[i];
        if (helps_simulate(&h, &o, &times, why, sizeof why)) continue;
        o.gain = base.step_ns - times.step_ns, o.bytes = times.peak_bytes - base.peak_bytes;
        if ((double)o.gain >= HELPS_LEAST_GAIN * recorded) list[num++] = o;
    }
    qsort(list, (size_t)num, sizeof *list, helps_by_worth);
    if (num && most > 1)
        fsdpi_why_say(t, "what would help%s (simulated; as recorded: %+.0f %% of the record):\n",
                      to > whole->step.from ? " in the last microbatch" : "", 100 * error);
    for (int i = 0; i < num && i < most; i++) {
        if (most > 1) fsdpi_why_say(t, "  ");
        else fsdpi_why_say(t, "would help (as recorded: %+.0f %%): ", 100 * error);
        helps_say(&h, &list[i], t);
    }
    free(h.calls);
    free(h.work);
    if (to > whole->step.from) free(last.step.spans);
    return num || !known;
}

#endif // FSDP_TOOLS_FSDPTRACE_HELPS_H
