/* dp/tree.h - v0.2.0 - connections between the processes of a job - MIT licence

   Part of dp.h, which includes it. Processes are connected as a tree, which stays open as long as
   the context. They gather numbers over it, and tell each other of failures and of what each has
   begun. How it comes to be is in dp/rendezvous.h.

   CONTENTS (search for the tag)
     >>wire      bytes on a connection, and who may speak
     >>shape     who is connected to whom
     >>tree      lasting connections: failures, what others have begun
     >>gathering what all say together, and what is heard between; closing
*/

#ifndef DP__ROOMS
#error "dp/tree.h is a part of dp.h: include dp.h"
#else

/* ==== >>wire ===================================================================================
   Bytes on a connection. Every wait has an end. The connecting process sends a nonce. The listener
   answers with a nonce of its own and a proof that it has the job's key; then the connecting
   process proves the same. So neither talks to a process of another job or run, and recorded bytes
   cannot be replayed. Nothing is trusted before both proofs.                                   */

enum {
    DP__JOIN_MAGIC = 0x31706b64,
    DP__CHALLENGE_MAGIC = 0x31706364,
    DP__HEADER_MAGIC = 0x31706e64,
    DP__LISTENER_NONCE = 0,  /* of a listener that is not waited for: see dp/tcp.h */
    DP__GRACE_MS = 1000,     /* beyond the time-out: to be told why, or for an answer */
    DP__HELD_UP_MS = 5,      /* who goes on so much later than it wanted to was held up, */
    DP__TRY_MS = 50,         /* to connect, at least */
    DP__AGAIN_MS = 100,      /* and has so long to read what came meanwhile */
    DP__LAST_WORDS_MS = 100, /* so that the others read why the job has failed */
    DP__STEP_MS = 300 /* by which who stands deeper in the tree waits longer: its parent may have
                         something to tell */
};

/* Says for what a connection is. */
typedef enum dp__connection_kind {
    DP__FOR_TREE,
    DP__FOR_DATA,
    DP__FOR_MESSAGES,
    DP__FOR_VOTES,
    DP__FOR_JOINING,
    DP__FOR_ASKING, /* from outside of the job: see dp/asking.h */
    DP__CONNECTION_KINDS
} dp__connection_kind;

typedef struct dp__join_request { /* sent by a connecting process */
    uint32_t magic;
    int32_t version;
    uint64_t nonce;
    int32_t process, process_count;
    uint64_t listens; /* for the tree where its children connect: a port, or a number in a name; for
                         messages the process that is meant; for votes its holder */
    uint32_t patience_ms;
    uint16_t kind, connection; /* which of those of its kind, from 0; for votes the last bits of the
                                   number of its roster */
    char host[DP__PLACE_BYTES]; /* and at which address; "": where this comes from */
} dp__join_request;

typedef struct dp__challenge {
    uint32_t magic;
    int32_t version;
    uint64_t nonce, proof;
} dp__challenge;

typedef struct dp__proof_input { /* what a proof is made from */
    dp__join_request request;
    uint64_t nonce, side;
} dp__proof_input;

typedef enum dp__kind {
    DP__WELCOME,  /* dp__welcome: all are here */
    DP__READY,    /* connected to all neighbours */
    DP__GO,       /* all are ready */
    DP__FAILED,   /* a sentence: the job has failed */
    DP__GATHER,   /* up the tree, of a process and all behind it */
    DP__SPREAD,   /* down the tree, of all */
    DP__BYE,      /* closed in good order */
    DP__ASK,      /* are you there? */
    DP__HERE,     /* yes, and waiting too */
    DP__PROGRESS, /* dp__progress_message: what a process has begun; passed on to all */
    DP__KINDS
} dp__kind;

typedef struct dp__tree_header { /* precedes everything that travels in the tree */
    uint32_t magic, kind;
    int32_t status, process; /* what failed, and where; of a question: the call, and who asks; of an
                                answer while they meet: for how many ms process 0 was held up */
    uint64_t bytes;          /* that follow */
} dp__tree_header;

typedef struct dp__welcome {
    uint64_t run;     /* mixed into the key, so that an earlier run has another one */
    uint64_t listens; /* the parent's */
    uint32_t patience_ms, reserved;
    char host[DP__PLACE_BYTES]; /* "": where process 0 is */
} dp__welcome;

typedef struct dp__tree_progress {
    dp__tree_header header;
    dp__progress_message progress;
} dp__tree_progress;

_Static_assert(sizeof(dp__tree_progress) ==
                       sizeof(dp__tree_header) + sizeof(dp__progress_message) &&
                   sizeof(dp__join_request) == 104 && sizeof(dp__challenge) == 24 &&
                   sizeof(dp__tree_header) == 24 && sizeof(dp__proof_input) == 120 &&
                   sizeof(dp__welcome) == 88,
               "what travels has no gaps");

static uint64_t dp__proof(dp__key key, const dp__join_request *request, uint64_t nonce,
                          bool of_caller)
{
    dp__proof_input input = {.request = *request, .nonce = nonce, .side = of_caller};
    return dp__sip(key, &input, sizeof input);
}

/* Returns true if this process wanted to go on at that time, and was held up: by a signal, a
   debugger, or as its machine slept. */
static bool dp__was_held_up(uint64_t due_ns, uint64_t now)
{
    return due_ns != 0 && now > due_ns + DP__HELD_UP_MS * (uint64_t)1000000;
}

/* Returns for how much longer this process waits; 0: the time is up. If it was held up until then,
   it has a while more, once: what it waits for may have come. */
DP__APART static int dp__ms_left(uint64_t *until_ns, bool *again)
{
    int ms = dp__os_ms_until(*until_ns);
    if (ms > 0 || *again || !dp__was_held_up(*until_ns, dp__os_now_ns()))
        return ms;
    *again = true;
    *until_ns = dp__os_after_ms(DP__AGAIN_MS);
    return DP__AGAIN_MS;
}

/* TIMEOUT: not in time. REMOTE: the connection has ended. Neither leaves a sentence. */
static dp_status dp__wire_send(int fd, const void *data, size_t bytes, uint64_t until_ns)
{
    bool again = false;
    for (size_t done = 0; done < bytes;) {
        ptrdiff_t sent = dp__os_send(fd, (const char *)data + done, bytes - done);
        if (sent < 0)
            return DP_ERR_REMOTE;
        done += (size_t)sent;
        if (sent > 0)
            continue;
        int ms = dp__ms_left(&until_ns, &again);
        if (ms == 0)
            return DP_ERR_TIMEOUT;
        dp__os_ready(fd, DP__CAN_WRITE, ms);
    }
    return DP_OK;
}

static dp_status dp__wire_receive(int fd, void *data, size_t bytes, uint64_t until_ns)
{
    bool again = false;
    for (size_t done = 0; done < bytes;) {
        ptrdiff_t got = dp__os_receive(fd, (char *)data + done, bytes - done);
        if (got < 0)
            return DP_ERR_REMOTE;
        done += (size_t)got;
        if (got > 0)
            continue;
        int ms = dp__ms_left(&until_ns, &again);
        if (ms == 0)
            return DP_ERR_TIMEOUT;
        dp__os_ready(fd, DP__CAN_READ, ms);
    }
    return DP_OK;
}

static dp_status dp__tree_header_send(int fd, const dp__tree_header *header, const void *data,
                                      uint64_t until_ns)
{
    dp_status status = dp__wire_send(fd, header, sizeof *header, until_ns);
    return status == DP_OK ? dp__wire_send(fd, data, header->bytes, until_ns) : status;
}

/* Tell a process why the job fails; without a long wait if it does not listen. */
static void dp__tree_header_failure(int fd, dp_status status, int process, const char *text)
{
    dp__tree_header header = {DP__HEADER_MAGIC, DP__FAILED, (int32_t)status, process, strlen(text)};
    (void)dp__tree_header_send(fd, &header, text, dp__os_after_ms(100));
}

/* Sends a failure over a connection, if there is one, and ends it. */
static void dp__tree_header_last(int *fd, dp_status status, int process, const char *text)
{
    if (*fd >= 0)
        dp__tree_header_failure(*fd, status, process, text);
    dp__os_finish(*fd, 0);
    *fd = -1;
}

/* Returns true if a header can be of this job: its processes send no other sizes than these, and
   sizes must not decide how much memory is used. */
static bool dp__tree_header_is_sound(const dp__tree_header *header)
{
    if (header->magic != DP__HEADER_MAGIC || header->kind >= DP__KINDS)
        return false;
    bool of_call = header->kind == DP__GATHER || header->kind == DP__SPREAD;
    return header->kind == DP__WELCOME    ? header->bytes == sizeof(dp__welcome)
           : header->kind == DP__PROGRESS ? header->bytes == sizeof(dp__progress_message)
           : header->kind == DP__FAILED   ? header->bytes < DP__TEXT_BYTES
                                          : of_call || header->bytes == 0;
}

/* Receive the sentence of a failure; returns its status, which is of the JOB class unless this
   process was not let in at all. */
static dp_status dp__failure_receive(int fd, const dp__tree_header *header, uint64_t until_ns)
{
    char text[DP__TEXT_BYTES] = "";
    dp_status status = (dp_status)header->status;
    if (!dp__is_failure(status))
        status = DP_ERR_REMOTE;
    if (header->bytes == 0 || dp__wire_receive(fd, text, header->bytes, until_ns) != DP_OK)
        return dp_error(DP_ERR_REMOTE, "process %d failed, and the reason did not arrive",
                        (int)header->process);
    text[header->bytes] = '\0';
    return dp_error(status, "%s", text[0] != '\0' ? text : dp_status_text(status));
}

/* Receives a failure from a process of the same job, which then has failed here too. */
static dp_status dp__failure_shared(int fd, const dp__tree_header *header)
{
    dp_status status = dp__failure_receive(fd, header, dp__os_after_ms(DP__GRACE_MS));
    return dp_status_class(status) == DP_CLASS_JOB ? status : DP_ERR_REMOTE;
}

/* ==== >>shape ==================================================================================
   Each process has a parent and at most log2(processes) children.                               */

/* Behind process p are those before p + its lowest bit, so that the part of each child is a run of
   processes. */
static int dp__parent(int process)
{
    return process & (process - 1);
}

static int dp__behind(int process, int process_count) /* it and all behind it */
{
    int span = process == 0 ? process_count : process & -process;
    return span < process_count - process ? span : process_count - process;
}

/* Returns the neighbour of a process that lies on the way to another one. */
static int dp__towards(int process, int to, int process_count)
{
    int step = 1;
    if (to < process || to >= process + dp__behind(process, process_count))
        return dp__parent(process);
    while (process + 2 * step <= to)
        step *= 2;
    return process + step;
}

static int dp__child_count(int process, int process_count)
{
    int count = 0;
    for (int step = 1; step < dp__behind(process, process_count); step *= 2)
        count++;
    return count;
}

/* ==== >>tree ===================================================================================
   The connections of a job while it lasts. Each process has a parent and at most log2(processes)
   children, so that all_gather takes as many steps. A process that fails tells its neighbours, and
   they tell theirs: all get the first failure's sentence. Where a process inside the tree dies,
   each part that is left has a neighbour of it, which finds that out by itself, so the words may
   differ. A process that closes says so; this is an error only for a process that still needs it.

   At the time-out, the missing process may itself be waiting for another one, and may have begun
   later. So it is asked whether it is there. A waiting process answers yes, and asks the process
   that it waits for. In the end one does not answer, and is named.

   All waits of an opening together have one time-out, which all processes count from the first one
   that came: what meeting has taken is not there for what follows. Time in which a process does
   something itself, as to open its devices, is not counted.                                    */

enum {
    DP__LINKS_MAX = 1 + 20,
    DP__TREE_LOOK_MS = 50, /* so often who waits looks whether this process has failed meanwhile */
    DP__TREE_ASKS = 8,     /* after so many answers what is waited for is lost for good */
    DP__TREE_NOTES = 64 /* of each link, which one look between calls reads: others send one each */
};

typedef struct dp__link {
    int fd, process;
    bool left;  /* has closed */
    bool here;  /* has answered */
    size_t got; /* bytes of the header, which is complete when somebody has to wait for it */
    dp__tree_header header;
} dp__link;

typedef struct dp__tree {
    int process, process_count, timeout_ms;
    dp__job *job;      /* once a context is open: where progress messages go */
    int calls;         /* of all_gather, so far */
    uint64_t until_ns; /* then somebody's patience is over */
    uint64_t spare_ns; /* for which it may still wait for others until a context is open; */
    uint64_t begun_ns; /* and while it does: since when, */
    uint64_t ends_ns;  /* and until when at most */
    /* While processes meet, fails if it is in vain to wait: see dp__launch. Then NULL. */
    dp_status (*rest)(void *user, int ms);
    void *user;
    int claim; /* process 0: what no other one can have meanwhile; else -1 */
    dp__os_address claimed;
    int first_child, link_count; /* the parent's link is before, unless this is process 0 */
    dp__link links[DP__LINKS_MAX];
    dp__lock lock;    /* of all that follows, which any thread may change */
    bool busy;        /* a thread speaks or listens: the links are its own */
    bool untold;      /* and it is to tell the others of a failure before it goes */
    dp_status failed; /* once and for all, like what is said about it */
    int culprit;      /* a process */
    char text[DP__TEXT_BYTES];
    dp__progress_message told; /* the last own one, by who has the links, */
    uint64_t told_ns;          /* and when */
} dp__tree;

/* The parent first, children in order. */
static void dp__tree_link(dp__tree *tree, int fd, int process)
{
    int place = tree->link_count++;
    for (; place > 0 && tree->links[place - 1].process > process; place--)
        tree->links[place] = tree->links[place - 1];
    tree->links[place] = (dp__link){.fd = fd, .process = process};
}

/* True: it is the first failure, which stays. */
static bool dp__tree_note(dp__tree *tree, dp_status status, int process, const char *text)
{
    dp__lock_enter(&tree->lock);
    bool first = tree->failed == DP_OK;
    if (first) {
        tree->culprit = process >= 0 && process < tree->process_count ? process : -1;
        snprintf(tree->text, sizeof tree->text, "%s", text);
        tree->failed = status;
    }
    dp__lock_leave(&tree->lock);
    return first;
}

/* Why the job has failed, if it has. */
static dp_status dp__tree_failure(dp__tree *tree)
{
    dp__lock_enter(&tree->lock);
    dp_status status = tree->failed;
    dp__lock_leave(&tree->lock);
    return status == DP_OK ? DP_OK : dp_error(status, "%s", tree->text);
}

/* All but the one that told it. */
DP__COLD static void dp__tree_pass_on(const dp__tree *tree, const dp__link *teller)
{
    for (int i = 0; i < tree->link_count; i++)
        if (&tree->links[i] != teller && !tree->links[i].left)
            dp__tree_header_failure(tree->links[i].fd, tree->failed, tree->culprit, tree->text);
}

/* false: another thread has the links. `tells`: then it is to tell the others of the failure. */
static bool dp__tree_enter(dp__tree *tree, bool tells)
{
    dp__lock_enter(&tree->lock);
    bool free = !tree->busy;
    tree->busy = true;
    tree->untold = tree->untold || (tells && !free);
    dp__lock_leave(&tree->lock);
    return free;
}

static void dp__tree_leave(dp__tree *tree)
{
    for (bool untold = true; untold;) {
        dp__lock_enter(&tree->lock);
        untold = tree->untold;
        tree->untold = false;
        tree->busy = untold;
        dp__lock_leave(&tree->lock);
        if (untold)
            dp__tree_pass_on(tree, NULL);
    }
}

/* A failure of this process, from any thread. One that waits for others hears of it, too. */
static void dp__tree_tell(dp__tree *tree, dp_status status, int process, const char *text)
{
    if (!dp__tree_note(tree, status, process, text) || !dp__tree_enter(tree, true))
        return;
    dp__tree_pass_on(tree, NULL);
    dp__tree_leave(tree);
}

/* Notes a failure, in the words of dp_last_error. */
DP__COLD static dp_status dp__tree_fail(dp__tree *tree, const dp__link *teller, dp_status status,
                                        int process)
{
    if (dp__tree_note(tree, status, process, dp_last_error()))
        dp__tree_pass_on(tree, teller);
    return dp__tree_failure(tree);
}

/* There is no sense in waiting for this link: `why` is said about the process at the other end. */
static dp_status dp__tree_lost(dp__tree *tree, dp__link *link, dp_status status, const char *why)
{
    if (status == DP_ERR_TIMEOUT)
        dp_error(status, "process %d of %d %s within %.3g s", link->process, tree->process_count,
                 why, tree->timeout_ms * 1e-3);
    else
        dp_error(status, "process %d of %d %s", link->process, tree->process_count, why);
    link->left = link->left || status == DP_ERR_REMOTE;
    return dp__tree_fail(tree, NULL, status, link->process);
}

/* Just a header, with the number of a call. If it cannot be sent at once, nobody listens. */
static void dp__tree_say(const dp__tree *tree, const dp__link *link, dp__kind kind, int call)
{
    dp__tree_header header = {DP__HEADER_MAGIC, (uint32_t)kind, call, tree->process, 0};
    (void)dp__wire_send(link->fd, &header, sizeof header, dp__os_after_ms(100));
}

/* A header that is no part of a call. */
static void dp__tree_answer(dp__tree *tree, dp__link *link)
{
    link->got = 0;
    if (link->header.kind == DP__BYE) {
        link->left = true;
    } else if (link->header.status < tree->calls) {
        return; /* of a call that is over */
    } else if (link->header.kind == DP__HERE) {
        link->here = true;
    } else {
        tree->until_ns = 0;
        dp__tree_say(tree, link, DP__HERE, link->header.status);
    }
}

/* To all but the one that brought it, as far as they listen: if there is no room for a progress
   message, nobody has read many of them yet, and who does so then asks if that is too little. Half
   a progress message would be the end of a link. */
DP__APART static void dp__tree_post(dp__tree *tree, const dp__link *bringer, int from,
                                    const dp__progress_message *progress)
{
    const dp__tree_progress whole = {
        {DP__HEADER_MAGIC, DP__PROGRESS, DP_OK, from, sizeof *progress}, *progress};
    for (int i = 0; i < tree->link_count; i++) {
        dp__link *link = &tree->links[i];
        if (link != bringer && !link->left && dp__os_ready(link->fd, DP__CAN_WRITE, 0))
            link->left = dp__wire_send(link->fd, &whole, sizeof whole, dp__os_after_ms(100)) ==
                         DP_ERR_TIMEOUT;
    }
}

/* The own one. Who only answers says the same thing once for all who ask at about the same time, as
   those do that wait for one process: a progress message about a process goes over each link of the
   tree once, however many have asked. If each question had its own answers, there would be as many
   as the square of the number of processes, and each would go over all links. */
DP__APART static void dp__tree_report(dp__tree *tree, const dp__progress_message *progress,
                                      bool answers)
{
    dp__progress_message news = *progress;
    uint64_t now = dp__os_now_ns();
    news.asks = 0;
    news.in_ns = 0;
    if (answers && now - tree->told_ns < dp__news_ns(tree->timeout_ms) &&
        memcmp(&news, &tree->told, sizeof news) == 0)
        return;
    tree->told = news;
    tree->told_ns = now;
    dp__tree_post(tree, NULL, tree->process, progress);
}

static dp_status dp__tree_letter(dp__tree *tree, dp__link *link)
{
    dp__progress_message progress;
    int from = link->header.process;
    link->got = 0;
    if (dp__wire_receive(link->fd, &progress, sizeof progress, dp__os_after_ms(DP__GRACE_MS)) !=
        DP_OK)
        return dp__tree_lost(tree, link, DP_ERR_REMOTE, "ended while it was sending");
    if (from < 0 || from >= tree->process_count || from == tree->process ||
        !dp__progress_message_is_sound(&progress))
        return dp__tree_lost(tree, link, DP_ERR_REMOTE,
                             "sent bytes that no process of a job sends");
    dp__tree_post(tree, link, from, &progress);
    if (tree->job == NULL || !dp__progress_message_read(tree->job, from, &progress))
        return DP_OK;
    progress = dp__progress_message_of(tree->job);
    dp__tree_report(tree, &progress, true);
    return DP_OK;
}

static dp_status dp__tree_last_words(dp__tree *tree, dp__link *link, int wait_ms);

/* While they meet, process 0 is connected to all, and says who was first to end: the neighbour that
   this process misses may have heard it sooner. */
DP__COLD static dp_status dp__tree_ended(dp__tree *tree, dp__link *link)
{
    bool meets = tree->process != 0 && tree->first_child == 0;
    link->left = true;
    if (meets && link != &tree->links[0])
        DP_TRY(dp__tree_last_words(tree, &tree->links[0], DP__GRACE_MS));
    return dp__tree_lost(tree, link, DP_ERR_REMOTE, "ended, or the connection to it broke");
}

/* Reads as much of a header as there is, and handles what belongs to no gathering. If the
   connection has ended, the job fails at once in a gathering; between gatherings (`listens`) the
   neighbour is marked dead, and whoever waits for it finds that (dp__journal_look). */
static dp_status dp__tree_hear(dp__tree *tree, dp__link *link, bool listens)
{
    dp__tree_header *header = &link->header;
    ptrdiff_t got =
        dp__os_receive(link->fd, (char *)header + link->got, sizeof *header - link->got);
    if (got < 0 && listens && tree->job != NULL) {
        link->left = true;
        dp__job_miss(tree->job, link->process);
        return DP_OK;
    }
    if (got < 0)
        return dp__tree_ended(tree, link);
    link->got += (size_t)got;
    if (link->got < sizeof *header)
        return DP_OK;
    if (!dp__tree_header_is_sound(header))
        return dp__tree_lost(tree, link, DP_ERR_REMOTE,
                             "sent bytes that no process of a job sends");
    if (header->kind == DP__FAILED) {
        dp_status status = dp__failure_shared(link->fd, header);
        return dp__tree_fail(tree, link, status, header->process);
    }
    if (header->kind == DP__PROGRESS)
        return dp__tree_letter(tree, link);
    if (header->kind == DP__BYE || header->kind == DP__ASK || header->kind == DP__HERE)
        dp__tree_answer(tree, link);
    return DP_OK;
}

/* ==== >>gathering ================================================================================
   all_gather over the tree, in as many steps as it is deep; and what a process that is in no such
   call hears when it looks.                                                                      */

/* Links that may have something new, for dp__os_poll; returns how many. */
static int dp__tree_watch(const dp__tree *tree, dp__os_watch *watch)
{
    int count = 0;
    for (int i = 0; i < tree->link_count; i++)
        if (!tree->links[i].left && tree->links[i].got < sizeof(dp__tree_header))
            watch[count++] = (dp__os_watch){.fd = tree->links[i].fd, .events = DP__CAN_READ};
    return count;
}

static dp_status dp__tree_hear_all(dp__tree *tree, const dp__os_watch *watch, int count,
                                   bool listens)
{
    for (int i = 0, k = 0; i < tree->link_count && k < count; i++) {
        dp__link *link = &tree->links[i];
        if (link->fd != watch[k].fd)
            continue;
        if (watch[k++].revents != 0)
            DP_TRY(dp__tree_hear(tree, link, listens));
    }
    return DP_OK;
}

/* Waits for something new, at most so long and at most until the next look, and hears all that has
   come: an answer may stand behind other things. */
static dp_status dp__tree_hear_new(dp__tree *tree, int ms, bool listens)
{
    dp__os_watch watch[DP__LINKS_MAX];
    bool more = true;
    ms = ms < DP__TREE_LOOK_MS ? ms : DP__TREE_LOOK_MS;
    for (int i = 0; i < DP__TREE_NOTES && more; i++, ms = 0) {
        int count = dp__tree_watch(tree, watch);
        more = dp__os_poll(watch, count, ms) > 0;
        if (more)
            DP_TRY(dp__tree_hear_all(tree, watch, count, listens));
    }
    return DP_OK;
}

/* Those who are missing, one bit for each link, are asked. */
static void dp__tree_ask(dp__tree *tree, uint32_t missing)
{
    for (int i = 0; i < tree->link_count; i++) {
        if ((missing >> i & 1) == 0)
            continue;
        tree->links[i].here = false;
        dp__tree_say(tree, &tree->links[i], DP__ASK, tree->calls);
    }
}

/* One of them has said something, or is not there. */
static dp_status dp__tree_look(dp__tree *tree, uint32_t missing, bool answered, dp__link **out)
{
    for (int i = 0; i < tree->link_count && *out == NULL; i++) {
        dp__link *link = &tree->links[i];
        if ((missing >> i & 1) == 0)
            continue;
        if (link->got == sizeof link->header)
            *out = link;
        else if (link->left)
            return dp__tree_lost(tree, link, DP_ERR_REMOTE, "has closed its context");
        else if (answered && !link->here)
            return dp__tree_lost(tree, link, DP_ERR_TIMEOUT, "did not come");
    }
    return DP_OK;
}

/* Fails where all who are missing have answered, again and again. */
DP__COLD static dp_status dp__tree_give_up(dp__tree *tree, uint32_t missing)
{
    int first = 0;
    while ((missing >> first & 1) == 0)
        first++;
    return dp__tree_lost(tree, &tree->links[first], DP_ERR_TIMEOUT,
                         "is there, and what it was to send did not come");
}

/* Until one of those who are missing has said something; all others are heard. Who has answered is
   asked again. That ends, as no two wait for each other, unless the network has lost something: a
   parent waits for its children before it gives them the whole, and they wait for it only after
   they gave their part. */
DP__COLD static dp_status dp__tree_await(dp__tree *tree, uint32_t missing, dp__link **out)
{
    uint64_t answer_ns = 0; /* 0: nobody was asked */
    int asks = 0;
    bool again = false;
    *out = NULL;
    for (;;) {
        int ms = answer_ns != 0 ? dp__ms_left(&answer_ns, &again) : dp__os_ms_until(tree->until_ns);
        DP_TRY(dp__tree_failure(tree));
        DP_TRY(dp__tree_look(tree, missing, answer_ns != 0 && ms == 0, out));
        if (*out != NULL)
            return DP_OK;
        dp_status status = tree->rest != NULL ? tree->rest(tree->user, 0) : DP_OK;
        if (status != DP_OK)
            return dp__tree_fail(tree, NULL, status, -1);
        if (ms == 0 && asks++ == DP__TREE_ASKS)
            return dp__tree_give_up(tree, missing);
        if (ms == 0) {
            dp__tree_ask(tree, missing);
            answer_ns = dp__os_after_ms(DP__GRACE_MS);
            again = false;
        }
        DP_TRY(dp__tree_hear_new(tree, ms, false));
    }
}

/* Asks process 0, to which the first link leads, whether it is there; fails if it does not answer.
   *out_held_ms: for how long it was held up. */
DP__COLD static dp_status dp__tree_probe(dp__tree *tree, int *out_held_ms)
{
    dp__link *first = &tree->links[0], *some = NULL;
    uint64_t until_ns = dp__os_after_ms(DP__GRACE_MS);
    bool again = false;
    dp__tree_ask(tree, 1);
    while (!first->here && some == NULL) {
        int ms = dp__ms_left(&until_ns, &again);
        DP_TRY(dp__tree_failure(tree));
        DP_TRY(dp__tree_look(tree, 1, ms == 0, &some));
        DP_TRY(dp__tree_hear_new(tree, ms, false));
    }
    *out_held_ms = (int)first->header.status;
    return DP_OK;
}

/* Begins to wait for others. While a context opens, what a wait takes is not there for the next
   one; once it is open, and has a job, each has the whole time-out. */
static void dp__tree_begin(dp__tree *tree)
{
    uint64_t whole_ns = (uint64_t)tree->timeout_ms * 1000000;
    tree->begun_ns = dp__os_now_ns();
    tree->ends_ns = tree->begun_ns + (tree->job != NULL ? whole_ns : tree->spare_ns);
}

static void dp__tree_end(dp__tree *tree)
{
    uint64_t waited_ns = dp__os_now_ns() - tree->begun_ns;
    tree->spare_ns -= waited_ns < tree->spare_ns ? waited_ns : tree->spare_ns;
}

/* Returns when a wait ends for one that is not asked whether it is there: it has a while, whatever
   is left. */
static uint64_t dp__tree_until(const dp__tree *tree, int least_ms)
{
    uint64_t least_ns = dp__os_after_ms(least_ms);
    return tree->ends_ns > least_ns ? tree->ends_ns : least_ns;
}

/* Receives the rest of what has begun to come. It answers no question meanwhile, so it gives up
   before those that ask do. */
static dp_status dp__tree_take(dp__tree *tree, dp__link *link, dp__kind kind, void *data,
                               size_t bytes)
{
    if (link->header.kind != (uint32_t)kind || link->header.bytes != bytes) {
        dp_error(DP_ERR_REMOTE,
                 "process %d of %d sent %llu bytes, process %d expected %zu: the processes are "
                 "executing different calls",
                 link->process, tree->process_count, (unsigned long long)link->header.bytes,
                 tree->process, bytes);
        return dp__tree_fail(tree, NULL, DP_ERR_REMOTE, link->process);
    }
    link->got = 0;
    uint64_t until_ns = dp__tree_until(tree, DP__GRACE_MS / 2);
    dp_status status = dp__wire_receive(link->fd, data, bytes, until_ns);
    return status == DP_OK ? DP_OK
                           : dp__tree_lost(tree, link, status,
                                           status == DP_ERR_TIMEOUT ? "did not send everything"
                                                                    : "ended while it was sending");
}

/* Reads all that was said before the connection broke, or is said in a while: it may be why. */
static dp_status dp__tree_last_words(dp__tree *tree, dp__link *link, int wait_ms)
{
    uint64_t until_ns = dp__os_after_ms(wait_ms);
    while (!link->left && link->got < sizeof link->header &&
           dp__os_ready(link->fd, DP__CAN_READ, dp__os_ms_until(until_ns)))
        DP_TRY(dp__tree_hear(tree, link, false));
    return DP_OK;
}

/* Sends to a neighbour. It cannot ask nor answer meanwhile, so it waits longer than those that can.
   If it gives up, half a header may have been sent, so that nothing can follow on that link. */
static dp_status dp__tree_give(dp__tree *tree, dp__link *link, dp__kind kind, const void *data,
                               size_t bytes)
{
    uint64_t until_ns = dp__tree_until(tree, DP__GRACE_MS) + DP__GRACE_MS * (uint64_t)1000000;
    dp__tree_header header = {DP__HEADER_MAGIC, (uint32_t)kind, DP_OK, tree->process, bytes};
    if (link->left)
        return dp__tree_lost(tree, link, DP_ERR_REMOTE, "has closed its context");
    dp_status status = dp__tree_header_send(link->fd, &header, data, until_ns);
    if (status == DP_OK)
        return DP_OK;
    if (status == DP_ERR_REMOTE)
        DP_TRY(dp__tree_last_words(tree, link, 0));
    link->left = true;
    return dp__tree_lost(tree, link, status,
                         status == DP_ERR_TIMEOUT ? "did not receive" : "has ended");
}

/* The parts of all children, as they come: who has given its part may ask for the whole. */
static dp_status dp__tree_take_all(dp__tree *tree, char *all, size_t bytes_each)
{
    uint32_t missing = (1u << tree->link_count) - (1u << tree->first_child);
    while (missing != 0) {
        dp__link *child;
        DP_TRY(dp__tree_await(tree, missing, &child));
        size_t part = (size_t)dp__behind(child->process, tree->process_count) * bytes_each;
        DP_TRY(dp__tree_take(tree, child, DP__GATHER, all + (size_t)child->process * bytes_each,
                             part));
        missing &= ~(1u << (child - tree->links));
    }
    return DP_OK;
}

/* The part of each child is one run, so it is received in its place. */
static dp_status dp__tree_gather(dp__tree *tree, const void *in, char *all, size_t bytes_each)
{
    char *own = all + (size_t)tree->process * bytes_each;
    size_t bytes = (size_t)tree->process_count * bytes_each;
    DP_TRY(dp__tree_failure(tree));
    memmove(own, in, bytes_each);
    tree->calls++;
    dp__tree_begin(tree);
    tree->until_ns = tree->ends_ns;
    DP_TRY(dp__tree_take_all(tree, all, bytes_each));
    if (tree->process != 0) {
        size_t part = (size_t)dp__behind(tree->process, tree->process_count) * bytes_each;
        dp__link *parent;
        DP_TRY(dp__tree_give(tree, &tree->links[0], DP__GATHER, own, part));
        DP_TRY(dp__tree_await(tree, 1, &parent));
        DP_TRY(dp__tree_take(tree, parent, DP__SPREAD, all, bytes));
    }
    for (int i = tree->link_count; i-- > tree->first_child;) /* those with most behind them first */
        DP_TRY(dp__tree_give(tree, &tree->links[i], DP__SPREAD, all, bytes));
    dp__tree_end(tree);
    return DP_OK;
}

/* dp_bootstrap.all_gather */
static dp_status dp__tree_all_gather(const void *in, void *out, size_t bytes_each, void *user)
{
    while (!dp__tree_enter(user, false))
        dp__os_sleep_ms(1);
    dp_status status = dp__tree_gather(user, in, out, bytes_each);
    dp__tree_leave(user);
    return status;
}

/* Between calls, and without waiting: why the job has failed, if it has; tree->culprit then says
   because of which process. */
static dp_status dp__tree_listen(dp__tree *tree)
{
    if (dp__tree_enter(tree, false)) {
        if (dp__tree_failure(tree) == DP_OK)
            (void)dp__tree_hear_new(tree, 0, true);
        dp__tree_leave(tree);
    }
    return dp__tree_failure(tree);
}

/* Answers those that have gone on to the next call that this process is there: their questions
   stand behind what that call is to read. */
static void dp__tree_stay(const dp__tree *tree)
{
    for (int i = 0; i < tree->link_count; i++)
        if (!tree->links[i].left && tree->links[i].got == sizeof(dp__tree_header))
            dp__tree_say(tree, &tree->links[i], DP__HERE, tree->calls + 1);
}

/* Passes over what others have given to a call that is not to be, and reads what comes behind it:
   why they fail, if they do. */
DP__COLD static dp_status dp__tree_skip(dp__tree *tree)
{
    char some[256];
    for (int i = 0; i < tree->link_count; i++) {
        dp__link *link = &tree->links[i];
        uint64_t until_ns = dp__os_after_ms(DP__GRACE_MS), bytes = link->header.bytes;
        if (link->left || link->got < sizeof link->header)
            continue;
        link->got = 0;
        while (!link->left && bytes > 0) {
            size_t part = bytes < sizeof some ? (size_t)bytes : sizeof some;
            link->left = dp__wire_receive(link->fd, some, part, until_ns) != DP_OK;
            bytes -= part;
        }
    }
    return dp__tree_listen(tree);
}

/* Closes without a word. So does a child of fork with its copies: it may outlive its parent, whose
   end others notice by that of the connections, and the address is not its own. */
static void dp__tree_let_go(dp__tree *tree)
{
    if (tree == NULL)
        return;
    for (int i = 0; i < tree->link_count; i++)
        dp__os_drop(&tree->links[i].fd);
    dp__os_drop(&tree->claim);
}

/* Closes the tree, and waits for nobody that has room for a farewell: half of one would read as a
   death. */
static void dp__tree_close(dp__tree *tree, bool politely)
{
    if (tree == NULL)
        return;
    dp__tree_header bye = {DP__HEADER_MAGIC, DP__BYE, DP_OK, tree->process, 0};
    uint64_t bye_ns = dp__os_after_ms(DP__LAST_WORDS_MS);
    for (int i = 0; i < tree->link_count; i++)
        if (politely && !tree->links[i].left)
            (void)dp__wire_send(tree->links[i].fd, &bye, sizeof bye, bye_ns);
    uint64_t until_ns = dp__os_after_ms(tree->failed != DP_OK ? DP__LAST_WORDS_MS : 0);
    for (int i = 0; politely && i < tree->link_count; i++) {
        dp__os_finish(tree->links[i].fd, until_ns);
        tree->links[i].fd = -1;
    }
    if (politely && tree->claim >= 0)
        dp__os_forget(&tree->claimed);
    dp__tree_let_go(tree);
    dp__os_free(tree, 0, NULL);
}

#endif /* DP__ROOMS */

/* The licence is at the end of dp.h. */
