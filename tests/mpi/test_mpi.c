/* test_mpi.c - dp_mpi.h, in processes that mpirun has started.

   The suite for all tables (test_coll.c) runs over MPI; what is larger than a piece; how processes
   meet, by the launcher's word, by a communicator, with any level of threads; and that whoever
   waits for a process that does not come says so. Runs once with each MPI that there is. */

#include <math.h>
#include <mpi.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>
#include "../../dp_train.h"
#include "../boot_coll.h"
#include "../ends.h"
#include "../mesh_cases.h"
#include "../sharing.h"
#include "launched.h"

/* ---- under mpirun ---------------------------------------------------------------------------- */

#if defined(OPEN_MPI)
#define MPIRUN      "mpirun.openmpi --allow-run-as-root --oversubscribe --bind-to none"
#define OTHER_RUN   "mpirun.mpich"
#define LAUNCHER    "openmpi"
#define COUNT_NAMED "OMPI_COMM_WORLD_SIZE"
#define PLACE_NAMED "OMPI_COMM_WORLD_RANK"
#else
#define MPIRUN      "mpirun.mpich"
#define OTHER_RUN   "mpirun.openmpi --allow-run-as-root --oversubscribe"
#define LAUNCHER    "mpich"
#define COUNT_NAMED "PMI_SIZE"
#define PLACE_NAMED "PMI_RANK"
#endif

enum { NOT_ALLOWED = 77 };

int mpi_process, mpi_process_count;

static mpi_suite *suites;

void mpi_suite_register(mpi_suite *suite)
{
    suite->next = suites;
    suites = suite;
}

static bool mpi_is_inside(void)
{
    static const dp_coll_ops *colls[2];
    const char *place = getenv(PLACE_NAMED), *count = getenv(COUNT_NAMED);
    if (getenv("TEST_HERE") == NULL) {
        return false;
    }
    if (place != NULL && count != NULL) {
        mpi_process = atoi(place);
        mpi_process_count = atoi(count);
    }
    colls[0] = dp_mpi_coll();
    mesh_config.colls = colls;
    mesh_process = mpi_process;
    mesh_process_count = mpi_process_count;
    return true;
}

static void a_while(int ms)
{
    nanosleep(&(struct timespec){ms / 1000, ms % 1000 * 1000000L}, NULL);
}

/* Each process that is through leaves a file in the directory of its test. */
static int count_through(const char *directory, int processes)
{
    int count = 0;
    for (int p = 0; p < processes; p++) {
        char path[128];
        snprintf(path, sizeof path, "%s/%d", directory, p);
        count += access(path, F_OK) == 0;
    }
    return count;
}

static void leave_file(void)
{
    char path[128];
    snprintf(path, sizeof path, "%s/%d", getenv("TEST_HERE"), mpi_process);
    FILE *file = fopen(path, "w");
    CHECK(file != NULL);
    fclose(file);
}

/* The last thing that a process does in a test that leaves MPI in a bad state, where nobody may
   call MPI_Finalize. All are through before the first ends, since mpirun then ends the others; and
   MPI, which goes on only while it is called, may still hold a note for one that slept. */
static void say_through(void)
{
    int finalised = 1, there;
    MPI_Finalized(&finalised);
    CHECK(!finalised);
    leave_file();
    for (int i = 0; i < 2000; i++) {
        if (count_through(getenv("TEST_HERE"), mpi_process_count) == mpi_process_count) {
            break;
        }
        MPI_Iprobe(MPI_ANY_SOURCE, 0, MPI_COMM_WORLD, &there, MPI_STATUS_IGNORE);
        a_while(10);
    }
    _exit(EXIT_SUCCESS);
}

/* `run` starts so many processes of what follows. All come to their end, and, if it ends well, so
   does mpirun. */
static void launch_by(const char *run, const char *name, int processes, bool ends_well)
{
    char directory[] = "build/mpirun-XXXXXX", self[256], command[1024];
    ssize_t bytes = readlink("/proc/self/exe", self, sizeof self - 1);
    CHECK(bytes > 0 && mkdtemp(directory) != NULL);
    self[bytes] = '\0';
    unsetenv("DP_LAUNCH");
    setenv("TEST_HERE", directory, 1);
    snprintf(command, sizeof command, "%s %s mpi/%s", run, self, name);
    int status = system(command);
    int count = count_through(directory, processes);
    snprintf(command, sizeof command, "rm -r %s", directory);
    CHECK_INT(system(command), 0);
    if (WIFEXITED(status) && WEXITSTATUS(status) == NOT_ALLOWED) {
        SKIP("network namespaces want root, and ip");
    }
    CHECK(!ends_well || status == 0);
    CHECK_INT(count, ends_well ? 0 : processes);
}

static void launch_here(const char *mpirun, const char *name, int processes, bool ends_well)
{
    char run[200];
    snprintf(run, sizeof run, "%s -np %d", mpirun, processes);
    launch_by(run, name, processes, ends_well);
}

static void mpi_launch(const char *name, int processes)
{
    launch_here(MPIRUN, name, processes, true);
}

/* MPI is left in a bad state, and mpirun complains of that. */
static void mpi_launch_broken(const char *name, int processes)
{
    launch_here(MPIRUN, name, processes, false);
}

/* Half of the processes on each host. */
static void mpi_launch_apart(const char *name, int processes)
{
    char run[100];
    snprintf(run, sizeof run, "tests/mpi/two_hosts.sh " LAUNCHER " %d", processes / 2);
    launch_by(run, name, processes, true);
}

static void mpi_launch_apart_broken(const char *name, int processes)
{
    char run[100];
    snprintf(run, sizeof run, "tests/mpi/two_hosts.sh " LAUNCHER " %d", processes / 2);
    launch_by(run, name, processes, false);
}

/* A test that starts itself by mpirun, in so many processes: what follows is what each does. */
#define MPI_TEST(name, processes) MPI_TEST_UNDER(name, processes, mpi_launch)
#define MPI_TEST_UNDER(name, processes, launch)                                                    \
    static void mpi_run_##name(void);                                                              \
    TEST_OF_TABLE(name, 60)                                                                        \
    {                                                                                              \
        if (mpi_is_inside())                                                                       \
            mpi_run_##name();                                                                      \
        else                                                                                       \
            launch(#name, processes);                                                              \
    }                                                                                              \
    static void mpi_run_##name(void)

/* ---- meeting --------------------------------------------------------------------------------- */

MPI_SUITE(one_machine_shares_memory)
{
    dp_ctx *ctx;
    dp_info info;
    CHECK_OK(dp_open(&(dp_config){.device_count = 1}, &ctx));
    CHECK_OK(dp_info_get(ctx, &info));
    CHECK_STR(info.coll_backend, "shared memory");
    CHECK_STR(info.launcher, LAUNCHER);
    CHECK_INT(info.process, mpi_process);
    CHECK_INT(info.process_count, mpi_process_count);
    CHECK_INT(info.machine_process_count, mpi_process_count);
    CHECK_OK(dp_barrier(ctx));
    dp_close(ctx);
}

MPI_SUITE(several_machines_have_mpi)
{
    dp_ctx *ctx;
    dp_info info;
    setenv("DP_MACHINE", mpi_process == 0 ? "a" : "b", 1);
    CHECK_OK(dp_open(&(dp_config){.device_count = 1}, &ctx));
    unsetenv("DP_MACHINE");
    CHECK_OK(dp_info_get(ctx, &info));
    CHECK_STR(info.coll_backend, "MPI");
    CHECK_OK(dp_barrier(ctx));
    dp_close(ctx);
}

MPI_SUITE(without_a_launcher_a_process_is_alone)
{
    dp_ctx *ctx;
    dp_info info;
    setenv("DP_LAUNCH", "none", 1);
    CHECK_OK(dp_open(&(dp_config){.device_count = 2}, &ctx));
    unsetenv("DP_LAUNCH");
    CHECK_OK(dp_info_get(ctx, &info));
    CHECK_INT(info.process_count, 1);
    dp_close(ctx);
    CHECK_OK(dp_open(&(dp_config){.device_count = 2, .local_only = true}, &ctx));
    CHECK_OK(dp_info_get(ctx, &info));
    CHECK_INT(info.process_count, 1);
    dp_close(ctx);
}

MPI_SUITE(mpi_by_name)
{
    dp_ctx *ctx;
    dp_info info;
    setenv("DP_LAUNCH", "mpi", 1);
    CHECK_OK(dp_open(&(dp_config){.device_count = 1}, &ctx));
    unsetenv("DP_LAUNCH");
    CHECK_OK(dp_info_get(ctx, &info));
    CHECK_STR(info.launcher, "mpi");
    CHECK_INT(info.process_count, mpi_process_count);
    dp_close(ctx);
}

/* In the order of the communicator, which stays as it was; and alone, in one of one process. */
MPI_SUITE(a_communicator_of_the_users)
{
    const dp_coll_ops *colls[] = {dp_mpi_coll(), NULL};
    dp_config config = {.colls = colls, .device_count = 1};
    dp_ctx *ctx;
    dp_info info;
    MPI_Comm turned;
    int sum = 1;
    MPI_Comm_split(MPI_COMM_WORLD, 0, -mpi_process, &turned);
    CHECK_OK(dp_mpi_bootstrap((int)MPI_Comm_c2f(turned), &config.bootstrap));
    CHECK_OK(dp_open(&config, &ctx));
    CHECK_OK(dp_info_get(ctx, &info));
    CHECK_INT(info.process, mpi_process_count - 1 - mpi_process);
    CHECK_STR(info.coll_backend, "MPI");
    CHECK_OK(dp_barrier(ctx));
    dp_close(ctx);
    MPI_Allreduce(MPI_IN_PLACE, &sum, 1, MPI_INT, MPI_SUM, turned);
    CHECK_INT(sum, mpi_process_count);
    MPI_Comm_free(&turned);
    config.colls = NULL;
    CHECK_OK(dp_mpi_bootstrap((int)MPI_Comm_c2f(MPI_COMM_SELF), &config.bootstrap));
    CHECK_OK(dp_open(&config, &ctx));
    CHECK_OK(dp_info_get(ctx, &info));
    CHECK_INT(info.process_count, 1);
    dp_close(ctx);
    CHECK_ERROR(dp_mpi_bootstrap((int)MPI_Comm_c2f(MPI_COMM_NULL), &config.bootstrap),
                DP_ERR_INVALID, "MPI_COMM_NULL");
    CHECK_ERROR(dp_mpi_bootstrap(0, NULL), DP_ERR_INVALID, "out");
}

/* Every second process, over shared memory or MPI; the communicators of all stay. */
static void check_group(const dp_coll_ops *const *colls)
{
    dp_ctx *all, *half, *none;
    dp_info info;
    int mine = mpi_process % 2, count = (mpi_process_count + 1 - mine) / 2;
    CHECK_OK(dp_open(&(dp_config){.colls = colls, .device_count = 1}, &all));
    CHECK_OK(dp_open_group(all, mine, NULL, &half));
    CHECK_OK(dp_info_get(half, &info));
    CHECK_STR(info.launcher, "group");
    CHECK_INT(info.process, mpi_process / 2);
    CHECK_INT(info.process_count, count);
    CHECK_INT(ones_of(half), count);
    CHECK_INT(ones_of(all), mpi_process_count);
    CHECK_OK(dp_open_group(all, mpi_process == 0 ? 3 : -1, NULL, &none));
    CHECK((none != NULL) == (mpi_process == 0));
    dp_close(none);
    CHECK_ERROR(
        dp_open_group(all, 0, &(dp_config){.device_count = mpi_process == 1 ? -1 : 1}, &none),
        DP_ERR_INVALID, "device_count");
    CHECK_INT(ones_of(half), count);
    dp_close(all);
    CHECK_INT(ones_of(half), count);
    dp_close(half);
}

MPI_SUITE(groups_of_processes)
{
    const dp_coll_ops *colls[] = {dp_mpi_coll(), NULL};
    check_group(NULL);
    check_group(colls);
}

MPI_SUITE(jobs_are_told_apart)
{
    dp_ctx *ctx = NULL;
    dp_config config = {.device_count = 1, .job = mpi_process == 0 ? "train" : "test"};
    CHECK_ERROR(dp_open(&config, &ctx), DP_ERR_MISMATCH, "in the same order");
    config.job = "train";
    CHECK_OK(dp_open(&config, &ctx));
    dp_close(ctx);
}

/* MPI is not initialised for a job of one process, and finalised at the end of this one. */
MPI_TEST(all_suites, 3)
{
    setvbuf(stdout, NULL, _IOLBF, BUFSIZ);
    for (const mpi_suite *suite = suites; suite != NULL; suite = suite->next) {
        if (mpi_process == 0) {
            printf("%s\n", suite->name);
        }
        suite->run();
    }
    for (size_t i = 0; i < MESH_CASES; i++) {
        if (mpi_process == 0) {
            printf("%s\n", mesh_cases[i].name);
        }
        mesh_cases[i].run();
    }
}

/* ---- machines -------------------------------------------------------------------------------- */

MPI_TEST(two_machines_of_two, 4)
{
    check_shared("aabb", 2);
    check_shared("aaaa", 1);
    check_shared("abab", 1);
    check_shared("abbb", 1);
    check_shared("aaab", 1);
    check_shared("abcd", 1);
    setenv("DP_MACHINE", machine_of("aabb"), 1);
    sums_of_several_pieces();
    sums_that_some_want();
    halves_of_several_pieces();
    moves_of_several_pieces();
    two_contexts();
}

/* The last group has one process. Groups are as large as all machines allow, and change no bit. */
MPI_TEST(machines_of_several_groups, 7)
{
    check_shared("aaaabbb", 4);
    check_shared("aaaaaab", 2);
    check_shared("aabbbbc", 2);
    setenv("DP_MACHINE", machine_of("aabbbbc"), 1);
    halves_of_several_pieces();
    ranks_are_added_in_one_tree();
}

/* ---- messages -------------------------------------------------------------------------------- */

MPI_TEST(messages_between_machines, 3)
{
    check_messages();
    setenv("DP_MACHINE", machine_of("abc"), 1);
    check_messages();
    setenv("DP_MACHINE", machine_of("aba"), 1);
    check_messages();
}

static dp_status receive_from(dp_ctx *ctx, int from)
{
    static int32_t data[25];
    dp_tensor tensor = dp_wrap(data, DP_I32, 1, (int64_t[]){25});
    return dp_recv(ctx, &tensor, from, 3);
}

MPI_TEST_UNDER(who_sends_no_message_is_named, 3, mpi_launch_broken)
{
    atexit(say_through);
    setenv("DP_MACHINE", machine_of("abc"), 1);
    dp_ctx *ctx = mesh_open(1, 1000);
    if (mpi_process != 0) /* whose time is up first */
        a_while(mpi_process == 1 ? 4000 : 800);
    if (mpi_process == 0)
        CHECK_ERROR(receive_from(ctx, 1), DP_ERR_TIMEOUT,
                    "dp_recv: 25 i32 from rank 1 to rank 0 with tag 3: rank 1 (process 1, pid ");
    else
        CHECK_INT(dp_status_class(receive_from(ctx, 0)), DP_CLASS_JOB);
    dp_close(ctx);
    exit(EXIT_SUCCESS);
}

MPI_TEST_UNDER(who_closes_before_a_message_is_named, 3, mpi_launch_broken)
{
    setenv("DP_MACHINE", machine_of("abc"), 1);
    dp_ctx *ctx = mesh_open(1, 20000);
    CHECK_OK(dp_barrier(ctx));
    if (mpi_process != 1) {
        CHECK_STATUS(receive_from(ctx, 1), DP_ERR_REMOTE);
        CHECK_SAYS(dp_last_error(), "has closed its context");
        CHECK_SAYS(dp_last_error(), "rank 1 (process 1, pid ");
    }
    dp_close(ctx);
    say_through();
}

static dp_tensor every_other(dp_scope *scope, int64_t count)
{
    char *data = dp_scope_alloc(scope, 2 * (size_t)count);
    CHECK(data != NULL);
    memset(data, 1, 2 * (size_t)count);
    dp_tensor tensor = dp_wrap(data, DP_U8, 1, &count);
    tensor.stride[0] = 2;
    return tensor;
}

/* MPI may go on with what is closed in the middle, while others use it. */
MPI_TEST(a_context_is_closed_while_messages_travel, 2)
{
    enum { BYTES = 32 << 20, LOOKS = 20, ROUNDS = 100 };
    dp_ctx *group;
    setenv("OMPI_MCA_btl_vader_single_copy_mechanism", "none", 1); /* in pieces */
    setenv("DP_MACHINE", machine_of("ab"), 1);
    dp_ctx *ctx = mesh_open(1, 0);
    CHECK_OK(dp_open_group(ctx, 0, NULL, &group));
    dp_scope *scope = dp_scope_begin(ctx);
    dp_message both[2] = {{.tensor = every_other(scope, BYTES), .peer = 1 - mpi_process},
                          {.tensor = every_other(scope, BYTES), .peer = 1 - mpi_process}};
    both[1].receives = true;
    CHECK_OK(dp_messages_begin(group, both, 2));
    for (int i = 0; i < LOOKS; i++) {
        dp_status status = dp_messages_test(group, both, 2);
        CHECK(status == DP_PENDING || status == DP_OK);
        a_while(1);
    }
    CHECK_OK(dp_barrier(ctx));
    dp_close(group);
    for (int i = 0; i < ROUNDS; i++) {
        CHECK_OK(dp_barrier(ctx));
        a_while(1);
    }
    dp_close(ctx);
}

/* Between machines, and inside of one. */
MPI_TEST(who_comes_last_is_named, 3)
{
    enum { SLOW = 1, SLOW_MS = 10, STEPS = 100, TRIES = 5 };
    static const char *const machines[] = {"abc", "aab"};
    for (int i = 0; i < 2; i++) {
        dp_late_info late = {.rank = -1};
        setenv("DP_MACHINE", machine_of(machines[i]), 1);
        dp_ctx *ctx = mesh_open(1, 0);
        for (int k = 0; k < TRIES * STEPS && late.rank != SLOW; k++) {
            a_while(mpi_process == SLOW ? SLOW_MS : 0);
            CHECK_OK(add_up(ctx, 25));
            CHECK_OK(dp_late(ctx, &late));
            int64_t rank = late.rank; /* all leave at the same step */
            CHECK_OK(dp_all_reduce_i64(ctx, &rank, 1, DP_OP_MIN));
            late.rank = (int)rank;
        }
        CHECK_INT(late.rank, SLOW);
        CHECK_STR(late.where, "outside of forward and backward");
        dp_close(ctx);
    }
}

/* One process cannot have the memory: then nobody has any, and all sums are right. */
MPI_TEST(a_machine_without_shared_memory, 4)
{
    struct rlimit old, none = {0, RLIM_INFINITY};
    said all;
    bool here = mpi_process == 2;
    dp_close(mesh_open(1, 0)); /* MPI makes files, too */
    CHECK_INT(getrlimit(RLIMIT_FSIZE, &old), 0);
    none.rlim_max = old.rlim_max;
    signal(SIGXFSZ, SIG_IGN);
    CHECK_INT(setrlimit(RLIMIT_FSIZE, here ? &none : &old), 0);
    dp_ctx *ctx = open_heard(machine_of("aabb"), 2, &all);
    CHECK_INT(setrlimit(RLIMIT_FSIZE, &old), 0);
    CHECK_INT(all.groups[1], 2);
    CHECK_INT(all.refusals, 4 + here); /* a board of its own is not for others */
    CHECK_INT(count_shared(), !here);
    check_reducer(ctx);
    dp_close(ctx);
}

MPI_TEST(one_process_needs_no_mpi, 1)
{
    dp_ctx *ctx;
    int there = 1;
    CHECK_OK(dp_open(&(dp_config){.device_count = 2}, &ctx));
    MPI_Initialized(&there);
    CHECK_INT(there, 0);
    dp_bootstrap boot;
    CHECK_ERROR(dp_mpi_bootstrap(0, &boot), DP_ERR_STATE, "not initialised");
    dp_close(ctx);
}

/* What the program has initialised is not finalised; one thread is enough to meet, and to share
   memory, and not for the table. */
MPI_TEST(a_program_with_mpi_of_its_own, 2)
{
    const dp_coll_ops *colls[] = {dp_mpi_coll(), NULL};
    dp_ctx *ctx;
    int level, over = 1, sum = 1;
    MPI_Init(NULL, NULL);
    MPI_Query_thread(&level);
    CHECK(level < MPI_THREAD_SERIALIZED);
    CHECK_OK(dp_open(&(dp_config){.device_count = 1}, &ctx));
    CHECK_OK(dp_barrier(ctx));
    dp_close(ctx);
    CHECK_ERROR(dp_open(&(dp_config){.device_count = 1, .colls = colls}, &ctx), DP_ERR_UNSUPPORTED,
                "ask MPI_Init_thread");
    MPI_Finalized(&over);
    CHECK_INT(over, 0);
    MPI_Allreduce(MPI_IN_PLACE, &sum, 1, MPI_INT, MPI_SUM, MPI_COMM_WORLD);
    CHECK_INT(sum, 2);
    MPI_Finalize();
    CHECK_ERROR(dp_open(&(dp_config){.device_count = 1}, &ctx), DP_ERR_STATE, "finalised");
}

MPI_TEST(calls_that_exclude_each_other, 2)
{
    int level;
    MPI_Init_thread(NULL, NULL, MPI_THREAD_SERIALIZED, &level);
    CHECK(level >= MPI_THREAD_SERIALIZED);
    dp_ctx *ctx = mesh_open(2, 0);
    check_reducer(ctx);
    dp_close(ctx);
    MPI_Finalize();
}

/* ---- two hosts ------------------------------------------------------------------------------- */

/* Both see one memory, and think that they are one machine. */
static void be_on_a_host(void)
{
    char net[64] = "";
    CHECK(readlink("/proc/self/ns/net", net, sizeof net - 1) > 0);
    setenv("DP_MACHINE", net, 1);
}

MPI_TEST_UNDER(two_hosts, 4, mpi_launch_apart)
{
    job j;
    be_on_a_host();
    CHECK_OK(dp_open(&(dp_config){.device_count = 1 + mpi_process % LOCALS}, &j.ctx));
    CHECK_OK(dp_info_get(j.ctx, &j.info));
    CHECK_STR(j.info.coll_backend, "MPI");
    CHECK_INT(j.info.machine_process_count, 2);
    CHECK_INT(j.info.machine_process, mpi_process % 2);
    rooms_make(&j, mesh_many, 0);
    CHECK_OK(dp_all_reduce(j.ctx, j.parts, mesh_many, DP_I32, DP_OP_SUM));
    for (size_t k = 0; k < mesh_many; k++) {
        CHECK_INT(got_by(&j, 0)[k], sum_of(&j, k));
    }
    rooms_free(&j);
    check_reducer(j.ctx);
    dp_close(j.ctx);
}

/* ---- parameters once a machine --------------------------------------------------------------- */

/* More parameters than travel at once, and of each process more than one. */
static void check_many_params(dp_ctx *ctx)
{
    enum { PARAMS = 150, EACH_PARAM = 100 };
    static char names[PARAMS][8];
    static dp_param_config params[PARAMS];
    dp_module *net = NULL, *par = NULL;
    for (int i = 0; i < PARAMS; i++) {
        snprintf(names[i], sizeof names[i], "p%d", i);
        params[i] = (dp_param_config){.name = names[i], .ndim = 1, .shape = {EACH_PARAM}};
    }
    CHECK_OK(dp_module_create(
        ctx,
        &(dp_module_config){
            .methods = pulled, .method_count = 2, .params = params, .param_count = PARAMS},
        &net));
    CHECK_OK(dp_distributed(net, &(dp_distributed_config){.share_params = true}, &par));
    CHECK_OK(dp_edit_begin(par, DP_OK));
    for (size_t i = 0; i < PARAMS && mpi_process == mpi_process_count - 1; i++)
        CHECK_OK(put(par, i, (double)i));
    CHECK_OK(dp_edit_end(par, DP_OK));
    for (size_t i = 0; i < PARAMS; i++) {
        float got[EACH_PARAM];
        dp_param_info info;
        CHECK_OK(dp_module_param(par, i, &info));
        CHECK_OK(dp_read(ctx, &info.data, got, sizeof got));
        for (int k = 0; k < EACH_PARAM; k++)
            CHECK_F64(got[k], (double)i, 0);
    }
}

/* Messages that are begun meanwhile, and that any rank may send, are none of what is shared. */
static void check_sharing(const char *machines, int device_count)
{
    int peer = (mpi_process + 1) % mpi_process_count;
    int32_t sent = mpi_process, got = -1;
    const int64_t one = 1;
    setenv("DP_MACHINE", machine_of(machines), 1);
    dp_ctx *ctx = mesh_open(device_count, 0);
    dp_info info = info_here(ctx);
    dp_message both[] = {
        {.tensor = dp_wrap(&got, DP_I32, 1, &one), .peer = DP_ANY_RANK, .receives = true},
        {.tensor = dp_wrap(&sent, DP_I32, 1, &one)}};
    int64_t firsts[8];
    const int64_t first = info.rank_first;
    CHECK_INT(info.machine_count, strchr(machines, 'c') != NULL ? 3 : 2);
    CHECK_OK(dp_messages_begin(ctx, both, 1));
    check_all_steps(ctx);
    check_edits_between(ctx, machines);
    check_loads(ctx);
    check_averages(ctx);
    check_many_params(ctx);
    CHECK_INT(got, -1);
    CHECK(info.rank_count <= 8);
    CHECK_OK(dp_all_gather_i64(ctx, &first, 1, firsts));
    for (int r = 0, p = 0; r < info.rank_count; r++) {
        p += r > 0 && firsts[r] != firsts[r - 1];
        if (p == peer)
            both[1].peer = (int)firsts[r];
    }
    CHECK_OK(dp_messages_begin(ctx, both + 1, 1));
    CHECK_OK(dp_messages_end(ctx, both, 2));
    CHECK_INT(got, (mpi_process + mpi_process_count - 1) % mpi_process_count);
    CHECK_OK(dp_barrier(ctx));
    dp_close(ctx);
}

MPI_TEST(parameters_once_a_machine, 4)
{
    check_sharing("aabb", 1);
    check_sharing("abab", 1);
    check_sharing("aaab", 1);
    check_sharing("aacb", 1 + mpi_process % 2);
}

/* Process 1 lacks memory at one point after another: all hear it, or it goes well. */
static bool share_without_memory(size_t fail_at)
{
    const dp_coll_ops *colls[] = {dp_mpi_coll(), NULL};
    test_allocator counter = {0};
    dp_config config = {.colls = colls, .device_count = 1, .timeout_ms = 20000};
    dp_ctx *ctx = NULL;
    dp_module *par = NULL;
    bool any = false, failed;
    config.allocator = test_allocator_of(&counter);
    CHECK_OK(dp_open(&config, &ctx));
    dp_module *net = net_of(ctx, DP_F32, false);
    take_what_is_kept(ctx, &counter);
    if (mpi_process == 1) {
        counter.fail_at = counter.call_count + fail_at;
    }
    dp_status status = dp_distributed(net, &(dp_distributed_config){.share_params = true}, &par);
    if (status == DP_OK) {
        status = dp_edit_begin(par, DP_OK);
    }
    if (status == DP_OK) {
        status = mpi_process == 0 ? put(par, 2, 5) : DP_OK;
        status = dp_edit_end(par, status);
    }
    if (status == DP_OK) {
        status = dp_edit_begin(par, DP_OK);
    }
    if (status == DP_OK) {
        status = dp_edit_shares(par);
        status = dp_edit_end(par, status);
    }
    failed = counter.fail_count > 0;
    CHECK(status != DP_ERR_TIMEOUT);
    if (status != DP_OK) {
        CHECK_SAYS(dp_last_error(), "memory");
    } else {
        CHECK_OK(dp_any(ctx, failed, &any));
        CHECK(!any);
        check_param(par, 2, 5, 5);
    }
    dp_close(ctx);
    CHECK_NO_LEAKS(&counter);
    return status != DP_OK;
}

MPI_TEST_UNDER(one_machine_has_no_memory_to_share, 3, mpi_launch_broken)
{
    size_t fail_at = 1;
    atexit(say_through);
    setenv("DP_MACHINE", machine_of("abb"), 1);
    while (share_without_memory(fail_at)) {
        fail_at++;
    }
    CHECK(fail_at > 10);
    exit(EXIT_SUCCESS);
}

#if defined(OPEN_MPI) /* MPICH goes through memory that both hosts see */
/* What this host has sent so far over its link to the other one. */
static double link_bytes(void)
{
    char line[512];
    double sent = -1;
    FILE *file = fopen("/proc/self/net/dev", "r");
    CHECK(file != NULL);
    while (fgets(line, sizeof line, file) != NULL)
        (void)sscanf(line, " v: %*f %*f %*f %*f %*f %*f %*f %*f %lf", &sent);
    fclose(file);
    CHECK(sent >= 0);
    return sent;
}

enum { SHARED_BYTES = 32 << 20 };

/* In both directions, as multiples of the parameters. */
static double link_cost(dp_ctx *ctx, double before)
{
    CHECK_OK(dp_barrier(ctx));
    double more = info_here(ctx).machine_process == 0 ? link_bytes() - before : 0;
    CHECK_OK(dp_all_reduce_f64(ctx, &more, 1, DP_OP_SUM));
    return more / SHARED_BYTES;
}

static dp_module *large_of(dp_ctx *ctx, bool shared)
{
    const dp_param_config param = {.name = "w", .ndim = 1, .shape = {SHARED_BYTES / 4}};
    dp_module *net = NULL, *par = NULL;
    CHECK_OK(dp_module_create(
        ctx,
        &(dp_module_config){
            .methods = pulled, .method_count = 2, .params = &param, .param_count = 1},
        &net));
    CHECK_OK(dp_distributed(net, &(dp_distributed_config){.share_params = shared}, &par));
    return par;
}

/* A step of both hosts. */
static double step_cost(dp_ctx *ctx, bool shared)
{
    dp_optim *optim = optim_of(large_of(ctx, shared), &rules[0], (dp_optim_config){0});
    CHECK_OK(dp_barrier(ctx));
    double before = link_bytes();
    CHECK_OK(dp_optim_step(optim)); /* nothing has a gradient */
    return link_cost(ctx, before);
}

static double edit_cost(dp_ctx *ctx, dp_module *par, bool writes, double value)
{
    CHECK_OK(dp_barrier(ctx));
    double before = link_bytes();
    CHECK_OK(dp_edit_begin(par, DP_OK));
    if (writes)
        CHECK_OK(put(par, 0, value));
    CHECK_OK(dp_edit_end(par, DP_OK));
    return link_cost(ctx, before);
}

/* Each half of the parameters goes to the other host once, and not to each of its processes. */
MPI_TEST_UNDER(parameters_cross_a_link_once, 4, mpi_launch_apart)
{
    dp_ctx *ctx = NULL;
    dp_tensor data;
    dp_param_info info;
    float last;
    be_on_a_host();
    CHECK_OK(dp_open(&(dp_config){.device_count = 1}, &ctx));
    CHECK_F64(step_cost(ctx, false), 1, 0.2);
    CHECK_F64(step_cost(ctx, true), 1, 0.2);
    dp_module *par = large_of(ctx, true);
    CHECK_F64(edit_cost(ctx, par, mpi_process == 3, 7), 1, 0.2);
    CHECK_F64(edit_cost(ctx, par, true, 8), 0, 0.1);
    CHECK_OK(dp_module_param(par, 0, &info));
    CHECK_OK(dp_narrow(&info.data, 0, SHARED_BYTES / 4 - 1, 1, &data));
    CHECK_OK(dp_read(ctx, &data, &last, sizeof last));
    CHECK_F64(last, 8, 0);
    dp_close(ctx);
}
#endif

/* ---- what goes wrong ------------------------------------------------------------------------- */

/* A barrier in which nobody spins: some are here seconds before the others. */
static void come_together(void)
{
    MPI_Request request;
    int done = 0;
    for (MPI_Ibarrier(MPI_COMM_WORLD, &request); !done;
         MPI_Test(&request, &done, MPI_STATUS_IGNORE))
        end_rest(1);
}

/* All rows of the table but the first: mpirun ends all if a process dies. Process 0 wakes up the
   one that has stopped. */
static void check_ends(void)
{
    for (int i = 1; i < END_CASES; i++) {
        dp_ctx *ctx = end_begin(mesh_open(1, END_TIMEOUT_MS));
        come_together();
        long pid = run_end(ctx, mpi_process, &end_cases[i]);
        if (mpi_process == 0 && end_cases[i].cause == end_stop) {
            CHECK_INT(kill((pid_t)pid, SIGCONT), 0);
        }
        come_together();
    }
}

MPI_TEST_UNDER(ends_are_the_same_on_one_machine, 3, mpi_launch_broken)
{
    atexit(say_through);
    check_ends();
    exit(EXIT_SUCCESS);
}

MPI_TEST_UNDER(ends_are_the_same_on_several_machines, 3, mpi_launch_broken)
{
    atexit(say_through);
    setenv("DP_MACHINE", machine_of("abc"), 1);
    check_ends();
    exit(EXIT_SUCCESS);
}

/* Process 3 closes its context, and the others are in a step, or in an edit that it has begun. */
static void check_leaving(bool in_edit)
{
    dp_ctx *ctx = mesh_open(1, 20000);
    dp_module *par = par_of(ctx, DP_F32, false, true);
    dp_optim *optim = optim_of(par, &rules[0], (dp_optim_config){0});
    train(par, optim, 1);
    if (in_edit) {
        CHECK_OK(dp_edit_begin(par, DP_OK));
    }
    if (mpi_process != 3) {
        dp_status status = in_edit ? dp_edit_end(par, DP_OK) : dp_optim_step(optim);
        CHECK_STATUS(status, DP_ERR_REMOTE);
        CHECK_SAYS(dp_last_error(), "rank 3 (process 3, pid ");
        CHECK_SAYS(dp_last_error(), "has closed its context");
    }
    dp_close(ctx);
    come_together();
}

MPI_TEST_UNDER(who_leaves_what_is_shared_is_named, 4, mpi_launch_broken)
{
    setenv("DP_MACHINE", machine_of("aabb"), 1);
    check_leaving(false);
    check_leaving(true);
    say_through();
}

/* Also a large one, of which some pieces have been given to MPI. */
MPI_TEST_UNDER(missing_process_is_named, 3, mpi_launch_broken)
{
    atexit(say_through);
    dp_ctx *ctx = mesh_open(1, 400);
    dp_failure_info failure;
    CHECK_OK(add_up(ctx, 25));
    if (mpi_process == 1) {
        a_while(3000);
    }
    CHECK_ERROR(add_up(ctx, 1 << 20), DP_ERR_TIMEOUT,
                "collective 2, all_reduce of 1048576 f32 (sum): rank 1 (process 1, pid ");
    CHECK_SAYS(dp_last_error(), ") did not come within 400 ms; its last one was 1, all_reduce of ");
    CHECK_STATUS(dp_barrier(ctx), DP_ERR_TIMEOUT);
    CHECK(dp_failure(ctx, &failure));
    dp_close(ctx);
    exit(EXIT_SUCCESS);
}

MPI_TEST_UNDER(missing_process_of_another_host_is_named, 2, mpi_launch_apart_broken)
{
    atexit(say_through);
    dp_ctx *ctx = NULL;
    be_on_a_host();
    CHECK_OK(dp_open(&(dp_config){.device_count = 1, .timeout_ms = 400}, &ctx));
    CHECK_OK(add_up(ctx, 25));
    if (mpi_process == 1) { /* what is small has been sent, and may do still */
        a_while(2500);
        dp_status status = add_up(ctx, 25);
        CHECK(status == DP_OK || status == DP_ERR_TIMEOUT);
    }
    CHECK_ERROR(add_up(ctx, 25), DP_ERR_TIMEOUT,
                "collective 2, all_reduce of 25 f32 (sum): rank 1 (process 1, pid ");
    CHECK_SAYS(dp_last_error(), ") did not come within 400 ms; its last one was 1, all_reduce of ");
    dp_close(ctx);
    exit(EXIT_SUCCESS);
}

/* Who waits, but not for as long as the others, answers them. */
MPI_TEST_UNDER(present_process_is_not_named, 3, mpi_launch_broken)
{
    atexit(say_through);
    dp_ctx *ctx = mesh_open(1, 1500);
    CHECK_OK(add_up(ctx, 25));
    if (mpi_process > 0) {
        a_while(mpi_process == 1 ? 4000 : 1600);
    }
    CHECK_ERROR(add_up(ctx, 1 << 20), DP_ERR_TIMEOUT, ": rank 1 (process 1, pid ");
    CHECK_SAYS(dp_last_error(), ") did not come within 1500 ms");
    dp_close(ctx);
    exit(EXIT_SUCCESS);
}

/* Who waits for the courier waits too. */
MPI_TEST_UNDER(process_that_waits_for_the_courier_is_not_named, 3, mpi_launch_broken)
{
    float number = 1;
    void *local[] = {&number};
    const dp_block block = {DP_F32, 1, local};
    dp_reducer *reducer;
    atexit(say_through);
    dp_ctx *ctx = mesh_open(1, 1000);
    CHECK_OK(dp_reducer_create(
        ctx, &(dp_reducer_config){.blocks = &block, .block_count = 1, .reduction = DP_SUM_RANKS},
        &reducer));
    if (mpi_process == 2) {
        a_while(4000);
    }
    if (mpi_process == 1) {
        CHECK_OK(dp_reducer_begin(reducer, NULL));
        CHECK_OK(dp_reducer_ready(reducer, 0, 0, NULL));
    }
    CHECK_ERROR(mpi_process == 1 ? dp_reducer_finish(reducer) : add_up(ctx, 25), DP_ERR_TIMEOUT,
                ": rank 2 (process 2, pid ");
    dp_close(ctx);
    exit(EXIT_SUCCESS);
}

static void *abort_soon(void *ctx)
{
    a_while(200);
    dp_abort(ctx, DP_ERR_ABORTED, "somebody has pressed a key");
    return NULL;
}

MPI_TEST_UNDER(an_abort_ends_ones_own_wait, 2, mpi_launch_broken)
{
    atexit(say_through);
    dp_ctx *ctx = mesh_open(1, 40000);
    pthread_t thread;
    time_t start = time(NULL);
    CHECK_OK(add_up(ctx, 25));
    if (mpi_process == 0) {
        CHECK_INT(pthread_create(&thread, NULL, abort_soon, ctx), 0);
    } else {
        a_while(1500);
    }
    CHECK_ERROR(add_up(ctx, 1 << 20), DP_ERR_ABORTED, "somebody has pressed a key");
    CHECK(time(NULL) - start < 20);
    if (mpi_process == 0) {
        CHECK_INT(pthread_join(thread, NULL), 0);
    }
    dp_close(ctx);
    exit(EXIT_SUCCESS);
}

/* The one that says it is not in a collective; the others wait, and hear why. */
MPI_TEST_UNDER(aborting_process_gives_the_reason, 3, mpi_launch_broken)
{
    atexit(say_through);
    dp_ctx *ctx = mesh_open(1, 20000);
    CHECK_OK(add_up(ctx, 25));
    if (mpi_process == 2) {
        a_while(100);
        dp_abort(ctx, DP_ERR_ABORTED, "the %s is full", "disk");
        CHECK_ERROR(add_up(ctx, 25), DP_ERR_ABORTED, "the disk is full");
    } else {
        CHECK_ERROR(add_up(ctx, 25), DP_ERR_ABORTED, ": rank 2 (process 2, pid ");
        CHECK_SAYS(dp_last_error(), ") failed: the disk is full");
    }
    dp_close(ctx);
    exit(EXIT_SUCCESS);
}

/* Where MPI has brought the processes together, and a table that has no way to say it carries their
   collectives on several machines. */
MPI_TEST_UNDER(abort_beside_another_table_gives_the_reason, 3, mpi_launch_broken)
{
    const dp_coll_ops *colls[] = {boot_coll(), NULL};
    dp_ctx *ctx = NULL;
    dp_failure_info failure;
    atexit(say_through);
    setenv("DP_MACHINE", machine_of("abc"), 1);
    CHECK_OK(dp_open(&(dp_config){.colls = colls, .device_count = 1, .timeout_ms = 20000}, &ctx));
    CHECK_OK(dp_barrier(ctx));
    if (mpi_process == 1) {
        a_while(100); /* the others come out of the barrier */
        dp_abort(ctx, DP_ERR_ABORTED, "the disk is full");
    }
    CHECK_ERROR(dp_barrier(ctx), DP_ERR_ABORTED,
                mpi_process == 1 ? "the disk is full" : ") failed: the disk is full");
    CHECK(dp_failure(ctx, &failure));
    CHECK_INT(failure.rank, 1);
    dp_close(ctx);
    exit(EXIT_SUCCESS);
}

/* Shared memory carries the collectives, and MPI has no part in the failure: who is not there any
   more would be missed in MPI_Finalize. */
MPI_TEST_UNDER(mpi_is_not_finalised_after_a_failure_in_memory, 3, mpi_launch_broken)
{
    atexit(say_through);
    dp_ctx *ctx = NULL;
    CHECK_OK(dp_open(&(dp_config){.device_count = 1, .timeout_ms = 400}, &ctx));
    CHECK_OK(add_up(ctx, 25));
    if (mpi_process == 1) {
        a_while(2000);
    }
    CHECK_ERROR(add_up(ctx, 25), DP_ERR_TIMEOUT, "rank 1 (process 1, ");
    dp_close(ctx);
    exit(EXIT_SUCCESS);
}

MPI_TEST_UNDER(process_in_another_collective_is_named, 3, mpi_launch_broken)
{
    atexit(say_through);
    for (int kind = 0; kind < OTHER_CALLS; kind++) {
        check_strays(kind, kind % 3 == 0);
    }
    exit(EXIT_SUCCESS);
}

/* Two reducers of one number each, which only their names and their places tell apart. */
static dp_ctx *open_with_two(dp_reducer_config config, dp_reducer *out[2])
{
    static const char *const names[] = {"left", "right"};
    static float numbers[2];
    dp_ctx *ctx = mesh_open(1, 60000);
    for (int i = 0; i < 2; i++) {
        void *local[] = {&numbers[i]};
        const dp_block block = {DP_F32, 1, local};
        numbers[i] = 1;
        config.name = names[i];
        config.blocks = &block;
        config.block_count = 1;
        CHECK_OK(dp_reducer_create(ctx, &config, &out[i]));
    }
    return ctx;
}

/* Nothing is added up, and both sides of the mistake are named. */
static void check_mix_up(dp_ctx *ctx, dp_status status, const char *one, const char *other)
{
    CHECK_ERROR(status, DP_ERR_REMOTE, one);
    CHECK_SAYS(dp_last_error(), other);
    CHECK_SAYS(dp_last_error(), ") has issued all_reduce of ");
    CHECK_SAYS(dp_last_error(), "all must make the same calls in the same order");
    dp_close(ctx);
}

static void finish_in_another_order(dp_unused rule)
{
    dp_reducer *reducers[2];
    dp_ctx *ctx = open_with_two(
        (dp_reducer_config){.reduction = DP_SUM_RANKS, .unused_units = rule}, reducers);
    for (int i = 0; i < 2; i++) {
        CHECK_OK(dp_reducer_begin(reducers[i], NULL));
        CHECK_OK(dp_reducer_ready(reducers[i], 0, 0, NULL));
    }
    check_mix_up(ctx, dp_reducer_finish(reducers[mpi_process]),
                 "gradients of 'left', in dp_reducer_finish",
                 "gradients of 'right' (reducer 2), in dp_reducer_finish");
}

static void travel_in_another_order(void)
{
    dp_reducer *reducers[2];
    dp_failure_info failure = {DP_OK, 0, "", ""};
    dp_ctx *ctx = open_with_two((dp_reducer_config){.reduction = DP_SUM_RANKS}, reducers);
    CHECK_OK(dp_reducer_begin(reducers[mpi_process], NULL));
    CHECK_OK(dp_reducer_ready(reducers[mpi_process], 0, 0, NULL)); /* from here on it travels */
    for (int i = 0; i < 2000 && !dp_failure(ctx, &failure); i++) {
        a_while(5);
    }
    check_mix_up(ctx, dp_reducer_finish(reducers[mpi_process]), "bucket 0 of 'left', unit 0",
                 "bucket 0 of 'right', unit 0 (reducer 2)");
}

static void count_samples_in_another_order(void)
{
    const double samples = 3;
    dp_reducer *reducers[2];
    dp_ctx *ctx = open_with_two((dp_reducer_config){.reduction = DP_MEAN_SAMPLES}, reducers);
    check_mix_up(ctx,
                 dp_reducer_begin(reducers[mpi_process], &(dp_reduce_pass){.samples = &samples}),
                 "gradients of 'left', in dp_reducer_begin",
                 "gradients of 'right' (reducer 2), in dp_reducer_begin");
}

MPI_TEST_UNDER(reducers_in_another_order, 2, mpi_launch_broken)
{
    atexit(say_through);
    finish_in_another_order(DP_UNUSED_ERROR);
    finish_in_another_order(DP_UNUSED_FOUND);
    travel_in_another_order();
    count_samples_in_another_order();
    exit(EXIT_SUCCESS);
}

MPI_TEST_UNDER(rank_with_another_root_is_named, 3, mpi_launch_broken)
{
    atexit(say_through);
    other_root();
    exit(EXIT_SUCCESS);
}

/* As it is, mpirun ends all others when a process is killed, before they could say why. */
static void mpi_launch_to_be_ended(const char *name, int processes)
{
    time_t start = time(NULL);
    char directory[] = "build/mpirun-XXXXXX", run[200], left[sizeof directory + 2];
    CHECK(mkdtemp(directory) != NULL);
    snprintf(run, sizeof run, "timeout 30 %s -np %d /proc/%d/exe mpi/%s >/dev/null 2>&1", MPIRUN,
             processes, (int)getpid(), name);
    unsetenv("DP_LAUNCH");
    setenv("TEST_HERE", directory, 1);
    CHECK(system(run) != 0);
    CHECK(time(NULL) - start < 15);
    CHECK_INT(count_through(directory, processes), 1);
    snprintf(left, sizeof left, "%s/1", directory);
    CHECK_INT(remove(left), 0); /* of who was killed, and had come so far */
    CHECK_INT(remove(directory), 0);
}

MPI_TEST_UNDER(killed_process_ends_all, 3, mpi_launch_to_be_ended)
{
    dp_ctx *ctx = mesh_open(1, 60000);
    CHECK_OK(add_up(ctx, 25));
    if (mpi_process == 1) {
        leave_file();
        raise(SIGKILL);
    }
    while (add_up(ctx, 25) == DP_OK) {
    }
    a_while(60000);
}

#if defined(OPEN_MPI)
/* Told not to, it leaves them to themselves. That of MPICH sometimes falls over then. */
static void mpi_launch_to_go_on(const char *name, int processes)
{
    launch_here(MPIRUN " --enable-recovery", name, processes, false);
}

static void *die_soon(void *user)
{
    (void)user;
    a_while(300);
    raise(SIGKILL);
    return NULL;
}

/* Process 1 dies, at once, or while it adds up with others. */
static void one_is_killed(size_t count, bool soon)
{
    pthread_t thread;
    dp_ctx *ctx = mesh_open(1, 2000);
    dp_failure_info failure;
    dp_status status = add_up(ctx, 25);
    CHECK_OK(status);
    if (mpi_process == 1) {
        leave_file(); /* it will not be able to say that it is through */
        CHECK_INT(soon ? pthread_create(&thread, NULL, die_soon, NULL) : raise(SIGKILL), 0);
    } else {
        atexit(say_through);
    }
    while (status == DP_OK) {
        status = add_up(ctx, count);
    }
    CHECK_INT(dp_status_class(status), DP_CLASS_JOB);
    CHECK_ERROR(status, status, ": rank 1 (process 1, pid ");
    CHECK(dp_failure(ctx, &failure));
    CHECK_INT(failure.rank, 1);
    dp_close(ctx);
    exit(EXIT_SUCCESS);
}

MPI_TEST_UNDER(killed_process_is_named, 3, mpi_launch_to_go_on)
{
    if (mpi_process == 1) {
        leave_file(); /* it will not be able to say that it is through */
    } else {
        atexit(say_through);
    }
    dp_ctx *ctx = end_begin(mesh_open(1, END_TIMEOUT_MS));
    come_together();
    run_end(ctx, mpi_process, &end_cases[0]);
    exit(EXIT_SUCCESS);
}

MPI_TEST_UNDER(process_killed_in_a_group_sum_is_named, 4, mpi_launch_to_go_on)
{
    setenv("DP_MACHINE", machine_of("aabb"), 1);
    one_is_killed(1 << 20, true);
}
#endif

/* Also to itself, when it comes. */
MPI_TEST_UNDER(a_process_that_does_not_open_is_named, 3, mpi_launch_broken)
{
    atexit(say_through);
    dp_ctx *ctx = NULL;
    int level;
    MPI_Init_thread(NULL, NULL, MPI_THREAD_MULTIPLE, &level);
    if (mpi_process == 1) {
        a_while(2000);
    }
    CHECK_ERROR(dp_open(&(dp_config){.device_count = 1, .timeout_ms = 300}, &ctx), DP_ERR_TIMEOUT,
                "dp_open: step 0 of meeting: process 1 of 3 did not come within 300 ms");
    exit(EXIT_SUCCESS);
}

/* A failure that only one has, before all are in: the others are told. */
MPI_TEST_UNDER(failed_open_is_reported_to_all, 3, mpi_launch)
{
    const dp_coll_ops *colls[] = {dp_mpi_coll(), NULL};
    dp_ctx *ctx = NULL;
    dp_config config = {.colls = colls, .device_count = mpi_process == 1 ? -1 : 1};
    CHECK_STATUS(dp_open(&config, &ctx), mpi_process == 1 ? DP_ERR_INVALID : DP_ERR_REMOTE);
    config.device_count = 1;
    CHECK_OK(dp_open(&config, &ctx));
    CHECK_OK(dp_barrier(ctx));
    dp_close(ctx);
}

/* Built with one MPI, started by another's mpirun: each process would be a world of one. */
static void launch_by_the_other(const char *name, int processes)
{
    if (system("command -v " OTHER_RUN " >/dev/null") != 0) {
        SKIP("there is no other MPI");
    }
    launch_here(OTHER_RUN, name, processes, true);
}

MPI_TEST_UNDER(another_mpis_mpirun, 2, launch_by_the_other)
{
    dp_ctx *ctx = NULL;
    CHECK_ERROR(dp_open(&(dp_config){.device_count = 1}, &ctx), DP_ERR_MISMATCH,
                "has started 2 processes");
}
