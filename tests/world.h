/* world.h - jobs of several processes of one machine, as launchers start them: what the environment
   says, where they meet, and a test in each of them. */

#ifndef WORLD_H
#define WORLD_H

#include <arpa/inet.h>
#include <errno.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>
#include "boot_coll.h"

/* ---- the environment ------------------------------------------------------------------------- */

static const char *const all_variables[] = {
    "DP_LAUNCH",
    "DP_PROCESS",
    "DP_PROCESS_COUNT",
    "DP_LOCAL_PROCESS",
    "DP_LOCAL_PROCESS_COUNT",
    "DP_ADDR",
    "DP_SECRET",
    "DP_PORTS",
    "DP_INTERFACE",
    "DP_TIMEOUT",
    "DP_CONNECTIONS",
    "DP_GRACE",
    "DP_REJOIN",
    "DP_PROCESS_LIMIT",
    "DP_MACHINE",
    "DP_DEVICES",
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
    "TORCHELASTIC_RUN_ID",
    "TORCHELASTIC_RESTART_COUNT",
    "OMPI_COMM_WORLD_RANK",
    "OMPI_COMM_WORLD_SIZE",
    "OMPI_COMM_WORLD_LOCAL_RANK",
    "OMPI_COMM_WORLD_LOCAL_SIZE",
    "OMPI_MCA_ess_base_jobid",
    "PMIX_NAMESPACE",
    "PMI_RANK",
    "PMI_SIZE",
    "PMI_JOBID",
    "PMI_FD",
    "MPI_LOCALRANKID",
    "MPI_LOCALNRANKS",
    "SLURM_PROCID",
    "SLURM_NTASKS",
    "SLURM_LOCALID",
    "SLURM_JOB_ID",
    "SLURM_STEP_ID",
    "SLURM_STEP_NUM_NODES",
    "SLURM_STEP_NODELIST",
    "SLURM_RESTART_COUNT",
};

/* Whatever started the tests is none of theirs. */
static inline void nobody_launched_us(void)
{
    for (size_t i = 0; i < sizeof all_variables / sizeof all_variables[0]; i++) {
        unsetenv(all_variables[i]);
    }
}

static inline void set(const char *name, const char *text)
{
    CHECK_INT(setenv(name, text, 1), 0);
}

static inline void set_number(const char *name, int n)
{
    char text[16];
    snprintf(text, sizeof text, "%d", n);
    set(name, text);
}

typedef struct launcher {
    const char *name, *process, *count, *local, *local_count;
} launcher;

static const launcher launchers[] = {
    {"dp", "DP_PROCESS", "DP_PROCESS_COUNT", "DP_LOCAL_PROCESS", "DP_LOCAL_PROCESS_COUNT"},
    {"torchrun", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"},
    {"openmpi", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK",
     "OMPI_COMM_WORLD_LOCAL_SIZE"},
    {"mpich", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"},
    {"slurm", "SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", NULL},
};

enum { LAUNCHERS = sizeof launchers / sizeof launchers[0] };

/* As the launcher would: with addresses that are there, and nobody at them. */
static inline void launched_by(const launcher *by, int process, int count)
{
    set_number(by->process, process);
    set_number(by->count, count);
    set_number(by->local, process);
    if (by->local_count != NULL) {
        set_number(by->local_count, count);
    }
    if (strcmp(by->name, "dp") == 0) {
        set("DP_ADDR", "@nobody");
    }
    if (strcmp(by->name, "torchrun") == 0) {
        set("MASTER_ADDR", "localhost");
        set("MASTER_PORT", "29500");
    }
    if (strcmp(by->name, "slurm") == 0) {
        set("SLURM_JOB_ID", "77");
        set("SLURM_STEP_ID", "0");
    }
}

/* ---- worlds of several processes ------------------------------------------------------------- */

enum { MOST = 16 };

static int me, world, port; /* set in every process of a world */

static inline int listen_at(int n)
{
    struct sockaddr_in at = {.sin_family = AF_INET,
                             .sin_port = htons((uint16_t)n),
                             .sin_addr = {htonl(INADDR_LOOPBACK)}};
    int fd = socket(AF_INET, SOCK_STREAM, 0), yes = 1;
    CHECK(fd >= 0);
    setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &yes, sizeof yes);
    if (bind(fd, (struct sockaddr *)&at, sizeof at) == 0 && listen(fd, 16) == 0) {
        return fd;
    }
    close(fd);
    return -1;
}

/* The first of ten that nobody has. */
static inline int free_port_from(int least, int choices)
{
    static uint64_t seed;
    int first = 0, count = 0;
    seed = seed != 0 ? seed : (uint64_t)getpid();
    while (count < 10) {
        first = least + (int)(test_random(&seed) % (uint64_t)choices);
        for (count = 0; count < 10; count++) {
            int fd = listen_at(first + count);
            if (fd < 0) {
                break;
            }
            close(fd);
        }
    }
    return first;
}

/* Below those that the system gives out. Most tests go on to the next one if this is taken. */
static inline int free_port(void)
{
    return free_port_from(12000, 20000);
}

/* For those that have to have it: the others leave these alone. */
static inline int own_port(void)
{
    return free_port_from(10100, 1890);
}

/* -1: nobody is there yet */
static inline int call(int n)
{
    struct sockaddr_in at = {.sin_family = AF_INET,
                             .sin_port = htons((uint16_t)n),
                             .sin_addr = {htonl(INADDR_LOOPBACK)}};
    int fd = socket(AF_INET, SOCK_STREAM, 0);
    if (connect(fd, (struct sockaddr *)&at, sizeof at) == 0) {
        return fd;
    }
    close(fd);
    return -1;
}

static inline int call_patiently(int n)
{
    int fd = call(n);
    for (int i = 0; i < 500 && fd < 0; i++) {
        poll(NULL, 0, 10);
        fd = call(n);
    }
    CHECK(fd >= 0);
    return fd;
}

static inline void use_tcp(void)
{
    char address[40];
    snprintf(address, sizeof address, "127.0.0.1:%d", port);
    launched_by(&launchers[0], me, world);
    set("DP_ADDR", address);
    set("DP_SECRET", "of this test"); /* else process 0 waits for a second job */
}

static inline void use_name(void)
{
    char address[40];
    snprintf(address, sizeof address, "@test-%d", (int)getppid());
    launched_by(&launchers[0], me, world);
    set("DP_ADDR", address);
    set("DP_SECRET", "of this test"); /* else process 0 waits for a second job */
}

static inline pid_t start(int process, void (*body)(void))
{
    pid_t pid = fork();
    CHECK(pid >= 0);
    if (pid == 0) {
        me = process;
        body();
        exit(EXIT_SUCCESS);
    }
    return pid;
}

static inline void finish(pid_t pid, int process)
{
    int status = 0;
    CHECK_INT(waitpid(pid, &status, 0), pid);
    if (!WIFEXITED(status) || WEXITSTATUS(status) != EXIT_SUCCESS) {
        test_fail(__FILE__, __LINE__, "process %d of %d ended with status 0x%x", process, world,
                  (unsigned)status);
    }
}

static inline void run_world_at(int first, int count, void (*body)(void))
{
    pid_t pids[MOST];
    test_needs_processes(count);
    nobody_launched_us();
    world = count;
    port = first;
    for (int p = 0; p < count; p++) {
        pids[p] = start(p, body);
    }
    for (int p = 0; p < count; p++) {
        finish(pids[p], p);
    }
}

static inline void run_world(int count, void (*body)(void))
{
    run_world_at(free_port(), count, body);
}

static inline dp_status open_world(int timeout_ms, const char *job, dp_ctx **out)
{
    const dp_coll_ops *const colls[] = {boot_coll(), NULL};
    const dp_config config = {
        .colls = colls, .device_count = 1, .job = job, .timeout_ms = timeout_ms};
    return dp_open(&config, out);
}

static inline void check_sum(dp_ctx *ctx)
{
    int32_t n = me + 1;
    dp_part part = {.send = &n, .recv = &n};
    CHECK_OK(dp_all_reduce(ctx, &part, 1, DP_I32, DP_OP_SUM));
    CHECK_INT(n, world * (world + 1) / 2);
}

static inline void check_world(const char *launched, const char *job)
{
    dp_ctx *ctx;
    dp_info info;
    CHECK_OK(open_world(0, job, &ctx));
    CHECK_OK(dp_info_get(ctx, &info));
    CHECK_STR(info.launcher, launched);
    CHECK_INT(info.process, me);
    CHECK_INT(info.process_count, world);
    CHECK_INT(info.rank_first, me);
    CHECK_INT(info.rank_count, world);
    CHECK_INT(info.machine_process, me);
    CHECK_INT(info.machine_process_count, world);
    check_sum(ctx);
    dp_close(ctx);
}

#endif /* WORLD_H */
