/* rccl.h - RCCL's declarations are NCCL's, for streams of HIP: dp_hip.h says that they are
   cudaStream_t. */

#ifndef SIM_RCCL_H
#define SIM_RCCL_H

#define SIM_NCCL_FOR_HIP
#include "../../nccl.h"

#endif /* SIM_RCCL_H */
