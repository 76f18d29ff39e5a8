/* sim_world.c - where the simulated NCCL's ranks meet: see world.h. */

#include <fcntl.h>
#include <math.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>
#include "nccl.h"
#include "world.h"

/* ---- numbers --------------------------------------------------------------------------------- */

size_t world_bytes(int dtype)
{
    static const size_t bytes[] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2};
    return bytes[dtype];
}

bool world_is_real(int dtype)
{
    return dtype >= ncclFloat16;
}

/* To so many significant bits, and no finer than 2 to the `lowest`; ties to even. */
static double rounded(double x, int bits, int lowest, double most)
{
    int exponent;
    if (x == 0 || !isfinite(x))
        return x;
    (void)frexp(x, &exponent);
    int step = exponent - bits > lowest ? exponent - bits : lowest;
    double result = ldexp(rint(ldexp(x, -step)), step);
    return fabs(result) > most ? copysign((double)INFINITY, x) : result;
}

static double fitted(int dtype, double x)
{
    return dtype == ncclFloat16    ? rounded(x, 11, -24, 65504)
           : dtype == ncclBfloat16 ? rounded(x, 8, -133, 0x1.fep127)
           : dtype == ncclFloat32  ? (double)(float)x
                                   : x;
}

static double half_load(uint16_t bits)
{
    double sign = bits >> 15 ? -1 : 1, fraction = bits & 0x3ff;
    int exponent = bits >> 10 & 0x1f;
    if (exponent == 0x1f)
        return fraction != 0 ? (double)NAN : sign * (double)INFINITY;
    return sign * (exponent == 0 ? ldexp(fraction, -24) : ldexp(1024 + fraction, exponent - 25));
}

static uint16_t half_store(double x)
{
    int exponent;
    unsigned sign = signbit(x) ? 0x8000 : 0;
    x = fabs(x);
    if (isnan(x))
        return 0x7fff;
    if (isinf(x))
        return (uint16_t)(sign | 0x7c00);
    if (x < 0x1p-14)
        return (uint16_t)(sign | (unsigned)ldexp(x, 24));
    double fraction = frexp(x, &exponent); /* from 0.5 */
    return (uint16_t)(sign | ((unsigned)(exponent + 14) << 10) |
                      ((unsigned)ldexp(fraction, 11) & 0x3ff));
}

static double bfloat_load(uint16_t bits)
{
    uint32_t wide = (uint32_t)bits << 16;
    float x;
    memcpy(&x, &wide, sizeof x);
    return (double)x;
}

static uint16_t bfloat_store(double x)
{
    float narrow = (float)x;
    uint32_t bits;
    memcpy(&bits, &narrow, sizeof bits);
    return (uint16_t)(isnan(x) ? 0x7fff : bits >> 16);
}

static world_number load_whole(int dtype, const char *at)
{
    uint64_t whole = 0;
    size_t bytes = world_bytes(dtype);
    memcpy(&whole, at, bytes); /* the lowest byte is first */
    bool has_sign = dtype == ncclInt8 || dtype == ncclInt32;
    if (has_sign && (whole >> (8 * bytes - 1)) != 0)
        whole |= ~(uint64_t)0 << (8 * bytes);
    return (world_number){.whole = whole};
}

world_number world_load(int dtype, const char *at)
{
    uint16_t half;
    float single;
    double real;
    if (!world_is_real(dtype))
        return load_whole(dtype, at);
    memcpy(&half, at, sizeof half);
    if (dtype == ncclFloat16)
        return (world_number){.real = half_load(half)};
    if (dtype == ncclBfloat16)
        return (world_number){.real = bfloat_load(half)};
    if (dtype == ncclFloat32) {
        memcpy(&single, at, sizeof single);
        return (world_number){.real = (double)single};
    }
    memcpy(&real, at, sizeof real);
    return (world_number){.real = real};
}

void world_store(int dtype, char *at, world_number number)
{
    float single = world_is_real(dtype) ? (float)number.real : 0;
    uint16_t half = dtype == ncclFloat16    ? half_store(number.real)
                    : dtype == ncclBfloat16 ? bfloat_store(number.real)
                                            : 0;
    const void *from = dtype == ncclFloat16 || dtype == ncclBfloat16 ? (const void *)&half
                       : dtype == ncclFloat32                        ? (const void *)&single
                                                                     : (const void *)&number;
    memcpy(at, from, world_bytes(dtype));
}

static bool is_less(int dtype, world_number a, world_number b)
{
    if (world_is_real(dtype))
        return a.real < b.real;
    bool has_sign = dtype == ncclInt8 || dtype == ncclInt32 || dtype == ncclInt64;
    return has_sign ? (int64_t)a.whole < (int64_t)b.whole : a.whole < b.whole;
}

world_number world_add(int dtype, int op, world_number a, world_number b)
{
    if (op == ncclMin || op == ncclMax)
        return is_less(dtype, a, b) == (op == ncclMin) ? a : b;
    if (!world_is_real(dtype))
        return (world_number){.whole = op == ncclProd ? a.whole * b.whole : a.whole + b.whole};
    double exact = op == ncclProd ? a.real * b.real : a.real + b.real;
    return (world_number){.real = fitted(dtype, exact)};
}

/* ---- meetings -------------------------------------------------------------------------------- */

static world *worlds;

static uint64_t mixed(uint64_t x)
{
    x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9u;
    x = (x ^ x >> 27) * 0x94d049bb133111ebu;
    return x ^ x >> 31;
}

static uint64_t new_key(void)
{
    static uint64_t count;
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    return mixed((uint64_t)now.tv_nsec ^ (uint64_t)now.tv_sec << 32 ^ (uint64_t)getpid() << 16) +
           ++count;
}

static world_meeting *map_meeting(int file)
{
    void *at = mmap(NULL, sizeof(world_meeting), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    return at != MAP_FAILED ? at : NULL;
}

bool world_make(char *id)
{
    int file = memfd_create("sim nccl", MFD_CLOEXEC);
    world_meeting *meeting = file >= 0 && ftruncate(file, sizeof *meeting) == 0 ? map_meeting(file)
                                                                                : NULL;
    if (meeting == NULL)
        return false;
    const char *seed = getenv("SIM_SEED");
    meeting->key = new_key();
    meeting->seed = seed != NULL ? strtoull(seed, NULL, 10) : 0;
    memset(id, 0, WORLD_ID_BYTES);
    snprintf(id, WORLD_ID_BYTES, "/proc/%d/fd/%d %llx", (int)getpid(), file,
             (unsigned long long)meeting->key);
    munmap(meeting, sizeof *meeting); /* the descriptor stays, for those who are still to come */
    return true;
}

static world *world_known(uint64_t key)
{
    world *own = worlds;
    while (own != NULL && own->meeting->key != key)
        own = own->next;
    return own;
}

world *world_open(const char *id)
{
    char path[64];
    unsigned long long key;
    int maker, made;
    if (sscanf(id, "/proc/%d/fd/%d %llx", &maker, &made, &key) != 3)
        return NULL;
    world *own = world_known(key);
    if (own != NULL) {
        own->users++;
        return own;
    }
    snprintf(path, sizeof path, "/proc/%d/fd/%d", maker, made);
    int file = open(path, O_RDWR | O_CLOEXEC);
    world_meeting *meeting = file >= 0 ? map_meeting(file) : NULL;
    if (meeting == NULL || meeting->key != key) {
        if (file >= 0)
            close(file);
        return NULL;
    }
    own = malloc(sizeof *own);
    *own = (world){.meeting = meeting,
                   .file = file,
                   .users = 1,
                   .made = maker == getpid() ? made : -1,
                   .next = worlds};
    worlds = own;
    return own;
}

/* Those who come late find nothing, once all have been there. */
void world_close(world *own)
{
    world **link = &worlds;
    bool all = own->meeting->ranks > 0;
    if (--own->users > 0)
        return;
    while (*link != own)
        link = &(*link)->next;
    *link = own->next;
    for (int r = 0; r < own->meeting->ranks; r++)
        all = all && own->meeting->rank[r].joined;
    if (all && own->made >= 0)
        close(own->made);
    munmap(own->meeting, sizeof *own->meeting);
    close(own->file);
    free(own);
}

/* Each rank's process has locked a byte, until it ends. */
static struct flock lock_of(int rank)
{
    return (struct flock){.l_type = F_WRLCK, .l_whence = SEEK_SET, .l_start = rank, .l_len = 1};
}

bool world_has_ended(const world *own, int rank)
{
    const world_rank *other = &own->meeting->rank[rank];
    struct flock lock = lock_of(rank);
    return other->joined && other->process != getpid() && fcntl(own->file, F_GETLK, &lock) == 0 &&
           lock.l_type == F_UNLCK;
}

bool world_join(world *own, int rank, int ranks, int device, const char *host)
{
    world_rank *mine = &own->meeting->rank[rank];
    int none = 0;
    if (!atomic_compare_exchange_strong(&own->meeting->ranks, &none, ranks) && none != ranks)
        return false;
    if (atomic_exchange(&mine->claimed, true))
        return false;
    struct flock lock = lock_of(rank);
    (void)fcntl(own->file, F_SETLK, &lock);
    mine->device = device;
    mine->process = getpid();
    snprintf(mine->host, sizeof mine->host, "%s", host);
    mine->joined = true;
    return true;
}

/* ---- what is given, and taken ----------------------------------------------------------------

   Places in the file, far from each other: it has pages only where something was written. Of each
   rank two collectives, of each pair a letter.                                                   */

enum { PIECE = 1 << 16, NUMBERS = 512 };

static off_t place_of_rank(int rank, uint64_t number)
{
    return (off_t)(1 + 2 * (uint64_t)rank + number % 2) << 40;
}

static off_t place_of_letter(int from, int to)
{
    return ((off_t)1 << 50) + ((off_t)(from * WORLD_RANKS + to) << 38);
}

static void put(const world *own, off_t at, const char *data, size_t bytes)
{
    for (size_t done = 0; done < bytes;) {
        size_t piece = bytes - done < PIECE ? bytes - done : PIECE;
        ssize_t put_now = pwrite(own->file, data + done, piece, at + (off_t)done);
        if (put_now <= 0)
            abort();
        done += (size_t)put_now;
    }
}

static void get(const world *own, off_t at, char *out, size_t bytes)
{
    for (size_t done = 0; done < bytes;) {
        size_t piece = bytes - done < PIECE ? bytes - done : PIECE;
        ssize_t got = pread(own->file, out + done, piece, at + (off_t)done);
        if (got <= 0) { /* it was given what is not there any more */
            memset(out + done, 0xff, bytes - done);
            return;
        }
        done += (size_t)got;
    }
}

void world_give(world *own, int rank, const world_call *call, const char *data, size_t bytes)
{
    world_rank *mine = &own->meeting->rank[rank];
    uint64_t number = mine->given;
    put(own, place_of_rank(rank, number), data, bytes);
    mine->calls[number % 2] = *call;
    mine->given = number + 1;
}

bool world_is_given(const world *own, uint64_t number)
{
    bool all = true;
    for (int r = 0; r < own->meeting->ranks; r++)
        all = all && own->meeting->rank[r].given > number;
    return all;
}

static bool same_call(const world_call *a, const world_call *b)
{
    return a->verb == b->verb && a->dtype == b->dtype && a->op == b->op && a->root == b->root &&
           a->count == b->count;
}

int world_unlike(const world *own, int rank, uint64_t number)
{
    const world_rank *ranks = own->meeting->rank;
    for (int r = 0; r < own->meeting->ranks; r++)
        if (ranks[r].given > number && ranks[rank].given > number &&
            !same_call(&ranks[r].calls[number % 2], &ranks[rank].calls[number % 2]))
            return r;
    return -1;
}

/* The order in which ranks are added, for a piece of a collective. */
static void shuffle(const world *own, uint64_t number, size_t piece, int *out)
{
    uint64_t random = mixed(own->meeting->seed + mixed(number + mixed(piece)));
    for (int r = 0; r < own->meeting->ranks; r++) {
        uint64_t place = random % (uint64_t)(r + 1);
        out[r] = out[place];
        out[place] = r;
        random = mixed(random);
    }
}

/* `count` numbers from the `first` one on, of all ranks together. */
static void reduce_piece(const world *own, uint64_t number, const world_call *call, size_t first,
                         size_t count, char *out)
{
    static char piece[NUMBERS * sizeof(world_number)];
    static world_number sums[NUMBERS];
    int order[WORLD_RANKS], dtype = call->dtype;
    size_t bytes = world_bytes(dtype), of_ranks = (size_t)own->meeting->ranks;
    shuffle(own, number, first, order);
    for (int r = 0; r < own->meeting->ranks; r++) {
        get(own, place_of_rank(order[r], number) + (off_t)(first * bytes), piece, count * bytes);
        for (size_t i = 0; i < count; i++) {
            world_number one = world_load(dtype, piece + i * bytes);
            sums[i] = r == 0 ? one : world_add(dtype, call->op, sums[i], one);
        }
    }
    for (size_t i = 0; i < count; i++) {
        world_store(dtype, out + i * bytes, sums[i]);
        if (call->op == ncclAvg && !world_is_real(dtype)) { /* of what fits into the type */
            world_number sum = world_load(dtype, out + i * bytes);
            bool has_sign = dtype == ncclInt8 || dtype == ncclInt32 || dtype == ncclInt64;
            sum.whole = has_sign ? (uint64_t)((int64_t)sum.whole / (int64_t)of_ranks)
                                 : sum.whole / of_ranks;
            world_store(dtype, out + i * bytes, sum);
        }
    }
}

static void reduce(const world *own, uint64_t number, const world_call *call, size_t first,
                   char *out)
{
    for (size_t done = 0; done < call->count; done += NUMBERS) {
        size_t count = call->count - done < NUMBERS ? call->count - done : NUMBERS;
        reduce_piece(own, number, call, first + done, count, out + done * world_bytes(call->dtype));
    }
}

void world_take(world *own, int rank, uint64_t number, char *out)
{
    const world_call call = own->meeting->rank[rank].calls[number % 2];
    size_t bytes = call.count * world_bytes(call.dtype);
    if (call.verb == WORLD_ALL_REDUCE)
        reduce(own, number, &call, 0, out);
    else if (call.verb == WORLD_REDUCE_SCATTER)
        reduce(own, number, &call, (size_t)rank * call.count, out);
    else if (call.verb == WORLD_BROADCAST)
        get(own, place_of_rank(call.root, number), out, bytes);
    for (int r = 0; r < own->meeting->ranks && call.verb == WORLD_ALL_GATHER; r++)
        get(own, place_of_rank(r, number), out + (size_t)r * bytes, bytes);
}

bool world_can_send(const world *own, int from, int to)
{
    const world_letter *letter = &own->meeting->letters[from][to];
    return letter->taken == letter->sent;
}

uint64_t world_send(world *own, int from, int to, const world_call *call, const char *data,
                    size_t bytes)
{
    world_letter *letter = &own->meeting->letters[from][to];
    put(own, place_of_letter(from, to), data, bytes);
    letter->call = *call;
    return ++letter->sent;
}

bool world_can_receive(const world *own, int from, int to)
{
    return !world_can_send(own, from, to);
}

void world_receive(world *own, int from, int to, char *out, size_t bytes)
{
    world_letter *letter = &own->meeting->letters[from][to];
    get(own, place_of_letter(from, to), out, bytes);
    letter->taken = letter->sent;
}
