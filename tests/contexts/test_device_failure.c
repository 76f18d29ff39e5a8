/* test_device_failure.c - what fails half-way: the nth call of the table, in every operation that
   enqueues work, on devices that put off their work ("lazy"). What was enqueued before must not
   read or write memory that is somebody else's by then, and what comes next gets the right numbers.
   */

#include <stdatomic.h>
#include <stdlib.h>
#include <time.h>
#include "conform.h"
#include "lazy.h"
#include "nets.h"
#include "reluctant.h"

enum { RANKS = 3, ROWS = 6, COLUMNS = 5, COUNT = ROWS * COLUMNS };

static const int64_t shape[2] = {ROWS, COLUMNS}, turned_shape[2] = {COLUMNS, ROWS};

/* ---- operations: each gives the right numbers, which depend on the salt, or fails ------------ */

typedef struct work {
    dp_ctx *ctx;
    dp_scope *scope;
    int salt;
    dp_stream *streams[RANKS]; /* of the devices, beside their compute streams */
} work;

static float element(const work *w, int i)
{
    return (float)(w->salt * 100 + i);
}

/* A tensor of numbers in host memory of the scope; every second time its rows are its columns. */
static dp_status given(const work *w, int turned, dp_tensor *out)
{
    TRY(dp_tensor_new(w->scope, (dp_device){0, 0}, DP_F32, 2, turned ? turned_shape : shape, out));
    if (turned)
        TRY(dp_transpose(out, 0, 1, out));
    for (int i = 0; i < COUNT; i++)
        ((float *)out->data)[i / COLUMNS * out->stride[0] + i % COLUMNS * out->stride[1]] =
            element(w, i);
    return DP_OK;
}

static dp_status on_device(const work *w, int rank, int turned, dp_tensor *out)
{
    TRY(dp_tensor_new(w->scope, dp_local_device(w->ctx, rank), DP_F32, 2,
                      turned ? turned_shape : shape, out));
    return turned ? dp_transpose(out, 0, 1, out) : DP_OK;
}

static dp_status filled(const work *w, int rank, int turned, dp_tensor *out)
{
    dp_tensor host;
    TRY(given(w, 0, &host));
    TRY(on_device(w, rank, turned, out));
    return dp_copy(w->ctx, out, &host, NULL);
}

/* Where a device that failed may write as long as it likes. */
static float *lasting(const work *w, int count)
{
    float *data = dp_scope_alloc(w->scope, (size_t)count * sizeof(float));
    CHECK(data != NULL || dp_failure(w->ctx, NULL));
    return data;
}

/* Every element is times * its number + plus. */
static dp_status check(const work *w, const dp_tensor *tensor, float times, float plus)
{
    float *got = lasting(w, COUNT);
    CHECK_INT(dp_tensor_count(tensor), COUNT);
    TRY(dp_read(w->ctx, tensor, got, COUNT * sizeof(float)));
    for (int i = 0; i < COUNT; i++)
        CHECK_F64(got[i], times * element(w, i) + plus, 0);
    return DP_OK;
}

/* From the host by all devices and back to it, with gaps on either side, on two streams each. */
static dp_status copies(work *w)
{
    static const int ways[] = {0, 3, 5, 6, 7};
    for (int k = 0, i = 0; k < 5; k++) {
        i = ways[k];
        dp_tensor host, back, on[RANKS];
        TRY(given(w, i & 1, &host));
        for (int r = 0; r < RANKS; r++) {
            TRY(on_device(w, r, i >> (r % 2 + 1) & 1, &on[r]));
            TRY(dp_copy(w->ctx, &on[r], r == 0 ? &host : &on[r - 1], i & 4 ? w->streams[r] : NULL));
            if (i & 4) /* the next one reads on the compute stream */
                TRY(dp_use_stream(w->ctx, r, w->streams[r]));
        }
        TRY(dp_tensor_new(w->scope, host.device, DP_F32, 2, turned_shape, &back));
        TRY(dp_transpose(&back, 0, 1, &back));
        TRY(dp_copy(w->ctx, &back, &on[RANKS - 1], NULL));
        TRY(check(w, &back, 1, 0));
        for (int r = 0; r < RANKS; r++)
            TRY(dp_use_stream(w->ctx, r, NULL));
    }
    return DP_OK;
}

static dp_status arithmetic(work *w)
{
    for (int i = 0; i < 4; i++) {
        dp_tensor x, y, wide;
        dp_stats stats;
        TRY(filled(w, i % RANKS, i & 1, &x));
        TRY(on_device(w, i % RANKS, i >> 1, &y));
        TRY(dp_tensor_new(w->scope, x.device, DP_F64, 2, shape, &wide));
        TRY(dp_fill(w->ctx, &y, dp_int(7)));
        TRY(dp_axpby(w->ctx, 2, &x, 3, &y, &y));
        TRY(dp_cast(w->ctx, &wide, &y));
        TRY(dp_cast(w->ctx, &x, &wide));
        TRY(check(w, &x, 2, 21));
        TRY(dp_fill(w->ctx, &y, dp_int(w->salt)));
        TRY(dp_tensor_stats(w->ctx, &y, &stats));
        CHECK_F64(stats.sum_squares, COUNT * w->salt * w->salt, 0);
    }
    return DP_OK;
}

static dp_status kept(work *w)
{
    dp_scope *brief = dp_scope_child(w->scope);
    work inner = {.ctx = w->ctx, .scope = brief, .salt = w->salt};
    dp_tensor x, dense;
    dp_value copy;
    TRY(filled(&inner, 1, 1, &x));
    TRY(dp_contiguous(brief, &x, &dense));
    TRY(dp_keep(w->scope, dp_of(brief, &dense), &copy));
    dp_scope_end(brief);
    return check(w, copy.as.t, 1, 0);
}

static dp_status scattered_and_gathered(work *w)
{
    dp_gather_config to_last = {.local_rank = RANKS - 1}, to_host = {.to_host = true};
    for (int i = 0; i < 4; i += 3) {
        dp_tensor x, parts[RANKS], whole;
        dp_value list, joined;
        TRY(i & 1 ? given(w, i >> 1, &x) : filled(w, 0, i >> 1, &x));
        TRY(dp_scatter(w->ctx, w->scope, dp_of(w->scope, &x), NULL, &list));
        TRY(dp_gather(w->ctx, w->scope, list, i >> 1 ? &to_last : &to_host, &joined));
        TRY(check(w, joined.as.t, 1, 0));
        for (int r = 0; r < RANKS; r++)
            TRY(dp_tensor_new(w->scope, dp_local_device(w->ctx, r), DP_F32, 2,
                              (int64_t[]){ROWS / RANKS, COLUMNS}, &parts[r]));
        TRY(dp_scatter_into(w->ctx, &x, 0, parts, RANKS));
        TRY(on_device(w, 1, i >> 1, &whole));
        TRY(dp_gather_into(w->ctx, parts, RANKS, 0, &whole));
        TRY(check(w, &whole, 1, 0));
    }
    return DP_OK;
}

static dp_status replicated_and_added(work *w)
{
    for (int i = 0; i < 4; i += 3) {
        dp_tensor x, parts[RANKS], sum;
        dp_value list, added, all;
        TRY(i & 1 ? given(w, i >> 1, &x) : filled(w, 0, i >> 1, &x));
        TRY(dp_replicate(w->ctx, w->scope, dp_of(w->scope, &x), NULL, &list));
        TRY(dp_reduce_add(w->ctx, w->scope, list, &(dp_gather_config){.local_rank = 1}, &added));
        TRY(check(w, added.as.t, RANKS, 0));
        TRY(dp_all_reduce_list(w->ctx, w->scope, list, NULL, &all));
        TRY(check(w, dp_at(all, 2).as.t, RANKS, 0));
        for (int r = 0; r < RANKS; r++)
            TRY(on_device(w, r, i & 1, &parts[r]));
        TRY(dp_replicate_into(w->ctx, &x, parts, RANKS));
        TRY(on_device(w, 2, i >> 1, &sum));
        TRY(dp_reduce_add_into(w->ctx, parts, RANKS, &sum));
        TRY(check(w, &sum, RANKS, 0));
    }
    return DP_OK;
}

/* send holds the rank's number at all elements; recv what the verb makes of it. */
static dp_status collective(work *w, int verb, bool named)
{
    enum { EACH = 4, ALL = EACH * RANKS };
    static const float want[][RANKS] = {{3, 3, 3}, {2, 2, 2}, {0, 1, 2}, {3, 3, 3},
                                        {0, 1, 2}, {3, 3, 3}, {0, 1, 2}, {2, 2, 2}};
    dp_tensor send[RANKS], recv[RANKS];
    dp_part parts[RANKS];
    float *got = lasting(w, ALL);
    for (int r = 0; r < RANKS; r++) {
        dp_device here = dp_local_device(w->ctx, r);
        TRY(dp_tensor_new(w->scope, here, DP_F32, 1, (int64_t[]){ALL}, &send[r]));
        TRY(dp_tensor_new(w->scope, here, DP_F32, 1, (int64_t[]){ALL}, &recv[r]));
        TRY(dp_fill(w->ctx, &send[r], dp_int(r + w->salt)));
        TRY(dp_fill(w->ctx, &recv[r], dp_int(-1)));
        parts[r] = (dp_part){send[r].data, recv[r].data, named ? w->streams[r] : NULL};
    }
    if (named)
        TRY(dp_wait(w->ctx));
    switch (verb) {
    case 0:
        TRY(dp_all_reduce(w->ctx, parts, EACH, DP_F32, DP_OP_SUM));
        break;
    case 1:
        TRY(dp_broadcast(w->ctx, parts, EACH, DP_F32, 2));
        break;
    case 2:
        TRY(dp_all_gather(w->ctx, parts, EACH, DP_F32));
        break;
    case 3:
        TRY(dp_reduce_scatter(w->ctx, parts, EACH, DP_F32, DP_OP_SUM));
        break;
    case 4:
        TRY(dp_all_to_all(w->ctx, parts, EACH, DP_F32));
        break;
    case 5:
        TRY(dp_reduce_to(w->ctx, parts, EACH, DP_F32, DP_OP_SUM, 1));
        break;
    case 6:
        TRY(dp_gather_to(w->ctx, parts, EACH, DP_F32, 1));
        break;
    default:
        TRY(dp_scatter_from(w->ctx, parts, EACH, DP_F32, 2));
        break;
    }
    TRY(dp_barrier(w->ctx));
    for (int r = 0; r < RANKS; r++) {
        bool sums = want[verb][0] == 3, all = want[verb][1] == 1;
        if ((verb == 5 || verb == 6) && r != 1)
            continue;
        dp_tensor host = dp_wrap(got, DP_F32, DP_SHAPE(ALL));
        TRY(dp_copy(w->ctx, &host, &recv[r], named ? w->streams[r] : NULL));
        for (int k = 0; k < (all ? RANKS : 1); k++)
            CHECK_F64(got[k * EACH + 3], want[verb][k] + (float)(w->salt * (sums ? RANKS : 1)), 0);
        CHECK_F64(got[ALL - 1], all ? (float)(2 + w->salt) : -1, 0);
    }
    return DP_OK;
}

static dp_status collectives(work *w)
{
    for (int verb = 0; verb < 8; verb++)
        TRY(collective(w, verb, verb % 2 == 1));
    return DP_OK;
}

static dp_status rank_work(int local_rank, dp_scope *scope, void *user)
{
    work mine = *(work *)user;
    dp_tensor x, y;
    mine.scope = scope;
    TRY(filled(&mine, local_rank, 0, &x));
    TRY(on_device(&mine, local_rank, 1, &y));
    TRY(dp_axpby(mine.ctx, 3, &x, 0, NULL, &y));
    return check(&mine, &y, 3, 0);
}

static dp_status ranks(work *w)
{
    return dp_run(w->ctx, w->scope, rank_work, w);
}

static const float net_w[NET_PARAMS] = {1, -1, 2, -2, 3, -3, 1, 2};

/* y = x w + b, and a backward. */
static dp_status pass_through(work *w, dp_module *net, dp_module *par)
{
    float y[ROWS * NET_OUT], gx[ROWS * NET_IN], gw[NET_PARAMS] = {0};
    float *got = lasting(w, ROWS * NET_IN);
    float ones[ROWS * NET_OUT];
    dp_tensor x, param, grad;
    dp_value out;
    dp_input_grad inputs;
    dp_pass *pass = NULL;
    TRY(dp_params_write(net, NET_W, net_w, NET_IN * NET_OUT * sizeof(float)));
    TRY(dp_params_write(net, NET_B, net_w + NET_IN * NET_OUT, NET_OUT * sizeof(float)));
    TRY(dp_tensor_new(w->scope, (dp_device){0, 0}, DP_F32, 2, (int64_t[]){ROWS, NET_IN}, &x));
    for (int i = 0; i < ROWS * NET_IN; i++)
        ((float *)x.data)[i] = (float)(w->salt + i);
    for (int i = 0; i < ROWS * NET_OUT; i++)
        ones[i] = 1;
    net_apply(0, ROWS, x.data, net_w, y);
    net_apply_back(0, ROWS, x.data, net_w, ones, gw, gx);
    dp_value args = DP_LIST_OF(w->scope, dp_of(w->scope, &x));
    TRY(dp_invoke(par, w->scope, "forward", args, dp_none(), NULL, &out, &pass));
    TRY(dp_read(w->ctx, out.as.t, got, sizeof(y)));
    CHECK_BYTES(got, y, sizeof(y));
    TRY(dp_backward(pass, dp_float(1), &inputs));
    TRY(dp_read(w->ctx, dp_at(inputs.args, 0).as.t, got, sizeof(gx)));
    CHECK_BYTES(got, gx, sizeof(gx));
    TRY(dp_params_edit(net, NET_W, &param, &grad));
    TRY(dp_read(w->ctx, &grad, got, NET_IN * NET_OUT * sizeof(float)));
    CHECK_BYTES(got, gw, NET_IN * NET_OUT * sizeof(float));
    return DP_OK;
}

static dp_status passes(work *w)
{
    static const net_shape by_rows = {0};
    const dp_module_config config = {.name = "net",
                                     .methods = net_methods,
                                     .method_count = 2,
                                     .params = net_params,
                                     .param_count = 2,
                                     .state = &by_rows};
    dp_module *net = NULL, *par = NULL;
    dp_status status = dp_module_create(w->ctx, &config, &net);
    if (status == DP_OK)
        status = dp_data_parallel(net, NULL, &par);
    if (status == DP_OK)
        status = pass_through(w, net, par);
    char sentence[512];
    snprintf(sentence, sizeof(sentence), "%s", dp_last_error());
    dp_scope_end(dp_scope_child(w->scope)); /* waits for reads of what the module owns */
    (void)!dp_module_destroy(par);
    (void)!dp_module_destroy(net);
    return status == DP_OK ? DP_OK : dp_error(status, "%s", sentence);
}

/* Units: rows 0 and 1; row 3 but for its ends, with 4 and 5; row 2, which no rank reports. */
static dp_status one_reduction(work *w, dp_reducer *reducer, const dp_tensor *on)
{
    TRY(dp_reducer_begin(reducer, NULL));
    for (int r = 0; r < RANKS; r++) {
        dp_status status = dp_reducer_ready(reducer, r, 1, w->streams[r]);
        CHECK(status == DP_OK || dp_failure(w->ctx, NULL));
        status = dp_reducer_ready(reducer, r, 0, NULL);
        CHECK(status == DP_OK || dp_failure(w->ctx, NULL));
    }
    TRY(dp_reducer_finish(reducer));
    for (int r = 0; r < RANKS; r++) {
        float *got = lasting(w, COUNT);
        TRY(dp_read(w->ctx, &on[r], got, COUNT * sizeof(float)));
        for (int i = 0; i < COUNT; i++) {
            bool left = i / COLUMNS == 2 || i == 3 * COLUMNS || i == 4 * COLUMNS - 1;
            CHECK_F64(got[i], element(w, i) * (left ? 1 : RANKS), 0);
        }
    }
    return DP_OK;
}

static dp_status all_reduce_hook(const dp_bucket *bucket, void *user)
{
    (void)user;
    (void)!dp_bucket_all_reduce(bucket, bucket->local, bucket->count, bucket->dtype, bucket->op,
                                bucket->scale);
    return DP_OK; /* what fails gets about all the same */
}

/* By way of flat memory, in halves, which hold these numbers. */
static dp_status reductions_by(work *w, dp_status (*hook)(const dp_bucket *bucket, void *user))
{
    static const dp_range ranges[] = {{.unit = 0, .count = 2 * COLUMNS},
                                      {.unit = 1, .first = 3 * COLUMNS + 1, .count = COLUMNS - 2},
                                      {.unit = 1, .first = 4 * COLUMNS, .count = 2 * COLUMNS},
                                      {.unit = 2, .first = 2 * COLUMNS, .count = COLUMNS}};
    void *local[RANKS];
    dp_tensor on[RANKS];
    dp_reducer *reducer = NULL;
    const dp_block block = {DP_F32, COUNT, local};
    for (int r = 0; r < RANKS; r++) {
        TRY(filled(w, r, 0, &on[r]));
        local[r] = on[r].data;
    }
    TRY(dp_reducer_create(w->ctx,
                          &(dp_reducer_config){.blocks = &block,
                                               .block_count = 1,
                                               .ranges = ranges,
                                               .range_count = 4,
                                               .reduction = DP_SUM_RANKS,
                                               .unused_units = DP_UNUSED_FOUND,
                                               .buckets = {.wire = DP_F16, .hook = hook}},
                          &reducer));
    dp_status status = one_reduction(w, reducer, on);
    char sentence[512];
    snprintf(sentence, sizeof(sentence), "%s", dp_last_error());
    CHECK_OK(dp_reducer_destroy(reducer));
    return status == DP_OK ? DP_OK : dp_error(status, "%s", sentence);
}

static dp_status reductions(work *w)
{
    return reductions_by(w, NULL);
}

static dp_status hooks(work *w)
{
    return reductions_by(w, all_reduce_hook);
}

/* ---- the nth call of the table fails --------------------------------------------------------- */

typedef dp_status (*operation)(work *w);

static const operation operations[] = {
    copies, arithmetic, kept, scattered_and_gathered, replicated_and_added, collectives, ranks,
    passes, reductions, hooks};
enum { OPERATIONS = sizeof(operations) / sizeof(operations[0]) };

static dp_ctx *open_with(const dp_device_ops *ops, test_allocator *counter)
{
    const dp_device_ops *const backends[] = {ops, NULL};
    dp_ctx *ctx = NULL;
    *counter = (test_allocator){0};
    CHECK_OK(dp_open(&(dp_config){.backends = backends,
                                  .colls = conform_colls(),
                                  .device_count = RANKS,
                                  .poison = true,
                                  .allocator = test_allocator_of(counter)},
                     &ctx));
    return ctx;
}

static void with_streams(work *w, bool make)
{
    for (int r = 0; r < RANKS; r++) {
        dp_dev *dev = dp_local_stream(w->ctx, r)->dev;
        if (make)
            CHECK_OK(dev->ops->stream_create(dev, 1, &w->streams[r]));
        else
            dev->ops->stream_destroy(w->streams[r]);
    }
}

/* In a scope of its own, which ends at once; then nothing that is queued is about the host. */
static dp_status in_scope(operation run, work *w, int salt)
{
    w->salt = salt;
    w->scope = dp_scope_begin(w->ctx);
    dp_status status = w->scope != NULL ? run(w) : DP_ERR_NO_MEMORY;
    dp_scope_end(w->scope);
    for (int r = 0; r < RANKS && status != DP_OK; r++)
        CHECK_OK(dp_use_stream(w->ctx, r, NULL)); /* theirs go before dp_close */
    return status;
}

/* A wait that fails is a failure of the job, whatever the table says; any other call fails as it
   says, unless what was under way cannot be waited for after it. */
static void check_failure(const work *w, dp_status status)
{
    bool wait = deco.fired_in == DECO_stream_sync || deco.fired_in == DECO_event_sync;
    bool as_said = status == DP_ERR_NO_MEMORY && !wait;
    bool lost = status == DP_ERR_DEVICE && (wait || deco.then_waits_fail);
    if ((status != DP_OK && !as_said && !lost) || strstr(dp_last_error(), "decorator") == NULL)
        test_fail(__FILE__, __LINE__, "%s failed: %s: \"%s\"", deco_name(deco.fired_in),
                  dp_status_name(status), dp_last_error());
    if (wait || lost)
        CHECK(dp_failure(w->ctx, NULL));
    else if (!deco.then_waits_fail)
        CHECK(!dp_failure(w->ctx, NULL));
}

/* Warm, with the nth call failing, and twice more if the context goes on, each time with other
   numbers. False when there is no nth call. */
static bool fails_at(operation run, work *w, long n, bool then_waits_fail)
{
    CHECK_OK(in_scope(run, w, 1));
    deco.fired = false;
    deco.then_waits_fail = then_waits_fail;
    deco.fail_with = DP_ERR_NO_MEMORY;
    deco.fail_at = deco.call_count + n;
    dp_status status = in_scope(run, w, 2);
    deco.fail_at = 0;
    if (!deco.fired) {
        CHECK_OK(status);
        return false;
    }
    if (dp_failure(w->ctx, NULL) || status != DP_OK)
        check_failure(w, status);
    deco.then_waits_fail = false;
    if (dp_failure(w->ctx, NULL)) {
        CHECK_STATUS(in_scope(run, w, 3), DP_ERR_NO_MEMORY);
        return true;
    }
    lazy_check_host();
    CHECK_OK(in_scope(run, w, 3));
    CHECK_OK(in_scope(run, w, 4));
    return true;
}

static void every_call_fails(const dp_device_ops *ops, bool then_waits_fail)
{
    for (int i = 0; i < OPERATIONS; i++) {
        bool fired = true;
        long n = 1;
        while (fired) {
            test_allocator counter;
            work w = {.ctx = open_with(ops, &counter)};
            with_streams(&w, true);
            do {
                fired = fails_at(operations[i], &w, n, then_waits_fail);
                n += test_step() * (then_waits_fail ? 4 : 1); /* each has a context of its own */
            } while (fired && !dp_failure(w.ctx, NULL));
            with_streams(&w, false);
            dp_close(w.ctx);
            CHECK_NO_LEAKS(&counter);
            CHECK_DECORATOR();
        }
        CHECK(n > 2);
    }
}

#if defined(TEST_CONFORM)
TEST_OF_TABLE(the_nth_call_fails, 120)
{
    every_call_fails(decorate_device(conform_device(RANKS)), false);
}

TEST_OF_TABLE(then_waits_fail, 120)
{
    every_call_fails(decorate_device(conform_device(RANKS)), true);
}
#endif

TEST_SLOW(the_nth_call_fails_toy, 60)
{
    every_call_fails(decorate_device(lazy_device(toy_device())), false);
}

TEST_SLOW(the_nth_call_fails_reluctant, 60)
{
    every_call_fails(decorate_device(lazy_device(reluctant_device(HAS_ALL, ALL_KERNELS))), false);
}

TEST_SLOW(the_nth_call_fails_peers_without_kernels, 60)
{
    every_call_fails(decorate_device(lazy_device(reluctant_device(HAS_PEER_COPY, 0))), false);
}

TEST_SLOW(the_nth_call_fails_one_memory, 60)
{
    every_call_fails(decorate_device(lazy_device(reluctant_one_memory(HAS_ALL, ALL_KERNELS))),
                     false);
}

/* And what it left behind cannot be waited for. */
TEST_SLOW(then_waits_fail_toy, 60)
{
    every_call_fails(decorate_device(lazy_device(toy_device())), true);
}

TEST_SLOW(then_waits_fail_reluctant, 60)
{
    every_call_fails(decorate_device(lazy_device(reluctant_device(HAS_ALL, ALL_KERNELS))), true);
}

/* The work itself fails, long after the call that asked for it: a wait says so, the job is over. */
TEST_SLOW(the_nth_work_fails_later, 60)
{
    for (int i = 0; i < OPERATIONS; i++) {
        bool fired = true;
        for (long n = 1; fired; n += test_step()) {
            test_allocator counter;
            decorate_device(reluctant_device(HAS_ALL, ALL_KERNELS));
            work w = {.ctx = open_with(lazy_device(&deco.device), &counter)};
            with_streams(&w, true);
            CHECK_OK(in_scope(operations[i], &w, 1));
            CHECK_OK(dp_wait(w.ctx));
            deco.fail_with = DP_ERR_NO_MEMORY;
            deco.fail_at = deco.call_count + n;
            dp_status status = in_scope(operations[i], &w, 2);
            if (status == DP_OK)
                status = dp_wait(w.ctx);
            fired = deco.fired;
            bool at_once = deco.fired_in == DECO_alloc || deco.fired_in == DECO_host_alloc;
            CHECK(!fired || at_once || status == DP_ERR_DEVICE);
            CHECK_INT(dp_failure(w.ctx, NULL), fired && !at_once);
            with_streams(&w, false);
            dp_close(w.ctx);
            CHECK_NO_LEAKS(&counter);
            CHECK_DECORATOR();
        }
    }
}

/* ---- one by one ------------------------------------------------------------------------------ */

/* A device without kernels adds by way of the host. The second of its copies out fails; the first
   is still to come, and must not come into the memory that the next device's sum uses. */
TEST(a_sum_after_half_a_sum)
{
    test_allocator counter;
    dp_ctx *ctx = open_with(decorate_device(lazy_device(toy_device())), &counter);
    dp_scope *scope = dp_scope_begin(ctx);
    dp_tensor x[2], y[2];
    float got[8];
    for (int r = 0; r < 2; r++) {
        CHECK_OK(dp_tensor_new(scope, dp_local_device(ctx, r), DP_F32, DP_SHAPE(8), &x[r]));
        CHECK_OK(dp_tensor_new(scope, x[r].device, DP_F32, DP_SHAPE(8), &y[r]));
        CHECK_OK(dp_fill(ctx, &x[r], dp_int(r == 0 ? 6 : 1)));
    }
    deco.fail_with = DP_ERR_NO_MEMORY;
    deco.fail_at = deco.call_count + 2;
    CHECK_ERROR(dp_axpby(ctx, 1, &x[0], 1, &x[0], &y[0]), DP_ERR_NO_MEMORY, "copy_out");
    lazy_check_host();
    CHECK_OK(dp_axpby(ctx, 1, &x[1], 1, &x[1], &y[1]));
    CHECK_OK(dp_read(ctx, &y[1], got, sizeof(got)));
    CHECK_F64(got[0], 2, 0);
    dp_scope_end(scope);
    dp_close(ctx);
    CHECK_DECORATOR();
}

/* One scope's memory is read on a stream of the user's, another's on the compute stream. */
TEST(a_scope_waits_for_reads_on_all_streams)
{
    enum { WIDE = 5000 };
    test_allocator counter;
    work w = {.ctx = open_with(decorate_device(lazy_device(toy_device())), &counter), .salt = 1};
    dp_stream *second = NULL;
    with_streams(&w, true);
    dp_dev *dev = w.streams[0]->dev;
    CHECK_OK(dev->ops->stream_create(dev, 1, &second));
    dp_stream *const streams[] = {w.streams[0], second, NULL, w.streams[0], NULL};
    dp_scope *scope = dp_scope_begin(w.ctx), *out = dp_scope_begin(w.ctx);
    for (int i = 0; i < 5; i++) {
        dp_tensor host, on;
        CHECK_OK(dp_tensor_new(scope, (dp_device){0, 0}, DP_F32, DP_SHAPE(WIDE), &host));
        CHECK_OK(dp_tensor_new(out, dp_local_device(w.ctx, 0), DP_F32, DP_SHAPE(WIDE), &on));
        CHECK_OK(dp_copy(w.ctx, &on, &host, streams[i]));
    }
    dp_scope_end(scope);
    lazy_check_host();
    int waits = deco_calls(DECO_event_sync);
    CHECK_INT(waits, 2);
    dp_scope_end(out); /* had no host memory */
    scope = dp_scope_begin(w.ctx);
    CHECK(dp_scope_alloc(scope, 1) != NULL);
    dp_scope_end(scope); /* nothing was read meanwhile */
    CHECK_INT(deco_calls(DECO_event_sync), waits);
    CHECK_OK(dev->ops->stream_sync(second));
    dev->ops->stream_destroy(second);
    with_streams(&w, false);
    dp_close(w.ctx);
    CHECK_DECORATOR();
}

static atomic_int waiting;

static dp_status wait_for_two(dp_event *event)
{
    atomic_fetch_add(&waiting, 1);
    for (int i = 0; i < 2000 && atomic_load(&waiting) < 2; i++)
        nanosleep(&(struct timespec){.tv_nsec = 1000000}, NULL);
    return deco_event_sync(event);
}

static void *end_scope(void *scope)
{
    dp_scope_end(scope);
    return NULL;
}

/* While one thread waits for a read, another that ends a scope has to wait for it as well. */
TEST(two_threads_wait_for_one_read)
{
    test_allocator counter;
    pthread_t thread;
    decorate_device(lazy_device(toy_device()));
    deco.device.event_sync = wait_for_two;
    work w = {.ctx = open_with(&deco.device, &counter), .salt = 1};
    w.scope = dp_scope_begin(w.ctx);
    dp_scope *other = dp_scope_begin(w.ctx);
    dp_tensor x, y;
    CHECK_OK(filled(&w, 0, 0, &x));
    w.scope = other;
    CHECK_OK(filled(&w, 0, 0, &y));
    w.scope = dp_scope_begin(w.ctx);
    CHECK(dp_scope_alloc(w.scope, 1) != NULL);
    CHECK_INT(pthread_create(&thread, NULL, end_scope, w.scope), 0);
    dp_scope_end(other);
    pthread_join(thread, NULL);
    CHECK_INT(atomic_load(&waiting), 2);
    dp_close(w.ctx);
    CHECK_DECORATOR();
}

/* Unpacked on a stream of the user's, by way of memory of the device that the compute stream must
   not have before. */
TEST(a_packed_copy_on_a_named_stream_keeps_its_memory)
{
    enum { SIDE = 64 };
    for (int peer = 0; peer < 2; peer++) {
        test_allocator counter;
        decorate_device(lazy_device(reluctant_device(HAS_PEER_COPY | HAS_KERNEL, ALL_KERNELS)));
        work w = {.ctx = open_with(&deco.device, &counter)};
        dp_tensor from, to, other;
        float *got;
        with_streams(&w, true);
        w.scope = dp_scope_begin(w.ctx);
        dp_device here = dp_local_device(w.ctx, 0);
        dp_device there = peer ? dp_local_device(w.ctx, 1) : (dp_device){0, 0};
        got = lasting(&w, SIDE * SIDE);
        CHECK_OK(dp_tensor_new(w.scope, there, DP_F32, DP_SHAPE(SIDE, SIDE), &from));
        CHECK_OK(dp_tensor_new(w.scope, here, DP_F32, DP_SHAPE(SIDE, SIDE), &to));
        CHECK_OK(dp_transpose(&to, 0, 1, &to));
        CHECK_OK(dp_fill(w.ctx, &from, dp_int(5)));
        CHECK_OK(dp_copy(w.ctx, &to, &from, w.streams[0]));
        CHECK_OK(dp_tensor_new(w.scope, here, DP_F32, DP_SHAPE(SIDE, SIDE), &other));
        CHECK_OK(dp_fill(w.ctx, &other, dp_int(7)));
        CHECK_OK(dp_wait(w.ctx));
        CHECK_OK(w.streams[0]->dev->ops->stream_sync(w.streams[0]));
        CHECK_OK(dp_read(w.ctx, &other, got, SIDE * SIDE * sizeof(float)));
        CHECK_F64(got[1], 7, 0);
        CHECK_OK(dp_read(w.ctx, &to, got, SIDE * SIDE * sizeof(float)));
        CHECK_F64(got[1], 5, 0);
        with_streams(&w, false);
        dp_close(w.ctx);
        CHECK_DECORATOR();
    }
}

/* Memory of the user's may go right after dp_keep copied it. */
TEST(kept_values_outlive_their_source)
{
    test_allocator counter;
    work w = {.ctx = open_with(decorate_device(lazy_device(toy_device())), &counter)};
    dp_dev *dev = dp_local_stream(w.ctx, 0)->dev;
    dp_tensor own = {.device = dp_local_device(w.ctx, 0), .dtype = DP_F32};
    dp_value copy;
    double item = 0;
    CHECK_OK(dev->ops->alloc(dev, sizeof(float), &own.data));
    dp_scope *scope = dp_scope_begin(w.ctx);
    CHECK_OK(dp_fill(w.ctx, &own, dp_int(9)));
    CHECK_OK(dp_keep(scope, dp_of(scope, &own), &copy));
    dev->ops->free(dev, own.data, sizeof(float)); /* lazy.h looks whether it is in use */
    CHECK_OK(dp_item(w.ctx, copy, &item));
    CHECK_F64(item, 9, 0);
    dp_close(w.ctx);
    CHECK_DECORATOR();
}

/* Without a word to a table that may not answer any more. */
TEST(a_stream_is_taken_back_after_the_job_failed)
{
    test_allocator counter;
    work w = {.ctx = open_with(decorate_device(lazy_device(toy_device())), &counter)};
    with_streams(&w, true);
    dp_stream *own = dp_local_stream(w.ctx, 1);
    CHECK_OK(dp_use_stream(w.ctx, 1, w.streams[1]));
    dp_abort(w.ctx, DP_ERR_DEVICE, "lost");
    size_t calls = deco.log_count;
    CHECK_ERROR(dp_use_stream(w.ctx, 0, w.streams[0]), DP_ERR_DEVICE, "lost");
    CHECK_OK(dp_use_stream(w.ctx, 1, NULL));
    CHECK_INT(deco.log_count, calls);
    CHECK(dp_local_stream(w.ctx, 1) == own);
    with_streams(&w, false);
    dp_close(w.ctx);
    CHECK_DECORATOR();
}

static float first_of(const work *w, const dp_tensor *tensor)
{
    float numbers[COUNT];
    CHECK_OK(dp_read(w->ctx, tensor, numbers, sizeof(numbers)));
    return numbers[0];
}

static void copy_on_named_streams(const dp_device_ops *ops)
{
    test_allocator counter;
    work w = {.ctx = open_with(ops, &counter)};
    dp_tensor host, x, y, far;
    with_streams(&w, true);
    dp_stream *near = w.streams[0], *there = w.streams[1];
    w.scope = dp_scope_begin(w.ctx);
    CHECK_OK(given(&w, 0, &host));
    CHECK_OK(on_device(&w, 0, 0, &x));
    CHECK_OK(on_device(&w, 0, 0, &y));
    CHECK_OK(on_device(&w, 1, 0, &far));

    CHECK_OK(dp_fill(w.ctx, &x, dp_int(5)));
    CHECK_OK(dp_copy(w.ctx, &host, &x, near)); /* out: the host's side is complete */
    CHECK_F64(((float *)host.data)[0], 5, 0);

    CHECK_OK(dp_fill(w.ctx, &y, dp_int(6)));
    CHECK_OK(dp_copy(w.ctx, &y, &host, near)); /* in */
    CHECK_OK(near->dev->ops->stream_sync(near));
    CHECK_F64(first_of(&w, &y), 5, 0);

    CHECK_OK(dp_fill(w.ctx, &x, dp_int(7)));
    CHECK_OK(dp_copy(w.ctx, &y, &x, near)); /* inside */
    CHECK_OK(near->dev->ops->stream_sync(near));
    CHECK_F64(first_of(&w, &y), 7, 0);

    CHECK_OK(dp_fill(w.ctx, &x, dp_int(8)));
    CHECK_OK(dp_fill(w.ctx, &far, dp_int(9)));
    CHECK_OK(dp_copy(w.ctx, &far, &x, there)); /* to another device */
    CHECK_OK(there->dev->ops->stream_sync(there));
    CHECK_F64(first_of(&w, &far), 8, 0);

    dp_scope_end(w.scope);
    with_streams(&w, false);
    dp_close(w.ctx);
    CHECK_NO_LEAKS(&counter);
    CHECK_DECORATOR();
}

/* What is on the compute streams of both sides by then comes first, whichever way it goes. */
TEST(copies_on_a_named_stream_come_after_the_compute_streams)
{
    copy_on_named_streams(decorate_device(lazy_device(toy_device())));
    copy_on_named_streams(decorate_device(lazy_device(reluctant_device(HAS_ALL, ALL_KERNELS))));
    copy_on_named_streams(decorate_device(lazy_device(reluctant_one_memory(HAS_ALL, ALL_KERNELS))));
}

/* Bytes that lie together on both sides are the table's own copy; what does not, its kernel's. */
TEST(contiguous_tensors_are_copied_in_one_call)
{
    test_allocator counter;
    work w = {.ctx = open_with(decorate_device(reluctant_device(HAS_ALL, ALL_KERNELS)), &counter)};
    dp_tensor x, y, turned;
    w.scope = dp_scope_begin(w.ctx);
    CHECK_OK(on_device(&w, 0, 0, &x));
    CHECK_OK(on_device(&w, 0, 0, &y));
    CHECK_OK(on_device(&w, 0, 1, &turned));
    CHECK_OK(dp_fill(w.ctx, &x, dp_int(3)));
    int copies = deco_calls(DECO_copy), kernels = deco_calls(DECO_kernel);
    CHECK_OK(dp_copy(w.ctx, &y, &x, NULL));
    CHECK_INT(deco_calls(DECO_copy), copies + 1);
    CHECK_INT(deco_calls(DECO_kernel), kernels);
    CHECK_OK(dp_copy(w.ctx, &turned, &x, NULL));
    CHECK_INT(deco_calls(DECO_copy), copies + 1);
    CHECK_INT(deco_calls(DECO_kernel), kernels + 1);
    CHECK_F64(first_of(&w, &y), 3, 0);
    CHECK_F64(first_of(&w, &turned), 3, 0);
    dp_scope_end(w.scope);
    dp_close(w.ctx);
    CHECK_NO_LEAKS(&counter);
    CHECK_DECORATOR();
}

/* No kernel of a device's takes what is not aligned. Both sides go through the host as a whole,
   rather than element by element. */
TEST(unaligned_tensors_are_copied_by_the_host)
{
    test_allocator counter;
    work w = {.ctx = open_with(decorate_device(reluctant_device(HAS_ALL, ALL_KERNELS)), &counter)};
    dp_tensor x, odd, bytes;
    w.scope = dp_scope_begin(w.ctx);
    CHECK_OK(on_device(&w, 0, 0, &x));
    CHECK_OK(on_device(&w, 0, 1, &odd));
    CHECK_OK(dp_tensor_new(w.scope, odd.device, DP_U8, DP_SHAPE(COUNT * 4 + 1), &bytes));
    odd.data = (char *)bytes.data + 1;
    CHECK_OK(dp_fill(w.ctx, &x, dp_int(3)));
    int copies = deco_calls(DECO_copy), kernels = deco_calls(DECO_kernel);
    int out = deco_calls(DECO_copy_out), in = deco_calls(DECO_copy_in);
    CHECK_OK(dp_copy(w.ctx, &odd, &x, NULL));
    CHECK_INT(deco_calls(DECO_copy), copies);
    CHECK_INT(deco_calls(DECO_kernel), kernels);
    CHECK_INT(deco_calls(DECO_copy_out), out + 2);
    CHECK_INT(deco_calls(DECO_copy_in), in + 1);
    CHECK_F64(first_of(&w, &odd), 3, 0);
    dp_scope_end(w.scope);
    dp_close(w.ctx);
    CHECK_NO_LEAKS(&counter);
    CHECK_DECORATOR();
}

/* What a collective lacks goes through temporary memory, which was another's on the compute
   stream: the stream that the caller named comes after that. */
TEST(a_detour_on_a_named_stream_is_ordered)
{
    test_allocator counter;
    work w = {.ctx = open_with(decorate_device(lazy_device(toy_device())), &counter)};
    with_streams(&w, true);
    w.scope = dp_scope_begin(w.ctx);
    CHECK_OK(collective(&w, 5, false));
    int waits = deco_calls(DECO_event_wait);
    dp_tensor send[RANKS];
    dp_part parts[RANKS];
    for (int r = 0; r < RANKS; r++) {
        CHECK_OK(dp_tensor_new(w.scope, dp_local_device(w.ctx, r), DP_F32, DP_SHAPE(4), &send[r]));
        parts[r] = (dp_part){send[r].data, send[r].data, w.streams[r]};
    }
    CHECK_OK(dp_reduce_to(w.ctx, parts, 4, DP_F32, DP_OP_SUM, 0));
    CHECK_INT(deco_calls(DECO_event_wait) - waits, RANKS - 1); /* of those that need a detour */
    dp_scope_end(w.scope);
    with_streams(&w, false);
    dp_close(w.ctx);
    CHECK_DECORATOR();
}

static int weighed;

static dp_status weigh_one_only(dp_stream *stream, const dp_kernel_args *args)
{
    if (args->kernel == DP_KERNEL_AXPBY && weighed++ == 1)
        return DP_ERR_NO_MEMORY;
    return deco_kernel(stream, args);
}

/* The first part is weighed on a stream of the caller's, the second cannot be: what waits in that
   stream is done before the caller learns it, and may take the memory away. */
TEST(a_weighted_mean_that_fails_is_out_of_named_streams)
{
    test_allocator counter;
    dp_part parts[RANKS];
    const double weights[RANKS] = {1, 2, 3};
    decorate_device(lazy_device(reluctant_device(HAS_PEER_COPY | HAS_KERNEL, ALL_KERNELS)));
    deco.device.kernel = weigh_one_only;
    work w = {.ctx = open_with(&deco.device, &counter)};
    with_streams(&w, true);
    for (int r = 0; r < RANKS; r++) {
        dp_dev *dev = w.streams[r]->dev;
        parts[r].stream = w.streams[r];
        CHECK_OK(dev->ops->alloc(dev, COUNT * sizeof(float), &parts[r].recv));
        parts[r].send = parts[r].recv;
    }
    weighed = 0;
    CHECK_STATUS(dp_all_reduce_weighted(w.ctx, parts, weights, COUNT, DP_F32), DP_ERR_NO_MEMORY);
    CHECK_INT(weighed, 2);
    for (int r = 0; r < RANKS; r++) {
        dp_dev *dev = w.streams[r]->dev;
        dev->ops->free(dev, parts[r].recv,
                       COUNT * sizeof(float)); /* lazy.h looks if it is in use */
    }
    with_streams(&w, false);
    dp_close(w.ctx);
    CHECK_DECORATOR();
}
