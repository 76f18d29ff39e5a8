/* test_spmd.c - collectives that each rank calls for itself: in functions under dp_run, in methods,
   in processes of one rank. What they carry, in worlds of every kind, is in test_coll.c. Here is
   who may call them, who meets whom, and what becomes of those who wait for one that does not
   come. */

#include <limits.h>
#include <math.h>
#include <stdatomic.h>
#include "tree.h" /* before what has a type called number */
#include "grads.h"
#include "lazy.h"
#include "methods.h"

enum { MOST = 64 }; /* elements */

static dp_info about(const dp_ctx *ctx)
{
    dp_info info;
    CHECK_OK(dp_info_get(ctx, &info));
    return info;
}

static dp_status in_run(dp_ctx *ctx, dp_run_fn fn, void *user)
{
    dp_scope *scope = dp_scope_begin(ctx);
    dp_status status = dp_run(ctx, scope, fn, user);
    dp_scope_end(scope);
    return status;
}

/* ---- memory of any device -------------------------------------------------------------------- */

/* A tensor of `count` elements, which are `numbers` if that is not NULL. */
static dp_tensor numbers_on(dp_ctx *ctx, dp_scope *scope, int local_rank, dp_dtype dtype,
                            int64_t count, const double *numbers)
{
    dp_tensor tensor;
    size_t each = dp_dtype_bytes(dtype);
    char *data = dp_scope_alloc(scope, (size_t)count * each + 1);
    CHECK(data != NULL);
    for (int64_t i = 0; i < count; i++)
        tree_store(data + (size_t)i * each, dtype, numbers != NULL ? numbers[i] : 77);
    dp_tensor host = dp_wrap(data, dtype, 1, &count);
    CHECK_OK(dp_tensor_new(scope, dp_local_device(ctx, local_rank), dtype, 1, &count, &tensor));
    CHECK_OK(dp_copy(ctx, &tensor, &host, NULL));
    return tensor;
}

static void read_numbers(dp_ctx *ctx, dp_scope *scope, const dp_tensor *tensor, double *out)
{
    size_t count = (size_t)dp_tensor_count(tensor), each = dp_dtype_bytes((dp_dtype)tensor->dtype);
    char *data = dp_scope_alloc(scope, count * each + 1);
    CHECK(data != NULL);
    CHECK_OK(dp_read(ctx, tensor, data, count * each));
    for (size_t i = 0; i < count; i++)
        out[i] = tree_load(data + i * each, (dp_dtype)tensor->dtype);
}

/* ---- what is to come of it ------------------------------------------------------------------- */

typedef struct ask { /* of all ranks */
    dp_verb verb;
    dp_dtype dtype;
    dp_op op;
    size_t count;
    int root;
    bool in_place;
} ask;

/* Element i of what a rank sends: small and whole, so that sums and products are exact. */
static double sent(int rank, size_t i)
{
    return 1 + (rank + (int)i) % 2 + (rank == 3 ? 2 : 0);
}

/* Over the ranks that take part: a bit each. */
static double reduced(const ask *a, unsigned takers, int ranks, size_t i)
{
    double result = a->op == DP_OP_PROD ? 1 : 0, count = 0;
    for (int r = 0; r < ranks; r++) {
        double x = sent(r, i);
        if ((takers >> r & 1) == 0)
            continue;
        bool better = count++ < 1 || (a->op == DP_OP_MIN ? x < result : x > result);
        if (a->op == DP_OP_PROD)
            result *= x;
        else if (a->op == DP_OP_SUM || a->op == DP_OP_MEAN)
            result += x;
        else if (better)
            result = x;
    }
    result = a->op == DP_OP_MEAN ? result / count : result;
    return a->dtype <= DP_BF16 ? result : trunc(result);
}

/* What a rank has received as element i. */
static double received(const ask *a, unsigned takers, int ranks, int rank, size_t i)
{
    int from = a->verb == DP_BROADCAST ? a->root : (int)(i / a->count);
    bool takes = (takers >> from & 1) != 0;
    switch ((int)a->verb) {
    case DP_ALL_REDUCE:
        return reduced(a, takers, ranks, i);
    case DP_REDUCE_SCATTER:
        return reduced(a, takers, ranks, (size_t)rank * a->count + i);
    case DP_BROADCAST:
        return takes ? sent(a->root, i) : 0;
    default:
        return takes ? sent(from, i % a->count) : 0;
    }
}

/* A rank asks for it; its function is called `mine`, its memory is on the device. */
static dp_status ask_for(dp_ctx *ctx, dp_scope *scope, const ask *a, int local_rank,
                         unsigned takers)
{
    double numbers[MOST] = {0}, got[MOST];
    dp_info info = about(ctx);
    int rank = info.rank_first + local_rank;
    size_t blocks = (size_t)info.rank_count, each = dp_dtype_bytes(a->dtype);
    size_t sends = a->verb == DP_REDUCE_SCATTER ? blocks * a->count : a->count;
    size_t gets = a->verb == DP_ALL_GATHER ? blocks * a->count : a->count;
    size_t own = (size_t)rank * a->count * each;
    bool in_place = a->in_place || a->verb == DP_BROADCAST;
    CHECK(sends <= MOST && gets <= MOST);
    for (size_t i = 0; i < sends; i++)
        numbers[i] = sent(rank, i);
    dp_tensor send = numbers_on(ctx, scope, local_rank, a->dtype, (int64_t)sends, numbers);
    dp_tensor recv = numbers_on(ctx, scope, local_rank, a->dtype, (int64_t)gets, NULL);
    char *from = send.data, *to = recv.data;
    if (in_place && a->verb == DP_REDUCE_SCATTER) {
        to = from + own;
    } else if (in_place && a->verb == DP_ALL_GATHER) {
        dp_tensor part;
        CHECK_OK(dp_narrow(&recv, 0, rank * (int64_t)a->count, (int64_t)a->count, &part));
        CHECK_OK(dp_copy(ctx, &part, &send, NULL));
        from = to + own;
    } else if (in_place) {
        to = from;
    }
    dp_status status = a->verb == DP_ALL_REDUCE
                           ? dp_rank_all_reduce(ctx, from, to, a->count, a->dtype, a->op)
                       : a->verb == DP_BROADCAST
                           ? dp_rank_broadcast(ctx, to, a->count, a->dtype, a->root)
                       : a->verb == DP_ALL_GATHER
                           ? dp_rank_all_gather(ctx, from, to, a->count, a->dtype)
                           : dp_rank_reduce_scatter(ctx, from, to, a->count, a->dtype, a->op);
    DP_TRY(status);
    int64_t count = (int64_t)gets;
    dp_tensor result = dp_wrap(to, a->dtype, 1, &count);
    result.device = recv.device;
    read_numbers(ctx, scope, &result, got);
    for (size_t i = 0; i < gets; i++) {
        double want = received(a, takers, info.rank_count, rank, i);
        double slack = a->dtype == DP_BF16 ? 8e-3 : a->dtype == DP_F16 ? 1e-3 : 1e-6;
        if (!(fabs(got[i] - want) <= slack * fabs(want)))
            test_fail(__FILE__, __LINE__,
                      "verb %d, %s, op %d, count %zu, root %d: element %zu of rank %d of %d is %g, "
                      "wanted %g",
                      (int)a->verb, dp_dtype_name(a->dtype), (int)a->op, a->count, a->root, i, rank,
                      info.rank_count, got[i], want);
    }
    return DP_OK;
}

static const dp_verb verbs[] = {DP_ALL_REDUCE, DP_BROADCAST, DP_ALL_GATHER, DP_REDUCE_SCATTER};

/* All functions with all ops, dtypes and roots, for counts that fit. */
static dp_status ask_for_all(dp_ctx *ctx, dp_scope *scope, int local_rank, unsigned takers)
{
    static const size_t counts[] = {0, 1, 3, 7};
    int ranks = about(ctx).rank_count;
    for (int i = 0; i < 4 * 4 * 5 * (int)DP_DTYPE_COUNT; i++) {
        ask a = {.verb = verbs[i % 4],
                 .count = counts[i / 4 % 4],
                 .op = (dp_op)(i / 16 % 5),
                 .dtype = (dp_dtype)(i / 80),
                 .root = i / 80 % ranks,
                 .in_place = i / 16 % 2 != 0};
        bool moves = a.verb == DP_BROADCAST || a.verb == DP_ALL_GATHER;
        if (a.dtype == DP_BOOL || (moves && a.op != DP_OP_SUM))
            continue;
        dp_scope *own = dp_scope_child(scope);
        DP_TRY(ask_for(ctx, own, &a, local_rank, takers));
        dp_scope_end(own);
        if (i % 7 == 0)
            DP_TRY(dp_rank_barrier(ctx));
    }
    return DP_OK;
}

static dp_status ask_in_run(int local_rank, dp_scope *scope, void *user)
{
    return ask_for_all(user, scope, local_rank, UINT_MAX);
}

TEST_BACKENDS(each_function_on_devices)
{
    CHECK_OK(dp_run(ctx, scope, ask_in_run, ctx));
}

/* Of a table that puts off its work, and tells whose memory it is. */
TEST(each_function_on_devices_that_are_lazy)
{
    tree_run(tree_body_each_function_on_devices, lazy_device(toy_device()));
}

static int devices_each, rank_shards;

static dp_ctx *open_process(meeting *m)
{
    dp_config config = config_of(m, devices_each);
    dp_ctx *ctx = NULL;
    config.shards = rank_shards;
    if (meeting_machines == NULL)
        config.colls = NULL;
    CHECK_OK(dp_open(&config, &ctx));
    return ctx;
}

static void ask_in_process(meeting *m)
{
    dp_ctx *ctx = open_process(m);
    CHECK_OK(in_run(ctx, ask_in_run, ctx));
    if (about(ctx).rank_count == m->process_count) { /* no dp_run is needed */
        dp_scope *scope = dp_scope_begin(ctx);
        CHECK_OK(ask_for_all(ctx, scope, 0, UINT_MAX));
        dp_scope_end(scope);
    }
    dp_close(ctx);
}

TEST_SLOW(each_function_in_processes, 60)
{
    for (int processes = 1; processes <= 3; processes++)
        for (devices_each = 1; devices_each <= 3; devices_each++)
            in_processes(processes, ask_in_process);
    devices_each = 2;
    in_processes_on(toy_device(), 2, ask_in_process);
    on_machines("ab", ask_in_process);
}

TEST_SLOW(each_function_with_shards, 60)
{
    rank_shards = 8;
    for (int processes = 1; processes <= 2; processes++)
        for (devices_each = 1; devices_each <= 4; devices_each *= 2)
            in_processes(processes, ask_in_process);
}

/* In one process each rank calls, in another one a thread for all of them. */
static dp_status sum_of_ones(int local_rank, dp_scope *scope, void *user)
{
    float one = 1;
    (void)local_rank, (void)scope;
    DP_TRY(dp_rank_all_reduce(user, &one, &one, 1, DP_F32, DP_OP_SUM));
    DP_TRY(dp_rank_barrier(user));
    CHECK_F64(one, about(user).rank_count, 0);
    return DP_OK;
}

static void speak_for_all_or_not(meeting *m)
{
    float ones[RANKS] = {1, 1};
    dp_part parts[RANKS];
    dp_ctx *ctx = open_process(m);
    for (int i = 0; i < devices_each; i++)
        parts[i] = (dp_part){&ones[i], &ones[i], NULL};
    if (m->process == 0) {
        CHECK_OK(in_run(ctx, sum_of_ones, ctx));
    } else {
        CHECK_OK(dp_all_reduce(ctx, parts, 1, DP_F32, DP_OP_SUM));
        CHECK_OK(dp_barrier(ctx));
        CHECK_F64(ones[1], 4, 0);
    }
    dp_close(ctx);
}

TEST(ranks_meet_processes_whose_thread_calls_for_all)
{
    devices_each = 2;
    in_processes(2, speak_for_all_or_not);
}

/* ---- methods that dp_distributed runs -------------------------------------------------------- */

static unsigned takers_now; /* the ranks that count: a bit each */

/* dp_call_all_reduce with all ops and dtypes, in place and not, as tensors and not. */
static dp_status reduce_in_method(dp_call *call)
{
    dp_info info = about(call->ctx);
    int rank = info.rank_first + call->local_rank;
    for (int i = 0; i < 4 * 5 * (int)DP_BOOL; i++) {
        const ask a = {DP_ALL_REDUCE, (dp_dtype)(i / 20), (dp_op)(i / 4 % 5), 5, 0, i % 2 == 0};
        double numbers[5], got[5];
        for (size_t k = 0; k < 5; k++)
            numbers[k] = sent(rank, k);
        dp_scope *own = dp_scope_child(call->scope);
        dp_tensor send = numbers_on(call->ctx, own, call->local_rank, a.dtype, 5, numbers);
        dp_tensor recv =
            a.in_place ? send : numbers_on(call->ctx, own, call->local_rank, a.dtype, 5, NULL);
        DP_TRY(i % 4 < 2 ? dp_call_all_reduce(call, send.data, recv.data, 5, a.dtype, a.op)
                         : dp_call_all_reduce_tensor(call, &send, &recv, a.op));
        read_numbers(call->ctx, own, &recv, got);
        for (size_t k = 0; k < 5; k++) {
            double want = reduced(&a, takers_now, info.rank_count, k);
            CHECK_F64(got[k], want, fabs(want) * (dp_dtype_bytes(a.dtype) == 2 ? 8e-3 : 1e-6));
        }
        dp_scope_end(own);
    }
    return DP_OK;
}

static dp_status ask_in_method(dp_call *call)
{
    call->out = dp_none();
    DP_TRY(ask_for_all(call->ctx, call->scope, call->local_rank, takers_now));
    return reduce_in_method(call);
}

/* While gradients of others travel. */
static dp_status ask_in_backward(dp_call *call)
{
    dp_tensor grad = dp_grad_tensor(call, 0);
    DP_TRY(dp_fill(call->ctx, &grad, dp_int(1)));
    DP_TRY(dp_grad_ready(call, 0));
    dp_value none = call->out;
    DP_TRY(ask_in_method(call));
    call->out = none;
    return DP_OK;
}

static dp_module *module_with(dp_ctx *ctx, int local_rank, dp_status (*there)(dp_call *call),
                              dp_status (*back)(dp_call *call), dp_module *child)
{
    const dp_method methods[] = {{"forward", there}, {"backward", back}};
    static const dp_param_config param = {.name = "w"};
    dp_module *module = NULL;
    CHECK_OK(dp_module_create(ctx,
                              &(dp_module_config){.name = "net",
                                                  .methods = methods,
                                                  .method_count = back != NULL ? 2 : 1,
                                                  .params = &param,
                                                  .param_count = 1,
                                                  .children = child != NULL ? &child : NULL,
                                                  .child_count = child != NULL ? 1 : 0,
                                                  .local_rank = local_rank},
                              &module));
    return module;
}

static dp_module *everywhere(dp_module *module)
{
    dp_module *par = NULL;
    CHECK_OK(dp_distributed(module, &(dp_distributed_config){.reduction = DP_SUM_RANKS}, &par));
    return par;
}

static dp_status forward_of(dp_module *par, dp_scope *scope, int64_t rows, dp_pass **out_pass)
{
    static const float x[MOST];
    dp_value out;
    dp_tensor batch = dp_wrap_const(x, DP_F32, 1, &rows);
    return dp_invoke(par, scope, "forward", DP_TUPLE_OF(scope, dp_of(scope, &batch)), dp_none(),
                     NULL, &out, out_pass);
}

/* A forward and its backward. */
static void pass_of(dp_module *par, int64_t rows, unsigned takers)
{
    dp_scope *scope = dp_scope_begin(dp_module_ctx(par));
    dp_pass *pass = NULL;
    takers_now = takers;
    CHECK_OK(forward_of(par, scope, rows, &pass));
    CHECK_OK(dp_backward(pass, dp_none(), NULL));
    CHECK_OK(dp_zero_grad(par));
    dp_scope_end(scope);
}

TEST_BACKENDS(methods_of_those_ranks_that_have_a_replica)
{
    dp_module *par = everywhere(module_with(ctx, 0, ask_in_method, ask_in_backward, NULL));
    pass_of(par, 8, 0xff);
    pass_of(par, 5, 0x1f);
    pass_of(par, 1, 0x01);
}

TEST(methods_on_devices_that_are_lazy)
{
    tree_run(tree_body_methods_of_those_ranks_that_have_a_replica, lazy_device(toy_device()));
}

static dp_status ask_a_child(dp_call *call)
{
    return dp_call_child(call, "net", "forward", call->args, dp_none(), &call->out,
                         (dp_pass **)&call->saved);
}

static dp_status back_to_the_child(dp_call *call)
{
    dp_tensor grad = dp_grad_tensor(call, 0);
    DP_TRY(dp_fill(call->ctx, &grad, dp_int(1)));
    return dp_backward(call->saved, dp_none(), NULL);
}

/* Its replica's rank calls, whichever of its methods it is in. */
TEST_BACKENDS(children_call_for_the_rank_of_their_replica)
{
    dp_module *child = module_with(ctx, 0, ask_in_method, ask_in_backward, NULL);
    dp_module *par = everywhere(module_with(ctx, 0, ask_a_child, back_to_the_child, child));
    pass_of(par, 8, 0xff);
    pass_of(par, 2, 0x03);
    pass_of(par, 1, 0x01);
}

/* Which rows each process has, and so which ranks have a replica. Without shards, a process without
   rows has a replica, which counts. */
static void methods_in_process(meeting *m)
{
    static const struct {
        int64_t rows[3];
        unsigned takers[3]; /* with 1, 2, 3 devices each */
    } table[] = {
        {{3, 3, 3}, {07, 077, 0777}}, {{2, 1, 3}, {07, 067, 0713}}, {{1, 1, 0}, {07, 025, 0111}}};
    dp_ctx *ctx = open_process(m);
    unsigned here = (1u << m->process_count * devices_each) - 1;
    dp_module *par = everywhere(module_with(ctx, 0, ask_in_method, ask_in_backward, NULL));
    for (size_t i = 0; i < sizeof table / sizeof table[0]; i++)
        pass_of(par, table[i].rows[m->process], table[i].takers[devices_each - 1] & here);
    dp_close(ctx);
}

TEST_SLOW(methods_in_processes, 120)
{
    for (int processes = 1; processes <= 3; processes++)
        for (devices_each = 1; devices_each <= 3 && processes * devices_each <= 6; devices_each++)
            in_processes(processes, methods_in_process);
    devices_each = 2;
    in_processes_on(toy_device(), 2, methods_in_process);
}

#if defined(TEST_SIM)
TEST_SLOW(gpus_of_processes_cuda, 120)
{
    devices_each = 2;
    on_gpus("22", ask_in_process);
    on_gpus("22", methods_in_process);
    devices_each = 1;
    on_gpus("21", ask_in_process);
    on_gpus("111", methods_in_process);
}
#endif

/* ---- where modules are the ranks' own -------------------------------------------------------- */

static dp_status sum_in_method(dp_call *call)
{
    float one = 1, sum = 0;
    dp_tensor got;
    call->out = dp_none();
    DP_TRY(dp_tensor_from(call->scope, call->device, &one, DP_F32, DP_SHAPE(1), &got));
    DP_TRY(dp_rank_all_reduce(call->ctx, got.data, got.data, 1, DP_F32, DP_OP_SUM));
    DP_TRY(dp_read(call->ctx, &got, &sum, sizeof sum));
    CHECK_F64(sum, about(call->ctx).rank_count, 0);
    DP_TRY(dp_fill(call->ctx, &got, dp_int(1)));
    DP_TRY(dp_call_all_reduce(call, got.data, got.data, 1, DP_F32, DP_OP_SUM));
    DP_TRY(dp_read(call->ctx, &got, &sum, sizeof sum));
    CHECK_F64(sum, 1, 0); /* its pass has no other replica */
    return DP_OK;
}

typedef struct owners {
    dp_module *of[RANKS];
} owners;

static dp_status run_own_module(int local_rank, dp_scope *scope, void *user)
{
    dp_value out;
    owners *all = user;
    return dp_invoke(all->of[local_rank], scope, "forward", dp_none(), dp_none(), NULL, &out, NULL);
}

/* A module of a rank's own, in its function: its methods call for that rank. */
TEST_BACKENDS(methods_of_modules_that_a_rank_runs)
{
    owners all;
    for (int i = 0; i < TREE_DEVICES; i++)
        all.of[i] = module_with(ctx, i, sum_in_method, NULL, NULL);
    CHECK_OK(dp_run(ctx, scope, run_own_module, &all));
}

/* ---- one that does not come as the others do ------------------------------------------------- */

enum { THREE = 3 };

typedef enum oddity {
    RETURNS,
    FAILS,
    ANOTHER_COUNT,
    ANOTHER_DTYPE,
    ANOTHER_OP,
    ANOTHER_VERB,
    A_BARRIER,
    ANOTHER_ROOT,
    ODDITIES
} oddity;

static const struct {
    dp_status status;
    const char *says; /* to the others; # is the odd one */
} odd_ends[ODDITIES] = {
    [RETURNS] = {DP_ERR_MISMATCH, "local rank # returned without calling it"},
    [FAILS] = {DP_ERR_USER, "local rank # failed"},
    [ANOTHER_COUNT] = {DP_ERR_MISMATCH, "local rank # for all_reduce of 3 f32 (sum)"},
    [ANOTHER_DTYPE] = {DP_ERR_MISMATCH, "local rank # for all_reduce of 4 i32 (sum)"},
    [ANOTHER_OP] = {DP_ERR_MISMATCH, "local rank # for all_reduce of 4 f32 (mean)"},
    [ANOTHER_VERB] = {DP_ERR_MISMATCH, "local rank # for reduce_scatter of 4 f32 (sum)"},
    [A_BARRIER] = {DP_ERR_MISMATCH, "local rank # for a barrier"},
    [ANOTHER_ROOT] = {DP_ERR_MISMATCH, "local rank # for broadcast of 4 f32 (root 2)"}};

typedef struct scene {
    dp_ctx *ctx;
    oddity how;
    int odd;
    bool late;        /* it comes, or goes, when the others wait */
    atomic_int about; /* those that are about to call */
    atomic_int told;  /* those whose call has returned */
    dp_status status[THREE];
    char text[THREE][400];
} scene;

static dp_status be_odd(const scene *s, float *data, float *more)
{
    switch (s->how) {
    case RETURNS:
        return DP_OK;
    case FAILS:
        return dp_error(DP_ERR_USER, "the odd one");
    case ANOTHER_COUNT:
        return dp_rank_all_reduce(s->ctx, data, data, 3, DP_F32, DP_OP_SUM);
    case ANOTHER_DTYPE:
        return dp_rank_all_reduce(s->ctx, data, data, 4, DP_I32, DP_OP_SUM);
    case ANOTHER_OP:
        return dp_rank_all_reduce(s->ctx, data, data, 4, DP_F32, DP_OP_MEAN);
    case ANOTHER_VERB:
        return dp_rank_reduce_scatter(s->ctx, more, data, 4, DP_F32, DP_OP_SUM);
    case A_BARRIER:
        return dp_rank_barrier(s->ctx);
    case ANOTHER_ROOT:
    case ODDITIES:
        break;
    }
    return dp_rank_broadcast(s->ctx, data, 4, DP_F32, 2);
}

static dp_status be_like_others(const scene *s, float *data)
{
    return s->how == ANOTHER_ROOT ? dp_rank_broadcast(s->ctx, data, 4, DP_F32, 1)
                                  : dp_rank_all_reduce(s->ctx, data, data, 4, DP_F32, DP_OP_SUM);
}

static dp_status play(int local_rank, dp_scope *scope, void *user)
{
    scene *s = user;
    float data[4] = {1, 1, 1, 1}, more[12] = {0};
    dp_status status;
    (void)scope;
    if (local_rank == s->odd) {
        while (s->late && atomic_load(&s->about) + 1 < THREE)
            rest(1);
        rest(s->late ? 5 : 0);
        status = be_odd(s, data, more);
    } else {
        atomic_fetch_add(&s->about, 1);
        status = be_like_others(s, data);
    }
    s->status[local_rank] = status;
    snprintf(s->text[local_rank], sizeof s->text[0], "%s", dp_last_error());
    if (local_rank != s->odd || s->how > FAILS) /* nobody meets any more */
        CHECK_STATUS(be_like_others(s, data), status);
    atomic_fetch_add(&s->told, 1);
    while (s->how > FAILS && atomic_load(&s->told) < THREE) /* nor waits until others return */
        rest(1);
    return status;
}

/* Who comes last may be any: then it is said of that one what it asks for. */
static void check_odd(const scene *s)
{
    char want[120], digit[2] = {(char)('0' + s->odd), '\0'};
    const char *says = odd_ends[s->how].says, *mark = strchr(says, '#');
    const char *what = strstr(says, " for ") != NULL ? strstr(says, " for ") + 5 : NULL;
    snprintf(want, sizeof want, "%.*s%s%s", (int)(mark - says), says, digit, mark + 1);
    for (int r = 0; r < THREE; r++) {
        if (r == s->odd && s->how <= FAILS)
            continue;
        CHECK_INT(s->status[r], odd_ends[s->how].status);
        CHECK_SAYS(s->text[r], what != NULL ? what : want);
        CHECK(s->late || strncmp(s->text[r], "dp_rank_", 8) == 0);
        if (what != NULL && s->late)
            CHECK_SAYS(s->text[r], want);
    }
}

TEST_SLOW(who_is_odd_is_named, 60)
{
    dp_ctx *ctx = open_cpus(THREE);
    char want[64];
    for (int i = 0; i < ODDITIES * THREE * 2; i++) {
        scene s = {.ctx = ctx,
                   .how = (oddity)(i % ODDITIES),
                   .odd = i / ODDITIES % THREE,
                   .late = i / ODDITIES / THREE == 1};
        CHECK_STATUS(in_run(ctx, play, &s), odd_ends[s.how].status);
        check_odd(&s);
        snprintf(want, sizeof want, "dp_run: local rank %d: the odd one", s.odd);
        if (s.how == FAILS) /* not what it did to the others */
            CHECK_STR(dp_last_error(), want);
        CHECK_OK(in_run(ctx, sum_of_ones, ctx)); /* all is well again */
    }
    dp_close(ctx);
}

/* ---- between rounds -------------------------------------------------------------------------- */

static atomic_int rounds_done[THREE];
static int rounds_of[THREE];

static dp_status come_so_often(int local_rank, dp_scope *scope, void *user)
{
    float sum = 0;
    dp_tensor one;
    DP_TRY(dp_tensor_new(scope, dp_local_device(user, local_rank), DP_F32, 0, NULL, &one));
    for (int i = 0; i < rounds_of[local_rank]; i++) {
        DP_TRY(dp_fill(user, &one, dp_int(1)));
        DP_TRY(dp_rank_all_reduce(user, one.data, one.data, 1, DP_F32, DP_OP_SUM));
        DP_TRY(dp_read(user, &one, &sum, sizeof sum));
        CHECK_F64(sum, THREE, 0);
        atomic_store(&rounds_done[local_rank], i + 1);
    }
    return DP_OK;
}

/* Up to the round that one did not come to, all have met; then nobody. */
TEST(one_leaves_between_two_rounds)
{
    dp_ctx *ctx = open_cpus(THREE);
    for (int i = 0; i < 300; i++) {
        for (int r = 0; r < THREE; r++)
            rounds_of[r] = i % 5 + (r == i % THREE ? 0 : 1);
        for (int r = 0; r < THREE; r++)
            atomic_store(&rounds_done[r], 0);
        CHECK_ERROR(in_run(ctx, come_so_often, ctx), DP_ERR_MISMATCH,
                    "returned without calling it");
        for (int r = 0; r < THREE; r++)
            CHECK_INT(atomic_load(&rounds_done[r]), i % 5);
    }
    dp_close(ctx);
}

static dp_status sum_of_replicas(dp_call *call)
{
    float sum = 1;
    dp_tensor one;
    call->out = dp_none();
    DP_TRY(dp_tensor_from(call->scope, call->device, &sum, DP_F32, 0, NULL, &one));
    DP_TRY(dp_call_all_reduce_tensor(call, &one, &one, DP_OP_SUM));
    DP_TRY(dp_read(call->ctx, &one, &sum, sizeof sum));
    CHECK_F64(sum, call->replica_count, 0);
    return DP_OK;
}

/* Runs of all ranks, and passes of some replicas, take turns; so do those of one thread. */
TEST(passes_and_runs_take_turns)
{
    const dp_device_ops *const toys[] = {toy_device(), NULL};
    const dp_parallel_config some = {.local_ranks = (const int[]){0, 2}, .local_rank_count = 2},
                             one_thread = {.local_ranks = (const int[]){0, 0},
                                           .local_rank_count = 2};
    dp_module *par, *near, *all;
    dp_ctx *ctx;
    CHECK_OK(dp_open(&(dp_config){.backends = toys, .device_count = THREE}, &ctx));
    CHECK_OK(dp_data_parallel(module_with(ctx, 0, sum_of_replicas, NULL, NULL), &some, &par));
    CHECK_OK(dp_data_parallel(module_with(ctx, 0, give_none, NULL, NULL), &one_thread, &near));
    all = everywhere(module_with(ctx, 0, sum_of_replicas, NULL, NULL));
    for (int i = 0; i < 200; i++) {
        dp_scope *scope = dp_scope_begin(ctx);
        rounds_of[0] = rounds_of[1] = rounds_of[2] = i % 4;
        CHECK_OK(dp_run(ctx, scope, come_so_often, ctx));
        if (i % 3 == 0)
            CHECK_OK(forward_of(par, scope, 2, NULL));
        if (i % 5 == 0)
            CHECK_OK(forward_of(all, scope, 1, NULL));
        if (i % 7 == 0)
            CHECK_OK(forward_of(near, scope, 2, NULL));
        dp_scope_end(scope);
    }
    rounds_of[1] = 9;
    CHECK_ERROR(in_run(ctx, come_so_often, ctx), DP_ERR_MISMATCH, "returned without calling it");
    dp_close(ctx);
}

/* ---- one that does not come at all ----------------------------------------------------------- */

enum { SHORT_MS = 300 };

typedef struct absence {
    dp_ctx *ctx;
    int missing;     /* this local rank, and those behind it, do not come */
    bool aborts;     /* the first of them ends the job */
    atomic_int told; /* ranks that wait for them no longer */
    dp_status status[RANKS];
    char text[RANKS][256];
} absence;

/* Those that are missing go when all others have been told. */
static dp_status stay_away(int local_rank, absence *a)
{
    if (a->aborts && local_rank == a->missing) {
        rest(20);
        dp_abort(a->ctx, DP_ERR_ABORTED, "no more of this");
    }
    while (atomic_load(&a->told) < a->missing)
        rest(1);
    float one = 1;
    return dp_rank_all_reduce(a->ctx, &one, &one, 1, DP_F32, DP_OP_SUM);
}

static dp_status wait_in_vain(int local_rank, dp_scope *scope, void *user)
{
    absence *a = user;
    float one = 1;
    (void)scope;
    if (local_rank >= a->missing)
        return stay_away(local_rank, a);
    dp_status status = dp_rank_all_reduce(a->ctx, &one, &one, 1, DP_F32, DP_OP_SUM);
    a->status[local_rank] = status;
    snprintf(a->text[local_rank], sizeof a->text[0], "%s", dp_last_error());
    atomic_fetch_add(&a->told, 1);
    return status;
}

static void check_absence(int devices, int missing, bool aborts, const char *says)
{
    dp_ctx *ctx;
    dp_failure_info failure;
    dp_status want = aborts ? DP_ERR_ABORTED : DP_ERR_TIMEOUT;
    int timeout_ms = aborts ? 60000 : SHORT_MS;
    CHECK_OK(dp_open(&(dp_config){.device_count = devices, .timeout_ms = timeout_ms}, &ctx));
    absence a = {.ctx = ctx, .missing = missing, .aborts = aborts};
    double start = now_ms();
    CHECK_STATUS(in_run(ctx, wait_in_vain, &a), want);
    double spent = now_ms() - start;
    CHECK(spent < 2000 * test_timeout_scale() && (aborts || spent >= SHORT_MS));
    for (int r = 0; r < missing; r++) {
        CHECK_INT(a.status[r], want);
        CHECK_SAYS(a.text[r], says);
    }
    CHECK(dp_failure(ctx, &failure));
    CHECK_INT(failure.status, want);
    CHECK_SAYS(failure.text, aborts ? "no more of this" : says);
    CHECK_STATUS(in_run(ctx, sum_of_ones, ctx), want);
    dp_close(ctx);
}

TEST(who_does_not_come_in_time_is_named)
{
    check_absence(3, 2, false, "dp_rank_all_reduce: local rank 2 did not come within 300 ms");
    check_absence(4, 1, false, "local rank 1 and 2 more did not come within 300 ms");
}

/* The time-out is a minute. */
TEST(who_waits_hears_of_a_failure_of_the_job)
{
    check_absence(3, 2, true, "dp_rank_all_reduce: the job failed: no more of this");
    check_absence(3, 1, true, "no more of this");
}

/* For longer than the time-out, while local rank 0 waits. */
static dp_status second_stops_all(int local_rank, dp_scope *scope, void *user)
{
    if (local_rank == 1) {
        rest(20);
        raise(SIGSTOP);
        rest(20);
    }
    return sum_of_ones(local_rank, scope, user);
}

static void stop_in_a_run(void)
{
    dp_ctx *ctx;
    CHECK_OK(dp_open(&(dp_config){.device_count = 2, .timeout_ms = SHORT_MS}, &ctx));
    CHECK_OK(in_run(ctx, second_stops_all, ctx));
    dp_close(ctx);
    _exit(EXIT_SUCCESS);
}

/* The one that waited was stopped, too. */
TEST(process_that_was_stopped_has_all_its_time)
{
    int how = 0;
    pid_t child = fork();
    if (child == 0)
        stop_in_a_run();
    CHECK_INT(waitpid(child, &how, WUNTRACED), child);
    CHECK(WIFSTOPPED(how));
    rest(2 * SHORT_MS);
    CHECK_INT(kill(child, SIGCONT), 0);
    CHECK_INT(waitpid(child, &how, 0), child);
    CHECK(WIFEXITED(how) && WEXITSTATUS(how) == EXIT_SUCCESS);
}

static absence *pass_absence;

static dp_status wait_in_method(dp_call *call)
{
    call->out = dp_none();
    if (call->replica > 0) {
        while (atomic_load(&pass_absence->told) < 1)
            rest(1);
        return DP_OK;
    }
    float one = 1;
    dp_status status = dp_call_all_reduce(call, &one, &one, 1, DP_F32, DP_OP_SUM);
    atomic_fetch_add(&pass_absence->told, 1);
    return status;
}

TEST(replica_that_does_not_come_in_time_is_named)
{
    dp_ctx *ctx;
    absence a = {.missing = 1};
    pass_absence = &a;
    CHECK_OK(dp_open(&(dp_config){.device_count = 2, .timeout_ms = SHORT_MS}, &ctx));
    dp_scope *scope = dp_scope_begin(ctx);
    dp_module *par;
    CHECK_OK(dp_data_parallel(module_with(ctx, 0, wait_in_method, NULL, NULL), NULL, &par));
    CHECK_ERROR(forward_of(par, scope, 2, NULL), DP_ERR_TIMEOUT,
                "replica 1 did not come within 300 ms");
    dp_close(ctx);
}

/* Time runs while one does not come, not while the last to come does the work. */
static atomic_int slow_sums;

static struct {
    dp_coll_ops ops;
    const dp_coll_ops *inner;
} slow;

static dp_status slow_run(dp_comm *comm, const dp_coll_call *call)
{
    atomic_fetch_add(&slow_sums, 1);
    rest(2 * SHORT_MS);
    return slow.inner->run(comm, call);
}

static dp_status slow_open(const dp_host *host, const dp_comm_config *config, dp_comm **out)
{
    DP_TRY(slow.inner->open(host, config, out));
    (*out)->ops = &slow.ops;
    return DP_OK;
}

TEST(work_may_take_longer_than_the_time_to_come)
{
    const dp_coll_ops *const colls[] = {&slow.ops, NULL};
    dp_ctx *ctx;
    slow.inner = dp_cpu_coll();
    slow.ops = *slow.inner;
    slow.ops.open = slow_open;
    slow.ops.run = slow_run;
    CHECK_OK(
        dp_open(&(dp_config){.colls = colls, .device_count = 2, .timeout_ms = SHORT_MS}, &ctx));
    CHECK_OK(in_run(ctx, sum_of_ones, ctx));
    CHECK_INT(atomic_load(&slow_sums), 1); /* a barrier of one process is the meeting alone */
    dp_close(ctx);
}

/* Who was in a round is told how that one went, though others are gone already. */
static dp_status failing_run(dp_comm *comm, const dp_coll_call *call)
{
    (void)comm, (void)call;
    return dp_error(DP_ERR_NO_MEMORY, "not this time");
}

static dp_status fail_together(int local_rank, dp_scope *scope, void *user)
{
    float one = 1;
    (void)local_rank, (void)scope;
    dp_status status = dp_rank_all_reduce(user, &one, &one, 1, DP_F32, DP_OP_SUM);
    CHECK_STATUS(status, DP_ERR_NO_MEMORY);
    CHECK_STR(dp_last_error(), "dp_rank_all_reduce: not this time");
    return status;
}

TEST_SLOW(all_of_a_round_are_told_how_it_went, 60)
{
    const dp_coll_ops *const colls[] = {&slow.ops, NULL};
    dp_ctx *ctx;
    slow.inner = dp_cpu_coll();
    slow.ops = *slow.inner;
    slow.ops.open = slow_open;
    slow.ops.run = failing_run;
    CHECK_OK(dp_open(&(dp_config){.colls = colls, .device_count = THREE}, &ctx));
    for (int i = 0; i < 2000 / test_timeout_scale(); i++)
        CHECK_ERROR(in_run(ctx, fail_together, ctx), DP_ERR_NO_MEMORY, "not this time");
    dp_close(ctx);
}

/* In a job of several processes, whoever is first names who does not come. */
static dp_status second_stays_away(int local_rank, dp_scope *scope, void *user)
{
    float one = 1;
    dp_ctx *ctx = user;
    (void)scope;
    while (about(ctx).process == 1 && local_rank == 1 && !dp_failure(ctx, NULL))
        rest(1);
    return dp_rank_all_reduce(ctx, &one, &one, 1, DP_F32, DP_OP_SUM);
}

static void one_of_a_process_is_missing(meeting *m)
{
    dp_config config = config_of(m, 2);
    dp_ctx *ctx;
    dp_failure_info failure;
    config.colls = NULL;
    config.timeout_ms = TIMEOUT_MS;
    CHECK_OK(dp_open(&config, &ctx));
    dp_status status = in_run(ctx, second_stays_away, ctx);
    CHECK_INT(dp_status_class(status), DP_CLASS_JOB);
    CHECK(dp_failure(ctx, &failure));
    CHECK_SAYS(failure.text, "did not come within 2000 ms");
    CHECK(strstr(failure.text, "ranks 2 to 3 (process 1, pid ") != NULL ||
          strstr(failure.text, "local rank 1 did not") != NULL);
    wait_for_all(m);
    dp_close(ctx);
}

TEST(who_does_not_come_is_named_in_all_processes)
{
    in_processes(2, one_of_a_process_is_missing);
}

/* One rank of a process waits for the other, which ends both. */
static dp_status die_in_the_second(int local_rank, dp_scope *scope, void *user)
{
    dp_ctx *ctx = user;
    DP_TRY(sum_of_ones(local_rank, scope, ctx));
    if (about(ctx).process == 1 && local_rank == 1) {
        rest(20);
        raise(SIGKILL);
    }
    return sum_of_ones(local_rank, scope, ctx);
}

static void one_of_a_process_dies(meeting *m)
{
    devices_each = 2;
    dp_ctx *ctx = open_process(m);
    double start = now_ms();
    CHECK_INT(dp_status_class(in_run(ctx, die_in_the_second, ctx)), DP_CLASS_JOB);
    CHECK(now_ms() - start < SOON_MS * test_timeout_scale());
    CHECK_SAYS(dp_last_error(), "ranks 2 to 3 (process 1, pid ");
    CHECK_SAYS(dp_last_error(), "all_reduce of 1 f32 (sum), in dp_rank_all_reduce");
    dp_close(ctx);
}

TEST(process_that_dies_is_named)
{
    in_processes_but(2, 1, one_of_a_process_dies);
}

/* What fails here is not known elsewhere, unless it is said. */
static dp_status fail_in_the_second(int local_rank, dp_scope *scope, void *user)
{
    float one = 1;
    dp_ctx *ctx = user;
    (void)scope;
    if (about(ctx).process == 1 && local_rank == 0)
        return dp_error(DP_ERR_USER, "out of data");
    return dp_rank_all_reduce(ctx, &one, &one, 1, DP_F32, DP_OP_SUM);
}

static void one_of_a_process_fails(meeting *m)
{
    devices_each = 2;
    dp_ctx *ctx = open_process(m);
    dp_status status = in_run(ctx, fail_in_the_second, ctx);
    if (m->process == 1) {
        CHECK_STATUS(status, DP_ERR_USER);
        CHECK_STR(dp_last_error(), "dp_run: local rank 0: out of data");
        dp_abort(ctx, DP_ERR_ABORTED, "%s", dp_last_error());
    } else {
        CHECK_INT(status, DP_ERR_ABORTED);
        CHECK_SAYS(dp_last_error(), "(process 1, pid ");
        CHECK_SAYS(dp_last_error(), "out of data");
    }
    wait_for_all(m);
    dp_close(ctx);
}

TEST(what_fails_in_one_process_is_told_by_dp_abort)
{
    in_processes(2, one_of_a_process_fails);
}

static dp_status differ_between_processes(int local_rank, dp_scope *scope, void *user)
{
    float four[4] = {0};
    dp_ctx *ctx = user;
    (void)local_rank, (void)scope;
    return dp_rank_broadcast(ctx, four, 4, DP_F32, about(ctx).process);
}

static void processes_differ(meeting *m)
{
    devices_each = 2;
    dp_ctx *ctx = open_process(m);
    CHECK_ERROR(in_run(ctx, differ_between_processes, ctx), DP_ERR_REMOTE,
                "all must make the same calls in the same order");
    CHECK_SAYS(dp_last_error(), "broadcast of 4 f32 (root 1), in dp_rank_broadcast");
    wait_for_all(m);
    dp_close(ctx);
}

TEST(processes_that_ask_for_different_things_are_told_so)
{
    in_processes(2, processes_differ);
}

/* ---- who may call ---------------------------------------------------------------------------- */

static void refused(dp_ctx *ctx, dp_status status, const char *says)
{
    static float room[MOST];
    CHECK_ERROR(dp_rank_all_reduce(ctx, room, room, 1, DP_F32, DP_OP_SUM), status, says);
    CHECK_ERROR(dp_rank_broadcast(ctx, room, 1, DP_F32, 0), status, says);
    CHECK_ERROR(dp_rank_all_gather(ctx, room, room + 1, 1, DP_F32), status, says);
    CHECK_ERROR(dp_rank_reduce_scatter(ctx, room + 32, room, 1, DP_F32, DP_OP_SUM), status, says);
    CHECK_ERROR(dp_rank_barrier(ctx), status, says);
}

#define NO_RANK "what calls this is none of them: call it in a function under dp_run"

static dp_status refused_in_method(dp_call *call)
{
    call->out = dp_none();
    refused(call->ctx, DP_ERR_STATE, NO_RANK);
    return DP_OK;
}

static dp_status unsupported_in_method(dp_call *call)
{
    call->out = dp_none();
    refused(call->ctx, DP_ERR_UNSUPPORTED, "dp_call_all_reduce goes over its replicas");
    return DP_OK;
}

static dp_status unsupported_in_child(dp_call *call)
{
    return dp_call_child(call, "net", "forward", dp_none(), dp_none(), &call->out, NULL);
}

static void refused_in_deferred(void *user)
{
    refused(user, DP_ERR_STATE, NO_RANK);
}

static dp_status defer_in_run(int local_rank, dp_scope *scope, void *user)
{
    (void)local_rank;
    return dp_scope_defer(scope, refused_in_deferred, user);
}

static dp_status refused_in_hook(const dp_bucket *bucket, void *user)
{
    refused(user, DP_ERR_STATE, "the hook of");
    return plain_hook(bucket, NULL);
}

static void *refused_in_thread(void *user)
{
    refused(user, DP_ERR_STATE, NO_RANK);
    return NULL;
}

static dp_status start_thread_in_run(int local_rank, dp_scope *scope, void *user)
{
    pthread_t thread;
    (void)local_rank, (void)scope;
    CHECK_INT(pthread_create(&thread, NULL, refused_in_thread, user), 0);
    CHECK_INT(pthread_join(thread, NULL), 0);
    return DP_OK;
}

TEST(only_ranks_may_call)
{
    dp_ctx *ctx = open_cpus(2);
    dp_scope *scope = dp_scope_begin(ctx);
    dp_module *plain = module_with(ctx, 0, refused_in_method, NULL, NULL), *par;
    refused(ctx, DP_ERR_STATE, "dp_rank_");
    refused(ctx, DP_ERR_STATE, "this process has 2 local ranks, and " NO_RANK);
    CHECK_OK(forward_of(plain, scope, 1, NULL));
    CHECK_OK(dp_data_parallel(module_with(ctx, 0, unsupported_in_method, NULL, NULL), NULL, &par));
    CHECK_OK(forward_of(par, scope, 2, NULL));
    CHECK_OK(forward_of(par, scope, 1, NULL));
    plain = module_with(ctx, 0, unsupported_in_child, NULL,
                        module_with(ctx, 0, unsupported_in_method, NULL, NULL));
    CHECK_OK(dp_data_parallel(plain, NULL, &par));
    CHECK_OK(forward_of(par, scope, 2, NULL));
    CHECK_OK(dp_scope_defer(scope, refused_in_deferred, ctx));
    dp_scope_end(scope);
    CHECK_OK(in_run(ctx, defer_in_run, ctx));
    CHECK_OK(in_run(ctx, start_thread_in_run, ctx));
    refused(NULL, DP_ERR_INVALID, "ctx is NULL");
    dp_close(ctx);
    refused(ctx, DP_ERR_STATE, "closed");
}

static void check_hook(int devices)
{
    grads g;
    dp_ctx *ctx = open_here(devices);
    grads_begin(&g, ctx, 100);
    grads_create(&g, (dp_reducer_config){.reduction = DP_SUM_RANKS,
                                         .buckets = {.hook = refused_in_hook, .hook_user = ctx}});
    CHECK_OK(dp_reducer_begin(g.reducer, NULL));
    grads_add(&g, 1);
    report(&g, 0);
    CHECK_OK(dp_reducer_finish(g.reducer));
    grads_end(&g);
}

TEST(hooks_may_not_call)
{
    check_hook(1);
    check_hook(2);
}

/* ---- a process of one rank ------------------------------------------------------------------- */

static dp_status ask_where_it_is(dp_call *call)
{
    call->out = dp_none();
    return ask_for_all(call->ctx, call->scope, 0, UINT_MAX);
}

static void ask_in_deferred(void *user)
{
    CHECK_OK(sum_of_ones(0, NULL, user));
}

static dp_status ask_in_deferred_of_run(int local_rank, dp_scope *scope, void *user)
{
    dp_scope *own = dp_scope_child(scope);
    (void)local_rank;
    DP_TRY(dp_scope_defer(own, ask_in_deferred, user));
    dp_scope_end(own);
    return DP_OK;
}

static void one_rank_anywhere(meeting *m)
{
    devices_each = 1;
    dp_ctx *ctx = open_process(m);
    dp_scope *scope = dp_scope_begin(ctx);
    dp_module *net = module_with(ctx, 0, ask_where_it_is, NULL, NULL), *par;
    CHECK_OK(ask_for_all(ctx, scope, 0, UINT_MAX));
    CHECK_OK(forward_of(net, scope, 1, NULL));
    CHECK_OK(dp_data_parallel(net, NULL, &par));
    CHECK_OK(forward_of(par, scope, 1, NULL));
    CHECK_OK(dp_scope_defer(scope, ask_in_deferred, ctx));
    dp_scope_end(scope);
    CHECK_OK(in_run(ctx, ask_in_run, ctx));
    CHECK_OK(in_run(ctx, ask_in_deferred_of_run, ctx));
    dp_close(ctx);
}

TEST(a_process_of_one_rank_calls_anywhere)
{
    in_processes(1, one_rank_anywhere);
    in_processes(2, one_rank_anywhere);
}

/* What a rank ends in its function is its own. */
TEST(functions_that_a_rank_has_deferred_call_for_it)
{
    dp_ctx *ctx = open_cpus(THREE);
    CHECK_OK(in_run(ctx, ask_in_deferred_of_run, ctx));
    dp_close(ctx);
}

/* ---- calls that are wrong -------------------------------------------------------------------- */

static dp_status correct_oneself(int local_rank, dp_scope *scope, void *user)
{
    dp_ctx *ctx = user;
    float own[8] = {1, 1, 1, 1, 1, 1, 1, 1}, recv[8];
    const size_t many = SIZE_MAX / 4;
    (void)scope;
    if (local_rank == 1) { /* the others wait for it */
        dp_status bad = DP_ERR_INVALID;
        CHECK_ERROR(dp_rank_all_reduce(ctx, NULL, own, 1, DP_F32, DP_OP_SUM), bad, "send is NULL");
        CHECK_ERROR(dp_rank_all_reduce(ctx, own, NULL, 1, DP_F32, DP_OP_SUM), bad, "recv is NULL");
        CHECK_ERROR(dp_rank_all_reduce(ctx, own, own, 1, (dp_dtype)77, DP_OP_SUM), bad, "77");
        CHECK_ERROR(dp_rank_all_reduce(ctx, own, own, 1, DP_F32, (dp_op)77), bad,
                    "77 is not a dp_op");
        CHECK_ERROR(dp_rank_all_reduce(ctx, own, own, many, DP_F32, DP_OP_SUM), bad,
                    "more elements than can be counted");
        CHECK_ERROR(dp_rank_all_reduce(ctx, own, own + 1, 4, DP_F32, DP_OP_SUM), bad,
                    "send and recv overlap, but are not in place");
        CHECK_ERROR(dp_rank_all_gather(ctx, own, own, 2, DP_F32), bad, "overlap");
        CHECK_ERROR(dp_rank_all_gather(ctx, own, recv, many / 2, DP_F32), bad, "counted");
        CHECK_ERROR(dp_rank_reduce_scatter(ctx, own, own, 2, DP_F32, DP_OP_SUM), bad, "overlap");
        CHECK_ERROR(dp_rank_reduce_scatter(ctx, own, recv, 2, DP_F32, (dp_op)-1), bad, "dp_op");
        CHECK_ERROR(dp_rank_broadcast(ctx, NULL, 2, DP_F32, 0), bad, "send is NULL");
        CHECK_ERROR(dp_rank_broadcast(ctx, own, 2, DP_F32, 3), bad, "root 3, there are 3 ranks");
        CHECK_ERROR(dp_rank_broadcast(ctx, own, 2, DP_F32, -1), bad, "root -1");
    }
    DP_TRY(dp_rank_all_gather(ctx, own + 2 * local_rank, own, 2, DP_F32));
    return dp_rank_all_reduce(ctx, own, own, 8, DP_F32, DP_OP_SUM);
}

static dp_status correct_in_method(dp_call *call)
{
    call->out = dp_none();
    return correct_oneself(call->local_rank, call->scope, call->ctx);
}

TEST(a_rank_may_correct_itself)
{
    dp_ctx *ctx = open_cpus(THREE);
    dp_scope *scope = dp_scope_begin(ctx);
    CHECK_OK(in_run(ctx, correct_oneself, ctx));
    CHECK_OK(forward_of(everywhere(module_with(ctx, 0, correct_in_method, NULL, NULL)), scope,
                        THREE, NULL));
    dp_close(ctx);
}

/* ---- another thread -------------------------------------------------------------------------- */

static atomic_int inside; /* 1: the other thread is; 2: it may go */

static dp_status stay_inside(int local_rank, dp_scope *scope, void *user)
{
    (void)scope, (void)user;
    if (local_rank == 0)
        atomic_store(&inside, 1);
    while (atomic_load(&inside) != 2)
        rest(1);
    return DP_OK;
}

static void *go_inside(void *ctx)
{
    CHECK_OK(in_run(ctx, stay_inside, NULL));
    return NULL;
}

static dp_status call_beside(dp_ctx *ctx, dp_call *call)
{
    float one = 1;
    pthread_t thread;
    atomic_store(&inside, 0);
    CHECK_INT(pthread_create(&thread, NULL, go_inside, ctx), 0);
    while (atomic_load(&inside) != 1)
        rest(1);
    refused(ctx, DP_ERR_STATE, "another thread's dp_run, pass or collective is under way");
    if (call != NULL)
        CHECK_ERROR(dp_call_all_reduce(call, &one, &one, 1, DP_F32, DP_OP_SUM), DP_ERR_STATE,
                    "another thread's dp_run, pass or collective is under way");
    atomic_store(&inside, 2);
    CHECK_INT(pthread_join(thread, NULL), 0);
    DP_TRY(dp_rank_all_reduce(ctx, &one, &one, 1, DP_F32, DP_OP_SUM));
    CHECK_F64(one, 1, 0);
    return DP_OK;
}

static dp_status call_beside_in_method(dp_call *call)
{
    call->out = dp_none();
    return call_beside(call->ctx, call);
}

/* What belongs to one rank, or to a replica, is refused while another thread is in the context. */
TEST(while_another_thread_is_inside)
{
    for (int devices = 1; devices <= 2; devices++) {
        dp_ctx *ctx = open_cpus(devices);
        dp_scope *scope = dp_scope_begin(ctx);
        if (devices == 1)
            CHECK_OK(call_beside(ctx, NULL));
        dp_module *par = everywhere(module_with(ctx, 0, call_beside_in_method, NULL, NULL));
        CHECK_STATUS(forward_of(par, scope, 1, NULL), DP_OK);
        dp_close(ctx);
    }
}

static float everybodys[16];

static dp_status meet_apart(int local_rank, dp_scope *scope, void *user)
{
    float own[8] = {1, 2, 3, 4, 5, 6, 7, 8};
    (void)scope;
    CHECK_ERROR(dp_rank_all_reduce(user, own, everybodys, 2, DP_F32, DP_OP_SUM), DP_ERR_INVALID,
                "dp_rank_all_reduce: recv of local rank 0 overlaps a buffer of local rank 1");
    CHECK_ERROR(dp_rank_all_gather(user, own, everybodys + 3 * local_rank, 2, DP_F32),
                DP_ERR_INVALID, "dp_rank_all_gather: recv of local rank 0 overlaps a buffer of");
    DP_TRY(dp_rank_all_gather(user, own, everybodys + 4 * local_rank, 2, DP_F32));
    return dp_rank_all_reduce(user, own, everybodys + 2 * local_rank, 2, DP_F32, DP_OP_SUM);
}

TEST(ranks_receive_in_places_of_their_own)
{
    dp_ctx *ctx = open_cpus(2);
    CHECK_OK(in_run(ctx, meet_apart, ctx));
    CHECK_F64(everybodys[0], 2, 0);
    CHECK_F64(everybodys[3], 4, 0);
    dp_close(ctx);
}

/* Memory of the user's may begin anywhere. */
static dp_status meet_at_odd_addresses(int local_rank, dp_scope *scope, void *user)
{
    char send[3 * 8 + 1], recv[3 * 8 + 3];
    double own[3] = {local_rank, 1, 2}, got[3];
    (void)scope;
    memcpy(send + 1, own, sizeof own);
    DP_TRY(dp_rank_all_reduce(user, send + 1, recv + 3, 3, DP_F64, DP_OP_SUM));
    memcpy(got, recv + 3, sizeof got);
    CHECK_F64(got[0], 3, 0);
    CHECK_F64(got[2], 6, 0);
    DP_TRY(dp_rank_reduce_scatter(user, send + 1, recv + 1, 1, DP_F64, DP_OP_MAX));
    DP_TRY(dp_rank_broadcast(user, recv + 1, 1, DP_F64, 2));
    DP_TRY(dp_rank_all_gather(user, send + 1, recv + 3, 1, DP_F64));
    memcpy(got, recv + 3, sizeof got);
    CHECK_F64(got[1], 1, 0);
    CHECK_F64(got[2], 2, 0);
    return DP_OK;
}

TEST(odd_addresses)
{
    dp_ctx *ctx = open_cpus(THREE);
    CHECK_OK(in_run(ctx, meet_at_odd_addresses, ctx));
    dp_close(ctx);
}

static dp_status call_after_the_end(int local_rank, dp_scope *scope, void *user)
{
    (void)scope;
    if (local_rank == 0)
        dp_abort(user, DP_ERR_ABORTED, "enough");
    while (!dp_failure(user, NULL))
        rest(1);
    refused(user, DP_ERR_ABORTED, "the job failed: enough");
    return DP_OK;
}

TEST(after_the_job_has_failed)
{
    dp_ctx *ctx = open_cpus(2);
    CHECK_STATUS(in_run(ctx, call_after_the_end, ctx), DP_ERR_ABORTED);
    refused(ctx, DP_ERR_ABORTED, "the job failed: enough");
    dp_close(ctx);
}

static dp_call *kept_call;

static dp_status keep_the_call(dp_call *call)
{
    call->out = dp_none();
    if (call->replica == 0)
        kept_call = call;
    return DP_OK;
}

TEST(methods_that_have_returned_meet_nobody)
{
    float one = 1;
    dp_ctx *ctx = open_cpus(2);
    dp_scope *scope = dp_scope_begin(ctx);
    dp_module *par;
    CHECK_OK(dp_data_parallel(module_with(ctx, 0, keep_the_call, NULL, NULL), NULL, &par));
    CHECK_OK(forward_of(par, scope, 2, NULL));
    CHECK_ERROR(dp_call_all_reduce(kept_call, &one, &one, 1, DP_F32, DP_OP_SUM), DP_ERR_STATE,
                "dp_call_all_reduce: the methods of this pass have returned");
    CHECK_OK(in_run(ctx, sum_of_ones, ctx));
    dp_close(ctx);
}

/* ---- from inside itself ---------------------------------------------------------------------- */

static struct {
    dp_coll_ops ops;
    const dp_coll_ops *inner;
    dp_ctx *ctx;
    atomic_int calls;
} nested;

/* Functions of tables call nothing of the library: what does is refused, and harms nobody. */
static dp_status nested_run(dp_comm *comm, const dp_coll_call *call)
{
    atomic_fetch_add(&nested.calls, 1);
    CHECK_ERROR(dp_rank_barrier(nested.ctx), DP_ERR_STATE,
                "is in a collective, and calls this from inside it");
    return nested.inner->run(comm, call);
}

static dp_status nested_open(const dp_host *host, const dp_comm_config *config, dp_comm **out)
{
    DP_TRY(nested.inner->open(host, config, out));
    (*out)->ops = &nested.ops;
    return DP_OK;
}

TEST(from_inside_itself)
{
    const dp_coll_ops *const colls[] = {&nested.ops, NULL};
    nested.inner = dp_cpu_coll();
    nested.ops = *nested.inner;
    nested.ops.open = nested_open;
    nested.ops.run = nested_run;
    CHECK_OK(dp_open(&(dp_config){.colls = colls, .device_count = THREE}, &nested.ctx));
    CHECK_OK(in_run(nested.ctx, sum_of_ones, nested.ctx));
    CHECK_INT(atomic_load(&nested.calls), 1);
    dp_close(nested.ctx);
}

static dp_status run_in_run(int local_rank, dp_scope *scope, void *user)
{
    (void)local_rank;
    CHECK_ERROR(dp_run(user, scope, sum_of_ones, user), DP_ERR_STATE, "a function under dp_run");
    CHECK_ERROR(dp_barrier(user), DP_ERR_STATE, "a function under dp_run");
    return sum_of_ones(local_rank, scope, user);
}

/* Each rank drives a context of its own, of one device. */
static dp_status run_in_another_context(int local_rank, dp_scope *scope, void *user)
{
    dp_ctx *own;
    CHECK_OK(dp_open(&(dp_config){.device_count = 1 + local_rank % 2, .local_only = true}, &own));
    CHECK_OK(in_run(own, sum_of_ones, own));
    if (local_rank % 2 == 1)
        CHECK_ERROR(dp_rank_barrier(own), DP_ERR_STATE, NO_RANK);
    else
        CHECK_OK(dp_rank_barrier(own));
    dp_close(own);
    return sum_of_ones(local_rank, scope, user);
}

TEST(runs_in_runs)
{
    dp_ctx *ctx = open_cpus(2);
    CHECK_OK(in_run(ctx, run_in_run, ctx));
    CHECK_OK(in_run(ctx, run_in_another_context, ctx));
    dp_close(ctx);
}

/* ---- what it takes --------------------------------------------------------------------------- */

/* On devices whose memory is the allocator's as well. */
TEST(calls_take_no_more_memory)
{
    const dp_device_ops *const backends[] = {toy_device(), NULL};
    test_allocator counter = {0};
    size_t calls = 0;
    dp_ctx *ctx = NULL;
    CHECK_OK(dp_open(&(dp_config){.backends = backends,
                                  .device_count = THREE,
                                  .allocator = test_allocator_of(&counter)},
                     &ctx));
    dp_module *par = everywhere(module_with(ctx, 0, ask_in_method, ask_in_backward, NULL));
    for (int i = 0; i < 6; i++) {
        CHECK_OK(in_run(ctx, ask_in_run, ctx));
        pass_of(par, 2, 03);
        calls = i == 2 ? counter.call_count : calls;
    }
    CHECK_INT(counter.call_count, calls);
    dp_close(ctx);
    CHECK_NO_LEAKS(&counter);
}

/* A mean over some of the ranks. */
static dp_status mean_of_some(dp_call *call)
{
    double own[2] = {call->local_rank + 1, 1};
    call->out = dp_none();
    DP_TRY(dp_call_all_reduce(call, own, own, 2, DP_F64, DP_OP_MEAN));
    CHECK_F64(own[0], 1.5, 0);
    CHECK_F64(own[1], 1, 0);
    return DP_OK;
}

static dp_status means_of_some(dp_ctx *ctx)
{
    const dp_method method = {"forward", mean_of_some};
    const dp_param_config param = {.name = "w"};
    const dp_module_config config = {
        .methods = &method, .method_count = 1, .params = &param, .param_count = 1};
    dp_module *net, *par;
    DP_TRY(dp_module_create(ctx, &config, &net));
    DP_TRY(dp_distributed(net, NULL, &par));
    dp_scope *scope = dp_scope_begin(ctx);
    dp_status status = scope != NULL ? forward_of(par, scope, 2, NULL) : DP_ERR_NO_MEMORY;
    dp_scope_end(scope);
    return status;
}

/* Each piece of a scope is an allocation. */
TEST(each_allocation_may_fail)
{
    bool failed = true;
    for (size_t at = 1; failed; at += (size_t)test_step()) {
        test_allocator counter = {.fail_at = at};
        dp_ctx *ctx = NULL;
        dp_status status = dp_open(&(dp_config){.device_count = THREE,
                                                .poison = true,
                                                .allocator = test_allocator_of(&counter)},
                                   &ctx);
        status = status == DP_OK ? means_of_some(ctx) : status;
        failed = counter.fail_count > 0;
        CHECK_STATUS(status, failed ? DP_ERR_NO_MEMORY : DP_OK);
        dp_close(ctx);
        CHECK_NO_LEAKS(&counter);
    }
}

static double spent_s; /* by all threads, while one is late */

static double cpu_s(void)
{
    struct timespec now;
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &now);
    return (double)now.tv_sec + (double)now.tv_nsec * 1e-9;
}

static dp_status come_late(int local_rank, dp_scope *scope, void *user)
{
    if (local_rank == 0) {
        double start = cpu_s();
        rest(400);
        spent_s = cpu_s() - start;
    }
    return sum_of_ones(local_rank, scope, user);
}

/* A core is for those who compute. */
TEST(ranks_that_wait_sleep)
{
    dp_ctx *ctx = open_cpus(THREE);
    CHECK_OK(in_run(ctx, come_late, ctx));
    CHECK(spent_s < 0.04 * test_timeout_scale());
    dp_close(ctx);
}

/* Many rounds, and no rest between them. */
static dp_status hurry(int local_rank, dp_scope *scope, void *user)
{
    int rounds = (int)(3000 / test_timeout_scale());
    (void)scope;
    for (int i = 0; i < rounds; i++) {
        double own = i + local_rank;
        DP_TRY(dp_rank_all_reduce(user, &own, &own, 1, DP_F64, DP_OP_SUM));
        CHECK_F64(own, 4 * i + 6, 0);
    }
    return DP_OK;
}

TEST_SLOW(many_rounds, 60)
{
    dp_ctx *ctx = open_cpus(4);
    CHECK_OK(in_run(ctx, hurry, ctx));
    dp_close(ctx);
}
