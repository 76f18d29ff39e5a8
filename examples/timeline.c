/* timeline.c - the last steps of a run as one page: who computed when, and what all waited for.

   It reads what a program has written with DP_TRACE=run.json (>>timeline in dp.h), one process or
   all of a machine. The page needs nothing but itself. Each thread and stream has a row; what is
   inside a span lies below it. Communication is red where no method ran beside it in its process:
   that is the time which overlapping could still win. Waits for processes that come later are
   hatched, and are no communication: the one that waits least is the one for which all others wait.

   Build: cc -std=c11 examples/timeline.c -o timeline
   Run:   DP_TRACE=run.json ./train && ./timeline run.json run.html 5 (steps; 5 if not said)
   Prints:
   2 steps in 2.000 ms, 1.000 ms each
   process 0: methods 1.560 ms, communication 0.380 ms, of it not hidden 0.180 ms, waited 0.120 ms
   process 1: methods 1.000 ms, communication 0.200 ms, of it not hidden 0.000 ms, waited 0.000 ms
   process 1 comes last: all others waited 0.120 ms for it */

#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum {
    LINE = 2048,
    NAME = 200,
    DEEP = 64, /* spans inside each other; what is deeper is left out */
    WIDTH = 1200,
    LEFT = 190,
    BAR = 15
};

typedef enum kind { FRAME, METHOD, TALK, COPY, WAIT, KINDS } kind;
static const char *const classes[KINDS] = {"f", "m", "t", "c", "w"};

typedef struct span {
    double begin, end; /* in microseconds */
    int row, depth;
    kind kind;
    char name[NAME]; /* as JSON has it */
} span;

typedef struct row {
    int process, thread, place;
    char name[NAME];
    int depth, deepest;
    size_t open[DEEP]; /* spans that have not ended */
} row;

typedef struct part {
    double begin, end;
} part;

static struct {
    span *spans;
    size_t span_count, span_room;
    row *rows;
    int row_count;
    double begin, end; /* what is shown */
    int steps;
} run;

static void *grown(void *old, size_t count, size_t bytes)
{
    void *more = realloc(old, (count + 1) * bytes);
    if (more == NULL) {
        fputs("timeline: no memory\n", stderr);
        exit(1);
    }
    return more;
}

/* ---- the trace ------------------------------------------------------------------------------- */

static double number_in(const char *line, const char *field)
{
    const char *at = strstr(line, field);
    return at != NULL ? strtod(at + strlen(field), NULL) : 0;
}

/* Whether a character of UTF-8 has begun before: nothing is cut there. */
static bool goes_on(char c)
{
    return ((unsigned char)c & 0xC0) == 0x80;
}

/* The last "name" in the line, up to its quote: that of what a line with two of them is about. */
static void name_in(const char *line, char out[NAME])
{
    static const char field[] = "\"name\":\"";
    const char *at = NULL, *next = strstr(line, field);
    size_t used = 0;
    for (; next != NULL; next = strstr(at, field))
        at = next + sizeof field - 1;
    for (; at != NULL && *at != '\0' && *at != '"' && used + 2 < NAME; at++) {
        if (*at == '\\' && at[1] != '\0')
            out[used++] = *at++;
        out[used++] = *at;
    }
    for (; at != NULL && goes_on(*at) && used > 0; at--)
        used--;
    out[used] = '\0';
}

static row *row_of(const char *line)
{
    int process = (int)number_in(line, "\"pid\":"), thread = (int)number_in(line, "\"tid\":");
    for (int i = 0; i < run.row_count; i++)
        if (run.rows[i].process == process && run.rows[i].thread == thread)
            return &run.rows[i];
    run.rows = grown(run.rows, (size_t)run.row_count, sizeof *run.rows);
    row *r = &run.rows[run.row_count++];
    memset(r, 0, sizeof *r);
    r->process = process, r->thread = thread, r->place = thread;
    return r;
}

static bool begins(const char *name, const char *with)
{
    return strncmp(name, with, strlen(with)) == 0;
}

static kind kind_of(const char *name)
{
    static const char *const talks[] = {"all_reduce ", "broadcast ", "all_gather ", "reduce",
                                        "bucket ",     "barrier",    "all_to_all",  "agree"};
    for (size_t i = 0; i < sizeof talks / sizeof talks[0]; i++)
        if (begins(name, talks[i]))
            return TALK;
    if (begins(name, "waits for "))
        return WAIT;
    if (strcmp(name, "scatter") == 0 || strcmp(name, "gather") == 0 || begins(name, "replicate"))
        return COPY;
    return strchr(name, '.') != NULL || strchr(name, '\'') != NULL || strcmp(name, "dp_run") == 0
               ? METHOD
               : FRAME;
}

static void begin_span(row *r, const char *line)
{
    if (r->depth < DEEP) {
        if (run.span_count == run.span_room) {
            run.span_room = 2 * run.span_room + 1024;
            run.spans = grown(run.spans, run.span_room, sizeof *run.spans);
        }
        span *s = &run.spans[run.span_count];
        name_in(line, s->name);
        s->begin = number_in(line, "\"ts\":"), s->end = -1;
        s->row = (int)(r - run.rows), s->depth = r->depth;
        s->kind = kind_of(s->name);
        r->open[r->depth] = run.span_count++;
    }
    r->depth++;
    r->deepest = r->depth > r->deepest ? r->depth : r->deepest;
}

/* A killed run has spans without an end: they last as long as the file. */
static void read_trace(FILE *file)
{
    char line[LINE];
    double last = 0;
    while (fgets(line, sizeof line, file) != NULL) {
        const char *phase = strstr(line, "\"ph\":\"");
        if (phase == NULL)
            continue;
        row *r = row_of(line);
        double at = number_in(line, "\"ts\":");
        last = at > last ? at : last;
        if (phase[6] == 'B')
            begin_span(r, line);
        else if (phase[6] == 'E' && r->depth > 0 && --r->depth < DEEP)
            run.spans[r->open[r->depth]].end = at;
        else if (phase[6] == 'M' && strstr(line, "\"thread_name\"") != NULL)
            name_in(line, r->name);
        else if (phase[6] == 'M' && strstr(line, "\"sort_index\":") != NULL)
            r->place = (int)number_in(line, "\"sort_index\":");
    }
    for (size_t i = 0; i < run.span_count; i++)
        if (run.spans[i].end < 0)
            run.spans[i].end = last;
}

/* The last steps of the first process that has some; all, where nothing is called a step. */
static void choose_steps(int want)
{
    int of = -1;
    for (size_t i = run.span_count; i-- > 0;) {
        const span *s = &run.spans[i];
        if (strcmp(s->name, "dp_train_step") != 0 || (of >= 0 && s->row != of) || run.steps == want)
            continue;
        of = s->row;
        run.end = run.steps++ == 0 ? s->end : run.end;
        run.begin = s->begin;
    }
    for (size_t i = 0; i < run.span_count && run.steps == 0; i++) {
        const span *s = &run.spans[i];
        run.begin = i == 0 || s->begin < run.begin ? s->begin : run.begin;
        run.end = s->end > run.end ? s->end : run.end;
    }
}

/* ---- sums ------------------------------------------------------------------------------------ */

static int compare(const void *a, const void *b)
{
    const part *x = a, *y = b;
    return (x->begin > y->begin) - (x->begin < y->begin);
}

/* When a process did things of these kinds, in whichever of its rows: parts that do not touch. */
static part *parts_of(int process, unsigned kinds, size_t *out_count)
{
    part *parts = grown(NULL, run.span_count, sizeof *parts);
    size_t count = 0, kept = 0;
    for (size_t i = 0; i < run.span_count; i++) {
        const span *s = &run.spans[i];
        if ((kinds >> s->kind & 1) == 0 || run.rows[s->row].process != process ||
            s->end <= run.begin || s->begin >= run.end)
            continue;
        parts[count++] = (part){s->begin > run.begin ? s->begin : run.begin,
                                s->end < run.end ? s->end : run.end};
    }
    qsort(parts, count, sizeof *parts, compare);
    for (size_t i = 0; i < count; i++) {
        if (kept == 0 || parts[i].begin > parts[kept - 1].end)
            parts[kept++] = parts[i];
        else if (parts[i].end > parts[kept - 1].end)
            parts[kept - 1].end = parts[i].end;
    }
    *out_count = kept;
    return parts;
}

static double length_of(const part *parts, size_t count)
{
    double sum = 0;
    for (size_t i = 0; i < count; i++)
        sum += parts[i].end - parts[i].begin;
    return sum;
}

/* What of a span lies outside of the parts is given to `each`; returns how long it is. */
static double outside(const part *parts, size_t count, part whole, void (*each)(FILE *, part, int),
                      FILE *out, int y)
{
    double at = whole.begin, sum = 0;
    for (size_t i = 0; i <= count && at < whole.end; i++) {
        double stop = i < count && parts[i].begin < whole.end ? parts[i].begin : whole.end;
        if (stop > at) {
            sum += stop - at;
            if (each != NULL)
                each(out, (part){at, stop}, y);
        }
        at = i < count && parts[i].end > at ? parts[i].end : at;
    }
    return sum;
}

/* ---- the page -------------------------------------------------------------------------------- */

static const char head[] =
    "<!DOCTYPE html>\n<html lang=\"en\"><head><meta charset=\"utf-8\"/><title>timeline</title>\n"
    "<style>body{font:14px sans-serif;margin:2em}td,th{padding:.2em 1em;text-align:right}\n"
    "text{font:10px sans-serif;fill:#222}.f{fill:#ddd}.m{fill:#7fc97f}.t{fill:#80b1d3}\n"
    ".c{fill:#fdc086}.w{fill:url(#w)}.x{fill:#e31a1c}.r{stroke:#999}.l{font-weight:bold}\n"
    "svg{width:100%;min-width:60em}\n"
    "i{padding:0 .6em;margin-right:.3em}</style></head><body>\n";

static double x_of(double at)
{
    return LEFT + (at - run.begin) / (run.end - run.begin) * (WIDTH - LEFT);
}

/* So many characters of a name of JSON: what means something in a page is written otherwise. */
static void put_text(FILE *out, const char *text, size_t most)
{
    for (; *text != '\0' && (most > 0 || goes_on(*text)); text++) {
        most -= !goes_on(*text);
        if (*text == '\\' && text[1] != '\0')
            text++;
        if (strchr("<>&\"", *text) != NULL)
            fprintf(out, "&#%d;", *text);
        else
            fputc(*text, out);
    }
}

static void put_red(FILE *out, part p, int y)
{
    fprintf(out, "<rect class=\"x\" x=\"%.2f\" y=\"%d\" width=\"%.2f\" height=\"%d\"/>",
            x_of(p.begin), y, x_of(p.end) - x_of(p.begin), BAR - 1);
}

static void put_span(FILE *out, const span *s, int top, const part *busy, size_t count)
{
    part shown = {s->begin > run.begin ? s->begin : run.begin, s->end < run.end ? s->end : run.end};
    int y = top + BAR * s->depth;
    double x = x_of(shown.begin), width = x_of(shown.end) - x;
    fprintf(out, "<g><title>");
    put_text(out, s->name, NAME);
    fprintf(
        out,
        ": %.3f ms</title><rect class=\"%s\" x=\"%.2f\" y=\"%d\" width=\"%.2f\" height=\"%d\"/>",
        (s->end - s->begin) / 1000, classes[s->kind], x, y, width, BAR - 1);
    if (s->kind == TALK)
        outside(busy, count, shown, put_red, out, y);
    if (width > 24) {
        fprintf(out, "<text x=\"%.2f\" y=\"%d\">", x + 2, y + BAR - 4);
        put_text(out, s->name, (size_t)(width / 6));
        fputs("</text>", out);
    }
    fputs("</g>\n", out);
}

static int compare_rows(const void *a, const void *b)
{
    const row *x = &run.rows[*(const int *)a], *y = &run.rows[*(const int *)b];
    if (x->process != y->process)
        return (x->process > y->process) - (x->process < y->process);
    return (x->place > y->place) - (x->place < y->place);
}

static void put_row(FILE *out, int which, int top)
{
    const row *r = &run.rows[which];
    size_t count;
    part *busy = parts_of(r->process, 1u << METHOD | 1u << WAIT, &count);
    fprintf(out,
            "<line class=\"r\" x1=\"0\" x2=\"%d\" y1=\"%d\" y2=\"%d\"/><text x=\"0\" y=\"%d\">%d: ",
            WIDTH, top - 3, top - 3, top + BAR - 4, r->process);
    put_text(out, r->name, 34);
    fputs("</text>\n", out);
    for (size_t i = 0; i < run.span_count; i++) {
        const span *s = &run.spans[i];
        if (s->row == which && s->end > run.begin && s->begin < run.end)
            put_span(out, s, top, busy, count);
    }
    free(busy);
}

static void put_picture(FILE *out)
{
    int *order = grown(NULL, (size_t)run.row_count, sizeof *order), count = 0, top = 6, height = 6;
    for (int i = 0; i < run.row_count; i++) {
        if (run.rows[i].deepest > 0)
            order[count++] = i;
        height += run.rows[i].deepest > 0 ? run.rows[i].deepest * BAR + 6 : 0;
    }
    qsort(order, (size_t)count, sizeof *order, compare_rows);
    fprintf(out, "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 %d %d\">\n", WIDTH,
            height);
    fputs("<defs><pattern id=\"w\" width=\"6\" height=\"6\" patternUnits=\"userSpaceOnUse\"><path "
          "d=\"M0 6L6 0\" stroke=\"#555\"/></pattern></defs>\n",
          out);
    for (int i = 0; i < count; i++) {
        put_row(out, order[i], top);
        top += run.rows[order[i]].deepest * BAR + 6;
    }
    fputs("</svg>\n", out);
    free(order);
}

/* How long a process did things of these kinds. */
static double spent_ms(int process, unsigned kinds)
{
    size_t count;
    part *parts = parts_of(process, kinds, &count);
    double ms = length_of(parts, count) / 1000;
    free(parts);
    return ms;
}

/* On the page and here. Communication is what a collective takes once all have begun it. */
static void put_sums(FILE *out, int process, bool last)
{
    size_t count, talks;
    part *busy = parts_of(process, 1u << METHOD | 1u << WAIT, &count);
    part *talk = parts_of(process, 1u << TALK, &talks);
    double seen = 0, methods = spent_ms(process, 1u << METHOD),
           waits = spent_ms(process, 1u << WAIT);
    double talk_ms = spent_ms(process, 1u << TALK | 1u << WAIT) - waits;
    for (size_t i = 0; i < talks; i++)
        seen += outside(busy, count, talk[i], NULL, NULL, 0) / 1000;
    printf("process %d: methods %.3f ms, communication %.3f ms, of it not hidden %.3f ms, waited "
           "%.3f ms\n",
           process, methods, talk_ms, seen, waits);
    fprintf(out,
            "<tr%s><td>%d</td><td>%.3f</td><td>%.3f</td><td>%.3f</td><td>%.1f %%</td><td>%.3f</td>"
            "</tr>\n",
            last ? " class=\"l\"" : "", process, methods, talk_ms, seen,
            100 * seen * 1000 / (run.end - run.begin), waits);
    free(busy);
    free(talk);
}

/* Returns the process of the next higher number; -1: there is none. */
static int process_after(int process)
{
    int next = -1;
    for (int i = 0; i < run.row_count; i++) {
        int its = run.rows[i].process;
        if (run.rows[i].deepest > 0 && its > process && (next < 0 || its < next))
            next = its;
    }
    return next;
}

/* Returns the process for which all others wait; -1: for none much of the time. It waits least. */
static int last_process(double *out_ms)
{
    double least = 0, next = 0;
    int last = -1, seen = 0;
    for (int p = process_after(-1); p >= 0; p = process_after(p)) {
        double ms = spent_ms(p, 1u << WAIT);
        if (seen++ == 0 || ms < least) {
            next = least, least = ms, last = p;
        } else if (seen == 2 || ms < next) {
            next = ms;
        }
    }
    *out_ms = next - least;
    return seen > 1 && (next - least) * 1000 > (run.end - run.begin) / 20 ? last : -1;
}

static void put_page(FILE *out)
{
    double ms = (run.end - run.begin) / 1000, late_ms;
    int last = last_process(&late_ms);
    fputs(head, out);
    fprintf(
        out,
        "<h1>%d steps in %.3f ms</h1>\n<p><i class=\"m\" style=\"background:#7fc97f\"></i>methods "
        "<i style=\"background:#80b1d3\"></i>communication, hidden <i style=\"background:#e31a1c\">"
        "</i>not hidden <i style=\"background:#fdc086\"></i>scatter and gather <i style=\""
        "background:repeating-linear-gradient(135deg,#555 0 1px,#fff 1px 4px)\"></i>waits</p>\n",
        run.steps, ms);
    put_picture(out);
    fputs("<table><tr><th>process</th><th>methods, ms</th><th>communication</th><th>not hidden</th>"
          "<th>of the time</th><th>waited</th></tr>\n",
          out);
    if (run.steps > 0)
        printf("%d steps in %.3f ms, %.3f ms each\n", run.steps, ms, ms / run.steps);
    for (int p = process_after(-1); p >= 0; p = process_after(p))
        put_sums(out, p, p == last);
    fputs("</table>\n", out);
    if (last >= 0) {
        printf("process %d comes last: all others waited %.3f ms for it\n", last, late_ms);
        fprintf(out, "<p>Process %d comes last: all others waited %.3f ms for it.</p>\n", last,
                late_ms);
    }
    fputs("</body></html>\n", out);
}

int main(int argc, char **argv)
{
    int steps = argc > 3 ? atoi(argv[3]) : 5;
    if (argc < 3 || argc > 4 || steps < 1) {
        fputs("timeline run.json page.html [steps]\n", stderr);
        return 2;
    }
    FILE *in = fopen(argv[1], "r");
    if (in == NULL) {
        perror(argv[1]);
        return 1;
    }
    read_trace(in);
    fclose(in);
    choose_steps(steps);
    if (run.end <= run.begin) {
        fprintf(stderr, "timeline: %s has no spans\n", argv[1]);
        return 1;
    }
    FILE *out = fopen(argv[2], "w");
    if (out == NULL) {
        perror(argv[2]);
        return 1;
    }
    put_page(out);
    free(run.spans);
    free(run.rows);
    if (ferror(out) != 0 || fclose(out) != 0) {
        perror(argv[2]);
        return 1;
    }
    return 0;
}
