# shellcheck shell=bash
# host.sh - steps of run.sh: what has no GPU: form, compilers, sanitizers, C libraries, MPI, another
# processor.

step_lint() { tests/lint.sh; }

# half_of FIRST SECOND: one half of the tests, the next one at the next commit; or all
half_of() {
    [ "${WHOLE:-}" = all ] || in_turn "$@"
}

step_compile() {
    build build/whole/dp.h || return 1
    tests/compile/run.sh
}

# The limits are generous here: the machine may be busy, and only what hangs ever reaches them. Every
# other call fails, and others at the next commit; all with WHOLE=all, and few with QUICK=1.
step_gcc() {
    local skip=2
    [ "${WHOLE:-}" != all ] || skip=
    TEST_STRIDE=${QUICK:+5} TEST_SKIP=$skip tests gcc 3
}

# The library by clang, with the tests that gcc has compiled; of those it is asked what it thinks.
# Which call fails is no question of the compiler: the loops over all of them are gcc's. A half of the
# tests, the next commit the other one.
step_clang() {
    has "$CLANG" || { skip "tests with clang" "not installed"; return; }
    build build/clang/silent && echo "ok - $CLANG has nothing to say about the tests"
    T=${T:-$(half_of %0 %1)} TEST_STRIDE=3 tests "with/$CLANG" 3
}

# The oldest and the newest one of a family, but for the version that tests everything.
others() {
    local usual
    usual=$("$2" -dumpversion 2>/dev/null)
    compgen -c | grep -xE "$1-[0-9]+" | grep -vx "$1-${usual%%.*}" | sort -uV | sed -n '1p;$p' | uniq
}

# The library for one process, with the tests that gcc has compiled: those of several are skipped.
step_alone() { TEST_ONE_PROCESS=1 TEST_STRIDE=3 tests alone 3; }

# Conversions and vectors are where compilers differ; what has threads has them from the system. A run
# has one of them, the next commit another one; make compilers has all.
step_compilers() {
    local cc all
    mapfile -t all < <(others gcc "$CC" && others clang "$CLANG")
    [ ${#all[@]} != 0 ] || { skip "other compilers" "none installed"; return; }
    [ "${COMPILERS:-}" = all ] || all=("$(in_turn "${all[@]}")")
    for cc in "${all[@]}"; do
        build "build/with/$cc/tests" || continue
        echo "ok - $cc compiles dp.h without a warning"
        TEST_TIMEOUT_SCALE=3 "build/with/$cc/tests" "-j$JOBS" "${T:-tensor/}"
    done
}

# Another C library: what computes, and what has threads and processes.
step_musl() {
    has musl-gcc || { skip "tests with musl" "no musl-gcc"; return; }
    tests musl 3
}

# What things cost, and tables that hand on to others: a sanitizer has nothing to find there.
NOT_SANITIZED="!complexity/ !_decorated"

# A run of all steps has each test under one of the two sanitizers, and the next commit has it under the
# other one; make asan and make tsan have all.
step_asan() {
    can_sanitize address,undefined || { skip "tests under ASan" "$CC cannot"; return; }
    # Not detect_stack_use_after_return: gcc before 14 then misaligns vectors on the stack (PR 110027).
    export ASAN_OPTIONS=strict_string_checks=1
    export UBSAN_OPTIONS=print_stacktrace=1
    # Which calls fail changes from one commit to the next.
    export TEST_STRIDE=${TEST_STRIDE:-$(in_turn 5 7 9)}
    T=${T:-$(half_of %0 %1) $NOT_SANITIZED} tests asan 6 without_aslr
}

# Nor does it find threads in what is large that what is small has not, in many processes that few
# have not, in tables that do all at once, in files, in what one thread does with the state of others
# that have died, and where there is no memory, which is asan's question.
NOT_IN_THREADS="!_toy !one_by_one !cut_short !align/ !of_one_process_fails !several_pieces \
    !fills_of_large !many_and_large !many_generations !array/ !no_memory !every_allocation !one_memory \
    !peers_without !_share_memory !steps_are_the_same_on !mirrored/ !a_hundred_messages !what_moves_is \
    !_a_large_sum_between !strangers_keep"

step_tsan() {
    can_sanitize thread || { skip "tests under TSan" "$CC cannot"; return; }
    export TSAN_OPTIONS=die_after_fork=0:second_deadlock_stack=1
    T=${T:-$(half_of %1 %0) $NOT_SANITIZED $NOT_IN_THREADS} tests tsan 10 without_aslr
}

# Emulation is slow: what differs from one kind of processor to the other is vectors and the order of
# memory, which the emulation does not have. So: what computes.
step_aarch64() {
    local tool some
    for tool in aarch64-linux-gnu-gcc qemu-aarch64; do
        has $tool || { skip "tests on aarch64" "no $tool"; return; }
    done
    [ -e /usr/aarch64-linux-gnu/lib/libc.a ] || { skip "tests on aarch64" "no libc"; return; }
    build build/aarch64/tests || return 1
    for some in tensor/ train_kernels/ team/ thread/; do
        TEST_STRIDE=3 TEST_TIMEOUT_SCALE=20 timeout 300 qemu-aarch64 build/aarch64/tests "-j$JOBS" \
            "$some" ${T:-} || return 1
    done
}

# Those that are there; a run has one of them, the next commit the other one; make mpi has both.
mpis() {
    local mpi all=()
    for mpi in openmpi mpich; do
        has "mpirun.$mpi" && echo '#include <mpi.h>' | "mpicc.$mpi" -fsyntax-only -x c - 2>/dev/null &&
            all+=($mpi)
    done
    [ "${WHOLE:-}" = all ] || [ ${#all[@]} = 0 ] || all=("$(in_turn "${all[@]}")")
    echo "${all[@]}"
}

# dp_mpi.h.
step_mpi() {
    local mpi all
    read -r -a all < <(mpis)
    [ ${#all[@]} != 0 ] || skip "tests over MPI" "none installed"
    for mpi in "${all[@]}"; do
        echo "# over $mpi"
        tests "$mpi" 3
    done
}
