# manual.awk - what a header says of itself, for all that writes it down: man.awk, docs/*.awk.
#
#   awk -f manual.awk -f WRITER.awk dp.h
#
# It reads the manual in the first comment and all that is public. A writer has the functions
#
#   begin_header(name, description)   of dp_train.h, "dp_train" and the title's last part
#   heading(text)                     in the manual: THREADS
#   begin_section(name)               >>name, of which about[name] says what it holds
#   begin_declarations()              what follows is code, after a section's own words
#   fill(line)                        of text
#   code(line)                        of code, a table, anything that stands as it is; see declares()
#   end_header()
#
# `empty` says that an empty line came before; `verbatim_text` that a line of code() is part of text.
# What is private is left out of code, and so are the bodies of functions and macros.

# Of text, what is indented is a table or code, and a blank line ends a paragraph.
function show(line, is_code) {
    if (!is_code) sub(/^   /, "", line)
    if (line == "") { empty = 1; return }
    verbatim_text = !is_code
    if (is_code || line ~ /^ /) code(line)
    else fill(line)
    empty = first = 0
}

# The public function that this line of the header declares, or that lines before it began to declare.
function declares(    line, name) {
    line = $0
    if (line ~ /^ *#/) return ""
    if (line ~ /DP_API |static inline /) declaration = " "
    if (declaration == "") return ""
    declaration = declaration line
    if (match(declaration, /dp_[a-z0-9_]+\(/)) name = substr(declaration, RSTART, RLENGTH - 1)
    else if (line !~ /[;{}]/) return ""
    declaration = ""
    return name ~ /^dp__/ ? "" : name
}

# Whether a line of code is left out. `hiding`: what goes on from the line before is left out, too.
function hidden(line) {
    if (hiding == "macro") { if (line !~ /\\$/) hiding = "" }
    else if (hiding == "body") { if (line ~ /^}/) hiding = "" }
    else if (hiding == "fields") { if (line ~ /^ *}/) hiding = "" }
    else if (hiding == "declaration") {
        if (line ~ /^[{]/) hiding = "body"
        else if (line ~ /;/) hiding = ""
    } else if (line ~ /^# *(define|undef) DP__/) { if (line ~ /\\$/) hiding = "macro" }
    else if (line ~ /(DP_API|static inline) .*[ *]dp__[a-z0-9_]+\(/) { if (line !~ /;/) hiding = "declaration" }
    else if (line ~ /^[{]/) hiding = "body"
    else if (line ~ /^ +struct dp__[a-z_]+ [{]/) hiding = "fields"
    else return line ~ /struct dp__[a-z_]+( \*[a-z_]+)?;/
    return 1
}

# A line of code as it is shown: a prototype, without words for compilers, and a macro without what it
# stands for, but for lists.
function public_form(line) {
    if (match(line, /^(DP_MUST_USE )?(DP_API|static inline) /)) {
        inline = line ~ /static inline /
        indented = RLENGTH
        line = substr(line, RLENGTH + 1)
        prototype = 1
    } else if (prototype && match(line, /^ +/)) {
        line = substr(line, 1 + (RLENGTH < indented ? RLENGTH : indented))
    }
    if (inline && (sub(/\)$/, ");", line) || sub(/\) +\/\*/, "); /*", line))) inline = 0
    if (line ~ /;/) prototype = 0
    if (match(line, /^# *define DP_[A-Z_]+\([^X)][^)]*\)/)) {
        if (line ~ /\\$/) hiding = "macro"
        line = substr(line, 1, RLENGTH)
    }
    gsub(/ DP__[A-Z_]+/, "", line)
    sub(/\(DP__[A-Z_]+\)/, "(...)", line)
    return line
}

FNR == 1 {
    line = $0
    if (line !~ / - MIT licence/ && (getline more) > 0) line = line substr(more, 3)
    split(line, title, / - /)
    version = substr(title[2], 2)
    begin_header(substr(FILENAME, 1, length(FILENAME) - 2), title[3])
    where = "manual"
    next
}
/^#if.*defined\(DP_IMPLEMENTATION\).*!defined\(DP_([A-Z]+_)?IMPLEMENTED\)/ { exit }
where == "manual" && /^   CONTENTS/ { where = "contents"; next }
where == "contents" && /^   [a-z]/ { where = "private contents" }
where == "contents" && /^ +>>/ {
    tag[++tags] = substr($1, 3)
    about[tag[tags]] = substr($0, match($0, / [^ >]/) + 1)
}
where ~ /contents/ && /^$/ { where = "manual" }
where == "manual" && /^   [A-Z][A-Z]+( [A-Z]+)*( \(.*\))?$/ { heading(substr($0, 4)); next }
where ~ /manual|contents|banner/ {
    last = sub(/ *\*\/$/, "")
    if (where !~ /contents/) show($0)
    if (last && where == "banner") begin_declarations()
    if (last) where = where == "banner" ? "code" : ""
    empty = empty || last
    next
}
/^\/\* ==== >>/ {
    begin_section(substr($3, 3))
    where = /\*\/$/ ? "code" : "banner"
    next
}
/^extern "C"/ && FILENAME != "dp.h" { # what is declared before the first section
    getline
    where = "code before"
}
where == "code before" && /^[^#]/ { begin_declarations(); where = "code" }
where == "code" && /^#ifdef __cplusplus/ { where = "c++"; next }
where == "c++" && /^#(else|endif)/ { of_c = /else/; where = "code"; next }
of_c && /^#endif/ { of_c = 0; next }
where == "code" && /^#endif \/\* DP/ { where = "" }
where == "code" && !/clang-format (on|off)/ && !hidden($0) { show(public_form($0), 1) }
END { end_header() }
