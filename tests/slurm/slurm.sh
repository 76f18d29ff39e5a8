#!/usr/bin/env bash
# slurm.sh - examples/slurm.sbatch on a real Slurm: two nodes that are network namespaces of this
# machine, with a name and a hosts file each, a controller, and munge between them.
#
#   slurm.sh FOLDER [PART...]   FOLDER is where train_images, steps and, if there is an Open MPI,
#                               steps_mpi are; the parts are functions of this file, else all
#
# Needs root, as it makes namespaces. Ends with 77 where that is not allowed. Nothing of the
# machine's own Slurm is read, and all is taken away in the end.

set -eu
HERE=$PWD
WORK=$(cd "$1" && pwd)
ID=dpslurm$$
NET=10.$((64 + $$ % 64)).$((RANDOM % 256))
ROOM=$(mktemp -d "${TMPDIR:-/tmp}/$ID-XXXXXX")
chmod 755 "$ROOM" # else munge takes nobody for able to reach it
export SLURM_CONF=$ROOM/slurm.conf
failed=0 passed=0

# ---- the cluster ----------------------------------------------------------------------------------

on() { # NODE COMMAND...
    local node=$1
    shift
    # shellcheck disable=SC2016 # that shell expands it
    ip netns exec "$ID-$node" unshare --uts sh -c 'hostname "$0" && exec "$@"' "node$node" "$@"
}

daemon() { # NAME COMMAND...: its process becomes the command
    local name=$1
    shift
    "$@" >"$ROOM/$name.out" 2>&1 &
    echo $! >>"$ROOM/pids"
}

take_down() {
    local i pid
    set +e
    on 1 scancel --user=root
    for i in 1 2; do
        for pid in $(ip netns pids "$ID-$i" 2>/dev/null); do kill -KILL "$pid"; done
        ip netns del "$ID-$i"
        rm -rf "/etc/netns/$ID-$i"
    done
    rmdir /etc/netns
    if [ -e "$ROOM/pids" ]; then xargs kill -KILL <"$ROOM/pids"; fi
    wait
    rm -rf "$ROOM"
} >/dev/null 2>&1

make_nodes() {
    local i
    for i in 1 2; do
        ip netns add "$ID-$i" && ip -n "$ID-$i" link set lo up || return 1
        mkdir -p "/etc/netns/$ID-$i"
        printf '127.0.0.1 localhost\n%s.1 node1\n%s.2 node2\n' "$NET" "$NET" \
            >"/etc/netns/$ID-$i/hosts"
    done
    ip link add eth1 netns "$ID-1" type veth peer name eth1 netns "$ID-2" || return 1
    for i in 1 2; do
        ip -n "$ID-$i" addr add "$NET.$i/24" dev eth1 && ip -n "$ID-$i" link set eth1 up || return 1
    done
}

configure() {
    mkdir "$ROOM/state" "$ROOM/node1" "$ROOM/node2"
    (umask 077 && head -c 128 /dev/urandom >"$ROOM/munge.key")
    echo "CgroupPlugin=cgroup/v1" >"$ROOM/cgroup.conf" # which nothing here uses
    cat >"$SLURM_CONF" <<TEXT
ClusterName=$ID
SlurmctldHost=node1
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket=$ROOM/munge.socket,cred_expire=20
CredType=cred/munge
StateSaveLocation=$ROOM/state
SlurmdSpoolDir=$ROOM/%n
TmpFS=$ROOM/%n
SlurmctldPidFile=$ROOM/controller.pid
SlurmdPidFile=$ROOM/%n.pid
SlurmctldLogFile=$ROOM/controller.log
SlurmdLogFile=$ROOM/%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
ReturnToService=2
NodeName=node1 NodeAddr=$NET.1 CPUs=4 State=UNKNOWN
NodeName=node2 NodeAddr=$NET.2 CPUs=4 State=UNKNOWN
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
TEXT
}

wait_for() { # SECONDS WHAT COMMAND...: until it succeeds, or cannot any more
    local until=$((SECONDS + $1)) what=$2 over
    shift 2
    while over=$(job_is_over) && ! "$@" >/dev/null 2>&1; do
        if [ $SECONDS -ge $until ] || [ "$over" = yes ]; then
            echo "# waited in vain for $what"
            return 1
        fi
        sleep 0.2
    done
}

job_is_over() { if [ -n "${JOB:-}" ] && has_ended; then echo yes; else echo no; fi; }

nodes_are_idle() { [ "$(on 1 sinfo --noheader --states=idle --format=%D)" = 2 ]; }

complain() {
    tail -n 5 "$ROOM"/*.out
    exit 1
}

start() {
    local i
    trap take_down EXIT
    trap 'exit 1' HUP INT TERM
    make_nodes 2>/dev/null || { echo "no network namespaces here: they want root"; exit 77; }
    configure
    daemon munged munged --foreground --force --key-file="$ROOM/munge.key" --socket="$ROOM/munge.socket" \
        --pid-file="$ROOM/munge.pid" --log-file="$ROOM/munge.log" --seed-file="$ROOM/munge.seed"
    wait_for 60 munge munge --no-input --socket="$ROOM/munge.socket" || complain
    daemon controller on 1 slurmctld -D
    for i in 1 2; do daemon "slurmd$i" on $i slurmd -D -N node$i; done
    wait_for 120 "two nodes" nodes_are_idle || complain
}

# ---- jobs -----------------------------------------------------------------------------------------

submit() { # PROGRAM...: JOB is its number, in a folder of its own
    rm -rf "$WORK/job" && mkdir "$WORK/job"
    JOB=$(cd "$WORK/job" &&
        on 1 sbatch --parsable "$HERE/examples/slurm.sbatch" "$@")
}

field() { on 1 scontrol --oneliner show job "$JOB" | grep -o "\b$1=[^ ]*" | cut -d= -f2; }

has_ended() { case $(field JobState) in PENDING | RUNNING | COMPLETING | REQUEUED) false ;; esac }

all_logs_have() { # TEXT
    [ "$(grep -l -e "$1" "$WORK/job/train-$JOB"-[0-3].log 2>/dev/null | wc -l)" = 4 ]
}

check() { # WHAT COMMAND...
    local what=$1
    shift
    if "$@"; then
        passed=$((passed + 1))
        echo "ok - $what"
    else
        failed=$((failed + 1))
        echo "not ok - $what"
        tail -n 20 "$WORK/job"/*.log | sed 's/^/# /'
    fi
}

state_is() {
    wait_for 180 "the end of job $JOB" has_ended && [ "$(field JobState)" = "$1" ]
}

train() {
    submit "$WORK/train_images" model.dp
    check "a net is trained on two nodes" state_is COMPLETED
    check "process 0 says what came of it" grep -q "averaged" "$WORK/job/train-$JOB-0.log"
    check "the checkpoint is there" test -s "$WORK/job/model.dp"
    check "the others have nothing to say" test ! -s "$WORK/job/train-$JOB-3.log"
}

on_both_nodes() {
    grep -q "process 1 of 4 on node1 by slurm" "$WORK/job/train-$JOB-1.log" &&
        grep -q "process 2 of 4 on node2 by slurm" "$WORK/job/train-$JOB-2.log"
}

restarted() { [ "$(field Restarts)" = 1 ]; }

# Slurm waits for cred_expire before it starts a job again.
goes_on() {
    check "and goes on from its checkpoint" wait_for 300 "from step" all_logs_have \
        "from step [1-9]"
    touch "$WORK/job/enough"
    check "up to the end" state_is COMPLETED
    check "as all its processes say" all_logs_have "^ended after step"
}

# The shell of the job gets the signal that it would get before the end of its time.
requeue() {
    submit "$WORK/steps" .
    check "all take steps" wait_for 120 "step 3" all_logs_have "^step 3$"
    check "two processes are on each node" on_both_nodes
    on 1 scancel --batch --signal=USR1 "$JOB"
    check "a job is put back before its time is up" wait_for 120 "the queue" restarted
    goes_on
}

# It may be on its way by itself.
node_comes_back() { on 1 scontrol update nodename=node2 state=resume || nodes_are_idle; }

lose_a_node() {
    submit "$WORK/steps" .
    check "all take steps as before" wait_for 120 "step 3" all_logs_have "^step 3$"
    on 1 scontrol update nodename=node2 state=down reason=lost
    check "a job is put back when a node is lost" wait_for 120 "the queue" restarted
    check "until that is back" wait_for 120 "node2" node_comes_back
    goes_on
}

lose_a_process() {
    submit "$WORK/steps" .
    check "all take steps again" wait_for 120 "step 3" all_logs_have "^step 3$"
    kill -KILL "$(sed -n 's/^process 2 of 4.* is \([0-9]*\), .*/\1/p' "$WORK/job/train-$JOB-2.log")"
    check "a job that has lost a process fails" state_is FAILED
    check "the others name it" others_name_it
}

others_name_it() {
    local i
    for i in 0 1 3; do
        grep -q "rank 2 (process 2, .*) has died" "$WORK/job/train-$JOB-$i.log" || return 1
    done
}

# By its name, and by how its addresses begin.
interfaces() {
    export DP_INTERFACE
    for DP_INTERFACE in eth1 "$NET."; do
        submit "$WORK/train_images"
        check "processes are told to use $DP_INTERFACE" state_is COMPLETED
    done
    DP_INTERFACE=eth2
    submit "$WORK/train_images"
    check "there is no eth2" state_is FAILED
    check "and all say which there are" all_logs_have "There are .*eth1 ($NET"
    unset DP_INTERFACE
}

# The nodes do not see each other's memory: data goes through MPI, which Slurm brings up.
machines_apart() {
    [ -x "$WORK/steps_mpi" ] || { echo "ok - no Open MPI # SKIP"; return; }
    export SLURM_MPI_TYPE=pmix
    submit sh -c "DP_MACHINE=\$SLURMD_NODENAME exec $WORK/steps_mpi ."
    check "machines without common memory meet through MPI" wait_for 120 "step 3" \
        all_logs_have "^step 3$"
    touch "$WORK/job/enough"
    check "and end together" state_is COMPLETED
    unset SLURM_MPI_TYPE
}

shift
[ $# -gt 0 ] || set -- train requeue lose_a_node lose_a_process interfaces machines_apart
start
for part; do $part; done
echo "$passed passed, $failed failed"
[ $failed = 0 ]
