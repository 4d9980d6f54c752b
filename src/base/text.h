/* base/text.h - texts that grow, and names that are cut to their room

   Callers: backends/fsdp_signature.h (fsdpi_text_add), backends/fsdp_comm.h (fsdpi_text_add),
     backends/fsdp_gloo.h (fsdpi_text_add) and others.

   A part of fsdp.h. SPDX-License-Identifier: MIT (full text at the end of fsdp.h) */
#ifndef FSDP_H
#include "../../fsdp.h"
#endif
#ifndef FSDPI_BASE_TEXT_H
#define FSDPI_BASE_TEXT_H

#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#define FSDPI_TEXT_OF(name, text) text, // an entry of a list of names

// A text that grows. As with snprintf, characters that do not fit are only counted.
typedef struct fsdpi_text {
    char *buf;
    size_t cap, used;
} fsdpi_text;

static FSDP_PRINTF(2, 3) void fsdpi_text_add(fsdpi_text *t, const char *format, ...) {
    size_t room = t->used < t->cap ? t->cap - t->used : 0;
    va_list args;
    va_start(args, format);
    int wanted = vsnprintf(room ? t->buf + t->used : NULL, room, format, args);
    va_end(args);
    if (wanted > 0) t->used += (size_t)wanted;
}

// Copies a name. If it is longer than its room, "..." replaces its middle: names of units often
// differ at their end.
static void fsdpi_cut(char *to, size_t cap, const char *name) {
    const size_t length = strlen(name), tail = (cap - 4) / 2;
    if (length < cap) memcpy(to, name, length + 1);
    else {
        memcpy(to, name, cap - 4 - tail);
        memcpy(to + cap - 4 - tail, "...", 3);
        memcpy(to + cap - 1 - tail, name + length - tail, tail + 1);
    }
}

#endif // FSDPI_BASE_TEXT_H
