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
as_dprun() { build/examples/dprun -n 2 "$@" | sed 's/^\[0\] //'; }
as_dprun_on_3() { build/examples/dprun -n 3 "$@" | sed 's/^\[0\] //'; }
as_dprun_on_4() { build/examples/dprun -n 4 "$@" | sed 's/^\[0\] //'; }

# As on two machines.
as_dprun_twice() {
    local address=127.0.0.1:$((10000 + $$ % 10000)) node
    for node in 0 1; do
        build/examples/dprun --nodes 2 --node $node --addr "$address" "$@" | sed 's/^\[0\] //' &
    done
    wait
}

as_openmpi() { mpirun.openmpi --allow-run-as-root --oversubscribe -np 2 "$@"; }
as_mpich() { mpirun.mpich -np 4 "$@"; }

# is_the_same NAME WANTED GOT
is_the_same() {
    if [ -n "$2" ] && [ "$3" = "$2" ]; then
        echo "ok - $1"
    else
        echo "not ok - $1"
        printf '%s\n' "$2" "$3" | sed 's/^/#   /'
    fi
}

# Each launcher's processes learn the same, and one of them says so.
launchers_agree() {
    local by want got name=examples/train_anywhere.c program=build/examples/train_anywhere
    want=$("$program")
    for by in as_torchrun as_dprun as_dprun_on_4 as_dprun_twice as_openmpi as_mpich; do
        if [[ $by == as_*mpi* ]] && ! has "mpirun.${by#as_}"; then
            skip "$name $by" "no mpirun.${by#as_}"
            continue
        fi
        got=$(unset DP_LAUNCH; export -f $by; timeout 120 bash -c "$by $program" 2>&1)
        is_the_same "$name $by" "$want" "$got"
    done
}

# What is learned is printed, and is the same on any number of devices and processes, but for lines
# that say that they differ.
learns_the_same() { # NAME [DIFFERS]
    local name=examples/$1.c program=build/examples/$1 differs=${2:-^$} how want got
    want=$(DP_DEVICES=1 "$program" | grep -v "$differs")
    for how in "DP_DEVICES=2 as_one" "DP_DEVICES=3 as_one" "DP_DEVICES=1 as_dprun" \
        "DP_DEVICES=2 as_dprun" "DP_DEVICES=1 as_dprun_on_3"; do
        got=$(unset DP_LAUNCH; export -f as_one as_dprun as_dprun_on_3
            timeout 120 env "${how% *}" bash -c "${how#* } $program" 2>&1)
        is_the_same "$name $how" "$want" "$(grep -v "$differs" <<<"$got")"
    done
}

# The processes that have this in their command line, whoever has started them. Nothing is forked to
# find them, as they may be gone soon.
processes_with() {
    local process words
    for process in /proc/[0-9]*; do
        mapfile -d '' -t words <"$process/cmdline"
        [[ "${words[*]}" != *"$1"* ]] || echo "${process#/proc/}"
    done 2>/dev/null
}

kill_all_with() { # -9
    local process
    for process in $(processes_with "$1"); do
        kill -KILL "$process" 2>/dev/null
    done
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

# One of its processes is told to stop; all end well, whatever step they were at.
stopped() {
    local file=$1 process i
    shift
    timeout 120 "$@" build/examples/train_images "$file" 2>&1 &
    for ((i = 0; i < 6000; i++)); do
        [ ! -e "$file" ] || break
        sleep 0.01
    done
    for process in $(processes_with "build/examples/train_images $file"); do
        if [ "/proc/$process/exe" -ef build/examples/train_images ]; then # and not who has started it
            kill -TERM "$process"
            break
        fi
    done
    wait $!
}

goes_on_result() { # BY WHAT GOT WHOLE PARTS: both have the same bytes, and the second run went on
    if ! grep -q "^it was not" <<<"$3" && grep -q "^from $5" <<<"$3" && cmp "$4" "$5"; then
        echo "ok - examples/train_images.c $1 goes on after $2 as if nothing had happened"
    else
        echo "not ok - examples/train_images.c $1 goes on after $2 as if nothing had happened"
        printf '%s\n' "$3" | sed 's/^/#   /'
    fi
}

# What was killed, or told to stop, and goes on ends with the bytes of what was not.
goes_on() {
    local by=$1 whole=$LOGS/whole.$1 parts=$LOGS/parts.$1 got
    rm -f "$whole" "$parts"
    export -f "$by"
    got=$(unset DP_LAUNCH
        timeout 120 bash -c "$by build/examples/train_images $whole" 2>&1
        killed "$parts" bash -c "$by \"\$@\"" "$by" 2>&1 || echo "it was not killed in time"
        timeout 120 bash -c "$by build/examples/train_images $parts" 2>&1)
    goes_on_result "$by" "kill -9" "$got" "$whole" "$parts"
    rm -f "$parts"
    got=$(unset DP_LAUNCH
        stopped "$parts" bash -c "$by \"\$@\"" "$by" | grep "^stopped after" ||
            echo "it was not stopped in time"
        timeout 120 bash -c "$by build/examples/train_images $parts" 2>&1)
    goes_on_result "$by" SIGTERM "$got" "$whole" "$parts"
}

# ---- dprun ---------------------------------------------------------------------------------------

dprun_result() { # WHAT GOT WANT
    if [ "$2" = "$3" ]; then
        echo "ok - examples/dprun.c: $1"
    else
        echo "not ok - examples/dprun.c: $1"
        diff <(printf '%s\n' "$3") <(printf '%s\n' "$2") | sed 's/^/#   /'
    fi
}

# dprun_ends WHAT STATUS OUTPUT ARGUMENTS...: the lines sorted, as processes write when they like
dprun_ends() {
    local what=$1 want="$3 $2" got
    shift 3
    got=$(timeout -k 9 100 build/examples/dprun "$@" 2>&1 </dev/null | sed 's/pid [0-9]*)/pid N)/' |
        LC_ALL=C sort
        exit "${PIPESTATUS[0]}")
    dprun_result "$what" "$got $?" "$want"
}

in_time() { # COMMAND...: wait until it is so
    local i
    for ((i = 0; i < 600; i++)); do
        ! "$@" 2>/dev/null || return 0
        sleep 0.1
    done
    return 1
}

none_of() { # FILE...: no process lives whose number is in one of them
    local number
    for number in $(cat "$@"); do
        ! grep -q '^State:[^Z]*$' "/proc/$number/status" 2>/dev/null || return 1
    done
}

all_there() { [ -s "$1" ] && [ -s "$2" ]; }

# dprun_names WHAT STATUS LINES EXIT: process 1 ends with EXIT, but slower than process 0, which fails
# because of that. Lines of dprun alone.
dprun_names() {
    local what=$1 want="$3 $2" got
    rm -f "$LOGS/dprun.pid"
    # shellcheck disable=SC2016
    got=$(timeout -k 9 100 build/examples/dprun -n 2 sh -c '
        if [ "$DP_PROCESS" = 1 ]; then
            echo $$ >"$0.new"; mv "$0.new" "$0"; sleep 0.1; [ "$1" = 0 ] || echo it broke >&2; exit "$1"
        fi
        while [ ! -e "$0" ]; do sleep 0.01; done
        echo "rank 1 (process 1, pid $(cat "$0")) has died" >&2; exit 1' "$LOGS/dprun.pid" "$4" 2>&1 </dev/null |
        grep ^dprun: | sed 's/pid [0-9]*/pid N/'
        exit "${PIPESTATUS[0]}")
    dprun_result "$what" "$got $?" "$want"
}

# dprun gets a signal while each of its processes has one of its own.
dprun_gets() {
    local signal=$1 what=$2 want=$3 files=("$LOGS/dprun.0" "$LOGS/dprun.1") got pid
    rm -f "${files[@]}"
    # shellcheck disable=SC2016
    build/examples/dprun -n 2 sh -c '[ "$1" != KILL ] || { echo $$ >"$0.$DP_PROCESS"; exec sleep 1000; }
        sleep 1000 & echo $$ $! >"$0.$DP_PROCESS"; wait' \
        "$LOGS/dprun" "$signal" </dev/null >"$LOGS/dprun.log" 2>&1 &
    pid=$!
    in_time all_there "${files[@]}" || echo "# they have not begun"
    kill "-$signal" $pid
    wait $pid 2>/dev/null
    got=$?
    in_time none_of "${files[@]}"
    dprun_result "$what" "$got $?" "$want 0"
}

# The first time, each of the two processes of a dprun ends when the other one is there, too.
# shellcheck disable=SC2016
all_fail_once='[ -e "$0.$DP_LOCAL_PROCESS" ] || { : >"$0.$DP_LOCAL_PROCESS"
        until [ -e "$0.0" ] && [ -e "$0.1" ]; do sleep 0.01; done
        exit 5; }'

# shellcheck disable=SC2016 # what is in quotes is for the shells that dprun starts
dprun_does_it() {
    local line got
    dprun_ends "lines of all, each with its number" 0 "[0] err
[0] out
[1] err
[1] out" -n 2 sh -c 'echo out; printf err >&2'
    dprun_ends "the first that fails ends the others, and has the last word" 7 "[1] it broke
dprun: process 1 ended with exit status 7: it broke" -n 3 \
        sh -c '[ $DP_PROCESS = 1 ] || exec sleep 1000; echo it broke >&2; exit 7'
    dprun_names "one that only echoes another one is not named" 3 \
        "dprun: process 1 ended with exit status 3: it broke" 3
    dprun_names "one that leaves without a word is named, too" 1 \
        "dprun: process 1 has left, without dp_close, while others needed it
dprun: process 0 ended with exit status 1: rank 1 (process 1, pid N) has died" 0
    dprun_ends "what has hung is an echo of another one" 3 "[0] it broke
dprun: process 0 ended with exit status 3: it broke" -n 2 \
        sh -c '[ $DP_PROCESS = 0 ] || exit 124; sleep 0.1; echo it broke >&2; exit 3'
    dprun_ends "also if that names it" 1 "[0] rank 1 (process 1, pid N) did not come
dprun: process 0 ended with exit status 1: rank 1 (process 1, pid N) did not come" -n 2 \
        sh -c '[ $DP_PROCESS = 0 ] || { echo $$ >"$0.new"; mv "$0.new" "$0"; exit 124; }
            while [ ! -e "$0" ]; do sleep 0.01; done
            echo "rank 1 (process 1, pid $(cat "$0")) did not come" >&2; exit 1' \
        "$(rm -f "$LOGS/dprun.hung"; echo "$LOGS/dprun.hung")"
    dprun_ends "but where no other one has failed" 124 "[1] it hangs
dprun: process 1 ended with exit status 124: it hangs" -n 2 --grace 1 \
        sh -c '[ $DP_PROCESS = 1 ] || exec sleep 1000; echo it hangs >&2; exit 124'
    dprun_ends "grace is told to all, if it is given" 0 "[0] 7
[1] 7" -n 2 --grace 7 sh -c 'echo $DP_GRACE'
    dprun_ends "else it is what it was" 0 "[0] -
[1] -" -n 2 sh -c 'echo ${DP_GRACE--}'
    dprun_ends "one that dies" 137 "dprun: process 1 was ended by signal 9 (Killed)" -n 2 \
        sh -c '[ $DP_PROCESS = 1 ] || exec sleep 1000; kill -9 $$'
    dprun_ends "one that dies may be spared" 0 "[0] done
[2] done
dprun: process 1 was ended by signal 9 (Killed)" -n 3 --spare 1 \
        sh -c '[ $DP_PROCESS != 1 ] || kill -9 $$; echo done'
    dprun_ends "even if the others are through by then" 0 "[0] done
dprun: process 1 ended with exit status 3" -n 2 --spare 1 \
        sh -c '[ $DP_PROCESS != 1 ] || { sleep 1; exit 3; }; echo done'
    dprun_ends "a second one too many" 9 "dprun: process 0 ended with exit status 8
dprun: process 1 ended with exit status 9" -n 3 --spare 1 \
        sh -c 'case $DP_PROCESS in 0) exit 8;; 1) sleep 1; exit 9;; *) sleep 100;; esac'
    dprun_ends "but not all of them" 3 "dprun: process 0 ended with exit status 3" --spare 1 \
        sh -c 'exit 3'
    dprun_ends "one that dies is started again, alone" 0 "[0] here -
[1] again 1
[1] here -
dprun: process 1 ended with exit status 5
dprun: process 1 is started again, 1 of 2" -n 2 --respawn 2 \
        sh -c '[ "$DP_REJOIN" != 1 ] || { echo again $DP_PROCESS; : >"$0"; exit; }
            echo here $DP_REJOIN-; [ $DP_PROCESS != 1 ] || exit 5
            until [ -e "$0" ]; do sleep 0.1; done' \
        "$(rm -f "$LOGS/dprun.again"; echo "$LOGS/dprun.again")"
    dprun_ends "who fails three times in a minute stays out" 0 "[0] limit 4
dprun: process 1 ended with exit status 5
dprun: process 1 ended with exit status 5
dprun: process 1 ended with exit status 5
dprun: process 1 has failed 3 times within a minute: it stays out
dprun: process 1 is started again
dprun: process 1 is started again" -n 2 --elastic 1:4 \
        sh -c '[ $DP_PROCESS = 0 ] || { echo >>"$0"; exit 5; }
            echo limit $DP_PROCESS_LIMIT
            until [ $(wc -l <"$0") = 3 ]; do sleep 0.1; done
            sleep 2' "$(: >"$LOGS/dprun.elastic"; echo "$LOGS/dprun.elastic")"
    dprun_ends "who came back when the others were about to end" 0 \
        "dprun: process 1 ended with exit status 5
dprun: process 1 ended with exit status 6
dprun: process 1 is started again" -n 2 --elastic 1:4 \
        sh -c 'if [ $DP_PROCESS = 0 ]; then
                echo $$ >"$0"
                until [ -e "$0.late" ]; do sleep 0.1; done
                exit 0
            fi
            until [ -s "$0" ]; do sleep 0.1; done
            [ "$DP_REJOIN" = 1 ] || exit 5
            echo >"$0.late"
            while kill -0 "$(cat "$0")" 2>/dev/null; do sleep 0.1; done
            exit 6' "$(rm -f "$LOGS/dprun.job"*; echo "$LOGS/dprun.job")"
    dprun_ends "fewer than there have to be" 5 "dprun: process 1 ended with exit status 5" -n 2 \
        --elastic 2:4 sh -c '[ $DP_PROCESS = 0 ] || exit 5; exec sleep 1000'
    dprun_ends "all of a machine may fail at once, and join others elsewhere" 0 "[0] back
[1] back
dprun: process 0 ended with exit status 5
dprun: process 0 is started again, 1 of 1
dprun: process 1 ended with exit status 5
dprun: process 1 is started again, 1 of 1" -n 2 --join --addr a:9 --respawn 1 \
        sh -c "$all_fail_once"'; sleep 1; echo back' "$(rm -f "$LOGS/dprun.all"*; echo "$LOGS/dprun.all")"
    dprun_ends "also those of one of several machines" 0 "[2] back
[3] back
dprun: process 2 ended with exit status 5
dprun: process 2 is started again, 1 of 1
dprun: process 3 ended with exit status 5
dprun: process 3 is started again, 1 of 1" -n 2 --nodes 2 --node 1 --addr a:9 --respawn 1 \
        sh -c "$all_fail_once"'; sleep 1; echo back' "$(rm -f "$LOGS/dprun.all"*; echo "$LOGS/dprun.all")"
    dprun_ends "but no more often than is said" 5 "dprun: process 0 ended with exit status 5
dprun: process 0 ended with exit status 5
dprun: process 0 is started again, 1 of 1" --join --addr a:9 --respawn 1 sh -c 'exit 5'
    dprun_ends "to join others" 0 "[0] 1 a:9 1 1" --join --addr a:9 \
        sh -c 'echo $DP_REJOIN $DP_ADDR $DP_PROCESS $DP_PROCESS_COUNT'
    dprun_ends "who does not hear SIGTERM is killed" 5 "dprun: process 0 ended with exit status 5" \
        -n 2 --grace 1 sh -c 'if [ $DP_PROCESS = 0 ]; then
                until [ -e "$0" ]; do sleep 0.1; done
                exit 5
            fi
            trap "" TERM
            echo >"$0"
            while :; do sleep 1; done' "$(rm -f "$LOGS/dprun.deaf"; echo "$LOGS/dprun.deaf")"
    dprun_ends "it starts again, with another secret" 0 "[0] 0 1
[0] 1 2
[0] 2 3
dprun: process 0 ended with exit status 3
dprun: process 0 ended with exit status 3
dprun: starting again, 1 of 4
dprun: starting again, 2 of 4" --restarts 4 sh -c 'echo $DP_SECRET >>"$0"
        echo $DP_RESTART $(sort -u "$0" | wc -l); [ $DP_RESTART = 2 ] || exit 3' \
        "$(rm -f "$LOGS/dprun.secrets"; echo "$LOGS/dprun.secrets")"
    dprun_ends "not for ever" 3 "dprun: process 0 ended with exit status 3
dprun: process 0 ended with exit status 3
dprun: starting again, 1 of 1" --restarts=1 sh -c 'exit 3'
    dprun_ends "a program that is not there" 127 \
        "dprun: ./nothing: No such file or directory" -n 2 --restarts 9 ./nothing
    for line in "" "-n 0 true" "-n 2x true" "--nothing true" "--nodes 2 true" "--bind x true" \
        "--nodes 2 --node 2 --addr a:1 true" "--nodes 2 --node 1 --addr a:x true" "--addr" \
        "--addr a:1 true" "--join true" "--elastic 1 true" "--elastic 1:x true" \
        "-n 2 --elastic 3:4 true" "-n 2 --elastic 1:1 true" "-n 2 --elastic 1:2 --spare 1 true"; do
        # shellcheck disable=SC2086
        got+=$(timeout -k 9 100 build/examples/dprun $line 2>&1 </dev/null)
        got+=" $?"$'\n'
    done
    dprun_result "wrong options" "$(grep -c '^dprun: .*; dprun -h says what there is 2$' <<<"$got")" 16
    dprun_result "stdin is for process 0" "$(printf 'a\nb\n' |
        timeout -k 9 100 build/examples/dprun -n 2 wc -l | LC_ALL=C sort)" "[0] 2
[1] 0"
    dprun_result "who begins joins nobody, also inside another job" "$(DP_REJOIN=1 timeout -k 9 100 \
        build/examples/dprun --elastic 1:4 build/examples/dprun \
        sh -c 'echo "${DP_REJOIN-no} ${DP_PROCESS_LIMIT-no}"' </dev/null)" "[0] [0] no no"
    dprun_result "a limit may be set for all" "$(DP_PROCESS_LIMIT=4 timeout -k 9 100 \
        build/examples/dprun sh -c 'echo "$DP_PROCESS_LIMIT"' </dev/null)" "[0] 4"
    dprun_result "long lines come whole, in parts" "$(timeout -k 9 100 build/examples/dprun -n 2 \
        sh -c 'head -c 100000 /dev/zero | tr "\0" x' </dev/null | sed 's/^\[[01]\] //' |
        tr -d '\n' | wc -c)" 200000
    dprun_result "a line as long as one may be" "$(timeout -k 9 100 build/examples/dprun \
        sh -c 'for i in 0 1 2; do head -c $((16383 + i)) /dev/zero | tr "\0" x; echo; done' </dev/null |
        awk '{ print length($0) - length("[0] ") }')" "16383
16384
16384
1"
    dprun_result "a reader that has seen enough" "$(timeout -k 9 100 build/examples/dprun \
        sh -c 'trap "" PIPE; while echo y; do :; done; exit 9' </dev/null 2>"$LOGS/dprun.log" |
        head -n 1; echo "${PIPESTATUS[0]}")" "[0] y
9"
    dprun_result "what was ignored before is still" "$(timeout -k 9 100 build/examples/dprun \
        grep SigIgn /proc/self/status </dev/null)" "[0] $(timeout 9 grep SigIgn /proc/self/status)"
    rm -rf "$LOGS/dprun.out"
    dprun_ends "a file for each" 0 "" -n 2 --output "$LOGS/dprun.out" sh -c 'echo I am $DP_PROCESS'
    dprun_result "with its lines" "$(cat "$LOGS"/dprun.out/{0,1}.log)" "I am 0
I am 1"
    ln -sf /dev/full "$LOGS/dprun.out/0.log"
    dprun_ends "a full disk is no success" 1 \
        "dprun: process 0: its output: No space left on device" --output "$LOGS/dprun.out" echo done
    dprun_ends "a file that is no folder is named" 1 "$(LC_ALL=C sort <<<"\
dprun: $LOGS/dprun.out/1.log/0.log: Not a directory
dprun: a process cannot be started: Not a directory")" --output "$LOGS/dprun.out/1.log" echo done
    dprun_result "short lines are written together" "$(timeout -k 9 100 build/examples/dprun sh -c \
        'yes | head -n 100000; awk "/syscw/ { print \$2 < 20000 ? \"few\" : \$2 }" /proc/$PPID/io' \
        </dev/null | tail -n 1)" "[0] few"
    dprun_ends "it does not wait for what was left behind" 0 "[0] done" \
        sh -c 'sleep 1000 & echo $! >"$0"; echo done' "$LOGS/dprun.left"
    kill "$(cat "$LOGS/dprun.left")"
    dprun_gets TERM "a signal ends all, with what they have started" 143
    dprun_gets KILL "nobody outlives it" 137
    if [ "$(unset OMP_NUM_THREADS; nproc)" = 1 ]; then
        skip "examples/dprun.c: --bind cores" "one core"
    else
        dprun_result "each has other cores" "$(timeout -k 9 100 build/examples/dprun -n 2 --bind cores \
            grep Cpus_allowed_list /proc/self/status </dev/null | cut -d: -f2 | sort -u | wc -l)" 2
    fi
    got=$(timeout -k 9 100 build/examples/dprun -n 3 build/examples/doctor 2>&1 </dev/null)
    dprun_result "a job of three" "$? $(grep -c '^\[0\] ok .*dp: process 0 of 3, 0 of 3 ' <<<"$got")" \
        "0 1"
}

# beside_a_job COMMAND...: its output, with the numbers of two processes of a job behind it, which are
# stopped as soon as they are seen, and killed a moment after it has begun.
# shellcheck disable=SC2016,SC2046
beside_a_job() {
    local pids=$LOGS/beside job got=1 i
    for ((i = 0; i < 9 && got != 0; i++)); do # a loaded machine may look when it is over
        rm -f "$pids" "$pids".[01]
        build/examples/dprun -n 2 sh -c 'echo $$ >"$0.$DP_PROCESS"; exec build/examples/train_images' \
            "$pids" </dev/null >"$LOGS/beside.log" 2>&1 &
        job=$!
        in_time all_there "$pids.0" "$pids.1"
        until build/examples/status "$(cat "$pids.0")" >"$pids" 2>&1 || ! kill -0 $job 2>/dev/null; do :; done
        kill -STOP $(cat "$pids".[01]) 2>/dev/null
        "$@" $(cat "$pids".[01]) >"$pids" 2>&1 &
        got=$!
        sleep 0.5
        kill -KILL $job $(cat "$pids".[01]) 2>/dev/null
        wait $job 2>/dev/null
        wait $got
        got=$?
    done
    cat "$pids"
    return $got
}

dprun_shows_jobs() {
    local got name="--status shows a job, and nothing once it has ended" pids=$LOGS/beside
    got=$(beside_a_job build/examples/dprun --status)
    dprun_result "$name" "$? $(grep -c '^a job of 2 processes, by dp, on ' <<<"$got") $(
        grep -c '^        is stopped' <<<"$got") $(build/examples/dprun --status $(cat "$pids".[01]) 2>&1) $?" \
        "0 1 2 no job of this user is seen on this machine, or none of these (a process that is alone: if a launcher has started it, or with DP_METRICS) 1"
    got=$(beside_a_job build/examples/dprun --status --watch=0.05)
    dprun_result "--status --watch shows it until it has ended" "$? $(
        grep -c '^a job of 2 processes' <<<"$got" | sed 's/^[1-9][0-9]*$/more/') $(
        grep -c '^no job' <<<"$got")" "0 more 1"
    name="--status --json can be read"
    has python3 || { skip "examples/dprun.c: $name" "no python3"; return; }
    got=$(beside_a_job build/examples/dprun --status --json | python3 -c '
import json, sys
[job] = json.load(sys.stdin)["jobs"]
ranks = [(p["rank"], p["state"], p["steps"] >= 0, p["waits_for"] in (0, 1, None)) for p in job["processes"]]
print(job["launcher"], job["process_count"], ranks)')
    dprun_result "$name" "$got" "dp 2 [(0, 'stopped', True, True), (1, 'stopped', True, True)]"
}

# Process 0 is started again between two lines that are typed, and hears both.
# shellcheck disable=SC2016
dprun_hears_what_is_typed() {
    local name="what is typed is for the process 0 that is there" file=$LOGS/dprun.typed got
    local each='[ $DP_PROCESS = 0 ] || { until [ -e "$0.2" ]; do sleep 0.1; done; exit 0; }
        [ -e "$0.1" ] && again=2 || again=1
        : >"$0.$again"
        read -r line
        echo "heard $line"
        [ $again = 2 ]'
    if ! has script; then
        skip "examples/dprun.c: $name" "no script"
        return
    fi
    rm -f "$file" "$file".[12]
    {
        in_time [ -e "$file.1" ]
        echo first
        in_time [ -e "$file.2" ]
        echo second
        in_time grep -q 'heard second' "$file" # then the terminal goes
    } | TYPED=$file EACH=$each timeout -k 9 150 script -qefc \
        'build/examples/dprun -n 2 --respawn 1 sh -c "$EACH" "$TYPED"' "$file" >/dev/null
    got=$(grep -o 'heard .*' "$file" | tr -d '\r')
    dprun_result "$name" "$got" "heard first
heard second"
}

# A process is killed in the middle of training; what dprun starts again ends with the same bytes.
# shellcheck disable=SC2016
dprun_goes_on() {
    local program=build/examples/train_images whole=$LOGS/whole.dprun parts=$LOGS/parts.dprun
    rm -f "$whole" "$parts"
    as_dprun $program "$whole" >"$LOGS/dprun.log" 2>&1 </dev/null
    timeout -k 9 200 build/examples/dprun -n 2 --restarts 3 sh -c '
        [ $DP_PROCESS.$DP_RESTART = 1.0 ] || exec "$0" "$1"
        "$0" "$1" &
        until [ -e "$1" ]; do sleep 0.01; done
        kill -KILL $!
        exit 9' $program "$parts" >>"$LOGS/dprun.log" 2>&1 </dev/null
    dprun_result "a job that goes on after kill -9 as if nothing had happened" \
        "$? $(grep -c "^\[0\] from $parts" "$LOGS/dprun.log") $(cmp "$whole" "$parts" 2>&1)" "0 1 "
}

# The page of a real run: it is well formed, and has a row for each thread, a bar for each span.
timeline_shows() {
    local name="examples/timeline.c shows a run of two processes" page=$LOGS/timeline.html got
    rm -f "$LOGS/timeline.json"
    DP_TRACE=$LOGS/timeline.json build/examples/dprun -n 2 build/examples/train_anywhere \
        >"$LOGS/timeline.log" 2>&1 </dev/null &&
        build/examples/timeline "$LOGS/timeline.json" "$page" 3 >"$LOGS/timeline.log" 2>&1
    got="$? $(grep -c '^3 steps' "$LOGS/timeline.log") $(grep -c '^process [01]:' "$LOGS/timeline.log")"
    got+=" $(grep -c '<text x="0" .*caller, device 0' "$page")"
    got+=" $(($(grep -c '^<g><title>dp_train_step: ' "$page") >= 6))" # and what juts in
    if has xmllint; then xmllint --noout "$page" || got+=" it is not well formed"; fi
    if has iconv; then # what step_examples has made of tests/timeline.json
        iconv -f UTF-8 -t UTF-16 build/examples/timeline.html >/dev/null || got+=" a character is cut"
    fi
    if [ "$got" = "0 1 2 2 1" ]; then
        echo "ok - $name"
    else
        echo "not ok - $name: $got"
        sed 's/^/#   /' "$LOGS/timeline.log"
    fi
}

# What a browser draws of tests/timeline.json, which step_examples has made a page of: bars in the
# colours of their kinds, red where communication is not hidden, nothing beside the picture.
timeline_drawn() {
    local name="a browser draws the timeline" page=$LOGS/timeline.drawn.html got
    local methods="rgb(127, 201, 127)" hidden="rgb(128, 177, 211)"
    local frames="rgb(221, 221, 221)" not_hidden="rgb(227, 26, 28)" waits='url("#w")'
    sed 's/<\/body>.*//' build/examples/timeline.html >"$page"
    cat >>"$page" <<'END'
<script>
    const all = document.querySelector("svg").getBoundingClientRect(), fills = {};
    let wrong = 0;
    for (const bar of document.querySelectorAll("svg rect, svg text")) {
        const at = bar.getBoundingClientRect(), fill = getComputedStyle(bar).fill;
        if (at.width <= 0 || at.height <= 0 || at.left < all.left || at.right > all.right + 1 ||
            at.top < all.top || at.bottom > all.bottom + 1)
            wrong++;
        if (bar.tagName == "rect")
            fills[fill] = (fills[fill] || 0) + 1;
    }
    document.title = wrong + " wrong, " + Object.entries(fills).sort().map(f => f.join(": ")).join(", ");
</script></body></html>
END
    got=$(in_browser "file://$PWD/$page") ||
        { skip "$name" "no chromium that starts" && return; }
    got=$(grep -o -m 1 '<title>.* wrong, .*</title>' <<<"$got" | text_of)
    if [ "$got" = "0 wrong, $methods: 8, $hidden: 6, $frames: 8, $not_hidden: 8, $waits: 2" ]; then
        echo "ok - $name"
    else
        echo "not ok - $name: $got"
    fi
}

# ---- examples/torch ------------------------------------------------------------------------------

as_three() { build/examples/dprun -n 3 "$@" | sed 's/^\[0\] //'; }

# Where libtorch is at hand, which is too large to be installed for a test.
torch_does_it() {
    local by source=examples/torch/torch_ddp.cpp
    local want=$LOGS/torch_ddp.want got=$LOGS/torch_ddp.got folder=$LOGS/torch
    if [ ! -x build/examples/torch_ddp ] || [ ! -x build/examples/test_torch ]; then
        skip "$source" "no libtorch-dev"
        return
    fi
    expected_output $source >"$want"
    mkdir -p "$folder"
    for by in as_one as_dprun as_three as_openmpi; do
        if [ $by = as_openmpi ] && ! has mpirun.openmpi; then
            skip "$source $by" "no mpirun.openmpi"
            continue
        fi
        export -f $by
        (unset DP_LAUNCH; timeout 300 bash -o pipefail -c "$by build/examples/torch_ddp $folder/$by" || echo "it failed") \
            >"$got" 2>&1 </dev/null
        if output_matches "$want" "$got"; then
            echo "ok - $source $by"
        else
            echo "not ok - $source $by prints something else"
            diff "$want" "$got" | sed 's/^/#   /'
        fi
    done
    if [ -e "${CUDA_HOME:-/usr/local/cuda}/include/cuda_runtime_api.h" ]; then
        build build/examples/torch_cuda.o && echo "ok - $source compiles for GPUs"
    fi
    for by in as_one as_dprun as_three; do
        (unset DP_LAUNCH; timeout 300 bash -o pipefail -c "$by build/examples/test_torch tests/torch/expected.txt $folder" \
            2>&1 </dev/null || echo "not ok - examples/torch $by ends") | sed "s/ (/ $by (/" # what, as what
    done
}

# Where a Python has a torch that is new enough.
c10d_does_it() {
    local source=examples/torch/c10d.cpp python=${TORCH_PYTHON:-python3} got=$LOGS/c10d
    if ! "$python" -c 'import torch; assert torch.torch_version.TorchVersion(torch.__version__) >= (2, 11)' 2>/dev/null; then
        skip "$source" "no TORCH_PYTHON=python with torch 2.11 or newer"
        return
    fi
    build torch-backend
    (unset DP_LAUNCH; PYTHONPATH=build/torch timeout 1800 "$python" tests/torch/c10d_test.py 2>"$got.errors" </dev/null) >"$got"
    grep -E '^(not )?ok|^#' "$got"
    tail -n 1 "$got" | grep -q ' passed, ' || echo "not ok - $source: its tests end"
    if (unset DP_LAUNCH; PYTHONPATH=build/torch timeout 600 "$python" tests/torch/c10d_train.py check </dev/null) >"$got" 2>&1; then
        echo "ok - $source trains as gloo does"
    else
        echo "not ok - $source trains as gloo does"
        sed 's/^/#   /' "$got"
    fi
}

# Losses, a line each, differ by less than a part of them.
losses_agree() { # PART WANT GOT
    awk -v part="$1" 'FNR == NR { want[++count] = $4; next }
        { d = $4 - want[FNR]; if (FNR > count || (d < 0 ? -d : d) > part * want[FNR]) exit bad = 1; seen++ }
        END { exit bad || !count || seen != count }' <(grep '^epoch' <<<"$2") <(grep '^epoch' <<<"$3")
}

# foreign_does_it SOURCE PART WHY-NOT: a trainer of another library, where that is at hand, learns on
# all devices and processes what it learns on one
foreign_does_it() {
    local source=$1 program how want got
    program=build/examples/$(basename "$source" .c)
    if [ ! -x "$program" ]; then
        skip "$source" "$3"
        return
    fi
    # shellcheck disable=SC2046
    want=$(DP_DEVICES=1 "$program" $(arguments_of "$program") 2>/dev/null)
    for how in "DP_DEVICES=2 as_one" "DP_DEVICES=1 as_dprun" "DP_DEVICES=2 as_dprun" "DP_DEVICES=1 as_openmpi"; do
        if [[ $how == *openmpi ]] && ! has mpirun.openmpi; then
            skip "$source $how" "no mpirun.openmpi"
            continue
        fi
        got=$(unset DP_LAUNCH; export -f as_one as_dprun as_openmpi
            timeout 300 env "${how% *}" bash -c "${how#* } $program $(arguments_of "$program")" 2>/dev/null </dev/null)
        if losses_agree "$2" "$want" "$got"; then
            echo "ok - $source $how"
        else
            echo "not ok - $source $how"
            printf '%s\n' "$want" "$got" | sed 's/^/#   /'
        fi
    done
}

# What an example is called with. Those that are called with something are tools, without dp.h.
arguments_of() {
    case ${1##*/} in
    dprun) echo "-n 2 build/examples/train_anywhere" ;;
    train_darknet) echo "examples/darknet/pictures.cfg" ;;
    timeline) echo "tests/timeline.json build/examples/timeline.html 2" ;;
    esac
}

# And what starts it, where one process alone would wait for others.
launcher_of() {
    case ${1##*/} in
    elastic) echo "build/examples/dprun -n 4 --respawn 8" ;;
    esac
}

# launch SECONDS PROGRAM: runs an example as it is meant to be, for so long at most.
# shellcheck disable=SC2046
launch() {
    case ${2##*/} in
    status) beside_a_job "$2" ;;
    *) timeout "$1" $(launcher_of "$2") "$2" $(arguments_of "$2") ;;
    esac
}

# run_example NAME: what it prints. What dprun says comes when it comes, and so is kept apart.
run_example() {
    local program=build/examples/$1
    if [ "$1" = status ]; then # what each process is in depends on the moment
        launch 300 "$program" 2>&1 | sed -n 1,3p
        return "${PIPESTATUS[0]}"
    elif [ -n "$(launcher_of "$1")" ]; then
        launch 300 "$program" 2>"$LOGS/$1.said"
    else
        launch 300 "$program" 2>&1
    fi </dev/null
}

# What its output does not say.
elastic_came_and_went() {
    dprun_result "two that were killed come back" "$(cat "$LOGS/elastic.said")" \
        "dprun: process 3 was ended by signal 9 (Killed)
dprun: process 3 is started again, 1 of 8
dprun: process 2 was ended by signal 9 (Killed)
dprun: process 2 is started again, 1 of 8"
}

# The second of two machines is lost with all its processes; later another one brings as many, which
# all fail at once and are started again.
elastic_lost_a_machine() {
    local address="127.0.0.1:$((20000 + RANDOM % 10000))" first got
    local run=(timeout 120 build/examples/dprun -n 2 --addr "$address")
    export DP_SECRET=${address#*:}-of-elastic
    "${run[@]}" --nodes 2 --node 0 --elastic 2:4 build/examples/elastic >"$LOGS/machine0.log" 2>&1 &
    first=$!
    "${run[@]}" --nodes 2 --node 1 build/examples/elastic >"$LOGS/machine1.log" 2>&1
    got=$?
    rm -f "$LOGS"/machine2.[01]
    "${run[@]}" --join --respawn 1 sh -c "$all_fail_once; exec build/examples/elastic" \
        "$LOGS/machine2" >"$LOGS/machine2.log" 2>&1
    got+=" $?"
    wait $first
    got+=" $? $(grep -c ': 4096 pictures, each once; all' "$LOGS/machine0.log")"
    unset DP_SECRET
    got+=" $(grep -c 'is started again, 1 of 1' "$LOGS/machine2.log")"
    dprun_result "a machine is lost, and another one joins" "$got" "137 0 0 3 2"
}

step_examples() {
    local source name want got devices
    build all CUDA_OPTIMIZE=-O0
    for source in examples/*.c examples/*.cpp; do
        name=$(basename "$source" .c)
        name=${name/.cpp/_cpp}
        [ "$name" != dp ] || continue
        devices=
        if [ "$name" = train_cuda ]; then # two devices, also on one GPU
            devices=0,0
            [ -x build/examples/$name ] || { skip "$source" "no cuBLAS"; continue; }
        elif [ "$name" = train_blas ] && [ ! -x build/examples/$name ]; then
            skip "$source" "no libopenblas-dev"
            continue
        fi
        if [[ $source == *.cpp ]] && [ ! -x "build/examples/$name" ] && ! has "${CXX:-g++}"; then
            skip "$source" "no C++ compiler"
            continue
        fi
        want=$LOGS/$name.want
        got=$LOGS/$name.got
        expected_output "$source" >"$want"
        if [ ! -s "$want" ]; then
            echo "not ok - $source says after \"Prints:\" what it prints"
        elif ! DP_DEVICES=$devices run_example "$name" >"$got"; then
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
    dprun_does_it
    dprun_shows_jobs
    dprun_hears_what_is_typed
    dprun_goes_on
    elastic_came_and_went
    elastic_lost_a_machine
    torch_does_it
    c10d_does_it
    foreign_does_it examples/ggml/train_ggml.c 1e-6 "no ggml"
    foreign_does_it examples/darknet/train_darknet.c 1e-4 "no darknet"
    launchers_agree
    learns_the_same train
    learns_the_same train_spmd
    learns_the_same tokens "weighted by rows: .* another table"
    timeline_shows
    timeline_drawn
    goes_on as_one
    if has mpirun.openmpi; then goes_on as_openmpi; fi
    rm -f build/examples/dp_cuda.o # what is compiled this fast is not what make demo is to show
}

# The same under launchers.
launched_demo() {
    printf '\n== dprun -n 2 %s\n' "$*"
    timeout 60 build/examples/dprun -n 2 "$@" || return 1
    if has mpirun.openmpi; then
        printf '\n== mpirun -np 2 %s\n' "$*"
        env -u DP_LAUNCH timeout 60 mpirun.openmpi --allow-run-as-root --oversubscribe -np 2 "$@"
    fi
}

demo() {
    local program failed=0
    mkdir -p "$LOGS"
    for program; do
        printf '\n== %s\n' "$program"
        launch 60 "$program" || { echo "$program: failed"; failed=1; }
        case $program in
        */torch_ddp | */train_ggml | */train_darknet)
            # shellcheck disable=SC2046
            launched_demo "$program" $(arguments_of "$program") || { echo "$program: failed"; failed=1; }
            ;;
        esac
    done
    return $failed
}
