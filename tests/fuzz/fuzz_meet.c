/* fuzz_meet.c - bytes from a socket, before any is trusted: connections to the server of process 0
   and of another one, whoever answers a caller, and notes on lasting connections; and what stands
   in the environment. Whatever comes, no process joins without a proof, and a failure has a
   sentence. The implementation is in this file once more, static: none of this is public. */

#define DP_STATIC
#define DP_IMPLEMENTATION
#include "../../dp.h"

#include "environment.h"

enum { FUZZ_WORLD = 8, FUZZ_CALLERS = 6 };

static const dp__key key = {3, 4}, key_of_votes = {5, 6};

typedef struct callers {
    int fds[FUZZ_CALLERS]; /* the other ends of their connections */
    dp__join_request requests[FUZZ_CALLERS];
    bool requested[FUZZ_CALLERS], proved[FUZZ_CALLERS];
    int proofs, votes; /* good ones, for the tree and for votes; */
    int taken;         /* those that vote, and were let in */
} callers;

static void pair(int fds[2])
{
    FUZZ_CHECK(socketpair(AF_UNIX, SOCK_STREAM, 0, fds) == 0);
    dp__os_prepare(fds[0], AF_UNIX);
    dp__os_prepare(fds[1], AF_UNIX);
}

/* A piece of the input as it is. */
static void send_noise(fuzz *in, int fd)
{
    size_t bytes = (size_t)fuzz_next(in, 64), left = in->bytes - in->at;
    bytes = bytes < left ? bytes : left;
    if (bytes > 0) {
        (void)dp__os_send(fd, in->data + in->at, bytes);
    }
    in->at += bytes;
}

static void send_request(fuzz *in, callers *all, int who)
{
    int version = fuzz_next(in, 4), process = fuzz_next(in, FUZZ_WORLD + 2) - 1;
    int count = fuzz_next(in, 4), kind = fuzz_next(in, 2 * DP__CONNECTION_KINDS);
    dp__join_request request = {.magic = DP__JOIN_MAGIC,
                                .version = version == 3 ? 1 : DP_VERSION,
                                .process = process,
                                .process_count = count == 3 ? 5 : FUZZ_WORLD,
                                .listens = 7,
                                .kind = (uint16_t)(kind <= DP__CONNECTION_KINDS ? kind : 0),
                                .patience_ms = 60000};
    request.nonce = (uint64_t)who;
    all->requests[who] = request;
    all->requested[who] = true;
    (void)dp__os_send(all->fds[who], &request, sizeof request);
}

/* The answer to a challenge, if there is one; good, or wrong by one bit. */
static void send_proof(fuzz *in, callers *all, int who)
{
    dp__challenge challenge;
    ptrdiff_t got = dp__os_receive(all->fds[who], &challenge, sizeof challenge);
    bool good = fuzz_next(in, 4) != 3;
    if (got != (ptrdiff_t)sizeof challenge || challenge.magic != DP__CHALLENGE_MAGIC ||
        !all->requested[who]) {
        return; /* it was refused, or is not heard yet */
    }
    bool votes = all->requests[who].kind == DP__FOR_VOTES;
    uint64_t proof =
        dp__proof(votes ? key_of_votes : key, &all->requests[who], challenge.nonce, true) ^ !good;
    all->proved[who] = all->proved[who] || good;
    all->proofs += good && !votes;
    all->votes += good && votes;
    (void)dp__os_send(all->fds[who], &proof, sizeof proof);
}

static void come_in(dp__server *server, callers *all, int who)
{
    int fds[2];
    if (all->fds[who] >= 0) {
        return;
    }
    pair(fds);
    all->fds[who] = fds[0];
    dp__pending_hold(server->listener, fds[1]);
}

/* One step of a connection; the server looks after each. */
static dp_status step(fuzz *in, dp__server *server, callers *all)
{
    int what = fuzz_next(in, 5), who = fuzz_next(in, FUZZ_CALLERS);
    come_in(server, all, who);
    if (what == 0) {
        send_noise(in, all->fds[who]);
    } else if (what == 1) {
        send_request(in, all, who);
    } else if (what == 2) {
        send_proof(in, all, who);
    } else if (what == 3) {
        dp__os_close(all->fds[who]);
        all->fds[who] = -1;
        all->requested[who] = false;
    }
    dp_status status = dp__server_look(server);
    dp__pending vote;
    while (dp__listener_take(server->listener, DP__FOR_VOTES, &vote)) {
        all->taken++;
        dp__os_close(vote.fd);
    }
    FUZZ_CHECK(all->taken <= all->votes);
    FUZZ_CHECK(server->taken <= server->expected && server->taken <= all->proofs);
    return status;
}

/* The server of process 0, or of process 4, whose children are 5 and 6. At its port others vote,
   and nobody joins or sends messages. */
static void try_server(fuzz *in)
{
    int ends[2], process = fuzz_next(in, 2) * 4;
    dp__launch launch = {.where = "here"};
    dp__tree tree = {.process = process, .process_count = FUZZ_WORLD, .timeout_ms = 1, .claim = -1};
    dp__server server = {.launch = &launch,
                         .process = process,
                         .process_count = FUZZ_WORLD,
                         .all = process == 0,
                         .tree = &tree,
                         .until_ns = dp__os_now_ns()};
    callers all = {.fds = {-1, -1, -1, -1, -1, -1}};
    dp__listener listener = dp__listener_none();
    dp_status status = dp__server_open(&server, &listener, key);
    FUZZ_CHECK(dp__listener_serve(&listener, DP__FOR_VOTES, (dp__service){.key = key_of_votes}) ==
               DP_OK);
    pair(ends); /* nobody calls there */
    listener.fd = ends[0];
    while (in->at < in->bytes && status == DP_OK) {
        status = step(in, &server, &all);
    }
    FUZZ_CHECK(status == DP_OK || server.twice || dp_status_class(status) == DP_CLASS_JOB);
    FUZZ_CHECK(!server.twice || (status == DP_ERR_MISMATCH && all.proofs > 0));
    for (int i = 0; i < FUZZ_CALLERS; i++) {
        dp__os_close(all.fds[i]);
    }
    for (int i = 0; i < tree.link_count; i++) {
        dp__os_close(tree.links[i].fd);
    }
    dp__os_close(ends[1]);
    dp__server_close(&server);
    dp__listener_close(&listener);
}

/* What a neighbour says: the rest of the input, perhaps with a beginning that may be a note. It may
   end after that; returns its end of the connection, or -1. */
static int speak(fuzz *in, int fd)
{
    if (fuzz_next(in, 2) == 1) {
        dp__tree_header note = {DP__HEADER_MAGIC, 0, 0, 1, 0};
        note.kind = (uint32_t)fuzz_next(in, DP__KINDS + 1);
        note.status = fuzz_next(in, 16) - 14;
        note.bytes = (uint64_t)fuzz_next(in, 40);
        (void)dp__os_send(fd, &note, sizeof note);
    }
    (void)dp__os_send(fd, in->data + in->at, in->bytes - in->at);
    if (in->bytes % 16) { /* who does not end is waited for */
        dp__os_close(fd);
        return -1;
    }
    return fd;
}

/* A process has come in, and waits to hear that all have; it gets the input. */
static void try_welcome(fuzz in)
{
    int fds[2];
    dp__welcome welcome = {0};
    pair(fds);
    fds[1] = speak(&in, fds[1]);
    dp_status status = dp__await_welcome(fds[0], FUZZ_WORLD, dp__os_now_ns(), &welcome);
    FUZZ_CHECK(status == DP_OK || dp__is_failure(status));
    FUZZ_CHECK((status == DP_OK) == (dp_last_error()[0] == '\0'));
    FUZZ_CHECK(memchr(welcome.host, '\0', sizeof welcome.host) != NULL);
    dp__os_close(fds[0]);
    dp__os_close(fds[1]);
}

/* Process 0 of 2, which has begun nothing. */
static dp__job *fuzz_job(void)
{
    static _Alignas(128) char board[1 << 20];
    static int firsts[] = {0, 1, 2}, ids[] = {100, 101};
    static dp__job job;
    size_t head = dp__board_bytes(2);
    FUZZ_CHECK(head + (size_t)(DP__LANES * (DP__KEPT + 2)) * sizeof(dp__entry) <= sizeof board);
    memset(board, 0, head);
    job = (dp__job){.process_count = 2, .board = (void *)board, .firsts = firsts, .ids = ids};
    for (int i = 0; i < DP__LANES; i++) {
        job.journals[i].job = &job;
        job.journals[i].place = i;
    }
    return &job;
}

/* Process 0 of 2 waits for what process 1 gives, and gets the input. */
static void try_tree(fuzz *in)
{
    int fds[2];
    char all[2 * 16], own[16] = "", last[DP__LAST_BYTES];
    dp__tree tree = {.process_count = 2, .timeout_ms = 1, .job = fuzz_job()};
    pair(fds);
    dp__tree_link(&tree, fds[0], 1);
    fds[1] = speak(in, fds[1]);
    dp__os_watch watch = {.fd = fds[0], .events = POLLIN};
    dp_status status = DP_OK;
    while (status == DP_OK && tree.links[0].got < sizeof(dp__tree_header) && !tree.links[0].left &&
           dp__os_poll(&watch, 1, 0) > 0) {
        status = dp__tree_hear(&tree, &tree.links[0], true);
    }
    for (int i = 0; i < DP__LANES; i++) {
        FUZZ_CHECK(dp__last_text(&tree.job->journals[i], 1, 1, last) == last);
    }
    const dp__tree_header *header = &tree.links[0].header; /* what is none is not taken for one */
    FUZZ_CHECK(status != DP_OK || tree.links[0].got < sizeof *header ||
               (header->magic == DP__HEADER_MAGIC && header->kind < DP__KINDS));
    status = dp__tree_all_gather(own, all, sizeof own, &tree);
    FUZZ_CHECK(status == DP_OK || dp_status_class(status) == DP_CLASS_JOB);
    FUZZ_CHECK(status == DP_OK || dp_last_error()[0] != '\0');
    dp__os_close(fds[0]);
    dp__os_close(fds[1]);
}

/* A process connects to a listener that has no key, and does not trust it. */
static void try_caller(fuzz in)
{
    int fds[2];
    const char *why = NULL;
    dp__join_request request = {.magic = DP__JOIN_MAGIC, .version = DP_VERSION, .process = 1};
    dp__challenge challenge = {.magic = DP__CHALLENGE_MAGIC, .version = DP_VERSION, .nonce = 1};
    pair(fds);
    if (fuzz_next(&in, 2) == 1)
        (void)dp__os_send(fds[1], &challenge, sizeof challenge);
    (void)dp__os_send(fds[1], in.data + in.at, in.bytes - in.at);
    if (fuzz_next(&in, 2) == 1) {
        dp__os_close(fds[1]);
        fds[1] = -1;
    }
    FUZZ_CHECK(!dp__handshake(fds[0], key, &request, dp__os_now_ns(), &why));
    dp__os_close(fds[0]);
    dp__os_close(fds[1]);
}

enum { PART = 16, PROCESSES = 4, NOTES = 6 };

/* A note in good form, and as many bytes as it says, or some fewer. */
static void say(fuzz *in, int fd)
{
    static const size_t sizes[] = {0, PART, PART * PROCESSES, 7, sizeof(dp__welcome)};
    char data[PART * PROCESSES + sizeof(dp__welcome)];
    int kind = fuzz_next(in, DP__KINDS), size = fuzz_next(in, 8), status = fuzz_next(in, 20) - 15;
    int process = fuzz_next(in, PROCESSES + 2) - 1;
    dp__tree_header note = {DP__HEADER_MAGIC, (uint32_t)kind, status, process, sizes[size % 5]};
    memset(data, 'a' + kind, sizeof data);
    if (kind == DP__GATHER && size > 4)
        note.bytes = PART;
    else if (kind == DP__SPREAD && size > 4)
        note.bytes = PART * PROCESSES;
    (void)dp__os_send(fd, &note, sizeof note);
    size_t less = fuzz_next(in, 8) == 1 && note.bytes > 0;
    (void)dp__os_send(fd, data, note.bytes - less);
}

/* Process 2 of 4, between its parent 0 and its child 3, hears notes of both and then their end. It
   has a result only if both said what they were to say. */
static void try_conversation(fuzz *in)
{
    int up[2], down[2];
    char own[PART] = "own", all[PART * PROCESSES];
    dp__tree tree = {.process = 2, .process_count = PROCESSES, .timeout_ms = 1, .claim = -1};
    pair(up);
    pair(down);
    dp__tree_link(&tree, up[0], 0);
    dp__tree_link(&tree, down[0], 3);
    tree.first_child = 1;
    for (int i = fuzz_next(in, NOTES); i >= 0; i--) {
        bool parent = fuzz_next(in, 2) == 1;
        say(in, parent ? up[1] : down[1]);
    }
    dp__os_close(up[1]);
    dp__os_close(down[1]);
    dp_status status = dp__tree_all_gather(own, all, sizeof own, &tree);
    FUZZ_CHECK(dp_status_class(status) == (status == DP_OK ? DP_CLASS_NONE : DP_CLASS_JOB));
    FUZZ_CHECK(status == tree.failed && (status == DP_OK || dp_last_error()[0] != '\0'));
    for (size_t i = 0; i < sizeof all && status == DP_OK; i++)
        FUZZ_CHECK(all[i] == 'a' + DP__SPREAD);
    dp__os_close(up[0]);
    dp__os_close(down[0]);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes)
{
    fuzz in = {.data = data, .bytes = bytes};
    int what = fuzz_next(&in, 5);
    if (what < 2) {
        try_server(&in);
    } else if (what == 2) {
        (void)dp__sentence_hide(); /* of the input before */
        try_welcome(in);
        try_tree(&in);
    } else if (what == 3) {
        try_caller(in);
        try_conversation(&in);
    } else {
        try_environment(&in);
    }
    return 0;
}
