/* sharing.h - a net whose parameters processes share (share_params), and what has to be the same
   with that and without, on one machine and on several. */

#ifndef SHARING_H
#define SHARING_H

#include "../dp_average.h"
#include "../dp_save.h"
#include "methods.h"
#include "ranked.h"
#include "torch_steps.h"

/* ---- a net whose gradients depend on its numbers --------------------------------------------- */

enum { NET_A = 1057, NET_B = 5, NET_C = 3000, NET_F = 40, NET = NET_A + NET_B + NET_C };

static const size_t net_counts[] = {NET_A, NET_B, NET_C};

/* grad += 0.01 * w + rank + 1, element by element. */
static inline dp_status pull(dp_call *call)
{
    for (size_t i = 0; i < 3; i++) {
        dp_tensor grad = dp_grad_tensor(call, i), data = dp_param_tensor(call, i);
        dp_scope *scope = dp_scope_child(call->scope);
        dp_tensor wide, more;
        DP_TRY(dp_tensor_new(scope, grad.device, DP_F32, grad.ndim, grad.shape, &wide));
        DP_TRY(dp_tensor_new(scope, grad.device, DP_F32, grad.ndim, grad.shape, &more));
        DP_TRY(dp_cast(call->ctx, &wide, &data));
        DP_TRY(dp_fill(call->ctx, &more, dp_float(rank_of(call) + 1)));
        DP_TRY(dp_axpby(call->ctx, 0.01, &wide, 1, &more, &wide));
        DP_TRY(dp_cast(call->ctx, &more, &grad));
        DP_TRY(dp_axpby(call->ctx, 1, &wide, 1, &more, &wide));
        DP_TRY(dp_cast(call->ctx, &grad, &wide));
        dp_scope_end(scope);
    }
    return DP_OK;
}

static const dp_method pulled[] = {{"forward", number_forward}, {"backward", pull}};

static inline dp_module *net_of(dp_ctx *ctx, dp_dtype dtype, bool packed)
{
    const dp_param_config params[] = {
        {.name = "a", .dtype = dtype, .ndim = 2, .shape = {7, NET_A / 7}},
        {.name = "b", .dtype = dtype, .ndim = 1, .shape = {NET_B}},
        {.name = "c", .dtype = dtype, .ndim = 1, .shape = {NET_C}},
        {.name = "fixed", .dtype = dtype, .ndim = 1, .shape = {NET_F}, .frozen = true},
        {.name = "none", .dtype = dtype, .ndim = 1, .shape = {0}},
        {.name = "seen", .buffer = true}};
    dp_module *net = NULL;
    CHECK_OK(dp_module_create(ctx,
                              &(dp_module_config){.name = "net",
                                                  .methods = pulled,
                                                  .method_count = 2,
                                                  .params = params,
                                                  .param_count = packed ? 3 : 6,
                                                  .packed = packed},
                              &net));
    return net;
}

/* All elements of a parameter become one number. */
static inline dp_status put(dp_module *net, size_t param, double value)
{
    dp_tensor data;
    DP_TRY(dp_params_edit(net, param, &data, NULL));
    return dp_fill(dp_module_ctx(net), &data, dp_float(value));
}

/* Each rank begins with numbers of its own: those of rank 0 are everybody's. */
static inline dp_module *par_of(dp_ctx *ctx, dp_dtype dtype, bool packed, bool shared)
{
    dp_module *net = net_of(ctx, dtype, packed), *par = NULL;
    for (size_t i = 0; i < 3; i++)
        CHECK_OK(put(net, i, (double)i - 1.25 + dp_rank(ctx)));
    CHECK_OK(dp_distributed(net, &(dp_distributed_config){.share_params = shared}, &par));
    return par;
}

static inline void numbers_of(dp_module *par, float *out)
{
    dp_ctx *ctx = dp_module_ctx(par);
    dp_scope *temp = dp_scope_begin(ctx);
    for (size_t i = 0, at = 0; i < 3; at += net_counts[i++]) {
        dp_param_info info;
        dp_tensor wide;
        CHECK_OK(dp_module_param(par, i, &info));
        CHECK_OK(
            dp_tensor_new(temp, info.data.device, DP_F32, info.data.ndim, info.data.shape, &wide));
        CHECK_OK(dp_cast(ctx, &wide, &info.data));
        CHECK_OK(dp_read(ctx, &wide, out + at, net_counts[i] * sizeof(float)));
    }
    dp_scope_end(temp);
}

static inline void check_same(dp_module *par, dp_module *other)
{
    static float got[NET], want[NET];
    numbers_of(par, got);
    numbers_of(other, want);
    CHECK_BYTES(got, want, sizeof got);
    CHECK_OK(dp_params_compare(par));
}

static inline void check_each(dp_module *par, float want)
{
    static float got[NET];
    numbers_of(par, got);
    for (size_t i = 0; i < NET; i++)
        CHECK_F64(got[i], want, 0);
}

static inline bool is_shared(dp_module *par, size_t param)
{
    dp_param_info info;
    CHECK_OK(dp_module_param(par, param, &info));
    return info.shared;
}

static inline dp_optim *optim_of(dp_module *par, const rule_case *rule, dp_optim_config config)
{
    dp_optim *optim = NULL;
    config.rule = rule->rule();
    config.hyper = rule->hyper;
    config.sharded = true;
    CHECK_OK(dp_optim_create(par, &config, &optim));
    return optim;
}

static inline void train(dp_module *par, dp_optim *optim, int steps)
{
    for (int i = 0; i < steps; i++) {
        CHECK_OK(forward_and_backward(par, 1, false));
        CHECK_OK(dp_optim_step(optim));
    }
}

/* ---- the same numbers ------------------------------------------------------------------------ */

static inline void check_same_state(dp_value a, dp_value b)
{
    static const char *const names[] = {"a", "b", "c"};
    for (size_t i = 0; i < 3; i++) {
        dp_value x = dp_get(dp_get(a, "state"), names[i]), y = dp_get(dp_get(b, "state"), names[i]);
        CHECK_INT(dp_count(x), dp_count(y));
        for (size_t k = 0; k < dp_count(x); k++) {
            const dp_tensor *own = dp_at(x, k).as.t, *other = dp_at(y, k).as.t;
            CHECK_INT(dp_tensor_count(own), (int64_t)net_counts[i]);
            CHECK_BYTES(own->data, other->data, net_counts[i] * sizeof(float));
        }
    }
}

/* With what is saved in the middle, both go on as the other would. */
static inline void check_steps(dp_ctx *ctx, const rule_case *rule, dp_dtype dtype, bool packed)
{
    dp_scope *scope = dp_scope_begin(ctx);
    dp_module *own = par_of(ctx, dtype, packed, false), *par = par_of(ctx, dtype, packed, true);
    const dp_optim_config config = {.masters = dtype != DP_F32, .clip = {.norm = 20}};
    dp_optim *some = optim_of(own, rule, config), *once = optim_of(par, rule, config);
    dp_value of_some, of_once;
    check_same(par, own);
    train(own, some, 3);
    train(par, once, 3);
    check_same(par, own);
    CHECK_OK(dp_optim_save(some, scope, &of_some));
    CHECK_OK(dp_optim_save(once, scope, &of_once));
    check_same_state(of_once, of_some);
    dp_optim_destroy(once);
    once = optim_of(par, rule, config);
    CHECK_OK(dp_optim_load(once, of_some));
    CHECK_OK(dp_optim_load(some, of_once));
    train(own, some, 3);
    train(par, once, 3);
    check_same(par, own);
    dp_scope_end(scope);
}

static inline void check_all_steps(dp_ctx *ctx)
{
    check_steps(ctx, &rules[0], DP_F32, false);
    check_steps(ctx, &rules[1], DP_F32, true);
    check_steps(ctx, &rules[4], DP_F32, false);
    check_steps(ctx, &rules[4], DP_BF16, false);
}

/* ---- edits ----------------------------------------------------------------------------------- */

static inline void check_param(dp_module *par, size_t param, float first, float last)
{
    static float got[NET];
    dp_param_info info;
    size_t count = net_counts[param];
    CHECK_OK(dp_module_param(par, param, &info));
    CHECK_OK(dp_read(dp_module_ctx(par), &info.data, got, count * sizeof(float)));
    CHECK_F64(got[0], first, 0);
    CHECK_F64(got[count - 1], last, 0);
}

static inline dp_status put_rows(dp_module *par, int64_t first, int64_t count, double value)
{
    dp_tensor data;
    DP_TRY(dp_params_edit(par, 0, &data, NULL));
    DP_TRY(dp_narrow(&data, 0, first, count, &data));
    return dp_fill(dp_module_ctx(par), &data, dp_float(value));
}

/* Nobody can say which numbers are meant. `first`: this process is on the first machine; its place
   there. */
static inline void check_edits_that_differ(dp_module *par, bool first, int place)
{
    CHECK_OK(dp_edit_begin(par, DP_OK));
    if (place == 0)
        CHECK_OK(put_rows(par, first ? 0 : 3, first ? 3 : 4, 16));
    CHECK_OK(put(par, 2, 17));
    CHECK_ERROR(dp_edit_end(par, DP_OK), DP_ERR_MISMATCH,
                "dp_edit_end: machines have written different numbers to 'a', and those of the "
                "first of them are everybody's");
    check_param(par, 0, 16, 15);
    check_param(par, 2, 17, 17);
    CHECK_OK(dp_params_compare(par));

    CHECK_OK(dp_edit_begin(par, DP_OK)); /* the same numbers, in another order */
    if (place == 0)
        CHECK_OK(put_rows(par, first ? 0 : 3, 3, 18));
    if (place == 0)
        CHECK_OK(put_rows(par, first ? 3 : 0, 3, 19));
    CHECK_STATUS(dp_edit_end(par, DP_OK), DP_ERR_MISMATCH);
    check_param(par, 0, 18, 15);
    CHECK_OK(dp_params_compare(par));
}

/* `machines`: a letter for each process, of two machines or more; one process of the first of these
   or two write parts. */
static inline void check_edits_between(dp_ctx *ctx, const char *machines)
{
    const char *other = machines;
    int process = info_here(ctx).process, place = 0;
    char own = machines[process];
    dp_module *par = par_of(ctx, DP_F32, false, true);
    for (int p = 0; p < process; p++)
        place += machines[p] == own;
    while (*other == machines[0])
        other++;
    bool first = own == machines[0], second = own == *other;

    CHECK_OK(dp_edit_begin(par, DP_OK)); /* three machines' at once, of which one writes parts */
    if (first && place == 0)
        CHECK_OK(put_rows(par, 0, 3, 10));
    if (first && place == 1)
        CHECK_OK(put_rows(par, 3, 4, 11));
    if (second && place == 0)
        CHECK_OK(put(par, 1, 12));
    CHECK_OK(put(par, 2, 13));
    CHECK_OK(dp_edit_end(par, DP_OK));
    check_param(par, 0, 10, 11);
    check_param(par, 1, 12, 12);
    check_param(par, 2, 13, 13);
    CHECK_OK(dp_params_compare(par));

    CHECK_OK(dp_edit_begin(par, DP_OK)); /* what is written first is known to an edit inside */
    if (second)
        CHECK_OK(put(par, 0, 14));
    CHECK_OK(dp_edit_begin(par, DP_OK));
    check_param(par, 0, 14, 14);
    CHECK_OK(dp_barrier(ctx)); /* the others have looked */
    if (process == 0)
        CHECK_OK(put(par, 0, 15));
    CHECK_OK(dp_edit_end(par, DP_OK));
    check_param(par, 0, 15, 15);
    CHECK_OK(dp_edit_end(par, DP_OK));
    check_param(par, 0, 15, 15);

    check_edits_that_differ(par, first, place);
    CHECK_OK(dp_edit_begin(par, DP_OK));
    CHECK_OK(dp_edit_end(par, DP_OK));
    CHECK_OK(forward_and_backward(par, 1, false));
}

/* Of each stretch a rank writes its share, and the first process what is left over; then, in
   an edit inside, the last process writes all of "b". */
static inline void check_shares_by_hand(dp_ctx *ctx)
{
    const dp_stretch *all;
    size_t count = 0, cut = 0;
    dp_info info = info_here(ctx);
    dp_module *par = par_of(ctx, DP_F32, false, true), *net = dp_unwrap(par);
    CHECK_OK(dp_module_stretches(par, &all, &count));
    CHECK_ERROR(dp_edit_shares(par), DP_ERR_STATE,
                "dp_edit_shares: no edit of 'distributed' is open: dp_edit_begin first");
    CHECK_OK(dp_edit_begin(net, DP_OK));
    for (size_t s = 0; s < count; s++) {
        dp_tensor data;
        for (size_t i = all[s].param_count; i-- > 0;)
            CHECK_OK(dp_params_edit(par, all[s].params[i], &data, NULL));
        float *numbers = data.data;
        size_t first = all[s].share * (size_t)info.rank_first;
        for (size_t i = 0; i < all[s].share * (size_t)info.local_count; i++)
            numbers[first + i] = (float)(info.process + 1);
        cut = all[s].share * (size_t)info.rank_count;
        for (size_t i = cut; i < all[s].count && info.process == 0; i++)
            numbers[i] = -1;
    }
    CHECK_OK(dp_edit_shares(par));
    CHECK_ERROR(put(par, 1, -2), DP_ERR_STATE,
                "only shares of 'b' are written in this edit since dp_edit_shares");
    CHECK_OK(dp_edit_begin(net, DP_OK));
    if (info.process == info.process_count - 1)
        CHECK_OK(put(par, 1, -2));
    CHECK_OK(dp_edit_end(net, DP_OK));
    CHECK_OK(dp_edit_end(par, DP_OK));
    CHECK_OK(dp_params_compare(par));
    dp_param_info b;
    CHECK_OK(dp_module_param(par, 1, &b));
    for (size_t s = 0; s < count; s++) {
        dp_param_info first;
        CHECK_OK(dp_module_param(par, all[s].params[0], &first));
        const float *numbers = first.data.data, *set = b.data.data;
        cut = all[s].share * (size_t)info.rank_count;
        for (size_t i = 0; i < all[s].count; i++)
            CHECK_F64(numbers[i],
                      &numbers[i] >= set && &numbers[i] < set + NET_B ? -2
                      : i < cut ? (double)(i / (all[s].share * (size_t)info.local_count) + 1)
                                : -1,
                      0);
    }
}

static inline void check_loads(dp_ctx *ctx)
{
    int process = info_here(ctx).process;
    dp_scope *scope = dp_scope_begin(ctx);
    dp_module *own = par_of(ctx, DP_F32, false, false), *par = par_of(ctx, DP_F32, false, true);
    dp_module *copy = NULL;
    dp_value saved;
    for (size_t i = 0; i < 3; i++)
        CHECK_OK(put(own, i, 0.5));
    CHECK_OK(dp_module_save(own, scope, &saved));
    CHECK_OK(dp_module_load(par, saved, &(dp_module_load_config){.check_only = true}));
    check_each(own, 0.5f);
    CHECK_OK(dp_module_load(par, saved, NULL));
    check_same(par, own);
    CHECK_OK(dp_module_load(par, saved, NULL));
    CHECK_OK(put(own, 0, 0.25));
    dp_value other = process == 1 ? dp_dict_make(scope, NULL, 0) : saved;
    CHECK_ERROR(dp_module_load(par, other, NULL), DP_ERR_MISMATCH, "parameters of");
    other = process == 1 ? dp_int(1) : saved; /* one cannot: then none loads */
    CHECK_ERROR(dp_module_load(par, other, NULL), DP_ERR_INVALID, "is not a dict");
    CHECK_OK(put(own, 0, 0.5));
    CHECK_OK(dp_module_copy(dp_unwrap(par), 0, &copy));
    CHECK(!is_shared(copy, 0));
    check_each(copy, 0.5f);
    CHECK_OK(put(copy, 0, 3));
    check_same(par, own);
}

static inline void check_averages(dp_ctx *ctx)
{
    dp_module *par = par_of(ctx, DP_F32, false, true), *own = par_of(ctx, DP_F32, false, true);
    dp_optim *optim = optim_of(par, &rules[0], (dp_optim_config){0});
    dp_average *average = NULL;
    static float before[NET], got[NET];
    CHECK_OK(dp_average_create(par, &(dp_average_config){.momentum = 0.5}, &average));
    double mean = (dp_rank_count(ctx) + 1) / 2.0; /* of what ranks add to gradients */
    numbers_of(par, before);
    CHECK_OK(dp_average_update(average));
    train(par, optim, 1);
    CHECK_OK(dp_average_update(average));
    CHECK_OK(dp_average_begin(average));
    numbers_of(par, got);
    CHECK(got[0] < before[0]);
    CHECK_F64(got[0], (double)before[0] - 0.5 * 0.05 * (mean + 0.01 * (double)before[0]), 1e-6);
    CHECK_OK(dp_barrier(ctx));
    CHECK_OK(dp_average_end(average));
    numbers_of(par, got);
    CHECK_F64(got[0], (double)before[0] - 0.05 * (mean + 0.01 * (double)before[0]), 1e-6);
    CHECK_OK(dp_average_copy(average, own));
    numbers_of(own, got);
    CHECK_F64(got[0], (double)before[0] - 0.5 * 0.05 * (mean + 0.01 * (double)before[0]), 1e-6);
    CHECK_OK(dp_params_compare(own));
    dp_average_destroy(average);
}

#endif /* SHARING_H */
