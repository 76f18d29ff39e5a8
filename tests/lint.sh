#!/usr/bin/env bash
# lint.sh - what no compiler checks: form, sizes, and that documents and code say the same. Prints
# TAP; run by `make lint`. Limits are those that keep a header of some thousand lines readable.

set -u
cd "$(dirname "$0")/.." || exit
CC=${CC:-gcc}
BUILD=build/lint
OBJECT=build/examples/dp.o
mkdir -p $BUILD

shopt -s nullglob globstar
HEADERS=(dp.h dp_*.h dp/*.h)
SOURCES=("${HEADERS[@]}" install/*.c tests/**/*.[ch] tests/**/*.cpp examples/**/*.[ch] examples/**/*.[ch]pp)
TEXTS=("${SOURCES[@]}" Makefile CMakeLists.txt install/**/*.* tests/**/*.mk tests/**/*.sh tests/**/*.md *.md)

MAX_COLUMNS=100
MAX_HEADER=4500
MAX_FRONT=2960 # dp.h: the manual, what is public, and the front door
MAX_SECTION=450
MAX_FUNCTION=60
MAX_NESTING=4
MAX_HEADLESS=218 # comments that begin with no verb: a number that may only fall
MAX_CARRIER=12  # private names that a carrier takes
MAX_OBJECT_KIB=1510
MAX_README_WORDS=1900

failed=0

# check NAME TEXT: not ok when there is a text, which says what was found
check() {
    if [ -z "$2" ]; then
        echo "ok - $1"
    else
        echo "not ok - $1"
        printf '%s\n' "$2" | sed 's/^/#   /'
        failed=1
    fi
}

# ---- form ----------------------------------------------------------------------------------------

check_format() {
    if ! command -v clang-format >/dev/null; then
        echo "ok - clang-format # SKIP clang-format: not installed"
        return
    fi
    check "clang-format has nothing to change" \
        "$(clang-format --dry-run "${SOURCES[@]}" 2>&1 | sed -n "s/:[0-9:]* warning:.*//p" |
            uniq -c)"
}

check_columns() {
    check "no line is longer than $MAX_COLUMNS columns" \
        "$(awk -v max=$MAX_COLUMNS 'length($0) > max { print FILENAME ":" FNR ": " length($0) }' \
            "${SOURCES[@]}")"
    check "no tabs and no blanks at line ends" "$(grep -nP '\t| $' "${SOURCES[@]}" | head -n 20)"
}

# clang-format's layout is what makes this possible: a function's braces stand in column 0 and a
# block's closing brace shows how deep the block is.
check_functions() {
    check "functions: at most $MAX_FUNCTION lines, nesting at most $MAX_NESTING, no #if inside" \
        "$(awk -v max=$MAX_FUNCTION -v deep=$MAX_NESTING '
            FNR == 1 { inside = 0; start = 1 }
            !inside && /^$|[;}]$|\*\/$|^#/ { start = FNR + 1 }
            /^{/ { inside = 1 }
            inside && /^ *# *(if|ifdef|ifndef|elif|else)/ { print FILENAME ":" FNR ": " $0 }
            inside && /^ *}( else.*| while.*)?$/ {
                match($0, /^ */)
                if (RLENGTH > 4 * deep) print FILENAME ":" FNR ": nested " RLENGTH / 4 " deep"
            }
            inside && /^}/ {
                inside = 0
                lines = FNR - start + 1
                if (lines > max) print FILENAME ":" start ": " lines " lines"
                start = FNR + 1
            }' "${SOURCES[@]}")"
}

check_headers() {
    check "headers: at most $MAX_HEADER lines, dp.h $MAX_FRONT" \
        "$(wc -l "${HEADERS[@]}" | awk -v max=$MAX_HEADER -v front=$MAX_FRONT '
            $2 != "total" && $1 > ($2 == "dp.h" ? front : max) { print $2 ": " $1 " lines" }')"
}

# The rooms between processes: those that DP_ONE_PROCESS leaves out or puts in, and their door.
WING=(dp/processes.h $(sed -nE '/^#include "dp.launchers/,$s/^#include "(dp\/.*)"/\1/p' dp.h))

# "Of the lane that is opened." has to be read twice; "Returns the ring of the lane ..." once. Between
# processes, where the reader knows the least, there is none.
check_openers() {
    local openers='/\* (What|Who|Whose|Whom|Of|Where|Whether|By what|The same)\>'
    check "comments between processes say what is done" "$(grep -nE "$openers" "${WING[@]}" dp_mpi.h)"
    check "at most $MAX_HEADLESS comments of the library begin without a verb" \
        "$(grep -hE "$openers" "${HEADERS[@]}" | wc -l | awk -v most=$MAX_HEADLESS '$1 > most { print $1 " do" }')"
}

# What lies between processes has words that CONTRIBUTING.md lists: those of networks, and at most
# thirty of its own, in a table. The last word of a private type is one of them, or its room's name.
check_vocabulary() {
    local room name words=$BUILD/vocabulary.txt own=$BUILD/vocabulary.own
    sed -n '/^## Words/,/^## Where/s/^| \([a-z, ]*\) | .*/\1/p' CONTRIBUTING.md | grep -vx word |
        tr -s ', ' '\n' >$own
    sed -n '/^Between processes words/,/^$/p' CONTRIBUTING.md | grep -oE '\b[a-z]+\b' | cat - $own >$words
    check "at most 30 words are ours" "$(awk 'END { if (NR > 30 || NR < 10) print NR }' $own)"
    check "private types between processes have words of CONTRIBUTING.md" "$(
        for room in "${WING[@]}"; do
            grep -oE '^typedef (struct|enum|union) dp__[a-z_]+' $room | grep -oE '[a-z]+$' | sort -u |
                while read -r name; do
                    [ dp/$name.h = $room ] || grep -qxE "$name|${name%s}|${name%es}" $words || echo "$room: $name"
                done
        done)"
}

check_words() {
    # Written apart, so that this file does not find itself.
    local words='TO''DO|FIX''ME|XX''X'
    check "nothing is left to do" \
        "$(grep -nwE "$words" "${TEXTS[@]}")"
    check "no code is switched off" "$(grep -nE \
        '^ *# *if +0|(&&|\|\||[^a-z_]if \() *(0|1|false|true)( (&&|\|\|)|\))' "${SOURCES[@]}")"
    check "no paths of somebody's machine" \
        "$(grep -nE '(^|[^a-zA-Z0-9_.])/(home|root|work|mnt|Users|tmp)/' "${TEXTS[@]}" |
            grep -v '^tests/lint.sh:')"
}

# ---- sections ------------------------------------------------------------------------------------

# Prints "line tag" for every banner, and complains about what only looks like one.
banners() {
    awk -v out="$2" '
        />>[a-z_]+ *==/ || /^\/\* =+ *>>/ {
            good = /^\/\* ==== >>[a-z_]+ =+( \*\/)?$/
            if (good && out == "tags") { sub(/^.*>>/, ""); sub(/ .*/, ""); print FNR, $0 }
            if (!good && out == "bad") print FILENAME ":" FNR ": " $0
        }' "$1"
}

contents() {
    awk '/\*\// { exit }
         /^ +>>[a-z_]+ +[^ =]/ { sub(/^ *>>/, ""); sub(/ .*/, ""); print }' "$1"
}

section_sizes() {
    awk -v max=$MAX_SECTION '
        function close_section() {
            if (tag != "" && FNR0 - start > max) print FILENAME0 ": " tag ": " FNR0 - start " lines"
        }
        FNR == 1 { close_section(); tag = "" }
        /^\/\* ==== >>/ || /^#if.*_IMPLEMENTATION/ || /^   Permission is hereby granted/ {
            close_section()
            tag = $3
            start = FNR
        }
        { FNR0 = FNR; FILENAME0 = FILENAME }
        END { close_section() }' "$@"
}

check_sections() {
    local header bad="" differs=""
    for header in "${HEADERS[@]}"; do
        bad+=$(banners "$header" bad)
        contents "$header" >$BUILD/contents
        banners "$header" tags | cut -d' ' -f2 >$BUILD/banners
        if ! diff $BUILD/contents $BUILD/banners >$BUILD/differs; then
            differs+="$header: contents (<) and banners (>)"$'\n'
            differs+=$(grep '^[<>]' $BUILD/differs)$'\n'
        fi
    done
    check "banners have one form" "$bad"
    check "the contents list the sections in their order" "$differs"
    check "sections: at most $MAX_SECTION lines" "$(section_sizes "${HEADERS[@]}")"
}

# FROM TO NAME as a table of how many: a row for each header that uses private names, a column for
# each that has them. What stands to the right of the diagonal is of a later one.
rooms_table() {
    awk -v rooms="dp.h $*" '
        function short(room) { gsub(/^dp[_\/]|\.h$/, "", room); return room }
        { count[$1, $2]++ }
        END {
            n = split(rooms, at, " ")
            printf "%-12s", ""
            for (k = 1; k <= n; k++) printf " %6.6s", short(at[k])
            for (i = 1; i <= n; i++) {
                printf "\n%-12s", short(at[i])
                for (k = 1; k <= n; k++)
                    printf " %6s", i == k ? "\\" : (at[i], at[k]) in count ? count[at[i], at[k]] : "."
            }
            print ""
        }'
}

# The rooms and tables, in the order in which dp.h includes them; dp/alone.h stands before those that it
# replaces.
rooms_included() {
    sed -n 's/^#include "\(dp[^"]*\)".*/\1/p' dp.h | grep -v dp_hip | tac | awk '!seen[$0]++' | tac
}

# dp.h stands below and above its rooms, dp_hip.h around two others. What stands around training uses
# the public API, and dp.h's system: threads, files, and what waits for them. dp_mirror.h is a part of
# dp_train.h.
check_rooms() {
    local around=(dp_train.h dp_mirror.h dp_data.h dp_save.h dp_array.h dp_average.h dp_norm.h dp_check.h dp_local.h)
    local rooms lonely
    mapfile -t rooms < <(rooms_included | grep -v '^dp/alone\.h$')
    mapfile -t lonely < <(rooms_included | sed '/^dp\/alone\.h$/q')
    awk -f tests/rooms.awk dp.h "${rooms[@]}" "${around[@]}" | sort >$BUILD/names
    awk -f tests/rooms.awk dp.h "${lonely[@]}" | sort >$BUILD/lonely
    grep -v 'public$' $BUILD/names | rooms_table "${rooms[@]}" "${around[@]}" >$BUILD/rooms
    check "the head of dp.h lists what it includes, in that order" "$(
        diff <(sed -n '/^   and the files that dp.h includes/,/^   Beside/s/^     \(dp[a-z_/]*\.h\) .*/\1/p' dp.h) \
            <(rooms_included | grep -E '^dp/|^dp_cpu'))"
    check "no room uses private names of later rooms" \
        "$(awk '$4 == "up" && $1 != "dp.h" { print $1 " " $2 ": " $3 }' $BUILD/names $BUILD/lonely)"
    check "nor public functions, but for scopes in which the system keeps what it maps" \
        "$(awk '$4 == "public" && $1 != "dp.h" && !($1 == "dp/os_posix.h" && $2 == "dp/core.h") {
                    print $1 " " $2 ": " $3 }' $BUILD/names)"
    check "around training there are no private names but the system's" \
        "$(awk -v around="${around[*]}" '
            BEGIN { split(around, list, " "); for (k in list) training[list[k]] }
            $1 in training && $4 != "public" && $2 !~ "^dp/(os|os_posix|team)\\.h$" &&
                !($1 == "dp_mirror.h" && $2 == "dp_train.h") {
                print $1 " " $2 ": " $3 }' $BUILD/names)"
}

# Who writes a carrier learns few names, which dp/carrier.h has: tests/pipes.h has them all. Of the
# library's two those are counted which they have from rooms about what is carried; MPI's links idle, too.
check_carriers() {
    check "a carrier takes at most $MAX_CARRIER private names" "$(
        {
            grep -oE '\b(dp|DP)__\w+' tests/pipes.h | sort -u | sed 's|^|tests/pipes.h |'
            awk '$1 ~ /^dp(\/tcp|_mpi)\.h$/ && $2 ~ /^dp\/(carrier|mesh|messages)\.h$/ && !/idle|IDLE/ {
                print $1, $3 }' $BUILD/names
        } | awk -v max=$MAX_CARRIER '
            { count[$1]++; names[$1] = names[$1] " " $2 }
            END { for (file in count) if (count[file] > max) print file ": " count[file] ":" names[file] }')"
}

# ---- the environment -----------------------------------------------------------------------------

# What is read by its name or by a launcher's, and what is called as variables of dp.h are.
variables_read() {
    cat "${HEADERS[@]}" | grep -oE 'env[a-z_]*\("[A-Za-z_]+"|"DP_[A-Z_]+"' | grep -oE '"[^"]+'
    sed -n '/^static const dp__launcher /,/^};/p' dp/launchers.h | sed 's/\.name = "[a-z]*"//' |
        grep -oE '"[A-Za-z_]+'
}

check_environment() {
    local header
    for header in dp.h dp_*.h; do
        sed '/^#if defined(DP_IMPLEMENTATION) && !defined(DP_\([A-Z]*_\)\?IMPLEMENTED)/q' "$header"
    done | grep -oE '[A-Za-z_]+' | sort -u >$BUILD/words
    check "each variable of the environment is in a manual" \
        "$(variables_read | tr -d '"' | sort -u | comm -23 - $BUILD/words)"
}

# ---- files ---------------------------------------------------------------------------------------

check_top_level() {
    local file extra=""
    for file in *; do
        case $file in
        dp.h | dp) ;;
        dp_cpu.h | dp_cuda.h | dp_nccl.h | dp_hip.h | dp_mpi.h | dp_train.h | dp_data.h | dp_save.h) ;;
        dp_mirror.h | dp_norm.h | dp_average.h | dp_check.h | dp_array.h | dp_local.h) ;;
        tests | examples | install | Makefile | CMakeLists.txt | build) ;;
        README.md | LICENSE | CHANGES.md | CONTRIBUTING.md | SECURITY.md) ;;
        *) extra+="$file"$'\n' ;;
        esac
    done
    check "the top level holds nothing else" "$extra"
}

# A program that was compiled with the last release of this 0.N runs with this one.
check_abi() {
    check "what the last release declared is as it was (install/abi.sh)" "$(
        CC=$CC install/abi.sh check install/abi.txt
        sed "s/^dp\.h .*/dp.h $(sed -n '1s/.* v\([0-9.]*\) .*/\1/p' dp.h)/; s/int dp_version(/long dp_version(/" \
            install/abi.txt >$BUILD/abi.txt
        CC=$CC install/abi.sh check $BUILD/abi.txt | grep -q '^extern long dp_version(void);$' ||
            echo "and a change would not be seen"
    )"
}

words_of() { tr -s ' \n*/' ' ' <"$1"; }

# What a program includes ends with the text; a room, which is a part of dp.h, says that it is there.
check_licence() {
    local header bad=""
    words_of LICENSE | sed 's/^.*Permission is hereby/Permission is hereby/; s/ $//' >$BUILD/licence
    for header in "${HEADERS[@]}"; do
        tail -n 40 "$header" >$BUILD/tail
        if [[ $header == dp/* ]] && grep -q 'licence is at the end of dp\.h' $BUILD/tail; then continue; fi
        if ! words_of $BUILD/tail | grep -qF -f $BUILD/licence; then
            bad+="$header does not end with the text of LICENSE"$'\n'
        fi
    done
    check "every header ends with the licence" "$bad"
}

# The block of README.md that follows <!-- NAME.c -->, against the marked part of that example.
check_readme() {
    local name names
    names=$(sed -n 's/^<!-- \([a-z_]*\.c\) -->$/\1/p' README.md | sort -u)
    check "README.md shows examples" "$([ -n "$names" ] || echo "it shows none")"
    for name in $names; do
        awk -v name="$name" '$0 == "<!-- " name " -->" { armed = 1 }
             /^```/ { if (inside) exit; inside = armed; next }
             inside' README.md >$BUILD/readme 2>/dev/null
        awk '/\/\* readme\] \*\// { exit }
             inside
             /\/\* \[readme \*\// { inside = 1 }' "examples/$name" >$BUILD/shown 2>/dev/null
        if [ ! -s $BUILD/readme ] || [ ! -s $BUILD/shown ]; then
            check "README.md shows examples/$name" "one of them is missing, or its markers are"
        else
            check "README.md shows examples/$name" "$(diff $BUILD/readme $BUILD/shown)"
        fi
    done
}

# A test that is in no binary would pass for ever: so each file is in the list, and what is written
# for GPUs where there are some.
check_files() {
    local file name bad=
    awk '!/^#/ && NF { print $1 }' tests/files >$BUILD/listed
    for file in tests/*/test_*.c; do
        name=${file#tests/}
        name=${name%.c}
        grep -qx "$name" $BUILD/listed || bad+="$file is not in tests/files"$'\n'
        ! grep -qE '^#if.*TEST_(CUDA|SIM)\>' "$file" ||
            grep -qE "^$name .*\<sim\>" tests/files ||
            bad+="$file has tests for GPUs, and is not in the binary sim"$'\n'
        ! grep -qE 'TEST_OF_TABLE|TEST_BACKENDS' "$file" || [[ $name == mpi/* ]] ||
            grep -qE "^$name .*\<conform gpu sim\>" tests/files ||
            bad+="$file has tests for all tables, and is not in conform, gpu and sim"$'\n'
        ! grep -q 'on_gpus' "$file" ||
            grep -qE "^$name .*\<sim\>" tests/files ||
            bad+="$file has jobs on GPUs, and is not in the binary sim"$'\n'
    done
    while read -r file; do
        [ -e "tests/$file.c" ] || bad+="there is no tests/$file.c"$'\n'
    done <$BUILD/listed
    check "tests/files names each file of tests" "$bad"
}

# Links lead to files of the repository.
check_readme_form() {
    local words link missing=""
    words=$(wc -w <README.md)
    check "README.md: $words words, at most $MAX_README_WORDS" \
        "$([ "$words" -le $MAX_README_WORDS ] || echo "too long")"
    for link in $(grep -oP '\]\(\K[^)]+' README.md); do
        [ -e "$link" ] || missing+="$link "
    done
    check "README.md links to files that exist" "$missing"
}

# ---- the API is tested ---------------------------------------------------------------------------

public_functions() {
    awk '/^#if.*!defined\(DP_IMPLEMENTED\)/ { exit }
         /^ *#/ { next }
         /DP_API |static inline / { declaration = 1 }
         declaration {
             text = text " " $0
             if (match(text, /dp_[a-z0-9_]+\(/)) {
                 name = substr(text, RSTART, RLENGTH - 1)
                 if (name !~ /^dp__/) print name
                 text = ""
                 declaration = 0
             } else if (/[;{}]/) { text = ""; declaration = 0 }
         }' dp.h | sort -u
}

check_tested() {
    local tests=(tests/*.[ch] tests/*/test_*.c tests/fuzz/*.[ch])
    grep -ohwE 'dp_[a-z0-9_]+' "${tests[@]}" /dev/null | sort -u >$BUILD/used
    check "every public function is named in a test" "$(comm -23 <(public_functions) $BUILD/used)"
    grep -ohwE 'dp_[a-z0-9_]+' tests/contexts/test_wrong_arguments.c | sort -u >$BUILD/swept
    check "every public function is fed wrong arguments by test_wrong_arguments.c" \
        "$(comm -23 <(public_functions) $BUILD/swept)"
}

# The table of other systems' rules names tests that exist.
check_semantics() {
    local file name ends missing=
    while IFS=/ read -r file name; do
        ends='[,)]'
        [[ $name == *'_*' ]] && ends='[,)_]'
        grep -qsE "^[A-Z_]*(TEST|MPI_)[A-Z_]*\\(${name%_\*}$ends" tests/*/"test_$file.c" "tests/$file.h" ||
            missing+="$file/$name "
    done < <(grep -oE '`[a-z_]+/[a-z0-9_]+(_\*)?`' tests/SEMANTICS.md | tr -d '`' | sort -u)
    check "tests/SEMANTICS.md names tests that there are" "$missing"
}

# ---- what it costs, and whether the runner reports failures --------------------------------------

check_cost() {
    local kib
    if ! "${MAKE:-make}" -s --no-print-directory $OBJECT >$BUILD/errors 2>&1; then
        check "dp.h compiles" "$(head -n 20 $BUILD/errors)"
        return
    fi
    kib=$((($(wc -c <$OBJECT) + 1023) / 1024))
    check "$CC -O2: $kib KiB of object, at most $MAX_OBJECT_KIB" \
        "$([ "$kib" -le $MAX_OBJECT_KIB ] || echo "too large")"
}

# Among the runner's own tests one passes, one is skipped, and seven must be seen to fail.
check_runner() {
    local last
    $CC -std=c11 -D_POSIX_C_SOURCE=200809L tests/test_main.c $OBJECT -o $BUILD/selftest \
        -lpthread -lm 2>$BUILD/errors
    TEST_SELFTEST=1 TEST_TIMEOUT_SCALE=1 $BUILD/selftest -j8 selftest/ >$BUILD/selftest.tap 2>&1
    local status=$?
    last=$(tail -n 1 $BUILD/selftest.tap)
    check "the runner reports failures, crashes, hangs and leaks, and ends" \
        "$([ "$status $last" = "1 1 passed, 7 failed, 1 skipped" ] ||
            cat $BUILD/errors $BUILD/selftest.tap)"
    check "its halves are not all, and together they are" "$(
        for half in %0 %1; do TEST_SELFTEST=1 $BUILD/selftest --list $half; done |
            sort | diff - <(TEST_SELFTEST=1 $BUILD/selftest --list | sort)
        [ -n "$(TEST_SELFTEST=1 $BUILD/selftest --list %0)" ] &&
            [ -n "$(TEST_SELFTEST=1 $BUILD/selftest --list %1)" ] || echo "one has none"
    )"
}

check_format
check_columns
check_functions
check_headers
check_openers
check_vocabulary
check_words
check_sections
check_rooms
check_carriers
check_environment
check_top_level
check_abi
check_licence
check_readme
check_readme_form
check_files
check_semantics
check_tested
check_cost
check_runner
exit $failed
