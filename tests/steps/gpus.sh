# shellcheck shell=bash
# gpus.sh - steps of run.sh: dp_cuda.h, dp_nccl.h and dp_hip.h on simulated GPUs, and what is packed
# for real ones.

# The simulated CUDA itself, and that the bench for GPUs runs on it.
simulator() {
    build build/sim/selftest build/sim/bench || return 1
    build/sim/selftest
    if build/sim/bench 1 1 >"$LOGS/sim-bench.txt" 2>&1; then
        echo "ok - gpu-bench runs"
    else
        echo "not ok - gpu-bench runs (log: $LOGS/sim-bench.txt)"
    fi
}

# dp_cuda.h on the simulated CUDA: eight devices on one to eight GPUs; beside it what passes over all
# GPUs, in another order and on another number of them. Which calls fail changes from one commit to
# the next. With QUICK=1 they are fewer, half of the tests run, the next commit the other half, and the
# simulator is not asked about itself.
step_sim() {
    local gpus
    [ -n "${QUICK:-}" ] || simulator || return 1
    export SIM_SEED=${SIM_SEED:-1} TEST_STRIDE=${TEST_STRIDE:-${QUICK:+15}}
    TEST_STRIDE=${TEST_STRIDE:-$(in_turn 5 7 9)}
    gpus=${TEST_GPUS:-$(in_turn 1 2 3 4 5 6 7 8)}
    echo "# $gpus GPUs; TEST_GPUS=$gpus does the same again"
    if [ -n "${QUICK:-}" ]; then
        T=${T:-cuda $(in_turn %0 %1)} TEST_GPUS=$gpus tests sim 6
        return
    fi
    T=${T:-cuda} TEST_GPUS=$gpus tests sim 6
    export SIM_SEED=$((gpus + 1))
    T=${T:-backward/ _cuda} TEST_GPUS=$((9 - gpus)) tests sim 6
}

# The bugs of tests/ptx/plant.py, a third of them in turn, each in a copy of this PTX: the translator
# refuses it, or a test finds it.
ptx_planted() {
    local from=$1 bug finding words to third got=$LOGS/ptx-planted
    [ "${PTX_ARCHS:-}" = all ] && third='1~1p' || third=$(in_turn '1~3p' '2~3p' '3~3p')
    while IFS=: read -r bug finding words; do
        to=build/ptx/$bug
        if ! tests/ptx/plant.py "$bug" "$from" "$to.ptx" >"$got" 2>&1; then
            : # the place has gone in which it was
        elif [ -z "$words" ]; then
            tests/ptx/translate.py "$to.ptx" "$to.c" >"$got" 2>&1 && : >"$got"
        elif build "$to/tests" PTX_OPTIMIZE=-O0 >"$got"; then
            TEST_TIMEOUT_SCALE=6 "$to/tests" "$words" >"$got" 2>&1 && : >"$got"
        fi
        if grep -q "$finding" "$got"; then
            echo "ok - $bug is found: $finding"
        else
            echo "not ok - $bug is found: $finding"
            sed 's/^/#   /' "$got"
        fi
        rm -rf "$to" "$to".*
    done < <(tests/ptx/plant.py | sed -n "$third")
}

# What the compiler makes of the kernels, in place of them, under the suites that compare what kernels
# compute: who calls them, and what is done when a call fails, is the same with any kernels. The
# architectures up to 90 get one text, and those from 100 on another.
step_ptx() {
    local archs=(90 120) flags arch
    has python3 || { skip "kernels as PTX" "no python3"; return; }
    read -r -a flags < <(tests/gpu/gpu.sh flags)
    echo '#include <nvrtc.h>' | $CC "${flags[@]}" -fsyntax-only -x c - 2>/dev/null ||
        { skip "kernels as PTX" "no nvrtc.h"; return; }
    build build/ptx/write || return 1
    build/ptx/write >"$LOGS/ptx-archs" || { skip "kernels as PTX" "no NVRTC"; return; }
    if [ "${PTX_ARCHS:-}" = all ]; then
        for arch in $(<"$LOGS/ptx-archs"); do
            build "build/ptx/sm_$arch.c" && echo "ok - PTX for sm_$arch is understood"
        done
    else # a run has one of them, the next commit another one
        archs=("${PTX_ARCHS:-$(in_turn "${archs[@]}")}")
    fi
    export SIM_SEED=${SIM_SEED:-1}
    for arch in "${archs[@]}"; do
        echo "# sm_$arch; PTX_ARCHS=$arch does the same again"
        TEST_GPUS=4 tests_of "ptx/sm_$arch" 6 cuda_fuzz/ cuda_kernels/ "align/ _cuda" \
            "coll/ _cuda !nccl" "device/ _cuda" "norm/ _cuda" "train_kernels/ _cuda" "train/ _cuda"
    done
    [[ " ${archs[*]} " != *" 90 "* ]] || ptx_planted build/ptx/sm_90.ptx
}

# What make gpu-pack packs, on machines that have little else.
step_gpu() {
    local programs=(build/gpu/few/tests build/gpu/few/bench build/gpu/doctor build/gpu/hold)
    tests/gpu/gpu.sh flags | grep -q . || { skip "gpu-all" "no headers of CUDA"; return; }
    build build/sim/library.so build/sim/tests "${programs[@]}" &&
        tests/gpu/proof.sh build/sim/library.so build/sim/tests "${programs[@]}"
}

# dp_hip.h on the same GPUs, which then have HIP's names. What it compiles is dp_cuda.h, which
# step_sim has tested in whole: here it is asked whether each name stands for the right one, and what
# is done where HIP has no such function. That does not depend on the number of the call that fails,
# nor on what computes, which is the same object in both, nor on how long a link takes. A half of
# dp_cuda.h's tests, the next commit the other one; make hip has all.
step_hip() {
    local half words all=(cuda/ cuda_capture/ "cuda_host/ !any_number_of_channels" cuda_order/
        "cuda_several/ !links_carry !copies_over !that_hangs" "device/ _cuda" "coll/ nccl_cuda !own_order")
    half=$(half_of %0 %1)
    for words in "${!all[@]}"; do all[words]+=" $half"; done
    export SIM_SEED=${SIM_SEED:-1} TEST_STRIDE=7
    T=${T:-hip/} tests hip 6
    TEST_GPUS=8 tests_of hip 6 "${all[@]}" cuda_nccl/ends cuda_nccl/eight
}
