/* meeting.h - jobs of several processes on one machine, which meet through dp_config.bootstrap: all
   talk to process 0 by sockets. A context may open two communicators, and use them at the same
   time: each has sockets of its own. The same jobs run on GPUs, too, over NCCL: on the simulator's,
   or on those of the machine, which the processes share. */

#ifndef MEETING_H
#define MEETING_H

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>
#include "boot_coll.h"
#include "ends.h"
#include "gpus.h"
#include "process.h"

enum { PATIENCE_MS = 5000 };

/* For jobs that fail: the time-out, and how long it may take to say who is at fault, where that is
   seen at once, and where the time-out has to pass. */
enum { TIMEOUT_MS = 2000, SOON_MS = 1500, LATE_MS = 5000 };

typedef struct meeting {
    int process, process_count;
    int ends[BOOT_PROCESSES][2]; /* of process p: the hub's end, its own end */
    struct meeting *second;      /* for the second communicator of a context */
} meeting;

/* ---- GPUs ------------------------------------------------------------------------------------ */

/* How many each process has, whatever a test asks for: a digit each. NULL: none, and it gets what
   it asks for. */
static const char *meeting_gpus;

#if defined(TEST_CUDA)
/* GPUs of this process' own, and the library's own collectives. */
static inline void config_gpus(int process, dp_config *config)
{
    static const dp_device_ops *backends[2];
    int first = 0;
    for (int p = 0; p < process; p++)
        first += meeting_gpus[p] - '0';
    config->device_count = meeting_gpus[process] - '0';
    backends[0] = cuda_device_at(first, config->device_count);
    config->backends = backends;
    config->colls = NULL;
}
#else
static inline void config_gpus(int process, dp_config *config)
{
    (void)process, (void)config;
}
#endif

#if defined(TEST_SIM)
/* The simulator may find something, up to forget_findings(). */
static inline void expect_findings(void)
{
    sim_hush(true);
}

static inline void forget_findings(void)
{
    sim_hush(false);
    sim_forget_findings();
}
#else
static inline void expect_findings(void)
{
}

static inline void forget_findings(void)
{
}
#endif

/* ---- processes ------------------------------------------------------------------------------- */

/* Memory that all processes of a test see. */
static inline void *shared_memory(size_t bytes)
{
    int zeros = open("/dev/zero", O_RDWR);
    void *data = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, zeros, 0);
    CHECK(data != MAP_FAILED);
    close(zeros);
    return data;
}

static inline dp_status meeting_send(int fd, const void *data, size_t bytes)
{
    for (size_t done = 0; done < bytes;) {
        ssize_t wrote = send(fd, (const char *)data + done, bytes - done, MSG_NOSIGNAL);
        if (wrote < 0 && errno != EINTR) {
            return dp_error(DP_ERR_REMOTE, "meeting: a process has left");
        }
        done += wrote > 0 ? (size_t)wrote : 0;
    }
    return DP_OK;
}

static _Thread_local const dp_host
    *meeting_host; /* whose table waits here, as meeting_coll() does */

static inline dp_status meeting_receive(int fd, void *data, size_t bytes)
{
    int left_ms = (int)(PATIENCE_MS * test_timeout_scale());
    for (size_t done = 0; done < bytes;) {
        struct pollfd ready = {.fd = fd, .events = POLLIN};
        if (meeting_host != NULL && meeting_host->aborted(meeting_host)) {
            return dp_error(DP_ERR_ABORTED, "meeting: the job has failed");
        }
        if (left_ms <= 0) {
            return dp_error(DP_ERR_TIMEOUT, "meeting: a process does not come");
        }
        if (poll(&ready, 1, 5) == 0) {
            left_ms -= 5;
            continue;
        }
        ssize_t got = read(fd, (char *)data + done, bytes - done);
        if (got == 0 || (got < 0 && errno != EINTR)) {
            return dp_error(DP_ERR_REMOTE, "meeting: a process has left");
        }
        done += got > 0 ? (size_t)got : 0;
    }
    return DP_OK;
}

/* All go to the hub, which is process 0, and come back together. */
static inline dp_status meeting_all_gather(const void *in, void *out, size_t bytes_each, void *user)
{
    const meeting *m = user;
    char *all = out;
    dp_status status = DP_OK;
    if (m->process != 0) {
        status = meeting_send(m->ends[m->process][1], in, bytes_each);
        return status != DP_OK ? status
                               : meeting_receive(m->ends[m->process][1], out,
                                                 bytes_each * (size_t)m->process_count);
    }
    memcpy(all, in, bytes_each);
    for (int p = 1; p < m->process_count && status == DP_OK; p++) {
        status = meeting_receive(m->ends[p][0], all + (size_t)p * bytes_each, bytes_each);
    }
    for (int p = 1; p < m->process_count && status == DP_OK; p++) {
        status = meeting_send(m->ends[p][0], out, bytes_each * (size_t)m->process_count);
    }
    return status;
}

/* Only what a process needs stays open, so that the others see when it ends. */
static inline void meeting_enter(meeting *m, int process)
{
    m->process = process;
    for (int p = 1; p < m->process_count; p++) {
        if (process != 0) {
            close(m->ends[p][0]);
        }
        if (process != p) {
            close(m->ends[p][1]);
        }
    }
}

/* Process `victim` need not end well: it may be killed, or stopped for good. -1: all must. */
static inline void in_processes_but(int process_count, int victim, void (*body)(meeting *m))
{
    meeting second = {.process_count = process_count};
    meeting m = {.process_count = process_count, .second = &second};
    pid_t pids[BOOT_PROCESSES];
    test_needs_processes(process_count);
    for (int p = 1; p < process_count; p++) {
        CHECK_INT(socketpair(AF_UNIX, SOCK_STREAM, 0, m.ends[p]), 0);
        CHECK_INT(socketpair(AF_UNIX, SOCK_STREAM, 0, second.ends[p]), 0);
    }
    for (int p = 0; p < process_count; p++) {
        pids[p] = fork();
        CHECK(pids[p] >= 0);
        if (pids[p] == 0) {
            meeting_enter(&m, p);
            meeting_enter(&second, p);
            body(&m);
            if (meeting_gpus != NULL)
                cuda_check_leaks();
            exit(EXIT_SUCCESS);
        }
    }
    meeting_enter(&m, process_count);
    meeting_enter(&second, process_count);
    for (int p = 0; p < process_count; p++) {
        int status = 0;
        if (p == victim) {
            continue;
        }
        CHECK_INT(waitpid(pids[p], &status, 0), pids[p]);
        if (!WIFEXITED(status) || WEXITSTATUS(status) != EXIT_SUCCESS) {
            test_fail(__FILE__, __LINE__, "process %d of %d ended with status 0x%x", p,
                      process_count, (unsigned)status);
        }
    }
    if (victim >= 0) { /* until now it was a zombie, or still there */
        kill(pids[victim], SIGKILL);
        CHECK_INT(waitpid(pids[victim], NULL, 0), pids[victim]);
    }
}

/* Run `body` in so many processes; each must end well. */
static inline void in_processes(int process_count, void (*body)(meeting *m))
{
    in_processes_but(process_count, -1, body);
}

/* boot_coll() with a meeting of its own for each of a context's communicators. */
static const dp_host *meeting_met; /* the context that has its first one */

static inline const dp_coll_ops *meeting_coll(void);

static inline dp_status meeting_coll_open(const dp_host *host, const dp_comm_config *config,
                                          dp_comm **out)
{
    const meeting *m = config->bootstrap->user;
    dp_comm_config own = *config;
    dp_bootstrap boot = *config->bootstrap;
    if (host == meeting_met) {
        boot.user = m->second;
    }
    meeting_met = host;
    own.bootstrap = &boot;
    dp_status status = boot_open(host, &own, out);
    if (status == DP_OK) {
        (*out)->ops = meeting_coll();
    }
    return status;
}

static inline dp_status meeting_coll_run(dp_comm *comm, const dp_coll_call *call)
{
    meeting_host = comm->host;
    dp_status status = boot_coll()->run(comm, call);
    meeting_host = NULL;
    return status;
}

static inline void meeting_coll_close(dp_comm *comm)
{
    meeting_met = NULL;
    boot_close(comm);
}

static inline const dp_coll_ops *meeting_coll(void)
{
    static dp_coll_ops ops;
    if (ops.head.size == 0) {
        ops = *boot_coll();
        ops.open = meeting_coll_open;
        ops.close = meeting_coll_close;
        ops.run = meeting_coll_run;
    }
    return &ops;
}

/* What all processes have, whatever a test asks for, with the library's own collectives. NULL: what
   it asks for. */
static const dp_device_ops *meeting_device;

/* A letter for each process: on which machine it seems to be. NULL: all are on this one. */
static const char *meeting_machines;
static bool meeting_by_tcp; /* what goes between machines, instead of through boot_coll() */

static inline dp_config config_of(meeting *m, int device_count)
{
    static const dp_coll_ops *colls[2];
    static const dp_device_ops *backends[2];
    colls[0] = meeting_coll();
    backends[0] = meeting_device;
    dp_config config = {.colls = colls,
                        .device_count = device_count,
                        .bootstrap = {.all_gather = meeting_all_gather,
                                      .user = m,
                                      .process = m->process,
                                      .process_count = m->process_count}};
    if (meeting_machines != NULL) {
        const char name[] = {meeting_machines[m->process], '\0'};
        CHECK_INT(setenv("DP_MACHINE", name, 1), 0);
        CHECK_INT(setenv("DP_INTERFACE", meeting_by_tcp ? "lo" : "nowhere", 1), 0);
    }
    if (meeting_by_tcp) {
        config.colls = NULL;
    }
    if (meeting_gpus != NULL)
        config_gpus(m->process, &config);
    if (meeting_device != NULL) {
        config.backends = backends;
        config.colls = NULL;
    }
    return config;
}

/* Run `body` in a process for each letter, on machines of these names; without messages between
   them, and over TCP. */
static inline void on_machines(const char *machines, void (*body)(meeting *m))
{
    meeting_machines = machines;
    for (int by_tcp = 0; by_tcp < 2; by_tcp++) {
        meeting_by_tcp = by_tcp != 0;
        in_processes((int)strlen(machines), body);
    }
    meeting_by_tcp = false;
    meeting_machines = NULL;
}

/* Run `body` in so many processes, with devices of this table; all must end well. */
static inline void in_processes_on(const dp_device_ops *ops, int processes,
                                   void (*body)(meeting *m))
{
    meeting_device = ops;
    in_processes(processes, body);
    meeting_device = NULL;
}

/* Run `body` on GPUs, a digit of `gpus` for each process; all must end well, but for `victim`. */
static inline void on_gpus_but(const char *gpus, int victim, void (*body)(meeting *m))
{
    cuda_processes();
    meeting_gpus = gpus;
    in_processes_but((int)strlen(gpus), victim, body);
    meeting_gpus = NULL;
}

static inline void on_gpus(const char *gpus, void (*body)(meeting *m))
{
    on_gpus_but(gpus, -1, body);
}

static inline dp_ctx *open_job(meeting *m, int device_count, const dp_device_ops *ops)
{
    static const dp_device_ops *backends[2];
    dp_config config = config_of(m, device_count);
    dp_ctx *ctx = NULL;
    backends[0] = ops;
    if (config.backends == NULL)
        config.backends = backends;
    CHECK_OK(dp_open(&config, &ctx));
    return ctx;
}

/* Outside the job, so that its failure does not reach who is not through with what came before. */
static inline void wait_for_all(meeting *m)
{
    char all[BOOT_PROCESSES], own = 0;
    CHECK_OK(meeting_all_gather(&own, all, 1, m));
}

/* Until those who wait for this process have ended, on a machine that is slow too. */
static inline void rest_too_long(void)
{
    rest(TIMEOUT_MS + (int)(1000 * test_timeout_scale()));
}

typedef struct heard { /* what the log got at error level */
    int count;
    char lines[40][600];
} heard;

static inline void hear(const dp_log_record *record, void *user)
{
    heard *all = user;
    if (record->level == DP_LOG_ERROR && all->count < 40)
        snprintf(all->lines[all->count++], sizeof all->lines[0], "%s", record->text);
}

/* ---- who is named, and by what --------------------------------------------------------------- */

/* `status`, of what has begun at `start`, ends the job because of `rank`, which is a process of its
   own; and so does all that follows. */
static inline void check_named(dp_ctx *ctx, dp_status status, double start, int most_ms, int rank,
                               const char *what)
{
    char who[40];
    dp_failure_info failure;
    double spent = now_ms() - start;
    snprintf(who, sizeof who, "rank %d (process %d, pid ", rank, rank);
    CHECK_INT(dp_status_class(status), DP_CLASS_JOB);
    CHECK_SAYS(dp_last_error(), who);
    CHECK_SAYS(dp_last_error(), what);
    CHECK(spent < most_ms * test_timeout_scale());
    CHECK(dp_failure(ctx, &failure));
    CHECK_INT(failure.status, status);
    CHECK_INT(failure.rank, rank);
    CHECK_SAYS(failure.text, who);
    CHECK_SAYS(failure.text, what);
    CHECK_STATUS(dp_barrier(ctx), status);
    CHECK_STATUS(dp_wait(ctx), status);
}

static int moment; /* until process 1 gets its signal, in microseconds */

static inline void *after_a_moment(void *signal)
{
    nanosleep(&(struct timespec){.tv_nsec = moment * 1000L}, NULL);
    raise(*(const int *)signal);
    return NULL;
}

/* Process 1 gets a signal, at any point of what it does next. */
static inline void signal_soon(const meeting *m, int signal)
{
    static int which;
    pthread_t thread;
    which = signal;
    if (m->process == 1)
        CHECK_INT(pthread_create(&thread, NULL, after_a_moment, &which), 0);
}

/* ---- names in /dev/shm ----------------------------------------------------------------------- */

/* Tests beside this one have names for a moment; what is left behind stays. */
static inline void check_names(int before)
{
    for (int i = 0; i < 300 && count_names("/dev/shm", "dp-") > before; i++)
        rest(10);
    CHECK(count_names("/dev/shm", "dp-") <= before);
}

/* ---- how a job ends -------------------------------------------------------------------------- */

static dp_ctx *(*end_open)(meeting *m);
static const end_case *end_want;

/* What a simulator finds where processes differ is meant. */
static inline void one_ends(meeting *m)
{
    expect_findings();
    dp_ctx *ctx = end_begin(end_open(m));
    wait_for_all(m);
    run_end(ctx, m->process, end_want);
    forget_findings();
}

/* All rows of the table, over one carrier. */
static inline void check_ends_over(dp_ctx *(*carrier)(meeting *m))
{
    end_open = carrier;
    for (end_want = end_cases; end_want < end_cases + END_CASES; end_want++) {
        bool lost = end_want->cause == end_die || end_want->cause == end_stop;
        in_processes_but(END_PROCESSES, lost ? 1 : -1, one_ends);
    }
}

#endif /* MEETING_H */
