#!/usr/bin/env bash
# run.sh - what the Makefile's test targets run. Called by make, which exports the variables.
#
#   run.sh steps STEP...     run the steps, show what failed, end with "N passed, N failed"
#   run.sh demo PROGRAM...   run the examples
#   run.sh conform           try the table that $BACKEND and $TABLE name, and $COLL
#   run.sh fuzz_more SECONDS PROGRAM...   let fuzzers look for new inputs
#
# A step is a function step_NAME, in tests/steps, that prints TAP. Its log is build/log/NAME.tap. Three
# steps run at a time, as each has moments when it only waits, and beside them the one that only
# compiles. They are shown in order.

set -u
cd "$(dirname "$0")/.." || exit
JOBS=$(nproc 2>/dev/null || echo 2)
LOGS=build/log
TESTS_AT_ONCE=$((JOBS + 1)) # of one step: many wait for time-outs and for processes of theirs
unset "${!DP_@}" # what the user debugs with must not change what the tests see
export DP_LAUNCH=none # nor what has started make: mpirun, a step of Slurm
# What is done in turn is another thing at each commit.
export TEST_TURN=${TEST_TURN:-$(git rev-list --count HEAD 2>/dev/null || date +%-j)}

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

# browser FLAG... URL: fails without a browser that starts
browser() {
    local program status own=$PWD/build/browser-$BASHPID
    program=$(command -v chromium || command -v chromium-browser) || return
    timeout -k 10 150 "$program" --headless --no-sandbox --disable-gpu --no-first-run \
        "--user-data-dir=$own" "$@" 2>/dev/null
    status=$?
    rm -rf "$own"
    return $status
}

# in_browser FLAG... URL: the page as it is after its scripts have run
in_browser() {
    local page
    page=$(browser --dump-dom "$@") && [[ $page == *'</html>'* ]] && echo "$page"
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
    # shellcheck disable=SC2086 # T may be several words
    TEST_TIMEOUT_SCALE=$scale "$@" "build/$variant/tests" "-j$TESTS_AT_ONCE" ${T:-}
}

# tests_of VARIANT TIMEOUT_SCALE SELECTION...: one after the other, or once what $T selects
tests_of() {
    local variant=$1 scale=$2 words status=0
    shift 2
    [ -z "${T:-}" ] || set -- "$T"
    for words; do T=$words tests "$variant" "$scale" || status=1; done
    return $status
}

# in_turn NAME...: one of them, the next one at the next commit
in_turn() {
    shift $((TEST_TURN % $#))
    echo "$1"
}

for steps_of in host gpus tables faults examples install docs; do
    # shellcheck source=/dev/null
    . "tests/steps/$steps_of.sh"
done

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
    local name mpi targets=()
    for name; do
        case $name in
        lint | examples) targets+=(build/examples/dp.o) ;;
        compile) targets+=(build/wheels) ;; # comes while others compile
        install) targets+=(build/whole/dp.h) ;; # which others want at the same time
        gcc | asan | tsan | sim | aarch64 | musl) targets+=("build/$name/tests") ;;
        clang) targets+=(build/clang/silent "build/with/$CLANG/tests") ;;
        compilers) targets+=(build/gcc/tests) ;;
        ptx) targets+=(build/sim/tests) ;;
        mpi) for mpi in $(mpis); do targets+=("build/$mpi/tests"); done ;;
        faults) targets+=(build/faults/plain/worker) ;;
        gpu) targets+=(build/sim/library.so) ;;
        simulated) targets+=(build/simulated/run) ;;
        esac
    done
    [ ${#targets[@]} = 0 ] || build "${targets[@]}" >"$LOGS/ahead" 2>&1
}

# It compiles for minutes and has no time to keep, so it takes what the others leave.
is_aside() { [ "$1" = compile ]; }

run_step() {
    local start=$SECONDS status cpu
    ! is_aside "$1" || renice -n 19 -p "$BASHPID" >/dev/null 2>&1
    "step_$1" >"$LOGS/$1.tap" 2>&1
    status=$?
    times >"$LOGS/$1.times" # of all that it has started; not in a subshell, which has started nothing
    cpu=$(awk -F '[ms ]+' 'NR == 2 { printf "%.0f", 60 * $1 + $2 + 60 * $3 + $4 }' "$LOGS/$1.times")
    echo "$status $((SECONDS - start)) $cpu" >"$LOGS/$1.end"
}

run_steps() {
    local name aside=none
    build_ahead "$@"
    # In all as many as of two; with QUICK=1, where few steps run for long, one more of each.
    [ $# -lt 3 ] || [ -n "${QUICK:-}" ] || TESTS_AT_ONCE=$((2 * TESTS_AT_ONCE / 3))
    for name; do
        while [ "$(jobs -rp | grep -cvx "$aside")" -ge 3 ]; do wait -n; done
        run_step "$name" &
        ! is_aside "$name" || aside=$!
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
