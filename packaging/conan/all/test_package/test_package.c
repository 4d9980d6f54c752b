/* test_package.c - the sum of a 1 from each rank. SPDX-License-Identifier: MIT */
#include "fsdp.h"
#include <stdio.h>

int main(void) {
    fsdp_world *world;
    float sum = 1;
    if (fsdp_init(NULL, &world)) return 1;
    if (fsdp_all_reduce(world, NULL, &sum, 1, FSDP_F32, FSDP_SUM)) return 1;
    printf("rank %d of %d: %g\n", fsdp_rank(world), fsdp_world_size(world), (double)sum);
    return sum != (float)fsdp_world_size(world) || fsdp_shutdown(world);
}
