/* baton.c - threads, the clock, and what happens when. See sim.h.

   Threads are contexts of one real thread. Who waits names a predicate and a time; whoever gives up
   the baton looks at all of them, and draws among those that can go on. Where none can, the clock
   jumps to the next time that anything is waiting for.                                          */

#include "inside.h"
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

sim_world sim;
int sim_budget;
void (*sim_on_birth)(int machine);

/* ---- numbers --------------------------------------------------------------------------------- */

bool sim_ticks_behind;

static uint64_t roll(uint64_t *dice)
{
    uint64_t z = (*dice += 0x9e3779b97f4a7c15u);
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
    z = (z ^ z >> 27) * 0x94d049bb133111ebu;
    return z ^ z >> 31;
}

uint64_t sim_draw(uint64_t below)
{
    return below == 0 ? 0 : roll(&sim.dice) % below;
}

bool sim_one_in(unsigned n)
{
    return n != 0 && sim_draw(n) == 0;
}

bool sim_interrupted(void)
{
    return sim.plan.signals && sim_one_in(60);
}

uint64_t sim_random(void)
{
    return roll(&sim.user_dice);
}

void sim_note(uint64_t a, uint64_t b)
{
    sim.hash = (sim.hash ^ a) * 1099511628211u;
    sim.hash = (sim.hash ^ b) * 1099511628211u;
}

static void print(const char *format, va_list args)
{
    const sim_thread *me = sim.current;
    fprintf(stderr, "%14.6f ms ", (double)sim.now * 1e-6);
    if (me != NULL && me != &sim.driver)
        fprintf(stderr, " process %d.%d ", me->process, me->id);
    vfprintf(stderr, format, args);
    fputc('\n', stderr);
}

void sim_say(const char *format, ...)
{
    va_list args;
    if (sim.verbose == 0)
        return;
    va_start(args, format);
    print(format, args);
    va_end(args);
}

void sim_fail(const char *format, ...)
{
    va_list args;
    va_start(args, format);
    print(format, args);
    va_end(args);
    abort();
}

/* ---- events: a heap, by time and then by order ----------------------------------------------- */

static sim_event *heap;
static size_t heap_count, heap_room;
static uint64_t heap_order;

static bool is_before(const sim_event *a, const sim_event *b)
{
    return a->at_ns != b->at_ns ? a->at_ns < b->at_ns : a->order < b->order;
}

void sim_post(sim_event event)
{
    if (heap_count == heap_room)
        heap = realloc(heap, (heap_room = heap_room != 0 ? 2 * heap_room : 256) * sizeof *heap);
    if (heap == NULL)
        sim_fail("no memory for events");
    event.order = ++heap_order;
    size_t i = heap_count++;
    for (; i > 0 && is_before(&event, &heap[(i - 1) / 2]); i = (i - 1) / 2)
        heap[i] = heap[(i - 1) / 2];
    heap[i] = event;
}

static sim_event take_event(void)
{
    sim_event first = heap[0], last = heap[--heap_count];
    size_t i = 0;
    for (size_t child; (child = 2 * i + 1) < heap_count; i = child) {
        child += child + 1 < heap_count && is_before(&heap[child + 1], &heap[child]);
        if (!is_before(&heap[child], &last))
            break;
        heap[i] = heap[child];
    }
    if (heap_count > 0)
        heap[i] = last;
    return first;
}

static void run_events(void)
{
    while (heap_count > 0 && heap[0].at_ns <= sim.now) {
        sim_event event = take_event();
        event.fn(&event);
        free(event.data);
    }
}

/* ---- the baton ------------------------------------------------------------------------------- */

/* A predicate is its thread's: it means that process' descriptors. */
static bool is_ready(sim_thread *thread)
{
    sim_thread *me = sim.current;
    sim.current = thread;
    bool ready = thread->ready != NULL && thread->ready(thread->arg);
    sim.current = me;
    return ready;
}

static bool can_go_on(sim_thread *thread)
{
    return thread->state == SIM_RUNNABLE || thread->until_ns <= sim.now || is_ready(thread);
}

/* When this thread may go on whatever happens. */
static uint64_t wakes_at(const sim_thread *thread)
{
    uint64_t stopped = sim.procs[thread->process].stopped_until_ns;
    stopped = thread->stalled_ns > stopped ? thread->stalled_ns : stopped;
    if (stopped > sim.now)
        return stopped;
    return thread->until_ns;
}

static bool is_held_up(const sim_thread *thread)
{
    return thread->stalled_ns > sim.now || sim.procs[thread->process].stopped_until_ns > sim.now;
}

static sim_thread *pick(void)
{
    for (;;) {
        sim_thread *can[SIM_THREADS];
        int can_count = 0, left = 0;
        uint64_t next = SIM_NEVER;
        run_events();
        for (int i = 0; i < sim.thread_count; i++) {
            sim_thread *thread = &sim.threads[i];
            if (thread->state != SIM_RUNNABLE && thread->state != SIM_WAITING)
                continue;
            left++;
            if (!is_held_up(thread) && can_go_on(thread))
                can[can_count++] = thread;
            else if (wakes_at(thread) < next)
                next = wakes_at(thread);
        }
        if (can_count > 0)
            return can[sim_draw((uint64_t)can_count)];
        if (heap_count > 0 && left > 0 && heap[0].at_ns < next)
            next = heap[0].at_ns;
        if (left == 0 || next == SIM_NEVER || next > sim.limit_ns) {
            sim.verdict = left == 0 ? SIM_DONE : next == SIM_NEVER ? SIM_STUCK : SIM_LATE;
            return &sim.driver;
        }
        sim.now = next;
    }
}

/* Puts the thread's own part of its library where the library expects it. */
static void bring_locals(sim_thread *to)
{
    sim_proc *proc = &sim.procs[to->process];
    if (proc->running == to)
        return;
    if (proc->running != NULL)
        memcpy(proc->running->locals, proc->locals, proc->locals_bytes);
    memcpy(proc->locals, to->locals, proc->locals_bytes);
    proc->running = to;
}

static void refill(void)
{
    sim_budget = sim.hop > 1 ? (int)sim_draw(2 * sim.hop) : 0;
}

/* The caller's state says whether it may go on. */
static void switch_away(void)
{
    sim_thread *me = sim.current, *to = pick();
    sim_note((uint64_t)to->id, sim.now);
    refill();
    if (to == me)
        return;
    sim.switches++;
    sim.current = to;
    if (to != &sim.driver)
        bring_locals(to);
    if (swapcontext(&me->context, &to->context) != 0)
        sim_fail("no context");
}

/* ---- faults ---------------------------------------------------------------------------------- */

void sim_hit(sim_proc *proc, uint64_t until_ns)
{
    proc->hit_ns = sim.now;
    proc->hit_until_ns = until_ns > proc->hit_until_ns ? until_ns : proc->hit_until_ns;
    sim.hit_ns = sim.hit_ns != 0 ? sim.hit_ns : sim.now;
}

/* A pause that every job has to outlast. */
static bool is_short(uint64_t ns)
{
    return sim.plan.timeout_ms >= 10000 && ns <= (uint64_t)sim.plan.timeout_ms * 1000000 / 8;
}

static uint64_t later(uint64_t ns)
{
    return ns < SIM_NEVER - sim.now ? sim.now + ns : SIM_NEVER;
}

static void pause_process(sim_proc *proc, uint64_t ns)
{
    if (is_short(ns))
        proc->hit_ns = sim.now;
    else
        sim_hit(proc, later(ns));
}

static void end_threads_of(int process, bool but_current)
{
    for (int i = 0; i < sim.thread_count; i++) {
        sim_thread *thread = &sim.threads[i];
        if (thread->process == process && thread->state != SIM_OVER &&
            !(but_current && thread == sim.current))
            thread->state = SIM_DEAD;
    }
}

static void kill_process(int process, bool silent)
{
    sim_proc *proc = &sim.procs[process];
    if (proc->dead || proc->over)
        return;
    proc->dead = true;
    sim_hit(proc, SIM_NEVER);
    sim_say("** process %d is killed%s", process, silent ? " with its machine" : "");
    end_threads_of(process, false);
    sim_wire_end_of(process, silent);
    sim_disk_end_of(process);
}

/* No cut ends an earlier one: what that has dropped for good is not to be followed by anything. */
static void cut(int from, int to, uint64_t ns)
{
    if (sim.cut_until[from][to] == 0)
        sim.cut_since[from][to] = sim.now;
    if (later(ns) > sim.cut_until[from][to])
        sim.cut_until[from][to] = later(ns);
    for (int i = 0; i < sim.proc_count; i++)
        if (sim.procs[i].machine == from || sim.procs[i].machine == to)
            sim.procs[i].was_cut = true, pause_process(&sim.procs[i], ns);
}

static void stop_process(sim_proc *proc, uint64_t ns)
{
    if (proc->dead || proc->over)
        return;
    proc->stopped_until_ns = later(ns);
    proc->was_stopped = true;
}

static void darken(int machine)
{
    sim.machines[machine].dark = true;
    for (int i = 0; i < sim.proc_count; i++)
        if (sim.procs[i].machine == machine)
            kill_process(i, true);
}

static void happen(const sim_fault *fault)
{
    sim_proc *proc = &sim.procs[fault->a % sim.proc_count];
    int machine = fault->a % sim.plan.machine_count;
    switch (fault->kind) {
    case SIM_KILL:
        kill_process(fault->a % sim.proc_count, false);
        break;
    case SIM_STOP:
        if (proc->dead || proc->over)
            break;
        stop_process(proc, fault->ns);
        pause_process(proc, fault->ns);
        sim_say("** process %d is stopped for %.6f ms", fault->a, (double)fault->ns * 1e-6);
        break;
    case SIM_DARK:
        darken(machine);
        break;
    case SIM_CUT:
        sim_say("** nothing gets from machine %d to %d%s for %.6f ms", machine,
                fault->b % sim.plan.machine_count, fault->both ? " and back" : "",
                (double)fault->ns * 1e-6);
        cut(machine, fault->b % sim.plan.machine_count, fault->ns);
        if (fault->both)
            cut(fault->b % sim.plan.machine_count, machine, fault->ns);
        break;
    case SIM_RESET:
        sim_wire_reset();
        break;
    case SIM_NO_MEMORY:
        sim_say("** process %d gets no memory %d times", fault->a, fault->b);
        proc->refused = fault->b;
        proc->was_starved = true;
        sim_hit(proc, SIM_NEVER);
        break;
    case SIM_NO_FILE_LEFT:
        sim_say("** process %d may open nothing for %.6f ms", fault->a, (double)fault->ns * 1e-6);
        proc->files_until_ns = later(fault->ns);
        proc->was_starved = true;
        sim_hit(proc, SIM_NEVER);
        break;
    case SIM_BIRTH:
        if (sim.proc_count < SIM_PROCESSES && !sim.machines[machine].dark)
            sim_on_birth(machine);
        break;
    case SIM_PAUSE:
        sim_say("** all processes are stopped for %.6f ms", (double)fault->ns * 1e-6);
        sim.paused_ns = sim.paused_ns != 0 ? sim.paused_ns : sim.now;
        for (int i = 0; i < sim.proc_count; i++)
            stop_process(&sim.procs[i], fault->ns);
        break;
    case SIM_LOSE:
        proc->loses = true;
        break;
    case SIM_FAULT_KINDS:
        break;
    }
}

static void on_fault(sim_event *event)
{
    const sim_fault *fault = &sim.plan.faults[event->a];
    if (sim.next_fault > event->a)
        return; /* what it waited for has come */
    sim.next_fault = event->a + 1;
    sim.awaited = 0;
    sim.armed = false;
    sim.fault_ns = sim.now;
    sim.moments[sim.moment_count++] = sim.now;
    sim.moments[sim.moment_count++] = later(fault->ns);
    happen(fault);
}

static void post_fault(uint64_t at_ns, void (*fn)(sim_event *event))
{
    sim_post((sim_event){.at_ns = at_ns, .fn = fn, .a = sim.next_fault});
}

/* It happens all the same if that process does no such thing. */
static void on_await(sim_event *event)
{
    sim.awaited = sim.plan.faults[event->a].times;
    post_fault(sim.now + (uint64_t)sim.plan.timeout_ms * 500000, on_fault);
}

/* Returns true if the running process is in a call whose name begins like this. */
bool sim_is_within(const char *call)
{
    return strncmp(sim_me()->story->where, call, strlen(call)) == 0;
}

/* Notes what the running process has just done: a fault may wait for that, and a thread may be held
   up a few points later. */
void sim_did(sim_act act)
{
    if (sim_one_in(sim.pause))
        sim.current->stalls_after = 1 + (unsigned)sim_draw(16);
    const sim_fault *fault = &sim.plan.faults[sim.next_fault];
    if (sim.awaited == 0 || fault->act != act || !sim_is_within(fault->within))
        return;
    bool of_machine = fault->kind == SIM_CUT || fault->kind == SIM_DARK;
    bool its = of_machine ? fault->a % sim.plan.machine_count == sim_machine()
                          : fault->a % sim.proc_count == sim_process();
    if (its && --sim.awaited == 0)
        post_fault(sim.now, on_fault);
}

static void arm_next(void)
{
    if (sim.armed || sim.next_fault >= sim.plan.fault_count)
        return;
    const sim_fault *fault = &sim.plan.faults[sim.next_fault];
    if (fault->dropped) {
        sim.next_fault++;
        return;
    }
    if (sim.points < fault->point)
        return;
    sim.armed = true;
    post_fault(sim.fault_ns + fault->after_ns, fault->act != SIM_NO_ACT ? on_await : on_fault);
}

/* ---- points ---------------------------------------------------------------------------------- */

static void step(uint64_t ns)
{
    sim.points++;
    sim.now += ns;
    arm_next();
    if (heap_count > 0 && heap[0].at_ns <= sim.now)
        run_events();
    bool due = sim.current->stalls_after > 0 && --sim.current->stalls_after == 0;
    if (sim_one_in(sim.stall) || due)
        sim.current->stalled_ns = sim.now + sim_draw(20000000);
}

void sim_point(const char *doing)
{
    step(200 + sim_draw(800));
    if (sim.current->state == SIM_RUNNABLE && !is_held_up(sim.current) && !sim_one_in(4))
        return;
    sim.current->doing = doing;
    switch_away();
}

void sim_spent(void)
{
    refill();
    sim_point("atomic");
}

bool sim_wait(const char *doing, sim_ready *ready, void *arg, uint64_t until_ns)
{
    sim_thread *me = sim.current;
    step(200 + sim_draw(800));
    if (me->state == SIM_RUNNABLE)
        me->state = SIM_WAITING;
    me->doing = doing;
    me->ready = ready;
    me->arg = arg;
    me->until_ns = sim_to_global(sim_machine(), until_ns);
    switch_away();
    me->state = SIM_RUNNABLE;
    me->until_ns = SIM_NEVER;
    return ready != NULL && ready(arg);
}

/* A core may not go from one thread to another within a few microseconds: the others wait. */
void sim_pass(uint64_t ns)
{
    if (ns > 10000) {
        sim_wait("computes", NULL, NULL, sim_now() + ns);
        return;
    }
    step(ns);
    sim.current->doing = "computes";
    switch_away();
}

/* ---- clocks ---------------------------------------------------------------------------------- */

uint64_t sim_time(void)
{
    return sim.now;
}

static uint64_t to_local(int machine, uint64_t ns)
{
    uint64_t rate = sim.machines[machine].rate;
    return (ns >> 10) * rate + ((ns & 1023) * rate >> 10) +
           (uint64_t)sim.machines[machine].ahead_ns;
}

/* The first moment at which that clock says so. */
uint64_t sim_to_global(int machine, uint64_t local_ns)
{
    uint64_t rate = sim.machines[machine].rate, ahead = (uint64_t)sim.machines[machine].ahead_ns;
    if (local_ns == SIM_NEVER || local_ns <= ahead)
        return local_ns == SIM_NEVER ? SIM_NEVER : 0;
    uint64_t ns = local_ns - ahead;
    return ns / rate * 1024 + (ns % rate * 1024 + rate - 1) / rate + 1024;
}

uint64_t sim_now(void)
{
    sim.now += 30;
    sim_tick();
    return to_local(sim_machine(), sim.now);
}

uint64_t sim_wall(void)
{
    return sim_now() + sim.machines[sim_machine()].wall_ns;
}

/* ---- threads and processes ------------------------------------------------------------------- */

sim_proc *sim_me(void)
{
    return &sim.procs[sim.current->process];
}

int *sim_why(void)
{
    return &sim.current->why;
}

static void thread_main(void)
{
    sim_thread *me = sim.current;
    (void)me->fn(me->user);
    me->state = SIM_OVER;
    switch_away();
}

static int thread_begin(int process, void *(*fn)(void *user), void *user)
{
    enum { STACK = 256 << 10 };
    if (sim.thread_count == SIM_THREADS)
        sim_fail("too many threads");
    sim_thread *thread = &sim.threads[sim.thread_count];
    *thread = (sim_thread){.state = SIM_RUNNABLE,
                           .id = sim.thread_count++,
                           .process = process,
                           .fn = fn,
                           .user = user,
                           .doing = "begins",
                           .until_ns = SIM_NEVER,
                           .locals = calloc(1, sim.procs[process].locals_bytes)};
    void *stack = mmap(NULL, STACK, PROT_READ | PROT_WRITE,
                       MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (stack == MAP_FAILED || thread->locals == NULL || getcontext(&thread->context) != 0 ||
        mprotect(stack, 4096, PROT_NONE) != 0)
        sim_fail("no memory for a thread");
    thread->context.uc_stack.ss_sp = stack;
    thread->context.uc_stack.ss_size = STACK;
    makecontext(&thread->context, thread_main, 0);
    return thread->id;
}

int sim_thread_start(void *(*fn)(void *user), void *user)
{
    if (!sim_take())
        return -1;
    sim_give();
    int id = thread_begin(sim.current->process, fn, user);
    sim_point("starts a thread");
    return id;
}

static bool is_over(void *arg)
{
    return ((sim_thread *)arg)->state == SIM_OVER;
}

void sim_thread_join(int id)
{
    sim_wait("joins a thread", is_over, &sim.threads[id], SIM_NEVER);
}

static void *process_main(void *user)
{
    sim_proc *proc = user;
    proc->main(proc->story);
    proc->over = true;
    int id = (int)(proc - sim.procs);
    sim_say("-- process %d ends", id);
    end_threads_of(id, true);
    sim_wire_end_of(id, false);
    sim_disk_end_of(id);
    return NULL;
}

int sim_process_begin(int machine, sim_program *main, sim_locals *locals, sim_story *story)
{
    int id = sim.proc_count++;
    sim_proc *proc = &sim.procs[id];
    *proc = (sim_proc){.machine = machine, .begun_ns = sim.now, .main = main, .story = story};
    locals(&proc->locals, &proc->locals_bytes);
    thread_begin(id, process_main, proc);
    return id;
}

int sim_process(void)
{
    return sim.current->process;
}

int sim_machine(void)
{
    return sim_me()->machine;
}

const char *sim_env(const char *name)
{
    const sim_proc *proc = sim_me();
    size_t bytes = strlen(name);
    for (int i = 0; i < proc->env_count; i++)
        if (strncmp(proc->env[i], name, bytes) == 0 && proc->env[i][bytes] == '=')
            return proc->env[i] + bytes + 1;
    return NULL;
}

void sim_env_of(int process, const char *name, const char *text)
{
    sim_proc *proc = &sim.procs[process];
    size_t bytes = strlen(name);
    for (int i = 0; i < proc->env_count; i++)
        if (strncmp(proc->env[i], name, bytes) == 0 && proc->env[i][bytes] == '=') {
            proc->env[i] = proc->env[--proc->env_count];
            break;
        }
    if (text == NULL)
        return;
    size_t room = bytes + strlen(text) + 2;
    char *own = malloc(room);
    if (own == NULL || proc->env_count == SIM_ENVS)
        sim_fail("no room in the environment");
    snprintf(own, room, "%s=%s", name, text);
    proc->env[proc->env_count++] = own;
}

void sim_env_set(const char *name, const char *text)
{
    sim_env_of(sim.current->process, name, text);
}

void sim_log(const char *line)
{
    sim_say("log: %.*s", (int)strcspn(line, "\n"), line);
}

bool sim_take(void)
{
    sim_proc *proc = sim_me();
    if (proc->refused > 0) {
        proc->refused--;
        return false;
    }
    proc->taken++;
    return true;
}

void sim_give(void)
{
    sim_me()->taken--;
}

bool sim_leftovers(char *text, size_t room)
{
    const sim_proc *proc = sim_me();
    int threads = 0;
    for (int i = 0; i < sim.thread_count; i++)
        threads += sim.threads[i].process == sim.current->process &&
                   sim.threads[i].state != SIM_OVER && &sim.threads[i] != sim.current;
    snprintf(text, room, "%d threads, %d descriptors, %d pieces of memory", threads, proc->files,
             (int)proc->taken);
    return threads != 0 || proc->files != 0 || proc->taken != 0;
}

/* ---- a run ----------------------------------------------------------------------------------- */

void sim_begin(const sim_plan *plan, int verbose)
{
    static const unsigned hops[] = {5, 20, 100, 1000}, shorts[] = {0, 2, 4, 20},
                          stalls[] = {0, 0, 300, 3000}, pauses[] = {0, 0, 0, 10};
    sim.plan = *plan;
    sim_ticks_behind = plan->more;
    sim.verbose = verbose;
    sim.dice = plan->seed * 0x2545f4914f6cdd1du + 1;
    sim.user_dice = roll(&sim.dice);
    sim.hash = 14695981039346656037u;
    sim.now = sim.fault_ns = 1000000000;
    sim.limit_ns = sim.now + 600000000000;
    sim.current = &sim.driver;
    sim.driver.id = -1;
    sim.hop = hops[sim_draw(4)];
    sim.shorts = shorts[sim_draw(4)];
    sim.stall = stalls[sim_draw(4)];
    sim.pause = pauses[sim_draw(4)];
    if (plan->more && plan->seed % 4 == 0)
        sim.stall = 100;
    for (int i = 0; i < SIM_MACHINES; i++) { /* clocks differ in speed by less than 0.2 % */
        sim.machines[i].rate = plan->clocks_differ ? 1024 + (uint32_t)sim_draw(64) % 3 : 1024;
        sim.machines[i].ahead_ns = plan->clocks_differ ? (int64_t)sim_draw(3600000000000) : 0;
        sim.machines[i].wall_ns = 1700000000000000000u + sim_draw(2000000000);
    }
    sim_wire_begin();
    sim_disk_begin();
}

int sim_go(void)
{
    sim_thread *to = pick();
    if (to != &sim.driver) {
        sim.current = to;
        bring_locals(to);
        if (swapcontext(&sim.driver.context, &to->context) != 0)
            sim_fail("no context");
    }
    return sim.verdict;
}

/* Writes where each thread is. */
void sim_show(void)
{
    static const char *const states[] = {"free", "runs", "waits", "over", "dead"};
    fprintf(stderr, "at %.6f ms; hop %u, shorts %u, stall %u\n", (double)sim.now * 1e-6, sim.hop,
            sim.shorts, sim.stall);
    for (int i = 0; i < sim.thread_count; i++) {
        const sim_thread *thread = &sim.threads[i];
        if (thread->state != SIM_OVER)
            fprintf(stderr, "  thread %d of process %d %s: %s until %.3f ms\n", i, thread->process,
                    states[thread->state], thread->doing,
                    thread->until_ns == SIM_NEVER ? -1 : (double)thread->until_ns * 1e-6);
    }
}
