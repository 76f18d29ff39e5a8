/* nvToolsExt.h - as much of NVTX as dp_cuda.h uses; sim_cuda.c is the profiler that listens. */

#ifndef SIM_NVTOOLSEXT_H
#define SIM_NVTOOLSEXT_H

#include <stdint.h>

#define NVTX_VERSION                  3
#define NVTX_EVENT_ATTRIB_STRUCT_SIZE ((uint16_t)sizeof(nvtxEventAttributes_t))

typedef struct nvtxDomainRegistration_st *nvtxDomainHandle_t;
typedef enum nvtxMessageType_t {
    NVTX_MESSAGE_UNKNOWN = 0,
    NVTX_MESSAGE_TYPE_ASCII = 1
} nvtxMessageType_t;
typedef union nvtxMessageValue_t {
    const char *ascii;
    const void *registered;
} nvtxMessageValue_t;
typedef struct nvtxEventAttributes_v2 {
    uint16_t version, size;
    uint32_t category;
    int32_t colorType;
    uint32_t color;
    int32_t payloadType, reserved0;
    uint64_t payload;
    int32_t messageType;
    nvtxMessageValue_t message;
} nvtxEventAttributes_t;

nvtxDomainHandle_t nvtxDomainCreateA(const char *name);
int nvtxDomainRangePushEx(nvtxDomainHandle_t domain, const nvtxEventAttributes_t *eventAttrib);
int nvtxDomainRangePop(nvtxDomainHandle_t domain);

#endif /* SIM_NVTOOLSEXT_H */
