/* test_mistakes.c - the mistakes of beginners, each made once, and what says so: an error of the
   call, a line of the log, $DP_DEBUG=check, dp_self_check; or nothing. At most three say nothing.
   $MISTAKE is the name of one, to see what it says. */

#include "careless.h"
#include "dp_check.h"

typedef enum said_by { BY_ERROR, BY_LOG, BY_CHECK, BY_SELF_CHECK, BY_NOTHING } said_by;

typedef struct stage { /* where a mistake is made: a net on two devices */
    warned log;
    dp_ctx *ctx;
    dp_module *net, *par;
    dp_optim *sgd;
    dp_scope *scope;
    careless state;
    meeting *m; /* NULL: one process */
} stage;

typedef struct mistake {
    const char *name;
    said_by by;
    const char *says; /* a part of the sentence */
    dp_status (*make)(stage *s);
    int processes; /* 0: one */
    fault made;
} mistake;

static dp_value rows_of(const stage *s, int64_t rows)
{
    return careless_batch(s->scope, rows, s->m != NULL ? s->m->process : 0);
}

static dp_status train_on(stage *s, dp_module *module, dp_value batch)
{
    dp_value log;
    return dp_train_step(module, s->scope, batch, s->sgd, &log);
}

static dp_status forward_of(stage *s, dp_pass **pass)
{
    dp_value out;
    return dp_invoke(s->par, s->scope, "forward", dp_none(), rows_of(s, 4), NULL, &out, pass);
}

/* ---- data ------------------------------------------------------------------------------------ */

static dp_status other_key(stage *s)
{
    return train_on(s, s->par, DP_DICT(s->scope, {"image", dp_get(rows_of(s, 4), "x")}));
}

static dp_status other_dtype(stage *s)
{
    static const double x[8];
    return train_on(s, s->par,
                    DP_DICT(s->scope, {"x", dp_array(s->scope, x, DP_F64, DP_SHAPE(2, COLUMNS))},
                            {"y", dp_array(s->scope, x, DP_F32, DP_SHAPE(2))}));
}

static dp_status other_dims(stage *s)
{
    static const float x[8];
    return train_on(s, s->par,
                    DP_DICT(s->scope, {"x", dp_array(s->scope, x, DP_F32, DP_SHAPE(8))},
                            {"y", dp_array(s->scope, x, DP_F32, DP_SHAPE(8))}));
}

static dp_status other_rows(stage *s)
{
    static const float x[16];
    return train_on(s, s->par,
                    DP_DICT(s->scope, {"x", dp_array(s->scope, x, DP_F32, DP_SHAPE(4, COLUMNS))},
                            {"y", dp_array(s->scope, x, DP_F32, DP_SHAPE(3))}));
}

static dp_status not_a_dict(stage *s)
{
    return train_on(s, s->par, dp_float(1));
}

static dp_status mode_in_data(stage *s)
{
    return train_on(s, s->par, DP_DICT(s->scope, {"mode", dp_int(1)}));
}

static dp_status item_of_nothing(stage *s)
{
    double loss;
    return dp_item(s->ctx, dp_get(DP_DICT(s->scope, {"loss", dp_float(1)}), "los"), &loss);
}

static dp_status few_rows(stage *s)
{
    return careless_steps(s->par, s->sgd, 40, 1, 0);
}

/* ---- methods --------------------------------------------------------------------------------- */

static dp_status one_step(stage *s)
{
    return careless_steps(s->par, s->sgd, 2, 4, s->m != NULL ? s->m->process : 0);
}

static dp_status nothing_out(dp_call *call)
{
    (void)call;
    return DP_OK;
}

static dp_status no_loss_out(dp_call *call)
{
    call->out = DP_DICT(call->scope, {"los", dp_float(1)});
    return DP_OK;
}

static dp_status grad_in_forward(dp_call *call)
{
    call->out = dp_float(1);
    return dp_grad(call, 0) != NULL ? DP_OK : DP_ERR_STATE;
}

static dp_status closes(dp_call *call)
{
    call->out = dp_float(1);
    dp_close(call->ctx);
    return dp_error(DP_ERR_STATE, "%s", dp_last_error());
}

static dp_status no_such_child(dp_call *call)
{
    return dp_call_child(call, "head", "forward", dp_none(), dp_none(), &call->out, NULL);
}

static dp_status train_another(stage *s, dp_status (*forward)(dp_call *call))
{
    const dp_method methods[] = {{"forward", forward}, {"backward", careless_backward}};
    static const dp_param_config param = {.name = "w", .dtype = DP_F32, .ndim = 1, .shape = {4}};
    dp_module *net = NULL;
    CHECK_OK(dp_module_create(s->ctx,
                              &(dp_module_config){.name = "other",
                                                  .methods = methods,
                                                  .method_count = 2,
                                                  .params = &param,
                                                  .param_count = 1},
                              &net));
    dp_value log;
    return dp_train_step(net, s->scope, rows_of(s, 4), NULL, &log);
}

static dp_status returns_nothing(stage *s)
{
    return train_another(s, nothing_out);
}

static dp_status returns_no_loss(stage *s)
{
    return train_another(s, no_loss_out);
}

static dp_status asks_for_grad(stage *s)
{
    return train_another(s, grad_in_forward);
}

static dp_status closes_inside(stage *s)
{
    return train_another(s, closes);
}

static dp_status calls_nobody(stage *s)
{
    return train_another(s, no_such_child);
}

static dp_status other_method(stage *s)
{
    dp_value out;
    return dp_invoke(s->par, s->scope, "foward", dp_none(), rows_of(s, 4), NULL, &out, NULL);
}

static dp_status checks_itself(stage *s)
{
    return dp_self_check(s->net, rows_of(s, 6), NULL, NULL);
}

/* ---- passes and updates ---------------------------------------------------------------------- */

static dp_status two_backwards(stage *s)
{
    dp_pass *pass;
    CHECK_OK(forward_of(s, &pass));
    CHECK_OK(dp_backward(pass, dp_float(1), NULL));
    return dp_backward(pass, dp_float(1), NULL);
}

static dp_status late_backward(stage *s)
{
    dp_pass *pass;
    CHECK_OK(forward_of(s, &pass));
    dp_scope_end(s->scope);
    s->scope = dp_scope_begin(s->ctx);
    return dp_backward(pass, dp_float(1), NULL);
}

static dp_status no_pass(stage *s)
{
    (void)s;
    return dp_backward(NULL, dp_float(1), NULL);
}

static dp_status update_too_early(stage *s)
{
    dp_pass *pass;
    dp_tensor data;
    CHECK_OK(forward_of(s, &pass));
    CHECK_OK(dp_params_edit(s->net, 0, &data, NULL));
    return dp_backward(pass, dp_float(1), NULL);
}

static void step_by_hand(stage *s)
{
    for (size_t p = 0; p < 2; p++) {
        dp_tensor data, grad;
        CHECK_OK(dp_params_edit(s->net, p, &data, &grad));
        CHECK_OK(dp_axpby(s->ctx, 1, &data, -0.01, &grad, &data));
    }
}

static dp_status never_zeroes(stage *s)
{
    dp_status status = DP_OK;
    for (int i = 0; i < 3 && status == DP_OK; i++) {
        dp_pass *pass;
        CHECK_OK(forward_of(s, &pass));
        status = dp_backward(pass, dp_float(1), NULL);
        if (status == DP_OK)
            step_by_hand(s);
    }
    return status;
}

static dp_status never_zeroes_everywhere(stage *s)
{
    CHECK_OK(dp_everywhere(s->net, &s->par));
    return never_zeroes(s);
}

static dp_status no_rate(stage *s)
{
    return dp_optim_create(s->par, &(dp_optim_config){.rule = NULL}, &s->sgd);
}

static dp_status other_gradient(stage *s)
{
    dp_pass *pass;
    CHECK_OK(forward_of(s, &pass));
    return dp_backward(pass, DP_DICT(s->scope, {"los", dp_float(1)}), NULL);
}

static dp_status wraps_twice(stage *s)
{
    dp_module *outer;
    CHECK_OK(dp_everywhere(s->net, &s->par));
    return dp_everywhere(s->par, &outer);
}

/* ---- lifetimes ------------------------------------------------------------------------------- */

static dp_status ended_scope(stage *s)
{
    dp_value log;
    dp_scope *scope = dp_scope_begin(s->ctx);
    dp_scope_end(scope);
    return dp_train_step(s->par, scope, rows_of(s, 4), NULL, &log);
}

static dp_status destroyed_module(stage *s)
{
    dp_module *net = careless_create(s->ctx, &s->state);
    CHECK_OK(dp_module_destroy(net));
    return train_on(s, net, rows_of(s, 4));
}

static dp_status closed_context(stage *s)
{
    dp_ctx *ctx = open_cpus(1);
    (void)s;
    dp_close(ctx);
    return dp_wait(ctx);
}

/* So large that nothing else of the step gets the same memory. */
static dp_status batch_of_an_ended_scope(stage *s)
{
    dp_scope *scope = dp_scope_begin(s->ctx);
    const float *x = dp_get(careless_batch(scope, 64, 0), "x").as.t->data;
    dp_scope_end(scope);
    return train_on(s, s->par,
                    DP_DICT(s->scope, {"x", dp_array(s->scope, x, DP_F32, DP_SHAPE(64, COLUMNS))},
                            {"y", dp_get(rows_of(s, 64), "y")}));
}

/* ---- devices --------------------------------------------------------------------------------- */

static dp_status too_many_devices(stage *s)
{
    dp_ctx *ctx = NULL;
    dp_config config = config_heard(&s->log, 4);
    config.thread_count = 2;
    CHECK_OK(dp_open(&config, &ctx));
    dp_close(ctx);
    return DP_OK;
}

static dp_status negative_count(stage *s)
{
    dp_ctx *ctx = NULL;
    (void)s;
    return dp_open(&(dp_config){.device_count = -1}, &ctx);
}

static dp_status no_such_rank(stage *s)
{
    dp_module *par;
    return dp_data_parallel(s->net, &(dp_parallel_config){DP_LOCAL_RANKS(0, 7)}, &par);
}

/* ---- jobs ------------------------------------------------------------------------------------ */

static dp_status trains_apart(stage *s)
{
    return careless_steps(s->par, s->sgd, 40, 4, s->m->process);
}

static dp_status same_rows(stage *s)
{
    CHECK_OK(dp_everywhere(s->net, &s->par));
    return careless_steps(s->par, NULL, 2, 4, 0);
}

static dp_status loads_on_one(stage *s)
{
    const float w[COLUMNS] = {5, 5, 5, 5};
    CHECK_OK(dp_everywhere(s->net, &s->par));
    if (s->m->process == 1)
        CHECK_OK(dp_params_write(s->net, 0, w, sizeof w));
    return careless_steps(s->par, NULL, 2, 4, s->m->process);
}

static dp_status other_collective(stage *s)
{
    float one = 1;
    int64_t two = 2;
    dp_part parts[2] = {{&one, &one, NULL}, {&one, &one, NULL}};
    if (s->m->process == 0)
        return dp_all_reduce(s->ctx, parts, 0, DP_F32, DP_OP_SUM) == DP_OK
                   ? dp_all_reduce_i64(s->ctx, &two, 1, DP_OP_SUM)
                   : DP_ERR_INTERNAL;
    return dp_all_reduce_i64(s->ctx, &two, 1, DP_OP_MAX);
}

static dp_status other_settings(stage *s)
{
    const dp_distributed_config config = {.reduction = s->m->process == 0 ? DP_SUM_RANKS
                                                                          : DP_MEAN_RANKS};
    return dp_distributed(s->net, &config, &s->par);
}

static dp_status steps_unreduced(stage *s)
{
    dp_pass *pass;
    dp_value out;
    CHECK_OK(dp_distributed(s->net, NULL, &s->par));
    CHECK_OK(dp_optim_create(s->par, &(dp_optim_config){.hyper.lr = 0.1}, &s->sgd));
    CHECK_OK(dp_invoke(s->par, s->scope, "forward", dp_none(), rows_of(s, 4),
                       &(dp_pass_config){.no_sync = true}, &out, &pass));
    CHECK_OK(dp_backward(pass, dp_float(1), NULL));
    return dp_optim_step(s->sgd);
}

/* ---- what nobody can see --------------------------------------------------------------------- */

static dp_status other_labels(stage *s) /* they belong to other rows */
{
    dp_value batch = rows_of(s, 4);
    float *y = dp_get(batch, "y").as.t->data, first = y[0];
    y[0] = y[3];
    y[3] = first;
    return train_on(s, s->par, batch);
}

static dp_status evaluates_in_training(stage *s) /* dp_module_train(net, false) is forgotten */
{
    dp_value out;
    return dp_predict_step(s->par, s->scope, rows_of(s, 4), &out);
}

static const mistake mistakes[] = {
    {"another key", BY_ERROR, "there is no argument 'x'", other_key, 0, NO_FAULT},
    {"another dtype", BY_ERROR, "x is f64, not f32", other_dtype, 0, NO_FAULT},
    {"other dims", BY_ERROR, "x has 1 dim, not 2", other_dims, 0, NO_FAULT},
    {"other rows", BY_ERROR, "they cannot be cut alike", other_rows, 0, NO_FAULT},
    {"no dict", BY_ERROR, "data is a float, not a dict", not_a_dict, 0, NO_FAULT},
    {"the step's own key", BY_ERROR,
     "a key 'mode', which the step itself adds for the forward, as 'loss'", mode_in_data, 0,
     NO_FAULT},
    {"an entry that is not there", BY_ERROR, "none, which dp_get gives for a key", item_of_nothing,
     0, NO_FAULT},
    {"fewer rows than devices", BY_LOG, "had rows for 1 of 2 devices", few_rows, 0, NO_FAULT},
    {"nothing is returned", BY_ERROR, "without setting call->out", returns_nothing, 0, NO_FAULT},
    {"no loss is returned", BY_ERROR, "no key of what forward returned holds 'loss'",
     returns_no_loss, 0, NO_FAULT},
    {"a gradient in forward", BY_ERROR, "gradients exist only in backward", asks_for_grad, 0,
     NO_FAULT},
    {"dp_close in a method", BY_ERROR, "the context is in use by", closes_inside, 0, NO_FAULT},
    {"a child that is not there", BY_ERROR, "has no child 'head'", calls_nobody, 0, NO_FAULT},
    {"a method that is not there", BY_ERROR, "has no method 'foward'", other_method, 0, NO_FAULT},
    {"= for +=", BY_CHECK, "sets the gradient of 'w'", one_step, 0, ASSIGNS},
    {"= for += in one place", BY_CHECK, "sets the gradient of 'b'", one_step, 0, ASSIGNS_ONE},
    {"a static variable from forward to backward", BY_CHECK, "keep something in the same memory",
     one_step, 0, SHARES_MEMORY},
    {"a static variable in forward", BY_CHECK, "they write to the same memory", one_step, 0,
     SHARES_SCRATCH},
    {"a loss that is NaN", BY_CHECK, "'loss' of 'net' is nan in step 1", one_step, 0, LOSS_IS_NAN},
    {"a gradient that is infinite", BY_CHECK, "has inf at [2]", one_step, 0, GRAD_IS_INF},
    {"a read behind the end", BY_CHECK, "is nan in step 1", one_step, 0, READS_BEYOND},
    {"a write behind the end", BY_CHECK, "something was written behind a piece", one_step, 0,
     WRITES_BEYOND},
    {"memory that nobody wrote", BY_CHECK, "is nan in step 1", one_step, 0, READS_UNWRITTEN},
    {"a method that writes to its batch", BY_CHECK, "write to the batch", one_step, 0, MOVES_INPUT},
    {"a wrong gradient", BY_SELF_CHECK, "gradient of 'w' at", checks_itself, 0, GRAD_IS_TWICE},
    {"= for +=, and it is asked", BY_SELF_CHECK, "is set, to ", checks_itself, 0, ASSIGNS},
    {"a random model", BY_SELF_CHECK, "in another on the same device", checks_itself, 0, IS_RANDOM},
    {"two backwards of a pass", BY_ERROR, "had its backward already", two_backwards, 0, NO_FAULT},
    {"a pass whose scope has ended", BY_ERROR, "or its scope has ended", late_backward, 0,
     NO_FAULT},
    {"a forward without a pass", BY_ERROR, "pass is NULL", no_pass, 0, NO_FAULT},
    {"an update before the backward", BY_ERROR, "was edited after the forward", update_too_early, 0,
     NO_FAULT},
    {"gradients that are never zeroed", BY_CHECK, "its gradient was not cleared", never_zeroes, 0,
     NO_FAULT},
    {"the same over ranks", BY_ERROR, "are already reduced: call dp_zero_grad",
     never_zeroes_everywhere, 0, NO_FAULT},
    {"no learning rate", BY_ERROR, "lr", no_rate, 0, NO_FAULT},
    {"a gradient of another output", BY_ERROR, "key 'los', the output has not", other_gradient, 0,
     NO_FAULT},
    {"a wrapper around a wrapper of all ranks", BY_ERROR, "it cannot be wrapped again", wraps_twice,
     0, NO_FAULT},
    {"a scope that has ended", BY_ERROR, "the scope has ended", ended_scope, 0, NO_FAULT},
    {"a module that was destroyed", BY_ERROR, "the module was destroyed", destroyed_module, 0,
     NO_FAULT},
    {"a context that is closed", BY_ERROR, "closed", closed_context, 0, NO_FAULT},
    {"a batch of a scope that has ended", BY_CHECK, "the batch has nan", batch_of_an_ended_scope, 0,
     NO_FAULT},
    {"more devices than cores", BY_LOG, "4 devices and 2 cores", too_many_devices, 0, NO_FAULT},
    {"a negative number", BY_ERROR, "device_count is negative", negative_count, 0, NO_FAULT},
    {"a device that is not there", BY_ERROR, "local", no_such_rank, 0, NO_FAULT},
    {"processes that train apart", BY_LOG, "each trains a model of its own", trains_apart, 2,
     NO_FAULT},
    {"the same rows everywhere", BY_CHECK, "the same rows", same_rows, 2, NO_FAULT},
    {"parameters loaded by one process", BY_CHECK, "different parameters", loads_on_one, 2,
     NO_FAULT},
    {"another call on one rank", BY_ERROR, "all must make the same calls", other_collective, 2,
     NO_FAULT},
    {"other settings on one rank", BY_ERROR, "rank 2 has", other_settings, 2, NO_FAULT},
    {"a step by gradients of one rank", BY_ERROR, "differs from rank to rank", steps_unreduced, 2,
     NO_FAULT},
    {"labels of other rows", BY_NOTHING, NULL, other_labels, 0, NO_FAULT},
    {"an evaluation in training mode", BY_NOTHING, NULL, evaluates_in_training, 0, NO_FAULT},
};
enum { MISTAKES = sizeof mistakes / sizeof mistakes[0] };

static const mistake *now;

/* Checks that the mistake was told in the way that the table says. */
static void check_said(const stage *s, dp_status status)
{
    bool fails = now->by != BY_LOG && now->by != BY_NOTHING;
    if ((status != DP_OK) != fails)
        test_fail(__FILE__, __LINE__, "%s: %s: %s", now->name, dp_status_name(status),
                  status != DP_OK ? dp_last_error() : "");
    if (now->by == BY_CHECK)
        CHECK_STATUS(status, DP_ERR_CHECK);
    if (fails)
        CHECK_SAYS(dp_last_error(), now->says);
    if (now->by == BY_LOG && (s->m == NULL || s->m->process == 0))
        CHECK_SAYS(s->log.text, now->says);
    if (now->by == BY_NOTHING)
        CHECK_STR(s->log.text, "");
}

static void make_mistake(meeting *m)
{
    static stage s;
    dp_config config = config_heard(&s.log, 2);
    s.m = m;
    if (m != NULL)
        config.bootstrap = (dp_bootstrap){meeting_all_gather, m, m->process, m->process_count};
    config.check = now->by == BY_CHECK || now->by == BY_NOTHING ? 1 : -1;
    CHECK_OK(dp_open(&config, &s.ctx));
    s.state = (careless){now->made, DP_F32};
    s.net = careless_create(s.ctx, &s.state);
    CHECK_OK(dp_data_parallel(s.net, NULL, &s.par));
    s.sgd = careless_optim(s.par);
    s.scope = dp_scope_begin(s.ctx);
    check_said(&s, now->make(&s));
    dp_close(s.ctx);
}

static void mistake_alone(void)
{
    pid_t pid = fork();
    int status = 0;
    if (pid == 0) {
        make_mistake(NULL);
        exit(EXIT_SUCCESS);
    }
    CHECK_INT(waitpid(pid, &status, 0), pid);
    if (status != 0)
        test_fail(__FILE__, __LINE__, "mistake '%s'", now->name);
}

TEST_SLOW(mistakes_are_told, 60)
{
    const char *only = getenv("MISTAKE");
    for (int i = 0; i < MISTAKES; i++) {
        now = &mistakes[i];
        if ((only != NULL && strcmp(only, now->name) != 0) ||
            ((WITH_ASAN || WITH_TSAN) && now->by == BY_CHECK))
            continue;
        if (now->processes == 0)
            mistake_alone();
    }
}

TEST_SLOW(mistakes_of_jobs_are_told, 60)
{
    for (int i = 0; i < MISTAKES; i++) {
        now = &mistakes[i];
        if (now->processes > 0)
            in_processes(now->processes, make_mistake);
    }
}

TEST(at_most_three_mistakes_say_nothing)
{
    int silent = 0;
    for (int i = 0; i < MISTAKES; i++)
        silent += mistakes[i].by == BY_NOTHING;
    CHECK(MISTAKES >= 47 && silent <= 3);
}
