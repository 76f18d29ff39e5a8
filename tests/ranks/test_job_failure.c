/* test_job_failure.c - what becomes of a job when something goes wrong in one of its processes:
   what fails on one rank fails on all, and they go on; or the job fails, and all say why. */

#include <pthread.h>
#include <stdatomic.h>
#include "examples/custom_device.h"
#include "ranked.h"

static const dp_distributed_config kinds[] = {
    {.buckets = {.first_bytes = 4, .bytes = 4}},
    {.unused_params = DP_UNUSED_FOUND, .reduction = DP_SUM_RANKS},
    {.unused_params = DP_UNUSED_FIXED, .buckets = {.first_bytes = 4, .bytes = 4}},
    {.reduction = DP_MEAN_SAMPLES}};

enum { KINDS = sizeof kinds / sizeof *kinds };

static const dp_distributed_config *kind; /* the one that is tried */

static plan how; /* of this process: nobody else looks into it */

static void behave(habit own)
{
    for (int r = 0; r < RANKS; r++)
        how.habit[r] = own;
}

static atomic_int forwards; /* that were run here */

static bool gives_up; /* in a forward */

static dp_status counted_forward(dp_call *call)
{
    atomic_fetch_add(&forwards, 1);
    if (!gives_up)
        return net_forward(call);
    dp_abort(dp_module_ctx(call->module), DP_ERR_ABORTED, "this leads nowhere");
    return dp_error(DP_ERR_USER, "no forward today");
}

/* The net is well, though "v" may have travelled when something happens. */
static dp_module *make_wrapped(dp_ctx *ctx, dp_module **out)
{
    static const dp_method methods[] = {{"forward", counted_forward}, {"backward", net_backward}};
    dp_module *net = make_net_of(ctx, (dp_module_config){.methods = methods, .state = &how});
    behave(V_SAID);
    CHECK_OK(dp_distributed(net, kind, out));
    return net;
}

/* The job is well: a pass that is good on all ranks, and what comes of it. */
static void check_well(dp_module *net, dp_module *par)
{
    int ranks = info_here(dp_module_ctx(net)).rank_count;
    double sum = ranks * (ranks + 1) / 2.0,
           want = kind->reduction == DP_SUM_RANKS ? sum : sum / ranks;
    CHECK_OK(dp_zero_grad(par));
    CHECK_OK(forward_and_backward(par, 1, false));
    CHECK_F64(element(net, 0, true, W - 1), want, 1e-5);
    CHECK_F64(element(net, 1, true, 0), want, 1e-5);
    CHECK_F64(element(net, 1, true, V - 1), want, 1e-5);
}

/* ---- what fails on one rank fails on all, and they go on ------------------------------------- */

static void check_same_error(dp_status status, dp_status want, bool here, const char *fn, int rank,
                             const char *says)
{
    char who[80];
    snprintf(who, sizeof who, "%s: rank %d: ", fn, rank);
    CHECK_ERROR(status, want, says);
    CHECK_INT(strncmp(dp_last_error(), who, strlen(who)) == 0, !here);
    if (!here)
        CHECK_ERROR(status, want, ": gradients of 'net' are void");
}

/* Before the first good pass, and after. */
static void one_backward_fails(meeting *m)
{
    int last = m->process_count - 1;
    dp_module *par, *net = make_wrapped(open_over_shm(m, 1, 0), &par);
    for (int i = 0; i < 3; i++) {
        behave(m->process == last ? FAILS_LATE : V_SAID);
        CHECK_OK(dp_zero_grad(par));
        check_same_error(forward_and_backward(par, 1, false), DP_ERR_NO_MEMORY, m->process == last,
                         "dp_backward", last, "7 bytes are missing");
        behave(V_SAID);
        check_well(net, par);
    }
    dp_close(dp_module_ctx(net));
}

TEST_SLOW(a_backward_that_fails_on_one_rank_fails_on_all, 60)
{
    for (kind = kinds; kind < kinds + KINDS; kind++) {
        in_processes(2, one_backward_fails);
        in_processes(4, one_backward_fails);
    }
}

/* The first of several is named, and each keeps its own words. */
static void several_fail(meeting *m)
{
    dp_module *par, *net = make_wrapped(open_over_shm(m, 1, 0), &par);
    bool here = m->process % 2 == 1;
    behave(here ? FAILS_LATE : V_SAID);
    check_same_error(forward_and_backward(par, 1, false), DP_ERR_NO_MEMORY, here, "dp_backward", 1,
                     "no backward today");
    behave(V_SAID);
    check_well(net, par);
    dp_close(dp_module_ctx(net));
}

TEST(the_first_of_several_failures_is_named)
{
    kind = kinds;
    in_processes(4, several_fail);
    in_processes_on(toy_device(), 4, several_fail);
}

/* A gradient that is none: the pass is over, here too. At last another pass goes backward between
   its forward and its backward. */
static void one_gradient_is_wrong(meeting *m)
{
    dp_ctx *ctx = open_over_shm(m, 1 + m->process % 2, 0);
    dp_module *par, *net = make_wrapped(ctx, &par);
    dp_scope *scope = dp_scope_begin(ctx);
    dp_value out, one = dp_float(1), odd = DP_LIST_OF(scope, one, one, one, one);
    bool here = m->process == 0;
    for (int i = 0; i < 3; i++) {
        dp_pass *pass = NULL, *other = NULL;
        dp_value wrong = i == 1 ? dp_list_make(scope, DP_INT, NULL, 0) : odd;
        CHECK_OK(dp_zero_grad(par));
        if (i == 2)
            CHECK_OK(dp_invoke(par, scope, "forward", dp_none(), a_part_each(ctx, scope), NULL,
                               &out, &other));
        CHECK_OK(dp_invoke(par, scope, "forward", dp_none(), a_part_each(ctx, scope), NULL, &out,
                           &pass));
        if (i == 2)
            CHECK_OK(dp_backward(other, one, NULL));
        CHECK_OK(dp_zero_grad(par));
        dp_status status = dp_backward(pass, here ? wrong : one, NULL);
        CHECK_INT(dp_status_class(status), DP_CLASS_CALL);
        check_same_error(status, status, here, "dp_backward", 0, "dp_backward: ");
        CHECK_ERROR(dp_backward(pass, one, NULL), DP_ERR_STATE, "had its backward already");
    }
    dp_scope_end(scope);
    check_well(net, par);
    dp_close(ctx);
}

/* Once gradients are reduced they are not reduced again. */
static void one_forgets_to_zero(meeting *m)
{
    dp_module *par, *net = make_wrapped(open_over_shm(m, 1, 0), &par);
    check_well(net, par);
    if (m->process != 1)
        CHECK_OK(dp_zero_grad(par));
    check_same_error(forward_and_backward(par, 1, false), DP_ERR_STATE, m->process == 1,
                     "dp_backward", 1, "gradients of 'net' are already reduced");
    check_well(net, par);
    CHECK_ERROR(forward_and_backward(par, 1, false), DP_ERR_STATE,
                "call dp_zero_grad before the next backward");
    check_well(net, par);
    dp_close(dp_module_ctx(net));
}

TEST_SLOW(a_backward_that_one_rank_refuses_fails_on_all, 60)
{
    for (kind = kinds; kind < kinds + KINDS; kind++) {
        in_processes(2, one_gradient_is_wrong);
        in_processes(4, one_gradient_is_wrong);
    }
    kind = &kinds[1];
    in_processes(2, one_forgets_to_zero);
    kind = &kinds[3];
    in_processes(4, one_forgets_to_zero);
}

typedef enum sort { GOOD, A_NUMBER, AN_ERROR, ROWS_DIFFER } sort; /* of data */

/* A row a local rank. */
static dp_value batch_of(dp_ctx *ctx, dp_scope *scope, sort what)
{
    static float rows[4];
    int64_t count = info_here(ctx).local_count, odd = count + 1;
    dp_tensor x = dp_wrap(rows, DP_F32, 1, &count), y = dp_wrap(rows, DP_F32, 1, &odd);
    if (what == A_NUMBER)
        return dp_int(7);
    if (what == AN_ERROR)
        return dp_list_make(scope, DP_INT, NULL, 0);
    return DP_DICT(scope, {"x", dp_of(scope, &x)},
                   {"y", dp_of(scope, what == ROWS_DIFFER ? &y : &x)});
}

/* What a forward refuses, and what does not reduce, is this process' own. */
static void one_mends_its_call(meeting *m)
{
    dp_ctx *ctx = open_over_shm(m, 2, 0);
    dp_module *par, *net = make_wrapped(ctx, &par);
    float data[4] = {0};
    dp_part parts[] = {{.send = data, .recv = data}, {.send = data + 2, .recv = data + 2}};
    CHECK_OK(forward_and_backward(par, 1, false));
    if (m->process == 1) {
        dp_scope *scope = dp_scope_begin(ctx);
        dp_value out;
        dp_pass *pass;
        dp_status status = dp_invoke(par, scope, "forward", dp_none(),
                                     batch_of(ctx, scope, ROWS_DIFFER), NULL, &out, &pass);
        CHECK_INT(dp_status_class(status), DP_CLASS_CALL);
        dp_scope_end(scope);
    }
    check_well(net, par);
    if (m->process == 1)
        CHECK_ERROR(dp_all_reduce(ctx, parts, 3, DP_F32, DP_OP_SUM), DP_ERR_INVALID, "overlaps");
    CHECK_OK(dp_all_reduce(ctx, parts, 2, DP_F32, DP_OP_SUM));
    dp_close(ctx);
}

TEST(refused_call_may_be_corrected)
{
    kind = kinds;
    in_processes(3, one_mends_its_call);
}

/* ---- steps ----------------------------------------------------------------------------------- */

typedef struct counting { /* an optimizer that only counts */
    dp_optim base;
    int begun, updated;
    bool refuses;
} counting;

static dp_status counting_begin(dp_optim *optim, dp_module *module, dp_pass_config *pass)
{
    counting *own = (counting *)optim;
    (void)module, (void)pass;
    own->begun++;
    return own->refuses ? dp_error(DP_ERR_USER, "no step today") : DP_OK;
}

static dp_status counting_update(dp_optim *optim, dp_module *module)
{
    ((counting *)optim)->updated++;
    return dp_zero_grad(module);
}

static dp_status step_on(dp_module *par, dp_optim *optim, sort what)
{
    dp_ctx *ctx = dp_module_ctx(par);
    dp_scope *scope = dp_scope_begin(ctx);
    dp_value log;
    dp_status status = dp_train_step(par, scope, batch_of(ctx, scope, what), optim, &log);
    dp_scope_end(scope);
    return status;
}

typedef struct mishap {
    sort data;
    habit net;
    const char *says;
} mishap;

static const mishap mishaps[] = {
    {A_NUMBER, V_SAID, "data is an int"}, {AN_ERROR, V_SAID, "kind is neither"},
    {ROWS_DIFFER, V_SAID, "row"},         {GOOD, FAILS_FORWARD, "no forward today"},
    {GOOD, NO_LOSS, "holds 'loss'"},      {GOOD, FAILS_LATE, "no backward today"}};

static void one_step_fails(meeting *m)
{
    static const dp_optim_ops ops = {
        .head = DP_TABLE(dp_optim_ops), .begin = counting_begin, .update = counting_update};
    counting optim = {.base.ops = &ops};
    int last = m->process_count - 1, good = 0;
    bool here = m->process == last;
    dp_module *par, *net = make_wrapped(open_over_shm(m, here ? 2 : 1, 0), &par);
    for (size_t i = 0; i < sizeof mishaps / sizeof *mishaps; i++) {
        behave(here ? mishaps[i].net : V_SAID);
        dp_status status = step_on(par, &optim.base, here ? mishaps[i].data : GOOD);
        CHECK(dp_status_class(status) == DP_CLASS_CALL || dp_status_class(status) == DP_CLASS_PASS);
        check_same_error(status, status, here, "dp_train_step",
                         info_here(dp_module_ctx(net)).rank_count - 2, mishaps[i].says);
        behave(V_SAID);
        CHECK_INT(optim.updated, good);
        CHECK_OK(dp_zero_grad(par));
        CHECK_OK(step_on(par, &optim.base, GOOD));
        CHECK_INT(optim.updated, ++good);
        CHECK_INT(optim.begun, 2 * good);
        check_well(net, par);
        CHECK_OK(dp_zero_grad(par));
    }
    wait_for_all(m);
    optim.refuses = here;
    CHECK_ERROR(step_on(par, &optim.base, GOOD), DP_ERR_INTERNAL, "no step today (DP_ERR_USER)");
    CHECK_SAYS(dp_last_error(), "dp_train_step: ");
    CHECK(strstr(dp_last_error() + 1, "dp_train_step: ") == NULL); /* named once, on all ranks */
    dp_close(dp_module_ctx(net));
}

TEST_SLOW(a_step_that_fails_on_one_rank_fails_on_all, 60)
{
    for (kind = kinds; kind < kinds + KINDS; kind++) {
        in_processes(2, one_step_fails);
        in_processes(4, one_step_fails);
    }
}

/* Who fails in a step that ends the job hears of the job, as all do. */
static void one_gives_up(meeting *m)
{
    dp_module *par, *net = make_wrapped(open_over_shm(m, 1, 0), &par);
    wait_for_all(m);
    gives_up = m->process == 1;
    CHECK_ERROR(step_on(par, NULL, GOOD), DP_ERR_ABORTED, "this leads nowhere");
    dp_close(dp_module_ctx(net));
}

TEST(a_step_that_ends_the_job)
{
    kind = kinds;
    in_processes(2, one_gives_up);
}

/* ---- who is named, and by what --------------------------------------------------------------- */

static dp_status sum_of(dp_ctx *ctx, size_t count)
{
    const int64_t shape = (int64_t)count;
    dp_tensor data;
    dp_scope *scope = dp_scope_begin(ctx);
    dp_status status = dp_tensor_new(scope, dp_local_device(ctx, 0), DP_F32, 1, &shape, &data);
    if (status == DP_OK) {
        const dp_part part = {.send = data.data, .recv = data.data};
        status = dp_all_reduce(ctx, &part, count, DP_F32, DP_OP_SUM);
    }
    if (status == DP_OK)
        status = dp_wait(ctx);
    dp_scope_end(scope);
    return status;
}

/* Until the job fails. */
static dp_status train(dp_module *par)
{
    dp_status status = DP_OK;
    while (status == DP_OK) {
        CHECK_OK(dp_zero_grad(par));
        status = forward_and_backward(par, 1, false);
    }
    return status;
}

static const char *line_of(char *text, int index)
{
    char *line = strtok(text, "\n");
    while (index-- > 0 && line != NULL)
        line = strtok(NULL, "\n");
    CHECK(line != NULL);
    return line;
}

/* A GPU works later. */
static const char *ended(void)
{
    return meeting_gpus != NULL ? "enqueued" : "ended";
}

static void journal_of_two(meeting *m)
{
    dp_ctx *ctx = open_over_shm(m, 1, TIMEOUT_MS);
    static char text[8000], small[40];
    const int64_t count = 4;
    dp_tensor data;
    dp_scope *scope = dp_scope_begin(ctx); /* ends with the context */
    CHECK_OK(dp_tensor_new(scope, dp_local_device(ctx, 0), DP_F32, 1, &count, &data));
    const dp_part part = {.send = data.data, .recv = (float *)data.data + 2};
    bool any;
    CHECK_INT(dp_recent_collectives(ctx, text, sizeof text), 0);
    CHECK_STR(text, "");
    CHECK_OK(sum_of(ctx, 7));
    dp_tag(ctx, "a tag that is longer than the thirty-nine bytes that are kept");
    CHECK_OK(dp_reduce_scatter(ctx, &part, 1, DP_F32, DP_OP_MAX));
    dp_tag(ctx, "b");
    CHECK_OK(dp_barrier(ctx));
    CHECK_OK(dp_all_reduce_scaled(ctx, &part, 2, DP_F32, DP_OP_SUM, 0.5));
    dp_tag(ctx, NULL);
    CHECK_OK(dp_any(ctx, false, &any));
    CHECK_OK(dp_broadcast(ctx, &part, 1, DP_I32, 1));
    const char *end = ended();
    char want[600];
    size_t bytes = (size_t)snprintf(
        want, sizeof want,
        "collective 6, broadcast of 1 i32 (root 1): %s\n"
        "collective 5, all_reduce of 1 i64 (max), in dp_any: %s\n"
        "collective 4, all_reduce of 2 f32 (sum times 0.5), in dp_all_reduce_scaled, at 'b': %s\n"
        "collective 3, all_reduce of 1 bool (max), in dp_barrier, at 'b': %s\n"
        "collective 2, reduce_scatter of 1 f32 (max), at 'a tag that is longer than the "
        "thirty-ni': %s\n"
        "collective 1, all_reduce of 7 f32 (sum): %s\n",
        end, end, end, end, end, end);
    CHECK_INT(dp_recent_collectives(ctx, text, sizeof text), bytes);
    CHECK_STR(text, want);
    CHECK_INT(dp_recent_collectives(ctx, small, sizeof small), bytes);
    CHECK_BYTES(small, want, sizeof small - 1);
    CHECK_INT(small[sizeof small - 1], 0);
    CHECK_INT(dp_recent_collectives(ctx, NULL, 0), bytes);
    for (size_t i = 1; i <= 20; i++)
        CHECK_OK(sum_of(ctx, i));
    dp_recent_collectives(ctx, text, sizeof text);
    snprintf(want, sizeof want, "collective 11, all_reduce of 5 f32 (sum): %s", end);
    CHECK_STR(line_of(text, 15), want);
    dp_recent_collectives(ctx, text, sizeof text);
    snprintf(want, sizeof want, "collective 26, all_reduce of 20 f32 (sum): %s", end);
    CHECK_STR(line_of(text, 0), want);
    CHECK(strstr(text, "collective 10,") == NULL);
    dp_close(ctx);
}

TEST(failure_lists_recent_collectives)
{
    in_processes(2, journal_of_two);
    in_processes_on(toy_device(), 2, journal_of_two);
}

TEST(a_process_that_is_alone_keeps_no_journal)
{
    char text[8] = "before";
    dp_ctx *ctx = open_here(2);
    dp_tag(ctx, "epoch 3");
    CHECK_OK(dp_barrier(ctx));
    CHECK_INT(dp_recent_collectives(ctx, text, sizeof text), 0);
    CHECK_STR(text, "");
    dp_abort(ctx, DP_ERR_ABORTED, "enough");
    dp_failure_info failure;
    CHECK(dp_failure(ctx, &failure));
    CHECK_STR(failure.here, "");
    dp_close(ctx);
}

/* The log function's own trouble is not what the user hears of the failure. */
static void log_and_fail(const dp_log_record *record, void *user)
{
    (void)record;
    ++*(int *)user;
    (void)dp_error(DP_ERR_USER, "the log's own trouble");
}

static void fails_with_a_log(meeting *m)
{
    dp_ctx *ctx;
    dp_config config = config_of(m, 1);
    int records = 0;
    config.colls = NULL;
    config.timeout_ms = 1000;
    config.log = (dp_log){.fn = log_and_fail, .user = &records};
    CHECK_OK(dp_open(&config, &ctx));
    records = 0;
    if (m->process == 0) {
        CHECK_ERROR(dp_barrier(ctx), DP_ERR_TIMEOUT, "dp_barrier: ");
        CHECK(records > 0);
    }
    wait_for_all(m);
    dp_close(ctx);
}

TEST(the_log_function_leaves_sentences_alone)
{
    in_processes(2, fails_with_a_log);
}

/* Rank 1 dies or stops in backward, before it reports anything. */
static int fatal = SIGKILL;

static dp_status die(dp_call *call)
{
    if (rank_of(call) == 1)
        raise(fatal);
    return net_backward(call);
}

static const dp_method fatal_methods[] = {{"forward", net_forward}, {"backward", die}};

/* Its forward meets nobody. */
static const dp_distributed_config early = {.buffers = DP_BUFFERS_LOCAL, .buckets.first_bytes = 4};

static void one_dies_in_backward(meeting *m)
{
    static heard all;
    dp_ctx *ctx;
    dp_module *par;
    dp_failure_info failure;
    char text[sizeof all.lines[0]];
    dp_config config = config_of(m, 1);
    config.colls = NULL;
    config.timeout_ms = 30000;
    config.log = (dp_log){.fn = hear, .user = &all};
    CHECK_OK(dp_open(&config, &ctx));
    behave(V_SAID);
    CHECK_OK(dp_distributed(
        make_net_of(ctx, (dp_module_config){.methods = fatal_methods, .state = &how}), &early,
        &par));
    CHECK_OK(sum_of(ctx, 9));
    wait_for_all(m);
    dp_tag(ctx, "epoch 3");
    double start = now_ms();
    check_named(ctx, forward_and_backward(par, 1, false), start, SOON_MS, 1, "has died");
    CHECK(dp_failure(ctx, &failure));
    /* Either thread of any process may see it first, the courier even before the other has come so
       far; and this process may not have come to what another was in. */
    static const char *const seen[] = {"bucket 0 of 'net', 'w', in dp_reducer_finish, at 'epoch 3'",
                                       "gradients of 'net', in dp_backward, at 'epoch 3'"};
    if (strstr(failure.text, "bucket 0 of 'net'") != NULL)
        CHECK_SAYS(failure.text,
                   "collective 1, all_reduce of 3 f32 (mean), bucket 0 of 'net', 'w', "
                   "in dp_reducer_finish, at 'epoch 3': rank 1 (process 1, pid ");
    else
        CHECK_SAYS(failure.text,
                   "all_reduce of 1 i64 (min), gradients of 'net', in dp_backward, at "
                   "'epoch 3': rank 1 (process 1, pid ");
    CHECK_SAYS(failure.text, "has died; it");
    bool behind = strstr(failure.here, "all_reduce of 9 f32 (sum): ") != NULL; /* of the pass */
    if (!behind && (meeting_gpus == NULL || strstr(failure.here, "'epoch 3': enqueued") == NULL))
        CHECK_SAYS(failure.here, "'epoch 3': under way");
    snprintf(text, sizeof text, "the job failed: %s", failure.text);
    dp_close(ctx); /* nobody writes to the log any more */
    CHECK_STR(all.lines[0], text);
    int what = 0, sums = 0;
    char sum[48];
    snprintf(sum, sizeof sum, ", all_reduce of 9 f32 (sum): %s", ended());
    for (int i = 1; i < all.count; i++) {
        what += strstr(all.lines[i], seen[0]) != NULL || strstr(all.lines[i], seen[1]) != NULL;
        sums += strstr(all.lines[i], sum) != NULL;
    }
    CHECK(what > 0);
    CHECK_INT(sums, 1);
}

static void one_stops_in_backward(meeting *m)
{
    dp_module *par;
    dp_ctx *ctx = open_over_shm(m, 1, TIMEOUT_MS);
    behave(V_SAID);
    fatal = SIGSTOP;
    CHECK_OK(dp_distributed(
        make_net_of(ctx, (dp_module_config){.methods = fatal_methods, .state = &how}), &early,
        &par));
    double start = now_ms();
    check_named(ctx, forward_and_backward(par, 1, false), start, LATE_MS, 1,
                "did not come within 2000 ms");
    dp_close(ctx);
}

TEST_SLOW(a_failure_says_what_was_under_way, 30)
{
    in_processes_but(2, 1, one_dies_in_backward);
    in_processes_but(4, 1, one_dies_in_backward);
    in_processes_but(3, 1, one_stops_in_backward);
}

/* It was refused something, and does nothing more. */
static void one_is_refused(meeting *m)
{
    dp_ctx *ctx = open_over_shm(m, 1, TIMEOUT_MS);
    CHECK_OK(sum_of(ctx, 7));
    double start = now_ms();
    if (m->process == 1) {
        CHECK_ERROR(dp_all_reduce(ctx, NULL, 7, DP_F32, DP_OP_SUM), DP_ERR_INVALID, "NULL");
        rest_too_long();
        CHECK_INT(dp_status_class(sum_of(ctx, 7)), DP_CLASS_JOB);
    } else {
        check_named(
            ctx, sum_of(ctx, 7), start, LATE_MS, 1,
            "did not come within 2000 ms; its last one was 1, all_reduce of 7 f32 (sum), and "
            "then a call failed: dp_all_reduce: local is NULL");
    }
    dp_close(ctx);
}

static void one_is_refused_and_closes(meeting *m)
{
    dp_ctx *ctx = open_over_shm(m, 1, 30000);
    wait_for_all(m);
    double start = now_ms();
    if (m->process == 1)
        CHECK_ERROR(dp_all_reduce(ctx, NULL, 7, DP_F32, DP_OP_SUM), DP_ERR_INVALID, "NULL");
    else
        check_named(ctx, sum_of(ctx, 7), start, SOON_MS, 1,
                    "has closed its context; it has begun none, and then a call failed: "
                    "dp_all_reduce: local is NULL");
    dp_close(ctx);
}

TEST_SLOW(refused_rank_is_quoted, 30)
{
    in_processes(2, one_is_refused);
    in_processes(3, one_is_refused);
    in_processes(3, one_is_refused_and_closes);
}

/* ---- at any moment of training --------------------------------------------------------------- */

static void one_gets(meeting *m, int signal, const char *what, int most_ms)
{
    dp_module *par;
    dp_ctx *ctx = open_over_shm(m, 1, TIMEOUT_MS);
    make_wrapped(ctx, &par);
    wait_for_all(m);
    double start = now_ms();
    signal_soon(m, signal);
    dp_tag(ctx, "training");
    check_named(ctx, train(par), start, most_ms, 1, what);
    CHECK_SAYS(dp_last_error(), "'training'");
    dp_close(ctx);
}

static void one_is_killed(meeting *m)
{
    one_gets(m, SIGKILL, "has died; it", SOON_MS);
}

static void one_is_stopped(meeting *m)
{
    one_gets(m, SIGSTOP, "did not come within 2000 ms; it", LATE_MS);
}

TEST_SLOW(a_process_that_is_killed_in_training_is_named, 60)
{
    uint64_t state = test_seed();
    for (int i = 0; i < 10; i++) {
        kind = &kinds[i % KINDS];
        moment = (int)(test_random(&state) % 200000);
        in_processes_but(i % 2 == 0 ? 2 : 4, 1, one_is_killed);
    }
}

TEST_SLOW(a_process_that_is_stopped_in_training_is_named, 60)
{
    uint64_t state = test_seed();
    for (int i = 0; i < 2; i++) {
        kind = &kinds[i];
        moment = (int)(test_random(&state) % 100000);
        in_processes_but(i % 2 == 0 ? 2 : 4, 1, one_is_stopped);
    }
}

/* Slow is not dead. */
static void one_is_slow(meeting *m)
{
    dp_module *par, *net = make_wrapped(open_over_shm(m, 1, TIMEOUT_MS), &par);
    for (int i = 0; i < 4; i++) {
        if (m->process == i % m->process_count)
            rest(300);
        check_well(net, par);
    }
    dp_close(dp_module_ctx(net));
}

TEST_SLOW(a_process_that_is_slow_in_training_is_waited_for, 60)
{
    kind = kinds;
    in_processes(2, one_is_slow);
    in_processes_on(toy_device(), 2, one_is_slow);
    in_processes(4, one_is_slow);
}

/* Rank 1 leaves out one of two collectives between steps, or makes it of another size. */
static bool skips;

static void one_strays(meeting *m)
{
    dp_module *par, *net = make_wrapped(open_over_shm(m, 1, TIMEOUT_MS), &par);
    dp_ctx *ctx = dp_module_ctx(net);
    bool here = m->process == 1;
    check_well(net, par);
    dp_tag(ctx, "logging");
    expect_findings(); /* the simulator sees it too */
    double start = now_ms();
    dp_status status = here && skips ? DP_OK : sum_of(ctx, here ? 26 : 25);
    if (status == DP_OK)
        status = dp_barrier(ctx);
    check_named(ctx, status, start, SOON_MS, 1,
                skips ? "all_reduce of 1 bool (max), in dp_barrier, at 'logging'"
                      : "all_reduce of 26 f32 (sum), at 'logging'");
    dp_close(ctx);
    forget_findings();
}

TEST_SLOW(a_process_that_strays_between_steps_is_named, 60)
{
    kind = kinds;
    for (int i = 0; i < 2; i++) {
        skips = i > 0;
        in_processes(3, one_strays);
        in_processes(4, one_strays);
        in_processes_on(toy_device(), 4, one_strays);
    }
}

/* ---- dp_abort -------------------------------------------------------------------------------- */

static void *abort_soon(void *user)
{
    rest(100);
    dp_abort(user, DP_ERR_ABORTED, "the disk is full after %d steps", 3);
    return NULL;
}

/* From another thread. Rank 0 is in a function of its own, and hears it in the next call; the
   others wait for its gradients. */
static void one_aborts(meeting *m)
{
    dp_module *par, *net = make_wrapped(open_over_shm(m, 1, 30000), &par);
    dp_ctx *ctx = dp_module_ctx(net);
    pthread_t thread;
    double start = now_ms();
    check_well(net, par);
    wait_for_all(m);
    dp_tag(ctx, "saving");
    if (m->process == 1)
        CHECK_INT(pthread_create(&thread, NULL, abort_soon, ctx), 0);
    if (m->process == 0)
        rest(600);
    CHECK_OK(m->process == 0 ? DP_OK : dp_zero_grad(par));
    int before = atomic_load(&forwards);
    dp_status status = forward_and_backward(par, 1, false);
    if (m->process == 0)
        CHECK_INT(atomic_load(&forwards), before);
    if (m->process == 1) {
        CHECK_ERROR(status, DP_ERR_ABORTED, "the disk is full after 3 steps");
        pthread_join(thread, NULL);
    } else {
        check_named(ctx, status, start, 100 + SOON_MS, 1, "failed: the disk is full after 3 steps");
    }
    dp_close(ctx);
}

/* Its forward meets nobody. */
static const dp_distributed_config local = {.buffers = DP_BUFFERS_LOCAL};

TEST_SLOW(an_abort_ends_training_everywhere, 30)
{
    kind = &local;
    in_processes(2, one_aborts);
    in_processes(4, one_aborts);
    in_processes_on(toy_device(), 4, one_aborts);
}

#if defined(TEST_SIM)
/* ---- on GPUs, over NCCL ---------------------------------------------------------------------- */

TEST_SLOW(cuda_nccl_a_backward_that_fails_on_one_rank_fails_on_all, 60)
{
    for (kind = kinds; kind < kinds + KINDS; kind++) {
        on_gpus("111", one_backward_fails);
    }
    kind = kinds;
    on_gpus("1111", several_fail);
}

TEST_SLOW(cuda_nccl_a_backward_that_one_rank_refuses_fails_on_all, 60)
{
    for (kind = kinds; kind < kinds + KINDS; kind++) {
        on_gpus("12", one_gradient_is_wrong);
    }
    kind = &kinds[1];
    on_gpus("111", one_forgets_to_zero);
}

TEST_SLOW(cuda_nccl_a_step_that_fails_on_one_rank_fails_on_all, 60)
{
    for (kind = kinds; kind < kinds + KINDS; kind++) {
        on_gpus("112", one_step_fails);
    }
}

TEST_SLOW(cuda_nccl_a_step_that_ends_the_job, 60)
{
    kind = kinds;
    on_gpus("11", one_gives_up);
}

TEST_SLOW(cuda_nccl_failure_lists_recent_collectives, 60)
{
    on_gpus("11", journal_of_two);
}

TEST_SLOW(cuda_nccl_a_failure_says_what_was_under_way, 60)
{
    on_gpus_but("11", 1, one_dies_in_backward);
    on_gpus_but("111", 1, one_dies_in_backward);
    on_gpus_but("112", 1, one_stops_in_backward);
}

TEST_SLOW(cuda_nccl_who_was_refused_is_quoted, 60)
{
    on_gpus("11", one_is_refused);
    on_gpus("111", one_is_refused_and_closes);
}

TEST_SLOW(cuda_nccl_a_process_that_is_killed_in_training_is_named, 60)
{
    uint64_t state = test_seed();
    for (int i = 0; i < 4; i++) {
        kind = &kinds[i];
        moment = (int)(test_random(&state) % 200000);
        on_gpus_but(i % 2 == 0 ? "11" : "112", 1, one_is_killed);
    }
}

TEST_SLOW(cuda_nccl_a_process_that_is_slow_in_training_is_waited_for, 60)
{
    kind = kinds;
    on_gpus("21", one_is_slow);
}

TEST_SLOW(cuda_nccl_a_process_that_strays_between_steps_is_named, 60)
{
    kind = kinds;
    for (int i = 0; i < 2; i++) {
        skips = i > 0;
        on_gpus("111", one_strays);
    }
}

TEST_SLOW(cuda_nccl_an_abort_ends_training_everywhere, 60)
{
    kind = &local;
    on_gpus("111", one_aborts);
}
#endif
