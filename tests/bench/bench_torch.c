/* bench_torch.c - C19: training steps of libtorch with dp_torch.hpp (peers/torch_dp.cpp) in two
   processes, against those of torch's DistributedDataParallel over gloo (peers/torch_ddp.py). The
   limit: two that tell each other nothing. */

#include "bench.h"

typedef struct net {
    const char *what;
    int width, steps;
} net;

static double steps_of(const char *peer, const char *how, const net *n)
{
    return peer_ask(peer_of(peer, bench.directory), how, (size_t)n->width, n->steps);
}

static double dp_once(void *user)
{
    return steps_of("torch_dp", "together", user);
}

static double torch_once(void *user)
{
    return steps_of("torch", "together", user);
}

static double alone_once(void *user)
{
    return steps_of("torch", "alone", user);
}

void rows_c19(void)
{
    net nets[] = {{"C19 libtorch, 256 wide, over torch DDP", 256, 16},
                  {"C19 libtorch, 1024 wide, over torch DDP", 1024, 4}};
    for (size_t i = 0; i < sizeof(nets) / sizeof(nets[0]); i++) {
        entrant e[] = {{.once = dp_once, .user = &nets[i]},
                       {.once = torch_once, .user = &nets[i]},
                       {.once = alone_once, .user = &nets[i]}};
        take_turns(e, sizeof(e) / sizeof(e[0]));
        report_speed(nets[i].what, &e[0].times, &e[1].times, &e[2].times, 1.5);
    }
}
