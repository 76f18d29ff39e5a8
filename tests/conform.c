/* conform.c - the library with a table of somebody else's, as a user's file has it: CONFORM_BACKEND
   is the header, CONFORM_TABLE a function of it, CONFORM_COLL a call of another one, or NULL. */

#define DP_IMPLEMENTATION
#include "../dp.h"
#include "../dp_array.h"
#include "../dp_average.h"
#include "../dp_check.h"
#include "../dp_data.h"
#include "../dp_norm.h"
#include "../dp_save.h"
#include "../dp_train.h"
#include CONFORM_BACKEND

const dp_device_ops *conform_table(void);
const dp_coll_ops *conform_coll(void);

const dp_device_ops *conform_table(void)
{
    return CONFORM_TABLE();
}

const dp_coll_ops *conform_coll(void)
{
    return CONFORM_COLL;
}
