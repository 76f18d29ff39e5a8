/* sim_hip.c - the simulated HIP: the simulated CUDA by other names. Handles are CUDA's own, but for
   modules and their functions, which belong to the device that they were loaded on.

   HIP has no contexts: a thread uses a device. Here whoever asks which one, and then sets one, is
   taken to set the first one back later: until then the thread has the context of that which was
   set. So a call is found that needs a device without having set it, and a thread that does not get
   back its own. */

#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include "cuda.h"
#include "cuda_runtime_api.h"
#include "nvrtc.h"
#include "parts.h"
#include "sim.h"
#include "hip/hip/hip_runtime_api.h"
#include "hip/hip/hip_version.h"
#include "hip/hip/hiprtc.h"

struct ihipModule_t {
    cudaLibrary_t library;
    int device;
};

struct ihipModuleSymbol_t {
    cudaKernel_t kernel;
    int device;
};

static CUresult (*device_get)(CUdevice *, int);
static CUresult (*device_name)(char *, int, CUdevice);
static CUresult (*pointer_attribute)(void *, CUpointer_attribute, CUdeviceptr);

static void find_entry(const char *name, void *out)
{
    enum cudaDriverEntryPointQueryResult found;
    (void)cudaGetDriverEntryPointByVersion(name, out, 12080, cudaEnableDefault, &found);
}

__attribute__((constructor)) static void begin(void)
{
    find_entry("cuDeviceGet", &device_get);
    find_entry("cuDeviceGetName", &device_name);
    find_entry("cuPointerGetAttribute", &pointer_attribute);
    sim_keep_contexts();
}

/* What is the driver's in CUDA may fail as all calls of the runtime do, and leaves its code. */
static hipError_t may_fail(void)
{
    return (hipError_t)sim_call_end(sim_call_begin());
}

static void find_wrong_device(const char *fn, int device)
{
    sim_lock();
    sim_find("wrong device", "%s: this thread uses device %d, not %d", fn, sim_current_device(),
             device);
    sim_unlock();
}

/* ---- devices --------------------------------------------------------------------------------- */

enum { NESTED = 16 };

static _Thread_local int before[NESTED], depth, current; /* what is set, and was before that */
static _Thread_local bool asked;

hipError_t hipGetDevice(int *out)
{
    asked = true;
    *out = current;
    return hipSuccess;
}

static atomic_long sets_left; /* up to the one that fails; 0: none does, below 0: it did */
static int set_code;

void sim_fail_set_device(long n, int code)
{
    set_code = code;
    atomic_store(&sets_left, n);
}

bool sim_set_device_failed(void)
{
    return atomic_load(&sets_left) < 0;
}

static bool set_fails(void)
{
    if (atomic_load(&sets_left) <= 0 || atomic_fetch_sub(&sets_left, 1) != 1)
        return false;
    atomic_store(&sets_left, -1);
    return true;
}

hipError_t hipSetDevice(int device)
{
    bool back = !asked, fails = set_fails();
    asked = false;
    if (fails && !back)
        return (hipError_t)set_code;
    if (back && (depth == 0 || before[--depth] != device))
        find_wrong_device(__func__, depth > 0 ? before[depth] : -1);
    if (!back)
        before[depth++] = current;
    current = device;
    if (!(back ? sim_pop_context() : sim_push_context(device)))
        return hipErrorInvalidDevice;
    return fails ? (hipError_t)set_code : hipSuccess;
}

hipError_t hipGetDeviceCount(int *out)
{
    int driver = 0;
    cudaError_t code = cudaGetDeviceCount(out);
    if (code == cudaErrorInsufficientDriver && cudaDriverGetVersion(&driver) == cudaSuccess &&
        driver == 0) /* HIP knows of no driver that is not there */
        return hipErrorNoDevice;
    return (hipError_t)code;
}

hipError_t hipRuntimeGetVersion(int *out)
{
    *out = HIP_VERSION_MAJOR * 10000000 + HIP_VERSION_MINOR * 100000 + 4711;
    return hipSuccess;
}

static const char *arch_name;

void sim_set_hip_arch(const char *name)
{
    arch_name = name;
}

hipError_t hipGetDeviceProperties(hipDeviceProp_t *out, int device)
{
    int major = 0, minor = 0;
    cudaError_t code = cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
    if (code == cudaSuccess)
        code = cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device);
    memset(out, 0x7f, sizeof *out);
    snprintf(out->gcnArchName, sizeof out->gcnArchName, "gfx%d%d:sramecc+:xnack-", major, minor);
    if (arch_name != NULL)
        snprintf(out->gcnArchName, sizeof out->gcnArchName, "%s", arch_name);
    return (hipError_t)code;
}

hipError_t hipDeviceGetAttribute(int *out, hipDeviceAttribute_t what, int device)
{
    if (what == hipDeviceAttributeMaxPitch)
        return (hipError_t)cudaDeviceGetAttribute(out, cudaDevAttrMaxPitch, device);
    if (what == hipDeviceAttributeMultiprocessorCount)
        return (hipError_t)cudaDeviceGetAttribute(out, cudaDevAttrMultiProcessorCount, device);
    return hipErrorInvalidValue;
}

hipError_t hipDeviceGet(hipDevice_t *out, int ordinal)
{
    hipError_t code = may_fail();
    return code != hipSuccess ? code : (hipError_t)device_get(out, ordinal);
}

hipError_t hipDeviceGetName(char *out, int bytes, hipDevice_t device)
{
    hipError_t code = may_fail();
    return code != hipSuccess ? code : (hipError_t)device_name(out, bytes, device);
}

hipError_t hipDeviceGetPCIBusId(char *out, int bytes, int device)
{
    return (hipError_t)cudaDeviceGetPCIBusId(out, bytes, device);
}

hipError_t hipDeviceGetStreamPriorityRange(int *least, int *greatest)
{
    return (hipError_t)cudaDeviceGetStreamPriorityRange(least, greatest);
}

hipError_t hipDeviceCanAccessPeer(int *out, int device, int peer)
{
    return (hipError_t)cudaDeviceCanAccessPeer(out, device, peer);
}

hipError_t hipDeviceEnablePeerAccess(int peer, unsigned flags)
{
    return (hipError_t)cudaDeviceEnablePeerAccess(peer, flags);
}

hipError_t hipDeviceDisablePeerAccess(int peer)
{
    return (hipError_t)cudaDeviceDisablePeerAccess(peer);
}

const char *hipGetErrorString(hipError_t code)
{
    return cudaGetErrorString((cudaError_t)code);
}

hipError_t hipGetLastError(void)
{
    return (hipError_t)cudaGetLastError();
}

/* ---- memory ---------------------------------------------------------------------------------- */

hipError_t hipMalloc(void **out, size_t bytes)
{
    return (hipError_t)cudaMalloc(out, bytes);
}

hipError_t hipFree(void *data)
{
    return (hipError_t)cudaFree(data);
}

hipError_t hipHostMalloc(void **out, size_t bytes, unsigned flags)
{
    return (hipError_t)cudaHostAlloc(out, bytes, flags);
}

hipError_t hipHostFree(void *data)
{
    return (hipError_t)cudaFreeHost(data);
}

hipError_t hipMemGetInfo(size_t *bytes_free, size_t *bytes_total)
{
    return (hipError_t)cudaMemGetInfo(bytes_free, bytes_total);
}

hipError_t hipMemGetAddressRange(hipDeviceptr_t *out, size_t *bytes, hipDeviceptr_t at)
{
    CUdeviceptr pointer = (CUdeviceptr)(uintptr_t)at, first = 0;
    hipError_t code = may_fail();
    if (code != hipSuccess)
        return code;
    if (pointer_attribute(&first, CU_POINTER_ATTRIBUTE_RANGE_START_ADDR, pointer) != CUDA_SUCCESS ||
        pointer_attribute(bytes, CU_POINTER_ATTRIBUTE_RANGE_SIZE, pointer) != CUDA_SUCCESS)
        return hipErrorNotFound;
    *out = (hipDeviceptr_t)(uintptr_t)first;
    return hipSuccess;
}

hipError_t hipPointerGetAttributes(hipPointerAttribute_t *out, const void *data)
{
    struct cudaPointerAttributes found = {.device = -1};
    cudaError_t code = cudaPointerGetAttributes(&found, data);
    *out = (hipPointerAttribute_t){.type = (hipMemoryType)found.type, .device = found.device};
    out->isManaged = found.type == cudaMemoryTypeManaged;
    if (code != cudaSuccess)
        memset(out, 1, sizeof *out);
    return (hipError_t)code;
}

hipError_t hipMemcpyAsync(void *dst, const void *src, size_t bytes, hipMemcpyKind kind,
                          hipStream_t stream)
{
    return (hipError_t)cudaMemcpyAsync(dst, src, bytes, (enum cudaMemcpyKind)kind,
                                       (cudaStream_t)stream);
}

hipError_t hipMemcpy2DAsync(void *dst, size_t dst_pitch, const void *src, size_t src_pitch,
                            size_t width, size_t height, hipMemcpyKind kind, hipStream_t stream)
{
    return (hipError_t)cudaMemcpy2DAsync(dst, dst_pitch, src, src_pitch, width, height,
                                         (enum cudaMemcpyKind)kind, (cudaStream_t)stream);
}

hipError_t hipMemcpyPeerAsync(void *dst, int dst_device, const void *src, int src_device,
                              size_t bytes, hipStream_t stream)
{
    return (hipError_t)cudaMemcpyPeerAsync(dst, dst_device, src, src_device, bytes,
                                           (cudaStream_t)stream);
}

/* ---- streams, events ------------------------------------------------------------------------- */

hipError_t hipStreamCreateWithPriority(hipStream_t *out, unsigned flags, int priority)
{
    return (hipError_t)cudaStreamCreateWithPriority((cudaStream_t *)out, flags, priority);
}

hipError_t hipStreamDestroy(hipStream_t stream)
{
    return (hipError_t)cudaStreamDestroy((cudaStream_t)stream);
}

hipError_t hipStreamSynchronize(hipStream_t stream)
{
    return (hipError_t)cudaStreamSynchronize((cudaStream_t)stream);
}

hipError_t hipStreamWaitEvent(hipStream_t stream, hipEvent_t event, unsigned flags)
{
    return (hipError_t)cudaStreamWaitEvent((cudaStream_t)stream, (cudaEvent_t)event, flags);
}

hipError_t hipStreamIsCapturing(hipStream_t stream, hipStreamCaptureStatus *out)
{
    enum cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
    cudaError_t code = cudaStreamIsCapturing((cudaStream_t)stream, &status);
    *out = (hipStreamCaptureStatus)status;
    return (hipError_t)code;
}

hipError_t hipThreadExchangeStreamCaptureMode(hipStreamCaptureMode *mode)
{
    enum cudaStreamCaptureMode other = (enum cudaStreamCaptureMode) * mode;
    cudaError_t code = cudaThreadExchangeStreamCaptureMode(&other);
    *mode = (hipStreamCaptureMode)other;
    return (hipError_t)code;
}

int hipGetStreamDeviceId(hipStream_t stream)
{
    int device = -1;
    return cudaStreamGetDevice((cudaStream_t)stream, &device) == cudaSuccess ? device : -1;
}

hipError_t hipLaunchHostFunc(hipStream_t stream, hipHostFn_t fn, void *user)
{
    return (hipError_t)cudaLaunchHostFunc((cudaStream_t)stream, fn, user);
}

hipError_t hipEventCreateWithFlags(hipEvent_t *out, unsigned flags)
{
    return (hipError_t)cudaEventCreateWithFlags((cudaEvent_t *)out, flags);
}

hipError_t hipEventDestroy(hipEvent_t event)
{
    return (hipError_t)cudaEventDestroy((cudaEvent_t)event);
}

hipError_t hipEventQuery(hipEvent_t event)
{
    return (hipError_t)cudaEventQuery((cudaEvent_t)event);
}

hipError_t hipEventRecord(hipEvent_t event, hipStream_t stream)
{
    return (hipError_t)cudaEventRecord((cudaEvent_t)event, (cudaStream_t)stream);
}

hipError_t hipEventSynchronize(hipEvent_t event)
{
    return (hipError_t)cudaEventSynchronize((cudaEvent_t)event);
}

/* ---- modules, kernels ------------------------------------------------------------------------ */

hipError_t hipModuleLoadData(hipModule_t *out, const void *image)
{
    cudaLibrary_t library = NULL;
    cudaError_t code = cudaLibraryLoadData(&library, image, NULL, NULL, 0, NULL, NULL, 0);
    if (code != cudaSuccess)
        return (hipError_t)code;
    *out = malloc(sizeof **out);
    **out = (struct ihipModule_t){library, sim_current_device()};
    return hipSuccess;
}

hipError_t hipModuleUnload(hipModule_t module)
{
    return (hipError_t)cudaLibraryUnload(module->library); /* its functions may be held still */
}

hipError_t hipModuleGetFunction(hipFunction_t *out, hipModule_t module, const char *name)
{
    cudaKernel_t kernel = NULL;
    if (module->device != sim_current_device())
        find_wrong_device(__func__, module->device);
    cudaError_t code = cudaLibraryGetKernel(&kernel, module->library, name);
    if (code != cudaSuccess)
        return (hipError_t)code;
    *out = malloc(sizeof **out);
    **out = (struct ihipModuleSymbol_t){kernel, module->device};
    return hipSuccess;
}

hipError_t hipFuncGetAttribute(int *out, hipFunction_attribute what, hipFunction_t function)
{
    struct cudaFuncAttributes attributes = {0};
    cudaError_t code = cudaFuncGetAttributes(&attributes, (const void *)function->kernel);
    *out = what == HIP_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK ? attributes.maxThreadsPerBlock : 0;
    return (hipError_t)code;
}

hipError_t hipModuleLaunchKernel(hipFunction_t function, unsigned grid_x, unsigned grid_y,
                                 unsigned grid_z, unsigned block_x, unsigned block_y,
                                 unsigned block_z, unsigned shared, hipStream_t stream,
                                 void **arguments, void **extra)
{
    const dim3 grid = {grid_x, grid_y, grid_z}, block = {block_x, block_y, block_z};
    if (function->device != sim_current_device())
        find_wrong_device(__func__, function->device);
    if (extra != NULL)
        return hipErrorInvalidValue;
    return (hipError_t)cudaLaunchKernel((const void *)function->kernel, grid, block, arguments,
                                        shared, (cudaStream_t)stream);
}

/* ---- the compiler ---------------------------------------------------------------------------- */

hiprtcResult hiprtcCreateProgram(hiprtcProgram *out, const char *source, const char *name,
                                 int header_count, const char **headers, const char **names)
{
    (void)headers, (void)names;
    return (hiprtcResult)nvrtcCreateProgram((nvrtcProgram *)out, source, name, header_count, NULL,
                                            NULL);
}

hiprtcResult hiprtcDestroyProgram(hiprtcProgram *program)
{
    return (hiprtcResult)nvrtcDestroyProgram((nvrtcProgram *)program);
}

hiprtcResult hiprtcCompileProgram(hiprtcProgram program, int count, const char **options)
{
    static const char target[] = "--offload-arch=gfx";
    char option[64];
    const char *const own[] = {option};
    if (count != 2 || strncmp(options[0], target, sizeof target - 1) != 0 ||
        strcmp(options[1], "-ffp-contract=off") != 0)
        return (hiprtcResult)NVRTC_ERROR_INVALID_OPTION;
    snprintf(option, sizeof option, "--gpu-architecture=sm_%.20s", options[0] + sizeof target - 1);
    return (hiprtcResult)nvrtcCompileProgram((nvrtcProgram)program, 1, own);
}

hiprtcResult hiprtcGetCodeSize(hiprtcProgram program, size_t *out)
{
    return (hiprtcResult)nvrtcGetCUBINSize((nvrtcProgram)program, out);
}

hiprtcResult hiprtcGetCode(hiprtcProgram program, char *out)
{
    return (hiprtcResult)nvrtcGetCUBIN((nvrtcProgram)program, out);
}

const char *hiprtcGetErrorString(hiprtcResult result)
{
    return nvrtcGetErrorString((nvrtcResult)result);
}

/* Without a 0 at its end. */
hiprtcResult hiprtcGetProgramLogSize(hiprtcProgram program, size_t *out)
{
    nvrtcResult result = nvrtcGetProgramLogSize((nvrtcProgram)program, out);
    *out -= 1;
    return (hiprtcResult)result;
}

hiprtcResult hiprtcGetProgramLog(hiprtcProgram program, char *out)
{
    char text[64];
    size_t bytes = 0;
    nvrtcResult result = nvrtcGetProgramLog((nvrtcProgram)program, text);
    (void)hiprtcGetProgramLogSize(program, &bytes);
    memcpy(out, text, bytes);
    out[bytes] = '!'; /* which stood there before */
    return (hiprtcResult)result;
}
