/* cuda_runtime.h - the header of that name: the stub has only its C part

   SPDX-License-Identifier: MIT */
#ifndef FSDP_STUB_CUDA_RUNTIME_H
#define FSDP_STUB_CUDA_RUNTIME_H
#include "cuda_runtime_api.h"
#endif
