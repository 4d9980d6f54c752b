/* optim/adamw_sgd.h - AdamW and SGD of a model

   The settings of AdamW and SGD, and the scalars of their updates.
   State: fsdp_adamw and fsdp_sgd.
   Callers: programs and muon.h (fsdpi_optim_no_groups).

   A part of fsdp_optim.h. SPDX-License-Identifier: MIT (full text at the end of fsdp.h) */
#ifndef FSDP_OPTIM_H
#include "../../fsdp_optim.h"
#endif
#ifndef FSDPI_OPTIM_ADAMW_SGD_H
#define FSDPI_OPTIM_ADAMW_SGD_H

#include "kernels.h"
#include "states.h"

#include <string.h>

struct fsdp_adamw {
    fsdpi_optim base;
    fsdp_adamw_hyper hyper;
    fsdpi_adamw_scalars scalars[FSDP_OPTIM_GROUPS]; // for update number scalars_step[group]
    int64_t scalars_step[FSDP_OPTIM_GROUPS];
};

struct fsdp_sgd {
    fsdpi_optim base;
    fsdp_sgd_hyper hyper;
};

// Fills in an update of AdamW. Computes a group's scalars again if its t or the step's lr has
// changed.
static void fsdpi_adamw_fill(fsdpi_optim *o, const fsdpi_optim_span *run, double lr,
                             fsdp_update *u) {
    fsdp_adamw *opt = (fsdp_adamw *)(void *)o;
    int group = run->first->group;
    if (opt->scalars_step[group] != run->step) {
        opt->hyper.lr = lr;
        opt->hyper.weight_decay = o->groups[group].weight_decay;
        opt->hyper.step = run->step;
        opt->scalars[group] = fsdpi_adamw_prepare(&opt->hyper);
        opt->scalars_step[group] = run->step;
    }
    u->kind = FSDP_UPDATE_ADAMW;
    memcpy(u->scalars, &opt->scalars[group], sizeof opt->scalars[group]);
}

static void fsdpi_optim_no_groups(fsdp_optim_group *groups) {
    for (int i = 0; i < FSDP_OPTIM_GROUPS; i++) {
        groups[i].lr_scale = 1, groups[i].weight_decay = FSDP_OPTIM_SAME;
        groups[i].magic = FSDPI_OPTIM_MAGIC;
    }
}

FSDP_API fsdp_adamw_desc fsdp_adamw_defaults(void) {
    fsdp_adamw_desc d = FSDP_ZERO;
    d.beta1 = 0.9, d.beta2 = 0.999, d.eps = 1e-8, d.weight_decay = 0.01;
    d.magic = FSDPI_OPTIM_MAGIC;
    fsdpi_optim_no_groups(d.groups);
    return d;
}

FSDP_API fsdp_status fsdp_adamw_create(fsdp_model *model, const fsdp_adamw_desc *desc,
                                       fsdp_adamw **opt) {
    static const char *const name = "adamw_create";
    fsdp_adamw_desc d, defaults = fsdp_adamw_defaults();
    fsdp_adamw settings;
    fsdpi_optim *base = NULL;
    if (!model || !opt) return fsdpi_optim_null(model, name, "model or opt");
    *opt = NULL;
    fsdp_world *w = fsdp_model_world(model);
    if (!desc) desc = &defaults;
    fsdp_status status = fsdp_desc_read(w, &d, desc, sizeof d, "fsdp_adamw_desc");
    memset(&settings, 0, sizeof settings);
    settings.base.name = name;
    settings.base.extension.name = "adamw";
    settings.base.state_names[0] = "exp_avg";
    settings.base.state_names[1] = "exp_avg_sq";
    settings.base.step_name = "step";
    settings.base.num_states = 2;
    settings.base.rounds = d.stochastic_rounding != 0;
    settings.base.seed = d.seed;
    if (!status) status = fsdpi_optim_begun(&settings.base, w, d.magic);
    const fsdpi_optim_range ranges[] = {
        {"desc.beta1", d.beta1, 0, 1},
        {"desc.beta2", d.beta2, 0, 1},
        {"desc.eps", d.eps, 0, FSDPI_OPTIM_FINITE},
        {"desc.weight_decay", d.weight_decay, 0, FSDPI_OPTIM_FINITE}};
    if (!status) status = fsdpi_optim_ranges(w, name, ranges, 4);
    if (!status && !(d.beta2 > 0) && !(d.eps > 0)) // a zero gradient would give 0 / 0
        status = fsdp_fail(w, FSDP_ERR_INVALID_ARG,
                           "[E938] %s: desc.beta2 and desc.eps are both 0: give one of them", name);
    if (!status)
        status = fsdpi_optim_groups(&settings.base, w, d.num_groups, d.groups, d.weight_decay);
    if (!status)
        status = fsdpi_optim_create(model, &settings.base, (int64_t)sizeof settings, d.group,
                                    d.user, &base);
    if (status) return status;
    *opt = (fsdp_adamw *)(void *)base;
    (*opt)->hyper.beta1 = d.beta1;
    (*opt)->hyper.beta2 = d.beta2;
    (*opt)->hyper.eps = d.eps;
    const double given[] = {d.beta1, d.beta2, d.eps};
    status = fsdpi_optim_agree(base, given, sizeof given);
    if (status) fsdp_adamw_destroy(*opt), *opt = NULL;
    return status;
}

FSDP_API fsdp_status fsdp_adamw_step(fsdp_adamw *opt, double lr) {
    if (!opt) return fsdpi_optim_null(NULL, "adamw_step", "the optimizer");
    memset(opt->scalars_step, 0, sizeof opt->scalars_step);
    return fsdpi_optim_step(&opt->base, lr, "adamw_step", fsdpi_adamw_fill);
}

FSDP_API fsdp_status fsdp_adamw_set_group(fsdp_adamw *opt, int k, const fsdp_optim_group *group) {
    return fsdpi_optim_set_group(opt ? &opt->base : NULL, "adamw_set_group", k, group);
}

FSDP_API void fsdp_adamw_destroy(fsdp_adamw *opt) { fsdpi_optim_destroy(opt ? &opt->base : NULL); }

FSDP_API fsdp_status fsdp_adamw_state(fsdp_adamw *opt, int ordinal, fsdp_optim_state *out) {
    return fsdpi_optim_state(opt ? &opt->base : NULL, ordinal, "adamw_state", out);
}

FSDP_API int64_t fsdp_adamw_nbytes(const fsdp_adamw *opt) {
    return opt ? fsdpi_optim_nbytes(&opt->base) : 0;
}

// Fills in an update of SGD.
static void fsdpi_sgd_fill(fsdpi_optim *o, const fsdpi_optim_span *run, double lr, fsdp_update *u) {
    fsdp_sgd_hyper hyper = ((fsdp_sgd *)(void *)o)->hyper;
    hyper.lr = lr;
    hyper.weight_decay = o->groups[run->first->group].weight_decay;
    hyper.step = run->step;
    fsdpi_sgd_scalars k = fsdpi_sgd_prepare(&hyper);
    u->kind = FSDP_UPDATE_SGD;
    memcpy(u->scalars, &k, sizeof k);
}

FSDP_API fsdp_sgd_desc fsdp_sgd_defaults(void) {
    fsdp_sgd_desc d = FSDP_ZERO;
    d.magic = FSDPI_OPTIM_MAGIC;
    fsdpi_optim_no_groups(d.groups);
    return d;
}

FSDP_API fsdp_status fsdp_sgd_create(fsdp_model *model, const fsdp_sgd_desc *desc, fsdp_sgd **opt) {
    static const char *const name = "sgd_create";
    fsdp_sgd_desc d, defaults = fsdp_sgd_defaults();
    fsdp_sgd settings;
    fsdpi_optim *base = NULL;
    if (!model || !opt) return fsdpi_optim_null(model, name, "model or opt");
    *opt = NULL;
    fsdp_world *w = fsdp_model_world(model);
    if (!desc) desc = &defaults;
    fsdp_status status = fsdp_desc_read(w, &d, desc, sizeof d, "fsdp_sgd_desc");
    memset(&settings, 0, sizeof settings);
    settings.base.name = name;
    settings.base.extension.name = "sgd";
    settings.base.state_names[0] = "momentum_buffer";
    settings.base.step_name = "step";
    if (!status) status = fsdpi_optim_begun(&settings.base, w, d.magic);
    const fsdpi_optim_range ranges[] = {
        {"desc.momentum", d.momentum, 0, FSDPI_OPTIM_FINITE},
        {"desc.dampening", d.dampening, 0, FSDPI_OPTIM_FINITE},
        {"desc.weight_decay", d.weight_decay, 0, FSDPI_OPTIM_FINITE}};
    if (!status) status = fsdpi_optim_ranges(w, name, ranges, 3);
    if (!status && d.nesterov && !(d.momentum > 0 && d.dampening == 0))
        status = fsdp_fail(
            w, FSDP_ERR_INVALID_ARG,
            "[E941] %s: desc.nesterov needs momentum > 0 and dampening 0, got %g and %g", name,
            d.momentum, d.dampening);
    if (!status)
        status = fsdpi_optim_groups(&settings.base, w, d.num_groups, d.groups, d.weight_decay);
    settings.base.num_states = d.momentum > 0;
    settings.base.rounds = d.stochastic_rounding != 0;
    settings.base.seed = d.seed;
    if (!status)
        status = fsdpi_optim_create(model, &settings.base, (int64_t)sizeof settings, d.group,
                                    d.user, &base);
    if (status) return status;
    *opt = (fsdp_sgd *)(void *)base;
    (*opt)->hyper.momentum = d.momentum;
    (*opt)->hyper.dampening = d.dampening;
    (*opt)->hyper.nesterov = d.nesterov;
    const double given[] = {d.momentum, d.dampening, d.nesterov ? 1.0 : 0.0};
    status = fsdpi_optim_agree(base, given, sizeof given);
    if (status) fsdp_sgd_destroy(*opt), *opt = NULL;
    return status;
}

FSDP_API fsdp_status fsdp_sgd_step(fsdp_sgd *opt, double lr) {
    if (!opt) return fsdpi_optim_null(NULL, "sgd_step", "the optimizer");
    return fsdpi_optim_step(&opt->base, lr, "sgd_step", fsdpi_sgd_fill);
}

FSDP_API fsdp_status fsdp_sgd_set_group(fsdp_sgd *opt, int k, const fsdp_optim_group *group) {
    return fsdpi_optim_set_group(opt ? &opt->base : NULL, "sgd_set_group", k, group);
}

FSDP_API void fsdp_sgd_destroy(fsdp_sgd *opt) { fsdpi_optim_destroy(opt ? &opt->base : NULL); }

FSDP_API fsdp_status fsdp_sgd_state(fsdp_sgd *opt, int ordinal, fsdp_optim_state *out) {
    return fsdpi_optim_state(opt ? &opt->base : NULL, ordinal, "sgd_state", out);
}

FSDP_API int64_t fsdp_sgd_nbytes(const fsdp_sgd *opt) {
    return opt ? fsdpi_optim_nbytes(&opt->base) : 0;
}

#endif // FSDPI_OPTIM_ADAMW_SGD_H
