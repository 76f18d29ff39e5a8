/* dp_hip.h - v0.2.0 - AMD GPUs as devices of dp.h - MIT licence

   This has never met a GPU. What has been seen: it compiles with the headers of HIP 5.2 and 6.3,
   and of RCCL 2.21; the compiler of HIP 5.2 makes code of the kernels for gfx906, gfx90a and
   gfx1030, clang 22 for gfx942 and gfx1100; the library of HIP 5.2 says that there is no GPU, and
   the CPU serves; and tests of dp_cuda.h on simulated GPUs pass on the same GPUs with HIP's names,
   types and codes. What the simulation does not know, nobody has seen: whether it is fast, or what
   a GPU does in a fault. HIP then ends the process, it is said.

   Include it instead of dp.h, or after; or define DP_USE_HIP, and dp.h includes it. Link with
   -lamdhip64 -lhiprtc (HIP 5.2 has both in the first); or define DP_DYNAMIC_LOAD together with
   DP_IMPLEMENTATION, and the libraries are loaded when a context opens. Any C11 compiler will do.
   HIP 5.2 or newer; the libraries have to be of the headers' major version. To a user who may not
   open /dev/kfd HIP says that there is no GPU; examples/doctor.c says why.

   With DP_USE_RCCL, GPUs of several processes exchange data by RCCL, 2.18 or newer: what dp_nccl.h
   says of NCCL holds, $DP_NCCL included. Link with -lrccl, unless DP_DYNAMIC_LOAD is defined.

   It is dp_cuda.h, compiled with other names: what is said there holds here too, for gfx names
   instead of architectures. A program is for AMD's GPUs or for NVIDIA's, not for both; in the file
   with DP_IMPLEMENTATION, names of CUDA's types and constants stand for HIP's. Not here: ranges for
   a profiler; and with HIP 5, rows of the timeline for streams.

   CONTENTS (search for the tag)
     >>native     streams and devices as HIP knows them
     >>names      CUDA's types and constants
     >>calls      CUDA's functions
     >>otherwise  those that HIP does not have, or has otherwise
     >>found      the libraries, and what is there
*/

#define DP__HIP_FIRST_DP /* dp.h must not include this file again */
#include "dp.h"          /* outside the guard, so that DP_IMPLEMENTATION is carried through */

#if defined(DP_CUDA_H) && !defined(DP_HIP_H) && !defined(DP__REFUSED)
#define DP__REFUSED
#undef DP_IMPLEMENTATION
#error "dp_hip.h: a program is for AMD's GPUs or for NVIDIA's, not for both: without dp_cuda.h"
#endif

#if !defined(DP_HIP_H) && !defined(DP__REFUSED)
#define DP_HIP_H

#ifdef __cplusplus
extern "C" {
#endif

/* ==== >>native =================================================================================
   What each function does is said in dp_cuda.h and dp_nccl.h, where its name has `cuda` and `nccl`.
 */

struct ihipStream_t; /* a hipStream_t points to it */

DP_API const dp_device_ops *dp_hip(void);
DP_API const dp_coll_ops *dp_hip_coll(void);
DP_API struct ihipStream_t *dp_hip_stream(const dp_stream *stream);
DP_API int dp_hip_ordinal(const dp_stream *stream);
DP_MUST_USE DP_API dp_status dp_hip_adopt(dp_ctx *ctx, int local_rank, struct ihipStream_t *native,
                                          dp_stream **out);
DP_API void dp_hip_release(dp_stream *stream);

#if defined(DP_USE_RCCL)
DP_API const dp_coll_ops *dp_rccl_coll(void);
DP_API int dp_rccl_version(char *text, size_t bytes);
#endif

#ifdef __cplusplus
}
#endif
#endif /* DP_HIP_H */

#define CUstream_st     ihipStream_t
#define dp_cuda         dp_hip
#define dp_cuda_adopt   dp_hip_adopt
#define dp_cuda_coll    dp_hip_coll
#define dp_cuda_ordinal dp_hip_ordinal
#define dp_cuda_release dp_hip_release
#define dp_cuda_stream  dp_hip_stream
#define dp_nccl_coll    dp_rccl_coll
#define dp_nccl_version dp_rccl_version

#if defined(DP_IMPLEMENTATION) && !defined(DP_HIP_IMPLEMENTED)
#define DP_HIP_IMPLEMENTED

#if !defined(__HIP_PLATFORM_AMD__)
#define __HIP_PLATFORM_AMD__
#endif
#include <hip/hip_runtime_api.h>
#include <hip/hip_version.h>
#include <hip/hiprtc.h>
#if defined(DP_DYNAMIC_LOAD)
#include <dlfcn.h>
#endif

/* ==== >>names ====================================================================================
   Codes have the same numbers.                                                                  */

#define DP__HIP
#define DP__CUDA_IS        "hip"
#define DP__CUDA_BOUNDS    "__launch_bounds__(256)" /* HIP's second number means something else */
#define DP__CUDA_CONST     "const"
#define DP__CUDA_TARGET    "--offload-arch="
#define DP__CUDA_UNFUSED   "-ffp-contract=off"
#define DP__CUDA_PUSH      "hipSetDevice"
#define DP__CUDA_POP       "hipSetDevice"
#define DP__CUDA_KIND(gpu) ((gpu)->ordinal) /* a module is code on one GPU */

typedef hipDevice_t CUdevice;
typedef uintptr_t CUdeviceptr;
typedef char *CUcontext; /* see >>otherwise */
typedef void *CUgreenCtx;
typedef hipError_t CUresult;
typedef hipStreamCaptureMode CUstreamCaptureMode;
typedef struct dp__hip_uuid {
    char bytes[16];
} CUuuid;
typedef hipError_t cudaError_t;
typedef hipEvent_t cudaEvent_t;
typedef hipFunction_t cudaKernel_t;
typedef hipModule_t cudaLibrary_t;
typedef hipStream_t cudaStream_t;
typedef hiprtcProgram nvrtcProgram;
typedef hiprtcResult nvrtcResult;

typedef enum dp__hip_range {
    CU_POINTER_ATTRIBUTE_RANGE_START_ADDR,
    CU_POINTER_ATTRIBUTE_RANGE_SIZE
} CUpointer_attribute;

enum cudaMemoryType { /* HIP 6 has other numbers than HIP 5, and a name more */
                      cudaMemoryTypeUnregistered,
                      cudaMemoryTypeHost,
                      cudaMemoryTypeDevice,
                      cudaMemoryTypeManaged
};
struct cudaPointerAttributes {
    enum cudaMemoryType type;
    int device;
};

#define cudaDeviceAttr          hipDeviceAttribute_t
#define cudaFuncAttributes      hipFuncAttributes
#define cudaMemcpyKind          hipMemcpyKind
#define cudaStreamCaptureStatus hipStreamCaptureStatus

#define CU_STREAM_CAPTURE_MODE_RELAXED    hipStreamCaptureModeRelaxed
#define CUDA_SUCCESS                      hipSuccess
#define NVRTC_ERROR_COMPILATION           HIPRTC_ERROR_COMPILATION
#define NVRTC_ERROR_OUT_OF_MEMORY         HIPRTC_ERROR_OUT_OF_MEMORY
#define NVRTC_SUCCESS                     HIPRTC_SUCCESS
#define cudaDevAttrHostNumaId             ((hipDeviceAttribute_t)-1) /* it will not say */
#define cudaDevAttrMaxPitch               hipDeviceAttributeMaxPitch
#define cudaDevAttrMultiProcessorCount    hipDeviceAttributeMultiprocessorCount
#define cudaErrorNotReady                 hipErrorNotReady
#define cudaErrorPeerAccessAlreadyEnabled hipErrorPeerAccessAlreadyEnabled
#define cudaEventDisableTiming            hipEventDisableTiming
#define cudaHostAllocPortable             hipHostMallocPortable
#define cudaMemcpyDeviceToDevice          hipMemcpyDeviceToDevice
#define cudaMemcpyDeviceToHost            hipMemcpyDeviceToHost
#define cudaMemcpyHostToDevice            hipMemcpyHostToDevice
#define cudaStreamCaptureStatusNone       hipStreamCaptureStatusNone
#define cudaStreamLegacy                  ((hipStream_t)1)
#define cudaStreamPerThread               ((hipStream_t)2)
#define cudaStreamNonBlocking             hipStreamNonBlocking
#define cudaSuccess                       hipSuccess

/* ==== >>calls ====================================================================================
   The table that dp_cuda.h calls through. Each function of HIP that is called is in a list, with
   the member that it is: CUDA's name where it is used as that is. Members after them are functions
   of >>otherwise.                                                                               */

/* Its versions deprecate now one name of a function, and now the other. */
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wdeprecated-declarations"

#if HIP_VERSION_MAJOR < 6 /* declares it, and does not always have it */
#define DP__HIP_TYPE memoryType
#define DP__HIP_SINCE_6(X)
#else
#define DP__HIP_TYPE       type
#define DP__HIP_SINCE_6(X) X(cudaLaunchHostFunc, hipLaunchHostFunc)
#endif

/* clang-format off */
#define DP__HIP_RUNTIME(X)                                                                         \
    X(call_cuDeviceGet, hipDeviceGet)                                                              \
    X(call_cuDeviceGetName, hipDeviceGetName)                                                      \
    X(call_cuThreadExchangeStreamCaptureMode, hipThreadExchangeStreamCaptureMode)                  \
    X(cudaDeviceCanAccessPeer, hipDeviceCanAccessPeer)                                             \
    X(cudaDeviceDisablePeerAccess, hipDeviceDisablePeerAccess)                                     \
    X(cudaDeviceEnablePeerAccess, hipDeviceEnablePeerAccess)                                       \
    X(cudaDeviceGetAttribute, hipDeviceGetAttribute)                                               \
    X(cudaDeviceGetPCIBusId, hipDeviceGetPCIBusId)                                                 \
    X(cudaDeviceGetStreamPriorityRange, hipDeviceGetStreamPriorityRange)                           \
    X(cudaEventCreateWithFlags, hipEventCreateWithFlags)                                           \
    X(cudaEventDestroy, hipEventDestroy)                                                           \
    X(cudaEventQuery, hipEventQuery)                                                               \
    X(cudaEventRecord, hipEventRecord)                                                             \
    X(cudaEventSynchronize, hipEventSynchronize)                                                   \
    X(cudaFree, hipFree)                                                                           \
    X(cudaFreeHost, hipHostFree)                                                                   \
    X(cudaGetDeviceCount, hipGetDeviceCount)                                                       \
    X(cudaGetErrorString, hipGetErrorString)                                                       \
    X(cudaGetLastError, hipGetLastError)                                                           \
    X(cudaHostAlloc, hipHostMalloc)                                                                \
    X(cudaLibraryGetKernel, hipModuleGetFunction)                                                  \
    X(cudaLibraryUnload, hipModuleUnload)                                                          \
    X(cudaMalloc, hipMalloc)                                                                       \
    X(cudaMemGetInfo, hipMemGetInfo)                                                               \
    X(cudaMemcpy2DAsync, hipMemcpy2DAsync)                                                         \
    X(cudaMemcpyAsync, hipMemcpyAsync)                                                             \
    X(cudaMemcpyPeerAsync, hipMemcpyPeerAsync)                                                     \
    X(cudaStreamCreateWithPriority, hipStreamCreateWithPriority)                                   \
    X(cudaStreamDestroy, hipStreamDestroy)                                                         \
    X(cudaStreamIsCapturing, hipStreamIsCapturing)                                                 \
    X(cudaStreamSynchronize, hipStreamSynchronize)                                                 \
    X(cudaStreamWaitEvent, hipStreamWaitEvent)                                                     \
    X(get_device, hipGetDevice)                                                                    \
    X(get_properties, hipGetDeviceProperties)                                                      \
    X(get_range, hipMemGetAddressRange)                                                            \
    X(get_stream_device, hipGetStreamDeviceId)                                                     \
    X(get_version, hipRuntimeGetVersion)                                                           \
    X(function_attribute, hipFuncGetAttribute)                                                     \
    X(launch, hipModuleLaunchKernel)                                                               \
    X(load, hipModuleLoadData)                                                                     \
    X(pointer_attributes, hipPointerGetAttributes)                                                 \
    X(set_device, hipSetDevice)                                                                    \
    DP__HIP_SINCE_6(X)
#define DP__HIP_COMPILER(X)                                                                        \
    X(compile, hiprtcCompileProgram)                                                               \
    X(nvrtcCreateProgram, hiprtcCreateProgram)                                                     \
    X(nvrtcDestroyProgram, hiprtcDestroyProgram)                                                   \
    X(nvrtcGetCUBIN, hiprtcGetCode)                                                                \
    X(nvrtcGetCUBINSize, hiprtcGetCodeSize)                                                        \
    X(nvrtcGetErrorString, hiprtcGetErrorString)                                                   \
    X(nvrtcGetPTX, hiprtcGetCode)                                                                  \
    X(nvrtcGetPTXSize, hiprtcGetCodeSize)                                                          \
    X(nvrtcGetProgramLog, hiprtcGetProgramLog)                                                     \
    X(nvrtcGetProgramLogSize, hiprtcGetProgramLogSize)
/* clang-format on */

#define DP__HIP_FIELD(member, function) __typeof__(function) *member;

static struct dp__cuda {
    DP__HIP_RUNTIME(DP__HIP_FIELD)
    DP__HIP_COMPILER(DP__HIP_FIELD)
#if HIP_VERSION_MAJOR < 6
    hipError_t (*cudaLaunchHostFunc)(hipStream_t stream, void (*fn)(void *user), void *user);
#endif
    hipError_t (*call_cuCtxPopCurrent)(CUcontext *out);
    hipError_t (*call_cuCtxPushCurrent)(CUcontext context);
    hipError_t (*call_cuDeviceGetUuid)(CUuuid *out, int device);
    hipError_t (*call_cuDevicePrimaryCtxRelease)(int device);
    hipError_t (*call_cuDevicePrimaryCtxRetain)(CUcontext *out, int device);
    hipError_t (*call_cuPointerGetAttribute)(void *out, CUpointer_attribute what, CUdeviceptr at);
    hipError_t (*call_cuStreamGetCtx)(hipStream_t stream, CUcontext *out, CUgreenCtx *out_part);
    hipError_t (*cudaFuncGetAttributes)(struct hipFuncAttributes *out, const void *kernel);
    hipError_t (*cudaLaunchKernel)(const void *kernel, dim3 grid, dim3 block, void **arguments,
                                   size_t shared, hipStream_t stream);
    hipError_t (*cudaLibraryLoadData)(hipModule_t *out, const void *image, void *how, void *values,
                                      unsigned count, void *options, void *option_values,
                                      unsigned option_count);
    hipError_t (*cudaPointerGetAttributes)(struct cudaPointerAttributes *out, const void *data);
    hipError_t (*cudaStreamGetDevice)(hipStream_t stream, int *out);
    hiprtcResult (*nvrtcCompileProgram)(hiprtcProgram program, int count,
                                        const char *const *options);
    hiprtcResult (*nvrtcVersion)(int *major, int *minor);
    bool bound;
} dp__cuda;

/* ==== >>otherwise ================================================================================
   A thread has no contexts here, but a GPU that it uses, which is 0 at first. What stands for the
   context of a GPU is the address of its place here: pushed, the thread uses that GPU, and popped,
   the one that it used before.                                                                  */

enum { DP__HIP_GPUS = 64, DP__HIP_NESTED = 8 }; /* as DP__CUDA_GPUS_MAX and DP__CUDA_NESTED are */

static char dp__hip_contexts[DP__HIP_GPUS];

static _Thread_local struct {
    int before[DP__HIP_NESTED], depth;
} dp__hip_thread;

static hipError_t dp__hip_retain(CUcontext *out, int device)
{
    *out = &dp__hip_contexts[device];
    return hipSuccess;
}

static hipError_t dp__hip_release(int device)
{
    (void)device;
    return hipSuccess;
}

static hipError_t dp__hip_push(CUcontext context)
{
    int before = 0;
    hipError_t code = dp__cuda.get_device(&before);
    if (code == hipSuccess)
        code = dp__cuda.set_device((int)(context - dp__hip_contexts));
    if (code == hipSuccess)
        dp__hip_thread.before[dp__hip_thread.depth++] = before;
    return code;
}

static hipError_t dp__hip_pop(CUcontext *out)
{
    (void)out;
    return dp__cuda.set_device(dp__hip_thread.before[--dp__hip_thread.depth]);
}

/* Not hipDeviceGetUuid: all GPUs that have no number of their own have the same there. */
static hipError_t dp__hip_uuid_of(CUuuid *out, int device)
{
    return dp__cuda.cudaDeviceGetPCIBusId(out->bytes, (int)sizeof out->bytes, device);
}

/* Not hipPointerGetAttribute, which has 32 bits for a size. */
static hipError_t dp__hip_range_of(void *out, CUpointer_attribute what, CUdeviceptr at)
{
    hipDeviceptr_t base = NULL;
    size_t bytes = 0;
    hipError_t code = dp__cuda.get_range(&base, &bytes, (hipDeviceptr_t)at);
    CUdeviceptr first = (CUdeviceptr)base;
    if (code != hipSuccess)
        (void)dp__cuda.cudaGetLastError();
    else if (what == CU_POINTER_ATTRIBUTE_RANGE_SIZE)
        memcpy(out, &bytes, sizeof bytes);
    else
        memcpy(out, &first, sizeof first);
    return code;
}

static hipError_t dp__hip_pointer(struct cudaPointerAttributes *out, const void *data)
{
    hipPointerAttribute_t found;
    hipError_t code = dp__cuda.pointer_attributes(&found, data);
    if (code != hipSuccess)
        return code;
    out->device = found.device;
    if (found.isManaged)
        out->type = cudaMemoryTypeManaged;
    else if (found.DP__HIP_TYPE == hipMemoryTypeHost)
        out->type = cudaMemoryTypeHost;
    else if (found.DP__HIP_TYPE == hipMemoryTypeDevice)
        out->type = cudaMemoryTypeDevice;
    return hipSuccess;
}

static hipError_t dp__hip_place_of(hipStream_t stream, int *out)
{
    *out = dp__cuda.get_stream_device(stream);
    return *out < 0 ? hipErrorInvalidHandle : hipSuccess;
}

static hipError_t dp__hip_context_of(hipStream_t stream, CUcontext *out, CUgreenCtx *out_part)
{
    int device = 0;
    hipError_t code = dp__hip_place_of(stream, &device);
    *out_part = NULL;
    *out = &dp__hip_contexts[code == hipSuccess ? device : 0];
    return code;
}

/* On the GPU that the thread uses; all kernels are ready when it returns. */
static hipError_t dp__hip_load(hipModule_t *out, const void *image, void *how, void *values,
                               unsigned count, void *options, void *option_values,
                               unsigned option_count)
{
    (void)how, (void)values, (void)count, (void)options, (void)option_values, (void)option_count;
    return dp__cuda.load(out, image);
}

static hipError_t dp__hip_attributes(struct hipFuncAttributes *out, const void *kernel)
{
    return dp__cuda.function_attribute(&out->maxThreadsPerBlock,
                                       HIP_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK,
                                       (hipFunction_t)(uintptr_t)kernel);
}

static hipError_t dp__hip_launch(const void *kernel, dim3 grid, dim3 block, void **arguments,
                                 size_t shared, hipStream_t stream)
{
    return dp__cuda.launch((hipFunction_t)(uintptr_t)kernel, grid.x, grid.y, grid.z, block.x,
                           block.y, block.z, (unsigned)shared, stream, arguments, NULL);
}

static hiprtcResult dp__hip_compile(hiprtcProgram program, int count, const char *const *options)
{
    const char *list[4];
    memcpy(list, options, (size_t)count * sizeof *list); /* HIP 7 promises not to change them */
    return dp__cuda.compile(program, count, (void *)list);
}

/* Of all of HIP: the compiler's own number hardly ever changes. */
static hiprtcResult dp__hip_version(int *major, int *minor)
{
    int version = 0;
    (void)dp__cuda.get_version(&version);
    *major = version / 100000;
    *minor = version % 100000;
    return HIPRTC_SUCCESS;
}

#if HIP_VERSION_MAJOR < 6
static hipError_t dp__hip_host_call(hipStream_t stream, void (*fn)(void *user), void *user)
{
    (void)stream, (void)fn, (void)user;
    return hipErrorNotSupported;
}
#endif

/* ==== >>found ====================================================================================
   The table is filled when the program is linked, or with DP_DYNAMIC_LOAD when the first context
   opens.                                                                                        */

static struct dp__cuda dp__cuda = {
#if !defined(DP_DYNAMIC_LOAD)
#define DP__HIP_BIND(member, function) .member = function,
    DP__HIP_RUNTIME(DP__HIP_BIND) DP__HIP_COMPILER(DP__HIP_BIND).bound = true,
#endif
#if HIP_VERSION_MAJOR < 6
    .cudaLaunchHostFunc = dp__hip_host_call,
#endif
    .call_cuCtxPopCurrent = dp__hip_pop,
    .call_cuCtxPushCurrent = dp__hip_push,
    .call_cuDeviceGetUuid = dp__hip_uuid_of,
    .call_cuDevicePrimaryCtxRelease = dp__hip_release,
    .call_cuDevicePrimaryCtxRetain = dp__hip_retain,
    .call_cuPointerGetAttribute = dp__hip_range_of,
    .call_cuStreamGetCtx = dp__hip_context_of,
    .cudaFuncGetAttributes = dp__hip_attributes,
    .cudaLaunchKernel = dp__hip_launch,
    .cudaLibraryLoadData = dp__hip_load,
    .cudaPointerGetAttributes = dp__hip_pointer,
    .cudaStreamGetDevice = dp__hip_place_of,
    .nvrtcCompileProgram = dp__hip_compile,
    .nvrtcVersion = dp__hip_version};

#if defined(DP_DYNAMIC_LOAD)
static bool dp__cuda_find(void *library, const char *name, void *out_fn);
static const char *dp__cuda_place(void *library, const char *fn, const char *name);

/* Names of functions may be macros, for those of one version. */
#define DP__HIP_TEXT(...) #__VA_ARGS__
#define DP__HIP_FIND_RUNTIME(member, function)                                                     \
    found = found && dp__cuda_find(runtime, DP__HIP_TEXT(function), &dp__cuda.member);
#define DP__HIP_FIND_COMPILER(member, function)                                                    \
    found = found && dp__cuda_find(compiler, DP__HIP_TEXT(function), &dp__cuda.member);

static dp_status dp__hip_bind_all(void *runtime, void *compiler, const char *name)
{
    bool found = true;
    DP__HIP_RUNTIME(DP__HIP_FIND_RUNTIME)
    DP__HIP_COMPILER(DP__HIP_FIND_COMPILER)
    dp__cuda.bound = found;
    return found ? DP_OK
                 : dp_error(DP_ERR_UNSUPPORTED, "the libraries are older than HIP 5.2 (%s)",
                            dp__cuda_place(runtime, "hipRuntimeGetVersion", name));
}

/* Those of the headers' major version, whose types they have. In some of HIP 5 the compiler is in
   the library of the runtime. */
static dp_status dp__hip_bind(void)
{
    char names[2][32];
    snprintf(names[0], sizeof names[0], "libamdhip64.so.%d", HIP_VERSION_MAJOR);
    snprintf(names[1], sizeof names[1], "libhiprtc.so.%d", HIP_VERSION_MAJOR);
    void *runtime = dlopen(names[0], RTLD_NOW | RTLD_LOCAL);
    void *compiler = dlopen(names[1], RTLD_NOW | RTLD_LOCAL);
    dp_status status =
        runtime == NULL
            ? dp_error(DP_ERR_NO_DEVICE, "%s was not found", names[0])
            : dp__hip_bind_all(runtime, compiler != NULL ? compiler : runtime, names[0]);
    if (status != DP_OK && runtime != NULL)
        (void)dlclose(runtime);
    if (status != DP_OK && compiler != NULL)
        (void)dlclose(compiler);
    return status;
}
#else
static dp_status dp__hip_bind(void)
{
    return DP_OK;
}
#endif

static dp_status dp__cuda_ready(void)
{
    return dp__cuda.bound ? DP_OK : dp__hip_bind();
}

static dp_status dp__cuda_gpu_count(int *out)
{
    int count = 0, version = 0;
    hipError_t code = dp__cuda.cudaGetDeviceCount(&count);
    *out = count;
    if (code == hipSuccess)
        return DP_OK;
    (void)dp__cuda.get_version(&version);
    (void)dp__cuda.cudaGetLastError();
    return dp_error(code == hipErrorNoDevice ? DP_ERR_NO_DEVICE : DP_ERR_UNSUPPORTED,
                    "hipGetDeviceCount: %s (%d); the runtime is of HIP %d.%d",
                    dp__cuda.cudaGetErrorString(code), (int)code, version / 10000000,
                    version / 100000 % 100);
}

static dp_status dp__cuda_check(const char *fn, int ordinal, cudaError_t code);

/* "gfx90a:sramecc+:xnack-" is 0x90a. */
static dp_status dp__cuda_arch_of(int ordinal, int *out)
{
    hipDeviceProp_t properties;
    char *end = NULL;
    DP_TRY(dp__cuda_check("cudaGetDeviceProperties", ordinal,
                          dp__cuda.get_properties(&properties, ordinal)));
    const char *name = properties.gcnArchName;
    *out = strncmp(name, "gfx", 3) == 0 ? (int)strtol(name + 3, &end, 16) : 0;
    if (*out <= 0 || (*end != '\0' && *end != ':'))
        return dp_error(DP_ERR_UNSUPPORTED, "hip %d: no compiler is known for '%.60s'", ordinal,
                        name);
    return DP_OK;
}
#pragma GCC diagnostic pop
#endif /* DP_IMPLEMENTATION && !DP_HIP_IMPLEMENTED */

#include "dp_cuda.h"
#if defined(DP_USE_RCCL)
#include "dp_nccl.h"
#endif
#undef CUstream_st
#undef dp_cuda
#undef dp_cuda_adopt
#undef dp_cuda_coll
#undef dp_cuda_ordinal
#undef dp_cuda_release
#undef dp_cuda_stream
#undef dp_nccl_coll
#undef dp_nccl_version
#undef DP__HIP_FIRST_DP

/* ------------------------------------------------------------------------------------------------
   MIT licence

   Copyright (c) 2026 the dp.h authors

   Permission is hereby granted, free of charge, to any person obtaining a copy of this software and
   associated documentation files (the "Software"), to deal in the Software without restriction,
   including without limitation the rights to use, copy, modify, merge, publish, distribute,
   sublicense, and/or sell copies of the Software, and to permit persons to whom the Software is
   furnished to do so, subject to the following conditions:

   The above copyright notice and this permission notice shall be included in all copies or
   substantial portions of the Software.

   THE SOFTWARE IS PROVIDED "AS IS", WITHOUT WARRANTY OF ANY KIND, EXPRESS OR IMPLIED, INCLUDING BUT
   NOT LIMITED TO THE WARRANTIES OF MERCHANTABILITY, FITNESS FOR A PARTICULAR PURPOSE AND
   NONINFRINGEMENT. IN NO EVENT SHALL THE AUTHORS OR COPYRIGHT HOLDERS BE LIABLE FOR ANY CLAIM,
   DAMAGES OR OTHER LIABILITY, WHETHER IN AN ACTION OF CONTRACT, TORT OR OTHERWISE, ARISING FROM,
   OUT OF OR IN CONNECTION WITH THE SOFTWARE OR THE USE OR OTHER DEALINGS IN THE SOFTWARE.
   ---------------------------------------------------------------------------------------------- */
