#!/usr/bin/env bash
# SPDX-License-Identifier: MIT
# slurm_lab.sh - runs a shell command on the first of three "hosts", n1, n2 and n3, which share a
# real Slurm: Debian's packages in network namespaces of this machine.
#
#   tests/tools/slurm_lab.sh COMMAND     COMMAND is a text for bash; `on HOST COMMAND...` and `rsh`
#                                        are in PATH
#
# It needs root. Hosts, daemons and files are in its own namespaces (processes, mounts, network), the
# files on a tmpfs there: everything ends with the script, in any case, and does not affect a Slurm of
# this machine. Exit status: COMMAND's; 77: this machine lacks something.
set -euo pipefail

skip() {
    echo "slurm_lab: $*" >&2
    exit 77
}

if [ "${1-}" != --inside ]; then
    [ "$(id -u)" = 0 ] || skip 'a Slurm of its own needs root'
    for tool in unshare nsenter ip slurmctld slurmd srun munged; do
        command -v "$tool" >/dev/null || skip "no $tool here: make slurm installs what is missing"
    done
    own=(unshare --mount --net --pid --fork --kill-child --mount-proc)
    "${own[@]}" true 2>/dev/null || skip 'namespaces are not permitted here'
    exec "${own[@]}" "$0" --inside "$1"
fi

# ---- three hosts -----------------------------------------------------------------------------------

mount -t tmpfs tmpfs /run || skip 'no tmpfs here'
lab=/run/lab
mkdir -p $lab/bin $lab/state $lab/munge /run/netns
ip link set lo up
ip link add br0 type bridge 2>/dev/null || skip 'the kernel has no bridges'
ip link set br0 up
for k in 1 2 3; do
    ip netns add n$k
    ip link add v$k type veth peer name eth0 netns n$k 2>/dev/null ||
        skip 'the kernel has no veth devices'
    ip link set v$k master br0 up
    ip -n n$k addr add 10.78.0.$k/24 dev eth0
    ip -n n$k link set eth0 up
    ip -n n$k link set lo up
    touch $lab/uts.n$k && mkdir $lab/spool.n$k
    unshare --uts=$lab/uts.n$k hostname n$k
done
printf '%s\n' '127.0.0.1 localhost' '10.78.0.1 n1' '10.78.0.2 n2' '10.78.0.3 n3' >$lab/hosts
mount --bind $lab/hosts /etc/hosts
cat >$lab/bin/on <<'END'
#!/bin/sh
host=$1 && shift
exec nsenter --net=/run/netns/$host --uts=/run/lab/uts.$host "$@"
END
cat >$lab/bin/rsh <<'END'
#!/bin/sh
while [ "${1#-}" != "$1" ]; do shift; done
host=$1 && shift
exec on "$host" sh -c "$*"
END
chmod 755 $lab/bin/on $lab/bin/rsh
export PATH=$lab/bin:$PATH SLURM_CONF=$lab/slurm.conf

# ---- their Slurm -----------------------------------------------------------------------------------

cat >$SLURM_CONF <<END
ClusterName=lab
SlurmctldHost=n1(10.78.0.1)
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket=$lab/munge/socket,cred_expire=10
CredType=cred/munge
StateSaveLocation=$lab/state
SlurmdSpoolDir=$lab/spool.%n
SlurmctldPidFile=$lab/slurmctld.pid
SlurmdPidFile=$lab/slurmd.%n.pid
SlurmctldLogFile=$lab/slurmctld.log
SlurmdLogFile=$lab/slurmd.%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
SchedulerParameters=sched_interval=1,batch_sched_delay=0,bf_interval=1
ReturnToService=2
KillWait=2
JobRequeue=1
NodeName=n[1-3] CPUs=16
PartitionName=all Nodes=n[1-3] Default=YES MaxTime=INFINITE State=UP
END
echo 'CgroupPlugin=cgroup/v1' >$lab/cgroup.conf
echo 'PMIxCliTmpDirBase=/run/pmix' >$lab/mpi.conf
# Slurm loads libpmix.so; only the package libpmix-dev has a file of that name.
for libpmix in /usr/lib/*/pmix2/lib/libpmix.so.2; do
    [ -e "$libpmix" ] || continue
    cp -a "${libpmix%/*}" $lab/pmix && ln -sf libpmix.so.2 $lab/pmix/libpmix.so
    mount --bind $lab/pmix "${libpmix%/*}"
done

failed() {
    tail -n 5 $lab/*.log >&2
    skip "$*"
}
await() { # SECONDS WHAT COMMAND...
    local end=$((SECONDS + $1)) what=$2
    shift 2
    until "$@" >/dev/null 2>&1; do
        [ $SECONDS -lt $end ] || failed "$what"
        sleep 0.05
    done
}
head -c 1024 /dev/urandom >$lab/munge/key && chmod 400 $lab/munge/key
chmod 755 $lab $lab/munge
on n1 munged --force --socket=$lab/munge/socket --key-file=$lab/munge/key \
    --pid-file=$lab/munge/pid --log-file=$lab/munged.log --seed-file=$lab/munge/seed 2>/dev/null ||
    failed 'munged does not start'
await 20 'munged does not answer' munge --socket=$lab/munge/socket --no-input
on n1 slurmctld -c || failed 'slurmctld does not start'
for k in 1 2 3; do # they share a disk, but not the sockets of PMIx
    on n$k unshare --mount sh -c "mkdir -p /run/pmix && mount -t tmpfs tmpfs /run/pmix &&
        exec slurmd -N n$k" || failed "slurmd does not start on n$k"
done
idle() { [ "$(on n1 sinfo --noheader --states=idle --format=%D)" = 3 ]; }
await 60 'the hosts do not come to slurmctld' idle
trap 'exit 130' INT TERM # otherwise this script, as process 1 of its namespace, would ignore them
on n1 bash -c "$2" </dev/null &
wait $!
