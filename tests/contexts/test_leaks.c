/* test_leaks.c - how the processes of tests look for leaks under ASan: as well as LSan does it
   alone, in a third of its time. */

#define _GNU_SOURCE /* on_exit, dl_iterate_phdr */

#include <fcntl.h>
#include <link.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>
#include "test.h"

#if defined(__GLIBC__) && (defined(__SANITIZE_ADDRESS__) || TEST_HAS_FEATURE(address_sanitizer))

int __lsan_is_turned_off(void);
void __lsan_do_leak_check(void);
int __lsan_do_recoverable_leak_check(void);
void __lsan_register_root_region(const void *begin, size_t bytes);

/* ---- what is static -----------------------------------------------------------------------------
   Of 50 MB hardly a process writes to 3, and to look through the rest costs most. So LSan gets what
   is not 0 in those pages that somebody has written to; and, if it then finds a leak, all that is
   static, as it is while threads stand still. That is what counts.                               */

const char *__lsan_default_options(void);
const char *__lsan_default_options(void)
{
    return "use_globals=0";
}

typedef struct static_words {
    size_t page_bytes;
    int pagemap;
    uintptr_t *words;
    size_t count, most;
} static_words;

/* Redzones are in it too. */
__attribute__((no_sanitize("address"))) static void add_words(static_words *all,
                                                              const uintptr_t *words)
{
    for (size_t i = 0; i < all->page_bytes / sizeof *words; i++) {
        if (words[i] != 0 && all->count < all->most) {
            all->words[all->count++] = words[i];
        }
    }
}

/* Bit 61 says that a page is that of a file, 62 that it was swapped out, 63 that it is there. */
static bool is_written(uint64_t page)
{
    return page >> 62 != 0 && (page >> 61 & 1) == 0;
}

static void add_written(static_words *all, uintptr_t begin, uintptr_t end)
{
    enum { AT_ONCE = 128 };
    uint64_t pages[AT_ONCE];
    for (uintptr_t first = begin / all->page_bytes; first * all->page_bytes < end;
         first += AT_ONCE) {
        ssize_t bytes = pread(all->pagemap, pages, sizeof pages, (off_t)(first * sizeof *pages));
        for (size_t i = 0; i < AT_ONCE && (first + i) * all->page_bytes < end; i++) {
            if ((size_t)bytes != sizeof pages || is_written(pages[i])) {
                add_words(all, (const uintptr_t *)((first + i) * all->page_bytes));
            }
        }
    }
}

/* What is static in a module, but for sanitizers': as words, or where there is no place for them as
   it is. */
static int add_module(struct dl_phdr_info *module, size_t bytes, void *user)
{
    (void)bytes;
    static_words *all = user;
    for (int i = 0; i < module->dlpi_phnum && strstr(module->dlpi_name, "san.so") == NULL; i++) {
        const ElfW(Phdr) *part = &module->dlpi_phdr[i];
        uintptr_t begin = module->dlpi_addr + part->p_vaddr;
        if (part->p_type != PT_LOAD || (part->p_flags & PF_W) == 0) {
            continue;
        }
        if (all->words != NULL) {
            add_written(all, begin, begin + part->p_memsz);
        } else {
            __lsan_register_root_region((const void *)begin, part->p_memsz);
        }
    }
    return 0;
}

static void add_what_is_written(void)
{
    const size_t most_bytes = 64 << 20;
    static_words all = {.page_bytes = (size_t)sysconf(_SC_PAGESIZE),
                        .pagemap = open("/proc/self/pagemap", O_RDONLY),
                        .most = most_bytes / sizeof *all.words};
    all.words = mmap(NULL, most_bytes, PROT_READ | PROT_WRITE,
                     MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (all.words == MAP_FAILED) {
        return;
    }
    dl_iterate_phdr(add_module, &all);
    close(all.pagemap);
    __lsan_register_root_region(all.words, all.count * sizeof *all.words);
}

/* ---- the end of a process -------------------------------------------------------------------- */

/* After what is to be done at exit ASan forgets each global variable: a process of a test would
   copy the shadow of all. */
static void end_here(int status, void *unused)
{
    (void)unused;
    fflush(NULL);
    if (!__lsan_is_turned_off()) {
        add_what_is_written();
        if (__lsan_do_recoverable_leak_check() != 0) {
            dl_iterate_phdr(add_module, &(static_words){0});
            __lsan_do_leak_check();
        }
    }
    _exit(status);
}

__attribute__((constructor)) static void end_early(void)
{
    on_exit(end_here, NULL);
}

/* ---- tests ----------------------------------------------------------------------------------- */

static void *at_first, *kept = &at_first; /* one page is of zeros, the other one of the program */
static _Thread_local void *of_thread;

static void *block(size_t bytes, void *in_it)
{
    void **made = calloc(1, bytes);
    CHECK(made != NULL);
    made[bytes / sizeof *made - 1] = in_it;
    return made;
}

static void *lose_little(void *unused)
{
    (void)unused;
    free(block(24, block(24, NULL)));
    return NULL;
}

static void *lose_much(void *unused)
{
    (void)unused;
    free(block(24, block(1 << 20, NULL)));
    return NULL;
}

static void *lose_what_was_kept(void *unused)
{
    (void)unused;
    at_first = block(24, NULL);
    at_first = NULL;
    return NULL;
}

static void keep_at_first(void)
{
    at_first = block(24, block(1 << 20, block(24, NULL)));
}

static void keep(void)
{
    kept = block(1 << 20, block(24, NULL));
}

static void keep_in_thread(void)
{
    of_thread = block(24, block(24, NULL));
}

static void *keep_from_a_thread(void *unused)
{
    (void)unused;
    keep_at_first();
    return NULL;
}

/* While another one has begun to look; a thread does, as of its stack nothing is left. */
static void keep_late(void)
{
    pthread_t thread;
    add_what_is_written();
    CHECK_INT(pthread_create(&thread, NULL, keep_from_a_thread, NULL), 0);
    CHECK_INT(pthread_join(thread, NULL), 0);
    CHECK(__lsan_do_recoverable_leak_check() != 0);
    dl_iterate_phdr(add_module, &(static_words){0});
    CHECK_INT(__lsan_do_recoverable_leak_check(), 0);
}

static void check_end(pid_t child, bool well)
{
    int status;
    CHECK_INT(waitpid(child, &status, 0), child);
    CHECK(WIFEXITED(status));
    CHECK_INT(WEXITSTATUS(status) == EXIT_SUCCESS, well);
}

/* In a thread, of whose stack nothing is left. */
static void check_lost(void *(*lose)(void *))
{
    pid_t child = fork();
    CHECK(child >= 0);
    if (child == 0) {
        pthread_t thread;
        CHECK_INT(pthread_create(&thread, NULL, lose, NULL), 0);
        CHECK_INT(pthread_join(thread, NULL), 0);
        exit(EXIT_SUCCESS);
    }
    check_end(child, false);
}

static void check_kept(void (*body)(void))
{
    pid_t child = fork();
    CHECK(child >= 0);
    if (child == 0) {
        body();
        add_what_is_written();
        CHECK_INT(__lsan_do_recoverable_leak_check(), 0); /* at the first look */
        exit(EXIT_SUCCESS);
    }
    check_end(child, true);
}

TEST(what_is_lost_is_found)
{
    check_lost(lose_little);
    check_lost(lose_much);
    check_lost(lose_what_was_kept);
}

TEST(what_is_kept_is_not_lost)
{
    check_kept(keep_at_first);
    check_kept(keep);
    check_kept(keep_in_thread);
    check_kept(keep_late);
}

#endif
