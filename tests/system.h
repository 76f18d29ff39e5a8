/* system.h - tests of what dp/os_posix.h asks of the system: sockets, and who this process is.
   In dp.c, after the implementation. */

#include <sys/resource.h>
#include <sys/time.h>
#include "process.h"

#if defined(__linux__)

/* ---- sockets --------------------------------------------------------------------------------- */

/* No wait, nothing for a program that takes this one's place, no delay of what is small. */
static void check_prepared(int fd, bool tcp)
{
    int value = 0;
    socklen_t bytes = sizeof value;
    CHECK(fd >= 0);
    CHECK((fcntl(fd, F_GETFL) & O_NONBLOCK) != 0);
    CHECK((fcntl(fd, F_GETFD) & FD_CLOEXEC) != 0);
    if (tcp) {
        CHECK_INT(getsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &value, &bytes), 0);
        CHECK_INT(value != 0, 1);
        CHECK_INT(getsockopt(fd, SOL_SOCKET, SO_KEEPALIVE, &value, &bytes), 0);
        CHECK_INT(value != 0, 1);
    }
}

static int accept_one(int listener)
{
    bool full = true;
    dp__os_watch watch = {.fd = listener, .events = POLLIN};
    CHECK_INT(dp__os_poll(&watch, 1, 5000), 1);
    int fd = dp__os_accept(listener, &full);
    CHECK(!full);
    return fd;
}

/* Bytes go both ways, there may be none yet, and the end is told from that. */
static void check_pair(int a, int b)
{
    char got[8] = "";
    dp__os_watch watch = {.fd = b, .events = POLLIN};
    CHECK(dp__os_connected(a));
    CHECK_INT(dp__os_receive(b, got, sizeof got), 0);
    CHECK_INT(dp__os_poll(&watch, 1, 1), 0);
    errno = EPIPE;
    CHECK_INT(dp__os_send(a, "", 0), 0);
    CHECK_INT(dp__os_send(a, "hello", 6), 6);
    CHECK_INT(dp__os_poll(&watch, 1, 5000), 1);
    CHECK_INT(dp__os_receive(b, got, sizeof got), 6);
    CHECK_STR(got, "hello");
    CHECK_INT(dp__os_receive(b, got, sizeof got), 0);
    dp__os_close(a);
    CHECK_INT(dp__os_poll(&watch, 1, 5000), 1);
    CHECK_INT(dp__os_receive(b, got, sizeof got), -1);
    while (dp__os_send(b, "lost", 5) >= 0) { /* the first ones may go, none raises SIGPIPE */
    }
    dp__os_close(b);
}

static void check_listener(int listener, const char *host, const char *peer)
{
    dp__os_found to;
    char text[64];
    dp__os_resolve(dp__os_look_up, host, 1, 5000, &to);
    CHECK(to.count > 0);
    dp__os_address at = dp__os_at_port(&to.list[0], dp__os_port(listener));
    int caller = dp__os_connect(&at);
    check_prepared(caller, true);
    int called = accept_one(listener);
    check_prepared(called, true);
    memset(text, 'x', sizeof text);
    dp__os_host_of(called, false, text, sizeof text);
    CHECK_STR(text, peer);
    check_pair(caller, called);
}

TEST(connections_over_a_network)
{
    int before = open_files();
    dp__os_address all[2];
    CHECK_INT(dp__os_everywhere(0, all), 2);
    CHECK_INT(dp__os_at(&all[0]).ss_family, AF_INET6);
    CHECK_INT(dp__os_at(&all[1]).ss_family, AF_INET);
    for (int i = 0; i < 2; i++) {
        int listener = dp__os_listen(&all[i]);
        if (listener < 0 && i == 0) {
            continue; /* a machine without IPv6 */
        }
        check_prepared(listener, true);
        CHECK(dp__os_port(listener) > 0);
        check_listener(listener, "127.0.0.1", ""); /* would mean something else elsewhere */
        if (i == 0) {
            check_listener(listener, "::1", "");
        }
        dp__os_close(listener);
    }
    CHECK_INT(open_files(), before);
}

static int option_of(int fd, int level, int option)
{
    int value = -1;
    socklen_t bytes = sizeof value;
    CHECK_INT(getsockopt(fd, level, option, &value, &bytes), 0);
    return value;
}

/* Also where the system keeps the two families apart, unless it is asked. */
TEST(one_listener_for_both_families)
{
    dp__os_address all[2];
    int own = unshare(CLONE_NEWNET) == 0 ? open("/proc/sys/net/ipv6/bindv6only", O_WRONLY) : -1;
    if (own < 0) {
        SKIP("only root may have a network of its own, and not every machine has IPv6");
    }
    CHECK_INT(write(own, "1", 1), 1);
    dp__os_close(own);
    dp__os_everywhere(0, all);
    int plain = dp__os_socket(AF_INET6), listener = dp__os_listen(&all[0]);
    CHECK_INT(option_of(plain, IPPROTO_IPV6, IPV6_V6ONLY), 1);
    CHECK_INT(option_of(listener, IPPROTO_IPV6, IPV6_V6ONLY), 0);
    CHECK_INT(option_of(plain, SOL_SOCKET, SO_REUSEADDR), 0);
    CHECK_INT(option_of(listener, SOL_SOCKET, SO_REUSEADDR), 1);
    dp__os_close(plain);
    dp__os_close(listener);
}

TEST(connections_inside_a_machine)
{
    int before = open_files();
    char name[32], text[8] = "x";
    dp__os_owner owner;
    snprintf(name, sizeof name, "dp-test-%d", (int)getpid());
    dp__os_address here = dp__os_local(name);
    struct sockaddr_un at;
    memcpy(&at, here.at, sizeof at);
    CHECK_INT(at.sun_path[0], '\0');
    CHECK_STR(at.sun_path + 1, name);
    CHECK_INT(here.bytes, offsetof(struct sockaddr_un, sun_path) + 1 + strlen(name));
    CHECK_INT(dp__os_connect(&here), DP__OS_REFUSED); /* nobody there yet */
    int listener = dp__os_listen(&here);
    check_prepared(listener, false);
    CHECK_INT(dp__os_listen(&here), -1);
    CHECK_INT(open_files(), before + 1);
    int caller = dp__os_connect(&here), called = accept_one(listener);
    check_prepared(caller, false);
    check_prepared(called, false);
    CHECK(dp__os_same_user(called));
    CHECK(dp__os_owner_of(called, &owner));
    CHECK_INT(owner.process, getpid());
    CHECK_INT(owner.user, geteuid());
    dp__os_host_of(called, false, text, sizeof text);
    CHECK_STR(text, "");
    check_pair(caller, called);
    dp__os_close(listener);
    CHECK_INT(open_files(), before);
}

TEST(addresses_that_are_taken_or_of_nobody)
{
    int before = open_files();
    dp__os_address all[2];
    dp__os_found to;
    dp__os_everywhere(0, all);
    int listener = dp__os_listen(&all[1]);
    int port = dp__os_port(listener);
    dp__os_everywhere(port, all);
    CHECK_INT(dp__os_listen(&all[1]), -1);
    CHECK_INT(open_files(), before + 1);
    dp__os_close(listener);
    dp__os_resolve(NULL, "127.0.0.1", port, 0, &to); /* a number is asked of nobody */
    CHECK_INT(to.count, 1);
    int fd = dp__os_connect(&to.list[0]);
    CHECK(fd < 0 || !dp__os_connected(fd));
    dp__os_close(fd);
    dp__os_look_up("no.such.host.invalid", port, false, &to);
    CHECK_INT(to.count, 0);
    CHECK(to.why != NULL && to.why[0] != '\0');
    CHECK_INT(dp__os_port(-1), 0);
    CHECK(!dp__os_connected(-1));
    CHECK(!dp__os_same_user(-1));
    CHECK_INT(open_files(), before);
}

/* ---- who looks up a name --------------------------------------------------------------------- */

static atomic_int lookers; /* that have come, and gone */
static atomic_int silence_ms;

static void look_slowly(const char *host, int port, bool number, dp__os_found *out)
{
    CHECK_STR(host, "a.host");
    CHECK(!number);
    dp__os_sleep_ms(silence_ms);
    memset(out, 0, sizeof *out);
    dp__os_everywhere(port, out->list);
    out->count = 2;
    atomic_fetch_add(&lookers, 1);
}

/* The thread has closed its end some time after the answer came. */
static void await_descriptors(int count)
{
    for (int ms = 0; ms < 5000 && open_files() > count; ms++)
        dp__os_sleep_ms(1);
    CHECK_INT(open_files(), count);
}

TEST(a_name_is_waited_for_a_while)
{
    int before = open_files();
    dp__os_found found;
    silence_ms = 20;
    dp__os_resolve(look_slowly, "a.host", 7, 5000, &found);
    CHECK_INT(found.count, 2);
    dp__os_address other = dp__os_at_port(&found.list[1], 8), all[2];
    dp__os_everywhere(8, all);
    CHECK_BYTES(&other.at, &all[1].at, all[1].bytes);
    await_descriptors(before);
    silence_ms = 300;
    uint64_t start = dp__os_now_ns();
    dp__os_resolve(look_slowly, "a.host", 7, 30, &found);
    CHECK(dp__os_now_ns() - start < 250 * (uint64_t)1000000);
    CHECK_INT(found.count, 0);
    CHECK_STR(found.why, "the name service does not answer");
    CHECK_INT(atomic_load(&lookers), 1);
    for (int ms = 0; ms < 5000 && atomic_load(&lookers) < 2; ms++) /* it ends by itself */
        dp__os_sleep_ms(1);
    CHECK_INT(atomic_load(&lookers), 2);
    await_descriptors(before);
}

static void hear_nothing(int n)
{
    (void)n;
}

/* Signals that come all the time do not end it. */
TEST(a_name_is_waited_for_through_signals)
{
    const struct sigaction action = {.sa_handler = hear_nothing};
    const struct itimerval often = {{0, 3000}, {0, 3000}}, never = {{0, 0}, {0, 0}};
    dp__os_found found;
    CHECK_INT(sigaction(SIGALRM, &action, NULL), 0);
    CHECK_INT(setitimer(ITIMER_REAL, &often, NULL), 0);
    silence_ms = 60;
    dp__os_resolve(look_slowly, "a.host", 7, 5000, &found);
    CHECK_INT(setitimer(ITIMER_REAL, &never, NULL), 0);
    CHECK_INT(found.count, 2);
}

/* Where no thread can start, whoever asks looks by itself. */
TEST(a_name_without_descriptors)
{
    dp__os_found found;
    struct rlimit limit, none;
    CHECK_INT(getrlimit(RLIMIT_NOFILE, &limit), 0);
    none = limit;
    none.rlim_cur = 0;
    CHECK_INT(setrlimit(RLIMIT_NOFILE, &none), 0);
    silence_ms = 0;
    dp__os_resolve(look_slowly, "a.host", 7, 0, &found);
    CHECK_INT(setrlimit(RLIMIT_NOFILE, &limit), 0); /* for sanitizers */
    CHECK_INT(found.count, 2);
}

/* ---- callers --------------------------------------------------------------------------------- */

/* That nobody calls is told from that nobody can be let in. */
TEST(a_caller_who_cannot_be_let_in)
{
    bool full = true;
    char name[32];
    struct rlimit limit, none;
    snprintf(name, sizeof name, "dp-full-%d", (int)getpid());
    dp__os_address here = dp__os_local(name);
    int listener = dp__os_listen(&here);
    CHECK_INT(dp__os_accept(listener, &full), -1);
    CHECK(!full);
    int caller = dp__os_connect(&here);
    CHECK_INT(getrlimit(RLIMIT_NOFILE, &limit), 0);
    none = limit;
    none.rlim_cur = (rlim_t)caller + 1;
    CHECK_INT(setrlimit(RLIMIT_NOFILE, &none), 0);
    CHECK_INT(dp__os_accept(listener, &full), -1);
    CHECK(full);
    CHECK_INT(dp__os_connect(&here), DP__OS_FULL);
    CHECK_INT(dp__os_listen(&here), -1);
    CHECK_INT(setrlimit(RLIMIT_NOFILE, &limit), 0);
    dp__os_close(STDIN_FILENO); /* whose number would be the next one's */
    errno = EMFILE;
    int called = accept_one(listener);
    CHECK(called > STDERR_FILENO);
    CHECK_INT(fcntl(STDIN_FILENO, F_GETFD), -1);
    check_pair(caller, called);
    dp__os_close(listener);
}

/* ---- memory that processes share ------------------------------------------------------------- */

/* In another process: place 3 is held, place 4 is not, and then it is, until this one ends. */
static void look_at_places(const dp__shared_name *name, size_t bytes)
{
    dp__shared found = {.fd = -1};
    pid_t child = fork();
    CHECK(child >= 0);
    if (child == 0) {
        CHECK_OK(dp__os_shared_find(name, bytes, &found));
        CHECK(dp__os_shared_held(&found, 3));
        CHECK(!dp__os_shared_held(&found, 4));
        CHECK(dp__os_shared_hold(&found, 3) == DP_ERR_NO_MEMORY);
        CHECK_OK(dp__os_shared_hold(&found, 4));
        exit(EXIT_SUCCESS);
    }
    int status = 0;
    CHECK_INT(waitpid(child, &status, 0), child);
    CHECK(WIFEXITED(status) && WEXITSTATUS(status) == EXIT_SUCCESS);
}

static void share_memory(bool named)
{
    enum { BYTES = 8192 };
    int before = open_files();
    dp__shared made = {.fd = -1}, found = {.fd = -1};
    dp__shared_name name, other;
    CHECK_OK(dp__os_shared_make(named, BYTES, &made, &name));
    CHECK_INT(name.path[0] != '\0', named);
    CHECK_INT(name.process_id, getpid());
    CHECK_OK(dp__os_shared_reserve(&made, BYTES / 2, BYTES / 2));
    CHECK_OK(dp__os_shared_find(&name, BYTES, &found));
    CHECK(made.data != found.data && made.bytes == BYTES && found.bytes == BYTES);
    ((char *)made.data)[5000] = 7;
    CHECK_INT(((char *)found.data)[5000], 7);
    CHECK((fcntl(made.fd, F_GETFD) & FD_CLOEXEC) != 0);
    CHECK((fcntl(found.fd, F_GETFD) & FD_CLOEXEC) != 0);
    void *was = found.data;
    CHECK_INT(msync(was, BYTES, MS_ASYNC), 0);
    dp__os_shared_close(&found);
    CHECK(found.fd == -1 && found.data == NULL);
    CHECK_INT(msync(was, BYTES, MS_ASYNC), -1);

    CHECK_ERROR(dp__os_shared_find(&name, BYTES / 2, &found), DP_ERR_NO_MEMORY,
                "another file is in its place");
    dp__os_shared_close(&found);
    other = name;
    other.inode++;
    CHECK_ERROR(dp__os_shared_find(&other, BYTES, &found), DP_ERR_NO_MEMORY,
                "another file is in its place");
    dp__os_shared_close(&found);
    other = name;
    other.device++;
    CHECK_ERROR(dp__os_shared_find(&other, BYTES, &found), DP_ERR_NO_MEMORY,
                "another file is in its place");
    dp__os_shared_close(&found);

    CHECK_OK(dp__os_shared_hold(&made, 3));
    look_at_places(&name, BYTES);
    CHECK(!dp__os_shared_held(&made, 4));
    if (named) {
        dp__os_shared_unlink(name.path);
    }
    other = name;
    other.fd = 9999;
    CHECK_ERROR(dp__os_shared_find(&other, BYTES, &found), DP_ERR_NO_MEMORY, "cannot be opened");
    dp__os_shared_close(&made);
    CHECK_INT(open_files(), before);
}

TEST(memory_without_a_name)
{
    share_memory(false);
}

TEST(memory_with_a_name)
{
    share_memory(true);
}

TEST(memory_leaves_the_first_descriptors_alone)
{
    dp__shared made = {.fd = -1}, found = {.fd = -1};
    dp__shared_name name;
    dp__os_close(STDIN_FILENO);
    CHECK_OK(dp__os_shared_make(true, 4096, &made, &name));
    CHECK(made.fd > STDERR_FILENO);
    CHECK(name.path[0] != '\0');
    dp__os_shared_close(&made);
    CHECK_OK(dp__os_shared_find(&name, 4096, &found));
    CHECK(found.fd > STDERR_FILENO);
    dp__os_shared_unlink(name.path);
    dp__os_shared_close(&found);
    CHECK_INT(fcntl(STDIN_FILENO, F_GETFD), -1);
}

TEST(memory_of_no_bytes)
{
    dp__shared made = {.fd = -1};
    dp__shared_name name;
    CHECK_ERROR(dp__os_shared_make(false, 0, &made, &name), DP_ERR_NO_MEMORY,
                "shared memory: 0 bytes cannot be mapped: ");
    CHECK(made.data == NULL);
    dp__os_shared_close(&made);
}

static void wait_for(dp__os_child *child)
{
    for (int i = 0; i < 1000 && !dp__os_ended(child); i++) {
        dp__os_sleep_ms(5);
    }
    CHECK_INT(child->pid, 0);
}

/* What needs one says so, and there is no file or socket then. A process needs none. */
TEST(there_is_no_descriptor_left)
{
    struct rlimit none, limit;
    dp__shared made = {.fd = -1};
    dp__shared_name name;
    dp__os_child child = {0};
    CHECK_INT(getrlimit(RLIMIT_NOFILE, &limit), 0);
    none = limit;
    none.rlim_cur = 0;
    CHECK_INT(setrlimit(RLIMIT_NOFILE, &none), 0);
    int started = dp__os_fork(&child);
    if (started == 0) {
        _exit(EXIT_SUCCESS);
    }
    CHECK_INT(started, 1);
    wait_for(&child);
    CHECK_INT(child.code, EXIT_SUCCESS);
    CHECK_INT(dp__os_socket(AF_INET), -1);
    CHECK_ERROR(dp__os_shared_make(true, 4096, &made, &name), DP_ERR_NO_MEMORY,
                "shared memory: none can be made in /dev/shm: ");
    CHECK_STR(name.path, "");
    CHECK_ERROR(dp__os_shared_make(false, 4096, &made, &name), DP_ERR_NO_MEMORY,
                "shared memory: none can be made: ");
    CHECK(dp__os_random() != dp__os_random());
    CHECK_INT(setrlimit(RLIMIT_NOFILE, &limit), 0);
}

/* Files may not grow any more: memory with a name says how much /dev/shm has. */
static void grow_memory(bool named)
{
    enum { BYTES = 8192 };
    struct rlimit little = {BYTES, RLIM_INFINITY}, before;
    struct statvfs room;
    dp__shared made = {.fd = -1}, more = {.fd = -1};
    dp__shared_name name, other;
    CHECK_OK(dp__os_shared_make(named, BYTES, &made, &name));
    if (named) {
        dp__os_shared_unlink(name.path);
    }
    CHECK_INT(fstatvfs(made.fd, &room), 0);
    CHECK_INT(getrlimit(RLIMIT_FSIZE, &before), 0);
    little.rlim_max = before.rlim_max;
    CHECK_INT(setrlimit(RLIMIT_FSIZE, &little), 0);
    CHECK_ERROR(dp__os_shared_reserve(&made, BYTES, BYTES), DP_ERR_NO_MEMORY,
                room.f_blocks > 0 ? "together need 8, and this one asked for 8: "
                                  : "shared memory: no room for 8 KiB: ");
    CHECK_ERROR(dp__os_shared_make(false, 2 * BYTES, &more, &other), DP_ERR_NO_MEMORY,
                "shared memory: no room for 16384 bytes: ");
    dp__os_shared_close(&more);
    dp__os_shared_close(&made);
    CHECK_INT(setrlimit(RLIMIT_FSIZE, &before), 0);
}

TEST(memory_that_there_is_not)
{
    CHECK(signal(SIGXFSZ, SIG_IGN) != SIG_ERR);
    grow_memory(false);
    grow_memory(true);
}

/* A wait ends with the time, at once where the word is another one, or when somebody wakes. */
TEST(words_are_waited_for)
{
    atomic_uint word;
    atomic_init(&word, 1);
    uint64_t start = dp__os_now_ns();
    dp__os_word_wait(&word, 1, 20000000);
    CHECK(dp__os_now_ns() - start >= 19000000);
    start = dp__os_now_ns();
    dp__os_word_wait(&word, 2, 5000000000u);
    CHECK(dp__os_now_ns() - start < 4000000000u);
}

/* ---- processes ------------------------------------------------------------------------------- */

static void exit_as_the_parent(void)
{
    _exit(77);
}

/* What it leaves in common memory reaches the parent, and what the parent has registered for its
   own end does not run. */
static void start_and_end(bool good)
{
    int before = open_files(), *words = dp__os_common_alloc(sizeof *words);
    dp__os_child child = {0};
    CHECK(words != NULL);
    CHECK_INT(*words, 0);
    int started = dp__os_fork(&child);
    if (started == 0) {
        *words = getpid();
        alarm(5);
        dp__os_leave(good);
    }
    int pid = child.pid;
    CHECK_INT(started, 1);
    wait_for(&child);
    CHECK_INT(child.by_signal, 0);
    CHECK_INT(child.code, good ? EXIT_SUCCESS : EXIT_FAILURE);
    CHECK_INT(*words, pid);
    dp__os_common_free(words, sizeof *words);
    CHECK_INT(open_files(), before);
}

TEST(a_process_ends_with_its_words_and_its_status)
{
    CHECK_INT(atexit(exit_as_the_parent), 0);
    start_and_end(true);
    start_and_end(false);
    _exit(EXIT_SUCCESS);
}

/* What was in a buffer before the start is written once, and so is what a process leaves in one. */
TEST(buffers_are_written_once)
{
    char got[32] = "";
    dp__os_child child = {0};
    FILE *file = tmpfile();
    CHECK(file != NULL && fputs("parent", file) >= 0);
    int started = dp__os_fork(&child);
    if (started == 0) {
        fputs(" child", file);
        dp__os_leave(true);
    }
    CHECK_INT(started, 1);
    wait_for(&child);
    CHECK_INT(fflush(file), 0);
    CHECK_INT(pread(fileno(file), got, sizeof got - 1, 0), 12);
    CHECK_STR(got, "parent child");
    fclose(file);
}

/* Its parent may have ended before a process can ask to end with it. */
static int code_of_who_lives_with(pid_t parent)
{
    int status = 0;
    pid_t pid = fork();
    CHECK(pid >= 0);
    if (pid == 0) {
        dp__os_die_with(parent);
        _exit(77);
    }
    CHECK_INT(waitpid(pid, &status, 0), pid);
    CHECK(WIFEXITED(status));
    return WEXITSTATUS(status);
}

TEST(a_process_whose_parent_has_ended_ends)
{
    CHECK_INT(code_of_who_lives_with(getpid()), 77);
    CHECK_INT(code_of_who_lives_with(getppid()), EXIT_FAILURE);
}

/* No signal comes between the two; before and behind, the same ones as always do. */
static bool blocked_around_a_fork, blocked_behind_a_fork;

static bool is_blocked(int number)
{
    sigset_t now;
    CHECK_INT(pthread_sigmask(SIG_BLOCK, NULL, &now), 0);
    return sigismember(&now, number) != 0;
}

static void look_before_a_fork(void)
{
    blocked_around_a_fork = is_blocked(SIGINT) && is_blocked(SIGTERM) && is_blocked(SIGUSR1);
}

static void look_behind_a_fork(void)
{
    blocked_behind_a_fork = is_blocked(SIGINT) && is_blocked(SIGTERM) && is_blocked(SIGUSR1);
}

TEST(a_fork_is_not_interrupted)
{
    sigset_t user;
    dp__os_child child = {0};
    sigemptyset(&user);
    sigaddset(&user, SIGUSR1);
    CHECK_INT(pthread_sigmask(SIG_SETMASK, &user, NULL), 0);
    CHECK_INT(pthread_atfork(look_before_a_fork, NULL, look_behind_a_fork), 0);
    int started = dp__os_fork(&child);
    bool restored = is_blocked(SIGUSR1) && !is_blocked(SIGINT) && !is_blocked(SIGTERM);
    if (started == 0) {
        dp__os_leave(restored && blocked_behind_a_fork);
    }
    CHECK(restored && blocked_around_a_fork && !blocked_behind_a_fork);
    wait_for(&child);
    CHECK_INT(child.by_signal, 0);
    CHECK_INT(child.code, EXIT_SUCCESS);
}

/* Nobody but root may always start one more; returns the limit as it was. */
static struct rlimit start_no_more(void)
{
    struct rlimit none, limit;
    CHECK(geteuid() != 0 || setuid(65534) == 0);
    CHECK_INT(prctl(PR_SET_DUMPABLE, 1), 0); /* to look at its own descriptors */
    CHECK_INT(getrlimit(RLIMIT_NPROC, &limit), 0);
    none = limit;
    none.rlim_cur = 0;
    CHECK_INT(setrlimit(RLIMIT_NPROC, &none), 0);
    return limit;
}

/* Who looks up a name does so by itself then, and leaves nothing open. */
TEST(a_name_without_a_thread)
{
    dp__os_found found;
    struct rlimit limit = start_no_more();
    int before = open_files();
    silence_ms = 0;
    dp__os_resolve(look_slowly, "a.host", 7, 5000, &found);
    CHECK_INT(setrlimit(RLIMIT_NPROC, &limit), 0);
    CHECK_INT(found.count, 2);
    await_descriptors(before);
}

TEST(a_process_that_cannot_be_started)
{
    dp__os_child child = {0};
    struct rlimit limit = start_no_more();
    int before = open_files(), started = dp__os_fork(&child);
    if (started == 0) {
        _exit(EXIT_SUCCESS);
    }
    CHECK_INT(setrlimit(RLIMIT_NPROC, &limit), 0); /* a sanitizer looks back with one more */
    if (child.pid > 0) {
        SKIP("the number of processes cannot be limited here");
    }
    CHECK_INT(started, -1);
    CHECK_INT(child.pid, 0);
    CHECK_INT(open_files(), before);
}

/* ---- who this is ----------------------------------------------------------------------------- */

TEST(a_machine_has_one_name)
{
    char text[256], again[256];
    memset(text, 'x', sizeof text);
    memset(again, 'y', sizeof again);
    dp__os_whereabouts(text, sizeof text);
    dp__os_whereabouts(again, sizeof again);
    CHECK_STR(text, again);
    CHECK(strlen(text) > 36 && text[8] == '-'); /* of this start of the machine */
    CHECK(strstr(text, "pid:[") != NULL && text[strlen(text) - 1] == ']');
    CHECK_INT(dp__os_machine() == dp__os_machine(), 1);
    uint64_t own = dp__os_machine();
    CHECK(own != dp__hash(dp__hash_first, "", 0));
    CHECK_INT(setenv("DP_MACHINE", "another", 1), 0);
    CHECK(dp__os_machine() != own);
    CHECK_INT(setenv("DP_MACHINE", "", 1), 0); /* as if it were not there */
    CHECK(dp__os_machine() == own);
}

/* Those that this process may use, and no others. */
TEST(cores_have_a_bit_each)
{
    dp__cores got;
    uint64_t before = dp__os_affinity();
    cpu_set_t one, all;
    CHECK_INT(sched_getaffinity(0, sizeof all, &all), 0);
    for (size_t core = 0; core < CPU_SETSIZE; core++) {
        if (!CPU_ISSET(core, &all)) {
            continue;
        }
        CPU_ZERO(&one);
        CPU_SET(core, &one);
        CHECK_INT(sched_setaffinity(0, sizeof one, &one), 0);
        memset(&got, 0xff, sizeof got);
        dp__os_cores_of(0, &got);
        for (size_t word = 0; word < DP__CORE_WORDS; word++) {
            CHECK(got.words[word] == (word == core / 64 ? (uint64_t)1 << core % 64 : 0));
        }
        CHECK_INT(dp__os_affinity_count(), 1);
        CHECK(CPU_COUNT(&all) == 1 || dp__os_affinity() != before);
    }
}

TEST(random_numbers_differ)
{
    CHECK(dp__os_random() != dp__os_random());
}

TEST(questions_leave_no_descriptor)
{
    int before = open_files();
    CHECK(dp__os_core_count() > 0);
    CHECK(dp__os_machine() != dp__os_random());
    CHECK_INT(open_files(), before);
}

TEST(a_pause_takes_its_time)
{
    uint64_t start = dp__os_now_ns();
    dp__os_sleep_ms(20);
    CHECK(dp__os_now_ns() - start >= 19000000);
}
#endif
