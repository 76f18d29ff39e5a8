/* test_rendezvous.c - who meets whom: two jobs at one address, processes that end while others
   come, and crowds at the door. */

#if defined(__linux__)
#define _GNU_SOURCE
#endif

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/time.h>
#include <sys/un.h>
#include <time.h>
#include "examples/custom_device.h"
#include "world.h"

static void rest(int ms)
{
    poll(NULL, 0, ms);
}

/* What processes of a test find, for it to see. */
typedef struct found {
    int opened[MOST], mixed[MOST];
    dp_status status[MOST];
    char text[MOST][600];
} found;

static found *all;

static void share(void)
{
    all = mmap(NULL, sizeof *all, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    CHECK(all != MAP_FAILED);
}

static void (*use)(void); /* use_tcp or use_name */

/* ---- two jobs at one address ----------------------------------------------------------------- */

enum { JOB = 3, JOBS = 2 * JOB }; /* processes of one, of both */

static int delays[JOBS];

/* Process me % JOB of job me / JOB. */
static void use_the_same_address(void)
{
    int both = me;
    me %= JOB;
    world = JOB;
    use();
    unsetenv("DP_SECRET");
    me = both;
}

static dp_status open_shared(int timeout_ms, dp_ctx **out)
{
    return dp_open(&(dp_config){.device_count = 1, .timeout_ms = timeout_ms}, out);
}

static void meet_one_of_two_jobs(void)
{
    dp_ctx *ctx;
    int32_t job = me / JOB, jobs[JOB];
    use_the_same_address();
    rest(delays[me]);
    dp_status status = open_shared(1000, &ctx);
    all->status[me] = status;
    snprintf(all->text[me], sizeof all->text[me], "%s", dp_last_error());
    if (status != DP_OK)
        return;
    dp_part part = {.send = &job, .recv = jobs};
    all->opened[me] = 1;
    if (dp_all_gather(ctx, &part, 1, DP_I32) == DP_OK)
        for (int p = 0; p < JOB; p++)
            all->mixed[me] |= jobs[p] != job;
    dp_close(ctx);
}

/* Two jobs begin at about the same time. Either of them meets in good order, or everybody hears of
   the other; who is left says where it was. */
static void run_two_jobs(uint64_t *seed, const char *where)
{
    pid_t pids[JOBS];
    int opened[2] = {0, 0};
    nobody_launched_us();
    memset(all, 0, sizeof *all);
    port = free_port();
    for (int p = 0; p < JOBS; p++)
        delays[p] = (int)(test_random(seed) % 60);
    for (int p = 0; p < JOBS; p++)
        pids[p] = start(p, meet_one_of_two_jobs);
    for (int p = 0; p < JOBS; p++)
        finish(pids[p], p);
    for (int p = 0; p < JOBS; p++) {
        CHECK(!all->mixed[p]);
        opened[p / JOB] += all->opened[p];
        if (!all->opened[p])
            CHECK_SAYS(all->text[p], where);
    }
    CHECK(opened[0] + opened[1] == 0 || opened[0] + opened[1] == JOB);
    CHECK(opened[0] % JOB == 0);
}

TEST_SLOW(two_jobs_at_one_address_do_not_mix, 60)
{
    uint64_t seed = test_seed();
    const char *trials = getenv("TEST_TRIALS");
    share();
    for (int i = 0; i < (trials != NULL ? atoi(trials) : 6); i++) {
        use = i % 2 ? use_name : use_tcp;
        run_two_jobs(&seed, i % 2 ? "@test-" : "127.0.0.1");
    }
}

/* ---- whose address it is --------------------------------------------------------------------- */

static int told[2];  /* a pipe, for "I am there" */
static pid_t holder; /* process 0 of the job that is there */

static void say(void)
{
    CHECK_INT(write(told[1], "x", 1), 1);
}

static void listen_for(int count)
{
    char heard;
    for (int i = 0; i < count; i++)
        CHECK_INT(read(told[0], &heard, 1), 1);
}

/* Of a job of two, which have met, twice even. */
static void hold_the_address(void)
{
    dp_ctx *first, *second;
    use();
    unsetenv("DP_SECRET");
    CHECK_OK(open_world(0, NULL, &first));
    CHECK_OK(open_world(0, NULL, &second));
    dp_close(second);
    say();
    rest(60000);
}

static void find_it_held(void)
{
    dp_ctx *ctx;
    char who[48];
    use();
    unsetenv("DP_SECRET");
    snprintf(who, sizeof who, "process 0 (its process id is %d)", (int)holder);
    dp_status status = open_world(700, NULL, &ctx);
    CHECK_STATUS(status, me == 0 ? DP_ERR_MISMATCH : DP_ERR_TIMEOUT);
    CHECK_SAYS(dp_last_error(), who);
    CHECK_SAYS(dp_last_error(), use == use_tcp ? "at 127.0.0.1" : "at @test-");
}

static void meet_again(void)
{
    use();
    check_world("dp", NULL);
}

static void run_at_a_held_address(void)
{
    pid_t pids[2];
    nobody_launched_us();
    world = 2;
    port = free_port();
    CHECK_INT(pipe(told), 0);
    for (int p = 0; p < 2; p++)
        pids[p] = start(p, hold_the_address);
    listen_for(2);
    holder = pids[0];
    for (int p = 0; p < 2; p++)
        finish(start(p, find_it_held), p);
    for (int p = 0; p < 2; p++) {
        kill(pids[p], SIGKILL);
        CHECK_INT(waitpid(pids[p], NULL, 0), pids[p]);
    }
    run_world(2, meet_again);
}

TEST(a_job_that_has_met_keeps_its_address)
{
    use = use_tcp;
    run_at_a_held_address();
    use = use_name;
    run_at_a_held_address();
}

/* Process 0 leaves a child behind, which has copies of all that was open. */
static void leave_a_child(void)
{
    dp_ctx *ctx;
    use();
    unsetenv("DP_SECRET");
    CHECK_OK(open_world(0, NULL, &ctx));
    if (me == 0 && fork() == 0) {
        say();
        rest(3000);
        _exit(EXIT_SUCCESS);
    }
    dp_close(ctx);
}

/* What a child has let go of it does not close again: the number may be something else by now. */
static void close_in_a_child(void)
{
    int ended = 0, own[16];
    dp_ctx *ctx;
    use();
    CHECK_OK(open_world(0, NULL, &ctx));
    pid_t pid = me == 0 ? fork() : -1;
    if (pid == 0) {
        for (int i = 0; i < 16; i++)
            own[i] = open("/dev/null", O_RDONLY | O_CLOEXEC);
        dp_close(ctx);
        for (int i = 0; i < 16; i++)
            CHECK(fcntl(own[i], F_GETFD) >= 0);
        _exit(EXIT_SUCCESS);
    }
    if (pid > 0)
        CHECK_INT(waitpid(pid, &ended, 0), pid);
    CHECK_INT(ended, 0);
    check_sum(ctx);
    dp_close(ctx);
}

static void meet_without_a_secret(void)
{
    use();
    unsetenv("DP_SECRET");
    check_world("dp", NULL);
}

TEST(a_child_of_fork_does_not_keep_an_address)
{
    CHECK_INT(pipe(told), 0);
    use = use_name;
    run_world(2, leave_a_child);
    listen_for(1);
    run_world(2, meet_without_a_secret);
}

TEST(a_child_of_fork_closes_nothing_twice)
{
    use = use_name;
    run_world(2, close_in_a_child);
}

/* ---- numbers that come twice ----------------------------------------------------------------- */

static int wrong; /* what the last process takes for its number */

static void one_has_a_wrong_number(void)
{
    dp_ctx *ctx;
    char who[80];
    use();
    if (me == world - 1) {
        rest(200);
        set_number("DP_PROCESS", wrong);
    }
    snprintf(who, sizeof who, "two processes are process %d of 4 at %s", wrong,
             use == use_tcp ? "127.0.0.1:" : "@test-");
    if (me == world - 1 && wrong == 0)
        snprintf(who, sizeof who, "process 0 of 4 is not the only one at");
    CHECK_ERROR(open_world(3000, NULL, &ctx), DP_ERR_MISMATCH, who);
    CHECK_SAYS(dp_last_error(), "DP_SECRET");
}

TEST(a_number_that_comes_twice_is_everybodys_error)
{
    for (int i = 0; i < 4; i++) {
        wrong = i / 2;
        use = i % 2 ? use_name : use_tcp;
        run_world(4, one_has_a_wrong_number);
    }
}

/* ---- processes that end while others come ---------------------------------------------------- */

enum { CROWD = 5 };

static int victim, moment_us, through_boot;

static dp_status work(void)
{
    dp_ctx *ctx;
    const int timeout_ms = (int)(1500 * test_timeout_scale());
    DP_TRY(through_boot ? open_world(timeout_ms, NULL, &ctx) : open_shared(timeout_ms, &ctx));
    all->opened[me] = 1;
    for (;;)
        DP_TRY(dp_barrier(ctx));
}

static void one_ends_soon(void)
{
    use();
    rest(delays[me]);
    if (me == victim) {
        const struct itimerval soon = {.it_value = {.tv_usec = moment_us}};
        signal(SIGALRM, SIG_DFL);
        setitimer(ITIMER_REAL, &soon, NULL);
    }
    all->status[me] = work();
    snprintf(all->text[me], sizeof all->text[me], "%s", dp_last_error());
}

static void run_with_a_victim(uint64_t *seed)
{
    pid_t pids[CROWD];
    char who[2][32];
    nobody_launched_us();
    memset(all, 0, sizeof *all);
    world = CROWD;
    port = free_port();
    victim = (int)(test_random(seed) % CROWD);
    moment_us = 1 + (int)(test_random(seed) % 30000);
    snprintf(who[0], sizeof who[0], "process %d of %d", victim, CROWD);
    snprintf(who[1], sizeof who[1], "(process %d, pid", victim);
    for (int p = 0; p < CROWD; p++)
        delays[p] = (int)(test_random(seed) % 20);
    for (int p = 0; p < CROWD; p++)
        pids[p] = start(p, one_ends_soon);
    for (int p = 0; p < CROWD; p++) {
        if (p == victim)
            CHECK_INT(waitpid(pids[p], NULL, 0), pids[p]);
        else
            finish(pids[p], p);
    }
    for (int p = 0; p < CROWD; p++)
        if (p != victim && strstr(all->text[p], who[0]) == NULL &&
            strstr(all->text[p], who[1]) == NULL)
            test_fail(__FILE__, __LINE__, "process %d of %d ended%s, and process %d says: %s",
                      victim, CROWD, all->opened[p] ? "" : " early", p, all->text[p]);
}

TEST_SLOW(process_that_ends_while_others_connect_is_named, 60)
{
    uint64_t seed = test_seed();
    const char *trials = getenv("TEST_TRIALS");
    share();
    for (int i = 0; i < (trials != NULL ? atoi(trials) : 9); i++) {
        use = i % 3 == 1 ? use_name : use_tcp;
        through_boot = i % 3 == 2;
        run_with_a_victim(&seed);
    }
}

/* Process 1 ends before 3 and 4 come; they come before the others have gone, or a little later. */
static void come_after_the_end(void)
{
    dp_ctx *ctx;
    use();
    if (me == 1) {
        const struct itimerval soon = {.it_value = {.tv_usec = 500000}};
        signal(SIGALRM, SIG_DFL);
        setitimer(ITIMER_REAL, &soon, NULL);
    } else if (me > 2) {
        rest(400 + 250 * (me - 2)); /* when the end has been noticed */
    }
    CHECK_ERROR(open_world(9000, NULL, &ctx), DP_ERR_REMOTE, "process 1 of 5 joined, and ended");
}

static void run_with_late_ones(void)
{
    pid_t pids[CROWD];
    nobody_launched_us();
    world = CROWD;
    port = free_port();
    for (int p = 0; p < CROWD; p++)
        pids[p] = start(p, come_after_the_end);
    for (int p = 0; p < CROWD; p++) {
        if (p == 1)
            CHECK_INT(waitpid(pids[p], NULL, 0), pids[p]);
        else
            finish(pids[p], p);
    }
}

TEST(late_process_gets_the_reason)
{
    use = use_tcp;
    run_with_late_ones();
    use = use_name;
    run_with_late_ones();
}

/* Process 2 comes too late for the first try of the others, and in time for the second. */
static void try_twice(void)
{
    dp_ctx *ctx;
    use();
    if (me == 2)
        rest(1000);
    else
        CHECK_ERROR(open_world(500, NULL, &ctx), DP_ERR_TIMEOUT, "process 2 of 3 did not come");
    if (me == 2 && open_world(0, NULL, &ctx) == DP_OK) { /* it is too late, or just in time */
        check_sum(ctx);
        dp_close(ctx);
        return;
    }
    check_world("dp", NULL);
}

TEST(second_try_connects)
{
    use = use_tcp;
    run_world(3, try_twice);
    use = use_name;
    run_world(3, try_twice);
}

/* A launcher that numbers no jobs is told from another one by its own number: process 1 has another
   parent here. */
static void have_two_launchers(void)
{
    dp_ctx *ctx;
    int status = 0;
    launched_by(&launchers[3], me, world);
    pid_t pid = me == 1 ? fork() : 0;
    if (pid == 0) {
        CHECK_STATUS(open_world(300, NULL, &ctx), DP_ERR_TIMEOUT);
        exit(EXIT_SUCCESS);
    }
    CHECK_INT(waitpid(pid, &status, 0), pid);
    CHECK_INT(status, 0);
}

TEST(launchers_without_numbers_are_told_apart)
{
    run_world(2, have_two_launchers);
}

/* ---- squatters, secrets ---------------------------------------------------------------------- */

#if defined(__linux__)
enum { NAMES = 8 };

/* The name of a socket inside this machine, "" if that inode is none. */
static void name_of(unsigned long inode, char *name, size_t room)
{
    char line[256];
    FILE *file = fopen("/proc/net/unix", "r");
    CHECK(file != NULL);
    name[0] = '\0';
    while (fgets(line, sizeof line, file) != NULL) {
        unsigned long its = 0;
        char path[128] = "";
        if (sscanf(line, "%*s %*s %*s %*s %*s %*s %lu %127s", &its, path) == 2 && its == inode &&
            path[0] == '@')
            snprintf(name, room, "%s", path + 1);
    }
    fclose(file);
}

/* Those under which a process can be found. */
static int names_held_by(pid_t pid, char names[NAMES][64])
{
    int count = 0;
    for (int fd = 0; fd < 64 && count < NAMES; fd++) {
        char path[64], to[64] = "";
        unsigned long inode = 0;
        snprintf(path, sizeof path, "/proc/%d/fd/%d", (int)pid, fd);
        if (readlink(path, to, sizeof to - 1) <= 0 || sscanf(to, "socket:[%lu]", &inode) != 1)
            continue;
        name_of(inode, names[count], sizeof names[0]);
        count += names[count][0] != '\0';
    }
    return count;
}

static char squatted[64];

/* As another user, until it is killed. */
static void squat(void)
{
    struct sockaddr_un at = {.sun_family = AF_UNIX};
    size_t bytes = strlen(squatted);
    int fd = socket(AF_UNIX, SOCK_STREAM, 0);
    memcpy(at.sun_path + 1, squatted, bytes);
    CHECK_INT(setuid(65534), 0);
    CHECK_INT(bind(fd, (struct sockaddr *)&at,
                   (socklen_t)(offsetof(struct sockaddr_un, sun_path) + 1 + bytes)),
              0);
    CHECK_INT(listen(fd, 16), 0);
    say();
    rest(60000);
}

static void wait_for_ever(void)
{
    dp_ctx *ctx;
    use();
    unsetenv("DP_SECRET");
    (void)!open_world(60000, NULL, &ctx);
}

static void meet_a_squatter(void)
{
    dp_ctx *ctx;
    use();
    unsetenv("DP_SECRET");
    bool place = squatted[strlen(squatted) - 2] != '-'; /* where the others look for it, too */
    if (me == 0)
        CHECK_ERROR(open_world(2000, NULL, &ctx), DP_ERR_MISMATCH, "a process of user 65534");
    else
        CHECK_ERROR(open_world(300, NULL, &ctx), DP_ERR_TIMEOUT,
                    place ? "its place is held by another user" : "was not found at @test-");
}

TEST(a_squatter_is_told_from_a_second_job)
{
    char names[NAMES][64];
    int count = 0;
    if (geteuid() != 0)
        SKIP("only root may become another user");
    nobody_launched_us();
    CHECK_INT(pipe(told), 0);
    use = use_name;
    world = 2;
    pid_t first = start(0, wait_for_ever);
    for (int i = 0; i < 500 && count < 2; i++) {
        rest(10);
        count = names_held_by(first, names);
    }
    kill(first, SIGKILL);
    CHECK_INT(waitpid(first, NULL, 0), first);
    CHECK_INT(count, 2);
    for (int i = 0; i < count; i++) {
        strcpy(squatted, names[i]);
        pid_t squatter = start(0, squat);
        listen_for(1);
        for (int p = 0; p < 2; p++)
            finish(start(p, meet_a_squatter), p);
        kill(squatter, SIGKILL);
        CHECK_INT(waitpid(squatter, NULL, 0), squatter);
    }
}
#endif

#if defined(__linux__)
/* ---- floods ---------------------------------------------------------------------------------- */

enum { STRANGERS = 4, KEPT = 100 };

typedef enum manner { SILENT, NOISY, HASTY } manner; /* HASTY: it hangs up at once */

static struct sockaddr_storage targets[NAMES];
static socklen_t target_bytes[NAMES];
static int target_count, pause_ms, *calls;

static void aim_at_name(const char *name)
{
    struct sockaddr_un at = {.sun_family = AF_UNIX};
    size_t bytes = strlen(name);
    memcpy(at.sun_path + 1, name, bytes);
    memcpy(&targets[target_count], &at, sizeof at);
    target_bytes[target_count++] = (socklen_t)(offsetof(struct sockaddr_un, sun_path) + 1 + bytes);
}

static void aim_at_port(void)
{
    struct sockaddr_in at = {.sin_family = AF_INET,
                             .sin_port = htons((uint16_t)port),
                             .sin_addr = {htonl(INADDR_LOOPBACK)}};
    close(call_patiently(port));
    memcpy(&targets[target_count], &at, sizeof at);
    target_bytes[target_count++] = sizeof at;
}

/* Where process 0 listens, once it does: at a port, or under two names. */
static void aim_at(pid_t first)
{
    char names[NAMES][64];
    int count = 0;
    target_count = 0;
    if (use == use_tcp)
        aim_at_port();
    for (int i = 0; use == use_name && i < 500 && count < 2; i++) {
        rest(10);
        count = names_held_by(first, names);
    }
    for (int i = 0; i < count; i++)
        aim_at_name(names[i]);
    CHECK(target_count > 0);
}

/* Connections that end at once do not linger. A listener with no room is no reason to wait. */
static int call_target(int i)
{
    const struct linger none = {.l_onoff = 1};
    int fd = socket(targets[i].ss_family, SOCK_STREAM | SOCK_NONBLOCK, 0);
    setsockopt(fd, SOL_SOCKET, SO_LINGER, &none, sizeof none);
    if (connect(fd, (struct sockaddr *)&targets[i], target_bytes[i]) == 0 || errno == EINPROGRESS)
        return fd;
    close(fd);
    return -1;
}

/* One of the strangers, until it is killed. Every pause_ms it calls as often as it keeps calls. */
static void pour(void)
{
    static const char noise[40] = "GET / HTTP/1.1";
    int kept[KEPT];
    memset(kept, -1, sizeof kept);
    for (unsigned n = 0;; n++) {
        int *place = &kept[n % KEPT], fd = call_target((int)(n % (unsigned)target_count));
        if (fd >= 0 && me % 3 == NOISY)
            send(fd, noise, sizeof noise, MSG_NOSIGNAL);
        calls[me]++;
        if (*place >= 0)
            close(*place);
        if (me % 3 == HASTY && fd >= 0)
            close(fd);
        *place = me % 3 == HASTY ? -1 : fd;
        if (pause_ms > 0 && n % KEPT == 0)
            rest(pause_ms);
    }
}

static void begin_flood(pid_t first, pid_t strangers[STRANGERS])
{
    calls = mmap(NULL, STRANGERS * sizeof *calls, PROT_READ | PROT_WRITE,
                 MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    CHECK(calls != MAP_FAILED);
    aim_at(first);
    for (int i = 0; i < STRANGERS; i++)
        strangers[i] = start(i, pour);
}

/* Each stranger has called often, however little time a loaded machine had for it. */
static void end_flood(const pid_t strangers[STRANGERS])
{
    for (int i = 0; i < STRANGERS; i++) {
        kill(strangers[i], SIGKILL);
        CHECK_INT(waitpid(strangers[i], NULL, 0), strangers[i]);
        CHECK(calls[i] > 30);
    }
}

/* The others do not come. Who comes too late is told why for a second. */
static void wait_in_a_flood(void)
{
    dp_ctx *ctx;
    struct timespec began, ended;
    use();
    clock_gettime(CLOCK_MONOTONIC, &began);
    CHECK_ERROR(open_world(500, NULL, &ctx), DP_ERR_TIMEOUT, "processes 1 and 2 of 3 did not come");
    clock_gettime(CLOCK_MONOTONIC, &ended);
    double took = (double)(ended.tv_sec - began.tv_sec) +
                  1e-9 * (double)(ended.tv_nsec - began.tv_nsec);
    CHECK(took < 1.5 + 2 * test_timeout_scale());
}

static void run_alone_in_a_flood(void (*where)(void))
{
    pid_t strangers[STRANGERS];
    nobody_launched_us();
    use = where;
    world = 3;
    port = free_port();
    pause_ms = 0;
    pid_t first = start(0, wait_in_a_flood);
    begin_flood(first, strangers);
    finish(first, 0);
    end_flood(strangers);
}

TEST_SLOW(a_flood_delays_no_time_out, 20)
{
    run_alone_in_a_flood(use_tcp);
    run_alone_in_a_flood(use_name);
}

static void run_in_a_flood(void (*where)(void))
{
    pid_t strangers[STRANGERS], pids[3];
    nobody_launched_us();
    use = where;
    world = 3;
    port = free_port();
    pause_ms = use == use_name ? 0 : 20; /* a name has a queue, which may be full all the time */
    pids[0] = start(0, meet_again);
    begin_flood(pids[0], strangers);
    rest(200);
    for (int p = 1; p < world; p++)
        pids[p] = start(p, meet_again);
    for (int p = 0; p < world; p++)
        finish(pids[p], p);
    end_flood(strangers);
}

TEST_SLOW(a_flood_keeps_nobody_out, 20)
{
    run_in_a_flood(use_tcp);
    run_in_a_flood(use_name);
}
#endif

/* Inside a machine another secret is another place. */
static void one_has_another_secret(void)
{
    dp_ctx *ctx;
    use_name();
    set("DP_SECRET", me == 0 ? "friend" : "foe");
    CHECK_ERROR(open_world(300, NULL, &ctx), DP_ERR_TIMEOUT, "another DP_SECRET");
}

TEST(another_secret_is_among_the_causes)
{
    run_world(2, one_has_another_secret);
}
