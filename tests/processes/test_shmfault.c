/* test_shmfault.c - opening shared memory while the system says no: every call that it makes fails
   once, in every process; all processes come through, or fail together and leave nothing behind.
   The implementation is in this file once more, static, with system calls that can be made to
   fail; so what proofs between processes are made of is looked at here too. */

#define _GNU_SOURCE
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <link.h>
#include <pthread.h>
#include <sched.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/mount.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <sys/time.h>
#include <unistd.h>

#if defined(__linux__)

typedef struct fault {
    int at; /* this call fails, the first is 1; 0: none does */
    int count;
    int error;
    int no_memfd; /* the system has none */
    int no_secrets;
    int no_entropy; /* secrets are in a file alone */
    int old_gomp;   /* there is one */
} fault;
static fault trouble;

static int fails(void)
{
    trouble.count++;
    if (trouble.at == 0 || trouble.count != trouble.at)
        return 0;
    errno = trouble.error;
    return 1;
}

/* Another thread may exec at any time: what the system gives is closed by exec from the start. */
static int left_to_exec;

static int watched(int fd)
{
    left_to_exec += fd >= 0 && (fcntl(fd, F_GETFD) & FD_CLOEXEC) == 0;
    return fd;
}

static int faulty_memfd_create(const char *name, unsigned flags)
{
    if (trouble.no_memfd) {
        errno = ENOSYS;
        return -1;
    }
    return fails() ? -1 : watched(memfd_create(name, flags));
}

static int faulty_getentropy(void *out, size_t bytes)
{
    errno = ENOSYS;
    return trouble.no_secrets || trouble.no_entropy ? -1 : getentropy(out, bytes);
}

static int faulty_dl_iterate_phdr(int (*fn)(struct dl_phdr_info *, size_t, void *), void *user)
{
    struct dl_phdr_info old = {.dlpi_name = "/usr/lib/libgomp.so.1"};
    return trouble.old_gomp ? fn(&old, sizeof old, user) : dl_iterate_phdr(fn, user);
}

static FILE *faulty_fopen(const char *path, const char *mode)
{
    FILE *file = trouble.no_secrets && strcmp(path, "/dev/urandom") == 0 ? NULL : fopen(path, mode);
    watched(file != NULL ? fileno(file) : -1);
    return file;
}

static int faulty_open(const char *path, int flags, ...)
{
    va_list args;
    va_start(args, flags);
    unsigned mode = (flags & O_CREAT) != 0 ? va_arg(args, unsigned) : 0;
    va_end(args);
    return fails() ? -1 : watched(open(path, flags, mode));
}

static int faulty_ftruncate(int fd, off_t bytes)
{
    return fails() ? -1 : ftruncate(fd, bytes);
}

static int faulty_posix_fallocate(int fd, off_t first, off_t bytes)
{
    return fails() ? trouble.error : posix_fallocate(fd, first, bytes);
}

static int faulty_fstat(int fd, struct stat *out)
{
    return fails() ? -1 : fstat(fd, out);
}

static void *faulty_mmap(void *at, size_t bytes, int protection, int flags, int fd, off_t first)
{
    return fails() ? MAP_FAILED : mmap(at, bytes, protection, flags, fd, first);
}

/* ---- what connections need ------------------------------------------------------------------- */

static struct {
    int at, count; /* as above */
    int error;
} cable_cut;

static int is_cable_cut(void)
{
    cable_cut.count += cable_cut.at > 0;
    if (cable_cut.at == 0 || cable_cut.count != cable_cut.at)
        return 0;
    errno = cable_cut.error;
    return 1;
}

static int faulty_socket(int family, int type, int protocol)
{
    return is_cable_cut() ? -1 : watched(socket(family, type, protocol));
}

static int faulty_bind(int fd, const struct sockaddr *at, socklen_t bytes)
{
    return is_cable_cut() ? -1 : bind(fd, at, bytes);
}

static int faulty_socketpair(int family, int type, int protocol, int ends[2])
{
    int status = socketpair(family, type, protocol, ends);
    for (int i = 0; i < 2 && status == 0; i++)
        watched(ends[i]);
    return status;
}

static int faulty_accept4(int fd, struct sockaddr *at, socklen_t *bytes, int flags)
{
    int got = watched(accept4(fd, at, bytes, flags));
    if (got >= 0 && is_cable_cut()) {
        close(got);
        return -1;
    }
    return got;
}

static int faulty_posix_memalign(void **out, size_t align, size_t bytes)
{
    return is_cable_cut() ? ENOMEM : posix_memalign(out, align, bytes);
}

static int locks_asked; /* for */
static int lock_us;     /* so long a process has no core before it asks */

/* Only locks that are set: what asks for one fails by saying nothing. */
static int faulty_fcntl(int fd, int command, ...)
{
    va_list args;
    int status = -1;
    va_start(args, command);
    locks_asked += command == F_GETLK;
    if (command == F_GETLK && lock_us > 0)
        usleep((unsigned)lock_us);
    if (command != F_SETLK && command != F_GETLK)
        status = fcntl(fd, command, va_arg(args, int));
    else if (command == F_GETLK || !fails())
        status = fcntl(fd, command, va_arg(args, struct flock *));
    va_end(args);
    return status;
}

/* Members of tables that are called `open` have another name here; nobody minds. */
#define memfd_create    faulty_memfd_create
#define open            faulty_open
#define ftruncate       faulty_ftruncate
#define posix_fallocate faulty_posix_fallocate
#define fstat           faulty_fstat
#define mmap            faulty_mmap
#define fcntl           faulty_fcntl
#define getentropy      faulty_getentropy
#define fopen           faulty_fopen
#define dl_iterate_phdr faulty_dl_iterate_phdr
#define socket          faulty_socket
#define bind            faulty_bind
#define accept4         faulty_accept4
#define socketpair      faulty_socketpair
#define posix_memalign  faulty_posix_memalign
#define DP_STATIC
#define DP_IMPLEMENTATION
#include "dp.h"

#undef socketpair /* processes of a test meet by what they keep */
#include "meeting.h"
#include "methods.h"

static int victim; /* the process that a call fails in */
static fault next;

static dp_status open_shared(meeting *m, test_allocator *counter, dp_ctx **out)
{
    static const dp_coll_ops *colls[2];
    colls[0] = dp_shm_coll();
    *out = NULL;
    return dp_open(&(dp_config){.colls = colls,
                                .device_count = 1,
                                .allocator = test_allocator_of(counter),
                                .bootstrap = {meeting_all_gather, m, m->process, m->process_count}},
                   out);
}

/* Whether it opened, as all the others did, or did not. */
static bool opened_or_not(meeting *m, test_allocator *counter)
{
    char same[BOOT_PROCESSES];
    int files = open_files();
    dp_ctx *ctx;
    dp_status status = open_shared(m, counter, &ctx);
    char good = status == DP_OK;
    CHECK_OK(meeting_all_gather(&good, same, 1, m));
    for (int p = 0; p < m->process_count; p++)
        CHECK_INT(same[p], good);
    CHECK(good || (ctx == NULL && strstr(dp_last_error(), "dp_open: ") == dp_last_error()));
    counter->fail_at = 0;
    if (good) {
        CHECK_OK(dp_barrier(ctx));
        dp_close(ctx);
    }
    CHECK_INT(open_files(), files);
    CHECK_INT(left_to_exec, 0);
    CHECK_NO_LEAKS(counter);
    return good;
}

static void open_with_fault(meeting *m)
{
    test_allocator counter = {0};
    trouble = m->process == victim ? next : (fault){.no_memfd = next.no_memfd};
    opened_or_not(m, &counter);
    CHECK(trouble.count >= trouble.at || trouble.at > 3); /* a few calls there are */
}

TEST_SLOW(every_system_call_fails_once, 60)
{
    static const int errors[] = {ENOSPC, EMFILE, ENOMEM};
    int before = count_names("/dev/shm", "dp-");
    for (int i = 0; i < 2 * 2; i++) {
        victim = i % 2;
        for (int at = 1; at <= 16; at++) {
            next = (fault){.at = at, .error = errors[at % 3], .no_memfd = i / 2};
            in_processes(2, open_with_fault);
            check_names(before);
        }
    }
}

/* ---- parameters that processes have once ----------------------------------------------------- */

static const dp_method shared_methods[] = {{"forward", give_none}, {"backward", give_none}};

static void share_with_fault(meeting *m)
{
    static float numbers[5000];
    const dp_param_config param = {.name = "w", .ndim = 1, .shape = {5000}};
    test_allocator counter = {0};
    dp_module *net = NULL, *par = NULL;
    dp_param_info info;
    dp_ctx *ctx;
    CHECK_OK(open_shared(m, &counter, &ctx));
    CHECK_OK(dp_module_create(
        ctx,
        &(dp_module_config){
            .methods = shared_methods, .method_count = 2, .params = &param, .param_count = 1},
        &net));
    for (int i = 0; i < 5000; i++)
        numbers[i] = (float)i;
    CHECK_OK(dp_params_write(net, 0, numbers, sizeof numbers));
    trouble = m->process == victim ? next : (fault){0};
    dp_status status = dp_distributed(net, &(dp_distributed_config){.share_params = true}, &par);
    char good = status == DP_OK, same[BOOT_PROCESSES];
    CHECK_OK(meeting_all_gather(&good, same, 1, m));
    CHECK_INT(same[1 - m->process], good);
    CHECK(good || status == DP_ERR_NO_MEMORY || dp_status_class(status) == DP_CLASS_JOB);
    if (good || status == DP_ERR_NO_MEMORY) { /* nothing has changed */
        CHECK_OK(dp_module_param(net, 0, &info));
        CHECK_BYTES(info.data.data, numbers, sizeof numbers);
        CHECK_INT(info.shared, good);
    }
    trouble = (fault){.at = good && m->process == victim, .error = ENOMEM}; /* of what ends it */
    if (good && m->process == victim) {
        CHECK_STATUS(dp_module_destroy(par), DP_ERR_NO_MEMORY);
        CHECK_OK(dp_module_param(par, 0, &info));
        CHECK(info.shared);
    }
    if (good) {
        CHECK_OK(dp_module_destroy(par));
        CHECK_OK(dp_module_param(net, 0, &info));
        CHECK(!info.shared);
        CHECK_BYTES(info.data.data, numbers, sizeof numbers);
    }
    dp_close(ctx);
    CHECK_NO_LEAKS(&counter);
}

TEST_SLOW(every_call_of_sharing_fails_once, 60)
{
    for (int i = 0; i < 2 * 6; i++) {
        victim = i % 2;
        next = (fault){.at = i / 2 + 1, .error = ENOMEM};
        in_processes(2, share_with_fault);
    }
}

/* ---- who has left, and who is interrupted ---------------------------------------------------- */

/* Process 0 doubts whether process 1 lives, which comes late, and has left before its lock is asked
   for. */
static void leave_before_the_lock_is_asked_for(meeting *m)
{
    test_allocator counter = {0};
    dp_ctx *ctx;
    CHECK_OK(open_shared(m, &counter, &ctx));
    lock_us = m->process == 0 ? 150000 : 0;
    if (m->process == 1)
        usleep(50000);
    CHECK_OK(dp_barrier(ctx));
    dp_close(ctx);
}

TEST(who_has_left_after_a_collective_has_not_died)
{
    in_processes(2, leave_before_the_lock_is_asked_for);
}

static int wake_up; /* a pipe's end */

static void *wake_later(void *user)
{
    (void)user;
    usleep(60000);
    CHECK_INT(write(wake_up, "", 1), 1);
    return NULL;
}

static void no_handler(int which)
{
    (void)which;
}

/* As a profiler's timer does. */
static void interrupt_each_us(int us)
{
    const struct sigaction act = {.sa_handler = no_handler};
    const struct itimerval often = {{0, us}, {0, us}};
    CHECK_INT(sigaction(SIGALRM, &act, NULL), 0);
    CHECK_INT(setitimer(ITIMER_REAL, &often, NULL), 0);
}

TEST(signals_do_not_end_a_wait_for_a_socket)
{
    int ends[2];
    pthread_t other;
    sigset_t alarm;
    CHECK_INT(pipe(ends), 0);
    wake_up = ends[1];
    sigemptyset(&alarm);
    sigaddset(&alarm, SIGALRM);
    CHECK_INT(pthread_sigmask(SIG_BLOCK, &alarm, NULL), 0); /* the other thread gets none */
    CHECK_INT(pthread_create(&other, NULL, wake_later, NULL), 0);
    CHECK_INT(pthread_sigmask(SIG_UNBLOCK, &alarm, NULL), 0);
    interrupt_each_us(2000);
    uint64_t begun_ns = dp__os_now_ns();
    CHECK(!dp__os_ready(ends[0], POLLIN, 20));
    CHECK(dp__os_now_ns() - begun_ns >= 19000000);
    CHECK(dp__os_ready(ends[0], POLLIN, 20000));
    interrupt_each_us(0);
    CHECK_INT(pthread_join(other, NULL), 0);
    close(ends[0]);
    close(ends[1]);
}

static void open_without_memfd(meeting *m)
{
    test_allocator counter = {0};
    trouble = (fault){.no_memfd = 1};
    CHECK(opened_or_not(m, &counter));
}

TEST(without_memfd_a_name_serves)
{
    int before = count_names("/dev/shm", "dp-");
    in_processes(3, open_without_memfd);
    check_names(before);
}

/* The pages are asked for again when a signal came in between. */
static void open_in_spite_of_signals(meeting *m)
{
    test_allocator counter = {0};
    trouble =
        (fault){.at = 4, .error = EINTR}; /* process 0: memfd, ftruncate, fstat, mmap, pages */
    if (m->process == 0)
        trouble.at = 5;
    CHECK(opened_or_not(m, &counter));
}

TEST(a_signal_is_no_failure)
{
    in_processes(2, open_in_spite_of_signals);
}

static size_t fail_at;

static void open_without_memory(meeting *m)
{
    test_allocator counter = {.fail_at = m->process == 1 ? fail_at : 0};
    trouble = (fault){0};
    opened_or_not(m, &counter);
}

TEST_SLOW(every_allocation_fails_once, 60)
{
    for (fail_at = 1; fail_at < 40; fail_at++)
        in_processes(2, open_without_memory);
}

static size_t room_kib;

static void open_without_room(meeting *m)
{
    test_allocator counter = {0};
    char has[40];
    dp_ctx *ctx;
    trouble = (fault){.no_memfd = 1};
    snprintf(has, sizeof has, "/dev/shm has %zu KiB", room_kib);
    dp_status status = open_shared(m, &counter, &ctx);
    CHECK(status == DP_ERR_NO_MEMORY || status == DP_ERR_REMOTE);
    CHECK_SAYS(dp_last_error(), has);
    CHECK(ctx == NULL);
    CHECK_NO_LEAKS(&counter);
}

/* Enough for what all share, of one communicator and of both that a context has, and none for what
   each process has. */
TEST(too_little_room_is_a_sentence)
{
    char size[40];
    if (unshare(CLONE_NEWNS) != 0 || mount("none", "/", NULL, MS_REC | MS_PRIVATE, NULL) != 0)
        SKIP("only root may mount");
    for (size_t shared = 1; shared <= 2; shared++) {
        room_kib = shared * dp__shm_control_bytes(2) >> 10;
        snprintf(size, sizeof size, "size=%zuk", room_kib);
        if (mount("none", "/dev/shm", "tmpfs", 0, size) != 0)
            SKIP("only root may mount");
        in_processes(2, open_without_room);
        CHECK_INT(count_names("/dev/shm", "dp-"), 0);
        CHECK_INT(umount("/dev/shm"), 0);
    }
}

static dp_status do_nothing(void *user)
{
    (void)user;
    return DP_OK;
}

/* A number that is used once may be any, a secret may not. */
TEST(a_secret_that_cannot_be_drawn)
{
    setenv("DP_LAUNCH", "none", 1); /* whatever started the tests */
    trouble.no_secrets = 1;
    CHECK(dp__os_random() != dp__os_random());
    CHECK(dp_spawn(2, do_nothing, NULL) == DP_ERR_UNSUPPORTED);
    CHECK_SAYS(dp_last_error(), "dp_spawn: the system has no random numbers for the secret");
    trouble.no_secrets = 0;
    CHECK(dp_spawn(2, do_nothing, NULL) == DP_OK);
}

static void *wait_a_while(void *user)
{
    (void)user;
    rest(60000);
    return NULL;
}

/* Its threads may be any of those that are there; without it any may be. */
TEST(threads_that_an_old_openmp_keeps)
{
    pthread_t thread;
    setenv("DP_LAUNCH", "none", 1);
    trouble.old_gomp = 1;
    CHECK(dp_spawn(2, do_nothing, NULL) == DP_OK);
    CHECK_INT(pthread_create(&thread, NULL, wait_a_while, NULL), 0);
    CHECK(dp_spawn(2, do_nothing, NULL) == DP_ERR_STATE);
    CHECK_SAYS(dp_last_error(), "dp_spawn: gcc's OpenMP (libgomp) is here and may have threads");
    trouble.old_gomp = 0;
    CHECK(dp_spawn(2, do_nothing, NULL) == DP_OK);
}

/* ---- a process that comes, and does not get on ----------------------------------------------- */

enum { COUNT = 2 };

static void be_process(int process, int count)
{
    char address[40], which[12], all[12];
    snprintf(address, sizeof address, "@stranger-%d", (int)getppid());
    snprintf(which, sizeof which, "%d", process);
    snprintf(all, sizeof all, "%d", count);
    setenv("DP_LAUNCH", "dp", 1);
    setenv("DP_PROCESS", which, 1);
    setenv("DP_PROCESS_COUNT", all, 1);
    setenv("DP_LOCAL_PROCESS", which, 1);
    setenv("DP_LOCAL_PROCESS_COUNT", all, 1);
    setenv("DP_ADDR", address, 1);
    setenv("DP_SECRET", "of this test", 1);
}

/* ---- connections over TCP -------------------------------------------------------------------- */

static int *cuts;                     /* so many calls process `victim` has made, as all see it */
static const char *connections = "1"; /* to each process */

static dp_status open_cut(const dp_host *host, const dp_comm_config *config, dp_comm **out)
{
    cable_cut.at = config->bootstrap->process == victim ? next.at : 0;
    cable_cut.error = next.error;
    dp_status status = dp_tcp_coll()->open(host, config, out);
    next.at -= cable_cut.count; /* the courier's are opened after the caller's */
    cuts[0] += cable_cut.count;
    cable_cut.at = cable_cut.count = 0;
    return status;
}

/* All are there, or none is; nobody waits for the time-out, which is far away. */
static void connect_with_fault(meeting *m)
{
    dp_coll_ops table = *dp_tcp_coll();
    const dp_coll_ops *const colls[] = {&table, NULL};
    dp_config config = config_of(m, 1);
    char same[BOOT_PROCESSES], who[16];
    dp_ctx *ctx = NULL;
    float one = 1;
    const dp_part part = {.send = &one, .recv = &one};
    config.colls = colls;
    be_process(m->process, m->process_count);
    config.bootstrap = (dp_bootstrap){0};
    CHECK_INT(setenv("DP_INTERFACE", "lo", 1), 0);
    CHECK_INT(setenv("DP_CONNECTIONS", connections, 1), 0);
    table.open = open_cut;
    left_to_exec = 0; /* by the tests themselves */
    int files = open_files();
    dp_status status = dp_open(&config, &ctx);
    char good = status == DP_OK;
    CHECK_OK(meeting_all_gather(&good, same, 1, m));
    for (int p = 0; p < m->process_count; p++)
        CHECK_INT(same[p], good);
    CHECK(good || (ctx == NULL && strstr(dp_last_error(), "dp_open: ") == dp_last_error()));
    CHECK(good || status != DP_ERR_TIMEOUT);
    snprintf(who, sizeof who, "process %d", victim);
    if (!good && m->process != victim)
        CHECK_SAYS(dp_last_error(), who);
    if (good) {
        CHECK_OK(dp_all_reduce(ctx, &part, 1, DP_F32, DP_OP_SUM));
        CHECK_F64(one, m->process_count, 0);
        dp_close(ctx);
    }
    CHECK_INT(open_files(), files);
    CHECK_INT(left_to_exec, 0);
}

static void each_step_fails_once(void)
{
    cuts = shared_memory(sizeof *cuts);
    for (victim = 0; victim < 3; victim++) {
        int at = 0;
        for (cuts[0] = 0; cuts[0] >= at;) {
            at += test_step();
            next = (fault){.at = at, .error = EMFILE};
            cuts[0] = 0;
            on_machines("abc", connect_with_fault);
        }
        CHECK(cuts[0] > 10);
    }
}

TEST_SLOW(every_step_to_a_connection_fails_once, 120)
{
    each_step_fails_once();
}

TEST_SLOW(every_step_to_several_connections_fails_once, 120)
{
    connections = "3";
    each_step_fails_once();
}

/* ---- several connections to a process -------------------------------------------------------- */

static dp__tcp *tcp_of(dp_ctx *ctx)
{
    return dp__mesh_of(ctx->lanes[DP__CALLER].carrier)->endpoint.own;
}

/* Both processes cut what they have for each other alike: it is all there, once, and in order. */
TEST(stripes_are_all_of_it)
{
    static const size_t sizes[] = {0, 1, 16383, 16384, 16385, 49153, 1000003, INT_MAX};
    for (int each = 1; each <= DP__CONNECTIONS_MAX; each++)
        for (size_t i = 0; i < sizeof sizes / sizeof sizes[0]; i++) {
            size_t end = 0, first;
            for (int which = 0; which < each; which++) {
                size_t bytes = dp__tcp_stripe(sizes[i], each, which, &first);
                CHECK(first == end && (bytes == 0 || which == 0 || first % 16384 == 0));
                CHECK(which > 0 || bytes == sizes[i] || bytes >= 16384);
                end = first + bytes;
            }
            CHECK(end == sizes[i]);
        }
    size_t first;
    CHECK(dp__tcp_stripe(1 << 20, 8, 7, &first) == 1 << 17);
}

static int which_lost;

/* One of several is lost while they are used: the process is, and what is said is the same. */
static void lose_a_connection(meeting *m)
{
    enum { MUCH = 300000 };
    static float data[MUCH];
    const dp_part part = {.send = data, .recv = data};
    dp_config config = config_of(m, 1);
    const dp_coll_ops *const colls[] = {dp_tcp_coll(), NULL};
    dp_ctx *ctx = NULL;
    dp_failure_info failure;
    dp_status status = DP_OK;
    config.colls = colls;
    CHECK_INT(setenv("DP_INTERFACE", "lo", 1), 0);
    CHECK_INT(setenv("DP_CONNECTIONS", "3", 1), 0);
    CHECK_OK(dp_open(&config, &ctx));
    const dp__connections *all = &tcp_of(ctx)->connections;
    CHECK_INT(all->count, 6);
    if (m->process == 0)
        CHECK_INT(shutdown(all->fds[3 + which_lost], SHUT_RDWR), 0);
    while (status == DP_OK)
        status = dp_all_reduce(ctx, &part, MUCH, DP_F32, DP_OP_SUM);
    CHECK(status == DP_ERR_REMOTE);
    CHECK_SAYS(dp_last_error(), "the connection to rank");
    CHECK_SAYS(dp_last_error(), "has ended");
    CHECK(dp_failure(ctx, &failure));
    wait_for_all(m);
    dp_close(ctx);
}

TEST_SLOW(one_of_several_connections_is_lost, 60)
{
    meeting_machines = "ab";
    for (which_lost = 0; which_lost < 3; which_lost++)
        in_processes(2, lose_a_connection);
}

/* ---- what exec leaves open ------------------------------------------------------------------- */

/* What a program that is started here has, beside what it opens itself. */
static int files_after_exec(void)
{
    int count = -1;
    FILE *program = popen("ls /proc/self/fd | wc -l", "r");
    CHECK(program != NULL);
    CHECK_INT(fscanf(program, "%d", &count), 1);
    CHECK_INT(pclose(program), 0);
    return count;
}

static void *exec_beside(void *user)
{
    *(int *)user = files_after_exec();
    return NULL;
}

/* A job of two machines, with memory of its own on one of them. */
static void exec_in_a_job(meeting *m)
{
    dp_config config = config_of(m, 1);
    pthread_t thread;
    dp_ctx *ctx = NULL;
    int before = files_after_exec(), files = open_files(), during = -1;
    be_process(m->process, m->process_count);
    CHECK_INT(setenv("DP_INTERFACE", "lo", 1), 0);
    config.bootstrap = (dp_bootstrap){0};
    config.colls = NULL;
    CHECK_OK(dp_open(&config, &ctx));
    CHECK_OK(dp_barrier(ctx));
    CHECK(open_files() > files);
    CHECK_INT(pthread_create(&thread, NULL, exec_beside, &during), 0);
    CHECK_INT(pthread_join(thread, NULL), 0);
    CHECK_INT(during, before);
    CHECK_OK(dp_barrier(ctx));
    dp_close(ctx);
    CHECK_INT(left_to_exec, 0);
}

TEST_SLOW(program_that_a_thread_starts_has_no_file_of_a_job, 60)
{
    on_machines("aab", exec_in_a_job);
}

/* The way to a host, a name, a secret. */
TEST(what_is_open_for_a_moment_is_closed_by_exec)
{
    char usual[200], secret[8], quota[8];
    dp__os_found found;
    int ends[2];
    dp__os_host_usual(usual, sizeof usual);
    dp__os_resolve(dp__os_look_up, "localhost", 7, 5000, &found);
    CHECK(dp__os_pair(ends));
    dp__os_close(ends[0]);
    dp__os_close(ends[1]);
    CHECK(dp__quota_read("/proc/self", "stat", quota, sizeof quota));
    trouble.no_entropy = 1;
    CHECK(dp__os_secret(secret, sizeof secret));
    CHECK_INT(left_to_exec, 0);
}

/* Process 1 has heard that all are here. Then it says something, or nothing, or ends. */
static void (*then)(int fd);

static void come_in(void)
{
    dp__launch launch;
    dp__join_request request = {.magic = DP__JOIN_MAGIC,
                                .version = DP_VERSION,
                                .process = 1,
                                .process_count = COUNT,
                                .patience_ms = 400};
    dp__welcome welcome;
    int fd = -1;
    be_process(1, COUNT);
    CHECK(dp__launch_read(NULL, &launch) == DP_OK);
    dp__target first = {.host = "", .launch = &launch};
    memcpy(first.place, launch.place, sizeof first.place);
    CHECK(dp__connect_until(&first, 0, launch.key, &request, dp__os_after_ms(9000), &fd) == DP_OK);
    CHECK(dp__await_welcome(fd, COUNT, dp__os_after_ms(9000), &welcome) == DP_OK);
    then(fd);
}

static void say_nothing(int fd)
{
    (void)fd;
    rest(20000);
}

static void leave(int fd)
{
    (void)fd;
}

static void say_what_failed(int fd)
{
    dp__tree_header_failure(fd, DP_ERR_NO_MEMORY, 1, "process 1 of 2 is full");
}

/* It hears that process 0 is there, and then it says what process 0 alone may say. */
static void ask_and_say_a_wrong_thing(int fd)
{
    dp__tree_header note = {DP__HEADER_MAGIC, DP__ASK, 0, 1, 0}, answer;
    CHECK(dp__tree_header_send(fd, &note, NULL, dp__os_after_ms(100)) == DP_OK);
    CHECK(dp__wire_receive(fd, &answer, sizeof answer, dp__os_after_ms(5000)) == DP_OK);
    CHECK(dp__tree_header_is_sound(&answer) && answer.kind == DP__HERE);
    note.kind = DP__WELCOME;
    note.bytes = sizeof(dp__welcome);
    CHECK(dp__wire_send(fd, &note, sizeof note, dp__os_after_ms(100)) == DP_OK);
    rest(20000);
}

static void open_with_stranger(dp_status want, const char *text)
{
    dp_ctx *ctx;
    dp_status status;
    pid_t pids[COUNT];
    for (int p = COUNT - 1; p >= 0; p--) {
        pids[p] = fork();
        CHECK(pids[p] >= 0);
        if (pids[p] == 0 && p == 1) {
            come_in();
            exit(EXIT_SUCCESS);
        }
        if (pids[p] == 0) {
            be_process(0, COUNT);
            status = dp_open(&(dp_config){.device_count = 1, .timeout_ms = 1000}, &ctx);
            CHECK_INT(status, want);
            CHECK_SAYS(dp_last_error(), text);
            exit(EXIT_SUCCESS);
        }
    }
    int ended = 0;
    CHECK_INT(waitpid(pids[0], &ended, 0), pids[0]);
    CHECK_INT(ended, 0);
    kill(pids[1], SIGKILL);
    CHECK_INT(waitpid(pids[1], NULL, 0), pids[1]);
}

TEST(process_that_joins_and_stalls_is_named)
{
    then = say_nothing;
    open_with_stranger(DP_ERR_TIMEOUT,
                       "dp_open: process 1 of 2 joined, but did not connect to the others within");
    then = leave;
    open_with_stranger(DP_ERR_REMOTE,
                       "dp_open: process 1 of 2 joined, and ended before all had connected");
    then = say_what_failed;
    open_with_stranger(DP_ERR_REMOTE, "dp_open: process 1 of 2 is full");
    then = ask_and_say_a_wrong_thing;
    open_with_stranger(DP_ERR_REMOTE,
                       "dp_open: process 1 of 2 joined, and ended before all had connected");
}

/* Process 1 begins a letter, and ends: nothing is made of what has come. */
TEST(half_a_letter_is_none)
{
    for (size_t some = 0; some < sizeof(dp__progress_message);
         some += sizeof(dp__progress_message) / 3) {
        int fds[2];
        dp__tree tree = {.process_count = 2, .claim = -1};
        const dp__tree_header note = {DP__HEADER_MAGIC, DP__PROGRESS, 0, 1,
                                      sizeof(dp__progress_message)};
        const dp__progress_message letter = {.asks = 1};
        CHECK_INT(socketpair(AF_UNIX, SOCK_STREAM, 0, fds), 0);
        dp__tree_link(&tree, fds[0], 1);
        CHECK(dp__wire_send(fds[1], &note, sizeof note, dp__os_after_ms(100)) == DP_OK);
        CHECK(dp__wire_send(fds[1], &letter, some, dp__os_after_ms(100)) == DP_OK);
        dp__os_close(fds[1]);
        CHECK_STATUS(dp__tree_hear(&tree, &tree.links[0], false), DP_ERR_REMOTE);
        CHECK_STR(dp_last_error(), "process 1 of 2 ended while it was sending");
        CHECK(tree.links[0].left);
        dp__os_close(fds[0]);
    }
}

/* ---- jobs of many, seen from one of them ----------------------------------------------------- */

/* One whose processes are alone on their machines, and have begun nothing. */
static dp__job *make_job(int process_count)
{
    size_t count = (size_t)process_count, head = dp__board_bytes(process_count);
    size_t entries = DP__LANES * (DP__KEPT + count) * sizeof(dp__entry);
    dp__job *job = test_room(sizeof *job);
    memset(job, 0, sizeof *job);
    job->process_count = process_count;
    job->timeout_ms = 60000;
    job->look_ns = DP__LOOK_NS;
    job->shared.fd = -1;
    job->board = dp__os_alloc(head + entries, 128, NULL);
    job->firsts = test_room((3 * count + 1) * sizeof(int));
    job->ids = job->firsts + count + 1;
    job->twins = job->ids + count;
    memset(job->board, 0, head + entries);
    for (int p = 0; p < process_count; p++) {
        job->firsts[p + 1] = p + 1;
        job->twins[p] = p;
        atomic_store(&dp__progress_of(job, p)->presence, DP__INSIDE);
    }
    for (int i = 0; i < DP__LANES; i++)
        job->journals[i] = (dp__journal){.job = job, .place = i};
    return job;
}

static void connect_link(dp__tree *tree, int process, int *out_end)
{
    int fds[2];
    CHECK_INT(socketpair(AF_UNIX, SOCK_STREAM, 0, fds), 0);
    dp__os_prepare(fds[0], AF_UNIX);
    dp__os_prepare(fds[1], AF_UNIX);
    dp__tree_link(tree, fds[0], process);
    *out_end = fds[1];
}

static void send_letter(int fd, int from, dp__progress_message letter)
{
    const dp__tree_progress whole = {{DP__HEADER_MAGIC, DP__PROGRESS, 0, from, sizeof letter},
                                     letter};
    CHECK(dp__wire_send(fd, &whole, sizeof whole, dp__os_after_ms(5000)) == DP_OK);
}

/* How many letters about each process have come here. */
static void count_letters(int fd, int counts[4])
{
    dp__tree_progress whole;
    dp__os_watch watch = {.fd = fd, .events = POLLIN};
    memset(counts, 0, 4 * sizeof *counts);
    while (dp__os_poll(&watch, 1, 0) > 0) {
        CHECK(dp__wire_receive(fd, &whole, sizeof whole, dp__os_after_ms(5000)) == DP_OK);
        CHECK_INT(whole.header.kind, DP__PROGRESS);
        CHECK(whole.header.process >= 0 && whole.header.process < 4);
        counts[whole.header.process]++;
    }
}

static void check_letters(const int ends[2], int of_zero, bool all)
{
    static const int passed[2][4] = {{0, 0, 1, 1}, {0, 1, 0, 0}};
    for (int i = 0; i < 2; i++) {
        int counts[4];
        count_letters(ends[i], counts);
        for (int p = 0; p < 4; p++)
            CHECK_INT(counts[p], p == 0 ? of_zero : all && passed[i][p]);
    }
}

static bool sends_to_all(dp_ctx *ctx, const dp__progress_message *progress)
{
    (void)ctx, (void)progress;
    return true;
}

static dp_status hears_of_nothing(dp_ctx *ctx, int *out_process)
{
    (void)ctx, (void)out_process;
    return DP_OK;
}

static void tells_nobody(dp_ctx *ctx, dp_status status, int process, const char *text)
{
    (void)ctx, (void)status, (void)process, (void)text;
}

/* Both processes are in a collective, and answer: it may have ended while one of them asked, so the
   time is up only when that one has looked again. */
TEST(wait_looks_once_more_before_it_is_late)
{
    static const dp__progress_carrier carrier = {
        .hear = hears_of_nothing, .tell = tells_nobody, .send = sends_to_all};
    dp__job *job = make_job(2);
    dp__journal *journal = &job->journals[DP__CALLER];
    job->carrier = &carrier;
    for (unsigned seq = 1; seq <= 2; seq++) {
        for (int p = 0; p < 2; p++) {
            atomic_store(&dp__progress_of(job, p)->tracks[DP__CALLER].begun, seq);
            atomic_store(&dp__progress_of(job, p)->looked_ns, dp__os_now_ns() + 9000000000);
        }
        CHECK(dp__journal_late(journal, seq) == DP_OK);
    }
    CHECK_STATUS(dp__journal_late(journal, 2), DP_ERR_TIMEOUT);
    CHECK(strstr(dp_last_error(), "all processes have begun it, and it did not end") != NULL);
    dp__os_free(job->board, 0, NULL);
}

static atomic_bool said_all;

static void *guess_until_all_is_said(void *user)
{
    const dp__journal *journal = user;
    while (!atomic_load(&said_all))
        dp__lane_progress_guess(journal, 1);
    return NULL;
}

/* One thread waits, and guesses that process 1 has begun what has ended here; another one takes in
   that process 1 has begun more. */
TEST(guess_is_not_written_over_what_was_said)
{
    dp__job *job = make_job(2);
    dp__journal *journal = &job->journals[DP__CALLER];
    dp__lane_progress *own = dp__own_lane_progress(journal);
    dp__progress_message progress = {.presence = DP__INSIDE};
    pthread_t thread;
    atomic_store(&said_all, false);
    CHECK_INT(pthread_create(&thread, NULL, guess_until_all_is_said, journal), 0);
    for (unsigned seq = 2; seq < 400000; seq += 2) {
        const dp__entry last = {.seq = seq, .is.verb = DP_ALL_REDUCE};
        dp__words_store(dp__entry_of(journal, 0, seq), &last, DP__ENTRY_WORDS);
        atomic_store(&own->begun, seq);
        atomic_store(&own->ended, seq);
        progress.last[DP__CALLER].seq = seq + 1;
        (void)dp__progress_message_read(job, 1, &progress);
        CHECK(dp__has_begun(journal, 1, seq + 1));
    }
    atomic_store(&said_all, true);
    CHECK_INT(pthread_join(thread, NULL), 0);
    dp__os_free(job->board, 0, NULL);
}

/* Process 0 of 4, before 1 and 2; 3 is behind 2. All three ask, as they do who wait for it. */
TEST(letter_crosses_each_link_once)
{
    int ends[2];
    bool quick = false;
    for (int tries = 0; tries < 50 && !quick; tries++) {
        dp__job *job = make_job(4);
        dp__tree tree = {.process_count = 4,
                         .timeout_ms = 60000,
                         .claim = -1,
                         .job = job,
                         .lock = DP__LOCK_INITIALIZER};
        const dp__progress_message asks = {.presence = DP__INSIDE, .asks = 1};
        connect_link(&tree, 1, &ends[0]);
        connect_link(&tree, 2, &ends[1]);
        uint64_t begun_ns = dp__os_now_ns();
        for (int p = 1; p < 4; p++)
            send_letter(ends[p > 1], p, asks);
        CHECK(dp__tree_listen(&tree) == DP_OK);
        quick = dp__os_now_ns() - begun_ns < DP__ASK_NS;
        if (quick)
            check_letters(ends, 1, true);
        atomic_store(&dp__progress_of(job, 0)->tracks[0].said_after, 7); /* then there is news */
        if (quick)
            send_letter(ends[0], 1, asks);
        CHECK(dp__tree_listen(&tree) == DP_OK);
        if (quick) {
            int counts[4];
            count_letters(ends[0], counts);
            CHECK_INT(counts[0], 1);
        }
        for (int i = 0; i < 2; i++) {
            dp__os_close(ends[i]);
            dp__os_close(tree.links[i].fd);
        }
        dp__os_free(job->board, 0, NULL);
    }
    CHECK(quick);
}

/* To a process that computes, and reads nothing for hours. */
TEST(letters_without_room_are_dropped_whole)
{
    int end, counts[4];
    dp__tree tree = {.process_count = 4, .claim = -1, .lock = DP__LOCK_INITIALIZER};
    const dp__progress_message letter = {.presence = DP__INSIDE};
    connect_link(&tree, 1, &end);
    for (int i = 0; i < 5000; i++)
        dp__tree_post(&tree, NULL, 2, &letter);
    CHECK(!tree.links[0].left);
    count_letters(end, counts);
    CHECK(counts[2] > 0 && counts[2] < 5000);
    dp__tree_post(&tree, NULL, 3, &letter); /* there is room again */
    count_letters(end, counts);
    CHECK_INT(counts[3], 1);
    dp__os_close(end);
    dp__os_close(tree.links[0].fd);
}

/* Process 1 has begun to send its part, and sleeps: who reads that part is gone before those that
   ask whether it is there take it for the one that does not answer. */
TEST(who_reads_a_part_gives_up_before_those_that_ask)
{
    bool quick = false;
    for (int tries = 0; tries < 10 && !quick; tries++) {
        int end;
        char part[100];
        dp__tree tree = {.process_count = 2, .claim = -1, .lock = DP__LOCK_INITIALIZER};
        const dp__tree_header header = {DP__HEADER_MAGIC, DP__GATHER, 0, 1, sizeof part};
        connect_link(&tree, 1, &end);
        CHECK(dp__wire_send(end, &header, sizeof header, dp__os_after_ms(5000)) == DP_OK);
        CHECK(dp__tree_hear(&tree, &tree.links[0], false) == DP_OK);
        uint64_t begun_ns = dp__os_now_ns();
        CHECK_STATUS(dp__tree_take(&tree, &tree.links[0], DP__GATHER, part, sizeof part),
                     DP_ERR_TIMEOUT);
        uint64_t ms = (dp__os_now_ns() - begun_ns) / 1000000;
        CHECK_STR(dp_last_error(), "process 1 of 2 did not send everything within 0 s");
        CHECK(ms >= DP__GRACE_MS / 4);
        quick = ms < DP__GRACE_MS * 3 / 4;
        dp__os_close(end);
        dp__os_close(tree.links[0].fd);
    }
    CHECK(quick);
}

/* A table of the user's may call the bootstrap for as long as the context is open. */
TEST(waits_of_an_open_context_have_the_whole_time)
{
    dp__tree tree = {.process_count = 2, .claim = -1, .timeout_ms = 5000, .spare_ns = 7};
    dp__job *job = make_job(2);
    dp__tree_begin(&tree);
    CHECK(tree.ends_ns - tree.begun_ns == 7);
    dp__tree_end(&tree);
    CHECK(tree.spare_ns == 0);
    tree.job = job;
    for (int i = 0; i < 2; i++) {
        dp__tree_begin(&tree);
        CHECK(tree.ends_ns - tree.begun_ns == 5000000000);
        dp__tree_end(&tree);
    }
    dp__os_free(job->board, 0, NULL);
}

/* Process 1 has given its part of a call that does not take place here, and then failed. */
TEST(why_others_fail_stands_behind_what_is_not_read)
{
    int end;
    static const char part[1000];
    const char *why = "process 1 has no memory";
    dp__tree tree = {.process_count = 2, .claim = -1, .lock = DP__LOCK_INITIALIZER};
    const dp__tree_header header = {DP__HEADER_MAGIC, DP__GATHER, 0, 1, sizeof part};
    connect_link(&tree, 1, &end);
    CHECK(dp__tree_header_send(end, &header, part, dp__os_after_ms(5000)) == DP_OK);
    dp__tree_header_last(&end, DP_ERR_NO_MEMORY, 1, why);
    CHECK(dp__tree_listen(&tree) == DP_OK);
    CHECK_STATUS(dp__tree_skip(&tree), DP_ERR_REMOTE);
    CHECK_STR(dp_last_error(), why);
    dp__os_close(tree.links[0].fd);
}

static dp_status rests_in_vain(void *user, int ms)
{
    CHECK_INT(ms, 0);
    return ++*(int *)user < 3 ? DP_OK : dp_error(DP_ERR_REMOTE, "the job failed");
}

/* Process 0 is silent, and what this process waits for will never come. */
TEST(who_waits_to_be_welcomed_looks_around)
{
    int rests = 0, end;
    const dp__launch launch = {.rest = rests_in_vain, .user = &rests};
    dp__tree tree = {.process = 1, .process_count = 2, .claim = -1, .lock = DP__LOCK_INITIALIZER};
    connect_link(&tree, 0, &end);
    int fd = tree.links[0].fd;
    CHECK_STATUS(dp__await_news(&launch, fd, dp__os_after_ms(60000)), DP_ERR_REMOTE);
    CHECK_INT(rests, 3);
    CHECK(dp__await_news(&(dp__launch){.process = 1}, fd, dp__os_after_ms(10)) == DP_OK);
    CHECK_INT(dp__os_send(end, "", 1), 1);
    CHECK(dp__await_news(&launch, fd, dp__os_after_ms(60000)) == DP_OK);
    CHECK_INT(rests, 3);
    close(end);
    close(fd);
}

/* A process that was stopped until its patience was over judges as soon as it has heard that. */
TEST(answer_is_heard_behind_other_things)
{
    int end;
    dp__tree tree = {.process_count = 2, .claim = -1, .lock = DP__LOCK_INITIALIZER};
    const dp__tree_header ask = {DP__HEADER_MAGIC, DP__ASK, 0, 1, 0};
    const dp__tree_header here = {DP__HEADER_MAGIC, DP__HERE, 0, 1, 0};
    connect_link(&tree, 1, &end);
    for (int i = 0; i < 3; i++)
        CHECK(dp__tree_header_send(end, &ask, NULL, dp__os_after_ms(5000)) == DP_OK);
    CHECK(dp__tree_header_send(end, &here, NULL, dp__os_after_ms(5000)) == DP_OK);
    CHECK(dp__tree_hear_new(&tree, 0, false) == DP_OK);
    CHECK(tree.links[0].here);
    close(end);
    close(tree.links[0].fd);
}

enum { CROWD = 512, FALLEN = 300 };

/* Has the locks of all but the first, and then of all but one more, until nobody listens. */
static void hold_locks(const dp__shared *shared, int told, int hears)
{
    char word;
    struct flock lock = {.l_type = F_WRLCK, .l_whence = SEEK_SET, .l_start = 1, .l_len = CROWD - 1};
    CHECK_INT(fcntl(shared->fd, F_SETLK, &lock), 0);
    CHECK_INT(write(told, "x", 1), 1);
    CHECK_INT(read(hears, &word, 1), 1);
    lock = (struct flock){.l_type = F_UNLCK, .l_whence = SEEK_SET, .l_start = FALLEN, .l_len = 1};
    CHECK_INT(fcntl(shared->fd, F_SETLK, &lock), 0);
    CHECK_INT(write(told, "x", 1), 1);
    (void)!read(hears, &word, 1);
    _exit(EXIT_SUCCESS);
}

static int look_for_dead(dp__journal *ring)
{
    const dp__slice slice = dp__slice_of(ring);
    locks_asked = 0;
    return dp__journal_dead(ring, &slice, 1);
}

/* While 1 of 512 waits it asks for 64 locks in a look, and while 256 do, each for one; and it finds
   the one that has died. */
TEST(those_who_wait_share_the_asking)
{
    int down[2], up[2], found = -1, looks = 0, ended = 0;
    char word;
    dp__job *job = make_job(CROWD);
    dp__journal *ring = &job->journals[0];
    job->shared.fd = memfd_create("locks", 0);
    job->shared.data = job->board;
    CHECK(job->shared.fd >= 0 && pipe(down) == 0 && pipe(up) == 0);
    pid_t pid = fork();
    if (pid == 0) {
        close(down[1]);
        hold_locks(&job->shared, up[1], down[0]);
    }
    CHECK_INT(read(up[0], &word, 1), 1);
    CHECK_INT(look_for_dead(ring), -1);
    CHECK(locks_asked >= 62 && locks_asked <= 64); /* one may be its own */
    for (int p = 1; p < CROWD / 2; p++)            /* they will have looked by then */
        atomic_store(&dp__progress_of(job, p)->looked_ns, dp__os_after_ms(600000));
    for (int i = 0; i < 16; i++) {
        CHECK_INT(look_for_dead(ring), -1);
        CHECK(locks_asked >= 1 && locks_asked <= 2);
    }
    CHECK_INT(write(down[1], "x", 1), 1);
    CHECK_INT(read(up[0], &word, 1), 1);
    for (int p = 1; p < CROWD / 2; p++)
        atomic_store(&dp__progress_of(job, p)->looked_ns, 0);
    for (; looks < 100 && found < 0; looks++)
        found = look_for_dead(ring);
    CHECK_INT(found, FALLEN);
    close(down[1]);
    CHECK_INT(waitpid(pid, &ended, 0), pid);
    CHECK_INT(ended, 0);
    close(job->shared.fd);
    dp__os_free(job->board, 0, NULL);
}

TEST(many_to_a_core_look_less_often)
{
    CHECK_INT(dp__look_ns(2, 1), DP__LOOK_NS);
    CHECK_INT(dp__look_ns(512, 32), DP__LOOK_NS);
    CHECK_INT(dp__look_ns(512, 64), DP__LOOK_NS);
    CHECK_INT(dp__look_ns(128, 2), 4 * DP__LOOK_NS);
    CHECK_INT(dp__look_ns(4096, 1), DP__LATE_NS); /* after which a wait counts as stopped */
}

/* Numbers of processes are those of a machine: another one has the same ones. */
TEST(processes_of_two_machines_are_no_twins)
{
    dp__job *job = make_job(5);
    dp__system_process bodies[5] = {{1, 40, 0}, {2, 40, 1}, {1, 41, 2}, {2, 40, 3}, {2, 40, 4}};
    dp__job_twins(job, bodies);
    static const int twins[5] = {0, 3, 2, 4, 1}, ids[5] = {40, 40, 41, 40, 40};
    for (int p = 0; p < 5; p++) {
        CHECK_INT(job->twins[p], twins[p]);
        CHECK_INT(job->ids[p], ids[p]);
    }
    for (int p = 1; p < 4; p++)
        dp__job_miss(job, p);
    CHECK(!dp__is_alive(job, 1)); /* it is not taken for this process */
    CHECK(!dp__is_alive(job, 2));
    atomic_store(&dp__progress_of(job, 4)->presence, DP__LEFT);
    CHECK(dp__is_alive(job, 1)); /* it may have lost its lock to another context */
    CHECK(!dp__is_alive(job, 2));
    dp__os_free(job->board, 0, NULL);
}

/* Another process, which was stopped, writes to memory that this one has kept of a job that is
   over. It is larger than what is copied at once. */
TEST(memory_that_is_kept_is_of_its_process_alone)
{
    enum { FIRST = DP__SHARED_PAGE, BYTES = (4 << 20) + 3 * DP__SHARED_PAGE };
    dp__shared shared;
    dp__shared_name name;
    int go[2], how;
    char byte = 0;
    CHECK_OK(dp__os_shared_make(false, FIRST + BYTES + DP__SHARED_PAGE, &shared, &name));
    CHECK_INT(pipe(go), 0);
    unsigned char *data = (unsigned char *)shared.data + FIRST;
    for (size_t i = 0; i < BYTES; i++)
        data[i] = (unsigned char)(i % 251);
    pid_t pid = fork();
    CHECK(pid >= 0);
    if (pid == 0) {
        close(go[1]);
        (void)!read(go[0], &byte, 1);
        memset(shared.data, 255, shared.bytes);
        _exit(0);
    }
    dp__os_shared_trim(&shared, FIRST, BYTES);
    CHECK(shared.data == (void *)data && shared.bytes == BYTES);
    close(go[1]);
    CHECK_INT(waitpid(pid, &how, 0), pid);
    CHECK(WIFEXITED(how) && WEXITSTATUS(how) == 0);
    for (size_t i = 0; i < BYTES; i++)
        CHECK(data[i] == i % 251);
    close(go[0]);
    dp__os_shared_close(&shared);
}

/* ---- crowds ---------------------------------------------------------------------------------- */

/* A caller that finds the queue full is told so, and may come when there is a place. */
TEST(full_queue_is_not_a_refusal)
{
    int callers[3];
    char name[40];
    bool full;
    snprintf(name, sizeof name, "dp-queue-%d", (int)getpid());
    dp__os_address at = dp__os_local(name);
    CHECK_INT(dp__os_connect(&at), DP__OS_REFUSED);
    int listener = dp__os_listen(&at);
    CHECK(listener >= 0 && listen(listener, 1) == 0); /* two may wait */
    for (int i = 0; i < 3; i++)
        callers[i] = dp__os_connect(&at);
    CHECK(callers[0] >= 0 && callers[1] >= 0);
    CHECK_INT(callers[2], DP__OS_CROWDED);
    dp__os_close(dp__os_accept(listener, &full));
    callers[2] = dp__os_connect(&at);
    CHECK(callers[2] >= 0);
    for (int i = 0; i < 3; i++)
        dp__os_close(callers[i]);
    dp__os_close(listener);
}

static const dp__key its_key = {1, 2};

/* Many peers are not looked at each time. */
TEST(many_peers_are_looked_at_now_and_then)
{
    dp__listener listener = dp__listener_none();
    dp__tree tree = {.process_count = 4096, .claim = -1};
    dp__server server = {.process_count = 4096, .all = true, .tree = &tree};
    CHECK(dp__server_open(&server, &listener, its_key) == DP_OK);
    server.taken = DP__PEERS_FEW;
    (void)dp__server_watch(&server, server.watch);
    CHECK_INT(dp__server_rest_ms(&server), 0);
    server.taken = 4000;
    server.peers_ns = dp__os_after_ms(600000);
    CHECK(dp__server_rest_ms(&server) > 0);
    uint64_t now = dp__os_now_ns();
    (void)dp__server_watch(&server, server.watch);
    CHECK(server.peers_ns >= now + (uint64_t)4000 * DP__PEER_NS);
    server.failed = DP_ERR_REMOTE; /* then nobody is looked at */
    CHECK_INT(dp__server_rest_ms(&server), 0);
    dp__server_close(&server);
    dp__listener_close(&listener);
}

/* Opens a server that others of this machine can call. */
static void open_server(dp__server *server, const char *what)
{
    static dp__listener listener;
    char name[40];
    snprintf(name, sizeof name, "dp-%s-%d", what, (int)getpid());
    listener = dp__listener_none();
    listener.at = dp__os_local(name);
    listener.fd = dp__os_listen(&listener.at);
    CHECK(dp__server_open(server, &listener, its_key) == DP_OK);
    server->until_ns = dp__os_after_ms(9000);
}

static void close_server(dp__server *server)
{
    dp__server_close(server);
    dp__listener_close(server->listener);
}

/* However many call, the server looks at the time, and at who is in, before it lets in more. */
TEST(a_flood_is_let_in_by_and_by)
{
    enum { LOOKS = DP__PENDING_MAX / DP__ACCEPT_MAX + 2, CALLERS = LOOKS * DP__ACCEPT_MAX };
    static int callers[CALLERS];
    dp__launch launch = {.where = "here"};
    dp__tree tree = {.process_count = 2, .claim = -1};
    dp__server server = {.launch = &launch, .process_count = 2, .all = true, .tree = &tree};
    open_server(&server, "flood");
    dp__os_watch more = {.fd = server.listener->fd, .events = POLLIN};
    for (int i = 0; i < CALLERS; i++) {
        callers[i] = dp__os_connect(&server.listener->at);
        CHECK(callers[i] >= 0);
    }
    for (int i = 1; i <= LOOKS; i++) {
        int come = i * DP__ACCEPT_MAX;
        CHECK_INT(dp__os_poll(&more, 1, 0), 1);
        CHECK(dp__listener_accept(server.listener, server.listener->fd));
        CHECK_INT(server.listener->pending_count,
                  come <= DP__PENDING_MAX ? come : DP__PENDING_MAX + 1);
    }
    CHECK_INT(dp__os_poll(&more, 1, 0), 0);
    for (int i = 0; i < CALLERS; i++)
        dp__os_close(callers[i]);
    close_server(&server);
}

/* A stranger may say any number. */
TEST(numbers_of_those_that_may_connect)
{
    dp__launch launch = {.where = "here"};
    dp__server server = {.launch = &launch, .process_count = 3, .all = true};
    open_server(&server, "numbers");
    CHECK(dp__server_peer(&server, 1, 0) == &server.peers[0]);
    CHECK(dp__server_peer(&server, 2, 0) == &server.peers[1]);
    CHECK(dp__server_peer(&server, 2, 1) == NULL);
    const int none[] = {INT_MIN, -1, 0, 3, INT_MAX};
    for (size_t i = 0; i < sizeof none / sizeof none[0]; i++)
        CHECK(dp__server_peer(&server, none[i], 0) == NULL);
    close_server(&server);
}

/* Process 1 calls an office, and proves what it is. */
static int call_office(dp__server *server)
{
    const dp__join_request request = {.magic = DP__JOIN_MAGIC,
                                      .version = DP_VERSION,
                                      .process = 1,
                                      .process_count = 2,
                                      .patience_ms = 9000};
    const struct {
        dp__join_request request;
        uint64_t proof;
    } both = {request, dp__proof(its_key, &request, DP__LISTENER_NONCE, true)};
    dp__challenge challenge;
    uint64_t until_ns = dp__os_after_ms(9000);
    int fd = dp__os_connect(&server->listener->at);
    CHECK(dp__wire_send(fd, &both, sizeof both, until_ns) == DP_OK);
    for (int i = 0; i < 4; i++)
        CHECK(dp__server_look(server) == DP_OK);
    CHECK(dp__wire_receive(fd, &challenge, sizeof challenge, until_ns) == DP_OK);
    return fd;
}

/* It would take a note for an answer to a message. */
TEST(who_calls_an_office_twice_is_not_answered)
{
    char byte;
    dp__launch launch = {.where = "here"};
    dp__server server = {.launch = &launch, .process_count = 2, .all = true, .any = true};
    open_server(&server, "office");
    int fds[2] = {call_office(&server)};
    fds[1] = call_office(&server);
    CHECK_INT(server.taken, 1);
    CHECK_INT(dp__os_receive(fds[0], &byte, 1), 0);
    CHECK_INT(dp__os_receive(fds[1], &byte, 1), -1);
    dp__os_close(fds[0]);
    dp__os_close(fds[1]);
    close_server(&server);
}

static const dp__join_request its_request = {.magic = DP__JOIN_MAGIC,
                                             .version = DP_VERSION,
                                             .process = 1,
                                             .process_count = 2,
                                             .patience_ms = 9000};

/* For one of its connections. */
static int send_request_for(const dp__server *server, int connection)
{
    dp__join_request request = its_request;
    int fd = dp__os_connect(&server->listener->at);
    request.connection = (uint16_t)connection;
    CHECK(dp__wire_send(fd, &request, sizeof request, server->until_ns) == DP_OK);
    return fd;
}

static int send_request(const dp__server *server)
{
    return send_request_for(server, 0);
}

static void send_proof_for(int fd, int connection)
{
    dp__join_request request = its_request;
    dp__challenge challenge;
    uint64_t until_ns = dp__os_after_ms(9000);
    request.connection = (uint16_t)connection;
    CHECK(dp__wire_receive(fd, &challenge, sizeof challenge, until_ns) == DP_OK);
    uint64_t proof = dp__proof(its_key, &request, challenge.nonce, true);
    CHECK(dp__wire_send(fd, &proof, sizeof proof, until_ns) == DP_OK);
}

static void send_proof(int fd)
{
    send_proof_for(fd, 0);
}

/* Process 1 of 2 has sent its request, and is slow to answer. Meanwhile more strangers come than
   there are places, and send nothing. */
TEST(process_that_sent_its_request_is_not_replaced)
{
    enum { CALLERS = 2 * DP__PENDING_MAX + 1, LOOKS = CALLERS / DP__ACCEPT_MAX };
    static int callers[CALLERS];
    dp__launch launch = {.where = "here"};
    dp__tree tree = {.process_count = 2, .claim = -1};
    dp__server server = {.launch = &launch, .process_count = 2, .all = true, .tree = &tree};
    open_server(&server, "request");
    int fd = send_request(&server);
    for (int i = 0; i < CALLERS; i++)
        callers[i] = dp__os_connect(&server.listener->at);
    for (int i = 0; i < LOOKS;
         i++) /* as there is always a connection to accept, none of them waits */
        CHECK(dp__server_look(&server) == DP_OK);
    CHECK_INT(server.listener->pending_count, server.listener->pending_capacity);
    send_proof(fd);
    CHECK(dp__server_look(&server) == DP_OK);
    CHECK_INT(server.taken, 1);
    for (int i = 0; i < CALLERS; i++)
        dp__os_close(callers[i]);
    dp__os_close(fd);
    close_server(&server);
}

/* The time is up between the request and the proof of process 1: it is not named as one that did
   not come. Another one, which never proves anything, is waited for once, too. */
TEST(process_that_is_joining_is_waited_for_once_more)
{
    dp__launch launch = {.where = "here"};
    dp__tree tree = {.process_count = 2, .claim = -1};
    for (int proves = 0; proves < 2; proves++) {
        dp__server server = {.launch = &launch, .process_count = 2, .all = true, .tree = &tree};
        open_server(&server, "joining");
        dp__server_begin(&server);
        int fd = send_request(&server);
        for (int looks = 0; looks < 100 && !dp__listener_is_asked(server.listener, server.kind);
             looks++)
            CHECK(dp__server_look(&server) == DP_OK);
        server.until_ns = dp__os_now_ns();
        CHECK(!dp__server_is_over(&server));
        CHECK(dp__os_ms_until(server.until_ns) > 0);
        if (proves) {
            send_proof(fd);
            CHECK(dp__server_look(&server) == DP_OK);
        }
        CHECK_INT(server.taken, proves);
        server.until_ns = dp__os_now_ns();
        CHECK(dp__server_is_over(&server));
        dp__os_close(fd);
        close_server(&server);
    }
}

/* Process 1 makes that connection, as it can prove; returns what looking at it comes to. */
static dp_status make_connection(dp__server *server, int *fd, int connection)
{
    dp_status status = DP_OK;
    *fd = send_request_for(server, connection);
    for (int i = 0; i < 4; i++)
        CHECK(dp__server_look(server) == DP_OK);
    send_proof_for(*fd, connection);
    for (int i = 0; i < 2 && status == DP_OK; i++)
        status = dp__server_look(server);
    return status;
}

/* They come in any order, and each belongs to its place. One that there is not is refused, with a
   sentence; one that comes twice is not of this job, or of none. */
TEST(connections_of_a_process_are_told_apart)
{
    dp__launch launch = {.where = "here", .met_before = true};
    dp__tree tree = {.process_count = 2, .claim = -1};
    dp__server server = {
        .launch = &launch, .process_count = 2, .all = true, .each = 3, .tree = &tree};
    char missing[80];
    int fds[5];
    open_server(&server, "several");
    CHECK_INT(server.expected, 3);
    CHECK(make_connection(&server, &fds[0], 2) == DP_OK);
    CHECK(make_connection(&server, &fds[1], 0) == DP_OK);
    CHECK_INT(server.taken, 2);
    CHECK(server.peers[0].taken && !server.peers[1].taken && server.peers[2].taken);
    CHECK(server.peers[0].fd != server.peers[2].fd);
    dp__server_name_missing(&server, missing, sizeof missing);
    CHECK_STR(missing, "process 1");
    CHECK(make_connection(&server, &fds[2], 3) == DP_OK);
    CHECK_SAYS(server.said, "process 1 makes a connection 3, process 0 counts 3");
    CHECK(make_connection(&server, &fds[3], 65535) == DP_OK);
    CHECK_INT(server.taken, 2);
    CHECK(!dp__server_is_done(&server));
    CHECK(make_connection(&server, &fds[4], 2) == DP_ERR_MISMATCH);
    CHECK_SAYS(dp_last_error(), "two processes are process 1 of 2 here");
    CHECK_INT(server.taken, 2);
    for (int i = 0; i < 5; i++)
        dp__os_close(fds[i]);
    close_server(&server);
}

/* One of three is never proved: the process has not come, and the connections that it has made go
   with the server. */
TEST(connection_that_stays_half_open_is_waited_for)
{
    char byte;
    dp__launch launch = {.where = "here"};
    dp__tree tree = {.process_count = 2, .claim = -1};
    dp__server server = {
        .launch = &launch, .process_count = 2, .all = true, .each = 3, .tree = &tree};
    int fds[3];
    open_server(&server, "half");
    CHECK(make_connection(&server, &fds[0], 0) == DP_OK);
    CHECK(make_connection(&server, &fds[1], 1) == DP_OK);
    fds[2] = send_request_for(&server, 2);
    for (int looks = 0; looks < 100 && !dp__listener_is_asked(server.listener, server.kind);
         looks++)
        CHECK(dp__server_look(&server) == DP_OK);
    CHECK_INT(server.taken, 2);
    CHECK(!dp__server_is_done(&server));
    CHECK(dp__server_timed_out(&server) == DP_ERR_TIMEOUT);
    CHECK_SAYS(dp_last_error(), "process 1 of 2 did not come within");
    close_server(&server);
    for (int i = 0; i < 2; i++)
        CHECK_INT(dp__os_receive(fds[i], &byte, 1), -1);
    for (int i = 0; i < 3; i++)
        dp__os_close(fds[i]);
}

/* All of them have come once each has. Another process that lacks some is named once. */
TEST(all_connections_of_a_process_are_waited_for)
{
    dp__launch launch = {.where = "here"};
    dp__tree tree = {.process_count = 3, .claim = -1};
    dp__server server = {
        .launch = &launch, .process_count = 3, .all = true, .each = 2, .tree = &tree};
    char missing[80];
    open_server(&server, "whole");
    dp__server_name_missing(&server, missing, sizeof missing);
    CHECK_STR(missing, "processes 1 and 2");
    server.peers[0].taken = server.peers[1].taken = server.peers[3].taken = true;
    server.taken = 3;
    dp__server_name_missing(&server, missing, sizeof missing);
    CHECK_STR(missing, "process 2");
    CHECK_INT(dp__server_process(&server, 1), 1);
    CHECK_INT(dp__server_process(&server, 2), 2);
    close_server(&server);
}

/* A request says for what the connection is to be. */
TEST(connection_of_another_kind_is_refused)
{
    dp__launch launch = {.where = "here"};
    dp__tree tree = {.process_count = 2, .claim = -1};
    for (int kind = 0; kind < DP__CONNECTION_KINDS; kind++) {
        char byte;
        dp__server server = {.launch = &launch, .process_count = 2, .all = true, .tree = &tree};
        server.kind = (dp__connection_kind)kind;
        open_server(&server, "kind");
        int fd = send_request(&server);
        for (int i = 0; i < 4; i++)
            CHECK(dp__server_look(&server) == DP_OK);
        ptrdiff_t got = dp__os_receive(fd, &byte, 1);
        CHECK_INT(got, its_request.kind == (uint16_t)kind ? 1 : -1);
        dp__os_close(fd);
        close_server(&server);
    }
}

/* ---- one listener, several kinds ------------------------------------------------------------- */

static void look_at(dp__listener *listener)
{
    dp__os_watch watch[1 + DP__PENDING_MAX];
    int count = dp__listener_watch(listener, watch, 1 + DP__PENDING_MAX);
    dp__os_poll(watch, count, 0);
    CHECK(dp__listener_look(listener, watch, count));
}

/* Connects for that kind; `proves`: as one of the job does. */
static int come_for(dp__listener *listener, dp__connection_kind kind, bool proves)
{
    enum { LOOKS = 4 };
    dp__join_request request = its_request;
    dp__challenge challenge;
    uint64_t until_ns = dp__os_after_ms(9000);
    int fd = dp__os_connect(&listener->at);
    request.kind = (uint16_t)kind;
    CHECK(dp__wire_send(fd, &request, sizeof request, until_ns) == DP_OK);
    for (int i = 0; i < 2 * LOOKS; i++) {
        if (i == LOOKS && proves) {
            CHECK(dp__wire_receive(fd, &challenge, sizeof challenge, until_ns) == DP_OK);
            uint64_t proof = dp__proof(its_key, &request, challenge.nonce, true);
            CHECK(dp__wire_send(fd, &proof, sizeof proof, until_ns) == DP_OK);
        }
        look_at(listener);
    }
    return fd;
}

/* Sends as many bytes as a request has, which are none. */
static void come_from_elsewhere(dp__listener *listener)
{
    static const char noise[sizeof(dp__join_request)] = "GET / HTTP/1.1";
    char byte;
    int fd = dp__os_connect(&listener->at);
    CHECK(dp__wire_send(fd, noise, sizeof noise, dp__os_after_ms(9000)) == DP_OK);
    for (int i = 0; i < 4; i++)
        look_at(listener);
    CHECK_INT(dp__os_receive(fd, &byte, 1), -1);
    dp__os_close(fd);
}

static void listen_here(dp__listener *listener, const char *what)
{
    char name[40];
    snprintf(name, sizeof name, "dp-%s-%d", what, (int)getpid());
    *listener = dp__listener_none();
    listener->at = dp__os_local(name);
    listener->fd = dp__os_listen(&listener->at);
    CHECK(listener->fd >= 0);
}

/* Whoever looks accepts for all; each kind is taken by its own. */
TEST(one_listener_lets_several_kinds_in)
{
    dp__listener listener;
    dp__pending pending;
    char byte;
    listen_here(&listener, "kinds");
    const dp__service service = {.key = its_key, .patient = true};
    CHECK_OK(dp__listener_serve(&listener, DP__FOR_VOTES, service));
    CHECK_OK(dp__listener_serve(&listener, DP__FOR_DATA, service));
    int vote = come_for(&listener, DP__FOR_VOTES, true);
    int data = come_for(&listener, DP__FOR_DATA, true);
    int half = come_for(&listener, DP__FOR_DATA, false);
    int none = come_for(&listener, DP__FOR_JOINING, false);
    CHECK_INT(dp__os_receive(none, &byte, 1), -1);
    CHECK_INT(listener.pending_count, 3);
    CHECK_INT(listener.rejected, 0); /* it is of this job, and too early, or too late */
    come_from_elsewhere(&listener);
    CHECK_INT(listener.rejected, 1);
    CHECK(!dp__listener_is_asked(&listener, DP__FOR_VOTES));
    CHECK(dp__listener_is_asked(&listener, DP__FOR_DATA));
    CHECK(dp__listener_take(&listener, DP__FOR_DATA, &pending));
    CHECK_INT(pending.request.kind, DP__FOR_DATA);
    dp__os_close(pending.fd);
    CHECK(!dp__listener_take(&listener, DP__FOR_DATA, &pending));
    dp__listener_end(&listener, DP__FOR_DATA);
    CHECK(dp__listener_take(&listener, DP__FOR_VOTES, &pending));
    CHECK_INT(pending.request.process, 1);
    CHECK_INT(listener.pending_count, 0);
    dp__os_close(pending.fd);
    const int all[] = {vote, data, half, none};
    for (int i = 0; i < 4; i++)
        dp__os_close(all[i]);
    dp__listener_close(&listener);
}

/* Lets a minute go by for those that are pending. */
static void age(dp__listener *listener)
{
    for (int i = 0; i < listener->pending_count; i++)
        listener->pending[i].came_ns -= 60000000000;
    look_at(listener);
}

/* Who has proved what it is has been let in, whatever the thread is in that is to take it. One that
   has not goes after a while. */
TEST(who_has_proved_itself_stays_until_it_is_taken)
{
    dp__listener listener;
    dp__pending pending;
    listen_here(&listener, "stays");
    CHECK_OK(dp__listener_serve(&listener, DP__FOR_MESSAGES, (dp__service){.key = its_key}));
    int proved = come_for(&listener, DP__FOR_MESSAGES, true);
    int asked = come_for(&listener, DP__FOR_MESSAGES, false);
    CHECK_INT(listener.pending_count, 2);
    age(&listener);
    CHECK_INT(listener.pending_count, 1);
    CHECK(dp__listener_take(&listener, DP__FOR_MESSAGES, &pending));
    dp__os_close(pending.fd);
    dp__os_close(proved);
    dp__os_close(asked);
    dp__listener_close(&listener);
}

static int answered;

static void answer_seven(const void *user, int fd)
{
    CHECK(user == &its_key);
    CHECK_INT(dp__os_send(fd, "7", 1), 1);
    answered++;
}

static void listen_for_asks(dp__listener *listener, const char *what)
{
    const dp__service asks = {.key = its_key, .answers = answer_seven, .user = &its_key};
    listen_here(listener, what);
    CHECK_OK(dp__listener_serve(listener, DP__FOR_ASKING, asks));
    CHECK_OK(dp__listener_serve(listener, DP__FOR_VOTES, (dp__service){.key = its_key}));
    answered = 0;
}

static void answer_at(dp__listener *listener)
{
    dp__os_watch watch[DP__LISTENER_WATCHED];
    for (int i = 0; i < 4; i++)
        dp__listener_answer(listener, watch);
}

/* Connects for that kind, and sends so many bytes of a request. */
static int call_for(dp__listener *listener, dp__connection_kind kind, size_t bytes)
{
    dp__join_request request = its_request;
    int fd = dp__os_connect(&listener->at);
    request.kind = (uint16_t)kind;
    CHECK(dp__wire_send(fd, &request, bytes, dp__os_after_ms(9000)) == DP_OK);
    return fd;
}

/* Sends the proof that a challenge asks for, or a wrong one. */
static void prove_at(int fd, dp__connection_kind kind, bool right)
{
    dp__join_request request = its_request;
    dp__challenge challenge;
    uint64_t until_ns = dp__os_after_ms(9000);
    request.kind = (uint16_t)kind;
    CHECK(dp__wire_receive(fd, &challenge, sizeof challenge, until_ns) == DP_OK);
    uint64_t proof = dp__proof(its_key, &request, challenge.nonce, right);
    CHECK(dp__wire_send(fd, &proof, sizeof proof, until_ns) == DP_OK);
}

/* One that only answers takes nothing from those that serve the others, however late these look. */
TEST(a_look_for_answers_leaves_others_as_they_came)
{
    dp__listener listener;
    dp__pending pending;
    char byte;
    listen_for_asks(&listener, "answers");
    int vote = call_for(&listener, DP__FOR_VOTES, sizeof(dp__join_request));
    answer_at(&listener);
    CHECK_INT(listener.pending_count, 1);
    listener.pending[0].came_ns -= 2 * DP__PENDING_MS * (uint64_t)1000000;
    while (listener.pending_count < listener.pending_capacity)
        dp__pending_hold(&listener, dup(1));
    dp__pending_hold(&listener, dup(1)); /* strangers go first */
    for (int i = 1; i < listener.pending_count; i++)
        listener.pending[i].came_ns = 0;
    answer_at(&listener);
    CHECK_INT(listener.pending_count, 1);
    int ask = call_for(&listener, DP__FOR_ASKING, sizeof(dp__join_request));
    answer_at(&listener);
    prove_at(ask, DP__FOR_ASKING, true);
    answer_at(&listener);
    CHECK_INT(dp__os_receive(ask, &byte, 1), 1);
    CHECK_INT(byte, '7');
    CHECK_INT(dp__os_receive(ask, &byte, 1), -1);
    CHECK_INT(answered, 1);
    CHECK_INT(listener.pending_count, 1);
    CHECK_INT(dp__os_receive(vote, &byte, 1), 0);
    CHECK(!dp__listener_is_asked(&listener, DP__FOR_VOTES));
    for (int i = 0; i < 3; i++) { /* it has time for its proof from now on */
        look_at(&listener);
        CHECK(dp__listener_is_asked(&listener, DP__FOR_VOTES));
    }
    prove_at(vote, DP__FOR_VOTES, true);
    answer_at(&listener);
    CHECK(!dp__listener_take(&listener, DP__FOR_VOTES, &pending));
    look_at(&listener);
    CHECK(dp__listener_take(&listener, DP__FOR_VOTES, &pending));
    CHECK_INT(listener.rejected, 0);
    int left = call_for(&listener, DP__FOR_VOTES, sizeof(dp__join_request));
    answer_at(&listener);
    CHECK_INT(listener.pending_count, 1);
    listener.pending[0].came_ns -= DP__LEFT_MS * (uint64_t)1000000;
    answer_at(&listener);
    CHECK_INT(dp__os_receive(left, &byte, 1), -1);
    dp__os_close(left);
    dp__os_close(pending.fd);
    dp__os_close(vote);
    dp__os_close(ask);
    dp__listener_close(&listener);
}

/* Half a request, noise, a wrong proof, and more than may ask at once: each is closed in the end,
   and the next one gets its answer. */
TEST(strangers_that_ask_get_nothing)
{
    static const char noise[sizeof(dp__join_request)] = "GET / HTTP/1.1";
    dp__listener listener;
    int fds[3 * DP__ASKS_MAX], count = 0;
    char byte;
    listen_for_asks(&listener, "strangers");
    int half = call_for(&listener, DP__FOR_ASKING, 50), other = dp__os_connect(&listener.at);
    int wrong = call_for(&listener, DP__FOR_ASKING, sizeof(dp__join_request));
    CHECK(dp__wire_send(other, noise, sizeof noise, dp__os_after_ms(9000)) == DP_OK);
    answer_at(&listener);
    CHECK_INT(dp__os_receive(other, &byte, 1), -1);
    prove_at(wrong, DP__FOR_ASKING, false);
    answer_at(&listener);
    CHECK_INT(dp__os_receive(wrong, &byte, 1), -1);
    CHECK_INT(listener.pending_count, 1); /* half a request */
    listener.pending[0].came_ns = 0;
    answer_at(&listener);
    CHECK_INT(listener.pending_count, 0);
    while (count < 3 * DP__ASKS_MAX) {
        fds[count++] = call_for(&listener, DP__FOR_ASKING, sizeof(dp__join_request));
        answer_at(&listener);
        CHECK(listener.pending_count <= DP__ASKS_MAX);
    }
    CHECK_INT(answered, 0);
    prove_at(fds[count - 1], DP__FOR_ASKING, true);
    answer_at(&listener);
    CHECK_INT(answered, 1);
    CHECK_INT(listener.rejected, 1); /* the noise */
    while (count > 0)
        dp__os_close(fds[--count]);
    answer_at(&listener);
    CHECK_INT(listener.pending_count, 0);
    CHECK_INT(listener.rejected, 1);
    dp__os_close(half);
    dp__os_close(other);
    dp__os_close(wrong);
    dp__listener_close(&listener);
}

/* There is room for each kind once, however often it begins. */
TEST(a_listener_has_room_for_all_that_are_expected)
{
    dp__listener listener = dp__listener_none();
    dp__pending *before;
    CHECK_OK(dp__listener_serve(&listener, DP__FOR_TREE, (dp__service){.expected = 100}));
    CHECK_INT(listener.pending_capacity, DP__PENDING_MAX + 100);
    dp__pending_hold(&listener, dup(1));
    CHECK_OK(dp__listener_serve(&listener, DP__FOR_DATA, (dp__service){.expected = 7}));
    CHECK_INT(listener.pending_capacity, DP__PENDING_MAX + 107);
    CHECK_INT(listener.pending_count, 1);
    CHECK(listener.pending[0].fd >= 0 && listener.pending[0].came_ns != 0);
    before = listener.pending;
    dp__listener_end(&listener, DP__FOR_DATA);
    CHECK_OK(dp__listener_serve(&listener, DP__FOR_DATA, (dp__service){.expected = 7}));
    CHECK(listener.pending == before);
    dp__listener_close(&listener);
    CHECK_INT(listener.pending_count, 0);
}

/* One that has proved what it is goes last, and one that is silent first. */
TEST(strangers_replace_each_other_first)
{
    dp__listener listener;
    listen_here(&listener, "last");
    CHECK_OK(dp__listener_serve(&listener, DP__FOR_VOTES, (dp__service){.key = its_key}));
    int proved = come_for(&listener, DP__FOR_VOTES, true);
    int asked = come_for(&listener, DP__FOR_VOTES, false);
    CHECK_INT(listener.pending_count, 2);
    for (int i = 0; i < 2 * DP__PENDING_MAX; i++)
        dp__pending_hold(&listener, dup(1));
    CHECK_INT(listener.pending_count, DP__PENDING_MAX);
    CHECK(dp__listener_is_asked(&listener, DP__FOR_VOTES));
    for (int i = 0; i < DP__PENDING_MAX; i++)
        listener.pending[i].asked = true; /* all strangers ask, too */
    for (int i = 0; i < DP__PENDING_MAX; i++)
        dp__pending_hold(&listener, dup(1));
    dp__pending pending;
    CHECK(dp__listener_take(&listener, DP__FOR_VOTES, &pending));
    dp__os_close(pending.fd);
    dp__os_close(proved);
    dp__os_close(asked);
    dp__listener_close(&listener);
}

/* Two threads look at one listener while many come: each connection is taken once, by its kind. */
enum { COMERS = 60 };

static void *take_votes(void *user)
{
    dp__listener *listener = user;
    static int taken;
    dp__os_watch watch[1 + DP__PENDING_MAX];
    uint64_t until_ns = dp__os_after_ms(30000);
    while (taken < COMERS && dp__os_ms_until(until_ns) > 0) {
        dp__pending pending;
        int count = dp__listener_watch(listener, watch, 1 + DP__PENDING_MAX);
        dp__os_poll(watch, count, 1);
        (void)dp__listener_look(listener, watch, count);
        for (; dp__listener_take(listener, DP__FOR_VOTES, &pending); taken++)
            dp__os_close(pending.fd);
    }
    return &taken;
}

TEST(two_threads_share_a_listener)
{
    dp__listener listener;
    pthread_t other;
    dp__pending pending;
    void *votes;
    int data = 0, fds[2 * COMERS];
    listen_here(&listener, "shared");
    CHECK_OK(dp__listener_serve(&listener, DP__FOR_VOTES, (dp__service){.key = its_key}));
    CHECK_OK(dp__listener_serve(&listener, DP__FOR_DATA, (dp__service){.key = its_key}));
    CHECK_INT(pthread_create(&other, NULL, take_votes, &listener), 0);
    for (int i = 0; i < 2 * COMERS; i++) {
        fds[i] = come_for(&listener, i % 2 == 0 ? DP__FOR_VOTES : DP__FOR_DATA, true);
        while (dp__listener_take(&listener, DP__FOR_DATA, &pending)) {
            dp__os_close(pending.fd);
            data++;
        }
    }
    for (int i = 0; i < 1000 && data < COMERS; i++) {
        dp__os_sleep_ms(1);
        for (; dp__listener_take(&listener, DP__FOR_DATA, &pending); data++)
            dp__os_close(pending.fd);
    }
    CHECK_INT(pthread_join(other, &votes), 0);
    CHECK_INT(*(int *)votes, COMERS);
    CHECK_INT(data, COMERS);
    for (int i = 0; i < 2 * COMERS; i++)
        dp__os_close(fds[i]);
    dp__listener_close(&listener);
}

/* Reads to the end, and keeps the last bytes: as many as a header has. */
static void *read_late(void *end)
{
    static dp__tree_header last;
    char *bytes = (char *)&last;
    ptrdiff_t got;
    dp__os_sleep_ms(20);
    do {
        char some[1000 + sizeof last];
        memcpy(some, bytes, sizeof last);
        got = dp__os_receive(*(int *)end, some + sizeof last, sizeof some - sizeof last);
        if (got > 0)
            memcpy(bytes, some + got, sizeof last);
        else if (got == 0)
            dp__os_ready(*(int *)end, DP__CAN_READ, 1000);
    } while (got >= 0);
    return &last;
}

/* The other end reads, but is slow, and the connection is full: what comes last is a whole
   farewell, without which the end of a connection means a death. */
TEST(farewell_waits_for_room)
{
    static const char filling[1000];
    int end;
    pthread_t reader;
    void *last;
    dp__tree *tree = dp__os_alloc(sizeof *tree, 64, NULL);
    *tree = (dp__tree){.process = 1, .process_count = 2, .claim = -1};
    connect_link(tree, 0, &end);
    while (dp__os_send(tree->links[0].fd, filling, sizeof filling) > 0) {
    }
    CHECK_INT(pthread_create(&reader, NULL, read_late, &end), 0);
    dp__tree_close(tree, true);
    CHECK_INT(pthread_join(reader, &last), 0);
    CHECK_INT(((dp__tree_header *)last)->magic, DP__HEADER_MAGIC);
    CHECK_INT(((dp__tree_header *)last)->kind, DP__BYE);
    dp__os_close(end);
}

/* A job of so many processes without a board, and its memory. */
static dp__job begin_apart(int count, const dp__progress_carrier *carrier)
{
    size_t bytes = dp__board_bytes(count);
    dp__job job = {.process_count = count, .timeout_ms = 40000, .carrier = carrier};
    job.board = dp__os_alloc(bytes, 128, NULL);
    memset(job.board, 0, bytes);
    return job;
}

/* Lets process 1 answer what it was asked so long ago. */
static void answer_after(dp__job *job, int ms)
{
    atomic_store(&dp__progress_of(job, 1)->asked_ns, dp__os_now_ns() - (uint64_t)ms * 1000000);
    dp__progress_answered(job, 1);
}

/* One that wakes up may be asked twice before those behind it are heard of. */
TEST(short_answer_hides_no_long_silence)
{
    dp__job job = begin_apart(2, NULL);
    answer_after(&job, 100);
    CHECK(!dp__was_away(&job, 1, dp__os_now_ns()));
    answer_after(&job, 30000);
    CHECK(dp__was_away(&job, 1, dp__os_now_ns()));
    answer_after(&job, 100);
    CHECK(dp__was_away(&job, 1, dp__os_now_ns()));
    atomic_store(&dp__progress_of(&job, 1)->back_ns, dp__os_now_ns() - 11000000000);
    CHECK(!dp__was_away(&job, 1, dp__os_now_ns()));
    answer_after(&job, 100);
    CHECK(!dp__was_away(&job, 1, dp__os_now_ns()));
    dp__os_free(job.board, dp__board_bytes(2), NULL);
}

/* Time that it has waited before it was stopped counts, and time that it has slept does not. */
TEST(who_was_stopped_knows_how_long_others_have_been_silent)
{
    dp__job job = begin_apart(2, NULL);
    uint64_t now = dp__os_now_ns();
    dp__progress *own = dp__progress_of(&job, 0), *other = dp__progress_of(&job, 1);
    atomic_store(&own->looked_ns, now - 7000000000);
    atomic_store(&other->asked_ns, now - 10000000000);
    dp__job_looks(&job);
    dp__progress_answered(&job, 1);
    CHECK(atomic_load(&other->away_ns) >= 3000000000 && atomic_load(&other->away_ns) < 3500000000);
    atomic_store(&own->looked_ns, now - 7000000000);
    dp__job_looks(&job);
    CHECK_INT(atomic_load(&other->asked_ns), 0); /* it was not asked anything */
    atomic_store(&own->looked_ns, now - 7000000000);
    atomic_store(&other->asked_ns, now - 1000000); /* by another thread meanwhile */
    dp__job_looks(&job);
    CHECK(atomic_load(&other->asked_ns) <= dp__os_now_ns());
    dp__os_free(job.board, dp__board_bytes(2), NULL);
}

static int through_one(const dp_ctx *ctx, int from, int to)
{
    (void)ctx;
    return from == 1 ? to : 1;
}

/* Process 2 was away for longest, as all know only from process 1, which does not answer yet. */
TEST(silent_one_on_the_way_was_away_for_longest)
{
    static const dp__progress_carrier carrier = {.next = through_one};
    dp__job job = begin_apart(3, &carrier);
    uint64_t now = dp__os_now_ns();
    for (int p = 1; p < 3; p++) {
        atomic_store(&dp__progress_of(&job, p)->looked_ns, now);
        atomic_store(&dp__progress_of(&job, p)->back_ns, now);
    }
    atomic_store(&dp__progress_of(&job, 2)->away_ns, 30000000000);
    CHECK_INT(dp__longest_away(&job, now - 1000000000), 2);
    atomic_store(&dp__progress_of(&job, 1)->looked_ns, now - 30000000000);
    CHECK_INT(dp__longest_away(&job, now - 1000000000), 1);
    atomic_store(&dp__progress_of(&job, 1)->looked_ns, now);
    atomic_store(&dp__progress_of(&job, 1)->away_ns, 25000000000);
    CHECK_INT(dp__longest_away(&job, now - 1000000000), 1);
    atomic_store(&dp__progress_of(&job, 1)->back_ns, 0);
    atomic_store(&dp__progress_of(&job, 2)->back_ns, 0);
    CHECK_INT(dp__longest_away(&job, now - 1000000000), -1);
    dp__os_free(job.board, dp__board_bytes(3), NULL);
}

/* Connects to process 1 as one that votes for the roster after that number. */
static int call_member(const dp__voter *voter, uint16_t vote)
{
    const dp__seat *roster = dp__voter_roster(voter);
    uint64_t until_ns = dp__os_after_ms(10000);
    dp__join_request request = {.magic = DP__JOIN_MAGIC,
                                .version = DP_VERSION,
                                .kind = DP__FOR_VOTES,
                                .process_count = voter->count,
                                .listens = voter->members->holder,
                                .connection = vote};
    const char *why = NULL;
    int fd = dp__seat_connect(roster, voter->count, 0, 1);
    CHECK(fd >= 0 && dp__os_ready(fd, DP__CAN_WRITE, 10000));
    CHECK(dp__handshake(fd, dp__vote_link_key(voter, roster[1].holder), &request, until_ns, &why));
    return fd;
}

/* The vote comes in two parts, as it may on any link. */
static void ask_in_parts(const dp__voter *voter, int fd)
{
    const dp__vote ask = {.kind = DP__VOTE_PREPARE,
                          .holder = voter->members->holder,
                          .number = voter->members->number,
                          .ballot = (uint64_t)1 << 32};
    dp__vote_head head = dp__vote_head_of(voter, &ask), answer;
    uint64_t until_ns = dp__os_after_ms(10000);
    CHECK_OK(dp__wire_send(fd, &head, 20, until_ns));
    dp__os_sleep_ms(10);
    CHECK_OK(dp__wire_send(fd, (char *)&head + 20, sizeof head - 20, until_ns));
    CHECK_OK(dp__wire_receive(fd, &answer, sizeof answer, until_ns));
    CHECK_INT(answer.kind, DP__VOTE_PROMISE);
    CHECK(answer.left_ms > 30000);
}

/* Awaits what process 0 sends of the last step in which all meet. */
static dp_status await_the_whole(dp__voter *voter)
{
    int end, all[2] = {0, 1};
    dp__tree *tree = dp__os_alloc(sizeof *tree, 64, NULL);
    *tree = (dp__tree){.process = 1,
                       .process_count = 2,
                       .timeout_ms = 60000,
                       .spare_ns = 60000000000,
                       .claim = -1,
                       .rest = dp__voter_meets,
                       .user = voter};
    connect_link(tree, 0, &end);
    dp_status status = dp__tree_gather(tree, &all[1], (char *)all, sizeof *all);
    dp__tree_close(tree, true);
    dp__os_close(end);
    return status;
}

static bool connected; /* all know where the others are, and wait for what they have to tell */

static void rest_or_ask(meeting *m)
{
    const dp_config config = {.device_count = 1,
                              .recovers = true,
                              .timeout_ms = 60000,
                              .bootstrap = {meeting_all_gather, m, m->process, m->process_count}};
    dp_ctx *ctx;
    CHECK_OK(dp_open(&config, &ctx));
    dp__voter *voter = ctx->world.voter;
    uint64_t begun_ns = dp__os_now_ns();
    if (m->process == 0) {
        ask_in_parts(voter, call_member(voter, 1));
    } else {
        dp__voter_hurry(voter, 60000); /* as one that was let in: see below */
        voter->members->role = DP__ROLE_MEETS;
        CHECK_INT(connected ? await_the_whole(voter) : dp__voter_meets(voter, 60000),
                  DP_ERR_REMOTE);
    }
    CHECK(dp__os_now_ns() - begun_ns < 30000000000);
    _exit(EXIT_SUCCESS);
}

/* A proposer waits for an answer no longer than one takes to come: who meets the others, and finds
   that they are not there yet, answers while it waits for the next round. The proposer waits for
   the rest no longer than those that have answered have time, newcomers too. */
TEST(votes_are_answered_between_two_rounds_of_a_meeting)
{
    in_processes(2, rest_or_ask);
}

/* The way to the others may lead through one that has died since, while those that knew it first
   vote already. */
TEST(votes_are_answered_once_all_of_a_meeting_are_connected)
{
    connected = true;
    in_processes(2, rest_or_ask);
}

/* Comes later to a job that does not let it in, and in the end refuses it. */
static void *come_later(void *user)
{
    const dp__launch *launch = user;
    dp__voter *voter = NULL;
    CHECK(dp__rejoin(launch, false, 20000, dp__os_after_ms(20000), &voter) == DP_ERR_INVALID);
    CHECK_SAYS(dp__open_error(), "not you");
    return NULL;
}

/* Lets one in at a join port as far as its seat. */
static int greet(dp__listener *port, dp__seat *out)
{
    dp__pending pending = {.fd = -1};
    uint64_t until_ns = dp__os_after_ms(9000);
    while (!dp__listener_take(port, DP__FOR_JOINING, &pending) && dp__os_ms_until(until_ns) > 0) {
        dp__os_sleep_ms(1);
        look_at(port);
    }
    CHECK_OK(dp__wire_receive(pending.fd, out, sizeof *out, until_ns));
    return pending.fd;
}

/* Calls a process by its seat for another one, and learns so at once, with whichever key. */
static void call_wrongly(const dp__seat *seat)
{
    const dp__key none = {0, 0};
    const dp__seat roster[2] = {{.machine = seat->machine}, *seat};
    dp__join_request request = its_request;
    const char *why = NULL;
    uint64_t begun_ns = dp__os_now_ns();
    request.kind = DP__FOR_VOTES;
    int fd = dp__seat_connect(roster, 2, 0, 1);
    CHECK(fd >= 0 && dp__os_ready(fd, DP__CAN_WRITE, 9000));
    CHECK(!dp__handshake(fd, none, &request, dp__os_after_ms(9000), &why));
    CHECK_SAYS(why, "another job");
    CHECK(dp__os_now_ns() - begun_ns < 5000000000);
    dp__os_close(fd);
}

/* The port of one that waits at the door may be that of one that has died. Whoever looks for that
   one would take a port that accepts, and does not answer, for a process that hangs. */
TEST(who_waits_at_the_door_is_not_taken_for_another_one)
{
    dp__launch launch = {.where = "here"}, door;
    dp__listener port = dp__listener_none();
    dp__join_reply reply = {.magic = DP__VOTE_MAGIC, .count = 2};
    dp__seat seat, later;
    pthread_t thread;
    uint64_t memory, until_ns = dp__os_after_ms(9000);
    int before = open_files();
    snprintf(launch.place, sizeof launch.place, "dp-door-%d", (int)getpid());
    door = dp__join_port_of(&launch);
    port.at = dp__os_local(door.place);
    port.fd = dp__os_listen(&port.at);
    CHECK_OK(dp__listener_serve(&port, DP__FOR_JOINING, (dp__service){.key = door.key}));
    CHECK_INT(pthread_create(&thread, NULL, come_later, &launch), 0);
    int fd = greet(&port, &seat);
    call_wrongly(&seat);
    CHECK_OK(dp__wire_send(fd, &reply, sizeof reply, until_ns));
    CHECK_OK(dp__wire_receive(fd, &memory, sizeof memory, until_ns));
    call_wrongly(&seat);
    dp__os_close(fd);
    reply.status = DP_ERR_INVALID;
    snprintf(reply.text, sizeof reply.text, "not you");
    fd = greet(&port, &later);
    CHECK(later.holder != seat.holder);
    CHECK_OK(dp__wire_send(fd, &reply, sizeof reply, until_ns));
    CHECK_INT(pthread_join(thread, NULL), 0);
    dp__os_close(fd);
    dp__listener_close(&port);
    CHECK_INT(open_files(), before);
}

/* Looks for so many ms whether somebody has left the job for a vote. */
static int deserted_within(dp__voter *voter, int ms)
{
    int process = -1;
    for (uint64_t until_ns = dp__os_after_ms(ms); process < 0 && dp__os_ms_until(until_ns) > 0;) {
        process = dp__voter_deserted(voter, 80);
        dp__os_sleep_ms(1);
    }
    return process;
}

/* Process 0 calls for the vote that has brought the job together, and then for the next one. */
static void call_twice(meeting *m)
{
    const dp_config config = {.device_count = 1,
                              .recovers = true,
                              .timeout_ms = 60000,
                              .bootstrap = {meeting_all_gather, m, m->process, m->process_count}};
    dp_ctx *ctx;
    char byte = 0, all[2];
    CHECK_OK(dp_open(&config, &ctx));
    for (int vote = 0; vote < 2; vote++) {
        if (m->process == 0)
            (void)call_member(ctx->world.voter, (uint16_t)vote);
        else
            CHECK_INT(deserted_within(ctx->world.voter, vote == 0 ? 300 : 9000), vote - 1);
        CHECK_OK(meeting_all_gather(&byte, all, 1, m));
    }
    _exit(EXIT_SUCCESS);
}

/* A call may arrive when its vote is over, and all have met: it is no sign of another failure. */
TEST(late_call_for_the_vote_before_ends_no_job)
{
    in_processes(2, call_twice);
}

/* ---- who comes last -------------------------------------------------------------------------- */

enum { LATE = 3 };                        /* processes, of which this one is the first */
#define LATE_HOURS_NS ((uint64_t)1 << 44) /* five of them: half of what a word has */

static uint64_t late_memory[2048];

/* Holds what each has spent in forward: so much before, and so much in each collective. */
typedef struct late_work {
    uint64_t before[LATE], each[LATE];
} late_work;

/* Each process tells how long it has waited, and what it has spent in forward and in backward. */
static bool tell_waits(dp__late *late, uint64_t seq, const uint64_t *wait_ns, const late_work *work)
{
    for (int p = 0; p < LATE; p++) {
        dp__late teller = {.waited_ns = wait_ns[p]};
        const _Atomic uint64_t spent[DP__LATE_PARTS] = {work->before[p] + work->each[p] * seq,
                                                        seq << 20};
        dp__late_hear(late, p, dp__late_tell(&teller, seq, spent));
        CHECK_INT(teller.waited_ns, 0);
        CHECK(atomic_load(&teller.for_others_ns) == wait_ns[p]);
    }
    return dp__late_count(late);
}

static void open_late(dp__late *late)
{
    CHECK(dp__late_bytes(LATE) <= sizeof late_memory);
    memset(late_memory, 0xff, sizeof late_memory);
    dp__late_open(late, 0, LATE, late_memory);
    CHECK(late->since_ns != 0);
}

/* A wait of all others for one is what lies between its own and the next one: two that come late
   together are not waited for alone, and short waits do not count. */
TEST(wait_of_all_is_for_the_last_one_alone)
{
    static const late_work none;
    static const uint64_t short_ns[LATE] = {0, 300000, 300000};
    static const struct {
        uint64_t wait_us[LATE];
        int last; /* -1: it does not count */
        unsigned us;
    } cases[] = {{{5000, 0, 5000}, 1, 5000},
                 {{5000, 4000, 7000}, 1, 1000},
                 {{0, 300000000, 300000000}, 0, 274877906},
                 {{5000, 0, 0}, -1, 0},
                 {{99, 0, 99}, -1, 0},
                 {{0, 101, 101}, 0, 101}};
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        dp__late late;
        uint64_t waits[LATE], before;
        open_late(&late);
        for (int p = 0; p < LATE; p++)
            waits[p] = cases[i].wait_us[p] * 1000;
        CHECK(!tell_waits(&late, 1, waits, &none));
        CHECK_INT(late.wait_count, cases[i].last >= 0);
        CHECK_INT(atomic_load(&late.longest), cases[i].last);
        before = atomic_load(&late.longest_ns) / 1000;
        CHECK(before <= cases[i].us && before + 1 >= cases[i].us);
        CHECK((atomic_load(&late.by_others_ns) > 0) == (cases[i].last == 0));
        CHECK(!tell_waits(&late, 2, short_ns, &none));
        CHECK_INT(atomic_load(&late.longest), cases[i].us > 300 ? cases[i].last : 0);
    }
}

TEST(who_is_alone_waits_for_nobody)
{
    dp__late late;
    dp__late_open(&late, 0, 1, late_memory);
    dp__late_hear(&late, 0, 5000000);
    CHECK(!dp__late_count(&late));
    CHECK_INT(late.wait_count, 0);
}

/* Gives so many waits in turn, `own` of each `of` for process 1. Returns whether there is a
   verdict. */
static bool judge_waits(dp__late *late, int count, int own, int of, uint64_t ns,
                        const late_work *work, dp__late_verdict *out)
{
    for (int i = 0; i < count; i++) {
        uint64_t waits[LATE] = {ns, ns, ns};
        waits[i % of < own ? 1 : 2] = 0;
        bool time = tell_waits(late, (uint64_t)(2 + i), waits, work);
        CHECK_INT(time, late->wait_count % DP__LATE_LOOK == 0);
    }
    uint64_t now = late->since_ns + 1000000000;
    bool judged = dp__late_judge(late, now, out);
    CHECK((late->since_ns == now) == judged);
    return judged;
}

TEST(one_is_named_that_is_last_in_four_of_five_waits_and_for_long)
{
    static const late_work alike = {{0, LATE_HOURS_NS, 0}, {32 << 20, 32 << 20, 32 << 20}};
    static const late_work forward = {{0, 0, 0}, {1 << 20, 6 << 20, 1 << 20}};
    const uint64_t ms = 1000000;
    dp__late late;
    dp__late_verdict verdict;
    open_late(&late);
    CHECK(judge_waits(&late, 70, 8, 10, 5 * ms, &alike, &verdict)); /* the last is for 2 */
    CHECK_INT(verdict.process, 1);
    CHECK_INT(verdict.waits, 70);
    CHECK_INT(verdict.last, 56);
    CHECK_INT(verdict.part, DP__LATE_ELSEWHERE);
    CHECK(verdict.window_ns == 1000 * ms);
    CHECK(verdict.ns > 279 * ms && verdict.ns <= 280 * ms);
    CHECK_INT(late.wait_count, 0); /* the next window */
    CHECK(judge_waits(&late, 64, 1, 1, 5 * ms, &forward, &verdict));
    CHECK_INT(verdict.part, DP__LATE_FORWARD);
    CHECK(judge_waits(&late, 64, 1, 1, 5 * ms, &alike, &verdict)); /* after so much before */
    CHECK_INT(verdict.part, DP__LATE_ELSEWHERE);
    CHECK(!judge_waits(&late, 64, 3, 4, 5 * ms, &alike, &verdict)); /* of four */
    open_late(&late);
    CHECK(!judge_waits(&late, 64, 1, 1, ms / 2, &alike, &verdict)); /* 32 of 1000 ms */
    open_late(&late);
    CHECK(!judge_waits(&late, 47, 1, 1, 5 * ms, &alike, &verdict)); /* too few */
}

/* Short waits for others do not hide long ones; and a full window has a verdict. */
TEST(waits_are_long_beside_the_mean)
{
    static const late_work alike;
    const uint64_t ms = 1000000;
    dp__late late;
    dp__late_verdict verdict;
    open_late(&late);
    CHECK(!judge_waits(&late, 250, 0, 1, ms / 7, &alike, &verdict)); /* too little to say */
    CHECK(judge_waits(&late, 50, 1, 1, 20 * ms, &alike, &verdict));
    CHECK_INT(verdict.process, 1);
    CHECK_INT(verdict.waits, 50);
    CHECK_INT(verdict.last, 50);
    CHECK(judge_waits(&late, DP__LATE_WAITS, 1, 2, 5 * ms, &alike, &verdict));
    CHECK_INT(verdict.process, -1);
    CHECK_INT(late.wait_count, 0);
}

/* The key and texts of the paper by Aumasson and Bernstein, and of its reference implementation. */
TEST(proofs_are_made_by_siphash)
{
    unsigned char text[15];
    const dp__key key = {0x0706050403020100, 0x0f0e0d0c0b0a0908};
    for (int i = 0; i < 15; i++)
        text[i] = (unsigned char)i;
    CHECK(dp__sip(key, text, 0) == 0x726fdb47dd0e0e31);
    CHECK(dp__sip(key, text, 1) == 0x74f839c593dc67fd);
    CHECK(dp__sip(key, text, 8) == 0x93f5f5799a932462);
    CHECK(dp__sip(key, text, 15) == 0xa129ca6149be45e5);
}

#endif
