/* hip_runtime_api.h - what dp_hip.h uses of HIP, for the simulator. */

#ifndef SIM_HIP_RUNTIME_API_H
#define SIM_HIP_RUNTIME_API_H

#include <stddef.h>
#include <stdint.h>

/* Of dp_cuda.h: see cuda_runtime_api.h. */
#define DP__CUDA_CHECK_BYTES (16 << 10)

typedef enum hipError_t {
    hipSuccess = 0,
    hipErrorInvalidValue = 1,
    hipErrorOutOfMemory = 2,
    hipErrorInsufficientDriver = 35,
    hipErrorNoDevice = 100,
    hipErrorInvalidDevice = 101,
    hipErrorNoBinaryForGpu = 209,
    hipErrorECCNotCorrectable = 214,
    hipErrorInvalidHandle = 400,
    hipErrorNotFound = 500,
    hipErrorNotReady = 600,
    hipErrorIllegalAddress = 700,
    hipErrorLaunchTimeOut = 702,
    hipErrorPeerAccessAlreadyEnabled = 704,
    hipErrorAssert = 710,
    hipErrorLaunchFailure = 719,
    hipErrorNotSupported = 801,
    hipErrorCapturedEvent = 907
} hipError_t;

typedef enum hipMemcpyKind {
    hipMemcpyHostToHost = 0,
    hipMemcpyHostToDevice = 1,
    hipMemcpyDeviceToHost = 2,
    hipMemcpyDeviceToDevice = 3
} hipMemcpyKind;

/* In HIP they are numbered as they come, and not the same in all versions. */
typedef enum hipDeviceAttribute_t {
    hipDeviceAttributeMaxPitch = 55,
    hipDeviceAttributeMultiprocessorCount = 63
} hipDeviceAttribute_t;

typedef enum hipMemoryType {
    hipMemoryTypeUnregistered = 0,
    hipMemoryTypeHost = 1,
    hipMemoryTypeDevice = 2,
    hipMemoryTypeManaged = 3
} hipMemoryType;

typedef enum hipStreamCaptureStatus { hipStreamCaptureStatusNone = 0 } hipStreamCaptureStatus;
typedef enum hipStreamCaptureMode { hipStreamCaptureModeRelaxed = 2 } hipStreamCaptureMode;
typedef enum hipFunction_attribute {
    HIP_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK = 0
} hipFunction_attribute;

typedef struct hipPointerAttribute_t {
    enum hipMemoryType type;
    int device;
    void *devicePointer, *hostPointer;
    int isManaged;
    unsigned allocationFlags;
} hipPointerAttribute_t;

typedef struct hipFuncAttributes {
    int maxThreadsPerBlock;
} hipFuncAttributes;

typedef struct hipDeviceProp_tR0600 {
    char name[256];
    char gcnArchName[256];
} hipDeviceProp_tR0600;
#define hipDeviceProp_t        hipDeviceProp_tR0600 /* as HIP 6 has it, whose library has both */
#define hipGetDeviceProperties hipGetDevicePropertiesR0600

#define hipEventDisableTiming 0x2
#define hipHostMallocPortable 0x1
#define hipStreamNonBlocking  0x1

typedef int hipDevice_t;
typedef void *hipDeviceptr_t;
typedef struct ihipStream_t *hipStream_t;
typedef struct ihipEvent_t *hipEvent_t;
typedef struct ihipModule_t *hipModule_t;
typedef struct ihipModuleSymbol_t *hipFunction_t;
#if !defined(SIM_CUDA_RUNTIME_API_H)
typedef struct dim3 {
    uint32_t x, y, z;
} dim3;
#endif

hipError_t hipDeviceCanAccessPeer(int *canAccessPeer, int deviceId, int peerDeviceId);
hipError_t hipDeviceDisablePeerAccess(int peerDeviceId);
hipError_t hipDeviceEnablePeerAccess(int peerDeviceId, unsigned flags);
hipError_t hipDeviceGet(hipDevice_t *device, int ordinal);
hipError_t hipDeviceGetAttribute(int *pi, hipDeviceAttribute_t attr, int deviceId);
hipError_t hipDeviceGetName(char *name, int len, hipDevice_t device);
hipError_t hipDeviceGetPCIBusId(char *pciBusId, int len, int device);
hipError_t hipDeviceGetStreamPriorityRange(int *leastPriority, int *greatestPriority);
hipError_t hipEventCreateWithFlags(hipEvent_t *event, unsigned flags);
hipError_t hipEventDestroy(hipEvent_t event);
hipError_t hipEventQuery(hipEvent_t event);
hipError_t hipEventRecord(hipEvent_t event, hipStream_t stream);
hipError_t hipEventSynchronize(hipEvent_t event);
hipError_t hipFree(void *ptr);
hipError_t hipFuncGetAttribute(int *value, hipFunction_attribute attrib, hipFunction_t hfunc);
hipError_t hipGetDevice(int *deviceId);
hipError_t hipGetDeviceCount(int *count);
hipError_t hipGetDeviceProperties(hipDeviceProp_t *prop, int deviceId);
const char *hipGetErrorString(hipError_t hipError);
hipError_t hipGetLastError(void);
int hipGetStreamDeviceId(hipStream_t stream);
hipError_t hipHostFree(void *ptr);
hipError_t hipHostMalloc(void **ptr, size_t size, unsigned flags);
typedef void (*hipHostFn_t)(void *userData);
hipError_t hipLaunchHostFunc(hipStream_t stream, hipHostFn_t fn, void *userData);
hipError_t hipMalloc(void **ptr, size_t size);
hipError_t hipMemGetAddressRange(hipDeviceptr_t *pbase, size_t *psize, hipDeviceptr_t dptr);
hipError_t hipMemGetInfo(size_t *free, size_t *total);
hipError_t hipMemcpy2DAsync(void *dst, size_t dpitch, const void *src, size_t spitch, size_t width,
                            size_t height, hipMemcpyKind kind, hipStream_t stream);
hipError_t hipMemcpyAsync(void *dst, const void *src, size_t sizeBytes, hipMemcpyKind kind,
                          hipStream_t stream);
hipError_t hipMemcpyPeerAsync(void *dst, int dstDeviceId, const void *src, int srcDevice,
                              size_t sizeBytes, hipStream_t stream);
hipError_t hipModuleGetFunction(hipFunction_t *function, hipModule_t module, const char *kname);
hipError_t hipModuleLaunchKernel(hipFunction_t f, unsigned gridDimX, unsigned gridDimY,
                                 unsigned gridDimZ, unsigned blockDimX, unsigned blockDimY,
                                 unsigned blockDimZ, unsigned sharedMemBytes, hipStream_t stream,
                                 void **kernelParams, void **extra);
hipError_t hipModuleLoadData(hipModule_t *module, const void *image);
hipError_t hipModuleUnload(hipModule_t module);
hipError_t hipPointerGetAttributes(hipPointerAttribute_t *attributes, const void *ptr);
hipError_t hipRuntimeGetVersion(int *runtimeVersion);
hipError_t hipSetDevice(int deviceId);
hipError_t hipStreamCreateWithPriority(hipStream_t *stream, unsigned flags, int priority);
hipError_t hipStreamDestroy(hipStream_t stream);
hipError_t hipStreamIsCapturing(hipStream_t stream, hipStreamCaptureStatus *pCaptureStatus);
hipError_t hipStreamSynchronize(hipStream_t stream);
hipError_t hipStreamWaitEvent(hipStream_t stream, hipEvent_t event, unsigned flags);
hipError_t hipThreadExchangeStreamCaptureMode(hipStreamCaptureMode *mode);

#endif /* SIM_HIP_RUNTIME_API_H */
