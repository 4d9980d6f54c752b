/* gpt_save.h - checkpoints of a training: --save, --save-every, --keep, --resume, --async

   A checkpoint has the parameters, what AdamW keeps, and how far the training is. Batches follow
   from the seed and the number of the step, so that this number is the place in the data, too.
   A run that resumes needs the same text, seed, batch and context; the number of ranks, and how
   many of them cut each block, may differ.

   Included by gpt_host.h. SPDX-License-Identifier: MIT */
#ifndef GPT_SAVE_H
#define GPT_SAVE_H

// trainer.progress: what is saved as one blob
enum { DONE_STEPS, OF_SEED, OF_TEXT, OF_BATCH, OF_CONTEXT, OF_LR, PROGRESS };

static uint64_t text_hash(const job *j) {
    uint64_t h = j->text_nbytes;
    for (size_t i = 0; i < j->text_nbytes; i++) h = splitmix64(h ^ j->text[i]);
    return h;
}

static void make_progress(const trainer *t, int64_t *progress) {
    const options *opt = &t->j->opt;
    progress[DONE_STEPS] = t->first;
    progress[OF_SEED] = (int64_t)opt->seed;
    progress[OF_TEXT] = (int64_t)text_hash(t->j);
    progress[OF_BATCH] = opt->gpt.batch;
    progress[OF_CONTEXT] = opt->gpt.context;
    memcpy(&progress[OF_LR], &opt->lr, sizeof opt->lr);
}

/* Fails if the numbers are those of another training. All ranks have read the same numbers, and
   return the same status. */
static fsdp_status check_progress(const trainer *t, const int64_t *mine, const char *path) {
    static const char *const names[PROGRESS] = {"--steps", "--seed",    "the text",
                                                "--batch", "--context", "--lr"};
    int other = 0;
    for (int i = PROGRESS - 1; i > 0; i--)
        if (t->progress[i] != mine[i]) other = i;
    if (!other && t->progress[DONE_STEPS] <= t->j->opt.steps) return FSDP_OK;
    if (t->rank == 0)
        fprintf(stderr, PROGRAM ": --resume: %s is of a training with another %s%s\n", path,
                other == OF_TEXT ? "text" : names[other],
                other ? "" : ": it has done more steps than that");
    return FSDP_ERR_INVALID_ARG;
}

static void show_resume(const trainer *t, const char *path, double seconds) {
    fsdp_checkpoint_report r = FSDP_ZERO;
    char a[32], b[32];
    if (fsdp_checkpoint_last_report(t->ck, &r)) return;
    printf("resume %s: %s bytes, of which rank 0 has read %s, in %.1f ms; checksums are %s\n", path,
           commas(a, r.total_bytes), commas(b, r.bytes), 1e3 * seconds,
           r.verified ? "right" : "not checked");
    fflush(stdout);
}

/* Behind the optimizer, whose states belong to a checkpoint. */
static fsdp_status open_save(trainer *t) {
    const options *opt = &t->j->opt;
    fsdp_checkpoint_desc desc = FSDP_ZERO;
    fsdp_checkpoint_blob blob = {"progress", t->progress, sizeof t->progress, 0, 0};
    int64_t mine[PROGRESS], step;
    char path[PATH_MAX];
    if (!opt->save_dir || !t->model) return FSDP_OK;
    make_progress(t, t->progress);
    memcpy(mine, t->progress, sizeof mine);
    desc.place = place_param, desc.user = t;
    desc.blobs = &blob, desc.num_blobs = 1;
    desc.keep = opt->keep;
    fsdp_status status = fsdp_checkpoint_create(t->model, &desc, &t->ck);
    if (status) return status;
    status = fsdp_checkpoint_find(t->ck, opt->save_dir, -1, path, sizeof path, &step);
    if (status || !opt->resume) return status; // a directory that cannot be made shows now
    if (step < 0 && t->rank == 0)
        printf("resume nothing: there is no complete checkpoint in %s\n", opt->save_dir);
    if (step < 0) return FSDP_OK;
    const double begin = now_seconds();
    status = fsdp_checkpoint_load(t->ck, path, NULL);
    if (!status) status = check_progress(t, mine, path);
    if (status) return status;
    t->first = (int)t->progress[DONE_STEPS];
    for (int i = 0; i < t->first; i++) t->losses[i] = -1.0;
    if (t->rank == 0) show_resume(t, path, now_seconds() - begin);
    return FSDP_OK;
}

/* A disk that is full, or a file system that fails, ends no training before its last step: the
   checkpoint before stays, and the reason has been logged. */
static fsdp_status save_done(trainer *t, fsdp_status status) {
    fsdp_checkpoint_report r = FSDP_ZERO;
    char text[32];
    const int step = t->saving;
    t->saving = 0;
    if (status && (status != FSDP_ERR_IO || step == t->j->opt.steps)) return status;
    if (t->rank != 0) return FSDP_OK;
    if (isatty(STDOUT_FILENO)) printf("\r\033[K"); // in place of the progress line
    if (status) {
        printf("save   behind step %d: failed, training goes on\n", step);
    } else if (!fsdp_checkpoint_last_report(t->ck, &r)) {
        printf("save   %s/step-%08d: %s bytes, the call blocked %.1f ms", t->j->opt.save_dir, step,
               commas(text, r.total_bytes), 1e3 * t->blocked);
        if (t->j->opt.async) printf(", complete after %.1f ms", 1e-6 * (double)r.total_ns);
        printf("\n");
    }
    fflush(stdout);
    return FSDP_OK;
}

/* Behind each step; `count` of them are done. */
static fsdp_status save_step(trainer *t, int count) {
    const options *opt = &t->j->opt;
    int busy = 0;
    if (!t->ck) return FSDP_OK;
    const int due = count == opt->steps || (opt->save_every && count % opt->save_every == 0);
    fsdp_status status = FSDP_OK;
    if (t->saving) {
        status = due ? fsdp_checkpoint_wait(t->ck) : fsdp_checkpoint_poll(t->ck, &busy);
        if (status || !busy) status = save_done(t, status);
    }
    if (status || !due) return status;
    if (t->csv) fflush(t->csv); // no row of a checkpoint's past is lost
    const double begin = now_seconds();
    t->progress[DONE_STEPS] = count;
    t->saving = count;
    status = opt->async ? fsdp_checkpoint_save_async(t->ck, opt->save_dir, count)
                        : fsdp_checkpoint_save(t->ck, opt->save_dir, count);
    t->blocked = now_seconds() - begin;
    return status || !opt->async ? save_done(t, status) : FSDP_OK;
}

static fsdp_status save_end(trainer *t) {
    return t->saving ? save_done(t, fsdp_checkpoint_wait(t->ck)) : FSDP_OK;
}

#endif // GPT_SAVE_H
