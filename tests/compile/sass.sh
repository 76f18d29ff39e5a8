#!/usr/bin/env bash
# sass.sh PROGRAM - what became of the kernels: PROGRAM compiles them for several architectures, the
# assembler says what registers they have, nvdisasm and sass.awk what their loops are made of. No
# kernel spills; those that move most load and store 16 bytes at a time, and have so many on their
# way before an instruction reads the first; sums do little in f64. What dp_cuda.h says of all that
# is compared with it. Prints TAP; run by run.sh.

set -u
cd "$(dirname "$0")/../.." || exit
BUILD=build/compile
ARCHS="75 90 100 120"

#       kernel         loads  bytes  stores
KERNELS="reduce_f32       4     64      1
         reduce_f64       4     64      1
         reduce_half      4     64      1
         reduce_bool      4     64      1
         reduce_whole     0     32      0
         axpby_f32        4     64      2
         axpby_f64        4     64      2
         axpby_half       4     64      2
         stats_f32        4     64      0
         stats_f64        8    128      0
         stats_half       2     32      0
         total            8    128      0
         sums_end         8     32      0
         channels_f32     0     64      0
         channels_f64     0    128      0
         channels_half    0     32      0
         channels_end     8     48      0
         cast             4     64      4
         fill             0      0      1
         copy             4     64      4
         sgd_f32          3     48      2
         sgd_f64          3     48      2
         adamw_f32        4     64      3
         adamw_f64        4     64      3"

# Of sums, the bytes of an element; a lane takes 16 of them a round.
SUMS="stats_f32 4
      stats_half 2
      stats_f64 8
      total 8
      channels_f32 4
      channels_half 2
      channels_f64 8"

# What they read: multiprocessors, GHz, GB/s of cards that do two f64 a clock and multiprocessor.
CARDS="128 2.52 1008
       82 1.695 936
       40 1.59 320"

failed=0
say() { # holds text
    if (($1)); then
        echo "ok - sm_$arch: $2"
    else
        echo "not ok - sm_$arch: $2"
        failed=1
    fi
}

find_nvdisasm() {
    command -v nvdisasm ||
        find build/nvdisasm -name nvdisasm -type f -perm -u+x 2>/dev/null | head -n 1 | grep .
}

# Kernel, registers, and bytes of spilled ones that are stored and loaded.
registers() {
    awk 'function number_before(words) { return match($0, "[0-9]+ " words) ? substr($0, RSTART) + 0 : 0 }
         /Compiling entry function/ { gsub(/.*dp_cuda_|\x27.*/, ""); kernel = $0 }
         /spill stores/ {
             stored = number_before("bytes spill stores")
             loaded = number_before("bytes spill loads")
         }
         /Used [0-9]+ registers/ { print kernel, number_before("registers"), stored, loaded }'
}

check_spills() {
    local kernel stored loaded spills="" count=0
    while read -r kernel _ stored loaded; do
        ((++count, stored + loaded == 0)) || spills+=" $kernel: $stored and $loaded bytes"
    done <"$BUILD/kernels.$arch.registers"
    say $((count > 0)) "registers of $count kernels are known"
    say $((${#spills} == 0)) "no kernel spills$spills"
}

check_loads() {
    local kernel loads bytes stores got_loads got_bytes got_stores
    while read -r kernel loads bytes stores; do
        read -r _ got_bytes got_loads got_stores _ \
            < <(grep "^$kernel " "$BUILD/kernels.$arch.counts"; echo 0 0 0 0 0)
        say $((got_loads >= loads && got_bytes >= bytes && got_stores >= stores)) \
            "$kernel: $got_loads loads and $got_stores stores of 128 bits, $got_bytes bytes in a row"
    done <<<"$KERNELS"
}

# What >>text says to be on its way on a multiprocessor: a thread's bytes, for all threads that have
# registers. They come in eights, and there are 65,536.
check_on_their_way() {
    local kernel bytes registers said
    while read -r kernel _ bytes _; do
        read -r _ registers _ < <(grep "^$kernel " "$BUILD/kernels.$arch.registers"; echo 0 999)
        ((blocks = 65536 / ((registers + 7) / 8 * 8 * 256)))
        ((blocks = blocks < 8 ? blocks : 8))
        said=$(grep -oE "^ .*\b$kernel [0-9]+" dp_cuda.h | head -n 1 | grep -oE '[0-9]+$')
        [[ $kernel =~ _end$|^fill$ ]] ||
            say $((${said:-0} > 0 && ${said:-0} <= bytes * blocks / 4)) \
                "$kernel: $((bytes * blocks / 4)) KB on their way, as dp_cuda.h says"
    done <<<"$KERNELS"
}

# A row as it stands in >>sums: f64 instructions an element, and how long they take, in hundredths of
# the time that memory takes, on each card. Lanes add up their sums in 24 instructions of a warp for
# every 4096 elements.
row_of() { # kernel bytes f64
    awk -v name="$1" -v bytes="$2" -v f64="$3" '
        BEGIN { each = f64 / 16 + 24 * 32 / 4096; row = sprintf("%-13s  %.2f", name, each) }
        { share = each / 2 / (bytes * $1 * $2 / $3); row = row sprintf("  %3.0f %%", 100 * share) }
        END { print row }' <<<"$CARDS"
}

check_f64() {
    local kernel bytes f64 row
    while read -r kernel bytes; do
        read -r _ _ _ _ f64 _ < <(grep "^$kernel " "$BUILD/kernels.$arch.counts"; echo 0 0 0 0 999)
        row=$(row_of "$kernel" "$bytes" "$f64")
        grep -qF "     $row" dp_cuda.h
        say $((!$?)) "f64 of $row, as dp_cuda.h says"
    done <<<"$SUMS"
}

nvdisasm=$(find_nvdisasm) || { echo "ok - what kernels are made of # SKIP no nvdisasm"; exit; }
for arch in $ARCHS; do
    "$1" "sm_$arch" "$BUILD/kernels.$arch" >"$BUILD/kernels.$arch.log" &
done
wait
for arch in $ARCHS; do
    registers <"$BUILD/kernels.$arch.log" >"$BUILD/kernels.$arch.registers"
    "$nvdisasm" -c "$BUILD/kernels.$arch" | awk -f tests/compile/sass.awk \
        >"$BUILD/kernels.$arch.counts"
    check_spills
    check_loads
    check_f64
    [ "$arch" != 90 ] || check_on_their_way
done
exit $failed
