/* dp/activity.h - v0.2.0 - what a device or a courier is in - MIT licence

   Part of dp.h, which includes it. Whoever waits for long says for whom, and what that one is in:
   the user's function, since when, and on which thread. One thread writes that, any may read it,
   also of another process. dp/core.h writes it where a function of the user's begins and ends.

   CONTENTS (search for the tag)
     >>activity  writing and reading it, and asking a thread where it is
*/

#ifndef DP__ROOMS
#error "dp/activity.h is a part of dp.h: include dp.h"
#else

/* ==== >>activity ============================================================================== */

enum {
    DP__ACTIVITY_WORDS = 6,
    DP__ACTIVITY_NAME = DP__ACTIVITY_WORDS * sizeof(uint64_t),
    DP__ACTIVITY_BYTES = 112,
    DP__ACTIVITY_LEAST_NS = 100000000
};

/* The user's function that a device, or a courier, is in, for those that wait. */
typedef struct dp__activity {
    _Atomic uint64_t since_ns;                  /* 0: it is in none */
    _Atomic uint64_t words[DP__ACTIVITY_WORDS]; /* its name, as text */
    atomic_int thread;                          /* the system's number; 0: it has none */
} dp__activity;

/* Returns the system's number for this thread, which is asked once; a child of fork has another. */
static int dp__thread_number(void)
{
    if (dp__of_thread.number == 0 || dp__of_thread.fork_count != dp__os_fork_count()) {
        dp__of_thread.number = dp__os_thread();
        dp__of_thread.fork_count = dp__os_fork_count();
    }
    return dp__of_thread.number;
}

/* Writes what a device is in, since when, and on which thread; since_ns 0: in nothing. By the one
   thread that may. */
static void dp__activity_put(dp__activity *activity, const uint64_t *words, int thread,
                             uint64_t since_ns)
{
    atomic_store_explicit(&activity->since_ns, 0, memory_order_relaxed);
    if (since_ns == 0)
        return;
    atomic_thread_fence(memory_order_release);
    for (int i = 0; i < DP__ACTIVITY_WORDS; i++)
        atomic_store_explicit(&activity->words[i], words[i], memory_order_relaxed);
    atomic_store_explicit(&activity->thread, thread, memory_order_relaxed);
    atomic_store_explicit(&activity->since_ns, since_ns, memory_order_release);
}

/* Reads it, and returns since when; 0: it is in nothing, or was written meanwhile. */
static uint64_t dp__activity_get(const dp__activity *activity, uint64_t *words, int *out_thread)
{
    uint64_t since = atomic_load_explicit(&activity->since_ns, memory_order_acquire);
    for (int i = 0; i < DP__ACTIVITY_WORDS; i++)
        words[i] = atomic_load_explicit(&activity->words[i], memory_order_relaxed);
    *out_thread = atomic_load_explicit(&activity->thread, memory_order_relaxed);
    atomic_thread_fence(memory_order_acquire);
    return since == atomic_load_explicit(&activity->since_ns, memory_order_relaxed) ? since : 0;
}

/* Writes `before` and "logreg.forward since 4.0 s (thread 4242)", or "" if it is in no function for
   so long. */
DP__COLD static const char *dp__activity_text(const dp__activity *activity, uint64_t least_ns,
                                              const char *before, char *text)
{
    uint64_t words[DP__ACTIVITY_WORDS + 1] = {0}, now = dp__os_now_ns();
    int thread;
    uint64_t since = dp__activity_get(activity, words, &thread);
    text[0] = '\0';
    if (since != 0 && now > since && now - since >= least_ns)
        snprintf(text, DP__ACTIVITY_BYTES, "%s%s since %.1f s (thread %d)", before,
                 (const char *)words, (double)(now - since) * 1e-9, thread);
    return text;
}

/* Asks the thread that is shown, of a process of this machine, to print where it is, if $DP_STUCK
   says so. */
DP__COLD static void dp__activity_ask(const dp__activity *activity, int process_id)
{
    int thread = atomic_load_explicit(&activity->thread, memory_order_relaxed);
    if (thread != 0 && atomic_load_explicit(&activity->since_ns, memory_order_relaxed) != 0)
        dp__os_stack_ask(process_id, thread);
}

#endif /* DP__ROOMS */

/* The licence is at the end of dp.h. */
