/* plan.c - what happens in a run: a script and its faults, drawn from a seed. See sim.h.

   The moods are kinds of trouble. Short times are as likely as long ones, and a fault often follows
   another one closely: most mistakes are made while others are mended. Some plans are about one
   thing: a job that opens, pauses, a recovery. Some faults do not come at a point, but when a
   process has done something that others are about to notice.                                   */

#include "plan.h"
#include <stdio.h>
#include <string.h>

enum { FEW = 8 }; /* steps, where it is about something else */

static uint64_t dice;

static uint64_t draw(uint64_t below)
{
    uint64_t z = (dice += 0x9e3779b97f4a7c15u);
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
    z = (z ^ z >> 27) * 0x94d049bb133111ebu;
    return below == 0 ? 0 : (z ^ z >> 31) % below;
}

/* Each power of two is as likely as each other one. */
static uint64_t draw_long(uint64_t least, uint64_t most)
{
    int doublings = 0;
    while (least << (doublings + 1) <= most)
        doublings++;
    uint64_t low = least << draw((uint64_t)doublings + 1);
    return low + draw(low);
}

enum mood { CALM, KILLS, STOPS, DARK, CUTS, STARVING, BIRTHS, ALL, MOODS };

static const unsigned char kinds_of[MOODS][SIM_FAULT_KINDS] = {
    [KILLS] = {[SIM_KILL] = 1},
    [STOPS] = {[SIM_STOP] = 3, [SIM_KILL] = 1},
    [DARK] = {[SIM_DARK] = 2, [SIM_KILL] = 1},
    [CUTS] = {[SIM_CUT] = 4, [SIM_RESET] = 1, [SIM_KILL] = 1, [SIM_LOSE] = 1},
    [STARVING] = {[SIM_NO_MEMORY] = 2, [SIM_NO_FILE_LEFT] = 2, [SIM_KILL] = 1},
    [BIRTHS] = {[SIM_BIRTH] = 3, [SIM_KILL] = 2, [SIM_STOP] = 1},
    [ALL] = {3, 3, 1, 2, 1, 1, 1, 3},
};

static sim_fault_kind draw_kind(enum mood mood)
{
    unsigned sum = 0;
    for (int i = 0; i < SIM_FAULT_KINDS; i++)
        sum += kinds_of[mood][i];
    unsigned left = (unsigned)draw(sum);
    int kind = 0;
    while (left >= kinds_of[mood][kind])
        left -= kinds_of[mood][kind++];
    return (sim_fault_kind)kind;
}

/* Not about as long as a time-out: that would be a matter of luck. */
static uint64_t draw_pause(const sim_plan *plan)
{
    uint64_t timeout_ns = (uint64_t)plan->timeout_ms * 1000000;
    switch (draw(6)) {
    case 0:
        return 5 * timeout_ns;
    case 1:
    case 2:
        return timeout_ns / 2 + draw(timeout_ns);
    default:
        return draw_long(1000, timeout_ns / 8);
    }
}

static void draw_fault(sim_plan *plan, enum mood mood, int i)
{
    sim_fault *fault = &plan->faults[i];
    const sim_fault *last = i > 0 ? &plan->faults[i - 1] : NULL;
    bool of_machine;
    fault->kind = draw_kind(mood);
    if (fault->kind == SIM_BIRTH && !plan->recovers)
        fault->kind = SIM_KILL;
    if ((fault->kind == SIM_CUT || fault->kind == SIM_RESET) && plan->machine_count == 1)
        fault->kind = SIM_STOP;
    of_machine = fault->kind == SIM_CUT || fault->kind == SIM_DARK || fault->kind == SIM_BIRTH;
    fault->a = (int)draw((uint64_t)(of_machine ? plan->machine_count : plan->process_count));
    fault->b = fault->kind == SIM_NO_MEMORY ? 1 + (int)draw(3)
               : plan->machine_count > 1
                   ? (fault->a + 1 + (int)draw((uint64_t)plan->machine_count - 1)) %
                         plan->machine_count
                   : 0;
    fault->both = draw(2) == 0;
    fault->ns = draw_pause(plan);
    if (fault->kind == SIM_CUT && draw(4) == 0)
        fault->ns = SIM_NEVER;
    if (last == NULL)
        fault->point = draw(2) == 0 ? draw(1500 * (uint64_t)plan->process_count)
                                    : draw_long(16, 30000);
    else if (draw(2) == 0)
        fault->point = last->point + draw_long(8, 8000);
    else {
        fault->point = last->point;
        fault->after_ns = draw_long(1000, 8000000000);
    }
}

static void draw_places(sim_plan *plan)
{
    plan->machine_count = 1 + (int)draw(SIM_MACHINES);
    plan->process_count = 2 + (int)draw(6);
    if (plan->machine_count > plan->process_count)
        plan->machine_count = plan->process_count;
    bool mixed = draw(4) == 0;
    for (int p = 0; p < plan->process_count; p++)
        plan->machine_of[p] = mixed && p >= plan->machine_count
                                  ? (int)draw((uint64_t)plan->machine_count)
                              : mixed ? p
                                      : p * plan->machine_count / plan->process_count;
}

static void draw_few_steps(sim_plan *plan, int most)
{
    plan->step_count = plan->step_count < most ? plan->step_count : most;
}

/* When processes of a job that opens hand over to each other, or at any point of it. */
static void draw_early_moment(sim_plan *plan, int i)
{
    sim_fault *fault = &plan->faults[i];
    fault->point = draw((i == 0 ? 100 : 400) * (uint64_t)plan->process_count);
    if (draw(2) == 0)
        return;
    fault->point = i == 0 ? 0 : fault->point;
    fault->act = (sim_act)(1 + draw(SIM_ACTS - 1));
    fault->times = (int)draw_long(1, 16);
    fault->within = "dp_open(";
}

/* Most faults are pauses about as long as the rest of the time-out: one process waits for another
   one, which waits for a third. They come while the job opens, or in its steps. */
static void draw_pauses(sim_plan *plan)
{
    bool pauses = draw(3) > 0, early = draw(4) > 0;
    plan->recovers = plan->recovers && draw(4) == 0;
    draw_few_steps(plan, early ? 2 : FEW);
    if (pauses) {
        plan->timeout_ms = (const int[]){2000, 2000, 4000, 10000}[draw(4)];
        plan->fault_count = 1 + (int)draw(2);
    }
    for (int i = 0; i < plan->fault_count; i++) {
        sim_fault *fault = &plan->faults[i];
        if (pauses)
            *fault = (sim_fault){.kind = SIM_STOP,
                                 .a = (int)draw((uint64_t)plan->process_count),
                                 .after_ns = fault->after_ns};
        if (fault->kind == SIM_BIRTH && !plan->recovers)
            fault->kind = SIM_KILL;
        if (fault->kind == SIM_STOP)
            fault->ns = (uint64_t)plan->timeout_ms * 1000 * (300 + draw(1200));
        fault->point = draw(1500 * (uint64_t)plan->process_count);
        if (early)
            draw_early_moment(plan, i);
    }
}

/* The job is stopped as a whole, as by a shell or a batch system, and goes on later. */
static void draw_sleep(sim_plan *plan)
{
    if (draw(2) == 0)
        plan->fault_count = 1;
    sim_fault *fault = &plan->faults[draw((uint64_t)plan->fault_count)];
    fault->kind = SIM_PAUSE;
    fault->ns = (uint64_t)plan->timeout_ms * 1000 * (500 + draw(4500));
}

/* Drawn last, so that the rest of a plan does not depend on it. */
static void draw_more(sim_plan *plan)
{
    plan->more = draw(2) == 0;
    for (int i = 0; i < plan->step_count && plan->more; i++)
        if (draw(3) == 0)
            plan->steps[i].kind = (sim_step)(SIM_LARGE + draw(SIM_STEP_KINDS - SIM_LARGE));
    plan->alien = plan->more && plan->machine_count > 1 && draw(2) == 0
                      ? (int)draw((uint64_t)plan->machine_count)
                      : -1;
    plan->forges = draw(2) == 0;
    if (draw(3) == 0)
        draw_pauses(plan);
    else if (plan->fault_count > 0 && draw(12) == 0)
        draw_sleep(plan);
}

/* Some jobs have several connections between two processes. By dice of its own: the rest of a plan
   does not depend on it, and the next one is drawn as ever. */
static int draw_connections(uint64_t seed)
{
    uint64_t before = dice;
    dice = ~seed * 0xd1342543de82ef95u;
    int connections = draw(4) > 0 ? 1 : 2 + (int)draw(2);
    dice = before;
    return connections;
}

/* Draws in which call a fault is to come, and sees to it that there is such a call. */
static const char *draw_within(sim_plan *plan, int i)
{
    sim_step *step = &plan->steps[draw((uint64_t)plan->step_count)].kind;
    switch (draw(8)) {
    case 0:
        plan->faults[i].point = i == 0 ? 0 : plan->faults[i].point;
        return "dp_open(";
    case 1:
        *step = plan->more && draw(2) == 0 ? SIM_MAIL : SIM_MESSAGES;
        return "dp_messages";
    case 2:
        *step = plan->more ? SIM_GROUP : *step;
        return plan->more ? "dp_open_group" : "";
    case 3:
        *step = plan->recovers ? SIM_ADMIT : *step;
        return plan->recovers ? "dp_admit(" : "";
    case 4:
    case 5:
        return plan->recovers && i > 0 ? "dp_recover(" : "";
    default:
        return "";
    }
}

/* Somebody comes after the first fault, and the last one hits another one as that one is let in. */
static void draw_newcomer(sim_plan *plan)
{
    int step = (int)draw((uint64_t)plan->step_count);
    plan->faults[1].kind = SIM_BIRTH;
    plan->faults[1].act = SIM_NO_ACT;
    plan->faults[1].after_ns = draw_long(1000, 1000000000);
    plan->faults[2].within = "dp_admit(";
    plan->fault_count = 3;
    plan->steps[step].kind = SIM_COMPUTE;
    plan->steps[step].size = 3000;
    plan->steps[step + 1].kind = SIM_ADMIT;
    plan->step_count += step + 1 == plan->step_count;
}

/* The first fault ends a job, and the others come while those that are left recover it: half of
   them to the one that has the lowest number, who proposes. There are enough that most are left.
   Somebody may come, too, and somebody be waited for afterwards. */
static void draw_recovery(sim_plan *plan)
{
    static const sim_fault_kind first[] = {SIM_KILL, SIM_KILL, SIM_KILL, SIM_STOP, SIM_DARK};
    static const sim_fault_kind then[] = {SIM_KILL, SIM_KILL, SIM_KILL,         SIM_KILL,
                                          SIM_STOP, SIM_STOP, SIM_NO_FILE_LEFT, SIM_CUT};
    for (int *p = &plan->process_count; *p < 5; ++*p)
        plan->machine_of[*p] = *p % plan->machine_count;
    plan->recovers = true;
    draw_few_steps(plan, FEW);
    plan->fault_count = 2 + (int)draw(2);
    for (int i = 0; i < 3; i++) {
        sim_fault *fault = &plan->faults[i];
        *fault = (sim_fault){.kind = i == 0 ? first[draw(5)] : then[draw(8)],
                             .a = (int)draw((uint64_t)plan->process_count),
                             .b = (int)draw((uint64_t)plan->machine_count),
                             .both = draw(2) == 0,
                             .ns = draw_pause(plan),
                             .point = draw(1500 * (uint64_t)plan->process_count)};
        if (i == 0)
            continue;
        fault->point = plan->faults[0].point;
        fault->a = draw(2) == 0 ? plan->faults[0].a == 0 : fault->a;
        fault->act = draw(2) == 0 ? SIM_SENDS : (sim_act)(1 + draw(SIM_ACTS - 1));
        fault->times = (int)draw_long(1, 32);
        fault->within = "dp_recover(";
    }
    if (draw(3) == 0)
        draw_newcomer(plan);
    int step = (int)draw((uint64_t)plan->step_count);
    if (plan->more && draw(2) == 0) {
        plan->steps[step].kind = SIM_COMPUTE;
        plan->steps[step].salt = 28; /* for long */
    }
}

/* Most mistakes are made where one process hands over to another one: some faults come there, and
   not at any point. By dice of its own, too. */
static void draw_acts(sim_plan *plan)
{
    uint64_t before = dice;
    dice = ~plan->seed * 0x9fb21c651e98df25u;
    for (int i = 0; i < plan->fault_count; i++) {
        sim_fault *fault = &plan->faults[i];
        bool any = fault->kind == SIM_RESET || fault->kind == SIM_BIRTH || fault->kind == SIM_PAUSE;
        if (any || fault->act != SIM_NO_ACT || draw(3) > 0)
            continue;
        fault->act = (sim_act)(1 + draw(SIM_ACTS - 1));
        fault->times = (int)draw_long(1, 32);
        fault->within = draw_within(plan, i);
    }
    if (draw(8) == 0)
        draw_recovery(plan);
    plan->leaves = draw(4) == 0;
    if (plan->leaves && draw(2) == 0)
        plan->steps[plan->step_count - 1].kind = plan->more ? SIM_MAIL : SIM_MESSAGES;
    dice = before;
}

void sim_plan_draw(uint64_t seed, sim_plan *plan)
{
    static const int timeouts[] = {2000, 4000, 10000, 30000};
    memset(plan, 0, sizeof *plan);
    dice = seed * 0x9e3779b97f4a7c15u + 0x1234567;
    plan->seed = seed;
    draw_places(plan);
    plan->device_count = draw(4) == 0 ? 2 : 1;
    plan->timeout_ms = timeouts[draw(4)];
    plan->recovers = draw(3) > 0;
    plan->signals = draw(2) == 0;
    plan->clocks_differ = draw(2) == 0;
    plan->strangers = draw(4) == 0;
    plan->step_count = 3 + (int)draw(18);
    for (int i = 0; i < plan->step_count; i++) {
        plan->steps[i].kind = (sim_step)draw(SIM_LARGE);
        plan->steps[i].size = (uint32_t)draw_long(1, 3000);
        plan->steps[i].salt = (uint32_t)draw(1000);
    }
    enum mood mood = (enum mood)draw(MOODS);
    plan->fault_count = mood == CALM ? 0 : 1 + (int)draw(mood == ALL ? 6 : 3);
    for (int i = 0; i < plan->fault_count; i++)
        draw_fault(plan, mood, i);
    draw_more(plan);
    plan->connections = draw_connections(seed);
    draw_acts(plan);
}

void sim_plan_print(const sim_plan *plan, FILE *out)
{
    static const char *const steps[] = {"sum",      "agree", "gather", "spread",  "barrier",
                                        "messages", "admit", "save",   "compute", "large",
                                        "mail",     "group", "reduce"};
    static const char *const faults[] = {"kill process",         "stop process",
                                         "machine goes dark",    "cut from machine",
                                         "reset a connection",   "no memory for process",
                                         "no files for process", "birth on machine",
                                         "stop all processes",   "lose a connection of process"};
    static const char *const acts[] = {"", "sends", "connects", "accepts", "wakes", "waits"};
    fprintf(out, "  %d processes of %d devices on machines", plan->process_count,
            plan->device_count);
    for (int p = 0; p < plan->process_count; p++)
        fprintf(out, " %d", plan->machine_of[p]);
    fprintf(out, ", a time-out of %d ms%s%s%s%s%s%s\n ", plan->timeout_ms,
            plan->recovers ? ", recovers" : "", plan->leaves ? ", leaves" : "",
            plan->signals ? ", signals" : "", plan->clocks_differ ? ", clocks differ" : "",
            plan->strangers ? ", strangers" : "",
            plan->alien < 0 ? ""
            : plan->forges  ? ", a forger"
                            : ", an alien");
    if (plan->connections > 1)
        fprintf(out, "  %d connections to each process\n ", plan->connections);
    for (int i = 0; i < plan->step_count; i++)
        fprintf(out, " %s", steps[plan->steps[i].kind]);
    fputc('\n', out);
    for (int i = 0; i < plan->fault_count; i++) {
        const sim_fault *f = &plan->faults[i];
        if (f->dropped)
            continue;
        fprintf(out, "  fault %d: %s", i, faults[f->kind]);
        if (f->kind != SIM_PAUSE)
            fprintf(out, " %d", f->a);
        if (f->kind == SIM_CUT)
            fprintf(out, " to %d%s", f->b, f->both ? " and back" : "");
        if (f->kind == SIM_NO_MEMORY)
            fprintf(out, ", %d times", f->b);
        if (f->kind == SIM_STOP || f->kind == SIM_CUT || f->kind == SIM_NO_FILE_LEFT ||
            f->kind == SIM_PAUSE)
            fprintf(out, " for %.3f ms", f->ns == SIM_NEVER ? -1.0 : (double)f->ns * 1e-6);
        fprintf(out, " at point %llu + %.3f ms", (unsigned long long)f->point,
                (double)f->after_ns * 1e-6);
        if (f->act != SIM_NO_ACT)
            fprintf(out, ", when it %s for the %dth time in a call of %s...", acts[f->act],
                    f->times, f->within[0] != '\0' ? f->within : "dp_");
        fputc('\n', out);
    }
}
