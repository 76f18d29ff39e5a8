/* plan.h - see plan.c. */

#ifndef SIM_PLAN_H
#define SIM_PLAN_H

#include "sim.h"
#include <stdio.h>

void sim_plan_draw(uint64_t seed, sim_plan *plan);
void sim_plan_print(const sim_plan *plan, FILE *out);

#endif
