/* worker.c - one process of the jobs that faults.py disturbs.

     worker train DIRECTORY          as some launcher says
     worker spawn COUNT DIRECTORY    so many of them, by dp_spawn
     worker check FILE               whether a checkpoint is whole; prints its step

   It trains a small net, keeps a checkpoint now and then, and writes into DIRECTORY/PROCESS what
   happens to it: a line each, with the time in front. A signal makes it abort the job, another one
   exit as it is: a thread of their own gets them, in the middle of whatever the process does.

   FAULTS_TIMEOUT is the job's time-out in ms, FAULTS_LATE how long each process waits before it
   opens a context (a list), FAULTS_TREE=1 lets the connections through which processes have met
   carry the collectives too. */

#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>
#include "../../dp_save.h"
#include "../../dp_train.h"
#include "../../examples/mlp.h"
#include "../boot_coll.h"
#ifdef TEST_MPI
#include <mpi.h>
#endif

enum { STEPS = 300, KEEP = 10, ROWS = 8, INPUTS = 16, CLASSES = 4, STAMP = 20000, STEP_MS = 4 };

static struct {
    const char *directory;
    int process, file;
    pthread_mutex_t lock;
    dp_ctx *ctx; /* while it may be aborted */
} self = {.file = -1, .lock = PTHREAD_MUTEX_INITIALIZER};

/* One write for each line, so that a process dies before it or after it. */
DP_PRINTF(1, 2) static void say(const char *format, ...)
{
    char line[3000];
    struct timespec now;
    va_list args;
    clock_gettime(CLOCK_MONOTONIC, &now);
    int used = snprintf(line, sizeof line, "%ld.%06ld ", (long)now.tv_sec, now.tv_nsec / 1000);
    va_start(args, format);
    used += vsnprintf(line + used, sizeof line - 2 - (size_t)used, format, args);
    va_end(args);
    used = used < (int)sizeof line - 1 ? used : (int)sizeof line - 2;
    for (int i = 0; i < used; i++) /* what MPI says has several lines */
        line[i] = line[i] == '\n' ? ' ' : line[i];
    line[used] = '\n';
    if (write(self.file, line, (size_t)used + 1) != used + 1)
        _exit(3);
}

static void open_file(const char *name)
{
    char path[256];
    snprintf(path, sizeof path, "%s/%s", self.directory, name);
    self.file = open(path, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600);
    if (self.file < 0)
        _exit(3);
}

static void nap(int ms)
{
    nanosleep(&(struct timespec){ms / 1000, ms % 1000 * 1000000L}, NULL);
}

static int number_of(const char *variable, int otherwise)
{
    const char *text = getenv(variable);
    return text != NULL ? atoi(text) : otherwise;
}

/* The i-th number of a list. */
static int late_ms(int process)
{
    const char *at = getenv("FAULTS_LATE");
    for (int i = 0; i < process && at != NULL; i++)
        at = (at = strchr(at, ',')) != NULL ? at + 1 : NULL;
    return at != NULL ? atoi(at) : 0;
}

/* ---- what an operator does ------------------------------------------------------------------- */

#define ABORT (SIGRTMIN + 1) /* MPICH has a use for SIGUSR1 */
#define LEAVE (SIGRTMIN + 2)

static void *obey(void *signals)
{
    for (int signal = 0;;) {
        if (sigwait(signals, &signal) != 0)
            continue;
        if (signal == LEAVE) {
            say("left");
            _exit(0);
        }
        pthread_mutex_lock(&self.lock);
        if (self.ctx != NULL) {
            say("aborts");
            dp_abort(self.ctx, DP_ERR_ABORTED, "the operator gave up");
        }
        pthread_mutex_unlock(&self.lock);
    }
    return NULL;
}

static void begin_to_obey(void)
{
    static sigset_t signals;
    pthread_t thread;
    sigemptyset(&signals);
    sigaddset(&signals, ABORT);
    sigaddset(&signals, LEAVE);
    pthread_sigmask(SIG_BLOCK, &signals, NULL);
    if (pthread_create(&thread, NULL, obey, &signals) != 0)
        _exit(3);
    pthread_detach(thread);
}

static void may_be_aborted(dp_ctx *ctx)
{
    pthread_mutex_lock(&self.lock);
    self.ctx = ctx;
    pthread_mutex_unlock(&self.lock);
}

/* ---- the job --------------------------------------------------------------------------------- */

/* A file that is not whole would hold stamps of two steps. */
static dp_status keep(dp_ctx *ctx, dp_module *net, int step)
{
    static int32_t stamp[STAMP];
    char path[256];
    dp_value model;
    dp_scope *scope = dp_scope_begin(ctx);
    snprintf(path, sizeof path, "%s/disk/last.safetensors", self.directory);
    for (int i = 0; i < STAMP; i++)
        stamp[i] = step;
    DP_TRY(dp_module_save(net, scope, &model));
    dp_value all = DP_DICT(scope, {"model", model}, {"step", dp_int(step)},
                           {"stamp", dp_array(scope, stamp, DP_I32, DP_SHAPE(STAMP))});
    dp_status status = dp_checkpoint_save(ctx, path, all);
    dp_scope_end(scope);
    if (status == DP_OK)
        say("kept %d", step);
    if (dp_status_class(status) != DP_CLASS_PASS)
        return status;
    say("refused %d %s", step, dp_last_error());
    return DP_OK;
}

static dp_status train_step(dp_module *par, dp_optim *optim, int step)
{
    float image[ROWS][INPUTS];
    int64_t label[ROWS];
    for (int i = 0; i < ROWS; i++) {
        label[i] = (step + i + self.process) % CLASSES;
        for (int k = 0; k < INPUTS; k++)
            image[i][k] = (float)(k % CLASSES == label[i]);
    }
    dp_scope *scope = dp_scope_begin(dp_module_ctx(par));
    dp_value log,
        batch = DP_DICT(scope, {"image", dp_array(scope, image, DP_F32, DP_SHAPE(ROWS, INPUTS))},
                        {"label", dp_array(scope, label, DP_I64, DP_SHAPE(ROWS))});
    dp_status status = dp_train_step(par, scope, batch, optim, &log);
    dp_scope_end(scope);
    nap(STEP_MS);
    return status;
}

/* Where collectives have one line alone, nothing can travel beside them. */
static dp_status train_by_hand(dp_ctx *ctx)
{
    static const mlp shape = {INPUTS, 32, CLASSES};
    static float numbers[1000];
    dp_part part = {.send = numbers, .recv = numbers};
    dp_module *net;
    DP_TRY(mlp_create(ctx, &shape, &net));
    for (int step = 0; step < STEPS; step++) {
        if (step % KEEP == 0)
            DP_TRY(keep(ctx, net, step));
        DP_TRY(dp_all_reduce(ctx, &part, 1000, DP_F32, DP_OP_MEAN));
        nap(STEP_MS);
    }
    return DP_OK;
}

static dp_status train(dp_ctx *ctx)
{
    static const mlp shape = {INPUTS, 32, CLASSES};
    const dp_optim_config config = {.rule = dp_adamw(), .hyper = {.lr = 1e-3}};
    dp_module *net, *par;
    dp_optim *optim;
    DP_TRY(mlp_create(ctx, &shape, &net));
    DP_TRY(dp_distributed(net, NULL, &par));
    DP_TRY(dp_optim_create(par, &config, &optim));
    for (int step = 0; step < STEPS; step++) {
        if (step % KEEP == 0)
            DP_TRY(keep(ctx, net, step));
        DP_TRY(train_step(par, optim, step));
    }
    return dp_params_compare(par);
}

#ifdef TEST_MPI
/* As programs do that use MPI themselves. */
static void begin_mpi(void)
{
    int level = 0;
    signal(SIGUSR1, SIG_IGN); /* by which MPICH's mpirun says that another process has ended */
    if (getenv("FAULTS_MPI") == NULL)
        return;
    MPI_Init_thread(NULL, NULL, MPI_THREAD_MULTIPLE, &level);
    MPI_Comm_set_errhandler(MPI_COMM_WORLD, MPI_ERRORS_RETURN);
}

static void end_mpi(dp_status status)
{
    if (getenv("FAULTS_MPI") != NULL && status == DP_OK)
        MPI_Finalize();
}
#else
static void begin_mpi(void)
{
}

static void end_mpi(dp_status status)
{
    (void)status;
}
#endif

/* From the beginning of a process to its end. */
static dp_status run(void *user)
{
    static const char *const numbers[] = {"DP_PROCESS", "OMPI_COMM_WORLD_RANK", "PMI_RANK"};
    const dp_coll_ops *colls[] = {boot_coll(), NULL};
    dp_config config = {.device_count = 1, .timeout_ms = number_of("FAULTS_TIMEOUT", 0)};
    dp_failure_info failure = {.rank = -1};
    char name[16];
    dp_ctx *ctx = NULL;
    (void)user;
    for (int i = 2; i >= 0; i--)
        self.process = number_of(numbers[i], self.process);
    config.colls = getenv("FAULTS_TREE") != NULL ? colls : NULL;
    snprintf(name, sizeof name, "%d", self.process);
    open_file(name);
    begin_to_obey();
    begin_mpi();
    say("begun %d", (int)getpid());
    nap(late_ms(self.process));
    say("opens");
    dp_status status = dp_open(&config, &ctx);
    if (status == DP_OK) {
        say("open");
        may_be_aborted(ctx);
        status = config.colls != NULL ? train_by_hand(ctx) : train(ctx);
        may_be_aborted(NULL);
        (void)dp_failure(ctx, &failure);
    }
    say("end %s %d %s", dp_status_name(status), failure.rank,
        status != DP_OK ? dp_last_error() : "");
    dp_close(ctx);
    say("closed");
    end_mpi(status);
    return status;
}

/* ---- the three programs ---------------------------------------------------------------------- */

static int spawn(int count)
{
    open_file("spawn");
    say("begun %d", (int)getpid());
    dp_status status = dp_spawn(count, run, NULL);
    bool child = waitpid(-1, NULL, WNOHANG) >= 0;
    say("end %s %d %s", dp_status_name(status), -1, status != DP_OK ? dp_last_error() : "");
    if (child)
        say("broken dp_spawn has left a child");
    return status != DP_OK;
}

static int check(const char *path)
{
    dp_ctx *ctx;
    dp_value all;
    const dp_tensor *stamp;
    DP_CHECK(dp_open(&(dp_config){.device_count = 1, .local_only = true}, &ctx));
    dp_scope *scope = dp_scope_begin(ctx);
    DP_CHECK(dp_file_read(ctx, scope, path, &all));
    int64_t step = dp_get(all, "step").as.i;
    DP_CHECK(dp_as_tensor(dp_get(all, "stamp"), "stamp", DP_I32, 1, &stamp));
    for (int i = 0; i < STAMP; i++)
        if (((const int32_t *)stamp->data)[i] != step) {
            printf("torn: %d and %d\n", (int)step, ((const int32_t *)stamp->data)[i]);
            return 1;
        }
    printf("%d\n", (int)step);
    dp_close(ctx);
    return 0;
}

int main(int argc, char **argv)
{
    if (argc == 3 && strcmp(argv[1], "check") == 0)
        return check(argv[2]);
    if (argc < 3)
        return 2;
    self.directory = argv[argc - 1];
    if (argc == 4 && strcmp(argv[1], "spawn") == 0)
        return spawn(atoi(argv[2]));
    return run(NULL) != DP_OK;
}
