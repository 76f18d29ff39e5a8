/* hiprtc.h - what dp_hip.h uses of HIP's compiler, for the simulator. */

#ifndef SIM_HIPRTC_H
#define SIM_HIPRTC_H

#include <stddef.h>

typedef enum hiprtcResult {
    HIPRTC_SUCCESS = 0,
    HIPRTC_ERROR_OUT_OF_MEMORY = 1,
    HIPRTC_ERROR_COMPILATION = 6
} hiprtcResult;
typedef struct _hiprtcProgram *hiprtcProgram;

hiprtcResult hiprtcCompileProgram(hiprtcProgram prog, int numOptions, const char **options);
hiprtcResult hiprtcCreateProgram(hiprtcProgram *prog, const char *src, const char *name,
                                 int numHeaders, const char **headers, const char **includeNames);
hiprtcResult hiprtcDestroyProgram(hiprtcProgram *prog);
hiprtcResult hiprtcGetCode(hiprtcProgram prog, char *code);
hiprtcResult hiprtcGetCodeSize(hiprtcProgram prog, size_t *codeSizeRet);
const char *hiprtcGetErrorString(hiprtcResult result);
hiprtcResult hiprtcGetProgramLog(hiprtcProgram prog, char *log);
hiprtcResult hiprtcGetProgramLogSize(hiprtcProgram prog, size_t *logSizeRet);

#endif /* SIM_HIPRTC_H */
