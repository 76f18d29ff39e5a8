/* test_main.c - runs the tests that registered themselves, each in a process of its own. */

#include <errno.h>
#include <math.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>
#include "test.h"

#define MAX_JOBS  64
#define EXIT_SKIP 77

enum { LATE_SECONDS = 2 }; /* after which no alarm will come any more */

static test_case *registered;

void test_register(test_case *test)
{
    test->next = registered;
    registered = test;
}

/* ---- checks ---------------------------------------------------------------------------------- */

static atomic_flag failing = ATOMIC_FLAG_INIT;

_Noreturn void test_fail(const char *file, int line, const char *format, ...)
{
    while (atomic_flag_test_and_set(&failing)) {
        pause(); /* another thread failed first: its report is printed whole, then all end */
    }
    fflush(stdout);
    fprintf(stderr, "%s:%d: ", file, line);
    va_list args;
    va_start(args, format);
    vfprintf(stderr, format, args);
    va_end(args);
    fputc('\n', stderr);
    _exit(EXIT_FAILURE);
}

_Noreturn void test_skip(const char *reason)
{
    printf("SKIP %s\n", reason);
    fflush(stdout);
    _exit(EXIT_SKIP);
}

void test_needs_processes(int count)
{
    if (count > 1 && getenv("TEST_ONE_PROCESS") != NULL)
        test_skip("the library has one process");
}

void test_check_int(const char *file, int line, const char *text, long long got, long long want)
{
    if (got != want) {
        test_fail(file, line, "%s is %lld, wanted %lld", text, got, want);
    }
}

void test_check_f64(const char *file, int line, const char *text, double got, double want,
                    double tolerance)
{
    bool same = got == want || (isnan(got) && isnan(want));
    if (!same && !(fabs(got - want) <= tolerance)) {
        test_fail(file, line, "%s is %.17g, wanted %.17g within %g", text, got, want, tolerance);
    }
}

void test_check_str(const char *file, int line, const char *text, const char *got, const char *want)
{
    if (got == NULL || strcmp(got, want) != 0) {
        test_fail(file, line, "%s is \"%s\", wanted \"%s\"", text, got ? got : "(null)", want);
    }
}

void test_check_says(const char *file, int line, const char *name, const char *text,
                     const char *part)
{
    if (strstr(text, part) == NULL) {
        test_fail(file, line, "no \"%s\" in %s:\n%s", part, name, text);
    }
}

void test_check_bytes(const char *file, int line, const char *text, const void *got,
                      const void *want, size_t bytes)
{
    const unsigned char *a = got, *b = want;
    for (size_t i = 0; i < bytes; i++) {
        if (a[i] != b[i]) {
            test_fail(file, line, "%s: byte %zu of %zu is 0x%02x, wanted 0x%02x", text, i, bytes,
                      (unsigned)a[i], (unsigned)b[i]);
        }
    }
}

void test_check_status(const char *file, int line, const char *text, dp_status got, dp_status want,
                       test_error_fn last_error)
{
    if (got != want) {
        test_fail(file, line, "%s is %s, wanted %s; last error: \"%s\"", text, dp_status_name(got),
                  dp_status_name(want), last_error());
    }
}

void test_check_error(const char *file, int line, const char *text, dp_status got, dp_status want,
                      test_error_fn last_error, const char *part)
{
    test_check_status(file, line, text, got, want, last_error);
    if (strstr(last_error(), part) == NULL) {
        test_fail(file, line, "%s: \"%s\" does not hold \"%s\"", text, last_error(), part);
    }
}

/* ---- numbers --------------------------------------------------------------------------------- */

uint64_t test_seed(void)
{
    const char *text = getenv("TEST_SEED");
    return text ? strtoull(text, NULL, 0) : 1;
}

uint64_t test_random(uint64_t *state)
{
    *state += 0x9e3779b97f4a7c15u;
    uint64_t z = *state;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
}

double test_timeout_scale(void)
{
    const char *text = getenv("TEST_TIMEOUT_SCALE");
    double scale = text ? strtod(text, NULL) : 1.0;
    return scale > 0.0 ? scale : 1.0;
}

#if defined(TEST_MPI) || defined(TEST_SIM)
enum { SLOW = true };
#else
enum { SLOW = false };
#endif
enum { STRIDE = WITH_TSAN ? 11 : WITH_ASAN || SLOW ? 3 : 1 };

int test_stride(void)
{
    const char *text = getenv("TEST_STRIDE");
    int asked = text ? atoi(text) : 1;
    return asked > STRIDE ? asked : STRIDE;
}

static int mean_step(void)
{
    const char *skip = getenv("TEST_SKIP");
    int asked = skip ? atoi(skip) : 1;
    return asked > test_stride() ? asked : test_stride();
}

bool test_skips(void)
{
    return mean_step() > 1;
}

int test_step(void)
{
    static uint64_t state;
    const char *turn = getenv("TEST_TURN");
    if (state == 0)
        state = turn ? 1 + (uint64_t)atoi(turn) : 1;
    return 1 + (int)(test_random(&state) % (uint64_t)(2 * mean_step() - 1));
}

/* Each begins with a pointer to the one before, so that none is leaked. */
void *test_room(size_t bytes)
{
    static void *last;
    void **room = calloc(1, bytes + 64);
    if (room == NULL) {
        test_fail(__FILE__, __LINE__, "no memory for %zu bytes", bytes);
    }
    *room = last;
    last = room;
    return (char *)room + 64;
}

/* ---- the allocator --------------------------------------------------------------------------- */

static pthread_mutex_t counting = PTHREAD_MUTEX_INITIALIZER;

typedef struct block_head { /* lies right in front of the bytes that are handed out */
    void *base;
    size_t bytes;
} block_head;

static bool counter_admits(test_allocator *counter, size_t bytes)
{
    pthread_mutex_lock(&counting);
    size_t call = ++counter->call_count;
    bool fails = counter->fail_at != 0 &&
                 (counter->keep_failing ? call >= counter->fail_at : call == counter->fail_at);
    if (fails) {
        counter->fail_count++;
    } else {
        counter->live_blocks++;
        counter->live_bytes += bytes;
        if (counter->peak_bytes < counter->live_bytes) {
            counter->peak_bytes = counter->live_bytes;
        }
    }
    pthread_mutex_unlock(&counting);
    return !fails;
}

/* To touch pages that a test never uses would be most of what the tests cost. */
void test_spoil(void *data, size_t bytes, int with)
{
    const size_t end = 64 << 10;
    unsigned char *at = data;
    if (bytes <= 2 * end) {
        memset(at, with, bytes);
    } else {
        memset(at, with, end);
        memset(at + bytes - end, with, end);
    }
}

static void *counted_alloc(size_t bytes, size_t align, void *user)
{
    if (align == 0 || (align & (align - 1)) != 0) {
        test_fail(__FILE__, __LINE__, "allocator: align %zu is no power of two", align);
    }
    if (!counter_admits(user, bytes)) {
        return NULL;
    }
    size_t room = align < sizeof(block_head) ? sizeof(block_head) : align;
    unsigned char *base;
    void *memory;
    if (bytes > SIZE_MAX - room || posix_memalign(&memory, room, room + bytes) != 0) {
        test_fail(__FILE__, __LINE__, "allocator: %zu bytes are more than there are", bytes);
    }
    base = memory;
    block_head head = {base, bytes};
    memcpy(base + room - sizeof head, &head, sizeof head);
    test_spoil(base + room, bytes, 0xa5);
    return base + room;
}

static void counted_free(void *data, size_t bytes, void *user)
{
    test_allocator *counter = user;
    if (data == NULL) {
        test_fail(__FILE__, __LINE__, "allocator: free of NULL");
    }
    block_head head;
    memcpy(&head, (unsigned char *)data - sizeof head, sizeof head);
    if (head.bytes != bytes) {
        test_fail(__FILE__, __LINE__, "allocator: free says %zu bytes, alloc said %zu", bytes,
                  head.bytes);
    }
    pthread_mutex_lock(&counting);
    counter->live_blocks--;
    counter->live_bytes -= bytes;
    pthread_mutex_unlock(&counting);
    test_spoil(data, bytes, 0xdd);
    free(head.base);
}

dp_allocator test_allocator_of(test_allocator *counter)
{
    return (dp_allocator){.alloc = counted_alloc, .free = counted_free, .user = counter};
}

static atomic_bool has_counted;

#if defined(__SANITIZE_ADDRESS__) || TEST_HAS_FEATURE(address_sanitizer)
/* To look for leaks is half of what ASan costs: not where the test has counted what it frees. */
int __lsan_is_turned_off(void);
int __lsan_is_turned_off(void)
{
    return has_counted;
}
#endif

void test_check_no_leaks(const char *file, int line, const test_allocator *counter)
{
    has_counted = true;
    if (counter->live_blocks != 0 || counter->live_bytes != 0) {
        test_fail(file, line, "%zu blocks, %zu bytes are not freed", counter->live_blocks,
                  counter->live_bytes);
    }
}

/* ---- tests of the runner itself, which lint.sh expects to see reported ----------------------- */

static void selftest_passes(void)
{
    CHECK_INT(1 + 1, 2);
}

static void selftest_fails(void)
{
    CHECK_INT(1 + 1, 3);
}

static void selftest_skips(void)
{
    SKIP("to see a reason");
}

static void selftest_crashes(void)
{
    raise(SIGSEGV);
}

static void selftest_hangs(void)
{
    for (;;) {
        pause();
    }
}

/* As in a driver that does not come back: no alarm ends it. */
static void selftest_stops(void)
{
    raise(SIGSTOP);
}

/* As in one that not even SIGKILL reaches: in the runner's group it reaches nobody. */
static void selftest_stays(void)
{
    signal(SIGALRM, SIG_IGN);
    setpgid(0, getpgid(getppid()));
    sleep(1 + 4 * LATE_SECONDS);
}

static void *fail_in_thread(void *user)
{
    CHECK_STR(user, "from the main thread");
    return NULL;
}

static void selftest_fails_in_thread(void)
{
    char text[] = "from another thread";
    pthread_t thread;
    CHECK_INT(pthread_create(&thread, NULL, fail_in_thread, text), 0);
    pthread_join(thread, NULL);
}

static void selftest_leaks(void)
{
    test_allocator counter = {0};
    dp_allocator allocator = test_allocator_of(&counter);
    void *kept = allocator.alloc(24, 64, allocator.user);
    CHECK((uintptr_t)kept % 64 == 0);
    allocator.free(allocator.alloc(8, 8, allocator.user), 8, allocator.user);
    CHECK_NO_LEAKS(&counter);
}

static test_case selftests[] = {
    {"selftest", "passes", selftest_passes, 10, NULL},
    {"selftest", "fails", selftest_fails, 10, NULL},
    {"selftest", "skips", selftest_skips, 10, NULL},
    {"selftest", "crashes", selftest_crashes, 10, NULL},
    {"selftest", "hangs", selftest_hangs, 1, NULL},
    {"selftest", "stops", selftest_stops, 1, NULL},
    {"selftest", "stays", selftest_stays, 1, NULL},
    {"selftest", "fails_in_thread", selftest_fails_in_thread, 10, NULL},
    {"selftest", "leaks", selftest_leaks, 10, NULL},
};

/* ---- the runner ------------------------------------------------------------------------------ */

typedef struct job {
    const test_case *test;
    pid_t pid;
    int output; /* read end of the pipe that the test prints into */
    char *text;
    size_t text_bytes;
    double late; /* when it is */
} job;

static size_t pass_count, fail_count, skip_count;
static bool show_times;

/* tests/values/test_scatter.c -> scatter, and how many characters that is */
static const char *file_label(const char *file, int *out_count)
{
    const char *slash = strrchr(file, '/');
    const char *label = slash ? slash + 1 : file;
    if (strncmp(label, "test_", 5) == 0) {
        label += 5;
    }
    *out_count = (int)strcspn(label, ".");
    return label;
}

static int by_name(const void *left, const void *right)
{
    const test_case *a = *(test_case *const *)left, *b = *(test_case *const *)right;
    int order = strcmp(a->file, b->file);
    return order != 0 ? order : strcmp(a->name, b->name);
}

static void format_name(const test_case *test, char *out, size_t bytes)
{
    int count;
    const char *label = file_label(test->file, &count);
    snprintf(out, bytes, "%.*s/%s", count, label, test->name);
}

/* "%0" or "%1": one half of all tests, the same in every binary. */
static bool is_in_half(const char *name, const char *half)
{
    unsigned hash = 2166136261u;
    for (; *name != '\0'; name++) {
        hash = (hash ^ (unsigned char)*name) * 16777619u;
    }
    return (hash >> 16) % 2 == (unsigned)(half[1] - '0');
}

/* Whether a name holds all that it has to, and nothing that it must not. NULL ends the list. */
static bool is_wanted(const char *name, char *const *filters)
{
    for (; *filters != NULL; filters++) {
        bool unwanted = **filters == '!';
        bool holds = **filters == '%' ? is_in_half(name, *filters)
                                      : strstr(name, *filters + unwanted) != NULL;
        if (holds == unwanted) {
            return false;
        }
    }
    return true;
}

static test_case **select_tests(char *const *filters, size_t *out_count)
{
    size_t count = 0, kept = 0;
    for (const test_case *t = registered; t != NULL; t = t->next) {
        count++;
    }
    test_case **tests = malloc((count + 1) * sizeof *tests);
    if (tests == NULL) {
        perror("tests");
        exit(2);
    }
    for (test_case *t = registered; t != NULL; t = t->next) {
        char name[256];
        format_name(t, name, sizeof name);
        if (is_wanted(name, filters)) {
            tests[kept++] = t;
        }
    }
    qsort(tests, kept, sizeof *tests, by_name);
    *out_count = kept;
    return tests;
}

static double limit_seconds(const test_case *test)
{
    return ceil(test->seconds * test_timeout_scale());
}

static _Noreturn void run_in_child(const test_case *test, int output)
{
    setpgid(0, 0); /* so that the runner can end what the test leaves behind */
    dup2(output, STDOUT_FILENO);
    dup2(output, STDERR_FILENO);
    close(output);
    setvbuf(stdout, NULL, _IOLBF, BUFSIZ);
    setrlimit(RLIMIT_CORE, &(struct rlimit){0, 0});
    alarm((unsigned)limit_seconds(test));
    test->run();
    exit(EXIT_SUCCESS); /* not _exit: leak checkers report at exit */
}

static double seconds(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + (double)now.tv_nsec * 1e-9;
}

static void start_test(job *j, const test_case *test)
{
    int ends[2];
    fflush(NULL);
    if (pipe(ends) != 0) {
        perror("pipe");
        exit(2);
    }
    *j = (job){.test = test,
               .pid = fork(),
               .output = ends[0],
               .late = seconds() + limit_seconds(test) + LATE_SECONDS};
    if (j->pid == 0) {
        close(ends[0]);
        run_in_child(test, ends[1]);
    }
    if (j->pid < 0) {
        perror("fork");
        exit(2);
    }
    close(ends[1]);
}

/* Take what is there; false when the pipe is at its end. */
static bool read_output(job *j)
{
    char piece[2048];
    ssize_t bytes = read(j->output, piece, sizeof piece);
    if (bytes <= 0) {
        return bytes < 0 && errno == EINTR;
    }
    char *text = realloc(j->text, j->text_bytes + (size_t)bytes + 1);
    if (text == NULL) {
        perror("tests");
        exit(2);
    }
    memcpy(text + j->text_bytes, piece, (size_t)bytes);
    j->text = text;
    j->text_bytes += (size_t)bytes;
    j->text[j->text_bytes] = '\0';
    return true;
}

static void print_indented(const char *text)
{
    while (text != NULL && *text != '\0') {
        size_t count = strcspn(text, "\n");
        printf("#   %.*s\n", (int)count, text);
        text += count + (text[count] == '\n');
    }
}

static const char *skip_reason(const job *j)
{
    char *found = NULL;
    for (char *at = j->text; at != NULL && (at = strstr(at, "SKIP ")) != NULL; at += 5) {
        found = at + 5;
    }
    if (found == NULL) {
        return "no reason given";
    }
    found[strcspn(found, "\n")] = '\0';
    return found;
}

static const char *signal_name(int number)
{
    static const struct {
        int number;
        const char *name;
    } names[] = {
        {SIGSEGV, "SIGSEGV"}, {SIGABRT, "SIGABRT"}, {SIGBUS, "SIGBUS"},   {SIGFPE, "SIGFPE"},
        {SIGILL, "SIGILL"},   {SIGPIPE, "SIGPIPE"}, {SIGKILL, "SIGKILL"}, {SIGTERM, "SIGTERM"},
        {SIGTRAP, "SIGTRAP"}, {SIGSYS, "SIGSYS"},   {SIGINT, "SIGINT"},
    };
    for (size_t i = 0; i < sizeof names / sizeof names[0]; i++) {
        if (names[i].number == number) {
            return names[i].name;
        }
    }
    return strsignal(number);
}

/* Of all children that have ended so far. */
static double child_cpu_seconds(void)
{
    struct rusage usage;
    getrusage(RUSAGE_CHILDREN, &usage);
    return (double)usage.ru_utime.tv_sec + (double)usage.ru_stime.tv_sec +
           1e-6 * ((double)usage.ru_utime.tv_usec + (double)usage.ru_stime.tv_usec);
}

static void report(const job *j, int status, double cpu_seconds)
{
    char name[256], why[256] = "";
    format_name(j->test, name, sizeof name);
    if (cpu_seconds >= 1.0 || show_times) { /* slow tests should catch the eye */
        size_t used = strlen(name);
        snprintf(name + used, sizeof name - used, " (%.*f s)", show_times ? 3 : 1, cpu_seconds);
    }
    size_t number = pass_count + fail_count + skip_count + 1;

    if (WIFEXITED(status) && WEXITSTATUS(status) == EXIT_SUCCESS) {
        pass_count++;
        printf("ok %zu - %s\n", number, name);
        return;
    }
    if (WIFEXITED(status) && WEXITSTATUS(status) == EXIT_SKIP) {
        skip_count++;
        printf("ok %zu - %s # SKIP %s\n", number, name, skip_reason(j));
        return;
    }
    if (WIFSIGNALED(status) && WTERMSIG(status) == SIGALRM) {
        snprintf(why, sizeof why, "timed out after %g s", limit_seconds(j->test));
    } else if (WIFSIGNALED(status)) {
        snprintf(why, sizeof why, "%s", signal_name(WTERMSIG(status)));
    } else {
        snprintf(why, sizeof why, "exit status %d", WEXITSTATUS(status));
    }
    fail_count++;
    printf("not ok %zu - %s # %s\n", number, name, why);
    print_indented(j->text);
}

/* What its alarm does not end is killed; what not even that ends is left alone. */
static bool has_ended(const job *j, int *out_status)
{
    bool late = seconds() >= j->late;
    if (waitpid(j->pid, out_status, WNOHANG) == j->pid) {
        if (late && WIFSIGNALED(*out_status) && WTERMSIG(*out_status) == SIGKILL) {
            *out_status = SIGALRM;
        }
        return true;
    }
    if (late) {
        kill(-j->pid, SIGKILL);
    }
    *out_status = SIGALRM;
    return seconds() >= j->late + LATE_SECONDS;
}

/* True when the test has ended and was reported. */
static bool finish_test(job *j)
{
    int status;
    double cpu_seconds = child_cpu_seconds();
    if (!has_ended(j, &status)) {
        return false;
    }
    kill(-j->pid, SIGKILL); /* processes that the test started and left */
    while (poll(&(struct pollfd){.fd = j->output, .events = POLLIN}, 1, 0) > 0 && read_output(j)) {
    }
    close(j->output);
    report(j, status, child_cpu_seconds() - cpu_seconds);
    fflush(stdout);
    free(j->text);
    return true;
}

/* Wait until a test prints or ends; an end that shows late costs 20 ms. */
static void wait_for_output(job *jobs, size_t count)
{
    struct pollfd fds[MAX_JOBS];
    for (size_t i = 0; i < count; i++) {
        fds[i] = (struct pollfd){.fd = jobs[i].output, .events = POLLIN};
    }
    if (poll(fds, (nfds_t)count, 20) <= 0) {
        return;
    }
    bool at_end = false;
    for (size_t i = 0; i < count; i++) {
        if (fds[i].revents != 0 && !read_output(&jobs[i])) {
            at_end = true;
        }
    }
    if (at_end) {
        poll(NULL, 0, 1); /* the pipe closes a moment before waitpid can see the end */
    }
}

static void run_tests(test_case *const *tests, size_t count, size_t job_limit)
{
    job jobs[MAX_JOBS];
    size_t running = 0, next = 0;
    while (next < count || running > 0) {
        while (next < count && running < job_limit) {
            start_test(&jobs[running++], tests[next++]);
        }
        wait_for_output(jobs, running);
        for (size_t i = running; i-- > 0;) {
            if (finish_test(&jobs[i])) {
                jobs[i] = jobs[--running];
            }
        }
    }
}

int main(int argc, char **argv)
{
    size_t job_limit = 2;
    bool list = false;
    int i = 1;
    for (; i < argc && argv[i][0] == '-'; i++) {
        if (strncmp(argv[i], "-j", 2) == 0) {
            job_limit = strtoul(argv[i] + 2, NULL, 10);
        } else if (strcmp(argv[i], "--list") == 0) {
            list = true;
        } else if (strcmp(argv[i], "--times") == 0) {
            show_times = true;
        } else {
            job_limit = 0;
        }
    }
    if (job_limit < 1 || job_limit > MAX_JOBS) {
        fprintf(stderr,
                "usage: %s [-jN] [--list] [--times] [substring...] [!substring...] [%%0|%%1], "
                "N = 1 .. %d\n",
                argv[0], MAX_JOBS);
        return 2;
    }
    if (getenv("TEST_SELFTEST") != NULL) {
        for (size_t t = 0; t < sizeof selftests / sizeof selftests[0]; t++) {
            test_register(&selftests[t]);
        }
    }

    size_t count;
    test_case **tests = select_tests(argv + i, &count);
    if (list) {
        for (size_t t = 0; t < count; t++) {
            char name[256];
            format_name(tests[t], name, sizeof name);
            puts(name);
        }
        free(tests);
        return 0;
    }
    if (getenv("TEST_HERE") != NULL && count > 0) { /* a test has started its own program */
        alarm((unsigned)limit_seconds(tests[0]));
        tests[0]->run();
        free(tests);
        return EXIT_SUCCESS;
    }
    printf("TAP version 13\n1..%zu\n# TEST_SEED=%llu\n", count, (unsigned long long)test_seed());
    run_tests(tests, count, job_limit);
    free(tests);
    printf("%zu passed, %zu failed", pass_count, fail_count);
    if (skip_count > 0) {
        printf(", %zu skipped", skip_count);
    }
    putchar('\n');
    return fail_count > 0 || count == 0;
}
