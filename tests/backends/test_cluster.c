/* test_cluster.c - the ways to start programs on several hosts, with programs built with the Gloo
   backend (make gloo): the script of examples/cluster, fsdprun on two nodes, torchrun, mpirun and
   srun's variables; the errors when something is missing or a process dies; and that
   docs/cluster.md says the same.

   SPDX-License-Identifier: MIT */
#define TAGS NO(ASAN) | SLOW
#include "harness.h"

#include <ctype.h> /* isspace */
#include <sched.h> /* sched_getaffinity */

enum { OUTPUT_NBYTES = 1 << 15, RANKS = 4, PROCESSES_MAX = 4 };

/* ---- programs -------------------------------------------------------------------------------- */

typedef struct {
    pid_t pid;
    char path[400], output[OUTPUT_NBYTES]; /* output: stdout and stderr */
} process;

static process processes[PROCESSES_MAX];
static int num_processes;

static const char *read_output(process *p) {
    FILE *f = fopen(p->path, "r");
    size_t length = f ? fread(p->output, 1, sizeof p->output - 1, f) : 0;
    p->output[length] = 0;
    if (f) fclose(f);
    return p->output;
}

/* Starts a shell command in the background. */
static H_PRINTF(1, 2) process *start(const char *format, ...) {
    process *p = &processes[num_processes];
    char command[1500];
    va_list args;
    va_start(args, format);
    vsnprintf(command, sizeof command, format, args);
    va_end(args);
    CHECK(num_processes < PROCESSES_MAX);
    snprintf(p->path, sizeof p->path, "%s/out%d", h_tmpdir(), num_processes++);
    printf("%s\n", command);
    fflush(NULL);
    p->pid = fork();
    CHECK(p->pid >= 0);
    if (p->pid) return p;
    int file = open(p->path, O_CREAT | O_TRUNC | O_RDWR | O_APPEND, 0600);
    dup2(file, STDOUT_FILENO);
    dup2(file, STDERR_FILENO);
    close(file);
    execl("/bin/sh", "sh", "-c", command, (char *)NULL);
    _exit(127);
}

/* Reads the output until the process ends. Returns its exit status. */
static int finish(process *p) {
    int status = 0;
    CHECK_EQ_INT(waitpid(p->pid, &status, 0), p->pid);
    printf("%s", read_output(p));
    CHECK(WIFEXITED(status));
    return WEXITSTATUS(status);
}

static H_PRINTF(2, 3) void says(process *p, const char *format, ...) {
    char part[600];
    va_list args;
    va_start(args, format);
    vsnprintf(part, sizeof part, format, args);
    va_end(args);
    CHECK_MSG(strstr(p->output, part), "\"%s\" does not say \"%s\"", p->output, part);
}

static void wait_for(process *p, const char *part, int times) {
    const int64_t begin = h_calm_ms();
    for (int n = 0; n < times; usleep(1000)) {
        CHECK_MSG(h_calm_ms() - begin < 30000, "\"%s\" does not say \"%s\"", p->output, part);
        n = 0;
        for (const char *at = read_output(p); (at = strstr(at, part)) != NULL; at++) n++;
    }
}

static const char *build_dir(void) {
    const char *dir = getenv("FSDP_BUILD");
    return dir && *dir ? dir : "build";
}

/* Returns an example that is built with the Gloo backend, and selects Gloo. Skips the test without
   it. */
static const char *program(const char *name) {
    static char path[400];
    static const char *const others[] = {
        "RANK",        "WORLD_SIZE", "MASTER_ADDR",      "MASTER_PORT",
        "FSDP_JOB_ID", "FSDP_STORE", "FSDP_STORE_SERVED"};
    for (size_t i = 0; i < sizeof others / sizeof *others; i++) unsetenv(others[i]);
    setenv("FSDP_BACKEND", "gloo", 1);
    setenv("FSDP_TOKEN", "of the tests", 1); /* without it rank 0 warns */
    setenv("FSDP_TIMEOUT_MS", "20000", 1);
    snprintf(path, sizeof path, "%s/gloo/examples/%s", build_dir(), name);
    if (access(path, X_OK)) SKIP("no examples with the Gloo backend here: make gloo");
    if (access("tools/fsdprun", X_OK)) SKIP("no tools/fsdprun here: make tools/fsdprun");
    return path;
}

/* Returns the output of the smallest trainer with `ranks` ranks on one host, over shared memory. */
static const char *on_one_host(int ranks) {
    process *p = start("FSDP_BACKEND=shm tools/fsdprun -n %d %s", ranks, program("01_hello"));
    CHECK_EQ_INT(finish(p), 0);
    says(p, "step 200  loss ");
    return p->output;
}

static int has(const char *command) {
    char text[200];
    snprintf(text, sizeof text, "command -v %s >/dev/null", command);
    return system(text) == 0;
}

/* ---- all is well ----------------------------------------------------------------------------- */

static char document[1 << 16];

static const char *read_document(const char *path) {
    FILE *f = fopen(path, "r");
    CHECK_MSG(f != NULL, "no %s", path);
    document[fread(document, 1, sizeof document - 1, f)] = 0;
    fclose(f);
    return document;
}

/* The script runs the commands of docs/cluster.md, in its order. */
TEST(cluster, two_hosts) {
    const char *at = read_document("docs/cluster.md");
    int commands = 0;
    process *p = start("FSDP_LOG_LEVEL=info examples/cluster/two_hosts.sh");
    const int status = finish(p);
    if (status == 77) SKIP(p->output);
    CHECK_EQ_INT(status, 0);
    says(p, "two_hosts: the same losses as on one host\n");
    cpu_set_t cores; /* both "hosts" have all cores, for two ranks each */
    CHECK_EQ_INT(sched_getaffinity(0, sizeof cores, &cores), 0);
    says(p, CPU_COUNT(&cores) < 4
                ? "collectives run in a worker thread, as ranks are on several hosts\n"
                : "collectives run in two worker threads, as ranks are on several hosts, with two "
                  "cores for each\n");
    for (char *line = strtok(p->output, "\n"); line; line = strtok(NULL, "\n")) {
        if (strncmp(line, "host-", 5) != 0) continue;
        if (!strcmp(build_dir(), "build"))
            CHECK_MSG((at = strstr(at, line)) != NULL, "docs/cluster.md has no \"%s\"", line);
        commands++;
    }
    CHECK_EQ_INT(commands, 5);
}

/* Ranks of one host run collectives inline, however they are grouped: there is no network to wait
   for. */
static const struct {
    const char *name, *variable, *as; /* variable: for all nodes; as: for node 1 only */
} runs_inline[] = {{"near", "FSDP_COMM_THREADS=", ""},
                   {"alone", "FSDP_GLOO_NEAR=1", ""},
                   {"pairs", "FSDP_GLOO_NEAR=2", ""},
                   {"users", "FSDP_COMM_THREADS=", "unshare --user --map-root-user"}};
TEST_P(cluster, runs_inline, runs_inline) {
    const char *hello = program("01_hello");
    const int port = h_free_port();
    process *p[2];
    if (*row->as && system("unshare --user --map-root-user true 2>/dev/null"))
        SKIP("no namespaces of users here");
    for (int k = 1; k >= 0; k--)
        p[k] = start("FSDP_LOG_LEVEL=info %s exec %s tools/fsdprun -n 2 --nnodes 2 --node-rank %d "
                     "--master 127.0.0.1:%d %s",
                     row->variable, k ? row->as : "", k, port, hello);
    for (int k = 0; k < 2; k++) CHECK_EQ_INT(finish(p[k]), 0);
    says(p[0], "[fsdp r0] collectives run inline, by default\n");
}

static const struct {
    const char *name, *host;
    int nodes, ranks;
} nodes[] = {{"2x2", "127.0.0.1", 2, 2}, {"3x1", "localhost", 3, 1}, {"ipv6", "[::1]", 2, 1}};
TEST_P(cluster, fsdprun, nodes) {
    const char *hello = program("01_hello"), *expected = on_one_host(row->nodes * row->ranks);
    const int port = h_free_port();
    process *p[PROCESSES_MAX];
    if (strchr(row->host, '[') && access("/proc/net/if_inet6", F_OK)) SKIP("no IPv6 here");
    for (int k = row->nodes - 1; k >= 0; k--) /* node 0 starts last */
        p[k] = start("exec tools/fsdprun -n %d --nnodes %d --node-rank %d --master %s:%d %s",
                     row->ranks, row->nodes, k, row->host, port, hello);
    for (int k = 0; k < row->nodes; k++) {
        CHECK_EQ_INT(finish(p[k]), 0);
        CHECK_EQ_STR(p[k]->output, k ? "" : expected);
    }
}

TEST(cluster, no_secret) {
    static const char warning[] = "this job has no secret", step[] = "step 200  loss ";
    const char *hello = program("01_hello");
    const int port = h_free_port();
    process *p[2];
    unsetenv("FSDP_TOKEN");
    for (int k = 0; k < 2; k++)
        p[k] = start("exec tools/fsdprun -n 2 --nnodes 2 --node-rank %d --master 127.0.0.1:%d %s",
                     k, port, hello);
    for (int k = 0; k < 2; k++) CHECK_EQ_INT(finish(p[k]), 0);
    says(p[0], warning);
    says(p[0], step);
    CHECK(!strstr(strstr(p[0]->output, warning) + 1, warning));
    CHECK_EQ_STR(p[1]->output, "");
}

/* Returns the lines of 01_hello in the output of torchrun, which prints lines of its own. */
static const char *hellos(process *p) {
    char *to = p->output;
    for (char *line = strtok(p->output, "\n"); line; line = strtok(NULL, "\n")) {
        if (strncmp(line, "step ", 5) != 0 && strncmp(line, "ranks: ", 7) != 0) continue;
        const size_t length = strlen(line);
        memmove(to, line, length);
        to += length;
        *to++ = '\n';
    }
    *to = 0;
    return p->output;
}

static const struct {
    const char *name, *options;
    int nodes, ranks;
} torchruns[] = {{"one_host", "--master-port $PORT", 1, 3},
                 {"standalone", "--standalone", 1, 2},
                 {"two_nodes",
                  "--nnodes 2 --node-rank $NODE --master-addr 127.0.0.1 --master-port $PORT", 2,
                  2}};
TEST_P(long_cluster, torchrun, torchruns, NIGHT) {
    const char *hello = program("01_hello");
    if (!has("torchrun")) SKIP("no torchrun here: pip install torch");
    const char *expected = on_one_host(row->nodes * row->ranks);
    const int port = h_free_port();
    process *p[2];
    for (int k = 0; k < row->nodes; k++)
        p[k] = start("NODE=%d PORT=%d; exec torchrun %s --nproc-per-node %d --no-python %s", k,
                     port, row->options, row->ranks, hello);
    for (int k = 0; k < row->nodes; k++) {
        CHECK_EQ_INT(finish(p[k]), 0);
        CHECK_EQ_STR(hellos(p[k]), k ? "" : expected);
    }
}

/* torchrun restarts all ranks when one has failed: the two incarnations do not meet. */
TEST(long_cluster, torchrun_restarts, NIGHT) {
    const char *hello = program("01_hello");
    if (!has("torchrun")) SKIP("no torchrun here: pip install torch");
    const char *expected = on_one_host(2);
    process *p = start("exec torchrun --master-port %d --max-restarts 1 --nproc-per-node 2 "
                       "--no-python sh -c 'test $TORCHELASTIC_RESTART_COUNT$RANK = 01 && exit 1; "
                       "exec %s'",
                       h_free_port(), hello);
    CHECK_EQ_INT(finish(p), 0);
    CHECK_EQ_STR(hellos(p), expected);
}

/* ---- a real Slurm, and mpirun across hosts --------------------------------------------------- */

/* Runs a bash script on n1 of the lab with three hosts. $HELLO is the smallest trainer and $DIR a
   directory of this test. Returns the ended process; its exit status is 0. */
static process *in_lab(const char *script) {
    setenv("HELLO", program("01_hello"), 1);
    setenv("DIR", h_tmpdir(), 1);
    setenv("SCRIPT", script, 1);
    printf("%s\n", script);
    process *p = start("exec tests/tools/slurm_lab.sh \"$SCRIPT\"");
    const int status = finish(p);
    if (status == 77) SKIP(p->output);
    CHECK_EQ_INT(status, 0);
    return p;
}

#define MASTER_OF_MPICH "-genv MASTER_ADDR n1 -genv MASTER_PORT 29500"
#define MPICH                                                                                      \
    "command -v mpiexec.mpich >/dev/null || { echo no MPICH here; exit 77; }; "                    \
    "mpiexec.mpich -launcher rsh -launcher-exec /run/lab/bin/rsh -n 4 -hosts n1:2,n2:2 "
#define OPEN_MPI                                                                                   \
    "command -v mpirun.openmpi >/dev/null || { echo no Open MPI here; exit 77; }; "                \
    "export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1; "                           \
    "mpirun=\"mpirun.openmpi --mca plm_rsh_agent rsh -x MASTER_ADDR=n1 -x MASTER_PORT=29500\"; "

/* Four ranks in Slurm print the same as four on one host. */
static const struct {
    const char *name, *script;
} in_slurm[] = {
    {"none_on_one_host", "srun --mpi=none -N1 -n4 $HELLO"},
    {"none", "srun --mpi=none -N2 -n4 --ntasks-per-node=2 $HELLO"},
    {"pmi2", "srun --mpi=pmi2 -N2 -n4 --ntasks-per-node=2 $HELLO"},
    {"pmix", "srun --mpi=list 2>&1 | grep -q pmix || { echo no PMIx here; exit 77; }; "
             "srun --mpi=pmix -N2 -n4 --ntasks-per-node=2 $HELLO"},
    {"three_hosts", "srun -N3 -n4 $HELLO"},
    {"cyclic", "srun -N2 -n4 -m cyclic $HELLO"},
    {"other_hosts", "srun -w n3,n2 -N2 -n4 $HELLO"},
    {"no_environment", "srun --export=FSDP_BACKEND,FSDP_TOKEN -N2 -n4 $HELLO"},
    /* rank 0 does not run on the first host of the list */
    {"arbitrary", "printf '%s\\n' n3 n1 n2 n1 >$DIR/hosts; "
                  "SLURM_HOSTFILE=$DIR/hosts srun -m arbitrary -n4 $HELLO"},
    {"arbitrary_on_the_first", "printf '%s\\n' n1 n2 n1 n2 >$DIR/hosts; "
                               "SLURM_HOSTFILE=$DIR/hosts srun -m arbitrary -n4 $HELLO"},
    {"heterogeneous", "salloc -Q -w n3 -n2 : -w n1 -n2 srun --het-group=0,1 $HELLO"},
    {"array", "printf '#!/bin/sh\\nsrun $HELLO\\n' >$DIR/job; "
              "sbatch -Q --wait -a 7 -N2 -n4 -o $DIR/out $DIR/job; cat $DIR/out"},
    {"mpich", MPICH MASTER_OF_MPICH " $HELLO"},
    {"open_mpi", OPEN_MPI "$mpirun -n 4 --host n1:2,n2:2 $HELLO"},
    {"open_mpi_in_an_allocation", OPEN_MPI "salloc -Q -N2 -n4 $mpirun $HELLO"},
};
TEST_P(long_cluster, slurm, in_slurm, SECONDS(180) | NIGHT) {
    const char *expected = on_one_host(4);
    CHECK_EQ_STR(hellos(in_lab(row->script)), expected);
}

/* Steps of one allocation have different names and ports. */
TEST(long_cluster, slurm_steps_at_once, SECONDS(180) | NIGHT) {
    char expected[OUTPUT_NBYTES];
    snprintf(expected, sizeof expected, "%s", on_one_host(2));
    process *p = in_lab("cat >$DIR/steps <<'END'\n"
                        "for k in 1 2 3; do srun -Q --exact -N2 -n2 $HELLO >$DIR/$k & done; wait\n"
                        "END\n"
                        "salloc -Q -N2 -n6 bash $DIR/steps; cd $DIR; cmp 1 2 && cmp 1 3 && cat 1");
    CHECK_EQ_STR(hellos(p), expected);
}

/* A job that is requeued has the same numbers and ports as before. A rank that is left from the
   first start, here simulated by its environment, is not let in. */
TEST(long_cluster, slurm_requeue, SECONDS(180) | NIGHT) {
    char expected[OUTPUT_NBYTES];
    snprintf(expected, sizeof expected, "%s", on_one_host(2));
    process *p = in_lab(
        "cat >$DIR/job <<'END'\n"
        "#!/bin/sh\n"
        "if test -z \"$SLURM_RESTART_COUNT\"; then\n"
        "    srun sh -c 'test $SLURM_PROCID = 0 || export -p >$DIR/left'\n"
        "    scontrol requeue $SLURM_JOB_ID; exec sleep 100\n"
        "fi\n"
        "srun sh -c 'test $SLURM_PROCID = 0 || (\n"
        "        id=$SLURM_JOB_ID.$SLURM_STEP_ID; unset SLURM_RESTART_COUNT; . $DIR/left\n"
        "        echo left of $SLURM_JOB_ID.$SLURM_STEP_ID, as $id\n"
        "        FSDP_TIMEOUT_MS=3000 exec $HELLO) >$DIR/left.out 2>&1; exec $HELLO'\n"
        "END\n"
        "sbatch -Q --requeue -N2 -n2 -o $DIR/out --open-mode=truncate $DIR/job\n"
        "until test -z \"$(squeue -h)\"; do sleep 0.1; done; cat $DIR/left.out $DIR/out");
    says(p, "left of 1.0, as 1.0\n");
    says(p, "[E717] no store of job '1:0::' was found");
    says(p, "serves another job");
    CHECK_EQ_STR(hellos(p), expected);
}

/* Errors of ranks of MPICH when nothing names their job, and then when nothing names their host. */
TEST(long_cluster, slurm_lab_mpich_names_the_variable, SECONDS(180) | NIGHT) {
    process *p = in_lab(MPICH "$HELLO && exit 1; " MPICH
                              "-genv FSDP_JOB_ID mine $HELLO && exit 1; :");
    says(p,
         "[E504] 4 ranks need a common job name, and the launcher that sets PMI_RANK gives none");
    says(p, "[E724] ranks are on several hosts");
    says(p, "'mpiexec -genv MASTER_ADDR HOST");
}

static void need_open_mpi(void) {
    if (system("mpirun --version 2>/dev/null | grep -q 'Open MPI'"))
        SKIP("no mpirun of Open MPI here: apt-get install openmpi-bin");
    setenv("OMPI_ALLOW_RUN_AS_ROOT", "1", 1); /* allows root, and more ranks than cores */
    setenv("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1", 1);
    setenv("OMPI_MCA_rmaps_base_oversubscribe", "1", 1);
    setenv("PRTE_MCA_rmaps_default_mapping_policy", ":oversubscribe", 1);
}

static const struct {
    const char *name, *options;
} mpiruns[] = {{"one_host", ""},
               {"several_hosts", "-x MASTER_ADDR=127.0.0.1 -x MASTER_PORT=$PORT"},
               {"file", "-x FSDP_STORE=file://$DIR/store"}};
TEST_P(cluster, mpirun, mpiruns) {
    const char *hello = program("01_hello");
    need_open_mpi();
    const char *expected = on_one_host(3);
    process *p = start("PORT=%d DIR=%s; exec mpirun -n 3 %s %s", h_free_port(), h_tmpdir(),
                       row->options, hello);
    CHECK_EQ_INT(finish(p), 0);
    CHECK_EQ_STR(p->output, expected);
}

/* Variables that launchers set which are not installed here: for two ranks on two hosts. */
static const struct {
    const char *name, *variables;
} variables[] = {
    {"by_hand", "RANK=$K WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 MASTER_PORT=$PORT"},
    {"interface",
     "RANK=$K WORLD_SIZE=2 MASTER_ADDR=localhost MASTER_PORT=$PORT FSDP_SOCKET_IFNAME=nosuch0,lo"},
    {"mpich", "PMI_RANK=$K PMI_SIZE=2 MPI_LOCALRANKID=0 MPI_LOCALNRANKS=1 MASTER_ADDR=127.0.0.1 "
              "MASTER_PORT=$PORT"},
    {"srun", "SLURM_PROCID=$K SLURM_LOCALID=0 SLURM_NTASKS=2 SLURM_STEP_NUM_TASKS=2 "
             "SLURM_STEP_NUM_NODES=2 SLURM_NNODES=4 SLURM_JOB_ID=$PORT SLURM_STEP_ID=3 "
             "SLURM_JOB_NODELIST='n[1-4]' SLURM_STEP_NODELIST=localhost,n4"}};
TEST_P(cluster, variables, variables) {
    const char *hello = program("01_hello"), *expected = on_one_host(2);
    const int port = h_free_port();
    process *p[2];
    for (int k = 1; k >= 0; k--)
        p[k] = start("K=%d PORT=%d; export %s; exec %s", k, port, row->variables, hello);
    for (int k = 0; k < 2; k++) {
        CHECK_EQ_INT(finish(p[k]), 0);
        CHECK_EQ_STR(p[k]->output, k ? "" : expected);
    }
}

/* The first free port belongs to the other job: each rank finds its own job. */
TEST(cluster, two_jobs_on_one_port) {
    const char *hello = program("01_hello"), *expected = on_one_host(2);
    const int port = h_free_port();
    process *p[2];
    for (int k = 0; k < 2; k++)
        p[k] = start("exec tools/fsdprun -n 2 --nnodes 1 --master 127.0.0.1:%d --job %c "
                     "sh -c 'echo ready; while ! test -e %s/go; do sleep 0.02; done; exec %s'",
                     port, "ab"[k], h_tmpdir(), hello);
    for (int k = 0; k < 2; k++) wait_for(p[k], "ready", 2); /* both serve a store */
    CHECK_EQ_INT(finish(start("touch %s/go", h_tmpdir())), 0);
    for (int k = 0; k < 2; k++) {
        CHECK_EQ_INT(finish(p[k]), 0);
        says(p[k], "%s", expected);
    }
    const char *taken = "is taken: ranks meet at 127.0.0.1:";
    CHECK_EQ_INT(!strstr(p[0]->output, taken) + !strstr(p[1]->output, taken), 1);
}

/* Runs with full /tmp and /dev/shm: nothing is written there. */
static const struct { const char *name; } backends[] = {{"shm"}, {"gloo"}};
TEST_P(cluster, full_disks, backends) {
    const char *hello = program("01_hello"), *expected = on_one_host(3);
    const char *const full =
        "for d in /tmp /dev/shm; do mount -t tmpfs -o size=4k none $d || exit 77;"
        "cat /dev/zero >$d/full; done 2>/dev/null; test -x $0 || exit 77;";
    if (system("unshare -m true 2>/dev/null")) SKIP("no namespaces of mounts here");
    process *p = start(
        "FSDP_BACKEND=%s TMPDIR= exec unshare -m sh -c '%s exec tools/fsdprun -n 3 $0' "
        "%s",
        row->name, full, hello);
    const int status = finish(p);
    if (status == 77) SKIP("nothing can be mounted here");
    CHECK_EQ_INT(status, 0);
    CHECK_EQ_STR(p->output, expected);
}

/* ---- something is missing -------------------------------------------------------------------- */

/* Two nodes with one rank each, with different options or variables. NULL: the node does not start.
   */
static const struct {
    const char *name, *node_0, *node_1;
    const char *texts[2]; /* expected on node 0 and node 1 */
} missing[] = {
    {"node_1",
     "",
     NULL,
     {"rank 1 has not joined within 1.0 s. The store is at tcp://127.0.0.1:", ""}},
    {"node_0", NULL, "", {"", "[E791] the launcher serves the store of job"}},
    {"same_job", "", "--job other", {"rank 1 has not joined", " serves another job"}},
    {"same_size",
     "",
     "-n 2",
     {"was started as one of 4 ranks", "give all ranks the same world size"}},
    {"token", "FSDP_TOKEN=a", "FSDP_TOKEN=b", {"rank 1 has not joined", "FSDP_TOKEN"}},
    {"interface", "", "FSDP_SOCKET_IFNAME=nosuch0", {"rank 1", "FSDP_SOCKET_IFNAME is 'nosuch0'"}},
};
TEST_P(cluster, missing, missing) {
    const char *hello = program("01_hello");
    const char *const changes[2] = {row->node_0, row->node_1};
    const int port = h_free_port();
    const int64_t begin = h_calm_ms();
    process *p[2] = {NULL, NULL};
    setenv("FSDP_TIMEOUT_MS", "1000", 1);
    for (int k = 0; k < 2; k++) {
        const char *change = changes[k];
        const int variable = change && strchr(change, '=') != NULL;
        if (change)
            p[k] = start("%s exec tools/fsdprun -n 1 --nnodes 2 --node-rank %d "
                         "--master 127.0.0.1:%d %s %s",
                         variable ? change : "", k, port, variable ? "" : change, hello);
    }
    for (int k = 0; k < 2; k++) {
        if (!p[k]) continue;
        CHECK_EQ_INT(finish(p[k]), 1);
        says(p[k], "%s", row->texts[k]);
    }
    CHECK(h_calm_ms() - begin < 6000);
}

/* mpirun has placed ranks on several hosts, and nothing says where rank 0 is. */
TEST(cluster, missing_master) {
    const char *hello = program("01_hello");
    need_open_mpi();
    process *p = start("exec mpirun -n 2 env OMPI_COMM_WORLD_LOCAL_SIZE=1 %s", hello);
    CHECK(finish(p) != 0);
    says(p, "mpirun -x MASTER_ADDR=HOST -x MASTER_PORT=29500");
}

/* ---- a process dies -------------------------------------------------------------------------- */

typedef struct {
    const char *name;
    int rank, launcher;    /* the process that is killed: a rank, or if -1 the launcher of a node */
    const char *others[2]; /* texts of the two nodes; NULL: none is left to print it */
} death;
static const death deaths[] = {
    {"rank_3", 3, 0, {"rank 3 has died", "rank 3 (process "}},
    {"rank_1", 1, 0, {"rank 1 (process ", "rank 1 has died"}},
    {"rank_0", 0, 0, {"rank 0 (process ", "rank 0 has died"}},
    {"launcher_of_node_0", -1, 0, {NULL, "the launcher"}},
    {"launcher_of_node_1", -1, 1, {" has died", NULL}},
};
TEST_P(cluster, death, deaths) {
    const char *gpt = program("train_gpt");
    const int port = h_free_port();
    process *p[2];
    for (int k = 0; k < 2; k++)
        p[k] = start("exec tools/fsdprun -n 2 --nnodes 2 --node-rank %d --master 127.0.0.1:%d "
                     "sh -c 'echo rank $RANK is process $$.; exec %s --data fsdp.h --layers 1 "
                     "--heads 1 --channels 16 --context 16 --batch 4 --sample 0 --steps 1000000'",
                     k, port, gpt);
    wait_for(p[0], "step  ", 2); /* training has started */
    char text[64];
    snprintf(text, sizeof text, "rank %d is process ", row->rank);
    pid_t victim = p[row->launcher]->pid;
    if (row->rank >= 0) {
        wait_for(p[row->rank / 2], text, 1);
        victim = atoi(strstr(p[row->rank / 2]->output, text) + strlen(text));
    }
    const int64_t begin = h_now_ms(), calm = h_calm_ms();
    CHECK_EQ_INT(kill(victim, SIGKILL), 0);
    for (int k = 0; k < 2; k++) {
        if (row->others[k]) {
            CHECK(finish(p[k]) != 0);
            says(p[k], "%s", row->others[k]);
        } else {
            CHECK_EQ_INT(waitpid(p[k]->pid, NULL, 0), p[k]->pid);
        }
    }
    h_message("both nodes have ended after %lld ms", (long long)(h_now_ms() - begin));
    CHECK(h_calm_ms() - calm < 5000);
}

/* ---- what the document says of it ------------------------------------------------------------ */

/* Runs the document's lines that build and start a program, in a directory with copies of the
   sources. */
TEST(long_cluster, build_of_the_document, SECONDS(120) | NIGHT) {
    const char *at = strstr(read_document("docs/cluster.md"), "\nc++ ");
    const char *end = at ? strstr(at, "\n```") : NULL;
    (void)program("01_hello"); /* skips if there is no Gloo to build with */
    CHECK(at && end);
    unsetenv("FSDP_BACKEND"); /* the build has one backend only */
    process *p = start("set -e; cp -r fsdp*.h src backends examples tools %s; cd %s%.*s",
                       h_tmpdir(), h_tmpdir(), (int)(end - at), at);
    CHECK_EQ_INT(finish(p), 0);
    CHECK_EQ_STR(p->output, on_one_host(2));
}

/* Removes blanks and quotes, so that strings in pieces become one. Returns the end. */
static char *squeeze(char *to, const char *from, const char *end) {
    for (; from < end; from++)
        if (!isspace((unsigned char)*from) && *from != '"') *to++ = *from;
    *to = 0;
    return to;
}

/* Each error text in the document's table appears in a source; "..." stands for the parts that
   vary. */
TEST(cluster, errors_of_the_document) {
    static const char *const paths[] = {"backends/fsdp_store.h",
                                        "backends/fsdp_store_core.h",
                                        "backends/fsdp_store_frames.h",
                                        "backends/fsdp_store_server.h",
                                        "backends/fsdp_store_sockets.h",
                                        "backends/fsdp_comm.h",
                                        "backends/fsdp_signature.h",
                                        "src/core/launch.h",
                                        "tools/fsdprun.c"};
    static char sources[1 << 19], text[1 << 18];
    char *to = sources;
    int rows = 0;
    for (size_t i = 0; i < sizeof paths / sizeof *paths; i++) {
        FILE *f = fopen(paths[i], "r");
        CHECK_MSG(f != NULL, "no %s", paths[i]);
        const size_t length = fread(text, 1, sizeof text, f);
        fclose(f);
        CHECK(length < sizeof text && to + length < sources + sizeof sources);
        to = squeeze(to, text, text + length);
    }
    const char *at = strstr(read_document("docs/cluster.md"), "| the text says |");
    CHECK(at != NULL);
    for (; (at = strstr(at, "\n| `")) != NULL && at < strstr(document, "## Deadlines"); rows++) {
        const char *end = strchr(at += 4, '`');
        if (!strncmp(at, "Connection ", 11)) continue; /* an error text of the system */
        while (at < end) {
            char piece[300];
            const char *dots = strstr(at, "..."), *stop = dots && dots < end ? dots : end;
            squeeze(piece, at, stop);
            CHECK_MSG(strstr(sources, piece), "no source says \"%.*s\"", (int)(stop - at), at);
            at = stop < end ? stop + 3 : end;
        }
    }
    CHECK(rows >= 15);
}
