/* test_distributed.c - a module on all ranks of a job: one process or several, each with one device
   or more. */

#include <stdlib.h>
#include "dp_train.h"
#include "examples/custom_device.h"
#include "decorator.h"
#include "ranked.h"

/* ---- worked values --------------------------------------------------------------------------- */

/* torch: 1.5 on both; without sync 11.5 and 21.5; with it 166.5 on both. */
static void steps_of_torch(dp_ctx *ctx)
{
    static const plan how;
    dp_module *net = make_net(ctx, &how), *par;
    CHECK_OK(dp_distributed(net, NULL, &par));
    CHECK_OK(forward_and_backward(par, 1, false));
    check_grads(net, 1.5, 1.5);
    CHECK_OK(forward_and_backward(par, 10, true));
    check_grads(net, info_here(ctx).rank_first == 0 ? 11.5 : 21.5,
                info_here(ctx).rank_first == 0 ? 11.5 : 21.5);
    CHECK_OK(forward_and_backward(par, 100, false));
    check_grads(net, 166.5, 166.5);
    CHECK_OK(dp_zero_grad(par)); /* of all local ranks */
    CHECK_OK(forward_and_backward(par, 2, true));
    CHECK_OK(dp_zero_grad(net));
    CHECK_OK(forward_and_backward(par, 4, false));
    check_grads(net, 6, 6);
    dp_close(ctx);
}

static char alike_text[300];
static int alike_count;

static void hear_alike(const dp_log_record *record, void *user)
{
    (void)user;
    if (strstr(record->text, "have the numbers of rank 0") == NULL)
        return;
    CHECK_INT(record->level, DP_LOG_INFO);
    snprintf(alike_text, sizeof alike_text, "%s", record->text);
    alike_count++;
}

static void wrap_and_hear(meeting *m)
{
    static const char *const ignored[] = {"v"};
    static const plan how;
    dp_ctx *ctx;
    dp_module *net, *par;
    dp_config config = config_of(m, 2);
    config.log = (dp_log){.fn = hear_alike};
    CHECK_OK(dp_open(&config, &ctx));
    CHECK_OK(dp_distributed(make_net(ctx, &how), NULL, &par));
    CHECK_INT(alike_count, m->process_count > 1);
    if (alike_count > 0)
        CHECK_STR(alike_text, "'net': all processes have the numbers of rank 0: 2 parameters and "
                              "1 buffer of 296 bytes");
    net = make_net(ctx, &how);
    CHECK_OK(dp_distributed(net, &(dp_distributed_config){.ignored = ignored, .ignored_count = 1},
                            &par));
    if (alike_count > 0)
        CHECK_STR(alike_text, "'net': all processes have the numbers of rank 0: 1 parameter and "
                              "1 buffer of 16 bytes");
    dp_close(ctx);
}

TEST(processes_that_were_made_equal_say_so)
{
    in_processes(1, wrap_and_hear);
    in_processes(2, wrap_and_hear);
}

TEST(worked_values_of_torch_in_one_process)
{
    steps_of_torch(open_here(2));
}

TEST(worked_values_of_torch_on_devices_with_memory_of_their_own)
{
    steps_of_torch(open_on(toy_device(), 2));
}

static void torch_in_processes(meeting *m)
{
    steps_of_torch(open_job(m, 1, dp_cpu()));
}

static void torch_over_shm(meeting *m)
{
    steps_of_torch(open_over_shm(m, 1, 0));
}

TEST(worked_values_of_torch_in_two_processes)
{
    in_processes(2, torch_in_processes);
    in_processes(2, torch_over_shm);
    in_processes_on(toy_device(), 2, torch_over_shm);
}

static void sums_and_means(dp_ctx *ctx)
{
    static const plan how;
    int ranks = info_here(ctx).rank_count;
    double sum = ranks * (ranks + 1) / 2.0;
    static const dp_reduction kinds[] = {DP_SUM_RANKS, DP_MEAN_RANKS, DP_MEAN_SAMPLES};
    for (int i = 0; i < 3; i++) {
        dp_module *net = make_net(ctx, &how), *par;
        double want = kinds[i] == DP_SUM_RANKS ? sum : sum / ranks; /* one row a rank */
        CHECK_OK(dp_distributed(net, &(dp_distributed_config){.reduction = kinds[i]}, &par));
        for (int step = 0; step < 3; step++) {
            CHECK_OK(forward_and_backward(par, 3, true));
            CHECK_OK(forward_and_backward(par, 5, false));
            check_grads(net, kinds[i] == DP_MEAN_SAMPLES ? 4 * want : 8 * want,
                        kinds[i] == DP_MEAN_SAMPLES ? 4 * want : 8 * want);
            if (kinds[i] != DP_MEAN_RANKS)
                CHECK_ERROR(forward_and_backward(par, 1, false), DP_ERR_STATE,
                            "call dp_zero_grad before the next backward");
            CHECK_OK(dp_zero_grad(par));
        }
    }
    dp_close(ctx);
}

static void sums_over_shm(meeting *m)
{
    sums_and_means(open_over_shm(m, 1 + m->process, 0));
}

TEST(sums_and_means_of_any_number_of_ranks)
{
    sums_and_means(open_here(1));
    sums_and_means(open_here(3));
    in_processes(2, sums_over_shm);
    in_processes_on(toy_device(), 2, sums_over_shm);
}

/* Each knows nothing of what the other has reduced, or on which device it is. */
static void two_wrappers(dp_ctx *ctx)
{
    static const plan how;
    double mean = (info_here(ctx).rank_count + 1) / 2.0;
    dp_module *net = make_net(ctx, &how), *pars[2];
    for (int i = 0; i < 2; i++)
        CHECK_OK(dp_distributed(net, NULL, &pars[i]));
    for (int turn = 0; turn < 8; turn++) {
        dp_module *one = pars[turn % 2], *other = pars[1 - turn % 2];
        CHECK_OK(forward_and_backward(one, 2, turn & 2));
        CHECK_ERROR(forward_and_backward(other, 3, turn & 4), DP_ERR_STATE,
                    "another wrapper has added to the gradient of 'w' of 'net': call dp_zero_grad "
                    "first");
        CHECK_OK(dp_zero_grad(turn < 4 ? net : other));
        CHECK_OK(forward_and_backward(other, 4, false));
        CHECK_OK(forward_and_backward(other, 1, false));
        check_grads(net, 5 * mean, 5 * mean);
        CHECK_OK(dp_zero_grad(one));
    }
    dp_close(ctx);
}

static void two_wrappers_in_processes(meeting *m)
{
    two_wrappers(open_over_shm(m, 1 + m->process, 0));
}

TEST(dp_zero_grad_comes_between_two_wrappers)
{
    two_wrappers(open_here(1));
    two_wrappers(open_on(toy_device(), 2));
    in_processes(2, two_wrappers_in_processes);
    in_processes_on(toy_device(), 2, two_wrappers_in_processes);
}

/* ---- gradients that the user changes --------------------------------------------------------- */

static void scale_grads(dp_module *net, double by)
{
    dp_tensor data, grad;
    for (size_t i = 0; i < 2; i++) {
        CHECK_OK(dp_params_edit(net, i, &data, &grad));
        CHECK_OK(dp_axpby(dp_module_ctx(net), by, &grad, 0, NULL, &grad));
    }
}

/* After a reduction the module's count for all its devices. */
static void change_by_hand(dp_ctx *ctx)
{
    static const plan how;
    int ranks = info_here(ctx).rank_count;
    double mean = (ranks + 1) / 2.0, own = info_here(ctx).rank_first + 1;
    dp_distributed_config configs[] = {{.name = NULL},
                                       {.buckets.wire = DP_F16},
                                       {.buckets.first_bytes = 1},
                                       {.buckets.hook = plain_hook},
                                       {.unused_params = DP_UNUSED_FOUND}};
    for (size_t i = 0; i < sizeof configs / sizeof *configs; i++) {
        dp_module *net = make_net(ctx, &how), *par;
        CHECK_OK(dp_distributed(net, &configs[i], &par));
        for (int step = 0; step < 2; step++) {
            CHECK_OK(forward_and_backward(par, 2, false));
            check_grads(net, 2 * mean, 2 * mean);
            scale_grads(net, 0.25);
            CHECK_OK(forward_and_backward(par, 1, false));
            check_grads(net, 1.5 * mean, 1.5 * mean);
            CHECK_OK(forward_and_backward(par, 3, true));
            check_grads(net, 1.5 * mean + 3 * own, 1.5 * mean + 3 * own);
            CHECK_OK(forward_and_backward(par, 4, false));
            check_grads(net, 8.5 * mean, 8.5 * mean);
            scale_grads(net, 0); /* no dp_zero_grad */
        }
    }
    dp_close(ctx);
}

static void change_over_shm(meeting *m)
{
    change_by_hand(open_over_shm(m, 3 - m->process, 0));
}

TEST(gradients_may_be_changed_by_hand)
{
    for (int devices = 1; devices <= 3; devices++)
        change_by_hand(open_here(devices));
    change_by_hand(open_on(toy_device(), 3));
    in_processes(2, change_over_shm);
    in_processes_on(toy_device(), 2, change_over_shm);
}

/* ---- buffers --------------------------------------------------------------------------------- */

static void check_buffer(dp_module *net, double want)
{
    CHECK_F64(element(net, 2, false, 0), want, 1e-6);
}

/* torch: 0.1 and 0.2; then rank 1 starts from 0.1. */
static void buffers_in_two(meeting *m)
{
    static const plan how;
    dp_ctx *ctx = open_over_shm(m, 1, 0);
    dp_module *net = make_net(ctx, &how), *par;
    dp_scope *scope = dp_scope_begin(ctx);
    dp_value out;
    bool first = m->process == 0;
    CHECK_OK(dp_distributed(net, NULL, &par));
    CHECK_OK(forward_and_backward(par, 1, false));
    check_buffer(net, first ? 0.1 : 0.2);
    CHECK_OK(forward_and_backward(par, 1, false));
    check_buffer(net, first ? 0.19 : 0.29);
    if (first) /* an evaluation meets nobody */
        CHECK_OK(dp_invoke(par, scope, "forward", dp_none(), dp_none(), NULL, &out, NULL));
    check_buffer(net, first ? 0.271 : 0.29);
    CHECK_OK(forward_and_backward(par, 1, true)); /* the first after a reduction: made equal */
    check_buffer(net, first ? 0.3439 : 0.4439);
    CHECK_OK(forward_and_backward(par, 1, true)); /* after one without sync: not */
    check_buffer(net, first ? 0.40951 : 0.59951);
    CHECK_OK(forward_and_backward(par, 1, false));
    check_buffer(net, first ? 0.468559 : 0.739559);
    CHECK_OK(forward_and_backward(par, 1, false));
    check_buffer(net, first ? 0.5217031 : 0.6217031);
    dp_close(ctx);
}

TEST(buffers_follow_rank_0_as_in_torch)
{
    in_processes(2, buffers_in_two);
    in_processes_on(toy_device(), 2, buffers_in_two);
}

static void other_buffers(meeting *m)
{
    static const plan how;
    dp_ctx *ctx = open_over_shm(m, 1, 0);
    dp_module *net = make_net(ctx, &how), *par;
    bool first = m->process == 0;
    CHECK_OK(dp_distributed(net, &(dp_distributed_config){.buffers = DP_BUFFERS_LOCAL}, &par));
    CHECK_OK(forward_and_backward(par, 1, false));
    CHECK_OK(forward_and_backward(par, 1, false));
    check_buffer(net, first ? 0.19 : 0.38);
    net = make_net(ctx, &how);
    CHECK_OK(dp_distributed(net, &(dp_distributed_config){.buffers = DP_BUFFERS_MEAN}, &par));
    CHECK_OK(forward_and_backward(par, 1, false));
    CHECK_OK(forward_and_backward(par, 1, false));
    check_buffer(net, first ? 0.235 : 0.335);
    dp_close(ctx);
}

TEST(buffers_can_stay_local_or_become_their_mean)
{
    in_processes(2, other_buffers);
    in_processes_on(toy_device(), 2, other_buffers);
}

/* Replicas of one process are ranks too. */
TEST(buffers_of_local_ranks)
{
    static const plan how;
    dp_ctx *ctx = open_here(3);
    dp_module *net = make_net(ctx, &how), *par;
    CHECK_OK(dp_distributed(net, &(dp_distributed_config){.buffers = DP_BUFFERS_MEAN}, &par));
    CHECK_OK(forward_and_backward(par, 1, false));
    check_buffer(net, 0.1);
    CHECK_OK(forward_and_backward(par, 1, false));
    check_buffer(net, 0.9 * 0.2 + 0.1);
    dp_close(ctx);
}

/* What they need where ranks meet, before and behind, is given back. */
TEST(passes_in_a_loop_allocate_nothing)
{
    static const plan how;
    test_allocator counter = {0};
    dp_ctx *ctx = NULL;
    dp_module *par;
    size_t before = 0;
    CHECK_OK(
        dp_open(&(dp_config){.device_count = 3, .allocator = test_allocator_of(&counter)}, &ctx));
    CHECK_OK(dp_distributed(make_net(ctx, &how), NULL, &par));
    for (int i = 0; i < 40; i++) {
        before = i == 10 ? counter.call_count : before;
        CHECK_OK(forward_and_backward(par, 1, false));
    }
    CHECK_INT(counter.call_count, before);
    dp_close(ctx);
    CHECK_NO_LEAKS(&counter);
}

/* ---- the start ------------------------------------------------------------------------------- */

static void start_apart(meeting *m)
{
    static const plan how;
    dp_ctx *ctx = open_over_shm(m, 1 + m->process, 0);
    dp_module *net = make_net(ctx, &how), *par;
    float w[W], v[V], seen = 0.5f;
    for (int i = 0; i < V; i++)
        v[i] = w[i % W] = (float)(i + 100 * m->process);
    CHECK_OK(dp_params_write(net, 0, w, sizeof w));
    CHECK_OK(dp_params_write(net, 1, v, sizeof v));
    if (m->process == 0)
        CHECK_OK(dp_params_write(net, 2, &seen, sizeof seen));
    CHECK_ERROR(dp_params_compare(net), DP_ERR_MISMATCH,
                "rank 1 has parameter 'w' f32 [3] of hash");
    CHECK_OK(dp_distributed(net, NULL, &par));
    CHECK_F64(element(net, 0, false, 0), V - 1, 0);
    CHECK_F64(element(net, 1, false, V - 1), V - 1, 0);
    CHECK_F64(element(net, 2, false, 0), 0.5, 0);
    CHECK_OK(dp_params_compare(par));
    v[V - 1] += m->process > 0;
    CHECK_OK(dp_params_write(net, 1, v, sizeof v));
    if (m->process > 0)
        CHECK_OK(dp_params_write(net, 0, w, sizeof w));
    CHECK_ERROR(dp_params_compare(par), DP_ERR_MISMATCH, "rank 1 has parameter 'w'");
    dp_close(ctx);
}

TEST(all_ranks_start_with_the_numbers_of_rank_0)
{
    in_processes(2, start_apart);
}

typedef struct odd_net { /* how the net of one process differs */
    const char *w, *says;
    dp_dtype dtype;
    int64_t v;
    size_t params;
    dp_reduction reduction;
    bool frozen;
} odd_net;

static const odd_net odd_nets[] = {
    {"W", "rank 2 has parameter 'W' f32 [3], rank 0 has parameter 'w' f32 [3]", DP_F32, V, 3, 0, 0},
    {"w", "rank 2 has parameter 'w' f64 [3], rank 0 has parameter 'w' f32 [3]", DP_F64, V, 3, 0, 0},
    {"w", "rank 2 has parameter 'v' f32 [71], rank 0 has parameter 'v' f32 [70]", DP_F32, V + 1, 3,
     0, 0},
    {"w", "rank 2 has nothing more, rank 0 has buffer 'seen' f32 []", DP_F32, V, 2, 0, 0},
    {"w", "rank 2 has reduction DP_SUM_RANKS, rank 0 has reduction DP_MEAN_RANKS", DP_F32, V, 3,
     DP_SUM_RANKS, 0},
    {"w", "rank 2 has parameter 'w' f32 [3], frozen", DP_F32, V, 3, 0, true},
    {"w", "rank 2: reduction is 9, not DP_SUM_RANKS, DP_MEAN_RANKS or DP_MEAN_SAMPLES", DP_F32, V,
     3, (dp_reduction)9, 0},
};

static void one_is_odd(meeting *m)
{
    static const plan how;
    dp_ctx *ctx = open_over_shm(m, 1, 0);
    for (size_t i = 0; i < sizeof odd_nets / sizeof *odd_nets; i++) {
        const odd_net *odd = &odd_nets[i];
        dp_module *par = NULL;
        dp_param_config params[3];
        dp_distributed_config config = {.reduction = 0};
        dp_module_config own = {.params = params, .state = &how};
        memcpy(params, net_params, sizeof params);
        if (m->process == 2) {
            params[0].name = odd->w;
            params[0].dtype = odd->dtype;
            params[0].frozen = odd->frozen;
            params[1].shape[0] = odd->v;
            own.param_count = odd->params;
            config.reduction = odd->reduction;
        }
        dp_module *net = make_net_of(ctx, own);
        bool wrong = (int)odd->reduction > DP_MEAN_SAMPLES;
        CHECK_ERROR(dp_distributed(net, &config, &par), wrong ? DP_ERR_INVALID : DP_ERR_MISMATCH,
                    odd->says);
        CHECK(par == NULL);
        CHECK_OK(dp_module_destroy(net)); /* nothing wraps it */
    }
    dp_module *net = make_net(ctx, &how), *par;
    CHECK_OK(dp_distributed(net, NULL, &par)); /* the job goes on */
    CHECK_OK(forward_and_backward(par, 1, false));
    check_grads(net, 2, 2);
    dp_close(ctx);
}

TEST(ranks_that_differ_are_named)
{
    in_processes(3, one_is_odd);
    in_processes_on(toy_device(), 3, one_is_odd);
}

/* A field at a time; what ranks do not have to share may differ. */
static void one_has_another_config(meeting *m)
{
    static const plan how;
    static const struct {
        dp_distributed_config config;
        const char *says;
    } cases[] = {
        {{.reduction = DP_MEAN_SAMPLES},
         "rank 1 has reduction DP_MEAN_SAMPLES, rank 0 has reduction DP_MEAN_RANKS"},
        {{.buffers = DP_BUFFERS_LOCAL},
         "rank 1 has buffers DP_BUFFERS_LOCAL, rank 0 has buffers DP_BUFFERS_FIRST"},
        {{.unused_params = DP_UNUSED_FIXED},
         "rank 1 has unused_params DP_UNUSED_FIXED, rank 0 has unused_params DP_UNUSED_ERROR"},
        {{.buckets.first_bytes = 9},
         "rank 1 has buckets.first_bytes 9, rank 0 has buckets.first_bytes 1048576"},
        {{.buckets.bytes = 9}, "rank 1 has buckets.bytes 9, rank 0 has buckets.bytes 26214400"},
        {{.buckets.wire = DP_BF16}, "rank 1 has wire bf16, rank 0 has wire f32"},
        {{.buckets.hook = plain_hook}, "rank 1 has a hook, rank 0 has no hook"},
        {{.unused_params = (dp_unused)7},
         "rank 1: unused_params is 7, not DP_UNUSED_ERROR, _FOUND or _FIXED"},
        {{.buckets.wire = DP_I8}, "rank 1: wire is 7, not 0, DP_F16 or DP_BF16"}};
    dp_ctx *ctx = open_over_shm(m, 1, 0);
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        char want[200];
        dp_module *net = make_net(ctx, &how), *par = NULL;
        const dp_distributed_config *own = m->process == 1 ? &cases[i].config : NULL;
        bool wrong = strncmp(cases[i].says, "rank 1: ", 8) == 0;
        snprintf(want, sizeof want, "dp_distributed: %s", cases[i].says);
        CHECK_STATUS(dp_distributed(net, own, &par), wrong ? DP_ERR_INVALID : DP_ERR_MISMATCH);
        CHECK_STR(dp_last_error(), want);
    }
    dp_close(ctx);
}

TEST(configs_that_differ_are_told_by_their_fields)
{
    in_processes(2, one_has_another_config);
}

static void one_has_more(meeting *m)
{
    static const plan how;
    dp_ctx *ctx = open_over_shm(m, 1, 0);
    dp_module_config own = {.param_count = m->process == 1 ? 3 : 2, .state = &how};
    dp_module *net = make_net_of(ctx, own), *par = NULL;
    CHECK_ERROR(dp_distributed(net, NULL, &par), DP_ERR_MISMATCH,
                "rank 1 has buffer 'seen' f32 [], rank 0 has nothing more");
    dp_close(ctx);
}

TEST(a_rank_with_more_than_rank_0_is_named)
{
    in_processes(3, one_has_more);
}

/* ---- who is used, who is ready --------------------------------------------------------------- */

TEST(unused_parameters_are_an_error_or_stay_as_they_are)
{
    static plan how = {.habit = {ONLY_W, ONLY_W}};
    static heard all;
    dp_ctx *ctx;
    dp_module *net, *par;
    CHECK_OK(dp_open(&(dp_config){.device_count = 2, .log = {.fn = hear, .user = &all}}, &ctx));
    net = make_net(ctx, &how);
    CHECK_OK(dp_distributed(net, NULL, &par));
    CHECK_ERROR(forward_and_backward(par, 1, false), DP_ERR_MISMATCH,
                "did not report unit 1 'v' of 'net' in this pass "
                "(see dp_distributed_config.unused_params): gradients are void");
    CHECK_OK(dp_zero_grad(par));
    CHECK_ERROR(forward_and_backward(par, 1, false), DP_ERR_MISMATCH, "rank 0");
    net = make_net(ctx, &how);
    CHECK_OK(dp_distributed(
        net, &(dp_distributed_config){.unused_params = DP_UNUSED_FOUND, .log_unused = true}, &par));
    CHECK_INT(all.count, 0);
    CHECK_OK(forward_and_backward(par, 1, false));
    check_grads(net, 1.5, 0);
    CHECK_INT(all.count, 1);
    CHECK_STR(all.lines[0], "parameter 'v' f32 [70] got no gradient in this backward");
    how.habit[1] = ALL; /* one rank uses it: it is reduced, and zeros on the other */
    CHECK_OK(forward_and_backward(par, 1, false));
    check_grads(net, 3, 1);
    CHECK_INT(all.count, 1);
    how.habit[1] = ONLY_W;
    CHECK_OK(forward_and_backward(par, 1, false));
    check_grads(net, 4.5, 1);
    dp_close(ctx);
}

static void said_early(meeting *m)
{
    static plan how = {.habit = {ALL_SAID, ALL_SAID, ALL_SAID, ALL_SAID}};
    dp_ctx *ctx = open_over_shm(m, 2, 0);
    dp_module *net = make_net(ctx, &how), *par;
    dp_reducer_info info;
    CHECK_OK(dp_distributed(
        net, &(dp_distributed_config){.buckets = {.first_bytes = 4, .bytes = 4}}, &par));
    for (int step = 0; step < 3; step++) {
        CHECK_OK(forward_and_backward(par, 1, false));
        check_grads(net, 2.5 * (step + 1), 2.5 * (step + 1));
        CHECK_OK(dp_reducer_info_get(dp_wrapper_reducer(par), &info));
        CHECK_INT(info.bucket_count, 2);
        CHECK_INT(info.unit_count, 2);
    }
    CHECK(info.regrouped);
    check_buckets(dp_wrapper_reducer(par), "1 | 0");
    dp_close(ctx);
}

TEST(gradients_that_are_ready_may_travel)
{
    in_processes(2, said_early);
    in_processes_on(toy_device(), 2, said_early);
}

TEST(a_gradient_is_ready_once)
{
    static plan how = {.habit = {SAID_TWICE}};
    dp_ctx *ctx = open_here(1);
    dp_module *net = make_net(ctx, &how), *par;
    CHECK_OK(dp_distributed(net, NULL, &par));
    CHECK_ERROR(forward_and_backward(par, 1, false), DP_ERR_STATE,
                "dp_grad_ready: 'v' of 'net' was already reported as ready");
    how.habit[0] = ALL_SAID;
    CHECK_OK(dp_zero_grad(par));
    CHECK_OK(forward_and_backward(par, 1, false));
    check_grads(net, 1, 1);
    CHECK_OK(forward_and_backward(par, 1, true));
    check_grads(net, 2, 2);
    CHECK_OK(dp_zero_grad(par));
    CHECK_OK(forward_and_backward(net, 1, false)); /* without the wrapper it says nothing */
    check_grads(net, 1, 1);
    dp_close(ctx);
}

/* ---- what fails ------------------------------------------------------------------------------ */

TEST(a_pass_that_fails_in_one_process_is_over)
{
    static plan how = {.habit = {ALL, FAILS}};
    dp_ctx *ctx = open_here(2);
    dp_module *net = make_net(ctx, &how), *par;
    CHECK_OK(dp_distributed(net, NULL, &par));
    CHECK_ERROR(forward_and_backward(par, 1, false), DP_ERR_USER, "no backward today");
    how.habit[1] = FAILS_FORWARD;
    CHECK_ERROR(forward_and_backward(par, 1, false), DP_ERR_USER, "no forward today");
    how.habit[1] = ALL;
    CHECK_OK(dp_zero_grad(par));
    CHECK_OK(forward_and_backward(par, 1, false));
    check_grads(net, 1.5, 1.5);
    dp_close(ctx);
}

/* Forward by itself. */
static void one_fails_forward(meeting *m)
{
    plan how = {.habit = {ALL, ALL, FAILS_FORWARD}};
    bool any = false;
    dp_ctx *ctx = open_over_shm(m, 1, 0);
    dp_module *net = make_net(ctx, &how), *par;
    CHECK_OK(dp_distributed(net, NULL, &par));
    wait_for_all(m);
    CHECK_ERROR(forward_and_backward(par, 1, false), DP_ERR_INTERNAL,
                m->process == 2 ? "net." : "rank 2");
    CHECK(strstr(dp_last_error(), "today (DP_ERR_USER)") != NULL);
    CHECK_INT(dp_status_class(dp_any(ctx, true, &any)), DP_CLASS_JOB);
    dp_close(ctx);
}

TEST(a_method_that_fails_in_a_forward_ends_the_job)
{
    in_processes(3, one_fails_forward);
}

TEST(wrong_modules_are_not_distributed)
{
    static const plan how;
    dp_ctx *ctx = open_here(2);
    dp_module *net = make_net(ctx, &how), *par = NULL, *other = NULL;
    dp_distributed_config config = {.buffers = (dp_buffer_sync)3};
    CHECK_ERROR(dp_distributed(NULL, NULL, &par), DP_ERR_INVALID, "module is NULL");
    CHECK_ERROR(dp_distributed(net, NULL, NULL), DP_ERR_INVALID, "out is NULL");
    CHECK_ERROR(dp_distributed(net, &config, &par), DP_ERR_INVALID, "buffers is 3");
    config = (dp_distributed_config){.reduction = (dp_reduction)-1};
    CHECK_ERROR(dp_distributed(net, &config, &par), DP_ERR_INVALID, "reduction is -1");
    config = (dp_distributed_config){.unused_params = (dp_unused)7};
    CHECK_ERROR(dp_distributed(net, &config, &par), DP_ERR_INVALID, "7");
    config = (dp_distributed_config){.cut.dim = 99};
    CHECK_ERROR(dp_distributed(net, &config, &par), DP_ERR_INVALID, "dim is 99");
    CHECK(par == NULL);
    CHECK_OK(dp_distributed(net, NULL, &par));
    CHECK_ERROR(dp_data_parallel(par, NULL, &other), DP_ERR_UNSUPPORTED,
                "it cannot be wrapped again");
    CHECK_ERROR(dp_distributed(par, NULL, &other), DP_ERR_UNSUPPORTED,
                "it cannot be wrapped again");
    CHECK(other == NULL);
    CHECK(dp_wrapper_reducer(net) == NULL && dp_wrapper_reducer(NULL) == NULL);
    CHECK_OK(dp_data_parallel(net, NULL, &other));
    CHECK(dp_wrapper_reducer(other) == NULL);
    CHECK_OK(dp_module_destroy(par)); /* and its reducer */
    dp_close(ctx);
}

static bool survives_allocation(size_t n)
{
    static const plan how;
    test_allocator counter = {.fail_at = n};
    dp_ctx *ctx = NULL;
    dp_module *net = NULL, *par = NULL;
    dp_config config = {
        .device_count = 2, .poison = true, .allocator = test_allocator_of(&counter)};
    dp_status status = dp_open(&config, &ctx);
    if (status == DP_OK)
        status = dp_module_create(ctx,
                                  &(dp_module_config){.name = "net",
                                                      .methods = net_methods,
                                                      .method_count = 2,
                                                      .params = net_params,
                                                      .param_count = 3,
                                                      .state = &how},
                                  &net);
    if (status == DP_OK)
        status = dp_distributed(net, NULL, &par);
    if (status != DP_OK)
        CHECK_INT(status, DP_ERR_NO_MEMORY);
    else
        CHECK_OK(dp_module_destroy(par));
    if (status == DP_OK || net != NULL)
        CHECK_OK(dp_module_destroy(net)); /* nothing wraps it */
    dp_close(ctx);
    CHECK_NO_LEAKS(&counter);
    return counter.fail_count > 0;
}

TEST_SLOW(the_nth_allocation_fails, 60)
{
    for (size_t n = 1; survives_allocation(n);)
        n += (size_t)test_step();
}

static dp_module *a_net(dp_ctx *ctx)
{
    static const plan how;
    return make_net(ctx, &how);
}

static dp_status wrap_and_compare(dp_module *net)
{
    dp_module *par;
    DP_TRY(dp_distributed(net, NULL, &par));
    DP_TRY(dp_buffers_sync(par));
    return dp_params_compare(par);
}

TEST_SLOW(the_nth_allocation_of_one_process_fails, 120)
{
    CHECK(each_allocation_fails_in_one(a_net, wrap_and_compare) > 20);
}

static dp_status ask_together(int rank, dp_scope *scope, void *user)
{
    bool any = false;
    dp_module *net = user, *par;
    (void)scope;
    if (rank == 0)
        return DP_OK;
    CHECK_ERROR(dp_params_compare(net), DP_ERR_STATE, "dp_params_compare");
    CHECK_ERROR(dp_any(dp_module_ctx(net), true, &any), DP_ERR_STATE, "dp_any");
    CHECK_ERROR(dp_distributed(net, NULL, &par), DP_ERR_STATE, "dp_distributed");
    return DP_OK;
}

TEST(no_meeting_inside_a_run)
{
    static const plan how;
    dp_ctx *ctx = open_here(2);
    dp_module *net = make_net(ctx, &how);
    CHECK_OK(dp_run(ctx, NULL, ask_together, net));
    CHECK_OK(dp_module_destroy(net));
    dp_close(ctx);
}

/* ---- N ranks compute what one computes ------------------------------------------------------- */

/* y = w x, loss (y - t)^2 a row; 'loss_line' holds a row each. */
static dp_status line_forward(dp_call *call)
{
    const dp_tensor *x, *t;
    dp_tensor out;
    DP_TRY(dp_call_tensor(call, "x", DP_F32, 1, &x));
    DP_TRY(dp_call_tensor(call, "t", DP_F32, 1, &t));
    DP_TRY(dp_tensor_new(call->scope, call->device, DP_F32, 1, x->shape, &out));
    const float *w = dp_param(call, 0), *px = x->data, *pt = t->data;
    for (int64_t i = 0; i < x->shape[0]; i++)
        ((float *)out.data)[i] = (w[0] * px[i] - pt[i]) * (w[0] * px[i] - pt[i]);
    call->out = DP_DICT(call->scope, {"loss_line", dp_of(call->scope, &out)});
    return DP_OK;
}

static dp_status line_backward(dp_call *call)
{
    const dp_tensor *x, *t;
    dp_tensor grad;
    DP_TRY(dp_call_tensor(call, "x", DP_F32, 1, &x));
    DP_TRY(dp_call_tensor(call, "t", DP_F32, 1, &t));
    DP_TRY(dp_call_out_grad(call, "loss_line", &grad));
    const float *w = dp_param(call, 0), *px = x->data, *pt = t->data, *g = grad.data;
    float *gw = dp_grad(call, 0);
    for (int64_t i = 0; i < x->shape[0]; i++)
        gw[0] += g[i] * 2 * (w[0] * px[i] - pt[i]) * px[i];
    return DP_OK;
}

typedef struct descent { /* an optimizer that accumulates over two steps */
    dp_optim base;
    int steps, updates;
} descent;

static dp_status descent_begin(dp_optim *optim, dp_module *module, dp_pass_config *pass)
{
    (void)module;
    pass->no_sync = ((descent *)optim)->steps % 2 == 0;
    return DP_OK;
}

static dp_status descent_update(dp_optim *optim, dp_module *module)
{
    descent *own = (descent *)optim;
    dp_tensor w, g;
    if (++own->steps % 2 != 0)
        return DP_OK;
    own->updates++;
    DP_TRY(dp_params_edit(module, 0, &w, &g));
    ((float *)w.data)[0] -= 0.1f * ((const float *)g.data)[0];
    return dp_zero_grad(module);
}

static const dp_optim_ops descent_ops = {
    .head = DP_TABLE(dp_optim_ops), .begin = descent_begin, .update = descent_update};

enum { STEPS = 8, MOST_ROWS = 7 };

/* Rows of a step: 0 to 7, most of them with the first process; step 6 has none elsewhere. */
static int rows_of(int step, int process)
{
    return step == 6 && process > 0 ? 0 : (step * 3 + 5 * (process == 0)) % (MOST_ROWS + 1);
}

static float x_of(int step, int process, int row)
{
    return (float)((step * 31 + process * 17 + row * 7) % 13) / 13 - 0.4f;
}

static dp_value line_batch(dp_scope *scope, int step, int first, int last)
{
    float *x = dp_scope_alloc(scope, sizeof(float) * MOST_ROWS * BOOT_PROCESSES);
    float *t = dp_scope_alloc(scope, sizeof(float) * MOST_ROWS * BOOT_PROCESSES);
    int64_t count = 0;
    for (int process = first; process < last; process++)
        for (int row = 0; row < rows_of(step, process); row++, count++) {
            x[count] = x_of(step, process, row);
            t[count] = 3 * x[count] + (float)row / 8;
        }
    dp_tensor tx = dp_wrap(x, DP_F32, 1, &count), tt = dp_wrap(t, DP_F32, 1, &count);
    if (count == 0)
        return dp_none();
    return DP_DICT(scope, {"x", dp_of(scope, &tx)}, {"t", dp_of(scope, &tt)});
}

static float train_line(dp_ctx *ctx, int first, int last, int *out_updates)
{
    static const dp_method methods[] = {{"forward", line_forward}, {"backward", line_backward}};
    static const dp_param_config w = {.name = "w", .dtype = DP_F32, .ndim = 1, .shape = {1}};
    descent optim = {.base = {&descent_ops}};
    dp_module *net, *par;
    CHECK_OK(dp_module_create(
        ctx,
        &(dp_module_config){
            .name = "line", .methods = methods, .method_count = 2, .params = &w, .param_count = 1},
        &net));
    CHECK_OK(dp_distributed(net, &(dp_distributed_config){.reduction = DP_MEAN_SAMPLES}, &par));
    for (int step = 0; step < STEPS; step++) {
        dp_scope *scope = dp_scope_begin(ctx);
        dp_value log, batch = line_batch(scope, step, first, last);
        CHECK_OK(dp_train_step(par, scope, batch, &optim.base, &log));
        CHECK_INT(log.kind, batch.kind == DP_NONE ? DP_NONE : DP_DICT);
        dp_scope_end(scope);
    }
    *out_updates = optim.updates;
    float got = element(net, 0, false, 0);
    dp_close(ctx);
    return got;
}

static float alone_got;
static int all_processes, devices_each;

static void train_in_process(meeting *m)
{
    int updates = 0;
    float got = train_line(open_over_shm(m, devices_each, 0), m->process, m->process + 1, &updates);
    CHECK_INT(updates, STEPS / 2);
    CHECK_F64(got, alone_got, 1e-6);
}

TEST_SLOW(ranks_train_as_one_device_does, 30)
{
    static const int jobs[][2] = {{2, 1}, {2, 2}, {4, 1}, {3, 3}};
    for (size_t i = 0; i < sizeof jobs / sizeof *jobs; i++) {
        int updates = 0;
        all_processes = jobs[i][0];
        devices_each = jobs[i][1];
        alone_got = train_line(open_here(1), 0, all_processes, &updates);
        CHECK_INT(updates, STEPS / 2);
        CHECK(alone_got > 0.1f);
        CHECK_F64(train_line(open_here(4), 0, all_processes, &updates), alone_got, 1e-6);
        in_processes(all_processes, train_in_process);
    }
}

/* ---- one program everywhere ------------------------------------------------------------------ */

enum { ALL_ROWS = 7 };

/* Returns the weight; out_loss gets the loss of the last step, of all processes. */
static float train_everywhere(dp_ctx *ctx, double *out_loss)
{
    static const dp_method methods[] = {{"forward", line_forward}, {"backward", line_backward}};
    static const dp_param_config w = {.name = "w", .dtype = DP_F32, .ndim = 1, .shape = {1}};
    static const dp_module_config line = {
        .name = "line", .methods = methods, .method_count = 2, .params = &w, .param_count = 1};
    dp_module *net, *par;
    dp_optim *sgd;
    int64_t first = -1, rows = -1;
    CHECK_OK(dp_module_create(ctx, &line, &net));
    CHECK_OK(dp_everywhere(net, &par));
    CHECK_OK(dp_optim_create(par, &(dp_optim_config){.hyper = {.lr = 0.1}}, &sgd));
    CHECK_OK(dp_my_rows(ctx, ALL_ROWS, &first, &rows));
    for (int step = 0; step < STEPS; step++) {
        float x[ALL_ROWS], t[ALL_ROWS];
        dp_scope *scope = dp_scope_begin(ctx);
        for (int i = 0; i < ALL_ROWS; i++) {
            x[i] = x_of(step, 0, i);
            t[i] = 3 * x[i] + (float)i / 8;
        }
        dp_value log, batch = DP_DICT(scope, {"x", dp_array(scope, x + first, DP_F32, 1, &rows)},
                                      {"t", dp_array(scope, t + first, DP_F32, 1, &rows)});
        CHECK_OK(dp_train_step(par, scope, batch, sgd, &log));
        CHECK_OK(dp_log_mean(ctx, scope, log, rows, &log));
        CHECK_OK(dp_item(ctx, dp_get(log, "loss"), out_loss));
        dp_scope_end(scope);
    }
    float got = element(net, 0, false, 0);
    dp_close(ctx);
    return got;
}

static double alone_loss;

static void train_a_part(meeting *m)
{
    double loss = -1;
    CHECK_F64(train_everywhere(open_over_shm(m, devices_each, 0), &loss), alone_got, 1e-6);
    CHECK_F64(loss, alone_loss, 1e-6);
}

/* Seven rows do not divide among them, and eight ranks are more than rows. */
TEST_SLOW(one_program_learns_the_same_everywhere, 30)
{
    static const int jobs[][2] = {{2, 1}, {3, 1}, {2, 3}, {4, 2}};
    double loss = -1;
    alone_got = train_everywhere(open_here(1), &alone_loss);
    CHECK(alone_got > 0.1f && alone_loss > 0);
    for (int devices = 2; devices <= 3; devices++) {
        CHECK_F64(train_everywhere(open_here(devices), &loss), alone_got, 1e-6);
        CHECK_F64(loss, alone_loss, 1e-6);
    }
    for (size_t i = 0; i < sizeof jobs / sizeof *jobs; i++) {
        devices_each = jobs[i][1];
        in_processes(jobs[i][0], train_a_part);
    }
}

static void rows_and_parts(meeting *m)
{
    dp_ctx *ctx = open_over_shm(m, 1 + m->process, 0); /* 1, 2 and 3 of 6 ranks */
    static const int64_t totals[] = {0, 1, 4, 6, 13};
    for (size_t i = 0; i < sizeof totals / sizeof *totals; i++) {
        int64_t first = -1, count = -1, sum = 0, by_rank[6];
        size_t parts = 0;
        dp_info info = info_here(ctx);
        CHECK_OK(dp_my_rows(ctx, totals[i], &first, &count));
        CHECK_OK(dp_split_rows(totals[i], 6, NULL, by_rank, &parts));
        for (int rank = 0; rank < info.rank_first; rank++)
            sum += by_rank[rank];
        CHECK_INT(first, sum);
        for (int rank = 0; rank < info.local_count; rank++)
            sum += by_rank[info.rank_first + rank];
        CHECK_INT(first + count, sum);
    }
    dp_close(ctx);
}

TEST(rows_are_divided_over_all_ranks)
{
    int64_t first = -1, count = -1;
    in_processes(3, rows_and_parts);
    dp_ctx *ctx = open_here(2);
    CHECK_OK(dp_my_rows(ctx, 5, &first, &count));
    CHECK_INT(first, 0);
    CHECK_INT(count, 5);
    CHECK_ERROR(dp_my_rows(ctx, -1, &first, &count), DP_ERR_INVALID, "dp_my_rows: total is -1");
    CHECK_ERROR(dp_my_rows(ctx, 1, NULL, &count), DP_ERR_INVALID, "out_first is NULL");
    CHECK_ERROR(dp_my_rows(ctx, 1, &first, NULL), DP_ERR_INVALID, "out_count is NULL");
    dp_close(ctx);
}

/* A list of the model's own is a part, too, where there is one device. */
TEST(a_part_is_that_of_a_device)
{
    dp_ctx *one = open_here(1), *two = open_here(2);
    dp_scope *scope = dp_scope_begin(two);
    dp_value list = DP_LIST_OF(scope, dp_int(7));
    CHECK_INT(dp_part_of(one, list, 0).kind, DP_LIST);
    CHECK_INT(dp_part_of(two, list, 0).as.i, 7);
    CHECK_INT(dp_part_of(two, list, 1).kind, DP_NONE); /* it had no rows */
    CHECK_INT(dp_part_of(two, list, 2).kind, DP_ERROR);
    CHECK_INT(dp_part_of(NULL, list, 0).kind, DP_ERROR);
    dp_close(one);
    dp_close(two);
}

/* ---- who has data left ----------------------------------------------------------------------- */

static void some_have_data(meeting *m)
{
    static const plan how;
    dp_ctx *ctx = open_over_shm(m, 1, 0);
    dp_module *net = make_net(ctx, &how), *par;
    int left = 2 * m->process, steps = 0;
    CHECK_OK(dp_distributed(net, NULL, &par));
    for (bool any = true;;) {
        dp_scope *scope = dp_scope_begin(ctx);
        dp_value log;
        CHECK_OK(dp_any(ctx, left > 0, &any));
        if (!any)
            break;
        CHECK_OK(dp_train_step(par, scope, left-- > 0 ? a_part_each(ctx, scope) : dp_none(), NULL,
                               &log));
        dp_scope_end(scope);
        steps++;
    }
    CHECK_INT(steps, 4);
    CHECK_ERROR(dp_any(ctx, true, NULL), DP_ERR_INVALID, "out is NULL");
    dp_close(ctx);
}

TEST(a_process_that_has_run_out_goes_on)
{
    in_processes(3, some_have_data);
}

static dp_status look_only(dp_optim *optim, dp_module *module, dp_pass_config *pass)
{
    (void)optim, (void)module;
    pass->no_grad = true;
    return DP_OK;
}

static dp_status update_nothing(dp_optim *optim, dp_module *module)
{
    (void)optim, (void)module;
    return DP_OK;
}

TEST(an_empty_step_without_gradients_reduces_nothing)
{
    static const plan how;
    static const dp_optim_ops ops = {
        .head = DP_TABLE(dp_optim_ops), .begin = look_only, .update = update_nothing};
    dp_optim optim = {&ops};
    dp_ctx *ctx = open_here(2);
    dp_module *net = make_net(ctx, &how), *par;
    dp_scope *scope = dp_scope_begin(ctx);
    dp_value log;
    CHECK_OK(dp_distributed(net, &(dp_distributed_config){.reduction = DP_SUM_RANKS}, &par));
    CHECK_OK(forward_and_backward(par, 1, true));
    CHECK_OK(dp_train_step(par, scope, dp_none(), &optim, &log));
    check_grads(net, 1, 1); /* of rank 0 alone, as before */
    CHECK_OK(dp_train_step(par, scope, dp_none(), NULL, &log));
    check_grads(net, 3, 3);
    CHECK_ERROR(dp_train_step(net, scope, dp_none(), NULL, &log), DP_ERR_INVALID, "data is none");
    dp_close(ctx);
}

TEST(nobody_else_is_asked_in_a_job_of_one)
{
    dp_ctx *ctx = open_here(2);
    bool any = true;
    CHECK_OK(dp_any(ctx, false, &any));
    CHECK(!any);
    CHECK_OK(dp_any(ctx, true, &any));
    CHECK(any);
    dp_close(ctx);
}

/* ---- parameters of all kinds --------------------------------------------------------------------
   A parent with a packed child; the child's "w" is the parent's too. Backward adds rank + 1 to all,
   once a name.                                                                                  */

static dp_status add_number(const dp_call *call, size_t param, double value)
{
    dp_tensor grad = dp_grad_tensor(call, param);
    dp_tensor ones = grad;
    DP_TRY(dp_tensor_new(call->scope, call->device, (dp_dtype)grad.dtype, grad.ndim, grad.shape,
                         &ones));
    DP_TRY(dp_fill(call->ctx, &ones, dp_float(value)));
    return dp_axpby(call->ctx, 1, &grad, 1, &ones, &grad);
}

static dp_status part_backward(dp_call *call)
{
    for (size_t i = 0; i < 2; i++) {
        DP_TRY(add_number(call, i, rank_of(call) + 1));
        DP_TRY(dp_grad_ready(call, i));
    }
    return DP_OK;
}

static dp_status whole_forward(dp_call *call)
{
    dp_pass *pass = NULL;
    DP_TRY(dp_call_child(call, "part", "forward", call->args, call->kwargs, &call->out, &pass));
    call->saved = pass;
    return DP_OK;
}

static dp_status whole_backward(dp_call *call)
{
    DP_TRY(dp_backward(call->saved, call->grad, NULL));
    for (size_t i = 0; i < 4; i++)
        if (i != 2)
            DP_TRY(add_number(call, i, rank_of(call) + 1));
    CHECK_ERROR(dp_grad_ready(call, 2), DP_ERR_INVALID, "'still' of 'whole' has no gradient");
    return dp_grad_ready(call, 3); /* the tied one: now both of its names are said */
}

static dp_module *make_whole(dp_ctx *ctx)
{
    static const dp_method part_methods[] = {{"forward", number_forward},
                                             {"backward", part_backward}};
    static const dp_param_config part_params[] = {
        {.name = "w", .dtype = DP_F32, .ndim = 1, .shape = {5}},
        {.name = "u", .dtype = DP_F32, .ndim = 2, .shape = {3, 11}}};
    static const dp_method whole_methods[] = {{"forward", whole_forward},
                                              {"backward", whole_backward}};
    static const dp_param_config whole_params[] = {
        {.name = "wide", .dtype = DP_F64, .ndim = 1, .shape = {7}},
        {.name = "half", .dtype = DP_F16, .ndim = 1, .shape = {129}},
        {.name = "still", .dtype = DP_F32, .ndim = 1, .shape = {2}, .frozen = true},
        {.name = "tied", .dtype = DP_F32, .ndim = 1, .shape = {5}, .same_as = "part.w"},
        {.name = "none", .dtype = DP_F32, .ndim = 1, .shape = {0}}};
    dp_module *part, *whole;
    CHECK_OK(dp_module_create(ctx,
                              &(dp_module_config){.name = "part",
                                                  .methods = part_methods,
                                                  .method_count = 2,
                                                  .params = part_params,
                                                  .param_count = 2,
                                                  .packed = true},
                              &part));
    CHECK_OK(dp_module_create(ctx,
                              &(dp_module_config){.name = "whole",
                                                  .methods = whole_methods,
                                                  .method_count = 2,
                                                  .params = whole_params,
                                                  .param_count = 5,
                                                  .children = &part,
                                                  .child_count = 1},
                              &whole));
    return whole;
}

static void check_all_of(dp_module *net, const char *name, double want)
{
    size_t param = 0;
    dp_tensor data, grad, wide;
    double got[200];
    dp_scope *scope = dp_scope_begin(dp_module_ctx(net));
    CHECK_OK(dp_module_find(net, name, &param));
    CHECK_OK(dp_params_edit(net, param, &data, &grad));
    CHECK_OK(dp_tensor_new(scope, grad.device, DP_F64, grad.ndim, grad.shape, &wide));
    CHECK_OK(dp_cast(dp_module_ctx(net), &wide, &grad));
    size_t count = (size_t)dp_tensor_count(&grad);
    CHECK_OK(dp_read(dp_module_ctx(net), &wide, got, count * sizeof *got));
    for (size_t i = 0; i < count; i++)
        CHECK_F64(got[i], want, 1e-6);
    dp_scope_end(scope);
}

static void train_whole(dp_ctx *ctx)
{
    dp_module *whole = make_whole(ctx), *par, *inner;
    dp_reducer_info info;
    double mean = (info_here(ctx).rank_count + 1) / 2.0;
    CHECK_OK(dp_data_parallel(whole, NULL, &inner)); /* wrappers nest */
    CHECK_OK(dp_distributed(
        inner, &(dp_distributed_config){.buckets = {.first_bytes = 1, .bytes = 200}}, &par));
    for (int step = 0; step < 3; step++) {
        CHECK_OK(forward_and_backward(par, 1, false));
        check_all_of(whole, "wide", mean);
        check_all_of(whole, "half", mean);
        check_all_of(whole, "part.w", 2 * mean); /* by two names */
        check_all_of(whole, "part.u", mean);
        CHECK_OK(dp_reducer_info_get(dp_wrapper_reducer(par), &info));
        CHECK_INT(info.unit_count, 4);
        CHECK_OK(dp_zero_grad(step == 0 ? par : step == 1 ? inner : whole));
    }
    CHECK_OK(forward_and_backward(par, 1, true)); /* a window is opened */
    CHECK_OK(dp_zero_grad(whole));                /* and thrown away */
    CHECK_OK(forward_and_backward(par, 1, true));
    CHECK_OK(forward_and_backward(par, 1, false));
    check_all_of(whole, "wide", 2 * mean);
    check_all_of(whole, "part.w", 4 * mean);
    dp_close(ctx);
}

static void train_whole_in_processes(meeting *m)
{
    train_whole(open_over_shm(m, 2 - m->process, 0));
}

TEST(parameters_of_all_kinds)
{
    train_whole(open_here(1));
    train_whole(open_here(3));
    train_whole(open_on(toy_device(), 2));
    in_processes(2, train_whole_in_processes);
    in_processes_on(toy_device(), 2, train_whole_in_processes);
}

/* ---- owners ---------------------------------------------------------------------------------- */

/* How often the table copies in a forward that nobody will go back through. */
static int copies_of_a_forward(dp_module *par)
{
    static const deco_method copies[] = {DECO_copy, DECO_copy_in, DECO_copy_out, DECO_peer_copy};
    dp_ctx *ctx = dp_module_ctx(par);
    dp_scope *scope = dp_scope_begin(ctx);
    dp_value out;
    int count = 0;
    for (int i = 0; i < 4; i++)
        count -= deco_calls(copies[i]);
    CHECK_OK(
        dp_invoke(par, scope, "forward", dp_none(), a_part_each(ctx, scope), NULL, &out, NULL));
    for (int i = 0; i < 4; i++)
        count += deco_calls(copies[i]);
    dp_scope_end(scope);
    return count;
}

/* param = by * param + add * its gradient, with the memory of one owner. */
static void edit_owner(dp_module *par, size_t owner, size_t param, float by, float add)
{
    float x[V] = {0}, g[V] = {0};
    dp_tensor data, grad;
    dp_ctx *ctx = dp_module_ctx(par);
    CHECK_OK(dp_owner_edit(par, owner, param, &data, &grad));
    size_t count = (size_t)dp_tensor_count(&data);
    CHECK_OK(dp_read(ctx, &data, x, count * sizeof(float)));
    if (grad.data != NULL)
        CHECK_OK(dp_read(ctx, &grad, g, count * sizeof(float)));
    for (size_t i = 0; i < count; i++)
        x[i] = by * x[i] + add * g[i];
    dp_tensor host = dp_wrap(x, DP_F32, data.ndim, data.shape);
    CHECK_OK(dp_copy(ctx, &data, &host, NULL));
    CHECK_OK(dp_wait(ctx));
}

static void step_owners(dp_module *par)
{
    for (size_t owner = 0; owner < dp_owner_count(par); owner++)
        for (size_t param = 0; param < 2; param++)
            edit_owner(par, owner, param, 1, -0.5f);
}

static void check_owner(dp_module *par, size_t owner, size_t param, double want)
{
    float x[V];
    dp_tensor data;
    CHECK_OK(dp_owner_param(par, owner, param, &data));
    CHECK(data.read_only);
    CHECK_OK(dp_read(dp_module_ctx(par), &data, x, (size_t)dp_tensor_count(&data) * sizeof(float)));
    CHECK_F64(x[0], want, 1e-6);
}

/* dp_owner_edit only to read, too: as every owner is edited alike, nothing has to be sent. */
static void check_owners(dp_module *par, size_t param, double want)
{
    for (size_t owner = 0; owner < dp_owner_count(par); owner++) {
        dp_tensor data, read;
        CHECK_OK(dp_owner_edit(par, owner, param, &data, NULL));
        CHECK_OK(dp_owner_param(par, owner, param, &read));
        CHECK(read.data == data.data && read.device.index == data.device.index);
        check_owner(par, owner, param, want);
    }
}

TEST(owners_that_take_the_same_step_are_sent_nothing)
{
    static const plan how;
    dp_ctx *ctx = open_on(decorate_device(toy_device()), 3);
    dp_module *net = make_net(ctx, &how), *par;
    CHECK_INT(dp_owner_count(net), 1);
    CHECK_OK(dp_distributed(net, NULL, &par));
    CHECK_INT(dp_owner_count(par), 3);
    CHECK_INT(dp_owner_count(net), 1);
    int more = copies_of_a_forward(par), least = copies_of_a_forward(par);
    CHECK(more > least); /* the first one sends */
    for (int step = 1; step <= 3; step++) {
        CHECK_OK(forward_and_backward(par, 1, false)); /* a gradient of (1 + 2 + 3) / 3 */
        step_owners(par);
        CHECK_OK(dp_zero_grad(par));
        CHECK_INT(copies_of_a_forward(par), least);
        check_owners(par, 0, -step);
        check_owners(par, 1, -step);
        CHECK_INT(copies_of_a_forward(par), least);
    }
    check_owner(par, 2, 0, -3); /* no edit: of one owner alone it would have to be sent */
    CHECK_INT(copies_of_a_forward(par), least);
    edit_owner(par, 0, 0, 2, 0); /* the first one is the original: what it has counts */
    check_owner(par, 2, 0, -3);
    CHECK_INT(copies_of_a_forward(par), more);
    check_owners(par, 0, -6);
    edit_owner(par, 2, 1, 5, 0);
    CHECK_INT(copies_of_a_forward(par), more);
    check_owners(par, 1, -3);
    for (size_t owner = 0; owner < 3; owner++)
        edit_owner(par, owner, owner % 2, 3, 0); /* as many edits, not of the same parameters */
    CHECK_INT(copies_of_a_forward(par), more);
    check_owners(par, 0, -18);
    check_owners(par, 1, -3);
    edit_owner(par, 1, 1, 7, 0);
    CHECK_OK(dp_params_changed(net)); /* somebody else has written to it as well */
    CHECK_INT(copies_of_a_forward(par), more);
    check_owners(par, 1, -3);
    CHECK_INT(copies_of_a_forward(par), least);
    for (size_t owner = 0; owner < 3; owner++)
        edit_owner(par, owner, 1, owner == 2 ? 3 : 2, 0); /* one of them otherwise */
    CHECK_ERROR(dp_params_compare(par), DP_ERR_MISMATCH, "parameter 'v'");
    CHECK(strstr(dp_last_error(), "on rank 2") != NULL);
    edit_owner(par, 0, 1, 1, 0); /* so the original's will be sent */
    CHECK_OK(dp_params_compare(par));
    CHECK_INT(copies_of_a_forward(par), more);
    CHECK_OK(dp_params_compare(par));
    CHECK_OK(dp_params_changed(net)); /* before all were stepped */
    step_owners(par);
    CHECK_INT(copies_of_a_forward(par), more);
    dp_close(ctx);
    CHECK_DECORATOR();
}

TEST(where_memory_is_shared_there_is_one_owner)
{
    static const plan how;
    dp_ctx *ctx = open_here(3);
    dp_tensor data, grad, same;
    dp_module *net = make_net(ctx, &how), *par;
    CHECK_OK(dp_data_parallel(net, NULL, &par));
    CHECK_INT(dp_owner_count(par), 1);
    CHECK_OK(dp_module_destroy(par));
    CHECK_OK(dp_distributed(net, NULL, &par));
    CHECK_INT(dp_owner_count(par), 1);
    for (size_t param = 0; param < 3; param++) {
        CHECK_OK(dp_params_edit(net, param, &same, NULL));
        CHECK_OK(dp_owner_edit(par, 0, param, &data, &grad));
        CHECK(data.data == same.data);
        CHECK((grad.data == NULL) == (param == 2));
        CHECK_OK(dp_owner_edit(net, 0, param, &data, NULL));
        CHECK(data.data == same.data);
    }
    CHECK_ERROR(dp_owner_edit(par, 1, 0, &data, &grad), DP_ERR_INVALID, "owner 1");
    CHECK_ERROR(dp_owner_edit(net, 1, 0, &data, &grad), DP_ERR_INVALID, "'net' has 1");
    CHECK_ERROR(dp_owner_edit(par, 0, 3, &data, &grad), DP_ERR_INVALID, "parameter 3");
    CHECK_ERROR(dp_owner_edit(par, 0, 0, NULL, &grad), DP_ERR_INVALID, "out_data is NULL");
    CHECK_ERROR(dp_owner_param(par, 1, 0, &data), DP_ERR_INVALID, "dp_owner_param: owner 1");
    CHECK_ERROR(dp_owner_param(net, 0, 3, &data), DP_ERR_INVALID, "parameter 3");
    dp_close(ctx);
}

/* The memory of each device, a digit; 0: one of its own. */
static const char *memory_of;

static dp_status island_info(dp_dev *dev, dp_device_info *out)
{
    DP_TRY(toy_device()->info(dev, out));
    out->memory = memory_of[dev->index] - '0';
    return DP_OK;
}

static dp_device_ops islands;

static dp_status island_open(const dp_host *host, int index, dp_dev **out)
{
    DP_TRY(toy_device()->open(host, index, out));
    (*out)->ops = &islands;
    if (memory_of[index] != '0') /* addresses that all who share it know */
        ((toy_dev *)*out)->mask = (uintptr_t)(TOY_COUNT + memory_of[index] - '0') << 51;
    return DP_OK;
}

/* Several devices in each memory, the first one's or another one: owners, by the device that each
   edit is on, and what is sent to whom. */
static void check_islands(const char *memories, const char *owners)
{
    static const plan how;
    int count = (int)strlen(memories), owner_count = (int)strlen(owners);
    islands = *toy_device();
    islands.open = island_open;
    islands.info = island_info;
    memory_of = memories;
    dp_ctx *ctx = open_on(&islands, count);
    dp_module *net = make_net(ctx, &how), *par;
    CHECK_OK(dp_distributed(net, NULL, &par));
    CHECK_INT(dp_owner_count(par), owner_count);
    for (int owner = 0; owner < owner_count; owner++) {
        dp_tensor data;
        CHECK_OK(dp_owner_edit(par, (size_t)owner, 0, &data, NULL));
        CHECK_INT(data.device.index, owners[owner] - '0');
    }
    for (int step = 1; step <= 3; step++) { /* a gradient of (1 + ... + count) / count */
        CHECK_OK(forward_and_backward(par, 1, false));
        step_owners(par);
        CHECK_OK(dp_zero_grad(par));
        check_owners(par, 0, -0.25 * (count + 1) * step);
    }
    edit_owner(par, 0, 0, 2, 0); /* the first one is sent to the others */
    CHECK_OK(forward_and_backward(par, 1, false));
    CHECK_OK(dp_params_compare(par));
    check_owners(par, 0, -1.5 * (count + 1));
    dp_close(ctx);
}

TEST(each_memory_has_one_owner)
{
    check_islands("1111", "0");
    check_islands("1122", "02");
    check_islands("12121212", "01");
    check_islands("1233", "012");
    check_islands("1000", "0123"); /* of its own each */
}

/* ---- a backward that divides by its own rows ------------------------------------------------- */

/* The mean over its rows of their numbers. */
static dp_status mean_backward(dp_call *call)
{
    const dp_tensor *x;
    double sum = 0;
    DP_TRY(dp_call_tensor(call, "x", DP_F32, 1, &x));
    for (int64_t i = 0; i < x->shape[0]; i++)
        sum += (double)((const float *)x->data)[i];
    *(float *)dp_grad(call, 0) = (float)(sum / (double)x->shape[0]);
    return dp_grad_ready(call, 0); /* it has to be weighed first */
}

static void means_of_means(meeting *m)
{
    static const dp_method methods[] = {{"forward", number_forward}, {"backward", mean_backward}};
    static const dp_param_config w = {.name = "w", .dtype = DP_F32};
    static float rows[] = {1, 2, 3, 4, 5, 6, 7, 8};
    static const dp_reduction kinds[] = {DP_MEAN_SAMPLES, DP_MEAN_RANKS, DP_SUM_RANKS};
    static const double wants[] = {4, (1.5 + 3 + 4.5 + 6.5) / 4, 1.5 + 3 + 4.5 + 6.5};
    dp_ctx *ctx = open_over_shm(m, 2, 0);
    for (int i = 0; i < 3; i++) {
        dp_module *net, *par;
        dp_value out;
        dp_pass *pass;
        dp_scope *scope = dp_scope_begin(ctx);
        int64_t first = m->process * 3, count = m->process == 0 ? 3 : 4; /* 2+1, 2+2 */
        dp_tensor batch = dp_wrap(rows + first, DP_F32, 1, &count);
        dp_value kwargs = DP_DICT(scope, {"x", dp_of(scope, &batch)});
        CHECK_OK(dp_module_create(ctx,
                                  &(dp_module_config){.name = "mean",
                                                      .methods = methods,
                                                      .method_count = 2,
                                                      .params = &w,
                                                      .param_count = 1,
                                                      .mean_grads = true},
                                  &net));
        CHECK_OK(dp_distributed(net, &(dp_distributed_config){.reduction = kinds[i]}, &par));
        for (int step = 0; step < 4; step++) { /* it zeroes by itself, but for what no_sync left */
            bool whole = step != 1;
            const dp_pass_config config = {.no_sync = !whole};
            CHECK_OK(dp_invoke(par, scope, "forward", dp_none(), kwargs, &config, &out, &pass));
            CHECK_OK(dp_backward(pass, dp_float(2), NULL));
            bool twice = step == 2 && kinds[i] != DP_MEAN_SAMPLES;
            if (whole)
                CHECK_F64(element(net, 0, true, 0), (twice ? 4 : 2) * wants[i], 1e-5);
        }
        dp_scope_end(scope);
    }
    dp_close(ctx);
}

TEST(means_of_own_rows_are_weighed)
{
    in_processes(2, means_of_means);
}

/* ---- who has no part ------------------------------------------------------------------------- */

static void few_rows(meeting *m)
{
    static const plan how;
    static float rows[3];
    static const dp_unused kinds[] = {DP_UNUSED_ERROR, DP_UNUSED_FOUND, DP_UNUSED_FIXED};
    dp_ctx *ctx = open_over_shm(m, 3, 0);
    for (int i = 0; i < 3; i++) {
        dp_module *net = make_net(ctx, &how), *par;
        CHECK_OK(dp_distributed(net,
                                &(dp_distributed_config){.reduction = DP_SUM_RANKS,
                                                         .unused_params = kinds[i],
                                                         .buckets.first_bytes = 1},
                                &par));
        for (int step = 0; step < 4; step++) { /* the first has work for all */
            dp_scope *scope = dp_scope_begin(ctx);
            int64_t count = step == 0 ? 3 : step == 1 ? 2 - m->process : m->process == 1;
            dp_tensor batch = dp_wrap(rows, DP_F32, 1, &count);
            dp_value log, data = DP_DICT(scope, {"x", dp_of(scope, &batch)});
            CHECK_OK(dp_train_step(par, scope, count > 0 ? data : dp_none(), NULL, &log));
            double want = step == 0 ? 1 + 2 + 3 + 4 + 5 + 6 : step == 1 ? 1 + 2 + 4 : 4;
            check_grads(net, want, want);
            CHECK_OK(dp_zero_grad(par));
            dp_scope_end(scope);
        }
    }
    dp_close(ctx);
}

TEST(ranks_without_rows_add_nothing)
{
    in_processes(2, few_rows);
    in_processes_on(toy_device(), 2, few_rows);
}

/* ---- containers ------------------------------------------------------------------------------ */

/* Its group's number, which must be its device's. */
static dp_status group_forward(dp_call *call)
{
    const dp_tensor *x;
    DP_TRY(dp_call_tensor(call, "x", DP_F32, 2, &x));
    call->out = dp_float((double)((const float *)x->data)[0]);
    return DP_OK;
}

TEST(groups_of_a_container_go_to_devices)
{
    static const dp_method methods[] = {{"forward", group_forward}, {"backward", part_backward}};
    static const dp_param_config w = {.name = "w", .dtype = DP_F32};
    static float groups[2][3] = {{10, 0, 0}, {20, 0, 0}};
    dp_ctx *ctx = open_here(2);
    dp_module *net, *par;
    dp_scope *scope = dp_scope_begin(ctx);
    dp_value items[2], out;
    CHECK_OK(dp_module_create(ctx,
                              &(dp_module_config){.name = "groups",
                                                  .methods = methods,
                                                  .method_count = 2,
                                                  .params = &w,
                                                  .param_count = 1},
                              &net));
    CHECK_OK(dp_distributed(net, NULL, &par));
    for (int i = 0; i < 2; i++)
        items[i] = dp_array(scope, groups[i], DP_F32, DP_SHAPE(1, 3));
    dp_container container = {.data = dp_list_make(scope, DP_LIST, items, 2), .pad_dims = 2};
    dp_value x = dp_contain(scope, &container);
    CHECK_OK(
        dp_invoke(par, scope, "forward", dp_none(), DP_DICT(scope, {"x", x}), NULL, &out, NULL));
    CHECK_INT(out.kind, DP_LIST);
    CHECK_F64(dp_at(out, 0).as.f, 10, 0);
    CHECK_F64(dp_at(out, 1).as.f, 20, 0);
    dp_close(ctx);
}

/* ---- children that are trained by themselves ---------------------------------------------------
   As in a GAN: the method of the parent runs each of them forward and backward when it likes. */

static dp_status train_child(dp_call *call, const char *child, double k)
{
    dp_pass *pass = NULL;
    dp_value out;
    DP_TRY(dp_call_child(call, child, "forward", call->args, call->kwargs, &out, &pass));
    return dp_backward(pass, dp_float(k), NULL);
}

static dp_status pair_step(dp_call *call)
{
    DP_TRY(train_child(call, "right", 1));
    DP_TRY(train_child(call, "left", 10));
    DP_TRY(train_child(call, "right", 2));
    call->out = dp_none();
    return DP_OK;
}

static void train_pair(meeting *m)
{
    double mean = (devices_each * 2 + 1) / 2.0;
    static const plan how;
    static const dp_method methods[] = {{"train_step", pair_step}};
    dp_ctx *ctx = open_over_shm(m, devices_each, 0);
    dp_module *nets[2], *children[2], *pair, *around;
    dp_scope *scope = dp_scope_begin(ctx);
    dp_pass *pass; /* of the parent: else there are no gradients inside */
    dp_value out;
    for (int i = 0; i < 2; i++) {
        dp_distributed_config config = {.name = i == 0 ? "left" : "right"};
        nets[i] = make_net(ctx, &how);
        CHECK_OK(dp_distributed(nets[i], &config, &children[i]));
    }
    CHECK_OK(dp_module_create(ctx,
                              &(dp_module_config){.name = "pair",
                                                  .methods = methods,
                                                  .method_count = 1,
                                                  .children = children,
                                                  .child_count = 2},
                              &pair));
    CHECK_OK(dp_invoke(pair, scope, "train_step", dp_none(), a_part_each(ctx, scope), NULL, &out,
                       &pass));
    check_grads(nets[0], 10 * mean, 10 * mean);
    check_grads(nets[1], 3 * mean, 3 * mean);
    CHECK_ERROR(dp_data_parallel(pair, NULL, &around), DP_ERR_UNSUPPORTED, "'left' reduces");
    CHECK_OK(dp_zero_grad(pair));
    CHECK_OK(dp_invoke(pair, scope, "train_step", dp_none(), a_part_each(ctx, scope),
                       &(dp_pass_config){.no_sync = true}, &out, &pass)); /* of both children */
    int own = info_here(ctx).rank_first + 1;
    check_grads(nets[0], 10 * own, 10 * own);
    check_grads(nets[1], 3 * own, 3 * own);
    dp_close(ctx);
}

TEST(children_may_be_distributed_each_by_itself)
{
    for (devices_each = 1; devices_each < 4; devices_each++)
        in_processes(2, train_pair);
}

/* ---- memory of the user's ----------------------------------------------------------------------
   Where it lies is each process' own matter: in one order, in the other, or side by side. */

static void own_memory(meeting *m)
{
    static const plan how;
    static float room[2][32 * FIVE];
    dp_ctx *ctx = open_over_shm(m, devices_each, 0);
    dp_param_config params[FIVE];
    dp_module *par;
    five_params(params);
    for (int i = 0; i < FIVE; i++) {
        int place = m->process == 0 ? 20 * i : m->process == 1 ? 20 * (FIVE - i) : EACH * i;
        params[i].data = room[0] + place;
        params[i].grad = room[1] + place;
        for (int k = 0; k < EACH; k++)
            room[0][place + k] = (float)(10 * i + k + 100 * m->process);
    }
    dp_module *net = make_net_of(ctx, (dp_module_config){.name = "own",
                                                         .methods = five_methods,
                                                         .params = params,
                                                         .param_count = FIVE,
                                                         .state = &how});
    CHECK_OK(dp_distributed(net, NULL, &par));
    for (size_t i = 0; i < FIVE; i++)
        for (size_t k = 0; k < EACH; k++)
            CHECK_F64(element(net, i, false, k), (double)(10 * i + k), 0);
    for (int step = 1; step < 3; step++) {
        double mean = (info_here(ctx).rank_count + 1) / 2.0 * step;
        CHECK_OK(forward_and_backward(par, 1, false));
        for (size_t i = 0; i < FIVE; i++)
            for (size_t k = 0; k < EACH; k++)
                CHECK_F64(element(net, i, true, k), mean * (double)(i + 1), 1e-5);
    }
    dp_close(ctx);
}

TEST(memory_of_the_users_lies_anywhere)
{
    for (devices_each = 1; devices_each < 3; devices_each++)
        in_processes(3, own_memory);
}

/* Then pieces that travel are others than where the library has all of it in one. */
static void memory_of_one_process(meeting *m)
{
    static float room[2][3], sum = 1;
    const bool own = m->process == 0;
    const dp_param_config params[] = {
        {.name = "a", .ndim = 1, .shape = {3}, .data = own ? room[0] : NULL},
        {.name = "b", .ndim = 1, .shape = {3}, .data = own ? room[1] : NULL}};
    const dp_part part = {.send = &sum, .recv = &sum};
    dp_ctx *ctx = open_over_shm(m, 1, 0);
    dp_module *par = NULL;
    dp_module *net = make_net_of(ctx, (dp_module_config){.params = params, .param_count = 2});
    CHECK_ERROR(dp_distributed(net, NULL, &par), DP_ERR_MISMATCH, "parameters in one piece");
    CHECK(strstr(dp_last_error(), "rank 0 has parameters in one piece of memory: 3 f32") != NULL);
    CHECK(par == NULL);
    CHECK_OK(dp_all_reduce(ctx, &part, 1, DP_F32, DP_OP_SUM)); /* the job goes on */
    CHECK_F64(sum, 2, 0);
    dp_close(ctx);
}

TEST(memory_of_the_users_is_given_on_all_ranks)
{
    in_processes(2, memory_of_one_process);
}

#if defined(TEST_SIM)
/* ---- on GPUs, over NCCL ---------------------------------------------------------------------- */

TEST_SLOW(cuda_nccl_worked_values_of_torch, 60)
{
    on_gpus("11", torch_in_processes);
    on_gpus("12", sums_over_shm);
}

TEST_SLOW(cuda_nccl_gradients_may_be_changed_by_hand, 60)
{
    on_gpus("31", change_over_shm);
}

TEST_SLOW(cuda_nccl_buffers, 60)
{
    on_gpus("11", buffers_in_two);
    on_gpus("11", other_buffers);
}

TEST_SLOW(cuda_nccl_all_ranks_start_with_the_numbers_of_rank_0, 60)
{
    on_gpus("12", start_apart);
}

TEST_SLOW(cuda_nccl_ranks_that_differ_are_named, 60)
{
    on_gpus("111", one_is_odd);
    on_gpus("111", one_has_more);
}

TEST_SLOW(cuda_nccl_gradients_that_are_ready_may_travel, 60)
{
    on_gpus("22", said_early);
}

TEST_SLOW(cuda_nccl_a_method_that_fails_in_a_forward_ends_the_job, 60)
{
    on_gpus("111", one_fails_forward);
}

TEST_SLOW(cuda_nccl_a_process_that_has_run_out_goes_on, 60)
{
    on_gpus("111", some_have_data);
}

TEST_SLOW(cuda_nccl_ranks_without_rows_add_nothing, 60)
{
    on_gpus("33", few_rows);
}

TEST_SLOW(cuda_nccl_parameters_of_all_kinds, 60)
{
    on_gpus("21", train_whole_in_processes);
}

TEST_SLOW(cuda_nccl_children_may_be_distributed_each_by_itself, 60)
{
    devices_each = 2;
    on_gpus("22", train_pair);
}

TEST_SLOW(cuda_nccl_the_nth_allocation_of_one_process_fails, 120)
{
    meeting_gpus = "11";
    CHECK(each_allocation_fails_in_one(a_net, wrap_and_compare) > 20);
}
#endif
