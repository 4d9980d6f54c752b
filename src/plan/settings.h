/* plan/settings.h - the options of a model as numbers: are they the same as before?

   Callers: api.h (fsdpi_plan_settings).

   A part of fsdp_plan.h. SPDX-License-Identifier: MIT (full text at the end of fsdp.h) */
#ifndef FSDP_PLAN_H
#include "../../fsdp_plan.h"
#endif
#ifndef FSDPI_PLAN_SETTINGS_H
#define FSDPI_PLAN_SETTINGS_H

#include "../base/hash.h"
#include "../base/macros.h"
#include "../base/os.h"
#include "../core/grad_path.h"
#include "../core/objects.h"
#include "../core/unit.h"
#include "memory.h"

// Returns a hash of the options `o` of a unit, and those of its parameters. Of a hook, only its
// presence counts.
static uint64_t fsdpi_plan_settings_of(const fsdp_unit *u, const fsdpi_options *o) {
    uint64_t h = fsdpi_hash(1, (uint64_t)u->desc.index);
#define FSDP_X(type, name, initial) fsdpi_mix(&h, fsdpi_plan_bits((double)o->name));
    FSDPI_OPTIONS(FSDP_X)
#undef FSDP_X
    for (int back = 0; back < 2; back++) {
        fsdpi_mix(&h, (uint64_t)o->num_prefetch[back]);
        for (int i = 0; i < o->num_prefetch[back]; i++)
            fsdpi_mix(&h, (uint64_t)o->prefetch[back][i]);
    }
    fsdpi_mix(&h, o->all_reduce_hook != NULL);
    for (int i = 0; i < FSDPI_CUSTOM_COUNT; i++) fsdpi_mix(&h, o->custom[i] != NULL);
    for (int i = 0; i < u->desc.num_params; i++) {
        const fsdpi_param *p = &u->params[i];
        int flags = p->requires_grad << 1 | (p->grad_hook != NULL);
        fsdpi_mix(&h, (uint64_t)p->dtype << 2 | (uint64_t)flags);
    }
    return h;
}

// Returns the sum of hashes over the options of a model and its units. The model keeps it until an
// option changes.
static FSDPI_NOINLINE uint64_t fsdpi_plan_add_settings(fsdp_model *m) {
    uint64_t bits = 0;
    int at = 0;
#define FSDP_X(name, initial) bits |= (uint64_t)m->options.name << at++;
    FSDPI_MODEL_OPTIONS(FSDP_X)
#undef FSDP_X
    uint64_t sum = fsdpi_hash(0, bits);
    for (int i = 0; i < m->num_units; i++)
        sum += fsdpi_plan_settings_of(m->units[i], &m->units[i]->options);
    return m->settings = sum;
}

// Returns a number that changes whenever an option does.
static inline uint64_t fsdpi_plan_settings(fsdp_model *m) {
    return m->settings ? m->settings : fsdpi_plan_add_settings(m);
}

/* Returns a hash of the settings, with two facts in place of each gradient divide factor, since
   a replay renews the factor: whether gradients are written into the shard gradient, and the
   first unit with an equal factor. */
static uint64_t fsdpi_plan_options(fsdp_model *m) {
    uint64_t kind = fsdpi_plan_settings(m);
    for (int i = 0; i < m->num_units; i++) {
        const fsdp_unit *u = m->units[i];
        const double factor = u->facts.divide_factor;
        fsdpi_options o = u->options;
        int like = 0;
        if (o.divide_factor == 0) continue;
        while (m->units[like]->facts.divide_factor != factor) like++;
        uint64_t split = (uint64_t)like << 1 | (uint64_t)fsdpi_facts_write_shard(&u->facts, 0);
        o.divide_factor = 0;
        kind -= fsdpi_plan_settings_of(u, &u->options);
        kind += fsdpi_hash(fsdpi_plan_settings_of(u, &o), split);
    }
    return kind;
}

#endif // FSDPI_PLAN_SETTINGS_H
