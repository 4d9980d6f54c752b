/* core/explain.h - why memory is short: what holds it, and with what less is needed

   A part of fsdp.h. SPDX-License-Identifier: MIT (full text at the end of fsdp.h) */
#ifndef FSDP_H
#include "../fsdp.h"
#endif
#ifndef FSDPI_CORE_EXPLAIN_H
#define FSDPI_CORE_EXPLAIN_H

#include "model.h"
#include "objects.h"
#include "os.h"
#include "predict.h"

#include <string.h>

// Owns: the text about memory in errors of allocation. Its numbers are those of predictions, in
// which one thing is otherwise. It stands on the parts that allocate, so a model has its address.

// Bytes of the model itself on the device, without those of extensions.
static int64_t fsdpi_on_device(const fsdp_model *m) {
    int64_t bytes = 0;
    for (int pool = m->desc.cpu_offload ? FSDP_POOL_GATHER : 0; pool < FSDP_POOL_COUNT; pool++)
        bytes += m->pool_bytes[pool];
    return bytes;
}

// What it needs with a change; INT64_MAX: that cannot be predicted.
static int64_t fsdpi_need(const fsdp_model *m, const fsdpi_change *change) {
    fsdp_model *dry = NULL;
    int64_t bytes = fsdpi_dry_run(m, change, &dry) ? INT64_MAX : fsdpi_on_device(dry);
    fsdpi_dry_free(dry);
    return bytes;
}

// A world of one rank does not know the backend of a larger one; some units ask for a divisor.
static int fsdpi_can_have_more_ranks(const fsdp_model *m) {
    int can = m->world->size > 1 && !m->mixed;
    for (int i = 0; i < m->num_units && can; i++) {
        can = !m->units[i]->desc.slices;
        for (int k = 0; k < m->units[i]->desc.num_params; k++)
            can &= !m->units[i]->params[k].num_strings;
    }
    return can;
}

// The least number of shards with which it needs at most so much, or twice as many as now.
static int fsdpi_enough_shards(const fsdp_model *m, int64_t most) {
    const int now = m->info.shard_mesh_size;
    int low = now, high = 2 * now;
    fsdpi_change change = FSDP_ZERO;
    for (change.shards = high; fsdpi_need(m, &change) > most; change.shards = high *= 2) {
        if (high >= 64 * now) return 2 * now;
        low = high;
    }
    while (high - low > 1) {
        change.shards = low + (high - low) / 2;
        *(fsdpi_need(m, &change) > most ? &low : &high) = change.shards;
    }
    return high;
}

typedef struct fsdpi_amounts { // of all numbers of a text
    double bytes;
    int digits;
    const char *unit;
} fsdpi_amounts;

static fsdpi_amounts fsdpi_amounts_of(int64_t bytes) {
    static const char *const units[] = {"bytes", "KiB", "MiB", "GiB", "TiB"};
    fsdpi_amounts s = {1, 0, units[0]};
    for (int i = 1; i < 5 && (double)bytes >= 1024 * s.bytes; i++)
        s.bytes *= 1024, s.digits = 2, s.unit = units[i];
    return s;
}

typedef struct fsdpi_advice { // "with 12 ranks in place of 8", and how much less it needs
    char what[80];
    int64_t less;
} fsdpi_advice;

static int fsdpi_advise(const fsdp_model *m, int64_t need, int64_t most, fsdpi_advice advice[3]) {
    const fsdp_unit *open = NULL;
    int count = 0, opens = 0;
    for (int i = 0; i < m->num_units; i++)
        if (m->units[i]->options.reshard_after_forward != FSDP_RESHARD_ALWAYS)
            open = m->units[i], opens++;
    for (int k = 0; k < 3; k++) {
        fsdpi_change change = FSDP_ZERO;
        fsdpi_text t = {advice[count].what, sizeof advice[count].what, 0};
        change.reshards = k == 0, change.offloads = k == 1;
        if (k == 0 && open) fsdpi_say(&t, "with reshard_after_forward");
        if (k == 0 && opens == 1) fsdpi_say(&t, " on '%.32s'", open->desc.name);
        if (k == 1 && !fsdpi_is_host(m->world) && !m->desc.cpu_offload)
            fsdpi_say(&t, "with cpu_offload");
        if (k == 2 && fsdpi_can_have_more_ranks(m)) {
            const int replicas = m->info.replicate_mesh_size;
            change.shards = fsdpi_enough_shards(m, most);
            fsdpi_say(&t, "with %d ranks in place of %d", change.shards * replicas,
                      m->info.shard_mesh_size * replicas);
        }
        advice[count].less = t.used ? need - fsdpi_need(m, &change) : 0;
        count += advice[count].less > 0;
    }
    return count;
}

/* What the model needs, what it has, and with what it would need less. extra: bytes that somebody
   else wants. What the model has it can have again: so a change is sure to fit if that is enough. */
static void fsdpi_explain(const fsdp_model *m, int64_t extra, fsdpi_text *t) {
    const fsdpi_change none = FSDP_ZERO;
    const int64_t held = fsdpi_on_device(m);
    fsdpi_advice advice[3];
    fsdp_model *dry = NULL;
    const fsdp_status status = fsdpi_dry_run(m, &none, &dry);
    const int64_t need = status ? 0 : fsdpi_on_device(dry);
    const fsdpi_amounts s = fsdpi_amounts_of(need);
    if (!status)
        fsdpi_say(t, ": the model needs %.*f %s", s.digits, (double)need / s.bytes, s.unit);
    for (int pool = 0, said = 0; pool < FSDP_POOL_SCRATCH && !status; pool++)
        if (dry->pool_bytes[pool])
            fsdpi_say(t, "%s%s %.*f", said++ ? ", " : " (", fsdp_pool_name(pool), s.digits,
                      (double)dry->pool_bytes[pool] / s.bytes);
    fsdpi_dry_free(dry);
    if (status) return;
    fsdpi_say(t, ") and has %.*f", s.digits, (double)held / s.bytes);
    const int count = fsdpi_advise(m, need, held - extra, advice);
    for (int fits = 1; fits >= 0; fits--)
        for (int k = 0, said = 0; k < count; k++)
            if ((advice[k].less >= need - held + extra) == fits)
                fsdpi_say(t, "%s%s (-%.*f)",
                          said++ ? ", "
                          : fits ? ". It would fit "
                                 : ". It needs less ",
                          advice[k].what, s.digits, (double)advice[k].less / s.bytes);
}

FSDP_API fsdp_status fsdp_model_create(fsdp_world *world, const fsdp_model_desc *desc,
                                       fsdp_model **model) {
    fsdp_status status = fsdpi_model_create(world, desc, model);
    if (!status) (*model)->explain = fsdpi_explain;
    return status;
}

#endif // FSDPI_CORE_EXPLAIN_H
