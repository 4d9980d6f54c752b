#!/usr/bin/env bash
# SPDX-License-Identifier: MIT
# two_hosts.sh - the two hosts of docs/cluster.md, as two network namespaces of this machine with a
# virtual cable between them, and the five commands that train on both.
#
#   sudo examples/cluster/two_hosts.sh     without root: where users may make namespaces
#
# It works in namespaces of its own (processes, mounts, network): all of it ends with the script,
# however that ends. Exit status: 0; 1: the training went wrong; 77: this machine lacks something.
set -euo pipefail
cd "$(dirname "$0")/../.."
gloo=${FSDP_BUILD:-build}/gloo/examples

skip() {
    echo "two_hosts: $*"
    exit 77
}
fail() {
    echo "two_hosts: $*"
    exit 1
}

if [ "${1-}" != --inside ]; then
    for tool in unshare nsenter ip mount; do
        command -v "$tool" >/dev/null || skip "no $tool here (util-linux, iproute2)"
    done
    for built in tools/fsdprun "$gloo/01_hello"; do
        [ -x "$built" ] || skip "no $built here: make gloo"
    done
    own=(unshare --mount --net --pid --fork --kill-child --mount-proc)
    [ "$(id -u)" = 0 ] || own+=(--map-root-user)
    "${own[@]}" true 2>/dev/null || skip 'namespaces are not permitted here: try sudo'
    exec "${own[@]}" "$0" --inside
fi

# ---- two hosts -----------------------------------------------------------------------------------

mkdir -p /run/netns 2>/dev/null || true
mount -t tmpfs tmpfs /run/netns || skip 'no tmpfs here'
home=/run/netns/home-of-b # a place of host-b's own, which ends with the mount
mkdir "$home"
ip netns add host-a && ip netns add host-b
ip link add eth0 netns host-a type veth peer name eth0 netns host-b 2>/dev/null ||
    skip 'the kernel has no veth devices'
for host in host-a/10.77.0.1 host-b/10.77.0.2; do
    ip -n "${host%/*}" addr add "${host#*/}/24" dev eth0
    ip -n "${host%/*}" link set eth0 up
    ip -n "${host%/*}" link set lo up
done
printf '127.0.0.1 localhost\n10.77.0.1 host-a\n10.77.0.2 host-b\n' >/run/netns/hosts
mount --bind /run/netns/hosts /etc/hosts

# ---- the five commands ---------------------------------------------------------------------------

say() { echo "$1\$ $2"; }
on() { # HOST DIRECTORY COMMAND: says it, and runs it there
    say "$1" "$3"
    (cd "$2" && nsenter --net="/run/netns/$1" timeout 60 bash -c "$3")
}
say host-a 'make deps gloo'
say host-a "scp tools/fsdprun $gloo/01_hello host-b:"
cp tools/fsdprun "$gloo/01_hello" "$home" # the "hosts" have one disk
say host-b 'sudo apt-get install libgloo0'

command='fsdprun -n 2 --nnodes 2 --master host-a --node-rank' # but for the last word the same
status_a=0 status_b=0
on host-a . "FSDP_TOKEN=SECRET FSDP_BACKEND=gloo tools/$command 0 $gloo/01_hello" >"$home/a" 2>&1 &
on host-b "$home" "FSDP_TOKEN=SECRET FSDP_BACKEND=gloo ./$command 1 ./01_hello" >"$home/b" 2>&1 || status_b=$?
wait $! || status_a=$?
cat "$home/a" "$home/b"
[ "$status_a$status_b" = 00 ] || fail "exit status $status_a and $status_b"

# Wherever its ranks are, a training has the same numbers.
FSDP_BACKEND=shm tools/fsdprun -n 4 "$gloo/01_hello" >"$home/one"
grep -v '^\[fsdp r' "$home/a" | tail -n +2 | cmp - "$home/one" || fail 'other losses than on one host'
echo 'two_hosts: the same losses as on one host'
