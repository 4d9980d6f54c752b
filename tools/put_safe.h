/* put_safe.h - untrusted text, such as names in files, as the tools print it

   SPDX-License-Identifier: MIT */
#ifndef FSDP_TOOLS_PUT_SAFE_H
#define FSDP_TOOLS_PUT_SAFE_H

#include <stdio.h>

// Prints a text from outside. It cannot move the cursor, or look like another text.
static void put_safe(FILE *to, const char *text) {
    for (const unsigned char *c = (const unsigned char *)text; *c; c++) {
        if (*c == '\\') fputs("\\\\", to);
        else if (*c >= 0x20 && *c < 0x7f) fputc(*c, to);
        else fprintf(to, "\\x%02x", *c);
    }
}

#endif // FSDP_TOOLS_PUT_SAFE_H
