/* dp/os_posix.h - v0.2.0 - POSIX, Linux and macOS - MIT licence

   Part of dp.h, which includes it. It keeps the promises of dp/os.h, whose comments say what each
   function does; here are reasons. It needs POSIX threads (link with -lpthread where the C library
   wants it).

   CONTENTS (search for the tag)
     >>posix      memory, environment, time, the log
     >>quotas     how many cores there are
     >>memory     which node it comes from
     >>pthreads   threads, locks, what happens around a fork
     >>disk       files that are there as a whole or not at all, and as memory
     >>binding    which cores a thread may use
     >>tcp        connections to other processes
     >>names      of hosts
     >>interfaces where this machine can be reached
     >>children   who this process is among others, and processes of our own
     >>mapped     memory between processes, words to wait for in it, who is alive
*/

#ifndef DP__ROOMS
#error "dp/os_posix.h is a part of dp.h: include dp.h"
#else

#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>
#if defined(__linux__)
#include <link.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#if defined(__GLIBC__)
#include <execinfo.h>
#endif
#endif

/* ==== >>posix ==================================================================================
   Plain services of the system. The only state is the count of forks.                           */

static void *dp__os_alloc(size_t bytes, size_t align, void *user)
{
    void *data = NULL;
    (void)user;
    if (align < sizeof(void *))
        align = sizeof(void *);
    return posix_memalign(&data, align, bytes) == 0 ? data : NULL;
}

static void dp__os_free(void *data, size_t bytes, void *user)
{
    (void)bytes;
    (void)user;
    free(data);
}

static const char *dp__os_env(const char *name)
{
    const char *text = getenv(name);
    return text != NULL && text[0] != '\0' ? text : NULL;
}

#if defined(__linux__)
/* glibc before 2.34 has it in libdl, which a program need not be linked with; so do static ones. */
extern __typeof__(dlsym) dlsym __attribute__((weak));

static bool dp__os_can_find(void)
{
    return dlsym != NULL;
}
#else
static bool dp__os_can_find(void)
{
    return true;
}
#endif

static dp__os_fn dp__os_find(const char *name)
{
    dp__os_fn fn = NULL;
    void *found = dp__os_can_find() ? dlsym(RTLD_DEFAULT, name) : NULL;
    memcpy(&fn, &found, sizeof fn);
    return fn;
}

/* Between these two calls a failing write returns an error and raises no signal: no SIGPIPE when
   nobody reads any more, no SIGXFSZ beyond the file size limit. Both go to the thread that wrote,
   which blocks them and takes those that were not pending before. */
typedef struct dp__os_calm {
    sigset_t mask, pending; /* before */
} dp__os_calm;

static const int dp__os_of_writes[] = {SIGPIPE, SIGXFSZ};

static void dp__os_calm_begin(dp__os_calm *calm)
{
    sigset_t both;
    sigemptyset(&both);
    for (int i = 0; i < 2; i++)
        sigaddset(&both, dp__os_of_writes[i]);
    pthread_sigmask(SIG_BLOCK, &both, &calm->mask);
    sigpending(&calm->pending);
}

static void dp__os_calm_end(const dp__os_calm *calm)
{
    int error = errno, taken;
    sigset_t pending, one;
    sigpending(&pending);
    for (int i = 0; i < 2; i++) {
        int raised = dp__os_of_writes[i];
        sigemptyset(&one);
        sigaddset(&one, raised);
        if (sigismember(&pending, raised) == 1 && sigismember(&calm->pending, raised) == 0)
            sigwait(&one, &taken);
    }
    pthread_sigmask(SIG_SETMASK, &calm->mask, NULL);
    errno = error;
}

static bool dp__os_print(FILE *file, const char *text, const char *end)
{
    dp__os_calm calm;
    dp__os_calm_begin(&calm);
    bool done = fprintf(file, "%s%s", text, end) >= 0;
    dp__os_calm_end(&calm);
    return done;
}

DP__MAYBE_UNUSED static bool dp__os_is_read(void)
{
    return isatty(STDERR_FILENO) != 0;
}

static uint64_t dp__os_now_ns(void)
{
    struct timespec now = {0};
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

#ifdef CLOCK_MONOTONIC_COARSE
#define DP__CLOCK_COARSE CLOCK_MONOTONIC_COARSE
#else
#define DP__CLOCK_COARSE CLOCK_MONOTONIC
#endif

static uint64_t dp__os_coarse_ns(void)
{
    struct timespec now = {0};
    clock_gettime(DP__CLOCK_COARSE, &now);
    return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

static uint64_t dp__os_wall_ns(void)
{
    struct timespec now = {0};
    clock_gettime(CLOCK_REALTIME, &now);
    return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

static void dp__os_sleep_ns(uint64_t ns)
{
    struct timespec rest = {(time_t)(ns / 1000000000u), (long)(ns % 1000000000u)};
    (void)nanosleep(&rest, NULL);
}

/* What is kept or written to goes through here. stdin, stdout and stderr may be closed; what took
   the number of stderr would get whatever anybody writes there. */
DP__COLD static int dp__os_above_stderr(int fd)
{
    if (fd < 0 || fd > STDERR_FILENO)
        return fd;
    int above = fcntl(fd, F_DUPFD_CLOEXEC, STDERR_FILENO + 1);
    int why = errno;
    close(fd);
    errno = why;
    return above;
}

/* Closed by exec. -1: errno says why not. */
DP__COLD static int dp__os_open(const char *path, int flags, mode_t mode)
{
    return dp__os_above_stderr(open(path, flags | O_CLOEXEC, mode));
}

static int dp__os_file_append(const char *path, bool anew)
{
    return dp__os_open(path, O_WRONLY | O_APPEND | O_CREAT | (anew ? O_TRUNC : 0), 0666);
}

static bool dp__os_file_put(int file, const void *data, size_t bytes)
{
    dp__os_calm calm;
    size_t done = 0;
    ssize_t put = 0;
    dp__os_calm_begin(&calm);
    while (done < bytes && (put >= 0 || errno == EINTR)) {
        put = write(file, (const char *)data + done, bytes - done);
        done += put > 0 ? (size_t)put : 0;
    }
    dp__os_calm_end(&calm);
    return done == bytes;
}

DP__MAYBE_UNUSED static bool dp__os_file_get_at(int file, void *data, size_t bytes, uint64_t at)
{
    size_t done = 0;
    ssize_t got = 1;
    while (done < bytes && (got > 0 || (got < 0 && errno == EINTR))) {
        got = pread(file, (char *)data + done, bytes - done, (off_t)(at + done));
        done += got > 0 ? (size_t)got : 0;
    }
    return done == bytes;
}

static void dp__os_close(int fd)
{
    if (fd >= 0)
        close(fd);
}

static uint64_t dp__os_memory_bytes(void)
{
    long pages = sysconf(_SC_PHYS_PAGES), page_bytes = sysconf(_SC_PAGESIZE);
    return pages > 0 && page_bytes > 0 ? (uint64_t)pages * (uint64_t)page_bytes : 0;
}

/* ==== >>quotas =================================================================================
   A container may give a process less than the cores that it sees.                              */

#if defined(__linux__)
static int dp__os_affinity_count(void)
{
    cpu_set_t mask;
    if (sched_getaffinity(0, sizeof mask, &mask) == 0)
        return CPU_COUNT(&mask);
    long online = sysconf(_SC_NPROCESSORS_ONLN); /* more processors than a cpu_set_t has bits */
    return online > 0 ? (int)online : 1;
}

/* "QUOTA PERIOD" in cores; 0: no limit. Rounded up, so that a fraction of a core gets a thread. */
static int dp__quota_cores(const char *text)
{
    char *end, *last;
    long long quota = strtoll(text, &end, 10), period = strtoll(end, &last, 10);
    if (end == text || last == end || quota <= 0 || period <= 0)
        return 0;
    long long cores = (quota - 1) / period + 1;
    return cores < INT_MAX ? (int)cores : 0;
}

/* Returns true if a comma-separated list of words, followed by a colon, has this word. */
static bool dp__quota_lists(const char *list, size_t bytes, const char *word)
{
    for (const char *at = list; at <= list + bytes; at += strcspn(at, ",:") + 1) {
        if (strcspn(at, ",:") == strlen(word) && strncmp(at, word, strlen(word)) == 0)
            return true;
    }
    return false;
}

/* The path of the group with this controller, in lines of "ID:CONTROLLER,CONTROLLER:PATH"; version
   2 has one line with none. NULL: there is no such line. */
static const char *dp__quota_group(const char *lines, const char *controller, int *out_bytes)
{
    for (const char *line = lines; *line != '\0'; line += *line == '\n') {
        const char *list = line + strcspn(line, ":\n");
        list += *list == ':';
        size_t bytes = strcspn(list, ":\n");
        line = list + strcspn(list, "\n");
        if (list[bytes] == ':' && dp__quota_lists(list, bytes, controller)) {
            *out_bytes = (int)(line - (list + bytes + 1));
            return list + bytes + 1;
        }
    }
    return NULL;
}

static bool dp__quota_read(const char *directory, const char *name, char *text, size_t room)
{
    char path[800];
    bool fits = (size_t)snprintf(path, sizeof path, "%s/%s", directory, name) < sizeof path;
    FILE *file = fits ? fopen(path, "re") : NULL; /* e: closed by exec */
    size_t bytes = file != NULL ? fread(text, 1, room - 1, file) : 0;
    text[bytes] = '\0';
    if (file != NULL)
        fclose(file);
    return bytes > 0;
}

/* Version 2 has both numbers in one file, version 1 in two. */
static int dp__quota_here(const char *directory)
{
    char text[128];
    if (!dp__quota_read(directory, "cpu.max", text, sizeof text)) {
        dp__quota_read(directory, "cpu.cfs_quota_us", text, sizeof text / 2);
        size_t bytes = strlen(text);
        dp__quota_read(directory, "cpu.cfs_period_us", text + bytes, sizeof text - bytes);
    }
    return dp__quota_cores(text);
}

/* The least quota of a group and all groups around it. A container may see its own group as the
   root, whatever the path says: directories that are not there are skipped. */
static int dp__quota_least(const char *lines, const char *controller, const char *mount)
{
    char directory[768];
    int bytes = 0, least = 0;
    const char *path = dp__quota_group(lines, controller, &bytes);
    int length =
        snprintf(directory, sizeof directory, "%s%.*s", mount, bytes, path != NULL ? path : "");
    if (path == NULL || length < 0 || (size_t)length >= sizeof directory)
        return 0;
    for (char *end = directory + length; end != NULL;
         end = strrchr(directory + strlen(mount), '/')) {
        *end = '\0';
        int cores = dp__quota_here(directory);
        least = cores > 0 && (least == 0 || cores < least) ? cores : least;
    }
    return least;
}

/* The cores that the quotas of groups leave this process; 0: no limit. */
static int dp__quota_count(const char *proc, const char *mount)
{
    char lines[3072], cpu[128];
    dp__quota_read(proc, "cgroup", lines, sizeof lines);
    snprintf(cpu, sizeof cpu, "%s/cpu", mount); /* where systemd and others have version 1 */
    int one = dp__quota_least(lines, "cpu", cpu), two = dp__quota_least(lines, "", mount);
    return two == 0 || (one > 0 && one < two) ? one : two;
}

DP__APART static int dp__os_core_count(void)
{
    int cores = dp__os_affinity_count(), quota = dp__quota_count("/proc/self", "/sys/fs/cgroup");
    return quota > 0 && quota < cores ? quota : cores;
}
#else
static int dp__os_core_count(void)
{
    long online = sysconf(_SC_NPROCESSORS_ONLN);
    return online > 0 ? (int)online : 1;
}
#endif

/* ==== >>memory =================================================================================
   Which node of memory (NUMA) a thread's new memory comes from.                                 */

#if defined(__linux__) && defined(SYS_set_mempolicy) && defined(SYS_get_mempolicy)
struct dp__os_near {
    int mode; /* -1: nothing was changed */
    unsigned long nodes[1024 / (8 * sizeof(unsigned long))];
};

/* Most virtual machines do not know. */
DP__MAYBE_UNUSED static int dp__os_node_of(const char *bus_id)
{
    char path[96], text[16], *end = text;
    snprintf(path, sizeof path, "/sys/bus/pci/devices/%.40s", bus_id);
    for (char *c = path; *c != '\0'; c++)
        *c = (char)(*c >= 'A' && *c <= 'F' ? *c - 'A' + 'a' : *c);
    dp__quota_read(path, "numa_node", text, sizeof text);
    long node = strtol(text, &end, 10);
    return end != text ? (int)node : -1;
}

DP__MAYBE_UNUSED static void dp__os_near_begin(int node, dp__os_near *out)
{
    enum { BITS = 8 * sizeof(unsigned long), PREFERRED = 1 };
    dp__os_near near = {.mode = PREFERRED};
    *out = (dp__os_near){.mode = -1};
    if (node < 0 || node >= 1024)
        return;
    near.nodes[(unsigned)node / BITS] = 1ul << ((unsigned)node % BITS);
    if (syscall(SYS_get_mempolicy, &out->mode, out->nodes, 1024, 0, 0) != 0 ||
        syscall(SYS_set_mempolicy, near.mode, near.nodes, 1024) != 0)
        out->mode = -1;
}

DP__MAYBE_UNUSED static void dp__os_near_end(const dp__os_near *before)
{
    if (before->mode >= 0)
        (void)syscall(SYS_set_mempolicy, before->mode, before->mode > 0 ? before->nodes : NULL,
                      before->mode > 0 ? 1024 : 0);
}
#else
struct dp__os_near {
    int none;
};

DP__MAYBE_UNUSED static int dp__os_node_of(const char *bus_id)
{
    (void)bus_id;
    return -1;
}

DP__MAYBE_UNUSED static void dp__os_near_begin(int node, dp__os_near *out)
{
    out->none = node;
}

DP__MAYBE_UNUSED static void dp__os_near_end(const dp__os_near *before)
{
    (void)before;
}
#endif

#if defined(__x86_64__) || defined(__i386__)
static void dp__os_pause(void)
{
    __builtin_ia32_pause();
}
#elif defined(__aarch64__)
static void dp__os_pause(void)
{
    __asm__ volatile("isb"); /* `yield` is a no-op on most cores: it would not slow the loop down */
}
#else
static void dp__os_pause(void)
{
}
#endif

/* ---- why ------------------------------------------------------------------------------------- */

static int dp__os_why(void)
{
    return errno;
}

static const char *dp__os_why_text(int why)
{
    return strerror(why);
}

static bool dp__os_is_taken(int why)
{
    return why == EADDRINUSE;
}

/* ==== >>pthreads ===============================================================================
   Threads, locks, and waiting for another thread.                                               */

struct dp__lock {
    pthread_mutex_t mutex;
};

#define DP__LOCK_INITIALIZER                                                                       \
    {                                                                                              \
        PTHREAD_MUTEX_INITIALIZER                                                                  \
    }

static void dp__lock_init(dp__lock *lock)
{
    pthread_mutex_init(&lock->mutex, NULL);
}

static void dp__lock_fini(dp__lock *lock)
{
    pthread_mutex_destroy(&lock->mutex);
}

static void dp__lock_enter(dp__lock *lock)
{
    pthread_mutex_lock(&lock->mutex);
}

static void dp__lock_leave(dp__lock *lock)
{
    pthread_mutex_unlock(&lock->mutex);
}

struct dp__wake {
    pthread_cond_t condition;
};

#if defined(__APPLE__) /* whose conditions have no clock of one's choice: they count from now on */
static void dp__wake_init(dp__wake *wake)
{
    pthread_cond_init(&wake->condition, NULL);
}

static void dp__wake_wait_until(dp__wake *wake, dp__lock *lock, uint64_t until_ns)
{
    uint64_t now = dp__os_now_ns(), left = until_ns > now ? until_ns - now : 0;
    const struct timespec rest = {.tv_sec = (time_t)(left / 1000000000u),
                                  .tv_nsec = (long)(left % 1000000000u)};
    (void)pthread_cond_timedwait_relative_np(&wake->condition, &lock->mutex, &rest);
}
#else
static void dp__wake_init(dp__wake *wake)
{
    pthread_condattr_t attr;
    pthread_condattr_init(&attr);
    pthread_condattr_setclock(&attr, CLOCK_MONOTONIC);
    pthread_cond_init(&wake->condition, &attr);
    pthread_condattr_destroy(&attr);
}

static void dp__wake_wait_until(dp__wake *wake, dp__lock *lock, uint64_t until_ns)
{
    const struct timespec until = {.tv_sec = (time_t)(until_ns / 1000000000u),
                                   .tv_nsec = (long)(until_ns % 1000000000u)};
    (void)pthread_cond_timedwait(&wake->condition, &lock->mutex, &until);
}
#endif

static void dp__wake_fini(dp__wake *wake)
{
    pthread_cond_destroy(&wake->condition);
}

static void dp__wake_wait(dp__wake *wake, dp__lock *lock, uint64_t until_ns)
{
    if (until_ns != UINT64_MAX)
        dp__wake_wait_until(wake, lock, until_ns);
    else
        pthread_cond_wait(&wake->condition, &lock->mutex);
}

static void dp__wake_signal(dp__wake *wake)
{
    pthread_cond_signal(&wake->condition);
}

struct dp__thread {
    pthread_t id;
};

static atomic_bool dp__os_stack_is_open; /* see dp__os_stack_open */

/* Our threads leave signals to the program's own, except those that an instruction raises, and that
   which asks for a stack. */
static void dp__thread_signals(sigset_t *out)
{
    static const int raised[] = {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGTRAP, SIGABRT};
    sigfillset(out);
    for (size_t i = 0; i < sizeof raised / sizeof raised[0]; i++)
        sigdelset(out, raised[i]);
    if (atomic_load(&dp__os_stack_is_open))
        sigdelset(out, SIGURG);
}

static int dp__thread_start(dp__thread *out, void *(*fn)(void *user), void *user)
{
    sigset_t mask, before;
    dp__thread_signals(&mask);
    pthread_sigmask(SIG_SETMASK, &mask, &before);
    int failed = pthread_create(&out->id, NULL, fn, user);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    return failed;
}

static void dp__thread_join(dp__thread thread)
{
    pthread_join(thread.id, NULL);
}

static void dp__thread_detach(dp__thread thread)
{
    pthread_detach(thread.id);
}

DP__MAYBE_UNUSED static void dp__os_yield(void)
{
    sched_yield();
}

/* ---- forks ----------------------------------------------------------------------------------- */

/* How many files a process may open is limited twice: it may raise the soft limit up to the hard
   one. Programs that use select() need a low one, so it is raised only for as long as needed. */
static struct {
    dp__lock lock;
    int users;
    rlim_t before, raised;
} dp__os_files = {.lock = DP__LOCK_INITIALIZER};

static atomic_uint dp__os_forks;

static void (*dp__os_fork_before)(void), (*dp__os_fork_after)(void), (*dp__os_fork_child)(void);

static void dp__os_before_fork(void)
{
    dp__os_fork_before();
    dp__lock_enter(&dp__os_files.lock);
}

static void dp__os_after_fork(void)
{
    dp__lock_leave(&dp__os_files.lock);
    dp__os_fork_after();
}

static void dp__os_in_child(void)
{
    atomic_fetch_add(&dp__os_forks, 1);
    dp__os_fork_child();
    dp__os_after_fork();
}

/* getpid would be a system call. */
static unsigned dp__os_fork_count(void)
{
    return atomic_load_explicit(&dp__os_forks, memory_order_relaxed);
}

static void dp__os_init(void (*before)(void), void (*after)(void), void (*child)(void))
{
    static dp__lock once = DP__LOCK_INITIALIZER;
    dp__lock_enter(&once);
    if (dp__os_fork_before == NULL) {
        dp__os_fork_before = before;
        dp__os_fork_after = after;
        dp__os_fork_child = child;
        pthread_atfork(dp__os_before_fork, dp__os_after_fork, dp__os_in_child);
    }
    dp__lock_leave(&once);
}

/* ==== >>disk ===================================================================================
   Files that are there as a whole or not at all, and files as memory.                           */

/* The number of an inode is given again when its file is gone: so there is a time beside it. */
#if defined(__APPLE__) /* whose finer field has a name for each set of macros */
static uint64_t dp__os_changed_ns(const struct stat *file)
{
    return (uint64_t)file->st_mtime * 1000000000u;
}
#else
static uint64_t dp__os_changed_ns(const struct stat *file)
{
    return (uint64_t)file->st_mtim.tv_sec * 1000000000u + (uint64_t)file->st_mtim.tv_nsec;
}
#endif

static dp__os_file_id dp__os_file_id_of(const char *path)
{
    struct stat there;
    if (lstat(path, &there) != 0)
        return (dp__os_file_id){.device = 0};
    return (dp__os_file_id){(uint64_t)there.st_dev, (uint64_t)there.st_ino, (uint64_t)there.st_size,
                            dp__os_changed_ns(&there)};
}

/* Another writer has made a file of that name since the part was made. One that was only removed
   is nobody's loss. */
static bool dp__os_part_is_late(const dp__os_part *part)
{
    const dp__os_file_id none = {.device = 0}, now = dp__os_file_id_of(part->target);
    return memcmp(&now, &none, sizeof now) != 0 && memcmp(&now, &part->before, sizeof now) != 0;
}

static dp_status dp__os_refused(const char *verb, const char *path)
{
    return dp_error(DP_ERR_FILE, "cannot %s '%.200s': %s", verb, path, strerror(errno));
}

/* Another process may have removed it, and have made another of the same name. */
static bool dp__os_part_is_at(int fd, const char *path)
{
    struct stat own, there;
    return fstat(fd, &own) == 0 && lstat(path, &there) == 0 && own.st_ino == there.st_ino &&
           own.st_dev == there.st_dev;
}

/* DP_PENDING: the name got another file before this one was locked. A lock belongs to the file, so
   it ends with a process that is killed. Some file systems have no locks, and do without. */
static dp_status dp__os_part_try(dp__os_part *part)
{
    struct stat own;
    part->fd = dp__os_open(part->path, O_RDWR | O_CREAT | O_NOFOLLOW | O_NONBLOCK, 0666);
    if (part->fd < 0)
        return dp__os_refused("create", part->path);
    if (flock(part->fd, LOCK_EX | LOCK_NB) != 0 && errno == EWOULDBLOCK)
        return dp_error(DP_ERR_FILE, "another process, or thread, is writing '%.200s'", part->path);
    if (fstat(part->fd, &own) != 0)
        return dp__os_refused("look at", part->path);
    if (!dp__os_part_is_at(part->fd, part->path))
        return DP_PENDING;
    if (!S_ISREG(own.st_mode))
        return dp_error(DP_ERR_FILE, "'%.200s' is not a regular file", part->path);
    return ftruncate(part->fd, 0) == 0 ? DP_OK : dp__os_refused("empty", part->path);
}

DP__MAYBE_UNUSED static dp_status dp__os_part_make(dp_scope *scope, const char *target,
                                                   dp__os_part *out)
{
    size_t room = strlen(target) + sizeof ".part";
    char *path = dp_scope_alloc(scope, room), *spare = dp_scope_alloc(scope, room);
    if (path == NULL || spare == NULL)
        return dp_error(DP_ERR_NO_MEMORY, "no memory");
    snprintf(path, room, "%s.part", target);
    *out = (dp__os_part){target, path, spare, -1, dp__os_file_id_of(target)};
    return DP_OK;
}

DP__MAYBE_UNUSED static dp_status dp__os_part_open(dp__os_part *part)
{
    enum { TRIES = 16 };
    struct stat there;
    dp_status status = DP_PENDING;
    part->fd = -1;
    if (stat(part->target, &there) == 0 && !S_ISREG(there.st_mode))
        return dp_error(DP_ERR_FILE, "it is not a regular file");
    for (int i = 0; i < TRIES && status == DP_PENDING; i++) {
        dp__os_drop(&part->fd);
        status = dp__os_part_try(part);
    }
    if (status == DP_OK)
        return DP_OK;
    dp__os_drop(&part->fd);
    return status != DP_PENDING
               ? status
               : dp_error(DP_ERR_FILE, "other processes are writing '%.200s'", part->path);
}

DP__MAYBE_UNUSED static dp_status dp__os_part_write(const dp__os_part *part, const char *bytes,
                                                    size_t count)
{
    bool done = dp__os_file_put(part->fd, bytes, count);
    return done ? DP_OK : dp__os_refused("write", part->path);
}

DP__MAYBE_UNUSED static dp_status dp__os_part_mend(const dp__os_part *part, const char *bytes,
                                                   size_t count, uint64_t at)
{
    bool done = pwrite(part->fd, bytes, count, (off_t)at) == (ssize_t)count;
    return done ? DP_OK : dp__os_refused("write", part->path);
}

static bool dp__os_sync(int fd)
{
    while (fsync(fd) != 0)
        if (errno != EINTR)
            return false;
    return true;
}

DP__MAYBE_UNUSED static dp_status dp__os_part_sync(const dp__os_part *part)
{
    return dp__os_sync(part->fd) ? DP_OK : dp__os_refused("write", part->path);
}

/* What systems and file systems say that have no such thing for a directory. */
static bool dp__os_has_no_sync(int error)
{
    return error == EINVAL || error == EBADF || error == ENOSYS || error == ENOTSUP;
}

/* The new name is on disk once the directory is. A directory that may not be read, or a system
   that cannot sync one, is passed over. */
static dp_status dp__os_directory_sync(const dp__os_part *part)
{
    char *room = part->room;
    const char *slash = strrchr(part->target, '/');
    size_t count = slash != NULL ? (size_t)(slash - part->target) + 1 : 0;
    memcpy(room, slash != NULL ? part->target : ".", count + (slash == NULL));
    room[count + (slash == NULL)] = '\0';
    int fd = dp__os_open(room, O_RDONLY | O_DIRECTORY, 0);
    int failed = fd >= 0 && !dp__os_sync(fd) && !dp__os_has_no_sync(errno) ? errno : 0;
    dp__os_close(fd);
    if (failed == 0)
        return DP_OK;
    errno = failed;
    return dp__os_refused("make sure of the name in", room);
}

/* Renames the part, which is on disk, or removes it. Others may take its name as soon as it is
   free, and its lock as soon as the file is closed: hence this order. While it is locked nobody who
   writes so renames anything to the target. */
DP__MAYBE_UNUSED static dp_status dp__os_part_end(dp__os_part *part, dp_status status)
{
    bool moved = false;
    if (status == DP_OK && dp__os_part_is_late(part))
        status = dp_error(DP_ERR_FILE,
                          "another process, or thread, has written '%.200s' "
                          "meanwhile, and that file stays",
                          part->target);
    if (status == DP_OK) {
        moved = rename(part->path, part->target) == 0;
        status = moved ? DP_OK : dp__os_refused("rename", part->path);
    }
    if (!moved && dp__os_part_is_at(part->fd, part->path))
        (void)unlink(part->path);
    dp__os_drop(&part->fd);
    return status == DP_OK ? dp__os_directory_sync(part) : status;
}

/* Until the lock is there the name may get to another writer. */
DP__MAYBE_UNUSED static void dp__os_part_clear(const char *path)
{
    int fd = dp__os_open(path, O_RDWR | O_NOFOLLOW | O_NONBLOCK, 0);
    if (fd < 0)
        return;
    if (flock(fd, LOCK_EX | LOCK_NB) == 0 && dp__os_part_is_at(fd, path))
        (void)unlink(path);
    close(fd);
}

DP__MAYBE_UNUSED static dp_status dp__os_names(const char *folder,
                                               void (*fn)(const char *name, void *user), void *user)
{
    DIR *directory = opendir(folder);
    if (directory == NULL)
        return dp__os_refused("read the folder", folder);
    for (const struct dirent *entry; (errno = 0, entry = readdir(directory)) != NULL;)
        fn(entry->d_name, user);
    dp_status status = errno == 0 ? DP_OK : dp__os_refused("read the folder", folder);
    closedir(directory);
    return status;
}

DP__MAYBE_UNUSED static dp_status dp__os_remove(const char *path)
{
    return unlink(path) == 0 || errno == ENOENT ? DP_OK : dp__os_refused("remove", path);
}

/* ---- kept ------------------------------------------------------------------------------------ */

DP__MAYBE_UNUSED static int dp__os_kept_open(const char *path, uint64_t *out_bytes)
{
    struct stat there;
    int fd = dp__os_open(path, O_RDONLY | O_NOFOLLOW | O_NONBLOCK, 0);
    bool own = fd >= 0 && fstat(fd, &there) == 0 && S_ISREG(there.st_mode) &&
               there.st_uid == geteuid() && (there.st_mode & (S_IWGRP | S_IWOTH)) == 0;
    *out_bytes = own ? (uint64_t)there.st_size : 0;
    return fd;
}

DP__MAYBE_UNUSED static int dp__os_kept_lock(const char *folder, int wait_ms)
{
    char around[1100];
    const char *last = strrchr(folder, '/');
    if (last != NULL && (size_t)(last - folder) < sizeof around) {
        snprintf(around, sizeof around, "%.*s", (int)(last - folder), folder);
        (void)mkdir(around, 0700);
    }
    (void)mkdir(folder, 0700);
    int lock = dp__os_open(folder, O_RDONLY | O_DIRECTORY, 0);
    for (int ms = 0; lock >= 0 && ms < wait_ms; ms += 10) {
        if (flock(lock, LOCK_EX | LOCK_NB) == 0 || errno != EWOULDBLOCK)
            break;
        dp__os_sleep_ms(10);
    }
    return lock;
}

/* A lock would live on in children. */
DP__MAYBE_UNUSED static void dp__os_kept_unlock(int lock)
{
    if (lock >= 0)
        (void)flock(lock, LOCK_UN);
    dp__os_close(lock);
}

/* Not synchronised with the disk. */
DP__MAYBE_UNUSED static bool dp__os_whole_put(const char *path, mode_t mode, const void *head,
                                              size_t head_bytes, const void *data, size_t bytes)
{
    char other[1200];
    bool fits = (size_t)snprintf(other, sizeof other, "%s.new", path) < sizeof other;
    (void)unlink(other);
    int file = fits ? dp__os_open(other, O_WRONLY | O_CREAT | O_EXCL, mode) : -1;
    if (file < 0)
        return false;
    bool good = dp__os_file_put(file, head, head_bytes) && dp__os_file_put(file, data, bytes);
    good = close(file) == 0 && good && rename(other, path) == 0;
    int why = errno;
    if (!good)
        (void)unlink(other);
    errno = why;
    return good;
}

DP__MAYBE_UNUSED static bool dp__os_kept_put(const char *path, const void *head, size_t head_bytes,
                                             const void *data, size_t bytes)
{
    return dp__os_whole_put(path, 0600, head, head_bytes, data, bytes);
}

DP__MAYBE_UNUSED static bool dp__os_text_put(const char *path, const char *text, size_t bytes)
{
    return dp__os_whole_put(path, 0666, NULL, 0, text, bytes);
}

/* After a job failure a device may still be reading it. */
static void dp__os_unmap(void *user)
{
    const dp__os_map *map = user;
    if (!dp_failure(map->ctx, NULL))
        munmap(map->bytes, map->count);
}

static dp_status dp__os_look(int fd, uint64_t *out_bytes)
{
    struct stat there;
    if (fstat(fd, &there) != 0)
        return dp_error(DP_ERR_FILE, "it cannot be looked at: %s", strerror(errno));
    if (!S_ISREG(there.st_mode))
        return dp_error(DP_ERR_FILE, "it is not a regular file");
    if (there.st_size == 0)
        return dp_error(DP_ERR_FILE, "it is empty");
    *out_bytes = (uint64_t)there.st_size;
    return DP_OK;
}

DP__MAYBE_UNUSED static dp_status dp__os_file_open(const char *path, int *out_fd,
                                                   uint64_t *out_bytes)
{
    int fd = dp__os_open(path, O_RDONLY | O_NONBLOCK, 0);
    if (fd < 0)
        return dp_error(errno == ENOENT ? DP_ERR_NO_FILE : DP_ERR_FILE, "it cannot be opened: %s",
                        strerror(errno));
    dp_status status = dp__os_look(fd, out_bytes);
    if (status == DP_OK)
        *out_fd = fd;
    else
        close(fd);
    return status;
}

DP__MAYBE_UNUSED static dp_status dp__os_map_open(dp_ctx *ctx, dp_scope *scope, const char *path,
                                                  dp__os_map *out)
{
    int fd = -1;
    uint64_t bytes = 0;
    dp__os_map *kept = dp_scope_alloc(scope, sizeof *kept);
    if (kept == NULL)
        return dp_error(DP_ERR_NO_MEMORY, "no memory");
    DP_TRY(dp__os_file_open(path, &fd, &bytes));
    *out = (dp__os_map){.ctx = ctx, .count = (size_t)bytes};
    out->bytes = mmap(NULL, out->count, PROT_READ, MAP_SHARED, fd, 0);
    close(fd);
    if (out->bytes == MAP_FAILED)
        return dp_error(DP_ERR_FILE, "it cannot be mapped: %s", strerror(errno));
    *kept = *out;
    dp_status status = dp_scope_defer(scope, dp__os_unmap, kept);
    if (status != DP_OK)
        munmap(out->bytes, out->count);
    return status;
}

/* ==== >>binding ================================================================================
   Which cores a thread may use, and how nodes divide them.                                      */

#if defined(__linux__)
static void dp__os_cores_of(int thread, dp__cores *out)
{
    cpu_set_t mask;
    _Static_assert(sizeof mask == sizeof *out, "one bit a core");
    if (sched_getaffinity(thread, sizeof mask, &mask) != 0)
        memset(&mask, 0xff, sizeof mask);
    memcpy(out, &mask, sizeof mask);
}

static bool dp__cores_give(int thread, const dp__cores *cores)
{
    cpu_set_t mask;
    memcpy(&mask, cores, sizeof mask);
    return sched_setaffinity(thread, sizeof mask, &mask) == 0;
}

static int dp__os_thread(void)
{
    return (int)syscall(SYS_gettid);
}

static bool dp__os_bind(const dp__cores *cores, dp__os_bound *out)
{
    *out = (dp__os_bound){.thread = dp__os_thread(), .now = *cores};
    dp__os_cores_of(0, &out->before);
    if (dp__cores_give(0, cores))
        return true;
    out->thread = 0;
    return false;
}

static bool dp__os_rebind(const dp__os_bound *bound, const dp__cores *cores)
{
    char path[48];
    dp__cores has;
    snprintf(path, sizeof path, "/proc/self/task/%d", bound->thread);
    if (bound->thread == 0 || access(path, F_OK) != 0)
        return false;
    dp__os_cores_of(bound->thread, &has);
    return dp__cores_equal(&has, &bound->now) && dp__cores_give(bound->thread, cores);
}

/* What a list such as 0-3,8 names; false: it is no list. An empty one is: of a node of memory. */
static bool dp__cores_listed(const char *text, dp__cores *out)
{
    *out = (dp__cores){{0}};
    for (bool more = *text != '\n'; more; text += more) {
        int first = dp__number_below(&text, DP__CORES_MAX), last = first;
        if (*text == '-') {
            text++;
            last = dp__number_below(&text, DP__CORES_MAX);
        }
        if (first < 0 || last < first)
            return false;
        for (int core = first; core <= last; core++)
            dp__cores_add(out, core);
        more = *text == ',';
    }
    return strcmp(text, "\n") == 0 || *text == '\0';
}

/* The nodes that a folder has, one bit each, as they come in any order. */
DP__APART static bool dp__nodes_in(const char *folder, dp__cores *out)
{
    DIR *directory = opendir(folder);
    *out = (dp__cores){{0}};
    if (directory == NULL)
        return false;
    for (const struct dirent *entry; (entry = readdir(directory)) != NULL;) {
        const char *at = entry->d_name + 4;
        int node = strncmp(entry->d_name, "node", 4) == 0 ? dp__number_below(&at, DP__NODES_MAX)
                                                          : -1;
        if (node >= 0 && *at == '\0')
            dp__cores_add(out, node);
    }
    closedir(directory);
    return true;
}

/* Half of the most cores, each with a comma, have room in the text: what is longer is no list. */
DP__APART static bool dp__node_cores(const char *folder, int node, dp__cores *out)
{
    char name[32], text[2560];
    snprintf(name, sizeof name, "node%d/cpulist", node);
    return dp__quota_read(folder, name, text, sizeof text) && strlen(text) < sizeof text - 1 &&
           dp__cores_listed(text, out);
}

static bool dp__row_add(dp__row *row, int node, const dp__cores *cores)
{
    if (row->count + dp__cores_count(cores) > DP__CORES_MAX)
        return false;
    for (int core = 0; core < DP__CORES_MAX; core++) {
        if (!dp__cores_have(cores, core))
            continue;
        row->node[row->count] = (uint8_t)node;
        row->core[row->count++] = (uint16_t)core;
    }
    row->node_count += dp__cores_count(cores) > 0;
    return true;
}

/* $DP_TOPOLOGY is a folder in place of the system's, for tests. */
static bool dp__os_row(dp__row *out)
{
    const char *folder = dp__os_env("DP_TOPOLOGY");
    dp__cores nodes, cores;
    out->count = out->node_count = 0;
    folder = folder != NULL ? folder : "/sys/devices/system/node";
    bool good = dp__nodes_in(folder, &nodes);
    for (int node = 0; node < DP__NODES_MAX && good; node++)
        if (dp__cores_have(&nodes, node))
            good = dp__node_cores(folder, node, &cores) && dp__row_add(out, node, &cores);
    return good;
}
#else
static void dp__os_cores_of(int thread, dp__cores *out)
{
    (void)thread;
    *out = (dp__cores){{0}};
    for (int i = 0, count = dp__os_core_count(); i < count && i < DP__CORES_MAX; i++)
        dp__cores_add(out, i);
}

static int dp__os_thread(void)
{
    return 0;
}

static bool dp__os_bind(const dp__cores *cores, dp__os_bound *out)
{
    (void)cores;
    out->thread = 0;
    return false;
}

static bool dp__os_rebind(const dp__os_bound *bound, const dp__cores *cores)
{
    (void)bound;
    (void)cores;
    return false;
}

static bool dp__os_row(dp__row *out)
{
    out->count = out->node_count = 0;
    return false;
}
#endif

/* ==== >>tcp ====================================================================================
   Connections to other processes: TCP over a network, sockets of the file system inside a machine.
   No closed connection raises SIGPIPE.                                                          */

_Static_assert((int)DP__CAN_READ == POLLIN && (int)DP__CAN_WRITE == POLLOUT, "poll takes them");
_Static_assert(sizeof(dp__os_watch) == sizeof(struct pollfd) &&
                   offsetof(dp__os_watch, revents) == offsetof(struct pollfd, revents),
               "poll takes a list of them");
_Static_assert(sizeof(struct sockaddr_storage) <= sizeof((dp__os_address){.bytes = 0}.at),
               "every address has room");

/* As the system has it. */
static struct sockaddr_storage dp__os_at(const dp__os_address *address)
{
    struct sockaddr_storage at;
    memcpy(&at, address->at, sizeof at);
    return at;
}

static dp__os_address dp__os_address_of(const void *at, socklen_t bytes)
{
    dp__os_address address = {.bytes = (uint32_t)bytes};
    memcpy(address.at, at, bytes);
    return address;
}

static bool dp__os_is_local(const dp__os_address *address)
{
    return dp__os_at(address).ss_family == AF_UNIX;
}

#if !defined(MSG_NOSIGNAL)
#define MSG_NOSIGNAL 0 /* macOS: SO_NOSIGPIPE below does it */
#endif
#if !defined(SOCK_CLOEXEC)
#define SOCK_CLOEXEC                        0 /* macOS: dp__os_marked does it */
#define accept4(listener, at, bytes, flags) accept(listener, at, bytes)
#endif

static int dp__os_poll(dp__os_watch *list, int count, int timeout_ms)
{
    int ready = poll((struct pollfd *)(void *)list, (nfds_t)count, timeout_ms);
    return ready > 0 ? ready : 0;
}

static void dp__os_option(int fd, int level, int option, int value)
{
    (void)setsockopt(fd, level, option, &value, sizeof value); /* none of them is vital */
}

#if defined(SO_NOSIGPIPE)
static void dp__os_no_signal(int fd)
{
    dp__os_option(fd, SOL_SOCKET, SO_NOSIGPIPE, 1);
}
#else
static void dp__os_no_signal(int fd)
{
    (void)fd;
}
#endif

/* Exec closes a socket, from the start: another thread may call it at any time. */
static int dp__os_marked(int fd)
{
    if (fd >= 0)
        (void)fcntl(fd, F_SETFD, FD_CLOEXEC); /* macOS: too late for a moment */
    return dp__os_above_stderr(fd);
}

/* Small messages are sent at once, and a machine that is silently gone is noticed eventually. */
static void dp__os_prepare(int fd, int family)
{
    (void)fcntl(fd, F_SETFL, O_NONBLOCK);
    dp__os_no_signal(fd);
    if (family != AF_UNIX) {
        dp__os_option(fd, IPPROTO_TCP, TCP_NODELAY, 1);
        dp__os_option(fd, SOL_SOCKET, SO_KEEPALIVE, 1);
    }
}

static int dp__os_socket(int family)
{
    int fd = dp__os_marked(socket(family, SOCK_STREAM | SOCK_CLOEXEC, 0));
    if (fd >= 0)
        dp__os_prepare(fd, family);
    return fd;
}

#if defined(__linux__)
/* A name that is no file: it begins behind the first zero of `path`, and goes with the last
   descriptor. */
static size_t dp__os_path(const char *name, char *path, size_t room)
{
    return 1 + (size_t)snprintf(path + 1, room - 1, "%s", name);
}

static void dp__os_forget(const dp__os_address *address)
{
    (void)address;
}

static bool dp__os_owner_of(int fd, dp__os_owner *out)
{
    struct ucred peer;
    socklen_t bytes = sizeof peer;
    if (getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &peer, &bytes) != 0)
        return false;
    *out = (dp__os_owner){(uint64_t)peer.uid, (uint64_t)peer.pid};
    return true;
}
#else
static size_t dp__os_path(const char *name, char *path, size_t room)
{
    const char *directory = dp__os_env("TMPDIR");
    snprintf(path, room, "%s/%s", directory != NULL ? directory : P_tmpdir, name);
    return strlen(path) + 1;
}

static void dp__os_forget(const dp__os_address *address)
{
    struct sockaddr_un at;
    if (!dp__os_is_local(address))
        return;
    memcpy(&at, address->at, sizeof at);
    unlink(at.sun_path);
}

static bool dp__os_owner_of(int fd, dp__os_owner *out)
{
    uid_t user;
    gid_t group;
    if (getpeereid(fd, &user, &group) != 0)
        return false;
    *out = (dp__os_owner){(uint64_t)user, 0};
    return true;
}
#endif

static uint64_t dp__os_user(void)
{
    return (uint64_t)geteuid();
}

static dp__os_address dp__os_local(const char *name)
{
    struct sockaddr_un at = {.sun_family = AF_UNIX};
    size_t bytes = dp__os_path(name, at.sun_path, sizeof at.sun_path);
    return dp__os_address_of(&at, (socklen_t)(offsetof(struct sockaddr_un, sun_path) + bytes));
}

static int dp__os_everywhere(int port, dp__os_address out[2])
{
    struct sockaddr_in6 six = {.sin6_family = AF_INET6, .sin6_port = htons((uint16_t)port)};
    struct sockaddr_in four = {.sin_family = AF_INET, .sin_port = htons((uint16_t)port)};
    out[0] = dp__os_address_of(&six, sizeof six);
    out[1] = dp__os_address_of(&four, sizeof four);
    return 2;
}

static int dp__os_listen(const dp__os_address *address)
{
    const struct sockaddr_storage at = dp__os_at(address);
    int fd = dp__os_socket(at.ss_family);
    if (fd < 0)
        return -1;
    if (at.ss_family != AF_UNIX) /* connections of a job before this one may linger */
        dp__os_option(fd, SOL_SOCKET, SO_REUSEADDR, 1);
    if (at.ss_family == AF_INET6)
        dp__os_option(fd, IPPROTO_IPV6, IPV6_V6ONLY, 0);
    if (bind(fd, (const struct sockaddr *)&at, address->bytes) == 0 && listen(fd, SOMAXCONN) == 0)
        return fd;
    int why = errno;
    dp__os_close(fd);
    errno = why;
    return -1;
}

static int dp__os_port(int fd)
{
    struct sockaddr_in6 at = {.sin6_port = 0}; /* which lies in the same place in both families */
    socklen_t bytes = sizeof at;
    (void)getsockname(fd, (struct sockaddr *)&at, &bytes);
    return ntohs(at.sin6_port);
}

static int dp__os_accept(int listener, bool *out_full)
{
    struct sockaddr_storage from;
    socklen_t bytes = sizeof from;
    int fd = dp__os_marked(accept4(listener, (struct sockaddr *)&from, &bytes, SOCK_CLOEXEC));
    *out_full = fd < 0 && (errno == EMFILE || errno == ENFILE || errno == ENOMEM);
    if (fd >= 0)
        dp__os_prepare(fd, from.ss_family);
    return fd;
}

static int dp__os_connect(const dp__os_address *to)
{
    const struct sockaddr_storage at = dp__os_at(to);
    int fd = dp__os_socket(at.ss_family);
    if (fd < 0)
        return errno == EMFILE || errno == ENFILE ? DP__OS_FULL : -1;
    if (connect(fd, (const struct sockaddr *)&at, to->bytes) == 0 || errno == EINPROGRESS ||
        errno == EINTR)
        return fd;
    bool refused = errno == ECONNREFUSED;
    bool crowded = errno == EAGAIN && at.ss_family == AF_UNIX;
    dp__os_close(fd);
    return crowded ? DP__OS_CROWDED : refused ? DP__OS_REFUSED : -1;
}

static uint64_t dp__os_files_limit(void)
{
    struct rlimit limit;
    return getrlimit(RLIMIT_NOFILE, &limit) == 0 ? (uint64_t)limit.rlim_cur : 0;
}

/* So many more are going to be opened. Half of the limit is left to the rest of the program. */
static void dp__os_files_raise(size_t more)
{
    struct rlimit limit;
    dp__lock_enter(&dp__os_files.lock);
    bool known = getrlimit(RLIMIT_NOFILE, &limit) == 0;
    if (dp__os_files.users++ == 0 && known)
        dp__os_files.before = dp__os_files.raised = limit.rlim_cur;
    const rlim_t wanted = (rlim_t)more; /* of either sign */
    if (known && limit.rlim_cur != RLIM_INFINITY && wanted > limit.rlim_cur / 2) {
        const rlim_t room = limit.rlim_max - limit.rlim_cur;
        limit.rlim_cur += wanted < room ? wanted : room;
        if (setrlimit(RLIMIT_NOFILE, &limit) == 0)
            dp__os_files.raised = limit.rlim_cur;
    }
    dp__lock_leave(&dp__os_files.lock);
}

/* When the last one has called it; unless the program has set another limit meanwhile. */
static void dp__os_files_lower(void)
{
    struct rlimit limit;
    dp__lock_enter(&dp__os_files.lock);
    if (--dp__os_files.users == 0 && getrlimit(RLIMIT_NOFILE, &limit) == 0 &&
        limit.rlim_cur == dp__os_files.raised) {
        limit.rlim_cur = dp__os_files.before;
        (void)setrlimit(RLIMIT_NOFILE, &limit);
    }
    dp__lock_leave(&dp__os_files.lock);
}

static int dp__os_connection(int fd)
{
    int failed = 0;
    socklen_t bytes = sizeof failed;
    if (getsockopt(fd, SOL_SOCKET, SO_ERROR, &failed, &bytes) != 0)
        return -1;
    return failed == 0 ? 0 : failed == ECONNREFUSED || failed == ECONNRESET ? DP__OS_REFUSED : -1;
}

enum { DP__OS_BYTES_MOST = 1 << 30 }; /* of one call: macOS refuses what is no int */

static ptrdiff_t dp__os_send(int fd, const void *data, size_t bytes)
{
    size_t most = bytes < DP__OS_BYTES_MOST ? bytes : DP__OS_BYTES_MOST;
    ssize_t sent = send(fd, data, most, MSG_NOSIGNAL);
    if (sent < 0)
        return errno == EAGAIN || errno == EINTR ? 0 : -1;
    return sent;
}

static ptrdiff_t dp__os_receive(int fd, void *data, size_t bytes)
{
    size_t most = bytes < DP__OS_BYTES_MOST ? bytes : DP__OS_BYTES_MOST;
    ssize_t got = recv(fd, data, most, 0);
    if (got < 0)
        return errno == EAGAIN || errno == EINTR ? 0 : -1;
    return got > 0 ? got : -1;
}

static bool dp__os_end_sending(int fd)
{
    return fd >= 0 && shutdown(fd, SHUT_WR) == 0;
}

/* ==== >>names ==================================================================================
   The addresses of a host. Nothing can end a look-up, so a thread does it.                      */

static void dp__os_look_up(const char *host, int port, bool number, dp__os_found *out)
{
    struct addrinfo hints = {.ai_family = AF_UNSPEC,
                             .ai_socktype = SOCK_STREAM,
                             .ai_flags = number ? AI_NUMERICHOST : 0};
    struct addrinfo *found = NULL;
    char service[16];
    snprintf(service, sizeof service, "%d", port);
    memset(out, 0, sizeof *out);
    int failed = getaddrinfo(host, service, &hints, &found);
    if (failed != 0) {
        out->why = gai_strerror(failed);
        return;
    }
    for (const struct addrinfo *at = found; at != NULL && out->count < DP__OS_ADDRESSES;
         at = at->ai_next)
        out->list[out->count++] = dp__os_address_of(at->ai_addr, at->ai_addrlen);
    freeaddrinfo(found);
}

typedef struct dp__os_question { /* its thread's own */
    dp__os_looker *look_up;
    int fd, port;
    size_t bytes;
    char host[];
} dp__os_question;

/* Nobody may be waiting for the answer any more. */
static void *dp__os_answer(void *user)
{
    dp__os_question *question = user;
    dp__os_found found;
    question->look_up(question->host, question->port, false, &found);
    (void)dp__os_send(question->fd, &found, sizeof found);
    dp__os_close(question->fd);
    dp__os_free(question, question->bytes, NULL);
    return NULL;
}

/* Makes two descriptors, connected with each other; false: there are none. */
static bool dp__os_pair(int ends[2])
{
    if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends) != 0)
        return false;
    for (int i = 0; i < 2; i++) {
        ends[i] = dp__os_marked(ends[i]);
        if (ends[i] >= 0)
            dp__os_prepare(ends[i], AF_UNIX);
    }
    if (ends[0] >= 0 && ends[1] >= 0)
        return true;
    dp__os_close(ends[0]);
    dp__os_close(ends[1]);
    return false;
}

/* -1: there is no thread, or no descriptor, for it; else where the answer will come. */
static int dp__os_ask(dp__os_looker *look_up, const char *host, int port)
{
    int ends[2];
    dp__thread thread;
    size_t bytes = sizeof(dp__os_question) + strlen(host) + 1;
    dp__os_question *question = dp__os_alloc(bytes, _Alignof(dp__os_question), NULL);
    if (question == NULL || !dp__os_pair(ends)) {
        dp__os_free(question, bytes, NULL);
        return -1;
    }
    question->look_up = look_up;
    question->fd = ends[1];
    question->port = port;
    question->bytes = bytes;
    memcpy(question->host, host, strlen(host) + 1);
    if (dp__thread_start(&thread, dp__os_answer, question) == 0) {
        dp__thread_detach(thread);
        return ends[0];
    }
    dp__os_close(ends[0]);
    dp__os_close(ends[1]);
    dp__os_free(question, bytes, NULL);
    return -1;
}

/* A number needs no thread. One that takes too long is left behind. */
static void dp__os_resolve(dp__os_looker *look_up, const char *host, int port, int timeout_ms,
                           dp__os_found *out)
{
    dp__os_look_up(host, port, true, out);
    int fd = out->count == 0 ? dp__os_ask(look_up, host, port) : -1;
    if (fd < 0 && out->count == 0)
        look_up(host, port, 0, out);
    if (fd < 0)
        return;
    (void)dp__os_ready(fd, DP__CAN_READ, timeout_ms);
    if (dp__os_receive(fd, out, sizeof *out) != (ptrdiff_t)sizeof *out)
        *out = (dp__os_found){.why = "the name service does not answer"};
    dp__os_close(fd);
}

/* The port lies in the same place in both families. */
static dp__os_address dp__os_at_port(const dp__os_address *at, int port)
{
    dp__os_address other = *at;
    struct sockaddr_in6 six;
    memcpy(&six, other.at, sizeof six);
    six.sin6_port = htons((uint16_t)port);
    memcpy(other.at, &six, sizeof six);
    return other;
}

static void dp__os_host_of(int fd, bool own, char *text, size_t room)
{
    struct sockaddr_storage at;
    socklen_t bytes = sizeof at;
    int none = own ? getsockname(fd, (struct sockaddr *)&at, &bytes)
                   : getpeername(fd, (struct sockaddr *)&at, &bytes);
    if (none != 0 || at.ss_family == AF_UNIX ||
        getnameinfo((struct sockaddr *)&at, bytes, text, (socklen_t)room, NULL, 0,
                    NI_NUMERICHOST) != 0)
        text[0] = '\0';
    if (strncmp(text, "::ffff:", 7) == 0) /* IPv4 dressed up as IPv6 */
        memmove(text, text + 7, strlen(text + 7) + 1);
    if (strncmp(text, "127.", 4) == 0 || strcmp(text, "::1") == 0)
        text[0] = '\0';
}

/* ==== >>interfaces =============================================================================
   The networks of this machine.                                                                 */

/* false: it is not in use, or has no address that means something elsewhere. */
static bool dp__os_interface_of(const struct ifaddrs *at, dp__os_interface *out)
{
    int family = at->ifa_addr != NULL ? at->ifa_addr->sa_family : AF_UNSPEC;
    socklen_t bytes = family == AF_INET    ? sizeof(struct sockaddr_in)
                      : family == AF_INET6 ? sizeof(struct sockaddr_in6)
                                           : 0;
    snprintf(out->name, sizeof out->name, "%s", at->ifa_name);
    return bytes > 0 && (at->ifa_flags & IFF_UP) != 0 &&
           getnameinfo(at->ifa_addr, bytes, out->address, sizeof out->address, NULL, 0,
                       NI_NUMERICHOST) == 0 &&
           strchr(out->address, '%') == NULL;
}

static bool dp__os_interface_find(const char *wanted, dp__os_interface *out, char *others,
                                  size_t room)
{
    struct ifaddrs *all = NULL;
    dp__os_interface one;
    int best = 0;
    size_t used = 0;
    others[0] = '\0';
    if (getifaddrs(&all) != 0)
        return false;
    for (const struct ifaddrs *at = all; at != NULL; at = at->ifa_next) {
        bool loops = wanted == NULL && (at->ifa_flags & IFF_LOOPBACK) != 0;
        if (loops || !dp__os_interface_of(at, &one))
            continue;
        int fits = dp__os_interface_fits(&one, wanted != NULL ? wanted : "");
        if (fits > best)
            *out = one;
        best = fits > best ? fits : best;
        if (used < room)
            used += (size_t)snprintf(others + used, room - used, "%s%s (%s)", used > 0 ? ", " : "",
                                     one.name, one.address);
    }
    freeifaddrs(all);
    return best > 0;
}

/* Nothing is sent: the system only looks which way it would go. */
static void dp__os_host_usual(char *text, size_t room)
{
    struct sockaddr_in far = {.sin_family = AF_INET, .sin_port = htons(9)};
    dp__os_interface any;
    char others[200];
    int fd = dp__os_marked(socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0));
    far.sin_addr.s_addr = htonl(0xc0000201); /* 192.0.2.1, which nobody has */
    text[0] = '\0';
    if (fd >= 0 && connect(fd, (const struct sockaddr *)&far, sizeof far) == 0)
        dp__os_host_of(fd, true, text, room);
    dp__os_close(fd);
    if (text[0] == '\0' && dp__os_interface_find(NULL, &any, others, sizeof others))
        snprintf(text, room, "%s", any.address);
}

/* ==== >>children ===============================================================================
   Who this process is among others, and children: started, ended and waited for.               */

#if defined(__linux__)
static uint64_t dp__os_affinity(void)
{
    cpu_set_t mask;
    return sched_getaffinity(0, sizeof mask, &mask) == 0 ? dp__hash(1, &mask, sizeof mask) : 0;
}
#else
static uint64_t dp__os_affinity(void)
{
    return 0;
}
#endif

/* Differs for each boot of each machine, and for each container on it. */
#if defined(__linux__)
static void dp__os_whereabouts(char *text, size_t room)
{
    dp__quota_read("/proc/sys/kernel/random", "boot_id", text, room / 2);
    size_t used = strlen(text);
    ssize_t bytes = readlink("/proc/self/ns/pid", text + used, room - used - 1);
    text[used + (bytes > 0 ? (size_t)bytes : 0)] = '\0';
}
#else
static void dp__os_whereabouts(char *text, size_t room)
{
    if (gethostname(text, room) != 0)
        text[0] = '\0';
    text[room - 1] = '\0';
}
#endif

#if defined(__linux__)
DP__MAYBE_UNUSED static uint64_t dp__os_resident_bytes(int process)
{
    char folder[32], text[128];
    unsigned long long pages;
    snprintf(folder, sizeof folder, "/proc/%d", process);
    bool told = dp__quota_read(folder, "statm", text, sizeof text) &&
                sscanf(text, "%*u %llu", &pages) == 1;
    return told ? (uint64_t)pages * (uint64_t)sysconf(_SC_PAGESIZE) : 0;
}
#else
DP__MAYBE_UNUSED static uint64_t dp__os_resident_bytes(int process)
{
    (void)process;
    return 0;
}
#endif

static void dp__os_host_name(char *text, size_t room)
{
    if (gethostname(text, room) != 0)
        text[0] = '\0';
    text[room - 1] = '\0';
}

static uint64_t dp__os_machine(void)
{
    const char *other = dp__os_env("DP_MACHINE");
    char text[256] = "";
    dp__os_whereabouts(text, sizeof text);
    uint64_t hash = dp__hash(dp__hash_first, text, strlen(text));
    return other != NULL ? dp__hash(hash, other, strlen(other)) : hash;
}

static bool dp__os_secret(void *out, size_t bytes)
{
    if (getentropy(out, bytes) == 0)
        return true;
    FILE *file = fopen("/dev/urandom", "re"); /* e: closed by exec */
    bool got = file != NULL && fread(out, bytes, 1, file) == 1;
    if (file != NULL)
        fclose(file);
    return got;
}

static uint64_t dp__os_random(void)
{
    static atomic_uint count;
    uint64_t number = 0;
    if (!dp__os_secret(&number, sizeof number))
        number = (dp__os_now_ns() + atomic_fetch_add(&count, 1)) * 0x9e3779b97f4a7c15u ^
                 (uint64_t)getpid();
    return number;
}

static uint64_t dp__os_parent(void)
{
    return (uint64_t)getppid();
}

static void dp__os_env_set(const char *name, const char *text)
{
    setenv(name, text, 1);
}

static void dp__os_env_drop(const char *name)
{
    unsetenv(name);
}

/* A pipe to each child would take a file of each, of which there may be few. */
static void *dp__os_common_alloc(size_t bytes)
{
    void *data = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    return data != MAP_FAILED ? data : NULL;
}

static void dp__os_common_free(void *data, size_t bytes)
{
    munmap(data, bytes);
}

/* While there are children, SIGINT and SIGTERM are noted here, and those children are kept until
   this process has heard how they ended. */
static volatile sig_atomic_t dp__os_signal;
static struct sigaction dp__os_signal_before[2], dp__os_children_before;
static const int dp__os_signals[2] = {SIGINT, SIGTERM};

static void dp__os_on_signal(int number)
{
    dp__os_signal = number;
}

/* Who ignores SIGCHLD, perhaps because what has started it did, never hears how a child ended. A
   handler of the program stays: it may wait for other children. */
static void dp__os_children_keep(void)
{
    sigaction(SIGCHLD, NULL, &dp__os_children_before);
    struct sigaction keeps = dp__os_children_before;
    if (keeps.sa_handler == SIG_IGN)
        keeps.sa_handler = SIG_DFL;
    keeps.sa_flags &= ~SA_NOCLDWAIT;
    sigaction(SIGCHLD, &keeps, NULL);
}

/* Those that the program ignores stay ignored. */
static void dp__os_signals_take(void)
{
    struct sigaction ours = {.sa_handler = dp__os_on_signal};
    sigemptyset(&ours.sa_mask);
    dp__os_signal = 0;
    for (int i = 0; i < 2; i++) {
        sigaction(dp__os_signals[i], NULL, &dp__os_signal_before[i]);
        if (dp__os_signal_before[i].sa_handler != SIG_IGN)
            sigaction(dp__os_signals[i], &ours, NULL);
    }
    dp__os_children_keep();
}

static void dp__os_signals_give_back(void)
{
    for (int i = 0; i < 2; i++)
        sigaction(dp__os_signals[i], &dp__os_signal_before[i], NULL);
    sigaction(SIGCHLD, &dp__os_children_before, NULL);
    bool kept = dp__os_children_before.sa_handler != SIG_IGN &&
                (dp__os_children_before.sa_flags & SA_NOCLDWAIT) == 0;
    while (!kept && waitpid(-1, NULL, WNOHANG) > 0) { /* the program's own that have ended since */
    }
}

static int dp__os_asked_to_end(void)
{
    return (int)dp__os_signal;
}

/* A signal that came meanwhile goes to the program's handler, or ends this process. */
static void dp__os_signal_again(void)
{
    if (dp__os_signal != 0)
        raise((int)dp__os_signal);
}

/* ---- where threads are ----------------------------------------------------------------------- */

#if defined(__linux__) && defined(__GLIBC__)
enum { DP__STACK_DEPTH = 64 };

static void dp__os_on_stack(int number)
{
    void *stack[DP__STACK_DEPTH];
    char head[64] = "a thread that is waited for is here:\n";
    int before = errno, count = backtrace(stack, DP__STACK_DEPTH);
    (void)number;
    (void)!write(STDERR_FILENO, head, strlen(head));
    backtrace_symbols_fd(stack, count, STDERR_FILENO);
    errno = before;
}

static bool dp__os_stack_open(void)
{
    struct sigaction ours = {.sa_handler = dp__os_on_stack, .sa_flags = SA_RESTART}, before;
    void *one[1];
    sigemptyset(&ours.sa_mask);
    (void)backtrace(one, 1); /* loads what a handler may not load */
    if (sigaction(SIGURG, NULL, &before) != 0)
        return false;
    bool known = before.sa_handler == dp__os_on_stack;
    bool unused = before.sa_handler == SIG_DFL || before.sa_handler == SIG_IGN;
    if (!known && (!unused || sigaction(SIGURG, &ours, NULL) != 0))
        return false;
    atomic_store(&dp__os_stack_is_open, true);
    return true;
}

static void dp__os_stack_ask(int process, int thread)
{
    if (atomic_load(&dp__os_stack_is_open))
        (void)syscall(SYS_tgkill, process, thread, SIGURG);
}
#else
static bool dp__os_stack_open(void)
{
    return false;
}

static void dp__os_stack_ask(int process, int thread)
{
    (void)process, (void)thread;
}
#endif

/* Signals that ask for a stop, once each: then what the program had before is back. */
static atomic_int dp__os_stop; /* the last of them */
static struct sigaction dp__os_stop_before[NSIG];

static void dp__os_on_stop(int number)
{
    atomic_store_explicit(&dp__os_stop, number, memory_order_relaxed);
    sigaction(number, &dp__os_stop_before[number], NULL);
}

/* Twice is once. */
DP__MAYBE_UNUSED static bool dp__os_stop_on(int number)
{
    struct sigaction ours = {.sa_handler = dp__os_on_stop, .sa_flags = SA_RESTART}, before;
    sigemptyset(&ours.sa_mask);
    if (number <= 0 || number >= NSIG || sigaction(number, NULL, &before) != 0)
        return false;
    if (before.sa_handler == dp__os_on_stop)
        return true;
    dp__os_stop_before[number] = before;
    return sigaction(number, &ours, NULL) == 0;
}

DP__MAYBE_UNUSED static int dp__os_asked_to_stop(void)
{
    return atomic_load(&dp__os_stop);
}

#if defined(__linux__)
static void dp__os_die_with(pid_t parent)
{
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (getppid() != parent) /* it died before that */
        _exit(EXIT_FAILURE);
}
#else
static void *dp__os_watch_parent(void *user)
{
    pid_t parent = (pid_t)(intptr_t)user;
    while (getppid() == parent)
        dp__os_sleep_ms(200);
    _exit(EXIT_FAILURE);
}

static void dp__os_die_with(pid_t parent)
{
    pthread_t thread;
    if (pthread_create(&thread, NULL, dp__os_watch_parent, (void *)(intptr_t)parent) == 0)
        pthread_detach(thread);
}
#endif

#if defined(__linux__)
/* Of OpenMP's runtime, where the program has one. */
extern int dp__omp_pause(int kind) __asm__("omp_pause_resource_all") __attribute__((weak));
extern int dp__omp_level(void) __asm__("omp_get_level") __attribute__((weak));

static int dp__os_is_gomp(struct dl_phdr_info *library, size_t bytes, void *user)
{
    (void)bytes, (void)user;
    return strstr(library->dlpi_name, "libgomp") != NULL;
}

static bool dp__os_has_threads(void)
{
    struct stat tasks; /* ".", ".." and one for each thread */
    return stat("/proc/self/task", &tasks) == 0 && tasks.st_nlink > 3;
}

/* gcc's OpenMP keeps its threads, and does not notice that a fork leaves them behind. They are let
   go here; it makes new ones when it needs them. clang's OpenMP and OpenBLAS survive a fork. */
static const char *dp__os_let_threads_go(void)
{
    if (dp__omp_level != NULL && dp__omp_level() > 0)
        return "called inside a parallel region of OpenMP, whose threads would not be in the new "
               "processes";
    if (dp__omp_pause != NULL)
        (void)dp__omp_pause(1); /* omp_pause_soft */
    else if (dp__os_has_threads() && dl_iterate_phdr(dp__os_is_gomp, NULL) != 0)
        return "gcc's OpenMP (libgomp) is here and may have threads, which it cannot be asked to "
               "let go: it is older than gcc 9, or dlopen brought it. Call dp_spawn before it is "
               "used";
    return NULL;
}
#else
static const char *dp__os_let_threads_go(void)
{
    return NULL;
}
#endif

/* A signal meanwhile reaches the child's own handlers. */
static int dp__os_fork(dp__os_child *child)
{
    sigset_t all, before;
    pid_t parent = getpid();
    fflush(NULL); /* else both would write what is in a buffer */
    sigfillset(&all);
    pthread_sigmask(SIG_BLOCK, &all, &before);
    child->pid = fork();
    if (child->pid == 0)
        dp__os_signals_give_back();
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (child->pid == 0)
        dp__os_die_with(parent);
    if (child->pid < 0) {
        child->pid = 0;
        return -1;
    }
    return child->pid != 0;
}

static _Noreturn void dp__os_leave(bool good)
{
    fflush(NULL);
    _exit(good ? EXIT_SUCCESS : EXIT_FAILURE);
}

static _Noreturn void dp__os_quit(int code)
{
    _exit(code);
}

static bool dp__os_ended(dp__os_child *child)
{
    int status = 0;
    pid_t ended = waitpid(child->pid, &status, WNOHANG);
    if (ended == 0)
        return false;
    child->pid = 0;
    child->unknown = ended < 0;
    child->by_signal = ended > 0 && WIFSIGNALED(status) ? WTERMSIG(status) : 0;
    child->code = ended > 0 && WIFEXITED(status) ? WEXITSTATUS(status) : 0;
    return true;
}

static void dp__os_end(const dp__os_child *child, bool at_once)
{
    if (child->pid > 0)
        kill(child->pid, at_once ? SIGKILL : SIGTERM);
}

/* ==== >>mapped =================================================================================
   What processes share is a file in memory; places are locks on it, which the kernel releases when
   a process ends, however it ends.

   The memory has no name where that is possible (Linux: a memfd, which the others open through the
   process that made it), so that nothing is left behind, whichever process dies, and the size of
   /dev/shm does not matter. Else it has a name until the others have opened it. */

static int dp__os_process_id(void)
{
    return (int)getpid();
}

static bool dp__shared_resize(int fd, size_t bytes)
{
    dp__os_calm calm;
    dp__os_calm_begin(&calm);
    bool done = ftruncate(fd, (off_t)bytes) == 0;
    dp__os_calm_end(&calm);
    return done;
}

#if defined(__linux__)
static int dp__shared_anonymous(void)
{
    return dp__os_above_stderr(memfd_create("dp", MFD_CLOEXEC));
}

static int dp__shared_open(const char *path, int flags)
{
    char whole[64];
    snprintf(whole, sizeof whole, "/dev/shm%s", path);
    return dp__os_open(whole, flags | O_NOFOLLOW, 0600);
}

static void dp__os_shared_unlink(const char *path)
{
    char whole[64];
    snprintf(whole, sizeof whole, "/dev/shm%s", path);
    unlink(whole);
}

static int dp__shared_of_process(const dp__shared_name *name)
{
    char path[64];
    snprintf(path, sizeof path, "/proc/%d/fd/%d", (int)name->process_id, (int)name->fd);
    return dp__os_open(path, O_RDWR | O_NONBLOCK, 0);
}

/* A write to a page that cannot be allocated would raise SIGBUS. Pages come from the memory near
   the core that asks. */
static int dp__shared_pages(int fd, size_t first, size_t bytes)
{
    int failed;
    do
        failed = posix_fallocate(fd, (off_t)first, (off_t)bytes);
    while (failed == EINTR);
    return failed;
}

/* Gives the pages of a mapping back, for all that have it. */
static void dp__shared_pages_end(void *at, size_t bytes)
{
    (void)madvise(at, bytes, MADV_REMOVE);
}

static void dp__os_shared_dump(const dp__shared *shared, size_t first, size_t bytes, bool dump)
{
    size_t ahead = first % (size_t)sysconf(_SC_PAGESIZE);
    (void)madvise((char *)shared->data + first - ahead, bytes + ahead,
                  dump ? MADV_DODUMP : MADV_DONTDUMP);
}

enum { DP__FUTEX_WAIT = 0, DP__FUTEX_WAKE = 1 }; /* musl comes without <linux/futex.h> */

static void dp__os_word_wait(atomic_uint *word, unsigned seen, uint64_t ns)
{
    struct timespec most = {(time_t)(ns / 1000000000u), (long)(ns % 1000000000u)};
    syscall(SYS_futex, word, DP__FUTEX_WAIT, seen, &most, NULL, 0);
}

static void dp__os_word_wake(atomic_uint *word)
{
    syscall(SYS_futex, word, DP__FUTEX_WAKE, INT_MAX, NULL, NULL, 0);
}
#else
static int dp__shared_anonymous(void)
{
    errno = ENOSYS;
    return -1;
}

static int dp__shared_open(const char *path, int flags)
{
    return dp__os_above_stderr(shm_open(path, flags, 0600));
}

static void dp__os_shared_unlink(const char *path)
{
    shm_unlink(path);
}

static int dp__shared_of_process(const dp__shared_name *name)
{
    (void)name;
    errno = ENOSYS;
    return -1;
}

static int dp__shared_pages(int fd, size_t first, size_t bytes)
{
    (void)fd, (void)first, (void)bytes;
    return 0;
}

static void dp__shared_pages_end(void *at, size_t bytes)
{
    (void)at, (void)bytes;
}

static void dp__os_shared_dump(const dp__shared *shared, size_t first, size_t bytes, bool dump)
{
    (void)shared, (void)first, (void)bytes, (void)dump;
}

static void dp__os_word_wait(atomic_uint *word, unsigned seen, uint64_t ns)
{
    struct timespec rest = {.tv_nsec = ns < 100000 ? (long)ns : 100000};
    if (atomic_load(word) == seen)
        nanosleep(&rest, NULL);
}

static void dp__os_word_wake(atomic_uint *word)
{
    (void)word;
}
#endif

static void dp__os_shared_close(dp__shared *shared)
{
    if (shared->data != NULL)
        munmap(shared->data, shared->bytes);
    dp__os_close(shared->fd);
    *shared = (dp__shared){.fd = -1};
}

/* Puts memory of this process alone in the place of a part that is shared, with the same bytes. */
static bool dp__shared_part_own(const dp__shared *shared, size_t first, size_t bytes, void *aside)
{
    char *at = (char *)shared->data + first;
    memcpy(aside, at, bytes);
    dp__shared_pages_end(at, bytes); /* or the machine would have it twice */
    bool own = mmap(at, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1,
                    0) != MAP_FAILED;
    if (!own) /* it may be unmapped by now */
        (void)mmap(at, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, shared->fd,
                   (off_t)first);
    memcpy(at, aside, bytes);
    return own;
}

static void dp__shared_own(const dp__shared *shared, size_t first, size_t bytes)
{
    enum { PART = 4 << 20 };
    size_t most = bytes < PART ? bytes : PART;
    void *aside = most > 0
                      ? mmap(NULL, most, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0)
                      : MAP_FAILED;
    bool own = aside != MAP_FAILED;
    for (size_t done = 0; done < bytes && own; done += most) {
        most = bytes - done < most ? bytes - done : most;
        own = dp__shared_part_own(shared, first + done, most, aside);
    }
    if (aside != MAP_FAILED)
        munmap(aside, bytes < PART ? bytes : PART);
}

static void dp__os_shared_trim(dp__shared *shared, size_t first, size_t bytes)
{
    char *data = shared->data;
    dp__shared_own(shared, first, bytes);
    if (first > 0)
        munmap(data, first);
    if (first + bytes < shared->bytes)
        munmap(data + first + bytes, shared->bytes - first - bytes);
    dp__os_close(shared->fd);
    *shared = (dp__shared){data + first, bytes, -1};
}

static dp_status dp__shared_map(dp__shared *shared, size_t bytes)
{
    void *data = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, shared->fd, 0);
    if (data == MAP_FAILED)
        return dp_error(DP_ERR_NO_MEMORY, "shared memory: %zu bytes cannot be mapped: %s", bytes,
                        strerror(errno));
    shared->data = data;
    shared->bytes = bytes;
    return DP_OK;
}

static dp_status dp__os_shared_reserve(const dp__shared *shared, size_t first, size_t bytes)
{
    struct statvfs room;
    int failed = bytes > 0 ? dp__shared_pages(shared->fd, first, bytes) : 0;
    if (failed == 0)
        return DP_OK;
    if (fstatvfs(shared->fd, &room) != 0 || room.f_blocks == 0)
        return dp_error(DP_ERR_NO_MEMORY, "shared memory: no room for %zu KiB: %s", bytes >> 10,
                        strerror(failed));
    return dp_error(DP_ERR_NO_MEMORY,
                    "shared memory: /dev/shm has %llu KiB, of which %llu are free; all processes "
                    "together need %zu, and this one asked for %zu: %s",
                    (unsigned long long)room.f_blocks * room.f_frsize >> 10,
                    (unsigned long long)room.f_bavail * room.f_frsize >> 10, shared->bytes >> 10,
                    bytes >> 10, strerror(failed));
}

/* ---- pages ----------------------------------------------------------------------------------- */

#if defined(__linux__)
enum { DP__PAGES_CHANGE = 1 };

static void *dp__os_pages_make(size_t bytes)
{
    void *data = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    return data != MAP_FAILED ? data : NULL;
}

static void dp__os_pages_free(void *data, size_t bytes)
{
    munmap(data, bytes);
}

static dp_status dp__os_pages_share(void *data, size_t bytes, const dp__shared *shared,
                                    size_t first)
{
    void *at =
        mmap(data, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, shared->fd, (off_t)first);
    if (at == data)
        return DP_OK;
    return dp_error(DP_ERR_NO_MEMORY, "shared memory: %zu bytes cannot be mapped: %s", bytes,
                    strerror(errno));
}

static bool dp__os_pages_replace(void *data, void *other, size_t bytes)
{
    return mremap(other, bytes, bytes, MREMAP_MAYMOVE | MREMAP_FIXED, data) == data;
}
#else
enum { DP__PAGES_CHANGE = 0 };

static void *dp__os_pages_make(size_t bytes)
{
    void *data = dp__os_alloc(bytes, DP__SHARED_PAGE, NULL);
    return data != NULL ? memset(data, 0, bytes) : NULL;
}

static void dp__os_pages_free(void *data, size_t bytes)
{
    dp__os_free(data, bytes, NULL);
}

static dp_status dp__os_pages_share(void *data, size_t bytes, const dp__shared *shared,
                                    size_t first)
{
    (void)data, (void)bytes, (void)shared, (void)first;
    return dp_error(DP_ERR_UNSUPPORTED, "pages cannot be exchanged on this system");
}

static bool dp__os_pages_replace(void *data, void *other, size_t bytes)
{
    (void)data, (void)other, (void)bytes;
    return false;
}
#endif

/* ---- made and found -------------------------------------------------------------------------- */

/* A name that nobody else has: O_EXCL would find out. */
static int dp__shared_named(char *path, size_t room)
{
    int fd = -1;
    for (int i = 0; i < 100 && fd < 0 && (i == 0 || errno == EEXIST); i++) {
        unsigned long long mix = dp__os_now_ns() * 0x9e3779b97f4a7c15u ^ (unsigned)getpid();
        snprintf(path, room, "/dp-%llx", mix);
        fd = dp__shared_open(path, O_RDWR | O_CREAT | O_EXCL);
    }
    if (fd < 0)
        path[0] = '\0';
    return fd;
}

static dp_status dp__os_shared_make(bool named, size_t bytes, dp__shared *out,
                                    dp__shared_name *out_name)
{
    struct stat file;
    dp__shared_name name = {.process_id = (int32_t)getpid()};
    out->fd = named ? dp__shared_named(name.path, sizeof name.path) : dp__shared_anonymous();
    name.fd = out->fd;
    *out_name = name;
    if (out->fd < 0)
        return dp_error(DP_ERR_NO_MEMORY, "shared memory: none can be made%s: %s",
                        named ? " in /dev/shm" : "", strerror(errno));
    if (!dp__shared_resize(out->fd, bytes) || fstat(out->fd, &file) != 0)
        return dp_error(DP_ERR_NO_MEMORY, "shared memory: no room for %zu bytes: %s", bytes,
                        strerror(errno));
    out_name->device = (uint64_t)file.st_dev;
    out_name->inode = (uint64_t)file.st_ino;
    return dp__shared_map(out, bytes);
}

static dp_status dp__os_shared_find(const dp__shared_name *name, size_t bytes, dp__shared *out)
{
    struct stat file;
    bool named = name->path[0] != '\0';
    out->fd = named ? dp__shared_open(name->path, O_RDWR) : dp__shared_of_process(name);
    if (out->fd < 0 || fstat(out->fd, &file) != 0)
        return dp_error(DP_ERR_NO_MEMORY, "shared memory of process id %d cannot be opened: %s",
                        (int)name->process_id, strerror(errno));
    if ((uint64_t)file.st_dev != name->device || (uint64_t)file.st_ino != name->inode ||
        (size_t)file.st_size != bytes)
        return dp_error(DP_ERR_NO_MEMORY,
                        "shared memory of process id %d: another file is in its place",
                        (int)name->process_id);
    return dp__shared_map(out, bytes);
}

static dp_status dp__os_shared_hold(const dp__shared *shared, int place)
{
    struct flock lock = {
        .l_type = F_WRLCK, .l_whence = SEEK_SET, .l_start = (off_t)place, .l_len = 1};
    if (fcntl(shared->fd, F_SETLK, &lock) != 0)
        return dp_error(DP_ERR_NO_MEMORY, "shared memory: its file cannot be locked: %s",
                        strerror(errno));
    return DP_OK;
}

static bool dp__os_shared_held(const dp__shared *shared, int place)
{
    struct flock lock = {
        .l_type = F_WRLCK, .l_whence = SEEK_SET, .l_start = (off_t)place, .l_len = 1};
    return fcntl(shared->fd, F_GETLK, &lock) != 0 || lock.l_type != F_UNLCK;
}

#if !defined(F_OFD_SETLK)
#define F_OFD_SETLK F_SETLK /* systems without memory that has no name, which alone has owners */
#endif

/* A lock of the process would make two of its contexts one, and it would lose all its places by
   closing one of them. */
static bool dp__os_shared_own(const dp__shared *shared, int place)
{
    struct flock lock = {
        .l_type = F_WRLCK, .l_whence = SEEK_SET, .l_start = (off_t)place, .l_len = 1};
    return fcntl(shared->fd, F_OFD_SETLK, &lock) == 0;
}

#endif /* DP__ROOMS */

/* The licence is at the end of dp.h. */
