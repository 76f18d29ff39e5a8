#!/bin/sh
# docs.sh - makes one static site of the headers' manuals, of texts in Markdown and of the examples.
# Called by make.
#
#   docs.sh FOLDER
#
# No page needs a server: open FOLDER/index.html. Which pages there are is in the file menu.

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

# What the menu says, for the table: page FILE URL TITLE GROUP, and part HEADER SECTION URL
pages() {
    awk -F '|' '
        /^#/ { next }
        /:$/ { group = substr($0, 1, length($0) - 1) }
        NF < 3 { next }
        { print "page\t" $1 "\t" $2 "\t" $3 "\t" group }
        $1 ~ />>/ {
            at = index($1, ">>")
            count = split(substr($1, at + 2), section, ",")
            for (i = 1; i <= count; i++)
                print "part\t" substr($1, 1, at - 1) "\t" section[i] "\t" $2
        }' $here/menu
}

# Examples in the order in which one learns from them: those of the list, then others.
examples() {
    sed -n 's/^\(examples\/[^ ]*\).*/\1/p' $here/examples
    for file in examples/*.c examples/*.h examples/*.cpp examples/*/*.[ch] examples/*/*.?pp; do
        grep -q "^$file" $here/examples || echo "$file"
    done
}

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

# topic NAME HEADING: which part of "Which call do I want?" has it
topics() {
    awk '/^## / { heading = substr($0, 4) }
        /^\|/ {
            for (; match($0, /`dp_[a-z0-9_]+/); $0 = substr($0, RSTART + RLENGTH)) {
                name = substr($0, RSTART + 1, RLENGTH - 1)
                if (!seen[name, heading]++) print "topic\t" name "\t" heading
            }
        }' $here/calls.md
}

pages >"$work/table"
topics >>"$work/table"
for header in $headers; do
    awk -f install/manual.awk -f $here/names.awk "$header" >>"$work/table"
done
# shellcheck disable=SC2046 # many files
awk -v "table=$work/table" -f $here/uses.awk $(examples) tests/*.[ch] tests/*/*.[ch] | sort >"$work/uses"
awk -v "table=$work/table" -f $here/errors.awk dp.h dp/*.h dp_*.h >"$work/errors"
cat "$work/uses" "$work/errors" >>"$work/table"

# All that is shown as it is: headers, examples, and tests where only those call a function.
{
    ls dp.h dp_*.h dp/*.h
    examples
    cut -f 3 "$work/uses"
} | sort -u >"$work/sources"
sed 's/^/file	/' "$work/sources" >>"$work/table"
: >"$work/definitions"
while read -r source; do page "source/$source.html" $here/source.awk "$source"; done <"$work/sources"
cat "$work/definitions" >>"$work/table"

# shellcheck disable=SC2046
awk -v "list=$here/examples" -f $here/examples.awk $(examples) >"$work/examples"
all_names >"$work/names"
for header in $headers; do awk -f install/manual.awk -f $here/cheat.awk "$header"; done >"$work/cheat"
: >"$work/entries"
while IFS='	' read -r kind path url _; do
    case $kind,$path in
    page,*.md) page "$url" $here/drawing.awk $here/markdown.awk "$path" ;;
    page,*.h*) page "$url" install/manual.awk $here/page.awk "${path%%>>*}" ;;
    page,cheat) page "$url" $here/sheet.awk "$work/$path" ;;
    page,*) page "$url" $here/drawing.awk $here/markdown.awk "$work/$path" ;;
    esac
done <"$work/table"
{
    echo '"use strict";'
    echo 'const dp_entries = ['
    cat "$work/entries"
    echo '];'
    echo 'const dp_said = ['
    sed -n 's/^\([^#|][^|]*\)|\(.*\)/["\1","\2"],/p' $here/words
    echo '];'
} >"$folder/entries.js"
cp $here/style.css $here/search.js "$folder"
echo "$folder/index.html: $(find "$folder" -name '*.html' | wc -l | tr -d ' ') pages"
