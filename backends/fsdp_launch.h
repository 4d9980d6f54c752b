/* backends/fsdp_launch.h - who am I: rank, size and the job's name from a launcher's environment

   Included by fsdp.h, which it is a part of.

   SPDX-License-Identifier: MIT (full text at the end of fsdp.h) */
#include "../fsdp.h" // declarations; nothing when fsdp.h itself includes this file

#if defined(FSDP_IMPLEMENTATION) && !defined(FSDP_LAUNCH_IMPLEMENTED) && !defined(FSDP_MATH_ONLY)
#define FSDP_LAUNCH_IMPLEMENTED

#ifdef __cplusplus
extern "C" {
#endif

// NULL: not set, or empty.
static const char *fsdpi_env(const char *name) {
    const char *text = name ? getenv(name) : NULL;
    return text && *text ? text : NULL;
}

static fsdp_status fsdpi_env_int(fsdp_world *w, const char *name, int min, int *out, int *found) {
    const char *text = fsdpi_env(name);
    *found = text != NULL;
    if (!*found) return FSDP_OK;
    char *end;
    long value = strtol(text, &end, 10);
    if (*end || value < min || value > 0x7FFFFFFF)
        return fsdpi_fail(w, FSDP_ERR_INVALID_ARG,
                          "environment variable %s is '%s', expected an integer of at least %d",
                          name, text, min);
    *out = (int)value;
    return FSDP_OK;
}

// What launchers set. The first one whose rank and `needs` are set is taken: mpirun's variables
// before those of the srun that started its daemons. Slurm sets rank and size for the script of a
// batch job as well; only a step of srun has a step id.
typedef struct fsdpi_launcher {
    const char *rank, *size, *local, *needs;
    const char *job[4]; // parts of a name that is equal on all ranks and unique on the host
} fsdpi_launcher;

static const fsdpi_launcher *fsdpi_launcher_find(void) {
    static const fsdpi_launcher launchers[] = {
        {"RANK",
         "WORLD_SIZE",
         "LOCAL_RANK",
         "RANK",
         {"MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT"}},
        {"OMPI_COMM_WORLD_RANK",
         "OMPI_COMM_WORLD_SIZE",
         "OMPI_COMM_WORLD_LOCAL_RANK",
         "OMPI_COMM_WORLD_RANK",
         {"PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid", NULL, NULL}},
        {"PMI_RANK",
         "PMI_SIZE",
         "MPI_LOCALRANKID",
         "PMI_RANK",
         {"PMI_JOBID", "MASTER_PORT", "SLURM_JOB_ID", "SLURM_STEP_ID"}},
        {"SLURM_PROCID",
         "SLURM_STEP_NUM_TASKS",
         "SLURM_LOCALID",
         "SLURM_STEP_NUM_TASKS",
         {"SLURM_JOB_ID", "SLURM_STEP_ID", NULL, NULL}},
        {"SLURM_PROCID",
         "SLURM_NTASKS",
         "SLURM_LOCALID",
         "SLURM_STEP_ID",
         {"SLURM_JOB_ID", "SLURM_STEP_ID", NULL, NULL}},
    };
    const size_t count = sizeof launchers / sizeof *launchers;
    for (size_t i = 1; i < count && !fsdpi_env("RANK") && !fsdpi_env("WORLD_SIZE"); i++)
        if (fsdpi_env(launchers[i].rank) && fsdpi_env(launchers[i].needs)) return &launchers[i];
    return &launchers[0];
}

// Rank and size; neither set: a world of one.
static fsdp_status fsdpi_env_ranks(fsdp_world *w, fsdp_world_desc *d) {
    const fsdpi_launcher *l = fsdpi_launcher_find();
    int rank = 0, size = 1, local = 0, has_rank, has_size, has_local;
    fsdp_status status = fsdpi_env_int(w, l->rank, 0, &rank, &has_rank);
    if (!status) status = fsdpi_env_int(w, l->size, 1, &size, &has_size);
    if (!status) status = fsdpi_env_int(w, l->local, 0, &local, &has_local);
    if (status) return status;
    if (has_rank != has_size)
        return fsdpi_fail(w, FSDP_ERR_INVALID_ARG,
                          "environment variable %s is set but %s is not: a launcher sets both",
                          has_rank ? l->rank : l->size, has_rank ? l->size : l->rank);
    if (rank >= size)
        return fsdpi_fail(w, FSDP_ERR_INVALID_ARG,
                          "environment variable %s is %d, but %s is %d: expected less", l->rank,
                          rank, l->size, size);
    d->rank = rank;
    d->world_size = size;
    d->local_rank = has_local ? local : rank;
    return FSDP_OK;
}

// A name that is equal on all ranks of the job and unique on the host.
static fsdp_status fsdpi_job_name(fsdp_world *w, const fsdp_world_desc *d, char *out, size_t cap) {
    const char *job = d->job ? d->job : fsdpi_env("FSDP_JOB_ID");
    const fsdpi_launcher *l = fsdpi_launcher_find();
    int used = 0, parts = 0;
    if (job) used = snprintf(out, cap, "%s", job);
    for (int i = 0; i < 4 && !job; i++) {
        const char *part = fsdpi_env(l->job[i]);
        if (used >= 0 && (size_t)used < cap)
            used += snprintf(out + used, cap - (size_t)used, "%s%s", i ? ":" : "",
                             part ? part : "");
        parts += part && strcmp(l->job[i], "MASTER_ADDR") != 0;
    }
    if (!job && !parts && d->world_size > 1)
        return fsdpi_fail(w, FSDP_ERR_INVALID_ARG,
                          "%d ranks need a common name: start the program with tools/fsdprun, "
                          "torchrun, mpirun or srun, or set MASTER_PORT or FSDP_JOB_ID, or "
                          "fsdp_world_desc.job",
                          d->world_size);
    if (used < 0 || (size_t)used >= cap)
        return fsdpi_fail(w, FSDP_ERR_INVALID_ARG, "the job's name is longer than %u bytes",
                          (unsigned)cap - 1);
    return FSDP_OK;
}

static fsdp_status fsdpi_env_log_level(fsdp_world *w, int *out) {
    static const char *const names[] = {"", "error", "warn", "info", "none"};
    const char *text = getenv("FSDP_LOG_LEVEL");
    *out = FSDP_LOG_WARN;
    if (!text || !*text) return FSDP_OK;
    for (int i = FSDP_LOG_ERROR; i <= FSDP_LOG_NONE; i++)
        if (strcmp(text, names[i]) == 0) {
            *out = i;
            return FSDP_OK;
        }
    return fsdpi_fail(
        w, FSDP_ERR_INVALID_ARG,
        "environment variable FSDP_LOG_LEVEL is '%s', expected error, warn, info or none", text);
}

#ifdef __cplusplus
}
#endif
#endif
