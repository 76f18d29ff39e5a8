/* disk.c - memory between processes, words to wait for, and files. See sim.h.

   What processes share is mapped for each of them by the real system, at an address of its own: a
   use after the end is a fault. A word is known by its place in what it is in.                  */

#define _GNU_SOURCE
#include "inside.h"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

enum { OBJECTS = 1024, MAPS = 512, HOLDS = 512, FILES = 64 };

typedef struct object {
    bool used;
    int real; /* descriptor of the real system */
    int machine;
    size_t bytes;
} object;

typedef struct map {
    char *data;
    size_t bytes, first; /* of the object */
    int object;
} map;

typedef struct hold {
    int object, place;
    int process, fd; /* process -1: none; fd -1: until the process ends, or closes one */
} hold;

typedef struct file {
    char *path; /* NULL: removed, and perhaps still open */
    char *data;
    size_t bytes;
    uint64_t version;
    int opened;
    int locker, lock_fd; /* process -1: nobody */
} file;

static object objects[OBJECTS];
static int object_count, map_count, hold_count, file_count;
static map maps[MAPS];
static hold holds[HOLDS];
static file files[FILES];
static uint64_t versions;

/* ---- memory ---------------------------------------------------------------------------------- */

static void *map_object(int number, size_t bytes)
{
    void *data = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, objects[number].real, 0);
    if (data == MAP_FAILED || map_count == MAPS)
        sim_fail("no room for a map");
    maps[map_count++] = (map){data, bytes, 0, number};
    return data;
}

int sim_shared_make(size_t bytes, void **out, uint64_t *out_object)
{
    sim_point("makes memory");
    if (!sim_take())
        return -1;
    sim_give();
    if (object_count == OBJECTS)
        sim_fail("too much shared memory");
    int number = object_count, fd = sim_descriptor(sim_process(), SIM_FD_SHARED, number);
    if (fd < 0)
        return -1;
    object_count++;
    objects[number] = (object){true, memfd_create("sim", 0), sim_machine(), bytes};
    if (objects[number].real < 0 || ftruncate(objects[number].real, (off_t)bytes) != 0)
        sim_fail("no memory to share");
    *out = map_object(number, bytes);
    *out_object = (uint64_t)number + 1;
    return fd;
}

int sim_shared_find(uint64_t which, size_t bytes, void **out)
{
    sim_point("finds memory");
    if (which == 0 || which > (uint64_t)object_count)
        return -1;
    int number = (int)which - 1;
    if (objects[number].machine != sim_machine() || objects[number].bytes != bytes)
        return -1;
    int fd = sim_descriptor(sim_process(), SIM_FD_SHARED, number);
    if (fd >= 0)
        *out = map_object(number, bytes);
    return fd;
}

static map *map_of(const void *at)
{
    for (int i = 0; i < map_count; i++)
        if ((const char *)at >= maps[i].data && (const char *)at < maps[i].data + maps[i].bytes)
            return &maps[i];
    return NULL;
}

void sim_shared_trim(void *data, size_t bytes, size_t first, size_t left)
{
    map *found = map_of(data);
    char *at = data;
    if (found == NULL)
        sim_fail("memory is unmapped twice");
    if (first > 0)
        munmap(at, first);
    if (first + left < bytes)
        munmap(at + first + left, bytes - first - left);
    if (left == 0) {
        *found = maps[--map_count];
        return;
    }
    void *aside = malloc(left);
    if (aside == NULL)
        sim_fail("no memory");
    memcpy(aside, at + first, left);
    if (mmap(at + first, left, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1,
             0) == MAP_FAILED)
        sim_fail("no memory of a process' own");
    memcpy(at + first, aside, left);
    free(aside);
    *found = (map){at + first, left, found->first + first, found->object};
}

/* ---- places ---------------------------------------------------------------------------------- */

static hold *holder_of(int number, int place)
{
    for (int i = 0; i < hold_count; i++)
        if (holds[i].object == number && holds[i].place == place && holds[i].process >= 0)
            return &holds[i];
    return NULL;
}

static bool take_place(int fd, int place, bool own)
{
    int number = sim_object(fd, SIM_FD_SHARED);
    const hold *held = holder_of(number, place);
    int by = own ? fd : -1;
    if (held != NULL)
        return held->process == sim_process() && held->fd == by;
    int i = 0;
    while (i < hold_count && holds[i].process >= 0)
        i++;
    if (i == HOLDS)
        sim_fail("too many places are held");
    hold_count += i == hold_count;
    holds[i] = (hold){number, place, sim_process(), by};
    return true;
}

bool sim_hold(int fd, int place)
{
    sim_point("holds");
    return take_place(fd, place, false);
}

bool sim_own(int fd, int place)
{
    sim_point("takes a place");
    return take_place(fd, place, true);
}

/* As systems have it, a process' own locks are none for it. */
bool sim_held(int fd, int place)
{
    sim_point("asks who holds");
    const hold *held = holder_of(sim_object(fd, SIM_FD_SHARED), place);
    return held != NULL && (held->process != sim_process() || held->fd >= 0);
}

static void file_close(file *f, int fd);

void sim_disk_close(int kind, int which, int fd)
{
    if (kind == SIM_FD_FILE) {
        file_close(&files[which], fd);
        return;
    }
    for (int i = 0; i < hold_count; i++)
        if (holds[i].object == which && holds[i].process == sim_process() &&
            (holds[i].fd < 0 || holds[i].fd == fd))
            holds[i].process = -1;
}

void sim_disk_end_of(int process)
{
    for (int i = 0; i < hold_count; i++)
        if (holds[i].process == process)
            holds[i].process = -1;
    for (int i = 0; i < file_count; i++)
        if (files[i].locker == process)
            files[i].locker = -1;
}

/* ---- words ----------------------------------------------------------------------------------- */

typedef struct waiter {
    const void *word;
    int object;
    size_t at;
    bool woken;
    struct waiter *next;
} waiter;

static waiter *waiters;

static waiter waiter_of(const void *word)
{
    const map *in = map_of(word);
    waiter w = {.word = word, .object = -1};
    if (in != NULL) {
        w.object = in->object;
        w.at = in->first + (size_t)((const char *)word - in->data);
    }
    return w;
}

static bool is_same_word(const waiter *a, const waiter *b)
{
    return a->object == b->object && (a->object >= 0 ? a->at == b->at : a->word == b->word);
}

static bool is_woken(void *arg)
{
    return ((const waiter *)arg)->woken;
}

static bool is_as_seen(const void *word, unsigned seen)
{
    unsigned now;
    memcpy(&now, word, sizeof now);
    return now == seen;
}

/* A thread that is killed leaves its waiter behind. */
void sim_word_wait(const void *word, unsigned seen, uint64_t ns)
{
    if (!is_as_seen(word, seen) || sim_interrupted())
        return;
    waiter *w = malloc(sizeof *w);
    if (w == NULL)
        sim_fail("no memory for a waiter");
    *w = waiter_of(word);
    w->next = waiters;
    waiters = w;
    uint64_t now = sim_now();
    if (is_as_seen(word, seen)) /* the look at the clock may have let others go on */
        sim_wait("waits for a word", is_woken, w, ns < SIM_NEVER - now ? now + ns : SIM_NEVER);
    for (waiter **at = &waiters; *at != NULL; at = &(*at)->next)
        if (*at == w) {
            *at = w->next;
            break;
        }
    free(w);
    sim_did(SIM_WAITS);
}

void sim_word_wake(const void *word)
{
    waiter woken = waiter_of(word);
    for (waiter *w = waiters; w != NULL; w = w->next)
        w->woken = w->woken || is_same_word(w, &woken);
    sim_did(SIM_WAKES);
    sim_point("wakes");
}

/* ---- files ----------------------------------------------------------------------------------- */

static file *file_at(const char *path)
{
    for (int i = 0; i < file_count && path != NULL; i++)
        if (files[i].path != NULL && strcmp(files[i].path, path) == 0)
            return &files[i];
    return NULL;
}

static file *file_of(int fd)
{
    return &files[sim_object(fd, SIM_FD_FILE)];
}

static void file_free(file *f)
{
    if (f->path != NULL || f->opened > 0)
        return;
    free(f->data);
    f->data = NULL;
    f->bytes = 0;
}

static file *file_new(const char *path)
{
    int i = 0;
    while (i < file_count && (files[i].path != NULL || files[i].opened > 0))
        i++;
    if (i == FILES)
        sim_fail("too many files");
    file_count += i == file_count;
    files[i] = (file){.path = strdup(path), .version = ++versions, .locker = -1};
    return &files[i];
}

static void file_close(file *f, int fd)
{
    f->opened--;
    if (f->locker == sim_process() && f->lock_fd == fd)
        f->locker = -1;
    file_free(f);
}

int sim_file_open(const char *path, bool makes, bool *out_made)
{
    sim_point("opens a file");
    file *f = file_at(path);
    *out_made = f == NULL && makes;
    if (f == NULL && !makes) {
        *sim_why() = SIM_NO_FILE;
        return -1;
    }
    if (f == NULL)
        f = file_new(path);
    int fd = sim_descriptor(sim_process(), SIM_FD_FILE, (int)(f - files));
    if (fd < 0)
        *sim_why() = SIM_NO_FILES;
    else
        f->opened++;
    return fd;
}

bool sim_file_lock(int fd)
{
    file *f = file_of(fd);
    sim_point("locks a file");
    if (f->locker >= 0)
        return false;
    f->locker = sim_process();
    f->lock_fd = fd;
    return true;
}

bool sim_file_is_at(int fd, const char *path)
{
    sim_point("looks at a file");
    return file_at(path) == file_of(fd);
}

/* A write may be cut, and its process be killed between its parts. */
ptrdiff_t sim_file_write(int fd, const void *data, size_t bytes, int64_t at)
{
    file *f = file_of(fd);
    sim_point("writes to a file");
    if (bytes > 1 && sim_one_in(sim.shorts))
        bytes = 1 + sim_draw(bytes);
    size_t first = at < 0 ? f->bytes : (size_t)at;
    if (first + bytes > f->bytes) {
        f->data = realloc(f->data, first + bytes);
        if (f->data == NULL)
            sim_fail("no memory for a file");
        if (first > f->bytes)
            memset(f->data + f->bytes, 0, first - f->bytes);
        f->bytes = first + bytes;
    }
    memcpy(f->data + first, data, bytes);
    f->version = ++versions;
    return (ptrdiff_t)bytes;
}

ptrdiff_t sim_file_read(int fd, void *data, size_t bytes, uint64_t at)
{
    const file *f = file_of(fd);
    sim_point("reads a file");
    size_t left = at < f->bytes ? f->bytes - (size_t)at : 0, got = bytes < left ? bytes : left;
    if (got > 0)
        memcpy(data, f->data + at, got);
    return (ptrdiff_t)got;
}

uint64_t sim_file_bytes(int fd)
{
    return file_of(fd)->bytes;
}

void sim_file_empty(int fd)
{
    file *f = file_of(fd);
    sim_point("empties a file");
    f->bytes = 0;
    f->version = ++versions;
}

void *sim_file_map(int fd)
{
    const file *f = file_of(fd);
    void *copy = malloc(f->bytes);
    return copy != NULL ? memcpy(copy, f->data, f->bytes) : NULL;
}

bool sim_file_rename(const char *from, const char *to)
{
    sim_point("renames a file");
    file *f = file_at(from), *old = file_at(to);
    if (f == NULL)
        return false;
    if (old != NULL && old != f) {
        free(old->path);
        old->path = NULL;
        file_free(old);
    }
    free(f->path);
    f->path = strdup(to);
    sim_point("has renamed a file");
    return true;
}

bool sim_file_remove(const char *path)
{
    sim_point("removes a file");
    file *f = file_at(path);
    if (f == NULL)
        return false;
    free(f->path);
    f->path = NULL;
    file_free(f);
    return true;
}

uint64_t sim_file_version(const char *path)
{
    const file *f = file_at(path);
    return f != NULL ? f->version : 0;
}

const char *sim_file_name(int index)
{
    for (int i = 0; i < file_count; i++)
        if (files[i].path != NULL && index-- == 0)
            return files[i].path;
    return NULL;
}

const char *sim_disk_look(const char *path, size_t *out_bytes)
{
    const file *f = file_at(path);
    *out_bytes = f != NULL ? f->bytes : 0;
    return f != NULL ? f->data : NULL;
}

void sim_disk_begin(void)
{
    versions = 0;
}
