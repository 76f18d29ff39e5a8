# shellcheck shell=bash
# install.sh - a step of run.sh: what make install puts somewhere can be used, and taken away.

INSTALL=$PWD/build/install
SAYS="3 ranks by none: 6 adamw mirrors" # tests/install/program.c
HIDDEN="-O0 -fvisibility=hidden" # a packager's flags

# tried NAME PATTERN COMMAND...: the command ends well, and this is the last line that it prints
tried() {
    local name=$1 pattern=$2 text
    shift 2
    # shellcheck disable=SC2053
    if text=$("$@" 2>&1) && [[ ${text##*$'\n'} == $pattern ]]; then
        echo "ok - $name"
    else
        echo "not ok - $name"
        printf '%s\n' "wanted: $pattern" "$text" | tail -n 20 | sed 's/^/#   /'
    fi
}

# refused NAME TEXT COMMAND...: the command fails, and this is in what it prints
refused() {
    local name=$1 part=$2 text
    shift 2
    if ! text=$("$@" 2>&1) && [[ $text == *"$part"* ]]; then
        echo "ok - $name"
    else
        echo "not ok - $name"
        printf '%s\n' "wanted: $part" "$text" | tail -n 20 | sed 's/^/#   /'
    fi
}

# A make of somebody else's.
alone() { env -u MAKEFLAGS -u MFLAGS -u MAKELEVEL "$@"; }

# installs WORD...: make install or uninstall, as a packager without much time
installs() {
    alone "${MAKE:-make}" -s --no-print-directory "CC=$CC" CFLAGS=-O0 "CUDA_HOME=$INSTALL/cuda" \
        "MPICC=$MPICC" "$@"
}

# project NAME: a clean folder with a user's files
project() {
    rm -rf "${INSTALL:?}/$1"
    mkdir -p "$INSTALL/$1"
    cp tests/install/* "$INSTALL/$1"
    cp tests/install/program.c "$INSTALL/$1/program.cpp"
}

# runs FOLDER: both programs say the same
runs() {
    local in_c
    in_c=$("$1/in_c") && [ "$("$1/in_cpp")" = "$in_c" ] && echo "$in_c"
}

by_hand() {
    local user=$INSTALL/hand
    project hand
    # shellcheck disable=SC2086 # several words
    "$CC" -std=c11 "-I$PREFIX/include" "$user/program.c" "$PREFIX/lib/libdp.a" -o "$user/in_c" \
        $LIBS -ldl &&
        "${CXX:-g++}" -std=c++11 "-I$PREFIX/include" "$user/program.cpp" "$PREFIX/lib/libdp.a" \
            -o "$user/in_cpp" $LIBS -ldl && LD_LIBRARY_PATH='' runs "$user"
}

# by_make NAME PACKAGES [COMMAND...]: which runs the program
by_make() {
    local user=$INSTALL/$1 packages=$2
    project "$1"
    shift 2
    alone "${MAKE:-make}" -s -C "$user" "CC=$CC" "PACKAGES=$packages" || return 1
    if [ $# = 0 ]; then runs "$user"; else "$@" "$user/in_cpp"; fi
}

# by_cmake NAME OPTION...
by_cmake() {
    local user=$INSTALL/$1
    project "$1"
    shift
    alone cmake -S "$user" -B "$user/build" "-DCMAKE_PREFIX_PATH=$PREFIX" -DCMAKE_BUILD_TYPE=Debug \
        "-DCMAKE_C_COMPILER=$CC" "$@" && alone cmake --build "$user/build" &&
        LD_LIBRARY_PATH='' runs "$user/build"
}

by_meson() {
    local user=$INSTALL/meson
    project meson
    alone meson setup "$user/build" "$user" && alone meson compile -C "$user/build" &&
        runs "$user/build"
}

# What a packager does: nothing of where it was put is in it, and others' files stay.
staged() {
    local stage=$INSTALL/stage
    rm -rf "$stage"
    mkdir -p "$stage/opt/share"
    touch "$stage/opt/share/of-others"
    installs install "WITH=$WITH" "DESTDIR=$stage" PREFIX=/opt LIBDIR=lib64 || return 1
    grep -rl "$INSTALL" "$stage" && return 1
    ! has pkg-config || PKG_CONFIG_PATH=$stage/opt/lib64/pkgconfig pkg-config --libs dp |
        grep -q -- '-L/opt/lib64 -ldp' || return 1
    touch "$stage/opt/include/dp/of-others"
    installs uninstall "DESTDIR=$stage" PREFIX=/opt || return 1
    (cd "$stage" && find . ! -type d | sort | tr '\n' ' ' && find . -type d | sort | tr '\n' ' ')
}

# What was put there before something went wrong is taken away, and nothing else.
halfway() {
    local stage=$INSTALL/half
    mkdir -p "$stage/opt/share"
    touch "$stage/opt/share/man" # where a folder should be
    installs install "WITH=$WITH" "DESTDIR=$stage" PREFIX=/opt && return 1
    [ -e "$stage/opt/include/dp/os.h" ] || return 1
    installs uninstall "DESTDIR=$stage" PREFIX=/opt || return 1
    (cd "$stage" && find . | sort | tr '\n' ' ')
}

# A folder with a space in its name, a umask that hides new files, flags that hide symbols.
awkward() {
    local PREFIX="$INSTALL/a place"
    touch "$INSTALL/before"
    (umask 077 && installs install WITH= "CFLAGS=$HIDDEN" "PREFIX=$INSTALL/none/../a place/") || return 1
    find "$PREFIX" -type d ! -perm -755 | grep . && return 1
    [ build/lib/dprun -nt "$INSTALL/before" ] || { echo "dprun is of other flags"; return 1; }
    ! has cmake || by_cmake place -DLINK=dp::dp || return 1
    PKG_CONFIG_PATH=$PREFIX/lib/pkgconfig LD_LIBRARY_PATH=$PREFIX/lib by_make place dp || return 1
    installs uninstall "PREFIX=$PREFIX/"
    [ ! -e "$PREFIX" ]
}

single() {
    tests/single.sh "$INSTALL/twice.h" train norm train &&
        tests/single.sh "$INSTALL/once.h" train norm &&
        cmp "$INSTALL/twice.h" "$INSTALL/once.h" && echo same
}

# Another WITH leaves nothing of the one before it, and uninstall nothing at all.
left() {
    installs install WITH= "CFLAGS=$HIDDEN" "PREFIX=$PREFIX" || return 1
    find "$PREFIX" -name '*dp-mpi*' | grep . && return 1
    installs uninstall "PREFIX=$PREFIX" || return 1
    find "$INSTALL" -path "$PREFIX*" | grep . || echo nothing
}

only_dp() {
    nm -D --defined-only "$1" | awk '$2 != "A" { print $3 ~ /^dp_/ ? "only_dp" : "~" $3 }' | sort -u
}

# What is wrong with the pages.
faults_of_pages() {
    local page name
    for page in man3/*.3; do
        name=$(sed -n 's/^\.so //p' "$page")
        if [ -z "$name" ]; then
            mandoc -T lint -W style "$page"
        elif [ ! -s "$name" ]; then
            echo "$page: there is no $name"
        fi
    done
    for name in dp_open $(nm -D --defined-only ../../lib/libdp.so | grep -o '\<dp_[a-z][a-z0-9_]*') \
        $(mandoc -T ascii man3/dp.3 | sed -n 's/^ *\(dp_[a-z]*\)(3).*/\1/p'); do
        [ -e "man3/$name.3" ] || echo "there is no page of $name"
    done
    mandoc -T ascii man3/dp_scope_begin.3 | grep -q 'void dp_scope_end(dp_scope \*scope);' ||
        echo "dp_scope_begin.3 does not show dp_scope_end"
}

# All that the library shows has a page, by a link or of its own.
pages() {
    cd "$PREFIX/share/man" || return
    [ -z "$(faults_of_pages | tee /dev/stderr)" ] && echo "$(find man3 -name 'dp*.3' | wc -l) pages"
}

with_cmake() {
    local cuda="-DCOMPONENTS=cuda;nccl;train" mpi=(-DCOMPONENTS=mpi)
    has cmake || { skip "CMake" "no cmake"; return; }
    tried "CMake: find_package" "$SAYS cuda nccl -" by_cmake found "$cuda" \
        "-DLINK=dp::cuda;dp::nccl"
    tried "CMake: find_package, headers alone" "${SAYS% mirrors} dp_mirror.h - - -" by_cmake headers -DLINK=dp::headers
    tried "CMake: add_subdirectory" "$SAYS - - -" by_cmake inside "-DSUBDIRECTORY=$PWD" -DLINK=dp::dp
    tried "CMake: FetchContent, shared" "$SAYS - - -" by_cmake fetched "-DFETCHED=$PWD" -DLINK=dp::train \
        -DBUILD_SHARED_LIBS=ON -DCMAKE_C_VISIBILITY_PRESET=hidden \
        -DCMAKE_C_FLAGS=-fvisibility=hidden
    refused "CMake: find_package says what is not there" "dp was installed without hip" \
        by_cmake none -DCOMPONENTS=hip
    refused "CMake: find_package wants the version" "version: " by_cmake old -DWANTED=99.0
    [ -n "$MPICC" ] || return
    tried "CMake: find_package, MPI" "$SAYS cuda nccl MPI" by_cmake mpi "${mpi[@]}" \
        -DLINK=dp::mpi
    refused "CMake: not both libraries" "DP_LIBRARY" by_cmake both "${mpi[@]}" \
        "-DLINK=dp::mpi;dp::dp"
}

with_mpi() {
    [ -n "$MPICC" ] || { skip "installed for MPI" "no Open MPI"; return; }
    export DP_LAUNCH=mpi # which only a library with MPI takes for a launcher
    tried "pkg-config: dp-mpi, two processes" "6 ranks by mpi: 12 adamw mirrors cuda nccl MPI" \
        by_make in_mpi dp-mpi timeout 120 mpirun.openmpi --allow-run-as-root --oversubscribe -np 2
    export DP_LAUNCH=none
}

# An archive of what is in the repository; what it holds makes the same again, and compiles.
dist() {
    local out=$INSTALL/dist name
    rm -rf "$out"
    alone "${MAKE:-make}" -s dist >/dev/null && install/dist.sh "$out" >/dev/null || return
    name=$(basename "$out"/*.tar.gz .tar.gz)
    cmp "$out/$name.tar.gz" "build/dist/$name.tar.gz" && (cd "$out" && sha256sum -c --quiet ./*.sha256) &&
        tar -C "$out" -xzf "$out/$name.tar.gz" && mkdir -p "$out/$name/build/whole" || return
    cp "$out/$name/single/dp.h" "$out/$name/build/whole"
    "$out/$name/install/dist.sh" "$out/again" >/dev/null && cmp "$out/again/$name.tar.gz" "$out/$name.tar.gz" ||
        return
    # shellcheck disable=SC2086 # several words
    "$CC" -std=c11 -O0 ${STB_CFLAGS:-} "-I$out/$name/single" -DDP_IMPLEMENTATION -x c -c \
        "$out/$name/single/dp.h" -o "$out/dp.o" &&
        "$CC" "$out/$name/examples/hello.c" "$out/dp.o" -o "$out/hello" -lpthread -lm && "$out/hello"
}

step_install() {
    local PREFIX=$INSTALL/usr MPICC='' WITH="cuda nccl"
    has "${CXX:-g++}" || { skip "make install" "no C++ compiler"; return; }
    rm -rf "$INSTALL"
    mkdir -p "$INSTALL/cuda/include"
    ln -sf "$PWD"/tests/sim/*.h "$INSTALL/cuda/include" # which declare as much as is used
    if has mpirun.openmpi && echo '#include <mpi.h>' | mpicc.openmpi -fsyntax-only -x c - 2>/dev/null; then
        MPICC=mpicc.openmpi WITH+=" mpi"
        export OMPI_CC=$CC
    fi
    tried "make install" "installed in $PREFIX: *" installs install "WITH=$WITH" "PREFIX=$PREFIX"
    [ -e "$PREFIX/share/dp/installed" ] || return
    export LD_LIBRARY_PATH=$PREFIX/lib PKG_CONFIG_PATH=$PREFIX/lib/pkgconfig
    tried "libdp.a" "$SAYS - - -" by_hand
    tried "dprun" "[[]0[]] yes" "$PREFIX/bin/dprun" echo yes
    tried "libdp.so shows nothing but dp_" only_dp only_dp "$PREFIX/lib/libdp.so"
    if has pkg-config; then
        tried "pkg-config: dp" "$SAYS - - -" by_make plain dp
        tried "pkg-config: dp-nccl" "$SAYS cuda nccl -" by_make nccl "dp-cuda dp-nccl"
        with_mpi
    else
        skip "pkg-config" "not installed"
    fi
    with_cmake
    if has meson && has pkg-config; then
        tried "meson" "$SAYS - - -" by_meson
    else
        skip "meson" "not installed"
    fi
    if has mandoc; then
        tried "manual pages" "[23]?? pages" pages
    else
        skip "manual pages" "no mandoc"
    fi
    refused "make install WITH=what is not known" "WITH=tpu: is none of cuda" installs install WITH=tpu \
        "PREFIX=$INSTALL/none"
    local both
    for both in "hip cuda" "cuda hip" "nccl rccl" "rccl mpi cuda"; do
        refused "make install WITH=$both" "make install: WITH=$both: a library is for AMD's GPUs" \
            installs install "WITH=$both" "PREFIX=$INSTALL/none"
    done
    refused "make install PREFIX=with a quote" "without quotes" installs install WITH= \
        "PREFIX=$INSTALL/it's"
    tried "make install with DESTDIR, and uninstall" \
        "./opt/include/dp/of-others ./opt/share/of-others . ./opt ./opt/include ./opt/include/dp ./opt/share " staged
    tried "make uninstall after an install that failed" ". ./opt ./opt/share ./opt/share/man " halfway
    refused "make single WITH=what is not known" "WITH=tpu: is none of array" \
        alone "${MAKE:-make}" -s single WITH=tpu
    tried "make single WITH=the same twice" same single
    tried "make dist" "sums of the columns: 145 155 165, *" dist
    ! has pkg-config || tried "make install in an awkward place" "$SAYS - - -" awkward
    tried "make uninstall leaves nothing" nothing left
}
