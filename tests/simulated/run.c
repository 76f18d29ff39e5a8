/* run.c - runs seeds, judges each run, and shortens what fails. See sim.h.

     run SEEDS [FIRST]            so many seeds from FIRST (1) on; the last line counts them
     run =SEED [WITHOUT...]       one seed in this process, with its trace in words
     options before them: -j N    so many at a time
                          -l DIR  where process0.so, process1.so ... are
                          -t      prints the hash of each trace
                          -2      runs each seed twice, and compares these
                          -s      shortens nothing
                          -1      the same, and stops at the first seed that fails

   WITHOUT: fN without fault N, sN with N steps only, -signals, -clocks, -strangers, -devices,
   -alien.

   A run breaks a rule if
     a  somebody waits for ever, or a program crashes, or uses a descriptor that it has closed
     b  a sum, a message or what is gathered is wrong
     c  something is left when a context is closed: memory, threads, descriptors
     d  a call fails later than its time-out and two seconds after the last thing that happened
        in it (collectives: than two time-outs), or takes a time-out more than there are faults
     e  nothing has happened to a job yet but short pauses, or long ones of all, and it fails; not
        as it opens: the time for that is that of a clock. Or all that has happened to those that
        are in it was over before they began the calls in which it fails
     f  a process that nothing has happened to fails without recovery, or in a call that is no
        failure of the job; and it names none to whom something has happened, or blames another
        one than it names
     g  two groups are in the job of one number; or one is in an older job while another one goes on
     h  most processes are well, and yet not all of these go on
     i  processes of one machine are told of the failure of their job, and not the same
     j  a file that was saved is another one in the end, or part of one                          */

#define _GNU_SOURCE
#include "inside.h"
#include "plan.h"
#include <dlfcn.h>
#include <errno.h>
#include <signal.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/personality.h>
#include <sys/time.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

enum { REPORT = 8000, GRACE_MS = 2000, NUMBERS = 64, JOBS = 64 };

/* From when it is known why a call fails, until it has told all and fails. */
enum { WORDS_NS = 200000000 };

typedef struct result {
    char broken[12]; /* letters of rules */
    char report[REPORT];
    size_t used;
    uint64_t hash, points, switches, time_ns;
    bool over;
} result;

typedef struct totals {
    uint64_t runs, bad, points, switches, time_ns;
} totals;

static sim_program *programs[SIM_PROCESSES];
static sim_locals *locals[SIM_PROCESSES];
static sim_story stories[SIM_PROCESSES];
static result *found; /* shared with the child that runs */
static totals *sums;
static uint64_t *stops_at; /* no seed behind this one is run */

static void report(const char *format, ...) __attribute__((format(printf, 1, 2)));

static void report(const char *format, ...)
{
    va_list args;
    va_start(args, format);
    int more = vsnprintf(found->report + found->used, REPORT - found->used, format, args);
    va_end(args);
    found->used += more > 0 ? (size_t)more : 0;
    found->used = found->used < REPORT - 1 ? found->used : REPORT - 1;
}

static void break_rule(char rule, const char *format, ...) __attribute__((format(printf, 2, 3)));

static void break_rule(char rule, const char *format, ...)
{
    char text[800];
    size_t rules = strlen(found->broken);
    va_list args;
    va_start(args, format);
    vsnprintf(text, sizeof text, format, args);
    va_end(args);
    report("  *%c %s\n", rule, text);
    if (strchr(found->broken, rule) == NULL && rules < sizeof found->broken - 1)
        found->broken[rules] = rule;
}

static bool is_well(int p)
{
    const sim_proc *proc = &sim.procs[p];
    return !proc->dead && proc->hit_ns == 0;
}

/* ---- what the judge hears while it goes on --------------------------------------------------- */

static struct {
    int roster[SIM_PROCESSES], count; /* who is which process of it; count 0: nobody has said so */
    unsigned members;                 /* the same, a bit each */
    uint64_t first_ns;                /* when the first one was in it */
    bool failed;                      /* one of them has been told so */
    char said[600];                   /* how, where all are to say the same; "": nobody has yet */
    int blamed;                       /* whose fault that is */
} jobs[NUMBERS];

static int64_t last_saved = -1;

void sim_has_saved(int64_t stamp)
{
    last_saved = stamp > last_saved ? stamp : last_saved;
}

void sim_is_in(int number, const int *roster, int count)
{
    unsigned members = 0;
    for (int i = 0; i < count; i++)
        members |= 1u << roster[i];
    sim_say("-- is in job %d with members %x", number, members);
    if (number < 0 || number >= NUMBERS)
        return;
    if (jobs[number].first_ns == 0) {
        memcpy(jobs[number].roster, roster, (size_t)count * sizeof *roster);
        jobs[number].count = count;
        jobs[number].members = members;
        jobs[number].first_ns = sim_time();
    }
    if (jobs[number].count != count ||
        memcmp(jobs[number].roster, roster, (size_t)count * sizeof *roster) != 0)
        break_rule('g', "job %d has the members %x, and %x, or these in another order", number,
                   jobs[number].members, members);
}

/* Returns true if something has happened to those of a job since the first of them began the call
   that it is in, or lasted until then; or to one that was to be let in. */
static bool was_hit(int number)
{
    uint64_t begun_ns = SIM_NEVER;
    bool hit = sim.paused_ns != 0;
    for (int p = 0; p < sim.proc_count; p++)
        if ((jobs[number].members >> p & 1) != 0 && stories[p].called_ns < begun_ns)
            begun_ns = stories[p].called_ns;
    for (int p = 0; p < sim.proc_count; p++) {
        bool counts = p >= sim.plan.process_count || (jobs[number].members >> p & 1) != 0;
        hit = hit || (counts && sim.procs[p].hit_until_ns >= begun_ns);
    }
    return hit;
}

static bool is_starved(int number)
{
    bool starved = false;
    for (int p = 0; p < sim.proc_count; p++)
        starved = starved || ((jobs[number].members >> p & 1) != 0 && sim.procs[p].was_starved);
    return starved;
}

/* Behind names of functions and files. */
static const char *sentence_of(const char *text)
{
    const char *collective = strstr(text, "collective "), *next = text;
    while (collective == NULL && strncmp(text, "dp_", 3) == 0 && next != NULL) {
        next = strstr(text, ": ");
        text = next != NULL ? next + 2 : text;
    }
    return collective != NULL ? collective : text;
}

/* Processes of one machine have one board, unless one has had no memory for it. */
static void judge_sentence(int number, const char *text, int blamed)
{
    const char *said = sentence_of(text);
    if (jobs[number].said[0] == '\0') {
        snprintf(jobs[number].said, sizeof jobs[number].said, "%s", said);
        jobs[number].blamed = blamed;
    }
    if (strncmp(jobs[number].said, said, sizeof jobs[number].said - 1) != 0)
        break_rule('i', "process %d is told that job %d has failed: %s; another one: %s",
                   sim_process(), number, said, jobs[number].said);
    if (jobs[number].blamed != blamed)
        break_rule('i',
                   "job %d has failed because of %d, process %d is told, and another one of %d",
                   number, blamed, sim_process(), jobs[number].blamed);
}

void sim_has_failed(int number, const char *text, int blamed)
{
    bool counts = number >= 0 && number < NUMBERS && jobs[number].first_ns != 0;
    sim_say("-- has failed in job %d: %s", number, text);
    if (!counts)
        return;
    if (!jobs[number].failed && !was_hit(number))
        break_rule('e', "process %d fails in job %d, and nothing has happened to it: %s",
                   sim_process(), number, text);
    jobs[number].failed = true;
    if (sim.plan.machine_count == 1 && is_well(sim_process()) && !is_starved(number))
        judge_sentence(number, text, blamed);
}

/* What the others gave before may still come, if one of them is in the later job; so it may before
   it is known who they are. */
void sim_went_well(int number, uint64_t begun_ns)
{
    if (number < 0 || number >= NUMBERS || jobs[number].first_ns == 0)
        return;
    for (int later = number + 1; later < NUMBERS; later++)
        if (jobs[later].first_ns != 0 && jobs[later].first_ns < begun_ns &&
            (jobs[later].members & jobs[number].members) == 0)
            break_rule('g', "process %d goes on in job %d, %.3f ms after job %d has begun",
                       sim_process(), number, (double)(begun_ns - jobs[later].first_ns) * 1e-6,
                       later);
}

/* ---- a run ----------------------------------------------------------------------------------- */

static void number_of(int process, const char *name, int number)
{
    char text[16];
    snprintf(text, sizeof text, "%d", number);
    sim_env_of(process, name, text);
}

static int count_on(const sim_plan *plan, int machine, int below)
{
    int count = 0;
    for (int p = 0; p < below; p++)
        count += plan->machine_of[p] == machine;
    return count;
}

/* Begins a process with the environment that a launcher would give it. */
static void begin(const sim_plan *plan, int machine, bool comes)
{
    int p = sim.proc_count, seat = comes ? 0 : p;
    stories[p] = (sim_story){.plan = plan, .where = "nothing", .blamed = -1};
    sim_process_begin(machine, programs[p], locals[p], &stories[p]);
    sim_say("-- process %d begins on machine %d", p, machine);
    sim_env_of(p, "DP_ADDR", plan->machine_count > 1 ? "10.0.0.1:29500" : "@sim");
    number_of(p, "DP_PROCESS_COUNT", plan->process_count);
    number_of(p, "DP_PROCESS", seat);
    number_of(p, "DP_LOCAL_PROCESS", comes ? 0 : count_on(plan, machine, p));
    number_of(p, "DP_LOCAL_PROCESS_COUNT", count_on(plan, machine, plan->process_count));
    number_of(p, "DP_PROCESS_LIMIT", plan->process_count + 3);
    if (plan->connections > 1)
        number_of(p, "DP_CONNECTIONS", plan->connections + comes); /* which does not count */
    if (comes)
        sim_env_of(p, "DP_REJOIN", "1");
    if (plan->machine_count == 1)
        sim_env_of(p, "DP_INTERFACE", "eth0");
    if (sim.verbose > 1)
        sim_env_of(p, "DP_DEBUG", "trace");
}

/* Comes to the place of this job, as one of its numbers, or as one that comes later. */
static void begin_alien(const sim_plan *plan)
{
    int p = sim.proc_count;
    bool first = plan->alien == plan->machine_of[0] && sim_one_in(2);
    begin(plan, plan->alien, !first && sim_one_in(3));
    number_of(p, "DP_PROCESS", first ? 0 : (int)sim_draw((uint64_t)plan->process_count));
    number_of(p, "DP_LOCAL_PROCESS", 0);
    sim_env_of(p, "DP_SECRET", "another one");
    if (plan->forges)
        sim_env_of(p, "SIM_FORGES", "1");
}

static void on_birth(int machine)
{
    begin(&sim.plan, machine, true);
}

/* Returns the process that has this number in the job of a story, as sentences count; -1: none. */
static int who_is(const sim_story *story, int number)
{
    int job = story->recoveries < NUMBERS ? story->recoveries : 0;
    if (jobs[job].count == 0)
        return number < sim.proc_count ? number : -1;
    return number < jobs[job].count ? jobs[job].roster[number] : -1;
}

/* "rank 3", "ranks 3 to 5", "processes 2 and 4", "processes 1, 2 and 4" */
static bool names_number(const char *text, int p)
{
    const char *const words[] = {"rank ", "ranks ", "process ", "processes "};
    for (int i = 0; i < 4; i++)
        for (const char *at = text; (at = strstr(at, words[i])) != NULL; at++) {
            int each = i < 2 ? sim.plan.device_count : 1, last = -1;
            const char *number = at + strlen(words[i]);
            if (at - text >= 6 && strncmp(at - 6, "local ", 6) == 0)
                continue; /* "local rank 0": of the one that fails */
            for (int skip = 0; *number >= '0' && *number <= '9'; number += skip) {
                char *end;
                int which = (int)strtol(number, &end, 10) / each;
                bool range = number - at > 4 && strncmp(number - 4, " to ", 4) == 0;
                if (which == p || (range && last >= 0 && last < p && p < which))
                    return true;
                last = which;
                skip = strncmp(end, " and ", 5) == 0  ? 5
                       : strncmp(end, " to ", 4) == 0 ? 4
                       : strncmp(end, ", ", 2) == 0   ? 2
                                                      : 0;
                number = end;
            }
        }
    return false;
}

/* Returns true if the sentence of a story names process p. */
static bool names(const sim_story *story, int p)
{
    bool named = false;
    for (int number = 0; number < SIM_PROCESSES && !named; number++)
        named = who_is(story, number) == p && names_number(story->text, number);
    return named;
}

static bool is_mute(int p, uint64_t at_ns)
{
    return sim.procs[p].dead || sim.procs[p].stopped_until_ns > at_ns;
}

static bool is_cut(int from, int to, uint64_t at_ns)
{
    int a = sim.procs[from].machine, b = sim.procs[to].machine;
    return sim.cut_since[a][b] <= at_ns && at_ns < sim.cut_until[a][b];
}

/* Returns true if process p closed its context before process q failed, and its job was well. */
static bool has_left_before(int p, int q)
{
    return !stories[p].lost && stories[p].failed_ns < stories[q].failed_ns;
}

/* Returns true if words of process q do not get to p: they go up the tree, and down again. One that
   computes passes none on. */
static bool cannot_hear(int p, int q, uint64_t at_ns)
{
    int teller = q;
    bool busy = stories[p].busy;
    while (p != q) {
        int *below = p > q ? &p : &q, parent = *below & (*below - 1);
        if (below == &p ? is_cut(parent, p, at_ns) : is_cut(q, parent, at_ns))
            return true;
        *below = parent;
        bool passes = !is_mute(parent, at_ns - WORDS_NS) && !stories[parent].busy;
        if (p != q && (!passes || has_left_before(parent, teller)))
            return true;
    }
    return busy || is_mute(p, at_ns - WORDS_NS);
}

/* Returns true if one whose link was cut says the same: who waits for what it waits for goes round
   in a circle where only one way is cut, and it names one of that. */
static bool says_what_one_says_who_was_cut(int who)
{
    bool some = false;
    for (int p = 0; p < sim.proc_count; p++)
        some = some || (sim.procs[p].was_cut &&
                        strcmp(sentence_of(stories[p].text), sentence_of(stories[who].text)) == 0);
    return some;
}

/* Where a link was cut, or one had no memory, nobody is at fault, and none may be named; nor where
   one that was stopped has gone on meanwhile. One may be named that computes for long after it has
   waited for one who was hit; or has left, where not all end together; or has failed before because
   of such a one, if it cannot be heard. One that dies while it tells why names nobody. */
static bool names_one_who_was_hit(int who)
{
    const sim_story *story = &stories[who];
    bool somebody = false, at_fault = false;
    if (says_what_one_says_who_was_cut(who))
        return true;
    for (int p = 0; p < sim.proc_count; p++) {
        bool named = names(story, p);
        if (named && (!is_well(p) || stories[p].busy || has_left_before(p, who)))
            return true;
        if (named && p != who && stories[p].failed_ns < story->failed_ns &&
            cannot_hear(who, p, story->failed_ns) && names_one_who_was_hit(p))
            return true;
        somebody = somebody || named;
        at_fault = at_fault || is_mute(p, story->failed_ns);
    }
    return !somebody && (!at_fault || strstr(story->text, "died before it could report") != NULL);
}

/* By then nothing had happened to any process but short pauses. */
static bool is_before_all(uint64_t ns)
{
    return sim.hit_ns == 0 || ns < sim.hit_ns;
}

/* All have been stopped by then: contexts that open, and groups, may fail, as they have the time of
   a clock. */
static bool is_late(uint64_t ns)
{
    return sim.paused_ns != 0 && sim.paused_ns < ns;
}

/* A call that fails does so in time, counted from what has happened last in it; collectives also
   from when the last one has begun them. One that goes well may have waited anew after each thing
   that has happened. */
static void judge_time(int p)
{
    const sim_call *good = &stories[p].longest[0], *bad = &stories[p].longest[1];
    uint64_t timeout = (uint64_t)sim.plan.timeout_ms * 1000000, grace = GRACE_MS * 1000000ull;
    uint64_t hit = 0; /* the last one in it, so long after its begin */
    for (int i = 0; i < sim.moment_count; i++)
        if (sim.moments[i] > bad->begun_ns + hit && sim.moments[i] < bad->begun_ns + bad->ns)
            hit = sim.moments[i] - bad->begun_ns;
    if (sim.procs[p].was_stopped)
        return;
    bool meets = bad->name != NULL && (strncmp(bad->name, "dp_open(", 8) == 0 ||
                                       strncmp(bad->name, "dp_recover(", 11) == 0);
    if (bad->ns > hit + (meets ? 1 : 2) * timeout + grace)
        break_rule('d', "%d: %.40s failed after %.1f ms", p, bad->name, (double)bad->ns * 1e-6);
    if (good->ns > timeout * (1 + (uint64_t)sim.plan.fault_count) + grace)
        break_rule('d', "%d: %.40s took %.1f ms", p, good->name, (double)good->ns * 1e-6);
}

static bool names_anybody(const sim_story *story)
{
    bool any = false;
    for (int p = 0; p < sim.proc_count; p++)
        any = any || names(story, p);
    return any;
}

/* Some have waited for others in a job inside the job, and so for long: they may be missed. */
static bool somebody_was_held_up(void)
{
    bool some = false;
    for (int p = 0; p < sim.proc_count; p++)
        some = some || stories[p].hurt[0] != '\0';
    return some;
}

/* A link between two machines does not heal: they reach others, and no job can be made of them. */
static bool is_divided(uint64_t ns)
{
    bool any = false;
    for (int from = 0; from < sim.plan.machine_count; from++)
        for (int to = 0; to < sim.plan.machine_count; to++)
            any = any || (from != to && sim.cut_until[from][to] >= ns);
    return any;
}

/* Returns true for one that others need not wait for: it has waited for long in a job inside the
   job, for one that was silent. A death is known at once. */
static bool was_apart(int p)
{
    bool silence = false;
    for (int q = 0; q < sim.proc_count; q++)
        silence = silence || sim.procs[q].was_stopped || sim.procs[q].was_cut ||
                  sim.machines[sim.procs[q].machine].dark;
    return silence && stories[p].apart_ns > (uint64_t)sim.plan.timeout_ms * 250000;
}

/* In which a job opens that nothing happens to, also with strangers at its ports. */
enum { OPENS_NS = 1500000000 };

/* Returns true if all that has happened is that processes were stopped, and not for so long in all
   that a job which opens has no time left. */
static bool has_time_to_open(void)
{
    uint64_t timeout_ns = (uint64_t)sim.plan.timeout_ms * 1000000, stopped_ns = 0;
    bool only = true;
    for (int i = 0; i < sim.next_fault; i++) {
        const sim_fault *fault = &sim.plan.faults[i];
        only = only && (fault->dropped || fault->kind == SIM_STOP);
        stopped_ns += fault->dropped ? 0 : fault->ns;
    }
    return only && stopped_ns + OPENS_NS < timeout_ns;
}

static void judge_failure(int p, bool some_done, int well, int begun)
{
    const sim_story *story = &stories[p];
    bool majority = sim.plan.machine_count == 1 || 2 * well > begun;
    bool recovers = sim.plan.recovers && (story->lost || !story->opened);
    int blamed = story->blamed >= 0 ? who_is(story, story->blamed) : -1;
    bool excused = !story->opened && is_late(story->failed_ns);
    if (is_before_all(story->failed_ns) && !excused)
        break_rule('e', "%d fails, and nothing has happened", p);
    else if (!story->opened && has_time_to_open())
        break_rule('e', "%d fails, and there was time to open", p);
    if (is_before_all(story->failed_ns) || excused || somebody_was_held_up())
        return;
    if (!recovers && is_well(p) && !names_one_who_was_hit(p))
        break_rule('f', "%d names none to whom something has happened", p);
    else if (!recovers && is_well(p) && blamed >= 0 && blamed != p && is_well(blamed) &&
             names_anybody(story) && !names(story, blamed))
        break_rule('f', "%d blames %d, which it does not name", p, blamed);
    else if (recovers && is_well(p) && story->opened && majority && !some_done && !was_apart(p) &&
             !is_divided(story->tried_ns))
        break_rule('h', "%d is well, and does not go on", p);
    bool missed = is_well(p) && story->opened && !was_apart(p) && !is_divided(story->tried_ns);
    for (int number = 1; number < NUMBERS && missed; number++)
        if (jobs[number].first_ns != 0 && jobs[number].first_ns < story->failed_ns &&
            (jobs[number].members >> p & 1) == 0 && number > story->recoveries)
            break_rule('h', "%d is well, and not in job %d", p, number);
}

static void describe(int p)
{
    const sim_proc *proc = &sim.procs[p];
    const sim_story *story = &stories[p];
    const sim_call *longest = &story->longest[story->longest[1].ns > story->longest[0].ns];
    report("   %d%s%s%s%s: %s, %d steps, %d of %d in job %d, %d tries, longest %.1f ms in %.30s\n",
           p, proc->was_stopped ? " (stopped)" : "", proc->was_cut ? " (cut)" : "",
           proc->was_starved ? " (starved)" : "", p >= sim.plan.process_count ? " (came)" : "",
           proc->dead    ? "killed"
           : story->done ? "done"
                         : "failed",
           story->steps, story->rank, story->count, story->recoveries, story->tries,
           (double)longest->ns * 1e-6, longest->name != NULL ? longest->name : "nothing");
    if (!proc->dead && !story->done)
        report("      in %.40s at %.3f ms: %s\n", story->where, (double)story->failed_ns * 1e-6,
               story->text);
}

static void judge(int verdict)
{
    bool some_done = false;
    int well = 0;
    if (verdict != SIM_DONE)
        break_rule('a', verdict == SIM_STUCK ? "nobody can go on" : "it takes longer than an hour");
    for (int p = 0; p < sim.proc_count; p++) {
        some_done = some_done || stories[p].done;
        well += is_well(p) && stories[p].opened;
    }
    for (int p = 0; p < sim.proc_count; p++) {
        const sim_story *story = &stories[p];
        describe(p);
        if (story->wrong[0] != '\0')
            break_rule('b', "%d: %s", p, story->wrong);
        if (sim.procs[p].dead || verdict != SIM_DONE)
            continue;
        if (story->left_over)
            break_rule('c', "%d leaves %s", p, story->left);
        judge_time(p);
        if (story->hurt[0] != '\0' && is_before_all(story->hurt_ns) && !is_late(story->hurt_ns))
            break_rule('e', "%d: %s, and nothing has happened", p, story->hurt);
        if (!story->done && p < sim.plan.process_count)
            judge_failure(p, some_done, well, sim.proc_count);
    }
}

/* A save that has failed may be there all the same, if it is a later one. */
static void judge_file(void)
{
    int64_t stamp = -1;
    size_t bytes = 0;
    const char *data = sim_disk_look(SIM_FILE, &bytes);
    if (bytes >= sizeof stamp)
        memcpy(&stamp, data + bytes - sizeof stamp, sizeof stamp);
    if (stamp < last_saved)
        break_rule('j', "the file has %llx, and %llx was saved", (unsigned long long)stamp,
                   (unsigned long long)last_saved);
}

/* Strangers hold some of the ports that a job may want. */
static void place_strangers(const sim_plan *plan)
{
    for (int machine = 0; plan->strangers && machine < plan->machine_count; machine++)
        for (int port = 29500; port < 29516; port++)
            if (sim_one_in(4) && port != 29500)
                sim_stranger(machine, port);
}

static void run_plan(const sim_plan *plan, int verbose)
{
    memset(found, 0, sizeof *found);
    sim_begin(plan, verbose);
    sim_on_birth = on_birth;
    place_strangers(plan);
    for (int p = 0; p < plan->process_count; p++)
        begin(&sim.plan, plan->machine_of[p], false);
    if (plan->alien >= 0)
        begin_alien(&sim.plan);
    int verdict = sim_go();
    judge(verdict);
    judge_file();
    if (verbose != 0 && verdict != SIM_DONE)
        sim_show();
    found->hash = sim.hash;
    found->points = sim.points;
    found->switches = sim.switches;
    found->time_ns = sim.now;
    found->over = true;
}

/* In a process of its own: all begins as it was, and a crash is that run's alone. */
static void run_apart(const sim_plan *plan)
{
    int status = 0;
    found->over = false;
    fflush(NULL);
    pid_t child = fork();
    if (child == 0) {
        setitimer(ITIMER_PROF, &(struct itimerval){.it_value = {.tv_sec = 60}}, NULL);
        if (freopen("/dev/null", "w", stderr) == NULL)
            _exit(2);
        run_plan(plan, 0);
        _exit(0);
    }
    while (waitpid(child, &status, 0) < 0 && errno == EINTR) {
    }
    if (found->over)
        return;
    found->used = strlen(found->report);
    break_rule('a', "%s", WIFSIGNALED(status) ? strsignal(WTERMSIG(status)) : "it has ended early");
}

/* ---- shortening ------------------------------------------------------------------------------ */

static bool edit(sim_plan *plan, const char *what)
{
    int number = atoi(what + 1);
    if (what[0] == 'f' && number < plan->fault_count)
        plan->faults[number].dropped = true;
    else if (what[0] == 's' && number <= plan->step_count)
        plan->step_count = number;
    else if (strcmp(what, "-signals") == 0)
        plan->signals = false;
    else if (strcmp(what, "-clocks") == 0)
        plan->clocks_differ = false;
    else if (strcmp(what, "-strangers") == 0)
        plan->strangers = false;
    else if (strcmp(what, "-devices") == 0)
        plan->device_count = 1;
    else if (strcmp(what, "-alien") == 0)
        plan->alien = -1;
    else
        return false;
    return true;
}

/* Keeps each edit after which the same rule is broken still. */
static void shorten(sim_plan *plan, char *edits, size_t room)
{
    char list[SIM_FAULTS + 12][20], rule = found->broken[0];
    int count = 0;
    for (int i = 0; i < plan->fault_count; i++)
        snprintf(list[count++], sizeof list[0], "f%d", i);
    for (int steps = 1; steps < plan->step_count && count < SIM_FAULTS + 8; steps *= 2)
        snprintf(list[count++], sizeof list[0], "s%d", steps);
    for (int i = 0; i < 5; i++)
        strcpy(list[count++],
               (const char *[]){"-signals", "-clocks", "-strangers", "-devices", "-alien"}[i]);
    edits[0] = '\0';
    for (int i = 0; i < count; i++) {
        sim_plan shorter = *plan;
        if (!edit(&shorter, list[i]) || memcmp(&shorter, plan, sizeof shorter) == 0)
            continue;
        run_apart(&shorter);
        if (strchr(found->broken, rule) == NULL)
            continue;
        *plan = shorter;
        size_t used = strlen(edits);
        snprintf(edits + used, room - used, " %.20s", list[i]);
    }
    run_apart(plan);
}

/* ---- the driver ------------------------------------------------------------------------------ */

static void load(const char *folder)
{
    for (int p = 0; p < SIM_PROCESSES; p++) {
        char path[400];
        snprintf(path, sizeof path, "%.300s/process%d.so", folder, p);
        void *library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
        void *main = library != NULL ? dlsym(library, "sim_main") : NULL;
        void *of_threads = library != NULL ? dlsym(library, "sim_thread_locals") : NULL;
        if (main == NULL || of_threads == NULL) {
            fprintf(stderr, "%s\n", dlerror());
            exit(2);
        }
        memcpy(&programs[p], &main, sizeof main);
        memcpy(&locals[p], &of_threads, sizeof of_threads);
    }
}

static void *common(size_t bytes)
{
    void *data = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (data == MAP_FAILED)
        exit(2);
    return data;
}

static void print_failure(uint64_t seed, bool shortens)
{
    char edits[200] = "";
    sim_plan plan;
    sim_plan_draw(seed, &plan);
    if (shortens)
        shorten(&plan, edits, sizeof edits);
    printf("not ok %llu - rule %s: SEED=%llu WITHOUT='%s'\n", (unsigned long long)seed,
           found->broken, (unsigned long long)seed, edits + (edits[0] == ' '));
    sim_plan_print(&plan, stdout);
    fputs(found->report, stdout);
    fflush(stdout);
}

typedef struct options {
    bool twice, traces, shortens, stops;
} options;

static void run_seed(uint64_t seed, const options *how)
{
    sim_plan plan;
    sim_plan_draw(seed, &plan);
    run_apart(&plan);
    uint64_t hash = found->hash;
    if (how->traces)
        printf("%llu %016llx %llu\n", (unsigned long long)seed, (unsigned long long)hash,
               (unsigned long long)found->points);
    sums->runs++;
    sums->points += found->points;
    sums->switches += found->switches;
    sums->time_ns += found->time_ns;
    bool bad = found->broken[0] != '\0';
    if (bad)
        print_failure(seed, how->shortens);
    if (!bad && how->twice) {
        run_apart(&plan);
        bad = found->hash != hash;
        if (bad)
            printf("not ok %llu - it is another run the second time\n", (unsigned long long)seed);
    }
    sums->bad += bad;
    uint64_t before = __atomic_load_n(stops_at, __ATOMIC_SEQ_CST);
    while (bad && how->stops && seed < before &&
           !__atomic_compare_exchange_n(stops_at, &before, seed, false, __ATOMIC_SEQ_CST,
                                        __ATOMIC_SEQ_CST)) {
    }
}

/* Each worker has every so-manyth seed. */
static void run_seeds(uint64_t first, uint64_t count, int workers, const options *how)
{
    totals *all = common(sizeof *all * JOBS), sum = {0};
    struct timespec begun, ended;
    stops_at = common(sizeof *stops_at);
    *stops_at = UINT64_MAX;
    clock_gettime(CLOCK_MONOTONIC, &begun);
    for (int w = 0; w < workers; w++)
        if (fork() == 0) {
            found = common(sizeof *found);
            sums = &all[w];
            for (uint64_t i = (uint64_t)w;
                 i < count && first + i < __atomic_load_n(stops_at, __ATOMIC_SEQ_CST);
                 i += (uint64_t)workers)
                run_seed(first + i, how);
            fflush(stdout);
            _exit(0);
        }
    while (wait(NULL) > 0) {
    }
    for (int w = 0; w < workers; w++) {
        sum.runs += all[w].runs;
        sum.bad += all[w].bad;
        sum.points += all[w].points;
        sum.switches += all[w].switches;
        sum.time_ns += all[w].time_ns;
    }
    clock_gettime(CLOCK_MONOTONIC, &ended);
    double s = (double)(ended.tv_sec - begun.tv_sec) +
               (double)(ended.tv_nsec - begun.tv_nsec) * 1e-9;
    double runs = sum.runs > 0 ? (double)sum.runs : 1;
    printf("%s seeds %llu to %llu, %.0f a second; each %.0f points, %.0f exchanges of "
           "threads and %.2f s of virtual time\n",
           sum.bad > 0 ? "#" : "ok -", (unsigned long long)first,
           (unsigned long long)(first + count - 1), runs / s, (double)sum.points / runs,
           (double)sum.switches / runs, (double)sum.time_ns * 1e-9 / runs - 1);
    printf("%llu passed, %llu failed\n", (unsigned long long)(sum.runs - sum.bad),
           (unsigned long long)sum.bad);
    exit(sum.bad > 0 || sum.runs != count);
}

static void replay(uint64_t seed, char **edits)
{
    sim_plan plan;
    sim_plan_draw(seed, &plan);
    for (; *edits != NULL; edits++)
        if (!edit(&plan, *edits)) {
            fprintf(stderr, "%s is no edit of this plan\n", *edits);
            exit(2);
        }
    sim_plan_print(&plan, stderr);
    found = common(sizeof *found);
    run_plan(&plan, getenv("QUIET") != NULL ? 0 : getenv("DEBUG") != NULL ? 2 : 1);
    printf("seed %llu: %s%s, trace %016llx\n%s", (unsigned long long)seed,
           found->broken[0] != '\0' ? "breaks rule " : "good", found->broken,
           (unsigned long long)found->hash, found->report);
    exit(found->broken[0] != '\0');
}

int main(int argc, char **argv)
{
    const char *folder = "build/simulated";
    int workers = 1;
    options how = {.shortens = true};
    if ((personality(0xffffffff) & ADDR_NO_RANDOMIZE) == 0 && getenv("SIM_AGAIN") == NULL) {
        setenv("SIM_AGAIN", "1", 1);
        if (personality(ADDR_NO_RANDOMIZE) != -1)
            execv("/proc/self/exe", argv);
    }
    for (int c; (c = getopt(argc, argv, "+j:l:t2s1")) != -1;) {
        if (c == 'j')
            workers = atoi(optarg) < JOBS ? atoi(optarg) : JOBS;
        else if (c == 'l')
            folder = optarg;
        else if (c == 't')
            how.traces = true;
        else if (c == '2')
            how.twice = true;
        else if (c == 's' || c == '1')
            how.shortens = false, how.stops = how.stops || c == '1';
        else
            return 2;
    }
    if (optind >= argc)
        return 2;
    load(folder);
    if (argv[optind][0] == '=')
        replay(strtoull(argv[optind] + 1, NULL, 0), argv + optind + 1);
    run_seeds(optind + 1 < argc ? strtoull(argv[optind + 1], NULL, 0) : 1,
              strtoull(argv[optind], NULL, 0), workers, &how);
}
