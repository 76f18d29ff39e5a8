/* wire.c - descriptors, and connections. See sim.h.

   Between machines all takes a while, which differs each time, in order on each connection. What is
   cut off comes once the cut has ended, as senders try again; what a machine that is gone was to
   send never comes. Who closes with unread bytes, or is sent something after it has closed, sends a
   reset; bytes that came before it can still be read. There is no descriptor that two processes
   have. */

#include "inside.h"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { SOCKETS = 4096, DESCRIPTORS = 512, FIRST = 100, BACKLOG = 64, WHOLE = 512 };

typedef struct waiting {
    int socket; /* of the server's end; -1: it has hung up */
} waiting;

typedef struct socket_t {
    bool used, listens, connecting, failed, refused, closed, ended, reset, silent, said_end;
    unsigned generation;
    int process; /* -1: a stranger's */
    sim_place own, far;
    int peer; /* -1: none yet */
    char *data;
    size_t head, count, room, most, unacked;
    uint64_t last_ns; /* when the last thing that was sent to it arrives */
    waiting queue[BACKLOG];
    int queued;
} socket_t;

static struct {
    int kind, object;
} descriptors[SIM_PROCESSES][DESCRIPTORS];
static socket_t sockets[SOCKETS];
static int socket_count, next_port;
static size_t most;
static uint64_t lag_of[SIM_MACHINES][SIM_MACHINES];

/* ---- descriptors: the lowest number that is free, as systems have it ------------------------- */

int sim_descriptor(int process, int kind, int object)
{
    sim_proc *proc = &sim.procs[process];
    if (proc->files_until_ns > sim.now)
        return -1;
    for (int i = 0; i < DESCRIPTORS; i++) {
        if (descriptors[process][i].kind != 0)
            continue;
        descriptors[process][i].kind = kind;
        descriptors[process][i].object = object;
        proc->files++;
        return FIRST + i;
    }
    return -1;
}

int sim_object(int fd, int kind)
{
    int i = fd - FIRST, process = sim.current->process;
    bool good = i >= 0 && i < DESCRIPTORS && descriptors[process][i].kind == kind;
    if (!good && fd >= 0)
        sim_fail("descriptor %d is %s", fd,
                 i >= 0 && i < DESCRIPTORS && descriptors[process][i].kind == 0
                     ? "closed"
                     : "of another kind");
    return good ? descriptors[process][i].object : -1;
}

static void descriptor_free(int process, int i)
{
    descriptors[process][i].kind = 0;
    sim.procs[process].files--;
}

/* ---- sockets --------------------------------------------------------------------------------- */

static socket_t *socket_of(int fd)
{
    int i = sim_object(fd, SIM_FD_SOCKET);
    return i >= 0 ? &sockets[i] : NULL;
}

static int socket_new(int process, const sim_place *own)
{
    int i = 0;
    while (i < socket_count && sockets[i].used)
        i++;
    if (i == SOCKETS)
        sim_fail("too many sockets");
    socket_count += i == socket_count;
    unsigned generation = sockets[i].generation + 1;
    free(sockets[i].data);
    sockets[i] = (socket_t){.used = true,
                            .generation = generation,
                            .process = process,
                            .own = *own,
                            .peer = -1,
                            .most = most};
    return i;
}

static int index_of(const socket_t *s)
{
    return (int)(s - sockets);
}

static socket_t *peer_of(const socket_t *s)
{
    return s->peer >= 0 ? &sockets[s->peer] : NULL;
}

/* A socket is free once both ends are closed, and nothing is on its way. */
static void maybe_free(socket_t *s)
{
    socket_t *peer = peer_of(s);
    if (!s->closed || (peer != NULL && !peer->closed))
        return;
    if (peer != NULL)
        peer->used = false, peer->generation++;
    s->used = false;
    s->generation++;
}

static bool is_dark(const socket_t *s)
{
    return s->silent || sim.machines[s->own.machine].dark;
}

/* When what is sent now from one machine to another arrives; SIM_NEVER: not at all. */
static uint64_t arrival(int from, int to, bool inside)
{
    if (inside || from == to)
        return sim.now + (inside ? 0 : 2000 + sim_draw(4000));
    if (sim.machines[from].dark || sim.machines[to].dark)
        return SIM_NEVER;
    uint64_t lag = lag_of[from][to] + sim_draw(lag_of[from][to]);
    uint64_t cut = sim.cut_until[from][to];
    if (cut <= sim.now)
        return sim.now + lag;
    return cut == SIM_NEVER ? SIM_NEVER : cut + lag + sim_draw(200000000); /* sent once more */
}

static void send_event(socket_t *to, void (*fn)(sim_event *event), const void *data, size_t bytes)
{
    uint64_t at = arrival(to->far.machine, to->own.machine, to->own.inside);
    if (at == SIM_NEVER || to->silent)
        return;
    at = at > to->last_ns ? at : to->last_ns;
    to->last_ns = at;
    sim_event event = {
        .at_ns = at, .fn = fn, .a = index_of(to), .generation = to->generation, .bytes = bytes};
    if (bytes > 0) {
        event.data = malloc(bytes);
        memcpy(event.data, data, bytes);
    }
    sim_post(event);
}

/* Returns the socket, if it is still the one that this was sent to, and its machine runs. */
static socket_t *receiver(const sim_event *event)
{
    socket_t *s = &sockets[event->a];
    return s->used && s->generation == event->generation && !is_dark(s) ? s : NULL;
}

static void on_reset(sim_event *event)
{
    socket_t *s = receiver(event);
    if (s != NULL)
        s->reset = true, s->connecting = false;
}

static void on_end(sim_event *event)
{
    socket_t *s = receiver(event);
    if (s != NULL)
        s->ended = true;
}

static void on_ack(sim_event *event)
{
    socket_t *s = receiver(event);
    if (s != NULL)
        s->unacked -= event->bytes < s->unacked ? event->bytes : s->unacked;
}

static void keep(socket_t *s, const char *data, size_t bytes)
{
    if (s->head + s->count + bytes > s->room) {
        size_t room = 2 * (s->count + bytes);
        char *bigger = malloc(room);
        if (bigger == NULL)
            sim_fail("no memory for what is received");
        if (s->count > 0)
            memcpy(bigger, s->data + s->head, s->count);
        free(s->data);
        s->data = bigger;
        s->head = 0;
        s->room = room;
    }
    memcpy(s->data + s->head + s->count, data, bytes);
    s->count += bytes;
}

static void on_data(sim_event *event)
{
    socket_t *s = receiver(event);
    socket_t *peer = s != NULL ? peer_of(s) : NULL;
    if (peer == NULL)
        return;
    if (s->closed) {
        send_event(peer, on_reset, NULL, 0);
        return;
    }
    keep(s, event->data, event->bytes);
    uint64_t at = arrival(s->own.machine, s->far.machine, s->own.inside);
    if (at != SIM_NEVER)
        sim_post((sim_event){.at_ns = at,
                             .fn = on_ack,
                             .a = s->peer,
                             .generation = peer->generation,
                             .bytes = event->bytes});
}

/* ---- listening and connecting ---------------------------------------------------------------- */

/* Returns one that a system gives away, in turn. */
static int another_port(void)
{
    int port = next_port;
    next_port = port < 65535 ? port + 1 : 32768;
    return port;
}

static int listener_at(const sim_place *at)
{
    for (int i = 0; i < socket_count; i++) {
        const socket_t *s = &sockets[i];
        if (s->used && s->listens && !s->closed && s->own.inside == at->inside &&
            s->own.machine == at->machine &&
            (at->inside ? strcmp(s->own.name, at->name) == 0 : s->own.port == at->port))
            return i;
    }
    return -1;
}

static void no_descriptor(void)
{
    *sim_why() = SIM_NO_FILES;
}

int sim_listen(const sim_place *at)
{
    sim_place own = *at;
    own.machine = sim_machine();
    sim_point("listens");
    while (!own.inside && own.port == 0) {
        own.port = another_port();
        own.port = listener_at(&own) >= 0 ? 0 : own.port;
    }
    if (listener_at(&own) >= 0) {
        *sim_why() = SIM_TAKEN;
        return SIM_NONE;
    }
    int s = socket_new(sim_process(), &own), fd = sim_descriptor(sim_process(), SIM_FD_SOCKET, s);
    sockets[s].listens = true;
    if (fd < 0) {
        sockets[s].used = false;
        no_descriptor();
    }
    sim_say("%d listens at %s%d", fd, own.name, own.port);
    return fd;
}

void sim_stranger(int machine, int port)
{
    sim_place own = {.machine = machine, .port = port};
    sockets[socket_new(-1, &own)].listens = true;
}

/* The two ends of a connection know of each other; the server's waits to be accepted. */
static void join(socket_t *client, socket_t *listener)
{
    int server = socket_new(listener->process, &listener->own);
    sockets[server].far = client->own;
    sockets[server].peer = index_of(client);
    client->peer = server;
    listener->queue[listener->queued++].socket = server;
}

static void on_open(sim_event *event)
{
    socket_t *s = receiver(event);
    if (s != NULL)
        s->connecting = false;
}

static void on_refused(sim_event *event)
{
    socket_t *s = receiver(event);
    if (s == NULL)
        return;
    s->connecting = false;
    s->failed = s->refused = true;
}

/* A call arrives at a machine: event->b is how often it was sent before. */
static void on_call(sim_event *event)
{
    socket_t *client = receiver(event);
    if (client == NULL || client->closed || client->reset)
        return;
    int found = listener_at(&client->far);
    bool full = found >= 0 && sockets[found].queued == BACKLOG;
    bool lost = sim.cut_until[client->own.machine][client->far.machine] > sim.now ||
                sim.machines[client->far.machine].dark || full;
    if (lost) {
        sim_post((sim_event){.at_ns = sim.now + ((uint64_t)1000000000 << event->b),
                             .fn = on_call,
                             .a = event->a,
                             .b = event->b + (event->b < 6),
                             .generation = event->generation});
        return;
    }
    if (found >= 0)
        join(client, &sockets[found]);
    send_event(client, found >= 0 ? on_open : on_refused, NULL, 0);
}

/* A network loses a connection on which nothing has come yet, at either end. */
static void on_loss(sim_event *event)
{
    socket_t *s = receiver(event);
    socket_t *peer = s != NULL ? peer_of(s) : NULL;
    if (s == NULL || s->closed || s->room > 0 || (peer != NULL && peer->room > 0))
        return;
    sim_say("** a connection of process %d is lost", s->process);
    s->reset = true;
    s->connecting = false;
    if (peer != NULL)
        peer->reset = true;
}

/* Loses what a process has just called, if it is to. */
static void maybe_lose(const socket_t *s, uint64_t lag)
{
    sim_proc *proc = sim_me();
    if (!proc->loses || !sim_is_within("dp_messages") || s->own.machine == s->far.machine)
        return;
    proc->loses = false;
    sim_post((sim_event){.at_ns = sim.now + sim_draw(8 * lag),
                         .fn = on_loss,
                         .a = index_of(s),
                         .generation = s->generation});
}

static int connect_inside(int client)
{
    int found = listener_at(&sockets[client].far);
    if (found < 0 || sockets[found].queued == BACKLOG)
        return found < 0 ? SIM_REFUSED : SIM_CROWDED;
    join(&sockets[client], &sockets[found]);
    return 0;
}

int sim_connect(const sim_place *to)
{
    sim_place own = {.inside = to->inside, .machine = sim_machine(), .port = another_port()};
    sim_point("connects");
    int s = socket_new(sim_process(), &own), fd = sim_descriptor(sim_process(), SIM_FD_SOCKET, s);
    if (fd < 0) {
        sockets[s].used = false;
        no_descriptor();
        return SIM_FULL;
    }
    sockets[s].far = *to;
    if (to->machine < 0)
        sockets[s].far.machine = own.machine;
    sim_say("%d connects to %s%d of machine %d", fd, to->name, to->port, sockets[s].far.machine);
    sim_did(SIM_CONNECTS);
    if (to->inside) {
        int why = connect_inside(s);
        if (why == 0)
            return fd;
        sim_close(fd);
        return why;
    }
    sockets[s].connecting = true;
    uint64_t lag =
        own.machine == sockets[s].far.machine ? 2000 : lag_of[own.machine][sockets[s].far.machine];
    sim_post((sim_event){.at_ns = sim.now + lag + sim_draw(lag),
                         .fn = on_call,
                         .a = s,
                         .generation = sockets[s].generation});
    maybe_lose(&sockets[s], lag);
    return fd;
}

int sim_connection(int fd)
{
    const socket_t *s = socket_of(fd);
    if (s == NULL)
        return SIM_NONE;
    return s->reset || s->refused ? SIM_REFUSED : s->failed ? SIM_NONE : 0;
}

int sim_accept(int fd, bool *out_full)
{
    socket_t *listener = socket_of(fd);
    *out_full = false;
    sim_point("accepts");
    if (listener == NULL || listener->queued == 0)
        return -1;
    int accepted = sim_descriptor(sim_process(), SIM_FD_SOCKET, listener->queue[0].socket);
    if (accepted < 0) {
        *out_full = true;
        no_descriptor();
        return -1;
    }
    memmove(listener->queue, listener->queue + 1,
            (size_t)--listener->queued * sizeof listener->queue[0]);
    sim_say("%d accepts %d", fd, accepted);
    sim_did(SIM_ACCEPTS);
    return accepted;
}

/* ---- bytes ----------------------------------------------------------------------------------- */

static size_t room_of(const socket_t *s, const socket_t *peer)
{
    size_t used = peer->count + s->unacked; /* that it has closed is heard by a reset only */
    return used < s->most ? s->most - used : 0;
}

/* The first few bytes on a connection on which nothing is under way go as a whole: dp/os.h. */
static size_t shortened(const socket_t *s, size_t bytes)
{
    size_t least = s->unacked == 0 ? WHOLE : 0;
    if (bytes > least && bytes > 1 && sim_one_in(sim.shorts))
        return least + 1 + sim_draw(bytes - least);
    return bytes;
}

ptrdiff_t sim_send(int fd, const void *data, size_t bytes)
{
    socket_t *s = socket_of(fd);
    sim_point("sends");
    socket_t *peer = s != NULL ? peer_of(s) : NULL;
    if (s == NULL || s->failed || s->reset || s->said_end || (s->own.inside && peer->closed)) {
        *sim_why() = SIM_OTHER;
        return -1;
    }
    if (s->connecting || peer == NULL)
        return 0;
    size_t room = room_of(s, peer), most_now = bytes < room ? bytes : room;
    size_t sent = shortened(s, most_now);
    sim_note(sent, (uint64_t)fd);
    if (sent == 0)
        return 0;
    s->unacked += sent;
    sim_say("%d sends %zu of %zu to process %d", fd, sent, bytes, peer->process);
    send_event(peer, on_data, data, sent);
    sim_did(SIM_SENDS);
    return (ptrdiff_t)sent;
}

ptrdiff_t sim_receive(int fd, void *data, size_t bytes)
{
    socket_t *s = socket_of(fd);
    sim_point("receives");
    if (s == NULL)
        return -1;
    size_t got = s->count < bytes ? s->count : bytes;
    if (got > 1 && sim_one_in(sim.shorts))
        got = 1 + sim_draw(got);
    sim_note(got, (uint64_t)fd + 1);
    if (got == 0)
        return bytes > 0 && (s->ended || s->reset || s->failed) ? -1 : 0;
    memcpy(data, s->data + s->head, got);
    s->head += got;
    s->count -= got;
    if (s->count == 0)
        s->head = 0;
    sim_say("%d receives %zu", fd, got);
    return (ptrdiff_t)got;
}

bool sim_end_sending(int fd)
{
    socket_t *s = socket_of(fd);
    sim_point("ends sending");
    if (s == NULL || s->connecting || s->failed || s->reset || s->said_end || peer_of(s) == NULL)
        return false;
    s->said_end = true;
    if (!peer_of(s)->closed)
        send_event(peer_of(s), on_end, NULL, 0);
    return true;
}

int sim_events(int fd, int wanted)
{
    const socket_t *s = socket_of(fd);
    int events = 0;
    if (s == NULL)
        return 0;
    const socket_t *peer = peer_of(s);
    if (s->listens)
        return s->queued > 0 ? wanted & SIM_READ : 0;
    if (s->failed || s->reset || (s->ended && s->said_end))
        events |= SIM_ENDED;
    if (s->count > 0 || s->ended || s->reset || s->failed)
        events |= SIM_READ;
    if (!s->connecting && (peer == NULL || s->reset || room_of(s, peer) >= s->most / 3))
        events |= SIM_WRITE; /* as Linux has it: a part of the room has to be free */
    return events & (wanted | SIM_ENDED);
}

/* ---- closing --------------------------------------------------------------------------------- */

static void socket_close(socket_t *s)
{
    socket_t *peer = peer_of(s);
    s->closed = true;
    for (int i = 0; i < s->queued; i++)
        socket_close(&sockets[s->queue[i].socket]);
    s->queued = 0;
    if (peer != NULL && !peer->closed && !is_dark(s) && !s->reset) {
        if (s->count > 0)
            send_event(peer, on_reset, NULL, 0);
        else if (!s->said_end)
            send_event(peer, on_end, NULL, 0);
        if (s->own.inside)
            peer->ended = true; /* at once */
    }
    maybe_free(s);
}

void sim_close(int fd)
{
    int process = sim.current->process, i = fd - FIRST;
    if (fd < 0)
        return;
    if (i < 0 || i >= DESCRIPTORS || descriptors[process][i].kind == 0)
        sim_fail("descriptor %d is closed twice", fd);
    int kind = descriptors[process][i].kind, object = descriptors[process][i].object;
    descriptor_free(process, i);
    sim_say("%d is closed", fd);
    if (kind == SIM_FD_SOCKET)
        socket_close(&sockets[object]);
    else
        sim_disk_close(kind, object, fd);
}

void sim_wire_end_of(int process, bool silent)
{
    for (int i = 0; i < DESCRIPTORS; i++) {
        if (descriptors[process][i].kind == 0)
            continue;
        if (descriptors[process][i].kind == SIM_FD_SOCKET) {
            socket_t *s = &sockets[descriptors[process][i].object];
            s->silent = silent;
            for (int k = 0; k < s->queued; k++)
                sockets[s->queue[k].socket].silent = silent;
            socket_close(s);
        }
        descriptor_free(process, i);
    }
}

/* One of the connections between machines breaks. */
void sim_wire_reset(void)
{
    int found[SOCKETS], count = 0;
    for (int i = 0; i < socket_count; i++)
        if (sockets[i].used && !sockets[i].closed && sockets[i].peer > i &&
            sockets[i].own.machine != sockets[i].far.machine && !sockets[i].connecting)
            found[count++] = i;
    if (count == 0)
        return;
    int ends[2] = {found[sim_draw((uint64_t)count)], -1};
    ends[1] = sockets[ends[0]].peer;
    sim_say("** a connection of processes %d and %d is reset", sockets[ends[0]].process,
            sockets[ends[1]].process);
    for (int i = 0; i < 2; i++) {
        socket_t *s = &sockets[ends[i]];
        s->reset = true;
        if (s->process < 0)
            continue;
        sim.procs[s->process].was_cut = true;
        sim_hit(&sim.procs[s->process], SIM_NEVER); /* it may be used only later */
    }
}

bool sim_end_of(int fd, bool own, sim_place *out)
{
    const socket_t *s = socket_of(fd);
    if (s == NULL || (!own && s->peer < 0 && !s->connecting))
        return false;
    *out = own ? s->own : s->far;
    return true;
}

int sim_peer(int fd)
{
    const socket_t *s = socket_of(fd);
    return s != NULL && s->peer >= 0 ? sockets[s->peer].process : -1;
}

void sim_wire_begin(void)
{
    uint64_t scale = (uint64_t)10000 << sim_draw(9); /* 10 us to 2.6 ms */
    most = (size_t)1 << (12 + sim_draw(9));
    next_port = 40000 + (int)sim_draw(8000);
    for (int i = 0; i < SIM_MACHINES; i++)
        for (int k = 0; k < SIM_MACHINES; k++)
            lag_of[i][k] = scale / 2 + sim_draw(scale);
}
