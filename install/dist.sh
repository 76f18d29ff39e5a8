#!/bin/sh
# dist.sh - a release as one archive, and its checksum. Called by make.
#
#   dist.sh FOLDER   writes FOLDER/dp-VERSION.tar.gz and the same with .sha256: what the repository
#                    holds, and single/dp.h, all headers for the CPU as one file
#
# Whoever makes it of the same files gets the same bytes: names are sorted, owners and modes are set,
# and the time is that of the release in CHANGES.md. GNU tar.

set -eu
cd "$(dirname "$0")/.."
mkdir -p "$1"
folder=$(cd "$1" && pwd)
name=dp-$(sed -n '1s/.* v\([0-9.]*\) .*/\1/p' dp.h)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

# Of an unpacked archive, all but what make has made.
files() {
    if [ -e .git ]; then git ls-files; else find . -type f ! -path './build/*' ! -path './single/*'; fi
}

mkdir -p "$work/$name/single"
files | tar -cf - -T - | tar -xf - -C "$work/$name"
cp build/whole/dp.h "$work/$name/single/dp.h"
day=$(sed -n 's/^## [0-9.]* - \([0-9]\{4\}-[0-9-]*\)$/\1/p' CHANGES.md | head -n 1)
tar -C "$work" --sort=name --owner=0 --group=0 --numeric-owner --mode=u=rwX,go=rX --format=ustar \
    --mtime="${day:-1980-01-01} 00:00 UTC" -cf - "$name" | gzip -9n >"$folder/$name.tar.gz"
cd "$folder"
sha256sum "$name.tar.gz" >"$name.tar.gz.sha256"
cat "$name.tar.gz.sha256"
