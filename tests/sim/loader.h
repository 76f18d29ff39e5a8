/* loader.h - before the implementation, which then loads the libraries of the simulator, as far as
   a test says that they are installed, and gets from the system what a test lets it have. */

#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <stdlib.h>
#include <time.h>
#include "sim.h"

void *sim_dlopen(const char *name, int flags);
void *sim_dlsym(void *library, const char *name);
int sim_dlclose(void *library);
int sim_dladdr(const void *address, Dl_info *out);
int sim_memalign(void **out, size_t align, size_t bytes);
int sim_thread(pthread_t *out, const pthread_attr_t *how, void *(*fn)(void *user), void *user);
int sim_leave_mutex(pthread_mutex_t *mutex);
int sim_clock(clockid_t clock, struct timespec *out);

#define DP_DYNAMIC_LOAD
#define dlopen  sim_dlopen
#define dlsym   sim_dlsym
#define dlclose sim_dlclose
#define dladdr  sim_dladdr

#define posix_memalign sim_memalign
#define pthread_create sim_thread

#define clock_gettime        sim_clock
#define pthread_mutex_unlock sim_leave_mutex
