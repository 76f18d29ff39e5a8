/* explore.c - visits the states of dp/members.h: a few processes, all orders of their events.

     explore [--all | --first] [--most=MILLIONS] [SCENARIO...]

   Messages stay: each may arrive at any time, again, or never, so a process that is dead, stopped
   or cut off is one that nothing happens to, and needs no event of its own. What waits may take too
   long at any time. After each event the claims of dp/members.h are checked, but for "in time":
   from some of the states, some of the processes are left alone with a network that works, and have
   to become a job again. A violation is printed with the shortest way to it.

   The last line is "N passed, N failed"; a scenario passes when no new state comes, or at the
   bound, 8 million states if --most has no other: its line then tells "the bound", and in how many
   steps all have been visited. --all has larger ones, which take 15 minutes and 2 GB of memory with
   that bound; --first ends with the first that fails. */

#include <assert.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#define DP__ROOMS
#define DP_ASSERT(condition) assert(condition)
typedef struct dp__seat { /* as much of dp/world.h's as is looked at */
    uint64_t holder, came, memory;
} dp__seat;
#ifndef MEMBERS
#define MEMBERS "../../dp/members.h"
#endif
#include MEMBERS

enum { PROCESSES = 5, SEATS = 4, NUMBERS = 8, VOTES = 512, LISTS = 200, MACHINES = 3, ALL = 255 };
enum { MILLIONS = 8 };

typedef struct scenario {
    const char *name;
    int members, newcomers; /* the latter wait from the start, and are let in by anyone */
    int machine[PROCESSES]; /* of each; -1: its machine has no memory with a word */
    int rounds;             /* of ballots that are tried for a number */
    int numbers;            /* the last one that may be decided */
    bool large;             /* only with --all */
} scenario;

static const scenario scenarios[] = {
    {"one and two newcomers", 1, 2, {-1, -1, -1}, 2, 3, false},
    {"two and a newcomer", 2, 1, {-1, -1, -1}, 2, 2, false},
    {"two and a newcomer, twice", 2, 1, {-1, -1, -1}, 1, 3, false},
    {"three", 3, 0, {-1, -1, -1}, 1, 3, false},
    {"three and a newcomer", 3, 1, {-1, -1, -1, -1}, 1, 2, false},
    {"two, three rounds", 2, 0, {-1, -1}, 3, 3, true},
    {"two, three times", 2, 0, {-1, -1}, 2, 4, false},
    {"three on a machine", 3, 0, {0, 0, 0}, 1, 3, false},
    {"two on a machine and a newcomer there", 2, 1, {0, 0, 0}, 1, 3, false},
    {"two on a machine and a newcomer elsewhere", 2, 1, {0, 0, 1}, 1, 3, false},
    {"two on a machine and one elsewhere", 3, 0, {0, 0, 1}, 1, 3, false},
    {"one without a word and two on a machine", 3, 0, {-1, 0, 0}, 1, 3, false},
    {"four on a machine", 4, 0, {0, 0, 0, 0}, 1, 2, false},
    {"four", 4, 0, {-1, -1, -1, -1}, 1, 2, false},
    {"three, two rounds", 3, 0, {-1, -1, -1}, 2, 2, true},
    {"two and two newcomers", 2, 2, {-1, -1, -1, -1}, 1, 3, true},
    {"two on a machine and a newcomer there, three times", 2, 1, {0, 0, 0}, 1, 4, true},
    {"three on a machine, three times", 3, 0, {0, 0, 0}, 1, 4, true},
    {"two on a machine and a newcomer elsewhere, three times", 2, 1, {0, 0, 1}, 1, 4, true},
    {"two on a machine and one elsewhere, two rounds", 3, 0, {0, 0, 1}, 2, 2, true},
    {"four on a machine, twice", 4, 0, {0, 0, 0, 0}, 1, 3, true},
    {"three and a newcomer, twice", 3, 1, {-1, -1, -1, -1}, 1, 3, true},
    {"three, two rounds, twice", 3, 0, {-1, -1, -1}, 2, 3, true},
};

static const scenario *now;

static int process_count(void)
{
    return now->members + now->newcomers;
}

static int seat_count(void)
{
    return now->members + now->newcomers < SEATS ? now->members + now->newcomers : SEATS;
}

/* ---- lists of places and votes have small numbers -------------------------------------------- */

static dp__seat lists[LISTS][SEATS]; /* list 0 is empty */
static int list_count;

typedef struct short_vote {
    uint8_t kind, from, to; /* to: whom it answers; ALL: nobody */
    uint8_t number, ballot, other, list;
} short_vote;

static short_vote votes[VOTES];
static int vote_count;

static int list_of(const dp__seat *places)
{
    dp__seat whole[SEATS] = {{0}};
    memcpy(whole, places, (size_t)seat_count() * sizeof *whole);
    for (int i = 0; i < list_count; i++)
        if (memcmp(lists[i], whole, sizeof whole) == 0)
            return i;
    assert(list_count < LISTS);
    memcpy(lists[list_count], whole, sizeof whole);
    return list_count++;
}

static int vote_of(short_vote vote)
{
    for (int i = 0; i < vote_count; i++)
        if (memcmp(&votes[i], &vote, sizeof vote) == 0)
            return i;
    assert(vote_count < VOTES);
    votes[vote_count] = vote;
    return vote_count++;
}

/* Rounds and seats of a scenario fit into four bits each. */
static uint8_t short_ballot(uint64_t ballot)
{
    assert(dp__round_of(ballot) < 16 && dp__ballot_seat(ballot) < 15);
    return (uint8_t)(dp__round_of(ballot) << 4 | (uint64_t)(dp__ballot_seat(ballot) + 1));
}

static uint64_t long_ballot(uint8_t ballot)
{
    return (uint64_t)(ballot >> 4) << 32 | (ballot & 15);
}

/* ---- a state --------------------------------------------------------------------------------- */

typedef struct process {
    int8_t seat;
    uint8_t role, number, promised, accepted, ballot, best, round;
    uint8_t roster, accepted_list, proposed, newcomers;
    uint8_t marks[SEATS];
} process;

typedef struct state {
    process of[PROCESSES];
    uint8_t decided[NUMBERS]; /* a list; 0: none */
    uint8_t decided_sent[NUMBERS];
    uint8_t met[NUMBERS]; /* who has ever come to MEETS there, a bit each */
    uint8_t word_number[MACHINES], word_list[MACHINES];
    uint64_t sent[VOTES / 64];
} state;

/* Room for a process in the machine's own form. */
static dp__members *new_room(void)
{
    dp__members *room = calloc(1, dp__members_bytes(SEATS));
    if (room == NULL)
        exit(2);
    return room;
}

static void unpack(const process *from, int p, dp__members *m)
{
    m->count = seat_count();
    m->seat = from->seat;
    m->holder = (uint64_t)p + 1;
    m->number = from->number;
    m->promised = long_ballot(from->promised);
    m->accepted = long_ballot(from->accepted);
    m->ballot = long_ballot(from->ballot);
    m->best = long_ballot(from->best);
    m->round = from->round;
    m->role = from->role;
    m->whole = 0;
    dp__seats_set(m, dp__roster_of(m), lists[from->roster]);
    dp__seats_set(m, dp__accepted_of(m), lists[from->accepted_list]);
    dp__seats_set(m, dp__proposed_of(m), lists[from->proposed]);
    dp__seats_set(m, dp__newcomers_of(m), lists[from->newcomers]);
    memcpy(dp__marks_of(m), from->marks, (size_t)m->count);
}

static process packed(dp__members *m)
{
    process to = {.seat = (int8_t)m->seat,
                  .role = (uint8_t)m->role,
                  .number = (uint8_t)m->number,
                  .promised = short_ballot(m->promised),
                  .accepted = short_ballot(m->accepted),
                  .ballot = short_ballot(m->ballot),
                  .best = short_ballot(m->best),
                  .round = (uint8_t)m->round,
                  .roster = (uint8_t)list_of(dp__roster_of(m)),
                  .accepted_list = (uint8_t)list_of(dp__accepted_of(m)),
                  .proposed = (uint8_t)list_of(dp__proposed_of(m)),
                  .newcomers = (uint8_t)list_of(dp__newcomers_of(m))};
    memcpy(to.marks, dp__marks_of(m), (size_t)m->count);
    if (to.role != DP__ROLE_PREPARES && to.role != DP__ROLE_PROPOSES &&
        to.role != DP__ROLE_CLAIMS) {
        to.ballot = to.best = to.proposed = 0; /* nobody looks at them */
        memset(to.marks, 0, sizeof to.marks);
    }
    return to;
}

static dp__seat place_of(int p, int came)
{
    return (dp__seat){(uint64_t)p + 1, (uint64_t)came,
                      now->machine[p] >= 0 ? (uint64_t)now->machine[p] + 1 : 0};
}

static state first_state(void)
{
    state s = {.decided = {0}};
    dp__seat places[SEATS] = {{0}}, none[SEATS] = {{0}};
    (void)list_of(none);
    for (int p = 0; p < now->members; p++)
        places[p] = place_of(p, 1);
    int roster = list_of(places);
    for (int p = 0; p < process_count(); p++)
        s.of[p] = p < now->members ? (process){.seat = (int8_t)p,
                                               .role = DP__ROLE_RUNS,
                                               .number = 1,
                                               .roster = (uint8_t)roster}
                                   : (process){.seat = -1, .role = DP__ROLE_WAITS};
    s.decided[1] = (uint8_t)roster;
    s.met[1] = (uint8_t)((1 << now->members) - 1);
    return s;
}

/* ---- events ---------------------------------------------------------------------------------- */

typedef struct happening {
    uint8_t kind, process; /* a dp__event_kind */
    uint16_t vote;
} happening;

static const char *const roles[] = {"runs",   "waits", "prepares", "proposes",
                                    "claims", "meets", "left"};
static const char *const kinds[] = {"PREPARE",  "PROMISE", "ACCEPT",
                                    "ACCEPTED", "REJECT",  "DECIDED"};
static const char *const events[] = {"has failed",        "gets",        "has waited long",
                                     "sees one absent",   "has claimed", "has met",
                                     "hears of newcomers"};

static char broken[300]; /* the claim, and how */

__attribute__((format(printf, 1, 2))) static void violates(const char *format, ...)
{
    va_list args;
    if (broken[0] != '\0')
        return;
    va_start(args, format);
    vsnprintf(broken, sizeof broken, format, args);
    va_end(args);
}

static const char *list_text(int list, char *text)
{
    size_t used = 0;
    text[0] = '\0';
    for (int s = 0; s < seat_count(); s++)
        used += (size_t)sprintf(
            text + used, "%s%c", s > 0 ? " " : "",
            lists[list][s].holder != 0 ? (char)('A' + (int)lists[list][s].holder - 1) : '.');
    return text;
}

/* Checks that the older members of a new roster can go on without its newcomers, and are as many
   of the roster before as have to agree. */
static void check_roster(const state *s, int number, int list)
{
    unsigned char older[SEATS] = {0}, kept[SEATS] = {0};
    const dp__seat *places = lists[list], *before = lists[s->decided[number - 1]];
    for (int seat = 0; seat < seat_count(); seat++) {
        older[seat] = places[seat].holder != 0 && places[seat].came < (uint64_t)number;
        for (int k = 0; k < seat_count(); k++) {
            if (places[k].holder != 0 && places[k].holder == before[seat].holder)
                kept[seat] = 1;
            if (k != seat && places[k].holder != 0 && places[k].holder == places[seat].holder)
                violates("(f) a process has two seats of roster %d", number);
        }
    }
    if (dp__roster_memory(places, seat_count()) == 0 &&
        !dp__is_quorum(places, seat_count(), older, 1))
        violates("(e) the newcomers of roster %d can stop the others", number);
    if (s->decided[number - 1] != 0 && dp__roster_memory(before, seat_count()) == 0 &&
        !dp__is_quorum(before, seat_count(), kept, 1))
        violates("(b) roster %d has no quorum of the one before", number);
}

static void adopted(state *s, int p)
{
    char a[64], b[64];
    int number = s->of[p].number, list = s->of[p].roster;
    if (s->decided[number] == 0) {
        s->decided[number] = (uint8_t)list;
        check_roster(s, number, list);
    } else if (s->decided[number] != list) {
        violates("(a) roster %d is %s and %s", number, list_text(s->decided[number], a),
                 list_text(list, b));
    }
    if (s->of[p].role == DP__ROLE_MEETS)
        s->met[number] = (uint8_t)(s->met[number] | 1 << p);
}

static bool is_complete(const state *s, int number)
{
    for (int seat = 0; seat < seat_count(); seat++) {
        uint64_t holder = lists[s->decided[number]][seat].holder;
        const process *one = &s->of[holder - 1];
        if (holder != 0 && (one->role != DP__ROLE_RUNS || one->number != number))
            return false;
    }
    return s->decided[number] != 0;
}

/* Checks that a quorum has sent such a vote for a proposer's ballot. */
static void check_quorum(const state *s, const process *one, int p, dp__vote_kind kind)
{
    unsigned char marks[SEATS] = {0};
    marks[one->seat] = 1;
    for (int id = 0; id < vote_count; id++)
        if ((s->sent[id / 64] >> id % 64 & 1) != 0 && votes[id].kind == kind &&
            votes[id].number == one->number && votes[id].ballot == one->ballot)
            marks[s->of[votes[id].from].seat] = 1;
    if (!dp__is_quorum(lists[one->roster], seat_count(), marks, 1))
        violates("(a) %c goes on without a quorum that has %s", 'A' + p,
                 kind == DP__VOTE_PROMISE ? "promised" : "accepted");
}

static void check_state(const state *before, const state *s, int p)
{
    const process *was = &before->of[p], *is = &s->of[p];
    if (is->number < was->number || (is->number == was->number && is->promised < was->promised) ||
        is->accepted > is->promised)
        violates("(a) %c forgets what it has promised", 'A' + p);
    if (was->role == DP__ROLE_LEFT && (is->role != DP__ROLE_LEFT || is->number != was->number))
        violates("(c) %c has left, and goes on", 'A' + p);
    if (is->role == DP__ROLE_RUNS && is->promised != 0)
        violates("(b) %c has promised to leave, and runs", 'A' + p);
    for (int n = 1; n < NUMBERS; n++)
        for (int later = n + 1; later < NUMBERS && is_complete(s, n); later++)
            if (s->decided[later] != 0)
                violates("(b) the job of roster %d runs, and roster %d was decided", n, later);
}

static void send_vote(state *s, const dp__vote *vote, int p, int to)
{
    bool decided = vote->kind == DP__VOTE_DECIDED; /* whoever has sent it, and to whom */
    if (vote->kind == DP__VOTE_REJECT)
        return; /* to be rejected is to wait too long, and to be asked brings nothing new */
    int id =
        vote_of((short_vote){.kind = (uint8_t)vote->kind,
                             .from = (uint8_t)(decided ? 0 : p),
                             .to = (uint8_t)(decided ? ALL : to),
                             .number = (uint8_t)vote->number,
                             .ballot = short_ballot(vote->ballot),
                             .other = short_ballot(vote->other),
                             .list = vote->places != NULL ? (uint8_t)list_of(vote->places) : 0});
    s->sent[id / 64] |= (uint64_t)1 << id % 64;
    if (decided)
        s->decided_sent[vote->number] = 1;
}

/* The vote as the process gets it. */
static dp__vote vote_at(const state *s, int id)
{
    const short_vote *v = &votes[id];
    return (dp__vote){.kind = v->kind,
                      .seat = s->of[v->from].seat,
                      .holder = (uint64_t)v->from + 1,
                      .number = v->number,
                      .ballot = long_ballot(v->ballot),
                      .other = long_ballot(v->other),
                      .places = v->list != 0 ? lists[v->list] : NULL};
}

/* The word of a machine says who has claimed it, or takes what this process proposes. */
static void claim(state *s, int p, dp__members_event *event)
{
    int machine = now->machine[p];
    const process *one = &s->of[p];
    if (s->word_number[machine] <= one->number) {
        s->word_number[machine] = (uint8_t)(one->number + 1);
        s->word_list[machine] = one->proposed;
    }
    event->vote.number = s->word_number[machine];
    event->vote.places = lists[s->word_list[machine]];
}

static state after(const state *s, happening h)
{
    static dp__members *here;
    dp__seat newcomers[SEATS] = {{0}};
    dp__actions actions;
    dp__members_event event = {.kind = h.kind};
    state next = *s;
    int p = h.process;
    here = here != NULL ? here : new_room();
    unpack(&s->of[p], p, here);
    if (h.kind == DP__ON_VOTE)
        event.vote = vote_at(s, h.vote);
    if (h.kind == DP__ON_CLAIMED)
        claim(&next, p, &event);
    for (int g = 0; g < now->newcomers && h.kind == DP__ON_KNOCKED; g++)
        newcomers[g] = place_of(now->members + g, 0);
    if (h.kind == DP__ON_KNOCKED)
        event.vote.places = newcomers;
    dp__members_step(here, &event, &actions);
    next.of[p] = packed(here);
    for (int i = 0; i < actions.count; i++)
        if (actions.list[i].kind == DP__DO_REPLY)
            send_vote(&next, &actions.list[i].vote, p, votes[h.vote].from);
        else if (actions.list[i].kind == DP__DO_SPREAD)
            send_vote(&next, &actions.list[i].vote, p, ALL);
    if (next.of[p].number != s->of[p].number)
        adopted(&next, p);
    if (next.of[p].number != s->of[p].number && h.kind == DP__ON_VOTE &&
        event.vote.kind == DP__VOTE_ACCEPTED)
        check_quorum(s, &s->of[p], p, DP__VOTE_ACCEPTED);
    if (next.of[p].role == DP__ROLE_PROPOSES && s->of[p].role != DP__ROLE_PROPOSES)
        check_quorum(&next, &next.of[p], p, DP__VOTE_PROMISE);
    check_state(s, &next, p);
    return next;
}

/* All members of its roster have come to it. */
static bool may_meet(const state *s, int p)
{
    const process *one = &s->of[p];
    for (int seat = 0; seat < seat_count(); seat++) {
        uint64_t holder = lists[one->roster][seat].holder;
        if (holder != 0 && (s->met[one->number] >> (holder - 1) & 1) == 0)
            return false;
    }
    return one->role == DP__ROLE_MEETS || one->role == DP__ROLE_WAITS; /* it may come late */
}

/* Returns true if it has promised this to the sender of the vote. */
static bool has_promised(const state *s, const short_vote *v, int p)
{
    for (int id = 0; id < vote_count; id++)
        if ((s->sent[id / 64] >> id % 64 & 1) != 0 && votes[id].kind == DP__VOTE_PROMISE &&
            votes[id].from == p && votes[id].to == v->from && votes[id].number == v->number &&
            votes[id].ballot == v->ballot)
            return true;
    return false;
}

/* Returns true if a vote comes to a process, and may change it. */
static bool is_for(const state *s, int id, int p)
{
    const short_vote *v = &votes[id];
    const process *one = &s->of[p];
    if ((s->sent[id / 64] >> id % 64 & 1) == 0 || (v->to != ALL && v->to != p))
        return false;
    if (v->kind == DP__VOTE_DECIDED)
        return v->number >= one->number;
    if (v->from == p || one->role == DP__ROLE_LEFT)
        return false;
    if (v->number != one->number) /* it is answered by what was decided, which once is enough */
        return v->number < one->number && s->decided_sent[one->number] == 0;
    if (v->kind == DP__VOTE_PREPARE)
        return v->ballot > one->promised || (v->ballot == one->promised && !has_promised(s, v, p));
    if (v->kind == DP__VOTE_ACCEPT)
        return v->ballot >= one->promised &&
               (v->ballot > one->accepted || v->list != one->accepted_list);
    return one->role == (v->kind == DP__VOTE_PROMISE ? DP__ROLE_PREPARES : DP__ROLE_PROPOSES);
}

static bool may_wait_long(const process *one)
{
    return (one->role == DP__ROLE_WAITS && one->number > 0 && one->round < now->rounds) ||
           one->role == DP__ROLE_PREPARES || one->role == DP__ROLE_PROPOSES;
}

static int list_events(const state *s, happening *out)
{
    int count = 0;
    for (int p = 0; p < process_count(); p++) {
        const process *one = &s->of[p];
        bool more = one->number < now->numbers;
        if ((one->role == DP__ROLE_RUNS || one->role == DP__ROLE_MEETS) && more)
            out[count++] = (happening){DP__ON_FAILED, (uint8_t)p, 0};
        if (may_wait_long(one))
            out[count++] = (happening){DP__ON_TIMER, (uint8_t)p, 0};
        if (one->role == DP__ROLE_CLAIMS)
            out[count++] = (happening){DP__ON_CLAIMED, (uint8_t)p, 0};
        if (may_meet(s, p))
            out[count++] = (happening){DP__ON_MET, (uint8_t)p, 0};
        if (now->newcomers > 0 && one->role == DP__ROLE_WAITS && one->number == 1 &&
            one->newcomers == 0)
            out[count++] = (happening){DP__ON_KNOCKED, (uint8_t)p, 0};
        for (int id = 0; id < vote_count; id++)
            if (is_for(s, id, p))
                out[count++] = (happening){DP__ON_VOTE, (uint8_t)p, (uint16_t)id};
    }
    return count;
}

/* ---- all states, breadth first --------------------------------------------------------------- */

typedef struct visit { /* how a state was come to */
    uint32_t from;
    happening by;
} visit;

static visit *visits;
static size_t visit_count, visit_room, visit_most;
static uint64_t *seen; /* hashes; 0: free */
static size_t seen_room;

static uint64_t hash_of(const state *s)
{
    const unsigned char *at = (const unsigned char *)s;
    uint64_t hash = 14695981039346656037u;
    for (size_t i = 0; i < sizeof *s; i++)
        hash = (hash ^ at[i]) * 1099511628211u;
    hash ^= hash >> 31;
    hash *= 0x9e3779b97f4a7c15u;
    hash ^= hash >> 29;
    return hash != 0 ? hash : 1;
}

static bool put_hash(uint64_t *table, size_t slots, uint64_t hash)
{
    size_t at = hash % slots;
    while (table[at] != 0 && table[at] != hash)
        at = at + 1 < slots ? at + 1 : 0;
    if (table[at] == hash)
        return false;
    table[at] = hash;
    return true;
}

static void *grown(void *data, size_t bytes)
{
    void *more = realloc(data, bytes);
    if (more == NULL) {
        fprintf(stderr, "explore: no memory for %zu bytes\n", bytes);
        exit(2);
    }
    return more;
}

/* Returns true if the state is new. */
static bool enter_state(const state *s, uint32_t from, happening by)
{
    if (2 * visit_count >= seen_room) {
        size_t slots = seen_room > 0 ? 2 * seen_room : 1 << 20;
        uint64_t *table = calloc(slots, sizeof *table);
        if (table == NULL)
            exit(2);
        for (size_t i = 0; i < seen_room; i++)
            if (seen[i] != 0)
                (void)put_hash(table, slots, seen[i]);
        free(seen);
        seen = table;
        seen_room = slots;
    }
    if (!put_hash(seen, seen_room, hash_of(s)))
        return false;
    if (visit_count == visit_room) {
        visit_room = visit_room > 0 ? 2 * visit_room : 1 << 16;
        visits = grown(visits, visit_room * sizeof *visits);
    }
    visits[visit_count++] = (visit){from, by};
    return true;
}

typedef struct layer {
    state *states;
    uint32_t *numbers;
    size_t count, room;
} layer;

static void layer_add(layer *l, const state *s, uint32_t number)
{
    if (l->count == l->room) {
        l->room = l->room > 0 ? 2 * l->room : 1024;
        l->states = grown(l->states, l->room * sizeof *l->states);
        l->numbers = grown(l->numbers, l->room * sizeof *l->numbers);
    }
    l->states[l->count] = *s;
    l->numbers[l->count++] = number;
}

/* ---- a violation in words -------------------------------------------------------------------- */

static void tell(happening h)
{
    char text[64];
    printf("#   %c %s", 'A' + h.process, events[h.kind]);
    if (h.kind == DP__ON_VOTE) {
        const short_vote *v = &votes[h.vote];
        printf(" %s of %c: number %d", kinds[v->kind], 'A' + v->from, v->number);
        if (v->ballot != 0)
            printf(", ballot %d.%c", v->ballot >> 4, 'A' + (v->ballot & 15) - 1);
        if (v->list != 0)
            printf(", %s", list_text(v->list, text));
    }
}

static void tell_way(uint32_t number, happening last)
{
    static happening way[1000];
    int count = 0;
    state s = first_state();
    way[count++] = last;
    for (; number != 0; number = visits[number].from)
        way[count++] = visits[number].by;
    printf("#   %d steps\n", count);
    while (count-- > 0) {
        happening h = way[count];
        broken[0] = '\0';
        tell(h);
        s = after(&s, h);
        printf(" -> %s", roles[s.of[h.process].role]);
        printf(", number %d\n", s.of[h.process].number);
    }
    printf("#   %s\n", broken);
}

/* ---- in time --------------------------------------------------------------------------------- */

#include "settle.h"

/* ---- a scenario ------------------------------------------------------------------------------ */

static double seconds(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

static bool step_all(const layer *from, layer *to, size_t i)
{
    static happening list[PROCESSES * (VOTES + 5)];
    const state *s = &from->states[i];
    int count = list_events(s, list);
    for (int e = 0; e < count; e++) {
        state next = after(s, list[e]);
        if (broken[0] != '\0') {
            char why[sizeof broken];
            memcpy(why, broken, sizeof why);
            tell_way(from->numbers[i], list[e]);
            return false;
        }
        if (!enter_state(&next, from->numbers[i], list[e]))
            continue;
        layer_add(to, &next, (uint32_t)(visit_count - 1));
        if (!settle_some(&next)) {
            tell_way(from->numbers[i], list[e]);
            tell_settled(&next);
            return false;
        }
    }
    return true;
}

static bool explore(void)
{
    layer layers[2] = {{NULL, NULL, 0, 0}, {NULL, NULL, 0, 0}};
    list_count = vote_count = 0;
    state s = first_state();
    double begun = seconds();
    int depth = 0;
    bool good = true, whole = true;
    visit_count = 0;
    if (seen != NULL)
        memset(seen, 0, seen_room * sizeof *seen);
    broken[0] = '\0';
    settled = 0;
    slowest = 0;
    (void)enter_state(&s, 0, (happening){0, 0, 0});
    layer_add(&layers[0], &s, 0);
    for (; good && whole && layers[depth % 2].count > 0; depth++) {
        layer *from = &layers[depth % 2], *to = &layers[1 - depth % 2];
        to->count = 0;
        for (size_t i = 0; i < from->count && good && whole; i++) {
            good = step_all(from, to, i);
            whole = visit_count < visit_most;
        }
    }
    for (int i = 0; i < 2; i++) {
        free(layers[i].states);
        free(layers[i].numbers);
    }
    printf("%s - %s # %zu states, %s%d steps%s, %zu left alone, at most %d ticks, %.1f s\n",
           good ? "ok" : "not ok", now->name, visit_count, whole ? "" : "the bound: all of ",
           whole ? depth : depth - 1, whole ? " deep" : " and less", settled, slowest,
           seconds() - begun);
    fflush(stdout);
    return good;
}

static bool is_chosen(int argc, char **argv, bool all)
{
    int words = 0;
    for (int i = 1; i < argc; i++) {
        words += argv[i][0] != '-';
        if (strcmp(argv[i], now->name) == 0)
            return true;
    }
    return words == 0 && (all || !now->large);
}

int main(int argc, char **argv)
{
    int passed = 0, failed = 0;
    bool all = argc > 1 && strcmp(argv[1], "--all") == 0;
    bool first = argc > 1 && strcmp(argv[1], "--first") == 0;
    unsigned long millions = MILLIONS;
    for (int i = 1; i < argc; i++)
        if (strncmp(argv[i], "--most=", 7) == 0)
            millions = strtoul(argv[i] + 7, NULL, 10);
    visit_most = millions * 1000000;
    for (size_t i = 0; i < sizeof scenarios / sizeof *scenarios && !(first && failed > 0); i++) {
        now = &scenarios[i];
        if (!is_chosen(argc, argv, all))
            continue;
        bool good = explore();
        passed += good;
        failed += !good;
    }
    printf("%d passed, %d failed\n", passed, failed);
    return failed > 0;
}
