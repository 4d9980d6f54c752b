/* test_fsdpfit.c - tools/fsdpfit: its figures equal the memory of a job, to the byte; published
   models as headers; results, options that make a model fit, meshes; hostile files and wrong use.
   The tool under test is $FSDPFIT, or tools/fsdpfit.

   SPDX-License-Identifier: MIT */
#define TAGS NO(ASAN) /* there a job has guard memory in addition */
#include "harness.h"
#include "lab_muon.h"
#include "sim.h"
#include "fsdp_checkpoint.h"
#include "fsdp_dtensor.h"
#include "fsdp_muon.h"
#include <sys/resource.h> /* struct rusage */

static char output[65536]; /* both streams of the last command */
static long resident_kib;  /* its peak resident memory */

static const char *path_of(const char *leaf) {
    static char path[256][500]; /* used in turn */
    static unsigned turn;
    char *out = path[turn++ % 256];
    snprintf(out, sizeof path[0], "%s/%s", h_tmpdir(), leaf);
    return out;
}

/* Runs fsdpfit with these words, separated by blanks. Returns its exit status. */
static int fit(const char *format, ...) H_PRINTF(1, 2);
static int fit(const char *format, ...) {
    static char words[8192];
    char *argv[64], *save = NULL;
    int n = 1, status = 0;
    struct rusage used;
    const char *tool = getenv("FSDPFIT");
    va_list args;
    va_start(args, format);
    CHECK(vsnprintf(words, sizeof words, format, args) < (int)sizeof words);
    va_end(args);
    argv[0] = (char *)(uintptr_t)(tool && *tool ? tool : "tools/fsdpfit");
    if (access(argv[0], X_OK)) SKIP("no tools/fsdpfit here: make tools/fsdpfit");
    for (char *w = strtok_r(words, " ", &save); w && n < 63; w = strtok_r(NULL, " ", &save))
        argv[n++] = w;
    argv[n] = NULL;
    fflush(NULL);
    pid_t pid = fork();
    CHECK(pid >= 0);
    if (pid == 0) {
        int file = open(path_of("out"), O_CREAT | O_TRUNC | O_RDWR | O_APPEND, 0600);
        dup2(file, STDOUT_FILENO);
        dup2(file, STDERR_FILENO);
        execv(argv[0], argv);
        _exit(99);
    }
    CHECK_EQ_INT(wait4(pid, &status, 0, &used), pid);
    resident_kib = used.ru_maxrss;
    FILE *f = fopen(path_of("out"), "r");
    CHECK(f != NULL);
    output[fread(output, 1, sizeof output - 1, f)] = 0;
    fclose(f);
    CHECK_MSG(WIFEXITED(status), "fsdpfit died of signal %d: %s", WTERMSIG(status), output);
    return WEXITSTATUS(status);
}
static void says(const char *part) {
    CHECK_MSG(strstr(output, part), "\"%s\" does not say \"%s\"", output, part);
}
static void fails(const char *part) {
    says("fsdpfit: [E4");
    says(part);
}

/* Returns the number at the beginning of the line that ends with `name`; 0: there is none. */
static int64_t bytes_of(const char *name) {
    char line[160];
    snprintf(line, sizeof line, "  %s\n", name);
    const char *end = strstr(output, line);
    if (!end) return 0;
    while (end > output && end[-1] != '\n') end--;
    return strtoll(end, NULL, 10);
}

static void store(const char *leaf, const char *text) {
    FILE *f = fopen(path_of(leaf), "w");
    CHECK(f && fputs(text, f) >= 0 && !fclose(f));
}

/* ---- allocations of a job -------------------------------------------------------------------- */

enum { MAX_UNITS = 12, MAX_PARAMS = 5 };

typedef struct net {
    int units, root, never; /* units: with the root, which is the first one if there is one */
    int params[MAX_UNITS], ndim[MAX_UNITS][MAX_PARAMS];
    int64_t shape[MAX_UNITS][MAX_PARAMS][3];
    fsdp_dtype store, param, reduce;
    int lanes, tp, replicas, before; /* before: microbatches without sync before the last one */
} net;

static net random_net(uint64_t *state) {
    static const fsdp_dtype kinds[7][3] = {{FSDP_F32, 0, 0},
                                           {FSDP_F32, FSDP_BF16, FSDP_F32},
                                           {FSDP_F32, FSDP_BF16, FSDP_BF16},
                                           {FSDP_F32, FSDP_F32, FSDP_BF16},
                                           {FSDP_F64, 0, 0},
                                           {FSDP_BF16, 0, 0},
                                           {FSDP_F64, FSDP_F32, FSDP_F32}};
    net n = FSDP_ZERO;
    const fsdp_dtype *kind = kinds[lab_pick(state, 7)];
    n.store = kind[0], n.param = kind[1], n.reduce = kind[2];
    n.units = 1 + lab_pick(state, MAX_UNITS), n.root = lab_pick(state, 2);
    n.never = lab_pick(state, 4) == 0, n.lanes = lab_pick(state, 3);
    n.before = lab_pick(state, 2) ? lab_pick(state, 4) : 0;
    n.tp = n.replicas = 1;
    const int alike = lab_pick(state, 2);
    for (int u = 0; u < n.units; u++) {
        n.params[u] = 1 + lab_pick(state, MAX_PARAMS);
        for (int i = 0; i < n.params[u]; i++) {
            n.ndim[u][i] = 1 + lab_pick(state, 3);
            for (int d = 0; d < 3; d++)
                n.shape[u][i][d] = lab_pick(state, 15) ? 1 + lab_pick(state, 40) : 0;
            if (lab_pick(state, 4) == 0) /* gathered in place */
                n.ndim[u][i] = 2, n.shape[u][i][0] = 256, n.shape[u][i][1] = 64;
        }
        if (u > n.root && alike) {
            n.params[u] = n.params[u - 1];
            memcpy(n.ndim[u], n.ndim[u - 1], sizeof n.ndim[u]);
            memcpy(n.shape[u], n.shape[u - 1], sizeof n.shape[u]);
        }
    }
    return n;
}

/* Writes the net as lines for the tool; units in reverse order, as the tool sorts them by name. */
static void write_net(const net *n) {
    FILE *f = fopen(path_of("net"), "w");
    CHECK(f != NULL);
    fprintf(f, "# a net\n\n");
    for (int u = n->units - 1; u >= 0; u--) {
        if (u < n->root) fprintf(f, "unit root:");
        else fprintf(f, "unit h.%d:", u);
        for (int i = 0; i < n->params[u]; i++) {
            fprintf(f, " param p%d", i);
            for (int d = 0; d < n->ndim[u][i]; d++)
                fprintf(f, " %lld", (long long)n->shape[u][i][d]);
        }
        fprintf(f, "\n");
    }
    CHECK_EQ_INT(fclose(f), 0);
}
static int fit_net(const net *n, int ranks, const char *more) {
    write_net(n);
    return fit("%s --ranks %d --mesh %dx%d --tp %d --store %s --reshard %d --no-sync %d %s%s %s%s "
               "%s%s %s",
               path_of("net"), ranks, n->replicas, ranks / n->replicas / n->tp, n->tp,
               fsdp_dtype_name(n->store), !n->never, n->before, n->param ? "--param " : "",
               n->param ? fsdp_dtype_name(n->param) : "", n->reduce ? "--reduce " : "",
               n->reduce ? fsdp_dtype_name(n->reduce) : "", n->lanes ? "--comm-threads=" : "",
               n->lanes == 2 ? "2"
               : n->lanes    ? "1"
                             : "",
               more);
}

typedef struct built {
    fsdp_model *m;
    fsdp_unit *units[2 * MAX_UNITS];
    int is_open[2 * MAX_UNITS], params[2 * MAX_UNITS], count;
} built;

static void build_unit(built *b, fsdp_world *w, fsdp_dmesh *dm, const net *n, int u, int cut) {
    fsdp_param_desc p[MAX_UNITS * MAX_PARAMS];
    fsdp_placement by[MAX_UNITS * MAX_PARAMS];
    fsdp_tp_unit_desc d = FSDP_ZERO;
    int count = 0;
    memset(by, 0, sizeof by);
    for (int v = u < 0 ? 0 : u; v < (u < 0 ? n->units : u + 1); v++)
        for (int i = 0; i < n->params[v]; i++) {
            if (dm && (n->ndim[v][i] > 1) != cut) continue;
            if (cut) by[count].kind = FSDP_SHARD;
            p[count++] = lab_desc(n->ndim[v][i], n->shape[v][i], 0, n->store, 0);
        }
    if (!count) return;
    const int is_open = u < n->root; /* so are parameters that tensor parallelism replicates */
    d.unit.params = p, d.unit.num_params = count, d.tp = by;
    d.unit.reshard_after_forward = is_open ? FSDP_RESHARD_NEVER : FSDP_RESHARD_DEFAULT;
    b->is_open[b->count] = is_open && !n->never;
    b->params[b->count] = count;
    if (dm) CALL(w, fsdp_tp_fully_shard(dm, &d, &b->units[b->count++]));
    else CALL(w, fsdp_fully_shard(b->m, &d.unit, &b->units[b->count++]));
}

/* Builds the model of the net, and runs two steps of a trainer. */
static void train_net(built *b, fsdp_world *w, const net *n) {
    static const char *const names[3] = {"dp_replicate", "dp_shard", "tp"};
    fsdp_model_desc md = FSDP_ZERO;
    fsdp_dmesh_desc dd = FSDP_ZERO;
    fsdp_mesh_info info;
    fsdp_dmesh *dm = NULL;
    const int32_t shape[3] = {n->replicas, fsdp_world_size(w) / n->replicas / n->tp, n->tp};
    memset(b, 0, sizeof *b);
    md.param_dtype = n->param, md.reduce_dtype = n->reduce;
    if (n->never) md.reshard_after_forward = FSDP_RESHARD_NEVER;
    if (n->replicas * n->tp > 1) {
        dd.mesh = lab_mesh(w, 3, shape, names, NULL), md.mesh_info = &info;
        CALL(w, fsdp_mesh_info_init(dd.mesh,
                                    n->replicas > 1 ? FSDP_MESH_INFO_HSDP : FSDP_MESH_INFO_FSDP, 1,
                                    n->replicas > 1 ? 0 : -1, &info));
    }
    b->m = lab_model(w, &md);
    if (n->tp > 1) CALL(w, fsdp_dmesh_create(b->m, &dd, &dm));
    if (dm) build_unit(b, w, dm, n, -1, 0);
    for (int u = 0; u < n->units; u++) build_unit(b, w, dm, n, u, dm != NULL);
    int reshards = 0;
    for (int u = 0; u < b->count; u++) reshards |= !b->is_open[u];
    for (int k = 0; k < 4 * (n->before + 1); k++) { /* forward, backward of microbatches, twice */
        const int ends = k / 2 % (n->before + 1) == n->before;
        CALL(w, fsdp_set_requires_gradient_sync(b->m, NULL, ends));
        for (int pass = 0; pass < 3; pass++)
            for (int i = 0; i < b->count; i++) {
                const int u = k % 2 ? b->count - 1 - i : i;
                if ((reshards && b->is_open[u]) != (pass != 1)) continue;
                if (pass < 2)
                    CALL(w, k % 2 ? fsdp_pre_backward(b->units[u]) : fsdp_pre_forward(b->units[u]));
                for (int p = 0; pass < 2 && k % 2 && p < b->params[u]; p++)
                    CHECK(fsdp_grad(b->units[u], p) != NULL);
                if (pass > 0)
                    CALL(w,
                         k % 2 ? fsdp_post_backward(b->units[u]) : fsdp_post_forward(b->units[u]));
            }
        if (k % 2) CALL(w, fsdp_finalize_backward(b->m));
        if (k % 2 && ends) CALL(w, fsdp_zero_grad(b->m));
    }
}

/* Checks that each pool of the model, and the optimizers' memory, is as the tool says. */
static void as_the_tool_says(const fsdp_memory *m, int64_t optimizer, int64_t muon) {
    int64_t sum = optimizer + muon + bytes_of("world: collectives on host data");
    for (int p = 0; p < FSDP_POOL_COUNT; p++) {
        CHECK_MSG(bytes_of(fsdp_pool_name(p)) == m->pool_bytes[p],
                  "%s: %s: a job has %lld bytes, fsdpfit says:\n%s", w_case, fsdp_pool_name(p),
                  (long long)m->pool_bytes[p], output);
        sum += m->pool_bytes[p];
    }
    CHECK_EQ_INT(bytes_of("adamw"), optimizer);
    CHECK_EQ_INT(bytes_of("muon"), muon);
    CHECK_EQ_INT(bytes_of("on the device"), sum);
}

/* What an error of allocation says behind `fsdpfit SHAPES`; it has no command with tensor
   parallelism. */
static void command_of(fsdp_world *w, const built *b, const net *n, char *out, size_t room) {
    void *ptr;
    CHECK_STATUS(fsdp_alloc(b->m, FSDP_MEMORY_HOST, INT64_MAX / 4, "a test", &ptr),
                 FSDP_ERR_OUT_OF_MEMORY);
    const char *text = fsdp_last_error(w), *at = strstr(text, "fsdpfit SHAPES ");
    CHECK_MSG((at == NULL) == (n->tp > 1) && strstr(text, "fsdpfit "), "%s", text);
    snprintf(out, room, "%s", at ? at + strlen("fsdpfit SHAPES ") : "");
}

typedef struct nets {
    int count;
    net *net;
    char (*command)[200];
    fsdp_memory *memory;
    int64_t *optimizer, *muon, *received; /* muon: bytes; NULL: without. received: in its step */
} nets;

typedef struct matrices {
    fsdp_muon *muon;
    const fsdp_unit *root; /* NULL: there is none */
} matrices;
static int of_a_layer(void *user, const fsdp_param_view *v) {
    return v->ndim == 2 && v->unit != ((const matrices *)user)->root;
}
static int not_of_muon(void *user, const fsdp_param_view *v) {
    return fsdp_muon_takes(((const matrices *)user)->muon, v) ? -1 : 0;
}
static int64_t rows_of(int64_t numel) { return (numel + 15) / 16 * 16; } /* elements of a state */

static void on_ranks(lab_rank *r) {
    const nets *n = (const nets *)r->arg;
    fsdp_world *worlds[3];
    for (int i = 0; i < 3; i++) worlds[i] = lab_world(r, i, i, NULL);
    for (int i = 0; i < n->count; i++) {
        fsdp_world *w = worlds[n->net[i].lanes];
        fsdp_adamw_desc ad = fsdp_adamw_defaults();
        fsdp_muon_desc md = fsdp_muon_defaults();
        fsdp_adamw *adamw;
        fsdp_memory before, after;
        built b;
        matrices x = {NULL, NULL};
        int64_t numel[2] = {0, 0};
        train_net(&b, w, &n->net[i]);
        CALL(w, fsdp_model_memory(b.m, &before));
        if (r->rank == 0) command_of(w, &b, &n->net[i], n->command[i], sizeof n->command[i]);
        if (n->net[i].root) x.root = b.units[0];
        md.take = of_a_layer, md.user = &x;
        if (n->muon) CALL(w, fsdp_muon_create(b.m, &md, &x.muon));
        ad.group = not_of_muon, ad.user = &x;
        CALL(w, fsdp_adamw_create(b.m, &ad, &adamw));
        CALL(w, fsdp_model_memory(b.m, &after));
        for (fsdp_param_view v = FSDP_ZERO; fsdp_next_param(b.m, &v);)
            numel[fsdp_muon_takes(x.muon, &v)] += v.numel;
        const int pool = n->muon ? fsdp_pool_register(b.m, "muon") : 0;
        if (r->rank == 0) n->memory[i] = before, n->optimizer[i] = numel[0];
        if (r->rank == 0 && n->muon) {
            char text[400];
            long long received = -1;
            (void)fsdp_muon_describe(x.muon, text, sizeof text);
            CHECK_EQ_INT(sscanf(strstr(text, "receives"), "receives %lld", &received), 1);
            n->muon[i] = after.pool_bytes[pool] + rows_of(numel[1]) * 4, n->received[i] = received;
        }
        fsdp_adamw_destroy(adamw);
        fsdp_muon_destroy(x.muon);
        fsdp_model_destroy(b.m);
    }
    for (int i = 0; i < 3; i++) CALL(NULL, fsdp_shutdown(worlds[i]));
}

/* Returns the bytes of two states in f32, or in f64 for parameters in f64; each row of them is a
   multiple of 16 elements. */
static int64_t states_of(const net *n, int64_t numel) {
    return rows_of(numel) * (n->store == FSDP_F64 ? 8 : 4) * 2;
}

static void predict_all(int ranks, int count, int tp, int replicas, int muon) {
    uint64_t state = h_seed() * 31 + (uint64_t)ranks;
    nets n = {count,
              (net *)lab_zeros((size_t)count, sizeof(net)),
              (char(*)[200])lab_zeros((size_t)count, sizeof *n.command),
              (fsdp_memory *)lab_zeros((size_t)count, sizeof(fsdp_memory)),
              (int64_t *)lab_zeros((size_t)count, sizeof(int64_t)),
              NULL,
              (int64_t *)lab_zeros((size_t)count, sizeof(int64_t))};
    static const char moved[] = "moved in a step: received from other ranks, or copied to or from "
                                "the host";
    if (muon) n.muon = (int64_t *)lab_zeros((size_t)count, sizeof(int64_t));
    for (int i = 0; i < count; i++) {
        do n.net[i] = random_net(&state);
        while (muon && n.net[i].store == FSDP_F64); /* which Muon refuses */
        n.net[i].tp = tp, n.net[i].replicas = replicas;
    }
    lab_how how = FSDP_ZERO;
    how.job = "fit", how.bare = 1;
    lab_run(ranks, &how, on_ranks, &n);
    for (int i = 0; i < count; i++) {
        snprintf(w_case, sizeof w_case, "net %d of %d ranks, lanes %d", i, ranks, n.net[i].lanes);
        CHECK_MSG(fit_net(&n.net[i], ranks, muon ? "--optimizer muon" : "") == 0, "%s: %s", w_case,
                  output);
        as_the_tool_says(&n.memory[i], states_of(&n.net[i], n.optimizer[i]), muon ? n.muon[i] : 0);
        const int64_t with = bytes_of(moved);
        if (muon) CHECK(fit_net(&n.net[i], ranks, "--optimizer adamw") == 0);
        CHECK_EQ_INT(with - bytes_of(moved), n.received[i]);
        if (tp > 1 || muon) continue;
        CHECK_MSG(fit("%s %s --no-sync %d", path_of("net"), n.command[i], n.net[i].before) == 0,
                  "%s: %s", n.command[i], output);
        as_the_tool_says(&n.memory[i], states_of(&n.net[i], n.optimizer[i]), 0);
    }
    free(n.command), free(n.net), free(n.memory), free(n.optimizer), free(n.muon), free(n.received);
}

static const struct {
    const char *name;
    int ranks, tp, replicas;
} jobs[] = {{"1", 1, 1, 1},         {"2", 2, 1, 1},         {"3", 3, 1, 1},
            {"4", 4, 1, 1},         {"2x2", 4, 1, 2},       {"3x1", 3, 1, 3},
            {"1x2, tp 2", 4, 2, 1}, {"1x1, tp 2", 2, 2, 1}, {"2x1, tp 2", 4, 2, 2}};
TEST_P(fsdpfit, predicts_allocations, jobs) {
    predict_all(row->ranks, 12, row->tp, row->replicas, 0);
}
TEST(fsdpfit, predicts_memory_of_muon) {
    for (int ranks = 1; ranks <= 4; ranks++) predict_all(ranks, 6, 1, 1, 1);
    predict_all(4, 6, 1, 2, 1);
    predict_all(3, 6, 1, 3, 1);
}

/* A device with streams, over a backend that neither casts nor scales, as NCCL. */
static const struct {
    const char *name;
    int ranks, replicas;
} streams[] = {{"1", 1, 1}, {"2", 2, 1}, {"3", 3, 1}, {"4", 4, 1}, {"2x2", 4, 2}, {"3x1", 3, 3}};
TEST_P(fsdpfit, predicts_allocations_on_streams, streams) {
    uint64_t state = h_seed() + 5;
    for (int i = 0; i < 12; i++) {
        net n = random_net(&state);
        fsdp_memory memory;
        char command[200];
        built b;
        sim s;
        n.replicas = row->replicas, n.lanes = 0;
        sim_init(&s, row->ranks, 0);
        s.fused = 0, s.all_to_all = 1;
        CHECK(sim_open(&s));
        train_net(&b, s.world, &n);
        CALL(s.world, fsdp_model_memory(b.m, &memory));
        command_of(s.world, &b, &n, command, sizeof command);
        int64_t numel[2] = {0, 0}, muon = 0;
        matrices x = {NULL, n.root ? b.units[0] : NULL};
        fsdp_muon_desc md = fsdp_muon_defaults();
        fsdp_memory after;
        md.take = of_a_layer, md.user = &x, md.gemm = lab_gemm;
        const int with_muon = n.store != FSDP_F64; /* which Muon refuses */
        if (with_muon) {
            CALL(s.world, fsdp_muon_create(b.m, &md, &x.muon));
            CALL(s.world, fsdp_model_memory(b.m, &after));
            for (fsdp_param_view v = FSDP_ZERO; fsdp_next_param(b.m, &v);)
                numel[fsdp_muon_takes(x.muon, &v)] += v.numel;
            muon = after.pool_bytes[fsdp_pool_register(b.m, "muon")] + rows_of(numel[1]) * 4;
        }
        CHECK_EQ_INT(sim_close(&s), 0);
        snprintf(w_case, sizeof w_case, "net %d of %d ranks", i, row->ranks);
        CHECK_MSG(fit_net(&n, row->ranks, "--streams --optimizer none") == 0, "%s", output);
        as_the_tool_says(&memory, 0, 0);
        CHECK_MSG(fit("%s %s --no-sync %d --optimizer none", path_of("net"), command, n.before) ==
                      0,
                  "%s: %s", command, output);
        as_the_tool_says(&memory, 0, 0);
        if (!with_muon) continue;
        CHECK_MSG(fit_net(&n, row->ranks, "--streams --optimizer muon") == 0, "%s", output);
        as_the_tool_says(&memory, states_of(&n, numel[0]), muon);
    }
}

/* ---- published models, as headers ------------------------------------------------------------ */

static struct {
    fsdp_safetensors_entry at[1024];
    char names[1024][80];
    int count;
} headers;

static void tensor(fsdp_dtype dtype, int ndim, int64_t rows, int64_t cols, const char *format, ...)
    H_PRINTF(5, 6);
static void tensor(fsdp_dtype dtype, int ndim, int64_t rows, int64_t cols, const char *format,
                   ...) {
    fsdp_safetensors_entry *e = &headers.at[headers.count];
    va_list args;
    CHECK(headers.count < 1024);
    va_start(args, format);
    vsnprintf(headers.names[headers.count], sizeof headers.names[0], format, args);
    va_end(args);
    memset(e, 0, sizeof *e);
    e->name = headers.names[headers.count++], e->dtype = dtype, e->ndim = ndim;
    e->shape[0] = rows;
    if (ndim > 1) e->shape[1] = cols;
}

/* Writes a file with a header, and a hole for the data, which are not read. */
static void write_headers(const char *leaf) {
    fsdp_safetensors_entry *e = headers.at;
    const int n = headers.count;
    const int64_t need = fsdp_safetensors_print(e, n, 0, NULL, NULL, 0, NULL, 0);
    CHECK(need > 0);
    const int64_t data = e[n - 1].end;
    char *room = (char *)malloc((size_t)need);
    CHECK(room && fsdp_safetensors_print(e, n, 0, NULL, NULL, 0, room, need) == need);
    FILE *f = fopen(path_of(leaf), "wb");
    CHECK(f != NULL);
    for (int i = 0; i < 8; i++) fputc((int)((uint64_t)need >> 8 * i & 255), f);
    CHECK(fwrite(room, 1, (size_t)need, f) == (size_t)need);
    CHECK(!fclose(f) && !truncate(path_of(leaf), 8 + need + data));
    free(room);
    headers.count = 0;
}

static void llama(const char *leaf, int64_t hidden, int64_t wide, int64_t kv, int layers) {
    tensor(FSDP_BF16, 2, 128256, hidden, "model.embed_tokens.weight");
    for (int i = 0; i < layers; i++) {
        tensor(FSDP_BF16, 1, hidden, 0, "model.layers.%d.input_layernorm.weight", i);
        tensor(FSDP_BF16, 1, hidden, 0, "model.layers.%d.post_attention_layernorm.weight", i);
        tensor(FSDP_BF16, 2, hidden, hidden, "model.layers.%d.self_attn.q_proj.weight", i);
        tensor(FSDP_BF16, 2, kv, hidden, "model.layers.%d.self_attn.k_proj.weight", i);
        tensor(FSDP_BF16, 2, kv, hidden, "model.layers.%d.self_attn.v_proj.weight", i);
        tensor(FSDP_BF16, 2, hidden, hidden, "model.layers.%d.self_attn.o_proj.weight", i);
        tensor(FSDP_BF16, 2, wide, hidden, "model.layers.%d.mlp.gate_proj.weight", i);
        tensor(FSDP_BF16, 2, wide, hidden, "model.layers.%d.mlp.up_proj.weight", i);
        tensor(FSDP_BF16, 2, hidden, wide, "model.layers.%d.mlp.down_proj.weight", i);
    }
    tensor(FSDP_BF16, 1, hidden, 0, "model.norm.weight");
    tensor(FSDP_BF16, 2, 128256, hidden, "lm_head.weight");
    write_headers(leaf);
}
static void llama_8b(void) { llama("8b.safetensors", 4096, 14336, 1024, 32); }
static void llama_70b(void) { llama("70b.safetensors", 8192, 28672, 1024, 80); }

static void gpt2(const char *leaf) {
    tensor(FSDP_F32, 2, 50257, 768, "wte.weight");
    tensor(FSDP_F32, 2, 1024, 768, "wpe.weight");
    for (int i = 0; i < 12; i++) {
        static const struct {
            const char *name;
            int64_t rows, cols;
        } parts[] = {{"ln_1.weight", 768, 0},           {"ln_1.bias", 768, 0},
                     {"attn.c_attn.weight", 768, 2304}, {"attn.c_attn.bias", 2304, 0},
                     {"attn.c_proj.weight", 768, 768},  {"attn.c_proj.bias", 768, 0},
                     {"ln_2.weight", 768, 0},           {"ln_2.bias", 768, 0},
                     {"mlp.c_fc.weight", 768, 3072},    {"mlp.c_fc.bias", 3072, 0},
                     {"mlp.c_proj.weight", 3072, 768},  {"mlp.c_proj.bias", 768, 0},
                     {"attn.bias", 1024, 1024}};
        for (int k = 0; k < 13; k++)
            tensor(FSDP_F32, parts[k].cols ? 2 : 1, parts[k].rows, parts[k].cols, "h.%d.%s", i,
                   parts[k].name);
    }
    tensor(FSDP_F32, 1, 768, 0, "ln_f.weight");
    tensor(FSDP_F32, 1, 768, 0, "ln_f.bias");
    tensor(FSDP_I64, 1, 10, 0, "position_ids");
    write_headers(leaf);
}

TEST(fsdpfit, published_models) {
    gpt2("gpt2.safetensors");
    CHECK_EQ_INT(fit("%s --ranks 1 --skip \\.attn\\.bias$", path_of("gpt2.safetensors")), 0);
    says("148 parameters in 13 units; 13 tensors are left out\n");
    says("around the others: ln_f.bias ln_f.weight wpe.weight wte.weight\n");
    says("h.0, and 11 alike\n");
    CHECK_EQ_INT(bytes_of("shards"), 4 * 124439808); /* its published number of parameters */
    CHECK_EQ_INT(bytes_of("adamw"), 8 * 124439808);
    CHECK_EQ_INT(
        fit("%s --ranks 1 --unit=c_[a-z]+\\. --skip \\.attn\\.bias$", path_of("gpt2.safetensors")),
        0);
    says(" in 49 units;");
    llama_8b();
    CHECK_EQ_INT(fit("%s --ranks 8", path_of("8b.safetensors")), 0);
    says("291 parameters in 33 units; 0 tensors");
    CHECK_EQ_INT(bytes_of("shards"), 4 * (int64_t)8030261248 / 8); /* published; all rows divide */
    /* The root, and a layer, whose two vectors are gathered next to each other and then copied. */
    const int64_t root = 2 * 128256LL * 4096 + 4096;
    CHECK_EQ_INT(bytes_of("gathered parameters"), 4 * (root + (8030261248 - root) / 32 + 2 * 4096));
    CHECK_EQ_INT(fit("%s --ranks 8 --store bf16 --optimizer sgd", path_of("8b.safetensors")), 0);
    CHECK_EQ_INT(bytes_of("shards"), 2 * (int64_t)8030261248 / 8);
    CHECK_EQ_INT(bytes_of("sgd") + bytes_of("adamw"), 0);
    CHECK_EQ_INT(bytes_of("average of the weights"), 0);
    /* For 16-bit weights an f32, and their 16 bits. */
    CHECK_EQ_INT(fit("%s --ranks 8 --store bf16 --ema", path_of("8b.safetensors")), 0);
    CHECK_EQ_INT(bytes_of("average of the weights"), 6 * (int64_t)8030261248 / 8);
    CHECK_EQ_INT(bytes_of("adamw"), 8 * (int64_t)8030261248 / 8);
    CHECK_EQ_INT(fit("%s --ranks 8 --ema --streams --cpu-offload --optimizer none",
                     path_of("8b.safetensors")),
                 0);
    CHECK_EQ_INT(bytes_of("average of the weights"), 0);
    says(", and the average on the host\n");
}

TEST(fsdpfit, llama_70b_on_131072_ranks) {
    llama_70b();
    const char *path = path_of("70b.safetensors");
    CHECK_EQ_INT(fit("%s --ranks 131072 --param bf16 --reduce f32 --streams --limit 80GiB", path),
                 1);
    says("723 parameters in 81 units;");
    /* A row of each matrix and an element of each vector, as each has fewer rows than ranks. */
    CHECK_EQ_INT(4 * (2 + 6 * 8192 + 28672), 311304);
    says("          311304    11.92x  model.layers.0, and 79 alike\n");
    says("131072 shards are more than there are rows: up to 11.9 times the memory.");
    says("--mesh 512x256\n");
    CHECK_MSG(resident_kib < 64 * 1024, "%ld KiB are resident", resident_kib);
    CHECK_EQ_INT(fit("%s --ranks 131072 --param bf16 --streams --limit 80GiB --search", path), 0);
    says("the best of 18 meshes, replicas x shards:\n");
    int lines = 0;
    for (const char *p = output; (p = strstr(p, "  --mesh ")) != NULL; p++) lines++;
    CHECK_EQ_INT(lines, 10);
    CHECK_MSG(resident_kib < 64 * 1024, "%ld KiB are resident", resident_kib);
}

/* ---- tensors that are no parameters ---------------------------------------------------------- */

static void two_layers(void) {
    tensor(FSDP_F32, 2, 64, 32, "embed.weight");
    for (int i = 0; i < 2; i++) tensor(FSDP_F32, 2, 32, 32, "layers.%d.w", i);
}
static int64_t need_of(const char *leaf) {
    write_headers(leaf);
    CHECK_EQ_INT(fit("%s --ranks 2", path_of(leaf)), 0);
    return bytes_of("on the device");
}

TEST(fsdpfit, states_are_no_parameters) {
    two_layers();
    const int64_t need = need_of("model.safetensors");
    CHECK(!strstr(output, "left out:"));
    two_layers();
    for (int i = 0; i < 2; i++) {
        tensor(FSDP_F32, 2, 32, 32, "optim.state.layers.%d.w.exp_avg", i);
        tensor(FSDP_F32, 2, 32, 32, "optim.state.layers.%d.w.slow.ema", i);
        tensor(FSDP_F64, 1, 1, 0, "optim.state.layers.%d.w.step", i);
    }
    tensor(FSDP_F64, 1, 5, 0, "fsdp.grad_scaler.state");
    tensor(FSDP_U8, 1, 8, 0, "fsdp.blob.place");
    tensor(FSDP_F32, 2, 32, 32, "optimizer.state.layers.0.w.exp_avg");
    tensor(FSDP_F32, 2, 32, 32, "model_ema.layers.0.w");
    CHECK_EQ_INT(need_of("run.safetensors"), need);
    says("3 parameters in 3 units; 10 tensors are left out\n");
    says("left out: 10 tensors, 24.06 KiB: states of a training: ");
    says(" optim.state.layers.*.w.slow.ema");
}

/* Averages of the weights, as DeepSpeed, timm, diffusers, Lightning and others name them. A layer
   whose name has "ema" in it is a parameter. */
TEST(fsdpfit, averages_are_no_parameters) {
    static const char *const averages[] = {"module_ema.layers.0.w", "model_ema.layers.0.w",
                                           "module.ema.layers.0.w", "ema.layers.0.w",
                                           "ema_model.layers.0.w",  "state_dict_ema.layers.0.w",
                                           "net_ema.layers.0.w",    "ema_weights.layers.0.w",
                                           "swa_model.layers.0.w",  "averaged_model.layers.0.w",
                                           "shadow_params.0",       "model_swa.layers.0.w"};
    static const char *const layers[] = {"layers.0.ema_gate.w", "schema.w", "ema_gate.w",
                                         "layers.0.module_ema.w", "emantics.w"};
    two_layers();
    const int64_t need = need_of("model.safetensors");
    for (size_t i = 0; i < sizeof averages / sizeof *averages; i++) {
        two_layers();
        tensor(FSDP_F32, 2, 32, 32, "%s", averages[i]);
        CHECK_EQ_INT(need_of("average.safetensors"), need);
        says("left out: 1 tensors, 4.00 KiB: states of a training: ");
    }
    for (size_t i = 0; i < sizeof layers / sizeof *layers; i++) {
        two_layers();
        tensor(FSDP_F32, 2, 32, 32, "%s", layers[i]);
        CHECK(need_of("layer.safetensors") > need);
        CHECK_MSG(!strstr(output, "left out:"), "%s", output);
    }
}

TEST(fsdpfit, buffers_are_named_and_left_out) {
    two_layers();
    const int64_t need = need_of("model.safetensors");
    two_layers();
    tensor(FSDP_F32, 1, 32, 0, "bn.running_mean");
    tensor(FSDP_F32, 1, 32, 0, "bn.running_var");
    tensor(FSDP_I64, 1, 1, 0, "bn.num_batches_tracked");
    tensor(FSDP_F32, 1, 64, 0, "codes.ema_cluster_size");
    tensor(FSDP_F32, 1, 16, 0, "layers.0.rotary_emb.inv_freq");
    tensor(FSDP_F32, 2, 64, 64, "layers.0.attn.bias"); /* a mask */
    CHECK_EQ_INT(need_of("buffers.safetensors"), need);
    says(": buffers: ");
    says(" bn.running_mean");
    says(" layers.*.rotary_emb.inv_freq");
    says(" layers.*.attn.bias");
    two_layers();
    tensor(FSDP_F32, 1, 64, 0, "layers.0.attn.bias"); /* not a mask */
    CHECK(need_of("bias.safetensors") > need);
}

/* Packed tensors: name, name of their scales, dtype. */
static const struct {
    const char *name, *packed, *scale;
    fsdp_dtype dtype;
    int64_t rows;
} packed[] = {
    {"mxfp4", "layers.%d.experts.up_blocks", "layers.%d.experts.up_scales", FSDP_U8, 4096},
    {"gptq", "layers.%d.up.qweight", "layers.%d.up.scales", FSDP_I32, 1024},
    {"bitsandbytes 4", "layers.%d.up.weight", "layers.%d.up.weight.absmax", FSDP_U8, 4096},
    {"bitsandbytes 8", "layers.%d.up.weight", "layers.%d.up.SCB", FSDP_I8, 4096},
    {"compressed", "layers.%d.up.weight_packed", "layers.%d.up.weight_scale", FSDP_I32, 1024}};
TEST_P(fsdpfit, packed_weights_get_no_answer, packed) {
    two_layers();
    const int64_t need = need_of("model.safetensors");
    two_layers();
    for (int i = 0; i < 2; i++) {
        char name[80];
        for (const char *of = row->packed; of; of = of == row->packed ? row->scale : NULL) {
            const char *at = strchr(of, '%');
            snprintf(name, sizeof name, "%.*s%d%s", (int)(at - of), of, i, at + 2);
            if (of == row->packed) tensor(row->dtype, 2, row->rows, 8, "%s", name);
            else tensor(FSDP_F32, 1, 32, 0, "%s", name);
        }
    }
    write_headers("packed.safetensors");
    const char *path = path_of("packed.safetensors");
    CHECK_EQ_INT(fit("%s --ranks 2", path), 0);
    CHECK_EQ_INT(bytes_of("on the device"), need);
    says("left out: 4 tensors, 64.25 KiB: integers, and scales of packed weights: ");
    says("most of the model is not counted: it may be packed (quantised).");
    CHECK_EQ_INT(fit("%s --ranks 2 --limit 1GiB", path), 2);
    says("fsdpfit: [E1010] whether it fits is not known: 65792 bytes of integers or packed");
    CHECK_EQ_INT(fit("%s --ranks 2 --limit 1GiB --search", path), 2);
    says("fsdpfit: [E1010]");
    CHECK_EQ_INT(fit("%s --ranks 2 --limit 1KiB", path), 1); /* even the lower bound is too much */
    says("\ndoes not fit: ");
    CHECK(!strstr(output, "fits with"));
    CHECK_EQ_INT(fit("%s --ranks 2 --limit %lldB", path, (long long)need - 1), 1);
    CHECK(!strstr(output, "fits with"));   /* though what counts fits on more ranks */
    for (int more = 0; more < 2; more++) { /* 4096 elements count: as many may be in 2048 bytes */
        two_layers();
        tensor(FSDP_I32, 2, 512 + more, 1, "table");
        write_headers("half.safetensors");
        CHECK_EQ_INT(fit("%s --ranks 2 --limit 1GiB", path_of("half.safetensors")), 2 * more);
    }
    two_layers();
    tensor(FSDP_I32, 2, 10, 8, "table"); /* few integers: the result is known, and names them */
    write_headers("few.safetensors");
    CHECK_EQ_INT(fit("%s --ranks 2 --limit 1GiB", path_of("few.safetensors")), 0);
    says("left out: 1 tensors, 320 bytes: integers, and scales of packed weights: table\n"
         "if these integers are packed (quantised) weights, the bytes below are a lower bound\n");
    two_layers();
    tensor((fsdp_dtype)FSDP_SAFETENSORS_OTHER, 2, 128, 64, "seen"); /* BOOL: no weights */
    write_headers("bool.safetensors");
    CHECK_EQ_INT(fit("%s --ranks 2 --limit 1GiB", path_of("bool.safetensors")), 0);
    says("left out: 1 tensors, 8.00 KiB: ");
}

/* ---- units by numbers in names --------------------------------------------------------------- */

/* Tensors NAME*SIZE of a model, where {a,b} and {a-b} stand for each of a and b; and its units. */
static const struct {
    const char *name, *tensors[6], *units;
} schemes[] = {
    {"llama",
     {"model.layers.{0-3}.self_attn.q.weight*8", "model.norm.weight*1"},
     "root "
     "model.layers.0, and 3 alike"},
    {"bert",
     {"bert.encoder.layer.{0-3}.attention.self.query.weight*8"},
     "bert.encoder.layer.0, and 3 alike"},
    {"gpt2", {"h.{0-3}.attn.w*8"}, "h.0, and 3 alike"},
    {"flax", {"EncoderLayer_{0-3}.attn.w*8"}, "EncoderLayer_0, and 3 alike"},
    {"t5",
     {"encoder.block.{0,1}.layer.{0,1}.w.weight*8", "encoder.block.0.layer.0.bias.weight*2",
      "decoder.block.{0,1}.layer.{0-2}.w.weight*8"},
     "decoder.block.0, and 1 alike encoder.block.0 encoder.block.1"},
    {"whisper",
     {"model.{encoder,decoder}.layers.{0,1}.fc1.weight*8"},
     "model.decoder.layers.0, and 3 alike"},
    {"mixtral",
     {"model.layers.{0-3}.moe.experts.{0-7}.w1.weight*8"},
     "model.layers.0, and 3 alike"},
    {"one dense layer",
     {"layers.0.mlp.up.weight*9", "layers.1.mlp.experts.{0-3}.up.weight*4"},
     "layers.0 layers.1"},
    {"one layer", {"layers.0.experts.{0-3}.w*8"}, "layers.0"},
    {"swin",
     {"layers.0.blocks.{0,1}.attn.qkv.weight*8", "layers.1.blocks.{0-5}.attn.qkv.weight*16",
      "layers.0.downsample.reduction.weight*4"},
     "layers.0 layers.0.blocks.0, and 1 alike layers.1.blocks.0, and 5 alike"},
    {"resnet",
     {"conv1.weight*4", "layer1.{0,1}.conv1.weight*8", "layer2.{0,1}.conv1.weight*16",
      "layer2.0.downsample.0.weight*4"},
     "root layer1.0, and 1 alike layer2.0 layer2.1"},
    {"unet",
     {"down_blocks.0.resnets.{0,1}.conv1.weight*8", "down_blocks.1.resnets.{0,1}.conv1.weight*16",
      "mid_block.attentions.0.transformer_blocks.{0,1}.attn.to_q.weight*9"},
     "down_blocks.0.resnets.0, and 1 alike down_blocks.1.resnets.0, and 1 alike "
     "mid_block.attentions.0.transformer_blocks.0, and 1 alike"},
    {"hybrid",
     {"layers.{0,2}.mamba.in.weight*8", "layers.{1,3}.attn.q.weight*9"},
     "layers.0 layers.1 layers.2 layers.3"},
    {"stages of which half are alike",
     {"layers.{0,1}.blocks.{0,1}.mlp.w*8", "layers.2.blocks.{0,1}.mlp.w*9",
      "layers.3.blocks.{0-2}.mlp.w*10"},
     "layers.0.blocks.0, and 3 alike layers.2.blocks.0, and 1 alike layers.3.blocks.0, and 2 "
     "alike"},
    {"heads", {"heads.{0-3}.weight*8", "layers.{0,1}.w*8"}, "root layers.0, and 1 alike"}};

static void expand(const char *format) {
    const char *open = strchr(format, '{'), *shut = open ? strchr(open, '}') : NULL;
    char name[200];
    int first, last;
    if (!open) {
        const int n = (int)strcspn(format, "*"), size = atoi(format + n + 1);
        tensor(FSDP_F32, 2, 8 * size, 8, "%.*s", n, format);
        return;
    }
    if (sscanf(open, "{%d-%d}", &first, &last) == 2) {
        for (; first <= last; first++) {
            snprintf(name, sizeof name, "%.*s%d%s", (int)(open - format), format, first, shut + 1);
            expand(name);
        }
        return;
    }
    for (const char *at = open + 1; at < shut; at += strcspn(at, ",}") + 1) {
        snprintf(name, sizeof name, "%.*s%.*s%s", (int)(open - format), format,
                 (int)strcspn(at, ",}"), at, shut + 1);
        expand(name);
    }
}
TEST_P(fsdpfit, units_by_names, schemes) {
    char units[2000] = "";
    size_t used = 0;
    for (int i = 0; i < 6 && row->tensors[i]; i++) expand(row->tensors[i]);
    write_headers("scheme.safetensors");
    CHECK_EQ_INT(fit("%s --ranks 1", path_of("scheme.safetensors")), 0);
    for (const char *at = output; (at = strstr(at, "x  ")) != NULL; at++) {
        used += (size_t)snprintf(units + used, sizeof units - used, "%s%.*s", used ? " " : "",
                                 (int)strcspn(at + 3, "\n"), at + 3);
        CHECK(used < sizeof units);
    }
    CHECK_MSG(!strcmp(units, row->units), "units '%s', expected '%s'", units, row->units);
}
TEST(fsdpfit, names_without_layers_have_a_hint) {
    expand("features.{0-5}.weight*8");
    write_headers("flat.safetensors");
    CHECK_EQ_INT(fit("%s --ranks 1", path_of("flat.safetensors")), 0);
    says("6 parameters in 1 units;");
    says("most parameters are in no layer: --unit says where the name of a unit ends\n");
    CHECK_EQ_INT(fit("%s --ranks 1 --unit features.[0-9]+", path_of("flat.safetensors")), 0);
    says("6 parameters in 6 units;");
}

/* ---- results, and options that make it fit --------------------------------------------------- */

TEST(fsdpfit, answer_at_the_last_byte) {
    llama_8b();
    const char *path = path_of("8b.safetensors");
    CHECK_EQ_INT(fit("%s --ranks 8", path), 0);
    const int64_t need = bytes_of("on the device");
    CHECK(!strstr(output, "fit"));
    CHECK_EQ_INT(fit("%s --ranks 8 --limit %lld", path, (long long)need), 0);
    says("\nfits: 0 bytes are left of ");
    CHECK_EQ_INT(fit("%s --ranks 8 --limit %lld", path, (long long)need - 1), 1);
    says("\ndoes not fit: 1 bytes too much for ");
    CHECK_EQ_INT(fit("%s --ranks 8 --reserve 2GiB --activations 3KB --limit %lld", path,
                     (long long)need + (2LL << 30) + 3000),
                 0);
    CHECK_EQ_INT(bytes_of("on the device"), need + 3000);
    CHECK_EQ_INT(bytes_of("activations, as you say"), 3000);
    CHECK_EQ_INT(fit("%s --ranks 8 --reserve 2GiB --activations 3KB --limit %lld", path,
                     (long long)need + (2LL << 30) + 2999),
                 1);
    CHECK_EQ_INT(fit("%s --ranks 8 --limit 10GiB --reserve 20GiB", path),
                 1); /* less than nothing */
    CHECK_EQ_INT(fit("%s --ranks 8 --limit 1TiB", path), 0);
    CHECK_EQ_INT(fit("%s --ranks 8 --limit 25MB", path), 1);
    says("no single change that is tried makes it fit\n");
}

/* Returns the rest of the line after `before` in the output; "" if it does not occur. */
static const char *words_after(const char *before) {
    static char words[200];
    const char *at = strstr(output, before);
    snprintf(words, sizeof words, "%.*s", at ? (int)strcspn(at + strlen(before), "\n") : 0,
             at ? at + strlen(before) : "");
    return words;
}

static int ranks_in_place_of_16(const char *text) {
    const char *more = strstr(text, " ranks in place of 16\n");
    CHECK_MSG(more != NULL, "%s", text);
    while (more[-1] != ' ') more--;
    return atoi(more);
}

TEST(fsdpfit, what_is_said_to_fit_fits) {
    llama_8b();
    const char *path = path_of("8b.safetensors");
    char mesh[200], all[sizeof output];
    CHECK_EQ_INT(fit("%s --ranks 16 --mesh 2x8 --limit 26GiB --reshard 0", path), 1);
    says("  --reshard 1\n");
    CHECK_EQ_INT(fit("%s --ranks 16 --mesh 2x8 --limit 26GiB --reshard 1", path), 0);
    CHECK_EQ_INT(fit("%s --ranks 16 --mesh 2x8 --limit 24GiB", path), 1);
    says("it fits with one of these:\n on the device  moved in a step\n");
    says("  --param bf16\n");
    CHECK(!strstr(output, "--reshard"));
    CHECK(!strstr(output, "cpu_offload")); /* both memories are the same */
    snprintf(all, sizeof all, "%s", output);
    snprintf(mesh, sizeof mesh, "%s", words_after("  --mesh "));
    CHECK_EQ_INT(fit("%s --ranks 16 --mesh %s --limit 24GiB", path, mesh), 0);
    CHECK_EQ_INT(fit("%s --ranks 16 --mesh 2x8 --limit 24GiB --param bf16", path), 0);
    CHECK_EQ_INT(fit("%s --ranks 16 --mesh 2x8 --limit 24GiB --cpu-offload", path), 2);
    fails("[E470] --cpu-offload: expected --streams");
    CHECK_EQ_INT(fit("%s --ranks 16 --mesh 2x8 --limit 24GiB --streams", path), 1);
    says("  cpu_offload\n");
    CHECK_EQ_INT(fit("%s --ranks 16 --mesh 2x8 --limit 24GiB --streams --cpu-offload", path), 0);
    says(", and the optimizer's states on the host\n");
    CHECK_EQ_INT(bytes_of("of this in pinned memory of the host"),
                 bytes_of("shards") + bytes_of("shard gradients"));
    /* Muon on streams refuses it, so it is not tried. */
    CHECK_EQ_INT(fit("%s --ranks 16 --mesh 2x8 --limit 24GiB --streams --optimizer muon", path), 1);
    says("it fits with one of these:\n");
    CHECK(!strstr(output, "cpu_offload"));
    /* Gradients that wait for the last microbatch. */
    CHECK_EQ_INT(fit("%s --ranks 16 --no-sync 3", path), 0);
    const long long kept = bytes_of("on the device"), grads = bytes_of("full gradients");
    CHECK(!strstr(output, "--no-sync"));
    CHECK_EQ_INT(fit("%s --ranks 16", path), 0);
    CHECK_EQ_INT(kept - bytes_of("on the device"), grads - bytes_of("full gradients"));
    CHECK_MSG(grads >= 4 * 8030261248LL, "%lld", grads);
    says("not counted: gradients without sync (--no-sync), ");
    CHECK_EQ_INT(fit("%s --ranks 16 --no-sync 3 --limit %lld", path, kept - 1), 1);
    says("  sync on in all microbatches\n");
    CHECK_EQ_INT(fit("%s --ranks 16 --no-sync 3 --limit %lld", path, kept - (2LL << 30)), 1);
    int enough = ranks_in_place_of_16(output); /* with their unreduced gradients */
    CHECK_EQ_INT(fit("%s --ranks %d --no-sync 3 --limit %lld", path, enough, kept - (2LL << 30)),
                 0);
    /* That number of ranks fits, and one shard less does not. */
    enough = ranks_in_place_of_16(all);
    CHECK(enough > 16 && enough % 2 == 0);
    CHECK_EQ_INT(fit("%s --ranks %d --mesh 2x%d --limit 24GiB", path, enough, enough / 2), 0);
    CHECK_EQ_INT(fit("%s --ranks %d --mesh 2x%d --limit 24GiB", path, enough - 2, enough / 2 - 1),
                 1);
}

/* Returns "12.40 GiB" as a number of bytes, rounded. */
static double amount(const char *at) {
    static const char *const units[] = {"bytes", "KiB", "MiB", "GiB", "TiB", "PiB"};
    char unit[8] = "";
    double x = 0, scale = 1;
    CHECK_EQ_INT(sscanf(at, "%lf %7s", &x, unit), 2);
    for (int u = 0; u < 6; u++, scale *= 1024)
        if (!strcmp(unit, units[u])) return x * scale;
    return -1;
}

/* Options that fit come first, sorted by the bytes that they move. */
TEST(fsdpfit, options_by_what_they_move) {
    llama_8b();
    CHECK_EQ_INT(fit("%s --ranks 360 --limit 21GiB --search", path_of("8b.safetensors")), 0);
    says("the best of 24 meshes");
    double last[2] = {0, 0};
    int lines = 0, refused = 0;
    for (char *line = strstr(output, "step\n") + 5; *line; lines++) {
        char *end = strchr(line, '\n');
        *end = 0;
        const int fits = !strstr(line, "does not fit");
        const double moved = amount(line + 14);
        CHECK_MSG((amount(line) <= 21.005 * (1 << 30)) == fits, "%s", line);
        CHECK_MSG(moved >= last[!fits] && !(fits && refused), "%s", line);
        last[!fits] = moved, refused += !fits;
        line = end + 1;
    }
    CHECK_EQ_INT(lines, 10);
    CHECK_EQ_INT(fit("%s --ranks 360 --limit 1GiB --search", path_of("8b.safetensors")), 1);
}

/* Units run in the order of their names, with numbers as numbers. */
TEST(fsdpfit, order_of_units) {
    store("lines", "unit h.10: param w 30 8\nunit root: param e 10 8\nunit h.9: param w 20 8\n"
                   "# a layer in two lines\nunit h.1: param w 40 8\nunit h.1: param v 8\n");
    CHECK_EQ_INT(fit("%s --ranks 2", path_of("lines")), 0);
    says("5 parameters in 4 units;");
    const char *at = output, *const order[] = {"x  root\n", "x  h.1\n", "x  h.9\n", "x  h.10\n"};
    for (int i = 0; i < 4; i++) {
        at = strstr(at, order[i]);
        CHECK_MSG(at != NULL, "%s is not behind the one before: %s", order[i], output);
    }
}

/* ---- invalid files, and wrong use ------------------------------------------------------------ */

TEST(fsdpfit, hostile_files) {
    char bytes[3000];
    gpt2("model.safetensors");
    const char *path = path_of("model.safetensors");
    FILE *f = fopen(path, "rb");
    CHECK(f != NULL);
    const size_t got = fread(bytes, 1, sizeof bytes, f);
    fclose(f);
    CHECK_EQ_INT(fit("%s --ranks 2", path_of("nothing")), 2);
    fails("nothing: No such file");
    for (size_t cut = 0; cut < got; cut += 97) {
        f = fopen(path_of("cut.safetensors"), "wb");
        CHECK(f && fwrite(bytes, 1, cut, f) == cut && !fclose(f));
        CHECK_EQ_INT(fit("%s --ranks 2 --limit 1TiB", path_of("cut.safetensors")), 2);
        fails("cut.safetensors");
    }
    CHECK(!truncate(path, 1 << 20));
    CHECK_EQ_INT(fit("%s --ranks 2", path), 2);
    fails("model.safetensors");
    store("strange.safetensors", "\x10\x01\x01\x01\x01\x01\x01\x7f{}");
    CHECK_EQ_INT(fit("%s --ranks 2", path_of("strange.safetensors")), 2);
    fails("strange.safetensors");
    tensor(FSDP_F32, 1, 4, 0, "evil\x1b[2J\\");
    write_headers("name.safetensors");
    CHECK_EQ_INT(fit("%s --ranks 2", path_of("name.safetensors")), 0);
    says("evil\\x1b[2J\\\\");
    CHECK(!strchr(output, '\x1b'));
    tensor(FSDP_I64, 1, 4, 0, "ids");
    write_headers("none.safetensors");
    CHECK_EQ_INT(fit("%s --ranks 2", path_of("none.safetensors")), 2);
    fails("[E475] there are no parameters");
    CHECK_EQ_INT(fit("%s %s --ranks 2", path_of("name.safetensors"), path_of("name.safetensors")),
                 2);
    fails("[E476] parameter 'evil\\x1b[2J\\\\' is there twice");
}

TEST(fsdpfit, directories_and_indices) {
    tensor(FSDP_F32, 2, 8, 4, "h.0.w");
    write_headers("model-00001-of-00002.safetensors");
    tensor(FSDP_F32, 2, 8, 4, "h.1.w");
    write_headers("model-00002-of-00002.safetensors");
    CHECK_EQ_INT(fit("%s %s --ranks 2", path_of("model-00001-of-00002.safetensors"),
                     path_of("model-00002-of-00002.safetensors")),
                 0);
    says("2 parameters in 2 units;");
    unlink(path_of("out")); /* a directory must have no other file */
    store("model.safetensors.index.json", "{\"metadata\": {\"total_size\": 256}, \"weight_map\": "
                                          "{\"h.0.w\": \"model-00001-of-00002.safetensors\", "
                                          "\"h.1.w\": \"model-00002-of-00002.safetensors\"}}");
    CHECK_EQ_INT(fit("%s --ranks 2", path_of("model.safetensors.index.json")), 0);
    says("2 parameters in 2 units;");
    const int64_t need = bytes_of("on the device");
    CHECK_EQ_INT(fit("%s --ranks 2", h_tmpdir()), 0);
    CHECK_EQ_INT(bytes_of("on the device"), need);
    CHECK(!unlink(path_of("model-00002-of-00002.safetensors")));
    CHECK_EQ_INT(fit("%s --ranks 2", path_of("model.safetensors.index.json")), 2);
    fails("model-00002-of-00002.safetensors");
}

static const struct {
    const char *name, *text, *why;
} lines[] = {{"no colon", "unit h.0 param w 2 3\n", "line 1"},
             {"no name", "unit : param w 2\n", "line 1"},
             {"no size", "unit h.0: param w\n", "line 1"},
             {"no unit", "# comment\nunit h.0: param v 2\nparam w 2\n", "line 3"},
             {"a word", "unit h.0: param w 2 x\n", "line 1"},
             {"part of a number", "unit h.0: param w 2x3\n", "line 1"},
             {"nine dims", "unit h.0: param w 1 1 1 1 1 1 1 1 1\n", "line 1"},
             {"no parameter", "unit h.0:\n", "line 1"},
             {"negative", "unit h.0: param w -2 3\n", "[E143]"},
             {"huge", "unit h.0: param w 99999999999999999999 9\n", "[E"},
             {"twice", "unit h.0: param w 2\nunit h.0: param w 2\n", "[E476]"},
             {"only a comment", "# nothing\n", "[E475]"}};
TEST_P(fsdpfit, lines_that_are_wrong, lines) {
    store("lines", row->text);
    CHECK_EQ_INT(fit("%s --ranks 2", path_of("lines")), 2);
    fails(row->why);
}

static const struct {
    const char *words, *why;
} wrong[] = {{"--ranks 2 --what", "[E479] unknown option '--what'"},
             {"--ranks", "[E470] --ranks"},
             {"--ranks 0", "[E470] --ranks"},
             {"", "[E470] --ranks"},
             {"--ranks -1", "[E470] --ranks"},
             {"--ranks 1048577", "[E470] --ranks"},
             {"--ranks 2x", "[E470] --ranks"},
             {"--ranks 6 --mesh 2x2", "[E470] --mesh"},
             {"--ranks 6 --mesh 6", "[E470] --mesh"},
             {"--ranks 6 --mesh 0x6", "[E470] --mesh"},
             {"--ranks 6 --mesh 2x3x", "[E470] --mesh"},
             {"--ranks 6 --mesh -2x-3", "[E470] --mesh"},
             {"--ranks 6 --tp 4", "[E470] --tp"},
             {"--ranks 6 --tp 0", "[E470] --tp"},
             {"--ranks 6 --tp 2 --mesh 2x3", "[E470] --mesh"},
             {"--ranks 2 --param u8", "[E470] --param"},
             {"--ranks 2 --store f", "[E470] --store"},
             {"--ranks 2 --reduce=", "[E470] --reduce"},
             {"--ranks 2 --optimizer lion", "[E470] --optimizer"},
             {"--ranks 2 --comm-threads 3", "[E477]"},
             {"--ranks 6 --reshard 4", "[E477]"},
             {"--ranks 2 --limit 8XB", "[E470] --limit"},
             {"--ranks 2 --limit -8", "[E470] --limit"},
             {"--ranks 2 --limit 9999999TiB", "[E470] --limit"},
             {"--ranks 2 --limit", "[E470] --limit"},
             {"--ranks 2 --reserve 1.5.GiB", "[E470] --reserve"},
             {"--ranks 2 --activations GiB", "[E470] --activations"},
             {"--ranks 2 --unit ((", "[E470] --unit"},
             {"--ranks 2 --skip [", "[E470] --skip"},
             {"--ranks 2 --streams=1", "[E479]"},
             {"--ranks 2 --search=", "[E479]"}};
TEST(fsdpfit, wrong_use) {
    store("lines", "unit h.0: param w 4 4\n");
    for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++) {
        const int status = fit("%s %s", path_of("lines"), wrong[i].words);
        CHECK_MSG(status == 2 && strstr(output, wrong[i].why), "%s: %d, %s", wrong[i].words, status,
                  output);
    }
    CHECK_EQ_INT(fit("--ranks 2"), 2);
    fails("[E470] fsdpfit");
    CHECK_EQ_INT(fit("%s --ranks=2 --param=bf16 --mesh=1x2", path_of("lines")), 0);
    CHECK_EQ_INT(fit("--ranks 2 %s", path_of("lines")), 0);
    CHECK_EQ_INT(fit("--help"), 0);
    says("Exit status: 0 fits, or no limit is given; 1 does not; 2 cannot read, or wrong use\n");
    CHECK_EQ_INT(fit("-h"), 0);
}
