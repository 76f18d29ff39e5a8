/* test_mirrored.c - optimizers of dp_train.h whose shares of state have copies: processes die at
   every moment of a step and of what follows, and what is left is, bit by bit, what one process
   has that was never disturbed. */

#define _GNU_SOURCE /* MAP_ANONYMOUS */
#include <math.h>
#include "dp_save.h"
#include "examples/custom_device.h"
#include "dp_train.h"
#include "mortal.h"

static int steps = 4; /* that are to be made */

#if defined(TEST_CUDA)
enum { DEVICES = 1, RANDOM = 6 }; /* GPUs of a process have parameters of their own */
#else
enum { DEVICES = 2, RANDOM = 24 };
#endif

/* ---- a net whose gradients are small integers ------------------------------------------------ */

enum { PARAMS = 5, LARGEST = 3000, OWN = 300 };
static const dp_param_config params[PARAMS] = {
    {.name = "w", .ndim = 1, .shape = {LARGEST}},
    {.name = "h", .dtype = DP_BF16, .ndim = 1, .shape = {1800}},
    {.name = "v", .ndim = 1, .shape = {5}},
    {.name = "d", .dtype = DP_F64, .ndim = 2, .shape = {11, 100}},
    {.name = "own", .ndim = 1, .shape = {OWN}}};

static bool reduces = true; /* the last one */
static int own_sum = 1;     /* of its rows */

static dp_status net_forward(dp_call *call)
{
    const dp_tensor *x;
    DP_TRY(dp_call_tensor(call, "x", DP_F32, 1, &x));
    dp_tensor *kept = dp_scope_alloc(call->scope, sizeof *kept);
    if (kept == NULL)
        return DP_ERR_NO_MEMORY;
    *kept = *x;
    call->saved = kept;
    call->out = DP_DICT(call->scope, {"loss", dp_float(1)});
    return DP_OK;
}

/* Of element i of parameter p: what the rows add up to, times one to five. */
static dp_status net_backward(dp_call *call)
{
    float rows[4], sum = 0, *numbers = dp_scope_alloc(call->scope, LARGEST * sizeof *numbers);
    const dp_tensor *x = call->saved;
    if (numbers == NULL)
        return DP_ERR_NO_MEMORY;
    DP_TRY(dp_read(call->ctx, x, rows, (size_t)x->shape[0] * sizeof *rows));
    for (int64_t i = 0; i < x->shape[0]; i++)
        sum += rows[i];
    for (size_t p = 0; p < PARAMS; p++) {
        dp_tensor grad = dp_grad_tensor(call, p), own, more;
        dp_scope *temp = dp_scope_child(call->scope);
        double scale = call->grad.kind == DP_FLOAT ? call->grad.as.f : 1;
        if (p == PARAMS - 1) /* which ranks may not reduce */
            sum = call->local_rank == 0 && (dp_rank(call->ctx) == 0 || !reduces) ? (float)own_sum
                                                                                 : 0;
        for (int64_t i = 0; i < dp_tensor_count(&grad); i++)
            numbers[i] = sum * (float)(1 + ((size_t)i + p) % 5) * (float)scale;
        DP_TRY(dp_tensor_from(temp, call->device, numbers, DP_F32, grad.ndim, grad.shape, &own));
        DP_TRY(dp_tensor_new(temp, call->device, grad.dtype, grad.ndim, grad.shape, &more));
        DP_TRY(dp_cast(call->ctx, &more, &own));
        DP_TRY(dp_axpby(call->ctx, 1, &grad, 1, &more, &grad));
        DP_TRY(dp_wait(call->ctx));
        dp_scope_end(temp);
    }
    return DP_OK;
}

static dp_module *make_net(dp_ctx *ctx)
{
    static const dp_method methods[] = {{"forward", net_forward}, {"backward", net_backward}};
    dp_module *net;
    CHECK_OK(dp_module_create(ctx,
                              &(dp_module_config){.name = "net",
                                                  .methods = methods,
                                                  .method_count = 2,
                                                  .params = params,
                                                  .param_count = PARAMS},
                              &net));
    return net;
}

/* ---- optimizers ------------------------------------------------------------------------------ */

static int rule_calls, dies_in_rule; /* which it dies before, or after: twice as many; 0: none */
static int64_t rule_fails;           /* in this step, once; 0: in none */
static bool rule_meets;              /* when it fails in all */

static void die_in_rule(void)
{
    if (++rule_calls == dies_in_rule)
        raise(SIGKILL);
}

static dp_status adam_step(const dp_rule_args *args)
{
    die_in_rule();
    if (args->step == rule_fails && rule_calls % 4 == 3) { /* not the first one */
        rule_fails = 0;
        atomic_fetch_add(met, rule_meets);
        wait_for(rule_meets ? 2 * world : 0);
        return dp_error(DP_ERR_USER, "no more");
    }
    DP_TRY(dp_adamw()->step(args));
    die_in_rule();
    return DP_OK;
}

static int adam_states(const dp_hyper *hyper)
{
    return dp_adamw()->state_count(hyper);
}

static dp_status adam_check(dp_hyper *hyper)
{
    return dp_adamw()->check(hyper);
}

static const dp_rule adam_of_ours = {.head = DP_TABLE(dp_rule),
                                     .name = "adamw",
                                     .check = adam_check,
                                     .state_count = adam_states,
                                     .step = adam_step};

enum { CONFIGS = 3 };
static int which; /* of these */

static dp_optim_config optim_config(void)
{
    static const double half = 0.5, none = 0;
    static const dp_param_group groups[] = {
        {.match = "v", .lr_factor = &half, .decay_factor = &none},
        {.match = "d", .lr_factor = &half}};
    const dp_optim_config all[CONFIGS] = {
        {.rule = dp_sgd(), .hyper = {.lr = 0.5, .momentum = 0.9, .nesterov = true}},
        {.rule = dp_adamw(),
         .hyper = {.lr = 0.25, .weight_decay = 0.1},
         .groups = groups,
         .group_count = 2,
         .masters = true,
         .clip = {.norm = 100},
         .schedule = {.warmup = 3}},
        {.rule = &adam_of_ours,
         .hyper = {.lr = 0.125},
         .accumulate = 2,
         .scale = {.dynamic = true, .scale = 8, .interval = 2}}};
    return all[which];
}

/* ---- what is left in the end ----------------------------------------------------------------- */

enum { BYTES = 1 << 18 };
typedef struct picture { /* of parameters and state */
    size_t used;
    int64_t steps, good;
    double scale;
    char bytes[BYTES];
} picture;

static dp_status draw(picture *to, dp_ctx *ctx, const dp_tensor *from)
{
    size_t bytes = (size_t)dp_tensor_count(from) * dp_dtype_bytes((dp_dtype)from->dtype);
    CHECK(to->used + bytes <= BYTES);
    DP_TRY(dp_read(ctx, from, to->bytes + to->used, bytes));
    to->used += bytes;
    return DP_OK;
}

static dp_status draw_in(picture *to, dp_module *par, dp_optim *optim, dp_scope *scope)
{
    dp_ctx *ctx = dp_module_ctx(par);
    dp_value saved;
    to->used = 0;
    DP_TRY(dp_optim_save(optim, scope, &saved));
    to->steps = dp_get(saved, "steps").as.i;
    to->good = dp_get(saved, "good").as.i;
    to->scale = dp_get(saved, "scale").as.f;
    for (size_t p = 0; p < PARAMS; p++) {
        dp_value state = dp_get(dp_get(saved, "state"), params[p].name);
        dp_param_info info;
        for (size_t k = 0; k < dp_count(state); k++)
            DP_TRY(draw(to, ctx, dp_at(state, k).as.t));
        DP_TRY(dp_module_param(par, p, &info));
        DP_TRY(draw(to, ctx, &info.data));
    }
    return DP_OK;
}

static dp_status draw_all(picture *to, dp_module *par, dp_optim *optim)
{
    dp_scope *scope = dp_scope_begin(dp_module_ctx(par));
    DP_TRY(dp_scope_check(scope));
    dp_status status = draw_in(to, par, optim, scope);
    dp_scope_end(scope);
    return status;
}

static picture *wanted; /* of each config, in memory that all see */

/* ---- who trains ------------------------------------------------------------------------------ */

typedef struct trainer {
    dp_ctx *ctx;
    dp_module *par;
    dp_optim *optim;
    int64_t steps; /* that it has counted */
} trainer;

static int devices = 1;
static const dp_coll_ops *colls[3];
static const char *machines; /* a letter for each process; NULL: all are on this one */

static dp_ctx *open_alone(void)
{
    dp_ctx *ctx;
    dp_config config = {.device_count = 1, .local_only = true};
    CHECK_OK(dp_open(&config, &ctx));
    return ctx;
}

static dp_ctx *open_recovering(void)
{
    dp_ctx *ctx;
    dp_config config = {.device_count = devices, .recovers = true, .timeout_ms = TIMEOUT_MS};
    if (colls[0] != NULL)
        config.colls = colls;
    use_devices(&config);
    if (machines == NULL) {
        use_name();
    } else {
        use_tcp();
        set("DP_MACHINE", (char[]){machines[me], '\0'});
        set("DP_INTERFACE", "lo");
    }
    CHECK_OK(dp_open(&config, &ctx));
    return ctx;
}

static dp_status one_step(trainer *t)
{
    dp_info info;
    dp_value log;
    dp_optim_config config = optim_config();
    dp_status status = DP_OK;
    DP_TRY(dp_info_get(t->ctx, &info));
    for (int pass = 0; pass < (config.accumulate > 1 ? config.accumulate : 1) && status == DP_OK;
         pass++) {
        dp_scope *scope = dp_scope_begin(t->ctx);
        DP_TRY(dp_scope_check(scope));
        int total = 5 + (int)(t->steps % 7) + 2 * pass;
        float rows[4] = {0}; /* a row for each device: what all add up to is the same */
        for (int r = 0; r < info.local_count; r++) {
            int rank = info.rank_first + r;
            rows[r] = (float)(total / info.rank_count + (rank < total % info.rank_count));
        }
        status = dp_train_step(
            t->par, scope,
            DP_DICT(scope, {"x", dp_array(scope, rows, DP_F32, DP_SHAPE(info.local_count))}),
            t->optim, &log);
        dp_scope_end(scope);
    }
    t->steps += status == DP_OK;
    return status;
}

static dp_module *make_par(dp_ctx *ctx)
{
    static const char *const own[] = {"own"};
    dp_module *par;
    CHECK_OK(dp_distributed(make_net(ctx),
                            &(dp_distributed_config){.reduction = DP_SUM_RANKS,
                                                     .ignored = own,
                                                     .ignored_count = !reduces},
                            &par));
    return par;
}

static void make_picture(void)
{
    trainer t = {.ctx = open_alone()};
    dp_optim_config config = optim_config();
    t.par = make_par(t.ctx);
    CHECK_OK(dp_optim_create(t.par, &config, &t.optim));
    while (t.steps < steps)
        CHECK_OK(one_step(&t));
    CHECK_OK(draw_all(&wanted[which], t.par, t.optim));
    CHECK_INT(wanted[which].steps, steps);
    dp_close(t.ctx);
}

static void make_pictures(void)
{
    nobody_launched_us();
    wanted = memory_of_all(CONFIGS * sizeof *wanted);
    for (which = 0; which < CONFIGS; which++)
        finish(start(0, make_picture), 0);
    which = 0;
}

/* SGD: the last parameter and its state are as large as its gradients, which are a power of two
   times those of the picture. */
static void scale_own(picture *own)
{
    float element;
    for (size_t at = own->used - 2 * OWN * sizeof element; at < own->used; at += sizeof element) {
        memcpy(&element, own->bytes + at, sizeof element);
        element /= (float)own_sum;
        memcpy(own->bytes + at, &element, sizeof element);
    }
}

/* Who fails after that has seen it. */
static dp_status check_picture(trainer *t)
{
    static picture own;
    DP_TRY(draw_all(&own, t->par, t->optim));
    if (own_sum > 1)
        scale_own(&own);
    CHECK_INT(own.steps, steps);
    CHECK_INT(own.good, wanted[which].good);
    CHECK_F64(own.scale, wanted[which].scale, 0);
    CHECK_INT(own.used, wanted[which].used);
    CHECK_BYTES(own.bytes, wanted[which].bytes, own.used);
    CHECK(dp_barrier(t->ctx) == DP_OK || dp_failure(t->ctx, NULL));
    return DP_OK;
}

/* ---- who recovers ---------------------------------------------------------------------------- */

static bool shares = true; /* what the furthest has, after dp_recover */
static bool counts;        /* by itself, as programs do that know nothing of mirrors */
static bool admits;        /* each step, and waits before the last one */
static bool has_come;      /* who was waited for */
static bool created;       /* the optimizer is there */
static void (*to_recover)(void);

static dp_status create(trainer *t)
{
    dp_optim_config config = optim_config();
    config.sharded = config.mirrored = true;
    DP_TRY(dp_optim_create(t->par, &config, &t->optim));
    atomic_fetch_add(met, !created);
    created = true;
    return DP_OK;
}

static dp_status share(trainer *t, bool came_back)
{
    dp_value model, state, kept;
    dp_optim_info info;
    dp_scope *scope = dp_scope_begin(t->ctx);
    DP_TRY(dp_module_save(t->par, scope, &model));
    DP_TRY(dp_optim_save(t->optim, scope, &state));
    DP_TRY(dp_optim_info_get(t->optim, &info));
    t->steps = counts ? t->steps : info.step_count;
    if (shares) {
        dp_value own =
            DP_DICT(scope, {"model", model}, {"optim", state}, {"steps", dp_int(t->steps)});
        DP_TRY(dp_checkpoint_share(t->ctx, scope, came_back ? -1 : t->steps, own, &kept));
        DP_TRY(dp_module_load(t->par, dp_get(kept, "model"), NULL));
        DP_TRY(dp_optim_load(t->optim, dp_get(kept, "optim")));
        t->steps = dp_get(kept, "steps").as.i;
    }
    dp_scope_end(scope);
    int each = optim_config().accumulate; /* steps begin anew */
    return dp_optim_progress(t->optim, t->steps * (each > 0 ? each : 1), -1);
}

static dp_status train_once(trainer *t, bool came_back)
{
    bool came = came_back;
    if (t->optim == NULL)
        DP_TRY(create(t));
    do { /* it may come late */
        if (admits && !came_back)
            DP_TRY(dp_admit(t->ctx, &came));
        has_come = has_come || came;
    } while (admits && !has_come && t->steps == steps - 1);
    if (came)
        DP_TRY(share(t, came_back));
    return one_step(t);
}

/* Tells whether who was to come has come: with dp_recover, if dp_admit has let it in and somebody
   was too late then. */
static bool all_are_there(const trainer *t)
{
    dp_info info;
    CHECK_OK(dp_info_get(t->ctx, &info));
    return info.process_count == world;
}

static dp_status go_on(trainer *t, bool came_back)
{
    if (to_recover != NULL)
        to_recover();
    DP_TRY(dp_recover(t->ctx));
    has_come = has_come || all_are_there(t);
    if (t->optim == NULL)
        DP_TRY(create(t));
    return share(t, came_back);
}

static trainer begin(void)
{
    trainer t = {.ctx = open_recovering()};
    t.par = make_par(t.ctx);
    return t;
}

static void train_to_end(trainer t)
{
    int tries = 0;
    bool fresh = comes_back;
    for (bool last = false; !last;) {
        last = t.steps == steps;
        dp_status status = last ? check_picture(&t) : train_once(&t, fresh);
        last = last && status == DP_OK;
        while (status != DP_OK) {
            if (++tries == 50 || !dp_failure(t.ctx, NULL))
                CHECK_OK(status);
            status = go_on(&t, fresh);
        }
        fresh = false;
    }
    dp_close(t.ctx);
}

static void train(void)
{
    train_to_end(begin());
}

/* ---- without a death ------------------------------------------------------------------------- */

TEST_SLOW(the_numbers_are_those_of_one_process, 60)
{
    make_pictures();
    for (which = 0; which < CONFIGS; which++)
        for (devices = 1; devices <= DEVICES; devices++)
            for (int count = 1; count <= 4; count++) {
                start_world(count, train);
                CHECK_INT(end_world(), 0);
            }
}

/* Messages and collectives go over TCP. */
TEST_SLOW(the_numbers_on_several_machines, 60)
{
    make_pictures();
    machines = "abcab";
    port = free_port();
    for (which = 0; which < CONFIGS; which++)
        for (int count = 2; count <= 5; count += 1 + (which > 0)) {
            start_world(count, train);
            CHECK_INT(end_world(), 0);
        }
}

#if !defined(TEST_CUDA)
/* ---- at every collective --------------------------------------------------------------------- */

static dp_coll_ops counted;
static atomic_int runs;
static atomic_int victims[MOST]; /* the run that each dies at, from 1 on; 0: it does not */
static bool after;               /* it was run */

static dp_status counted_open(const dp_host *host, const dp_comm_config *config, dp_comm **out)
{
    DP_TRY(dp_shm_coll()->open(host, config, out));
    (*out)->ops = &counted;
    return DP_OK;
}

static dp_status counted_run(dp_comm *comm, const dp_coll_call *call)
{
    int run = created ? atomic_fetch_add(&runs, 1) + 1 : -1;
    if (run == victims[me] && !after)
        raise(SIGKILL);
    DP_TRY(dp_shm_coll()->run(comm, call));
    if (run == victims[me])
        raise(SIGKILL);
    return DP_OK;
}

static void count_runs(void)
{
    counted = *dp_shm_coll();
    counted.open = counted_open;
    counted.run = counted_run;
    colls[0] = dp_cpu_coll(); /* for one that is left */
    colls[1] = &counted;
}

/* Process `who` dies at every one in turn. */
static void die_at_each(int count, int who)
{
    int killed = 1;
    for (int at = 2; killed > 0; at += test_step()) {
        victims[who] = at / 2;
        after = at % 2 == 1;
        start_world(count, train);
        killed = end_world();
    }
    victims[who] = 0;
}

TEST_SLOW(one_dies_at_each_collective, 300)
{
    steps = 3;
    make_pictures();
    count_runs();
    for (which = 0; which < CONFIGS; which++)
        die_at_each(3, which);
    which = 1;
    devices = 2;
    die_at_each(2, 1); /* one is left */
}

/* State that each process has for itself stays, and who has none gets it. */
TEST_SLOW(what_ranks_do_not_reduce, 120)
{
    steps = 2;
    reduces = false;
    make_pictures();
    count_runs();
    die_at_each(3, 0);
}

TEST_SLOW(who_counts_for_itself_shares_that, 120)
{
    make_pictures();
    count_runs();
    counts = true;
    die_at_each(3, 1);
}

TEST_SLOW(what_is_left_needs_no_sharing, 120)
{
    make_pictures();
    count_runs();
    shares = false;
    which = 1;
    die_at_each(4, 2);
}

/* ---- two die, and not together --------------------------------------------------------------- */

static int second = -1, second_at;

static void die_while_recovering(void)
{
    if (me == second) {
        atomic_store(&runs, 0);
        victims[me] = second_at / 2;
        second = -1;
    }
}

/* The other one dies at each collective after that, those of dp_recover too. */
TEST_SLOW(another_dies_while_they_recover, 300)
{
    int killed = 2;
    steps = 2;
    make_pictures();
    count_runs();
    to_recover = die_while_recovering;
    for (int first = 12; first < 19; first += 6) {
        which = first == 12 ? 0 : 2;
        killed = 2;
        for (second_at = 2; killed == 2; second_at += test_step()) {
            victims[0] = first;
            after = second_at % 2 == 1;
            second = 2;
            start_world(4, train);
            killed = end_world();
        }
        CHECK_INT(killed, 1);
    }
}

#endif

/* ---- within the update ----------------------------------------------------------------------- */

static int victim;

static void die_in_update(void)
{
    dies_in_rule = me == victim ? dies_in_rule : 0;
    train();
}

TEST_SLOW(one_dies_within_its_update, 300)
{
    steps = 2;
    make_pictures();
    which = 2;
    for (victim = 0; victim < 3; victim++) {
        int killed = 1;
        for (dies_in_rule = 1; killed > 0; dies_in_rule += test_step()) {
            start_world(3, die_in_update);
            killed = end_world();
        }
    }
}

/* A state that is half stepped is worth nothing, but there is the copy. */
static void fail_in_update(void)
{
    rule_fails = me == victim ? 2 : 0;
    train();
}

TEST_SLOW(a_rule_that_fails_loses_one_share, 60)
{
    make_pictures();
    which = 2;
    for (victim = 0; victim < 3; victim++) {
        start_world(3, fail_in_update);
        CHECK_INT(end_world(), 0);
    }
}

static void fail_everywhere(void)
{
    trainer t = begin();
    dp_scope *scope = dp_scope_begin(t.ctx);
    dp_value saved;
    CHECK_OK(create(&t));
    rule_fails = 1;
    rule_meets = true;
    while (one_step(&t) == DP_OK)
        continue;
    CHECK(dp_failure(t.ctx, NULL));
    CHECK_OK(dp_recover(t.ctx));
    CHECK_ERROR(dp_optim_save(t.optim, scope, &saved), DP_ERR_STATE,
                "dp_optim_save: no process has state of 'distributed': those who lived were in a "
                "step in which the rule failed");
    dp_scope_end(scope);
    dp_close(t.ctx);
}

TEST_SLOW(a_rule_that_fails_everywhere_loses_all, 60)
{
    make_pictures();
    which = 2;
    start_world(3, fail_everywhere);
    CHECK_INT(end_world(), 0);
}

/* ---- what is lost ---------------------------------------------------------------------------- */

static void lose_two(void)
{
    trainer t = begin();
    dp_scope *scope = dp_scope_begin(t.ctx);
    dp_value saved;
    CHECK_OK(create(&t));
    CHECK_OK(one_step(&t));
    wait_for(world);
    if (me == 1 || me == 2)
        raise(SIGKILL);
    while (one_step(&t) == DP_OK)
        continue;
    CHECK_OK(dp_recover(t.ctx));
    dp_info info;
    CHECK_OK(dp_info_get(t.ctx, &info));
    if (info.process_count > 2) { /* one has died later */
        while (dp_barrier(t.ctx) == DP_OK)
            continue;
        CHECK_OK(dp_recover(t.ctx));
    }
    for (int i = 0; i < 2; i++)
        CHECK_ERROR(
            dp_optim_save(t.optim, scope, &saved), DP_ERR_STATE,
            "dp_optim_save: the state of 'distributed' was spread over 4 processes, and process 1 "
            "is gone together with the one that had its copy: make a new optimizer, which can "
            "load a checkpoint");
    dp_optim_destroy(t.optim);
    CHECK_OK(create(&t));
    CHECK_OK(one_step(&t));
    CHECK_OK(dp_params_compare(t.par));
    dp_scope_end(scope);
    dp_close(t.ctx);
}

TEST_SLOW(neighbours_that_die_together, 60)
{
    make_pictures();
    start_world(4, lose_two);
    CHECK_INT(end_world(), 2);
}

/* ---- who comes back -------------------------------------------------------------------------- */

static void come_back(void)
{
    come_again();
    train();
}

TEST_SLOW(who_comes_back_gets_a_share, 120)
{
    int how;
    steps = 100;
    make_pictures();
    admits = true;
    for (which = 0; which < CONFIGS; which++) {
        start_world(3, train);
        wait_for(3);
        rest(5);
        CHECK_INT(kill(pids[which], SIGKILL), 0);
        CHECK_INT(waitpid(pids[which], &how, 0), pids[which]);
        pids[which] = start(which, come_back);
        CHECK_INT(end_world(), 0);
    }
}

TEST_SLOW(who_comes_back_on_another_machine_gets_a_share, 120)
{
    int how;
    steps = 100;
    make_pictures();
    admits = true;
    machines = "aba";
    port = free_port();
    start_world(3, train);
    wait_for(3);
    rest(5);
    CHECK_INT(kill(pids[1], SIGKILL), 0);
    CHECK_INT(waitpid(pids[1], &how, 0), pids[1]);
    pids[1] = start(1, come_back);
    CHECK_INT(end_world(), 0);
}

static void train_by_itself(void)
{
    own_sum = comes_back ? 1 : 1 << me; /* who comes back begins with what process 0 has */
    if (me == 1 && !comes_back) {
        trainer t = begin();
        while (t.steps < 2)
            CHECK_OK(train_once(&t, false));
        raise(SIGKILL);
    }
    train();
}

static void come_back_by_itself(void)
{
    come_again();
    train_by_itself();
}

/* Those who have state that ranks do not reduce keep theirs when somebody gets it. */
TEST_SLOW(who_comes_back_changes_nothing_of_the_others, 60)
{
    int how;
    reduces = shares = false;
    make_pictures();
    admits = true;
    start_world(3, train_by_itself);
    CHECK_INT(waitpid(pids[1], &how, 0), pids[1]);
    CHECK(WIFSIGNALED(how));
    pids[1] = start(1, come_back_by_itself);
    CHECK_INT(end_world(), 0);
}

/* ---- without a word -------------------------------------------------------------------------- */

/* The first call may be a step. */
static void step_at_once(void)
{
    trainer t = begin();
    CHECK_OK(create(&t));
    CHECK_OK(one_step(&t));
    wait_for(world);
    if (me == 1)
        raise(SIGKILL);
    while (dp_barrier(t.ctx) == DP_OK)
        continue;
    CHECK_OK(dp_recover(t.ctx));
    while (t.steps < steps)
        CHECK_OK(one_step(&t));
    CHECK_OK(check_picture(&t));
    dp_close(t.ctx);
}

TEST_SLOW(the_first_call_may_be_a_step, 60)
{
    make_pictures();
    for (which = 0; which < 2; which++) {
        start_world(3, step_at_once);
        CHECK_INT(end_world(), 1);
    }
}

/* ---- a step that is refused ------------------------------------------------------------------ */

static dp_status step_of(dp_module *par, dp_optim *optim, float x)
{
    dp_ctx *ctx = dp_module_ctx(par);
    dp_scope *scope = dp_scope_begin(ctx);
    dp_value log, row = dp_array(scope, (float[]){x, 0}, DP_F32, DP_SHAPE(DEVICES));
    dp_status status = dp_train_step(par, scope, DP_DICT(scope, {"x", row}), optim, &log);
    dp_scope_end(scope);
    return status;
}

static void refuse_a_step(void)
{
    dp_ctx *ctx = open_recovering();
    dp_scope *scope = dp_scope_begin(ctx);
    dp_module *par;
    dp_optim *optim;
    dp_value saved;
    CHECK_OK(dp_distributed(make_net(ctx), NULL, &par));
    CHECK_OK(dp_optim_create(par,
                             &(dp_optim_config){.hyper = {.lr = 1, .momentum = 0.5},
                                                .clip = {.norm = 1},
                                                .sharded = true,
                                                .mirrored = true},
                             &optim));
    CHECK_OK(step_of(par, optim, 1));
    CHECK_ERROR(step_of(par, optim, me == 1 ? NAN : 1), DP_ERR_STATE,
                "dp_train_step: the norm of the gradients is nan");
    CHECK(!dp_failure(ctx, NULL));
    CHECK_OK(dp_zero_grad(par));
    CHECK_OK(step_of(par, optim, 1));
    CHECK_OK(dp_params_compare(par));
    atomic_fetch_add(met, 1);
    wait_for(world);
    if (me == 1)
        raise(SIGKILL);
    while (dp_barrier(ctx) == DP_OK)
        continue;
    CHECK_OK(dp_recover(ctx)); /* with what the dead one had */
    CHECK_OK(step_of(par, optim, 1));
    CHECK_OK(dp_optim_save(optim, scope, &saved));
    CHECK_INT(dp_get(saved, "steps").as.i, 3);
    CHECK_OK(dp_params_compare(par));
    dp_scope_end(scope);
    dp_close(ctx);
}

/* The copies are those of the last step that was made. */
TEST_SLOW(norm_that_is_not_finite_refuses_a_step, 60)
{
    start_world(3, refuse_a_step);
    CHECK_INT(end_world(), 1);
}

/* ---- two optimizers -------------------------------------------------------------------------- */

static void both_step(dp_module **nets, dp_optim **optims, dp_scope *scope)
{
    for (int i = 0; i < 2; i++) {
        dp_value log, row = dp_array(scope, &(float){me == 0 ? 1 : 0}, DP_F32, DP_SHAPE(1));
        CHECK_OK(dp_train_step(nets[i], scope, DP_DICT(scope, {"x", row}), optims[i], &log));
    }
}

static void two_of_them(void)
{
    bool came = comes_back;
    dp_ctx *ctx = open_recovering();
    dp_scope *scope = dp_scope_begin(ctx);
    dp_module *nets[2];
    dp_optim *optims[2];
    dp_value saved, all;
    for (int i = 0; i < 2; i++)
        CHECK_OK(dp_distributed(make_net(ctx), &(dp_distributed_config){.reduction = DP_SUM_RANKS},
                                &nets[i]));
    for (which = 0; which < 2; which++) {
        dp_optim_config config = optim_config();
        config.sharded = config.mirrored = true;
        CHECK_OK(dp_optim_create(nets[which], &config, &optims[which]));
    }
    const dp_named_optim named[] = {{"a", optims[0]}, {"b", optims[1]}};
    if (!comes_back) {
        both_step(nets, optims, scope);
        atomic_fetch_add(met, 1);
        wait_for(world);
        if (me == 1)
            raise(SIGKILL);
        while (dp_barrier(ctx) == DP_OK)
            continue;
        CHECK_OK(dp_recover(ctx));
        CHECK_OK(dp_optims_save(named, 2, scope, &saved));
        CHECK_OK(dp_optims_load(named, 2, saved));
        both_step(nets, optims, scope);
        while (!came)
            CHECK_OK(dp_admit(ctx, &came));
    }
    CHECK_OK(dp_optims_save(named, 2, scope, &saved));
    for (int i = 0; i < 2; i++)
        CHECK_INT(dp_get(dp_get(saved, named[i].name), "steps").as.i, 2);
    CHECK_OK(dp_checkpoint_share(ctx, scope, comes_back ? -1 : 2, saved, &all));
    CHECK_OK(dp_optims_load(named, 2, all));
    both_step(nets, optims, scope);
    for (int i = 0; i < 2; i++)
        CHECK_OK(dp_params_compare(nets[i]));
    dp_scope_end(scope);
    dp_close(ctx);
}

static void two_come_back(void)
{
    come_again();
    two_of_them();
}

TEST_SLOW(two_optimizers_of_who_comes_back, 60)
{
    make_pictures();
    start_world(3, two_of_them);
    CHECK_INT(waitpid(pids[1], NULL, 0), pids[1]);
    pids[1] = start(1, two_come_back);
    CHECK_INT(end_world(), 0);
}

/* ---- memory that is not there ---------------------------------------------------------------- */

static int fails_at;
static atomic_int *fired;

/* One allocation fails, of one process, when state is cut anew. All hear of it, and it can be tried
   again. */
static void fail_once(void)
{
    test_allocator counter = {0};
    const dp_config config = {.device_count = 2,
                              .recovers = true,
                              .poison = true, /* each small piece of a scope is an allocation too */
                              .timeout_ms = TIMEOUT_MS,
                              .allocator = test_allocator_of(&counter)};
    trainer t = {.steps = 0};
    without_gpus();
    use_name();
    CHECK_OK(dp_open(&config, &t.ctx));
    t.par = make_par(t.ctx);
    CHECK_OK(create(&t));
    CHECK_OK(one_step(&t));
    if (me == 0)
        dp_abort(t.ctx, DP_ERR_USER, "nobody has died");
    while (dp_barrier(t.ctx) == DP_OK)
        continue;
    CHECK_OK(dp_recover(t.ctx));
    counter.fail_at = me == 0 ? counter.call_count + (size_t)fails_at : 0;
    dp_status status = dp_optim_load(t.optim, dp_none());
    counter.fail_at = 0;
    if (me == 0)
        atomic_store(fired, counter.fail_count > 0);
    if (dp_failure(t.ctx, NULL))
        CHECK_OK(dp_recover(t.ctx));
    else
        CHECK(status == DP_ERR_NO_MEMORY || status == DP_ERR_MISMATCH);
    CHECK_ERROR(dp_optim_load(t.optim, dp_none()), DP_ERR_MISMATCH,
                "dp_optim_load: the rule is 'adamw', saved ''");
    while (t.steps < steps)
        CHECK_OK(one_step(&t));
    CHECK_OK(check_picture(&t));
    dp_close(t.ctx);
    CHECK_NO_LEAKS(&counter);
}

TEST_SLOW(every_allocation_of_the_next_cut_fails_once, 120)
{
    make_pictures();
    fired = memory_of_all(sizeof *fired);
    which = 1;
    atomic_store(fired, 1);
    for (fails_at = 1; atomic_load(fired); fails_at += test_step()) {
        start_world(2, fail_once);
        CHECK_INT(end_world(), 0);
    }
    CHECK(fails_at > 20);
}

/* ---- what is refused ------------------------------------------------------------------------- */

static void refused(void)
{
    dp_ctx *ctx;
    dp_module *par;
    dp_optim *optim;
    const dp_distributed_config shared = {.share_params = true};
    const dp_optim_config mirrored = {.hyper = {.lr = 1}, .sharded = true, .mirrored = true};
    without_gpus();
    use_name();
    CHECK_OK(dp_open(&(dp_config){.device_count = 1 + me}, &ctx));
    CHECK_OK(dp_distributed(make_net(ctx), NULL, &par));
    CHECK_ERROR(
        dp_optim_create(par, &(dp_optim_config){.hyper = {.lr = 1}, .mirrored = true}, &optim),
        DP_ERR_INVALID, "dp_optim_create: mirrored is set, and sharded is not");
    CHECK_ERROR(dp_optim_create(par, &mirrored, &optim), DP_ERR_UNSUPPORTED,
                "dp_optim_create: mirrored: processes have 1 to 2 devices");
    dp_close(ctx);
    set("DP_ADDR", "@another-place");
    CHECK_OK(dp_open(&(dp_config){.device_count = 1}, &ctx));
    CHECK_OK(dp_distributed(make_net(ctx), &shared, &par));
    CHECK_ERROR(dp_optim_create(par, &mirrored, &optim), DP_ERR_UNSUPPORTED,
                "mirrored: 'distributed': the processes share parameters (share_params)");
    dp_close(ctx);
}

/* From now on no process has a port, and so none has messages. */
static dp_status open_without_ports(const dp_host *host, const dp_comm_config *config,
                                    dp_comm **out)
{
    set("DP_INTERFACE", "nowhere");
    return boot_coll()->open(host, config, out);
}

static void on_two_machines(void)
{
    dp_coll_ops table = *boot_coll();
    const dp_coll_ops *const own[] = {&table, NULL};
    dp_ctx *ctx;
    table.open = open_without_ports;
    dp_module *par;
    dp_optim *optim;
    use_tcp();
    set("DP_MACHINE", me == 0 ? "a" : "b");
    set("DP_INTERFACE", "lo");
    CHECK_OK(dp_open(&(dp_config){.colls = own, .device_count = 1}, &ctx));
    CHECK_OK(dp_distributed(make_net(ctx), NULL, &par));
    CHECK_ERROR(
        dp_optim_create(
            par, &(dp_optim_config){.hyper = {.lr = 1}, .sharded = true, .mirrored = true}, &optim),
        DP_ERR_UNSUPPORTED, "nothing carries messages between these processes");
    dp_close(ctx);
}

/* Process 1 has no file for a connection to the other one, which hears of it. */
static void one_has_no_files(void)
{
    const dp_optim_config mirrored = {.hyper = {.lr = 1}, .sharded = true, .mirrored = true};
    dp_module *par;
    dp_optim *optim;
    dp_ctx *ctx = open_recovering();
    CHECK_OK(dp_distributed(make_net(ctx), NULL, &par));
    CHECK_OK(dp_barrier(ctx));
    double start = now_ms();
    int spent = me == 1 ? spend_all_files() : -1;
    CHECK_ERROR(dp_optim_create(par, &mirrored, &optim), DP_ERR_INTERNAL,
                "it may open no more files");
    CHECK(now_ms() - start < TIMEOUT_MS / 2);
    if (spent >= 0)
        close(spent);
    dp_close(ctx);
}

TEST(who_has_no_way_to_mirror_says_so)
{
    without_gpus();
    machines = "ab";
    port = free_port();
    start_world(2, one_has_no_files);
    CHECK_INT(end_world(), 0);
}

TEST(where_nothing_is_mirrored)
{
    make_pictures();
    start_world(2, refused);
    CHECK_INT(end_world(), 0);
    port = free_port();
    start_world(2, on_two_machines);
    CHECK_INT(end_world(), 0);
}

TEST(devices_with_parameters_of_their_own)
{
    const dp_device_ops *const backends[] = {toy_device(), NULL};
    dp_ctx *ctx;
    dp_module *par;
    dp_optim *optim;
    CHECK_OK(dp_open(&(dp_config){.backends = backends, .device_count = 2}, &ctx));
    CHECK_OK(dp_distributed(make_net(ctx), NULL, &par));
    CHECK_ERROR(
        dp_optim_create(
            par, &(dp_optim_config){.hyper = {.lr = 1}, .sharded = true, .mirrored = true}, &optim),
        DP_ERR_UNSUPPORTED,
        "mirrored: 'distributed': each device of this process has parameters of its own");
    dp_close(ctx);
}

/* ---- at random moments ----------------------------------------------------------------------- */

enum { LOST = 3 }; /* what a process ends with, if state was */

static void train_or_lose(void)
{
    trainer t = begin();
    for (bool last = false; !last;) {
        last = t.steps == steps;
        dp_status status = last ? check_picture(&t) : train_once(&t, false);
        last = last && status == DP_OK;
        while (status != DP_OK && dp_failure(t.ctx, NULL))
            status = go_on(&t, false);
        if (status == DP_ERR_STATE && strstr(dp_last_error(), "is gone together") != NULL)
            _exit(LOST);
        CHECK_OK(status);
    }
    dp_close(t.ctx);
}

static void random_deaths(int count, uint64_t *seed)
{
    int killed = 0, lost = 0, ended = 0;
    start_world(count, train_or_lose);
    kill_at_random(seed);
    for (int p = 0; p < count; p++) {
        int status = 0;
        CHECK_INT(waitpid(pids[p], &status, 0), pids[p]);
        killed += WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL;
        lost += WIFEXITED(status) && WEXITSTATUS(status) == LOST;
        ended += WIFEXITED(status) && WEXITSTATUS(status) == EXIT_SUCCESS;
    }
    CHECK_INT(killed + lost + ended, count);
    CHECK(lost == 0 || (ended == 0 && killed > 1));
}

TEST_SLOW(deaths_at_random_moments, 120)
{
    uint64_t seed = test_seed();
    steps = 200;
    make_pictures();
    for (int i = 0; i < RANDOM; i += test_stride()) {
        which = i % CONFIGS;
        random_deaths(2 + (int)(test_random(&seed) % 4), &seed);
    }
}

/* One of them: most are left. */
TEST_SLOW(one_dies_on_several_machines, 120)
{
    uint64_t seed = test_seed();
    steps = 200;
    make_pictures();
    machines = "abcab";
    port = free_port();
    for (int i = 0; i < RANDOM; i += 8 * test_stride()) {
        int count = 3 + (int)(test_random(&seed) % 3);
        which = i / 8 % CONFIGS;
        start_world(count, train);
        wait_for(count);
        struct timespec nap = {.tv_nsec = (long)(test_random(&seed) % 100000000)};
        nanosleep(&nap, NULL);
        kill(pids[test_random(&seed) % (uint64_t)count], SIGKILL);
        CHECK(end_world() <= 1); /* it may have ended */
    }
}

/* ---- a machine that dies --------------------------------------------------------------------- */

static char dying; /* its letter */

static void lose_a_machine(void)
{
    trainer t = begin();
    CHECK_OK(create(&t));
    wait_for(world); /* the others have one, too */
    CHECK_OK(one_step(&t));
    if (machines[me] == dying)
        raise(SIGKILL);
    train_to_end(t);
}

/* The copy of each share is on another one. */
TEST_SLOW(a_machine_dies, 120)
{
    static const char *const layouts[] = {"aabbcc", "abcabc", "abbcc", "aabbb",
                                          "aab",    "aaabc",  "aabb",  "abab"};
    make_pictures();
    port = free_port();
    for (size_t i = 0; i < sizeof layouts / sizeof *layouts; i++)
        for (dying = 'a'; strchr(layouts[i], dying) != NULL; dying++) {
            machines = layouts[i];
            int dead = 0, count = (int)strlen(machines);
            for (int p = 0; p < count; p++)
                dead += machines[p] == dying;
            if (2 * dead > count || (2 * dead == count && dying == *machines))
                continue; /* the others do not go on */
            which = (int)i % CONFIGS;
            start_world(count, lose_a_machine);
            CHECK_INT(end_world(), dead);
        }
}

/* ---- who come and go ------------------------------------------------------------------------- */

static picture *drawn; /* in the end, by process 0; in memory that all see */

static dp_status step_unless_told(trainer *t, bool came_back, bool *out_stop)
{
    static picture own;
    bool came = came_back;
    if (t->optim == NULL)
        DP_TRY(create(t));
    if (!came_back)
        DP_TRY(dp_admit(t->ctx, &came));
    if (came)
        DP_TRY(share(t, came_back));
    DP_TRY(dp_any(t->ctx, atomic_load(&seen->stop), out_stop));
    return *out_stop ? draw_all(me == 0 ? drawn : &own, t->par, t->optim) : one_step(t);
}

static void come_and_go(void)
{
    bool fresh = comes_back, stop = false;
    trainer t = begin();
    while (!stop) {
        dp_info info;
        dp_status status = step_unless_told(&t, fresh, &stop);
        while (status != DP_OK) {
            if (!dp_failure(t.ctx, NULL))
                CHECK_OK(status);
            status = go_on(&t, fresh);
        }
        fresh = false;
        if (dp_info_get(t.ctx, &info) == DP_OK)
            atomic_store(&seen->counts[me], info.process_count);
    }
    CHECK_OK(dp_params_compare(t.par));
    CHECK(dp_barrier(t.ctx) == DP_OK || dp_failure(t.ctx, NULL));
    dp_close(t.ctx);
}

static void come_and_go_again(void)
{
    come_again();
    come_and_go();
}

TEST_SLOW(they_come_and_go, 120)
{
    enum { ROUNDS = 8 };
    uint64_t seed = test_seed();
    seen = memory_of_all(sizeof *seen);
    drawn = memory_of_all(sizeof *drawn);
    make_pictures();
    for (which = 0; which < CONFIGS; which++) {
        memset(seen, 0, sizeof *seen);
        start_world(2 + (int)(test_random(&seed) % 3), come_and_go);
        for (int round = 0; round < ROUNDS; round++) {
            int who = (int)(test_random(&seed) % (uint64_t)world);
            wait_for_all_of_them();
            rest((int)(test_random(&seed) % 20));
            CHECK_INT(kill(pids[who], SIGKILL), 0);
            CHECK_INT(waitpid(pids[who], NULL, 0), pids[who]);
            forget_counts();
            rest((int)(test_random(&seed) % 20));
            pids[who] = start(who, come_and_go_again);
        }
        wait_for_all_of_them();
        atomic_store(&seen->stop, true);
        CHECK_INT(end_world(), 0);
        steps = (int)drawn->steps;
        finish(start(0, make_picture), 0);
        CHECK_INT(drawn->used, wanted[which].used);
        CHECK_BYTES(drawn->bytes, wanted[which].bytes, drawn->used);
    }
}
