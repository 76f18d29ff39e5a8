/* mortal.h - jobs that recover, and whose processes are killed: memory that all see, how many have
   come how far, who comes back, and how all end. A test file defines _GNU_SOURCE before anything
   else, for MAP_ANONYMOUS. */

#ifndef MORTAL_H
#define MORTAL_H

#include <stdatomic.h>
#include <sys/mman.h>
#include "gpus.h"
#include "process.h"
#include "world.h"

/* Times that are short elsewhere: NCCL makes connections over a network. */
#if defined(TEST_CUDA) && !defined(TEST_SIM)
enum { SLOWER = 4 };
#else
enum { SLOWER = 1 };
#endif

enum { TIMEOUT_MS = 20000 };

static pid_t pids[MOST];
static atomic_int *met; /* how often a process has come to a point of the test; all see it */
static bool comes_back; /* this process, when others train */

#if defined(TEST_CUDA)
/* GPUs of this process' own; or those of the machine, which all share. */
static inline void use_devices(dp_config *config)
{
    static const dp_device_ops *backends[2];
    backends[0] = cuda_device_at(me * config->device_count, config->device_count);
    config->backends = backends;
}
#else
static inline void use_devices(dp_config *config)
{
    (void)config;
}
#endif

/* This process is on the CPU, whatever the machine has. */
static inline void without_gpus(void)
{
    set("CUDA_VISIBLE_DEVICES", "");
}

static inline void *memory_of_all(size_t bytes)
{
    void *memory = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    CHECK(memory != MAP_FAILED);
    return memory;
}

/* Until so many have come there. */
static inline void wait_for(int count)
{
    while (atomic_load(met) < count)
        rest(1);
}

static inline void start_world(int count, void (*body)(void))
{
    test_needs_processes(count);
    cuda_processes();
    nobody_launched_us();
    if (met == NULL)
        met = memory_of_all(sizeof *met);
    atomic_store(met, 0);
    world = count;
    for (int p = 0; p < count; p++)
        pids[p] = start(p, body);
}

/* Waits for all; how many were killed. */
static inline int end_world(void)
{
    int killed = 0;
    for (int p = 0; p < world; p++) {
        int status = 0;
        CHECK_INT(waitpid(pids[p], &status, 0), pids[p]);
        if (WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL)
            killed++;
        else if (!WIFEXITED(status) || WEXITSTATUS(status) != EXIT_SUCCESS)
            test_fail(__FILE__, __LINE__, "process %d of %d ended with status 0x%x", p, world,
                      (unsigned)status);
    }
    return killed;
}

/* Some of them, or the same one more than once, but one at the least is left. */
static inline void kill_at_random(uint64_t *seed)
{
    wait_for(world);
    for (int deaths = 1 + (int)(test_random(seed) % (uint64_t)(world - 1)); deaths > 0; deaths--) {
        struct timespec nap = {.tv_nsec = (long)(test_random(seed) % 30000000)};
        nanosleep(&nap, NULL);
        kill(pids[test_random(seed) % (uint64_t)world], SIGKILL);
    }
}

/* This process was started again. */
static inline void come_again(void)
{
    set("DP_REJOIN", "1");
    comes_back = true;
}

/* ---- who come and go ------------------------------------------------------------------------- */

static struct {
    atomic_bool stop;
    atomic_int counts[MOST]; /* processes that each sees in the job; 0: not yet */
} * seen;

static inline void wait_for_all_of_them(void)
{
    for (int p = 0; p < world; p++)
        while (atomic_load(&seen->counts[p]) != world)
            rest(1);
}

static inline void forget_counts(void)
{
    for (int p = 0; p < world; p++)
        atomic_store(&seen->counts[p], 0);
}

#endif /* MORTAL_H */
