/* trace.h - how long the simulator's work would take: a part of sim_cuda.c.

   While a trace is on, what streams are given is listed. At its end the list is played: a piece of
   work begins when its stream, and the links that it needs, are free; of all that could begin the
   one that can earliest does. A GPU has one link in and one out, which carry one copy at a time. */

#ifndef SIM_TRACE_H
#define SIM_TRACE_H

enum { TRACE_ACTORS = 256, TRACE_DEVICES = 64 };

static const double link_bytes_us = 350e3, memory_bytes_us = 2400e3, start_us = 2;

typedef struct trace_item {
    enum { TRACE_WORK, TRACE_RECORD, TRACE_WAIT } kind;
    int actor, from, to; /* devices; -1: no link */
    double us;
    uint64_t serial; /* of a record */
} trace_item;

static trace_item *trace_items;
static size_t trace_count, trace_room;
static bool trace_on;
static size_t trace_in[TRACE_DEVICES], trace_out[TRACE_DEVICES]; /* bytes */

static void trace_add(trace_item item)
{
    if (!trace_on)
        return;
    if (trace_count == trace_room) {
        trace_room = 2 * trace_room + 1024;
        trace_items = realloc(trace_items, trace_room * sizeof *trace_items);
    }
    trace_items[trace_count++] = item;
}

static void trace_copy(int actor, int from, int to, size_t bytes)
{
    bool link = from != to;
    if (trace_on && link) {
        trace_out[from] += bytes;
        trace_in[to] += bytes;
    }
    trace_add((trace_item){.actor = actor,
                           .from = link ? from : -1,
                           .to = link ? to : -1,
                           .us = start_us + (link ? (double)bytes / link_bytes_us
                                                  : 2 * (double)bytes / memory_bytes_us)});
}

static void trace_kernel(int actor, size_t bytes)
{
    trace_add((trace_item){
        .actor = actor, .from = -1, .to = -1, .us = start_us + (double)bytes / memory_bytes_us});
}

static void trace_order(int kind, int actor, uint64_t serial)
{
    trace_add((trace_item){.kind = kind, .actor = actor, .from = -1, .to = -1, .serial = serial});
}

typedef struct trace_clock { /* when each becomes free */
    double actor[TRACE_ACTORS], in[TRACE_DEVICES], out[TRACE_DEVICES];
    size_t next[TRACE_ACTORS]; /* the item that an actor comes to */
    double *reached;           /* by serial; less than 0: not yet */
    uint64_t serials;
} trace_clock;

static double later(double a, double b)
{
    return a > b ? a : b;
}

/* When it could begin; less than 0: it cannot yet. What was recorded before the trace is done. */
static double trace_start(const trace_clock *clock, const trace_item *item)
{
    double start = clock->actor[item->actor];
    if (item->kind == TRACE_WAIT && item->serial < clock->serials) {
        double at = clock->reached[item->serial];
        return at < 0 ? -1 : later(start, at);
    }
    if (item->from >= 0)
        start = later(later(start, clock->out[item->from]), clock->in[item->to]);
    return start;
}

static void trace_seek(trace_clock *clock, int actor, size_t from)
{
    while (from < trace_count && trace_items[from].actor != actor)
        from++;
    clock->next[actor] = from;
}

/* The actor whose next item can begin first; -1: none can. */
static int trace_choose(const trace_clock *clock, double *out_start)
{
    int chosen = -1;
    for (int actor = 0; actor < TRACE_ACTORS; actor++) {
        if (clock->next[actor] == trace_count)
            continue;
        double start = trace_start(clock, &trace_items[clock->next[actor]]);
        if (start >= 0 && (chosen < 0 || start < *out_start)) {
            chosen = actor;
            *out_start = start;
        }
    }
    return chosen;
}

static void trace_clock_open(trace_clock *clock)
{
    *clock = (trace_clock){0};
    for (size_t i = 0; i < trace_count; i++)
        if (trace_items[i].serial >= clock->serials)
            clock->serials = trace_items[i].serial + 1;
    clock->reached = calloc(clock->serials + 1, sizeof *clock->reached);
    for (size_t i = 0; i < trace_count; i++)
        if (trace_items[i].kind == TRACE_RECORD)
            clock->reached[trace_items[i].serial] = -1;
    for (int actor = 0; actor < TRACE_ACTORS; actor++)
        trace_seek(clock, actor, 0);
}

void sim_trace_begin(void)
{
    trace_on = true;
    trace_count = 0;
    memset(trace_in, 0, sizeof trace_in);
    memset(trace_out, 0, sizeof trace_out);
}

double sim_trace_end(void)
{
    static trace_clock clock;
    double start = 0, end = 0;
    trace_on = false;
    trace_clock_open(&clock);
    for (int actor; (actor = trace_choose(&clock, &start)) >= 0;) {
        const trace_item *item = &trace_items[clock.next[actor]];
        double done = start + item->us;
        clock.actor[actor] = done;
        if (item->kind == TRACE_RECORD)
            clock.reached[item->serial] = done;
        if (item->from >= 0)
            clock.out[item->from] = clock.in[item->to] = done;
        end = later(end, done);
        trace_seek(&clock, actor, clock.next[actor] + 1);
    }
    free(clock.reached);
    return end;
}

size_t sim_trace_bytes(int device, bool out)
{
    return out ? trace_out[device] : trace_in[device];
}

#endif /* SIM_TRACE_H */
