/* test_gpt_cuda.c - the trainer for GPUs as a program learns as the one for CPUs does.

   Runs $FSDP_BUILD/examples/train_gpt_cuda, or the one in $FSDP_BUILD/stub/examples, which is built
   with the stand-ins of tests/stubs and needs no GPU; and examples/gpt/train_gpt, or GPT_BIN.

   SPDX-License-Identifier: MIT */
#define TAGS NO(SHM) | STUB
#include "harness.h"

#include <math.h> // fabs

enum { TEXT_NBYTES = 20000, OUTPUT_NBYTES = 1 << 16, STEPS = 10 };

static char output[OUTPUT_NBYTES]; // both streams of the last run

static const char *cuda_program(void) {
    static char path[400];
    static const char *const places[] = {"", "/stub"};
    const char *dir = getenv("FSDP_BUILD");
    for (size_t i = 0; i < sizeof places / sizeof *places; i++) {
        snprintf(path, sizeof path, "%s%s/examples/train_gpt_cuda", dir && *dir ? dir : "build",
                 places[i]);
        if (access(path, X_OK) == 0) return path;
    }
    SKIP("no train_gpt_cuda below the build directory");
    return NULL;
}

static const char *cpu_program(void) {
    const char *path = getenv("GPT_BIN");
    if (!path || !path[0]) path = "examples/gpt/train_gpt";
    if (access(path, X_OK) != 0) SKIP("no examples/gpt/train_gpt: make examples builds it");
    return path;
}

/* Writes a file of words in a random order, so that there is something to learn. */
static void write_text(void) {
    static const char *const words[] = {"shard ", "gather ", "reduce ", "scatter ", "the ", "a\n"};
    uint64_t state = 5;
    char path[512];
    snprintf(path, sizeof path, "%s/text", h_tmpdir());
    FILE *file = fopen(path, "wb");
    CHECK(file != NULL);
    for (size_t nbytes = 0; nbytes < TEXT_NBYTES;) {
        const char *word = words[h_rand64(&state) % (sizeof words / sizeof *words)];
        CHECK(fputs(word, file) >= 0);
        nbytes += strlen(word);
    }
    CHECK_EQ_INT(fclose(file), 0);
}

/* Runs a program that sees no launcher. Returns its exit status, and its output in `output`. */
static int run(const char *environment, const char *program, const char *args) {
    char command[2048];
    unsetenv("RANK");
    unsetenv("WORLD_SIZE");
    snprintf(command, sizeof command, "env %s %s %s </dev/null 2>&1", environment, program, args);
    FILE *p = popen(command, "r");
    CHECK(p != NULL);
    output[fread(output, 1, sizeof output - 1, p)] = 0;
    const int status = pclose(p);
    printf("%s\n%s", command, output);
    CHECK(WIFEXITED(status));
    return WEXITSTATUS(status);
}

typedef struct {
    int count, step[STEPS];
    double loss[STEPS], norm[STEPS];
} curve;

/* Trains a small model whose rows are not divided evenly by 2 or 3 ranks. Returns the exit
   status. */
static int run_training(const char *environment, const char *program, int steps,
                        const char *options) {
    char args[1500];
    snprintf(args, sizeof args,
             "--data %s/text --csv %s/loss.csv --steps %d --batch 6 --context 31 --layers 2 "
             "--heads 2 --channels 38 --sample 20 --lr 0.05 %s",
             h_tmpdir(), h_tmpdir(), steps, options);
    write_text();
    return run(environment, program, args);
}

static void train(const char *environment, const char *program, const char *options, curve *c) {
    char path[512], line[256];
    snprintf(path, sizeof path, "%s/loss.csv", h_tmpdir());
    remove(path);
    CHECK_EQ_INT(run_training(environment, program, STEPS, options), 0);
    FILE *file = fopen(path, "r");
    CHECK(file != NULL);
    CHECK(fgets(line, sizeof line, file) != NULL);
    CHECK_EQ_STR(line, "step,loss,grad_norm,seconds\n");
    for (c->count = 0; fgets(line, sizeof line, file); c->count++) {
        const int i = c->count;
        CHECK(i < STEPS);
        CHECK_EQ_INT(sscanf(line, "%d,%lf,%lf,", &c->step[i], &c->loss[i], &c->norm[i]), 3);
    }
    fclose(file);
}

/* Checks that the steps of `some` are as in `all`, which has every step. */
static void check_same(const curve *all, const curve *some, double loss_limit, double norm_limit) {
    double loss = 0.0, norm = 0.0;
    CHECK_EQ_INT(all->count, STEPS);
    for (int i = 0; i < some->count; i++) {
        const int at = some->step[i] - 1;
        CHECK(at >= 0 && at < STEPS);
        const double dl = fabs(all->loss[at] - some->loss[i]);
        const double dn = fabs(all->norm[at] - some->norm[i]) / all->norm[at];
        CHECK(dl >= 0.0 && dn >= 0.0); // numbers
        if (dl > loss) loss = dl;
        if (dn > norm) norm = dn;
    }
    h_message("largest difference: loss %.2g, gradient norm %.2g relative", loss, norm);
    CHECK(loss <= loss_limit);
    CHECK(norm <= norm_limit);
}

// Device memory that the host cannot read, and concurrent streams: as on a GPU.
#define OVER_NCCL "FSDP_BACKEND=nccl FSDP_CUDA_MANAGED=0 FSDP_STUB_SYNC=0 "

static const struct {
    const char *name, *environment, *options;
} runs[] = {
    {"ranks=1", OVER_NCCL, "--ranks 1"},
    {"ranks=2", OVER_NCCL, "--ranks 2"},
    {"ranks=3", OVER_NCCL, "--ranks 3"},
    {"ranks=3,no_reshard", OVER_NCCL, "--ranks 3 --reshard 0"},
    {"ranks=2,sync", "FSDP_BACKEND=nccl FSDP_STUB_SYNC=1", "--ranks 2"},
    {"ranks=2,protected", OVER_NCCL "FSDP_STUB_PROTECT=1", "--ranks 2"}, // from host accesses
    {"alone", OVER_NCCL, ""},
    {"plain", "", "--plain"},
};

TEST_P(gpt_cuda, parity, runs) {
    curve cpu, gpu;
    const char *program = cuda_program();
    train("FSDP_BACKEND=shm", cpu_program(), "--ranks 1", &cpu);
    CHECK(cpu.loss[STEPS - 1] < cpu.loss[0] - 0.05); // it learns: equal losses mean something
    train(row->environment, program, row->options, &gpu);
    CHECK_EQ_INT(gpu.count, STEPS);
    // The stand-in for cuBLAS sums as the CPU does, except for rounding; the real one does not.
    if (strstr(program, "/stub/")) check_same(&cpu, &gpu, 5e-6, 1e-5);
    else check_same(&cpu, &gpu, 1e-4, 1e-3);
}

/* Muon with cuBLAS: the losses of the CPU, on one rank and on two. */
TEST(gpt_cuda, muon) {
    static const char *const options[] = {"--optimizer muon", "--ranks 2 --optimizer muon"};
    curve adamw, cpu, gpu;
    const char *program = cuda_program();
    train("FSDP_BACKEND=shm", cpu_program(), "--ranks 1", &adamw);
    train("FSDP_BACKEND=shm", cpu_program(), "--ranks 1 --optimizer muon", &cpu);
    CHECK(fabs(adamw.loss[STEPS - 1] - cpu.loss[STEPS - 1]) > 1e-3); // another optimizer
    for (int i = 0; i < 2; i++) {
        train(OVER_NCCL, program, options[i], &gpu);
        CHECK_EQ_INT(gpu.count, STEPS);
        check_same(&cpu, &gpu, 1e-4, 1e-3);
    }
}

TEST(gpt_cuda, ema) {
    static const char *const options[] = {"--ema 0.8", "--ranks 2 --ema 0.8", "--graph --ema 0.8"};
    double loss[4][2];
    curve c;
    const char *program = cuda_program();
    for (int i = 0; i < 4; i++) {
        if (i == 0) train("FSDP_BACKEND=shm", cpu_program(), "--ranks 1 --ema 0.8", &c);
        else train(OVER_NCCL, program, options[i - 1], &c);
        const char *line = strstr(output, "\nema    decay 0.8: loss ");
        CHECK(line && sscanf(line, "\nema decay 0.8: loss %lf of the weights, %lf of their average",
                             &loss[i][0], &loss[i][1]) == 2);
        CHECK(fabs(loss[i][0] - loss[i][1]) > 1e-3);
        for (int k = 0; k < 2; k++) CHECK_NEAR(loss[i][k], loss[0][k], 1e-3);
    }
}

/* Attention has an effect: losses are those of the CPU, and differ with another number of heads,
   whose parameters are the same at the start. The comparison finds each wrong part of its
   backward: without the gradients of the keys, the smallest ones, losses here differ by 4e-4,
   norms by 5e-3. */
TEST(gpt_cuda, attention) {
    static const char *const heads[] = {"--heads 1", "--heads 2", "--heads 19"};
    enum { COUNT = sizeof heads / sizeof *heads };
    curve cpu, gpu[COUNT];
    const char *program = cuda_program();
    const int is_stub = strstr(program, "/stub/") != NULL;
    for (int i = 0; i < COUNT; i++) {
        char options[100];
        snprintf(options, sizeof options, "--ranks 2 %s", heads[i]);
        train("FSDP_BACKEND=shm", cpu_program(), options, &cpu);
        train(OVER_NCCL, program, options, &gpu[i]);
        CHECK_EQ_INT(gpu[i].count, STEPS);
        check_same(&cpu, &gpu[i], is_stub ? 5e-6 : 1e-4, is_stub ? 1e-5 : 1e-3);
        for (int k = 0; k < i; k++) {
            const double apart = fabs(gpu[i].loss[STEPS - 1] - gpu[k].loss[STEPS - 1]);
            h_message("%s, %s: losses are %.2g apart", heads[k], heads[i], apart);
            CHECK(apart > 1e-4);
        }
    }
}

/* Sizes with and without a remainder for vectors of eight, spans of 256 positions and heads of
   eight; a batch of one. Without a GPU a warp has one lane: only a GPU tests 32. The first three
   run by day, too. */
static const struct {
    const char *name, *options;
} sizes[] = {
    {"aligned", "--batch 2 --context 64 --channels 64 --heads 4"},
    {"span_and_one", "--batch 1 --context 257 --channels 22 --heads 2"},
    {"heads_of_one", "--batch 3 --context 9 --channels 7 --heads 7"},
    {"one_span", "--batch 1 --context 256 --channels 16 --heads 2 --layers 1"},
    {"spans", "--batch 1 --context 519 --channels 24 --heads 3 --layers 1"},
    {"one_position", "--batch 5 --context 1 --channels 10 --heads 2"},
    {"rows=17", "--batch 1 --context 17 --channels 70 --heads 1"},
};

TEST_P(gpt_cuda, sizes, sizes, row < sizes + 3 ? 0 : AT_NIGHT(STUB)) {
    static const char *const numbers[] = {"", "--bf16", "--tf32"};
    static const double limits[] = {5e-6, 1e-3, 1e-4}, gpu_limits[] = {1e-4, 1e-3, 3e-4};
    curve cpu, gpu;
    const char *program = cuda_program();
    const int is_stub = strstr(program, "/stub/") != NULL;
    char options[200];
    snprintf(options, sizeof options, "--lr 0.005 %s", row->options);
    train("FSDP_BACKEND=shm", cpu_program(), options, &cpu);
    for (int i = 0; i < 3; i++) {
        snprintf(options, sizeof options, "--lr 0.005 %s %s", row->options, numbers[i]);
        train(OVER_NCCL, program, options, &gpu);
        CHECK_EQ_INT(gpu.count, STEPS);
        check_same(&cpu, &gpu, is_stub ? limits[i] : gpu_limits[i], i == 0 ? 1e-4 : 1e-2);
    }
}

/* Fewer bits: close to the CPU's losses, but not as close as f32; with the library and without.
   Norms show sums that were not f32. The first two run by day, too. */
static const struct {
    const char *name, *number, *options;
    double ours; // loss difference from the program without the library
} fewer_bits[] = {
    {"bf16,ranks=2", "--bf16", "--ranks 2", 5e-4}, // each rank rounds its gradients
    {"tf32,ranks=1", "--tf32", "--ranks 1", 1e-5},
    {"bf16,ranks=1", "--bf16", "--ranks 1", 2e-4},
    {"tf32,ranks=2", "--tf32", "--ranks 2", 5e-5},
};

TEST_P(gpt_cuda, fewer_bits, fewer_bits, row < fewer_bits + 2 ? 0 : AT_NIGHT(STUB)) {
    char options[100];
    curve cpu, plain, gpu;
    const char *program = cuda_program();
    train("FSDP_BACKEND=shm", cpu_program(), "--ranks 1 --lr 0.005", &cpu);
    snprintf(options, sizeof options, "--lr 0.005 --plain %s", row->number);
    train("", program, options, &plain);
    CHECK_EQ_INT(plain.count, STEPS);
    check_same(&cpu, &plain, 1e-3, 5e-3);
    CHECK(fabs(plain.loss[STEPS - 1] - cpu.loss[STEPS - 1]) > 5e-6); // fewer bits were used
    snprintf(options, sizeof options, "--lr 0.005 %s %s", row->number, row->options);
    train(OVER_NCCL, program, options, &gpu);
    CHECK_EQ_INT(gpu.count, STEPS);
    check_same(&plain, &gpu, row->ours, 5e-3);
}

/* Losses that are not logged change nothing. */
TEST(gpt_cuda, log_every) {
    curve all, some;
    const char *program = cuda_program();
    train(OVER_NCCL, program, "--ranks 2", &all);
    train(OVER_NCCL, program, "--ranks 2 --log-every 4", &some);
    CHECK_EQ_INT(some.count, 6); // 1 2 3 4 8 10
    CHECK_EQ_INT(some.step[4], 8);
    check_same(&all, &some, 0.0, 0.0);
}

/* Two runs with equal ranks give equal bits: every sum has a fixed order. */
TEST(gpt_cuda, repeats) {
    curve a, b;
    const char *program = cuda_program();
    train(OVER_NCCL, program, "--ranks 2", &a);
    train(OVER_NCCL, program, "--ranks 2", &b);
    check_same(&a, &b, 0.0, 0.0);
}

/* Only the stand-in for the runtime has this checker: the first access that no event orders ends
   the program. It checks products, copies and collectives. */
TEST(gpt_cuda, no_races) {
    curve c;
    const char *program = cuda_program();
    if (!strstr(program, "/stub/")) SKIP("not built with tests/stubs");
    train(OVER_NCCL "FSDP_STUB_CHECKS=1", program, "--ranks 2", &c);
    CHECK_EQ_INT(c.count, STEPS);
}

/* Forward and backward as a graph: the bits of separate calls. The first two run by day, too. */
static const struct {
    const char *name, *environment, *options;
} graphs[] = {
    {"ranks=1", OVER_NCCL, "--ranks 1"},
    {"checked", OVER_NCCL "FSDP_STUB_CHECKS=1", ""}, // stops at an access that no event orders
    {"alone", OVER_NCCL, ""},
    {"no_reshard", OVER_NCCL, "--reshard 0"},
    {"log_every", OVER_NCCL, "--log-every 4"},
    {"protected", OVER_NCCL "FSDP_STUB_PROTECT=1", ""},
};

/* PyTorch: test_fully_shard_training.py test_two_layer_fully_shard_cudagraph. Differs: PyTorch
   captures two ranks. Here forward, backward and clipping of one rank can be a CUDA graph;
   nccl.captured shows that more are refused. */
TEST_P(gpt_cuda, graph, graphs, row < graphs + 2 ? 0 : AT_NIGHT(STUB)) {
    char options[100];
    curve calls, graph;
    const char *program = cuda_program();
    train(OVER_NCCL, program, "--ranks 1", &calls);
    CHECK(calls.norm[STEPS - 1] > 1.0); // clipping has an effect
    snprintf(options, sizeof options, "--graph %s", row->options);
    train(row->environment, program, options, &graph);
    CHECK(graph.step[graph.count - 1] == STEPS);
    check_same(&calls, &graph, 0.0, 0.0);
}

/* Returns 1 if a training succeeds although the nth call of a function fails. */
static int survives(const char *function, int nth, int steps, const char *options) {
    char environment[200];
    const char *program = cuda_program();
    if (!strstr(program, "/stub/")) SKIP("not built with tests/stubs, which fail as they are told");
    snprintf(environment, sizeof environment, OVER_NCCL "FSDP_STUB_FAIL=%s:%d:2", function, nth);
    return run_training(environment, program, steps, options) == 0;
}

/* Returns the number of calls of a function in a training of three steps. */
static int calls_of(const char *function, const char *options) {
    int fails = 0, works = 128; // the last call; a number without a call
    while (works - fails > 1) {
        const int middle = (fails + works) / 2;
        if (survives(function, middle, 3, options)) works = middle;
        else fails = middle;
    }
    h_message("%s: %d calls", function, fails);
    return fails;
}

/* One capture, and a launch for each step from the third on. */
TEST(gpt_cuda, graph_launches) {
    CHECK(!survives("cudaGraphInstantiate", 1, STEPS, "--graph"));
    CHECK(survives("cudaGraphInstantiate", 2, STEPS, "--graph"));
    CHECK(!survives("cudaGraphLaunch", STEPS - 2, STEPS, "--graph"));
    CHECK(survives("cudaGraphLaunch", STEPS - 1, STEPS, "--graph"));
}

TEST(gpt_cuda, graph_allocates_nothing, AT_NIGHT(STUB)) {
    static const char *const functions[] = {"cudaMalloc", "cudaMallocHost"};
    for (size_t i = 0; i < sizeof functions / sizeof *functions; i++) {
        const int calls = calls_of(functions[i], "--graph");
        CHECK(i > 0 || calls > 0);
        CHECK(survives(functions[i], calls + 1, STEPS, "--graph"));
    }
}

/* The backward stores gradients: without the library no step fills memory with zeros. */
TEST(gpt_cuda, plain_fills_nothing) {
    const int calls = calls_of("cudaMemsetAsync", "--plain");
    CHECK(calls > 0); // before the first step
    CHECK(survives("cudaMemsetAsync", calls + 1, STEPS, "--plain"));
}

static const struct {
    const char *name, *args, *words;
} refusals[] = {
    {"plain_ranks", "--plain --ranks 2", "--plain"},
    {"graph_ranks", "--graph --ranks 2", "--graph is for one rank"},
    {"graph_bf16", "--graph --bf16", "--graph is without --bf16"},
    {"graph_plain", "--graph --plain", "--plain"},
    {"ema_plain", "--ema 0.9 --plain", "--ema needs the library"},
    {"tf32_bf16", "--tf32 --bf16", "--tf32 is for f32"},
    {"log_every_zero", "--log-every 0", "--log-every 0"},
    {"unknown", "--fast", "--fast"},
};

TEST_P(gpt_cuda, refuses, refusals) {
    CHECK_EQ_INT(run("", cuda_program(), row->args), 2);
    CHECK(strncmp(output, "train_gpt_cuda: ", 16) == 0);
    CHECK_MSG(strstr(output, row->words) != NULL, "expected '%s' in: %s", row->words, output);
}

TEST(gpt_cuda, help) {
    static const char *const options[] = {"--data", "--ranks", "--log-every", "--bf16",
                                          "--tf32", "--plain", "--graph"};
    CHECK_EQ_INT(run("", cuda_program(), "--help"), 0);
    for (size_t i = 0; i < sizeof options / sizeof *options; i++) {
        CHECK_MSG(strstr(output, options[i]) != NULL, "%s is not explained", options[i]);
    }
}
