#!/bin/sh
# abi.sh - what a program that was compiled relies on: every declaration of the public headers for the
# CPU, as the compiler sees it. Called by make.
#
#   abi.sh list           prints it, one declaration a line, after the version
#   abi.sh check FILE     prints what is in FILE, which is such a list, and is so no more; nothing if
#                         dp.h is another 0.N than FILE

set -eu
cd "$(dirname "$0")/.."

version() { sed -n '1s/.* v\([0-9.]*\) .*/\1/p' dp.h; }

declarations() {
    for header in dp_array dp_average dp_check dp_data dp_local dp_norm dp_save dp_train; do
        echo "#include \"$header.h\""
    done | ${CC:-cc} -std=c11 -E -I. -x c - | awk '
        /^# [0-9]+ "/ { ours = $3 ~ /^"(\.\/)?dp[a-z_]*\.h"$/; next }
        ours && !/^#/ { text = text " " $0 }
        END {
            for (i = 1; i <= length(text); i++) {
                c = substr(text, i, 1)
                depth += (c == "{") - (c == "}")
                one = one c
                if (depth > 0 || !(c == ";" || (c == "}" && one ~ /static inline/))) continue
                gsub(/[ \t]+/, " ", one)
                sub(/^ /, "", one)
                print one
                one = ""
            }
        }'
}

case ${1:-} in
list)
    echo "dp.h $(version)"
    declarations
    ;;
check)
    then=$(sed -n '1s/^dp\.h //p' "$2")
    now=$(version)
    [ "${then%.*}" = "${now%.*}" ] || exit 0
    declarations | sort >build/abi
    sed 1d "$2" | sort | comm -23 - build/abi
    ;;
*)
    sed -n '2,/^$/s/^# \{0,1\}//p' "$0"
    exit 2
    ;;
esac
