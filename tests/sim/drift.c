/* drift.c - the simulator declares what the real libraries declare. Compiled against both: where a
   function has another type, or a constant another value, one of the two fails. */

#include <cuda.h>
#include <cuda_runtime_api.h>
#include <nvrtc.h>
#include <nvtx3/nvToolsExt.h>
#include <stddef.h>

#define SAME(name, value) _Static_assert((int)(name) == (value), #name)
SAME(cudaSuccess, 0);
SAME(cudaErrorInvalidValue, 1);
SAME(cudaErrorMemoryAllocation, 2);
SAME(cudaErrorInitializationError, 3);
SAME(cudaErrorStubLibrary, 34);
SAME(cudaErrorInsufficientDriver, 35);
SAME(cudaErrorNoDevice, 100);
SAME(cudaErrorInvalidDevice, 101);
SAME(cudaErrorNoKernelImageForDevice, 209);
SAME(cudaErrorInvalidResourceHandle, 400);
SAME(cudaErrorIllegalState, 401);
SAME(cudaErrorECCUncorrectable, 214);
SAME(cudaErrorNvlinkUncorrectable, 220);
SAME(cudaErrorNotReady, 600);
SAME(cudaErrorIllegalAddress, 700);
SAME(cudaErrorLaunchTimeout, 702);
SAME(cudaErrorPeerAccessAlreadyEnabled, 704);
SAME(cudaErrorPeerAccessNotEnabled, 705);
SAME(cudaErrorAssert, 710);
SAME(cudaErrorHardwareStackError, 714);
SAME(cudaErrorIllegalInstruction, 715);
SAME(cudaErrorMisalignedAddress, 716);
SAME(cudaErrorInvalidAddressSpace, 717);
SAME(cudaErrorInvalidPc, 718);
SAME(cudaErrorLaunchFailure, 719);
SAME(cudaErrorNotSupported, 801);
SAME(cudaErrorSystemNotReady, 802);
SAME(cudaErrorSystemDriverMismatch, 803);
SAME(cudaErrorCompatNotSupportedOnDevice, 804);
SAME(cudaErrorStreamCaptureUnsupported, 900);
SAME(cudaErrorStreamCaptureInvalidated, 901);
SAME(cudaErrorStreamCaptureMerge, 902);
SAME(cudaErrorStreamCaptureUnmatched, 903);
SAME(cudaErrorStreamCaptureUnjoined, 904);
SAME(cudaErrorStreamCaptureIsolation, 905);
SAME(cudaErrorStreamCaptureImplicit, 906);
SAME(cudaErrorCapturedEvent, 907);
SAME(cudaErrorStreamCaptureWrongThread, 908);
SAME(cudaErrorExternalDevice, 911);
SAME(cudaErrorUnknown, 999);
SAME(cudaStreamCaptureStatusNone, 0);
SAME(cudaStreamCaptureStatusActive, 1);
SAME(cudaStreamCaptureStatusInvalidated, 2);
SAME(cudaStreamCaptureModeGlobal, 0);
SAME(cudaStreamCaptureModeThreadLocal, 1);
SAME(cudaStreamCaptureModeRelaxed, 2);
SAME(CU_STREAM_CAPTURE_MODE_GLOBAL, 0);
SAME(CU_STREAM_CAPTURE_MODE_THREAD_LOCAL, 1);
SAME(CU_STREAM_CAPTURE_MODE_RELAXED, 2);
SAME(cudaMemcpyHostToDevice, 1);
SAME(cudaMemcpyDeviceToHost, 2);
SAME(cudaMemcpyDeviceToDevice, 3);
SAME(cudaDevAttrMaxPitch, 11);
SAME(cudaDevAttrMultiProcessorCount, 16);
SAME(cudaDevAttrComputeCapabilityMajor, 75);
SAME(cudaDevAttrComputeCapabilityMinor, 76);
SAME(cudaDevAttrHostNumaId, 134);
SAME(cudaMemoryTypeUnregistered, 0);
SAME(cudaMemoryTypeHost, 1);
SAME(cudaMemoryTypeDevice, 2);
SAME(cudaMemoryTypeManaged, 3);
SAME(cudaDriverEntryPointSuccess, 0);
SAME(cudaDriverEntryPointSymbolNotFound, 1);
SAME(cudaEnableDefault, 0);
SAME(cudaEventDisableTiming, 2);
SAME(cudaHostAllocPortable, 1);
SAME(cudaStreamNonBlocking, 1);
SAME(CUDA_SUCCESS, 0);
SAME(CUDA_ERROR_OUT_OF_MEMORY, 2);
SAME(CUDA_ERROR_STUB_LIBRARY, 34);
SAME(CUDA_ERROR_NO_DEVICE, 100);
SAME(CUDA_ERROR_INVALID_CONTEXT, 201);
SAME(CU_POINTER_ATTRIBUTE_RANGE_START_ADDR, 11);
SAME(CU_POINTER_ATTRIBUTE_RANGE_SIZE, 12);
SAME(NVTX_VERSION, 3);
SAME(NVTX_MESSAGE_TYPE_ASCII, 1);
SAME(NVTX_EVENT_ATTRIB_STRUCT_SIZE, 48);
SAME(offsetof(nvtxEventAttributes_t, size), 2);
SAME(offsetof(nvtxEventAttributes_t, messageType), 32);
SAME(offsetof(nvtxEventAttributes_t, message), 40);
SAME(NVRTC_SUCCESS, 0);
SAME(NVRTC_ERROR_OUT_OF_MEMORY, 1);
SAME(NVRTC_ERROR_COMPILATION, 6);

/* Defined as they are, or there is a warning. */
#define cudaStreamLegacy    ((cudaStream_t)0x1)
#define cudaStreamPerThread ((cudaStream_t)0x2)
_Static_assert(sizeof cudaStreamLegacy == sizeof cudaStreamPerThread, "both are used");

typedef cudaError_t E;
typedef nvrtcResult N;
typedef const char *const *strings;
typedef enum cudaDriverEntryPointQueryResult query;

extern const struct surface {
    E (*can_access_peer)(int *, int, int);
    E (*peer_disable)(int);
    E (*peer_enable)(int, unsigned);
    E (*get_attribute)(int *, enum cudaDeviceAttr, int);
    E (*get_bus_id)(char *, int, int);
    E (*get_priorities)(int *, int *);
    E (*get_version)(int *);
    E (*event_create)(cudaEvent_t *, unsigned);
    E (*event_destroy)(cudaEvent_t);
    E (*event_query)(cudaEvent_t);
    E (*event_record)(cudaEvent_t, cudaStream_t);
    E (*event_synchronize)(cudaEvent_t);
    E (*free_device)(void *);
    E (*free_host)(void *);
    E (*func_attributes)(struct cudaFuncAttributes *, const void *);
    E (*get_count)(int *);
    E (*entry_point)(const char *, void **, unsigned, unsigned long long, query *);
    const char *(*error_string)(E);
    E (*last_error)(void);
    E (*graph_destroy)(cudaGraph_t);
    E (*graph_exec_destroy)(cudaGraphExec_t);
    E (*graph_instantiate)(cudaGraphExec_t *, cudaGraph_t, unsigned long long);
    E (*graph_launch)(cudaGraphExec_t, cudaStream_t);
    E (*host_alloc)(void **, size_t, unsigned);
    E (*host_func)(cudaStream_t, cudaHostFn_t, void *);
    E (*launch)(const void *, dim3, dim3, void **, size_t, cudaStream_t);
    E (*get_kernel)(cudaKernel_t *, cudaLibrary_t, const char *);
    E(*load)
    (cudaLibrary_t *, const void *, enum cudaJitOption *, void **, unsigned,
     enum cudaLibraryOption *, void **, unsigned);
    E (*unload)(cudaLibrary_t);
    E (*alloc)(void **, size_t);
    E (*mem_info)(size_t *, size_t *);
    E(*copy_2d)
    (void *, size_t, const void *, size_t, size_t, size_t, enum cudaMemcpyKind, cudaStream_t);
    E (*copy)(void *, const void *, size_t, enum cudaMemcpyKind, cudaStream_t);
    E (*copy_peer)(void *, int, const void *, int, size_t, cudaStream_t);
    E (*pointer_attributes)(struct cudaPointerAttributes *, const void *);
    E (*runtime_version)(int *);
    E (*stream_capture)(cudaStream_t, enum cudaStreamCaptureMode);
    E (*stream_capture_end)(cudaStream_t, cudaGraph_t *);
    E (*stream_create)(cudaStream_t *, unsigned, int);
    E (*stream_destroy)(cudaStream_t);
    E (*stream_device)(cudaStream_t, int *);
    E (*stream_is_capturing)(cudaStream_t, enum cudaStreamCaptureStatus *);
    E (*stream_synchronize)(cudaStream_t);
    E (*stream_wait)(cudaStream_t, cudaEvent_t, unsigned);
    N (*compile)(nvrtcProgram, int, strings);
    N (*create)(nvrtcProgram *, const char *, const char *, int, strings, strings);
    N (*destroy)(nvrtcProgram *);
    N (*cubin)(nvrtcProgram, char *);
    N (*cubin_size)(nvrtcProgram, size_t *);
    const char *(*nvrtc_string)(N);
    N (*arch_count)(int *);
    N (*ptx)(nvrtcProgram, char *);
    N (*ptx_size)(nvrtcProgram, size_t *);
    N (*log)(nvrtcProgram, char *);
    N (*log_size)(nvrtcProgram, size_t *);
    N (*archs)(int *);
    N (*version)(int *, int *);
    nvtxDomainHandle_t (*domain_create)(const char *);
    int (*range_push)(nvtxDomainHandle_t, const nvtxEventAttributes_t *);
    int (*range_pop)(nvtxDomainHandle_t);
} surface;

const struct surface surface = {
    cudaDeviceCanAccessPeer,
    cudaDeviceDisablePeerAccess,
    cudaDeviceEnablePeerAccess,
    cudaDeviceGetAttribute,
    cudaDeviceGetPCIBusId,
    cudaDeviceGetStreamPriorityRange,
    cudaDriverGetVersion,
    cudaEventCreateWithFlags,
    cudaEventDestroy,
    cudaEventQuery,
    cudaEventRecord,
    cudaEventSynchronize,
    cudaFree,
    cudaFreeHost,
    cudaFuncGetAttributes,
    cudaGetDeviceCount,
    cudaGetDriverEntryPointByVersion,
    cudaGetErrorString,
    cudaGetLastError,
    cudaGraphDestroy,
    cudaGraphExecDestroy,
    cudaGraphInstantiate,
    cudaGraphLaunch,
    cudaHostAlloc,
    cudaLaunchHostFunc,
    cudaLaunchKernel,
    cudaLibraryGetKernel,
    cudaLibraryLoadData,
    cudaLibraryUnload,
    cudaMalloc,
    cudaMemGetInfo,
    cudaMemcpy2DAsync,
    cudaMemcpyAsync,
    cudaMemcpyPeerAsync,
    cudaPointerGetAttributes,
    cudaRuntimeGetVersion,
    cudaStreamBeginCapture,
    cudaStreamEndCapture,
    cudaStreamCreateWithPriority,
    cudaStreamDestroy,
    cudaStreamGetDevice,
    cudaStreamIsCapturing,
    cudaStreamSynchronize,
    cudaStreamWaitEvent,
    nvrtcCompileProgram,
    nvrtcCreateProgram,
    nvrtcDestroyProgram,
    nvrtcGetCUBIN,
    nvrtcGetCUBINSize,
    nvrtcGetErrorString,
    nvrtcGetNumSupportedArchs,
    nvrtcGetPTX,
    nvrtcGetPTXSize,
    nvrtcGetProgramLog,
    nvrtcGetProgramLogSize,
    nvrtcGetSupportedArchs,
    nvrtcVersion,
    nvtxDomainCreateA,
    nvtxDomainRangePushEx,
    nvtxDomainRangePop,
};

/* ---- NCCL, which is no part of the Toolkit --------------------------------------------------- */

#if __has_include(<nccl.h>)
#include <nccl.h>
#include <stddef.h>

SAME(NCCL_MAJOR, 2);
SAME(NCCL_VERSION_CODE, 22809);
SAME(NCCL_VERSION(NCCL_MAJOR, NCCL_MINOR, NCCL_PATCH), NCCL_VERSION_CODE);
SAME(NCCL_VERSION(2, 8, 3), 2803);
SAME(NCCL_UNIQUE_ID_BYTES, 128);
SAME(NCCL_CONFIG_UNDEF_INT, -2147483647 - 1);
SAME(sizeof(ncclUniqueId), 128);
SAME(sizeof(ncclConfig_t), 80);
SAME(offsetof(ncclConfig_t, magic), 8);
SAME(offsetof(ncclConfig_t, version), 12);
SAME(offsetof(ncclConfig_t, blocking), 16);
SAME(offsetof(ncclConfig_t, cgaClusterSize), 20);
SAME(offsetof(ncclConfig_t, minCTAs), 24);
SAME(offsetof(ncclConfig_t, maxCTAs), 28);
SAME(offsetof(ncclConfig_t, netName), 32);
SAME(offsetof(ncclConfig_t, splitShare), 40);
SAME(offsetof(ncclConfig_t, trafficClass), 44);
SAME(offsetof(ncclConfig_t, commName), 48);
SAME(offsetof(ncclConfig_t, collnetEnable), 56);
SAME(offsetof(ncclConfig_t, CTAPolicy), 60);
SAME(offsetof(ncclConfig_t, shrinkShare), 64);
SAME(offsetof(ncclConfig_t, nvlsCTAs), 68);
SAME(offsetof(ncclConfig_t, nChannelsPerNetPeer), 72);
SAME(offsetof(ncclConfig_t, nvlinkCentricSched), 76);
SAME(ncclSuccess, 0);
SAME(ncclUnhandledCudaError, 1);
SAME(ncclSystemError, 2);
SAME(ncclInternalError, 3);
SAME(ncclInvalidArgument, 4);
SAME(ncclInvalidUsage, 5);
SAME(ncclRemoteError, 6);
SAME(ncclInProgress, 7);
SAME(ncclNumResults, 8);
SAME(ncclSum, 0);
SAME(ncclProd, 1);
SAME(ncclMax, 2);
SAME(ncclMin, 3);
SAME(ncclAvg, 4);
SAME(ncclNumOps, 5);
SAME(ncclMaxRedOp, 0x7fffffff);
SAME(ncclInt8, 0);
SAME(ncclUint8, 1);
SAME(ncclInt32, 2);
SAME(ncclUint32, 3);
SAME(ncclInt64, 4);
SAME(ncclUint64, 5);
SAME(ncclFloat16, 6);
SAME(ncclFloat32, 7);
SAME(ncclFloat64, 8);
SAME(ncclBfloat16, 9);
SAME(ncclFloat8e4m3, 10);
SAME(ncclFloat8e5m2, 11);
SAME(ncclNumTypes, 12);
SAME(ncclScalarDevice, 0);
SAME(ncclScalarHostImmediate, 1);

extern const ncclConfig_t nccl_config;
const ncclConfig_t nccl_config = NCCL_CONFIG_INITIALIZER;

typedef ncclResult_t R;
typedef ncclComm_t C;
typedef ncclDataType_t T;
typedef cudaStream_t S;

extern const struct nccl_surface {
    R (*all_gather)(const void *, void *, size_t, T, C, S);
    R (*all_reduce)(const void *, void *, size_t, T, ncclRedOp_t, C, S);
    R (*broadcast)(const void *, void *, size_t, T, int, C, S);
    R (*abort)(C);
    R (*destroy)(C);
    R (*finalize)(C);
    R (*async_error)(C, R *);
    R (*init)(C *, int, ncclUniqueId, int, ncclConfig_t *);
    const char *(*error_string)(R);
    const char *(*last_error)(C);
    R (*unique_id)(ncclUniqueId *);
    R (*version)(int *);
    R (*group_end)(void);
    R (*group_start)(void);
    R (*receive)(void *, size_t, T, int, C, S);
    R (*redop_create)(ncclRedOp_t *, void *, T, ncclScalarResidence_t, C);
    R (*redop_destroy)(ncclRedOp_t, C);
    R (*reduce_scatter)(const void *, void *, size_t, T, ncclRedOp_t, C, S);
    R (*send)(const void *, size_t, T, int, C, S);
} nccl_surface;

const struct nccl_surface nccl_surface = {
    ncclAllGather,
    ncclAllReduce,
    ncclBroadcast,
    ncclCommAbort,
    ncclCommDestroy,
    ncclCommFinalize,
    ncclCommGetAsyncError,
    ncclCommInitRankConfig,
    ncclGetErrorString,
    ncclGetLastError,
    ncclGetUniqueId,
    ncclGetVersion,
    ncclGroupEnd,
    ncclGroupStart,
    ncclRecv,
    ncclRedOpCreatePreMulSum,
    ncclRedOpDestroy,
    ncclReduceScatter,
    ncclSend,
};
#endif
