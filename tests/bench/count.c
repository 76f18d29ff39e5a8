/* count.c - stands before the C library's allocator and thread functions and counts their calls. */

#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>
#include "bench.h"

static atomic_long heap_calls, mmap_calls, thread_calls;

/* glibc's own names of what is replaced below. */
extern void *__libc_malloc(size_t bytes);
extern void *__libc_calloc(size_t count, size_t bytes);
extern void *__libc_realloc(void *data, size_t bytes);
extern void *__libc_memalign(size_t align, size_t bytes);
extern void __libc_free(void *data);

call_counts calls_so_far(void)
{
    return (call_counts){.heap = atomic_load(&heap_calls),
                         .mmaps = atomic_load(&mmap_calls),
                         .threads = atomic_load(&thread_calls)};
}

static void count(atomic_long *calls)
{
    atomic_fetch_add_explicit(calls, 1, memory_order_relaxed);
}

void *malloc(size_t bytes)
{
    count(&heap_calls);
    return __libc_malloc(bytes);
}

void *calloc(size_t items, size_t bytes)
{
    count(&heap_calls);
    return __libc_calloc(items, bytes);
}

void *realloc(void *data, size_t bytes)
{
    count(&heap_calls);
    return __libc_realloc(data, bytes);
}

void *aligned_alloc(size_t align, size_t bytes)
{
    count(&heap_calls);
    return __libc_memalign(align, bytes);
}

int posix_memalign(void **out, size_t align, size_t bytes)
{
    count(&heap_calls);
    *out = __libc_memalign(align, bytes);
    return *out == NULL ? ENOMEM : 0;
}

void free(void *data)
{
    count(&heap_calls);
    __libc_free(data);
}

void *mmap(void *at, size_t bytes, int protection, int flags, int file, off_t offset)
{
    count(&mmap_calls);
    long mapped = syscall(SYS_mmap, at, bytes, protection, flags, file, offset);
    return (void *)(intptr_t)mapped; /* -1 is MAP_FAILED */
}

int munmap(void *at, size_t bytes)
{
    count(&mmap_calls);
    return (int)syscall(SYS_munmap, at, bytes);
}

int pthread_create(pthread_t *out, const pthread_attr_t *attributes, void *(*fn)(void *),
                   void *user)
{
    static int (*real)(pthread_t *, const pthread_attr_t *, void *(*)(void *), void *);
    if (real == NULL)
        *(void **)&real = dlsym(RTLD_NEXT, "pthread_create");
    count(&thread_calls);
    return real(out, attributes, fn, user);
}
