/* test_fsdptrace.c - flight records and `fsdptrace hang`: jobs in which one rank is killed,
   stopped, late, or makes another call, at random places, on each backend. From the files only, the
   tool names the rank, its last call and the operation in which the others wait, while the job
   lives and after all of it was killed. The program under test is $FSDPTRACE, or tools/fsdptrace.

   SPDX-License-Identifier: MIT */
#define TAGS GLOO | NCCL | SLOW | SECONDS(300)
#include "harness.h"
#include "library.c"
#include <glob.h>
#include <sched.h> /* unshare */
#include <sys/mount.h>
#include <sys/prctl.h>

enum { RANKS = 4, UNITS = 3, CALLS = 4 * UNITS, STEPS = 6 };
enum { LATE, KILLED, STOPPED, OTHER_CALL, OTHER_COUNT, QUITS, NO_FAULT };

/* The state that the ranks of a job share with the test. */
typedef struct {
    int fault, rank, step, call; /* the fault comes before this call of this rank */
    int faulty;                  /* 1: the fault has happened */
    pid_t pid;                   /* this rank's */
    int goes;                    /* 1: the rank may shut down */
    char last[64];               /* the call before the fault */
    char next[64];               /* the first operation of a group after it */
} plan_of_job;

static plan_of_job *board;

static const char *tool(void) {
    const char *path = getenv("FSDPTRACE");
    if (!path || !*path) path = "tools/fsdptrace";
    if (access(path, X_OK)) SKIP("no tools/fsdptrace here: make tools/fsdptrace");
    return path;
}

/* ---- the job --------------------------------------------------------------------------------- */

static struct {
    int call;                /* number of calls so far in this step */
    char ops[CALLS + 1][64]; /* first operation of a group that each call issued */
    char names[CALLS + 1][64];
} own;

static int on_op(void *user, fsdp_model *model, fsdp_op *op) {
    (void)user, (void)model;
    if (op->kind >= FSDP_OP_ALL_GATHER && op->kind <= FSDP_OP_ALL_REDUCE && own.call <= CALLS &&
        !own.ops[own.call][0])
        snprintf(own.ops[own.call], sizeof own.ops[0], "%s of '%s'", fsdp_op_name(op->kind),
                 op->what);
    return 0;
}

static void show(char *to, const char *text) { snprintf(to, 64, "%s", text); }

static int fault(fsdp_world *w) {
    double value[2] = {1, 1};
    int next = own.call;
    while (next < CALLS && !own.ops[next][0]) next++;
    show(board->next, next < CALLS ? own.ops[next] : own.ops[0]);
    show(board->last, own.names[own.call ? own.call - 1 : CALLS]);
    board->pid = getpid();
    __atomic_store_n(&board->faulty, 1, __ATOMIC_SEQ_CST);
    switch (board->fault) {
    case LATE:
    case KILLED:
    case STOPPED:
        for (;;) pause();
    case OTHER_CALL: (void)fsdp_barrier(w); break;
    case QUITS:
        while (!__atomic_load_n(&board->goes, __ATOMIC_SEQ_CST)) usleep(1000);
        return 1;
    default: (void)fsdp_all_reduce(w, NULL, value, 2, FSDP_F64, FSDP_SUM);
    }
    return 0;
}

/* Called before a call of a unit; 1: this rank ends. For a fault in counts the other ranks sum,
   too. */
static int before(fsdp_model *m, int step, const char *what, int unit) {
    int is_place = board->fault != NO_FAULT && step == board->step && own.call == board->call;
    fsdp_world *w = fsdp_model_world(m);
    int is_me = fsdp_rank(w) == board->rank;
    if (is_place && is_me && fault(w)) return 1;
    if (is_place && !is_me && board->fault == OTHER_COUNT) {
        double value = 1;
        (void)fsdp_all_reduce(w, NULL, &value, 1, FSDP_F64, FSDP_SUM);
    }
    snprintf(own.names[own.call], sizeof own.names[0], "%s of 'h.%d'", what, unit);
    return 0;
}

static int rank_main(fsdp_world *w, void *arg) {
    fsdp_model *m;
    fsdp_unit *u[UNITS];
    fsdp_extension e = FSDP_ZERO;
    (void)arg;
    (void)prctl(PR_SET_PDEATHSIG, SIGKILL); /* no process is left if the test fails */
    e.op = on_op;
    if (fsdp_model_create(w, NULL, &m)) return 1;
    for (int i = 0; i < UNITS; i++) {
        char name[16];
        snprintf(name, sizeof name, "h.%d", i);
        fsdp_param_desc p[2] = {fsdp_mat("w", 8 + i, 16), fsdp_vec("b", 5)};
        fsdp_unit_desc ud = FSDP_ZERO;
        ud.name = name, ud.params = p, ud.num_params = 2;
        if (fsdp_fully_shard(m, &ud, &u[i])) return 1;
    }
    if (fsdp_attach(m, &e)) return 1;
    for (int step = 0; step < STEPS; step++) {
        own.call = 0;
        if (step < 2) memset(own.ops, 0, sizeof own.ops);
        for (int half = 0; half < 2; half++)
            for (int k = 0; k < UNITS; k++) {
                int i = half ? UNITS - 1 - k : k;
                if (before(m, step, half ? "pre_backward" : "pre_forward", i)) return FSDP_OK;
                if (half ? fsdp_pre_backward(u[i]) : fsdp_pre_forward(u[i])) return 1;
                own.call++;
                for (int p = 0; p < 2 && half; p++)
                    if (!fsdp_grad(u[i], p)) return 1;
                if (before(m, step, half ? "post_backward" : "post_forward", i)) return FSDP_OK;
                if (half ? fsdp_post_backward(u[i]) : fsdp_post_forward(u[i])) return 1;
                own.call++;
            }
        show(own.names[CALLS], "finalize_backward");
        if (fsdp_finalize_backward(m)) return 1;
    }
    return FSDP_OK;
}

/* ---- the tool -------------------------------------------------------------------------------- */

static char output[16384];

/* Runs `fsdptrace hang` on the directory. Returns its exit status, and its text in `output`. */
static int hang(const char *dir, const char *options) {
    char command[1200];
    snprintf(command, sizeof command, "%s hang %s %s 2>&1", tool(), dir, options);
    FILE *f = popen(command, "r");
    CHECK(f != NULL);
    size_t got = fread(output, 1, sizeof output - 1, f);
    output[got] = 0;
    int status = pclose(f);
    CHECK_MSG(WIFEXITED(status), "%s", output);
    return WEXITSTATUS(status);
}

static int says(const char *text) { return strstr(output, text) != NULL; }

/* Returns the line that begins with a text; "" if there is none. */
static const char *line(const char *begin) {
    static char text[2048];
    const char *at = output;
    while (at && strncmp(at, begin, strlen(begin)) != 0)
        at = (at = strchr(at, '\n')) ? at + 1 : NULL;
    snprintf(text, sizeof text, "%.*s", at ? (int)strcspn(at, "\n") : 0, at ? at : "");
    return text;
}

static void others_of(int rank, char *out, size_t cap) { /* as the tool writes ranks */
    static const char *const lists[RANKS] = {"1-3", "0, 2, 3", "0, 1, 3", "0-2"};
    snprintf(out, cap, "ranks %s wait in ", lists[rank]);
}

static pid_t start(const char *dir) {
    fflush(NULL);
    pid_t pid = fork();
    CHECK(pid >= 0);
    if (pid) return pid;
    fsdp_spawn_desc d = FSDP_ZERO;
    fsdp_world_desc wd = FSDP_ZERO;
    (void)setpgid(0, 0);
    (void)prctl(PR_SET_PDEATHSIG, SIGKILL);
    wd.flight_record = dir;
    wd.log_level = FSDP_LOG_NONE;
    wd.timeout_ms = 600000;
    d.num_ranks = RANKS;
    d.grace_ms = 600000; /* the others end by themselves, or stay as they are */
    d.world = &wd;
    _exit(fsdp_spawn(&d, rank_main, NULL) != FSDP_OK);
}

/* Returns 1 if the tool has found the fault: the missing rank's line, and the others' operation. */
static int found(int fault) {
    char begin[64], text[160];
    const char *differs = "";
    const char *call = fault == OTHER_CALL ? "fsdp_barrier" : "fsdp_all_reduce";
    if (fault == OTHER_CALL || fault == OTHER_COUNT) {
        differs = line("first difference in group ");
        snprintf(text, sizeof text, "rank %d: all_reduce of '%s'", board->rank, call);
        if (strstr(differs, text)) /* the ops with this number are the model's and the world's */
            return strstr(differs, " of the world)") &&
                   strstr(differs, fault == OTHER_CALL ? board->next : "1 elements of f64");
        /* A reduction has its own communicator: so each side waits for the other. */
        if (fault == OTHER_COUNT || !says("The ranks make different calls")) return 0;
        snprintf(text, sizeof text, "rank %d waits in all_reduce of '%s'", board->rank, call);
        if (!says(text)) return 0;
    }
    others_of(board->rank, begin, sizeof begin);
    snprintf(text, sizeof text, "%s%s", begin, board->next);
    if (fault == OTHER_CALL) return !strncmp(line(begin), text, strlen(text));
    if (strncmp(line(begin), text, strlen(text)) != 0) return 0;
    snprintf(begin, sizeof begin, "rank %d: it", board->rank);
    if (fault == QUITS) return strstr(line(begin), "it has called fsdp_shutdown") != NULL;
    snprintf(text, sizeof text, "its last call was %s, ", board->last);
    return strstr(line(begin), text) != NULL;
}

/* Starts a job, and waits until a random rank reaches a random call, at which the fault happens. */
static pid_t begin_job(uint64_t *random, int kind, char *dir, size_t cap) {
    snprintf(dir, cap, "%s/record", h_tmpdir());
    h_remove_tree(dir);
    memset(board, 0, sizeof *board);
    board->fault = kind;
    board->rank = (int)(h_rand64(random) % RANKS);
    board->step = 2 + (int)(h_rand64(random) % (STEPS - 3));
    board->call = (int)(h_rand64(random) % CALLS);
    pid_t pid = start(dir);
    while (!__atomic_load_n(&board->faulty, __ATOMIC_SEQ_CST)) usleep(1000);
    return pid;
}

/* Kills the remains of a job, and runs the tool again, with the files only. */
static int end_job(pid_t pid, const char *dir) {
    int status, rc;
    (void)kill(-pid, SIGKILL);
    CHECK_EQ_INT(waitpid(pid, &status, 0), pid);
    do rc = hang(dir, "");
    while (!says("No process runs here") && !h_is_over(-500));
    return rc;
}

static void one_job(uint64_t *random, int kind) {
    char dir[400];
    pid_t pid = begin_job(random, kind, dir, sizeof dir);
    int rc = -1, is_late = kind == KILLED || kind == STOPPED || kind == QUITS;
    do { /* until the others have come; then the rank ends: earlier, an earlier call might fail */
        CHECK_MSG(!h_is_over(-500),
                  "fault %d of rank %d before call %d of step %d: "
                  "expected %s; last %s: %s",
                  kind, board->rank, board->call, board->step, board->next, board->last, output);
        rc = hang(dir, "--after 0");
        usleep(20000);
        if (!is_late || !found(LATE)) continue;
        is_late = 0, rc = -1;
        __atomic_store_n(&board->goes, 1, __ATOMIC_SEQ_CST);
        if (kind != QUITS) CHECK(!kill(board->pid, kind == KILLED ? SIGKILL : SIGSTOP));
    } while (is_late || rc != 1 || !found(kind) || (kind == KILLED && !says(" has died")) ||
             (kind == STOPPED && !says(" is stopped (SIGSTOP)")));
    CHECK_EQ_INT(end_job(pid, dir), 1);
    CHECK_MSG(found(kind), "afterwards: %s", output);
}

static const struct {
    const char *name;
    int kind;
} kinds[] = {{"late", LATE},
             {"killed", KILLED},
             {"stopped", STOPPED},
             {"other_call", OTHER_CALL},
             {"other_count", OTHER_COUNT},
             {"quits", QUITS}};

TEST_P(fsdptrace, hang, kinds) {
    uint64_t random = h_seed() + (uint64_t)row->kind;
    board = (plan_of_job *)mmap(NULL, sizeof *board, PROT_READ | PROT_WRITE,
                                MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    CHECK(board != MAP_FAILED);
    (void)tool();
    for (int i = 0; i < 12; i++) one_job(&random, row->kind);
}

/* ---- files ----------------------------------------------------------------------------------- */

/* Makes the files of a job whose rank 2 is late, after all of it was killed. */
static void make_files(char *dir, size_t cap) {
    uint64_t random = 5;
    snprintf(dir, cap, "%s/record", h_tmpdir());
    board = (plan_of_job *)mmap(NULL, sizeof *board, PROT_READ | PROT_WRITE,
                                MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    CHECK(board != MAP_FAILED);
    do one_job(&random, LATE);
    while (board->rank != 2);
}

static void path_of(const char *dir, int rank, char *path, size_t cap) {
    glob_t found;
    char pattern[420];
    snprintf(pattern, sizeof pattern, "%s/*.%d.flight", dir, rank);
    CHECK_EQ_INT(glob(pattern, 0, NULL, &found), 0);
    CHECK_EQ_INT(found.gl_pathc, 1);
    snprintf(path, cap, "%s", found.gl_pathv[0]);
    globfree(&found);
}

static void read_record(const char *dir, int rank, fsdpi_flight_record *r) {
    char path[600];
    path_of(dir, rank, path, sizeof path);
    FILE *f = fopen(path, "r");
    CHECK(f != NULL);
    CHECK_EQ_INT(fread(r, sizeof *r, 1, f), 1);
    CHECK_EQ_INT(fclose(f), 0);
}

/* A rank is killed while it waits with others, and they fail: it is named while one rank lives,
   and when none does. */
TEST(fsdptrace, killed_in_an_operation, NO(GLOO | NCCL)) {
    static fsdpi_flight_record r;
    char dir[400], begin[64];
    uint64_t random = h_seed();
    board = (plan_of_job *)mmap(NULL, sizeof *board, PROT_READ | PROT_WRITE,
                                MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    CHECK(board != MAP_FAILED);
    (void)tool();
    for (int i = 0; i < 4; i++) {
        pid_t pid = begin_job(&random, LATE, dir, sizeof dir);
        const int killed = (board->rank + 1) % RANKS;
        do CHECK_MSG(!h_is_over(-500), "not late: %s", output);
        while (hang(dir, "--after 0") != 1 || !found(LATE));
        read_record(dir, killed, &r);
        CHECK(!kill(r.pid, SIGKILL));
        for (int k = 0; k < RANKS; k++) {
            do {
                CHECK_MSG(!h_is_over(-500), "rank %d does not fail", k);
                read_record(dir, k, &r);
            } while (k != killed && k != board->rank && r.state != FSDPI_FLIGHT_FAILED);
        }
        snprintf(begin, sizeof begin, "rank %d: it was in ", killed);
        CHECK_EQ_INT(hang(dir, "--after 0"), 1);
        CHECK_MSG(strstr(line(begin), " has died"), "one lives: %s", output);
        CHECK_EQ_INT(end_job(pid, dir), 1);
        CHECK_MSG(strstr(line(begin), " has died") && !says("look at network"), "afterwards: %s",
                  output);
        for (int k = 0; k < RANKS; k++) { /* they fail for another reason: the launcher killed it */
            char path[600];
            read_record(dir, k, &r);
            if (r.state != FSDPI_FLIGHT_FAILED) continue;
            r.status = FSDP_ERR_MISMATCH;
            path_of(dir, k, path, sizeof path);
            FILE *f = fopen(path, "r+");
            CHECK(f != NULL);
            CHECK_EQ_INT(fwrite(&r, sizeof r, 1, f), 1);
            CHECK_EQ_INT(fclose(f), 0);
        }
        CHECK_EQ_INT(hang(dir, ""), 1);
        CHECK_MSG(!strstr(line(begin), " has died"), "%s", output);
    }
}

/* A file may be truncated at any byte: the rest is read, and an invalid record is named. */
TEST(fsdptrace, cut_files, NO(GLOO | NCCL) | SLOW) {
    char dir[400], path[600], name[64];
    const long whole = (long)sizeof(fsdpi_flight_record);
    const long head = (long)offsetof(fsdpi_flight_record, comm);
    make_files(dir, sizeof dir);
    path_of(dir, 0, path, sizeof path);
    for (long size = whole - 1; size >= 0; size -= size > whole - 130 ? 1
                                                   : size > head + 64 ? 4099
                                                                      : 7) {
        CHECK_EQ_INT(truncate(path, size), 0);
        CHECK_EQ_INT(hang(dir, ""), 1);
        CHECK_MSG(says("rank 2: its last call was "), "%ld bytes: %s", size, output);
        snprintf(name, sizeof name, "no readable record of rank 0");
        CHECK_MSG(says(name) == (size <= head), "%ld bytes: %s", size, output);
        if (size <= head)
            CHECK_MSG(says("it is damaged, or of another version of fsdp.h"), "%s", output);
    }
}

/* A header with an impossible size is no record. */
TEST(fsdptrace, no_size, NO(GLOO | NCCL)) {
    static fsdpi_flight_record r;
    char dir[400], path[600];
    make_files(dir, sizeof dir);
    read_record(dir, 0, &r);
    path_of(dir, 0, path, sizeof path);
    r.size = -5;
    r.real_ns += 1000000000; /* the latest one */
    FILE *f = fopen(path, "r+");
    CHECK(f != NULL);
    CHECK_EQ_INT(fwrite(&r, sizeof r, 1, f), 1);
    CHECK_EQ_INT(fclose(f), 0);
    CHECK_EQ_INT(hang(dir, ""), 1);
    CHECK_MSG(says("rank 2: its last call was "), "%s", output);
}

static void write_record(const char *dir, int rank, const fsdpi_flight_record *r) {
    char path[600];
    path_of(dir, rank, path, sizeof path);
    FILE *f = fopen(path, "r+");
    CHECK(f != NULL);
    CHECK_EQ_INT(fwrite(r, sizeof *r, 1, f), 1);
    CHECK_EQ_INT(fclose(f), 0);
}

/* Copies the ranks' present records to another directory, where they can be changed. */
static void copy_records(const char *dir, char *to, size_t cap, fsdpi_flight_record *all) {
    char path[600], copy[600];
    snprintf(to, cap, "%s/copy", h_tmpdir());
    CHECK(!mkdir(to, 0700) || errno == EEXIST);
    for (int k = 0; k < RANKS; k++) {
        read_record(dir, k, &all[k]);
        path_of(dir, k, path, sizeof path);
        snprintf(copy, sizeof copy, "%s%s", to, strrchr(path, '/'));
        FILE *f = fopen(copy, "w");
        CHECK(f != NULL);
        CHECK_EQ_INT(fwrite(&all[k], sizeof *all, 1, f), 1);
        CHECK_EQ_INT(fclose(f), 0);
    }
}

/* A rank without a record is missing in the groups that it may be a member of: rank 0 waits for
   rank 2, once in a group of all four, once in {0, 2}. */
TEST(fsdptrace, members_without_a_record, NO(GLOO | NCCL)) {
    static fsdpi_flight_record r;
    char dir[400], path[600];
    make_files(dir, sizeof dir);
    for (int rank = 1; rank < RANKS; rank += 2) {
        path_of(dir, rank, path, sizeof path);
        CHECK_EQ_INT(unlink(path), 0);
    }
    for (int of_two = 0; of_two < 2; of_two++) {
        for (int rank = 0; rank < RANKS && of_two; rank += 2) {
            read_record(dir, rank, &r);
            for (uint32_t c = 1; c < r.num_comms; c++)
                r.comm[c].size = 2, r.comm[c].stride = 2, r.comm[c].members = 1;
            write_record(dir, rank, &r);
        }
        CHECK_EQ_INT(hang(dir, ""), 1);
        CHECK_MSG(says("no readable record of ranks 1, 3\n") && says("rank 2: its last call was "),
                  "%s", output);
        CHECK_MSG(says("ranks 1, 3: there is no readable record of it") == !of_two, "%s", output);
    }
}

/* The one rank that others wait for waits, too, for one that is no member: that is no other call. */
TEST(fsdptrace, one_that_waits_elsewhere, NO(GLOO | NCCL)) {
    static fsdpi_flight_record r;
    char dir[400];
    make_files(dir, sizeof dir);
    read_record(dir, 2, &r);
    fsdpi_flight_op *last = &r.op[(r.begun - 1) % FSDPI_FLIGHT_OPS];
    last->kind = FSDP_OP_RECV, last->turn = 0, last->end_ns = 0;
    write_record(dir, 2, &r);
    CHECK_EQ_INT(hang(dir, ""), 1);
    CHECK_MSG(!strncmp(line("rank 2: it"), "rank 2: it was in recv of ", 26), "%s", output);
    CHECK_MSG(says("The others wait for these ranks: look at what they do.\n"), "%s", output);
}

/* A rank that others wait for waits for one that is no member, and another one is stopped within an
   operation: they do not wait for each other. */
TEST(fsdptrace, stopped_in_an_operation, NO(GLOO | NCCL)) {
    static fsdpi_flight_record all[RANKS];
    char dir[400], to[400], begin[64];
    uint64_t random = h_seed();
    board = (plan_of_job *)mmap(NULL, sizeof *board, PROT_READ | PROT_WRITE,
                                MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    CHECK(board != MAP_FAILED);
    (void)tool();
    pid_t pid = begin_job(&random, LATE, dir, sizeof dir);
    const int late = board->rank, stopped = (late + 1) % RANKS;
    do CHECK_MSG(!h_is_over(-500), "not late: %s", output);
    while (hang(dir, "--after 0") != 1 || !found(LATE));
    copy_records(dir, to, sizeof to, all);
    fsdpi_flight_op *last = &all[late].op[(all[late].begun - 1) % FSDPI_FLIGHT_OPS];
    last->kind = FSDP_OP_RECV, last->turn = 0, last->end_ns = 0;
    write_record(to, late, &all[late]);
    CHECK(!kill(all[stopped].pid, SIGSTOP));
    snprintf(begin, sizeof begin, "rank %d: it is in ", stopped);
    do CHECK_MSG(!h_is_over(-500), "not stopped: %s", output);
    while (hang(to, "--after 0") != 1 || !strstr(line(begin), " is stopped (SIGSTOP)"));
    CHECK_MSG(says("The others wait for ") && !says("The ranks make different calls"), "%s",
              output);
    (void)end_job(pid, dir);
}

/* A record that was shut down on another host has a known end; of two failures the earlier one
   is the first. */
TEST(fsdptrace, records_that_have_ended, NO(GLOO | NCCL)) {
    static fsdpi_flight_record r;
    char dir[400], text[80];
    make_files(dir, sizeof dir);
    read_record(dir, 3, &r);
    r.host[0] ^= 1, r.state = FSDPI_FLIGHT_SHUT_DOWN;
    write_record(dir, 3, &r);
    CHECK_EQ_INT(hang(dir, ""), 1);
    CHECK_MSG(says("No process runs here: "), "%s", output);
    const int64_t at = r.mono_ns;
    for (int first = 0; first < 2; first++) {
        for (int k = 0; k < 2; k++) {
            read_record(dir, k, &r);
            r.state = FSDPI_FLIGHT_FAILED, r.status = FSDP_ERR_TIMEOUT;
            r.ended_ns = at + (k == first ? 1000 : 1000000); /* on one clock */
            write_record(dir, k, &r);
        }
        CHECK_EQ_INT(hang(dir, ""), 1);
        snprintf(text, sizeof text, "rank %d was the first to report an error, ", first);
        CHECK_MSG(says(text), "%s", output);
    }
}

/* Checks that the output is one JSON object, by its braces, brackets and quotes. */
static void check_json(void) {
    char open[64];
    int depth = 0, in_text = 0;
    for (const char *c = output; *c; c++) {
        CHECK_MSG(depth || c == output || *c == '\n', "after its end: %s", c);
        if (in_text && *c == '\\') c++;
        else if (*c == '"') in_text = !in_text;
        else if (!in_text && strchr("{[", *c) && depth < 64) open[depth++] = *c == '{' ? '}' : ']';
        else if (!in_text && strchr("}]", *c))
            CHECK_MSG(depth && open[--depth] == *c, "%s", output);
    }
    CHECK_MSG(!depth && !in_text, "%s", output);
}

TEST(fsdptrace, json, NO(GLOO | NCCL)) {
    static fsdpi_flight_record r;
    char dir[400];
    make_files(dir, sizeof dir);
    for (int failed = 0; failed < 2; failed++) {
        CHECK_EQ_INT(hang(dir, "--json"), 1);
        check_json();
        CHECK_EQ_INT(says("\"failure\": {\"rank\": 3, \"text\": "), failed);
        read_record(dir, 3, &r);
        r.state = FSDPI_FLIGHT_FAILED, r.status = FSDP_ERR_TIMEOUT, r.ended_ns = r.opened_ns;
        snprintf(r.failure, sizeof r.failure, "a \"text\" {");
        write_record(dir, 3, &r);
    }
}

/* Texts that fill their field, without an end: no byte after the field is shown. */
TEST(fsdptrace, texts_without_an_end, NO(GLOO | NCCL)) {
    static fsdpi_flight_record r;
    char dir[400], text[sizeof r.op[0].what];
    make_files(dir, sizeof dir);
    memset(text, 'y', sizeof text);
    for (int last = 0; last < 2; last++) {
        for (int k = 0; k < RANKS; k++) { /* its last operation: the first entry, or the last one */
            read_record(dir, k, &r);
            const uint32_t at = (uint32_t)(r.begun - 1) % FSDPI_FLIGHT_OPS;
            const uint32_t to = last ? FSDPI_FLIGHT_OPS - 1 : 0;
            r.op[to] = r.op[at];
            if (to != at) r.op[at].number = 0;
            r.op[to].number = 1 + FSDPI_FLIGHT_OPS + to, r.begun = r.op[to].number;
            memcpy(r.op[to].what, text, sizeof text);
            if (!last) memset(&r.op[1].begin_ns, 'y', sizeof r.op[1].begin_ns);
            memset(r.backend, 'b', sizeof r.backend);
            memcpy(r.call_what, text, sizeof text);
            write_record(dir, k, &r);
        }
        (void)hang(dir, "--after 0");
        text[sizeof text - 1] = 0;
        CHECK_MSG(says(text) && says(" of '"), "%s", output);
        CHECK_MSG(says(" over bbbbbbbbbbbbbbb, 4 ranks"), "%s", output);
        text[sizeof text - 1] = 'y';
        for (const char *c = output; (c = strchr(c, 'y')); c += strspn(c, "y"))
            CHECK_MSG(strspn(c, "y") < sizeof text, "%s", output);
    }
}

/* A world of one rank needs no name. */
TEST(fsdptrace, a_job_without_a_name, NO(GLOO | NCCL)) {
    char dir[400];
    fsdp_world_desc d = FSDP_ZERO;
    fsdp_world *w;
    snprintf(dir, sizeof dir, "%s/record", h_tmpdir());
    d.flight_record = dir;
    CHECK_OK(fsdp_init(&d, &w));
    CHECK_EQ_STR(w->job, "");
    CHECK_EQ_INT(hang(dir, ""), 0);
    CHECK_MSG(says("job 'job' over ") && says(", 1 rank. Processes: 1 run"), "%s", output);
    CHECK_OK(fsdp_shutdown(w));
}

/* The id identifies the files of one run, whatever the hosts' clocks are. */
TEST(fsdptrace, an_earlier_run, NO(GLOO | NCCL)) {
    static const int64_t shifts_s[] = {0, -86400 * 3, 86400 * 3, -60, 30};
    static fsdpi_flight_record all[RANKS], r;
    char dir[400], text[80];
    make_files(dir, sizeof dir);
    for (int k = 0; k < RANKS; k++) read_record(dir, k, &all[k]);
    for (int k = 0; k < RANKS; k++) CHECK(all[k].id && all[k].id == all[0].id && all[k].own_id);
    CHECK_EQ_INT(all[0].own_id + all[1].own_id + all[2].own_id + all[3].own_id, all[0].id);
    for (int other = 0; other < RANKS; other++)
        for (size_t s = 0; s < sizeof shifts_s / sizeof *shifts_s; s++) {
            r = all[other];
            r.real_ns += shifts_s[s] * 1000000000; /* this run: it counts */
            write_record(dir, other, &r);
            CHECK_EQ_INT(hang(dir, ""), 1);
            CHECK_MSG(!says("no readable record of rank") && !says("left out"), "%s", output);
            CHECK_MSG(says("rank 2: its last call was "), "%s", output);
            r.id++; /* another run */
            write_record(dir, other, &r);
            CHECK_EQ_INT(hang(dir, ""), 1);
            snprintf(text, sizeof text, "no readable record of rank %d\n", other);
            CHECK_MSG(says(text), "%s", output);
            snprintf(text, sizeof text, ".%d.flight:\n    it is of another run of the job\n",
                     other);
            CHECK_MSG(says(text), "%s", output);
            write_record(dir, other, &all[other]);
        }
    /* Ranks that have not noted the id yet belong to the run; with another sum of ids it is a
       later run. */
    for (int num = 1; num < RANKS; num++) {
        for (int k = 0; k < RANKS; k++)
            r = all[k], r.id = k < num ? 0 : r.id, write_record(dir, k, &r);
        (void)hang(dir, "");
        CHECK_MSG(!says("no readable record of rank"), "%s", output);
        r = all[0], r.id = 0, r.own_id++;
        write_record(dir, 0, &r);
        (void)hang(dir, "");
        static const char *const lacks[] = {"", "no readable record of ranks 1-3",
                                            "no readable record of ranks 2, 3",
                                            "no readable record of rank 3"};
        CHECK_MSG(says(lacks[num]), "%s", output);
    }
    /* a later run of fewer ranks, which is complete */
    for (int k = 0; k < RANKS; k++) {
        r = all[k];
        if (k < 2) r.id = 77, r.size = 2, r.real_ns -= 1000000000;
        write_record(dir, k, &r);
    }
    (void)hang(dir, "");
    CHECK_MSG(says(", 2 ranks. Processes: 2 ended\n"), "%s", output);
}

/* ---- clocks and namespaces ------------------------------------------------------------------- */

/* Changes a record as if the rank ran on another host, or in another time namespace, with other
   clocks. */
static void shift_clocks(fsdpi_flight_record *r, uint64_t clock, int64_t mono_ns, int64_t real_ns) {
    r->clock = clock, r->real_ns += real_ns;
    r->mono_ns += mono_ns, r->opened_ns += mono_ns, r->call_ns += mono_ns;
    if (r->ended_ns) r->ended_ns += mono_ns;
    for (int i = 0; i < FSDPI_FLIGHT_OPS; i++) {
        if (r->op[i].begin_ns) r->op[i].begin_ns += mono_ns;
        if (r->op[i].end_ns) r->op[i].end_ns += mono_ns;
    }
}

static int64_t draw_shift(uint64_t *random, int64_t most_s) {
    const uint64_t range = 2 * (uint64_t)most_s * 1000000000;
    return (int64_t)(h_rand64(random) % range) - most_s * 1000000000;
}

/* Returns the number after a text; -1: the text does not occur. */
static double number_after(const char *text) {
    const char *at = strstr(output, text);
    return at ? strtod(at + strlen(text), NULL) : -1;
}

/* Turns the last collective of the model that all ranks have ended into a broadcast, whose root,
   rank 0, left it long before the others came. */
static void make_broadcast(const char *dir) {
    static fsdpi_flight_record all[RANKS];
    fsdpi_flight_op *o[RANKS];
    uint32_t turn = 0;
    for (int k = 0; k < RANKS; k++) read_record(dir, k, &all[k]);
    for (int i = 0; i < FSDPI_FLIGHT_OPS; i++) {
        const fsdpi_flight_op *x = &all[0].op[i];
        if (x->number && x->end_ns && x->turn > turn && x->kind == FSDP_OP_ALL_GATHER)
            turn = x->turn, o[0] = &all[0].op[i];
    }
    CHECK(turn > 0);
    for (int k = 1; k < RANKS; k++) {
        int at = 0;
        while (all[k].op[at].turn != turn || all[k].op[at].comm != o[0]->comm)
            CHECK(++at < FSDPI_FLIGHT_OPS);
        o[k] = &all[k].op[at];
    }
    o[0]->begin_ns -= 500000000000, o[0]->end_ns = o[0]->begin_ns + 1;
    for (int k = 0; k < RANKS; k++) o[k]->kind = FSDP_OP_BROADCAST, write_record(dir, k, &all[k]);
}

/* Ranks of several hosts, whose clocks differ by days: the tool finds the same waiting ranks,
   operations and times, except for the duration of a collective. */
TEST(fsdptrace, clocks_of_hosts, NO(GLOO | NCCL)) {
    static fsdpi_flight_record all[RANKS], r;
    char dir[400], to[400], was[4096], copied[4096];
    uint64_t random = h_seed();
    make_files(dir, sizeof dir);
    make_broadcast(dir);
    CHECK_EQ_INT(hang(dir, ""), 1);
    const double waited = number_after(" for "), called = number_after("', ");
    for (int n = 0; n < 40; n++) {
        copy_records(dir, to, sizeof to, all);
        for (int k = 0; k < RANKS; k++) { /* at least two hosts; one may have this clock */
            r = all[k];
            const int host = n % 2 ? k : k / 2;
            if (host || n % 4 < 2) {
                uint64_t same = h_seed() + (uint64_t)(n * RANKS + host);
                shift_clocks(&r, 5 + (uint64_t)host, draw_shift(&same, 1000000),
                             draw_shift(&random, 3 * 86400));
                if (r.mono_ns < 0) shift_clocks(&r, r.clock, 1000000000000000, 0);
            }
            write_record(to, k, &r);
        }
        for (int i = 0; i < 2; i++) { /* numbers may differ by rounding */
            CHECK_EQ_INT(hang(i ? to : dir, ""), 1);
            CHECK_MSG(says("No process runs here"), "%s", output);
            char *text = strstr(output, "\nrank"), *kept = i ? copied : was;
            CHECK_MSG(text, "%s", output);
            for (; *text; text++)
                if (*text != '.' && (*text < '0' || *text > '9')) *kept++ = *text;
            *kept = 0;
        }
        CHECK_EQ_STR(copied, was);
        CHECK_MSG(number_after(" for ") - waited < 0.3 && waited - number_after(" for ") < 0.3,
                  "%s", output);
        CHECK_MSG(number_after("', ") - called < 0.3 && called - number_after("', ") < 0.3, "%s",
                  output);
    }
}

/* While a job lives, ranks in another PID namespace do not count as ended, and their waits last
   until now; also if ranks are in a time namespace: all, those in another PID namespace, or those
   of this host. Ranks on other hosts only, whose names may be equal, are no failure. */
TEST(fsdptrace, namespaces, NO(GLOO | NCCL)) {
    static fsdpi_flight_record all[RANKS], r;
    char dir[400], to[400];
    uint64_t random = h_seed();
    board = (plan_of_job *)mmap(NULL, sizeof *board, PROT_READ | PROT_WRITE,
                                MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    CHECK(board != MAP_FAILED);
    (void)tool();
    pid_t pid = begin_job(&random, LATE, dir, sizeof dir);
    do CHECK_MSG(!h_is_over(-500), "not late: %s", output);
    while (hang(dir, "--after 0") != 1 || !found(LATE));
    for (int kind = 0; kind < 6; kind++) {
        const int is_far = kind == 3 || kind == 5; /* ranks are on another host */
        copy_records(dir, to, sizeof to, all);
        int64_t began = INT64_MAX; /* the longest wait */
        for (int k = 0; k < RANKS; k++) {
            r = all[k];
            for (int i = 0; i < FSDPI_FLIGHT_OPS; i++)
                if (r.op[i].number && !r.op[i].end_ns && r.op[i].begin_ns < began)
                    began = r.op[i].begin_ns;
            if (kind < 2 || kind == 4) r.pids++;
            if (kind == 1 && k) r.host[0] ^= 1; /* the others on hosts */
            if (kind == 2 || kind == 4 || (kind == 5 && k > 1))
                shift_clocks(&r, 9, 5000000000000000, 0);
            else if (is_far) r.boot++, shift_clocks(&r, 7, 1000000000, 86400000000000);
            write_record(to, k, &r);
        }
        const double least = 1e-9 * (double)(fsdpi_system_ns(1) - began);
        const int rc = hang(to, "--after 100000");
        const double most = 1e-9 * (double)(fsdpi_system_ns(1) - began), is = number_after(" for ");
        CHECK_EQ_INT(rc, 0);
        CHECK_MSG(!strncmp(output, "No rank waits longer than 100000 s.\njob '", 40), "%s", output);
        CHECK_MSG(!says("ended") && !says("has died") && !says("The others wait"), "%s", output);
        CHECK_MSG(says("whether they run is not known") == (kind != 2), "%s", output);
        CHECK_MSG(says("in another PID namespace (") == (kind < 2 || kind == 4), "%s", output);
        CHECK_MSG(says("Whether processes run is not known: ") == (kind == 3), "%s", output);
        CHECK_MSG(kind == 3 || (is > least - 0.1 && is < most + 0.1), "%f .. %f: %s", least, most,
                  output);
        CHECK_EQ_INT(hang(to, "--after 100000 --json"), 0);
        CHECK_MSG(says("\"advice\": \"No rank waits longer than 100000 s.\""), "%s", output);
    }
    CHECK_EQ_INT(end_job(pid, dir), 1);
    copy_records(dir, to, sizeof to, all);
    for (int k = 0; k < RANKS; k++) r = all[k], r.host[0] ^= 1, write_record(to, k, &r);
    CHECK_EQ_INT(hang(to, "--after 100000"), 0);
    CHECK_EQ_INT(hang(dir, "--after 100000"), 1);
    CHECK_MSG(says("The others wait"), "%s", output);
}

/* Processes of one time namespace have one clock; others have another one. */
TEST(fsdptrace, time_namespace, NO(GLOO | NCCL)) {
    fflush(NULL);
    pid_t pid = fork();
    CHECK(pid >= 0);
    if (!pid) {
        const uint64_t outside = fsdpi_system_clock_id();
        FILE *f;
        int status;
        if (fsdpi_syscall(SYS_unshare, 0x80L /* CLONE_NEWTIME */) ||
            !(f = fopen("/proc/self/timens_offsets", "w")) || fputs("1 50 0", f) < 0 || fclose(f))
            _exit(77);
        pid_t inner = fork();
        if (!inner) _exit(fsdpi_system_clock_id() == outside || fsdpi_boot_id() == 0);
        _exit(inner < 0 || waitpid(inner, &status, 0) != inner || !WIFEXITED(status) ||
              WEXITSTATUS(status) || fsdpi_system_clock_id() != outside);
    }
    int status;
    CHECK_EQ_INT(waitpid(pid, &status, 0), pid);
    CHECK(WIFEXITED(status));
    if (WEXITSTATUS(status) == 77) SKIP("time namespaces are not allowed here");
    CHECK_EQ_INT(WEXITSTATUS(status), 0);
}

/* Turns this process into one of another host: with a name, a boot id and a CLOCK_MONOTONIC of its
   own, which its children get. Returns 0 if that is not permitted. */
static int enter_host(int host, int64_t mono_s) {
    char path[400], text[80];
    FILE *f;
    if (unshare(CLONE_NEWNS | CLONE_NEWUTS | 0x80 /* CLONE_NEWTIME */) ||
        mount("none", "/", NULL, MS_REC | MS_PRIVATE, NULL) ||
        !(f = fopen("/proc/self/timens_offsets", "w")))
        return 0;
    fprintf(f, "1 %lld 0\n7 %lld 0\n", (long long)mono_s, (long long)mono_s);
    if (fclose(f)) return 0;
    snprintf(path, sizeof path, "%s/boot%d", h_tmpdir(), host);
    CHECK((f = fopen(path, "w")) != NULL);
    fprintf(f, "0000000%d-0000-4000-8000-000000000000\n", host);
    CHECK_EQ_INT(fclose(f), 0);
    snprintf(text, sizeof text, "host-%d", host);
    return !mount(path, "/proc/sys/kernel/random/boot_id", NULL, MS_BIND, NULL) &&
           !sethostname(text, strlen(text));
}

/* Two hosts whose clocks differ by hours, and this process, which may be on a third one. */
static const struct {
    const char *name;
    int has_own;                  /* ranks 0 and 1 are on the host of this process */
    int64_t wall_s[2], mono_s[2]; /* of the two hosts, compared with this process */
} clocks[] = {{"later", 1, {0, 5 * 3600}, {0, 90000}},
              {"earlier", 1, {0, -7 * 3600}, {0, 3 * 3600}},
              {"both_elsewhere", 0, {-3 * 3600, 26 * 3600}, {70000, 4 * 3600}}};

/* Starts the job of `board` on both hosts. Returns its process group. */
static pid_t start_on_hosts(const char *dir, int row) {
    char job[64];
    fflush(NULL);
    pid_t pid = fork();
    CHECK(pid >= 0);
    if (pid) return pid;
    (void)setpgid(0, 0);
    (void)prctl(PR_SET_PDEATHSIG, SIGKILL);
    snprintf(job, sizeof job, "clocks-%d", (int)getpid());
    for (int rank = 0; rank < RANKS; rank++) {
        if (fork()) continue;
        const int host = rank / 2, is_own = host == 0 && clocks[row].has_own;
        (void)prctl(PR_SET_PDEATHSIG, SIGKILL);
        if (!is_own && !enter_host(host, clocks[row].mono_s[host])) _exit(77);
        if (!is_own && fork()) pause();
        (void)prctl(PR_SET_PDEATHSIG, SIGKILL);
        fsdp_world_desc d = FSDP_ZERO;
        fsdp_world *w;
        d.rank = rank, d.world_size = RANKS, d.job = job, d.store = "host:";
        d.flight_record = dir, d.log_level = FSDP_LOG_NONE, d.timeout_ms = 600000;
        if (fsdp_init(&d, &w)) _exit(1);
        w->flight->real_ns += clocks[row].wall_s[host] * 1000000000; /* the wall clock's only use */
        _exit(rank_main(w, NULL));
    }
    int status; /* ranks that run do not end */
    _exit(wait(&status) > 0 && WIFEXITED(status) ? WEXITSTATUS(status) : 1);
}

/* A job that runs on hosts whose clocks differ by hours: all records are found, nobody is said to
   wait for hours, and a late rank is found. */
TEST_P(fsdptrace, hosts_whose_clocks_differ, clocks, NO(NCCL)) {
    char dir[400];
    int status = 0;
    board = (plan_of_job *)mmap(NULL, sizeof *board, PROT_READ | PROT_WRITE,
                                MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    CHECK(board != MAP_FAILED);
    (void)tool();
    snprintf(dir, sizeof dir, "%s/record", h_tmpdir());
    board->fault = LATE, board->rank = 1, board->step = 3, board->call = 4;
    pid_t pid = start_on_hosts(dir, (int)(row - clocks));
    while (!__atomic_load_n(&board->faulty, __ATOMIC_SEQ_CST)) {
        const int is_over = waitpid(pid, &status, WNOHANG) == pid;
        if (is_over && status == 77 << 8) SKIP("no time namespace is permitted here");
        CHECK_MSG(!is_over, "a rank has ended, status %d", status);
        usleep(1000);
    }
    do CHECK_MSG(!h_is_over(-500), "not late: %s", output);
    while (hang(dir, "--after 0") != 1 || !found(LATE));
    CHECK_MSG(number_after(" for ") < 1800, "%s", output);
    CHECK_MSG(!says("left out") && !says("no readable record"), "%s", output);
    CHECK_EQ_INT(hang(dir, "--after 1800"), 0);
    CHECK_MSG(!strncmp(output, "No rank waits longer than 1800 s.\njob '", 39), "%s", output);
    (void)kill(-pid, SIGKILL);
    CHECK_EQ_INT(waitpid(pid, &status, 0), pid);
    CHECK_EQ_INT(hang(dir, "--after 0"), 1); /* from the files only */
    CHECK_MSG(found(LATE) && number_after(" for ") < 1800, "%s", output);
    CHECK_MSG(!says("left out") && !says("no readable record"), "%s", output);
}

/* A file of another version, or a damaged one, is named; the others are read. */
TEST(fsdptrace, another_version, NO(GLOO | NCCL)) {
    static fsdpi_flight_record r;
    char dir[400];
    make_files(dir, sizeof dir);
    read_record(dir, 3, &r);
    memcpy(r.magic, "fsdpfl01", sizeof r.magic);
    write_record(dir, 3, &r);
    CHECK_EQ_INT(hang(dir, ""), 1);
    CHECK_MSG(says("rank 2: its last call was ") && says("no readable record of rank 3"), "%s",
              output);
    CHECK_MSG(says(".3.flight:\n    it is damaged, or of another version of fsdp.h"), "%s", output);
}

/* Garbage anywhere in a file corrupts no memory of the tool, and hides no other rank. */
TEST(fsdptrace, garbage, NO(GLOO | NCCL) | SLOW) {
    char dir[400], path[600];
    uint64_t random = h_seed();
    make_files(dir, sizeof dir);
    path_of(dir, 1, path, sizeof path);
    for (int n = 0; n < 100; n++) {
        FILE *f = fopen(path, "r+");
        CHECK(f != NULL);
        CHECK_EQ_INT(fseek(f, 64, SEEK_SET), 0);
        for (size_t k = 64; n == 50 && k < sizeof(fsdpi_flight_record) + 4096; k++)
            CHECK_EQ_INT(fputc('A', f), 'A'); /* no text ends */
        for (int k = 0; k < 200; k++) {
            uint64_t word = h_rand64(&random);
            long at = (long)(h_rand64(&random) % (sizeof(fsdpi_flight_record) - 20)) + 12;
            if (n % 2) at = 12 + at % 2400;
            CHECK_EQ_INT(fseek(f, at, SEEK_SET), 0);
            CHECK_EQ_INT(fwrite(&word, 1, sizeof word, f), sizeof word);
        }
        CHECK_EQ_INT(fclose(f), 0);
        int rc = hang(dir, n % 3 ? "" : "--json");
        CHECK_MSG(rc == 0 || rc == 1, "%d: %s", rc, output);
    }
}

TEST(fsdptrace, usage, NO(GLOO | NCCL)) {
    char dir[400], command[900];
    snprintf(dir, sizeof dir, "%s/none", h_tmpdir());
    CHECK_EQ_INT(hang(dir, ""), 2);
    CHECK_MSG(says("No such file or directory"), "%s", output);
    CHECK_EQ_INT(mkdir(dir, 0700), 0);
    CHECK_EQ_INT(hang(dir, ""), 2);
    CHECK_MSG(says("there is no flight record: set FSDP_FLIGHT_RECORD=DIR"), "%s", output);
    static const char *const wrong[] = {"--after", "--after x", "--after -1", "--what", "another"};
    for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++) {
        CHECK_EQ_INT(hang(dir, wrong[i]), 2);
        CHECK_MSG(says("usage: fsdptrace hang DIR"), "%s: %s", wrong[i], output);
    }
    snprintf(command, sizeof command, "%s --help >%s/help", tool(), dir);
    CHECK_EQ_INT(system(command), 0);
}

/* A world without a writable directory runs, and logs that once. */
static char logged[2048];
static void on_log(int level, fsdp_status code, int rank, const char *text, void *user) {
    (void)level, (void)code, (void)rank, (void)user;
    snprintf(logged + strlen(logged), sizeof logged - strlen(logged), "%s\n", text);
}
TEST(fsdptrace, no_directory, NO(GLOO | NCCL)) {
    fsdp_world_desc d = FSDP_ZERO;
    fsdp_world *w;
    char file[400];
    snprintf(file, sizeof file, "%s/file", h_tmpdir());
    FILE *f = fopen(file, "w");
    CHECK(f && !fclose(f));
    d.world_size = 1;
    d.flight_record = file;
    d.logger.log = on_log;
    CHECK_OK(fsdp_init(&d, &w));
    CHECK_MSG(strstr(logged, "[E553] there is no flight record in directory '") &&
                  strstr(logged, "Not a directory"),
              "%s", logged);
    CHECK_OK(fsdp_shutdown(w));
}

/* A job's name becomes a file's name. Another job of this name takes the file over. */
TEST(fsdptrace, names_of_files, NO(GLOO | NCCL)) {
    char dir[400], path[600];
    snprintf(dir, sizeof dir, "%s/record", h_tmpdir());
    for (int again = 0; again < 2; again++) {
        fsdp_world_desc d = FSDP_ZERO;
        fsdp_world *w;
        d.world_size = 1;
        d.flight_record = dir;
        d.job = "tcp://host:1/a";
        CHECK_OK(fsdp_init(&d, &w));
        CHECK_OK(fsdp_shutdown(w));
    }
    path_of(dir, 0, path, sizeof path);
    CHECK_EQ_STR(strrchr(path, '/'), "/tcp---host-1-a.0.flight");
    CHECK_EQ_INT(hang(dir, "--job tcp://host:1/a"), 0);
    CHECK_MSG(!says("other jobs"), "%s", output);
    CHECK_EQ_INT(hang(dir, "--job other"), 2);
    fsdp_world_desc d = FSDP_ZERO; /* a second job: the tool names the first one, too */
    fsdp_world *w;
    d.world_size = 1, d.flight_record = dir, d.job = "second";
    CHECK_OK(fsdp_init(&d, &w));
    CHECK_OK(fsdp_shutdown(w));
    CHECK_EQ_INT(hang(dir, ""), 0);
    CHECK_MSG(says("job 'second' over") && says("another one by --job 'tcp://host:1/a'"), "%s",
              output);
    CHECK_EQ_INT(hang(dir, "--job tcp://host:1/a"), 0);
    CHECK_MSG(says("job 'tcp://host:1/a' over") && says("--job 'second'"), "%s", output);
    CHECK_EQ_INT(hang(dir, "--json"), 0);
    CHECK_MSG(says("\"other_job\": \"tcp://host:1/a\""), "%s", output);
    d.job = "third"; /* names the other one that started last */
    CHECK_OK(fsdp_init(&d, &w));
    CHECK_OK(fsdp_shutdown(w));
    static const char *const latest[][2] = {
        {"third", "second"}, {"second", "third"}, {"tcp://host:1/a", "third"}};
    for (int i = 0; i < 3; i++) {
        char options[64];
        snprintf(options, sizeof options, "--job %s", latest[i][0]);
        CHECK_EQ_INT(hang(dir, options), 0);
        snprintf(options, sizeof options, "another one by --job '%s'\n", latest[i][1]);
        CHECK_MSG(says(options), "%s", output);
    }
}

/* Steps with their time in collectives; names and groups; an end by fsdp_shutdown. */
static int steps_of(fsdp_world *w, void *arg) {
    board->fault = NO_FAULT;
    return rank_main(w, arg);
}
TEST(fsdptrace, contents, NO(NCCL)) {
    char dir[400], path[600];
    fsdp_spawn_desc d = FSDP_ZERO;
    fsdp_world_desc wd = FSDP_ZERO;
    snprintf(dir, sizeof dir, "%s/record", h_tmpdir());
    board = (plan_of_job *)mmap(NULL, sizeof *board, PROT_READ | PROT_WRITE,
                                MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    wd.flight_record = dir;
    d.num_ranks = RANKS, d.world = &wd;
    CHECK_OK(fsdp_spawn(&d, steps_of, NULL));
    for (int rank = 0; rank < RANKS; rank++) {
        path_of(dir, rank, path, sizeof path);
        int fd = open(path, O_RDONLY);
        const fsdpi_flight_record *f = (const fsdpi_flight_record *)mmap(NULL, sizeof *f, PROT_READ,
                                                                         MAP_SHARED, fd, 0);
        CHECK(f != MAP_FAILED);
        (void)close(fd);
        CHECK_EQ_INT(f->state, FSDPI_FLIGHT_SHUT_DOWN);
        CHECK_EQ_INT(f->rank, rank);
        CHECK_EQ_INT(f->size, RANKS);
        CHECK_EQ_STR(f->comm[1].name, "world");
        CHECK_EQ_INT(f->comm[1].size, RANKS);
        CHECK_EQ_INT(f->comm[1].index, rank);
        CHECK_EQ_INT(f->comm[1].stride, 1);
        CHECK_EQ_INT(f->steps, STEPS);
        CHECK_EQ_INT(f->begun, 1 + (uint32_t)f->comm[1].turns); /* fsdp_init is in no group */
        for (int s = 0; s < STEPS; s++) {
            CHECK_EQ_INT(f->last[s].step, s + 1);
            CHECK(f->last[s].begin_ns > 0 && f->last[s].end_ns >= f->last[s].begin_ns);
            CHECK(f->last[s].comm_ns > 0);
            CHECK(f->last[s].comm_ns <= f->last[s].end_ns - f->last[s].begin_ns);
            CHECK(!s || f->last[s].begin_ns >= f->last[s - 1].end_ns);
        }
        for (uint64_t i = 0; i < f->begun; i++) {
            CHECK_EQ_INT(f->op[i].number, i + 1);
            CHECK(f->op[i].end_ns >= f->op[i].begin_ns && f->op[i].begin_ns >= f->opened_ns);
        }
        CHECK_EQ_INT(munmap((void *)(uintptr_t)f, sizeof *f), 0);
    }
    CHECK_EQ_INT(hang(dir, ""), 0);
    CHECK_MSG(says("No rank waits."), "%s", output);
}

TEST(fsdptrace, a_rank_that_never_comes, NO(GLOO | NCCL)) {
    char dir[400];
    snprintf(dir, sizeof dir, "%s/record", h_tmpdir());
    pid_t pid[3];
    fflush(NULL);
    for (int rank = 0; rank < 3; rank++) {
        pid[rank] = fork();
        CHECK(pid[rank] >= 0);
        if (pid[rank]) continue;
        fsdp_world_desc d = FSDP_ZERO;
        fsdp_world *w;
        d.rank = rank, d.world_size = 4, d.timeout_ms = 500;
        d.job = "alone", d.flight_record = dir, d.log_level = FSDP_LOG_NONE;
        _exit(fsdp_init(&d, &w) == FSDP_OK);
    }
    for (int rank = 0; rank < 3; rank++) {
        int status;
        CHECK_EQ_INT(waitpid(pid[rank], &status, 0), pid[rank]);
        CHECK(WIFEXITED(status) && !WEXITSTATUS(status));
    }
    CHECK_EQ_INT(hang(dir, ""), 1);
    CHECK_MSG(says("no readable record of rank 3") && says("ranks 0-2 wait in fsdp_init for ") &&
                  says(" was the first to report an error, ") &&
                  says("rank 3: there is no readable record of it"),
              "%s", output);
}

TEST(fsdptrace, record_by_record, NO(GLOO | NCCL)) {
    static const int32_t odd[] = {1, 3, 5}, any[] = {0, 1, 3}, one[] = {5};
    char dir[400], place[16] = "first", name[200], wants[FSDPI_FLIGHT_NAME];
    int here[3];
    fsdp_world_desc d = FSDP_ZERO;
    fsdp_world *w;
    fsdp_op op = FSDP_ZERO;
    snprintf(dir, sizeof dir, "%s/record", h_tmpdir());
    d.world_size = 1, d.flight_record = dir;
    CHECK_OK(fsdp_init(&d, &w));
    fsdpi_flight_record *f = w->flight;
    /* groups: their members as a sequence, if they are one */
    fsdpi_flight_add(w, (const fsdp_comm *)(const void *)&here[0], 7, "odd", odd, 3, 1);
    fsdpi_flight_add(w, (const fsdp_comm *)(const void *)&here[1], 8, "any", any, 3, 2);
    fsdpi_flight_add(w, (const fsdp_comm *)(const void *)&here[2], 9, "one", one, 1, 0);
    const fsdpi_flight_comm *c = &f->comm[f->num_comms - 3];
    CHECK_EQ_INT(c[0].number, 7);
    CHECK_EQ_INT(c[0].size, 3);
    CHECK_EQ_INT(c[0].index, 1);
    CHECK_EQ_INT(c[0].first, 1);
    CHECK_EQ_INT(c[0].stride, 2);
    CHECK_EQ_INT(c[1].stride, 0);
    CHECK_EQ_INT(c[2].first, 5);
    CHECK_EQ_INT(c[2].stride, 1);
    CHECK(c[0].members != c[1].members);
    /* entries: their group, and their number in it */
    op.kind = FSDP_OP_ALL_GATHER, op.what = "u", op.comm = (fsdp_comm *)(void *)&here[1];
    const fsdpi_flight_op *o = fsdpi_flight_begin(w, &op);
    CHECK_EQ_INT(o->comm, &c[1] - f->comm);
    CHECK_EQ_INT(o->turn, 1);
    op.comm = (fsdp_comm *)(void *)&here[0];
    CHECK_EQ_INT(fsdpi_flight_begin(w, &op)->comm, c - f->comm);
    CHECK_EQ_INT(fsdpi_flight_begin(w, &op)->turn, 2);
    op.kind = FSDP_OP_SEND;
    CHECK_EQ_INT(fsdpi_flight_begin(w, &op)->turn, 0);
    op.comm = (fsdp_comm *)(void *)place;
    CHECK_EQ_INT(fsdpi_flight_begin(w, &op)->comm, 0);
    /* an entry that is used again is reset */
    fsdpi_flight_op *again = fsdpi_flight_begin(w, &op);
    again->fingerprint = 5, again->on_stream = 1;
    fsdpi_flight_end(w, again);
    for (int i = 1; i < FSDPI_FLIGHT_OPS; i++) (void)fsdpi_flight_begin(w, &op);
    CHECK(fsdpi_flight_begin(w, &op) == again);
    CHECK(again->fingerprint == 0 && !again->on_stream && again->end_ns == 0);
    CHECK_EQ_INT(again->number, f->begun);
    /* the names of the library's groups fit the signatures that ranks exchange, too */
    const fsdpi_signature *wire = NULL;
    CHECK(sizeof wire->comm > strlen("reductions of comm threads"));
    char group[sizeof wire->comm];
    fsdpi_copy_name(group, sizeof group, "a_mesh_dim_with_a_name_that_is_long");
    CHECK_EQ_STR(group, "a_mesh_dim_wit...e_that_is_long");
    /* names: each operation and call has its own, at one address or not; a long one keeps its
       ends */
    op.what = place;
    const fsdpi_flight_op *one_op = fsdpi_flight_begin(w, &op);
    snprintf(place, sizeof place, "second");
    const fsdpi_flight_op *two = fsdpi_flight_begin(w, &op);
    CHECK_EQ_STR(one_op->what, "first");
    CHECK_EQ_STR(two->what, "second");
    op.what = name;
    for (size_t length = 0; length < sizeof name; length++) {
        for (size_t i = 0; i < length; i++) name[i] = (char)('!' + i % 90);
        name[length] = 0;
        const char *had = fsdpi_flight_begin(w, &op)->what;
        fsdpi_flight_call(w, FSDP_CALL_PRE_FORWARD, name);
        const size_t tail = (FSDPI_FLIGHT_NAME - 4) / 2, head = FSDPI_FLIGHT_NAME - 4 - tail;
        const int is_cut = length >= FSDPI_FLIGHT_NAME;
        snprintf(wants, sizeof wants, "%.*s%s%.*s", is_cut ? (int)head : FSDPI_FLIGHT_NAME - 1,
                 name, is_cut ? "..." : "", is_cut ? (int)tail : 0,
                 name + length - (is_cut ? tail : 0));
        CHECK_EQ_STR(had, wants);
        CHECK_EQ_STR(f->call_what, wants);
        fsdpi_flight_add(w, (const fsdp_comm *)(const void *)&here[0], 7, name, odd, 3, 1);
        if (f->num_comms < FSDPI_FLIGHT_COMMS) CHECK_EQ_STR(f->comm[f->num_comms - 1].name, wants);
    }
    CHECK_OK(fsdp_shutdown(w));
}
