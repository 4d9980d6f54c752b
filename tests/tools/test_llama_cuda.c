/* test_llama_cuda.c - the trainer of Llamas for GPUs learns as the one for CPUs does.

   Runs $FSDP_BUILD/examples/train_llama_cuda, or the one in $FSDP_BUILD/stub/examples, which is
   built with the stand-ins of tests/stubs and needs no GPU; and examples/llama/train_llama. What
   that one computes is compared with golden values in test_llama.c.

   SPDX-License-Identifier: MIT */
#define TAGS NO(SHM) | STUB
#include "harness.h"
#include "golden.h"

#include <math.h> // fabs

enum { TOKENS = 350, VOCAB = 60, OUTPUT = 1 << 16, STEPS = 3 };

static char output[OUTPUT]; // both streams of the last run

static const char *cuda_program(void) {
    static char path[400];
    static const char *const places[] = {"", "/stub"};
    const char *dir = getenv("FSDP_BUILD");
    for (size_t i = 0; i < sizeof places / sizeof *places; i++) {
        snprintf(path, sizeof path, "%s%s/examples/train_llama_cuda", dir && *dir ? dir : "build",
                 places[i]);
        if (access(path, X_OK) == 0) return path;
    }
    SKIP("no train_llama_cuda below the build directory");
    return NULL;
}

static const char *cpu_program(void) {
    if (access("examples/llama/train_llama", X_OK) != 0)
        SKIP("no examples/llama/train_llama: make examples builds it");
    return "examples/llama/train_llama";
}

/* Writes tokens, and a mask of which every fifth is no label. */
static void prepare(void) {
    static uint8_t bytes[1024 + 2 * TOKENS], mask[TOKENS];
    const uint32_t head[3] = {20240520, 1, TOKENS};
    char path[512];
    golden_needs("llama");
    unsetenv("RANK"), unsetenv("WORLD_SIZE");
    for (int i = 0; i < 12; i++) bytes[i] = (uint8_t)(head[i / 4] >> 8 * (i % 4));
    for (int i = 0; i < TOKENS; i++) {
        bytes[1024 + 2 * i] = (uint8_t)(i * i % VOCAB);
        mask[i] = i % 5 != 0;
    }
    snprintf(path, sizeof path, "%s/t.bin", h_tmpdir());
    FILE *f = fopen(path, "wb");
    CHECK(f != NULL && fwrite(bytes, 1, sizeof bytes, f) == sizeof bytes && fclose(f) == 0);
    snprintf(path, sizeof path, "%s/t.mask", h_tmpdir());
    f = fopen(path, "wb");
    CHECK(f != NULL && fwrite(mask, 1, sizeof mask, f) == sizeof mask && fclose(f) == 0);
}

/* Runs a program with a golden model. Returns its exit status, and its output in `output`. */
static int run(const char *environment, const char *program, const char *model, const char *args) {
    char command[4096];
    snprintf(command, sizeof command, "env %s %s --model %s/llama/%s/model %s </dev/null 2>&1",
             environment, program, golden_dir(), model, args);
    FILE *p = popen(command, "r");
    CHECK(p != NULL);
    output[fread(output, 1, sizeof output - 1, p)] = 0;
    const int status = pclose(p);
    printf("%s\n%s", command, output);
    CHECK(WIFEXITED(status));
    return WEXITSTATUS(status);
}

typedef struct curve {
    double loss[STEPS], norm[STEPS], eval;
} curve;

// Eight rows of 20 tokens a step. The evaluation has 17 rows: on 2 ranks the second one has none of
// the last microbatch.
#define TRAIN                                                                                      \
    "--steps 3 --batch 8 --context 20 --lr 1e-3 --ce-rows 7 --data %s/t.bin --mask %s/t.mask "     \
    "--eval-data %s/t.bin --json %s/json "

static void train(const char *environment, const char *program, const char *model,
                  const char *options, curve *c) {
    const char *dir = h_tmpdir();
    char args[2048], path[512], line[512];
    size_t n = (size_t)snprintf(args, sizeof args, TRAIN, dir, dir, dir, dir);
    snprintf(args + n, sizeof args - n, "%s", options);
    snprintf(path, sizeof path, "%s/json", dir);
    remove(path);
    CHECK_EQ_INT(run(environment, program, model, args), 0);
    FILE *f = fopen(path, "r");
    CHECK(f != NULL);
    for (int i = 0; i < STEPS; i++) {
        int step;
        CHECK(fgets(line, sizeof line, f) != NULL);
        CHECK_EQ_INT(sscanf(line, "{\"step\": %d, \"loss\": %lf, \"norm\": %lf", &step, &c->loss[i],
                            &c->norm[i]),
                     3);
        CHECK_EQ_INT(step, i + 1);
    }
    CHECK(fgets(line, sizeof line, f) != NULL);
    CHECK_EQ_INT(sscanf(line, "{\"step\": 3, \"eval_loss\": %lf", &c->eval), 1);
    CHECK(fgets(line, sizeof line, f) == NULL);
    CHECK_EQ_INT(fclose(f), 0);
}

static double apart(double a, double b) { return fabs(a - b) / fabs(a); }

/* `moved`: a loss may also differ by this share of how far training has moved it: AdamW turns the
   rounding of a gradient near zero into a part of the learning rate. */
static void check_same(const curve *cpu, const curve *gpu, double loss_limit, double moved,
                       double norm_limit) {
    double loss = 0.0, norm = 0.0;
    for (int i = 0; i <= STEPS; i++) {
        const double want = i < STEPS ? cpu->loss[i] : cpu->eval;
        const double dl = apart(want, i < STEPS ? gpu->loss[i] : gpu->eval);
        const double dn = i < STEPS ? apart(cpu->norm[i], gpu->norm[i]) : 0.0;
        CHECK(dl <= loss_limit + moved * apart(want, cpu->loss[0]));
        CHECK(dn <= norm_limit);
        if (dl > loss) loss = dl;
        if (dn > norm) norm = dn;
    }
    h_message("largest difference: loss %.2g, norm %.2g, relative", loss, norm);
}

// Device memory that the host cannot read, and concurrent streams: as on a GPU.
#define OVER_NCCL "FSDP_BACKEND=nccl FSDP_CUDA_MANAGED=0 FSDP_STUB_SYNC=0 "

static const struct {
    const char *name, *model, *environment, *options;
} runs[] = {
    {"llama_tied,1", "llama_tied", OVER_NCCL, "--ranks 1 "},
    {"llama_tied,2", "llama_tied", OVER_NCCL, "--ranks 2 "},
    {"llama_tied,protected", "llama_tied", OVER_NCCL "FSDP_STUB_PROTECT=1", "--ranks 2 "},
    {"llama_untied_bias,2", "llama_untied_bias", OVER_NCCL, "--ranks 2 "},
    {"llama3_rope_shards,1", "llama3_rope_shards", OVER_NCCL, "--ranks 1 "},
    {"qwen2_untied,2,accumulate", "qwen2_untied", OVER_NCCL, "--ranks 2 --micro 2 --accumulate "},
    {"llama3_rope_old,2", "llama3_rope_old", OVER_NCCL, "--ranks 2 "},
    {"qwen2_tied,1", "qwen2_tied", OVER_NCCL, "--ranks 1 "},
    {"llama_quant,2", "llama_quant", OVER_NCCL, "--ranks 2 "},
    {"qwen3_tied,2,recompute", "qwen3_tied", OVER_NCCL, "--ranks 2 --micro 1 --recompute "},
};

/* In f32 losses and norms are those of the CPU, within what the specification gives to three steps;
   in bf16, of 8 bits, within 2e-3 (and 5 % of how far the loss has moved) and 3e-2. */
TEST_P(llama_cuda, parity, runs, SECONDS(120)) {
    curve cpu, gpu;
    char options[200];
    const char *program = cuda_program();
    prepare();
    train("FSDP_BACKEND=shm", cpu_program(), row->model, "--ranks 1", &cpu);
    CHECK(cpu.eval < cpu.loss[0]); // it learns: equal losses mean something
    snprintf(options, sizeof options, "%s --f32", row->options);
    train(row->environment, program, row->model, options, &gpu);
    check_same(&cpu, &gpu, 1e-5, 0.0, 1e-4);
    train(row->environment, program, row->model, row->options, &gpu);
    CHECK(gpu.loss[0] != cpu.loss[0]); // it is another arithmetic
    check_same(&cpu, &gpu, 2e-3, 0.05, 3e-2);
}

/* Returns the number that follows a text in the output. */
static double number_after(const char *text) {
    const char *at = strstr(output, text);
    double number = 0.0;
    CHECK_MSG(at && sscanf(at + strlen(text), " %lf", &number) == 1, "no '%s'", text);
    return number;
}

/* Four steps are two and two after a resume, and the CPU program evaluates an export alike. */
TEST(llama_cuda, resumes_and_exports, SECONDS(120)) {
    char args[2048], common[700];
    const char *dir = h_tmpdir(), *program = cuda_program(), *cpu = cpu_program();
    prepare();
    snprintf(common, sizeof common,
             "--f32 --data %s/t.bin --context 20 --batch 4 --lr 1e-3 --warmup 0 --min-lr 1e-3 "
             "--ranks 2",
             dir);
    snprintf(args, sizeof args, "%s --steps 4", common);
    CHECK_EQ_INT(run(OVER_NCCL, program, "llama_tied", args), 0);
    const double straight = number_after("step    4/4  loss");
    snprintf(args, sizeof args, "%s --steps 2 --save %s/run", common, dir);
    CHECK_EQ_INT(run(OVER_NCCL, program, "llama_tied", args), 0);
    snprintf(args, sizeof args,
             "%s --steps 4 --save %s/run --resume --eval-data %s/t.bin --export %s/out", common,
             dir, dir, dir);
    CHECK_EQ_INT(run(OVER_NCCL, program, "llama_tied", args), 0);
    CHECK(strstr(output, "2 steps are done"));
    CHECK_NEAR(number_after("step    4/4  loss"), straight, 0.0);
    const double here = number_after("t.bin: loss");
    // the option that comes last counts
    snprintf(args, sizeof args, "--model %s/out --eval-data %s/t.bin --context 20", dir, dir);
    CHECK_EQ_INT(run("FSDP_BACKEND=shm", cpu, "llama_tied", args), 0);
    CHECK(apart(number_after("t.bin: loss"), here) < 1e-5);
}

static const struct {
    const char *name, *options, *says;
} refusals[] = {
    {"lora", "--lora 4", "train_llama_cuda: --lora: expected training in full"},
    {"sample", "--sample 1,2", "train_llama_cuda: --sample: expected training in full"}};

TEST_P(llama_cuda, refuses, refusals) {
    char args[700];
    prepare();
    snprintf(args, sizeof args, "--data %s/t.bin --context 20 %s", h_tmpdir(), row->options);
    CHECK_EQ_INT(run(OVER_NCCL, cuda_program(), "llama_tied", args), 2);
    CHECK_EQ_INT(strncmp(output, row->says, strlen(row->says)), 0);
    CHECK(strchr(output, '\n') == strrchr(output, '\n')); // one line
}

/* A head that a warp cannot hold: refused before the files are read. */
TEST(llama_cuda, refuses_large_heads) {
    char args[1500], says[700];
    const char *dir = h_tmpdir();
    prepare();
    snprintf(args, sizeof args,
             "cp -r %s/llama/qwen3_tied/model %s/m && chmod -R u+w %s/m && "
             "sed -i 's/\"head_dim\": 12/\"head_dim\": 258/' %s/m/config.json",
             golden_dir(), dir, dir, dir);
    CHECK_EQ_INT(system(args), 0);
    snprintf(args, sizeof args, "--model %s/m --data %s/t.bin --context 20", dir, dir);
    CHECK_EQ_INT(run(OVER_NCCL, cuda_program(), "qwen3_tied", args), 2);
    snprintf(says, sizeof says,
             "train_llama_cuda: %s/m/config.json: head_dim: expected at most 256, got 258\n", dir);
    CHECK_EQ_STR(output, says);
}

TEST(llama_cuda, help) {
    golden_needs("llama");
    CHECK_EQ_INT(run("", cuda_program(), "llama_tied", "--help"), 0);
    CHECK(strstr(output, "usage: train_llama_cuda --model DIR"));
    CHECK(strstr(output, "--f32"));
}
