#!/usr/bin/env bash
# gpu.sh - dp_cuda.h and dp_nccl.h on real GPUs. Called by make, which exports the variables.
#
#   gpu.sh flags     the compiler's flags for CUDA's headers, and NCCL's where they are
#   gpu.sh test      the suites that have a table of devices, on all GPUs that are there, and what
#                    each tool of compute-sanitizer finds in some of them
#   gpu.sh bench     the table of figures, and PyTorch's beside it where it is installed
#   gpu.sh all       build, test, sanitizers, bench: one after the other whatever fails, none longer
#                    than its share of $GPU_SECONDS (570), for a machine that is lent for minutes
#   gpu.sh pack      put the installed stb_ds.h where a machine without packages finds it
#
# Also what these are made of: build, suites, sanitize TOOL. Logs go to $OUT, else to build/log.
#
# CUDA is looked for in $CUDA_HOME, /usr/local/cuda, and the packages that Python has of it. The
# programs load its libraries when they run: $LD_LIBRARY_PATH is extended, never reset.

set -u
cd "$(dirname "$0")/.." || exit
CORES=$(nproc 2>/dev/null || echo 4)
JOBS=$((CORES < 8 ? CORES : 8)) # each test has a context of its own on the GPU
LOGS=${OUT:-build/log}
TOOLS=(memcheck initcheck racecheck synccheck) # of compute-sanitizer
mkdir -p "$LOGS"
export LOGS

has() { command -v "$1" >/dev/null 2>&1; }

# Folders of Python's packages nvidia.cuda_runtime and nvidia.cuda_nvrtc, or of nvidia.cu13, and of
# nvidia.nccl.
python_folders() {
    has python3 && python3 - <<'PYTHON' 2>/dev/null
import glob, site, sys
for root in site.getsitepackages() + [site.getusersitepackages()]:
    for folder in sorted(glob.glob(root + "/nvidia/cu*") + glob.glob(root + "/nvidia/nccl")):
        print(folder)
PYTHON
}

cuda_folders() {
    local folder
    for folder in "${CUDA_HOME:-}" /usr/local/cuda; do
        [ -n "$folder" ] && [ -d "$folder" ] && echo "$folder"
    done
    python_folders
}

flags() {
    local folder
    cuda_folders | while read -r folder; do
        [ -e "$folder/include/cuda_runtime_api.h" ] || [ -e "$folder/include/nvrtc.h" ] ||
            [ -e "$folder/include/cuda.h" ] && printf -- '-isystem %s/include ' "$folder"
        [ -e "$folder/include/nccl.h" ] && printf -- '-DTEST_NCCL -isystem %s/include ' "$folder"
    done
}

library_path() {
    local folder
    cuda_folders | while read -r folder; do
        printf '%s:%s:' "$folder/lib64" "$folder/lib"
    done
    echo "${LD_LIBRARY_PATH:-}"
}

needs_gpu() {
    if ! has nvidia-smi || ! nvidia-smi -L >/dev/null 2>&1; then
        echo "there is no NVIDIA GPU here (nvidia-smi -L fails); make sim tests without one"
        exit 1
    fi
    nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv,noheader
    LD_LIBRARY_PATH=$(library_path)
    export LD_LIBRARY_PATH
}

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
        echo "steps/ _cuda"
        ;;
    initcheck)
        echo "cuda_kernels/s"
        echo "steps/steps _cuda"
        ;;
    *)
        echo "cuda_kernels/statistics"
        echo "cuda_host/channels"
        echo "device/stats_of_every_dtype_cuda"
        echo "device/total_cuda"
        echo "steps/sums _cuda"
        ;;
    esac
}

selected() {
    local words
    # shellcheck disable=SC2086 # several of them
    selections "$1" | while read -r words; do build/gpu/tests --list $words; done | sort -u
}

# One test, in the process that the tool has started. What CUDA answers is looked at by the library.
sanitize_one() {
    local log=$LOGS/$1.${2//\//.}.txt options=()
    [ "$1" = memcheck ] && options=(--report-api-errors no)
    TEST_HERE=1 compute-sanitizer --tool "$1" "${options[@]}" --error-exitcode 9 \
        build/gpu/tests "$2" >"$log" 2>&1 && grep -qE 'SUMMARY: 0 (errors|hazards)' "$log" ||
        grep -q '^SKIP ' "$log" || echo "$2: $log"
}

sanitize() {
    local tool=$1 names bad
    has compute-sanitizer || { echo "ok - $tool # SKIP no compute-sanitizer"; return; }
    names=$(selected "$tool")
    [ -n "$names" ] || { echo "not ok - $tool # its words select no test"; return 1; }
    export -f sanitize_one
    export TEST_TIMEOUT_SCALE=20
    bad=$(xargs -P "$JOBS" -I{} bash -c 'sanitize_one "$@"' - "$tool" {} <<<"$names")
    if [ -z "$bad" ]; then
        echo "ok - $tool # $(wc -l <<<"$names") tests"
    elif grep -qsi "device not supported" "$LOGS/$tool".*.txt; then
        echo "ok - $tool # SKIP compute-sanitizer: this device is not supported"
    else
        echo "not ok - $tool"
        printf '%s\n' "$bad" | sed 's/^/#   /'
        return 1
    fi
}

# A run of all suites in a few lines: failures, why some are skipped, and the count.
in_short() {
    grep -E '^(not ok|#   )' "$1"
    sed -nE 's/^ok .*# SKIP (.*)/\1/p' "$1" | sort | uniq -c |
        while read -r times reason; do echo "skipped $times: $reason"; done
    grep -E '^[0-9]+ passed' "$1"
}

suites() {
    local rc=0 gpus log
    gpus=$(nvidia-smi -L | wc -l)
    for gpus in $(printf '1\n%s\n' "$gpus" | sort -nu); do
        log=$LOGS/gpu$gpus.tap
        echo "# all devices on $gpus GPUs"
        # shellcheck disable=SC2086 # T may be several words
        TEST_GPUS=$gpus TEST_TIMEOUT_SCALE=6 build/gpu/tests "-j$JOBS" ${T:-cuda} >"$log" 2>&1
        in_short "$log"
        grep -qE '^[1-9][0-9]* passed, 0 failed' "$log" || rc=1
    done
    return $rc
}

test_gpu() {
    local rc=0 tool
    suites || rc=1
    for tool in "${TOOLS[@]}"; do sanitize "$tool" || rc=1; done
    return $rc
}

bench_gpu() {
    local out=$LOGS/gpu-bench.txt
    (
        date -u '+%Y-%m-%d'
        nvidia-smi --query-gpu=name,driver_version --format=csv,noheader
        build/gpu/bench
        rc=$?
        python3 tests/bench/peers/torch_gpu.py 2>/dev/null || echo "PyTorch: absent"
        exit $rc
    ) | tee "$out"
    local rc=${PIPESTATUS[0]}
    echo "(also in $out; results are kept under tests/bench/results/)"
    return "$rc"
}

build_gpu() {
    local jobs=(-j"$CORES")
    [[ ${MAKEFLAGS:-} == *jobserver* ]] && jobs=()
    "${MAKE:-make}" -s -k --no-print-directory "${jobs[@]}" build/gpu/tests build/gpu/bench
}

# part SECONDS NAME...: gpu.sh NAME, for so long at most, with a log of its own. Its time goes by in a
# session of its own, which ends with it: tests have groups of theirs.
part() {
    local limit=$1 name=${*:2} start=$SECONDS session log rc
    log=$LOGS/part-${name// /-}.txt
    [ "$limit" -le $((GPU_SECONDS - SECONDS)) ] || limit=$((GPU_SECONDS - SECONDS))
    [ "$limit" -gt 0 ] || { echo "not ok - $name # no time is left for it"; return 1; }
    setsid timeout -k 5 "$limit" tests/gpu.sh "${@:2}" >"$log" 2>&1 &
    session=$!
    trap 'kill -TERM "-$session"; exit 1' INT TERM
    wait $session
    rc=$?
    [ $rc != 124 ] || pkill -KILL -s $session
    cat "$log"
    case $rc in
    0) echo "ok - $name # $((SECONDS - start)) s" ;;
    124 | 137) echo "not ok - $name # more than $limit s" ;;
    *) echo "not ok - $name # status $rc, $((SECONDS - start)) s" ;;
    esac
    return $rc
}

# Of ten minutes: more than all of it, as not every part needs its share.
all_parts() {
    local rc=0 tool
    part $((GPU_SECONDS / 3)) build || rc=1
    part $((GPU_SECONDS * 2 / 5)) suites || rc=1
    part $((GPU_SECONDS / 6)) bench || rc=1
    for tool in "${TOOLS[@]}"; do part $((GPU_SECONDS / 5)) sanitize "$tool" || rc=1; done
    echo "(logs are in $LOGS)"
    return $rc
}

pack() {
    local header
    mkdir -p build/stb
    for header in build/stb/stb_ds.h /usr/include/stb/stb_ds.h /usr/include/stb_ds.h; do
        [ -e "$header" ] || continue
        [ "$header" = build/stb/stb_ds.h ] || cp "$header" build/stb/
        echo "build/stb/stb_ds.h: take it along with the repository"
        return
    done
    echo "stb_ds.h is not installed here: apt-get install libstb-dev"
    return 1
}

GPU_SECONDS=${GPU_SECONDS:-570}

case ${1:-} in
flags) flags ;;
build) build_gpu ;;
pack) pack ;;
test | suites | sanitize | bench)
    needs_gpu
    case $1 in
    test) test_gpu ;;
    suites) suites ;;
    sanitize) sanitize "${2:?which tool}" ;;
    bench) bench_gpu ;;
    esac
    ;;
all) all_parts | tee "$LOGS/all.txt" && exit "${PIPESTATUS[0]}" ;;
*)
    sed -n '2,/^$/s/^# \{0,1\}//p' "$0"
    exit 2
    ;;
esac
