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
    cat "$DOCS"/dp*.html | grep -oE '<h3 id="dp_[a-z0-9_]+"' | cut -d'"' -f2 | LC_ALL=C sort |
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
    awk '/^<pre/ { inside = 1 } inside { print } /<\/pre>$/ { inside = 0 }' "$DOCS/index.html" |
        text_of | grep . | diff "$LOGS/docs.wanted" -
}

docs_entries() {
    local name
    for name in dp.html#dp_open dp.html#dp_scatter dp.html#dp_train_step dp.html#dp_tensor \
        dp.html#dp_run_fn dp.html#DP_OP_MEAN dp.html#DP_SHAPE dp.html#launch dp.html#manual-threads \
        dp_train.html#dp_adamw dp_save.html#dp_checkpoint_save dp_data.html#dp_loader_next \
        dp_mpi.html#dp_mpi_bootstrap dp_nccl.html#dp_nccl_coll index.html#files cluster.html calls.html; do
        [ "$(grep -cF ",\"$name\"," "$DOCS/entries.js")" = 1 ] || echo "the search finds no $name, or two"
    done
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
    if [[ $found == *'<ol id="found"><li><a href="dp.html#dp_all_reduce_weighted">'* ]]; then
        echo "ok - a browser searches"
    else
        echo "not ok - a browser searches"
        grep -o '<ol id="found".*' <<<"$found" | head -c 500 | sed 's/^/#   /'
    fi
}

step_docs() {
    build docs >/dev/null || { build docs && return 1; }
    silent "the site's links and anchors" docs_broken
    silent "each public function has one anchor" docs_anchors
    silent "sources and examples are shown as they are" docs_sources
    silent "README.md's code is shown as it is" docs_readme
    silent "the search knows functions, types, constants, sections and pages" docs_entries
    silent "the search knows each macro, constant, option and variable once" docs_names
    silent "the site is the same each time" docs_again
    if has xmllint; then
        # shellcheck disable=SC2046 # many files
        silent "the site is well formed" xmllint --noout $(find "$DOCS" -name '*.html')
    else
        skip "the site is well formed" "no xmllint"
    fi
    docs_browser
}
