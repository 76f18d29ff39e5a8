/* process.h - of the process that a test is in: what it has open, its cores, and time. */

#ifndef PROCESS_H
#define PROCESS_H

#include <dirent.h>
#include <signal.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>
#include "test.h"

/* How many names in a folder begin so, but for "." and "..". */
static inline int count_names(const char *folder, const char *begin)
{
    int count = 0;
    DIR *directory = opendir(folder);
    CHECK(directory != NULL);
    for (const struct dirent *entry; (entry = readdir(directory)) != NULL;)
        count += entry->d_name[0] != '.' && strncmp(entry->d_name, begin, strlen(begin)) == 0;
    closedir(directory);
    return count;
}

static inline int open_files(void)
{
    return count_names("/proc/self/fd", "");
}

static inline int count_threads(void)
{
    return count_names("/proc/self/task", "");
}

static inline void rest(int ms)
{
    nanosleep(&(struct timespec){.tv_sec = ms / 1000, .tv_nsec = ms % 1000 * 1000000}, NULL);
}

/* Runs `body` in a process until there is such a file, and up to `most_ns` longer; kills it. */
static inline void kill_beside(void (*body)(void), const char *file, uint64_t *state,
                               unsigned most_ns)
{
    int status = 0;
    pid_t child = fork();
    CHECK(child >= 0);
    if (child == 0)
        body();
    while (access(file, F_OK) != 0)
        rest(1);
    nanosleep(&(struct timespec){.tv_nsec = (long)(test_random(state) % most_ns)}, NULL);
    CHECK_INT(kill(child, SIGKILL), 0);
    CHECK_INT(waitpid(child, &status, 0), child);
    CHECK(WIFSIGNALED(status));
}

static inline double now_ms(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec * 1e3 + (double)now.tv_nsec * 1e-6;
}

#if defined(_GNU_SOURCE)
#include <sched.h>

static inline void use_one_core(void)
{
    cpu_set_t cores, one;
    CHECK_INT(sched_getaffinity(0, sizeof cores, &cores), 0);
    CPU_ZERO(&one);
    for (size_t i = 0; CPU_COUNT(&one) == 0; i++)
        if (CPU_ISSET(i, &cores))
            CPU_SET(i, &one);
    CHECK_INT(sched_setaffinity(0, sizeof one, &one), 0);
}

#endif

/* No more files may be opened, until what this returns is closed: then one. */
static inline int spend_all_files(void)
{
    int last = dup(STDIN_FILENO);
    const struct rlimit limit = {.rlim_cur = (rlim_t)last + 1, .rlim_max = (rlim_t)last + 1};
    CHECK(last >= 0);
    CHECK_INT(setrlimit(RLIMIT_NOFILE, &limit), 0);
    return last;
}

#endif /* PROCESS_H */
