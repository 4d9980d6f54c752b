#!/bin/sh
# SPDX-License-Identifier: MIT
# one_gpu.sh - becomes COMMAND as one of several ranks that share the first GPU. NCCL refuses two
# ranks on one GPU of a host, so each is given a host name of its own: what they exchange goes
# through host memory and the loopback interface. Right for tests, far too slow for anything else.
#
#   FSDP_BACKEND=nccl tools/fsdprun -n 3 tools/one_gpu.sh PROGRAM [ARG...]
#
# A program that starts its ranks itself has to append the rank to NCCL_HOSTID in each of them, as
# tests/harness.h does.
[ $# != 0 ] || { echo "usage: $0 COMMAND [ARG...]" >&2 && exit 2; }
visible=${CUDA_VISIBLE_DEVICES:-0}
export CUDA_VISIBLE_DEVICES="${visible%%,*}" CUDA_DEVICE_MAX_CONNECTIONS=8
export NCCL_HOSTID="fsdp${RANK:-${OMPI_COMM_WORLD_RANK:-${SLURM_PROCID:-}}}"
export NCCL_NET=Socket NCCL_SOCKET_IFNAME=lo NCCL_IB_DISABLE=1
export NCCL_P2P_DISABLE=1 NCCL_SHM_DISABLE=1 NCCL_NVLS_ENABLE=0 NCCL_MNNVL_ENABLE=0
# few thread blocks, as those of all ranks take turns; one algorithm, so that sums repeat
export NCCL_MAX_CTAS=2 NCCL_ALGO=Ring NCCL_PROTO=Simple NCCL_RAS_ENABLE=0
exec "$@"
