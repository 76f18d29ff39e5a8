/* refusal.h - calls of the system that fail, or that something happens at, when a test wants it. */

#ifndef REFUSAL_H
#define REFUSAL_H

/* A call, which fails at its n-th time: fsync, ftruncate, flock, lstat, open, recv, rename, send,
   stat, unlink, write. With `hook` it does not fail, and that is called before it. (All calls are
   in test_save.c.) */
struct refusal {
    const char *call; /* NULL: none */
    int at, error;
    void (*hook)(void);
};

/* Counts from now on, in place of what was counted before. The process may have threads of dp.h
   that call the system meanwhile. */
void refuse(struct refusal next);

/* Returns whether its time is still to come. */
bool refuses_later(void);

#endif /* REFUSAL_H */
