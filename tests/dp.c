/* dp.c - the one file of the test binaries that holds the implementation. */

#define DP_IMPLEMENTATION
#if defined(TEST_CUDA)
#define DP_USE_CUDA
#endif
#include "../dp.h"
