/* library.c - the simulator as the libraries of CUDA and NCCL that a program loads by their names:
   one file, which has all of the names. For what is carried to machines with GPUs, and knows
   nothing of a simulator.

   $SIM_GPUS is how many there are (1). $SIM_FATE is what befalls programs that use them, by their
   names, as in "doctor load, tests stop 30":
     load      it stops when it loads the library, and hears nothing but SIGKILL
     stop N    so it does in its Nth kernel
     die N     it is killed there, and the process that has started it                           */

#include <signal.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#include "cuda.h"
#include "cuda_runtime_api.h"
#include "sim.h"

static atomic_long kernels_left; /* up to the one that the fate is waiting in */
static bool stops;

/* ---- the driver, as far as a program without the runtime asks it ----------------------------- */

CUresult cuInit(unsigned flags);
CUresult cuDeviceGetCount(int *out);
CUresult cuDevicePrimaryCtxRetain(CUcontext *out, CUdevice device);

CUresult cuInit(unsigned flags)
{
    (void)flags;
    return sim_has_gpus() ? CUDA_SUCCESS : CUDA_ERROR_NO_DEVICE;
}

CUresult cuDeviceGetCount(int *out)
{
    return cudaGetDeviceCount(out) == cudaSuccess ? CUDA_SUCCESS : CUDA_ERROR_NO_DEVICE;
}

CUresult cuDevicePrimaryCtxRetain(CUcontext *out, CUdevice device)
{
    CUresult (*retain)(CUcontext * out, CUdevice device);
    enum cudaDriverEntryPointQueryResult found;
    void *fn = NULL;
    (void)cudaGetDriverEntryPointByVersion("cuDevicePrimaryCtxRetain", &fn, 12080,
                                           cudaEnableDefault, &found);
    memcpy(&retain, &fn, sizeof fn);
    return retain(out, device);
}

/* ---- pageable memory, which the simulator only finds ----------------------------------------- */

/* Two of the simulator's functions are renamed, and go through those here: see the Makefile. */
cudaError_t sim_plain_memcpy(void *dst, const void *src, size_t bytes, enum cudaMemcpyKind kind,
                             cudaStream_t stream);
bool sim_plain_run(int kernel, const void *arguments, char *const *at, const sim_launch *launch);

static bool is_pageable(const void *pointer)
{
    struct cudaPointerAttributes own = {.type = cudaMemoryTypeUnregistered};
    return cudaPointerGetAttributes(&own, pointer) == cudaSuccess &&
           own.type == cudaMemoryTypeUnregistered;
}

cudaError_t cudaMemcpyAsync(void *dst, const void *src, size_t bytes, enum cudaMemcpyKind kind,
                            cudaStream_t stream)
{
    void *pinned = NULL;
    bool in = kind == cudaMemcpyHostToDevice, out = kind == cudaMemcpyDeviceToHost;
    if (!(in && is_pageable(src)) && !(out && is_pageable(dst)))
        return sim_plain_memcpy(dst, src, bytes, kind, stream);
    cudaError_t code = cudaHostAlloc(&pinned, bytes, cudaHostAllocPortable);
    if (code != cudaSuccess)
        return code;
    if (in)
        memcpy(pinned, src, bytes);
    code = sim_plain_memcpy(in ? dst : pinned, in ? pinned : src, bytes, kind, stream);
    if (code == cudaSuccess)
        code = cudaStreamSynchronize(stream);
    if (out)
        memcpy(dst, pinned, bytes);
    (void)cudaFreeHost(pinned);
    return code;
}

/* ---- what befalls a process ------------------------------------------------------------------ */

bool sim_kernel_run(int kernel, const void *arguments, char *const *at, const sim_launch *launch)
{
    if (atomic_fetch_sub(&kernels_left, 1) == 1) {
        if (!stops)
            kill(getppid(), SIGKILL);
        raise(stops ? SIGSTOP : SIGKILL);
    }
    return sim_plain_run(kernel, arguments, at, launch);
}

/* What $SIM_FATE has behind the name of this program; NULL: nothing. */
static const char *own_fate(void)
{
    char name[512] = "";
    const char *all = getenv("SIM_FATE");
    ssize_t length = readlink("/proc/self/exe", name, sizeof name - 2);
    char *slash = length > 0 ? strrchr(name, '/') : NULL;
    if (all == NULL || slash == NULL)
        return NULL;
    strcat(slash, " ");
    const char *found = strstr(all, slash + 1);
    return found != NULL ? found + strlen(slash + 1) : NULL;
}

__attribute__((constructor)) static void load(void)
{
    const char *gpus = getenv("SIM_GPUS"), *fate = own_fate();
    sim_set_device_count(gpus != NULL ? atoi(gpus) : 1);
    if (fate == NULL)
        return;
    if (strncmp(fate, "load", 4) == 0)
        raise(SIGSTOP);
    stops = strncmp(fate, "stop ", 5) == 0;
    if (stops || strncmp(fate, "die ", 4) == 0)
        atomic_store(&kernels_left, strtol(strchr(fate, ' '), NULL, 10));
}
