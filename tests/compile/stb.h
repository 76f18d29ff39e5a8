/* stb.h - how a user includes stb_ds */

#define STBDS_REALLOC(context, data, bytes) counted_realloc(data, bytes)
#define STBDS_FREE(context, data)           counted_free(data)
#if __has_include("stb_ds.h")
#include "stb_ds.h"
#else
#include <stb/stb_ds.h>
#endif
