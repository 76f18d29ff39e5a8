#!/usr/bin/env bash
# gpu.sh - dp_cuda.h and dp_nccl.h on real GPUs. Called by make, which exports the variables.
#
#   gpu.sh flags     the compiler's flags for CUDA's headers, and NCCL's where they are
#   gpu.sh test      the suites that have a table of devices, on all GPUs that are there
#   gpu.sh bench     the table of figures, and PyTorch's beside it where it is installed
#   gpu.sh pack      put the installed stb_ds.h where a machine without packages finds it
#
# CUDA is looked for in $CUDA_HOME, /usr/local/cuda, and the packages that Python has of it. The
# programs load its libraries when they run: $LD_LIBRARY_PATH is extended, never reset.

set -u
cd "$(dirname "$0")/.." || exit
JOBS=$(nproc 2>/dev/null || echo 4)
[ "$JOBS" -le 8 ] || JOBS=8 # each test has a context of its own on the GPU

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

# Memory errors inside kernels, on a part of the suites: every kernel is in it once.
memcheck() {
    has compute-sanitizer || { echo "ok - memcheck # SKIP no compute-sanitizer"; return; }
    compute-sanitizer --tool memcheck --target-processes all --error-exitcode 9 \
        build/gpu/tests "-j$JOBS" _into_and >build/log/memcheck.log 2>&1 &&
        compute-sanitizer --tool memcheck --target-processes all --error-exitcode 9 \
            build/gpu/tests "-j$JOBS" steps/ >>build/log/memcheck.log 2>&1 &&
        ! grep -q "ERROR SUMMARY: [1-9]" build/log/memcheck.log
    local rc=$?
    [ $rc = 0 ] && echo "ok - memcheck" || echo "not ok - memcheck (log: build/log/memcheck.log)"
    return $rc
}

test_gpu() {
    local rc=0 gpus
    needs_gpu
    mkdir -p build/log
    gpus=$(nvidia-smi -L | wc -l)
    for gpus in $(printf '1\n%s\n' "$gpus" | sort -nu); do
        echo "# all devices on $gpus GPUs"
        TEST_GPUS=$gpus TEST_TIMEOUT_SCALE=6 build/gpu/tests "-j$JOBS" "${T:-_cuda}" |
            tee "build/log/gpu$gpus.tap" | grep -E '^(not ok|#   |[0-9]+ passed)' || true
        grep -qE '^[1-9][0-9]* passed, 0 failed' "build/log/gpu$gpus.tap" || rc=1
    done
    memcheck || rc=1
    return $rc
}

bench_gpu() {
    local out=build/log/gpu-bench.txt
    needs_gpu
    mkdir -p build/log
    {
        date -u '+%Y-%m-%d'
        nvidia-smi --query-gpu=name,driver_version --format=csv,noheader
        build/gpu/bench
        python3 tests/bench/peers/torch_gpu.py 2>/dev/null || echo "PyTorch: absent"
    } | tee "$out"
    echo "(also in $out; results are kept under tests/bench/results/)"
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

case ${1:-} in
flags) flags ;;
test) test_gpu ;;
bench) bench_gpu ;;
pack) pack ;;
*)
    sed -n '2,/^$/s/^# \{0,1\}//p' "$0"
    exit 2
    ;;
esac
