#!/bin/sh
# SPDX-License-Identifier: MIT
# one_gpu.sh - becomes COMMAND as one of several ranks that share the first GPU. Right for tests,
# far too slow for anything else.
#
#   FSDP_BACKEND=nccl tools/fsdprun -n 3 tools/one_gpu.sh PROGRAM [ARG...]
#
# NCCL 2.30 and newer can have several ranks on a GPU, which read each other's memory; it calls this
# experimental. Before that, NCCL refuses two ranks on one GPU of a host. So each is given a host
# name of its own: what they exchange goes through host memory and the loopback interface. A program
# that starts its ranks itself has to append the rank to NCCL_HOSTID in each of them, if it is set,
# as tests/harness.h does. NCCL_MULTI_RANK_GPU_ENABLE=0 chooses the old way for a new NCCL, too.
[ $# != 0 ] || { echo "usage: $0 COMMAND [ARG...]" >&2 && exit 2; }
visible=${CUDA_VISIBLE_DEVICES:-0}
export CUDA_VISIBLE_DEVICES="${visible%%,*}" CUDA_DEVICE_MAX_CONNECTIONS=8

# Of the NCCL that COMMAND loads, which has its version as a text: 2 30.
library=$(ldd "$(command -v "$1")" 2>/dev/null | sed -n 's/.*libnccl\.so[^ ]* => \([^ ]*\).*/\1/p')
[ -z "$library" ] || version=$(grep -aoE -m 1 'NCCL version [0-9]+\.[0-9]+' "$library" |
    sed -n '1s/.* \([0-9]*\)\.\([0-9]*\)/\1 \2/p')
newer() { # MAJOR MINOR
    [ "${1:-0}" -gt 2 ] || { [ "${1:-0}" = 2 ] && [ "$2" -ge 30 ]; }
}
# shellcheck disable=SC2086
if [ "${NCCL_MULTI_RANK_GPU_ENABLE:-1}" = 1 ] && newer $version; then
    export NCCL_MULTI_RANK_GPU_ENABLE=1
else
    export NCCL_HOSTID="fsdp${RANK:-${OMPI_COMM_WORLD_RANK:-${SLURM_PROCID:-}}}"
    export NCCL_NET=Socket NCCL_SOCKET_IFNAME=lo NCCL_IB_DISABLE=1
    export NCCL_P2P_DISABLE=1 NCCL_SHM_DISABLE=1 NCCL_MNNVL_ENABLE=0
fi
# few thread blocks, as those of all ranks take turns; one algorithm, so that sums repeat; and no
# operations of 32 MiB when communicators are made, which take turns many times
export NCCL_MAX_CTAS=2 NCCL_ALGO=Ring NCCL_PROTO=Simple NCCL_RAS_ENABLE=0 NCCL_NVLS_ENABLE=0
export FSDP_NCCL_WARM_UP="${FSDP_NCCL_WARM_UP:-0}"
exec "$@"
