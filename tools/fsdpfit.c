/* fsdpfit.c - does a model fit? The bytes that each rank needs, before anything runs: one process,
   without a job and without the memory.

       cc -O2 -o fsdpfit tools/fsdpfit.c -pthread -lm
       ./fsdpfit model.safetensors --ranks 8 --param bf16 --streams --limit 80GiB

   It has no formula. In a world without peers (backends/fsdp_fake.h), whose memory is addresses
   only, the library commits the model, makes the optimizer and runs two steps. See help for the
   rest. Names in files are not trusted: bytes that are not printable ASCII are printed as \xNN.
   Linux.

   SPDX-License-Identifier: MIT */
#define _GNU_SOURCE
#define FSDP_IMPLEMENTATION
#define FSDP_STATIC
#define FSDP_NO_BACKEND
#define FSDP_BACKEND_FAKE
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wunused-function" // a tool uses a part of the library
#include "../fsdp_dtensor.h"
#include "../fsdp_muon.h"
#include "fsdpfit_shapes.h"
#pragma GCC diagnostic pop
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { EXIT_FULL = 1, MOST_RANKS = FSDPI_FAKE_RANKS };
#define BY_COLUMNS "(o_proj|down_proj|out_proj|wo|w2)\\.[a-z]+$" // tp cuts dim 1, else dim 0

// The settings in which runs differ.
typedef struct setting {
    int replicas, shards, tp; // ranks of each dim of the mesh
    fsdp_dtype param;
    int reshard, offload;
    int keeps; // microbatches before the last one are not reduced
} setting;

typedef struct outcome {                           // bytes of one rank
    fsdp_memory memory;                            // of fsdp_model_memory, after two steps
    int64_t optimizer, muon, average, world, host; // host: of memory.total_bytes
    int64_t need;                                  // on the device, with activations
    int64_t moved; // in a step: received from other ranks, or copied to or from pinned memory
} outcome;

static struct {
    setting s;
    fsdp_dtype store, reduce;
    int ranks, comm_threads, streams, search, before; // before: microbatches before the last one
    int64_t limit, reserve, activations;
    int optimizer; // index into optimizers
    int ema;
    name_rules rules;
    regex_t by_columns;
} want;

/* ---- what is printed ------------------------------------------------------------------------- */

static int expected(const char *where, const char *what) {
    return complain("[E470] %s: expected %s; --help explains", where, what);
}

/* ---- a run ----------------------------------------------------------------------------------- */

typedef struct run {
    const setting *s;
    fsdp_fake fake;
    fsdp_world *w;
    fsdp_model *m;
    fsdp_dmesh *dm;          // NULL: no tensor parallelism
    fsdp_param_desc *params; // [list.count]
    fsdp_placement *cuts;    // [list.count]
} run;

// Makes a unit of the parameters [begin, end). With tensor parallelism it takes only those that are
// cut, or only those that are not.
static fsdp_status add_unit(run *x, int begin, int end, int cut, const char *name) {
    fsdp_tp_unit_desc d = FSDP_ZERO;
    fsdp_unit *unit;
    regmatch_t match;
    int n = 0;
    for (int i = begin; i < end; i++) {
        const shape *s = &list.at[i];
        fsdp_param_desc *p = &x->params[n];
        if (x->dm && (s->ndim > 1) != cut) continue;
        memset(p, 0, sizeof *p);
        p->name = s->name, p->ndim = s->ndim, p->dtype = want.store;
        memcpy(p->shape, s->dims, sizeof p->shape);
        x->cuts[n].kind = cut ? FSDP_SHARD : FSDP_REPLICATE;
        x->cuts[n++].dim = (int8_t)(cut && !regexec(&want.by_columns, s->name, 1, &match, 0));
    }
    d.unit.name = *name ? name : "root", d.tp = x->cuts;
    d.unit.params = x->params, d.unit.num_params = n;
    if (!*name || (x->dm && !cut)) d.unit.reshard_after_forward = FSDP_RESHARD_NEVER;
    if (!n) return FSDP_OK;
    return x->dm ? fsdp_tp_fully_shard(x->dm, &d, &unit) : fsdp_fully_shard(x->m, &d.unit, &unit);
}

// Makes the world, the model and its units.
static fsdp_status make_model(run *x) {
    const setting *s = x->s;
    const int replicates = s->replicas > 1, cut = s->tp > 1;
    fsdp_world_desc wd = FSDP_ZERO;
    fsdp_mesh_desc mesh = FSDP_ZERO;
    fsdp_model_desc md = FSDP_ZERO;
    fsdp_dmesh_desc dd = FSDP_ZERO;
    fsdp_mesh_info info;
    fsdp_mesh *made = NULL;
    x->fake.addresses = 1, x->fake.plain = want.streams; // a GPU has NCCL
    wd.world_size = s->replicas * s->shards * s->tp;
    wd.comm_threads = want.comm_threads ? want.comm_threads : -1;
    wd.backend = "fake", wd.user = &x->fake, wd.log_level = FSDP_LOG_NONE;
    wd.device_ops = fsdp_fake_device_ops(want.streams);
    mesh.ndim = 3;
    mesh.shape[0] = s->replicas, mesh.shape[1] = s->shards, mesh.shape[2] = s->tp;
    mesh.names[0] = "dp_replicate", mesh.names[1] = "dp_shard", mesh.names[2] = "tp";
    md.param_dtype = s->param, md.reduce_dtype = want.reduce, md.mesh_info = &info;
    md.reshard_after_forward = s->reshard, md.cpu_offload = s->offload;
    fsdp_status status = fsdp_init(&wd, &x->w);
    if (!status) status = fsdp_mesh_create(x->w, &mesh, &made);
    if (!status)
        status = fsdp_mesh_info_init(made, replicates ? FSDP_MESH_INFO_HSDP : FSDP_MESH_INFO_FSDP,
                                     1, replicates ? 0 : -1, &info);
    dd.mesh = made;
    if (!status) status = fsdp_model_create(x->w, &md, &x->m);
    if (!status && cut) status = fsdp_dmesh_create(x->m, &dd, &x->dm);
    if (!status && cut) status = add_unit(x, 0, list.count, 0, "not cut by tp");
    for (int i = 0, end = 0; i < list.count && !status; i = end) {
        while (end < list.count && !strcmp(list.at[end].unit, list.at[i].unit)) end++;
        status = add_unit(x, i, end, cut, list.at[i].unit);
    }
    return status;
}

static void measure(const fsdp_unit *u, int64_t *whole, int64_t *shard) {
    fsdp_memory memory = FSDP_ZERO;
    (void)fsdp_unit_memory(u, &memory);
    *shard = memory.pool_bytes[FSDP_POOL_SHARD], *whole = 0;
    for (int k = 0; k < u->desc.num_params; k++)
        *whole += fsdpi_bytes(u->params[k].lay.numel, want.store);
}

// Prints the padding of the units, equal neighbours in one line.
static void show_padding(const run *x) {
    fsdp_unit *const *units = x->m->units;
    double most = 0;
    printf("bytes of a unit    a rank's shard    stored\n");
    for (int i = 0, end; i < x->m->num_units; i = end) {
        int64_t whole, shard, next_whole, next_shard;
        measure(units[i], &whole, &shard);
        for (end = i + 1; end < x->m->num_units; end++) {
            measure(units[end], &next_whole, &next_shard);
            if (next_whole != whole || next_shard != shard) break;
        }
        const double times = whole ? (double)x->s->shards * (double)shard / (double)whole : 1;
        printf("%15lld  %16lld  %7.2fx  ", (long long)whole, (long long)shard, times);
        put_safe(stdout, units[i]->desc.name);
        if (end > i + 1) printf(", and %d alike", end - i - 1);
        printf("\n");
        if (times > most) most = times;
    }
    if (most >= 2)
        printf(
            "%d shards are more than there are rows: up to %.1f times the memory. --search finds "
            "meshes that pad less\n",
            x->s->shards, most);
}

static const char *const optimizers[] = {"none", "sgd", "adamw", "muon"};
enum { NONE, SGD, ADAMW, MUON };

// Embeddings and heads are in no layer, and are AdamW's.
static int of_a_layer(void *user, const fsdp_param_view *v) {
    return (void)user, v->ndim == 2 && strcmp(v->unit_name, "root") != 0;
}
static int not_of_muon(void *user, const fsdp_param_view *v) {
    return fsdp_muon_takes((const fsdp_muon *)user, v) ? -1 : 0;
}

// Stands for the device's matrix product, and computes nothing.
static fsdp_status no_product(void *user, void *stream, int64_t m, int64_t n, int64_t k,
                              float alpha, const void *a, int64_t lda, int a_transposed,
                              const void *b, int64_t ldb, int b_transposed, float beta, void *c,
                              int64_t ldc, fsdp_dtype dtype) {
    (void)user, (void)stream, (void)m, (void)n, (void)k, (void)alpha, (void)a, (void)lda;
    (void)a_transposed, (void)b, (void)ldb, (void)b_transposed, (void)beta, (void)c, (void)ldc;
    return (void)dtype, FSDP_OK;
}

// Makes the optimizer, and tells the bytes. Offloaded, states are in memory of the host, uncounted.
static fsdp_status make_optimizer(run *x, outcome *out, fsdp_muon **muon) {
    const int64_t *given = x->fake.given;
    fsdp_muon_desc md = fsdp_muon_defaults();
    fsdp_adamw_desc ad = fsdp_adamw_defaults();
    fsdp_adamw *adamw;
    fsdp_sgd *sgd;
    fsdp_status status = FSDP_OK;
    md.take = of_a_layer;
    if (want.streams || !x->s->offload) md.gemm = no_product;
    out->muon = -given[0] - given[1];
    if (want.optimizer == MUON) status = fsdp_muon_create(x->m, &md, muon);
    out->muon += given[0] + given[1];
    ad.group = not_of_muon, ad.user = *muon;
    out->optimizer = -given[0];
    if (!status && want.optimizer == SGD && !x->s->offload)
        status = fsdp_sgd_create(x->m, NULL, &sgd);
    if (!status && want.optimizer >= ADAMW && !x->s->offload)
        status = fsdp_adamw_create(x->m, &ad, &adamw);
    out->optimizer += given[0];
    return status;
}

// Runs one setting, and fills in its outcome. Returns 0, or an exit status.
static int run_it(const setting *s, outcome *out, int show) {
    run x;
    fsdp_memory predicted;
    fsdp_predict_desc kept = FSDP_ZERO;
    fsdp_muon *muon = NULL;
    fsdp_ema *ema;
    fsdp_counters before = FSDP_ZERO, after = FSDP_ZERO;
    memset(out, 0, sizeof *out);
    memset(&x, 0, sizeof x);
    x.s = s;
    x.params = (fsdp_param_desc *)calloc((size_t)list.count, sizeof *x.params);
    x.cuts = (fsdp_placement *)calloc((size_t)list.count, sizeof *x.cuts);
    if (!x.params || !x.cuts) return no_memory();
    const int64_t *given = x.fake.given;
    fsdp_status status = make_model(&x);
    out->world = given[0];
    if (!status) status = fsdp_model_commit(x.m);
    if (!status) status = make_optimizer(&x, out, &muon);
    out->average = -given[0];
    if (!status && want.ema && !s->offload) status = fsdp_ema_create(x.m, NULL, &ema);
    out->average += given[0];
    for (int step = 0; step < 2 && !status; step++) {
        (void)fsdp_model_counters(x.m, &before);
        x.fake.bus_bytes = 0;
        for (int left = want.before; left >= 0 && !status; left--) {
            status = fsdp_set_requires_gradient_sync(x.m, NULL, !left || !s->keeps);
            if (!status) status = fsdpi_predict_step(x.m, 0);
        }
        if (!status && muon && !s->offload) status = fsdp_muon_step(muon, 0);
        if (!status) status = fsdp_zero_grad(x.m);
    }
    kept.without_sync = s->keeps;
    if (!status) status = fsdp_model_predict_step(x.m, &kept, &predicted);
    if (status) return complain("[E477] the library refuses: %s", fsdp_last_error(x.w));
    (void)fsdp_model_counters(x.m, &after);
    (void)fsdp_model_memory(x.m, &out->memory);
    out->moved = (int64_t)x.fake.bus_bytes;
    for (int k = FSDP_OP_ALL_GATHER; k <= FSDP_OP_RECV; k++)
        out->moved += (int64_t)(after.bytes[k] - before.bytes[k]);
    out->host = given[FSDP_MEMORY_PINNED];
    out->need = given[0] + want.activations;
    const int64_t others = out->optimizer + out->muon + out->average + out->world;
    if (memcmp(predicted.pool_bytes, out->memory.pool_bytes,
               FSDP_POOL_COUNT * sizeof *predicted.pool_bytes) ||
        predicted.total_bytes + others != given[0] + given[1])
        return complain("[E478] %lld bytes are predicted, %lld allocated: please report",
                        (long long)(predicted.total_bytes + others),
                        (long long)(given[0] + given[1]));
    // A job on CPUs has the product of the host.
    const int64_t packed = out->muon && !want.streams && !s->offload ? FSDP_HOST_GEMM_BYTES : 0;
    out->muon += packed, out->need += packed;
    if (show) show_padding(&x);
    free(x.params), free(x.cuts);
    return fsdp_shutdown(x.w) ? EXIT_UNREADABLE : 0;
}

static int fits(const outcome *o) { return !want.limit || o->need <= want.limit - want.reserve; }

/* ---- what would make it fit ------------------------------------------------------------------ */

typedef struct option {
    setting s;
    outcome o;
    char what[60];
} option;

static int by_moved(const void *a, const void *b) {
    const outcome *x = &((const option *)a)->o, *y = &((const option *)b)->o;
    if (fits(x) != fits(y)) return fits(y) - fits(x);
    if (x->moved != y->moved) return x->moved < y->moved ? -1 : 1;
    return (x->need > y->need) - (x->need < y->need);
}
static void show_options(option *options, int n) {
    qsort(options, (size_t)n, sizeof *options, by_moved);
    printf(" on the device  moved in a step\n");
    for (int i = 0; i < n && i < 10; i++)
        printf("%14s  %15s  %s%s\n", gib(options[i].o.need), gib(options[i].o.moved),
               options[i].what, fits(&options[i].o) ? "" : ": does not fit");
}

// Finds a number of shards, above that of x, with which the model fits, by halving. Returns 0, or
// an exit status.
static int more_shards(option *x) {
    int low, high = x->s.shards, bad = 0;
    x->o.need = INT64_MAX; // if no number of ranks is enough
    do {
        low = high;
        if (high > MOST_RANKS / x->s.replicas / x->s.tp / 2) return bad;
        x->s.shards = high *= 2;
        bad = run_it(&x->s, &x->o, 0);
    } while (!bad && !fits(&x->o));
    while (!bad && high - low > 1) {
        x->s.shards = low + (high - low) / 2;
        bad = run_it(&x->s, &x->o, 0);
        *(fits(&x->o) ? &high : &low) = x->s.shards;
    }
    x->s.shards = high;
    return bad ? bad : run_it(&x->s, &x->o, 0);
}

// Finds all meshes of want.ranks ranks, the best first. Returns 0, or an exit status.
static int search(option found[256], int *n) { // no number up to MOST_RANKS has more divisors
    const int ranks = want.ranks / want.s.tp;
    int bad = 0;
    *n = 0;
    for (int shards = 1; shards <= ranks && !bad; shards++) {
        if (ranks % shards) continue;
        option *x = &found[(*n)++];
        x->s = want.s, x->s.shards = shards, x->s.replicas = ranks / shards;
        snprintf(x->what, sizeof x->what, "--mesh %dx%d", ranks / shards, shards);
        bad = run_it(&x->s, &x->o, 0);
    }
    qsort(found, (size_t)*n, sizeof *found, by_moved);
    return bad;
}

// Prints which options would make the model fit. Returns 0, or an exit status.
static int show_what_fits(void) {
    static const char *const words[] = {"--reshard 1", "--param bf16", "cpu_offload",
                                        "sync on in all microbatches"};
    option found[6], meshes[256];
    int n = 0, bad = search(meshes, &n);
    found[n = 0] = meshes[0];
    for (int way = 0; way < 6 && !bad; way++) {
        option *x = &found[n];
        if (way) x->s = want.s;
        if (way && way < 5) snprintf(x->what, sizeof x->what, "%s", words[way - 1]);
        if (way == 1) x->s.reshard = FSDP_RESHARD_ALWAYS;
        if (way == 2) x->s.param = FSDP_BF16;
        if (way == 3) x->s.offload = want.streams && want.optimizer != MUON; // which refuses it
        if (way == 4) x->s.keeps = 0;
        if (way < 5 && !memcmp(&x->s, &want.s, sizeof x->s)) continue;
        if (way) bad = way < 5 ? run_it(&x->s, &x->o, 0) : more_shards(x);
        if (way == 5)
            snprintf(x->what, sizeof x->what, "%d ranks in place of %d",
                     x->s.replicas * x->s.shards * x->s.tp, want.ranks);
        n += fits(&x->o);
    }
    if (bad) return bad;
    printf(n ? "it fits with one of these:\n" : "no single change that is tried makes it fit\n");
    if (n) show_options(found, n);
    return 0;
}

static int no_verdict(void) {
    return complain(
        "[E1010] whether it fits is not known: %lld bytes of integers or packed weights "
        "are left out, which may be more parameters than the %lld that count. Give the "
        "files of the model before it was quantised, or its shapes as lines",
        (long long)list.packed, (long long)list.numel);
}

static void line(const char *what, int64_t bytes) {
    if (bytes) printf("%15lld  %10s  %s\n", (long long)bytes, gib(bytes), what);
}

static int show_meshes(void) {
    option found[256];
    int n, bad = search(found, &n);
    if (bad) return bad;
    printf("the best of %d meshes, replicas x shards:\n", n);
    show_options(found, n);
    if (want.limit && is_packed() && fits(&found[0].o)) return no_verdict();
    return fits(&found[0].o) ? 0 : EXIT_FULL;
}

static int show(void) {
    outcome o;
    const int bad = run_it(&want.s, &o, 1);
    if (bad) return bad;
    printf("bytes of a rank: %d replicas x %d shards x %d tp, stored %s, gathered %s, %s\n",
           want.s.replicas, want.s.shards, want.s.tp, fsdp_dtype_name(want.store),
           fsdp_dtype_name(want.s.param),
           want.streams ? "streams"
           : want.comm_threads ? "comm threads"
                        : "inline");
    for (int p = 0; p < FSDP_POOL_COUNT; p++) line(fsdp_pool_name(p), o.memory.pool_bytes[p]);
    line("muon", o.muon);
    line(optimizers[want.optimizer < MUON ? want.optimizer : ADAMW], o.optimizer);
    line("average of the weights", o.average);
    line("world: collectives on host data", o.world);
    line("activations, as you say", want.activations);
    line("of this in pinned memory of the host", o.host);
    line("on the device", o.need);
    line("moved in a step: received from other ranks, or copied to or from the host", o.moved);
    printf("not counted: %sfsdp_param_full, extensions, drivers and NCCL%s\n",
           want.s.keeps ? "" : "gradients without sync (--no-sync), ",
           !want.s.offload  ? ""
           : want.optimizer ? ", and the optimizer's states on the host"
           : want.ema       ? ", and the average on the host"
                            : "");
    const int64_t room = want.limit - want.reserve, left = room - o.need;
    if (!want.limit) return 0;
    if (is_packed() && left >= 0) return no_verdict();
    printf("%s: %s %s %s (%s less a reserve of %s)\n", left < 0 ? "does not fit" : "fits",
           gib(left < 0 ? -left : left), left < 0 ? "too much for" : "are left of", gib(room),
           gib(want.limit), gib(want.reserve));
    if (is_packed()) return EXIT_FULL;
    return fits(&o) ? 0 : show_what_fits() ? EXIT_UNREADABLE : EXIT_FULL;
}

/* ---- what the user wants --------------------------------------------------------------------- */

// clang-format off
static const struct known {
    const char *name, *help;
    char kind; // a number, bytes, a dtype, an optimizer, a mesh, a regex; a flag has no value
    void *to;
} options[] = {
    {"--ranks", "N of the job", 'n', &want.ranks},
    {"--mesh", "RxS: R replicas of S shards; default 1xN", 'm', &want.s},
    {"--tp", "T ranks cut the matrices; then RxS is of N / T ranks", 'n', &want.s.tp},
    {"--store", "dtype of shards: f32 (default), f64, f16 or bf16", 'd', &want.store},
    {"--param", "dtype of gathered parameters; default as stored", 'd', &want.s.param},
    {"--reduce", "dtype that is reduced; default as stored", 'd', &want.reduce},
    {"--reshard", "after forward: 1 always (default), 0 never, or a number", 'n', &want.s.reshard},
    {"--optimizer", "adamw (default), sgd, muon (and adamw) or none", 'o', &want.optimizer},
    {"--ema", "an average of the weights (fsdp_ema_create)", 'f', &want.ema},
    {"--cpu-offload", "shards and gradients are in memory of the host", 'f', &want.s.offload},
    {"--streams", "a GPU with NCCL; default inline", 'f', &want.streams},
    {"--no-sync", "N microbatches before the last one are not reduced", 'n', &want.before},
    {"--comm-threads", "1 or 2 threads run collectives", 'n', &want.comm_threads},
    {"--limit", "bytes of a device, as 80GiB or 80GB", 'b', &want.limit},
    {"--reserve", "bytes of it that others need", 'b', &want.reserve},
    {"--activations", "bytes of yours: they are not guessed", 'b', &want.activations},
    {"--unit", "regex: where the name of a unit ends; default by numbers", 'r', &want.rules.unit},
    {"--skip", "regex: tensors that are no parameters", 'r', &want.rules.skip},
    {"--search", "the ten best of all meshes RxS", 'f', &want.search}};
static const struct known *const options_end = options + sizeof options / sizeof *options;
// clang-format on

static int help(void) {
    printf("usage: fsdpfit FILE|DIR|NAME.index.json... --ranks N [OPTION...]\n\n"
           "The bytes that each rank needs for a model, before anything runs. Shapes are those of\n"
           "safetensors headers, or of lines of a text file: unit NAME: param NAME ROWS COLS ...\n"
           "What is in no layer is in the unit 'root', which is open around the others.\n\n");
    for (const struct known *o = options; o < options_end; o++)
        printf("  %-14s %s\n", o->name, o->help);
    printf(
        "\nExit status: 0 fits, or no limit is given; 1 does not; 2 cannot read, or wrong use\n");
    return 0;
}

static int read_bytes(const char *text, int64_t *out) {
    static const char *const units[] = {"",  "KiB", "MiB", "GiB", "TiB",
                                        "B", "KB",  "MB",  "GB",  "TB"};
    char unit[5] = "";
    long long value = -1, scale = 1;
    if (sscanf(text, "%18lld%4s", &value, unit) < 1 || value < 0) return 0;
    for (int i = 0; i < 10; i++, scale *= i < 5 ? 1024 : 1000) {
        if (i == 5) scale = 1;
        if (strcmp(unit, units[i]) || value > INT64_MAX / 4 / scale) continue;
        *out = value * scale;
        return 1;
    }
    return 0;
}

static int read_value(const struct known *o, const char *v) {
    char more;
    int *n = (int *)o->to, good = 0;
    switch (o->kind) {
    case 'f': good = *n = 1; break;
    case 'b': good = read_bytes(v, (int64_t *)o->to); break;
    case 'm':
        good = sscanf(v, "%7dx%7d%c", &n[0], &n[1], &more) == 2 && n[0] > 0 && n[1] > 0;
        break;
    case 'n': good = sscanf(v, "%8d%c", n, &more) == 1 && *n >= 0 && *n <= MOST_RANKS; break;
    case 'r':
        regfree((regex_t *)o->to);
        good = !regcomp((regex_t *)o->to, v, REG_EXTENDED);
        want.rules.by_regex |= o->to == &want.rules.unit;
        break;
    case 'd':
        for (*n = FSDP_F32; !good && *n <= FSDP_BF16; *n += !good)
            good = !strcmp(v, fsdp_dtype_name(*n));
        break;
    default:
        for (*n = NONE; !good && *n <= MUON; *n += !good) good = !strcmp(v, optimizers[*n]);
    }
    return good ? 0 : expected(o->name, o->help);
}

static int read_arguments(int argc, char **argv, int *paths) {
    int bad = 0;
    for (int i = 1; i < argc && !bad; i++) {
        const struct known *o = options;
        const size_t length = strcspn(argv[i], "=");
        if (argv[i][0] != '-') {
            argv[++*paths] = argv[i];
            continue;
        }
        while (o < options_end && (strncmp(argv[i], o->name, length) || o->name[length])) o++;
        const int is_flag = o < options_end && o->kind == 'f';
        if (o == options_end || (is_flag && argv[i][length]))
            return complain("[E479] unknown option '%s'; --help explains", argv[i]);
        if (is_flag || argv[i][length]) bad = read_value(o, argv[i] + length + !is_flag);
        else bad = read_value(o, i + 1 < argc ? argv[++i] : "");
    }
    if (!bad && !*paths) bad = expected("fsdpfit", "a file of shapes");
    if (!bad && !want.ranks) bad = expected("--ranks", "N");
    if (!bad && (!want.s.tp || want.ranks % want.s.tp)) bad = expected("--tp", "a divisor of N");
    if (!bad && !want.s.shards) want.s.shards = want.ranks / want.s.tp, want.s.replicas = 1;
    if (!bad && (int64_t)want.s.replicas * want.s.shards * want.s.tp != want.ranks)
        bad = expected("--mesh", "a mesh of N ranks, with --tp N / T");
    if (!bad && want.s.offload && !want.streams)
        bad = expected("--cpu-offload", "--streams: without it the host's memory is the device's, "
                                        "and nothing is saved");
    return bad;
}

int main(int argc, char **argv) {
    int paths = 0;
    want.s.tp = want.s.reshard = 1, want.store = FSDP_F32, want.optimizer = ADAMW;
    int bad = regcomp(&want.rules.unit, "^$", REG_EXTENDED) |
              regcomp(&want.rules.skip, "^$", REG_EXTENDED) |
              regcomp(&want.by_columns, BY_COLUMNS, REG_EXTENDED);
    (void)unsetenv("FSDP_FLIGHT_RECORD"); // not for worlds without peers
    (void)unsetenv("FSDP_TRACE");
    const int asks = argc > 1 && (!strcmp(argv[1], "--help") || !strcmp(argv[1], "-h"));
    if (!bad && !asks) bad = read_arguments(argc, argv, &paths);
    if (!want.s.param) want.s.param = want.store;
    want.s.keeps = want.before > 0;
    if (!want.s.reshard) want.s.reshard = FSDP_RESHARD_NEVER;
    for (int i = 1; i <= paths && !bad; i++) bad = read_path(argv[i], &want.rules);
    if (!bad && !asks) bad = sort_shapes();
    if (!bad) bad = asks ? help() : want.search ? show_meshes() : show();
    if (fflush(stdout) || ferror(stdout))
        bad = complain("[E480] standard output: %s", strerror(errno));
    return bad;
}
