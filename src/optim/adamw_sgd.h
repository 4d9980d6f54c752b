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

typedef struct fsdpi_adamw_opt {
    fsdp_optim base;
    fsdp_adamw_hyper hypers;
    fsdpi_adamw_scalars scalars[FSDP_OPTIM_GROUPS]; // for update number scalars_step[group]
    int64_t scalars_step[FSDP_OPTIM_GROUPS];
} fsdpi_adamw_opt;

typedef struct fsdpi_sgd_opt {
    fsdp_optim base;
    fsdp_sgd_hyper hypers;
} fsdpi_sgd_opt;

// Fills in an update of AdamW. Computes a group's scalars again if its t or the step's lr has
// changed.
static void fsdpi_adamw_fill(fsdp_optim *o, const fsdpi_optim_span *run, double lr,
                             fsdp_update *u) {
    fsdpi_adamw_opt *opt = (fsdpi_adamw_opt *)(void *)o;
    int group = run->first->group;
    if (opt->scalars_step[group] != run->step) {
        opt->hypers.lr = lr;
        opt->hypers.weight_decay = o->groups[group].weight_decay;
        opt->hypers.step = run->step;
        opt->scalars[group] = fsdpi_adamw_prepare(&opt->hypers);
        opt->scalars_step[group] = run->step;
    }
    u->kind = FSDP_UPDATE_ADAMW;
    memcpy(u->scalars, &opt->scalars[group], sizeof opt->scalars[group]);
}

static fsdp_status fsdpi_adamw_step(fsdp_optim *o, double lr) {
    fsdpi_adamw_opt *opt = (fsdpi_adamw_opt *)(void *)o;
    memset(opt->scalars_step, 0, sizeof opt->scalars_step);
    return fsdpi_optim_step(o, lr, "adamw_step", fsdpi_adamw_fill);
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
    fsdpi_adamw_opt settings;
    if (!model || !opt) return fsdp_fail_null(fsdp_model_world(model), name, "model or opt");
    *opt = NULL;
    fsdp_world *w = fsdp_model_world(model);
    if (!desc) desc = &defaults;
    fsdp_status status = fsdp_desc_read(w, &d, desc, sizeof d, "fsdp_adamw_desc");
    memset(&settings, 0, sizeof settings);
    settings.base.name = name;
    settings.base.extension.name = "adamw";
    settings.base.mark = FSDP_UPDATES_ELEMENTS;
    settings.base.step = fsdpi_adamw_step;
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
                                    d.user, opt);
    if (status) return status;
    fsdp_adamw_hyper *hypers = &((fsdpi_adamw_opt *)(void *)*opt)->hypers;
    hypers->beta1 = d.beta1, hypers->beta2 = d.beta2, hypers->eps = d.eps;
    const double given[] = {d.beta1, d.beta2, d.eps};
    status = fsdpi_optim_agree(*opt, given, sizeof given);
    if (status) fsdp_optim_destroy(*opt), *opt = NULL;
    return status;
}

// Fills in an update of SGD.
static void fsdpi_sgd_fill(fsdp_optim *o, const fsdpi_optim_span *run, double lr, fsdp_update *u) {
    fsdp_sgd_hyper hypers = ((fsdpi_sgd_opt *)(void *)o)->hypers;
    hypers.lr = lr;
    hypers.weight_decay = o->groups[run->first->group].weight_decay;
    hypers.step = run->step;
    fsdpi_sgd_scalars k = fsdpi_sgd_prepare(&hypers);
    u->kind = FSDP_UPDATE_SGD;
    memcpy(u->scalars, &k, sizeof k);
}

static fsdp_status fsdpi_sgd_step(fsdp_optim *o, double lr) {
    return fsdpi_optim_step(o, lr, "sgd_step", fsdpi_sgd_fill);
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
    fsdpi_sgd_opt settings;
    if (!model || !opt) return fsdp_fail_null(fsdp_model_world(model), name, "model or opt");
    *opt = NULL;
    fsdp_world *w = fsdp_model_world(model);
    if (!desc) desc = &defaults;
    fsdp_status status = fsdp_desc_read(w, &d, desc, sizeof d, "fsdp_sgd_desc");
    memset(&settings, 0, sizeof settings);
    settings.base.name = name;
    settings.base.extension.name = "sgd";
    settings.base.mark = FSDP_UPDATES_ELEMENTS;
    settings.base.step = fsdpi_sgd_step;
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
                                    d.user, opt);
    if (status) return status;
    fsdp_sgd_hyper *hypers = &((fsdpi_sgd_opt *)(void *)*opt)->hypers;
    hypers->momentum = d.momentum, hypers->dampening = d.dampening, hypers->nesterov = d.nesterov;
    const double given[] = {d.momentum, d.dampening, d.nesterov ? 1.0 : 0.0};
    status = fsdpi_optim_agree(*opt, given, sizeof given);
    if (status) fsdp_optim_destroy(*opt), *opt = NULL;
    return status;
}

#endif // FSDPI_OPTIM_ADAMW_SGD_H
