# cheat.awk - the functions that a header declares, for the cheat sheet: a line for each.
#
#   awk -f ../manual.awk -f cheat.awk dp.h
#
#   NAME  ARGUMENTS  HEADER  SECTION  what the section holds  what is said of it first

function begin_header(name, description) { subject = description }
function heading(text) {}
function begin_section(name) { section = name; subject = about[name] }
function begin_declarations() { declaration = "" }
function fill(line) {}
function end_header() {}

function code(line) {
    if (verbatim_text) return
    if (in_comment || line ~ /^\/\*/) {
        if (!in_comment) said = ""
        in_comment = line !~ /\*\/ *$/
        gsub(/^ *\/\* *| *\*\/ *$/, "", line)
        sub(/^ +/, "", line)
        said = said (said == "" ? "" : " ") line
        return
    }
    if (/DP_API |static inline /) text = name = ""
    word = declares()
    if (word != "") name = word
    text = text line
    if (line !~ /;/) return
    if (name != "") print name "\t" arguments(text) "\t" FILENAME "\t" section "\t" subject "\t" first_of(text)
    name = text = said = ""
}

# Their names: what stands last in each, or after the star of a function's pointer.
function arguments(text,    list, n, i, depth, word, out) {
    sub(/^[^(]*\(/, "", text)
    sub(/ DP_PRINTF\(.*/, ";", text)
    sub(/\)[^)]*;.*|\);$/, "", text)
    while (match(text, /\(\*[a-z_]+\)\([^()]*\)/)) {
        word = substr(text, RSTART + 2, RLENGTH - 2)
        sub(/\).*/, "", word)
        text = substr(text, 1, RSTART - 1) word substr(text, RSTART + RLENGTH)
    }
    n = split(text, list, ",")
    for (i = 1; i <= n; i++) {
        word = list[i]
        sub(/\[.*/, "", word)
        sub(/ +$/, "", word)
        sub(/.*[ *]/, "", word)
        if (word != "void") out = out (out == "" ? "" : ", ") word
    }
    return out
}

# The first sentence of the comment above, or of that behind.
function first_of(text) {
    if (match(text, /\/\*.*\*\//)) {
        said = substr(text, RSTART + 3, RLENGTH - 6)
        gsub(/  +/, " ", said)
    }
    if (match(said, /[.;] /) || (match(said, /: /) && said !~ /\([^)]*:/)) said = substr(said, 1, RSTART - 1)
    sub(/\.$/, "", said)
    return said
}
