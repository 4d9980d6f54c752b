/* core/env.h - the one reader of environment variables

   A part of fsdp.h, which includes it. A variable that is not set, or empty, says nothing; one that
   is set is right, or fsdp_init fails and names it.

   SPDX-License-Identifier: MIT (full text at the end of fsdp.h) */

// NULL: not set, or empty.
static const char *fsdpi_env(const char *name) {
    const char *text = name ? getenv(name) : NULL;
    return text && *text ? text : NULL;
}

// An integer from min to max, flags included: 0 or 1. *out stays as it is if the variable says
// nothing. After a failure *error has the text.
static fsdp_status fsdpi_env_int(const char *name, int min, int max, int *out, fsdpi_text *error) {
    const char *text = fsdpi_env(name);
    if (!text) return FSDP_OK;
    char *end;
    long value = strtol(text, &end, 10);
    if (!*end && value >= min && value <= max) {
        *out = (int)value;
        return FSDP_OK;
    }
    fsdpi_say(error, "[E509] variable %s is '%s', expected an integer from %d to %d", name, text,
              min, max);
    return FSDP_ERR_INVALID_ARG;
}

static fsdp_status fsdpi_world_env_int(fsdp_world *w, const char *name, int min, int max,
                                       int *out) {
    char text[FSDPI_TEXT];
    fsdpi_text error = {text, sizeof text, 0};
    fsdp_status status = fsdpi_env_int(name, min, max, out, &error);
    return status ? fsdp_fail(w, status, "%s", text) : FSDP_OK;
}
