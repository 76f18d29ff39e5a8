/* test_agreement.c - what processes tell each other on the host: numbers, and how it went. */

#include "ranked.h"

enum { MANY = 1100 /* more than travel at a time */ };

static dp_ctx *open_shm(meeting *m, int devices)
{
    return open_over_shm(m, devices, 0);
}

/* ---- numbers --------------------------------------------------------------------------------- */

static int64_t reduced_i64(dp_ctx *ctx, int64_t one, dp_op op)
{
    CHECK_OK(dp_all_reduce_i64(ctx, &one, 1, op));
    return one;
}

static double reduced_f64(dp_ctx *ctx, double one, dp_op op)
{
    CHECK_OK(dp_all_reduce_f64(ctx, &one, 1, op));
    return one;
}

static void check_extremes(dp_ctx *ctx, int process, int count)
{
    bool last = process == count - 1;
    CHECK_INT(reduced_i64(ctx, last ? INT64_MAX : 1, DP_OP_SUM),
              (int64_t)((uint64_t)INT64_MAX + (uint64_t)count - 1));
    CHECK_INT(reduced_i64(ctx, last ? INT64_MIN : INT64_MAX, DP_OP_MIN), INT64_MIN);
    CHECK_INT(reduced_i64(ctx, last ? INT64_MAX : INT64_MIN, DP_OP_MAX), INT64_MAX);
    CHECK_INT(reduced_i64(ctx, last ? INT64_MIN : 1, DP_OP_PROD), INT64_MIN);
    CHECK_INT(reduced_i64(ctx, last ? INT64_MIN : 0, DP_OP_SUM), INT64_MIN);
    CHECK_INT(reduced_i64(ctx, last ? -count - 1 : 0, DP_OP_MEAN), -1 - (count == 1));
    double sum = reduced_f64(ctx, -0.0, DP_OP_SUM), product = reduced_f64(ctx, -0.0, DP_OP_PROD);
    CHECK(fabs(sum) <= 0 && signbit(sum));
    CHECK(fabs(product) <= 0 && !signbit(product) == (count % 2 == 0));
    sum = reduced_f64(ctx, last ? 0.0 : -0.0, DP_OP_SUM);
    CHECK(fabs(sum) <= 0 && !signbit(sum));
    CHECK_F64(reduced_f64(ctx, last ? -HUGE_VAL : 3, DP_OP_MIN), -HUGE_VAL, 0);
    CHECK(isnan(reduced_f64(ctx, last ? (double)NAN : 3, DP_OP_MAX)));
    CHECK_F64(reduced_f64(ctx, process + 1, DP_OP_MEAN), (count + 1) / 2.0, 0);
    CHECK_F64(reduced_f64(ctx, 2, DP_OP_PROD), pow(2, count), 0);
}

/* 0, 1, and numbers around what travels at a time. */
static void check_counts(dp_ctx *ctx, int process, int count)
{
    static const size_t counts[] = {0, 1, 2, 511, 512, 513, MANY};
    static int64_t whole[MANY + 1];
    static double real[MANY + 1];
    for (size_t c = 0; c < sizeof counts / sizeof *counts; c++) {
        for (int i = 0; i <= MANY; i++) {
            whole[i] = 10 * i + process;
            real[i] = i + 0.25 * process;
        }
        CHECK_OK(dp_all_reduce_i64(ctx, whole, counts[c], DP_OP_SUM));
        CHECK_OK(dp_all_reduce_f64(ctx, real, counts[c], DP_OP_MAX));
        for (int i = 0; i < (int)counts[c]; i++) {
            CHECK_INT(whole[i], 10 * i * count + count * (count - 1) / 2);
            CHECK_F64(real[i], i + 0.25 * (count - 1), 0);
        }
        CHECK_INT(whole[counts[c]], 10 * (int)counts[c] + process); /* nothing more is written */
        CHECK_F64(real[counts[c]], (double)counts[c] + 0.25 * process, 0);
    }
}

/* Which process has a rank of those that have 1, 2, 3 ... devices, or `each`. */
static int owner_of(int rank, int each)
{
    int process = 0, end = each > 0 ? each : 1;
    while (rank >= end)
        end += each > 0 ? each : ++process + 1, process += each > 0;
    return process;
}

static void check_gathered(dp_ctx *ctx, int process, int each, size_t count)
{
    size_t ranks = (size_t)dp_rank_count(ctx), all = ranks * count;
    int64_t *own = calloc(count + 1, sizeof *own), *out = calloc(all + 1, sizeof *out);
    double *real = calloc(count + 1, sizeof *real), *reals = calloc(all + 1, sizeof *reals);
    CHECK(own != NULL && out != NULL && real != NULL && reals != NULL);
    for (size_t i = 0; i < count; i++) {
        own[i] = 1000 * (int64_t)i + process;
        real[i] = process > 0 ? (double)i / process : -0.0;
    }
    out[all] = 77;
    reals[all] = 77;
    CHECK_OK(dp_all_gather_i64(ctx, own, count, out));
    CHECK_OK(dp_all_gather_f64(ctx, real, count, reals));
    for (size_t r = 0; r < ranks; r++)
        for (size_t i = 0; i < count; i++) {
            int owner = owner_of((int)r, each);
            double want = owner > 0 ? (double)i / owner : -0.0;
            CHECK_INT(out[r * count + i], 1000 * (int64_t)i + owner);
            CHECK_BYTES(&reals[r * count + i], &want, sizeof want);
        }
    CHECK_INT(out[all], 77);
    CHECK_F64(reals[all], 77, 0);
    free(own);
    free(out);
    free(real);
    free(reals);
}

static void check_broadcasts(dp_ctx *ctx, int process, int each)
{
    static int64_t whole[MANY];
    static double real[MANY];
    for (int root = 0; root < dp_rank_count(ctx); root++) {
        size_t count = root == 0 ? MANY : (size_t)root;
        for (int i = 0; i < MANY; i++) {
            whole[i] = INT64_MIN + i + process;
            real[i] = -0.5 * i - process;
        }
        CHECK_OK(dp_broadcast_i64(ctx, whole, count, root));
        CHECK_OK(dp_broadcast_f64(ctx, real, count, root));
        for (int i = 0; i < MANY; i++) {
            int owner = i < (int)count ? owner_of(root, each) : process;
            CHECK_INT(whole[i], INT64_MIN + i + owner);
            CHECK_F64(real[i], -0.5 * i - owner, 0);
        }
    }
}

static int devices_each; /* 0: one in process 0, two in process 1 ... */

static void check_numbers(dp_ctx *ctx, int process, int process_count)
{
    int first = 0;
    bool any = process == process_count - 1;
    for (int p = 0; p < process; p++)
        first += devices_each > 0 ? devices_each : p + 1;
    CHECK_INT(dp_rank(ctx), first);
    CHECK_INT(dp_rank_count(ctx), info_here(ctx).rank_count);
    check_extremes(ctx, process, process_count);
    check_counts(ctx, process, process_count);
    check_gathered(ctx, process, devices_each, 0);
    check_gathered(ctx, process, devices_each, 1);
    check_gathered(ctx, process, devices_each, 301);
    CHECK_OK(dp_agree(ctx, DP_OK)); /* on the same memory */
    check_broadcasts(ctx, process, devices_each);
    CHECK_OK(dp_any(ctx, any, &any));
    CHECK(any);
    CHECK_OK(dp_any(ctx, false, &any));
    CHECK(!any);
}

static void numbers_in_process(meeting *m)
{
    dp_ctx *ctx = open_shm(m, devices_each > 0 ? devices_each : m->process + 1);
    check_numbers(ctx, m->process, m->process_count);
    dp_close(ctx);
}

TEST_SLOW(numbers_of_all_processes, 30)
{
    for (int processes = 2; processes <= 4; processes++)
        for (devices_each = 0; devices_each < 3; devices_each++)
            in_processes(processes, numbers_in_process);
}

static void numbers_by_another_table(meeting *m)
{
    dp_ctx *ctx = open_job(m, devices_each, dp_cpu());
    check_numbers(ctx, m->process, m->process_count);
    dp_close(ctx);
}

TEST(numbers_travel_by_any_table)
{
    devices_each = 2;
    in_processes(3, numbers_by_another_table);
}

#if defined(TEST_SIM)
TEST(numbers_of_all_processes_on_gpus)
{
    devices_each = 2;
    on_gpus("222", numbers_by_another_table);
}
#endif

TEST(numbers_of_one_process)
{
    for (devices_each = 1; devices_each <= 3; devices_each++) {
        dp_ctx *ctx = open_here(devices_each);
        check_numbers(ctx, 0, 1);
        dp_close(ctx);
    }
}

TEST(wrong_numbers)
{
    dp_ctx *ctx = open_here(2);
    int64_t whole[2] = {5, 6}, all[4];
    double real[2] = {5, 6};
    CHECK_ERROR(dp_all_reduce_i64(ctx, NULL, 1, DP_OP_SUM), DP_ERR_INVALID,
                "dp_all_reduce_i64: numbers is NULL");
    CHECK_OK(dp_all_reduce_i64(ctx, NULL, 0, DP_OP_SUM));
    CHECK_ERROR(dp_all_reduce_f64(ctx, real, 1, (dp_op)77), DP_ERR_INVALID,
                "dp_all_reduce_f64: 77 is not a dp_op");
    CHECK_ERROR(dp_all_reduce_f64(ctx, real, SIZE_MAX / 8, DP_OP_SUM), DP_ERR_INVALID,
                "dp_all_reduce_f64: more numbers than can be counted");
    CHECK_ERROR(dp_all_gather_i64(ctx, whole, 1, NULL), DP_ERR_INVALID,
                "dp_all_gather_i64: out is NULL");
    CHECK_ERROR(dp_all_gather_i64(ctx, whole, SIZE_MAX / 16 + 1, all), DP_ERR_INVALID,
                "dp_all_gather_i64: more numbers than can be counted");
    CHECK_ERROR(dp_all_gather_i64(ctx, all + 1, 1, all), DP_ERR_INVALID,
                "dp_all_gather_i64: numbers and out overlap");
    CHECK_ERROR(dp_broadcast_i64(ctx, whole, 2, 2), DP_ERR_INVALID,
                "dp_broadcast_i64: root 2, there are 2 ranks");
    CHECK_ERROR(dp_broadcast_f64(ctx, real, 2, -1), DP_ERR_INVALID,
                "dp_broadcast_f64: root -1, there are 2 ranks");
    CHECK_INT(whole[0] + whole[1], 11);
    dp_close(ctx);
    CHECK_ERROR(dp_all_reduce_i64(ctx, whole, 1, DP_OP_SUM), DP_ERR_STATE, "is closed");
    CHECK_INT(dp_rank(ctx), -1);
    CHECK_STR(dp_last_error(), "dp_rank: the context is closed");
    CHECK_INT(dp_rank_count(NULL), -1);
    CHECK_STR(dp_last_error(), "dp_rank_count: ctx is NULL");
}

/* A process that takes part in something else is named, as in any other collective. */
static void roots_differ(meeting *m)
{
    dp_ctx *ctx = open_shm(m, 1);
    int64_t one = 5;
    dp_status status = dp_broadcast_i64(ctx, &one, 1, m->process);
    CHECK_INT(dp_status_class(status), DP_CLASS_JOB);
    CHECK_SAYS(dp_last_error(), "broadcast of 1 i64 (root 1), in dp_broadcast_i64");
    wait_for_all(m);
    dp_close(ctx);
}

TEST(processes_mean_the_same_numbers)
{
    in_processes(2, roots_differ);
}

/* ---- how it went ----------------------------------------------------------------------------- */

static dp_status went(int process, int which)
{
    return process == which ? dp_error(DP_ERR_FILE, "no paper in tray %d", process) : DP_OK;
}

static void some_fail(meeting *m)
{
    int devices = 2, last = m->process_count - 1;
    dp_ctx *ctx = open_shm(m, devices);
    char want[80];
    (void)dp_error(DP_OK, "as before");
    CHECK_OK(dp_agree(ctx, DP_OK));
    CHECK_STR(dp_last_error(), "as before");
    for (int which = 0; which <= last; which++) {
        CHECK_STATUS(dp_agree(ctx, went(m->process, which)), DP_ERR_FILE);
        snprintf(want, sizeof want, "rank %d: no paper in tray %d", devices * which, which);
        CHECK_STR(dp_last_error(), want);
        CHECK(!dp_failure(ctx, NULL));
    }
    CHECK_STATUS(dp_agree(ctx, m->process > 0
                                   ? dp_error(m->process == 1 ? DP_ERR_USER : DP_ERR_NO_MEMORY,
                                              "this is %d", m->process)
                                   : DP_OK),
                 DP_ERR_USER); /* several at once: the first of them, for the others too */
    CHECK_STR(dp_last_error(), "rank 2: this is 1");
    CHECK_OK(dp_agree(ctx, DP_OK));
    dp_close(ctx);
}

TEST(all_hear_of_the_first_that_fails)
{
    for (int processes = 2; processes <= 4; processes++)
        in_processes(processes, some_fail);
}

static void fail_with_other_words(meeting *m)
{
    char text[512], want[512];
    dp_ctx *ctx = open_shm(m, 1);
    memset(text, 'x', sizeof text);
    text[511] = '\0';
    snprintf(want, sizeof want, "rank 1: %.503s", text);
    CHECK_STATUS(dp_agree(ctx, m->process == 1 ? dp_error(DP_ERR_STATE, "%s", text) : DP_OK),
                 DP_ERR_STATE);
    CHECK_STR(dp_last_error(), want); /* cut as all sentences are */
    (void)dp_error(DP_OK, "%s", "");
    CHECK_STATUS(dp_agree(ctx, m->process == 0 ? DP_ERR_UNSUPPORTED : DP_OK), DP_ERR_UNSUPPORTED);
    CHECK_STR(dp_last_error(), "rank 0: the backend cannot do this");
    static const int no_status[] = {-77, 77, DP_PENDING};
    for (int i = 0; i < 3; i++) {
        dp_status own = m->process == 1 ? (dp_status)no_status[i] : DP_OK;
        (void)dp_error(own, "it is %d", i);
        snprintf(want, sizeof want, "rank 1: it is %d", i);
        CHECK_STATUS(dp_agree(ctx, own), DP_ERR_USER);
        CHECK_STR(dp_last_error(), want);
    }
    CHECK(!dp_failure(ctx, NULL));
    dp_close(ctx);
}

TEST(any_words_and_any_status)
{
    in_processes(2, fail_with_other_words);
}

TEST(one_process_agrees_with_itself)
{
    dp_ctx *ctx = open_here(2);
    CHECK_OK(dp_agree(ctx, DP_OK));
    CHECK_STATUS(dp_agree(ctx, dp_error(DP_ERR_FILE, "no paper")), DP_ERR_FILE);
    CHECK_STR(dp_last_error(), "no paper");
    CHECK_STATUS(dp_agree(ctx, (dp_status)-77), DP_ERR_USER);
    dp_close(ctx);
    CHECK_ERROR(dp_agree(ctx, DP_OK), DP_ERR_STATE, "dp_agree: the context is closed");
    CHECK_ERROR(dp_agree(NULL, DP_ERR_FILE), DP_ERR_INVALID, "dp_agree: ctx is NULL");
}

/* ---- when there is no memory, in functions, after an abort ----------------------------------- */

static void ask_for_no_memory(meeting *m)
{
    test_allocator counter = {0};
    dp_config config = config_of(m, 2);
    dp_ctx *ctx;
    bool any;
    static int64_t whole[MANY] = {1}, all[4 * 40];
    static double real[MANY] = {1};
    config.colls = NULL;
    config.allocator = test_allocator_of(&counter);
    CHECK_OK(dp_open(&config, &ctx));
    take_what_is_kept(ctx, &counter);
    size_t before = counter.call_count;
    counter.fail_at = before + 1;
    counter.keep_failing = true;
    CHECK_OK(dp_all_reduce_i64(ctx, whole, MANY, DP_OP_SUM));
    CHECK_OK(dp_all_reduce_f64(ctx, real, MANY, DP_OP_PROD));
    CHECK_OK(dp_all_gather_i64(ctx, whole, 40, all));
    CHECK_OK(dp_broadcast_f64(ctx, real, MANY, 3));
    CHECK_OK(dp_any(ctx, false, &any));
    CHECK_STATUS(dp_agree(ctx, m->process == 1 ? dp_error(DP_ERR_NO_MEMORY, "none") : DP_OK),
                 DP_ERR_NO_MEMORY);
    CHECK_STR(dp_last_error(), "rank 2: none");
    CHECK_INT(whole[0], 2);
    CHECK_INT(counter.call_count, before);
    dp_close(ctx);
    CHECK_NO_LEAKS(&counter);
}

TEST(without_memory_they_can_say_so)
{
    in_processes(2, ask_for_no_memory);
}

/* Where one process has no memory for a context, none gets one. */
static void open_without_memory(meeting *m)
{
    bool failed = true;
    for (size_t fail_at = 1; failed; fail_at++) {
        test_allocator counter = {.fail_at = m->process == 1 ? fail_at : 0};
        dp_config config = config_of(m, 2);
        dp_ctx *ctx = NULL;
        config.colls = NULL;
        config.allocator = test_allocator_of(&counter);
        dp_status status = dp_open(&config, &ctx);
        failed = status != DP_OK;
        CHECK(!failed || status == (m->process == 1 ? DP_ERR_NO_MEMORY : DP_ERR_REMOTE));
        if (!failed)
            CHECK_OK(dp_agree(ctx, DP_OK));
        dp_close(ctx);
        CHECK_NO_LEAKS(&counter);
    }
}

TEST_SLOW(all_open_or_none, 30)
{
    in_processes(2, open_without_memory);
}

static dp_status agree_inside(int rank, dp_scope *scope, void *user)
{
    int64_t one = 1;
    bool any;
    (void)scope;
    if (rank == 0)
        return DP_OK;
    CHECK_ERROR(dp_agree(user, DP_OK), DP_ERR_STATE, "dp_agree: ");
    CHECK_ERROR(dp_all_reduce_i64(user, &one, 1, DP_OP_SUM), DP_ERR_STATE, "dp_all_reduce_i64");
    CHECK_ERROR(dp_any(user, true, &any), DP_ERR_STATE, "dp_any: ");
    CHECK_INT(dp_rank(user), 0);
    CHECK_INT(one, 1);
    return DP_OK;
}

static dp_status agrees_alone(dp_call *call)
{
    int64_t one = 2;
    CHECK_OK(dp_all_reduce_i64(call->ctx, &one, 1, DP_OP_PROD));
    CHECK_OK(dp_agree(call->ctx, DP_OK));
    call->out = dp_int(one);
    return DP_OK;
}

TEST(only_what_runs_alone_agrees)
{
    static const dp_method methods[] = {{"forward", agrees_alone}};
    dp_ctx *ctx = open_here(2);
    dp_scope *scope = dp_scope_begin(ctx);
    dp_module *net;
    dp_value out;
    CHECK_OK(dp_run(ctx, NULL, agree_inside, ctx));
    CHECK_OK(
        dp_module_create(ctx, &(dp_module_config){.methods = methods, .method_count = 1}, &net));
    CHECK_OK(dp_invoke(net, scope, "forward", dp_none(), dp_none(), NULL, &out, NULL));
    CHECK_INT(out.as.i, 2);
    dp_close(ctx);
}

static void one_aborts(meeting *m)
{
    dp_ctx *ctx = open_shm(m, 1);
    int64_t one = 5;
    wait_for_all(m);
    if (m->process == 1)
        dp_abort(ctx, DP_ERR_ABORTED, "enough");
    dp_status status = dp_agree(ctx, m->process == 0 ? dp_error(DP_ERR_FILE, "paper") : DP_OK);
    CHECK_INT(dp_status_class(status), DP_CLASS_JOB);
    CHECK_SAYS(dp_last_error(), "enough");
    CHECK_STATUS(dp_all_reduce_i64(ctx, &one, 1, DP_OP_SUM), status);
    CHECK_STATUS(dp_agree(ctx, DP_OK), status);
    CHECK_INT(dp_rank(ctx), m->process); /* names stay */
    wait_for_all(m);
    dp_close(ctx);
}

TEST(nobody_waits_for_who_has_aborted)
{
    in_processes(2, one_aborts);
    in_processes(3, one_aborts);
}
