/* test.h - the tests' harness.

       TEST(sums_are_exact)
       {
           CHECK_OK(dp_open(NULL, &ctx));
           CHECK_INT(count, 3);
       }

   A test registers itself and runs in a process of its own: it may crash, hang or leak. The first
   check that fails, in whatever thread, ends the test. Tests are named file/name: test_scatter.c
   holds scatter/rows and so on.

     tests [-jN] [--list] [--times] [substring...] [!substring...]

   Those run whose names hold all the substrings, and none of those behind a "!". With
   --times each says how many seconds of a core it took, not only those that took one.
   TEST_TIMEOUT_SCALE multiplies every time limit, TEST_SEED gives test_seed() another value,
   TEST_STRIDE makes exhaustive loops shorter, TEST_SKIP those whose points are runs of their own,
   and TEST_TURN is which of these points are left. With TEST_ONE_PROCESS the library was compiled
   with DP_ONE_PROCESS. */

#ifndef TEST_H
#define TEST_H

#include "../dp.h"

#ifdef __has_feature
#define TEST_HAS_FEATURE(feature) __has_feature(feature)
#else
#define TEST_HAS_FEATURE(feature) 0
#endif

#if defined(__SANITIZE_ADDRESS__) || TEST_HAS_FEATURE(address_sanitizer)
enum { WITH_ASAN = true };
#else
enum { WITH_ASAN = false };
#endif
#if defined(__SANITIZE_THREAD__) || TEST_HAS_FEATURE(thread_sanitizer)
enum { WITH_TSAN = true };
#else
enum { WITH_TSAN = false };
#endif

typedef struct test_case {
    const char *file, *name;
    void (*run)(void);
    int seconds;
    struct test_case *next;
} test_case;

void test_register(test_case *test);

#define TEST(name) TEST_SLOW(name, 10)

/* A test that needs more than the ten seconds of TEST. Where a table of somebody else's is on trial
   (conform.h), or MPI, only the tests of tables run. */
#if defined(TEST_CONFORM) || defined(TEST_MPI)
#define TEST_SLOW(name, seconds) __attribute__((unused)) static void test_run_##name(void)
#else
#define TEST_SLOW(name, seconds) TEST_OF_TABLE(name, seconds)
#endif

#define TEST_OF_TABLE(name, seconds)                                                               \
    static void test_run_##name(void);                                                             \
    static test_case test_case_##name = {__FILE__, #name, test_run_##name, seconds, NULL};         \
    __attribute__((constructor)) static void test_register_##name(void)                            \
    {                                                                                              \
        test_register(&test_case_##name);                                                          \
    }                                                                                              \
    static void test_run_##name(void)

/* ---- checks, from any thread ----------------------------------------------------------------- */

#define CHECK(condition)                                                                           \
    ((condition) ? (void)0 : test_fail(__FILE__, __LINE__, "CHECK(%s)", #condition))

#define CHECK_INT(got, want)                                                                       \
    test_check_int(__FILE__, __LINE__, #got, (long long)(got), (long long)(want))

/* |got - want| <= tolerance; infinities equal themselves, and so do NaNs. */
#define CHECK_F64(got, want, tolerance)                                                            \
    test_check_f64(__FILE__, __LINE__, #got, (double)(got), (double)(want), (double)(tolerance))

#define CHECK_STR(got, want) test_check_str(__FILE__, __LINE__, #got, got, want)

/* The text holds `part`. A failure prints the whole text, since a bare "no" would not say what is
   there instead. */
#define CHECK_SAYS(text, part) test_check_says(__FILE__, __LINE__, #text, text, part)

#define CHECK_BYTES(got, want, bytes) test_check_bytes(__FILE__, __LINE__, #got, got, want, bytes)

#define CHECK_STATUS(call, want)                                                                   \
    test_check_status(__FILE__, __LINE__, #call, (call), want, dp_last_error)

#define CHECK_OK(call) CHECK_STATUS(call, DP_OK)

/* The call fails with this status, and its sentence holds `part`. */
#define CHECK_ERROR(call, want, part)                                                              \
    test_check_error(__FILE__, __LINE__, #call, (call), want, dp_last_error, part)

/* End the test here, as neither passed nor failed. */
#define SKIP(reason) test_skip(reason)

_Noreturn void test_fail(const char *file, int line, const char *format, ...) DP_PRINTF(3, 4);
_Noreturn void test_skip(const char *reason);

/* The test goes on in so many processes: it is skipped where the library has one. */
void test_needs_processes(int count);

/* `last_error` is a parameter because a test file may hold an implementation of its own. */
typedef const char *(*test_error_fn)(void);
void test_check_int(const char *file, int line, const char *text, long long got, long long want);
void test_check_f64(const char *file, int line, const char *text, double got, double want,
                    double tolerance);
void test_check_str(const char *file, int line, const char *text, const char *got,
                    const char *want);
void test_check_says(const char *file, int line, const char *name, const char *text,
                     const char *part);
void test_check_bytes(const char *file, int line, const char *text, const void *got,
                      const void *want, size_t bytes);
void test_check_status(const char *file, int line, const char *text, dp_status got, dp_status want,
                       test_error_fn last_error);
void test_check_error(const char *file, int line, const char *text, dp_status got, dp_status want,
                      test_error_fn last_error, const char *part);

/* ---- numbers --------------------------------------------------------------------------------- */

uint64_t test_seed(void);
uint64_t test_random(uint64_t *state); /* splitmix64; start with test_seed() */
double test_timeout_scale(void);       /* how much slower than usual this run may be */

/* What exhaustive loops go on by: 1; more under sanitizers and over MPI, which are slow, and where
   $TEST_STRIDE asks for it. */
int test_stride(void);
/* The same where each point is a run of its own: so much on average, or $TEST_SKIP, and other steps
   with another $TEST_TURN. */
int test_step(void);
bool test_skips(void); /* test_step() leaves some out */

/* Zeros that last as long as the test. What is large is not static, as leak checkers look through
   everything static in each of some thousand processes. */
void *test_room(size_t bytes);

/* Devices of the CPU. */
static inline dp_ctx *open_cpus(int count)
{
    dp_ctx *ctx = NULL;
    CHECK_OK(dp_open(&(dp_config){.device_count = count}, &ctx));
    return ctx;
}

/* ---- an allocator that counts and fails ---------------------------------------------------------
       test_allocator counter = {.fail_at = 3};
       dp_config config = {.allocator = test_allocator_of(&counter)};
       ...
       CHECK_NO_LEAKS(&counter);                                                                  */

typedef struct test_allocator {
    size_t fail_at;    /* this call returns NULL, the first is 1; 0 = none does */
    bool keep_failing; /* and so do all after it */
    /* what happened; call from one thread, or after all others are done */
    size_t call_count, fail_count;
    size_t live_blocks, live_bytes, peak_bytes;
} test_allocator;

dp_allocator test_allocator_of(test_allocator *counter);

/* Nobody may count on what memory holds that is new or was freed. Of large blocks only the ends. */
void test_spoil(void *data, size_t bytes, int with);

#define CHECK_NO_LEAKS(counter) test_check_no_leaks(__FILE__, __LINE__, counter)
void test_check_no_leaks(const char *file, int line, const test_allocator *counter);

#endif /* TEST_H */
