/* llama_host.h - what train_llama.c and train_llama.cu share: options, what is checked before ranks
   start, a rank's training, evaluations, samples, checkpoints and exports, and what is printed

   Include fsdp.h, and define PROGRAM, its name in messages, before it. With LLAMA_ON_GPU define
   llama_gpu_engines, too: f32 and bf16.

   SPDX-License-Identifier: MIT */
#ifndef LLAMA_HOST_H
#define LLAMA_HOST_H

#include "examples/common/program.h"     // EXIT_*, now_seconds, is_started_again
#include "examples/llama/llama_model.h"  // llama_*
#include "examples/llama/llama_data.h"   // llama_data_*
#include "examples/llama/llama_sample.h" // llama_sample
#include "examples/llama/llama_save.h"   // llama_export, llama_save_*

#include <getopt.h> // getopt_long
#include <signal.h> // signal

enum { MAX_PROMPT = 4096 };

typedef struct options {
    const char *model, *data, *mask, *eval_data, *save, *export_dir, *json, *adapter;
    int ranks, steps, batch, micro, context, warmup, loss_rows, accumulate, recompute;
    int save_every, keep, resume, eval_every, fresh, export_dtype, merge, predict, f32;
    int prompt_count;
    llama_lora lora; // rank 0: all parameters are trained
    double lr, min_lr, weight_decay, beta1, beta2, eps, clip;
    uint64_t seed;
    int32_t prompt[MAX_PROMPT];
} options;

typedef struct job {
    options opt;
    llama_config config;
    llama_data data, eval;
    char extra[LLAMA_WHY]; // tensors that the model does not have, or ""
} job;

// In one write: other ranks print, too.
static void print_line(const char *form, va_list args) {
    char text[LLAMA_WHY + 200];
    vsnprintf(text, sizeof text, form, args);
    fprintf(stderr, PROGRAM ": %s\n", text);
}

/* Prints one line on each host: files may be missing on one of them. Returns EXIT_IMPOSSIBLE. */
static int impossible(const char *form, ...) __attribute__((format(printf, 1, 2)));
static int impossible(const char *form, ...) {
    static const char *const ranks[] = {"LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK",
                                        "MPI_LOCALRANKID", "SLURM_LOCALID"};
    va_list args;
    for (int i = 0; i < 4; i++) {
        const char *rank = getenv(ranks[i]);
        if (rank && strcmp(rank, "0") != 0) return EXIT_IMPOSSIBLE;
    }
    va_start(args, form);
    print_line(form, args);
    va_end(args);
    return EXIT_IMPOSSIBLE;
}

/* ---- options --------------------------------------------------------------------------------- */

static const char HELP[] =
    "usage: " PROGRAM " --model DIR [options]\n"
    "Fine-tunes a Llama, Qwen2 or Qwen3 model; each rank holds one part of every parameter.\n"
    "Without --steps it evaluates the files of tokens, continues --sample, or exports, and ends.\n"
    "\n"
    "  --model DIR        of Hugging Face: config.json and safetensors\n"
    "  --data FILE        tokens to learn, in the form of llm.c; tokens.py makes them\n"
    "  --mask FILE        one byte for each token of --data; 0: it is no label\n"
    "  --ranks N          start N ranks on this host (as the launcher's environment says, else 1)\n"
    "  --steps N          training steps\n"
    "  --batch ROWS       of a step, over all ranks and microbatches (8)\n"
    "  --micro ROWS       of a rank at a time (--batch / ranks)\n"
    "  --context T        tokens of a row (256, or as many as the model can)\n"
    "  --lr X             peak learning rate (1e-5, of adapters 2e-4)\n"
    "  --min-lr X         the last one (a tenth of it)\n"
    "  --warmup N         steps until the peak (a tenth of --steps)\n"
    "  --weight-decay X   of matrices; vectors have none (0.1)\n"
    "  --beta1 X --beta2 X --eps X   of AdamW (0.9, 0.95, 1e-8)\n"
    "  --clip X           largest norm of all gradients (1)\n"
    "  --seed N           of the order of rows (1)\n"
    "  --ce-rows N        rows of logits at a time (256)\n"
    "  --accumulate       reduce gradients with the last microbatch only: less traffic, but each\n"
    "                     rank keeps full gradients\n"
    "  --recompute        compute each layer again for its backward: less memory, a third more "
    "time\n"
    "  --lora R           train adapters of rank R, and freeze the model\n"
    "  --alpha A          adapters count A / R times (2 R)\n"
    "  --targets LIST     matrices that get one (q,k,v,o,gate,up,down)\n"
    "  --base D           the frozen model as f32, bf16, f16, q8_0 or q4_1 (as in --model)\n"
    "  --adapter DIR      begin with an adapter of PEFT: its rank, alpha and targets\n"
    "  --eval-data FILE   tokens to evaluate after training\n"
    "  --eval-every N     and after every N steps\n"
    "  --save DIR         save checkpoints below DIR: at the end, and while it trains\n"
    "  --save-every N     after every N steps\n"
    "  --keep K           the newest K stay; 0: all (2)\n"
    "  --resume           go on from the newest complete checkpoint in DIR, if there is one. "
    "Ranks\n"
    "                     may be more or fewer. A launcher that starts the job again does it, too\n"
    "  --export DIR       write the model in the form of --model, or the adapter in that of PEFT\n"
    "  --merge            write the model with the adapter in its matrices\n"
    "  --export-dtype D   file (as in --model), f32, bf16 or f16 (file)\n"
    "  --sample IDS       continue these tokens greedily: numbers with commas\n"
    "  --new N            by N tokens (24)\n"
    "  --predict          print the memory of a rank, and end\n"
    "  --json FILE        write one JSON line for each step, or of --predict; a resume removes "
    "the\n"
    "                     lines of steps that it makes again\n"
#ifdef LLAMA_ON_GPU
    "  --f32              compute with f32 in place of bf16\n"
#endif
    "  --help             this text\n";

static options default_options(void) {
    options o;
    memset(&o, 0, sizeof o);
    o.batch = 8, o.loss_rows = 256, o.keep = 2, o.fresh = 24, o.seed = 1;
    o.lr = o.min_lr = -1.0, o.warmup = -1;
    o.weight_decay = 0.1, o.beta1 = 0.9, o.beta2 = 0.95, o.eps = 1e-8, o.clip = 1.0;
    return o;
}

static int parse_prompt(options *o, const char *text) {
    const char *at = text;
    char *end;
    for (o->prompt_count = 0; o->prompt_count < MAX_PROMPT; at = end + 1) {
        errno = 0;
        const long token = strtol(at, &end, 10);
        if (end == at || errno || token < 0 || token > INT32_MAX || (*end && *end != ',')) break;
        o->prompt[o->prompt_count++] = (int32_t)token;
        if (!*end) return EXIT_DONE;
    }
    return impossible("--sample %s: expected at most %d token numbers with commas, as "
                      "504,3575,282",
                      text, (int)MAX_PROMPT);
}

/* Reads a dtype from `first` on, below `end`. */
static int parse_dtype(const char *option, const char *text, int first, int end, int *out) {
    char names[80] = "";
    for (*out = first; *out < end; ++*out) {
        if (!strcmp(text, llama_dtypes[*out].name)) return EXIT_DONE;
        if (*out > first) strcat(names, *out + 1 < end ? ", " : " or ");
        strcat(names, llama_dtypes[*out].name);
    }
    return impossible("--%s %s: expected %s", option, text, names);
}

typedef struct int_option {
    const char *name;
    int *out, min;
} int_option;
typedef struct real_option {
    const char *name;
    double *out, min, most;
} real_option;
typedef struct text_option {
    const char *name, **out;
} text_option;
typedef struct flag_option {
    const char *name;
    int *out;
} flag_option;

static int parse_int(const int_option *option, const char *text) {
    char *end;
    errno = 0;
    const long value = strtol(text, &end, 10);
    if (end == text || *end || errno || value < option->min || value > 100000000)
        return impossible("--%s %s: expected a whole number from %d to 100000000", option->name,
                          text, option->min);
    *option->out = (int)value;
    return EXIT_DONE;
}

static int parse_real(const real_option *option, const char *text) {
    char *end;
    const double value = strtod(text, &end);
    if (end == text || *end || !(value >= option->min && value < option->most))
        return option->most < HUGE_VAL
                   ? impossible("--%s %s: expected a number from %g, less than %g", option->name,
                                text, option->min, option->most)
                   : impossible("--%s %s: expected a number from %g", option->name, text,
                                option->min);
    *option->out = value;
    return EXIT_DONE;
}

static int parse_seed(options *o, const char *text) {
    char *end;
    errno = 0;
    o->seed = strtoull(text, &end, 10);
    if (text[0] < '0' || text[0] > '9' || *end || errno)
        return impossible("--seed %s: expected a whole number that is not negative", text);
    return EXIT_DONE;
}

/* Returns EXIT_DONE and sets *run to 1 if there is something to do; else the exit status. */
static int parse_options(int argc, char **argv, options *o, int *run) {
    const char *seed = NULL, *sample = NULL, *dtype = NULL, *base = NULL, *targets = NULL;
    int help = 0;
    const int_option ints[] = {
        {"ranks", &o->ranks, 1},       {"steps", &o->steps, 1},
        {"batch", &o->batch, 1},       {"micro", &o->micro, 1},
        {"context", &o->context, 1},   {"warmup", &o->warmup, 0},
        {"ce-rows", &o->loss_rows, 1}, {"save-every", &o->save_every, 1},
        {"keep", &o->keep, 0},         {"eval-every", &o->eval_every, 1},
        {"new", &o->fresh, 1},         {"lora", &o->lora.rank, 1},
    };
    const real_option reals[] = {
        {"lr", &o->lr, 0.0, HUGE_VAL},       {"min-lr", &o->min_lr, 0.0, HUGE_VAL},
        {"beta1", &o->beta1, 0.0, 1.0},      {"beta2", &o->beta2, 0.0, 1.0},
        {"eps", &o->eps, 0.0, HUGE_VAL},     {"weight-decay", &o->weight_decay, 0.0, HUGE_VAL},
        {"clip", &o->clip, 1e-30, HUGE_VAL}, {"alpha", &o->lora.alpha, 1e-30, 1e30},
    };
    const text_option texts[] = {
        {"model", &o->model},     {"data", &o->data},  {"mask", &o->mask},
        {"save", &o->save},       {"json", &o->json},  {"eval-data", &o->eval_data},
        {"seed", &seed},          {"sample", &sample}, {"export", &o->export_dir},
        {"export-dtype", &dtype}, {"base", &base},     {"targets", &targets},
        {"adapter", &o->adapter},
    };
    const flag_option flags[] = {
        {"accumulate", &o->accumulate},
        {"recompute", &o->recompute},
        {"resume", &o->resume},
        {"merge", &o->merge},
        {"predict", &o->predict},
        {"help", &help},
#ifdef LLAMA_ON_GPU
        {"f32", &o->f32},
#endif
    };
    enum { // where each kind begins among all
        REALS = sizeof ints / sizeof *ints,
        TEXTS = REALS + sizeof reals / sizeof *reals,
        FLAGS = TEXTS + sizeof texts / sizeof *texts,
        ALL = FLAGS + sizeof flags / sizeof *flags
    };
    struct option all[ALL + 1];
    int i, result = EXIT_DONE;
    memset(all, 0, sizeof all);
    for (i = 0; i < ALL; i++) {
        all[i].has_arg = i < FLAGS;
        all[i].name = i < REALS   ? ints[i].name
                      : i < TEXTS ? reals[i - REALS].name
                      : i < FLAGS ? texts[i - TEXTS].name
                                  : flags[i - FLAGS].name;
    }
    *o = default_options();
    *run = 0;
    opterr = 0;
    while (!result && (result = getopt_long(argc, argv, ":", all, &i)) != -1) {
        if (result == '?' && optopt)
            return impossible("-%c: expected an option: --help lists them", optopt);
        if (result)
            return impossible("%s: expected %s: --help lists them", argv[optind - 1],
                              result == ':' ? "a value" : "an option");
        if (i < REALS) result = parse_int(&ints[i], optarg);
        else if (i < TEXTS) result = parse_real(&reals[i - REALS], optarg);
        else if (i < FLAGS) *texts[i - TEXTS].out = optarg;
        else *flags[i - FLAGS].out = 1;
    }
    if (result > 0) return result;
    if (help) return fputs(HELP, stdout), EXIT_DONE;
    if (optind < argc) return impossible("%s: expected an option: --help lists them", argv[optind]);
    if ((seed && (result = parse_seed(o, seed)) > 0) ||
        (sample && (result = parse_prompt(o, sample)) > 0) ||
        (dtype && (result = parse_dtype("export-dtype", dtype, LLAMA_DTYPE_FILE, LLAMA_DTYPE_FILES,
                                        &o->export_dtype)) > 0) ||
        (base &&
         (result = parse_dtype("base", base, LLAMA_DTYPE_F32, LLAMA_DTYPES, &o->lora.base)) > 0))
        return result;
    if (targets && llama_targets_read(targets, &o->lora.targets))
        return impossible("--targets %s: expected some of q,k,v,o,gate,up,down", targets);
    *run = 1;
    return EXIT_DONE;
}

/* Returns what a checkpoint of this run carries, before its first step. */
static llama_run run_of(const job *j) {
    const options *o = &j->opt;
    llama_run run;
    memset(&run, 0, sizeof run);
    run.seed = o->seed, run.data = j->data.hash, run.base = llama_dir_hash(o->model);
    run.batch = o->batch, run.context = o->context, run.lora = o->lora;
    return run;
}

/* Checks what the options say of each other. `ranks`: of the whole job. Sets what has no value. */
static int check_options(job *j, int ranks) {
    options *o = &j->opt;
    const llama_config *c = &j->config;
    if (!o->context) o->context = c->context < 256 ? c->context : 256;
    if (o->context > c->context)
        return impossible("--context %d: expected at most max_position_embeddings, %d", o->context,
                          c->context);
    if (!o->micro && (o->batch < ranks || o->batch % ranks))
        return impossible("--batch %d: expected a multiple of %d ranks, such as %d", o->batch,
                          ranks, (o->batch / ranks + 1) * ranks);
    if (!o->micro) o->micro = o->batch / ranks;
    if (o->batch % ((int64_t)ranks * o->micro))
        return impossible("--batch %d: expected a multiple of %d ranks * --micro %d", o->batch,
                          ranks, o->micro);
    if (o->warmup < 0) o->warmup = o->steps / 10;
    if (o->lr < 0.0) o->lr = o->lora.rank ? 2e-4 : 1e-5;
    if (o->min_lr < 0.0) o->min_lr = o->lr / 10;
    const int64_t rows = llama_data_rows(&j->data, o->context);
    if (o->data && rows < ranks)
        return impossible("%s: expected at least a row of --context %d for each of %d ranks, got "
                          "%lld tokens",
                          o->data, o->context, ranks, (long long)j->data.num_tokens);
    if (o->eval_data && llama_data_rows(&j->eval, o->context) < 1)
        return impossible("%s: expected at least one row of --context %d, got %lld tokens",
                          o->eval_data, o->context, (long long)j->eval.num_tokens);
    const llama_run run = run_of(j);
    char why[LLAMA_WHY];
    if (o->save && (o->steps || o->resume) && !o->predict &&
        llama_save_check(o->save, &run, o->resume, why, sizeof why))
        return impossible("--save %s", why);
    return EXIT_DONE;
}

/* Checks the options of adapters, and the files of one. */
static int open_lora(job *j) {
    options *o = &j->opt;
    llama_lora *lora = &o->lora;
    fsdp_checkpoint_reader *files;
    char why[LLAMA_WHY];
    const int given = lora->alpha > 0.0 || lora->targets;
    if (o->adapter && (lora->rank || given))
        return impossible("--adapter: its adapter_config.json has rank, alpha and targets: leave "
                          "out --lora, --alpha and --targets");
    if (!o->adapter && !lora->rank && (given || lora->base || o->merge))
        return impossible("--%s: expected --lora or --adapter, too", lora->alpha > 0.0 ? "alpha"
                                                                     : lora->targets   ? "targets"
                                                                     : lora->base      ? "base"
                                                                                       : "merge");
    if (o->adapter && llama_adapter_read(o->adapter, lora, why, sizeof why))
        return impossible("%s", why);
    if (!lora->rank) return EXIT_DONE;
    if (!lora->targets) lora->targets = LLAMA_ALL_TARGETS;
    if (!(lora->alpha > 0.0)) lora->alpha = 2.0 * lora->rank;
    lora->seed = o->seed;
    if (o->merge && !o->export_dir) return impossible("--merge: expected --export, too");
    if (o->merge && llama_dtypes[lora->base].block_bytes)
        return impossible("--merge over --base %s: the adapter belongs to rounded matrices: export "
                          "it alone",
                          llama_dtypes[lora->base].name);
    if (!o->merge && o->export_dtype)
        return impossible("--export-dtype: an adapter is written as f32: leave it out, or add "
                          "--merge");
    if (llama_lora_check(&j->config, lora, why, sizeof why) ||
        (o->adapter && llama_adapter_open(o->adapter, &j->config, lora, &files, why, sizeof why)))
        return impossible("%s", why);
    if (o->adapter) fsdp_checkpoint_close(files);
    return EXIT_DONE;
}

/* Reads and checks everything but the weights' values, before ranks start. */
static int open_job(job *j) {
    options *o = &j->opt;
    const char *launched = getenv("WORLD_SIZE");
    fsdp_checkpoint_reader *files;
    char why[LLAMA_WHY];
    if (!o->model) return impossible("--model: expected a directory of Hugging Face, got none");
    if (o->ranks && launched && strcmp(launched, "1"))
        return impossible("--ranks %d inside a launcher's job of WORLD_SIZE=%s: leave it out",
                          o->ranks, launched);
    if (o->steps && !o->data) return impossible("--steps: expected --data, too");
    if (o->mask && !o->data) return impossible("--mask: expected --data, too");
    if (!o->save && (o->save_every || o->resume))
        return impossible("%s: expected --save, too", o->resume ? "--resume" : "--save-every");
    if (o->eval_every && !o->eval_data)
        return impossible("--eval-every: expected --eval-data, too");
    if (!o->data && !o->eval_data && !o->prompt_count && !o->export_dir && !o->predict)
        return impossible("nothing to do: expected --data, --eval-data, --sample, --export or "
                          "--predict");
    o->resume |= o->save && is_started_again();
    if (llama_config_read(o->model, &j->config, why, sizeof why)) return impossible("%s", why);
#ifdef LLAMA_ON_GPU
    if (j->config.head_dim > LLAMA_CUDA_HEAD)
        return impossible("%s/config.json: head_dim: expected at most %d, got %d", o->model,
                          (int)LLAMA_CUDA_HEAD, j->config.head_dim);
#endif
    if (llama_files_open(o->model, &j->config, &files, why, j->extra, sizeof why))
        return impossible("%s", why);
    fsdp_checkpoint_close(files);
    if (open_lora(j)) return EXIT_IMPOSSIBLE;
    if (o->data && llama_data_open(&j->data, o->data, o->mask, j->config.vocab, why, sizeof why))
        return impossible("%s %s", o->mask ? "--data and --mask:" : "--data", why);
    if (o->eval_data &&
        llama_data_open(&j->eval, o->eval_data, NULL, j->config.vocab, why, sizeof why))
        return impossible("--eval-data %s", why);
    if (o->export_dir && llama_export_check(o->export_dir, why, sizeof why))
        return impossible("%s", why);
#ifdef LLAMA_ON_GPU
    if (o->lora.rank || o->prompt_count)
        return impossible("--%s: expected training in full: train_llama does it",
                          o->prompt_count ? "sample"
                          : o->adapter    ? "adapter"
                                          : "lora");
#endif
    FILE *json = o->json ? fopen(o->json, "a") : NULL;
    if (o->json && !json) return impossible("--json %s: %s", o->json, strerror(errno));
    if (json) fclose(json);
    return o->ranks ? check_options(j, o->ranks) : EXIT_DONE;
}

/* ---- a rank ---------------------------------------------------------------------------------- */

typedef struct trainer {
    const options *opt;
    const job *j;
    fsdp_world *world;
    int rank, ranks, micros;
    llama_model m;
    fsdp_adamw *adamw;
    llama_run run; // what checkpoints carry
    fsdp_checkpoint *ck;
    int32_t *tokens, *labels; // of all microbatches of this rank in a step
    int *rows;                // [micros]
    fsdp_memory predicted;
    int64_t merge_bytes; // of --merge, more than those
    FILE *json;          // rank 0
} trainer;

static int decay_group(void *user, const fsdp_param_view *param) {
    (void)user;
    return param->ndim < 2;
}

/* Returns the learning rate of a step: linear warm-up, then half a cosine. */
static double learning_rate(const options *o, int step) {
    if (step < o->warmup) return o->lr * (step + 1) / (double)o->warmup;
    const double done = (double)(step - o->warmup) / (double)(o->steps - o->warmup);
    return o->min_lr + (o->lr - o->min_lr) * 0.5 * (1.0 + cos(3.141592653589793 * done));
}

/* Reads rows of data into microbatch b: those at place first + rank, first + rank + ranks, ...,
   below `end`; in the order of the file, or mixed by --seed. Returns their number. */
static int read_rows(trainer *t, const llama_data *data, int b, int64_t first, int64_t end,
                     int mixed) {
    const int T = t->opt->context;
    const int64_t rows = llama_data_rows(data, T);
    int count = 0;
    for (int64_t at = first + t->rank; at < end && count < t->opt->micro; at += t->ranks, count++) {
        const ptrdiff_t to = ((ptrdiff_t)b * t->opt->micro + count) * T;
        llama_data_row(data, mixed ? llama_data_pick(rows, t->opt->seed, at) : at, T,
                       t->tokens + to, t->labels + to);
    }
    return count;
}

/* Computes the mean loss of all rows of data. Collective. */
static fsdp_status evaluate(trainer *t, const llama_data *data, double *loss, int64_t *counted) {
    const int64_t rows = llama_data_rows(data, t->opt->context);
    const int64_t each = (int64_t)t->ranks * t->opt->micro;
    double sum = 0.0;
    int failed = 0;
    *counted = 0;
    fsdp_status status = fsdp_set_grad_enabled(t->m.model, 0);
    for (int64_t first = 0; first < rows && !status && !failed; first += each) {
        const int64_t end = first + each < rows ? first + each : rows;
        const int count = read_rows(t, data, 0, first, end, 0);
        *counted += llama_counted(t->labels, count * t->opt->context);
        sum += llama_model_pass(&t->m, t->tokens, t->labels, count, 0.0, NULL, &failed);
    }
    if (failed) status = FSDP_ERR_ABORTED;
    if (!status) status = fsdp_all_reduce(t->world, NULL, &sum, 1, FSDP_F64, FSDP_SUM);
    if (!status) status = fsdp_all_reduce(t->world, NULL, counted, 1, FSDP_I64, FSDP_SUM);
    *loss = *counted ? sum / (double)*counted : 0.0;
    return status ? status : fsdp_set_grad_enabled(t->m.model, 1);
}

static fsdp_status show_evaluation(trainer *t, const llama_data *data, const char *path, int step) {
    double loss;
    int64_t counted;
    const fsdp_status status = evaluate(t, data, &loss, &counted);
    if (status || t->rank) return status;
    printf("eval    %s: loss %.7f of %lld tokens\n", path, loss, (long long)counted);
    if (t->json)
        fprintf(t->json, "{\"step\": %d, \"eval_loss\": %.9g, \"tokens\": %lld}\n", step, loss,
                (long long)counted);
    fflush(stdout);
    return FSDP_OK;
}

static void show_step(trainer *t, int step, const llama_step_result *r, double seconds) {
    const options *o = t->opt;
    const double lr = learning_rate(o, step);
    if (t->rank) return;
    printf("step    %d/%d  loss %.6f  norm %.4f  lr %.3g  %lld tokens  %.0f tokens/s  %.0f ms\n",
           step + 1, o->steps, r->loss, r->norm, lr, (long long)r->counted,
           (double)o->batch * o->context / seconds, 1e3 * seconds);
    fflush(stdout);
    if (!t->json) return;
    fprintf(t->json,
            "{\"step\": %d, \"loss\": %.9g, \"norm\": %.9g, \"lr\": %.9g, \"tokens\": %lld, "
            "\"seconds\": %.6g}\n",
            step + 1, r->loss, r->norm, lr, (long long)r->counted, seconds);
    fflush(t->json);
}

/* Prints a line on the first rank. Returns EXIT_FAILED. */
static int failure(const trainer *t, const char *form, ...) __attribute__((format(printf, 2, 3)));
static int failure(const trainer *t, const char *form, ...) {
    va_list args;
    if (t->rank) return EXIT_FAILED;
    va_start(args, form);
    print_line(form, args);
    va_end(args);
    return EXIT_FAILED;
}

/* The same for what may have failed on one rank only: each rank says what it knows. */
static int rank_failure(const trainer *t, const char *why) {
    fprintf(stderr, PROGRAM ": rank %d: %s\n", t->rank, why);
    return EXIT_FAILED;
}

/* Trains from the step of the resume, or from the first one. */
static int train(trainer *t) {
    const options *o = t->opt;
    const llama_batch batch = {t->tokens, t->labels, t->rows, t->micros};
    char why[LLAMA_WHY];
    for (int step = (int)t->run.step; step < o->steps; step++) {
        const double begin = now_seconds();
        const int64_t each = (int64_t)t->ranks * o->micro, first = (int64_t)step * o->batch;
        llama_step_result result;
        for (int b = 0; b < t->micros; b++) {
            t->rows[b] = read_rows(t, &t->j->data, b, first + b * each, first + (b + 1) * each, 1);
        }
        const fsdp_status status = llama_step(&t->m, t->adamw, &batch, o->accumulate,
                                              learning_rate(o, step), o->clip, &result);
        if (status && !result.counted)
            return failure(t, "step %d: expected a counted label, got none: look at --mask",
                           step + 1);
        if (status) return failure(t, "step %d: %s", step + 1, fsdp_last_error(t->world));
        show_step(t, step, &result, now_seconds() - begin);
        const int is_last = step + 1 == o->steps;
        if (o->eval_data && (is_last || (o->eval_every && (step + 1) % o->eval_every == 0)) &&
            show_evaluation(t, &t->j->eval, o->eval_data, step + 1))
            return failure(t, "--eval-data: %s", fsdp_last_error(t->world));
        t->run.step = step + 1;
        if (!o->save || !(is_last || (o->save_every && (step + 1) % o->save_every == 0))) continue;
        if (llama_checkpoint_save(&t->m, t->ck, o->save, &t->run, why, sizeof why)) {
            // a disk that is full ends no training before its last step: the files before stay
            (void)failure(t, "--save: %s", why);
            if (is_last || fsdp_barrier(t->world)) return EXIT_FAILED;
        }
    }
    return EXIT_DONE;
}

static int show_sample(trainer *t) {
    const options *o = t->opt;
    char why[LLAMA_WHY];
    int32_t *out = (int32_t *)malloc((size_t)o->fresh * sizeof *out);
    const int count = !out ? -1
                           : llama_sample(&t->m, o->prompt, o->prompt_count, out, o->fresh, why,
                                          sizeof why);
    if (!t->rank && count >= 0) {
        printf("sample  ");
        for (int i = 0; i < count; i++) printf(i ? ",%d" : "%d", out[i]);
        printf("\n");
        fflush(stdout);
    }
    free(out);
    return count >= 0 ? EXIT_DONE : failure(t, "--sample: %s", out ? why : "no memory");
}

static void show_lora(const llama_lora *lora, const llama_config *c) {
    char text[LLAMA_LORA_TEXT];
    int whole = 0;
    printf("lora    %s\n", llama_lora_text(lora, text));
    for (int i = 0; i < LLAMA_MATRICES && llama_dtypes[lora->base].block_bytes; i++) {
        int columns;
        (void)llama_matrix_size(c, i, &columns);
        whole += columns % LLAMA_BLOCK != 0;
    }
    if (llama_dtypes[lora->base].block_bytes)
        printf("        embeddings, norms, biases and %d of %d matrices of a layer stay as in the "
               "files\n",
               whole, (int)LLAMA_MATRICES);
}

static long long adamw_bytes(const trainer *t) {
    return 2 * (long long)t->predicted.pool_bytes[FSDP_POOL_SHARD_GRAD];
}

static void show_start(const trainer *t) {
    const llama_config *c = &t->m.c;
    int64_t all = 0, adapters = 0;
    for (int i = 0; i < llama_num_units(c); i++) {
        llama_unit u;
        llama_unit_of(c, &t->opt->lora, i, &u);
        for (int p = 0; p < u.num; p++) {
            const int64_t n = u.p[p].shape[0] * (u.p[p].ndim > 1 ? u.p[p].shape[1] : 1);
            all += n;
            adapters += llama_is_adapter((int)(uintptr_t)u.p[p].user) ? n : 0;
        }
    }
    if (t->rank) return;
    if (t->j->extra[0]) fprintf(stderr, PROGRAM ": %s\n", t->j->extra);
    printf("model   %lld parameters, %lld trained: %d layers, width %d, %d heads, %d of keys, %d "
           "tokens%s\n",
           (long long)all, (long long)(t->m.frozen ? adapters : all), c->layers, c->hidden,
           c->heads, c->kv_heads, c->vocab, c->tied ? ", tied" : "");
    if (t->m.frozen) show_lora(&t->m.lora, c);
    printf("ranks   %d, each with %d microbatches of %d rows of %d tokens in a step\n", t->ranks,
           t->micros, t->opt->micro, t->opt->context);
    printf("memory  of a rank: %lld bytes of the model, %lld of AdamW, %zu of activations\n",
           (long long)t->predicted.total_bytes, adamw_bytes(t), t->m.acts.nbytes);
    if (t->opt->merge)
        printf("        --merge: %lld more, of the merged model and whole adapters\n",
               (long long)t->merge_bytes);
    fflush(stdout);
}

/* Opens the files of the model and of an adapter, and allocates the tokens of a step. Returns
   EXIT_DONE, or EXIT_FAILED on every rank after a line. */
static int open_files(trainer *t, fsdp_checkpoint_reader **files,
                      fsdp_checkpoint_reader **adapter) {
    const options *o = t->opt;
    // a prediction reads none
    const size_t tokens = o->predict ? 1
                                     : (size_t)t->micros * (size_t)o->micro * (size_t)o->context;
    char why[LLAMA_WHY], extra[LLAMA_WHY];
    *files = *adapter = NULL;
    t->tokens = (int32_t *)malloc(tokens * sizeof *t->tokens);
    t->labels = (int32_t *)malloc(tokens * sizeof *t->labels);
    t->rows = (int *)calloc((size_t)t->micros, sizeof *t->rows);
    int32_t failed = !t->tokens || !t->labels || !t->rows;
    snprintf(why, sizeof why, "%s", failed ? "no memory for the tokens of a step" : "");
    failed = failed || llama_files_open(o->model, &t->m.c, files, why, extra, sizeof why) ||
             (o->adapter &&
              llama_adapter_open(o->adapter, &t->m.c, &o->lora, adapter, why, sizeof why));
    // a rank that fails alone must not leave the others in a collective
    if (fsdp_all_reduce(t->world, NULL, &failed, 1, FSDP_I32, FSDP_MAX) || failed)
        return rank_failure(t, why[0] ? why : "another rank has failed");
    return EXIT_DONE;
}

/* Makes the model of open files, and unless it is predicted only, loads it. */
static int open_model(trainer *t, fsdp_checkpoint_reader *files, fsdp_checkpoint_reader *adapter) {
    const options *o = t->opt;
    const llama_config config = t->m.c;
    fsdp_adamw_desc adamw = fsdp_adamw_defaults();
    llama_acts_desc acts;
    char why[LLAMA_WHY];
    memset(&acts, 0, sizeof acts);
    acts.rows = o->micro, acts.context = o->context, acts.loss_rows = o->loss_rows;
    acts.recompute = o->recompute;
#ifdef LLAMA_ON_GPU
    acts.engine = &llama_gpu_engines[!o->f32];
#endif
    if (llama_model_create(&t->m, t->world, &config, o->lora.rank ? &o->lora : NULL, files, &acts,
                           why, sizeof why))
        return rank_failure(t, why);
    if (llama_model_predict(&t->m, t->micros, o->accumulate, &t->predicted))
        return failure(t, "%s", fsdp_last_error(t->world));
    if (o->merge &&
        llama_merge_predict(&t->m, files, o->export_dtype, &t->merge_bytes, why, sizeof why))
        return rank_failure(t, why);
    show_start(t);
    if (o->predict) return EXIT_DONE;
    if (llama_model_load(&t->m, files, adapter, why, sizeof why)) return rank_failure(t, why);
    adamw.beta1 = o->beta1, adamw.beta2 = o->beta2, adamw.eps = o->eps;
    adamw.weight_decay = o->weight_decay;
    adamw.num_groups = 2, adamw.groups[1].weight_decay = 0.0, adamw.group = decay_group;
    if (o->steps && fsdp_adamw_create(t->m.model, &adamw, &t->adamw))
        return failure(t, "%s", fsdp_last_error(t->world));
    return EXIT_DONE;
}

/* Makes all that a rank has. Returns EXIT_DONE, or EXIT_FAILED after a line. */
static int open_rank(trainer *t) {
    fsdp_checkpoint_reader *files, *adapter;
    int result = open_files(t, &files, &adapter);
    if (!result) result = open_model(t, files, adapter);
    fsdp_checkpoint_close(files), fsdp_checkpoint_close(adapter);
    return result;
}

/* Cuts off the last lines of a file of --json: those of steps after `step`, which the resumed run
   makes again, and a line without an end. Steps rise within a run, so that lines of an earlier run
   stay. Returns 0; -1: errno says why. */
static int drop_lines(FILE *json, const char *path, int64_t step) {
    FILE *f = fopen(path, "r");
    char line[300];
    long at = 0, cut = -1; // where what goes begins; -1: nothing does
    long long before = 0, n = 0;
    if (!f) return -1;
    for (; fgets(line, sizeof line, f); at = ftell(f), before = n) {
        const int is_cut = !strchr(line, '\n') && feof(f);
        const int goes = !is_cut && sscanf(line, "{\"step\": %lld,", &n) == 1 && n > step;
        if (!is_cut && !goes) cut = -1;
        else if (cut < 0 || (goes && n < before)) cut = at;
    }
    fclose(f);
    return cut < 0 ? 0 : ftruncate(fileno(json), cut);
}

/* Makes the checkpoints' object, which an export needs, too, and resumes. Before, all ranks must
   have the run of rank 0: the files of another host may be others. */
static int open_save(trainer *t) {
    const options *o = t->opt;
    char why[LLAMA_WHY] = "another rank has other files or options";
    llama_run first;
    t->run = first = run_of(t->j);
    if (fsdp_broadcast(t->world, NULL, &first, sizeof first, 0))
        return failure(t, "%s", fsdp_last_error(t->world));
    int32_t differs = llama_run_check("other than rank 0", &first, &t->run, why, sizeof why) != 0;
    if (fsdp_all_reduce(t->world, NULL, &differs, 1, FSDP_I32, FSDP_MAX) || differs)
        return rank_failure(t, why);
    if (!o->save && !o->export_dir) return EXIT_DONE;
    if (llama_checkpoint_create(&t->m, &t->run, o->keep, &t->ck, why, sizeof why) ||
        (o->resume && llama_checkpoint_resume(&t->m, t->ck, o->save, &t->run, why, sizeof why)))
        return failure(t, "%s", why);
    if (!o->resume || t->rank) return EXIT_DONE;
    printf("resume  %s: %lld steps are done\n", o->save, (long long)t->run.step);
    if (t->run.step >= o->steps && o->steps)
        printf("        none is left: --steps %d counts those, too\n", o->steps);
    if (t->json && drop_lines(t->json, o->json, t->run.step))
        fprintf(stderr, PROGRAM ": --json %s: %s\n", o->json, strerror(errno));
    return EXIT_DONE;
}

/* Writes --export. */
static int export_model(trainer *t) {
    const options *o = t->opt;
    char why[LLAMA_WHY];
    const int failed =
        o->merge
            ? llama_export_merged(&t->m, o->model, o->export_dir, o->export_dtype, why, sizeof why)
        : t->m.frozen
            ? llama_export_adapter(&t->m, t->ck, o->model, o->export_dir, why, sizeof why)
            : llama_export(&t->m, t->ck, o->model, o->export_dir, o->export_dtype, why, sizeof why);
    if (failed) return failure(t, "--export: %s", why);
    if (!t->rank) printf("export  %s\n", o->export_dir);
    return EXIT_DONE;
}

/* Writes the line of --predict --json. */
static void write_prediction(const trainer *t) {
    if (!t->json) return;
    fprintf(t->json,
            "{\"model_bytes\": %lld, \"adamw_bytes\": %lld, \"activation_bytes\": %zu, "
            "\"merge_bytes\": %lld}\n",
            (long long)t->predicted.total_bytes, adamw_bytes(t), t->m.acts.nbytes,
            (long long)t->merge_bytes);
}

/* Does what the options ask for, with an open model. */
static int run_job(trainer *t) {
    const options *o = t->opt;
    int result = open_save(t);
    if (!result && o->steps) result = train(t);
    for (int i = 0; i < 2 && !result && !o->steps; i++) {
        const char *path = i ? o->eval_data : o->data;
        if (path && show_evaluation(t, i ? &t->j->eval : &t->j->data, path, 0))
            result = failure(t, "%s: %s", path, fsdp_last_error(t->world));
    }
    if (!result && o->prompt_count) result = show_sample(t);
    if (!result && o->export_dir) result = export_model(t);
    return result;
}

/* Runs one rank. Returns its exit status. */
static int run_rank(fsdp_world *world, void *arg) {
    trainer *t = (trainer *)calloc(1, sizeof *t);
    if (!t) return EXIT_FAILED;
    t->j = (const job *)arg, t->opt = &t->j->opt, t->world = world;
    t->rank = fsdp_rank(world), t->ranks = fsdp_world_size(world);
    t->micros = t->opt->batch / (t->ranks * t->opt->micro);
    t->m.c = t->j->config;
    int result = open_rank(t);
    if (!result && t->opt->json && !t->rank && !(t->json = fopen(t->opt->json, "a")))
        fprintf(stderr, PROGRAM ": --json %s: %s\n", t->opt->json, strerror(errno));
    if (!result && t->opt->predict) write_prediction(t);
    else if (!result) result = run_job(t);
    if (t->json && fclose(t->json) && !result) result = failure(t, "--json: %s", strerror(errno));
    fflush(stdout);
    llama_model_destroy(&t->m);
    free(t->tokens), free(t->labels), free(t->rows), free(t);
    return result;
}

/* ---- the program ----------------------------------------------------------------------------- */

static int run_ranks(job *j) {
    fsdp_world *world;
    int result;
    if (j->opt.ranks) {
        fsdp_spawn_desc desc = FSDP_ZERO;
        desc.num_ranks = j->opt.ranks;
        return fsdp_spawn(&desc, run_rank, j) ? EXIT_FAILED : EXIT_DONE;
    }
    if (fsdp_init(NULL, &world)) return EXIT_FAILED;   // the reason has been logged
    result = check_options(j, fsdp_world_size(world)); // a launcher need not say how many before
    if (!result) result = run_rank(world, j);
    return fsdp_shutdown(world) && !result ? EXIT_FAILED : result;
}

/* Runs the program. Returns its exit status. */
static int llama_main(int argc, char **argv) {
    static job j;
    int run;
    int result = parse_options(argc, argv, &j.opt, &run);
    if (!result && run) result = open_job(&j);
    if (!result && run) {
        signal(SIGPIPE, SIG_IGN); // if the reader of the output ends, the training continues
#ifdef GEMM_BLAS
        openblas_set_num_threads(1); // the ranks are the parallelism
#endif
        result = run_ranks(&j);
    }
    llama_data_close(&j.data);
    llama_data_close(&j.eval);
    return result;
}

#endif // LLAMA_HOST_H
