/* test_outside.c - what is seen of a job from outside, without its help: one that hangs, that is
   stopped, that has failed, that has ended; two at once; memory of other versions, and damaged; and
   of processes on other machines, which answer. */

#define _GNU_SOURCE /* memfd_create, and what examples/status.c asks for */

#include <sys/mman.h>
#include <sys/prctl.h>
#include "folder.h"
#include "process.h"
#include "ranked.h"
#include "world.h"
#define STATUS_WITHOUT_MAIN
#include "examples/status.c"

enum { WORLD = 3, SLOW = 1, CALLS = 5, SEEN_MS = 20000 };

/* ---- jobs to be looked at -------------------------------------------------------------------- */

typedef struct trial {
    pid_t pids[MOST];
    int count;
} trial;

static int gate[2] = {-1, -1}; /* who reads from it goes on once it is closed */

static void make_gate(void)
{
    CHECK_INT(pipe(gate), 0);
}

static void open_gate(void)
{
    close(gate[1]);
}

static void wait_at_gate(void)
{
    char none;
    CHECK_INT(read(gate[0], &none, 1), 0);
}

static dp_ctx *join_job(void)
{
    dp_ctx *ctx;
    close(gate[1]);
    CHECK_OK(dp_open(&(dp_config){.device_count = 1, .timeout_ms = 30000}, &ctx));
    return ctx;
}

static trial begin(int count, void (*body)(void))
{
    trial job = {.count = count};
    test_needs_processes(count);
    nobody_launched_us();
    world = count;
    port = free_port();
    for (int p = 0; p < count; p++)
        job.pids[p] = start(p, body);
    return job;
}

static void end(const trial *job)
{
    for (int p = 0; p < job->count; p++)
        finish(job->pids[p], p);
}

/* Returns the job of a process, as it is now; NULL: nothing is seen of it. */
static const seen_job *seen_of(pid_t pid)
{
    CHECK(look());
    for (size_t i = 0; i < view.job_count; i++)
        for (int p = 0; p < view.jobs[i].count; p++)
            if (view.jobs[i].all[p].known && view.jobs[i].all[p].pid == pid)
                return &view.jobs[i];
    return NULL;
}

/* Returns the job of a process, once its first sentence holds a text. */
static const seen_job *seen_saying(pid_t pid, const char *part)
{
    static char text[SEEN_TEXT];
    const seen_job *job = NULL;
    for (double until = now_ms() + SEEN_MS * test_timeout_scale(); now_ms() < until; rest(5)) {
        job = seen_of(pid);
        if (job != NULL && strstr(headline(job, text), part) != NULL)
            return job;
    }
    test_fail(__FILE__, __LINE__, "'%s' is not said: '%s'", part, job != NULL ? text : "no job");
}

/* ---- hanging, stopped, ended ----------------------------------------------------------------- */

static dp_status rest_at_gate(int local_rank, dp_scope *scope, void *user)
{
    (void)local_rank, (void)scope, (void)user;
    wait_at_gate();
    return DP_OK;
}

static void hang_in_run(void)
{
    dp_ctx *ctx;
    use_name();
    ctx = join_job();
    for (int i = 0; i < CALLS; i++)
        check_sum(ctx);
    dp_tag(ctx, "the \"end\"");
    if (me == SLOW)
        CHECK_OK(dp_run(ctx, NULL, rest_at_gate, NULL));
    check_sum(ctx);
    wait_at_gate();
    dp_close(ctx);
}

static void check_hanging(const seen_job *job, const trial *real)
{
    char text[SEEN_TEXT], who[64];
    snprintf(who, sizeof who, "all wait for rank 1 (process 1, pid %d), which is in a function ",
             (int)real->pids[SLOW]);
    CHECK_SAYS(headline(job, text), who);
    CHECK_INT(job->count, WORLD);
    CHECK_INT(job->here, WORLD);
    CHECK_STR(job->launcher, "dp");
    for (int p = 0; p < WORLD; p++) {
        const seen_process *one = &job->all[p];
        bool late = p == SLOW;
        CHECK_INT(one->pid, real->pids[p]);
        CHECK_INT(one->is.id, real->pids[p]);
        CHECK_INT(one->is.rank, p);
        CHECK_INT(one->is.rank_count, 1);
        CHECK_INT(one->is.lanes[0].begun, late ? CALLS : CALLS + 1);
        CHECK_INT(one->is.lanes[0].ended, CALLS);
        CHECK_INT(one->is.lanes[1].begun, 0);
        CHECK_INT(one->is.steps, 0);
        CHECK_INT(one->is.recoveries, 0);
        CHECK(one->known && one->alive && one->bytes > 1 << 20);
        CHECK_INT(awaited_by(job, p), late ? -1 : SLOW);
        CHECK(late ? longest_wait_s(one) <= 0 : longest_wait_s(one) >= 1);
        CHECK_SAYS(doing(job, p, text), late ? "is in a function under dp_run since "
                                             : "waits in collective 6 for rank 1");
        if (!late)
            CHECK_SAYS(text, " s: all_reduce of 1 i32 (sum), at 'the \"end\"'");
    }
}

TEST_SLOW(job_that_hangs_is_shown_and_goes_on, 60)
{
    make_gate();
    const trial real = begin(WORLD, hang_in_run);
    const seen_job *job = seen_saying(real.pids[0], "all wait for rank 1");
    check_hanging(job, &real);
    uint64_t looked = job->all[0].is.looked_ns;
    rest(50);
    CHECK(seen_of(real.pids[0])->all[0].is.looked_ns > looked); /* its waits go on */
    open_gate();
    end(&real);
    CHECK(seen_of(real.pids[0]) == NULL);
}

static void add_for_ever(void)
{
    dp_ctx *ctx;
    int32_t more = 1;
    use_name();
    ctx = join_job();
    while (more > 0) {
        struct pollfd ended = {.fd = gate[0]};
        more = poll(&ended, 1, 0) == 0;
        CHECK_OK(dp_all_reduce(ctx, &(dp_part){&more, &more, NULL}, 1, DP_I32, DP_OP_MIN));
    }
    check_sum(ctx);
    dp_close(ctx);
}

static bool are_stopped(const seen_job *job)
{
    bool all = job != NULL;
    for (int p = 0; all && p < job->count; p++)
        all = strcmp(state_of(&job->all[p]), "stopped") == 0;
    return all;
}

static const seen_job *seen_stopped(const trial *real)
{
    for (int p = 0; p < real->count; p++)
        CHECK_INT(kill(real->pids[p], SIGSTOP), 0);
    while (!are_stopped(seen_of(real->pids[0])))
        rest(5);
    return seen_of(real->pids[0]);
}

TEST_SLOW(job_that_is_stopped_is_shown_and_goes_on, 60)
{
    char text[SEEN_TEXT];
    uint32_t begun[WORLD];
    make_gate();
    const trial real = begin(WORLD, add_for_ever);
    while (seen_of(real.pids[0]) == NULL || seen_of(real.pids[0])->all[0].is.lanes[0].ended < 100)
        rest(5);
    const seen_job *job = seen_stopped(&real);
    for (int p = 0; p < WORLD; p++) {
        begun[p] = job->all[p].is.lanes[0].begun;
        CHECK_SAYS(doing(job, p, text), "is stopped");
        CHECK(begun[p] >= 100 && begun[p] - job->all[p].is.lanes[0].ended <= 1);
    }
    rest(50);
    job = seen_of(real.pids[0]);
    for (int p = 0; p < WORLD; p++)
        CHECK_INT(job->all[p].is.lanes[0].begun, begun[p]);
    for (int p = 0; p < WORLD; p++)
        CHECK_INT(kill(real.pids[p], SIGCONT), 0);
    open_gate();
    close(gate[0]);
    end(&real);
}

static void stop_one(void)
{
    dp_ctx *ctx;
    use_name();
    ctx = join_job();
    check_sum(ctx);
    if (me == SLOW)
        raise(SIGSTOP);
    check_sum(ctx);
    dp_close(ctx);
}

TEST_SLOW(one_that_is_stopped_is_named, 60)
{
    const trial real = begin(WORLD, stop_one);
    (void)seen_saying(real.pids[0], "all wait for rank 1");
    (void)seen_saying(real.pids[0], "), which is stopped; is in no function and no collective");
    CHECK_INT(kill(real.pids[SLOW], SIGCONT), 0);
    end(&real);
}

/* Another process has died. */
static void check_no_sum(dp_ctx *ctx)
{
    float one = 1;
    CHECK_STATUS(dp_all_reduce(ctx, &(dp_part){&one, &one, NULL}, 1, DP_F32, DP_OP_SUM),
                 DP_ERR_REMOTE);
}

static void fail_one(void)
{
    dp_ctx *ctx;
    use_name();
    ctx = join_job();
    check_sum(ctx);
    if (me == SLOW)
        raise(SIGKILL);
    check_no_sum(ctx);
    wait_at_gate();
    dp_close(ctx);
}

TEST_SLOW(job_that_has_failed_says_why, 60)
{
    char text[SEEN_TEXT];
    int status;
    make_gate();
    const trial real = begin(2, fail_one);
    const seen_job *job = seen_saying(real.pids[0], "the job has failed: collective 2, all_reduce "
                                                    "of 1 f32 (sum): rank 1 (process 1, pid ");
    CHECK_SAYS(headline(job, text), " has died");
    CHECK_STR(state_of(&job->all[1]), "died");
    CHECK_STR(doing(job, 1, text), "has died");
    open_gate();
    finish(real.pids[0], 0);
    CHECK_INT(waitpid(real.pids[1], &status, 0), real.pids[1]);
}

/* ---- counts ---------------------------------------------------------------------------------- */

/* It is a part of the function that it is in, and no step of the program. */
static dp_status step_inside(int local_rank, dp_scope *scope, void *user)
{
    dp_value log;
    (void)local_rank;
    return dp_train_step(user, scope, DP_DICT(scope, {"x", dp_float(1)}), NULL, &log);
}

static void train_some(void)
{
    dp_ctx *ctx;
    dp_module *par;
    plan how = {.habit = {ALL}};
    use_name();
    ctx = join_job();
    CHECK_OK(dp_run(ctx, NULL, step_inside, make_net(ctx, &how)));
    CHECK_OK(dp_distributed(make_net(ctx, &how), NULL, &par));
    for (int i = 0; i < CALLS; i++) {
        dp_scope *scope = dp_scope_begin(ctx);
        dp_value log;
        if (me == 1)
            rest(20);
        CHECK_OK(dp_train_step(par, scope, DP_DICT(scope, {"x", dp_float(1)}), NULL, &log));
        CHECK_OK(forward_and_backward(par, 1, false));
        dp_scope_end(scope);
    }
    wait_at_gate();
    dp_close(ctx);
}

TEST_SLOW(steps_are_counted, 60)
{
    make_gate();
    const trial real = begin(2, train_some);
    const seen_job *job = NULL;
    while (job == NULL || job->all[0].is.steps < 2 * CALLS || job->all[1].is.steps < 2 * CALLS)
        job = seen_of(real.pids[0]);
    rest(50);
    job = seen_of(real.pids[0]);
    for (int p = 0; p < 2; p++) {
        const board_member *is = &job->all[p].is;
        CHECK_INT(is->steps, 2 * CALLS);
        CHECK(is->step_ns > 2000000 && is->step_ns < 2000000000);
        CHECK(seconds_since(is->stepped_ns) < seconds_since(is->opened_ns));
        CHECK(is->lanes[0].begun + is->lanes[1].begun > 2 * CALLS);
        CHECK(is->lanes[0].begun == is->lanes[0].ended && is->lanes[1].begun == is->lanes[1].ended);
    }
    const board_lane *early = job->all[0].is.lanes, *late = job->all[1].is.lanes;
    CHECK(late[0].late + late[1].late >= CALLS);
    CHECK(early[0].late_ns + early[1].late_ns < late[0].late_ns + late[1].late_ns);
    CHECK(late[0].late_ns + late[1].late_ns > 9000000u * CALLS);
    CHECK(early[0].waited_ns + early[1].waited_ns > 9000000u * CALLS);
    open_gate();
    end(&real);
}

static void recover_some(void)
{
    dp_ctx *ctx;
    dp_module *par;
    plan how = {.habit = {ALL}};
    use_name();
    close(gate[1]);
    CHECK_OK(dp_open(&(dp_config){.device_count = 1, .timeout_ms = 30000, .recovers = true}, &ctx));
    CHECK_OK(dp_distributed(make_net(ctx, &how), NULL, &par));
    CHECK_OK(forward_and_backward(par, 1, false));
    if (me == SLOW)
        raise(SIGKILL);
    check_no_sum(ctx);
    CHECK_OK(dp_recover(ctx));
    wait_at_gate();
    dp_close(ctx);
}

TEST_SLOW(recoveries_are_counted_and_steps_stay, 60)
{
    int status;
    make_gate();
    const trial real = begin(WORLD, recover_some);
    const seen_job *job = NULL;
    while (job == NULL || job->count != WORLD - 1 || job->all[0].is.recoveries == 0 ||
           job->all[1].is.recoveries == 0)
        job = seen_of(real.pids[0]);
    for (int p = 0; p < WORLD - 1; p++) {
        CHECK_INT(job->all[p].pid, real.pids[p == 0 ? 0 : 2]);
        CHECK_INT(job->all[p].is.recoveries, 1);
        CHECK_INT(job->all[p].is.steps, 1);
        CHECK(seconds_since(job->all[p].is.opened_ns) < 50);
    }
    CHECK_STR(job->failure, "");
    open_gate();
    finish(real.pids[0], 0);
    finish(real.pids[2], 2);
    CHECK_INT(waitpid(real.pids[SLOW], &status, 0), real.pids[SLOW]);
}

/* Each has a board of its own: one of them shows that process, and where the others are. */
static void meet_far(void)
{
    dp_ctx *ctx;
    use_tcp();
    set("DP_MACHINE", (char[]){(char)('a' + me / 2), '\0'});
    set("DP_INTERFACE", "lo");
    ctx = join_job();
    for (int i = 0; i < CALLS; i++)
        check_sum(ctx);
    if (me == SLOW)
        wait_at_gate();
    check_sum(ctx);
    dp_close(ctx);
}

TEST_SLOW(job_of_several_machines_shows_what_is_here, 60)
{
    char text[SEEN_TEXT];
    make_gate();
    const trial real = begin(WORLD, meet_far);
    const seen_job *job = seen_saying(real.pids[0], "all wait for rank 1 (process 1, pid ");
    CHECK_INT(job->here, WORLD);
    for (int p = 0; p < WORLD; p++) {
        CHECK_INT(job->all[p].pid, real.pids[p]);
        CHECK_INT(job->all[p].is.lanes[0].begun, p == SLOW ? CALLS : CALLS + 1);
        CHECK_INT(job->all[p].is.lanes[0].ended, CALLS);
    }
    CHECK_SAYS(doing(job, 0, text), "waits in collective 6 for rank 1 since ");
    CHECK_SAYS(text, ": all_reduce of 1 i32 (sum)");
    forget();
    look_at_process(real.pids[0]); /* as if the others were not on this machine */
    CHECK_INT(view.job_count, 1);
    job = &view.jobs[0];
    CHECK_INT(job->here, 1);
    CHECK_STR(job->all[2].is.host, view.host);
    CHECK_INT(job->all[2].is.id, real.pids[2]);
    CHECK_STR(state_of(&job->all[2]), "elsewhere");
    CHECK_SAYS(doing(job, 1, text), "is on this machine, unseen");
    snprintf(text + 512, 256, "is on %s: ask there", view.host);
    CHECK_STR(doing(job, 2, text), text + 512);
    open_gate();
    end(&real);
}

/* Returns what show_status has returned, and what it has written. */
static int shown(char **arguments, char *text, size_t room)
{
    FILE *file = tmpfile();
    int out = dup(1), err = dup(2);
    fflush(stdout);
    CHECK(file != NULL);
    dup2(fileno(file), 1);
    dup2(fileno(file), 2);
    view.json = false;
    view.watch_ms = 0;
    int status = show_status(arguments);
    fflush(stdout);
    dup2(out, 1);
    dup2(err, 2);
    rewind(file);
    text[fread(text, 1, room - 1, file)] = '\0';
    fclose(file);
    return status;
}

/* ---- on other machines ----------------------------------------------------------------------- */

enum { NOBODY = 65534 };

/* Hides what this process has open from who tests, as if it were on another machine; or no more:
   sanitizers look at a process that ends. */
static void hide(bool hidden)
{
    if (hidden && geteuid() == 0) {
        CHECK_INT(setresuid(NOBODY, NOBODY, NOBODY), 0);
        hidden = false; /* it is another user's */
    }
    CHECK_INT(prctl(PR_SET_DUMPABLE, !hidden), 0);
}

/* Joins a job in which processes 0 and 1 are on machine a, where the test is, and 2 and 3 on b. */
static dp_ctx *join_far(bool recovers)
{
    const dp_config config = {.device_count = 1, .timeout_ms = 30000, .recovers = recovers};
    dp_ctx *ctx;
    use_tcp();
    set("DP_MACHINE", (char[]){(char)('a' + me / 2), '\0'});
    set("DP_INTERFACE", "lo");
    close(gate[1]);
    if (me >= 2)
        hide(true);
    CHECK_OK(dp_open(&config, &ctx));
    return ctx;
}

static void leave_far(dp_ctx *ctx)
{
    dp_close(ctx);
    if (me >= 2)
        hide(false);
}

/* Returns the job of a process, with what others have answered. */
static const seen_job *asked_of(pid_t pid)
{
    CHECK(look());
    view.pids = NULL;
    (void)choose();
    ask_others();
    for (size_t i = 0; i < view.job_count; i++)
        for (int p = 0; p < view.jobs[i].count; p++)
            if (view.jobs[i].all[p].known && view.jobs[i].all[p].pid == pid)
                return &view.jobs[i];
    return NULL;
}

/* Returns the job of a process, once what another one does holds a text. */
static const seen_job *asked_doing(pid_t pid, int process, const char *part)
{
    static char text[SEEN_TEXT];
    const seen_job *job = NULL;
    for (double until = now_ms() + SEEN_MS * test_timeout_scale(); now_ms() < until; rest(5)) {
        job = asked_of(pid);
        if (job != NULL && strstr(doing(job, process, text), part) != NULL)
            return job;
    }
    test_fail(__FILE__, __LINE__, "'%s' is not said: '%s'", part, job != NULL ? text : "no job");
}

static void hang_far(void)
{
    dp_ctx *ctx = join_far(false);
    for (int i = 0; i < CALLS; i++)
        check_sum(ctx);
    dp_tag(ctx, "the \"end\"");
    if (me == 2)
        CHECK_OK(dp_run(ctx, NULL, rest_at_gate, NULL));
    check_sum(ctx);
    wait_at_gate();
    leave_far(ctx);
}

static int count_of(const char *text, const char *part)
{
    int count = 0;
    for (; (text = strstr(text, part)) != NULL; text++)
        count++;
    return count;
}

/* Each key of a process is there for each of four. */
static void check_json(const char *text)
{
    static const char *const keys[] = {"process", "rank",       "ranks",  "pid",    "host",
                                       "state",   "doing",      "steps",  "step_s", "caller",
                                       "courier", "recoveries", "late",   "late_s", "waited_s",
                                       "memory",  "waits_for",  "waits_s"};
    char key[32];
    for (size_t i = 0; i < sizeof keys / sizeof keys[0]; i++) {
        snprintf(key, sizeof key, "\"%s\":", keys[i]);
        CHECK_INT(count_of(text, key), strcmp(keys[i], "waits_s") == 0 ? 8 : 4);
    }
    CHECK_INT(count_of(text, "\"state\":\"runs\""), 4);
    CHECK_INT(count_of(text, "\"memory\":0,"), 0);
    CHECK_INT(count_of(text, "\"waits_for\":null}"), 1);
    CHECK_INT(count_of(text, "\"in\":\"all_reduce of 1 i32 (sum), at 'the \\\"end\\\"'\""), 3);
    CHECK_INT(count_of(text, "\"function\":\"a function under dp_run\""), 1);
}

TEST_SLOW(far_processes_are_shown_though_they_hang, 60)
{
    static char text[1 << 16];
    char part[160], own[16], host[64] = "";
    int root;
    make_gate();
    gethostname(host, sizeof host - 1);
    const trial real = begin(4, hang_far);
    snprintf(own, sizeof own, "%d", (int)real.pids[0]);
    const seen_job *job = asked_doing(real.pids[0], 2, "is in a function under dp_run since ");
    CHECK_INT(job->here, 2);
    for (int p = 0; p < 4; p++)
        if (p != 2)
            (void)asked_doing(real.pids[0], p, "waits in collective 6 for rank ");
    job = asked_of(real.pids[0]);
    for (int p = 0; p < 4; p++) {
        const seen_process *one = &job->all[p];
        CHECK(one->known && one->alive && one->far == (p >= 2) && one->bytes > 1 << 20);
        CHECK_INT(one->pid, real.pids[p]);
        CHECK_INT(one->is.lanes[0].begun, p == 2 ? CALLS : CALLS + 1);
        CHECK_INT(one->is.lanes[0].ended, CALLS);
        CHECK(seconds_since(one->is.opened_ns) < 60);
        CHECK(p != 2 || seconds_since(one->is.in_since_ns) < 60);
        CHECK_INT(root_of(job, p), 2);
    }
    while (count_waits(asked_of(real.pids[0]), &root) == 0)
        rest(5);
    snprintf(part, sizeof part,
             "wait for rank 2 (process 2, pid %d on %s), which is in a function under dp_run "
             "since ",
             (int)real.pids[2], host);
    CHECK_SAYS(headline(asked_of(real.pids[0]), text), part);
    CHECK_INT(shown((char *[]){own, NULL}, text, sizeof text), 0);
    snprintf(part, sizeof part, "on %s: waits in collective 6 for rank ", host);
    CHECK_INT(count_of(text, part), 3);
    CHECK_INT(shown((char *[]){(char[]){"--json"}, own, NULL}, text, sizeof text), 0);
    check_json(text);
    open_gate();
    end(&real);
}

static void rest_far(void)
{
    dp_ctx *ctx = join_far(false);
    check_sum(ctx);
    wait_at_gate();
    check_sum(ctx);
    leave_far(ctx);
}

/* Both are asked at once, and nothing that one of them lacks is missing of the others. */
TEST_SLOW(far_processes_that_are_stopped_do_not_answer, 90)
{
    static char text[1 << 16];
    char own[16];
    make_gate();
    const trial real = begin(4, rest_far);
    snprintf(own, sizeof own, "%d", (int)real.pids[1]);
    (void)asked_doing(real.pids[0], 2, "is in no function and no collective");
    (void)asked_doing(real.pids[0], 3, "is in no function and no collective");
    CHECK_INT(kill(real.pids[3], SIGSTOP), 0);
    const seen_job *job = asked_doing(real.pids[0], 3, "did not answer within 2 s at 127.0.0.1, ");
    CHECK_STR(state_of(&job->all[3]), "silent");
    CHECK_STR(state_of(&job->all[2]), "runs");
    CHECK_INT(kill(real.pids[2], SIGSTOP), 0);
    CHECK_INT(shown((char *[]){(char[]){"--json"}, own, NULL}, text, sizeof text), 0);
    CHECK_INT(count_of(text, "\"state\":\"silent\""), 2);
    CHECK_INT(count_of(text, ": it is stopped, or out of reach"), 2);
    CHECK_INT(count_of(text, "\"state\":\"runs\""), 2);
    CHECK_INT(kill(real.pids[2], SIGCONT), 0);
    CHECK_INT(kill(real.pids[3], SIGCONT), 0);
    (void)asked_doing(real.pids[0], 2, "is in no function and no collective");
    open_gate();
    end(&real);
}

/* Without the key a program gets a challenge, and nothing else; it gives away none to others. */
TEST_SLOW(far_processes_answer_nobody_without_the_key, 90)
{
    char text[SEEN_TEXT], byte;
    uint64_t wrong = 1;
    make_gate();
    const trial real = begin(4, rest_far);
    (void)asked_doing(real.pids[0], 3, "is in no function and no collective");
    CHECK(look());
    (void)choose();
    seen_job *job = (seen_job *)(uintptr_t)seen_of(real.pids[0]);
    (void)choose();
    CHECK(job->asks[0] != 0 && job->all[3].is.port != 0);
    int fd = call((int)job->all[3].is.port);
    ask own = {.job = job, .place = 3, .fd = fd};
    own.request = (ask_request){.magic = ASK_MAGIC, .nonce = 5, .kind = ASK_KIND};
    CHECK_INT(send(fd, &own.request, sizeof own.request, 0), (ssize_t)sizeof own.request);
    CHECK_INT(recv(fd, &own.challenge, sizeof own.challenge, MSG_WAITALL), 24);
    CHECK(own.challenge.proof == ask_prove(&own, false));
    CHECK_INT(send(fd, &wrong, sizeof wrong, 0), sizeof wrong);
    CHECK(recv(fd, &byte, 1, 0) <= 0);
    close(fd);
    job->asks[1]++;
    ask_others();
    CHECK_SAYS(doing(job, 3, text), "who listens there is not of this job");
    CHECK(!job->all[3].known);
    open_gate();
    end(&real);
}

/* Whoever asks, in whatever way, leaves nothing behind. */
static void ask_in_a_strange_way(int door, int way, uint64_t *random)
{
    unsigned char bytes[300];
    ask_request request = {.magic = ASK_MAGIC, .nonce = 5, .kind = way % 2 > 0 ? ASK_KIND : 99};
    int fd = call(door);
    if (fd < 0)
        return;
    for (size_t i = 0; i < sizeof bytes; i++)
        bytes[i] = (unsigned char)test_random(random);
    memcpy(bytes, &request, way % 3 > 0 ? sizeof request : 0);
    (void)send(fd, bytes, (size_t)(test_random(random) % sizeof bytes), MSG_NOSIGNAL);
    if (way % 5 > 0)
        close(fd); /* the others stay until this process ends */
}

static void ask_for_long(pid_t pid)
{
    for (int i = 0; i < 5; i++)
        (void)asked_doing(pid, 3, "is in no function and no collective");
    exit(EXIT_SUCCESS);
}

static int files_of(pid_t pid)
{
    char path[32];
    snprintf(path, sizeof path, "/proc/%d/fd", (int)pid);
    return count_names(path, "");
}

TEST_SLOW(many_that_ask_and_strangers_disturb_nobody, 120)
{
    enum { MANY = 40, STRANGERS = 300 };
    pid_t many[MANY + 1];
    bool sees = geteuid() == 0; /* the files of one that is hidden */
    make_gate();
    const trial real = begin(4, rest_far);
    const seen_job *job = asked_doing(real.pids[0], 3, "is in no function and no collective");
    const int door = (int)job->all[3].is.port, before = sees ? files_of(real.pids[3]) : 0;
    for (int i = 0; i <= MANY; i++) {
        many[i] = fork();
        CHECK(many[i] >= 0);
        uint64_t random = test_seed() + (uint64_t)i;
        if (many[i] == 0 && i < MANY)
            ask_for_long(real.pids[0]);
        for (int way = 0; many[i] == 0 && way < STRANGERS; way++)
            ask_in_a_strange_way(door, way, &random);
        if (many[i] == 0)
            exit(EXIT_SUCCESS);
    }
    for (int i = 0; i <= MANY; i++)
        finish(many[i], i);
    while (sees && files_of(real.pids[3]) > before)
        rest(20);
    open_gate();
    end(&real);
}

static void recover_far(void)
{
    dp_ctx *ctx = join_far(true);
    check_sum(ctx);
    if (me == 1)
        raise(SIGKILL);
    check_no_sum(ctx);
    CHECK_OK(dp_recover(ctx));
    wait_at_gate();
    leave_far(ctx);
}

/* They are asked before, while and after the others agree who is left. */
TEST_SLOW(far_processes_are_asked_while_they_recover, 120)
{
    int status;
    make_gate();
    const trial real = begin(4, recover_far);
    const seen_job *job = NULL;
    while (job == NULL || job->count != 3 || !job->all[1].known || !job->all[2].known)
        job = asked_of(real.pids[0]);
    for (int p = 0; p < 3; p++) {
        CHECK_INT(job->all[p].pid, real.pids[p == 0 ? 0 : p + 1]);
        CHECK_INT(job->all[p].far, p > 0);
    }
    while (job == NULL || job->count != 3 || job->all[2].is.recoveries == 0)
        job = asked_of(real.pids[0]);
    CHECK_STR(job->failure, "");
    open_gate();
    for (int p = 0; p < 4; p++)
        if (p != 1)
            finish(real.pids[p], p);
    CHECK_INT(waitpid(real.pids[1], &status, 0), real.pids[1]);
}

/* ---- what answers may be ---- */

/* Takes an answer that a process at machine b could have sent. Returns what its row says. */
static const char *said_of_answer(const ask_reply *answer)
{
    static char text[SEEN_TEXT];
    ask own = {.job = &view.jobs[0], .place = 1, .fd = -1, .until_ns = UINT64_MAX};
    own.reply = *answer;
    view.jobs[0].all[1] = (seen_process){.far = true, .is = {.id = 9, .address = "b", .port = 7}};
    ask_take(&own);
    return doing(&view.jobs[0], 1, text);
}

TEST(answers_are_checked)
{
    static seen_process all[2];
    static ask_reply answer;
    static board_member hung = {.in_since_ns = 7000000000, .in = "it", .opened_ns = 1};
    static seen_job one = {.epoch = 5, .count = 2, .all = all};
    board_head head = {
        .magic = board_magic, .layout = BOARD_LAYOUT, .process_count = 2, .process = 1, .epoch = 5};
    const ask_reply none = {.magic = ASK_REPLY_MAGIC, .bytes = sizeof none};
    view.jobs = &one;
    view.now_ns = clock_ns();
    for (int i = 0; i < 9; i++) {
        static const char *const words[] = {"is in no function",
                                            "port 7: its answer is damaged",
                                            "port 7: its answer is damaged",
                                            "whose memory has layout 9",
                                            "another process of this job answers there",
                                            "another process of this job answers there",
                                            "another process of this job answers there",
                                            "another process of this job answers there",
                                            "is in no function"};
        board_head its = head;
        answer = none;
        answer.magic += i == 1;
        its.magic += i == 2;
        its.layout = i == 3 ? 9 : its.layout;
        answer.bytes -= i == 4;
        its.process_count += i == 5;
        its.epoch += i == 6;
        its.process -= i == 7;
        memcpy(answer.head, &its, ASK_HEAD_BYTES);
        CHECK_SAYS(said_of_answer(&answer), words[i]);
        CHECK_INT(all[1].known, i == 0 || i == 8);
    }
    answer = none; /* its clock is another one */
    answer.now_ns = 10000000000;
    memcpy(answer.head, &head, ASK_HEAD_BYTES);
    memcpy(answer.member, &hung, sizeof hung);
    CHECK_SAYS(said_of_answer(&answer), "is in it since 3.0 s");
    CHECK(seconds_since(all[1].is.opened_ns) > 9.9 && seconds_since(all[1].is.opened_ns) < 10.1);
    uint64_t random = test_seed();
    for (int round = 0; round < 200; round++) {
        answer = none;
        for (size_t i = offsetof(ask_reply, now_ns); i < sizeof answer; i++)
            ((unsigned char *)&answer)[i] =
                (unsigned char)(round % 4 == 0 ? 255 : test_random(&random));
        memcpy(answer.head, &head, ASK_HEAD_BYTES);
        for (const char *text = said_of_answer(&answer); *text != '\0'; text++)
            CHECK(*text >= ' ' && *text <= '~');
        for (const char *text = one.failure; *text != '\0'; text++)
            CHECK(*text >= ' ' && *text <= '~');
        (void)awaited_by(&one, 1);
    }
    view.jobs = NULL;
}

/* Makes a job of two processes that listen at this address, as they would on other machines. */
static seen_process *job_that_listens(int at)
{
    static seen_process all[2];
    static seen_job job = {.epoch = 5, .count = 2, .chosen = true, .asks = {1, 2}, .all = all};
    for (int p = 0; p < 2; p++)
        all[p] = (seen_process){.far = true,
                                .is = {.id = 9, .address = "127.0.0.1", .port = (uint32_t)at}};
    view.jobs = &job;
    view.job_count = 1;
    return all;
}

static void forget_job(void)
{
    view.jobs = NULL;
    view.job_count = 0;
}

TEST(all_are_asked_at_once)
{
    static ask all[2];
    int at = free_port(), fd = listen_at(at);
    (void)job_that_listens(at);
    CHECK(fd >= 0);
    CHECK_INT(ask_list(all), 2);
    CHECK(ask_look(all, 2));
    for (int p = 0; p < 2; p++) {
        CHECK(all[p].fd >= 0);
        ask_close(&all[p], ASK_ENDS);
    }
    CHECK(!ask_look(all, 2));
    close(fd);
    forget_job();
}

TEST_SLOW(one_that_closes_a_connection_is_asked_again, 60)
{
    char text[SEEN_TEXT];
    int at = free_port(), fd = listen_at(at);
    CHECK(fd >= 0);
    pid_t child = fork();
    CHECK(child >= 0);
    if (child == 0) {
        alarm(30);
        for (int i = 0; i < 4; i++) /* of each of two, and once more */
            close(accept(fd, NULL, NULL));
        exit(EXIT_SUCCESS);
    }
    seen_process *all = job_that_listens(at);
    ask_others();
    for (int p = 0; p < 2; p++) {
        CHECK(!all[p].known);
        CHECK_SAYS(all[p].why, "did not answer");
    }
    finish(child, 0);
    close(fd);
    all = job_that_listens(at);
    ask_others();
    snprintf(text, sizeof text, "did not answer at 127.0.0.1, port %d: nobody listens there", at);
    CHECK_SAYS(all[1].why, text);
    forget_job();
}

/* ---- which jobs ------------------------------------------------------------------------------ */

static void rest_open(void)
{
    dp_ctx *ctx;
    if (world == 2)
        use_name();
    else
        use_tcp();
    ctx = join_job();
    check_sum(ctx);
    wait_at_gate();
    dp_close(ctx);
}

TEST_SLOW(jobs_of_one_user_are_apart, 60)
{
    static char text[1 << 16];
    char pids[2][16];
    make_gate();
    const trial two = begin(2, rest_open), three = begin(3, rest_open);
    while (seen_of(two.pids[0]) == NULL || seen_of(three.pids[2]) == NULL)
        rest(5);
    CHECK_INT(seen_of(two.pids[1])->count, 2);
    CHECK_INT(seen_of(three.pids[1])->count, 3);
    snprintf(pids[0], 16, "%d", (int)two.pids[1]);
    snprintf(pids[1], 16, "%d", (int)three.pids[1]);
    CHECK_INT(shown((char *[]){pids[0], NULL}, text, sizeof text), 0);
    CHECK_SAYS(text, "a job of 2 processes, by dp, on ");
    CHECK(strstr(text, "a job of 3") == NULL);
    CHECK_INT(shown((char *[]){pids[0], pids[1], NULL}, text, sizeof text), 0);
    CHECK_SAYS(text, "a job of 2 processes, by dp, on ");
    CHECK_SAYS(text, "a job of 3 processes, by dp, on ");
    open_gate();
    end(&two);
    end(&three);
    CHECK_INT(shown((char *[]){pids[0], pids[1], NULL}, text, sizeof text), 1);
    CHECK_STR(text, "no job of this user is seen on this machine, or none of these (a process "
                    "that is alone: if a launcher has started it, or with DP_METRICS)\n");
}

TEST(wrong_requests_are_refused)
{
    char text[200];
    static char wrong[][12] = {"--jason", "--watch=0", "--watch=1x", "12x", ""};
    for (size_t i = 0; i < sizeof wrong / sizeof wrong[0]; i++) {
        CHECK_INT(shown((char *[]){wrong[i], NULL}, text, sizeof text), 2);
        CHECK_STR(text, "what there is: --json, --watch, --watch=SECONDS, numbers of processes\n");
    }
}

/* ---- metrics --------------------------------------------------------------------------------- */

/* Returns a whole file, once it holds a text: each time that it is there it has a beginning and an
   end. Counts how often it was another one. */
static const char *metrics_with(const char *name, const char *part, int *rewritten)
{
    struct stat file;
    ino_t before = 0;
    while (true) {
        int fd = open(name, O_RDONLY);
        if (fd < 0)
            continue;
        CHECK_INT(fstat(fd, &file), 0);
        char *text = test_room((size_t)file.st_size + 1);
        CHECK_INT(read(fd, text, (size_t)file.st_size), file.st_size);
        close(fd);
        CHECK(strncmp(text, "# TYPE dp_process info\n", 23) == 0);
        CHECK_STR(text + file.st_size - 6, "# EOF\n");
        *rewritten += file.st_ino != before;
        before = file.st_ino;
        if (*rewritten > 10 && strstr(text, part) != NULL)
            return text;
    }
}

/* The line of a process has this number. */
static void check_metric(const char *text, const char *name, int process, const char *more,
                         const char *wanted)
{
    char begin[80], end[80];
    snprintf(begin, sizeof begin, "\n%s{run=\"", name);
    snprintf(end, sizeof end, "\",process=\"%d\"%s} %s\n", process, more, wanted);
    for (const char *at = text; (at = strstr(at, begin)) != NULL; at++)
        if (strncmp(at + strlen(begin) + 16, end, strlen(end)) == 0)
            return;
    test_fail(__FILE__, __LINE__, "no %s of process %d is %s in:\n%s", name, process, wanted, text);
}

static void check_metrics(const char *text, int process)
{
    char who[200], host[64] = "";
    bool late = process == SLOW;
    gethostname(host, sizeof host - 1);
    check_metric(text, "dp_up", process, "", "1");
    check_metric(text, "dp_recoveries_total", process, "", "0");
    check_metric(text, "dp_steps_total", process, "", "0");
    check_metric(text, "dp_step_seconds", process, "", "0");
    check_metric(text, "dp_waits_for", process, "", late ? "-1" : "1");
    check_metric(text, "dp_collectives_begun_total", process, ",lane=\"caller\"", late ? "5" : "6");
    check_metric(text, "dp_collectives_begun_total", process, ",lane=\"courier\"", "0");
    check_metric(text, "dp_collectives_ended_total", process, ",lane=\"caller\"", "5");
    check_metric(text, "dp_wait_seconds", process, ",lane=\"courier\"", "0");
    snprintf(who, sizeof who, "\",process=\"%d\",rank=\"%d\",ranks=\"1\",pid=\"", process, process);
    CHECK_SAYS(text, who);
    snprintf(who, sizeof who, "\",host=\"%s\",launcher=\"dp\"} 1\n", host);
    CHECK_SAYS(text, who);
}

TEST_SLOW(metrics_are_whole_whenever_they_are_read, 60)
{
    int rewritten = 0;
    enter_folder();
    make_gate();
    setenv("DP_METRICS", "job.prom", 1);
    const trial real = begin(WORLD, hang_in_run);
    (void)seen_saying(real.pids[0], "all wait for rank 1");
    const char *text = metrics_with("job.prom", "\n# TYPE dp_waits_for gauge\n", &rewritten);
    for (int p = 0; p < WORLD; p++)
        check_metrics(text, p);
    for (const char *at = text; *at != '\0'; at = strchr(at, '\n') + 1)
        CHECK(strncmp(at, "dp_", 3) == 0 || strncmp(at, "# TYPE dp_", 10) == 0 ||
              strncmp(at, "# HELP dp_", 10) == 0 || strcmp(at, "# EOF\n") == 0);
    struct stat file;
    CHECK_INT(stat("job.prom", &file), 0);
    CHECK_INT(file.st_mode & 0777, 0666 & ~(umask(0)));
    open_gate();
    end(&real);
    CHECK_INT(count_names(".", ""), 0);
}

TEST_SLOW(metrics_of_several_machines_are_a_file_of_each_process, 60)
{
    enter_folder();
    make_gate();
    setenv("DP_METRICS", "job.d/job.prom", 1);
    CHECK_INT(mkdir("job.d", 0777), 0);
    const trial real = begin(WORLD, meet_far);
    (void)seen_saying(real.pids[0], "all wait for rank 1");
    for (int p = 0; p < WORLD; p++) {
        char name[32], other[32];
        int rewritten = 0;
        snprintf(name, sizeof name, "job.d/job.%d.prom", p);
        snprintf(other, sizeof other, "process=\"%d\"", (p + 1) % WORLD);
        const char *text = metrics_with(name, "", &rewritten);
        check_metric(text, "dp_up", p, "", "1");
        check_metric(text, "dp_collectives_ended_total", p, ",lane=\"caller\"", "5");
        CHECK(strstr(text, other) == NULL);
    }
    open_gate();
    end(&real);
    CHECK_INT(count_names("job.d", ""), 0);
}

/* The group has another process 0 than the job. */
static void open_more(void)
{
    dp_ctx *ctx, *group = NULL, *again;
    use_name();
    ctx = join_job();
    CHECK_OK(dp_open_group(ctx, me > 0 ? 1 : -1, NULL, &group));
    CHECK_OK(dp_open(&(dp_config){.device_count = 1, .timeout_ms = 30000, .job = "b"}, &again));
    wait_at_gate();
    dp_close(again);
    dp_close(group);
    dp_close(ctx);
}

static int jobs_with(pid_t pid)
{
    int count = 0;
    (void)seen_of(pid);
    for (size_t i = 0; i < view.job_count; i++)
        for (int p = 0; p < view.jobs[i].count; p++)
            count += view.jobs[i].all[p].known && view.jobs[i].all[p].pid == pid;
    return count;
}

TEST_SLOW(metrics_are_of_the_first_context, 60)
{
    char run[2][21]; /* run="16 digits" */
    enter_folder();
    make_gate();
    setenv("DP_METRICS", "job", 1);
    const trial real = begin(WORLD, open_more);
    while (jobs_with(real.pids[1]) < 3)
        rest(5);
    for (int i = 0; i < 5; i++) {
        int rewritten = 0;
        const char *text = metrics_with("job", "", &rewritten);
        check_metric(text, "dp_up", WORLD - 1, "", "1");
        CHECK_SAYS(text, "launcher=\"dp\"");
        snprintf(run[i > 0], sizeof run[0], "%.20s", strstr(text, "run="));
        CHECK_STR(run[i > 0], run[0]);
    }
    open_gate();
    end(&real);
    CHECK_INT(count_names(".", ""), 0);
}

TEST_SLOW(metrics_go_on_after_a_recovery, 60)
{
    int rewritten = 0, status;
    const char *text = "";
    enter_folder();
    make_gate();
    setenv("DP_METRICS", "job", 1);
    const trial real = begin(WORLD, recover_some);
    while (strstr(text, "launcher=\"recovery\"") == NULL)
        text = metrics_with("job", "dp_process_info", &rewritten);
    for (int p = 0; p < WORLD - 1; p++) {
        check_metric(text, "dp_up", p, "", "1");
        check_metric(text, "dp_steps_total", p, "", "1");
    }
    CHECK(strstr(text, "process=\"2\"") == NULL);
    open_gate();
    finish(real.pids[0], 0);
    finish(real.pids[2], 2);
    CHECK_INT(waitpid(real.pids[SLOW], &status, 0), real.pids[SLOW]);
    CHECK_INT(count_names(".", ""), 0);
}

static int warned;

static void hear_of_metrics(const dp_log_record *record, void *user)
{
    (void)user;
    if (strstr(record->text, "DP_METRICS") == NULL)
        return;
    CHECK_SAYS(record->text, "$DP_METRICS: 'nowhere/job': No such file or directory");
    warned++;
}

static void go_on_without(void)
{
    dp_ctx *ctx;
    use_name();
    CHECK_OK(dp_open(&(dp_config){.device_count = 1,
                                  .timeout_ms = 30000,
                                  .log = {.fn = hear_of_metrics, .level = DP_LOG_WARN}},
                     &ctx));
    rest(100);
    check_sum(ctx);
    dp_close(ctx);
    CHECK_INT(warned, me == 0);
}

TEST_SLOW(metrics_that_cannot_be_written_are_warned_of_once, 60)
{
    enter_folder();
    setenv("DP_METRICS", "nowhere/job", 1);
    const trial real = begin(2, go_on_without);
    end(&real);
}

/* ---- a process that is alone ----------------------------------------------------------------- */

static bool launched, apart;
static int trained[2]; /* a pipe that tells when it has */

static void train_alone(void)
{
    plan how = {.habit = {ALL}};
    if (launched)
        use_name();
    dp_ctx *ctx;
    close(gate[1]);
    CHECK_OK(dp_open(&(dp_config){.device_count = 1, .local_only = apart}, &ctx));
    dp_module *net = make_net(ctx, &how);
    for (int i = 0; i < CALLS; i++) {
        dp_scope *scope = dp_scope_begin(ctx);
        dp_value log;
        CHECK_OK(dp_train_step(net, scope, DP_DICT(scope, {"x", dp_float(1)}), NULL, &log));
        dp_scope_end(scope);
    }
    CHECK_INT(write(trained[1], "1", 1), 1);
    CHECK_OK(dp_run(ctx, NULL, rest_at_gate, NULL));
    dp_close(ctx);
}

static trial begin_alone(void)
{
    char told;
    make_gate();
    CHECK_INT(pipe(trained), 0);
    const trial real = begin(1, train_alone);
    CHECK_INT(read(trained[0], &told, 1), 1);
    return real;
}

static void check_alone(const trial *real, const char *by, unsigned steps)
{
    char text[SEEN_TEXT];
    const seen_job *job = seen_saying(real->pids[0], "");
    while (strstr(doing(job, 0, text), "is in a function under dp_run since ") == NULL)
        job = seen_saying(real->pids[0], "");
    CHECK_INT(job->count, 1);
    CHECK_STR(job->launcher, by);
    CHECK_INT(job->all[0].is.steps, steps);
    CHECK_INT(job->all[0].is.id, real->pids[0]);
    CHECK_INT(job->all[0].is.rank_count, 1);
    CHECK_STR(state_of(&job->all[0]), "runs");
}

TEST_SLOW(process_that_is_alone_is_shown_by_a_launcher, 60)
{
    launched = true;
    const trial real = begin_alone();
    check_alone(&real, "dp", CALLS);
    open_gate();
    end(&real);
}

TEST_SLOW(process_that_is_alone_writes_metrics, 60)
{
    int rewritten = 0;
    enter_folder();
    setenv("DP_METRICS", "job.prom", 1);
    const trial real = begin_alone();
    check_alone(&real, "none", CALLS);
    const char *text = metrics_with("job.prom", "", &rewritten);
    check_metric(text, "dp_up", 0, "", "1");
    open_gate();
    end(&real);
    CHECK_INT(count_names(".", ""), 0);
}

/* Each process of a job may have such a context. */
TEST_SLOW(context_that_is_no_part_of_a_job_is_not_shown, 60)
{
    enter_folder();
    setenv("DP_METRICS", "job.prom", 1);
    launched = apart = true;
    const trial real = begin_alone();
    CHECK(seen_of(real.pids[0]) == NULL);
    CHECK_INT(count_names(".", ""), 0);
    open_gate();
    end(&real);
}

TEST_SLOW(process_that_nobody_watches_is_not_shown, 60)
{
    const trial real = begin_alone();
    CHECK(seen_of(real.pids[0]) == NULL);
    open_gate();
    end(&real);
}

static void recover_alone(void)
{
    dp_ctx *ctx;
    use_name();
    close(gate[1]);
    CHECK_OK(dp_open(&(dp_config){.device_count = 1, .timeout_ms = 30000, .recovers = true}, &ctx));
    check_sum(ctx);
    if (me == SLOW)
        raise(SIGKILL);
    check_no_sum(ctx);
    CHECK_OK(dp_recover(ctx));
    int files = open_files();
    dp_abort(ctx, DP_ERR_USER, "again");
    CHECK_OK(dp_recover(ctx));
    CHECK_INT(open_files(), files); /* it is shown in one place */
    CHECK_OK(dp_run(ctx, NULL, rest_at_gate, NULL));
    dp_close(ctx);
}

TEST_SLOW(process_that_is_left_alone_is_shown, 60)
{
    int status, rewritten = 0;
    enter_folder();
    make_gate();
    setenv("DP_METRICS", "job.prom", 1);
    const trial real = begin(2, recover_alone);
    check_alone(&real, "recovery", 0);
    CHECK_INT(seen_of(real.pids[0])->all[0].is.recoveries, 2);
    check_metric(metrics_with("job.prom", "_total{run=", &rewritten), "dp_recoveries_total", 0, "",
                 "2");
    open_gate();
    finish(real.pids[0], 0);
    CHECK_INT(waitpid(real.pids[SLOW], &status, 0), real.pids[SLOW]);
    CHECK_INT(count_names(".", ""), 0);
}

/* ---- what is no board ------------------------------------------------------------------------ */

/* Makes memory as a job's, and looks at it alone. Returns what is said of it. */
static const char *said_of(const void *data, size_t bytes, size_t whole)
{
    static char text[1 << 16];
    char pid[16];
    int fd = memfd_create("dp", MFD_CLOEXEC);
    CHECK(fd >= 0 && ftruncate(fd, (off_t)whole) == 0);
    CHECK_INT(pwrite(fd, data, bytes, 0), (ssize_t)bytes);
    snprintf(pid, sizeof pid, "%d", (int)getpid());
    (void)shown((char *[]){pid, NULL}, text, sizeof text);
    close(fd);
    return text;
}

static board_head sound_head(void)
{
    return (board_head){.magic = board_magic,
                        .layout = BOARD_LAYOUT,
                        .version = DP_VERSION,
                        .process_count = 2,
                        .process = 1,
                        .member_bytes = sizeof(board_member),
                        .entry_bytes = sizeof(board_entry),
                        .kept = 512,
                        .recent = 16,
                        .members_at = 1024,
                        .entries_at = 8192,
                        .epoch = (uint64_t)getpid(), /* or it is another test's */
                        .launcher = "dp"};
}

TEST(memory_of_another_version_is_refused)
{
    char who[80];
    board_head head = sound_head();
    head.layout = 7;
    head.version = 1203;
    snprintf(who, sizeof who, "the job of process id %d cannot be shown: ", (int)getpid());
    const char *text = said_of(&head, sizeof head, 1 << 16);
    CHECK_SAYS(text, who);
    CHECK_SAYS(text,
               "it is of dp.h 0.12.3, whose memory has layout 7, and this program reads layout "
               "2: use the one that comes with that dp.h");
    head = sound_head();
    head.magic++; /* then it is none of ours */
    text = said_of(&head, sizeof head, 1 << 16);
    CHECK(strstr(text, who) == NULL);
}

TEST(damaged_memory_is_refused)
{
    const board_head sound = sound_head();
    for (int i = 0; i < 9; i++) {
        board_head head = sound;
        size_t whole = i == 8 ? 2000 : 1 << 16;
        head.process_count = i == 0 ? 0 : i == 1 ? INT32_MAX : i == 2 ? 100 : 2;
        head.process = i == 0 ? -1 : i == 3 ? 2 : 1;
        head.member_bytes += i == 4;
        head.entry_bytes += i == 5;
        head.members_at = i == 6 ? 8 : 1024;
        head.entries_at = i == 7 ? UINT64_MAX : 8192;
        CHECK_SAYS(said_of(&head, sizeof head, whole), "cannot be shown: its memory is damaged");
    }
    CHECK_SAYS(said_of(&sound, sizeof sound, 1 << 16), "a job of 2 processes, by dp");
}

/* Numbers may be anything: there are no letters in what is written that do something else. */
TEST_SLOW(any_bytes_are_shown_as_text, 60)
{
    static unsigned char data[1 << 14];
    uint64_t random = test_seed();
    const board_head sound = sound_head();
    for (int round = 0; round < 200; round++) {
        for (size_t i = 0; i < sizeof data; i++)
            data[i] = (unsigned char)(round % 4 == 0 ? 255 : test_random(&random));
        memcpy(data, &sound, sizeof sound);
        memset(data + offsetof(board_head, failed), round % 3, 1);
        const char *text = said_of(data, sizeof data, sizeof data);
        CHECK_SAYS(text, "a job of 2 processes, by dp");
        for (; *text != '\0'; text++)
            CHECK(*text == '\n' || (*text >= ' ' && *text <= '~'));
    }
}
