/* trace.h - how long the simulator's work would take: a part of sim_cuda.c.

   While a trace is on, what streams are given is listed. At its end the list is played: a piece of
   work begins when its stream, and the links that it needs, are free; of all that could begin the
   one that can earliest does. A GPU has one link in and one out to other GPUs, and one in and one
   out to pinned memory; each carries one copy at a time. What the host gave after it had waited for
   an event begins after that event.                                                             */

#ifndef SIM_TRACE_H
#define SIM_TRACE_H

enum { TRACE_ACTORS = 256, TRACE_DEVICES = 64 };

static const double link_bytes_us = 350e3, host_bytes_us = 55e3, memory_bytes_us = 2400e3;
static const double start_us = 2;

/* Of links the first is of device 0, and so on. */
enum { TRACE_OUT, TRACE_IN = 64, TRACE_HOST_OUT = 128, TRACE_HOST_IN = 192, TRACE_LINKS = 256 };

typedef struct trace_item {
    enum { TRACE_WORK, TRACE_RECORD, TRACE_WAIT } kind;
    int actor, from, to; /* links; -1: none */
    double us;
    uint64_t serial; /* of a record */
    size_t waits;    /* so many times the host had waited */
} trace_item;

typedef struct trace_wait { /* of the host */
    uint64_t serial;
    double over; /* less than 0: not yet */
} trace_wait;

static trace_item *trace_items;
static size_t trace_count, trace_room;
static trace_wait *trace_waits;
static size_t trace_wait_count;
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
    item.waits = trace_wait_count;
    trace_items[trace_count++] = item;
}

static void trace_host_wait(uint64_t serial)
{
    if (!trace_on)
        return;
    trace_waits = realloc(trace_waits, (trace_wait_count + 1) * sizeof *trace_waits);
    trace_waits[trace_wait_count++] = (trace_wait){serial, -1};
}

static void trace_copy(int actor, int from, int to, size_t bytes)
{
    bool link = from != to;
    if (trace_on && link) {
        trace_out[from] += bytes;
        trace_in[to] += bytes;
    }
    trace_add((trace_item){.actor = actor,
                           .from = link ? TRACE_OUT + from : -1,
                           .to = link ? TRACE_IN + to : -1,
                           .us = start_us + (link ? (double)bytes / link_bytes_us
                                                  : 2 * (double)bytes / memory_bytes_us)});
}

static void trace_host_copy(int actor, int device, bool out, size_t bytes)
{
    trace_add((trace_item){.actor = actor,
                           .from = (out ? TRACE_HOST_OUT : TRACE_HOST_IN) + device,
                           .to = -1,
                           .us = start_us + (double)bytes / host_bytes_us});
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
    double actor[TRACE_ACTORS], links[TRACE_LINKS];
    size_t next[TRACE_ACTORS]; /* the item that an actor comes to */
    double *reached;           /* by serial; less than 0: not yet */
    uint64_t serials;
    size_t waits; /* of the host that are over */
} trace_clock;

static double later(double a, double b)
{
    return a > b ? a : b;
}

/* Less than 0: not yet. What was recorded before the trace is done. */
static double trace_reached(const trace_clock *clock, uint64_t serial)
{
    return serial < clock->serials ? clock->reached[serial] : 0;
}

/* When the host has waited so many times; less than 0: not yet. */
static double trace_host(trace_clock *clock, size_t waits)
{
    double before = clock->waits > 0 ? trace_waits[clock->waits - 1].over : 0;
    while (clock->waits < waits) {
        double at = trace_reached(clock, trace_waits[clock->waits].serial);
        if (at < 0)
            return -1;
        trace_waits[clock->waits++].over = before = later(before, at);
    }
    return waits > 0 ? trace_waits[waits - 1].over : 0;
}

/* When it could begin; less than 0: it cannot yet. */
static double trace_start(trace_clock *clock, const trace_item *item)
{
    double start = clock->actor[item->actor], given = trace_host(clock, item->waits);
    double at = item->kind == TRACE_WAIT ? trace_reached(clock, item->serial) : 0;
    if (given < 0 || at < 0)
        return -1;
    start = later(later(start, given), at);
    if (item->from >= 0)
        start = later(start, clock->links[item->from]);
    return item->to >= 0 ? later(start, clock->links[item->to]) : start;
}

static void trace_seek(trace_clock *clock, int actor, size_t from)
{
    while (from < trace_count && trace_items[from].actor != actor)
        from++;
    clock->next[actor] = from;
}

/* The actor whose next item can begin first; -1: none can. */
static int trace_choose(trace_clock *clock, double *out_start)
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
    trace_count = trace_wait_count = 0;
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
            clock.links[item->from] = done;
        if (item->to >= 0)
            clock.links[item->to] = done;
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
