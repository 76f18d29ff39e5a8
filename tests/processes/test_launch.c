/* test_launch.c - what launchers say, how processes meet, and dp_spawn: all with real processes. */

#if defined(__linux__)
#define _GNU_SOURCE /* affinity masks */
#endif

#include <arpa/inet.h>
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <poll.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>
#include "process.h"
#include "examples/custom_device.h"
#include "world.h"

/* ---- the environment ------------------------------------------------------------------------- */

static void check_launcher(const char *name)
{
    dp_ctx *ctx;
    dp_info info;
    CHECK_OK(dp_open(&(dp_config){.device_count = 1}, &ctx));
    CHECK_OK(dp_info_get(ctx, &info));
    CHECK_STR(info.launcher, name);
    CHECK_INT(info.process, 0);
    CHECK_INT(info.process_count, 1);
    CHECK_INT(info.machine_process, 0);
    CHECK_INT(info.machine_process_count, 1);
    dp_close(ctx);
}

static void check_refused(dp_status status, const char *part, const char *more)
{
    dp_ctx *ctx = NULL;
    CHECK_ERROR(dp_open(&(dp_config){.device_count = 1, .timeout_ms = 200}, &ctx), status, part);
    CHECK_ERROR(dp_open(&(dp_config){.device_count = 1, .timeout_ms = 200}, &ctx), status, more);
    CHECK(strncmp(dp_last_error(), "dp_open: ", 9) == 0);
    CHECK(ctx == NULL);
}

TEST(without_a_launcher_a_process_is_alone)
{
    nobody_launched_us();
    check_launcher("none");
}

TEST(every_launcher_is_recognized)
{
    for (int i = 0; i < LAUNCHERS; i++) {
        nobody_launched_us();
        launched_by(&launchers[i], 0, 1);
        check_launcher(launchers[i].name);
        unsetenv("DP_ADDR"); /* who is alone needs to know of no address */
        unsetenv("MASTER_ADDR");
        check_launcher(launchers[i].name);
    }
}

TEST(the_first_of_the_table_decides)
{
    nobody_launched_us();
    for (int i = LAUNCHERS; i-- > 0;) {
        launched_by(&launchers[i], 0, 1);
        check_launcher(launchers[i].name);
    }
    set("DP_LAUNCH", "mpich");
    check_launcher("mpich");
    set("DP_LAUNCH", "none");
    check_launcher("none");
}

/* Of those behind it nothing is even read. */
TEST(variables_of_later_launchers_are_not_read)
{
    nobody_launched_us();
    launched_by(&launchers[0], 0, 1);
    set("WORLD_SIZE", "many");
    set("PMI_SIZE", "-3");
    check_launcher("dp");
}

TEST(launch_says_what_it_knows)
{
    nobody_launched_us();
    set("DP_LAUNCH", "mpirun");
    check_refused(DP_ERR_INVALID, "DP_LAUNCH", "'mpirun'");
    set("DP_LAUNCH", "torchrun");
    check_refused(DP_ERR_INVALID, "RANK", "WORLD_SIZE");
}

TEST(numbers_that_are_none)
{
    static const char *const bad[] = {"-1", "x", "1x", " 1", "+1", "1.0", "99999999999999999999"};
    for (int i = 0; i < LAUNCHERS; i++) {
        const launcher *by = &launchers[i];
        const char *const names[] = {by->process, by->count, by->local, by->local_count};
        for (int n = 0; n < 4 && names[n] != NULL; n++) {
            for (size_t b = 0; b < sizeof bad / sizeof bad[0]; b++) {
                char quoted[40];
                nobody_launched_us();
                launched_by(by, 0, 2);
                set(names[n], bad[b]);
                snprintf(quoted, sizeof quoted, "'%s'", bad[b]);
                check_refused(DP_ERR_INVALID, names[n], quoted);
            }
        }
        nobody_launched_us();
        launched_by(by, 0, 2);
        set(by->count, "0");
        check_refused(DP_ERR_INVALID, by->count, "'0'");
    }
}

TEST(half_a_set)
{
    for (int i = 0; i < LAUNCHERS; i++) {
        const launcher *by = &launchers[i];
        const char *const names[] = {by->process, by->count, by->local, by->local_count};
        for (int n = 0; n < 4; n++) {
            if (names[n] == NULL || names[n ^ 1] == NULL) {
                continue; /* Slurm does not say how many are on a machine */
            }
            nobody_launched_us();
            launched_by(by, 0, 2);
            unsetenv(names[n]);
            check_refused(DP_ERR_INVALID, names[n], names[n ^ 1]);
            set(names[n], ""); /* as good as nothing */
            check_refused(DP_ERR_INVALID, names[n], names[n ^ 1]);
        }
    }
}

TEST(numbers_that_contradict_each_other)
{
    for (int i = 0; i < LAUNCHERS; i++) {
        const launcher *by = &launchers[i];
        nobody_launched_us();
        launched_by(by, 2, 2);
        check_refused(DP_ERR_INVALID, by->process, by->count);
        nobody_launched_us();
        launched_by(by, 0, 2);
        set(by->local, "2");
        check_refused(DP_ERR_INVALID, by->local, "2");
        if (by->local_count != NULL) {
            set(by->local_count, "3");
            check_refused(DP_ERR_INVALID, by->local_count, by->count);
        }
    }
}

TEST(addresses_that_are_none)
{
    static const char *const bad[] = {"host",   "host:",     ":80",    "host:0", "host:65536",
                                      "host:x", "host:80 ",  "[::1]",  "[]:80",  "@",
                                      "::",     "host:80:x", "host:-1"};
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++) {
        nobody_launched_us();
        launched_by(&launchers[0], 0, 2);
        set("DP_ADDR", bad[i]);
        check_refused(DP_ERR_INVALID, "DP_ADDR", bad[i]);
    }
    unsetenv("DP_ADDR");
    check_refused(DP_ERR_INVALID, "DP_ADDR", "is not set");
    nobody_launched_us();
    launched_by(&launchers[1], 0, 2);
    set("MASTER_PORT", "65535"); /* the next one is no port */
    check_refused(DP_ERR_INVALID, "MASTER_PORT", "65535");
    unsetenv("MASTER_PORT");
    check_refused(DP_ERR_INVALID, "MASTER_PORT", "is not set");
    set("MASTER_PORT", "29500");
    unsetenv("MASTER_ADDR");
    check_refused(DP_ERR_INVALID, "MASTER_ADDR", "is not set");
}

TEST(ports_that_are_none)
{
    static const char *const bad[] = {"x",       "0",   "65536", "20000-",      "-20000",
                                      "20000-x", "2-1", "0-9",   "1-65536",     " 20000",
                                      "20000 ",  "1,2", "1-2-3", "20000:20010", "99999999999"};
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++) {
        char quoted[60];
        nobody_launched_us();
        launched_by(&launchers[i % LAUNCHERS], 0, 2);
        set("DP_PORTS", bad[i]);
        snprintf(quoted, sizeof quoted, "DP_PORTS is '%s'", bad[i]);
        check_refused(DP_ERR_INVALID, quoted, "20000-20031");
    }
}

/* There is one at which nobody else is met. */
TEST(interfaces_that_are_none)
{
    static const char *const bad[] = {"no-such-interface", "1.2.3.4", "lo (", "127.0.0.1 "};
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++) {
        char quoted[60];
        nobody_launched_us();
        launched_by(&launchers[1], 0, 2);
        set("DP_INTERFACE", bad[i]);
        snprintf(quoted, sizeof quoted, "DP_INTERFACE is '%s'", bad[i]);
        check_refused(DP_ERR_INVALID, quoted, " (127.0.0.1)");
    }
}

/* mpirun over several machines does not say where process 0 is. */
TEST(several_machines_want_an_address)
{
    for (int i = 2; i < 4; i++) {
        nobody_launched_us();
        launched_by(&launchers[i], 0, 4);
        set(launchers[i].local_count, "2");
        check_refused(DP_ERR_UNSUPPORTED, "DP_ADDR=host:port", launchers[i].name);
    }
}

/* salloc and sbatch set all but the step; the steps in which their own shells run are numbered
   from the end. */
TEST(slurm_without_a_step_is_no_launcher)
{
    nobody_launched_us();
    launched_by(&launchers[4], 0, 4);
    unsetenv("SLURM_STEP_ID");
    check_launcher("none");
    set("SLURM_STEP_ID", "4294967290");
    check_launcher("none");
    set("SLURM_STEP_ID", "4294967291");
    check_launcher("none");
}

TEST(a_config_may_want_no_other_process)
{
    dp_ctx *ctx;
    dp_info info;
    nobody_launched_us();
    launched_by(&launchers[0], 1, 4);
    CHECK_OK(dp_open(&(dp_config){.device_count = 1, .local_only = true}, &ctx));
    CHECK_OK(dp_info_get(ctx, &info));
    CHECK_STR(info.launcher, "none");
    CHECK_INT(info.process_count, 1);
    dp_close(ctx);
}

static dp_status gather_nothing(const void *in, void *out, size_t bytes_each, void *user)
{
    (void)in, (void)out, (void)bytes_each, (void)user;
    return DP_ERR_USER;
}

TEST(a_bootstrap_of_ones_own_wins)
{
    dp_ctx *ctx;
    dp_info info;
    dp_config config = {.device_count = 1,
                        .bootstrap = {.all_gather = gather_nothing, .process_count = 1}};
    nobody_launched_us();
    launched_by(&launchers[0], 1, 4);
    CHECK_OK(dp_open(&config, &ctx));
    CHECK_OK(dp_info_get(ctx, &info));
    CHECK_STR(info.launcher, "bootstrap");
    CHECK_INT(info.process_count, 1);
    dp_close(ctx);
    config.local_only = true;
    CHECK_ERROR(dp_open(&config, &ctx), DP_ERR_INVALID, "local_only");
}

static void keep_verdict(const dp_log_record *record, void *user)
{
    if (strncmp(record->text, "launcher: ", 10) == 0) {
        snprintf(user, 100, "%s", record->text);
    }
}

TEST(the_verdict_is_logged)
{
    char verdict[100] = "";
    dp_ctx *ctx;
    const dp_config config = {.device_count = 1, .log = {.fn = keep_verdict, .user = verdict}};
    nobody_launched_us();
    launched_by(&launchers[3], 0, 1);
    CHECK_OK(dp_open(&config, &ctx));
    CHECK_STR(verdict, "launcher: mpich, process 0 of 1, 0 of 1 on this machine");
    dp_close(ctx);
}

/* ---- worlds of several processes ------------------------------------------------------------- */

static void meet_over_tcp(void)
{
    use_tcp();
    check_world("dp", NULL);
}

static void meet_by_name(void)
{
    use_name();
    check_world("dp", NULL);
}

TEST(processes_meet_over_tcp)
{
    for (int count = 2; count <= 8; count += count < 5 ? 1 : 3) {
        run_world(count, meet_over_tcp);
    }
}

TEST(processes_meet_by_name)
{
    for (int count = 2; count <= 8; count += count < 5 ? 1 : 3) {
        run_world(count, meet_by_name);
    }
}

static void meet_under_a_name_of_localhost(void)
{
    char address[40];
    use_tcp();
    snprintf(address, sizeof address, me % 2 ? "localhost:%d" : "127.0.0.1:%d", port);
    set("DP_ADDR", address);
    check_world("dp", NULL);
}

TEST(names_and_numbers_of_a_host_are_one)
{
    run_world(3, meet_under_a_name_of_localhost);
}

static void meet_over_ipv6(void)
{
    char address[40];
    use_tcp();
    snprintf(address, sizeof address, "[::1]:%d", port);
    set("DP_ADDR", address);
    check_world("dp", NULL);
}

TEST(addresses_with_colons_have_brackets)
{
    struct sockaddr_in6 at = {.sin6_family = AF_INET6, .sin6_addr = IN6ADDR_LOOPBACK_INIT};
    int fd = socket(AF_INET6, SOCK_STREAM, 0);
    if (fd < 0 || bind(fd, (struct sockaddr *)&at, sizeof at) != 0) {
        SKIP("no IPv6 on this machine");
    }
    close(fd);
    run_world(3, meet_over_ipv6);
}

static void meet_on_all_interfaces(void)
{
    char host[200], address[240];
    use_tcp();
    if (gethostname(host, sizeof host) == 0) {
        snprintf(address, sizeof address, "%.190s:%d", host, port);
        set("DP_ADDR", address);
    }
    check_world("dp", NULL);
}

TEST(a_host_has_a_name)
{
    char host[200];
    CHECK_INT(gethostname(host, sizeof host), 0);
    run_world(4, meet_on_all_interfaces);
}

/* ---- as launchers start them ----------------------------------------------------------------- */

static void meet_as_torchrun(void)
{
    launched_by(&launchers[1], me, world);
    set_number("MASTER_PORT", port);
    set("TORCHELASTIC_RUN_ID", "none");
    check_world("torchrun", NULL);
}

/* Its own store sits on the port, and something else that never answers on the next one. */
TEST(torchrun_keeps_its_port)
{
    nobody_launched_us();
    port = free_port();
    int store = listen_at(port), other = listen_at(port + 1), kept = port;
    pid_t pids[2];
    world = 2;
    for (int p = 0; p < world; p++) {
        port = kept;
        pids[p] = start(p, meet_as_torchrun);
    }
    for (int p = 0; p < world; p++) {
        finish(pids[p], p);
    }
    CHECK_INT(poll(&(struct pollfd){.fd = store, .events = POLLIN}, 1, 0), 0); /* nobody called */
    close(store);
    close(other);
}

static void meet_as_openmpi(void)
{
    launched_by(&launchers[2], me, world);
    set_number("PMIX_NAMESPACE", port);
    check_world("openmpi", NULL);
}

/* Nothing in the environment tells two runs apart: the launcher's own n does. */
static void meet_as_mpich(void)
{
    launched_by(&launchers[3], me, world);
    check_world("mpich", NULL);
}

static void meet_as_slurm(void)
{
    launched_by(&launchers[4], me, world);
    set_number("SLURM_JOB_ID", port);
    set("SLURM_STEP_NUM_NODES", "1");
    set("SLURM_STEP_NODELIST", "node17");
    check_world("slurm", NULL);
}

/* Its list of machines names the first host. */
static void meet_as_slurm_on_a_list(void)
{
    launched_by(&launchers[4], me, world);
    set_number("SLURM_JOB_ID", port);
    set("SLURM_STEP_NUM_NODES", "2");
    set("SLURM_STEP_NODELIST", "local[host-zone,far],elsewhere");
    check_world("slurm", NULL);
}

TEST(mpirun_and_srun_say_no_address)
{
    run_world(4, meet_as_openmpi);
    run_world(4, meet_as_mpich);
    run_world(4, meet_as_slurm);
    run_world(3, meet_as_slurm_on_a_list);
}

/* ---- ports ----------------------------------------------------------------------------------- */

static void use_ports(int first, int last)
{
    char text[40];
    snprintf(text, sizeof text, first == last ? "%d" : "%d-%d", first, last);
    set("DP_PORTS", text);
}

/* One is process 0's; process 2, which process 3 connects to, has the other. */
static void meet_as_slurm_at_two_ports(void)
{
    use_ports(port, port + 1);
    meet_as_slurm_on_a_list();
}

static void meet_as_slurm_at_many_ports(void)
{
    use_ports(port, port + 9);
    meet_as_slurm_on_a_list();
}

static void meet_as_slurm_at_no_port(void)
{
    char taken[60];
    dp_ctx *ctx;
    int fd = listen_at(port);
    use_ports(port, port);
    launched_by(&launchers[4], me, world);
    set("SLURM_STEP_NODELIST", "localhost,elsewhere");
    snprintf(taken, sizeof taken, "its ports %d to %d are taken", port, port);
    CHECK_ERROR(open_world(500, NULL, &ctx), DP_ERR_INVALID, taken);
    close(fd);
}

TEST(slurms_port_is_one_of_those_that_there_may_be)
{
    run_world_at(own_port(), 4, meet_as_slurm_at_two_ports);
    run_world_at(own_port(), 9, meet_as_slurm_at_many_ports);
    nobody_launched_us();
    world = 2;
    port = own_port();
    finish(start(0, meet_as_slurm_at_no_port), 0);
}

/* Those that process 0 might take are behind it; of the others, one is left. */
static void meet_at_the_port_that_is_left(void)
{
    use_tcp();
    use_ports(port + 8, port + 9);
    check_world("dp", NULL);
}

static void find_no_port(void)
{
    dp_ctx *ctx;
    int ms = (int)(700 * test_timeout_scale());
    use_tcp();
    use_ports(port + 8, port + 9);
    if (me == 2) {
        CHECK_ERROR(open_world(ms, NULL, &ctx), DP_ERR_INVALID,
                    "dp_open: process 2 cannot listen: the ports of DP_PORTS");
    } else {
        CHECK_ERROR(open_world(ms, NULL, &ctx), DP_ERR_TIMEOUT, " of 4 did not ");
    }
}

static void run_at_a_port_that_is_left(void)
{
    int first = own_port(), fds[2];
    fds[0] = listen_at(first + 9);
    run_world_at(first, 4, meet_at_the_port_that_is_left);
    fds[1] = listen_at(first + 8);
    run_world_at(first, 4, find_no_port);
    close(fds[0]);
    close(fds[1]);
}

TEST(processes_that_others_connect_to_keep_to_the_ports)
{
    finish(start(0, run_at_a_port_that_is_left), 0);
}

/* What the machines' memory would carry goes over TCP, to each process's one port. */
static void check_by_tcp(int machine_count)
{
    dp_ctx *ctx;
    dp_info info;
    int64_t own = me + 1, left = -1;
    CHECK_OK(dp_open(&(dp_config){.device_count = 1}, &ctx));
    CHECK_OK(dp_info_get(ctx, &info));
    CHECK_STR(info.coll_backend, "TCP");
    CHECK_INT(info.machine_count, machine_count);
    dp_message both[] = {{.tensor = dp_wrap(&own, DP_I64, DP_SHAPE(1)), .peer = (me + 1) % world},
                         {.tensor = dp_wrap(&left, DP_I64, DP_SHAPE(1)),
                          .peer = (me + world - 1) % world,
                          .receives = true}};
    CHECK_OK(dp_messages_begin(ctx, both, 2));
    CHECK_OK(dp_messages_end(ctx, both, 2));
    CHECK_INT(left, (me + world - 1) % world + 1);
    CHECK_OK(dp_all_reduce_i64(ctx, &own, 1, DP_OP_SUM));
    CHECK_INT(own, world * (world + 1) / 2);
    dp_close(ctx);
}

static void meet_by_tcp_at_a_port_each(void)
{
    use_tcp();
    use_ports(port + 7, port + 9);
    set_number("DP_MACHINE", me);
    set("DP_INTERFACE", "127.");
    check_by_tcp(3);
}

TEST(one_port_each_is_enough_for_tcp)
{
    run_world_at(own_port(), 3, meet_by_tcp_at_a_port_each);
}

/* ---- the interface --------------------------------------------------------------------------- */

static void meet_on_an_interface(void)
{
    use_tcp();
    set("DP_INTERFACE", me % 2 ? "127." : "l"); /* lo, or lo0 */
    check_world("dp", NULL);
}

TEST(processes_meet_on_an_interface)
{
    run_world(7, meet_on_an_interface);
}

/* Each behind a shell, as it were; what they have in common is who made their connections. */
static void meet_behind_a_shell(void)
{
    int status = 0;
    pid_t pid = fork();
    if (pid == 0) {
        meet_as_mpich();
        exit(EXIT_SUCCESS);
    }
    CHECK_INT(waitpid(pid, &status, 0), pid);
    CHECK_INT(status, 0);
}

TEST(mpich_starts_shells_too)
{
    int fds[2];
    pid_t pids[3];
    nobody_launched_us();
    world = 3;
    CHECK_INT(socketpair(AF_UNIX, SOCK_STREAM, 0, fds), 0);
    set_number("PMI_FD", fds[0]);
    for (int p = 0; p < world; p++) {
        pids[p] = start(p, meet_behind_a_shell);
    }
    for (int p = 0; p < world; p++) {
        finish(pids[p], p);
    }
}

/* ---- two machines ---------------------------------------------------------------------------- */

#if defined(__linux__)
static char hosts[2][24]; /* network namespaces, each of which stands for a machine */

DP_PRINTF(1, 2) static bool run_ip(const char *format, ...)
{
    char command[200], words[160];
    va_list args;
    va_start(args, format);
    vsnprintf(words, sizeof words, format, args);
    va_end(args);
    snprintf(command, sizeof command, "ip %s 2>/dev/null", words);
    return system(command) == 0;
}

/* A second network joins them, whose interface has a longer name. */
static bool make_fast_network(void)
{
    return run_ip("link add v2 netns %s type veth peer name v2 netns %s", hosts[0], hosts[1]) &&
           run_ip("-n %s addr add 10.80.0.1/24 dev v2", hosts[0]) &&
           run_ip("-n %s addr add 10.80.0.2/24 dev v2", hosts[1]) &&
           run_ip("-n %s link set v2 up", hosts[0]) && run_ip("-n %s link set v2 up", hosts[1]);
}

static bool make_hosts(void)
{
    for (int i = 0; i < 2; i++) {
        snprintf(hosts[i], sizeof hosts[i], "dp%c%d", 'a' + i, (int)getpid());
        if (!run_ip("netns add %s", hosts[i]) || !run_ip("-n %s link set lo up", hosts[i])) {
            return false;
        }
    }
    return make_fast_network() &&
           run_ip("link add v netns %s type veth peer name v netns %s", hosts[0], hosts[1]) &&
           run_ip("-n %s addr add 10.79.0.1/24 dev v", hosts[0]) &&
           run_ip("-n %s addr add 10.79.0.2/24 dev v", hosts[1]) &&
           run_ip("-n %s link set v up", hosts[0]) && run_ip("-n %s link set v up", hosts[1]);
}

static void enter_host(int host)
{
    char path[64];
    snprintf(path, sizeof path, "/run/netns/%s", hosts[host]);
    int fd = open(path, O_RDONLY);
    CHECK(fd >= 0 && setns(fd, CLONE_NEWNET) == 0);
    close(fd);
    set("DP_MACHINE", hosts[host]);
}

/* A group of so many processes, on one or both. */
static void check_group(dp_ctx *ctx, int which, int processes, int machines)
{
    dp_ctx *group;
    dp_info info;
    int64_t count = 1;
    CHECK_OK(dp_open_group(ctx, which, NULL, &group));
    CHECK_OK(dp_info_get(group, &info));
    CHECK_INT(info.process_count, processes);
    CHECK_INT(info.machine_count, machines);
    CHECK_OK(dp_all_reduce_i64(group, &count, 1, DP_OP_SUM));
    CHECK_INT(count, processes);
    dp_close(group);
}

/* With what there is, which is TCP. */
static dp_ctx *open_across(void)
{
    enum { MUCH = 200000 };
    static int32_t numbers[MUCH];
    const dp_part part = {.send = numbers, .recv = numbers};
    int next = (me + 1) % world, before = (me + world - 1) % world;
    dp_ctx *ctx;
    dp_info info;
    CHECK_OK(dp_open(&(dp_config){.device_count = 1}, &ctx));
    CHECK_OK(dp_info_get(ctx, &info));
    CHECK_STR(info.coll_backend, "TCP");
    for (int i = 0; i < MUCH; i++)
        numbers[i] = me + i;
    CHECK_OK(dp_all_reduce(ctx, &part, MUCH, DP_I32, DP_OP_MIN));
    for (int i = 0; i < MUCH; i++)
        CHECK_INT(numbers[i], i);
    dp_message both[] = {{.tensor = dp_wrap(&me, DP_I32, 0, NULL), .peer = next},
                         {.tensor = dp_wrap(numbers, DP_I32, 0, NULL), .peer = before}};
    both[1].receives = true;
    CHECK_OK(dp_messages_begin(ctx, both, 2));
    CHECK_OK(dp_messages_end(ctx, both, 2));
    CHECK_INT(numbers[0], before);
    return ctx;
}

/* Processes take turns, so that parents and children in the tree are on different machines. */
static void meet_across(void)
{
    dp_ctx *ctx;
    dp_info info;
    enter_host(me % 2);
    launched_by(&launchers[1], me, world);
    unsetenv("LOCAL_RANK");
    unsetenv("LOCAL_WORLD_SIZE");
    set("MASTER_ADDR", "10.79.0.1");
    ctx = open_across();
    CHECK_OK(dp_info_get(ctx, &info));
    CHECK_INT(info.machine_process, me / 2);
    CHECK_INT(info.machine_process_count, (world + 1 - me % 2) / 2);
    CHECK_INT(info.machine, me % 2);
    CHECK_INT(info.machine_count, 2);
    check_sum(ctx);
    check_group(ctx, info.machine, info.machine_process_count, 1);
    check_group(ctx, me < 3, me < 3 ? 3 : world - 3, 2); /* whose first is on the second machine */
    check_group(ctx, me / 2 + 7, me == world - 1 ? 1 : 2, me == world - 1 ? 1 : 2);
    dp_close(ctx);
}

static void meet_in_vain(void)
{
    dp_ctx *ctx;
    enter_host(me % 2);
    use_name();
    if (me == 1) {
        CHECK_ERROR(open_world(500, NULL, &ctx), DP_ERR_TIMEOUT, "DP_ADDR=host:port");
    }
}

/* Whoever comes there hears nothing. */
static void hold_ports(int host, const char *address, int first, int count)
{
    enter_host(host);
    for (int i = 0; i < count; i++) {
        struct sockaddr_in at = {.sin_family = AF_INET, .sin_port = htons((uint16_t)(first + i))};
        int fd = socket(AF_INET, SOCK_STREAM, 0), yes = 1;
        CHECK_INT(inet_pton(AF_INET, address, &at.sin_addr), 1);
        setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &yes,
                   sizeof yes); /* ends of the last test linger */
        CHECK(fd >= 0 && bind(fd, (struct sockaddr *)&at, sizeof at) == 0 && listen(fd, 4) == 0);
    }
}

/* Processes 2 and 4, which others connect to, are on the second host. */
static void meet_on_the_fast_network(void)
{
    dp_ctx *ctx;
    enter_host(me != 0 && me % 2 == 0);
    launched_by(&launchers[1], me, world);
    unsetenv("LOCAL_RANK");
    unsetenv("LOCAL_WORLD_SIZE");
    set("MASTER_ADDR", "10.79.0.1");
    set("DP_PORTS", "7000-7015");
    set("DP_INTERFACE", me % 2 ? "10.80." : "v2");
    ctx = open_across();
    check_sum(ctx);
    check_group(ctx, me >= 2, me >= 2 ? 5 : 2, me >= 2 ? 2 : 1); /* 2 is the first of five */
    dp_close(ctx);
}

/* Process 0 listens at its own address alone, if that is of the interface. "v" is one, and begins
   the name of the other. */
static void meet_at_an_address(void)
{
    dp_ctx *ctx;
    enter_host(me % 2);
    launched_by(&launchers[0], me, world);
    unsetenv("DP_LOCAL_PROCESS");
    unsetenv("DP_LOCAL_PROCESS_COUNT");
    set("DP_ADDR", "10.79.0.1:7000");
    set("DP_INTERFACE", "v");
    ctx = open_across();
    check_sum(ctx);
    dp_close(ctx);
}

static void meet_by_tcp(void)
{
    enter_host(me % 2);
    launched_by(&launchers[1], me, world);
    unsetenv("LOCAL_RANK");
    unsetenv("LOCAL_WORLD_SIZE");
    set("MASTER_ADDR", "10.79.0.1");
    set("DP_PORTS", "7100-7103");
    check_by_tcp(2);
}

static void run_across(void)
{
    run_world(4, meet_by_tcp);
    run_world(7, meet_across);
    run_world(2, meet_in_vain);
    hold_ports(1, "10.79.0.2", 7000, 16);
    run_world(7, meet_on_the_fast_network);
    hold_ports(0, "10.80.0.1", 7000, 8);
    run_world(4, meet_at_an_address);
}

TEST(two_machines)
{
    int status = -1;
    if (geteuid() != 0 || !make_hosts()) {
        run_ip("netns del %s", hosts[0]);
        run_ip("netns del %s", hosts[1]);
        SKIP("network namespaces want root, and ip");
    }
    pid_t pid = start(0, run_across); /* apart, so that the namespaces go whatever happens */
    waitpid(pid, &status, 0);
    run_ip("netns del %s", hosts[0]);
    run_ip("netns del %s", hosts[1]);
    CHECK_INT(status, 0);
}
#endif

/* ---- several contexts ------------------------------------------------------------------------ */

static void *open_second(void *user)
{
    (void)user;
    check_world("dp", "second");
    return NULL;
}

static void meet_in_two_threads(void)
{
    pthread_t thread;
    use_tcp();
    CHECK_INT(pthread_create(&thread, NULL, open_second, NULL), 0);
    check_world("dp", "first");
    pthread_join(thread, NULL);
}

static void meet_twice_and_keep_both(void)
{
    dp_ctx *first, *second;
    use_tcp();
    CHECK_OK(open_world(0, "first", &first));
    CHECK_OK(open_world(0, "second", &second));
    check_sum(second);
    check_sum(first);
    dp_close(me % 2 ? first : second); /* in any order */
    dp_close(me % 2 ? second : first);
}

static void meet_many_times(void)
{
    use_name();
    for (int i = 0; i < 20; i++) {
        check_world("dp", NULL);
    }
}

TEST(contexts_of_two_jobs)
{
    run_world(3, meet_twice_and_keep_both);
    run_world(3, meet_in_two_threads);
}

TEST(one_context_after_the_other)
{
    run_world(4, meet_many_times);
}

static void read_back_the_job(void)
{
    char job[] = "mine";
    dp_ctx *ctx;
    dp_config config;
    use_name();
    CHECK_OK(open_world(0, job, &ctx));
    job[0] = 'x';
    CHECK_OK(dp_config_get(ctx, &config));
    CHECK_STR(config.job, "mine");
    CHECK_INT(config.bootstrap.process, me);
    CHECK(config.bootstrap.all_gather != NULL);
    dp_close(ctx);
}

TEST(a_config_tells_what_became_of_it)
{
    run_world(2, read_back_the_job);
}

/* More than a connection holds while nobody reads: who sends waits for room. */
static void gather_much(void)
{
    enum { EACH = 16 << 20 };
    dp_ctx *ctx;
    dp_config config;
    use_tcp();
    CHECK_OK(open_world(0, NULL, &ctx));
    CHECK_OK(dp_config_get(ctx, &config));
    char *own = test_room(EACH), *all = test_room((size_t)world * EACH);
    memset(own, 'a' + me, EACH);
    nanosleep(&(struct timespec){.tv_nsec = me == 0 ? 200000000 : 0}, NULL);
    CHECK_OK(config.bootstrap.all_gather(own, all, EACH, config.bootstrap.user));
    for (int p = 0; p < world; p++)
        for (size_t i = 0; i < EACH; i++)
            if (all[(size_t)p * EACH + i] != 'a' + p)
                test_fail(__FILE__, __LINE__, "byte %zu of process %d", i, p);
    dp_close(ctx);
}

TEST(a_gather_larger_than_a_connection_holds)
{
    run_world(2, gather_much);
}

/* ---- who does not come ----------------------------------------------------------------------- */

static void wait_for_others(void)
{
    dp_ctx *ctx;
    use_tcp();
    if (me == 1 || me == 4 || me == 5) {
        return;
    }
    int ms = (int)(700 * test_timeout_scale());
    CHECK_ERROR(open_world(ms, NULL, &ctx), DP_ERR_TIMEOUT,
                "processes 1, 4 and 5 of 7 did not come within ");
    double seconds = atof(strstr(dp_last_error(), "within ") + 7);
    CHECK(seconds > 0 && seconds <= ms * 1.01e-3); /* from when it waits on */
}

TEST(missing_rank_is_named_on_all_ranks)
{
    run_world(7, wait_for_others);
}

/* The config has none. */
static void wait_as_the_environment_says(void)
{
    dp_ctx *ctx;
    use_tcp();
    set("DP_TIMEOUT", "1");
    if (me == 0) {
        CHECK_ERROR(open_world(0, NULL, &ctx), DP_ERR_TIMEOUT, "process 1 of 2 did not come");
        double seconds = atof(strstr(dp_last_error(), "within ") + 7);
        CHECK(seconds > 0 && seconds <= 1.01);
    }
}

TEST(the_environment_says_how_long_to_wait)
{
    run_world(2, wait_as_the_environment_says);
}

static void wait_for_the_first(void)
{
    dp_ctx *ctx;
    use_tcp();
    if (me != 0) {
        CHECK_ERROR(open_world(400, NULL, &ctx), DP_ERR_TIMEOUT,
                    "process 0 of 3 did not answer at");
        CHECK(strstr(dp_last_error(), "127.0.0.1") != NULL);
    }
}

static void wait_for_a_name(void)
{
    dp_ctx *ctx;
    use_name();
    if (me != 0) {
        CHECK_ERROR(open_world(400, NULL, &ctx), DP_ERR_TIMEOUT, "DP_ADDR=host:port");
    }
}

TEST(process_0_is_missing)
{
    run_world(3, wait_for_the_first);
    run_world(3, wait_for_a_name);
}

static void look_for_a_host(void)
{
    dp_ctx *ctx;
    use_tcp();
    set("DP_ADDR", "no-such-host.invalid:7000");
    if (me != 0) {
        CHECK_ERROR(open_world(300, NULL, &ctx), DP_ERR_TIMEOUT, "no-such-host.invalid");
    }
}

TEST(a_host_that_is_not_known)
{
    run_world(2, look_for_a_host);
}

static void come_late(void)
{
    poll(NULL, 0, 150 * ((me * 5) % world));
    use_tcp();
    check_world("dp", NULL);
}

TEST(late_processes_are_waited_for)
{
    run_world(6, come_late);
}

/* dp_open takes memory from here once all have met. */
static void *take_a_while(size_t bytes, size_t align, void *user)
{
    int *ms = user;
    poll(NULL, 0, *ms);
    *ms = 0;
    return aligned_alloc(align, (bytes + align - 1) / align * align);
}

static void give_back(void *data, size_t bytes, void *user)
{
    (void)bytes, (void)user;
    free(data);
}

static dp_status open_after(int late_ms, int busy_ms, int timeout_ms, dp_ctx **out)
{
    const dp_coll_ops *const colls[] = {boot_coll(), NULL};
    int ms = busy_ms;
    const dp_config config = {.colls = colls,
                              .device_count = 1,
                              .timeout_ms = timeout_ms,
                              .allocator = {take_a_while, give_back, &ms}};
    use_tcp();
    poll(NULL, 0, late_ms);
    return dp_open(&config, out);
}

static void stop_after_a_late_one(void)
{
    int ms = (int)(2000 * test_timeout_scale());
    dp_ctx *ctx;
    double start = now_ms();
    dp_status status = open_after(me == 1 ? ms * 4 / 5 : 0, me == 2 ? 4 * ms : 0, ms, &ctx);
    CHECK_INT(status, DP_ERR_TIMEOUT);
    if (me == 0) {
        CHECK_ERROR(status, DP_ERR_TIMEOUT, "process 2 of 3 did not come within ");
        CHECK(now_ms() - start < ms + 1900); /* a second to answer, and not a time-out anew */
    }
}

TEST(waits_of_an_opening_have_one_timeout)
{
    run_world(3, stop_after_a_late_one);
}

static void be_late_and_busy(void)
{
    int ms = (int)(2000 * test_timeout_scale());
    dp_ctx *ctx;
    CHECK_OK(open_after(me == 1 ? ms * 9 / 10 : 0, ms * 3 / 2, ms, &ctx));
    check_sum(ctx);
    dp_close(ctx);
}

TEST(work_of_an_opening_is_no_wait)
{
    run_world(3, be_late_and_busy);
}

static void take_all_ports(void)
{
    int fds[8];
    dp_ctx *ctx;
    use_tcp();
    for (int i = 0; i < 8; i++) {
        fds[i] = listen_at(port + i);
    }
    CHECK_ERROR(open_world(500, NULL, &ctx), DP_ERR_INVALID, "are taken");
    for (int i = 0; i < 8; i++) {
        close(fds[i]);
    }
}

TEST(ports_that_are_taken)
{
    nobody_launched_us();
    world = 2;
    port = free_port();
    finish(start(0, take_all_ports), 0);
}

static pid_t first_pid;

static void meet_in_a_hurry(void)
{
    dp_ctx *ctx;
    use_tcp();
    CHECK_OK(open_world(4000, NULL, &ctx));
    check_sum(ctx);
    dp_close(ctx);
}

/* Who listens there takes connections, and never answers. */
TEST(silent_ports_before_the_right_one_are_passed_by)
{
    int first = free_port();
    for (int i = 0; i < 7; i++) {
        CHECK(listen_at(first + i) >= 0);
    }
    run_world_at(first, 3, meet_in_a_hurry);
}

static void meet_one_that_is_late(void)
{
    dp_ctx *ctx;
    double start = now_ms();
    use_tcp();
    if (me == 0) {
        poll(NULL, 0, 200);
    }
    CHECK_OK(open_world(8000, NULL, &ctx));
    CHECK(now_ms() - start < 5000 * test_timeout_scale());
    check_sum(ctx);
    dp_close(ctx);
}

/* Nobody listens at the first port yet, to which the others come back soon. */
TEST(silent_ports_behind_the_right_one_keep_nobody)
{
    int first = free_port();
    for (int i = 1; i < 8; i++) {
        CHECK(listen_at(first + i) >= 0);
    }
    run_world_at(first, 3, meet_one_that_is_late);
}

/* Process 0 of this very job is there, and can be seen, but not reached. */
static void look_past_the_first(void)
{
    char address[40], who[80];
    dp_ctx *ctx;
    use_tcp();
    if (me == 0) {
        CHECK_ERROR(open_world(4000, NULL, &ctx), DP_ERR_TIMEOUT, "process 1 of 2 did not come");
        return;
    }
    snprintf(address, sizeof address, "127.0.0.2:%d", port);
    set("DP_ADDR", address);
    snprintf(who, sizeof who, "There is a process 0 (its process id is %d) that waits for others",
             (int)first_pid);
    CHECK_ERROR(open_world(500, NULL, &ctx), DP_ERR_TIMEOUT, "nobody listens there");
    CHECK_SAYS(dp_last_error(), who);
    CHECK(strstr(dp_last_error(), "started already") == NULL);
}

TEST(a_process_0_that_is_not_reached_is_none_of_another_job)
{
    nobody_launched_us();
    world = 2;
    port = free_port();
    first_pid = start(0, look_past_the_first);
    close(call_patiently(port)); /* it listens */
    finish(start(1, look_past_the_first), 1);
    finish(first_pid, 0);
}

/* What listens at all ports is no process of a job. */
static void find_silence(void)
{
    dp_ctx *ctx;
    use_tcp();
    CHECK_ERROR(open_world(500, NULL, &ctx), DP_ERR_TIMEOUT,
                "a program listens there that does not answer");
}

TEST(who_does_not_answer_is_told_from_nobody)
{
    nobody_launched_us();
    world = 2;
    port = free_port();
    CHECK(listen_at(port + 3) >= 0);
    finish(start(1, find_silence), 1);
}

/* ---- who should not come --------------------------------------------------------------------- */

/* Process 3 of 4 says that it is another one, of another world, of another job. */
static void one_counts_wrong(void)
{
    dp_ctx *ctx;
    use_tcp();
    if (me == 3) {
        set("DP_PROCESS_COUNT", "5");
        CHECK_ERROR(open_world(2000, NULL, &ctx), DP_ERR_MISMATCH, "process 3 counts 5 processes");
        set("DP_PROCESS_COUNT", "4");
    }
    check_world("dp", NULL);
}

static void one_has_another_secret(void)
{
    dp_ctx *ctx;
    use_tcp();
    set("DP_SECRET", "friend");
    if (me == 3) {
        set("DP_SECRET", "foe");
        CHECK_ERROR(open_world(500, NULL, &ctx), DP_ERR_TIMEOUT, "process 0 of 4 did not answer");
        CHECK(strstr(dp_last_error(), "belongs to another job, or has another DP_SECRET") != NULL);
        set("DP_SECRET", "friend");
    }
    check_world("dp", NULL);
}

static void nobody_has_the_secret(void)
{
    dp_ctx *ctx;
    use_tcp();
    set("DP_SECRET", me == 0 ? "friend" : "foe");
    CHECK_ERROR(open_world(700, NULL, &ctx), DP_ERR_TIMEOUT,
                me == 0 ? "; connections from another job, or with another DP_SECRET: "
                        : "belongs to another job, or has another DP_SECRET");
}

static void one_is_of_another_run(void)
{
    dp_ctx *ctx;
    launched_by(&launchers[1], me, world);
    set_number("MASTER_PORT", port);
    set("TORCHELASTIC_RESTART_COUNT", "2");
    if (me == 3) {
        set("TORCHELASTIC_RESTART_COUNT", "1");
        CHECK_ERROR(open_world(500, NULL, &ctx), DP_ERR_TIMEOUT, "process 0 of 4 did not answer");
        set("TORCHELASTIC_RESTART_COUNT", "2");
    }
    check_world("torchrun", NULL);
}

TEST(processes_that_do_not_belong_there)
{
    run_world(4, one_counts_wrong);
    run_world(4, one_has_another_secret);
    run_world(2, nobody_has_the_secret);
    run_world(4, one_is_of_another_run);
}

/* Bytes that no process of a job sends, connections that say nothing or one byte now and then, more
   of them than there are places. */
static void disturb(void)
{
    int silent[100];
    uint64_t seed = test_seed();
    char noise[256];
    for (int i = 0; i < 100; i++) {
        silent[i] = call_patiently(port);
    }
    for (int i = 0; i < 40; i++) {
        int fd = call_patiently(port);
        size_t bytes = (size_t)(test_random(&seed) % sizeof noise);
        for (size_t k = 0; k < bytes; k++) {
            noise[k] = (char)test_random(&seed);
        }
        if (i % 2) {
            memcpy(noise, "dkp1", 4); /* what a request begins with */
        }
        send(fd, noise, bytes, MSG_NOSIGNAL);
        send(silent[i], noise, 1, MSG_NOSIGNAL);
        close(fd);
    }
    pause();
}

static void meet_disturbed(void)
{
    use_tcp();
    if (me != 0) {
        poll(NULL, 0, 300 + 100 * me);
    }
    check_world("dp", NULL);
}

TEST(strangers_disturb_nobody)
{
    nobody_launched_us();
    world = 1;
    port = free_port();
    pid_t strangers = start(0, disturb), pids[4];
    world = 4;
    for (int p = 0; p < world; p++) {
        pids[p] = start(p, meet_disturbed);
    }
    for (int p = 0; p < world; p++) {
        finish(pids[p], p);
    }
    kill(strangers, SIGKILL);
    waitpid(strangers, NULL, 0);
}

static void on_alarm(int n)
{
    (void)n;
}

/* A signal a millisecond, and no call goes on after it. */
static void meet_under_signals(void)
{
    struct sigaction action;
    memset(&action, 0, sizeof action);
    action.sa_handler = on_alarm;
    CHECK_INT(sigaction(SIGALRM, &action, NULL), 0);
    const struct itimerval often = {{0, 1000}, {0, 1000}}, never = {{0, 0}, {0, 0}};
    setitimer(ITIMER_REAL, &often, NULL);
    meet_over_tcp();
    setitimer(ITIMER_REAL, &never, NULL);
}

TEST(signals_disturb_nobody)
{
    run_world(5, meet_under_signals);
}

/* ---- who ends -------------------------------------------------------------------------------- */

/* Process 2 dies while the others still wait for process 3. */
static void one_dies_before_all_are_there(void)
{
    dp_ctx *ctx;
    use_tcp();
    if (me == 2) {
        alarm(1);
        signal(SIGALRM, SIG_DFL);
        if (fork() == 0) {
            alarm(0);
            raise(SIGKILL);
        }
        if (open_world(0, NULL, &ctx) == DP_OK) {
            abort();
        }
    } else if (me != 3) {
        CHECK_ERROR(open_world(5000, NULL, &ctx), DP_ERR_REMOTE,
                    "process 2 of 4 joined, and ended");
    }
}

TEST(process_that_dies_early_is_named)
{
    nobody_launched_us();
    world = 4;
    port = free_port();
    pid_t pids[4];
    for (int p = 0; p < world; p++) {
        pids[p] = start(p, one_dies_before_all_are_there);
    }
    for (int p = 0; p < world; p++) {
        int status = 0;
        if (p != 2) {
            finish(pids[p], p);
            continue;
        }
        CHECK_INT(waitpid(pids[p], &status, 0), pids[p]);
        CHECK(WIFSIGNALED(status) && WTERMSIG(status) == SIGALRM);
    }
}

static int open_ms;

static void find_one_that_is_stopped(void)
{
    dp_ctx *ctx;
    use_tcp();
    if (me == 2) {
        CHECK_ERROR(open_world(open_ms / 4, NULL, &ctx), DP_ERR_TIMEOUT, "process 0 of 3 did not");
        return;
    }
    CHECK_ERROR(open_world(open_ms, NULL, &ctx), DP_ERR_TIMEOUT, "process 2 of 3 did not come ");
    CHECK_SAYS(dp_last_error(), "; process 0 was held up for ");
    CHECK(strstr(dp_last_error(), "DP_SECRET") == NULL);
}

static void miss_one_that_is_stopped(void)
{
    dp_ctx *ctx;
    use_tcp();
    CHECK_ERROR(open_world(me == 2 ? open_ms / 4 : open_ms, NULL, &ctx), DP_ERR_TIMEOUT,
                me == 2 ? "process 0 of 3 did not" : "process 0 of 3 did not report in time ");
}

/* Process 0 is stopped when process 1 has joined it, for so many halves of the time-out. */
static void stop_the_first(void (*body)(void), int halves)
{
    pid_t pids[3];
    int status;
    open_ms = (int)(2400 * test_timeout_scale());
    nobody_launched_us();
    world = 3;
    port = free_port();
    pids[0] = start(0, body);
    close(call_patiently(port)); /* it listens */
    pids[1] = start(1, body);
    poll(NULL, 0, open_ms / 3);
    kill(pids[0], SIGSTOP);
    CHECK_INT(waitpid(pids[0], &status, WUNTRACED), pids[0]);
    pids[2] = start(2, body);
    poll(NULL, 0, open_ms / 2 * halves);
    kill(pids[0], SIGCONT);
    for (int p = 0; p < world; p++) {
        finish(pids[p], p);
    }
}

/* Who came to it meanwhile has given up; so has who waits for its words, if that takes longer. */
TEST(process_0_that_is_stopped_says_so)
{
    stop_the_first(find_one_that_is_stopped, 1);
    stop_the_first(miss_one_that_is_stopped, 3);
}

static void be_late(void)
{
    dp_ctx *ctx;
    use_tcp();
    if (me == 0) {
        poll(NULL, 0, open_ms * 2 / 3);
    }
    if (me < 2) {
        CHECK_ERROR(open_world(open_ms, NULL, &ctx), DP_ERR_TIMEOUT,
                    "process 2 of 3 did not come ");
        CHECK_SAYS(dp_last_error(), " s; process 0 itself came ");
        CHECK_SAYS(dp_last_error(), " s after process 1");
    }
}

/* Others had little time left when it came, and so it had little for those that were late, too. */
TEST(process_0_that_comes_late_says_so)
{
    open_ms = (int)(1500 * test_timeout_scale());
    run_world(3, be_late);
}

/* Each of the others learns who it was, whoever it was and wherever it stands in the tree; also one
   that waits while a late one asks. Who only was too late learns it when it comes. */
static int victim, how, late;

static void one_dies_later(void)
{
    dp_ctx *ctx;
    dp_failure_info failure;
    char who[40];
    int32_t n = 1;
    dp_part part = {.send = &n, .recv = &n};
    use_tcp();
    CHECK_OK(open_world(2000, NULL, &ctx));
    check_sum(ctx);
    if (me == victim) {
        raise(how);
    }
    if (me == late) {
        poll(NULL, 0, 1400);
    }
    snprintf(who, sizeof who, ": rank %d (process %d, pid ", victim, victim);
    CHECK_ERROR(dp_all_reduce(ctx, &part, 1, DP_I32, DP_OP_SUM),
                how == SIGSTOP ? DP_ERR_TIMEOUT : DP_ERR_REMOTE, who);
    CHECK(dp_failure(ctx, &failure));
    CHECK_STATUS(dp_barrier(ctx), failure.status);
    dp_close(ctx);
}

static void run_with_a_victim(int count, int process, int n, int slow)
{
    pid_t pids[MOST];
    nobody_launched_us();
    world = count;
    victim = process;
    late = slow;
    how = n;
    port = free_port();
    for (int p = 0; p < count; p++) {
        pids[p] = start(p, one_dies_later);
    }
    for (int p = 0; p < count; p++) {
        if (p != victim) {
            finish(pids[p], p);
        }
    }
    kill(pids[victim], SIGCONT);
    if (how == SIGSTOP) {
        finish(pids[victim], victim);
    } else {
        CHECK_INT(waitpid(pids[victim], NULL, 0), pids[victim]);
    }
}

TEST_SLOW(dead_rank_is_named_on_all_ranks, 30)
{
    for (int process = 0; process < 8; process++) {
        run_with_a_victim(8, process, SIGKILL, -1);
    }
}

TEST_SLOW(stopped_rank_is_named_on_all_ranks, 60)
{
    for (int process = 0; process < 8; process += 1 + process % 3) {
        run_with_a_victim(8, process, SIGSTOP, -1);
    }
}

/* Those that wait for process 6 began long before it began to wait for process 7, and those that
   wait for process 4 before it did for process 0. */
TEST_SLOW(waiting_rank_is_not_blamed, 30)
{
    run_with_a_victim(8, 7, SIGSTOP, 6);
    run_with_a_victim(8, 0, SIGSTOP, 4);
}

/* Process 1 asks after its patience, and process 0 comes only then: it has what it waits for, and
   does not read the question in that call. In the next one it would be no reason to be impatient:
   process 1 comes later than an answer may. */
static void one_asks_in_the_call_before(void)
{
    dp_ctx *ctx;
    dp_config config;
    char own = (char)('a' + me), all[2];
    use_tcp();
    CHECK_OK(open_world(me == 0 ? 20000 : 700, NULL, &ctx));
    CHECK_OK(dp_config_get(ctx, &config));
    const dp_bootstrap *boot = &config.bootstrap;
    poll(NULL, 0, me == 0 ? 800 : 0);
    CHECK_OK(boot->all_gather(&own, all, 1, boot->user));
    poll(NULL, 0, me == 0 ? 0 : 1500);
    CHECK_OK(boot->all_gather(&own, all, 1, boot->user));
    CHECK_BYTES(all, "ab", 2);
    dp_close(ctx);
}

TEST(a_question_of_an_earlier_call_is_none)
{
    run_world(2, one_asks_in_the_call_before);
}

static void one_closes_early(void)
{
    dp_ctx *ctx;
    int32_t n = 1;
    dp_part part = {.send = &n, .recv = &n};
    use_tcp();
    CHECK_OK(open_world(2000, NULL, &ctx));
    if (me == 1) {
        dp_close(ctx);
        return;
    }
    CHECK_ERROR(dp_all_reduce(ctx, &part, 1, DP_I32, DP_OP_SUM), DP_ERR_REMOTE,
                ") has closed its context; it has begun none");
    dp_close(ctx);
}

TEST(closed_process_fails_only_those_that_need_it)
{
    run_world(3, one_closes_early);
}

static void close_at_any_time(void)
{
    dp_ctx *ctx;
    use_tcp();
    CHECK_OK(open_world(0, NULL, &ctx));
    check_sum(ctx);
    poll(NULL, 0, 30 * ((me * 3) % world));
    dp_close(ctx);
}

TEST(closing_waits_for_nobody)
{
    run_world(8, close_at_any_time);
}

/* One cannot open, and says why; the others say who. */
static void one_cannot_open(void)
{
    static const dp_coll_ops *colls[2];
    dp_ctx *ctx;
    colls[0] = boot_coll();
    use_tcp();
    dp_config config = {.colls = colls, .device_count = 1, .thread_count = me == 2 ? -1 : 0};
    if (me == 2) {
        CHECK_ERROR(dp_open(&config, &ctx), DP_ERR_INVALID, "thread_count");
    } else {
        CHECK_ERROR(dp_open(&config, &ctx), DP_ERR_REMOTE, "process 2 of 5 failed");
    }
}

TEST(one_process_has_a_bad_config)
{
    run_world(5, one_cannot_open);
}

static void fork_after_open(void)
{
    dp_ctx *ctx;
    int status = 0;
    use_tcp();
    CHECK_OK(open_world(0, NULL, &ctx));
    pid_t child = fork();
    if (child == 0) {
        if (dp_barrier(ctx) != DP_ERR_STATE) {
            _exit(EXIT_FAILURE);
        }
        dp_close(ctx); /* its copy: nobody else learns of it */
        _exit(EXIT_SUCCESS);
    }
    CHECK_INT(waitpid(child, &status, 0), child);
    CHECK_INT(status, 0);
    check_sum(ctx);
    dp_close(ctx);
}

TEST(a_child_of_fork_closes_its_copy)
{
    run_world(3, fork_after_open);
}

/* ---- nothing is left ------------------------------------------------------------------------- */

static void leave_nothing(void)
{
    dp_ctx *ctx;
    int before = open_files();
    use_tcp();
    CHECK_OK(open_world(0, NULL, &ctx));
    int most = open_files();
    CHECK(before == 0 || (most > before && most <= before + 4 + (me == 0))); /* 1 + log2 of 8 */
    dp_close(ctx);
    CHECK_INT(open_files(), before);
    if (me < 4) { /* and after a meeting that failed */
        CHECK_ERROR(open_world(300, NULL, &ctx), DP_ERR_TIMEOUT, "processes 4, 5, 6 and 7 of 8");
        CHECK_INT(open_files(), before);
    }
}

TEST(no_descriptor_is_left)
{
    run_world(8, leave_nothing);
}

static void check_closed_numbers(void)
{
    for (int fd = 0; fd <= 2; fd++) {
        CHECK_INT(fcntl(fd, F_GETFD), -1);
        CHECK_INT(errno, EBADF);
    }
    CHECK(fputs("what somebody says there\n", stderr) == EOF);
}

/* As a daemon's child: where the next file that is opened would be stderr. */
static void open_without_files(const char *coll)
{
    dp_ctx *ctx, *group;
    dp_info info;
    set("DP_DEBUG", "info");
    for (int fd = 0; fd <= 2; fd++)
        close(fd);
    CHECK_OK(dp_open(&(dp_config){.device_count = 1}, &ctx));
    CHECK_OK(dp_info_get(ctx, &info));
    CHECK_STR(info.coll_backend, coll);
    for (int i = 0; i < 20; i++) {
        check_closed_numbers();
        check_sum(ctx);
    }
    CHECK_OK(dp_open_group(ctx, 0, NULL, &group));
    check_closed_numbers();
    check_sum(group);
    dp_close(group);
    dp_close(ctx);
    check_closed_numbers();
}

static void open_without_files_here(void)
{
    use_name();
    open_without_files("shared memory");
}

static void open_without_files_apart(void)
{
    use_tcp();
    set_number("DP_MACHINE", me);
    set("DP_INTERFACE", "127.");
    open_without_files("TCP");
}

TEST(nothing_becomes_stderr)
{
    run_world(3, open_without_files_here);
    run_world(3, open_without_files_apart);
}

#if defined(__linux__) /* all of 127/8 is this machine */
/* All reach process 0, which listens everywhere; but process 2 listens at its own 127.0.0.1 only,
   where process 3 does not look for it. So process 2 has a parent when it gives up. */
static void listen_where_the_child_is_not(void)
{
    char address[40];
    dp_ctx *ctx;
    int before = open_files(), ms = (int)(700 * test_timeout_scale());
    use_tcp();
    snprintf(address, sizeof address, "%s:%d", me == 0 ? "0.0.0.0" : "127.0.0.2", port);
    if (me == 0 || me == 3)
        set("DP_ADDR", address);
    CHECK_ERROR(open_world(ms, NULL, &ctx), DP_ERR_TIMEOUT,
                "process 2 of 4 did not answer at 127.0.0.2, ports ");
    CHECK_INT(open_files(), before);
}

TEST(a_parent_that_is_not_found_is_named)
{
    run_world(4, listen_where_the_child_is_not);
}
#endif

TEST(a_world_of_one_opens_no_socket)
{
    dp_ctx *ctx;
    nobody_launched_us();
    int before = open_files();
    launched_by(&launchers[0], 0, 1);
    CHECK_OK(dp_open(&(dp_config){.device_count = 1}, &ctx));
    CHECK_INT(open_files(), before + 1); /* memory in which those outside see what it does */
    dp_close(ctx);
    CHECK_INT(open_files(), before);
}

/* ---- a share of the machine ------------------------------------------------------------------ */

static void share_cores(void)
{
    static const dp_coll_ops *colls[2];
    dp_config config = {.colls = colls}, resolved;
    dp_ctx *ctx, *alone;
    dp_info info, all;
    colls[0] = boot_coll();
    use_name();
    CHECK_OK(dp_open(&(dp_config){.local_only = true, .device_count = 1}, &alone));
    CHECK_OK(dp_info_get(alone, &all));
    CHECK_OK(dp_open(&config, &ctx));
    CHECK_OK(dp_info_get(ctx, &info));
    int share = all.core_count / world + (me < all.core_count % world);
    CHECK_INT(info.core_count, share > 0 ? share : 1);
    CHECK(info.local_count <= info.core_count);
    CHECK_OK(dp_config_get(ctx, &resolved));
    CHECK_INT(resolved.thread_count, info.core_count);
    dp_close(ctx);
    dp_close(alone);
}

TEST(processes_of_a_machine_share_its_cores)
{
    run_world(2, share_cores);
    run_world(3, share_cores);
}

#if defined(__linux__)
/* As mpirun does it: each process has been given a core. */
static void keep_own_core(void)
{
    dp_ctx *ctx;
    dp_info info;
    cpu_set_t one;
    CPU_ZERO(&one);
    CPU_SET((size_t)me, &one);
    if (sched_setaffinity(0, sizeof one, &one) != 0) {
        exit(EXIT_SUCCESS); /* that core is not ours */
    }
    use_name();
    unsetenv("DP_LOCAL_PROCESS");
    unsetenv("DP_LOCAL_PROCESS_COUNT");
    CHECK_OK(open_world(0, NULL, &ctx));
    CHECK_OK(dp_info_get(ctx, &info));
    CHECK_INT(info.core_count, 1);
    dp_close(ctx);
}

TEST(processes_that_are_bound_keep_their_cores)
{
    cpu_set_t all;
    CPU_ZERO(&all);
    CHECK_INT(sched_getaffinity(0, sizeof all, &all), 0);
    if (!CPU_ISSET(0, &all) || !CPU_ISSET(1, &all)) {
        SKIP("cores 0 and 1 are not both ours");
    }
    run_world(2, keep_own_core);
}
#endif

/* Strangers share no memory; the launcher's word on their places still counts. */
static void be_strangers(void)
{
    dp_ctx *ctx;
    dp_info info;
    use_name();
    unsetenv("DP_LOCAL_PROCESS");
    unsetenv("DP_LOCAL_PROCESS_COUNT");
    set("DP_MACHINE", me < 2 ? "a" : "b");
    CHECK_OK(open_world(0, NULL, &ctx));
    CHECK_OK(dp_info_get(ctx, &info));
    CHECK_INT(info.machine_process, me < 2 ? me : me - 2);
    CHECK_INT(info.machine_process_count, me < 2 ? 2 : 3);
    dp_close(ctx);
}

TEST(machines_are_told_apart)
{
    run_world(5, be_strangers);
}

/* The example's table has so many devices: each process takes its run of them. */
static void share_devices(void)
{
    const dp_device_ops *const backends[] = {toy_device(), NULL};
    const dp_coll_ops *const colls[] = {boot_coll(), NULL};
    dp_config config = {.backends = backends, .colls = colls}, resolved;
    dp_ctx *ctx, *alone;
    dp_info info, all;
    config.local_only = true;
    use_name();
    CHECK_OK(dp_open(&config, &alone));
    CHECK_OK(dp_info_get(alone, &all));
    dp_close(alone);
    config.local_only = false;
    CHECK_OK(dp_open(&config, &ctx));
    CHECK_OK(dp_info_get(ctx, &info));
    CHECK_OK(dp_config_get(ctx, &resolved));
    int first = me * all.local_count / world, last = (me + 1) * all.local_count / world;
    CHECK_INT(info.local_count, last > first ? last - first : 1);
    for (int i = 0; i < info.local_count; i++) {
        CHECK_INT(resolved.devices[i], first + i);
    }
    dp_close(ctx);
    config.device_count = 1;
    CHECK_OK(dp_open(&config, &ctx));
    CHECK_OK(dp_config_get(ctx, &resolved));
    CHECK_INT(resolved.devices[0], 0);
    dp_close(ctx);
}

TEST(processes_of_a_machine_share_its_devices)
{
    run_world(2, share_devices);
    run_world(3, share_devices);
    run_world(8, share_devices);
}

/* ---- under a launcher that is there ---------------------------------------------------------- */

/* The test starts itself: its copies find themselves in the world that mpirun names. */
TEST_SLOW(under_mpirun, 30)
{
    if (getenv("TEST_UNDER_MPIRUN") != NULL) {
        bool open = getenv("OMPI_COMM_WORLD_RANK") != NULL;
        me = atoi(getenv(open ? "OMPI_COMM_WORLD_RANK" : "PMI_RANK"));
        world = 3;
        check_world(open ? "openmpi" : "mpich", NULL);
        return;
    }
    if (system("command -v mpirun >/dev/null") != 0) {
        SKIP("mpirun is not installed");
    }
    char command[400], self[200];
    ssize_t bytes = readlink("/proc/self/exe", self, sizeof self - 1);
    CHECK(bytes > 0);
    self[bytes] = '\0';
    bool open = system("mpirun --version | grep -q 'Open MPI'") == 0;
    snprintf(command, sizeof command, "mpirun %s -np 3 %s launch/under_mpirun",
             open ? "--allow-run-as-root --oversubscribe" : "", self);
    unsetenv("DP_LAUNCH");
    set("TEST_UNDER_MPIRUN", "1");
    CHECK_INT(system(command), 0);
}

/* ---- many processes -------------------------------------------------------------------------- */

static bool stub_fits(const dp_comm_config *config)
{
    return config->rank_count > 0;
}

static dp_status stub_open(const dp_host *host, const dp_comm_config *config, dp_comm **out);

static void stub_close(dp_comm *comm)
{
    comm->host->free(comm->host, comm);
}

/* What all processes need to open, and no more: here they only meet. */
static const dp_coll_ops *stub_coll(void)
{
    static dp_coll_ops ops;
    ops = *boot_coll();
    ops.fits = stub_fits;
    ops.open = stub_open;
    ops.close = stub_close;
    return &ops;
}

static dp_status stub_open(const dp_host *host, const dp_comm_config *config, dp_comm **out)
{
    (void)config;
    dp_comm *comm = host->alloc(host, sizeof *comm, _Alignof(dp_comm));
    CHECK(comm != NULL);
    *comm = (dp_comm){stub_coll(), host};
    *out = comm;
    return DP_OK;
}

static double now(void)
{
    struct timespec at;
    clock_gettime(CLOCK_MONOTONIC, &at);
    return (double)at.tv_sec + 1e-9 * (double)at.tv_nsec;
}

static double begun;

static void meet_in_a_crowd(void)
{
    const dp_coll_ops *const colls[] = {stub_coll(), NULL};
    dp_ctx *ctx;
    dp_info info;
    int before = open_files();
    use_tcp();
    CHECK_OK(dp_open(&(dp_config){.colls = colls, .device_count = 1}, &ctx));
    CHECK_OK(dp_info_get(ctx, &info));
    CHECK_INT(info.process, me);
    CHECK_INT(info.rank_count, world);
    CHECK(open_files() <= before + 10 + (me == 0));
    if (me == 0) {
        printf("%d processes met in %.2f s\n", world, now() - begun);
        CHECK(now() - begun <= 10 * test_timeout_scale());
    }
    dp_close(ctx);
}

/* Containers and users may have a limit of their own. */
static bool may_have_processes(long count)
{
    struct rlimit limit;
    long most = LONG_MAX;
    FILE *file = fopen("/sys/fs/cgroup/pids.max", "r");
    if (file != NULL) {
        if (fscanf(file, "%ld", &most) != 1)
            most = LONG_MAX;
        fclose(file);
    }
    bool mine = getrlimit(RLIMIT_NPROC, &limit) == 0 &&
                (limit.rlim_cur == RLIM_INFINITY || limit.rlim_cur > (rlim_t)count * 2);
    return most > count * 2 && (mine || geteuid() == 0);
}

TEST_SLOW(hundreds_of_processes_meet_in_seconds, 60)
{
    enum { CROWD = 512 };
    static pid_t pids[CROWD];
    if (!may_have_processes(CROWD))
        SKIP("so many processes are not allowed");
    nobody_launched_us();
    world = CROWD / test_stride();
    port = free_port();
    begun = now();
    for (int p = 0; p < world; p++) {
        pids[p] = start(p, meet_in_a_crowd);
    }
    for (int p = 0; p < world; p++) {
        finish(pids[p], p);
    }
}

/* ---- few files ------------------------------------------------------------------------------- */

/* Only so many more; `hard`: this process cannot raise the limit either. Returns it. */
static rlim_t allow_few_files(int more, bool hard)
{
    struct rlimit limit;
    int next = dup(STDIN_FILENO);
    CHECK(next >= 0 && close(next) == 0);
    CHECK_INT(getrlimit(RLIMIT_NOFILE, &limit), 0);
    limit.rlim_cur = (rlim_t)(next + more);
    limit.rlim_max = hard ? limit.rlim_cur : limit.rlim_max;
    CHECK_INT(setrlimit(RLIMIT_NOFILE, &limit), 0);
    return limit.rlim_cur;
}

static void check_file_limit(rlim_t want)
{
    struct rlimit limit;
    CHECK_INT(getrlimit(RLIMIT_NOFILE, &limit), 0);
    CHECK_INT(limit.rlim_cur, want);
}

static void meet_with_few_files(void)
{
    rlim_t limit = me == 0 ? allow_few_files(6, false) : 0;
    check_world("dp", NULL);
    if (me == 0)
        check_file_limit(limit);
}

static void meet_with_few_files_by_name(void)
{
    use_name();
    meet_with_few_files();
}

static void meet_with_few_files_over_tcp(void)
{
    use_tcp();
    meet_with_few_files();
}

TEST(process_0_raises_its_limit_of_files)
{
    struct rlimit limit;
    CHECK_INT(getrlimit(RLIMIT_NOFILE, &limit), 0);
    if (limit.rlim_max != RLIM_INFINITY && limit.rlim_max < 1024)
        SKIP("so many files are not allowed");
    run_world(8, meet_with_few_files_by_name);
    run_world(8, meet_with_few_files_over_tcp);
}

static int *heard_of_files; /* processes that did */

/* Who comes when process 0 has given up finds nobody, and waits no longer than it has to. */
static void hear_of_too_few_files(void)
{
    dp_ctx *ctx;
    use_name();
    if (me == 0) {
        allow_few_files(5, true);
        CHECK_ERROR(open_world(0, NULL, &ctx), DP_ERR_NO_MEMORY, "may open no more files than ");
        CHECK(strstr(dp_last_error(), "ulimit -Hn") != NULL);
        return;
    }
    dp_status status = open_world((int)(2000 * test_timeout_scale()), NULL, &ctx);
    CHECK(status == DP_ERR_NO_MEMORY || status == DP_ERR_TIMEOUT || status == DP_ERR_REMOTE);
    if (status == DP_ERR_NO_MEMORY)
        __atomic_fetch_add(heard_of_files, 1, __ATOMIC_RELAXED);
}

TEST(too_few_files_in_one_process_are_heard_of)
{
    heard_of_files = mmap(NULL, sizeof *heard_of_files, PROT_READ | PROT_WRITE,
                          MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    CHECK(heard_of_files != MAP_FAILED);
    run_world(8, hear_of_too_few_files);
    CHECK(*heard_of_files > 0);
}

/* ---- dp_spawn -------------------------------------------------------------------------------- */

typedef struct shared { /* memory of all processes */
    pid_t pids[MOST];
    int seen[MOST];
} shared;

static shared *share_memory(void)
{
    int zeros = open("/dev/zero", O_RDWR);
    shared *all = mmap(NULL, sizeof *all, PROT_READ | PROT_WRITE, MAP_SHARED, zeros, 0);
    CHECK(all != MAP_FAILED);
    close(zeros);
    return all;
}

static dp_status spawned_sum(void *user)
{
    shared *all = user;
    dp_ctx *ctx;
    dp_info info;
    DP_TRY(open_world(0, NULL, &ctx));
    DP_TRY(dp_info_get(ctx, &info));
    me = info.process;
    world = info.process_count;
    all->seen[me]++;
    CHECK_INT(info.machine_process, me);
    CHECK_INT(info.machine_process_count, world);
    check_sum(ctx);
    dp_close(ctx);
    return DP_OK;
}

static void check_no_child(void)
{
    CHECK_INT(waitpid(-1, NULL, WNOHANG), -1);
    CHECK_INT(errno, ECHILD);
}

TEST(spawned_processes_are_a_job)
{
    shared *all = share_memory();
    nobody_launched_us();
    int before = open_files();
    CHECK_OK(dp_spawn(4, spawned_sum, all));
    CHECK_OK(dp_spawn(1, spawned_sum, all));
    for (int p = 0; p < 4; p++) {
        CHECK_INT(all->seen[p], p == 0 ? 2 : 1);
    }
    CHECK(getenv("DP_PROCESS") == NULL);
    CHECK_INT(open_files(), before);
    check_no_child();
    set("DP_LAUNCH", "none"); /* of this process: those that it starts are started on purpose */
    CHECK_OK(dp_spawn(3, spawned_sum, all));
    set("DP_REJOIN", "1"); /* it came later than others itself; these begin together */
    CHECK_OK(dp_spawn(3, spawned_sum, all));
    CHECK_STR(getenv("DP_REJOIN"), "1");
}

static dp_status see_the_limit(void *user)
{
    check_file_limit(*(rlim_t *)user);
    return DP_OK;
}

/* As many processes as files would be too many. */
TEST(a_spawned_process_takes_no_file_of_its_parent)
{
    nobody_launched_us();
    int before = open_files();
    rlim_t limit = allow_few_files(2, false);
    CHECK_OK(dp_spawn(2 * MOST, see_the_limit, &limit));
    check_file_limit(limit);
    CHECK_INT(open_files(), before);
}

static dp_status second_fails(void *user)
{
    dp_ctx *ctx;
    (void)user;
    DP_TRY(open_world(0, NULL, &ctx));
    if (strcmp(getenv("DP_PROCESS"), "2") == 0) {
        return dp_error(DP_ERR_NO_DEVICE, "the disk is full");
    }
    return dp_barrier(ctx);
}

static dp_status second_dies(void *user)
{
    dp_ctx *ctx;
    DP_TRY(open_world(0, NULL, &ctx));
    if (strcmp(getenv("DP_PROCESS"), "2") == 0) {
        raise(*(int *)user);
    }
    return dp_barrier(ctx);
}

static dp_status second_exits(void *user)
{
    (void)user;
    if (strcmp(getenv("DP_PROCESS"), "2") == 0) {
        exit(3);
    }
    for (;;) {
        pause();
    }
}

TEST(a_spawned_process_that_fails_ends_the_others)
{
    int number_nine = SIGKILL;
    nobody_launched_us();
    CHECK_ERROR(dp_spawn(4, second_fails, NULL), DP_ERR_NO_DEVICE,
                "dp_spawn: process 2 of 4: the disk is full");
    check_no_child();
    CHECK_ERROR(dp_spawn(4, second_dies, &number_nine), DP_ERR_USER,
                "dp_spawn: process 2 of 4: it was ended by signal 9");
    check_no_child();
    CHECK_ERROR(dp_spawn(4, second_exits, NULL), DP_ERR_USER,
                "dp_spawn: process 2 of 4: it ended with exit status 3");
    check_no_child();
}

/* ---- a spawned process whose function does not return ---------------------------------------- */

static dp_status leave_at_once(void *user)
{
    (void)user;
    _exit(0);
}

static dp_status leave_in_good_order(void *user)
{
    (void)user;
    exit(0);
}

static dp_status become_another_program(void *user)
{
    (void)user;
    execl("/bin/true", "true", (char *)NULL);
    return DP_ERR_USER;
}

/* A child of its own returns in its place. */
static dp_status let_a_child_return(void *user)
{
    (void)user;
    pid_t child = fork();
    CHECK(child >= 0);
    if (child == 0) {
        return DP_OK;
    }
    CHECK_INT(waitpid(child, NULL, 0), child);
    _exit(0);
}

static void check_no_return(int count, dp_status (*fn)(void *user))
{
    CHECK_ERROR(dp_spawn(count, fn, NULL), DP_ERR_USER,
                "it ended with exit status 0 before its function returned");
    check_no_child();
}

TEST(a_spawned_process_fails_if_its_function_does_not_return)
{
    nobody_launched_us();
    for (int count = 1; count <= 3; count++) {
        check_no_return(count, leave_at_once);
        check_no_return(count, leave_in_good_order);
        check_no_return(count, become_another_program);
        check_no_return(count, let_a_child_return);
    }
}

/* What the process has kept back to write cannot be written, which the signal says. */
static dp_status write_for_nobody(void *user)
{
    int ends[2];
    (void)user;
    signal(SIGPIPE, SIG_DFL);
    CHECK_INT(pipe(ends), 0);
    CHECK_INT(dup2(ends[1], STDOUT_FILENO), STDOUT_FILENO);
    close(ends[0]);
    printf("nobody reads this");
    return DP_OK;
}

TEST(a_spawned_process_fails_if_it_is_killed_after_its_function)
{
    char text[60];
    nobody_launched_us();
    snprintf(text, sizeof text, "process 0 of 1: it was ended by signal %d", SIGPIPE);
    CHECK_ERROR(dp_spawn(1, write_for_nobody, NULL), DP_ERR_USER, text);
    check_no_child();
}

static dp_status be_stubborn(void *user)
{
    (void)user;
    signal(SIGTERM, SIG_IGN);
    return second_exits(NULL);
}

TEST(a_spawned_process_that_does_not_listen_is_killed)
{
    nobody_launched_us();
    CHECK_ERROR(dp_spawn(3, be_stubborn, NULL), DP_ERR_USER, "process 2 of 3");
    check_no_child();
}

static dp_status do_nothing(void *user)
{
    (void)user;
    return DP_OK;
}

static dp_status wait_a_while(void *user)
{
    (void)user;
    rest(200);
    return DP_OK;
}

static dp_status see_children_ignored(void *user)
{
    struct sigaction now;
    (void)user;
    CHECK_INT(sigaction(SIGCHLD, NULL, &now), 0);
    CHECK(now.sa_handler == SIG_IGN);
    return DP_OK;
}

/* As in what a daemon starts that does not want to hear of its children: exec keeps that. */
static void spawn_and_ignore_children(void)
{
    int number_nine = SIGKILL;
    CHECK(signal(SIGCHLD, SIG_IGN) != SIG_ERR);
    CHECK_ERROR(dp_spawn(4, second_exits, NULL), DP_ERR_USER,
                "dp_spawn: process 2 of 4: it ended with exit status 3");
    CHECK_ERROR(dp_spawn(4, second_dies, &number_nine), DP_ERR_USER,
                "dp_spawn: process 2 of 4: it was ended by signal 9");
    CHECK_OK(dp_spawn(2, see_children_ignored, NULL));
    CHECK_OK(see_children_ignored(NULL));
    pid_t other = fork(); /* ends while dp_spawn keeps children, and is not left over */
    CHECK(other >= 0);
    if (other == 0)
        _exit(0);
    CHECK_OK(dp_spawn(2, wait_a_while, NULL));
    CHECK_INT(kill(other, 0), -1);
}

static void spawn_and_keep_no_children(void)
{
    struct sigaction now, none = {.sa_handler = SIG_DFL, .sa_flags = SA_NOCLDWAIT};
    sigemptyset(&none.sa_mask);
    CHECK_INT(sigaction(SIGCHLD, &none, NULL), 0);
    CHECK_ERROR(dp_spawn(4, second_exits, NULL), DP_ERR_USER,
                "dp_spawn: process 2 of 4: it ended with exit status 3");
    CHECK_INT(sigaction(SIGCHLD, NULL, &now), 0);
    CHECK((now.sa_flags & SA_NOCLDWAIT) != 0);
}

static void wait_for_all(int n)
{
    int before = errno;
    (void)n;
    while (waitpid(-1, NULL, WNOHANG) > 0)
        continue;
    errno = before;
}

/* Mostly before dp_spawn looks; if not, it knows more. */
static void spawn_and_wait_for_children(void)
{
    CHECK(signal(SIGCHLD, wait_for_all) != SIG_ERR);
    CHECK_ERROR(dp_spawn(4, second_exits, NULL), DP_ERR_USER, "dp_spawn: process 2 of 4: it ended");
    CHECK_OK(dp_spawn(2, do_nothing, NULL));
}

TEST(a_spawned_process_fails_whoever_waits_for_it)
{
    run_world(1, spawn_and_ignore_children);
    run_world(1, spawn_and_keep_no_children);
    run_world(1, spawn_and_wait_for_children);
}

static dp_status spawn_again(void *user)
{
    (void)user;
    CHECK_ERROR(dp_spawn(2, second_exits, NULL), DP_ERR_STATE, "'dp' has started it");
    return DP_OK;
}

/* A table with a driver, as it were, which says how often it was asked. */
static int asked;
static dp_device_ops driven;

static dp_status count_driven(const dp_host *host, int *out)
{
    asked++;
    return dp_cpu()->count(host, out);
}

static void drive(bool survives)
{
    driven = *dp_cpu();
    driven.name = survives ? "sturdy" : "driven";
    driven.count = count_driven;
    driven.survives_fork = survives;
    asked = 0;
}

static dp_status open_driven(void *user)
{
    const dp_device_ops *const backends[] = {&driven, user, NULL};
    dp_ctx *ctx;
    dp_info info;
    DP_TRY(
        dp_open(&(dp_config){.device_count = 1, .backends = backends, .local_only = true}, &ctx));
    dp_status status = dp_info_get(ctx, &info);
    dp_close(ctx);
    return status == DP_OK && user != NULL && strcmp(info.device_backend, "cpu") != 0
               ? dp_error(DP_ERR_USER, "%s serves", info.device_backend)
               : status;
}

static dp_status open_driven_and_spawn(void *user)
{
    (void)user;
    unsetenv("DP_LAUNCH");
    unsetenv("DP_PROCESS");
    unsetenv("DP_PROCESS_COUNT");
    unsetenv("DP_LOCAL_PROCESS");
    unsetenv("DP_LOCAL_PROCESS_COUNT");
    DP_TRY(open_driven(NULL));
    CHECK_INT(asked, 1);
    CHECK_ERROR(dp_spawn(2, open_driven, NULL), DP_ERR_NO_DEVICE,
                "used before this process was forked");
    return DP_OK;
}

/* Its driver, or the driver's threads, are the parent's: nobody asks it in a child, unless it has
   said that it has none. */
TEST(driver_does_not_survive_a_fork)
{
    nobody_launched_us();
    drive(false);
    CHECK_OK(dp_spawn(2, open_driven_and_spawn, NULL)); /* it is new there, but not in their own */
    CHECK_INT(asked, 0);
    CHECK_OK(open_driven(NULL));
    CHECK_OK(open_driven(NULL));
    CHECK_INT(asked, 2);
    CHECK_ERROR(dp_spawn(2, open_driven, NULL), DP_ERR_NO_DEVICE,
                "(driven: used before this process was forked, which its driver does not survive: "
                "fork before the first use)");
    CHECK_OK(dp_spawn(2, open_driven, (void *)(uintptr_t)dp_cpu()));
    CHECK_OK(open_driven(NULL));
    drive(true);
    CHECK_OK(open_driven(NULL));
    CHECK_OK(dp_spawn(2, open_driven, NULL));
}

TEST(wrong_spawns)
{
    dp_ctx *ctx;
    nobody_launched_us();
    CHECK_ERROR(dp_spawn(0, spawn_again, NULL), DP_ERR_INVALID, "dp_spawn: count is 0");
    CHECK_ERROR(dp_spawn(-1, spawn_again, NULL), DP_ERR_INVALID, "dp_spawn: count is -1");
    CHECK_ERROR(dp_spawn(100000, spawn_again, NULL), DP_ERR_INVALID, "dp_spawn: count is 100000");
    CHECK_ERROR(dp_spawn(2, NULL, NULL), DP_ERR_INVALID, "dp_spawn: fn is NULL");
    CHECK_OK(dp_open(&(dp_config){.device_count = 1}, &ctx));
    CHECK_ERROR(dp_spawn(2, spawn_again, NULL), DP_ERR_STATE, "dp_spawn: a context is open");
    dp_close(ctx);
    CHECK_OK(dp_spawn(2, spawn_again, NULL));
    launched_by(&launchers[2], 0, 2);
    CHECK_ERROR(dp_spawn(2, spawn_again, NULL), DP_ERR_STATE, "'openmpi' has started it");
}

static _Noreturn dp_status wait_for_the_end(void *user)
{
    shared *all = user;
    int process = atoi(getenv("DP_PROCESS"));
    all->pids[process] = getpid();
    all->seen[process] = 1;
    for (;;) {
        pause();
    }
}

/* Whether these processes end, soon, and nobody has to wait for them. */
static void check_gone(const shared *all, int count)
{
    for (int p = 0; p < count; p++) {
        for (int i = 0; i < 500 && kill(all->pids[p], 0) == 0; i++) {
            poll(NULL, 0, 10);
        }
        CHECK(kill(all->pids[p], 0) != 0);
    }
}

/* A process that spawns three gets a signal; as if it had been alone, it ends by it. */
static void check_signal(int n)
{
    shared *all = share_memory();
    int status = 0;
    nobody_launched_us();
    pid_t parent = fork();
    if (parent == 0) {
        signal(n, SIG_DFL); /* who runs the tests in the background may have it ignored */
        dp_status spawned = dp_spawn(3, wait_for_the_end, all);
        _exit(spawned == DP_OK ? EXIT_SUCCESS : EXIT_FAILURE);
    }
    for (int p = 0; p < 3; p++) {
        while (*(volatile int *)&all->seen[p] == 0) {
            poll(NULL, 0, 5);
        }
    }
    kill(parent, n);
    CHECK_INT(waitpid(parent, &status, 0), parent);
    CHECK(WIFSIGNALED(status));
    CHECK_INT(WTERMSIG(status), n);
    check_gone(all, 3);
}

TEST(ctrl_c_ends_all)
{
    check_signal(SIGINT);
    check_signal(SIGTERM);
}

static volatile sig_atomic_t told_to_end;

static void on_end(int n)
{
    (void)n;
    told_to_end = 1;
}

static dp_status tidy_up(void *user)
{
    shared *all = user;
    int process = atoi(getenv("DP_PROCESS"));
    CHECK(signal(SIGTERM, on_end) != SIG_ERR);
    all->seen[process] = 1;
    while (!told_to_end)
        poll(NULL, 0, 5);
    poll(NULL, 0, 200);
    all->seen[process] = 2;
    return DP_OK;
}

/* Not killed with their parent: told to end, and waited for. */
TEST(ctrl_c_leaves_time_to_tidy_up)
{
    shared *all = share_memory();
    int status = 0;
    nobody_launched_us();
    pid_t parent = fork();
    if (parent == 0) {
        signal(SIGINT, SIG_DFL);
        _exit(dp_spawn(2, tidy_up, all) == DP_OK ? EXIT_SUCCESS : EXIT_FAILURE);
    }
    while (*(volatile int *)&all->seen[0] == 0 || *(volatile int *)&all->seen[1] == 0)
        poll(NULL, 0, 5);
    kill(parent, SIGINT);
    CHECK_INT(waitpid(parent, &status, 0), parent);
    CHECK(WIFSIGNALED(status));
    CHECK_INT(all->seen[0], 2);
    CHECK_INT(all->seen[1], 2);
}

static dp_status rest_a_while(void *user)
{
    shared *all = user;
    all->seen[atoi(getenv("DP_PROCESS"))] = 1;
    poll(NULL, 0, 300);
    return DP_OK;
}

static void on_interrupt(int n)
{
    (void)n;
}

static bool handlers_are_ours(void)
{
    struct sigaction interrupt, end;
    CHECK_INT(sigaction(SIGINT, NULL, &interrupt), 0);
    CHECK_INT(sigaction(SIGTERM, NULL, &end), 0);
    return interrupt.sa_handler == on_interrupt && end.sa_handler == SIG_DFL;
}

static dp_status look_at_handlers(void *user)
{
    (void)user;
    return handlers_are_ours() ? DP_OK : dp_error(DP_ERR_USER, "other handlers");
}

/* A process has the handlers that its parent had before, and so has the parent again. */
TEST(handlers_of_signals_are_given_back)
{
    nobody_launched_us();
    CHECK(signal(SIGINT, on_interrupt) != SIG_ERR);
    CHECK(signal(SIGTERM, SIG_DFL) != SIG_ERR);
    CHECK_OK(dp_spawn(2, look_at_handlers, NULL));
    CHECK(handlers_are_ours());
}

static volatile sig_atomic_t interrupts;

static void count_interrupt(int n)
{
    (void)n;
    interrupts = interrupts + 1;
}

static dp_status interrupt_parent(void *user)
{
    (void)user;
    if (strcmp(getenv("DP_PROCESS"), "0") == 0) {
        kill(getppid(), SIGINT);
    }
    pause(); /* until it is told to end */
    return DP_OK;
}

/* Who had the signal before gets it behind the job that it has ended, and only that one. */
TEST(a_job_follows_one_that_was_interrupted)
{
    nobody_launched_us();
    CHECK(signal(SIGINT, count_interrupt) != SIG_ERR);
    CHECK_ERROR(dp_spawn(2, interrupt_parent, NULL), DP_ERR_ABORTED, "ended by signal 2");
    CHECK_INT(interrupts, 1);
    CHECK_OK(dp_spawn(2, do_nothing, NULL));
    CHECK_INT(interrupts, 1);
    check_no_child();
}

/* As under nohup. */
TEST(a_signal_that_is_ignored_ends_nothing)
{
    shared *all = share_memory();
    int status = 0;
    nobody_launched_us();
    pid_t parent = fork();
    if (parent == 0) {
        signal(SIGINT, SIG_IGN);
        _exit(dp_spawn(2, rest_a_while, all) == DP_OK ? EXIT_SUCCESS : EXIT_FAILURE);
    }
    while (*(volatile int *)&all->seen[0] == 0 || *(volatile int *)&all->seen[1] == 0)
        poll(NULL, 0, 5);
    kill(parent, SIGINT);
    CHECK_INT(waitpid(parent, &status, 0), parent);
    CHECK(WIFEXITED(status) && WEXITSTATUS(status) == EXIT_SUCCESS);
}

TEST(spawned_processes_end_with_their_parent)
{
    check_signal(SIGKILL);
}
