/* dp/threads.h - v0.2.0 - the threads of other libraries - MIT licence

   Part of dp.h, which includes it. Functions of the user's run on several devices of a machine at
   the same time, and may call libraries that start threads of their own: each for all cores, as if
   it were alone.
   While such functions run, the libraries are told how many threads a device may have; or from now
   on, if a program asks for that.

   CONTENTS (search for the tag)
     >>libraries  which there are, and how they are told
     >>telling    before and after functions run; once for all
*/

#ifndef DP__ROOMS
#error "dp/threads.h is a part of dp.h: include dp.h"
#else

/* ==== >>libraries ================================================================================
   They are looked for by name in what the program has loaded when a context is opened, or when the
   job of one that is alone grows. Whether a number belongs to the thread that sets it or to the
   process differs:
     OpenMP    to the thread
     OpenBLAS  to the process, where it has threads of its own. openblas_set_num_threads_local makes
               no difference there. Where it is built with OpenMP, OpenMP's number counts
     BLIS      to the process up to 0.9, to the thread later: it is tried
     MKL       to the thread, where the function is called Local. By its name in small letters
               Fortran calls another one                                                          */

enum dp__owner { DP__OF_THREAD, DP__OF_PROCESS, DP__OF_EITHER };

enum dp__form {
    DP__GIVES_NOTHING, /* void set(int), int get(void) */
    DP__GIVES_OLD,     /* int set(int) returns what brings back the number before */
    DP__GIVES_WIDE     /* void set(int64_t), int64_t get(void) */
};

typedef struct dp__library {
    const char *name, *set, *get;
    const char *mark; /* a function of its, which shows that it is there */
    const char *kind; /* a function that returns 0: without threads, 2: with OpenMP's; or NULL */
    const char *variable; /* of the environment, that tells it when the program starts */
    enum dp__owner owner;
    enum dp__form form;
} dp__library;

/* clang-format off */
enum { DP__OPENMP }; /* is the first */

static const dp__library dp__library_list[] = {
    {"OpenMP", "omp_set_num_threads", "omp_get_max_threads", "omp_get_max_threads", NULL,
     "OMP_NUM_THREADS", DP__OF_THREAD, DP__GIVES_NOTHING},
    {"OpenBLAS", "openblas_set_num_threads", "openblas_get_num_threads", "openblas_get_config",
     "openblas_get_parallel", "OPENBLAS_NUM_THREADS", DP__OF_PROCESS, DP__GIVES_NOTHING},
    {"OpenBLAS64", "openblas_set_num_threads64_", "openblas_get_num_threads64_",
     "openblas_get_config64_", "openblas_get_parallel64_", "OPENBLAS_NUM_THREADS", DP__OF_PROCESS,
     DP__GIVES_NOTHING},
    {"BLIS", "bli_thread_set_num_threads", "bli_thread_get_num_threads", "bli_info_get_version_str",
     NULL, "BLIS_NUM_THREADS", DP__OF_EITHER, DP__GIVES_WIDE},
    {"MKL", "MKL_Set_Num_Threads_Local", "MKL_Get_Max_Threads", "MKL_Get_Version", NULL,
     "MKL_NUM_THREADS", DP__OF_THREAD, DP__GIVES_OLD},
    {"Accelerate", NULL, NULL, "appleblas_sgeadd", NULL, "VECLIB_MAXIMUM_THREADS", DP__OF_PROCESS,
     DP__GIVES_NOTHING}};
/* clang-format on */

enum { DP__LIBRARIES = sizeof dp__library_list / sizeof dp__library_list[0] };

typedef struct dp__told { /* a library that can be told */
    int which;            /* in the list */
    enum dp__owner owner;
    enum dp__form form;
    dp__os_fn set, get;
} dp__told;

struct dp__threads { /* of a context */
    int each;        /* on each of them */
    int count;
    dp__told told[DP__LIBRARIES];
};

static int dp__told_get(const dp__told *told)
{
    if (told->form == DP__GIVES_WIDE)
        return (int)((int64_t(*)(void))told->get)();
    return ((int (*)(void))told->get)();
}

static void dp__told_set(const dp__told *told, int count)
{
    if (told->form == DP__GIVES_WIDE)
        ((void (*)(int64_t))told->set)(count);
    else if (told->form == DP__GIVES_OLD)
        (void)((int (*)(int))told->set)(count);
    else
        ((void (*)(int))told->set)(count);
}

/* Sets the number and returns what brings back the one before, which was `old`. */
static int dp__told_swap(const dp__told *told, int count, int old)
{
    if (told->form == DP__GIVES_OLD)
        return ((int (*)(int))told->set)(count);
    dp__told_set(told, count);
    return old;
}

typedef struct dp__trial {
    const dp__told *told;
    int count;
} dp__trial;

static void *dp__trial_set(void *user)
{
    const dp__trial *trial = user;
    dp__told_set(trial->told, trial->count);
    return NULL;
}

/* Whether another thread's number is this one's too. */
static enum dp__owner dp__told_owner(const dp__told *told)
{
    int count = dp__told_get(told);
    dp__trial trial = {told, count > 0 ? count + 1 : 2};
    dp__thread thread;
    if (dp__thread_start(&thread, dp__trial_set, &trial) != 0)
        return DP__OF_PROCESS;
    dp__thread_join(thread);
    if (dp__told_get(told) == count)
        return DP__OF_THREAD;
    dp__told_set(told, count);
    return DP__OF_PROCESS;
}

enum dp__lookup { DP__IS_ABSENT, DP__CAN_BE_TOLD, DP__CANNOT_BE_TOLD };

static enum dp__lookup dp__library_find(int which, bool openmp, dp__told *out)
{
    const dp__library *library = &dp__library_list[which];
    dp__os_fn kind = library->kind != NULL ? dp__os_find(library->kind) : NULL;
    int threads = kind != NULL ? ((int (*)(void))kind)() : 1;
    if (threads == 0 || (threads == 2 && openmp) || dp__os_find(library->mark) == NULL)
        return DP__IS_ABSENT;
    *out = (dp__told){.which = which,
                      .owner = library->owner,
                      .form = library->form,
                      .set = library->set != NULL ? dp__os_find(library->set) : NULL,
                      .get = library->get != NULL ? dp__os_find(library->get) : NULL};
    return threads != 2 && out->set != NULL && out->get != NULL ? DP__CAN_BE_TOLD
                                                                : DP__CANNOT_BE_TOLD;
}

static void dp__threads_log(const dp_ctx *ctx, const dp__threads *threads, const char *when)
{
    char names[128] = "";
    for (int i = 0; i < threads->count; i++) {
        size_t used = strlen(names);
        snprintf(names + used, sizeof names - used, "%s%s",
                 i == 0                   ? ""
                 : i + 1 < threads->count ? ", "
                                          : " and ",
                 dp__library_list[threads->told[i].which].name);
    }
    if (threads->count > 0)
        dp__log(ctx, DP_LOG_INFO, "%s may use %d thread%s on each device %s (threads_per_device)",
                names, threads->each, threads->each == 1 ? "" : "s", when);
}

/* Those that can be told are in *out; those that cannot are said. */
static void dp__threads_look(const dp_ctx *ctx, const char *when, dp__threads *out)
{
    *out = (dp__threads){.each = ctx->config.threads_per_device};
    for (int i = 0; i < DP__LIBRARIES; i++) {
        bool openmp = out->count > 0 && out->told[0].which == DP__OPENMP;
        enum dp__lookup how = dp__library_find(i, openmp, &out->told[out->count]);
        out->count += how == DP__CAN_BE_TOLD;
        if (how == DP__CANNOT_BE_TOLD)
            dp__log(ctx, DP_LOG_WARN,
                    "%s cannot be told to use %d thread%s on each device: set %s=%d before the "
                    "program starts",
                    dp__library_list[i].name, out->each, out->each == 1 ? "" : "s",
                    dp__library_list[i].variable, out->each);
    }
    dp__threads_log(ctx, out, when);
}

/* Once the context has its workers, and each time the job is made anew. Without a library that can
   be told nothing is kept, and nothing is done later; where the job has one device on this machine,
   they are looked for when it has grown. */
static dp_status dp__threads_find(dp_ctx *ctx)
{
    dp__threads found;
    bool alone = ctx->info.local_count == 1 && ctx->info.machine_process_count == 1;
    if (alone || ctx->threads_sought || ctx->config.threads_per_device < 0)
        return DP_OK;
    ctx->threads_sought = true;
    dp__threads_look(ctx, "while your functions run", &found);
    for (int i = 0; i < found.count; i++)
        if (found.told[i].owner == DP__OF_EITHER)
            found.told[i].owner = dp__told_owner(&found.told[i]);
    if (found.count == 0)
        return DP_OK;
    ctx->threads = dp__host_alloc(&ctx->host, sizeof found, _Alignof(dp__threads));
    if (ctx->threads == NULL)
        return dp_error(DP_ERR_NO_MEMORY, "dp_open: no memory for %d libraries", found.count);
    *ctx->threads = found;
    return DP_OK;
}

/* ==== >>telling ==================================================================================
   A number of the thread's is set on each thread, and put back on the caller's. A worker runs no
   functions but these, so its own may stay. A number of the process' is set by the first run that
   begins, in whatever context, lowered by runs that want less, and put back by the last to end.
   dp_threads_limit lowers what will be put back, too.                                           */

typedef struct dp__telling { /* of one run, on its caller's stack */
    const dp__threads *threads;
    unsigned fork_count;
    /* In the order of threads->told: the number that the caller had, what is told in its place, and
       what brings it back. */
    int old[DP__LIBRARIES], each[DP__LIBRARIES], before[DP__LIBRARIES];
    struct dp__telling *outer; /* on the same thread */
} dp__telling;

static _Thread_local dp__telling *dp__telling_here; /* the innermost */

static struct dp__of_process {
    unsigned fork_count;
    int running; /* runs that have begun and not ended */
    int now, before;
} dp__of_process[DP__LIBRARIES]; /* under dp__live_lock, which nobody holds while a process forks */

/* In a child of fork, runs that other threads of its parent were in have no end. */
static void dp__of_process_adopt(const dp__told *told, struct dp__of_process *state)
{
    unsigned forks = dp__os_fork_count();
    if (state->fork_count != forks && state->running > 0)
        dp__told_set(told, state->before);
    if (state->fork_count != forks)
        *state = (struct dp__of_process){.fork_count = forks};
}

static void dp__of_process_begin(const dp__told *told, int each)
{
    struct dp__of_process *state = &dp__of_process[told->which];
    dp__lock_enter(&dp__live_lock);
    dp__of_process_adopt(told, state);
    if (state->running++ == 0)
        state->now = state->before = dp__told_get(told);
    if (each < state->now)
        dp__told_set(told, state->now = each);
    dp__lock_leave(&dp__live_lock);
}

static void dp__of_process_end(const dp__told *told, bool counted)
{
    struct dp__of_process *state = &dp__of_process[told->which];
    dp__lock_enter(&dp__live_lock);
    dp__of_process_adopt(told, state);
    if (counted && --state->running == 0 && dp__told_get(told) != state->before)
        dp__told_set(told, state->before);
    dp__lock_leave(&dp__live_lock);
}

/* What one of the runs that go on now on this thread brings back. */
static void dp__telling_lower(dp__telling *telling, const dp__told *told, int each)
{
    for (int i = 0; i < telling->threads->count; i++)
        if (telling->threads->told[i].which == told->which && each < telling->old[i])
            telling->old[i] = telling->before[i] = each;
}

/* For good. Runs that go on now, here or of other contexts, do not bring the old number back. */
static void dp__told_lower(const dp__told *told, int each)
{
    struct dp__of_process *state = &dp__of_process[told->which];
    for (dp__telling *run = dp__telling_here; run != NULL; run = run->outer)
        dp__telling_lower(run, told, each);
    dp__lock_enter(&dp__live_lock);
    dp__of_process_adopt(told, state);
    if (each < state->before)
        state->before = each;
    if (each < dp__told_get(told))
        dp__told_set(told, state->now = each);
    dp__lock_leave(&dp__live_lock);
}

DP_API dp_status dp_threads_limit(dp_ctx *ctx)
{
    dp__threads found;
    DP_TRY(dp__check_ctx(__func__, ctx));
    DP_TRY(dp__check_alone(__func__, ctx));
    if (ctx->config.threads_per_device < 0)
        return DP_OK;
    dp__threads_look(ctx, "from now on", &found);
    for (int i = 0; i < found.count; i++)
        dp__told_lower(&found.told[i], found.each);
    return DP_OK;
}

/* On the caller's thread, before functions run. The caller's own number, where that is less, is
   theirs too. Returns NULL if there is nothing to tell, else `out`. */
static const dp__telling *dp__telling_begin(const dp_ctx *ctx, dp__telling *out)
{
    const dp__threads *threads = ctx->threads;
    if (threads == NULL)
        return NULL;
    *out = (dp__telling){
        .threads = threads, .fork_count = dp__os_fork_count(), .outer = dp__telling_here};
    dp__telling_here = out;
    for (int i = 0; i < threads->count; i++) {
        const dp__told *told = &threads->told[i];
        if (told->owner == DP__OF_PROCESS) {
            dp__of_process_begin(told, threads->each);
            continue;
        }
        int old = out->old[i] = dp__told_get(told);
        out->each[i] = old < threads->each ? old : threads->each;
        if (out->each[i] > 0) /* BLIS says -1 where nobody has set it, and uses one thread */
            out->before[i] = dp__told_swap(told, out->each[i], old);
    }
    return out;
}

/* On each other thread, before it runs one. */
static void dp__telling_worker(const dp__telling *telling)
{
    const dp__threads *threads = telling->threads;
    for (int i = 0; i < threads->count; i++)
        if (threads->told[i].owner == DP__OF_THREAD && telling->each[i] > 0)
            dp__told_set(&threads->told[i], telling->each[i]);
}

/* On the caller's thread, when all have returned. */
static void dp__telling_end(const dp__telling *telling)
{
    if (telling == NULL)
        return;
    const dp__threads *threads = telling->threads;
    dp__telling_here = telling->outer;
    for (int i = 0; i < threads->count; i++) {
        if (threads->told[i].owner == DP__OF_PROCESS)
            dp__of_process_end(&threads->told[i], telling->fork_count == dp__os_fork_count());
        else if (telling->each[i] > 0)
            dp__told_set(&threads->told[i], telling->before[i]);
    }
}

#endif /* DP__ROOMS */

/* The licence is at the end of dp.h. */
