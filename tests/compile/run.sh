#!/usr/bin/env bash
# run.sh - the ways in which a user may include and compile dp.h. Prints TAP; run by `make test`.

set -u
cd "$(dirname "$0")/../.." || exit
BUILD=build/compile
mkdir -p $BUILD

GCC=${CC:-gcc}
CLANG=${CLANG:-clang}
read -r -a WARN <<<"${WARNINGS:--Wall -Wextra -Wpedantic -Werror}"
read -r -a WARN_GCC <<<"${GCC_WARNINGS:-}"
read -r -a STB <<<"${STB_CFLAGS:-}"
read -r -a LINK <<<"${LIBS:--lpthread -lm}"
WARN_CXX=(-Wall -Wextra -Wpedantic -Wconversion -Wsign-conversion -Wshadow -Wundef -Wcast-qual
    -Wcast-align -Wold-style-cast -Wdouble-promotion -Werror)

# expect NAME COMMAND...: the command must succeed
expect() {
    local name=$1 text
    shift
    if text=$("$@" 2>&1); then
        echo "ok - $name"
    else
        echo "not ok - $name"
        printf '%s\n' "$*" "$text" | head -n 30 | sed 's/^/#   /'
    fi
}

# expect_error NAME PATTERN COMMAND...: the command must fail, say why, and nothing else
expect_error() {
    local name=$1 pattern=$2 text said
    shift 2
    if text=$("$@" 2>&1); then
        echo "not ok - $name # it compiles"
        return
    fi
    said=$(grep -E 'error:|warning:' <<<"$text")
    if [ "$(wc -l <<<"$said")" = 1 ] && grep -qE "error: .*$pattern" <<<"$said"; then
        echo "ok - $name"
    else
        echo "not ok - $name # says more than \"$pattern\""
        head -n 30 <<<"$text" | sed 's/^/#   /'
    fi
}

has() { command -v "$1" >/dev/null 2>&1; }

skip() { echo "ok - $1 # SKIP $1: $2"; }

# write FILE LINE...
write() {
    local file=$BUILD/$1
    shift
    printf '%s\n' "$@" >"$file"
}

# The compiler is the variable $cc from here on, $warn its warnings, and $program what it links: one
# for each group, as they run side by side.
c() { "$cc" -I. "${STB[@]}" "$@"; }
strict() { c "${warn[@]}" "$@"; }
parses() { strict -fsyntax-only "$@"; }

links() {
    # Frames are larger without optimization; the test builds check what they are with it.
    strict "$@" -Wno-frame-larger-than -o "$program" "${LINK[@]}" && timeout 1800 "$program"
}

IMPLEMENT='#define DP_IMPLEMENTATION'
DP='#include "dp.h"'
CPU='#include "dp_cpu.h"'
AROUND='array average check data norm save train' # headers around training
EMIT_STB='#define STB_DS_IMPLEMENTATION'
INCLUDE_STB='#if __has_include("stb_ds.h")
#include "stb_ds.h"
#else
#include <stb/stb_ds.h>
#endif'

write dp.c "$IMPLEMENT" "$DP"
write twice.c "$IMPLEMENT" "$DP" "$DP"
write dp_cpu.c "$IMPLEMENT" "$DP" "$CPU"
write cpu_dp.c "$IMPLEMENT" "$CPU" "$DP"
write cpu_declared_before.c "$CPU" "$IMPLEMENT" "$DP"
write cpu_alone.c "$CPU"
for header in $AROUND; do
    write "${header}_alone.c" "#include \"dp_$header.h\""
done
for room in dp/*.h; do
    write "room_$(basename "$room" .h).c" "#include \"$room\""
    write "room_after_$(basename "$room" .h).c" "$IMPLEMENT" "$DP" "#include \"$room\""
done
mapfile -t around < <(printf '#include "dp_%s.h"\n' $AROUND)
write around.c "${around[@]}"
write around_dp.c "$IMPLEMENT" "${around[@]}" "$DP"
write around_static.c '#define DP_STATIC' "$IMPLEMENT" "$DP" "${around[@]}"
write stb_user.c "$EMIT_STB" "$INCLUDE_STB"
write cuda.c "$IMPLEMENT" '#include "dp_cuda.h"'
write cuda_dp.c "$IMPLEMENT" '#define DP_USE_CUDA' "$DP" '#include "dp_cuda.h"'
write nccl.c "$IMPLEMENT" '#include "dp_nccl.h"' "$DP"
write nccl_dp.c "$IMPLEMENT" '#define DP_USE_NCCL' "$DP" '#include "dp_cuda.h"' '#include "dp_nccl.h"'
write nccl_after.c "$IMPLEMENT" '#define DP_USE_CUDA' "$DP" '#include "dp_nccl.h"'
write hip.c "$IMPLEMENT" '#include "dp_hip.h"' "$DP"
write hip_dp.c "$IMPLEMENT" '#define DP_USE_HIP' "$DP" '#include "dp_hip.h"'
write hip_declared.c '#define DP_USE_HIP' "$DP" "$IMPLEMENT" '#include "dp_hip.h"'
write hip_and_cuda.c "$IMPLEMENT" '#define DP_USE_HIP' '#define DP_USE_CUDA' "$DP"
write rccl_and_nccl.c "$IMPLEMENT" '#define DP_USE_RCCL' '#define DP_USE_NCCL' "$DP" "$DP"
write rccl_declared.c '#define DP_USE_RCCL' "$DP" 'extern const dp_coll_ops *(*const table)(void);' \
    'const dp_coll_ops *(*const table)(void) = dp_rccl_coll;'
write hip_after_cuda.c '#include "dp_cuda.h"' '#include "dp_hip.h"'
write rccl.c "$IMPLEMENT" '#define DP_USE_RCCL' "$DP"
write mpi.c "$IMPLEMENT" '#include "dp_mpi.h"' "$DP"
write mpi_dp.c "$IMPLEMENT" '#define DP_USE_MPI' "$DP" '#include "dp_mpi.h"'
write mpi_after.c "$IMPLEMENT" "$DP" '#include "dp_mpi.h"'
write all.c "$IMPLEMENT" "$DP" "${around[@]}" '#include "tests/compile/use.c"'
write all_declared.c "${around[@]}" "$DP"
write late.c '#include <stdlib.h>' "$(cat $BUILD/all.c)"
write late_define.c '#include <stdlib.h>' '#define _GNU_SOURCE' "$(cat $BUILD/all.c)"
write declared_before.c "$DP" "$(cat $BUILD/all.c)"
write big_endian.c '#undef __BYTE_ORDER__' '#define __BYTE_ORDER__ __ORDER_BIG_ENDIAN__' \
    "$IMPLEMENT" '#include "dp_save.h"'
mkdir -p $BUILD/mpi-2
write mpi-2/mpi.h '#define MPI_VERSION 2'

# Whatever lets a compiler take NaN for a number, or add in another order.
FAST='with -fno-fast-math: NaN gets lost'

# What the implementation needs of the system's headers is asked for before the first.
TOO_LATE='include dp.h before any other header of this file, or compile with -D_GNU_SOURCE'

c_cases() {
    local std fast header
    for std in c11 c17 gnu11 gnu17; do
        expect "$cc $std: declarations" parses -std=$std tests/compile/use.c
        expect "$cc $std: implementation" parses -std=$std $BUILD/dp.c
    done
    for fast in -ffast-math -Ofast -ffinite-math-only; do
        expect_error "$cc $fast says what to do" "$FAST" parses -std=c11 $fast $BUILD/all.c
        expect "$cc $fast: declarations" parses -std=c11 $fast tests/compile/use.c
    done
    expect "$cc -ffast-math -fno-fast-math: implementation" \
        c -std=c11 -ffast-math -fno-fast-math -fsyntax-only $BUILD/dp.c
    expect "$cc: dp_cpu.h alone" parses -std=c11 $BUILD/cpu_alone.c
    for header in $AROUND; do
        expect "$cc: dp_$header.h alone" parses -std=c11 "$BUILD/${header}_alone.c"
    done
    expect "$cc: headers around training, dp.h" parses -std=c11 $BUILD/around_dp.c
    expect "$cc: dp.h, headers around training, static" parses -std=c11 $BUILD/around_static.c
    expect "$cc: DP_STATIC" parses -std=c11 -DDP_STATIC $BUILD/dp.c
    # To be silent about functions that nobody calls it has to be compiled.
    expect "$cc: DP_ONE_PROCESS" strict -std=c11 -DDP_ONE_PROCESS -Wno-frame-larger-than \
        -c $BUILD/around_dp.c -o "$program.o"
    expect "$cc: DP_ONE_PROCESS, gnu17, static" parses -std=gnu17 -DDP_ONE_PROCESS $BUILD/around_static.c
    expect "$cc: included twice" parses -std=c11 $BUILD/twice.c
    expect "$cc: dp.h, dp_cpu.h" parses -std=c11 $BUILD/dp_cpu.c
    expect "$cc: dp_cpu.h, dp.h" parses -std=c11 $BUILD/cpu_dp.c
    for std in c11 gnu11; do
        expect_error "$cc $std: system headers first says what to do" "$TOO_LATE" \
            parses -std=$std $BUILD/late.c
        expect_error "$cc $std: _GNU_SOURCE after system headers says what to do" "$TOO_LATE" \
            parses -std=$std $BUILD/late_define.c
        expect_error "$cc $std: declarations first says what to do" "$TOO_LATE" \
            parses -std=$std $BUILD/declared_before.c
        expect "$cc $std: system headers first, -D_GNU_SOURCE" \
            parses -std=$std -D_GNU_SOURCE $BUILD/late.c
        expect "$cc $std: declarations first, -D_GNU_SOURCE" \
            parses -std=$std -D_GNU_SOURCE $BUILD/declared_before.c
        expect "$cc $std: dp_cpu.h first, -D_GNU_SOURCE" \
            parses -std=$std -D_GNU_SOURCE $BUILD/cpu_declared_before.c
    done
}

# Parts of dp.h, whose one error says so.
rooms() {
    local room name
    cc=$GCC
    for room in dp/*.h; do
        name=$(basename "$room" .h)
        expect_error "$room by itself" "$room is a part of dp.h: include dp.h" \
            c -std=c11 -fsyntax-only "$BUILD/room_$name.c"
        expect_error "$room after dp.h" "$room is a part of dp.h: include dp.h" \
            c -std=c11 -fsyntax-only "$BUILD/room_after_$name.c"
    done
}

# All headers as one file, in a folder in which there is nothing else of them.
one_file() {
    local std at=$BUILD/one
    mkdir -p $at/examples
    cp build/whole/dp.h $at
    cp examples/*.[ch] $at/examples
    sed -i 's,^#include "../dp_[a-z]*\.h".*,#include "../dp.h",' $at/examples/*.[ch]
    for cc in "$GCC" "$CLANG"; do
        has "$cc" || continue
        for std in c11 gnu17; do
            expect "$cc $std: one file, declarations" \
                one -std=$std "${WARN[@]}" -fsyntax-only tests/compile/use.c
            # In a file this long gcc takes seconds for the indentation, which is that of the headers.
            expect "$cc $std: one file, implementation" one -std=$std "${WARN[@]}" \
                -Wno-misleading-indentation -Wno-frame-larger-than -fsyntax-only $BUILD/dp.c
        done
    done
    cc=g++
    has $cc && expect "$cc: one file, declarations" \
        one -std=c++11 "${WARN_CXX[@]}" -fsyntax-only -x c++ tests/compile/use.c
    cc=$GCC
    expect "$cc: one file, the program of README.md" in_one_file hello
    expect "$cc: one file, optimizers and a loader" in_one_file train_images
}

one() { "$cc" -I$BUILD/one "${STB[@]}" "$@"; }

# in_one_file EXAMPLE, which holds the library, too
in_one_file() {
    "$cc" -std=c11 -DDP_IMPLEMENTATION "${STB[@]}" "$BUILD/one/examples/$1.c" -o "$program" "${LINK[@]}" &&
        timeout 300 "$program" >/dev/null
}

# Compilers and languages that the library is not for.
refusals() {
    local std library
    for cc in "$GCC" "$CLANG"; do
        has "$cc" || continue
        for std in c99 gnu99 gnu89; do
            expect_error "$cc $std says what to do" 'as C11 or newer' \
                c -std=$std -fsyntax-only $BUILD/all.c
            expect "$cc $std: declarations" c -std=$std -fsyntax-only tests/compile/use.c
        done
        for std in c89 iso9899:199409; do
            expect_error "$cc $std says what to do" 'as C11 or newer' \
                c -std=$std -fsyntax-only $BUILD/all_declared.c
        done
        expect_error "$cc: dp_save.h on a machine of the other byte order" 'little-endian' \
            c -std=c11 -Wno-builtin-macro-redefined -fsyntax-only $BUILD/big_endian.c
        expect_error "$cc: a system without POSIX" 'for Linux, macOS and the BSDs only' \
            c -std=c11 -U__unix__ -fsyntax-only $BUILD/all.c
        expect_error "$cc: HIP and CUDA" "AMD's GPUs .* or for NVIDIA's, not for both" \
            c -std=c11 -fsyntax-only $BUILD/hip_and_cuda.c
        expect_error "$cc: RCCL and NCCL" "AMD's GPUs .* or for NVIDIA's, not for both" \
            c -std=c11 -fsyntax-only $BUILD/rccl_and_nccl.c
        for library in MPI NCCL RCCL; do
            expect_error "$cc: DP_ONE_PROCESS and $library" 'define one or the other' \
                c -std=c11 -DDP_ONE_PROCESS -DDP_USE_$library -fsyntax-only $BUILD/dp.c
        done
        expect_error "$cc: dp_hip.h after dp_cuda.h" 'without dp_cuda.h' \
            c -std=c11 -fsyntax-only $BUILD/hip_after_cuda.c
        expect_error "$cc: dp_mpi.h with MPI 2" 'MPI 3 or newer' \
            c -std=c11 -I$BUILD/mpi-2 -fsyntax-only $BUILD/mpi.c
    done
    for cc in g++ clang++; do
        has $cc || continue
        expect_error "$cc: the implementation is C, and says so" 'is C11: compile it as C' \
            c -std=c++17 -fsyntax-only -x c++ $BUILD/all.c
        expect_error "$cc c++98 says what to do" 'as C\+\+11 or newer' \
            c -std=c++98 -fsyntax-only -x c++ $BUILD/all_declared.c
    done
    cc=musl-gcc STB=() # which does not look where other compilers do
    has $cc && expect_error "$cc: no stb_ds.h" 'dp.h needs stb_ds.h' \
        c -std=c11 -fsyntax-only $BUILD/all.c
    cc=tcc
    has $cc || { skip "$cc" "not installed"; return; }
    expect_error "$cc says what to do" 'with gcc or clang' c -c $BUILD/all.c -o "$program"
    expect "$cc: declarations" c -c $BUILD/around.c -o "$program"
}

# How files go together is no question of the compiler.
link_cases() {
    cc=$GCC
    warn=("${WARN[@]}" "${WARN_GCC[@]}")
    expect "$cc: one file implements, another uses" \
        links -std=c11 $BUILD/dp.c tests/compile/main.c
    stb_cases
}

# A program with a stb_ds of its own, and a library that is DP_STATIC.
stb_cases() {
    local object=$BUILD/static.o first
    expect "$cc: DP_STATIC in an object file" strict -std=c11 -DDP_STATIC -Wno-frame-larger-than \
        -c $BUILD/dp.c -o "$object"
    expect "$cc: nothing of stb_ds is in it" has_no_symbol stbds "$object"
    for first in -DSTB_LAST -DSTB_FIRST; do
        expect "$cc: a user's stb_ds in the same file, $first" links -std=c11 -D_GNU_SOURCE \
            -DDP_STATIC $first -DSTB_DS_IMPLEMENTATION tests/compile/stb.c "$object"
        expect "$cc: a user's stb_ds in another file, $first" links -std=c11 -D_GNU_SOURCE \
            -DDP_STATIC $first tests/compile/stb.c $BUILD/stb_user.c "$object"
    done
}

# has_no_symbol PART OBJECT: neither a global nor a local one
has_no_symbol() { nm "$2" >"$program.symbols" && ! grep -i "$1" "$program.symbols"; }

# cxx_cases CC: $cc is the C++ compiler
cxx_cases() {
    local std
    for std in 11 14 17 20; do
        expect "$cc c++$std: declarations" parses "-std=c++$std" -x c++ tests/compile/use.c
        expect "$cc c++$std: headers around training" parses "-std=c++$std" -x c++ $BUILD/around.c
    done
    local object
    object=$BUILD/dp-$(basename "$1").o
    expect "$1: object file of dp.h" "$1" -std=c11 -I. "${STB[@]}" -c $BUILD/dp.c -o "$object"
    expect "$cc: C++ program with dp.h in a C file" \
        links -std=c++11 -x c++ tests/compile/main.c -x none "$object"
    expect "$cc: C++17 program with lambdas and RAII" \
        links -std=c++17 tests/compile/raii.cpp "$object"
    expect "$1: object file with DP_ONE_PROCESS" "$1" -std=c11 -DDP_ONE_PROCESS -I. "${STB[@]}" \
        -c $BUILD/dp.c -o "$object"
    expect "$cc: C++ program with DP_ONE_PROCESS in a C file" \
        links -std=c++11 -x c++ tests/compile/main.c -x none "$object"
}

c_compiler() {
    cc=$1
    has "$cc" || { skip "C with $cc" "not installed"; return; }
    warn=("${WARN[@]}")
    [ "$cc" = "$CLANG" ] || warn+=("${WARN_GCC[@]}")
    c_cases
}

# cxx_compiler CXX CC: the implementation is compiled by CC
cxx_compiler() {
    cc=$1
    has "$cc" || { skip "C++ with $cc" "not installed"; return; }
    warn=("${WARN_CXX[@]}")
    cxx_cases "$2"
}

# The simulator's declarations, and where there is a Toolkit the real ones: dp_cuda.h is silent with
# both compilers, its kernels compile for old and new architectures, and without a GPU the CPU
# serves.
cuda_compiler() {
    local home at
    cc=$GCC
    warn=("${WARN[@]}" "${WARN_GCC[@]}")
    expect "the simulator declares what dp_cuda.h is told" parses -std=c11 -Itests/sim \
        tests/sim/drift.c
    has nvcc || { skip "the real CUDA" "no nvcc"; return; }
    home=$(dirname "$(dirname "$(readlink -f "$(command -v nvcc)")")")
    at=(-std=c11 -isystem "$home/include")
    expect "the real libraries declare the same" parses "${at[@]}" tests/sim/drift.c
    expect "$cc: dp_cuda.h" parses "${at[@]}" $BUILD/cuda.c
    expect "$cc: dp_cuda.h, DP_DYNAMIC_LOAD" parses "${at[@]}" -DDP_DYNAMIC_LOAD $BUILD/cuda.c
    expect "$cc: dp_cuda.h, dp.h" parses "${at[@]}" $BUILD/cuda_dp.c
    expect "$cc: kernels compile, the CPU serves where no GPU is" links "${at[@]}" \
        tests/compile/cuda.c -L"$home/lib64" -Wl,--disable-new-dtags,-rpath,"$home/lib64" \
        -lcudart -lnvrtc
    expect "$cc: the same, loaded at run time" env LD_LIBRARY_PATH="$home/lib64" \
        "$BASH" -c 'exec "$@"' - "$(loaded cuda "${at[@]}")" one
    tests/compile/sass.sh "$program"
    expect "nvcc: declarations" nvcc -I. -Werror all-warnings -x cu -c tests/compile/use.c \
        -o $BUILD/use.o
    expect "nvcc: declarations of dp_cuda.h" nvcc -I. -DDP_USE_CUDA -Werror all-warnings -x cu \
        -c tests/compile/use.c -o $BUILD/use_cuda.o
    has "$CLANG" || return
    cc=$CLANG
    warn=("${WARN[@]}")
    expect "$cc: dp_cuda.h" parses "${at[@]}" $BUILD/cuda.c
    expect "$cc: dp_cuda.h, DP_DYNAMIC_LOAD" parses "${at[@]}" -DDP_DYNAMIC_LOAD $BUILD/cuda.c
}

# The kernels for GPUs that HIP's own compiler may be too old for: by the newest clang.
hip_device() {
    local gpu from=(-x hip --cuda-device-only -nogpulib -nogpuinc -Werror)
    cc=$(compgen -c | grep -xE 'clang-[0-9]+' | sort -uV | tail -n 1)
    cc=${cc:-$CLANG}
    for gpu in gfx942 gfx1100; do
        if echo | "$cc" "${from[@]}" --offload-arch=$gpu -S - -o "$program.s" 2>/dev/null; then
            expect "$cc: kernels for $gpu" "$cc" "${from[@]}" --offload-arch=$gpu -O2 \
                -ffp-contract=off -include tests/compile/hip_device.h -S "$1" -o "$program.s"
        else
            skip "kernels for $gpu" "$cc does not know it"
        fi
    done
}

# dp_hip.h with the simulator's declarations, and with HIP where it is: kernels compile for all sorts
# of GPUs, and without one the CPU serves. RCCL is in few distributions.
hip_compiler() {
    local file load
    for cc in "$GCC" "$CLANG"; do
        has "$cc" || continue
        warn=("${WARN[@]}")
        [ "$cc" = "$CLANG" ] || warn+=("${WARN_GCC[@]}")
        for load in -DDP_STATIC -DDP_DYNAMIC_LOAD; do
            expect "$cc: dp_hip.h, RCCL of the simulator, $load" parses -std=c11 -Itests/sim/hip \
                $load $BUILD/rccl.c
        done
        expect "$cc: the simulator's HIP declares what dp_hip.h is told" parses -std=c11 \
            -Itests/sim/hip tests/sim/hip/drift.c
        expect "$cc: DP_USE_RCCL brings dp_hip.h" parses -std=c11 $BUILD/rccl_declared.c
        expect "$cc: declarations of dp_hip.h" parses -std=c11 -DDP_USE_HIP -DDP_USE_RCCL \
            tests/compile/use.c
        [ -e /usr/include/hip/hip_runtime_api.h ] || { skip "HIP with $cc" "no headers"; continue; }
        expect "$cc: the real HIP declares the same" parses -std=c11 \
            -D__HIP_PLATFORM_AMD__ tests/sim/hip/drift.c
        for file in hip hip_dp; do
            expect "$cc: $file.c" parses -std=c11 $BUILD/$file.c
            expect "$cc: $file.c, DP_DYNAMIC_LOAD" parses -std=c11 -DDP_DYNAMIC_LOAD $BUILD/$file.c
        done
        expect "$cc: hip_declared.c" parses -std=c11 -D_GNU_SOURCE $BUILD/hip_declared.c
    done
    cc=$GCC
    warn=("${WARN[@]}" "${WARN_GCC[@]}")
    [ -e "$("$cc" -print-file-name=libamdhip64.so)" ] ||
        { skip "the real HIP" "not installed"; return; }
    expect "$cc: HIP compiles the kernels, the CPU serves where no GPU is" links -std=c11 \
        tests/compile/hip.c -lamdhip64
    expect "$cc: the same, loaded at run time" "$(loaded hip -std=c11)" one
    "$program" "$program.hip" && hip_device "$program.hip"
}

# dp_nccl.h with NCCL beside the Toolkit, if it is there.
nccl_compiler() {
    local home at file link
    cc=$GCC
    warn=("${WARN[@]}" "${WARN_GCC[@]}")
    home=$(dirname "$(dirname "$(readlink -f "$(command -v nvcc)")")")
    at=(-std=c11 -isystem "$home/include")
    echo '#include <nccl.h>' | "$cc" "${at[@]}" -fsyntax-only -x c - 2>/dev/null ||
        { skip "the real NCCL" "no nccl.h"; return; }
    link=(-L"$home/lib64" -Wl,--disable-new-dtags,-rpath,"$home/lib64")
    for file in nccl nccl_dp nccl_after; do
        expect "$cc: $file.c" parses "${at[@]}" $BUILD/$file.c
    done
    expect "$cc: dp_nccl.h, DP_DYNAMIC_LOAD" parses "${at[@]}" -DDP_DYNAMIC_LOAD $BUILD/nccl.c
    expect "$cc: NCCL is linked" links "${at[@]}" tests/compile/nccl.c "${link[@]}" -lnccl -lcudart \
        -lnvrtc
    expect "$cc: NCCL is loaded at run time" links "${at[@]}" -DDP_DYNAMIC_LOAD tests/compile/nccl.c \
        "${link[@]}"
    has "$CLANG" || return
    cc=$CLANG
    warn=("${WARN[@]}")
    expect "$cc: dp_nccl.h" parses "${at[@]}" $BUILD/nccl.c
    expect "$cc: dp_nccl.h, DP_DYNAMIC_LOAD" parses "${at[@]}" -DDP_DYNAMIC_LOAD $BUILD/nccl.c
}

# dp_mpi.h with each MPI that there is; its declarations need none.
mpi_compiler() {
    local mpi file
    warn=("${WARN[@]}")
    for cc in "$GCC" "$CLANG"; do
        has "$cc" && expect "$cc: declarations of dp_mpi.h" parses -std=c11 -DDP_USE_MPI \
            tests/compile/use.c
    done
    warn=("${WARN_CXX[@]}")
    for cc in g++ clang++; do
        has $cc && expect "$cc: declarations of dp_mpi.h" parses -std=c++11 -DDP_USE_MPI -x c++ \
            tests/compile/use.c
    done
    warn=("${WARN[@]}")
    for mpi in openmpi mpich; do
        cc=mpicc.$mpi
        echo '#include <mpi.h>' | "$cc" -fsyntax-only -x c - 2>/dev/null ||
            { skip "dp_mpi.h with $mpi" "not installed"; continue; }
        for file in mpi mpi_dp mpi_after; do
            OMPI_CC=$GCC MPICH_CC=$GCC expect "$GCC, $mpi: $file.c" parses -std=c11 $BUILD/$file.c
            has "$CLANG" || continue
            OMPI_CC=$CLANG MPICH_CC=$CLANG expect "$CLANG, $mpi: $file.c" parses -std=c11 \
                -Wno-unused-command-line-argument $BUILD/$file.c
        done
    done
}

# loaded NAME FLAG...: prints the path of NAME.c's program that loads its libraries when it runs.
loaded() {
    local name=$1
    shift
    strict "$@" -DDP_DYNAMIC_LOAD -Wno-frame-larger-than "tests/compile/$name.c" \
        -o "$BUILD/$name-loaded" "${LINK[@]}" >&2
    echo "$BUILD/$name-loaded"
}

other_machine() {
    cc=aarch64-linux-gnu-gcc
    has $cc || { skip "implementation with $cc" "not installed"; return; }
    warn=("${WARN[@]}" "${WARN_GCC[@]}")
    expect "$cc: implementation" parses -std=c11 $BUILD/dp.c
}

# Where there is a compiler for them; nothing runs.
other_system() {
    local system zig=(build/zig/bin/python -m ziglang)
    [ -x "${zig[0]}" ] || zig=(python3 -m ziglang)
    "${zig[@]}" version >/dev/null 2>&1 || { skip "macOS, FreeBSD" "no ziglang"; return; }
    export ZIG_GLOBAL_CACHE_DIR=build/zig-cache ZIG_LOCAL_CACHE_DIR=build/zig-cache
    mkdir -p $BUILD/stb # by itself, not beside files that are compiled meanwhile
    cp "$(echo "$INCLUDE_STB" | "$GCC" -E "${STB[@]}" - | sed -nE 's/^# 1 "(.*stb_ds.h)".*/\1/p' |
        head -n 1)" $BUILD/stb/stb_ds.h
    for system in x86_64-macos aarch64-macos x86_64-freebsd; do
        expect "$system: implementation" "${zig[@]}" cc -target $system -std=c11 "${WARN[@]}" \
            -Wno-frame-larger-than -fno-sanitize=all -I. -isystem $BUILD/stb -c $BUILD/around_dp.c \
            -o $BUILD/$system.o
    done
}

openmp() {
    cc=$GCC warn=("${WARN[@]}")
    expect "dp_spawn after a region of OpenMP" links -std=gnu11 -fopenmp tests/compile/openmp.c
}

thirty_two_bits() {
    cc=$GCC
    expect_error "32 bits are refused" 'dp.h: for systems of 64 bits' \
        c -std=c11 -m32 -ffreestanding -fsyntax-only $BUILD/dp.c
}

# The groups run side by side; what they print is shown in order.
group() { program=$BUILD/program-$1-$(basename "${2:-}") "$@" >"$BUILD/$1-$(basename "${2:-}").tap" 2>&1 & }

# What takes long is done in turn, a third at each commit; all with WHOLE=all.
is_due() { [ "${WHOLE:-}" = all ] || [ $((${TEST_TURN:-0} % 3)) = "$1" ]; }

rm -f $BUILD/*.tap
group c_compiler "$GCC"
group c_compiler "$CLANG"
group refusals
group rooms
group cxx_compiler g++ "$GCC"
group cxx_compiler clang++ "$CLANG"
! is_due 0 || group cuda_compiler
! is_due 1 || group hip_compiler
! is_due 2 || group one_file
! is_due 2 || group link_cases
group nccl_compiler
group mpi_compiler
group other_machine
group other_system
group openmp
group thirty_two_bits
wait
cat $BUILD/*.tap
! grep -q '^not ok' $BUILD/*.tap
