/* dp/metrics.h - v0.2.0 - what a job does, as a file for monitors - MIT licence

   Part of dp.h, which includes it. With $DP_METRICS = a file a thread of process 0 writes there, as
   OpenMetrics text, what examples/status.c shows of all processes (dp/job.h, >>shown). Where they
   share no board each process writes a file of its own, with its number before the ending. A reader
   finds all of a file or none. It is gone when the context is closed, so what it says is no older
   than the job.

   CONTENTS (search for the tag)
     >>kinds     what is told of each process
     >>thread    that writes
*/

#ifndef DP__ROOMS
#error "dp/metrics.h is a part of dp.h: include dp.h"
#else

#ifndef DP__METRICS_MS
#define DP__METRICS_MS 5000
#endif

enum { DP__METRICS_PATH = 1000, DP__METRICS_LINE = 256 };

typedef struct dp__metrics_report { /* the text of a file, while it is written */
    const dp__job *job;
    char *text;
    size_t room, used;
    uint64_t now_ns;
} dp__metrics_report;

/* ==== >>kinds ==================================================================================
   A kind of metrics has a line for each process, or for each of its lanes.                      */

typedef struct dp__metrics_location { /* of which process, on which lane */
    const dp__metrics_report *report;
    int process, lane;
} dp__metrics_location;

typedef enum dp__metrics_label {
    DP__METRIC_UP,
    DP__METRIC_RECOVERIES,
    DP__METRIC_STEPS,
    DP__METRIC_STEP_S,
    DP__METRIC_WAITS_FOR,
    DP__METRIC_FUNCTION_S,
    DP__METRIC_MEMORY,
    DP__METRIC_BEGUN, /* from here on for each lane */
    DP__METRIC_ENDED,
    DP__METRIC_WAIT_S,
    DP__METRIC_LATE,
    DP__METRIC_LATE_S,
    DP__METRIC_WAITED_S,
    DP__METRICS
} dp__metrics_label;

typedef struct dp__metrics_kind {
    char name[24]; /* behind "dp_" */
    bool counts;   /* it never falls */
    char help[56];
} dp__metrics_kind;

static const dp__metrics_kind dp__metrics_kinds[DP__METRICS] = {
    [DP__METRIC_UP] = {"up", false, "1: the process takes part in the job"},
    [DP__METRIC_RECOVERIES] = {"recoveries", true, "how often the job went on after a failure"},
    [DP__METRIC_STEPS] = {"steps", true, "steps that have ended"},
    [DP__METRIC_STEP_S] = {"step_seconds", false, "time of a step, lately"},
    [DP__METRIC_WAITS_FOR] = {"waits_for", false, "the process for which it waits; -1: none"},
    [DP__METRIC_FUNCTION_S] = {"function_seconds", false, "since when it is in a function"},
    [DP__METRIC_MEMORY] = {"memory_bytes", false, "its memory, without that of GPUs"},
    [DP__METRIC_BEGUN] = {"collectives_begun", true, "collectives that have begun"},
    [DP__METRIC_ENDED] = {"collectives_ended", true, "collectives that have ended"},
    [DP__METRIC_WAIT_S] = {"wait_seconds", false, "since when it waits in the one it is in"},
    [DP__METRIC_LATE] = {"late", true, "how often all others waited for it, 0.1 ms or more"},
    [DP__METRIC_LATE_S] = {"late_seconds", true, "how long all others waited for it"},
    [DP__METRIC_WAITED_S] = {"waited_seconds", true, "how long it has waited for others"},
};

static double dp__metrics_seconds(const dp__metrics_location *at, uint64_t since_ns)
{
    return since_ns != 0 && since_ns < at->report->now_ns
               ? (double)(at->report->now_ns - since_ns) * 1e-9
               : 0;
}

DP__COLD static double dp__metrics_of_lane(const dp__metrics_location *at, dp__metrics_label metric)
{
    const dp__lane_progress *lane =
        &dp__progress_of(at->report->job, at->process)->tracks[at->lane];
    unsigned begun = atomic_load(&lane->begun), ended = atomic_load(&lane->ended);
    bool waits = begun != ended && atomic_load(&lane->since) == begun;
    const double numbers[] = {begun,
                              ended,
                              dp__metrics_seconds(at, waits ? atomic_load(&lane->since_ns) : 0),
                              (double)atomic_load(&lane->late),
                              (double)atomic_load(&lane->late_ns) * 1e-9,
                              (double)atomic_load(&lane->waited_ns) * 1e-9};
    return numbers[metric - DP__METRIC_BEGUN];
}

DP__COLD static double dp__metrics_of_process(const dp__metrics_location *at,
                                              dp__metrics_label metric)
{
    const dp__job *job = at->report->job;
    const dp__progress *member = dp__progress_of(job, at->process);
    bool up = atomic_load(&member->presence) == DP__INSIDE &&
              (at->process == job->process || dp__is_alive(job, at->process));
    uint64_t since_ns = at->report->now_ns - DP__SILENT_NS;
    const double numbers[] = {up,
                              (double)atomic_load(&member->figures[DP__RECOVERIES]),
                              (double)atomic_load(&member->figures[DP__STEPS]),
                              (double)atomic_load(&member->figures[DP__STEP_NS]) * 1e-9,
                              up ? dp__awaited_by(job, DP__CALLER, at->process, since_ns) : -1,
                              dp__metrics_seconds(at, atomic_load(&member->activity.since_ns)),
                              (double)dp__os_resident_bytes(job->ids[at->process])};
    return numbers[metric];
}

/* ---- as text --------------------------------------------------------------------------------- */

DP__COLD DP_PRINTF(2, 3) static void dp__metrics_add(dp__metrics_report *report, const char *format,
                                                     ...)
{
    va_list args;
    size_t left = report->used < report->room ? report->room - report->used : 0;
    va_start(args, format);
    int more = vsnprintf(left > 0 ? report->text + report->used : NULL, left, format, args);
    va_end(args);
    report->used += more > 0 ? (size_t)more : 0;
}

/* Returns true if this process knows what another one does, and not only that it is there. */
static bool dp__metrics_knows(const dp__job *job, int process)
{
    return job->shared.data != NULL || process == job->process;
}

/* Adds a line for each process, or for each of its lanes. */
DP__COLD static void dp__metrics_add_all(dp__metrics_report *report, dp__metrics_label metric)
{
    const dp__job *job = report->job;
    bool of_lanes = metric >= DP__METRIC_BEGUN;
    for (int i = 0; i < job->process_count * DP__LANES; i++) {
        const dp__metrics_location at = {report, i / DP__LANES, i % DP__LANES};
        if (!dp__metrics_knows(job, at.process) || (!of_lanes && at.lane > 0))
            continue;
        dp__metrics_add(
            report, "dp_%s%s{run=\"%llx\",process=\"%d\"%s} %.12g\n",
            dp__metrics_kinds[metric].name, dp__metrics_kinds[metric].counts ? "_total" : "",
            (unsigned long long)job->epoch, at.process,
            !of_lanes     ? ""
            : at.lane > 0 ? ",lane=\"courier\""
                          : ",lane=\"caller\"",
            of_lanes ? dp__metrics_of_lane(&at, metric) : dp__metrics_of_process(&at, metric));
    }
}

/* Adds who the processes are: numbers of the system would make other series of all the rest. */
DP__COLD static void dp__metrics_add_who(dp__metrics_report *report)
{
    const dp__job *job = report->job;
    dp__metrics_add(report, "# TYPE dp_process info\n# HELP dp_process who it is\n");
    for (int p = 0; p < job->process_count; p++)
        if (dp__metrics_knows(job, p))
            dp__metrics_add(report,
                            "dp_process_info{run=\"%llx\",process=\"%d\",rank=\"%d\",ranks=\"%d\","
                            "pid=\"%d\",host=\"%s\",launcher=\"%s\"} 1\n",
                            (unsigned long long)job->epoch, p, job->firsts[p],
                            dp__rank_count_of(job, p), job->ids[p], job->introductions[p].host,
                            job->board->head.launcher);
}

DP__COLD static void dp__metrics_text(dp__metrics_report *report)
{
    report->used = 0;
    report->now_ns = dp__os_now_ns();
    dp__metrics_add_who(report);
    for (int i = 0; i < DP__METRICS; i++) {
        const dp__metrics_kind *kind = &dp__metrics_kinds[i];
        dp__metrics_add(report, "# TYPE dp_%s %s\n# HELP dp_%s %s\n", kind->name,
                        kind->counts ? "counter" : "gauge", kind->name, kind->help);
        dp__metrics_add_all(report, (dp__metrics_label)i);
    }
    dp__metrics_add(report, "# EOF\n");
}

/* ==== >>thread ==================================================================================
   It needs nobody's help, so the file is written while the job hangs. It is started only if the
   environment asks for it.                                                                      */

typedef struct dp__metrics {
    dp__metrics_report report;
    dp__lock lock;
    dp__wake wake;
    bool ends;
    bool failed; /* it has said so */
    dp__thread thread;
    char path[DP__METRICS_PATH];
} dp__metrics;

DP__COLD static void dp__metrics_write(dp__metrics *writer)
{
    dp__metrics_report *report = &writer->report;
    dp__metrics_text(report);
    bool whole = report->used < report->room;
    if (whole && dp__os_text_put(writer->path, report->text, report->used))
        return;
    if (!writer->failed)
        dp__log(report->job->ctx, DP_LOG_WARN, "$DP_METRICS: '%s': %s", writer->path,
                whole ? dp__os_why_text(dp__os_why()) : "no room");
    writer->failed = true;
}

DP__COLD static void *dp__metrics_run(void *user)
{
    dp__metrics *writer = user;
    dp__lock_enter(&writer->lock);
    while (!writer->ends) {
        dp__lock_leave(&writer->lock);
        dp__metrics_write(writer);
        uint64_t until_ns = dp__os_after_ms(DP__METRICS_MS);
        dp__lock_enter(&writer->lock);
        while (!writer->ends && dp__os_ms_until(until_ns) > 0)
            dp__wake_wait(&writer->wake, &writer->lock, until_ns);
    }
    dp__lock_leave(&writer->lock);
    return NULL;
}

/* Finds the file of this process: "job.prom", or, where each has one, "job.3.prom". */
DP__COLD static bool dp__metrics_name(const dp__job *job, const char *wanted, char *path)
{
    const char *slash = strrchr(wanted, '/'), *dot = strrchr(wanted, '.');
    bool ending = dot != NULL && dot > wanted && (slash == NULL || dot > slash + 1);
    int bytes = ending ? (int)(dot - wanted) : (int)strlen(wanted);
    bool one = job->shared.data != NULL || job->process_count == 1;
    size_t used = one ? dp__append(path, DP__METRICS_PATH, 0, "%s", wanted)
                      : dp__append(path, DP__METRICS_PATH, 0, "%.*s.%d%s", bytes, wanted,
                                   job->process, ending ? dot : "");
    return used < DP__METRICS_PATH;
}

DP__COLD static void dp__metrics_free(dp__metrics *writer)
{
    if (writer != NULL)
        dp__os_free(writer->report.text, 0, NULL);
    dp__os_free(writer, 0, NULL);
}

DP__COLD static dp__metrics *dp__metrics_make(const dp__job *job, const char *wanted)
{
    size_t lines = ((size_t)job->process_count * DP__LANES + 2) * (DP__METRICS + 1);
    size_t room = lines * DP__METRICS_LINE;
    dp__metrics *writer = dp__os_alloc(sizeof *writer, 64, NULL);
    if (writer == NULL)
        return NULL;
    *writer = (dp__metrics){.lock = DP__LOCK_INITIALIZER, .report = {.job = job, .room = room}};
    writer->report.text = dp__os_alloc(room, 64, NULL);
    if (writer->report.text != NULL && dp__metrics_name(job, wanted, writer->path))
        return writer;
    dp__metrics_free(writer);
    return NULL;
}

static atomic_uint dp__metrics_written; /* by a context of this process: its forks, and 1; or 0 */

/* Returns true if this process writes for the job. Groups are parts of another job; and of two
   contexts with all processes the first one is told of. */
DP__COLD static bool dp__metrics_are_wanted(const dp__job *job)
{
    bool writes = job->shared.data == NULL || job->process == 0;
    bool group = strcmp(job->ctx->info.launcher, "group") == 0;
    unsigned own = dp__os_fork_count() + 1;
    return writes && !group && atomic_exchange(&dp__metrics_written, own) != own;
}

/* Begins to write, if the environment asks for it. A job goes on if that cannot be done. */
DP__COLD static void dp__metrics_begin(dp__job *job)
{
    const char *wanted = dp__os_env("DP_METRICS");
    if (wanted == NULL || !dp__metrics_are_wanted(job))
        return;
    dp__metrics *writer = dp__metrics_make(job, wanted);
    if (writer != NULL) {
        dp__wake_init(&writer->wake);
        if (dp__thread_start(&writer->thread, dp__metrics_run, writer) == 0) {
            job->metrics = writer;
            return;
        }
        dp__wake_fini(&writer->wake);
    }
    dp__metrics_free(writer);
    atomic_store(&dp__metrics_written, 0);
    dp__log(job->ctx, DP_LOG_WARN, "$DP_METRICS: '%s' is not written: no memory, or no thread",
            wanted);
}

/* Ends it, and removes the file. */
DP__COLD static void dp__metrics_end(dp__job *job)
{
    dp__metrics *writer = job != NULL ? job->metrics : NULL;
    if (writer == NULL)
        return;
    dp__lock_enter(&writer->lock);
    writer->ends = true;
    dp__wake_signal(&writer->wake);
    dp__lock_leave(&writer->lock);
    dp__thread_join(writer->thread);
    (void)dp__os_remove(writer->path);
    dp__wake_fini(&writer->wake);
    dp__metrics_free(writer);
    job->metrics = NULL;
    atomic_store(&dp__metrics_written, 0);
}

#endif /* DP__ROOMS */

/* The licence is at the end of dp.h. */
