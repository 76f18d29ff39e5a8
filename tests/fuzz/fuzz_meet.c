/* fuzz_meet.c - bytes from a socket, before anybody is believed: guests at the door of process 0
   and of another one, notes on a lasting connection, and what stands in the environment. Whatever
   comes, nobody has a seat without a proof, and a failure has a sentence. The implementation is in
   this file once more, static: none of this is public. */

#define DP_STATIC
#define DP_IMPLEMENTATION
#include "../../dp.h"

#include "fuzz.h"

enum { FUZZ_WORLD = 8, FUZZ_GUESTS = 6 };

static const dp__key key = {3, 4};

typedef struct guests {
    int fds[FUZZ_GUESTS]; /* the other ends of their connections */
    dp__knock knocks[FUZZ_GUESTS];
    bool knocked[FUZZ_GUESTS], proved[FUZZ_GUESTS];
    int proofs;
} guests;

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

static void send_knock(fuzz *in, guests *all, int who)
{
    int version = fuzz_next(in, 4), process = fuzz_next(in, FUZZ_WORLD + 2) - 1;
    int count = fuzz_next(in, 4);
    dp__knock knock = {.magic = DP__KNOCK_MAGIC,
                       .version = version == 3 ? 1 : DP_VERSION,
                       .process = process,
                       .process_count = count == 3 ? 5 : FUZZ_WORLD,
                       .listens = 7,
                       .patience_ms = 60000};
    knock.nonce = (uint64_t)who;
    all->knocks[who] = knock;
    all->knocked[who] = true;
    (void)dp__os_send(all->fds[who], &knock, sizeof knock);
}

/* The answer to a challenge, if there is one; good, or wrong by one bit. */
static void send_proof(fuzz *in, guests *all, int who)
{
    dp__challenge challenge;
    ptrdiff_t got = dp__os_receive(all->fds[who], &challenge, sizeof challenge);
    bool good = fuzz_next(in, 4) != 3;
    if (got != (ptrdiff_t)sizeof challenge || challenge.magic != DP__CHALLENGE_MAGIC ||
        !all->knocked[who]) {
        return; /* it was refused, or is not heard yet */
    }
    uint64_t proof = dp__proof(key, &all->knocks[who], challenge.nonce, true) ^ !good;
    all->proved[who] = all->proved[who] || good;
    all->proofs += good;
    (void)dp__os_send(all->fds[who], &proof, sizeof proof);
}

static void come_in(dp__door *door, guests *all, int who)
{
    int fds[2];
    if (all->fds[who] >= 0 || door->guest_count == door->guest_room) {
        return;
    }
    pair(fds);
    all->fds[who] = fds[0];
    door->guests[door->guest_count++] = (dp__guest){.fd = fds[1], .came_ns = dp__os_now_ns()};
}

/* One step of a guest; the door looks after each. */
static dp_status step(fuzz *in, dp__door *door, guests *all)
{
    int what = fuzz_next(in, 5), who = fuzz_next(in, FUZZ_GUESTS);
    come_in(door, all, who);
    if (what == 0) {
        send_noise(in, all->fds[who]);
    } else if (what == 1) {
        send_knock(in, all, who);
    } else if (what == 2) {
        send_proof(in, all, who);
    } else if (what == 3) {
        dp__os_close(all->fds[who]);
        all->fds[who] = -1;
        all->knocked[who] = false;
    }
    dp_status status = dp__door_look(door);
    FUZZ_CHECK(door->taken <= door->expected && door->taken <= all->proofs);
    return status;
}

/* The door of process 0, or of process 4, whose children are 5 and 6. */
static void try_door(fuzz *in)
{
    int listener[2], process = fuzz_next(in, 2) * 4;
    dp__launch launch = {.where = "here"};
    dp__tree tree = {.process = process, .process_count = FUZZ_WORLD, .timeout_ms = 1, .claim = -1};
    dp__door door = {.launch = &launch,
                     .process = process,
                     .process_count = FUZZ_WORLD,
                     .all = process == 0,
                     .tree = &tree,
                     .key = key,
                     .until_ns = dp__os_now_ns()};
    guests all = {.fds = {-1, -1, -1, -1, -1, -1}};
    dp_status status = dp__door_open(&door);
    pair(listener); /* nobody calls there */
    door.listener = listener[0];
    while (in->at < in->bytes && status == DP_OK) {
        status = step(in, &door, &all);
    }
    FUZZ_CHECK(status == DP_OK || door.twice || dp_status_class(status) == DP_CLASS_JOB);
    FUZZ_CHECK(!door.twice || (status == DP_ERR_MISMATCH && all.proofs > 0));
    for (int i = 0; i < FUZZ_GUESTS; i++) {
        dp__os_close(all.fds[i]);
    }
    for (int i = 0; i < tree.link_count; i++) {
        dp__os_close(tree.links[i].fd);
    }
    dp__os_close(listener[1]);
    dp__door_close(&door);
}

/* What a neighbour says: the rest of the input, perhaps with a beginning that may be a note. It may
   end after that; returns its end of the connection, or -1. */
static int speak(fuzz *in, int fd)
{
    if (fuzz_next(in, 2) == 1) {
        dp__note note = {DP__NOTE_MAGIC, 0, 0, 1, 0};
        note.kind = (uint32_t)fuzz_next(in, DP__KINDS + 1);
        note.status = fuzz_next(in, 16) - 14;
        note.bytes = (uint64_t)fuzz_next(in, 40);
        (void)dp__os_send(fd, &note, sizeof note);
    }
    (void)dp__os_send(fd, in->data + in->at, in->bytes - in->at);
    if (in->bytes % 2) {
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

/* Process 0 of 2 waits for what process 1 gives, and gets the input. */
static void try_tree(fuzz *in)
{
    int fds[2];
    char all[2 * 16], own[16] = "";
    dp__tree tree = {.process_count = 2, .timeout_ms = 1};
    pair(fds);
    dp__tree_link(&tree, fds[0], 1);
    fds[1] = speak(in, fds[1]);
    dp__os_watch watch = {.fd = fds[0], .events = POLLIN};
    dp_status status = DP_OK;
    while (status == DP_OK && tree.links[0].got < sizeof(dp__note) && !tree.links[0].left &&
           dp__os_poll(&watch, 1, 0) > 0) {
        status = dp__tree_hear(&tree, &tree.links[0]);
    }
    const dp__note *note = &tree.links[0].note; /* what is none is not taken for one */
    FUZZ_CHECK(status != DP_OK || tree.links[0].got < sizeof *note ||
               (note->magic == DP__NOTE_MAGIC && note->kind < DP__KINDS));
    status = dp__tree_all_gather(own, all, sizeof own, &tree);
    FUZZ_CHECK(status == DP_OK || dp_status_class(status) == DP_CLASS_JOB);
    FUZZ_CHECK(status == DP_OK || dp_last_error()[0] != '\0');
    dp__os_close(fds[0]);
    dp__os_close(fds[1]);
}

/* An address and a list of machines. */
static void try_environment(const fuzz *in)
{
    char *text = malloc(in->bytes - in->at + 1), host[DP__HOST_BYTES];
    dp__launch launch = {.process_count = 2};
    FUZZ_CHECK(text != NULL);
    memcpy(text, in->data + in->at, in->bytes - in->at);
    text[in->bytes - in->at] = '\0';
    dp_status status = dp__launch_address(&launch, text);
    FUZZ_CHECK(status == DP_OK || status == DP_ERR_INVALID);
    FUZZ_CHECK(status != DP_OK || text[0] == '@' ||
               (launch.host[0] != '\0' && launch.port > 0 && launch.port <= DP__PORT_MAX));
    dp__first_host(text, host, sizeof host);
    FUZZ_CHECK(strlen(host) < sizeof host);
    free(text);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes)
{
    fuzz in = {.data = data, .bytes = bytes};
    int what = fuzz_next(&in, 4);
    if (what < 2) {
        try_door(&in);
    } else if (what == 2) {
        (void)dp__sentence_hide(); /* of the input before */
        try_welcome(in);
        try_tree(&in);
    } else {
        try_environment(&in);
    }
    return 0;
}
