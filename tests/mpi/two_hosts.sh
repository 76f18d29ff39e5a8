#!/usr/bin/env bash
# two_hosts.sh - run a program by mpirun on two hosts, which are network namespaces of this machine.
#
#   two_hosts.sh openmpi|mpich EACH PROGRAM ARGUMENT...    EACH processes on each
#   two_hosts.sh agent HOST COMMAND...                     what mpirun calls instead of ssh
#
# Ends with 77 where that is not allowed.

NET=10.78.$((PPID % 250 + 1)) # tests run side by side

agent() {
    local host
    while [ "${1#-}" != "$1" ]; do shift; done
    host=$1
    shift
    exec ip netns exec "$TWO_HOSTS-${host##*.}" sh -c "$*"
}

drop() {
    ip netns del "$TWO_HOSTS-1"
    ip netns del "$TWO_HOSTS-2"
} 2>/dev/null

make() {
    local i
    for i in 1 2; do
        ip netns add "$TWO_HOSTS-$i" && ip -n "$TWO_HOSTS-$i" link set lo up || return 1
    done
    ip link add v netns "$TWO_HOSTS-1" type veth peer name v netns "$TWO_HOSTS-2" || return 1
    for i in 1 2; do
        ip -n "$TWO_HOSTS-$i" addr add "$NET.$i/24" dev v &&
            ip -n "$TWO_HOSTS-$i" link set v up || return 1
    done
} 2>/dev/null

if [ "$1" = agent ]; then
    shift
    agent "$@"
fi
mpi=$1 each=$2
shift 2
export TWO_HOSTS=dpmpi$$
trap drop EXIT
make || exit 77
agent=$(mktemp build/agent-XXXXXX)
printf '#!/bin/sh\nexec "%s" agent "$@"\n' "$PWD/$0" >"$agent"
chmod +x "$agent"
trap 'drop; rm -f "$agent"' EXIT
if [ "$mpi" = openmpi ]; then # which would take memory that both hosts see for one's own: tcp alone
    ip netns exec "$TWO_HOSTS-1" mpirun.openmpi --allow-run-as-root --bind-to none \
        --mca plm_rsh_agent "$PWD/$agent" --mca btl self,tcp \
        --mca btl_tcp_if_include "$NET.0/24" --mca oob_tcp_if_include "$NET.0/24" -x TEST_HERE \
        -H "$NET.1:$each,$NET.2:$each" -np $((2 * each)) "$@"
else
    ip netns exec "$TWO_HOSTS-1" mpirun.mpich -launcher ssh -launcher-exec "$PWD/$agent" \
        -hosts "$NET.1,$NET.2" -ppn "$each" -iface v -np $((2 * each)) "$@"
fi
