#!/usr/bin/env bash
# single.sh - dp.h and all that it is made of, as one file. Called by make.
#
#   single.sh OUT [NAME...]   writes OUT; dp_NAME.h goes in too, for each NAME: cuda, train, ...
#
# The result is read as the headers are: each keeps the manual at its top. It is included, and
# implemented, as dp.h is; what it holds is there whatever DP_USE_CUDA and its like say.

set -u
cd "$(dirname "$0")/.." || exit
out=$1
shift
names=" "
[[ " $* " != *" nccl "* ]] || names=" cuda "
for name in "$@"; do
    if [ "$name" = cpu ] || [[ ! $name =~ ^[a-z]+$ ]] || [ ! -e "dp_$name.h" ]; then
        known=$(echo dp_*.h | sed 's/dp_cpu.h //; s/dp_//g; s/\.h//g')
        echo "make single: WITH=$name: is none of $known" >&2
        exit 1
    fi
    [[ $names == *" $name "* ]] || names+="$name "
done

# A header without what only files of their own need: guards of rooms, the include of dp.h, what
# tells headers that include each other apart, and the licence at its end.
body() {
    awk -v names="$names" '
        function inlined(name) { return index(names, " " name " ") > 0 }
        /^\/\* (--------|The licence)/ { exit }
        /^#ifndef DP__ROOMS/ { getline; getline; getline; next }
        /^#endif \/\* DP__ROOMS/ || /^#(define|undef) DP__(ROOMS|[A-Z]*_FIRST_DP)/ { next }
        /^#if defined\(DP_USE_[A-Z]*\) && !defined\(DP__[A-Z]*_FIRST_DP\)/ {
            condition = $0
            getline
            name = $2
            gsub(/"dp_|\.h"/, "", name)
            if (inlined(name)) { getline; next }
            print condition
            print
            next
        }
        /^#include "dp\.h"/ || (/^#include "dp_cuda\.h"/ && FILENAME == "dp_nccl.h") { next }
        /^#include "dp(\/|_)[a-z_]*\.h"/ {
            room = $2
            gsub(/"/, "", room)
            print "@" room
            next
        }
        { print }' "$1"
}

# Rooms stand where they are included.
whole() {
    local line
    while IFS= read -r line; do
        if [[ $line == @* ]]; then
            printf '\n'
            body "${line#@}"
        else
            printf '%s\n' "$line"
        fi
    done < <(body "$1")
}

{
    whole dp.h
    for name in $names; do
        printf '\n'
        whole "dp_$name.h"
    done
    sed -n '/^\/\* --------/,$p' dp.h
} | cat -s >"$out.new" && mv "$out.new" "$out"
