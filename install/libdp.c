/* libdp.c - the library compiled once: what make install calls libdp. */

#define DP_IMPLEMENTATION
#include "dp.h"
#include "dp_average.h"
#include "dp_check.h"
#include "dp_data.h"
#include "dp_local.h"
#include "dp_mirror.h"
#include "dp_norm.h"
#include "dp_save.h"
#include "dp_train.h"
