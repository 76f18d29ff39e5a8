#!/usr/bin/env bash
# run.sh - what the Makefile's test targets run. Called by make, which exports the variables.
#
#   run.sh steps STEP...     run the steps, show what failed, end with "N passed, N failed"
#   run.sh demo PROGRAM...   run the examples
#   run.sh conform           try the table that $BACKEND and $TABLE name, and $COLL
#   run.sh fuzz_more SECONDS PROGRAM...   let fuzzers look for new inputs
#
# A step is a function step_NAME here that prints TAP. Its log is build/log/NAME.tap. Two steps run at
# a time, as each has moments when it only waits; they are shown in order.

set -u
cd "$(dirname "$0")/.." || exit
JOBS=$(nproc 2>/dev/null || echo 2)
LOGS=build/log
unset "${!DP_@}" # what the user debugs with must not change what the tests see
export DP_LAUNCH=none # nor what has started make: mpirun, a step of Slurm

has() { command -v "$1" >/dev/null 2>&1; }

skip() { echo "ok - $1 # SKIP $1: $2"; }

# Build make targets; when that fails, say so as a test that failed.
build() {
    local jobs=(-j"$JOBS")
    [[ ${MAKEFLAGS:-} == *jobserver* ]] && jobs=()
    "${MAKE:-make}" -s -k --no-print-directory "${jobs[@]}" "$@" 2>&1 || {
        echo "not ok - build $*"
        return 1
    }
}

# Sanitizers of older compilers cannot live with much address space randomization.
without_aslr() {
    if setarch -R true 2>/dev/null; then setarch -R "$@"; else "$@"; fi
}

can_sanitize() {
    local probe=$LOGS/probe-${1%%,*} # two steps may ask at the same time
    mkdir -p "$LOGS"
    echo 'int main(void) { return 0; }' |
        $CC "-fsanitize=$1" -x c - -o "$probe" 2>/dev/null && without_aslr "$probe"
}

# tests VARIANT TIMEOUT_SCALE [COMMAND...]: build the variant's binary, run it under the command
tests() {
    local variant=$1 scale=$2
    shift 2
    build "build/$variant/tests" || return 1
    # Many tests wait for time-outs and for processes of theirs: more of them than cores.
    # shellcheck disable=SC2086 # T may be several words
    TEST_TIMEOUT_SCALE=$scale "$@" "build/$variant/tests" "-j$((JOBS + 1))" ${T:-}
}

step_lint() { tests/lint.sh; }

step_compile() {
    build build/whole/dp.h || return 1
    tests/compile/run.sh
}

# The limits are generous here: the machine may be busy, and only what hangs ever reaches them.
step_gcc() { tests gcc 3; }

# The library by clang, with the tests that gcc has compiled; of those it is asked what it thinks.
# Which call fails is no question of the compiler: the loops over all of them are gcc's.
step_clang() {
    has "$CLANG" || { skip "tests with clang" "not installed"; return; }
    build build/clang/silent && echo "ok - $CLANG has nothing to say about the tests"
    TEST_STRIDE=3 tests "with/$CLANG" 3
}

# The oldest and the newest one of a family, but for the version that tests everything.
others() {
    local usual
    usual=$("$2" -dumpversion 2>/dev/null)
    compgen -c | grep -xE "$1-[0-9]+" | grep -vx "$1-${usual%%.*}" | sort -uV | sed -n '1p;$p' | uniq
}

# Conversions and vectors are where compilers differ; what has threads has them from the system.
step_compilers() {
    local cc
    for cc in $(others gcc "$CC") $(others clang "$CLANG"); do
        build "build/with/$cc/tests" || continue
        echo "ok - $cc compiles dp.h without a warning"
        TEST_TIMEOUT_SCALE=3 "build/with/$cc/tests" "-j$JOBS" "${T:-tensor/}"
    done
    [ -n "${cc:-}" ] || skip "other compilers" "none installed"
}

# Another C library: what computes, and what has threads and processes.
step_musl() {
    has musl-gcc || { skip "tests with musl" "no musl-gcc"; return; }
    tests musl 3
}

# What things cost, and tables that do at once, in one thread, what those that put off their work do
# in several: a sanitizer has nothing to find there.
NOT_SANITIZED="!growth/ !_decorated_toy"

step_asan() {
    can_sanitize address,undefined || { skip "tests under ASan" "$CC cannot"; return; }
    # Not detect_stack_use_after_return: gcc before 14 then misaligns vectors on the stack (PR 110027).
    export ASAN_OPTIONS=strict_string_checks=1
    export UBSAN_OPTIONS=print_stacktrace=1
    T=${T:-$NOT_SANITIZED} tests asan 6 without_aslr
}

step_tsan() {
    can_sanitize thread || { skip "tests under TSan" "$CC cannot"; return; }
    export TSAN_OPTIONS=die_after_fork=0:second_deadlock_stack=1
    T=${T:-$NOT_SANITIZED !_toy !_decorated !one_by_one !cut_short} tests tsan 10 without_aslr
}

# dp_cuda.h on the simulated CUDA, which itself is tested first.
step_sim() {
    build build/sim/selftest build/sim/bench || return 1
    build/sim/selftest
    if build/sim/bench 1 1 >"$LOGS/sim-bench.txt" 2>&1; then
        echo "ok - gpu-bench runs"
    else
        echo "not ok - gpu-bench runs (log: $LOGS/sim-bench.txt)"
    fi
    export SIM_SEED=${SIM_SEED:-1}
    T=${T:-cuda} TEST_GPUS=8 tests sim 6
    # What passes over all GPUs, in other orders and on other numbers of them.
    local seed
    for seed in 2 3; do
        SIM_SEED=$seed T=${T:-backward/ _cuda} TEST_GPUS=$((seed + 1)) tests sim 6
    done
    # The same on one GPU, but for those that have GPUs of their own, and what one computes alone.
    T=${T:-_cuda !align/ !device/reduce !device/pad !own_order} TEST_GPUS=1 tests sim 6
}

# Every bug of tests/ptx/plant.py, in a copy of this PTX: the translator refuses it, or a test finds it.
ptx_planted() {
    local from=$1 bug finding words to got=$LOGS/ptx-planted
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
    done < <(tests/ptx/plant.py)
}

# What the compiler makes of the kernels, in place of them, under the suites that use CUDA. The first
# of these architectures has been there longest, the last one is another compiler's.
step_ptx() {
    local archs=(75 90 120) flags arch
    local without=" !nccl !cuda_host/ !cuda_load/ !cuda_order/ !cuda_program/ !cuda_several/"
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
        archs=("${PTX_ARCHS:-${archs[$(git rev-list --count HEAD 2>/dev/null || date +%-j) % 3]}}")
    fi
    export SIM_SEED=${SIM_SEED:-1}
    for arch in "${archs[@]}"; do
        echo "# sm_$arch; PTX_ARCHS=$arch does the same again"
        T=${T:-cuda$without} TEST_GPUS=8 tests "ptx/sm_$arch" 6
    done
    ptx_planted "build/ptx/sm_$arch.ptx"
}

# What make gpu-pack packs, on machines that have little else.
step_gpu() {
    local programs=(build/gpu/few/tests build/gpu/bench build/gpu/doctor build/gpu/hold)
    tests/gpu/gpu.sh flags | grep -q . || { skip "gpu-all" "no headers of CUDA"; return; }
    build build/sim/library.so build/sim/tests "${programs[@]}" &&
        tests/gpu/proof.sh build/sim/library.so build/sim/tests "${programs[@]}"
}

# dp_hip.h on the same GPUs, which then have HIP's names.
step_hip() {
    export SIM_SEED=${SIM_SEED:-1}
    T=${T:-hip/} tests hip 6
    T=${T:-cuda} TEST_GPUS=8 tests hip 6
}

# dp_mpi.h, with each MPI that there is.
step_mpi() {
    local mpi
    for mpi in openmpi mpich; do
        if has "mpirun.$mpi" && echo '#include <mpi.h>' | "mpicc.$mpi" -fsyntax-only -x c - \
            2>/dev/null; then
            tests $mpi 3
        else
            skip "tests over $mpi" "not installed"
        fi
    done
}

# conform_with NAME BACKEND TABLE [COLL]: the binary that tries a table; prints where it is
conform_with() {
    local name=build/conform/$1/tests
    build "$name" BACKEND="$2" TABLE="$3" COLL="${4:-}" || return 1
}

# A table of somebody else's: its TAP as it comes.
conform() {
    local name
    name=$(basename "$TABLE")
    conform_with "$name" "$BACKEND" "$TABLE" "${COLL:-}" || return 1
    TEST_TIMEOUT_SCALE=3 "build/conform/$name/tests" "-j$JOBS" ${T:-}
}

# Every bug of tests/conform_tables.h is found by the test that it names.
conform_broken() {
    local bug test
    conform_with broken tests/conform_tables.h broken_table broken_coll || return 1
    while read -r bug test; do
        if CONFORM_BUG=$bug build/conform/broken/tests "-j$JOBS" "$test" 2>&1 |
            grep -q "^not ok [0-9]* - $test\>"; then
            echo "ok - $test finds that $bug"
        else
            echo "not ok - $test finds that $bug"
        fi
    done < <(sed -n 's/^ *X(\(\w*\), "\(.*\)").*/\1 \2/p' tests/conform_tables.h)
}

step_conform() (
    BACKEND=examples/custom_device.h TABLE=toy_device conform
    export TEST_STRIDE=3
    BACKEND=tests/conform_tables.h TABLE=lazy_table conform
    BACKEND=tests/conform_tables.h TABLE=shared_table conform
    T=${T:-device/} BACKEND=tests/conform_tables.h TABLE=refusing_table conform
    build/conform/refusing_table/tests "-j$JOBS" "${T:-replicate/}"
    conform_broken
)

# Emulation is slow: what differs from one kind of processor to the other is vectors and the order of
# memory, which the emulation does not have. So: what computes.
step_aarch64() {
    local tool some
    for tool in aarch64-linux-gnu-gcc qemu-aarch64; do
        has $tool || { skip "tests on aarch64" "no $tool"; return; }
    done
    [ -e /usr/aarch64-linux-gnu/lib/libc.a ] || { skip "tests on aarch64" "no libc"; return; }
    build build/aarch64/tests || return 1
    for some in tensor/ steps/ team/ thread/; do
        TEST_STRIDE=3 TEST_TIMEOUT_SCALE=20 timeout 300 qemu-aarch64 build/aarch64/tests "-j$JOBS" \
            "$some" ${T:-} || return 1
    done
}

# A few of make faults' trials, of as many kinds. Most of the time they wait.
step_faults() {
    local mpi with=(build/faults/plain/worker)
    has python3 || { skip "faults" "no python3"; return; }
    for mpi in openmpi mpich; do
        if has "mpirun.$mpi"; then with+=("build/faults/$mpi/worker"); fi
    done
    build "${with[@]}" && tests/faults/faults.py --smoke --jobs $((3 * JOBS)) --scale 1.5
}

corpus_of() { echo "tests/fuzz/corpus/${1#fuzz_}"; }

replay() { without_aslr timeout 120 "build/fuzz/$1" "${@:2}" >"$LOGS/$1" 2>&1; }

step_fuzz() {
    local source name input inputs
    for source in tests/fuzz/fuzz_*.c; do
        name=$(basename "$source" .c)
        inputs=("$(corpus_of "$name")"/*)
        build "build/fuzz/$name" || continue
        if replay "$name" "${inputs[@]}"; then
            echo "ok - $name # $(tail -n 1 "$LOGS/$name")"
            continue
        fi
        for input in "${inputs[@]}"; do
            replay "$name" "$input" && continue
            echo "not ok - $name # $input"
            sed 's/^/#   /' "$LOGS/$name"
        done
    done
}

# What libFuzzer finds stays in build/fuzz/found; what is worth keeping is copied by hand.
fuzz_more() {
    local seconds=$1 program name
    shift
    for program; do
        name=$(basename "$program")
        mkdir -p "build/fuzz/found/$name"
        without_aslr "$program" -max_total_time="$seconds" -artifact_prefix="build/fuzz/found/" \
            "build/fuzz/found/$name" "$(corpus_of "$name")" || return 1
    done
}

# What an example must print stands in its first comment, after "Prints:"; "..." is any text.
expected_output() {
    awk '/^ *Prints:$/ { on = 1; next }
         on { last = sub(/ *\*\/$/, ""); sub(/^   /, ""); if (!last || $0 != "") print
              if (last) exit }' "$1"
}

output_matches() {
    local want got
    while IFS= read -r want <&3; do
        IFS= read -r got || [ -n "$got" ] || return 1
        want=$(printf '%s' "$want" | sed 's/[][*?\\]/\\&/g; s/\.\.\./*/g')
        # shellcheck disable=SC2053
        [[ $got == $want ]] || return 1
    done 3<"$1"
    ! IFS= read -r got
} <"$2"

# What is wrong is said, by the exit status too.
doctor_finds() {
    local found=$1 got=$LOGS/doctor.bad status
    shift
    env -u DP_LAUNCH "$@" build/examples/doctor >"$got" 2>&1
    status=$?
    if [ $status = 1 ] && grep -q "^BAD .*$found" "$got"; then
        echo "ok - examples/doctor.c finds what is wrong with $*"
    else
        echo "not ok - examples/doctor.c finds what is wrong with $*"
        sed 's/^/#   /' "$got"
    fi
}

as_torchrun() {
    local port=$((20000 + $$ % 10000)) rank
    for rank in 0 1; do
        RANK=$rank WORLD_SIZE=2 LOCAL_RANK=$rank LOCAL_WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 \
            MASTER_PORT=$port TORCHELASTIC_RUN_ID=none "$@" &
    done
    wait
}

as_one() { "$@"; }
as_openmpi() { mpirun.openmpi --allow-run-as-root --oversubscribe -np 2 "$@"; }
as_mpich() { mpirun.mpich -np 4 "$@"; }

# Each launcher's processes learn the same, and one of them says so.
launchers_agree() {
    local by want got name=examples/train_anywhere.c program=build/examples/train_anywhere
    want=$("$program")
    for by in as_torchrun as_openmpi as_mpich; do
        if [ $by != as_torchrun ] && ! has "mpirun.${by#as_}"; then
            skip "$name $by" "no mpirun.${by#as_}"
            continue
        fi
        got=$(unset DP_LAUNCH; export -f $by; timeout 120 bash -c "$by $program" 2>&1)
        if [ -n "$want" ] && [ "$got" = "$want" ]; then
            echo "ok - $name $by"
        else
            echo "not ok - $name $by"
            printf '%s\n' "$want" "$got" | sed 's/^/#   /'
        fi
    done
}

# kill -9 all processes that have this in their command line, whoever has started them.
kill_all_with() {
    local process
    for process in /proc/[0-9]*; do
        if tr '\0' ' ' <"$process/cmdline" | grep -qF -- "$1"; then
            kill -KILL "${process#/proc/}"
        fi
    done 2>/dev/null
}

# killed FILE COMMAND...: train_images FILE under COMMAND, killed once it has kept something
killed() {
    local file=$1 i
    shift
    "$@" build/examples/train_images "$file" >/dev/null 2>&1 &
    for ((i = 0; i < 6000; i++)); do
        [ ! -e "$file" ] || break
        sleep 0.01
    done
    kill_all_with "build/examples/train_images $file"
    ! wait $! 2>/dev/null
}

# What was killed and goes on ends with the bytes of what was not.
goes_on_after_kill() {
    local by=$1 name=examples/train_images.c whole=$LOGS/whole.$1 parts=$LOGS/parts.$1 got
    rm -f "$whole" "$parts"
    export -f "$by"
    got=$(unset DP_LAUNCH
        timeout 120 bash -c "$by build/examples/train_images $whole" 2>&1
        killed "$parts" bash -c "$by \"\$@\"" "$by" 2>&1 || echo "it was not killed in time"
        timeout 120 bash -c "$by build/examples/train_images $parts" 2>&1)
    if ! grep -q "not killed" <<<"$got" && grep -q "^from $parts" <<<"$got" &&
        cmp "$whole" "$parts"; then
        echo "ok - $name $by goes on after kill -9 as if nothing had happened"
    else
        echo "not ok - $name $by goes on after kill -9 as if nothing had happened"
        printf '%s\n' "$got" | sed 's/^/#   /'
    fi
}

step_examples() {
    local source name want got devices
    # Most of what an example's compiler does is dp.h, the same for all. So one is compiled whole, as a
    # user does it, and the one that needs CUDA; the others get what stands behind DP_IMPLEMENTATION
    # from one object, which make lint wants too.
    build build/examples/hello EXAMPLES_EXTRA="-O0 -Wno-null-dereference -Wno-frame-larger-than"
    if "${MAKE:-make}" -n all | grep -q train_cuda; then
        build build/examples/train_cuda EXAMPLES_EXTRA="-O1 -Wno-null-dereference"
    fi
    build all EXAMPLES_DP=build/alone/dp.o
    for source in examples/*.c; do
        grep -q '^#define DP_IMPLEMENTATION$' "$source" ||
            echo "not ok - $source defines DP_IMPLEMENTATION"
    done
    for source in examples/*.c; do
        name=$(basename "$source" .c)
        devices=
        if [ "$name" = train_cuda ]; then # two devices, also on one GPU
            devices=0,0
            [ -x build/examples/$name ] || { skip "$source" "no cuBLAS"; continue; }
        fi
        want=$LOGS/$name.want
        got=$LOGS/$name.got
        expected_output "$source" >"$want"
        if [ ! -s "$want" ]; then
            echo "not ok - $source says after \"Prints:\" what it prints"
        elif ! DP_DEVICES=$devices timeout 300 "build/examples/$name" >"$got" 2>&1; then
            echo "not ok - $source # exit status not 0"
            sed 's/^/#   /' "$got"
        elif ! output_matches "$want" "$got"; then
            echo "not ok - $source # prints something else"
            diff "$want" "$got" | sed 's/^/#   /'
        else
            echo "ok - $source"
        fi
    done
    doctor_finds "RANK is not set" WORLD_SIZE=2
    launchers_agree
    goes_on_after_kill as_one
    if has mpirun.openmpi; then goes_on_after_kill as_openmpi; fi
    rm -rf build/examples # what is compiled this fast is not what make demo is to show
}

demo() {
    local program failed=0
    for program; do
        printf '\n== %s\n' "$program"
        timeout 60 "$program" || { echo "$program: failed"; failed=1; }
    done
    return $failed
}

count() { grep -c "$@" || true; }

passed=0 failed=0 skipped=0

# Shows a step that has ended.
report() {
    local log=$LOGS/$1.tap status=1 seconds=0 cpu=0 good bad skips
    read -r status seconds cpu 2>/dev/null <"$LOGS/$1.end"
    bad=$(count '^not ok' "$log")
    skips=$(count '^ok .*# SKIP' "$log")
    good=$(($(count '^ok' "$log") - skips))
    if [ "$status" != 0 ] && [ "$bad" = 0 ]; then
        tail -n 20 "$log"
        echo "not ok - $1 ended with status $status"
        bad=1
    fi
    if [ "$bad" != 0 ]; then
        awk '/^not ok/ || !/^(ok|TAP|1\.\.|# TEST_SEED|[0-9]+ passed)/' "$log"
    fi
    sed -nE 's/^ok .*# SKIP (.*)/\1/p' "$log" | sort | uniq -c |
        while read -r times reason; do echo "$1: skipped $times: $reason"; done
    printf '%-9s %4d passed, %d failed, %d skipped  (%d s, of a core %d s)\n' "$1:" "$good" "$bad" \
        "$skips" "$seconds" "$cpu"
    passed=$((passed + good)) failed=$((failed + bad)) skipped=$((skipped + skips))
}

# What the steps need, all at once: no core waits for the last file of a variant. What fails here is
# tried again by its step, which shows it.
build_ahead() {
    local name targets=()
    for name; do
        case $name in
        lint | examples) targets+=(build/alone/dp.o) ;;
        compile) targets+=(build/wheels) ;; # comes while others compile
        gcc | asan | tsan | sim | aarch64 | musl) targets+=("build/$name/tests") ;;
        clang) targets+=(build/clang/silent "build/with/$CLANG/tests") ;;
        compilers) targets+=(build/gcc/tests) ;;
        ptx) targets+=(build/sim/tests) ;;
        mpi) targets+=(build/openmpi/tests build/mpich/tests) ;;
        faults) targets+=(build/faults/plain/worker) ;;
        gpu) targets+=(build/sim/library.so) ;;
        esac
    done
    [ ${#targets[@]} = 0 ] || build "${targets[@]}" >"$LOGS/ahead" 2>&1
}

run_step() {
    local start=$SECONDS status cpu
    "step_$1" >"$LOGS/$1.tap" 2>&1
    status=$?
    times >"$LOGS/$1.times" # of all that it has started; not in a subshell, which has started nothing
    cpu=$(awk -F '[ms ]+' 'NR == 2 { printf "%.0f", 60 * $1 + $2 + 60 * $3 + $4 }' "$LOGS/$1.times")
    echo "$status $((SECONDS - start)) $cpu" >"$LOGS/$1.end"
}

run_steps() {
    local name
    build_ahead "$@"
    for name; do
        while [ "$(jobs -rp | wc -l)" -ge 2 ]; do wait -n; done
        run_step "$name" &
    done
    wait
}

steps() {
    local name runner
    mkdir -p "$LOGS"
    rm -f "$LOGS"/*.end
    run_steps "$@" &
    runner=$!
    trap 'kill 0' INT # which those in the background do not hear
    for name; do
        while [ ! -s "$LOGS/$name.end" ] && kill -0 $runner 2>/dev/null; do sleep 0.2; done
        report "$name"
    done
    if [ $skipped != 0 ]; then echo "$skipped skipped, as said above"; fi
    echo "$passed passed, $failed failed"
    [ $failed = 0 ] && [ $passed != 0 ]
}

case ${1:-} in
steps | demo | conform | fuzz_more) "$@" ;;
*)
    sed -n '2,/^$/s/^# \{0,1\}//p' "$0"
    exit 2
    ;;
esac
