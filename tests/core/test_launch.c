/* test_launch.c - rank, size, local rank, the job's name and the ranks' meeting point, from the
   environments of torchrun, Open MPI, MVAPICH2, PMI (MPICH, Intel MPI), Flux and Slurm; and
   programs that meet when they are started that way.

   SPDX-License-Identifier: MIT */
#include "harness.h"
#include "lab.h"

enum { OUTPUT_NBYTES = 1 << 15 };

/* Sets an environment of "NAME=value NAME=value" and nothing else. %r stands for the rank, %j for a
   name that no other test uses, and %_ for a blank. */
static void environment(const char *variables, int rank) {
    CHECK_EQ_INT(clearenv(), 0);
    for (const char *v = variables; *v; v += *v == ' ') {
        char name[64], value[300] = "";
        const int length = (int)strcspn(v, "=");
        snprintf(name, sizeof name, "%.*s", length, v);
        v += length + 1;
        for (size_t at = 0; *v && *v != ' ' && at < sizeof value - 64; v++) {
            if (v[0] != '%') value[at++] = *v, value[at] = 0;
            else if (*++v == 'r') at += (size_t)snprintf(value + at, 32, "%d", rank);
            else if (*v == '_') at += (size_t)snprintf(value + at, 2, " ");
            else at += (size_t)snprintf(value + at, 64, "%d", (int)getppid());
        }
        CHECK_EQ_INT(setenv(name, value, 1), 0);
    }
}

/* ---- the result of fsdp_init ----------------------------------------------------------------- */

static struct { /* the world, and the names with which the backend was opened */
    int rank, size, local, opened;
    char job[300], store[300];
} seen;

static fsdp_status seen_open(const fsdp_boot *boot, fsdp_caps *caps, fsdp_comm **world) {
    seen.opened = boot->size;
    snprintf(seen.job, sizeof seen.job, "%s", boot->job);
    snprintf(seen.store, sizeof seen.store, "%s", boot->store);
    return fsdp_fake_comm_ops()->open(boot, caps, world);
}
static fsdp_status start_as(fsdp_world_desc d, fsdp_world **w) {
    fsdp_comm_ops ops = *fsdp_fake_comm_ops(); /* no other ranks come */
    ops.open = seen_open;
    ops.name = "seen";
    d.comm_ops = &ops;
    d.logger.log = w_quiet;
    memset(&seen, 0, sizeof seen);
    const fsdp_status status = fsdp_init(&d, w);
    if (status) return status;
    seen.rank = fsdp_rank(*w), seen.size = fsdp_world_size(*w), seen.local = fsdp_local_rank(*w);
    CALL(NULL, fsdp_shutdown(*w)); /* before the table goes out of scope */
    return FSDP_OK;
}

/* Starts a world whose desc has no ranks; store: NULL, or the meeting point. */
static fsdp_status start_at(const char *store, fsdp_world **w) {
    fsdp_world_desc d = FSDP_ZERO;
    d.store = store;
    return start_as(d, w);
}
static fsdp_status start(fsdp_world **w) { return start_at(NULL, w); }

typedef struct {
    const char *name, *variables;
    const char *ranks; /* rank/size/local rank */
    const char *job;   /* a part of the job's name, as a pattern */
    const char *store; /* the meeting point */
} found_row;

#define OMPI(rank, size, local)                                                                    \
    "OMPI_COMM_WORLD_RANK=" rank " OMPI_COMM_WORLD_SIZE=" size                                     \
    " OMPI_COMM_WORLD_LOCAL_RANK=" local " "
#define SLURM(rank, size, local)                                                                   \
    "SLURM_PROCID=" rank " SLURM_NTASKS=" size " SLURM_LOCALID=" local " SLURM_JOB_ID=7001 "
#define PMI(rank, size) "PMI_FD=9 PMI_RANK=" rank " PMI_SIZE=" size " "
#define FLUX(rank, size, nodes)                                                                    \
    "FLUX_TASK_RANK=" rank " FLUX_JOB_SIZE=" size " FLUX_TASK_LOCAL_ID=1 FLUX_JOB_ID=f23 "         \
    "FLUX_JOB_NNODES=" nodes " "
static const found_row found[] = {
    {"nothing", "", "0/1/0", "", "host:"},
    {"torchrun", "RANK=5 WORLD_SIZE=8 LOCAL_RANK=1 MASTER_ADDR=host7 MASTER_PORT=29511", "5/8/1",
     "host7*29511", "tcp://host7:29511"},
    {"torchrun_on_one_host",
     "RANK=1 WORLD_SIZE=8 LOCAL_WORLD_SIZE=8 TORCHELASTIC_RUN_ID=r MASTER_ADDR=h", "1/8/1", "r",
     "host:"},
    {"ranks_by_hand_on_several_hosts", "RANK=1 WORLD_SIZE=8 LOCAL_WORLD_SIZE=4 MASTER_PORT=29500",
     "1/8/1", "29500", ""},
    {"ipv6", "RANK=1 WORLD_SIZE=2 MASTER_ADDR=fd00::7 MASTER_PORT=1000", "1/2/1", "fd00::7",
     "tcp://[fd00::7]:1000"},
    {"ipv6_in_brackets", "RANK=1 WORLD_SIZE=2 MASTER_ADDR=[fd00::7] MASTER_PORT=1000", "1/2/1",
     "fd00::7", "tcp://[fd00::7]:1000"},
    {"store_wins", "RANK=1 WORLD_SIZE=2 MASTER_ADDR=h MASTER_PORT=1 FSDP_STORE=file:///tmp/%j",
     "1/2/1", "h", "file:///tmp/"},
    {"torchrun_run_id",
     "RANK=0 WORLD_SIZE=2 LOCAL_RANK=0 TORCHELASTIC_RUN_ID=run42 TORCHELASTIC_RESTART_COUNT=3",
     "0/2/0", "run42*3", "host:"},
    {"without_local_rank", "RANK=3 WORLD_SIZE=4 MASTER_PORT=1234", "3/4/3", "1234", "host:"},
    {"job_id_wins", "RANK=3 WORLD_SIZE=4 MASTER_PORT=1234 FSDP_JOB_ID=mine", "3/4/3", "mine",
     "host:"},
    {"open_mpi", OMPI("2", "6", "1") "PMIX_NAMESPACE=683606017", "2/6/1", "683606017", "host:"},
    {"open_mpi_jobid", OMPI("2", "6", "2") "OMPI_MCA_ess_base_jobid=94713", "2/6/2", "94713",
     "host:"},
    {"open_mpi_job_id", OMPI("0", "2", "0") "FSDP_JOB_ID=own", "0/2/0", "own", "host:"},
    {"store_as_name", "RANK=1 WORLD_SIZE=2 FSDP_STORE=file:///shared/x", "1/2/1",
     "file:///shared/x", "file:///shared/x"},
    {"open_mpi_on_one_host", OMPI("1", "4", "1") "OMPI_COMM_WORLD_LOCAL_SIZE=4 PMIX_NAMESPACE=1",
     "1/4/1", "1", "host:"},
    /* no error yet: shm does not need the meeting point */
    {"open_mpi_on_several_hosts",
     OMPI("1", "4", "1") "OMPI_COMM_WORLD_LOCAL_SIZE=2 PMIX_NAMESPACE=1", "1/4/1", "1", ""},
    {"open_mpi_with_x",
     OMPI("1", "4", "1") "OMPI_COMM_WORLD_LOCAL_SIZE=2 PMIX_NAMESPACE=1 "
                         "MASTER_ADDR=n01 MASTER_PORT=29500",
     "1/4/1", "1", "tcp://n01:29500"},
    /* rank 0 need not be on its first host */
    {"open_mpi_in_an_allocation",
     OMPI("1", "4", "1") "OMPI_COMM_WORLD_LOCAL_SIZE=2 PMIX_NAMESPACE=1 SLURM_JOB_ID=7001 "
                         "SLURM_NNODES=2 SLURM_JOB_NODELIST=n[01-02]",
     "1/4/1", "1", ""},
    {"mvapich2",
     "MV2_COMM_WORLD_RANK=3 MV2_COMM_WORLD_SIZE=4 MV2_COMM_WORLD_LOCAL_RANK=1 "
     "MV2_COMM_WORLD_LOCAL_SIZE=4 MASTER_PORT=77 PMI_RANK=9 PMI_SIZE=8",
     "3/4/1", "77", "host:"},
    {"mvapich2_on_several_hosts",
     "MV2_COMM_WORLD_RANK=3 MV2_COMM_WORLD_SIZE=4 MV2_COMM_WORLD_LOCAL_RANK=1 "
     "MV2_COMM_WORLD_LOCAL_SIZE=2 FSDP_JOB_ID=m",
     "3/4/1", "m", ""},
    {"pmi_on_several_hosts",
     "PMI_RANK=1 PMI_SIZE=3 MPI_LOCALRANKID=0 MPI_LOCALNRANKS=2 FSDP_JOB_ID=hydra", "1/3/0",
     "hydra", ""},
    {"flux", FLUX("3", "4", "1"), "3/4/1", "f23", "host:"},
    {"flux_on_several_hosts", FLUX("3", "4", "2"), "3/4/1", "f23", ""},
    {"open_mpi_of_one", OMPI("0", "1", "0"), "0/1/0", "", "host:"},
    {"pmi", "PMI_RANK=1 PMI_SIZE=3 MPI_LOCALRANKID=0 FSDP_JOB_ID=hydra", "1/3/0", "hydra", "host:"},
    {"pmi_port", "PMI_RANK=1 PMI_SIZE=3 MASTER_PORT=4711", "1/3/1", "4711", "host:"},
    {"slurm", SLURM("4", "16", "2") "SLURM_STEP_ID=0", "4/16/2", "7001*0", "host:"},
    {"slurm_third_step", SLURM("1", "2", "1") "SLURM_STEP_ID=2", "1/2/1", "7001*2", "host:"},
    {"slurm_step_of_a_larger_job", SLURM("1", "16", "1") "SLURM_STEP_ID=4 SLURM_STEP_NUM_TASKS=2",
     "1/2/1", "7001*4", "host:"},
    {"slurm_on_several_hosts",
     SLURM("4", "16", "2") "SLURM_STEP_ID=3 SLURM_NNODES=2 SLURM_JOB_NODELIST=n[01-02]", "4/16/2",
     "7001*3", "tcp://n01:25134"},
    /* not the first hosts of the job */
    {"slurm_step_on_several_hosts",
     SLURM("1", "16", "1") "SLURM_STEP_ID=4 SLURM_STEP_NUM_TASKS=8 SLURM_STEP_NUM_NODES=2 "
                           "SLURM_NNODES=4 SLURM_STEP_NODELIST=n[3,5]",
     "1/8/1", "7001*4", "tcp://n3:25135"},
    {"slurm_step_on_one_host",
     SLURM("1", "16", "1") "SLURM_STEP_ID=4 SLURM_STEP_NUM_TASKS=2 SLURM_STEP_NUM_NODES=1 "
                           "SLURM_NNODES=4 SLURM_STEP_NODELIST=n3",
     "1/2/1", "7001*4", "host:"},
    /* rank 0 may be on any host: ranks look for it on all of them */
    {"slurm_arbitrary",
     SLURM("0", "4", "0") "SLURM_STEP_ID=3 SLURM_STEP_NUM_NODES=3 SLURM_STEP_NUM_TASKS=4 "
                          "SLURM_STEP_NODELIST=n[1-2],x SLURM_DISTRIBUTION=arbitrary,pack",
     "0/4/0", "7001*3", "tcp://n1,n2,x:25134"},
    {"slurm_heterogeneous",
     SLURM("0", "4", "0") "SLURM_STEP_ID=3 SLURM_STEP_NUM_NODES=2 SLURM_STEP_NUM_TASKS=4 "
                          "SLURM_STEP_NODELIST=n[1,3] SLURM_HET_SIZE=2",
     "0/4/0", "7001*3", "tcp://n1,n3:25134"},
    {"slurm_arbitrary_on_eight_hosts",
     SLURM("0", "9", "0") "SLURM_STEP_ID=3 SLURM_NNODES=8 SLURM_JOB_NODELIST=n[1-8] "
                          "SLURM_DISTRIBUTION=arbitrary",
     "0/9/0", "7001*3", "tcp://n1,n2,n3,n4,n5,n6,n7,n8:25134"},
    {"slurm_arbitrary_on_too_many_hosts",
     SLURM("0", "9", "0") "SLURM_STEP_ID=3 SLURM_NNODES=9 SLURM_JOB_NODELIST=n[1-9] "
                          "SLURM_DISTRIBUTION=arbitrary",
     "0/9/0", "7001*3", ""},
    {"slurm_arbitrary_on_one_host",
     SLURM("1", "2", "1") "SLURM_STEP_ID=3 SLURM_NNODES=1 SLURM_JOB_NODELIST=n1 "
                          "SLURM_DISTRIBUTION=arbitrary",
     "1/2/1", "7001*3", "host:"},
    {"slurm_arbitrary_with_a_master",
     SLURM("0", "4", "0") "SLURM_STEP_ID=3 SLURM_NNODES=2 SLURM_JOB_NODELIST=n[01-02] "
                          "SLURM_DISTRIBUTION=arbitrary MASTER_ADDR=n02 MASTER_PORT=5",
     "0/4/0", "7001*3", "tcp://n02:5"},
    {"slurm_without_a_list", SLURM("4", "16", "2") "SLURM_STEP_ID=3 SLURM_NNODES=2", "4/16/2",
     "7001*3", ""},
    {"slurm_with_a_master",
     SLURM("4", "16", "2") "SLURM_STEP_ID=3 SLURM_NNODES=2 SLURM_JOB_NODELIST=n[01-02] "
                           "MASTER_ADDR=ib-n02 MASTER_PORT=5",
     "4/16/2", "7001*3", "tcp://ib-n02:5"},
    /* the shell that salloc opens is a step of one task */
    {"slurm_interactive_step",
     SLURM("0", "16", "0") "SLURM_STEP_ID=4294967290 SLURM_STEP_NUM_TASKS=1", "0/1/0", "", "host:"},
    /* A batch job's script has the variables of all tasks that it may start. */
    {"slurm_batch_script", SLURM("0", "16", "0"), "0/1/0", "", "host:"},
    {"rank_wins",
     OMPI("7", "9",
          "3") "RANK=1 WORLD_SIZE=2 LOCAL_RANK=0 MASTER_PORT=29500 PMIX_NAMESPACE=other PMI_RANK=6",
     "1/2/0", "29500", "host:"},
    {"rank_wins_over_slurm",
     SLURM("4", "16", "2") "RANK=1 WORLD_SIZE=2 MASTER_PORT=29500 SLURM_STEP_ID=0", "1/2/1",
     "29500", "host:"},
    /* the step is mpirun's own: one task for each host */
    {"mpirun_in_a_slurm_step",
     OMPI("3", "8", "3") SLURM("0", "1", "0") "PMIX_NAMESPACE=ns1 SLURM_STEP_ID=0", "3/8/3", "ns1",
     "host:"},
    {"mpiexec_in_a_slurm_step",
     SLURM("0", "1", "0") "PMI_RANK=3 PMI_SIZE=8 MPI_LOCALRANKID=3 SLURM_STEP_ID=5", "3/8/3",
     "7001*5", "host:"},
    /* but other numbers than the step */
    {"mpiexec_in_a_slurm_step_that_says_no_local_rank",
     PMI("3", "8") SLURM("0", "1", "0") "SLURM_STEP_ID=5 SLURM_STEP_NUM_TASKS=1", "3/8/3", "7001*5",
     "host:"},
    /* its variables are those of the batch script */
    {"mpiexec_in_a_slurm_step_with_as_many_ranks",
     PMI("1", "2") SLURM("0", "16", "0") "MPI_LOCALRANKID=0 MPI_LOCALNRANKS=1 SLURM_STEP_ID=5 "
                                         "SLURM_STEP_NUM_TASKS=2 SLURM_STEP_NUM_NODES=2",
     "1/2/0", "7001*5", ""},
    {"mpiexec_in_a_batch_script", PMI("3", "4") SLURM("0", "4", "0") "MASTER_PORT=5", "3/4/3",
     "7001", "host:"},
    /* srun --mpi=pmi2 */
    {"slurm_pmi2",
     PMI("3", "4") SLURM("3", "4", "1") "PMI_JOBID=7001.3 SLURM_STEP_ID=3 SLURM_STEP_NUM_TASKS=4 "
                                        "SLURM_STEP_NUM_NODES=2 SLURM_STEP_NODELIST=n[01-02]",
     "3/4/1", "7001*3", "tcp://n01:25134"},
    {"slurm_pmi2_of_an_older_slurm",
     PMI("3", "4") SLURM("3", "4", "1") "PMI_JOBID=7001.3 SLURM_STEP_ID=3 SLURM_NNODES=2 "
                                        "SLURM_JOB_NODELIST=n[01-02]",
     "3/4/1", "7001*3", "tcp://n01:25134"},
    {"flux_pmi", PMI("3", "4") FLUX("3", "4", "2"), "3/4/1", "f23", ""},
    {"mpiexec_in_flux",
     PMI("5", "8") FLUX("0", "1", "1") "MPI_LOCALRANKID=2 MPI_LOCALNRANKS=8 FSDP_JOB_ID=m", "5/8/2",
     "m", "host:"},
    {"pmi_local", PMI("3", "4") "PMI_LOCAL_RANK=1 PMI_LOCAL_SIZE=4 FSDP_JOB_ID=p", "3/4/1", "p",
     "host:"},
    {"pmi_local_on_several_hosts", PMI("3", "4") "PMI_LOCAL_RANK=1 PMI_LOCAL_SIZE=2 FSDP_JOB_ID=p",
     "3/4/1", "p", ""},
    /* a script that exports RANK and WORLD_SIZE: the other values come from the launcher below it */
    {"rank_exported_under_srun",
     SLURM("3", "4", "1") "RANK=3 WORLD_SIZE=4 MASTER_PORT=29500 SLURM_STEP_ID=3 SLURM_NNODES=2 "
                          "SLURM_JOB_NODELIST=n[01-02]",
     "3/4/1", "29500", "tcp://n01:25134"},
    {"rank_exported_under_mpirun",
     OMPI("3", "4", "1") "RANK=3 WORLD_SIZE=4 MASTER_PORT=29500 OMPI_COMM_WORLD_LOCAL_SIZE=2",
     "3/4/1", "29500", ""},
    /* one torchrun for each node */
    {"torchrun_under_srun",
     SLURM("1", "2", "0") "RANK=1 WORLD_SIZE=2 LOCAL_RANK=1 LOCAL_WORLD_SIZE=2 MASTER_PORT=29500 "
                          "SLURM_STEP_ID=3 SLURM_NNODES=2",
     "1/2/1", "29500", "host:"},
    {"empty_is_not_set", OMPI("2", "6", "1") "RANK= WORLD_SIZE= PMIX_NAMESPACE=abc FSDP_JOB_ID=",
     "2/6/1", "abc", "host:"},
};

TEST_P(launch, environment, found) {
    fsdp_world *w;
    char ranks[64], job[100];
    environment(row->variables, 0);
    CALL(NULL, start(&w));
    snprintf(ranks, sizeof ranks, "%d/%d/%d", seen.rank, seen.size, seen.local);
    CHECK_EQ_STR(ranks, row->ranks);
    CHECK_EQ_INT(seen.opened, seen.size > 1 ? seen.size : 0); /* one rank needs no backend */
    snprintf(job, sizeof job, "*%s*", row->job);
    CHECK_MSG(!fnmatch(job, seen.job, 0), "job \"%s\" is not like \"%s\"", seen.job, job);
    if (strncmp(row->store, "file:", 5) == 0)
        seen.store[strlen(row->store)] = 0; /* the rest is this test's */
    if (seen.size > 1) CHECK_EQ_STR(seen.store, row->store);
}

/* RANK and WORLD_SIZE have priority. If each rank is its own world by them, though the launcher
   has started several ranks, they may be left from an earlier job: a warning says so. */
static const struct {
    const char *name, *variables, *told; /* NULL: no warning */
} alones[] = {
    {"mpirun", OMPI("1", "2", "1") "RANK=0 WORLD_SIZE=1", "OMPI_COMM_WORLD_SIZE is 2"},
    {"srun", SLURM("1", "4", "1") "RANK=0 WORLD_SIZE=1 SLURM_STEP_ID=0", "SLURM_NTASKS is 4"},
    {"batch_script", SLURM("0", "4", "0") "RANK=0 WORLD_SIZE=1", NULL},
    {"one_process", OMPI("0", "1", "0") "RANK=0 WORLD_SIZE=1", NULL},
    {"torchrun", OMPI("1", "2", "1") "RANK=0 WORLD_SIZE=1 TORCHELASTIC_RUN_ID=x", NULL},
    {"fsdprun", OMPI("1", "2", "1") "RANK=0 WORLD_SIZE=1 FSDP_JOB_ID=x", NULL},
    {"nothing_left", OMPI("0", "1", "0"), NULL},
};
static char told[1024];
static void keep_warning(int level, fsdp_status code, int rank, const char *text, void *user) {
    (void)code, (void)rank, (void)user;
    if (level == FSDP_LOG_WARN) snprintf(told, sizeof told, "%s", text);
}
TEST_P(launch, warns_of_single_ranks, alones) {
    fsdp_world_desc d = FSDP_ZERO;
    fsdp_world *w;
    environment(row->variables, 0);
    d.logger.log = keep_warning;
    CALL(NULL, fsdp_init(&d, &w));
    CHECK_EQ_INT(fsdp_world_size(w), 1);
    CHECK_MSG(row->told ? strstr(told, row->told) != NULL : !*told, "told '%s'", told);
    CALL(NULL, fsdp_shutdown(w));
}

#define TORCHRUN(rank, size) "RANK=" rank " WORLD_SIZE=" size " MASTER_ADDR=h MASTER_PORT=1 "

/* Slurm's lists of hosts: srun puts rank 0 on the first one; with an arbitrary distribution on
   any. */
static const struct {
    const char *name, *list, *host, *all; /* all, NULL: the first one */
} hostlists[] = {
    {"one", "node7", "node7", NULL},
    {"two", "a,b", "a", "a,b"},
    {"range", "n[01-04]", "n01", "n01,n02,n03,n04"},
    {"range_and_number", "n[01-03,7]", "n01", "n01,n02,n03,n7"},
    {"number_and_range", "n[7,09-11],x", "n7", "n7,n09,n10,n11,x"},
    {"two_ranges", "n[1-2]r[3-5]", "n1r3", "n1r3,n1r4,n1r5,n2r3,n2r4,n2r5"},
    {"after_the_bracket", "n[08-10].site,m[1-2]", "n08.site", "n08.site,n09.site,n10.site,m1,m2"},
    {"dashes", "gpu-a[001-100]", "gpu-a001", ""},
    {"dash_without_bracket", "gpu-a-1,gpu-a-2", "gpu-a-1", "gpu-a-1,gpu-a-2"},
    {"many", "n[00001-20000]", "n00001", ""},
    {"empty_first", ",a", "", NULL},
    {"not_closed", "n[01-04", "", NULL},
    {"descending", "n[4-1]", "", NULL},
    {"no_number", "n[a-b]", "", NULL},
    {"too_large", "n[1-99999999999999999999]", "", NULL},
    {"only_a_bracket", "[", "", NULL}};
TEST_P(launch, slurm_hosts, hostlists) {
    fsdp_world *w;
    environment(SLURM("0", "4", "0") "SLURM_STEP_ID=0 SLURM_NNODES=2", 0);
    CHECK_EQ_INT(setenv("SLURM_JOB_NODELIST", row->list, 1), 0);
    for (int arbitrary = 0; arbitrary < 2; arbitrary++) {
        const char *hosts = arbitrary && row->all ? row->all : row->host;
        char expected[300] = "";
        if (arbitrary) CHECK_EQ_INT(setenv("SLURM_DISTRIBUTION", "arbitrary", 1), 0);
        CALL(NULL, start(&w));
        if (*hosts) snprintf(expected, sizeof expected, "tcp://%s:25131", hosts);
        CHECK_EQ_STR(seen.store, expected);
    }
}

/* Two steps of one job, and steps of neighbouring jobs, have different ports. */
TEST(launch, slurm_ports) {
    static const char *const ids[][3] = {{"7001", "1", "tcp://n:25132"},
                                         {"7002", "0", "tcp://n:25262"},
                                         {"4294967295", "3", "tcp://n:23648"},
                                         {"1", "4294967279", "tcp://n:31410"}};
    fsdp_world *w;
    environment(SLURM("0", "4", "0") "SLURM_NNODES=2 SLURM_JOB_NODELIST=n", 0);
    for (size_t i = 0; i < sizeof ids / sizeof *ids; i++) {
        setenv("SLURM_JOB_ID", ids[i][0], 1);
        setenv("SLURM_STEP_ID", ids[i][1], 1);
        CALL(NULL, start(&w));
        CHECK_EQ_STR(seen.store, ids[i][2]);
    }
}

TEST(launch, store_of_the_desc_wins) {
    fsdp_world *w;
    environment("RANK=0 WORLD_SIZE=2 MASTER_ADDR=h MASTER_PORT=1 FSDP_STORE=tcp://b:2", 0);
    CALL(NULL, start_at("tcp://c:3", &w));
    CHECK_EQ_STR(seen.store, "tcp://c:3");
    CALL(NULL, start_at("", &w)); /* as if it were not given */
    CHECK_EQ_STR(seen.store, "tcp://b:2");
}

TEST(launch, store_is_too_long) {
    static char name[5000];
    fsdp_world *w;
    environment("RANK=0 WORLD_SIZE=2 MASTER_PORT=1", 0);
    memset(name, 'x', sizeof name - 1);
    CHECK_EQ_INT(setenv("FSDP_STORE", name, 1), 0);
    CHECK_STATUS(start(&w), FSDP_ERR_INVALID_ARG);
    CHECK(strstr(fsdp_last_error(NULL), "FSDP_STORE or MASTER_ADDR"));
}

/* A desc with ranks must name its job, unless its ranks are the launcher's. */
#define FSDPRUN(rank, size) TORCHRUN(rank, size) "FSDP_JOB_ID=fsdprun-1 "
static const struct {
    const char *name, *variables;
    int rank, size;  /* set in the desc */
    const char *job; /* set in the desc */
    int is_threads;
    const char *refused; /* part of the error text; NULL: a world of that size is opened */
} desc_ranks[] = {
    {"as_the_launcher", FSDPRUN("1", "4"), 1, 4, NULL, 0, NULL},
    {"half_of_fsdprun", FSDPRUN("2", "4"), 1, 2, NULL, 0, "the launcher says rank 2 of 4"},
    {"same_rank_of_half", FSDPRUN("0", "4"), 0, 2, NULL, 0, "(RANK, WORLD_SIZE)"},
    {"other_rank", FSDPRUN("0", "4"), 3, 4, NULL, 0, "the launcher says rank 0 of 4"},
    {"more_than_the_launcher", FSDPRUN("0", "1"), 1, 2, NULL, 0, "says rank 0 of 1"},
    {"half_of_mpirun", OMPI("3", "4", "3") "PMIX_NAMESPACE=ns", 1, 2, NULL, 0,
     "(OMPI_COMM_WORLD_RANK, OMPI_COMM_WORLD_SIZE)"},
    {"half_of_srun", SLURM("3", "4", "3") "SLURM_STEP_ID=0", 1, 2, NULL, 0, "SLURM_NTASKS)"},
    {"with_a_store", FSDPRUN("2", "4") "FSDP_STORE=tcp://h:1", 1, 2, NULL, 0,
     "fsdp_world_desc.job"},
    {"launcher_is_wrong", TORCHRUN("x", "4"), 1, 2, NULL, 0, "RANK is 'x'"},
    {"with_a_job", FSDPRUN("2", "4"), 1, 2, "even", 0, NULL},
    {"with_a_job_launcher_is_wrong", TORCHRUN("x", "4"), 1, 2, "even", 0, NULL},
    {"threads", FSDPRUN("2", "4"), 1, 2, NULL, 1, NULL},
    {"alone", FSDPRUN("2", "4"), 0, 1, NULL, 0, NULL},
    {"batch_script", SLURM("0", "4", "0") "FSDP_JOB_ID=mine", 1, 2, NULL, 0, NULL},
    {"no_launcher", "FSDP_JOB_ID=mine", 1, 2, NULL, 0, NULL},
    {"no_launcher_but_a_port", "MASTER_PORT=7", 1, 2, NULL, 0, NULL},
};
TEST_P(launch, desc_ranks, desc_ranks) {
    static fsdp_threads threads;
    fsdp_world_desc d = FSDP_ZERO;
    fsdp_world *w = NULL;
    environment(row->variables, 0);
    d.rank = row->rank, d.world_size = row->size, d.job = row->job;
    if (row->is_threads) d.threads = &threads;
    fsdp_status status = start_as(d, &w);
    const char *text = fsdp_last_error(NULL);
    CHECK_MSG(status == (row->refused ? FSDP_ERR_INVALID_ARG : FSDP_OK), "%s", text);
    CHECK_EQ_INT(seen.opened, status || row->size == 1 ? 0 : row->size);
    if (row->refused) CHECK_MSG(strstr(text, row->refused), "%s", text);
    else CHECK(seen.rank == row->rank && seen.size == row->size);
}

/* Jobs of one host must not meet: their names differ. */
static const struct {
    const char *name, *a, *b;
} apart[] = {
    {"ports", "RANK=0 WORLD_SIZE=2 MASTER_PORT=1", "RANK=0 WORLD_SIZE=2 MASTER_PORT=2"},
    {"restarts", "RANK=0 WORLD_SIZE=2 MASTER_PORT=1 TORCHELASTIC_RESTART_COUNT=0",
     "RANK=0 WORLD_SIZE=2 MASTER_PORT=1 TORCHELASTIC_RESTART_COUNT=1"},
    {"mpiruns", OMPI("0", "2", "0") "PMIX_NAMESPACE=1", OMPI("0", "2", "0") "PMIX_NAMESPACE=2"},
    {"slurm_steps", SLURM("0", "2", "0") "SLURM_STEP_ID=1",
     SLURM("0", "2", "0") "SLURM_STEP_ID=11"},
    {"slurm_jobs", "SLURM_PROCID=0 SLURM_NTASKS=2 SLURM_JOB_ID=1 SLURM_STEP_ID=11",
     "SLURM_PROCID=0 SLURM_NTASKS=2 SLURM_JOB_ID=11 SLURM_STEP_ID=1"},
    {"requeued", SLURM("0", "2", "0") "SLURM_STEP_ID=0",
     SLURM("0", "2", "0") "SLURM_STEP_ID=0 SLURM_RESTART_COUNT=1"},
    {"requeued_again", SLURM("0", "2", "0") "SLURM_STEP_ID=0 SLURM_RESTART_COUNT=1",
     SLURM("0", "2", "0") "SLURM_STEP_ID=0 SLURM_RESTART_COUNT=11"},
    /* given by the batch script */
    {"requeued_with_a_name", SLURM("0", "2", "0") "SLURM_STEP_ID=0 FSDP_JOB_ID=mine",
     SLURM("0", "2", "0") "SLURM_STEP_ID=0 FSDP_JOB_ID=mine SLURM_RESTART_COUNT=1"},
    /* which counts from 0 again */
    {"requeued_torchrun", "RANK=0 WORLD_SIZE=2 MASTER_PORT=1 TORCHELASTIC_RESTART_COUNT=0",
     "RANK=0 WORLD_SIZE=2 MASTER_PORT=1 TORCHELASTIC_RESTART_COUNT=0 SLURM_RESTART_COUNT=1"},
    {"requeued_or_restarted", "RANK=0 WORLD_SIZE=2 MASTER_PORT=1 TORCHELASTIC_RESTART_COUNT=1",
     "RANK=0 WORLD_SIZE=2 MASTER_PORT=1 SLURM_RESTART_COUNT=1"},
    {"restarted_with_a_name", "RANK=0 WORLD_SIZE=2 FSDP_JOB_ID=mine TORCHELASTIC_RESTART_COUNT=0",
     "RANK=0 WORLD_SIZE=2 FSDP_JOB_ID=mine TORCHELASTIC_RESTART_COUNT=1"},
    {"requeued_mpirun", OMPI("0", "2", "0") "PMIX_NAMESPACE=1",
     OMPI("0", "2", "0") "PMIX_NAMESPACE=1 SLURM_RESTART_COUNT=1"},
    {"requeued_mpiexec", PMI("0", "2") "MPI_LOCALRANKID=0 MASTER_PORT=1",
     PMI("0", "2") "MPI_LOCALRANKID=0 MASTER_PORT=1 SLURM_RESTART_COUNT=1"},
    {"requeued_file", "RANK=0 WORLD_SIZE=2 FSDP_STORE=file:///shared/x",
     "RANK=0 WORLD_SIZE=2 FSDP_STORE=file:///shared/x SLURM_RESTART_COUNT=1"},
};
TEST_P(launch, jobs_have_different_names, apart) {
    char first[sizeof seen.job];
    fsdp_world *w;
    environment(row->a, 0);
    CALL(NULL, start(&w));
    memcpy(first, seen.job, sizeof first);
    environment(row->b, 0);
    CALL(NULL, start(&w));
    CHECK_MSG(strcmp(first, seen.job) != 0, "both are \"%s\"", first);
}

/* Names without restart counts: before the first restart, and fsdprun's, which has the counts
   already. */
static const struct {
    const char *name, *variables, *job;
} kept[] = {
    {"no_restart", SLURM("0", "2", "0") "SLURM_STEP_ID=5 SLURM_RESTART_COUNT=0", "7001:5::"},
    {"fsdprun", "RANK=0 WORLD_SIZE=2 FSDP_JOB_ID=fsdprun-h:1:S2 SLURM_RESTART_COUNT=2",
     "fsdprun-h:1:S2"},
};
TEST_P(launch, restart_counts_are_added_once, kept) {
    fsdp_world *w;
    environment(row->variables, 0);
    CALL(NULL, start(&w));
    CHECK_EQ_STR(seen.job, row->job);
}

/* A name that the program sets gets the counts, too; a name that becomes too long is refused,
   not cut. */
TEST(launch, restart_counts_in_names_of_the_program) {
    fsdp_world_desc d = FSDP_ZERO;
    fsdp_world *w = NULL;
    char name[128];
    environment("SLURM_RESTART_COUNT=12 TORCHELASTIC_RESTART_COUNT=3", 0);
    d.rank = 0, d.world_size = 2, d.job = "even";
    CALL(NULL, start_as(d, &w));
    CHECK_EQ_STR(seen.job, "even:T3:S12");
    memset(name, 'x', sizeof name);
    for (size_t length = 118; length < sizeof name; length++) { /* at most 127 bytes */
        const fsdp_status expected = length + 7 < sizeof name ? FSDP_OK : FSDP_ERR_INVALID_ARG;
        name[length] = 0;
        d.job = name;
        CHECK_STATUS(start_as(d, &w), expected);
        name[length] = 'x';
        if (expected) CHECK(strstr(fsdp_last_error(NULL), "[E505]"));
        else CHECK_EQ_INT(strlen(seen.job), length + 7);
    }
}

/* A wrong value is an error that names its variable. */
static const struct {
    const char *name, *variables, *text, *more;
} wrong[] = {
    {"rank", TORCHRUN("one", "2"), "RANK is 'one'", "expected an integer from 0 to "},
    {"negative_rank", TORCHRUN("-1", "2"), "RANK is '-1'", "expected an integer from 0 to "},
    {"fraction", TORCHRUN("0.5", "2"), "RANK is '0.5'", "expected an integer from 0 to "},
    {"rank_and_more", TORCHRUN("1x", "2"), "RANK is '1x'", "expected an integer from 0 to "},
    {"blank_after", TORCHRUN("1%_", "2"), "RANK is '1 '", "expected an integer from 0 to "},
    {"world_size", TORCHRUN("0", "0"), "WORLD_SIZE is '0'", "expected an integer from 1 to "},
    {"too_large", TORCHRUN("0", "4294967298"), "WORLD_SIZE is '4294967298'",
     "expected an integer from 1 to 2147483647"},
    {"local_rank", TORCHRUN("0", "2") "LOCAL_RANK=x", "LOCAL_RANK is 'x'",
     "expected an integer from 0 to "},
    {"local_world_size", TORCHRUN("0", "2") "LOCAL_WORLD_SIZE=two", "LOCAL_WORLD_SIZE is 'two'",
     "expected an integer from 1 to "},
    {"open_mpi", OMPI("0", "2", "0") "OMPI_COMM_WORLD_LOCAL_SIZE=0 PMIX_NAMESPACE=1",
     "OMPI_COMM_WORLD_LOCAL_SIZE is '0'", "expected an integer from 1 to "},
    {"flux", FLUX("0", "2", "1k"), "FLUX_JOB_NNODES is '1k'", "expected an integer from 1 to "},
    {"slurm", SLURM("0", "4", "0") "SLURM_STEP_ID=0 SLURM_NNODES=-2", "SLURM_NNODES is '-2'",
     "expected an integer from 1 to "},
    {"timeout", TORCHRUN("0", "2") "FSDP_TIMEOUT_MS=1e3", "FSDP_TIMEOUT_MS is '1e3'",
     "expected an integer from 1 to "},
    {"timeout_0", TORCHRUN("0", "2") "FSDP_TIMEOUT_MS=0", "FSDP_TIMEOUT_MS is '0'",
     "expected an integer from 1 to "},
    {"comm_threads", TORCHRUN("0", "2") "FSDP_COMM_THREADS=3 FSDP_LANES=1",
     "FSDP_COMM_THREADS is '3'", "expected an integer from 0 to 2"},
    {"comm_threads_by_the_old_name", TORCHRUN("0", "2") "FSDP_LANES=3", "FSDP_LANES is '3'",
     "expected an integer from 0 to 2"},
    {"log_level", TORCHRUN("0", "2") "FSDP_LOG_LEVEL=debug", "FSDP_LOG_LEVEL is 'debug'",
     "expected error, warn, info or none"},
    {"no_size", "RANK=0 MASTER_PORT=1", "RANK is set", "WORLD_SIZE is not"},
    {"no_rank", "WORLD_SIZE=2 MASTER_PORT=1", "WORLD_SIZE is set", "RANK is not"},
    {"rank_without_its_size_below_open_mpi", OMPI("0", "2", "0") "RANK=0", "RANK is set",
     "WORLD_SIZE is not"},
    {"rank_too_large", "RANK=4 WORLD_SIZE=4 MASTER_PORT=1", "RANK is 4", "WORLD_SIZE"},
    {"open_mpi_rank_too_large", OMPI("4", "2", "0"), "OMPI_COMM_WORLD_RANK is 4",
     "OMPI_COMM_WORLD_SIZE"},
    {"open_mpi_rank", OMPI("x", "2", "0"), "OMPI_COMM_WORLD_RANK", "'x'"},
    {"open_mpi_size", OMPI("0", "-2", "0"), "OMPI_COMM_WORLD_SIZE", "'-2'"},
    {"open_mpi_local", OMPI("0", "2", "?"), "OMPI_COMM_WORLD_LOCAL_RANK", "'?'"},
    {"open_mpi_no_size", "OMPI_COMM_WORLD_RANK=1", "OMPI_COMM_WORLD_RANK is set",
     "OMPI_COMM_WORLD_SIZE is not"},
    {"pmi_rank", "PMI_RANK=1.5 PMI_SIZE=2", "PMI_RANK", "'1.5'"},
    {"pmi_size", "PMI_RANK=1 PMI_SIZE=two", "PMI_SIZE", "'two'"},
    {"pmi_no_size", "PMI_RANK=1", "PMI_RANK is set", "PMI_SIZE is not"},
    {"slurm_rank", SLURM("a", "2", "0") "SLURM_STEP_ID=0", "SLURM_PROCID", "'a'"},
    {"slurm_size", SLURM("0", "0", "0") "SLURM_STEP_ID=0", "SLURM_NTASKS", "'0'"},
    {"slurm_step_size", SLURM("0", "2", "0") "SLURM_STEP_ID=0 SLURM_STEP_NUM_TASKS=x",
     "SLURM_STEP_NUM_TASKS", "'x'"},
    {"slurm_local", SLURM("0", "2", "z") "SLURM_STEP_ID=0", "SLURM_LOCALID", "'z'"},
    {"no_name", "RANK=0 WORLD_SIZE=2", "2 ranks need a common job name", "FSDP_JOB_ID"},
    /* other jobs have been restarted, too */
    {"restart_count_is_no_name",
     "RANK=0 WORLD_SIZE=2 TORCHELASTIC_RESTART_COUNT=1 SLURM_RESTART_COUNT=1",
     "2 ranks need a common job name", "that sets RANK gives none"},
    /* another one in it would have the same name */
    {"mpiexec_in_a_batch_script", PMI("0", "2") SLURM("0", "4", "0") "MPI_LOCALRANKID=0",
     "2 ranks need a common job name", "FSDP_JOB_ID"},
    {"mpiexec_in_the_shell_of_salloc",
     PMI("0", "2")
         SLURM("0", "4", "0") "MPI_LOCALRANKID=0 SLURM_STEP_ID=4294967290 SLURM_STEP_NUM_TASKS=1",
     "2 ranks need a common job name", "FSDP_JOB_ID"},
    /* each of two such torchruns has a rank 0 of that name */
    {"torchrun_within_fsdprun",
     "RANK=0 WORLD_SIZE=2 TORCHELASTIC_RUN_ID=none FSDP_JOB_ID=fsdprun-77-1.2",
     "FSDP_JOB_ID is 'fsdprun-77-1.2'", "TORCHELASTIC_RUN_ID is set"},
    /* its ranks all inherit the RANK of one fsdprun rank */
    {"mpirun_within_fsdprun", OMPI("1", "2", "1") "RANK=0 WORLD_SIZE=2 FSDP_JOB_ID=fsdprun-77-1.2",
     "OMPI_COMM_WORLD_LOCAL_RANK is set", "unset RANK, WORLD_SIZE, FSDP_JOB_ID"},
    {"no_name_pmi", "PMI_RANK=1 PMI_SIZE=2", "the launcher that sets PMI_RANK gives none",
     "'mpiexec -genv FSDP_JOB_ID NAME ...'"},
};
TEST_P(launch, wrong, wrong) {
    fsdp_world *w = NULL;
    environment(row->variables, 0);
    CHECK_STATUS(start(&w), FSDP_ERR_INVALID_ARG);
    CHECK(w == NULL && seen.opened == 0);
    for (int i = 0; i < 2; i++) {
        const char *text = i ? row->more : row->text;
        CHECK_MSG(strstr(fsdp_last_error(NULL), text), "\"%s\" does not say \"%s\"",
                  fsdp_last_error(NULL), text);
    }
}

/* With rank and size in the desc, the launcher's variables are not read. */
TEST(launch, desc_wins) {
    fsdp_world_desc d = w_desc(0, 1, NULL, "desc", 0);
    fsdp_world *w;
    environment("RANK=junk OMPI_COMM_WORLD_RANK=junk SLURM_STEP_ID=junk", 0);
    CALL(NULL, fsdp_init(&d, &w));
    CHECK(fsdp_rank(w) == 0 && fsdp_world_size(w) == 1);
    CALL(NULL, fsdp_shutdown(w));
}

/* ---- ranks that meet ------------------------------------------------------------------------- */

typedef struct {
    const char *name, *variables;
    int size;
} meet_row;
static const meet_row meets[] = {
    {"torchrun", "RANK=%r WORLD_SIZE=3 LOCAL_RANK=%r MASTER_ADDR=localhost MASTER_PORT=%j", 3},
    {"open_mpi", OMPI("%r", "4", "%r") "PMIX_NAMESPACE=launch-%j@1", 4},
    {"open_mpi_jobid", OMPI("%r", "2", "%r") "OMPI_MCA_ess_base_jobid=%j", 2},
    {"pmi", "PMI_RANK=%r PMI_SIZE=3 MPI_LOCALRANKID=%r FSDP_JOB_ID=pmi-%j", 3},
    {"slurm", "SLURM_PROCID=%r SLURM_NTASKS=4 SLURM_LOCALID=%r SLURM_JOB_ID=%j SLURM_STEP_ID=3", 4},
    {"slurm_batch_script", SLURM("0", "4", "0"), 1},
};

static void meet_rank(int rank, int world, void *arg) {
    fsdp_world *w;
    int64_t sum = (int64_t)1 << rank;
    environment((const char *)arg, rank);
    CALL(NULL, fsdp_init(NULL, &w));
    CHECK_EQ_INT(fsdp_rank(w), rank);
    CHECK_EQ_INT(fsdp_local_rank(w), rank);
    CHECK_EQ_INT(fsdp_world_size(w), world);
    CALL(w, fsdp_all_reduce(w, NULL, &sum, 1, FSDP_I64, FSDP_SUM));
    CHECK_EQ_INT(sum, ((int64_t)1 << world) - 1);
    CALL(w, fsdp_barrier(w));
    CALL(NULL, fsdp_shutdown(w));
}

TEST_P(launch, ranks_meet, meets) {
    h_ranks_proc(row->size, meet_rank, (void *)(uintptr_t)row->variables);
}

/* Two jobs of one host at the same time, which differ only in their names. */
static void two_jobs_rank(int rank, int world, void *arg) {
    static const char *const jobs[2] = {OMPI("%r", "2", "%r") "PMIX_NAMESPACE=a%j",
                                        OMPI("%r", "2", "%r") "PMIX_NAMESPACE=b%j"};
    fsdp_world *w;
    int64_t sum = (int64_t)1 << rank;
    (void)world, (void)arg;
    environment(jobs[rank / 2], rank % 2);
    CALL(NULL, fsdp_init(NULL, &w));
    CALL(w, fsdp_all_reduce(w, NULL, &sum, 1, FSDP_I64, FSDP_SUM));
    CHECK_EQ_INT(sum, rank / 2 ? 12 : 3);
    CALL(NULL, fsdp_shutdown(w));
}

TEST(launch, two_jobs_at_once) { h_ranks_proc(4, two_jobs_rank, NULL); }

/* Ranks 0 2 and 1 3 of a launcher's four as two worlds, in addition to one of all four: refused
   without a job name of their own, though the launcher has a name for its job. */
static void sub_worlds_rank(int rank, int world, void *arg) {
    const char *const variable = getenv("FSDP_BACKEND");
    fsdp_world_desc d = FSDP_ZERO;
    fsdp_world *all, *half, *again;
    char job[64], backend[16];
    int64_t sum = rank, sum_all = rank;
    snprintf(backend, sizeof backend, "%s", variable ? variable : "");
    environment("RANK=%r WORLD_SIZE=4 LOCAL_RANK=%r FSDP_JOB_ID=all-%j FSDP_TOKEN=secret "
                "FSDP_LOG_LEVEL=none",
                rank);
    CHECK_EQ_INT(setenv("FSDP_BACKEND", backend, 1) || setenv("FSDP_STORE", (char *)arg, 1), 0);
    d.rank = rank / 2, d.world_size = world / 2, d.local_rank = rank;
    CHECK_STATUS(fsdp_init(&d, &half), FSDP_ERR_INVALID_ARG);
    CHECK_MSG(strstr(fsdp_last_error(NULL), "[E523]"), "%s", fsdp_last_error(NULL));
    CALL(NULL, fsdp_init(NULL, &all));
    snprintf(job, sizeof job, "%s-%d", rank % 2 ? "odd" : "even", (int)getppid());
    d.job = job;
    CALL(NULL, fsdp_init(&d, &half));
    CALL(half, fsdp_all_reduce(half, NULL, &sum, 1, FSDP_I64, FSDP_SUM));
    CALL(all, fsdp_all_reduce(all, NULL, &sum_all, 1, FSDP_I64, FSDP_SUM));
    CHECK_EQ_INT(sum, rank % 2 ? 4 : 2);
    CHECK_EQ_INT(sum_all, 6);
    if (strcmp(backend, "gloo") == 0) { /* the store has room for one world of each name */
        CHECK_STATUS(fsdp_init(NULL, &again), FSDP_ERR_INVALID_ARG);
        CHECK_MSG(strstr(fsdp_last_error(NULL), "its own fsdp_world_desc.job"), "%s",
                  fsdp_last_error(NULL));
    }
    CALL(all, fsdp_barrier(all));
    CALL(NULL, fsdp_shutdown(half));
    CALL(NULL, fsdp_shutdown(all));
}

static const struct {
    const char *name;
    int is_tcp;
} stores[] = {{"host", 0}, {"port", 1}};
TEST_P(launch, sub_worlds, stores, GLOO) {
    char store[64] = "host:";
    if (row->is_tcp) snprintf(store, sizeof store, "tcp://127.0.0.1:%d", h_free_port());
    h_ranks_proc(4, sub_worlds_rank, store);
}

/* ---- the real mpirun ------------------------------------------------------------------------- */

/* Runs a shell command. Returns its exit status, and its standard output in `out`. */
static int shell(const char *command, char *out) {
    FILE *p = popen(command, "r");
    CHECK(p != NULL);
    out[fread(out, 1, OUTPUT_NBYTES - 1, p)] = 0;
    const int status = pclose(p);
    printf("%s\n%s", command, out);
    return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

static const char *built(char *path, const char *dir, const char *name) {
    snprintf(path, 400, "%s/%s", dir, name);
    return access(path, X_OK) ? NULL : path;
}

/* Ranks on several hosts: shm supports one host, and fails at once. */
TEST(launch, several_hosts_need_another_backend) {
    fsdp_world_desc d = FSDP_ZERO;
    fsdp_world *w;
    d.logger.log = w_quiet;
    environment("RANK=0 WORLD_SIZE=4 LOCAL_RANK=0 LOCAL_WORLD_SIZE=2 MASTER_ADDR=192.0.2.1 "
                "MASTER_PORT=29500 FSDP_BACKEND=shm",
                0);
    d.timeout_ms = 100;
    for (int i = 0; i < 2; i++) {
        d.job = i ? "a name of its own" : NULL;
        CHECK_STATUS(fsdp_init(&d, &w), FSDP_ERR_UNSUPPORTED);
        CHECK_MSG(strstr(fsdp_last_error(NULL), "'shm' serves one host"), "%s",
                  fsdp_last_error(NULL));
    }
#ifndef FSDP_BACKEND_GLOO
    unsetenv("FSDP_BACKEND");
    CHECK_STATUS(fsdp_init(&d, &w), FSDP_ERR_UNSUPPORTED);
    CHECK_MSG(strstr(fsdp_last_error(NULL), "several hosts") &&
                  strstr(fsdp_last_error(NULL), "docs/cluster.md"),
              "%s", fsdp_last_error(NULL));
#endif
}

/* The same program prints the same numbers under mpirun and under tools/fsdprun. */
static void under_mpirun(int ranks) {
    static char by_mpirun[OUTPUT_NBYTES], by_fsdprun[OUTPUT_NBYTES];
    const char *dir = getenv("FSDP_BUILD");
    char hello[400], run[400], command[1000];
    if (shell("mpirun --version 2>/dev/null", by_mpirun))
        SKIP("no mpirun here: apt install openmpi-bin");
    const int open_mpi = strstr(by_mpirun, "Open MPI") != NULL;
    if (!built(hello, dir && *dir ? dir : "build", "examples/01_hello"))
        SKIP("no 01_hello here: make examples builds it");
    if (!built(run, "tools", "fsdprun")) SKIP("no tools/fsdprun here: make tools/fsdprun");
    if (open_mpi) { /* as root, and with more ranks than cores */
        setenv("OMPI_ALLOW_RUN_AS_ROOT", "1", 1);
        setenv("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1", 1);
        setenv("OMPI_MCA_rmaps_base_oversubscribe", "1", 1);
        setenv("PRTE_MCA_rmaps_default_mapping_policy", ":oversubscribe", 1);
    } else { /* its ranks get no common name */
        setenv("FSDP_JOB_ID", w_job("mpirun"), 1);
    }
    snprintf(command, sizeof command, "mpirun -n %d %s", ranks, hello);
    CHECK_EQ_INT(shell(command, by_mpirun), 0);
    unsetenv("FSDP_JOB_ID");
    snprintf(command, sizeof command, "%s -n %d %s", run, ranks, hello);
    CHECK_EQ_INT(shell(command, by_fsdprun), 0);
    CHECK(strstr(by_mpirun, "step 200  loss "));
    CHECK_EQ_STR(by_mpirun, by_fsdprun);
}

TEST(launch, mpirun_1) { under_mpirun(1); }
TEST(launch, mpirun_3) { under_mpirun(3); }
