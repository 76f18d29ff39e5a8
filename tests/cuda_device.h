/* cuda_device.h - CUDA devices for tests: the simulator's (TEST_SIM), or real ones. A test that
   uses nothing but what is here, the library and CUDA runs on both. */

#ifndef CUDA_DEVICE_H
#define CUDA_DEVICE_H

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <cuda_runtime_api.h>
#include "../dp_cuda.h"
#include "../dp_nccl.h"
#include "process.h"
#if defined(TEST_SIM)
#include "sim/sim.h"
#endif

static int cuda_device_wanted, cuda_device_gpus;

static inline dp_status cuda_device_count(const dp_host *host, int *out)
{
    (void)host;
    *out = cuda_device_wanted;
    return DP_OK;
}

static dp_device_ops cuda_device_several;

static inline dp_status cuda_device_open(const dp_host *host, int index, dp_dev **out)
{
    dp_status status = dp_cuda()->open(host, index < 0 ? index : index % cuda_device_gpus, out);
    if (status == DP_OK) {
        (*out)->ops = &cuda_device_several;
        (*out)->index = index;
    }
    return status;
}

#if defined(TEST_SIM)
/* Without this call there are none, so that a test that asks for no backend gets the CPU. Some
   pairs copy directly, some do not. */
static inline int cuda_device_available(int count)
{
    sim_set_device_count(count);
    for (int reader = 0; reader < count; reader++)
        for (int from = 0; from < count; from++)
            sim_set_peer(reader, from, reader + from == 1 ? SIM_PEER_GOOD : SIM_PEER_NONE);
    return count;
}

/* The same tests are linked to dp_hip.h, which does without what only CUDA has. */
static inline void cuda_alone(void)
{
    if (strcmp(dp_cuda()->name, "cuda") != 0)
        SKIP("CUDA's alone");
}

/* The place in the machine of this process' first GPU. */
static inline void cuda_device_first(int place)
{
    sim_set_first_device(place);
}

static inline void cuda_processes(void)
{
}

static inline void cuda_check_leaks(void)
{
    sim_check_leaks();
}

enum { CUDA_ORDERS = 4 }; /* in which work is done */

/* 0: at once, which finds what is not ordered; else late, which shows it. */
static inline void cuda_order(unsigned order)
{
    sim_defer(order * 0x9e3779b9u);
}

static inline void cuda_check_findings(void)
{
    CHECK_INT(sim_finding_count(NULL), 0);
}

/* Directly between GPUs, so far. */
static inline long cuda_peer_copies(void)
{
    return sim_peer_copies();
}

/* How often the host waited for a copy. */
static inline long cuda_waits(void)
{
    return sim_wait_count();
}

/* Of memory on GPUs, so far. */
static inline long cuda_allocs(void)
{
    return sim_alloc_count();
}

/* The test has so many GPUs. */
static inline void cuda_gpus(int count)
{
    sim_set_device_count(count);
}

static inline void cuda_pairs(int gpus, bool direct)
{
    for (int reader = 0; reader < gpus; reader++)
        for (int from = 0; from < gpus; from++)
            sim_set_peer(reader, from, direct ? SIM_PEER_GOOD : SIM_PEER_NONE);
}

static inline void cuda_pairs_directly(int gpus)
{
    cuda_pairs(gpus, true);
}
#else
static inline int cuda_device_available(int count)
{
    int found = 0;
    if (dp_cuda()->count(NULL, &found) != DP_OK || found == 0)
        SKIP("no GPU");
    return found < count ? found : count;
}

enum { CUDA_ORDERS = 1 };

static inline void cuda_order(unsigned order)
{
    (void)order;
}

static inline void cuda_check_findings(void)
{
}

/* Nobody counts. */
static inline long cuda_peer_copies(void)
{
    return -1;
}

static inline long cuda_waits(void)
{
    return 0;
}

static inline long cuda_allocs(void)
{
    return -1;
}

/* There are at least so many GPUs, $TEST_GPUS at most; or the test ends here. */
static inline void cuda_gpus(int count)
{
    const char *most = getenv("TEST_GPUS");
    char reason[64];
    int found = cuda_device_available(count);
    if (most != NULL && atoi(most) > 0 && atoi(most) < found)
        found = atoi(most);
    snprintf(reason, sizeof reason, "%d GPUs are needed, here is %d", count, found);
    if (found < count)
        SKIP(reason);
}

/* They copy from each other directly, as far as they can; or none does. */
static inline void cuda_pairs(int gpus, bool direct)
{
    cuda_gpus(gpus);
    if (!direct)
        setenv("DP_PEERS", "off", 1);
    else
        unsetenv("DP_PEERS");
}

/* All of them can, or the test ends here. */
static inline void cuda_pairs_directly(int gpus)
{
    char reason[64];
    cuda_pairs(gpus, true);
    for (int reader = 0; reader < gpus; reader++)
        for (int from = 0; from < gpus; from++) {
            int can = reader == from;
            if (!can)
                CHECK_INT(cudaDeviceCanAccessPeer(&can, reader, from), cudaSuccess);
            snprintf(reason, sizeof reason, "GPU %d does not access GPU %d", reader, from);
            if (!can)
                SKIP(reason);
        }
}

/* Processes share the GPUs of the machine. NCCL refuses that, unless each seems to be on a machine
   of its own. */
static inline void cuda_device_first(int place)
{
    char host[32];
    snprintf(host, sizeof host, "of-gpu-%d", place);
    setenv("NCCL_HOSTID", host, 1);
    setenv("NCCL_NET", "Socket", 1);
    setenv("NCCL_SOCKET_IFNAME", "lo", 1);
}

#if defined(TEST_NCCL)
/* Or the test ends here. */
static inline void nccl_is_needed(void)
{
    char text[512];
    if (dp_nccl_version(text, sizeof text) == 0)
        SKIP(text);
}
#else
static inline void nccl_is_needed(void)
{
    SKIP("no NCCL");
}
#endif

/* A test of several processes ends here without NCCL, or GPUs. A process of its own looks for them:
   one that has used CUDA has no children that can. */
static inline void cuda_processes(void)
{
    static bool are_here;
    int found = 0, status;
    if (are_here)
        return;
    nccl_is_needed();
    pid_t child = fork();
    CHECK(child >= 0);
    if (child == 0)
        _exit(dp_cuda()->count(NULL, &found) == DP_OK && found > 0 ? 0 : 1);
    CHECK_INT(waitpid(child, &status, 0), child);
    if (status != 0)
        SKIP("no GPU");
    are_here = true;
}

static inline void cuda_check_leaks(void)
{
}
#endif

/* A table of `count` devices, carried by $TEST_GPUS GPUs if that is less. */
static inline const dp_device_ops *cuda_device(int count)
{
    const char *gpus = getenv("TEST_GPUS");
    cuda_device_wanted = count;
    int most = gpus != NULL && atoi(gpus) > 0 ? atoi(gpus) : count;
    cuda_device_gpus = cuda_device_available(most < count ? most : count);
    cuda_device_several = *dp_cuda();
    cuda_device_several.count = cuda_device_count;
    cuda_device_several.open = cuda_device_open;
    return cuda_device_gpus < count ? &cuda_device_several : dp_cuda();
}

/* What a process has whose first GPU has that place: GPUs of its own, if they are simulated. */
#if defined(TEST_SIM)
static inline const dp_device_ops *cuda_device_at(int place, int count)
{
    sim_set_device_count(count);
    cuda_device_first(place);
    return dp_cuda();
}
#else
static inline const dp_device_ops *cuda_device_at(int place, int count)
{
    cuda_device_first(place);
    return cuda_device(count);
}
#endif

static inline cudaGraphExec_t capture_end(cudaStream_t native)
{
    cudaGraph_t graph = NULL;
    cudaGraphExec_t exec = NULL;
    CHECK_INT(cudaStreamEndCapture(native, &graph), cudaSuccess);
    CHECK_INT(cudaGraphInstantiate(&exec, graph, 0), cudaSuccess);
    CHECK_INT(cudaGraphDestroy(graph), cudaSuccess);
    cuda_check_findings();
    return exec;
}

/* A function of the driver by its name. */
static inline void find_entry(const char *name, void *out)
{
    enum cudaDriverEntryPointQueryResult result;
    void *fn = NULL;
    CHECK_INT(cudaGetDriverEntryPointByVersion(name, &fn, 12080, cudaEnableDefault, &result),
              cudaSuccess);
    memcpy(out, &fn, sizeof fn);
}

#endif /* CUDA_DEVICE_H */
