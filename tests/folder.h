/* folder.h - a folder of its own for a test that writes files, in which it is, and whole files. */

#ifndef FOLDER_H
#define FOLDER_H

#include <stdio.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <unistd.h>
#include "test.h"

static char own_folder[300];
static pid_t folder_of;

static inline void leave_folder(void)
{
    char command[320];
    if (getpid() != folder_of)
        return;
    snprintf(command, sizeof command, "rm -rf %s", own_folder);
    if (system(command) != 0)
        abort();
}

/* In memory, where there is such a place: a disk is waited for with each file. */
static inline void enter_folder(void)
{
    const char *top = access("/dev/shm", W_OK) == 0 ? "/dev/shm" : P_tmpdir;
    snprintf(own_folder, sizeof own_folder, "%s/test-dp-XXXXXX", top);
    CHECK(mkdtemp(own_folder) != NULL);
    CHECK_INT(chdir(own_folder), 0);
    folder_of = getpid();
    CHECK_INT(atexit(leave_folder), 0);
}

static inline void put_file(const char *name, const void *bytes, size_t count)
{
    FILE *file = fopen(name, "wb");
    CHECK(file != NULL);
    CHECK_INT(fwrite(bytes, 1, count, file), count);
    CHECK_INT(fclose(file), 0);
}

/* A whole file, in memory that is the test's. */
static inline char *get_file(const char *name, size_t *out_count)
{
    struct stat there;
    FILE *file = fopen(name, "rb");
    CHECK(file != NULL);
    CHECK_INT(fstat(fileno(file), &there), 0);
    *out_count = (size_t)there.st_size;
    char *bytes = test_room(*out_count);
    CHECK_INT(fread(bytes, 1, *out_count, file), *out_count);
    CHECK_INT(fclose(file), 0);
    return bytes;
}

static inline void check_same_files(const char *a, const char *b)
{
    size_t count = 0, other = 0;
    const char *bytes = get_file(a, &count);
    CHECK_BYTES(get_file(b, &other), bytes, count);
    CHECK_INT(other, count);
}

#endif /* FOLDER_H */
