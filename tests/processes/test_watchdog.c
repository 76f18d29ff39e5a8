/* test_watchdog.c - processes that hang, on one machine and on two: what they are in is in the
   errors of the others, and with grace they end once the job has failed. */

#define _GNU_SOURCE /* MAP_ANONYMOUS, setns */

#include <fcntl.h>
#include <sys/syscall.h>
#include "dp_data.h"
#include "folder.h"
#include "hosts.h"

enum { WAIT_MS = 2000, SHORT_GRACE_MS = 600, LONG_MS = 1000000, ENDED = 124 };

typedef struct hang_case {
    const char *name;
    dp_status (*hang)(dp_ctx *ctx); /* returns after hang_ms, if at all */
    int devices;
    const char *in, *of_others; /* what the last words say of it; what others say; NULL: nothing */
} hang_case;

static const hang_case *want;
static const char *where;         /* a letter for each process: its machine */
static int hang_ms, grace_ms;     /* how long it takes, and has */
static bool recovering, on_hosts; /* each letter is a host with a network of its own */
static int wait_ms = WAIT_MS;

static struct {
    char error[MOST][800], logged[MOST][800], warned[MOST][800], carried[MOST][200];
    dp_status status[MOST];
    int left[MOST]; /* after a recovery */
    atomic_bool go_on;
    atomic_int thread;
} * seen_of;

static void hear_all(const dp_log_record *record, void *user)
{
    (void)user;
    if (record->level == DP_LOG_ERROR)
        snprintf(seen_of->logged[me], sizeof seen_of->logged[me], "%s", record->text);
    if (strstr(record->text, "the courier is waited for: ") != NULL)
        snprintf(seen_of->carried[me], sizeof seen_of->carried[me], "%s", record->text);
    if (strstr(record->text, ": waits for ") != NULL)
        snprintf(seen_of->warned[me], sizeof seen_of->warned[me], "%s", record->text);
}

static dp_ctx *open_watched(int devices)
{
    dp_ctx *ctx;
    const dp_config config = {.device_count = devices,
                              .timeout_ms = wait_ms,
                              .grace_ms = grace_ms,
                              .recovers = recovering,
                              .log = {.fn = hear_all}};
    without_gpus();
    if (on_hosts) {
        use_hosts();
    } else if (strchr(where, 'b') != NULL) {
        use_tcp();
        set("DP_MACHINE", (char[]){where[me], '\0'});
        set("DP_INTERFACE", "lo");
    } else {
        use_name();
    }
    CHECK_OK(dp_open(&config, &ctx));
    return ctx;
}

static dp_status add_one(dp_ctx *ctx)
{
    float one[2] = {1, 1};
    dp_part parts[2] = {{&one[0], &one[0], NULL}, {&one[1], &one[1], NULL}};
    return dp_all_reduce(ctx, parts, 1, DP_F32, DP_OP_SUM);
}

/* ---- ways to hang ---------------------------------------------------------------------------- */

static dp_status hang_between(dp_ctx *ctx)
{
    rest(hang_ms);
    return add_one(ctx);
}

static dp_status hang_forward(dp_call *call)
{
    dp_doing(call->ctx, "nothing"); /* it is in a function already */
    rest(hang_ms);
    call->out = dp_none();
    return DP_OK;
}

static dp_status hang_in_method(dp_ctx *ctx)
{
    static const dp_method methods[] = {{"forward", hang_forward}};
    const dp_module_config config = {.name = "net", .methods = methods, .method_count = 1};
    dp_scope *scope = dp_scope_begin(ctx);
    dp_module *net;
    dp_value out;
    CHECK_OK(dp_module_create(ctx, &config, &net));
    dp_status status = dp_invoke(net, scope, "forward", dp_none(), dp_none(), NULL, &out, NULL);
    dp_scope_end(scope);
    return status == DP_OK ? add_one(ctx) : status;
}

/* It gets the error inside of the function, and stays there. */
static dp_status hang_with_the_error(int local_rank, dp_scope *scope, void *user)
{
    float one = 1;
    (void)local_rank, (void)scope;
    rest(WAIT_MS + 2500);
    dp_status status = dp_rank_all_reduce(user, &one, &one, 1, DP_F32, DP_OP_SUM);
    CHECK_INT(dp_status_class(status), DP_CLASS_JOB);
    rest(hang_ms);
    return status;
}

static dp_status hang_in_run(dp_ctx *ctx)
{
    return dp_run(ctx, NULL, hang_with_the_error, ctx);
}

static dp_status hang_on_last(int local_rank, dp_scope *scope, void *user)
{
    const dp_info *info = user;
    (void)scope;
    if (local_rank == info->local_count - 1)
        rest(hang_ms);
    return DP_OK;
}

static dp_status hang_on_device(dp_ctx *ctx)
{
    dp_info info;
    CHECK_OK(dp_info_get(ctx, &info));
    dp_status status = dp_run(ctx, NULL, hang_on_last, &info);
    return status == DP_OK ? add_one(ctx) : status;
}

static void hang_deferred(void *user)
{
    (void)user;
    rest(hang_ms);
}

static dp_status hang_at_end_of_scope(dp_ctx *ctx)
{
    dp_scope *scope = dp_scope_begin(ctx);
    CHECK_OK(dp_scope_defer(scope, hang_deferred, NULL));
    dp_scope_end(scope);
    return add_one(ctx);
}

static dp_status hang_hook(const dp_bucket *bucket, void *user)
{
    (void)bucket, (void)user;
    if (me == 1)
        rest(hang_ms);
    return DP_OK;
}

/* The program says itself where it is; what it said before is over. */
static dp_status hang_in_words(dp_ctx *ctx)
{
    dp_doing(ctx, "a walk to the forest");
    dp_doing(ctx, NULL);
    dp_doing(ctx, "a walk to the sea");
    rest(hang_ms);
    dp_doing(ctx, NULL);
    return add_one(ctx);
}

static dp_status read_slowly(dp_sample *sample, void *user)
{
    (void)user;
    if (sample->index == 1)
        rest(hang_ms);
    sample->value = dp_int(sample->index);
    return DP_OK;
}

static dp_status hang_in_loader(dp_ctx *ctx)
{
    const dp_loader_config config = {
        .sampler = {.count = 2, .world = 1}, .batch = 2, .worker_count = 1, .read = read_slowly};
    dp_loader *loader;
    dp_batch batch;
    dp_scope *scope = dp_scope_begin(ctx);
    CHECK_OK(dp_loader_create(ctx, &config, &loader));
    CHECK_OK(dp_loader_next(loader, scope, &batch));
    dp_scope_end(scope);
    return add_one(ctx);
}

/* All of them reduce; the others wait for what the hook of process 1 is to send. */
static dp_status reduce_by_hook(dp_ctx *ctx)
{
    float grads[4] = {1, 2, 3, 4};
    void *local[] = {grads};
    const dp_block block = {.local = local, .count = 4, .dtype = DP_F32};
    const dp_reducer_config config = {.name = "net",
                                      .blocks = &block,
                                      .block_count = 1,
                                      .reduction = DP_SUM_RANKS,
                                      .buckets = {.hook = hang_hook}};
    dp_scope *scope = dp_scope_begin(ctx);
    dp_reducer *reducer;
    CHECK_OK(dp_reducer_create(ctx, &config, &reducer));
    CHECK_OK(dp_reducer_begin(reducer, NULL));
    CHECK_OK(dp_reducer_ready(reducer, 0, 0, NULL));
    rest(100); /* so that the courier carries it */
    dp_status status = dp_reducer_finish(reducer);
    if (status == DP_OK)
        status = add_one(ctx);
    dp_scope_end(scope);
    return status;
}

static const hang_case hang_cases[] = {
    {"between", hang_between, 1, "none of its devices is in a function of yours", NULL},
    {"method", hang_in_method, 1, "it is in net.forward since ", "; it is in net.forward since "},
    {"device", hang_on_device, 2, "device 1 is in a function under dp_run since ",
     "; it is in a function under dp_run since "},
    {"deferred", hang_at_end_of_scope, 1, "it is in a deferred function since ",
     "; it is in a deferred function since "},
    {"words", hang_in_words, 1, "it is in a walk to the sea since ",
     "; it is in a walk to the sea since "},
    {"loader", hang_in_loader, 1, "it is in dp_loader_next since ",
     "; it is in dp_loader_next since "},
    {"hook", reduce_by_hook, 1, "it is in the hook of net since ",
     "; it is in the hook of net since "},
};

enum { CASES = sizeof hang_cases / sizeof hang_cases[0] };

/* ---- jobs in which process 1 hangs ----------------------------------------------------------- */

static void keep(dp_status status)
{
    seen_of->status[me] = status;
    snprintf(seen_of->error[me], sizeof seen_of->error[me], "%s", dp_last_error());
}

static void one_hangs(void)
{
    dp_ctx *ctx = open_watched(want->devices);
    CHECK_OK(add_one(ctx));
    bool hangs = me == 1 || want->hang == reduce_by_hook;
    dp_status status = hangs ? want->hang(ctx) : add_one(ctx);
    keep(status);
    if (recovering && me != 1) {
        dp_info info;
        CHECK_OK(dp_recover(ctx));
        CHECK_OK(dp_info_get(ctx, &info));
        seen_of->left[me] = info.process_count;
        CHECK_OK(add_one(ctx));
        if (me == 2)
            rest(hang_ms);
        keep(add_one(ctx));
    }
    dp_close(ctx);
}

static void start_hanging(const hang_case *one, const char *machines)
{
    want = one;
    where = machines;
    seen_of = memory_of_all(sizeof *seen_of);
    port = free_port();
    if (on_hosts)
        start_on_hosts(machines, one_hangs);
    else
        start_world((int)strlen(machines), one_hangs);
}

/* Waits for a process, and returns how it has ended. */
static int wait_status(int process)
{
    int status = 0;
    CHECK_INT(waitpid(pids[process], &status, 0), pids[process]);
    return status;
}

static void check_ended(int process)
{
    int status = wait_status(process);
    CHECK(WIFEXITED(status));
    CHECK_INT(WEXITSTATUS(status), ENDED);
}

/* All others have said of process 1 what they can know. */
static void check_others(void)
{
    char late[80];
    bool carries = want->hang == reduce_by_hook; /* the first collective of the courier */
    snprintf(late, sizeof late, ") did not come within %d ms; %s", wait_ms,
             carries ? "it has begun none" : "its last one was 1, ");
    for (int p = 0; p < world; p++) {
        if (p == 1)
            continue;
        CHECK_INT(wait_status(p), 0);
        CHECK_INT(seen_of->status[p], DP_ERR_TIMEOUT);
        if (want->of_others != NULL) {
            CHECK_SAYS(seen_of->error[p], "(process 1, pid ");
            CHECK_SAYS(seen_of->error[p], late);
            CHECK_SAYS(seen_of->error[p], want->of_others);
            CHECK_SAYS(seen_of->error[p], " s (thread ");
        }
    }
    if (want->of_others != NULL) {
        CHECK_SAYS(seen_of->warned[0], want->devices > 1
                                           ? ": waits for ranks 2 to 3 (process 1, pid "
                                           : ": waits for rank 1 (process 1, pid ");
        CHECK_SAYS(seen_of->warned[0], want->of_others);
    }
    if (carries)
        CHECK_SAYS(seen_of->carried[1], "it is in the hook of net since ");
}

static void check_last_words(void)
{
    char begin[80];
    snprintf(begin, sizeof begin, "rank %d (process 1, pid %d) ends, as it has not come back",
             want->devices, (int)pids[1]);
    if (want->devices > 1)
        snprintf(begin, sizeof begin, "ranks 2 to 3 (process 1, pid %d) ends", (int)pids[1]);
    CHECK_INT(strncmp(seen_of->logged[1], begin, strlen(begin)), 0);
    CHECK_SAYS(seen_of->logged[1], want->in);
    CHECK_SAYS(seen_of->logged[1], " within 600 ms: ");
    CHECK_SAYS(seen_of->logged[1], ". The job failed: collective ");
}

static void all_hang(const char *machines)
{
    hang_ms = LONG_MS;
    grace_ms = SHORT_GRACE_MS;
    for (int i = 0; i < CASES; i++) {
        start_hanging(&hang_cases[i], machines);
        check_ended(1);
        check_others();
        check_last_words();
    }
}

TEST_SLOW(process_that_hangs_ends, 120)
{
    all_hang("aa");
}

TEST_SLOW(process_of_another_machine_that_hangs_ends, 120)
{
    all_hang("ab");
}

static void one_hangs_on_another_host(const hang_case *one)
{
    hang_ms = LONG_MS;
    grace_ms = SHORT_GRACE_MS;
    on_hosts = true;
    start_hanging(one, "ab");
    check_ended(1);
    check_others();
    check_last_words();
}

TEST_SLOW(process_of_another_host_that_hangs_in_a_method_ends, 60)
{
    one_hangs_on_another_host(&hang_cases[1]);
}

TEST_SLOW(process_of_another_host_that_hangs_on_a_device_ends, 60)
{
    one_hangs_on_another_host(&hang_cases[2]);
}

TEST_SLOW(process_of_another_host_that_hangs_in_a_hook_ends, 60)
{
    one_hangs_on_another_host(&hang_cases[CASES - 1]);
}

/* Process 1 is between the two others in the tree of none, and process 3 stands behind it. */
TEST_SLOW(process_that_hangs_among_several_machines_ends, 60)
{
    hang_ms = LONG_MS;
    grace_ms = SHORT_GRACE_MS;
    start_hanging(&hang_cases[1], "abcd");
    check_ended(1);
    check_others();
    check_last_words();
}

/* It comes back before its time is up, and gets the error of all. */
static void one_is_slow(const char *machines)
{
    hang_ms = WAIT_MS + 1500;
    grace_ms = 5000;
    for (int i = 0; i < CASES - 1; i++) { /* what a hook returns to has failed, too */
        start_hanging(&hang_cases[i], machines);
        CHECK_INT(wait_status(1), 0);
        CHECK_INT(dp_status_class(seen_of->status[1]), DP_CLASS_JOB);
        CHECK_SAYS(seen_of->error[1], "(process 1, pid ");
        CHECK(strstr(seen_of->logged[1], " ends, as it has not come back") == NULL);
        check_others();
    }
}

TEST_SLOW(process_that_is_slow_gets_the_error, 120)
{
    one_is_slow("aa");
}

TEST_SLOW(process_of_another_machine_that_is_slow_gets_the_error, 120)
{
    one_is_slow("ab");
}

/* Without grace nobody ends it. What it is in is told all the same. */
static void nobody_ends_it(const char *machines)
{
    hang_ms = LONG_MS;
    grace_ms = 0;
    start_hanging(&hang_cases[1], machines);
    check_others();
    rest(1000);
    CHECK_INT(waitpid(pids[1], NULL, WNOHANG), 0);
    CHECK_INT(kill(pids[1], SIGKILL), 0);
    CHECK(WIFSIGNALED(wait_status(1)));
}

TEST_SLOW(process_that_hangs_stays_without_grace, 20)
{
    nobody_ends_it("aa");
}

TEST_SLOW(process_of_another_machine_that_hangs_stays_without_grace, 20)
{
    nobody_ends_it("ab");
}

/* The others go on without it, and it ends; and so does process 2, which hangs later. */
static void others_go_on(const char *machines)
{
    hang_ms = LONG_MS;
    grace_ms = SHORT_GRACE_MS;
    recovering = true;
    start_hanging(&hang_cases[1], machines);
    check_ended(1);
    check_ended(2);
    CHECK_INT(wait_status(0), 0);
    check_last_words();
    CHECK_INT(seen_of->left[0], world - 1);
    CHECK_SAYS(seen_of->error[0], "rank 1 (process 1, pid ");
    CHECK_SAYS(seen_of->logged[2], "rank 1 (process 1, pid ");
    CHECK_SAYS(seen_of->logged[2], " ends, as it has not come back within 600 ms: none of its ");
    recovering = false;
}

TEST_SLOW(others_recover_from_one_that_hangs_and_it_ends, 60)
{
    others_go_on("aaa");
}

TEST_SLOW(others_recover_from_one_of_another_machine_and_it_ends, 60)
{
    others_go_on("abc");
}

/* A program that has the error may do what it likes, for as long as it likes. */
static void take_the_error_and_rest(void)
{
    dp_ctx *ctx = open_watched(1);
    dp_status status = me == 1 ? DP_OK : add_one(ctx);
    if (me == 1) {
        rest(WAIT_MS + 2500); /* a second of which others ask who is missing */
        status = add_one(ctx);
    }
    CHECK_INT(dp_status_class(status), DP_CLASS_JOB);
    rest(grace_ms + 1000);
    dp_close(ctx);
}

TEST_SLOW(process_that_has_the_error_is_left_alone, 60)
{
    grace_ms = 4000;
    for (int i = 0; i < 2; i++) {
        where = i == 0 ? "aa" : "ab";
        seen_of = memory_of_all(sizeof *seen_of);
        run_world(2, take_the_error_and_rest);
    }
}

/* A function that has got the error is not the program. */
TEST_SLOW(process_that_hangs_with_the_error_ends, 60)
{
    static const hang_case one = {"inside", hang_in_run, 1,
                                  "it is in a function under dp_run since ",
                                  "; it is in a function under dp_run since "};
    hang_ms = LONG_MS;
    grace_ms = 5000;
    for (int i = 0; i < 2; i++) {
        start_hanging(&one, i == 0 ? "aa" : "ab");
        check_ended(1);
        check_others();
        CHECK_SAYS(seen_of->logged[1], one.in);
    }
}

static dp_status hang_until_told(dp_ctx *ctx)
{
    while (!atomic_load(&seen_of->go_on))
        rest(10);
    return add_one(ctx);
}

/* Time for which it was stopped does not count. */
TEST_SLOW(process_that_was_stopped_has_its_grace, 60)
{
    static const hang_case one = {"stopped", hang_until_told, 1, NULL, NULL};
    grace_ms = 3000;
    start_hanging(&one, "aa");
    CHECK_INT(wait_status(0), 0);
    rest(300);
    CHECK_INT(kill(pids[1], SIGSTOP), 0);
    rest(2 * grace_ms);
    CHECK_INT(kill(pids[1], SIGCONT), 0);
    rest(500);
    atomic_store(&seen_of->go_on, true);
    CHECK_INT(wait_status(1), 0);
    CHECK_INT(seen_of->status[1], DP_ERR_TIMEOUT);
}

static dp_status rest_a_moment(int local_rank, dp_scope *scope, void *user)
{
    (void)local_rank, (void)scope, (void)user;
    rest(500);
    return DP_OK;
}

static dp_status hang_in_the_next(dp_ctx *ctx)
{
    CHECK_OK(dp_run(ctx, NULL, rest_a_moment, NULL));
    return hang_in_method(ctx);
}

/* The warning says what the process is in by then, not what it was in when it was asked first. */
TEST_SLOW(warning_is_about_what_a_process_is_in, 60)
{
    static const hang_case one = {"next", hang_in_the_next, 1, NULL,
                                  "; it is in net.forward since "};
    wait_ms = 2 * WAIT_MS; /* it is asked after 200 ms, and 200 ms before the warning */
    hang_ms = wait_ms + 1500;
    grace_ms = 0;
    start_hanging(&one, "ab");
    check_others();
    CHECK_INT(wait_status(1), 0);
    wait_ms = WAIT_MS;
}

static dp_status rest_then_sum(int local_rank, dp_scope *scope, void *user)
{
    float one = 1;
    (void)scope;
    if (local_rank == 1 && me == 1) {
        atomic_store(&seen_of->thread, (int)syscall(SYS_gettid));
        rest(WAIT_MS * 3 / 4);
    }
    return dp_rank_all_reduce(user, &one, &one, 1, DP_F32, DP_OP_SUM);
}

/* The first device waits for the second one, and process 0 for both. */
static void wait_for_the_second(void)
{
    dp_ctx *ctx = open_watched(2);
    char thread[40];
    CHECK_OK(dp_run(ctx, NULL, rest_then_sum, ctx));
    snprintf(thread, sizeof thread, "it is in a function under dp_run since ");
    if (me == 0) {
        CHECK_SAYS(seen_of->warned[0], thread);
        snprintf(thread, sizeof thread, " s (thread %d)", atomic_load(&seen_of->thread));
        CHECK_SAYS(seen_of->warned[0], thread);
    }
    dp_close(ctx);
}

TEST_SLOW(device_that_another_one_waits_for_is_shown_to_others, 20)
{
    for (int apart = 0; apart < 2; apart++) {
        grace_ms = 0;
        where = apart ? "ab" : "aa";
        seen_of = memory_of_all(sizeof *seen_of);
        port = free_port();
        run_world(2, wait_for_the_second);
    }
}

static dp_status rest_before_each_sum(int local_rank, dp_scope *scope, void *user)
{
    float one = 1;
    (void)scope;
    if (local_rank == 1 && me == 1)
        rest(WAIT_MS / 5);
    DP_TRY(dp_rank_all_reduce(user, &one, &one, 1, DP_F32, DP_OP_SUM));
    if (local_rank == 0 && me == 1) {
        atomic_store(&seen_of->thread, (int)syscall(SYS_gettid));
        rest(WAIT_MS * 3 / 4);
    }
    return dp_rank_all_reduce(user, &one, &one, 1, DP_F32, DP_OP_SUM);
}

static void wait_for_each_in_turn(void)
{
    dp_ctx *ctx = open_watched(2);
    char thread[40];
    CHECK_OK(dp_run(ctx, NULL, rest_before_each_sum, ctx));
    snprintf(thread, sizeof thread, " s (thread %d)", atomic_load(&seen_of->thread));
    if (me == 0)
        CHECK_SAYS(seen_of->warned[0], thread);
    dp_close(ctx);
}

TEST_SLOW(device_that_waited_for_another_one_is_shown_again, 20)
{
    grace_ms = 0;
    where = "aa";
    seen_of = memory_of_all(sizeof *seen_of);
    run_world(2, wait_for_each_in_turn);
}

/* A device is shown no longer once the caller has ceased to wait for it. */
static dp_status rest_in_turn(int local_rank, dp_scope *scope, void *user)
{
    (void)scope, (void)user;
    rest(local_rank == 1 ? 500 : 0);
    return DP_OK;
}

static void rest_after_a_wait(void)
{
    dp_ctx *ctx = open_watched(2);
    if (me == 1) {
        CHECK_OK(dp_run(ctx, NULL, rest_in_turn, NULL));
        rest(WAIT_MS);
        CHECK_OK(dp_run(ctx, NULL, rest_then_sum, ctx));
    } else {
        CHECK_OK(dp_run(ctx, NULL, rest_then_sum, ctx));
        CHECK_SAYS(seen_of->warned[0], ": waits for ranks 2 to 3 (process 1, pid ");
        CHECK(strstr(seen_of->warned[0], "it is in") == NULL);
    }
    dp_close(ctx);
}

TEST_SLOW(device_that_was_waited_for_is_shown_no_longer, 20)
{
    for (int apart = 0; apart < 2; apart++) {
        grace_ms = 0;
        wait_ms = 3 * WAIT_MS; /* a quarter is when the first device waits no longer */
        where = apart ? "ab" : "aa";
        seen_of = memory_of_all(sizeof *seen_of);
        port = free_port();
        run_world(2, rest_after_a_wait);
        wait_ms = WAIT_MS;
    }
}

/* Process 0 waits for process 1, which waits for process 2, which hangs. */
static void wait_in_a_row(void)
{
    dp_ctx *ctx = open_watched(1);
    float one = 1;
    const dp_tensor tensor = dp_wrap(&one, DP_F32, 0, NULL);
    CHECK_OK(add_one(ctx));
    if (me == 0) {
        CHECK_INT(add_one(ctx), DP_ERR_TIMEOUT);
        CHECK_SAYS(dp_last_error(), ": rank 2 (process 2, pid ");
        CHECK_SAYS(dp_last_error(), ") did not come within 2000 ms; its last one was 1, ");
    } else if (me == 1) {
        rest(WAIT_MS / 2); /* it would give up before */
        CHECK_INT(dp_recv(ctx, &tensor, 2, 7), DP_ERR_TIMEOUT);
        CHECK_SAYS(dp_last_error(), "rank 2 (process 2, pid ");
    } else {
        rest(3 * WAIT_MS);
    }
    dp_close(ctx);
}

/* A watchdog does not answer: the process that it speaks for does not wait. */
TEST_SLOW(process_that_hangs_is_told_from_one_that_waits, 60)
{
    grace_ms = 0;
    where = "abc";
    seen_of = memory_of_all(sizeof *seen_of);
    run_world(3, wait_in_a_row);
}

#if defined(__GLIBC__)
/* Returns what process 1 has written to stderr. */
static const char *hang_with_stderr(const hang_case *one, const char *machines, int grace)
{
    static char empty[] = "";
    size_t bytes = 0;
    int before = dup(2), file = open("stderr.txt", O_CREAT | O_TRUNC | O_WRONLY, 0600);
    CHECK(before >= 0 && file >= 0 && dup2(file, 2) == 2);
    grace_ms = grace;
    start_hanging(one, machines);
    CHECK(dup2(before, 2) == 2);
    close(before);
    close(file);
    CHECK_INT(wait_status(0), 0);
    rest(SHORT_GRACE_MS);
    if (grace > 0)
        check_ended(1);
    else
        CHECK_INT(kill(pids[1], SIGKILL), 0);
    char *text = get_file("stderr.txt", &bytes);
    if (bytes == 0)
        return empty;
    text[bytes - 1] = '\0';
    return text;
}

/* A number of another machine's process may be that of a process here: none is signalled. One that
   ends asks itself. */
TEST_SLOW(stack_is_printed_by_the_process_itself, 60)
{
    enter_folder();
    hang_ms = LONG_MS;
    set("DP_STUCK", "stack");
    CHECK_STR(hang_with_stderr(&hang_cases[1], "ab", 0), "");
    CHECK_SAYS(hang_with_stderr(&hang_cases[1], "ab", SHORT_GRACE_MS),
               "a thread that is waited for is here:");
    unsetenv("DP_STUCK");
}

/* Who waits for a process of the same machine asks it, long before the time is up. */
TEST_SLOW(stack_is_printed_of_a_process_of_this_machine, 60)
{
    enter_folder();
    hang_ms = LONG_MS;
    CHECK_STR(hang_with_stderr(&hang_cases[1], "aa", 0), "");
    set("DP_STUCK", "stack");
    CHECK_SAYS(hang_with_stderr(&hang_cases[1], "aa", 0), "a thread that is waited for is here:");
    unsetenv("DP_STUCK");
}

/* A thread of a loader that does not come back from `read`, and the courier from a hook. */
TEST_SLOW(stack_is_printed_of_threads_that_the_caller_waits_for, 60)
{
    enter_folder();
    hang_ms = LONG_MS;
    set("DP_STUCK", "stack");
    for (int i = CASES - 2; i < CASES; i++)
        CHECK_SAYS(hang_with_stderr(&hang_cases[i], "ab", 0),
                   "a thread that is waited for is here:");
    unsetenv("DP_STUCK");
}
#endif

/* $DP_GRACE, in seconds, if the config says nothing. */
static void read_grace(void)
{
    dp_ctx *ctx;
    dp_config config = {.device_count = 1, .local_only = true}, resolved;
    set("DP_GRACE", "3");
    CHECK_OK(dp_open(&config, &ctx));
    CHECK_OK(dp_config_get(ctx, &resolved));
    CHECK_INT(resolved.grace_ms, 3000);
    dp_close(ctx);
    config.grace_ms = 70;
    CHECK_OK(dp_open(&config, &ctx));
    CHECK_OK(dp_config_get(ctx, &resolved));
    CHECK_INT(resolved.grace_ms, 70);
    dp_close(ctx);
    config.grace_ms = -1;
    CHECK_ERROR(dp_open(&config, &ctx), DP_ERR_INVALID, "dp_open: grace_ms is negative");
    config.grace_ms = 0;
    set("DP_GRACE", "soon");
    CHECK_ERROR(dp_open(&config, &ctx), DP_ERR_INVALID,
                "dp_open: DP_GRACE is 'soon', not a whole number from 0 to ");
    unsetenv("DP_GRACE");
    CHECK_OK(dp_open(&config, &ctx));
    CHECK_OK(dp_config_get(ctx, &resolved));
    CHECK_INT(resolved.grace_ms, 0);
    dp_close(ctx);
}

TEST(grace_is_set_by_the_environment)
{
    run_world(1, read_grace);
}
