/* cuda_calls.c - what tests of real GPUs call of CUDA's runtime themselves. It is found, when it is
   called first, in the library that dp_cuda.h has loaded: so they start, and skip, without one. */

#define _GNU_SOURCE /* RTLD_NOLOAD */
#include <cuda_runtime_api.h>
#include <dlfcn.h>
#include <string.h>
#include "test.h"

/* One of them is loaded: what dp_cuda.h cannot use it lets go of. */
static void find_call(const char *name, void *out_fn)
{
    static const char *const libraries[] = {"libcudart.so.13", "libcudart.so.12", "libcudart.so"};
    void *library = NULL, *found;
    for (int i = 0; i < 3 && library == NULL; i++)
        library = dlopen(libraries[i], RTLD_NOW | RTLD_NOLOAD);
    if (library == NULL)
        test_fail(__FILE__, __LINE__, "%s: no runtime of CUDA is loaded", name);
    found = dlsym(library, name);
    if (found == NULL)
        test_fail(__FILE__, __LINE__, "the runtime of CUDA has no %s", name);
    memcpy(out_fn, &found, sizeof found);
}

#define CALL(name, parameters, arguments)                                                          \
    cudaError_t CUDARTAPI name parameters                                                          \
    {                                                                                              \
        static cudaError_t(CUDARTAPI *fn) parameters;                                              \
        if (fn == NULL)                                                                            \
            find_call(#name, &fn);                                                                 \
        return fn arguments;                                                                       \
    }

CALL(cudaDeviceCanAccessPeer, (int *can, int device, int peer), (can, device, peer))
CALL(cudaEventCreateWithFlags, (cudaEvent_t * event, unsigned flags), (event, flags))
CALL(cudaEventDestroy, (cudaEvent_t event), (event))
CALL(cudaEventRecord, (cudaEvent_t event, cudaStream_t stream), (event, stream))
CALL(cudaFree, (void *pointer), (pointer))
CALL(cudaGetDriverEntryPointByVersion,
     (const char *name, void **fn_out, unsigned version, unsigned long long flags,
      enum cudaDriverEntryPointQueryResult *result),
     (name, fn_out, version, flags, result))
CALL(cudaGraphDestroy, (cudaGraph_t graph), (graph))
CALL(cudaGraphExecDestroy, (cudaGraphExec_t exec), (exec))
CALL(cudaGraphInstantiate, (cudaGraphExec_t * exec, cudaGraph_t graph, unsigned long long flags),
     (exec, graph, flags))
CALL(cudaGraphLaunch, (cudaGraphExec_t exec, cudaStream_t stream), (exec, stream))
CALL(cudaLaunchKernel,
     (const void *kernel, dim3 grid, dim3 block, void **args, size_t shared, cudaStream_t stream),
     (kernel, grid, block, args, shared, stream))
CALL(cudaLibraryGetKernel, (cudaKernel_t * kernel, cudaLibrary_t library, const char *name),
     (kernel, library, name))
CALL(cudaLibraryLoadData,
     (cudaLibrary_t * library, const void *code, enum cudaJitOption *options, void **values,
      unsigned count, enum cudaLibraryOption *own, void **own_values, unsigned own_count),
     (library, code, options, values, count, own, own_values, own_count))
CALL(cudaMalloc, (void **pointer, size_t bytes), (pointer, bytes))
CALL(cudaSetDevice, (int device), (device))
CALL(cudaStreamBeginCapture, (cudaStream_t stream, enum cudaStreamCaptureMode mode), (stream, mode))
CALL(cudaStreamCreateWithPriority, (cudaStream_t * stream, unsigned flags, int priority),
     (stream, flags, priority))
CALL(cudaStreamDestroy, (cudaStream_t stream), (stream))
CALL(cudaStreamEndCapture, (cudaStream_t stream, cudaGraph_t *graph), (stream, graph))
CALL(cudaStreamSynchronize, (cudaStream_t stream), (stream))
CALL(cudaStreamWaitEvent, (cudaStream_t stream, cudaEvent_t event, unsigned flags),
     (stream, event, flags))
CALL(cudaThreadExchangeStreamCaptureMode, (enum cudaStreamCaptureMode * mode), (mode))
