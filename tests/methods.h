/* methods.h - methods and functions for tests that need some, and not what they do; and a module
   that has no others. */

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

/* "net", which has these parameters, and one more in its child "inner". */
static inline dp_module *net_with_child(dp_ctx *ctx, int rank, const dp_param_config *own,
                                        size_t count, int inner_rank, const dp_param_config *inner)
{
    static const dp_method methods[] = {{"forward", give_none}, {"backward", give_none}};
    dp_module *child = NULL, *net = NULL;
    CHECK_OK(dp_module_create(
        ctx,
        &(dp_module_config){
            .name = "inner", .params = inner, .param_count = 1, .local_rank = inner_rank},
        &child));
    CHECK_OK(dp_module_create(ctx,
                              &(dp_module_config){.name = "net",
                                                  .methods = methods,
                                                  .method_count = 2,
                                                  .params = own,
                                                  .param_count = count,
                                                  .children = &child,
                                                  .child_count = 1,
                                                  .local_rank = rank},
                              &net));
    return net;
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
