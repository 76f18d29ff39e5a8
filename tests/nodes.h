/* nodes.h - machines with several nodes, made of the cores that there are: a folder says which core
   is whose, and $DP_TOPOLOGY where that folder is. Include it after _GNU_SOURCE. */

#ifndef NODES_H
#define NODES_H

#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>
#include "test.h"

enum { NODES_MAX = 8 };

typedef struct machine { /* node by node, from 0 on */
    int node_count, core_count;
    int cores[CPU_SETSIZE], nodes[CPU_SETSIZE];
    cpu_set_t all, of[NODES_MAX]; /* of a node */
} machine;

static inline cpu_set_t own_mask(void)
{
    cpu_set_t mask;
    CPU_ZERO(&mask);
    CHECK_INT(sched_getaffinity(0, sizeof mask, &mask), 0);
    return mask;
}

static inline void give_mask(const cpu_set_t *mask)
{
    CHECK_INT(sched_setaffinity(0, sizeof *mask, mask), 0);
}

/* A folder of this test's own; it is named in the environment. */
static inline const char *topology(void)
{
    static char root[64];
    if (root[0] == '\0') {
        snprintf(root, sizeof root, "%s/dp-nodes-XXXXXX", P_tmpdir);
        CHECK(mkdtemp(root) != NULL);
        CHECK_INT(setenv("DP_TOPOLOGY", root, 1), 0);
    }
    return root;
}

static inline void topology_remove(void)
{
    char command[96];
    snprintf(command, sizeof command, "rm -r %s", topology());
    CHECK_INT(system(command), 0);
}

/* A folder in it, with a file if there is a text. */
static inline void topology_put(const char *folder, const char *file, const char *text)
{
    char path[128];
    snprintf(path, sizeof path, "%s/%s", topology(), folder);
    mkdir(path, 0700);
    if (text == NULL) {
        return;
    }
    snprintf(path, sizeof path, "%s/%s/%s", topology(), folder, file);
    FILE *out = fopen(path, "w");
    CHECK(out != NULL);
    CHECK(fputs(text, out) >= 0);
    CHECK_INT(fclose(out), 0);
}

static inline void machine_node_add(machine *m, int core)
{
    m->cores[m->core_count] = core;
    m->nodes[m->core_count++] = m->node_count;
    CPU_SET((size_t)core, &m->of[m->node_count]);
}

/* Deals out all cores of this process, as equally as that goes. With more nodes than cores several
   nodes have the same one, which no real machine has. The next call overwrites it. */
static inline machine *machine_of(int node_count)
{
    static machine m;
    static int own[CPU_SETSIZE];
    static char list[CPU_SETSIZE * 5 + 2];
    int count = 0;
    m = (machine){.all = own_mask()};
    for (int core = 0; core < CPU_SETSIZE; core++) {
        if (CPU_ISSET((size_t)core, &m.all)) {
            own[count++] = core;
        }
    }
    for (; m.node_count < node_count; m.node_count++) {
        char name[16];
        int first = m.node_count * count / node_count,
            last = (m.node_count + 1) * count / node_count;
        if (count < node_count) {
            first = m.node_count % count;
            last = first + 1;
        }
        list[0] = '\0';
        CPU_ZERO(&m.of[m.node_count]);
        for (int i = first; i < last; i++) {
            size_t used = strlen(list);
            snprintf(list + used, sizeof list - used, "%s%d", i > first ? "," : "", own[i]);
            machine_node_add(&m, own[i]);
        }
        snprintf(name, sizeof name, "node%d", m.node_count);
        strcat(list, "\n");
        topology_put(name, "cpulist", list);
    }
    return &m;
}

/* What a part of several is to keep to: the nodes of its cores, dealt out one by one. `first` and
   `count`: of what is dealt out; they become those of the part. */
static inline cpu_set_t machine_part(const machine *m, int *first, int *count, int place, int parts)
{
    cpu_set_t mask;
    int begin = 0, size = 0;
    CPU_ZERO(&mask);
    for (int i = 0; i <= place; i++) {
        begin += size;
        size = *count / parts + (i < *count % parts);
    }
    if (*count < parts) {
        begin = place * *count / parts;
        size = 1;
    }
    *first += begin;
    *count = size;
    for (int i = *first; i < *first + size; i++) {
        CPU_OR(&mask, &mask, &m->of[m->nodes[i]]);
    }
    return mask;
}

static inline int machine_nodes(const machine *m, int first, int count)
{
    return m->nodes[first + count - 1] - m->nodes[first] + 1;
}

#endif /* NODES_H */
