#!/bin/sh
# SPDX-License-Identifier: MIT
# deps.sh - install what tests, gates and figures use and this machine lacks. It never asks, never
# fails and never waits long; where it may not install, or has no network, it names what is
# missing, and the tests that need it are skipped visibly. The library itself needs nothing.
#
#   tools/deps.sh [slurm] [cross]     slurm: also what the tests of make slurm use
#                                     cross: other compilers and an emulator, of make nightly
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
need musl-tools command -v musl-gcc
need tcc command -v tcc
case " $* " in *' cross '*)
    need gcc-aarch64-linux-gnu command -v aarch64-linux-gnu-gcc
    need libc6-dev-arm64-cross test -e /usr/aarch64-linux-gnu/lib/libc.a
    need qemu-user command -v qemu-aarch64
    # zig comes from PyPI, into a virtual environment, where the gate platforms.zig looks for it.
    zig=${FSDP_BUILD:-build}/zig
    command -v zig >/dev/null || python3 -m ziglang version >/dev/null 2>&1 ||
        "$zig/bin/python" -m ziglang version >/dev/null 2>&1 ||
        { python3 -m venv "$zig" && timeout 600 "$zig/bin/pip" install --quiet --no-input \
            --disable-pip-version-check ziglang; } >/dev/null 2>&1 || {
        echo 'deps: could not install ziglang from PyPI'
        rm -rf "$zig"
    } ;;
esac
case " $* " in *' slurm '*)
    need slurm-wlm sh -c 'command -v slurmctld && command -v slurmd && command -v srun'
    need munge command -v munged
    need mpich command -v mpiexec.mpich ;;
esac
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
