# page.awk - the page of a header, or of some of its sections: its manual, its sections, and what it
# declares.
#
#   awk ... -f html.awk -f ../manual.awk -f page.awk dp.h
#
# An item is a comment and the declarations below it, up to an empty line or another comment. Its functions are its
# headings; other names have their anchors there too. Below it stands how each function fails, where it
# is called, and what is near it. What is on another page of the header is passed over.

function out(text) { if (!elsewhere) body[++lines] = text }

function found(kind, name, id, text) { if (!elsewhere) entry(kind, name, url_here(id), text) }

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
        found(kind_of[name], name, name, line)
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
    if (heading_id != "") found(heading_kind, heading_name, heading_id, words)
    heading_id = words = ""
}

function begin_words(kind, name, id) {
    end_words()
    heading_kind = kind
    heading_name = name
    heading_id = id
}

function begin_header(name, description) {
    page_name = page_title[here]
    is_part = page_of(FILENAME, "") != here
    out("<h1>" escape(page_name) "</h1>")
    out("<p class=\"lead\">" (is_part ? "A part of " anchor(FILENAME) ": " escape(description) \
        : (page_name == FILENAME ? "" : "<code>" FILENAME "</code>: ") escape(description)) ". <a class=\"source\" href=\"" \
        source_here(1) "\">source</a></p>")
    entry("header", is_part || page_name == FILENAME ? page_name : FILENAME ": " page_name, here, description)
    elsewhere = is_part
}

function heading(text,    id) {
    begin_words("manual", page_name ": " tolower(text), id = "manual-" slug(text))
    out("<h2 id=\"" id "\">" escape(substr(text, 1, 1) tolower(substr(text, 2))) "</h2>")
}

function begin_section(name) {
    sections++
    flush()
    end_words()
    elsewhere = page_of(FILENAME, name) != here
    begin_words("section", FILENAME ": " name, name)
    words = about[name]
    out("<h2 id=\"" name "\">" name " <a class=\"source\" href=\"" source_here(FNR) "\">source</a></h2>")
    out("<p class=\"lead\">" linked(about[name]) "</p>")
    item_lines = has_code = 0
}

function begin_declarations() { end_words() }

# Code is kept until its item is complete.
function code(line) {
    if (verbatim_text) { as_it_is(line); return }
    if ((empty && line !~ /^[ }]/) || (line ~ /^\/\*/ && has_code)) flush()
    else if (empty) item[++item_lines] = ""
    item[++item_lines] = line
    if (item_lines == 1) item_from = FNR
    item_to = FNR
    commenting = commenting || line ~ /^\/\*/
    if (!commenting) has_code = 1
    if (line ~ /\*\/$/) commenting = 0
}

function flush(    i, n, name, label) {
    if (item_lines == 0) return
    end_words()
    out("<div class=\"item\">")
    words = label = ""
    functions = 0
    for (i = item_from; i <= item_to; i++)
        for (n = 1; n <= names_at[i]; n++) {
            name_at(names_of[i, n])
            functions += kind_of[names_of[i, n]] == "function"
        }
    for (i = 1; i <= item_lines && is_comment(i); i++) comment_line(item[i])
    layout("")
    if (i <= item_lines) {
        in_comment = 0
        label = "<pre class=\"code\">"
        for (; i <= item_lines; i++) {
            if (in_comment || item[i] ~ /\/\*/) words = words " " item[i]
            out(label colour(item[i]))
            label = ""
        }
        out("</pre>")
    }
    gsub(/\/\*|\*\//, "", words)
    for (i = item_from; i <= item_to; i++)
        for (n = 1; n <= names_at[i]; n++) {
            name = names_of[i, n]
            if (kind_of[name] == "function") beside(name, functions > 1)
            found(kind_of[name], name, name, words " " says[name])
        }
    out("</div>")
    item_lines = has_code = 0
    words = ""
}

# What is known of a function beside its declaration; its name, where there are several.
function beside(name, named,    text, place) {
    out("<dl class=\"more\">" (named ? "<dt class=\"of\">" name "</dt>" : ""))
    text = status_links(name)
    if (text != "") out("<dt>errors</dt><dd>" text sentences(name) "</dd>")
    if (name in use_at) {
        split(use_at[name], place, " ")
        out("<dt>" (place[1] ~ /^examples/ ? "example" : "in a test") "</dt><dd><code>" \
            escape(use_of[name]) "</code> <a class=\"source\" href=\"" root source_url[place[1]] "#L" place[2] "\">" \
            place[1] ":" place[2] "</a></dd>")
    }
    text = see_also(name)
    if (text != "") out("<dt>see also</dt><dd>" text "</dd>")
    out("</dl>")
}

# Those that the code returns, and those that the comment names.
function status_links(name,    list, n, i, text, all) {
    all = errors_of[name]
    n = split("INVALID STATE UNSUPPORTED MISMATCH NO_MEMORY TIMEOUT FILE NO_FILE", list, " ")
    for (i = 1; i <= n; i++)
        if ((" " all " ") !~ " " list[i] " " && (" " words " ") ~ "[^A-Z_](DP_ERR_)?" list[i] "[^A-Z_]")
            all = all " " list[i]
    n = split(all, list, " ")
    for (i = 1; i <= n; i++)
        text = text (i > 1 ? ", " : "") "<a href=\"" \
            (list[i] == "JOB" ? href(">>status") : href("DP_ERR_" list[i])) "\">" \
            (list[i] == "JOB" ? "the job's failure" : list[i]) "</a>"
    return text
}

function sentences(name,    list, n, i, text) {
    n = split(says[name], list, "\n")
    for (i = 1; i < n; i++) text = text "<li>" escape(list[i]) "</li>"
    return text == "" ? "" : " <details><summary>sentences</summary><ul>" text "</ul></details>"
}

# What the comment names, whose comment names this, and then neighbours, at most six; and the part of
# "Which call do I want?" that has it.
function see_also(name,    list, n, i, text, taken, count) {
    taken[name] = 1
    n = split(related[name] back[name] near[name], list, " ")
    for (i = 1; i <= n && count < 6; i++)
        if (kind_of[list[i]] == "function" && !(list[i] in taken)) {
            taken[list[i]] = 1
            text = text (count++ ? ", " : "") "<code>" anchor(list[i]) "</code>"
        }
    n = split(topics[name], list, "\n")
    for (i = 1; i < n; i++)
        text = text (count++ ? ", " : "") "<a href=\"" root page_url["install/docs/calls.md"] "#" \
            slug(list[i]) "\">" escape(list[i]) "</a>"
    return text
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
    top(page_name)
    print body[1] "\n" body[2]
    if (sections) {
        print "<ul class=\"contents\">"
        for (i = 1; i <= tags; i++)
            if ((FILENAME, tag[i]) in section_of && whole_contents(tag[i])) # others hold what is private
                print "<li><a href=\"" href(">>" tag[i]) "\">" tag[i] "</a> " linked(about[tag[i]]) "</li>"
        print "</ul>"
    }
    for (i = 3; i <= lines; i++) print body[i]
    bottom()
}

# Whether it is the only function of its section.
function alone(name) { return functions_of[header_of[name], section_with[name]] == 1 }

# The page of the header lists all sections, others list their own.
function whole_contents(name) { return page_of(FILENAME, "") == here || page_of(FILENAME, name) == here }

BEGIN {
    for (i = 1; i <= names; i++)
        functions_of[header_of[name_of[i]], section_with[name_of[i]]] += kind_of[name_of[i]] == "function"
    for (i = 1; i <= names; i++) {
        name = name_of[i]
        n = split(related[name], list, " ")
        for (k = 1; k <= n; k++) back[list[k]] = back[list[k]] " " name
        if (header_of[name] != ARGV[1]) continue
        line = line_of[name]
        names_at[line]++
        names_of[line, names_at[line]] = name
        if (kind_of[name] != "function") continue
        if (section_with[name] == section_with[before] || alone(name) || alone(before)) {
            near[name] = " " before near[name]
            near[before] = near[before] " " name
        }
        before = name
    }
}
