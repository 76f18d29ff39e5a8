/* cuda_device.h - CUDA devices for tests: the simulator's (TEST_SIM), or real ones. */

#ifndef CUDA_DEVICE_H
#define CUDA_DEVICE_H

#include <stdlib.h>
#include "../dp_cuda.h"
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

/* The place in the machine of this process' first GPU. */
static inline void cuda_device_first(int place)
{
    sim_set_first_device(place);
}

static inline void cuda_check_leaks(void)
{
    sim_check_leaks();
}
#else
static inline int cuda_device_available(int count)
{
    int found = 0;
    if (dp_cuda()->count(NULL, &found) != DP_OK || found == 0)
        SKIP("no GPU");
    return found < count ? found : count;
}

static inline void cuda_device_first(int place)
{
    (void)place;
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

#endif /* CUDA_DEVICE_H */
