/* fsdptrace_helps.h - what would make a recorded step shorter: it is simulated again, with one
   option changed

   The model of a trace is made once more, in a world without peers whose memory is addresses only
   (backends/fsdp_fake.h), as tools/fsdpfit does. There its calls are rehearsed, and
   fsdp_plan_simulate tells how long they take under the costs that the trace has.

   SPDX-License-Identifier: MIT */
#ifndef FSDP_TOOLS_FSDPTRACE_HELPS_H
#define FSDP_TOOLS_FSDPTRACE_HELPS_H

#include "../backends/fsdp_fake.h"
#include "../fsdp_plan.h"
#include "../fsdp_trace.h"
#include "put_safe.h"

#include <stdlib.h>
#include <string.h>

enum { HELPS_CALLS = 1 << 16, HELPS_UNITS = 3, HELPS_LINES = 3, HELPS_OPTIONS = 16 };
#define HELPS_MOST_ERROR 0.15 // of a simulation beside the record
#define HELPS_LEAST_GAIN 0.01 // of the step: what is less is not said

// What a simulation has otherwise than the record. All zero: nothing.
typedef struct helps_option {
    int reshards;  // 1 + the unit that never reshards; -1: all
    int overlaps;  // lanes in place of inline
    int prefetches; // forward gathers the next unit ahead
    int planned;
    int64_t slots; // bytes that a plan has more
    char text[160];
    int64_t gain, bytes; // nanoseconds; of slots, more than by calls
} helps_option;

typedef struct helps {
    const fsdpi_why *why;
    const fsdpi_tr_rank *rank;
    const fsdpi_tr_record **calls; // the program of the step, without what is not a unit's
    int num_calls;
    int64_t *work; // [num_calls] of the caller behind each
    fsdp_plan_cost cost;
} helps;

/* ---- costs ----------------------------------------------------------------------------------- */

// Bytes of the full side of a collective, as the simulation counts them.
static double helps_side(const fsdpi_tr_rank *rank, const fsdpi_tr_record *r) {
    double ranks = 1;
    for (uint64_t i = 0; i < rank->num_comms; i++)
        if (rank->comms[i].number == r->comm) ranks = rank->comms[i].size;
    if (ranks < 2) return (double)r->bytes;
    return (double)r->bytes * ranks / (ranks - 1) / (r->kind == FSDP_OP_ALL_REDUCE ? 2 : 1);
}

// Least squares: latency + bytes / rate. If all have as many bytes, a rate cannot be told.
static void helps_fit(const helps *h, int kind, double *latency, double *rate) {
    double n = 0, x = 0, y = 0, xx = 0, xy = 0;
    const fsdpi_tr_rank *rank = h->rank;
    for (uint64_t i = 0; i < rank->num_records; i++) {
        const fsdpi_tr_record *r = &rank->records[i];
        if (r->kind != kind || r->label == FSDP_LABEL_CLIP || r->label == FSDP_LABEL_WORLD) continue;
        if (r->begin_ns < h->why->step.begin || r->end_ns > h->why->step.end) continue;
        const double bytes = helps_side(rank, r), ns = (double)(r->end_ns - r->begin_ns);
        n++, x += bytes, y += ns, xx += bytes * bytes, xy += bytes * ns;
    }
    const double spread = n * xx - x * x;
    double slope = spread > 1e-6 * xx * n ? (n * xy - x * y) / spread : 0;
    if (slope < 0) slope = 0;
    double first = n > 0 ? (y - slope * x) / n : 0;
    if (first < 0) first = 0, slope = x > 0 ? y / x : 0;
    *latency = first, *rate = slope > 0 ? 1 / slope : 0;
}

/* The caller's work behind a call: until the next one begins. On streams: from the last record of
   the call on COMPUTE until COMPUTE comes to the next one. */
static int64_t helps_work(const helps *h, int i) {
    const fsdpi_tr_record *call = h->calls[i];
    const fsdpi_tr_rank *rank = h->rank;
    int64_t begin = call->end_ns, end = h->why->step.end;
    if (rank->head.run != FSDP_RUN_STREAMS) {
        if (i + 1 < h->num_calls) end = h->calls[i + 1]->begin_ns;
        return end > begin ? end - begin : 0;
    }
    uint32_t next = UINT32_MAX;
    int has = 0;
    for (uint64_t k = 0; k < rank->num_records; k++) {
        const fsdpi_tr_record *r = &rank->records[k];
        if (!fsdpi_why_on_compute(rank, r) || r->seq < call->seq) continue;
        if (fsdpi_why_has(call, r->seq)) begin = r->end_ns, has = 1;
        else if (r->seq < next && i + 1 < h->num_calls)
            next = r->seq, end = r->begin_ns - r->waited_ns;
    }
    return has && end > begin ? end - begin : 0;
}

static int helps_by_seq(const void *a, const void *b) {
    const fsdpi_tr_record *x = *(const fsdpi_tr_record *const *)a,
                          *y = *(const fsdpi_tr_record *const *)b;
    return x->seq < y->seq ? -1 : x->seq > y->seq;
}

// The program and its costs. 0, or what stands in the way.
static const char *helps_begin(helps *h, const fsdpi_why *y) {
    const fsdpi_tr_rank *rank = y->step.rank;
    double bytes = 0, copying = 0, issuing = 0, ops = 0;
    memset(h, 0, sizeof *h);
    h->why = y, h->rank = rank;
    h->calls = (const fsdpi_tr_record **)calloc((size_t)rank->num_records + 1, sizeof *h->calls);
    h->work = (int64_t *)calloc((size_t)rank->num_records + 1, sizeof *h->work);
    if (!h->calls || !h->work) return "no memory";
    const fsdpi_tr_step *step = rank->steps;
    while (step->number != y->step.number) step++;
    const int is_last = step + 1 == rank->steps + rank->num_steps;
    const uint32_t length = is_last ? UINT32_MAX / 2 : step[1].first_seq - step->first_seq;
    for (uint64_t i = 0; i < rank->num_records; i++) {
        const fsdpi_tr_record *r = &rank->records[i];
        if (r->kind == FSDPI_TR_CALL && r->label <= FSDP_CALL_FINALIZE &&
            r->seq - step->first_seq < length) {
            if (r->label != FSDP_CALL_FINALIZE && r->what >= rank->num_units)
                return "a call is of no unit";
            h->calls[h->num_calls++] = r;
            issuing += (double)(r->end_ns - r->begin_ns);
        }
        if (r->begin_ns < y->step.begin || r->end_ns > y->step.end) continue;
        ops += r->kind < FSDP_OP_HOOK;
        if ((r->kind != FSDP_OP_COPY && r->kind != FSDP_OP_ZERO) || !r->bytes) continue;
        bytes += (double)r->bytes, copying += (double)(r->end_ns - r->begin_ns);
    }
    qsort(h->calls, (size_t)h->num_calls, sizeof *h->calls, helps_by_seq);
    if (!rank->num_units || !h->num_calls ||
        h->calls[h->num_calls - 1]->label != FSDP_CALL_FINALIZE)
        return "the step does not end with finalize";
    for (uint64_t u = 1; u < rank->num_units; u++)
        if (rank->units[u].shards != rank->units[0].shards ||
            rank->units[u].replicas != rank->units[0].replicas)
            return "units have different meshes";
    for (uint64_t p = FSDP_POOL_COUNT; p < rank->num_pools; p++)
        if (!strcmp(fsdpi_tr_text(rank, rank->pools[p].name), "arena"))
            return "the steps are planned already";
    for (int i = 0; i < h->num_calls; i++) h->work[i] = helps_work(h, i);
    fsdp_plan_cost *c = &h->cost;
    helps_fit(h, FSDP_OP_ALL_GATHER, &c->gather_latency_ns, &c->gather_bytes_per_ns);
    helps_fit(h, FSDP_OP_REDUCE_SCATTER, &c->reduce_latency_ns, &c->reduce_bytes_per_ns);
    helps_fit(h, FSDP_OP_ALL_REDUCE, &c->replica_latency_ns, &c->replica_bytes_per_ns);
    c->copy_bytes_per_ns = copying > 0 ? bytes / copying : 0;
    if (rank->head.run != FSDP_RUN_STREAMS) issuing = (double)y->step.part[FSDPI_WHY_CALLS];
    c->issue_ns = ops > 0 ? issuing / ops : 0;
    c->compute_ns = h->work, c->num_compute = h->num_calls;
    return NULL;
}

static void helps_end(helps *h) {
    free(h->calls);
    free(h->work);
}

/* ---- the model, once more -------------------------------------------------------------------- */

static fsdp_status helps_unit(const helps *h, fsdp_model *m, uint64_t u, const helps_option *o,
                              const fsdpi_tr_param *from, fsdp_unit **out) {
    const fsdpi_tr_unit *unit = &h->rank->units[u];
    const int num = unit->num_params;
    fsdp_param_desc *params = (fsdp_param_desc *)calloc((size_t)num + 1, sizeof *params);
    fsdp_unit_desc d = FSDP_ZERO;
    if (!params) return FSDP_ERR_OUT_OF_MEMORY;
    for (int i = 0; i < num; i++) {
        params[i].dtype = (fsdp_dtype)from[i].dtype, params[i].ndim = from[i].ndim;
        params[i].shard_dim = from[i].shard_dim, params[i].frozen = !from[i].requires_grad;
        memcpy(params[i].shape, from[i].shape, sizeof params[i].shape);
    }
    d.name = fsdpi_tr_name(h->rank, h->rank->names, h->rank->num_names, u);
    d.params = params, d.num_params = num;
    d.reshard_after_forward = unit->reshard_after_forward;
    if (o->reshards == -1 || o->reshards == (int)u + 1)
        d.reshard_after_forward = FSDP_RESHARD_NEVER;
    fsdp_status status = fsdp_fully_shard(m, &d, out);
    free(params);
    return status;
}

// Units whose gathers forward prefetches, as in the record; with the option: the next one.
static fsdp_status helps_prefetch(const helps *h, const helps_option *o, fsdp_unit **units) {
    fsdp_status status = FSDP_OK;
    for (int i = 0; i < h->num_calls && !status; i++) {
        const fsdpi_tr_record *call = h->calls[i], *next = i + 2 < h->num_calls ? call : NULL;
        fsdp_unit *ahead[64];
        int num = 0;
        if (call->label != FSDP_CALL_PRE_FORWARD) continue;
        for (uint64_t k = 0; k < h->rank->num_records && num < 64; k++) {
            const fsdpi_tr_record *r = &h->rank->records[k];
            if (r->kind == FSDP_OP_ALL_GATHER && fsdpi_why_has(call, r->seq) &&
                r->what != call->what && r->what < h->rank->num_units)
                ahead[num++] = units[r->what];
        }
        for (int k = i + 1; o->prefetches && !num && k < h->num_calls; k++) {
            next = h->calls[k];
            if (next->label != FSDP_CALL_PRE_FORWARD) continue;
            if (next->what != call->what) ahead[num++] = units[next->what];
            break;
        }
        if (num) status = fsdp_set_modules_to_forward_prefetch(units[call->what], ahead, num);
    }
    return status;
}

static fsdp_status helps_step(const helps *h, fsdp_model *m, fsdp_unit **units) {
    fsdp_status status = FSDP_OK;
    for (int i = 0; i < h->num_calls && !status; i++) {
        fsdp_unit *u = h->calls[i]->label < FSDP_CALL_FINALIZE ? units[h->calls[i]->what] : NULL;
        switch (h->calls[i]->label) {
        case FSDP_CALL_PRE_FORWARD: status = fsdp_pre_forward(u); break;
        case FSDP_CALL_POST_FORWARD: status = fsdp_post_forward(u); break;
        case FSDP_CALL_PRE_BACKWARD: status = fsdp_pre_backward(u); break;
        case FSDP_CALL_POST_BACKWARD: status = fsdp_post_backward(u); break;
        case FSDP_CALL_UNSHARD: status = fsdp_unshard(u); break;
        case FSDP_CALL_WAIT: status = fsdp_wait(u); break;
        case FSDP_CALL_RESHARD: status = fsdp_reshard(u); break;
        default: status = fsdp_finalize_backward(m);
        }
        for (int k = 0; h->calls[i]->label == FSDP_CALL_PRE_BACKWARD && k < u->desc.num_params; k++)
            if (u->params[k].requires_grad) (void)fsdp_grad(u, k);
    }
    if (!status) status = fsdp_params_changed(m);
    return status ? status : fsdp_zero_grad(m);
}

static fsdp_status helps_model(const helps *h, const helps_option *o, fsdp_world *w,
                               fsdp_model **m, fsdp_unit **units) {
    const fsdpi_tr_header *head = &h->rank->head;
    const int32_t shards = h->rank->units[0].shards, replicas = h->rank->units[0].replicas;
    const fsdpi_tr_param *params = h->rank->params;
    fsdp_mesh_desc md = FSDP_ZERO;
    fsdp_model_desc d = FSDP_ZERO;
    fsdp_mesh_info info;
    fsdp_mesh *mesh;
    md.ndim = 2, md.shape[0] = replicas, md.shape[1] = shards;
    md.names[0] = "replicate", md.names[1] = "shard";
    const int kind = replicas == 1 ? (int)FSDP_MESH_INFO_FSDP
                     : shards == 1 ? (int)FSDP_MESH_INFO_DDP
                                   : (int)FSDP_MESH_INFO_HSDP;
    fsdp_status status = fsdp_mesh_create(w, &md, &mesh);
    if (!status)
        status = fsdp_mesh_info_init(mesh, kind, kind == FSDP_MESH_INFO_DDP ? -1 : 1,
                                     kind == FSDP_MESH_INFO_FSDP ? -1 : 0, &info);
    d.mesh_info = &info, d.param_dtype = (fsdp_dtype)head->param_dtype;
    d.reduce_dtype = (fsdp_dtype)head->reduce_dtype, d.grad_dtype = (fsdp_dtype)head->grad_dtype;
    d.reshard_after_forward = head->reshard_after_forward, d.cpu_offload = head->cpu_offload;
    d.implicit_prefetch = head->implicit_prefetch, d.prefetch_bytes = head->prefetch_bytes;
    d.direct_min = head->direct_min;
    if (!status) status = fsdp_model_create(w, &d, m);
    for (uint64_t u = 0; u < h->rank->num_units && !status; u++) {
        status = helps_unit(h, *m, u, o, params, &units[u]);
        params += h->rank->units[u].num_params;
    }
    return status ? status : helps_prefetch(h, o, units);
}

// 0, or a failure, whose text is in `why`.
static fsdp_status helps_simulate(const helps *h, const helps_option *o, fsdp_plan_times *out,
                                  char *why, size_t cap) {
    const fsdpi_tr_rank *rank = h->rank;
    const int streams = rank->head.run == FSDP_RUN_STREAMS,
              lanes = rank->head.run == FSDP_RUN_LANES || o->overlaps;
    fsdp_fake fake = FSDP_ZERO;
    fsdp_world_desc wd = FSDP_ZERO;
    fsdp_plan_desc pd = FSDP_ZERO;
    fsdp_world *w = NULL;
    fsdp_model *m = NULL;
    fsdp_plan *plan = NULL;
    fsdp_unit **units = (fsdp_unit **)calloc((size_t)rank->num_units + 1, sizeof *units);
    if (!units) return FSDP_ERR_OUT_OF_MEMORY;
    fake.addresses = 1, fake.plain = streams;
    wd.backend = "fake", wd.user = &fake, wd.log_level = FSDP_LOG_NONE;
    wd.device_ops = fsdp_fake_device_ops(streams), wd.lanes = lanes ? 2 : -1;
    wd.world_size = rank->units[0].shards * rank->units[0].replicas;
    pd.most_bytes = o->slots;
    fsdp_status status = fsdp_init(&wd, &w);
    if (!status) status = helps_model(h, o, w, &m, units);
    if (!status) status = fsdp_plan_create(m, &pd, &plan);
    for (int step = 0; step < 2 && !status; step++) status = helps_step(h, m, units);
    if (!status) status = fsdp_plan_simulate(plan, 0, !o->planned, &h->cost, out);
    if (status) snprintf(why, cap, "%.250s", fsdp_last_error(w));
    if (w && fsdp_shutdown(w) && !status) status = FSDP_ERR_INTERNAL;
    free(units);
    return status;
}

/* ---- what helps ------------------------------------------------------------------------------ */

// Gain per byte, the most first.
static int helps_by_worth(const void *a, const void *b) {
    const helps_option *x = (const helps_option *)a, *y = (const helps_option *)b;
    const double left = (double)x->gain * (double)(y->bytes > 1 ? y->bytes : 1),
                 right = (double)y->gain * (double)(x->bytes > 1 ? x->bytes : 1);
    return (left < right) - (left > right);
}

// The units that COMPUTE waits longest for.
static int helps_worst(const fsdpi_why *y, uint64_t num_units, int units[HELPS_UNITS]) {
    int num = 0;
    for (; num < HELPS_UNITS; num++) {
        int64_t most = 0;
        for (uint64_t u = 0; u < num_units; u++) {
            int64_t ns = 0, had = 0;
            for (int k = 0; k < num; k++) had |= units[k] == (int)u;
            for (int32_t i = 0; i < y->step.num_spans && !had; i++) {
                const fsdpi_why_span *s = &y->step.spans[i];
                if (s->part == FSDPI_WHY_GATHER && s->op && s->op->what == u) ns += s->own;
            }
            if (ns > most) most = ns, units[num] = (int)u;
        }
        if (!most) break;
    }
    return num;
}

static helps_option *helps_add(helps_option *list, int *num, const char *text) {
    helps_option *o = &list[(*num)++];
    memset(o, 0, sizeof *o);
    snprintf(o->text, sizeof o->text, "%s", text);
    return o;
}

static int helps_list(const helps *h, helps_option list[HELPS_OPTIONS]) {
    static const char *const plans[] = {"a plan (fsdp_plan_create)", "a plan with one slot more",
                                        "a plan with two slots more"};
    int units[HELPS_UNITS], num = 0, worst = helps_worst(h->why, h->rank->num_units, units);
    for (int i = 0; i < worst; i++) {
        if (h->rank->units[units[i]].reshard_after_forward == FSDP_RESHARD_NEVER) continue;
        helps_option *o = helps_add(list, &num, "");
        o->reshards = 1 + units[i];
        snprintf(o->text, sizeof o->text, "reshard_after_forward never on %s",
                 fsdpi_why_name(h->rank, (uint16_t)units[i]));
    }
    helps_add(list, &num, "reshard_after_forward never on all units")->reshards = -1;
    if (h->rank->head.run == FSDP_RUN_INLINE)
        helps_add(list, &num, "worker threads (FSDP_LANES=2)")->overlaps = 1;
    else helps_add(list, &num, "forward prefetch of the next unit")->prefetches = 1;
    for (int i = 0; i < 3; i++) helps_add(list, &num, plans[i])->planned = 1 + i;
    return num;
}

// Prints on one line what would help, or why that is not known. 0: nothing helps. digits: of ms.
static int helps_print(const fsdpi_why *y, int digits) {
    helps_option list[HELPS_OPTIONS], none;
    fsdp_plan_times base, times;
    char why[256] = "no memory";
    helps h;
    int num = 0, said = 0;
    int64_t plan_bytes = 0, slot = 0, best_plan = 0;
    const int64_t recorded = y->step.end - y->step.begin;
    const char *reason = helps_begin(&h, y);
    memset(&none, 0, sizeof none);
    if (!reason && helps_simulate(&h, &none, &base, why, sizeof why)) reason = why;
    const double error = reason ? 0 : (double)(base.step_ns - recorded) / (double)recorded;
    if (reason || error > HELPS_MOST_ERROR || error < -HELPS_MOST_ERROR) {
        printf("what would help: not computed: ");
        if (reason) put_safe(stdout, reason);
        else printf("the simulation differs from the record by %+.0f %%", 100 * error);
        printf("\n");
        helps_end(&h);
        return 1;
    }
    for (uint64_t u = 0; u < h.rank->num_units; u++)
        slot = fsdpi_why_more(slot, h.rank->units[u].slot_bytes[FSDP_POOL_GATHER]);
    const int tried = helps_list(&h, list);
    for (int i = 0; i < tried; i++) {
        helps_option *o = &list[i];
        if (o->planned > 1 && !plan_bytes) continue;
        if (o->planned > 1) o->slots = plan_bytes + (o->planned - 1) * slot;
        if (helps_simulate(&h, o, &times, why, sizeof why)) continue;
        if (o->planned == 1) plan_bytes = times.peak_bytes;
        o->gain = base.step_ns - times.step_ns, o->bytes = times.peak_bytes - base.peak_bytes;
        if ((double)o->gain < HELPS_LEAST_GAIN * (double)recorded) continue;
        if (o->planned && o->gain <= best_plan) continue; // as a plan with fewer slots
        if (o->planned) best_plan = o->gain;
        list[num++] = *o;
    }
    qsort(list, (size_t)num, sizeof *list, helps_by_worth);
    for (int i = 0; i < num && i < HELPS_LINES; i++) {
        printf("%s ", said++ ? ";" : "what would help:");
        put_safe(stdout, list[i].text);
        char letter;
        const double unit = fsdpi_why_unit(llabs(list[i].bytes), &letter);
        printf(" %+.*f ms for %+.1f %cB", digits, -(double)list[i].gain * 1e-6,
               (double)list[i].bytes / unit, letter);
    }
    if (said) printf(" (simulated; as recorded: %+.0f %% of the record)\n", 100 * error);
    helps_end(&h);
    return said;
}

#endif // FSDP_TOOLS_FSDPTRACE_HELPS_H
