# page.awk - the page of a header: its manual, its sections, and what it declares.
#
#   awk ... -f html.awk -f ../manual.awk -f page.awk dp.h
#
# An item is a comment and the declarations below it, up to an empty line. Its functions are its
# headings; other names have their anchors there too.

function out(text) { body[++lines] = text }

function url_here(id) { return here "#" id }

function source_here(line) { return root "source/" FILENAME ".html#L" line }

# Paragraphs, and what stands as it is, are one or the other at a time.
function layout(next_one) {
    if (next_one == open_one) return
    if (open_one != "") out(open_one == "text" ? "</p>" : "</pre>")
    open_one = next_one
    if (next_one == "text") out("<p>")
    if (next_one == "pre") join_next = "<pre>"
}

# `words` of text are code.
function prose(text,    done, word, rest) {
    while (match(text, /`[^`]+`/)) {
        word = substr(text, RSTART + 1, RLENGTH - 2)
        rest = substr(text, RSTART + RLENGTH)
        done = done linked(substr(text, 1, RSTART - 1)) "<code>" linked(word) "</code>"
        text = rest
    }
    return done linked(text)
}

# Names that prose has: options, and variables of the environment.
function names_in_prose(line,    n, name) {
    for (n = 1; n <= names_at[FNR]; n++) {
        name = names_of[FNR, n]
        if (kind_of[name] !~ /^(option|variable)$/) continue
        join_next = join_next "<a class=\"name\" id=\"" name "\"></a>"
        sub(/^ +/, "", line)
        entry(kind_of[name], name, url_here(name), line)
    }
}

function fill(line) {
    if (empty) layout("")
    layout("text")
    names_in_prose(line)
    out(join_next prose(line))
    join_next = ""
    words = words " " line
}

function as_it_is(line) {
    if (open_one == "pre" && empty) out("")
    layout("pre")
    names_in_prose(line)
    out(join_next linked(line))
    join_next = ""
    words = words " " line
}

function end_words() {
    layout("")
    if (heading_id != "") entry(heading_kind, heading_name, url_here(heading_id), substr(words, 1, 400))
    heading_id = words = ""
}

function begin_words(kind, name, id) {
    end_words()
    heading_kind = kind
    heading_name = name
    heading_id = id
}

function begin_header(name, description) {
    out("<h1>" FILENAME "</h1>")
    out("<p class=\"lead\">" escape(description) ". <a class=\"source\" href=\"" source_here(1) \
        "\">source</a></p>")
    entry("header", FILENAME, here, description)
}

function heading(text,    id) {
    begin_words("manual", FILENAME ": " tolower(text), id = "manual-" slug(text))
    out("<h2 id=\"" id "\">" escape(substr(text, 1, 1) tolower(substr(text, 2))) "</h2>")
}

function begin_section(name) {
    sections++
    flush()
    begin_words("section", FILENAME ": " name, name)
    words = about[name]
    out("<h2 id=\"" name "\">" name " <a class=\"source\" href=\"" source_here(FNR) "\">source</a></h2>")
    out("<p class=\"lead\">" linked(about[name]) "</p>")
    item_lines = 0
}

function begin_declarations() { end_words() }

# Code is kept until its item is complete.
function code(line) {
    if (verbatim_text) { as_it_is(line); return }
    if (empty && line !~ /^[ }]/) flush()
    else if (empty) item[++item_lines] = ""
    item[++item_lines] = line
    if (item_lines == 1) item_from = FNR
    item_to = FNR
}

function flush(    i, n, name, label) {
    if (item_lines == 0) return
    end_words()
    out("<div class=\"item\">")
    words = label = ""
    for (i = item_from; i <= item_to; i++)
        for (n = 1; n <= names_at[i]; n++) name_at(names_of[i, n])
    for (i = 1; i <= item_lines && is_comment(i); i++) comment_line(item[i])
    layout("")
    if (i <= item_lines) {
        in_comment = 0
        label = "<pre class=\"code\">"
        for (; i <= item_lines; i++) { out(label colour(item[i])); label = "" }
        out("</pre>")
    }
    out("</div>")
    for (i = item_from; i <= item_to; i++)
        for (n = 1; n <= names_at[i]; n++)
            entry(kind_of[names_of[i, n]], names_of[i, n], url_here(names_of[i, n]), substr(words, 1, 240))
    item_lines = 0
    words = ""
}

function name_at(name) {
    if (kind_of[name] != "function" && kind_of[name] != "type") {
        out("<a class=\"name\" id=\"" name "\"></a>")
        return
    }
    out("<h3 id=\"" name "\"><a href=\"#" name "\">" name "</a> <a class=\"source\" href=\"" \
        source_here(line_of[name]) "\">declared</a>" (!(name in defined_at) ? "" : \
        " <a class=\"source\" href=\"" root defined_at[name] "\">defined</a>") "</h3>")
}

# The comment with which an item begins.
function is_comment(i) {
    if (i == 1) comment_open = item[1] ~ /^\/\*/ && item[1] !~ /\*\/./
    else comment_open = comment_open && item[i - 1] !~ /\*\/$/
    return comment_open
}

function comment_line(line) {
    sub(/^(\/\* |   )/, "", line)
    sub(/ *\*\/$/, "", line)
    empty = 0
    if (line == "") { layout(""); return }
    if (line ~ /^ /) as_it_is(line)
    else fill(line)
}

function end_header(    i) {
    flush()
    end_words()
    top(FILENAME)
    print body[1] "\n" body[2]
    if (sections) {
        print "<ul class=\"contents\">"
        for (i = 1; i <= tags; i++)
            if ((FILENAME, tag[i]) in section_of) # others hold what is private
                print "<li><a href=\"#" tag[i] "\">" tag[i] "</a> " linked(about[tag[i]]) "</li>"
        print "</ul>"
    }
    for (i = 3; i <= lines; i++) print body[i]
    bottom()
}

BEGIN {
    for (i = 1; i <= names; i++)
        if (header_of[name_of[i]] == ARGV[1]) {
            line = line_of[name_of[i]]
            names_at[line]++
            names_of[line, names_at[line]] = name_of[i]
        }
}
