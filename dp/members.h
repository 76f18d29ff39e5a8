/* dp/members.h - v0.2.0 - which processes are the job after a failure - MIT licence

   Part of dp.h, which includes it. A pure state machine: events go in, actions come out. It has no
   clock, socket, lock or memory of its own, so that a test can visit its states one by one.

   THE ALGORITHM: single-decree Paxos, once for each number of a roster. The acceptors for number
   n + 1 are the members of roster n. Nothing is kept on disk: a process that dies never comes back
   as itself, so what it has promised need not outlive it.

   A member is a seat and its holder; the next holder of the seat is another member. A roster has
   one holder a seat, and with each holder the number of the roster that it came with: who came
   first, and of those the lowest seat, is the most senior.

   Messages (ballot = {round, seat of its owner}, so no two processes own the same one):
     PREPARE(n, b)         a proposer asks all of roster n to promise
     PROMISE(n, b, a, V)   nothing below b is accepted; V was accepted at a, or a is 0
     ACCEPT(n, b, V)       the proposer's roster for n + 1
     ACCEPTED(n, b)
     REJECT(n, b, p)       a ballot p > b was promised; with b = p = 0: n is over for the receiver,
                           which is ahead, and sends what was decided
     DECIDED(n, V)         V is roster n; also the answer to every message of a lower number

   A quorum of a roster is more than half of its members, or half with the most senior one: of four
   that are cut in two pairs, the pair with that one goes on. Any two quorums of one roster share a
   member (dp__is_quorum). Who is known to be dead counts like anybody else.

   V is what was accepted at the highest ballot of a quorum of promises; if nothing was, it is those
   that have promised, and as many newcomers as there can be while these are still a quorum of V.

   On one machine (Linux). If all members of roster n have the same memory, that memory has one
   acceptor: a word {number, whose proposal}, which goes from n to n + 1 by compare-and-exchange.
   Then no quorum is needed, so any number may die, and who was stopped reads the word when it wakes
   up. Which acceptor decides n + 1 follows from roster n alone.

   Roles of a member that proposes: RUNS -> WAITS -> PREPARES -> PROPOSES (with the word: CLAIMS) ->
   MEETS -> RUNS; of any other: RUNS -> WAITS -> MEETS -> RUNS; LEFT is for ever. MEETS becomes
   RUNS when all of the roster have come to MEETS. A member that promises for n + 1 has left roster
   n, and does not run in it again: that job is over for all, since a collective needs every member.

   Claims, and why they hold:
     a. A number has one roster. Paxos: a value that a quorum has accepted at ballot b is in every
        quorum of promises for a higher ballot; on one machine, the word changes once a number
        (dp__decision_claim in dp/voting.h).
     b. No two jobs can both end a collective. For roster n + 1 to be decided, a quorum of
        roster n (on one machine: whoever claimed the word) has left it (dp__promise).
     c. Who is not in a roster never runs again: DECIDED, or the word, makes it LEFT, whenever it
        wakes up (dp__adopt). Until then its job lacks the members that have left.
     d. If a quorum lives and its messages arrive in time, it decides: any member may propose, and a
        ballot that is rejected is followed by one with a higher round, after a longer wait.
     e. Newcomers endanger nothing: they promise nothing for the number that lets them in, and in
        the roster with them the older members are a quorum (dp__newcomer_seat), but where the word
        decides, which needs none.
     f. A seat is taken once: a roster has one holder a seat, and one roster follows another.
     g. The dead are told from the stopped, as nobody listens at their ports any more; that decides
        how long a proposer waits, never what is safe.

   CONTENTS (search for the tag)
     >>rosters   seats, holders, quorums
     >>members   what a process knows, and what happens to it
     >>ballots   it promises, proposes, accepts
     >>events    one step of the machine
*/

#ifndef DP__ROOMS
#error "dp/members.h is a part of dp.h: include dp.h"
#else

/* ==== >>rosters ================================================================================
   A roster is an array of seats: see dp__seat in dp/world.h, of which only the holder, when it
   came, and the memory that it shares with its machine are looked at here.                      */

/* Returns true if a seat is more senior than a lower one, or that is -1: none. */
static bool dp__is_senior(const dp__seat *places, int seat, int other)
{
    return other < 0 || places[seat].came < places[other].came;
}

/* Returns the memory that all members have; 0: they have none in common. */
static uint64_t dp__roster_memory(const dp__seat *places, int count)
{
    int first = -1;
    for (int s = 0; s < count; s++) {
        if (places[s].holder == 0)
            continue;
        first = first < 0 ? s : first;
        if (places[s].memory != places[first].memory)
            return 0;
    }
    return first >= 0 ? places[first].memory : 0;
}

/* Returns true if the seats with this mark are a quorum of a roster. */
static bool dp__is_quorum(const dp__seat *places, int count, const unsigned char *marks,
                          unsigned char mark)
{
    int all = 0, marked = 0, first = -1;
    for (int s = 0; s < count; s++) {
        if (places[s].holder == 0)
            continue;
        all++;
        marked += (marks[s] & mark) != 0;
        first = dp__is_senior(places, s, first) ? s : first;
    }
    return 2 * marked > all || (2 * marked == all && first >= 0 && (marks[first] & mark) != 0);
}

static int dp__roster_find(const dp__seat *places, int count, uint64_t holder)
{
    for (int s = 0; s < count; s++)
        if (places[s].holder == holder)
            return s;
    return -1;
}

/* ==== >>members ================================================================================
   The state is one piece of memory without pointers: it can be copied, compared and hashed.      */

typedef enum dp__role {
    DP__ROLE_RUNS,     /* the job of its roster */
    DP__ROLE_WAITS,    /* for its turn to propose, or for who proposes */
    DP__ROLE_PREPARES, /* its ballot: it collects promises */
    DP__ROLE_PROPOSES, /* a roster: it collects acceptances */
    DP__ROLE_CLAIMS,   /* the word of its machine for its roster */
    DP__ROLE_MEETS,    /* the others of its roster, as one of it */
    DP__ROLE_LEFT      /* the others have gone on without it */
} dp__role;

enum {
    DP__MARK_SAID = 1,
    DP__MARK_TOOK = 2,
    DP__MARK_GONE = 4
}; /* marks of a seat: promised, accepted, absent */

typedef struct dp__members {
    int32_t count, seat;         /* how many seats there are; its own, -1: none yet */
    uint64_t holder;             /* itself */
    uint64_t number;             /* of its roster, from 1 on; 0: it knows of none */
    uint64_t promised, accepted; /* ballots for the next number; 0: none */
    uint64_t ballot, best;       /* its own; and the highest that promises told of */
    uint64_t round;              /* the highest that it has seen */
    int32_t role;
    int32_t whole; /* a roster has no empty seat */
    /* Arrays of `count`: its roster; what it has accepted; what it proposes; newcomers. Then as
       many bytes: marks. */
    dp__seat places[];
} dp__members;

static dp__seat *dp__roster_of(dp__members *m)
{
    return m->places;
}

static dp__seat *dp__accepted_of(dp__members *m)
{
    return m->places + m->count;
}

static dp__seat *dp__proposed_of(dp__members *m)
{
    return m->places + 2 * m->count;
}

static dp__seat *dp__newcomers_of(dp__members *m)
{
    return m->places + 3 * m->count;
}

static unsigned char *dp__marks_of(dp__members *m)
{
    return (unsigned char *)(m->places + 4 * m->count);
}

static size_t dp__members_bytes(int count)
{
    return sizeof(dp__members) + (size_t)count * (4 * sizeof(dp__seat) + 1);
}

typedef enum dp__vote_kind {
    DP__VOTE_PREPARE,
    DP__VOTE_PROMISE,
    DP__VOTE_ACCEPT,
    DP__VOTE_ACCEPTED,
    DP__VOTE_REJECT,
    DP__VOTE_DECIDED
} dp__vote_kind;

typedef struct dp__vote { /* a message */
    int32_t kind, seat;   /* of its sender, */
    uint64_t holder;      /* which is this process */
    uint64_t number, ballot;
    uint64_t other; /* PROMISE: at which `places` were accepted, or 0; REJECT: what was promised */
    const dp__seat *places; /* PROMISE with `other`, ACCEPT, DECIDED; else NULL */
} dp__vote;

typedef enum dp__event_kind {
    DP__ON_FAILED,  /* its job; or it lets newcomers in */
    DP__ON_VOTE,    /* a message has come */
    DP__ON_TIMER,   /* what it waited for has taken too long */
    DP__ON_ABSENT,  /* `seat` refuses connections, or has died */
    DP__ON_PRESENT, /* it can be reached after all */
    DP__ON_CLAIMED, /* the word says that roster `number` is `places` */
    DP__ON_MET,     /* all of its roster */
    DP__ON_KNOCKED  /* `places` are the newcomers that wait, and were never in a roster */
} dp__event_kind;

typedef struct dp__members_event {
    int32_t kind, seat;
    dp__vote vote; /* CLAIMED: number and places; KNOCKED: places */
} dp__members_event;

typedef enum dp__action_kind {
    DP__DO_REPLY,  /* the vote to the sender of the one that has come */
    DP__DO_SPREAD, /* it to all others of the roster; DECIDED: and to those of the roster before */
    DP__DO_WAIT,   /* until TIMER: see dp__wait_kind */
    DP__DO_CLAIM,  /* the word, for what is proposed as number + 1: then comes CLAIMED */
    DP__DO_MEET,   /* the others of the roster: then comes MET or FAILED */
    DP__DO_GIVE_UP /* the others have gone on without this process */
} dp__action_kind;

typedef enum dp__wait_kind {
    DP__FOR_TURN,     /* those with lower seats propose first */
    DP__FOR_PROPOSER, /* another one has been promised */
    DP__FOR_ANSWERS,  /* to its own ballot */
    DP__FOR_AGAIN     /* its ballot was rejected, or took too long */
} dp__wait_kind;

typedef struct dp__action {
    int32_t kind, wait; /* WAIT: a dp__wait_kind */
    dp__vote vote;      /* its places are the state's */
} dp__action;

enum { DP__ACTIONS_MOST = 4 };

typedef struct dp__actions {
    int count;
    dp__action list[DP__ACTIONS_MOST];
} dp__actions;

static dp__action *dp__members_act(dp__actions *out, dp__action_kind kind)
{
    DP_ASSERT(out->count < DP__ACTIONS_MOST);
    out->list[out->count] = (dp__action){.kind = (int32_t)kind};
    return &out->list[out->count++];
}

/* Sends a vote of this process. */
static void dp__vote_send(dp__members *m, dp__actions *out, dp__action_kind how, dp__vote vote)
{
    vote.seat = m->seat;
    vote.holder = m->holder;
    vote.number = m->number;
    dp__members_act(out, how)->vote = vote;
}

static void dp__seats_set(const dp__members *m, dp__seat *to, const dp__seat *from)
{
    if (from != NULL)
        memcpy(to, from, (size_t)m->count * sizeof *to);
    else
        memset(to, 0, (size_t)m->count * sizeof *to);
}

static void dp__marks_clear(dp__members *m, unsigned char marks)
{
    for (int s = 0; s < m->count; s++)
        dp__marks_of(m)[s] &= (unsigned char)~marks;
}

static bool dp__is_of_roster(dp__members *m, int seat, uint64_t holder)
{
    return seat >= 0 && seat < m->count && holder != 0 && dp__roster_of(m)[seat].holder == holder;
}

/* ==== >>ballots ================================================================================
   A process as acceptor and as proposer for the number after its own.                           */

static uint64_t dp__ballot_of(uint64_t round, int seat)
{
    return round << 32 | (uint64_t)(seat + 1);
}

static uint64_t dp__round_of(uint64_t ballot)
{
    return ballot >> 32;
}

/* Returns the seat of its owner; -1: there is none. */
static int dp__ballot_seat(uint64_t ballot)
{
    return (int)((uint32_t)ballot - 1);
}

static void dp__round_seen(dp__members *m, uint64_t ballot)
{
    if (dp__round_of(ballot) > m->round)
        m->round = dp__round_of(ballot);
}

static void dp__members_wait(dp__members *m, dp__actions *out, dp__wait_kind what)
{
    if (what != DP__FOR_ANSWERS)
        m->role = DP__ROLE_WAITS;
    dp__members_act(out, DP__DO_WAIT)->wait = (int32_t)what;
}

/* Drops newcomers that were let in: they are none any more, whatever becomes of them. */
static void dp__newcomers_forget(dp__members *m)
{
    for (int g = 0; g < m->count; g++) {
        dp__seat *one = &dp__newcomers_of(m)[g];
        if (dp__roster_find(dp__roster_of(m), m->count, one->holder) >= 0)
            *one = (dp__seat){0};
    }
}

/* Takes a decided roster as its own. */
static void dp__adopt(dp__members *m, dp__actions *out, uint64_t number, const dp__seat *places)
{
    dp__seat *roster = dp__roster_of(m);
    memmove(roster, places, (size_t)m->count * sizeof *roster); /* it may be what was proposed */
    m->number = number;
    m->promised = m->accepted = m->ballot = m->best = m->round = 0;
    dp__seats_set(m, dp__accepted_of(m), NULL);
    dp__seats_set(m, dp__proposed_of(m), NULL);
    dp__marks_clear(m, DP__MARK_SAID | DP__MARK_TOOK | DP__MARK_GONE);
    dp__newcomers_forget(m);
    int seat = dp__roster_find(roster, m->count, m->holder);
    m->seat = seat >= 0 ? seat : m->seat;
    m->role = seat >= 0 ? DP__ROLE_MEETS : DP__ROLE_LEFT;
    dp__members_act(out, seat >= 0 ? DP__DO_MEET : DP__DO_GIVE_UP);
}

/* Puts a newcomer in the first empty seat, if the older members stay a quorum without it. */
static void dp__newcomer_seat(dp__members *m, dp__seat newcomer)
{
    dp__seat *places = dp__proposed_of(m);
    int seat = dp__roster_find(places, m->count, 0);
    if (seat < 0)
        return;
    places[seat] = newcomer;
    places[seat].came = m->number + 1;
    if (dp__roster_memory(places, m->count) == 0 &&
        !dp__is_quorum(places, m->count, dp__marks_of(m), DP__MARK_SAID))
        places[seat] = (dp__seat){0};
}

/* Makes the roster of those that have promised, and of newcomers. */
static void dp__propose_new(dp__members *m)
{
    dp__seat *places = dp__proposed_of(m);
    const unsigned char *marks = dp__marks_of(m);
    for (int s = 0; s < m->count; s++)
        places[s] = (marks[s] & DP__MARK_SAID) != 0 ? dp__roster_of(m)[s] : (dp__seat){0};
    for (int g = 0; g < m->count; g++)
        if (dp__newcomers_of(m)[g].holder != 0)
            dp__newcomer_seat(m, dp__newcomers_of(m)[g]);
}

static bool dp__proposes_whole(dp__members *m)
{
    return dp__roster_find(dp__proposed_of(m), m->count, 0) < 0;
}

/* Decides if a quorum has accepted what this process proposes. */
static bool dp__is_decided(dp__members *m, dp__actions *out)
{
    if (!dp__is_quorum(dp__roster_of(m), m->count, dp__marks_of(m), DP__MARK_TOOK))
        return false;
    dp__adopt(m, out, m->number + 1, dp__proposed_of(m));
    dp__vote_send(m, out, DP__DO_SPREAD,
                  (dp__vote){.kind = DP__VOTE_DECIDED, .places = dp__roster_of(m)});
    return true;
}

/* Sends what a proposer asks the members: all of them, and waits, or one that was behind. */
static void dp__ask(dp__members *m, dp__actions *out, dp__action_kind how)
{
    bool accept = m->role == DP__ROLE_PROPOSES;
    dp__vote_send(m, out, how,
                  (dp__vote){.kind = accept ? DP__VOTE_ACCEPT : DP__VOTE_PREPARE,
                             .ballot = m->ballot,
                             .places = accept ? dp__proposed_of(m) : NULL});
    if (how == DP__DO_SPREAD)
        dp__members_wait(m, out, DP__FOR_ANSWERS);
}

static void dp__ask_to_accept(dp__members *m, dp__actions *out)
{
    m->role = DP__ROLE_PROPOSES;
    m->accepted = m->ballot;
    dp__seats_set(m, dp__accepted_of(m), dp__proposed_of(m));
    dp__marks_of(m)[m->seat] |= DP__MARK_TOOK;
    if (dp__is_decided(m, out))
        return;
    dp__ask(m, out, DP__DO_SPREAD);
}

/* Proposes what was accepted at the highest ballot of the promises, or else a new roster. */
static void dp__propose(dp__members *m, dp__actions *out)
{
    if (m->best == 0)
        dp__propose_new(m);
    if (m->whole && !dp__proposes_whole(m)) {
        dp__members_wait(m, out, DP__FOR_AGAIN);
    } else if (dp__roster_memory(dp__roster_of(m), m->count) != 0) {
        m->role = DP__ROLE_CLAIMS;
        dp__members_act(out, DP__DO_CLAIM);
    } else {
        dp__ask_to_accept(m, out);
    }
}

static bool dp__has_promises(dp__members *m)
{
    return dp__roster_memory(dp__roster_of(m), m->count) != 0 ||
           dp__is_quorum(dp__roster_of(m), m->count, dp__marks_of(m), DP__MARK_SAID);
}

/* Returns true if a member may still promise. */
static bool dp__is_awaiting(dp__members *m)
{
    const unsigned char *marks = dp__marks_of(m);
    for (int s = 0; s < m->count; s++)
        if (dp__roster_of(m)[s].holder != 0 && (marks[s] & (DP__MARK_SAID | DP__MARK_GONE)) == 0)
            return true;
    return false;
}

/* Proposes if all have answered that can. */
static void dp__propose_soon(dp__members *m, dp__actions *out)
{
    if (m->role == DP__ROLE_PREPARES && !dp__is_awaiting(m) && dp__has_promises(m))
        dp__propose(m, out);
}

static void dp__prepare(dp__members *m, dp__actions *out)
{
    m->role = DP__ROLE_PREPARES;
    m->ballot = m->promised = dp__ballot_of(++m->round, m->seat);
    m->best = m->accepted;
    dp__seats_set(m, dp__proposed_of(m), m->accepted != 0 ? dp__accepted_of(m) : NULL);
    dp__marks_clear(m, DP__MARK_SAID | DP__MARK_TOOK);
    dp__marks_of(m)[m->seat] |= DP__MARK_SAID;
    dp__ask(m, out, DP__DO_SPREAD);
    dp__propose_soon(m, out);
}

/* Leaves its job, and what it proposes itself, for another one's ballot. */
static void dp__promise(dp__members *m, dp__actions *out, uint64_t ballot)
{
    dp__round_seen(m, ballot);
    if (ballot == m->promised)
        return;
    m->promised = ballot;
    dp__members_wait(m, out, DP__FOR_PROPOSER);
}

static void dp__reject(dp__members *m, dp__actions *out, const dp__vote *vote)
{
    dp__vote_send(
        m, out, DP__DO_REPLY,
        (dp__vote){.kind = DP__VOTE_REJECT, .ballot = vote->ballot, .other = m->promised});
}

static void dp__take_prepare(dp__members *m, dp__actions *out, const dp__vote *vote)
{
    if (vote->ballot < m->promised) {
        dp__reject(m, out, vote);
        return;
    }
    dp__promise(m, out, vote->ballot);
    dp__vote_send(m, out, DP__DO_REPLY,
                  (dp__vote){.kind = DP__VOTE_PROMISE,
                             .ballot = vote->ballot,
                             .other = m->accepted,
                             .places = m->accepted != 0 ? dp__accepted_of(m) : NULL});
}

static void dp__take_promise(dp__members *m, dp__actions *out, const dp__vote *vote)
{
    if (m->role != DP__ROLE_PREPARES || vote->ballot != m->ballot)
        return;
    dp__marks_of(m)[vote->seat] |= DP__MARK_SAID;
    if (vote->other > m->best) {
        m->best = vote->other;
        dp__seats_set(m, dp__proposed_of(m), vote->places);
    }
    dp__propose_soon(m, out);
}

static void dp__take_accept(dp__members *m, dp__actions *out, const dp__vote *vote)
{
    if (vote->ballot < m->promised) {
        dp__reject(m, out, vote);
        return;
    }
    dp__promise(m, out, vote->ballot);
    m->accepted = vote->ballot;
    dp__seats_set(m, dp__accepted_of(m), vote->places);
    dp__vote_send(m, out, DP__DO_REPLY,
                  (dp__vote){.kind = DP__VOTE_ACCEPTED, .ballot = vote->ballot});
}

static void dp__take_accepted(dp__members *m, dp__actions *out, const dp__vote *vote)
{
    if (m->role != DP__ROLE_PROPOSES || vote->ballot != m->ballot)
        return;
    dp__marks_of(m)[vote->seat] |= DP__MARK_TOOK;
    (void)dp__is_decided(m, out);
}

static void dp__take_reject(dp__members *m, dp__actions *out, const dp__vote *vote)
{
    dp__round_seen(m, vote->other);
    if ((m->role == DP__ROLE_PREPARES || m->role == DP__ROLE_PROPOSES) && vote->ballot == m->ballot)
        dp__members_wait(m, out, DP__FOR_AGAIN);
}

/* ==== >>events =================================================================================
   One step: an event changes the state, and asks for actions.                                   */

/* Tells a sender that is behind what was decided, and asks it again if it is still needed. */
static void dp__answer_late(dp__members *m, dp__actions *out, const dp__vote *vote)
{
    dp__vote_send(m, out, DP__DO_REPLY,
                  (dp__vote){.kind = DP__VOTE_DECIDED, .places = dp__roster_of(m)});
    bool asks = m->role == DP__ROLE_PREPARES || m->role == DP__ROLE_PROPOSES;
    if (asks && dp__is_of_roster(m, vote->seat, vote->holder))
        dp__ask(m, out, DP__DO_REPLY);
}

/* Takes a vote for the number after its own from a member of its roster. */
static void dp__take_member_vote(dp__members *m, dp__actions *out, const dp__vote *vote)
{
    switch ((dp__vote_kind)vote->kind) {
    case DP__VOTE_PREPARE:
        dp__take_prepare(m, out, vote);
        break;
    case DP__VOTE_PROMISE:
        dp__take_promise(m, out, vote);
        break;
    case DP__VOTE_ACCEPT:
        dp__take_accept(m, out, vote);
        break;
    case DP__VOTE_ACCEPTED:
        dp__take_accepted(m, out, vote);
        break;
    case DP__VOTE_REJECT:
        dp__take_reject(m, out, vote);
        break;
    case DP__VOTE_DECIDED:
        break;
    }
}

static void dp__take_vote(dp__members *m, dp__actions *out, const dp__vote *vote)
{
    if (vote->kind == DP__VOTE_DECIDED) {
        if (vote->number > m->number && m->role != DP__ROLE_LEFT &&
            (m->number > 0 || dp__roster_find(vote->places, m->count, m->holder) >= 0))
            dp__adopt(m, out, vote->number, vote->places);
    } else if (vote->number < m->number) {
        dp__answer_late(m, out, vote);
    } else if (vote->number > m->number) { /* this one is behind: the sender answers DECIDED */
        dp__vote_send(m, out, DP__DO_REPLY, (dp__vote){.kind = DP__VOTE_REJECT});
    } else if (m->role != DP__ROLE_LEFT && dp__is_of_roster(m, vote->seat, vote->holder)) {
        dp__take_member_vote(m, out, vote);
    }
}

static void dp__time_is_over(dp__members *m, dp__actions *out)
{
    if (m->role == DP__ROLE_WAITS && m->number > 0)
        dp__prepare(m, out);
    else if (m->role == DP__ROLE_PREPARES && dp__has_promises(m))
        dp__propose(m, out);
    else if (m->role == DP__ROLE_PREPARES || m->role == DP__ROLE_PROPOSES)
        dp__members_wait(m, out, DP__FOR_AGAIN);
}

/* Changes the state by one event. A vote's kind and places must be valid. */
static void dp__members_step(dp__members *m, const dp__members_event *event, dp__actions *out)
{
    out->count = 0;
    switch ((dp__event_kind)event->kind) {
    case DP__ON_FAILED:
        if (m->role == DP__ROLE_RUNS || m->role == DP__ROLE_MEETS)
            dp__members_wait(m, out, DP__FOR_TURN);
        break;
    case DP__ON_VOTE:
        dp__take_vote(m, out, &event->vote);
        break;
    case DP__ON_TIMER:
        dp__time_is_over(m, out);
        break;
    case DP__ON_ABSENT:
        dp__marks_of(m)[event->seat] |= DP__MARK_GONE;
        dp__propose_soon(m, out);
        break;
    case DP__ON_PRESENT:
        dp__marks_of(m)[event->seat] &= (unsigned char)~DP__MARK_GONE;
        break;
    case DP__ON_CLAIMED:
        if (event->vote.number > m->number && m->role != DP__ROLE_LEFT)
            dp__adopt(m, out, event->vote.number, event->vote.places);
        break;
    case DP__ON_MET:
        if (m->role == DP__ROLE_MEETS)
            m->role = DP__ROLE_RUNS;
        break;
    case DP__ON_KNOCKED:
        dp__seats_set(m, dp__newcomers_of(m), event->vote.places);
        break;
    }
}

#endif /* DP__ROOMS */

/* The licence is at the end of dp.h. */
