/* grid.h - CUDA's grid, in C: what the text of the kernels needs to run as it is written for CUDA.

   Lanes of a block take turns: one runs until it comes to a barrier, then the next one. Which lane
   and which block comes when, the caller says: what nothing but that order decides differs between
   two runs. Shared memory is spoiled before each block, since it begins with anything.

   One file defines SIM_GRID_IMPLEMENTATION.                                                     */

#ifndef SIM_GRID_H
#define SIM_GRID_H

#include <math.h>
#include <stdbool.h>
#include <stdint.h>
#include "sim.h"

/* Shared memory lies together, for there is only one block at a time. */
#define dp_global(blocks) static
#define dp_device         static inline
#define dp_shared         static __attribute__((section("sim_shared")))
#define dp_const          const
#define dp_rolled
#define alignas _Alignas

typedef struct sim_index {
    unsigned x, y, z;
} sim_index;
extern sim_index gridDim, blockDim, blockIdx, threadIdx;
void __syncthreads(void);

typedef void sim_lane_fn(const void *arguments);

enum { SIM_LANES_MAX = 1024 };

/* Counts up at the begin of each block and at each of its barriers: two lanes that touch the same
   memory in one round do so in any order. */
extern uint64_t sim_grid_rounds;

/* `order` is that of sim.h; a shuffled one changes after each barrier. False: some lanes came to a
   barrier that others did not come to. */
bool sim_grid_run(sim_lane_fn *lane, const void *arguments, unsigned blocks, unsigned lanes,
                  unsigned order);

#endif /* SIM_GRID_H */

#if defined(SIM_GRID_IMPLEMENTATION)

#include <setjmp.h>
#include <string.h>
#include <ucontext.h>

sim_index gridDim, blockDim, blockIdx, threadIdx;
uint64_t sim_grid_rounds;

extern char __start_sim_shared[] __attribute__((weak));
extern char __stop_sim_shared[] __attribute__((weak));

enum { LANE_STACK = 64 << 10, SHARED_BYTE = 0x7f };

/* A lane has a stack of its own, where it waits at barriers, and for its next kernel. */
typedef struct grid_lane {
    jmp_buf place;
    bool made, waits; /* it has a stack; it is at a barrier */
} grid_lane;

static struct {
    sim_lane_fn *fn;
    const void *arguments;
    grid_lane lanes[SIM_LANES_MAX];
    jmp_buf back;
    bool inside; /* a lane that has a stack runs */
    bool diverges;
} grid;

static char lane_stacks[SIM_LANES_MAX][LANE_STACK];

static void lane_leave(void)
{
    if (_setjmp(grid.lanes[threadIdx.x].place) == 0)
        _longjmp(grid.back, 1);
}

static void lane_live(void)
{
    for (;;) {
        grid.fn(grid.arguments);
        grid.lanes[threadIdx.x].waits = false;
        lane_leave();
    }
}

void __syncthreads(void)
{
    grid.diverges = grid.diverges || !grid.inside; /* the first lane came to none */
    if (!grid.inside)
        return;
    grid.lanes[threadIdx.x].waits = true;
    lane_leave();
}

static void lane_make(unsigned number)
{
    static ucontext_t begin, unused;
    getcontext(&begin);
    begin.uc_stack.ss_sp = lane_stacks[number];
    begin.uc_stack.ss_size = LANE_STACK;
    makecontext(&begin, lane_live, 0);
    grid.lanes[number].made = true;
    swapcontext(&unused, &begin);
}

/* Until its next barrier, or its end. */
static void lane_go(unsigned number)
{
    threadIdx.x = number;
    grid.inside = true;
    if (_setjmp(grid.back) == 0) {
        if (grid.lanes[number].made)
            _longjmp(grid.lanes[number].place, 1);
        lane_make(number);
    }
    grid.inside = false;
}

/* Who is at a place in the order: from the first one on in steps, which come to all of them. */
typedef struct turns {
    unsigned count, first, step;
} turns;

static unsigned common_divisor(unsigned a, unsigned b)
{
    return b == 0 ? a : common_divisor(b, a % b);
}

static turns turns_of(unsigned count, unsigned order, uint64_t round)
{
    const uint64_t chance = (order + 1 + round) * 0x9e3779b97f4a7c15u >> 16;
    turns own = {count, (unsigned)(chance % count), 1 + (unsigned)(chance >> 24) % count};
    if (order == SIM_FORWARDS)
        own = (turns){count, 0, 1};
    if (order == SIM_BACKWARDS)
        own = (turns){count, count - 1, count - 1};
    while (common_divisor(own.step, count) > 1)
        own.step++;
    return own;
}

static unsigned nth(unsigned place, turns of)
{
    return (unsigned)((of.first + (uint64_t)place * of.step) % of.count);
}

/* All lanes from the given place on, one after another; returns how many are at a barrier then. */
static unsigned lanes_go(unsigned place, turns of)
{
    unsigned waiting = 0;
    for (; place < of.count; place++) {
        unsigned number = nth(place, of);
        lane_go(number);
        waiting += grid.lanes[number].waits;
    }
    return waiting;
}

/* The first lane shows whether the kernel has barriers; without, lanes need no stacks. */
static void block_run(unsigned order)
{
    const unsigned lanes = blockDim.x;
    const turns begin = turns_of(lanes, order, ++sim_grid_rounds);
    const unsigned first = nth(0, begin);
    lane_go(first);
    if (!grid.lanes[first].waits) {
        for (unsigned place = 1; place < lanes; place++) {
            threadIdx.x = nth(place, begin);
            grid.fn(grid.arguments);
        }
        return;
    }
    unsigned waiting = 1 + lanes_go(1, begin);
    while (waiting == lanes)
        waiting = lanes_go(0, turns_of(lanes, order, ++sim_grid_rounds));
    grid.diverges = grid.diverges || waiting > 0;
    for (unsigned k = 0; k < lanes && waiting > 0; k++) /* they will never go on */
        grid.lanes[k].made = grid.lanes[k].made && !grid.lanes[k].waits;
    for (unsigned k = 0; k < lanes && waiting > 0; k++)
        grid.lanes[k].waits = false;
}

bool sim_grid_run(sim_lane_fn *lane, const void *arguments, unsigned blocks, unsigned lanes,
                  unsigned order)
{
    grid.fn = lane;
    grid.arguments = arguments;
    grid.diverges = false;
    gridDim = (sim_index){blocks, 1, 1};
    blockDim = (sim_index){lanes, 1, 1};
    const turns of = turns_of(blocks, order, 0);
    for (unsigned b = 0; b < blocks; b++) {
        blockIdx.x = nth(b, of);
        memset(__start_sim_shared, SHARED_BYTE, (size_t)(__stop_sim_shared - __start_sim_shared));
        block_run(order);
    }
    return !grid.diverges;
}

#endif /* SIM_GRID_IMPLEMENTATION */
