# shellcheck shell=bash
# examples.sh - a step of run.sh: the examples print what they say that they print.

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
        elif [ "$name" = train_blas ] && [ ! -x build/examples/$name ]; then
            skip "$source" "no libopenblas-dev"
            continue
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
