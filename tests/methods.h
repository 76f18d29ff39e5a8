/* methods.h - methods and functions for tests that need some, and not what they do. */

#ifndef METHODS_H
#define METHODS_H

#include "test.h"

static inline dp_status give_none(dp_call *call)
{
    call->out = dp_none();
    return DP_OK;
}

/* A backward: no gradient is touched. */
static inline dp_status no_gradient(dp_call *call)
{
    (void)call;
    return DP_OK;
}

/* Of dp_run. */
static inline dp_status run_nothing(int local_rank, dp_scope *scope, void *user)
{
    (void)local_rank;
    (void)scope;
    (void)user;
    return DP_OK;
}

#endif /* METHODS_H */
