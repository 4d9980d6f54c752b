#!/bin/sh
# SPDX-License-Identifier: MIT
# deps.sh - install what tests, gates and figures use and this machine lacks. It never asks, never
# fails and never waits long; where it may not install, or has no network, it names what is
# missing, and the tests that need it are skipped visibly. The library itself needs nothing.
#
#   tools/deps.sh [slurm]     slurm: also what the tests of make slurm use
set -u
missing=''

need() { # PACKAGE PROBE...
    package=$1 && shift
    "$@" >/dev/null 2>&1 || missing="$missing $package"
}
need build-essential sh -c 'command -v gcc && command -v g++ && command -v make'
need clang sh -c 'command -v clang && command -v clang++'
need python3 command -v python3
need valgrind command -v valgrind
need pkg-config command -v pkg-config
need cmake command -v cmake
need meson command -v meson
need ninja-build command -v ninja
need libopenblas-dev pkg-config --exists openblas
need libgloo-dev sh -c 'echo "#include <gloo/transport/tcp/device.h>" | g++ -E -x c++ -'
need iproute2 command -v ip
need openmpi-bin command -v mpirun
if [ "${1-}" = slurm ]; then
    need slurm-wlm sh -c 'command -v slurmctld && command -v slurmd && command -v srun'
    need munge command -v munged
    need mpich command -v mpiexec.mpich
fi
[ -n "$missing" ] || exit 0

sudo=''
[ "$(id -u)" = 0 ] || sudo='sudo -n'
if ! command -v apt-get >/dev/null || { [ -n "$sudo" ] && ! $sudo true 2>/dev/null; }; then
    echo "deps: missing, and not installed from here:$missing"
    exit 0
fi

apt() {
    timeout 600 $sudo env DEBIAN_FRONTEND=noninteractive apt-get -qq -y \
        -o DPkg::Lock::Timeout=60 -o Acquire::Retries=1 -o Acquire::http::Timeout=15 \
        -o Acquire::https::Timeout=15 "$@" </dev/null >/dev/null 2>&1
}
echo "deps: installing$missing (make DEPS=no: not)"
# shellcheck disable=SC2086
apt install --no-install-recommends $missing && exit 0
apt update || { echo "deps: no package lists to be had"; exit 0; }
for package in $missing; do
    apt install --no-install-recommends "$package" || echo "deps: could not install $package"
done
exit 0
