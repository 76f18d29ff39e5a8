/* refusal.c - see refusal.h. What is here stands before the system's own, in the whole program. */

#define _GNU_SOURCE
#include "refusal.h"
#include <errno.h>
#include <fcntl.h>
#include <stdbool.h>
#include <stdio.h>
#include <string.h>
#include <sys/file.h>
#include <sys/syscall.h>
#include <unistd.h>

struct refusal refusal;

static bool refuses(const char *call)
{
    bool now = refusal.call != NULL && strcmp(refusal.call, call) == 0 && --refusal.at == 0;
    if (now && refusal.hook != NULL) {
        refusal.hook();
        return false;
    }
    errno = now ? refusal.error : errno;
    return now;
}

int fsync(int fd)
{
    return refuses("fsync") ? -1 : (int)syscall(SYS_fsync, fd);
}

int ftruncate(int fd, off_t bytes)
{
    return refuses("ftruncate") ? -1 : (int)syscall(SYS_ftruncate, fd, bytes);
}

int flock(int fd, int how)
{
    return refuses("flock") ? -1 : (int)syscall(SYS_flock, fd, how);
}

int rename(const char *from, const char *to)
{
    if (refuses("rename"))
        return -1;
    return (int)syscall(SYS_renameat2, AT_FDCWD, from, AT_FDCWD, to, 0);
}

int unlink(const char *path)
{
    return refuses("unlink") ? -1 : (int)syscall(SYS_unlinkat, AT_FDCWD, path, 0);
}
