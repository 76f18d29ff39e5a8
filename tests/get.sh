#!/usr/bin/env bash
# get.sh - finds or fetches what the Makefile needs besides a compiler.
#
#   get.sh config FILE   where stb_ds.h is, as a make variable; installs it when it is nowhere
#   get.sh tools FILE    install what `make test` uses when it is there, once: FILE marks it as done
#   get.sh all-tools FILE  the same of make test-all
#   get.sh wheels FILE   the same, of what Python's packages hold
#   get.sh pictures FILE install the pictures that two examples learn to tell, where that can be done
#   get.sh blas FILE     the same of OpenBLAS, which one example uses
#   get.sh slurm FILE    the same of a Slurm, for make slurm-test
#
# Nothing but apt-get writes outside build/.

set -u
cd "$(dirname "$0")/.." || exit
CC=${CC:-cc}
export DEBIAN_FRONTEND=noninteractive

has() { command -v "$1" >/dev/null 2>&1; }

# shellcheck disable=SC2086 # flags are several words
compiles() { printf '%s\n' "$1" | $CC ${2:-} -fsyntax-only -x c - 2>/dev/null; }

# Flags under which dp.h finds stb_ds.h; fails when there are none.
find_stb() {
    local flags
    for flags in "${STB_CFLAGS:-}" "-isystem build/stb" "-isystem build/pack/stb" \
        "-isystem /usr/include/stb"; do
        compiles '#include <stb/stb_ds.h>' "$flags" || compiles '#include <stb_ds.h>' "$flags" ||
            continue
        echo "$flags"
        return 0
    done
    return 1
}

as_root() {
    if [ "$(id -u)" = 0 ]; then "$@"; else sudo -n "$@"; fi
}

can_install() {
    has apt-get || return 1
    [ "$(id -u)" = 0 ] || { has sudo && sudo -n true 2>/dev/null; }
}

APT_OPTIONS=(-q -o Acquire::Retries=1 -o Acquire::http::Timeout=20 -o DPkg::Lock::Timeout=60)

apt_lists_know() { apt-cache show "$1" >/dev/null 2>&1; }

# A fresh container has no package lists at all.
update_unless_known() {
    apt_lists_know "$1" || as_root apt-get "${APT_OPTIONS[@]}" update
}

# In a fresh container the lists may also be old, and name files that the mirror no longer has.
install_packages() {
    local install=(apt-get "${APT_OPTIONS[@]}" install -y --no-install-recommends "$@")
    as_root "${install[@]}" && return
    as_root apt-get "${APT_OPTIONS[@]}" update && as_root "${install[@]}"
}

# Without root a package can still be unpacked, if apt has its lists.
unpack_stb() {
    has apt-get && has dpkg-deb || return 1
    mkdir -p build/stb/package
    (cd build/stb/package && apt-get "${APT_OPTIONS[@]}" download libstb-dev &&
        dpkg-deb -x libstb-dev_*.deb . && cp usr/include/stb/stb_ds.h ..)
}

get_stb() {
    mkdir -p build/log
    echo "dp.h needs stb_ds.h: getting the package libstb-dev (log: build/log/stb.log)" >&2
    {
        if can_install; then update_unless_known libstb-dev; install_packages libstb-dev; fi
        find_stb || unpack_stb
    } >build/log/stb.log 2>&1
}

write_config() {
    local flags
    if ! flags=$(find_stb); then
        get_stb
        if ! flags=$(find_stb); then
            cat >&2 <<'TEXT'
dp.h needs stb_ds.h, and it could not be installed here. Any of these will do:
  - as root: apt-get install libstb-dev     (Debian, Ubuntu)
  - copy stb_ds.h from https://github.com/nothings/stb to build/stb/stb_ds.h
  - say where it is: make STB_CFLAGS='-isystem DIRECTORY'
TEXT
            exit 1
        fi
    fi
    mkdir -p "$(dirname "$1")"
    echo "STB_CFLAGS := $flags" >"$1"
}

# command or file that shows that it is there : package
TOOLS="g++:g++ cmake:cmake pkg-config:pkg-config mandoc:mandoc"
MORE_TOOLS="clang:clang clang-format:clang-format tcc:tcc busybox:busybox musl-gcc:musl-tools
    meson:meson
    qemu-aarch64:qemu-user
    aarch64-linux-gnu-gcc:gcc-aarch64-linux-gnu
    /usr/aarch64-linux-gnu/include/stdio.h:libc6-dev-arm64-cross
    /usr/include/hip/hip_runtime_api.h:libamdhip64-dev
    /usr/lib/$(uname -m)-linux-gnu/libopenblas.so:libopenblas-dev
    mpirun.openmpi:openmpi-bin /usr/include/$(uname -m)-linux-gnu/openmpi:libopenmpi-dev
    mpirun.mpich:mpich /usr/include/$(uname -m)-linux-gnu/mpich:libmpich-dev"

# The oldest and the newest compilers that there are packages of.
compilers() {
    local family
    for family in gcc clang; do
        apt-cache search --names-only "^$family-[0-9]+\$" 2>/dev/null | cut -d' ' -f1 | sort -V |
            sed -n '1p;$p' | sed 's/.*/&:&/'
    done
}

# missing ENTRY...: packages of what is not here
missing() {
    local entry
    for entry; do
        if ! has "${entry%%:*}" && ! [ -e "${entry%%:*}" ]; then echo "${entry##*:}"; fi
    done
}

# tools few|all: packages that are missing
tools() {
    # shellcheck disable=SC2086 # several words
    missing $TOOLS $([ "$1" != all ] || { echo "$MORE_TOOLS"; compilers; })
}

install_tools() {
    local packages
    mkdir -p build/log
    mapfile -t packages < <(tools "$1")
    [ ${#packages[@]} -gt 0 ] || return 0
    if ! can_install; then
        echo "not here, and no right to install: ${packages[*]}"
        return 0
    fi
    echo "installing ${packages[*]} (log: build/log/tools.log)"
    {
        update_unless_known "${packages[0]}"
        local known=() package
        for package in $(tools "$1"); do # with fresh lists
            if apt_lists_know "$package"; then known+=("$package"); fi
        done
        if [ ${#known[@]} -gt 0 ]; then install_packages "${known[@]}"; fi
    } >build/log/tools.log 2>&1
}

# Compiles for macOS and FreeBSD; what cannot be had quickly is left out.
install_zig() {
    has python3 && ! python3 -m ziglang version >/dev/null 2>&1 || return 0
    {
        python3 -m venv build/zig &&
            timeout 240 build/zig/bin/pip -q --no-cache-dir --retries 1 --timeout 10 install ziglang
    } >build/log/zig.log 2>&1 || rm -rf build/zig
}

# Reads what NVRTC made; the Toolkit's own is not always there.
install_nvdisasm() {
    has python3 && has nvcc && ! has nvdisasm || return 0
    {
        python3 -m venv build/nvdisasm &&
            timeout 240 build/nvdisasm/bin/pip -q --no-cache-dir --retries 1 --timeout 10 install \
                nvidia-cuda-nvdisasm
    } >build/log/nvdisasm.log 2>&1 || rm -rf build/nvdisasm
}

install_wheels() {
    mkdir -p build/log
    install_zig
    install_nvdisasm
    return 0
}

# install_unless_here FILE PACKAGE: what examples use, and can do without
install_unless_here() {
    [ ! -e "$1" ] && can_install || return 0
    mkdir -p build/log
    echo "installing $2 (log: build/log/$2.log)"
    {
        update_unless_known "$2"
        ! apt_lists_know "$2" || install_packages "$2"
    } >"build/log/$2.log" 2>&1
    return 0
}

install_pictures() { install_unless_here /usr/share/datasets/fashion-mnist dataset-fashion-mnist; }

install_blas() {
    install_unless_here "/usr/lib/$(uname -m)-linux-gnu/libopenblas.so" libopenblas-dev
}

install_slurm() {
    install_unless_here /usr/sbin/slurmctld slurmctld
    install_unless_here /usr/sbin/slurmd slurmd
    install_unless_here /usr/sbin/munged munge
}

case ${1:-} in
config) write_config "$2" ;;
tools) mkdir -p "$(dirname "$2")" && install_tools few && touch "$2" ;;
all-tools) mkdir -p "$(dirname "$2")" && install_tools all && touch "$2" ;;
wheels) mkdir -p "$(dirname "$2")" && install_wheels && touch "$2" ;;
pictures) mkdir -p "$(dirname "$2")" && install_pictures && touch "$2" ;;
blas) mkdir -p "$(dirname "$2")" && install_blas && touch "$2" ;;
slurm) mkdir -p "$(dirname "$2")" && install_slurm && touch "$2" ;;
*)
    sed -n '2,/^$/s/^# \{0,1\}//p' "$0"
    exit 2
    ;;
esac
