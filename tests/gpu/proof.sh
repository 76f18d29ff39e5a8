#!/usr/bin/env bash
# proof.sh - what make gpu-pack packs does its work on a machine with GPUs that has a shell and few
# commands, but no make, compiler or network: also where a GPU hangs, a test takes the suite with
# it, or nobody waits for the end. CUDA and NCCL are the simulator, found where Python or a Toolkit
# has them. Prints TAP; run by make test.
#
#   proof.sh LIBRARY SUITES PROGRAM...    the simulator, all suites of GPUs, and what is packed

set -u
cd "$(dirname "$0")/../.." || exit
BUILD=$PWD/build/proof
LIBRARY=$PWD/$1
SUITES=$2
shift 2
AT=$BUILD
rm -rf "$BUILD"
mkdir -p "$BUILD"

# What gpu.sh asks of a machine. No nvidia-smi: it says less where there is none.
COMMANDS="cat date dirname grep head ls mkdir mv nproc rm sed setsid sh sleep sort tail tar timeout
    tr uname uniq wc xargs"

has() { command -v "$1" >/dev/null 2>&1; }

# check NAME COMMAND...
check() {
    local name=$1
    shift
    if "$@" >"$BUILD/checked" 2>&1; then
        echo "ok - $name"
    else
        echo "not ok - $name"
        { echo "$*"; cat "$BUILD/checked"; } | sed 's/^/#   /'
        sed 's/^/#   said: /' "$AT/said" 2>/dev/null
    fi
}

# Is in the summary, one for each pattern.
says() {
    local pattern
    for pattern; do
        grep -qE -- "$pattern" "$AT/out/summary.txt" || { echo "no $pattern"; return 1; }
    done
}

says_not() { ! grep -E -- "$1" "$AT/out/summary.txt"; }

exits_with() { [ "$(cat "$AT/status")" = "$1" ] || { cat "$AT/status"; return 1; }; }

# files NAME...: there is nothing else in $OUT
files() { diff <(ls "$AT/out") <(printf '%s\n' "$@" | sort); }

keeps() {
    local name
    for name; do
        tar -tf "$AT/out/logs.tar" "logs/$name.txt" || return 1
    done
}

# It was cut, and not at its ends.
long_log() {
    tar -xOf "$AT/out/logs.tar" "logs/$1.txt" >"$AT/log" && grep -q '^first' "$AT/log" &&
        grep -q 'last$' "$AT/log" && [ "$(wc -c <"$AT/log")" -lt 1100000 ]
}

processes() { grep -lsz "$AT/pac[k]/" /proc/[0-9]*/cmdline; } # not this one

# Nothing of it runs any more, or will soon.
is_quiet() {
    local i
    for ((i = 0; i < 100; i++)); do
        [ -n "$(processes)" ] || return 0
        sleep 0.1
    done
    processes
    return 1
}

is_tidy() { ! ls "$AT" | grep dp-gpu; }

# ---- machines ------------------------------------------------------------------------------------

# In place of compute-sanitizer: $FOUND is what the tool of that name finds.
sanitizer() {
    cat <<'SH'
#!/bin/sh
tool=$2
while case $1 in --*) true ;; *) false ;; esac; do shift 2; done
case "$tool ${FOUND:-} $*" in
"initcheck nothing "*) echo "========= Error: Device not supported"; exit 1 ;;
"racecheck hazards "*total*) echo "========= RACECHECK SUMMARY: 1 hazards displayed"; exit 9 ;;
esac
[ "$tool" = initcheck ] || unset SIM_FATE
[ "${SIM_GPUS:-1}" = 0 ] || export SIM_GPUS=1 # no pairs to check
"$@" || exit
echo "========= ERROR SUMMARY: 0 errors"
SH
}

# The machine called dies has all from busybox, if it is here.
command_for() {
    if [ "$AT" = "$BUILD/dies" ] && has busybox; then
        command -v busybox
    elif [ "$1" = sh ]; then
        command -v dash || command -v sh
    else
        command -v "$1"
    fi
}

# machine NAME [FOLDER LIBRARY...]...: whose libraries are in such folders
machine() {
    local folder=/ name
    AT=$BUILD/$1
    shift
    mkdir -p "$AT/bin" "$AT/out" "$AT/driver"
    for name in $COMMANDS; do ln -s "$(command_for "$name")" "$AT/bin/$name"; done
    [ -z "$PYTHON" ] || ln -s "$PYTHON" "$AT/bin/python3"
    sanitizer >"$AT/bin/compute-sanitizer"
    chmod +x "$AT/bin/compute-sanitizer"
    ln -s "$LIBRARY" "$AT/driver/libcuda.so.1"
    for name; do
        case $name in
        */*) folder=$AT/$name && mkdir -p "$folder" ;;
        *) ln -s "$LIBRARY" "$folder/$name" ;;
        esac
    done
    cp -r "$BUILD/pack" "$AT/pack"
    for name in summary.txt logs.tar running.txt; do echo "not ok - old" >"$AT/out/$name"; done
}

# start COMMAND VARIABLE...: gpu.sh COMMAND on the machine; its process is $STARTED. What somebody
# debugs with, or a launcher has set, is not for it.
start() {
    local command=$1
    shift
    "${ALONE[@]}" env -i PATH="$AT/bin" HOME="$AT" TMPDIR="$AT" OUT="$AT/out" CUDA_HOME="$AT/cuda" \
        PYTHONUSERBASE="$AT/python" LD_LIBRARY_PATH="$AT/driver" GPU_BENCH="1 1" \
        TEST_STRIDE=11 T=every DP_DEVICES=nonsense RANK=0 WORLD_SIZE=2 "$@" "$AT/bin/sh" "$AT/pack/gpu.sh" "$command" >"$AT/said" 2>&1 &
    STARTED=$!
}

run() {
    start "$@"
    wait $STARTED
    echo $? >"$AT/status"
}

# Until the part has begun, and what it says has this in it.
reaches() {
    local i
    for ((i = 0; i < 600; i++)); do
        grep -q "^# $1," "$AT/out/summary.txt" && grep -q "$2" "$AT/out/running.txt" && return
        sleep 0.1
    done 2>/dev/null
}

# ---- what is proved ------------------------------------------------------------------------------

whole() {
    run all GPU_SECONDS=570
    check "gpu-all on a bare machine: everything passes" says_not '^not ok'
    check "gpu-all on a bare machine: all parts" says ' packed at commit [0-9a-f]' \
        '^GPUs held open: 1$' '^ok - facts' \
        '^ok - open' '^ok - kernels' '^ok - pairs' '^ok - bench' '^ok - torch # SKIP PyTorch' \
        '^ok - suites-on-1' '^ok - memcheck' '^ok - initcheck' '^ok - racecheck' '^ok - synccheck'
    check "gpu-all on a bare machine: all figures" says '^G1 ' '^G2 ' '^G3 ' '^G4 ' '^G5 ' \
        '^G6 ' '^G7 ' '^G8 ' '^G9 '
    check "gpu-all on a bare machine: its status" exits_with 0
    check "gpu-all on a bare machine: a summary and a tar" files summary.txt logs.tar
    check "gpu-all on a bare machine: all logs" keeps facts hold open kernels pairs bench torch \
        suites-on-1 memcheck initcheck racecheck synccheck
    check "gpu-all on a bare machine: nothing is left" is_quiet
    check "gpu-all on a bare machine: no files either" is_tidy
}

# Two GPUs. What hangs is the first look, and tests, where not even an alarm reaches them; the
# others, and the figures, are there.
hangs() {
    run all T=of_every GPU_SECONDS=100 SIM_GPUS=2 TEST_TIMEOUT_SCALE=0.1 FOUND=hazards \
        SIM_FATE="doctor load, tests stop 30"
    check "gpu-all, tests hang: they are named, and others pass" says '^GPUs held open: 2$' \
        '^ok +compiled ' '^not ok - open # more than 11 s' '^not ok - kernels #' \
        '^not ok .* device/.* # timed out after ' '^ok - bench' '^G8 ' '^not ok - suites-on-1 # status 1' \
        '^2 passed, 2 failed' '^not ok - suites-on-2 # status 1' '^ok - memcheck #' \
        '^not ok - cuda_kernels/.* # status 124' '^not ok - initcheck #' '^ok - synccheck #' \
        '^not ok - .* # status 9' '^[1-9] passed, 1 failed' '^not ok - racecheck #'
    check "gpu-all, tests hang: its status" exits_with 1
    check "gpu-all, tests hang: nothing is left" is_quiet
}

# The suite's own process is killed, as when the machine has no memory left. There is a PyTorch,
# which is to find its own libraries.
dies() {
    mkdir -p "$AT/$SITE"
    cat >"$AT/$SITE/../torch.py" <<'PYTHON'
import os, types
print("first" + 1300000 * "." + "last")
print("PyTorch in", os.environ["LD_LIBRARY_PATH"], "beside", os.environ["XDG_CACHE_HOME"])
cuda = types.SimpleNamespace(is_available=lambda: False)
PYTHON
    run all GPU_SECONDS=300 FOUND=nothing SIM_FATE="doctor die 1, tests die 30"
    check "gpu-all, a suite dies: what had not ended is named" says '^not ok - open # status 137' \
        '^[0-8] of 9 have ended' '^did not end: device/' '^not ok - suites-on-1 # status 137' '^ok - bench' '^G8 ' \
        '^ok - initcheck # SKIP compute-sanitizer: this device'
    [ -z "$PYTHON" ] || check "gpu-all, a suite dies: PyTorch has libraries of its own" says \
        "^PyTorch in $AT/driver beside $AT/dp-gpu" '^PyTorch has no GPU$' '^not ok - torch # status 1'
    [ -z "$PYTHON" ] || check "gpu-all, a suite dies: of a long log the two ends" long_log torch
    check "gpu-all, a suite dies: its status" exits_with 1
    check "gpu-all, a suite dies: nothing is left" is_quiet
}

# The driver never comes back: each part has its share of the time, and then there is none.
never_opens() {
    run all GPU_SECONDS=10 SIM_FATE="hold load, doctor load, tests load, bench load"
    check "gpu-all, no GPU opens: each part has its time" says '^ok - facts' \
        '^not ok - open # more than 2 s' '^not ok - kernels # ' '^not ok - pairs # ' \
        '^not ok - bench # ' '^not ok - synccheck # no time is left'
    check "gpu-all, no GPU opens: its status" exits_with 1
    check "gpu-all, no GPU opens: nothing is left" is_quiet
}

# The libraries and the driver are there, and no GPU: nothing has been tested.
no_gpu() {
    run test GPU_SECONDS=300 SIM_GPUS=0
    check "gpu-test without a GPU: no part passes" says '^cuInit: code 100' \
        '^0 passed, 0 failed, 9 skipped' '^not ok - suites-on-1 # status 1' \
        '^skipped cuda_kernels/.*: no GPU' '^0 passed, 0 failed$' '^not ok - memcheck # status 1'
    check "gpu-test without a GPU: its status" exits_with 1
    check "gpu-test without a GPU: nothing is left" is_quiet
}

stopped() { # SIGNAL COMMAND
    start "$2" GPU_SECONDS=300 SIM_FATE="doctor die 1, bench stop 1"
    reaches bench '^G9 '
    kill "-$1" $STARTED
    wait $STARTED 2>/dev/null
    check "gpu-$2, $1: what was known is there" says '^not ok - open # status'
    check "gpu-$2, $1: the logs of what had ended" keeps open
    check "gpu-$2, $1: nothing is left" is_quiet
}

killed() {
    stopped KILL all
    check "gpu-all, KILL: what the part had said" grep '^G9 ' "$AT/out/running.txt"
    check "gpu-all, KILL: kernels came before" says '^ok - kernels'
}

ended() {
    stopped TERM bench
    check "gpu-bench, TERM: it says so" says '^not ok - bench # stopped from outside'
    check "gpu-bench, TERM: what the part had said" keeps bench
    check "gpu-bench, TERM: a summary and a tar" files summary.txt logs.tar
}

# Words that select a test no more, since it has another name, would be missed by nobody else.
selects() {
    local tool words
    for tool in memcheck initcheck racecheck jobs; do
        while read -r words; do
            # shellcheck disable=SC2086 # several words
            "$SUITES" --list $words | grep -q . || { echo "$tool: $words"; return 1; }
        done < <(tests/gpu/gpu.sh selections $tool)
    done
}

# Older C libraries do for what is packed; a newer one here may have given its names to more.
packed() {
    local here wanted
    here=$(getconf GNU_LIBC_VERSION | cut -d' ' -f2)
    wanted=$(grep -o 'GLIBC_[0-9.]*' "$BUILD/packed" | cut -d_ -f2)
    if [ "$(printf '%s\n' 2.34 "$wanted" | sort -V | tail -n 1)" = 2.34 ]; then
        echo "ok - gpu-pack: a C library of version 2.34 will do"
    elif [ "$(printf '%s\n' 2.37 "$here" | sort -V | head -n 1)" = 2.37 ]; then
        echo "ok - gpu-pack # SKIP gpu-pack: the C library here is $here, and so must it be there"
    else
        echo "not ok - gpu-pack: a C library of version $wanted is needed"
    fi
}

tests/gpu/gpu.sh pack "$BUILD/pack" "$@" >"$BUILD/packed" || { cat "$BUILD/packed"; exit 1; }
packed
check "gpu-all: what is to run under compute-sanitizer is there" selects
PYTHON=$(python3 -c 'import sys; print(sys.executable)' 2>/dev/null)
ALONE=()
for command in "unshare -n" "unshare -rn"; do
    # shellcheck disable=SC2206 # two words
    if $command true 2>/dev/null; then ALONE=($command) && break; fi
done

# Where Python 3 has packages of the user's, and a Toolkit its libraries.
SITE=cuda/lib64
[ -z "$PYTHON" ] || SITE=python/lib/$("$PYTHON" -c \
    'import sys; print("python%d.%d" % sys.version_info[:2])')/site-packages/nvidia

# proof NAME [FOLDER LIBRARY...]...: on a machine with these
proof() {
    machine "$@"
    "$1"
} >"$BUILD/$1.tap" 2>&1

proof whole "$SITE/cu13/lib" libcudart.so.13 libnvrtc.so.13 "$SITE/nccl/lib" libnccl.so.2 &
proof hangs "$SITE/cuda_runtime/lib" libcudart.so.13 "$SITE/cuda_nvrtc/lib" libnvrtc.so.13 \
    "$SITE/nccl/lib" libnccl.so.2 &
proof dies cuda/lib64 libcudart.so.13 libnvrtc.so.13 libnccl.so.2 &
proof no_gpu cuda/lib64 libcudart.so.13 libnvrtc.so.13 &
proof never_opens cuda/lib libcudart.so.13 libnvrtc.so.13 &
proof killed cuda/lib64 libcudart.so.13 libnvrtc.so.13 &
proof ended cuda/lib64 libcudart.so.13 libnvrtc.so.13 &
wait
cd "$BUILD" && cat whole.tap hangs.tap dies.tap no_gpu.tap never_opens.tap killed.tap ended.tap
