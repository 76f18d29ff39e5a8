/* refusal.h - calls of the system that fail, or that something happens at, when a test wants it. */

#ifndef REFUSAL_H
#define REFUSAL_H

/* The call that is named fails, at its n-th time from now on: fsync, ftruncate, flock, lstat, open,
   recv, rename, send, stat, unlink, write. With `hook` it does not fail, and that is called before
   it. The thread that calls it has this struct until it has ended. (All calls are in
   test_save.c.) */
extern struct refusal {
    const char *call;
    int at, error;
    void (*hook)(void);
} refusal;

#endif /* REFUSAL_H */
