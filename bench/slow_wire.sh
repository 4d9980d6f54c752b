#!/usr/bin/env bash
# SPDX-License-Identifier: MIT
# slow_wire.sh - runs a command where loopback takes as long as a network card would
#
#   bench/slow_wire.sh 10gbit COMMAND...      any rate that tc knows
#
# In a network namespace of its own, which ends with the command. Bytes then take time without using
# a core, as on a wire between hosts. Without root: where users may make namespaces.
set -euo pipefail
rate=${1:?a rate, for example 10gbit} && shift
own=(unshare --net)
[ "$(id -u)" = 0 ] || own+=(--map-root-user)
exec "${own[@]}" bash -c 'ip link set lo up &&
    tc qdisc add dev lo root tbf rate "$0" burst 512kb latency 100ms && exec "$@"' "$rate" "$@"
