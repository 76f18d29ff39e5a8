#!/bin/sh
# gpu.sh - dp_cuda.h and dp_nccl.h on real GPUs, also where nothing can be built or installed.
#
#   tests/gpu/gpu.sh flags    the compiler's flags for CUDA's headers, and NCCL's
#   tests/gpu/gpu.sh pack FOLDER FILE...
#                          put the programs FILE into a folder, and what else is needed to run them, or
#                          to compile, on a machine with GPUs
#   FOLDER/gpu.sh all      what there is, whether it opens, kernels, the table of figures, PyTorch's
#                          beside it, all suites, compute-sanitizer: what is worth most first, for
#                          $GPU_SECONDS (570) at most
#   FOLDER/gpu.sh test     the suites, compute-sanitizer, and jobs whose processes come and go
#   FOLDER/gpu.sh bench    the figures
#
# In suites $T selects tests, by words.
#
# Results are in $OUT, else in FOLDER/out: summary.txt, a line as soon as it is known; logs.tar, what
# the parts that have ended have said; running.txt, what the one that runs says. So whoever is
# killed leaves all that there is. Each part is a session of its own, which ends with its share of
# the time, or with this script. Besides a shell it needs what every Linux has: tar, setsid, timeout,
# xargs and the like; from Python, nvidia-smi and compute-sanitizer it takes what is there.
#
# CUDA is looked for in $CUDA_HOME, else /usr/local/cuda, and in the packages that Python has of it.
# The programs load its libraries when they run: $LD_LIBRARY_PATH is extended, never reset.

set -u
HERE=$(cd "$(dirname "$0")" && pwd) || exit
SELF=$HERE/gpu.sh

has() { command -v "$1" >/dev/null 2>&1; }

# Python's packages nvidia.cuda_runtime and nvidia.cuda_nvrtc, or nvidia.cu13, and nvidia.nccl.
python_folders() {
    has python3 && python3 - <<'PYTHON' 2>/dev/null
import glob, site, sys
for root in dict.fromkeys(site.getsitepackages() + [site.getusersitepackages()] + sys.path):
    for folder in sorted(glob.glob(root + "/nvidia/cu*") + glob.glob(root + "/nvidia/nccl")):
        print(folder)
PYTHON
}

# The last is where containers are given the driver.
cuda_folders() {
    [ ! -d "${CUDA_HOME:-/usr/local/cuda}" ] || echo "${CUDA_HOME:-/usr/local/cuda}"
    python_folders
    [ ! -d /usr/local/nvidia ] || echo /usr/local/nvidia
}

flags() {
    cuda_folders | while read -r folder; do
        if [ -e "$folder/include/cuda_runtime_api.h" ] || [ -e "$folder/include/nvrtc.h" ]; then
            printf -- '-isystem %s/include ' "$folder"
        fi
        [ ! -e "$folder/include/nccl.h" ] ||
            printf -- '-DTEST_NCCL -isystem %s/include ' "$folder"
    done
}

# The newest version of the C library that a program asks for.
libc_of() { objdump -T "$@" | grep -o 'GLIBC_[0-9.]*' | sort -uV | tail -n 1; }

pack() {
    folder=$1
    shift
    mkdir -p "$folder/stb" || return
    for file in "$@"; do strip -o "$folder/${file##*/}" "$file" || return; done
    cp "$SELF" "$HERE/../bench/peers/torch_gpu.py" "$folder" || return
    git describe --always --dirty >"$folder/commit" 2>/dev/null
    for file in /usr/include /usr/include/stb build/stb; do
        [ ! -e "$file/stb_ds.h" ] || cp "$file/stb_ds.h" "$folder/stb"
    done
    echo "$folder: $(du -sk "$folder" | cut -f1) KiB, for $(libc_of "$@") and newer;" \
        "there: sh $folder/gpu.sh all"
}

# ---- on the machine with GPUs --------------------------------------------------------------------

now() { date +%s; }

# Kills what there is of a session, but its first process and the one that does it.
sweep() {
    session=$1
    read -r self line </proc/self/stat
    for file in /proc/[0-9]*/stat; do
        { read -r line <"$file"; } 2>/dev/null || continue
        process=${file#/proc/}
        process=${process%/stat}
        # shellcheck disable=SC2086 # behind the name: state, parent, group, session
        set -- ${line##*) }
        [ "${4:-}" != "$session" ] || [ "$process" = "$session" ] || [ "$process" = "$self" ] ||
            kill -KILL "$process"
    done 2>/dev/null
}

# guard SECONDS PARENT COMMAND...: the command, for so long at most, and no longer than that process
# is there. It is the first one of its session.
guard() {
    limit=$1 parent=$2
    shift 2
    rm -f "$WORK/late"
    "$@" &
    child=$!
    while [ "$limit" -gt 0 ] && kill -0 "$parent" 2>/dev/null; do
        sleep 1
        limit=$((limit - 1))
    done && : >"$WORK/late" && sweep $$ &
    wait $child
    status=$?
    [ ! -e "$WORK/late" ] || exit 124
    exit $status
}

say() {
    printf '%s\n' "$*"
    printf '%s\n' "$*" >>"$OUT/summary.txt"
}

# What was said so far: in full in $OUT/logs.tar, but of a log without end its two ends.
keep() {
    if [ "$(wc -c <"$OUT/running.txt")" -le 1000000 ]; then
        mv "$OUT/running.txt" "$WORK/logs/$1.txt"
    else
        head -c 500000 "$OUT/running.txt" >"$WORK/logs/$1.txt"
        { echo; echo ...; tail -c 500000 "$OUT/running.txt"; } >>"$WORK/logs/$1.txt"
        rm "$OUT/running.txt"
    fi
    tar -cf "$OUT/logs.new" -C "$WORK" logs && mv "$OUT/logs.new" "$OUT/logs.tar"
}

# What a log comes to, in the summary. False: it shows that something is not as it should be.
digest() {
    log=$WORK/logs/$1.txt
    shift
    case $1 in
    suites) suite_in_short "$@" ;;
    sanitize) sanitize_in_short ;;
    torch) grep -E '^(G[0-9]|PyTorch)' "$log" || tail -n 1 "$log" ;;
    *) head -n 100 "$log" ;;
    esac
}

# Failures, why some are skipped, and the count; or what has not ended.
suite_in_short() {
    shift 2
    grep -E '^(not ok|#   )' "$log" | head -n 80
    sed -n 's/^ok .*# SKIP \(.*\)/\1/p' "$log" | sort | uniq -c |
        while read -r times reason; do echo "skipped $times: $reason"; done
    if ! grep -E '^[0-9]+ passed' "$log"; then
        echo "$(grep -cE '^(not )?ok ' "$log") of $(sed -n 's/^1\.\.//p' "$log") have ended"
        { echo -; sed -n 's/^\(not \)*ok [0-9]* - \([^ ]*\).*/\2/p' "$log"; } >"$WORK/ended"
        "$HERE/tests" --list "$@" | grep -vxFf "$WORK/ended" | head -n "$JOBS" |
            sed 's/^/did not end: /'
    fi
    grep -qE '^[1-9][0-9]* passed, 0 failed' "$log"
}

sanitize_in_short() {
    grep -E '^(not ok|skipped)' "$log" | head -n 40
    good=$(grep -c '^ok' "$log") bad=$(grep -c '^not ok' "$log")
    grep -q '^SKIP ' "$log" || echo "$good passed, $bad failed"
    grep -q '^SKIP ' "$log" || { [ "$bad" = 0 ] && [ "$good" != 0 ]; }
}

FAILED=0

# part NAME SHARE COMMAND...: gpu.sh COMMAND, for SHARE percent of all the time at most
part() {
    name=$1 limit=$((GPU_SECONDS * $2 / 100 + 1)) start=$(now)
    shift 2
    [ $limit -lt $((END - start)) ] || limit=$((END - start))
    if [ $limit -lt 1 ]; then
        say "not ok - $name # no time is left for it"
        FAILED=1
        return
    fi
    say "# $name, for $limit s at most"
    setsid sh "$SELF" guard "$limit" $$ sh "$SELF" "$@" >"$OUT/running.txt" 2>&1 &
    SESSION=$!
    wait $SESSION
    status=$?
    sweep $SESSION
    keep "$name"
    digest "$name" "$@" >"$WORK/digest" || [ $status != 0 ] || status=1
    cat "$WORK/digest"
    cat "$WORK/digest" >>"$OUT/summary.txt"
    took=$(($(now) - start))
    skipped=$(sed -n 's/^SKIP //p' "$WORK/logs/$name.txt" | head -n 1)
    case $status in
    0) say "ok - $name # ${skipped:+SKIP $skipped, }$took s" ;;
    124) say "not ok - $name # more than $limit s" ;;
    *) say "not ok - $name # status $status, $took s" ;;
    esac
    [ $status = 0 ] || FAILED=1
}

facts() {
    echo "$(date -u '+%Y-%m-%d %H:%M'), packed at commit $(cat "$HERE/commit")"
    uname -srm
    ldd --version 2>/dev/null | head -n 1
    echo "$CORES cores, $(sed -n 's/^MemTotal: *//p' /proc/meminfo)"
    ! has python3 || python3 --version 2>&1
    if has nvidia-smi; then
        nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv,noheader | head -n 16
        nvidia-smi topo -m | head -n 16
    fi 2>&1
    echo "libraries are looked for in"
    echo "$GPU_LIBRARIES" | tr ':' '\n' | while read -r folder; do
        # shellcheck disable=SC2012 # names of libraries
        [ ! -d "$folder" ] || echo "  $folder: $(ls "$folder" |
            grep -E '^lib(cuda|cudart|nvrtc|nccl)\.so\.' | tr '\n' ' ')"
    done
}

open() { DP_DEBUG=info "$HERE/doctor"; }

# shellcheck disable=SC2086 # two numbers
figures() { "$HERE/bench" ${GPU_BENCH:-}; }

# What runs under a tool: words that select tests, a selection in a line. Each test costs seconds
# there, so there are few. memcheck: every kernel, at odd addresses too. initcheck: those that write
# all that they read. The others look at barriers and at what lanes share: sums.
selections() {
    case $1 in
    memcheck)
        echo "device/ _into_and _cuda !decorated"
        echo "device/axpby_cuda"
        echo "device/stats_of_every_dtype_cuda"
        echo "cuda_kernels/ !more_than_a_launch"
        echo "cuda_host/channels"
        echo "cuda/gpus_copy_directly"
        echo "train_kernels/ _cuda"
        ;;
    initcheck)
        echo "cuda_kernels/s"
        echo "train_kernels/steps _cuda"
        ;;
    jobs) # of processes that share a GPU: some die, others come, and groups of them
        echo "recover/"
        echo "mirrored/"
        echo "gpus !cuda"
        ;;
    *)
        echo "cuda_kernels/sums"
        echo "cuda_host/channels"
        echo "device/stats_of_every_dtype_cuda"
        echo "device/total_cuda"
        echo "train_kernels/sums _cuda"
        ;;
    esac
}

# One test, in the process that the tool has started. What CUDA answers is looked at by the library.
sanitize_one() {
    own=$WORK/$1.$$ options=
    [ "$1" != memcheck ] || options="--report-api-errors no"
    # shellcheck disable=SC2086 # several options
    TEST_HERE=1 timeout -k 2 $((1 + GPU_SECONDS / 10)) compute-sanitizer --tool "$1" $options \
        --error-exitcode 9 "$HERE/tests" "$2" >"$own" 2>&1
    status=$?
    if grep -q '^SKIP ' "$own"; then
        echo "skipped $2: $(sed -n 's/^SKIP //p' "$own")"
    elif [ $status = 0 ] && grep -qE 'SUMMARY: 0 (errors|hazards)' "$own"; then
        echo "ok - $2"
    else
        { echo "not ok - $2 # status $status"; sed 's/^/#   /' "$own"; } >"$own.all"
        cat "$own.all"
    fi
}

sanitize() {
    has compute-sanitizer || { echo "SKIP no compute-sanitizer"; return; }
    # shellcheck disable=SC2086 # several words
    selections "$1" | while read -r words; do "$HERE/tests" --list $words; done |
        sort -u >"$WORK/selected"
    export TEST_TIMEOUT_SCALE=20
    xargs -P "$JOBS" -I{} sh "$SELF" sanitize_one "$1" {} <"$WORK/selected"
    ! grep -qi "device not supported" "$OUT/running.txt" ||
        echo "SKIP compute-sanitizer: this device is not supported"
}

# suites GPUS WORDS...
suites() {
    TEST_GPUS=$1
    shift
    export TEST_GPUS
    TEST_TIMEOUT_SCALE=${TEST_TIMEOUT_SCALE:-3} "$HERE/tests" "-j$JOBS" "$@"
}

# With the libraries that it brings along itself.
torch() {
    has python3 || { echo "SKIP PyTorch: no python3"; return; }
    LD_LIBRARY_PATH=$PLAIN_LIBRARIES PYTHONUNBUFFERED=1 python3 "$HERE/torch_gpu.py"
}

# ---- all of it -----------------------------------------------------------------------------------

hold_gpus() {
    : >"$WORK/logs/hold.txt"
    setsid "$HERE/hold" >>"$WORK/logs/hold.txt" 2>&1 &
    HOLDER=$!
    tries=0
    while [ $tries -lt $((GPU_SECONDS / 20)) ] && kill -0 $HOLDER 2>/dev/null &&
        ! grep -q 'held open: ' "$WORK/logs/hold.txt"; do
        sleep 1
        tries=$((tries + 1))
    done
    say "$(cat "$WORK/logs/hold.txt")"
    GPUS=$(sed -n 's/^GPUs held open: //p' "$WORK/logs/hold.txt")
    GPUS=${GPUS:-1}
}

end() {
    trap - EXIT INT TERM
    sweep "${SESSION:-none}"
    kill -KILL "${HOLDER:-}" 2>/dev/null
    if [ -e "$OUT/running.txt" ]; then
        say "not ok - $name # stopped from outside"
        keep "$name"
    fi
    rm -rf "$WORK"
    exit "$1"
}

begin() {
    OUT=${OUT:-$HERE/out}
    GPU_SECONDS=${GPU_SECONDS:-$1}
    END=$(($(now) + GPU_SECONDS))
    WORK=${TMPDIR:-/tmp}/dp-gpu.$$
    CORES=$(nproc 2>/dev/null || echo 4)
    JOBS=$((CORES < 8 ? CORES : 8)) # each test has a context of its own on the GPU
    PLAIN_LIBRARIES=${LD_LIBRARY_PATH:-}
    GPU_LIBRARIES=$(cuda_folders | while read -r folder; do
        printf '%s:%s:' "$folder/lib64" "$folder/lib"
    done)$PLAIN_LIBRARIES
    LD_LIBRARY_PATH=${GPU_LIBRARIES%:}
    PATH=$PATH:${CUDA_HOME:-/usr/local/cuda}/bin:/usr/local/nvidia/bin
    XDG_CACHE_HOME=$WORK/cache
    DP_LAUNCH=none # whatever has started this
    unset DP_DEBUG DP_DEVICES DP_CACHE DP_PEERS DP_NCCL DP_TRACE DP_SIMD
    mkdir -p "$OUT" "$WORK/logs" || exit
    rm -f "$OUT/summary.txt" "$OUT/logs.tar" "$OUT/running.txt"
    export OUT GPU_SECONDS WORK CORES JOBS PLAIN_LIBRARIES GPU_LIBRARIES \
        LD_LIBRARY_PATH PATH XDG_CACHE_HOME DP_LAUNCH
    trap 'end 1' INT TERM
    part facts 5 facts
    hold_gpus
    part open 10 open
}

all_suites() { # SHARE
    # shellcheck disable=SC2086 # several words
    for count in $(printf '1\n%s\n' "$GPUS" | sort -nu); do
        part "suites-on-$count" "$1" suites "$count" cuda ${T:-}
    done
}

# Few at a time, as their connections are made again and again.
jobs() { # SHARE
    JOBS=$((JOBS / 4 + 1))
    number=0
    selections jobs >"$WORK/jobs"
    # shellcheck disable=SC2086 # several words
    while read -r words <&3; do
        number=$((number + 1))
        part "jobs-$number" "$1" suites 1 $words
    done 3<"$WORK/jobs"
}

sanitizers() { # SHARE
    for tool in memcheck initcheck racecheck synccheck; do part $tool "$1" sanitize $tool; done
}

case ${1:-} in
flags) flags ;;
pack)
    shift
    pack "$@"
    ;;
all)
    begin 570
    # shellcheck disable=SC2086 # several words
    {
        part kernels 15 suites "$GPUS" cuda_kernels/ ${T:-}
        part pairs 10 suites "$GPUS" pair _cuda ${T:-}
    }
    part bench 25 figures
    part torch 15 torch
    all_suites 60
    sanitizers 20
    end $FAILED
    ;;
test)
    begin 7200
    all_suites 40
    sanitizers 20
    [ -n "${T:-}" ] || jobs 20
    end $FAILED
    ;;
bench)
    begin 1200
    part bench 40 figures
    part torch 40 torch
    end $FAILED
    ;;
guard | facts | open | figures | suites | selections | sanitize | sanitize_one | torch) # of parts
    "$@"
    ;;
*)
    sed -n '2,/^$/s/^# \{0,1\}//p' "$0"
    exit 2
    ;;
esac
