/* dp.c - the library, compiled once. This takes 20 seconds, and each program that is
   linked with it less than a second. In a project of yours two lines are enough: the first one, and
   dp_train.h, or whichever headers other files include.

   Build: cc -std=c11 -O2 -c examples/dp.c                                                        */

#define DP_IMPLEMENTATION
#include "../dp_array.h"
#include "../dp_average.h"
#include "../dp_check.h"
#include "../dp_data.h"
#include "../dp_local.h"
#include "../dp_mirror.h"
#include "../dp_norm.h"
#include "../dp_save.h"
#include "../dp_train.h"
