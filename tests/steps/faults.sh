# shellcheck shell=bash
# faults.sh - steps of run.sh: inputs that nobody means, and processes that die.

# A few of make faults' trials, of as many kinds. Most of the time they wait.
step_faults() {
    local mpi with=(build/faults/plain/worker)
    has python3 || { skip "faults" "no python3"; return; }
    for mpi in openmpi mpich; do
        if has "mpirun.$mpi"; then with+=("build/faults/$mpi/worker"); fi
    done
    build "${with[@]}" && tests/faults/faults.py --smoke --jobs $((3 * JOBS)) --scale 1.5
}

# Who is the job after a failure: all states of small jobs, and violations that have to be found.
# Each commit plants a quarter of them; make explore plants all, and visits larger jobs.
step_members() {
    local program=build/members/explore turns=4 flags=(-std=c11 -O2 -D_POSIX_C_SOURCE=200809L)
    [ -z "${EXPLORE:-}" ] || turns=1
    # shellcheck disable=SC2086 # none, or --all
    build "$program" && "$program" ${EXPLORE:-} || return
    has python3 || { skip "planted violations" "no python3"; return; }
    tests/members/plant.py build/members "$TEST_TURN" $turns "$CC" "${flags[@]}"
}

# Whole jobs on a made-up system, each a number. Some are run twice: the same number is the same run.
step_simulated() {
    local program=build/simulated/run
    build "$program" && "$program" -j "$JOBS" 450 && "$program" -2 -j "$JOBS" 50 451
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
