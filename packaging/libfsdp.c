/* libfsdp.c - the library as one object, for libfsdp.a and libfsdp.so (make lib, CMake, Meson)
   Programs that link it include the headers without FSDP_IMPLEMENTATION.

   SPDX-License-Identifier: MIT */
#if defined(__GNUC__) // exported, even if a build compiles with -fvisibility=hidden
#define FSDP_API extern __attribute__((visibility("default")))
#endif
#define FSDP_IMPLEMENTATION
#include "../fsdp.h"
#include "../fsdp_checkpoint.h"
#include "../fsdp_compress.h"
#include "../fsdp_dtensor.h"
#include "../fsdp_muon.h"
#include "../fsdp_optim.h"
#include "../fsdp_plan.h"
#include "../fsdp_replicate.h"
#include "../fsdp_safetensors.h"
#include "../fsdp_trace.h"
