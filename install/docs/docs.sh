#!/bin/sh
# docs.sh - makes one static site of the headers' manuals, README.md and the examples. Called by make.
#
#   docs.sh FOLDER
#
# No page needs a server: open FOLDER/index.html. A page whose text is in Markdown is a line of `texts`.

set -eu
cd "$(dirname "$0")/../.."
mkdir -p "$1"
folder=$(cd "$1" && pwd)
here=install/docs
find "$folder" -name '*.html' -exec rm {} + # of sources that are there no more
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
export LC_ALL=C # the same order everywhere

headers=dp.h
for header in dp_*.h; do
    [ "$header" = dp_cpu.h ] || headers="$headers $header" # of which all is private
done

# FILE URL TITLE, in the order of the menu
texts() {
    printf 'page\t%s\t%s\t%s\n' \
        README.md index.html "Start" \
        $here/calls.md calls.html "Which call do I want?" \
        $here/cluster.md cluster.html "On a cluster"
    for header in $headers; do
        printf 'page\t%s\t%s\t%s\n' "$header" "${header%.h}.html" "$header"
    done
    printf 'page\t%s\t%s\t%s\n' \
        examples examples.html "Examples" \
        names names.html "All names" \
        tests/SEMANTICS.md semantics.html "What other systems do" \
        tests/faults/RESULTS.md faults.html "When something fails"
}

sources() { ls dp.h dp_*.h dp/*.h examples/*.c examples/*.h examples/*.cpp; }

# page URL AWK_FILE... SOURCE: with the way back to the first page as root
page() {
    url=$1
    shift
    mkdir -p "$folder/$(dirname "$url")"
    root=$(dirname "$url" | sed 's,[^/.][^/]*,..,g; s,^\.$,,; s,.$,&/,')
    programs=
    while [ $# -gt 1 ]; do
        programs="$programs -f $1"
        shift
    done
    # shellcheck disable=SC2086 # several words
    awk -v "table=$work/table" -v "entries=$work/entries" -v "definitions=$work/definitions" \
        -v "here=$url" -v "root=$root" -f $here/html.awk $programs "$1" >"$folder/$url"
}

all_names() {
    printf '# All names\n\n| name | is a | of |\n|---|---|---|\n'
    awk -F '\t' '/^(function|type|macro|constant|option|variable)/ { print "| `" $2 "` | " $1 " | `" $3 "` |" }' \
        "$work/table" | sort -fu
}

texts >"$work/table"
sources | sed 's/^/file\t/' >>"$work/table"
for header in $headers; do
    awk -f install/manual.awk -f $here/names.awk "$header" >>"$work/table"
done
: >"$work/definitions"
for source in $(sources); do page "source/$source.html" $here/source.awk "$source"; done
cat "$work/definitions" >>"$work/table"

: >"$work/entries"
texts >"$work/texts"
while IFS='	' read -r _ path url _; do
    case $path in
    *.md) page "$url" $here/markdown.awk "$path" ;;
    *.h) page "$url" install/manual.awk $here/page.awk "$path" ;;
    esac
done <"$work/texts"
awk -f $here/examples.awk examples/*.c examples/*.cpp examples/*.h >"$work/examples"
page examples.html $here/markdown.awk "$work/examples"
all_names >"$work/names"
page names.html $here/markdown.awk "$work/names"
{
    echo '"use strict";'
    echo 'const dp_entries = ['
    cat "$work/entries"
    echo '];'
} >"$folder/entries.js"
cp $here/style.css $here/search.js "$folder"
echo "$folder/index.html: $(find "$folder" -name '*.html' | wc -l | tr -d ' ') pages"
