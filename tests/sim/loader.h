/* loader.h - before the implementation, which then loads the libraries of the simulator, as far as
   a test says that they are installed. */

#define _GNU_SOURCE
#include <dlfcn.h>
#include "sim.h"

void *sim_dlopen(const char *name, int flags);
void *sim_dlsym(void *library, const char *name);
int sim_dlclose(void *library);
int sim_dladdr(const void *address, Dl_info *out);

#define DP_DYNAMIC_LOAD
#define dlopen  sim_dlopen
#define dlsym   sim_dlsym
#define dlclose sim_dlclose
#define dladdr  sim_dladdr
