/* drift.c - the simulator declares what the real HIP declares. Compiled against both: where a
   function has another type, or a constant another value, one of the two fails. What HIP 5 and HIP
   6 have otherwise is not here. */

#include <hip/hip_runtime_api.h>
#include <hip/hip_version.h>
#include <hip/hiprtc.h>

#define SAME(name, value) _Static_assert((int)(name) == (value), #name)
SAME(hipSuccess, 0);
SAME(hipErrorInvalidValue, 1);
SAME(hipErrorOutOfMemory, 2);
SAME(hipErrorInsufficientDriver, 35);
SAME(hipErrorNoDevice, 100);
SAME(hipErrorInvalidDevice, 101);
SAME(hipErrorNoBinaryForGpu, 209);
SAME(hipErrorECCNotCorrectable, 214);
SAME(hipErrorInvalidHandle, 400);
SAME(hipErrorNotFound, 500);
SAME(hipErrorNotReady, 600);
SAME(hipErrorIllegalAddress, 700);
SAME(hipErrorLaunchTimeOut, 702);
SAME(hipErrorPeerAccessAlreadyEnabled, 704);
SAME(hipErrorAssert, 710);
SAME(hipErrorLaunchFailure, 719);
SAME(hipErrorNotSupported, 801);
SAME(hipErrorCapturedEvent, 907);
SAME(hipMemcpyHostToDevice, 1);
SAME(hipMemcpyDeviceToHost, 2);
SAME(hipMemcpyDeviceToDevice, 3);
SAME(hipStreamCaptureStatusNone, 0);
SAME(hipStreamCaptureModeRelaxed, 2);
SAME(HIP_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK, 0);
SAME(hipEventDisableTiming, 2);
SAME(hipHostMallocPortable, 1);
SAME(hipStreamNonBlocking, 1);
SAME(HIPRTC_SUCCESS, 0);
SAME(HIPRTC_ERROR_OUT_OF_MEMORY, 1);
SAME(HIPRTC_ERROR_COMPILATION, 6);
_Static_assert(HIP_VERSION_MAJOR > 5 || (HIP_VERSION_MAJOR == 5 && HIP_VERSION_MINOR >= 2), "");

typedef hipError_t E;
typedef hiprtcResult R;

/* Deprecated in some versions: hipHostMalloc, hipHostFree. */
#pragma GCC diagnostic ignored "-Wdeprecated-declarations"

extern const struct surface {
    E (*can_access_peer)(int *, int, int);
    E (*peer_disable)(int);
    E (*peer_enable)(int, unsigned);
    E (*device)(hipDevice_t *, int);
    E (*get_attribute)(int *, hipDeviceAttribute_t, int);
    E (*get_name)(char *, int, hipDevice_t);
    E (*get_bus_id)(char *, int, int);
    E (*get_priorities)(int *, int *);
    E (*event_create)(hipEvent_t *, unsigned);
    E (*event_destroy)(hipEvent_t);
    E (*event_query)(hipEvent_t);
    E (*event_record)(hipEvent_t, hipStream_t);
    E (*event_synchronize)(hipEvent_t);
    E (*free_device)(void *);
    E (*func_attribute)(int *, hipFunction_attribute, hipFunction_t);
    E (*get_device)(int *);
    E (*get_count)(int *);
    E (*get_properties)(hipDeviceProp_t *, int);
    const char *(*error_string)(E);
    E (*last_error)(void);
    int (*stream_device)(hipStream_t);
    E (*free_host)(void *);
    E (*host_alloc)(void **, size_t, unsigned);
    E (*host_func)(hipStream_t, hipHostFn_t, void *);
    E (*alloc)(void **, size_t);
    E (*range)(hipDeviceptr_t *, size_t *, hipDeviceptr_t);
    E (*mem_info)(size_t *, size_t *);
    E (*copy_2d)(void *, size_t, const void *, size_t, size_t, size_t, hipMemcpyKind, hipStream_t);
    E (*copy)(void *, const void *, size_t, hipMemcpyKind, hipStream_t);
    E (*copy_peer)(void *, int, const void *, int, size_t, hipStream_t);
    E (*get_function)(hipFunction_t *, hipModule_t, const char *);
    E(*launch)
    (hipFunction_t, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned,
     hipStream_t, void **, void **);
    E (*load)(hipModule_t *, const void *);
    E (*unload)(hipModule_t);
    E (*pointer_attributes)(hipPointerAttribute_t *, const void *);
    E (*runtime_version)(int *);
    E (*set_device)(int);
    E (*stream_create)(hipStream_t *, unsigned, int);
    E (*stream_destroy)(hipStream_t);
    E (*stream_captures)(hipStream_t, hipStreamCaptureStatus *);
    E (*stream_synchronize)(hipStream_t);
    E (*stream_wait)(hipStream_t, hipEvent_t, unsigned);
    E (*capture_mode)(hipStreamCaptureMode *);
    R (*compile)(hiprtcProgram, int, const char **);
    R (*create)(hiprtcProgram *, const char *, const char *, int, const char **, const char **);
    R (*destroy)(hiprtcProgram *);
    R (*get_code)(hiprtcProgram, char *);
    R (*get_code_size)(hiprtcProgram, size_t *);
    const char *(*compiler_error_string)(R);
    R (*get_log)(hiprtcProgram, char *);
    R (*get_log_size)(hiprtcProgram, size_t *);
} surface;

const struct surface surface = {hipDeviceCanAccessPeer,
                                hipDeviceDisablePeerAccess,
                                hipDeviceEnablePeerAccess,
                                hipDeviceGet,
                                hipDeviceGetAttribute,
                                hipDeviceGetName,
                                hipDeviceGetPCIBusId,
                                hipDeviceGetStreamPriorityRange,
                                hipEventCreateWithFlags,
                                hipEventDestroy,
                                hipEventQuery,
                                hipEventRecord,
                                hipEventSynchronize,
                                hipFree,
                                hipFuncGetAttribute,
                                hipGetDevice,
                                hipGetDeviceCount,
                                hipGetDeviceProperties,
                                hipGetErrorString,
                                hipGetLastError,
                                hipGetStreamDeviceId,
                                hipHostFree,
                                hipHostMalloc,
                                hipLaunchHostFunc,
                                hipMalloc,
                                hipMemGetAddressRange,
                                hipMemGetInfo,
                                hipMemcpy2DAsync,
                                hipMemcpyAsync,
                                hipMemcpyPeerAsync,
                                hipModuleGetFunction,
                                hipModuleLaunchKernel,
                                hipModuleLoadData,
                                hipModuleUnload,
                                hipPointerGetAttributes,
                                hipRuntimeGetVersion,
                                hipSetDevice,
                                hipStreamCreateWithPriority,
                                hipStreamDestroy,
                                hipStreamIsCapturing,
                                hipStreamSynchronize,
                                hipStreamWaitEvent,
                                hipThreadExchangeStreamCaptureMode,
                                hiprtcCompileProgram,
                                hiprtcCreateProgram,
                                hiprtcDestroyProgram,
                                hiprtcGetCode,
                                hiprtcGetCodeSize,
                                hiprtcGetErrorString,
                                hiprtcGetProgramLog,
                                hiprtcGetProgramLogSize};
