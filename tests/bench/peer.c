/* peer.c - other libraries, each in processes of its own that sleep while it is not their turn.
   What they are told and answer is described in peers/. */

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

enum { MAX_ARGS = 12, PATIENCE_MS = 60000 };

struct peer_process {
    const char *name;
    const char *args[MAX_ARGS]; /* %s is the directory */
    pid_t pid;
    int to, from;
    bool tried, there;
};

static peer_process peers[] = {
    {.name = "blas", .args = {"%s/peer_blas"}},
    {.name = "gloo", .args = {"%s/peer_gloo", "%s"}},
    {.name = "mpi",
     .args = {"mpirun", "--allow-run-as-root", "--oversubscribe", "-np", "2", "%s/peer_mpi",
              "%s/peer_mpi.fifo"}},
    {.name = "steps", .args = {"%s/peer_steps"}},
    {.name = "torch", .args = {"/usr/bin/python3", "tests/bench/peers/torch_ddp.py"}},
    {.name = "torch_dp", .args = {"%s/peer_torch_dp"}},
    {.name = "torch_optim", .args = {"/usr/bin/python3", "tests/bench/peers/torch_optim.py"}},
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

/* In the child: become the peer. What it complains about goes to a file. */
static void become(const peer_process *p, const char *directory, int in, int out)
{
    static char texts[MAX_ARGS][256];
    char *args[MAX_ARGS + 1] = {NULL}, log[256];
    for (int i = 0; i < MAX_ARGS && p->args[i] != NULL; i++) {
        const char *rest = strncmp(p->args[i], "%s", 2) == 0 ? p->args[i] + 2 : NULL;
        snprintf(texts[i], sizeof(texts[i]), "%s%s", rest != NULL ? directory : p->args[i],
                 rest != NULL ? rest : "");
        args[i] = texts[i];
    }
    snprintf(log, sizeof(log), "%s/peer_%s.log", directory, p->name);
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

static void start(peer_process *p, const char *directory)
{
    int to[2], from[2];
    char line[64];
    if (pipe(to) != 0 || pipe(from) != 0)
        return;
    fcntl(to[1], F_SETFD, FD_CLOEXEC); /* or another peer would hold it open */
    fcntl(from[0], F_SETFD, FD_CLOEXEC);
    signal(SIGPIPE, SIG_IGN);
    p->pid = fork();
    if (p->pid == 0)
        become(p, directory, to[0], from[1]);
    close(to[0]);
    close(from[1]);
    p->to = to[1];
    p->from = from[0];
    p->there = p->pid > 0 && read_line(p, line, sizeof(line)) && strcmp(line, "ready") == 0;
    if (!p->there)
        end(p);
}

peer_process *peer_of(const char *name, const char *directory)
{
    for (int i = 0; i < PEER_COUNT; i++) {
        peer_process *p = &peers[i];
        if (strcmp(p->name, name) != 0)
            continue;
        if (!p->tried)
            start(p, directory);
        p->tried = true;
        return p;
    }
    abort();
}

double peer_ask(peer_process *p, const char *how, size_t bytes, int calls)
{
    char line[128];
    if (!p->there)
        return -1;
    int length = snprintf(line, sizeof(line), "%s %zu %d\n", how, bytes, calls);
    if (write(p->to, line, (size_t)length) == length && read_line(p, line, sizeof(line)))
        return strtod(line, NULL);
    end(p);
    return -1;
}

void peers_end(void)
{
    for (int i = 0; i < PEER_COUNT; i++)
        end(&peers[i]);
}
