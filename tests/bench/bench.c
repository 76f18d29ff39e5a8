/* bench.c - measures what the figures to reach are about, and prints one table.

       [BENCH_TORCH=python] bench DIRECTORY ROUNDS [C1,C2,...]

   Every row compares what was measured in this run, in turn: a round of dp.h, of the peer, of the
   limit, and so on. Shown are medians with the middle half of what was measured. Peers are other
   libraries; limits are plain loops over the same bytes in the same number of threads. */

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include "bench.h"

enum { WARM_UP_ROUNDS = 3, MIN_ROUNDS = 15, CELL = 40 };

settings bench;

static int ok_count, short_count, absent_count;

/* ---- measuring ------------------------------------------------------------------------------- */

void take_turns(entrant *entrants, size_t count)
{
    for (int round = 0; round < WARM_UP_ROUNDS + bench.rounds; round++) {
        for (size_t i = 0; i < count; i++) {
            double ns = entrants[i].once(entrants[i].user);
            samples *times = &entrants[i].times;
            if (round >= WARM_UP_ROUNDS && ns >= 0)
                times->ns[times->count++] = ns;
        }
    }
}

static int by_size(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

/* What a share of the samples is not above. */
static double quantile(const samples *s, double share)
{
    double sorted[MAX_ROUNDS];
    memcpy(sorted, s->ns, sizeof(sorted));
    qsort(sorted, (size_t)s->count, sizeof(double), by_size);
    return sorted[(int)lround(share * (s->count - 1))];
}

static double median(const samples *s)
{
    return quantile(s, 0.5);
}

static bool absent(const samples *s)
{
    return s != NULL && s->count == 0;
}

const samples *faster_of(const samples *a, const samples *b)
{
    if (absent(a) || absent(b))
        return absent(a) ? b : a;
    return median(a) <= median(b) ? a : b;
}

/* ---- the table ------------------------------------------------------------------------------- */

static void print_row(const char *what, const char *dp, const char *peer, const char *limit,
                      const char *ratio, const char *target, const char *verdict)
{
    printf("%-40s %-27s %-27s %-27s %-8s %-9s %s\n", what, dp, peer, limit, ratio, target, verdict);
    fflush(stdout);
}

static const char *judge(bool good)
{
    ok_count += good;
    short_count += !good;
    return good ? "ok" : "short";
}

static void print_ns(char *out, const char *sign, double ns)
{
    const char *const units[] = {"ns", "us", "ms", "s"};
    int unit = 0;
    for (; fabs(ns) >= 1000 && unit < 3; unit++)
        ns /= 1000;
    snprintf(out, CELL, "%s%.3g %s", sign, ns, units[unit]);
}

static void print_samples(char *out, const samples *s)
{
    char middle[CELL], low[CELL], high[CELL];
    if (s == NULL || s->count == 0) {
        snprintf(out, CELL, "%s", s == NULL ? "-" : "absent");
        return;
    }
    print_ns(middle, "", median(s));
    print_ns(low, "", quantile(s, 0.25));
    print_ns(high, "", quantile(s, 0.75));
    snprintf(out, CELL, "%.9s (%.8s..%.8s)", middle, low, high);
}

static void report(const char *what, const samples *dp, const samples *peer, const samples *limit,
                   const char *ratio, const char *target, bool good)
{
    char cells[3][CELL];
    print_samples(cells[0], dp);
    print_samples(cells[1], peer);
    print_samples(cells[2], limit);
    bool compared = !absent(dp) && !absent(peer) && !absent(limit);
    absent_count += !compared;
    print_row(what, cells[0], cells[1], cells[2], compared ? ratio : "-", target,
              compared ? judge(good) : "absent");
}

static double ratio_of(const samples *a, const samples *b)
{
    return a->count == 0 || b->count == 0 ? 0 : median(a) / median(b);
}

void report_speed(const char *what, const samples *dp, const samples *peer, const samples *limit,
                  double at_least)
{
    char ratio[CELL], target[CELL];
    double times = ratio_of(peer != NULL ? peer : limit, dp);
    snprintf(ratio, CELL, "%.3g x", times);
    snprintf(target, CELL, ">= %g x", at_least);
    report(what, dp, peer, limit, ratio, target, times >= at_least);
}

void report_share(const char *what, const samples *dp, const samples *peer, const samples *limit,
                  double at_most)
{
    char ratio[CELL], target[CELL];
    double times = ratio_of(dp, peer != NULL ? peer : limit);
    snprintf(ratio, CELL, "%.3g x", times);
    snprintf(target, CELL, "<= %g x", at_most);
    report(what, dp, peer, limit, ratio, target, times <= at_most);
}

void report_extra(const char *what, const samples *dp, const samples *peer, double at_most_ns)
{
    char ratio[CELL], target[CELL], bound[CELL];
    double extra = median(dp) - median(peer);
    print_ns(ratio, extra >= 0 ? "+" : "", extra);
    print_ns(bound, "+", at_most_ns);
    snprintf(target, CELL, "<= %.20s", bound);
    report(what, dp, peer, NULL, ratio, target, extra <= at_most_ns);
}

void report_time(const char *what, const samples *dp, double at_most_ns)
{
    char target[CELL], bound[CELL];
    print_ns(bound, "", at_most_ns);
    snprintf(target, CELL, "<= %.20s", bound);
    report(what, dp, NULL, NULL, "-", target, median(dp) <= at_most_ns);
}

void report_count(const char *what, double count, double at_most, const char *unit)
{
    char dp[CELL], target[CELL];
    snprintf(dp, CELL, "%.9g%s", count, unit);
    snprintf(target, CELL, "%s%g%s", at_most > 0 ? "<= " : "", at_most, unit);
    print_row(what, dp, "-", "-", "-", target, judge(count <= at_most));
}

void report_peer(const char *what, const samples *peer, const samples *limit)
{
    char cells[2][CELL], ratio[CELL];
    bool here = !absent(peer) && !absent(limit);
    print_samples(cells[0], peer);
    print_samples(cells[1], limit);
    snprintf(ratio, CELL, "%.3g x", ratio_of(limit, peer));
    absent_count += !here;
    print_row(what, "-", cells[0], cells[1], here ? ratio : "-", "-", here ? "-" : "absent");
}

void report_absent(const char *what)
{
    absent_count++;
    print_row(what, "absent", "-", "-", "-", "-", "absent");
}

/* ---- the rows -------------------------------------------------------------------------------- */

static const struct {
    const char *name;
    void (*run)(void);
} groups[] = {
    {"C1", rows_c1},   {"C2", rows_c2},   {"C3", rows_c3},     {"C4", rows_c4},
    {"C5", rows_c5},   {"C6", rows_c6},   {"C7", rows_c7},     {"C8", rows_c8},
    {"C9", rows_c9},   {"C11", rows_c11}, {"C11b", rows_c11b}, {"C11c", rows_c11c},
    {"C12", rows_c12}, {"C7", rows_p7},   {"C9", rows_p9},     {"C10", rows_p10},
    {"C12", rows_p12}, {"C13", rows_c13}, {"C14", rows_c14},   {"C15", rows_c15},
    {"C16", rows_c16}, {"C17", rows_c17}, {"C18", rows_c18},   {"C19", rows_c19},
    {"S1", rows_s1},   {"S2", rows_s2},
};

static bool wanted(const char *name)
{
    size_t length = strlen(name);
    if (bench.rows[0] == '\0')
        return true;
    for (const char *at = bench.rows; (at = strstr(at, name)) != NULL; at += length) {
        bool starts = at == bench.rows || at[-1] == ',' || at[-1] == ' ';
        if (starts && (at[length] == '\0' || at[length] == ',' || at[length] == ' '))
            return true;
    }
    return false;
}

int main(int argc, char **argv)
{
    if (argc < 3 || argc > 4) {
        fprintf(stderr, "usage: bench DIRECTORY ROUNDS [C1,C2,...]\n");
        return 2;
    }
    bench.directory = argv[1];
    bench.rounds = atoi(argv[2]);
    bench.rows = argc == 4 ? argv[3] : "";
    bench.torch = getenv("BENCH_TORCH");
    if (bench.torch != NULL && bench.torch[0] == '\0')
        bench.torch = NULL;
    if (bench.rounds < MIN_ROUNDS || bench.rounds > MAX_ROUNDS)
        bench.rounds = MIN_ROUNDS;
    print_row("what", "dp.h", "peer", "limit", "ratio", "target", "");
    for (size_t i = 0; i < sizeof(groups) / sizeof(groups[0]); i++) {
        if (wanted(groups[i].name))
            groups[i].run();
    }
    peers_print();
    peers_end();
    printf("%d ok, %d short, %d absent (medians of %d rounds; in brackets the middle half)\n",
           ok_count, short_count, absent_count, bench.rounds);
    return 0;
}
