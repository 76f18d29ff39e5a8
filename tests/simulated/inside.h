/* inside.h - what the parts of the simulated system know of each other. */

#ifndef SIM_INSIDE_H
#define SIM_INSIDE_H

#include "sim.h"
#include <ucontext.h>

enum { SIM_THREADS = 256, SIM_ENVS = 32 };

typedef enum sim_state { SIM_FREE, SIM_RUNNABLE, SIM_WAITING, SIM_OVER, SIM_DEAD } sim_state;

typedef struct sim_thread {
    sim_state state;
    int id, process, why;
    ucontext_t context;
    void *(*fn)(void *user);
    void *user;
    const char *doing;
    sim_ready *ready;
    void *arg;
    uint64_t until_ns, stalled_ns;
    unsigned stalls_after; /* points; 0: it does not */
    void *locals;          /* while another thread of the process runs */
} sim_thread;

typedef struct sim_proc {
    bool dead, over;
    int machine;
    uint64_t begun_ns, stopped_until_ns, files_until_ns, hit_ns; /* hit: when a fault met it */
    uint64_t hit_until_ns; /* by more than a short pause: how long that lasts */
    bool was_stopped, was_cut, was_starved, loses;
    int refused; /* so many more calls for memory fail */
    int64_t taken;
    int files;
    char *env[SIM_ENVS];
    int env_count;
    sim_program *main;
    sim_story *story;
    void *locals; /* where those of the running thread are */
    size_t locals_bytes;
    sim_thread *running;
} sim_proc;

typedef struct sim_event {
    uint64_t at_ns, order;
    void (*fn)(struct sim_event *event);
    int a, b;
    unsigned generation;
    size_t bytes;
    char *data;
} sim_event;

typedef struct sim_world {
    sim_plan plan;
    int verbose;
    uint64_t now, points, switches, hash, dice, user_dice;
    sim_thread threads[SIM_THREADS], *current, driver;
    int thread_count;
    sim_proc procs[SIM_PROCESSES];
    int proc_count, verdict;
    uint64_t limit_ns;
    unsigned hop, shorts, stall, pause; /* one in so many: points, acts */
    struct {
        bool dark;
        int64_t ahead_ns; /* its clocks, */
        uint32_t rate;    /* which go so many 1024ths as fast */
        uint64_t wall_ns;
    } machines[SIM_MACHINES];
    uint64_t cut_since[SIM_MACHINES][SIM_MACHINES]; /* from, to; the first one, */
    uint64_t cut_until[SIM_MACHINES][SIM_MACHINES]; /* and the end of the last */
    int next_fault;
    bool armed;
    int awaited;       /* so many acts more until the next fault; 0: it waits for none */
    uint64_t fault_ns; /* when the last one happened */
    uint64_t moments[4 * SIM_FAULTS]; /* when a fault happened, or ended */
    int moment_count;
    uint64_t hit_ns;    /* when the first one was hit by more than a short pause; 0: none was */
    uint64_t paused_ns; /* when all were stopped together; 0: they were not */
} sim_world;

extern sim_world sim;

/* ---- baton.c --------------------------------------------------------------------------------- */
uint64_t sim_draw(uint64_t below);
void sim_note(uint64_t a, uint64_t b); /* into the hash of the trace */
void sim_say(const char *format, ...) __attribute__((format(printf, 1, 2))); /* if asked to */
_Noreturn void sim_fail(const char *format, ...) __attribute__((format(printf, 1, 2)));
void sim_post(sim_event event);
void sim_point(const char *doing);
sim_proc *sim_me(void);
uint64_t sim_to_global(int machine, uint64_t local_ns);
void sim_begin(const sim_plan *plan, int verbose);
int sim_process_begin(int machine, sim_program *main, sim_locals *locals, sim_story *story);
void sim_env_of(int process, const char *name, const char *text);
enum { SIM_DONE, SIM_STUCK, SIM_LATE };
int sim_go(void);
void sim_show(void);
void sim_hit(sim_proc *proc, uint64_t until_ns);
bool sim_is_within(const char *call);
void sim_did(sim_act act);
extern void (*sim_on_birth)(int machine); /* the driver's */

/* ---- wire.c ---------------------------------------------------------------------------------- */
void sim_wire_begin(void);
void sim_wire_end_of(int process, bool silent);
void sim_wire_reset(void);
void sim_stranger(int machine, int port);
int sim_descriptor(int process, int kind, int object); /* -1: there is none left */
int sim_object(int fd, int kind);                      /* -1: it is none of them */
enum { SIM_FD_SOCKET = 1, SIM_FD_SHARED, SIM_FD_FILE };

/* ---- disk.c ---------------------------------------------------------------------------------- */
void sim_disk_begin(void);
void sim_disk_end_of(int process);
const char *sim_disk_look(const char *path, size_t *out_bytes); /* NULL: it is not there */
void sim_disk_close(int kind, int which, int fd);

#endif
