/* dp.c - the one file of the test binaries that holds the implementation. */

#define DP_IMPLEMENTATION
#include "../dp.h"
