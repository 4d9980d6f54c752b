/* core/launch.h - rank, size, the job's name and the store's address from a launcher's environment

   State: none; the environment is read at each call.
   Callers: world.h (fsdpi_world_env_int) and tools/fsdprun.c (fsdpi_add_restarts).

   A part of fsdp.h. SPDX-License-Identifier: MIT (full text at the end of fsdp.h) */
#ifndef FSDP_H
#include "../../fsdp.h"
#endif
#ifndef FSDPI_CORE_LAUNCH_H
#define FSDPI_CORE_LAUNCH_H

#include "../base/os.h"
#include "../base/text.h"
#include "error.h"
#include "objects.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

// The variables that launchers set. The first launcher whose `rank` and `needs` are set is taken.
// mpirun comes before the srun that started its daemons. Slurm sets rank and size for the script of
// a batch job, too; only a step of srun has a step id. A manager (Flux, Slurm) sets PMI_* to the
// values of its own variables: if they differ, an mpiexec inside its step has set PMI_*.
typedef struct fsdpi_launcher {
    const char *rank, *size, *local, *needs;
    const char *here, *hosts; // number of ranks on this host, of hosts of the job; or NULL
    const char *job[4];       // parts of a name that is equal on all ranks and unique on the host
    int is_manager;
} fsdpi_launcher;

static fsdp_status fsdpi_world_env_int(fsdp_world *w, const char *name, int least, int most,
                                       int *out) {
    char text[FSDPI_TEXT];
    fsdpi_text error = {text, sizeof text, 0};
    fsdp_status status = fsdpi_env_int(name, least, most, out, &error);
    return status ? fsdp_fail(w, status, "%s", text) : FSDP_OK;
}

// clang-format off
static const fsdpi_launcher fsdpi_launchers[] = {
    {"RANK", "WORLD_SIZE", "LOCAL_RANK", "RANK", "LOCAL_WORLD_SIZE", NULL,
        {"MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID", NULL}, 0},
    {"OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE", NULL,
        {"PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid", NULL, NULL}, 0},
    {"MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_LOCAL_RANK",
        "MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_LOCAL_SIZE", NULL,
        {"PMI_JOBID", "MASTER_PORT", "SLURM_JOB_ID", "SLURM_STEP_ID"}, 0},
    {"PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALRANKID", "MPI_LOCALNRANKS", NULL,
        {"PMI_JOBID", "MASTER_PORT", "SLURM_JOB_ID", "SLURM_STEP_ID"}, 0}, // mpiexec: Hydra, Intel
    {"FLUX_TASK_RANK", "FLUX_JOB_SIZE", "FLUX_TASK_LOCAL_ID", "FLUX_TASK_RANK", NULL,
        "FLUX_JOB_NNODES", {"FLUX_JOB_ID", NULL, NULL, NULL}, 1},
    {"SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_STEP_NUM_TASKS", NULL,
        "SLURM_STEP_NUM_NODES", {"SLURM_JOB_ID", "SLURM_STEP_ID", NULL, NULL}, 1},
    {"SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", "SLURM_STEP_ID", NULL,
        "SLURM_NNODES", {"SLURM_JOB_ID", "SLURM_STEP_ID", NULL, NULL}, 1},
    {"PMI_RANK", "PMI_SIZE", "PMI_LOCAL_RANK", "PMI_RANK", "PMI_LOCAL_SIZE", NULL,
        {"PMI_JOBID", "MASTER_PORT", "SLURM_JOB_ID", "SLURM_STEP_ID"}, 0},
};
// clang-format on

static const fsdpi_launcher *const fsdpi_launchers_end =
    fsdpi_launchers + sizeof fsdpi_launchers / sizeof *fsdpi_launchers;

// Returns 1 if the variables `rank` and `size` have the values of the launcher's own variables.
static int fsdpi_launcher_counts(const fsdpi_launcher *l, const char *rank, const char *size) {
    const char *own_rank = fsdpi_env(l->rank), *own_size = fsdpi_env(l->size);
    rank = fsdpi_env(rank), size = fsdpi_env(size);
    return rank && size && own_rank && own_size && strcmp(rank, own_rank) == 0 &&
           strcmp(size, own_size) == 0;
}

static const fsdpi_launcher *fsdpi_launcher_find(void) {
    const fsdpi_launcher *l = fsdpi_launchers + 1;
    for (; l < fsdpi_launchers_end && !fsdpi_env("RANK") && !fsdpi_env("WORLD_SIZE"); l++)
        if (fsdpi_env(l->rank) && fsdpi_env(l->needs) &&
            (!l->is_manager || !fsdpi_env("PMI_RANK") ||
             fsdpi_launcher_counts(l, "PMI_RANK", "PMI_SIZE")))
            return l;
    return fsdpi_launchers;
}

/* Returns the launcher whose variables tell the hosts of ranks: `l`, if its variable `a` or `b` is
   set; otherwise the next launcher with the same rank and size. For example, if a script under srun
   exports RANK and WORLD_SIZE, Slurm's variables tell the hosts. */
static const fsdpi_launcher *fsdpi_launcher_knows(const fsdpi_launcher *l, const char *a,
                                                  const char *b) {
    if (fsdpi_env(a) || fsdpi_env(b)) return l;
    for (const fsdpi_launcher *k = l + 1; k < fsdpi_launchers_end; k++)
        if (fsdpi_env(k->needs) && fsdpi_launcher_counts(k, l->rank, l->size)) return k;
    return l;
}

// Returns the launcher whose variables give the number of hosts.
static const fsdpi_launcher *fsdpi_launcher_of_hosts(void) {
    const fsdpi_launcher *l = fsdpi_launcher_find();
    return fsdpi_launcher_knows(l, l->here, l->hosts);
}

// Returns the positive number in a variable: a job, a step, or a count of ranks; otherwise 0.
static uint64_t fsdpi_env_id(const char *name) {
    const char *text = fsdpi_env(name);
    long value = text ? strtol(text, NULL, 10) : 0;
    return value > 0 ? (uint64_t)value : 0;
}

// Warns if RANK and WORLD_SIZE say that this rank is alone and another launcher says that it is
// not: they may be left from an earlier job.
static void fsdpi_tell_alone(const fsdp_world *w) {
    if (!fsdpi_env("WORLD_SIZE") || fsdpi_env("TORCHELASTIC_RUN_ID") || fsdpi_env("FSDP_JOB_ID"))
        return;
    for (const fsdpi_launcher *l = fsdpi_launchers + 1; l < fsdpi_launchers_end; l++) {
        if (!fsdpi_env(l->rank) || !fsdpi_env(l->needs) || fsdpi_env_id(l->size) < 2) continue;
        fsdp_warn(w,
                  "[E550] fsdp_init: WORLD_SIZE is 1 and %s is %s: RANK and WORLD_SIZE count, so "
                  "that each rank is a world of its own. Unset them, if an earlier job has left "
                  "them",
                  l->size, fsdpi_env(l->size));
        return;
    }
}

// Reads rank and size from the environment. If neither is set, the world has one rank.
static fsdp_status fsdpi_env_ranks(fsdp_world *w, fsdp_world_desc *d) {
    const fsdpi_launcher *l = fsdpi_launcher_find();
    int rank = 0, size = 1, has_rank = fsdpi_env(l->rank) != NULL,
        has_size = fsdpi_env(l->size) != NULL;
    FSDPI_TRY(fsdpi_world_env_int(w, l->rank, 0, 0x7FFFFFFF, &rank));
    FSDPI_TRY(fsdpi_world_env_int(w, l->size, 1, 0x7FFFFFFF, &size));
    int local = rank;
    const char *name = fsdpi_launcher_knows(l, l->local, NULL)->local;
    FSDPI_TRY(fsdpi_world_env_int(w, name, 0, 0x7FFFFFFF, &local));
    if (has_rank != has_size)
        return fsdpi_invalid_arg(
            w, "[E502] environment variable %s is set and %s is not: set both or none",
            has_rank ? l->rank : l->size, has_rank ? l->size : l->rank);
    if (rank >= size)
        return fsdpi_invalid_arg(w, "[E503] variable %s is %d, expected less than %s, which is %d",
                                 l->rank, rank, l->size, size);
    d->rank = rank;
    d->world_size = size;
    d->local_rank = local;
    return FSDP_OK;
}

// Variables that count restarts of a job by a launcher or a manager. Their first letters differ.
static const char *const fsdpi_restart_counts[] = {"TORCHELASTIC_RESTART_COUNT",
                                                   "SLURM_RESTART_COUNT"};

// Adds the restart counts to a job's name, so that a rank that is left from an earlier start does
// not meet the ranks of this one. A count of 0 adds nothing.
static void fsdpi_add_restarts(fsdpi_text *name) {
    for (int i = 0; i < 2; i++) {
        const char *count = fsdpi_env(fsdpi_restart_counts[i]);
        if (count && strcmp(count, "0") != 0)
            fsdpi_text_add(name, ":%c%s", *fsdpi_restart_counts[i], count);
    }
}

// Returns 1 if fsdprun made the name: then the restart counts are part of it already.
static int fsdpi_is_fsdpruns(const char *job) { return strncmp(job, "fsdprun-", 8) == 0; }

// Writes a name that is equal on all ranks of the job and unique on the host. "": the environment
// has none; that is an error only if ranks have to find each other (fsdpi_job_check).
static fsdp_status fsdpi_job_name(fsdp_world *w, const fsdp_world_desc *d, char *out, size_t cap) {
    const char *job = d->job ? d->job : fsdpi_env("FSDP_JOB_ID");
    const fsdpi_launcher *l = fsdpi_launcher_find();
    fsdpi_text name = {out, cap, 0};
    int parts = 0;
    for (int i = 0; i < 4 && !job; i++) {
        const char *part = fsdpi_env(l->job[i]);
        fsdpi_text_add(&name, "%s%s", i ? ":" : "", part ? part : "");
        // Several jobs may share the value of these: a host, an allocation of Slurm, and the steps
        // of Slurm's scripts and shells, which have the highest numbers.
        parts += part && strcmp(l->job[i], "MASTER_ADDR") != 0 &&
                 strcmp(l->job[i], "SLURM_JOB_ID") != 0 &&
                 (strcmp(l->job[i], "SLURM_STEP_ID") != 0 || fsdpi_env_id(l->job[i]) < 0xFFFFFFF0u);
    }
    if (!job && !parts) { // the place where ranks meet names the job as well
        job = d->store ? d->store : fsdpi_env("FSDP_STORE");
        if (job && strcmp(job, "host:") == 0) job = NULL;
    }
    if (job || !parts) { // the launcher's variables do not name the job
        name.used = 0;
        fsdpi_text_add(&name, "%s", job ? job : "");
    }
    if (job ? !fsdpi_is_fsdpruns(job) : parts > 0) fsdpi_add_restarts(&name);
    if (name.used >= cap)
        return fsdpi_invalid_arg(
            w, "[E505] the job's name is longer than %u bytes: shorten FSDP_JOB_ID",
            (unsigned)cap - 1);
    return FSDP_OK;
}

// Returns a variable of another launcher that runs below fsdprun, if fsdprun has named the job;
// otherwise NULL. The ranks of such a launcher have fsdprun's job name, and under mpirun fsdprun's
// numbers, too. fsdprun itself unsets these variables for its ranks.
static const char *fsdpi_launcher_within(const char *job) {
    const fsdpi_launcher *l = fsdpi_launchers + 1;
    if (!fsdpi_is_fsdpruns(job)) return NULL;
    while (l < fsdpi_launchers_end && (l->is_manager || !fsdpi_env(l->local))) l++;
    return l < fsdpi_launchers_end            ? l->local
           : fsdpi_env("TORCHELASTIC_RUN_ID") ? "TORCHELASTIC_RUN_ID"
                                              : NULL;
}

/* Fails if the job's name may not be unique to this world. FSDP_JOB_ID and the launcher's variables
   name all ranks of the launcher. If this world has only some of these ranks, or another order, it
   might meet another world, so the desc must name the job. Ranks that are threads meet in their
   process. */
static fsdp_status fsdpi_job_check(fsdp_world *w, const fsdp_world_desc *d) {
    const fsdpi_launcher *l = fsdpi_launcher_find();
    const char *inner = fsdpi_launcher_within(w->job);
    fsdp_world_desc told = *d;
    if (!*w->job)
        return fsdpi_invalid_arg(
            w,
            "[E504] %d ranks need a common job name, and %s%s gives none: set "
            "FSDP_JOB_ID to a name that no other job on these hosts has, as in "
            "'mpiexec -genv FSDP_JOB_ID NAME ...' of MPICH and Intel MPI. If ranks "
            "are on several hosts, set MASTER_ADDR (the host of rank 0) and "
            "MASTER_PORT instead. fsdprun, torchrun, Open MPI's mpirun and srun give "
            "a name",
            w->size, fsdpi_env(l->rank) ? "the launcher that sets " : "",
            fsdpi_env(l->rank) ? l->rank : "the environment");
    if (d->job || d->threads || !fsdpi_env(l->rank) || !fsdpi_env(l->size)) return FSDP_OK;
    if (inner)
        return fsdpi_invalid_arg(
            w,
            "[E524] FSDP_JOB_ID is '%s', of an fsdprun, and %s is set, by a launcher "
            "that it has started: start the ranks by one of the two alone, or unset "
            "RANK, WORLD_SIZE, FSDP_JOB_ID and FSDP_STORE between them",
            w->job, inner);
    fsdp_status status = fsdpi_env_ranks(w, &told);
    if (status || (told.rank == d->rank && told.world_size == d->world_size)) return status;
    return fsdpi_invalid_arg(
        w,
        "[E523] fsdp_world_desc says rank %d of %d, the launcher says rank %d of %d "
        "(%s, %s): set fsdp_world_desc.job to a name that all ranks of this world "
        "share and no other world has. Over Gloo or NCCL set fsdp_world_desc.store, "
        "too, if this world's rank 0 is not on the host of MASTER_ADDR",
        d->rank, d->world_size, told.rank, told.world_size, l->rank, l->size);
}

// Sets *out to 1 if the launcher's variables show that some of `size` ranks are on other hosts.
static fsdp_status fsdpi_launcher_is_spread(fsdp_world *w, const fsdpi_launcher *l, int size,
                                            int *out) {
    int here = size, hosts = 1;
    FSDPI_TRY(fsdpi_world_env_int(w, l->here, 1, 0x7FFFFFFF, &here));
    FSDPI_TRY(fsdpi_world_env_int(w, l->hosts, 1, 0x7FFFFFFF, &hosts));
    *out = hosts > 1 || here < size;
    return FSDP_OK;
}

enum { FSDPI_STORE_HOSTS = 8 }; // most hosts among which ranks look for rank 0

/* Writes number k of "[01-03,7]", here at *at, with its zeros; sets *at after the bracket. Returns
   how many numbers there are; 0: these are none, or too many. */
static int64_t fsdpi_slurm_number(const char **at, int64_t k, char out[24]) {
    const char *p = *at;
    int64_t count = 0;
    do { // p is at the bracket or a comma
        char *end;
        long first = strtol(++p, &end, 10), last = first;
        int width = (int)(end - p);
        if (*end == '-') last = strtol(end + 1, &end, 10);
        if (width < 1 || width > 18 || first < 0 || last < first || last - first > 0xFFFF) return 0;
        if (k >= count && k - count <= last - first)
            (void)snprintf(out, 24, "%0*lld", width, (long long)(first + k - count));
        count += last - first + 1;
        p = end;
    } while (*p == ',' && count <= 0xFFFF);
    *at = p + 1;
    return *p == ']' ? count : 0;
}

// Writes host k of a list of Slurm: 3 of "n[01-02,7]r[3-4],x7" is n02r4. Returns 0 if there is
// none, or no room.
static int fsdpi_slurm_host(const char *list, int64_t k, char *out, size_t cap) {
    size_t used = 0;
    char text[24];
    int64_t count = 1;
    for (const char *p = list;; list = ++p, k -= count, count = 1) { // a name with its brackets
        while (*p && *p != ',') {
            if (*p == '[') count *= fsdpi_slurm_number(&p, 0, text);
            else p++;
            if (count < 1 || count > 0xFFFF) return 0;
        }
        if (p == list) return 0;
        if (k < count) break;
        if (!*p) return 0;
    }
    while (*list && *list != ',') {
        const char *p = list;
        text[0] = *list, text[1] = 0;
        if (*list == '[') {
            const int64_t num = fsdpi_slurm_number(&p, 0, text);
            count /= num; // number of names that the later brackets make
            (void)fsdpi_slurm_number(&list, k / count % num, text);
        } else {
            list++;
        }
        if (used + strlen(text) >= cap) return 0;
        used += (size_t)snprintf(out + used, cap - used, "%s", text);
    }
    return 1;
}

/* Writes where the ranks of a step of srun on several hosts meet: at the first host of its list,
   where srun puts rank 0. With an arbitrary distribution, or in a heterogeneous job, rank 0 may be
   on any host of the list: ranks look for it on all. The port comes from the numbers of job and
   step, so that other steps hardly have it, and is below the ports that the system hands out.
   Returns the length; 0: there is no list, or it has too many hosts. */
static int fsdpi_slurm_store(char *out, size_t cap) {
    const char *list = fsdpi_env("SLURM_STEP_NODELIST"), *how = fsdpi_env("SLURM_DISTRIBUTION");
    const int anywhere = (how && strncmp(how, "arbitrary", 9) == 0) || fsdpi_env("SLURM_HET_SIZE");
    char host[200], text[200];
    fsdpi_text hosts = {text, sizeof text, 0};
    int num = 0;
    if (!list) list = fsdpi_env("SLURM_JOB_NODELIST");
    while (list && num < (anywhere ? FSDPI_STORE_HOSTS + 1 : 1) &&
           fsdpi_slurm_host(list, num, host, sizeof host))
        fsdpi_text_add(&hosts, "%s%s", num++ ? "," : "", host);
    if (num < 1 || num > FSDPI_STORE_HOSTS || hosts.used >= sizeof text) return 0;
    const uint64_t job = fsdpi_env_id("SLURM_JOB_ID");
    const uint64_t step = fsdpi_env_id("SLURM_STEP_ID");
    return snprintf(out, cap, "tcp://%s:%d", text, 20000 + (int)((job * 131 + step) % 12000));
}

/* The address where ranks meet, in the form of fsdp_world_desc.store. "": ranks are on several
   hosts and the launcher does not say on which ones. That is an error only for a backend that needs
   the address, which then gives the text FSDPI_NO_STORE. */
#define FSDPI_NO_STORE                                                                             \
    "[E724] ranks are on several hosts, and the launcher does not name the host of rank 0: set "   \
    "MASTER_ADDR (that host) and MASTER_PORT (a free port there) on all ranks, as in 'mpirun -x "  \
    "MASTER_ADDR=HOST -x MASTER_PORT=29500 ...' of Open MPI, 'mpiexec -genv MASTER_ADDR HOST "     \
    "-genv MASTER_PORT 29500 ...' of MPICH, or FSDP_STORE=tcp://HOST:PORT"

static fsdp_status fsdpi_store_name(fsdp_world *w, const fsdp_world_desc *d, char *out,
                                    size_t cap) {
    const char *store = d->store && *d->store ? d->store : fsdpi_env("FSDP_STORE");
    const char *host = fsdpi_env("MASTER_ADDR"), *port = fsdpi_env("MASTER_PORT");
    const fsdpi_launcher *l = fsdpi_launcher_of_hosts();
    int used = 0, is_spread = 0;
    FSDPI_TRY(fsdpi_launcher_is_spread(w, l, d->world_size, &is_spread));
    if (store) {
        used = snprintf(out, cap, "%s", store);
    } else if (host && port) {
        const int bare = strchr(host, ':') && *host != '['; // an IPv6 address
        used = snprintf(out, cap, "tcp://%s%s%s:%s", bare ? "[" : "", host, bare ? "]" : "", port);
    } else if (is_spread) {
        if (strcmp(l->rank, "SLURM_PROCID") == 0) used = fsdpi_slurm_store(out, cap);
        if (used == 0) *out = 0;
    } else {
        used = snprintf(out, cap, "host:");
    }
    if (used < 0 || (size_t)used >= cap)
        return fsdpi_invalid_arg(
            w,
            "[E506] the address where ranks meet is longer than %u bytes: give a "
            "shorter fsdp_world_desc.store, FSDP_STORE or MASTER_ADDR",
            (unsigned)cap - 1);
    return FSDP_OK;
}

// Sets *out to 1 if a launcher's variables show that ranks of this world are on other hosts.
static fsdp_status fsdpi_env_is_spread(fsdp_world *w, const fsdp_world_desc *d, int *out) {
    const fsdpi_launcher *l = fsdpi_launcher_of_hosts();
    int size = 0;
    *out = 0;
    if (w->size == 1 || d->threads || strncmp(w->store, "host:", 5) == 0) return FSDP_OK;
    FSDPI_TRY(fsdpi_world_env_int(w, l->size, 1, 0x7FFFFFFF, &size));
    return size == w->size ? fsdpi_launcher_is_spread(w, l, size, out) : FSDP_OK;
}

static fsdp_status fsdpi_env_log_level(fsdp_world *w, int *out) {
    static const char *const names[] = {"", "error", "warn", "info", "none"};
    const char *text = fsdpi_env("FSDP_LOG_LEVEL");
    *out = FSDP_LOG_WARN;
    if (!text) return FSDP_OK;
    for (int i = FSDP_LOG_ERROR; i <= FSDP_LOG_NONE; i++)
        if (strcmp(text, names[i]) == 0) {
            *out = i;
            return FSDP_OK;
        }
    return fsdpi_invalid_arg(
        w, "[E507] variable FSDP_LOG_LEVEL is '%s', expected error, warn, info or none", text);
}

#endif // FSDPI_CORE_LAUNCH_H
