#!/bin/sh
# install.sh - puts the library where compilers, pkg-config, CMake and man look for it, or takes away
# what was put there. Called by make, which exports the variables.
#
#   install.sh known       fails where $WITH names what there is not, before it is compiled
#   install.sh install
#   install.sh uninstall
#
# share/dp/installed under $PREFIX lists all that is there, and the folders that were new. It grows with
# what is put there, so that what an install leaves that fails can be taken away too.

set -eu
cd "$(dirname "$0")/.."
list=share/dp/installed

fail() {
    echo "make install: $*" >&2
    exit 1
}

# folder PATH: with those above it
folder() {
    [ ! -d "$DESTDIR$1" ] || return 0
    folder "$(dirname "$1")"
    mkdir "$DESTDIR$1"
    echo "$1" >>"$listing"
}

# put SOURCE PATH [MODE]
put() {
    folder "$(dirname "$PREFIX/$2")"
    echo "$PREFIX/$2" >>"$listing"
    install -m "${3:-644}" "$1" "$DESTDIR$PREFIX/$2"
}

# link TARGET PATH
link() {
    echo "$PREFIX/$2" >>"$listing"
    ln -sf "$1" "$DESTDIR$PREFIX/$2"
}

# fill TEMPLATE PATH NAME=VALUE...
fill() {
    template=$1 path=$2
    shift 2
    cat "$template" >"$work/filled"
    for value in "LIBDIR=$LIBDIR" "VERSION=$VERSION" "ABI=$ABI" "$@"; do
        text=$(printf '%s\n' "${value#*=}" | sed 's/[\\&|]/\\&/g')
        sed "s|@${value%%=*}@|$text|g" "$work/filled" | sed 's/ *$//' >"$work/filling"
        mv "$work/filling" "$work/filled"
    done
    sed '/^[A-Z][a-z]*:$/d' "$work/filled" >"$work/filling" # fields without a value
    put "$work/filling" "$path"
}

# pc NAME DESCRIPTION [FIELD=VALUE...]
pc() {
    name=$1 description=$2
    shift 2
    fill install/dp.pc.in "$LIBDIR/pkgconfig/$name.pc" "NAME=$name" "DESCRIPTION=$description" "$@" \
        "PREFIX=$(printf '%s\n' "$PREFIX" | sed 's/[ #]/\\&/g')" REQUIRES= CFLAGS= LIBS=
}

# library NAME: static, and shared under the name that it has on this system
library() {
    put "build/lib/lib$1.a" "$LIBDIR/lib$1.a"
    put "build/lib/lib$1.$SHARED" "$LIBDIR/$(shared "$1" ".$VERSION")" 755
    link "$(shared "$1" ".$VERSION")" "$LIBDIR/$(shared "$1" ".$ABI")"
    link "$(shared "$1" ".$ABI")" "$LIBDIR/$(shared "$1" "")"
}

shared() {
    case $SHARED in
    dylib) echo "lib$1$2.dylib" ;;
    *) echo "lib$1.so$2" ;;
    esac
}

headers() {
    for header in dp.h dp_*.h dp/*.h; do put "$header" "include/$header"; done
    put build/whole/dp.h share/dp/dp.h
}

packages() {
    defines='' mpi_library=''
    pc dp "data parallelism for C: one model on every device there is" \
        "LIBS=-L\${libdir} -ldp $LIBS"
    for part in $WITH; do
        [ "$part" != mpi ] || continue
        define=-DDP_USE_$(echo "$part" | tr '[:lower:]' '[:upper:]')
        defines="$defines $define"
        pc "dp-$part" "dp, and dp.h declares what is in dp_$part.h" REQUIRES=dp "CFLAGS=$define"
    done
    case " $WITH " in
    *" mpi "*)
        mpi_library=$(shared dp-mpi "")
        library dp-mpi
        pc dp-mpi "in place of dp and the others: the library that knows MPI" \
            "CFLAGS=-DDP_USE_MPI$defines" "LIBS=-L\${libdir} -ldp-mpi $LIBS $MPI_LIBS"
        ;;
    esac
    to=$LIBDIR/cmake/dp
    put install/dp-targets.cmake "$to/dp-targets.cmake"
    fill install/dp-config-version.cmake.in "$to/dp-config-version.cmake"
    fill install/dp-config.cmake.in "$to/dp-config.cmake" "UP=$(echo "$to" | sed 's,[^/][^/]*,..,g')" \
        "LIBRARY=$(shared dp "")" "MPI_LIBRARY=$mpi_library" "WITH=$(echo "$WITH" | tr ' ' ';')" \
        "BESIDE=$(echo "$LIBS" | sed 's/-l//g' | tr ' ' ';')" \
        "BESIDE_MPI=$(echo "$MPI_LIBS" | tr ' ' ';')"
}

# Manual pages are made of the headers; functions are links to the pages that have them.
pages() {
    date=$(date -u -d "@${SOURCE_DATE_EPOCH:-}" +%Y-%m-%d 2>/dev/null || date +%Y-%m-%d)
    others=''
    for header in dp_*.h; do
        [ "$header" = dp_cpu.h ] || others="${header%.h} $others" # of which all is private
    done
    mkdir "$work/pages"
    for header in dp $others; do
        awk -v "out=$work/pages" -v "date=$date" -v "others=$others" -f install/manual.awk \
            -f install/man.awk "$header.h"
    done
    folder "$PREFIX/share/man/man3"
    for page in "$work/pages"/*; do echo "$PREFIX/share/man/man3/${page##*/}" >>"$listing"; done
    install -m 644 "$work/pages"/* "$DESTDIR$PREFIX/share/man/man3"
}

uninstall() {
    [ -e "$DESTDIR$PREFIX/$list" ] || return 0
    sed '1!G;h;$!d' "$DESTDIR$PREFIX/$list" >"$work/all"
    while IFS= read -r path; do
        if [ -d "$DESTDIR$path" ] && [ ! -h "$DESTDIR$path" ]; then
            rmdir "$DESTDIR$path" 2>/dev/null || true # others use it too
        else
            rm -f "$DESTDIR$path"
        fi
    done <"$work/all"
}

known() {
    for part in $WITH; do
        case $part in
        cuda | nccl | hip | rccl | mpi) ;;
        *) fail "WITH=$part: is none of cuda, nccl, hip, rccl and mpi" ;;
        esac
    done
    case " $WITH " in
    *" hip "* | *" rccl "*)
        case " $WITH " in
        *" cuda "* | *" nccl "*)
            fail "WITH=$WITH: a library is for AMD's GPUs (hip, rccl) or for NVIDIA's (cuda, nccl)"
            ;;
        esac
        ;;
    esac
}

install_all() {
    umask 022 # others read it
    uninstall # what another WITH, or an older version, has put there
    [ -z "$DESTDIR" ] || mkdir -p "$DESTDIR"
    put "$listing" "$list" # itself and its folders
    listing=$DESTDIR$PREFIX/$list
    headers
    library dp
    packages
    pages
    put build/lib/dprun bin/dprun 755
    # The loader of Linux finds a new library only when it has been told.
    [ -n "$DESTDIR" ] || [ "$SYSTEM" != Linux ] || ldconfig 2>/dev/null || true
    echo "installed in $DESTDIR$PREFIX: $(wc -l <"$listing" | tr -d ' ') files and folders"
}

case $PREFIX in
*[\'\"\\\$]*) fail "PREFIX=$PREFIX: without quotes, \\ and \$" ;;
/* | '') ;;
*) PREFIX=$PWD/$PREFIX ;;
esac
while [ "$PREFIX" != "${PREFIX%/}" ]; do PREFIX=${PREFIX%/}; done
case $LIBDIR in
/*) fail "LIBDIR=$LIBDIR: a folder in PREFIX, as lib64" ;;
esac
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
listing=$work/list
: >"$listing"
case ${1:-} in
known) known ;;
install) install_all ;;
uninstall) uninstall ;;
*)
    sed -n '2,/^$/s/^# \{0,1\}//p' "$0"
    exit 2
    ;;
esac
