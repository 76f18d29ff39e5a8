/* bench_reduce.c - C8, C14: training steps on two devices, in one process or in two, against two
   processes that have half of the batch each and never talk to each other (peers/steps.c). The
   limit: they wait for each other at the end of each step, with nothing to add. */

#include <stdio.h>
#include "bench.h"

typedef struct net {
    const char *what;
    int width, steps; /* of a round */
    double at_least;
    bool mlp; /* which two devices of a process train, too, and torch */
} net;

static const net nets[] = {
    {"C8 MLP 784-1024-1024-10", 1024, 4, 0.97, true},
    {"C8 MLP 784-256-256-10", 256, 20, 0.97, true},
    {"C14 GPT of 0.1 M parameters", 64, 20, 0.95, false},
    {"C14 GPT of 10 M parameters", 320, 1, 0.95, false},
};

typedef struct question {
    const net *net;
    const char *peer, *how;
} question;

static double ask(void *user)
{
    const question *q = user;
    return peer_ask(peer_of(q->peer, bench.directory), q->how, (size_t)q->net->width,
                    q->net->steps);
}

static void report_hidden(const net *n)
{
    char what[96];
    snprintf(what, sizeof(what), "%.3s   of its communication not hidden", n->what);
    double percent = peer_ask(peer_of("steps", bench.directory), "hidden", (size_t)n->width, 1);
    if (percent < 0)
        report_absent(what);
    else
        report_count(what, (int)percent, 100, " %");
}

static void rows_of(const net *n)
{
    enum { PROCESSES, ALONE, MEETING, DEVICES, TORCH, TORCH_ALONE, ENTRANTS };
    question questions[ENTRANTS] = {
        [PROCESSES] = {n, "steps", "processes"}, [ALONE] = {n, "steps", "alone"},
        [MEETING] = {n, "steps", "meeting"},     [DEVICES] = {n, "steps", "devices"},
        [TORCH] = {n, "torch", "together"},      [TORCH_ALONE] = {n, "torch", "alone"}};
    entrant e[ENTRANTS];
    char what[96];
    for (int i = 0; i < ENTRANTS; i++)
        e[i] = (entrant){.once = ask, .user = &questions[i]};
    take_turns(e, n->mlp ? ENTRANTS : DEVICES);
    if (n->mlp) {
        snprintf(what, sizeof(what), "%s, 2 devices", n->what);
        report_speed(what, &e[DEVICES].times, &e[ALONE].times, &e[MEETING].times, n->at_least);
    }
    snprintf(what, sizeof(what), "%s, 2 processes", n->what);
    report_speed(what, &e[PROCESSES].times, &e[ALONE].times, &e[MEETING].times, n->at_least);
    if (n->mlp)
        report_peer("C8   torch DDP over gloo, likewise", &e[TORCH].times, &e[TORCH_ALONE].times);
    report_hidden(n);
}

void rows_c8(void)
{
    rows_of(&nets[0]);
    rows_of(&nets[1]);
}

void rows_c14(void)
{
    rows_of(&nets[2]);
    rows_of(&nets[3]);
}
