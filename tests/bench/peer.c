/* peer.c - other libraries, each in processes of its own that sleep while it is not their turn. A
   peer says "ready" first, and which library it is. What it is told and answers is described in
   peers/. */

#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>
#include "bench.h"

enum { MAX_ARGS = 20, PATIENCE_MS = 60000 };

typedef struct peer_process {
    const char *name;
    const char *args[MAX_ARGS]; /* %s is the directory, %t the other torch's Python */
    pid_t pid;
    int to, from;
    bool tried, there;
    char library[128]; /* and its version */
} peer_process;

static peer_process peers[] = {
    {.name = "blas", .args = {"%s/peer_blas"}},
    {.name = "gloo", .args = {"%s/peer_gloo", "%s"}},
    {.name = "mpi",
     .args = {"mpirun", "--allow-run-as-root", "--oversubscribe", "-np", "2", "%s/peer_mpi",
              "%s/peer_mpi.fifo"}},
    {.name = "steps", .args = {"%s/peer_steps"}},
    {.name = "mpi_tcp", /* and no collectives that share memory */
     .args = {"mpirun", "--allow-run-as-root", "--oversubscribe", "--mca", "pml", "ob1", "--mca",
              "btl", "tcp,self", "--mca", "btl_tcp_if_include", "lo", "--mca", "coll", "^sm,han",
              "-np", "2", "%s/peer_mpi", "%s/peer_mpi_tcp.fifo"}},
    {.name = "torch", .args = {"/usr/bin/python3", "tests/bench/peers/torch_ddp.py"}},
    {.name = "torch_other", .args = {"%t", "tests/bench/peers/torch_ddp.py"}},
    {.name = "torch_dp", .args = {"%s/peer_torch_dp"}},
    {.name = "torch_optim", .args = {"/usr/bin/python3", "tests/bench/peers/torch_optim.py"}},
    {.name = "torch_other_optim", .args = {"%t", "tests/bench/peers/torch_optim.py"}},
    {.name = "dp_mpi",
     .args = {"mpirun", "--allow-run-as-root", "--oversubscribe", "-np", "2", "%s/peer_dp_mpi",
              "%s/peer_dp_mpi.fifo"}},
};
enum { PEER_COUNT = sizeof(peers) / sizeof(peers[0]) };

static bool read_line(peer_process *p, char *line, size_t room)
{
    struct pollfd ready = {.fd = p->from, .events = POLLIN};
    for (size_t i = 0; i + 1 < room; i++) {
        if (poll(&ready, 1, PATIENCE_MS) != 1 || read(p->from, &line[i], 1) != 1)
            return false;
        if (line[i] == '\n') {
            line[i] = '\0';
            return true;
        }
    }
    return false;
}

static void expand(char *text, size_t room, const char *arg)
{
    const char *value = "";
    if (strncmp(arg, "%s", 2) == 0)
        value = bench.directory;
    else if (strncmp(arg, "%t", 2) == 0)
        value = bench.torch;
    snprintf(text, room, "%s%s", value, arg + (value[0] != '\0' ? 2 : 0));
}

/* In the child: become the peer. What it complains about goes to a file. */
static void become(const peer_process *p, int in, int out)
{
    static char texts[MAX_ARGS][256];
    char *args[MAX_ARGS + 1] = {NULL}, log[256];
    for (int i = 0; i < MAX_ARGS && p->args[i] != NULL; i++) {
        expand(texts[i], sizeof(texts[i]), p->args[i]);
        args[i] = texts[i];
    }
    snprintf(log, sizeof(log), "%s/peer_%s.log", bench.directory, p->name);
    signal(SIGPIPE, SIG_DFL);
    int complaints = open(log, O_WRONLY | O_CREAT | O_TRUNC, 0666);
    if (dup2(in, 0) < 0 || dup2(out, 1) < 0 || dup2(complaints, 2) < 0)
        _exit(126);
    execvp(args[0], args);
    _exit(127);
}

static void end(peer_process *p)
{
    if (p->pid == 0)
        return;
    close(p->to);
    close(p->from);
    for (int i = 0; i < 100 && p->pid != 0; i++) {
        if (waitpid(p->pid, NULL, WNOHANG) != 0)
            p->pid = 0;
        else
            nanosleep(&(struct timespec){.tv_nsec = 50000000}, NULL);
    }
    if (p->pid != 0) {
        kill(p->pid, SIGKILL);
        waitpid(p->pid, NULL, 0);
    }
    p->pid = 0;
    p->there = false;
}

static void start(peer_process *p)
{
    static const char ready[] = "ready ";
    int to[2], from[2];
    char line[sizeof(p->library)];
    if (pipe(to) != 0 || pipe(from) != 0)
        return;
    fcntl(to[1], F_SETFD, FD_CLOEXEC); /* or another peer would hold it open */
    fcntl(from[0], F_SETFD, FD_CLOEXEC);
    signal(SIGPIPE, SIG_IGN);
    p->pid = fork();
    if (p->pid == 0)
        become(p, to[0], from[1]);
    close(to[0]);
    close(from[1]);
    p->to = to[1];
    p->from = from[0];
    p->there = p->pid > 0 && read_line(p, line, sizeof(line)) &&
               strncmp(line, ready, strlen(ready)) == 0;
    if (p->there)
        snprintf(p->library, sizeof(p->library), "%s", line + strlen(ready));
    else
        end(p);
}

static peer_process *peer_of(const char *name)
{
    for (int i = 0; i < PEER_COUNT; i++) {
        peer_process *p = &peers[i];
        if (strcmp(p->name, name) != 0)
            continue;
        if (!p->tried)
            start(p);
        p->tried = true;
        return p;
    }
    abort();
}

double peer_once(void *user)
{
    const question *q = user;
    peer_process *p = peer_of(q->peer);
    char line[128];
    if (!p->there)
        return -1;
    int length = snprintf(line, sizeof(line), "%s %zu %d\n", q->how, q->size, q->calls);
    if (write(p->to, line, (size_t)length) == length && read_line(p, line, sizeof(line)))
        return strtod(line, NULL);
    end(p);
    return -1;
}

const char *peer_library(const char *name)
{
    const peer_process *p = peer_of(name);
    return p->library[0] != '\0' ? p->library : "absent";
}

void peers_print(void)
{
    for (int i = 0; i < PEER_COUNT; i++) {
        if (peers[i].tried)
            printf("peer %-18s %s\n", peers[i].name, peer_library(peers[i].name));
    }
}

void peers_end(void)
{
    for (int i = 0; i < PEER_COUNT; i++)
        end(&peers[i]);
}
