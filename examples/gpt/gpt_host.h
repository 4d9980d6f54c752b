/* gpt_host.h - what train_gpt.c and train_gpt.cu share: options, text, random numbers, the start of
   the parameters, the course of a training, and what is shown of it

   A program includes fsdp.h, fsdp_muon.h and gpt.h, defines PROGRAM, its name in messages, and
   then includes this file. It defines the six functions declared under "a rank", which say where
   the numbers are and who computes on them, and main, which calls gpt_main. With GPT_ON_GPU it has
   the options of train_gpt.cu, too. If fsdp_plan.h, fsdp_dtensor.h or fsdp_checkpoint.h is included
   before it, it has those of plans, of tensor parallelism and of gpt_save.h.

   Parameters, batches and text depend on --seed and neither on the number of ranks nor on the
   program.

   SPDX-License-Identifier: MIT */
#ifndef GPT_HOST_H
#define GPT_HOST_H

#include "examples/common/program.h" // now_seconds, is_started_again

#include <dirent.h>   // scandir, alphasort
#include <errno.h>    // errno
#include <getopt.h>   // getopt_long
#include <limits.h>   // INT_MAX, PATH_MAX
#include <math.h>     // ceil, cos, exp, floor, log, log10, pow, sqrt
#include <signal.h>   // signal
#include <stdarg.h>   // va_list
#include <stdint.h>   // uint8_t, uint64_t
#include <stdio.h>    // printf, fopen
#include <stdlib.h>   // malloc, realloc, strtod, strtoll
#include <string.h>   // memcpy, strcmp, strerror
#include <sys/stat.h> // lstat, mkdir
#include <unistd.h>   // isatty, readlink

#ifdef __CUDACC__
#define GPT_BOTH __host__ __device__ // in kernels, too
#else
#define GPT_BOTH
#endif

static const double MAX_GRAD_NORM = 1.0;
static const double FINAL_LR = 0.1;    // factor of --lr at the end of the cosine
static const double TEMPERATURE = 0.8; // divides the logits when text is sampled
enum { WARMUP = 100, TOP_K = 20, PROMPT = 24, MAX_TOKENS = 1 << 24, EMA_BATCHES = 8 };

typedef struct {
    gpt_config gpt; // its batch is the global batch
    int ranks;      // 0: whatever the environment says
    int threads;
    int steps;
    int sample; // bytes of text at the end
    int lines;  // a sequence ends with its line: the targets after that do not count
    int reshard;
    double lr;
    double ema;    // decay of the average of the weights; 0: none
    int muon;      // 1: the matrices of the blocks have Muon, the rest AdamW
    int log_every; // steps from one look at the loss to the next
    int bf16;      // these four: GPT_ON_GPU
    int tf32;
    int plain;
    int graph;
    int tp;               // ranks that cut each block; with fsdp_dtensor.h
    int plan;             // with fsdp_plan.h
    const char *plan_out; // NULL: none
    const char *trace_dir; // with fsdp_trace.h. NULL: none
    uint64_t seed;
    const char *data_path; // NULL: the project's own sources and documents
    const char *csv_path;  // NULL: none
    const char *save_dir;  // these five: with fsdp_checkpoint.h. NULL: none
    int save_every;        // 0: only at the end
    int keep;
    int resume;
    int async;
} options;

typedef struct {
    options opt;
    uint8_t *text;
    size_t text_nbytes;
    int num_files;
} job;

/* ---- small helpers --------------------------------------------------------------------------- */

/* One line for the user; the value for main to return. */
static int impossible(const char *format, ...) __attribute__((format(printf, 1, 2)));
static int impossible(const char *format, ...) {
    va_list args;
    va_start(args, format);
    fputs(PROGRAM ": ", stderr);
    vfprintf(stderr, format, args);
    fputc('\n', stderr);
    va_end(args);
    return EXIT_IMPOSSIBLE;
}

/* 1234567 -> "1,234,567"; text has room for 32 characters */
static const char *commas(char *text, int64_t value) {
    char digits[24];
    const int count = snprintf(digits, sizeof digits, "%lld", (long long)value);
    char *to = text;
    for (int i = 0; i < count; i++) {
        if (i > 0 && (count - i) % 3 == 0 && digits[i - 1] != '-') *to++ = ',';
        *to++ = digits[i];
    }
    *to = 0;
    return text;
}

/* ---- random numbers: functions of their purpose, equal on all ranks -------------------------- */

enum { STREAM_INIT = 1, STREAM_BATCH, STREAM_SAMPLE, STREAM_PROMPT };

static GPT_BOTH inline uint64_t splitmix64(uint64_t x) {
    x += 0x9E3779B97F4A7C15u;
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
    x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
    return x ^ (x >> 31);
}

static GPT_BOTH inline uint64_t random_bits(uint64_t seed, int stream, uint64_t a, uint64_t b) {
    uint64_t h = splitmix64(seed);
    h = splitmix64(h ^ (uint64_t)stream);
    h = splitmix64(h ^ a);
    return splitmix64(h ^ b);
}

/* In (0, 1) */
static double uniform(uint64_t bits) { return ((double)(bits >> 11) + 0.5) / 9007199254740992.0; }

/* Standard normal, by Box and Muller */
static double normal(uint64_t bits) {
    const double radius = sqrt(-2.0 * log(uniform(bits)));
    return radius * cos(6.283185307179586 * uniform(splitmix64(bits)));
}

/* Returns the first byte of a step's sequence in the text; `sequence` counts over all ranks. */
static GPT_BOTH inline uint64_t sequence_start(uint64_t seed, int step, int sequence,
                                               size_t text_nbytes, int context) {
    const uint64_t bits = random_bits(seed, STREAM_BATCH, (uint64_t)step, (uint64_t)sequence);
    return bits % (text_nbytes - (size_t)context);
}

/* ---- text ------------------------------------------------------------------------------------ */

/* Appends a file; 0, or errno. */
static int append_file(job *j, const char *path) {
    FILE *file = fopen(path, "rb");
    if (!file) return errno;
    int error = 0;
    for (;;) {
        const size_t room = 1 << 16;
        uint8_t *text = (uint8_t *)realloc(j->text, j->text_nbytes + room);
        if (!text) {
            error = ENOMEM;
            break;
        }
        j->text = text;
        const size_t nbytes = fread(text + j->text_nbytes, 1, room, file);
        j->text_nbytes += nbytes;
        if (nbytes < room) {
            if (ferror(file)) error = errno ? errno : EIO;
            break;
        }
    }
    fclose(file);
    if (!error) j->num_files++;
    return error;
}

static int is_source(const char *name) {
    const char *dot = strrchr(name, '.');
    return dot &&
           (!strcmp(dot, ".h") || !strcmp(dot, ".c") || !strcmp(dot, ".cc") || !strcmp(dot, ".md"));
}

static int is_visible(const struct dirent *entry) {
    return entry->d_name[0] != '.' && strcmp(entry->d_name, "build") != 0;
}

/* Appends the sources and documents below a directory in the order of their names, which is the
   same on all ranks. What cannot be read is left out. */
static void append_tree(job *j, const char *dir, int depth) {
    struct dirent **entries;
    const int count = scandir(dir, &entries, is_visible, alphasort);
    for (int i = 0; i < count; i++) {
        char path[PATH_MAX];
        struct stat st;
        const int length = snprintf(path, sizeof path, "%s/%s", dir, entries[i]->d_name);
        if (length > 0 && (size_t)length < sizeof path && lstat(path, &st) == 0) {
            if (S_ISDIR(st.st_mode) && depth > 0) append_tree(j, path, depth - 1);
            if (S_ISREG(st.st_mode) && is_source(path)) (void)append_file(j, path);
        }
        free(entries[i]);
    }
    if (count >= 0) free(entries);
}

/* Appends the project itself, which is where fsdp.h is: seen from this program, then from here. */
static void append_project(job *j) {
    static const char *const ups[] = {".", "..", "../.."};
    char program[PATH_MAX / 2];
    ssize_t length = readlink("/proc/self/exe", program, sizeof program - 1);
    while (length > 0 && program[length - 1] != '/') length--;
    program[length > 0 ? length : 0] = 0;
    for (int from = 0; from < 2; from++) {
        if (from == 0 && !program[0]) continue;
        for (size_t up = 0; up < sizeof ups / sizeof *ups; up++) {
            char root[PATH_MAX - 16], header[PATH_MAX];
            snprintf(root, sizeof root, "%s%s", from == 0 ? program : "", ups[up]);
            snprintf(header, sizeof header, "%s/fsdp.h", root);
            if (access(header, R_OK) != 0) continue;
            append_tree(j, root, 3);
            return;
        }
    }
}

/* Reads the text. Returns EXIT_DONE, or the exit status after it has printed the reason. */
static int load_text(job *j) {
    const char *path = j->opt.data_path;
    const size_t needed = (size_t)j->opt.gpt.context + 1;
    if (path) {
        const int error = append_file(j, path);
        if (error) return impossible("--data %s: %s", path, strerror(error));
        if (j->text_nbytes == 0) return impossible("--data %s: the file is empty", path);
        if (j->text_nbytes < needed) {
            return impossible("--data %s: %zu bytes are too few, --context %d needs at least %zu",
                              path, j->text_nbytes, j->opt.gpt.context, needed);
        }
        return EXIT_DONE;
    }
    append_project(j);
    if (j->text_nbytes < needed) {
        return impossible("no text found: name a file with --data, or run from the project's "
                          "folder, whose own sources are the default");
    }
    return EXIT_DONE;
}

/* ---- options --------------------------------------------------------------------------------- */

static const char HELP[] =
    "usage: " PROGRAM " [options]\n"
    "Trains a small GPT on bytes of text; each rank holds one part of every parameter.\n"
    "\n"
    "  --data FILE      text to learn (the project's own sources and documents)\n"
    "  --ranks N        start N ranks on this host (as the launcher's environment says, else 1)\n"
    "  --threads        make them threads of this process\n"
    "  --steps N        training steps (%d)\n"
    "  --batch B        sequences of one step, over all ranks (%d)\n"
    "  --context T      bytes of a sequence (%d)\n"
    "  --layers L       transformer blocks (%d)\n"
    "  --heads H        attention heads (%d)\n"
    "  --channels C     width of the model, a multiple of H (%d)\n"
    "  --lr X           peak learning rate (%g)\n"
    "  --optimizer O    adamw, or muon for the matrices of the blocks and AdamW for the rest (adamw)\n"
    "  --ema D          average the weights with this decay, 0.999 say, and show both losses at the\n"
    "                   end\n"
    "  --seed S         of parameters, batches and sampled text (%llu)\n"
    "  --csv FILE       write step,loss,grad_norm,seconds, one line per step; seconds since the\n"
    "                   start of training\n"
    "  --sample N       bytes of text to generate at the end (%d)\n"
#ifndef GPT_ON_GPU
    "  --lines          a sequence ends with its line; what follows in its T bytes does not count\n"
    "                   in the loss. The loss is the mean over all bytes of the step that count\n"
#endif
    "  --reshard 0|1    1: free each block's parameters after its forward; 0: keep them for the\n"
    "                   backward, which costs memory and saves a gather (%d)\n"
#ifdef FSDP_DTENSOR_H
    "  --tp N           cut each block over N ranks, too, by tensor parallelism (1)\n"
#endif
#ifdef FSDP_PLAN_H
    "  --plan           record the second step and replay it from the third one on\n"
    "  --plan-out FILE  the same, and write the plan as text\n"
#endif
#ifdef FSDP_TRACE_H
    "  --trace DIR      record steps 3 to 5 in DIR, and tell at the end where their time went\n"
#endif
#ifdef FSDP_CHECKPOINT_H
    "  --save DIR       save checkpoints below DIR: at the end, and while it trains\n"
    "  --save-every N   after every N steps (0: only at the end)\n"
    "  --keep K         the newest K stay; 0: all (2)\n"
    "  --async          go on with training while files are written\n"
    "  --resume         go on from the newest complete checkpoint in DIR, if there is one; the\n"
    "                   ranks may be more or fewer than those that saved it\n"
    "                   When fsdprun --max-restarts, torchrun or Slurm starts the ranks again,\n"
    "                   --save does it too: begin with a DIR without checkpoints of another\n"
    "                   training\n"
#endif
#ifdef GPT_ON_GPU
    "  --log-every N    look at the loss every N steps, and not in between (1)\n"
    "  --bf16           parameters, activations and gradients in bf16; sums and shards stay f32\n"
    "  --tf32           multiply f32 on tensor cores, which take 10 of its 23 bits\n"
    "  --plain          without the library, one rank: what the library costs\n"
    "  --graph          forward and backward as one CUDA graph from the third step on; one rank\n"
#endif
    "  --help           this text\n"
    "\n"
    "Exit status: 0 done, 1 something failed on the way, 2 the request is impossible.\n";

static options default_options(void) {
    options opt;
    memset(&opt, 0, sizeof opt);
    opt.gpt.batch = 12;
    opt.gpt.context = 64;
    opt.gpt.layers = 4;
    opt.gpt.heads = 4;
    opt.gpt.channels = 128;
    opt.gpt.vocab = 256;
    opt.steps = 1000;
    opt.sample = 200;
    opt.reshard = 1;
    opt.tp = 1;
    opt.log_every = 1;
    opt.keep = 2;
    opt.lr = 2e-3;
    opt.seed = 1;
    return opt;
}

/* EXIT_DONE, or the status to exit with. `name` is for the message. */
static int parse_int(const char *name, const char *text, int min, int max, int *out) {
    char *end;
    errno = 0;
    const long long value = strtoll(text, &end, 10);
    if (end == text || *end || errno || value < min || value > max) {
        return impossible("--%s %s: expected a whole number from %d to %d", name, text, min, max);
    }
    *out = (int)value;
    return EXIT_DONE;
}

static int parse_seed(const char *text, uint64_t *out) {
    char *end;
    errno = 0;
    const unsigned long long value = strtoull(text, &end, 10);
    if (text[0] < '0' || text[0] > '9' || *end || errno) {
        return impossible("--seed %s: expected a whole number that is not negative", text);
    }
    *out = value;
    return EXIT_DONE;
}

static int parse_real(const char *name, const char *text, double most, double *out) {
    char *end;
    const double value = strtod(text, &end);
    if (end == text || *end || !(value > 0.0 && value <= most)) {
        return impossible("--%s %s: expected a number above 0%s", name, text,
                          most <= 1.0 ? ", at most 1" : "");
    }
    *out = value;
    return EXIT_DONE;
}

/* Checks for options that contradict each other, before anything starts. */
static int check_options(const options *opt) {
    const gpt_config *g = &opt->gpt;
    if (g->channels % g->heads != 0) {
        return impossible("--channels %d is not a multiple of --heads %d", g->channels, g->heads);
    }
    if (opt->ranks > 0 && opt->ranks % opt->tp != 0) {
        return impossible("--ranks %d is not a multiple of --tp %d", opt->ranks, opt->tp);
    }
    if (opt->ranks > 0 && opt->tp > 1 && g->batch % (opt->ranks / opt->tp) != 0) {
        return impossible("--batch %d is not a multiple of --ranks %d / --tp %d", g->batch,
                          opt->ranks, opt->tp);
    }
    if (opt->ranks > 0 && opt->tp == 1 && g->batch % opt->ranks != 0) {
        return impossible("--batch %d is not a multiple of --ranks %d", g->batch, opt->ranks);
    }
    if (g->batch > MAX_TOKENS / g->context) {
        return impossible("--batch %d times --context %d exceeds %d tokens", g->batch, g->context,
                          (int)MAX_TOKENS);
    }
    if (opt->muon && (opt->tp > 1 || opt->plain)) {
        return impossible("--optimizer muon needs whole matrices and the library: leave out --tp "
                          "and --plain");
    }
    if (opt->ema > 0.0 && opt->plain) return impossible("--ema needs the library: leave out --plain");
    if (opt->threads && opt->ranks == 0) return impossible("--threads needs --ranks");
    if (!opt->save_dir && (opt->save_every || opt->resume || opt->async)) {
        return impossible("%s needs --save DIR", opt->resume       ? "--resume"
                                                 : opt->save_every ? "--save-every"
                                                                   : "--async");
    }
    const char *launched = getenv("WORLD_SIZE");
    if (opt->ranks > 0 && launched && strcmp(launched, "1") != 0) {
        return impossible("--ranks %d inside a launcher's job of WORLD_SIZE=%s: leave it out",
                          opt->ranks, launched);
    }
    if (opt->plain && (opt->ranks > 1 || (launched && strcmp(launched, "1") != 0))) {
        return impossible("--plain is for one rank");
    }
    if (opt->graph && (opt->ranks > 1 || (launched && strcmp(launched, "1") != 0))) {
        return impossible("--graph is for one rank: the collectives of several are not captured");
    }
    if (opt->graph && opt->bf16) {
        return impossible("--graph is without --bf16: gathers and reductions that convert have "
                          "streams of their own, which are not captured");
    }
    if (opt->tf32 && opt->bf16) return impossible("--tf32 is for f32: leave out --bf16 or it");
    if (opt->graph && opt->plain) return impossible("--graph captures calls that --plain has not");
    return EXIT_DONE;
}

static void show_help(void) {
    const options def = default_options();
    printf(HELP, def.steps, def.gpt.batch, def.gpt.context, def.gpt.layers, def.gpt.heads,
           def.gpt.channels, def.lr, (unsigned long long)def.seed, def.sample, def.reshard);
}

typedef struct {
    const char *name;
    int *out, min, max;
} int_option;

/* Returns EXIT_DONE and sets *run to 1 if there is a training to run; otherwise returns the exit
   status. */
static int parse_options(int argc, char **argv, options *opt, int *run) {
    gpt_config *g = &opt->gpt;
    const int_option numbers[] = {
        {"ranks", &opt->ranks, 1, 4096},
        {"steps", &opt->steps, 1, 100000000},
        {"batch", &g->batch, 1, 1 << 20},
        {"context", &g->context, 1, 1 << 16},
        {"layers", &g->layers, 1, 1000},
        {"heads", &g->heads, 1, 1 << 14},
        {"channels", &g->channels, 1, 1 << 14},
        {"sample", &opt->sample, 0, 1 << 20},
        {"reshard", &opt->reshard, 0, 1},
#ifdef FSDP_DTENSOR_H
        {"tp", &opt->tp, 1, 4096},
#endif
#ifdef FSDP_CHECKPOINT_H
        {"save-every", &opt->save_every, 0, 100000000},
        {"keep", &opt->keep, 0, 1 << 20},
#endif
#ifdef GPT_ON_GPU
        {"log-every", &opt->log_every, 1, 1 << 20},
#endif
    };
    enum { NUMBERS = sizeof numbers / sizeof(int_option) };
    const struct option others[] = {
        {"data", 1, NULL, 'd'}, {"csv", 1, NULL, 'c'},      {"lr", 1, NULL, 'l'},
        {"seed", 1, NULL, 's'}, {"threads", 0, NULL, 't'},  {"help", 0, NULL, 'h'},
        {"optimizer", 1, NULL, 'm'}, {"ema", 1, NULL, 'e'},
#ifndef GPT_ON_GPU
        {"lines", 0, NULL, 'n'},
#endif
#ifdef FSDP_PLAN_H
        {"plan", 0, NULL, 'r'}, {"plan-out", 1, NULL, 'o'},
#endif
#ifdef FSDP_TRACE_H
        {"trace", 1, NULL, 'i'},
#endif
#ifdef FSDP_CHECKPOINT_H
        {"save", 1, NULL, 'w'}, {"resume", 0, NULL, 'u'},   {"async", 0, NULL, 'a'},
#endif
#ifdef GPT_ON_GPU
        {"bf16", 0, NULL, 'b'}, {"tf32", 0, NULL, 'f'},     {"plain", 0, NULL, 'p'},
        {"graph", 0, NULL, 'g'},
#endif
        {NULL, 0, NULL, 0},
    };
    struct option known[NUMBERS + sizeof others / sizeof *others];
    memset(known, 0, sizeof known);
    for (int i = 0; i < NUMBERS; i++) {
        known[i].name = numbers[i].name;
        known[i].has_arg = 1;
        known[i].val = 256 + i;
    }
    memcpy(known + NUMBERS, others, sizeof others);
    *run = 0;
    *opt = default_options();
    opterr = 0; // the messages are our own
    for (;;) {
        const char *given = optind < argc ? argv[optind] : "";
        const int c = getopt_long(argc, argv, ":", known, NULL);
        int bad = EXIT_DONE;
        if (c == -1) break;
        if (c >= 256) {
            const int i = c - 256;
            bad = parse_int(numbers[i].name, optarg, numbers[i].min, numbers[i].max,
                            numbers[i].out);
        } else if (c == 'd') {
            opt->data_path = optarg;
        } else if (c == 'c') {
            opt->csv_path = optarg;
        } else if (c == 'l') {
            bad = parse_real("lr", optarg, 1e6, &opt->lr);
        } else if (c == 'e') {
            bad = parse_real("ema", optarg, 1.0, &opt->ema);
        } else if (c == 'm') {
            opt->muon = strcmp(optarg, "muon") == 0;
            if (!opt->muon && strcmp(optarg, "adamw") != 0)
                bad = impossible("--optimizer %s: expected adamw or muon", optarg);
        } else if (c == 's') {
            bad = parse_seed(optarg, &opt->seed);
        } else if (c == 't') {
            opt->threads = 1;
        } else if (c == 'n') {
            opt->lines = 1;
        } else if (c == 'b') {
            opt->bf16 = 1;
        } else if (c == 'f') {
            opt->tf32 = 1;
        } else if (c == 'p') {
            opt->plain = 1;
        } else if (c == 'g') {
            opt->graph = 1;
        } else if (c == 'r') {
            opt->plan = 1;
        } else if (c == 'o') {
            opt->plan = 1;
            opt->plan_out = optarg;
        } else if (c == 'i') {
            if (setenv("FSDP_TRACE", optarg, 1)) bad = impossible("--trace: %s", strerror(errno));
            opt->trace_dir = optarg;
        } else if (c == 'w') {
            if (!*optarg) bad = impossible("--save '': expected the name of a directory");
            opt->save_dir = optarg;
        } else if (c == 'u') {
            opt->resume = 1;
        } else if (c == 'a') {
            opt->async = 1;
        } else if (c == 'h') {
            show_help();
            return EXIT_DONE;
        } else if (c == ':') {
            bad = impossible("%s needs a value; --help lists all options", given);
        } else {
            bad = impossible("%s is not known, or takes no value; --help lists all options", given);
        }
        if (bad) return bad;
    }
    if (optind < argc) return impossible("%s is no option; --help lists them", argv[optind]);
    if (opt->save_dir && is_started_again()) opt->resume = 1;
    *run = 1;
    return check_options(opt);
}

/* ---- the parts of a model -------------------------------------------------------------------- */

typedef struct {
    const job *j;
    void *own; // the program's
    fsdp_world *world;
    int rank, num_ranks;
    int dp, tp;     // num_ranks = dp * tp; ranks of tp, neighbours, share a batch
    gpt_config cfg; // its batch is this rank's share
    gpt_param_spec embed_specs[GPT_EMBED_PARAM_COUNT];
    gpt_param_spec block_specs[GPT_BLOCK_PARAM_COUNT];
    fsdp_model *model;
    fsdp_unit *embed;   // embeddings and final norm, open around the blocks
    fsdp_unit **blocks; // [layers]
    fsdp_adamw *adamw;
    fsdp_muon *muon; // NULL without --optimizer muon
    fsdp_ema *ema;   // NULL without --ema
    gpt_acts acts;
    uint8_t *inputs;     // (B, T)
    int16_t *targets;    // (B, T), a byte or GPT_IGNORED
    double counted;      // targets of the current step that count, over all ranks
    double *losses;      // [steps], rank 0; negative: not looked at
    int first;           // steps that were done before this run began
    FILE *csv;           // rank 0
    double start, shown; // when training began; seconds from then to the last progress line
    fsdp_memory predicted;
#ifdef FSDP_PLAN_H
    fsdp_plan *plan;
#endif
#ifdef FSDP_CHECKPOINT_H
    fsdp_checkpoint *ck;
    int64_t progress[6]; // gpt_save.h
    int saving;          // number of steps that a save under way contains; 0: none
    double blocked;      // seconds of the calls that began it
#endif
} trainer;

/* q, k and v as dims of their own, and heads: FSDP cuts along the last dim. Tensor parallelism cuts
   by heads, so that each rank has a box; in checkpoints shapes are those, with and without it. */
static void apart(const trainer *t, int which, fsdp_param_desc *d) {
    const int64_t C = t->cfg.channels, H = t->cfg.heads;
    if (which != GPT_QKVW && which != GPT_QKVB && which != GPT_ATTPROJW) return;
    d->ndim = 3;
    d->shape[0] = which == GPT_ATTPROJW ? C : 3;
    d->shape[1] = H;
    d->shape[2] = which == GPT_QKVW ? C / H * C : C / H;
    d->shard_dim = which == GPT_ATTPROJW ? 0 : 2; // FSDP needs rows; three are too few
}

static fsdp_status add_unit(trainer *t, const char *name, gpt_param_spec *specs, int count,
                            int reshard, fsdp_unit **unit) {
    fsdp_param_desc params[GPT_BLOCK_PARAM_COUNT];
    fsdp_unit_desc desc = FSDP_ZERO;
    for (int i = 0; i < count; i++) {
        params[i] = specs[i].cols ? fsdp_mat(specs[i].name, specs[i].rows, specs[i].cols)
                                  : fsdp_vec(specs[i].name, specs[i].rows);
        params[i].user = &specs[i];
        if (t->j->opt.save_dir && specs == t->block_specs) apart(t, i, &params[i]);
    }
    desc.name = name;
    desc.params = params;
    desc.num_params = count;
    desc.reshard_after_forward = reshard;
    return fsdp_fully_shard(t->model, &desc, unit);
}

/* Each element is a function of the seed, of its parameter and of its place in the full tensor. */
static float first_value(const job *j, const gpt_param_spec *spec, int ordinal, int64_t place) {
    if (spec->std == 0.0f) return spec->mean;
    const uint64_t bits = random_bits(j->opt.seed, STREAM_INIT, (uint64_t)ordinal, (uint64_t)place);
    return spec->mean + spec->std * (float)normal(bits);
}

static void init_rows(void *user, const fsdp_param_view *block) {
    const trainer *t = (const trainer *)user;
    const gpt_param_spec *spec = (const gpt_param_spec *)block->user;
    float *data = fsdp_view_data_f32(block);
    for (int64_t k = 0; k < block->numel; k++) {
        data[k] = first_value(t->j, spec, block->ordinal, fsdp_view_index(block, k));
    }
}

/* Muon has the matrices of the blocks, with the columns that they have in gpt.h: apart() has others. */
static int muon_takes(void *user, const fsdp_param_view *param) {
    const trainer *t = (const trainer *)user;
    const gpt_param_spec *spec = (const gpt_param_spec *)param->user;
    return param->unit == t->embed ? 0 : (int)spec->cols;
}

/* Weight decay for matrices, none for biases and norms. Negative: Muon has it. */
static int decay_group(void *user, const fsdp_param_view *param) {
    if (fsdp_muon_takes(((const trainer *)user)->muon, param)) return -1;
    return ((const gpt_param_spec *)param->user)->cols ? 0 : 1;
}

/* gemm: NULL on the host. Muon's steps are as long as AdamW's, and so has its learning rate. */
static fsdp_status create_optimizer(trainer *t, fsdp_gemm_fn gemm, void *gemm_user) {
    fsdp_muon_desc muon = fsdp_muon_defaults();
    fsdp_adamw_desc desc = fsdp_adamw_defaults();
    fsdp_ema_desc ema = fsdp_ema_defaults();
    muon.adjust = FSDP_MUON_MATCH_RMS_ADAMW;
    muon.take = muon_takes, muon.user = t;
    muon.gemm = gemm, muon.gemm_user = gemm_user;
    fsdp_status status =
        t->j->opt.muon ? fsdp_muon_create(t->model, &muon, &t->muon) : FSDP_OK;
    if (status) return status;
    desc.beta2 = 0.95;
    desc.weight_decay = 0.1;
    desc.num_groups = 2;
    desc.groups[1].weight_decay = 0;
    desc.group = decay_group, desc.user = t;
    status = fsdp_adamw_create(t->model, &desc, &t->adamw);
    ema.decay = t->j->opt.ema;
    return status || !(ema.decay > 0.0) ? status : fsdp_ema_create(t->model, &ema, &t->ema);
}

/* Linear warm-up, then half a cosine down to FINAL_LR of the peak. The warm-up does not depend on
   --steps: two runs of different lengths begin with the same steps. */
static double learning_rate(const options *opt, int step) {
    if (step < WARMUP) return opt->lr * (step + 1) / (double)WARMUP;
    const double done = (double)(step - WARMUP) / (opt->steps - WARMUP);
    return opt->lr * (FINAL_LR + (1.0 - FINAL_LR) * 0.5 * (1.0 + cos(3.141592653589793 * done)));
}

static fsdp_status optimizer_step(trainer *t, int step) {
    const double lr = learning_rate(&t->j->opt, step);
    fsdp_status status = t->muon ? fsdp_muon_step(t->muon, lr) : FSDP_OK;
    if (!status) status = fsdp_adamw_step(t->adamw, lr);
    return status || !t->ema ? status : fsdp_ema_update(t->ema);
}

/* ---- what is shown --------------------------------------------------------------------------- */

/* Bytes of f32 parameters; padded: each one's rows rounded up to a multiple of the ranks. */
static int64_t param_bytes(const trainer *t, const gpt_param_spec *specs, int count, int padded) {
    int64_t nbytes = 0;
    for (int i = 0; i < count; i++) {
        int64_t rows = specs[i].rows, width = specs[i].cols ? specs[i].cols : 1;
        if (t->j->opt.save_dir && specs == t->block_specs && (i == GPT_QKVW || i == GPT_QKVB)) {
            const int64_t others = 3 * t->cfg.heads; // see apart()
            rows = rows * width / others;
            width = others;
        }
        if (padded) rows = (rows + t->num_ranks - 1) / t->num_ranks * t->num_ranks;
        nbytes += rows * width * (int64_t)sizeof(float);
    }
    return nbytes;
}

static int64_t embed_bytes(const trainer *t, int padded) {
    return param_bytes(t, t->embed_specs, GPT_EMBED_PARAM_COUNT, padded);
}

static int64_t blocks_bytes(const trainer *t, int padded) {
    return param_bytes(t, t->block_specs, GPT_BLOCK_PARAM_COUNT, padded) * t->cfg.layers;
}

static int64_t model_bytes(const trainer *t, int padded) {
    return embed_bytes(t, padded) + blocks_bytes(t, padded);
}

static void show_start(const trainer *t) {
    const job *j = t->j;
    const gpt_config *cfg = &t->cfg;
    char a[32], b[32];
    printf("model  %s parameters: %d layers, %d heads, %d channels, context %d\n",
           commas(a, model_bytes(t, 0) / (int64_t)sizeof(float)), cfg->layers, cfg->heads,
           cfg->channels, cfg->context);
    printf("text   %s bytes of %d file%s (%s)\n", commas(b, (int64_t)j->text_nbytes), j->num_files,
           j->num_files == 1 ? "" : "s",
           j->opt.data_path ? j->opt.data_path : "the project's own sources and documents");
    printf("ranks  %d, each with %d of %d sequences per step%s", t->num_ranks, cfg->batch,
           j->opt.gpt.batch, j->opt.threads ? ", as threads" : "");
    if (t->tp > 1) printf(", %d by %d: each block cut over %d", t->dp, t->tp, t->tp);
    printf("\n");
    fflush(stdout);
}

/* On a terminal one line that is rewritten, elsewhere a line now and then. `step` counts from 1. */
static void show_progress(trainer *t, int step, double loss, double norm) {
    static const char bar[] = "================";
    const int steps = t->j->opt.steps, width = (int)sizeof bar - 1;
    const double seconds = now_seconds() - t->start;
    const double tokens = (double)t->j->opt.gpt.batch * t->cfg.context;
    const int done = step - t->first; // in this run
    const double speed = seconds > 0.0 ? done * tokens / seconds : 0.0;
    const int left = (int)(seconds / done * (steps - step) + 0.5);
    if (isatty(STDOUT_FILENO)) {
        if (seconds - t->shown < 0.1 && done > 1 && step < steps) return;
        t->shown = seconds;
        printf("\r[%-*.*s] step %d/%d  loss %.6f  %.0f tokens/s  %d:%02d left\033[K%s", width,
               (int)((int64_t)width * step / steps), bar, step, steps, loss, speed, left / 60,
               left % 60, step == steps ? "\n" : "");
        fflush(stdout);
    } else if (done <= 3 || step == steps || step % ((steps + 9) / 10) == 0) {
        printf("step %*d/%d  loss %.6f  grad norm %.4f  %.0f tokens/s\n", steps < 1000 ? 3 : 5,
               step, steps, loss, norm, speed);
        fflush(stdout);
    }
}

/* Next byte from logits (V): the TOP_K likeliest ones, sharpened, chosen by u in (0, 1) */
static int choose(const float *logits, int vocab, double u) {
    int best[TOP_K] = {0}, count = 0;
    for (int v = 0; v < vocab; v++) { // insertion into a short sorted list
        int at = count < TOP_K ? count++ : TOP_K;
        for (; at > 0 && logits[v] > logits[best[at - 1]]; at--) {
            if (at < TOP_K) best[at] = best[at - 1];
        }
        if (at < TOP_K) best[at] = v;
    }
    double weight[TOP_K], total = 0.0;
    for (int i = 0; i < count; i++) {
        weight[i] = exp(((double)logits[best[i]] - (double)logits[best[0]]) / TEMPERATURE);
        total += weight[i];
    }
    u *= total;
    int i = 0;
    while (i < count - 1 && u >= weight[i]) u -= weight[i++];
    return best[i];
}

static void show_byte(int byte) {
    const int printable = byte == '\n' || byte == '\t' || (byte >= ' ' && byte < 127);
    putchar(printable ? byte : '?');
}

static void show_memory_row(const char *name, int64_t predicted, int64_t measured,
                            int64_t unsharded) {
    char a[32], b[32], c[32];
    if (!predicted && !measured && !unsharded) return;
    printf("  %-22s %14s %14s %14s\n", name, commas(a, predicted), commas(b, measured),
           unsharded ? commas(c, unsharded) : "-");
}

/* Returns the bytes of AdamW's moments on this rank. */
static int64_t moments_bytes(const trainer *t) {
    int64_t nbytes = 0;
    for (int i = 0; i < fsdp_num_params(t->model); i++) {
        fsdp_optim_state state;
        if (fsdp_adamw_state(t->adamw, i, &state)) return -1;
        nbytes += 2 * state.numel * (int64_t)fsdp_dtype_size(state.dtype);
    }
    return nbytes;
}

/* Prints the memory of rank 0, whose shards are never short. Shards of other ranks are padded to
   the same size. */
static fsdp_status show_memory(const trainer *t) {
    fsdp_memory used;
    fsdp_status status = fsdp_model_memory(t->model, &used);
    if (status) return status;
    const int64_t whole = model_bytes(t, 0), moments = moments_bytes(t);
    const int64_t mine = t->tp > 1 ? moments / 2 : model_bytes(t, 1) / t->num_ranks;
    const fsdp_memory *p = &t->predicted;
    char text[32];
    printf("\nmemory per rank, bytes      predicted       measured      unsharded\n");
    for (int pool = 0; pool < FSDP_POOL_COUNT; pool++) {
        const int is_whole = pool == FSDP_POOL_SHARD || pool == FSDP_POOL_SHARD_GRAD;
        show_memory_row(fsdp_pool_name(pool), p->pool_bytes[pool], used.pool_bytes[pool],
                        is_whole ? whole : 0);
    }
    for (int pool = FSDP_POOL_COUNT; pool < FSDP_POOL_MAX; pool++) // the pools of extensions
        show_memory_row(fsdp_model_pool_name(t->model, pool), 0, used.pool_bytes[pool], 0);
    const int64_t average = t->ema ? fsdp_ema_nbytes(t->ema) : 0;
    const int64_t mine_of_it = t->ema ? mine : 0, whole_of_it = t->ema ? whole : 0;
    show_memory_row("average of the weights", mine_of_it, average, whole_of_it);
    if (t->muon) { // it also has a pool for its buckets
        show_memory_row("AdamW moments", 0, moments, 0);
        show_memory_row("Muon", 0, fsdp_muon_nbytes(t->muon), 0);
    } else {
        show_memory_row("AdamW moments", 2 * mine, moments, 2 * whole);
        show_memory_row("total", p->total_bytes + 2 * mine + mine_of_it,
                        used.total_bytes + moments + average, 4 * whole + whole_of_it);
    }
    if (t->muon) {
        char how[320];
        (void)fsdp_muon_describe(t->muon, how, sizeof how);
        printf("  %s\n", how);
    }
    printf("  and %s bytes of activations for %d sequences of %d bytes\n",
           commas(text, (int64_t)t->acts.nbytes), t->cfg.batch, t->cfg.context);
    return FSDP_OK;
}

static void show_traffic_row(const char *name, uint64_t measured, int64_t formula) {
    char a[32], b[32];
    printf("  %-22s %14s %14s\n", name, commas(a, (int64_t)measured), commas(b, formula));
}

static void show_traffic_of_tp(const fsdp_counters *c) {
    char text[32];
    printf("\nbytes received per rank, for parameters, gradients and activations\n");
    printf("  all_gather     %16s\n", commas(text, (int64_t)c->bytes[FSDP_OP_ALL_GATHER]));
    printf("  reduce_scatter %16s\n", commas(text, (int64_t)c->bytes[FSDP_OP_REDUCE_SCATTER]));
    printf("  all_reduce     %16s\n", commas(text, (int64_t)c->bytes[FSDP_OP_ALL_REDUCE]));
}

/* Bytes that this rank read from others in training, against the formula; the same on all ranks. */
static void show_traffic(const trainer *t, const fsdp_counters *c) {
    const int64_t W = t->num_ranks, steps = t->j->opt.steps - t->first;
    const int64_t gathers = t->j->opt.reshard ? 2 : 1;
    const int64_t embed = embed_bytes(t, 1) / W * (W - 1);
    const int64_t blocks = blocks_bytes(t, 1) / W * (W - 1);
    if (t->tp > 1) {
        show_traffic_of_tp(c);
        return;
    }
    printf("\nbytes received per rank      measured        formula\n");
    show_traffic_row("all_gather", c->bytes[FSDP_OP_ALL_GATHER],
                     steps * (embed + gathers * blocks) / (t->j->opt.bf16 ? 2 : 1));
    show_traffic_row("reduce_scatter", c->bytes[FSDP_OP_REDUCE_SCATTER], steps * (embed + blocks));
    printf("  formula per step: (W-1)/W of the parameters, gathered once (embed) and %s "
           "(blocks),\n"
           "  reduced once\n",
           gathers == 2 ? "twice" : "once");
    if (t->j->opt.plan) printf("  that is by calls: a plan gathers less often\n");
}

#ifdef FSDP_PLAN_H
/* Once: what the plan saves, and its text. */
static fsdp_status show_plan(const trainer *t) {
    fsdp_plan_report r;
    char a[32], b[32];
    const char *path = t->j->opt.plan_out;
    fsdp_status status = fsdp_plan_report_get(t->plan, 0, &r);
    if (status) return status;
    printf("plan: gathers %d -> %d, reductions %d -> %d, slots of %s -> %s bytes\n", r.gathers[0],
           r.gathers[1], r.reductions[0], r.reductions[1], commas(a, r.bytes[0]),
           commas(b, r.bytes[1]));
    if (!path) return FSDP_OK;
    const size_t length = fsdp_plan_text(t->plan, 0, FSDP_PLAN_TEXT_OPS, NULL, 0);
    char *text = (char *)malloc(length + 1);
    FILE *file = fopen(path, "w");
    int failed = !text || !file;
    if (!failed) {
        fsdp_plan_text(t->plan, 0, FSDP_PLAN_TEXT_OPS, text, length + 1);
        failed = fwrite(text, 1, length, file) != length;
    }
    if (file) failed |= fclose(file) != 0;
    free(text);
    if (!failed) return FSDP_OK;
    fprintf(stderr, PROGRAM ": --plan-out %s: could not be written\n", path);
    return FSDP_ERR_IO;
}

static fsdp_status look_at_plan(const trainer *t, int step) {
    fsdp_plan_report r;
    const int done = step - t->first;
    if (!t->plan || t->rank != 0 || (done != 3 && step != t->j->opt.steps)) return FSDP_OK;
    if (isatty(STDOUT_FILENO)) printf("\r\033[K"); // in place of the progress line
    if (!fsdp_plan_count(t->plan)) {
        if (step == t->j->opt.steps) printf("plan: there is none: %s\n", fsdp_plan_why(t->plan));
        return FSDP_OK;
    }
    fsdp_status status = done == 3 ? show_plan(t) : FSDP_OK;
    if (!status) status = fsdp_plan_report_get(t->plan, 0, &r);
    if (!status && step == t->j->opt.steps)
        printf("plan: %llu of %d steps were replayed\n", (unsigned long long)r.replayed, done);
    return status;
}
#endif

/* ---- a rank ---------------------------------------------------------------------------------- */

// Functions that a program defines. open_math allocates the activations, t->acts, and prints a
// failure. build_model sets t->model, if there is one, t->embed, t->blocks, t->adamw, t->predicted.
static fsdp_status open_math(trainer *t);
static void close_math(trainer *t);
static fsdp_status build_model(trainer *t);
// loss: mean over the tokens of all ranks; norm: of the gradient before clipping. Both only need to be there when
// `look` is set.
static fsdp_status train_step(trainer *t, int step, int look, double *loss, double *norm);
// loss: mean over the tokens of all ranks, of the batch that a step would have; nothing else is done.
static fsdp_status batch_loss(trainer *t, int step, double *loss);
// logits(V) that follow the `length` bytes in t->inputs; on rank 0, but all ranks call it.
static fsdp_status next_logits(trainer *t, int length, const float **logits);
#ifdef FSDP_CHECKPOINT_H
// Gives a parameter its name in checkpoints and its place in the whole tensor: desc.place.
static void place_param(void *user, const fsdp_param_view *param, fsdp_checkpoint_place *place);
#include "examples/gpt/gpt_save.h"
#endif
#include "examples/gpt/gpt_plot.h"

static void show_step(trainer *t, int count, int look, double loss, double norm) {
    t->losses[count - 1] = look ? loss : -1.0;
    if (!look) return;
    if (t->csv) {
        // All digits of the norm: whether two runs are equal to the bit can be seen.
        fprintf(t->csv, "%d,%.6f,%.17g,%.6f\n", count, loss, norm, now_seconds() - t->start);
    }
    show_progress(t, count, loss, norm);
}

static fsdp_status train_steps(trainer *t) {
    const options *opt = &t->j->opt;
    fsdp_status status = FSDP_OK;
    t->start = now_seconds();
    for (int step = t->first; step < opt->steps && !status; step++) {
        const int count = step + 1;
        const int look = count - t->first <= 3 || count == opt->steps ||
                         count % opt->log_every == 0;
        double loss = 0.0, norm = 0.0;
        status = train_step(t, step, look, &loss, &norm);
#ifdef FSDP_PLAN_H
        if (!status) status = look_at_plan(t, count);
#endif
        if (!status && t->rank == 0) show_step(t, count, look, loss, norm);
#ifdef FSDP_CHECKPOINT_H
        if (!status) status = save_step(t, count);
#endif
    }
#ifdef FSDP_CHECKPOINT_H
    if (!status) status = save_end(t);
#endif
    return status;
}

/* The loss of batches that no step has had: of the weights, and of their average. */
static fsdp_status show_ema(trainer *t) {
    double loss[2] = {0.0, 0.0};
    fsdp_status status = FSDP_OK;
    if (!t->ema) return FSDP_OK;
    for (int average = 0; average < 2 && !status; average++) {
        for (int i = 0; i < EMA_BATCHES && !status; i++) {
            double one = 0.0;
            status = batch_loss(t, t->j->opt.steps + i, &one);
            loss[average] += one / EMA_BATCHES;
        }
        if (!status) status = fsdp_ema_swap(t->ema); // to the average, and back
    }
    if (!status && t->rank == 0)
        printf("ema    decay %g: loss %.6f of the weights, %.6f of their average, over %d batches\n",
               t->j->opt.ema, loss[0], loss[1], (int)EMA_BATCHES);
    return status;
}

/* Continues a few bytes of the text. */
static fsdp_status show_sample(trainer *t) {
    const job *j = t->j;
    const int context = t->cfg.context, count = j->opt.sample;
    uint8_t *window = t->inputs; // the last bytes, at most context
    int length = context < PROMPT ? context : PROMPT;
    fsdp_status status = FSDP_OK;
    if (count == 0) return FSDP_OK;
    const uint64_t from = random_bits(j->opt.seed, STREAM_PROMPT, 0, 0);
    memcpy(window, j->text + from % (j->text_nbytes - (size_t)length), (size_t)length);
    if (t->rank == 0) {
        printf("\nsample: %d bytes of the text, continued by %d\n", length, count);
        for (int i = 0; i < length; i++) show_byte(window[i]);
        printf("|");
    }
    for (int i = 0; i < count && !status; i++) {
        const float *logits = NULL;
        status = next_logits(t, length, &logits);
        if (t->rank != 0 || status)
            continue; // the length does not matter where nothing is computed
        const uint64_t bits = random_bits(j->opt.seed, STREAM_SAMPLE, 0, (uint64_t)i);
        const int byte = choose(logits, t->cfg.vocab, uniform(bits));
        show_byte(byte);
        if (length == context) memmove(window, window + 1, (size_t)--length);
        window[length++] = (uint8_t)byte;
    }
    if (t->rank == 0) printf("\n");
    return status;
}

#ifdef FSDP_TRACE_H
/* Prints where the time of the traced steps went. All ranks must have written their files. */
static fsdp_status show_trace(const trainer *t) {
    const char *dir = t->j->opt.trace_dir;
    char text[8192];
    fsdp_trace *trace = (fsdp_trace *)fsdp_find_extension(t->model, "trace");
    if (!trace && t->rank == 0) printf("\nthere is no trace of this run in %s\n", dir);
    if (!trace) return FSDP_OK; // on no rank
    fsdp_status status = fsdp_trace_stop(trace);
    const fsdp_status met = fsdp_barrier(t->world); // also if this rank alone could not write
    if (status || met || t->rank != 0) return status ? status : met;
    status = fsdp_trace_report(dir, text, sizeof text);
    printf("\n%s%s", text, status ? "\n" : "");
    if (!status) printf("fsdptrace why %s tells, too, what would help\n", dir);
    return FSDP_OK;
}
#endif

/* Host memory of this rank and the csv; what fsdp.h made ends with the world. */
static fsdp_status open_rank(trainer *t) {
    const options *opt = &t->j->opt;
    const size_t tokens = (size_t)t->cfg.batch * (size_t)t->cfg.context;
    t->blocks = (fsdp_unit **)calloc((size_t)t->cfg.layers, sizeof(fsdp_unit *));
    t->inputs = (uint8_t *)malloc(tokens);
    t->targets = (int16_t *)malloc(tokens * sizeof *t->targets);
    t->losses = (double *)calloc((size_t)opt->steps, sizeof *t->losses);
    if (!t->blocks || !t->inputs || !t->targets || !t->losses) {
        fprintf(stderr, PROGRAM ": rank %d: no memory for the batches\n", t->rank);
        return FSDP_ERR_OUT_OF_MEMORY;
    }
    return open_math(t);
}

/* Opens a new csv, or after a resume the old one without the rows after the checkpoint. */
static fsdp_status open_csv(trainer *t) {
    static const char head[] = "step,loss,grad_norm,seconds\n";
    const char *path = t->j->opt.csv_path;
    char line[256];
    long end;
    int step;
    double loss;
    if (t->rank != 0 || !path) return FSDP_OK;
    t->csv = fopen(path, t->first ? "r+" : "w+");
    if (!t->csv) {
        fprintf(stderr, PROGRAM ": --csv %s: %s\n", path, strerror(errno));
        return FSDP_ERR_IO;
    }
    if (!t->first || !fgets(line, sizeof line, t->csv) || strcmp(line, head) != 0) {
        rewind(t->csv);
        fputs(head, t->csv);
    }
    for (end = ftell(t->csv); fgets(line, sizeof line, t->csv); end = ftell(t->csv)) {
        if (sscanf(line, "%d,%lf", &step, &loss) != 2 || step < 1 || step > t->first) break;
        t->losses[step - 1] = loss;
    }
    (void)fseek(t->csv, end, SEEK_SET);
    if (!fflush(t->csv) && !ftruncate(fileno(t->csv), (off_t)end)) return FSDP_OK;
    fprintf(stderr, PROGRAM ": --csv %s: %s\n", path, strerror(errno));
    return FSDP_ERR_IO;
}

static fsdp_status close_rank(trainer *t, fsdp_status status) {
    int bad = t->csv ? ferror(t->csv) : 0;
    if (t->csv) bad |= fclose(t->csv);
    if (bad && !status) {
        fprintf(stderr, PROGRAM ": --csv %s: could not be written\n", t->j->opt.csv_path);
        status = FSDP_ERR_IO;
    }
    close_math(t);
    free(t->losses);
    free(t->targets);
    free(t->inputs);
    free(t->blocks);
    fflush(stdout);
    return status;
}

/* Runs one rank, and returns its fsdp_status. world: NULL with --plain. */
static int run_rank(fsdp_world *world, void *arg) {
    trainer trainer_of_rank, *t = &trainer_of_rank;
    fsdp_counters counters = FSDP_ZERO;
    memset(t, 0, sizeof *t);
    t->j = (const job *)arg;
    t->world = world;
    t->rank = world ? fsdp_rank(world) : 0;
    t->num_ranks = world ? fsdp_world_size(world) : 1;
    t->cfg = t->j->opt.gpt;
    t->tp = t->j->opt.tp;
    t->dp = t->num_ranks / t->tp;
    t->cfg.batch /= t->dp;
    gpt_embed_specs(&t->cfg, t->embed_specs);
    gpt_block_specs(&t->cfg, t->block_specs);
    fsdp_status status = open_rank(t);
    if (!status) status = build_model(t);
    if (!status && t->rank == 0) show_start(t);
#ifdef FSDP_CHECKPOINT_H
    if (!status) status = open_save(t);
#endif
    if (!status) status = open_csv(t);
    if (!status) status = train_steps(t);
    if (!status && t->model) status = fsdp_model_counters(t->model, &counters);
    if (!status && t->model) status = fsdp_set_grad_enabled(t->model, 0);
    if (!status && t->model) status = show_ema(t);
    if (!status && t->model) status = show_sample(t);
    if (!status && t->model && t->rank == 0) status = show_memory(t);
    if (!status && t->rank == 0) {
        if (t->model) show_traffic(t, &counters);
        show_curve(t);
    }
#ifdef FSDP_TRACE_H
    if (!status && t->model && t->j->opt.trace_dir) status = show_trace(t);
#endif
    return (int)close_rank(t, status);
}

/* ---- the program ----------------------------------------------------------------------------- */

/* 1 if all ranks have read the same text and options. */
static int ranks_agree(fsdp_world *world, const job *j) {
    const gpt_config *g = &j->opt.gpt;
    uint64_t h = splitmix64(j->opt.seed);
    const uint64_t parts[] = {(uint64_t)g->batch,      (uint64_t)g->context,
                              (uint64_t)g->layers,     (uint64_t)g->heads,
                              (uint64_t)g->channels,   (uint64_t)j->opt.steps,
                              j->text_nbytes,          (uint64_t)j->opt.reshard,
                              (uint64_t)j->opt.sample, (uint64_t)(j->opt.lr * 1e12),
                              (uint64_t)j->opt.bf16,   (uint64_t)j->opt.tf32,
                              (uint64_t)j->opt.log_every,
                              (uint64_t)j->opt.plan,   (uint64_t)j->opt.tp,
                              (uint64_t)j->opt.keep,   (uint64_t)j->opt.save_every,
                              (uint64_t)j->opt.resume, (uint64_t)j->opt.async};
    const char *dir = j->opt.save_dir;
    for (size_t i = 0; i < sizeof parts / sizeof *parts; i++) h = splitmix64(h ^ parts[i]);
    for (; dir && *dir; dir++) h = splitmix64(h ^ (uint64_t)*dir);
    for (size_t i = 0; i < j->text_nbytes; i++) h = splitmix64(h ^ j->text[i]);
    const int64_t mine = (int64_t)(h >> 1);
    int64_t most[2] = {mine, -mine}; // largest, and minus the smallest
    const fsdp_status status = fsdp_all_reduce(world, NULL, most, 2, FSDP_I64, FSDP_MAX);
    return status || (most[0] == mine && most[1] == -mine); // a failure shows again in training
}

/* This process is one rank of a job, or the only one. */
static int run_launched(job *j) {
    fsdp_world *world;
    if (fsdp_init(NULL, &world)) return EXIT_FAILED; // the reason has been logged
    int result = EXIT_DONE;
    const int num_ranks = fsdp_world_size(world), tell = fsdp_rank(world) == 0, tp = j->opt.tp;
    if (num_ranks % tp != 0) {
        result = EXIT_IMPOSSIBLE;
        if (tell) impossible("the %d ranks are not a multiple of --tp %d", num_ranks, tp);
    } else if (j->opt.gpt.batch % (num_ranks / tp) != 0) {
        result = EXIT_IMPOSSIBLE;
        if (tell) {
            impossible("--batch %d is not a multiple of the %d ranks%s", j->opt.gpt.batch,
                       num_ranks / tp, tp > 1 ? " that have a batch of their own" : "");
        }
    } else if (!ranks_agree(world, j)) {
        result = EXIT_IMPOSSIBLE;
        if (tell) impossible("the ranks were started with different options or texts");
    } else if (run_rank(world, j)) {
        result = EXIT_FAILED;
    }
    return fsdp_shutdown(world) && !result ? EXIT_FAILED : result;
}

static int run_spawned(job *j) {
    fsdp_spawn_desc desc = FSDP_ZERO;
    desc.num_ranks = j->opt.ranks;
    desc.threads = j->opt.threads;
    return fsdp_spawn(&desc, run_rank, j) ? EXIT_FAILED : EXIT_DONE; // the reason has been logged
}

/* A file that is written by name: fail now rather than after training. */
static int check_file(const char *option, const char *path) {
    const char *rank = getenv("RANK");
    if (!path || (rank && strcmp(rank, "0") != 0)) return EXIT_DONE;
    FILE *file = fopen(path, "a");
    if (!file) return impossible("%s %s: %s", option, path, strerror(errno));
    fclose(file);
    return EXIT_DONE;
}

static int gpt_main(int argc, char **argv) {
    job j;
    int run;
    memset(&j, 0, sizeof j);
    int result = parse_options(argc, argv, &j.opt, &run);
    if (result || !run) return result;
    result = load_text(&j);
    if (!result) result = check_file("--csv", j.opt.csv_path);
    if (!result) result = check_file("--plan-out", j.opt.plan_out);
    if (!result) {
        signal(SIGPIPE, SIG_IGN); // if the reader of the output ends, the training continues
#ifdef GEMM_BLAS
        openblas_set_num_threads(1); // the ranks are the parallelism
#endif
        if (j.opt.plain) result = run_rank(NULL, &j) ? EXIT_FAILED : EXIT_DONE;
        else result = j.opt.ranks > 0 ? run_spawned(&j) : run_launched(&j);
    }
    free(j.text);
    return result;
}

#endif // GPT_HOST_H
