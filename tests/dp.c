/* dp.c - the one file of the test binaries that holds the implementation. */

#define DP_IMPLEMENTATION
#define DP__METRICS_MS 20
#if defined(TEST_HIP)
#define DP_USE_HIP
#define DP_USE_RCCL
#elif defined(TEST_CUDA)
#define DP_USE_CUDA
#endif
#if (defined(TEST_NCCL) || defined(TEST_SIM)) && !defined(TEST_HIP)
#define DP_USE_NCCL
#endif
#if defined(TEST_MPI)
#define DP_USE_MPI
#endif
#if defined(TEST_SIM)
#include "sim/loader.h"
#endif
#if defined(TEST_WHOLE) /* all headers are one file, which the compiler is told the place of */
#include "dp.h"
#else
#include "../dp.h"
#endif
#if defined(TEST_SIM)
#include "sim/loaded.h"
#endif
#if defined(TEST_HIP)
#include "sim/hip/as_cuda.h"
#endif
#if defined(TEST_TRAIN) || !defined(TEST_ALONE)
#include "../dp_array.h"
#include "../dp_average.h"
#include "../dp_check.h"
#include "../dp_data.h"
#include "../dp_local.h"
#include "../dp_mirror.h"
#include "../dp_norm.h"
#include "../dp_save.h"
#include "../dp_train.h"
#endif
#if !defined(TEST_ALONE) /* for fuzzers, and to see what the library costs */
#include "rows.h"
#include "system.h"
#include "team.h"
#if defined(DP_ONE_PROCESS)
#include "alone.h"
#else
#include "between.h"
#include "pipes.h"
#endif
#endif
