/* ranked.h - a net on all ranks, whose gradients say which rank they are of; and wrapping where one
   process has no memory. */

#ifndef RANKED_H
#define RANKED_H

#include "grads.h"

enum { W = 3, V = 70 };

/* ---- a net whose backward adds what it is told --------------------------------------------------
   Parameters w and v, a buffer that counts; the loss is a number, its gradient is `k` in every
   element of every gradient, times rank + 1.                                                     */

typedef enum habit {
    ALL,
    ONLY_W,
    NO_LOSS,
    FAILS_FORWARD,
    FAILS,
    V_SAID, /* from here on "v" is said to be ready, and may travel before the rest is done */
    ALL_SAID,
    SAID_TWICE,
    FAILS_LATE
} habit;

typedef struct plan {
    habit habit[RANKS]; /* by rank */
} plan;

static inline int rank_of(const dp_call *call)
{
    dp_info info;
    CHECK_OK(dp_info_get(call->ctx, &info));
    return info.rank_first + call->local_rank;
}

static inline habit habit_of(const dp_call *call)
{
    return ((const plan *)call->state)->habit[rank_of(call)];
}

static inline dp_status add_to(const dp_call *call, size_t param, float value)
{
    float data[V];
    dp_tensor grad = dp_grad_tensor(call, param);
    size_t count = (size_t)dp_tensor_count(&grad);
    dp_tensor host = dp_wrap(data, DP_F32, grad.ndim, grad.shape);
    DP_TRY(dp_copy(call->ctx, &host, &grad, NULL));
    for (size_t i = 0; i < count; i++)
        data[i] += value;
    return dp_copy(call->ctx, &grad, &host, NULL);
}

/* The buffer is a running mean of rank + 1, momentum 0.1. */
static inline dp_status net_forward(dp_call *call)
{
    float mean = 0;
    dp_tensor buffer = dp_buffer_tensor(call, 2), host = dp_wrap(&mean, DP_F32, 0, NULL);
    habit own = habit_of(call);
    if (own == FAILS_FORWARD)
        return dp_error(DP_ERR_USER, "no forward today");
    DP_TRY(dp_copy(call->ctx, &host, &buffer, NULL));
    mean = 0.9f * mean + 0.1f * (float)(rank_of(call) + 1);
    if (call->training)
        DP_TRY(dp_copy(call->ctx, &buffer, &host, NULL));
    call->out = dp_float(1);
    if (own == NO_LOSS)
        call->out = DP_DICT(call->scope, {"right", dp_float(1)});
    return DP_OK;
}

static inline dp_status net_backward(dp_call *call)
{
    float value = (float)call->grad.as.f * (float)(rank_of(call) + 1);
    habit own = habit_of(call);
    if (own == FAILS)
        return dp_error(DP_ERR_USER, "no backward today");
    if (own != ONLY_W)
        DP_TRY(add_to(call, 1, value));
    if (own >= V_SAID)
        DP_TRY(dp_grad_ready(call, 1));
    if (own == FAILS_LATE)
        return dp_error(DP_ERR_NO_MEMORY, "no backward today: %0250d bytes are missing", 7);
    if (own == SAID_TWICE)
        return dp_grad_ready(call, 1);
    DP_TRY(add_to(call, 0, value));
    return own == ALL_SAID ? dp_grad_ready(call, 0) : DP_OK;
}

static const dp_method net_methods[] = {{"forward", net_forward}, {"backward", net_backward}};
static const dp_param_config net_params[] = {
    {.name = "w", .dtype = DP_F32, .ndim = 1, .shape = {W}},
    {.name = "v", .dtype = DP_F32, .ndim = 1, .shape = {V}},
    {.name = "seen", .dtype = DP_F32, .buffer = true}};

/* What `own` leaves out is the net's; it has two methods. */
static inline dp_module *make_net_of(dp_ctx *ctx, dp_module_config own)
{
    dp_module *net;
    own.name = own.name != NULL ? own.name : "net";
    own.methods = own.methods != NULL ? own.methods : net_methods;
    own.method_count = 2;
    own.params = own.params != NULL ? own.params : net_params;
    own.param_count = own.param_count > 0 ? own.param_count : 3;
    CHECK_OK(dp_module_create(ctx, &own, &net));
    return net;
}

static inline dp_module *make_net(dp_ctx *ctx, const plan *how)
{
    return make_net_of(ctx, (dp_module_config){.state = how});
}

/* ---- five parameters, "a" to "e", of three numbers each -----------------------------------------
   The gradient of parameter i is (i + 1) * (rank + 1).                                           */

enum { FIVE = 5, EACH = 3 };

static inline dp_status number_forward(dp_call *call)
{
    call->out = dp_float(1);
    return DP_OK;
}

static inline dp_status five_backward(dp_call *call)
{
    for (size_t i = 0; i < FIVE; i++)
        DP_TRY(add_to(call, i, (float)(i + 1) * (float)(rank_of(call) + 1)));
    return DP_OK;
}

static const dp_method five_methods[] = {{"forward", number_forward}, {"backward", five_backward}};

static inline void five_params(dp_param_config *out)
{
    static const char *const names[FIVE] = {"a", "b", "c", "d", "e"};
    for (int i = 0; i < FIVE; i++)
        out[i] = (dp_param_config){.name = names[i], .ndim = 1, .shape = {EACH}};
}

/* ---- passes ---------------------------------------------------------------------------------- */

/* One replica a local rank. */
static inline dp_value a_part_each(dp_ctx *ctx, dp_scope *scope)
{
    static float rows[RANKS];
    dp_info info;
    CHECK_OK(dp_info_get(ctx, &info));
    dp_tensor batch = dp_wrap(rows, DP_F32, 1, (int64_t[]){info.local_count});
    return DP_DICT(scope, {"x", dp_of(scope, &batch)});
}

static inline dp_status forward_and_backward(dp_module *par, double k, bool no_sync)
{
    dp_ctx *ctx = dp_module_ctx(par);
    dp_scope *scope = dp_scope_begin(ctx);
    dp_pass *pass = NULL;
    dp_value out;
    dp_status status = dp_invoke(par, scope, "forward", dp_none(), a_part_each(ctx, scope),
                                 &(dp_pass_config){.no_sync = no_sync}, &out, &pass);
    if (status == DP_OK)
        status = dp_backward(pass, dp_float(k), NULL);
    dp_scope_end(scope);
    return status;
}

/* Of a parameter: dp_stretch.share, and how many elements of the stretch come before it. */
static inline size_t share_of(dp_module *module, size_t param, size_t *out_at)
{
    const dp_stretch *all;
    size_t count = 0;
    dp_param_info info;
    CHECK_OK(dp_module_stretches(module, &all, &count));
    for (size_t s = 0; s < count; s++) {
        *out_at = 0;
        for (size_t i = 0; i < all[s].param_count; i++) {
            if (all[s].params[i] == param)
                return all[s].share;
            CHECK_OK(dp_module_param(module, all[s].params[i], &info));
            *out_at += (size_t)dp_tensor_count(&info.data);
        }
    }
    return 0;
}

/* Whether a rank has what was reduced of an element of a parameter, if gradients are scattered. */
static inline bool has_share(dp_module *module, size_t param, int rank, size_t index)
{
    dp_info job;
    size_t at = 0, share = share_of(module, param, &at);
    CHECK_OK(dp_info_get(dp_module_ctx(module), &job));
    at += index;
    return share == 0 || at >= share * (size_t)job.rank_count || at / share == (size_t)rank;
}

static inline float element(dp_module *net, size_t param, bool grad, size_t index)
{
    dp_param_info info;
    dp_tensor gradient;
    float got[V];
    CHECK_OK(dp_module_param(net, param, &info));
    if (grad)
        CHECK_OK(dp_owner_grad(net, 0, param, &gradient));
    CHECK_OK(dp_read(dp_module_ctx(net), grad ? &gradient : &info.data, got,
                     (size_t)dp_tensor_count(&info.data) * sizeof(float)));
    return got[index];
}

static inline void check_grads(dp_module *net, double w, double v)
{
    CHECK_F64(element(net, 0, true, W - 1), w, 1e-5 * fabs(w));
    CHECK_F64(element(net, 1, true, 0), v, 1e-5 * fabs(v));
    CHECK_F64(element(net, 1, true, V - 1), v, 1e-5 * fabs(v));
}

static inline dp_info info_here(dp_ctx *ctx)
{
    dp_info info;
    CHECK_OK(dp_info_get(ctx, &info));
    return info;
}

/* The tables that there are for one machine; for several, one that uses the bootstrap. timeout_ms:
   0 for the default. */
static inline dp_ctx *open_over_shm(meeting *m, int devices, int timeout_ms)
{
    dp_ctx *ctx;
    dp_config config = config_of(m, devices);
    if (meeting_machines == NULL)
        config.colls = NULL;
    config.timeout_ms = timeout_ms;
    CHECK_OK(dp_open(&config, &ctx));
    return ctx;
}

/* ---- no memory in one process ---------------------------------------------------------------- */

/* What all processes see. */
typedef struct shortage {
    size_t fail_at; /* of process 1's allocations, from `wrap` on */
    bool failed;    /* there was one */
    dp_status status[2];
    int devices; /* of each process; else 2 */
    dp_module *(*make)(dp_ctx *ctx);
    dp_status (*wrap)(dp_module *module);
} shortage;

static shortage *lack;

/* All that is kept for later calls is taken, so that they have to ask the allocator. */
static inline void take_what_is_kept(dp_ctx *ctx, const test_allocator *counter)
{
    dp_scope *scope;
    dp_tensor taken;
    size_t before;
    do {
        before = counter->call_count;
        scope = dp_scope_begin(ctx);
        CHECK_OK(dp_scope_check(scope));
    } while (counter->call_count == before);
    for (int64_t bytes = 16; bytes < 1 << 17; bytes += bytes / 16)
        for (int what = -1; what < info_here(ctx).local_count; what++)
            do {
                before = counter->call_count;
                if (what < 0)
                    CHECK(dp_scope_alloc(scope, (size_t)bytes) != NULL);
                else
                    CHECK_OK(
                        dp_tensor_new(scope, dp_local_device(ctx, what), DP_U8, 1, &bytes, &taken));
            } while (counter->call_count == before);
}

static inline void one_has_no_memory(meeting *m)
{
    test_allocator counter = {0};
    dp_config config = config_of(m, lack->devices > 0 ? lack->devices : 2);
    dp_ctx *ctx;
    bool any = false;
    if (meeting_machines == NULL)
        config.colls = NULL;
    config.poison = true;
    config.allocator = test_allocator_of(&counter);
    CHECK_OK(dp_open(&config, &ctx));
    dp_module *module = lack->make(ctx);
    take_what_is_kept(ctx, &counter);
    if (m->process == 1)
        counter.fail_at = counter.call_count + lack->fail_at;
    dp_status status = lack->wrap(module);
    if (status == DP_OK)
        status = dp_any(ctx, true, &any);
    lack->status[m->process] = status;
    if (m->process == 1)
        lack->failed = counter.fail_count > 0;
    CHECK(status != DP_ERR_TIMEOUT);
    dp_failure_info failure;
    CHECK(dp_failure(ctx, &failure) == (dp_status_class(status) == DP_CLASS_JOB));
    if (dp_status_class(status) == DP_CLASS_JOB)
        CHECK_SAYS(failure.text, "(DP_ERR_NO_MEMORY)");
    dp_close(ctx);
    CHECK_NO_LEAKS(&counter);
}

/* Where one process has no memory, both know, and neither waits for the other. Returns how many
   allocations there are. */
static inline size_t each_allocation_fails_in_one(dp_module *(*make)(dp_ctx *ctx),
                                                  dp_status (*wrap)(dp_module *module))
{
    lack = shared_memory(sizeof *lack);
    lack->make = make;
    lack->wrap = wrap;
    do {
        lack->fail_at += (size_t)test_step();
        in_processes(2, one_has_no_memory);
        CHECK_INT(lack->status[0] != DP_OK, lack->failed);
        CHECK_INT(lack->status[1] != DP_OK, lack->failed);
    } while (lack->failed);
    return lack->fail_at;
}

/* By this process, before others took part. */
static inline bool is_refused(dp_status status)
{
    return status != DP_OK && dp_status_class(status) != DP_CLASS_JOB;
}

#endif /* RANKED_H */
