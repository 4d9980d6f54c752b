/* core/options.h - setters of options, hooks and dtypes

   State: fsdpi_options of units, and the options of fsdp_model.
   Source: torch: the setters of FSDPModule.
   Callers: programs.

   A part of fsdp.h. SPDX-License-Identifier: MIT (full text at the end of fsdp.h) */
#ifndef FSDP_H
#include "../../fsdp.h"
#endif
#ifndef FSDPI_CORE_OPTIONS_H
#define FSDPI_CORE_OPTIONS_H

#include "alloc.h"
#include "commit.h"
#include "error.h"
#include "../base/float.h"
#include "../base/macros.h"
#include "objects.h"
#include "gather.h"
#include "run.h"
#include "step.h"
#include "unit.h"
#include "ext_dispatch.h"

// Updates a unit after one of its options, or an option of one of its parameters, has changed.
static void fsdpi_option_changed(fsdp_unit *u) {
    u->model->settings = 0;
    fsdpi_unit_facts(u);
}

// Begins a setter for unit u or (NULL) all units: checks the arguments, and notifies extensions.
// Sets *first and *end to the range of units. Fails if one of them is between a pre hook and its
// post hook.
static fsdp_status fsdpi_setter_begin(fsdp_model *m, fsdp_unit *u, const char *what, int *first,
                                      int *end) {
    if (!m) return fsdpi_null_of(u ? u->model : NULL, what, "model");
    fsdp_status status = fsdpi_failed(m->world);
    if (status) return status;
    FSDPI_TRY(fsdpi_check_owner(m, u, what));
    *first = u ? u->desc.index : 0;
    *end = u ? u->desc.index + 1 : m->num_units;
    for (int i = *first; i < *end; i++)
        if (!fsdpi_lookup(m->units[i], FSDP_CALL_SET))
            return fsdpi_hook_failed(m, fsdpi_wrong_call(m->units[i], FSDP_CALL_SET, what));
    if (m->listeners & FSDPI_LISTEN_CALLS) (void)fsdpi_ext_offer_call(m, u, FSDP_CALL_SET, &status);
    return status;
}

// Sets an option of the model, an int at `field` of its options.
static fsdp_status fsdpi_set_model(fsdp_model *m, const char *what, size_t field, int value) {
    if (!m) return fsdp_fail_null(NULL, what, "model");
    *(int *)(void *)((char *)&m->options + field) = value != 0;
    m->settings = 0;
    return fsdpi_failed(m->world);
}
FSDP_API fsdp_status fsdp_set_grad_enabled(fsdp_model *m, int enabled) {
    return fsdpi_set_model(m, "set_grad_enabled", offsetof(fsdpi_model_options, grad_enabled),
                           enabled);
}
FSDP_API fsdp_status fsdp_set_uneven_inputs(fsdp_model *m, int uneven) {
    return fsdpi_set_model(m, "set_uneven_inputs", offsetof(fsdpi_model_options, uneven), uneven);
}
FSDP_API fsdp_status fsdp_set_is_last_backward(fsdp_model *m, int is_last) {
    return fsdpi_set_model(m, "set_is_last_backward",
                           offsetof(fsdpi_model_options, is_last_backward), is_last);
}
FSDP_API int fsdp_has_uneven_inputs(const fsdp_model *model) {
    return model && model->options.uneven;
}
FSDP_API int fsdp_is_grad_enabled(const fsdp_model *model) {
    return model && model->options.grad_enabled;
}

static fsdp_status fsdpi_set_option(fsdp_model *m, fsdp_unit *u, const char *what, size_t field,
                                    int value) {
    int i = 0, end = 0;
    fsdp_status status = fsdpi_setter_begin(m, u, what, &i, &end);
    for (; !status && i < end; i++) {
        *((uint8_t *)&m->units[i]->options + field) = value != 0;
        fsdpi_option_changed(m->units[i]);
    }
    return status;
}

FSDP_API fsdp_status fsdp_set_requires_gradient_sync(fsdp_model *model, fsdp_unit *unit, int sync) {
    const char *what = "set_requires_gradient_sync";
    FSDPI_TRY(fsdpi_set_option(model, unit, what, offsetof(fsdpi_options, all_reduce), sync));
    return fsdpi_set_option(model, unit, what, offsetof(fsdpi_options, sync), sync);
}
FSDP_API int fsdp_requires_gradient_sync(const fsdp_unit *unit) {
    return unit && unit->options.sync && unit->options.all_reduce;
}
FSDP_API fsdp_status fsdp_set_requires_all_reduce(fsdp_model *model, fsdp_unit *unit,
                                                  int required) {
    return fsdpi_set_option(model, unit, "set_requires_all_reduce",
                            offsetof(fsdpi_options, all_reduce), required);
}
FSDP_API fsdp_status fsdp_set_reshard_after_backward(fsdp_model *model, fsdp_unit *unit,
                                                     int reshard) {
    return fsdpi_set_option(model, unit, "set_reshard_after_backward",
                            offsetof(fsdpi_options, reshard_after_backward), reshard);
}
FSDP_API fsdp_status fsdp_set_unshard_in_backward(fsdp_model *model, fsdp_unit *unit, int unshard) {
    return fsdpi_set_option(model, unit, "set_unshard_in_backward",
                            offsetof(fsdpi_options, unshard_in_backward), unshard);
}
FSDP_API fsdp_status fsdp_set_reduce_scatter_unused_params(fsdp_model *model, fsdp_unit *unit,
                                                           int reduce) {
    return fsdpi_set_option(model, unit, "set_reduce_scatter_unused_params",
                            offsetof(fsdpi_options, reduce_unused), reduce);
}
FSDP_API fsdp_status fsdp_set_reshard_after_forward(fsdp_model *model, fsdp_unit *unit, int mode) {
    int i = 0, end = 0;
    fsdp_status status = fsdpi_setter_begin(model, unit, "set_reshard_after_forward", &i, &end);
    int fits = mode == FSDP_RESHARD_ALWAYS || mode == FSDP_RESHARD_NEVER;
    for (int k = i; !status && !fits && k < end; k++)
        if (model->units[k]->desc.slices != mode || !mode)
            return fsdpi_invalid_arg(
                model->world,
                "[E162] set_reshard_after_forward: mode is %d, expected FSDP_RESHARD_ALWAYS, "
                "FSDP_RESHARD_NEVER or the n of fsdp_unit_desc, which unit '%s' was not made with",
                mode, model->units[k]->desc.name);
    for (; !status && i < end; i++) {
        model->units[i]->options.reshard_after_forward = mode;
        fsdpi_option_changed(model->units[i]);
    }
    return status;
}

FSDP_API fsdp_status fsdp_set_gradient_divide_factor(fsdp_model *model, fsdp_unit *unit,
                                                     double factor) {
    int i = 0, end = 0;
    fsdp_status status = fsdpi_setter_begin(model, unit, "set_gradient_divide_factor", &i, &end);
    if (!status && (!(factor >= 0) || !fsdpi_is_finite(factor)))
        return fsdpi_invalid_arg(
            model->world,
            "[E163] set_gradient_divide_factor: factor is %g, expected finite and >= 0", factor);
    for (; !status && i < end; i++) {
        model->units[i]->options.divide_factor = factor;
        fsdpi_option_changed(model->units[i]);
    }
    return status;
}

// Sets a prefetch list. An empty list keeps the memory of the old one, which a dry run restores.
static fsdp_status fsdpi_set_prefetch(fsdp_unit *u, int backward, fsdp_unit *const *targets,
                                      int count, const char *what) {
    int first, end;
    FSDPI_TRY(fsdpi_setter_begin(u ? u->model : NULL, u, what, &first, &end));
    fsdp_model *m = u->model;
    for (int i = 0; i < count; i++)
        if (!targets || !targets[i] || targets[i]->model != m)
            return fsdpi_invalid_arg(m->world, "[E164] %s: target %d is not a unit of this model",
                                     what, i);
    if (count < 0)
        return fsdpi_invalid_arg(m->world, "[E165] %s: count is %d, expected >= 0", what, count);
    if (count && m->dry_run)
        return fsdpi_invalid_arg(
            m->world, "[E173] %s: a dry run can only remove lists: count is %d", what, count);
    int32_t **at = &u->options.prefetch[backward];
    int32_t *num = &u->options.num_prefetch[backward];
    int32_t *list = count ? (int32_t *)fsdpi_model_alloc(m, (size_t)count * sizeof *list) : NULL;
    if (count && !list) return fsdpi_no_memory(m->world, what, "", (size_t)count * sizeof *list);
    for (int i = 0; i < count; i++) list[i] = targets[i]->desc.index;
    if (count) fsdpi_model_free(m, *at);
    if (count) *at = list;
    *num = count;
    fsdpi_option_changed(u);
    return FSDP_OK;
}

FSDP_API fsdp_status fsdp_set_modules_to_forward_prefetch(fsdp_unit *unit,
                                                          fsdp_unit *const *targets, int count) {
    return fsdpi_set_prefetch(unit, 0, targets, count, "set_modules_to_forward_prefetch");
}

FSDP_API fsdp_status fsdp_set_modules_to_backward_prefetch(fsdp_unit *unit,
                                                           fsdp_unit *const *targets, int count) {
    return fsdpi_set_prefetch(unit, 1, targets, count, "set_modules_to_backward_prefetch");
}

// Returns FSDP_OK if the model may be laid out again: all units are idle and hold no unreduced
// gradients, and it is not a dry run.
static fsdp_status fsdpi_may_move(fsdp_model *m, const char *what) {
    FSDPI_TRY(fsdpi_refuse_in_dry_run(m, what));
    return fsdpi_keep_status(m, fsdpi_check_units(m, FSDP_CALL_REQUIRES_GRAD, what));
}

FSDP_API fsdp_status fsdp_set_requires_grad(fsdp_unit *unit, int index, int requires_grad) {
    FSDPI_TRY(fsdpi_param_call(unit, index, FSDP_CALL_REQUIRES_GRAD));
    FSDPI_TRY(fsdpi_may_move(unit->model, fsdpi_call_name(FSDP_CALL_REQUIRES_GRAD)));
    fsdp_model *m = unit->model;
    fsdpi_param *p = &unit->params[index];
    if (requires_grad && !fsdp_dtype_is_float(p->dtype))
        return fsdpi_invalid_arg(
            m->world,
            "[E166] set_requires_grad: parameter '%s' of unit '%s' is %s: only "
            "floating parameters can require a gradient",
            p->name, unit->desc.name, fsdp_dtype_name(p->dtype));
    if (p->requires_grad == (requires_grad != 0)) return FSDP_OK;
    if (requires_grad) FSDPI_TRY(fsdpi_trainable_check(unit, p));
    if (m->laid_out) FSDPI_TRY(fsdpi_request_commit(m));
    p->requires_grad = requires_grad != 0;
    fsdp_status status = fsdpi_unit_arrange(unit);
    if (status) p->requires_grad = !p->requires_grad;
    if (status) return status;
    fsdpi_option_changed(unit);
    *fsdpi_use(unit, index) &= (uint8_t)~FSDPI_USE_REDUCED;
    return FSDP_OK;
}

FSDP_API FSDP_COLD fsdp_status fsdp_model_cast(fsdp_model *model, fsdp_dtype dtype) {
    static const char *const what = "model_cast";
    if (!model) return fsdp_fail_null(NULL, what, "model");
    if (!fsdp_dtype_is_float(dtype))
        return fsdpi_invalid_arg(model->world, "[E171] %s: dtype is %d, expected a floating dtype",
                                 what, dtype);
    FSDPI_TRY(fsdpi_may_move(model, what));
    for (int i = 0; i < model->num_units; i++)
        for (int k = 0; k < model->units[i]->desc.num_params; k++)
            if (model->units[i]->params[k].extension.sizes)
                return fsdp_fail(model->world, FSDP_ERR_UNSUPPORTED,
                                 "[E213] %s: the gather extension of '%s' in unit '%s' knows one "
                                 "dtype: give the dtype in fsdp_param_desc",
                                 what, model->units[i]->params[k].name, model->units[i]->desc.name);
    if (model->laid_out) FSDPI_TRY(fsdpi_request_commit(model));
    for (int i = 0; i < model->num_units; i++) {
        fsdp_unit *u = model->units[i];
        for (int k = 0; k < u->desc.num_params; k++)
            if (fsdp_dtype_is_float(u->params[k].dtype)) u->params[k].dtype = dtype;
        fsdpi_option_changed(u);
        FSDPI_TRY(fsdpi_unit_arrange(u));
    }
    return FSDP_OK;
}

// Checks as fsdpi_setter_begin does, then drains all streams: issued ops may still call the old
// hook.
static FSDPI_NOINLINE fsdp_status fsdpi_set_hook(fsdp_unit *u, const char *what) {
    int first, end;
    FSDPI_TRY(fsdpi_setter_begin(u ? u->model : NULL, u, what, &first, &end));
    fsdpi_drain(u->model->world);
    return FSDP_OK;
}

FSDP_API fsdp_status fsdp_set_all_reduce_hook(fsdp_unit *unit, fsdp_all_reduce_hook hook,
                                              void *user) {
    FSDPI_TRY(fsdpi_set_hook(unit, "set_all_reduce_hook"));
    unit->options.all_reduce_hook = hook;
    unit->options.all_reduce_user = user;
    fsdpi_option_changed(unit);
    return FSDP_OK;
}

FSDP_API fsdp_status fsdp_set_post_accumulate_hook(fsdp_unit *unit, int index, fsdp_grad_hook hook,
                                                   void *user) {
    FSDPI_TRY(fsdpi_param_call(unit, index, FSDP_CALL_SET));
    FSDPI_TRY(fsdpi_set_hook(unit, "set_post_accumulate_hook"));
    unit->model->grad_hooks |= hook != NULL;
    unit->params[index].grad_hook = hook;
    unit->params[index].grad_hook_user = user;
    fsdpi_option_changed(unit);
    return FSDP_OK;
}

FSDP_API fsdp_status fsdp_set_unit_callback(fsdp_unit *unit, fsdp_unit_callback fn, void *user) {
    if (!unit) return fsdp_fail_null(NULL, "set_unit_callback", "unit");
    FSDPI_TRY(fsdpi_failed(unit->model->world));
    fsdpi_call_back(unit, 0);
    unit->model->unit_callbacks |= fn != NULL;
    unit->callback = fn;
    unit->callback_user = user;
    fsdpi_call_back(unit, unit->state.storage == FSDP_STORAGE_UNSHARDED);
    return FSDP_OK;
}

static fsdp_status fsdpi_set_custom(fsdp_unit *u, const char *what, int which,
                                    fsdp_custom_comm hook, void *user) {
    FSDPI_TRY(fsdpi_set_hook(u, what));
    // It decides by how much unreduced gradients have been divided so far.
    if (which == FSDPI_CUSTOM_ALL_REDUCE && fsdpi_holds_grads(u))
        return fsdpi_refuse_waiting(u, what);
    u->options.custom[which] = hook;
    u->options.custom_user[which] = user;
    fsdpi_option_changed(u);
    return FSDP_OK;
}

FSDP_API fsdp_status fsdp_set_custom_all_gather(fsdp_unit *unit, fsdp_custom_comm hook,
                                                void *user) {
    return fsdpi_set_custom(unit, "set_custom_all_gather", FSDPI_CUSTOM_GATHER, hook, user);
}
FSDP_API fsdp_status fsdp_set_custom_reduce_scatter(fsdp_unit *unit, fsdp_custom_comm hook,
                                                    void *user) {
    return fsdpi_set_custom(unit, "set_custom_reduce_scatter", FSDPI_CUSTOM_SCATTER, hook, user);
}
FSDP_API fsdp_status fsdp_set_custom_all_reduce(fsdp_unit *unit, fsdp_custom_comm hook,
                                                void *user) {
    return fsdpi_set_custom(unit, "set_custom_all_reduce", FSDPI_CUSTOM_ALL_REDUCE, hook, user);
}

static const void *fsdpi_cast_activation(void *dst, fsdp_dtype to, const void *src,
                                         fsdp_dtype *dtype, int64_t count) {
    const void *out = fsdp_cast_floating(dst, to, src, *dtype, count);
    if (to && fsdp_dtype_is_float(*dtype)) *dtype = to;
    return out;
}

FSDP_API const void *fsdp_cast_forward_input(const fsdp_unit *unit, void *dst, const void *src,
                                             fsdp_dtype *dtype, int64_t count) {
    return fsdpi_cast_activation(
        dst, unit->desc.keep_inputs ? FSDP_DTYPE_KEEP : unit->desc.policy_dtype, src, dtype, count);
}

FSDP_API const void *fsdp_cast_forward_output(const fsdp_unit *unit, void *dst, const void *src,
                                              fsdp_dtype *dtype, int64_t count) {
    return fsdpi_cast_activation(dst, unit->desc.output_dtype, src, dtype, count);
}

#endif // FSDPI_CORE_OPTIONS_H
