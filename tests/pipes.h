/* pipes.h - a carrier (dp/carrier.h) that somebody else might write: over named pipes in the folder
   in which the processes are. In dp.c, after the implementation. Of dp.h it knows what is public,
   and twelve private names, which make lint counts; the rest is POSIX. */

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

const dp_coll_ops *pipes_coll(void);

typedef struct pipe_end { /* to another process and from it */
    int to, from;
    dp__load *sending, *receiving; /* NULL: all that was begun has been moved */
    size_t sent, received;         /* bytes of these */
    dp__packet *first, *last;      /* to be sent */
    dp__packet *coming;
} pipe_end;

typedef struct pipes {
    dp__load *last; /* that was begun */
    uint64_t begun;
    struct pollfd *watch;
    pipe_end ends[];
} pipes;

/* In jobs of so many processes, by each, of which a test may have several in one: endpoints for
   collectives and for messages. All open them in the same order. */
static int pipes_opened[16][16][2];

/* ---- what moves ------------------------------------------------------------------------------ */

/* Bytes; -1: the other end is gone. */
static ptrdiff_t pipe_moved(ssize_t bytes)
{
    return bytes >= 0 ? bytes : errno == EAGAIN || errno == EINTR ? 0 : -1;
}

/* Moves the parts of one load after those of another. */
static dp_status pipe_loads(dp__endpoint *endpoint, int process, bool sends)
{
    pipe_end *end = &((pipes *)endpoint->own)->ends[process];
    dp__load **load = sends ? &end->sending : &end->receiving;
    size_t *done = sends ? &end->sent : &end->received;
    while (*load != NULL) {
        const int *counts = sends ? (*load)->to.counts : (*load)->from.counts;
        const int *places = sends ? (*load)->to.places : (*load)->from.places;
        size_t left = (size_t)counts[process] - *done, place = (size_t)places[process] + *done;
        ssize_t moved = left == 0 ? 0
                        : sends   ? write(end->to, (*load)->out + place, left)
                                  : read(end->from, (*load)->in + place, left);
        if (pipe_moved(moved) < 0)
            return dp__endpoint_lost(endpoint, process);
        *done += (size_t)pipe_moved(moved);
        if (moved < (ssize_t)left)
            return DP_OK;
        (*load)->left--;
        *load = (*load)->next;
        *done = 0;
    }
    return DP_OK;
}

static void pipe_packets_send(dp__endpoint *endpoint, int process)
{
    pipe_end *end = &((pipes *)endpoint->own)->ends[process];
    while (end->first != NULL) {
        dp__packet *packet = end->first, *next = packet->next;
        ptrdiff_t moved = pipe_moved(write(end->to, packet->at, packet->left));
        if (moved <= 0)
            return;
        if (dp__packet_sent(endpoint, packet, (size_t)moved))
            end->first = next;
    }
}

static dp_status pipe_packets_receive(dp__endpoint *endpoint, int process)
{
    pipe_end *end = &((pipes *)endpoint->own)->ends[process];
    for (;;) {
        if (end->coming == NULL)
            DP_TRY(dp__packet_take(endpoint, &end->coming));
        ptrdiff_t moved = pipe_moved(read(end->from, end->coming->at, end->coming->left));
        if (moved <= 0)
            return DP_OK;
        DP_TRY(dp__packet_received(endpoint, process, end->coming, (size_t)moved));
    }
}

/* ---- the table ------------------------------------------------------------------------------- */

static int pipe_open(const dp__endpoint *endpoint, int number, int from, int to)
{
    char name[60];
    bool own = from == endpoint->process;
    snprintf(name, sizeof name, "%s-%d-of-%d-from-%d-to-%d",
             endpoint->mailbox != NULL ? "messages" : "sums", number, endpoint->process_count, from,
             to);
    if (mkfifo(name, 0600) != 0 && errno != EEXIST)
        return -1;
    return open(name, (own ? O_RDWR : O_RDONLY) | O_NONBLOCK | O_CLOEXEC);
}

static dp_status pipes_open(dp__endpoint *endpoint)
{
    size_t count = (size_t)endpoint->process_count;
    int self = endpoint->process;
    int number = pipes_opened[count % 16][self % 16][endpoint->mailbox != NULL]++;
    pipes *all = calloc(1, sizeof *all + count * sizeof(pipe_end));
    if (all == NULL)
        return dp_error(DP_ERR_NO_MEMORY, "no memory for %zu pipes", count);
    endpoint->own = all;
    all->watch = calloc(2 * count, sizeof *all->watch);
    for (int p = 0; p < endpoint->process_count; p++)
        all->ends[p].to = all->ends[p].from = -1;
    for (int p = 0; p < endpoint->process_count; p++) {
        all->ends[p].to = p != self ? pipe_open(endpoint, number, self, p) : -1;
        all->ends[p].from = p != self ? pipe_open(endpoint, number, p, self) : -1;
        if (p != self && (all->ends[p].to < 0 || all->ends[p].from < 0))
            return dp_error(DP_ERR_UNSUPPORTED, "no pipe to process %d: %s", p, strerror(errno));
    }
    return all->watch != NULL ? DP_OK
                              : dp_error(DP_ERR_NO_MEMORY, "no memory for %zu pipes", count);
}

static dp_status pipes_begin(dp__endpoint *endpoint, dp__load *load)
{
    pipes *all = endpoint->own;
    int self = endpoint->process;
    if (load->to.counts[self] > 0)
        memmove(load->in + load->from.places[self], load->out + load->to.places[self],
                (size_t)load->to.counts[self]);
    load->left = 2 * (endpoint->process_count - 1);
    load->number = all->begun++;
    load->next = NULL;
    if (all->last != NULL && all->last != load)
        all->last->next = load;
    all->last = load;
    for (int p = 0; p < endpoint->process_count; p++) {
        pipe_end *end = &all->ends[p];
        if (p == self)
            continue;
        end->sending = end->sending != NULL ? end->sending : load;
        end->receiving = end->receiving != NULL ? end->receiving : load;
        DP_TRY(pipe_loads(endpoint, p, true));
        DP_TRY(pipe_loads(endpoint, p, false)); /* what is empty has come */
    }
    return DP_OK;
}

static dp_status pipes_send(dp__endpoint *endpoint, int process, dp__packet *packet)
{
    pipe_end *end = &((pipes *)endpoint->own)->ends[process];
    packet->next = NULL;
    if (end->first != NULL)
        end->last->next = packet;
    else
        end->first = packet;
    end->last = packet;
    pipe_packets_send(endpoint, process);
    return DP_OK;
}

/* A process that sends no messages any more may have said all that it had. */
static dp_status pipe_hung_up(dp__endpoint *endpoint, int process)
{
    pipe_end *end = &((pipes *)endpoint->own)->ends[process];
    if (endpoint->mailbox == NULL)
        return dp__endpoint_lost(endpoint, process);
    close(end->from);
    end->from = -1;
    return DP_OK;
}

static dp_status pipes_progress(dp__endpoint *endpoint, int timeout_ms)
{
    pipes *all = endpoint->own;
    bool messages = endpoint->mailbox != NULL;
    for (int p = 0; p < endpoint->process_count; p++) {
        const pipe_end *end = &all->ends[p];
        bool sends = messages ? end->first != NULL : end->sending != NULL;
        bool receives = messages || end->receiving != NULL;
        all->watch[2 * p] = (struct pollfd){sends ? end->to : -1, POLLOUT, 0};
        all->watch[2 * p + 1] = (struct pollfd){receives ? end->from : -1, POLLIN, 0};
    }
    (void)poll(all->watch, 2 * (nfds_t)endpoint->process_count, timeout_ms);
    for (int p = 0; p < endpoint->process_count; p++) {
        bool out = all->watch[2 * p].revents != 0, in = all->watch[2 * p + 1].revents != 0;
        if (all->watch[2 * p + 1].revents == POLLHUP) /* it has closed, and all was read */
            DP_TRY(pipe_hung_up(endpoint, p));
        else if (in)
            DP_TRY(messages ? pipe_packets_receive(endpoint, p) : pipe_loads(endpoint, p, false));
        if (out && messages)
            pipe_packets_send(endpoint, p);
        else if (out)
            DP_TRY(pipe_loads(endpoint, p, true));
    }
    return DP_OK;
}

static unsigned pipes_lacks(const dp__endpoint *endpoint, const dp__load *load)
{
    const pipes *all = endpoint->own;
    for (int p = 0; p < endpoint->process_count; p++) {
        const dp__load *receiving = all->ends[p].receiving;
        if (receiving != NULL && receiving->number <= load->number)
            return (unsigned)p + 1;
    }
    return 0;
}

static bool pipes_close(dp__endpoint *endpoint)
{
    pipes *all = endpoint->own;
    for (int p = 0; all != NULL && p < endpoint->process_count; p++) {
        pipe_end *end = &all->ends[p];
        while (end->first != NULL) {
            dp__packet *next = end->first->next;
            dp__packet_end(endpoint, end->first);
            end->first = next;
        }
        if (end->coming != NULL)
            dp__packet_end(endpoint, end->coming);
        if (end->to >= 0)
            close(end->to);
        if (end->from >= 0)
            close(end->from);
    }
    free(all != NULL ? all->watch : NULL);
    free(all);
    return true;
}

static dp_status pipes_coll_open(const dp_host *host, const dp_comm_config *config, dp_comm **out)
{
    static const dp__carrier carrier = {.open = pipes_open,
                                        .progress = pipes_progress,
                                        .close = pipes_close,
                                        .sleeps = true,
                                        .begin = pipes_begin,
                                        .lacks = pipes_lacks,
                                        .send = pipes_send};
    return dp__mesh_open(host, config, pipes_coll(), &carrier, out);
}

static bool pipes_fit(const dp_comm_config *config)
{
    return config->bootstrap != NULL && config->host_memory;
}

const dp_coll_ops *pipes_coll(void)
{
    static const dp_coll_ops ops = {.head = DP_TABLE(dp_coll_ops),
                                    .name = "pipes",
                                    .fits = pipes_fit,
                                    .open = pipes_coll_open,
                                    .close = dp__mesh_close,
                                    .verbs = DP_COLL_VERBS,
                                    .run = dp__mesh_run_call};
    return &ops;
}
