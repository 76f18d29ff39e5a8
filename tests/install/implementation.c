/* implementation.c - for who has the headers alone. */

#define DP_IMPLEMENTATION
#include <dp.h>
#include <dp_train.h>
