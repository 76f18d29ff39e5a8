# man.awk - manual pages from what stands in a header: nothing is written twice. Called by install.sh.
#
#   awk -v out=FOLDER -v date=2026-01-31 -v others="dp_data dp_train" -f man.awk dp.h
#
# dp.h becomes dp.3, and a page for each of its public sections; another header becomes one page. Each
# function is a link to the page that has it.

# What roff would take for its own, or print as a typographer does.
function escape(text) {
    gsub(/\\/, "\\e", text); gsub(/-/, "\\-", text); gsub(/'/, "\\(aq", text)
    gsub(/`/, "\\(ga", text); gsub(/\^/, "\\(ha", text); gsub(/~/, "\\(ti", text)
    sub(/^\./, "\\\\\\&.", text)
    return text
}

function put(text) { print text >page }

function layout(as_it_is) {
    if (as_it_is != verbatim) put(as_it_is ? ".nf" : ".fi")
    verbatim = as_it_is
}

function heading(text) {
    layout(0)
    put(".SH " escape(text))
    first = 1
}

function code(line) {
    layout(1)
    if (empty && !first) put("")
    put(escape(line))
}

function fill(line,    at) {
    layout(0)
    if (empty && !first) put(".PP")
    for (line = escape(line); length(line) > 80; line = substr(line, at + 1)) {
        for (at = 80; substr(line, at, 1) != " "; at--) {}
        put(substr(line, 1, at - 1))
    }
    put(line)
}

# Of text, what is indented is a table or code, and a blank line ends a paragraph.
function show(line, is_code) {
    if (!is_code) sub(/^   /, "", line)
    if (line == "") { empty = 1; return }
    if (is_code || line ~ /^ /) code(line)
    else fill(line)
    empty = first = 0
}

function begin_page(name, description) {
    page = out "/" name ".3"
    current = name
    put(".TH " toupper(name) " 3 \"" date "\" \"dp.h " version "\" \"dp.h\"\n.ad l\n.nh")
    heading("NAME")
    fill(name " - " description)
    heading("SYNOPSIS")
    code("#include <" FILENAME ">")
    heading("DESCRIPTION")
}

function end_page(    i, list) {
    if (current == "dp") {
        heading("PAGES")
        for (i = 1; i <= tags; i++) code(sprintf("%-19s %s", "dp_" tag[i] "(3)", about[tag[i]]))
    }
    heading("SEE ALSO")
    i = split(current == "dp" ? others : "dp", list, " ")
    for (; i > 0; i--) put(".BR " list[i] " (3)" (i > 1 ? "," : ""))
    close(page)
}

# The functions that a line of code declares, or that lines before it began to declare.
function link(line,    name) {
    if (line ~ /^ *#/) return
    if (line ~ /DP_API |static inline /) declaration = " "
    if (declaration == "") return
    declaration = declaration line
    if (match(declaration, /dp_[a-z0-9_]+\(/)) {
        name = substr(declaration, RSTART, RLENGTH - 1)
        if (name !~ /^dp__/ && name != current) {
            print ".so man3/" current ".3" >(out "/" name ".3")
            close(out "/" name ".3")
        }
    } else if (line !~ /[;{}]/) return
    declaration = ""
}

FNR == 1 {
    line = $0
    if (line !~ / - MIT licence/ && (getline more) > 0) line = line substr(more, 3)
    split(line, title, / - /)
    version = substr(title[2], 2)
    begin_page(substr(FILENAME, 1, length(FILENAME) - 2), title[3])
    where = "manual"
    next
}
/^#if defined\(DP_IMPLEMENTATION\) && !defined\(DP_([A-Z]+_)?IMPLEMENTED\)/ { exit }
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
    if (last && where == "banner" && FILENAME == "dp.h") heading("DECLARATIONS")
    if (last) where = where == "banner" ? "code" : ""
    empty = empty || last
    next
}
/^\/\* ==== >>/ {
    name = substr($3, 3)
    if (FILENAME == "dp.h") {
        end_page()
        begin_page("dp_" name, about[name])
    } else heading(toupper(name))
    where = /\*\/$/ ? "code" : "banner"
    next
}
/^extern "C"/ && FILENAME != "dp.h" { # what is declared before the first section
    getline
    where = "code before"
}
where == "code before" && /^[^#]/ { heading("DECLARATIONS"); where = "code" }
/^#ifdef __cplusplus/ || (where == "code" && /^#endif \/\* DP/) { where = "" }
where == "code" && !/clang-format (on|off)/ { link($0); show($0, 1) }
END { end_page() }
