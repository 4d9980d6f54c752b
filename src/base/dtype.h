/* base/dtype.h - the names and sizes of status codes and element types

   Callers: programs.

   A part of fsdp.h. SPDX-License-Identifier: MIT (full text at the end of fsdp.h) */
#ifndef FSDP_H
#include "../../fsdp.h"
#endif
#ifndef FSDPI_BASE_DTYPE_H
#define FSDPI_BASE_DTYPE_H

FSDP_API const char *fsdp_status_name(fsdp_status status) {
#define FSDP_X(name, value, text) "FSDP_" #name,
    static const char *const names[] = {FSDP_STATUS_LIST(FSDP_X)};
#undef FSDP_X
    return (unsigned)status < sizeof names / sizeof *names ? names[status] : "FSDP_?";
}

FSDP_API const char *fsdp_status_text(fsdp_status status) {
#define FSDP_X(name, value, text) text,
    static const char *const texts[] = {FSDP_STATUS_LIST(FSDP_X)};
#undef FSDP_X
    return (unsigned)status < sizeof texts / sizeof *texts ? texts[status] : "no such status";
}

FSDP_API size_t fsdp_dtype_size(fsdp_dtype dtype) {
#define FSDP_X(name, value, bytes, is_float) bytes,
    static const uint8_t bytes[FSDP_DTYPE_COUNT] = {0, FSDP_DTYPE_LIST(FSDP_X)};
#undef FSDP_X
    return dtype > 0 && dtype < FSDP_DTYPE_COUNT ? bytes[dtype] : 0;
}

FSDP_API int fsdp_dtype_is_float(fsdp_dtype dtype) {
    return dtype == FSDP_F32 || dtype == FSDP_F64 || dtype == FSDP_F16 || dtype == FSDP_BF16;
}

FSDP_API const char *fsdp_dtype_name(fsdp_dtype dtype) {
    static const char *const names[FSDP_DTYPE_COUNT] = {"?",  "f32", "f64", "f16", "bf16",
                                                        "u8", "i8",  "i16", "i32", "i64"};
    return dtype > 0 && dtype < FSDP_DTYPE_COUNT ? names[dtype] : "?";
}

#endif // FSDPI_BASE_DTYPE_H
