/* test_reentry.c - functions of the user's that call the library: whatever they stand on cannot be
   pulled away, what others use at the same time cannot be changed, and the rest works. */

#include <pthread.h>
#include <stdatomic.h>
#include "nets.h"

/* ---- the table: every call, from inside every kind of function ------------------------------- */

typedef struct deed deed;

typedef struct stage {
    dp_ctx *ctx;
    dp_scope *outer, *used;       /* used is a child of outer, and what the function stands on */
    dp_scope *other[2];           /* one a rank, in nobody's use */
    dp_module *net, *par;         /* par drives net on two devices */
    dp_module *own[TREE_DEVICES]; /* one on every device, which nobody else runs */
    dp_module *spare;             /* in nobody's use, and without memory yet */
    dp_module *held;              /* what the function stands on */
    dp_pass *early;               /* of net, and ready for its backward */
    const deed *deed;
    const char *inside; /* how a sentence calls the function */
    size_t replica;     /* whose replica_create it is */
    bool together;      /* it runs on both devices at the same time */
    atomic_int armed, done;
} stage;

struct deed {
    const char *fn; /* what is called, and begins the sentence */
    dp_status (*act)(stage *s, int rank);
    dp_status alone, together;
    bool scope, module; /* refused only where the function stands on s->used, on s->held */
    bool on_net; /* and under dp_run the device of s->net may, which nobody else runs there */
};

static stage now;

/* In front of a deed's call, whose sentence says what became of it if it returns nothing. */
static void expect_no_sentence(void)
{
    (void)dp_error(DP_ERR_USER, "nothing");
}

static dp_status sentence_says(const char *fn)
{
    return strncmp(dp_last_error(), fn, strlen(fn)) == 0 ? DP_ERR_STATE : DP_OK;
}

static dp_value batch_of(dp_scope *scope, int64_t rows)
{
    static const float x[2 * NET_IN] = {1, 2, 3, 4, 5, 6};
    dp_tensor tensor = dp_wrap_const(x, DP_F32, DP_SHAPE(rows, NET_IN));
    return DP_LIST_OF(scope, dp_of(scope, &tensor));
}

static dp_status act_close(stage *s, int rank)
{
    (void)rank;
    expect_no_sentence();
    dp_close(s->ctx);
    return sentence_says("dp_close: ");
}

static dp_status act_end(stage *s, int rank)
{
    (void)rank;
    expect_no_sentence();
    dp_scope_end(s->used);
    return sentence_says("dp_scope_end: ");
}

static dp_status act_end_outer(stage *s, int rank)
{
    (void)rank;
    expect_no_sentence();
    dp_scope_end(s->outer);
    return sentence_says("dp_scope_end: ");
}

static dp_status act_attach(stage *s, int rank)
{
    return dp_scope_attach(s->other[rank], s->used);
}

static dp_status act_attach_outer(stage *s, int rank)
{
    return dp_scope_attach(s->other[rank], s->outer);
}

static dp_status act_destroy(stage *s, int rank)
{
    (void)rank;
    return dp_module_destroy(s->held);
}

static dp_status act_destroy_spare(stage *s, int rank)
{
    (void)rank;
    dp_module *spare = s->spare;
    dp_status status = dp_module_destroy(spare);
    if (status == DP_OK)
        s->spare = NULL;
    return status;
}

/* Whose memory would be found now, by all at once. */
static dp_status act_look_at_spare(stage *s, int rank)
{
    (void)rank;
    dp_param_info info;
    return dp_module_param(s->spare, NET_W, &info);
}

static dp_status act_zero(stage *s, int rank)
{
    (void)rank;
    return dp_zero_grad(s->net);
}

static dp_status act_edit(stage *s, int rank)
{
    (void)rank;
    dp_tensor data, grad;
    return dp_params_edit(s->net, NET_W, &data, &grad);
}

static dp_status act_write(stage *s, int rank)
{
    static const float b[NET_OUT] = {1, 2};
    (void)rank;
    return dp_params_write(s->net, NET_B, b, sizeof b);
}

static dp_status act_changed(stage *s, int rank)
{
    (void)rank;
    return dp_params_changed(s->net);
}

static dp_status act_train(stage *s, int rank)
{
    (void)rank;
    return dp_module_train(s->net, true);
}

/* Moves parameters that the function uses: it may have a pointer to where they were. */
static dp_status act_move(stage *s, int rank)
{
    static float memory[NET_PARAMS];
    (void)rank;
    return dp_params_move(s->held, NET_W, memory, NULL);
}

static dp_status act_create(stage *s, int rank)
{
    (void)rank;
    dp_module *made = NULL;
    TRY(dp_module_create(s->ctx, &(dp_module_config){.name = "made"}, &made));
    return dp_module_destroy(made);
}

static dp_status act_copy(stage *s, int rank)
{
    dp_module *made = NULL;
    TRY(dp_module_copy(s->net, rank, &made));
    return dp_module_destroy(made);
}

static dp_status act_wrap(stage *s, int rank)
{
    (void)rank;
    dp_module *made = NULL;
    TRY(dp_data_parallel(s->net, NULL, &made));
    return dp_module_destroy(made);
}

static dp_status act_wrap_container(stage *s, int rank)
{
    (void)rank;
    dp_module *made = NULL;
    TRY(dp_container_parallel(s->net, NULL, &made));
    return dp_module_destroy(made);
}

static dp_status act_wrap_meta(stage *s, int rank)
{
    dp_module *made = NULL;
    TRY(dp_meta_test_parallel(s->own[rank], &made));
    return dp_module_destroy(made);
}

static dp_status act_invoke(stage *s, int rank)
{
    dp_value out;
    return dp_invoke(s->net, s->other[rank], "forward", batch_of(s->other[rank], 2), dp_none(),
                     NULL, &out, NULL);
}

static dp_status act_invoke_par(stage *s, int rank)
{
    dp_value out;
    return dp_invoke(s->par, s->other[rank], "forward", batch_of(s->other[rank], 2), dp_none(),
                     NULL, &out, NULL);
}

static dp_status act_once(stage *s, int rank)
{
    static const int ranks[] = {0, 1};
    dp_value out;
    return dp_data_parallel_once(
        s->net, s->other[rank], "forward", batch_of(s->other[rank], 2), dp_none(),
        &(dp_parallel_config){.local_ranks = ranks, .local_rank_count = 2}, &out, NULL);
}

static dp_status act_step(stage *s, int rank)
{
    dp_value log;
    return dp_train_step(s->net, s->other[rank], batch_of(s->other[rank], 2), NULL, &log);
}

static dp_status act_backward(stage *s, int rank)
{
    (void)rank;
    return dp_backward(s->early, dp_none(), NULL);
}

static dp_status act_stream(stage *s, int rank)
{
    return dp_use_stream(s->ctx, rank, NULL);
}

static dp_status act_sync(stage *s, int rank)
{
    (void)rank;
    return dp_buffers_sync(s->net);
}

/* Also of a net that the replicas run, and of its wrapper. */
static dp_status act_read_param(stage *s, int rank)
{
    dp_tensor data;
    size_t param = 0;
    (void)rank;
    TRY(dp_module_find(s->net, "w", &param));
    TRY(dp_owner_param(s->net, 0, param, &data));
    CHECK(data.data != NULL && data.read_only);
    return dp_owner_param(s->par, 0, param, &data);
}

static dp_status act_read_grad(stage *s, int rank)
{
    dp_tensor grad;
    size_t param = 0;
    (void)rank;
    TRY(dp_module_find(s->net, "w", &param));
    TRY(dp_owner_grad(s->net, 0, param, &grad));
    CHECK(grad.data != NULL && grad.read_only);
    return dp_owner_grad(s->par, 0, param, &grad);
}

static dp_status act_run(stage *s, int rank)
{
    return dp_run(s->ctx, s->other[rank], run_nothing, NULL);
}

static dp_status act_barrier(stage *s, int rank)
{
    (void)rank;
    return dp_barrier(s->ctx);
}

static dp_status act_reduce_list(stage *s, int rank)
{
    dp_value list, out, one = batch_of(s->other[rank], 1);
    if (dp_replicate(s->ctx, s->other[rank], one, NULL, &list) != DP_OK) /* is refused itself */
        list = DP_LIST_OF(s->other[rank], one);
    return dp_all_reduce_list(s->ctx, s->other[rank], list, NULL, &out);
}

static dp_status act_replicate(stage *s, int rank)
{
    dp_value out;
    return dp_replicate(s->ctx, s->other[rank], batch_of(s->other[rank], 1), NULL, &out);
}

static dp_status act_scatter(stage *s, int rank)
{
    dp_value out;
    return dp_scatter(s->ctx, s->other[rank], batch_of(s->other[rank], 2), NULL, &out);
}

/* Of nothing, but of the next rank. */
static dp_status act_kernel(stage *s, int rank)
{
    void *out = NULL;
    const dp_kernel_args none = {
        .kernel = DP_KERNEL_FILL, .dtype = DP_F32, .out = &out, .out_count = 1};
    return dp_kernel_run(s->ctx, (rank + 1) % 2, &none);
}

/* Wherever it is told. */
static dp_status gather_on(stage *s, int rank, int target)
{
    dp_value out, batch = batch_of(s->other[rank], 2);
    const dp_gather_config how = {.local_rank = target};
    return dp_gather(s->ctx, s->other[rank], DP_LIST_OF(s->other[rank], batch, batch), &how, &out);
}

static dp_status act_gather(stage *s, int rank)
{
    return gather_on(s, rank, rank);
}

static dp_status act_gather_elsewhere(stage *s, int rank)
{
    return gather_on(s, rank, (rank + 1) % 2);
}

static dp_status act_add_elsewhere(stage *s, int rank)
{
    dp_value out, batch = batch_of(s->other[rank], 2);
    const dp_gather_config how = {.local_rank = (rank + 1) % 2};
    return dp_reduce_add(s->ctx, s->other[rank], DP_LIST_OF(s->other[rank], batch, batch), &how,
                         &out);
}

/* The next rank's device. */
static dp_status act_elsewhere(stage *s, int rank)
{
    dp_tensor tensor;
    dp_device device = dp_local_device(s->ctx, (rank + 1) % 2);
    return dp_tensor_new(s->other[rank], device, DP_F32, DP_SHAPE(1), &tensor);
}

/* What a function may do anywhere: on its own device, with a module that nobody else runs. */
static dp_status act_own(stage *s, int rank)
{
    dp_module *own = s->own[rank];
    dp_scope *scope = dp_scope_begin(s->ctx);
    dp_pass *pass;
    dp_value out;
    dp_tensor data, grad;
    dp_status status = dp_zero_grad(own);
    if (status == DP_OK)
        status = dp_invoke(own, scope, "forward", batch_of(scope, 2), dp_none(), NULL, &out, &pass);
    if (status == DP_OK)
        status = dp_backward(pass, dp_float(1), NULL);
    if (status == DP_OK)
        status = dp_params_edit(own, NET_W, &data, &grad);
    if (status == DP_OK)
        status = dp_axpby(s->ctx, 1, &data, 0, &grad, &data);
    if (status == DP_OK)
        status = dp_params_changed(own);
    if (status == DP_OK)
        status = dp_module_train(own, true);
    dp_scope_end(scope);
    return status;
}

static dp_status act_read(stage *s, int rank)
{
    size_t param;
    dp_param_info info;
    (void)rank;
    CHECK_STR(dp_module_name(s->net), "net");
    CHECK_INT(dp_module_param_count(s->net), 2);
    CHECK(!dp_is_wrapper(s->net) && dp_unwrap(s->par) == s->net);
    TRY(dp_module_find(s->net, "b", &param));
    return dp_module_param(s->net, param, &info);
}

#define STATE DP_ERR_STATE
static const deed deeds[] = {
    {"dp_close", act_close, STATE, STATE, false, false, false},
    {"dp_scope_end", act_end, STATE, STATE, true, false, false},
    {"dp_scope_end", act_end_outer, STATE, STATE, true, false, false},
    {"dp_scope_attach", act_attach, STATE, STATE, true, false, false},
    {"dp_scope_attach", act_attach_outer, STATE, STATE, true, false, false},
    {"dp_module_destroy", act_destroy, STATE, STATE, false, true, false},
    {"dp_module_destroy", act_destroy_spare, DP_OK, STATE, false, false, false},
    {"dp_module_param", act_look_at_spare, DP_OK, STATE, false, false, false},
    {"dp_zero_grad", act_zero, DP_OK, STATE, false, false, true},
    {"dp_params_edit", act_edit, DP_OK, STATE, false, false, true},
    {"dp_params_write", act_write, DP_OK, STATE, false, false, true},
    {"dp_params_changed", act_changed, DP_OK, STATE, false, false, true},
    {"dp_module_train", act_train, DP_OK, STATE, false, false, true},
    {"dp_params_move", act_move, STATE, STATE, false, true, false},
    {"dp_module_create", act_create, DP_OK, STATE, false, false, false},
    {"dp_module_copy", act_copy, DP_OK, STATE, false, false, false},
    {"dp_data_parallel", act_wrap, DP_OK, STATE, false, false, false},
    {"dp_container_parallel", act_wrap_container, DP_OK, STATE, false, false, false},
    {"dp_meta_test_parallel", act_wrap_meta, DP_OK, STATE, false, false, false},
    {"dp_invoke", act_invoke, DP_OK, STATE, false, false, true},
    {"dp_invoke", act_invoke_par, DP_OK, STATE, false, false, false},
    {"dp_data_parallel_once", act_once, DP_OK, STATE, false, false, false},
    {"dp_train_step", act_step, DP_OK, STATE, false, false, true},
    {"dp_backward", act_backward, DP_OK, STATE, false, false, true},
    {"dp_use_stream", act_stream, DP_OK, STATE, false, false, false},
    {"dp_buffers_sync", act_sync, DP_OK, STATE, false, false, false},
    {"dp_owner_param", act_read_param, DP_OK, DP_OK, false, false, false},
    {"dp_owner_grad", act_read_grad, DP_OK, DP_OK, false, false, false},
    {"dp_run", act_run, DP_OK, STATE, false, false, false},
    {"dp_barrier", act_barrier, DP_OK, STATE, false, false, false},
    {"dp_all_reduce_list", act_reduce_list, DP_OK, STATE, false, false, false},
    {"dp_replicate", act_replicate, DP_OK, STATE, false, false, false},
    {"dp_scatter", act_scatter, DP_OK, STATE, false, false, false},
    {"dp_gather", act_gather, DP_OK, DP_OK, false, false, false},
    {"dp_gather", act_gather_elsewhere, DP_OK, STATE, false, false, false},
    {"dp_reduce_add", act_add_elsewhere, DP_OK, STATE, false, false, false},
    {"dp_kernel_run", act_kernel, DP_OK, STATE, false, false, false},
    {"dp_tensor_new", act_elsewhere, DP_OK, STATE, false, false, false},
    {"dp_invoke", act_own, DP_OK, DP_OK, false, false, false},
    {"dp_module_param", act_read, DP_OK, DP_OK, false, false, false}};
enum { DEED_COUNT = sizeof deeds / sizeof deeds[0] };

/* Every function of the stage's calls this; one that runs alone does its deed once. */
static void play(int rank)
{
    static _Thread_local bool playing;
    char fn[100];
    if (playing || (now.together ? !atomic_load(&now.armed) : !atomic_exchange(&now.armed, 0))) {
        return;
    }
    playing = true;
    bool alone = !now.together || (now.deed->on_net && now.held == NULL && rank == 0);
    dp_status want = alone ? now.deed->alone : now.deed->together;
    dp_status status = now.deed->act(&now, rank);
    snprintf(fn, sizeof fn, "%s inside %s", now.deed->fn, now.inside);
    test_check_status(__FILE__, __LINE__, fn, status, want, dp_last_error);
    if (want != DP_OK) {
        snprintf(fn, sizeof fn, "%s: ", now.deed->fn);
        bool said = strstr(dp_last_error(), now.inside) != NULL ||
                    strstr(dp_last_error(), "the scope is ending") != NULL;
        if (sentence_says(fn) == DP_OK || !said) {
            test_fail(__FILE__, __LINE__, "%s inside %s: %s", fn, now.inside, dp_last_error());
        }
        if (now.deed->act == act_invoke && now.held != NULL) { /* a method: it has another way */
            CHECK(strstr(dp_last_error(), "dp_call_child runs a child in the replica") != NULL);
        }
    }
    playing = false;
    atomic_fetch_add(&now.done, 1);
}

/* ---- the functions --------------------------------------------------------------------------- */

static bool in_forward, in_backward; /* whose deed it is */

static dp_status stage_forward(dp_call *call)
{
    dp_value y;
    TRY(net_forward(call));
    y = call->out;
    if (in_forward) {
        play(call->local_rank);
    }
    call->out = DP_DICT(call->scope, {"loss", y});
    return DP_OK;
}

static dp_status stage_backward(dp_call *call)
{
    if (call->grad.kind == DP_DICT) {
        call->grad = dp_get(call->grad, "loss");
    }
    if (in_backward) {
        play(call->local_rank);
    }
    return net_backward(call);
}

static dp_status stage_run(int rank, dp_scope *scope, void *user)
{
    (void)user;
    CHECK(dp_scope_alloc(scope, 10) != NULL);
    if (rank < 2) {
        play(rank);
    }
    return DP_OK;
}

static void stage_deferred(void *user)
{
    (void)user;
    play(0);
}

static bool in_destroy; /* the module's deed is for its replica_destroy */

static dp_status stage_create(const dp_replica_info *info, void **own)
{
    *own = NULL;
    if (!in_destroy && info->replica == now.replica) {
        play(0);
    }
    return DP_OK;
}

static void stage_destroy(void *own)
{
    (void)own;
    if (in_destroy) {
        play(0);
    }
}

static dp_status stage_begin(dp_optim *optim, dp_module *module, dp_pass_config *pass)
{
    (void)optim;
    (void)pass;
    CHECK(module == now.held);
    if (strstr(now.inside, "begin") != NULL) {
        play(0);
    }
    return DP_OK;
}

static dp_status stage_factor(dp_optim *optim, double *out)
{
    (void)optim;
    *out = 1;
    if (strstr(now.inside, "loss_factor") != NULL) {
        play(0);
    }
    return DP_OK;
}

static dp_status stage_update(dp_optim *optim, dp_module *module)
{
    (void)optim;
    CHECK(module == now.held);
    if (strstr(now.inside, "update") != NULL) {
        play(0);
    }
    return DP_OK;
}

static const dp_method stage_methods[] = {{"forward", stage_forward}, {"backward", stage_backward}};
static const net_shape stage_rows = {0};

static dp_module *stage_module(dp_ctx *ctx, const char *name, int rank, bool owns)
{
    static const float w[NET_PARAMS] = {1, -1, 2, -2, 3, -3, 1, 2};
    dp_module *net = NULL;
    CHECK_OK(dp_module_create(ctx,
                              &(dp_module_config){.name = name,
                                                  .methods = owns ? stage_methods : net_methods,
                                                  .method_count = 2,
                                                  .params = net_params,
                                                  .param_count = 2,
                                                  .state = &stage_rows,
                                                  .local_rank = rank},
                              &net));
    CHECK_OK(dp_params_write(net, NET_W, w, NET_IN * NET_OUT * sizeof *w));
    CHECK_OK(dp_params_write(net, NET_B, w + NET_IN * NET_OUT, NET_OUT * sizeof *w));
    return net;
}

/* ---- who calls them -------------------------------------------------------------------------- */

static void invoke_and_back(dp_module *module, int64_t rows)
{
    dp_pass *pass;
    dp_value out;
    now.held = module;
    CHECK_OK(dp_invoke(module, now.used, "forward", batch_of(now.used, rows), dp_none(), NULL, &out,
                       &pass));
    CHECK_OK(dp_backward(pass, dp_none(), NULL));
}

static void by_replicas(void)
{
    invoke_and_back(now.par, 2);
}

static void by_plain_module(void)
{
    invoke_and_back(now.net, 2);
}

static void by_one_part(void) /* of a wrapper with two devices */
{
    invoke_and_back(now.par, 1);
}

static void by_run(void)
{
    now.held = NULL;
    CHECK_OK(dp_run(now.ctx, now.used, stage_run, NULL));
}

static void by_end(void)
{
    CHECK_OK(dp_scope_defer(now.used, stage_deferred, NULL));
    dp_scope_end(now.used);
}

static dp_module_config owner_config(dp_module *const *child)
{
    return (dp_module_config){.name = "owner",
                              .methods = stage_methods,
                              .method_count = 2,
                              .children = child,
                              .child_count = child != NULL,
                              .replica_create = stage_create,
                              .replica_destroy = stage_destroy};
}

/* The child that the module is about to get. */
static void by_create(void)
{
    dp_module *child = stage_module(now.ctx, "child", 0, true), *owner = NULL;
    dp_module_config config = owner_config(&child);
    now.held = child;
    CHECK_OK(dp_module_create(now.ctx, &config, &owner));
    CHECK_OK(dp_module_destroy(owner));
}

static const int two_ranks[] = {0, 1};
static const dp_parallel_config on_two = {.local_ranks = two_ranks, .local_rank_count = 2};

static void by_once(void)
{
    dp_module *owner = NULL;
    dp_value out;
    dp_module_config config = owner_config(NULL);
    config.params = net_params;
    config.param_count = 2;
    config.state = &stage_rows;
    now.replica = 1;
    CHECK_OK(dp_module_create(now.ctx, &config, &owner));
    now.held = owner;
    CHECK_OK(dp_data_parallel_once(owner, now.used, "forward", batch_of(now.used, 2), dp_none(),
                                   &on_two, &out, NULL));
    dp_scope_end(now.used);
    now.used = dp_scope_child(now.outer);
    CHECK_OK(dp_module_destroy(owner));
}

static void by_destroy(void)
{
    dp_module *owner = NULL;
    dp_module_config config = owner_config(NULL);
    in_destroy = true;
    CHECK_OK(dp_module_create(now.ctx, &config, &owner));
    now.held = owner;
    CHECK_OK(dp_module_destroy(owner));
}

static void by_step(void)
{
    static const dp_optim_ops ops = {DP_TABLE(dp_optim_ops), stage_begin, stage_factor,
                                     stage_update};
    dp_optim optim = {&ops};
    dp_value log;
    now.held = now.par;
    CHECK_OK(dp_train_step(now.par, now.used, batch_of(now.used, 2), &optim, &log));
}

typedef struct place {
    const char *inside;
    void (*call)(void);
    bool together;
    bool uses_scope, uses_module;
} place;

static const place places[] = {{"'net.forward'", by_replicas, true, true, true},
                               {"'net.backward'", by_replicas, true, true, true},
                               {"'net.forward'", by_plain_module, false, true, true},
                               {"'net.backward'", by_plain_module, false, true, true},
                               {"'net.forward'", by_one_part, false, true, true},
                               {"'net.backward'", by_one_part, false, true, true},
                               {"a function under dp_run", by_run, true, true, false},
                               {"a deferred function", by_end, false, true, false},
                               {"replica_create of 'owner'", by_create, false, false, true},
                               {"replica_create of 'owner'", by_once, false, true, true},
                               {"a deferred function", by_destroy, false, false, false},
                               {"the optimizer's 'begin'", by_step, false, true, true},
                               {"the optimizer's 'loss_factor'", by_step, false, true, true},
                               {"the optimizer's 'update'", by_step, false, true, true}};
enum { PLACE_COUNT = sizeof places / sizeof places[0] };

/* After whatever was tried, a step on both devices gives the numbers that it always gives. */
static void check_step(void)
{
    static const float want[NET_PARAMS] = {5, 5, 7, 7, 9, 9, 2, 2};
    float grads[NET_PARAMS];
    dp_pass *pass;
    dp_value out;
    CHECK_OK(dp_zero_grad(now.net));
    CHECK_OK(dp_invoke(now.par, now.other[0], "forward", batch_of(now.other[0], 2), dp_none(), NULL,
                       &out, &pass));
    CHECK_OK(dp_backward(pass, dp_float(1), NULL));
    net_numbers(now.ctx, now.net, true, grads);
    CHECK_BYTES(grads, want, sizeof want);
}

static void play_one(const place *at, const deed *what)
{
    dp_value out;
    now.outer = dp_scope_begin(now.ctx);
    now.used = dp_scope_child(now.outer);
    now.other[0] = dp_scope_begin(now.ctx);
    now.other[1] = dp_scope_begin(now.ctx);
    now.held = now.net;
    CHECK_OK(dp_invoke(now.net, now.other[0], "forward", batch_of(now.other[0], 2), dp_none(), NULL,
                       &out, &now.early));
    CHECK_OK(dp_module_create(
        now.ctx,
        &(dp_module_config){
            .name = "spare", .params = net_params, .param_count = 2, .local_rank = 2},
        &now.spare));
    now.deed = what;
    now.inside = at->inside;
    now.together = at->together;
    now.replica = 0;
    now.done = 0;
    in_forward = strcmp(at->inside, "'net.forward'") == 0;
    in_backward = strcmp(at->inside, "'net.backward'") == 0;
    in_destroy = false;
    now.armed = 1;
    at->call();
    now.armed = 0;
    CHECK_INT(now.done, at->together ? 2 : 1);
    check_step();
    CHECK_OK(dp_module_destroy(now.spare));
    dp_scope_end(now.outer);
    dp_scope_end(now.other[0]);
    dp_scope_end(now.other[1]);
}

TEST_BACKENDS(every_call_inside_every_function)
{
    now.ctx = ctx;
    now.net = stage_module(ctx, "net", 0, true);
    CHECK_OK(dp_data_parallel(now.net, &on_two, &now.par));
    for (int rank = 0; rank < TREE_DEVICES; rank++) {
        now.own[rank] = stage_module(ctx, "own", rank, false);
    }
    for (int i = 0; i < PLACE_COUNT; i++) {
        for (int k = 0; k < DEED_COUNT; k++) {
            bool in_use = (!deeds[k].scope || places[i].uses_scope) &&
                          (!deeds[k].module || places[i].uses_module);
            if (in_use) {
                play_one(&places[i], &deeds[k]);
            }
        }
    }
}

/* ---- other threads --------------------------------------------------------------------------- */

typedef struct post { /* a function that waits until another thread has tried */
    atomic_int inside, tried;
} post;

static post waiting;

static void stand_still(void)
{
    atomic_store(&waiting.inside, 1);
    while (!atomic_load(&waiting.tried)) {
    }
}

static dp_status still_forward(dp_call *call)
{
    call->out = dp_none();
    stand_still();
    return DP_OK;
}

static void still_deferred(void *user)
{
    (void)user;
    stand_still();
}

static const dp_method still_methods[] = {{"forward", still_forward}};

typedef struct walker {
    dp_ctx *ctx;
    dp_module *module; /* NULL: a deferred function */
} walker;

static void *walk(void *user)
{
    walker *w = user;
    dp_value out;
    dp_scope *scope = dp_scope_begin(w->ctx);
    if (w->module != NULL) {
        CHECK_OK(dp_invoke(w->module, scope, "forward", dp_none(), dp_none(), NULL, &out, NULL));
    } else {
        CHECK_OK(dp_scope_defer(scope, still_deferred, NULL));
    }
    dp_scope_end(scope);
    return NULL;
}

/* What runs in another thread is in the way too; a scope of one's own ends all the same. */
TEST_BACKENDS(another_thread_cannot_close)
{
    dp_module *net = NULL;
    CHECK_OK(dp_module_create(
        ctx, &(dp_module_config){.name = "still", .methods = still_methods, .method_count = 1},
        &net));
    for (int i = 0; i < 2; i++) {
        walker w = {ctx, i == 0 ? net : NULL};
        pthread_t thread;
        dp_scope *own = dp_scope_begin(ctx);
        waiting = (post){0};
        CHECK_INT(pthread_create(&thread, NULL, walk, &w), 0);
        while (!atomic_load(&waiting.inside)) {
        }
        expect_no_sentence();
        dp_close(ctx);
        CHECK_STR(dp_last_error(), "dp_close: the context is in use: threads in methods, deferred "
                                   "functions and the like: 1");
        dp_scope_end(own);
        CHECK_OK(dp_barrier(ctx)); /* nothing was left behind */
        atomic_store(&waiting.tried, 1);
        CHECK_INT(pthread_join(thread, NULL), 0);
    }
}

static dp_coll_ops still_coll;

static dp_status still_coll_run(dp_comm *comm, const dp_coll_call *call)
{
    stand_still();
    return dp_cpu_coll()->run(comm, call);
}

static void *reduce_slowly(void *user)
{
    float numbers[2] = {1, 2};
    dp_part parts[2] = {{&numbers[0], &numbers[0], NULL}, {&numbers[1], &numbers[1], NULL}};
    CHECK_OK(dp_all_reduce(user, parts, 1, DP_F32, DP_OP_SUM));
    CHECK_F64(numbers[0], 3, 0);
    return NULL;
}

static dp_status still_coll_open(const dp_host *host, const dp_comm_config *config, dp_comm **out)
{
    dp_status status = dp_cpu_coll()->open(host, config, out);
    if (status == DP_OK)
        (*out)->ops = &still_coll;
    return status;
}

/* Nor while one is in a collective. */
TEST(a_collective_in_another_thread_is_in_the_way_of_close)
{
    const dp_coll_ops *const colls[] = {&still_coll, NULL};
    dp_ctx *ctx = NULL;
    pthread_t thread;
    still_coll = *dp_cpu_coll();
    still_coll.run = still_coll_run;
    still_coll.open = still_coll_open;
    CHECK_OK(dp_open(&(dp_config){.device_count = 2, .colls = colls}, &ctx));
    waiting = (post){0};
    CHECK_INT(pthread_create(&thread, NULL, reduce_slowly, ctx), 0);
    while (!atomic_load(&waiting.inside)) {
    }
    expect_no_sentence();
    dp_close(ctx);
    CHECK(strstr(dp_last_error(), "dp_close: ") == dp_last_error());
    atomic_store(&waiting.tried, 1);
    CHECK_INT(pthread_join(thread, NULL), 0);
    CHECK_OK(dp_barrier(ctx));
    dp_close(ctx);
}

/* A thread that is inside nothing, while a run is under way. */
static dp_status still_run(int rank, dp_scope *scope, void *user)
{
    (void)scope;
    (void)user;
    if (rank == 1) {
        stand_still();
    }
    return DP_OK;
}

static void *zero_from_outside(void *user)
{
    dp_module *net = user;
    while (!atomic_load(&waiting.inside)) {
    }
    CHECK_ERROR(dp_zero_grad(net), DP_ERR_STATE, "dp_zero_grad: another thread's dp_run, pass or");
    atomic_store(&waiting.tried, 1);
    return NULL;
}

TEST_BACKENDS(another_thread_cannot_change_what_runs)
{
    dp_module *net = net_create(ctx, &stage_rows, 0);
    pthread_t thread;
    waiting = (post){0};
    CHECK_INT(pthread_create(&thread, NULL, zero_from_outside, net), 0);
    CHECK_OK(dp_run(ctx, scope, still_run, NULL));
    CHECK_INT(pthread_join(thread, NULL), 0);
}

/* A thread whose kernel is just being shared out among the workers. */
static dp_device_ops sharing;
static atomic_bool to_share; /* the next fill */

static void stand_in_part(int part, void *user)
{
    (void)user;
    if (part == 0) {
        stand_still();
    }
}

static dp_status sharing_kernel(dp_stream *stream, const dp_kernel_args *args)
{
    if (args->kernel == DP_KERNEL_FILL && atomic_exchange(&to_share, false)) {
        stream->dev->host->parallel(stream->dev->host, 2, stand_in_part, NULL);
    }
    return dp_cpu()->kernel(stream, args);
}

static dp_status sharing_open(const dp_host *host, int index, dp_dev **out)
{
    TRY(dp_cpu()->open(host, index, out));
    (*out)->ops = &sharing;
    return DP_OK;
}

static void *fill_slowly(void *user)
{
    float numbers[2] = {1, 2};
    dp_tensor tensor = dp_wrap(numbers, DP_F32, 1, (int64_t[]){2});
    tensor.device = dp_local_device(user, 1);
    CHECK_OK(dp_fill(user, &tensor, dp_int(7)));
    CHECK_F64(numbers[1], 7, 0);
    return NULL;
}

static dp_status count_runs(int rank, dp_scope *scope, void *user)
{
    (void)scope;
    (void)rank;
    atomic_fetch_add((atomic_int *)user, 1);
    return DP_OK;
}

TEST(workers_of_another_threads_kernel_are_not_taken)
{
    const dp_device_ops *const backends[] = {&sharing, NULL};
    dp_module *par = NULL;
    dp_ctx *ctx;
    dp_value out = dp_none();
    dp_pass *pass = NULL;
    pthread_t thread;
    atomic_int runs;
    atomic_init(&runs, 0);
    sharing = *dp_cpu();
    sharing.open = sharing_open;
    sharing.kernel = sharing_kernel;
    CHECK_OK(dp_open(&(dp_config){.backends = backends, .device_count = 2}, &ctx));
    dp_scope *scope = dp_scope_begin(ctx);
    CHECK_OK(dp_data_parallel(net_create(ctx, &stage_rows, 0), NULL, &par));
    dp_value args = tree_of(scope, "(f32[4,3],)");
    waiting = (post){0};
    atomic_store(&to_share, true);
    CHECK_INT(pthread_create(&thread, NULL, fill_slowly, ctx), 0);
    while (!atomic_load(&waiting.inside)) {
    }
    CHECK_ERROR(dp_run(ctx, scope, count_runs, &runs), DP_ERR_STATE,
                "dp_run: another thread is inside this context");
    CHECK_ERROR(dp_invoke(par, scope, "forward", args, dp_none(), NULL, &out, &pass), DP_ERR_STATE,
                "dp_invoke: another thread is inside this context");
    CHECK_INT(atomic_load(&runs), 0);
    CHECK_INT(out.kind, DP_NONE);
    CHECK(pass == NULL);
    atomic_store(&waiting.tried, 1);
    CHECK_INT(pthread_join(thread, NULL), 0);
    CHECK_OK(dp_run(ctx, scope, count_runs, &runs));
    CHECK_INT(atomic_load(&runs), 2);
    CHECK_OK(dp_invoke(par, scope, "forward", args, dp_none(), NULL, &out, &pass));
    dp_scope_end(scope);
    dp_close(ctx);
}

/* ---- the log function ------------------------------------------------------------------------ */

static void log_and_close(const dp_log_record *record, void *user)
{
    dp_ctx **ctx = user;
    if (*ctx != NULL && strstr(record->text, "the others will wait for it") != NULL) {
        expect_no_sentence();
        dp_close(*ctx);
        CHECK_STR(dp_last_error(),
                  "dp_close: the context is in use by the log function, which called this");
        *ctx = NULL;
    }
}

static dp_status unequal_info(dp_dev *dev, dp_device_info *out)
{
    TRY(dp_cpu()->info(dev, out));
    out->bytes_total = dev->index == 0 ? 1000 : 10;
    return DP_OK;
}

static dp_status unequal_open(const dp_host *host, int index, dp_dev **out)
{
    static dp_device_ops ops;
    TRY(dp_cpu()->open(host, index, out));
    ops = *dp_cpu();
    ops.info = unequal_info;
    (*out)->ops = &ops;
    return DP_OK;
}

TEST(the_log_function_cannot_close)
{
    static dp_ctx *to_close;
    dp_ctx *ctx;
    dp_module *par = NULL;
    dp_device_ops ops = *dp_cpu();
    const dp_device_ops *const backends[] = {&ops, NULL};
    ops.open = unequal_open;
    CHECK_OK(dp_open(&(dp_config){.backends = backends,
                                  .device_count = 2,
                                  .log = {.fn = log_and_close, .user = &to_close}},
                     &ctx));
    to_close = ctx;
    CHECK_OK(dp_data_parallel(stage_module(ctx, "net", 0, true), NULL, &par));
    CHECK(to_close == NULL);
    dp_close(ctx); /* nobody is inside any more */
    CHECK_ERROR(dp_wait(ctx), DP_ERR_STATE, "the context is closed");
}

/* ---- passes and calls that are over ---------------------------------------------------------- */

static dp_call *kept_call;

static dp_status keep_call(dp_call *call)
{
    if (call->replica == 0) {
        kept_call = call;
    }
    call->out = dp_none();
    return DP_OK;
}

static const dp_method keeping[] = {{"forward", keep_call}, {"backward", keep_call}};

static dp_module *keeper(dp_ctx *ctx, bool parallel)
{
    dp_module *net = NULL, *par = NULL;
    CHECK_OK(dp_module_create(ctx,
                              &(dp_module_config){.name = "keeper",
                                                  .methods = keeping,
                                                  .method_count = 2,
                                                  .params = net_params,
                                                  .param_count = 2},
                              &net));
    if (!parallel) {
        return net;
    }
    CHECK_OK(dp_data_parallel(net, &on_two, &par));
    return par;
}

static void check_passes_end(dp_ctx *ctx, dp_scope *scope)
{
    for (int parallel = 0; parallel < 2; parallel++) {
        dp_module *net = keeper(ctx, parallel);
        dp_scope *step = dp_scope_begin(ctx), *other = dp_scope_begin(ctx);
        dp_pass *first, *second, *lasting;
        dp_value out, batch = batch_of(scope, 2);
        CHECK_OK(dp_invoke(net, other, "forward", batch, dp_none(), NULL, &out, &lasting));
        CHECK_OK(dp_invoke(net, step, "forward", batch, dp_none(), NULL, &out, &first));
        CHECK_OK(dp_invoke(net, step, "forward", batch, dp_none(), NULL, &out, &second));
        CHECK(dp_param(kept_call, NET_W) != NULL);
        dp_scope_end(step);
        CHECK_ERROR(dp_backward(first, dp_none(), NULL), DP_ERR_STATE, "or its scope has ended");
        CHECK_ERROR(dp_backward(second, dp_none(), NULL), DP_ERR_STATE, "or its scope has ended");
        expect_no_sentence();
        CHECK(dp_param(kept_call, NET_W) == NULL);
        CHECK_STR(dp_last_error(),
                  "dp_param: this is not a call, or the scope of its pass has ended");
        CHECK_OK(dp_backward(lasting, dp_none(), NULL));
        dp_scope_end(other);
    }
}

TEST_BACKENDS(a_pass_ends_with_its_scope)
{
    check_passes_end(ctx, scope);
}

/* Also where its memory stays as it was. */
TEST(a_pass_ends_with_its_scope_unpoisoned)
{
    dp_ctx *ctx;
    CHECK_OK(dp_open(&(dp_config){.device_count = 2}, &ctx));
    check_passes_end(ctx, dp_scope_begin(ctx));
    dp_close(ctx);
}

static dp_status hand_over(int rank, dp_scope *scope, void *user)
{
    return rank == 0 ? dp_scope_attach(user, scope) : DP_OK;
}

static dp_status end_own(int rank, dp_scope *scope, void *user)
{
    (void)user;
    if (rank == 1) {
        dp_scope_end(scope);
    }
    return DP_OK;
}

/* A rank may end or hand over its scope; a pass whose replica lived there is none any more. */
TEST_BACKENDS(a_pass_ends_with_the_scope_of_a_replica)
{
    const dp_run_fn ways[] = {hand_over, end_own};
    for (int i = 0; i < 2; i++) {
        dp_module *par = keeper(ctx, true), *net = keeper(ctx, false);
        dp_scope *step = dp_scope_begin(ctx), *other = dp_scope_begin(ctx);
        dp_pass *spread, *plain;
        dp_value out, batch = batch_of(scope, 2);
        CHECK_OK(dp_invoke(par, step, "forward", batch, dp_none(), NULL, &out, &spread));
        CHECK_OK(dp_invoke(net, step, "forward", batch, dp_none(), NULL, &out, &plain));
        CHECK_OK(dp_run(ctx, step, ways[i], other));
        CHECK_ERROR(dp_backward(spread, dp_none(), NULL), DP_ERR_STATE, "or its scope has ended");
        CHECK_OK(dp_backward(plain, dp_none(), NULL));
        CHECK_OK(dp_invoke(par, step, "forward", batch, dp_none(), NULL, &out, &spread));
        CHECK_OK(dp_backward(spread, dp_none(), NULL));
        dp_scope_end(step);
        dp_scope_end(other);
    }
}

static dp_pass *child_pass[2];

static dp_status parent_forward(dp_call *call)
{
    TRY(dp_call_child(call, "keeper", "forward", call->args, dp_none(), &call->out,
                      &child_pass[call->replica]));
    if (call->replica_count == 2) {
        CHECK_ERROR(dp_backward(child_pass[call->replica], dp_none(), NULL), DP_ERR_STATE,
                    "call dp_backward in that one's backward");
    }
    return DP_OK;
}

static dp_status parent_backward(dp_call *call)
{
    if (call->replica_count == 2) {
        CHECK_ERROR(dp_backward(child_pass[1 - call->replica], dp_none(), NULL), DP_ERR_STATE,
                    "this pass of 'keeper' is part of replica ");
    }
    return dp_backward(child_pass[call->replica], dp_none(), NULL);
}

/* Gradients of a replica are summed in its pass' backward: elsewhere they would be lost. */
TEST_BACKENDS(a_childs_pass_goes_backward_in_its_replica)
{
    static const dp_method methods[] = {{"forward", parent_forward}, {"backward", parent_backward}};
    dp_module *child = keeper(ctx, false), *net = NULL, *par = NULL;
    dp_pass *pass;
    dp_value out, batch = batch_of(scope, 2);
    CHECK_OK(dp_module_create(ctx,
                              &(dp_module_config){.name = "parent",
                                                  .methods = methods,
                                                  .method_count = 2,
                                                  .children = &child,
                                                  .child_count = 1},
                              &net));
    CHECK_OK(dp_data_parallel(net, &on_two, &par));
    CHECK_OK(dp_invoke(par, scope, "forward", batch, dp_none(), NULL, &out, &pass));
    for (int r = 0; r < 2; r++) {
        CHECK_ERROR(dp_backward(child_pass[r], dp_none(), NULL), DP_ERR_STATE, "of 'parent'");
    }
    CHECK_OK(dp_backward(pass, dp_none(), NULL));
    CHECK_OK(dp_invoke(net, scope, "forward", batch, dp_none(), NULL, &out, &pass));
    CHECK_OK(dp_backward(pass, dp_none(), NULL));
}

/* The child's pass lies in the replica's scope, and its parent's around it. */
TEST_BACKENDS(a_childs_pass_goes_with_its_replica)
{
    static const dp_method methods[] = {{"forward", parent_forward}, {"backward", parent_backward}};
    dp_module *child = keeper(ctx, false), *net = NULL, *par = NULL;
    dp_value out, batch = batch_of(scope, 2);
    dp_scope *step = dp_scope_begin(ctx), *other = dp_scope_begin(ctx);
    CHECK_OK(dp_module_create(ctx,
                              &(dp_module_config){.name = "parent",
                                                  .methods = methods,
                                                  .method_count = 2,
                                                  .children = &child,
                                                  .child_count = 1},
                              &net));
    CHECK_OK(dp_data_parallel(net, &on_two, &par));
    dp_pass *pass;
    CHECK_OK(dp_invoke(par, step, "forward", batch, dp_none(), NULL, &out, &pass));
    CHECK_OK(dp_run(ctx, step, hand_over, other));
    dp_scope_end(step);
    CHECK_ERROR(dp_backward(child_pass[0], dp_none(), NULL), DP_ERR_STATE, "its scope has ended");
    dp_scope_end(other);
}

/* ---- functions that fail --------------------------------------------------------------------- */

static dp_status fail_forward(dp_call *call)
{
    (void)call;
    return dp_error(DP_ERR_USER, "no way");
}

static dp_status fail_run(int rank, dp_scope *scope, void *user)
{
    (void)rank;
    (void)scope;
    (void)user;
    return dp_error(DP_ERR_USER, "no way");
}

static dp_status fail_update(dp_optim *optim, dp_module *module)
{
    (void)optim;
    (void)module;
    return DP_PENDING; /* which is no failure of the list */
}

static dp_status fail_begin(dp_optim *optim, dp_module *module, dp_pass_config *pass)
{
    (void)pass;
    return fail_update(optim, module);
}

static dp_status fail_factor(dp_optim *optim, double *out)
{
    *out = 1;
    return fail_update(optim, NULL);
}

/* What they stood on is free again. */
TEST_BACKENDS(a_function_that_fails_is_left)
{
    static const dp_method methods[] = {{"forward", fail_forward}};
    static const dp_optim_ops ops[] = {{DP_TABLE(dp_optim_ops), fail_begin, NULL, fail_update},
                                       {DP_TABLE(dp_optim_ops), NULL, fail_factor, fail_update},
                                       {DP_TABLE(dp_optim_ops), NULL, NULL, fail_update}};
    dp_module *net = NULL, *par = NULL, *well = stage_module(ctx, "net", 0, true);
    dp_scope *step = dp_scope_begin(ctx);
    dp_value out;
    in_forward = in_backward = false;
    CHECK_OK(dp_module_create(
        ctx, &(dp_module_config){.name = "net", .methods = methods, .method_count = 1}, &net));
    CHECK_OK(dp_data_parallel(net, &on_two, &par));
    CHECK_ERROR(dp_invoke(net, step, "forward", dp_none(), dp_none(), NULL, &out, NULL),
                DP_ERR_USER, "net.forward: no way");
    CHECK_ERROR(dp_invoke(par, step, "forward", batch_of(step, 2), dp_none(), NULL, &out, NULL),
                DP_ERR_USER, "net.forward: no way");
    CHECK_ERROR(dp_run(ctx, step, fail_run, NULL), DP_ERR_USER, "no way");
    for (size_t i = 0; i < sizeof ops / sizeof *ops; i++) {
        dp_optim optim = {&ops[i]};
        CHECK_ERROR(dp_train_step(well, step, batch_of(step, 2), &optim, &out), DP_ERR_USER,
                    "dp_train_step: a function of the user's failed");
    }
    dp_scope_end(step);
    CHECK(dp_scope_alloc(step, 1) == NULL);
    CHECK_OK(dp_module_destroy(par));
    CHECK_OK(dp_module_destroy(net));
    CHECK_OK(dp_module_destroy(well));
}

/* ---- trees that go, and trees that are made -------------------------------------------------- */

typedef struct mourner {
    dp_module *child, *parent;
    int calls;
} mourner;

static dp_status mourner_create(const dp_replica_info *info, void **own)
{
    *own = (void *)(uintptr_t)info->state;
    return DP_OK;
}

/* The tree goes as a whole: nobody finds a part of it that is still there. */
static void mourner_destroy(void *own)
{
    mourner *m = own;
    dp_param_info info;
    CHECK_ERROR(dp_module_destroy(m->parent), DP_ERR_STATE, "was destroyed already");
    CHECK_ERROR(dp_module_param(m->parent, 0, &info), DP_ERR_STATE, "the module was destroyed");
    CHECK_ERROR(dp_zero_grad(m->child), DP_ERR_STATE, "the module was destroyed");
    m->calls++;
}

TEST_BACKENDS(a_tree_goes_as_a_whole)
{
    mourner m = {NULL, NULL, 0};
    CHECK_OK(dp_module_create(ctx,
                              &(dp_module_config){.name = "child",
                                                  .params = net_params,
                                                  .param_count = 2,
                                                  .state = &m,
                                                  .replica_create = mourner_create,
                                                  .replica_destroy = mourner_destroy},
                              &m.child));
    CHECK_OK(dp_module_create(
        ctx, &(dp_module_config){.name = "parent", .children = &m.child, .child_count = 1},
        &m.parent));
    CHECK_OK(dp_module_destroy(m.parent));
    CHECK_INT(m.calls, 1);
}

/* While a module is made its children are its own. */
static dp_status give_child_away(const dp_replica_info *info, void **own)
{
    dp_module *const *child = info->state, *thief = NULL;
    *own = NULL;
    return dp_module_create(
        info->ctx, &(dp_module_config){.name = "thief", .children = child, .child_count = 1},
        &thief);
}

static int create_calls;

static dp_status count_creates(const dp_replica_info *info, void **own)
{
    (void)info;
    *own = NULL;
    create_calls++;
    return DP_OK;
}

TEST_BACKENDS(a_child_has_one_parent)
{
    dp_module *child = net_create(ctx, &stage_rows, 0), *net = NULL;
    CHECK_ERROR(dp_module_create(ctx,
                                 &(dp_module_config){.name = "parent",
                                                     .children = &child,
                                                     .child_count = 1,
                                                     .state = &child,
                                                     .replica_create = give_child_away},
                                 &net),
                DP_ERR_INVALID, "'net' is a child of 'thief' already");
    CHECK_OK(dp_zero_grad(child));
    create_calls = 0; /* and nothing is called for what cannot be made */
    CHECK_ERROR(dp_module_create(ctx,
                                 &(dp_module_config){.name = "late",
                                                     .children = &child,
                                                     .child_count = 1,
                                                     .replica_create = count_creates},
                                 &net),
                DP_ERR_INVALID, "is a child of");
    CHECK_INT(create_calls, 0);
}

static dp_module *tree_with(dp_ctx *ctx, const char *name, dp_module *first, dp_module *second,
                            dp_module *wraps)
{
    dp_module *children[] = {first, second}, *made = NULL;
    CHECK_OK(dp_module_create(ctx,
                              &(dp_module_config){.name = name,
                                                  .methods = net_methods,
                                                  .method_count = 2,
                                                  .children = children,
                                                  .child_count = second != NULL ? 2 : 1,
                                                  .wraps = wraps},
                              &made));
    return made;
}

static void check_no_tree(dp_ctx *ctx, dp_module *first, dp_module *second, dp_module *wraps,
                          const char *inside)
{
    char want[80];
    dp_module *children[] = {first, second}, *made = NULL;
    snprintf(want, sizeof want, "'top' would contain both '%s' and a wrapper of it", inside);
    CHECK_ERROR(dp_module_create(ctx,
                                 &(dp_module_config){.name = "top",
                                                     .children = children,
                                                     .child_count = second != NULL ? 2 : 1,
                                                     .wraps = wraps},
                                 &made),
                DP_ERR_INVALID, want);
    CHECK(made == NULL);
}

static dp_module *whole;

static dp_status destroy_whole(dp_call *call)
{
    call->out = dp_none();
    CHECK_ERROR(dp_module_destroy(whole), DP_ERR_STATE,
                "dp_module_destroy: 'part' is in use by method 'part.forward', which called this");
    return DP_OK;
}

/* A part that runs by itself keeps the whole. */
TEST_BACKENDS(running_part_keeps_its_tree)
{
    static const dp_method methods[] = {{"forward", destroy_whole}};
    dp_module *part = NULL;
    dp_value out;
    CHECK_OK(dp_module_create(
        ctx, &(dp_module_config){.name = "part", .methods = methods, .method_count = 1}, &part));
    whole = tree_with(ctx, "whole", part, NULL, NULL);
    CHECK_OK(dp_invoke(part, scope, "forward", dp_none(), dp_none(), NULL, &out, NULL));
    CHECK_OK(dp_module_destroy(whole));
}

/* Neither could be destroyed before the other, and each would wait for the other's memory. */
TEST_BACKENDS(a_tree_cannot_wrap_a_part_of_itself)
{
    dp_module *a = stage_module(ctx, "a", 0, true), *b = stage_module(ctx, "b", 0, true);
    dp_module *holder = tree_with(ctx, "holder", a, NULL, NULL), *on_a = NULL, *on_on_a = NULL;
    CHECK_OK(dp_data_parallel(a, NULL, &on_a));
    CHECK_OK(dp_data_parallel(on_a, NULL, &on_on_a));
    check_no_tree(ctx, holder, NULL, a, "a");
    check_no_tree(ctx, holder, on_a, NULL, "a");
    check_no_tree(ctx, on_a, holder, NULL, "a");
    check_no_tree(ctx, holder, on_on_a, NULL, "a"); /* by way of a wrapper that is outside */
    check_no_tree(ctx, holder, NULL, on_a, "a");
    dp_module *deep = tree_with(ctx, "deep", holder, NULL, NULL);
    check_no_tree(ctx, deep, on_a, NULL, "a");
    /* two trees that would wrap each other's parts */
    dp_module *one = tree_with(ctx, "one", on_on_a, b, NULL), *on_b = NULL;
    CHECK_OK(dp_data_parallel(b, NULL, &on_b));
    check_no_tree(ctx, deep, on_b, NULL, "a");
    CHECK_OK(dp_zero_grad(one));
    /* and what may be: a wrapper as a child, around what is elsewhere */
    dp_module *two = tree_with(ctx, "two", on_b, NULL, NULL);
    CHECK_OK(dp_zero_grad(two));
    CHECK_OK(dp_module_destroy(two));
    CHECK_OK(dp_module_destroy(one));
}

/* ---- errors on their way out ----------------------------------------------------------------- */

static dp_status create_but_one(const dp_replica_info *info, void **own)
{
    *own = info->ctx;
    return info->replica < 2 ? DP_OK : dp_error(DP_ERR_USER, "two are enough");
}

static void destroy_and_ask(void *own)
{
    dp_info info;
    CHECK_OK(dp_info_get(own, &info));
}

/* What is cleaned up after an error may call what it likes: the error is still told. */
TEST_BACKENDS(an_error_outlives_what_is_cleaned_up)
{
    dp_module *net = NULL, *par = NULL;
    CHECK_OK(dp_module_create(ctx,
                              &(dp_module_config){.name = "net",
                                                  .methods = net_methods,
                                                  .method_count = 2,
                                                  .replica_create = create_but_one,
                                                  .replica_destroy = destroy_and_ask},
                              &net));
    CHECK_ERROR(dp_data_parallel(net, NULL, &par), DP_ERR_USER,
                "replica_create of 'net', replica 2: two are enough");
    CHECK_OK(dp_module_destroy(net));
}

/* ---- what is nobody else's ------------------------------------------------------------------- */

typedef struct
    neighbours { /* modules that a function asks to be zeroed, and on which rank it may */
    dp_module *module[3];
    int allowed[3]; /* a rank, or -1 */
} neighbours;

static neighbours next_door;

static void try_neighbours(int rank)
{
    for (int i = 0; i < 3; i++) {
        if (next_door.module[i] != NULL && next_door.allowed[i] == rank) {
            CHECK_OK(dp_zero_grad(next_door.module[i]));
        } else if (next_door.module[i] != NULL) {
            CHECK_ERROR(dp_zero_grad(next_door.module[i]), DP_ERR_STATE, "while the other devices");
        }
    }
}

static dp_status neighbour_forward(dp_call *call)
{
    call->out = dp_none();
    try_neighbours(call->local_rank);
    return DP_OK;
}

static dp_status neighbour_run(int rank, dp_scope *scope, void *user)
{
    (void)scope;
    (void)user;
    try_neighbours(rank);
    return DP_OK;
}

static const dp_method neighbour_methods[] = {{"forward", neighbour_forward}};

static dp_module *neighbour(dp_ctx *ctx, const char *name, int rank, dp_module *const *children,
                            size_t child_count)
{
    dp_module *made = NULL;
    CHECK_OK(dp_module_create(ctx,
                              &(dp_module_config){.name = name,
                                                  .methods = neighbour_methods,
                                                  .method_count = 1,
                                                  .children = children,
                                                  .child_count = child_count,
                                                  .local_rank = rank},
                              &made));
    return made;
}

static void run_neighbours(dp_module *module, dp_scope *scope, const int *ranks)
{
    dp_module *par = NULL;
    dp_value out;
    CHECK_OK(dp_data_parallel(
        module, &(dp_parallel_config){.local_ranks = ranks, .local_rank_count = 2}, &par));
    CHECK_OK(dp_invoke(par, scope, "forward", batch_of(scope, 2), dp_none(), NULL, &out, NULL));
}

/* The whole tree has to lie on the rank's device, and no part of it may be what all are running. */
TEST_BACKENDS(a_module_is_the_ranks_own_with_its_whole_tree)
{
    static const int twice[] = {0, 0};
    dp_module *runs = neighbour(ctx, "runs", 0, NULL, 0);
    dp_module *beside = neighbour(ctx, "beside", 0, NULL, 0);
    dp_module *family = neighbour(ctx, "family", 0, (dp_module *[]){runs, beside}, 2);
    dp_module *far = neighbour(ctx, "far", 0, NULL, 0);
    dp_module *split = neighbour(ctx, "split", 1, &far, 1);
    dp_module *own = neighbour(ctx, "own", 1, NULL, 0);
    next_door = (neighbours){{family, beside, own}, {-1, -1, 1}};
    run_neighbours(runs, scope, two_ranks);
    next_door = (neighbours){{split, far, own}, {-1, -1, 1}};
    run_neighbours(runs, scope, two_ranks);
    CHECK_OK(dp_run(ctx, scope, neighbour_run, NULL));
    next_door = (neighbours){{family, runs, beside}, {0, 0, 0}}; /* which nobody runs now */
    CHECK_OK(dp_run(ctx, scope, neighbour_run, NULL));
    next_door = (neighbours){{neighbour(ctx, "third", 0, NULL, 0)}, {-1}}; /* of two on a device */
    run_neighbours(runs, scope, twice);
}

static dp_status outer_forward(dp_call *call)
{
    return dp_call_child(call, "data_parallel", "forward", call->args, dp_none(), &call->out, NULL);
}

static dp_status run_outer(int rank, dp_scope *scope, void *user)
{
    dp_module *const *outer = user;
    dp_value out;
    if (rank >= 2) {
        return DP_OK;
    }
    TRY(dp_invoke(outer[rank], scope, "forward", batch_of(scope, 2), dp_none(), NULL, &out, NULL));
    CHECK_INT(out.kind, DP_TENSOR);
    CHECK(tree_same_device(out.as.t->device, dp_local_device(now.ctx, rank)));
    return DP_OK;
}

/* A child that is a wrapper of two devices has the rank's alone, as in a replica. */
TEST_BACKENDS(wrappers_under_dp_run_have_one_device)
{
    static const dp_method methods[] = {{"forward", outer_forward}};
    static const int ranks[2][2] = {{0, 1}, {1, 0}};
    dp_module *outer[2];
    now.ctx = ctx;
    for (int rank = 0; rank < 2; rank++) {
        dp_module *par = NULL;
        CHECK_OK(dp_data_parallel(
            net_create(ctx, &stage_rows, rank),
            &(dp_parallel_config){.local_ranks = ranks[rank], .local_rank_count = 2}, &par));
        CHECK_OK(dp_module_create(ctx,
                                  &(dp_module_config){.name = "outer",
                                                      .methods = methods,
                                                      .method_count = 1,
                                                      .children = &par,
                                                      .child_count = 1,
                                                      .local_rank = rank},
                                  &outer[rank]));
    }
    CHECK_OK(dp_run(ctx, scope, run_outer, outer));
}
