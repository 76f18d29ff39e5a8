/* test_voting.c - who goes on after a failure, where processes die or are stopped at each moment of
   the vote, links fail without a word, and newcomers are not what was hoped: there are never two
   jobs, and those that can agree do so in time. */

#define _GNU_SOURCE /* unshare, MAP_ANONYMOUS */
#include "hosts.h"
#include "refusal.h"

static dp_info info_of(const dp_ctx *ctx)
{
    dp_info info;
    CHECK_OK(dp_info_get(ctx, &info));
    return info;
}

/* Outside the job: all of them. */
static void meet(void)
{
    static int awaited;
    awaited += world;
    atomic_fetch_add(met, 1);
    wait_for(awaited);
}

static dp_ctx *open_voting(int timeout_ms)
{
    dp_ctx *ctx;
    const dp_config config = {.device_count = 1, .recovers = true, .timeout_ms = timeout_ms};
    CHECK_OK(dp_open(&config, &ctx));
    return ctx;
}

/* ---- one job --------------------------------------------------------------------------------- */

static struct {
    atomic_int newest;       /* number of the last roster that has met, */
    atomic_int masks[1024];  /* and of each number the processes in it, as bits */
    atomic_int alone, ended; /* for each test to use */
} * jobs;

/* Sums over the job. The second sum needs everybody after the first one, and so after this process
   has looked which roster is the newest one. */
static dp_status run_job(dp_ctx *ctx)
{
    int roster = info_of(ctx).recoveries, newest = atomic_load(&jobs->newest), before = 0;
    int64_t mask = 0;
    for (int i = 0; i < 2; i++) {
        mask = 1 << me;
        DP_TRY(dp_all_reduce_i64(ctx, &mask, 1, DP_OP_SUM));
    }
    if (roster < newest)
        test_fail(__FILE__, __LINE__, "process %d: roster %d runs, and %d has met", me, roster,
                  newest);
    if (!atomic_compare_exchange_strong(&jobs->masks[roster], &before, (int)mask))
        CHECK_INT(mask, before);
    while (newest < roster && !atomic_compare_exchange_weak(&jobs->newest, &newest, roster))
        continue;
    return DP_OK;
}

/* ---- on one machine -------------------------------------------------------------------------- */

/* Process 0 is stopped for longer than the others wait. Those recover; one of them, the victim,
   ends at some moment of that, and the last one goes on alone. When process 0 wakes up, it does
   not. Process 1 proposes: the victim is now the one that does, and now the one that follows. */
typedef enum how_it_ends { IS_KILLED, IS_STOPPED_AND_KILLED, WAKES_UP, WAYS_TO_END } how_it_ends;

static struct moment {
    int victim;
    how_it_ends how;
    const char *call; /* of the system, before which it ends; NULL: when it has recovered */
    int at;
} moment;

enum { PATIENCE_MS = 2500 }; /* of the others */

static atomic_int *outcomes; /* of each number, how often a process that is alone came to it */

static void end_here(void)
{
    raise(moment.how == IS_KILLED ? SIGKILL : SIGSTOP);
}

static void is_left_behind(dp_ctx *ctx)
{
    CHECK_ERROR(dp_recover(ctx), DP_ERR_TIMEOUT,
                "dp_recover: the others have gone on without this process");
    CHECK(dp_failure(ctx, NULL));
    dp_close(ctx);
}

static void becomes_alone(dp_ctx *ctx)
{
    for (int tries = 0; dp_failure(ctx, NULL) || info_of(ctx).process_count > 1;) {
        if (!dp_failure(ctx, NULL) && run_job(ctx) == DP_OK)
            continue;
        if (dp_recover(ctx) != DP_OK && ++tries == 8)
            test_fail(__FILE__, __LINE__, "%s", dp_last_error());
    }
    CHECK_OK(run_job(ctx));
    atomic_fetch_add(&outcomes[info_of(ctx).recoveries], 1);
    atomic_store(&jobs->alone, 1);
    while (atomic_load(&jobs->ended) == 0)
        rest(1);
    CHECK_OK(run_job(ctx));
    dp_close(ctx);
}

/* If it was stopped, and not killed since, it has been left behind. */
static void ends_at_the_moment(dp_ctx *ctx)
{
    refuse((struct refusal){.call = moment.call, .at = moment.at, .hook = end_here});
    dp_abort(ctx, DP_ERR_USER, "again");
    dp_status status = dp_recover(ctx);
    const bool later = moment.call == NULL || refuses_later();
    refuse((struct refusal){.call = NULL}); /* it ends once */
    if (status == DP_OK && later)
        end_here();
    if (status == DP_OK)
        dp_abort(ctx, DP_ERR_USER, "awake");
    is_left_behind(ctx);
}

static void of_three_one_sleeps(void)
{
    use_name();
    dp_ctx *ctx = open_voting(me == 0 ? TIMEOUT_MS : PATIENCE_MS);
    meet();
    if (me == moment.victim) {
        ends_at_the_moment(ctx);
        return;
    }
    if (me == 0)
        raise(SIGSTOP);
    dp_abort(ctx, DP_ERR_USER, "again");
    if (me == 0)
        is_left_behind(ctx);
    else
        becomes_alone(ctx);
}

static bool was_stopped(pid_t pid)
{
    int how;
    CHECK_INT(waitpid(pid, &how, WUNTRACED), pid);
    return WIFSTOPPED(how);
}

static void one_moment(void)
{
    jobs = memory_of_all(sizeof *jobs);
    start_world(3, of_three_one_sleeps);
    CHECK(was_stopped(pids[0]));
    bool stopped = was_stopped(pids[moment.victim]);
    for (int ms = 0; atomic_load(&jobs->alone) == 0; ms++, rest(1))
        if (ms == 10000 * (int)test_timeout_scale())
            test_fail(__FILE__, __LINE__, "process %d ends before %s %d, and nobody goes on",
                      moment.victim, moment.call, moment.at);
    if (stopped)
        CHECK_INT(kill(pids[moment.victim], moment.how == WAKES_UP ? SIGCONT : SIGKILL), 0);
    CHECK_INT(kill(pids[0], SIGCONT), 0);
    finish(pids[0], 0);
    if (stopped && moment.how == WAKES_UP)
        finish(pids[moment.victim], moment.victim);
    atomic_store(&jobs->ended, 1);
    finish(pids[3 - moment.victim], 3 - moment.victim);
}

TEST_SLOW(whoever_dies_in_a_recovery_who_was_stopped_is_left_behind, 180)
{
    enum { CALLS = 38, AT_ONCE = 80 }; /* of each kind, from the failure to the next job */
    static const char *const calls[] = {"send", "recv", NULL};
    pid_t trials[AT_ONCE];
    int count = 0;
    outcomes = memory_of_all(MOST * sizeof *outcomes);
    for (int i = test_step() - 1; i < 2 * 3 * CALLS; i += test_step()) {
        moment = (struct moment){1 + i % 2, (how_it_ends)(i / 6 % WAYS_TO_END), calls[i / 2 % 3],
                                 1 + i / 6};
        if (count >= AT_ONCE)
            finish(trials[count % AT_ONCE], count - AT_ONCE);
        trials[count % AT_ONCE] = start(count, one_moment);
        count++;
    }
    for (int i = count < AT_ONCE ? 0 : count - AT_ONCE; i < count; i++)
        finish(trials[i % AT_ONCE], i);
    CHECK(test_skips() || atomic_load(&outcomes[1]) > 0); /* it has died before the decision, */
    CHECK(atomic_load(&outcomes[2]) > 0);                 /* and after it */
}

/* ---- newcomers ------------------------------------------------------------------------------- */

enum {
    LIMIT = 5,
    LEFT = 2,        /* the exit status of a newcomer that was left behind */
    LONG_MS = 60000, /* nobody is waited for so long, nor for half of it */
};

static const char *const apart = "abcdefghijklmnop"; /* a machine each */

static void use_machine_of_its_own(void)
{
    without_gpus();
    use_tcp();
    set("DP_MACHINE", (char[]){apart[me], '\0'});
    set("DP_INTERFACE", "lo");
    set_number("DP_PROCESS_LIMIT", LIMIT);
    set_number("DP_SECRET", (int)getppid()); /* trials may have the same port */
}

static int complete; /* so many in the end */

/* Lets others in, and sums; DP_PENDING: all are there, and nobody else is to come. */
static dp_status grow_job(dp_ctx *ctx, bool fresh)
{
    bool came;
    if (!fresh)
        DP_TRY(dp_admit(ctx, &came));
    DP_TRY(run_job(ctx));
    int64_t ended = atomic_load(&jobs->ended);
    DP_TRY(dp_all_reduce_i64(ctx, &ended, 1, DP_OP_MIN));
    return ended != 0 && info_of(ctx).process_count == complete ? DP_PENDING : DP_OK;
}

static void until_complete(dp_ctx *ctx, bool fresh)
{
    for (dp_status status = DP_OK; status != DP_PENDING; rest(1)) {
        status = grow_job(ctx, fresh);
        fresh = status != DP_PENDING && dp_failure(ctx, NULL);
        if (status == DP_PENDING)
            continue;
        if (fresh)
            status = dp_recover(ctx);
        if (comes_back && status != DP_OK)
            _exit(LEFT);
        CHECK_OK(status);
    }
    dp_close(ctx);
}

static int newcomers; /* that come at once */

/* Looks for others when all of them are at the door, or nearly. */
static void member(void)
{
    use_machine_of_its_own();
    dp_ctx *ctx = open_voting(LONG_MS);
    bool came;
    CHECK_OK(dp_admit(ctx, &came)); /* it opens */
    wait_for(newcomers);
    rest(30);
    until_complete(ctx, false);
}

static dp_status join(int shards, dp_ctx **out)
{
    use_machine_of_its_own();
    come_again();
    atomic_fetch_add(met, 1);
    return dp_open(
        &(dp_config){.device_count = 1, .recovers = true, .shards = shards, .timeout_ms = LONG_MS},
        out);
}

/* One that is let in together with another one is told why they have not met, and comes again. */
static void newcomer(void)
{
    dp_ctx *ctx;
    dp_status status = join(0, &ctx);
    for (int tries = 0; status != DP_OK && tries < 10; tries++)
        status = join(0, &ctx);
    CHECK_OK(status);
    until_complete(ctx, true);
}

static void misfit(void)
{
    dp_ctx *ctx;
    CHECK(join(2, &ctx) != DP_OK);
    CHECK_SAYS(dp_last_error(), "shards");
}

/* On a busy machine the others may go on without one, which is started again. */
static void finish_newcomer(pid_t pid, int process)
{
    int how;
    CHECK_INT(waitpid(pid, &how, 0), pid);
    while (WIFEXITED(how) && WEXITSTATUS(how) == LEFT) {
        pid = start(process, newcomer);
        CHECK_INT(waitpid(pid, &how, 0), pid);
    }
    CHECK(WIFEXITED(how) && WEXITSTATUS(how) == EXIT_SUCCESS);
}

/* Two newcomers that are as they should be, and one that is not. */
static void three_newcomers(void (*third)(void), bool dies)
{
    int how;
    double begun = now_ms();
    jobs = memory_of_all(sizeof *jobs);
    port = free_port();
    complete = 4;
    newcomers = 3;
    start_world(2, member);
    pid_t bad = start(2, third), good[2] = {start(3, newcomer), start(4, newcomer)};
    CHECK_INT(waitpid(bad, &how, 0), bad);
    CHECK(dies ? WIFSIGNALED(how) : WIFEXITED(how) && WEXITSTATUS(how) == EXIT_SUCCESS);
    atomic_store(&jobs->ended, 1);
    finish_newcomer(good[0], 3);
    finish_newcomer(good[1], 4);
    CHECK_INT(end_world(), 0);
    CHECK(now_ms() - begun < 0.4 * LONG_MS);
}

static void one_of_three_is_a_misfit(void)
{
    three_newcomers(misfit, false);
}

TEST_SLOW(newcomer_with_another_config_ends_no_job, 60)
{
    enum { TRIALS = 10 };
    pid_t trials[TRIALS];
    for (int i = 0; i < TRIALS; i++)
        trials[i] = start(i, one_of_three_is_a_misfit);
    for (int i = 0; i < TRIALS; i++)
        finish(trials[i], i);
}

/* Before some call of the system while it is let in, or as soon as it is. */
static void dies_at_the_door(void)
{
    dp_ctx *ctx;
    refuse((struct refusal){.call = moment.call, .at = moment.at, .hook = end_here});
    (void)join(0, &ctx);
    end_here();
}

static void one_of_three_dies(void)
{
    three_newcomers(dies_at_the_door, true);
}

TEST_SLOW(newcomer_that_dies_while_it_comes_ends_no_job, 90)
{
    enum { CALLS = 32 }; /* of each kind, from the door to the job */
    pid_t trials[2 * CALLS];
    int count = 0;
    for (int i = test_step() - 1; i < 2 * CALLS; i += test_step()) {
        moment = (struct moment){.call = i % 2 ? "send" : "recv", .at = 1 + i / 2};
        trials[count] = start(i, one_of_three_dies);
        count++;
    }
    for (int i = 0; i < count; i++)
        finish(trials[i], i);
}

/* ---- links that fail without a word ---------------------------------------------------------- */

static const struct cut_case {
    const char *hosts; /* of each process */
    int timeout_ms, most_ms;
    int dies;            /* -1: nobody */
    unsigned goes_on[4]; /* those that do, as bits, or others that may instead */
    const char *cut[13]; /* links, by their hosts */
    const char *slow;    /* one that takes 12 ms, or NULL */
    int heal_ms;         /* so long after they were cut, if they do */
} cut_cases[] = {
    {"abc", 20000, 8000, -1, {0x6}, {"ab", "ac"}, "bc", 0},
    {"aaaaaabbbbbbb", 8000, 6000, -1, {0x1fc0}, {"ab"}, NULL, 0},
    {"abcde", 20000, 8000, 3, {0x16, 0x11}, {"ab", "ac"}, NULL, 0},
    {"abc", 20000, 8000, -1, {0x7, 0x6, 0x5, 0x3}, {"ab", "ac", "bc"}, NULL, 2500},
};

static const struct cut_case *cut_case;

static void cut_links(bool cut)
{
    for (const char *const *link = cut_case->cut; *link != NULL; link++)
        cut_link((*link)[0] - 'a', (*link)[1] - 'a', cut);
}

static void lose_links(void)
{
    use_hosts();
    dp_ctx *ctx = open_voting(cut_case->timeout_ms);
    meet();
    if (me == 0)
        cut_links(true);
    meet();
    if (me == cut_case->dies)
        raise(SIGKILL);
    dp_abort(ctx, DP_ERR_USER, "again");
    double begun = now_ms();
    dp_status status = dp_recover(ctx);
    double took = now_ms() - begun;
    if (status != DP_OK) {
        CHECK_STATUS(status, DP_ERR_TIMEOUT);
        dp_close(ctx);
        return;
    }
    CHECK_OK(run_job(ctx));
    atomic_fetch_or(&jobs->alone, 1 << me);
    if (took > cut_case->most_ms * test_timeout_scale())
        test_fail(__FILE__, __LINE__, "process %d has recovered in %.0f ms", me, took);
    dp_close(ctx);
}

static void with_links_cut(int i)
{
    cut_case = &cut_cases[i];
    jobs = memory_of_all(sizeof *jobs);
    start_on_hosts(cut_case->hosts, lose_links);
    if (cut_case->slow != NULL)
        slow_link(cut_case->slow[0] - 'a', cut_case->slow[1] - 'a', 12);
    if (cut_case->heal_ms > 0) {
        wait_for(2 * world);
        rest(cut_case->heal_ms);
        cut_links(false);
    }
    CHECK_INT(end_world(), cut_case->dies >= 0);
    unsigned mask = (unsigned)atomic_load(&jobs->alone);
    bool expected = false;
    for (int k = 0; k < 4; k++)
        expected = expected || (mask != 0 && mask == cut_case->goes_on[k]);
    CHECK(expected);
    CHECK_INT(atomic_load(&jobs->masks[atomic_load(&jobs->newest)]), mask);
}

TEST_SLOW(two_of_three_recover_over_a_slow_link, 60)
{
    with_links_cut(0);
}

/* Who can reach nobody waits for a while before it gives up. The last one to be reached again may
   be left behind. */
TEST_SLOW(links_that_heal_in_time_let_a_job_go_on, 60)
{
    with_links_cut(3);
}

TEST_SLOW(machine_with_many_is_cut_off_and_the_others_recover_in_time, 60)
{
    with_links_cut(1);
}

TEST_SLOW(those_that_reach_each_other_recover_whoever_they_are, 60)
{
    with_links_cut(2);
}

/* Of three, 0 and 2 lose each other; then 0 and 1, at some frame; then 1 and 2, at another one,
   when 0 and 2 find each other again; in the end all do. Each may have agreed on something with one
   of the others that the third one has not heard of. */
static atomic_bool *armed; /* the first link is cut */
static int frames_left[2]; /* until the second link is, and then the third one */
static int fatal_vote;     /* of dp/members.h, with which the second one is; -1: see above */

enum { DECIDED = 5, NEVER = 1 << 30 };

static bool has_data(const unsigned char *ip, size_t bytes)
{
    size_t head = 4 * (size_t)(ip[0] & 15);
    return bytes > head + 20 && bytes > head + 4 * (size_t)(ip[head + 12] >> 4);
}

static bool has_vote(const unsigned char *data, size_t bytes, int kind)
{
    const unsigned char *at = memmem(data, bytes, "dvp1", 4);
    return at != NULL && at + 8 < data + bytes && at[8] == kind;
}

static bool is_fatal(int link, const unsigned char *data, size_t bytes)
{
    if (link == 1 && frames_left[0] > 0)
        return false;
    if (link == 0 && fatal_vote >= 0 && frames_left[0] > 0)
        frames_left[0] = has_vote(data, bytes, fatal_vote) ? 1 : 2;
    return frames_left[link] > 0 && has_data(data, bytes) && --frames_left[link] == 0;
}

/* The frame itself is lost, too. */
static void cut_at_frame(int from, int to, const unsigned char *data, size_t bytes)
{
    int link = from + to == 1 ? 0 : from + to == 3 ? 1 : -1;
    if (link < 0 || !atomic_load(armed) || !is_fatal(link, data, bytes))
        return;
    cut_link(from, to, true);
    if (link == 1)
        cut_link(0, 2, false);
}

/* Whatever becomes of it: run_job sees whether there are two. */
static void lose_one_another(void)
{
    use_hosts();
    dp_ctx *ctx = open_voting(2000);
    double until = now_ms() + 9000;
    bool gone = false;
    meet();
    if (me == 0) {
        cut_link(0, 2, true);
        atomic_store(armed, true);
    }
    meet();
    dp_abort(ctx, DP_ERR_USER, "again");
    for (bool healed = false; !gone && now_ms() < until; rest(1)) {
        if (!dp_failure(ctx, NULL))
            (void)run_job(ctx);
        else if (dp_recover(ctx) != DP_OK)
            gone = strstr(dp_last_error(), "have gone on without") != NULL;
        if (!healed && now_ms() > until - 3000)
            for (int link = 0; link < 3; link++)
                cut_link(link, (link + 1) % 3, false);
    }
    _exit(EXIT_SUCCESS);
}

static void three_cuts(void)
{
    armed = memory_of_all(sizeof *armed);
    on_frame = cut_at_frame;
    start_on_hosts("abc", lose_one_another);
    CHECK_INT(end_world(), 0);
    if (atomic_load(&jobs->newest) > 0)
        atomic_fetch_add(outcomes, 1);
}

TEST_SLOW(links_that_fail_in_turn_make_no_second_job, 120)
{
    enum { TRIALS = 18 };
    const char *text = getenv("TEST_ROUNDS");
    uint64_t seed = test_seed();
    pid_t trials[TRIALS];
    outcomes = memory_of_all(MOST * sizeof *outcomes);
    for (int rounds = text != NULL ? atoi(text) : 1; rounds > 0; rounds--) {
        for (int i = 0; i < TRIALS; i++) {
            jobs = memory_of_all(sizeof *jobs);
            fatal_vote = i < 2 * (DECIDED + 1) ? i / 2 : -1;
            frames_left[0] = 1 + (int)(test_random(&seed) % 16);
            frames_left[1] = i % 2 == 0 ? NEVER : 1 + (int)(test_random(&seed) % 40);
            trials[i] = start(i, three_cuts);
        }
        for (int i = 0; i < TRIALS; i++)
            finish(trials[i], i);
    }
    CHECK(atomic_load(outcomes) > 0); /* most have recovered in the end */
}
