/* dp/channels.h - v0.2.0 - messages over TCP - MIT licence

   Part of dp.h, which includes it. It brings the packets of dp/mailbox.h over connections of their
   own, whatever carries the collectives.

   CONTENTS (search for the tag)
     >>channels  connections, made when they are needed
     >>traffic   headers and bytes on them
*/

#ifndef DP__ROOMS
#error "dp/channels.h is a part of dp.h: include dp.h"
#else

/* ==== >>channels ================================================================================
   Two connections to each process (>>dialling in dp/tcp.h). A process sends on its own, which it
   makes for the first message; the answers come back there. Until the other one has proved what it
   is the connection may be lost, by the network for example: then it is made again, and all offers
   are sent anew. A process that takes nothing any more may have said something before, which is
   still to be read. Who closes says so at the end of both; where a connection ends without that,
   who expects something from its process expects it in vain.                                    */

enum {
    DP__CHANNEL_FLUSH_MS = 200,
    DP__CHANNEL_ONCE = 4 << 20, /* bytes, then others have their turn, and who only tests goes on */
    DP__CHANNEL_CALL_MS = 100,  /* what a network needs for a connection; else it comes later */
    DP__CHANNEL_AGAIN_MS = 20,
    DP__CHANNEL_NEWS_MS = 300, /* after an end without a word: others may still say why */
    DP__CHANNEL_GREET_MS = 1   /* so often who has come is looked at, until it is known who it is */
};

typedef struct dp__channel {
    int fd;            /* -1: it has not been made, or has ended */
    bool deaf;         /* it takes nothing any more */
    bool met;          /* the other end has proved what it is */
    bool left;         /* and has said that it goes */
    uint64_t lost_ns;  /* its end is believed then, where that was not said */
    dp__dial *call;    /* this process has called, and was not answered yet */
    uint64_t again_ns; /* it calls again then, and sends all offers anew; 0: it need not */
    dp__packet *first, *last;
    dp__packet *in; /* what comes; NULL: nothing has */
} dp__channel;

typedef struct dp__channels {
    dp__port *port;
    dp__os_watch *watch; /* channels that there are, and the port */
    int *watched;        /* which channels */
    int count;
    dp__channel of[]; /* to each process this one's own, then each other's own */
} dp__channels;

static dp__channels *dp__channels_of(const dp__endpoint *endpoint)
{
    return endpoint->own;
}

/* Returns the channel for what a process sends, or for its `answers`. */
static dp__channel *dp__channel_to(const dp__endpoint *endpoint, int process, bool answers)
{
    return &dp__channels_of(endpoint)->of[process + (answers ? endpoint->process_count : 0)];
}

static void dp__channel_drop(dp__endpoint *endpoint, dp__channel *channel)
{
    while (channel->first != NULL) {
        dp__packet *packet = channel->first;
        channel->first = packet->next;
        dp__packet_end(endpoint, packet);
    }
}

static void dp__channel_deafen(dp__endpoint *endpoint, dp__channel *channel)
{
    channel->deaf = true;
    dp__channel_drop(endpoint, channel);
}

static void dp__channel_end(dp__endpoint *endpoint, dp__channel *channel)
{
    int fd = channel->fd;
    dp__channel_deafen(endpoint, channel);
    channel->fd = -1; /* before a child of fork could close what has the number next */
    dp__os_close(fd);
    dp__os_free(channel->call, 0, NULL);
    channel->call = NULL;
    dp__packet_end(endpoint, channel->in);
    channel->in = NULL;
}

static bool dp__channel_calls(const dp__channel *channel)
{
    return channel->call != NULL && !channel->call->asked;
}

/* A connection that nobody has answered on: a network may have lost it, or nobody is there. */
static void dp__channel_fail(dp__endpoint *endpoint, int process)
{
    dp__channel *channel = dp__channel_to(endpoint, process, false);
    dp__channel_end(endpoint, channel);
    channel->deaf = dp__has_left(endpoint->mailbox, process);
    channel->again_ns = channel->deaf ? 0 : dp__os_after_ms(DP__CHANNEL_AGAIN_MS);
}

static void dp__channel_ask(dp__endpoint *endpoint, int process)
{
    const dp__channel *channel = dp__channel_to(endpoint, process, false);
    const dp__port *port = dp__channels_of(endpoint)->port;
    if (!dp__call_ask(channel->call, port, process, channel->fd))
        dp__channel_fail(endpoint, process);
}

/* There is a way to that process, or will be: within so long what is said goes at once. */
DP__COLD static dp_status dp__channel_reach(dp__endpoint *endpoint, int process, int ms)
{
    dp__channel *channel = dp__channel_to(endpoint, process, false);
    if (channel->fd >= 0 || channel->deaf || channel->again_ns != 0)
        return DP_OK;
    channel->call = dp__os_alloc(sizeof *channel->call, 64, NULL);
    if (channel->call == NULL)
        return dp_error(DP_ERR_NO_MEMORY, "no memory for a message");
    *channel->call = (dp__dial){.asked = false};
    dp_status status = dp__port_dial(dp__channels_of(endpoint)->port, process, &channel->fd);
    if (channel->fd < 0)
        dp__channel_fail(endpoint, process);
    else if (dp__os_ready(channel->fd, DP__CAN_WRITE, ms))
        dp__channel_ask(endpoint, process);
    if (status != DP_OK) /* nobody has heard of it */
        channel->again_ns = 0;
    return status;
}

/* ==== >>traffic =================================================================================
   On its own connection a process sends offers, with data between them, what was wanted first
   before the rest.                                                                              */

/* As much as goes now. */
static void dp__channel_send(dp__endpoint *endpoint, dp__channel *channel)
{
    size_t once = 0;
    while (channel->first != NULL && channel->fd >= 0 && !dp__channel_calls(channel) &&
           once < DP__CHANNEL_ONCE) {
        dp__packet *packet = channel->first, *next = packet->next;
        ptrdiff_t sent = dp__os_send(channel->fd, packet->at, packet->left);
        if (sent < 0 && channel->call == NULL) /* else it is called again */
            dp__channel_deafen(endpoint, channel);
        if (sent <= 0)
            return;
        once += (size_t)sent;
        if (dp__packet_sent(endpoint, packet, (size_t)sent))
            channel->first = next;
    }
}

static void dp__channel_add(dp__endpoint *endpoint, dp__channel *channel, dp__packet *packet)
{
    bool alone = channel->first == NULL;
    if (channel->deaf) {
        dp__packet_end(endpoint, packet);
        return;
    }
    packet->next = NULL;
    if (alone)
        channel->first = packet;
    else
        channel->last->next = packet;
    channel->last = packet;
    if (alone)
        dp__channel_send(endpoint, channel);
}

static dp_status dp__channel_post(dp__endpoint *endpoint, int process, dp__packet *packet)
{
    dp__channel_add(endpoint, dp__channel_to(endpoint, process, packet->answers), packet);
    return DP_OK;
}

static dp_status dp__channel_prepare(dp__endpoint *endpoint, int process)
{
    return dp__channel_reach(endpoint, process, DP__CHANNEL_CALL_MS);
}

/* Receives what has come. */
static dp_status dp__channel_receive(dp__endpoint *endpoint, dp__channel *channel, int process)
{
    ptrdiff_t got;
    for (size_t once = 0; once < DP__CHANNEL_ONCE; once += (size_t)got) {
        if (channel->in == NULL)
            DP_TRY(dp__packet_take(endpoint, &channel->in));
        dp__packet *in = channel->in;
        size_t left = in->left;
        got = dp__os_receive(channel->fd, in->at, left);
        if (got < 0) {
            channel->lost_ns = dp__os_after_ms(DP__CHANNEL_NEWS_MS);
            dp__channel_end(endpoint, channel);
        }
        if (got <= 0)
            return DP_OK;
        dp_status status = dp__packet_received(endpoint, process, in, (size_t)got);
        if ((size_t)got == left && in->header.kind == DP__HEADER_LEFT)
            channel->left = true;
        DP_TRY(status);
    }
    return DP_OK;
}

static dp__os_watch dp__channel_watch(const dp__channel *channel)
{
    bool calls = dp__channel_calls(channel), sends = calls || channel->first != NULL;
    return (dp__os_watch){
        .fd = channel->fd,
        .events = (short)((calls ? 0 : DP__CAN_READ) | (sends ? DP__CAN_WRITE : 0))};
}

/* Reads what comes, once the other end has proved what it is. */
static dp_status dp__channel_hear(dp__endpoint *endpoint, dp__channel *channel, int process)
{
    if (channel->call != NULL) {
        const dp__port *port = dp__channels_of(endpoint)->port;
        dp_status status = dp__call_hear(channel->call, port, channel->fd);
        if (status == DP_ERR_REMOTE)
            dp__channel_fail(endpoint, process);
        if (status != DP_OK)
            return DP_OK;
        dp__os_free(channel->call, 0, NULL);
        channel->call = NULL;
        channel->met = true;
    }
    return dp__channel_receive(endpoint, channel, process);
}

static dp_status dp__channel_go_on(dp__endpoint *endpoint, int place, int events)
{
    dp__channel *channel = &dp__channels_of(endpoint)->of[place];
    bool calls = dp__channel_calls(channel);
    if (calls && events != 0)
        dp__channel_ask(endpoint, place);
    if ((events & DP__CAN_WRITE) != 0)
        dp__channel_send(endpoint, channel);
    bool comes = !calls && (events & ~DP__CAN_WRITE) != 0 && channel->fd >= 0;
    return comes ? dp__channel_hear(endpoint, channel, place % endpoint->process_count) : DP_OK;
}

/* Those that call. */
DP__COLD static dp_status dp__channels_let_in(dp__endpoint *endpoint)
{
    dp__channels *channels = dp__channels_of(endpoint);
    int before = channels->port->server.taken;
    DP_TRY(dp__shared_failure(endpoint->job->ctx, dp__port_look(channels->port)));
    bool some = channels->port->server.taken != before;
    for (int p = 0; p < endpoint->process_count && some; p++) {
        int fd = dp__port_take(channels->port, p);
        if (fd >= 0)
            *dp__channel_to(endpoint, p, true) = (dp__channel){.fd = fd, .met = true};
    }
    return DP_OK;
}

/* Sends all offers again, as those from before the other end had proved what it is may be lost. */
DP__COLD static dp_status dp__channel_again(dp__endpoint *endpoint, int process)
{
    dp__channel *channel = dp__channel_to(endpoint, process, false);
    if (dp__os_ms_until(channel->again_ns) > 0)
        return DP_OK;
    channel->again_ns = 0;
    dp__channel_drop(endpoint, channel);
    if (dp__channel_reach(endpoint, process, 0) != DP_OK)
        channel->again_ns = dp__os_after_ms(DP__CHANNEL_AGAIN_MS);
    if (channel->fd >= 0)
        DP_TRY(dp__offers_again(endpoint, process));
    return DP_OK;
}

static int dp__channels_watch(dp__channels *channels)
{
    int count = 0;
    for (int i = 0; i < channels->count; i++) {
        if (channels->of[i].fd < 0)
            continue;
        channels->watch[count] = dp__channel_watch(&channels->of[i]);
        channels->watched[count++] = i;
    }
    return count;
}

/* Wait at most so long until something can move, and move it. */
static dp_status dp__channels_look(dp__endpoint *endpoint, int timeout_ms)
{
    dp__channels *channels = dp__channels_of(endpoint);
    const dp__listener *listener = channels->port->listener;
    bool greets = listener->pending_count > 0, full = listener->full;
    for (int p = 0; p < endpoint->process_count; p++)
        if (channels->of[p].again_ns != 0)
            DP_TRY(dp__channel_again(endpoint, p));
    int count = dp__channels_watch(channels);
    dp__os_watch *watch = channels->watch, *door = watch + count;
    *door = (dp__os_watch){.fd = full ? -1 : listener->fd, .events = DP__CAN_READ};
    if (greets && timeout_ms > DP__CHANNEL_GREET_MS)
        timeout_ms = DP__CHANNEL_GREET_MS;
    int some = dp__os_poll(watch, count + 1, timeout_ms);
    for (int i = 0; i < count && some > 0; i++)
        DP_TRY(dp__channel_go_on(endpoint, channels->watched[i], watch[i].revents));
    return greets || full || door->revents != 0 ? dp__channels_let_in(endpoint) : DP_OK;
}

/* Why this process goes, if the job has failed: the sentence, or, if that is too long, whose fault
   it is. */
static dp__header dp__last_slip(const dp__endpoint *endpoint)
{
    const dp__board *board = endpoint->job->board;
    dp__header header = {.kind = DP__HEADER_LEFT};
    char who[DP__WHO_BYTES];
    if (atomic_load(&board->failed) != 2)
        return header;
    header.is.tag = board->status;
    header.is.from = board->rank;
    if (strlen(board->text) < sizeof header.tiny)
        strcpy(header.tiny, board->text);
    else
        snprintf(header.tiny, sizeof header.tiny, "%s is to blame",
                 dp__who(endpoint->job, dp__process_of(endpoint->job, board->rank), who));
    return header;
}

/* Answers that are on their way still go. What this process has sent may lie in memory that has
   gone already: where that is under way, nothing more can be said. */
static void dp__channel_leave(dp__endpoint *endpoint, dp__channel *channel, bool answers,
                              const dp__header *last, uint64_t until_ns)
{
    while (answers && channel->first != NULL && dp__os_ms_until(until_ns) > 0) {
        dp__os_ready(channel->fd, DP__CAN_WRITE, dp__os_ms_until(until_ns));
        dp__channel_send(endpoint, channel);
    }
    const dp__packet *next = channel->first;
    bool between = next == NULL || (!next->data && next->left == sizeof next->header);
    if (channel->fd >= 0 && between && !dp__channel_calls(channel))
        (void)dp__wire_send(channel->fd, last, sizeof *last, until_ns);
    dp__channel_end(endpoint, channel);
}

DP__COLD static bool dp__channels_close(dp__endpoint *endpoint)
{
    dp__channels *channels = dp__channels_of(endpoint);
    if (channels == NULL)
        return true;
    const dp__header last = dp__last_slip(endpoint);
    uint64_t until_ns = dp__os_after_ms(DP__CHANNEL_FLUSH_MS);
    for (int i = 0; i < channels->count; i++)
        dp__channel_leave(endpoint, &channels->of[i], i >= endpoint->process_count, &last,
                          until_ns);
    return true;
}

static void dp__channels_let_go(dp__endpoint *endpoint)
{
    dp__channels *channels = dp__channels_of(endpoint);
    for (int i = 0; i < channels->count; i++)
        dp__os_drop(&channels->of[i].fd);
}

/* Returns the presence of a process, by what has come on connections: that is in order with the
   last answers, and needs nobody to pass it on. Only a process that has died sends nothing more. */
static int dp__channel_presence(const dp__endpoint *endpoint, int process, int known)
{
    bool left = known == DP__LEFT, broke = false;
    for (int answers = 0; answers < 2; answers++) {
        const dp__channel *channel = dp__channel_to(endpoint, process, answers != 0);
        bool silent = channel->met && !channel->left;
        if (silent && channel->fd >= 0 && known != DP__DEAD)
            return DP__INSIDE;
        left = left || channel->left;
        broke = broke || (silent && dp__os_ms_until(channel->lost_ns) == 0);
    }
    return left ? DP__LEFT : broke ? DP__DEAD : known;
}

DP__COLD static int dp__channel_excuse(const dp__endpoint *endpoint, int process, bool receives,
                                       char *text, size_t room)
{
    const dp__port *port = dp__channels_of(endpoint)->port;
    char who[DP__WHO_BYTES];
    if (receives && port->listener->full)
        snprintf(text, room, "; %s may open no more files than %llu",
                 dp__who(endpoint->job, endpoint->process, who),
                 (unsigned long long)dp__os_files_limit());
    if (receives)
        return port->listener->full ? endpoint->process : -1;
    const dp__channel *own = dp__channel_to(endpoint, process, false);
    if (own->call != NULL || own->again_ns != 0)
        snprintf(text, room, "; nobody has answered at %s, port %d", dp__port_host(port, process),
                 (int)port->seats[process].port);
    return -1;
}

DP__COLD static dp_status dp__channels_open(dp__endpoint *endpoint)
{
    dp__port *port = endpoint->job->ctx->world.port;
    size_t count = 2 * (size_t)endpoint->process_count;
    if (port->why[0] != '\0') {
        endpoint->why = port->why;
        return DP_OK;
    }
    dp_scope *scope = endpoint->mailbox->scope;
    dp__channels *channels =
        dp__scope_bytes(scope, sizeof *channels + count * sizeof(dp__channel), 64);
    dp__os_watch *watch = dp__scope_bytes(scope, (count + 1) * sizeof *watch, 64);
    int *watched = dp__scope_bytes(scope, count * sizeof *watched, 64);
    if (channels == NULL || watch == NULL || watched == NULL)
        return dp_error(DP_ERR_NO_MEMORY, "no memory for messages");
    *channels =
        (dp__channels){.port = port, .watch = watch, .watched = watched, .count = (int)count};
    dp__port_raise(port);
    for (size_t i = 0; i < count; i++)
        channels->of[i] = (dp__channel){.fd = -1};
    endpoint->own = channels;
    return DP_OK;
}

/* ---- the carrier ----------------------------------------------------------------------------- */

static dp_status dp__tcp_open_any(dp__endpoint *endpoint)
{
    return endpoint->mailbox != NULL ? dp__channels_open(endpoint) : dp__tcp_prepare(endpoint);
}

static dp_status dp__tcp_progress_any(dp__endpoint *endpoint, int timeout_ms)
{
    return endpoint->mailbox != NULL ? dp__channels_look(endpoint, timeout_ms)
                                     : dp__tcp_advance(endpoint, timeout_ms);
}

static bool dp__tcp_close_any(dp__endpoint *endpoint)
{
    return endpoint->mailbox != NULL ? dp__channels_close(endpoint) : dp__tcp_close(endpoint);
}

static const dp__carrier dp__tcp_carrier = {
    .open = dp__tcp_open_any,
    .connect = dp__tcp_connect,
    .begin = dp__tcp_begin,
    .send = dp__channel_post,
    .progress = dp__tcp_progress_any,
    .close = dp__tcp_close_any,
    .sleeps = true,
    .lacks = dp__tcp_lacks,
    .reach = dp__channel_prepare,
    .presence = dp__channel_presence,
    .excuse = dp__channel_excuse,
    .let_go = dp__channels_let_go,
};

#endif /* DP__ROOMS */

/* The licence is at the end of dp.h. */
