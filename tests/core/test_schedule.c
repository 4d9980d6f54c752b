/* test_schedule.c - the ops that hooks issue, with their order, streams and waits, on the simulated
   device of sim.h. Schedules are scripts: see play().

   SPDX-License-Identifier: MIT */
#include "harness.h"
#include "library.c"
#include "lab.h"
#include "rig.h"

#define ASYNC 0, 1, 0, 0
#define CONF(mode, layers, root, inner)                                                            \
    { mode, layers, root, inner, 0, 0, 0, 0, 0, 0, NULL, 0 }

/* ---- the op table of one unit ---------------------------------------------------------------- */

static int is_event(const fsdp_event *a, const fsdp_event *b) {
    return a->stream == b->stream && a->seq == b->seq;
}

/* Writes an op as text: kind label stream source>destination <its waits */
static void op_text(const fsdp_op *op, char *out, size_t size) {
    static const char *const streams[FSDP_STREAM_COUNT] = {"C", "G", "R", "A"};
    static const char *const pools[FSDP_POOL_COUNT] = {"shard", "sgrad", "gather", "slice",
                                                       "grad",  "rin",   "rout",   "scratch"};
    int used = snprintf(out, size, "%s %s %s %s%s%s", fsdp_op_name(op->kind),
                        fsdp_label_name(op->label), streams[op->stream],
                        op->src ? pools[op->src->pool] : "", op->dst ? ">" : "",
                        op->dst ? pools[op->dst->pool] : "");
    if (op->in_place) used += snprintf(out + used, size - (size_t)used, " in place");
    if (op->accumulate) used += snprintf(out + used, size - (size_t)used, " +=");
    if (op->clip) used += snprintf(out + used, size - (size_t)used, " *clip");
    else if (op->scale < 1)
        used += snprintf(out + used, size - (size_t)used, " *%g", (double)op->scale);
    for (int i = 0; i < op->num_waits; i++) {
        const char *which = "?";
        if (op->src && is_event(&op->wait[i], &op->src->ready)) which = "source";
        else if (op->dst && is_event(&op->wait[i], &op->dst->ready)) which = "destination written";
        else if (op->dst) which = "destination released"; /* that event has been cleared */
        used += snprintf(out + used, size - (size_t)used, " <%s:%s", which,
                         streams[op->wait[i].stream]);
    }
}

/* clang-format off */
#define GATHER_CAST                                                                                \
    "copy copy_in G shard>gather <source:C <destination released:C\n"                              \
    "all_gather gather G gather>gather in place\n"                                                 \
    "copy copy_out G gather>gather\n"
#define GATHER                                                                                     \
    "all_gather gather G shard>gather <source:C <destination released:C\n"                         \
    "copy copy_out G gather>gather\n"
#define USE    "use gather C gather <source:G\n"
#define GRADS  "zero grads C >grad <destination released:R\n"
#define WIDEN  "zero acc R >rin\ncopy acc R grad>rin <source:C\n"
#define ADD    "copy acc R grad>rin += <source:C\n"
#define CUT    "copy acc R grad>grad <source:C\n"
#define FUSED  CUT "reduce_scatter reduce R grad>sgrad *0.25\n"
#define SUM    "reduce_scatter reduce R grad>sgrad\ncopy red_out R sgrad>sgrad *0.25\n"
#define NARROW CUT "reduce_scatter reduce R grad>rout\ncopy red_out R rout>sgrad *0.25\n"
/* f32 without a gradient: the reduce-scatter writes the shard gradient, and red_out scales it in
   place */
#define WIDE   WIDEN "reduce_scatter reduce R rin>sgrad\ncopy red_out R sgrad>sgrad *0.25\n"
#define ONTO   WIDEN "reduce_scatter reduce R rin>rout\n"                                          \
               "copy red_out R rout>sgrad += *0.25 <destination written:C\n"
#define INTO(from) "reduce_scatter reduce R " from ">sgrad *0.25 <destination written:C\n"
#define ZERO   "zero final C >sgrad <destination written:R\n"
#define MORE   "zero final C >sgrad\n"
#define IDLE   "use final C sgrad\n"
#define FINAL  "use final C sgrad <source:R\n"
#define NEXT   "|\n"

/* Ops in the order of the script's calls, with "|" between the calls. Two layers, uneven, direct
   and packed; the second step, after each buffer has been used. */
static const struct {
    const char *name;
    fsdp_dtype param, reduce;
    int unfused;
    const char *script, *expected;
} tables[] = {
    {"fused", FSDP_BF16, FSDP_F32, 0, "(0 | )0 | (1 )1 | [1 | ]1 | [0 | ]0 | .",
     GATHER_CAST USE NEXT NEXT GATHER_CAST USE NEXT GATHER_CAST USE GRADS GATHER_CAST NEXT
     FUSED NEXT USE GRADS NEXT FUSED NEXT FINAL},
    {"unfused", FSDP_BF16, FSDP_F32, 1, "(0 | )0 | (1 )1 | [1 | ]1 | [0 | ]0 | .",
     GATHER_CAST USE NEXT NEXT GATHER_CAST USE NEXT GATHER_CAST USE GRADS GATHER_CAST NEXT
     WIDE NEXT USE GRADS NEXT WIDE NEXT FINAL},
    {"unfused_onto_a_gradient", FSDP_BF16, FSDP_F32, 1, "(0 )0 [0 ]0 . | (0 )0 [0 ]0 | .",
     GATHER_CAST USE GATHER_CAST USE GRADS WIDE ZERO IDLE NEXT
     GATHER_CAST USE GATHER_CAST USE GRADS ONTO NEXT FINAL},
    {"narrow_reduce", FSDP_BF16, FSDP_BF16, 0, "(0 )0 (1 )1 [1 ]1 | [0 ]0 | .",
     GATHER_CAST USE GATHER_CAST USE GATHER_CAST USE GRADS GATHER_CAST NARROW NEXT
     USE GRADS NARROW NEXT FINAL},
    {"no_cast", FSDP_F32, FSDP_F32, 0, "(0 | )0 | [0 | ]0 | .",
     GATHER USE NEXT NEXT GATHER USE GRADS NEXT FUSED NEXT ZERO IDLE},
    {"no_cast_unfused", FSDP_F32, FSDP_F32, 1, "(0 | )0 | (1 )1 [1 ]1 [0 | ]0 | .",
     GATHER USE NEXT NEXT GATHER USE GATHER USE GRADS GATHER CUT SUM USE GRADS NEXT CUT SUM NEXT
     FINAL},
    /* no sync: widened gradients wait in the reduce input, others in the slot where they were
       written */
    {"no_sync", FSDP_BF16, FSDP_F32, 0,
     "y- (0 )0 (1 )1 [1]1 [0]0 . | (0 )0 [0 ]0 . | y+ (0 )0 [0 ]0 | .",
     GATHER_CAST USE GATHER_CAST USE GATHER_CAST USE GRADS GATHER_CAST WIDEN USE GRADS WIDEN
     ZERO MORE IDLE NEXT
     GATHER_CAST USE GATHER_CAST USE GRADS ADD IDLE NEXT
     GATHER_CAST USE GATHER_CAST USE GRADS ADD INTO("rin") NEXT
     "use grads C >sgrad <destination written:R\n" INTO("rin") FINAL}, /* unit 1, by finalize */
    {"no_sync_no_cast", FSDP_F32, FSDP_F32, 0,
     "y- (0 )0 [0 ]0 . | (0 )0 [0 ]0 . | y+ (0 )0 [0 ]0 | .",
     GATHER USE GATHER USE GRADS ZERO MORE IDLE NEXT
     GATHER USE GATHER USE IDLE NEXT
     GATHER USE GATHER USE CUT INTO("grad") NEXT FINAL},
    {"clip", FSDP_F32, FSDP_F32, 0, "(0 )0 (1 )1 [1 ]1 [0 ]0 . | c | o z",
     GATHER USE GATHER USE GATHER USE GRADS GATHER FUSED USE GRADS FUSED FINAL NEXT
     "norm clip C sgrad>scratch <source:R\n"
     "all_reduce clip R scratch>scratch in place <source:C\n"
     "use clip C scratch <source:R\n"
     "copy clip C sgrad>sgrad *clip <source:R\n" NEXT},
};
/* clang-format on */

/* Keeps each op's text when it is issued: later the op's buffers have other events. */
typedef struct {
    char text[16384];
    size_t used;
} text_log;

static void log_text(void *user, const fsdp_op *op) {
    text_log *log = (text_log *)user;
    CHECK(log->used + 161 < sizeof log->text);
    if (op->kind >= FSDP_OP_HOOK) return;
    op_text(op, log->text + log->used, 160);
    log->used += strlen(log->text + log->used);
    log->text[log->used++] = '\n';
}

TEST_P(schedule, ops, tables) {
    config c = CONF(ASYNC, 2, ALWAYS, ALWAYS);
    static text_log log;
    rig r;
    c.param = row->param;
    c.reduce = row->reduce;
    c.unfused = row->unfused;
    rig_open(&r, &c);
    for (int step = 0; step < 2; step++) play(&r, "(0 )0 (1 )1 [1 ]1 [0 ]0 . o z");
    r.s.on_op = log_text;
    r.s.on_op_user = &log;
    log.used = 0;
    for (const char *at = row->script; *at;) {
        char part[64];
        const size_t length = strcspn(at, "|");
        snprintf(part, sizeof part, "%.*s", (int)length, at);
        play(&r, part);
        at += length;
        if (*at) at++, strcpy(log.text + log.used, NEXT), log.used += strlen(NEXT);
    }
    log.text[log.used] = 0;
    const char *got = log.text, *expected = row->expected;
    for (int n = 0; *got || *expected; n++) {
        const int length = (int)strcspn(got, "\n"), wanted = (int)strcspn(expected, "\n");
        CHECK_MSG(length == wanted && !strncmp(got, expected, (size_t)length),
                  "op %d is \"%.*s\", expected \"%.*s\"", n, length, got, wanted, expected);
        got += length + 1, expected += wanted + 1;
    }
    rig_close(&r);
}

/* ---- streams and events ------------------------------------------------------------------------ */

/* The reason for each wait of a run. */
enum { MAX_WAITS = 4096, MAX_KINDS = 64 };
typedef struct {
    rig *r;
    fsdp_op op; /* the latest op */
    int16_t kind[MAX_WAITS];
    char kinds[MAX_KINDS][96];
    int num_kinds, removed[MAX_KINDS], reported[MAX_KINDS];
} wait_log;

static void log_op(void *user, const fsdp_op *op) { ((wait_log *)user)->op = *op; }

/* Notes the newest wait of the op for that stream. */
static void log_wait(void *user, int stream) {
    wait_log *log = (wait_log *)user;
    const fsdp_op *op = &log->op;
    char text[256], kind[96];
    int last = -1, k = 0;
    for (int i = 0; i < op->num_waits; i++)
        if (op->wait[i].stream == stream && (last < 0 || op->wait[i].seq > op->wait[last].seq))
            last = i;
    CHECK(last >= 0 && log->r->s.waits < MAX_WAITS);
    op_text(op, text, sizeof text);
    char *wait = strchr(text, '<');
    for (int i = 0; i < last; i++) wait = strchr(wait + 1, '<');
    char *next = strchr(wait + 1, '<');
    if (next) next[-1] = 0;
    snprintf(kind, sizeof kind, "%s %s %s", fsdp_op_name(op->kind), fsdp_label_name(op->label),
             wait);
    while (k < log->num_kinds && strcmp(log->kinds[k], kind)) k++;
    CHECK(k < MAX_KINDS);
    if (k == log->num_kinds) memcpy(log->kinds[log->num_kinds++], kind, sizeof kind);
    log->kind[log->r->s.waits] = (int16_t)k;
}

/* Steps with every kind of wait: other orders, a second gradient, a gather that is not used. */
static const char *const hard_script = FWD BWD ". c o z" FWD "[r [0]0 [2]2 [1]1 ]r . o" FWD BWD
                                               ". o z u1 s1 u2" FWD BWD "." FWD BWD ". c o z";

/* Sums over the shard group that wait for the all-reduce, too. */
static const char *const replicas_script = FWD BWD ". c o z a-" FWD BWD ". a+" FWD BWD
                                                   ". o z" FWD BWD ". c o";

/* Ignores one wait of an event table: the checker must report it unless other waits imply it.
   For each kind below the checker must report some wait. */
TEST(streams, a_removed_wait_is_reported, AT_NIGHT(ASAN)) {
    static const char *const needed[] = {
        "copy copy_in <source:C",               /* the optimizer wrote the shards */
        "copy copy_in <destination released:C", /* the slot's last layer has been computed */
        "use gather <source:G",                 /* the layer reads the gathered parameters */
        "zero grads <destination released:R",   /* the slot's gradients have been reduced */
        "copy acc <source:C",                   /* backward wrote the gradients */
        "use final <source:R",                  /* the optimizer reads the reduced gradients */
        "all_reduce clip <source:C",
        "use clip <source:R", /* the host reads the norm */
        "all_gather gather <source:C",
        "all_gather gather <destination released:C",
        "all_reduce replicas <source:R",
        "use final <source:A",
    };
    static wait_log log;
    int64_t total = 0, reported = 0;
    memset(&log, 0, sizeof log);
    for (int k = 0; k < 6; k++) {
        config c = CONF(ASYNC, 3, NEVER, ALWAYS);
        rig r;
        c.param = k & 1 ? FSDP_BF16 : FSDP_F32;
        c.unfused = k >> 1 & 1;
        c.replicas = k < 4 ? 0 : 2;
        int64_t num_waits = 0;
        for (int64_t ignore = -1; ignore < num_waits; ignore++) {
            rig_open(&r, &c);
            r.s.ignore_wait = ignore;
            log.r = &r;
            if (ignore < 0) {
                r.s.on_op = log_op;
                r.s.on_wait = log_wait;
                r.s.on_op_user = &log;
            }
            play(&r, k < 4 ? hard_script : replicas_script);
            if (ignore < 0) {
                CHECK_EQ_INT(r.s.races, 0);
                num_waits = r.s.waits;
            } else {
                int kind = log.kind[ignore];
                log.removed[kind]++;
                log.reported[kind] += r.s.races > 0;
                total++;
                reported += r.s.races > 0;
            }
            CHECK_EQ_INT(sim_close(&r.s), 0);
        }
    }
    for (int i = 0; i < log.num_kinds; i++)
        h_message("%-50s removed %3d, reported %3d", log.kinds[i], log.removed[i], log.reported[i]);
    h_message("%lld waits removed one by one, %lld reported", (long long)total,
              (long long)reported);
    for (size_t i = 0; i < sizeof needed / sizeof *needed; i++) {
        int k = 0;
        while (k < log.num_kinds && strcmp(log.kinds[k], needed[i])) k++;
        CHECK_MSG(k < log.num_kinds, "no wait of kind \"%s\" was seen", needed[i]);
        CHECK_MSG(log.reported[k] > 0, "no removal of \"%s\" was reported", needed[i]);
    }
}

/* Events recorded, and waited for, in a step of three layers and a root. */
TEST(streams, counts) {
    static const int records[] = {22, 30, 37}, waits[] = {21, 21, 27};
    for (int k = 0; k < 3; k++) {
        config c = CONF(ASYNC, 3, ALWAYS, ALWAYS);
        rig r;
        c.param = k ? FSDP_BF16 : FSDP_F32;
        c.unfused = 1;
        c.replicas = k == 2 ? 2 : 0;
        rig_open(&r, &c);
        for (int step = 0; step < 4; step++) {
            int64_t recorded = r.s.records, waited = r.s.waits;
            play(&r, FWD BWD ". o z");
            r.used = 0;
            if (step < 2) continue;
            CHECK_EQ_INT(r.s.records - recorded, records[k]);
            CHECK_EQ_INT(r.s.waits - waited, waits[k]);
        }
        rig_close(&r);
    }
}

/* The host's optimizer uses the addresses of offloaded gradients: they are clipped on return,
   even if the caller does not want the norm. */
TEST(streams, offloaded_clip) {
    config c = CONF(ASYNC, 3, NEVER, ALWAYS);
    rig r;
    c.offload = 1;
    rig_open(&r, &c);
    for (int step = 0; step < 3; step++) {
        fsdp_flat flat = FSDP_ZERO;
        play(&r, FWD BWD ".");
        CHECK_OK(fsdp_model_flat(r.model, FSDP_F32, &flat));
        play(&r, "n");
        sim_touch(&r.s, SIM_HOST, "optimizer", flat.grads, flat.numel * 4, 0);
        sim_touch(&r.s, SIM_HOST, "optimizer", flat.shards, flat.numel * 4, 1);
        CHECK_OK(fsdp_params_changed(r.model));
        play(&r, "z");
    }
    rig_close(&r);
}

/* A parameter's hook runs if the parameter has a gradient, and the host waits for nothing. */
static fsdp_status count_hook(void *user, const fsdp_param_view *view, void *stream) {
    (void)view, (void)stream;
    ++*(int *)user;
    return FSDP_OK;
}
TEST(streams, hooks_of_used_parameters) {
    config c = CONF(ASYNC, 3, NEVER, ALWAYS);
    rig r;
    int runs = 0;
    rig_open(&r, &c);
    CHECK_OK(fsdp_set_post_accumulate_hook(r.units[1], 0, count_hook, &runs));
    for (int used = 1; used >= 0; used--) {
        play(&r, FWD);
        const int64_t syncs = r.s.syncs;
        CHECK_OK(fsdp_pre_backward(r.units[1]));
        CHECK(fsdp_grad(r.units[1], used));
        CHECK_OK(fsdp_post_backward(r.units[1]));
        CHECK_EQ_INT(r.s.syncs, syncs);
        CHECK_EQ_INT(runs, used == 0);
        play(&r, ".");
        const int64_t waits = r.s.syncs;
        CHECK_OK(fsdp_set_grad_none(r.units[1], used));
        CHECK_EQ_INT(r.s.syncs, waits); /* the host waits only with offload */
    }
    rig_close(&r);
}

/* A gather that no call has waited for continues after post_backward, as more backwards follow.
   A hook that writes the shard runs after the gather. */
static fsdp_status write_hook(void *user, const fsdp_param_view *view, void *stream) {
    sim_called((sim *)user, stream, "hook", view->shard, view->numel * 4, 1);
    return FSDP_OK;
}
TEST(streams, hook_after_a_gather) {
    config c = CONF(ASYNC, 3, NEVER, ALWAYS);
    rig r;
    rig_open(&r, &c);
    CHECK_OK(fsdp_set_post_accumulate_hook(r.units[1], 0, write_hook, &r.s));
    play(&r, FWD);
    CHECK_OK(fsdp_set_is_last_backward(r.model, 0));
    CHECK_OK(fsdp_set_unshard_in_backward(r.model, r.units[1], 0));
    CHECK_OK(fsdp_pre_backward(r.units[1]));
    sim_write(&r.s, "backward", fsdp_grad(r.units[1], 0), 8 * 16 * 4);
    CHECK_OK(fsdp_unshard(r.units[1]));
    CHECK_EQ_INT(fsdp_unit_storage(r.units[1]), FSDP_STORAGE_IN_FLIGHT);
    CHECK_OK(fsdp_post_backward(r.units[1]));
    CHECK(r.s.calls > 0);
    CHECK_OK(fsdp_set_is_last_backward(r.model, 1));
    play(&r, ".");
    rig_close(&r);
}

/* A new stream of the caller waits for the work of the previous one, and for all that the
   previous one has waited for. */
TEST(streams, stream_of_the_caller) {
    config c = CONF(ASYNC, 3, NEVER, ALWAYS);
    for (int says_so = 0; says_so < 2; says_so++) {
        fsdp_flat flat = FSDP_ZERO;
        rig r;
        sim_stream *other = &r.s.streams[FSDP_STREAM_EXTENSION];
        rig_open(&r, &c);
        other->owner = &r.s, other->actor = FSDP_STREAM_EXTENSION;
        play(&r, FWD BWD ".");
        CHECK_OK(fsdp_model_flat(r.model, FSDP_F32, &flat));
        if (says_so) CHECK_OK(fsdp_set_stream(r.s.world, other));
        sim_work(&r.s, FSDP_STREAM_EXTENSION, 0, 0);
        sim_touch(&r.s, FSDP_STREAM_EXTENSION, "optimizer", flat.grads, flat.numel * 4, 0);
        sim_touch(&r.s, FSDP_STREAM_EXTENSION, "optimizer", flat.shards, flat.numel * 4, 1);
        CHECK_OK(fsdp_params_changed(r.model));
        if (says_so) CHECK_OK(fsdp_set_stream(r.s.world, NULL));
        play(&r, "z" FWD BWD ".");
        CHECK_EQ_INT(r.s.races == 0, says_so);
        CHECK_EQ_INT(sim_close(&r.s), 0);
    }
}

/* The host waits for streams that still use the shards before it reads or writes them. */
TEST(streams, whole_parameters) {
    config c = CONF(ASYNC, 3, NEVER, ALWAYS);
    static float whole[1 << 16];
    fsdp_flat flat = FSDP_ZERO;
    rig r;
    rig_open(&r, &c);
    play(&r, FWD BWD ". o z");
    CHECK_OK(fsdp_model_flat(r.model, FSDP_F32, &flat));
    fsdp_param_view v = lab_view(r.s.world, r.units[1], 0);
    CHECK(lab_full_numel(&v) <= 1 << 16);
    int64_t syncs = r.s.syncs;
    CHECK_OK(fsdp_param_full(r.units[1], 0, whole));
    CHECK(r.s.syncs > syncs);           /* the values are on the host */
    CHECK_OK(fsdp_unshard(r.units[1])); /* reads the shards */
    CHECK_OK(fsdp_param_load(r.units[1], 0, whole));
    sim_touch(&r.s, SIM_HOST, "load", flat.shards, flat.numel * 4, 1);
    CHECK_OK(fsdp_reshard(r.units[1]));
    rig_close(&r);
}

/* A function that fills only a part: the rest is zero, even if the host cannot write shards. */
static void fill_one(void *user, const fsdp_param_view *block) {
    ((float *)block->data)[++*(int *)user] = 1; /* a different element in each block */
}
TEST(streams, filled_in_part) {
    for (int opaque = 0; opaque < 2; opaque++) {
        sim s;
        fsdp_model_desc md = FSDP_ZERO;
        fsdp_param_desc p = fsdp_mat("w", 32, 4);
        int blocks = 0;
        double sum = 0;
        sim_init(&s, 2, 1);
        s.opaque = opaque, s.moves = 1;
        CHECK(sim_open(&s));
        md.fill_bytes = 64; /* 4 rows */
        fsdp_model *m = lab_model(s.world, &md);
        fsdp_unit *u = lab_unit(s.world, m, NULL, &p, 1);
        CHECK_OK(fsdp_init_params(m, fill_one, &blocks));
        fsdp_param_view v = lab_view(s.world, u, 0);
        const float *shard = (const float *)sim_host(&s, v.shard);
        for (int64_t k = 0; k < v.numel; k++) sum += (double)shard[k];
        CHECK_EQ_INT(blocks, 4);
        CHECK(sum == blocks);
        CHECK_EQ_INT(sim_close(&s), 0);
    }
}

/* One rank: backward adds to the shard gradients themselves, after the write of an extension's
   stream. */
TEST(streams, gradients_of_one_rank) {
    config c = CONF(ASYNC, 3, NEVER, ALWAYS);
    fsdp_op op;
    rig r;
    c.world = 1;
    rig_open(&r, &c);
    play(&r, FWD BWD ".");
    fsdp_op_init(&op, r.model, NULL, FSDP_OP_ZERO, FSDP_LABEL_NONE, FSDP_STREAM_EXTENSION);
    op.what = "x", op.dst = r.model->flats[FSDP_F32].grad, op.bytes = op.dst->bytes;
    CHECK_OK(fsdp_emit(r.model, &op));
    play(&r, FWD BWD ". o");
    rig_close(&r);
}

/* destroy, reset and shutdown wait for the device before they free its memory. */
TEST(streams, destroy_waits) {
    config c = CONF(ASYNC, 3, NEVER, ALWAYS);
    for (int how = 0; how < 3; how++) {
        rig r;
        rig_open(&r, &c);
        play(&r, FWD "[r [2 ]2 [1 ]1 u0");
        if (how == 0) fsdp_model_destroy(r.model);
        if (how == 1) {
            CHECK_OK(fsdp_model_reset(r.model));
            memset(r.by_user, 0, sizeof r.by_user);
            play(&r, "o" FWD BWD ".");
        }
        rig_close(&r);
    }
}

/* Segments of a reduction. If gradients are copied anyway, adjacent ones form one segment,
   provided that each rank's part of the next one begins at a multiple of 16 bytes. Otherwise
   they are reduced where they were written. The last segment has the flags of use. */
static const struct {
    const char *name;
    int matrices, vector, vectors; /* (64, 16) each, and vectors that are packed */
    int direct, joined;            /* segments if backward's memory is read, and if it is copied */
} segments[] = {
    {"matrices", 3, 0, 0, 3, 1}, {"packed", 0, 5, 3, 1, 1},      {"one", 1, 0, 0, 1, 1},
    {"aligned", 3, 64, 3, 4, 1}, {"not_aligned", 3, 5, 3, 4, 2}, {"aligned_alone", 3, 64, 1, 4, 1},
    {"alone", 3, 5, 1, 4, 2},
};
typedef struct {
    int reductions, segs;
} scattered;

static void on_scatter(void *user, const fsdp_op *op) {
    scattered *seen = (scattered *)user;
    const fsdp_seg *segs = (const fsdp_seg *)op->list;
    int64_t next = 0, ends = 0;
    if (op->kind != FSDP_OP_REDUCE_SCATTER) return;
    seen->reductions++;
    seen->segs = (int)op->list_count;
    for (int i = 0; i < seen->segs; i++) {
        CHECK_EQ_INT(segs[i].full, 4 * next); /* they are adjacent */
        next += segs[i].count;
        if (i > 0) CHECK_EQ_INT(ends * 4 % 16, 0);
        ends = segs[i].count;
    }
}

TEST_P(schedule, segments, segments) {
    for (int fused = 0; fused < 2; fused++) {
        fsdp_param_desc d[8];
        fsdp_model_desc md = FSDP_ZERO;
        fsdp_unit_desc ud = FSDP_ZERO;
        scattered seen = {0, 0};
        fsdp_model *model;
        fsdp_unit *unit;
        sim s;
        int count = 0;
        for (; count < row->matrices; count++) d[count] = fsdp_mat(NULL, 64, 16);
        for (int i = 0; i < row->vectors; i++) d[count++] = fsdp_vec(NULL, row->vector);
        sim_init(&s, 4, 0);
        s.rank = 3, s.fused = fused, s.checks = 1;
        CHECK(sim_open(&s));
        md.param_dtype = FSDP_BF16, md.reduce_dtype = FSDP_F32, md.direct_min = 2048;
        CHECK_OK(fsdp_model_create(s.world, &md, &model));
        ud.name = "u", ud.params = d, ud.num_params = count;
        CHECK_OK(fsdp_fully_shard(model, &ud, &unit));
        s.on_op = on_scatter, s.on_op_user = &seen;
        CHECK_OK(sim_watch(&s, model));
        for (int step = 0; step < 2; step++) {
            CHECK_OK(fsdp_pre_forward(unit));
            CHECK_OK(fsdp_post_forward(unit));
            CHECK_OK(fsdp_pre_backward(unit));
            for (int i = 0; i < count; i++) CHECK(fsdp_grad(unit, i));
            CHECK_OK(fsdp_post_backward(unit));
            CHECK_OK(fsdp_finalize_backward(model));
            CHECK_EQ_INT(seen.reductions, step + 1);
            CHECK_EQ_INT(seen.segs, fused ? row->direct : row->joined);
        }
        CHECK_EQ_INT(sim_close(&s), 0);
        CHECK_MSG(s.races == 0, "%d races, first: %s", s.races, s.race);
    }
}

/* fsdp_set_grad_none with cpu_offload: the zeros are on the host when it returns. */
TEST(schedule, grad_none_of_offloaded_shards) {
    const fsdp_param_desc p = fsdp_mat("w", 64, 64);
    fsdp_model_desc md = FSDP_ZERO;
    fsdp_unit_desc like = FSDP_ZERO;
    fsdp_param_view v = FSDP_ZERO;
    sim s;
    md.cpu_offload = 1;
    like.name = "u";
    sim_init(&s, 2, 0);
    s.checks = s.moves = 1;
    fsdp_world *w = sim_open(&s);
    fsdp_model *m = lab_model(w, &md);
    fsdp_unit *u = lab_unit(w, m, &like, &p, 1);
    CHECK_OK(fsdp_pre_forward(u));
    CHECK_OK(fsdp_post_forward(u));
    CHECK_OK(fsdp_pre_backward(u));
    sim_write(&s, "backward", fsdp_grad(u, 0), 4);
    CHECK_OK(fsdp_post_backward(u));
    CHECK_OK(fsdp_finalize_backward(m));
    CHECK_OK(fsdp_param_view_get(u, 0, &v));
    const void *grad = v.shard_grad;
    CHECK(grad != NULL);
    CHECK_OK(fsdp_set_grad_none(u, 0));
    sim_touch(&s, SIM_HOST, "optimizer", grad, 4 * v.numel, 0);
    CHECK_MSG(s.races == 0, "%d races: %s", s.races, s.race);
    CHECK_EQ_INT(sim_close(&s), 0);
}
