/* transitions.h - the transition table of a unit, as the documents have it, for models of units that
   are compared with the library's own table (step.h).

   SPDX-License-Identifier: MIT */
#ifndef TRANSITIONS_H
#define TRANSITIONS_H
#include "library.h"

/* One group of cells for each training state: IDLE, FORWARD, PRE_BACKWARD, POST_BACKWARD. Cells of
   a group: f0 and f+ outside the model's backward, b0 and b+ in it; + means that a forward of the
   unit is due. '.': impossible; '=': the state stays; I F P B: the next state. */
/* clang-format off */
static const struct {
    const char *name, *cells;
} documented[FSDP_CALL_COUNT] __attribute__((unused)) = {
    /*                    IDLE    FORWARD PRE     POST
                          f0f+b0b+                       */
    {"pre_forward",       "FF.F" "FF.." "..==" "...F"},
    {"post_forward",      "...." "IIII" "..==" "...."},
    {"pre_backward",      ".P.P" "...." "..==" ".P.P"},
    {"post_backward",     "...." "...." "..BB" "...."},
    {"unshard",           "====" "====" "====" "===="},
    {"wait",              "====" "====" "====" "===="},
    {"reshard",           "====" "...." "...." "===="},
    {"finalize_backward", "IIII" "...." "IIII" "IIII"},
    {"data",              "====" "====" "====" "===="}, /* and only while UNSHARDED */
    {"grad",              "...." "...." "..==" "...."},
    {"params_changed",    "==.." "...." "...." "...."},
    {"param_load",        "==.." "...." "...." "...."},
    {"param_full",        "==.." "...." "...." "...."},
    {"zero_grad",         "==.." "...." "...." "...."},
    {"clip_grad_norm",    "==.." "...." "...." "...."},
    {"set_requires_grad", "==.." "...." "...." "...."},
    {"set_...",           "====" "...." "...." "===="},
    {"model_reset",       "IIII" "IIII" "IIII" "IIII"},
    {"extension",         "====" "====" "====" "===="},
};
/* clang-format on */
static const char state_letters[] __attribute__((unused)) = "IFPB";
#endif
