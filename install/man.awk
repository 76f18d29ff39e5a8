# man.awk - manual pages from what stands in a header: nothing is written twice. Called by install.sh.
#
#   awk -v out=FOLDER -v date=2026-01-31 -v others="dp_data dp_train" -f manual.awk -f man.awk dp.h
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

# Each function is a link to the page that has it.
function link(name) {
    if (name == "" || name == current) return
    print ".so man3/" current ".3" >(out "/" name ".3")
    close(out "/" name ".3")
}

function code(line) {
    if (!verbatim_text) link(declares())
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

function begin_header(name, description) { begin_page(name, description) }

function begin_section(name) {
    if (FILENAME == "dp.h") {
        end_page()
        begin_page("dp_" name, about[name])
    } else heading(toupper(name))
}

# In a page of a section of its own these two headings tell text from code.
function begin_declarations() {
    if (FILENAME == "dp.h" || where == "code before") heading("DECLARATIONS")
}

function end_header() { end_page() }
