/* bench_source.c - S1, S2: what it takes to compile the header; source.sh finds out. */

#include <stdio.h>
#include <string.h>
#include "bench.h"

typedef struct fact {
    const char *name, *what, *unit;
    double at_most;
} fact;

static void report_facts(const char *command, const fact *facts, size_t count)
{
    char name[32];
    double value;
    size_t told = 0;
    FILE *from = popen(command, "r");
    while (from != NULL && fscanf(from, "%31s %lf", name, &value) == 2) {
        for (; told < count && strcmp(facts[told].name, name) != 0; told++)
            report_absent(facts[told].what);
        if (told < count) {
            report_count(facts[told].what, value, facts[told].at_most, facts[told].unit);
            told++;
        }
    }
    if (from != NULL)
        pclose(from);
    for (; told < count; told++)
        report_absent(facts[told].what);
}

void rows_s1(void)
{
    static const fact facts[] = {{"compile_ms", "S1 gcc -O2", " ms", 3000},
                                 {"object_kib", "S1 object of gcc -O2", " KiB", 400}};
    report_facts("tests/bench/source.sh cost", facts, 2);
}

void rows_s2(void)
{
    static const fact facts[] = {{"gcc_warnings", "S2 warnings of gcc", "", 0},
                                 {"clang_warnings", "S2 warnings of clang", "", 0}};
    report_facts("tests/bench/source.sh warnings", facts, 2);
}
