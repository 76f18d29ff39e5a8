# shellcheck shell=bash
# docs.sh - a step of run.sh: the site that make docs writes is whole, and says what the headers say.

DOCS=$PWD/build/docs

# silent NAME COMMAND...: what it prints is what is wrong
silent() {
    local name=$1 text
    shift
    if text=$("$@" 2>&1) && [ -z "$text" ]; then
        echo "ok - $name"
    else
        echo "not ok - $name"
        printf '%s\n' "$text" | head -n 20 | sed 's/^/#   /'
    fi
}

# Links, of what each page has and where each leads: "id PAGE NAME" and "to PAGE WHERE".
docs_links() {
    (cd "$DOCS" && find . -name '*.html' | sed 's,^\./,,' | LC_ALL=C sort | xargs awk '
        { line = $0 }
        { while (match(line, / (id|href|src)="[^"]*"/)) {
              word = substr(line, RSTART + 1, RLENGTH - 2)
              line = substr(line, RSTART + RLENGTH)
              print (word ~ /^id=/ ? "id" : "to"), FILENAME, substr(word, index(word, "\"") + 1)
          } }')
}

# That each leads to a file, and to an anchor that it has once.
docs_broken() {
    docs_links >"$LOGS/docs.links"
    [ "$(grep -c '^to' "$LOGS/docs.links")" -gt 10000 ] || echo "there are hardly any links"
    (cd "$DOCS" && find . -type f | sed 's,^\./,file ,') | awk '
        function path(page, to) {
            if (to == "") return page
            sub(/[^\/]*$/, "", page)
            to = page to
            while (sub(/[^\/.]+\/\.\.\//, "", to)) {}
            return to
        }
        $1 == "file" { there[$2] = 1 }
        $1 == "id" && ($2 "#" $3) in there { print $2 ": " $3 " is there twice" }
        $1 == "id" { there[$2 "#" $3] = 1 }
        $1 == "to" && $3 !~ /^https?:/ {
            at = index($3, "#")
            file = path($2, at ? substr($3, 1, at - 1) : $3)
            where[file (at ? substr($3, at) : "")] = $2
        }
        END { for (to in where) if (!(to in there)) print where[to] ": nothing is at " to }
    ' - "$LOGS/docs.links"
}

# Each function that a header declares, by another way than the site's.
docs_functions() {
    local header
    for header in dp.h dp_*.h; do
        tr '\n' ' ' <"$header" | grep -oE '(DP_API|static inline) [^();/]*\<dp_[a-z0-9_]+\('
    done | grep -oE 'dp_[a-z0-9_]+\($' | tr -d '(' | grep -v '^dp__' | LC_ALL=C sort -u
}

docs_anchors() {
    docs_functions >"$LOGS/docs.functions"
    [ "$(wc -l <"$LOGS/docs.functions")" -gt 200 ] || echo "there are hardly any functions"
    cat "$DOCS"/*.html | grep -oE '<h3 id="dp_[a-z0-9_]+"' | cut -d'"' -f2 | LC_ALL=C sort |
        uniq -c | awk '$1 > 1 { print $2 " has " $1 " anchors" } { print $2 >"'"$LOGS/docs.anchors"'" }'
    LC_ALL=C comm -23 "$LOGS/docs.functions" "$LOGS/docs.anchors" | sed 's/$/ has no anchor/'
}

text_of() { sed -E 's/<[^>]*>//g; s/&lt;/</g; s/&gt;/>/g; s/&quot;/"/g; s/&amp;/\&/g'; }

# What is in colour is the source, byte for byte.
docs_sources() {
    local page file count=0
    while read -r page; do
        file=${page#"$DOCS"/source/}
        file=${file%.html}
        sed -n '/^<pre/,/^<\/pre>/p' "$page" | sed '$d' | text_of | cmp -s - "$file" ||
            echo "$page is not $file"
        count=$((count + 1))
    done < <(find "$DOCS/source" -name '*.html')
    [ $count -gt 50 ] || echo "there are $count sources"
}

docs_readme() {
    awk '/^```/ { fenced = !fenced; next } fenced; !fenced && /^    / { print substr($0, 5) }' \
        README.md | grep . >"$LOGS/docs.wanted"
    [ "$(wc -l <"$LOGS/docs.wanted")" -gt 60 ] || echo "README.md has hardly any code"
    awk '/^<pre/ { inside = 1 } inside { print } /<\/pre>$/ { inside = 0 }' "$DOCS/readme.html" |
        text_of | grep . | diff "$LOGS/docs.wanted" -
}

docs_entries() {
    local name
    for name in dp.html#dp_open dp-values.html#dp_scatter dp-models.html#dp_train_step dp.html#dp_tensor \
        dp.html#dp_run_fn dp-ranks.html#DP_OP_MEAN dp-values.html#DP_SHAPE dp-jobs.html#launch \
        dp.html#manual-threads contract.html#dp_device_ops dp_train.html#dp_adamw \
        dp_save.html#dp_checkpoint_save dp_data.html#dp_loader_next dp_mpi.html#dp_mpi_bootstrap \
        dp_nccl.html#dp_nccl_coll readme.html#files cluster.html calls.html calls.html#clip-gradients \
        trouble.html#it-hangs cheat.html; do
        [ "$(grep -cF ",\"$name\"," "$DOCS/entries.js")" = 1 ] || echo "the search finds no $name, or two"
    done
}

# What is private is on no page but those of sources.
docs_private() {
    cat "$DOCS"/*.html | text_of | grep -E '\<(dp|DP)__[A-Za-z_]+' | grep -v 'undefined reference' | head
}

# Of each function how it fails, if it returns a status, where it is called, and what is near it.
docs_beside() {
    {
        tr '\n' ' ' <dp.h
        cat dp_*.h | tr '\n' ' '
    } | grep -oE '\<dp_status dp_[a-z0-9_]+\(' | tr -d '(' | cut -d' ' -f2 |
        grep -vE '^dp_(error|error_in|hip_adopt)$' >"$LOGS/docs.statuses" # two return what they are given, one is CUDA's
    cat "$LOGS/docs.statuses" "$DOCS"/*.html | awk '
        /^dp_[a-z0-9_]+$/ { fails[$0] = 1 }
        /^<h3 id="dp_/ { match($0, /dp_[a-z0-9_]+/); name = substr($0, RSTART, RLENGTH) }
        /^<dl class="more">/ {
            blocks++
            if (match($0, /"of">dp_[a-z0-9_]+/)) name = substr($0, RSTART + 5, RLENGTH - 5)
            example = errors = near = 0
        }
        /^<dt>(example|in a test)</ { example = 1 }
        /^<dt>errors</ { errors = 1 }
        /^<dt>see also</ { near = 1 }
        /^<\/dl>/ {
            if (!example) print name " is called nowhere"
            if (!errors && name in fails) print name " cannot fail"
            if (!near) print "nothing is near " name
        }
        END { if (blocks != '"$(wc -l <"$LOGS/docs.functions")"') print "of " blocks " functions something is said" }'
}

# All pages are in the menu, all functions on the cheat sheet, all examples on their page, once.
docs_complete() {
    local page name
    (cd "$DOCS" && ls -- *.html) | while read -r page; do
        grep -q "<li><a class=\"here\" href=\"$page\">" "$DOCS/$page" || echo "$page is not in the menu"
    done
    while read -r name; do
        [ "$(grep -c "<li><code><a href=\"[^\"]*\">$name</a>" "$DOCS/cheat.html")" = 1 ] ||
            echo "$name is not on the cheat sheet, or twice"
    done <"$LOGS/docs.functions"
    for name in examples/*.c examples/*.h examples/*.cpp examples/*/*.[ch] examples/*/*.?pp; do
        [ "$(grep -c "<td><code><a href=\"[^\"]*\">$name</a>" "$DOCS/examples.html")" = 1 ] ||
            echo "$name is not among the examples, or twice"
        grep -qx "$name" install/docs/examples || echo "$name has no place in install/docs/examples"
    done
    [ "$(grep -c '<svg class="drawing"' "$DOCS/ideas.html")" = 6 ] || echo "there are not six drawings"
}

# Names in `marks` on pages that are written by hand.
docs_mentioned() {
    local names=$LOGS/docs.mentioned
    for header in dp.h dp_*.h; do echo "${header%.h}"; done >"$names"
    sed -n '/^   At run time/,/^   OWNERSHIP/p; /==== >>launch/,/==== >>recovery/p' dp.h |
        grep -oE '\<DP_[A-Z_]+' >>"$names"
    cat "$LOGS/docs.functions" >>"$names"
    sed -nE 's/^\["(type|macro|constant|option|variable|function)","([^"]*)".*/\2/p' "$DOCS/entries.js" >>"$names"
    awk '{ n = split($0, part, "`"); for (i = 2; i <= n; i += 2) print part[i] }' README.md install/docs/*.md |
        grep -oE '\<(dp|DP)_[A-Za-z0-9_]+' | grep -vE '^(dp__open|dp_torch|dp_torch_save|dp_c10d|dp_ggml[a-z_]*)$' | LC_ALL=C sort -u |
        LC_ALL=C comm -23 - <(LC_ALL=C sort -u "$names")
}

# Code that is shown of examples is in one, line by line.
docs_excerpts() {
    local page
    for page in install/docs/*.md; do
        [ "$page" != install/docs/minutes.md ] || continue
        awk -v page="$page" '
            FILENAME == page && /^```(c|cpp)$/ { inside = 1; block[++blocks] = ""; next }
            FILENAME == page && /^```/ { inside = 0 }
            FILENAME == page { if (inside) block[blocks] = block[blocks] $0 "\n"; next }
            FNR == 1 { example[++examples] = "" }
            { example[examples] = example[examples] $0 "\n" }
            END {
                for (i = 1; i <= blocks; i++) {
                    for (k = 1; k <= examples && !index(example[k], block[i]); k++) {}
                    if (k > examples) print page ": no example has\n" block[i]
                }
            }' "$page" examples/*.[ch] examples/*/*.[ch] examples/*/*.?pp
    done
}

# Words that people say lead to entries, once.
docs_words() {
    [ "$(grep -c '^[^#].*|' install/docs/words)" -ge 60 ] || echo "there are hardly any words"
    sed -n 's/^[^#].*|//p' install/docs/words | while read -r where; do
        grep -qF ",\"$where\"," "$DOCS/entries.js" || echo "nothing is at $where"
    done
    sed -n 's/^[^#].*|//p' install/docs/words | sort | uniq -d | sed 's/$/ has two lines/'
    sed -n 's/^\([^#].*\)|.*/\1/p' install/docs/words | grep -vE '^[a-z0-9_+. -]+(, [a-z0-9_+. -]+)*$' || true
}

docs_sentences() {
    cat dp.h dp/*.h dp_*.h | tr '\n' ' ' | awk -f tests/docs/sentences.awk install/docs/trouble.md -
}

# For what people type, the right page is among the first three, in 95 of 100 cases.
docs_search() {
    local name="the search finds what people mean" script=$LOGS/docs.search got good
    {
        cat "$DOCS/entries.js"
        echo 'const dp_queries = ['
        sed -n 's/^\([^#|][^|]*\)|\(.*\)/["\1","\2"],/p' tests/docs/queries
        echo '];'
        cat "$DOCS/search.js" tests/docs/search.js
    } >"$script.js"
    printf '<!DOCTYPE html>\n<html><body><script src="docs.search.js"></script></body></html>\n' >"$script.html"
    if has node; then
        got=$(node "$script.js")
    else
        got=$(in_browser "file://$PWD/$script.html") || { skip "$name" "no node, no chromium" && return; }
        got=$(sed -n '/<pre>/,/<\/pre>/p' <<<"$got" | text_of)
    fi
    good=$(tail -n 1 <<<"$got")
    if [[ $good =~ ^([0-9]+)\ of\ ([0-9]+)$ ]] && ((BASH_REMATCH[2] >= 60 && 100 * BASH_REMATCH[1] >= 95 * BASH_REMATCH[2])); then
        echo "ok - $name ($good)"
    else
        echo "not ok - $name ($good)"
        sed 's/^/#   /' <<<"$got"
    fi
}

# What python3 needs for the pages; else what can be read without them is.
python_reads() { python3 -c 'import numpy, safetensors' 2>/dev/null; }

# A compiler that is sooner done with the library, and compiles that of the examples once for all pages.
compiler_for_pages() {
    cat <<END
#!/bin/bash
compile() { ${CC:-cc} ${STB_CFLAGS:+-isystem $PWD/build/stb $STB_CFLAGS} "\$@"; }
case "\$*" in
"-std=c11 -O2 -c examples/dp.c")
    [ -e $PWD/$LOGS/docs.dp.o ] || compile -O0 -c examples/dp.c -o $PWD/$LOGS/docs.dp.o
    cp $PWD/$LOGS/docs.dp.o dp.o
    ;;
*" -c dp.c") compile "\${@/#-O2/-O0}" ;;
*) compile "\$@" ;;
esac
END
}

# How the commands of a page go, in a folder with the repository beside it.
docs_commands() {
    local page=$1 folder=$LOGS/docs.typed n want got bad=0 name="what $1 says to type works"
    rm -rf "$folder"
    mkdir -p "$folder/bin" "$folder/out"
    ln -s "$PWD" "$folder/dp.h"
    ln -s "$PWD/examples" "$folder/examples"
    compiler_for_pages >"$folder/bin/cc"
    printf '#!/bin/sh\nexit 1\n' >"$folder/bin/gzip" # no pictures but those that are drawn
    chmod +x "$folder"/bin/*
    awk -v "out=$PWD/$folder/out" -f tests/docs/commands.awk "$page" >"$folder/script"
    (cd "$folder" && unset DP_LAUNCH && PYTHON=$(python_reads && echo yes) PATH=$PWD/bin:$PATH timeout 300 bash script)
    for ((n = 1; ; n++)); do
        [ -e "$folder/out/$n.command" ] || break
        if [ ! -e "$folder/out/$n.got" ]; then # left out
            skip "$name" "no safetensors for python3"
            continue
        fi
        want=$(sed 's/[][*?\\]/\\&/g; s/\.\.\./*/g' "$folder/out/$n.want")
        got=$(cat "$folder/out/$n.got")
        # shellcheck disable=SC2053 # a pattern
        if [ ! -e "$folder/out/$n.well" ] || [[ $got != $want ]]; then
            echo "not ok - $name: $(cat "$folder/out/$n.command")"
            diff "$folder/out/$n.want" "$folder/out/$n.got" | sed 's/^/#   /'
            bad=1
        fi
    done
    [ "$bad" = 1 ] || [ "$n" = 1 ] || echo "ok - $name ($((n - 1)) commands)"
}

# The checkpoint of the last page, read by Python alone.
docs_checkpoint() {
    local name="Python reads the header of the checkpoint" got
    has python3 || { skip "$name" "no python3" && return; }
    got=$(python3 -c '
import json, struct, sys
with open(sys.argv[1], "rb") as file:
    header = json.loads(file.read(struct.unpack("<Q", file.read(8))[0]))
    print(*(f"{name} {header[name]}" for name in sorted(header)), file.read().hex()[:0])' \
        "$LOGS/docs.typed/first/line.safetensors" 2>&1)
    is_the_same "$name" "bias {'dtype': 'F32', 'shape': [1], 'data_offsets': [4, 8]} \
weight {'dtype': 'F32', 'shape': [1], 'data_offsets': [0, 4]} " "$got"
}

# Macros and constants of the headers that compile by themselves, as the preprocessor has them, and
# the options and variables that manuals name: all that the search does not find.
docs_names() {
    local header
    for header in dp.h dp_*.h; do
        case $header in
        dp_cpu.h | dp_cuda.h | dp_hip.h | dp_nccl.h | dp_mpi.h) ;;
        *) echo "#include \"$header\"" ;;
        esac
    done >"$LOGS/docs.c"
    {
        ${CC:-cc} -E -dM -I. "$LOGS/docs.c" | awk '{ sub(/\(.*/, "", $2); print $2 }'
        ${CC:-cc} -E -P -I. "$LOGS/docs.c" | tr '\n' ' ' | grep -oE '\<enum( dp_[a-z_0-9]+)? *\{[^}]*\}' |
            grep -oE '\<DP_[A-Z0-9_]+'
        sed -n '/^   OPTIONS/,/^   At run time/s/^     \(DP_.*[^ ]\)   .*/\1/p' dp.h | grep -oE 'DP_[A-Z_]+'
        for header in dp.h dp_*.h; do
            sed '/^#if defined(DP_IMPLEMENTATION)/q' "$header" | grep -oE '\$DP_[A-Z_]+' | tr -d '$'
        done
    } | grep '^DP_[A-Z]' | grep -vE '^DP__|_H$' | LC_ALL=C sort -u >"$LOGS/docs.names"
    [ "$(wc -l <"$LOGS/docs.names")" -gt 150 ] || echo "there are hardly any names"
    sed -nE 's/^\["[a-z]+","(DP_[A-Z0-9_]+)".*/\1/p' "$DOCS/entries.js" | LC_ALL=C sort |
        LC_ALL=C comm -3 "$LOGS/docs.names" - | sed 's/^\t\(.*\)/\1 is of no header, or twice/; t; s/$/ is not found/'
}

docs_again() {
    install/docs/docs.sh build/docs-again >/dev/null && diff -r "$DOCS" build/docs-again
}

docs_browser() {
    local found
    found=$(in_browser "file://$DOCS/index.html?q=all_reduce_weighted") ||
        { skip "a browser searches" "no chromium that starts" && return; }
    if [[ $found == *'<ol id="found"><li><a href="dp-ranks.html#dp_all_reduce_weighted">'* ]]; then
        echo "ok - a browser searches"
    else
        echo "not ok - a browser searches"
        grep -o '<ol id="found".*' <<<"$found" | head -c 500 | sed 's/^/#   /'
    fi
}

# On a telephone no page is wider than the screen.
docs_narrow() {
    local name="no page is wider than a telephone" got page=build/docs-narrow.html
    {
        echo '<!DOCTYPE html><html><body><script>const pages = ['
        (cd "$DOCS" && ls -- *.html source/dp/value.h.html) | sed 's/.*/"&",/'
        cat <<'END'
        ];
        let left = pages.length;
        for (const page of pages) {
            const frame = document.createElement("iframe");
            frame.style.width = "390px";
            frame.onload = () => {
                const wide = frame.contentDocument.documentElement.scrollWidth;
                if (wide > 390) document.body.append(`WIDE ${page}: ${wide}. `);
                if (--left === 0) document.body.append("DONE");
            };
            frame.src = "docs/" + page;
            document.body.append(frame);
        }
        </script></body></html>
END
    } >$page
    got=$(in_browser --allow-file-access-from-files --virtual-time-budget=30000 "file://$PWD/$page") ||
        { skip "$name" "no chromium that starts" && return; }
    got=$(sed '1,/<\/script>/d' <<<"${got//<\/script>/$'\n</script>\n'}" | grep -oE 'WIDE [a-z][^ ]*: [0-9]+|DONE' | tr '\n' ' ')
    is_the_same "$name" "DONE " "$got"
}

docs_printed() {
    local name="the cheat sheet is one page of paper" file=$LOGS/docs.cheat.pdf
    rm -f "$file"
    browser --no-pdf-header-footer "--print-to-pdf=$PWD/$file" "file://$DOCS/cheat.html" >/dev/null
    [ -s "$file" ] || { skip "$name" "no chromium that prints" && return; }
    is_the_same "$name" 1 "$(grep -aoE '/Type */Page\>' "$file" | wc -l)"
}

step_docs() {
    local page
    build docs >/dev/null || { build docs && return 1; }
    silent "the site's links and anchors" docs_broken
    silent "each public function has one anchor" docs_anchors
    silent "below each function stands how it fails, where it is called, what is near it" docs_beside
    silent "pages show nothing private" docs_private
    silent "menu, cheat sheet and list of examples are complete" docs_complete
    silent "sources and examples are shown as they are" docs_sources
    silent "README.md's code is shown as it is" docs_readme
    silent "pages name what there is" docs_mentioned
    silent "code on pages is that of examples" docs_excerpts
    silent "the sentences that are explained are those of the code" docs_sentences
    silent "the search knows functions, types, constants, sections and pages" docs_entries
    silent "the search knows each macro, constant, option and variable once" docs_names
    silent "words that people say lead somewhere" docs_words
    docs_search
    silent "the site is the same each time" docs_again
    if has xmllint; then
        # shellcheck disable=SC2046 # many files
        silent "the site is well formed" xmllint --noout $(find "$DOCS" -name '*.html')
    else
        skip "the site is well formed" "no xmllint"
    fi
    rm -f "$LOGS/docs.dp.o"
    for page in README.md install/docs/*.md; do
        case $page in */minutes.md) ;; *) docs_commands "$page" ;; esac
    done
    docs_commands install/docs/minutes.md
    docs_checkpoint
    docs_browser
    docs_narrow
    docs_printed
}
