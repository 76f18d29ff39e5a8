/* test_late.c - who comes last: a process that is slow, always, at times or by chance, in forward,
   in backward or between steps, is named with what it does, and so is a device of a process; where
   all are alike nobody is. */

#define _GNU_SOURCE /* P_tmpdir */

#include "folder.h"
#include "ranked.h"
#include "world.h"

enum {
    SLOW_MS = 20, /* more than a core that is shared costs */
    STEPS = 100,  /* of which most are waited for */
};

typedef enum lateness { BETWEEN, IN_FORWARD, IN_BACKWARD } lateness;

/* Holds what the test asks of its processes. */
static struct trial {
    lateness when;
    int slow;  /* the process; -1: none */
    int every; /* so many steps */
    bool by_chance;
    int devices; /* `slow` is one of so many of the process, not a process */
} trial;

static dp_log_record said; /* the last line about it, and how many there were */
static char said_text[400];
static int said_count;

/* Keeps the last line, or one about the slow one: where a core is shared, others are late, too. */
static void hear_of_late(const dp_log_record *record, void *user)
{
    char name[32];
    (void)user;
    if (strstr(record->text, " comes last: ") == NULL)
        return;
    snprintf(name, sizeof name, " (process %d, pid ", trial.slow);
    if (said_count++ > 0 && strstr(said_text, name) != NULL)
        return;
    said = *record;
    snprintf(said_text, sizeof said_text, "%s", record->text);
}

static int here, step;
static uint64_t chance;

static void be_late(lateness when, int who)
{
    bool now = when == trial.when && who == trial.slow && step % trial.every == 0;
    if (now)
        rest(trial.by_chance ? 5 + (int)(test_random(&chance) % (2 * SLOW_MS)) : SLOW_MS);
}

static int who_runs(const dp_call *call)
{
    return trial.devices > 0 ? rank_of(call) : here;
}

static dp_status slow_forward(dp_call *call)
{
    be_late(IN_FORWARD, who_runs(call));
    call->out = dp_float(1);
    return DP_OK;
}

static dp_status slow_backward(dp_call *call)
{
    be_late(IN_BACKWARD, who_runs(call));
    DP_TRY(add_to(call, 0, 1));
    return add_to(call, 1, 1);
}

static const dp_method slow_methods[] = {{"forward", slow_forward}, {"backward", slow_backward}};

/* Returns the wrapper. */
static dp_module *train(dp_ctx *ctx, int steps)
{
    dp_module *par;
    CHECK_OK(
        dp_distributed(make_net_of(ctx, (dp_module_config){.methods = slow_methods}), NULL, &par));
    for (step = 0; step < steps; step++) {
        be_late(BETWEEN, trial.devices > 0 ? -1 : here);
        CHECK_OK(forward_and_backward(par, 1, false));
    }
    return par;
}

static dp_ctx *open_late(meeting *m, int devices)
{
    static dp_ctx *ctx;
    dp_config config = config_of(m, devices);
    config.colls = NULL;
    config.thread_count = devices; /* else they take turns on what there is */
    config.log = (dp_log){.fn = hear_of_late};
    here = m->process;
    said_count = 0;
    CHECK_OK(dp_open(&config, &ctx));
    return ctx;
}

static const char *const where[] = {"outside of forward and backward", "in forward", "in backward"};

/* Returns whether all processes name the slow one, with what it does. Where a core is shared
   another one may really be the last for a while. */
static bool all_name_it(dp_ctx *ctx)
{
    dp_late_info late;
    CHECK_OK(dp_late(ctx, &late));
    float named = late.rank == trial.slow && strcmp(late.where, where[trial.when]) == 0;
    CHECK_OK(dp_all_reduce(ctx, &(dp_part){&named, &named, NULL}, 1, DP_F32, DP_OP_MIN));
    return named > 0;
}

static void check_late(dp_ctx *ctx)
{
    char name[32];
    dp_late_info late;
    dp_info info = info_here(ctx);
    CHECK_OK(dp_late(ctx, &late));
    snprintf(name, sizeof name, " (process %d, pid ", trial.slow);
    CHECK(here == 0 ? said_count > 0 : said_count == 0); /* by chance another one before */
    if (here == 0) {
        CHECK_INT(said.level, DP_LOG_WARN);
        CHECK_SAYS(said_text, name);
        if (trial.every == 1) /* else other programs can make it another place for a while */
            CHECK_SAYS(said_text, where[trial.when]);
    }
    CHECK_INT(late.rank, trial.slow * info.local_count);
    CHECK_STR(late.where, where[trial.when]);
    CHECK(late.waits >= 48 && late.waits <= 1024);
    CHECK(5 * late.last >= 4 * late.waits && late.last <= late.waits);
    CHECK(late.late_s > (trial.by_chance ? 1e-3 : 0.5e-3 * SLOW_MS) && late.late_s < 1);
    CHECK(late.longest_rank >= 0 && late.longest_s >= 0.9 * late.late_s);
    if (here == trial.slow)
        CHECK(late.by_others_s > 0.5e-3 * SLOW_MS * 50);
    else
        CHECK(late.for_others_s > 0.5e-3 * SLOW_MS * 50 && late.by_others_s < late.for_others_s);
}

/* The table has the same; and a bucket's time is its own, not that of a wait. */
static void check_report(dp_module *par)
{
    char text[2000], name[40];
    dp_report report;
    snprintf(name, sizeof name, "; rank %d comes last: ", trial.slow);
    CHECK(dp_report_text(par, text, sizeof text) > 0);
    CHECK_SAYS(text, "\nwaited for others: ");
    CHECK_SAYS(text, name);
    CHECK_OK(dp_report_get(par, &report));
    CHECK(trial.by_chance || report.reducer.mean.travel_s < 0.5e-3 * SLOW_MS);
}

static void one_is_late(meeting *m)
{
    dp_ctx *ctx = open_late(m, 1);
    dp_module *par = NULL;
    for (int i = 0; i < 5 && (i == 0 || !all_name_it(ctx)); i++)
        par = train(ctx, STEPS * trial.every);
    check_late(ctx);
    check_report(par);
    wait_for_all(m);
    dp_close(ctx);
}

static void in_all_places(int processes)
{
    for (int i = BETWEEN; i <= IN_BACKWARD; i++) {
        trial = (struct trial){(lateness)i, (i + 1) % processes, 1, false, 0};
        in_processes(processes, one_is_late);
    }
}

TEST_SLOW(process_that_is_late_is_named, 60)
{
    in_all_places(2);
    in_all_places(4);
    trial = (struct trial){IN_FORWARD, 5, 1, false, 0};
    in_processes(8, one_is_late);
}

TEST_SLOW(process_that_is_late_is_named_over_tcp, 60)
{
    static const char *const machines[] = {"ab", "abc", "aabb"};
    meeting_by_tcp = true;
    for (int i = 0; i < 3; i++) {
        meeting_machines = machines[i];
        in_all_places((int)strlen(machines[i]));
    }
}

TEST_SLOW(process_that_is_late_at_times_is_named, 60)
{
    trial = (struct trial){BETWEEN, 1, 10, false, 0};
    in_processes(2, one_is_late);
    trial = (struct trial){IN_FORWARD, 2, 1, true, 0};
    in_processes(3, one_is_late);
}

/* Each rests for as long as chance has it, or all alike. */
static void all_are_alike(meeting *m)
{
    dp_ctx *ctx = open_late(m, 1);
    dp_late_info late;
    float one = 1;
    chance = (uint64_t)here + 1;
    for (int i = 0; i < 4 * STEPS; i++) {
        if (trial.by_chance)
            rest((int)(test_random(&chance) % 3));
        CHECK_OK(dp_all_reduce(ctx, &(dp_part){&one, &one, NULL}, 1, DP_F32, DP_OP_SUM));
    }
    CHECK_OK(dp_late(ctx, &late));
    CHECK_INT(said_count, 0);
    CHECK_INT(late.rank, -1);
    wait_for_all(m);
    dp_close(ctx);
}

TEST_SLOW(nobody_is_named_where_all_are_alike, 60)
{
    for (int processes = 2; processes <= 4; processes++)
        for (int by_chance = 0; by_chance < 2; by_chance++) {
            trial.by_chance = by_chance != 0;
            in_processes(processes, all_are_alike);
        }
}

/* Another one is said, too; the same one is not said again. */
static void one_after_the_other(meeting *m)
{
    dp_ctx *ctx = open_late(m, 1);
    for (int i = 0; i < 3; i++) {
        trial.slow = i > 0;
        train(ctx, i == 1 ? 2 * STEPS : STEPS);
    }
    CHECK_INT(said_count, here == 0 ? 2 : 0);
    wait_for_all(m);
    dp_close(ctx);
}

TEST_SLOW(line_comes_again_when_it_is_another_one, 60)
{
    trial = (struct trial){BETWEEN, 0, 1, false, 0};
    in_processes(2, one_after_the_other);
}

/* ---- devices of one process ------------------------------------------------------------------ */

static dp_ctx *open_devices(int cores)
{
    dp_ctx *ctx;
    const dp_device_ops *const backends[] = {dp_cpu(), NULL};
    said_count = 0;
    CHECK_OK(dp_open(&(dp_config){.backends = backends,
                                  .device_count = trial.devices,
                                  .thread_count = cores,
                                  .local_only = true,
                                  .log = {.fn = hear_of_late}},
                     &ctx));
    return ctx;
}

static bool names_device(dp_ctx *ctx)
{
    dp_late_info late;
    CHECK_OK(dp_late(ctx, &late));
    return late.rank == trial.slow && strcmp(late.where, where[trial.when]) == 0;
}

TEST_SLOW(device_that_is_late_is_named, 60)
{
    for (int i = IN_FORWARD; i <= IN_BACKWARD; i++)
        for (int devices = 2; devices <= 4; devices += 2) {
            char name[64];
            dp_late_info late;
            trial = (struct trial){(lateness)i, i % devices, 1, false, devices};
            dp_ctx *ctx = open_devices(devices);
            for (int k = 0; k < 5 && !names_device(ctx); k++)
                train(ctx, STEPS);
            CHECK_OK(dp_late(ctx, &late));
            snprintf(name, sizeof name, "rank %d (cpu %d of this process) comes last: ", trial.slow,
                     trial.slow);
            CHECK(said_count > 0);
            CHECK_INT(said.level, DP_LOG_WARN);
            CHECK_SAYS(said_text, name);
            CHECK_SAYS(said_text, where[trial.when]);
            CHECK_INT(late.rank, trial.slow);
            CHECK_STR(late.where, where[trial.when]);
            CHECK(late.waits >= 48 && 5 * late.last >= 4 * late.waits);
            CHECK(late.late_s > 0.5e-3 * SLOW_MS && late.late_s < 1);
            CHECK(late.longest_rank >= 0 && late.longest_s >= 0.9 * late.late_s);
            dp_close(ctx);
        }
}

static dp_status meet_often(int local_rank, dp_scope *scope, void *user)
{
    (void)scope;
    for (int i = 0; i < 2 * STEPS; i++) {
        rest(local_rank == trial.slow ? SLOW_MS / 4 : 0);
        DP_TRY(dp_rank_barrier(user));
    }
    return DP_OK;
}

/* Under dp_run devices wait in each collective. */
TEST_SLOW(device_that_is_late_under_dp_run_is_named, 60)
{
    trial = (struct trial){BETWEEN, 2, 1, false, 3};
    dp_ctx *ctx = open_devices(3);
    for (int k = 0; k < 5 && !names_device(ctx); k++)
        CHECK_OK(dp_run(ctx, NULL, meet_often, ctx));
    CHECK(names_device(ctx));
    CHECK_SAYS(said_text, "rank 2 (cpu 2 of this process) comes last: ");
    CHECK_SAYS(said_text, where[BETWEEN]);
    dp_close(ctx);
}

/* Names another device when that comes last, and the first one only once. */
TEST_SLOW(another_device_that_is_late_is_named_too, 60)
{
    trial = (struct trial){IN_FORWARD, 0, 1, false, 2};
    dp_ctx *ctx = open_devices(2);
    for (int k = 0; k < 5 && !names_device(ctx); k++)
        train(ctx, STEPS);
    int before = said_count;
    train(ctx, 2 * STEPS);
    CHECK_INT(said_count, before);
    trial.slow = 1;
    for (int k = 0; k < 5 && !names_device(ctx); k++)
        train(ctx, STEPS);
    CHECK_INT(said_count, before + 1);
    dp_close(ctx);
}

static dp_status slow_copy(dp_call *call)
{
    be_late(IN_FORWARD, call->local_rank);
    call->out = dp_get(call->kwargs, "x");
    return DP_OK;
}

/* Gives so many rows to the devices that are listed, or to all. */
static void train_rows(dp_ctx *ctx, int64_t count, const int *devices)
{
    dp_module *net, *par;
    static float rows[RANKS];
    static const dp_method copies = {"forward", slow_copy};
    dp_parallel_config config = {.local_ranks = devices,
                                 .local_rank_count = devices != NULL ? (size_t)trial.devices : 0};
    CHECK_OK(
        dp_module_create(ctx, &(dp_module_config){.methods = &copies, .method_count = 1}, &net));
    CHECK_OK(dp_data_parallel(net, &config, &par));
    for (step = 0; step < STEPS; step++) {
        dp_value out;
        dp_scope *scope = dp_scope_begin(ctx);
        dp_tensor batch = dp_wrap(rows, DP_F32, 1, (int64_t[]){count});
        dp_value named = DP_DICT(scope, {"x", dp_of(scope, &batch)});
        CHECK_OK(dp_invoke(par, scope, "forward", dp_none(), named, NULL, &out, NULL));
        dp_scope_end(scope);
    }
}

/* One that has more rows is no slow one, nor is one that is there twice; those that take turns on
   fewer cores have no order. */
TEST_SLOW(device_that_has_more_to_do_is_not_late, 60)
{
    dp_late_info late;
    trial = (struct trial){IN_FORWARD, 0, 1, false, 2};
    dp_ctx *ctx = open_devices(2);
    train_rows(ctx, 3, NULL);
    train_rows(ctx, 2, (int[]){0, 0});
    CHECK_OK(dp_late(ctx, &late));
    CHECK_INT(late.rank, -1);
    CHECK_INT(late.longest_rank, -1);
    dp_close(ctx);
    ctx = open_devices(1);
    train(ctx, STEPS);
    CHECK_OK(dp_late(ctx, &late));
    CHECK_INT(late.rank, -1);
    dp_close(ctx);
    CHECK_INT(said_count, 0);
}

/* Where each device computes, they are alike, and each is last at times. */
TEST_SLOW(no_device_is_named_where_all_are_alike, 60)
{
    dp_late_info late;
    trial = (struct trial){BETWEEN, -1, 1, false, 3};
    dp_ctx *ctx = open_devices(3);
    train(ctx, 20 * STEPS);
    CHECK_OK(dp_late(ctx, &late));
    CHECK_INT(late.rank, -1);
    CHECK_INT(said_count, 0);
    dp_close(ctx);
}

/* The others name the process, and that one its device. */
static void device_of_a_process(meeting *m)
{
    char name[64];
    dp_ctx *ctx = open_late(m, 2);
    train(ctx, 2 * STEPS);
    snprintf(name, sizeof name, "rank %d (cpu %d of this process) comes last: ", trial.slow,
             trial.slow % 2);
    CHECK(here == 0 || strstr(said_text, name) != NULL);
    CHECK(here != 0 || strstr(said_text, "ranks 2 to 3 (process 1, pid ") != NULL);
    wait_for_all(m);
    dp_close(ctx);
}

TEST_SLOW(device_of_a_process_that_is_late_is_named, 60)
{
    trial = (struct trial){IN_FORWARD, 3, 1, false, 2};
    in_processes(2, device_of_a_process);
}

/* ---- long waits ------------------------------------------------------------------------------ */

static char waits_text[600];
static int waits_count;

static void hear_of_waits(const dp_log_record *record, void *user)
{
    (void)user;
    if (strstr(record->text, ": waits for ") == NULL)
        return;
    CHECK_INT(record->level, DP_LOG_WARN);
    snprintf(waits_text, sizeof waits_text, "%s", record->text);
    waits_count++;
}

static dp_status rest_for_long(int local_rank, dp_scope *scope, void *user)
{
    (void)local_rank, (void)scope, (void)user;
    rest(1800);
    return DP_OK;
}

static void one_keeps_all_waiting(meeting *m)
{
    dp_ctx *ctx;
    float one = 1;
    char name[64];
    dp_config config = config_of(m, 1);
    config.colls = NULL;
    config.timeout_ms = 4000;
    config.log = (dp_log){.fn = hear_of_waits};
    CHECK_OK(dp_open(&config, &ctx));
    for (int i = 0; i < 2; i++) {
        if (m->process == trial.slow && i == 1)
            CHECK_OK(dp_run(ctx, NULL, rest_for_long, NULL));
        CHECK_OK(dp_all_reduce(ctx, &(dp_part){&one, &one, NULL}, 1, DP_F32, DP_OP_SUM));
    }
    CHECK_INT(waits_count, m->process == (trial.slow == 0));
    if (waits_count > 0) {
        snprintf(name, sizeof name, ": waits for rank %d (process %d, pid ", trial.slow,
                 trial.slow);
        CHECK_SAYS(waits_text, "collective 2, all_reduce of 1 f32 (sum)");
        CHECK_SAYS(waits_text, name);
        CHECK_SAYS(waits_text, "; its last one was 1, all_reduce of 1 f32 (sum)");
        CHECK_SAYS(waits_text, "; it is in a function under dp_run since ");
    }
    wait_for_all(m);
    dp_close(ctx);
}

/* At a quarter of the time-out one process says for whom all wait, once; and then all go on. */
TEST_SLOW(long_wait_is_said_before_the_time_is_up, 60)
{
    static const char *const machines[] = {NULL, "abc", "aab"};
    for (int i = 0; i < 3; i++) {
        meeting_machines = machines[i];
        meeting_by_tcp = machines[i] != NULL;
        for (trial.slow = 0; trial.slow < 3; trial.slow++)
            in_processes(3, one_keeps_all_waiting);
    }
}

/* ---- the timeline ---------------------------------------------------------------------------- */

static void trace_a_wait(meeting *m)
{
    CHECK_INT(setenv("DP_TRACE", "waits.json", 1), 0);
    dp_ctx *ctx = open_late(m, 1);
    float one = 1;
    for (int i = 0; i < 3; i++) {
        rest(m->process == 1 ? SLOW_MS : 0);
        CHECK_OK(dp_all_reduce(ctx, &(dp_part){&one, &one, NULL}, 1, DP_F32, DP_OP_SUM));
    }
    dp_close(ctx);
}

static int count_of(const char *text, const char *what)
{
    int count = 0;
    for (; (text = strstr(text, what)) != NULL; text++)
        count++;
    return count;
}

/* In shared memory it is known for whom; over TCP it is not. */
TEST(the_timeline_shows_waits)
{
    static const char *const names[] = {"\"waits for rank 1\"", "\"waits for others\""};
    enter_folder();
    for (int by_tcp = 0; by_tcp < 2; by_tcp++) {
        size_t count = 0;
        meeting_machines = by_tcp ? "ab" : NULL;
        meeting_by_tcp = by_tcp != 0;
        in_processes(2, trace_a_wait);
        char *text = get_file("waits.json", &count);
        text[count - 1] = '\0'; /* of the last line's end */
        CHECK(strstr(text, names[by_tcp]) != NULL);
        CHECK(strstr(text, names[1 - by_tcp]) == NULL);
        CHECK_INT(count_of(text, "\"ph\":\"B\""), count_of(text, "\"ph\":\"E\""));
    }
}

TEST(one_process_waits_for_nobody)
{
    dp_ctx *ctx;
    dp_late_info late;
    CHECK_OK(dp_open(&(dp_config){.device_count = 2}, &ctx));
    CHECK_OK(dp_late(ctx, &late));
    CHECK_INT(late.rank, -1);
    CHECK_INT(late.longest_rank, -1);
    CHECK(late.waits == 0 && late.last == 0 && late.where == NULL);
    CHECK(late.for_others_s <= 0 && late.by_others_s <= 0);
    CHECK_ERROR(dp_late(ctx, NULL), DP_ERR_INVALID, "dp_late: out is NULL");
    CHECK_ERROR(dp_late(NULL, &late), DP_ERR_INVALID, "ctx");
    dp_close(ctx);
}
