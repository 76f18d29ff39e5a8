/* test_checks.c - dp/checks.h: what is wrong, but legal. */

#include "careless.h"
#include "dp_local.h"

static const careless faultless = {NO_FAULT, DP_F32};

/* ---- processes that train apart -------------------------------------------------------------- */

static dp_module *data_parallel(dp_ctx *ctx)
{
    dp_module *par = NULL;
    CHECK_OK(dp_data_parallel(careless_create(ctx, &faultless), NULL, &par));
    return par;
}

static dp_ctx *open_heard(meeting *m, warned *log, int devices)
{
    dp_ctx *ctx = NULL;
    dp_config config = config_heard(log, devices);
    config.bootstrap = (dp_bootstrap){meeting_all_gather, m, m->process, m->process_count};
    CHECK_OK(dp_open(&config, &ctx));
    return ctx;
}

/* Process 0 says so, once; numbers that travel change nothing. */
static void train_apart(meeting *m)
{
    warned log;
    dp_value mean;
    dp_ctx *ctx = open_heard(m, &log, 2);
    dp_module *par = data_parallel(ctx);
    dp_optim *sgd = careless_optim(par);
    dp_scope *scope = dp_scope_begin(ctx);
    for (int i = 0; i < 100; i++) {
        CHECK_OK(careless_steps(par, sgd, 1, 4, m->process));
        CHECK_OK(dp_log_mean(ctx, scope, DP_DICT(scope, {"loss", dp_float(1)}), 1, &mean));
        CHECK_INT(log.count, m->process == 0 && i >= 32);
    }
    if (m->process == 0) {
        CHECK_SAYS(log.text, "'net' was updated 32 times");
        CHECK_SAYS(log.text, "between the 2 processes: each trains a model of its own");
        CHECK_SAYS(log.text, "dp_everywhere and dp_distributed train one together");
    }
    dp_close(ctx);
}

TEST(processes_that_train_apart_are_told)
{
    in_processes(2, train_apart);
}

static void keep_to_themselves(dp_ctx *ctx, const warned *log, int steps)
{
    dp_module *par = data_parallel(ctx);
    CHECK_OK(careless_steps(par, careless_optim(par), steps, 4, 0));
    CHECK_STR(log->text, "");
}

/* A pass without an update is an analysis: nothing is learned. */
static void only_look(meeting *m)
{
    warned log;
    dp_ctx *ctx = open_heard(m, &log, 1);
    keep_to_themselves(ctx, &log, 31);
    dp_module *par = data_parallel(ctx);
    for (int i = 0; i < 100; i++) {
        dp_value out;
        dp_scope *scope = dp_scope_begin(ctx);
        CHECK_OK(dp_train_step(par, scope, careless_batch(scope, 4, i), NULL, &out));
        dp_scope_end(scope);
    }
    CHECK_STR(log.text, "");
    dp_close(ctx);
}

TEST(backwards_without_updates_are_no_training_apart)
{
    in_processes(2, only_look);
}

static void exchange_by_hand(meeting *m)
{
    warned log;
    float sum = 1;
    dp_ctx *ctx = open_heard(m, &log, 1);
    dp_module *par = data_parallel(ctx);
    dp_optim *sgd = careless_optim(par);
    dp_part part = {.send = &sum, .recv = &sum};
    for (int i = 0; i < 100; i++) {
        CHECK_OK(careless_steps(par, sgd, 1, 4, m->process));
        if (i % 30 == 29)
            CHECK_OK(dp_all_reduce(ctx, &part, 1, DP_F32, DP_OP_SUM));
    }
    CHECK_STR(log.text, "");
    dp_close(ctx);
}

TEST(gradients_that_are_reduced_by_hand_are_no_training_apart)
{
    in_processes(2, exchange_by_hand);
}

static void average_seldom(meeting *m)
{
    warned log;
    dp_local *local;
    dp_ctx *ctx = open_heard(m, &log, 1);
    dp_module *net = careless_create(ctx, &faultless);
    CHECK_OK(dp_local_create(net, &(dp_local_config){.every = 200}, &local));
    CHECK_OK(careless_steps(net, careless_optim(net), 150, 4, m->process));
    CHECK_STR(log.text, "");
    dp_close(ctx);
}

TEST(parameters_that_are_averaged_seldom_are_no_training_apart)
{
    in_processes(2, average_seldom);
}

static void train_together(meeting *m)
{
    warned log;
    dp_module *par;
    dp_ctx *ctx = open_heard(m, &log, 1);
    CHECK_OK(dp_everywhere(careless_create(ctx, &faultless), &par));
    CHECK_OK(careless_steps(par, careless_optim(par), 100, 4, m->process));
    CHECK_STR(log.text, "");
    dp_close(ctx);
}

TEST(processes_that_train_together_are_not_told)
{
    in_processes(2, train_together);
}

TEST(a_process_alone_trains_apart_from_nobody)
{
    warned log;
    dp_ctx *ctx = NULL;
    const dp_config config = config_heard(&log, 2);
    CHECK_OK(dp_open(&config, &ctx));
    keep_to_themselves(ctx, &log, 100);
    dp_close(ctx);
}

/* ---- devices without work -------------------------------------------------------------------- */

TEST(batches_of_fewer_rows_than_devices_are_told_once)
{
    warned log;
    dp_ctx *ctx = NULL;
    dp_config config = config_heard(&log, 4);
    CHECK_OK(dp_open(&config, &ctx));
    dp_module *par = data_parallel(ctx);
    dp_optim *sgd = careless_optim(par);
    for (int i = 0; i < 3; i++) { /* one that is large enough, and it begins anew */
        CHECK_OK(careless_steps(par, sgd, 31, 3, 0));
        CHECK_OK(careless_steps(par, sgd, 1, 4, 0));
        CHECK_OK(careless_steps(par, sgd, 31, 0, 0));
        CHECK_OK(careless_steps(par, sgd, 1, 4, 0));
    }
    CHECK_STR(log.text, "");
    CHECK_OK(careless_steps(par, sgd, 100, 3, 0));
    CHECK_INT(log.count, 1);
    CHECK_SAYS(log.text, "'net': the last 32 batches had rows for 3 of 4 devices");
    dp_close(ctx);
}

TEST(batches_of_one_row_or_none_are_told)
{
    for (int devices = 1; devices <= 2; devices++) {
        for (int rows = 0; rows < devices; rows++) {
            char begin[64];
            warned log;
            dp_ctx *ctx = NULL;
            dp_config config = config_heard(&log, devices);
            CHECK_OK(dp_open(&config, &ctx));
            dp_module *par = data_parallel(ctx);
            CHECK_OK(careless_steps(par, careless_optim(par), 40, rows, 0));
            CHECK_INT(log.count, 1);
            snprintf(begin, sizeof begin,
                     "'net': the last 32 batches had rows for %d of %d devices", rows, devices);
            CHECK_SAYS(log.text, begin);
            dp_close(ctx);
        }
    }
}

static void train_without_rows(meeting *m)
{
    warned log;
    dp_module *par;
    dp_ctx *ctx = open_heard(m, &log, 1);
    CHECK_OK(dp_everywhere(careless_create(ctx, &faultless), &par));
    CHECK_OK(careless_steps(par, careless_optim(par), 40, m->process == 0 ? 4 : 0, m->process));
    CHECK_STR(log.text, "");
    dp_close(ctx);
}

TEST(process_without_rows_beside_others_is_not_told)
{
    in_processes(2, train_without_rows);
}

static dp_status no_device(const dp_host *host, int *out)
{
    (void)host;
    *out = 0;
    return DP_OK;
}

TEST(the_host_in_place_of_other_devices_is_told)
{
    warned log;
    dp_ctx *ctx = NULL;
    dp_config config = config_heard(&log, 1);
    dp_device_ops none = *dp_cpu();
    none.name = "toys";
    none.count = no_device;
    config.backends = (const dp_device_ops *const[]){&none, dp_cpu(), NULL};
    CHECK_OK(dp_open(&config, &ctx));
    CHECK_INT(log.count, 1);
    CHECK_SAYS(log.text, "cpu is used, because there are no other devices (toys: no device)");
    dp_close(ctx);
}

TEST(more_devices_than_cores_are_told)
{
    warned log;
    dp_ctx *ctx = NULL;
    dp_config config = config_heard(&log, 4);
    config.thread_count = 3;
    CHECK_OK(dp_open(&config, &ctx));
    CHECK_SAYS(log.text, "4 devices and 3 cores: they take turns, so 3 devices would be as fast");
    dp_close(ctx);
    config = config_heard(&log, 4);
    CHECK_OK(dp_open(&config, &ctx));
    CHECK_STR(log.text, "");
    dp_close(ctx);
    config = config_heard(&log, 2);
    config.thread_count = 2;
    config.shards = 8; /* as many as they are */
    CHECK_OK(dp_open(&config, &ctx));
    CHECK_STR(log.text, "");
    dp_close(ctx);
}

/* ---- checked steps --------------------------------------------------------------------------- */

typedef struct checked { /* a net that is trained on two devices */
    warned log;
    dp_ctx *ctx;
    dp_module *net, *par;
    careless state;
} checked;

typedef dp_status (*wrap_fn)(dp_module *net, dp_module **out);

static dp_status wrap_data(dp_module *net, dp_module **out)
{
    return dp_data_parallel(net, NULL, out);
}

static dp_status wrap_plain(dp_module *net, dp_module **out)
{
    *out = net;
    return DP_OK;
}

static dp_status wrap_mean_ranks(dp_module *net, dp_module **out)
{
    return dp_distributed(net, NULL, out);
}

static const wrap_fn wraps[] = {wrap_plain, wrap_data, dp_everywhere, wrap_mean_ranks};
enum { WRAPS = sizeof wraps / sizeof wraps[0] };

static void checked_begin(checked *c, fault made, wrap_fn wrap, int every, bool warns)
{
    dp_config config = config_heard(&c->log, 2);
    config.check = every;
    config.check_warns = warns;
    CHECK_OK(dp_open(&config, &c->ctx));
    c->state = (careless){made, DP_F32};
    c->net = careless_create(c->ctx, &c->state);
    CHECK_OK(wrap(c->net, &c->par));
}

static void checked_end(checked *c)
{
    dp_close(c->ctx);
}

/* The first step of `every` is checked, and it fails. */
static void check_finds(fault made, const char *part)
{
    for (int w = 0; w < WRAPS; w++) {
        checked c;
        checked_begin(&c, made, wraps[w], 100, false);
        CHECK_ERROR(careless_steps(c.par, careless_optim(c.par), 3, 4, 0), DP_ERR_CHECK, part);
        CHECK_STR(c.log.text, "");
        checked_end(&c);
        checked_begin(&c, made, wraps[w], 100, true);
        CHECK_OK(careless_steps(c.par, careless_optim(c.par), 1, 4, 0));
        CHECK_SAYS(c.log.text, part);
        checked_end(&c);
    }
}

TEST(a_model_without_faults_has_none)
{
    for (int w = 0; w < WRAPS; w++)
        for (int64_t rows = 1; rows < 6; rows++) {
            checked c;
            checked_begin(&c, NO_FAULT, wraps[w], 2, false);
            CHECK_OK(careless_steps(c.par, careless_optim(c.par), 9, rows, 0));
            CHECK_STR(c.log.text, "");
            checked_end(&c);
        }
}

TEST(a_loss_that_is_not_finite_is_named)
{
    check_finds(LOSS_IS_NAN, "'loss' of 'net' is nan in step 1, on rank 0: its batch and its "
                             "parameters are finite");
}

TEST(a_gradient_that_is_not_finite_is_named)
{
    check_finds(GRAD_IS_INF, "the gradient of 'w' of 'net' has inf at [2] in step 1, on rank 0");
}

/* From the third step on: found in the fifth, where each fourth is looked at. */
TEST(the_first_and_each_nth_step_are_checked)
{
    checked c;
    checked_begin(&c, LOSS_IS_LATE_NAN, wrap_plain, 4, false);
    dp_optim *sgd = careless_optim(c.par);
    CHECK_OK(careless_steps(c.par, sgd, 4, 4, 0));
    CHECK_ERROR(careless_steps(c.par, sgd, 1, 4, 0), DP_ERR_CHECK, "is nan in step 5");
    checked_end(&c);
}

TEST(the_cause_of_a_loss_that_is_not_finite_is_named)
{
    checked c;
    const float w[COLUMNS] = {1, 1, 1, (float)INFINITY};
    checked_begin(&c, NO_FAULT, wrap_data, 1, false);
    dp_value log;
    dp_scope *scope = dp_scope_begin(c.ctx);
    dp_value batch = careless_batch(scope, 4, 0);
    ((float *)dp_get(batch, "x").as.t->data)[2 * COLUMNS + 1] = (float)NAN;
    CHECK_ERROR(dp_train_step(c.par, scope, batch, NULL, &log), DP_ERR_CHECK,
                "step 1, on rank 1: the batch has nan at [0, 1] in 'x'");
    CHECK_OK(dp_zero_grad(c.par));
    CHECK_OK(dp_params_write(c.net, 0, w, sizeof w));
    CHECK_ERROR(dp_train_step(c.par, scope, careless_batch(scope, 4, 0), NULL, &log), DP_ERR_CHECK,
                "step 2, on rank 0: parameter 'w' has inf at [3]");
    checked_end(&c);
}

/* The scale is there to find it. */
TEST(gradients_of_a_scaled_loss_may_be_infinite)
{
    checked c;
    dp_optim *sgd = NULL;
    checked_begin(&c, GRAD_IS_INF, wrap_data, 1, false);
    CHECK_OK(dp_optim_create(
        c.par, &(dp_optim_config){.hyper.lr = 0.01, .scale = {.scale = 1024, .dynamic = true}},
        &sgd));
    CHECK_OK(careless_steps(c.par, sgd, 3, 4, 0));
    checked_end(&c);
}

/* ---- gradients that nobody clears ------------------------------------------------------------ */

/* A pass by hand. */
static dp_status backward_by_hand(checked *c, int seed, bool no_sync)
{
    dp_pass *pass = NULL;
    dp_value out;
    dp_scope *scope = dp_scope_begin(c->ctx);
    dp_status status = dp_invoke(c->par, scope, "forward", dp_none(),
                                 careless_batch(scope, 4, seed),
                                 &(dp_pass_config){.no_sync = no_sync}, &out, &pass);
    if (status == DP_OK)
        status = dp_backward(pass, dp_float(1), NULL);
    dp_scope_end(scope);
    return status;
}

/* w -= 0.01 * gradient; so that is left as it is, or scaled */
static void update_by_hand(checked *c, float scale)
{
    for (size_t p = 0; p < 2; p++) {
        dp_tensor data, grad;
        CHECK_OK(dp_params_edit(c->net, p, &data, &grad));
        for (int64_t i = 0; i < dp_tensor_count(&data); i++) {
            ((float *)data.data)[i] -= 0.01f * ((float *)grad.data)[i];
            ((float *)grad.data)[i] *= scale;
        }
    }
}

static const char not_cleared[] = "'w' of 'net' was updated since the last backward, and its "
                                  "gradient was not cleared";

TEST(gradients_that_were_not_cleared_are_named)
{
    static const wrap_fn adds[] = {wrap_plain, wrap_data, wrap_mean_ranks};
    for (int w = 0; w < 3; w++)
        for (int warns = 0; warns < 2; warns++) {
            checked c;
            checked_begin(&c, NO_FAULT, adds[w], 10, warns != 0);
            CHECK_OK(backward_by_hand(&c, 0, false));
            update_by_hand(&c, 1);
            CHECK_STATUS(backward_by_hand(&c, 1, false), warns ? DP_OK : DP_ERR_CHECK);
            CHECK_SAYS(warns ? c.log.text : dp_last_error(), not_cleared);
            CHECK_OK(dp_zero_grad(c.par));
            for (int i = 0; i < 20; i++) {
                CHECK_OK(backward_by_hand(&c, i, false));
                update_by_hand(&c, 1);
                CHECK_OK(dp_zero_grad(c.par));
            }
            checked_end(&c);
        }
}

/* Several backwards before one update, gradients that are cleared or scaled by hand, parameters
   that are others for a while. */
TEST(gradients_that_are_added_up_are_no_mistake)
{
    for (int w = 0; w < WRAPS; w++) {
        checked c;
        checked_begin(&c, NO_FAULT, wraps[w], 1, false);
        bool adds = wraps[w] != dp_everywhere; /* which refuses it, whatever is checked */
        for (int i = 0; i < 4; i++) {
            CHECK_OK(backward_by_hand(&c, 0, !adds));
            CHECK_OK(backward_by_hand(&c, 1, false));
            update_by_hand(&c, i % 2 == 0 ? 0.0f : 0.5f);
            if (!adds || i == 3)
                CHECK_OK(dp_zero_grad(c.par));
        }
        const float w_of_others[COLUMNS] = {9, 9, 9, 9};
        float own[COLUMNS];
        dp_param_info info;
        CHECK_OK(dp_module_param(c.net, 0, &info));
        memcpy(own, info.data.data, sizeof own);
        CHECK_OK(backward_by_hand(&c, 0, !adds));
        CHECK_OK(dp_params_write(c.net, 0, w_of_others, sizeof own));
        CHECK_OK(dp_params_write(c.net, 0, own, sizeof own));
        CHECK_OK(backward_by_hand(&c, 0, !adds));
        checked_end(&c);
    }
}

/* ---- memory ---------------------------------------------------------------------------------- */

TEST(memory_that_may_not_be_read_is_nan_in_the_loss)
{
    if (WITH_ASAN)
        SKIP("ASan reports it first");
    check_finds(READS_BEYOND, "'loss' of 'net' is nan in step 1");
    check_finds(READS_UNWRITTEN, "'loss' of 'net' is nan in step 1");
}

TEST(memory_that_may_not_be_written_is_told_by_the_next_step)
{
    if (WITH_ASAN)
        SKIP("ASan reports it first");
    for (int w = 0; w < WRAPS; w++) {
        checked c;
        checked_begin(&c, WRITES_BEYOND, wraps[w], 100, false);
        CHECK_ERROR(careless_steps(c.par, careless_optim(c.par), 2, 4, 0), DP_ERR_CHECK,
                    "something was written behind a piece of");
        CHECK_SAYS(c.log.text, "something was written behind a piece of");
        checked_end(&c);
    }
}

/* ---- processes ------------------------------------------------------------------------------- */

static dp_ctx *open_checked(meeting *m, warned *log, int every, bool warns)
{
    dp_ctx *ctx = NULL;
    dp_config config = config_heard(log, 2);
    config.bootstrap = (dp_bootstrap){meeting_all_gather, m, m->process, m->process_count};
    config.check = every;
    config.check_warns = warns;
    CHECK_OK(dp_open(&config, &ctx));
    return ctx;
}

typedef struct shared_plan { /* of a job */
    bool warns;
    fault fault;     /* of process 1 */
    int64_t rows[2]; /* of each process */
    int seed[2];
    bool writes; /* process 1 writes to a parameter by itself */
    wrap_fn wrap;
    int apart_check; /* what process 1 adds to `check` */
    dp_status wants;
    const char *says;
} shared_plan;

static shared_plan job;

static void train_checked(meeting *m)
{
    warned log;
    dp_module *par = NULL;
    const careless state = {m->process == 1 ? job.fault : NO_FAULT, DP_F32};
    const float w[COLUMNS] = {3, 3, 3, 3};
    dp_ctx *ctx = open_checked(m, &log, 10, job.warns);
    dp_module *net = careless_create(ctx, &state);
    CHECK_OK(job.wrap(net, &par));
    if (job.writes && m->process == 1)
        CHECK_OK(dp_params_write(net, 0, w, sizeof w));
    dp_status status =
        careless_steps(par, careless_optim(par), 30, job.rows[m->process], job.seed[m->process]);
    CHECK_STATUS(status, job.warns ? DP_OK : job.wants);
    if (job.says != NULL)
        CHECK_SAYS(job.warns ? log.text : dp_last_error(), job.says);
    else
        CHECK_STR(log.text, "");
    dp_close(ctx);
}

static void check_job(shared_plan plan)
{
    for (int w = 2; w < WRAPS; w++)
        for (int warns = 0; warns < 2; warns++) {
            job = plan;
            job.warns = warns != 0;
            job.wrap = wraps[w];
            if (plan.fault != NO_FAULT && warns) /* it is process 1's own log that has the line */
                continue;
            in_processes(2, train_checked);
        }
}

TEST(a_job_without_faults_has_none)
{
    check_job((shared_plan){.rows = {4, 4}, .seed = {0, 1}});
    check_job((shared_plan){.rows = {4, 0}, .seed = {0, 0}});
    check_job((shared_plan){.rows = {1, 3}, .seed = {0, 0}});
}

TEST(processes_with_the_same_rows_are_told)
{
    check_job((shared_plan){.rows = {4, 4},
                            .wants = DP_ERR_CHECK,
                            .says = "processes 0 and 1 gave 'net' the same rows"});
}

TEST(parameters_that_ranks_have_apart_are_told)
{
    check_job((shared_plan){.rows = {4, 4},
                            .seed = {0, 1},
                            .writes = true,
                            .wants = DP_ERR_CHECK,
                            .says = "ranks train 'net' with different parameters, as each has "
                                    "written or stepped them by itself: rank 2 has parameter 'w'"});
}

/* All learn it: of what a backward makes, in the sentence of the rank. */
TEST(a_finding_of_one_process_is_that_of_all)
{
    check_job((shared_plan){.rows = {4, 4},
                            .seed = {0, 1},
                            .fault = LOSS_IS_NAN,
                            .wants = DP_ERR_CHECK,
                            .says = "'loss' of 'net' is nan in step 1, on rank 2"});
    check_job((shared_plan){.rows = {4, 4},
                            .seed = {0, 1},
                            .fault = GRAD_IS_INF,
                            .wants = DP_ERR_CHECK,
                            .says = "the gradient of 'w' of 'net' has inf at [2] in step 1, on "
                                    "rank 2"});
}

static void check_apart(meeting *m)
{
    warned log;
    dp_ctx *ctx = open_checked(m, &log, 10, false);
    dp_module *par = data_parallel(ctx);
    dp_optim *sgd = careless_optim(par);
    CHECK_OK(careless_steps(par, sgd, 32, 4, m->process));
    CHECK_ERROR(careless_steps(par, sgd, 1, 4, m->process), DP_ERR_CHECK,
                "'net' was updated 32 times");
    dp_close(ctx);
}

TEST(processes_that_train_apart_fail_where_checked)
{
    in_processes(2, check_apart);
}

static void check_otherwise(meeting *m)
{
    warned log;
    dp_module *par = NULL;
    dp_ctx *ctx = open_checked(m, &log, m->process == 0 ? 10 : 20, false);
    CHECK_ERROR(dp_everywhere(careless_create(ctx, &faultless), &par), DP_ERR_MISMATCH,
                "rank 2 has check 20, rank 0 has check 10");
    dp_close(ctx);
}

TEST(all_processes_check_the_same_steps)
{
    in_processes(2, check_otherwise);
}

/* ---- passes that run again ------------------------------------------------------------------- */

TEST(gradients_that_are_set_are_named)
{
    check_finds(ASSIGNS, "the backward of 'net' sets the gradient of 'w', to ");
    check_finds(ASSIGNS_ONE, "the backward of 'net' sets the gradient of 'b', to ");
}

/* With several replicas only: alone a static variable is as good as any. */
static void check_finds_in_replicas(fault made, const char *part)
{
    if (WITH_TSAN)
        SKIP("two threads that write to one variable are what TSan reports");
    for (int w = 1; w < WRAPS; w++) {
        checked c;
        checked_begin(&c, made, wraps[w], 100, false);
        CHECK_ERROR(careless_steps(c.par, careless_optim(c.par), 1, 4, 0), DP_ERR_CHECK, part);
        checked_end(&c);
    }
}

TEST(memory_that_replicas_keep_together_is_told)
{
    check_finds_in_replicas(SHARES_MEMORY, "the backward of replica 0 of 'net' gives other "
                                           "gradients if the forward of replica 1 has run");
}

TEST(memory_that_forwards_share_is_told)
{
    check_finds_in_replicas(SHARES_SCRATCH, "of 'net' has returned something else beside the "
                                            "other replicas than it returns alone");
}

TEST(a_forward_that_writes_to_its_batch_is_told)
{
    check_finds(MOVES_INPUT, "the methods of 'net' write to the batch");
}

/* It gives something else each time, and nothing follows from that. */
TEST(a_random_model_is_no_mistake)
{
    for (int w = 0; w < WRAPS; w++) {
        checked c;
        checked_begin(&c, IS_RANDOM, wraps[w], 1, false);
        CHECK_OK(careless_steps(c.par, careless_optim(c.par), 5, 4, 0));
        checked_end(&c);
    }
}

/* A model that is checked learns the same, bit by bit. */
TEST(a_check_changes_nothing)
{
    for (int w = 0; w < WRAPS; w++) {
        float learned[2][COLUMNS];
        for (int every = 0; every < 2; every++) {
            checked c;
            dp_param_info info;
            checked_begin(&c, NO_FAULT, wraps[w], every > 0 ? 1 : -1, false);
            CHECK_OK(careless_steps(c.par, careless_optim(c.par), 10, 5, 0));
            CHECK_OK(dp_module_param(c.net, 0, &info));
            memcpy(learned[every], info.data.data, sizeof learned[every]);
            checked_end(&c);
        }
        CHECK_BYTES(learned[0], learned[1], sizeof learned[0]);
    }
}

/* A method that needs its partners is not run without them. */
static dp_status forward_with_partners(dp_call *call)
{
    float rows = (float)call->row_count;
    DP_TRY(dp_call_all_reduce(call, &rows, &rows, 1, DP_F32, DP_OP_SUM));
    CHECK_F64(rows, 5, 0);
    return careless_forward(call);
}

TEST(a_method_that_meets_others_is_not_run_again)
{
    static const dp_method methods[] = {{"forward", forward_with_partners},
                                        {"backward", careless_backward}};
    static const dp_param_config params[] = {
        {.name = "w", .dtype = DP_F32, .ndim = 1, .shape = {COLUMNS}},
        {.name = "b", .dtype = DP_F32, .ndim = 1, .shape = {1}}};
    for (int w = 1; w < WRAPS; w++) {
        checked c;
        checked_begin(&c, ASSIGNS, wrap_plain, 1, false);
        CHECK_OK(dp_module_create(c.ctx,
                                  &(dp_module_config){.name = "meets",
                                                      .methods = methods,
                                                      .method_count = 2,
                                                      .params = params,
                                                      .param_count = 2,
                                                      .state = &c.state},
                                  &c.net));
        CHECK_OK(wraps[w](c.net, &c.par));
        CHECK_OK(careless_steps(c.par, careless_optim(c.par), 3, 5, 0));
        checked_end(&c);
    }
}
