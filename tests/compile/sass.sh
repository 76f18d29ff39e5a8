#!/usr/bin/env bash
# sass.sh PROGRAM - what became of the kernels that move most: PROGRAM writes them for sm_90, nvdisasm
# reads them. Each must load and store 16 bytes at a time, and have so many loads on their way before
# an instruction reads the first. Prints TAP; run by run.sh.

set -u
cd "$(dirname "$0")/../.." || exit
BUILD=build/compile

#       kernel         loads  in a row  stores
KERNELS="reduce_f32       4      4        1
         reduce_f64       4      4        1
         reduce_half      4      4        1
         reduce_bool      4      4        1
         axpby_f32        4      4        2
         axpby_f64        4      4        2
         axpby_half       4      4        2
         stats_f32        4      4        0
         stats_f64        8      8        0
         stats_half       2      2        0
         total            8      8        0
         sums_end         8      7        0
         channels_end     8      7        0
         cast             4      4        4
         fill             0      0        1
         copy             4      4        4
         sgd_f32          3      3        2
         sgd_f64          3      3        2
         adamw_f32        4      4        3
         adamw_f64        4      4        3"

find_nvdisasm() {
    command -v nvdisasm ||
        find build/nvdisasm -name nvdisasm -type f -perm -u+x 2>/dev/null | head -n 1 | grep .
}

# Kernel, 128-bit loads, most of them before one is read, 128-bit stores.
count_accesses() {
    awk '
        function read_in(text,    rest) {
            rest = text
            while (match(rest, /[^A-Z0-9]R[0-9]+/)) {
                if (substr(rest, RSTART + 2, RLENGTH - 2) in awaited) return 1
                rest = substr(rest, RSTART + RLENGTH)
            }
            return 0
        }
        /^\.text\.dp_cuda_/ {
            kernel = $1
            gsub(/^\.text\.dp_cuda_|:$/, "", kernel)
            row = 0
            delete awaited
        }
        /LDG\.E\.128/ {
            loads[kernel]++
            text = $0
            sub(/.*LDG\.E\.128[A-Z0-9.]* R/, "", text)
            if (read_in(" " substr(text, index(text, ",")))) { delete awaited; row = 0 }
            for (k = 0; k < 4; k++) awaited[text + k] = 1
            if (++row > most[kernel]) most[kernel] = row
            next
        }
        /STG\.E\.128/ { stores[kernel]++ }
        row > 0 && read_in($0) { delete awaited; row = 0 }
        END {
            for (kernel in loads) seen[kernel] = 1
            for (kernel in stores) seen[kernel] = 1
            for (kernel in seen) print kernel, loads[kernel] + 0, most[kernel] + 0, stores[kernel] + 0
        }'
}

skip() { echo "ok - 128-bit accesses # SKIP $1"; }

nvdisasm=$(find_nvdisasm) || { skip "no nvdisasm"; exit; }
if ! { "$1" $BUILD/kernels.cubin && "$nvdisasm" -c $BUILD/kernels.cubin >$BUILD/kernels.sass; }; then
    echo "not ok - 128-bit accesses # the kernels cannot be read"
    exit 1
fi
count_accesses <$BUILD/kernels.sass >$BUILD/kernels.counts
while read -r kernel loads row stores; do
    read -r _ got_loads got_row got_stores < <(grep "^$kernel " $BUILD/kernels.counts; echo 0 0 0 0)
    if ((got_loads >= loads && got_row >= row && got_stores >= stores)); then
        echo "ok - $kernel: $got_loads loads and $got_stores stores of 128 bits, $got_row in a row"
    else
        echo "not ok - $kernel: $got_loads loads and $got_stores stores of 128 bits, $got_row in a" \
            "row, not $loads, $stores, $row"
    fi
done <<<"$KERNELS"
