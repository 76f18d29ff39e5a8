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

static void report_hidden(const net *n)
{
    char what[96];
    snprintf(what, sizeof(what), "%.3s   of its communication not hidden", n->what);
    double percent = peer_once(&(question){"steps", "hidden", (size_t)n->width, 1});
    if (percent < 0)
        report_absent(what);
    else
        report_count(what, (int)percent, 100, " %");
}

static void report_torch(const char *peer, const samples *together, const samples *alone)
{
    char what[96];
    snprintf(what, sizeof(what), "C8   DDP of %.20s", peer_library(peer));
    report_peer(what, together, alone);
}

static void rows_of(const net *n)
{
    enum { PROCESSES, ALONE, MEETING, DEVICES, TORCH, TORCH_ALONE, OTHER, OTHER_ALONE, ENTRANTS };
    static const char *const hows[ENTRANTS][2] = {
        [PROCESSES] = {"steps", "processes"},  [ALONE] = {"steps", "alone"},
        [MEETING] = {"steps", "meeting"},      [DEVICES] = {"steps", "devices"},
        [TORCH] = {"torch", "together"},       [TORCH_ALONE] = {"torch", "alone"},
        [OTHER] = {"torch_other", "together"}, [OTHER_ALONE] = {"torch_other", "alone"}};
    question questions[ENTRANTS];
    static entrant e[ENTRANTS];
    char what[96];
    for (int i = 0; i < ENTRANTS; i++) {
        questions[i] = (question){hows[i][0], hows[i][1], (size_t)n->width, n->steps};
        e[i] = (entrant){.once = peer_once, .user = &questions[i]};
    }
    take_turns(e, !n->mlp ? DEVICES : bench.torch == NULL ? OTHER : ENTRANTS);
    if (n->mlp) {
        snprintf(what, sizeof(what), "%s, 2 devices", n->what);
        report_speed(what, &e[DEVICES].times, &e[ALONE].times, &e[MEETING].times, n->at_least);
    }
    snprintf(what, sizeof(what), "%s, 2 processes", n->what);
    report_speed(what, &e[PROCESSES].times, &e[ALONE].times, &e[MEETING].times, n->at_least);
    if (n->mlp)
        report_torch("torch", &e[TORCH].times, &e[TORCH_ALONE].times);
    if (n->mlp && bench.torch != NULL)
        report_torch("torch_other", &e[OTHER].times, &e[OTHER_ALONE].times);
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
