#!/usr/bin/env bash
# source.sh - what it takes to compile dp.h. Called by the benchmarks with make's variables.
#
#   source.sh cost       milliseconds of gcc -O2, KiB of the object
#   source.sh warnings   how many, by compiler
#
# Prints one "name number" a line; what cannot be told here is left out.

set -u
cd "$(dirname "$0")/../.." || exit
OBJECT=build/bench/source.o
mkdir -p build/bench

has() { command -v "$1" >/dev/null 2>&1; }

compile() { # shellcheck disable=SC2086
    "$1" -std=c11 -O2 ${STB_CFLAGS:-} -DTEST_ALONE "${@:2}" -c tests/dp.c -o $OBJECT 2>&1
}

# Of the processor, so that others who use it do not count; the best of three.
compile_ms() {
    local TIMEFORMAT='%3U %3S'
    for _ in 1 2 3; do { time compile gcc >/dev/null; } 2>&1 || return; done |
        awk '{ ms = ($1 + $2) * 1000 } NR == 1 || ms < best { best = ms }
             END { printf "compile_ms %.0f\n", best }'
    has size && echo "object_kib $((($(size $OBJECT | awk 'NR == 2 { print $4 }') + 1023) / 1024))"
}

warnings() {
    local flags="${WARNINGS:-}"
    [ "$1" = gcc ] && flags+=" ${GCC_WARNINGS:-}"
    # shellcheck disable=SC2086
    echo "$1_warnings $(compile "$1" ${flags//-Werror/} | grep -cE '(warning|error):')"
}

case ${1:-} in
cost) has gcc && compile_ms ;;
warnings)
    has gcc && warnings gcc
    has clang && warnings clang
    ;;
*)
    sed -n '2,/^$/s/^# \{0,1\}//p' "$0"
    exit 2
    ;;
esac
exit 0
