/* dp/basics.h - v0.2.0 - statuses, sentences and dtypes - MIT licence

   Part of dp.h, which includes it. What the system and the table of the host need, too. Nothing
   here calls anything else of dp.h.

   CONTENTS (search for the tag)
     >>statuses  what they are called
     >>sentences why the last call of this thread has failed
     >>dtypes    what they are called, and their sizes
*/

#ifndef DP__ROOMS
#error "dp/basics.h is a part of dp.h: include dp.h"
#else

#include <stdarg.h>
#include <stdio.h>
#include <string.h>

/* ==== >>statuses ===============================================================================
   From the list in dp.h.                                                                        */

DP_API int dp_version(void)
{
    return DP_VERSION;
}

/* clang-format off */
#define DP__STATUS_NAME(name, value, class_, text) case name: return #name;
#define DP__STATUS_TEXT(name, value, class_, text) case name: return text;
#define DP__STATUS_CLASS(name, value, class_, text) case name: return DP_CLASS_##class_;
/* clang-format on */

DP_API const char *dp_status_name(dp_status status)
{
    switch (status) {
        DP_STATUS_LIST(DP__STATUS_NAME)
    }
    return "unknown status";
}

DP_API const char *dp_status_text(dp_status status)
{
    switch (status) {
        DP_STATUS_LIST(DP__STATUS_TEXT)
    }
    return "unknown status";
}

DP_API dp_class dp_status_class(dp_status status)
{
    switch (status) {
        DP_STATUS_LIST(DP__STATUS_CLASS)
    }
    return DP_CLASS_JOB; /* a number that no table should return: nothing can be trusted any more */
}

/* ==== >>sentences ==============================================================================
   Each thread has one, and with it what a call notes on its way.                                */

enum { DP__TEXT_BYTES = 512 };

static _Thread_local struct {
    char text[DP__TEXT_BYTES];
    dp_status status;               /* that the sentence came with */
    bool fresh;                     /* the sentence is of the public call that is under way */
    dp_status scope_status;         /* why the last dp_scope_begin or dp_scope_child gave NULL */
    const struct dp__frame *frames; /* the innermost of the user's functions; see dp/core.h */
    struct dp__lane *lane;          /* that it serves, also as a worker; NULL: the caller's own */
    bool beside;                    /* a courier: the caller computes while it waits */
    bool absent;                    /* a watchdog: no thread of its process waits for others */
    int number;                     /* the system's, of this thread; 0: it was not asked */
    unsigned fork_count;            /* when it was */
    bool replays;                   /* in a method that runs once more: see >>replay */
    int culprit; /* where the failure that is on its way is known to come from: a rank + 1; or 0 */
} dp__of_thread;

DP_API const char *dp_last_error(void)
{
    return dp__of_thread.text;
}

DP_API dp_status dp_error(dp_status status, const char *format, ...)
{
    char text[DP__TEXT_BYTES]; /* the arguments may point into the old sentence */
    va_list args;
    va_start(args, format);
    vsnprintf(text, sizeof text, format != NULL ? format : "(no text)", args);
    va_end(args);
    memcpy(dp__of_thread.text, text, sizeof text);
    dp__of_thread.status = status;
    dp__of_thread.fresh = true;
    return status;
}

/* ==== >>dtypes =================================================================================
   From the list in dp.h.                                                                        */

#define DP__DTYPE_NAME(name, text, bytes)  text,
#define DP__DTYPE_BYTES(name, text, bytes) bytes,
static const char *const dp__dtype_names[] = {DP_DTYPE_LIST(DP__DTYPE_NAME)};
static const uint8_t dp__dtype_sizes[] = {DP_DTYPE_LIST(DP__DTYPE_BYTES)};

DP_API const char *dp_dtype_name(dp_dtype dtype)
{
    return (unsigned)dtype < DP_DTYPE_COUNT ? dp__dtype_names[dtype] : "no dtype";
}

DP_API size_t dp_dtype_bytes(dp_dtype dtype)
{
    return (unsigned)dtype < DP_DTYPE_COUNT ? dp__dtype_sizes[dtype] : 0;
}

#endif /* DP__ROOMS */

/* The licence is at the end of dp.h. */
