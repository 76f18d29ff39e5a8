/* dp/asking.h - v0.2.0 - what a process answers those that ask from another machine - MIT licence

   Part of dp.h, which includes it. Whoever may see what a process of this user has open reads its
   board there (>>shown in dp/job.h). A board reaches no further than its machine. So in a job of
   several machines it says, too, where each process listens, and a key. Who has the key connects to
   the port of a process and gets what its own board shows of it. examples/status.c is such a
   program.

   It is a connection of its own kind at the one port that a process has (dp/listener.h), with the
   request, the challenge and the proof of all others (>>wire in dp/tree.h). The key opens nothing
   else, and nothing is sent to one that has not proved that it has it. The answer is sent whole, as
   it fits what the system keeps for a connection, or is not; then the connection is closed. So no
   thread waits for one that asks. Whichever thread looks at the port answers, and while none does,
   as the process computes or hangs, its watchdog.

   Processes that have met by MPI have no port, and those of one machine see each other's boards.

   CONTENTS (search for the tag)
     >>answer what travels
     >>asking who may ask
*/

#ifndef DP__ROOMS
#error "dp/asking.h is a part of dp.h: include dp.h"
#else

/* ==== >>answer ==================================================================================
   Parts of a board, as they lie there: its layout and version are those of the answer.          */

enum { DP__ASK_REPLY_MAGIC = 0x31706164 };

typedef struct dp__ask_reply {
    uint32_t magic, bytes; /* bytes: of all of it */
    uint64_t now_ns;       /* by the clock of the times in it */
    uint64_t memory;       /* of the process */
    unsigned char head[sizeof(dp__board_head)];
    char text[DP__TEXT_BYTES]; /* why the job has failed; "": it has not, for all it knows */
    uint64_t member[sizeof(dp__progress) / sizeof(uint64_t)];
    dp__entry last[DP__LANES]; /* what it has begun; seq 0: unknown */
} dp__ask_reply;
_Static_assert(sizeof(dp__ask_reply) == 24 + 112 + 512 + 1280 + 2 * 184 &&
                   (int)DP__HOST_NAME_BYTES >= (int)DP__PLACE_BYTES && DP__FOR_ASKING == 5,
               "as in examples/status.c; another layout has another number");

/* Puts together what this process shows. The head says nothing of how to ask others. */
DP__COLD static void dp__ask_reply_make(const dp__job *job, dp__ask_reply *out)
{
    const dp__board *board = job->board;
    const dp__progress *own = dp__progress_of(job, job->process);
    memset(out, 0, sizeof *out);
    out->magic = DP__ASK_REPLY_MAGIC;
    out->bytes = sizeof *out;
    memcpy(out->head, &board->head, offsetof(dp__board_head, asks));
    if (atomic_load(&job->board->failed) == 2)
        memcpy(out->text, board->text, sizeof out->text);
    for (int i = 0; i < DP__LANES; i++)
        (void)dp__entry_get(&job->journals[i], job->process, atomic_load(&own->tracks[i].begun),
                            &out->last[i]);
    dp__words_load(out->member, (const void *)own, sizeof *own / sizeof(uint64_t));
    out->memory = dp__os_resident_bytes(dp__os_process_id());
    out->now_ns = dp__os_now_ns();
}

/* ==== >>asking ==================================================================================
   From the opening of the port to its end.                                                      */

/* dp__service.answers: one that takes less than all of it gets no answer. */
DP__COLD static void dp__ask_answer(const void *user, int fd)
{
    dp__ask_reply answer;
    dp__ask_reply_make(user, &answer);
    (void)dp__os_send(fd, &answer, sizeof answer);
}

static bool dp__job_has_machines(const dp__job *job)
{
    bool several = false;
    for (int p = 0; p < job->process_count; p++)
        several = several || job->introductions[p].machine != job->introduction.machine;
    return several;
}

/* Shows where each process can be asked, and by which key: that comes last. */
DP__COLD static void dp__asking_show(const dp__job *job, const dp__port *port, dp__key key)
{
    for (int p = 0; p < job->process_count; p++) {
        dp__progress *member = dp__progress_of(job, p);
        dp__label_put(member->address, sizeof member->address, dp__port_host(port, p));
        member->port = port->seats[p].port;
    }
    atomic_store(&job->board->head.asks[1], key.high);
    atomic_store_explicit(&job->board->head.asks[0], key.low, memory_order_release);
}

/* Lets others ask this process, if its job has several machines, and a port. It ends with the port,
   before which the watchdog ends. */
DP__COLD static void dp__asking_begin(dp_ctx *ctx)
{
    const dp__job *job = ctx->world.job;
    const dp__port *port = ctx->world.port;
    if (job == NULL || port == NULL || port->why[0] != '\0' || port->listener->fd < 0 ||
        job->shared.data != NULL || !dp__job_has_machines(job))
        return;
    const dp__service service = {
        .key = dp__key_with(port->launch.key, "ask"), .answers = dp__ask_answer, .user = job};
    if (dp__listener_serve(port->listener, DP__FOR_ASKING, service) != DP_OK ||
        !dp__watchdog_listens(ctx, port->listener))
        return;
    dp__asking_show(job, port, service.key);
}

#endif /* DP__ROOMS */

/* The licence is at the end of dp.h. */
