/* settle.h - a part of explore.c: whether processes that are left alone become a job in time. From
   a state, some processes never do anything again, and what was on its way is lost. The others have
   a network that takes one tick a message, and timers as a program would set them. */

enum { TICKS_STEP = 10, TICKS_MOST = 60 * TICKS_STEP, QUEUE = 4096, SHARE_SETTLED = 16 };

typedef struct letter {
    int to, from, at;
    dp__vote vote;
    int list;
} letter;

typedef struct actor {
    bool alive;
    int timer, tries; /* timer: when, or -1 */
} actor;

typedef struct stage {
    state words; /* the words of machines, in a state's form */
    actor of[PROCESSES];
    letter queue[QUEUE];
    int first, last, now;
} stage;

static stage play;
static size_t settled;
static int slowest; /* ticks */

static dp__members *member(int p)
{
    static dp__members *rooms[PROCESSES];
    rooms[p] = rooms[p] != NULL ? rooms[p] : new_room();
    return rooms[p];
}

static void put_letter(int to, int from, const dp__vote *vote)
{
    if (to == from || !play.of[to].alive)
        return;
    assert(play.last - play.first < QUEUE);
    letter *l = &play.queue[play.last++ % QUEUE];
    *l = (letter){to, from, play.now + 1, *vote, vote->places != NULL ? list_of(vote->places) : -1};
}

static void spread(int from, const dp__vote *vote, const dp__seat *places)
{
    for (int seat = 0; seat < seat_count(); seat++)
        if (places[seat].holder != 0)
            put_letter((int)places[seat].holder - 1, from, vote);
}

static int ticks_of(int p, dp__wait_kind wait)
{
    actor *a = &play.of[p];
    int place = member(p)->seat;
    switch (wait) {
    case DP__FOR_TURN:
        a->tries = 0;
        return 1 + place * TICKS_STEP;
    case DP__FOR_PROPOSER:
        return (4 + place) * TICKS_STEP;
    case DP__FOR_ANSWERS:
        return TICKS_STEP;
    case DP__FOR_AGAIN:
        a->tries = a->tries < 3 ? a->tries + 1 : 3;
        return (place + 1) * TICKS_STEP << (a->tries - 1);
    }
    return 0;
}

static void happen(int p, dp__members_event event, int sender);

static void claim_now(int p)
{
    dp__members_event event = {.kind = DP__ON_CLAIMED};
    play.words.of[p] = packed(member(p));
    claim(&play.words, p, &event);
    happen(p, event, -1);
}

static void happen(int p, dp__members_event event, int sender)
{
    dp__actions actions;
    dp__seat before[SEATS];
    actor *a = &play.of[p];
    memcpy(before, dp__roster_of(member(p)), (size_t)seat_count() * sizeof *before);
    dp__members_step(member(p), &event, &actions);
    for (int i = 0; i < actions.count; i++) {
        const dp__action *act = &actions.list[i];
        switch ((dp__action_kind)act->kind) {
        case DP__DO_REPLY:
            if (sender >= 0)
                put_letter(sender, p, &act->vote);
            break;
        case DP__DO_SPREAD:
            spread(p, &act->vote, dp__roster_of(member(p)));
            if (act->vote.kind == DP__VOTE_DECIDED)
                spread(p, &act->vote, before);
            break;
        case DP__DO_WAIT:
            a->timer = play.now + ticks_of(p, (dp__wait_kind)act->wait);
            break;
        case DP__DO_CLAIM:
            claim_now(p);
            break;
        case DP__DO_MEET:
            a->timer = play.now + 3 * TICKS_STEP;
            break;
        case DP__DO_GIVE_UP:
            a->timer = -1;
            break;
        }
    }
}

/* Returns true if all of its roster are alive, and are where it is. */
static bool is_together(int p)
{
    dp__members *m = member(p);
    for (int seat = 0; seat < seat_count(); seat++) {
        uint64_t holder = dp__roster_of(m)[seat].holder;
        if (holder == 0)
            continue;
        dp__members *other = member((int)holder - 1);
        if (!play.of[holder - 1].alive || other->number != m->number ||
            (other->role != DP__ROLE_RUNS && other->role != DP__ROLE_MEETS))
            return false;
    }
    return true;
}

/* A process that wakes up looks at the word of its machine first. */
static bool looks_at_word(int p)
{
    int machine = now->machine[p];
    if (machine < 0 || member(p)->number == 0 || member(p)->role == DP__ROLE_LEFT ||
        play.words.word_number[machine] <= member(p)->number)
        return false;
    dp__members_event event = {.kind = DP__ON_CLAIMED};
    event.vote.number = play.words.word_number[machine];
    event.vote.places = lists[play.words.word_list[machine]];
    happen(p, event, -1);
    return true;
}

/* The dead do not knock any more. */
static void see_newcomers(int p)
{
    dp__seat list[SEATS] = {{0}};
    int count = 0;
    dp__members_event event = {.kind = DP__ON_KNOCKED};
    if (dp__newcomers_of(member(p))[0].holder == 0)
        return;
    for (int g = now->members; g < process_count(); g++)
        if (play.of[g].alive && member(g)->number == 0)
            list[count++] = place_of(g, 0);
    event.vote.places = list;
    happen(p, event, -1);
}

static void tick(int p)
{
    actor *a = &play.of[p];
    dp__members *m = member(p);
    bool due = a->timer >= 0 && a->timer <= play.now, together = is_together(p);
    if (!a->alive || m->role == DP__ROLE_LEFT || looks_at_word(p))
        return;
    if (m->role == DP__ROLE_MEETS && together) {
        a->timer = -1;
        happen(p, (dp__members_event){.kind = DP__ON_MET}, -1);
    } else if ((m->role == DP__ROLE_RUNS && !together) || (m->role == DP__ROLE_MEETS && due)) {
        happen(p, (dp__members_event){.kind = DP__ON_FAILED}, -1);
    } else if (due) {
        a->timer = play.now + TICKS_STEP;
        see_newcomers(p);
        happen(p, (dp__members_event){.kind = DP__ON_TIMER}, -1);
    }
}

static bool is_settled(void)
{
    for (int p = 0; p < process_count(); p++) {
        dp__members *m = member(p);
        bool outside = m->role == DP__ROLE_LEFT || m->number == 0;
        if (play.of[p].alive && !outside && (m->role != DP__ROLE_RUNS || !is_together(p)))
            return false;
    }
    return true;
}

static void deliver(void)
{
    while (play.first < play.last && play.queue[play.first % QUEUE].at <= play.now) {
        letter l = play.queue[play.first++ % QUEUE];
        l.vote.places = l.list >= 0 ? lists[l.list] : NULL;
        happen(l.to, (dp__members_event){.kind = DP__ON_VOTE, .vote = l.vote}, l.from);
    }
}

static bool becomes_a_job(const state *s, unsigned alive)
{
    memset(&play, 0, sizeof play);
    play.words = *s;
    for (int p = 0; p < process_count(); p++) {
        actor *a = &play.of[p];
        unpack(&s->of[p], p, member(p));
        a->alive = (alive >> p & 1) != 0;
        a->timer = s->of[p].role == DP__ROLE_RUNS ? -1 : (p + 1) * TICKS_STEP;
    }
    for (int p = 0; p < process_count(); p++)
        if (play.of[p].alive && member(p)->role == DP__ROLE_CLAIMS)
            claim_now(p);
    for (play.now = 0; play.now < TICKS_MOST && !is_settled(); play.now++) {
        deliver();
        for (int p = 0; p < process_count(); p++)
            tick(p);
    }
    slowest = play.now > slowest ? play.now : slowest;
    return play.now < TICKS_MOST;
}

/* Returns true if the living can decide for this roster. */
static bool have_say(const dp__seat *places, unsigned alive)
{
    unsigned char marks[SEATS] = {0};
    bool some = false;
    for (int seat = 0; seat < seat_count(); seat++)
        if (places[seat].holder != 0 && (alive >> (places[seat].holder - 1) & 1) != 0)
            marks[seat] = some = 1;
    return dp__roster_memory(places, seat_count()) != 0
               ? some
               : dp__is_quorum(places, seat_count(), marks, 1);
}

/* The last roster that one of them knows, or finds in the word of its machine. */
static int latest_of(const state *s, unsigned alive)
{
    int latest = 0;
    for (int p = 0; p < process_count(); p++) {
        int own = s->of[p].number, machine = now->machine[p];
        if (machine >= 0 && own > 0 && s->word_number[machine] > own)
            own = s->word_number[machine];
        latest = (alive >> p & 1) != 0 && own > latest ? own : latest;
    }
    return latest;
}

/* Returns true if they can for that one, for each that one of them is still at, and for each that
   may follow. */
static bool have_all_say(const state *s, unsigned alive)
{
    int latest = latest_of(s, alive);
    if (latest == 0 || !have_say(lists[s->decided[latest]], alive))
        return false;
    static dp__members *m;
    m = m != NULL ? m : new_room();
    for (int p = 0; p < process_count(); p++) {
        unpack(&s->of[p], p, m);
        if (m->number == 0 || m->role == DP__ROLE_LEFT || (alive >> p & 1) == 0)
            continue;
        if (!have_say(dp__roster_of(m), alive))
            return false;
        if (m->number != (uint64_t)latest)
            continue;
        if (m->accepted != 0 && !have_say(dp__accepted_of(m), alive))
            return false;
        if (m->role == DP__ROLE_PREPARES && m->best == 0)
            dp__propose_new(m);
        if ((m->role == DP__ROLE_PREPARES || m->role == DP__ROLE_PROPOSES ||
             m->role == DP__ROLE_CLAIMS) &&
            !have_say(dp__proposed_of(m), alive))
            return false;
    }
    return true;
}

static unsigned left_alone; /* those that did not become a job */

/* From a share of the states, by their hash. */
static bool settle_some(const state *s)
{
    if (hash_of(s) / 7 % SHARE_SETTLED != 0)
        return true;
    settled++;
    for (unsigned alive = 1; alive < 1u << process_count(); alive++)
        if (have_all_say(s, alive) && !becomes_a_job(s, alive)) {
            left_alone = alive;
            return false;
        }
    return true;
}

static void tell_settled(const state *s)
{
    printf("#   (d) these are left alone, and are no job after %d steps of time:",
           TICKS_MOST / TICKS_STEP);
    (void)becomes_a_job(s, left_alone);
    for (int p = 0; p < process_count(); p++)
        if (play.of[p].alive)
            printf(" %c %s, number %d", 'A' + p, roles[member(p)->role], (int)member(p)->number);
    printf("\n");
}
