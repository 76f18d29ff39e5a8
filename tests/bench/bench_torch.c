/* bench_torch.c - C19: training steps of libtorch with dp_torch.hpp (peers/torch_dp.cpp) in two
   processes, against those of torch's DistributedDataParallel over gloo (peers/torch_ddp.py). The
   limit: two that tell each other nothing. */

#include "bench.h"

typedef struct net {
    const char *what;
    int width, steps;
} net;

void rows_c19(void)
{
    const net nets[] = {{"C19 libtorch, 256 wide, over torch DDP", 256, 16},
                        {"C19 libtorch, 1024 wide, over torch DDP", 1024, 4}};
    for (size_t i = 0; i < sizeof(nets) / sizeof(nets[0]); i++) {
        size_t width = (size_t)nets[i].width;
        question dp = {"torch_dp", "together", width, nets[i].steps},
                 torch = {"torch", "together", width, nets[i].steps},
                 alone = {"torch", "alone", width, nets[i].steps};
        entrant e[] = {{.once = peer_once, .user = &dp},
                       {.once = peer_once, .user = &torch},
                       {.once = peer_once, .user = &alone}};
        take_turns(e, sizeof(e) / sizeof(e[0]));
        report_speed(nets[i].what, &e[0].times, &e[1].times, &e[2].times, 1.5);
    }
}
