/* test_examples.c - the examples as programs: their output, on one rank and on several.

   SPDX-License-Identifier: MIT */
#define TAGS NO(ASAN)
#include "harness.h"
#include "library.h"

#include <math.h> // fabs, sin

enum { OUTPUT_NBYTES = 1 << 15 };

static char output[OUTPUT_NBYTES]; /* both streams of the last program */

/* Returns the example's path; skips if it is not built. */
static const char *example(const char *name) {
    static char path[400];
    const char *dir = getenv("FSDP_BUILD");
    snprintf(path, sizeof path, "%s/examples/%s", dir && *dir ? dir : "build", name);
    if (access(path, X_OK)) SKIP("the example is not here: make examples builds it");
    return path;
}

/* Runs an example, which must exit with 0: on `ranks` ranks by tools/fsdprun, or (0) by itself,
   without a launcher's variables. */
static void run(const char *name, int ranks) {
    static const char *const launcher[] = {"RANK",        "WORLD_SIZE",  "LOCAL_RANK",
                                           "MASTER_ADDR", "MASTER_PORT", "FSDP_JOB_ID",
                                           "FSDP_COMM_THREADS"};
    char command[1000];
    for (size_t i = 0; i < sizeof launcher / sizeof *launcher; i++) unsetenv(launcher[i]);
    if (ranks && access("tools/fsdprun", X_OK))
        SKIP("no tools/fsdprun here: make tools/fsdprun builds it");
    snprintf(command, sizeof command, "tools/fsdprun -n %d %s 2>&1", ranks, example(name));
    FILE *p = popen(ranks ? command : strstr(command, example(name)), "r");
    CHECK(p != NULL);
    output[fread(output, 1, sizeof output - 1, p)] = 0;
    const int status = pclose(p);
    printf("%s\n%s", command, output);
    CHECK(WIFEXITED(status));
    CHECK_EQ_INT(WEXITSTATUS(status), 0);
}

/* Returns the rest of the line that begins with `head`; there must be one such line. */
static const char *line(const char *head) {
    const char *found = NULL;
    for (const char *at = output; at && *at; at = strchr(at, '\n') ? strchr(at, '\n') + 1 : NULL) {
        if (strncmp(at, head, strlen(head)) != 0) continue;
        CHECK_MSG(!found, "two lines begin with \"%s\"", head);
        found = at + strlen(head);
    }
    CHECK_MSG(found != NULL, "no line begins with \"%s\" in:\n%s", head, output);
    return found;
}

static int lines(void) {
    int n = 0;
    for (const char *at = output; *at; at++) n += *at == '\n';
    return n;
}

static double number_after(const char *head) {
    char *end;
    const char *text = line(head);
    const double x = strtod(text, &end);
    CHECK_MSG(end != text, "no number behind \"%s\"", head);
    return x;
}

static const struct {
    const char *name;
    int ranks;
} worlds[] = {{"alone", 0}, {"W=1", 1}, {"W=2", 2}, {"W=3", 3}, {"W=4", 4}};

TEST_P(examples, hello, worlds, row->ranks > 3 ? MANY_RANKS : 0) {
    run("01_hello", row->ranks);
    CHECK_EQ_INT(lines(), 7);
    CHECK(number_after("ranks: ") == (row->ranks ? row->ranks : 1));
    CHECK(number_after("step 200  loss ") < 0.5 * number_after("step   0  loss "));
}

/* Each of 4 ranks owns 16*2 + 16, 16*64 + 16 and 64 + 1 numbers, and receives them from 3 ranks, in
   f32 or in bf16. */
TEST(examples, mlp, SLOW) {
    static const char *const heads[3] = {"4 ranks ", "4 ranks, bf16 ", "1 rank "};
    const int received[3] = {3 * 4 * (48 + 1040 + 65), 3 * 2 * (48 + 1040 + 65), 0};
    double first[3], last[3];
    int bytes[3];
    run("02_mlp", 0);
    CHECK_EQ_INT(lines(), 4);
    for (int i = 0; i < 3; i++) {
        CHECK_EQ_INT(sscanf(line(heads[i]), " loss %lf -> %lf, rank 0 receives %d bytes", &first[i],
                            &last[i], &bytes[i]),
                     3);
        CHECK_EQ_INT(bytes[i], received[i]);
        CHECK(last[i] < 0.1 * first[i] && fabs(last[0] - last[i]) < 1e-3 * first[0]);
    }
    line("the same, and learnt");
}

/* Bytes follow from the formula: a unit has 48*48 + 48 f32 parameters, of which plain FSDP
   gathers three quarters from others and HSDP a half, twice a step. */
TEST(examples, hsdp) {
    static const char *const heads[2] = {"FSDP, 1 x 4  loss ", "HSDP, 2 x 2  loss "};
    double first[2], last[2];
    int shard[2], replica[2], held[2], gathered, summed;
    const int layers = 3, full = 4 * (48 * 48 + 48);
    run("03_hsdp", 0);
    CHECK_EQ_INT(lines(), 5);
    for (int i = 0; i < 2; i++) {
        const char *text = line(heads[i]);
        CHECK_EQ_INT(sscanf(text, "%lf -> %lf rank 3 is shard %d of replica %d, holds %d bytes,",
                            &first[i], &last[i], &shard[i], &replica[i], &held[i]),
                     5);
        text = strchr(text, '\n');
        CHECK_EQ_INT(
            sscanf(text, " reads %d to gather and %d to reduce in each step", &gathered, &summed),
            2);
        CHECK_EQ_INT(gathered, 2 * layers * full * (i ? 2 : 3) / 4);
        CHECK(summed > 0);
        CHECK(held[i] >= layers * full / (i ? 2 : 4));
        CHECK(held[i] < layers * full / (i ? 2 : 4) + 4096);
    }
    CHECK(shard[0] == 3 && replica[0] == 0 && shard[1] == 1 && replica[1] == 1);
    CHECK(last[0] < 0.1 * first[0] && fabs(first[0] - first[1]) < 1e-4 * first[0] &&
          fabs(last[0] - last[1]) < 1e-4 * first[0]);
    line("the same, and learnt");
}

/* All its numbers are exact. */
TEST(examples, accumulate) {
    int gathers, reduces, held[3];
    run("04_accumulate", 0);
    CHECK_EQ_INT(lines(), 7);
    line("3 layers, 4 microbatches      all-gathers reduce-scatters  bytes read  slots");
    static const struct {
        const char *head;
        int gathers, reduces;
    } rows[3] = {{"every microbatch is reduced ", 2 * 3 * 4, 3 * 4},
                 {"only the last one is ", 2 * 3 * 4, 3},
                 {"and parameters stay gathered ", 3, 3}};
    for (int i = 0; i < 3; i++) {
        int bytes;
        const int part = 24 * 24 * 4 / 4 * 3; /* a layer's bytes from three other ranks */
        CHECK_EQ_INT(
            sscanf(line(rows[i].head), "%d %d %d %d", &gathers, &reduces, &bytes, &held[i]), 4);
        CHECK_EQ_INT(gathers, rows[i].gathers);
        CHECK_EQ_INT(reduces, rows[i].reduces);
        CHECK(bytes >= (gathers + reduces) * part && bytes < (gathers + reduces) * (part + 64));
    }
    CHECK(held[0] < held[1] && held[1] < held[2]); /* each mode needs more slots */
    line("gradients 0.00372314 0.00372314 -0.0158234 ...: the same bits in the first three");
    line("of means  0.00423138 0.0151615 -0.0281009 ...: not the gradient of the mean over tokens");
}

TEST_P(examples, lora, worlds, row->ranks > 3 ? MANY_RANKS : 0) {
    const int ranks = row->ranks ? row->ranks : 1, layers = 2, base = 96 * 96;
    const int down = (4 + ranks - 1) / ranks * 96, up = (96 + ranks - 1) / ranks * 4;
    run("05_lora", row->ranks);
    CHECK_EQ_INT(lines(), 8);
    CHECK(number_after("step 149  loss ") < 0.5 * number_after("step   0  loss "));
    int frozen, adapters, shards, full;
    CHECK_EQ_INT(sscanf(line("base "), "%d parameters, adapters %d", &frozen, &adapters), 2);
    CHECK(frozen == layers * base && adapters == layers * 2 * 4 * 96);
    CHECK_EQ_INT(sscanf(line("gradients "), "%d bytes of shards, %d while", &shards, &full), 2);
    /* no more than adapters of this rank need, with their alignment */
    CHECK(shards >= layers * 4 * (down + up) && shards < layers * 4 * (down + up) + 1024);
    CHECK(full >= 4 * ranks * (down + up));
    CHECK(full < 2 * 4 * ranks * (down + up) + 1024 && full < 4 * base);
    CHECK((int)number_after("shards ") >= layers * (2 * base / ranks + 4 * (down + up)));
    line("the base is unchanged");
}

/* 24 layers of 16*16 + 16 parameters in f32: 1,088 bytes each, of which 8 fill a bucket of 8
   KiB. A rank reads 2 (R-1)/R of each message. In addition to the buckets one message says which
   of the 48 parameters were used. */
TEST(examples, ddp) {
    static const char *const heads[2] = {"a unit for each layer ", "buckets "};
    const int layers = 24, message = 4 * (16 * 16 + 16) * 2 * 3 / 4;
    double first[2], last[2];
    int messages[2], bytes[2];
    run("06_ddp", 0);
    CHECK_EQ_INT(lines(), 4);
    for (int i = 0; i < 2; i++)
        CHECK_EQ_INT(sscanf(line(heads[i]), "%d %d loss %lf -> %lf", &messages[i], &bytes[i],
                            &first[i], &last[i]),
                     4);
    CHECK_EQ_INT(messages[0], layers);
    CHECK_EQ_INT(messages[1], layers / 8 + 1); /* and which parameters were used */
    CHECK_EQ_INT(bytes[0], layers * message);
    CHECK_EQ_INT(bytes[1], layers * message + 48 * 4 * 2 * 3 / 4);
    CHECK(last[0] < 0.5 * first[0] && fabs(last[0] - last[1]) <= 0 &&
          fabs(first[0] - first[1]) <= 0);
    line("the same losses, and learnt");
}

/* Losses with tensor parallelism are those without, on other ranks with the same batches. */
TEST(examples, tp) {
    double loss[2][2], apart;
    run("08_tp", 0);
    CHECK_EQ_INT(lines(), 4);
    CHECK_EQ_INT(sscanf(line("dp 2, tp 1: loss "), "%lf -> %lf", &loss[0][0], &loss[0][1]), 2);
    CHECK_EQ_INT(sscanf(line("dp 2, tp 2: loss "), "%lf -> %lf", &loss[1][0], &loss[1][1]), 2);
    CHECK_EQ_INT(sscanf(line("with tp and without: at most "), "%lf", &apart), 1);
    CHECK(apart <= 1e-5 && fabs(loss[0][0] - loss[1][0]) <= 1e-5 && loss[1][1] < loss[1][0] / 2);
}

/* A training that continues from a checkpoint has equal bits; with fewer ranks, equal losses.
   Three matrices of 32*32 with two moments in f32, a step of 8 bytes each, and the position in
   the data. */
TEST(examples, checkpoint) {
    double first, last, apart;
    int bytes;
    run("09_checkpoint", 0);
    CHECK_EQ_INT(lines(), 3);
    CHECK_EQ_INT(sscanf(line("4 ranks: loss "), "%lf -> %lf, saved 4 times %d bytes", &first, &last,
                        &bytes),
                 3);
    CHECK_EQ_INT(bytes, 3 * (3 * 32 * 32 * 4 + 8) + 8);
    CHECK(last < first / 2);
    line("again from step 20, 4 ranks: the same bits\n");
    CHECK_EQ_INT(sscanf(line("again from step 20, 3 ranks: at most "), "%lf", &apart), 1);
    CHECK(apart <= 1e-5);
}

/* Four matrices for four ranks: rank 0 receives 3/4 of a quarter of 4*32*32 numbers, twice. */
TEST(examples, muon) {
    double first, last;
    run("10_muon", 0);
    CHECK_EQ_INT(lines(), 3);
    CHECK_EQ_INT(sscanf(line("Muon and AdamW"), " loss %lf -> %lf", &first, &last), 2);
    CHECK(last < first / 10);
    CHECK(strstr(line("muon: 4 matrices, of which this rank computes 1; 1 buckets; receives "),
                 "6144 bytes in a step"));
}

/* Three layers, 12 visits, each of which gathers twice in an eager step. With Belady's rule
   there are 14 gathers if two layers and no gradient fit, or one layer and a gradient; 3 if all
   layers fit. A slot has 16*16 parameters in f32; a gradient slot also a flag of use and its
   alignment. */
TEST(examples, plan) {
    int gathers, bytes;
    run("07_plan", 0);
    CHECK_EQ_INT(lines(), 4);
    CHECK_EQ_INT(
        sscanf(line("eager: "), "%d gathers a step, slots of %d bytes", &gathers, &bytes), 2);
    CHECK_EQ_INT(gathers, 2 * 12);
    CHECK_EQ_INT(bytes, 2 * 16 * 16 * 4);
    line("planned: 14, with the same memory\n");
    line("planned: 3, with two slots more\n");
    line("the same bits in all three, and learnt\n");
}

/* ---- 11_cpp.cpp, in C -------------------------------------------------------------------------- */

enum { CPP_RANKS = 4, CPP_L = 3, CPP_C = 32, CPP_SAMPLES = 3, CPP_STEPS = 60 };

static int cpp_others(void *user, const fsdp_param_view *p) {
    return fsdp_muon_takes((const fsdp_muon *)user, p) ? -1 : 0;
}
static void cpp_init(void *user, const fsdp_param_view *rows) {
    (void)user;
    for (int64_t k = 0; k < rows->numel; k++)
        fsdp_view_data_f32(rows)[k] =
            rows->ndim == 2 ? 0.05f * (float)sin(37.0 * (double)fsdp_view_index(rows, k)) : 0;
}
static void cpp_add(void *grad, const float *from, int n) { /* to a gradient in bf16 */
    uint16_t *to = (uint16_t *)grad;
    for (int k = 0; k < n; k++) {
        float sum;
        CHECK_OK(fsdp_convert(&sum, FSDP_F32, &to[k], FSDP_BF16, 1));
        sum += from[k];
        CHECK_OK(fsdp_convert(&to[k], FSDP_BF16, &sum, FSDP_F32, 1));
    }
}
static float cpp_step(fsdp_unit **h, int64_t place) {
    enum { C = CPP_C, S = CPP_SAMPLES, LAYERS = CPP_L };
    float x[LAYERS + 1][S][C], d[S][C], next[C], w[C * C], b[C], dw[C * C], db[C], loss = 0;
    for (int s = 0; s < S; s++)
        for (int i = 0; i < C; i++)
            x[0][s][i] = (float)sin(0.7 * (i + 1) * (i + 1) * (double)(1 + (place + s) % 24));
    for (int l = 0; l < LAYERS; l++) {
        fsdp_pre_forward(h[l]);
        (void)fsdp_convert(w, FSDP_F32, fsdp_data_as(h[l], 0, FSDP_BF16), FSDP_BF16, C * C);
        (void)fsdp_convert(b, FSDP_F32, fsdp_data_as(h[l], 1, FSDP_BF16), FSDP_BF16, C);
        fsdp_post_forward(h[l]);
        for (int s = 0; s < S; s++)
            for (int i = 0; i < C; i++) {
                x[l + 1][s][i] = x[l][s][i] + b[i];
                for (int j = 0; j < C; j++) x[l + 1][s][i] += w[i * C + j] * x[l][s][j];
            }
    }
    for (int s = 0; s < S; s++)
        for (int i = 0; i < C; i++) {
            d[s][i] = (x[LAYERS][s][i] - x[0][s][C - 1 - i]) / (float)S;
            loss += d[s][i] * d[s][i] * (float)S / 2;
        }
    for (int l = LAYERS - 1; l >= 0; l--) {
        fsdp_pre_backward(h[l]);
        (void)fsdp_convert(w, FSDP_F32, fsdp_data_as(h[l], 0, FSDP_BF16), FSDP_BF16, C * C);
        memset(dw, 0, sizeof dw), memset(db, 0, sizeof db);
        for (int s = 0; s < S; s++) {
            memcpy(next, d[s], sizeof next);
            for (int i = 0; i < C; i++) {
                db[i] += d[s][i];
                for (int j = 0; j < C; j++) {
                    dw[i * C + j] += d[s][i] * x[l][s][j];
                    next[j] += w[i * C + j] * d[s][i];
                }
            }
            memcpy(d[s], next, sizeof next);
        }
        cpp_add(fsdp_grad_as(h[l], 0, FSDP_BF16), dw, C * C);
        cpp_add(fsdp_grad_as(h[l], 1, FSDP_BF16), db, C);
        fsdp_post_backward(h[l]);
    }
    return loss;
}
static int cpp_rank(fsdp_world *world, void *arg) {
    float *losses = (float *)arg;
    fsdp_model_desc desc = FSDP_ZERO;
    fsdp_muon_desc md = fsdp_muon_defaults();
    fsdp_adamw_desc ad = fsdp_adamw_defaults();
    fsdp_model *model;
    fsdp_unit *h[CPP_L];
    fsdp_muon *muon;
    fsdp_adamw *adamw;
    desc.param_dtype = FSDP_BF16, desc.reduce_dtype = FSDP_F32;
    CHECK_OK(fsdp_model_create(world, &desc, &model));
    for (int l = 0; l < CPP_L; l++) {
        fsdp_param_desc params[2] = {fsdp_mat("w", CPP_C, CPP_C), fsdp_vec("b", CPP_C)};
        fsdp_unit_desc ud = FSDP_ZERO;
        ud.params = params, ud.num_params = 2;
        CHECK_OK(fsdp_fully_shard(model, &ud, &h[l]));
    }
    CHECK_OK(fsdp_init_params(model, cpp_init, NULL));
    md.adjust = FSDP_MUON_MATCH_RMS_ADAMW;
    CHECK_OK(fsdp_muon_create(model, &md, &muon));
    ad.group = cpp_others, ad.user = muon;
    CHECK_OK(fsdp_adamw_create(model, &ad, &adamw));
    for (int step = 0; step < CPP_STEPS; step++) {
        const int rank = fsdp_rank(world);
        double norm;
        float loss = cpp_step(h, (int64_t)(step * CPP_RANKS + rank) * CPP_SAMPLES);
        CHECK_OK(fsdp_finalize_backward(model));
        CHECK_OK(fsdp_clip_grad_norm(model, 1.0, &norm));
        const double lr = 0.02 * (1 - (double)step / (double)CPP_STEPS);
        CHECK_OK(fsdp_muon_step(muon, lr));
        CHECK_OK(fsdp_adamw_step(adamw, lr));
        CHECK_OK(fsdp_zero_grad(model));
        CHECK_OK(fsdp_all_reduce(world, NULL, &loss, 1, FSDP_F32, FSDP_SUM));
        if (rank == 0) losses[step] = loss / (float)(CPP_RANKS * CPP_SAMPLES);
    }
    return 0;
}

/* The losses of the trainer in C++ are those of the same calls in C, to the bit. */
TEST(examples, cpp) {
    static float expected[CPP_STEPS];
    fsdp_spawn_desc spawn = FSDP_ZERO;
    run("11_cpp", 0);
    CHECK_EQ_INT(lines(), 7);
    spawn.num_ranks = CPP_RANKS, spawn.threads = 1;
    CHECK_OK(fsdp_spawn(&spawn, cpp_rank, expected));
    for (int step = 0; step < CPP_STEPS; step += 10) {
        char head[32];
        snprintf(head, sizeof head, "step %2d  loss ", step);
        CHECK(strtof(line(head), NULL) == expected[step]);
    }
    CHECK(expected[CPP_STEPS - 1] < expected[0] / 4);
    line("again from step 40: the same bits\n");
}
